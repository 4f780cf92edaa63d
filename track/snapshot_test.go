package track_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"gonum.org/v1/gonum/stat/distuv"

	"github.com/kvpolicy/kvpolicy"
	"github.com/kvpolicy/kvpolicy/track"
)

func TestSnapshotAllocatesNothing(t *testing.T) {
	tracker := fleet(t, track.DefaultConfig(), 100)
	policy := kvpolicy.Unified()
	tokens := conversation(0, 0, 1000)
	r := track.Request{Session: "s", Prompt: tracker.TokenPrompt(nil, track.Salt{}, tokens)}
	r.ID, r.ContextTokens = "r", 1000
	place(t, tracker, "before", "instance-099", 1000, r.Prompt)
	running := r
	running.ID = "running"
	require.NoError(t, tracker.Begin(running, kvpolicy.Decision{Action: kvpolicy.Place, Target: "instance-001"}, at(2)))
	var buffer track.Buffer
	for name, request := range map[string]track.Request{"new": r, "running": running} {
		assert.Zero(t, testing.AllocsPerRun(100, func() {
			if s := tracker.Snapshot(request, at(3), &buffer); len(s.Instances) != 100 {
				t.Error("instances are missing")
			}
		}), name)
	}
	assert.Zero(t, testing.AllocsPerRun(100, func() {
		request := r
		request.Prompt = tracker.TokenPrompt(request.Prompt.Blocks, track.Salt{}, tokens)
		if d, err := policy.Decide(tracker.Snapshot(request, at(3), &buffer)); err != nil || d.Target == "" {
			t.Error("no decision")
		}
	}), "prompt, snapshot and decision")
	text := make([]byte, 1000)
	blocks := tracker.TextPrompt(nil, track.Salt{}, text).Blocks
	assert.Zero(t, testing.AllocsPerRun(100, func() { tracker.TextPrompt(blocks, track.Salt{}, text) }))
}

func TestSnapshotOrder(t *testing.T) {
	tracker, err := track.New(track.DefaultConfig())
	require.NoError(t, err)
	var want []string
	for _, n := range rand.New(rand.NewPCG(3, 4)).Perm(150) {
		id := fmt.Sprintf("%03d", n)
		require.NoError(t, tracker.Join(id, track.InstanceInfo{PrefillRate: float64(n)}, at(0)))
		want = append(want, id)
		if n%7 == 0 {
			require.NoError(t, tracker.Leave(id, track.Planned, at(0)))
			want = want[:len(want)-1]
		}
	}
	slices.Sort(want)
	var got []string
	for _, i := range tracker.Snapshot(track.Request{}, at(1), nil).Instances {
		got = append(got, i.ID)
		assert.Equal(t, i.ID, fmt.Sprintf("%03d", int(i.PrefillRate)))
	}
	assert.Equal(t, want, got)
}

func TestDraining(t *testing.T) {
	tracker := fleet(t, track.DefaultConfig(), 2)
	key := sent(t, tracker, "running", "instance-000", 2)
	require.NoError(t, tracker.SetState("instance-000", track.Draining))
	fresh, running := track.Request{}, track.Request{}
	fresh.ID, running.ID = "new", key.ID
	s := tracker.Snapshot(fresh, at(3), nil)
	assert.True(t, s.Instances[0].Unavailable)
	assert.False(t, s.Instances[1].Unavailable)
	assert.False(t, tracker.Snapshot(running, at(3), nil).Instances[0].Unavailable, "it finishes what it has")
	require.NoError(t, tracker.SetState("instance-000", track.Down))
	s = tracker.Snapshot(running, at(3), nil)
	d, err := kvpolicy.Decide(s)
	require.NoError(t, err)
	assert.Equal(t, kvpolicy.Recover, d.Action)
	assert.Equal(t, "instance-001", d.Target)
	require.NoError(t, tracker.Begin(track.Request{Request: s.Request}, d, at(4)))
	s = tracker.Snapshot(fresh, at(5), nil)
	assert.EqualValues(t, []int64{4, 5}, []int64{s.Instances[0].Requests, s.Instances[1].Requests}, "moved, with the scraped ones where they were")
}

func TestMigrationMovesWhatItHasGenerated(t *testing.T) {
	for method, pending := range map[kvpolicy.Method]int64{kvpolicy.Transfer: 0, kvpolicy.Recompute: 120} {
		tracker := fleet(t, track.DefaultConfig(), 2)
		r := track.Request{}
		r.ID, r.ContextTokens, r.RemainingTokens = "r", 100, 50
		require.NoError(t, tracker.Begin(r, kvpolicy.Decision{Action: kvpolicy.Place, Target: "instance-000"}, at(2)))
		tracker.Progress(r.Key(), 20, at(3))
		s := tracker.Snapshot(r, at(3), nil)
		assert.Equal(t, kvpolicy.Request{ID: "r", ContextTokens: 120, RemainingTokens: 30, RunningOn: "instance-000"}, s.Request)
		d := kvpolicy.Decision{Action: kvpolicy.Migrate, Target: "instance-001", Move: kvpolicy.Move{Method: method}}
		require.NoError(t, tracker.Begin(r, d, at(4)))
		require.NoError(t, tracker.Begin(r, d, at(4)), "twice is once")
		s = tracker.Snapshot(r, at(5), nil)
		assert.Equal(t, kvpolicy.Request{ID: "r", ContextTokens: 120, RemainingTokens: 30, RunningOn: "instance-001", Hops: 1}, s.Request)
		s = tracker.Snapshot(track.Request{}, at(5), nil)
		assert.EqualValues(t, 120, s.Instances[1].OngoingTokens-s.Instances[0].OngoingTokens, "on top of the scraped ones")
		assert.Equal(t, pending, s.Instances[1].PendingPrefillTokens)
		tracker.FirstToken(r.Key(), at(6))
		s = tracker.Snapshot(track.Request{}, at(6), nil)
		assert.Zero(t, s.Instances[1].PendingPrefillTokens)
		assert.EqualValues(t, 1, s.Instances[1].ActiveDecodes)
	}
}

func TestMigrationWhilePrefilling(t *testing.T) {
	tracker := fleet(t, track.DefaultConfig(), 2)
	p := tracker.TokenPrompt(nil, track.Salt{}, conversation(0, 0, 160))
	place(t, tracker, "before", "instance-001", 96, tracker.TokenPrompt(nil, track.Salt{}, conversation(0, 0, 96)))
	r := track.Request{Prompt: p}
	r.ID, r.ContextTokens = "r", 160
	require.NoError(t, tracker.Begin(r, kvpolicy.Decision{Action: kvpolicy.Place, Target: "instance-000"}, at(2)))
	d := kvpolicy.Decision{Action: kvpolicy.Migrate, Target: "instance-001", Move: kvpolicy.Move{Method: kvpolicy.Transfer}}
	require.NoError(t, tracker.Begin(r, d, at(3)))
	s := tracker.Snapshot(track.Request{}, at(4), nil)
	assert.EqualValues(t, []int64{0, 64}, []int64{s.Instances[0].PendingPrefillTokens, s.Instances[1].PendingPrefillTokens})
}

// TestBurst decides 800 requests between two scrapes, as each begun one is seen
// by the next.
func TestBurst(t *testing.T) {
	tracker := fleet(t, track.DefaultConfig(), 8)
	policy, each := kvpolicy.Unified(), map[string]int{}
	for n := range 800 {
		r := track.Request{}
		r.ID, r.ContextTokens = fmt.Sprint(n), 2000
		d, err := policy.Decide(tracker.Snapshot(r, at(2), nil))
		require.NoError(t, err)
		require.NoError(t, tracker.Begin(r, d, at(2)))
		each[d.Target]++
	}
	require.Len(t, each, 8)
	for id, n := range each {
		assert.Equal(t, 100, n, id)
	}
}

func TestSessions(t *testing.T) {
	config := track.DefaultConfig()
	config.Sessions, config.SessionTTL = 2, 10*time.Second
	tracker := fleet(t, config, 2)
	turn := func(session, instance string, seconds float64) track.Key {
		r := track.Request{Session: session}
		r.ID = fmt.Sprint(session, seconds)
		require.NoError(t, tracker.Begin(r, kvpolicy.Decision{Action: kvpolicy.Place, Target: instance}, at(seconds)))
		return r.Key()
	}
	home := func(session string, seconds float64) string {
		return tracker.Snapshot(track.Request{Session: session}, at(seconds), nil).Request.Affinity
	}
	key := turn("s", "instance-000", 2)
	assert.Equal(t, "instance-000", home("s", 3))
	assert.Equal(t, "instance-000", home("s", 12))
	assert.Empty(t, home("s", 12.25), "its time is up")
	tracker.End(key, at(8))
	assert.Equal(t, "instance-000", home("s", 18), "its time counts from the turn's end")
	turn("s", "instance-001", 19)
	assert.Equal(t, "instance-001", home("s", 19), "bound again where the gates let go")
	turn("t", "instance-001", 20)
	turn("u", "instance-000", 21)
	assert.Empty(t, home("s", 21), "the least recent is forgotten beyond the bound")
	require.NoError(t, tracker.Leave("instance-001", track.Planned, at(22)))
	assert.Empty(t, home("t", 22))
	require.NoError(t, tracker.Join("instance-001", track.InstanceInfo{}, at(23)))
	assert.Empty(t, home("t", 23), "its KV has not come back with it")
	assert.Equal(t, "instance-000", home("u", 23))
	given := track.Request{Session: "u"}
	given.Affinity = "elsewhere"
	assert.Equal(t, "elsewhere", tracker.Snapshot(given, at(23), nil).Request.Affinity, "the caller's stands")
	assert.Empty(t, home("", 23))

	config.Sessions = 0
	tracker = fleet(t, config, 1)
	turn("s", "instance-000", 2)
	assert.Empty(t, home("s", 3))
}

func TestGatesLetGoAndTheSessionMoves(t *testing.T) {
	tracker := fleet(t, track.DefaultConfig(), 2)
	decide := func(id, session string, context int64) kvpolicy.Decision {
		r := track.Request{Session: session}
		r.ID, r.ContextTokens = id, context
		d, err := kvpolicy.Decide(tracker.Snapshot(r, at(2), nil))
		require.NoError(t, err)
		require.NoError(t, tracker.Begin(r, d, at(2)))
		return d
	}
	first := decide("1", "s", 1000)
	assert.Equal(t, kvpolicy.NoAffinity, first.Reason)
	for n := range 3 { // pile load on its home
		r := track.Request{}
		r.ID, r.ContextTokens = fmt.Sprint("load", n), 50_000
		require.NoError(t, tracker.Begin(r, kvpolicy.Decision{Action: kvpolicy.Place, Target: first.Target}, at(2)))
	}
	second := decide("2", "s", 1000)
	assert.NotEqual(t, first.Target, second.Target)
	assert.Contains(t, []kvpolicy.Reason{kvpolicy.AffinityOverloaded, kvpolicy.AffinityTooCostly}, second.Reason)
	third := decide("3", "s", 1000)
	assert.Equal(t, second.Target, third.Target)
	assert.Equal(t, kvpolicy.AffinityKept, third.Reason)
}

func TestEndIsRememberedWithinItsBound(t *testing.T) {
	config := track.DefaultConfig()
	config.EndedRequests = 2
	tracker := fleet(t, config, 1)
	r := track.Request{}
	begin := func(id string) error {
		r.ID = id
		return tracker.Begin(r, kvpolicy.Decision{Action: kvpolicy.Place, Target: "instance-000"}, at(2))
	}
	assert.False(t, tracker.End(track.Key{ID: "a"}, at(2)))
	assert.ErrorIs(t, begin("a"), track.ErrEnded)
	tracker.End(track.Key{ID: "b"}, at(2))
	tracker.End(track.Key{ID: "c"}, at(2))
	assert.NoError(t, begin("a"), "forgotten")
	assert.ErrorIs(t, begin("b"), track.ErrEnded)
	r.Attempt = 1
	assert.NoError(t, begin("b"), "another attempt is another matter")
}

func TestCurves(t *testing.T) {
	tracker, err := track.New(track.DefaultConfig())
	require.NoError(t, err)
	seconds := 0.0
	for n := range 6 { // spot nodes live 100 s, each under an id of its own
		id := fmt.Sprint("spot", n)
		require.NoError(t, tracker.Join(id, track.InstanceInfo{Kind: "spot"}, at(seconds)))
		seconds += 100
		require.NoError(t, tracker.Leave(id, track.Lost, at(seconds)))
	}
	for range 6 { // a laptop comes back under its id, half of its sessions end as planned
		require.NoError(t, tracker.Join("laptop", track.InstanceInfo{Kind: "laptop"}, at(seconds)))
		require.NoError(t, tracker.Leave("laptop", track.Lost, at(seconds+10)))
		require.NoError(t, tracker.Join("laptop", track.InstanceInfo{Kind: "laptop"}, at(seconds+20)))
		require.NoError(t, tracker.Leave("laptop", track.Planned, at(seconds+25)))
		seconds += 30
	}
	require.NoError(t, tracker.Join("laptop", track.InstanceInfo{Kind: "laptop", StartedAt: at(seconds - 3)}, at(seconds)))
	require.NoError(t, tracker.Join("spot9", track.InstanceInfo{Kind: "spot"}, at(seconds)))
	require.NoError(t, tracker.Join("other", track.InstanceInfo{}, at(seconds)))
	curves := func() map[string]kvpolicy.Instance {
		m := map[string]kvpolicy.Instance{}
		for _, i := range tracker.Snapshot(track.Request{}, at(seconds+1), nil).Instances {
			m[i.ID] = i
		}
		return m
	}
	assert.Nil(t, curves()["spot9"].Curve)
	tracker.FitCurves(at(seconds + 1))
	require.NoError(t, tracker.Join("spot10", track.InstanceInfo{Kind: "spot"}, at(seconds+1)))
	got := curves()
	for id, name := range map[string]string{"spot9": "kind spot", "spot10": "kind spot", "laptop": "node laptop", "other": "fleet"} {
		assert.Equal(t, name, got[id].CurveName)
		require.NotNil(t, got[id].Curve)
	}
	assert.Equal(t, 1.0, got["spot9"].Curve.Survival(99))
	assert.Equal(t, 0.5, got["spot9"].Curve.Survival(100), "all ended there")
	sessions, completed := got["laptop"].Curve.(*kvpolicy.KaplanMeier).Sessions()
	assert.Equal(t, []int{13, 6}, []int{sessions, completed}, "six lost, six planned, one running")
	assert.Equal(t, 4.0, got["laptop"].UptimeSeconds)

	require.NoError(t, tracker.SetCurve("other", nil, ""))
	assert.Nil(t, curves()["other"].Curve)
	foreign := distuv.Exponential{Rate: 1}
	require.NoError(t, tracker.SetCurve("laptop", foreign, "mine"))
	require.NoError(t, tracker.Join("laptop", track.InstanceInfo{Kind: "laptop"}, at(seconds+1)))
	assert.Equal(t, foreign, curves()["laptop"].Curve, "told again of an instance, it keeps its curve")
	policy := kvpolicy.HazardAware()
	policy.Cost.DecodeRate = 10
	r := track.Request{}
	r.ID, r.ContextTokens, r.RemainingTokens = "r", 100, 10_000
	d, err := policy.Decide(tracker.Snapshot(r, at(seconds+1), nil))
	require.NoError(t, err)
	assert.Equal(t, "other", d.Target, "the only one that never fails")
}

func TestHistoryIsBounded(t *testing.T) {
	config := track.DefaultConfig()
	config.HistoryNodes, config.HistorySessions = 2, 3
	tracker, err := track.New(config)
	require.NoError(t, err)
	for n := range 10 {
		id := fmt.Sprint("n", n%4)
		require.NoError(t, tracker.Join(id, track.InstanceInfo{}, at(float64(n))))
		require.NoError(t, tracker.Leave(id, track.Lost, at(float64(n)+0.5)))
	}
	for range 4 {
		require.NoError(t, tracker.Join("n1", track.InstanceInfo{}, at(20)))
		require.NoError(t, tracker.Leave("n1", track.Lost, at(21)))
	}
	h := tracker.Histories(at(30))
	sessions, _ := mustCurve(h.Curve("unheard of")).Sessions()
	config.HistoryNodes = 0
	tracker, err = track.New(config)
	require.NoError(t, err)
	require.NoError(t, tracker.Join("n", track.InstanceInfo{}, at(1)))
	require.NoError(t, tracker.Leave("n", track.Lost, at(2)))
	none, _ := mustCurve(tracker.Histories(at(3)).Curve("n")).Sessions()
	assert.Zero(t, none)
	assert.Equal(t, 4, sessions, "three of n1, and the last of n0, which was forgotten before it")
}

// TestGoroutines has goroutines call everything at once, under the race
// detector; each snapshot is a valid one, and in the end nothing is left.
func TestGoroutines(t *testing.T) {
	config := track.DefaultConfig()
	config.PrefixBlocks, config.Sessions, config.EndedRequests = 50, 10, 1_000_000
	config.Grace = time.Millisecond
	tracker := fleet(t, config, 70)
	var group sync.WaitGroup
	for g := range 8 {
		group.Add(1)
		go func() {
			defer group.Done()
			random := rand.New(rand.NewPCG(uint64(g), 1))
			policy := kvpolicy.UnifiedV2Relaxed()
			policy.Separation.MinNewTokens, policy.Separation.MinSourceCacheTokens = 0, 0
			policy.Separation.MinExtraCacheTokens, policy.Separation.MinActiveDecodes = 0, 0
			var buffer track.Buffer
			for n := range 400 {
				now := at(2 + random.Float64())
				r := track.Request{Session: fmt.Sprint(random.IntN(20)), Attempt: random.IntN(2)}
				r.ID = fmt.Sprint(random.IntN(40)) // of the others too
				if random.IntN(2) == 0 {
					r.ID = fmt.Sprint(g, "-", n)
				}
				tokens := conversation(random.IntN(5), 40, random.IntN(200))
				r.Prompt = tracker.TokenPrompt(nil, track.Salt{}, tokens)
				r.ContextTokens, r.RemainingTokens = int64(len(tokens)), 10
				d, err := policy.Decide(tracker.Snapshot(r, now, &buffer))
				if !assert.NoError(t, err) {
					return
				}
				if err := tracker.Begin(r, d, now); err != nil && err != track.ErrEnded { //nolint:errorlint // it is not wrapped
					assert.ErrorIs(t, err, kvpolicy.ErrInvalid)
				}
				id := fmt.Sprintf("instance-%03d", random.IntN(70))
				switch random.IntN(12) {
				case 0:
					assert.NoError(t, tracker.Leave(id, track.Lost, now))
				case 1:
					assert.NoError(t, tracker.Join(id, track.InstanceInfo{Kind: "k"}, now))
				case 2:
					_ = tracker.Observe(id, track.Metrics{Running: number(float64(random.IntN(3))), Waiting: number(0), Counter: number(random.Float64())}, now)
				case 3:
					_ = tracker.BlocksStored(id, track.StoredBlocks{Hashes: []uint64{uint64(n)}, Tokens: tokens[:min(16, len(tokens))/16*16]})
				case 4:
					_ = tracker.BlocksRemoved(id, []uint64{uint64(n - 1)})
				case 5:
					_ = tracker.BlocksCleared(id)
				case 6:
					tracker.FitCurves(now)
				case 7:
					_ = tracker.SetState(id, track.State(1+random.IntN(3)))
				}
				switch random.IntN(4) {
				case 0:
					tracker.Prefilled(r.Key(), now)
				case 1:
					tracker.FirstToken(r.Key(), now)
				case 2:
					tracker.Progress(r.Key(), int64(random.IntN(20)), now)
				}
				tracker.End(r.Key(), now)
			}
		}()
	}
	group.Wait()
	for _, s := range tracker.Stats(nil) {
		assert.Zero(t, s.InFlight)
	}
	for _, i := range tracker.Snapshot(track.Request{}, at(5), nil).Instances {
		assert.Zero(t, i.PendingPrefillTokens)
		assert.Zero(t, i.ActiveDecodes)
	}
}
