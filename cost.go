package kvpolicy

// pricer prices the instances of one valid snapshot under one valid policy.
type pricer struct {
	policy    *Policy
	request   *Request
	instances []Instance
	fleet     fleet
}

// prepare validates policy and snapshot, and surveys the fleet.
func (q *pricer) prepare() error {
	if err := q.policy.validate(); err != nil {
		return err
	}
	return q.inspect()
}

// effective is a rate of an instance, or the policy's where it gives none.
func effective(own, policys float64) float64 {
	if own == 0 {
		return policys
	}
	return own
}

func (q *pricer) prefillRate(i *Instance) float64 {
	return effective(i.PrefillRate, q.policy.Cost.PrefillRate)
}

func (q *pricer) decodeRate(i *Instance) float64 {
	return effective(i.DecodeRate, q.policy.Cost.DecodeRate)
}

// linkBandwidth is that between two instances: the lesser of theirs.
func (q *pricer) linkBandwidth(i, j *Instance) float64 {
	policys := q.policy.Transfer.Bandwidth
	return min(effective(i.Bandwidth, policys), effective(j.Bandwidth, policys))
}

// price is the cost of the request on instance at, term by term. (SPEC section
// 2.)
func (q *pricer) price(at int, b *Breakdown) error {
	b.Prefill, b.Interference = q.prefill(&q.instances[at])
	return q.priceRest(at, b)
}

// priceRest prices all but the prefill, whose terms stay as they are: zero is
// what staying, or going on, on instance at costs a request that runs. (SPEC
// section 6.3.)
func (q *pricer) priceRest(at int, b *Breakdown) (err error) {
	i := &q.instances[at]
	q.residence(i, float64(q.request.RemainingTokens), b)
	b.Loss, err = q.loss(at, q.wholeStay(i, b), b)
	return err
}

// residence sets the terms of a request with that much left to decode on
// instance i, prefill and loss aside.
func (q *pricer) residence(i *Instance, remaining float64, b *Breakdown) {
	b.Contention, b.Queue = q.waits(i)
	b.Decode = q.decode(i, remaining)
}

// waits and prefill give products that are added in the end. Each is converted
// where it is made: the compiler may fuse a product with a later addition, which
// rounds otherwise, wherever no conversion stands between them.
func (q *pricer) waits(i *Instance) (contention, queue float64) {
	return float64(float64(i.Requests) * q.policy.Cost.DecodeIterationSeconds),
		float64(i.PendingPrefillTokens)/q.prefillRate(i) + i.WaitSeconds
}

func (q *pricer) prefill(i *Instance) (prefill, interference float64) {
	c := &q.policy.Cost
	cached := q.request.cached(i)
	uncached := q.request.ContextTokens - cached
	// (h + new)^2 - h^2, factored: the squares would cancel.
	positions := float64(float64(uncached) * float64(2*cached+uncached))
	prefill = float64(uncached)/q.prefillRate(i) + float64(c.PrefillQuadratic*positions)
	return prefill, float64(float64(c.InterferenceWeight*float64(i.Requests)) * prefill)
}

func (q *pricer) decode(i *Instance, remaining float64) float64 {
	if q.policy.Cost.CountDecode && remaining > 0 {
		return remaining / q.decodeRate(i)
	}
	return 0
}

func (q *pricer) hasHazard(i *Instance) bool { return q.policy.Hazard.Enabled && i.Curve != nil }

// stretch is what of a request's stay on a node the loss is taken over.
type stretch struct {
	context, remaining float64 // tokens when the stay begins
	age                float64 // of the node then, seconds
	from, to           float64 // seconds after the beginning
}

// wholeStay is the stretch of the request's whole stay on instance i.
func (q *pricer) wholeStay(i *Instance, b *Breakdown) stretch {
	return stretch{context: float64(q.request.ContextTokens), remaining: float64(q.request.RemainingTokens),
		age: i.UptimeSeconds, to: b.time()}
}

// loss is the expected unplanned loss on instance at over a stretch; b holds
// the waits, after which decode begins, and T where nothing is left to fall
// back on. (SPEC sections 5.2 and 5.3.)
func (q *pricer) loss(at int, s stretch, b *Breakdown) (float64, error) {
	i, p := &q.instances[at], q.policy
	if !q.hasHazard(i) {
		return 0, nil
	}
	u := Exposure{
		ContextTokens:       s.context,
		DecodeRate:          q.decodeRate(i),
		WaitSeconds:         b.Contention + b.Queue,
		RemainingTokens:     s.remaining,
		FallbackPrefillRate: q.fleet.fallbackRate(at),
		OverheadSeconds:     p.Transfer.RecomputeOverheadSeconds + p.Hazard.StallPenaltySeconds,
	}
	if u.FallbackPrefillRate == 0 { // no other instance: the request starts over
		u = Exposure{FallbackPrefillRate: 1, OverheadSeconds: b.time() + p.Hazard.StallPenaltySeconds}
	}
	loss, err := ExpectedLoss(i.Curve, s.age, s.from, s.to, p.Hazard.Cells, u)
	if err != nil {
		return 0, &FieldError{Path: i.curvePath(at), Want: "be a survival curve: " + err.Error()}
	}
	return loss, nil
}

// score is what instance at is ordered by. (SPEC section 2.)
func (q *pricer) score(at int) (float64, error) {
	i := &q.instances[at]
	switch q.policy.Score {
	case ScoreLMetric:
		// Both factors are exact, the product of them need not fit an int64.
		return float64(i.PendingPrefillTokens+q.request.uncached(i)) * float64(i.Requests), nil
	case ScoreLeastWork:
		return float64(i.PendingPrefillTokens + q.request.uncached(i)), nil
	case ScoreLeastLoaded:
		return float64(i.Requests), nil
	}
	if q.hasHazard(i) {
		var b Breakdown
		err := q.price(at, &b)
		return b.Total(), err
	}
	// The same without a breakdown in memory, which is most of the cost of a
	// decision.
	contention, queue := q.waits(i)
	prefill, interference := q.prefill(i)
	return total(contention, queue, prefill, interference, q.decode(i, float64(q.request.RemainingTokens)), 0), nil
}
