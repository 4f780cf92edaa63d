package replay

import (
	"fmt"
	"slices"
	"strconv"

	"github.com/kvpolicy/kvpolicy"
	"github.com/kvpolicy/kvpolicy/internal/sim"
	"github.com/kvpolicy/kvpolicy/internal/workload"
)

//go:generate stringer -type=LoadSource,CacheSource -linecomment -output=strings.go

// LoadSource is where a router takes an instance's load from.
type LoadSource int

const (
	// Tracked: from its own requests in flight.
	Tracked LoadSource = 1 + iota // tracked
	// Scraped: from the instance's metrics as last scraped: requests, pending
	// prefill, ongoing tokens and decodes alike, as if the server reported them
	// all.
	Scraped // scraped
)

// CacheSource is where a router takes an instance's cached tokens from.
type CacheSource int

const (
	// AtDispatch: an index that is filled when a request is sent.
	AtDispatch CacheSource = 1 + iota // dispatch
	// AtFirstToken: an index that is filled DelaySeconds after a request's
	// first token, when its KV exists. Prompts that still wait are not in it.
	AtFirstToken // first-token
	// AskEngine: what is in the instance's cache at the time of the decision.
	// Nothing is evicted unnoticed, but prompts that still wait are not in it.
	AskEngine // engine
)

// View is what the router sees. The zero value is the default.
type View struct {
	// Truth shows it each instance's state and cache as they are when it
	// decides, and nothing else: the other fields are not read.
	Truth bool
	// Load is where load comes from; 0 = Tracked.
	Load LoadSource
	// Cache is where cached tokens come from; 0 = AtDispatch.
	Cache CacheSource
	// ScrapeSeconds is the time between two scrapes of the metrics, from 1e-3
	// to 1e6; 0 = 1.
	ScrapeSeconds float64
	// DelaySeconds is how old a scrape is when the router has it, from 0 to
	// 1e6. It also delays the index of AtFirstToken.
	DelaySeconds float64
	// IndexTokens bounds the index of each instance, from one block to 1e9; 0 =
	// the instance's KV pool.
	IndexTokens int
}

func (v View) withDefaults() (View, error) {
	if v.Load == 0 {
		v.Load = Tracked
	}
	if v.Cache == 0 {
		v.Cache = AtDispatch
	}
	if v.ScrapeSeconds == 0 {
		v.ScrapeSeconds = 1
	}
	switch {
	case !(v.Load >= Tracked && v.Load <= Scraped):
		return v, invalid("view.load", v.Load, "be tracked or scraped")
	case !(v.Cache >= AtDispatch && v.Cache <= AskEngine):
		return v, invalid("view.cache", v.Cache, "be dispatch, first-token or engine")
	case !(v.ScrapeSeconds >= 1e-3 && v.ScrapeSeconds <= 1e6):
		return v, invalid("view.scrape_seconds", v.ScrapeSeconds, "be 0 or from 1e-3 to 1e6")
	case !(v.DelaySeconds >= 0 && v.DelaySeconds <= 1e6):
		return v, invalid("view.delay_seconds", v.DelaySeconds, "be from 0 to 1e6")
	case !(v.IndexTokens >= 0 && v.IndexTokens <= 1e9):
		return v, invalid("view.index_tokens", v.IndexTokens, "be from 0 to 1e9")
	}
	return v, nil
}

// rememberedSessions is how many sessions' homes a router remembers.
const rememberedSessions = 1 << 16

// ledger is what the router remembers of one instance's requests.
type ledger struct {
	requests, pendingPrefill, ongoing, activeDecodes int64
}

// dispatched is what the router remembers of one request in flight.
type dispatched struct {
	target, source int // source is sim.NoInstance unless the prefill is done there
	context        int64
	pending        int64 // at pendingAt, until the prefill is done
	pendingAt      int
	local          int64 // what the target would have to prefill itself
	decoding       bool
	prompt         []uint64
	// What was expected of it.
	predictedTTFT, arrivalSeconds float64
	predictedCached               int64
}

// scrape is an instance's metrics and when they were read.
type scrape struct {
	seconds float64
	states  []sim.State
}

// router decides where requests go from what it sees.
type router struct {
	cluster     *sim.Cluster
	policy      kvpolicy.Policy
	view        View
	blockTokens int
	snapshot    kvpolicy.Snapshot
	instances   map[string]int
	ledgers     []ledger
	inFlight    map[uint64]*dispatched
	scraped     scrape
	index       []prefixIndex
	homes       *lru[int64, int]
	ongoing     *series
}

func newRouter(cluster *sim.Cluster, policy kvpolicy.Policy, view View, blockTokens int) *router {
	n := cluster.Instances()
	r := &router{
		cluster: cluster, policy: policy, view: view, blockTokens: blockTokens,
		instances: make(map[string]int, n),
		ledgers:   make([]ledger, n),
		inFlight:  make(map[uint64]*dispatched),
		homes:     newLRU[int64, int](rememberedSessions),
		ongoing:   newSeries(n),
	}
	r.snapshot.Instances = make([]kvpolicy.Instance, n)
	r.scraped = r.read()
	for i := range n {
		id := strconv.Itoa(i)
		r.snapshot.Instances[i].ID = id
		r.instances[id] = i
		tokens := view.IndexTokens
		if tokens == 0 {
			tokens = r.scraped.states[i].KVCapacityTokens
		}
		r.index = append(r.index, prefixIndex{newLRU[uint64, struct{}](max(1, tokens/blockTokens))})
	}
	return r
}

// read reads every instance's metrics.
func (r *router) read() scrape {
	s := scrape{seconds: r.cluster.Now(), states: make([]sim.State, r.cluster.Instances())}
	for i := range s.states {
		s.states[i] = r.cluster.State(i)
	}
	return s
}

// scrape reads the metrics now and has them seen after the delay.
func (r *router) scrape() {
	s := r.read()
	if r.view.DelaySeconds == 0 {
		r.scraped = s
		return
	}
	r.cluster.At(s.seconds+r.view.DelaySeconds, func() { r.scraped = s })
}

// prompt is the identities of the whole blocks of a request's prompt.
func (r *router) prompt(q *workload.Request) []uint64 {
	return q.Blocks[:min(len(q.Blocks), q.InputTokens/r.blockTokens)]
}

// look fills the snapshot with what the router sees.
func (r *router) look(q *workload.Request) {
	home, known := r.homes.get(q.Session)
	r.snapshot.Request = kvpolicy.Request{ID: strconv.FormatUint(q.ID, 10), ContextTokens: int64(q.InputTokens)}
	if known {
		r.snapshot.Request.Affinity = r.snapshot.Instances[home].ID
	}
	prompt := r.prompt(q)
	now := r.cluster.Now()
	for i := range r.snapshot.Instances {
		out := &r.snapshot.Instances[i]
		id := out.ID
		switch {
		case r.view.Truth:
			*out = fromState(r.cluster.State(i))
		case r.view.Load == Scraped:
			*out = fromState(r.scraped.states[i])
			out.MetricsAgeSeconds = now - r.scraped.seconds
		default:
			s, l := &r.scraped.states[i], &r.ledgers[i]
			*out = kvpolicy.Instance{
				Requests:             l.requests,
				PendingPrefillTokens: l.pendingPrefill,
				OngoingTokens:        l.ongoing,
				ActiveDecodes:        l.activeDecodes,
				KVCapacityTokens:     int64(s.KVCapacityTokens),
				KVUsedTokens:         int64(s.KVUsedTokens),
				MetricsAgeSeconds:    now - r.scraped.seconds,
			}
		}
		out.ID = id
		if r.view.Truth || r.view.Cache == AskEngine {
			out.CachedTokens = int64(r.cluster.CachedTokens(i, q.InputTokens, q.Blocks))
		} else {
			out.CachedTokens = int64(r.index[i].match(prompt) * r.blockTokens)
		}
	}
}

func fromState(s sim.State) kvpolicy.Instance {
	return kvpolicy.Instance{
		Requests:             int64(s.Running + s.Waiting),
		PendingPrefillTokens: int64(s.PendingPrefillTokens),
		OngoingTokens:        int64(s.OngoingTokens),
		ActiveDecodes:        int64(s.ActiveDecodes),
		KVCapacityTokens:     int64(s.KVCapacityTokens),
		KVUsedTokens:         int64(s.KVUsedTokens),
		UptimeSeconds:        s.UptimeSeconds,
		Unavailable:          !s.Up,
	}
}

// dispatch decides on a request and sends it; on a reject nothing is sent.
func (r *router) dispatch(q *workload.Request) (kvpolicy.Decision, error) {
	r.look(q)
	d, err := r.policy.Decide(r.snapshot)
	if err != nil || d.Action == kvpolicy.Reject {
		return d, err
	}
	target := r.instances[d.Target]
	f := &dispatched{
		target: target, source: sim.NoInstance, pendingAt: target,
		context:        r.snapshot.Request.ContextTokens,
		prompt:         r.prompt(q),
		arrivalSeconds: q.ArrivalSeconds,
	}
	request := sim.Request{
		ID: q.ID, ArrivalSeconds: q.ArrivalSeconds,
		PromptTokens: q.InputTokens, OutputTokens: q.OutputTokens, Blocks: q.Blocks,
	}
	switch d.Action {
	case kvpolicy.Place:
		f.predictedTTFT = d.Cost.Contention + d.Cost.Queue + d.Cost.Prefill
		err = r.cluster.Submit(request, target)
	case kvpolicy.PrefillRemote:
		f.source = r.instances[d.PrefillOn]
		f.pendingAt = f.source
		f.predictedTTFT = d.Separation.CostMigrate
		err = r.cluster.SubmitSeparated(request, f.source, target)
	default:
		err = fmt.Errorf("a new request cannot %v", d.Action)
	}
	if err != nil {
		return d, err
	}
	at := &r.snapshot.Instances[f.pendingAt]
	f.predictedCached = min(at.CachedTokens, f.context)
	f.pending = f.context - f.predictedCached
	f.local = f.context - min(r.snapshot.Instances[target].CachedTokens, f.context)
	r.inFlight[q.ID] = f
	l := &r.ledgers[target]
	l.requests++
	l.ongoing += f.context
	r.ledgers[f.pendingAt].pendingPrefill += f.pending
	r.ongoing.set(target, r.cluster.Now(), float64(l.ongoing))
	r.homes.put(q.Session, target)
	if r.view.Cache == AtDispatch {
		r.index[target].fill(f.prompt)
		if f.source != sim.NoInstance {
			r.index[f.source].fill(f.prompt)
		}
	}
	return d, nil
}

// prefilled takes a request's prefill off the instance that has done it.
func (r *router) prefilled(f *dispatched) {
	r.ledgers[f.pendingAt].pendingPrefill -= f.pending
	f.pending = 0
}

// cached says that the KV of a request's prompt exists on an instance.
func (r *router) cached(f *dispatched, instance int) {
	if r.view.Cache == AtFirstToken {
		r.cluster.At(r.cluster.Now()+r.view.DelaySeconds, func() { r.index[instance].fill(f.prompt) })
	}
}

// progress keeps the books on a request's way.
func (r *router) progress(p sim.Progress) {
	f := r.inFlight[p.ID]
	switch p.Kind {
	case sim.Prefilled:
		r.prefilled(f)
		r.cached(f, f.source)
	case sim.TransferAbandoned:
		// The target does the prefill itself after all.
		r.prefilled(f)
		f.pendingAt, f.pending = f.target, f.local
		r.ledgers[f.target].pendingPrefill += f.pending
	case sim.FirstToken:
		if !f.decoding {
			f.decoding = true
			r.ledgers[f.target].activeDecodes++
			r.prefilled(f)
			r.cached(f, f.target)
		}
	}
}

// ended closes the books on a request, and returns what was known of it.
func (r *router) ended(id uint64) *dispatched {
	f := r.inFlight[id]
	delete(r.inFlight, id)
	r.prefilled(f)
	l := &r.ledgers[f.target]
	l.requests--
	l.ongoing -= f.context
	if f.decoding {
		l.activeDecodes--
	}
	r.ongoing.set(f.target, r.cluster.Now(), float64(l.ongoing))
	return f
}

// balanced says whether the books are closed: nothing in flight, nothing owed.
func (r *router) balanced() bool {
	return len(r.inFlight) == 0 && !slices.ContainsFunc(r.ledgers, func(l ledger) bool { return l != ledger{} })
}

func invalid(path string, value any, want string) error {
	return &kvpolicy.FieldError{Path: path, Value: fmt.Sprint(value), Want: want}
}
