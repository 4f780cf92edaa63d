package workload

import (
	"fmt"
	"math"

	"github.com/kvpolicy/kvpolicy"
)

// Request is one turn of one session, due to be sent.
type Request struct {
	// ID is Session * 2^20 + Turn: unique in the workload, and the same under
	// every policy and pacing.
	ID uint64
	// Session numbers the session, from 0. It is the key for session affinity:
	// in a trace without sessions every request is a session of its own.
	Session int64
	// Turn numbers the session's requests, from 0.
	Turn int
	// ArrivalSeconds is when the request is sent, from the start of the replay.
	ArrivalSeconds float64
	// InputTokens is the prompt's length, at least 1.
	InputTokens int
	// OutputTokens is how many tokens will be generated, at least 1. A router
	// must not read it: it is known only afterwards.
	OutputTokens int
	// Blocks is the chain of block hashes: InputTokens / BlockTokens of them
	// for the prompt, rounded down, and those that generation fills where known.
	// It belongs to the request and is not written again.
	Blocks []uint64
}

// Pacing is what a turn waits for.
type Pacing int

//go:generate stringer -type=Pacing -linecomment

const (
	// TraceTime sends every turn at its own time in the trace, however slow
	// the answers are (open loop).
	TraceTime Pacing = 1 + iota // trace-time
	// ClosedLoop sends a session's first turn at its time in the trace, and
	// each later one its own gap after the end of the turn that it follows: the
	// think time of the user or the tool. A slow system so delays what it is
	// sent, as it does in truth.
	ClosedLoop // closed-loop
)

// MarshalText gives the pacing's word.
func (p Pacing) MarshalText() ([]byte, error) {
	if p != TraceTime && p != ClosedLoop {
		return nil, &kvpolicy.FieldError{Path: "pacing", Value: p.String(), Want: wantPacing}
	}
	return []byte(p.String()), nil
}

// UnmarshalText reads "trace-time" or "closed-loop"; anything else is a
// FieldError.
func (p *Pacing) UnmarshalText(text []byte) error {
	for _, known := range []Pacing{TraceTime, ClosedLoop} {
		if known.String() == string(text) {
			*p = known
			return nil
		}
	}
	return &kvpolicy.FieldError{Path: "pacing", Value: string(text), Want: wantPacing}
}

const wantPacing = "be trace-time or closed-loop"

// Options say which part of a workload is sent and how fast. The zero value
// but for Pacing sends all of it as the source has it.
type Options struct {
	// Pacing is required.
	Pacing Pacing
	// Seed makes paired replications: equal seeds give equal requests.
	// The generator draws everything from it. The sessions CSV draws from it
	// the order of the sessions and their starts, a Poisson process. In a trace
	// with times of its own, 0 keeps them as recorded, and any other seed moves
	// the start of every session (every request, where there are no sessions)
	// later by its own uniform draw from [0, ShiftSeconds): the same requests
	// and the same turns within a session, met in another order. Such
	// replications show how much an outcome owes to the moment of arrival; they
	// do not show how it would vary over other days' requests.
	Seed uint64
	// LoadFactor is the offered load relative to the trace's: starts of sessions
	// are divided by it, and with TraceTime the times of their later turns too.
	// Gaps of ClosedLoop are not: thinking does not speed up with load.
	// From 1e-6 to 1e6; 0 = 1.
	LoadFactor float64
	// FromSeconds and UntilSeconds keep the requests whose trace time lies in
	// [FromSeconds, UntilSeconds), and make FromSeconds the replay's 0. A
	// session cut at its front goes on with its first turn that is kept.
	// At least 0; UntilSeconds 0 = to the end.
	FromSeconds, UntilSeconds float64
	// MaxRequests keeps the first so many of those in order of trace time;
	// 0 = all.
	MaxRequests int
	// MaxContextTokens leaves out requests whose prompt and output together are
	// longer, as a server refuses them that is started with that maximum model
	// length: their clients have their answer at once and go on. 0 = none.
	MaxContextTokens int
	// SessionsPerSecond is the mean rate at which sessions of the sessions CSV
	// start, in trace time; from 1e-9 to 1e6. 0 = 0.01 (ours: the file does not
	// say when its sessions started; at the mean length of its sessions, 6,900 s,
	// about 70 are then open at a time). Other sources do not read it.
	SessionsPerSecond float64
	// ShiftSeconds bounds the shifts of Seed. 0 = 10 (ours: a little more
	// than the 3 s in which Mooncake's trace bundles its arrivals). At most 1e6.
	ShiftSeconds float64
}

// withDefaults checks every field and fills in what zero stands for.
func (o Options) withDefaults() (Options, error) {
	if o.Pacing != TraceTime && o.Pacing != ClosedLoop {
		return o, &kvpolicy.FieldError{Path: "pacing", Value: o.Pacing.String(), Want: wantPacing}
	}
	fields := []struct {
		path      string
		value     *float64
		zero      float64
		low, high float64
	}{
		{"load_factor", &o.LoadFactor, 1, 1e-6, 1e6},
		{"from_seconds", &o.FromSeconds, 0, 0, 1e12},
		{"until_seconds", &o.UntilSeconds, math.Inf(1), 0, math.Inf(1)},
		{"sessions_per_second", &o.SessionsPerSecond, 0.01, 1e-9, 1e6},
		{"shift_seconds", &o.ShiftSeconds, 10, 0, 1e6},
	}
	for _, f := range fields {
		if *f.value == 0 {
			*f.value = f.zero
		}
		if !(*f.value >= f.low && *f.value <= f.high) {
			return o, &kvpolicy.FieldError{Path: f.path, Value: fmt.Sprint(*f.value), Want: fmt.Sprintf("be 0 or from %g to %g", f.low, f.high)}
		}
	}
	if !(o.UntilSeconds > o.FromSeconds) {
		return o, &kvpolicy.FieldError{Path: "until_seconds", Value: fmt.Sprint(o.UntilSeconds), Want: "be after from_seconds"}
	}
	if o.MaxRequests < 0 {
		return o, &kvpolicy.FieldError{Path: "max_requests", Value: fmt.Sprint(o.MaxRequests), Want: "be at least 0"}
	}
	if o.MaxContextTokens < 0 {
		return o, &kvpolicy.FieldError{Path: "max_context_tokens", Value: fmt.Sprint(o.MaxContextTokens), Want: "be at least 0"}
	}
	return o, nil
}

// Workload is a source of sessions: a trace or the generator. It is never
// written after it was made.
type Workload struct {
	name        string
	blockTokens int
	open        func(Options) (source, error)
}

// Name says what the workload is, for a table's heading: the trace's name, or
// "agentic".
func (w *Workload) Name() string { return w.name }

// BlockTokens is how many tokens one hash of Request.Blocks stands for.
func (w *Workload) BlockTokens() int { return w.blockTokens }

// turnBits bounds a session to 2^20 turns, so that a request's ID holds both.
const (
	turnBits = 20
	maxTurns = 1 << turnBits
)

// source gives sessions in ascending order of their base time.
type source interface {
	// next gives the next session, or io.EOF.
	next() (*session, error)
	// close releases what the source holds open.
	close() error
}

// session is a plan: what will be sent, and how its prompts are made.
type session struct {
	id int64
	// base orders the sessions of a source; start, never less, is the trace
	// time at which the session starts once the seed has moved it.
	base, start float64
	turns       []turn
	// seed of the session's own tokens, and of the system prompt that its chain
	// begins with.
	own, system seed
	// systemBlocks is the length of that system prompt in whole blocks.
	systemBlocks int
}

// turn is one request of a plan.
type turn struct {
	// after is the turn of this session that this one follows, -1 for none.
	after int
	// offset is the trace time since the session's start; gap the time from the
	// end of the turn it follows.
	offset, gap   float64
	input, output int
	// ids are the prompt's blocks as the source names them. Without them the
	// chain is made: the first keep blocks of the turn before, then new ones up
	// to total.
	ids         []int64
	keep, total int
}
