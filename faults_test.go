//go:build faults

package kvpolicy_test

import (
	"testing"

	"github.com/kvpolicy/kvpolicy"
	"github.com/stretchr/testify/require"
	"gonum.org/v1/gonum/stat/distuv"
)

// This file holds the tests that fail against the code as it stands, each with
// what is wrong: go test -tags faults. They go to the file of their subject
// once they pass.

// The snapshot's check builds the path of every curve, whether or not there is
// anything to say about it: one allocation for each instance that has a curve.
func TestDecideAllocatesNothingWithCurves(t *testing.T) {
	for _, cells := range []int{0, 16} {
		for _, rounds := range []int{0, 4} {
			p, s := kvpolicy.HazardAware(), withCurves(t, workingFleet(64))
			p.Hazard.Cells, p.Migration.OverlapRounds = cells, rounds
			allocatesNothing(t, p, s)
			s.Request.RunningOn, s.Request.RemainingTokens = "inst-0", 4000
			s.Instances[0].Curve = distuv.Exponential{Rate: 0.5}
			d, err := p.Decide(s)
			require.NoError(t, err)
			require.Equal(t, kvpolicy.Migrate, d.Action)
			allocatesNothing(t, p, s)
		}
	}
}

// A count that is not whole is taken for the whole number that it rounds to.
func TestCountsThatRoundAreRefused(t *testing.T) {
	for _, count := range []string{"1e-400", "1.00000000000000000001", "0.99999999999999999999"} {
		var s kvpolicy.Snapshot
		require.ErrorIs(t, s.UnmarshalJSON([]byte(`{"request":{"context_tokens":`+count+`}}`)), kvpolicy.ErrInvalid, count)
	}
}

// A number too small for a float64 is taken for 0, which for a rate stands for
// the policy's.
func TestRatesThatUnderflowAreRefused(t *testing.T) {
	var s kvpolicy.Snapshot
	err := s.UnmarshalJSON([]byte(`{"instances":[{"id":"a","prefill_rate":1e-400}]}`))
	if err == nil {
		_, err = kvpolicy.Decide(s)
	}
	require.ErrorIs(t, err, kvpolicy.ErrInvalid)
}

// ErrInvalid's comment says that every error of the package is one; a
// decision's JSON gives encoding/json's own.
func TestDecisionJSONErrorsAreErrInvalid(t *testing.T) {
	for _, text := range []string{`{"action":7}`, `{"action":"fly"}`, `{"cost":[]}`, `[]`, `{"score":"1"}`, `{`} {
		var d kvpolicy.Decision
		require.ErrorIs(t, d.UnmarshalJSON([]byte(text)), kvpolicy.ErrInvalid, text)
	}
}

// StaysOnSource is, by its comment, for where a request runs and remains. It is
// given to the source of a request that leaves, and to no other.
func TestExplainSaysStaysOnSourceOfWhoStays(t *testing.T) {
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
	require.NotEqual(t, kvpolicy.StaysOnSource, explained[0].Reason)
}

// HomeKept is, by its comment, for the candidate that would have been the best.
// It is given to every candidate that stands before the home.
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
