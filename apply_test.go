package kvpolicy_test

import (
	"slices"
	"testing"

	"github.com/kvpolicy/kvpolicy"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// TestApplyAddsTheRequest checks what Apply changes, and that it changes
// nothing else.
func TestApplyAddsTheRequest(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := drawSituation(t, shape{noHazard: true, presets: plainPresets(), placing: true})
		before := slices.Clone(s.snapshot.Instances)
		d := decide(t, s.policy, s.snapshot)
		next, err := s.snapshot.Apply(d)
		require.NoError(t, err)
		require.Equal(t, before, s.snapshot.Instances, "the snapshot itself is not changed")
		r := s.snapshot.Request
		require.Equal(t, r, next.Request)
		for k, want := range before {
			uncached := r.ContextTokens - min(want.CachedTokens, r.ContextTokens)
			if want.ID == d.Target {
				want.Requests++
				want.OngoingTokens += r.ContextTokens
				want.KVUsedTokens += uncached + r.RemainingTokens
			}
			if want.ID == d.Target && d.Action == kvpolicy.Place || want.ID == d.PrefillOn {
				want.PendingPrefillTokens += uncached
			}
			require.Equal(t, want, next.Instances[k])
		}
		requireSound(t, decide(t, s.policy, next))
	})
}

func TestApplyStaysWithinBounds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := drawSituation(t, shape{extreme: true})
		next, err := s.snapshot.Apply(decide(t, s.policy, s.snapshot))
		require.NoError(t, err)
		_, err = s.policy.Decide(next)
		require.NoError(t, err)
	})
}

func TestApplyMoves(t *testing.T) {
	s := kvpolicy.Snapshot{
		Request:   kvpolicy.Request{ContextTokens: 100, RemainingTokens: 10, RunningOn: "a", Hops: 1},
		Instances: []kvpolicy.Instance{{ID: "a"}, {ID: "b", CachedTokens: 40}},
	}
	migrate := kvpolicy.Decision{Action: kvpolicy.Migrate, Target: "b", Move: kvpolicy.Move{Method: kvpolicy.Recompute}}
	next, err := s.Apply(migrate)
	require.NoError(t, err)
	require.Equal(t, "b", next.Request.RunningOn)
	require.EqualValues(t, 2, next.Request.Hops)
	require.EqualValues(t, 60, next.Instances[1].PendingPrefillTokens)

	migrate.Move.Method = kvpolicy.Transfer
	next, err = s.Apply(migrate)
	require.NoError(t, err)
	require.Zero(t, next.Instances[1].PendingPrefillTokens, "what is shipped is not prefilled")

	next, err = s.Apply(kvpolicy.Decision{Action: kvpolicy.Recover, Target: "b"})
	require.NoError(t, err)
	require.Equal(t, "b", next.Request.RunningOn)
	require.EqualValues(t, 1, next.Request.Hops, "no planned move")

	next, err = s.Apply(kvpolicy.Decision{Action: kvpolicy.Reject})
	require.NoError(t, err)
	require.Equal(t, s, next)
}

func TestApplyRefusesStrangers(t *testing.T) {
	s := kvpolicy.Snapshot{Instances: []kvpolicy.Instance{{ID: "a"}}}
	var field *kvpolicy.FieldError
	_, err := s.Apply(kvpolicy.Decision{Action: kvpolicy.Place, Target: "z"})
	require.ErrorAs(t, err, &field)
	require.Equal(t, "target", field.Path)
	_, err = s.Apply(kvpolicy.Decision{Action: kvpolicy.PrefillRemote, Target: "a", PrefillOn: "z"})
	require.ErrorAs(t, err, &field)
	require.Equal(t, "prefill_on", field.Path)
	_, err = s.Apply(kvpolicy.Decision{})
	require.ErrorIs(t, err, kvpolicy.ErrInvalid)
}
