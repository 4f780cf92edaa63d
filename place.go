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
	case f.roomNow[class] > 0:
		return FitsNow, 0
	case f.roomEmpty[class] > 0:
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
	tier     Tier // of the candidates
	best     standing
	runnerUp standing // the second best; at is -1 where there is none
	home     standing // the affinity instance; at is -1 where it is no candidate
	ongoing  mean     // of the candidates' ongoing tokens
	target   standing // best or home
	reason   Reason
}

// choose chooses among the candidates. home is the id of the affinity
// instance, empty for none. Where there is no candidate the choice has no tier
// and the reason to reject.
func (q *pricer) choose(home string, c *choice) error {
	o := q.newOrder()
	c.best.at, c.runnerUp.at, c.home.at = -1, -1, -1
	if c.tier, c.reason = q.candidateTier(); c.tier == 0 {
		return nil
	}
	class := q.fleet.considered()
	all := q.fleet.roomNow[class] == len(q.instances)
	for at := range q.instances {
		i := &q.instances[at]
		if !all && !q.candidate(i, class, c.tier) {
			continue
		}
		score, err := q.score(at)
		if err != nil {
			return err
		}
		c.ongoing.add(i.OngoingTokens)
		if home != "" && i.ID == home {
			c.home = q.stand(at, score)
		}
		if c.runnerUp.at >= 0 && score > c.runnerUp.score {
			continue
		}
		s := q.stand(at, score)
		if c.best.at < 0 || o.before(&s, &c.best) {
			c.best, c.runnerUp = s, c.best
		} else if c.runnerUp.at < 0 || o.before(&s, &c.runnerUp) {
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
		if c.reason == AffinityKept && c.home.at != c.best.at {
			c.target, c.runnerUp = c.home, c.best
		}
	}
	return nil
}

// home is the id of the affinity instance that the policy minds, empty for none.
func (q *pricer) home() string {
	if q.policy.Affinity.Enabled {
		return q.request.Affinity
	}
	return ""
}

// place decides on a new request.
func (q *pricer) place(d *Decision) error {
	var c choice
	if err := q.choose(q.home(), &c); err != nil {
		return err
	}
	if err := q.take(&c, Place, d); err != nil {
		return err
	}
	if d.Action == Place && q.policy.Separation.Enabled {
		d.Separation = q.separate(c.target.at)
		if d.Separation.Reason == Triggered {
			d.Action, d.PrefillOn = PrefillRemote, d.Separation.Source
		}
	}
	return nil
}

// recover places a running request anew whose instance is lost. Its KV is
// lost too, so that neither affinity nor separation has anything to keep.
func (q *pricer) recover(d *Decision) error {
	var c choice
	if err := q.choose("", &c); err != nil {
		return err
	}
	if err := q.take(&c, Recover, d); err != nil {
		return err
	}
	if d.Action == Recover {
		d.Reason, d.Move.Method = SourceLost, Recompute
	}
	return nil
}

// take makes a choice the decision.
func (q *pricer) take(c *choice, action Action, d *Decision) error {
	if d.Reason = c.reason; c.tier == 0 {
		d.Action = Reject
		return nil
	}
	d.Action = action
	d.Target = q.instances[c.target.at].ID
	d.Overcommitted, d.Degraded = c.tier == FitsEmpty, !q.fleet.fresh
	d.Score = c.target.score
	if c.runnerUp.at >= 0 {
		d.RunnerUp = q.instances[c.runnerUp.at].ID
		d.Margin = c.runnerUp.score - c.target.score
	}
	return q.price(c.target.at, &d.Cost)
}
