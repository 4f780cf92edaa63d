// Package router is what a gateway and an endpoint picker share: it knows the
// instances, scrapes them, tracks what is in flight, decides by a policy, and
// says what it decided in logs and metrics.
package router

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvpolicy/kvpolicy"
	"github.com/kvpolicy/kvpolicy/track"
)

// Config is what a Router is made of. Take DefaultConfig and assign the fields
// to change.
type Config struct {
	// Policy is what to decide by.
	Policy kvpolicy.Policy
	// Track sizes the tracker.
	Track track.Config
	// Client is what instances are scraped, probed and asked for tokens with. It
	// should not follow redirects.
	Client *http.Client
	// ScrapeEvery is the time between two scrapes of an instance, above 0.
	// Default 500 ms.
	ScrapeEvery time.Duration
	// ScrapeTimeout bounds a scrape and a probe, above 0. Default 2 s.
	ScrapeTimeout time.Duration
	// Failures is the number of failures in a row, of requests or of scrapes,
	// after which an instance is down, at least 1. Default 3.
	Failures int
	// Backoff is how long an instance is down before it is tried again, above 0;
	// it doubles each time that it is down again without having answered in
	// between, up to MaxBackoff. Default 1 s and 30 s.
	Backoff, MaxBackoff time.Duration
	// FitCurvesEvery is the time between two fits of survival curves, where the
	// policy has a hazard model, above 0. Default 1 min.
	FitCurvesEvery time.Duration
	// Tokenize asks servers for the tokens of a prompt, by vLLM's /tokenize;
	// without it, and where a server does not have it, their number is
	// estimated. Default true.
	Tokenize bool
	// TokenizeTimeout bounds that, above 0. Default 500 ms.
	TokenizeTimeout time.Duration
	// Fallbacks is the number of further instances that a decision names, for
	// those who let others do the retries, at least 0. Default 0.
	Fallbacks int
	// Logger is where decisions and what befalls instances are logged; nil is
	// nowhere.
	Logger *slog.Logger
	// DecisionLog takes a JSON object a line for each decision, in one Write
	// each, for examples/decide to read; nil is none.
	DecisionLog io.Writer
	// OnDecision is called with each decision, nil for nobody. It must not keep
	// the router waiting.
	OnDecision func(Record)
	// Registerer is where the metrics are registered; nil is nowhere.
	Registerer prometheus.Registerer
}

// DefaultConfig returns the defaults that the fields of Config name, and
// kvpolicy.Unified with metrics that count as fresh for 5 s.
func DefaultConfig() Config {
	policy := kvpolicy.Unified()
	policy.MaxMetricsAgeSeconds = 5
	return Config{
		Policy:          policy,
		Track:           track.DefaultConfig(),
		Client:          http.DefaultClient,
		ScrapeEvery:     500 * time.Millisecond,
		ScrapeTimeout:   2 * time.Second,
		Failures:        3,
		Backoff:         time.Second,
		MaxBackoff:      30 * time.Second,
		FitCurvesEvery:  time.Minute,
		Tokenize:        true,
		TokenizeTimeout: 500 * time.Millisecond,
	}
}

// Router decides where requests go. Its methods may be called from any number
// of goroutines. Close it.
type Router struct {
	config    Config
	tracker   *track.Tracker
	estimator *Estimator
	metrics   *metrics
	record    *recorder

	stop    context.CancelFunc
	context context.Context
	work    sync.WaitGroup

	// mu makes a decision and its Begin one step: requests that come at once
	// would otherwise all be decided on the same counts, and pile up.
	mu      sync.Mutex
	members map[string]*member
	order   []*member // by id
	buffer  track.Buffer
	synced  chan struct{} // closed by the first SetInstances
	turn    uint64        // of the tokenizer to ask next
}

// New makes a router without instances. The error is that of the policy or of
// the tracker's configuration, or a collector that is registered already.
func New(c Config) (*Router, error) {
	if err := c.Policy.Validate(); err != nil {
		return nil, fmt.Errorf("policy: %w", err)
	}
	tracker, err := track.New(c.Track)
	if err != nil {
		return nil, fmt.Errorf("track: %w", err)
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	r := &Router{config: c, tracker: tracker, estimator: NewEstimator(), members: map[string]*member{}, synced: make(chan struct{})}
	if r.record, err = newRecorder(c); err != nil {
		return nil, err
	}
	if r.metrics, err = newMetrics(c.Registerer, tracker); err != nil {
		return nil, err
	}
	r.context, r.stop = context.WithCancel(context.Background())
	if c.Policy.Hazard.Enabled {
		r.work.Add(1)
		go r.fitCurves()
	}
	return r, nil
}

// Close stops all that the router does by itself, and waits for it.
func (r *Router) Close() {
	r.stop()
	r.work.Wait()
}

// Tracker is what the router remembers.
func (r *Router) Tracker() *track.Tracker { return r.tracker }

// Estimator is what the router has learned of tokens.
func (r *Router) Estimator() *Estimator { return r.estimator }

func (r *Router) fitCurves() {
	defer r.work.Done()
	ticker := time.NewTicker(r.config.FitCurvesEvery)
	defer ticker.Stop()
	for {
		select {
		case <-r.context.Done():
			return
		case now := <-ticker.C:
			r.tracker.FitCurves(now)
		}
	}
}

// checkInstances checks that a router of this configuration can take these
// instances.
func (c *Config) checkInstances(all []Instance) error {
	if err := unique(all); err != nil {
		return err
	}
	// Join is what checks an instance; a fault in the last must leave the first
	// alone.
	scratch, err := track.New(track.DefaultConfig())
	if err != nil {
		return err
	}
	for at, i := range all {
		cost := c.Policy.Cost
		switch {
		case cost.CountDecode && cost.DecodeRate == 0 && i.Info.DecodeRate == 0:
			err = &kvpolicy.FieldError{Path: "decode_rate", Value: "0", Want: "be given, here or in the policy: the policy counts decode"}
		case cost.PrefillRate == 0 && i.Info.PrefillRate == 0:
			err = &kvpolicy.FieldError{Path: "prefill_rate", Value: "0", Want: "be given, here or in the policy"}
		default:
			err = scratch.Join(i.ID, i.Info, time.Now())
		}
		if err != nil {
			return fmt.Errorf("instances[%d]: %w", at, err)
		}
	}
	return nil
}

// SetInstances makes these the instances: new ones join, changed ones are
// taken over, and those that are not among them leave. Requests on their way to
// one that leaves go on. On an error nothing is changed.
func (r *Router) SetInstances(all []Instance) error {
	if err := r.config.checkInstances(all); err != nil {
		return err
	}
	now := time.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.context.Err() != nil {
		return errors.New("the router is closed")
	}
	select {
	case <-r.synced:
	default:
		close(r.synced)
	}
	for id, m := range r.members {
		at := slices.IndexFunc(all, func(i Instance) bool { return i.ID == id })
		if at < 0 || all[at].URL.String() != m.instance.URL.String() {
			r.leave(m, now)
		}
	}
	for _, i := range all {
		_ = r.tracker.Join(i.ID, i.Info, now) // checked above
		m := r.members[i.ID]
		if m == nil {
			m = r.newMember(i)
			r.members[i.ID] = m
			r.config.Logger.Info("instance joined", "instance", i.ID, "url", i.URL.String())
		}
		m.set(func() { m.instance = i })
	}
	r.order = r.order[:0]
	for _, m := range r.members {
		r.order = append(r.order, m)
	}
	slices.SortFunc(r.order, func(a, b *member) int { return strings.Compare(a.instance.ID, b.instance.ID) })
	return nil
}

// leave takes an instance out; r.mu is held.
func (r *Router) leave(m *member, now time.Time) {
	how := track.Planned
	if m.down() {
		how = track.Lost
	}
	m.close()
	_ = r.tracker.Leave(m.instance.ID, how, now) // how is one of the two
	delete(r.members, m.instance.ID)
	r.metrics.forget(m.instance.ID)
	r.config.Logger.Info("instance left", "instance", m.instance.ID, "how", how.String())
}

// Instances are the instances that take requests, by id.
func (r *Router) Instances() []Instance {
	r.mu.Lock()
	defer r.mu.Unlock()
	var ready []Instance
	for _, m := range r.order {
		if m.state() == track.Ready {
			ready = append(ready, m.instance)
		}
	}
	return ready
}

// Synced is closed once the instances have been told, be there any or not.
func (r *Router) Synced() <-chan struct{} { return r.synced }

// Refusal is the error for a request that is sent nowhere.
type Refusal struct {
	// Status is what to answer with: 400, 429, 500 or 503.
	Status int
	// Reason is the decision's, 0 where there was none.
	Reason kvpolicy.Reason
	// RetryAfter is when to try again, 0 where that is pointless.
	RetryAfter time.Duration
	// Err says why.
	Err error
}

func (e *Refusal) Error() string { return e.Err.Error() }

// Unwrap is the reason.
func (e *Refusal) Unwrap() error { return e.Err }

// RetryAfterSeconds is RetryAfter as the header has it, empty for none.
func (e *Refusal) RetryAfterSeconds() string {
	if e.RetryAfter <= 0 {
		return ""
	}
	return strconv.Itoa(int((e.RetryAfter + time.Second - 1) / time.Second))
}

// Logger is where the router logs.
func (r *Router) Logger() *slog.Logger { return r.config.Logger }
