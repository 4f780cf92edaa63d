package kvpolicy_test

import (
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/kvpolicy/kvpolicy"
)

// separatedTransfers are the report's five separated requests as transfers:
// nothing was cached on the chosen instance, so that the whole context moved,
// and what the gate priced ended with the first token.
func separatedTransfers() []kvpolicy.TransferSample {
	var samples []kvpolicy.TransferSample
	for _, s := range separatedRequests() {
		samples = append(samples, kvpolicy.TransferSample{Bytes: float64(s.context) * 98_304, Seconds: s.observed})
	}
	return samples
}

func estimators() map[string]kvpolicy.Estimator {
	return map[string]kvpolicy.Estimator{
		"least squares": kvpolicy.LeastSquares(), "robust": kvpolicy.Robust(),
		"median": kvpolicy.AtQuantile(0.5), "p90": kvpolicy.AtQuantile(0.9),
	}
}

func TestFitOfTheSeparatedRequests(t *testing.T) {
	fit, err := kvpolicy.FitTransfer(separatedTransfers(), kvpolicy.LeastSquares())
	require.NoError(t, err)
	assert.InDelta(t, 1.73, fit.OverheadSeconds, 0.005)
	assert.InDelta(t, 0.1226e9, fit.Bandwidth, 0.00005e9)
	published := kvpolicy.MooncakeObserved()
	assert.InEpsilon(t, published.OverheadSeconds, fit.OverheadSeconds, 1e-3)
	assert.InEpsilon(t, published.Bandwidth, fit.Bandwidth, 1e-3)
	assert.InDelta(t, 0.80e-3, 98_304/fit.Bandwidth, 0.005e-3)
	assert.Equal(t, 5, fit.Samples)
	assert.InDelta(t, 0.67, fit.R2, 0.005)
	assert.Less(t, fit.Residuals.P10, fit.Residuals.P50)
}

// Under that fit PD-separation triggers on none of the golden snapshots, by
// strict gates or relaxed, though it does on many of them under the assumed
// link.
func TestNothingTriggersUnderTheFit(t *testing.T) {
	fit, err := kvpolicy.FitTransfer(separatedTransfers(), kvpolicy.LeastSquares())
	require.NoError(t, err)
	var assumed, fitted kvpolicy.Funnel
	for _, c := range goldenCases(t, "pdsep.jsonl") {
		policy, snapshot, err := c.decode()
		require.NoError(t, err)
		for i := range snapshot.Instances {
			snapshot.Instances[i].Bandwidth = 0
		}
		d, err := policy.Decide(snapshot)
		require.NoError(t, err)
		assumed.Add(d)
		policy.Transfer = policy.Transfer.WithLink(fit.Link)
		d, err = policy.Decide(snapshot)
		require.NoError(t, err)
		fitted.Add(d)
	}
	assert.NotZero(t, assumed.Count(kvpolicy.Triggered))
	assert.Zero(t, fitted.Count(kvpolicy.Triggered))
	for r := kvpolicy.NewLocalBelowThreshold; r < kvpolicy.CostBenefitNotEnoughMargin; r++ { // these gates see no link
		assert.Equal(t, assumed.Count(r), fitted.Count(r))
	}
}

// publishedPrefills are five prefills alone on an H20.
func publishedPrefills() []kvpolicy.PrefillSample {
	return []kvpolicy.PrefillSample{{New: 2048, Seconds: 0.143}, {New: 8192, Seconds: 0.583},
		{New: 32_768, Seconds: 4.52}, {New: 65_536, Seconds: 15.6}, {New: 131_072, Seconds: 57.0}}
}

func TestFitOfThePublishedPrefills(t *testing.T) {
	fit, err := kvpolicy.FitPrefill(publishedPrefills(), kvpolicy.LeastSquares())
	require.NoError(t, err)
	// Fitted to what was measured before it was rounded to be published.
	published := kvpolicy.H20Qwen3Coder30B().Cost
	assert.InEpsilon(t, 17_759, fit.PrefillRate, 5e-4)
	assert.InEpsilon(t, 2.711e-9, fit.PrefillQuadratic, 5e-4)
	assert.InEpsilon(t, published.PrefillRate, fit.PrefillRate, 5e-4)
	assert.InEpsilon(t, published.PrefillQuadratic, fit.PrefillQuadratic, 5e-4)
	worst := 0.0
	for _, s := range publishedPrefills() {
		n := float64(s.New)
		ratio := (n/fit.PrefillRate + fit.PrefillQuadratic*n*n) / s.Seconds
		worst = math.Max(worst, math.Abs(ratio-1))
	}
	assert.InDelta(t, 0.11, worst, 0.005, "as the profile says")
	assert.Greater(t, fit.R2, 0.99)
}

func TestFitOfThePublishedPace(t *testing.T) {
	// A stream among 8 while one prefill of 2k to 131k tokens runs beside it, and
	// while none does: contention is a matter of the prefills.
	decodes, err := kvpolicy.FitContention([]kvpolicy.ContentionSample{{0, 0.0059}, {7, 0.0077}, {7, 0.0077}, {0, 0.0059}}, kvpolicy.LeastSquares())
	require.NoError(t, err)
	assert.InDelta(t, 0.0018/7, decodes.DecodeIterationSeconds, 1e-15)
	assert.InDelta(t, 0.0059, decodes.AloneSeconds, 1e-15)
	assert.InDelta(t, 1, decodes.R2, 1e-12)
}

// atQuantile tells whether the estimator of that name refuses loads.
func atQuantile(name string) bool { return name == "median" || name == "p90" }

// Invariant: samples on a line give the line back, by every estimator, whatever
// the load.
func TestFitsAreExactOnALine(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		overhead := rapid.OneOf(rapid.Just(0.0), rapid.Float64Range(1e-3, 100)).Draw(t, "overhead")
		bandwidth := math.Exp(rapid.Float64Range(math.Log(1e5), math.Log(1e11)).Draw(t, "ln bandwidth"))
		perLoad := rapid.OneOf(rapid.Just(0.0), rapid.Float64Range(0.01, 1)).Draw(t, "per load")
		loads := rapid.Bool().Draw(t, "loads given")
		n := rapid.IntRange(4, 60).Draw(t, "n")
		var samples []kvpolicy.TransferSample
		load, sizes := 0.0, math.Max(overhead, 1e-2)*bandwidth // sizes at which both terms show
		for i := range n {
			s := kvpolicy.TransferSample{Bytes: sizes * float64(i%7+i%2)}
			if loads {
				s.DestinationLoad = float64(i * i % 11)
			}
			load += s.DestinationLoad / float64(n)
			s.Seconds = overhead + s.Bytes/bandwidth + perLoad*s.DestinationLoad
			samples = append(samples, s)
		}
		for name, by := range estimators() {
			fit, err := kvpolicy.FitTransfer(samples, by)
			if loads && atQuantile(name) {
				requireFieldError(t, err, "samples")
				continue
			}
			require.NoError(t, err, name)
			size := overhead + 10 + sizes/bandwidth
			want := overhead
			if loads {
				assert.InDelta(t, perLoad, fit.LoadSeconds, 1e-9*size, name)
				assert.InDelta(t, load, fit.LoadMean, 1e-9, name)
				want += perLoad * load
				assert.InDelta(t, overhead+3*perLoad, fit.AtLoad(3).OverheadSeconds, 1e-8*size, name)
			} else {
				assert.Equal(t, fit.Link, fit.AtLoad(3))
			}
			assert.InDelta(t, want, fit.OverheadSeconds, 1e-8*size, name)
			assert.InEpsilon(t, bandwidth, fit.Bandwidth, 1e-7, name)
			assert.LessOrEqual(t, fit.OverheadError, 1e-6*size, name)
			assert.LessOrEqual(t, fit.BandwidthError, 1e-6*bandwidth, name)
			assert.InDelta(t, 1, fit.R2, 1e-9, name)
			assert.InDelta(t, 0, fit.Residuals.Max, 1e-8*size)
		}
	})
}

// Invariant: a tenth of the samples may be anything and the robust line stays
// where it was; that of least squares does not.
func TestRobustFitIgnoresOutliers(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(10, 60).Draw(t, "n")
		var samples []kvpolicy.TransferSample
		for i := range n {
			bytes := 1e8 * float64(1+i%13)
			samples = append(samples, kvpolicy.TransferSample{Bytes: bytes, Seconds: 0.3 + bytes/2.7e9})
		}
		at := rapid.Permutation(samples).Draw(t, "order")
		for i := range n / 10 {
			at[i].Seconds = rapid.OneOf(rapid.Just(0.0), rapid.Float64Range(10, 1e6), rapid.Just(1e12)).Draw(t, "outlier")
		}
		fit, err := kvpolicy.FitTransfer(at, kvpolicy.Robust())
		require.NoError(t, err)
		assert.InEpsilon(t, 0.3, fit.OverheadSeconds, 1e-9)
		assert.InEpsilon(t, 2.7e9, fit.Bandwidth, 1e-9)
	})
}

func TestOneOutlierMovesLeastSquares(t *testing.T) {
	samples := noisyTransfers(1, 50, func(*rand.Rand, float64) float64 { return 0 })
	samples[49].Seconds += 60
	fit, err := kvpolicy.FitTransfer(samples, kvpolicy.LeastSquares())
	require.NoError(t, err)
	robust, err := kvpolicy.FitTransfer(samples, kvpolicy.Robust())
	require.NoError(t, err)
	assert.Less(t, fit.Bandwidth, 0.5*robust.Bandwidth)
}

// noisyTransfers are n transfers of 0.1 to 6.4 GB over 0.3 s + bytes/2.7 GB/s.
func noisyTransfers(seed uint64, n int, noise func(r *rand.Rand, seconds float64) float64) []kvpolicy.TransferSample {
	r := rand.New(rand.NewPCG(seed, 0))
	samples := make([]kvpolicy.TransferSample, n)
	for i := range samples {
		bytes := 1e8 * math.Exp2(6*float64(i)/float64(n-1))
		seconds := 0.3 + bytes/2.7e9
		samples[i] = kvpolicy.TransferSample{Bytes: bytes, Seconds: math.Max(0, seconds+noise(r, seconds))}
	}
	return samples
}

// The stated errors are right: over many noisy sample sets the true values lie
// within twice and five times the stated error about as often as they should,
// and the stated error is about the scatter of the fits.
func TestStatedErrors(t *testing.T) {
	const p90 = 1.2815515655446004 // of the standard normal distribution
	for _, c := range []struct {
		name           string
		by             kvpolicy.Estimator
		samples        int
		deviations     float64 // of the line fitted from the middle
		alsoByOutliers bool
	}{
		{"least squares", kvpolicy.LeastSquares(), 80, 0, false},
		{"robust", kvpolicy.Robust(), 80, 0, true},
		{"median", kvpolicy.AtQuantile(0.5), 80, 0, true},
		{"p90", kvpolicy.AtQuantile(0.9), 80, p90, false},
	} {
		for _, kind := range []string{"even", "proportional", "with outliers"} {
			noise := func(r *rand.Rand, _ float64) float64 { return 0.1 * r.NormFloat64() }
			overhead, bandwidth := 0.3+0.1*c.deviations, 2.7e9
			switch {
			case kind == "proportional":
				noise = func(r *rand.Rand, seconds float64) float64 { return 0.1 * seconds * r.NormFloat64() }
				overhead, bandwidth = 0.3*(1+0.1*c.deviations), 2.7e9/(1+0.1*c.deviations)
			case kind == "with outliers" && !c.alsoByOutliers:
				continue
			case kind == "with outliers": // on both sides, so that the median stays
				noise = func(r *rand.Rand, _ float64) float64 {
					if r.IntN(20) == 0 {
						return 5 * float64(2*r.IntN(2)-1)
					}
					return 0.1 * r.NormFloat64()
				}
			}
			const sets = 60
			var within2, within5 int
			var fits, errors []float64
			for seed := range uint64(sets) {
				fit, err := kvpolicy.FitTransfer(noisyTransfers(seed, c.samples, noise), c.by)
				require.NoError(t, err)
				for _, off := range []float64{(fit.OverheadSeconds - overhead) / fit.OverheadError, (fit.Bandwidth - bandwidth) / fit.BandwidthError} {
					if math.Abs(off) < 2 {
						within2++
					}
					if math.Abs(off) < 5 {
						within5++
					}
				}
				fits, errors = append(fits, fit.Bandwidth), append(errors, fit.BandwidthError)
			}
			label := kind + ", " + c.name
			assert.InDelta(t, 0.92, float64(within2)/(2*sets), 0.07, label)
			assert.GreaterOrEqual(t, float64(within5)/(2*sets), 0.99, label)
			slices.Sort(fits)
			slices.Sort(errors)
			scatter := (fits[sets*84/100] - fits[sets*16/100]) / 2
			assert.InDelta(t, 0, math.Log(scatter/errors[sets/2]), math.Log(1.5), label)
		}
	}
}

// The line at a quantile has that share of the samples below it, at small sizes
// as at large ones, though the scatter grows with the size.
func TestQuantileFitCovers(t *testing.T) {
	samples := noisyTransfers(7, 1000, func(r *rand.Rand, seconds float64) float64 { return seconds * r.ExpFloat64() })
	for _, q := range []float64{0.1, 0.5, 0.9, 0.99} {
		fit, err := kvpolicy.FitTransfer(samples, kvpolicy.AtQuantile(q))
		require.NoError(t, err)
		// Seconds are 1 + an exponential number of times those of the link.
		times := 1 - math.Log(1-q)
		assert.InDelta(t, 0.3*times, fit.OverheadSeconds, 4*fit.OverheadError)
		assert.InDelta(t, 2.7e9/times, fit.Bandwidth, 4*fit.BandwidthError)
		for _, half := range [][]kvpolicy.TransferSample{samples[:500], samples[500:]} {
			below := 0
			for _, s := range half {
				if s.Seconds <= fit.Link.Seconds(s.Bytes) {
					below++
				}
			}
			assert.InDelta(t, q, float64(below)/500, 3*math.Sqrt(q*(1-q)/500)+0.004)
		}
	}
}

// Invariant: no line through two samples, or through one and the origin, is
// better by the check function than the fitted one.
func TestQuantileFitIsTheBest(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		q := rapid.SampledFrom([]float64{0.05, 0.3, 0.5, 0.9}).Draw(t, "q")
		number := rapid.OneOf(rapid.Map(rapid.IntRange(0, 6), func(n int) float64 { return float64(n) }), rapid.Float64Range(0, 10))
		var samples []kvpolicy.TransferSample
		for range rapid.IntRange(3, 12).Draw(t, "n") {
			samples = append(samples, kvpolicy.TransferSample{Bytes: number.Draw(t, "bytes"), Seconds: number.Draw(t, "seconds")})
		}
		fit, err := kvpolicy.FitTransfer(samples, kvpolicy.AtQuantile(q))
		if err != nil {
			return // sizes or slope do not do; see TestFitTransferRefuses
		}
		loss := func(overhead, slope float64) float64 {
			sum := 0.0
			for _, s := range samples {
				r := s.Seconds - overhead - slope*s.Bytes
				sum += math.Max(q*r, (q-1)*r)
			}
			return sum
		}
		got := loss(fit.OverheadSeconds, 1/fit.Bandwidth)
		points := append(slices.Clone(samples), kvpolicy.TransferSample{})
		for i, a := range points {
			if i < len(samples) {
				assert.LessOrEqual(t, got, loss(a.Seconds, 0)+1e-9)
			}
			for _, b := range points[:i] {
				slope := (a.Seconds - b.Seconds) / (a.Bytes - b.Bytes)
				if overhead := a.Seconds - slope*a.Bytes; slope >= 0 && !math.IsInf(slope, 0) && overhead >= -1e-12 {
					assert.LessOrEqual(t, got, loss(math.Max(0, overhead), slope)+1e-9)
				}
			}
		}
	})
}

// Invariant: the order of the samples is of no consequence, bit by bit.
func TestFitIgnoresTheOrder(t *testing.T) {
	samples := noisyTransfers(3, 12, func(r *rand.Rand, _ float64) float64 { return 0.1 * r.NormFloat64() })
	for i := range samples {
		samples[i].DestinationLoad = float64(i * 7 % 5)
	}
	samples[4].Bytes = samples[3].Bytes
	rapid.Check(t, func(t *rapid.T) {
		permuted := rapid.Permutation(samples).Draw(t, "order")
		before := slices.Clone(permuted)
		for name, by := range estimators() {
			samples, permuted := samples, slices.Clone(permuted)
			if atQuantile(name) {
				samples = slices.Clone(samples)
				for i := range samples {
					samples[i].DestinationLoad, permuted[i].DestinationLoad = 0, 0
				}
			}
			want, err := kvpolicy.FitTransfer(samples, by)
			require.NoError(t, err)
			got, err := kvpolicy.FitTransfer(permuted, by)
			require.NoError(t, err)
			assert.Equal(t, want, got, name)
		}
		assert.Equal(t, before, permuted, "the samples are left alone")
	})
}

// Where a free line would start below zero, the overhead is 0 and the bandwidth
// the best that goes with it.
func TestNegativeOverheadIsZero(t *testing.T) {
	samples := []kvpolicy.TransferSample{{Bytes: 1e9, Seconds: 0.1}, {Bytes: 2e9, Seconds: 1}, {Bytes: 3e9, Seconds: 2}, {Bytes: 4e9, Seconds: 3}}
	for name, by := range estimators() {
		fit, err := kvpolicy.FitTransfer(samples, by)
		require.NoError(t, err, name)
		assert.InDelta(t, 0, fit.OverheadSeconds, 1e-12, name)
		assert.Greater(t, fit.Bandwidth, 0.0, name)
	}
	fit, err := kvpolicy.FitTransfer(samples, kvpolicy.LeastSquares())
	require.NoError(t, err)
	assert.InEpsilon(t, 30e9/(0.1+2+6+12), fit.Bandwidth, 1e-12) // sum of squares / sum of products
}

// Where one sample has the only other size the line hangs on it: there is a fit,
// and no saying how good it is.
func TestErrorsAreKnownOnlyWhereNoSampleDecidesAlone(t *testing.T) {
	for _, samples := range [][]kvpolicy.TransferSample{
		{{Bytes: 1e9, Seconds: 1}, {Bytes: 3e9, Seconds: 2}},
		{{Bytes: 1e9, Seconds: 1}, {Bytes: 1e9, Seconds: 1}, {Bytes: 3e9, Seconds: 2}},
	} {
		for name, by := range estimators() {
			fit, err := kvpolicy.FitTransfer(samples, by)
			require.NoError(t, err, name)
			assert.InEpsilon(t, 0.5, fit.OverheadSeconds, 1e-9, name)
			assert.InEpsilon(t, 2e9, fit.Bandwidth, 1e-9, name)
			assert.False(t, fit.ErrorsKnown, name)
			assert.Zero(t, fit.BandwidthError, name)
			fit, err = kvpolicy.FitTransfer(append(samples, kvpolicy.TransferSample{Bytes: 3e9, Seconds: 2},
				kvpolicy.TransferSample{Bytes: 1e9, Seconds: 1}), by)
			require.NoError(t, err, name)
			assert.True(t, fit.ErrorsKnown, name)
		}
	}
}

func TestFitTransferRefuses(t *testing.T) {
	good := []kvpolicy.TransferSample{{Bytes: 1e9, Seconds: 1}, {Bytes: 2e9, Seconds: 1.5}, {Bytes: 3e9, Seconds: 2}, {Bytes: 4e9, Seconds: 3}}
	nan := math.NaN()
	for _, c := range []struct {
		name    string
		samples []kvpolicy.TransferSample
		path    string
		says    string
	}{
		{"none", nil, "samples", "at least two"},
		{"one", good[:1], "samples", "at least two"},
		{"one size", []kvpolicy.TransferSample{{1e9, 1, 0}, {1e9, 2, 0}, {1e9, 3, 0}}, "samples", "log transfers of short and of long contexts"},
		{"falling", []kvpolicy.TransferSample{{1e9, 3, 0}, {2e9, 2, 0}, {3e9, 1, 0}, {4e9, 0, 0}}, "samples", "add large transfers"},
		{"flat", []kvpolicy.TransferSample{{1e9, 0.1, 0}, {2e9, 0.1, 0}, {3e9, 0.1, 0}, {4e9, 0.1, 0}}, "samples", "add large transfers"},
		{"load follows size", []kvpolicy.TransferSample{{1e9, 1, 1}, {2e9, 2, 2}, {3e9, 3, 3}, {4e9, 4, 4}}, "samples", "leave the loads out"},
		{"negative bytes", append(slices.Clone(good), kvpolicy.TransferSample{Bytes: -1}), "samples[4].bytes", "0 to 1e27"},
		{"NaN bytes", append(slices.Clone(good), kvpolicy.TransferSample{Bytes: nan}), "samples[4].bytes", "0 to 1e27"},
		{"NaN seconds", append(slices.Clone(good), kvpolicy.TransferSample{Seconds: nan}), "samples[4].seconds", "0 to 1e12"},
		{"infinite seconds", append(slices.Clone(good), kvpolicy.TransferSample{Seconds: math.Inf(1)}), "samples[4].seconds", "0 to 1e12"},
		{"NaN load", append(slices.Clone(good), kvpolicy.TransferSample{DestinationLoad: nan}), "samples[4].destination_load", "1e-9 to 1e15"},
	} {
		for name, by := range estimators() {
			fit, err := kvpolicy.FitTransfer(c.samples, by)
			requireFieldError(t, err, c.path)
			assert.ErrorContains(t, err, c.says, c.name+", "+name)
			assert.Zero(t, fit)
		}
	}
	for path, by := range map[string]kvpolicy.Estimator{
		"estimator": {}, "estimator.quantile": kvpolicy.AtQuantile(nan),
	} {
		_, err := kvpolicy.FitTransfer(good, by)
		requireFieldError(t, err, path)
	}
	for _, q := range []float64{0, 1, -1, 90} {
		_, err := kvpolicy.FitTransfer(good, kvpolicy.AtQuantile(q))
		requireFieldError(t, err, "estimator.quantile")
	}
}

// Invariant: whatever the samples, there is an error or a usable link with
// finite figures.
func TestFitsAreFinite(t *testing.T) {
	bytes := rapid.OneOf(rapid.SampledFrom([]float64{0, 5e-324, 1, 1e9, 1e27}), rapid.Float64Range(0, 1e27), rapid.Float64Range(0, 1e10))
	seconds := rapid.OneOf(rapid.SampledFrom([]float64{0, 5e-324, 1, 1e12}), rapid.Float64Range(0, 1e12), rapid.Float64Range(0, 10))
	load := rapid.OneOf(rapid.Just(0.0), rapid.SampledFrom([]float64{1, 5e-324, 1e15}))
	fitted := 0
	rapid.Check(t, func(t *rapid.T) {
		by := rapid.OneOf(rapid.SampledFrom([]kvpolicy.Estimator{kvpolicy.LeastSquares(), kvpolicy.Robust()}),
			rapid.Map(rapid.Float64Range(0.001, 0.999), kvpolicy.AtQuantile)).Draw(t, "by")
		n := rapid.IntRange(3, 9).Draw(t, "n")
		transfers := make([]kvpolicy.TransferSample, n)
		prefills := make([]kvpolicy.PrefillSample, n)
		paces := make([]kvpolicy.ContentionSample, n)
		count := rapid.OneOf(rapid.SampledFrom([]int64{1, 1e9}), rapid.Int64Range(1, 1e5))
		for i := range n {
			transfers[i] = kvpolicy.TransferSample{Bytes: bytes.Draw(t, "bytes"), Seconds: seconds.Draw(t, "seconds"), DestinationLoad: load.Draw(t, "load")}
			prefills[i] = kvpolicy.PrefillSample{New: count.Draw(t, "new"), Cached: rapid.SampledFrom([]int64{0, 1, 1e15}).Draw(t, "cached"), Seconds: math.Max(1e-9, transfers[i].Seconds)}
			paces[i] = kvpolicy.ContentionSample{Requests: count.Draw(t, "requests"), SecondsPerToken: transfers[i].Seconds}
		}
		check := func(fit any, err error) {
			if err != nil {
				require.ErrorIs(t, err, kvpolicy.ErrInvalid)
				return
			}
			fitted++
			_, err = json.Marshal(fit) // fails on NaN and Inf
			require.NoError(t, err)
		}
		transfer, err := kvpolicy.FitTransfer(transfers, by)
		check(transfer, err)
		if err == nil {
			require.True(t, transfer.Bandwidth >= 1e-9 && transfer.Bandwidth <= 1e18 && transfer.OverheadSeconds >= 0)
		}
		prefill, err := kvpolicy.FitPrefill(prefills, by)
		check(prefill, err)
		pace, err := kvpolicy.FitContention(paces, by)
		check(pace, err)
	})
	assert.NotZero(t, fitted)
}

// Invariant: prefills and paces by the model give its parameters back.
func TestFitPrefillAndContentionAreExact(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		rate := rapid.Float64Range(10, 1e6).Draw(t, "rate")
		quadratic := rapid.OneOf(rapid.Just(0.0), rapid.Float64Range(1e-10, 1e-7)).Draw(t, "quadratic")
		alone := rapid.OneOf(rapid.Just(0.0), rapid.Float64Range(1e-3, 0.1)).Draw(t, "alone")
		iteration := rapid.Float64Range(1e-4, 0.1).Draw(t, "iteration")
		policy := kvpolicy.UnifiedNoAffinity()
		policy.Cost.PrefillRate, policy.Cost.PrefillQuadratic = rate, quadratic
		var prefills []kvpolicy.PrefillSample
		var paces []kvpolicy.ContentionSample
		for i := range rapid.IntRange(5, 40).Draw(t, "n") {
			s := kvpolicy.PrefillSample{New: int64(500 * (1 + i%9)), Cached: int64(3000 * (i % 5))}
			// What the cost itself says, so that fit and cost share one model.
			d, err := policy.Decide(kvpolicy.Snapshot{
				Request:   kvpolicy.Request{ContextTokens: s.Cached + s.New},
				Instances: []kvpolicy.Instance{{ID: "i", CachedTokens: s.Cached}},
			})
			require.NoError(t, err)
			s.Seconds = d.Cost.Prefill
			prefills = append(prefills, s)
			paces = append(paces, kvpolicy.ContentionSample{Requests: int64(i % 6), SecondsPerToken: alone + iteration*float64(i%6)})
		}
		for name, by := range estimators() {
			fit, err := kvpolicy.FitPrefill(prefills, by)
			require.NoError(t, err, name)
			assert.InEpsilon(t, rate, fit.PrefillRate, 1e-6, name)
			assert.InDelta(t, quadratic, fit.PrefillQuadratic, 1e-9*(quadratic+1/rate), name)
			pace, err := kvpolicy.FitContention(paces, by)
			require.NoError(t, err, name)
			assert.InEpsilon(t, iteration, pace.DecodeIterationSeconds, 1e-7, name)
			assert.InDelta(t, alone, pace.AloneSeconds, 1e-8, name)
		}
	})
}

func TestFitPrefillAndContentionRefuse(t *testing.T) {
	for path, samples := range map[string][]kvpolicy.PrefillSample{
		"samples":            {{New: 8, Seconds: 1}, {New: 8, Seconds: 2}, {New: 8, Seconds: 2}},
		"samples[1].new":     {{New: 8, Seconds: 1}, {New: 0, Seconds: 1}},
		"samples[0].cached":  {{New: 8, Cached: -1, Seconds: 1}},
		"samples[2].seconds": {{New: 8, Seconds: 1}, {New: 9, Seconds: 1}, {New: 9, Seconds: 0}},
		"prefill_quadratic":  {{New: 1, Seconds: 3}, {New: 2, Seconds: 9}, {New: 3, Seconds: 19}, {New: 4, Seconds: 33}},
	} {
		_, err := kvpolicy.FitPrefill(samples, kvpolicy.LeastSquares())
		requireFieldError(t, err, path)
	}
	var square []kvpolicy.PrefillSample
	for n := int64(1); n <= 9; n++ {
		square = append(square, kvpolicy.PrefillSample{New: 1000 * n, Seconds: 0.1 * float64(n*n*n)})
	}
	_, err := kvpolicy.FitPrefill(square, kvpolicy.LeastSquares())
	requireFieldError(t, err, "samples")
	assert.ErrorContains(t, err, "add short prefills")

	for path, samples := range map[string][]kvpolicy.ContentionSample{
		"samples":                      {{1, 0.2}, {2, 0.1}, {3, 0.1}, {4, 0.1}},
		"samples[0].requests":          {{-1, 0.2}},
		"samples[1].seconds_per_token": {{1, 0.2}, {1, math.NaN()}},
	} {
		_, err := kvpolicy.FitContention(samples, kvpolicy.LeastSquares())
		requireFieldError(t, err, path)
	}
}

// Ours, as docs/calibration.md works through it.
func ExampleFitTransfer() {
	samples := []kvpolicy.TransferSample{ // the five separated requests of the elastic-migration-v2 report
		{Bytes: 21963 * 98304, Seconds: 3.69},
		{Bytes: 8706 * 98304, Seconds: 12.48},
		{Bytes: 13616 * 98304, Seconds: 18.33},
		{Bytes: 49483 * 98304, Seconds: 45.13},
		{Bytes: 19806 * 98304, Seconds: 20.06},
	}
	fit, err := kvpolicy.FitTransfer(samples, kvpolicy.LeastSquares())
	if err != nil {
		fmt.Println(err)
		return
	}
	policy := kvpolicy.UnifiedV2Relaxed()
	policy.Transfer = policy.Transfer.WithLink(fit.Link)
	fmt.Printf("%.2f s + bytes / %.4f GB/s, R2 %.2f\n", fit.OverheadSeconds, fit.Bandwidth/1e9, fit.R2)
	regime, _, _ := kvpolicy.Crossover(policy.Transfer, policy.Transfer.Bandwidth, policy.Cost.PrefillRate)
	fmt.Println(strings.ReplaceAll(regime.String(), "_", " "))
	// Output:
	// 1.73 s + bytes / 0.1226 GB/s, R2 0.67
	// never transfer
}

// Not all pairs of many samples are used, and those that are must not favour
// the slow ones of each size.
func TestRobustIsAsGoodOnSomePairs(t *testing.T) {
	for _, n := range []int{400, 500, 700, 1000} {
		for _, perSize := range []int{1, 2, 4, 10} {
			random := rand.New(rand.NewPCG(uint64(n), uint64(perSize)))
			var samples []kvpolicy.TransferSample
			for i := range n {
				bytes := float64(1+i/perSize) / float64(n/perSize) * 6e9
				samples = append(samples, kvpolicy.TransferSample{Bytes: bytes, Seconds: 0.3 + bytes/2.7e9 + random.ExpFloat64()})
			}
			fit, err := kvpolicy.FitTransfer(samples, kvpolicy.Robust())
			require.NoError(t, err)
			var slopes []float64 // of all pairs
			for i, a := range samples {
				for _, b := range samples[i+1:] {
					if b.Bytes > a.Bytes {
						slopes = append(slopes, (b.Seconds-a.Seconds)/(b.Bytes-a.Bytes))
					}
				}
			}
			slices.Sort(slopes)
			assert.InEpsilon(t, slopes[len(slopes)/2], 1/fit.Bandwidth, 0.04, "%d samples, %d of each size", n, perSize)
		}
	}
}
