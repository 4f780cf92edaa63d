package track

import (
	"slices"
	"time"

	"github.com/kvpolicy/kvpolicy"
)

// Buffer is what Snapshot writes into, so that it need not allocate. The zero
// Buffer is ready. A goroutine that decides keeps one, or takes it from a
// sync.Pool; it must not be in use twice at a time.
type Buffer struct {
	instances []kvpolicy.Instance
	matches   []slotMatch
}

// Snapshot returns what a policy decides on, as it stands now: the request,
// and every instance that has joined, in the order of their ids. It is written
// into the buffer and holds until the buffer is used again; a nil buffer
// allocates. It changes nothing: the decision counts once it is begun.
//
// A request in the ledger is seen as running: RunningOn, ContextTokens,
// RemainingTokens and Hops are the ledger's, no count includes it, and Requests
// and PendingPrefillTokens of its own instance are what is ahead of it there.
// Any other, such as one whose instance has left or restarted, is passed on as
// it is, save that its Affinity, if empty, is its session's home.
func (t *Tracker) Snapshot(r Request, now time.Time, b *Buffer) kvpolicy.Snapshot {
	if b == nil {
		b = new(Buffer)
	}
	indexed := len(r.Prompt.Blocks) > 0
	if indexed {
		t.match(r.Prompt.Blocks, b)
	}
	t.mu.RLock()
	defer t.mu.RUnlock()
	instant := t.seconds(now)
	s := kvpolicy.Snapshot{Request: r.Request}
	e := t.requests[r.Key()]
	if e != nil {
		s.Request.RunningOn, s.Request.Hops = e.target.id, e.hops
		s.Request.ContextTokens = e.context + e.generated
		s.Request.RemainingTokens = max(0, e.remaining-e.generated)
	}
	if s.Request.Affinity == "" {
		s.Request.Affinity = t.homeOf(r.Session, instant)
	}
	b.instances = slices.Grow(b.instances[:0], len(t.instances))[:len(t.instances)]
	s.Instances = b.instances
	for at, i := range t.instances {
		v := &s.Instances[at]
		i.view(v, e, instant)
		if indexed && i.matchAt < len(b.matches) {
			if m := b.matches[i.matchAt]; m.life == i.life {
				v.CachedTokens = r.Prompt.cachedTokens(m.blocks, s.Request.ContextTokens)
			}
		}
		if e != nil && e.target == i && e.phase != prefilling {
			v.CachedTokens = s.Request.ContextTokens
		}
	}
	return s
}

// match finds what of a prompt every instance holds.
func (t *Tracker) match(blocks []uint64, b *Buffer) {
	t.mu.RLock()
	groups := t.groups
	t.mu.RUnlock()
	n := len(groups) * groupSize
	b.matches = slices.Grow(b.matches[:0], n)[:n]
	for at, g := range groups {
		g.match(blocks, b.matches[at*groupSize:][:groupSize])
	}
}

// view writes what is known of an instance, without the request of e, which is
// nil for a new one.
func (i *instance) view(v *kvpolicy.Instance, e *entry, now float64) {
	l, s := i.load, &i.scrape
	if e != nil {
		l.add(e.part(i), -1)
		if e.target == i {
			l.requests, l.pending = e.ahead()
		}
	}
	used := l.kv
	if s.kvKnown {
		used = max(0, s.kv+l.kv-s.kvLedger)
	}
	*v = kvpolicy.Instance{
		ID:                   i.id,
		Requests:             min(l.requests+s.foreign, maxCount),
		PendingPrefillTokens: min(l.pending, maxTokens),
		OngoingTokens:        min(l.ongoing+s.foreignOngoing, maxTokens),
		ActiveDecodes:        min(l.decodes, maxCount),
		PrefillRate:          i.known.PrefillRate,
		DecodeRate:           i.known.DecodeRate,
		Bandwidth:            i.known.Bandwidth,
		KVCapacityTokens:     i.capacity(),
		KVUsedTokens:         min(used, maxTokens),
		UptimeSeconds:        age(i.started, now),
		Curve:                i.survival.curve,
		CurveName:            i.survival.name,
		Unavailable:          i.state == Down || i.state == Draining && (e == nil || e.target != i),
		MetricsAgeSeconds:    maxSeconds, // never scraped: nothing is known
	}
	if s.hasFresh {
		v.MetricsAgeSeconds = age(s.fresh, now)
	}
}
