package kvpolicy_test

import (
	"fmt"
	"testing"

	"github.com/kvpolicy/kvpolicy"
	"github.com/stretchr/testify/require"
)

// perInstance runs f and reports its time for each of n instances.
func perInstance(b *testing.B, n int, f func()) {
	b.ReportAllocs()
	for b.Loop() {
		f()
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(n), "ns/instance")
}

func BenchmarkDecide(b *testing.B) {
	for _, name := range kvpolicy.PresetNames() {
		for _, n := range fleetSizes {
			b.Run(fmt.Sprintf("%s/%d", name, n), func(b *testing.B) {
				p, err := kvpolicy.Preset(name)
				require.NoError(b, err)
				s := workingFleet(n)
				perInstance(b, n, func() {
					if _, err := p.Decide(s); err != nil {
						b.Fatal(err)
					}
				})
			})
		}
	}
}

// BenchmarkDecideSeparation measures the funnel down to its last gate, for
// every source, which the plain preset is to be compared with.
func BenchmarkDecideSeparation(b *testing.B) {
	for _, n := range fleetSizes {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			p, s := kvpolicy.UnifiedV2Relaxed(), workingFleet(n)
			p.Separation.MinNewTokens, p.Separation.MinActiveDecodes = 0, 0
			p.Separation.MinSourceCacheTokens, p.Separation.MinExtraCacheTokens = 0, 0
			s.Request.Affinity = ""
			for k := range s.Instances {
				s.Instances[k].PendingPrefillTokens = s.Instances[k].CachedTokens * 40 // the warm are busy
			}
			perInstance(b, n, func() {
				if _, err := p.Decide(s); err != nil {
					b.Fatal(err)
				}
			})
		})
	}
}

// BenchmarkDecideHazard measures placement and migration where every node has
// a survival curve.
func BenchmarkDecideHazard(b *testing.B) {
	for _, running := range []bool{false, true} {
		for _, cells := range []int{16, 0} {
			for _, n := range []int{8, 64, 1024} {
				b.Run(fmt.Sprintf("running=%v/cells=%d/%d", running, cells, n), func(b *testing.B) {
					p, s := kvpolicy.HazardAware(), withCurves(b, workingFleet(n))
					p.Hazard.Cells = cells
					if running {
						s.Request.RunningOn = "inst-1"
					}
					perInstance(b, n, func() {
						if _, err := p.Decide(s); err != nil {
							b.Fatal(err)
						}
					})
				})
			}
		}
	}
}

func BenchmarkExplain(b *testing.B) {
	s, dst := workingFleet(64), make([]kvpolicy.Candidate, 0, 64)
	perInstance(b, 64, func() {
		if _, err := kvpolicy.Unified().Explain(dst, s); err != nil {
			b.Fatal(err)
		}
	})
}

// weightedScorer is the yardstick: the usual router's scorer. Each signal is
// normalised over the fleet into a map of its own, weighed, and added up in a
// map of scores, of which the best is taken.
func weightedScorer(s kvpolicy.Snapshot) (best string) {
	signals := []struct {
		weight float64
		of     func(i *kvpolicy.Instance) float64
	}{
		{2, func(i *kvpolicy.Instance) float64 { return float64(i.CachedTokens) }},
		{1, func(i *kvpolicy.Instance) float64 { return -float64(i.Requests) }},
		{1, func(i *kvpolicy.Instance) float64 { return -float64(i.KVUsedTokens) / float64(i.KVCapacityTokens) }},
	}
	scores := make(map[string]float64, len(s.Instances))
	for _, signal := range signals {
		values := make(map[string]float64, len(s.Instances))
		least, most := 0.0, 0.0
		for k := range s.Instances {
			value := signal.of(&s.Instances[k])
			values[s.Instances[k].ID] = value
			if k == 0 || value < least {
				least = value
			}
			if k == 0 || value > most {
				most = value
			}
		}
		for id, value := range values {
			normalised := 1.0
			if most > least {
				normalised = (value - least) / (most - least)
			}
			scores[id] += signal.weight * normalised
		}
	}
	highest := -1.0
	for id, score := range scores {
		if score > highest || score == highest && id < best {
			best, highest = id, score
		}
	}
	return best
}

func BenchmarkWeightedScorer(b *testing.B) {
	for _, n := range fleetSizes {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			s := workingFleet(n)
			perInstance(b, n, func() {
				if weightedScorer(s) == "" {
					b.Fatal("no best")
				}
			})
		})
	}
}
