package kvpolicy

import "math"

// Regime is when transfer beats recompute, as the context grows.
type Regime uint8

const (
	// TransferAbove: transfer is cheaper above the crossover, recompute below.
	TransferAbove Regime = 1 + iota // transfer_above
	// TransferBelow: transfer is cheaper below the crossover, recompute above:
	// the link is slower per token, but starts earlier.
	TransferBelow // transfer_below
	// AlwaysTransfer: transfer is cheaper at every length.
	AlwaysTransfer // always_transfer
	// NeverTransfer: recompute is never dearer.
	NeverTransfer // never_transfer
)

// Crossover finds where transfer and recompute cost the same, by the model m,
// a link of bandwidth bytes/s and a destination that prefills prefillRate
// tokens/s. Both costs are affine in the context, so that they cross at most
// once: tokens is where. Where they do not, it is 0 for AlwaysTransfer and +Inf
// for NeverTransfer: from where on transfer is cheaper. At the crossover itself
// recompute is taken. A faster destination moves it as much as a faster link
// does. (Hazard algorithm note, decision 3; the regime below the crossover is
// ours, SPEC section 6.2.)
//
// A field of m out of its range, or a rate outside 1e-9 to 1e18, is a
// FieldError; an infinite bandwidth is allowed and is an infinitely fast link.
func Crossover(m TransferModel, bandwidth, prefillRate float64) (regime Regime, tokens float64, err error) {
	if err := m.validate(); err != nil {
		return 0, 0, err
	}
	if !usableRate(prefillRate) {
		return 0, 0, fieldError("prefill_rate", prefillRate, "be 1e-9 to 1e18 tokens/s")
	}
	if !usableRate(bandwidth) && !math.IsInf(bandwidth, 1) {
		return 0, 0, fieldError("bandwidth", bandwidth, "be 1e-9 to 1e18 bytes/s")
	}
	// 1/p - kv/B over one denominator and with one rounding: two quotients could
	// turn the difference of nearly equal slopes around.
	save := 1 / prefillRate
	if !math.IsInf(bandwidth, 1) {
		save = math.FMA(-m.KVBytesPerToken, prefillRate, bandwidth) / (prefillRate * bandwidth)
	}
	gap := m.OverheadSeconds - m.RecomputeOverheadSeconds
	switch {
	case gap > 0 && save > 0:
		return TransferAbove, gap / save, nil
	case gap > 0:
		return NeverTransfer, math.Inf(1), nil
	case gap < 0 && save >= 0:
		return AlwaysTransfer, 0, nil
	case gap < 0:
		return TransferBelow, gap / save, nil
	case save > 0:
		return TransferAbove, 0, nil
	}
	return NeverTransfer, math.Inf(1), nil
}
