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
	q := quadrature{c: &d, width: h - l}
	start := d.at(0)
	q.end = d.at(q.width)
	drop := math.Max(0, start.drop(q.end))
	q.noise = drop * 0x1p-50
	switch d.form {
	case formPlain:
		q.noise = 0x1p-50
	case formLog:
		q.noise = math.Max(1, -d.base) * 0x1p-50
	}
	// A lower bound of the integral sets the scale of what may be neglected.
	least := 0.0
	for share := 0.5; share > 0x1p-300 && 2*share*drop > least; share /= 2 {
		least = math.Max(least, share*q.excess(q.width*share))
	}
	mean := 0.0
	for q.tolerance = 1e-12; ; q.tolerance *= 1000 {
		q.negligible, q.evaluations = q.tolerance*least, 0
		if mean = q.panel(0, drop, 1, 0); q.evaluations <= maxEvaluations {
			break
		}
	}
	mean = unit * math.Min(mean, drop)
	c.invalid, c.value = d.invalid, d.value
	return mean
}

// quadrature integrates the excess of a curve over its value at the end.
type quadrature struct {
	c           *conditional
	end         point
	width       float64
	noise       float64 // to which an excess is known
	tolerance   float64
	negligible  float64 // error of a panel
	evaluations int
}

// maxEvaluations is how many are spent before the tolerance is raised. That of a
// monotone curve is reached with some 1/sqrt(tolerance) panels however it
// jumps, so that this happens three times at most.
const maxEvaluations = 1 << 17

// excess is S(t) - S(end).
func (q *quadrature) excess(t float64) float64 {
	q.evaluations++
	return math.Max(0, q.c.at(t).drop(q.end))
}

// panel integrates from v0 to v1, where the excess is e0 and e1.
func (q *quadrature) panel(v0, e0, v1, e1 float64) float64 {
	size := (v1 - v0) * (float64(v0*v0) + float64(v0*v1) + float64(v1*v1)) // v1^3 - v0^3
	middle := v0 + float64((v1-v0)/2)
	if (e0-e1)*size <= q.negligible || q.evaluations > maxEvaluations || !(v0 < middle && middle < v1) {
		return size * (e0 + e1) / 2
	}
	e := q.excess(q.width * middle * middle * middle)
	// A flat half beside one that falls is no case for a rule of high order:
	// halving finds a jump with one evaluation each time.
	if e != e0 && e != e1 {
		fine, uncertainty := q.lobatto(v0, e0, middle, e, v1, e1)
		if uncertainty <= max(q.negligible, 10*q.tolerance*fine, q.noise*size) {
			return math.Max(size*e1, math.Min(fine, size*e0))
		}
	}
	return q.panel(v0, e0, middle, e) + q.panel(middle, e, v1, e1)
}

// lobatto is the integral by the 13-point Kronrod extension of the 4-point
// Gauss-Lobatto rule, exact for polynomials of degree 19, and how far the
// 7-point extension, of degree 9, is from it. Beside v = 0, where the cube gives
// the end no weight, the uncertainty also counts what a jump before the first
// node could hide: the end against the line through the first two nodes.
// (Gander and Gautschi, Adaptive Quadrature - Revisited, BIT 40, 2000.)
func (q *quadrature) lobatto(v0, e0, middle, e, v1, e1 float64) (fine, uncertainty float64) {
	half := (v1 - v0) / 2
	pair := func(node float64) (sum, early float64) {
		offset := float64(half * node)
		v, w := middle-offset, middle+offset
		early = q.excess(q.width * v * v * v)
		return 3 * (float64(v*v*early) + float64(w*w*q.excess(q.width*w*w*w))), early
	}
	ends, center := 3*(float64(v0*v0*e0)+float64(v1*v1*e1)), 3*middle*middle*e
	const firstNode, secondNode = 0.94288241569547972, 0.81649658092772603 // sqrt(2/3)
	first, firstExcess := pair(firstNode)
	second, secondExcess := pair(secondNode)
	third, _ := pair(0.64185334234578131)
	fourth, _ := pair(0.44721359549995794) // sqrt(1/5)
	fifth, _ := pair(0.23638319966214988)
	fine = float64(half * (float64(ends*0.015827191973480183) + float64(first*0.094273840218850046) +
		float64(second*0.15507198733658540) + float64(third*0.18882157396018245) +
		float64(fourth*0.19977340522685853) + float64(fifth*0.22492646533333953) + float64(center*0.24261107190140773)))
	coarse := half * (float64(ends*77) + float64(second*432) + float64(fourth*625) + float64(center*672)) / 1470
	uncertainty = math.Abs(fine - coarse)
	if v0 == 0 {
		before, between := math.Pow(half*(1-firstNode), 3), math.Pow(half*(1-secondNode), 3)
		line := firstExcess + (firstExcess-secondExcess)*before/(between-before)
		uncertainty += float64(math.Abs(e0-line) * before)
	}
	return fine, uncertainty
}
