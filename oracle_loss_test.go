package kvpolicy_test

import (
	"math"

	"gonum.org/v1/gonum/integrate/quad"
)

// survival is what the oracle knows of a curve: the conditional probability
// S(a+t1)/S(a) - S(a+t2)/S(a) that a node of the given age fails in (t1, t2].
type survival func(age, t1, t2 float64) float64

// cumulativeHazard makes a survival of H, where S = exp(-H): the difference of
// two survivals near 1 is taken by expm1.
func cumulativeHazard(h func(age float64) float64) survival {
	return func(age, t1, t2 float64) float64 {
		return math.Exp(h(age)-h(age+t1)) * -math.Expm1(h(age+t1)-h(age+t2))
	}
}

// exposure is U of SPEC 5.2 as a function of the time of the loss, and the two
// times at which it bends.
type exposure struct {
	at    func(t float64) float64
	bends [2]float64
}

// oracleLoss is the loss over (from, to] as SPEC 5.3 writes it: the sum over
// the cells, or for cells = 0 the integral, by parts, between the bends.
func oracleLoss(s survival, age, from, to float64, cells int, u exposure) float64 {
	if s == nil || !(to > from) {
		return 0
	}
	width := to - from
	if cells > 0 {
		loss := 0.0
		for k := range cells {
			t1 := from + width*float64(k)/float64(cells)
			t2 := from + width*float64(k+1)/float64(cells)
			loss += s(age, t1, t2) * u.at((t1+t2)/2)
		}
		return loss
	}
	edges := []float64{from}
	for _, bend := range u.bends {
		if bend > edges[len(edges)-1] && bend < to {
			edges = append(edges, bend)
		}
	}
	edges = append(edges, to)
	loss := 0.0
	for k := range len(edges) - 1 {
		a, b := edges[k], edges[k+1]
		slope := (u.at(b) - u.at(a)) / (b - a)
		// The integral of -S'(t) U(t) over (a, b] by parts, with S counted
		// down to b, so that nothing near 1 is subtracted:
		// U(a) (S(a)-S(b)) + slope * integral of (S(t)-S(b)).
		loss += u.at(a) * s(age, a, b)
		if slope != 0 {
			const pieces = 64
			for p := range pieces {
				lo, hi := a+(b-a)*float64(p)/pieces, a+(b-a)*float64(p+1)/pieces
				loss += slope * quad.Fixed(func(t float64) float64 { return s(age, t, b) }, lo, hi, 16, quad.Legendre{}, 0)
			}
		}
	}
	return loss
}
