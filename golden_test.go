package kvpolicy_test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kvpolicy/kvpolicy"
	"github.com/stretchr/testify/require"
)

// goldenCase is a line of SPEC section 9's vectors.
type goldenCase struct {
	Name     string
	Policy   json.RawMessage
	Snapshot json.RawMessage
	Want     map[string]any
}

// goldenDir holds the vectors, beside the project; they are not shipped.
const goldenDir = "../shared/golden"

// goldenCases reads the vectors of a file, or skips the test without them.
func goldenCases(t *testing.T, file string) (cases []goldenCase) {
	data, err := os.ReadFile(filepath.Join(goldenDir, file))
	if os.IsNotExist(err) {
		t.Skipf("%s is not there: the golden vectors are handed out apart from the module", goldenDir)
	}
	require.NoError(t, err)
	lines := bufio.NewScanner(bytes.NewReader(data))
	lines.Buffer(nil, len(data)+1)
	for lines.Scan() {
		var c goldenCase
		require.NoError(t, json.Unmarshal(lines.Bytes(), &c))
		cases = append(cases, c)
	}
	require.NotEmpty(t, cases)
	return cases
}

// decode reads policy and snapshot of a case.
func (c goldenCase) decode() (p kvpolicy.Policy, s kvpolicy.Snapshot, err error) {
	p = kvpolicy.Unified()
	if c.Policy != nil {
		if err = json.Unmarshal(c.Policy, &p); err != nil {
			return p, s, err
		}
	}
	err = json.Unmarshal(c.Snapshot, &s)
	return p, s, err
}

// survival reads the curves of a case for the oracle.
func (c goldenCase) survival(t require.TestingT) map[string]survival {
	var s struct {
		Curves map[string]struct {
			Kind               string
			Shape, Scale, Rate float64
			Durations          []float64
			Observed           []any
		}
	}
	require.NoError(t, json.Unmarshal(c.Snapshot, &s))
	all := map[string]survival{}
	for name, curve := range s.Curves {
		switch curve.Kind {
		case "exponential":
			all[name] = exponentialSurvival(curve.Rate)
		case "weibull":
			all[name] = weibullSurvival(curve.Shape, curve.Scale)
		case "km":
			observed := make([]bool, len(curve.Observed))
			for k, o := range curve.Observed {
				observed[k] = o == true || o == 1.0
			}
			all[name] = kaplanMeierSurvival(curve.Durations, observed)
		}
	}
	return all
}

// differences lists where got differs from want, in what want names.
func differences(path string, want, got any) []string {
	switch want := want.(type) {
	case map[string]any:
		object, _ := got.(map[string]any)
		var all []string
		for key, value := range want {
			all = append(all, differences(path+"."+key, value, object[key])...)
		}
		return all
	case float64:
		if number, ok := got.(float64); ok && near(want, number) {
			return nil
		}
	default:
		if want == got {
			return nil
		}
	}
	return []string{fmt.Sprintf("%s is %v, want %v", path, got, want)}
}

func TestGolden(t *testing.T) {
	for _, file := range []string{"routing.jsonl", "field.jsonl", "edges.jsonl", "pdsep.jsonl", "hazard.jsonl", "migration.jsonl"} {
		t.Run(file, func(t *testing.T) {
			for _, c := range goldenCases(t, file) {
				t.Run(c.Name, func(t *testing.T) { checkGolden(t, c) })
			}
		})
	}
}

func checkGolden(t *testing.T, c goldenCase) {
	p, s, err := c.decode()
	require.NoError(t, err)
	d, err := p.Decide(s)
	require.NoError(t, err)
	require.Empty(t, differences("decision", c.Want, treeOf(t, d)))
	o := newOracle(situation{p, s, c.survival(t)})
	o.check(t, d)

	explained, err := p.Explain(nil, s)
	require.NoError(t, err)
	checkExplained(t, s, d, explained)

	again := func(name string, p kvpolicy.Policy, s kvpolicy.Snapshot) {
		got, err := p.Decide(s)
		require.NoError(t, err, name)
		require.Equal(t, d, got, name)
	}
	for shift := range min(len(s.Instances), 4) {
		moved := s
		moved.Instances = append(slices.Clone(s.Instances[shift:]), s.Instances[:shift]...)
		again("rotated", p, moved)
		slices.Reverse(moved.Instances)
		again("rotated and reversed", p, moved)
	}

	var policy kvpolicy.Policy
	roundTrip(t, p, &policy)
	var snapshot kvpolicy.Snapshot
	roundTrip(t, s, &snapshot)
	again("read back from JSON", policy, snapshot)
	var decision kvpolicy.Decision
	roundTrip(t, d, &decision)
	require.Equal(t, d, decision)

	for name, extra := range o.bystanders() {
		crowded := s
		crowded.Instances = append(slices.Clone(s.Instances), extra)
		got, err := p.Decide(crowded)
		require.NoError(t, err, name)
		if d.RunnerUp == "" { // then the newcomer may be it
			got.RunnerUp, got.Margin = "", 0
		}
		require.Equal(t, d, got, name)
	}
}

func roundTrip(t require.TestingT, from, to any) {
	data, err := json.Marshal(from)
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(data, to))
}

// bystanders are instances that change no decision.
func (o *oracle) bystanders() map[string]kvpolicy.Instance {
	p, s := o.policy, o.snapshot
	all := map[string]kvpolicy.Instance{
		"unavailable": {ID: "bystander", Unavailable: true, CachedTokens: s.Request.ContextTokens, PrefillRate: 1e18},
	}
	best := o.ofTier(kvpolicy.FitsNow)
	if len(best) == 0 {
		best = o.ofTier(kvpolicy.FitsEmpty)
	}
	if len(best) == 0 || p.Hazard.Enabled { // there every instance is somebody's fallback
		return all
	}
	// It is as fresh and as roomy as one that is a candidate already, and worse
	// in all else; too cold to be a source; no part of affinity's mean, where
	// there is one.
	worse := s.Instances[best[0]]
	worse.ID, worse.CachedTokens, worse.KVUsedTokens = "bystander", 0, s.Instances[best[0]].KVUsedTokens
	worse.Requests, worse.ActiveDecodes, worse.WaitSeconds = 1e9, 1e9, 1e12
	worse.PendingPrefillTokens, worse.OngoingTokens = 1e15, 1e15
	gates := p.Affinity.Enabled && s.Request.Affinity != ""
	if !gates && (!p.Separation.Enabled || p.Separation.MinSourceCacheTokens > 0) {
		all["dominated"] = worse
	}
	if p.MaxMetricsAgeSeconds > 0 && !o.degraded() {
		stale := s.Instances[best[0]]
		stale.ID, stale.MetricsAgeSeconds = "bystander", 1e12
		stale.Requests, stale.PendingPrefillTokens, stale.CachedTokens = 0, 0, s.Request.ContextTokens
		all["stale"] = stale
	}
	if s.Request.ContextTokens > 1 && (!p.Separation.Enabled || p.Separation.MinSourceCacheTokens > 0) {
		small := worse
		small.KVCapacityTokens, small.KVUsedTokens, small.Requests = 1, 1, 0
		all["too small"] = small
	}
	return all
}

// TestGoldenErrors checks that each bad case is refused, in reading or in
// deciding, by an error that holds what its line says.
func TestGoldenErrors(t *testing.T) {
	plain := func(text string) string { return strings.ReplaceAll(strings.ToLower(text), "_", "") }
	for _, c := range goldenCases(t, "errors.jsonl") {
		t.Run(c.Name, func(t *testing.T) {
			p, s, err := c.decode()
			if err == nil {
				var d kvpolicy.Decision
				d, err = p.Decide(s)
				require.Equal(t, kvpolicy.Decision{}, d)
			}
			require.ErrorIs(t, err, kvpolicy.ErrInvalid)
			var field *kvpolicy.FieldError
			require.ErrorAs(t, err, &field)
			require.NotEmpty(t, field.Path)
			require.NotEmpty(t, field.Want)
			require.Contains(t, plain(err.Error()), plain(c.Want["error"].(string)))
		})
	}
}
