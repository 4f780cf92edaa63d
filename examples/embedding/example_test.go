package embedding_test

import (
	"fmt"

	"github.com/kvpolicy/kvpolicy"
)

// Many requests are decided on one scrape: each sees those before it. What an
// instance caches is of one request, and so is filled in for each.
func Example_burst() {
	policy := kvpolicy.Unified()
	snapshot := kvpolicy.Snapshot{Instances: make([]kvpolicy.Instance, 8)}
	for at := range snapshot.Instances {
		snapshot.Instances[at].ID = fmt.Sprint("replica-", at)
	}
	cachedTokens := func(request, instance string) int64 { return 0 } // the router's prefix index

	taken := map[string]int{}
	for at := range 800 {
		snapshot.Request = kvpolicy.Request{ID: fmt.Sprint("request-", at), ContextTokens: 1000}
		for at := range snapshot.Instances {
			i := &snapshot.Instances[at]
			i.CachedTokens = cachedTokens(snapshot.Request.ID, i.ID)
		}
		decision, err := policy.Decide(snapshot)
		if err != nil {
			fmt.Println(err)
			return
		}
		if snapshot, err = snapshot.Apply(decision); err != nil {
			fmt.Println(err)
			return
		}
		taken[decision.Target]++
	}
	fmt.Println(taken)
	// Output:
	// map[replica-0:100 replica-1:100 replica-2:100 replica-3:100 replica-4:100 replica-5:100 replica-6:100 replica-7:100]
}

// A decision names an instance and the next best; addresses are the router's
// business.
func Example_fallback() {
	addresses := map[string]string{"pod-a": "10.0.0.1:8000", "pod-b": "10.0.0.2:8000", "pod-c": "10.0.0.3:8000"}
	decision, err := kvpolicy.Decide(kvpolicy.Snapshot{
		Request:   kvpolicy.Request{ID: "r", ContextTokens: 1000},
		Instances: []kvpolicy.Instance{{ID: "pod-a", Requests: 4}, {ID: "pod-b"}, {ID: "pod-c", Requests: 2}},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	destinations := addresses[decision.Target]
	if decision.RunnerUp != "" {
		destinations += "," + addresses[decision.RunnerUp]
	}
	fmt.Println(destinations)
	// Output:
	// 10.0.0.2:8000,10.0.0.3:8000
}

// Explain is for the one decision that somebody asks about.
func Example_explain() {
	snapshot := kvpolicy.Snapshot{
		Request: kvpolicy.Request{ID: "r", ContextTokens: 7000},
		Instances: []kvpolicy.Instance{
			{ID: "busy", Requests: 40, CachedTokens: 7000},
			{ID: "idle"},
			{ID: "full", KVCapacityTokens: 10_000, KVUsedTokens: 9000},
			{ID: "gone", Unavailable: true},
		},
	}
	candidates, err := kvpolicy.Unified().Explain(nil, snapshot)
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, c := range candidates {
		fmt.Printf("%s: %s, contention %.2f s, prefill %.2f s\n", c.Instance, c.Reason, c.Cost.Contention, c.Cost.Prefill)
	}
	// Output:
	// busy: higher_score, contention 2.00 s, prefill 0.00 s
	// idle: taken, contention 0.00 s, prefill 1.00 s
	// full: no_room_now, contention 0.00 s, prefill 1.00 s
	// gone: instance_unavailable, contention 0.00 s, prefill 0.00 s
}
