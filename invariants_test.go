package kvpolicy_test

import (
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"sync"
	"testing"

	"github.com/kvpolicy/kvpolicy"
	"github.com/stretchr/testify/require"
	"gonum.org/v1/gonum/stat/distuv"
	"pgregory.net/rapid"
)

// The properties of this file are SPEC section 8's, as far as they concern
// Decide.

// decide decides on a situation that must be valid.
func decide(t require.TestingT, p kvpolicy.Policy, s kvpolicy.Snapshot) kvpolicy.Decision {
	d, err := p.Decide(s)
	require.NoError(t, err)
	return d
}

func TestOrderOfInstancesIsOfNoConsequence(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := drawSituation(t, shape{extreme: true})
		other := s.snapshot
		other.Instances = rapid.Permutation(s.snapshot.Instances).Draw(t, "order")
		require.Equal(t, decide(t, s.policy, s.snapshot), decide(t, s.policy, other))

		explained, err := s.policy.Explain(nil, s.snapshot)
		require.NoError(t, err)
		again, err := s.policy.Explain(nil, other)
		require.NoError(t, err)
		require.ElementsMatch(t, explained, again)
	})
}

func TestGoroutinesDecideAlike(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := drawSituation(t, shape{})
		before := slices.Clone(s.snapshot.Instances)
		const n = 4
		var group sync.WaitGroup
		var all [n]kvpolicy.Decision
		for k := range n {
			group.Add(1)
			go func() {
				defer group.Done()
				all[k], _ = s.policy.Decide(s.snapshot)
			}()
		}
		group.Wait()
		for _, d := range all {
			require.Equal(t, decide(t, s.policy, s.snapshot), d)
		}
		require.Equal(t, before, s.snapshot.Instances, "the input is only read")
	})
}

// worsen adds load to an instance, of one kind or all kinds, within the bounds.
func worsen(t *rapid.T, i *kvpolicy.Instance, everything bool) {
	kind := rapid.IntRange(0, 5).Draw(t, "load")
	more := func(k int, to *int64, bound, most int64) {
		if everything || kind == k {
			*to = min(*to+rapid.Int64Range(1, most).Draw(t, "more"), bound)
		}
	}
	more(0, &i.Requests, 1e9, 50)
	more(1, &i.PendingPrefillTokens, 1e15, 50000)
	more(2, &i.OngoingTokens, 1e15, 50000)
	more(3, &i.ActiveDecodes, 1e9, 50)
	if everything || kind == 4 {
		i.WaitSeconds = min(i.WaitSeconds+rapid.Float64Range(1e-6, 30).Draw(t, "more wait"), 1e12)
	}
	if !everything { // room is no load that the score reads
		more(5, &i.KVUsedTokens, 1e15, 50000)
	}
}

// monotone makes the loss one that grows with the load, as SPEC section 8 asks
// of it: the exact value, with no stream decoding faster than it is recomputed.
func monotone(s *situation) {
	s.policy.Hazard.Cells = 0
	s.policy.Cost.PrefillRate = max(s.policy.Cost.PrefillRate, 4000)
	for k := range s.snapshot.Instances {
		i := &s.snapshot.Instances[k]
		i.PrefillRate = max(given(i.PrefillRate, 7000), 4000)
		i.DecodeRate = min(given(i.DecodeRate, 40), 400)
	}
}

func TestLoadOnAnotherNeverAttracts(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := drawSituation(t, shape{placing: true, extreme: true})
		monotone(&s)
		if oneIn(t, 4, "recover") {
			s.snapshot.Request.RunningOn = "gone"
		}
		d := decide(t, s.policy, s.snapshot)
		loaded := s.snapshot
		loaded.Instances = slices.Clone(loaded.Instances)
		for range rapid.IntRange(1, 4).Draw(t, "steps") {
			if len(loaded.Instances) == 0 {
				return
			}
			k := rapid.IntRange(0, len(loaded.Instances)-1).Draw(t, "instance")
			if loaded.Instances[k].ID == d.Target {
				continue
			}
			worsen(t, &loaded.Instances[k], false)
			next := decide(t, s.policy, loaded)
			require.NotEqual(t, loaded.Instances[k].ID, next.Target, "more load made it the target")
			d = next
		}
	})
}

func TestDominatedIsNeverChosen(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := drawSituation(t, shape{placing: true, extreme: true, instances: 6})
		monotone(&s)
		s.snapshot.Request.Affinity = ""
		if len(s.snapshot.Instances) == 0 {
			return
		}
		worse := rapid.SampledFrom(s.snapshot.Instances).Draw(t, "better")
		before := worse
		worse.ID = "dominated"
		worsen(t, &worse, true)
		if oneIn(t, 3, "colder") {
			worse.CachedTokens = rapid.Int64Range(0, worse.CachedTokens).Draw(t, "colder by")
		}
		if !s.policy.Hazard.Enabled && oneIn(t, 3, "slower") {
			worse.PrefillRate = max(worse.PrefillRate/2, 1e-9)
		}
		if worse.Requests == before.Requests || worse.PendingPrefillTokens == before.PendingPrefillTokens {
			return // at the bound already: not worse
		}
		s.snapshot.Instances = append(s.snapshot.Instances, worse)
		require.NotEqual(t, "dominated", decide(t, s.policy, s.snapshot).Target)
	})
}

func TestRaisingOverloadFactorKeepsWhatWasKept(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := drawSituation(t, shape{placing: true, extreme: true})
		factors := []float64{1, 1.0000001, 1.5, 2, 3, 10, 1e6, 1e300, math.MaxFloat64, math.Inf(1)}
		s.policy.Affinity.Enabled = true
		kept := false
		for _, f := range factors {
			s.policy.Affinity.OverloadFactor = f
			now := decide(t, s.policy, s.snapshot).Reason == kvpolicy.AffinityKept
			require.True(t, now || !kept, "kept at a lower factor, not at %v", f)
			kept = now
		}
	})
}

func TestRaisingThresholdsNeverTriggers(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := drawSituation(t, shape{presets: []string{"unified_v2_strict", "unified_v2_relaxed"}, noHazard: true, placing: true})
		s.policy.Separation.Enabled = true
		before := decide(t, s.policy, s.snapshot)
		g := &s.policy.Separation
		for _, minimum := range []*int64{&g.MinNewTokens, &g.MinActiveDecodes, &g.MinSourceCacheTokens, &g.MinExtraCacheTokens} {
			*minimum += rapid.SampledFrom([]int64{0, 0, 1, 100, 8000}).Draw(t, "higher")
		}
		g.MarginSeconds += rapid.SampledFrom([]float64{0, 0, 1e-9, 1}).Draw(t, "wider")
		after := decide(t, s.policy, s.snapshot)
		if after.Action == kvpolicy.PrefillRemote {
			require.Equal(t, kvpolicy.PrefillRemote, before.Action)
		}
		require.Equal(t, before.Target, after.Target, "the funnel does not choose the target")
	})
}

func TestRaisingHysteresisNeverMigrates(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := drawSituation(t, shape{presets: []string{"hazard_aware"}, running: true})
		s.policy.Migration.MaxSlowdownSeconds = rapid.SampledFrom([]float64{0.5, 5, 100}).Draw(t, "slowdown")
		stays := false
		for _, h := range []float64{0, 1e-9, 0.1, 1, 2, 10, 100, 1e12} {
			s.policy.Migration.HysteresisSeconds = h
			migrates := decide(t, s.policy, s.snapshot).Action == kvpolicy.Migrate
			require.False(t, stays && migrates, "migrates at %v, not below", h)
			stays = !migrates
		}
	})
}

// finite collects what is not finite in a JSON tree's numbers, which NaN and
// Inf could not even enter, by way of the decision's own fields.
func requireFinite(t require.TestingT, negative bool, values ...float64) {
	for _, x := range values {
		require.False(t, math.IsNaN(x) || math.IsInf(x, 0), "%v", values)
		require.True(t, negative || x >= 0, "%v", values)
	}
}

func requireSound(t require.TestingT, d kvpolicy.Decision) {
	b, v := d.Cost, d.Separation
	requireFinite(t, false, b.Contention, b.Queue, b.Prefill, b.Interference, b.Decode, b.Loss, b.Total(), d.Score, v.CostLocal, v.CostMigrate)
	requireFinite(t, true, d.Margin)
	for _, m := range []kvpolicy.Move{d.Move, d.Candidate} {
		requireFinite(t, false, m.PlannedSeconds, m.LossStaySeconds, m.LossMoveSeconds)
		requireFinite(t, true, m.RiskGainSeconds, m.DeltaTSeconds)
	}
	data, err := json.Marshal(d)
	require.NoError(t, err)
	require.True(t, json.Valid(data))
}

func TestCostsAreFiniteAndNotNegative(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := drawSituation(t, shape{extreme: true})
		requireSound(t, decide(t, s.policy, s.snapshot))
		all, err := s.policy.Explain(nil, s.snapshot)
		require.NoError(t, err)
		for _, c := range all {
			requireSound(t, kvpolicy.Decision{Action: kvpolicy.Place, Target: c.Instance, Reason: c.Reason,
				Cost: c.Cost, Score: c.Score, Separation: c.Separation, Candidate: c.Move})
		}
	})
}

func TestNoBounceAfterMigrate(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := drawSituation(t, shape{presets: []string{"hazard_aware"}, running: true})
		s.policy.Migration.MaxHops = 1e6
		s.snapshot.Request.Hops = 0
		s.policy.Migration.MaxSlowdownSeconds = rapid.SampledFrom([]float64{0, 1e6}).Draw(t, "slowdown")
		source := s.snapshot.Request.RunningOn
		d := decide(t, s.policy, s.snapshot)
		if d.Action != kvpolicy.Migrate {
			return
		}
		s.snapshot.Request.RunningOn = d.Target
		s.snapshot.Request.Hops++
		back := decide(t, s.policy, s.snapshot)
		require.False(t, back.Action == kvpolicy.Migrate && back.Target == source, "back it goes")
	})
}

// scaled is the situation with every time multiplied by a power of two; false
// where a curve has a tail that does not depend on its sessions.
func scaled(t require.TestingT, s situation, by float64) (situation, bool) {
	p := &s.policy
	for _, seconds := range []*float64{
		&p.MaxMetricsAgeSeconds, &p.Cost.DecodeIterationSeconds, &p.Cost.PrefillQuadratic,
		&p.Separation.MarginSeconds, &p.Transfer.OverheadSeconds, &p.Transfer.RecomputeOverheadSeconds,
		&p.Hazard.StallPenaltySeconds, &p.Migration.HysteresisSeconds, &p.Migration.MaxSlowdownSeconds,
		&p.Migration.MinRemainingSeconds,
	} {
		*seconds *= by
	}
	for _, rate := range []*float64{&p.Cost.PrefillRate, &p.Cost.DecodeRate, &p.Separation.InterferenceRate, &p.Transfer.Bandwidth} {
		*rate /= by
	}
	s.snapshot.Instances = slices.Clone(s.snapshot.Instances)
	for k := range s.snapshot.Instances {
		i := &s.snapshot.Instances[k]
		i.WaitSeconds *= by
		i.UptimeSeconds *= by
		i.MetricsAgeSeconds *= by
		i.PrefillRate /= by
		i.DecodeRate /= by
		i.Bandwidth /= by
		switch curve := i.Curve.(type) {
		case distuv.Exponential:
			curve.Rate /= by
			i.Curve = curve
		case distuv.Weibull:
			curve.Lambda *= by
			i.Curve = curve
		case foreign:
			curve.rate /= by
			i.Curve = curve
		case *kvpolicy.KaplanMeier:
			if curve.TailRate() == 1.0/3600 {
				return s, false
			}
			known := s.survival[i.CurveName]
			durations := slices.Clone(known.durations)
			for n := range durations {
				durations[n] *= by
			}
			longer, err := kvpolicy.NewKaplanMeier(durations, known.observed)
			require.NoError(t, err)
			i.Curve = longer
		}
	}
	return s, true
}

func TestScalingTimeScalesCosts(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := drawSituation(t, shape{})
		by := math.Exp2(float64(rapid.SampledFrom([]int{-3, -1, 1, 2, 5}).Draw(t, "power")))
		other, scales := scaled(t, s, by)
		if !scales {
			return
		}
		want := decide(t, s.policy, s.snapshot)
		got := decide(t, other.policy, other.snapshot)
		seconds := []*float64{&want.Cost.Contention, &want.Cost.Queue, &want.Cost.Prefill, &want.Cost.Interference,
			&want.Cost.Decode, &want.Cost.Loss, &want.Separation.CostLocal, &want.Separation.CostMigrate}
		if s.policy.Score == kvpolicy.ScoreCost {
			seconds = append(seconds, &want.Score, &want.Margin)
		}
		for _, m := range []*kvpolicy.Move{&want.Move, &want.Candidate} {
			seconds = append(seconds, &m.PlannedSeconds, &m.RiskGainSeconds, &m.DeltaTSeconds, &m.LossStaySeconds, &m.LossMoveSeconds)
		}
		for _, x := range seconds {
			*x *= by
		}
		if s.policy.Hazard.Enabled {
			// Quadrature to a tolerance need not scale to the last bit.
			require.Empty(t, differences("decision", treeOf(t, want), treeOf(t, got)))
			return
		}
		require.Equal(t, want, got)
	})
}

// treeOf is v as encoding/json reads its JSON back.
func treeOf(t require.TestingT, v any) (result map[string]any) {
	roundTrip(t, v, &result)
	return result
}

// equalFleet is n instances that nothing but their id tells apart.
func equalFleet(n int) (s kvpolicy.Snapshot) {
	s.Request = kvpolicy.Request{ContextTokens: 1000, RemainingTokens: 100}
	for k := range n {
		s.Instances = append(s.Instances, kvpolicy.Instance{ID: fmt.Sprintf("inst-%d", k), DecodeRate: 40})
	}
	return s
}

func TestEqualInstancesShareEvenly(t *testing.T) {
	const n, requests = 8, 16000
	ids := map[string]func(k int) string{
		"counter": func(k int) string { return fmt.Sprint(k) },
		"padded":  func(k int) string { return fmt.Sprintf("request-%08d", k) },
		"long":    func(k int) string { return fmt.Sprintf("chatcmpl-0123456789abcdef-%x-0123456789abcdef", k) },
		"bytes":   func(k int) string { return string([]byte{byte(k), byte(k >> 8)}) },
	}
	count := func(p kvpolicy.Policy, id func(k int) string, seed func(k int) uint64) float64 {
		s, shares := equalFleet(n), map[string]float64{}
		for k := range requests {
			s.Request.ID, p.Seed = id(k), seed(k)
			shares[decide(t, p, s).Target]++
		}
		squares, mean := 0.0, float64(requests)/n
		for _, share := range shares {
			squares += (share - mean) * (share - mean) / mean
		}
		return squares + mean*float64(n-len(shares))
	}
	// 29.9 is exceeded once in 10,000 draws of chi-square with 7 degrees of
	// freedom; ids and seeds are fixed, so that this holds or does not.
	limit := distuv.ChiSquared{K: n - 1}.Quantile(1 - 1e-4)
	for name, id := range ids {
		require.Less(t, count(kvpolicy.Unified(), id, func(int) uint64 { return 7 }), limit, name)
	}
	constant := func(int) string { return "the same" }
	require.Less(t, count(kvpolicy.LMetric(), constant, func(k int) uint64 { return uint64(k) }), limit, "seeds")
}

func TestBurstSpreads(t *testing.T) {
	const n, requests = 8, 800
	for _, name := range kvpolicy.PresetNames() {
		t.Run(name, func(t *testing.T) {
			p, err := kvpolicy.Preset(name)
			require.NoError(t, err)
			s, shares := equalFleet(n), map[string]int{}
			for k := range requests {
				s.Request.ID = fmt.Sprintf("request-%d", k)
				d := decide(t, p, s)
				shares[d.Target]++
				s, err = s.Apply(d)
				require.NoError(t, err)
			}
			require.Len(t, shares, n)
			for id, share := range shares {
				if name == "least_loaded" {
					require.Equal(t, requests/n, share, id)
				}
				require.InDelta(t, requests/n, share, 10, id)
			}
		})
	}
}
