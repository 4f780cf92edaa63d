package kvpolicy

// Candidate is one instance of a snapshot as Explain sees it: priced term by
// term, and why it was not taken.
type Candidate struct {
	// Instance is its id.
	Instance string
	// Tier is how well it can take the request; candidates are those of the
	// best tier that is not empty. For a running request it is the tier as a
	// destination.
	Tier Tier
	// Reason is Taken, or why it was not taken.
	Reason Reason
	// Cost is its cost term by term, zero where it is unavailable. For a
	// request that stays or migrates it is the cost of the rest, without a
	// prefill term.
	Cost Breakdown
	// Score is what placement orders by; 0 for a request that stays or migrates.
	Score float64
	// Separation is the candidate as a source of the prefill for the chosen
	// instance, where the policy has PD-separation and the request is new: why
	// it cannot be one, the gate at which it fails, or Triggered; and from gate
	// 5 on the costs. Reason is 0 for the chosen instance itself.
	Separation Separation
	// Move is the candidate as a destination of a running request, where the
	// guards let one move; its target is empty where it can be none.
	Move Move
}

// Explain appends a Candidate for every instance of s to dst, in the order of
// the snapshot, and returns the longer slice. It is what Decide compares, laid
// open: the candidate that is Taken is the decision's target (a rejected
// request has none). Errors are those of Decide.
func (p Policy) Explain(dst []Candidate, s Snapshot) ([]Candidate, error) {
	q, err := newPricer(&p, &s)
	if err != nil {
		return dst, err
	}
	if s.Request.RunningOn == "" {
		return q.explainPlacement(dst, q.home())
	}
	if source := s.find(s.Request.RunningOn); source >= 0 && !s.Instances[source].Unavailable {
		return q.explainMigration(dst, source)
	}
	return q.explainPlacement(dst, "")
}

func (q *pricer) explainPlacement(dst []Candidate, home string) ([]Candidate, error) {
	c, err := q.choose(home)
	if err != nil {
		return dst, err
	}
	var l local
	separation := q.policy.Separation.Enabled && q.request.RunningOn == "" && c.tier != 0
	if separation {
		l = q.local(c.target.at)
	}
	for at := range q.instances {
		i := &q.instances[at]
		e := Candidate{Instance: i.ID, Tier: q.tier(i)}
		if e.Tier != Down {
			if err = q.price(at, &e.Cost); err == nil {
				e.Score, err = q.score(at)
			}
			if err != nil {
				return dst, err
			}
		}
		s := q.stand(at, e.Score)
		e.Reason = q.passedOver(&c, e.Tier, &s)
		if separation && at != c.target.at {
			e.Separation = q.sourceFor(&l, at)
		}
		dst = append(dst, e)
	}
	return dst, nil
}

// passedOver is why an instance was not taken, or Taken.
func (q *pricer) passedOver(c *choice, tier Tier, s *standing) Reason {
	switch {
	case tier == Down:
		return InstanceUnavailable
	case tier == Stale:
		return MetricsStale
	case tier == TooSmall:
		return NeverFits
	case tier != c.tier:
		return NoRoomNow
	case s.at == c.target.at:
		return Taken
	case c.order.before(s, &c.target):
		return HomeKept
	}
	return lostBy(&c.target, s)
}

// sourceFor is one instance's part in the PD-separation funnel: why it cannot
// be a source at all, else the first gate at which chosen or source fails.
func (q *pricer) sourceFor(l *local, source int) Separation {
	v := Separation{NewLocal: l.uncached}
	reason, cost := q.judgeSource(l, source)
	v.Reason = reason
	if reason == CostBenefitNotEnoughMargin || reason == Triggered {
		v.Source, v.NewSource = q.instances[source].ID, q.request.uncached(&q.instances[source])
		v.CostLocal, v.CostMigrate = l.cost, cost
	}
	switch reason {
	case InstanceUnavailable, MetricsStale, NoRoomNow:
	default:
		if gate := q.chosenGates(l); gate != 0 {
			v.Reason = gate
		}
	}
	return v
}

func (q *pricer) explainMigration(dst []Candidate, at int) ([]Candidate, error) {
	decision, err := q.stayOrMigrate(at)
	if err != nil {
		return dst, err
	}
	guard := q.migrationGuards(at)
	var stay Breakdown
	if err := q.priceRest(at, &stay); err != nil {
		return dst, err
	}
	for to := range q.instances {
		i := &q.instances[to]
		e := Candidate{Instance: i.ID, Tier: q.tier(i), Reason: guard}
		if e.Tier != Down {
			if err := q.priceRest(to, &e.Cost); err != nil {
				return dst, err
			}
		}
		if guard == 0 {
			if e.Move, e.Reason, err = q.judgeDestination(at, &stay, to); err != nil {
				return dst, err
			}
		}
		switch {
		case i.ID == decision.Target:
			e.Reason = Taken
		case guard == 0 && e.Reason == RiskRemoved:
			e.Reason = LowerGain
		}
		dst = append(dst, e)
	}
	return dst, nil
}
