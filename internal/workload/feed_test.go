package workload

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/kvpolicy/kvpolicy"
	"github.com/kvpolicy/kvpolicy/internal/trace"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// text makes a workload of a trace's text.
func text(t require.TestingT, lines string) *Workload {
	w, err := NewTrace("t", func() (io.ReadCloser, error) { return io.NopCloser(strings.NewReader(lines)), nil }, 0)
	require.NoError(t, err)
	return w
}

// service is how long the tests' server takes for a request: long and short,
// by its identity alone.
func service(id uint64) float64 { return float64(mix(id)%1000) / 50 }

// replay sends the whole workload; every request ends after its service.
// Requests come back in the order in which they were sent.
func replay(t require.TestingT, w *Workload, options Options) []Request {
	f, err := w.Start(options)
	require.NoError(t, err)
	var sent, running []Request
	end := func(r Request) float64 { return r.ArrivalSeconds + service(r.ID) }
	for {
		at, ok := f.Peek()
		if len(running) > 0 && (!ok || end(running[0]) <= at) {
			require.NoError(t, f.Finish(running[0].ID, end(running[0])))
			running = running[1:]
			continue
		}
		if !ok {
			break
		}
		r, err := f.Next()
		require.NoError(t, err)
		assert.Equal(t, at, r.ArrivalSeconds)
		sent = append(sent, r)
		place, _ := slices.BinarySearchFunc(running, r, func(a, b Request) int { return cmp.Compare(end(a), end(b)) })
		running = slices.Insert(running, place, r)
	}
	_, err = f.Next()
	assert.ErrorIs(t, err, io.EOF)
	if options.MaxRequests == 0 {
		assert.Empty(t, f.open, "no session is left open")
	}
	require.NoError(t, f.Close())
	return sent
}

// sessionsCSV draws a sessions CSV.
func sessionsCSV(t *rapid.T) (string, []trace.Record) {
	var b strings.Builder
	b.WriteString("session,turn,t_s,in_tokens,out_tokens,api_time_s,think_time_s,blocks64,shared_prefix_blocks\n")
	var records []trace.Record
	for s := range rapid.IntRange(1, 5).Draw(t, "sessions") {
		at, before := 0.0, 0
		for k := range rapid.IntRange(1, 6).Draw(t, "turns") {
			input := rapid.SampledFrom([]int{0, 1, 63, 64, 65, 640, 1000}).Draw(t, "input")
			shared := 0
			if k > 0 {
				at += rapid.SampledFrom([]float64{0, 0.5, 20}).Draw(t, "later")
				shared = rapid.OneOf(rapid.Just(min(before, input/64)), rapid.IntRange(0, min(before, input/64))).Draw(t, "shared")
			}
			before = input / 64
			r := trace.Record{
				Session: fmt.Sprint("s", s), Turn: k, ArrivalSeconds: at, InputTokens: input, Blocks: before, SharedBlocks: shared,
				OutputTokens:   rapid.SampledFrom([]int{0, 1, 64, 300}).Draw(t, "output"),
				ThinkSeconds:   rapid.SampledFrom([]float64{-1, 0, 0.7, 30}).Draw(t, "think"),
				ServiceSeconds: rapid.SampledFrom([]float64{-1, 0, 3}).Draw(t, "api"),
			}
			records = append(records, r)
			optional := func(v float64) string {
				if v < 0 {
					return ""
				}
				return fmt.Sprint(v)
			}
			fmt.Fprintf(&b, "%s,%d,%v,%d,%d,%s,%s,%d,%d\n", r.Session, k, at, input, r.OutputTokens, optional(r.ServiceSeconds), optional(r.ThinkSeconds), r.Blocks, shared)
		}
	}
	return b.String(), records
}

// sharedBlocks is how many leading blocks two prompts share.
func sharedBlocks(a, b []uint64) int {
	n := 0
	for n < min(len(a), len(b)) && a[n] == b[n] {
		n++
	}
	return n
}

// bySession sorts requests by session and turn.
func bySession(requests []Request) []Request {
	return slices.SortedFunc(slices.Values(requests), func(a, b Request) int { return cmp.Compare(a.ID, b.ID) })
}

// What the sessions CSV says of each turn is what is sent, under both pacings.
func TestSessionsAreSentAsWritten(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		lines, records := sessionsCSV(t)
		w := text(t, lines)
		options := Options{
			Pacing:            rapid.SampledFrom([]Pacing{TraceTime, ClosedLoop}).Draw(t, "pacing"),
			Seed:              rapid.Uint64().Draw(t, "seed"),
			LoadFactor:        rapid.SampledFrom([]float64{0, 0.5, 2}).Draw(t, "load"),
			SessionsPerSecond: rapid.SampledFrom([]float64{0, 1, 100}).Draw(t, "rate"),
		}
		load := cmp.Or(options.LoadFactor, 1)
		sent := replay(t, w, options)
		assert.True(t, slices.IsSortedFunc(sent, func(a, b Request) int { return cmp.Compare(a.ArrivalSeconds, b.ArrivalSeconds) }))
		requests := bySession(sent)
		require.Len(t, requests, len(records))
		for i, r := range requests {
			record := records[i]
			assert.Equal(t, record.Session, fmt.Sprint("s", r.Session))
			assert.Equal(t, record.Turn, r.Turn)
			assert.Equal(t, uint64(r.Session)<<20+uint64(r.Turn), r.ID)
			assert.Equal(t, max(1, record.InputTokens), r.InputTokens)
			assert.Equal(t, max(1, record.OutputTokens), r.OutputTokens)
			assert.GreaterOrEqual(t, len(r.Blocks), record.Blocks)
			assert.LessOrEqual(t, len(r.Blocks), (r.InputTokens+r.OutputTokens)/64)
			if record.Turn == 0 {
				continue
			}
			before, said := requests[i-1], records[i-1]
			prompt := before.Blocks[:said.Blocks]
			assert.Equal(t, record.SharedBlocks, sharedBlocks(prompt, r.Blocks[:record.Blocks]))
			if record.SharedBlocks == said.Blocks {
				assert.Equal(t, min(record.Blocks, (before.InputTokens+before.OutputTokens)/64), sharedBlocks(before.Blocks, r.Blocks), "what was generated is found again")
			}
			if options.Pacing == TraceTime {
				assert.InDelta(t, (record.ArrivalSeconds-said.ArrivalSeconds)/load, r.ArrivalSeconds-before.ArrivalSeconds, 1e-6)
				continue
			}
			gap := record.ThinkSeconds
			if gap < 0 {
				gap = max(0, record.ArrivalSeconds-said.ArrivalSeconds-max(0, said.ServiceSeconds))
			}
			assert.InDelta(t, before.ArrivalSeconds+service(before.ID)+gap, r.ArrivalSeconds, 1e-6)
		}
		// Sessions share nothing.
		for _, a := range requests {
			for _, b := range requests {
				if a.Session != b.Session {
					assert.Zero(t, sharedBlocks(a.Blocks, b.Blocks))
				}
			}
		}
	})
}

// A hash stands for a block and everything before it.
func TestEqualBlocksHaveEqualPrefixes(t *testing.T) {
	agentic, err := NewAgentic(Agentic{Sessions: 40})
	require.NoError(t, err)
	type place struct {
		at     int
		before uint64
	}
	for seed := range uint64(3) {
		seen := make(map[uint64]place)
		for _, r := range replay(t, agentic, Options{Pacing: TraceTime, Seed: seed}) {
			p := place{}
			for _, block := range r.Blocks {
				known, again := seen[block]
				require.True(t, !again || known == p)
				seen[block] = p
				p = place{p.at + 1, block}
			}
		}
	}
}

// The same seed gives the same requests; every pacing and load gives the same
// ones at other times; MaxRequests and the window keep the same ones under
// every pacing: the first by trace time.
func TestTruncationGoesByTraceTime(t *testing.T) {
	agentic, err := NewAgentic(Agentic{Sessions: 40, BlockTokens: 1024})
	require.NoError(t, err)
	content := func(requests []Request) []Request {
		out := bySession(requests)
		for i := range out {
			out[i].ArrivalSeconds = 0
		}
		return out
	}
	for seed := range uint64(3) {
		all := replay(t, agentic, Options{Pacing: TraceTime, Seed: seed})
		assert.Equal(t, all, replay(t, agentic, Options{Pacing: TraceTime, Seed: seed}))
		assert.Equal(t, content(all), content(replay(t, agentic, Options{Pacing: ClosedLoop, Seed: seed, LoadFactor: 3})))
		for _, options := range []Options{
			{Seed: seed, MaxRequests: 1}, {Seed: seed, MaxRequests: 57}, {Seed: seed, MaxRequests: 1e6},
			{Seed: seed, UntilSeconds: 300}, {Seed: seed, FromSeconds: 100, UntilSeconds: 400, MaxRequests: 30},
			{Seed: seed, FromSeconds: 200}, {Seed: seed, FromSeconds: 1e9},
		} {
			var want []Request
			for _, r := range all {
				until := cmp.Or(options.UntilSeconds, math.Inf(1))
				if r.ArrivalSeconds >= options.FromSeconds && r.ArrivalSeconds < until && (options.MaxRequests == 0 || len(want) < options.MaxRequests) {
					want = append(want, r)
				}
			}
			for _, load := range []float64{0.25, 1, 4} {
				options.LoadFactor = load
				options.Pacing = TraceTime
				open := replay(t, agentic, options)
				assert.Equal(t, content(want), content(open))
				for i := range open {
					assert.InDelta(t, (want[i].ArrivalSeconds-options.FromSeconds)/load, open[i].ArrivalSeconds, 1e-9*(1+want[i].ArrivalSeconds))
				}
				options.Pacing = ClosedLoop
				assert.Equal(t, content(want), content(replay(t, agentic, options)))
			}
		}
	}
}

// A request beyond the model's context is left out, and its session goes on as
// if it had been answered at once; it counts for nothing in MaxRequests.
func TestRequestsBeyondTheContextAreLeftOut(t *testing.T) {
	w := text(t, "session,turn,t_s,in_tokens,out_tokens,think_time_s,blocks64,shared_prefix_blocks\n"+
		"a,0,0,100,100,,1,0\na,1,10,150,51,2,2,1\na,2,30,151,49,3,2,2\na,3,60,9000,1,4,140,2\nb,0,0,201,1,,3,0\n")
	options := Options{Pacing: ClosedLoop, MaxContextTokens: 200, MaxRequests: 2}
	for _, options.Pacing = range []Pacing{TraceTime, ClosedLoop} {
		for seed := range uint64(5) {
			options.Seed = seed
			sent := replay(t, w, options)
			require.Len(t, sent, 2)
			assert.Equal(t, []int{0, 2}, []int{sent[0].Turn, sent[1].Turn})
			assert.Equal(t, 2, sharedBlocks(sent[0].Blocks, sent[1].Blocks), "what turn 1 shared is known though it was not sent")
			if options.Pacing == ClosedLoop {
				assert.InDelta(t, sent[0].ArrivalSeconds+service(sent[0].ID)+2+3, sent[1].ArrivalSeconds, 1e-9)
			} else {
				assert.InDelta(t, sent[0].ArrivalSeconds+30, sent[1].ArrivalSeconds, 1e-9)
			}
		}
	}
	options.MaxRequests = 0
	c, err := w.Ceiling(options)
	require.NoError(t, err)
	assert.Equal(t, Ceiling{Requests: 2, Sessions: 1, LeftOut: 3, InputTokens: 251, OutputTokens: 149, ReusableTokens: 128}, c)
	options.Seed, options.FromSeconds, options.MaxContextTokens = 0, 1, 0
	c, err = text(t, mooncake).Ceiling(options)
	require.NoError(t, err)
	assert.EqualValues(t, 3, c.Sessions)
	options.MaxContextTokens = -1
	_, err = w.Start(options)
	assert.ErrorContains(t, err, "max_context_tokens is -1")
}

func TestSeedsDiffer(t *testing.T) {
	agentic, err := NewAgentic(Agentic{Sessions: 20})
	require.NoError(t, err)
	a := replay(t, agentic, Options{Pacing: TraceTime, Seed: 1})
	b := replay(t, agentic, Options{Pacing: TraceTime, Seed: 2})
	assert.NotEqual(t, a[0].ArrivalSeconds, b[0].ArrivalSeconds)
	assert.NotEqual(t, a[0].Blocks[len(a[0].Blocks)-1], b[0].Blocks[len(b[0].Blocks)-1])

	csv := text(t, "session,turn,t_s,in_tokens,out_tokens,think_time_s,blocks64,shared_prefix_blocks\na,0,0,64,1,,1,0\nb,0,0,64,1,,1,0\nc,0,0,64,1,,1,0\nd,0,0,64,1,,1,0\n")
	orders := make(map[string]bool)
	for seed := range uint64(200) {
		sent := replay(t, csv, Options{Pacing: TraceTime, Seed: seed})
		order := ""
		for _, r := range sent {
			order += fmt.Sprint(r.Session)
		}
		orders[order] = true
	}
	assert.Len(t, orders, 24, "every order of four sessions comes up in 200 seeds")
}

// Starts are a Poisson process of the rate asked for.
func TestStartsArePoisson(t *testing.T) {
	var lines strings.Builder
	lines.WriteString("session,turn,t_s,in_tokens,out_tokens,think_time_s,blocks64,shared_prefix_blocks\n")
	for s := range 20_000 {
		fmt.Fprintf(&lines, "s%d,0,0,64,1,,1,0\n", s)
	}
	sent := replay(t, text(t, lines.String()), Options{Pacing: TraceTime, Seed: 5, SessionsPerSecond: 0.25})
	before, sum, squares := 0.0, 0.0, 0.0
	for _, r := range sent {
		gap := r.ArrivalSeconds - before
		before = r.ArrivalSeconds
		sum, squares = sum+gap, squares+gap*gap
	}
	mean := sum / float64(len(sent))
	assert.InEpsilon(t, 4, mean, 0.03)
	assert.InEpsilon(t, 2*mean*mean, squares/float64(len(sent)), 0.06)
}

const mooncake = `{"timestamp": 0, "input_length": 1300, "output_length": 0, "hash_ids": [0, 1, 2]}
{"timestamp": 3000, "input_length": 1024, "output_length": 9, "hash_ids": [0, 1]}
{"timestamp": 3000, "input_length": 1100, "output_length": 9, "hash_ids": [5, 1, 2]}
{"timestamp": 4000, "input_length": 0, "output_length": 9, "hash_ids": []}
`

func TestMooncake(t *testing.T) {
	w := text(t, mooncake)
	assert.Equal(t, 512, w.BlockTokens())
	assert.Equal(t, "t", w.Name())
	sent := replay(t, w, Options{Pacing: ClosedLoop})
	require.Len(t, sent, 4)
	for i, want := range []Request{
		{InputTokens: 1300, OutputTokens: 1},
		{InputTokens: 1024, OutputTokens: 9, ArrivalSeconds: 3},
		{InputTokens: 1100, OutputTokens: 9, ArrivalSeconds: 3},
		{InputTokens: 1, OutputTokens: 9, ArrivalSeconds: 4},
	} {
		want.Session, want.ID, want.Blocks = int64(i), uint64(i)<<20, sent[i].Blocks
		assert.Equal(t, want, sent[i])
	}
	assert.Len(t, sent[0].Blocks, 2, "the partly filled block is not shared")
	assert.Equal(t, sent[0].Blocks, sent[1].Blocks)
	assert.NotEqual(t, sent[1].Blocks[1], sent[2].Blocks[1], "the same block behind another one")
	assert.Empty(t, sent[3].Blocks)
	c, err := w.Ceiling(Options{})
	require.NoError(t, err)
	assert.Equal(t, Ceiling{Requests: 4, Sessions: 4, InputTokens: 3425, OutputTokens: 28, ReusableTokens: 1024}, c)
}

// A seed moves each start later, by less than ShiftSeconds, and not 0 for all.
func TestShifts(t *testing.T) {
	w := text(t, mooncake)
	seen := make(map[float64]bool)
	for seed := uint64(1); seed < 50; seed++ {
		sent := bySession(replay(t, w, Options{Pacing: TraceTime, Seed: seed, ShiftSeconds: 5}))
		for i, recorded := range []float64{0, 3, 3, 4} {
			shift := sent[i].ArrivalSeconds - recorded
			assert.True(t, shift >= 0 && shift < 5)
			seen[math.Floor(shift)] = true
		}
	}
	assert.Len(t, seen, 5)
}

func TestBailian(t *testing.T) {
	line := func(chat, parent int, at float64, input, output int, ids string) string {
		return fmt.Sprintf(`{"chat_id": %d, "parent_chat_id": %d, "timestamp": %v, "input_length": %d, "output_length": %d, "type": "text", "turn": 1, "hash_ids": [%s]}`+"\n", chat, parent, at, input, output, ids)
	}
	w := text(t, line(7, -1, 1, 32, 100, "1,2")+
		line(3, 99, 2, 16, 10, "1")+ // its parent was cut off
		line(8, 7, 10, 48, 100, "1,2,3")+
		line(9, 7, 11, 40, 5, "1,2,4")+ // a second answer to the same turn
		line(10, 8, 12.1, 64, 5, "1,2,3,5")) // sent sooner than its predecessor nominally ends
	assert.Equal(t, 16, w.BlockTokens())
	sent := replay(t, w, Options{Pacing: TraceTime})
	require.Len(t, sent, 5)
	for i, want := range []struct {
		session int64
		turn    int
		at      float64
		shared  int
	}{{0, 0, 1, 2}, {1, 0, 2, 1}, {0, 1, 10, 2}, {0, 2, 11, 2}, {0, 3, 12.1, 2}} {
		assert.Equal(t, want.session, sent[i].Session)
		assert.Equal(t, want.turn, sent[i].Turn)
		assert.Equal(t, want.at, sent[i].ArrivalSeconds)
		assert.Equal(t, want.shared, sharedBlocks(sent[0].Blocks, sent[i].Blocks))
	}

	// Both children of chat 7 wait for it alone; chat 10 waits for chat 8, and
	// its own gap is 0.
	f, err := w.Start(Options{Pacing: ClosedLoop})
	require.NoError(t, err)
	next := func() Request {
		r, err := f.Next()
		require.NoError(t, err)
		return r
	}
	root, cut := next(), next()
	_, ok := f.Peek()
	assert.False(t, ok)
	require.NoError(t, f.Finish(cut.ID, 500))
	require.NoError(t, f.Finish(root.ID, 100))
	nominal := 32.0/7000 + 2
	first, second := next(), next()
	assert.InDelta(t, 100+9-nominal, first.ArrivalSeconds, 1e-9)
	assert.InDelta(t, 100+10-nominal, second.ArrivalSeconds, 1e-9)
	require.NoError(t, f.Finish(second.ID, 150))
	_, ok = f.Peek()
	assert.False(t, ok)
	require.NoError(t, f.Finish(first.ID, 200))
	last := next()
	assert.InDelta(t, 200+2.1-16.0/7000-2, last.ArrivalSeconds, 1e-9)

	_, err = NewTrace("t", func() (io.ReadCloser, error) {
		return io.NopCloser(strings.NewReader(line(7, -1, 1, 16, 1, "1") + line(7, -1, 2, 16, 1, "1"))), nil
	}, 0)
	assert.ErrorContains(t, err, "t:2: chat_id is 7, must be in the file once")
}

func TestAzure(t *testing.T) {
	w := text(t, "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,640,10\n2023-11-16 18:17:04.5,640,27\n")
	sent := replay(t, w, Options{Pacing: TraceTime})
	require.Len(t, sent, 2)
	assert.Equal(t, 1.5, sent[1].ArrivalSeconds)
	assert.Len(t, sent[1].Blocks, 10)
	assert.Zero(t, sharedBlocks(sent[0].Blocks, sent[1].Blocks))
}

func TestStartRefusesBadOptions(t *testing.T) {
	w := text(t, mooncake)
	nan := math.NaN()
	for want, options := range map[string]Options{
		"pacing is Pacing(0), must be trace-time or closed-loop": {},
		"load_factor is -1, must be 0 or from 1e-06":             {Pacing: TraceTime, LoadFactor: -1},
		"load_factor is NaN":                                     {Pacing: TraceTime, LoadFactor: nan},
		"from_seconds is -1":                                     {Pacing: TraceTime, FromSeconds: -1},
		"until_seconds is NaN":                                   {Pacing: TraceTime, UntilSeconds: nan},
		"until_seconds is 5, must be after from_seconds":         {Pacing: TraceTime, FromSeconds: 5, UntilSeconds: 5},
		"max_requests is -1":                                     {Pacing: TraceTime, MaxRequests: -1},
		"sessions_per_second is +Inf":                            {Pacing: TraceTime, SessionsPerSecond: math.Inf(1)},
		"shift_seconds is 1e+07":                                 {Pacing: TraceTime, ShiftSeconds: 1e7},
	} {
		_, err := w.Start(options)
		assert.ErrorContains(t, err, want)
		assert.ErrorIs(t, err, kvpolicy.ErrInvalid)
	}
	for want, agentic := range map[string]Agentic{
		"sessions is -1":           {Sessions: -1},
		"window_seconds is NaN":    {WindowSeconds: nan},
		"mean_input_tokens is 999": {MeanInputTokens: 999},
		"block_tokens is 65537":    {BlockTokens: 65537},
	} {
		_, err := NewAgentic(agentic)
		assert.ErrorContains(t, err, want)
		assert.ErrorIs(t, err, kvpolicy.ErrInvalid)
	}
	f, err := w.Start(Options{Pacing: ClosedLoop})
	require.NoError(t, err)
	for _, at := range []float64{nan, -1, math.Inf(1)} {
		assert.ErrorContains(t, f.Finish(0, at), "end_seconds")
	}
	assert.NoError(t, f.Finish(math.MaxUint64, 1), "an unknown request is none of this feed's")
}

func TestPacingWords(t *testing.T) {
	for _, p := range []Pacing{TraceTime, ClosedLoop} {
		word, err := p.MarshalText()
		require.NoError(t, err)
		var back Pacing
		require.NoError(t, back.UnmarshalText(word))
		assert.Equal(t, p, back)
	}
	_, err := Pacing(0).MarshalText()
	assert.ErrorIs(t, err, kvpolicy.ErrInvalid)
	assert.ErrorContains(t, new(Pacing).UnmarshalText([]byte("open")), "pacing is open, must be")
}

// What is wrong in a file that is streamed comes out of Next, with its place;
// the file is closed once for each time that it was opened.
func TestStreamedErrorsAndClosing(t *testing.T) {
	opened := 0
	w, err := NewTrace("m.jsonl", func() (io.ReadCloser, error) {
		opened++
		return &counted{strings.NewReader(mooncake + mooncake), &opened}, nil
	}, trace.Mooncake)
	require.NoError(t, err)
	assert.Zero(t, opened)
	for _, options := range []Options{{Pacing: TraceTime}, {Pacing: ClosedLoop}} {
		f, err := w.Start(options)
		require.NoError(t, err)
		for err == nil {
			_, err = f.Next()
		}
		assert.ErrorContains(t, err, "m.jsonl:5: timestamp is 0, must not be before")
		_, ok := f.Peek()
		assert.False(t, ok)
		require.NoError(t, f.Close())
	}
	_, err = w.Ceiling(Options{})
	assert.ErrorContains(t, err, "m.jsonl:5")
	_, err = w.Start(Options{Pacing: ClosedLoop, MaxRequests: 8})
	assert.ErrorContains(t, err, "m.jsonl:5")
	assert.Zero(t, opened, "as many closed as opened")

	broken := errors.New("gone")
	_, err = NewTrace("x", func() (io.ReadCloser, error) { return nil, broken }, 0)
	assert.ErrorIs(t, err, broken)
}

type counted struct {
	io.Reader
	opened *int
}

func (c *counted) Close() error { *c.opened--; return nil }

// What a feed holds does not grow with the number of requests.
func TestMemoryIsFlat(t *testing.T) {
	const requests = 20_000
	stream, err := NewTrace("t", func() (io.ReadCloser, error) { return &endless{}, nil }, trace.Mooncake)
	require.NoError(t, err)
	agentic, err := NewAgentic(Agentic{Sessions: 1 << 30, WindowSeconds: (1 << 30) * 2, MeanInputTokens: 1000})
	require.NoError(t, err)
	for name, w := range map[string]*Workload{"mooncake": stream, "agentic": agentic} {
		f, err := w.Start(Options{Pacing: TraceTime, Seed: 1})
		require.NoError(t, err)
		most := 0
		for range requests {
			_, err := f.Next()
			require.NoError(t, err)
			most = max(most, len(f.open)+len(f.due))
		}
		assert.Less(t, most, 400, name)
		require.NoError(t, f.Close())
	}
}

// endless is a Mooncake trace without an end, ten requests a second.
type endless struct {
	line int
	rest []byte
}

func (e *endless) Read(p []byte) (int, error) {
	if len(e.rest) == 0 {
		e.rest = fmt.Appendf(nil, `{"timestamp": %d, "input_length": 1, "output_length": 1, "hash_ids": [1]}`+"\n", 100*e.line)
		e.line++
	}
	n := copy(p, e.rest)
	e.rest = e.rest[n:]
	return n, nil
}

func (e *endless) Close() error { return nil }

// slowCeiling walks every prompt against all the prompts before it.
func slowCeiling(sent []Request, blockTokens int) (tokens int64) {
	for i, r := range sent {
		best := 0
		for _, before := range sent[:i] {
			best = max(best, sharedBlocks(r.Blocks[:r.InputTokens/blockTokens], before.Blocks))
		}
		tokens += int64(best * blockTokens)
	}
	return tokens
}

func TestCeilingIsTheSlowOne(t *testing.T) {
	agentic, err := NewAgentic(Agentic{Sessions: 30})
	require.NoError(t, err)
	for seed := range uint64(5) {
		options := Options{Pacing: TraceTime, Seed: seed}
		sent := replay(t, agentic, options)
		c, err := agentic.Ceiling(options)
		require.NoError(t, err)
		assert.EqualValues(t, len(sent), c.Requests)
		assert.EqualValues(t, 30, c.Sessions)
		assert.Equal(t, slowCeiling(sent, 64), c.ReusableTokens)
		assert.False(t, c.Sampled)

		sampled, err := agentic.ceiling(options, 1<<11)
		require.NoError(t, err)
		assert.True(t, sampled.Sampled)
		assert.InDelta(t, c.Share(), sampled.Share(), 0.05)
	}
	rapid.Check(t, func(t *rapid.T) {
		lines, _ := sessionsCSV(t)
		w := text(t, lines)
		c, err := w.Ceiling(Options{})
		require.NoError(t, err)
		assert.Equal(t, slowCeiling(replay(t, w, Options{Pacing: TraceTime}), 64), c.ReusableTokens)
	})
	assert.Zero(t, Ceiling{}.Share())
}

// shared makes a workload of one of the shared files, or skips the test.
func shared(t *testing.T, name string) *Workload {
	path := "../../../shared/data/" + name
	if _, err := os.Stat(path); err != nil {
		t.Skip("the shared data is not here: ", err)
	}
	w, err := NewTrace(name, func() (io.ReadCloser, error) { return os.Open(path) }, 0)
	require.NoError(t, err)
	return w
}

// The totals are those of the files, counted apart from this package.
func TestRealFiles(t *testing.T) {
	t.Run("mooncake", func(t *testing.T) {
		c, err := shared(t, "mooncake/conversation_first6000.jsonl").Ceiling(Options{})
		require.NoError(t, err)
		assert.EqualValues(t, 6000, c.Requests)
		assert.EqualValues(t, 76643649, c.InputTokens)
		assert.InDelta(t, 0.352, c.Share(), 0.001)
	})
	t.Run("sessions", func(t *testing.T) {
		c, err := shared(t, "agentic_coding/requests.csv").Ceiling(Options{MaxRequests: 2000})
		require.NoError(t, err)
		assert.EqualValues(t, 2000, c.Requests)
		assert.InDelta(t, 0.95, c.Share(), 0.03)
	})
}

// Whatever a file holds, a replay of it ends or says what is wrong.
func FuzzReplay(f *testing.F) {
	f.Add(mooncake, uint8(1), uint16(2))
	f.Add("session,turn,t_s,in_tokens,out_tokens,think_time_s,blocks64,shared_prefix_blocks\na,0,0,64,1,,1,0\na,1,0,128,1,,2,1\n", uint8(2), uint16(0))
	f.Add(`{"chat_id": 1, "parent_chat_id": -1, "timestamp": 1, "input_length": 1, "output_length": 1, "type": "", "turn": 1, "hash_ids": [1]}`, uint8(2), uint16(1))
	f.Fuzz(func(t *testing.T, lines string, pacing uint8, requests uint16) {
		w, err := NewTrace("t", func() (io.ReadCloser, error) { return io.NopCloser(strings.NewReader(lines)), nil }, 0)
		if err != nil {
			return
		}
		feed, err := w.Start(Options{Pacing: Pacing(pacing % 3), Seed: uint64(requests), MaxRequests: int(requests)})
		if err != nil {
			return
		}
		before := 0.0
		for {
			request, err := feed.Next()
			if err != nil {
				break
			}
			require.GreaterOrEqual(t, request.ArrivalSeconds, before)
			before = request.ArrivalSeconds
			require.LessOrEqual(t, len(request.Blocks), (request.InputTokens+request.OutputTokens)/w.BlockTokens())
			require.NoError(t, feed.Finish(request.ID, before+1))
		}
		require.NoError(t, feed.Close())
	})
}
