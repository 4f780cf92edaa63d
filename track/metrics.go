package track

import (
	"cmp"
	"math"
	"slices"
	"time"
)

// Metrics is what was scraped from a server. What it does not tell stays
// unknown: nil, or 0 where 0 can be no value.
type Metrics struct {
	// Running and Waiting count the requests of all clients in the server's
	// batch and in its queue, whole numbers of 0 to 1e9. (vLLM:
	// vllm:num_requests_running, vllm:num_requests_waiting.)
	Running, Waiting *float64
	// KVUsage is the share of the KV pool that is taken and cannot be evicted,
	// a fraction of 0 to 1 and not a percentage. (vLLM: vllm:kv_cache_usage_perc,
	// a fraction despite its name.)
	KVUsage *float64
	// BlockTokens is the size of a block of the KV pool in tokens, 0 to 65536,
	// and Blocks their number, 0 to 1e9. (vLLM: the labels block_size and
	// num_gpu_blocks of vllm:cache_config_info.) Either 0: the capacity is
	// unknown, or that of InstanceInfo.KVCapacityTokens.
	BlockTokens, Blocks int64
	// StartedAt is when the server's process started; zero is unknown.
	// (process_start_time_seconds.) One that differs by more than a second from
	// that of the scrape before is another process. It is compared with the times
	// that Begin is told, so that those must come from the wall clock too.
	StartedAt time.Time
	// Counter is any counter that starts at 0 with the process and never falls,
	// at least 0, of any unit, but always the same one. (vLLM:
	// vllm:prompt_tokens_total.) A lesser one than in the scrape before is
	// another process.
	Counter *float64
}

const (
	maxTokens  = 1_000_000_000_000_000 // as a snapshot allows
	maxCount   = 1_000_000_000
	maxSeconds = 1e12
)

func (m *Metrics) validate() error {
	for _, f := range [...]struct {
		path  string
		value *float64
	}{
		{"metrics.running", m.Running}, {"metrics.waiting", m.Waiting},
	} {
		if f.value != nil && !(*f.value >= 0 && *f.value <= maxCount && *f.value == math.Trunc(*f.value)) {
			return fieldError(f.path, *f.value, "be a whole number of 0 to 1e9")
		}
	}
	switch {
	case m.KVUsage != nil && !(*m.KVUsage >= 0 && *m.KVUsage <= 1):
		return fieldError("metrics.kv_usage", *m.KVUsage, "be a fraction of 0 to 1, not a percentage")
	case !(m.BlockTokens >= 0 && m.BlockTokens <= 65536):
		return fieldError("metrics.block_tokens", m.BlockTokens, "be 0 to 65536")
	case !(m.Blocks >= 0 && m.Blocks <= maxCount):
		return fieldError("metrics.blocks", m.Blocks, "be 0 to 1e9")
	case m.Counter != nil && !(*m.Counter >= 0 && *m.Counter <= math.MaxFloat64):
		return fieldError("metrics.counter", *m.Counter, "be a finite number of at least 0")
	}
	return nil
}

// scrape is what the last metrics said, against the ledger of that time.
type scrape struct {
	metrics Metrics
	// at is when it was taken, if any was; fresh is when the last was that told
	// of load, if any did.
	at, fresh     float64
	any, hasFresh bool
	// capacity is the KV pool in tokens, 0 where unknown.
	capacity int64
	// foreign is how many requests the server had beyond those of the ledger,
	// and foreignOngoing the context tokens guessed for them.
	foreign, foreignOngoing int64
	// kv is the KV in use in tokens, and kvLedger what of it the ledger accounted
	// for then; kvKnown tells whether the server told.
	kv, kvLedger int64
	kvKnown      bool
}

// Observe takes in what was scraped from an instance at a time, and reconciles
// the ledger with it.
//
//   - Requests that the server has beyond the ledger's are other routers', or
//     those whose client has gone and whose end the server has not noticed:
//     they count as load until the next scrape.
//   - A request with no sign of life for Config.Grace counts as a phantom where
//     the server has fewer requests than the ledger has such: the most silent
//     ones are dropped and counted in Stats.Phantoms.
//   - Another process behind the same id has lost what the last one had:
//     requests sent before it started (where its start is unknown, before the
//     scrape before) are dropped and counted in Stats.Lost, its prefixes and
//     sessions are forgotten, and the history of its node has one session more.
//
// A scrape that is not later than the last is passed over. Metrics that tell
// of neither requests nor KV do not make an instance's metrics fresh. Metrics
// with a fault are a FieldError, and none of them is taken in.
func (t *Tracker) Observe(id string, m Metrics, now time.Time) error {
	if err := m.validate(); err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	i := t.byID[id]
	if i == nil {
		return unknownInstance("instance", id)
	}
	at, last := t.seconds(now), &i.scrape
	if last.any && at <= last.at {
		return nil
	}
	if last.anotherProcess(&m) {
		t.restart(i, m.StartedAt, at)
	} else if i.known.StartedAt.IsZero() && last.metrics.StartedAt.IsZero() && !m.StartedAt.IsZero() {
		i.started = min(t.seconds(m.StartedAt), at)
	}
	next := scrape{metrics: m, at: at, any: true, fresh: last.fresh, hasFresh: last.hasFresh, capacity: m.BlockTokens * m.Blocks}
	if m.StartedAt.IsZero() {
		next.metrics.StartedAt = last.metrics.StartedAt
	}
	if m.Counter == nil {
		next.metrics.Counter = last.metrics.Counter
	}
	if m.Running != nil || m.Waiting != nil || m.KVUsage != nil {
		next.fresh, next.hasFresh = at, true
	}
	t.dropPhantoms(i, &m, at)
	if capacity := cmp.Or(next.capacity, i.known.KVCapacityTokens); m.KVUsage != nil && capacity > 0 {
		next.kvKnown, next.kv, next.kvLedger = true, int64(math.Round(*m.KVUsage*float64(capacity))), i.load.kv
	}
	if next.foreign = max(0, m.requests()-(i.load.requests-i.load.away)); next.foreign > 0 && next.kvKnown {
		next.foreignOngoing = max(0, next.kv-i.load.ongoing)
	}
	i.scrape = next
	i.boundPrefixes(t.config)
	return nil
}

// requests is the number of requests that the server is known to have.
func (m *Metrics) requests() int64 {
	var n int64
	for _, count := range [...]*float64{m.Running, m.Waiting} {
		if count != nil {
			n += int64(*count)
		}
	}
	return n
}

// anotherProcess tells whether metrics come from another process than those of
// the last scrape.
func (s *scrape) anotherProcess(m *Metrics) bool {
	if before := s.metrics.StartedAt; !before.IsZero() && !m.StartedAt.IsZero() {
		if apart := m.StartedAt.Sub(before).Abs(); apart > time.Second {
			return true
		}
	}
	return s.metrics.Counter != nil && m.Counter != nil && *m.Counter < *s.metrics.Counter
}

// restart begins another life of an instance. startedAt is when its process
// started, zero where that is unknown.
func (t *Tracker) restart(i *instance, startedAt time.Time, at float64) {
	i.stats.Restarts++
	started, survivesFrom := at, math.Nextafter(i.scrape.at, math.Inf(1))
	if !startedAt.IsZero() {
		started = min(t.seconds(startedAt), at)
		survivesFrom = started
	}
	seen := started
	if i.scrape.any {
		seen = min(i.scrape.at, started)
	}
	t.closeSession(i, seen, i.state != Draining)
	for e := range i.entries {
		if e.sent < survivesFrom {
			t.drop(e)
			i.stats.Lost++
		}
	}
	life := t.nextLife()
	if i.group != nil {
		i.group.clear(i.slot, i.life, life)
	}
	i.life, i.started, i.watched = life, started, started
	i.scrape = scrape{}
}

// dropPhantoms drops requests that the server cannot have.
func (t *Tracker) dropPhantoms(i *instance, m *Metrics, at float64) {
	if m.Running == nil || m.Waiting == nil || i.load.requests-i.load.away <= m.requests() {
		return
	}
	var silent []*entry
	for e := range i.entries {
		if (!e.remote() || e.source == i) && at-e.alive > t.config.Grace.Seconds() {
			silent = append(silent, e)
		}
	}
	phantoms := int64(len(silent)) - m.requests()
	if phantoms <= 0 {
		return
	}
	slices.SortFunc(silent, func(a, b *entry) int {
		return cmp.Or(cmp.Compare(a.alive, b.alive), cmp.Compare(a.begun, b.begun))
	})
	for _, e := range silent[:phantoms] {
		t.drop(e)
		i.stats.Phantoms++
	}
}
