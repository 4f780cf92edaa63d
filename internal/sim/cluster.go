package sim

import "errors"

// ErrInvalid is what every error about an argument is, by errors.Is.
var ErrInvalid = errors.New("sim: invalid argument")

// ErrDown is returned where an instance is named that is down.
var ErrDown = errors.New("sim: instance is down")

// Config is what a Cluster is made of.
type Config struct {
	// Instances holds a profile for each instance; at least one. An
	// instance is named by its index.
	Instances []Profile
	// PrefixBlockTokens is how many tokens an identity in Request.Blocks
	// stands for: a multiple of every profile's BlockTokens. 16 is what vLLM
	// does; a trace with coarser hashes (Mooncake: 512, Bailian: 16, the agentic
	// sessions: 64) sets its own, and only whole such blocks are shared. Allocation stays in
	// BlockTokens.
	PrefixBlockTokens int
	// Listener is told what happens. Required.
	Listener Listener
}

// Cluster is a number of instances, the events to come and the clock.
type Cluster struct{}

// New makes a cluster at time 0, all instances up and empty.
func New(config Config) (*Cluster, error) { return nil, ErrInvalid }

// Now is the simulated time in seconds.
func (c *Cluster) Now() float64 { return 0 }

// Feed has the requests of next arrive, one after the other: Listener.Arrived is
// called at each one's ArrivalSeconds. A request is pulled only when the one before it has
// arrived, so that a trace of any length needs no memory. next returns false at the
// end. A request that should have arrived before now arrives now. Several feeds may run at once.
func (c *Cluster) Feed(next func() (Request, bool)) {}

// Inject has one request arrive at its ArrivalSeconds, or now if that is past.
func (c *Cluster) Inject(r Request) {}

// At calls f at a time in seconds; now, after what is already due, if that is past or no number.
func (c *Cluster) At(seconds float64, f func()) {}

// Submit sends a request to an instance, now. Errors: ErrInvalid (a field of the
// request, an unknown instance, an ID in use, a request that the whole
// pool cannot hold), ErrDown. After an error nothing has changed.
func (c *Cluster) Submit(r Request, target int) error { return ErrInvalid }

// SubmitSeparated has the prefill of a request done on source and its decode on
// target: source computes the prompt and one token (which is dropped), then the request
// queues at target for blocks, they are reserved, what target does not have cached is moved, and target
// computes the last prompt token and goes on. Errors as Submit's; also
// ErrInvalid where the two are the same or either has no connector loaded.
func (c *Cluster) SubmitSeparated(r Request, source, target int) error { return ErrInvalid }

// Cancel takes an unfinished request back, wherever it is, and reports whether there was
// one. In the batch it takes effect at the end of the step, as in vLLM. Ended is
// called with Cancelled, unless its last token comes out in that very step.
func (c *Cluster) Cancel(id uint64) bool { return false }

// Fail takes an instance down: every request that it runs, holds, prefills
// for another or awaits KV for is Lost, its cache is gone. Errors: ErrInvalid, ErrDown.
func (c *Cluster) Fail(instance int) error { return ErrInvalid }

// Restore brings a failed instance back, empty. An instance that is up is an ErrInvalid.
func (c *Cluster) Restore(instance int) error { return ErrInvalid }

// Instances is how many instances there are.
func (c *Cluster) Instances() int { return 0 }

// State is the truth about an instance now. An unknown instance is
// never up.
func (c *Cluster) State(instance int) State { return State{} }

// CachedTokens is how much of a prompt, given by its length and blocks, would be
// found in the instance's prefix cache now: whole blocks, and never the
// whole prompt, since its last token has to be computed. O(log n) in
// the number of blocks.
func (c *Cluster) CachedTokens(instance int, promptTokens int, blocks []uint64) int { return 0 }

// Step handles the next event and calls the listener for what came of it;
// false when there is none left.
func (c *Cluster) Step() bool { return false }

// Run steps until no event is left that is due by a time in seconds, +Inf for
// all of them; Now is then the last event's time. A feed without an end never
// lets an infinite Run return.
func (c *Cluster) Run(until float64) {
}
