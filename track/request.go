package track

import "github.com/kvpolicy/kvpolicy"

// Request is one attempt at serving one request, as the router sees it.
type Request struct {
	// Request is what the policy looks at. ID must not be empty where the
	// request is begun: the ledger counts by it. ContextTokens is the prompt and
	// RemainingTokens the expected output, 0 where unknown, each at most 1e12
	// tokens; of a request in the ledger Snapshot fills in both as they stand by
	// then, and RunningOn and Hops. Affinity, where left empty, is filled from
	// Session.
	kvpolicy.Request
	// Attempt tells retries and hedges of one request apart, from 0. Each is
	// counted and released on its own.
	Attempt int
	// Session names the conversation that the request is a turn of, for session
	// affinity; empty for none.
	Session string
	// Prompt is the hashed prompt, from Tracker.TokenPrompt or
	// Tracker.TextPrompt. The zero Prompt is an unknown one: nothing of it
	// counts as cached, and nothing is recorded.
	Prompt Prompt
}

// Key is the name under which the ledger counts r.
func (r *Request) Key() Key { return Key{r.ID, r.Attempt} }

// Key names one attempt at one request in the ledger.
type Key struct {
	// ID is the request's.
	ID string
	// Attempt tells retries and hedges apart, from 0.
	Attempt int
}

// maxRequestTokens bounds the tokens of one request, so that no sum over the
// requests that a process can hold overflows.
const maxRequestTokens = 1_000_000_000_000 // 1e12

func (r *Request) validate() error {
	switch {
	case r.ID == "":
		return fieldError("request.id", r.ID, "not be empty: the ledger counts by it")
	case !(r.ContextTokens >= 0 && r.ContextTokens <= maxRequestTokens):
		return fieldError("request.context_tokens", r.ContextTokens, "be 0 to 1e12 tokens")
	case !(r.RemainingTokens >= 0 && r.RemainingTokens <= maxRequestTokens):
		return fieldError("request.remaining_tokens", r.RemainingTokens, "be 0 to 1e12 tokens")
	}
	return nil
}
