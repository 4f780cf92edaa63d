package sim

import (
	"errors"
	"fmt"
	"math"
	"slices"
)

// ErrInvalid is what every error about an argument is, by errors.Is.
var ErrInvalid = errors.New("sim: invalid argument")

// ErrDown is returned where an instance is named that is down.
var ErrDown = errors.New("sim: instance is down")

// Config is what a Cluster is made of.
type Config struct {
	// Instances holds a profile for each instance; at least one. An instance is
	// named by its index.
	Instances []Profile
	// PrefixBlockTokens is how many tokens an identity in Request.Blocks stands
	// for: a multiple of every profile's BlockTokens. 16 is what vLLM does; a
	// trace with coarser hashes (Mooncake: 512, Bailian: 16, the agentic
	// sessions: 64) sets its own, and then only whole blocks of that size are
	// shared. Allocation stays in BlockTokens.
	PrefixBlockTokens int
	// Listener is told what happens. Required.
	Listener Listener
}

// Cluster is a number of instances, the events to come and the clock.
type Cluster struct {
	now               float64
	events            queue
	scheduled         uint64 // events so far
	submitted         uint64 // requests so far
	listener          Listener
	instances         []*instance
	prefixBlockTokens int
	live              map[uint64]*request // by ID; never iterated
	notes             []note              // to be told to the listener
	telling           bool                // an event or the listener is at work: notes wait
	held              [][]int32           // slices to use again
	stepwise          bool                // tests: never skip steps
}

// note is one call to the listener to come: Progress, or Ended where Kind is 0.
type note struct {
	Progress
	record Record
}

type feed struct {
	next    func() (Request, bool)
	pending Request
}

// New makes a cluster at time 0, all instances up and empty. Errors are ErrInvalid
// and name the field.
func New(config Config) (*Cluster, error) {
	if len(config.Instances) == 0 {
		return nil, fmt.Errorf("%w: Instances must hold at least one profile", ErrInvalid)
	}
	if config.Listener == nil {
		return nil, fmt.Errorf("%w: Listener must be set", ErrInvalid)
	}
	c := &Cluster{
		listener:          config.Listener,
		prefixBlockTokens: config.PrefixBlockTokens,
		live:              make(map[uint64]*request),
	}
	for i := range config.Instances {
		p := config.Instances[i]
		if err := p.validate(); err != nil {
			return nil, fmt.Errorf("%w: Instances[%d].%w", ErrInvalid, i, err)
		}
		if !(config.PrefixBlockTokens >= 1 && config.PrefixBlockTokens <= maxTokens && config.PrefixBlockTokens%p.BlockTokens == 0) {
			return nil, fmt.Errorf("%w: PrefixBlockTokens is %d, must be a multiple of Instances[%d].BlockTokens, %d",
				ErrInvalid, config.PrefixBlockTokens, i, p.BlockTokens)
		}
		in := &instance{c: c, index: i, profile: &p, up: true}
		in.pool = newPool(p.capacityBlocks(), config.PrefixBlockTokens/p.BlockTokens)
		c.instances = append(c.instances, in)
	}
	return c, nil
}

// Now is the simulated time in seconds.
func (c *Cluster) Now() float64 { return c.now }

// Instances is how many instances there are.
func (c *Cluster) Instances() int { return len(c.instances) }

// push schedules an event, no earlier than now.
func (c *Cluster) push(e event) {
	if !(e.seconds > c.now) {
		e.seconds = c.now
	}
	e.seq = c.scheduled
	c.scheduled++
	c.events.push(e)
}

// Feed has the requests of next arrive, one after the other: Listener.Arrived is
// called at each one's ArrivalSeconds, or at once where that is past. A request
// is pulled only when the one before it arrives, so that a trace of any
// length needs no memory. next returns false at the end; a request that arrives
// at +Inf never does, and is the end too. Several feeds may run at once.
func (c *Cluster) Feed(next func() (Request, bool)) {
	c.pull(&feed{next: next})
}

func (c *Cluster) pull(f *feed) {
	if r, ok := f.next(); ok && !math.IsInf(r.ArrivalSeconds, 1) {
		f.pending = r
		c.push(event{seconds: r.ArrivalSeconds, kind: eventFeed, feed: f})
	}
}

// Inject has one request arrive at its ArrivalSeconds, by the rules of At.
func (c *Cluster) Inject(r Request) {
	c.At(r.ArrivalSeconds, func() { c.listener.Arrived(r) })
}

// At calls f at a time in seconds; where that is past or no number, at the
// present time, after what is due already; where it is +Inf, never.
func (c *Cluster) At(seconds float64, f func()) {
	if !math.IsInf(seconds, 1) {
		c.push(event{seconds: seconds, kind: eventCall, fn: f})
	}
}

// Submit sends a request to an instance, now. Errors: ErrInvalid (a field of the
// request, an unknown instance, an ID in use, a request that the whole pool
// could not hold), ErrDown. After an error nothing has changed.
func (c *Cluster) Submit(r Request, target int) error {
	in, err := c.admissible(r, target)
	if err != nil {
		return err
	}
	n := c.register(r, in, frontend)
	c.arrive(n)
	return nil
}

// SubmitSeparated has the prefill of a request done on source and its decode on
// target: source computes the prompt and one token, which is dropped; the
// request then queues at target until there are blocks for the whole prompt;
// these are reserved, what target does not have cached is moved, and target
// computes the last prompt token and goes on from there. Errors as Submit's;
// also ErrInvalid where the two are the same or either has no connector loaded.
func (c *Cluster) SubmitSeparated(r Request, source, target int) error {
	in, err := c.admissible(r, target)
	if err != nil {
		return err
	}
	from, err := c.admissible(r, source)
	if err != nil {
		return err
	}
	if from == in {
		return fmt.Errorf("%w: source and target are both instance %d", ErrInvalid, target)
	}
	for _, end := range [2]*instance{from, in} {
		if !end.profile.ConnectorLoaded {
			return fmt.Errorf("%w: instance %d has no connector loaded", ErrInvalid, end.index)
		}
	}
	n := c.register(r, in, elsewhere)
	n.remote = true
	n.PrefillInstance = source
	job := &request{
		Record: Record{Request: r}, sequence: n.sequence, owner: n, goal: r.PromptTokens,
		blocks: n.blocks[:min(len(n.blocks), r.PromptTokens/c.prefixBlockTokens)],
	}
	n.job = job
	from.add(job, frontend)
	c.arrive(job)
	return nil
}

// admissible checks a request and the instance that it is meant for.
func (c *Cluster) admissible(r Request, instance int) (*instance, error) {
	in, err := c.at(instance)
	if err != nil {
		return nil, err
	}
	switch {
	case !(r.ArrivalSeconds >= 0 && r.ArrivalSeconds <= math.MaxFloat64):
		return nil, fmt.Errorf("%w: ArrivalSeconds is %v, must be a number from 0 on", ErrInvalid, r.ArrivalSeconds)
	case !(r.PromptTokens >= 1 && r.PromptTokens <= maxTokens):
		return nil, fmt.Errorf("%w: PromptTokens is %d, must be 1 to %d", ErrInvalid, r.PromptTokens, maxTokens)
	case !(r.OutputTokens >= 1 && r.OutputTokens <= maxTokens):
		return nil, fmt.Errorf("%w: OutputTokens is %d, must be 1 to %d", ErrInvalid, r.OutputTokens, maxTokens)
	case in.blocksFor(r.PromptTokens+r.OutputTokens) > in.pool.capacity:
		return nil, fmt.Errorf("%w: %d prompt and %d output tokens are more than the pool of instance %d, %d tokens, could hold",
			ErrInvalid, r.PromptTokens, r.OutputTokens, instance, in.pool.capacity*in.profile.BlockTokens)
	case !in.up:
		return nil, fmt.Errorf("%w: %d", ErrDown, instance)
	}
	if _, there := c.live[r.ID]; there {
		return nil, fmt.Errorf("%w: ID %d is that of an unfinished request", ErrInvalid, r.ID)
	}
	return in, nil
}

func (c *Cluster) at(i int) (*instance, error) {
	if !(i >= 0 && i < len(c.instances)) {
		return nil, fmt.Errorf("%w: instance is %d, must be 0 to %d", ErrInvalid, i, len(c.instances)-1)
	}
	return c.instances[i], nil
}

func (c *Cluster) register(r Request, in *instance, p phase) *request {
	n := &request{
		Record:   Record{Request: r, Instance: in.index, PrefillInstance: NoInstance, DispatchSeconds: c.now},
		sequence: c.submitted, output: r.OutputTokens, goal: r.PromptTokens,
		blocks: r.Blocks[:min(len(r.Blocks), (r.PromptTokens+r.OutputTokens)/c.prefixBlockTokens)],
	}
	c.submitted++
	c.live[r.ID] = n
	in.add(n, p)
	return n
}

// arrive sends a request, whose phase is frontend, through the front end.
func (c *Cluster) arrive(r *request) {
	in := r.at
	in.arriving = append(in.arriving, r)
	delay := in.profile.FrontendSeconds + float64(in.profile.FrontendSecondsPerToken*float64(r.Request.PromptTokens))
	c.push(event{seconds: c.now + delay, kind: eventAdmit, request: r})
}

// hand passes a job that is done on to its owner's instance.
func (c *Cluster) hand(job *request) {
	r := job.owner
	c.tell(Prefilled, r, job.at, 0)
	r.at.move(r, frontend)
	c.arrive(r)
}

// Cancel takes an unfinished request back, wherever it is, and reports whether there was
// one. In the batch it takes effect at the end of the step, as in vLLM, during a
// transfer at the end of that. Ended is called with Cancelled, unless
// its last token comes out in that very step.
func (c *Cluster) Cancel(id uint64) bool {
	r := c.live[id]
	if r == nil {
		return false
	}
	in := r.at
	switch r.phase {
	case running:
		r.cancelled = true
		in.truncate()
	case transferring:
		r.cancelled = true
	default:
		c.withdraw(r, Cancelled)
	}
	c.deliver()
	return true
}

// withdraw ends r at once and frees what it has, on the source of its prefill too.
func (c *Cluster) withdraw(r *request, outcome Outcome) {
	in := r.at
	if job := r.job; job != nil && !job.ended {
		source := job.at
		switch {
		case job.phase == running:
			// The owner is forgotten, the job's blocks live till the step's end.
			job.cancelled = true
			source.truncate()
		default:
			if r.phase == transferring {
				source.transfers--
			}
			c.unlist(job)
			source.remove(job)
			c.push(event{kind: eventPoke, instance: int32(source.index)})
		}
	}
	if r.phase == transferring {
		in.transfers--
	}
	c.unlist(r)
	in.remove(r)
	c.push(event{kind: eventPoke, instance: int32(in.index)})
	c.end(r, outcome)
}

// unlist takes r out of the list that its phase has.
func (c *Cluster) unlist(r *request) {
	in := r.at
	switch r.phase {
	case frontend:
		in.arriving = drop(in.arriving, r)
	case waiting:
		if in.queue[0] == r {
			in.blocked = false
		}
		in.queue = drop(in.queue, r)
	case ready:
		in.ready = drop(in.ready, r)
	case running:
		in.batch = drop(in.batch, r)
	case kept:
		in.kept = drop(in.kept, r)
	}
}

// Fail takes an instance down: every request that it runs, holds, prefills for
// another or awaits KV for is Lost, its cache is gone. Errors: ErrInvalid, ErrDown.
func (c *Cluster) Fail(instance int) error {
	in, err := c.at(instance)
	if err != nil {
		return err
	}
	if !in.up {
		return fmt.Errorf("%w: %d", ErrDown, instance)
	}
	in.sync()
	in.up, in.stepping = false, false
	in.generation++ // the wake to come is stale
	lost := make([]*request, 0, len(in.members))
	for _, r := range in.members {
		lost = append(lost, r.subject())
	}
	slices.SortFunc(lost, func(a, b *request) int {
		if a.sequence < b.sequence {
			return -1
		}
		return 1 // of a request's two sides only one is here
	})
	for _, r := range lost {
		if !r.ended {
			c.withdraw(r, Lost)
		}
	}
	// What is left are jobs in the batch: their step will never end.
	for len(in.members) > 0 {
		r := in.members[0]
		c.unlist(r)
		in.remove(r)
	}
	in.decodes, in.chunks = in.decodes[:0], in.chunks[:0]
	in.pool = newPool(in.pool.capacity, in.pool.span)
	in.blocked, in.waitingValid = false, false
	c.deliver()
	return nil
}

// Restore brings a failed instance back, empty. For one that is up it is an
// ErrInvalid.
func (c *Cluster) Restore(instance int) error {
	in, err := c.at(instance)
	if err != nil {
		return err
	}
	if in.up {
		return fmt.Errorf("%w: instance %d is up", ErrInvalid, instance)
	}
	in.up, in.since = true, c.now
	return nil
}

// State is the truth about an instance now. An unknown instance is down.
func (c *Cluster) State(instance int) State {
	in, err := c.at(instance)
	if err != nil {
		return State{}
	}
	return in.state()
}

// CachedTokens is how much of a prompt, given by its length and blocks, would be
// found in the instance's prefix cache now: whole prefix blocks, and never the whole
// prompt, since its last token has to be computed. O(log n) in the
// number of blocks.
func (c *Cluster) CachedTokens(instance int, promptTokens int, blocks []uint64) int {
	in, err := c.at(instance)
	if err != nil || !in.up || promptTokens < 1 {
		return 0
	}
	in.sync()
	n := min(len(blocks), (promptTokens-1)/c.prefixBlockTokens)
	return in.pool.prefix(blocks[:n], n) * c.prefixBlockTokens
}

// Step handles the next event and calls the listener for what came of it. It is
// false when there is none left.
func (c *Cluster) Step() bool {
	for len(c.events) > 0 {
		if e := c.events.pop(); !c.stale(&e) {
			c.handle(e)
			return true
		}
	}
	return false
}

// Run steps until no event is left that is due by a time in seconds, +Inf for all
// of them. Now is then the time of the last one.
func (c *Cluster) Run(until float64) {
	for len(c.events) > 0 && c.events[0].seconds <= until {
		if e := c.events.pop(); !c.stale(&e) {
			c.handle(e)
		}
	}
}

func (c *Cluster) stale(e *event) bool {
	switch e.kind {
	case eventWake:
		in := c.instances[e.instance]
		return !in.stepping || in.generation != e.generation
	case eventAdmit, eventTransfer:
		return e.request.ended
	}
	return false
}

func (c *Cluster) handle(e event) {
	c.now = e.seconds
	c.telling = true
	switch e.kind {
	case eventCall:
		e.fn()
	case eventFeed:
		r := e.feed.pending
		c.pull(e.feed)
		c.listener.Arrived(r)
	case eventAdmit:
		r := e.request
		r.at.arriving = drop(r.at.arriving, r)
		r.at.enqueue(r)
	case eventWake:
		c.instances[e.instance].finish()
	case eventTransfer:
		e.request.at.fetched(e.request)
	case eventPoke:
		c.instances[e.instance].poke()
	}
	c.telling = false
	c.deliver()
}

// tell notes a progress for the listener.
func (c *Cluster) tell(kind ProgressKind, r *request, in *instance, tokens int) {
	c.notes = append(c.notes, note{Progress: Progress{
		Kind: kind, ID: r.Request.ID, Instance: in.index, Seconds: c.now, Tokens: tokens,
	}})
}

// end forgets a request and notes its record.
func (c *Cluster) end(r *request, outcome Outcome) {
	delete(c.live, r.Request.ID)
	r.Outcome, r.EndSeconds, r.GeneratedTokens = outcome, c.now, r.generated
	c.notes = append(c.notes, note{record: r.Record})
}

// deliver calls the listener for what is noted, in order. Notes that its calls give rise to
// come after.
func (c *Cluster) deliver() {
	if c.telling {
		return
	}
	c.telling = true
	for i := 0; i < len(c.notes); i++ {
		if n := c.notes[i]; n.Kind != 0 {
			c.listener.Progress(n.Progress)
		} else {
			c.listener.Ended(n.record)
		}
		c.notes[i] = note{}
	}
	c.notes = c.notes[:0]
	c.telling = false
}

// blank is an empty slice for the prefix blocks of a request.
func (c *Cluster) blank() []int32 {
	if n := len(c.held); n > 0 {
		s := c.held[n-1]
		c.held = c.held[:n-1]
		return s
	}
	return nil
}

func (c *Cluster) recycle(s []int32) {
	if cap(s) > 0 {
		c.held = append(c.held, s[:0])
	}
}
