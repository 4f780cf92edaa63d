package blis

// What follows stands in for the simulator's own types, so that policy.go
// compiles and is tested here; an embedder deletes this file and imports the
// simulator.

// Request is the request to route.
type Request struct {
	ID          string
	SessionID   string
	InputTokens []int
}

// RoutingSnapshot is an instance as the router sees it.
type RoutingSnapshot struct {
	ID            string
	QueueDepth    int
	BatchSize     int
	KVUtilization float64
	FreeKVBlocks  int64
	// InFlightRequests are dispatched and not completed: those in the queue and
	// in the batch are among them.
	InFlightRequests      int
	TotalKvCapacityTokens int64
	KvTokensInUse         int64
}

// EffectiveLoad is a sum that counts twice what is queued or runs.
func (s RoutingSnapshot) EffectiveLoad() int { return s.QueueDepth + s.BatchSize + s.InFlightRequests }

// RouterState is the cluster as the router sees it.
type RouterState struct {
	Snapshots []RoutingSnapshot
	Clock     int64 // microseconds
}

// RoutingDecision is where a request goes. Greater scores are better.
type RoutingDecision struct {
	TargetInstance string
	Reason         string
	Scores         map[string]float64
}

// RoutingPolicy routes.
type RoutingPolicy interface {
	Route(*Request, *RouterState) RoutingDecision
}

// DisaggregationDecision is whether the prefill runs elsewhere. Empty names
// leave the choice as it is.
type DisaggregationDecision struct {
	Disaggregate      bool
	DecodePodOverride string
	PrefillPodHint    string
}

// DisaggregationDecider decides that, after Route.
type DisaggregationDecider interface {
	Decide(*Request, *RouterState) DisaggregationDecision
}
