package track_test

import (
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/kvpolicy/kvpolicy"
	"github.com/kvpolicy/kvpolicy/track"
)

func number(x float64) *float64 { return &x }

// sent begins a request of 100 tokens on an instance.
func sent(t require.TestingT, tracker *track.Tracker, id, instance string, seconds float64) track.Key {
	r := track.Request{}
	r.ID, r.ContextTokens = id, 100
	require.NoError(t, tracker.Begin(r, kvpolicy.Decision{Action: kvpolicy.Place, Target: instance}, at(seconds)))
	return r.Key()
}

// only is a tracker with one instance, i, that was never scraped.
func only(t require.TestingT) *track.Tracker {
	tracker, err := track.New(track.DefaultConfig())
	require.NoError(t, err)
	require.NoError(t, tracker.Join("i", track.InstanceInfo{}, at(0)))
	return tracker
}

func see(tracker *track.Tracker, seconds float64) kvpolicy.Instance {
	return tracker.Snapshot(track.Request{}, at(seconds), nil).Instances[0]
}

func TestMetricsFaults(t *testing.T) {
	for _, c := range []struct {
		m    track.Metrics
		path string
	}{
		{track.Metrics{Running: number(-1)}, "metrics.running"},
		{track.Metrics{Running: number(0.5)}, "metrics.running"},
		{track.Metrics{Running: number(math.NaN())}, "metrics.running"},
		{track.Metrics{Waiting: number(math.Inf(1))}, "metrics.waiting"},
		{track.Metrics{Waiting: number(2e9)}, "metrics.waiting"},
		{track.Metrics{KVUsage: number(42)}, "metrics.kv_usage"},
		{track.Metrics{KVUsage: number(1.0000001)}, "metrics.kv_usage"},
		{track.Metrics{KVUsage: number(math.NaN())}, "metrics.kv_usage"},
		{track.Metrics{KVUsage: number(-0.1)}, "metrics.kv_usage"},
		{track.Metrics{BlockTokens: -1}, "metrics.block_tokens"},
		{track.Metrics{BlockTokens: 65537}, "metrics.block_tokens"},
		{track.Metrics{Blocks: -1}, "metrics.blocks"},
		{track.Metrics{Blocks: 2e9}, "metrics.blocks"},
		{track.Metrics{Counter: number(math.NaN())}, "metrics.counter"},
		{track.Metrics{Counter: number(math.Inf(1))}, "metrics.counter"},
		{track.Metrics{Counter: number(-1)}, "metrics.counter"},
	} {
		tracker := only(t)
		before := see(tracker, 2)
		c.m.Blocks, c.m.BlockTokens = max(c.m.Blocks, -1), max(c.m.BlockTokens, -1)
		err := tracker.Observe("i", c.m, at(1))
		var field *kvpolicy.FieldError
		require.ErrorAs(t, err, &field, "%+v", c.m)
		assert.Equal(t, c.path, field.Path)
		assert.Equal(t, before, see(tracker, 2), "nothing of it is taken in")
	}
	assert.ErrorContains(t, only(t).Observe("i", track.Metrics{KVUsage: number(42)}, at(1)), "not a percentage")
}

func TestUnknownStaysUnknown(t *testing.T) {
	tracker := only(t)
	i := see(tracker, 5)
	assert.Zero(t, i.KVCapacityTokens)
	assert.EqualValues(t, 1e12, i.MetricsAgeSeconds, "never scraped")
	require.NoError(t, tracker.Observe("i", track.Metrics{Blocks: 100, BlockTokens: 16, KVUsage: number(0.5)}, at(6)))
	i = see(tracker, 8)
	assert.EqualValues(t, 1600, i.KVCapacityTokens)
	assert.EqualValues(t, 800, i.KVUsedTokens)
	assert.EqualValues(t, 2, i.MetricsAgeSeconds)
	require.NoError(t, tracker.Observe("i", track.Metrics{Counter: number(4)}, at(9)))
	i = see(tracker, 10)
	assert.Zero(t, i.KVCapacityTokens, "no longer told")
	assert.Zero(t, i.KVUsedTokens)
	assert.EqualValues(t, 4, i.MetricsAgeSeconds, "of the last that told of load")

	require.NoError(t, tracker.Join("i", track.InstanceInfo{KVCapacityTokens: 1000}, at(11)))
	require.NoError(t, tracker.Observe("i", track.Metrics{KVUsage: number(0.25)}, at(12)))
	i = see(tracker, 12)
	assert.EqualValues(t, 1000, i.KVCapacityTokens)
	assert.EqualValues(t, 250, i.KVUsedTokens)
}

func TestNeverScrapedDoesNotWin(t *testing.T) {
	tracker := fleet(t, track.DefaultConfig(), 3)
	require.NoError(t, tracker.Join("instance-new", track.InstanceInfo{}, at(2)))
	policy := kvpolicy.Unified()
	policy.MaxMetricsAgeSeconds = 10
	for n := range 50 {
		r := track.Request{}
		r.ID, r.ContextTokens = fmt.Sprint(n), 1000
		d, err := policy.Decide(tracker.Snapshot(r, at(3), nil))
		require.NoError(t, err)
		assert.NotEqual(t, "instance-new", d.Target)
		assert.False(t, d.Degraded)
		d, err = policy.Decide(tracker.Snapshot(r, at(100), nil))
		require.NoError(t, err)
		assert.True(t, d.Degraded, "all are stale by then")
	}
}

func TestForeignRequestsAreNotSummedTwice(t *testing.T) {
	tracker := only(t)
	sent(t, tracker, "a", "i", 1)
	keyB := sent(t, tracker, "b", "i", 1)
	require.NoError(t, tracker.Observe("i", track.Metrics{
		Running: number(4), Waiting: number(1), KVUsage: number(0.5), BlockTokens: 16, Blocks: 100}, at(2)))
	i := see(tracker, 2)
	assert.EqualValues(t, 5, i.Requests, "two of the ledger, three of others")
	assert.EqualValues(t, 800, i.KVUsedTokens)
	assert.EqualValues(t, 800, i.OngoingTokens, "200 of the ledger, the rest of the others")
	assert.EqualValues(t, 200, i.PendingPrefillTokens, "of others it is unknown")
	sent(t, tracker, "c", "i", 3)
	i = see(tracker, 3)
	assert.EqualValues(t, 6, i.Requests)
	assert.EqualValues(t, 900, i.KVUsedTokens)
	tracker.End(keyB, at(4))
	i = see(tracker, 4)
	assert.EqualValues(t, 5, i.Requests)
	assert.EqualValues(t, 800, i.KVUsedTokens)
	require.NoError(t, tracker.Observe("i", track.Metrics{Running: number(2), Waiting: number(0)}, at(5)))
	i = see(tracker, 5)
	assert.EqualValues(t, 2, i.Requests)
	assert.EqualValues(t, 200, i.OngoingTokens)
}

func TestScrapesOutOfOrderArePassedOver(t *testing.T) {
	tracker := only(t)
	require.NoError(t, tracker.Observe("i", track.Metrics{Running: number(4)}, at(5)))
	require.NoError(t, tracker.Observe("i", track.Metrics{Running: number(9)}, at(4)))
	require.NoError(t, tracker.Observe("i", track.Metrics{Running: number(8)}, at(5)))
	assert.EqualValues(t, 4, see(tracker, 6).Requests)
	assert.EqualValues(t, 0, see(tracker, 1).MetricsAgeSeconds, "a clock that goes back makes no negative age")
}

func TestPhantoms(t *testing.T) {
	idle := track.Metrics{Running: number(0), Waiting: number(0)}
	t.Run("only beyond the grace time", func(t *testing.T) {
		tracker := only(t)
		key := sent(t, tracker, "a", "i", 1)
		require.NoError(t, tracker.Observe("i", idle, at(11)))
		assert.EqualValues(t, 1, see(tracker, 11).Requests)
		require.NoError(t, tracker.Observe("i", idle, at(11.25)))
		assert.Zero(t, see(tracker, 12).Requests)
		assert.EqualValues(t, 1, tracker.Stats(nil)[0].Phantoms)
		assert.False(t, tracker.End(key, at(13)))
		assert.False(t, tracker.FirstToken(key, at(13)))
		assert.Zero(t, see(tracker, 14).Requests)
	})
	t.Run("only where both counts are known", func(t *testing.T) {
		tracker := only(t)
		sent(t, tracker, "a", "i", 1)
		require.NoError(t, tracker.Observe("i", track.Metrics{Running: number(0)}, at(100)))
		require.NoError(t, tracker.Observe("i", track.Metrics{Waiting: number(0)}, at(101)))
		assert.EqualValues(t, 1, see(tracker, 102).Requests)
	})
	t.Run("the most silent first, as many as are too many", func(t *testing.T) {
		tracker := only(t)
		keys := map[string]track.Key{}
		for _, id := range []string{"a", "b", "c", "d"} {
			keys[id] = sent(t, tracker, id, "i", 1)
		}
		tracker.FirstToken(keys["a"], at(30))  // alive at the scrape
		tracker.Progress(keys["b"], 5, at(15)) // heard of later than c and d
		require.NoError(t, tracker.Observe("i", track.Metrics{Running: number(1), Waiting: number(0)}, at(32)))
		assert.EqualValues(t, 2, tracker.Stats(nil)[0].Phantoms)
		for id, live := range map[string]bool{"a": true, "b": true, "c": false, "d": false} {
			assert.Equal(t, live, tracker.End(keys[id], at(33)), id)
		}
	})
	t.Run("not while the prefill is elsewhere", func(t *testing.T) {
		tracker := fleet(t, track.DefaultConfig(), 2)
		r := track.Request{}
		r.ID, r.ContextTokens = "a", 100
		d := kvpolicy.Decision{Action: kvpolicy.PrefillRemote, Target: "instance-000", PrefillOn: "instance-001"}
		require.NoError(t, tracker.Begin(r, d, at(2)))
		sent(t, tracker, "gone", "instance-000", 2)
		require.NoError(t, tracker.Observe("instance-000", idle, at(60)))
		assert.EqualValues(t, 1, tracker.Stats(nil)[0].Phantoms)
		require.True(t, tracker.Prefilled(r.Key(), at(61)), "the other is still there")
		require.NoError(t, tracker.Observe("instance-000", idle, at(80)))
		assert.EqualValues(t, 2, tracker.Stats(nil)[0].Phantoms)
	})
}

func TestRestart(t *testing.T) {
	for _, c := range []struct {
		name          string
		before, after track.Metrics
		join          track.InstanceInfo // told instead of the metrics after, where it has a start
		late          bool               // whether the late request survives
		uptime        float64
	}{
		{"a counter fell", track.Metrics{Counter: number(10)}, track.Metrics{Counter: number(9)}, track.InstanceInfo{}, true, 5},
		{"to zero", track.Metrics{Counter: number(10)}, track.Metrics{Counter: number(0)}, track.InstanceInfo{}, true, 5},
		{"another start", track.Metrics{StartedAt: at(-50)}, track.Metrics{StartedAt: at(17)}, track.InstanceInfo{}, true, 8},
		{"after the late request", track.Metrics{StartedAt: at(-50)}, track.Metrics{StartedAt: at(19)}, track.InstanceInfo{}, false, 6},
		{"a start in the future", track.Metrics{StartedAt: at(-50)}, track.Metrics{StartedAt: at(90)}, track.InstanceInfo{}, false, 5},
		{"told by discovery", track.Metrics{}, track.Metrics{}, track.InstanceInfo{StartedAt: at(17)}, true, 8},
	} {
		t.Run(c.name, func(t *testing.T) {
			tracker, err := track.New(track.DefaultConfig())
			require.NoError(t, err)
			info := track.InstanceInfo{}
			if !c.join.StartedAt.IsZero() {
				info.StartedAt = at(-100)
			}
			require.NoError(t, tracker.Join("i", info, at(0)))
			p := tracker.TokenPrompt(nil, track.Salt{}, conversation(0, 0, 100))
			r := track.Request{Session: "s", Prompt: p}
			r.ID, r.ContextTokens = "early", 100
			require.NoError(t, tracker.Begin(r, kvpolicy.Decision{Action: kvpolicy.Place, Target: "i"}, at(1)))
			require.NoError(t, tracker.Observe("i", c.before, at(10)))
			late := sent(t, tracker, "late", "i", 18)
			if c.join.StartedAt.IsZero() {
				require.NoError(t, tracker.Observe("i", c.after, at(20)))
			} else {
				require.NoError(t, tracker.Join("i", c.join, at(20)))
			}

			stats := tracker.Stats(nil)[0]
			assert.EqualValues(t, 1, stats.Restarts)
			assert.Zero(t, stats.PrefixBlocks)
			i := see(tracker, 25)
			assert.Equal(t, c.uptime, i.UptimeSeconds)
			if c.late {
				assert.EqualValues(t, 1, stats.Lost)
				assert.EqualValues(t, 1, i.Requests)
			} else {
				assert.EqualValues(t, 2, stats.Lost)
				assert.Zero(t, i.Requests)
			}
			r.ID = "next"
			s := tracker.Snapshot(r, at(25), nil)
			assert.Empty(t, s.Request.Affinity)
			assert.Zero(t, s.Instances[0].CachedTokens)
			assert.False(t, tracker.End(track.Key{ID: "early"}, at(26)))
			assert.Equal(t, c.late, tracker.End(late, at(26)))
			_, completed := mustCurve(tracker.Histories(at(30)).Curve("i")).Sessions()
			assert.Equal(t, 1, completed)
		})
	}
	t.Run("not by the same process", func(t *testing.T) {
		tracker := only(t)
		sent(t, tracker, "a", "i", 1)
		for n, m := range []track.Metrics{
			{Counter: number(3), StartedAt: at(-5)}, {Counter: number(3)}, {StartedAt: at(-4.5)},
			{Counter: number(4), StartedAt: at(-5.25)}, {},
		} {
			require.NoError(t, tracker.Observe("i", m, at(float64(2+n))))
		}
		require.NoError(t, tracker.Join("i", track.InstanceInfo{StartedAt: at(-60)}, at(8)), "the node is older than the process")
		require.NoError(t, tracker.Join("i", track.InstanceInfo{StartedAt: at(-60)}, at(8)))
		assert.Zero(t, tracker.Stats(nil)[0].Restarts)
		assert.EqualValues(t, 1, see(tracker, 9).Requests)
		assert.EqualValues(t, 69, see(tracker, 9).UptimeSeconds)
	})
}

func TestSessionsThatEndInARestart(t *testing.T) {
	tracker, err := track.New(track.DefaultConfig())
	require.NoError(t, err)
	started := func(seconds float64) track.Metrics { return track.Metrics{StartedAt: at(seconds)} }
	require.NoError(t, tracker.Join("i", track.InstanceInfo{}, at(0)))
	require.NoError(t, tracker.Observe("i", started(-10), at(20)))
	require.NoError(t, tracker.Observe("i", started(100), at(110)))
	curve := mustCurve(tracker.Histories(at(110)).Curve("i"))
	assert.Equal(t, 1.0, curve.Survival(29.75))
	assert.Less(t, curve.Survival(30), 1.0, "it was last seen 30 s old")
	require.NoError(t, tracker.SetState("i", track.Draining))
	require.NoError(t, tracker.Observe("i", started(150), at(160)))
	sessions, completed := mustCurve(tracker.Histories(at(160)).Curve("i")).Sessions()
	assert.Equal(t, []int{3, 1}, []int{sessions, completed}, "a restart while draining was planned")
}

func mustCurve(k *kvpolicy.KaplanMeier, _ kvpolicy.PoolLevel) *kvpolicy.KaplanMeier { return k }

func TestConfigFaults(t *testing.T) {
	require.NoError(t, track.DefaultConfig().Validate())
	for path, change := range map[string]func(c *track.Config){
		"block_tokens":     func(c *track.Config) { c.BlockTokens = 0 },
		"text_block_bytes": func(c *track.Config) { c.TextBlockBytes = -1 },
		"prefix_blocks":    func(c *track.Config) { c.PrefixBlocks = -1 },
		"sessions":         func(c *track.Config) { c.Sessions = math.MaxInt32 },
		"session_ttl":      func(c *track.Config) { c.SessionTTL = -time.Second },
		"grace":            func(c *track.Config) { c.Grace = -1 },
		"ended_requests":   func(c *track.Config) { c.EndedRequests = 0 },
		"history_nodes":    func(c *track.Config) { c.HistoryNodes = -1 },
		"history_sessions": func(c *track.Config) { c.HistorySessions = 0 },
	} {
		c := track.DefaultConfig()
		change(&c)
		_, err := track.New(c)
		var field *kvpolicy.FieldError
		require.ErrorAs(t, err, &field, path)
		assert.Equal(t, path, field.Path)
	}
}

func TestInstanceAndRequestFaults(t *testing.T) {
	tracker := only(t)
	place := kvpolicy.Decision{Action: kvpolicy.Place, Target: "i"}
	begin := func(change func(r *track.Request)) error {
		r := track.Request{}
		r.ID = "r"
		change(&r)
		return tracker.Begin(r, place, at(1))
	}
	unchanged := func(*track.Request) {}
	decide := func(d kvpolicy.Decision) error {
		place = d
		return begin(unchanged)
	}
	for _, c := range []struct {
		path string
		err  error
	}{
		{"id", tracker.Join("", track.InstanceInfo{}, at(0))},
		{"prefill_rate", tracker.Join("x", track.InstanceInfo{PrefillRate: math.NaN()}, at(0))},
		{"decode_rate", tracker.Join("x", track.InstanceInfo{DecodeRate: -1}, at(0))},
		{"bandwidth", tracker.Join("x", track.InstanceInfo{Bandwidth: math.Inf(1)}, at(0))},
		{"kv_capacity_tokens", tracker.Join("x", track.InstanceInfo{KVCapacityTokens: -1}, at(0))},
		{"state", tracker.SetState("i", 0)},
		{"instance", tracker.SetState("x", track.Ready)},
		{"instance", tracker.SetCurve("x", nil, "")},
		{"instance", tracker.Observe("x", track.Metrics{}, at(1))},
		{"ending", tracker.Leave("i", 0, at(1))},
		{"request.id", begin(func(r *track.Request) { r.ID = "" })},
		{"request.context_tokens", begin(func(r *track.Request) { r.ContextTokens = -1 })},
		{"request.context_tokens", begin(func(r *track.Request) { r.ContextTokens = 2e12 })},
		{"request.remaining_tokens", begin(func(r *track.Request) { r.RemainingTokens = -1 })},
		{"decision.action", decide(kvpolicy.Decision{})},
		{"decision.action", decide(kvpolicy.Decision{Action: kvpolicy.Reject})},
		{"decision.target", decide(kvpolicy.Decision{Action: kvpolicy.Place, Target: "x"})},
		{"decision.prefill_on", decide(kvpolicy.Decision{Action: kvpolicy.PrefillRemote, Target: "i", PrefillOn: "x"})},
	} {
		var field *kvpolicy.FieldError
		require.ErrorAs(t, c.err, &field, c.path)
		assert.Equal(t, c.path, field.Path)
	}
	require.NoError(t, tracker.Leave("x", track.Lost, at(1)), "one that never joined")
	assert.Len(t, tracker.Stats(nil), 1)
	assert.Zero(t, see(tracker, 2).Requests)
}
