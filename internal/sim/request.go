package sim

//go:generate stringer -type=Outcome,ProgressKind -linecomment -output=strings.go

// NoInstance stands where an instance's index could, and there is none.
const NoInstance = -1

// Request is one request: a prompt and how many tokens will be generated.
type Request struct {
	// ID tells requests apart: no two unfinished requests of a cluster may share it.
	ID uint64
	// ArrivalSeconds is when the request reaches the router. Zero or more. The engine
	// only carries it, except for Feed and Inject, which call
	// Listener.Arrived at that time.
	ArrivalSeconds float64
	// PromptTokens is the prompt's length. At least 1.
	PromptTokens int
	// OutputTokens is how many tokens are generated until the end. At least 1.
	OutputTokens int
	// Blocks names the prompt's blocks, and after them those of the output, one
	// identity for every Config.PrefixBlockTokens whole tokens of the two together,
	// in order and chained (an identity stands for all tokens up to its block's
	// end). It may be short or nil: blocks without an identity are never shared.
	// The block in which the prompt ends is one of the output's: a trace that
	// names it by the prompt alone (Mooncake's last hash_id) must be cut before
	// it. What is past the last whole block of prompt and output is not read.
	// The engine keeps the slice until the request ends and never writes to it;
	// requests of a session may share one backing array.
	Blocks []uint64
}

// Outcome is how a request ended.
type Outcome int

// How a request ends: each submitted request in exactly one of these ways.
const (
	// Completed: all of its tokens were generated.
	Completed Outcome = 1 + iota // completed
	// Cancelled: Cancel took it back.
	Cancelled // cancelled
	// Lost: an instance that it needed failed.
	Lost // lost
)

// Record is what became of a request. Listener.Ended gets it, once.
type Record struct {
	// Request is as it was submitted.
	Request Request
	// Outcome is how it ended.
	Outcome Outcome
	// Instance is where it decodes, PrefillInstance where its prefill was sent
	// by SubmitSeparated, else NoInstance.
	Instance, PrefillInstance int
	// DispatchSeconds is when it was submitted, EndSeconds when it ended.
	DispatchSeconds, EndSeconds float64
	// FirstTokenSeconds is when its first token came out; 0 where
	// GeneratedTokens is 0.
	FirstTokenSeconds float64
	// GeneratedTokens is how many tokens came out: OutputTokens if Completed.
	GeneratedTokens int
	// CachedTokens is how much of the prompt was found in the prefix cache when its
	// prefill started for the first time (on PrefillInstance, if there is one).
	CachedTokens int
	// PrefilledTokens is how many tokens were computed as prefill for it, on
	// all instances, those after a preemption included.
	PrefilledTokens int
	// Preemptions is how often it lost its KV cache to others and had to start over.
	Preemptions int
	// TransferTokens is what was moved from PrefillInstance, TransferSeconds how
	// long that took, waiting for blocks at the destination not included. Both 0 without a
	// finished transfer.
	TransferTokens  int
	TransferSeconds float64
}

// ProgressKind is what a Progress tells of.
type ProgressKind int

// What is told of a request before its end.
const (
	// Started: it left the queue and its prefill began, with Tokens of it cached;
	// again after a preemption, and on each of its two instances if separated.
	Started ProgressKind = 1 + iota // started
	// FirstToken: its first token came out.
	FirstToken // first_token
	// Preempted: it lost its KV cache to others and went back to the queue's front.
	Preempted // preempted
	// Prefilled: its prefill on the source of SubmitSeparated is done.
	Prefilled // prefilled
	// TransferStarted: blocks are reserved at the destination, Tokens are on
	// their way from the source.
	TransferStarted // transfer_started
	// TransferEnded: they are there.
	TransferEnded // transfer_ended
	// TransferAbandoned: the source needed the room before the destination had any;
	// the destination does the prefill itself.
	TransferAbandoned // transfer_abandoned
)

// Progress is something that happened to a request before its end, at
// Seconds, on Instance.
type Progress struct {
	Kind     ProgressKind
	ID       uint64
	Instance int
	Seconds  float64
	// Tokens is a count that the kind explains, else 0.
	Tokens int
}

// Listener is told what happens. Calls come between events, in order of time;
// they may call anything on the Cluster but Step and Run.
type Listener interface {
	// Arrived: a request of Feed or Inject has arrived; Cluster.Now is its
	// ArrivalSeconds. Nothing happens to it until it is submitted.
	Arrived(Request)
	// Progress: something happened to a submitted request.
	Progress(Progress)
	// Ended: a submitted request is through, and forgotten by the engine.
	Ended(Record)
}

// State is the truth about an instance at one moment. Requests on their way through
// the front end or waiting for a transfer count as waiting, at the
// instance that they wait for; a request that is being prefilled elsewhere
// counts only there.
type State struct {
	// Up is false between Fail and Restore; all else is 0 then.
	Up bool
	// UptimeSeconds is the time since the start or the last Restore.
	UptimeSeconds float64
	// Running and Waiting count requests in the batch and before it.
	Running, Waiting int
	// ActiveDecodes counts the streams that are past their first token.
	ActiveDecodes int
	// PendingPrefillTokens is the prefill still to be computed here:
	// of those waiting what is not cached here now, of those in the batch what
	// is not done at the last step's end.
	PendingPrefillTokens int
	// OngoingTokens is the context, prompt and generated tokens, of the
	// unfinished requests.
	OngoingTokens int
	// KVUsedTokens is the part of the pool held by requests and transfers, shared
	// blocks counted once, cached blocks that nobody holds not at all (as
	// vLLM's kv_cache_usage_perc); KVCapacityTokens is the whole.
	KVUsedTokens, KVCapacityTokens int
	// CachedTokens is the part of the pool with reusable prefixes that nobody holds.
	CachedTokens int
}
