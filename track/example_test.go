package track_test

import (
	"fmt"
	"time"

	"github.com/kvpolicy/kvpolicy"
	"github.com/kvpolicy/kvpolicy/track"
)

// Two turns of a conversation: the second finds its prefix where the first
// went.
func Example() {
	tracker, err := track.New(track.DefaultConfig())
	if err != nil {
		panic(err)
	}
	now := time.Date(2026, 8, 1, 12, 0, 0, 0, time.UTC)
	for _, id := range []string{"10.0.0.1:8000", "10.0.0.2:8000"} {
		if err := tracker.Join(id, track.InstanceInfo{}, now); err != nil {
			panic(err)
		}
	}
	policy := kvpolicy.Unified()
	var buffer track.Buffer // one for each goroutine that decides

	serve := func(id string, tokens []uint32) {
		request := track.Request{
			Session: "conversation 7",
			Prompt:  tracker.TokenPrompt(nil, track.Salt{Model: "qwen3-coder"}, tokens),
		}
		request.ID, request.ContextTokens, request.RemainingTokens = id, int64(len(tokens)), 200

		snapshot := tracker.Snapshot(request, now, &buffer)
		decision, err := policy.Decide(snapshot)
		if err != nil || decision.Action == kvpolicy.Reject {
			fmt.Println("refused:", decision.Reason, err)
			return
		}
		if err := tracker.Begin(request, decision, now); err != nil {
			fmt.Println("not sent:", err)
			return
		}
		defer func() { tracker.End(request.Key(), now) }()

		// Here the request is sent to decision.Target, and its answer is passed on.
		now = now.Add(300 * time.Millisecond)
		tracker.FirstToken(request.Key(), now)
		now = now.Add(2 * time.Second)
		tracker.Progress(request.Key(), 200, now)

		fmt.Println(decision.Reason, decision.Cost.Prefill > 1)
	}
	prompt := make([]uint32, 8000)
	serve("turn 1", prompt)
	serve("turn 2", append(prompt, make([]uint32, 800)...))
	// Output:
	// no_affinity true
	// affinity_kept false
}

// What a server says is held against the ledger: requests of other routers are
// added, those that the server no longer has are dropped.
func ExampleTracker_Observe() {
	tracker, err := track.New(track.DefaultConfig())
	if err != nil {
		panic(err)
	}
	start := time.Date(2026, 8, 1, 12, 0, 0, 0, time.UTC)
	if err := tracker.Join("a", track.InstanceInfo{}, start); err != nil {
		panic(err)
	}
	request := track.Request{}
	request.ID, request.ContextTokens = "r", 1000
	if err := tracker.Begin(request, kvpolicy.Decision{Action: kvpolicy.Place, Target: "a"}, start); err != nil {
		panic(err)
	}

	observe := func(after time.Duration, running, waiting, usage float64) {
		// From vllm:num_requests_running, vllm:num_requests_waiting,
		// vllm:kv_cache_usage_perc and the labels of vllm:cache_config_info.
		metrics := track.Metrics{Running: &running, Waiting: &waiting, KVUsage: &usage, BlockTokens: 16, Blocks: 1000}
		if err := tracker.Observe("a", metrics, start.Add(after)); err != nil {
			fmt.Println(err)
			return
		}
		i := tracker.Snapshot(track.Request{}, start.Add(after), nil).Instances[0]
		fmt.Println(i.Requests, "requests,", i.KVUsedTokens, "of", i.KVCapacityTokens, "tokens,",
			tracker.Stats(nil)[0].Phantoms, "phantoms")
	}
	observe(time.Second, 3, 0, 0.25)
	observe(time.Minute, 0, 0, 0)
	observe(2*time.Minute, 1, 0, 12.5)
	// Output:
	// 3 requests, 4000 of 16000 tokens, 0 phantoms
	// 0 requests, 0 of 16000 tokens, 1 phantoms
	// kvpolicy: metrics.kv_usage is 12.5, must be a fraction of 0 to 1, not a percentage
}

// An engine's KV events tell what it really caches.
func ExampleTracker_BlocksStored() {
	tracker, err := track.New(track.DefaultConfig())
	if err != nil {
		panic(err)
	}
	now := time.Date(2026, 8, 1, 12, 0, 0, 0, time.UTC)
	if err := tracker.Join("a", track.InstanceInfo{}, now); err != nil {
		panic(err)
	}
	salt, tokens := track.Salt{Model: "qwen3-coder"}, make([]uint32, 48)
	request := track.Request{Prompt: tracker.TokenPrompt(nil, salt, tokens)}
	request.ContextTokens = int64(len(tokens))
	show := func() { fmt.Println(tracker.Snapshot(request, now, nil).Instances[0].CachedTokens, "tokens cached") }

	first := uint64(0xa1)
	events := []track.StoredBlocks{
		{Salt: salt, Hashes: []uint64{first}, Tokens: tokens[:16]},
		{Salt: salt, Parent: &first, Hashes: []uint64{0xb2, 0xc3}, Tokens: tokens[16:]},
	}
	for _, event := range events {
		if err := tracker.BlocksStored("a", event); err != nil {
			panic(err)
		}
		show()
	}
	if err := tracker.BlocksRemoved("a", []uint64{0xb2}); err != nil {
		panic(err)
	}
	show()
	// Output:
	// 16 tokens cached
	// 48 tokens cached
	// 16 tokens cached
}
