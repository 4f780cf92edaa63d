package kvpolicy

import (
	"math"
	"math/bits"
)

// Judge tells whether a session's home passes the two gates: AffinityKept, or
// the reason of the first gate that fails. ongoingTokens and score are the
// home's, meanOngoingTokens is the mean over the candidates, bestScore the
// least score among them; lower is better. (SPEC section 3.)
func (g AffinityGates) Judge(ongoingTokens int64, meanOngoingTokens, score, bestScore float64) Reason {
	switch f := g.OverloadFactor; {
	case math.IsInf(f, 1): // without a product: 0 * Inf is NaN
		return AffinityKept
	case !(float64(ongoingTokens) <= meanOngoingTokens*f):
		return AffinityOverloaded
	case !(score <= bestScore*f):
		return AffinityTooCostly
	}
	return AffinityKept
}

// mean sums counts exactly, so that their order cannot change the result: a
// large fleet at the bound of ongoing tokens would overflow an int64, and a
// float64 sum would depend on the order.
type mean struct{ high, low, n uint64 }

func (m *mean) add(count int64) {
	var carry uint64
	m.low, carry = bits.Add64(m.low, uint64(count), 0)
	m.high += carry
	m.n++
}

// value is the mean; there is at least one count. It is exact where it is whole,
// which a quotient of rounded sums is not.
func (m *mean) value() float64 {
	whole, rest := bits.Div64(m.high, m.low, m.n)
	return float64(whole) + float64(rest)/float64(m.n)
}
