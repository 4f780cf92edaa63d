package churn

import (
	"github.com/kvpolicy/kvpolicy"
)

// lostName stands for an instance that is gone; no node has it.
const lostName = "\x00lost"

// view sets the snapshot to what a router sees now of a request with so many
// tokens generated, running on a node, or nil.
func (r *run) view(q *request, generated int64, on *node) {
	overhead := r.options.Transfer.RecomputeOverheadSeconds
	s := &r.snapshot
	s.Request = kvpolicy.Request{
		ID:              q.name,
		ContextTokens:   q.PromptTokens + generated,
		RemainingTokens: q.remaining(generated),
		Hops:            q.hops,
	}
	if on != nil {
		s.Request.RunningOn = on.Name
	} else if q.lost {
		s.Request.RunningOn = lostName
	}
	s.Instances = s.Instances[:0]
	for _, n := range r.nodes {
		if !n.up {
			continue
		}
		i := kvpolicy.Instance{
			ID:               n.Name,
			PrefillRate:      n.PrefillRate,
			DecodeRate:       n.DecodeRate,
			Bandwidth:        n.Bandwidth,
			KVCapacityTokens: n.KVCapacityTokens,
			KVUsedTokens:     n.heldTokens(r.now, q),
			UptimeSeconds:    r.now - n.present().StartSeconds,
		}
		if n != on {
			i.Requests = int64(n.requests())
			i.WaitSeconds = n.waitSeconds(r.now, overhead)
		}
		switch r.strategy.Knowledge {
		case KnowsSessions:
			i.Curve = r.learner.curve(n.Node)
		case KnowsLaws:
			i.Curve = n.Law
		case KnowsEnds:
			i.Curve = knownEnd(n.present().EndSeconds - n.present().StartSeconds)
		}
		s.Instances = append(s.Instances, i)
	}
}

// place finds a node for a request that has none.
func (r *run) place(q *request) error {
	n, err := r.choose(q)
	if err != nil {
		return err
	}
	r.tell("placed", q, n)
	if n == nil {
		r.backlog = append(r.backlog, q)
		return nil
	}
	q.lost = false
	q.stay = newStay(q, n)
	r.join(q.stay)
	return nil
}

// choose is the node for a request that has none; nil where none is up that
// could hold it.
func (r *run) choose(q *request) (*node, error) {
	if r.strategy.AnyNode {
		var able []*node
		for _, n := range r.nodes {
			if n.up && q.context()+q.remaining(q.generated) <= n.KVCapacityTokens {
				able = append(able, n)
			}
		}
		if len(able) == 0 {
			return nil, nil
		}
		return able[r.choices.IntN(len(able))], nil
	}
	r.view(q, q.generated, nil)
	d, err := r.policy.Decide(r.snapshot)
	if err != nil {
		return nil, err
	}
	return r.byName[d.Target], nil
}

// check asks for every request that decodes whether to move it.
func (r *run) check() error {
	for _, n := range r.nodes {
		s := n.serving
		if s == nil || r.now < s.decodeFrom || s.request.moving != nil {
			continue
		}
		r.view(s.request, s.generatedBy(r.now), n)
		d, err := r.policy.Decide(r.snapshot)
		if err != nil {
			return err
		}
		if d.Action == kvpolicy.Migrate {
			r.move(s, r.byName[d.Target], d.Move.Method)
		}
	}
	return nil
}

// move begins a planned move of the request of a served stay.
func (r *run) move(s *stay, to *node, method kvpolicy.Method) {
	q, from := s.request, s.node
	r.moves(q, from)
	h := &handOff{request: q, from: from, to: to, perToken: 1 / to.PrefillRate, rounds: r.policy.Migration.OverlapRounds}
	if method == kvpolicy.Transfer {
		h.perToken = r.options.Transfer.KVBytesPerToken / min(from.Bandwidth, to.Bandwidth)
	}
	if from.DecodeRate*h.perToken >= 1 {
		h.rounds = 0 // rounds would not become shorter
	}
	if h.rounds == 0 {
		r.leave(s, s.generatedBy(r.now))
		if method == kvpolicy.Recompute {
			q.stay = newStay(q, to)
			r.join(q.stay)
			return
		}
	}
	q.moving = h
	r.handOffs = append(r.handOffs, h)
	if method == kvpolicy.Recompute {
		h.fill = newStay(q, to)
		h.fill.fill = h
		r.join(h.fill)
		return
	}
	to.inbound = append(to.inbound, h)
	h.stopped = h.rounds == 0
	r.copyRound(h, r.options.Transfer.OverheadSeconds, float64(q.PromptTokens+s.generatedBy(r.now)))
}

// copyRound begins to copy so many tokens.
func (r *run) copyRound(h *handOff, overhead, tokens float64) {
	h.began = r.now
	r.agenda.schedule(event{seconds: r.now + (overhead + float64(tokens*h.perToken)), kind: roundEnds, handOff: h})
}

// roundEnds copies what was decoded meanwhile, at last with the request
// standing still, and then hands it over. (SPEC section 6.4.)
func (r *run) roundEnds(h *handOff) {
	q := h.request
	if h.stopped {
		r.result.WastedSeconds += r.now - h.began
		r.forget(h)
		q.stay = newStay(q, h.to)
		q.stay.kv = true // until its turn comes: see evict
		r.join(q.stay)
		return
	}
	decoded := h.from.DecodeRate * (r.now - h.began)
	if h.rounds--; h.rounds > 0 && decoded >= 1 {
		r.copyRound(h, 0, decoded)
		return
	}
	r.leave(q.stay, q.stay.generatedBy(r.now))
	if h.fill == nil {
		h.stopped = true
		r.copyRound(h, 0, decoded)
		return
	}
	s := h.fill
	r.result.WastedSeconds += s.wasted(r.now)
	r.forget(h)
	q.stay, s.fill, s.begun, s.redone = s, nil, r.now, decoded*h.perToken
	r.decode(s, s.redone)
}

// forget ends a hand-off's part in what happens.
func (r *run) forget(h *handOff) {
	h.over, h.request.moving = true, nil
	r.handOffs = without(r.handOffs, h)
	h.to.inbound = without(h.to.inbound, h)
}

// cancel ends a hand-off before the request has been handed over.
func (r *run) cancel(h *handOff) {
	r.forget(h)
	if h.stopped {
		r.result.WastedSeconds += r.now - h.began
	}
	if h.fill != nil {
		r.leave(h.fill, 0)
	}
}
