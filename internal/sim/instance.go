package sim

import "math"

// phase is where a request is on its instance.
type phase uint8

const (
	elsewhere    phase = iota // its prefill on another instance is not done yet
	frontend                  // dispatched, not yet in the scheduler's queue
	waiting                   // in the queue, holding nothing
	transferring              // its blocks are reserved, its KV is on its way
	ready                     // its KV is here, it is not yet in the batch
	running                   // in the batch
	kept                      // prefilled for another instance, until the transfer ends
	phases
)

// counts says whether a request in this phase is one of its instance's unfinished ones.
func (p phase) counts() bool { return p != elsewhere && p != kept }

// request is a request on one instance. A separated one is two of them: the job
// on the source, and its owner on the target.
type request struct {
	Record           // the owner's; of a job only Request and Preemptions matter
	sequence  uint64 // of its submission
	phase     phase
	remote    bool // its KV comes from job.at, once there are blocks for it
	started   bool // its prefill began once
	cancelled bool // to be dropped at the end of the step or the transfer
	ended     bool // forgotten: an event that names it means nothing any more
	owner     *request
	job       *request // until its KV is here
	at        *instance
	member    int // index in at.members

	output    int      // tokens to generate here, 0 for a job
	generated int      // tokens generated so far
	computed  int      // tokens whose KV is here
	goal      int      // prefill goes on until computed is goal; then the next token comes out
	held      []int32  // the prefix blocks that it holds, in order
	private   int      // blocks of its own behind those
	blocks    []uint64 // identities of the whole prefix blocks of prompt and output
	hint      int      // how many of them were cached when last asked
}

func (r *request) prefilling() bool { return r.computed < r.goal }

// context is how many tokens the request has so far.
func (r *request) context() int { return r.Request.PromptTokens + r.generated }

// subject is the request that the outside knows: a job's owner.
func (r *request) subject() *request {
	if r.owner != nil {
		return r.owner
	}
	return r
}

// chunk is a prefill's part in a step.
type chunk struct {
	request *request
	tokens  int
}

// instance is one server: its queue, its batch, its pool, and the run of steps
// that it is in.
//
// A run is one step; or a number of steps that only decode, and in which nothing
// but the number of generated tokens can change: the streams are the same, none ends
// before the last step, the pool suffices, and nobody waits who
// could be admitted. Its steps then end at
//
//	end(j) = start + j*first + growth*j*(j-1)/2
//
// where first is the first step's time and growth what one more token of
// context in every stream adds to each further step. What a run does to blocks is
// caught up with when somebody looks or when it ends, in the order of stepping.
type instance struct {
	c       *Cluster
	index   int
	profile *Profile

	up       bool
	since    float64 // start or last Restore
	pool     pool
	members  []*request // every request here, in no order
	arriving []*request // in the front end
	queue    []*request // waiting, next to be admitted first
	ready    []*request
	batch    []*request // running, in order of admission
	kept     []*request // jobs done whose transfer has not begun
	count    [phases]int
	// blocked: the queue's first does not fit, and is not worth another try until
	// blocks were given back, a prefill went on, or another is first.
	blocked   bool
	transfers int // under way, in and out

	ongoing int // context tokens of the requests that count
	pending int // prefill tokens still to be computed of those ready or running

	stepping   bool
	generation uint32 // of the wake that is valid
	steps      int    // of the run
	done       int    // of those, applied
	start      float64
	first      float64
	growth     float64
	decodes    []*request
	chunks     []chunk
	due        [][]*request // at [j % BlockTokens] the decodes that fill a block with step j

	waitingPending int // memo of pendingWaiting, for the pool's version
	waitingVersion uint64
	waitingValid   bool
}

func (in *instance) blocksFor(tokens int) int {
	return (tokens + in.profile.BlockTokens - 1) / in.profile.BlockTokens
}

// add makes r a member of the instance.
func (in *instance) add(r *request, p phase) {
	r.at, r.member = in, len(in.members)
	in.members = append(in.members, r)
	in.enter(r, p)
}

// remove ends r's membership. Its blocks are given back, lists are the caller's.
func (in *instance) remove(r *request) {
	in.releaseBlocks(r)
	in.leave(r)
	last := len(in.members) - 1
	in.members[r.member] = in.members[last]
	in.members[r.member].member = r.member
	in.members[last] = nil
	in.members = in.members[:last]
	r.ended = true
}

// move changes r's phase. Its computed and goal are those of the old phase still.
func (in *instance) move(r *request, p phase) {
	in.leave(r)
	in.enter(r, p)
}

func (in *instance) enter(r *request, p phase) {
	r.phase = p
	in.account(r, 1)
}

func (in *instance) leave(r *request) { in.account(r, -1) }

func (in *instance) account(r *request, sign int) {
	in.count[r.phase] += sign
	if r.phase.counts() {
		in.ongoing += sign * r.context()
	}
	if r.phase == ready || r.phase == running {
		in.pending += sign * max(0, r.goal-r.computed)
	}
	in.waitingValid = false
}

// drop takes r out of a list, the order of which stays.
func drop(list []*request, r *request) []*request {
	for i := range list {
		if list[i] == r {
			copy(list[i:], list[i+1:])
			list[len(list)-1] = nil
			return list[:len(list)-1]
		}
	}
	return list
}

// releaseBlocks gives back all that r holds, the last block first, so that a
// prefix outlives what hangs on it.
func (in *instance) releaseBlocks(r *request) {
	if r.private+len(r.held) == 0 {
		return
	}
	in.blocked = false
	in.pool.give(r.private)
	for i := len(r.held) - 1; i >= 0; i-- {
		in.pool.release(r.held[i])
	}
	r.private = 0
	in.c.recycle(r.held)
	r.held = nil
}

// publish shares the prefix blocks that r has filled.
func (in *instance) publish(r *request, computed int) {
	size := in.c.prefixBlockTokens
	for i := len(r.held); i < len(r.blocks) && (i+1)*size <= computed; i++ {
		r.held = append(r.held, in.pool.publish(r.blocks[i], last(r.held)))
		r.private -= in.pool.span
	}
}

// last is the last of held prefix blocks, 0 for none.
func last(held []int32) int32 {
	if len(held) == 0 {
		return 0
	}
	return held[len(held)-1]
}

// missing is how many blocks r lacks to hold so many tokens.
func (in *instance) missing(r *request, tokens int) int {
	return in.blocksFor(tokens) - r.private - len(r.held)*in.pool.span
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
		if need > in.pool.available()-unheld*in.pool.span {
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
		if len(r.held) == hits {
			in.pool.take(need)
			r.private = need
			return cached, chunk, true
		}
		// Identities that are not chained: what bisection found has gaps.
		hits = len(r.held)
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

// makeRoom sees to n available blocks for r, a member of the batch, at the cost
// first of prefills kept for others, then of those admitted last, which start over; r itself if it is the
// last. It reports whether r has them, and whether someone was preempted.
func (in *instance) makeRoom(r *request, n int) (ok, preempted bool) {
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
	return true, preempted
}

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

// abandon gives up a prefill that is kept for another instance: the owner's instance does it itself.
func (in *instance) abandon(job *request) {
	in.kept = drop(in.kept, job)
	in.remove(job)
	r := job.owner
	r.job, r.remote = nil, false
	r.at.waitingValid = false
	r.at.blocked = false
	in.c.tell(TransferAbandoned, r, in, 0)
	in.c.push(event{seconds: in.c.now, kind: eventPoke, instance: int32(r.at.index)})
}

// schedule decides what the next run does, and starts it. Called when no run is under way.
func (in *instance) schedule() {
	if in.compose() && len(in.decodes)+len(in.chunks) == 0 {
		// Someone made room for himself; those who wait for it now come first.
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
		if n := in.missing(r, r.computed+1); n > 0 {
			ok, hit := in.makeRoom(r, n)
			preempted = preempted || hit
			if !ok {
				break
			}
			in.pool.take(n)
			r.private += n
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
		if n := in.missing(r, r.computed+tokens); n > 0 {
			ok, hit := in.makeRoom(r, n)
			preempted = preempted || hit
			if !ok {
				break
			}
			in.pool.take(n)
			r.private += n
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

// fetch starts the transfer of what r's prompt lacks here from where it was prefilled.
func (in *instance) fetch(r *request, cached, moved int) {
	source := r.job.at
	source.kept = drop(source.kept, r.job)
	loaded := len(in.batch) > 0 || len(source.batch) > 0 || in.transfers > 0 || source.transfers > 0
	in.transfers++
	source.transfers++
	bytes := float64(moved) * in.profile.KVBytesPerToken
	r.TransferTokens = moved
	r.TransferSeconds = math.Max(in.profile.Transfer.Seconds(bytes, loaded), source.profile.Transfer.Seconds(bytes, loaded))
	r.computed = cached
	in.move(r, transferring)
	in.c.tell(TransferStarted, r, in, moved)
	in.c.push(event{seconds: in.c.now + r.TransferSeconds, kind: eventTransfer, request: r})
}

// fetched ends a transfer: the source's blocks are given back, the request is ready for its
// last prompt token.
func (in *instance) fetched(r *request) {
	source := r.job.at
	in.transfers--
	source.transfers--
	source.remove(r.job)
	r.job, r.remote = nil, false
	if r.cancelled {
		in.remove(r)
		in.c.end(r, Cancelled)
	} else {
		r.computed = r.Request.PromptTokens - 1
		r.goal = r.Request.PromptTokens
		in.publish(r, r.computed)
		in.move(r, ready)
		in.ready = append(in.ready, r)
		in.c.tell(TransferEnded, r, in, r.TransferTokens)
	}
	source.poke()
	in.poke()
}

// runLength is how many steps from the one composed on are sure to be alike.
func (in *instance) runLength() int {
	if in.c.stepwise || len(in.chunks) > 0 || len(in.batch) > len(in.decodes) {
		return 1
	}
	full := len(in.batch) >= in.profile.MaxRunning
	if !full && (len(in.ready) > 0 || len(in.queue) > 0 && !in.blocked) {
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

// pendingWaiting is the prefill that those not yet in the batch bring with them, by
// what is cached now.
func (in *instance) pendingWaiting() int {
	if in.waitingValid && in.waitingVersion == in.pool.version {
		return in.waitingPending
	}
	sum := 0
	for _, list := range [2][]*request{in.arriving, in.queue} {
		for _, r := range list {
			if r.remote {
				sum++
				continue
			}
			r.hint = in.pool.prefix(in.reusable(r, r.goal), r.hint)
			sum += r.goal - r.hint*in.c.prefixBlockTokens
		}
	}
	in.waitingPending, in.waitingVersion, in.waitingValid = sum+in.count[transferring], in.pool.version, true
	return in.waitingPending
}

func (in *instance) state() State {
	if !in.up {
		return State{}
	}
	in.sync()
	size := in.profile.BlockTokens
	return State{
		Up:                   true,
		UptimeSeconds:        in.c.now - in.since,
		Running:              in.count[running],
		Waiting:              in.count[frontend] + in.count[waiting] + in.count[transferring] + in.count[ready],
		ActiveDecodes:        in.activeDecodes(),
		PendingPrefillTokens: in.pending + in.pendingWaiting(),
		OngoingTokens:        in.ongoing,
		KVUsedTokens:         (in.pool.capacity - in.pool.available()) * size,
		KVCapacityTokens:     in.pool.capacity * size,
		CachedTokens:         in.pool.cached * in.c.prefixBlockTokens,
	}
}

// activeDecodes counts the batch's streams past their prefill. While a run is under way
// they are its decodes; requests of the batch that prefill have not got there.
func (in *instance) activeDecodes() int {
	if in.stepping {
		return len(in.decodes)
	}
	return 0
}
