package sim

import "math"

// runLength is how many steps from the one composed on are sure to be alike.
func (in *instance) runLength() int {
	if in.c.stepwise || len(in.chunks) > 0 || len(in.batch) > len(in.decodes) {
		return 1
	}
	full := len(in.batch) >= in.profile.MaxRunning
	if !full && len(in.queue) > 0 && !in.blocked {
		return 1
	}
	steps := math.MaxInt
	for _, r := range in.decodes {
		steps = min(steps, r.output-r.generated)
	}
	// A run of n steps takes blocks at n-1 boundaries. What publishing gives
	// back on the way is not counted on.
	taken := func(n int) int {
		sum := 0
		for _, r := range in.decodes {
			sum += (r.computed+n-1)/in.profile.BlockTokens - r.computed/in.profile.BlockTokens
		}
		return sum
	}
	if available := in.pool.available(); taken(steps) > available {
		low, high := 1, steps // taken(low) fits, taken(high) does not
		for low+1 < high {
			if mid := int(uint(low+high) >> 1); taken(mid) <= available {
				low = mid
			} else {
				high = mid
			}
		}
		steps = low
	}
	return steps
}

// end is when step j of the run is through, counted from 1.
func (in *instance) end(j int) float64 {
	n := float64(j)
	return in.start + float64(n*in.first) + float64(in.growth*(n*(n-1)/2))
}

// wake has the run's end come as an event.
func (in *instance) wake() {
	in.generation++
	in.c.push(event{seconds: in.end(in.steps), kind: eventWake, instance: int32(in.index), generation: in.generation})
}

// passed is how many steps of the run are through now, but for the last, which is an event.
func (in *instance) passed() int {
	elapsed := in.c.now - in.start
	j := in.done
	// first >= StepSeconds > 0. growth/2*j^2 + (first - growth/2)*j = elapsed, by the
	// form of the root that does not cancel; then exact by looking at the ends.
	b := in.first - in.growth/2
	if root := 2 * elapsed / (b + math.Sqrt(float64(b*b)+float64(2*in.growth*elapsed))); root > float64(j) {
		j = int(math.Min(root, float64(in.steps)))
	}
	j = min(j, in.steps-1)
	for j > in.done && in.end(j) > in.c.now {
		j--
	}
	for j < in.steps-1 && in.end(j+1) <= in.c.now {
		j++
	}
	return j
}

// sync brings the run's effects up to the present.
func (in *instance) sync() {
	if in.stepping && in.steps > 1 {
		in.apply(in.passed())
	}
}

// truncate ends the run with the step that is under way.
func (in *instance) truncate() {
	if in.stepping && in.steps > 1 {
		in.sync()
		if in.steps > in.done+1 {
			in.steps = in.done + 1
			in.wake()
		}
	}
}

// apply takes the decodes on from in.done steps to j: after each step blocks
// that it filled are published, and before the next the blocks that it needs are taken.
func (in *instance) apply(j int) {
	delta := j - in.done
	if delta == 0 {
		return
	}
	if in.steps > 1 {
		for boundary := in.done + 1; boundary <= j; boundary++ {
			due := in.due[boundary%len(in.due)]
			for _, r := range due {
				in.publish(r, r.computed+boundary-in.done)
			}
			if boundary < in.steps {
				in.pool.take(len(due))
				for _, r := range due {
					r.private++
				}
			}
		}
	} else {
		for _, r := range in.decodes {
			in.publish(r, r.computed+1)
		}
	}
	for _, r := range in.decodes {
		r.computed += delta
		r.generated += delta
	}
	in.ongoing += delta * len(in.decodes)
	in.done = j
}

// finish ends the run, and with it the requests that are through.
func (in *instance) finish() {
	in.apply(in.steps)
	in.stepping = false
	for _, k := range in.chunks {
		r := k.request
		r.computed += k.tokens
		r.subject().PrefilledTokens += k.tokens
		in.pending -= k.tokens
		in.blocked = false
		in.publish(r, r.computed)
		if r.prefilling() || r.owner != nil {
			continue
		}
		r.generated++
		in.ongoing++
		if r.generated == 1 {
			r.FirstTokenSeconds = in.c.now
			in.c.tell(FirstToken, r, in, 0)
		}
	}
	stay := in.batch[:0]
	for _, r := range in.batch {
		switch {
		case r.owner != nil && !r.prefilling() && !r.cancelled:
			in.move(r, kept)
			in.kept = append(in.kept, r)
			in.c.hand(r)
		case r.owner == nil && r.generated == r.output:
			in.remove(r)
			in.c.end(r, Completed)
		case r.cancelled:
			in.remove(r)
			if r.owner == nil {
				in.c.end(r, Cancelled)
			}
		default:
			stay = append(stay, r)
		}
	}
	for i := len(stay); i < len(in.batch); i++ {
		in.batch[i] = nil
	}
	in.batch = stay
	in.schedule()
}
