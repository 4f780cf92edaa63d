// Package sim is an event-driven model of a cluster of vLLM-like serving
// instances: continuous batching, chunked prefill, a KV pool in blocks with
// prefix caching, preemption, prefill on another instance, failures. It knows
// nothing of routing policies: whoever drives it says where each request goes.
// docs/engine.md has the equations, their sources and what is left out.
//
// # Overview
//
//	cluster, err := sim.New(sim.Config{
//		Instances:         []sim.Profile{sim.H20(), sim.H20()},
//		PrefixBlockTokens: 512,
//		Listener:          router, // Arrived, Progress, Ended
//	})
//	cluster.Feed(next)       // func() (sim.Request, bool): pulled one at a time, in order of arrival
//	for cluster.Step() {     // one event; stop whenever a context says so
//	}
//
// At a request's arrival time the cluster calls Listener.Arrived. The router
// then reads what it wants to read (State, CachedTokens, or what it remembers
// itself), and says where the request goes, at once or later from At:
//
//	Submit(request, target)                    prefill and decode on target
//	SubmitSeparated(request, source, target)   prefill on source, KV cache moved, decode on target
//
// From then on the engine owns the request, until Listener.Ended reports it
// exactly once: Completed, Cancelled (Cancel) or Lost (Fail). Progress tells of
// first tokens, preemptions, prefills done elsewhere and transfers. A lost
// request may be submitted again, under the same identity or another.
//
// At(seconds, f) runs f at a time: scrapes of metrics with a delay, timeouts.
// Inject(request) makes a request arrive at its ArrivalSeconds: the next turn
// of a session in a closed loop, called from Ended. Fail and Restore take an
// instance down and bring it back empty.
//
// Callbacks run between events, when every instance is in a consistent state,
// and may call anything on the Cluster but Step and Run. Reading (State,
// CachedTokens) never changes what happens next.
//
// # Time and order
//
// Simulated seconds as float64, from 0. Events at the same time run in the order
// in which they were scheduled. There is no random source, no wall clock, no
// goroutine and no iteration over a map: the same calls give the same bits. A
// Cluster must not be used from two goroutines at once.
//
// # Prompts
//
// A prompt is a length in tokens and a chain of block identities
// (Request.Blocks), one for every Config.PrefixBlockTokens tokens. The identities are
// chained, as vLLM's block hashes are: two requests with the same identity at
// position i share all their tokens up to the end of block i. Mooncake's hash_ids
// and Bailian's are such chains, but for a last one that names only a part of a
// block: leave it out. Blocks past the prompt name those that the generated
// tokens will fill, so that the next turn of the session finds them.
package sim
