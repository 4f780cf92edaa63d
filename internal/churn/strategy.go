package churn

import (
	"github.com/kvpolicy/kvpolicy"
)

// Strategy is a way to place and move requests.
type Strategy struct {
	// Name heads its line in a table.
	Name string
	// Policy decides. Run gives it the prices of Options: it reckons with what
	// does happen.
	Policy kvpolicy.Policy
	// Knowledge is what the policy is told about the nodes' ends.
	Knowledge Knowledge
	// AnyNode takes a node at random among those whose pool holds the request,
	// instead of the policy's.
	AnyNode bool
}

// Knowledge is what a strategy knows about the ends of nodes.
type Knowledge int

const (
	// KnowsNothing: nodes have no survival curve.
	KnowsNothing Knowledge = 1 + iota
	// KnowsSessions: curves are estimated from the sessions seen until then.
	KnowsSessions
	// KnowsLaws: every node's true curve is known, where there is one.
	KnowsLaws
	// KnowsEnds: every node's end is known, and what runs there leaves in time.
	KnowsEnds
)

// HazardAware is the preset of that name, with curves from the sessions seen.
func HazardAware() Strategy {
	return Strategy{Name: "hazard_aware", Policy: kvpolicy.HazardAware(), Knowledge: KnowsSessions}
}

// HazardAwareKnowing is HazardAware with every node's true curve in place of
// the estimated one: what it leaves undone is no matter of estimation.
func HazardAwareKnowing() Strategy {
	s := HazardAware()
	s.Name, s.Knowledge = "hazard_aware_true_curves", KnowsLaws
	return s
}

// HazardAwareOverlap is HazardAware with moves that overlap with decoding for
// so many rounds.
func HazardAwareOverlap(rounds int) Strategy {
	s := HazardAware()
	s.Name, s.Policy.Migration.OverlapRounds = "hazard_aware_overlap", rounds
	return s
}

// ReactiveFastest takes the node on which the request ends first if no node is
// lost, and recovers it when one is.
func ReactiveFastest() Strategy {
	s := HazardAware()
	s.Name, s.Knowledge = "reactive_fastest", KnowsNothing
	s.Policy.Hazard, s.Policy.Migration = kvpolicy.HazardModel{}, kvpolicy.MigrationRule{}
	return s
}

// Random takes any node that the request fits on.
func Random() Strategy {
	s := ReactiveFastest()
	s.Name, s.AnyNode = "random", true
	return s
}

// Oracle knows every node's end, though no request's length. It takes the node
// on which the request ends first, counting what an end on the way costs, and
// at a node's end moves what is there at that very moment: the last at which
// that can be done, when it has made all the headway that the node allows.
// Nothing stalls. It is a yardstick, not the best that could be done.
func Oracle() Strategy {
	s := HazardAware()
	s.Name, s.Knowledge = "oracle", KnowsEnds
	s.Policy.Migration = kvpolicy.MigrationRule{}
	return s
}

// knownEnd is the survival curve of a node whose session is known to last that
// long.
type knownEnd float64

func (seconds knownEnd) Survival(t float64) float64 {
	if t < float64(seconds) {
		return 1
	}
	return 0
}
