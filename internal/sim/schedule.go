package sim

import "math"

// last is the last of held prefix blocks, 0 for none.
func last(held []int32) int32 {
	if len(held) == 0 {
		return 0
	}
	return held[len(held)-1]
}

// reusable is the part of r's identities that it may take from the cache: not
// those of its last token, which has to be computed.
func (in *instance) reusable(r *request, tokens int) []uint64 {
	return r.blocks[:min(len(r.blocks), (tokens-1)/in.c.prefixBlockTokens)]
}

// occupy has r hold the cached part of its first tokens, and takes blocks for the
// chunk behind that part, which is what lacks, up to the budget. If they do
// not fit, nothing changes.
func (in *instance) occupy(r *request, tokens, budget int) (cached, chunk int, ok bool) {
	identities := in.reusable(r, tokens)
	hits := in.pool.prefix(identities, r.hint)
	r.hint = hits
	for {
		cached = hits * in.c.prefixBlockTokens
		chunk = min(tokens-cached, budget)
		unheld := hits - in.pool.heldPrefix(identities[:hits])
		need := in.blocksFor(cached+chunk) - hits*in.pool.span
		reserve := need
		if in.profile.ReserveWholePrompt {
			reserve = in.blocksFor(tokens) - hits*in.pool.span
		}
		if reserve > in.pool.available()-unheld*in.pool.span {
			return 0, 0, false
		}
		if r.held == nil {
			r.held = in.c.blank()
		}
		for _, hash := range identities[:hits] {
			id, there := in.pool.find(hash, last(r.held))
			if !there {
				break
			}
			r.held = append(r.held, id)
			in.pool.hold(id)
		}
		if len(r.held) == hits && reserve <= in.pool.available() {
			in.pool.take(need)
			r.private = need
			return cached, chunk, true
		}
		// Identities that are not chained: what bisection found has gaps, or is
		// held otherwise than it said. Then the walk is right, or nothing.
		if walked := len(r.held); walked < hits {
			hits = walked
		} else {
			hits = 0
		}
		in.releaseBlocks(r)
	}
}

// enqueue puts r at the end of the queue.
func (in *instance) enqueue(r *request) {
	in.queue = append(in.queue, r)
	in.move(r, waiting)
	in.poke()
}

// poke has the instance look at its queues again: at once if it is idle, else at
// the end of the step that it is in.
func (in *instance) poke() {
	switch {
	case !in.up:
	case !in.stepping:
		in.schedule()
	case len(in.ready) > 0 || len(in.queue) > 0 && !in.blocked:
		if len(in.batch) < in.profile.MaxRunning {
			in.truncate()
		}
	}
}

// grow has r, a member of the batch, hold blocks for so many tokens: at the cost
// first of prefills kept for others, then of those admitted last, who start
// over; of r itself where it is the last. It reports whether r has them, and
// whether someone was preempted.
func (in *instance) grow(r *request, tokens int) (ok, preempted bool) {
	n := max(0, in.blocksFor(tokens)-r.private-len(r.held)*in.pool.span)
	for in.pool.available() < n {
		if len(in.kept) > 0 {
			in.abandon(in.kept[len(in.kept)-1])
			continue
		}
		victim := in.batch[len(in.batch)-1]
		in.preempt(victim)
		preempted = true
		if victim == r {
			return false, true
		}
	}
	in.pool.take(n)
	r.private += n
	return true, preempted
}

// preempt sends the last of the batch back to the front of the queue, with nothing.
func (in *instance) preempt(r *request) {
	in.batch[len(in.batch)-1] = nil
	in.batch = in.batch[:len(in.batch)-1]
	in.move(r, waiting)
	in.releaseBlocks(r)
	r.computed, r.goal, r.remote = 0, r.context(), false
	in.queue = append(in.queue, nil)
	copy(in.queue[1:], in.queue)
	in.queue[0] = r
	in.blocked = false
	s := r.subject()
	s.Preemptions++
	in.c.tell(Preempted, s, in, 0)
}

// schedule decides what the next run does, and starts it. Called when no run is under way.
func (in *instance) schedule() {
	if in.compose() && len(in.decodes)+len(in.chunks) == 0 {
		// The only one left gave up for want of room: whoever is ready may
		// run, and what was given back may do for somebody's start.
		in.compose()
	}
	if len(in.decodes)+len(in.chunks) == 0 {
		return
	}
	context, prefill := 0, 0.0
	for _, r := range in.decodes {
		context += r.computed + 1
	}
	for _, k := range in.chunks {
		prefill += in.profile.prefillSeconds(k.request.computed, k.tokens)
	}
	streams := len(in.decodes)
	in.stepping = true
	in.done = 0
	in.start = in.c.now
	in.first = in.profile.stepSeconds(streams, float64(context)) + prefill
	in.growth = float64(in.profile.KVReadSeconds * float64(streams))
	in.steps = in.runLength()
	if in.steps > 1 {
		if in.due == nil {
			in.due = make([][]*request, in.profile.BlockTokens)
		}
		for i := range in.due {
			in.due[i] = in.due[i][:0]
		}
		for _, r := range in.decodes {
			i := (len(in.due) - r.computed%len(in.due)) % len(in.due)
			in.due[i] = append(in.due[i], r)
		}
	}
	in.wake()
}

// compose makes up the next step: decodes, then prefills of the batch in order,
// then the queue. It reports whether somebody was preempted, in
// which case nobody is admitted in this step.
func (in *instance) compose() (preempted bool) {
	in.decodes, in.chunks = in.decodes[:0], in.chunks[:0]
	for len(in.ready) > 0 && len(in.batch) < in.profile.MaxRunning {
		r := in.ready[0]
		in.ready = drop(in.ready, r)
		in.move(r, running)
		in.batch = append(in.batch, r)
		in.c.tell(Started, r.subject(), in, r.computed)
	}
	for i := 0; i < len(in.batch); i++ {
		r := in.batch[i]
		if r.prefilling() {
			continue
		}
		ok, someone := in.grow(r, r.computed+1)
		preempted = preempted || someone
		if !ok {
			break
		}
	}
	budget := in.profile.StepTokens
	for _, r := range in.batch {
		if !r.prefilling() {
			budget--
		}
	}
	for i := 0; i < len(in.batch) && budget > 0; i++ {
		r := in.batch[i]
		if !r.prefilling() {
			continue
		}
		tokens := min(r.goal-r.computed, budget)
		ok, someone := in.grow(r, r.computed+tokens)
		preempted = preempted || someone
		if !ok {
			break
		}
		in.chunks = append(in.chunks, chunk{r, tokens})
		budget -= tokens
	}
	if !preempted {
		in.admit(budget)
	}
	for _, r := range in.batch {
		if !r.prefilling() {
			in.decodes = append(in.decodes, r)
		}
	}
	return preempted
}

// admit takes requests from the queue, first come first served, while there are
// blocks and budget.
func (in *instance) admit(budget int) {
	for len(in.queue) > 0 && len(in.batch) < in.profile.MaxRunning && budget > 0 {
		r := in.queue[0]
		if in.blocked {
			// Only prefills kept for others can be in the way of an
			// otherwise idle instance for good: each side may wait for the other's room.
			if len(in.batch) > 0 || in.transfers > 0 || len(in.kept) == 0 {
				return
			}
			in.abandon(in.kept[len(in.kept)-1])
			in.blocked = false
		}
		if r.remote {
			cached, moved, ok := in.occupy(r, r.Request.PromptTokens, math.MaxInt)
			if !ok {
				in.blocked = true
				continue
			}
			in.queue = drop(in.queue, r)
			in.fetch(r, cached, moved)
			continue
		}
		cached, tokens, ok := in.occupy(r, r.goal, budget)
		if !ok {
			in.blocked = true
			continue
		}
		in.queue = drop(in.queue, r)
		r.computed = cached
		in.move(r, running)
		in.batch = append(in.batch, r)
		in.chunks = append(in.chunks, chunk{r, tokens})
		budget -= tokens
		s := r.subject()
		if !s.started {
			s.started = true
			s.CachedTokens = cached
		}
		in.c.tell(Started, s, in, cached)
	}
}
