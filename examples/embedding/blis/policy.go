// Package blis decides in BLIS, the discrete-event simulator. Copy policy.go;
// host.go stands in for the simulator's types.
package blis

import (
	"slices"
	"time"

	"github.com/kvpolicy/kvpolicy"
	"github.com/kvpolicy/kvpolicy/track"
)

// CachedBlocks is how many leading blocks of a prompt an instance caches: the
// simulator's closure for that instance.
type CachedBlocks func(tokens []int) int

// Policy routes by a policy, and decides on separating prefill and decode.
// It is for one simulation, in one goroutine, as the simulator calls it.
type Policy struct {
	// Decided is told each decision with what it was decided on, where it is not
	// nil; see package decisionlog.
	Decided func(kvpolicy.Snapshot, kvpolicy.Decision)

	policy      kvpolicy.Policy
	tracker     *track.Tracker
	blockTokens int64
	cached      map[string]CachedBlocks
	// routed holds what Route decided on requests that have not ended, for
	// Decide.
	routed map[string]kvpolicy.Decision
}

// NewPolicy makes a policy, with the simulated KV cache's block size and a
// closure for each instance.
func NewPolicy(policy kvpolicy.Policy, blockTokens int, cached map[string]CachedBlocks) (*Policy, error) {
	if err := policy.Validate(); err != nil {
		return nil, err
	}
	config := track.DefaultConfig()
	config.BlockTokens = blockTokens
	tracker, err := track.New(config)
	if err != nil {
		return nil, err
	}
	return &Policy{policy: policy, tracker: tracker, blockTokens: int64(blockTokens), cached: cached,
		routed: map[string]kvpolicy.Decision{}}, nil
}

// instant is the simulated time. The clock counts microseconds, an integer, and
// no float64 of seconds comes in between.
func instant(clock int64) time.Time { return time.UnixMicro(clock) }

// observe takes in an instance as the simulator shows it.
func (p *Policy) observe(s *RoutingSnapshot, now time.Time) error {
	if err := p.tracker.Join(s.ID, track.InstanceInfo{KVCapacityTokens: s.TotalKvCapacityTokens}, now); err != nil {
		return err
	}
	// InFlightRequests are all that the instance has. QueueDepth and BatchSize
	// are among them, so that nothing is to be added.
	running, waiting := float64(s.InFlightRequests), 0.0
	metrics := track.Metrics{Running: &running, Waiting: &waiting}
	if s.TotalKvCapacityTokens > 0 {
		used := float64(s.KvTokensInUse) / float64(s.TotalKvCapacityTokens)
		metrics.KVUsage = &used
	}
	return p.tracker.Observe(s.ID, metrics, now)
}

func (p *Policy) request(r *Request) track.Request {
	tokens := make([]uint32, len(r.InputTokens))
	for at, token := range r.InputTokens {
		tokens[at] = uint32(token)
	}
	request := track.Request{Session: r.SessionID, Prompt: p.tracker.TokenPrompt(nil, track.Salt{}, tokens)}
	request.ID, request.ContextTokens = r.ID, int64(len(tokens))
	return request
}

// snapshot is what to decide on: the instances that the simulator shows.
func (p *Policy) snapshot(request track.Request, r *Request, state *RouterState) (kvpolicy.Snapshot, error) {
	shown := map[string]bool{}
	for at := range state.Snapshots {
		if err := p.observe(&state.Snapshots[at], instant(state.Clock)); err != nil {
			return kvpolicy.Snapshot{}, err
		}
		shown[state.Snapshots[at].ID] = true
	}
	s := p.tracker.Snapshot(request, instant(state.Clock), nil)
	s.Instances = slices.DeleteFunc(s.Instances, func(i kvpolicy.Instance) bool { return !shown[i.ID] })
	for at := range s.Instances {
		i := &s.Instances[at]
		if blocks := p.cached[i.ID]; blocks != nil {
			// The closure knows what is cached by now, the tracker of prompts that
			// are still queued.
			i.CachedTokens = max(i.CachedTokens, int64(blocks(r.InputTokens))*p.blockTokens)
		}
	}
	return s, nil
}

// Route routes a request, and gives every candidate's score as the simulator
// reads it: greater is better, so that costs are negative. A request that is
// rejected, or that is faulty, has no target: the reason says why, and the
// simulator's admission is what should refuse it.
func (p *Policy) Route(r *Request, state *RouterState) RoutingDecision {
	request := p.request(r)
	s, err := p.snapshot(request, r, state)
	if err != nil {
		return RoutingDecision{Reason: err.Error()}
	}
	d, err := p.policy.Decide(s)
	if err != nil {
		return RoutingDecision{Reason: err.Error()}
	}
	if p.Decided != nil {
		p.Decided(s, d)
	}
	out := RoutingDecision{TargetInstance: d.Target, Reason: d.Reason.String()}
	if d.Action == kvpolicy.Reject {
		return out
	}
	if out.Scores, err = p.scores(s); err != nil {
		return RoutingDecision{Reason: err.Error()}
	}
	if err := p.tracker.Begin(request, d, instant(state.Clock)); err != nil {
		return RoutingDecision{Reason: err.Error()}
	}
	p.routed[r.ID] = d
	return out
}

// scores are those of the candidates, negated.
func (p *Policy) scores(s kvpolicy.Snapshot) (map[string]float64, error) {
	candidates, err := p.policy.Explain(nil, s)
	if err != nil {
		return nil, err
	}
	best := kvpolicy.Down // candidates are those of the best tier that there is
	for _, c := range candidates {
		best = min(best, c.Tier)
	}
	scores := make(map[string]float64, len(candidates))
	for _, c := range candidates {
		if c.Tier == best {
			scores[c.Instance] = -c.Score
		}
	}
	return scores, nil
}

// Decide tells what Route decided on the same request. A second decision would
// see the request as running already.
func (p *Policy) Decide(r *Request, state *RouterState) DisaggregationDecision {
	d, routed := p.routed[r.ID]
	if !routed {
		p.Route(r, state)
		d = p.routed[r.ID]
	}
	return DisaggregationDecision{
		Disaggregate:      d.Action == kvpolicy.PrefillRemote,
		DecodePodOverride: d.Target,
		PrefillPodHint:    d.PrefillOn,
	}
}

// FirstToken is to be called when the simulator sees a request's first token.
func (p *Policy) FirstToken(requestID string, clock int64) {
	p.tracker.FirstToken(track.Key{ID: requestID}, instant(clock))
}

// Done is to be called when a request completes or is dropped.
func (p *Policy) Done(requestID string, clock int64) {
	delete(p.routed, requestID)
	p.tracker.End(track.Key{ID: requestID}, instant(clock))
}
