package track_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"strconv"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/kvpolicy/kvpolicy"
	"github.com/kvpolicy/kvpolicy/track"
)

// fleet returns a tracker with n instances, each scraped once.
func fleet(t require.TestingT, c track.Config, n int) *track.Tracker {
	tracker, err := track.New(c)
	require.NoError(t, err)
	running, waiting, usage := 3.0, 1.0, 0.25
	for i := range n {
		id := fmt.Sprintf("instance-%03d", i)
		require.NoError(t, tracker.Join(id, track.InstanceInfo{}, at(0)))
		m := track.Metrics{Running: &running, Waiting: &waiting, KVUsage: &usage, BlockTokens: 16, Blocks: 26214}
		require.NoError(t, tracker.Observe(id, m, at(1)))
	}
	return tracker
}

// conversation returns the token ids of a session's prompt: a system prompt
// that all share, and then its own.
func conversation(session, shared, tokens int) []uint32 {
	ids := make([]uint32, tokens)
	for i := range ids {
		ids[i] = uint32(i)
		if i >= shared {
			ids[i] += uint32(session+1) << 20
		}
	}
	return ids
}

// place begins and ends a request with that prompt on an instance.
func place[N int | int64](t require.TestingT, tracker *track.Tracker, id, instance string, context N, p track.Prompt) {
	r := track.Request{Prompt: p}
	r.ID, r.ContextTokens = id, int64(context)
	require.NoError(t, tracker.Begin(r, kvpolicy.Decision{Action: kvpolicy.Place, Target: instance}, at(2)))
	tracker.End(r.Key(), at(2))
}

// cached is what the tracker says that each instance caches of a prompt.
func cached[N int | int64](tracker *track.Tracker, context N, p track.Prompt) map[string]int64 {
	r := track.Request{Prompt: p}
	r.ContextTokens = int64(context)
	held := map[string]int64{}
	for _, i := range tracker.Snapshot(r, at(3), nil).Instances {
		held[i.ID] = i.CachedTokens
	}
	return held
}

// modelCache is a least-recently-used set of whole prefixes, youngest last:
// nothing is hashed in it.
type modelCache struct {
	prefixes []string
	engine   []modelBlock // what the engine's names stand for, youngest last
}

type modelBlock struct {
	hash   uint64
	prefix string
}

func (c *modelCache) add(prefix string, bound int) {
	c.remove(prefix)
	c.prefixes = append(c.prefixes, prefix)
	if len(c.prefixes) > bound {
		c.prefixes = c.prefixes[1:]
	}
}

func (c *modelCache) remove(prefix string) {
	c.prefixes = slices.DeleteFunc(c.prefixes, func(p string) bool { return p == prefix })
}

func (c *modelCache) find(hash uint64) (string, bool) {
	for _, b := range c.engine {
		if b.hash == hash {
			return b.prefix, true
		}
	}
	return "", false
}

func (c *modelCache) name(hash uint64, prefix string, bound int) {
	c.unname(hash)
	c.engine = append(c.engine, modelBlock{hash, prefix})
	if len(c.engine) > bound {
		c.engine = c.engine[1:]
	}
}

func (c *modelCache) unname(hash uint64) {
	c.engine = slices.DeleteFunc(c.engine, func(b modelBlock) bool { return b.hash == hash })
}

// TestPrefixesAgainstList compares the prefix index, token prompts and KV events
// in any order, with lists of whole prefixes.
func TestPrefixesAgainstList(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		config := track.DefaultConfig()
		config.BlockTokens = rapid.IntRange(1, 3).Draw(t, "block")
		config.PrefixBlocks = rapid.SampledFrom([]int{1, 4, 9, 100}).Draw(t, "bound")
		size, bound := config.BlockTokens, config.PrefixBlocks
		// More instances than one group holds, of which three are used, one of
		// them in the second group.
		tracker := fleet(t, config, 66)
		ids := []string{"instance-000", "instance-031", "instance-065"}
		caches := map[string]*modelCache{}
		for _, id := range ids {
			caches[id] = &modelCache{}
		}
		instance := rapid.SampledFrom(ids)
		salt := rapid.SampledFrom([]track.Salt{{}, {Model: "m"}, {Model: "m", Adapter: "a"}, {Model: "ma"}})
		ids32 := rapid.SliceOfN(rapid.Uint32Range(0, 1), 0, 8) // few, so that prefixes are shared
		prefixes := func(parent string, tokens []uint32) (all []string) {
			for len(tokens) >= size {
				parent += fmt.Sprint(tokens[:size])
				all = append(all, parent)
				tokens = tokens[size:]
			}
			return all
		}
		number := 0
		withEvents := rapid.Bool().Draw(t, "with events")
		t.Repeat(map[string]func(*rapid.T){
			"begin": func(t *rapid.T) {
				id, s, tokens := instance.Draw(t, "instance"), salt.Draw(t, "salt"), ids32.Draw(t, "tokens")
				number++
				place(t, tracker, fmt.Sprint(number), id, len(tokens), tracker.TokenPrompt(nil, s, tokens))
				all := prefixes(fmt.Sprint(s), tokens)
				for _, p := range slices.Backward(all) {
					caches[id].add(p, bound)
				}
			},
			"stored": func(t *rapid.T) {
				if !withEvents {
					t.Skip()
				}
				id, s, tokens := instance.Draw(t, "instance"), salt.Draw(t, "salt"), ids32.Draw(t, "tokens")
				c := caches[id]
				e := track.StoredBlocks{Salt: s, Tokens: tokens[:len(tokens)/size*size]}
				for range len(tokens) / size {
					e.Hashes = append(e.Hashes, rapid.Uint64Range(0, 9).Draw(t, "hash"))
				}
				parent, known := fmt.Sprint(s), true
				if rapid.Bool().Draw(t, "has parent") {
					hash := rapid.Uint64Range(0, 9).Draw(t, "parent")
					e.Parent = &hash
					if parent, known = c.find(hash); known {
						c.name(hash, parent, bound) // now the youngest
					}
				}
				unlinked := func() int64 {
					return tracker.Stats(nil)[slices.IndexFunc(tracker.Stats(nil), func(s track.Stats) bool { return s.ID == id })].UnlinkedBlocks
				}
				before := unlinked()
				require.NoError(t, tracker.BlocksStored(id, e))
				if !known {
					require.Equal(t, before+int64(len(e.Hashes)), unlinked())
					return
				}
				require.Equal(t, before, unlinked())
				all := prefixes(parent, e.Tokens)
				for at, p := range slices.Backward(all) {
					c.add(p, bound)
					c.name(e.Hashes[at], p, bound)
				}
			},
			"removed": func(t *rapid.T) {
				id, hashes := instance.Draw(t, "instance"), rapid.SliceOfN(rapid.Uint64Range(0, 9), 0, 3).Draw(t, "hashes")
				require.NoError(t, tracker.BlocksRemoved(id, hashes))
				c := caches[id]
				for _, hash := range hashes {
					if p, known := c.find(hash); known {
						c.unname(hash)
						c.remove(p)
					}
				}
			},
			"cleared": func(t *rapid.T) {
				id := instance.Draw(t, "instance")
				require.NoError(t, tracker.BlocksCleared(id))
				*caches[id] = modelCache{}
			},
			"": func(t *rapid.T) {
				s, tokens := salt.Draw(t, "salt"), ids32.Draw(t, "tokens")
				got := cached(tracker, len(tokens), tracker.TokenPrompt(nil, s, tokens))
				for id, held := range got {
					var want int64
					if c := caches[id]; c != nil {
						for _, p := range prefixes(fmt.Sprint(s), tokens) {
							if !slices.Contains(c.prefixes, p) {
								break
							}
							want += int64(size)
						}
					}
					require.Equal(t, want, held, id)
				}
				for _, s := range tracker.Stats(nil) {
					want := 0
					if c := caches[s.ID]; c != nil {
						want = len(c.prefixes)
					}
					require.Equal(t, want, s.PrefixBlocks)
				}
			},
		})
	})
}

func TestQueuedPromptsCountAtOnce(t *testing.T) {
	tracker := fleet(t, track.DefaultConfig(), 2)
	tokens := conversation(0, 0, 1000)
	p := tracker.TokenPrompt(nil, track.Salt{}, tokens)
	r := track.Request{Prompt: p}
	r.ID, r.ContextTokens = "first", 1000
	require.NoError(t, tracker.Begin(r, kvpolicy.Decision{Action: kvpolicy.Place, Target: "instance-000"}, at(2)))
	assert.Equal(t, map[string]int64{"instance-000": 992, "instance-001": 0}, cached(tracker, 1000, p), "62 whole blocks of 16")
	r.ID = "second" // of the same prompt brings only the rest to prefill
	require.NoError(t, tracker.Begin(r, kvpolicy.Decision{Action: kvpolicy.Place, Target: "instance-000"}, at(2)))
	assert.EqualValues(t, 1008, tracker.Snapshot(track.Request{}, at(3), nil).Instances[0].PendingPrefillTokens)
}

func TestRemotePrefillIsCachedOnBoth(t *testing.T) {
	tracker := fleet(t, track.DefaultConfig(), 3)
	p := tracker.TokenPrompt(nil, track.Salt{}, conversation(0, 0, 160))
	place(t, tracker, "before", "instance-002", 160, tracker.TokenPrompt(nil, track.Salt{}, conversation(0, 0, 96)))
	r := track.Request{Prompt: p}
	r.ID, r.ContextTokens = "r", 160
	d := kvpolicy.Decision{Action: kvpolicy.PrefillRemote, Target: "instance-000", PrefillOn: "instance-002"}
	require.NoError(t, tracker.Begin(r, d, at(2)))
	assert.Equal(t, map[string]int64{"instance-000": 160, "instance-001": 0, "instance-002": 160}, cached(tracker, 160, p))
	s := tracker.Snapshot(track.Request{}, at(2), nil)
	assert.EqualValues(t, 0, s.Instances[0].PendingPrefillTokens)
	assert.EqualValues(t, 64, s.Instances[2].PendingPrefillTokens)
	require.True(t, tracker.Prefilled(r.Key(), at(3)))
	s = tracker.Snapshot(track.Request{}, at(3), nil)
	assert.EqualValues(t, 0, s.Instances[2].PendingPrefillTokens)
	assert.EqualValues(t, 4, s.Instances[2].Requests, "those of the scrape")
	assert.EqualValues(t, 5, s.Instances[0].Requests)
}

// The beginning of a prompt counts as the share that it is, also of what it is
// in the ledger.
func TestTheBeginningOfAPrompt(t *testing.T) {
	c := track.DefaultConfig()
	c.TextBlockBytes = 10
	tracker := fleet(t, c, 2)
	text := []byte("0123456789abcdefghijABCDEFGHIJ+-*/")
	place(t, tracker, "1", "instance-000", 100, tracker.TextPrompt(nil, track.Salt{}, text[:20]))
	whole := tracker.TextPrompt(nil, track.Salt{}, text)
	for _, test := range []struct {
		bytes, want int64
	}{{340, 58}, {40, 500}, {34, 588}, {33, 588}, {0, 588}, {-1, 588}, {math.MaxInt64, 0}} { // of 1000 tokens
		assert.Equal(t, test.want, cached(tracker, 1000, whole.BeginningOf(test.bytes))["instance-000"], test.bytes)
	}
	assert.EqualValues(t, 588, cached(tracker, 1000, whole)["instance-000"], "it is another value")
	tokens := tracker.TokenPrompt(nil, track.Salt{}, conversation(1, 0, 100))
	assert.Equal(t, tokens, tokens.BeginningOf(1e6))
	assert.Equal(t, track.Prompt{}, track.Prompt{}.BeginningOf(1e6))

	request := track.Request{Request: kvpolicy.Request{ID: "2", ContextTokens: 1000}, Prompt: whole.BeginningOf(340)}
	require.NoError(t, tracker.Begin(request, kvpolicy.Decision{Action: kvpolicy.Place, Target: "instance-000"}, at(3)))
	pending := tracker.Snapshot(track.Request{Request: kvpolicy.Request{ID: "probe"}}, at(3), nil).Instances[0].PendingPrefillTokens
	assert.EqualValues(t, 942, pending, "the ledger counts what is lacking likewise")
}

func TestTextPrompts(t *testing.T) {
	config := track.DefaultConfig()
	config.TextBlockBytes = 10
	tracker := fleet(t, config, 1)
	text := []byte("The quick brown fox jumps over the lazy dog, and then on.") // 57 bytes
	place(t, tracker, "1", "instance-000", 12, tracker.TextPrompt(nil, track.Salt{}, text[:35]))
	whole := tracker.TextPrompt(nil, track.Salt{}, text)
	assert.EqualValues(t, 30*114/57, cached(tracker, 114, whole)["instance-000"], "30 of 57 bytes, of 114 tokens")
	assert.Zero(t, cached(tracker, 0, whole)["instance-000"])
	assert.Zero(t, cached(tracker, 114, tracker.TextPrompt(nil, track.Salt{Model: "other"}, text))["instance-000"])
	assert.Empty(t, tracker.TextPrompt(nil, track.Salt{}, text[:9]).Blocks)
	assert.Empty(t, tracker.TextPrompt(nil, track.Salt{}, nil).Blocks)
	tracker = fleet(t, track.DefaultConfig(), 1) // where blocks of both kinds have 64 bytes
	tokens := make([]uint32, 32)
	place(t, tracker, "2", "instance-000", 32, tracker.TextPrompt(nil, track.Salt{}, make([]byte, 128)))
	assert.Zero(t, cached(tracker, 32, tracker.TokenPrompt(nil, track.Salt{}, tokens))["instance-000"])
}

// TestTextIsNeverMoreThanThePrompt draws sizes at which a quotient could round up.
func TestTextIsNeverMoreThanThePrompt(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		config := track.DefaultConfig()
		config.TextBlockBytes = rapid.IntRange(1, 64).Draw(t, "block")
		tracker := fleet(t, config, 1)
		text := make([]byte, rapid.IntRange(0, 700).Draw(t, "bytes"))
		context := rapid.OneOf(rapid.Int64Range(0, 1000), rapid.SampledFrom([]int64{1e12})).Draw(t, "context")
		p := tracker.TextPrompt(nil, track.Salt{}, text)
		place(t, tracker, "1", "instance-000", context, p)
		held := cached(tracker, context, p)["instance-000"]
		assert.LessOrEqual(t, held, context)
		if len(text) > 0 && len(text)%config.TextBlockBytes == 0 {
			assert.EqualValues(t, context, held)
		}
	})
}

func TestPrefixesStayWithinTheKVPool(t *testing.T) {
	tracker := fleet(t, track.DefaultConfig(), 1)
	id := "instance-000"
	p := tracker.TokenPrompt(nil, track.Salt{}, conversation(0, 0, 1600))
	place(t, tracker, "1", id, 1600, p)
	assert.EqualValues(t, 1600, cached(tracker, 1600, p)[id])
	zero := 0.0
	require.NoError(t, tracker.Observe(id, track.Metrics{Running: &zero, BlockTokens: 16, Blocks: 40}, at(5)))
	assert.EqualValues(t, 640, cached(tracker, 1600, p)[id], "the end of the prefix fell out")
	assert.Equal(t, 40, tracker.Stats(nil)[0].PrefixBlocks)
	require.NoError(t, tracker.Observe(id, track.Metrics{Running: &zero, BlockTokens: 15, Blocks: 1}, at(6)))
	assert.EqualValues(t, 16, cached(tracker, 1600, p)[id], "one block at least")
}

func TestPrefixesEndWithTheInstance(t *testing.T) {
	tracker := fleet(t, track.DefaultConfig(), 70)
	p := tracker.TokenPrompt(nil, track.Salt{}, conversation(0, 0, 160))
	for i := range 70 {
		place(t, tracker, fmt.Sprint(i), fmt.Sprintf("instance-%03d", i), 160, p)
	}
	require.NoError(t, tracker.Leave("instance-003", track.Planned, at(4)))
	require.NoError(t, tracker.Join("instance-new", track.InstanceInfo{}, at(4)), "takes the place over")
	held := cached(tracker, 160, p)
	assert.Zero(t, held["instance-new"])
	assert.EqualValues(t, 160, held["instance-004"])
	assert.EqualValues(t, 160, held["instance-069"])
	require.NoError(t, tracker.Join("instance-003", track.InstanceInfo{}, at(5)))
	assert.Zero(t, cached(tracker, 160, p)["instance-003"])
}

func TestLargeBlocks(t *testing.T) {
	config := track.DefaultConfig()
	config.BlockTokens, config.TextBlockBytes = 101, 1000
	tracker := fleet(t, config, 1)
	tokens, text := conversation(0, 0, 1000), make([]byte, 5000)
	place(t, tracker, "1", "instance-000", 1000, tracker.TokenPrompt(nil, track.Salt{}, tokens))
	place(t, tracker, "2", "instance-000", 1000, tracker.TextPrompt(nil, track.Salt{}, text))
	tokens[808]++ // the last but one block's first token
	text[4999]++
	assert.EqualValues(t, 808, cached(tracker, 1000, tracker.TokenPrompt(nil, track.Salt{}, tokens))["instance-000"])
	assert.EqualValues(t, 800, cached(tracker, 1000, tracker.TextPrompt(nil, track.Salt{}, text))["instance-000"])
}

func TestPrefixIndexOff(t *testing.T) {
	config := track.DefaultConfig()
	config.PrefixBlocks = 0
	tracker := fleet(t, config, 1)
	p := tracker.TokenPrompt(nil, track.Salt{}, conversation(0, 0, 160))
	place(t, tracker, "1", "instance-000", 160, p)
	assert.Zero(t, cached(tracker, 160, p)["instance-000"])
	hash := uint64(1)
	require.NoError(t, tracker.BlocksStored("instance-000", track.StoredBlocks{Hashes: []uint64{hash}, Tokens: make([]uint32, 16)}))
	require.NoError(t, tracker.BlocksRemoved("instance-000", []uint64{hash}))
	require.NoError(t, tracker.BlocksCleared("instance-000"))
}

func TestEventFaults(t *testing.T) {
	tracker := fleet(t, track.DefaultConfig(), 1)
	var field *kvpolicy.FieldError
	require.ErrorAs(t, tracker.BlocksStored("instance-000", track.StoredBlocks{Hashes: []uint64{1}, Tokens: make([]uint32, 32)}), &field)
	assert.Equal(t, "tokens", field.Path)
	for _, err := range []error{
		tracker.BlocksStored("x", track.StoredBlocks{}), tracker.BlocksRemoved("x", nil), tracker.BlocksCleared("x"),
	} {
		require.ErrorAs(t, err, &field)
		assert.Equal(t, "instance", field.Path)
	}
}

// TestBytesPerPrefixBlock fills the index of one instance and compares what it
// takes with what BytesPerPrefixBlock says.
func TestBytesPerPrefixBlock(t *testing.T) {
	if strconv.IntSize < 64 {
		t.Skip("it is stated for 64-bit machines")
	}
	config := track.DefaultConfig()
	config.PrefixBlocks = 300_000
	random := rand.New(rand.NewPCG(1, 2))
	tokens := make([]uint32, 16*250_000)
	for i := range tokens {
		tokens[i] = random.Uint32()
	}
	tracker, err := track.New(config)
	require.NoError(t, err)
	require.NoError(t, tracker.Join("i", track.InstanceInfo{}, at(0)))
	p := tracker.TokenPrompt(nil, track.Salt{}, tokens)
	before := heap()
	place(t, tracker, "1", "i", len(tokens), p)
	bytes := float64(heap()-before) / float64(len(p.Blocks))
	t.Logf("%.0f bytes a block", bytes)
	assert.Equal(t, 250_000, tracker.Stats(nil)[0].PrefixBlocks)
	assert.LessOrEqual(t, bytes, float64(track.BytesPerPrefixBlock))
	assert.Greater(t, bytes, track.BytesPerPrefixBlock/2.0)
	runtime.KeepAlive(tracker)
}

func heap() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}
