package aibrix

import (
	"context"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvpolicy/kvpolicy"
)

var (
	_ Router           = (*PolicyRouter)(nil)
	_ PodScorer        = (*PolicyRouter)(nil)
	_ PostRouteUpdater = (*PolicyRouter)(nil)
)

type pods []*Pod

func (p pods) All() []*Pod { return p }

// cache is what the gateway knows, by address.
type cache struct {
	running map[string]int
	match   map[string]int
}

func (c *cache) RealtimeRunning(p *Pod) (int, bool) {
	n, known := c.running[p.Address()]
	return n, known
}

func (c *cache) PrefixMatchPercent(*RoutingContext, PodList) map[string]int { return c.match }

// a and b are pods that have been up for an hour.
func gateway(t *testing.T, policy kvpolicy.Policy) (r *PolicyRouter, known *cache, a, b *Pod) {
	known = &cache{running: map[string]int{}, match: map[string]int{}}
	r, err := NewPolicyRouter(policy, known)
	require.NoError(t, err)
	pod := func(name, ip string) *Pod {
		return &Pod{Namespace: "n", Name: name, IP: ip, Port: "8000", StartTime: time.Now().Add(-time.Hour)}
	}
	a, b = pod("a", "10.0.0.1"), pod("b", "10.0.0.2")
	known.running[a.Address()], known.running[b.Address()] = 0, 0
	return r, known, a, b
}

// request has a prompt that no other request begins with, at four bytes a token.
func request(id string, tokens int) *RoutingContext {
	text := strings.Repeat(fmt.Sprintf("%-8s", id), tokens/2)
	return &RoutingContext{Context: context.Background(), RequestID: id, Model: "m", Message: text, PromptTokens: tokens}
}

func view(t *testing.T, r *PolicyRouter, pod *Pod) kvpolicy.Instance {
	s, err := r.snapshot(&RoutingContext{RequestID: "view"}, pods{pod})
	require.NoError(t, err)
	return s.Instances[0]
}

func TestAPercentageIsNotAFraction(t *testing.T) {
	for _, c := range []struct {
		percent float64
		want    int64
	}{{0, 0}, {1, 10}, {85, 850}, {100, 1000}} {
		got, err := CachedTokens(c.percent, 1000)
		require.NoError(t, err)
		require.Equal(t, c.want, got)
	}
	for _, percent := range []float64{0.85, 0.01, 99.5, -1, 101, 8500, math.NaN(), math.Inf(1)} {
		_, err := CachedTokens(percent, 1000)
		require.ErrorIs(t, err, kvpolicy.ErrInvalid, "%v is not clamped", percent)
		require.ErrorContains(t, err, "prefix_match_percent")
	}
	got, err := CachedTokens(99, 150)
	require.NoError(t, err)
	require.EqualValues(t, 148, got, "rounded down: never more than is cached")
}

func TestAFaultyMatchIsAnErrorAndRoutesNothing(t *testing.T) {
	r, known, a, b := gateway(t, kvpolicy.Unified())
	known.match[b.Address()] = 850
	_, err := r.Route(request("r", 100), pods{a, b})
	require.ErrorContains(t, err, b.Address())
	require.ErrorContains(t, err, "prefix_match_percent is 850")
}

func TestTheMatchRoutes(t *testing.T) {
	r, known, a, b := gateway(t, kvpolicy.Unified())
	known.match[b.Address()] = 90
	known.running[b.Address()] = 3
	address, err := r.Route(request("r", 10000), pods{a, b})
	require.NoError(t, err)
	require.Equal(t, "10.0.0.2:8000", address)
}

func TestRunningAndTheLedgerAreNotSummed(t *testing.T) {
	r, known, a, _ := gateway(t, kvpolicy.Unified())
	for _, id := range []string{"r1", "r2"} {
		_, err := r.Route(request(id, 100), pods{a})
		require.NoError(t, err)
	}
	require.EqualValues(t, 2, view(t, r, a).Requests, "before the gateway has counted them")
	known.running[a.Address()] = 2
	require.EqualValues(t, 2, view(t, r, a).Requests)
	known.running[a.Address()] = 5
	require.EqualValues(t, 5, view(t, r, a).Requests, "three are another gateway's")
}

func TestAPodOfUnknownLoadDoesNotWinByLookingIdle(t *testing.T) {
	policy := kvpolicy.Unified()
	policy.MaxMetricsAgeSeconds = 60
	r, known, a, b := gateway(t, policy)
	delete(known.running, a.Address())
	known.running[b.Address()] = 40
	address, err := r.Route(request("r", 100), pods{a, b})
	require.NoError(t, err)
	require.Equal(t, b.Address(), address)

	known.running[a.Address()] = -1 // a gateway that counted down twice
	var fault error
	r.Faults = func(err error) { fault = err }
	address, err = r.Route(request("s", 100), pods{a, b})
	require.NoError(t, err)
	require.Equal(t, b.Address(), address)
	require.ErrorContains(t, fault, "metrics.running is -1")
}

func TestReleasedOnce(t *testing.T) {
	r, _, a, _ := gateway(t, kvpolicy.Unified())
	for _, id := range []string{"kept", "gone"} {
		_, err := r.Route(request(id, 500), pods{a})
		require.NoError(t, err)
	}
	require.EqualValues(t, 1000, view(t, r, a).PendingPrefillTokens)
	r.FirstToken("kept")
	i := view(t, r, a)
	require.EqualValues(t, 500, i.PendingPrefillTokens)
	require.EqualValues(t, 1, i.ActiveDecodes)
	for range 3 {
		r.Done("gone")
	}
	i = view(t, r, a)
	require.EqualValues(t, 1, i.Requests)
	require.EqualValues(t, 500, i.OngoingTokens)
	require.Zero(t, i.PendingPrefillTokens)
}

func TestUptimeIsThePodsAndCapacityIsUnknown(t *testing.T) {
	r, _, a, _ := gateway(t, kvpolicy.Unified())
	i := view(t, r, a)
	require.InDelta(t, 3600, i.UptimeSeconds, 60)
	require.Zero(t, i.KVCapacityTokens)
	address, err := r.Route(request("r", 1_000_000), pods{a})
	require.NoError(t, err, "every request fits")
	require.Equal(t, a.Address(), address)
}

func TestAnotherPodAtTheAddressCachesNothing(t *testing.T) {
	r, _, a, _ := gateway(t, kvpolicy.Unified())
	c := request("r", 1000)
	_, err := r.Route(c, pods{a})
	require.NoError(t, err)
	r.Done("r")
	cached := func(pod *Pod) int64 {
		c.RequestID = "again"
		s, err := r.snapshot(c, pods{pod})
		require.NoError(t, err)
		return s.Instances[0].CachedTokens
	}
	require.Greater(t, cached(a), int64(900))
	successor := *a
	successor.Name, successor.StartTime = "c", time.Now()
	require.Zero(t, cached(&successor))
}

func TestScoreAllThenPostRouteUpdate(t *testing.T) {
	r, known, a, b := gateway(t, kvpolicy.Unified())
	known.running[b.Address()] = 2
	c := request("r", 700)
	scores, scored, err := r.ScoreAll(c, pods{a, b})
	require.NoError(t, err)
	require.Equal(t, []bool{true, true}, scored)
	require.InDeltaSlice(t, []float64{0.1, 0.2}, scores, 1e-9) // 700/7000 s of prefill, 2 requests of 0.05 s
	require.Zero(t, view(t, r, a).Requests, "to score is not to send")

	require.NoError(t, r.PostRouteUpdate(c, pods{a, b}, b), "another strategy had its say")
	i := view(t, r, b)
	require.EqualValues(t, 700, i.PendingPrefillTokens)
	require.EqualValues(t, 700, i.OngoingTokens)
}

func TestScoreAllScoresCandidatesAlone(t *testing.T) {
	policy := kvpolicy.Unified()
	policy.MaxMetricsAgeSeconds = 60
	r, known, a, b := gateway(t, policy)
	r.KVCapacityTokens = 1000
	delete(known.running, a.Address())
	_, scored, err := r.ScoreAll(request("r", 700), pods{a, b})
	require.NoError(t, err)
	require.Equal(t, []bool{false, true}, scored)
	_, scored, err = r.ScoreAll(request("r", 7000), pods{b})
	require.NoError(t, err)
	require.Equal(t, []bool{false}, scored, "it can never hold the request")
}

func TestRejectIsAnError(t *testing.T) {
	r, _, _, _ := gateway(t, kvpolicy.Unified())
	_, err := r.Route(request("r", 10), pods{})
	require.ErrorContains(t, err, "no_available_instance")
	_, scored, err := r.ScoreAll(request("r", 10), pods{})
	require.NoError(t, err)
	require.Empty(t, scored)
}

func TestRegistered(t *testing.T) {
	RegisterRouter(kvpolicy.Marginal(), &cache{})
	r, err := registry[Algorithm]()
	require.NoError(t, err)
	require.IsType(t, &PolicyRouter{}, r)
	RegisterRouter(kvpolicy.Policy{}, &cache{})
	_, err = registry[Algorithm]()
	require.ErrorContains(t, err, "score")
}
