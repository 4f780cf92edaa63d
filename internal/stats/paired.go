package stats

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"

	"github.com/kvpolicy/kvpolicy"
	"gonum.org/v1/gonum/stat"
	"gonum.org/v1/gonum/stat/distuv"
)

// Resamples is the number of bootstrap resamples behind an interval.
const Resamples = 10_000

// leastPairs is how many pairs a verdict takes: five that agree do so by chance
// in one case of sixteen, about what a 95 % interval promises.
const leastPairs = 5

// negligible is the relative difference of a pair that counts as none: what
// sums of rounded terms differ by must not be taken for an improvement.
const negligible = 1e-9

// Verdict is what a paired comparison shows.
type Verdict int

//go:generate stringer -type=Verdict -linecomment

const (
	// Lower: the interval of the difference lies below zero.
	Lower Verdict = 1 + iota // lower
	// Higher: it lies above zero.
	Higher // higher
	// NoDifferenceShown: it holds zero. That is no proof of equality.
	NoDifferenceShown // no difference shown
	// TooFewPairs: with fewer than 5 pairs the differences would all have one
	// sign by chance in one case of eight or more, and no interval is a 95 % one.
	TooFewPairs // too few pairs
)

// MarshalText gives the verdict's words.
func (v Verdict) MarshalText() ([]byte, error) {
	if !(v >= Lower && v <= TooFewPairs) {
		return nil, &kvpolicy.FieldError{Path: "verdict", Value: v.String(), Want: "be a verdict"}
	}
	return []byte(v.String()), nil
}

// Estimate is a value with its 95 % interval.
type Estimate struct {
	// Value lies between Low and High but for oddly skewed samples; with one
	// pair all three are the same.
	Value float64 `json:"value"`
	Low   float64 `json:"low"`
	High  float64 `json:"high"`
}

// Comparison is what pairs of runs say about a policy and its baseline.
type Comparison struct {
	// Pairs is the number of pairs of runs.
	Pairs int `json:"pairs"`
	// Difference is the mean of the pairs' differences, policy less baseline,
	// in the unit of the values.
	Difference Estimate `json:"difference"`
	// Ratio is the policy's mean over the baseline's: 0.94 = 6 % less. All zero
	// where some resample of the baseline has a mean that is not above 0.
	Ratio Estimate `json:"ratio"`
	// Verdict goes by Difference.
	Verdict Verdict `json:"verdict"`
}

// Compare sets values measured in paired runs against a baseline's: values[i]
// and baseline[i] come from the same arrivals. The intervals are 95 % bootstrap
// intervals: Resamples times as many pairs are drawn with replacement, and the
// quantiles of the resamples' means bound the interval. For so few pairs as
// replays have, plain quantiles at 2.5 and 97.5 % give intervals that are too
// narrow; they are widened as Student's t is (the expanded percentile interval:
// T. Hesterberg, What Teachers Should Know About the Bootstrap, The American
// Statistician 69, 2015, section 4.4): the quantile at
// Phi(-sqrt(n/(n-1)) * t(0.975, n-1)) and its opposite. With two to four pairs
// that is the least and the greatest difference, and the verdict TooFewPairs: no
// more can be read off them.
//
// A pair that differs by less than 1e-9 of its values differs by nothing. The
// draws come from the seed alone, so the result repeats bit for bit. No pairs,
// lists of different length, values that are not finite or beyond 1e100 are
// FieldErrors.
func Compare(baseline, values []float64, seed uint64) (Comparison, error) {
	for _, list := range []struct {
		path   string
		values []float64
	}{{"baseline", baseline}, {"values", values}} {
		if err := checkValues(list.path, list.values); err != nil {
			return Comparison{}, err
		}
		for i, v := range list.values {
			if !(math.Abs(v) <= 1e100) {
				return Comparison{}, &kvpolicy.FieldError{Path: fmt.Sprintf("%s[%d]", list.path, i), Value: fmt.Sprint(v), Want: "be at most 1e100 in size"}
			}
		}
	}
	if len(values) != len(baseline) {
		return Comparison{}, &kvpolicy.FieldError{Path: "values", Value: fmt.Sprintf("%d values", len(values)), Want: fmt.Sprintf("be %d values, one for each of the baseline's", len(baseline))}
	}
	n := len(values)
	values = slices.Clone(values)
	for i, b := range baseline {
		if math.Abs(values[i]-b) <= negligible*max(math.Abs(values[i]), math.Abs(b)) {
			values[i] = b
		}
	}
	c := Comparison{Pairs: n, Verdict: TooFewPairs}
	drawn := make([]int, n)
	for i := range drawn {
		drawn[i] = i
	}
	difference, ratio := means(baseline, values, drawn)
	c.Difference = Estimate{difference, difference, difference}
	if ratio > 0 {
		c.Ratio = Estimate{ratio, ratio, ratio}
	}
	if n == 1 {
		return c, nil
	}
	random := rand.New(rand.NewPCG(seed, 0))
	differences, ratios := make([]float64, Resamples), make([]float64, Resamples)
	for k := range differences {
		for i := range drawn {
			drawn[i] = random.IntN(n)
		}
		differences[k], ratios[k] = means(baseline, values, drawn)
	}
	low, high := levels(n)
	c.Difference.Low, c.Difference.High = bounds(differences, low, high)
	if slices.Min(ratios) >= 0 && ratio >= 0 {
		c.Ratio.Low, c.Ratio.High = bounds(ratios, low, high)
	} else {
		c.Ratio = Estimate{}
	}
	switch {
	case n < leastPairs: // too few
	case c.Difference.High < 0:
		c.Verdict = Lower
	case c.Difference.Low > 0:
		c.Verdict = Higher
	default:
		c.Verdict = NoDifferenceShown
	}
	return c, nil
}

// means gives the mean difference and the ratio of the means over the drawn
// pairs, the ratio -1 where the baseline's mean is not above 0 or the policy's
// is below.
func means(baseline, values []float64, drawn []int) (difference, ratio float64) {
	var of, to float64
	for _, k := range drawn {
		difference += values[k] - baseline[k]
		of += values[k]
		to += baseline[k]
	}
	difference /= float64(len(values))
	if ratio = of / to; !(of >= 0 && to > 0 && ratio <= math.MaxFloat64) {
		ratio = -1
	}
	return difference, ratio
}

// levels gives the expanded percentiles for n pairs, n at least 2.
func levels(n int) (low, high float64) {
	t := distuv.StudentsT{Mu: 0, Sigma: 1, Nu: float64(n - 1)}.Quantile(0.975)
	low = distuv.UnitNormal.CDF(-math.Sqrt(float64(n)/float64(n-1)) * t)
	return low, 1 - low
}

func bounds(resamples []float64, low, high float64) (float64, float64) {
	slices.Sort(resamples)
	return stat.Quantile(low, stat.Empirical, resamples, nil), stat.Quantile(high, stat.Empirical, resamples, nil)
}
