// Package router is a router of one's own, as small as it can be: what is left
// to write once package track remembers and a policy decides. Copy router.go.
// examples/gateway is the same with HTTP around it.
package router

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/kvpolicy/kvpolicy"
	"github.com/kvpolicy/kvpolicy/track"
)

// Router decides where requests go, sends them, and keeps count. Fill in Policy
// and Tracker; its methods may then be called from any number of goroutines.
type Router struct {
	// Policy is what to decide by.
	Policy kvpolicy.Policy
	// Tracker is what is remembered. Discovery calls its Join and Leave, scrapes
	// its Observe, health checks its SetState.
	Tracker *track.Tracker
	// Attempts is how many instances a request is tried on, at least 1.
	Attempts int
	// Decided is told each decision with what it was decided on, where it is not
	// nil; see package decisionlog. It must be done with the snapshot when it
	// returns.
	Decided func(kvpolicy.Snapshot, kvpolicy.Decision)

	// mu makes a decision and its Begin one step, so that requests that come at
	// once see each other.
	mu       sync.Mutex
	buffer   track.Buffer
	funnel   kvpolicy.Funnel
	accuracy kvpolicy.Accuracy
}

// Send sends a request to the instance of that id, and calls seen with how many
// tokens the answer has so far, at least once it has begun.
type Send func(ctx context.Context, target string, seen func(tokens int64)) error

// Serve serves a request: it decides, sends, and tries another instance while
// nothing of an answer was seen. The error holds a *Refusal where the policy
// rejects the request, a *kvpolicy.FieldError where the request is faulty, and
// what Send returned last where it was sent.
func (r *Router) Serve(ctx context.Context, request track.Request, send Send) error {
	var (
		failed []string
		why    error
	)
	for request.Attempt = 0; request.Attempt < r.Attempts; request.Attempt++ {
		decision, err := r.begin(request, failed)
		if err != nil {
			return errors.Join(why, err)
		}
		answered, err := r.attempt(ctx, request, decision, send)
		if err == nil || answered || ctx.Err() != nil {
			return err
		}
		failed, why = append(failed, decision.Target), err
	}
	return why
}

// begin decides on a request and counts it, away from where it failed before.
func (r *Router) begin(request track.Request, failed []string) (kvpolicy.Decision, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	snapshot := r.Tracker.Snapshot(request, now, &r.buffer)
	for at := range snapshot.Instances {
		if i := &snapshot.Instances[at]; slices.Contains(failed, i.ID) {
			i.Unavailable = true
		}
	}
	decision, err := r.Policy.Decide(snapshot)
	if err != nil {
		return decision, err
	}
	r.funnel.Add(decision)
	if r.Decided != nil {
		r.Decided(snapshot, decision)
	}
	if decision.Action == kvpolicy.Reject {
		return decision, &Refusal{decision.Reason}
	}
	return decision, r.Tracker.Begin(request, decision, now)
}

// attempt sends a request where it was decided, and releases it on every way
// out. It tells whether anything of an answer was seen.
func (r *Router) attempt(ctx context.Context, request track.Request, decision kvpolicy.Decision, send Send) (answered bool, err error) {
	key, sent := request.Key(), time.Now()
	defer func() { r.Tracker.End(key, time.Now()) }()
	err = send(ctx, decision.Target, func(tokens int64) {
		now := time.Now()
		if !answered {
			answered = true
			r.Tracker.FirstToken(key, now)
			r.compare(decision, now.Sub(sent).Seconds())
		}
		r.Tracker.Progress(key, tokens, now)
	})
	return answered, err
}

// compare notes what a decision predicted and what came of it.
func (r *Router) compare(decision kvpolicy.Decision, seconds float64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	_ = r.accuracy.Add(decision, max(0, seconds)) // what is sent predicts something
}

// Report is which reasons decided how often, and how the predicted times to
// the first token compare with those seen: what to look at before any constant
// is changed.
func (r *Router) Report() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return fmt.Sprint(r.funnel, "\n", r.accuracy.String())
}

// Refusal is the error for a request that a policy rejects.
type Refusal struct{ Reason kvpolicy.Reason }

func (e *Refusal) Error() string { return "refused: " + e.Reason.String() }

// Status is what to answer over HTTP: 503 while no instance is available, with
// a Retry-After; 429 where none could hold the request however idle.
func (e *Refusal) Status() int {
	if e.Reason == kvpolicy.NoFeasibleInstance {
		return http.StatusTooManyRequests
	}
	return http.StatusServiceUnavailable
}
