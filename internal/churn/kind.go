package churn

import (
	"math"

	"gonum.org/v1/gonum/stat/distuv"
)

// Kind is a kind of node, with the middle values of its kind.
type Kind struct {
	// Name is the kind's name; survival curves are pooled by it.
	Name string
	// DecodeRate and PrefillRate are in tokens/s, for one request.
	DecodeRate, PrefillRate float64
	// Bandwidth is that of its link in bytes/s.
	Bandwidth float64
	// KVCapacityTokens is the size of its KV pool in tokens.
	KVCapacityTokens int64
	// SessionScaleSeconds and SessionShape are the parameters of the Weibull law
	// of its sessions.
	SessionScaleSeconds, SessionShape float64
	// MeanGapSeconds is how long it is away between two sessions, on average;
	// gaps are exponential (ours: the source gives their mean alone).
	MeanGapSeconds float64
}

// Laptop is somebody's machine, up for minutes to hours, the likelier to stay
// the longer it has. (Hazard algorithm note, published fleets; the others too.)
func Laptop() Kind {
	return Kind{Name: "laptop", DecodeRate: 12, PrefillRate: 150, Bandwidth: 4e6, KVCapacityTokens: 16_000,
		SessionScaleSeconds: 600, SessionShape: 0.6, MeanGapSeconds: 600}
}

// Spot is an instance that is reclaimed at a typical age.
func Spot() Kind {
	return Kind{Name: "spot", DecodeRate: 40, PrefillRate: 900, Bandwidth: 4e7, KVCapacityTokens: 64_000,
		SessionScaleSeconds: 2400, SessionShape: 3, MeanGapSeconds: 300}
}

// Server is a machine that is there for hours.
func Server() Kind {
	return Kind{Name: "server", DecodeRate: 60, PrefillRate: 1500, Bandwidth: 1e8, KVCapacityTokens: 128_000,
		SessionScaleSeconds: 28_800, SessionShape: 1.5, MeanGapSeconds: 120}
}

// KindByName is the kind of that name.
func KindByName(name string) (Kind, bool) {
	for _, kind := range []Kind{Laptop(), Spot(), Server()} {
		if kind.Name == name {
			return kind, true
		}
	}
	return Kind{}, false
}

// Group is a number of nodes of one kind.
type Group struct {
	Kind  Kind
	Count int
}

// Fleet is a fleet to draw scenarios from.
type Fleet struct {
	Name   string
	Groups []Group
	// RequestRate is the published rate of requests per second.
	RequestRate float64
}

// Mixed is the published fleet of 30 laptops, 10 spot instances and 3 servers.
func Mixed() Fleet {
	return Fleet{Name: "mixed", Groups: []Group{{Laptop(), 30}, {Spot(), 10}, {Server(), 3}}, RequestRate: 0.6}
}

// Volunteer is the published fleet of 45 laptops.
func Volunteer() Fleet {
	return Fleet{Name: "volunteer", Groups: []Group{{Laptop(), 45}}, RequestRate: 0.15}
}

// Population is the survival curve of a kind whose nodes' scale factors are
// uniform: the mean of their Weibull curves, as one session of each node has it.
type Population struct{ Kind Kind }

// Survival is the share of sessions that last longer than t seconds.
func (p Population) Survival(t float64) float64 {
	const parts = 200
	sum := 0.0
	for i := range parts {
		factor := leastScaleFactor + (greatestScaleFactor-leastScaleFactor)*(float64(i)+0.5)/parts
		sum += distuv.Weibull{K: p.Kind.SessionShape, Lambda: factor * p.Kind.SessionScaleSeconds}.Survival(math.Max(0, t))
	}
	return sum / parts
}
