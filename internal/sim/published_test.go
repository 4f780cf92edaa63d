package sim

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
)

// The published times of a prefill, alone and beside eight streams (FACTS.md, speed of the parts).
var published = []struct {
	tokens              int
	alone, tokenAtEight float64 // seconds
}{
	{2_048, 0.143, 0.032},
	{8_192, 0.583, 0.114},
	{32_768, 4.52, 0.388},
	{65_536, 15.6, 0.757},
	{131_072, 57.0, 1.419},
}

// TestPublishedPrefill: the TTFT of a prompt alone on an instance, within 15 %.
func TestPublishedPrefill(t *testing.T) {
	for _, p := range published {
		c, l := newCluster(t, 16, H20())
		require.NoError(t, c.Submit(Request{ID: 1, PromptTokens: p.tokens, OutputTokens: 1}, 0))
		for c.Step() {
		}
		within(t, fmt.Sprintf("prefill of %d tokens", p.tokens), p.alone, l.record(t, 1).FirstTokenSeconds, 0.15)
	}
}

// TestPublishedDecode: the time a token of 1 and of 8 streams, within 5 % (the
// published context is not known; it is short here).
func TestPublishedDecode(t *testing.T) {
	for _, p := range []struct {
		streams int
		token   float64
	}{{1, 5.9e-3}, {8, 7.7e-3}} {
		c, l := newCluster(t, 16, H20())
		for i := range p.streams {
			require.NoError(t, c.Submit(Request{ID: uint64(i), PromptTokens: 128, OutputTokens: 512}, 0))
		}
		for c.Step() {
		}
		r := l.record(t, 0)
		within(t, fmt.Sprintf("token at %d streams", p.streams), p.token, (r.EndSeconds-r.FirstTokenSeconds)/511, 0.05)
	}
}

// TestPublishedInterference: the time that a token of each of eight streams takes from
// a prefill's dispatch to its first token, within 25 %. That this is what was
// measured is our reading (docs/engine.md): while the prompt is tokenised the streams go at
// full speed, and a window average has these tokens in it. Within the step
// itself a chunk holds every stream up for as long as it takes: no
// scheduler with a budget of 8,192 tokens could put out a token each 32 ms beside a 2k
// prefill, which takes 143 ms in one step.
func TestPublishedInterference(t *testing.T) {
	for _, p := range published {
		c, l := newCluster(t, 16, H20())
		for i := range 8 {
			require.NoError(t, c.Submit(Request{ID: uint64(i), PromptTokens: 128, OutputTokens: 20_000}, 0))
		}
		c.Run(1)
		before, start := c.State(0), c.Now()
		require.Equal(t, 8, before.ActiveDecodes)
		require.NoError(t, c.Submit(Request{ID: 8, PromptTokens: p.tokens, OutputTokens: 1}, 0))
		for len(l.records) == 0 && c.Step() {
		}
		end := l.record(t, 8).FirstTokenSeconds
		after := c.State(0)
		tokens := float64(after.OngoingTokens-before.OngoingTokens) / 8
		within(t, fmt.Sprintf("token beside %d of prefill", p.tokens), p.tokenAtEight, (end-start)/tokens, 0.25)
	}
}

// TestPublishedPrefixHit: a prompt of 64k tokens that is wholly cached, which fixes the
// front end's time, within 15 %; and the same recomputed.
func TestPublishedPrefixHit(t *testing.T) {
	c, l := newCluster(t, 16, H20())
	blocks := chain(1, 65_536/16)
	require.NoError(t, c.Submit(Request{ID: 1, PromptTokens: 65_536, OutputTokens: 1, Blocks: blocks}, 0))
	for c.Step() {
	}
	within(t, "64k recomputed", 15.2, l.record(t, 1).FirstTokenSeconds, 0.15)
	start := c.Now()
	require.NoError(t, c.Submit(Request{ID: 2, PromptTokens: 65_536, OutputTokens: 1, Blocks: blocks}, 0))
	for c.Step() {
	}
	within(t, "64k cached", 0.11, l.record(t, 2).FirstTokenSeconds-start, 0.15)
	require.Equal(t, 65_520, l.record(t, 2).CachedTokens)
}

// TestPublishedTransfer: the ranges given for idle and loaded transfers. Not reproduced: the spread of 1.5
// to 10 s for 11.5 GiB (the engine always says the same), the remote prefix hit of 0.97 s for 64k tokens (6 GiB),
// which is another store's path and twice as fast as the idle transfers of that size, and the 4 to 45 s of the five
// requests whose KV was really moved in [V2], whose connector stalls in ways the report itself does not model.
func TestPublishedTransfer(t *testing.T) {
	const gib = 1 << 30
	transfer := H20().Transfer
	within(t, "1 GiB idle", 3e-3+gib/9.7e9, transfer.Seconds(gib, false), 1e-12)
	within(t, "3 GiB idle", 3e-3+3*gib/9.7e9, transfer.Seconds(3*gib, false), 1e-12)
	for _, size := range []float64{6 * gib, 8 * gib, 16 * gib} {
		rate := size / transfer.Seconds(size, false)
		require.True(t, rate >= 3.4e9 && rate <= 4.5e9, "%v bytes at %v bytes/s", size, rate)
	}
	large := transfer.Seconds(11.5*gib, false)
	require.True(t, large >= 1.5 && large <= 10, "%v", large)
	within(t, "10 GB loaded", 0.3+10/3.0, transfer.Seconds(10e9, true), 1e-12)
	last := 0.0
	for size := 0.0; size < 10*gib; size += gib / 16 {
		seconds := transfer.Seconds(size, false)
		require.Greater(t, seconds, last)
		last = seconds
	}
}
