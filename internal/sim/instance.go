package sim

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
	Record           // of a job only Request is used
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
	in.sync() // what was evicted before these blocks came back stays evicted
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
