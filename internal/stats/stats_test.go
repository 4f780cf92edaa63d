package stats

import (
	"math"
	"math/rand/v2"
	"slices"
	"sort"
	"testing"

	"github.com/kvpolicy/kvpolicy"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// slowQuantile counts: the least value that at least p*n values do not exceed.
func slowQuantile(p float64, values []float64) float64 {
	best := math.Inf(1)
	for _, v := range values {
		count := 0
		for _, other := range values {
			if other <= v {
				count++
			}
		}
		if float64(count) >= p*float64(len(values)) {
			best = min(best, v)
		}
	}
	return best
}

// values draws latencies: ties, zeros, neighbours of bins' bounds, tiny and
// huge ones.
func values(t *rapid.T, least int) []float64 {
	return rapid.SliceOfN(rapid.OneOf(
		rapid.SampledFrom([]float64{0, 0, 1e-12, smallest, 1, 1, math.Nextafter(1, 0), math.Nextafter(1, 2), 1 + 1.0/128, 3, 1e6, largest}),
		rapid.Float64Range(0, 100),
		rapid.Float64Range(0, largest),
	), least, 200).Draw(t, "values")
}

func share(t *rapid.T) float64 {
	return rapid.OneOf(rapid.SampledFrom([]float64{0, 0.5, 0.9, 0.99, 1}), rapid.Float64Range(0, 1)).Draw(t, "p")
}

func TestQuantileIsTheSlowOne(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		v, p := values(t, 1), share(t)
		before := slices.Clone(v)
		got, err := Quantile(p, v)
		require.NoError(t, err)
		assert.Equal(t, before, v)
		assert.Equal(t, slowQuantile(p, v), got)
	})
}

func TestQuantileClosedForm(t *testing.T) {
	v := []float64{40, 10, 30, 20}
	for p, want := range map[float64]float64{0: 10, 0.25: 10, 0.26: 20, 0.5: 20, 0.75: 30, 0.9: 40, 1: 40} {
		got, err := Quantile(p, v)
		require.NoError(t, err)
		assert.Equal(t, want, got, "p = %v", p)
	}
}

func TestBadInput(t *testing.T) {
	nan, inf := math.NaN(), math.Inf(1)
	for _, c := range []struct {
		name string
		err  error
		want string
	}{
		{"p above 1", second(Quantile(1.5, []float64{1})), "p is 1.5, must be from 0 to 1"},
		{"p NaN", second(Quantile(nan, []float64{1})), "p is NaN"},
		{"no values", second(Quantile(0.5, nil)), "values must hold at least one value"},
		{"NaN", second(Quantile(0.5, []float64{1, nan})), "values[1] is NaN, must be finite"},
		{"hotspot infinite", second(HotspotIndex([]float64{inf})), "values[0] is +Inf"},
		{"hotspot negative", second(HotspotIndex([]float64{2, -1, 3})), "values is -1, must be at least 0"},
		{"hotspot over 0", second(HotspotIndex([]float64{0, 0, 3})), "values is 0, must have a median"},
		{"sketch NaN", new(Sketch).Add(nan), "value is NaN"},
		{"sketch negative", new(Sketch).Add(-1e-300), "value is -1e-300"},
		{"sketch too large", new(Sketch).Add(2 * largest), "value is 2.199023255552e+12"},
		{"pairs", second(Compare([]float64{1, 2}, []float64{1}, 0)), "values is 1 values, must be 2 values"},
		{"no pairs", second(Compare(nil, nil, 0)), "baseline must hold"},
		{"pair NaN", second(Compare([]float64{1}, []float64{nan}, 0)), "values[0] is NaN"},
		{"pair huge", second(Compare([]float64{1, -1e101}, []float64{1, 1}, 0)), "baseline[1] is -1e+101"},
		{"verdict", second(Verdict(0).MarshalText()), "verdict is Verdict(0)"},
	} {
		t.Run(c.name, func(t *testing.T) {
			assert.ErrorContains(t, c.err, c.want)
			assert.ErrorIs(t, c.err, kvpolicy.ErrInvalid)
		})
	}
}

func second[T any](_ T, err error) error { return err }

func TestHotspotIndex(t *testing.T) {
	for _, c := range []struct {
		values []float64
		want   float64
	}{
		{[]float64{8, 2, 4, 1}, 4}, // the median of an even number is the lower
		{[]float64{3, 6, 2}, 2},
		{[]float64{5}, 1},
		{[]float64{0, 0}, 1},
		{[]float64{7, 7, 7, 7}, 1},
	} {
		got, err := HotspotIndex(c.values)
		require.NoError(t, err)
		assert.Equal(t, c.want, got)
	}
}

func collect(t require.TestingT, values []float64) *Sketch {
	var s Sketch
	for _, v := range values {
		require.NoError(t, s.Add(v))
	}
	return &s
}

func TestSketchIsWithinItsError(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		v, p := values(t, 1), share(t)
		s := collect(t, v)
		want := slowQuantile(p, v)
		assert.LessOrEqual(t, math.Abs(s.Quantile(p)-want), max(want*RelativeError, smallest))
		assert.EqualValues(t, len(v), s.Count())
		assert.Equal(t, slices.Min(v), s.Min())
		assert.Equal(t, slices.Max(v), s.Max())
		assert.Equal(t, s.Min(), s.Quantile(0))
		assert.Equal(t, s.Max(), s.Quantile(1))
		sort.Float64s(v)
		sum := 0.0
		for _, x := range v {
			sum += x
		}
		assert.InEpsilon(t, 1+sum, 1+s.Sum(), 1e-14)
		assert.InEpsilon(t, 1+sum/float64(len(v)), 1+s.Mean(), 1e-14)
	})
}

// The greatest value is exact, but must not stand for others of its bin.
func TestSketchOfOneBin(t *testing.T) {
	s := collect(t, []float64{1, 1, 1 + 1.0/129})
	assert.InEpsilon(t, 1, s.Quantile(0.5), RelativeError)
	assert.Equal(t, 1+1.0/129, s.Quantile(1))
}

// The bound is reached at the foot of a doubling, and nowhere exceeded.
func TestSketchErrorBoundIsTight(t *testing.T) {
	worst := 0.0
	for i := range 1 << 14 {
		v := 1 + float64(i)/(1<<14)
		s := collect(t, []float64{0.5, v, 4, 4})
		worst = max(worst, math.Abs(s.Quantile(0.5)/v-1))
	}
	assert.LessOrEqual(t, worst, RelativeError)
	assert.Greater(t, worst, 0.98*RelativeError)
}

func TestSketchCDF(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		v := values(t, 1)
		s := collect(t, v)
		before, reached := math.Inf(-1), 0.0
		for value, share := range s.CDF() {
			assert.Greater(t, value, before)
			assert.Greater(t, share, reached)
			before, reached = value, share
			// The step stands where the values do.
			below := 0
			for _, x := range v {
				if x <= value+max(value*3*RelativeError, smallest) {
					below++
				}
			}
			assert.LessOrEqual(t, share, float64(below)/float64(len(v)))
		}
		assert.Equal(t, s.Max(), before)
		assert.Equal(t, 1.0, reached)
	})
	for range new(Sketch).CDF() {
		t.Error("an empty sketch has no steps")
	}
}

func TestSketchMergeIsAddingAll(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a, b := values(t, 0), values(t, 0)
		merged, all := collect(t, a), collect(t, append(slices.Clone(a), b...))
		other := collect(t, b)
		merged.Merge(other)
		assert.Equal(t, other, collect(t, b), "the other is not changed")
		assert.InEpsilon(t, 1+all.Sum(), 1+merged.Sum(), 1e-14)
		merged.sum, merged.lost, all.sum, all.lost = 0, 0, 0, 0
		assert.Equal(t, all, merged)
	})
}

func TestSketchSumIsCompensated(t *testing.T) {
	var s Sketch
	require.NoError(t, s.Add(largest))
	for range 1 << 14 {
		require.NoError(t, s.Add(1e-6))
	}
	assert.Equal(t, largest+(1<<14)*1e-6, s.Sum())
}

func TestSketchMemoryIsBounded(t *testing.T) {
	var s Sketch
	for i := range 200_000 {
		require.NoError(t, s.Add(float64(i)/1000))
	}
	assert.LessOrEqual(t, len(s.bins), 18*128, "1 ms to 200 s is 18 doublings")
	require.NoError(t, s.Add(smallest))
	require.NoError(t, s.Add(largest))
	assert.Equal(t, 71*128, len(s.bins))
	empty := new(Sketch)
	for _, v := range []float64{empty.Mean(), empty.Min(), empty.Max(), empty.Sum(), empty.Quantile(0.5), empty.Quantile(1), empty.Quantile(math.NaN())} {
		assert.Zero(t, v)
	}
}

func TestCompareClosedForms(t *testing.T) {
	five := []float64{10, 20, 30, 40, 50}
	for _, c := range []struct {
		name             string
		baseline, values []float64
		want             Comparison
	}{
		{"the same", five, five, Comparison{5, Estimate{}, Estimate{1, 1, 1}, NoDifferenceShown}},
		{"all lower by 2", five, []float64{8, 18, 28, 38, 48}, Comparison{5, Estimate{-2, -2, -2}, Estimate{140.0 / 150, 0, 0}, Lower}},
		{"rounding noise is no improvement", five, []float64{10 * (1 - 1e-12), 20 * (1 - 1e-12), 30 * (1 - 1e-12), 40 * (1 - 1e-12), 50 * (1 - 1e-12)}, Comparison{5, Estimate{}, Estimate{1, 1, 1}, NoDifferenceShown}},
		{"one pair", []float64{4}, []float64{6}, Comparison{1, Estimate{2, 2, 2}, Estimate{1.5, 1.5, 1.5}, TooFewPairs}},
		{"two pairs: least and greatest", []float64{10, 10}, []float64{11, 13}, Comparison{2, Estimate{2, 1, 3}, Estimate{1.2, 1.1, 1.3}, TooFewPairs}},
		{"three that disagree", []float64{10, 10, 10}, []float64{11, 13, 9}, Comparison{3, Estimate{1, -1, 3}, Estimate{1.1, 0.9, 1.3}, TooFewPairs}},
		{"four that agree", []float64{10, 10, 10, 10}, []float64{11, 11, 11, 11}, Comparison{4, Estimate{1, 1, 1}, Estimate{1.1, 1.1, 1.1}, TooFewPairs}},
		{"five that agree", []float64{10, 10, 10, 10, 10}, []float64{11, 11, 11, 11, 11}, Comparison{5, Estimate{1, 1, 1}, Estimate{1.1, 1.1, 1.1}, Higher}},
		{"no ratio to zero", []float64{0, 0}, []float64{1, 1}, Comparison{2, Estimate{1, 1, 1}, Estimate{}, TooFewPairs}},
		{"no ratio to a resample of zero", []float64{0, 1}, []float64{1, 2}, Comparison{2, Estimate{1, 1, 1}, Estimate{}, TooFewPairs}},
		{"no ratio to negatives", []float64{-1, -2}, []float64{1, 1}, Comparison{2, Estimate{2.5, 2, 3}, Estimate{}, TooFewPairs}},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := Compare(c.baseline, c.values, 7)
			require.NoError(t, err)
			if c.want.Ratio.Low == 0 {
				got.Ratio.Low, got.Ratio.High = 0, 0
			}
			for _, pair := range [][2]Estimate{{c.want.Difference, got.Difference}, {c.want.Ratio, got.Ratio}} {
				assert.InDelta(t, pair[0].Value, pair[1].Value, 1e-12)
				assert.InDelta(t, pair[0].Low, pair[1].Low, 1e-12)
				assert.InDelta(t, pair[0].High, pair[1].High, 1e-12)
			}
			assert.Equal(t, c.want.Verdict, got.Verdict)
			assert.Equal(t, c.want.Pairs, got.Pairs)
		})
	}
}

func TestCompareProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(2, 8).Draw(t, "n")
		number := rapid.OneOf(rapid.SampledFrom([]float64{0, 1, 1, -1, 1e-9, 1e100, -1e100}), rapid.Float64Range(-100, 100))
		a := rapid.SliceOfN(number, n, n).Draw(t, "a")
		b := rapid.SliceOfN(number, n, n).Draw(t, "b")
		seed := rapid.Uint64().Draw(t, "seed")
		forth, err := Compare(a, b, seed)
		require.NoError(t, err)
		again, err := Compare(a, b, seed)
		require.NoError(t, err)
		assert.Equal(t, forth, again)
		for _, v := range []float64{forth.Difference.Value, forth.Difference.Low, forth.Difference.High, forth.Ratio.Value, forth.Ratio.Low, forth.Ratio.High} {
			assert.False(t, math.IsNaN(v) || math.IsInf(v, 0))
		}
		assert.LessOrEqual(t, forth.Difference.Low, forth.Difference.High)
		assert.LessOrEqual(t, forth.Ratio.Low, forth.Ratio.High)
		assert.Equal(t, n < 5, forth.Verdict == TooFewPairs)

		// The other way round the same is said with the other sign.
		back, err := Compare(b, a, seed)
		require.NoError(t, err)
		assert.Equal(t, map[Verdict]Verdict{Lower: Higher, Higher: Lower, NoDifferenceShown: NoDifferenceShown, TooFewPairs: TooFewPairs}[forth.Verdict], back.Verdict)
	})
}

// Samples of normal differences: the interval holds the mean about as often as
// it says.
func TestIntervalsCover(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for _, n := range []int{5, 10} {
		const samples = 200
		held := 0
		for seed := range uint64(samples) {
			a, b := make([]float64, n), make([]float64, n)
			for i := range a {
				a[i] = 50 + 20*random.NormFloat64()
				b[i] = a[i] + random.NormFloat64()
			}
			c, err := Compare(a, b, seed)
			require.NoError(t, err)
			if c.Difference.Low <= 0 && c.Difference.High >= 0 {
				held++
			}
		}
		t.Logf("%d pairs: %.3f", n, float64(held)/samples)
		assert.InDelta(t, 0.95, float64(held)/samples, 0.05, "%d pairs", n)
	}
}

func TestVerdictWords(t *testing.T) {
	for verdict, want := range map[Verdict]string{Lower: "lower", Higher: "higher", NoDifferenceShown: "no difference shown", TooFewPairs: "too few pairs"} {
		text, err := verdict.MarshalText()
		require.NoError(t, err)
		assert.Equal(t, want, string(text))
	}
}
