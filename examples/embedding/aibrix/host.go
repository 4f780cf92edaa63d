package aibrix

import (
	"context"
	"net"
	"time"
)

// What follows stands in for the gateway's own types, so that router.go compiles
// and is tested here; an embedder deletes this file and imports the gateway.

// RoutingContext is the request to route.
type RoutingContext struct {
	context.Context
	RequestID, Model, Message string
	ReqHeaders                map[string]string
	// PromptTokens is the length of the prompt, by the gateway's tokenizer.
	PromptTokens int
}

// Pod is a server that requests can be sent to.
type Pod struct {
	Namespace, Name, IP, Port string
	StartTime                 time.Time
}

// Address is where requests go.
func (p *Pod) Address() string { return net.JoinHostPort(p.IP, p.Port) }

// PodList is the pods that are ready.
type PodList interface{ All() []*Pod }

// Cache is what the gateway knows of pods.
type Cache interface {
	// RealtimeRunning is how many requests gateways have in flight there; false
	// is unknown.
	RealtimeRunning(*Pod) (int, bool)
	// PrefixMatchPercent is how much of the prompt each pod caches, in whole per
	// cent, by address.
	PrefixMatchPercent(*RoutingContext, PodList) map[string]int
}

// Router picks an address.
type Router interface {
	Route(*RoutingContext, PodList) (string, error)
}

// PodScorer scores all pods, for strategies that are combined.
type PodScorer interface {
	ScoreAll(*RoutingContext, PodList) (scores []float64, scored []bool, err error)
}

// PostRouteUpdater is told which pod was picked.
type PostRouteUpdater interface {
	PostRouteUpdate(*RoutingContext, PodList, *Pod) error
}

// registry is where Register puts constructors.
var registry = map[string]func() (Router, error){}

// Register makes a routing algorithm known, before Init.
func Register(algorithm string, constructor func() (Router, error)) {
	registry[algorithm] = constructor
}
