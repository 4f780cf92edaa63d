package kvpolicy

// tier is how well instance i can take the request.
func (q *pricer) tier(i *Instance) Tier {
	switch {
	case i.Unavailable:
		return Down
	case q.freshness(i) != q.fleet.considered():
		return Stale
	case q.request.fitsNow(i):
		return FitsNow
	case q.request.fitsEmpty(i):
		return FitsEmpty
	}
	return TooSmall
}

// candidateTier is the tier whose instances are candidates; where there is
// none, the reason to reject.
func (q *pricer) candidateTier() (Tier, Reason) {
	f := &q.fleet
	switch class := f.considered(); {
	case f.available == 0:
		return 0, NoAvailableInstance
	case f.roomNow[class]:
		return FitsNow, 0
	case f.roomEmpty[class]:
		return FitsEmpty, 0
	}
	return 0, NoFeasibleInstance
}

// candidate tells whether instance i is of the candidates' tier. Where that is
// FitsEmpty no instance of its freshness fits now.
func (q *pricer) candidate(i *Instance, class int, tier Tier) bool {
	return !i.Unavailable && q.freshness(i) == class &&
		(q.request.fitsNow(i) || tier == FitsEmpty && q.request.fitsEmpty(i))
}

// choice is what one pass over the candidates finds.
type choice struct {
	order    order
	tier     Tier // of the candidates
	best     standing
	runnerUp standing // the second best; at is -1 where there is none
	home     standing // the affinity instance; at is -1 where it is no candidate
	ongoing  mean     // of the candidates' ongoing tokens
	target   standing
	reason   Reason
}

// choose chooses among the candidates. home is the id of the affinity
// instance, empty for none. Where there is no candidate the choice has no tier
// and the reason to reject.
func (q *pricer) choose(home string) (choice, error) {
	c := choice{order: q.newOrder()}
	c.best.at, c.runnerUp.at, c.home.at = -1, -1, -1
	if c.tier, c.reason = q.candidateTier(); c.tier == 0 {
		return c, nil
	}
	class := q.fleet.considered()
	for at := range q.instances {
		i := &q.instances[at]
		if !q.candidate(i, class, c.tier) {
			continue
		}
		score, err := q.score(at)
		if err != nil {
			return c, err
		}
		c.ongoing.add(i.OngoingTokens)
		if home != "" && i.ID == home {
			c.home = q.stand(at, score)
		}
		if c.runnerUp.at >= 0 && score > c.runnerUp.score {
			continue
		}
		s := q.stand(at, score)
		if c.best.at < 0 || c.order.before(&s, &c.best) {
			c.best, c.runnerUp = s, c.best
		} else if c.runnerUp.at < 0 || c.order.before(&s, &c.runnerUp) {
			c.runnerUp = s
		}
	}
	c.target = c.best
	switch {
	case home == "":
		c.reason = NoAffinity
	case c.home.at < 0:
		c.reason = AffinityUnavailable
	default:
		c.reason = q.policy.Affinity.Judge(c.home.ongoing, c.ongoing.value(), c.home.score, c.best.score)
		if c.reason == AffinityKept {
			c.target = c.home
		}
	}
	if c.target.at != c.best.at {
		c.runnerUp = c.best
	}
	return c, nil
}

// home is the id of the affinity instance that the policy minds, empty for none.
func (q *pricer) home() string {
	if q.policy.Affinity.Enabled {
		return q.request.Affinity
	}
	return ""
}

// place decides on a new request.
func (q *pricer) place() (Decision, error) {
	c, err := q.choose(q.home())
	if err != nil {
		return Decision{}, err
	}
	d, err := q.placed(&c, Place)
	if err != nil || d.Action == Reject || !q.policy.Separation.Enabled {
		return d, err
	}
	d.Separation = q.separate(c.target.at)
	if d.Separation.Reason == Triggered {
		d.Action, d.PrefillOn = PrefillRemote, d.Separation.Source
	}
	return d, nil
}

// recover places a running request anew whose instance is lost. Its KV is
// lost too, so that neither affinity nor separation has anything to keep.
func (q *pricer) recover() (Decision, error) {
	c, err := q.choose("")
	if err != nil {
		return Decision{}, err
	}
	d, err := q.placed(&c, Recover)
	if err == nil && d.Action == Recover {
		d.Reason, d.Move.Method = SourceLost, Recompute
	}
	return d, err
}

// placed is the decision that a choice comes to.
func (q *pricer) placed(c *choice, action Action) (Decision, error) {
	if c.tier == 0 {
		return Decision{Action: Reject, Reason: c.reason}, nil
	}
	d := Decision{
		Action:        action,
		Target:        q.instances[c.target.at].ID,
		Reason:        c.reason,
		Overcommitted: c.tier == FitsEmpty,
		Degraded:      !q.fleet.fresh,
		Score:         c.target.score,
	}
	if err := q.price(c.target.at, &d.Cost); err != nil {
		return Decision{}, err
	}
	if c.runnerUp.at >= 0 {
		d.RunnerUp = q.instances[c.runnerUp.at].ID
		d.Margin = c.runnerUp.score - c.target.score
	}
	return d, nil
}
