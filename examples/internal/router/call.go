package router

import (
	"context"
	"crypto/rand"
	"errors"
	"math"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/kvpolicy/kvpolicy"
	"github.com/kvpolicy/kvpolicy/track"
)

// Call is one request of a client, over all attempts at it. It is used by one
// goroutine.
type Call struct {
	router  *Router
	request track.Request
	model   string
	// bytes is the size of the prompt's text where its tokens were estimated,
	// to learn from what the server counts.
	bytes int64
	// exact says that the prompt's tokens are known.
	exact bool
	// avoid are the ids of instances at which an attempt has failed, only the
	// addresses that the call may go to, nil for all.
	avoid []string
	only  []string
	last  *Attempt
	// errored are the instances that answered with an error of which it is not
	// known yet whether it is theirs or the request's.
	errored []*member
}

// NewCall begins a request. The body is nil where there is none, session is
// empty for none. The tokens of its prompt are asked of a server, or estimated.
func (r *Router) NewCall(ctx context.Context, body *Body, session string) *Call {
	c := &Call{router: r}
	c.request.ID = rand.Text()
	if body == nil {
		return c
	}
	if session == "" {
		session = body.User
	}
	c.request.Session, c.model = bounded(session), bounded(body.Model)
	salt := track.Salt{Model: c.model}
	tokens := body.Tokens
	if tokens == nil {
		tokens = r.tokenize(ctx, body)
	}
	if c.exact = tokens != nil; c.exact {
		c.request.ContextTokens = int64(len(tokens))
		c.request.Prompt = r.tracker.TokenPrompt(nil, salt, tokens)
	} else {
		c.bytes = int64(len(body.Text))
		c.request.ContextTokens = r.estimator.Prompt(c.model, c.bytes)
		c.request.Prompt = r.tracker.TextPrompt(nil, salt, body.Text)
	}
	c.request.RemainingTokens = min(r.estimator.Completion(c.model, body.MaxTokens), maxRemaining)
	return c
}

// maxRemaining keeps a client that asks for 1e15 tokens within what a
// snapshot holds.
const maxRemaining = 1e12

// bounded keeps names that clients choose from filling the memory: of longer
// ones the first bytes count.
func bounded(name string) string {
	const most = 256
	if len(name) > most {
		name = strings.ToValidUTF8(name[:most], "")
	}
	return strings.Clone(name)
}

// ID names the call, in logs and to the servers.
func (c *Call) ID() string { return c.request.ID }

// CutOff says that the prompt has about so many bytes, of which the body that
// the call began with holds no more than the beginning: its length is
// estimated, and what nobody has read does not count as cached. A prompt of
// token ids, which come all or not at all, stays as it is.
func (c *Call) CutOff(bytes int64) {
	if c.exact {
		return
	}
	bytes = max(bytes, c.bytes)
	c.request.ContextTokens = c.router.estimator.Prompt(c.model, bytes)
	c.request.Prompt = c.request.Prompt.BeginningOf(bytes)
	c.bytes = 0 // the size of a body is too rough to learn from
}

// Only restricts the call to instances of these addresses.
func (c *Call) Only(addresses []string) { c.only = append([]string{}, addresses...) }

// Avoid keeps further attempts from an instance.
func (c *Call) Avoid(id string) { c.avoid = append(c.avoid, id) }

// Absolve says that it may well be the request which attempts that ended as
// Errored have failed at: they are held against no instance.
func (c *Call) Absolve() { c.errored = nil }

// Attempt is one try at a call, counted in the ledger until it ends.
type Attempt struct {
	// Decision is what was decided.
	Decision kvpolicy.Decision
	// Target is where the request goes, Source where its prefill does, for
	// PrefillRemote.
	Target, Source Instance
	// Fallbacks are where it may go instead, the best first.
	Fallbacks []Instance

	call     *Call
	key      track.Key
	at       time.Time
	guess    *time.Timer
	first    bool
	progress int64
	ended    bool
}

// Next decides where the call goes, and counts it there. It must be ended. The
// error is a *Refusal.
func (c *Call) Next() (*Attempt, error) {
	r := c.router
	now := time.Now()
	if c.last != nil {
		c.request.Attempt++
	}
	r.mu.Lock()
	started := time.Now()
	s := r.tracker.Snapshot(c.request, now, &r.buffer)
	c.exclude(&s)
	d, err := r.config.Policy.Decide(s)
	a := &Attempt{Decision: d, call: c, key: c.request.Key(), at: now}
	if err == nil && d.Action != kvpolicy.Reject {
		if err = r.tracker.Begin(c.request, d, now); err == nil {
			a.Target = r.members[d.Target].instance
			if d.Action == kvpolicy.PrefillRemote {
				a.Source = r.members[d.PrefillOn].instance
			}
		}
	}
	took := time.Since(started)
	record := Record{Name: c.request.ID, Time: now, Session: c.request.Session, Model: c.model,
		Attempt: c.request.Attempt, Decision: d, Snapshot: s}
	if r.record.keeps {
		record.Snapshot.Instances = slices.Clone(s.Instances)
	}
	if err == nil {
		record.target(s, d)
	}
	a.Fallbacks = r.fallbacks(s, d)
	never := d.Reason == kvpolicy.NoFeasibleInstance && !r.couldEver(s)
	r.mu.Unlock()

	if err != nil {
		r.config.Logger.Error("no decision", "request", c.request.ID, "error", err)
		return nil, refusal(err)
	}
	c.last = a
	r.metrics.decided(d, took)
	if c.request.Attempt > 0 && d.Target != "" {
		r.metrics.retries.WithLabelValues(d.Target).Inc()
	}
	r.record.write(record)
	if d.Action == kvpolicy.Reject {
		return nil, c.rejected(d, never)
	}
	return a, nil
}

// exclude makes what the call may not go to unavailable.
func (c *Call) exclude(s *kvpolicy.Snapshot) {
	for at := range s.Instances {
		i := &s.Instances[at]
		if slices.Contains(c.avoid, i.ID) || c.only != nil && !slices.Contains(c.only, c.router.members[i.ID].instance.Address()) {
			i.Unavailable = true
		}
	}
}

// fallbacks are what would be decided if what was decided before could not be
// had. It writes into the snapshot; the router's lock is held.
func (r *Router) fallbacks(s kvpolicy.Snapshot, d kvpolicy.Decision) []Instance {
	var all []Instance
	policy := r.config.Policy
	policy.Separation.Enabled = false
	for len(all) < r.config.Fallbacks && d.Action != kvpolicy.Reject {
		for at := range s.Instances {
			if s.Instances[at].ID == d.Target {
				s.Instances[at].Unavailable = true
			}
		}
		var err error
		if d, err = policy.Decide(s); err != nil || d.Action == kvpolicy.Reject {
			break
		}
		all = append(all, r.members[d.Target].instance)
	}
	return all
}

func refusal(err error) *Refusal {
	var field *kvpolicy.FieldError
	if errors.As(err, &field) && strings.HasPrefix(field.Path, "request.") {
		return &Refusal{Status: http.StatusBadRequest, Err: &RequestError{field}}
	}
	return &Refusal{Status: http.StatusInternalServerError, Err: errors.New("the request could not be decided on")}
}

// couldEver tells whether a request that fits nowhere would fit if every
// instance were there. It writes into the snapshot.
func (r *Router) couldEver(s kvpolicy.Snapshot) bool {
	for at := range s.Instances {
		s.Instances[at].Unavailable = false
	}
	d, err := r.config.Policy.Decide(s)
	return err == nil && d.Action != kvpolicy.Reject
}

// rejected is the refusal for a reject; never says that waiting does not help.
func (c *Call) rejected(d kvpolicy.Decision, never bool) *Refusal {
	refused := &Refusal{Status: http.StatusServiceUnavailable, Reason: d.Reason, RetryAfter: c.router.config.Backoff}
	switch {
	case never:
		refused.Status, refused.RetryAfter = http.StatusTooManyRequests, 0
		refused.Err = errors.New("the request is larger than the KV cache of any instance")
	case d.Reason == kvpolicy.NoFeasibleInstance:
		refused.Err = errors.New("no instance that could hold the request is available")
	default:
		refused.Err = errors.New("no instance is available")
	}
	return refused
}

// Prefilled says that the prefill is done and the decode is not yet heard of:
// the source of a PrefillRemote has answered.
func (a *Attempt) Prefilled() { a.call.router.tracker.Prefilled(a.key, time.Now()) }

// Unstreamed says that the response will show no first token, so that the
// prefill is taken for done when the decision says that it should be.
func (a *Attempt) Unstreamed() {
	predicted, ok := a.Decision.PredictedSeconds()
	if !ok || a.guess != nil || a.ended || !(predicted <= math.MaxInt64/1e9) {
		return
	}
	t, key := a.call.router.tracker, a.key
	a.guess = time.AfterFunc(time.Until(a.at.Add(time.Duration(predicted*1e9))), func() { t.Prefilled(key, time.Now()) })
}

// progressEvery is the number of tokens between two words to the ledger.
const progressEvery = 16

// Watched takes in what was seen of the response so far.
func (a *Attempt) Watched(w *ResponseReader) {
	if a.ended || !w.Begun && w.Tokens == 0 {
		return
	}
	r, now := a.call.router, time.Now()
	if w.Begun && !a.first {
		a.first = true
		r.tracker.FirstToken(a.key, now)
		r.metrics.observed(a.Decision, now.Sub(a.at))
	}
	if w.Tokens >= a.progress+progressEvery {
		a.progress = w.Tokens
		r.tracker.Progress(a.key, w.Tokens, now)
	}
}

// Served says that another instance than the target has answered, by its
// address: one of the fallbacks. The target is counted as failed.
func (a *Attempt) Served(address string) {
	r := a.call.router
	if a.ended || address == a.Target.Address() {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	at := slices.IndexFunc(r.order, func(m *member) bool { return m.instance.Address() == address })
	if at < 0 {
		r.config.Logger.Warn("served by an instance that is not ours", "request", a.key.ID, "address", address)
		return
	}
	if m := r.members[a.Target.ID]; m != nil {
		m.requestFailed("another instance had to serve a request")
	}
	a.Target = r.order[at].instance
	moved := kvpolicy.Decision{Action: kvpolicy.Place, Target: a.Target.ID}
	if err := r.tracker.Begin(a.call.request, moved, time.Now()); err != nil {
		r.config.Logger.Error("ledger", "request", a.key.ID, "error", err)
	}
	r.metrics.retries.WithLabelValues(a.Target.ID).Inc()
}

// Outcome is how an attempt ended.
type Outcome uint8

const (
	// Answered is a response from the server, be it that the request was bad.
	Answered Outcome = 1 + iota
	// Failed is the server's fault: it did not answer, broke off, or answered
	// that it cannot serve.
	Failed
	// Errored is an error of which only other instances can tell whether it is
	// the server's or the request's, such as a status of 500. It is held against
	// the instance once another has answered the same call.
	Errored
	// Abandoned is not the target's fault: the client has gone, or the source of
	// the prefill has failed.
	Abandoned
)

// End releases the attempt. Only the first call counts. w is what was seen of
// the response, nil for nothing; why says what failed.
func (a *Attempt) End(how Outcome, w *ResponseReader, why string) {
	if a.ended {
		return
	}
	if w != nil {
		a.Watched(w)
	}
	a.ended = true
	if a.guess != nil {
		a.guess.Stop()
	}
	c := a.call
	r := c.router
	r.tracker.End(a.key, time.Now())
	r.mu.Lock()
	m := r.members[a.Target.ID]
	r.mu.Unlock()
	if m == nil { // it has left, and its metrics with it
		return
	}
	r.metrics.ended(a.Target.ID, how)
	switch how {
	case Answered:
		m.answered()
		for _, errored := range c.errored {
			errored.requestFailed("it failed a request that another instance answered")
		}
		c.errored = nil
	case Errored:
		c.errored = append(c.errored, m)
	case Failed:
		m.requestFailed(why)
	}
	if how != Answered || w == nil {
		return
	}
	if w.Usage != nil {
		if c.bytes > 0 {
			r.estimator.LearnPrompt(c.model, c.bytes, w.Usage.PromptTokens)
		}
		r.metrics.cached(a.Target.ID, *w.Usage)
	}
	r.estimator.LearnCompletion(c.model, w.Tokens)
}

// SourceFailed says that the source of a PrefillRemote has failed, and keeps
// the call from it.
func (a *Attempt) SourceFailed(why string) {
	r := a.call.router
	a.call.Avoid(a.Source.ID)
	r.mu.Lock()
	m := r.members[a.Source.ID]
	r.mu.Unlock()
	if m != nil {
		m.requestFailed(why)
	}
}
