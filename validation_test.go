package kvpolicy_test

import (
	"math"
	"testing"

	"github.com/kvpolicy/kvpolicy"
	"github.com/stretchr/testify/require"
)

// everything is a policy with all its parts on, and a snapshot of a new request
// in which every rate is used.
func everything() (kvpolicy.Policy, kvpolicy.Snapshot) {
	p := kvpolicy.HazardAware()
	p.Affinity = kvpolicy.Unified().Affinity
	p.Separation = kvpolicy.UnifiedV2Relaxed().Separation
	p.Cost.DecodeRate = 40
	return p, kvpolicy.Snapshot{
		Request:   kvpolicy.Request{ID: "r", ContextTokens: 9000, RemainingTokens: 100},
		Instances: []kvpolicy.Instance{{ID: "a"}, {ID: "b"}},
	}
}

// TestBadNumbersAreNamed sets every number to what it may not be, one at a
// time.
func TestBadNumbersAreNamed(t *testing.T) {
	type policy = *kvpolicy.Policy
	type instance = *kvpolicy.Instance
	refuse := func(t *testing.T, path string, spoil func(policy, *kvpolicy.Snapshot)) {
		p, s := everything()
		_, err := p.Decide(s)
		require.NoError(t, err, "the unspoiled input is valid")
		spoil(&p, &s)
		d, err := p.Decide(s)
		require.Equal(t, kvpolicy.Decision{}, d)
		require.ErrorIs(t, err, kvpolicy.ErrInvalid)
		var field *kvpolicy.FieldError
		require.ErrorAs(t, err, &field)
		require.Equal(t, path, field.Path)
		require.NotEmpty(t, field.Value)
		require.NotEmpty(t, field.Want)
		explained, err := p.Explain(nil, s)
		require.ErrorIs(t, err, kvpolicy.ErrInvalid)
		require.Empty(t, explained)
	}

	nan, inf := math.NaN(), math.Inf(1)
	const seconds, rate = 1e12, math.MaxFloat64
	policyNumbers := []struct {
		path string
		at   func(policy) *float64
		most float64
	}{
		{"max_metrics_age_s", func(p policy) *float64 { return &p.MaxMetricsAgeSeconds }, seconds},
		{"cost.decode_iteration_s", func(p policy) *float64 { return &p.Cost.DecodeIterationSeconds }, seconds},
		{"cost.prefill_rate", func(p policy) *float64 { return &p.Cost.PrefillRate }, rate},
		{"cost.prefill_quadratic", func(p policy) *float64 { return &p.Cost.PrefillQuadratic }, 1},
		{"cost.interference_weight", func(p policy) *float64 { return &p.Cost.InterferenceWeight }, 1e6},
		{"cost.decode_rate", func(p policy) *float64 { return &p.Cost.DecodeRate }, rate},
		{"pdsep.interference_rate", func(p policy) *float64 { return &p.Separation.InterferenceRate }, 1e18},
		{"pdsep.interference_alpha", func(p policy) *float64 { return &p.Separation.InterferenceAlpha }, 1e6},
		{"pdsep.margin_s", func(p policy) *float64 { return &p.Separation.MarginSeconds }, seconds},
		{"transfer.overhead_s", func(p policy) *float64 { return &p.Transfer.OverheadSeconds }, seconds},
		{"transfer.recompute_overhead_s", func(p policy) *float64 { return &p.Transfer.RecomputeOverheadSeconds }, seconds},
		{"transfer.bandwidth", func(p policy) *float64 { return &p.Transfer.Bandwidth }, rate},
		{"transfer.kv_bytes_per_token", func(p policy) *float64 { return &p.Transfer.KVBytesPerToken }, 1e12},
		{"hazard.stall_penalty_s", func(p policy) *float64 { return &p.Hazard.StallPenaltySeconds }, seconds},
		{"migration.hysteresis_s", func(p policy) *float64 { return &p.Migration.HysteresisSeconds }, seconds},
		{"migration.max_slowdown_s", func(p policy) *float64 { return &p.Migration.MaxSlowdownSeconds }, seconds},
		{"migration.min_remaining_s", func(p policy) *float64 { return &p.Migration.MinRemainingSeconds }, seconds},
	}
	for _, n := range policyNumbers {
		t.Run(n.path, func(t *testing.T) {
			for _, bad := range []float64{nan, inf, -inf, -1, -math.SmallestNonzeroFloat64, math.Nextafter(n.most, inf)} {
				refuse(t, n.path, func(p policy, _ *kvpolicy.Snapshot) { *n.at(p) = bad })
			}
		})
	}
	t.Run("affinity.overload_factor", func(t *testing.T) {
		for _, bad := range []float64{nan, -inf, -1, 0, math.Nextafter(1, 0)} {
			refuse(t, "affinity.overload_factor", func(p policy, _ *kvpolicy.Snapshot) { p.Affinity.OverloadFactor = bad })
		}
	})

	policyCounts := []struct {
		path string
		at   func(policy) *int64
		most int64
	}{
		{"pdsep.min_new_tokens", func(p policy) *int64 { return &p.Separation.MinNewTokens }, 1e15},
		{"pdsep.min_active_decodes", func(p policy) *int64 { return &p.Separation.MinActiveDecodes }, 1e9},
		{"pdsep.min_source_cache_tokens", func(p policy) *int64 { return &p.Separation.MinSourceCacheTokens }, 1e15},
		{"pdsep.min_extra_cache_tokens", func(p policy) *int64 { return &p.Separation.MinExtraCacheTokens }, 1e15},
		{"migration.max_hops", func(p policy) *int64 { return &p.Migration.MaxHops }, 1e6},
	}
	for _, n := range policyCounts {
		t.Run(n.path, func(t *testing.T) {
			for _, bad := range []int64{-1, math.MinInt64, n.most + 1, math.MaxInt64} {
				refuse(t, n.path, func(p policy, _ *kvpolicy.Snapshot) { *n.at(p) = bad })
			}
		})
	}
	for path, at := range map[string]struct {
		at   func(policy) *int
		most int
	}{
		"hazard.cells":             {func(p policy) *int { return &p.Hazard.Cells }, 65536},
		"migration.overlap_rounds": {func(p policy) *int { return &p.Migration.OverlapRounds }, 64},
	} {
		t.Run(path, func(t *testing.T) {
			for _, bad := range []int{-1, math.MinInt32, at.most + 1, math.MaxInt32} {
				refuse(t, path, func(p policy, _ *kvpolicy.Snapshot) { *at.at(p) = bad })
			}
		})
	}
	t.Run("score", func(t *testing.T) {
		for _, bad := range []kvpolicy.Score{0, kvpolicy.ScoreLeastLoaded + 1, 255} {
			refuse(t, "score", func(p policy, _ *kvpolicy.Snapshot) { p.Score = bad })
		}
	})

	instanceNumbers := []struct {
		field string
		at    func(instance) *float64
		most  float64
	}{
		{"wait_s", func(i instance) *float64 { return &i.WaitSeconds }, seconds},
		{"prefill_rate", func(i instance) *float64 { return &i.PrefillRate }, 1e18},
		{"decode_rate", func(i instance) *float64 { return &i.DecodeRate }, 1e18},
		{"bandwidth", func(i instance) *float64 { return &i.Bandwidth }, 1e18},
		{"uptime_s", func(i instance) *float64 { return &i.UptimeSeconds }, seconds},
		{"metrics_age_s", func(i instance) *float64 { return &i.MetricsAgeSeconds }, seconds},
	}
	for _, n := range instanceNumbers {
		t.Run(n.field, func(t *testing.T) {
			bads := []float64{nan, inf, -inf, -1, -math.SmallestNonzeroFloat64, math.Nextafter(n.most, inf)}
			if n.most == 1e18 {
				bads = append(bads, 1e-300, math.Nextafter(1e-9, 0))
			}
			for _, bad := range bads {
				refuse(t, "instances[1]."+n.field, func(_ policy, s *kvpolicy.Snapshot) { *n.at(&s.Instances[1]) = bad })
			}
			for _, bad := range []float64{nan, inf, -1} { // whoever is out is checked too
				refuse(t, "instances[1]."+n.field, func(_ policy, s *kvpolicy.Snapshot) {
					*n.at(&s.Instances[1]) = bad
					s.Instances[1].Unavailable = true
				})
			}
		})
	}
	instanceCounts := []struct {
		field string
		at    func(instance) *int64
		most  int64
	}{
		{"requests", func(i instance) *int64 { return &i.Requests }, 1e9},
		{"pending_prefill_tokens", func(i instance) *int64 { return &i.PendingPrefillTokens }, 1e15},
		{"ongoing_tokens", func(i instance) *int64 { return &i.OngoingTokens }, 1e15},
		{"active_decodes", func(i instance) *int64 { return &i.ActiveDecodes }, 1e9},
		{"cached_tokens", func(i instance) *int64 { return &i.CachedTokens }, 1e15},
		{"kv_capacity_tokens", func(i instance) *int64 { return &i.KVCapacityTokens }, 1e15},
		{"kv_used_tokens", func(i instance) *int64 { return &i.KVUsedTokens }, 1e15},
	}
	for _, n := range instanceCounts {
		t.Run(n.field, func(t *testing.T) {
			for _, bad := range []int64{-1, math.MinInt64, n.most + 1, math.MaxInt64} {
				for _, out := range []bool{false, true} {
					refuse(t, "instances[1]."+n.field, func(_ policy, s *kvpolicy.Snapshot) {
						*n.at(&s.Instances[1]) = bad
						s.Instances[1].Unavailable = out
					})
				}
			}
			p, s := everything()
			*n.at(&s.Instances[1]) = n.most
			_, err := p.Decide(s)
			require.NoError(t, err, "the bound is inclusive")
		})
	}
	for path, n := range map[string]struct {
		at   func(*kvpolicy.Request) *int64
		most int64
	}{
		"request.context_tokens":   {func(r *kvpolicy.Request) *int64 { return &r.ContextTokens }, 1e15},
		"request.remaining_tokens": {func(r *kvpolicy.Request) *int64 { return &r.RemainingTokens }, 1e15},
		"request.hops":             {func(r *kvpolicy.Request) *int64 { return &r.Hops }, 1e9},
	} {
		t.Run(path, func(t *testing.T) {
			for _, bad := range []int64{-1, math.MinInt64, n.most + 1, math.MaxInt64} {
				refuse(t, path, func(_ policy, s *kvpolicy.Snapshot) { *n.at(&s.Request) = bad })
			}
		})
	}

	t.Run("ids", func(t *testing.T) {
		refuse(t, "instances[0].id", func(_ policy, s *kvpolicy.Snapshot) { s.Instances[0].ID = "" })
		refuse(t, "instances[1].id", func(_ policy, s *kvpolicy.Snapshot) { s.Instances[1].ID = "a" })
		refuse(t, "instances[1].id", func(_ policy, s *kvpolicy.Snapshot) {
			s.Instances[0].Unavailable = true
			s.Instances[1].ID = "a"
		})
	})
	t.Run("rates that a formula lacks", func(t *testing.T) {
		refuse(t, "instances[0].prefill_rate", func(p policy, _ *kvpolicy.Snapshot) { p.Cost.PrefillRate = 0 })
		refuse(t, "instances[0].decode_rate", func(p policy, _ *kvpolicy.Snapshot) { p.Cost.DecodeRate = 0 })
		refuse(t, "instances[0].bandwidth", func(p policy, _ *kvpolicy.Snapshot) { p.Transfer.Bandwidth = 0 })
		refuse(t, "instances[0].prefill_rate", func(p policy, _ *kvpolicy.Snapshot) { p.Cost.PrefillRate = 1e19 })
	})
}

// TestDuplicateIDsAreFound looks for one repeated id among many, at each size
// of fleet that is looked through in its own way.
func TestDuplicateIDsAreFound(t *testing.T) {
	for _, n := range []int{2, 8, 127, 128, 129, 300, 2048, 2049, 12288, 12289, 30000} {
		s := equalFleet(n)
		_, err := kvpolicy.LeastLoaded().Decide(s)
		require.NoError(t, err, "%d different ids", n)
		for _, pair := range [][2]int{{0, n - 1}, {n / 2, n - 1}, {0, 1}, {max(0, n/3-1), n / 3}} {
			if pair[0] == pair[1] {
				continue
			}
			id := s.Instances[pair[1]].ID
			s.Instances[pair[1]].ID = s.Instances[pair[0]].ID
			_, err := kvpolicy.LeastLoaded().Decide(s)
			var field *kvpolicy.FieldError
			require.ErrorAs(t, err, &field, "%d ids, %v the same", n, pair)
			require.Regexp(t, `^instances\[\d+\]\.id$`, field.Path)
			s.Instances[pair[1]].ID = id
		}
	}
}

// TestUnusedRatesAreNotAsked checks that only what a formula divides by must
// be there.
func TestUnusedRatesAreNotAsked(t *testing.T) {
	valid := func(spoil func(*kvpolicy.Policy, *kvpolicy.Snapshot)) {
		p, s := everything()
		spoil(&p, &s)
		_, err := p.Decide(s)
		require.NoError(t, err)
	}
	valid(func(p *kvpolicy.Policy, s *kvpolicy.Snapshot) { p.Cost.DecodeRate, s.Request.RemainingTokens = 0, 0 })
	valid(func(p *kvpolicy.Policy, s *kvpolicy.Snapshot) { p.Transfer.Bandwidth, p.Separation.Enabled = 0, false })
	valid(func(p *kvpolicy.Policy, s *kvpolicy.Snapshot) {
		s.Instances[0].PrefillRate, s.Instances[0].DecodeRate, s.Instances[0].Bandwidth = 1e-300, 1e300, 1e-300
		s.Instances[0].Unavailable = true
	})
	valid(func(p *kvpolicy.Policy, s *kvpolicy.Snapshot) {
		*p = kvpolicy.Unified()
		s.Instances[0].DecodeRate, s.Instances[0].Bandwidth = 1e-300, 1e300
	})
	valid(func(_ *kvpolicy.Policy, s *kvpolicy.Snapshot) {
		s.Request.Affinity, s.Request.RunningOn = "no one", "nowhere"
	})
}

// TestPartsThatNeedEachOther checks the demands between parts of a policy.
func TestPartsThatNeedEachOther(t *testing.T) {
	for path, spoil := range map[string]func(*kvpolicy.Policy){
		"migration":         func(p *kvpolicy.Policy) { p.Hazard.Enabled = false },
		"cost.count_decode": func(p *kvpolicy.Policy) { p.Cost.CountDecode = false },
	} {
		p := kvpolicy.HazardAware()
		spoil(&p)
		var field *kvpolicy.FieldError
		require.ErrorAs(t, p.Validate(), &field)
		require.Equal(t, path, field.Path)
	}
	var zero kvpolicy.Policy
	require.ErrorIs(t, zero.Validate(), kvpolicy.ErrInvalid)
	for _, name := range kvpolicy.PresetNames() {
		p, err := kvpolicy.Preset(name)
		require.NoError(t, err)
		require.NoError(t, p.Validate(), name)
	}
}
