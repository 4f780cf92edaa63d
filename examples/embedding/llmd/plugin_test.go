package llmd

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/kvpolicy/kvpolicy"
	"github.com/kvpolicy/kvpolicy/track"
)

var (
	_ Scorer                = (*Plugin)(nil)
	_ Filter                = (*Plugin)(nil)
	_ Filter                = SourceFilter{}
	_ ProfileHandler        = (*Plugin)(nil)
	_ PreRequest            = (*Plugin)(nil)
	_ ResponseBodyProcessor = (*Plugin)(nil)
)

// server is an endpoint as the router's data layer fills it.
type server struct {
	address  string
	metrics  Metrics
	inFlight InFlightLoad
	match    PrefixMatch
}

func (s *server) String() string             { return s.address }
func (s *server) Metrics() Metrics           { return s.metrics }
func (s *server) InFlightLoad() InFlightLoad { return s.inFlight }
func (s *server) PrefixMatch() PrefixMatch   { return s.match }

// scraped is a server whose metrics have just come.
func scraped(address string, running, waiting int) *server {
	return &server{address: address, metrics: Metrics{RunningRequestsSize: running, WaitingQueueSize: waiting, UpdateTime: time.Now()}}
}

// highestScore is the router's picker: no request is told to it.
type highestScore struct{}

func (highestScore) TypedName() TypedName { return TypedName{"max-score-picker", "max"} }
func (highestScore) Pick(_ context.Context, scored []*ScoredEndpoint) *ProfileRunResult {
	best := scored[0]
	for _, s := range scored {
		if s.Score > best.Score {
			best = s
		}
	}
	return &ProfileRunResult{TargetEndpoints: []Endpoint{best.Endpoint}}
}

// favour is another scorer, which outweighs all others for one endpoint.
type favour string

func (favour) TypedName() TypedName     { return TypedName{"favour", "favour"} }
func (favour) Category() ScorerCategory { return Balance }
func (f favour) Score(_ context.Context, _ *InferenceRequest, endpoints []Endpoint) map[Endpoint]float64 {
	scores := map[Endpoint]float64{}
	for _, e := range endpoints {
		if e.String() == string(f) {
			scores[e] = 10
		}
	}
	return scores
}

// schedule runs one request through profiles as the router does, up to where it
// is sent.
func schedule(p *Plugin, r *InferenceRequest, endpoints []Endpoint, others ...Scorer) (*SchedulingResult, error) {
	ctx := context.Background()
	profiles := map[string]SchedulerProfile{
		DecodeProfile:  {Filters: []Filter{p}, Scorers: append([]Scorer{p}, others...), Picker: highestScore{}},
		PrefillProfile: {Filters: []Filter{SourceFilter{p}}, Picker: highestScore{}},
	}
	results := map[string]*ProfileRunResult{}
	for {
		next := p.Pick(ctx, r, profiles, results)
		if len(next) == 0 {
			break
		}
		for name, profile := range next {
			results[name] = run(ctx, profile, r, endpoints)
		}
	}
	result, err := p.ProcessResults(ctx, r, results)
	if err == nil {
		err = p.PreRequest(ctx, r, result)
	}
	return result, err
}

func run(ctx context.Context, profile SchedulerProfile, r *InferenceRequest, endpoints []Endpoint) *ProfileRunResult {
	for _, f := range profile.Filters {
		endpoints = f.Filter(ctx, r, endpoints)
	}
	if len(endpoints) == 0 {
		return nil
	}
	scored := make([]*ScoredEndpoint, len(endpoints))
	for at, e := range endpoints {
		scored[at] = &ScoredEndpoint{Endpoint: e}
	}
	for _, s := range profile.Scorers {
		scores := s.Score(ctx, r, endpoints)
		for _, e := range scored {
			e.Score += scores[e.Endpoint]
		}
	}
	return profile.Picker.Pick(ctx, scored)
}

func newPlugin(t require.TestingT, policy kvpolicy.Policy) (*Plugin, *[]error) {
	policy.MaxMetricsAgeSeconds = 60
	p, err := NewPlugin(policy)
	require.NoError(t, err)
	var faults []error
	p.Faults = func(err error) { faults = append(faults, err) }
	return p, &faults
}

// request has a prompt that no other request begins with.
func request(id string, tokens int) *InferenceRequest {
	r := &InferenceRequest{RequestID: id, TargetModel: "m", TokenIDs: make([]uint32, tokens)}
	for at := range r.TokenIDs {
		r.TokenIDs[at] = uint32(len(id)*1000 + int(id[len(id)-1]))
	}
	return r
}

func view(p *Plugin, e Endpoint) kvpolicy.Instance {
	return p.snapshot(request("view", 100), []Endpoint{e}).Instances[0]
}

func TestRunningAndWaitingAndInFlightAreNeverSummed(t *testing.T) {
	p, _ := newPlugin(t, kvpolicy.Unified())
	e := scraped("10.0.0.1:8000", 0, 0)
	for at := range 4 {
		_, err := schedule(p, request(fmt.Sprint("r", at), 100), []Endpoint{e})
		require.NoError(t, err)
	}
	e.inFlight = InFlightLoad{Requests: 4, Tokens: 400}
	require.EqualValues(t, 4, view(p, e).Requests, "what was sent counts before the server says so")

	e.metrics = Metrics{RunningRequestsSize: 3, WaitingQueueSize: 1, UpdateTime: time.Now()}
	require.EqualValues(t, 4, view(p, e).Requests, "the server's four are the same four")

	e.metrics = Metrics{RunningRequestsSize: 5, WaitingQueueSize: 2, UpdateTime: time.Now()}
	require.EqualValues(t, 7, view(p, e).Requests, "three are another router's")
}

func TestKVUsageIsAFractionDespiteItsName(t *testing.T) {
	p, faults := newPlugin(t, kvpolicy.Unified())
	e := scraped("10.0.0.1:8000", 1, 0)
	e.metrics.KVCacheUsagePercent, e.metrics.CacheBlockSize, e.metrics.CacheNumBlocks = 0.25, 16, 1000
	i := view(p, e)
	require.EqualValues(t, 16000, i.KVCapacityTokens)
	require.EqualValues(t, 4000, i.KVUsedTokens)
	require.Empty(t, *faults)

	e = scraped("10.0.0.2:8000", 0, 0)
	e.metrics.KVCacheUsagePercent = 25
	require.EqualValues(t, 1e12, view(p, e).MetricsAgeSeconds, "a percentage is not clamped: nothing is taken in")
	require.ErrorIs(t, (*faults)[0], kvpolicy.ErrInvalid)
	require.ErrorContains(t, (*faults)[0], "metrics.kv_usage is 25, must be a fraction of 0 to 1")
}

func TestAnUnscrapedEndpointDoesNotWinByLookingIdle(t *testing.T) {
	p, _ := newPlugin(t, kvpolicy.Unified())
	var decided kvpolicy.Decision
	p.Decided = func(_ kvpolicy.Snapshot, d kvpolicy.Decision) { decided = d }
	never := &server{address: "10.0.0.1:8000"}
	require.EqualValues(t, 1e12, view(p, never).MetricsAgeSeconds)

	// Not even by another scorer's favour: the Filter takes it out.
	result, err := schedule(p, request("r1", 100), []Endpoint{never, scraped("10.0.0.2:8000", 30, 5)}, favour(never.address))
	require.NoError(t, err)
	require.Equal(t, "10.0.0.2:8000", picked(result.ProfileResults[DecodeProfile]))
	require.False(t, decided.Degraded)

	result, err = schedule(p, request("r2", 100), []Endpoint{never})
	require.NoError(t, err)
	require.Equal(t, "10.0.0.1:8000", picked(result.ProfileResults[DecodeProfile]), "where no other is, it decides and says so")
	require.True(t, decided.Degraded)
}

func TestCachedTokensAreBlocksTimesBlockSize(t *testing.T) {
	p, _ := newPlugin(t, kvpolicy.Unified())
	e := scraped("10.0.0.1:8000", 0, 0)
	e.match = PrefixMatch{CachedBlockCount: 5, BlockSizeTokens: 16}
	require.EqualValues(t, 80, view(p, e).CachedTokens)

	r := request("r", 320)
	_, err := schedule(p, r, []Endpoint{e})
	require.NoError(t, err)
	require.EqualValues(t, 320, p.snapshot(r, []Endpoint{e}).Instances[0].CachedTokens, "what was sent will be cached")
}

func TestReleasedOnce(t *testing.T) {
	p, _ := newPlugin(t, kvpolicy.Unified())
	e := scraped("10.0.0.1:8000", 0, 0)
	ctx, kept, gone := context.Background(), request("kept", 1600), request("gone", 1600)
	for _, r := range []*InferenceRequest{kept, gone} {
		_, err := schedule(p, r, []Endpoint{e})
		require.NoError(t, err)
		p.ResponseBody(ctx, r, &Response{}, e.address)
	}
	i := view(p, e)
	require.EqualValues(t, 2, i.Requests)
	require.EqualValues(t, 2, i.ActiveDecodes)
	require.Zero(t, i.PendingPrefillTokens)
	for range 3 { // the end of the stream, an abort, and the abort's own end
		p.ResponseBody(ctx, gone, &Response{EndOfStream: true}, e.address)
	}
	i = view(p, e)
	require.EqualValues(t, 1, i.Requests)
	require.EqualValues(t, 1600, i.OngoingTokens)
}

func TestAnIDIsOfOneRequest(t *testing.T) {
	p, _ := newPlugin(t, kvpolicy.Unified())
	e, r := scraped("10.0.0.1:8000", 0, 0), request("from a client's header", 16)
	_, err := schedule(p, r, []Endpoint{e})
	require.NoError(t, err)
	p.ResponseBody(context.Background(), r, &Response{EndOfStream: true}, e.address)
	_, err = schedule(p, r, []Endpoint{e})
	require.ErrorIs(t, err, track.ErrEnded, "which is what a request looks like whose client has gone")
	require.Zero(t, view(p, e).Requests)
}

// fleet is where a long prompt is worth prefilling elsewhere: the idle one
// decodes, and the busy one caches the prompt.
func fleet(t *testing.T, p *Plugin) (endpoints []Endpoint) {
	decoding, holder := scraped("10.0.0.1:8000", 0, 0), scraped("10.0.0.2:8000", 0, 0)
	for at := range 4 {
		r := request(fmt.Sprint("d", at), 16)
		_, err := schedule(p, r, []Endpoint{decoding})
		require.NoError(t, err)
		p.ResponseBody(context.Background(), r, &Response{}, "")
	}
	holder.metrics = Metrics{RunningRequestsSize: 500, UpdateTime: time.Now()}
	holder.match = PrefixMatch{CachedBlockCount: 1900, BlockSizeTokens: 16}
	return []Endpoint{decoding, holder}
}

func TestTheProfileHandlerRunsThePrefillWhereThePolicyWantsIt(t *testing.T) {
	p, _ := newPlugin(t, kvpolicy.UnifiedV2Relaxed())
	endpoints := fleet(t, p)
	result, err := schedule(p, request("long", 32000), endpoints)
	require.NoError(t, err)
	require.Equal(t, DecodeProfile, result.PrimaryProfileName)
	require.Equal(t, "10.0.0.1:8000", picked(result.ProfileResults[DecodeProfile]))
	require.Equal(t, "10.0.0.2:8000", picked(result.ProfileResults[PrefillProfile]))
	require.Zero(t, view(p, endpoints[0]).PendingPrefillTokens, "its prefill is the source's")
	require.Zero(t, count(p), "nothing is left of it")

	// The same prompt with another scorer's say: the target is not the policy's,
	// for which alone the gates were passed.
	result, err = schedule(p, request("lonh", 32000), endpoints, favour("10.0.0.2:8000"))
	require.NoError(t, err)
	require.Equal(t, "10.0.0.2:8000", picked(result.ProfileResults[DecodeProfile]))
	require.NotContains(t, result.ProfileResults, PrefillProfile)
	require.EqualValues(t, 501+1, view(p, endpoints[1]).Requests, "it counts where it went")
	require.Zero(t, count(p))
}

func count(p *Plugin) (n int) {
	p.separated.Range(func(any, any) bool { n++; return true })
	return n
}

func TestAShortPromptIsNeverPrefilledElsewhere(t *testing.T) {
	p, _ := newPlugin(t, kvpolicy.UnifiedV2Relaxed())
	result, err := schedule(p, request("s", 200), fleet(t, p))
	require.NoError(t, err)
	require.NotContains(t, result.ProfileResults, PrefillProfile)
}

func TestARejectLeavesNoEndpoint(t *testing.T) {
	p, _ := newPlugin(t, kvpolicy.Unified())
	e := scraped("10.0.0.1:8000", 0, 0)
	e.metrics.CacheBlockSize, e.metrics.CacheNumBlocks = 16, 10
	_, err := schedule(p, request("r", 1000), []Endpoint{e})
	require.ErrorContains(t, err, "no endpoint for request r")

	nameless := scraped("", 0, 0)
	require.Empty(t, p.Filter(context.Background(), request("r", 1), []Endpoint{nameless}))
}

func TestScoresAreOfTheUnitRangeAndTheTargetAloneHasOne(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := kvpolicy.Snapshot{Request: kvpolicy.Request{ID: "r", ContextTokens: rapid.SampledFrom([]int64{0, 100, 50000}).Draw(t, "context")}}
		for at := range rapid.IntRange(1, 6).Draw(t, "endpoints") {
			s.Instances = append(s.Instances, kvpolicy.Instance{
				ID:                fmt.Sprint("e", at),
				Requests:          rapid.Int64Range(0, 3).Draw(t, "requests"),
				CachedTokens:      rapid.SampledFrom([]int64{0, 50000}).Draw(t, "cached"),
				KVCapacityTokens:  rapid.SampledFrom([]int64{0, 10, 40000}).Draw(t, "capacity"),
				MetricsAgeSeconds: rapid.SampledFrom([]float64{0, 1e12}).Draw(t, "age"),
			})
		}
		s.Request.Affinity = rapid.SampledFrom(s.Instances).Draw(t, "home").ID
		policy := rapid.SampledFrom([]kvpolicy.Policy{kvpolicy.Unified(), kvpolicy.LMetric(), kvpolicy.Sticky()}).Draw(t, "policy")
		p, _ := newPlugin(t, policy)
		d, candidates, err := p.explain(s)
		require.NoError(t, err)
		got := scores(d, candidates)
		var tier kvpolicy.Tier
		for _, c := range candidates {
			if c.Instance == d.Target {
				tier = c.Tier
			}
		}
		for _, c := range candidates {
			score := got[c.Instance]
			require.Equal(t, c.Tier == tier, score > 0, "only candidates have a score")
			require.True(t, score >= 0 && score <= 1)
			require.Equal(t, c.Instance == d.Target, score == 1, "%s of %v", c.Instance, got)
			for _, o := range candidates {
				if o.Tier == c.Tier && score > 0 && o.Score < c.Score && c.Instance != d.Target {
					require.Greater(t, got[o.Instance], score)
				}
			}
		}
	})
}

func TestThePolicyIsAParameterOfTheRoutersConfiguration(t *testing.T) {
	RegisterPlugin()
	parameters := func(text string) *json.Decoder { return json.NewDecoder(strings.NewReader(text)) }
	made, err := registry[PluginType]("mine", parameters(`{"preset": "marginal", "max_metrics_age_s": 1}`))
	require.NoError(t, err)
	require.Equal(t, 1.0, made.(*Plugin).policy.MaxMetricsAgeSeconds)
	_, err = registry[PluginType]("mine", parameters(`{"max_metric_age_s": 1}`))
	require.ErrorContains(t, err, "max_metric_age_s must not be there")
	_, err = registry[PluginType]("mine", nil)
	require.NoError(t, err)
}
