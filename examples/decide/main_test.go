package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// two instances, of which b has the longer queue and the prompt cached
const snapshot = `{"request":{"id":"r","context_tokens":7000},"instances":[{"id":"a"},{"id":"b","requests":4,"cached_tokens":7000}]}`

func decide(t *testing.T, input string, args ...string) (status int, out, errors string) {
	t.Helper()
	var stdout, stderr bytes.Buffer
	status = run(args, strings.NewReader(input), &stdout, &stderr)
	return status, stdout.String(), stderr.String()
}

func write(t *testing.T, content string) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "file.json")
	require.NoError(t, os.WriteFile(name, []byte(content), 0o600))
	return name
}

func TestDecidesEachLine(t *testing.T) {
	status, out, _ := decide(t, `{"name":"one","snapshot":`+snapshot+`}

{"name":"two","policy":{"preset":"least_loaded"},"snapshot":`+snapshot+`}`)
	require.Equal(t, statusFine, status)
	lines := strings.Split(strings.TrimSpace(out), "\n")
	require.Len(t, lines, 2)
	for at, want := range []struct{ name, target string }{{"one", "b"}, {"two", "a"}} {
		var got struct{ Name, Action, Target string }
		require.NoError(t, json.Unmarshal([]byte(lines[at]), &got))
		require.Equal(t, want.name, got.Name)
		require.Equal(t, "place", got.Action)
		require.Equal(t, want.target, got.Target)
	}
}

func TestBadLinesAreReportedAndTheRestGoesOn(t *testing.T) {
	for _, test := range []struct{ name, line, want string }{
		{"a field", `{"name":"x","snapshot":{"instances":[{"id":"a"},{"id":"b"},{"id":"c","requests":-4}]}}`, "instances[2].requests"},
		{"a fraction", `{"name":"x","snapshot":{"instances":[{"id":"a","requests":0.5}]}}`, "instances[0].requests"},
		{"no snapshot", `{"name":"x"}`, "snapshot must be there"},
		{"a key twice", `{"name":"x","snapshot":{},"snapshot":{}}`, "snapshot must appear once"},
		{"a key in capitals", `{"name":"x","Snapshot":{}}`, "Snapshot must not be there"},
		{"a want of nothing", `{"name":"x","snapshot":{},"want":{}}`, "want: must name a field"},
		{"a want of any error", `{"name":"x","snapshot":{},"want":{"error":"_"}}`, "want: must name a field"},
		{"no policy", `{"name":"x","policy":null,"snapshot":{}}`, "policy: "},
		{"an unknown key", `{"name":"x","polcy":{},"snapshot":{}}`, "polcy"},
		{"two objects", `{"name":"x","snapshot":{}} {}`, "one JSON object"},
		{"no JSON", `{"name":"x",`, "unexpected EOF"},
		{"the policy", `{"name":"x","policy":{"preset":"unifed"},"snapshot":{}}`, "preset"},
	} {
		t.Run(test.name, func(t *testing.T) {
			status, out, _ := decide(t, `{"name":"first","snapshot":`+snapshot+"}\n"+test.line+"\n"+`{"name":"last","snapshot":`+snapshot+`}`)
			require.Equal(t, statusBad, status)
			lines := strings.Split(strings.TrimSpace(out), "\n")
			require.Len(t, lines, 3)
			var got struct {
				Line  int
				Error string
			}
			require.NoError(t, json.Unmarshal([]byte(lines[1]), &got))
			require.Equal(t, 2, got.Line)
			require.Contains(t, got.Error, test.want)
			require.Contains(t, lines[2], `"name":"last"`)
		})
	}
}

func TestCheckPrintsEachDifferenceByField(t *testing.T) {
	for _, test := range []struct {
		name, want string
		status     int
		out        []string
	}{
		{"as wanted", `{"action":"place","target":"b","cost":{"contention":0.2,"total":0.2}}`, statusFine, []string{"1 of 1 lines as wanted"}},
		{"within the tolerance", `{"score":0.2000000001}`, statusFine, nil},
		{"differs", `{"target":"a","cost":{"contention":0.2000001},"method":"transfer"}`, statusDiffers,
			[]string{"target: want a, got b", "cost.contention: want 0.2000001", "method: want transfer, got nothing", "0 of 1"}},
		{"wants an error", `{"error":"instances[0].requests"}`, statusDiffers, []string{"error: want \"instances[0].requests\", got none"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			status, out, _ := decide(t, `{"name":"x","snapshot":`+snapshot+`,"want":`+test.want+`}`, "-check")
			require.Equal(t, test.status, status, out)
			for _, want := range test.out {
				require.Contains(t, out, want)
			}
		})
	}
}

func TestCheckOfErrors(t *testing.T) {
	line := func(want string) string {
		return `{"name":"x","snapshot":{"instances":[{"id":"a","requests":-1}]},"want":` + want + `}`
	}
	status, out, _ := decide(t, line(`{"error":"Instances[0].REQUESTS"}`), "-check")
	require.Equal(t, statusFine, status, out)
	status, out, _ = decide(t, line(`{"error":"instances[1]"}`), "-check")
	require.Equal(t, statusDiffers, status, out)
	status, out, _ = decide(t, line(`{"action":"place"}`), "-check")
	require.Equal(t, statusDiffers, status)
	require.Contains(t, out, "error: want none")
	status, _, _ = decide(t, `{"name":"x","snapshot":{}}`, "-check")
	require.Equal(t, statusBad, status, "a check needs something to check")
}

func TestPolicyOverridesAndDiffSaysWhy(t *testing.T) {
	policy := write(t, `{"preset":"least_loaded"}`)
	line := `{"name":"x","policy":{"preset":"unified"},"snapshot":` + snapshot + `}`
	status, out, _ := decide(t, line, "-policy", policy)
	require.Equal(t, statusFine, status)
	require.Contains(t, out, `"target":"a"`)

	status, out, _ = decide(t, line, "-policy", policy, "-diff")
	require.Equal(t, statusFine, status)
	for _, want := range []string{"place b (no_affinity) -> place a (no_affinity)", "by the line's policy: a: higher_score",
		"by -policy: b: higher_score", "1 of 1 decisions change"} {
		require.Contains(t, out, want)
	}
	status, out, _ = decide(t, strings.Replace(line, "unified", "least_loaded", 1), "-policy", policy, "-diff")
	require.Equal(t, statusFine, status)
	require.Equal(t, "0 of 1 decisions change\n", out)
}

func TestDiffSeesTheMethod(t *testing.T) {
	line := `{"name":"x","policy":{"preset":"hazard_aware","hazard":{"stall_penalty_s":30},"migration":{"max_slowdown_s":9}},"snapshot":{"request":{"context_tokens":4000,
"remaining_tokens":2000,"running_on":"i"},"instances":[{"id":"i","prefill_rate":1000,"decode_rate":20,"curve":"doom"},
{"id":"j","prefill_rate":1000,"decode_rate":20}],"curves":{"doom":{"kind":"exponential","rate":0.05}}}}`
	line = strings.ReplaceAll(line, "\n", " ")
	status, out, _ := decide(t, line+"\n{bad", "-diff", "-policy",
		write(t, `{"preset":"hazard_aware","hazard":{"stall_penalty_s":30},"migration":{"max_slowdown_s":9},"transfer":{"bandwidth":1e6}}`))
	require.Equal(t, statusBad, status)
	require.Contains(t, out, "migrate j by transfer (risk_removed) -> migrate j by recompute (risk_removed)")
	require.Contains(t, out, "1 of 1 decisions change")
}

func TestOddInput(t *testing.T) {
	status, _, errors := decide(t, "\n \n", "-check")
	require.Equal(t, statusBad, status)
	require.Contains(t, errors, "nothing to check")
	status, out, _ := decide(t, "\ufeff"+`{"snapshot":`+snapshot+`}`+"\r\n", "-")
	require.Equal(t, statusFine, status, out)
	status, out, _ = decide(t, `{"name":"a\u001b[2J\nb","snapshot":`+snapshot+`,"want":{"target":"a"}}`, "-check", "-policy", write(t, "\ufeff{}"))
	require.Equal(t, statusDiffers, status)
	require.Contains(t, out, `standard input:1: a\x1b[2J\nb: target: want a, got b`)
}

func TestFlagsAndFiles(t *testing.T) {
	for _, test := range []struct {
		name string
		args []string
		want string
	}{
		{"no such flag", []string{"-chekc"}, "chekc"},
		{"diff of nothing", []string{"-diff"}, "-diff needs -policy"},
		{"no such policy", []string{"-policy", "missing.json"}, "missing.json"},
		{"a bad policy", []string{"-policy", write(t, `{"affinity":{"overload_factor":0.5}}`)}, "overload_factor"},
		{"no such file", []string{"missing.jsonl"}, "missing.jsonl"},
	} {
		t.Run(test.name, func(t *testing.T) {
			status, _, errors := decide(t, "", test.args...)
			require.Equal(t, statusBad, status)
			require.Contains(t, errors, test.want)
		})
	}
	first, second := write(t, `{"name":"x","snapshot":`+snapshot+`}`), write(t, `{"snapshot":{}}`+"\n"+`{"snapshot":1}`)
	status, out, _ := decide(t, "", first, second)
	require.Equal(t, statusBad, status)
	require.Contains(t, out, `"file":"`+second+`","line":2`)
}
