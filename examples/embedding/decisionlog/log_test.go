package decisionlog

import (
	"bytes"
	"encoding/json"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gonum.org/v1/gonum/stat/distuv"

	"github.com/kvpolicy/kvpolicy"
)

// examples/decide reads the log back, and decides what was decided.
func TestDecideReadsItBack(t *testing.T) {
	var written bytes.Buffer
	policy := kvpolicy.HazardAware()
	policy.Seed = 7
	log, err := New(&written, policy)
	require.NoError(t, err)
	curve := distuv.Weibull{K: 0.6, Lambda: 600}
	snapshots := []kvpolicy.Snapshot{
		{
			Request: kvpolicy.Request{ID: "placed", ContextTokens: 3000, RemainingTokens: 200},
			Instances: []kvpolicy.Instance{
				{ID: "laptop", DecodeRate: 12, PrefillRate: 150, UptimeSeconds: 60, Curve: curve, CurveName: "laptops"},
				{ID: "server", DecodeRate: 60, PrefillRate: 1500, Requests: 3, CachedTokens: 1024},
			},
		},
		{Request: kvpolicy.Request{ID: "refused"}},
	}
	var decided []string
	for _, s := range snapshots {
		d, err := policy.Decide(s)
		require.NoError(t, err)
		require.NoError(t, log.Write(s, d, time.Unix(1785585600, 0)))
		text, err := json.Marshal(d)
		require.NoError(t, err)
		decided = append(decided, string(text))
	}
	require.Len(t, strings.Split(strings.TrimSpace(written.String()), "\n"), len(snapshots), "a line each")

	decide := exec.Command("go", "run", "github.com/kvpolicy/kvpolicy/examples/decide")
	decide.Stdin = &written
	read, err := decide.Output()
	require.NoError(t, err)
	for at, line := range strings.Split(strings.TrimSpace(string(read)), "\n") {
		var named map[string]json.RawMessage
		require.NoError(t, json.Unmarshal([]byte(line), &named))
		require.JSONEq(t, `"`+snapshots[at].Request.ID+`"`, string(named["name"]))
		delete(named, "name")
		text, err := json.Marshal(named)
		require.NoError(t, err)
		require.JSONEq(t, decided[at], string(text))
	}
}

func TestACurveWithoutJSONIsAnErrorAndWritesNothing(t *testing.T) {
	var written bytes.Buffer
	log, err := New(&written, kvpolicy.Unified())
	require.NoError(t, err)
	s := kvpolicy.Snapshot{Instances: []kvpolicy.Instance{{ID: "a", Curve: immortal{}}}}
	require.Error(t, log.Write(s, kvpolicy.Decision{}, time.Unix(0, 0)))
	require.Zero(t, written.Len())
}

type immortal struct{}

func (immortal) Survival(float64) float64 { return 1 }
