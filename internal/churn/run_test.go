package churn

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/kvpolicy/kvpolicy"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"gonum.org/v1/gonum/stat"
	"gonum.org/v1/gonum/stat/distuv"
	"pgregory.net/rapid"
)

func strategies() []Strategy {
	return []Strategy{Random(), ReactiveFastest(), HazardAware(), HazardAwareKnowing(), HazardAwareOverlap(4), Oracle()}
}

// eager moves whenever any risk is removed.
func eager(s Strategy) Strategy {
	s.Policy.Migration.HysteresisSeconds = 0
	s.Policy.Migration.MaxSlowdownSeconds = 1e9
	s.Policy.Migration.MinRemainingSeconds = 0
	return s
}

// always is a node that is up from long before the first request.
func always(name string, decode, prefill float64) Node {
	return Node{Name: name, DecodeRate: decode, PrefillRate: prefill, Bandwidth: 1e6, KVCapacityTokens: 100_000,
		Sessions: []Session{{StartSeconds: -1000, EndSeconds: 1e9, Failed: true}}}
}

func until(n Node, ends ...float64) Node {
	n.Sessions = nil
	for k := 0; k < len(ends); k++ {
		start := -1000.0
		if k > 0 {
			start = ends[k]
			k++
		}
		n.Sessions = append(n.Sessions, Session{StartSeconds: start, EndSeconds: ends[k], Failed: true})
	}
	return n
}

// play steps through a scenario and looks at everything after each event.
func play(t require.TestingT, s *Scenario, strategy Strategy, options Options) (Result, []happening) {
	var happenings []happening
	r := &run{observe: func(h happening) { happenings = append(happenings, h) }}
	require.NoError(t, r.begin(s, &strategy, &options))
	last := 0.0
	for {
		more, err := r.step()
		require.NoError(t, err)
		if !more {
			return r.finish(), happenings
		}
		require.GreaterOrEqual(t, r.now, last, "time goes forward")
		last = r.now
		requireConsistent(t, r)
	}
}

// requireConsistent demands that each request is in exactly one place, and that
// nodes that are down hold none.
func requireConsistent(t require.TestingT, r *run) {
	places := map[*request]int{}
	for _, e := range r.agenda.events {
		if e.kind == placement {
			places[e.request]++
		}
	}
	for _, q := range r.backlog {
		places[q]++
	}
	for _, h := range r.handOffs {
		require.False(t, h.over)
		require.Same(t, h, h.request.moving)
		if h.stopped {
			places[h.request]++
		} else {
			require.NotNil(t, h.request.stay, "it decodes on")
			require.Same(t, h.from, h.request.stay.node)
		}
	}
	for _, n := range r.nodes {
		stays := slices.Clone(n.line)
		if n.serving != nil {
			stays = append(stays, n.serving)
		} else if n.up {
			require.Empty(t, n.line, "%s is idle while requests wait", n.Name)
		}
		if !n.up {
			require.Empty(t, stays, "%s is down", n.Name)
		}
		for _, s := range stays {
			require.False(t, s.left)
			require.Same(t, n, s.node)
			if s.fill == nil {
				require.Same(t, s, s.request.stay)
				places[s.request]++
			} else {
				require.Same(t, s.request.moving, s.fill)
			}
		}
	}
	for _, q := range r.requests {
		want := 1
		if q.over {
			want = 0
		}
		require.Equal(t, want, places[q], "%s at %v", q.name, r.now)
	}
}

// drawn is a small scenario with ties, coincidences and short-lived nodes.
func drawn(t *rapid.T) Scenario {
	horizon := 600.0
	s := Scenario{Seed: rapid.Uint64().Draw(t, "seed"), HorizonSeconds: horizon}
	grid := rapid.SampledFrom([]float64{0, 1, 10, 60}).Draw(t, "grid") // coarse times coincide
	snap := func(x float64) float64 {
		if grid == 0 {
			return x
		}
		return math.Floor(x/grid) * grid
	}
	for i := range rapid.IntRange(1, 5).Draw(t, "nodes") {
		n := Node{
			Name:             fmt.Sprintf("n%d", i),
			Group:            rapid.SampledFrom([]string{"", "a", "b"}).Draw(t, "group"),
			DecodeRate:       rapid.SampledFrom([]float64{1, 10, 50}).Draw(t, "decode"),
			PrefillRate:      rapid.SampledFrom([]float64{5, 100, 2000}).Draw(t, "prefill"),
			Bandwidth:        rapid.SampledFrom([]float64{1e5, 1e8, 1e11}).Draw(t, "bandwidth"),
			KVCapacityTokens: rapid.SampledFrom([]int64{2, 300, 5000}).Draw(t, "capacity"),
		}
		at := snap(rapid.Float64Range(-500, 300).Draw(t, "first"))
		for at < horizon {
			end := at + snap(rapid.Float64Range(0, 400).Draw(t, "session"))
			n.Sessions = append(n.Sessions, Session{StartSeconds: at, EndSeconds: end, Failed: rapid.Bool().Draw(t, "failed"),
				AgeUnknown: rapid.IntRange(0, 9).Draw(t, "age unknown") == 0})
			at = end + snap(rapid.Float64Range(0, 200).Draw(t, "gap")) + 1
		}
		s.Nodes = append(s.Nodes, n)
	}
	longest := int64(0)
	for i := range s.Nodes {
		longest = max(longest, s.Nodes[i].KVCapacityTokens)
	}
	at := 0.0
	for range rapid.IntRange(0, 15).Draw(t, "requests") {
		at = min(horizon, at+snap(rapid.Float64Range(0, 60).Draw(t, "pause")))
		prompt := rapid.Int64Range(1, longest-1).Draw(t, "prompt")
		s.Requests = append(s.Requests, Request{ArrivalSeconds: at, PromptTokens: prompt,
			OutputTokens:   rapid.Int64Range(1, longest-prompt).Draw(t, "output"),
			EstimateTokens: rapid.Int64Range(1, longest-prompt).Draw(t, "estimate")})
	}
	return s
}

func TestEveryRequestIsSomewhereAndEndsOnce(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := drawn(t)
		strategy := rapid.SampledFrom(append(strategies(), eager(HazardAware()), eager(HazardAwareOverlap(1)), eager(HazardAwareOverlap(4)))).Draw(t, "strategy")
		options := DefaultOptions()
		options.CheckSeconds = rapid.SampledFrom([]float64{0.5, 10}).Draw(t, "check")
		options.MinSessions = rapid.IntRange(0, 3).Draw(t, "min sessions")
		options.StallPenaltySeconds = rapid.SampledFrom([]float64{0, 2, 100}).Draw(t, "stall")
		options.Transfer.KVBytesPerToken = rapid.SampledFrom([]float64{0, 1e3, 1e5}).Draw(t, "bytes")
		result, happenings := play(t, &s, strategy, options)

		type counts struct{ placed, lost, overflows, moves, finishes int }
		seen := map[string]*counts{}
		for i := range s.Requests {
			seen[fmt.Sprintf("request-%d", i)] = &counts{}
		}
		up := map[string]bool{}
		for _, h := range happenings {
			if h.request == nil {
				up[h.node.Name] = h.what == "begins"
				continue
			}
			c := seen[h.request.name]
			require.Zero(t, c.finishes, "nothing happens to a request that has finished: %s", h.what)
			switch h.what {
			case "placed":
				if h.node != nil {
					require.True(t, up[h.node.Name], "placed on a node that is down")
				}
				c.placed++
			case "served":
				require.True(t, up[h.node.Name], "served by a node that is down")
			case "lost":
				c.lost++
			case "overflows":
				c.overflows++
			case "moves":
				c.moves++
			case "finishes":
				c.finishes++
			}
		}
		require.Equal(t, len(s.Requests), result.Requests)
		require.Len(t, result.Outcomes, len(s.Requests))
		completed, losses, moves, overflows := 0, 0, 0, 0
		for i, o := range result.Outcomes {
			c := seen[fmt.Sprintf("request-%d", i)]
			require.Equal(t, o.Completed, c.finishes == 1)
			require.Equal(t, o.Losses, c.lost)
			require.Equal(t, o.Moves, c.moves)
			require.GreaterOrEqual(t, o.LatencySeconds, 0.0)
			if strategy.Policy.Migration.Enabled {
				require.LessOrEqual(t, int64(o.Moves), strategy.Policy.Migration.MaxHops)
			}
			completed, losses, moves, overflows = completed+c.finishes, losses+o.Losses, moves+o.Moves, overflows+c.overflows
		}
		require.Equal(t, completed, result.Completed)
		require.Equal(t, losses, result.UnplannedLosses)
		require.Equal(t, moves, result.PlannedMoves)
		require.Equal(t, overflows, result.Overflows)
		require.LessOrEqual(t, result.LostWaiting, losses)
		require.LessOrEqual(t, result.OvertakenMoves, moves)
		require.GreaterOrEqual(t, result.WastedSeconds, 0.0)
		if strategy.Knowledge == KnowsEnds {
			require.Zero(t, losses, "the oracle leaves in time")
		}

		again, err := Run(&s, strategy, options)
		require.NoError(t, err)
		require.Equal(t, result, again, "bit for bit")
	})
}

func TestAllStrategiesSeeTheSame(t *testing.T) {
	fleet := Fleet{Name: "small", Groups: []Group{{Laptop(), 6}, {Spot(), 3}}}
	s, err := fleet.Draw(3, 0.2, 3600, 7200)
	require.NoError(t, err)
	type seen struct {
		seconds float64
		what    string
		node    string
	}
	var first []seen
	for _, strategy := range strategies() {
		var churn []seen
		arrived := map[string]bool{}
		r := &run{observe: func(h happening) {
			if h.request == nil {
				churn = append(churn, seen{h.seconds, h.what, h.node.Name})
			} else if !arrived[h.request.name] {
				arrived[h.request.name] = true
				churn = append(churn, seen{h.seconds, "arrives", h.request.name})
			}
		}}
		options := DefaultOptions()
		_, err := r.play(&s, &strategy, &options)
		require.NoError(t, err)
		if first == nil {
			first = churn
			require.Greater(t, len(first), len(s.Requests)+20, "there is churn")
		}
		assert.Equal(t, first, churn, strategy.Name)
	}
}

func TestSeedsDrawAlike(t *testing.T) {
	draw := func(seed uint64, rate, warmup float64) Scenario {
		s, err := Mixed().Draw(seed, rate, 3600, warmup)
		require.NoError(t, err)
		return s
	}
	assert.Equal(t, draw(1, 0.6, 3600), draw(1, 0.6, 3600))
	assert.Equal(t, draw(1, 0.6, 3600).Nodes, draw(1, 0.1, 3600).Nodes, "churn does not depend on the demand")
	assert.Equal(t, draw(1, 0.6, 3600).Requests, draw(1, 0.6, 60).Requests, "nor the demand on the churn")
	assert.NotEqual(t, draw(1, 0.6, 3600).Requests, draw(2, 0.6, 3600).Requests)
	assert.NotEqual(t, draw(1, 0.6, 3600).Nodes, draw(2, 0.6, 3600).Nodes)
}

// What is drawn has the published laws.
func TestDrawsFollowTheirLaws(t *testing.T) {
	fleet := Fleet{Name: "large"}
	for _, group := range Mixed().Groups {
		fleet.Groups = append(fleet.Groups, Group{group.Kind, 300})
	}
	s, err := fleet.Draw(5, 0.5, 40_000, 100_000)
	require.NoError(t, err)
	near := func(want, deviation float64, values []float64) {
		t.Helper()
		assert.InDelta(t, want, stat.Mean(values, nil), 5*deviation/math.Sqrt(float64(len(values))))
		assert.InEpsilon(t, deviation, stat.StdDev(values, nil), 0.15)
	}
	uniform := 1 / math.Sqrt(12)
	published := map[string]struct{ decode, prefill, bandwidth, capacity, scale, shape, gap float64 }{
		"laptop": {12, 150, 4e6, 16000, 600, 0.6, 600},
		"spot":   {40, 900, 4e7, 64000, 2400, 3, 300},
		"server": {60, 1500, 1e8, 128000, 28800, 1.5, 120},
	}
	rates, scales, ages, gaps := map[string][]float64{}, map[string][]float64{}, map[string][]float64{}, map[string][]float64{}
	for _, n := range s.Nodes {
		p := published[n.Group]
		factor := n.DecodeRate / p.decode
		assert.True(t, factor >= 0.7 && factor <= 1.3)
		assert.InEpsilon(t, factor, n.PrefillRate/p.prefill, 1e-12)
		assert.InEpsilon(t, factor, n.Bandwidth/p.bandwidth, 1e-12)
		assert.Equal(t, p.capacity, float64(n.KVCapacityTokens))
		rates[n.Group] = append(rates[n.Group], factor)
		law := n.Law.(distuv.Weibull)
		assert.Equal(t, p.shape, law.K)
		assert.True(t, law.Lambda >= 0.6*p.scale && law.Lambda <= 1.4*p.scale)
		scales[n.Group] = append(scales[n.Group], law.Lambda/p.scale)
		assert.Equal(t, -100_000.0, n.Sessions[0].StartSeconds)
		for k, session := range n.Sessions {
			if k < 4 { // not the many of those whose sessions are short
				ages[n.Group] = append(ages[n.Group], law.Survival(session.EndSeconds-session.StartSeconds))
				if k > 0 {
					gaps[n.Group] = append(gaps[n.Group], session.StartSeconds-n.Sessions[k-1].EndSeconds)
				}
			}
		}
	}
	for group, p := range published {
		near(1, 0.6*uniform, rates[group])
		near(1, 0.8*uniform, scales[group])
		near(0.5, uniform, ages[group])
		near(p.gap, p.gap, gaps[group])
	}
	var pauses, prompts, outputs, noises []float64
	last := 0.0
	for _, q := range s.Requests {
		pauses, last = append(pauses, q.ArrivalSeconds-last), q.ArrivalSeconds
		prompts = append(prompts, math.Log(float64(q.PromptTokens)))
		outputs = append(outputs, math.Log(float64(q.OutputTokens)))
		noises = append(noises, math.Log(float64(q.EstimateTokens)/float64(q.OutputTokens)))
	}
	near(2, 2, pauses)
	near(6, 0.8, prompts)
	near(6.3, 1, outputs)
	near(0, 0.4, noises)
}

// Without churn, one node is a queue: whoever comes starts when the one before
// has left, by Lindley's recursion.
func TestOneNodeIsAQueue(t *testing.T) {
	s := Scenario{Seed: 1, HorizonSeconds: 1e6, Nodes: []Node{always("a", 20, 500)}}
	s.HorizonSeconds = 5000
	s.drawRequests(0.01)
	s.HorizonSeconds = 50_000
	require.Greater(t, len(s.Requests), 30)
	var latencies []float64
	free, waited := 0.0, 0
	for _, q := range s.Requests {
		if free > q.ArrivalSeconds {
			waited++
		}
		free = max(free, q.ArrivalSeconds) + float64(q.PromptTokens)/500 + float64(q.OutputTokens)/20
		latencies = append(latencies, free-q.ArrivalSeconds)
	}
	require.NotZero(t, waited)
	for _, strategy := range strategies() {
		result, err := Run(&s, strategy, DefaultOptions())
		require.NoError(t, err)
		require.Equal(t, len(s.Requests), result.Completed)
		for i, o := range result.Outcomes {
			assert.InEpsilon(t, latencies[i], o.LatencySeconds, 1e-9)
		}
		assert.Zero(t, result.WastedSeconds)
		assert.Zero(t, result.UnplannedLosses+result.PlannedMoves+result.Overflows)
	}
}

func latency(t *testing.T, s Scenario, strategy Strategy, options Options) (Result, float64) {
	t.Helper()
	result, _ := play(t, &s, strategy, options)
	require.True(t, result.Outcomes[0].Completed)
	return result, result.Outcomes[0].LatencySeconds
}

func TestALossInNumbers(t *testing.T) {
	// 1,000 tokens at 500/s, then 25/s until the node ends after 42 s: 1,000
	// tokens more. Two seconds' stall, 0.2 s overhead, 2,000 tokens at 100/s,
	// and the other 1,000 at 10/s.
	s := Scenario{HorizonSeconds: 1000,
		Nodes:    []Node{until(always("fast", 25, 500), 42), always("slow", 10, 100)},
		Requests: []Request{{PromptTokens: 1000, OutputTokens: 2000, EstimateTokens: 2000}}}
	result, seconds := latency(t, s, ReactiveFastest(), DefaultOptions())
	assert.InDelta(t, 42+2+0.2+20+100, seconds, 1e-9)
	assert.InDelta(t, 2+0.2+20, result.WastedSeconds, 1e-9)
	assert.Equal(t, 1, result.UnplannedLosses)
	assert.Zero(t, result.LostWaiting)
	assert.InDelta(t, 2.0, result.GoodputTokensPerSecond, 1e-9)

	// The oracle leaves when the node does, and does not stall; were the other
	// node slower still, it would do the same.
	result, seconds = latency(t, s, Oracle(), DefaultOptions())
	assert.InDelta(t, 42+0.2+20+100, seconds, 1e-9)
	assert.Equal(t, 1, result.PlannedMoves)
	assert.Zero(t, result.UnplannedLosses)

	// Lost half-way through its prefill: only that half is prefilled again.
	s.Nodes[0] = until(always("fast", 25, 500), 1)
	result, seconds = latency(t, s, ReactiveFastest(), DefaultOptions())
	assert.InDelta(t, 1+2+0.2+10+200, seconds, 1e-9)
	assert.InDelta(t, 2+0.2+5, result.WastedSeconds, 1e-9)

	// Nobody else is there: it waits for the node to come back.
	s.Nodes = []Node{until(always("fast", 25, 500), 42, 142, 1e6)}
	_, seconds = latency(t, s, ReactiveFastest(), DefaultOptions())
	assert.InDelta(t, 142+0.2+4+40, seconds, 1e-9)

	// It waits its turn, and the node ends: it stalls, with nothing to redo.
	s.Nodes = []Node{until(always("only", 10, 100), 15, 20, 1e6)}
	s.Requests = []Request{{PromptTokens: 100, OutputTokens: 100, EstimateTokens: 100}, {PromptTokens: 100, OutputTokens: 100, EstimateTokens: 100}}
	s.Nodes[0] = until(always("only", 10, 100), 10, 20, 1e6)
	result, _ = play(t, &s, ReactiveFastest(), DefaultOptions())
	assert.Equal(t, 2, result.UnplannedLosses)
	assert.Equal(t, 1, result.LostWaiting)
	// 90 of 100 tokens were made; the other's turn comes when those 10 are.
	assert.InDelta(t, 20+0.2+1.9+1, result.Outcomes[0].LatencySeconds, 1e-9)
	assert.InDelta(t, 20+0.2+1.9+1+11, result.Outcomes[1].LatencySeconds, 1e-9)
}

func TestAnOverflowGoesWhereThereIsRoom(t *testing.T) {
	s := Scenario{HorizonSeconds: 1000,
		Nodes:    []Node{always("small", 50, 1000), always("large", 10, 100)},
		Requests: []Request{{PromptTokens: 1000, OutputTokens: 500, EstimateTokens: 100}}}
	s.Nodes[0].KVCapacityTokens = 1200
	result, seconds := latency(t, s, ReactiveFastest(), DefaultOptions())
	assert.Equal(t, 1, result.Overflows)
	assert.Zero(t, result.UnplannedLosses)
	assert.InDelta(t, 1+4+2+0.2+12+30, seconds, 1e-9)
}

// moved plays a scenario in which the first request is moved from the first
// node to the second at a given time.
func moved(t *testing.T, s Scenario, strategy Strategy, at float64, method kvpolicy.Method) (Result, []happening) {
	t.Helper()
	var happenings []happening
	options := DefaultOptions()
	options.CheckSeconds = 1e6
	r := &run{observe: func(h happening) { happenings = append(happenings, h) }}
	require.NoError(t, r.begin(&s, &strategy, &options))
	done := false
	for {
		if next := r.agenda.events; !done && (len(next) == 0 || next[0].seconds >= at) {
			r.now, done = at, true
			r.move(r.nodes[0].serving, r.nodes[1], method)
			requireConsistent(t, r)
		}
		more, err := r.step()
		require.NoError(t, err)
		if !more {
			break
		}
		requireConsistent(t, r)
	}
	return r.finish(), happenings
}

func movingScenario(first, second Node) Scenario {
	return Scenario{HorizonSeconds: 1000, Nodes: []Node{first, second},
		Requests: []Request{{PromptTokens: 1000, OutputTokens: 2000, EstimateTokens: 2000}}}
}

func TestMovesInNumbers(t *testing.T) {
	// A request that has 500 of 2,000 tokens after 22 s, on 1,500 of context.
	fast, slow := always("fast", 25, 500), always("slow", 20, 100)
	fast.Bandwidth, slow.Bandwidth = 131072*50, 131072*1000 // 50 tokens/s

	t.Run("stop and recompute", func(t *testing.T) {
		result, _ := moved(t, movingScenario(fast, slow), HazardAware(), 22, kvpolicy.Recompute)
		assert.InDelta(t, 22+0.2+15+75, result.Outcomes[0].LatencySeconds, 1e-9)
		assert.InDelta(t, 0.2+15, result.WastedSeconds, 1e-9)
	})
	t.Run("stop and transfer", func(t *testing.T) {
		result, _ := moved(t, movingScenario(fast, slow), HazardAware(), 22, kvpolicy.Transfer)
		assert.InDelta(t, 22+0.5+30+75, result.Outcomes[0].LatencySeconds, 1e-9)
		assert.InDelta(t, 0.5+30, result.WastedSeconds, 1e-9)
	})
	t.Run("overlapped recompute", func(t *testing.T) {
		// Rounds of 15.2 s, a quarter of it (rho = 25/100), and a sixteenth.
		overlap, stall := 15.2+15.2/4, 15.2/16
		result, happenings := moved(t, movingScenario(fast, slow), HazardAwareOverlap(2), 22, kvpolicy.Recompute)
		left := 1500 - math.Floor(25*overlap)
		assert.InDelta(t, 22+overlap+stall+left/20, result.Outcomes[0].LatencySeconds, 1e-9)
		assert.InDelta(t, overlap+stall, result.WastedSeconds, 1e-9)
		assert.Equal(t, "finishes", happenings[len(happenings)-1].what)
		assert.Equal(t, "slow", happenings[len(happenings)-1].node.Name)
	})
	t.Run("overlapped transfer", func(t *testing.T) {
		// rho = 25/50; the first round has the overhead.
		overlap, stall := 30.5*(1+0.5+0.25), 30.5/8
		result, _ := moved(t, movingScenario(fast, slow), HazardAwareOverlap(3), 22, kvpolicy.Transfer)
		left := 1500 - math.Floor(25*overlap)
		assert.InDelta(t, 22+overlap+stall+left/20, result.Outcomes[0].LatencySeconds, 1e-9)
		assert.InDelta(t, stall, result.WastedSeconds, 1e-9)
	})
	t.Run("rounds that would not become shorter", func(t *testing.T) {
		slower := fast
		slower.Bandwidth = 131072 * 25
		result, _ := moved(t, movingScenario(slower, slow), HazardAwareOverlap(3), 22, kvpolicy.Transfer)
		assert.InDelta(t, 22+0.5+60+75, result.Outcomes[0].LatencySeconds, 1e-9)
	})
	t.Run("the stall is the decision's", func(t *testing.T) {
		for _, rounds := range []int{0, 1, 2, 4, 64} {
			policy := kvpolicy.HazardAware()
			policy.Transfer = DefaultOptions().Transfer
			policy.Migration.OverlapRounds, policy.Migration.HysteresisSeconds = rounds, 0
			snapshot := kvpolicy.Snapshot{
				Request: kvpolicy.Request{ID: "r", ContextTokens: 1500, RemainingTokens: 1500, RunningOn: "fast"},
				Instances: []kvpolicy.Instance{
					{ID: "fast", DecodeRate: 25, PrefillRate: 500, Bandwidth: fast.Bandwidth, Curve: knownEnd(1e9)},
					{ID: "slow", DecodeRate: 20, PrefillRate: 100, Bandwidth: slow.Bandwidth, Curve: knownEnd(1e9)}},
			}
			d, err := policy.Decide(snapshot)
			require.NoError(t, err)
			result, _ := moved(t, movingScenario(fast, slow), HazardAwareOverlap(rounds), 22, d.Candidate.Method)
			// The whole time on the fast node would be 82 s; a token less or more
			// is what whole tokens make of it.
			assert.InDelta(t, d.Candidate.DeltaTSeconds, result.Outcomes[0].LatencySeconds-82, 1.0/20+1e-9, "%d rounds", rounds)
		}
	})
}

// KV that comes over a link has to find room, and to keep it.
func TestRoomForMovedKV(t *testing.T) {
	for capacity, want := range map[int64]float64{
		3000: 85 + 15.2 + 75, // no room beside 1,850 tokens: it is computed again in its turn
		3400: 85 + 15.2 + 75, // room beside 1,850, but not beside 2,500
		4000: 85 + 75,
	} {
		fast, slow := always("fast", 25, 500), always("slow", 20, 100)
		fast.Bandwidth, slow.Bandwidth, slow.KVCapacityTokens = 131072*50, 131072*1000, capacity
		s := movingScenario(fast, slow)
		s.Requests = append(s.Requests, Request{PromptTokens: 1000, OutputTokens: 1500, EstimateTokens: 1500})
		result, _ := moved(t, s, HazardAware(), 22, kvpolicy.Transfer)
		assert.InDelta(t, 85, result.Outcomes[1].LatencySeconds, 1e-9)
		assert.InDelta(t, want, result.Outcomes[0].LatencySeconds, 1e-9, "%d tokens", capacity)
	}
}

// What a router is told of a fleet whose state is known.
func TestWhatARouterSees(t *testing.T) {
	fast, slow := always("fast", 25, 500), always("slow", 20, 100)
	fast.Bandwidth, slow.Bandwidth = 131072*50, 131072*1000
	down := until(always("down", 1, 1), -5)
	s := movingScenario(fast, slow)
	s.Nodes = append(s.Nodes, down)
	s.Requests = append(s.Requests,
		Request{PromptTokens: 1000, OutputTokens: 1500, EstimateTokens: 1400},
		Request{ArrivalSeconds: 1, PromptTokens: 5000, OutputTokens: 100, EstimateTokens: 200})
	strategy, options := ReactiveFastest(), DefaultOptions()
	r := &run{}
	require.NoError(t, r.begin(&s, &strategy, &options))
	for r.agenda.events[0].seconds < 22 {
		_, err := r.step()
		require.NoError(t, err)
	}
	r.now = 22
	r.move(r.nodes[0].serving, r.nodes[1], kvpolicy.Transfer)
	r.now = 30
	q := &request{Request: &Request{PromptTokens: 7, EstimateTokens: 9}, name: "new", hops: 2}
	r.view(q, 3, nil)
	assert.Equal(t, kvpolicy.Request{ID: "new", ContextTokens: 10, RemainingTokens: 6, Hops: 2}, r.snapshot.Request)
	require.Len(t, r.snapshot.Instances, 2, "a node that is down is not there")
	// On the fast node the third request's turn came at 22 s: 8 of 10 s of
	// prefill are over, and 200 tokens are thought to follow.
	assert.Equal(t, kvpolicy.Instance{ID: "fast", Requests: 1, WaitSeconds: 2 + 200./25, PrefillRate: 500, DecodeRate: 25,
		Bandwidth: fast.Bandwidth, KVCapacityTokens: 100_000, KVUsedTokens: 5000, UptimeSeconds: 1030}, r.snapshot.Instances[0])
	// The slow one has made 400 tokens of 1,400, and is sent a request with
	// 1,500 to come.
	assert.Equal(t, kvpolicy.Instance{ID: "slow", Requests: 1, WaitSeconds: 1000./20 + 1500./20, PrefillRate: 100, DecodeRate: 20,
		Bandwidth: slow.Bandwidth, KVCapacityTokens: 100_000, KVUsedTokens: 1400, UptimeSeconds: 1030}, r.snapshot.Instances[1])

	r.view(r.requests[1], 400, r.nodes[1])
	assert.Equal(t, "slow", r.snapshot.Request.RunningOn)
	assert.Zero(t, r.snapshot.Instances[1].KVUsedTokens, "without the request itself")
	assert.Zero(t, r.snapshot.Instances[1].WaitSeconds)
	assert.Zero(t, r.snapshot.Instances[1].Requests)

	for knowledge, want := range map[Knowledge]kvpolicy.Curve{KnowsNothing: nil, KnowsLaws: knownEnd(7), KnowsEnds: knownEnd(1e9 + 1000)} {
		for i := range s.Nodes {
			s.Nodes[i].Law = knownEnd(7)
		}
		strategy.Knowledge = knowledge
		r.view(q, 3, nil)
		assert.Equal(t, want, r.snapshot.Instances[0].Curve)
	}

	q.lost = true
	r.view(q, 20, nil)
	assert.Equal(t, lostName, r.snapshot.Request.RunningOn)
	assert.Equal(t, int64(1), r.snapshot.Request.RemainingTokens, "more has come than was thought")
}

func TestMovesOvertaken(t *testing.T) {
	fast, slow := always("fast", 25, 500), always("slow", 20, 100)
	fast.Bandwidth, slow.Bandwidth = 131072*50, 131072*1000

	t.Run("the source ends during a transfer", func(t *testing.T) {
		result, _ := moved(t, movingScenario(until(fast, 32), slow), HazardAware(), 22, kvpolicy.Transfer)
		assert.Equal(t, 1, result.UnplannedLosses)
		assert.Equal(t, 1, result.OvertakenMoves)
		assert.InDelta(t, 32+2+0.2+15+75, result.Outcomes[0].LatencySeconds, 1e-9)
		assert.InDelta(t, 10+2+0.2+15, result.WastedSeconds, 1e-9)
	})
	t.Run("the destination ends during a transfer", func(t *testing.T) {
		result, _ := moved(t, movingScenario(fast, until(slow, 32)), HazardAware(), 22, kvpolicy.Transfer)
		assert.Zero(t, result.UnplannedLosses)
		assert.Equal(t, 1, result.OvertakenMoves)
		assert.InDelta(t, 32+60, result.Outcomes[0].LatencySeconds, 1e-9, "it goes on where its KV is")
		assert.InDelta(t, 10, result.WastedSeconds, 1e-9)
	})
	t.Run("it goes back before those who wait", func(t *testing.T) {
		slow := always("slow", 0.1, 100) // takes none of its own
		s := movingScenario(fast, until(slow, 32))
		for range 2 {
			s.Requests = append(s.Requests, Request{ArrivalSeconds: 1, PromptTokens: 500, OutputTokens: 500, EstimateTokens: 500})
		}
		result, _ := moved(t, s, HazardAware(), 22, kvpolicy.Transfer)
		assert.InDelta(t, 22+21-1, result.Outcomes[1].LatencySeconds, 1e-9)
		assert.InDelta(t, 22+21+60, result.Outcomes[0].LatencySeconds, 1e-9)
		assert.InDelta(t, 22+21+60+21-1, result.Outcomes[2].LatencySeconds, 1e-9)
	})
	t.Run("the source ends during the overlap", func(t *testing.T) {
		// 250 tokens more by then, and the copy is worth nothing.
		result, _ := moved(t, movingScenario(until(fast, 32), slow), HazardAwareOverlap(2), 22, kvpolicy.Recompute)
		assert.Equal(t, 1, result.UnplannedLosses)
		assert.InDelta(t, 32+2+0.2+17.5+62.5, result.Outcomes[0].LatencySeconds, 1e-9)
		assert.InDelta(t, 10+2+0.2+17.5, result.WastedSeconds, 1e-9)
	})
	t.Run("the destination ends during the overlap", func(t *testing.T) {
		result, _ := moved(t, movingScenario(fast, until(slow, 32)), HazardAwareOverlap(2), 22, kvpolicy.Recompute)
		assert.Zero(t, result.UnplannedLosses)
		assert.InDelta(t, 82, result.Outcomes[0].LatencySeconds, 1e-9)
		assert.InDelta(t, 10, result.WastedSeconds, 1e-9)
	})
	t.Run("the destination ends after a recompute began", func(t *testing.T) {
		// The source has let go of it: a loss, 900 of 1,500 tokens prefilled.
		result, _ := moved(t, movingScenario(fast, until(slow, 32)), HazardAware(), 22, kvpolicy.Recompute)
		assert.Equal(t, 1, result.UnplannedLosses)
		assert.InDelta(t, 32+2+0.2+3+60, result.Outcomes[0].LatencySeconds, 1e-9)
	})
	t.Run("the request finishes first", func(t *testing.T) {
		s := movingScenario(fast, slow)
		s.Requests[0].OutputTokens = 600
		result, _ := moved(t, s, HazardAwareOverlap(2), 22, kvpolicy.Recompute)
		assert.InDelta(t, 26, result.Outcomes[0].LatencySeconds, 1e-9)
		assert.InDelta(t, 4, result.WastedSeconds, 1e-9)
		assert.Zero(t, result.OvertakenMoves)
	})
}

// A simulated hour with noisy estimates moves no request more than max_hops
// times, even where every bit of risk is reason enough.
func TestNoRequestMovesTooOften(t *testing.T) {
	most := kvpolicy.HazardAware().Migration.MaxHops
	played := func(fleet Fleet, strategy Strategy, allowed int64) int {
		s, err := fleet.Draw(7, fleet.RequestRate, 3600, 6*3600)
		require.NoError(t, err)
		strategy.Policy.Migration.MaxHops = allowed
		result, err := Run(&s, strategy, DefaultOptions())
		require.NoError(t, err)
		moves := 0
		for i, o := range result.Outcomes {
			require.LessOrEqual(t, int64(o.Moves), allowed, "%s %s request %d", fleet.Name, strategy.Name, i)
			moves = max(moves, o.Moves)
		}
		return moves
	}
	for _, strategy := range []Strategy{HazardAware(), eager(HazardAware()), HazardAwareOverlap(4)} {
		played(Volunteer(), strategy, most)
	}
	// Here the bound is reached, so that the test can fail.
	assert.Equal(t, 0, played(Volunteer(), eager(HazardAwareOverlap(4)), 0))
	assert.Equal(t, 1, played(Volunteer(), eager(HazardAwareOverlap(4)), 1))
	assert.Equal(t, int(most), played(Volunteer(), eager(HazardAwareOverlap(4)), most))
	assert.Equal(t, int(most), played(Mixed(), eager(HazardAwareOverlap(4)), most))
}

// The curves that decide are those of the sessions seen until then, and no
// later ones.
func TestCurvesAreLearntFromThePastAlone(t *testing.T) {
	s := Scenario{HorizonSeconds: 1000, Nodes: []Node{until(always("a", 10, 10), -500, -400, -100, -50, 300, 310, 2000)}}
	s.Nodes[0].Group = "g"
	strategy, options := HazardAware(), DefaultOptions()
	options.MinSessions = 0
	r := &run{}
	require.NoError(t, r.begin(&s, &strategy, &options))
	want := func(durations []float64, observed []bool) {
		t.Helper()
		curve, err := kvpolicy.NewKaplanMeier(durations, observed)
		require.NoError(t, err)
		for _, at := range []float64{0, 100, 299, 350, 351, 500, 501, 1000} {
			assert.Equal(t, curve.Survival(at), r.learner.curve(r.nodes[0].Node).Survival(at), "%v s", at)
		}
	}
	want([]float64{500, 300}, []bool{true, true})
	for r.now < 300 {
		_, err := r.step()
		require.NoError(t, err)
		if r.now == 240 && r.agenda.events[0].seconds > 240 {
			want([]float64{500, 300, 290}, []bool{true, true, false})
		}
	}
	want([]float64{500, 300, 350}, []bool{true, true, true})

	// A session that did not end in a loss is censored, one of unknown age left
	// out.
	l, err := newLearner([]Node{{Name: "b", Sessions: []Session{{-500, -450, false, false}, {-300, -250, true, true}, {-200, -100, true, false}}}}, 0)
	require.NoError(t, err)
	curve, err := kvpolicy.NewKaplanMeier([]float64{50, 100}, []bool{false, true})
	require.NoError(t, err)
	for _, at := range []float64{50, 100, 200} {
		assert.Equal(t, curve.Survival(at), l.curve(&Node{Name: "b"}).Survival(at))
	}
}

func TestAgendaIsInOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var a agenda
		var want []event
		for range rapid.IntRange(0, 50).Draw(t, "events") {
			e := event{seconds: float64(rapid.IntRange(0, 3).Draw(t, "seconds")), kind: eventKind(rapid.IntRange(1, 3).Draw(t, "kind"))}
			a.schedule(e)
			e.order = len(want)
			want = append(want, e)
		}
		slices.SortStableFunc(want, func(x, y event) int {
			if x.seconds != y.seconds {
				return int(x.seconds - y.seconds)
			}
			return int(x.kind) - int(y.kind)
		})
		for _, w := range want {
			require.Equal(t, w, a.next())
		}
		require.Zero(t, a.Len())
	})
}

func TestBadScenarios(t *testing.T) {
	good := func() Scenario {
		return Scenario{HorizonSeconds: 10, Nodes: []Node{always("a", 1, 1)}, Requests: []Request{{1, 1, 1, 1}}}
	}
	nan := math.NaN()
	for path, spoil := range map[string]func(*Scenario, *Options){
		"horizon_s":                    func(s *Scenario, _ *Options) { s.HorizonSeconds = nan },
		"nodes":                        func(s *Scenario, _ *Options) { s.Nodes = nil },
		"nodes[0].name":                func(s *Scenario, _ *Options) { s.Nodes[0].Name = "" },
		"nodes[1].name":                func(s *Scenario, _ *Options) { s.Nodes = append(s.Nodes, s.Nodes[0]) },
		"nodes[0].decode_rate":         func(s *Scenario, _ *Options) { s.Nodes[0].DecodeRate = nan },
		"nodes[0].prefill_rate":        func(s *Scenario, _ *Options) { s.Nodes[0].PrefillRate = 0 },
		"nodes[0].bandwidth":           func(s *Scenario, _ *Options) { s.Nodes[0].Bandwidth = math.Inf(1) },
		"nodes[0].kv_capacity_tokens":  func(s *Scenario, _ *Options) { s.Nodes[0].KVCapacityTokens = 1 },
		"nodes[0].sessions[0].start_s": func(s *Scenario, _ *Options) { s.Nodes[0].Sessions[0].StartSeconds = nan },
		"nodes[0].sessions[0].end_s":   func(s *Scenario, _ *Options) { s.Nodes[0].Sessions[0].EndSeconds = -2000 },
		"nodes[0].sessions[1].start_s": func(s *Scenario, _ *Options) {
			s.Nodes[0].Sessions = append(s.Nodes[0].Sessions, s.Nodes[0].Sessions[0])
		},
		"requests[0].arrival_s": func(s *Scenario, _ *Options) { s.Requests[0].ArrivalSeconds = 11 },
		"requests[0]":           func(s *Scenario, _ *Options) { s.Requests[0].EstimateTokens = 0 },
		"check_s":               func(_ *Scenario, o *Options) { o.CheckSeconds = 0 },
		"refresh_s":             func(_ *Scenario, o *Options) { o.RefreshSeconds = nan },
		"stall_penalty_s":       func(_ *Scenario, o *Options) { o.StallPenaltySeconds = -1 },
		"min_sessions":          func(_ *Scenario, o *Options) { o.MinSessions = -1 },
		"transfer.overhead_s":   func(_ *Scenario, o *Options) { o.Transfer.OverheadSeconds = nan },
	} {
		s, o := good(), DefaultOptions()
		_, err := Run(&s, ReactiveFastest(), o)
		require.NoError(t, err)
		spoil(&s, &o)
		_, err = Run(&s, ReactiveFastest(), o)
		var field *kvpolicy.FieldError
		require.ErrorAs(t, err, &field, path)
		assert.Equal(t, path, field.Path)
	}
	s := good()
	s.Requests[0].OutputTokens = 100_000
	_, err := Run(&s, ReactiveFastest(), DefaultOptions())
	require.ErrorIs(t, err, kvpolicy.ErrInvalid)
}
