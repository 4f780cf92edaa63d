package replay

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"

	"github.com/kvpolicy/kvpolicy"
	"github.com/kvpolicy/kvpolicy/internal/sim"
	"github.com/kvpolicy/kvpolicy/internal/workload"
)

// Objectives are the service levels that goodput counts by. Both hold or the
// request does not count.
type Objectives struct {
	// TTFTSeconds is the greatest time to the first token, inclusive; more
	// than 0.
	TTFTSeconds float64
	// TPOTSeconds is the greatest mean time between a request's tokens,
	// inclusive; more than 0. A request of one token has none and passes.
	TPOTSeconds float64
}

// Config is one run.
type Config struct {
	// Workload is what is sent, Options which part of it and how fast.
	Workload *workload.Workload
	Options  workload.Options
	// Policy decides. One that counts on failures, with a hazard model or
	// migration, is refused: no instance fails here.
	Policy kvpolicy.Policy
	// Instances are the servers, at least one.
	Instances []sim.Profile
	// View is what the router sees.
	View View
	// Objectives are what goodput counts by.
	Objectives Objectives
	// Ended, where it is not nil, is called whenever a request has ended, with
	// the simulated time.
	Ended func(seconds float64)
}

// runner is one run at work. It listens to the cluster and feeds the router.
type runner struct {
	*router
	config Config
	feed   *workload.Feed
	wake   float64 // the earliest wake-up asked for
	done   bool    // nothing is to come and nothing is in flight
	err    error
	result *Result
	random *rand.Rand // chooses the sampled predictions, nothing else
}

// Run replays. It stops early with the context's error where that is done. A
// request that no instance can take counts as lost in the Result: the caller
// says whether that is an error. Errors are those of the fields of Config (a
// FieldError, or sim.ErrInvalid for a profile), of reading the workload, and of
// the policy.
func Run(ctx context.Context, config Config) (result *Result, err error) {
	r, err := newRunner(config)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, r.feed.Close()) }()
	for events := 0; !r.done && r.err == nil; events++ {
		if events%256 == 0 && ctx.Err() != nil {
			return nil, ctx.Err()
		}
		if !r.cluster.Step() {
			break
		}
	}
	return r.finished()
}

func newRunner(config Config) (*runner, error) {
	view, err := config.View.withDefaults()
	if err != nil {
		return nil, err
	}
	switch {
	case config.Workload == nil:
		return nil, invalid("workload", nil, "be set")
	case !(config.Objectives.TTFTSeconds > 0):
		return nil, invalid("objectives.ttft_seconds", config.Objectives.TTFTSeconds, "be more than 0")
	case !(config.Objectives.TPOTSeconds > 0):
		return nil, invalid("objectives.tpot_seconds", config.Objectives.TPOTSeconds, "be more than 0")
	case config.Policy.Hazard.Enabled:
		return nil, invalid("policy.hazard", "on", "be off: no instance fails in a replay")
	case config.Policy.Migration.Enabled:
		return nil, invalid("policy.migration", "on", "be off: no instance fails in a replay")
	}
	if err := config.Policy.Validate(); err != nil {
		return nil, err
	}
	for i := range config.Instances {
		if config.Policy.Separation.Enabled && !config.Instances[i].ConnectorLoaded {
			return nil, invalid(fmt.Sprintf("instances[%d].connector_loaded", i), false, "be true for a policy with PD-separation")
		}
	}
	r := &runner{config: config, wake: math.Inf(1), random: rand.New(rand.NewPCG(config.Options.Seed, 0))}
	cluster, err := sim.New(sim.Config{
		Instances:         config.Instances,
		PrefixBlockTokens: config.Workload.BlockTokens(),
		Listener:          r,
	})
	if err != nil {
		return nil, err
	}
	if r.feed, err = config.Workload.Start(config.Options); err != nil {
		return nil, err
	}
	r.router = newRouter(cluster, config.Policy, view, config.Workload.BlockTokens())
	r.result = &Result{Instances: make([]InstanceResult, len(config.Instances))}
	r.expect()
	if !r.view.Truth {
		r.scrapeAgain()
	}
	return r, nil
}

// finished checks that all is done, and gives the result.
func (r *runner) finished() (*Result, error) {
	if r.err == nil {
		// The feed tells its end from a failure only when asked.
		if _, r.err = r.feed.Next(); r.err == nil {
			r.err = errors.New("replay: requests were left unsent")
		} else if errors.Is(r.err, io.EOF) {
			r.err = nil
		}
	}
	if r.err == nil && !r.balanced() {
		r.err = errors.New("replay: the router's books do not close")
	}
	if r.err != nil {
		return nil, r.err
	}
	r.result.EndSeconds = r.cluster.Now()
	r.result.OngoingTokens = r.ongoing.finish(r.cluster.Now())
	return r.result, nil
}

// longIdle is the number of scrapes of an idle fleet from which on they are
// skipped.
const longIdle = 1000

// scrapeAgain scrapes now and then every ScrapeSeconds until the end. While
// nothing is in flight, every scrape reads the same: of a long idle time only
// the last ones are taken, those that a router can still see when the next
// request arrives.
func (r *runner) scrapeAgain() {
	if r.done {
		return
	}
	r.scrape()
	periods := 1.0
	if len(r.inFlight) == 0 {
		idle := r.wake - r.cluster.Now() - r.view.DelaySeconds
		if n := math.Floor(idle/r.view.ScrapeSeconds) - 2; n > longIdle && !math.IsInf(n, 1) {
			periods = n
		}
	}
	r.cluster.At(r.cluster.Now()+float64(periods*r.view.ScrapeSeconds), r.scrapeAgain)
}

// expect asks to be woken when the next request that is known is due.
func (r *runner) expect() {
	at, ok := r.feed.Peek()
	if !ok {
		r.done = len(r.inFlight) == 0
		return
	}
	if at < r.wake {
		r.wake = at
		r.cluster.At(at, r.send)
	}
}

// send dispatches what is due. A call for a time at which nothing is due any
// more, because an earlier one was asked for since, does nothing: it must not
// ask for another, or such calls would never become fewer.
func (r *runner) send() {
	if r.cluster.Now() < r.wake {
		return
	}
	r.wake = math.Inf(1)
	for r.err == nil {
		at, ok := r.feed.Peek()
		if !ok || at > r.cluster.Now() {
			break
		}
		q, err := r.feed.Next()
		if err != nil {
			r.err = err
			return
		}
		r.arrived(&q)
	}
	r.expect()
}

func (r *runner) arrived(q *workload.Request) {
	out := r.result
	out.Requests++
	out.InputTokens += int64(q.InputTokens)
	d, err := r.dispatch(q)
	if err != nil && !errors.Is(err, sim.ErrInvalid) {
		r.err = fmt.Errorf("request %d: %w", q.ID, err)
		return
	}
	if err != nil || d.Action == kvpolicy.Reject {
		// No instance can ever hold it. Its client goes on without an answer.
		r.finish(q.ID)
		return
	}
	out.Funnel.Add(d)
}

// finish tells the feed that a request is through.
func (r *runner) finish(id uint64) {
	if err := r.feed.Finish(id, r.cluster.Now()); err != nil && r.err == nil {
		r.err = err
	}
	if r.config.Ended != nil {
		r.config.Ended(r.cluster.Now())
	}
}

// Arrived is never called: requests come from the workload's feed.
func (r *runner) Arrived(sim.Request) {}

// Progress keeps the router's books.
func (r *runner) Progress(p sim.Progress) { r.progress(p) }

// Ended counts a request that is through.
func (r *runner) Ended(record sim.Record) {
	f := r.ended(record.Request.ID)
	if record.Outcome == sim.Completed {
		if err := r.result.add(&record, f, r.config.Objectives, r.random); err != nil && r.err == nil {
			r.err = err
		}
	}
	r.finish(record.Request.ID)
	r.expect()
}
