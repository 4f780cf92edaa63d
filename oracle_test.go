package kvpolicy_test

import (
	"math"
	"math/big"

	"github.com/kvpolicy/kvpolicy"
	"github.com/stretchr/testify/require"
)

// The oracle in this file and in the other oracle_*_test.go is SPEC written
// down a second time, slowly and from the page alone: no code of the package
// is in it. Ties that the hash breaks it leaves open: it says which targets are
// allowed.

// near is equality as SPEC section 9 has it.
func near(a, b float64) bool { return nearTo(a, b, 1e-9) }

func nearTo(a, b, relative float64) bool {
	return a == b || math.Abs(a-b) <= math.Max(relative*math.Max(math.Abs(a), math.Abs(b)), 1e-12)
}

// priced is an instance as the oracle sees it.
type priced struct {
	kvpolicy.Instance
	cached, uncached                   int64
	prefillRate, decodeRate, bandwidth float64
	cost                               kvpolicy.Breakdown
	score                              float64
	tier                               kvpolicy.Tier
}

// oracle is a situation with every instance priced.
type oracle struct {
	situation
	all []priced
}

func given(own, policy float64) float64 {
	if own == 0 {
		return policy
	}
	return own
}

func newOracle(s situation) *oracle {
	o := &oracle{situation: s}
	r, p := s.snapshot.Request, s.policy
	for _, i := range s.snapshot.Instances {
		c := priced{Instance: i}
		c.cached = min(i.CachedTokens, r.ContextTokens)
		c.uncached = r.ContextTokens - c.cached
		c.prefillRate = given(i.PrefillRate, p.Cost.PrefillRate)
		c.decodeRate = given(i.DecodeRate, p.Cost.DecodeRate)
		c.bandwidth = given(i.Bandwidth, p.Transfer.Bandwidth)
		o.all = append(o.all, c)
	}
	anyFresh := false
	for i := range o.all {
		anyFresh = anyFresh || !o.all[i].Unavailable && o.fresh(i)
	}
	for i := range o.all {
		c := &o.all[i]
		switch {
		case c.Unavailable:
			c.tier = kvpolicy.Down
		case anyFresh && !o.fresh(i):
			c.tier = kvpolicy.Stale
		case o.fits(i, c.uncached+r.RemainingTokens):
			c.tier = kvpolicy.FitsNow
		case r.ContextTokens+r.RemainingTokens <= c.KVCapacityTokens:
			c.tier = kvpolicy.FitsEmpty
		default:
			c.tier = kvpolicy.TooSmall
		}
		if !c.Unavailable {
			c.cost = o.cost(i)
			c.score = o.score(i)
		}
	}
	return o
}

func (o *oracle) fresh(i int) bool {
	bound := o.policy.MaxMetricsAgeSeconds
	return bound == 0 || o.all[i].MetricsAgeSeconds <= bound
}

// fits tells whether that many tokens more fit into the pool.
func (o *oracle) fits(i int, tokens int64) bool {
	c := o.all[i]
	return c.KVCapacityTokens == 0 || c.KVUsedTokens+tokens <= c.KVCapacityTokens
}

// degraded: there are available instances, and none is fresh.
func (o *oracle) degraded() bool {
	available, fresh := false, false
	for i := range o.all {
		if !o.all[i].Unavailable {
			available = true
			fresh = fresh || o.fresh(i)
		}
	}
	return available && !fresh
}

// cost is SPEC section 2's table.
func (o *oracle) cost(i int) kvpolicy.Breakdown {
	c, m := o.all[i], o.policy.Cost
	b := o.costOfTheRest(i)
	b.Prefill = float64(c.uncached) / c.prefillRate
	h, n := float64(c.cached), float64(c.uncached)
	b.Prefill += m.PrefillQuadratic * (n * (2*h + n))
	b.Interference = m.InterferenceWeight * float64(c.Requests) * b.Prefill
	b.Loss = o.loss(i, o.life(i, b.Contention+b.Queue+b.Prefill+b.Decode), o.policy.Hazard.Cells)
	return b
}

// costOfTheRest is the cost without prefill, interference and loss.
func (o *oracle) costOfTheRest(i int) kvpolicy.Breakdown {
	c, m := o.all[i], o.policy.Cost
	b := kvpolicy.Breakdown{
		Contention: float64(c.Requests) * m.DecodeIterationSeconds,
		Queue:      float64(c.PendingPrefillTokens)/c.prefillRate + c.WaitSeconds,
	}
	if m.CountDecode && o.snapshot.Request.RemainingTokens > 0 {
		b.Decode = float64(o.snapshot.Request.RemainingTokens) / c.decodeRate
	}
	return b
}

// life is the part of a request that an instance may lose.
type life struct {
	context, remaining, uptime, from, to float64
	whole                                float64 // T
}

func (o *oracle) life(i int, seconds float64) life {
	r := o.snapshot.Request
	return life{float64(r.ContextTokens), float64(r.RemainingTokens), o.all[i].UptimeSeconds, 0, seconds, seconds}
}

// loss is SPEC 5.2 and 5.3.
func (o *oracle) loss(i int, l life, cells int) float64 {
	if !o.policy.Hazard.Enabled || o.all[i].Curve == nil {
		return 0
	}
	c, p := o.all[i], o.policy
	fallback := 0.0
	for k := range o.all {
		if k != i && !o.all[k].Unavailable {
			fallback = math.Max(fallback, o.all[k].prefillRate)
		}
	}
	rest := o.costOfTheRest(i)
	wait := rest.Contention + rest.Queue
	u := exposure{bends: [2]float64{wait, wait + l.remaining/c.decodeRate}}
	u.at = func(t float64) float64 {
		if fallback == 0 {
			return l.whole + p.Hazard.StallPenaltySeconds
		}
		decoded := 0.0
		if l.remaining > 0 {
			decoded = math.Min(c.decodeRate*math.Max(0, t-wait), l.remaining)
		}
		return (l.context+decoded)/fallback + p.Transfer.RecomputeOverheadSeconds + p.Hazard.StallPenaltySeconds
	}
	return oracleLoss(o.survival[c.CurveName], l.uptime, l.from, l.to, cells, u)
}

func (o *oracle) score(i int) float64 {
	c := o.all[i]
	work := float64(c.PendingPrefillTokens + c.uncached)
	switch o.policy.Score {
	case kvpolicy.ScoreCost:
		return c.cost.Contention + c.cost.Queue + c.cost.Prefill + c.cost.Interference + c.cost.Decode + c.cost.Loss
	case kvpolicy.ScoreLMetric:
		return work * float64(c.Requests)
	case kvpolicy.ScoreLeastWork:
		return work
	}
	return float64(c.Requests)
}

// compare is the order of SPEC section 2 with the given measure for the score,
// up to the hash: negative where a comes first, 0 where the hash decides or
// the measures are too near to tell.
func compare(a, b priced, measureA, measureB float64) int {
	switch {
	case measureA != measureB && near(measureA, measureB):
		return 0
	case measureA != measureB:
		if measureA < measureB {
			return -1
		}
		return 1
	}
	for _, difference := range []int64{a.uncached - b.uncached, a.Requests - b.Requests, a.OngoingTokens - b.OngoingTokens} {
		if difference < 0 {
			return -1
		} else if difference > 0 {
			return 1
		}
	}
	return 0
}

// isBest tells whether i may be first among those by measure.
func (o *oracle) isBest(i int, among []int, measure func(i int) float64) bool {
	for _, k := range among {
		if compare(o.all[k], o.all[i], measure(k), measure(i)) < 0 {
			return false
		}
	}
	return true
}

func (o *oracle) ofTier(tier kvpolicy.Tier) (members []int) {
	for i := range o.all {
		if o.all[i].tier == tier {
			members = append(members, i)
		}
	}
	return members
}

// find is the index of that id, -1 where there is none.
func (o *oracle) find(id string) int {
	for i := range o.all {
		if o.all[i].ID == id {
			return i
		}
	}
	return -1
}

func without(all []int, one int) (rest []int) {
	for _, i := range all {
		if i != one {
			rest = append(rest, i)
		}
	}
	return rest
}

func contains(all []int, one int) bool { return len(without(all, one)) < len(all) }

// check compares a decision with everything SPEC says of it.
func (o *oracle) check(t require.TestingT, d kvpolicy.Decision) {
	source := o.find(o.snapshot.Request.RunningOn)
	switch {
	case o.snapshot.Request.RunningOn == "":
		o.checkPlacement(t, d)
	case source >= 0 && !o.all[source].Unavailable:
		o.checkRunning(t, d, source)
	default:
		o.checkPlacement(t, d)
	}
}

// checkPlacement checks the placement of a new request, and of a lost one.
func (o *oracle) checkPlacement(t require.TestingT, d kvpolicy.Decision) {
	lost := o.snapshot.Request.RunningOn != ""
	candidates := o.ofTier(kvpolicy.FitsNow)
	overcommitted := len(candidates) == 0
	if overcommitted {
		candidates = o.ofTier(kvpolicy.FitsEmpty)
	}
	if len(candidates) == 0 {
		reason := kvpolicy.NoFeasibleInstance
		if len(o.ofTier(kvpolicy.Down)) == len(o.all) {
			reason = kvpolicy.NoAvailableInstance
		}
		require.Equal(t, kvpolicy.Decision{Action: kvpolicy.Reject, Reason: reason}, d)
		return
	}
	target := o.find(d.Target)
	require.Contains(t, candidates, target, "the target is a candidate")
	require.Equal(t, overcommitted, d.Overcommitted)
	require.Equal(t, o.degraded(), d.Degraded)
	o.checkCost(t, d, o.all[target])

	score := func(i int) float64 { return o.all[i].score }
	reasons := []kvpolicy.Reason{kvpolicy.SourceLost}
	if !lost {
		reasons = o.affinityReasons(candidates)
	}
	require.Contains(t, reasons, d.Reason)
	if d.Reason == kvpolicy.AffinityKept {
		require.Equal(t, o.snapshot.Request.Affinity, d.Target)
	} else {
		require.True(t, o.isBest(target, candidates, score), "the target is the best of the candidates")
	}

	others := without(candidates, target)
	if len(others) == 0 {
		require.Zero(t, d.RunnerUp)
		require.Zero(t, d.Margin)
	} else {
		second := o.find(d.RunnerUp)
		require.Contains(t, others, second, "the runner-up is a candidate")
		require.True(t, o.isBest(second, others, score), "the runner-up is the best of the others")
		margin := o.all[second].score - o.all[target].score
		require.InDelta(t, margin, d.Margin, 1e-9*(o.all[second].score+o.all[target].score)+1e-12)
	}

	require.Equal(t, kvpolicy.Move{}, d.Candidate)
	if lost {
		require.Equal(t, kvpolicy.Recover, d.Action)
		require.Equal(t, kvpolicy.Move{Method: kvpolicy.Recompute}, d.Move)
		require.Zero(t, d.Separation)
		require.Zero(t, d.PrefillOn)
		return
	}
	require.Equal(t, kvpolicy.Move{}, d.Move)
	o.checkSeparation(t, d, target)
}

func (o *oracle) checkCost(t require.TestingT, d kvpolicy.Decision, c priced) {
	loss := 1e-9
	if o.policy.Hazard.Cells == 0 {
		loss = 1e-7 // the oracle's own quadrature
	}
	terms := []struct {
		name         string
		want, got, e float64
	}{
		{"contention", c.cost.Contention, d.Cost.Contention, 1e-9},
		{"queue", c.cost.Queue, d.Cost.Queue, 1e-9},
		{"prefill", c.cost.Prefill, d.Cost.Prefill, 1e-9},
		{"interference", c.cost.Interference, d.Cost.Interference, 1e-9},
		{"decode", c.cost.Decode, d.Cost.Decode, 1e-9},
		{"loss", c.cost.Loss, d.Cost.Loss, loss},
		{"score", c.score, d.Score, loss},
	}
	for _, term := range terms {
		require.Truef(t, nearTo(term.want, term.got, term.e), "%s is %v, want %v", term.name, term.got, term.want)
	}
}

// affinityReasons are the reasons of SPEC section 3 that are right: one, or two
// where a score is too near its bound to tell.
func (o *oracle) affinityReasons(candidates []int) []kvpolicy.Reason {
	if !o.policy.Affinity.Enabled || o.snapshot.Request.Affinity == "" {
		return []kvpolicy.Reason{kvpolicy.NoAffinity}
	}
	home := o.find(o.snapshot.Request.Affinity)
	if !contains(candidates, home) {
		return []kvpolicy.Reason{kvpolicy.AffinityUnavailable}
	}
	f := o.policy.Affinity.OverloadFactor
	if math.IsInf(f, 1) {
		return []kvpolicy.Reason{kvpolicy.AffinityKept}
	}
	// ongoing_home * n <= sum * f, in exact numbers.
	ongoing, best := new(big.Rat), math.Inf(1)
	for _, i := range candidates {
		ongoing.Add(ongoing, new(big.Rat).SetInt64(o.all[i].OngoingTokens))
		best = math.Min(best, o.all[i].score)
	}
	bound := ongoing.Mul(ongoing, new(big.Rat).SetFloat64(f))
	held := new(big.Rat).SetInt64(o.all[home].OngoingTokens)
	held.Mul(held, new(big.Rat).SetInt64(int64(len(candidates))))
	if held.Cmp(bound) > 0 {
		return []kvpolicy.Reason{kvpolicy.AffinityOverloaded}
	}
	score := o.all[home].score
	switch {
	case score != best*f && near(score, best*f):
		return []kvpolicy.Reason{kvpolicy.AffinityKept, kvpolicy.AffinityTooCostly}
	case score <= best*f:
		return []kvpolicy.Reason{kvpolicy.AffinityKept}
	}
	return []kvpolicy.Reason{kvpolicy.AffinityTooCostly}
}
