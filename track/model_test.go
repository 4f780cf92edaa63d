package track_test

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"sort"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/kvpolicy/kvpolicy"
	"github.com/kvpolicy/kvpolicy/track"
)

var epoch = time.Unix(1_700_000_000, 0)

func at(seconds float64) time.Time { return epoch.Add(time.Duration(seconds * float64(time.Second))) }

// The model is the tracker as a plain map would have it: nothing is kept but
// the requests and what was scraped, and every number is summed anew.

type modelRequest struct {
	target, source                string // source is empty for a local prefill
	phase                         int    // 1 prefilling, 2 prefilled, 3 decoding
	context, remaining, generated int64
	repeated                      int64 // generated tokens to be prefilled again
	order                         int
	sent, alive                   time.Time
	hops                          int64
	session                       string
}

func (r modelRequest) remote() bool { return r.phase == 1 && r.source != "" }

type modelInstance struct {
	state            track.State
	capacity         int64
	scraped          bool
	at, fresh        time.Time
	metrics          track.Metrics
	foreign, ongoing int64
	kv, kvLedger     int64
	kvKnown          bool
	phantoms         int64
	restarts, lost   int64
	started          time.Time
	life             int
}

type model struct {
	grace     time.Duration
	ttl       time.Duration
	instances map[string]*modelInstance
	requests  map[track.Key]modelRequest
	ended     map[track.Key]bool
	homes     map[string]modelHome
	order     int
	lives     int
}

type modelHome struct {
	instance string
	life     int
	seen     time.Time
}

func (m *model) home(session string, now time.Time) string {
	h, ok := m.homes[session]
	if i := m.instances[h.instance]; !ok || i == nil || i.life != h.life || now.Sub(h.seen) > m.ttl {
		return ""
	}
	return h.instance
}

// sums is what the requests, save one, make on an instance.
func (m *model) sums(id string, save track.Key) (requests, away, pending, ongoing, decodes, kv int64) {
	for key, r := range m.requests {
		if key == save {
			continue
		}
		if r.target == id {
			requests++
			ongoing += r.context + r.generated
			kv += r.context + r.generated
			switch {
			case r.remote():
				away++
			case r.phase == 1:
				pending += r.context + r.repeated
			case r.phase == 3:
				decodes++
			}
		}
		if r.remote() && r.source == id {
			requests++
			ongoing += r.context
			pending += r.context
			kv += r.context
		}
	}
	return
}

var none track.Key

func (m *model) view(id string, save track.Key, now time.Time) kvpolicy.Instance {
	i := m.instances[id]
	requests, _, pending, ongoing, decodes, kv := m.sums(id, save)
	own, live := m.requests[save]
	runsHere := live && own.target == id
	if runsHere { // what is ahead of it
		requests, pending = 0, 0
		for key, r := range m.requests {
			on := r.target == id || r.remote() && r.source == id
			decodesHere := r.phase == 3
			if key == save || r.target != id {
				if key == save || !on {
					continue
				}
			}
			if decodesHere || own.phase != 3 && r.order < own.order {
				requests++
				if r.phase == 1 && (r.source == "" || r.source == id) {
					pending += r.context
					if r.target == id {
						pending += r.repeated
					}
				}
			}
		}
	}
	used := kv
	if i.kvKnown {
		used = max(0, i.kv+kv-i.kvLedger)
	}
	v := kvpolicy.Instance{
		ID: id, Requests: requests + i.foreign, PendingPrefillTokens: pending, OngoingTokens: ongoing + i.ongoing,
		ActiveDecodes: decodes, KVCapacityTokens: i.capacity, KVUsedTokens: used,
		UptimeSeconds: max(0, now.Sub(i.started).Seconds()), MetricsAgeSeconds: 1e12,
		Unavailable: i.state == track.Down || i.state == track.Draining && !runsHere,
	}
	if !i.fresh.IsZero() {
		v.MetricsAgeSeconds = max(0, now.Sub(i.fresh).Seconds())
	}
	if runsHere && own.phase != 1 {
		v.CachedTokens = own.context + own.generated
	}
	return v
}

func (m *model) snapshot(r track.Request, now time.Time) kvpolicy.Snapshot {
	s := kvpolicy.Snapshot{Request: r.Request, Instances: []kvpolicy.Instance{}}
	if own, live := m.requests[r.Key()]; live {
		s.Request.RunningOn, s.Request.Hops = own.target, own.hops
		s.Request.ContextTokens = own.context + own.generated
		s.Request.RemainingTokens = max(0, own.remaining-own.generated)
	}
	s.Request.Affinity = m.home(r.Session, now)
	ids := slices.Sorted(maps.Keys(m.instances))
	for _, id := range ids {
		s.Instances = append(s.Instances, m.view(id, r.Key(), now))
	}
	return s
}

func (m *model) begin(r track.Request, d kvpolicy.Decision, now time.Time) (refused, faulty bool) {
	key := r.Key()
	switch d.Action {
	case kvpolicy.Stay:
		return false, false
	case kvpolicy.Reject:
		return false, true
	}
	if m.ended[key] {
		return true, false
	}
	source := ""
	if d.Action == kvpolicy.PrefillRemote {
		if m.instances[d.PrefillOn] == nil {
			return false, true
		}
		if d.PrefillOn != d.Target {
			source = d.PrefillOn
		}
	}
	to := m.instances[d.Target]
	if to == nil {
		return false, true
	}
	if r.Session != "" {
		m.homes[r.Session] = modelHome{d.Target, to.life, now}
	}
	old, live := m.requests[key]
	switch {
	case live && old.target == d.Target && (source == "" || old.source == source):
		return false, false
	case live && d.Action == kvpolicy.Migrate:
		old.target, old.source, old.session = d.Target, "", r.Session
		old.sent, old.alive = now, now
		old.hops++
		old.repeated = 0
		if d.Move.Method == kvpolicy.Recompute || old.phase == 1 {
			old.phase, old.repeated = 1, old.generated
		}
		m.requests[key] = old
		return false, false
	}
	m.order++
	m.requests[key] = modelRequest{
		target: d.Target, source: source, phase: 1, context: r.ContextTokens, remaining: r.RemainingTokens,
		order: m.order, sent: now, alive: now, hops: max(r.Hops, old.hops), session: r.Session,
	}
	return false, false
}

func (m *model) advance(key track.Key, now time.Time, how func(r *modelRequest)) bool {
	r, live := m.requests[key]
	if !live {
		return false
	}
	how(&r)
	if now.After(r.alive) {
		r.alive = now
	}
	m.requests[key] = r
	return true
}

func (m *model) end(key track.Key, now time.Time) bool {
	r, live := m.requests[key]
	delete(m.requests, key)
	m.ended[key] = true
	if live && r.session != "" && m.home(r.session, now) == r.target {
		m.homes[r.session] = modelHome{r.target, m.instances[r.target].life, now}
	}
	return live
}

func (m *model) join(id string, now time.Time) {
	if m.instances[id] == nil {
		m.lives++
		m.instances[id] = &modelInstance{state: track.Ready, started: now, life: m.lives}
	}
}

func (m *model) leave(id string) {
	for key, r := range m.requests {
		if r.target == id || r.remote() && r.source == id {
			delete(m.requests, key)
		}
	}
	delete(m.instances, id)
}

func (m *model) observe(id string, got track.Metrics, now time.Time) {
	i := m.instances[id]
	if i == nil || i.scraped && !now.After(i.at) {
		return
	}
	before := i.metrics
	restarted := before.Counter != nil && got.Counter != nil && *got.Counter < *before.Counter
	if !before.StartedAt.IsZero() && !got.StartedAt.IsZero() {
		if apart := got.StartedAt.Sub(before.StartedAt).Abs(); apart > time.Second {
			restarted = true
		}
	}
	earlier := func(a, b time.Time) time.Time {
		if b.Before(a) {
			return b
		}
		return a
	}
	if restarted {
		for key, r := range m.requests {
			if r.target != id && !(r.remote() && r.source == id) {
				continue
			}
			survives := r.sent.After(i.at)
			if !got.StartedAt.IsZero() {
				survives = !r.sent.Before(earlier(got.StartedAt, now))
			}
			if !survives {
				delete(m.requests, key)
				i.lost++
			}
		}
		m.lives++
		*i = modelInstance{state: i.state, phantoms: i.phantoms, lost: i.lost, restarts: i.restarts + 1, started: now, life: m.lives}
		if !got.StartedAt.IsZero() {
			i.started = earlier(got.StartedAt, now)
		}
	} else if before.StartedAt.IsZero() && !got.StartedAt.IsZero() {
		i.started = earlier(got.StartedAt, now)
	}
	// phantoms
	if got.Running != nil && got.Waiting != nil {
		var silent []track.Key
		for key, r := range m.requests {
			expected := r.target == id && !r.remote() || r.remote() && r.source == id
			if expected && now.Sub(r.alive) > m.grace {
				silent = append(silent, key)
			}
		}
		sort.Slice(silent, func(a, b int) bool {
			x, y := m.requests[silent[a]], m.requests[silent[b]]
			if !x.alive.Equal(y.alive) {
				return x.alive.Before(y.alive)
			}
			return x.order < y.order
		})
		requests, away, _, _, _, _ := m.sums(id, none)
		if has := int64(*got.Running + *got.Waiting); has < requests-away {
			for n := int64(len(silent)) - has; n > 0; n-- {
				delete(m.requests, silent[0])
				silent = silent[1:]
				i.phantoms++
			}
		}
	}
	requests, away, _, ongoing, _, kv := m.sums(id, none)
	i.scraped, i.at = true, now
	if got.Running != nil || got.Waiting != nil || got.KVUsage != nil {
		i.fresh = now
	}
	i.capacity = got.BlockTokens * got.Blocks
	i.kvKnown = got.KVUsage != nil && i.capacity > 0
	i.kv, i.kvLedger = 0, 0
	if i.kvKnown {
		i.kv, i.kvLedger = int64(math.Round(*got.KVUsage*float64(i.capacity))), kv
	}
	var has int64
	if got.Running != nil {
		has += int64(*got.Running)
	}
	if got.Waiting != nil {
		has += int64(*got.Waiting)
	}
	i.foreign, i.ongoing = max(0, has-(requests-away)), 0
	if i.foreign > 0 && i.kvKnown {
		i.ongoing = max(0, i.kv-ongoing)
	}
	if got.StartedAt.IsZero() {
		got.StartedAt = i.metrics.StartedAt
	}
	if got.Counter == nil {
		got.Counter = i.metrics.Counter
	}
	i.metrics = got
}

// TestLedgerAgainstMap drives tracker and model with the same calls in any
// order, late, doubled and senseless ones among them, and compares every
// number that a snapshot can show after each. In the end all requests end, and
// nothing may be left.
func TestLedgerAgainstMap(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		config := track.DefaultConfig()
		config.Grace = time.Duration(rapid.SampledFrom([]int{0, 1, 10}).Draw(t, "grace")) * time.Second
		config.SessionTTL = 20 * time.Second
		tracker, err := track.New(config)
		require.NoError(t, err)
		m := &model{
			grace: config.Grace, ttl: config.SessionTTL, instances: map[string]*modelInstance{},
			requests: map[track.Key]modelRequest{}, ended: map[track.Key]bool{}, homes: map[string]modelHome{},
		}
		// Quarters of a second are exact in floating point.
		clock := 100.0
		now := func() time.Time { return at(clock) }
		var buffer track.Buffer
		for _, id := range []string{"c", "a", "b"} {
			require.NoError(t, tracker.Join(id, track.InstanceInfo{}, now()))
			m.join(id, now())
		}

		instance := rapid.SampledFrom([]string{"a", "b", "c"})
		key := rapid.Custom(func(t *rapid.T) track.Key {
			return track.Key{ID: fmt.Sprint("r", rapid.IntRange(0, 4).Draw(t, "id")), Attempt: rapid.IntRange(0, 1).Draw(t, "attempt")}
		})
		tokens := rapid.SampledFrom([]int64{0, 1, 7, 1000, 1e12})
		request := rapid.Custom(func(t *rapid.T) track.Request {
			k := key.Draw(t, "key")
			r := track.Request{Attempt: k.Attempt, Session: rapid.SampledFrom([]string{"", "s", "u"}).Draw(t, "session")}
			r.ID = k.ID
			r.ContextTokens, r.RemainingTokens = tokens.Draw(t, "context"), tokens.Draw(t, "remaining")
			r.Hops = rapid.Int64Range(0, 2).Draw(t, "hops")
			return r
		})
		count := func(t *rapid.T, most int) *float64 {
			n := rapid.IntRange(-1, most).Draw(t, "count")
			if n < 0 {
				return nil
			}
			x := float64(n)
			return &x
		}
		t.Repeat(map[string]func(*rapid.T){
			"time": func(t *rapid.T) { clock += rapid.SampledFrom([]float64{-2, 0.25, 1, 5, 30}).Draw(t, "passes") },
			"join": func(t *rapid.T) {
				id := instance.Draw(t, "instance")
				require.NoError(t, tracker.Join(id, track.InstanceInfo{}, now()))
				m.join(id, now())
			},
			"leave": func(t *rapid.T) {
				if rapid.IntRange(0, 3).Draw(t, "rarely") > 0 {
					t.Skip()
				}
				id := instance.Draw(t, "instance")
				require.NoError(t, tracker.Leave(id, track.Lost, now()))
				m.leave(id)
			},
			"state": func(t *rapid.T) {
				id := instance.Draw(t, "instance")
				state := rapid.SampledFrom([]track.State{track.Ready, track.Draining, track.Down}).Draw(t, "state")
				err := tracker.SetState(id, state)
				if i := m.instances[id]; i != nil {
					require.NoError(t, err)
					i.state = state
				} else {
					require.ErrorIs(t, err, kvpolicy.ErrInvalid)
				}
			},
			"begin": func(t *rapid.T) {
				r := request.Draw(t, "request")
				d := kvpolicy.Decision{
					Action:    kvpolicy.Action(rapid.IntRange(int(kvpolicy.Place), int(kvpolicy.Reject)).Draw(t, "action")),
					Target:    instance.Draw(t, "target"),
					PrefillOn: instance.Draw(t, "source"),
				}
				d.Move.Method = rapid.SampledFrom([]kvpolicy.Method{kvpolicy.Transfer, kvpolicy.Recompute}).Draw(t, "method")
				err := tracker.Begin(r, d, now())
				switch refused, faulty := m.begin(r, d, now()); {
				case refused:
					require.ErrorIs(t, err, track.ErrEnded)
				case faulty:
					require.ErrorIs(t, err, kvpolicy.ErrInvalid)
				default:
					require.NoError(t, err)
				}
			},
			"prefilled": func(t *rapid.T) {
				k := key.Draw(t, "key")
				require.Equal(t, m.advance(k, now(), func(r *modelRequest) { r.phase = max(r.phase, 2) }), tracker.Prefilled(k, now()))
			},
			"first token": func(t *rapid.T) {
				k := key.Draw(t, "key")
				require.Equal(t, m.advance(k, now(), func(r *modelRequest) { r.phase = 3 }), tracker.FirstToken(k, now()))
			},
			"progress": func(t *rapid.T) {
				k, n := key.Draw(t, "key"), rapid.SampledFrom([]int64{-5, 0, 1, 3, 1000, 1e12, math.MaxInt64}).Draw(t, "generated")
				require.Equal(t, m.advance(k, now(), func(r *modelRequest) {
					r.generated = max(r.generated, min(n, 1e12))
					if n > 0 {
						r.phase = 3
					}
				}), tracker.Progress(k, n, now()))
			},
			"end": func(t *rapid.T) {
				k := key.Draw(t, "key")
				if rapid.Bool().Draw(t, "of a live one") {
					live := slices.SortedFunc(maps.Keys(m.requests), func(a, b track.Key) int {
						return 2*compare(a.ID, b.ID) + compare(a.Attempt, b.Attempt)
					})
					if len(live) == 0 {
						t.Skip()
					}
					k = rapid.SampledFrom(live).Draw(t, "live")
				}
				require.Equal(t, m.end(k, now()), tracker.End(k, now()))
			},
			"observe": func(t *rapid.T) {
				id := instance.Draw(t, "instance")
				metrics := track.Metrics{Running: count(t, 3), Waiting: count(t, 2), Counter: count(t, 3)}
				if rapid.Bool().Draw(t, "usage known") {
					usage := rapid.SampledFrom([]float64{0, 0.001, 0.5, 1}).Draw(t, "usage")
					metrics.KVUsage = &usage
				}
				metrics.BlockTokens, metrics.Blocks = rapid.SampledFrom([]int64{0, 16}).Draw(t, "block"), rapid.SampledFrom([]int64{0, 7, 1000}).Draw(t, "blocks")
				if rapid.Bool().Draw(t, "start known") {
					metrics.StartedAt = at(rapid.SampledFrom([]float64{10, 10.5, 90, clock - 3, clock + 60}).Draw(t, "started"))
				}
				err := tracker.Observe(id, metrics, now())
				if m.instances[id] == nil {
					require.ErrorIs(t, err, kvpolicy.ErrInvalid)
					return
				}
				require.NoError(t, err)
				m.observe(id, metrics, now())
			},
			"": func(t *rapid.T) {
				r := request.Draw(t, "seen")
				want := m.snapshot(r, now())
				got := tracker.Snapshot(r, now(), &buffer)
				require.Equal(t, want.Request, got.Request)
				require.Equal(t, len(want.Instances), len(got.Instances))
				for at := range want.Instances {
					assert.Equal(t, want.Instances[at], got.Instances[at])
				}
				if t.Failed() {
					t.FailNow()
				}
				for _, s := range tracker.Stats(nil) {
					i := m.instances[s.ID]
					requests, _, _, _, _, _ := m.sums(s.ID, none)
					require.Equal(t, track.Stats{
						ID: s.ID, State: i.state, InFlight: requests, Foreign: i.foreign,
						Phantoms: i.phantoms, Restarts: i.restarts, Lost: i.lost,
					}, s)
				}
			},
		})
		for id := range 5 {
			for attempt := range 2 {
				tracker.End(track.Key{ID: fmt.Sprint("r", id), Attempt: attempt}, now())
			}
		}
		for _, s := range tracker.Stats(nil) {
			require.Zero(t, s.InFlight)
		}
		for _, i := range tracker.Snapshot(track.Request{}, now(), &buffer).Instances {
			assert.Equal(t, m.instances[i.ID].foreign, i.Requests)
			assert.Zero(t, i.PendingPrefillTokens)
			assert.Equal(t, m.instances[i.ID].ongoing, i.OngoingTokens)
			assert.Zero(t, i.ActiveDecodes)
			if !m.instances[i.ID].kvKnown {
				assert.Zero(t, i.KVUsedTokens)
			}
		}
	})
}

func compare[T int | string](a, b T) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}
