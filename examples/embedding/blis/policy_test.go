package blis

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvpolicy/kvpolicy"
)

var (
	_ RoutingPolicy         = (*Policy)(nil)
	_ DisaggregationDecider = (*Policy)(nil)
)

const blockTokens = 16

// none is the closure of an instance that caches nothing.
func none([]int) int { return 0 }

func newPolicy(t *testing.T, policy kvpolicy.Policy, cached map[string]CachedBlocks) *Policy {
	p, err := NewPolicy(policy, blockTokens, cached)
	require.NoError(t, err)
	return p
}

// request has a prompt that no other request begins with.
func request(id string, tokens int) *Request {
	r := &Request{ID: id, InputTokens: make([]int, tokens)}
	for at := range r.InputTokens {
		r.InputTokens[at] = len(id)*1000 + int(id[len(id)-1])
	}
	return r
}

func view(t *testing.T, p *Policy, state *RouterState) kvpolicy.Instance {
	r := request("view", 0)
	s, err := p.snapshot(p.request(r), r, state)
	require.NoError(t, err)
	return s.Instances[0]
}

func TestInFlightAlreadyCountsWhatIsQueuedAndRuns(t *testing.T) {
	snapshot := RoutingSnapshot{ID: "a", QueueDepth: 3, BatchSize: 5, InFlightRequests: 9} // one is on its way
	p := newPolicy(t, kvpolicy.Unified(), nil)
	require.EqualValues(t, 9, view(t, p, &RouterState{Snapshots: []RoutingSnapshot{snapshot}}).Requests)
	require.Equal(t, 17, snapshot.EffectiveLoad(), "the trap: eight of nine counted twice")
}

func TestTheLedgerAndInFlightAreNotSummed(t *testing.T) {
	p := newPolicy(t, kvpolicy.Unified(), nil)
	state := &RouterState{Snapshots: []RoutingSnapshot{{ID: "a", InFlightRequests: 6}}, Clock: 1}
	require.Equal(t, "a", p.Route(request("r", 160), state).TargetInstance)
	later := &RouterState{Snapshots: []RoutingSnapshot{{ID: "a", InFlightRequests: 7}}, Clock: 2}
	i := view(t, p, later)
	require.EqualValues(t, 7, i.Requests)
	require.EqualValues(t, 160, i.PendingPrefillTokens, "which the simulator does not show")
	p.FirstToken("r", 3)
	i = view(t, p, later)
	require.Zero(t, i.PendingPrefillTokens)
	require.EqualValues(t, 1, i.ActiveDecodes)
}

func TestKVTokensComeInTokensAndGoOutInTokens(t *testing.T) {
	p := newPolicy(t, kvpolicy.Unified(), nil)
	i := view(t, p, &RouterState{Snapshots: []RoutingSnapshot{{ID: "a", TotalKvCapacityTokens: 419_001, KvTokensInUse: 100_003}}, Clock: 1})
	require.EqualValues(t, 419_001, i.KVCapacityTokens)
	require.EqualValues(t, 100_003, i.KVUsedTokens)
}

func TestTheClockCountsMicroseconds(t *testing.T) {
	p := newPolicy(t, kvpolicy.Unified(), nil)
	first := &RouterState{Snapshots: []RoutingSnapshot{{ID: "a"}}, Clock: 5_000_000}
	require.Zero(t, view(t, p, first).UptimeSeconds, "which counts from when it was first shown")
	first.Clock += 90_000_001
	require.InDelta(t, 90.000001, view(t, p, first).UptimeSeconds, 1e-9)
}

func TestEachInstanceIsAskedWhatItCaches(t *testing.T) {
	var asked []int
	p := newPolicy(t, kvpolicy.Unified(), map[string]CachedBlocks{
		"a": none,
		"b": func(tokens []int) int { asked = append(asked, len(tokens)); return 50 },
	})
	state := &RouterState{Snapshots: []RoutingSnapshot{{ID: "a"}, {ID: "b", InFlightRequests: 1}, {ID: "c"}}}
	r := request("r", 1000)
	d := p.Route(r, state)
	require.Equal(t, "b", d.TargetInstance)
	require.Equal(t, []int{1000}, asked)
	require.Equal(t, "no_affinity", d.Reason)

	// Greater is better: the target has the greatest score, and it is in seconds.
	require.InDelta(t, -1000.0/7000, d.Scores["a"], 1e-12)
	require.InDelta(t, -0.05-(1000-50*blockTokens)/7000.0, d.Scores["b"], 1e-12)
	for _, score := range d.Scores {
		require.LessOrEqual(t, score, d.Scores["b"])
	}
}

func TestAPromptThatIsQueuedCountsAsCached(t *testing.T) {
	p := newPolicy(t, kvpolicy.Unified(), map[string]CachedBlocks{"a": none, "b": none})
	state := &RouterState{Snapshots: []RoutingSnapshot{{ID: "a"}, {ID: "b"}}}
	r := request("r", 1600)
	first := p.Route(r, state).TargetInstance
	s, err := p.snapshot(p.request(&Request{ID: "next", InputTokens: r.InputTokens}), r, state)
	require.NoError(t, err)
	for _, i := range s.Instances {
		require.Equal(t, i.ID == first, i.CachedTokens == 1600)
	}
}

func TestDisaggregation(t *testing.T) {
	caches := func([]int) int { return 1900 }
	p := newPolicy(t, kvpolicy.UnifiedV2Relaxed(), map[string]CachedBlocks{"busy": caches})
	state := &RouterState{Snapshots: []RoutingSnapshot{{ID: "decoding"}, {ID: "busy", InFlightRequests: 500}}}
	require.Equal(t, "decoding", p.Route(request("first", 16), state).TargetInstance)
	p.FirstToken("first", 1000)

	state.Clock = 2000
	long := request("long", 32000)
	require.Equal(t, "decoding", p.Route(long, state).TargetInstance)
	want := DisaggregationDecision{Disaggregate: true, DecodePodOverride: "decoding", PrefillPodHint: "busy"}
	require.Equal(t, want, p.Decide(long, state))
	require.Equal(t, want, p.Decide(long, state), "to ask is not to decide again")

	short := request("short", 200)
	require.Equal(t, DisaggregationDecision{Disaggregate: false, DecodePodOverride: "decoding"}, p.Decide(short, state), "without a Route before it")
}

func TestReleasedOnceAndNothingIsLeft(t *testing.T) {
	p := newPolicy(t, kvpolicy.Unified(), nil)
	state := &RouterState{Snapshots: []RoutingSnapshot{{ID: "a"}}}
	for at := range 10 {
		require.Equal(t, "a", p.Route(request(fmt.Sprint("r", at), 100), state).TargetInstance)
	}
	for at := range 9 {
		for range 2 {
			p.Done(fmt.Sprint("r", at), 1)
		}
	}
	i := view(t, p, state)
	require.EqualValues(t, 1, i.Requests)
	require.EqualValues(t, 100, i.OngoingTokens)
	require.Len(t, p.routed, 1)
}

func TestARejectHasNoTarget(t *testing.T) {
	p := newPolicy(t, kvpolicy.Unified(), nil)
	full := []RoutingSnapshot{{ID: "a", TotalKvCapacityTokens: 160, KvTokensInUse: 160}}
	require.Equal(t, RoutingDecision{Reason: "no_feasible_instance"}, p.Route(request("r", 200), &RouterState{Snapshots: full}))
	require.Equal(t, RoutingDecision{Reason: "no_available_instance"}, p.Route(request("r", 200), &RouterState{}))
	require.Equal(t, "a", p.Route(request("r", 100), &RouterState{Snapshots: full, Clock: 1}).TargetInstance, "it waits there")
}

func TestCandidatesAloneHaveAScore(t *testing.T) {
	p := newPolicy(t, kvpolicy.Unified(), nil)
	d := p.Route(request("r", 100), &RouterState{Snapshots: []RoutingSnapshot{
		{ID: "full", TotalKvCapacityTokens: 160, KvTokensInUse: 160},
		{ID: "roomy", TotalKvCapacityTokens: 160, InFlightRequests: 9},
	}})
	require.Equal(t, "roomy", d.TargetInstance)
	require.Contains(t, d.Scores, "roomy")
	require.NotContains(t, d.Scores, "full")
}

func TestFaultsAreSaid(t *testing.T) {
	_, err := NewPolicy(kvpolicy.Unified(), 0, nil)
	require.ErrorContains(t, err, "block_tokens")
	p := newPolicy(t, kvpolicy.Unified(), nil)
	d := p.Route(request("r", 1), &RouterState{Snapshots: []RoutingSnapshot{{ID: "a", InFlightRequests: -1}}})
	require.Empty(t, d.TargetInstance)
	require.Contains(t, d.Reason, "metrics.running is -1")
}
