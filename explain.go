package kvpolicy

import "slices"

// Candidate is one instance of a snapshot as Explain sees it: priced term by
// term, and why it was not taken.
type Candidate struct {
	// Instance is its id.
	Instance string
	// Tier is how well it can take the request, and so whether it is a
	// candidate. For a running request it is the tier as a destination.
	Tier Tier
	// Reason is Taken, or why it was not taken.
	Reason Reason
	// Rank is 1 for the target, and from 2 on for the other candidates in the
	// order in which they would be taken instead: what to fall back on. It is 0
	// for what is no candidate, and for a request that stays or migrates.
	Rank int
	// Cost is its cost term by term, zero where it is unavailable. For a
	// request that stays or migrates it is the cost of the rest, without a
	// prefill term.
	Cost Breakdown
	// Score is what placement orders by; 0 where it is unavailable, and for a
	// request that stays or migrates.
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
// request has none). Errors are those of Decide, and those of pricing the
// instances that Decide has no need to price, whose curve may be none; dst then
// comes back as it was. Beside dst it allocates one list, to rank the candidates.
func (p Policy) Explain(dst []Candidate, s Snapshot) ([]Candidate, error) {
	longer, err := p.explain(dst, &s)
	if err != nil {
		return dst, err
	}
	return longer, nil
}

func (p *Policy) explain(dst []Candidate, s *Snapshot) ([]Candidate, error) {
	q := pricer{policy: p, request: &s.Request, instances: s.Instances}
	if err := q.prepare(); err != nil {
		return nil, err
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
	var c choice
	if err := q.choose(home, &c); err != nil {
		return nil, err
	}
	var l local
	first := len(dst)
	separation := q.policy.Separation.Enabled && q.request.RunningOn == "" && c.tier != 0
	if separation {
		l = q.local(c.target.at)
	}
	for at := range q.instances {
		i := &q.instances[at]
		e := Candidate{Instance: i.ID, Tier: q.tier(i)}
		if e.Tier != Down {
			err := q.price(at, &e.Cost)
			if err == nil {
				e.Score, err = q.score(at)
			}
			if err != nil {
				return nil, err
			}
		}
		s := q.stand(at, e.Score)
		e.Reason = q.passedOver(&c, e.Tier, &s)
		if separation && at != c.target.at {
			e.Separation = q.sourceFor(&l, at)
		}
		dst = append(dst, e)
	}
	q.rank(dst[first:], &c)
	return dst, nil
}

// rank numbers the candidates of a choice.
func (q *pricer) rank(all []Candidate, c *choice) {
	if c.tier == 0 {
		return
	}
	candidates := make([]standing, 0, len(all))
	for at := range all {
		if all[at].Tier == c.tier && at != c.target.at {
			candidates = append(candidates, q.stand(at, all[at].Score))
		}
	}
	o := q.newOrder()
	slices.SortFunc(candidates, func(a, b standing) int {
		if o.before(&a, &b) {
			return -1
		}
		return 1
	})
	all[c.target.at].Rank = 1
	for behind, s := range candidates {
		all[s.at].Rank = behind + 2
	}
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
	case s.at == c.best.at:
		return HomeKept
	}
	return lostBy(&c.best, s)
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
	var decision Decision
	if err := q.stayOrMigrate(at, &decision); err != nil {
		return nil, err
	}
	guard := q.migrationGuards(at)
	var stay Breakdown
	if err := q.priceRest(at, &stay); err != nil {
		return nil, err
	}
	for to := range q.instances {
		i := &q.instances[to]
		e := Candidate{Instance: i.ID, Tier: q.tier(i), Reason: guard}
		if e.Tier != Down {
			if err := q.priceRest(to, &e.Cost); err != nil {
				return nil, err
			}
		}
		if guard == 0 {
			var err error
			if e.Move, e.Reason, err = q.judgeDestination(at, &stay, to); err != nil {
				return nil, err
			}
		}
		switch {
		case i.ID == decision.Target:
			e.Reason = Taken
		case to == at:
			e.Reason = RiskRemoved
		case guard == 0 && e.Reason == RiskRemoved:
			e.Reason = LowerGain
		}
		dst = append(dst, e)
	}
	return dst, nil
}
