package kvpolicy

import (
	"math"
	"slices"

	"gonum.org/v1/gonum/stat"
)

// Estimator says how a line is laid through samples; see LeastSquares, Robust
// and AtQuantile. The zero Estimator is none, and an error where it is used.
//
// Whatever the estimator, neither intercept nor slope is ever negative: where
// the unconstrained line would have it so, the best line with a zero there is
// taken.
type Estimator struct {
	kind     estimatorKind
	quantile float64
}

type estimatorKind uint8

const (
	leastSquares estimatorKind = 1 + iota
	theilSen
	quantileRegression
)

// LeastSquares is the line of least squares, which meets the mean. One wild
// sample moves it as far as you like.
func LeastSquares() Estimator { return Estimator{kind: leastSquares} }

// Robust is the line of Theil and Sen, which meets the median: the median of
// the slopes between any two samples, then the median of what remains. Up to
// 29 % of the samples may be anything. Of more than about 360 samples not all
// pairs are used, but some 65,000 spread evenly over them, or 8 a sample. (Sen,
// JASA 63, 1968.)
func Robust() Estimator { return Estimator{kind: theilSen} }

// AtQuantile is the line that a share q of the samples lies below, above 0 and
// below 1, at small sizes as at large ones: 0.9 for a gate that is to hold for
// nine transfers in ten. It is linear quantile regression (Koenker and Bassett,
// Econometrica 46, 1978), and no robust line moved up, for the slow transfers
// are not slower by the same seconds at every size.
func AtQuantile(q float64) Estimator { return Estimator{kind: quantileRegression, quantile: q} }

func (e Estimator) validate() error {
	switch {
	case !(e.kind >= leastSquares && e.kind <= quantileRegression):
		return fieldError("estimator", "", "be LeastSquares(), Robust() or AtQuantile(q)")
	case e.kind == quantileRegression && !(e.quantile > 0 && e.quantile < 1):
		return fieldError("estimator.quantile", e.quantile, "be above 0 and below 1 (0.9 for the p90)")
	}
	return nil
}

// sameSize is the share of the extent in x within which two sizes are the same
// but for rounding.
const sameSize = 1e-9

// cloud is what a line is laid through, sorted by x.
type cloud struct {
	x, y []float64
	// weights count in least squares alone; nil for none. What lies below a
	// quantile is a matter of how many.
	weights []float64
}

// width is the extent in x.
func (c cloud) width() float64 { return c.x[len(c.x)-1] - c.x[0] }

// line is intercept + slope * x.
type line struct{ intercept, slope float64 }

func (l line) at(x float64) float64 { return l.intercept + float64(l.slope*x) }

// lay lays a line of non-negative coefficients through c, which has two sizes.
func (e Estimator) lay(c cloud) line {
	if e.kind == quantileRegression {
		return layQuantile(c, e.quantile)
	}
	l := e.free(c)
	switch {
	case l.slope < 0 && e.kind == theilSen:
		return line{intercept: median(slices.Clone(c.y))}
	case l.slope < 0:
		return line{intercept: stat.Mean(c.y, c.weights)}
	case l.intercept < 0 && e.kind == theilSen:
		return line{slope: max(0, throughOrigin(c))}
	case l.intercept < 0:
		_, slope := stat.LinearRegression(c.x, c.y, c.weights, true)
		return line{slope: max(0, slope)}
	}
	return l
}

// free lays a line of any sign: that of least squares, else the robust one.
func (e Estimator) free(c cloud) line {
	if e.kind == leastSquares {
		alpha, beta := stat.LinearRegression(c.x, c.y, c.weights, false)
		return line{alpha, beta}
	}
	slope := medianSlope(c)
	return line{median(remainders(c, slope)), slope}
}

// remainders are the samples less slope * x.
func remainders(c cloud, slope float64) []float64 {
	r := make([]float64, len(c.x))
	for i, x := range c.x {
		r[i] = c.y[i] - float64(slope*x)
	}
	return r
}

// medianSlope is the median of the slopes between pairs, 0 where there is none.
func medianSlope(c cloud) float64 {
	n := len(c.x)
	pairs := int64(n) * int64(n-1) / 2
	step := 1 + int(pairs/max(1<<16, 8*int64(n)))
	apart := sameSize * c.width() // slopes between the same sizes would be noise
	slopes := make([]float64, 0, int(pairs/int64(step))+n)
	for i := range n {
		// Samples come sorted, by what they took within a size: j must not be tied to
		// the place of i in its size. (With i%step for i/step an even step would
		// leave every second sample out of the second places.)
		for j := i + 1 + i/step%step; j < n; j += step {
			if dx := c.x[j] - c.x[i]; dx > apart {
				slopes = append(slopes, (c.y[j]-c.y[i])/dx)
			}
		}
	}
	return median(slopes)
}

// throughOrigin is the median slope from the origin.
func throughOrigin(c cloud) float64 {
	slopes := make([]float64, 0, len(c.x))
	for i, x := range c.x {
		if x > 0 {
			slopes = append(slopes, c.y[i]/x)
		}
	}
	return median(slopes)
}

// median sorts x; it is 0 for none.
func median(x []float64) float64 {
	if len(x) == 0 {
		return 0
	}
	slices.Sort(x)
	high, low := len(x)/2, (len(x)-1)/2
	return x[low] + (x[high]-x[low])/2
}

// layQuantile minimizes sum(rho(y - intercept - slope x)) with rho(r) = q r for
// r >= 0, else (q - 1) r. Given the slope the best intercept is the q-quantile
// of what remains, or 0 where that is negative; what is left is convex in the
// slope, so that golden section finds it.
func layQuantile(c cloud, q float64) line {
	lay := func(slope float64) (line, float64) {
		r := remainders(c, slope)
		slices.Sort(r)
		l := line{max(0, stat.Quantile(q, stat.Empirical, r, nil)), slope}
		loss := 0.0
		for _, x := range r {
			if d := x - l.intercept; d >= 0 {
				loss += q * d
			} else {
				loss += (q - 1) * d
			}
		}
		return l, loss
	}
	loss := func(slope float64) float64 { _, loss := lay(slope); return loss }
	// Convexity brackets the best: once doubling does not help, it lies below.
	high := (slices.Max(c.y) - slices.Min(c.y)) / c.width()
	for range 2048 { // from the least to the greatest float64
		if !(loss(2*high) < loss(high)) {
			break
		}
		high *= 2
	}
	low, high := 0.0, 2*high
	ratio := (math.Sqrt(5) - 1) / 2
	left, right := high-ratio*(high-low), low+ratio*(high-low)
	atLeft, atRight := loss(left), loss(right)
	for range 70 { // 0.618^70 is 2e-15 of the bracket
		if atLeft <= atRight {
			high, right, atRight = right, left, atLeft
			left = high - ratio*(high-low)
			atLeft = loss(left)
		} else {
			low, left, atLeft = left, right, atRight
			right = low + ratio*(high-low)
			atRight = loss(right)
		}
	}
	best, least := lay(low + (high-low)/2)
	if flat, atFlat := lay(0); atFlat <= least {
		return flat
	}
	return best
}
