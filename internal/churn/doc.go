// Package churn simulates requests on nodes that come and go: laptops that are
// closed, spot instances that are reclaimed, servers that rarely fail. It is
// what the example of the same name compares policies with.
//
// # What is simulated
//
// A Scenario is drawn once, by a seed, and every strategy runs on the same one:
// nodes with their sessions (up from, up until), and requests with their
// arrival, prompt, output, and an estimate of the output. Run plays it by one
// strategy, event by event: no time steps, so nothing happens between them.
//
// A node serves one request at a time, at its full rates, and the others wait
// in the order in which they came. That is the model that the hazard algorithm
// note prices: T = queue wait + context / prefill rate + remaining / decode
// rate, with rates that do not depend on the load. It is also what a laptop
// does. So what a strategy pays for are its guesses (the output's length, the
// node's end), not a contention that its cost does not know; batched serving
// is another simulator's subject.
//
//   - KV: a request holds its context's KV from its prefill on. One that would
//     outgrow its node's pool is sent elsewhere, as after a loss, and is counted
//     as an overflow. No request is longer than the largest pool of the fleet.
//     KV that is on its way over a link is not counted.
//   - A node's end loses every request there, those that wait too: each stands
//     still for the stall penalty, then the strategy places it anew. The tokens
//     generated are known to the gateway, the KV is gone: prefill starts over
//     the whole context, after the recompute overhead if any of it had been built.
//   - A planned move by recompute puts the request at the end of the
//     destination's line, and leaves the source at once. By transfer, the request
//     stands still while its KV is on the link, and the source keeps it until it
//     has arrived: if the source ends first, the request is lost; if the
//     destination does, it goes back to the head of the source's line. KV that
//     finds no room is dropped, and is recomputed in its turn.
//   - With overlap the source decodes on. Rounds are those of SPEC section 6.4,
//     each copying what was decoded in the one before; a recompute's rounds take
//     the destination's turn in its line, a transfer's the link, which is shared
//     with nobody. If the source ends before the hand-off, the copy is worth
//     nothing; if the destination does, or the request finishes first, nothing
//     but the effort is lost.
//   - Strategies see estimates: of a request that has outrun its own, one token
//     is left. Waits are priced by the estimates of those ahead.
//   - A request for which no node is up, or none is large enough, waits for the
//     next that comes up.
//
// Events at one time run in this order: ends of service and of copying, ends of
// nodes, beginnings of nodes, placements, checks; then in the order in which
// they were scheduled.
package churn
