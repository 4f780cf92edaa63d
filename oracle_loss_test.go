package kvpolicy_test

import (
	"cmp"
	"math"
	"slices"

	"gonum.org/v1/gonum/integrate/quad"
)

// survival is what the oracle knows of a curve.
type survival struct {
	// drop is the probability S(a+t1)/S(a) - S(a+t2)/S(a) that a node of the
	// given age fails in (t1, t2].
	drop func(age, t1, t2 float64) float64
	// steps are the ages at which the curve jumps or bends.
	steps []float64
	// durations and observed are the sessions of a Kaplan-Meier curve.
	durations []float64
	observed  []bool
}

// cumulativeHazard makes a survival of the hazard between an age and some time
// later, where S = exp(-H): a difference of two hazards, or of two survivals near
// 1, would keep none of its digits.
func cumulativeHazard(h func(age, t float64) float64) survival {
	return survival{drop: func(age, t1, t2 float64) float64 {
		return math.Exp(-h(age, t1)) * -math.Expm1(-h(age+t1, t2-t1))
	}}
}

func exponentialSurvival(rate float64) survival {
	return cumulativeHazard(func(_, t float64) float64 { return rate * t })
}

// weibullSurvival has H(age) = (age/scale)^shape, of which (age+t)^shape is
// age^shape * (1+t/age)^shape.
func weibullSurvival(shape, scale float64) survival {
	return cumulativeHazard(func(age, t float64) float64 {
		before, after := math.Pow(age/scale, shape), math.Pow((age+t)/scale, shape)
		switch {
		case t == 0:
			return 0
		case math.IsInf(after, 1):
			return after
		case t > age: // nothing cancels
			return after - before
		}
		return before * math.Expm1(shape*math.Log1p(t/age))
	})
}

// kaplanMeierSurvival is SPEC 5.1 by the book: a product over the distinct
// event times, in O(n^2), and the tail.
func kaplanMeierSurvival(durations []float64, observed []bool) survival {
	type drop struct{ at, factor float64 }
	var drops []drop
	completed, total := 0.0, 0.0
	for k, d := range durations {
		if observed[k] {
			completed, total = completed+1, total+d
			drops = append(drops, drop{at: d})
		}
	}
	slices.SortFunc(drops, func(a, b drop) int { return cmp.Compare(a.at, b.at) })
	drops = slices.CompactFunc(drops, func(a, b drop) bool { return a.at == b.at })
	for k := range drops {
		atRisk, events := 0.0, 0.0
		for n, d := range durations {
			if d >= drops[k].at {
				atRisk++
			}
			if d == drops[k].at && observed[n] {
				events++
			}
		}
		drops[k].factor = 1 - events/atRisk
		if drops[k].factor == 0 {
			drops[k].factor = 0.5
		}
	}
	tail, last := 1.0/3600, 0.0
	if total > 0 {
		tail = completed / total
	}
	if len(drops) > 0 {
		last = drops[len(drops)-1].at
	}
	// between is S(b)/S(a).
	between := func(a, b float64) float64 {
		s := math.Exp(-tail * (math.Max(0, b-last) - math.Max(0, a-last)))
		for _, d := range drops {
			if d.at > a && d.at <= b {
				s *= d.factor
			}
		}
		return s
	}
	s := survival{durations: durations, observed: observed, drop: func(age, t1, t2 float64) float64 {
		before, fall := between(age, age+t1), between(age+t1, age+t2)
		if age+t1 >= last { // on the tail the difference may be near 0
			return before * -math.Expm1(-tail*(t2-t1))
		}
		return before * (1 - fall)
	}}
	for _, d := range drops {
		s.steps = append(s.steps, d.at)
	}
	return s
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
	width := to - from
	if cells > 0 {
		loss := 0.0
		for k := range cells {
			t1 := from + width*float64(k)/float64(cells)
			t2 := from + width*float64(k+1)/float64(cells)
			loss += s.drop(age, t1, t2) * u.at((t1+t2)/2)
		}
		return loss
	}
	edges := []float64{from, to}
	for _, bend := range u.bends {
		edges = append(edges, min(max(from, bend), to))
	}
	for _, step := range s.steps {
		edges = append(edges, min(max(from, step-age), to))
	}
	slices.Sort(edges)
	edges = slices.Compact(edges)
	loss := 0.0
	for k := range len(edges) - 1 {
		a, b := edges[k], edges[k+1]
		slope := (u.at(b) - u.at(a)) / (b - a)
		// The integral of -S'(t) U(t) over (a, b] by parts, with S counted
		// down to b, so that nothing near 1 is subtracted:
		// U(a) (S(a)-S(b)) + slope * integral of (S(t)-S(b)).
		loss += u.at(a) * s.drop(age, a, b)
		if slope != 0 {
			const pieces = 32
			for p := range pieces {
				// Finer towards a, where a new node may fail at once.
				lo, hi := a+(b-a)*math.Pow(float64(p)/pieces, 6), a+(b-a)*math.Pow(float64(p+1)/pieces, 6)
				loss += slope * quad.Fixed(func(t float64) float64 { return s.drop(age, t, b) }, lo, hi, 16, quad.Legendre{}, 0)
			}
		}
	}
	return loss
}
