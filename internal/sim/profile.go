package sim

import (
	"fmt"
	"math"
)

// Profile is one serving instance in numbers: the hardware, the model on it and
// the settings of its server. Every time is in seconds, every size in tokens or
// bytes. H20 is the profile that the published measurements belong to; another
// is made by changing fields of it. New checks every field.
//
// Sources in the comments: [M] is the report on unified routing, [V2] the one on
// elastic migration, [P] what the same groups published beside them; docs/engine.md
// has the figures. "vLLM" is that server's source, "ours" a choice or a fit of
// this package, with its reason.
type Profile struct {
	// StepTokens is the token budget of a step, shared by the decodes (one
	// token each, first) and the chunks of prefill. At least 1. H20: 8,192 [M].
	StepTokens int
	// MaxRunning is how many requests may be in the batch at once
	// (max_num_seqs). At least 1. H20: 1,024, vLLM's default behind its API
	// server on GPUs of 70 GiB and more.
	MaxRunning int
	// ReserveWholePrompt admits a request only if the whole of its prompt fits into
	// the pool at that moment, else it is enough that its first chunk does. H20: false, as
	// in vLLM before its scheduler_reserve_full_isl (pull request 37307, March 2026),
	// which later became the default. Where pools run full it makes for far fewer
	// preemptions.
	ReserveWholePrompt bool
	// BlockTokens is the KV pool's unit of allocation. At least 1. H20: 16, vLLM's
	// default.
	BlockTokens int
	// KVCapacityTokens is the size of the KV pool, rounded down to whole
	// blocks. At least one block. H20: 419,000 ("about 419k" [M]; 38 GiB, the
	// other figure there, would be 415,061).
	KVCapacityTokens int
	// KVBytesPerToken is what a transfer moves for a token, in bytes. More than 0.
	// H20: 98,304 = 48 layers * 2 * 4 KV heads * 128 * 2 bytes [M].
	KVBytesPerToken float64

	// FrontendSeconds and FrontendSecondsPerToken are the time between a
	// request's dispatch and its place in the scheduler's queue (HTTP,
	// tokenising, hashing), fixed and per prompt token, cached or not. The GPU
	// does not notice it. Zero or more. H20: 20 ms and 1.28 us (ours: a 64k
	// prompt that is wholly cached still takes 0.11 s [P], which fixes the
	// sum; the split is the one free parameter with which the five
	// published stream token times come out, docs/engine.md).
	FrontendSeconds         float64
	FrontendSecondsPerToken float64

	// StepSeconds is the time of a step before any token in it: launches and the
	// weights. More than 0. H20: 5.643 ms, DecodeSeconds is 0.257 ms: together
	// 5.9 ms a token alone and 7.7 ms at 8 streams [P].
	StepSeconds float64
	// DecodeSeconds is the time that each decoding stream adds to a step. Zero or
	// more.
	DecodeSeconds float64
	// KVReadSeconds is the time that each token of a decoding stream's context
	// adds to a step. Zero or more. H20: 24.6 ns = 98,304 bytes at the
	// data sheet's 4.0 TB/s (ours: the context of the published
	// decode times is not given, so they are read as short).
	KVReadSeconds float64
	// PrefillSeconds and PrefillQuadraticSeconds are l and q of the time
	// l*n + q*((p+n)^2 - p^2) that n tokens of prefill from position p on add to a
	// step. Zero or more. H20: 46.5 us and 2.851e-9 s (ours: relative least
	// squares over the five published times of a prefill alone [P], the frontend
	// and a StepSeconds for each chunk taken off).
	PrefillSeconds          float64
	PrefillQuadraticSeconds float64

	// ConnectorLoaded says that the server runs with a KV connector: needed at
	// both ends of SubmitSeparated, and paid for at every step.
	ConnectorLoaded bool
	// ConnectorStepSeconds is the time that a loaded connector adds to every step. Zero
	// or more. H20: 1.4 ms [P].
	ConnectorStepSeconds float64
	// ConnectorBufferBytes is what a loaded connector takes from the KV pool. Zero or
	// more. H20: 1e9, the buffer that [V2] names (its Result 1).
	ConnectorBufferBytes float64
	// Transfer is how long KV takes from one instance to another.
	Transfer Transfer
}

// Transfer is the time that a KV transfer takes by its size. A transfer is
// loaded where, at its start, either end has a request in its batch or another transfer; else it is
// idle. It takes the slower of its two ends' times. Overheads are zero or more seconds, rates more than 0
// bytes/s.
type Transfer struct {
	// LoadedOverheadSeconds and LoadedBytesPerSecond: overhead + bytes / rate.
	// H20: 0.3 s [V2] and 3e9 [P].
	LoadedOverheadSeconds float64
	LoadedBytesPerSecond  float64
	// IdleOverheadSeconds and IdleBytesPerSecond: the same of an idle transfer
	// of up to IdleKneeBytes. H20: 3 ms, 9.7e9, 3 GiB [P].
	IdleOverheadSeconds float64
	IdleBytesPerSecond  float64
	IdleKneeBytes       float64
	// IdleLargeBytesPerSecond is the average rate of an idle transfer of IdleLargeBytes
	// and more; between the two sizes the time is interpolated. H20: 4e9
	// from 6 GiB on ("3.4 to 4.5 GB/s" [P]). IdleLargeBytes is at least IdleKneeBytes.
	IdleLargeBytes          float64
	IdleLargeBytesPerSecond float64
}

// Seconds is the time that the transfer of so many bytes takes.
func (t Transfer) Seconds(bytes float64, loaded bool) float64 {
	if loaded {
		return t.LoadedOverheadSeconds + bytes/t.LoadedBytesPerSecond
	}
	small := func(b float64) float64 { return t.IdleOverheadSeconds + b/t.IdleBytesPerSecond }
	switch {
	case bytes <= t.IdleKneeBytes:
		return small(bytes)
	case bytes >= t.IdleLargeBytes:
		return bytes / t.IdleLargeBytesPerSecond
	}
	low, high := small(t.IdleKneeBytes), t.IdleLargeBytes/t.IdleLargeBytesPerSecond
	share := (bytes - t.IdleKneeBytes) / (t.IdleLargeBytes - t.IdleKneeBytes)
	return low + float64(share*(high-low))
}

// H20 is an NVIDIA H20 (96 GB) with Qwen3-Coder-30B-A3B in bf16 under vLLM 0.18
// without a connector: the setting of the published measurements.
func H20() Profile {
	return Profile{
		StepTokens:              8192,
		MaxRunning:              1024,
		BlockTokens:             16,
		KVCapacityTokens:        419_000,
		KVBytesPerToken:         98_304,
		FrontendSeconds:         0.020,
		FrontendSecondsPerToken: 1.28e-6,
		StepSeconds:             5.9e-3 - 1.8e-3/7,
		DecodeSeconds:           1.8e-3 / 7,
		KVReadSeconds:           98_304 / 4.0e12,
		PrefillSeconds:          46.5e-6,
		PrefillQuadraticSeconds: 2.851e-9,
		ConnectorStepSeconds:    1.4e-3,
		ConnectorBufferBytes:    1e9,
		Transfer: Transfer{
			LoadedOverheadSeconds:   0.3,
			LoadedBytesPerSecond:    3e9,
			IdleOverheadSeconds:     3e-3,
			IdleBytesPerSecond:      9.7e9,
			IdleKneeBytes:           3 << 30,
			IdleLargeBytes:          6 << 30,
			IdleLargeBytesPerSecond: 4e9,
		},
	}
}

// capacityBlocks is the KV pool in blocks, after the connector's buffer.
func (p *Profile) capacityBlocks() int {
	tokens := float64(p.KVCapacityTokens)
	if p.ConnectorLoaded {
		tokens -= p.ConnectorBufferBytes / p.KVBytesPerToken
	}
	return int(math.Floor(tokens / float64(p.BlockTokens)))
}

// prefillSeconds is what n tokens of prefill from a position on add to a step.
func (p *Profile) prefillSeconds(position, n int) float64 {
	a, b := float64(position), float64(position+n)
	return float64(p.PrefillSeconds*float64(n)) + float64(p.PrefillQuadraticSeconds*(float64(b*b)-float64(a*a)))
}

// stepSeconds is the time of a step with k decoding streams that read so many
// tokens of context together, before prefill.
func (p *Profile) stepSeconds(k int, context float64) float64 {
	s := p.StepSeconds + float64(p.DecodeSeconds*float64(k)) + float64(p.KVReadSeconds*context)
	if p.ConnectorLoaded {
		s += p.ConnectorStepSeconds
	}
	return s
}

// Bounds that keep every time finite, and the tokens of a request in an int of 32 bits.
const (
	maxTokens  = 1 << 28
	maxSeconds = 1e9
	maxBytes   = 1e18
)

// validate names the first field that is out of its range.
func (p *Profile) validate() error {
	for _, f := range []struct {
		name      string
		value     float64
		low, high float64
	}{
		{"StepTokens", float64(p.StepTokens), 1, maxTokens},
		{"MaxRunning", float64(p.MaxRunning), 1, float64(p.StepTokens)}, // so that each decode has its token, as vLLM asks
		{"BlockTokens", float64(p.BlockTokens), 1, maxTokens},
		{"KVCapacityTokens", float64(p.KVCapacityTokens), 1, maxTokens},
		{"KVBytesPerToken", p.KVBytesPerToken, 1e-9, maxBytes},
		{"FrontendSeconds", p.FrontendSeconds, 0, maxSeconds},
		{"FrontendSecondsPerToken", p.FrontendSecondsPerToken, 0, maxSeconds},
		{"StepSeconds", p.StepSeconds, 1e-9, maxSeconds},
		{"DecodeSeconds", p.DecodeSeconds, 0, maxSeconds},
		{"KVReadSeconds", p.KVReadSeconds, 0, maxSeconds},
		{"PrefillSeconds", p.PrefillSeconds, 0, maxSeconds},
		{"PrefillQuadraticSeconds", p.PrefillQuadraticSeconds, 0, maxSeconds},
		{"ConnectorStepSeconds", p.ConnectorStepSeconds, 0, maxSeconds},
		{"ConnectorBufferBytes", p.ConnectorBufferBytes, 0, maxBytes},
		{"Transfer.LoadedOverheadSeconds", p.Transfer.LoadedOverheadSeconds, 0, maxSeconds},
		{"Transfer.LoadedBytesPerSecond", p.Transfer.LoadedBytesPerSecond, 1e-9, maxBytes},
		{"Transfer.IdleOverheadSeconds", p.Transfer.IdleOverheadSeconds, 0, maxSeconds},
		{"Transfer.IdleBytesPerSecond", p.Transfer.IdleBytesPerSecond, 1e-9, maxBytes},
		{"Transfer.IdleKneeBytes", p.Transfer.IdleKneeBytes, 0, maxBytes},
		{"Transfer.IdleLargeBytes", p.Transfer.IdleLargeBytes, p.Transfer.IdleKneeBytes, maxBytes},
		{"Transfer.IdleLargeBytesPerSecond", p.Transfer.IdleLargeBytesPerSecond, 1e-9, maxBytes},
	} {
		if !(f.value >= f.low && f.value <= f.high) {
			return fmt.Errorf("%s is %v, must be from %v to %v", f.name, f.value, f.low, f.high)
		}
	}
	if p.capacityBlocks() < 1 {
		return fmt.Errorf("KVCapacityTokens is %d, must leave a block of the pool after the connector's buffer", p.KVCapacityTokens)
	}
	return nil
}
