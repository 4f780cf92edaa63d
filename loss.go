package kvpolicy

import (
	"math"
	"math/bits"
)

// Exposure is what losing a node costs, as a function of when: the tokens that
// must be prefilled again elsewhere, which grow as the request decodes, and a
// fixed part. All fields are finite and at least 0. (SPEC 5.2.)
type Exposure struct {
	// ContextTokens is the context that exists at time 0.
	ContextTokens float64
	// DecodeRate is how fast the context grows once decoding has started,
	// tokens/s. 0: it does not grow.
	DecodeRate float64
	// WaitSeconds is when decoding starts.
	WaitSeconds float64
	// RemainingTokens is how much the context grows at most. 0: it does not grow.
	RemainingTokens float64
	// FallbackPrefillRate is how fast the tokens are prefilled elsewhere,
	// tokens/s, above 0. With no tokens above it is not used, and may be 0.
	FallbackPrefillRate float64
	// OverheadSeconds is the fixed part: the overhead of recomputing, the penalty
	// for stalling the user, or all of it where there is no other node.
	OverheadSeconds float64
}

// At is the cost, in seconds, of losing the node at t seconds from now:
//
//	(ContextTokens + min(DecodeRate*max(0, t-WaitSeconds), RemainingTokens))/FallbackPrefillRate + OverheadSeconds
func (u Exposure) At(t float64) float64 {
	return u.prefill(u.ContextTokens+u.grown(t)) + u.OverheadSeconds
}

// grown is by how many tokens the context has grown at t.
func (u *Exposure) grown(t float64) float64 {
	if !(t > u.WaitSeconds) {
		return 0
	}
	return math.Min(u.DecodeRate*(t-u.WaitSeconds), u.RemainingTokens)
}

// prefill is the time to prefill tokens elsewhere.
func (u *Exposure) prefill(tokens float64) float64 {
	if tokens == 0 {
		return 0
	}
	return tokens / u.FallbackPrefillRate
}

// validate checks the fields, generously: whoever fills an Exposure in a
// decision has checked the parts, and adds them.
func (u *Exposure) validate() error {
	const most = 1e18
	for _, field := range [...]struct {
		path  string
		value float64
		most  float64
		want  string
	}{
		{"exposure.context_tokens", u.ContextTokens, most, "be 0 to 1e18 tokens"},
		{"exposure.decode_rate", u.DecodeRate, maxRate, "be 0 to 1e18 tokens/s"},
		{"exposure.wait_s", u.WaitSeconds, maxHorizonSeconds, "be 0 to 1e30 seconds"},
		{"exposure.remaining_tokens", u.RemainingTokens, most, "be 0 to 1e18 tokens"},
		{"exposure.overhead_s", u.OverheadSeconds, maxHorizonSeconds, "be 0 to 1e30 seconds"},
	} {
		if !(field.value >= 0 && field.value <= field.most) {
			return fieldError(field.path, field.value, field.want)
		}
	}
	if (u.ContextTokens > 0 || u.RemainingTokens > 0) && !usableRate(u.FallbackPrefillRate) {
		return fieldError("exposure.fallback_prefill_rate", u.FallbackPrefillRate, "be 1e-9 to 1e18 tokens/s")
	}
	return nil
}

// ExpectedLoss is the expected cost, in seconds, of losing a node unplanned
// within (from, to] seconds from now, given that it is up now at age:
//
//	integral of exposure.At(t) over the conditional failure time, from < t <= to
//
// It is not renormalised at from: what is lost until there is not counted, and
// the probability of being lost until there stays in the denominator.
//
// cells is how: with 1 to 65536, the sum over that many equal cells of
// (S(t_k|age) - S(t_k+1|age)) * exposure.At(middle of the cell); with 0, the
// exact value. Cells are what the source does (16 of them), and step as an
// event crosses a cell's edge; prefer the exact value where a curve of steps
// meets inputs that change little. A drop of a step curve at age + from is past,
// one at age + to counts.
//
// The exact value takes O(log n) for a *KaplanMeier and constant time for an
// exponential, both to rounding; for a Weibull or another curve it is an
// adaptive quadrature to 1e-10 relative, with a bounded number of evaluations
// (a curve that jumps at more than some thousand places gets less). Neither
// form allocates, and neither is ever negative or more than
// (S(from|age) - S(to|age)) times the greatest exposure in between.
//
// A nil curve never fails: 0. age, from and to are in seconds, from 0 to 1e30
// and from <= to. Errors are FieldErrors: "age", "from", "to", "cells",
// "exposure.decode_rate" and the like, "curve" as in ConditionalSurvival.
// (The algorithm note's L_i; SPEC 5.3. The exact value is ours.)
func ExpectedLoss(curve Curve, age, from, to float64, cells int, exposure Exposure) (float64, error) {
	if err := validateLoss(age, from, to, cells, &exposure); err != nil {
		return 0, err
	}
	if curve == nil || from == to {
		return 0, nil
	}
	c, err := newConditional(curve, age)
	if err != nil {
		return 0, err
	}
	loss := 0.0
	if survival := c.advance(from); survival > 0 {
		if cells == 0 {
			loss = c.lossExact(from, to, &exposure)
		} else {
			loss = c.lossInCells(from, to, cells, &exposure)
		}
		loss = survival * loss / c.norm()
	}
	if err := c.err(); err != nil {
		return 0, err
	}
	return loss, nil
}

func validateLoss(age, from, to float64, cells int, u *Exposure) error {
	if err := checkHorizon("age", age); err != nil {
		return err
	}
	if err := checkHorizon("from", from); err != nil {
		return err
	}
	if err := checkHorizon("to", to); err != nil {
		return err
	}
	if from > to {
		return fieldError("to", to, "be at least from")
	}
	if cells < 0 || cells > maxCells {
		return fieldError("cells", cells, "be 0 to 65536")
	}
	return u.validate()
}

// lossInCells sums over cells, with the base at from.
func (c *conditional) lossInCells(from, to float64, cells int, u *Exposure) float64 {
	width, count := to-from, float64(cells)
	before := c.at(0)
	loss := 0.0
	for k := range cells {
		after := c.at(width * float64(k+1) / count)
		// A curve that rises is held at its lowest until now: no drop.
		if drop := before.drop(after); drop > 0 {
			loss += float64(drop * u.At(from+width*(float64(k)+0.5)/count))
			before = after
		}
	}
	return loss
}

// lossExact is the integral, with the base at from. The exposure is constant,
// then rises linearly between two times, then is constant, so that by parts
//
//	loss = U(from)*drop(from, to) + U's rise * (mean of the drop from t to the ramp's end over the ramp + drop(ramp's end, to))
//
// where every term is positive.
func (c *conditional) lossExact(from, to float64, u *Exposure) float64 {
	width := to - from
	start, end := c.at(0), c.at(width)
	loss := u.At(from) * math.Max(0, start.drop(end))
	rise := u.prefill(u.grown(to) - u.grown(from))
	if rise == 0 || loss == 0 && start.drop(end) <= 0 {
		return loss
	}
	rampStart := math.Min(math.Max(0, u.WaitSeconds-from), width)
	rampEnd := math.Min(math.Max(rampStart, (u.WaitSeconds-from)+u.RemainingTokens/u.DecodeRate), width)
	mean := 0.0
	if rampEnd > rampStart {
		c.rewind()
		mean = c.meanExcess(rampStart, rampEnd)
	}
	if rampEnd < width {
		c.rewind()
		mean += math.Max(0, c.at(rampEnd).drop(end))
	}
	return loss + float64(rise*mean)
}

// meanExcess is the mean, over t in (l, h), of the drop from t to h, in the
// units of point: 0 to the drop from l to h.
func (c *conditional) meanExcess(l, h float64) float64 {
	switch c.form {
	case formSteps:
		return c.meanExcessOfSteps(l, h)
	case formExponential:
		return math.Exp(-c.rate*l) * meanExcessOfExponential(c.rate*(h-l))
	default:
		return c.meanExcessByQuadrature(l, h)
	}
}

// meanExcessOfExponential is the mean of exp(-t) - exp(-z) over t in (0, z):
// (1 - exp(-z)*(1+z))/z.
func meanExcessOfExponential(z float64) float64 {
	if z >= 0.25 {
		return -math.Expm1(-z)/z - math.Exp(-z)
	}
	// exp(-z) * (z/2! + z^2/3! + ...), where nothing cancels.
	sum := 1.0
	for _, inverse := range [...]float64{1. / 14, 1. / 13, 1. / 12, 1. / 11, 1. / 10, 1. / 9, 1. / 8, 1. / 7, 1. / 6, 1. / 5, 1. / 4, 1. / 3} {
		sum = 1 + float64(sum*(z*inverse))
	}
	return math.Exp(-z) * sum * z / 2
}

// meanExcessOfSteps adds up the drops in (l, h], each times its distance from
// l: the steps by the nodes of the tree that together hold them, the tail in
// closed form.
func (c *conditional) meanExcessOfSteps(l, h float64) float64 {
	k := c.steps
	low := c.at(l)
	first := c.index
	high := c.at(h)
	sum := 0.0
	for i := first; i < c.index; {
		span := min(bits.TrailingZeros(uint(i)), bits.Len(uint(c.index-i))-1)
		next := i + 1<<span
		// age and offset apart, so that the distance is exact near l.
		distance := math.Max(0, ((k.times[i]-c.age)-c.offset)-l)
		part := (k.survival[i] - k.scaled(k.survival[next], next, i)) * distance
		if span > 0 {
			part += k.moment[(k.width+i)>>span]
		}
		if k.block != nil {
			part = math.Ldexp(part, int(c.block-k.block[i])*blockBits)
		}
		sum += part
		i = next
	}
	if high.hazard > 0 {
		tail := point{high.step, low.hazard}.survival()
		start := math.Max(l, c.tail)
		z := c.rate * (h - start)
		sum += tail * (float64((start-l)*-math.Expm1(-z)) + float64((h-start)*meanExcessOfExponential(z)))
	}
	return math.Min(sum/(h-l), low.drop(high))
}
