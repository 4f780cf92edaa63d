package kvpolicy_test

import (
	"math"

	"github.com/kvpolicy/kvpolicy"
	"github.com/stretchr/testify/require"
)

func (o *oracle) interference(tokens, decodes int64) float64 {
	g := o.policy.Separation
	return float64(tokens) / g.InterferenceRate * (1 + g.InterferenceAlpha*math.Max(0, float64(decodes)-1))
}

func (o *oracle) transfer(tokens int64, from, to int) float64 {
	m := o.policy.Transfer
	return m.OverheadSeconds + float64(tokens)*m.KVBytesPerToken/math.Min(o.all[from].bandwidth, o.all[to].bandwidth)
}

// sources are the instances that may prefill for the chosen one: SPEC section
// 4's first sentence.
func (o *oracle) sources(chosen int) (sources []int) {
	for i, c := range o.all {
		if i != chosen && c.tier != kvpolicy.Down && c.tier != kvpolicy.Stale && o.fits(i, c.uncached) {
			sources = append(sources, i)
		}
	}
	return sources
}

// checkSeparation checks the funnel, for the chosen instance that the decision
// names.
func (o *oracle) checkSeparation(t require.TestingT, d kvpolicy.Decision, chosen int) {
	g, c := o.policy.Separation, o.all[chosen]
	if !g.Enabled {
		require.Equal(t, kvpolicy.Place, d.Action)
		require.Zero(t, d.Separation)
		require.Zero(t, d.PrefillOn)
		return
	}
	require.Equal(t, c.uncached, d.Separation.NewLocal)
	var warm, warmer []int
	for _, i := range o.sources(chosen) {
		if o.all[i].cached >= g.MinSourceCacheTokens {
			warm = append(warm, i)
		}
	}
	for _, i := range warm {
		if o.all[i].cached-c.cached >= g.MinExtraCacheTokens {
			warmer = append(warmer, i)
		}
	}
	early := func(reason kvpolicy.Reason) {
		require.Equal(t, kvpolicy.Place, d.Action)
		require.Equal(t, kvpolicy.Separation{Reason: reason, NewLocal: c.uncached}, d.Separation)
		require.Zero(t, d.PrefillOn)
	}
	switch {
	case c.uncached < g.MinNewTokens:
		early(kvpolicy.NewLocalBelowThreshold)
		return
	case c.ActiveDecodes < g.MinActiveDecodes:
		early(kvpolicy.ChosenNoActiveDecode)
		return
	case len(warm) == 0:
		early(kvpolicy.SourceCacheBelowThreshold)
		return
	case len(warmer) == 0:
		early(kvpolicy.SourceNotMeaningfullyMoreCache)
		return
	}
	costMigrate := func(i int) float64 {
		return o.transfer(c.uncached, i, chosen) + o.interference(o.all[i].uncached, o.all[i].ActiveDecodes)
	}
	source := o.find(d.Separation.Source)
	require.Contains(t, warmer, source)
	require.True(t, o.isBest(source, warmer, costMigrate), "the source is the cheapest")
	local, remote := o.interference(c.uncached, c.ActiveDecodes), costMigrate(source)
	require.Equal(t, o.all[source].uncached, d.Separation.NewSource)
	require.True(t, near(local, d.Separation.CostLocal))
	require.True(t, near(remote, d.Separation.CostMigrate))
	if !near(remote, local-g.MarginSeconds) {
		triggered := remote < local-g.MarginSeconds
		require.Equal(t, triggered, d.Separation.Reason == kvpolicy.Triggered)
	}
	if d.Separation.Reason == kvpolicy.Triggered {
		require.Equal(t, kvpolicy.PrefillRemote, d.Action)
		require.Equal(t, d.Separation.Source, d.PrefillOn)
	} else {
		require.Equal(t, kvpolicy.CostBenefitNotEnoughMargin, d.Separation.Reason)
		require.Equal(t, kvpolicy.Place, d.Action)
		require.Zero(t, d.PrefillOn)
	}
}
