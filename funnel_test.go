package kvpolicy_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"pgregory.net/rapid"

	"github.com/kvpolicy/kvpolicy"
)

// publishedFunnels are the counts of the elastic-migration-v2 report, result 2,
// gate by gate, with their shares in per cent as printed there.
func publishedFunnels() map[string]struct {
	counts []int
	shares []float64
} {
	return map[string]struct {
		counts []int
		shares []float64
	}{
		"strict":  {[]int{1077, 115, 14, 6, 0, 2}, []float64{88.7, 9.5, 1.2, 0.5, 0, 0.16}},
		"relaxed": {[]int{924, 229, 36, 16, 4, 5}, []float64{76.1, 18.9, 3.0, 1.3, 0.3, 0.41}},
	}
}

func TestFunnelIsTheReportsTable(t *testing.T) {
	for name, published := range publishedFunnels() {
		var f kvpolicy.Funnel
		for gate, n := range published.counts {
			reason := kvpolicy.NewLocalBelowThreshold + kvpolicy.Reason(gate)
			for range n {
				f.Add(kvpolicy.Decision{Reason: kvpolicy.AffinityKept, Separation: kvpolicy.Separation{Reason: reason}})
			}
		}
		for gate, share := range published.shares {
			reason := kvpolicy.NewLocalBelowThreshold + kvpolicy.Reason(gate)
			assert.InDelta(t, share, 100*f.Share(reason), 0.05, "%s %s", name, reason)
			assert.EqualValues(t, published.counts[gate], f.Count(reason))
		}
		assert.EqualValues(t, 1214, f.Count(kvpolicy.AffinityKept))
		assert.Equal(t, 1.0, f.Share(kvpolicy.AffinityKept))
		if name == "relaxed" {
			assert.Equal(t, ""+
				"gate                               decisions      share\n"+
				"new_local_below_threshold                924    76.11 %\n"+
				"chosen_no_active_decode                  229    18.86 %\n"+
				"src_cache_below_threshold                 36     2.97 %\n"+
				"src_not_meaningfully_more_cache           16     1.32 %\n"+
				"cost_benefit_not_enough_margin             4     0.33 %\n"+
				"triggered                                  5     0.41 %\n"+
				"all                                     1214   100.00 %\n"+
				"reason                             decisions      share\n"+
				"affinity_kept                           1214   100.00 %\n"+
				"all                                     1214   100.00 %\n", f.String())
		}
	}
}

func TestFunnelMergeIsAddingAll(t *testing.T) {
	reason := rapid.SampledFrom([]kvpolicy.Reason{0, kvpolicy.NoAffinity, kvpolicy.WouldReturn, kvpolicy.LowerGain, 255})
	gate := rapid.SampledFrom([]kvpolicy.Reason{0, kvpolicy.NewLocalBelowThreshold, kvpolicy.Triggered, 200})
	rapid.Check(t, func(t *rapid.T) {
		var whole kvpolicy.Funnel
		var parts [2]kvpolicy.Funnel
		counted := map[kvpolicy.Reason]int64{}
		for range rapid.IntRange(0, 30).Draw(t, "n") {
			d := kvpolicy.Decision{Reason: reason.Draw(t, "reason")}
			d.Separation.Reason = gate.Draw(t, "gate")
			whole.Add(d)
			parts[rapid.IntRange(0, 1).Draw(t, "part")].Add(d)
			for _, r := range []kvpolicy.Reason{d.Reason, d.Separation.Reason} {
				if r >= 1 && r <= kvpolicy.LowerGain {
					counted[r]++
				}
			}
		}
		parts[0].Merge(parts[1])
		assert.Equal(t, whole, parts[0])
		seen := map[kvpolicy.Reason]int64{}
		var shares float64
		for r, n := range whole.All() {
			seen[r] = n
			assert.Equal(t, n, whole.Count(r))
			shares += whole.Share(r)
		}
		assert.Equal(t, counted, seen)
		tables := 0.0 // each sums to 1
		for _, of := range []bool{true, false} {
			for r := range counted {
				if of == (r >= kvpolicy.NewLocalBelowThreshold && r <= kvpolicy.Triggered) {
					tables++
					break
				}
			}
		}
		assert.InDelta(t, tables, shares, 1e-12)
	})
}

func TestFunnelOfNothing(t *testing.T) {
	var f kvpolicy.Funnel
	f.Add(kvpolicy.Decision{})
	assert.Equal(t, kvpolicy.Funnel{}, f)
	assert.Equal(t, "no decisions\n", f.String())
	assert.Zero(t, f.Share(kvpolicy.Triggered))
	assert.Zero(t, f.Count(255))
}

func TestFunnelAddAllocatesNothing(t *testing.T) {
	var f kvpolicy.Funnel
	d := kvpolicy.Decision{Reason: kvpolicy.NoAffinity, Separation: kvpolicy.Separation{Reason: kvpolicy.Triggered}}
	assert.Zero(t, testing.AllocsPerRun(100, func() { f.Add(d) }))
}
