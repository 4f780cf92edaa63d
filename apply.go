package kvpolicy

// Apply returns the snapshot as it stands once d has been carried out, so that
// a burst decided on one scrape spreads instead of piling up: the request
// counts at its target (requests, ongoing tokens, KV), and its prefill where
// the prefill runs. The instances are copied; s is not changed. The request
// stays in place, for the caller to put the next one there (with the cached
// tokens, which are the next request's own); after a migrate or a recover it
// runs on the target, with one hop more for a migrate. A reject changes
// nothing. (Ours.)
//
// From then on the target's counts include the request, also after a stay:
// right for deciding on others, one too many for deciding on the same again.
//
// Counts stop at their bounds. A snapshot out of bounds, or a target that s does
// not have, is a FieldError.
func (s Snapshot) Apply(d Decision) (Snapshot, error) {
	next := Snapshot{Request: s.Request, Instances: append([]Instance(nil), s.Instances...)}
	if err := s.Request.validate(); err != nil {
		return Snapshot{}, err
	}
	for at := range next.Instances {
		if err := next.Instances[at].validate(at); err != nil {
			return Snapshot{}, err
		}
	}
	if d.Action == Reject {
		return next, nil
	}
	index := next.find(d.Target)
	if index < 0 {
		return Snapshot{}, fieldError("target", d.Target, "be the id of an instance of the snapshot")
	}
	target := &next.Instances[index]
	uncached := s.Request.uncached(target)
	target.Requests = saturate(target.Requests, 1, maxCount)
	target.OngoingTokens = saturate(target.OngoingTokens, s.Request.ContextTokens, maxTokens)
	if d.Action != Stay {
		target.KVUsedTokens = saturate(target.KVUsedTokens, uncached+s.Request.RemainingTokens, maxTokens)
	}
	if d.Action == Place || d.Action == Recover || d.Action == Migrate && d.Move.Method == Recompute {
		target.PendingPrefillTokens = saturate(target.PendingPrefillTokens, uncached, maxTokens)
	}
	switch d.Action {
	case PrefillRemote:
		index = next.find(d.PrefillOn)
		if index < 0 {
			return Snapshot{}, fieldError("prefill_on", d.PrefillOn, "be the id of an instance of the snapshot")
		}
		source := &next.Instances[index]
		source.PendingPrefillTokens = saturate(source.PendingPrefillTokens, s.Request.uncached(source), maxTokens)
	case Migrate:
		next.Request.Hops = saturate(next.Request.Hops, 1, maxCount)
	}
	if s.Request.RunningOn != "" {
		next.Request.RunningOn = d.Target
	}
	return next, nil
}

// saturate adds two counts within their bounds.
func saturate(count, more, most int64) int64 { return min(count+more, most) }
