package replay

import (
	"context"
	"fmt"
	"io"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/kvpolicy/kvpolicy"
	"github.com/kvpolicy/kvpolicy/internal/sim"
	"github.com/kvpolicy/kvpolicy/internal/workload"
)

// fleet is n instances with a connector, their pools cut to a size.
func fleet(n, poolTokens int) []sim.Profile {
	list := make([]sim.Profile, n)
	for i := range list {
		list[i] = sim.H20()
		list[i].KVCapacityTokens = poolTokens
		list[i].ConnectorLoaded = true
		list[i].ConnectorBufferBytes = 0
	}
	return list
}

func agentic(t require.TestingT, sessions int) *workload.Workload {
	w, err := workload.NewAgentic(workload.Agentic{Sessions: sessions, WindowSeconds: 2 * float64(sessions), MeanInputTokens: 12000})
	require.NoError(t, err)
	return w
}

// presets are those that a replay takes.
func presets(t require.TestingT) []kvpolicy.Policy {
	var list []kvpolicy.Policy
	for _, name := range kvpolicy.PresetNames() {
		p, err := kvpolicy.Preset(name)
		require.NoError(t, err)
		if !p.Hazard.Enabled {
			list = append(list, p)
		}
	}
	// One that moves prefills whenever it can.
	eager := kvpolicy.UnifiedV2Relaxed()
	eager.Separation.MinNewTokens, eager.Separation.MinActiveDecodes = 0, 0
	eager.Separation.MinSourceCacheTokens, eager.Separation.MinExtraCacheTokens = 0, 0
	eager.Separation.InterferenceRate = 100
	eager.Transfer.OverheadSeconds = 0
	return append(list, eager)
}

func drawView(t *rapid.T) View {
	return View{
		Truth:         rapid.Bool().Draw(t, "truth"),
		Load:          rapid.SampledFrom([]LoadSource{0, Tracked, Scraped}).Draw(t, "load"),
		Cache:         rapid.SampledFrom([]CacheSource{0, AtDispatch, AtFirstToken, AskEngine}).Draw(t, "cache"),
		ScrapeSeconds: rapid.SampledFrom([]float64{0, 0.05, 1, 30}).Draw(t, "scrape"),
		DelaySeconds:  rapid.SampledFrom([]float64{0, 0.05, 2, 100}).Draw(t, "delay"),
		IndexTokens:   rapid.SampledFrom([]int{0, 64, 5000}).Draw(t, "index"),
	}
}

func drawConfig(t *rapid.T) Config {
	return Config{
		Workload: agentic(t, rapid.IntRange(1, 12).Draw(t, "sessions")),
		Options: workload.Options{
			Pacing:           rapid.SampledFrom([]workload.Pacing{workload.TraceTime, workload.ClosedLoop}).Draw(t, "pacing"),
			Seed:             rapid.Uint64Range(0, 1000).Draw(t, "seed"),
			LoadFactor:       rapid.SampledFrom([]float64{0.1, 1, 20}).Draw(t, "load"),
			MaxContextTokens: 90_000,
		},
		Policy:     rapid.SampledFrom(presets(t)).Draw(t, "policy"),
		Instances:  fleet(rapid.IntRange(1, 4).Draw(t, "instances"), rapid.SampledFrom([]int{100_000, 419_000}).Draw(t, "pool")),
		View:       drawView(t),
		Objectives: Objectives{TTFTSeconds: 5, TPOTSeconds: 0.1},
	}
}

func TestEveryRequestIsServedAndTheBooksClose(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		config := drawConfig(t)
		calls := int64(0)
		config.Ended = func(float64) { calls++ }
		r, err := Run(context.Background(), config)
		require.NoError(t, err) // Run itself checks the books
		ceiling, err := config.Workload.Ceiling(config.Options)
		require.NoError(t, err)
		assert.Equal(t, ceiling.Requests, r.Requests)
		assert.Equal(t, ceiling.InputTokens, r.InputTokens)
		assert.Equal(t, ceiling.OutputTokens, r.OutputTokens)
		assert.Zero(t, r.Lost())
		assert.Equal(t, r.Requests, calls)
		assert.LessOrEqual(t, r.CachedTokens, ceiling.ReusableTokens)
		assert.EqualValues(t, r.Requests, r.TTFT.Count())
		assert.EqualValues(t, r.Requests, r.E2E.Count())
		assert.GreaterOrEqual(t, r.E2E.Mean(), r.TTFT.Mean())
		assert.Len(t, r.Predictions, min(int(r.Requests), sampledPredictions))
		var served, decided, judged int64
		for i := range r.Instances {
			served += r.Instances[i].Requests
			assert.EqualValues(t, r.Instances[i].Requests, r.Instances[i].TTFT.Count())
		}
		for reason, n := range r.Funnel.All() {
			if reason >= kvpolicy.NewLocalBelowThreshold && reason <= kvpolicy.Triggered {
				judged += n
			} else {
				decided += n
			}
		}
		assert.Equal(t, r.Requests, served)
		assert.Equal(t, r.Requests, decided)
		if config.Policy.Separation.Enabled {
			assert.Equal(t, r.Requests, judged)
		} else {
			assert.Zero(t, judged)
			assert.Zero(t, r.SeparatedRatio.Count())
		}
		for _, m := range Metrics() {
			v, ok := m.Of(r, ceiling)
			assert.False(t, ok && !(v >= 0 && v < 1e12), "%s is %v", m.Name, v)
		}
	})
}

func TestPrefillsElsewhereHappenInTheTests(t *testing.T) {
	list := presets(t)
	config := Config{
		Workload: agentic(t, 30), Options: workload.Options{Pacing: workload.ClosedLoop, Seed: 1, LoadFactor: 20},
		Policy: list[len(list)-1], Instances: fleet(4, 419_000), Objectives: Objectives{5, 0.1},
	}
	r, err := Run(context.Background(), config)
	require.NoError(t, err)
	assert.Positive(t, r.Triggered())
}

func TestEqualConfigsGiveEqualResults(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		config := drawConfig(t)
		one, err := Run(context.Background(), config)
		require.NoError(t, err)
		two, err := Run(context.Background(), config)
		require.NoError(t, err)
		assert.Equal(t, one, two)
	})
}

// At every event of a run without PD-separation or preemption what the router
// has booked is what the engine has: a router that misses nothing is right.
func TestTheBooksAgreeWithTheEngine(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		config := drawConfig(t)
		config.Policy = rapid.SampledFrom([]kvpolicy.Policy{kvpolicy.Unified(), kvpolicy.LMetric(), kvpolicy.Sticky()}).Draw(t, "plain policy")
		r, err := newRunner(config)
		require.NoError(t, err)
		for !r.done && r.cluster.Step() {
			require.NoError(t, r.err)
			for i, l := range r.ledgers {
				state := r.cluster.State(i)
				require.EqualValues(t, state.Running+state.Waiting, l.requests)
				require.GreaterOrEqual(t, int64(state.OngoingTokens), l.ongoing, "the engine also counts what is generated")
				require.GreaterOrEqual(t, l.pendingPrefill, int64(0))
				require.LessOrEqual(t, l.activeDecodes, l.requests)
			}
		}
		result, err := r.finished()
		require.NoError(t, err)
		assert.Zero(t, result.Lost())
	})
}

func TestTruthIsTheEnginesState(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		config := drawConfig(t)
		config.View.Truth = true
		r, err := newRunner(config)
		require.NoError(t, err)
		probe := workload.Request{ID: 1 << 62, Session: 0, InputTokens: 20_000, OutputTokens: 1}
		for step := 0; !r.done && r.cluster.Step(); step++ {
			for id := range r.inFlight {
				probe.Blocks = r.inFlight[id].prompt
				break
			}
			r.look(&probe)
			for i, in := range r.snapshot.Instances {
				state := r.cluster.State(i)
				require.Equal(t, kvpolicy.Instance{
					ID:                   fmt.Sprint(i),
					Requests:             int64(state.Running + state.Waiting),
					PendingPrefillTokens: int64(state.PendingPrefillTokens),
					OngoingTokens:        int64(state.OngoingTokens),
					ActiveDecodes:        int64(state.ActiveDecodes),
					CachedTokens:         int64(r.cluster.CachedTokens(i, probe.InputTokens, probe.Blocks)),
					KVCapacityTokens:     int64(state.KVCapacityTokens),
					KVUsedTokens:         int64(state.KVUsedTokens),
					UptimeSeconds:        r.cluster.Now(),
				}, in)
			}
		}
	})
}

// A scrape reaches the router after the delay and not before, and the next one
// replaces it.
func TestScrapesAreAsOldAsTheyShouldBe(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		config := drawConfig(t)
		config.View.Truth = false
		config.View.ScrapeSeconds = rapid.SampledFrom([]float64{0.5, 1, 8}).Draw(t, "every")
		config.View.DelaySeconds = rapid.SampledFrom([]float64{0, 0.25, 3}).Draw(t, "late")
		r, err := newRunner(config)
		require.NoError(t, err)
		for !r.done && r.cluster.Step() {
			age := r.cluster.Now() - r.scraped.seconds
			// Long idle times are not scraped; who is sent a request meets a scrape.
			if len(r.inFlight) > 0 {
				require.LessOrEqual(t, age, config.View.ScrapeSeconds+config.View.DelaySeconds+1e-9)
			}
			if r.scraped.seconds > 0 {
				require.GreaterOrEqual(t, age, config.View.DelaySeconds-1e-9)
			}
		}
	})
}

// A long prompt waits on one instance, a shorter one on the other, when the long
// one comes again: only an index filled at dispatch knows that it will be cached.
func TestWhatAnIndexFilledAtDispatchIsWorth(t *testing.T) {
	lines := `{"timestamp": 0, "input_length": 40960, "output_length": 5, "hash_ids": [` + ids(0, 80) + `]}
{"timestamp": 10, "input_length": 30720, "output_length": 5, "hash_ids": [` + ids(100, 60) + `]}
{"timestamp": 20, "input_length": 40960, "output_length": 5, "hash_ids": [` + ids(0, 80) + `]}
`
	w, err := workload.NewTrace("three", func() (io.ReadCloser, error) { return io.NopCloser(strings.NewReader(lines)), nil }, 0)
	require.NoError(t, err)
	for _, c := range []struct {
		view View
		want int64
	}{{View{}, 40960}, {View{Cache: AtFirstToken}, 0}, {View{Cache: AskEngine}, 0}, {View{Truth: true}, 0}} {
		r, err := Run(context.Background(), Config{
			Workload: w, Options: workload.Options{Pacing: workload.TraceTime}, Policy: kvpolicy.UnifiedNoAffinity(),
			Instances: fleet(2, 419_000), View: c.view, Objectives: Objectives{5, 0.1},
		})
		require.NoError(t, err)
		assert.InDelta(t, c.want, r.CachedTokens, 512, "%+v", c.view)
	}
}

func ids(from, n int) string {
	words := make([]string, n)
	for i := range words {
		words[i] = fmt.Sprint(from + i)
	}
	return strings.Join(words, ", ")
}

func TestRequestsThatFitNowhereAreLost(t *testing.T) {
	w := agentic(t, 10)
	options := workload.Options{Pacing: workload.ClosedLoop, Seed: 1}
	ceiling, err := w.Ceiling(options)
	require.NoError(t, err)
	r, err := Run(context.Background(), Config{
		Workload: w, Options: options, Policy: kvpolicy.Unified(), Instances: fleet(2, 8192), Objectives: Objectives{5, 0.1},
	})
	require.NoError(t, err)
	assert.Equal(t, ceiling.Requests, r.Requests, "sessions go on after a refusal")
	assert.Positive(t, r.Lost())
	assert.Positive(t, r.Completed)
}

func TestObjectivesBoundGoodput(t *testing.T) {
	for _, c := range []struct {
		objectives Objectives
		want       float64
	}{{Objectives{1e9, 1e9}, 1}, {Objectives{1e-9, 1e9}, 0}, {Objectives{1e9, 1e-9}, 0}} {
		r, err := Run(context.Background(), Config{
			Workload: agentic(t, 8), Options: workload.Options{Pacing: workload.ClosedLoop, Seed: 3}, Policy: kvpolicy.Unified(),
			Instances: fleet(2, 419_000), Objectives: c.objectives,
		})
		require.NoError(t, err)
		// Answers of one token have no TPOT.
		assert.InDelta(t, c.want, float64(r.Good)/float64(r.Requests), 0.1)
	}
}

func TestCancelledRunsStop(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	config := Config{
		Workload: agentic(t, 50), Options: workload.Options{Pacing: workload.ClosedLoop, Seed: 3}, Policy: kvpolicy.Unified(),
		Instances: fleet(2, 419_000), Objectives: Objectives{5, 0.1},
	}
	ended := 0
	config.Ended = func(float64) {
		if ended++; ended == 20 {
			cancel()
		}
	}
	r, err := Run(ctx, config)
	assert.ErrorIs(t, err, context.Canceled)
	assert.Nil(t, r)
}

// What a request costs, and what is held, must not grow with the workload: a
// wake-up that is out of date must not ask for another.
func TestWorkAndMemoryStayInProportion(t *testing.T) {
	perRequest := func(sessions int) float64 {
		r, err := newRunner(Config{
			Workload: agentic(t, sessions), Options: workload.Options{Pacing: workload.ClosedLoop, Seed: 1, LoadFactor: 0.3},
			Policy: kvpolicy.Unified(), Instances: fleet(2, 419_000), View: View{Truth: true}, Objectives: Objectives{5, 0.1},
		})
		require.NoError(t, err)
		events := 0
		for !r.done && r.cluster.Step() {
			events++
		}
		result, err := r.finished()
		require.NoError(t, err)
		assert.Empty(t, r.inFlight)
		for _, x := range r.index {
			assert.LessOrEqual(t, len(x.blocks.at), 419_000/r.blockTokens)
			assert.LessOrEqual(t, len(x.blocks.nodes), 419_000/r.blockTokens+1)
		}
		assert.LessOrEqual(t, len(r.homes.at), rememberedSessions)
		return float64(events) / float64(result.Requests)
	}
	assert.Less(t, perRequest(600), 1.5*perRequest(40))
}

// Times may be counted from 1970, and sessions may start years apart: work must
// not grow with idle time, and outcomes must not change by it.
func TestIdleTimeCostsNothing(t *testing.T) {
	run := func(first, second float64, view View) (*Result, int) {
		var lines strings.Builder
		for _, at := range []float64{first, second} {
			for i := range 20 {
				fmt.Fprintf(&lines, `{"timestamp": %.0f, "input_length": 4000, "output_length": 50, "hash_ids": [1,2,3,4,5,6,7,%d]}`+"\n", at+200*float64(i), i+8)
			}
		}
		w, err := workload.NewTrace("sparse.jsonl", func() (io.ReadCloser, error) { return io.NopCloser(strings.NewReader(lines.String())), nil }, 0)
		require.NoError(t, err)
		r, err := newRunner(Config{
			Workload: w, Options: workload.Options{Pacing: workload.ClosedLoop}, Policy: kvpolicy.Unified(),
			Instances: fleet(2, 100_000), View: view, Objectives: Objectives{5, 0.1},
		})
		require.NoError(t, err)
		events := 0
		for !r.done && r.cluster.Step() {
			events++
		}
		result, err := r.finished()
		require.NoError(t, err)
		return result, events
	}
	for _, view := range []View{{}, {Load: Scraped}, {Load: Scraped, DelaySeconds: 7}, {Load: Scraped, ScrapeSeconds: 0.125, Cache: AtFirstToken}} {
		short, _ := run(100_000, 160_000, view)
		long, events := run(1.7e12, 1.8e12, view)
		assert.Less(t, events, 10_000, "%+v", view)
		assert.EqualValues(t, 40, long.Completed)
		assert.Equal(t, short.CachedTokens, long.CachedTokens)
		assert.InEpsilon(t, short.TTFT.Mean(), long.TTFT.Mean(), 1e-4, "times near 2e9 s are coarse")
		for i := range short.Instances {
			assert.Equal(t, short.Instances[i].Requests, long.Instances[i].Requests)
		}
	}
}

func TestErrorsNameTheField(t *testing.T) {
	good := Config{
		Workload: agentic(t, 1), Options: workload.Options{Pacing: workload.ClosedLoop}, Policy: kvpolicy.Unified(),
		Instances: fleet(1, 419_000), Objectives: Objectives{5, 0.1},
	}
	for path, spoil := range map[string]func(*Config){
		"workload":                      func(c *Config) { c.Workload = nil },
		"pacing":                        func(c *Config) { c.Options.Pacing = 0 },
		"policy.hazard":                 func(c *Config) { c.Policy = kvpolicy.HazardAware() },
		"score":                         func(c *Config) { c.Policy.Score = 0 },
		"instances[0].connector_loaded": func(c *Config) { c.Policy = kvpolicy.UnifiedV2Strict(); c.Instances = []sim.Profile{sim.H20()} },
		"objectives.ttft_seconds":       func(c *Config) { c.Objectives.TTFTSeconds = 0 },
		"objectives.tpot_seconds":       func(c *Config) { c.Objectives.TPOTSeconds = -1 },
		"view.load":                     func(c *Config) { c.View.Load = 7 },
		"view.cache":                    func(c *Config) { c.View.Cache = -1 },
		"view.scrape_seconds":           func(c *Config) { c.View.ScrapeSeconds = -1 },
		"view.delay_seconds":            func(c *Config) { c.View.DelaySeconds = 1e7 },
		"view.index_tokens":             func(c *Config) { c.View.IndexTokens = -1 },
	} {
		c := good
		spoil(&c)
		_, err := Run(context.Background(), c)
		var field *kvpolicy.FieldError
		if assert.ErrorAs(t, err, &field, path) {
			assert.Equal(t, path, field.Path)
		}
	}
	c := good
	c.Instances = nil
	_, err := Run(context.Background(), c)
	assert.ErrorIs(t, err, sim.ErrInvalid)
}

func TestAFaultInTheTraceEndsTheRun(t *testing.T) {
	lines := `{"timestamp": 0, "input_length": 100, "output_length": 5, "hash_ids": [1]}
{"timestamp": 5, "input_length": -3, "output_length": 5, "hash_ids": [1]}
`
	w, err := workload.NewTrace("faulty.jsonl", func() (io.ReadCloser, error) { return io.NopCloser(strings.NewReader(lines)), nil }, 0)
	require.NoError(t, err)
	_, err = Run(context.Background(), Config{
		Workload: w, Options: workload.Options{Pacing: workload.TraceTime}, Policy: kvpolicy.Unified(),
		Instances: fleet(1, 419_000), Objectives: Objectives{5, 0.1},
	})
	assert.ErrorContains(t, err, "input_length")
	assert.ErrorContains(t, err, "faulty.jsonl:2")
}
