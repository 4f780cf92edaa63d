package kvpolicy

import (
	"fmt"
	"math"
)

// Snapshot is everything one decision looks at: one request at one instant,
// and every instance that it could be sent to. It is plain data. Decide reads
// it and never writes it; the order of the instances is of no consequence.
// (SPEC section 1.)
type Snapshot struct {
	// Request is the request to decide on.
	Request Request
	// Instances are the serving instances, in any order, each id once. An
	// empty list is legal: the decision is then a reject.
	Instances []Instance
}

// Request is the request to decide on: a new one, or one that runs already.
type Request struct {
	// ID names the request. It seeds the hash that breaks ties, so that equal
	// instances share equal requests evenly; it may be empty, and then ties
	// always fall the same way.
	ID string `json:"id,omitempty"`
	// ContextTokens is the number of tokens whose KV must exist before the
	// next token can be decoded: the prompt of a new request, prompt and
	// generated tokens of a running one. 0 to 1e15.
	ContextTokens int64 `json:"context_tokens,omitempty"`
	// RemainingTokens is the expected output still to come, 0 to 1e15. 0 means
	// unknown: no room is kept for it, its decode costs nothing, and a running
	// request of unknown length is never moved.
	RemainingTokens int64 `json:"remaining_tokens,omitempty"`
	// Affinity is the id of the instance that served the session's last turn,
	// empty for none. An id that no instance has is no error: the home is gone.
	Affinity string `json:"affinity,omitempty"`
	// RunningOn is the id of the instance that runs the request now, empty for
	// a new one. An id that no instance has is no error: the source is lost,
	// and the decision is to recover.
	RunningOn string `json:"running_on,omitempty"`
	// Hops is how many planned moves the request has made, 0 to 1e9.
	Hops int64 `json:"hops,omitempty"`
}

// Instance is one serving instance as the router knows it. Its counts leave
// out the request being decided on; for the instance that runs it, Requests,
// PendingPrefillTokens and WaitSeconds are what is still ahead of it, so 0
// once it decodes alone.
type Instance struct {
	// ID names the instance. It is unique and not empty.
	ID string `json:"id"`
	// Requests counts the requests running and waiting, 0 to 1e9.
	Requests int64 `json:"requests,omitempty"`
	// PendingPrefillTokens is prefill work queued or half done, in tokens that
	// are not cached, 0 to 1e15.
	PendingPrefillTokens int64 `json:"pending_prefill_tokens,omitempty"`
	// OngoingTokens is the sum of the context tokens of the instance's
	// unfinished requests, 0 to 1e15. KV that stays resident for no request is
	// not in it: cache is not load.
	OngoingTokens int64 `json:"ongoing_tokens,omitempty"`
	// ActiveDecodes counts the streams that decode now, 0 to 1e9.
	ActiveDecodes int64 `json:"active_decodes,omitempty"`
	// CachedTokens is the length of the prefix of this request whose KV the
	// instance holds, 0 to 1e15. More than the context is legal, as a stale
	// router may say so, and counts as the context.
	CachedTokens int64 `json:"cached_tokens,omitempty"`
	// WaitSeconds is a wait known from elsewhere, on top of the queue that
	// PendingPrefillTokens makes, 0 to 1e12 s.
	WaitSeconds float64 `json:"wait_s,omitempty"`
	// PrefillRate is the prefill throughput in tokens/s. 0 stands for the
	// policy's rate; where it is used it lies in 1e-9 to 1e18.
	PrefillRate float64 `json:"prefill_rate,omitempty"`
	// DecodeRate is the decode speed of one stream in tokens/s. 0 stands for
	// the policy's rate; where it is used it lies in 1e-9 to 1e18.
	DecodeRate float64 `json:"decode_rate,omitempty"`
	// Bandwidth is that of the instance's link in bytes/s. 0 stands for the
	// policy's; where it is used it lies in 1e-9 to 1e18.
	Bandwidth float64 `json:"bandwidth,omitempty"`
	// KVCapacityTokens is the size of the KV pool in tokens, 0 to 1e15. 0
	// means unknown, and every request fits.
	KVCapacityTokens int64 `json:"kv_capacity_tokens,omitempty"`
	// KVUsedTokens is how much of the pool is taken and cannot be evicted, in
	// tokens, 0 to 1e15. It may exceed the capacity.
	KVUsedTokens int64 `json:"kv_used_tokens,omitempty"`
	// UptimeSeconds is the age of the node, 0 to 1e12 s, what the survival
	// curve is conditioned on.
	UptimeSeconds float64 `json:"uptime_s,omitempty"`
	// Curve is the survival curve of the node; nil means that it never fails.
	// It is read only where the policy has a hazard model.
	Curve Curve `json:"-"`
	// CurveName is the name under which the JSON form lists the curve, and
	// errors speak of it. It decides nothing; empty, a name is made up when the
	// snapshot is written.
	CurveName string `json:"-"`
	// Unavailable takes the instance out: it is no target, no source and no
	// fallback, and a request that runs on it is lost.
	Unavailable bool `json:"unavailable,omitempty"`
	// MetricsAgeSeconds is the age of the instance's metrics, 0 to 1e12 s; 0 is
	// fresh. See Policy.MaxMetricsAgeSeconds.
	MetricsAgeSeconds float64 `json:"metrics_age_s,omitempty"`
}

// cached is the cached prefix, clamped to the context.
func (r *Request) cached(i *Instance) int64 { return min(i.CachedTokens, r.ContextTokens) }

// uncached is new_i of SPEC section 1: the tokens that instance i would have
// to prefill.
func (r *Request) uncached(i *Instance) int64 { return r.ContextTokens - r.cached(i) }

// fitsNow tells whether the free KV of instance i holds the request.
func (r *Request) fitsNow(i *Instance) bool {
	return i.KVCapacityTokens == 0 || i.KVUsedTokens+r.uncached(i)+r.RemainingTokens <= i.KVCapacityTokens
}

// fitsEmpty tells whether the whole KV pool of instance i holds the request.
func (r *Request) fitsEmpty(i *Instance) bool {
	return i.KVCapacityTokens == 0 || r.ContextTokens+r.RemainingTokens <= i.KVCapacityTokens
}

// find is the index of the instance with that id, -1 where there is none.
func (s *Snapshot) find(id string) int {
	if id == "" {
		return -1
	}
	for i := range s.Instances {
		if s.Instances[i].ID == id {
			return i
		}
	}
	return -1
}

func (r *Request) validate() error {
	switch {
	case !withinCount(r.ContextTokens, maxTokens):
		return fieldError("request.context_tokens", r.ContextTokens, "be 0 to 1e15 tokens")
	case !withinCount(r.RemainingTokens, maxTokens):
		return fieldError("request.remaining_tokens", r.RemainingTokens, "be 0 to 1e15 tokens")
	case !withinCount(r.Hops, maxCount):
		return fieldError("request.hops", r.Hops, "be 0 to 1e9")
	}
	return nil
}

// ordinary tells, by few comparisons, that every number of i lies well within
// its bounds; validate is for the rest. As bits, positive floats are in order,
// and negative numbers, NaN and infinities lie above them all.
func (i *Instance) ordinary() bool {
	tokens := i.PendingPrefillTokens | i.OngoingTokens | i.CachedTokens | i.KVCapacityTokens | i.KVUsedTokens
	return i.ID != "" && uint64(i.Requests|i.ActiveDecodes) < 1<<29 && uint64(tokens) < 1<<49 &&
		math.Float64bits(i.WaitSeconds) <= bitsOfLargeTime && math.Float64bits(i.UptimeSeconds) <= bitsOfLargeTime &&
		math.Float64bits(i.MetricsAgeSeconds) <= bitsOfLargeTime && math.Float64bits(i.PrefillRate) <= bitsOfLargeRate &&
		math.Float64bits(i.DecodeRate) <= bitsOfLargeRate && math.Float64bits(i.Bandwidth) <= bitsOfLargeRate
}

func (i *Instance) validate(at int) error {
	const tokens, count, seconds = "be 0 to 1e15 tokens", "be 0 to 1e9", "be 0 to 1e12 seconds"
	const rate = "be a finite number of at least 0"
	switch {
	case i.ID == "":
		return instanceError(at, "id", i.ID, "not be empty")
	case !withinCount(i.Requests, maxCount):
		return instanceError(at, "requests", i.Requests, count)
	case !withinCount(i.PendingPrefillTokens, maxTokens):
		return instanceError(at, "pending_prefill_tokens", i.PendingPrefillTokens, tokens)
	case !withinCount(i.OngoingTokens, maxTokens):
		return instanceError(at, "ongoing_tokens", i.OngoingTokens, tokens)
	case !withinCount(i.ActiveDecodes, maxCount):
		return instanceError(at, "active_decodes", i.ActiveDecodes, count)
	case !withinCount(i.CachedTokens, maxTokens):
		return instanceError(at, "cached_tokens", i.CachedTokens, tokens)
	case !withinSeconds(i.WaitSeconds):
		return instanceError(at, "wait_s", i.WaitSeconds, seconds)
	case !finiteRate(i.PrefillRate):
		return instanceError(at, "prefill_rate", i.PrefillRate, rate)
	case !finiteRate(i.DecodeRate):
		return instanceError(at, "decode_rate", i.DecodeRate, rate)
	case !finiteRate(i.Bandwidth):
		return instanceError(at, "bandwidth", i.Bandwidth, rate)
	case !withinCount(i.KVCapacityTokens, maxTokens):
		return instanceError(at, "kv_capacity_tokens", i.KVCapacityTokens, tokens)
	case !withinCount(i.KVUsedTokens, maxTokens):
		return instanceError(at, "kv_used_tokens", i.KVUsedTokens, tokens)
	case !withinSeconds(i.UptimeSeconds):
		return instanceError(at, "uptime_s", i.UptimeSeconds, seconds)
	case !withinSeconds(i.MetricsAgeSeconds):
		return instanceError(at, "metrics_age_s", i.MetricsAgeSeconds, seconds)
	}
	return nil
}

// curvePath is where an error says that the instance's curve stands.
func (i *Instance) curvePath(at int) string {
	if i.CurveName != "" {
		return fmt.Sprintf("curves[%s]", i.CurveName)
	}
	return fmt.Sprintf("instances[%d].curve", at)
}
