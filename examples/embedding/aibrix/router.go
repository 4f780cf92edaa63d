// Package aibrix decides in AIBrix's gateway plugin. Copy router.go; host.go
// stands in for the gateway's types.
package aibrix

import (
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/kvpolicy/kvpolicy"
	"github.com/kvpolicy/kvpolicy/track"
)

// Algorithm is the routing strategy's name in the gateway's configuration.
const Algorithm = "kvpolicy"

// RegisterRouter makes the strategy known; call it before Init.
func RegisterRouter(policy kvpolicy.Policy, cache Cache) {
	Register(Algorithm, func() (Router, error) { return NewPolicyRouter(policy, cache) })
}

// PolicyRouter routes by a policy: alone by Route, or as one of several
// strategies by ScoreAll, which the gateway follows up with PostRouteUpdate.
type PolicyRouter struct {
	// KVCapacityTokens is the size of a pod's KV pool in tokens, which the gateway
	// does not tell; 0 is unknown, and every request fits.
	KVCapacityTokens int64
	// Decided is told each decision with what it was decided on, where it is not
	// nil; see package decisionlog.
	Decided func(kvpolicy.Snapshot, kvpolicy.Decision)
	// Faults is told of counts with a fault, where it is not nil.
	Faults func(error)

	policy  kvpolicy.Policy
	tracker *track.Tracker
	cache   Cache
}

// NewPolicyRouter makes a router.
func NewPolicyRouter(policy kvpolicy.Policy, cache Cache) (*PolicyRouter, error) {
	if err := policy.Validate(); err != nil {
		return nil, err
	}
	tracker, err := track.New(track.DefaultConfig())
	if err != nil {
		return nil, err
	}
	return &PolicyRouter{policy: policy, tracker: tracker, cache: cache}, nil
}

// CachedTokens is how many of a prompt's tokens a match in per cent is, rounded
// down. AIBrix tells whole per cents, so that 0.85 can only be a fraction that
// was meant as 85, and is an error rather than less than one per cent; so is
// what lies outside 0 to 100. It takes a float64 for that: converted to an
// integer, a fraction would silently become 0.
func CachedTokens(matchPercent float64, promptTokens int64) (int64, error) {
	if !(matchPercent >= 0 && matchPercent <= 100 && matchPercent == math.Trunc(matchPercent)) {
		return 0, &kvpolicy.FieldError{Path: "prefix_match_percent", Value: fmt.Sprint(matchPercent),
			Want: "be a whole number of 0 to 100, and no fraction"}
	}
	return promptTokens * int64(matchPercent) / 100, nil
}

// observe takes in what the gateway knows of a pod. The address may be another
// pod's by now: another start time then makes the tracker forget what the
// last one cached.
func (r *PolicyRouter) observe(pod *Pod, now time.Time) error {
	info := track.InstanceInfo{StartedAt: pod.StartTime, KVCapacityTokens: r.KVCapacityTokens}
	if err := r.tracker.Join(pod.Address(), info, now); err != nil {
		return err
	}
	count, known := r.cache.RealtimeRunning(pod)
	if !known {
		return nil // of unknown age, and not idle
	}
	// What gateways have in flight holds what this router has in flight: the
	// tracker takes the difference for other gateways', and never adds the two.
	running, waiting := float64(count), 0.0
	return r.tracker.Observe(pod.Address(), track.Metrics{Running: &running, Waiting: &waiting}, now)
}

func (r *PolicyRouter) request(ctx *RoutingContext) track.Request {
	request := track.Request{
		Session: ctx.ReqHeaders["x-session-id"],
		Prompt:  r.tracker.TextPrompt(nil, track.Salt{Model: ctx.Model}, []byte(ctx.Message)),
	}
	request.ID, request.ContextTokens = ctx.RequestID, int64(ctx.PromptTokens)
	return request
}

// snapshot is what to decide on: the pods that the gateway offers.
func (r *PolicyRouter) snapshot(ctx *RoutingContext, pods PodList) (kvpolicy.Snapshot, error) {
	now := time.Now()
	offered := map[string]bool{}
	for _, pod := range pods.All() {
		if err := r.observe(pod, now); err != nil && r.Faults != nil {
			r.Faults(fmt.Errorf("%s: %w", pod.Address(), err)) // not taken in: the last count ages
		}
		offered[pod.Address()] = true
	}
	s := r.tracker.Snapshot(r.request(ctx), now, nil)
	s.Instances = slices.DeleteFunc(s.Instances, func(i kvpolicy.Instance) bool { return !offered[i.ID] })
	matches := r.cache.PrefixMatchPercent(ctx, pods)
	for at := range s.Instances {
		i := &s.Instances[at]
		cached, err := CachedTokens(float64(matches[i.ID]), s.Request.ContextTokens)
		if err != nil {
			return kvpolicy.Snapshot{}, fmt.Errorf("%s: %w", i.ID, err)
		}
		// The gateway knows of other gateways, the tracker of prompts that are
		// still queued.
		i.CachedTokens = max(i.CachedTokens, cached)
	}
	return s, nil
}

// Route is the address of the policy's target.
func (r *PolicyRouter) Route(ctx *RoutingContext, pods PodList) (string, error) {
	s, err := r.snapshot(ctx, pods)
	if err != nil {
		return "", err
	}
	d, err := r.policy.Decide(s)
	if err != nil {
		return "", err
	}
	if r.Decided != nil {
		r.Decided(s, d)
	}
	if d.Action == kvpolicy.Reject {
		return "", fmt.Errorf("kvpolicy: request %s: %s", ctx.RequestID, d.Reason)
	}
	return d.Target, r.begin(ctx, d)
}

// ScoreAll is the score of each pod, where less is better: seconds, or what
// the policy's score counts. A pod that is no candidate has none. The gates of
// session affinity are no score: they decide in Route alone.
func (r *PolicyRouter) ScoreAll(ctx *RoutingContext, pods PodList) (scores []float64, scored []bool, err error) {
	s, err := r.snapshot(ctx, pods)
	if err != nil {
		return nil, nil, err
	}
	candidates, err := r.policy.Explain(nil, s)
	if err != nil {
		return nil, nil, err
	}
	best := kvpolicy.Down
	byAddress := make(map[string]kvpolicy.Candidate, len(candidates))
	for _, c := range candidates {
		byAddress[c.Instance] = c
		best = min(best, c.Tier)
	}
	for _, pod := range pods.All() {
		c := byAddress[pod.Address()]
		scores = append(scores, c.Score)
		scored = append(scored, c.Tier == best && best <= kvpolicy.FitsEmpty)
	}
	return scores, scored, nil
}

// PostRouteUpdate begins the request on the pod that was picked by several
// strategies together.
func (r *PolicyRouter) PostRouteUpdate(ctx *RoutingContext, _ PodList, pod *Pod) error {
	return r.begin(ctx, kvpolicy.Decision{Action: kvpolicy.Place, Target: pod.Address()})
}

func (r *PolicyRouter) begin(ctx *RoutingContext, d kvpolicy.Decision) error {
	return r.tracker.Begin(r.request(ctx), d, time.Now())
}

// FirstToken is to be called with the first part of a response's body.
func (r *PolicyRouter) FirstToken(requestID string) {
	r.tracker.FirstToken(track.Key{ID: requestID}, time.Now())
}

// Done is to be called wherever the gateway counts a request down, however it
// ended and as often as it likes: the first call releases.
func (r *PolicyRouter) Done(requestID string) {
	r.tracker.End(track.Key{ID: requestID}, time.Now())
}

// Leave forgets a pod that is gone.
func (r *PolicyRouter) Leave(pod *Pod, how track.Ending) error {
	return r.tracker.Leave(pod.Address(), how, time.Now())
}
