package llmd

import (
	"context"
	"encoding/json"
	"time"
)

// What follows stands in for the router's own types, so that plugin.go compiles
// and is tested here; an embedder deletes this file and imports the router.
// What an endpoint carries stands in the router on its metadata, its metrics
// and its attributes, and is put side by side here.

// TypedName is the type and the name of a plugin.
type TypedName struct{ Type, Name string }

// ScorerCategory is what a scorer prefers.
type ScorerCategory string

// Balance is a scorer that weighs locality against load.
const Balance ScorerCategory = "Balance"

// InferenceRequest is the request to schedule.
type InferenceRequest struct {
	RequestID   string
	TargetModel string
	Headers     map[string]string
	// TokenIDs is the prompt, from the router's tokenizer.
	TokenIDs []uint32
}

// Metrics are those last scraped from an endpoint, every 50 ms.
type Metrics struct {
	RunningRequestsSize, WaitingQueueSize int
	// KVCacheUsagePercent is a fraction of 0 to 1.
	KVCacheUsagePercent            float64
	CacheBlockSize, CacheNumBlocks int
	// UpdateTime is when they were scraped; zero is never.
	UpdateTime time.Time
}

// InFlightLoad is what this router has sent to an endpoint and not seen end.
type InFlightLoad struct{ Requests, Tokens int64 }

// PrefixMatch is what of this request's prompt an endpoint caches.
type PrefixMatch struct{ CachedBlockCount, BlockSizeTokens int }

// Endpoint is a server that requests can be sent to.
type Endpoint interface {
	// String is its address, ip:port.
	String() string
	Metrics() Metrics
	InFlightLoad() InFlightLoad
	PrefixMatch() PrefixMatch
}

// Scorer rates endpoints in [0, 1]; greater is better, and the router adds up
// the weighted scores of several.
type Scorer interface {
	TypedName() TypedName
	Category() ScorerCategory
	Score(context.Context, *InferenceRequest, []Endpoint) map[Endpoint]float64
}

// Filter narrows the endpoints of a profile.
type Filter interface {
	TypedName() TypedName
	Filter(context.Context, *InferenceRequest, []Endpoint) []Endpoint
}

// ScoredEndpoint is an endpoint with the sum of its scores.
type ScoredEndpoint struct {
	Endpoint
	Score float64
}

// Picker picks by scores alone: it is not told the request.
type Picker interface {
	TypedName() TypedName
	Pick(context.Context, []*ScoredEndpoint) *ProfileRunResult
}

// SchedulerProfile is filters, scorers and a picker that run together.
type SchedulerProfile struct {
	Filters []Filter
	Scorers []Scorer
	Picker  Picker
}

// ProfileRunResult is what a profile picked, in order of preference.
type ProfileRunResult struct{ TargetEndpoints []Endpoint }

// SchedulingResult is what all profiles picked. The request goes to the
// primary one's endpoint.
type SchedulingResult struct {
	ProfileResults     map[string]*ProfileRunResult
	PrimaryProfileName string
}

// ProfileHandler says which profiles to run, again after each round until it
// names none, and then what to make of their results.
type ProfileHandler interface {
	TypedName() TypedName
	Pick(context.Context, *InferenceRequest, map[string]SchedulerProfile, map[string]*ProfileRunResult) map[string]SchedulerProfile
	ProcessResults(context.Context, *InferenceRequest, map[string]*ProfileRunResult) (*SchedulingResult, error)
}

// PreRequest is told before a request is sent.
type PreRequest interface {
	PreRequest(context.Context, *InferenceRequest, *SchedulingResult) error
}

// Response is a part of a response's body.
type Response struct {
	// EndOfStream marks the last call, which comes when a request is aborted
	// too.
	EndOfStream bool
}

// ResponseBodyProcessor is told of every part of a response.
type ResponseBodyProcessor interface {
	ResponseBody(context.Context, *InferenceRequest, *Response, string)
}

// Factory makes a plugin from the parameters of the router's configuration.
type Factory func(name string, parameters *json.Decoder) (any, error)

// Stability is how settled a plugin is.
type Stability string

// Alpha is a plugin that may change.
const Alpha Stability = "Alpha"

// registry is where Register puts factories.
var registry = map[string]Factory{}

// Register makes a type of plugin known to the router's configuration.
func Register(pluginType string, _ Stability, factory Factory) { registry[pluginType] = factory }
