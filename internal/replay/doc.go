// Package replay sends a workload through simulated instances behind a router
// that decides by a policy, and says what came of it.
//
// One Run is one policy on one seed of one workload: it has no clock, no random
// source but its seed and no goroutine, so equal Configs give equal Results,
// bit for bit, and several Runs can go on at once. Policies are compared by
// Runs that differ in nothing but the Policy: the arrivals are the same then.
//
// # What the router knows
//
// A router is not told the truth. Unless View says otherwise it knows
//
//   - of each instance what it remembers of its own requests: how many are
//     unfinished; the tokens that it expected to be new to the cache, of
//     requests whose first token has not come; the prompt tokens of all; and
//     how many are past their first token;
//   - the KV pool's use as of the last scrape, which is ScrapeSeconds apart and
//     DelaySeconds old when it arrives;
//   - what each instance may have cached, from an index of the prompts that it
//     sent there, bounded like the pool and filled at dispatch, so that a prompt
//     that still waits there counts as cached. It is a guess: what the instance
//     evicts is not in it, and neither is what it generates;
//   - where the session's last turn went.
//
// It does not know how many tokens a request will generate: the decision is
// taken with remaining_tokens = 0. The counts are those of Snapshot.Apply: a
// request whose prefill is done elsewhere counts as a request of its target
// from the start, and its prefill as pending at the source.
//
// # Memory
//
// What a Run holds depends on the requests in flight, the pools and the size of
// the sketches, not on the length of the workload.
package replay
