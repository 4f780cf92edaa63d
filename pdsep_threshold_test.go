package kvpolicy_test

import (
	"fmt"
	"math"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/kvpolicy/kvpolicy"
)

// The five published cost_local come out to both decimals with these counts of
// active decodes, which the report does not give.
func TestPublishedLocalCosts(t *testing.T) {
	gates := kvpolicy.UnifiedV2Relaxed().Separation
	for _, s := range separatedRequests() {
		got := gates.InterferenceSeconds(s.context, s.activeDecodes)
		assert.Equal(t, fmt.Sprintf("%.2f", s.costLocal), fmt.Sprintf("%.2f", got))
	}
}

// separationSnapshot draws fleets at and beside the thresholds that it is given.
func separationSnapshot(t *rapid.T, g kvpolicy.SeparationGates) kvpolicy.Snapshot {
	beside := func(threshold, most int64) *rapid.Generator[int64] {
		return rapid.OneOf(
			rapid.SampledFrom([]int64{0, max(0, threshold-1), threshold, threshold + 1, 2 * threshold}),
			rapid.Int64Range(0, most))
	}
	context := beside(g.MinNewTokens+g.MinSourceCacheTokens, 100_000).Draw(t, "context")
	s := kvpolicy.Snapshot{Request: kvpolicy.Request{ID: "r", ContextTokens: context}}
	for i := range rapid.IntRange(1, 5).Draw(t, "instances") {
		s.Instances = append(s.Instances, kvpolicy.Instance{
			ID:            fmt.Sprintf("i%d", i),
			Requests:      rapid.Int64Range(0, 3).Draw(t, "requests"),
			ActiveDecodes: beside(g.MinActiveDecodes, 12).Draw(t, "decodes"),
			CachedTokens: rapid.OneOf(beside(g.MinSourceCacheTokens, context), beside(g.MinExtraCacheTokens, context),
				beside(max(0, context-g.MinNewTokens), context)).Draw(t, "cached"),
			Bandwidth:   rapid.SampledFrom([]float64{0, 1e8, 9.7e9, 2.5e10}).Draw(t, "bandwidth"),
			Unavailable: rapid.IntRange(0, 9).Draw(t, "down") == 0,
		})
	}
	if rapid.Bool().Draw(t, "busy home") { // else the source itself is mostly chosen
		s.Request.Affinity = "i0"
		s.Instances[0].Requests, s.Instances[0].CachedTokens = 0, 0
	}
	return s
}

// Invariant: raising any threshold, the margin too, never turns a request that
// did not trigger into one that does, and never changes the target.
func TestRaisingAThresholdNeverTriggers(t *testing.T) {
	triggered := 0
	rapid.Check(t, func(t *rapid.T) {
		low := kvpolicy.UnifiedV2Relaxed()
		low.Affinity.OverloadFactor = math.Inf(1)
		g := &low.Separation
		g.MinNewTokens = rapid.SampledFrom([]int64{0, 1, 1000, 8000}).Draw(t, "min new")
		g.MinActiveDecodes = rapid.Int64Range(0, 2).Draw(t, "min decodes")
		g.MinSourceCacheTokens = rapid.SampledFrom([]int64{0, 1, 1000, 4000}).Draw(t, "min source cache")
		g.MinExtraCacheTokens = rapid.SampledFrom([]int64{0, 1, 1000, 2000}).Draw(t, "min extra cache")
		s := separationSnapshot(t, *g)
		before, err := low.Decide(s)
		require.NoError(t, err)
		if before.Separation.Reason == kvpolicy.Triggered {
			triggered++
		}
		high := low
		more := rapid.OneOf(rapid.SampledFrom([]int64{0, 1}), rapid.Int64Range(0, 20_000))
		high.Separation.MinNewTokens += more.Draw(t, "more new")
		high.Separation.MinActiveDecodes += rapid.Int64Range(0, 2).Draw(t, "more decodes")
		high.Separation.MinSourceCacheTokens += more.Draw(t, "more source cache")
		high.Separation.MinExtraCacheTokens += more.Draw(t, "more extra cache")
		// Also exactly by what the trigger gained: the gate is strict.
		gained := math.Max(0, before.Separation.CostLocal-before.Separation.CostMigrate)
		high.Separation.MarginSeconds = rapid.SampledFrom([]float64{0, gained / 2, gained, math.Nextafter(gained, math.Inf(1)), 1e12}).Draw(t, "margin")
		after, err := high.Decide(s)
		require.NoError(t, err)
		assert.Equal(t, before.Target, after.Target)
		if before.Separation.Reason != kvpolicy.Triggered {
			assert.NotEqual(t, kvpolicy.Triggered, after.Separation.Reason)
			assert.NotEqual(t, kvpolicy.PrefillRemote, after.Action)
		}
	})
	assert.NotZero(t, triggered, "some trigger before")
}
