package kvpolicy_test

import (
	"encoding/json"
	"errors"
	"fmt"

	"github.com/kvpolicy/kvpolicy"
)

// Two instances: b is busier, but holds most of the prompt's KV.
func exampleSnapshot() kvpolicy.Snapshot {
	return kvpolicy.Snapshot{
		Request: kvpolicy.Request{ID: "chat-17", ContextTokens: 50000},
		Instances: []kvpolicy.Instance{
			{ID: "a", Requests: 1},
			{ID: "b", Requests: 6, OngoingTokens: 90000, CachedTokens: 49000},
		},
	}
}

func ExampleDecide() {
	d, err := kvpolicy.Decide(exampleSnapshot())
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(d.Action, d.Target, d.Reason)
	fmt.Printf("contention %.2f s, prefill %.2f s, ahead of %s by %.2f s\n",
		d.Cost.Contention, d.Cost.Prefill, d.RunnerUp, d.Margin)
	// Output:
	// place b no_affinity
	// contention 0.30 s, prefill 0.14 s, ahead of a by 6.75 s
}

// A preset is a value: copy it and assign the fields to change.
func ExamplePolicy_Decide() {
	policy := kvpolicy.Unified()
	policy.Cost.DecodeIterationSeconds = 2 // a slow accelerator: company is dear
	d, err := policy.Decide(exampleSnapshot())
	fmt.Println(d.Action, d.Target, err)

	policy.Cost.DecodeIterationSeconds = -1
	_, err = policy.Decide(exampleSnapshot())
	var field *kvpolicy.FieldError
	fmt.Println(errors.As(err, &field), field.Path)
	// Output:
	// place a <nil>
	// true cost.decode_iteration_s
}

func ExamplePolicy_Explain() {
	s := exampleSnapshot()
	s.Instances = append(s.Instances, kvpolicy.Instance{ID: "c", KVCapacityTokens: 60000, KVUsedTokens: 20000})
	candidates, err := kvpolicy.Unified().Explain(nil, s)
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, c := range candidates {
		fmt.Printf("%s: %s, %.2f s, %s\n", c.Instance, c.Tier, c.Cost.Total(), c.Reason)
	}
	// Output:
	// a: fits_now, 7.19 s, higher_score
	// b: fits_now, 0.44 s, taken
	// c: fits_empty, 7.14 s, no_room_now
}

// Decisions on one scrape see each other through Apply.
func ExampleSnapshot_Apply() {
	s := kvpolicy.Snapshot{Instances: []kvpolicy.Instance{{ID: "a"}, {ID: "b"}, {ID: "c"}}}
	taken := map[string]int{}
	for k := range 300 {
		s.Request = kvpolicy.Request{ID: fmt.Sprint(k), ContextTokens: 1000}
		d, err := kvpolicy.LeastLoaded().Decide(s)
		if err != nil {
			fmt.Println(err)
			return
		}
		taken[d.Target]++
		if s, err = s.Apply(d); err != nil {
			fmt.Println(err)
			return
		}
	}
	fmt.Println(taken)
	// Output:
	// map[a:100 b:100 c:100]
}

func ExampleAffinityGates_Judge() {
	gates := kvpolicy.AffinityGates{Enabled: true, OverloadFactor: 2}
	fmt.Println(gates.Judge(80000, 40000, 1.5, 1.0)) // just twice the mean
	fmt.Println(gates.Judge(80001, 40000, 1.5, 1.0))
	fmt.Println(gates.Judge(10000, 40000, 2.1, 1.0)) // more than twice the best cost
	// Output:
	// affinity_kept
	// affinity_overloaded
	// affinity_too_costly
}

func ExamplePolicy_UnmarshalJSON() {
	var policy kvpolicy.Policy
	err := json.Unmarshal([]byte(`{"preset": "unified", "affinity": {"overload_factor": 1.5}, "pdsep": {}}`), &policy)
	fmt.Println(policy.Affinity.OverloadFactor, policy.Separation.MinNewTokens, err)

	err = json.Unmarshal([]byte(`{"preset": "unified", "affinty": null}`), &policy)
	fmt.Println(err)
	// Output:
	// 1.5 8000 <nil>
	// kvpolicy: affinty must not be there: no such key is known
}

func ExampleSnapshot_UnmarshalJSON() {
	var s kvpolicy.Snapshot
	err := json.Unmarshal([]byte(`{
		"request": {"id": "chat-17", "context_tokens": 50000, "affinity": "b"},
		"instances": [
			{"id": "a", "requests": 1},
			{"id": "b", "requests": 2, "cached_tokens": 49000}
		]
	}`), &s)
	if err != nil {
		fmt.Println(err)
		return
	}
	d, err := kvpolicy.Decide(s)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(d.Target, d.Reason)
	// Output:
	// b affinity_kept
}
