// Package track remembers what a router must remember between decisions, to
// fill a kvpolicy.Snapshot: which requests are in flight where, what each
// instance caches of a prompt, where a session was last, what was scraped and
// how old that is, how long nodes live.
//
// # The loop
//
// A router makes one Tracker, and for each request:
//
//	prompt := tracker.TokenPrompt(nil, salt, ids)      // or TextPrompt
//	request := track.Request{Session: session, Prompt: prompt}
//	request.ID, request.ContextTokens, request.RemainingTokens = id, int64(len(ids)), expected
//	decision, err := policy.Decide(tracker.Snapshot(request, time.Now(), buffer))
//	// 400 on err; 429 or 503 on decision.Action == kvpolicy.Reject
//	err = tracker.Begin(request, decision, time.Now()) // before it is sent
//	defer func() { tracker.End(request.Key(), time.Now()) }() // on every way out
//	// send to decision.Target
//	tracker.FirstToken(request.Key(), time.Now())
//	tracker.Progress(request.Key(), generated, time.Now()) // now and then; total so far
//
// A retry is another attempt: End the old one, count Request.Attempt up, take a
// new snapshot, decide, Begin. To keep it off the instance that failed, set
// Unavailable on that one in the snapshot. Beside the requests, a router calls
//
//	Join, Leave            as discovery finds and loses instances
//	SetState               as health checks fail and recover, or an instance drains
//	Observe                with each scrape of an instance's metrics
//	BlocksStored, BlocksRemoved, BlocksCleared   with KV events, where engines publish them
//	FitCurves              about once a minute, where the policy has a hazard model
//	Stats                  for its own metrics
//
// # Which signal goes where
//
//	kvpolicy.Instance      comes from
//	Requests               the ledger, and Foreign of the last scrape on top
//	PendingPrefillTokens   the ledger: what was not cached of prompts begun and not yet decoding
//	OngoingTokens          the ledger; for Foreign requests, KV in use beyond it, a guess
//	ActiveDecodes          the ledger: FirstToken or Progress seen, not ended
//	CachedTokens           the prefix index: prompts begun there, and KV events
//	KVCapacityTokens       Metrics.Blocks * Metrics.BlockTokens, else InstanceInfo
//	KVUsedTokens           Metrics.KVUsage * capacity, and what the ledger took and freed since
//	UptimeSeconds          InstanceInfo.StartedAt, else Metrics.StartedAt, else since it joined
//	MetricsAgeSeconds      since the last Observe that told of load; 1e12 before the first
//	Unavailable            SetState
//	rates, bandwidth       InstanceInfo
//	WaitSeconds            nothing: a caller that knows of a wait sets it in the snapshot
//
// A field that another source knows better may be set in the snapshot before it
// is decided on: it is the caller's until the buffer's next use.
//
// # Reconciliation, and drift
//
// The ledger is this router's alone and up to date; the scrape is the whole
// server's and old. They are never summed: what the server had at the scrape
// beyond what the ledger had then is Foreign, and is added to the ledger as it
// is now. The ledger in turn may hold requests that are gone: see Observe for
// phantoms and restarts. Watch Stats: phantoms that keep coming mean an End is
// missing somewhere, Foreign that never falls to 0 means another router, or a
// server that goes on generating for clients that have gone.
//
// An instance that was never scraped reads as idle. Its metrics are therefore
// infinitely old, and a policy with MaxMetricsAgeSeconds prefers any that was
// scraped. A router that scrapes nothing leaves that at 0.
//
// # What is a guess
//
// A prompt counts as cached where it was sent from the moment it is begun, since
// it will be by the time that a later request with the same prefix gets its
// turn; that the engine has evicted it since is known only from KV events.
// Blocks fall out of the index by least recent use, as they do in engines.
//
// A response that does not stream shows no first token, so that its prefill
// would count as pending until it ends. A router can ask the server to stream
// nevertheless, or call Prefilled when the decision says that the prefill should
// be done: after Cost.Contention + Cost.Queue + Cost.Prefill seconds.
//
// Cached lengths of text are estimates (see TextPrompt), those of token ids are
// exact to within a block, as far as the index knows (see Prompt).
//
// # Time and memory
//
// Times are arguments; there is no clock inside, and no goroutine. Begin takes
// time in proportion to the prompt's blocks, as do TokenPrompt and TextPrompt,
// which take no lock. Snapshot takes time in proportion to the instances, and
// searches the prompt's blocks once for each 64 of them: by bisection, or, once
// one of them has sent KV events, block by block as far as anybody holds them.
// It allocates nothing. All else about a request takes constant time, save that
// a snapshot of one in the ledger looks at the requests beside it. Observe looks
// at the instance's requests only where the ledger has more than the server.
// BenchmarkDecisions measures a whole router's work.
//
// A block in the prefix index takes BytesPerPrefixBlock bytes for each instance
// that holds it; an instance holds Config.PrefixBlocks at most.
package track

// BytesPerPrefixBlock is about what one block of one instance takes in the
// prefix index, in bytes, measured on 64-bit machines: the entry in its
// least-recently-used list, and its share of the map of holders where it is
// the only one. KV events double it: they keep the engine's name for each.
const BytesPerPrefixBlock = 160
