package kvpolicy_test

import (
	"encoding/json"
	"testing"

	"github.com/kvpolicy/kvpolicy"
	"github.com/stretchr/testify/require"
)

// Cases on a tie that a fused multiply-add would break another way: the same
// binary source decided them differently on arm64, or with GOAMD64=v3.
func TestNoFusedMultiplyAddDecides(t *testing.T) {
	for _, test := range []struct {
		name, policy, snapshot string
		check                  func(d kvpolicy.Decision)
	}{
		{
			"contention and wait", `{}`,
			`{"instances":[{"id":"a","requests":5,"wait_s":0.05},{"id":"b","requests":4,"wait_s":0.1}]}`,
			func(d kvpolicy.Decision) {
				require.Equal(t, "a", d.Target)
				require.Equal(t, 0.3, d.Score)
				require.Equal(t, d.Score, d.Cost.Total())
			},
		},
		{
			"interference of the source",
			`{"preset":"unified_v2_strict","pdsep":{"min_source_cache_tokens":0,"min_new_tokens":0},"transfer":{"kv_bytes_per_token":0}}`,
			`{"request":{"context_tokens":16000},"instances":[{"id":"a","active_decodes":2,"cached_tokens":6400},{"id":"s","requests":900,"active_decodes":7,"cached_tokens":12400}]}`,
			func(d kvpolicy.Decision) {
				require.Equal(t, kvpolicy.CostBenefitNotEnoughMargin, d.Separation.Reason)
				require.Equal(t, 1.56, d.Separation.CostMigrate)
			},
		},
	} {
		var policy kvpolicy.Policy
		var snapshot kvpolicy.Snapshot
		require.NoError(t, json.Unmarshal([]byte(test.policy), &policy), test.name)
		require.NoError(t, json.Unmarshal([]byte(test.snapshot), &snapshot), test.name)
		d, err := policy.Decide(snapshot)
		require.NoError(t, err, test.name)
		test.check(d)
	}
}
