package sim

import (
	"bufio"
	"encoding/json"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// traceFile is the first half of Mooncake's conversation trace, handed out beside the project.
var traceFile = filepath.Join("..", "..", "..", "shared", "data", "mooncake", "conversation_first6000.jsonl")

func readTrace(t testing.TB) []Request {
	f, err := os.Open(traceFile)
	if err != nil {
		t.Skipf("no trace: %v", err)
	}
	defer f.Close()
	var requests []Request
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var line struct {
			Timestamp    float64  `json:"timestamp"`
			InputLength  int      `json:"input_length"`
			OutputLength int      `json:"output_length"`
			HashIDs      []uint64 `json:"hash_ids"`
		}
		require.NoError(t, json.Unmarshal(lines.Bytes(), &line))
		requests = append(requests, Request{
			ID: uint64(len(requests)), ArrivalSeconds: line.Timestamp / 1000,
			PromptTokens: line.InputLength, OutputTokens: line.OutputLength,
			Blocks: line.HashIDs[:min(len(line.HashIDs), line.InputLength/512)],
		})
	}
	require.NoError(t, lines.Err())
	return requests
}

// leastWork is a router that looks at every instance's truth for every request, and
// takes the one with the least prefill ahead.
type leastWork struct {
	c         *Cluster
	completed int
	ttft      float64
	cached    int
	preempted int
}

func (l *leastWork) Arrived(r Request) {
	best, least := 0, math.MaxInt
	for i := range l.c.Instances() {
		work := l.c.State(i).PendingPrefillTokens + r.PromptTokens - l.c.CachedTokens(i, r.PromptTokens, r.Blocks)
		if work < least {
			best, least = i, work
		}
	}
	if err := l.c.Submit(r, best); err != nil {
		panic(err)
	}
}

func (l *leastWork) Progress(Progress) {}

func (l *leastWork) Ended(r Record) {
	l.completed++
	l.ttft += r.FirstTokenSeconds - r.Request.ArrivalSeconds
	l.cached += r.CachedTokens
	l.preempted += r.Preemptions
}

// replay runs requests over eight instances.
func replay(t testing.TB, prefix int, next func() (Request, bool)) *leastWork {
	profiles := make([]Profile, 8)
	for i := range profiles {
		profiles[i] = H20()
	}
	l := &leastWork{}
	c, err := New(Config{Instances: profiles, PrefixBlockTokens: prefix, Listener: l})
	require.NoError(t, err)
	l.c = c
	c.Feed(next)
	c.Run(math.Inf(1))
	return l
}

// over streams requests, `times` times over, each round after the one before and
// under identities of its own.
func over(requests []Request, times int) func() (Request, bool) {
	n, period := 0, requests[len(requests)-1].ArrivalSeconds+1
	return func() (Request, bool) {
		if n == times*len(requests) {
			return Request{}, false
		}
		r := requests[n%len(requests)]
		r.ID = uint64(n)
		r.ArrivalSeconds += float64(n/len(requests)) * period
		n++
		return r, true
	}
}

// agentic makes sessions of turns that grow, n requests in all, at a rate that eight
// instances can just bear: a workload for the benchmark, with identities of so many tokens.
func agentic(n, prefix int) []Request {
	random := rand.New(rand.NewPCG(1, 2))
	type session struct {
		id      uint64
		context int
		blocks  []uint64
	}
	sessions := make([]session, 40)
	requests := make([]Request, 0, n)
	now, fresh := 0.0, uint64(0)
	for len(requests) < n {
		now += random.ExpFloat64() / 2
		s := &sessions[random.IntN(len(sessions))]
		if s.context == 0 || s.context > 90_000 {
			fresh++
			*s = session{id: fresh, context: 5_000, blocks: chain(fresh, 120_000/prefix)}
		}
		output := 1 + int(random.ExpFloat64()*300)
		s.context += 200 + int(random.ExpFloat64()*3_000)
		requests = append(requests, Request{
			ID: uint64(len(requests)), ArrivalSeconds: now,
			PromptTokens: s.context, OutputTokens: output, Blocks: s.blocks,
		})
		s.context += output
	}
	return requests
}

func benchmark(b *testing.B, requests []Request, prefix int) {
	b.ReportAllocs()
	completed := 0
	for b.Loop() {
		l := replay(b, prefix, over(requests, 1))
		if l.completed != len(requests) {
			b.Fatalf("%d of %d requests completed", l.completed, len(requests))
		}
		completed += l.completed
	}
	b.ReportMetric(float64(completed)/b.Elapsed().Minutes(), "requests/min")
}

func BenchmarkMooncake(b *testing.B)  { benchmark(b, readTrace(b), 512) }
func BenchmarkAgentic16(b *testing.B) { benchmark(b, agentic(6_000, 16), 16) }
func BenchmarkAgentic64(b *testing.B) { benchmark(b, agentic(6_000, 64), 64) }
