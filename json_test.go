package kvpolicy_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/kvpolicy/kvpolicy"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestPolicyJSONRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := drawPolicy(t, shape{extreme: true})
		var back kvpolicy.Policy
		roundTrip(t, p, &back)
		// Of a part that is off the JSON form keeps nothing.
		if !p.Affinity.Enabled {
			p.Affinity, back.Affinity = kvpolicy.AffinityGates{}, kvpolicy.AffinityGates{Enabled: back.Affinity.Enabled}
		}
		if !p.Separation.Enabled {
			p.Separation, back.Separation = kvpolicy.SeparationGates{}, kvpolicy.SeparationGates{Enabled: back.Separation.Enabled}
		}
		if !p.Hazard.Enabled {
			p.Hazard, back.Hazard = kvpolicy.HazardModel{}, kvpolicy.HazardModel{Enabled: back.Hazard.Enabled}
		}
		if !p.Migration.Enabled {
			p.Migration, back.Migration = kvpolicy.MigrationRule{}, kvpolicy.MigrationRule{Enabled: back.Migration.Enabled}
		}
		require.Equal(t, p, back)
	})
}

func TestSnapshotJSONRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := drawSituation(t, shape{extreme: true, written: true})
		var back kvpolicy.Snapshot
		roundTrip(t, s.snapshot, &back)
		require.Equal(t, s.snapshot.Request, back.Request)
		require.Len(t, back.Instances, len(s.snapshot.Instances))
		for k, want := range s.snapshot.Instances {
			got := back.Instances[k]
			require.Equal(t, want.Curve == nil, got.Curve == nil)
			if want.Curve != nil {
				for _, age := range []float64{0, 1, 100, 5000} {
					require.Equal(t, want.Curve.Survival(age), got.Curve.Survival(age))
				}
			}
			got.Curve, want.Curve = nil, nil
			require.Equal(t, want, got)
		}
		require.Equal(t, decide(t, s.policy, s.snapshot), decide(t, s.policy, back))
	})
}

func TestDecisionJSONRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := drawSituation(t, shape{extreme: true})
		d := decide(t, s.policy, s.snapshot)
		var back kvpolicy.Decision
		roundTrip(t, d, &back)
		require.Equal(t, d, back)
	})
}

// TestDecisionJSONSaysWhatSPECSays checks which members a decision has.
func TestDecisionJSONSaysWhatSPECSays(t *testing.T) {
	always := []string{"action", "reason"}
	placed := append([]string{"target", "overcommitted", "degraded", "cost", "score"}, always...)
	want := map[kvpolicy.Action][]string{
		kvpolicy.Place:         placed,
		kvpolicy.PrefillRemote: append([]string{"prefill_on", "pdsep"}, placed...),
		kvpolicy.Stay:          append([]string{"target"}, always...),
		kvpolicy.Migrate:       append([]string{"target", "method", "planned_s", "risk_gain_s", "delta_t_s", "loss_stay_s", "loss_move_s"}, always...),
		kvpolicy.Recover:       append([]string{"method"}, placed...),
		kvpolicy.Reject:        always,
	}
	rapid.Check(t, func(t *rapid.T) {
		s := drawSituation(t, shape{})
		d := decide(t, s.policy, s.snapshot)
		members := treeOf(t, d)
		for _, key := range want[d.Action] {
			require.Contains(t, members, key)
		}
		if cost, ok := members["cost"].(map[string]any); ok {
			for _, term := range []string{"contention", "queue", "prefill", "interference", "decode", "loss", "total"} {
				require.Contains(t, cost, term)
			}
		}
		if candidate, ok := members["candidate"].(map[string]any); ok {
			require.Equal(t, kvpolicy.Stay, d.Action)
			require.Len(t, candidate, 7)
		}
	})
}

func TestZeroDecisionIsNoJSON(t *testing.T) {
	_, err := json.Marshal(kvpolicy.Decision{})
	require.Error(t, err)
}

// TestJSONFaultsAreNamed reads bad documents; each must be refused at its path,
// and leave what was there before.
func TestJSONFaultsAreNamed(t *testing.T) {
	check := func(t *testing.T, text, path string, read func([]byte) error) {
		err := read([]byte(text))
		require.ErrorIs(t, err, kvpolicy.ErrInvalid, "%.80s", text)
		var field *kvpolicy.FieldError
		require.ErrorAs(t, err, &field, "%.80s", text)
		require.Equal(t, path, field.Path, "%.80s", text)
	}
	deep := strings.Repeat("[", 100000) + strings.Repeat("]", 100000)

	t.Run("policy", func(t *testing.T) {
		for _, c := range []struct{ text, path string }{
			{`{"preset":"unifed"}`, "preset"},
			{`{"preset":null}`, "preset"},
			{`{"preset":1}`, "preset"},
			{`{"Preset":"unified"}`, "Preset"},
			{`{"SCORE":"cost"}`, "SCORE"},
			{`{"score":"Cost"}`, "score"},
			{`{"score":""}`, "score"},
			{`{"score":1}`, "score"},
			{`{"score":null}`, "score"},
			{`{"seed":-1}`, "seed"},
			{`{"seed":1.5}`, "seed"},
			{`{"seed":18446744073709551616}`, "seed"},
			{`{"seed":"1"}`, "seed"},
			{`{"max_metrics_age_s":-1}`, "max_metrics_age_s"},
			{`{"max_metrics_age_s":null}`, "max_metrics_age_s"},
			{`{"max_metrics_age_s":1e400}`, "max_metrics_age_s"},
			{`{"max_metrics_age_s":"1"}`, "max_metrics_age_s"},
			{`{"max_metrics_age_s":true}`, "max_metrics_age_s"},
			{`{"cost":null}`, "cost"},
			{`{"cost":[]}`, "cost"},
			{`{"cost":7}`, "cost"},
			{`{"cost":{"prefil_rate":1}}`, "cost.prefil_rate"},
			{`{"cost":{"Prefill_Rate":1}}`, "cost.Prefill_Rate"},
			{`{"cost":{"prefill_rate":null}}`, "cost.prefill_rate"},
			{`{"cost":{"prefill_rate":-1}}`, "cost.prefill_rate"},
			{`{"cost":{"prefill_rate":1,"prefill_rate":2}}`, "cost.prefill_rate"},
			{`{"cost":{"count_decode":1}}`, "cost.count_decode"},
			{`{"cost":{"count_decode":null}}`, "cost.count_decode"},
			{`{"cost":{},"cost":{}}`, "cost"},
			{`{"transfer":null}`, "transfer"},
			{`{"transfer":{"bandwidth":1e309}}`, "transfer.bandwidth"},
			{`{"transfer":{"kv_bytes_per_token":1e13}}`, "transfer.kv_bytes_per_token"},
			{`{"affinity":{"overload_factor":0.5}}`, "affinity.overload_factor"},
			{`{"affinity":{"overload_factor":null}}`, "affinity.overload_factor"},
			{`{"affinity":{"overload_factor":1e999}}`, "affinity.overload_factor"},
			{`{"affinity":{"overload_factor":"Inf"}}`, "affinity.overload_factor"},
			{`{"affinity":true}`, "affinity"},
			{`{"affinity":{"f":2}}`, "affinity.f"},
			{`{"pdsep":{"min_new_tokens":1.5}}`, "pdsep.min_new_tokens"},
			{`{"pdsep":{"min_new_tokens":-1}}`, "pdsep.min_new_tokens"},
			{`{"pdsep":{"min_active_decodes":1e10}}`, "pdsep.min_active_decodes"},
			{`{"pdsep":{"interference_rate":0}}`, "pdsep.interference_rate"},
			{`{"hazard":{"cells":16.5}}`, "hazard.cells"},
			{`{"hazard":{"cells":1e300}}`, "hazard.cells"},
			{`{"hazard":{"cells":4294967312}}`, "hazard.cells"},
			{`{"hazard":{"stall_penalty_s":-0.1}}`, "hazard.stall_penalty_s"},
			{`{"preset":"hazard_aware","hazard":null}`, "migration"},
			{`{"preset":"hazard_aware","migration":{"overlap_rounds":65}}`, "migration.overlap_rounds"},
			{`{"preset":"hazard_aware","migration":{"max_hops":0.5}}`, "migration.max_hops"},
			{`{"migration":{}}`, "migration"},
			{`null`, "input"},
			{`[]`, "input"},
			{`7`, "input"},
			{`"unified"`, "input"},
			{`{"cost":` + deep + `}`, "input"}, // encoding/json gives up at a depth of 10,000
		} {
			check(t, c.text, c.path, func(data []byte) error {
				p := kvpolicy.Sticky()
				err := p.UnmarshalJSON(data)
				require.Equal(t, kvpolicy.Sticky(), p, "unchanged by %.80s", data)
				return err
			})
		}
	})

	t.Run("snapshot", func(t *testing.T) {
		before := equalFleet(3)
		for _, c := range []struct{ text, path string }{
			{`{"Request":{}}`, "Request"},
			{`{"request":null}`, "request"},
			{`{"request":[]}`, "request"},
			{`{"request":{"ID":"r"}}`, "request.ID"},
			{`{"request":{"id":7}}`, "request.id"},
			{`{"request":{"id":null}}`, "request.id"},
			{`{"request":{"context_tokens":1.5}}`, "request.context_tokens"},
			{`{"request":{"context_tokens":1e400}}`, "request.context_tokens"},
			{`{"request":{"context_tokens":1e300}}`, "request.context_tokens"},
			{`{"request":{"context_tokens":"1"}}`, "request.context_tokens"},
			{`{"request":{"context_tokens":1,"context_tokens":1}}`, "request.context_tokens"},
			{`{"request":{"context":1}}`, "request.context"},
			{`{"instances":null}`, "instances"},
			{`{"instances":{}}`, "instances"},
			{`{"instances":"a"}`, "instances"},
			{`{"instances":[null]}`, "instances[0]"},
			{`{"instances":[{"id":"a"},7]}`, "instances[1]"},
			{`{"instances":[{"id":"a"},{"id":"b","num_request":1}]}`, "instances[1].num_request"},
			{`{"instances":[{"id":"a","Requests":1}]}`, "instances[0].Requests"},
			{`{"instances":[{"id":"a","requests":null}]}`, "instances[0].requests"},
			{`{"instances":[{"id":"a","requests":0.1}]}`, "instances[0].requests"},
			{`{"instances":[{"id":"a","requests":true}]}`, "instances[0].requests"},
			{`{"instances":[{"id":"a","wait_s":1e999}]}`, "instances[0].wait_s"},
			{`{"instances":[{"id":"a","wait_s":"NaN"}]}`, "instances[0].wait_s"},
			{`{"instances":[{"id":"a","unavailable":1}]}`, "instances[0].unavailable"},
			{`{"instances":[{"id":"a","unavailable":null}]}`, "instances[0].unavailable"},
			{`{"instances":[{"id":"a","id":"b"}]}`, "instances[0].id"},
			{`{"instances":[{"id":"a","curve":"spot"}]}`, "instances[0].curve"},
			{`{"instances":[{"id":"a","curve":null}]}`, "instances[0].curve"},
			{`{"instances":[],"instances":[]}`, "instances"},
			{`{"curves":null}`, "curves"},
			{`{"curves":[]}`, "curves"},
			{`{"extra":1}`, "extra"},
			{`null`, "input"},
			{`true`, "input"},
			{`{"instances":` + deep + `}`, "input"},
		} {
			check(t, c.text, c.path, func(data []byte) error {
				s := before
				err := s.UnmarshalJSON(data)
				require.Equal(t, before, s, "unchanged by %.80s", data)
				return err
			})
		}
	})

	t.Run("broken", func(t *testing.T) {
		for _, text := range []string{"", " ", "{", "}", `{"a"`, `{"a":}`, `{} {}`, `{}x`, `{"cost":{}`, "{\"a\":\"\x01\"}", `{,}`, `{"request":{}}{`} {
			var p kvpolicy.Policy
			require.ErrorIs(t, p.UnmarshalJSON([]byte(text)), kvpolicy.ErrInvalid, text)
			var s kvpolicy.Snapshot
			require.ErrorIs(t, s.UnmarshalJSON([]byte(text)), kvpolicy.ErrInvalid, text)
		}
	})
}

// TestPresentIsMeant checks what absent, zero and null stand for.
func TestPresentIsMeant(t *testing.T) {
	read := func(text string) (p kvpolicy.Policy) {
		require.NoError(t, json.Unmarshal([]byte(text), &p), text)
		return p
	}
	require.Equal(t, kvpolicy.Unified(), read(`{}`))
	for _, name := range kvpolicy.PresetNames() {
		want, err := kvpolicy.Preset(name)
		require.NoError(t, err)
		require.Equal(t, want, read(`{"preset":"`+name+`"}`))
	}
	require.Zero(t, read(`{"cost":{"decode_iteration_s":0}}`).Cost.DecodeIterationSeconds)
	require.Equal(t, 7000.0, read(`{"cost":{"decode_iteration_s":0}}`).Cost.PrefillRate)
	require.EqualValues(t, 1000, read(`{"pdsep":{"min_new_tokens":1e3}}`).Separation.MinNewTokens)

	relaxed := kvpolicy.UnifiedV2Relaxed().Separation
	require.Equal(t, relaxed, read(`{"pdsep":{}}`).Separation)
	require.Equal(t, relaxed, read(`{"preset":"unified_v2_relaxed","pdsep":{}}`).Separation)
	require.Equal(t, kvpolicy.UnifiedV2Strict().Separation, read(`{"preset":"unified_v2_strict","pdsep":{}}`).Separation)
	require.False(t, read(`{"preset":"unified_v2_strict","pdsep":null}`).Separation.Enabled)
	require.True(t, read(`{"preset":"lmetric","affinity":{}}`).Affinity.Enabled)
	require.Equal(t, 2.0, read(`{"preset":"lmetric","affinity":{}}`).Affinity.OverloadFactor)
	require.False(t, read(`{"affinity":null}`).Affinity.Enabled)
	require.Equal(t, kvpolicy.HazardAware().Hazard, read(`{"hazard":{}}`).Hazard)
	require.False(t, read(`{"preset":"hazard_aware","migration":null}`).Migration.Enabled)
	require.True(t, read(`{"preset":"hazard_aware","migration":null}`).Hazard.Enabled)
	require.Equal(t, kvpolicy.Sticky(), read(`{"preset":"sticky","affinity":{}}`))
	require.Equal(t, uint64(1<<64-1), read(`{"seed":18446744073709551615}`).Seed)
}
