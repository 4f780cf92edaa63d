package kvpolicy_test

import (
	"testing"

	"github.com/kvpolicy/kvpolicy"
	"github.com/stretchr/testify/require"
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
				require.LessOrEqual(t, compare(want, o.all[target], want.score, o.all[target].score), 0, "it stands before the home")
			default:
				require.Contains(t, orderReasons(o.all[target], want, o.all[target].score, want.score), c.Reason)
			}
			if c.Separation.Reason != 0 && c.Separation.CostMigrate != 0 && d.Separation.CostMigrate != 0 {
				require.GreaterOrEqual(t, c.Separation.CostMigrate, d.Separation.CostMigrate, "the source is the cheapest")
			}
		}
	})
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
