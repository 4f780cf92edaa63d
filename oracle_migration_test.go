package kvpolicy_test

import (
	"math"

	"github.com/kvpolicy/kvpolicy"
	"github.com/stretchr/testify/require"
)

// move is a hand-off to instance to as SPEC 6.3 and 6.4 price it.
type move struct {
	to                                            int
	method                                        kvpolicy.Method
	stall, gain, slower, lossStay, lossMove, safe float64
	tied                                          bool // both methods cost the same but for rounding
}

// measure is what the best move is the greatest of, negated for the order of
// section 2.
func (m move) measure() float64 { return -(m.gain - math.Max(0, m.slower)) }

// move prices the hand-off from source to j; false where 6.4 rules j out.
func (o *oracle) move(source, j int) (move, bool) {
	p, r := o.policy, o.snapshot.Request
	c, rate := o.all[j], o.all[source].decodeRate
	recompute := p.Transfer.RecomputeOverheadSeconds + float64(c.uncached)/c.prefillRate
	m := move{to: j, method: kvpolicy.Recompute}
	total, perToken := recompute, 1/c.prefillRate
	transfer := o.transfer(c.uncached, source, j)
	m.tied = transfer != recompute && near(transfer, recompute)
	if transfer < recompute {
		m.method, total = kvpolicy.Transfer, transfer
		perToken = p.Transfer.KVBytesPerToken / math.Min(o.all[source].bandwidth, c.bandwidth)
	}
	rho, rounds := rate*perToken, 0
	if p.Migration.OverlapRounds > 0 && rho < 1 {
		seconds := total // of round 0, and of each round after it
		for rounds = 1; rounds < p.Migration.OverlapRounds; rounds++ {
			if rate*seconds < 1 {
				break
			}
			seconds *= rho
		}
	}
	overlap := 0.0
	m.stall = total
	for range rounds {
		overlap += m.stall
		m.stall *= rho
	}
	decoded := rate * overlap

	rest, there := o.costOfTheRest(source), o.costOfTheRest(j)
	whole := rest.Contention + rest.Queue + rest.Decode
	if decoded >= float64(r.RemainingTokens) || overlap >= whole {
		return move{}, false
	}
	stay := o.life(source, whole)
	stay.from = overlap
	m.lossStay = o.loss(source, stay, p.Hazard.Cells)
	after := there.Contention + there.Queue + (float64(r.RemainingTokens)-decoded)/c.decodeRate
	moved := o.life(j, after)
	moved.context += decoded
	moved.remaining -= decoded
	moved.uptime += overlap
	m.lossMove = o.loss(j, moved, p.Hazard.Cells)
	m.gain = m.lossStay - (m.stall + m.lossMove)
	m.slower = overlap + m.stall + after - whole
	// 6.4's last condition, on the whole losses of 6.3.
	unmoved := there.Contention + there.Queue + there.Decode
	m.safe = o.loss(source, o.life(source, whole), p.Hazard.Cells) - o.loss(j, o.life(j, unmoved), p.Hazard.Cells)
	if rounds == 0 {
		m.safe = math.Inf(1) // 6.3 term for term
	}
	return m, true
}

// destinations are the instances to which 6.3 would move at all.
func (o *oracle) destinations(source int) (moves []move) {
	for j, c := range o.all {
		if j != source && c.tier == kvpolicy.FitsNow {
			if m, ok := o.move(source, j); ok {
				moves = append(moves, m)
			}
		}
	}
	return moves
}

// checkRunning checks the decision on a request whose source is up.
func (o *oracle) checkRunning(t require.TestingT, d kvpolicy.Decision, source int) {
	rule, r := o.policy.Migration, o.snapshot.Request
	stay := func(reason kvpolicy.Reason) {
		require.Equal(t, kvpolicy.Decision{Action: kvpolicy.Stay, Target: r.RunningOn, Reason: reason}, d)
	}
	switch {
	case !rule.Enabled:
		stay(kvpolicy.MigrationDisabled)
		return
	case r.Hops >= rule.MaxHops:
		stay(kvpolicy.MaxHopsReached)
		return
	case r.RemainingTokens == 0 || float64(r.RemainingTokens)/o.all[source].decodeRate < rule.MinRemainingSeconds:
		stay(kvpolicy.MinRemaining)
		return
	}
	moves := o.destinations(source)
	if len(moves) == 0 {
		stay(kvpolicy.NoDestination)
		return
	}
	slowdown := rule.MaxSlowdownSeconds
	if slowdown == 0 {
		slowdown = rule.HysteresisSeconds
	}
	var eligible []move
	for _, m := range moves {
		if m.tied && rule.OverlapRounds > 0 {
			return // the method decides what 6.4 makes of it, and cannot be told
		}
		close := 1e-7 * (m.lossStay + m.lossMove + m.stall + math.Abs(m.slower) + 1e-3)
		if math.Abs(m.gain-rule.HysteresisSeconds) < close || math.Abs(m.slower-slowdown) < close ||
			math.Abs(m.safe-rule.HysteresisSeconds) < close {
			return // too near a bound to tell
		}
		if m.gain > rule.HysteresisSeconds && m.slower < slowdown && m.safe > rule.HysteresisSeconds {
			eligible = append(eligible, m)
		}
	}
	among, got := eligible, d.Move
	if len(eligible) == 0 {
		among, got = moves, d.Candidate
	}
	var told *move
	for k := range among {
		if o.all[among[k].to].ID == got.Target {
			told = &among[k]
		}
	}
	require.NotNil(t, told, "the destination is one of those allowed")
	for _, m := range among {
		if close := 1e-7 * (m.lossStay + told.lossStay + m.stall + told.stall); math.Abs(m.measure()-told.measure()) > close {
			require.GreaterOrEqual(t, compare(o.all[m.to], o.all[told.to], m.measure(), told.measure()), 0, "%s is better", o.all[m.to].ID)
		}
	}
	o.checkMove(t, *told, got)
	if len(eligible) > 0 {
		require.Equal(t, kvpolicy.Decision{Action: kvpolicy.Migrate, Target: got.Target, Reason: kvpolicy.RiskRemoved, Move: got}, d)
		return
	}
	reason := kvpolicy.WouldReturn
	if told.gain <= rule.HysteresisSeconds {
		reason = kvpolicy.RiskGainBelowHysteresis
	} else if told.slower >= slowdown {
		reason = kvpolicy.DestinationSlower
	}
	require.Equal(t, kvpolicy.Decision{Action: kvpolicy.Stay, Target: r.RunningOn, Reason: reason, Candidate: got}, d)
}

func (o *oracle) checkMove(t require.TestingT, want move, got kvpolicy.Move) {
	relative := 1e-9
	if o.policy.Hazard.Cells == 0 {
		relative = 1e-7 // the oracle's own quadrature
	}
	if !want.tied {
		require.Equal(t, want.method, got.Method)
	}
	scale := want.lossStay + want.lossMove + want.stall
	require.InDelta(t, want.stall, got.PlannedSeconds, relative*want.stall+1e-12, "planned")
	require.InDelta(t, want.lossStay, got.LossStaySeconds, relative*want.lossStay+1e-12, "loss on staying")
	require.InDelta(t, want.lossMove, got.LossMoveSeconds, relative*want.lossMove+1e-12, "loss on moving")
	require.InDelta(t, want.gain, got.RiskGainSeconds, relative*scale+1e-12, "risk gain")
	times := math.Abs(want.slower) + want.stall + o.all[want.to].WaitSeconds + float64(o.snapshot.Request.RemainingTokens)/o.all[want.to].decodeRate
	require.InDelta(t, want.slower, got.DeltaTSeconds, relative*times+1e-9, "delta T")
}
