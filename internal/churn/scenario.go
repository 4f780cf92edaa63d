package churn

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"

	"github.com/kvpolicy/kvpolicy"
	"gonum.org/v1/gonum/stat/distuv"
)

// Scenario is everything that happens to a strategy: the churn and the demand.
// Seconds count from when requests begin to arrive; the sessions before that
// are what strategies may have learnt from.
type Scenario struct {
	// Seed is the seed it was drawn by; it also seeds random choices.
	Seed uint64
	// HorizonSeconds is when it ends: arrivals, churn and service.
	HorizonSeconds float64
	// Nodes are the nodes of the fleet.
	Nodes []Node
	// Requests are in order of arrival.
	Requests []Request
}

// Node is a node and its sessions.
type Node struct {
	Name string
	// Group is what survival curves are pooled by, between node and fleet.
	Group string
	// Rates in tokens/s and bytes/s, the capacity in tokens.
	DecodeRate, PrefillRate, Bandwidth float64
	KVCapacityTokens                   int64
	// Law is the survival curve that its sessions were drawn from; nil where
	// they were not drawn.
	Law kvpolicy.Curve
	// Sessions are in order of time and do not overlap.
	Sessions []Session
}

// Session is one stretch of time for which a node is up.
type Session struct {
	// StartSeconds and EndSeconds may be below 0, or beyond the horizon.
	StartSeconds, EndSeconds float64
	// Failed tells that the node was lost at the end. Where it is false the
	// session was cut short by the record or ended on purpose: its node is gone
	// from the run all the same, but a survival curve learns only that it had
	// been up until then.
	Failed bool
	// AgeUnknown says that the node had been up before StartSeconds for nobody
	// knows how long; a survival curve does not learn from it.
	AgeUnknown bool
}

// Seen is what has been seen of the sessions by some time, by group: those that
// are over, and those that are running, censored at their age. The groups are
// in order of name.
func (s *Scenario) Seen(seconds float64) (groups []string, sessions map[string][]kvpolicy.Session) {
	sessions = map[string][]kvpolicy.Session{}
	for i := range s.Nodes {
		n := &s.Nodes[i]
		for _, session := range n.Sessions {
			if session.AgeUnknown || session.StartSeconds > seconds {
				continue
			}
			if sessions[n.Group] == nil {
				groups = append(groups, n.Group)
			}
			over := session.EndSeconds <= seconds
			sessions[n.Group] = append(sessions[n.Group], kvpolicy.Session{
				DurationSeconds: min(session.EndSeconds, seconds) - session.StartSeconds,
				Observed:        session.Failed && over,
			})
		}
	}
	slices.Sort(groups)
	return groups, sessions
}

// Request is one request.
type Request struct {
	ArrivalSeconds float64
	// PromptTokens and OutputTokens are its lengths, EstimateTokens what
	// strategies take for OutputTokens; all at least 1.
	PromptTokens, OutputTokens, EstimateTokens int64
}

// What is drawn from one seed has a stream of its own, so that a change of one
// leaves the others as they were.
const (
	streamNode = 1 + iota
	streamRequests
	streamChoices
)

func newSource(seed uint64, stream, index int) *rand.ChaCha8 {
	var key [32]byte
	binary.LittleEndian.PutUint64(key[0:], seed)
	binary.LittleEndian.PutUint64(key[8:], uint64(stream))
	binary.LittleEndian.PutUint64(key[16:], uint64(index))
	return rand.NewChaCha8(key)
}

// Draw draws a scenario from the fleet: warmup seconds of churn before the
// first request, then horizon seconds of churn and requests, rate of them per
// second.
//
// Every node draws one factor U(0.7, 1.3) for all its rates (a faster machine
// is faster at everything: ours) and one U(0.6, 1.4) for its sessions' scale,
// and begins a session at the start of the warm-up. (Hazard algorithm note,
// published fleets, where not marked.)
func (f Fleet) Draw(seed uint64, rate, horizon, warmup float64) (Scenario, error) {
	s := Scenario{Seed: seed, HorizonSeconds: horizon}
	for _, group := range f.Groups {
		for i := range group.Count {
			source := newSource(seed, streamNode, len(s.Nodes))
			node := group.Kind.draw(source)
			node.Name = fmt.Sprintf("%s-%02d", group.Kind.Name, i+1)
			law := group.Kind.sessions(source)
			node.Law = distuv.Weibull{K: law.K, Lambda: law.Lambda}
			gap := distuv.Exponential{Rate: 1 / group.Kind.MeanGapSeconds, Src: source}
			for at := -warmup; at < horizon; {
				end := at + law.Rand()
				node.Sessions = append(node.Sessions, Session{StartSeconds: at, EndSeconds: end, Failed: true})
				at = end + gap.Rand()
			}
			s.Nodes = append(s.Nodes, node)
		}
	}
	s.drawRequests(rate)
	return s, s.validate()
}

// draw draws the rates of a node of the kind.
func (k Kind) draw(source rand.Source) Node {
	factor := distuv.Uniform{Min: 0.7, Max: 1.3, Src: source}.Rand()
	return Node{Group: k.Name, DecodeRate: factor * k.DecodeRate, PrefillRate: factor * k.PrefillRate,
		Bandwidth: factor * k.Bandwidth, KVCapacityTokens: k.KVCapacityTokens}
}

// leastScaleFactor and greatestScaleFactor bound the factor of a node's session
// scale, which is uniform between them.
const leastScaleFactor, greatestScaleFactor = 0.6, 1.4

// sessions draws the law of the sessions of a node of the kind.
func (k Kind) sessions(source rand.Source) distuv.Weibull {
	factor := distuv.Uniform{Min: leastScaleFactor, Max: greatestScaleFactor, Src: source}.Rand()
	return distuv.Weibull{K: k.SessionShape, Lambda: factor * k.SessionScaleSeconds, Src: source}
}

// drawRequests draws Poisson arrivals until the horizon, with log-normal
// lengths. (Hazard algorithm note, published fleets; the bound by the largest
// pool is ours: such a request could never end.)
func (s *Scenario) drawRequests(rate float64) {
	longest := int64(0)
	for i := range s.Nodes {
		longest = max(longest, s.Nodes[i].KVCapacityTokens)
	}
	source := newSource(s.Seed, streamRequests, 0)
	gap := distuv.Exponential{Rate: rate, Src: source}
	prompt := distuv.LogNormal{Mu: 6, Sigma: 0.8, Src: source}
	output := distuv.LogNormal{Mu: 6.3, Sigma: 1, Src: source}
	noise := distuv.LogNormal{Mu: 0, Sigma: 0.4, Src: source}
	tokens := func(x float64, most int64) int64 {
		return int64(math.Round(min(max(x, 1), float64(most))))
	}
	for at := gap.Rand(); at < s.HorizonSeconds; at += gap.Rand() {
		r := Request{ArrivalSeconds: at, PromptTokens: tokens(prompt.Rand(), longest/2)}
		drawn := output.Rand()
		r.OutputTokens = tokens(drawn, longest-r.PromptTokens)
		r.EstimateTokens = tokens(drawn*noise.Rand(), longest-r.PromptTokens)
		s.Requests = append(s.Requests, r)
	}
}

// validate checks what Run relies on.
func (s *Scenario) validate() error {
	const most = 1e9 // seconds, and any rate: far from where times lose their digits
	fail := func(path string, value any, want string) error {
		return &kvpolicy.FieldError{Path: path, Value: fmt.Sprint(value), Want: want}
	}
	if !(s.HorizonSeconds > 0 && s.HorizonSeconds <= most) {
		return fail("horizon_s", s.HorizonSeconds, "be above 0 and at most 1e9 seconds")
	}
	if len(s.Nodes) == 0 {
		return fail("nodes", "empty", "hold at least one node")
	}
	names := make(map[string]bool, len(s.Nodes))
	longest := int64(0)
	for i := range s.Nodes {
		n, path := &s.Nodes[i], fmt.Sprintf("nodes[%d]", i)
		if n.Name == "" || names[n.Name] {
			return fail(path+".name", n.Name, "be a name of its own")
		}
		names[n.Name] = true
		for _, rate := range []struct {
			field string
			value float64
		}{{"decode_rate", n.DecodeRate}, {"prefill_rate", n.PrefillRate}, {"bandwidth", n.Bandwidth}} {
			if !(rate.value >= 1e-6 && rate.value <= 1e15) {
				return fail(path+"."+rate.field, rate.value, "be 1e-6 to 1e15 a second")
			}
		}
		if !(n.KVCapacityTokens >= 2 && n.KVCapacityTokens <= 1e12) {
			return fail(path+".kv_capacity_tokens", n.KVCapacityTokens, "be 2 to 1e12 tokens")
		}
		longest = max(longest, n.KVCapacityTokens)
		last := -most
		for k, session := range n.Sessions {
			path := fmt.Sprintf("%s.sessions[%d]", path, k)
			if !(session.StartSeconds >= last && session.StartSeconds <= most) {
				return fail(path+".start_s", session.StartSeconds, "not lie before the end of the one before, nor beyond 1e9 seconds")
			}
			if !(session.EndSeconds >= session.StartSeconds && session.EndSeconds <= 1e15) {
				return fail(path+".end_s", session.EndSeconds, "not lie before its start")
			}
			last = session.EndSeconds
		}
	}
	last := 0.0
	for i, r := range s.Requests {
		path := fmt.Sprintf("requests[%d]", i)
		switch {
		case !(r.ArrivalSeconds >= last && r.ArrivalSeconds <= s.HorizonSeconds):
			return fail(path+".arrival_s", r.ArrivalSeconds, "not lie before the one before, nor beyond the horizon")
		case r.PromptTokens < 1 || r.OutputTokens < 1 || r.EstimateTokens < 1:
			return fail(path, fmt.Sprintf("%d, %d and %d tokens", r.PromptTokens, r.OutputTokens, r.EstimateTokens), "have at least one token of each")
		case max(r.OutputTokens, r.EstimateTokens) > longest-r.PromptTokens:
			return fail(path, fmt.Sprintf("%d and %d tokens", r.PromptTokens, max(r.OutputTokens, r.EstimateTokens)), "fit the largest KV pool")
		}
		last = r.ArrivalSeconds
	}
	return nil
}
