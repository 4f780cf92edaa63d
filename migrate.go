package kvpolicy

func (p *Policy) validateMigration() error {
	m := &p.Migration
	switch {
	case !p.Hazard.Enabled:
		return &FieldError{Path: "migration", Want: "come with a hazard model: switch hazard on, or migration off"}
	case !p.Cost.CountDecode:
		return fieldError("cost.count_decode", false, "be true where the policy has migration")
	case !(m.MaxHops >= 0 && m.MaxHops <= maxHops):
		return fieldError("migration.max_hops", m.MaxHops, "be 0 to 1e6")
	case !(m.OverlapRounds >= 0 && m.OverlapRounds <= maxOverlapRounds):
		return fieldError("migration.overlap_rounds", m.OverlapRounds, "be 0 to 64")
	}
	if err := checkSeconds("migration.hysteresis_s", m.HysteresisSeconds); err != nil {
		return err
	}
	if err := checkSeconds("migration.max_slowdown_s", m.MaxSlowdownSeconds); err != nil {
		return err
	}
	return checkSeconds("migration.min_remaining_s", m.MinRemainingSeconds)
}

// slowdown is the bound on delta T.
func (m *MigrationRule) slowdown() float64 {
	return effective(m.MaxSlowdownSeconds, m.HysteresisSeconds)
}

// stayOrMigrate decides on a request that runs on instance at. (SPEC section
// 6.3.)
func (q *pricer) stayOrMigrate(at int, d *Decision) error {
	d.Action, d.Target = Stay, q.instances[at].ID
	if d.Reason = q.migrationGuards(at); d.Reason != 0 {
		return nil
	}
	var stay Breakdown
	if err := q.priceRest(at, &stay); err != nil {
		return err
	}
	o := q.newOrder()
	best, taken := standing{at: -1}, standing{at: -1}
	d.Reason = NoDestination
	for to := range q.instances {
		move, reason, err := q.judgeDestination(at, &stay, to)
		if err != nil {
			return err
		}
		if move.Target == "" {
			continue
		}
		s := q.stand(to, -move.gain())
		if best.at < 0 || o.before(&s, &best) {
			best, d.Candidate, d.Reason = s, move, reason
		}
		if reason == RiskRemoved && (taken.at < 0 || o.before(&s, &taken)) {
			taken, d.Move = s, move
		}
	}
	if taken.at >= 0 {
		d.Action, d.Target, d.Reason, d.Candidate = Migrate, d.Move.Target, RiskRemoved, Move{}
	}
	return nil
}

// gain is what destinations are ordered by, greater is better: what the move
// gains in risk, less what it loses in time.
func (m *Move) gain() float64 { return m.RiskGainSeconds - max(0, m.DeltaTSeconds) }

// migrationGuards are what keeps a request from moving at all, 0 where nothing
// does.
func (q *pricer) migrationGuards(at int) Reason {
	m, remaining := &q.policy.Migration, float64(q.request.RemainingTokens)
	switch {
	case !m.Enabled:
		return MigrationDisabled
	case q.request.Hops >= m.MaxHops:
		return MaxHopsReached
	case remaining == 0 || remaining/q.decodeRate(&q.instances[at]) < m.MinRemainingSeconds:
		return MinRemaining
	}
	return 0
}

// judgeDestination prices a move from instance at, where the rest costs stay,
// to instance to. The reason is why it is no destination, and the move is then
// zero (Taken for at itself); why it is not eligible; or RiskRemoved. (SPEC
// sections 6.3 and 6.4.)
func (q *pricer) judgeDestination(at int, stay *Breakdown, to int) (Move, Reason, error) {
	i, j := &q.instances[at], &q.instances[to]
	switch {
	case to == at:
		return Move{}, Taken, nil
	case j.Unavailable:
		return Move{}, InstanceUnavailable, nil
	case q.freshness(j) != q.fleet.considered():
		return Move{}, MetricsStale, nil
	case !q.request.fitsNow(j):
		return Move{}, NoRoomNow, nil
	}
	h := q.handOff(i, j)
	remaining := float64(q.request.RemainingTokens)
	if h.decoded >= remaining || h.overlap >= stay.time() {
		return Move{}, NoDestination, nil
	}
	// What is left for j, and what is left of the risk on i, once the copying
	// that overlaps with decoding is done.
	var rest, there Breakdown
	q.residence(j, remaining-h.decoded, &rest)
	moved, err := q.loss(to, stretch{context: float64(q.request.ContextTokens) + h.decoded,
		remaining: remaining - h.decoded, age: j.UptimeSeconds + h.overlap, to: rest.time()}, &rest)
	if err != nil {
		return Move{}, 0, err
	}
	avoided, whole := stay.Loss, moved
	if h.overlap > 0 {
		left := q.wholeStay(i, stay)
		left.from = h.overlap
		if avoided, err = q.loss(at, left, stay); err != nil {
			return Move{}, 0, err
		}
		if err = q.priceRest(to, &there); err != nil {
			return Move{}, 0, err
		}
		whole = there.Loss
	}
	m := Move{
		Target:          j.ID,
		Method:          h.method,
		PlannedSeconds:  h.stall,
		RiskGainSeconds: avoided - (h.stall + moved),
		DeltaTSeconds:   (h.overlap + (rest.time() + h.stall)) - stay.time(),
		LossStaySeconds: avoided,
		LossMoveSeconds: moved,
	}
	rule := &q.policy.Migration
	switch {
	case !(m.RiskGainSeconds > rule.HysteresisSeconds):
		return m, RiskGainBelowHysteresis, nil
	case !(m.DeltaTSeconds < rule.slowdown()):
		return m, DestinationSlower, nil
	case h.overlap > 0 && !(stay.Loss-whole > rule.HysteresisSeconds):
		return m, WouldReturn, nil
	}
	return m, RiskRemoved, nil
}

// handOff is how a running request gets from one instance to another.
type handOff struct {
	method  Method
	stall   float64 // seconds for which it stands still
	overlap float64 // seconds of copying before that, while the source decodes
	decoded float64 // tokens decoded meanwhile
}

// handOff plans the move from i to j. A round copies what was decoded during
// the one before, so that rounds shrink by rho, the tokens decoded in the time
// that copying one token takes; where rho is 1 or more they would not. (SPEC
// section 6.4.)
func (q *pricer) handOff(i, j *Instance) handOff {
	t, bandwidth, rate := &q.policy.Transfer, q.linkBandwidth(i, j), q.prefillRate(j)
	h := handOff{}
	h.method, h.stall = t.Cheapest(q.request.uncached(j), bandwidth, rate)
	perToken := 1 / rate
	if h.method == Transfer {
		perToken = t.KVBytesPerToken / bandwidth
	}
	decodeRate := q.decodeRate(i)
	rho := decodeRate * perToken
	if !(rho < 1) {
		return h
	}
	for round := 0; round < q.policy.Migration.OverlapRounds; round++ {
		copied := decodeRate * h.stall // in the next round
		h.overlap += h.stall
		h.stall *= rho
		if copied < 1 {
			break
		}
	}
	h.decoded = decodeRate * h.overlap
	return h
}
