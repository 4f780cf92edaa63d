package kvpolicy

import (
	"math/rand/v2"
	"testing"

	"gonum.org/v1/gonum/stat/distuv"
)

// benchmarkSessions are n sessions of a spot node, four in ten still open.
func benchmarkSessions(n int) (durations []float64, observed []bool) {
	random := rand.New(rand.NewPCG(1, 2))
	weibull := distuv.Weibull{K: 1.5, Lambda: 2400, Src: random}
	for range n {
		durations = append(durations, weibull.Rand())
		observed = append(observed, random.Float64() < 0.6)
	}
	return durations, observed
}

var benchmarkExposure = Exposure{ContextTokens: 4500, DecodeRate: 12, WaitSeconds: 20, RemainingTokens: 3000, FallbackPrefillRate: 250, OverheadSeconds: 2.2}

func BenchmarkExpectedLoss(b *testing.B) {
	for _, curve := range []struct {
		name  string
		curve Curve
	}{
		{"km200", mustKaplanMeier(b, first(benchmarkSessions(200)), second(benchmarkSessions(200)))},
		{"km100000", mustKaplanMeier(b, first(benchmarkSessions(100000)), second(benchmarkSessions(100000)))},
		{"weibull", distuv.Weibull{K: 0.6, Lambda: 600}},
		{"exponential", distuv.Exponential{Rate: 1e-4}},
		{"plain", plainCurve{distuv.Weibull{K: 0.6, Lambda: 600}}},
	} {
		for _, age := range []struct {
			name    string
			seconds float64
		}{{"new", 0}, {"aged", 1800}, {"old", 20000}} {
			for _, cells := range []struct {
				name  string
				count int
			}{{"cells16", 16}, {"exact", 0}} {
				b.Run(curve.name+"/"+age.name+"/"+cells.name, func(b *testing.B) {
					b.ReportAllocs()
					for range b.N {
						if _, err := ExpectedLoss(curve.curve, age.seconds, 0, 800, cells.count, benchmarkExposure); err != nil {
							b.Fatal(err)
						}
					}
				})
			}
		}
	}
}

func BenchmarkKaplanMeier(b *testing.B) {
	durations, observed := benchmarkSessions(100000)
	b.ReportAllocs()
	for range b.N {
		if _, err := NewKaplanMeier(durations, observed); err != nil {
			b.Fatal(err)
		}
	}
}

func first(a []float64, _ []bool) []float64 { return a }
func second(_ []float64, b []bool) []bool   { return b }
