// Package kvpolicy decides, for the serving of large language models, where a
// request should run: which instance takes it, whether another one should do
// the prefill and ship the KV cache, and whether a running request should move,
// by transfer or by recompute, before its node disappears. Each decision says
// why.
//
// # Use
//
// Fill a Snapshot with one request and the instances it could go to, call
// Decide, and act on the Decision:
//
//	policy := kvpolicy.Unified()       // a preset, to be changed by assignment
//	policy.Cost.PrefillRate = 17_000   // tokens/s on this hardware
//
//	decision, err := policy.Decide(kvpolicy.Snapshot{
//		Request: kvpolicy.Request{ID: "r1", ContextTokens: 32_000, Affinity: "gpu-3"},
//		Instances: []kvpolicy.Instance{
//			{ID: "gpu-1", Requests: 2, OngoingTokens: 30_000},
//			{ID: "gpu-3", Requests: 4, OngoingTokens: 52_000, CachedTokens: 31_000},
//		},
//	})
//	if err != nil {
//		return err // a *FieldError: the snapshot or the policy is wrong, and where
//	}
//	if decision.Action != kvpolicy.Reject {
//		send(decision.Target) // gpu-3, affinity_kept
//	}
//
// Policy.Explain prices every instance term by term. Snapshot.Apply gives the
// snapshot that follows a decision, for a burst that is decided on one scrape.
//
// # Units
//
// Tokens and counts are int64, times float64 seconds, rates tokens/s, sizes
// bytes, bandwidths bytes/s. Every cost is in seconds.
//
// # What a decision depends on
//
// On the policy and the snapshot alone. There is no clock, random source,
// global state or goroutine in the package; time and age are inputs. The order
// of the instances changes nothing. A Policy is a plain value that goroutines
// may share, Decide never writes its input, and it allocates nothing (beyond
// 12,288 instances, one table).
//
// Invariant: the same policy and snapshot give the same decision in every
// process; and on every architecture, but for ties of a hazard model's losses
// that are closer than the last bit of an exponential.
//
// # Ties
//
// Candidates are ordered by score, then by the tokens they would have to
// prefill, then by requests, then by ongoing tokens, each ascending. What is
// still equal is ordered by a fixed 64-bit hash of the policy's seed, the
// request's id and the instance's id, and last by the instance's id: equal
// instances share many requests evenly, without a counter to keep.
//
// # What a cost model cannot know
//
// The constants are measurements of some hardware at some load: fit your own,
// and watch predicted against actual. A published transfer model was wrong by
// 10 to 20 times under load (elastic-migration-v2 report), which no formula
// shows.
//
// # Sources
//
// Three published notes are put on one cost: the migration-policy note
// (unified routing, affinity gates), the elastic-migration-v2 report
// (PD-separation gates) and the hazard algorithm note (expected loss,
// pre-emptive migration). What none of them says is marked as ours. The
// sections named in the comments are those of docs/specification.md.
package kvpolicy
