package kvpolicy

func (g *SeparationGates) validate() error {
	switch {
	case !withinCount(g.MinNewTokens, maxTokens):
		return fieldError("pdsep.min_new_tokens", g.MinNewTokens, "be 0 to 1e15 tokens")
	case !withinCount(g.MinActiveDecodes, maxCount):
		return fieldError("pdsep.min_active_decodes", g.MinActiveDecodes, "be 0 to 1e9")
	case !withinCount(g.MinSourceCacheTokens, maxTokens):
		return fieldError("pdsep.min_source_cache_tokens", g.MinSourceCacheTokens, "be 0 to 1e15 tokens")
	case !withinCount(g.MinExtraCacheTokens, maxTokens):
		return fieldError("pdsep.min_extra_cache_tokens", g.MinExtraCacheTokens, "be 0 to 1e15 tokens")
	case !usableRate(g.InterferenceRate):
		return fieldError("pdsep.interference_rate", g.InterferenceRate, "be 1e-9 to 1e18 tokens/s")
	case !(g.InterferenceAlpha >= 0 && g.InterferenceAlpha <= maxWeight):
		return fieldError("pdsep.interference_alpha", g.InterferenceAlpha, "be 0 to 1e6")
	}
	return checkSeconds("pdsep.margin_s", g.MarginSeconds)
}

// InterferenceSeconds is what a prefill of n tokens costs the decodes beside
// it: n / rate * (1 + alpha * (activeDecodes - 1)), the first decode being in
// the rate. (SPEC section 4, after the elastic-migration-v2 report.)
func (g SeparationGates) InterferenceSeconds(n, activeDecodes int64) float64 {
	return g.interference(n, activeDecodes)
}

func (g *SeparationGates) interference(n, activeDecodes int64) float64 {
	others := float64(max(0, activeDecodes-1))
	return float64(n) / g.InterferenceRate * (1 + float64(g.InterferenceAlpha*others))
}

// local is the prefill where it was chosen to be, against which sources are
// judged.
type local struct {
	chosen           int
	cached, uncached int64
	cost             float64
}

func (q *pricer) local(chosen int) local {
	i := &q.instances[chosen]
	l := local{chosen: chosen, cached: q.request.cached(i), uncached: q.request.uncached(i)}
	l.cost = q.policy.Separation.interference(l.uncached, i.ActiveDecodes)
	return l
}

// separate runs the gate funnel for the chosen instance.
func (q *pricer) separate(chosen int) Separation {
	l := q.local(chosen)
	v := Separation{NewLocal: l.uncached, Reason: q.chosenGates(&l)}
	if v.Reason != 0 {
		return v
	}
	v.Reason = SourceCacheBelowThreshold // what it stays at where there is no source at all
	o := q.newOrder()
	best := standing{at: -1}
	for source := range q.instances {
		reason, cost := q.judgeSource(&l, source)
		if reason == SourceNotMeaningfullyMoreCache && best.at < 0 {
			v.Reason = reason
		}
		if reason != CostBenefitNotEnoughMargin && reason != Triggered || best.at >= 0 && cost > best.score {
			continue
		}
		if s := q.stand(source, cost); best.at < 0 || o.before(&s, &best) {
			best, v.Reason = s, reason
		}
	}
	if best.at >= 0 {
		v.Source, v.NewSource = q.instances[best.at].ID, best.uncached
		v.CostLocal, v.CostMigrate = l.cost, best.score
	}
	return v
}

// chosenGates are gates 1 and 2, 0 where the chosen instance passes both.
func (q *pricer) chosenGates(l *local) Reason {
	g := &q.policy.Separation
	switch {
	case l.uncached < g.MinNewTokens:
		return NewLocalBelowThreshold
	case q.instances[l.chosen].ActiveDecodes < g.MinActiveDecodes:
		return ChosenNoActiveDecode
	}
	return 0
}

// judgeSource judges one instance as a source for the chosen one: why it is
// none, the gate of 3 to 5 at which it fails, or Triggered. The cost is set
// from gate 5 on.
func (q *pricer) judgeSource(l *local, source int) (Reason, float64) {
	g, from := &q.policy.Separation, &q.instances[source]
	cached, uncached := q.request.cached(from), q.request.uncached(from)
	switch {
	case source == l.chosen:
		return Taken, 0
	case from.Unavailable:
		return InstanceUnavailable, 0
	case q.freshness(from) != q.fleet.considered():
		return MetricsStale, 0
	case from.KVCapacityTokens != 0 && from.KVUsedTokens+uncached > from.KVCapacityTokens:
		return NoRoomNow, 0
	case cached < g.MinSourceCacheTokens:
		return SourceCacheBelowThreshold, 0
	case cached-l.cached < g.MinExtraCacheTokens:
		return SourceNotMeaningfullyMoreCache, 0
	}
	cost := q.policy.Transfer.transferSeconds(l.uncached, q.linkBandwidth(from, &q.instances[l.chosen])) +
		g.interference(uncached, from.ActiveDecodes)
	if cost < l.cost-g.MarginSeconds {
		return Triggered, cost
	}
	return CostBenefitNotEnoughMargin, cost
}
