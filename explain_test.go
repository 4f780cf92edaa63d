package kvpolicy_test

import (
	"testing"

	"github.com/kvpolicy/kvpolicy"
	"github.com/stretchr/testify/require"
	"gonum.org/v1/gonum/stat/distuv"
	"pgregory.net/rapid"
)

// checkExplained checks that an explanation tells the story of the decision.
func checkExplained(t require.TestingT, s kvpolicy.Snapshot, d kvpolicy.Decision, all []kvpolicy.Candidate) {
	require.Len(t, all, len(s.Instances))
	taken := 0
	for i, c := range all {
		require.Equal(t, s.Instances[i].ID, c.Instance, "the order is the snapshot's")
		require.NotZero(t, c.Tier)
		require.NotZero(t, c.Reason)
		if c.Reason == kvpolicy.Taken {
			taken++
			require.Equal(t, d.Target, c.Instance)
			switch d.Action {
			case kvpolicy.Place, kvpolicy.PrefillRemote, kvpolicy.Recover:
				require.Equal(t, d.Cost, c.Cost)
				require.Equal(t, d.Score, c.Score)
			case kvpolicy.Migrate:
				require.Equal(t, d.Move, c.Move)
			case kvpolicy.Stay:
				require.Equal(t, kvpolicy.Move{}, c.Move)
			}
		}
		if c.Reason == kvpolicy.InstanceUnavailable {
			require.Equal(t, kvpolicy.Down, c.Tier)
		}
		if c.Tier == kvpolicy.Down {
			require.Zero(t, c.Cost)
		}
		if d.PrefillOn != "" {
			require.Equal(t, c.Instance == d.PrefillOn, c.Separation.Reason == kvpolicy.Triggered && c.Separation.CostMigrate == d.Separation.CostMigrate && c.Instance == d.Separation.Source)
		}
		if d.Candidate.Target == c.Instance && d.Candidate.Target != "" {
			require.Equal(t, d.Candidate, c.Move)
			require.Equal(t, d.Reason, c.Reason, "why the best destination was not taken")
		}
	}
	if d.Action == kvpolicy.Reject {
		require.Zero(t, taken)
	} else {
		require.Equal(t, 1, taken)
	}
}

// reasons that Explain may give for an instance that is no target, by the
// first thing in which it is worse than the target.
func orderReasons(target, other priced, measureTarget, measureOther float64) []kvpolicy.Reason {
	byCount := kvpolicy.TieHash
	switch {
	case target.uncached != other.uncached:
		byCount = kvpolicy.MoreNewTokens
	case target.Requests != other.Requests:
		byCount = kvpolicy.MoreRequests
	case target.OngoingTokens != other.OngoingTokens:
		byCount = kvpolicy.MoreOngoingTokens
	}
	switch {
	case measureTarget == measureOther:
		return []kvpolicy.Reason{byCount}
	case near(measureTarget, measureOther):
		return []kvpolicy.Reason{byCount, kvpolicy.HigherScore}
	}
	return []kvpolicy.Reason{kvpolicy.HigherScore}
}

// TestExplainAgreesWithOracle checks tier, cost and reason of every candidate
// of a placement.
func TestExplainAgreesWithOracle(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := drawSituation(t, shape{presets: plainPresets(), noHazard: true, placing: true, extreme: true})
		d, err := s.policy.Decide(s.snapshot)
		require.NoError(t, err)
		all, err := s.policy.Explain(nil, s.snapshot)
		require.NoError(t, err)
		checkExplained(t, s.snapshot, d, all)
		o := newOracle(s)
		target := o.find(d.Target)
		best := target // what the others are told that they lost to
		for i, c := range all {
			if c.Reason == kvpolicy.HomeKept {
				require.Equal(t, target, best, "one candidate is the best")
				best = i
			}
		}
		for i, c := range all {
			want := o.all[i]
			require.Equal(t, want.tier, c.Tier)
			if c.Tier != kvpolicy.Down {
				o.checkCost(t, kvpolicy.Decision{Cost: c.Cost, Score: c.Score}, want)
			}
			switch {
			case i == target:
				require.Equal(t, kvpolicy.Taken, c.Reason)
			case c.Tier == kvpolicy.Stale:
				require.Equal(t, kvpolicy.MetricsStale, c.Reason)
			case c.Tier == kvpolicy.TooSmall:
				require.Equal(t, kvpolicy.NeverFits, c.Reason)
			case c.Tier == kvpolicy.FitsEmpty && !d.Overcommitted:
				require.Equal(t, kvpolicy.NoRoomNow, c.Reason)
			case c.Tier == kvpolicy.Down:
				require.Equal(t, kvpolicy.InstanceUnavailable, c.Reason)
			case c.Reason == kvpolicy.HomeKept:
				require.Equal(t, kvpolicy.AffinityKept, d.Reason)
				require.Equal(t, d.RunnerUp, c.Instance)
				require.LessOrEqual(t, compare(want, o.all[target], want.score, o.all[target].score), 0, "it stands before the home")
			default:
				require.Contains(t, orderReasons(o.all[best], want, o.all[best].score, want.score), c.Reason)
			}
			o.checkSource(t, target, i, c.Separation)
		}
	})
}

// checkSource checks what Explain says of instance i as a source for the target.
func (o *oracle) checkSource(t require.TestingT, target, i int, got kvpolicy.Separation) {
	g := o.policy.Separation
	if !g.Enabled || target < 0 || i == target {
		require.Zero(t, got)
		return
	}
	chosen, c := o.all[target], o.all[i]
	local := o.interference(chosen.uncached, chosen.ActiveDecodes)
	remote := o.transfer(chosen.uncached, i, target) + o.interference(c.uncached, c.ActiveDecodes)
	reasons := []kvpolicy.Reason{kvpolicy.CostBenefitNotEnoughMargin}
	switch {
	case c.tier == kvpolicy.Down:
		reasons = []kvpolicy.Reason{kvpolicy.InstanceUnavailable}
	case c.tier == kvpolicy.Stale:
		reasons = []kvpolicy.Reason{kvpolicy.MetricsStale}
	case !o.fits(i, c.uncached):
		reasons = []kvpolicy.Reason{kvpolicy.NoRoomNow}
	case chosen.uncached < g.MinNewTokens:
		reasons = []kvpolicy.Reason{kvpolicy.NewLocalBelowThreshold}
	case chosen.ActiveDecodes < g.MinActiveDecodes:
		reasons = []kvpolicy.Reason{kvpolicy.ChosenNoActiveDecode}
	case c.cached < g.MinSourceCacheTokens:
		reasons = []kvpolicy.Reason{kvpolicy.SourceCacheBelowThreshold}
	case c.cached-chosen.cached < g.MinExtraCacheTokens:
		reasons = []kvpolicy.Reason{kvpolicy.SourceNotMeaningfullyMoreCache}
	case near(remote, local-g.MarginSeconds):
		reasons = append(reasons, kvpolicy.Triggered)
	case remote < local-g.MarginSeconds:
		reasons = []kvpolicy.Reason{kvpolicy.Triggered}
	}
	require.Contains(t, reasons, got.Reason)
	require.Equal(t, chosen.uncached, got.NewLocal)
	if got.Reason == kvpolicy.Triggered || got.Reason == kvpolicy.CostBenefitNotEnoughMargin {
		require.Equal(t, c.ID, got.Source)
		require.Equal(t, c.uncached, got.NewSource)
		require.True(t, near(local, got.CostLocal))
		require.True(t, near(remote, got.CostMigrate))
	}
}

// TestExplainMigration checks the explanation of a running request.
func TestExplainMigration(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := drawSituation(t, shape{presets: []string{"hazard_aware"}, running: true})
		d, err := s.policy.Decide(s.snapshot)
		require.NoError(t, err)
		all, err := s.policy.Explain(nil, s.snapshot)
		require.NoError(t, err)
		checkExplained(t, s.snapshot, d, all)
		o := newOracle(s)
		guarded := d.Reason == kvpolicy.MigrationDisabled || d.Reason == kvpolicy.MaxHopsReached || d.Reason == kvpolicy.MinRemaining
		moves := o.destinations(o.find(s.snapshot.Request.RunningOn))
		for _, c := range all {
			allowed := false
			for _, m := range moves {
				if s.snapshot.Instances[m.to].ID == c.Instance && !guarded {
					allowed = true
					if c.Move.Target != "" && !(m.tied && s.policy.Migration.OverlapRounds > 0) {
						o.checkMove(t, m, c.Move)
					}
				}
			}
			require.Equal(t, allowed, c.Move.Target != "", "%s is a destination", c.Instance)
		}
	})
}

// TestExplainAppends checks that what dst holds already stays.
func TestExplainAppends(t *testing.T) {
	s := kvpolicy.Snapshot{Instances: []kvpolicy.Instance{{ID: "a"}, {ID: "b"}}}
	first, err := kvpolicy.Unified().Explain(nil, s)
	require.NoError(t, err)
	both, err := kvpolicy.LMetric().Explain(first, s)
	require.NoError(t, err)
	require.Equal(t, first, both[:2])
	require.Len(t, both, 4)

	s.Instances[1].Requests = -1
	unchanged, err := kvpolicy.Unified().Explain(first, s)
	require.ErrorIs(t, err, kvpolicy.ErrInvalid)
	require.Equal(t, first, unchanged)
}

// The source of a request that leaves is left because of its risk.
func TestExplainSaysWhyTheSourceIsLeft(t *testing.T) {
	s := kvpolicy.Snapshot{
		Request: kvpolicy.Request{ContextTokens: 1000, RemainingTokens: 4000, RunningOn: "a"},
		Instances: []kvpolicy.Instance{
			{ID: "a", DecodeRate: 40, Curve: distuv.Exponential{Rate: 0.5}},
			{ID: "b", DecodeRate: 40},
		},
	}
	p := kvpolicy.HazardAware()
	p.Hazard.StallPenaltySeconds = 100
	d, err := p.Decide(s)
	require.NoError(t, err)
	require.Equal(t, kvpolicy.Migrate, d.Action)
	explained, err := p.Explain(nil, s)
	require.NoError(t, err)
	require.Equal(t, kvpolicy.RiskRemoved, explained[0].Reason)
	require.Equal(t, kvpolicy.Taken, explained[1].Reason)
}

// Only the best is passed over for the home; the others lose to the best.
func TestExplainSaysHomeKeptOfTheBest(t *testing.T) {
	s := kvpolicy.Snapshot{
		Request:   kvpolicy.Request{ContextTokens: 7000, Affinity: "home"},
		Instances: []kvpolicy.Instance{{ID: "best"}, {ID: "second", Requests: 1}, {ID: "home", Requests: 2}},
	}
	explained, err := kvpolicy.Unified().Explain(nil, s)
	require.NoError(t, err)
	require.Equal(t, kvpolicy.Taken, explained[2].Reason)
	require.Equal(t, kvpolicy.HomeKept, explained[0].Reason)
	require.NotEqual(t, kvpolicy.HomeKept, explained[1].Reason)
}

// Rank is the order in which candidates would be taken were the ones before
// them gone: taking the target away makes the second the target.
func TestRankIsWhatToFallBackOn(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := drawSituation(t, shape{presets: plainPresets(), noHazard: true, placing: true})
		for range 3 {
			d, err := s.policy.Decide(s.snapshot)
			require.NoError(t, err)
			all, err := s.policy.Explain(nil, s.snapshot)
			require.NoError(t, err)
			ranked := map[int]string{}
			for _, c := range all {
				if c.Rank > 0 {
					require.NotContains(t, ranked, c.Rank)
					ranked[c.Rank] = c.Instance
				}
			}
			if d.Action == kvpolicy.Reject {
				require.Empty(t, ranked)
				return
			}
			require.Equal(t, d.Target, ranked[1])
			require.Equal(t, d.RunnerUp, ranked[2])
			for rank := range ranked {
				require.LessOrEqual(t, rank, len(ranked))
			}
			if len(ranked) == 1 || d.Reason == kvpolicy.AffinityOverloaded || d.Reason == kvpolicy.AffinityTooCostly || s.policy.MaxMetricsAgeSeconds > 0 {
				return
			}
			at := 0
			for s.snapshot.Instances[at].ID != d.Target {
				at++
			}
			s.snapshot.Instances[at].Unavailable = true
			next, err := s.policy.Decide(s.snapshot)
			require.NoError(t, err)
			require.Equal(t, ranked[2], next.Target)
		}
	})
}
