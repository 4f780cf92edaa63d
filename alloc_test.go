package kvpolicy_test

import (
	"fmt"
	"testing"

	"github.com/kvpolicy/kvpolicy"
	"github.com/stretchr/testify/require"
	"gonum.org/v1/gonum/stat/distuv"
)

// fleetSizes are what allocations and times are measured at.
var fleetSizes = []int{1, 8, 64, 1024, 10000}

// workingFleet is a snapshot of n instances in the midst of work: a session's
// home, some instances warm, none equal to another, and every rate given.
func workingFleet(n int) kvpolicy.Snapshot {
	s := kvpolicy.Snapshot{
		Request:   kvpolicy.Request{ID: "request-1", ContextTokens: 32768, RemainingTokens: 400, Affinity: "inst-0"},
		Instances: make([]kvpolicy.Instance, n),
	}
	for k := range s.Instances {
		spread := int64(k*7919%1009) + 1
		s.Instances[k] = kvpolicy.Instance{
			ID:                   fmt.Sprintf("inst-%d", k),
			Requests:             spread % 40,
			PendingPrefillTokens: spread * 37,
			OngoingTokens:        40000 + spread*50,
			ActiveDecodes:        1 + spread%12,
			CachedTokens:         spread * 17,
			PrefillRate:          7000 + float64(spread),
			DecodeRate:           30 + float64(spread%17),
			Bandwidth:            9.7e9,
			KVCapacityTokens:     419000,
			KVUsedTokens:         90000 + spread*100,
			UptimeSeconds:        float64(spread) * 3,
		}
	}
	return s
}

// withCurves gives every instance one of a few survival curves.
func withCurves(t testing.TB, s kvpolicy.Snapshot) kvpolicy.Snapshot {
	var durations []float64
	var observed []bool
	for k := range 200 {
		durations = append(durations, float64(k*7919%4999))
		observed = append(observed, k%3 > 0)
	}
	sessions, err := kvpolicy.NewKaplanMeier(durations, observed)
	require.NoError(t, err)
	curves := []kvpolicy.Curve{sessions, distuv.Exponential{Rate: 1e-4}, distuv.Weibull{K: 3, Lambda: 2400}}
	for k := range s.Instances {
		s.Instances[k].Curve = curves[k%len(curves)]
	}
	return s
}

func allocatesNothing(t *testing.T, p kvpolicy.Policy, s kvpolicy.Snapshot) {
	_, err := p.Decide(s)
	require.NoError(t, err)
	require.Zero(t, testing.AllocsPerRun(3, func() { _, _ = p.Decide(s) }))
}

func TestDecideAllocatesNothing(t *testing.T) {
	for _, name := range kvpolicy.PresetNames() {
		for _, n := range fleetSizes {
			t.Run(fmt.Sprintf("%s/%d", name, n), func(t *testing.T) {
				p, err := kvpolicy.Preset(name)
				require.NoError(t, err)
				s := workingFleet(n)
				allocatesNothing(t, p, s)
				s.Request.RunningOn = "inst-0"
				allocatesNothing(t, p, s)
				s.Request.RunningOn = "gone"
				allocatesNothing(t, p, s)
			})
		}
	}
	t.Run("separation", func(t *testing.T) {
		p, s := kvpolicy.UnifiedV2Relaxed(), workingFleet(64)
		p.Separation.MinNewTokens, p.Separation.MinExtraCacheTokens, p.Separation.MinSourceCacheTokens = 1, 1, 1
		s.Request.Affinity = ""
		for k := range s.Instances {
			s.Instances[k].PendingPrefillTokens = s.Instances[k].CachedTokens * 40 // the warm are busy
		}
		d, err := p.Decide(s)
		require.NoError(t, err)
		require.Equal(t, kvpolicy.PrefillRemote, d.Action)
		allocatesNothing(t, p, s)
	})
	t.Run("Explain into a slice that holds it", func(t *testing.T) {
		dst, s := make([]kvpolicy.Candidate, 0, 64), workingFleet(64)
		require.Zero(t, testing.AllocsPerRun(3, func() { _, _ = kvpolicy.UnifiedV2Relaxed().Explain(dst, s) }))
	})
}
