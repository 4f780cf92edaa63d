package track

import (
	"errors"
	"time"

	"github.com/kvpolicy/kvpolicy"
)

// ErrEnded is what Begin returns for a request that has ended already, its
// client having gone or another attempt having answered. Do not send it.
var ErrEnded = errors.New("track: the request has ended already")

// phase is how far a request has come where it runs.
type phase uint8

const (
	prefilling phase = 1 + iota // queued or in prefill
	prefilled                   // its KV is there, no token was seen yet
	decoding                    // a token was seen
)

// entry is a request in the ledger.
type entry struct {
	key     Key
	session string
	begun   uint64  // the order of Begins
	sent    float64 // to the target; times are in seconds, see Tracker.seconds
	alive   float64 // the last sign of life
	target  *instance
	source  *instance // of its prefill, where that is not the target; else nil
	phase   phase

	context   int64 // tokens when it began
	remaining int64 // output expected then, 0 for unknown
	generated int64 // since it began
	uncached  int64 // of the context, what the target lacked when it was sent there
	pending   int64 // to be prefilled while prefilling
	atSource  int64 // of the context, what the source lacked
	hops      int64
}

// load is what requests weigh on an instance: sums over its entries, kept by
// adding an entry's part and taking the same away.
//
// Invariant: the load of an instance is the sum of the parts of the entries in
// its set, so that it is never negative, and 0 when the set is empty.
type load struct {
	requests int64
	away     int64 // of these, those whose prefill still runs elsewhere
	pending  int64 // prefill tokens
	ongoing  int64 // context tokens
	decodes  int64
	kv       int64 // tokens held by requests alone
}

func (l *load) add(o load, sign int64) {
	l.requests += sign * o.requests
	l.away += sign * o.away
	l.pending += sign * o.pending
	l.ongoing += sign * o.ongoing
	l.decodes += sign * o.decodes
	l.kv += sign * o.kv
}

// remote tells whether its prefill still runs on another instance.
func (e *entry) remote() bool { return e.phase == prefilling && e.source != nil }

// part is the entry's part of the load of an instance.
func (e *entry) part(i *instance) load {
	var l load
	if i == e.target {
		l = load{requests: 1, ongoing: e.context + e.generated, kv: e.uncached + e.generated}
		switch {
		case e.remote():
			l.away = 1
		case e.phase == prefilling:
			l.pending = e.pending
		case e.phase == decoding:
			l.decodes = 1
		}
	} else if i == e.source && e.remote() {
		l = load{requests: 1, ongoing: e.context, pending: e.atSource, kv: e.atSource}
	}
	return l
}

// change changes an entry of the ledger: its weight comes off its instances
// before and goes on after. A nil how takes it off for good.
func (e *entry) change(how func()) {
	for _, i := range [...]*instance{e.target, e.source} {
		if i != nil {
			i.load.add(e.part(i), -1)
			delete(i.entries, e)
		}
	}
	if how == nil {
		return
	}
	how()
	e.settle()
}

// settle puts an entry's weight on its instances.
func (e *entry) settle() {
	e.target.load.add(e.part(e.target), 1)
	e.target.entries[e] = struct{}{}
	if e.remote() {
		e.source.load.add(e.part(e.source), 1)
		e.source.entries[e] = struct{}{}
	}
}

// Begin counts a request where a decision sends it, and notes that its prompt
// will be cached there. Call it once it is decided, just before the request is
// sent: what was begun is what the next decision sees.
//
// Place and Recover put the request on the target, whole: what was generated
// before a Recover is part of its ContextTokens by then. PrefillRemote puts it
// there too, and its prefill on the source until Prefilled or FirstToken.
// Migrate moves a request in the ledger with what it has generated, one hop
// more; Recompute leaves it to be prefilled again. Stay changes nothing.
// A request in the ledger that is begun again is moved, never counted twice; to
// begin it where it is changes nothing. Its session, if any, is at home on the
// target from now on.
//
// ErrEnded says that End has been called for it, and that it must not be sent.
// Any other error is a *kvpolicy.FieldError: a faulty request, a decision that
// sends it nowhere, or to an instance that has left since. Nothing counts then.
func (t *Tracker) Begin(r Request, d kvpolicy.Decision, now time.Time) error {
	if err := r.validate(); err != nil {
		return err
	}
	switch d.Action {
	case kvpolicy.Place, kvpolicy.PrefillRemote, kvpolicy.Migrate, kvpolicy.Recover:
	case kvpolicy.Stay:
		return nil
	default:
		return fieldError("decision.action", d.Action, "be one that sends the request somewhere")
	}
	key := r.Key()
	target, source, err := t.places(key, &d)
	if err != nil {
		return err
	}
	// Recording takes time in proportion to the prompt, and so is done without
	// the ledger's lock.
	heldByTarget, heldBySource := target.record(r.Prompt), source.record(r.Prompt)

	t.mu.Lock()
	defer t.mu.Unlock()
	if t.ended.Contains(key) {
		return ErrEnded
	}
	to, from := t.byID[d.Target], (*instance)(nil)
	if to == nil {
		return unknownInstance("decision.target", d.Target)
	}
	if d.Action == kvpolicy.PrefillRemote && d.PrefillOn != d.Target {
		if from = t.byID[d.PrefillOn]; from == nil {
			return unknownInstance("decision.prefill_on", d.PrefillOn)
		}
	}
	instant := t.seconds(now)
	t.bind(r.Session, to, instant)
	e := t.requests[key]
	switch {
	case e != nil && e.target == to && (from == nil || e.source == from):
		return nil
	case e != nil && d.Action == kvpolicy.Migrate:
		e.change(func() {
			e.target, e.source, e.session = to, nil, r.Session
			e.sent, e.alive = instant, instant
			e.hops++
			e.uncached = r.Prompt.lacking(heldByTarget, e.context)
			if d.Move.Method == kvpolicy.Recompute || e.phase == prefilling {
				e.phase, e.pending = prefilling, e.uncached+e.generated
			}
		})
		return nil
	case e != nil:
		r.Hops = max(r.Hops, e.hops)
		t.drop(e)
	}
	t.begins++
	e = &entry{
		key: key, session: r.Session, begun: t.begins, sent: instant, alive: instant,
		target: to, source: from, phase: prefilling,
		context: r.ContextTokens, remaining: r.RemainingTokens,
		uncached: r.Prompt.lacking(heldByTarget, r.ContextTokens),
		atSource: r.Prompt.lacking(heldBySource, r.ContextTokens), hops: r.Hops,
	}
	e.pending = e.uncached
	t.requests[key] = e
	e.settle()
	return nil
}

// places finds where in the prefix index a decision sends a request.
func (t *Tracker) places(key Key, d *kvpolicy.Decision) (target, source place, err error) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	if t.ended.Contains(key) {
		return target, source, ErrEnded
	}
	i := t.byID[d.Target]
	if i == nil {
		return target, source, unknownInstance("decision.target", d.Target)
	}
	target = i.place()
	if d.Action == kvpolicy.PrefillRemote {
		if i = t.byID[d.PrefillOn]; i == nil {
			return target, source, unknownInstance("decision.prefill_on", d.PrefillOn)
		}
		source = i.place()
	}
	return target, source, nil
}

// Prefilled says that a request's prefill is done while no token was seen yet:
// the source of a PrefillRemote has answered. It also serves as a guess for
// responses that do not stream: see the package's documentation. It tells
// whether the request is in the ledger; one that is not, or decodes already, is
// left alone.
func (t *Tracker) Prefilled(key Key, now time.Time) bool {
	return t.advance(key, now, func(e *entry) {
		if e.phase == prefilling {
			e.phase = prefilled
		}
	})
}

// FirstToken says that a request's first token was seen: its prefill is done,
// and it decodes. It tells whether the request is in the ledger; one that is
// not is left alone.
func (t *Tracker) FirstToken(key Key, now time.Time) bool {
	return t.advance(key, now, func(e *entry) { e.phase = decoding })
}

// Progress says how many tokens a request has generated since it began, all in
// all, so that calls may come late, twice, or not at all; a lesser number than
// before is only a sign of life. A number above 0 says what FirstToken says. A
// negative one is taken for 0, one above 1e12 for that. It tells whether the
// request is in the ledger; one that is not is left alone.
func (t *Tracker) Progress(key Key, generated int64, now time.Time) bool {
	generated = min(generated, maxRequestTokens)
	return t.advance(key, now, func(e *entry) {
		e.generated = max(e.generated, generated)
		if generated > 0 {
			e.phase = decoding
		}
	})
}

func (t *Tracker) advance(key Key, now time.Time, how func(e *entry)) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.requests[key]
	if e == nil {
		return false
	}
	e.change(func() { how(e) })
	e.alive = max(e.alive, t.seconds(now))
	return true
}

// End releases a request, whatever became of it: answered, failed, disconnected
// or given up. Call it on every way out, as often as you like: the first call
// releases, and returns true; the others, and those for requests that the
// ledger has lost or never had, return false. A Begin that comes after its End
// is refused with ErrEnded.
func (t *Tracker) End(key Key, now time.Time) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.ended.Add(key, struct{}{})
	e := t.requests[key]
	if e == nil {
		return false
	}
	t.touch(e.session, e.target, t.seconds(now))
	t.drop(e)
	return true
}

// drop takes a request out of the ledger.
func (t *Tracker) drop(e *entry) {
	e.change(nil)
	delete(t.requests, e.key)
}

// ahead is what of the requests on the target of e is ahead of e: those that
// decode, and while e does not, those that were sent before it. That servers
// take them in the order of their coming is a guess.
func (e *entry) ahead() (requests, pending int64) {
	for o := range e.target.entries {
		if o == e || e.phase == decoding && o.phase != decoding || o.phase != decoding && o.begun > e.begun {
			continue
		}
		part := o.part(e.target)
		requests += part.requests
		pending += part.pending
	}
	return requests, pending
}
