package sim

import (
	"errors"
	"math"
	"runtime"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// plain is an H20 without a front end, so that closed forms are short.
func plain() Profile {
	p := H20()
	p.FrontendSeconds, p.FrontendSecondsPerToken = 0, 0
	return p
}

// small is a plain instance with a pool of so many tokens.
func small(tokens int) Profile {
	p := plain()
	p.KVCapacityTokens = tokens
	p.ConnectorBufferBytes = 0
	return p
}

// connected is p with a connector loaded.
func connected(p Profile) Profile {
	p.ConnectorLoaded = true
	return p
}

func drain(c *Cluster) { c.Run(math.Inf(1)) }

// TestBudgetIsShared: two prompts of 5,000 tokens that wait together are computed as 5,000 + 3,192
// tokens and then 1,808, beside the token of the one that decodes by then.
func TestBudgetIsShared(t *testing.T) {
	p := plain()
	c, l := newCluster(t, 16, p)
	// The first is alone in the first step: an instance that idles starts at once.
	require.NoError(t, c.Submit(Request{ID: 0, PromptTokens: 16, OutputTokens: 1}, 0))
	require.NoError(t, c.Submit(Request{ID: 1, PromptTokens: 5_000, OutputTokens: 2}, 0))
	require.NoError(t, c.Submit(Request{ID: 2, PromptTokens: 5_000, OutputTokens: 1}, 0))
	drain(c)
	first := p.stepSeconds(0, 0) + p.prefillSeconds(0, 16)
	second := first + p.stepSeconds(0, 0) + p.prefillSeconds(0, 5_000) + p.prefillSeconds(0, 3_192)
	third := second + p.stepSeconds(1, 5_001) + p.prefillSeconds(3_192, 1_808)
	assert.InDelta(t, first, l.record(t, 0).EndSeconds, 1e-12)
	assert.InDelta(t, second, l.record(t, 1).FirstTokenSeconds, 1e-12)
	assert.InDelta(t, third, l.record(t, 1).EndSeconds, 1e-12)
	assert.InDelta(t, third, l.record(t, 2).FirstTokenSeconds, 1e-12)
	checkEmpty(t, c)
}

// TestDecodesComeFirst: beside a stream a prompt of the whole budget takes a step more.
func TestDecodesComeFirst(t *testing.T) {
	p := plain()
	c, l := newCluster(t, 16, p)
	require.NoError(t, c.Submit(Request{ID: 1, PromptTokens: 16, OutputTokens: 4}, 0))
	require.NoError(t, c.Submit(Request{ID: 2, PromptTokens: 8_192, OutputTokens: 1}, 0))
	drain(c)
	want := p.stepSeconds(0, 0) + p.prefillSeconds(0, 16)
	want += p.stepSeconds(1, 17) + p.prefillSeconds(0, 8_191)
	want += p.stepSeconds(1, 18) + p.prefillSeconds(8_191, 1)
	assert.InDelta(t, want, l.record(t, 2).FirstTokenSeconds, 1e-12)
}

// TestChunksAddUp: q's term is that of the positions, so that the chunks of a prompt take
// together what one would.
func TestChunksAddUp(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := H20()
		a := rapid.IntRange(0, 200_000).Draw(t, "position")
		b := rapid.IntRange(0, 200_000).Draw(t, "first")
		d := rapid.IntRange(0, 200_000).Draw(t, "second")
		whole, parts := p.prefillSeconds(a, b+d), p.prefillSeconds(a, b)+p.prefillSeconds(a+b, d)
		require.InDelta(t, whole, parts, 1e-9*(1+whole))
	})
}

// TestDecodeClosedForm: the time of n tokens is the arithmetic series of their steps.
func TestDecodeClosedForm(t *testing.T) {
	p := plain()
	c, l := newCluster(t, 16, p)
	const prompt, output = 1_000, 50_001
	require.NoError(t, c.Submit(Request{PromptTokens: prompt, OutputTokens: output}, 0))
	events := 0
	for c.Step() {
		events++
	}
	const steps = output - 1
	want := steps*(p.StepSeconds+p.DecodeSeconds) + p.KVReadSeconds*(steps*(prompt+1)+steps*(steps-1)/2)
	r := l.record(t, 0)
	assert.InDelta(t, want, r.EndSeconds-r.FirstTokenSeconds, 1e-8)
	assert.LessOrEqual(t, events, 3, "steps are skipped")
}

// TestConnectorTax: a loaded connector costs each step 1.4 ms, and the pool its buffer.
func TestConnectorTax(t *testing.T) {
	end := func(p Profile) (float64, int) {
		c, l := newCluster(t, 16, p)
		require.NoError(t, c.Submit(Request{PromptTokens: 100, OutputTokens: 1_000}, 0))
		drain(c)
		return l.record(t, 0).EndSeconds, c.State(0).KVCapacityTokens
	}
	without, pool := end(plain())
	with, less := end(connected(plain()))
	assert.InDelta(t, 1_000*1.4e-3, with-without, 1e-9)
	assert.InDelta(t, 1e9/98_304, pool-less, 16)
}

// TestPrefixCache: the next turn finds prompt and output of the one before, but for
// the last block: its final token was never computed.
func TestPrefixCache(t *testing.T) {
	c, l := newCluster(t, 16, plain())
	blocks := chain(7, 100)
	assert.Zero(t, c.CachedTokens(0, 1_600, blocks))
	require.NoError(t, c.Submit(Request{ID: 1, PromptTokens: 1_000, OutputTokens: 120, Blocks: blocks}, 0))
	drain(c)
	// 1,000 + 119 tokens were computed: 69 whole blocks.
	assert.Equal(t, 69*16, c.CachedTokens(0, 1_600, blocks))
	assert.Equal(t, 69*16, c.State(0).CachedTokens)
	assert.Equal(t, 16, c.CachedTokens(0, 17, blocks))
	assert.Zero(t, c.CachedTokens(0, 16, blocks), "the last token is always computed")
	assert.Zero(t, c.CachedTokens(0, 1_600, chain(8, 100)))
	assert.Zero(t, c.CachedTokens(0, 0, blocks))
	assert.Zero(t, c.CachedTokens(9, 1_600, blocks))
	require.NoError(t, c.Submit(Request{ID: 2, PromptTokens: 1_500, OutputTokens: 1, Blocks: blocks}, 0))
	drain(c)
	assert.Equal(t, 69*16, l.record(t, 2).CachedTokens)
	assert.Equal(t, 1_500-69*16, l.record(t, 2).PrefilledTokens)
	checkEmpty(t, c)
}

// TestLeastRecentlyUsed: room is made at the cost of the session unused the longest,
// from the end of its chain.
func TestLeastRecentlyUsed(t *testing.T) {
	c, _ := newCluster(t, 16, small(640)) // 40 blocks
	run := func(id, session uint64, tokens int) {
		require.NoError(t, c.Submit(Request{ID: id, PromptTokens: tokens, OutputTokens: 1, Blocks: chain(session, 40)}, 0))
		drain(c)
	}
	cached := func(session uint64) int { return c.CachedTokens(0, 640, chain(session, 40)) / 16 }
	run(1, 1, 16*16)
	run(2, 2, 16*16)
	run(3, 1, 16*16+1) // uses session 1 again
	assert.Equal(t, [2]int{16, 16}, [2]int{cached(1), cached(2)})
	run(4, 3, 16*18) // 40 - 32 = 8 blocks were free, 10 more are needed
	assert.Equal(t, [3]int{16, 6, 18}, [3]int{cached(1), cached(2), cached(3)})
	checkEmpty(t, c)
}

// TestSharedBlocksCountOnce: two requests of one session in the batch hold its prefix together.
func TestSharedBlocksCountOnce(t *testing.T) {
	c, _ := newCluster(t, 16, plain())
	blocks := chain(1, 100)
	for id := range uint64(2) {
		require.NoError(t, c.Submit(Request{ID: id, PromptTokens: 1_600 + 1, OutputTokens: 100, Blocks: blocks}, 0))
		c.Run(c.Now() + 0.2)
	}
	s := c.State(0)
	assert.Equal(t, 2, s.ActiveDecodes)
	assert.Less(t, s.KVUsedTokens, 1_600+2*120)
	drain(c)
	checkEmpty(t, c)
}

// TestQueueAndPreemption: the pool bounds the batch, the queue is first come first served,
// and who was admitted last makes room for those before him, then starts over.
func TestQueueAndPreemption(t *testing.T) {
	c, l := newCluster(t, 16, small(320)) // 20 blocks
	for id := range uint64(3) {
		require.NoError(t, c.Submit(Request{ID: id, PromptTokens: 144, OutputTokens: 100}, 0)) // 9 blocks each
	}
	c.Run(0.02)
	assert.Equal(t, 2, c.State(0).Running)
	assert.Equal(t, 1, c.State(0).Waiting)
	drain(c)
	assert.Zero(t, l.record(t, 0).Preemptions)
	assert.Positive(t, l.record(t, 1).Preemptions)
	assert.Less(t, l.record(t, 0).EndSeconds, l.record(t, 1).EndSeconds)
	assert.Less(t, l.record(t, 1).FirstTokenSeconds, l.record(t, 2).FirstTokenSeconds)
	for id := range uint64(3) {
		r := l.record(t, id)
		assert.Equal(t, Completed, r.Outcome)
		assert.GreaterOrEqual(t, r.PrefilledTokens, 144*(1+r.Preemptions))
	}
	checkEmpty(t, c)
}

// TestReserveWholePrompt: with it, a prompt whose first chunk alone would fit waits.
func TestReserveWholePrompt(t *testing.T) {
	for _, whole := range []bool{false, true} {
		p := small(20_000)
		p.ReserveWholePrompt = whole
		c, _ := newCluster(t, 16, p)
		require.NoError(t, c.Submit(Request{ID: 1, PromptTokens: 10_000, OutputTokens: 1_000}, 0))
		c.Run(2)
		require.NoError(t, c.Submit(Request{ID: 2, PromptTokens: 15_000, OutputTokens: 1}, 0))
		c.Run(2.1)
		assert.Equal(t, whole, c.State(0).Waiting == 1)
		drain(c)
		checkEmpty(t, c)
	}
}

// TestSeparated: prefill on the source, blocks reserved and transfer started once the target has
// taken it in, one step for the last prompt token, then decode. Both ends keep the prefix.
func TestSeparated(t *testing.T) {
	p := connected(H20())
	c, l := newCluster(t, 16, p, p)
	const prompt = 8_000
	blocks := chain(1, prompt/16+1)
	require.NoError(t, c.SubmitSeparated(Request{ID: 1, PromptTokens: prompt, OutputTokens: 10, Blocks: blocks}, 0, 1))
	assert.Equal(t, 1, c.State(0).Waiting)
	assert.Equal(t, State{Up: true, KVCapacityTokens: c.State(1).KVCapacityTokens}, c.State(1), "nothing at the target yet")
	l.told = func(p Progress) {
		if p.Kind == TransferStarted {
			assert.Equal(t, prompt, c.State(1).KVUsedTokens, "reserved from the start")
			assert.Equal(t, prompt, c.State(0).KVUsedTokens, "kept till the end")
			assert.Equal(t, prompt, p.Tokens)
		}
	}
	drain(c)
	front := p.FrontendSeconds + prompt*p.FrontendSecondsPerToken
	prefilled := front + p.stepSeconds(0, 0) + p.prefillSeconds(0, prompt)
	transfer := 3e-3 + prompt*98_304/9.7e9
	first := prefilled + front + transfer + p.stepSeconds(0, 0) + p.prefillSeconds(prompt-1, 1)
	kinds := []ProgressKind{Started, Prefilled, TransferStarted, TransferEnded, Started, FirstToken}
	times := []float64{front, prefilled, prefilled + front, prefilled + front + transfer, prefilled + front + transfer, first}
	require.Len(t, l.progress, len(kinds))
	for i, p := range l.progress {
		assert.Equal(t, kinds[i], p.Kind)
		assert.InDelta(t, times[i], p.Seconds, 1e-9, p.Kind)
	}
	r := l.record(t, 1)
	assert.Equal(t, [2]int{1, 0}, [2]int{r.Instance, r.PrefillInstance})
	assert.Equal(t, prompt, r.TransferTokens)
	assert.InDelta(t, transfer, r.TransferSeconds, 1e-12)
	assert.Equal(t, prompt+1, r.PrefilledTokens)
	for i := range 2 {
		assert.Equal(t, prompt, c.CachedTokens(i, prompt+1, blocks))
	}
	checkEmpty(t, c)

	l.told = nil

	// The target has most of the prompt now: only the rest is moved, and under
	// load at the loaded rate.
	require.NoError(t, c.Submit(Request{ID: 2, PromptTokens: 100, OutputTokens: 5_000}, 1))
	require.NoError(t, c.SubmitSeparated(Request{ID: 3, PromptTokens: prompt + 2_000, OutputTokens: 1, Blocks: chain(1, 2*prompt/16)}, 0, 1))
	drain(c)
	r = l.record(t, 3)
	assert.Equal(t, prompt, r.CachedTokens)
	assert.Equal(t, 2_000, r.TransferTokens)
	assert.InDelta(t, 0.3+2_000*98_304/3e9, r.TransferSeconds, 1e-12)
	checkEmpty(t, c)
}

// TestSeparatedBothWays: two instances each full of prefills that wait for room
// on the other would wait for ever; one is given up.
func TestSeparatedBothWays(t *testing.T) {
	p := connected(small(320))
	c, l := newCluster(t, 16, p, p)
	for id := range uint64(8) {
		from := int(id % 2)
		require.NoError(t, c.SubmitSeparated(Request{ID: id, PromptTokens: 150, OutputTokens: 10}, from, 1-from))
	}
	drain(c)
	assert.Len(t, l.records, 8)
	abandoned := 0
	for _, p := range l.progress {
		if p.Kind == TransferAbandoned {
			abandoned++
		}
	}
	assert.Positive(t, abandoned)
	checkEmpty(t, c)
}

// TestSlowerEnd: a transfer takes the time of the slower of its two ends.
func TestSlowerEnd(t *testing.T) {
	fast, slow := connected(plain()), connected(plain())
	slow.Transfer.IdleBytesPerSecond = 1e6
	for source := range 2 {
		c, l := newCluster(t, 16, fast, slow)
		require.NoError(t, c.SubmitSeparated(Request{PromptTokens: 100, OutputTokens: 1}, source, 1-source))
		drain(c)
		assert.InDelta(t, 3e-3+100*98_304/1e6, l.record(t, 0).TransferSeconds, 1e-9)
	}
}

// TestCancelOfTheFirst: whoever waits behind one that does not fit is looked at when that one is taken back.
func TestCancelOfTheFirst(t *testing.T) {
	c, l := newCluster(t, 16, small(1_600))
	require.NoError(t, c.Submit(Request{ID: 1, PromptTokens: 800, OutputTokens: 600}, 0))
	require.NoError(t, c.Submit(Request{ID: 2, PromptTokens: 1_500, OutputTokens: 1}, 0))
	require.NoError(t, c.Submit(Request{ID: 3, PromptTokens: 100, OutputTokens: 1}, 0))
	c.Run(0.5)
	assert.Equal(t, 2, c.State(0).Waiting, "first come, first served")
	now := c.Now()
	c.Cancel(2)
	drain(c)
	assert.Less(t, l.record(t, 3).FirstTokenSeconds, now+0.1)
	assert.Greater(t, l.record(t, 1).EndSeconds, now+1)
	checkEmpty(t, c)
}

// TestPrefixOfTheRunning: one that does not fit is looked at again while a prefill
// goes on, for what is shared by then may make it fit.
func TestPrefixOfTheRunning(t *testing.T) {
	p := small(68 * 16)
	p.ReserveWholePrompt = true
	p.StepTokens, p.MaxRunning = 600, 16
	c, l := newCluster(t, 16, p)
	require.NoError(t, c.Submit(Request{ID: 9, PromptTokens: 16, OutputTokens: 1}, 0)) // so that both wait for the next step
	for id := range uint64(2) {
		require.NoError(t, c.Submit(Request{ID: id, PromptTokens: 1_000, OutputTokens: 80, Blocks: chain(1, 60)}, 0))
	}
	drain(c)
	assert.Less(t, l.record(t, 1).FirstTokenSeconds, l.record(t, 0).FirstTokenSeconds+0.1)
	assert.Greater(t, l.record(t, 0).EndSeconds, l.record(t, 0).FirstTokenSeconds+0.4)
	checkEmpty(t, c)
}

// TestPreemptedTriesAgain: in the step after, not only when the others are done.
func TestPreemptedTriesAgain(t *testing.T) {
	p := small(320)
	p.StepTokens, p.MaxRunning = 64, 16
	c, l := newCluster(t, 16, p)
	for id := range uint64(2) {
		require.NoError(t, c.Submit(Request{ID: id, PromptTokens: 144, OutputTokens: 100}, 0))
	}
	drain(c)
	preempted := math.Inf(1)
	for _, q := range l.progress {
		switch {
		case q.Kind == Preempted:
			assert.Equal(t, uint64(1), q.ID)
			preempted = min(preempted, q.Seconds)
		case q.Kind == Started && q.Seconds > preempted:
			assert.Less(t, q.Seconds, preempted+0.008)
			checkEmpty(t, c)
			return
		}
	}
	assert.Fail(t, "not preempted, or not started again")
}

// TestReadyGoesFirst: a request whose KV has come while the batch was full runs when the only
// one in it gives up for want of the blocks that it holds.
func TestReadyGoesFirst(t *testing.T) {
	p := connected(small(320))
	p.MaxRunning = 1
	p.Transfer.IdleOverheadSeconds = 0.1
	c, l := newCluster(t, 16, p, p)
	require.NoError(t, c.SubmitSeparated(Request{ID: 2, PromptTokens: 150, OutputTokens: 5}, 0, 1))
	c.Run(0.05)
	require.NoError(t, c.Submit(Request{ID: 1, PromptTokens: 100, OutputTokens: 200}, 1))
	drain(c)
	require.Len(t, l.records, 2)
	assert.Equal(t, 1, l.record(t, 1).Preemptions)
	assert.Less(t, l.record(t, 2).EndSeconds, l.record(t, 1).EndSeconds)
	checkEmpty(t, c)
}

// TestCancelOfOneKept: the blocks of a prefill that nobody will fetch any more are given to whoever waits.
func TestCancelOfOneKept(t *testing.T) {
	p := connected(small(320))
	c, l := newCluster(t, 16, p, p)
	require.NoError(t, c.Submit(Request{ID: 1, PromptTokens: 200, OutputTokens: 100}, 1)) // no room at the target
	require.NoError(t, c.SubmitSeparated(Request{ID: 2, PromptTokens: 150, OutputTokens: 5}, 0, 1))
	c.Run(0.05)
	require.NoError(t, c.Submit(Request{ID: 3, PromptTokens: 16, OutputTokens: 100}, 0))
	require.NoError(t, c.Submit(Request{ID: 4, PromptTokens: 200, OutputTokens: 5}, 0))
	c.Run(0.1)
	assert.Equal(t, 1, c.State(0).Waiting)
	now := c.Now()
	assert.True(t, c.Cancel(2))
	drain(c)
	assert.Less(t, l.record(t, 4).FirstTokenSeconds, now+0.05)
	checkEmpty(t, c)
}

// TestAbandoned: a prefill given up by the source is begun at the target as soon as
// its first chunk fits, where its whole did not.
func TestAbandoned(t *testing.T) {
	p := connected(small(320))
	target := p
	target.StepTokens, target.MaxRunning = 64, 16
	c, l := newCluster(t, 16, p, target)
	require.NoError(t, c.Submit(Request{ID: 1, PromptTokens: 120, OutputTokens: 100}, 1))
	require.NoError(t, c.SubmitSeparated(Request{ID: 2, PromptTokens: 200, OutputTokens: 5}, 0, 1))
	c.Run(0.1)
	require.NoError(t, c.Submit(Request{ID: 3, PromptTokens: 150, OutputTokens: 5}, 0))
	now := c.Now()
	drain(c)
	var kinds []ProgressKind
	for _, q := range l.progress {
		if q.ID == 2 && q.Seconds >= now && q.Seconds < now+0.02 {
			kinds = append(kinds, q.Kind)
		}
	}
	require.GreaterOrEqual(t, len(kinds), 2)
	assert.Equal(t, []ProgressKind{TransferAbandoned, Started}, kinds[:2])
	assert.Zero(t, l.record(t, 2).TransferTokens)
	checkEmpty(t, c)
}

// TestRunAndSharedTransfer: as TestRunAndTransfer, for a transfer of what the target has
// computed itself by then, whose copy it gives back.
func TestRunAndSharedTransfer(t *testing.T) {
	p := connected(small(41 * 16))
	c, l := newCluster(t, 16, p, p)
	require.NoError(t, c.Submit(Request{ID: 1, PromptTokens: 160, OutputTokens: 1, Blocks: chain(1, 10)}, 1))
	drain(c) // 10 cached, 31 free
	start := c.Now()
	require.NoError(t, c.Submit(Request{ID: 2, PromptTokens: 120, OutputTokens: 150}, 1))
	require.NoError(t, c.SubmitSeparated(Request{ID: 3, PromptTokens: 168, OutputTokens: 1, Blocks: chain(3, 10)}, 0, 1))
	c.Run(start + 0.05)
	require.NoError(t, c.Submit(Request{ID: 4, PromptTokens: 168, OutputTokens: 1, Blocks: chain(3, 10)}, 1))
	ended := false
	l.told = func(q Progress) {
		if q.Kind == TransferEnded {
			ended = true
			// 41 = 10 + 8 + 11 for the transfer + 10 for the same computed here, and two more. The
			// stream has taken 3 by now, the last of them one of those cached first.
			assert.Equal(t, 144, c.CachedTokens(1, 161, chain(1, 10)))
		}
	}
	drain(c)
	assert.True(t, ended)
	checkEmpty(t, c)
}

// TestRunAndTransfer: blocks that a transfer gives back in the middle of a run
// are not there for the steps before, whether or not somebody looked.
func TestRunAndTransfer(t *testing.T) {
	for _, look := range []bool{false, true} {
		p := connected(small(480)) // 30 blocks
		c, l := newCluster(t, 16, p, p)
		require.NoError(t, c.Submit(Request{ID: 1, PromptTokens: 160, OutputTokens: 1, Blocks: chain(1, 10)}, 0))
		drain(c) // 10 cached, 20 free
		require.NoError(t, c.Submit(Request{ID: 2, PromptTokens: 120, OutputTokens: 150}, 0))
		require.NoError(t, c.SubmitSeparated(Request{ID: 3, PromptTokens: 168, OutputTokens: 1, Blocks: chain(3, 10)}, 0, 1))
		l.told = func(p Progress) {
			if p.Kind == TransferEnded {
				// 30 = 10 + 11 held for the transfer + 8, and one more; the stream
				// has some 45 tokens by now, and takes 3 blocks for them: 2 of those cached.
				assert.Equal(t, 128, c.CachedTokens(0, 161, chain(1, 10)))
			}
		}
		if !look {
			l.told = nil
		}
		drain(c)
		// Afterwards it takes 6 more, one of which the transfer has given back.
		assert.Equal(t, 48, c.CachedTokens(0, 161, chain(1, 10)), "looked: %v", look)
		checkEmpty(t, c)
	}
}

// TestFail: all that an instance has a part in is lost, and can be sent again from
// the very call that tells of it.
func TestFail(t *testing.T) {
	p := connected(H20())
	c, l := newCluster(t, 16, p, p, p)
	blocks := chain(1, 10)
	require.NoError(t, c.Submit(Request{ID: 1, PromptTokens: 160, OutputTokens: 1_000, Blocks: blocks}, 0))
	require.NoError(t, c.SubmitSeparated(Request{ID: 2, PromptTokens: 50_000, OutputTokens: 5}, 0, 1))
	require.NoError(t, c.SubmitSeparated(Request{ID: 3, PromptTokens: 50_000, OutputTokens: 5}, 1, 0))
	require.NoError(t, c.Submit(Request{ID: 4, PromptTokens: 160, OutputTokens: 5}, 1))
	c.Run(1)
	l.ended = func(r Record) {
		if r.Outcome == Lost {
			assert.NoError(t, c.Submit(r.Request, 2))
		}
	}
	require.NoError(t, c.Fail(0))
	assert.Equal(t, State{}, c.State(0))
	assert.Zero(t, c.CachedTokens(0, 161, blocks))
	assert.ErrorIs(t, c.Fail(0), ErrDown)
	assert.ErrorIs(t, c.Submit(Request{ID: 9, PromptTokens: 1, OutputTokens: 1}, 0), ErrDown)
	drain(c)
	var lost, completed []uint64
	for _, r := range l.records {
		switch r.Outcome {
		case Lost:
			assert.Equal(t, 1.0, math.Round(r.EndSeconds))
			lost = append(lost, r.Request.ID)
		case Completed:
			completed = append(completed, r.Request.ID)
		}
	}
	assert.Equal(t, []uint64{1, 2, 3}, lost, "in the order of their submission")
	assert.ElementsMatch(t, []uint64{1, 2, 3, 4}, completed)
	checkEmpty(t, c)
	now := c.Now()
	require.NoError(t, c.Restore(0))
	assert.ErrorIs(t, c.Restore(0), ErrInvalid)
	require.NoError(t, c.Submit(Request{ID: 5, PromptTokens: 160, OutputTokens: 5, Blocks: blocks}, 0))
	drain(c)
	assert.Zero(t, l.record(t, 5).CachedTokens, "the cache went with the failure")
	assert.InDelta(t, c.Now()-now, c.State(0).UptimeSeconds, 1e-12)
	checkEmpty(t, c)
}

// TestFailAfterCancel: a job that was cancelled in the middle of a step goes down with its instance.
func TestFailAfterCancel(t *testing.T) {
	p := connected(H20())
	c, l := newCluster(t, 16, p, p)
	require.NoError(t, c.SubmitSeparated(Request{ID: 1, PromptTokens: 8_000, OutputTokens: 5}, 0, 1))
	c.Run(0.1)
	require.Equal(t, 1, c.State(0).Running)
	assert.True(t, c.Cancel(1))
	assert.False(t, c.Cancel(1))
	assert.Equal(t, Cancelled, l.record(t, 1).Outcome)
	assert.Equal(t, 1, c.State(0).Running, "until the end of the step")
	require.NoError(t, c.Fail(0))
	drain(c)
	checkEmpty(t, c)
}

// TestCancel: at once before the batch, at the end of the step in it.
func TestCancel(t *testing.T) {
	c, l := newCluster(t, 16, plain())
	require.NoError(t, c.Submit(Request{ID: 1, PromptTokens: 100, OutputTokens: 1_000}, 0))
	require.NoError(t, c.Submit(Request{ID: 2, PromptTokens: 100, OutputTokens: 1_000}, 0))
	assert.True(t, c.Cancel(2))
	assert.Equal(t, 0.0, l.record(t, 2).EndSeconds)
	c.Run(0.1)
	c.At(1, func() { c.Cancel(1) })
	drain(c)
	r := l.record(t, 1)
	assert.Equal(t, Cancelled, r.Outcome)
	assert.Greater(t, r.EndSeconds, 1.0)
	assert.Less(t, r.EndSeconds, 1.0+0.007)
	assert.Positive(t, r.GeneratedTokens)
	assert.Less(t, r.GeneratedTokens, 1_000)
	assert.False(t, c.Cancel(1))
	checkEmpty(t, c)
}

// TestClosedLoop: arrivals from a feed, and each turn's successor injected from its end.
func TestClosedLoop(t *testing.T) {
	c, l := newCluster(t, 16, H20())
	var arrived []float64
	l.route = func(r Request) {
		arrived = append(arrived, c.Now())
		require.NoError(t, c.Submit(r, 0))
	}
	l.ended = func(r Record) {
		if next := r.Request; next.ID < 30 {
			next.ID += 10
			next.ArrivalSeconds = r.EndSeconds + 2.5
			c.Inject(next)
		}
	}
	fed := uint64(0)
	c.Feed(func() (Request, bool) {
		fed++
		return Request{ID: fed, ArrivalSeconds: []float64{0, 0, 3, 1, 1e3}[fed], PromptTokens: 1_000, OutputTokens: 10}, fed <= 3
	})
	drain(c)
	assert.Len(t, l.records, 12)
	assert.Equal(t, 3.0, l.record(t, 2).DispatchSeconds)
	assert.Equal(t, 3.0, l.record(t, 3).DispatchSeconds, "one that should have arrived before arrives now")
	assert.IsIncreasing(t, arrived[3:])
	assert.Equal(t, l.record(t, 1).EndSeconds+2.5, l.record(t, 11).DispatchSeconds)
	checkEmpty(t, c)
}

// TestTimedEvents: at their times, in the order of scheduling where those are equal; past times and no numbers
// are now, infinity is never.
func TestTimedEvents(t *testing.T) {
	c, _ := newCluster(t, 16, H20())
	var order []int
	call := func(n int) func() { return func() { order = append(order, n) } }
	c.At(2, call(4))
	c.At(1, func() {
		order = append(order, 2)
		c.At(0, call(3))
		c.At(math.NaN(), call(0))
	})
	c.At(-1, call(1))
	c.At(2, call(5))
	c.At(math.Inf(1), call(6))
	c.Run(1.5)
	assert.Equal(t, []int{1, 2, 3, 0}, order)
	assert.Equal(t, 1.0, c.Now())
	drain(c)
	assert.Equal(t, []int{1, 2, 3, 0, 4, 5}, order)
	c.Feed(func() (Request, bool) { return Request{ArrivalSeconds: math.Inf(1)}, true })
	assert.False(t, c.Step())
}

// TestErrors: what is refused, and that nothing has changed then.
func TestErrors(t *testing.T) {
	c, l := newCluster(t, 16, H20(), connected(H20()), connected(small(100)))
	good := Request{ID: 1, PromptTokens: 200, OutputTokens: 10}
	with := func(change func(*Request)) Request {
		r := good
		change(&r)
		return r
	}
	for part, err := range map[string]error{
		"PromptTokens is 0":     c.Submit(with(func(r *Request) { r.PromptTokens = 0 }), 0),
		"PromptTokens is -5":    c.Submit(with(func(r *Request) { r.PromptTokens = -5 }), 0),
		"OutputTokens is 0":     c.Submit(with(func(r *Request) { r.OutputTokens = 0 }), 0),
		"ArrivalSeconds is NaN": c.Submit(with(func(r *Request) { r.ArrivalSeconds = math.NaN() }), 0),
		"ArrivalSeconds is +":   c.Submit(with(func(r *Request) { r.ArrivalSeconds = math.Inf(1) }), 0),
		"ArrivalSeconds is -1":  c.Submit(with(func(r *Request) { r.ArrivalSeconds = -1 }), 0),
		"instance is -1":        c.Submit(good, -1),
		"instance is 3":         c.Submit(good, 3),
		"could hold":            c.Submit(good, 2),
		"more than the pool":    c.SubmitSeparated(good, 2, 1),
		"are both":              c.SubmitSeparated(good, 1, 1),
		"no connector":          c.SubmitSeparated(with(func(r *Request) { r.PromptTokens = 20 }), 0, 1),
		"must be 0 to 2":        c.Fail(7),
		"instance is 8":         c.Restore(8),
		"is up":                 c.Restore(0),
	} {
		assert.ErrorIs(t, err, ErrInvalid)
		assert.ErrorContains(t, err, part)
	}
	require.NoError(t, c.Submit(good, 0))
	assert.ErrorContains(t, c.Submit(good, 1), "unfinished request")
	drain(c)
	require.NoError(t, c.Submit(good, 0), "an ended request's ID is free")
	drain(c)
	assert.Len(t, l.records, 2)
	assert.Equal(t, State{}, c.State(99))
	checkEmpty(t, c)
}

// TestConfigErrors: every number of a profile is checked, and named.
func TestConfigErrors(t *testing.T) {
	for field, change := range map[string]func(*Config){
		"Instances must":                               func(c *Config) { c.Instances = nil },
		"Listener":                                     func(c *Config) { c.Listener = nil },
		"PrefixBlockTokens is 0":                       func(c *Config) { c.PrefixBlockTokens = 0 },
		"PrefixBlockTokens is 24":                      func(c *Config) { c.PrefixBlockTokens = 24 },
		"Instances[0].StepTokens is 0":                 func(c *Config) { c.Instances[0].StepTokens = 0 },
		"Instances[0].MaxRunning is 8193":              func(c *Config) { c.Instances[0].MaxRunning = 8193 },
		"Instances[0].StepSeconds is NaN":              func(c *Config) { c.Instances[0].StepSeconds = math.NaN() },
		"Instances[0].StepSeconds is 0":                func(c *Config) { c.Instances[0].StepSeconds = 0 },
		"Instances[0].KVReadSeconds is -1":             func(c *Config) { c.Instances[0].KVReadSeconds = -1 },
		"Instances[0].KVCapacityTokens is 15":          func(c *Config) { c.Instances[0].KVCapacityTokens = 15 },
		"Instances[0].KVCapacityTokens is 10000":       func(c *Config) { c.Instances[0] = connected(c.Instances[0]); c.Instances[0].KVCapacityTokens = 10_000 },
		"Instances[0].Transfer.LoadedBytesPerSecond":   func(c *Config) { c.Instances[0].Transfer.LoadedBytesPerSecond = math.Inf(1) },
		"Instances[0].Transfer.IdleLargeBytes is 1":    func(c *Config) { c.Instances[0].Transfer.IdleLargeBytes = 1 },
		"Instances[0].PrefillQuadraticSeconds is +Inf": func(c *Config) { c.Instances[0].PrefillQuadraticSeconds = math.Inf(1) },
	} {
		config := Config{Instances: []Profile{H20()}, PrefixBlockTokens: 16, Listener: &recorder{}}
		change(&config)
		_, err := New(config)
		assert.True(t, errors.Is(err, ErrInvalid), field)
		assert.ErrorContains(t, err, field)
	}
}

// TestUnchainedIdentities: identities that break the promise cost hits, nothing else.
func TestUnchainedIdentities(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		tb := rtb{t, rt}
		c, l := newCluster(tb, 4, func() Profile { p := small(400); p.BlockTokens = 4; return p }())
		n := rapid.IntRange(1, 20).Draw(rt, "requests")
		for id := range uint64(n) {
			r := Request{
				ID: id, PromptTokens: rapid.IntRange(1, 300).Draw(rt, "prompt"), OutputTokens: rapid.IntRange(1, 100).Draw(rt, "output"),
				Blocks: rapid.SliceOfN(rapid.Uint64Range(0, 9), 0, 120).Draw(rt, "blocks"),
			}
			require.NoError(tb, c.Submit(r, 0))
			c.Run(c.Now() + rapid.SampledFrom([]float64{0, 0.01, 0.3}).Draw(rt, "gap"))
		}
		for c.Step() {
			c.instances[0].sync()
			checkInvariants(tb, c.instances[0])
		}
		require.Len(tb, l.records, n)
		checkEmpty(tb, c)
	})
}

// TestSkippingOnALongRun: the benchmark's workload, stepped and skipped.
func TestSkippingOnALongRun(t *testing.T) {
	run := func(stepwise bool) (outcome, int) {
		c, l := newCluster(t, 64, H20(), H20())
		c.stepwise = stepwise
		l.route = func(r Request) {
			if err := c.Submit(r, int(r.ID%2)); err != nil {
				t.Fatal(err)
			}
		}
		c.Feed(over(agentic(300, 64), 1))
		events := 0
		for c.Step() {
			events++
		}
		checkEmpty(t, c)
		return outcome{records: l.records, progress: l.progress, end: c.Now()}, events
	}
	slow, steps := run(true)
	fast, events := run(false)
	require.Len(t, fast.records, 300)
	requireClose(t, slow, fast)
	assert.Less(t, 3*events, steps)
}

// TestMemoryIsFlat: five times the trace leaves no more behind than the trace once.
func TestMemoryIsFlat(t *testing.T) {
	requests := agentic(400, 64)
	heap := func(times int) (uint64, *leastWork) {
		l := replay(t, 64, over(requests, times))
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc, l
	}
	once, _ := heap(2)
	more, l := heap(12)
	assert.Equal(t, 12*len(requests), l.completed)
	assert.Less(t, float64(more), float64(once)+2e6)
	runtime.KeepAlive(l.c)
	runtime.KeepAlive(requests)
}

// TestMooncake: the whole half of the trace over eight instances, everything in it completed.
func TestMooncake(t *testing.T) {
	requests := readTrace(t)
	l := replay(t, 512, over(requests, 1))
	assert.Equal(t, len(requests), l.completed)
	assert.Positive(t, l.cached)
	checkEmpty(t, l.c)
}
