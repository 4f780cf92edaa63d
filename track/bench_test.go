//go:build unix

package track_test

import (
	"fmt"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/kvpolicy/kvpolicy"
	"github.com/kvpolicy/kvpolicy/track"
)

// BenchmarkDecisions is a router at work on one core: 8 goroutines, each with
// 32 requests in flight, for each of which it hashes the prompt, takes a
// snapshot of 64 instances, decides and begins, and later sees a first token
// and progress, and ends it, so that every goroutine writes to the tracker that
// all read. Each session's prompts share a system prompt of a quarter with all
// others. Besides decisions by the clock it reports decisions by the processor
// time that they took, which does not depend on what else the machine does.
func BenchmarkDecisions(b *testing.B) {
	for _, c := range []struct {
		tokens, block int
	}{{0, 16}, {1024, 16}, {4096, 64}, {4096, 16}, {32768, 512}, {32768, 16}} {
		b.Run(fmt.Sprintf("tokens=%d/block=%d", c.tokens, c.block), func(b *testing.B) {
			defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
			config := track.DefaultConfig()
			config.BlockTokens = c.block
			tracker := fleet(b, config, 64)
			const goroutines, inFlight, sessions = 8, 32, 256
			conversations := make([][]uint32, sessions)
			names := make([]string, sessions)
			for i := range conversations {
				conversations[i] = conversation(i, c.tokens/4, c.tokens)
				names[i] = fmt.Sprint("session ", i)
			}
			var next atomic.Int64
			work := func(requests int64) {
				last := next.Load() + requests
				var group sync.WaitGroup
				for range goroutines {
					group.Add(1)
					go func() {
						defer group.Done()
						policy := kvpolicy.Unified()
						var buffer track.Buffer
						var blocks []uint64
						var flying [inFlight]track.Key
						for {
							n := next.Add(1)
							if n > last {
								break
							}
							now := at(2 + float64(n)/1e5)
							session := n % sessions
							prompt := tracker.TokenPrompt(blocks, track.Salt{Model: "m"}, conversations[session])
							blocks = prompt.Blocks
							r := track.Request{Session: names[session], Prompt: prompt}
							r.ID, r.ContextTokens, r.RemainingTokens = strconv.FormatInt(n, 10), int64(c.tokens), 100
							d, err := policy.Decide(tracker.Snapshot(r, now, &buffer))
							if err != nil {
								b.Error(err)
								break
							}
							if err := tracker.Begin(r, d, now); err != nil {
								b.Error(err)
								break
							}
							oldest := &flying[n/goroutines%inFlight]
							tracker.FirstToken(*oldest, now)
							tracker.Progress(*oldest, 50, now)
							tracker.End(*oldest, now)
							*oldest = r.Key()
						}
						next.Add(-1)
						for _, key := range flying {
							tracker.End(key, at(3))
						}
					}()
				}
				group.Wait()
			}
			work(4 * sessions) // so that prompts are cached
			b.ReportAllocs()
			b.ResetTimer()
			before := processorSeconds(b)
			work(int64(b.N))
			b.ReportMetric(float64(b.N)/(processorSeconds(b)-before), "decisions/cpu-s")
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "decisions/s")
		})
	}
}

// processorSeconds is the processor time that the process has taken.
func processorSeconds(b *testing.B) float64 {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return float64(u.Utime.Nano()+u.Stime.Nano()) / 1e9
}
