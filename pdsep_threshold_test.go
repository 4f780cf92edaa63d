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

// separationSnapshot draws a fleet whose first instance, the home, has something
// to prefill, decodes to protect, and mostly a source that could do it.
func separationSnapshot(t *rapid.T) kvpolicy.Snapshot {
	context := rapid.OneOf(rapid.SampledFrom([]int64{0, 1, 8000, 16_000}), rapid.Int64Range(10_000, 200_000)).Draw(t, "context")
	s := kvpolicy.Snapshot{Request: kvpolicy.Request{ID: "r", ContextTokens: context, Affinity: "i0"}}
	prefix := rapid.OneOf(rapid.SampledFrom([]int64{0, context / 2, max(0, context-1), context, context + 1}), rapid.Int64Range(0, context))
	for i := range rapid.IntRange(2, 5).Draw(t, "instances") {
		in := kvpolicy.Instance{
			ID:            fmt.Sprintf("i%d", i),
			Requests:      rapid.Int64Range(0, 3).Draw(t, "requests"),
			ActiveDecodes: rapid.Int64Range(0, 12).Draw(t, "decodes"),
			CachedTokens:  prefix.Draw(t, "cached"),
			Bandwidth:     rapid.SampledFrom([]float64{0, 1e8, 9.7e9, 2.5e10}).Draw(t, "bandwidth"),
		}
		if i == 0 {
			in.CachedTokens, in.Bandwidth = min(in.CachedTokens, rapid.SampledFrom([]int64{0, 0, 100, context}).Draw(t, "at most")), 0
		} else {
			in.Unavailable = rapid.IntRange(0, 9).Draw(t, "down") == 0
		}
		s.Instances = append(s.Instances, in)
	}
	return s
}

// Invariant: raising one threshold or all, the margin too, to below, at or just
// above what the snapshot holds never turns a request that did not trigger into
// one that does, and never changes the target.
func TestRaisingThresholdsAtTheirTiesNeverTriggers(t *testing.T) {
	before, after := map[kvpolicy.Reason]int{}, map[kvpolicy.Reason]int{} // of what triggered before
	rapid.Check(t, func(t *rapid.T) {
		s := separationSnapshot(t)
		low := kvpolicy.UnifiedV2Relaxed()
		low.Affinity.OverloadFactor = math.Inf(1)
		// Below, at and just above what the snapshot holds.
		home, source := s.Instances[0], s.Instances[1]
		cached := min(home.CachedTokens, s.Request.ContextTokens)
		held := min(source.CachedTokens, s.Request.ContextTokens)
		threshold := func(of int64, label string) int64 {
			return max(0, rapid.SampledFrom([]int64{0, of / 2, of - 1, of, of, of, of + 1}).Draw(t, label))
		}
		only := rapid.IntRange(0, 5).Draw(t, "only") // 5: all
		raise := func(which int, from, to int64, label string) int64 {
			if only != which && only != 5 {
				return from
			}
			return max(from, rapid.OneOf(rapid.SampledFrom([]int64{from, from, from + 1, to, to + 1}), rapid.Int64Range(from, from+20_000)).Draw(t, label))
		}
		g := &low.Separation
		g.MinNewTokens = threshold(s.Request.ContextTokens-cached, "min new")
		g.MinActiveDecodes = threshold(home.ActiveDecodes, "min decodes")
		g.MinSourceCacheTokens = threshold(held, "min source cache")
		g.MinExtraCacheTokens = threshold(held-cached, "min extra cache")
		first, err := low.Decide(s)
		require.NoError(t, err)
		before[first.Separation.Reason]++

		high := low
		h := &high.Separation
		h.MinNewTokens = raise(0, g.MinNewTokens, s.Request.ContextTokens-cached, "higher min new")
		h.MinActiveDecodes = raise(1, g.MinActiveDecodes, home.ActiveDecodes, "higher min decodes")
		h.MinSourceCacheTokens = raise(2, g.MinSourceCacheTokens, held, "higher min source cache")
		h.MinExtraCacheTokens = raise(3, g.MinExtraCacheTokens, held-cached, "higher min extra cache")
		gained := math.Max(0, first.Separation.CostLocal-first.Separation.CostMigrate)
		if only >= 4 {
			h.MarginSeconds = rapid.SampledFrom([]float64{0, gained / 2, gained, math.Nextafter(gained, math.Inf(1)), 1e12}).Draw(t, "margin")
		}
		second, err := high.Decide(s)
		require.NoError(t, err)
		assert.Equal(t, first.Target, second.Target)
		if first.Separation.Reason == kvpolicy.Triggered {
			after[second.Separation.Reason]++
			return
		}
		assert.NotEqual(t, kvpolicy.Triggered, second.Separation.Reason)
		assert.NotEqual(t, kvpolicy.PrefillRemote, second.Action)
	})
	drawn := 0
	for _, n := range before {
		drawn += n
	}
	if drawn >= 100 { // one in ten triggers; a short run may well draw none
		assert.NotZero(t, before[kvpolicy.Triggered], "%v, %v", before, after)
		assert.Greater(t, len(before), 1, "%v, %v", before, after)
	}
}
