package kvpolicy

import "math"

// meanExcessByQuadrature is meanExcess for the curves that have no closed form.
//
// Conditioned anew on l, with t = (h-l)*v^3, it is the integral over v in
// (0, 1) of 3*v^2*(S(t) - S(h)). The cube takes the edge off a survival that
// falls at once (a Weibull of small shape at age 0) and reaches short time
// scales in few halvings. As S never rises, a panel whose ends differ little,
// by its width, is known whatever lies inside; all else is halved until two
// Gauss-Lobatto rules agree. These include the ends of the panel, so that a
// jump beside an end is not missed.
func (c *conditional) meanExcessByQuadrature(l, h float64) float64 {
	d := *c
	unit := d.advance(l)
	if unit == 0 {
		return 0
	}
	if d.form == formPlain {
		unit = 1 // its points are not relative to the base
	}
	q := quadrature{c: &d, width: h - l}
	start := d.at(0)
	q.end = d.at(q.width)
	drop := math.Max(0, start.drop(q.end))
	q.noise = drop * 0x1p-50
	switch d.form {
	case formPlain:
		q.noise = d.base * 0x1p-50
	case formLog:
		q.noise = math.Max(1, -d.base) * 0x1p-50
	}
	// A lower bound of the integral sets the scale of what may be neglected.
	least := 0.0
	for share := 0.5; share > 0x1p-300 && 2*share*drop > least; share /= 2 {
		least = math.Max(least, share*q.excess(q.width*share))
	}
	q.negligible = 1e-12 * least
	mean := unit * math.Min(q.panel(0, drop, 1, 0), drop)
	c.invalid, c.value = d.invalid, d.value
	return mean
}

// quadrature integrates the excess of a curve over its value at the end.
type quadrature struct {
	c           *conditional
	end         point
	width       float64
	noise       float64 // to which an excess is known
	negligible  float64 // error of a panel
	evaluations int
}

// maxEvaluations bounds the work for a curve that is not smooth: some 5 ms.
const maxEvaluations = 1 << 17

// excess is S(t) - S(end).
func (q *quadrature) excess(t float64) float64 {
	q.evaluations++
	return math.Max(0, q.c.at(t).drop(q.end))
}

// panel integrates from v0 to v1, where the excess is e0 and e1.
func (q *quadrature) panel(v0, e0, v1, e1 float64) float64 {
	size := (v1 - v0) * (float64(v0*v0) + float64(v0*v1) + float64(v1*v1)) // v1^3 - v0^3
	middle := v0 + (v1-v0)/2
	if (e0-e1)*size <= q.negligible || q.evaluations > maxEvaluations || !(v0 < middle && middle < v1) {
		return size * (e0 + e1) / 2
	}
	e := q.excess(q.width * middle * middle * middle)
	// A flat half beside one that falls is no case for a rule of high order:
	// halving finds a jump with one evaluation each time.
	if e != e0 && e != e1 {
		coarse, fine := q.lobatto(v0, e0, middle, e, v1, e1)
		if math.Abs(fine-coarse) <= max(q.negligible, 1e-11*fine, q.noise*size) {
			return math.Max(size*e1, math.Min(fine, size*e0))
		}
	}
	return q.panel(v0, e0, middle, e) + q.panel(middle, e, v1, e1)
}

// lobatto is the integral by the Kronrod extensions, with 7 and with 13 points,
// of the 4-point Gauss-Lobatto rule, exact for polynomials of degree 9 and 19.
// (Gander and Gautschi, Adaptive Quadrature - Revisited, BIT 40, 2000.)
func (q *quadrature) lobatto(v0, e0, middle, e, v1, e1 float64) (coarse, fine float64) {
	half := (v1 - v0) / 2
	f := func(v, excess float64) float64 { return 3 * v * v * excess }
	pair := func(node float64) float64 {
		v, w := middle-half*node, middle+half*node
		return f(v, q.excess(q.width*v*v*v)) + f(w, q.excess(q.width*w*w*w))
	}
	ends, center := f(v0, e0)+f(v1, e1), f(middle, e)
	alpha := pair(0.81649658092772603) // sqrt(2/3)
	beta := pair(0.44721359549995794)  // sqrt(1/5)
	coarse = half * (float64(ends*77) + float64(alpha*432) + float64(beta*625) + float64(center*672)) / 1470
	fine = half * (float64(ends*0.015827191973480183) +
		float64(pair(0.94288241569547972)*0.094273840218850046) +
		float64(alpha*0.15507198733658540) +
		float64(pair(0.64185334234578131)*0.18882157396018245) +
		float64(beta*0.19977340522685853) +
		float64(pair(0.23638319966214988)*0.22492646533333953) +
		float64(center*0.24261107190140773))
	return coarse, fine
}
