// Package llmd decides in the endpoint picker of llm-d's router. Copy
// plugin.go; host.go stands in for the router's types.
package llmd

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/kvpolicy/kvpolicy"
	"github.com/kvpolicy/kvpolicy/track"
)

// PluginType is what the router's configuration calls a Plugin.
const PluginType = "kvpolicy"

// The names of the profiles that a Plugin handles.
const (
	DecodeProfile  = "decode"
	PrefillProfile = "prefill"
)

// RegisterPlugin makes the plugin known; call it before the router reads its
// configuration. Its parameters are a policy's JSON.
func RegisterPlugin() {
	Register(PluginType, Alpha, func(_ string, parameters *json.Decoder) (any, error) {
		policy := kvpolicy.Unified()
		if parameters != nil {
			if err := parameters.Decode(&policy); err != nil {
				return nil, err
			}
		}
		return NewPlugin(policy)
	})
}

// Plugin is one policy in all places where the router asks: Filter and Scorer
// of the decode profile, Filter of the prefill profile, ProfileHandler, and the
// hooks that keep the ledger. It is no Picker, which is not told the request:
// the router's own picker of the highest score takes the policy's target.
type Plugin struct {
	// Decided is told each decision with what it was decided on, where it is not
	// nil; see package decisionlog.
	Decided func(kvpolicy.Snapshot, kvpolicy.Decision)
	// Faults is told of metrics and requests with a fault, where it is not nil.
	Faults func(error)

	policy  kvpolicy.Policy
	tracker *track.Tracker
	// separated holds, by request id, what was decided on a request whose
	// prefill is to run elsewhere, from its Score to its ProcessResults: a policy
	// with PD-separation needs the Plugin as ProfileHandler too.
	separated sync.Map
}

// NewPlugin makes a plugin. Metrics are scraped every 50 ms, so that a policy
// with MaxMetricsAgeSeconds of about 1 passes over endpoints that have missed
// twenty scrapes, or were never scraped.
func NewPlugin(policy kvpolicy.Policy) (*Plugin, error) {
	if err := policy.Validate(); err != nil {
		return nil, err
	}
	tracker, err := track.New(track.DefaultConfig())
	if err != nil {
		return nil, err
	}
	return &Plugin{policy: policy, tracker: tracker}, nil
}

// TypedName names the plugin.
func (p *Plugin) TypedName() TypedName { return TypedName{PluginType, PluginType} }

// Category tells that locality and load are both in the score.
func (p *Plugin) Category() ScorerCategory { return Balance }

// Leave forgets an endpoint that discovery has lost.
func (p *Plugin) Leave(endpoint string, how track.Ending) error {
	return p.tracker.Leave(endpoint, how, time.Now())
}

// observe takes in what was scraped from an endpoint. A scrape that is known
// already is passed over, one that never was leaves it of unknown age.
func (p *Plugin) observe(e Endpoint, now time.Time) error {
	id, m := e.String(), e.Metrics()
	if err := p.tracker.Join(id, track.InstanceInfo{}, now); err != nil {
		return err
	}
	if m.UpdateTime.IsZero() {
		return nil
	}
	// Running and waiting are the server's own count, InFlightLoad is a part of
	// the same requests: the tracker holds its ledger against the server's
	// count, and InFlightLoad does not enter.
	running, waiting := float64(m.RunningRequestsSize), float64(m.WaitingQueueSize)
	return p.tracker.Observe(id, track.Metrics{
		Running:     &running,
		Waiting:     &waiting,
		KVUsage:     &m.KVCacheUsagePercent, // 0 to 1, despite its name
		BlockTokens: int64(m.CacheBlockSize),
		Blocks:      int64(m.CacheNumBlocks),
	}, m.UpdateTime)
}

func (p *Plugin) request(r *InferenceRequest) track.Request {
	request := track.Request{
		Session: r.Headers["x-session-id"],
		Prompt:  p.tracker.TokenPrompt(nil, track.Salt{Model: r.TargetModel}, r.TokenIDs),
	}
	request.ID, request.ContextTokens = r.RequestID, int64(len(r.TokenIDs))
	return request
}

// snapshot is what to decide on: the endpoints that the router offers.
func (p *Plugin) snapshot(r *InferenceRequest, endpoints []Endpoint) kvpolicy.Snapshot {
	now := time.Now()
	offered := make(map[string]Endpoint, len(endpoints))
	for _, e := range endpoints {
		if err := p.observe(e, now); err != nil {
			p.fault(fmt.Errorf("%s: %w", e, err)) // not taken in: the last metrics age
		}
		offered[e.String()] = e
	}
	s := p.tracker.Snapshot(p.request(r), now, nil)
	s.Instances = slices.DeleteFunc(s.Instances, func(i kvpolicy.Instance) bool { return offered[i.ID] == nil })
	for at := range s.Instances {
		i := &s.Instances[at]
		// The router's index knows of other routers, the tracker's of prompts
		// that are still queued.
		match := offered[i.ID].PrefixMatch()
		i.CachedTokens = max(i.CachedTokens, int64(match.CachedBlockCount)*int64(match.BlockSizeTokens))
	}
	return s
}

// Filter leaves the candidates: available, fresh and with room for the request,
// as far as there are such. None is left of a request that is to be rejected,
// which the router answers with 503. In the prefill profile use SourceFilter.
func (p *Plugin) Filter(_ context.Context, r *InferenceRequest, endpoints []Endpoint) []Endpoint {
	s := p.snapshot(r, endpoints)
	d, candidates, err := p.explain(s)
	if err != nil {
		return endpoints
	}
	tiers := make(map[string]kvpolicy.Tier, len(candidates))
	best := kvpolicy.Tier(0)
	for _, c := range candidates {
		tiers[c.Instance] = c.Tier
		if c.Instance == d.Target {
			best = c.Tier
		}
	}
	return slices.DeleteFunc(slices.Clone(endpoints), func(e Endpoint) bool { return best == 0 || tiers[e.String()] != best })
}

// Score is 1 for the target of the decision and less for the others, by rank:
// a sum with other scorers needs a bounded scale, which seconds are not. With
// other scorers beside it, theirs may outweigh it.
func (p *Plugin) Score(_ context.Context, r *InferenceRequest, endpoints []Endpoint) map[Endpoint]float64 {
	s := p.snapshot(r, endpoints)
	d, candidates, err := p.explain(s)
	if err != nil {
		return nil // the other scorers decide
	}
	if p.Decided != nil {
		p.Decided(s, d)
	}
	if d.Action == kvpolicy.PrefillRemote {
		p.separated.Store(r.RequestID, d)
	}
	ranks := scores(d, candidates)
	out := make(map[Endpoint]float64, len(endpoints))
	for _, e := range endpoints {
		out[e] = ranks[e.String()]
	}
	return out
}

// explain decides, and prices every instance for it.
func (p *Plugin) explain(s kvpolicy.Snapshot) (kvpolicy.Decision, []kvpolicy.Candidate, error) {
	d, err := p.policy.Decide(s)
	if err != nil {
		p.fault(err)
		return d, nil, err
	}
	candidates, err := p.policy.Explain(nil, s)
	return d, candidates, err
}

// scores ranks candidates within [0, 1]: 1 is the target alone, even where the
// best was passed over for a session's home, and 0 are those that were none.
func scores(d kvpolicy.Decision, candidates []kvpolicy.Candidate) map[string]float64 {
	out := make(map[string]float64, len(candidates))
	at := slices.IndexFunc(candidates, func(c kvpolicy.Candidate) bool { return c.Reason == kvpolicy.Taken })
	for _, c := range candidates {
		if at < 0 || c.Tier != candidates[at].Tier {
			continue
		}
		better := 0
		for _, o := range candidates {
			if o.Tier == c.Tier && o.Score < c.Score {
				better++
			}
		}
		out[c.Instance] = float64(len(candidates)-better) / float64(len(candidates)+1)
	}
	if at >= 0 {
		out[d.Target] = 1
	}
	return out
}

// SourceFilter is the Filter of the prefill profile: it leaves the instance
// that the policy wants to prefill, so that the profile needs no scorer.
type SourceFilter struct{ Plugin *Plugin }

// TypedName names the filter.
func (f SourceFilter) TypedName() TypedName { return TypedName{PluginType + "-source", PluginType} }

// Filter leaves the source, if it is among the endpoints.
func (f SourceFilter) Filter(_ context.Context, r *InferenceRequest, endpoints []Endpoint) []Endpoint {
	d := f.Plugin.decision(r)
	return slices.DeleteFunc(slices.Clone(endpoints), func(e Endpoint) bool { return e.String() != d.PrefillOn })
}

// decision is what was decided on a request whose prefill is to run elsewhere,
// zero for any other.
func (p *Plugin) decision(r *InferenceRequest) kvpolicy.Decision {
	d, _ := p.separated.Load(r.RequestID)
	decision, _ := d.(kvpolicy.Decision)
	return decision
}

// Pick runs the decode profile, and then the prefill profile where the policy
// wants the prefill elsewhere and its target was picked.
func (p *Plugin) Pick(_ context.Context, r *InferenceRequest, profiles map[string]SchedulerProfile,
	results map[string]*ProfileRunResult) map[string]SchedulerProfile {
	next := ""
	if _, ran := results[DecodeProfile]; !ran {
		next = DecodeProfile
	} else if _, ran := results[PrefillProfile]; !ran && p.decision(r).Target != "" &&
		picked(results[DecodeProfile]) == p.decision(r).Target {
		next = PrefillProfile
	}
	profile, known := profiles[next]
	if !known {
		return nil
	}
	return map[string]SchedulerProfile{next: profile}
}

// ProcessResults hands the picks on. Where no source was found the target
// prefills itself.
func (p *Plugin) ProcessResults(_ context.Context, r *InferenceRequest, results map[string]*ProfileRunResult) (*SchedulingResult, error) {
	p.separated.Delete(r.RequestID)
	if picked(results[DecodeProfile]) == "" {
		return nil, fmt.Errorf("kvpolicy: no endpoint for request %s", r.RequestID)
	}
	out := map[string]*ProfileRunResult{DecodeProfile: results[DecodeProfile]}
	if picked(results[PrefillProfile]) != "" {
		out[PrefillProfile] = results[PrefillProfile]
	}
	return &SchedulingResult{ProfileResults: out, PrimaryProfileName: DecodeProfile}, nil
}

// picked is the first endpoint of a result, empty for none.
func picked(r *ProfileRunResult) string {
	if r == nil || len(r.TargetEndpoints) == 0 {
		return ""
	}
	return r.TargetEndpoints[0].String()
}

// PreRequest begins the request in the ledger where it really goes, which
// other scorers may have had a say in. The error is track.ErrEnded for an id
// that was another request's: an id must be the router's, and not a client's.
func (p *Plugin) PreRequest(_ context.Context, r *InferenceRequest, result *SchedulingResult) error {
	d := kvpolicy.Decision{
		Action:    kvpolicy.Place,
		Target:    picked(result.ProfileResults[DecodeProfile]),
		PrefillOn: picked(result.ProfileResults[PrefillProfile]),
	}
	if d.PrefillOn != "" {
		d.Action = kvpolicy.PrefillRemote
	}
	return p.tracker.Begin(p.request(r), d, time.Now())
}

// ResponseBody takes the first part of a body for the first token, and the end
// of the stream, however it came, for the end of the request.
func (p *Plugin) ResponseBody(_ context.Context, r *InferenceRequest, response *Response, _ string) {
	key := track.Key{ID: r.RequestID}
	if response.EndOfStream {
		p.tracker.End(key, time.Now()) // the first releases, the others find nothing
		return
	}
	p.tracker.FirstToken(key, time.Now())
}

func (p *Plugin) fault(err error) {
	if p.Faults != nil {
		p.Faults(err)
	}
}
