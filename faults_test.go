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
