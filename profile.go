package kvpolicy

// Link is what moving bytes to another instance takes, as published or as
// fitted: an overhead, then a rate. See TransferModel.WithLink.
type Link struct {
	// OverheadSeconds is what a transfer takes before the first byte, in seconds.
	OverheadSeconds float64
	// Bandwidth is in bytes/s.
	Bandwidth float64
}

// Seconds is what moving that many bytes takes.
func (l Link) Seconds(bytes float64) float64 { return l.OverheadSeconds + bytes/l.Bandwidth }

// WithLink is m with overhead and bandwidth of the link. An instance that gives
// a bandwidth of its own still goes by that one.
func (m TransferModel) WithLink(l Link) TransferModel {
	m.OverheadSeconds, m.Bandwidth = l.OverheadSeconds, l.Bandwidth
	return m
}

// LineRate is a link that carries its whole line rate, in Gbit/s, after 0.5 s:
// the overhead of the synthetic fleets of the hazard algorithm note (undated).
// That note's classes are 0.1, 10 and 200 Gbit/s. What a KV connector makes of
// a line is less: see the Mooncake links.
func LineRate(gigabitsPerSecond float64) Link {
	return Link{OverheadSeconds: 0.5, Bandwidth: gigabitsPerSecond * 1e9 / 8}
}

// MooncakeIdle is a Mooncake transfer between idle H20 nodes: 9.7 GB/s after
// 3 ms, for up to 3 GiB; from 6 GiB on 3.4 to 4.5 GB/s were measured.
// (Published beside the elastic-migration-v2 report, undated.)
func MooncakeIdle() Link { return Link{OverheadSeconds: 0.003, Bandwidth: 9.7e9} }

// MooncakeLoaded is the same under load, about 3 GB/s within a node as between
// nodes. (Published beside the elastic-migration-v2 report, undated; no
// overhead is published, and the 3 ms are the idle link's.)
func MooncakeLoaded() Link { return Link{OverheadSeconds: 0.003, Bandwidth: 3e9} }

// MooncakeAssumed is what the report's own gate assumed, and what the presets
// hold: 0.3 s and 2.7 GB/s. (Elastic-migration-v2 report, 2026-05-26.)
func MooncakeAssumed() Link { return Link{OverheadSeconds: 0.3, Bandwidth: 2.7e9} }

// MooncakeObserved is what the report's five separated requests took from
// decision to first token: least squares of their TTFT on the bytes moved gives
// 1.73 s and 0.1226 GB/s. (Fitted to the elastic-migration-v2 report,
// 2026-05-26, result 3; five requests, so only the order of magnitude.)
func MooncakeObserved() Link { return Link{OverheadSeconds: 1.73, Bandwidth: 0.1226e9} }

// Hardware is what one kind of instance was measured to do with one model.
type Hardware struct {
	// Cost is for Policy.Cost.
	Cost CostModel
	// KVBytesPerToken is for Policy.Transfer.KVBytesPerToken.
	KVBytesPerToken float64
	// KVCapacityTokens is the size of the KV pool, for Instance.KVCapacityTokens.
	KVCapacityTokens int64
}

// H20Qwen3Coder30B is an H20 of 96 GB with Qwen3-Coder-30B-A3B in bf16 under
// vLLM 0.18, the setting of the two routing reports:
//
//   - prefill n / 17,759 + 2.711e-9 n^2 seconds, relative least squares over
//     2,048 to 131,072 tokens alone, off by up to 11 % there (published beside
//     the elastic-migration-v2 report, undated). The presets' constant rate of
//     7,000 tokens/s (migration-policy note, undated) meets it near 32,000.
//   - contention 0.05 s a request (migration-policy note, undated).
//   - decode 7.7 ms a token at 8 streams, 130 tokens/s each; 5.9 ms alone
//     (published beside the elastic-migration-v2 report, undated).
//   - KV 98,304 bytes a token: 48 layers, 4 KV heads of 128, 2 bytes; a pool
//     of about 38 GiB, some 419,000 tokens (elastic-migration-v2 report,
//     2026-05-26).
func H20Qwen3Coder30B() Hardware {
	return Hardware{
		Cost: CostModel{
			DecodeIterationSeconds: 0.05,
			PrefillRate:            17_759,
			PrefillQuadratic:       2.711e-9,
			DecodeRate:             1 / 0.0077,
		},
		KVBytesPerToken:  KVBytesPerToken(48, 4, 128, 2),
		KVCapacityTokens: 419_000,
	}
}
