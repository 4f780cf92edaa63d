package track

import (
	"math"
	"slices"
	"strings"
	"time"

	"github.com/kvpolicy/kvpolicy"
)

//go:generate stringer -type=State,Ending -linecomment -output=words_string.go

// State is whether an instance takes requests.
type State uint8

const (
	// Ready takes requests; an instance is ready when it joins.
	Ready State = 1 + iota // ready
	// Draining takes no new request and finishes those it has: snapshots call
	// it unavailable, save that of a request that runs on it.
	Draining // draining
	// Down answers nothing: snapshots call it unavailable, and requests that
	// run on it are to be recovered. They stay in the ledger until they end or
	// move.
	Down // down
)

// Ending is how an instance's session came to its end.
type Ending uint8

const (
	// Planned was announced, such as a scale-down: for the survival curves the
	// session is censored.
	Planned Ending = 1 + iota // planned
	// Lost was not: for the survival curves the session ended.
	Lost // lost
)

// InstanceInfo is what a router knows of an instance beforehand. All of it may be
// left out.
type InstanceInfo struct {
	// Kind is the kind of node, such as laptop, spot or pod, whose sessions are
	// pooled where a node has too few of its own for a survival curve; empty for
	// none.
	Kind string
	// StartedAt is when the node came up, which its uptime counts from. Zero is
	// unknown: the server's own start time then counts (Metrics.StartedAt), and
	// failing that the time it joined.
	StartedAt time.Time
	// PrefillRate, DecodeRate and Bandwidth are those of kvpolicy.Instance: in
	// tokens/s, tokens/s of one stream and bytes/s, finite and at least 0. 0
	// stands for the policy's.
	PrefillRate, DecodeRate, Bandwidth float64
	// KVCapacityTokens is the size of the KV pool in tokens, 0 to 1e15, for
	// servers that do not tell. 0 is unknown, and every request fits.
	KVCapacityTokens int64
}

func (s *InstanceInfo) validate() error {
	for _, f := range [...]struct {
		path string
		rate float64
	}{
		{"prefill_rate", s.PrefillRate}, {"decode_rate", s.DecodeRate}, {"bandwidth", s.Bandwidth},
	} {
		if !(f.rate >= 0 && f.rate <= math.MaxFloat64) {
			return fieldError(f.path, f.rate, "be a finite number of at least 0")
		}
	}
	if !(s.KVCapacityTokens >= 0 && s.KVCapacityTokens <= maxTokens) {
		return fieldError("kv_capacity_tokens", s.KVCapacityTokens, "be 0 to 1e15 tokens")
	}
	return nil
}

// instance is an instance that has joined. What it is made of is guarded by
// the tracker's lock.
type instance struct {
	id       string
	known    InstanceInfo
	state    State
	position int // in the tracker's order

	// life changes when the instance restarts and is no other instance's, so
	// that what is remembered of an earlier life is told apart. started is when
	// this life began, as well as is known; watched is when watching it began.
	life             uint64
	started, watched float64

	load    load
	entries map[*entry]struct{}
	scrape  scrape

	survival fittedCurve

	// group and slot are the place in the prefix index; group is nil where
	// there is none.
	group    *prefixGroup
	slot     int
	matchAt  int // of the slot, in what all groups match
	resident int // bound on its blocks

	stats Stats
}

// Join adds an instance, ready. One that is there already keeps all that is
// known of it and takes over what info says; another StartedAt than before
// means that it has restarted, as in Observe. The error is a
// *kvpolicy.FieldError, and nothing is changed then.
func (t *Tracker) Join(id string, info InstanceInfo, now time.Time) error {
	if id == "" {
		return fieldError("id", id, "not be empty")
	}
	if err := info.validate(); err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.hasBase {
		t.base, t.hasBase = now, true
	}
	i := t.byID[id]
	if i == nil {
		instant := t.seconds(now)
		i = &instance{id: id, state: Ready, life: t.nextLife(), started: instant, watched: instant, entries: map[*entry]struct{}{}}
		i.stats.ID = id
		t.openPrefixes(i)
		t.byID[id] = i
		at, _ := slices.BinarySearchFunc(t.instances, id, func(i *instance, id string) int { return strings.Compare(i.id, id) })
		t.instances = slices.Insert(t.instances, at, i)
		t.renumber()
	}
	if before := i.known.StartedAt; !info.StartedAt.IsZero() && !info.StartedAt.Equal(before) {
		if before.IsZero() {
			i.started = min(t.seconds(info.StartedAt), t.seconds(now))
		} else {
			t.restart(i, info.StartedAt, t.seconds(now))
		}
	}
	i.known = info
	if t.fitted != nil && i.survival.curve == nil {
		_ = t.fitted.SetRunning(id, info.Kind, 0, 0) // so that it is known to be of its kind
		i.survival = curveOf(t.fitted, id, info.Kind)
	}
	i.boundPrefixes(t.config)
	return nil
}

// Leave takes an instance away for good, with its requests, prefixes and
// sessions; the requests' own End is still to be called and finds nothing to
// release. How it ended goes into the history of its node. One that never
// joined is no error.
func (t *Tracker) Leave(id string, how Ending, now time.Time) error {
	if how != Planned && how != Lost {
		return fieldError("ending", uint8(how), "be planned or lost")
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	i := t.byID[id]
	if i == nil {
		return nil
	}
	for e := range i.entries {
		t.drop(e)
	}
	t.closeSession(i, t.seconds(now), how == Lost)
	if i.group != nil {
		i.group.clear(i.slot, i.life, 0)
	}
	delete(t.byID, id)
	t.instances = slices.Delete(t.instances, i.position, i.position+1)
	t.renumber()
	return nil
}

// SetState tells whether an instance takes requests. An unknown instance or
// state is a FieldError.
func (t *Tracker) SetState(id string, state State) error {
	if !(state >= Ready && state <= Down) {
		return fieldError("state", uint8(state), "be ready, draining or down")
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	i := t.byID[id]
	if i == nil {
		return unknownInstance("instance", id)
	}
	i.state = state
	return nil
}

// SetCurve gives an instance a survival curve that was not fitted by FitCurves,
// for policies with a hazard model; nil, as it begins, never fails. name is what errors and the JSON form
// of a snapshot call the curve. An unknown instance is a FieldError.
func (t *Tracker) SetCurve(id string, curve kvpolicy.Curve, name string) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	i := t.byID[id]
	if i == nil {
		return unknownInstance("instance", id)
	}
	i.survival = fittedCurve{curve, name}
	return nil
}

// renumber follows a change in the order of instances.
func (t *Tracker) renumber() {
	for at, i := range t.instances {
		i.position = at
	}
}

// nextLife is a number that no life had.
func (t *Tracker) nextLife() uint64 {
	t.lives++
	return t.lives
}

// openPrefixes finds a new instance a place in the prefix index.
func (t *Tracker) openPrefixes(i *instance) {
	if t.config.PrefixBlocks == 0 {
		return
	}
	taken := make([]bool, len(t.groups)*groupSize)
	for _, other := range t.instances {
		taken[other.matchAt] = true
	}
	if i.matchAt = slices.Index(taken, false); i.matchAt < 0 {
		i.matchAt = len(taken)
		t.groups = append(slices.Clip(t.groups), &prefixGroup{holders: map[uint64]uint64{}})
	}
	i.group, i.slot = t.groups[i.matchAt/groupSize], i.matchAt%groupSize
	i.resident = t.config.PrefixBlocks
	i.group.open(i.slot, i.life, i.resident)
}

// boundPrefixes keeps the prefixes of an instance within its KV pool.
func (i *instance) boundPrefixes(c Config) {
	if i.group == nil {
		return
	}
	bound := c.PrefixBlocks
	if capacity := i.capacity(); capacity > 0 {
		bound = int(min(int64(bound), max(1, capacity/int64(c.BlockTokens))))
	}
	if bound != i.resident {
		i.resident = bound
		i.group.resize(i.slot, i.life, bound)
	}
}

// capacity is the size of the KV pool in tokens, 0 where it is unknown.
func (i *instance) capacity() int64 {
	if i.scrape.capacity > 0 {
		return i.scrape.capacity
	}
	return i.known.KVCapacityTokens
}

// place is an instance's place in the prefix index in one of its lives, to be
// used without the tracker's lock.
type place struct {
	group *prefixGroup
	slot  int
	life  uint64
}

func (i *instance) place() place { return place{i.group, i.slot, i.life} }

// record notes that the instance is given a prompt, and tells how many of its
// leading blocks it held before.
func (p place) record(prompt Prompt) int {
	if p.group == nil || len(prompt.Blocks) == 0 {
		return 0
	}
	return p.group.record(p.slot, p.life, prompt.Blocks)
}

func unknownInstance(path, id string) error {
	return fieldError(path, id, "be the id of an instance that has joined")
}
