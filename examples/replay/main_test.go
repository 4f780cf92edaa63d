package main

import (
	"bytes"
	"context"
	"encoding/csv"
	"encoding/json"
	"encoding/xml"
	"fmt"
	"image/png"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/kvpolicy/kvpolicy"
)

// tiny keeps a run of every preset under a second.
func tiny(more ...string) []string {
	return append([]string{"-sessions", "4", "-seeds", "2", "-loads", "1,2", "-instances", "3"}, more...)
}

func replayed(t *testing.T, args ...string) (status int, stdout, stderr string) {
	t.Helper()
	var out, errs bytes.Buffer
	status = run(context.Background(), args, &out, &errs)
	return status, out.String(), errs.String()
}

// timing is the one line that differs from run to run.
var timing = regexp.MustCompile(`(?m)^\d+ runs, .* in .* s\.$`)

func TestEveryPresetIsInTheTableAndNothingIsLost(t *testing.T) {
	status, out, errs := replayed(t, tiny("-seeds", "5")...)
	require.Equal(t, statusFine, status, errs)
	assert.Empty(t, errs, "no progress bar where there is no terminal")
	for _, name := range kvpolicy.PresetNames() {
		if name == "hazard_aware" {
			assert.NotContains(t, out, name)
			continue
		}
		assert.Regexp(t, `(?m)^ `+name+` .* 0 $`, out, "a line that ends with no request lost")
	}
	for _, title := range []string{"Latency (closed-loop, load 1)", "Cache, balance and prediction", "Against unified, paired", "Who fell through which gate", "By offered load"} {
		assert.Contains(t, out, title)
	}
	assert.Contains(t, out, "no difference shown")
	assert.Regexp(t, timing, out)
}

func TestOutputRepeatsWhateverRunsBesideIt(t *testing.T) {
	_, one, _ := replayed(t, tiny("-parallel", "1", "-pacing", "closed,trace")...)
	_, two, _ := replayed(t, tiny("-parallel", "3", "-pacing", "closed,trace")...)
	assert.Equal(t, timing.ReplaceAllString(strings.ReplaceAll(one, "-parallel 1", ""), ""), timing.ReplaceAllString(strings.ReplaceAll(two, "-parallel 3", ""), ""))
	assert.Contains(t, one, "trace-time")
}

type report struct {
	Workload struct{ Requests float64 }
	Complete bool
	Baseline string
	Settings []struct {
		Pacing   string
		Load     float64
		Policies []struct {
			Name, Connector string
			Runs            int
			Metrics         map[string]struct {
				Mean            *float64
				Values          []*float64
				AgainstBaseline *struct {
					Pairs   int
					Verdict string
				} `json:"against_baseline"`
			}
			Funnel map[string]int64
		}
	}
}

func replayedJSON(t *testing.T, args ...string) (r report) {
	t.Helper()
	status, out, errs := replayed(t, append(args, "-json")...)
	require.Equal(t, statusFine, status, errs)
	require.NoError(t, json.Unmarshal([]byte(out), &r))
	return r
}

func TestJSONHoldsEveryRunAndComparison(t *testing.T) {
	r := replayedJSON(t, tiny("-policies", "unified,marginal,unified_v2_relaxed", "-baseline", "marginal")...)
	assert.True(t, r.Complete)
	assert.Equal(t, "marginal", r.Baseline)
	require.Len(t, r.Settings, 2)
	for _, s := range r.Settings {
		require.Len(t, s.Policies, 3)
		for _, p := range s.Policies {
			assert.Equal(t, 2, p.Runs)
			assert.Len(t, p.Metrics["ttft_p90_s"].Values, 2)
			assert.Zero(t, *p.Metrics["lost"].Mean)
			assert.Equal(t, p.Name == "marginal", p.Metrics["e2e_mean_s"].AgainstBaseline == nil)
		}
		assert.Equal(t, "none", s.Policies[0].Connector)
		assert.Equal(t, "mooncake", s.Policies[2].Connector, "PD-separation needs one")
		assert.Nil(t, s.Policies[0].Funnel)
		assert.NotNil(t, s.Policies[2].Funnel)
	}
}

// The same policy by another name differs in nothing, whatever the metric.
func TestAPolicyDoesNotDifferFromItself(t *testing.T) {
	file := filepath.Join(t.TempDir(), "same.json")
	require.NoError(t, os.WriteFile(file, []byte(`{"preset": "unified"}`), 0o600))
	r := replayedJSON(t, tiny("-seeds", "5", "-policies", "unified,"+file)...)
	for _, s := range r.Settings {
		require.Equal(t, "same", s.Policies[1].Name)
		for name, m := range s.Policies[1].Metrics {
			if m.AgainstBaseline != nil && m.AgainstBaseline.Pairs >= 5 {
				assert.Equal(t, "no difference shown", m.AgainstBaseline.Verdict, name)
			}
			assert.Equal(t, s.Policies[0].Metrics[name].Values, m.Values)
		}
	}
}

func TestRowsHaveSettingsOfTheirOwn(t *testing.T) {
	r := replayedJSON(t, tiny("-policies", "unified,unified:connector=nixl,unified:truth,unified:index=engine:scrape=5:delay=2,unified:signals=scraped:index-tokens=64")...)
	p := r.Settings[0].Policies
	require.Len(t, p, 5)
	assert.Equal(t, "nixl", p[1].Connector)
	assert.Greater(t, *p[1].Metrics["tpot_mean_s"].Mean, *p[0].Metrics["tpot_mean_s"].Mean, "every step is taxed")
	assert.Equal(t, "none", p[3].Connector)
	assert.Less(t, *p[2].Metrics["index_error_share"].Mean, *p[4].Metrics["index_error_share"].Mean, "an index of one block knows nothing")
}

func TestFilesAreWholeAndStandAlone(t *testing.T) {
	dir := t.TempDir()
	html, table, pictures := filepath.Join(dir, "out.html"), filepath.Join(dir, "out.csv"), filepath.Join(dir, "pictures")
	status, _, errs := replayed(t, tiny("-report", html, "-csv", table, "-pictures", pictures)...)
	require.Equal(t, statusFine, status, errs)

	file, err := os.Open(table)
	require.NoError(t, err)
	defer file.Close()
	lines, err := csv.NewReader(file).ReadAll()
	require.NoError(t, err)
	assert.Len(t, lines, 1+2*2*10, "a line for each load, seed and policy")

	names := []string{"hotspot", "load_over_time", "p90_by_load", "predicted_vs_actual", "trigger_funnel", "ttft_and_e2e"}
	entries, err := os.ReadDir(pictures)
	require.NoError(t, err)
	assert.Len(t, entries, 2*len(names))
	for _, name := range names {
		data, err := os.ReadFile(filepath.Join(pictures, name+".png"))
		require.NoError(t, err)
		img, err := png.Decode(bytes.NewReader(data))
		require.NoError(t, err)
		assert.Greater(t, img.Bounds().Dx(), 600)
		data, err = os.ReadFile(filepath.Join(pictures, name+".svg"))
		require.NoError(t, err)
		assertXML(t, data)
	}

	data, err := os.ReadFile(html)
	require.NoError(t, err)
	page := string(data)
	for _, name := range names {
		assert.Contains(t, page, `<figure id="`+name+`"><img src="data:image/svg`)
	}
	assert.NotRegexp(t, `(src|href)="?(https?:|//|/|\.)`, page, "the report needs no other file")
	assert.Contains(t, page, "@media print")
	assert.Equal(t, 10, strings.Count(page, "<td>unified</td>")+strings.Count(page, "<td><span>unified</span></td>")+7, "unified has its line in each table but the comparison")
}

func TestWhatIsThereAlreadyKeepsItsNature(t *testing.T) {
	dir := t.TempDir()
	path := func(name string) string { return filepath.Join(dir, name) }
	require.NoError(t, os.WriteFile(path("private"), []byte("old"), 0o600))
	require.NoError(t, os.Symlink("private", path("link")))
	require.NoError(t, writeFile(path("link"), []byte("new")))
	data, err := os.ReadFile(path("private"))
	require.NoError(t, err)
	assert.Equal(t, "new", string(data))
	info, err := os.Stat(path("private"))
	require.NoError(t, err)
	assert.Equal(t, os.FileMode(0o600), info.Mode(), "permissions stay")
	info, err = os.Lstat(path("link"))
	require.NoError(t, err)
	assert.NotZero(t, info.Mode()&os.ModeSymlink, "a link stays one")

	require.NoError(t, os.Symlink(os.DevNull, path("null")))
	require.NoError(t, writeFile(path("null"), []byte("gone")))
	info, err = os.Stat(path("null"))
	require.NoError(t, err)
	assert.False(t, info.Mode().IsRegular(), "a device stays one")
}

func assertXML(t *testing.T, data []byte) {
	t.Helper()
	d := xml.NewDecoder(bytes.NewReader(data))
	d.Strict = true
	for {
		if _, err := d.Token(); err == io.EOF {
			return
		} else if !assert.NoError(t, err) {
			return
		}
	}
}

func TestBadFlagsAreNamed(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(file, []byte("{}"), 0o600))
	bad := filepath.Join(t.TempDir(), "bad.json")
	require.NoError(t, os.WriteFile(bad, []byte(`{"preset": "unified", "affinity": {"overload_factor": 0.5}}`), 0o600))
	counting := filepath.Join(t.TempDir(), "counting.json")
	require.NoError(t, os.WriteFile(counting, []byte(`{"cost": {"count_decode": true, "decode_rate": 50}}`), 0o600))
	for _, c := range []struct {
		args []string
		want []string
	}{
		{[]string{"-nosuch"}, []string{"-nosuch"}},
		{[]string{"-seeds", "0"}, []string{"-seeds"}},
		{[]string{"-seeds", "x"}, []string{"-seeds"}},
		{[]string{"-instances", "-1"}, []string{"-instances"}},
		{[]string{"-slo-ttft", "0"}, []string{"-slo-ttft"}},
		{[]string{"-slo-tpot", "NaN"}, []string{"-slo-tpot"}},
		{[]string{"-scrape", "0"}, []string{"-scrape"}},
		{[]string{"-delay", "-1"}, []string{"-delay"}},
		{[]string{"-scale", "Inf"}, []string{"-scale"}},
		{[]string{"-limit", "-1"}, []string{"-limit"}},
		{[]string{"-window", "-1"}, []string{"-window"}},
		{[]string{"-parallel", "0"}, []string{"-parallel"}},
		{[]string{"-loads", "1,0"}, []string{"-loads"}},
		{[]string{"-loads", "1,1"}, []string{"-loads"}},
		{[]string{"-pacing", "slow"}, []string{"-pacing"}},
		{[]string{"-connector", "tcp"}, []string{"-connector"}},
		{[]string{"-signals", "smoke"}, []string{"-signals"}},
		{[]string{"-index", "card"}, []string{"-index"}},
		{[]string{"-policies", "nosuch"}, []string{"-policies", "nosuch"}},
		{[]string{"-policies", "unified,unified"}, []string{"-policies", "twice"}},
		{[]string{"-policies", "hazard_aware"}, []string{"-policies", "hazard_aware"}},
		{[]string{"-policies", "unified_v2_strict:connector=none"}, []string{"-policies", "connector"}},
		{[]string{"-policies", "unified:colour=red"}, []string{"-policies", "colour"}},
		{[]string{"-policies", "unified:scrape=often"}, []string{"-policies", "scrape"}},
		{[]string{"-policies", bad}, []string{"-policies", "overload_factor"}},
		{[]string{"-policies", counting}, []string{"-policies", "count_decode"}},
		{[]string{"-first-seed", "-1"}, []string{"-first-seed"}},
		{[]string{"-shift", "0"}, []string{"-shift"}},
		{[]string{"-policies", "missing.json"}, []string{"-policies", "missing.json"}},
		{[]string{"-baseline", "lmetric", "-policies", "unified"}, []string{"-baseline"}},
		{[]string{"-trace", "missing.jsonl"}, []string{"-trace", "missing.jsonl"}},
		{[]string{"-trace", file}, []string{"-trace", "file"}},
		{[]string{"-format", "parquet"}, []string{"-format"}},
		{[]string{"-format", "azure"}, []string{"-format", "-trace"}},
		{[]string{"-csv", "/no/such/place/x.csv"}, []string{"-csv"}},
		{[]string{"-report", "/no/such/place/x.html"}, []string{"-report"}},
		{[]string{"-pictures", file}, []string{"-pictures"}},
		{[]string{"-csv", filepath.Dir(file)}, []string{"-csv", "directory"}},
		{[]string{"-csv", file, "-report", file}, []string{"-csv", "-report"}},
		{[]string{"-trace", ""}, []string{"-trace is empty"}},
		{[]string{"-policies", ""}, []string{"-policies is empty"}},
		{[]string{"-scale", "1e6", "-loads", "0.5"}, []string{"-loads", "-scale"}},
		{[]string{"trace.jsonl"}, []string{"trace.jsonl", "-trace"}},
	} {
		status, out, errs := replayed(t, c.args...)
		assert.Equal(t, statusBadFlag, status, "%v", c.args)
		assert.Empty(t, out)
		for _, word := range c.want {
			assert.Contains(t, errs, word, "%v", c.args)
		}
	}
}

func TestInterruptedRunsLeaveNoFile(t *testing.T) {
	dir := t.TempDir()
	ctx, cancel := context.WithCancel(context.Background())
	defer time.AfterFunc(100*time.Millisecond, cancel).Stop()
	var out, errs bytes.Buffer
	status := run(ctx, []string{"-sessions", "100000", "-seeds", "100",
		"-report", filepath.Join(dir, "out.html"), "-csv", filepath.Join(dir, "out.csv"), "-pictures", filepath.Join(dir, "pictures")}, &out, &errs)
	assert.Equal(t, statusInterrupted, status)
	assert.Contains(t, errs.String(), "interrupted")
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	assert.Empty(t, entries)
}

// closedPipe is an output that nobody reads.
type closedPipe struct{}

func (closedPipe) Write([]byte) (int, error) { return 0, io.ErrClosedPipe }

func TestAClosedOutputIsAnErrorAndCostsNoFile(t *testing.T) {
	for _, more := range [][]string{{}, {"-json"}} {
		file := filepath.Join(t.TempDir(), "out.csv")
		var errs bytes.Buffer
		status := run(context.Background(), tiny(append(more, "-policies", "unified", "-csv", file)...), closedPipe{}, &errs)
		assert.Equal(t, statusFailed, status)
		assert.Contains(t, errs.String(), "closed pipe")
		assert.FileExists(t, file)
	}
}

func TestAPartialGridStillMakesATable(t *testing.T) {
	o, err := parseOptions(tiny("-policies", "unified,marginal,lmetric"), io.Discard)
	require.NoError(t, err)
	g, err := replayAll(context.Background(), o, io.Discard)
	require.NoError(t, err)
	g.results[0][1][1] = nil                          // one of two seeds
	g.results[0][2][0], g.results[0][2][1] = nil, nil // both
	s, err := g.summarize()
	require.NoError(t, err)
	var out bytes.Buffer
	require.NoError(t, s.writeText(&out))
	assert.Contains(t, out.String(), "INTERRUPTED")
	assert.Regexp(t, `(?m)^ lmetric +–`, out.String())
	assert.Regexp(t, `(?m)^ marginal \(1 of 2\) +\d`, out.String(), "a mean over other arrivals says so")
	assert.Regexp(t, `(?m)^ unified +\d`, out.String())
	assert.NotContains(t, out.String(), "NaN")
	assert.Contains(t, out.String(), "one pair, no interval")
	_, err = s.draw()
	assert.NoError(t, err, "what is missing is left out of the pictures")
}

func TestLostRequestsAreAnError(t *testing.T) {
	o, err := parseOptions(tiny("-policies", "unified"), io.Discard)
	require.NoError(t, err)
	g, err := replayAll(context.Background(), o, io.Discard)
	require.NoError(t, err)
	require.NoError(t, g.lost())
	g.results[1][0][1].Completed--
	assert.ErrorContains(t, g.lost(), "1 of ")
}

func TestFewAreNotNone(t *testing.T) {
	for v, want := range map[float64]string{0: "0", 0.2: "0.20", 3: "3", 9.75: "9.8", 11.6: "12"} {
		assert.Equal(t, want, count(v))
	}
	status, _, errs := replayed(t, tiny("-max-context", "5")...)
	assert.Equal(t, statusFailed, status)
	assert.Contains(t, errs, "-max-context 5", "why none is left")
}

func TestRealTraces(t *testing.T) {
	for _, name := range []string{"mooncake/conversation_first6000.jsonl", "agentic_coding/requests.csv"} {
		path := filepath.Join("../../../shared/data", name)
		if _, err := os.Stat(path); err != nil {
			t.Logf("skipped: %s is not here", path)
			continue
		}
		status, out, errs := replayed(t, "-trace", path, "-limit", "150", "-seeds", "1", "-loads", "1")
		assert.Equal(t, statusFine, status, errs)
		assert.Contains(t, out, "150 requests")
	}
}

// A trace is replayed as it was recorded by seed 0, which moves nothing: of 20
// arrivals within 2 s the first second's window holds half, and none where each
// has moved by up to 10 s.
func TestATraceIsReplayedAsRecorded(t *testing.T) {
	var lines strings.Builder
	lines.WriteString("TIMESTAMP,ContextTokens,GeneratedTokens\n")
	for i := range 20 {
		fmt.Fprintf(&lines, "2023-11-16 18:17:%02d.%03d0000,1000,10\n", i/10, i%10*100)
	}
	file := filepath.Join(t.TempDir(), "burst.csv")
	require.NoError(t, os.WriteFile(file, []byte(lines.String()), 0o600))
	recorded := replayedJSON(t, "-trace", file, "-policies", " unified", "-pacing", "trace", "-window", "1", "-first-seed", "0", "-seeds", "1")
	assert.InDelta(t, 10, recorded.Workload.Requests, 0)
	_, _, errs := replayed(t, "-trace", file, "-policies", "unified", "-pacing", "trace", "-window", "1", "-shift", "1000", "-seeds", "1", "-json")
	assert.Contains(t, errs, "no request left to send")
}
