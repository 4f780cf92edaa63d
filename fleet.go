package kvpolicy

import "fmt"

// fleet is what one pass over the instances finds: what later steps need to
// know of all of them.
type fleet struct {
	available int  // instances that are not unavailable
	fresh     bool // some available instance is fresh
	// roomNow and roomEmpty tell, for stale [0] and fresh [1] available
	// instances apart, whether the request fits one of them now, or at least
	// one of them were it empty.
	roomNow, roomEmpty [2]bool
	// The two best prefill rates among the available give the best among the
	// others of each; where two are equal the second is as good as the first.
	fastest                   int
	fastestRate, runnerUpRate float64
}

// fallbackRate is the best prefill rate among the available instances other
// than at; 0 where there is none.
func (f *fleet) fallbackRate(at int) float64 {
	if at == f.fastest {
		return f.runnerUpRate
	}
	return f.fastestRate
}

// considered is the freshness class that counts: 1, the fresh, while there is
// one, else 0, all of them being stale.
func (f *fleet) considered() int {
	if f.fresh {
		return 1
	}
	return 0
}

// freshness is 1 for fresh metrics and 0 for stale ones.
func (q *pricer) freshness(i *Instance) int {
	if bound := q.policy.MaxMetricsAgeSeconds; bound == 0 || i.MetricsAgeSeconds <= bound {
		return 1
	}
	return 0
}

// inspect validates the snapshot and surveys the fleet.
func (q *pricer) inspect() error {
	q.fleet.fastest = -1
	if err := q.request.validate(); err != nil {
		return err
	}
	if at := duplicateID(q.instances); at >= 0 {
		return instanceError(at, "id", q.instances[at].ID, "not be the id of an earlier instance too")
	}
	used := q.usedRates()
	f := &q.fleet
	for at := range q.instances {
		i := &q.instances[at]
		if !i.ordinary() {
			if err := i.validate(at); err != nil {
				return err
			}
		}
		if i.Unavailable {
			continue
		}
		rate := q.prefillRate(i)
		if used != (rateUse{}) || !usableRate(rate) {
			if err := q.checkRates(i, at, used); err != nil {
				return err
			}
		}
		f.available++
		if rate > f.fastestRate {
			f.fastest, f.fastestRate, f.runnerUpRate = at, rate, f.fastestRate
		} else if rate > f.runnerUpRate {
			f.runnerUpRate = rate
		}
		freshness := q.freshness(i)
		f.fresh = f.fresh || freshness == 1
		if q.request.fitsNow(i) {
			f.roomNow[freshness] = true
		} else if q.request.fitsEmpty(i) {
			f.roomEmpty[freshness] = true
		}
	}
	return nil
}

// rateUse says which rates besides the prefill rate the formulas divide by.
type rateUse struct{ decode, grow, bandwidth, curve bool }

func (q *pricer) usedRates() rateUse {
	p, moving := q.policy, q.request.RunningOn != ""
	return rateUse{
		decode:    p.Cost.CountDecode && q.request.RemainingTokens > 0,
		grow:      p.Hazard.Enabled && q.request.RemainingTokens > 0,
		bandwidth: p.Separation.Enabled && !moving || p.Migration.Enabled && moving,
		curve:     p.Hazard.Enabled,
	}
}

// checkRates checks the rates of an available instance that a formula divides
// by, its own or the policy's in their stead. (SPEC section 7.)
func (q *pricer) checkRates(i *Instance, at int, used rateUse) error {
	p := q.policy
	if !usableRate(q.prefillRate(i)) {
		return rateError(at, "prefill_rate", i.PrefillRate, "cost.prefill_rate", p.Cost.PrefillRate)
	}
	rate := q.decodeRate(i)
	if used.decode && !usableRate(rate) || used.grow && rate != 0 && i.Curve != nil && !usableRate(rate) {
		return rateError(at, "decode_rate", i.DecodeRate, "cost.decode_rate", p.Cost.DecodeRate)
	}
	if used.bandwidth && !usableRate(effective(i.Bandwidth, p.Transfer.Bandwidth)) {
		return rateError(at, "bandwidth", i.Bandwidth, "transfer.bandwidth", p.Transfer.Bandwidth)
	}
	if used.curve && i.Curve != nil {
		if validateCurve("", i.Curve) != nil { // the path is worth building for an error alone
			return validateCurve(i.curvePath(at), i.Curve)
		}
	}
	return nil
}

// rateError names the instance's field, and the policy's where that one is
// meant.
func rateError(at int, field string, own float64, policyField string, policys float64) error {
	if own != 0 {
		return instanceError(at, field, own, "be 1e-9 to 1e18, or 0 for the policy's")
	}
	return instanceError(at, field, own, fmt.Sprintf("be 1e-9 to 1e18, for the policy's %s is %v", policyField, policys))
}

// instanceError is a FieldError at a field of an instance.
func instanceError(at int, field string, value any, want string) error {
	return fieldError(fmt.Sprintf("instances[%d].%s", at, field), value, want)
}
