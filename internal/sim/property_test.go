package sim

import (
	"fmt"
	"math"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// scenario is a random life of a small cluster: submissions, cancellations,
// failures, all at drawn times.
type scenario struct {
	profiles []Profile
	prefix   int
	actions  []action
}

type action struct {
	seconds float64
	kind    int // 0 submit, 1 submit separated, 2 cancel, 3 fail, 4 restore, 5 look
	request Request
	a, b    int
}

// drawScenario draws pools so small that queueing, preemption, eviction and stuck
// transfers happen all the time, and chains that overlap.
func drawScenario(t *rapid.T) scenario {
	s := scenario{prefix: rapid.SampledFrom([]int{4, 8, 32}).Draw(t, "prefix")}
	instances := rapid.IntRange(1, 3).Draw(t, "instances")
	capacity := rapid.SampledFrom([]int{64, 100, 100, 400, 2000}).Draw(t, "capacity")
	for range instances {
		p := H20()
		p.StepTokens = rapid.SampledFrom([]int{16, 40, 8192}).Draw(t, "budget")
		p.MaxRunning = rapid.SampledFrom([]int{1, 3, 16}).Draw(t, "running")
		p.ReserveWholePrompt = rapid.Bool().Draw(t, "whole")
		p.BlockTokens = 4
		p.KVCapacityTokens = capacity
		p.ConnectorBufferBytes = 0
		p.ConnectorLoaded = true
		p.FrontendSeconds = rapid.SampledFrom([]float64{0, 0.02}).Draw(t, "frontend")
		p.KVReadSeconds = rapid.SampledFrom([]float64{0, 1e-6}).Draw(t, "read")
		p.Transfer.LoadedOverheadSeconds = rapid.SampledFrom([]float64{0, 0.3}).Draw(t, "overhead")
		s.profiles = append(s.profiles, p)
	}
	n := rapid.IntRange(1, 60).Draw(t, "actions")
	id, now := uint64(0), 0.0
	for range n {
		now += rapid.SampledFrom([]float64{0, 0.001, 0.0137, 0.171, 1.3}).Draw(t, "gap") * rapid.Float64Range(0.5, 1).Draw(t, "share")
		a := action{
			seconds: now,
			kind:    rapid.SampledFrom([]int{0, 0, 0, 0, 0, 1, 1, 1, 2, 3, 4, 5}).Draw(t, "kind"),
			a:       rapid.IntRange(0, instances-1).Draw(t, "a"),
			b:       rapid.IntRange(0, instances-1).Draw(t, "b"),
		}
		if a.kind <= 1 {
			total := rapid.IntRange(2, capacity).Draw(t, "tokens")
			output := rapid.IntRange(1, total-1).Draw(t, "output")
			switch rapid.IntRange(0, 2).Draw(t, "shape") {
			case 0:
				output = min(output, 5)
			case 1:
				output = max(output, total/2)
			}
			a.request = Request{
				ID: id, ArrivalSeconds: now, PromptTokens: total - output, OutputTokens: output,
				Blocks: drawChain(t, total/s.prefix),
			}
			id++
		}
		if a.kind == 2 && id > 0 {
			a.request.ID = uint64(rapid.IntRange(0, int(id)-1).Draw(t, "victim"))
		}
		s.actions = append(s.actions, a)
	}
	return s
}

// drawChain draws n chained identities that follow one of three sessions up to a
// point and then one of its own branches, or none at all.
func drawChain(t *rapid.T, n int) []uint64 {
	if n == 0 || rapid.IntRange(0, 5).Draw(t, "anonymous") == 0 {
		return nil
	}
	session := uint64(rapid.IntRange(1, 3).Draw(t, "session"))
	fork := rapid.IntRange(0, n).Draw(t, "fork")
	branch := uint64(rapid.IntRange(0, 2).Draw(t, "branch"))
	blocks := make([]uint64, n)
	for i := range blocks {
		blocks[i] = session<<40 | uint64(i)
		if i >= fork && branch > 0 {
			blocks[i] |= branch<<32 | uint64(fork)<<16
		}
	}
	return blocks
}

// outcome is all that can be seen of a run.
type outcome struct {
	records  []Record
	progress []Progress
	states   []State
	end      float64
}

// play runs a scenario. Lost requests are sent again under a new identity, to the next instance that is up.
func (s scenario) play(t testing.TB, stepwise, look, check bool) outcome {
	c, l := newCluster(t, s.prefix, s.profiles...)
	c.stepwise = stepwise
	var o outcome
	submitted, again := 0, uint64(1_000_000)
	submit := func(r Request, a action) {
		var err error
		if a.kind == 1 {
			err = c.SubmitSeparated(r, a.a, a.b)
		} else {
			err = c.Submit(r, a.a)
		}
		if err == nil {
			submitted++
		}
	}
	last := 0.0
	l.told = func(p Progress) {
		require.GreaterOrEqual(t, p.Seconds, last)
		require.Equal(t, c.Now(), p.Seconds)
		last = p.Seconds
	}
	l.ended = func(r Record) {
		require.GreaterOrEqual(t, r.EndSeconds, last)
		last = r.EndSeconds
		if r.Outcome != Lost {
			return
		}
		for i := range s.profiles {
			if c.State(i).Up {
				resent := r.Request
				resent.ID = again
				again++
				submit(resent, action{kind: 0, a: i})
				return
			}
		}
	}
	for _, a := range s.actions {
		c.At(a.seconds, func() {
			switch a.kind {
			case 0, 1:
				submit(a.request, a)
			case 2:
				c.Cancel(a.request.ID)
			case 3:
				if c.State(a.a).Up {
					require.NoError(t, c.Fail(a.a))
				}
			case 4:
				if !c.State(a.a).Up {
					require.NoError(t, c.Restore(a.a))
				}
			case 5:
				o.states = append(o.states, c.State(a.a))
			}
		})
	}
	for c.Step() {
		if look {
			for i := range s.profiles {
				c.State(i)
			}
		}
		if check {
			for _, in := range c.instances {
				in.sync()
				checkInvariants(t, in)
				checkPrefixes(t, in)
			}
		}
	}
	checkEmpty(t, c)
	require.Len(t, l.records, submitted, "every submitted request ends once")
	o.records, o.progress, o.end = l.records, l.progress, c.Now()
	return o
}

// checkPrefixes states that bisection finds what walking would.
func checkPrefixes(t testing.TB, in *instance) {
	for _, r := range in.members {
		walked := 0
		for _, hash := range r.blocks {
			if _, ok := in.pool.index[hash]; !ok {
				break
			}
			walked++
		}
		for _, hint := range []int{0, walked, len(r.blocks), len(r.blocks) / 2} {
			require.Equal(t, walked, in.pool.prefix(r.blocks, hint))
		}
	}
}

// TestConservation: whatever happens, each request ends exactly once, with the right number of tokens; blocks add
// up after every event; nothing is held in the end; time does not go back.
func TestConservation(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		s := drawScenario(rt)
		o := s.play(rtb{t, rt}, false, false, true)
		for _, r := range o.records {
			checkRecord(rtb{t, rt}, r)
		}
	})
}

func checkRecord(t testing.TB, r Record) {
	q := r.Request
	require.LessOrEqual(t, q.ArrivalSeconds, r.DispatchSeconds)
	require.LessOrEqual(t, r.DispatchSeconds, r.EndSeconds)
	require.GreaterOrEqual(t, r.GeneratedTokens, 0)
	require.LessOrEqual(t, r.GeneratedTokens, q.OutputTokens)
	require.Less(t, r.CachedTokens, q.PromptTokens)
	if r.GeneratedTokens > 0 {
		require.Less(t, r.DispatchSeconds, r.FirstTokenSeconds)
		require.LessOrEqual(t, r.FirstTokenSeconds, r.EndSeconds)
	} else {
		require.Zero(t, r.FirstTokenSeconds)
	}
	switch r.Outcome {
	case Completed:
		require.Equal(t, q.OutputTokens, r.GeneratedTokens)
		if r.PrefillInstance == NoInstance && r.Preemptions == 0 {
			require.Equal(t, q.PromptTokens, r.PrefilledTokens+r.CachedTokens)
		}
	case Cancelled, Lost:
	default:
		require.Fail(t, "no outcome")
	}
}

// TestSkippingEqualsStepping: the same life with every step an event of its own
// gives the same records and the same sights, times to 1e-9.
func TestSkippingEqualsStepping(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		s := drawScenario(rt)
		fast, slow := s.play(rtb{t, rt}, false, false, false), s.play(rtb{t, rt}, true, false, false)
		requireClose(rtb{t, rt}, slow, fast)
	})
}

// TestLookingChangesNothing: reading the state at every event leaves the bits as they are.
func TestLookingChangesNothing(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		s := drawScenario(rt)
		require.Equal(rtb{t, rt}, s.play(rtb{t, rt}, false, false, false), s.play(rtb{t, rt}, false, true, false))
	})
}

func requireClose(t testing.TB, want, got outcome) {
	near := func(a, b float64) bool { return math.Abs(a-b) <= 1e-9*math.Max(1, math.Abs(a)) }
	require.Len(t, got.records, len(want.records))
	for i, w := range want.records {
		g := got.records[i]
		for _, pair := range [][2]float64{
			{w.DispatchSeconds, g.DispatchSeconds}, {w.FirstTokenSeconds, g.FirstTokenSeconds},
			{w.EndSeconds, g.EndSeconds}, {w.TransferSeconds, g.TransferSeconds},
		} {
			require.True(t, near(pair[0], pair[1]), "record %d: %+v, stepping %+v", i, g, w)
		}
		g.DispatchSeconds, g.FirstTokenSeconds, g.EndSeconds, g.TransferSeconds = w.DispatchSeconds, w.FirstTokenSeconds, w.EndSeconds, w.TransferSeconds
		require.Equal(t, w, g)
	}
	require.Len(t, got.progress, len(want.progress))
	for i, w := range want.progress {
		g := got.progress[i]
		require.True(t, near(w.Seconds, g.Seconds))
		g.Seconds = w.Seconds
		require.Equal(t, w, g)
	}
	require.Len(t, got.states, len(want.states))
	for i, w := range want.states {
		g := got.states[i]
		require.True(t, near(w.UptimeSeconds, g.UptimeSeconds))
		g.UptimeSeconds = w.UptimeSeconds
		require.Equal(t, w, g)
	}
	require.True(t, near(want.end, got.end))
}

// rtb lets testify fail a rapid check, so that it shrinks.
type rtb struct {
	testing.TB
	rt *rapid.T
}

func (t rtb) Helper()                           { t.rt.Helper() }
func (t rtb) Errorf(format string, args ...any) { t.rt.Errorf(format, args...) }
func (t rtb) FailNow()                          { t.rt.FailNow() }
func (t rtb) Fatalf(format string, args ...any) { t.rt.Fatalf(format, args...) }
func (t rtb) Name() string                      { return fmt.Sprint(t.rt.Name()) }
