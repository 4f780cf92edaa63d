package router

import (
	"context"
	"errors"
	"net/http"
	"sync"
	"time"

	"github.com/kvpolicy/kvpolicy/track"
)

// member is an instance among the router's, and how it is.
type member struct {
	instance Instance // changed with both the router's lock and mu held
	router   *Router
	cancel   context.CancelFunc

	mu       sync.Mutex
	closed   bool // left: nothing about it is of interest any more
	failing  int  // requests that failed in a row
	silent   int  // scrapes that failed in a row
	isDown   bool
	retryAt  time.Time     // while down, when it is tried again
	backoff  time.Duration // how long it is down the next time
	fault    string        // of the last scrape, so that it is logged once
	noTokens time.Time     // until when it is not asked for the tokens of prompts
	// noTokensFrom is of how many bytes those prompts are, at least.
	noTokensFrom int
}

func (r *Router) newMember(i Instance) *member {
	ctx, cancel := context.WithCancel(r.context)
	m := &member{instance: i, router: r, cancel: cancel, backoff: r.config.Backoff}
	r.work.Add(1)
	go func() {
		defer r.work.Done()
		ticker := time.NewTicker(r.config.ScrapeEvery)
		defer ticker.Stop()
		for {
			m.check(ctx, i)
			select {
			case <-ctx.Done():
				return
			case <-ticker.C:
			}
		}
	}()
	return m
}

// set changes a member, and tells the tracker what state follows.
func (m *member) set(change func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return
	}
	change()
	_ = m.router.tracker.SetState(m.instance.ID, m.stateLocked())
}

func (m *member) stateLocked() track.State {
	switch {
	case m.isDown:
		return track.Down
	case m.instance.Draining:
		return track.Draining
	}
	return track.Ready
}

func (m *member) state() track.State {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.stateLocked()
}

func (m *member) down() bool { return m.state() == track.Down }

// close ends all that may still come of a member.
func (m *member) close() {
	m.cancel()
	m.mu.Lock()
	defer m.mu.Unlock()
	m.closed = true
}

// failed counts a failure in a row of failures; the last of them takes the
// instance down.
func (m *member) failed(row *int, why string) {
	now := time.Now()
	m.set(func() {
		if *row++; *row < m.router.config.Failures || m.isDown {
			return
		}
		m.isDown, m.retryAt = true, now.Add(m.backoff)
		m.router.config.Logger.Warn("instance down", "instance", m.instance.ID, "why", why, "for", m.backoff.String())
		m.backoff = min(2*m.backoff, m.router.config.MaxBackoff)
	})
}

// requestFailed counts a request that the instance failed.
func (m *member) requestFailed(why string) { m.failed(&m.failing, why) }

// answered says that the instance has answered a request.
func (m *member) answered() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.failing, m.backoff = 0, m.router.config.Backoff
}

// check scrapes the instance, and tries it again where it is down.
func (m *member) check(ctx context.Context, i Instance) {
	r := m.router
	asking, cancel := context.WithTimeout(ctx, r.config.ScrapeTimeout)
	defer cancel()
	metrics, err := r.scrape(asking, i)
	if ctx.Err() != nil {
		return
	}
	now := time.Now()
	var silence *silentError
	m.mu.Lock()
	if err == nil && !m.closed {
		err = r.tracker.Observe(i.ID, metrics, now)
	}
	text := ""
	if err != nil {
		text = err.Error()
		r.metrics.scrapeErrors.WithLabelValues(i.ID).Inc()
	}
	changed := text != m.fault
	m.fault = text
	if !errors.As(err, &silence) {
		m.silent = 0 // it answers, if perhaps nothing useful
	}
	again := m.isDown && !now.Before(m.retryAt)
	m.mu.Unlock()
	if changed && err != nil {
		r.config.Logger.Warn("metrics", "instance", i.ID, "error", err)
	}
	if silence != nil {
		m.failed(&m.silent, text)
		return
	}
	if again && r.healthy(asking, i) {
		m.set(func() { m.isDown, m.failing = false, 0 })
		r.config.Logger.Info("instance up again", "instance", i.ID)
	}
}

// silentError is what comes of a server that does not answer, or says itself
// that it cannot.
type silentError struct{ err error }

func (e *silentError) Error() string { return e.err.Error() }
func (e *silentError) Unwrap() error { return e.err }

// healthy asks an instance how it is. One that has no such page is taken for
// well, since it answers.
func (r *Router) healthy(ctx context.Context, i Instance) bool {
	response, err := r.get(ctx, i, "/health")
	if err != nil {
		return false
	}
	discard(response.Body)
	return response.StatusCode < http.StatusInternalServerError
}
