package kvpolicy_test

import (
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/kvpolicy/kvpolicy"
)

// separatedRequest is one of the five requests that the relaxed gates of the
// elastic-migration-v2 report separated (result 3).
type separatedRequest struct {
	context, newSource               int64
	source, target                   string
	costLocal, costMigrate, observed float64
	activeDecodes                    int64 // fitted: not in the report
}

func separatedRequests() []separatedRequest {
	return []separatedRequest{
		{21963, 9163, "6", "5", 4.39, 4.17, 3.69, 3},
		{8706, 2050, "5", "7", 1.09, 0.73, 12.48, 1},
		{13616, 2352, "4", "0", 1.70, 1.03, 18.33, 1},
		{49483, 843, "3", "4", 11.75, 2.16, 45.13, 4},
		{19806, 350, "3", "6", 3.96, 1.06, 20.06, 3},
	}
}

func (s separatedRequest) decision() kvpolicy.Decision {
	return kvpolicy.Decision{
		Action: kvpolicy.PrefillRemote, Reason: kvpolicy.AffinityKept, Target: s.target, PrefillOn: s.source,
		Separation: kvpolicy.Separation{Reason: kvpolicy.Triggered, NewLocal: s.context, Source: s.source,
			NewSource: s.newSource, CostLocal: s.costLocal, CostMigrate: s.costMigrate},
	}
}

func TestAccuracyShowsTheTwentyOnefold(t *testing.T) {
	var a kvpolicy.Accuracy
	for _, s := range separatedRequests() {
		require.NoError(t, a.Add(s.decision(), s.observed))
	}
	r := a.Report(kvpolicy.Triggered)
	assert.Equal(t, r, a.Total())
	assert.Zero(t, a.Report(kvpolicy.AffinityKept))
	assert.EqualValues(t, 5, r.Decisions)
	assert.InDelta(t, 20.9, r.Ratios.Max, 0.05)
	assert.InEpsilon(t, 18.33/1.03, r.Ratios.P50, 0.02)
	assert.InEpsilon(t, 3.69/4.17, r.Ratios.Min, 1e-12)
	assert.InDelta(t, 19.938-1.83, r.BiasSeconds, 1e-12)
	require.Len(t, r.Worst, 5)
	assert.Equal(t, "4", r.Worst[0].Target)
	assert.Equal(t, "3", r.Worst[0].PrefillOn)
	assert.InDelta(t, 20.9, r.Worst[0].Ratio, 0.05)
	assert.Contains(t, a.String(), "4 from 3: predicted 2.16 s, observed 45.13 s, ratio 20.9\n")
	assert.Contains(t, a.String(), "triggered                        5     1.830 s   19.938 s  +18.11 s    17.98  20.89  20.89\n")
}

func TestPredictedSeconds(t *testing.T) {
	cost := kvpolicy.Breakdown{Contention: 1, Queue: 2, Prefill: 4, Interference: 8, Decode: 16, Loss: 32}
	d := kvpolicy.Decision{Cost: cost, Separation: kvpolicy.Separation{CostMigrate: 64}, Move: kvpolicy.Move{PlannedSeconds: 128}}
	for action, want := range map[kvpolicy.Action]float64{
		kvpolicy.Place: 7, kvpolicy.Recover: 7, kvpolicy.PrefillRemote: 64, kvpolicy.Migrate: 128,
	} {
		d.Action = action
		got, ok := d.PredictedSeconds()
		assert.True(t, ok)
		assert.Equal(t, want, got, action)
	}
	for _, action := range []kvpolicy.Action{0, kvpolicy.Stay, kvpolicy.Reject} {
		d.Action = action
		_, ok := d.PredictedSeconds()
		assert.False(t, ok)
		requireFieldError(t, new(kvpolicy.Accuracy).Add(d, 1), "action")
	}
}

func TestAccuracyAgainstSorting(t *testing.T) {
	seconds := rapid.OneOf(rapid.SampledFrom([]float64{0, 1e-3, 1, 1e12}), rapid.Float64Range(0, 1e-3),
		rapid.Float64Range(1e-3, 10), rapid.Float64Range(10, 1e12))
	reason := rapid.SampledFrom([]kvpolicy.Reason{kvpolicy.NoAffinity, kvpolicy.AffinityKept})
	rapid.Check(t, func(t *rapid.T) {
		type pair struct{ predicted, observed float64 }
		var whole kvpolicy.Accuracy
		var parts [2]kvpolicy.Accuracy
		of := map[kvpolicy.Reason][]pair{}
		for range rapid.IntRange(1, 40).Draw(t, "n") {
			p := pair{seconds.Draw(t, "predicted"), seconds.Draw(t, "observed")}
			d := kvpolicy.Decision{Action: kvpolicy.Place, Reason: reason.Draw(t, "reason"), Cost: kvpolicy.Breakdown{Queue: p.predicted}}
			require.NoError(t, whole.Add(d, p.observed))
			require.NoError(t, parts[rapid.IntRange(0, 1).Draw(t, "part")].Add(d, p.observed))
			of[d.Reason] = append(of[d.Reason], p)
			of[0] = append(of[0], p)
		}
		for r, pairs := range of {
			got := whole.Report(r)
			if r == 0 {
				got = whole.Total()
			}
			ratios, differences := make([]float64, len(pairs)), make([]float64, len(pairs))
			var bias, size float64
			for i, p := range pairs {
				ratios[i] = math.Max(p.observed, 1e-3) / math.Max(p.predicted, 1e-3)
				differences[i] = -math.Abs(p.observed - p.predicted)
				bias += (p.observed - p.predicted) / float64(len(pairs))
				size = math.Max(size, p.observed+p.predicted)
			}
			slices.Sort(ratios)
			slices.Sort(differences)
			assert.InDelta(t, bias, got.BiasSeconds, 1e-12*size)
			assert.Equal(t, ratios[0], got.Ratios.Min)
			assert.Equal(t, ratios[len(ratios)-1], got.Ratios.Max)
			for q, value := range map[float64]float64{0.1: got.Ratios.P10, 0.5: got.Ratios.P50, 0.9: got.Ratios.P90, 0.99: got.Ratios.P99} {
				want := ratios[max(1, int(math.Ceil(q*float64(len(ratios)))))-1]
				if want >= 1e-4 && want <= 1e4 {
					assert.InEpsilon(t, want, value, 0.02+1e-9)
				}
			}
			require.Len(t, got.Worst, min(5, len(pairs)))
			for i, m := range got.Worst {
				assert.Equal(t, -differences[i], math.Abs(m.ObservedSeconds-m.PredictedSeconds))
			}
		}
		parts[0].Merge(&parts[1])
		for r := range of {
			a, b := whole.Report(r), parts[0].Report(r)
			// The sums are taken in another order.
			assert.InEpsilon(t, 1+a.PredictedSeconds, 1+b.PredictedSeconds, 1e-12)
			assert.InEpsilon(t, 1+a.ObservedSeconds, 1+b.ObservedSeconds, 1e-12)
			assert.InDelta(t, a.BiasSeconds, b.BiasSeconds, 1e-12*(a.PredictedSeconds+a.ObservedSeconds))
			b.PredictedSeconds, b.ObservedSeconds, b.BiasSeconds = a.PredictedSeconds, a.ObservedSeconds, a.BiasSeconds
			assert.Equal(t, a, b)
		}
	})
}

func TestAccuracyRefuses(t *testing.T) {
	d := kvpolicy.Decision{Action: kvpolicy.Place, Reason: kvpolicy.NoAffinity}
	var a kvpolicy.Accuracy
	for _, x := range []float64{-1, math.NaN(), math.Inf(1)} {
		requireFieldError(t, a.Add(d, x), "observed_s")
		bad := d
		bad.Cost.Queue = x
		requireFieldError(t, a.Add(bad, 1), "predicted_s")
	}
	d.Reason = 0
	requireFieldError(t, a.Add(d, 1), "reason")
	assert.Zero(t, a.Total())
	assert.Equal(t, "no decisions\n", a.String())
	assert.Zero(t, a.Report(255))
}

func TestAccuracyAddAllocatesNothing(t *testing.T) {
	var a kvpolicy.Accuracy
	d := separatedRequests()[3].decision()
	assert.Zero(t, testing.AllocsPerRun(100, func() { _ = a.Add(d, 45.13) }))
}

// A cached prompt may predict 0, and the ratio is then in the thousands.
func TestAccuracyTableKeepsItsColumnsApart(t *testing.T) {
	var accuracy kvpolicy.Accuracy
	require.NoError(t, accuracy.Add(kvpolicy.Decision{Action: kvpolicy.Place, Reason: kvpolicy.NoAffinity}, 123_456))
	line := strings.Split(accuracy.String(), "\n")[1]
	assert.Equal(t, []string{"no_affinity", "1", "0.000", "s", "123456.000", "s", "+123456.00", "s",
		"123456000.00", "123456000.00", "123456000.00"}, strings.Fields(line))
}
