package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvpolicy/kvpolicy"
	"github.com/kvpolicy/kvpolicy/examples/internal/vllmlike"
)

func TestFlagsThatAreWrongAreNamed(t *testing.T) {
	file := func(content string) string {
		name := filepath.Join(t.TempDir(), "file")
		require.NoError(t, os.WriteFile(name, []byte(content), 0o600))
		return name
	}
	fine := []string{"-urls", "http://127.0.0.1:1"}
	for _, test := range []struct {
		want string
		args []string
	}{
		{"-urls, -instances and -dns", nil},
		{"-urls, -instances and -dns", append([]string{"-dns", "a:1"}, fine...)},
		{"-urls", []string{"-urls", "10.0.0.1:8000"}},
		{"-urls", []string{"-urls", "http://a:1,http://a:1"}},
		{"-urls", []string{"-urls", "http://a:99999"}},
		{"-dns", []string{"-dns", "host"}},
		{"-dns", []string{"-dns", "host:0"}},
		{"-instances", []string{"-instances", "missing"}},
		{"instances[1]: kvpolicy: url", []string{"-instances", file("instances:\n- url: http://a:1\n- url: b\n")}},
		{"prefill_rate", []string{"-instances", file("instances: [{url: 'http://a:1', prefill_rate: .nan}]")}},
		{"instances[0]: kvpolicy: decode_rate", []string{"-preset", "hazard_aware", "-instances", file("instances: [{url: 'http://a:1'}]")}},
		{"prefill_rate", []string{"-policy", file(`{"preset":"unified","cost":{"prefill_rate":0}}`), "-urls", "http://a:1"}},
		{"-preset", append([]string{"-preset", "unifed"}, fine...)},
		{"-policy", append([]string{"-policy", "missing"}, fine...)},
		{"overload_factor", append([]string{"-policy", file(`{"affinity":{"overload_factor":0.5}}`)}, fine...)},
		{"-decode-rate", append([]string{"-preset", "hazard_aware"}, fine...)},
		{"-decode-rate", append([]string{"-decode-rate", "NaN"}, fine...)},
		{"-prefill-rate", append([]string{"-prefill-rate", "-1"}, fine...)},
		{"-pd-separation", append([]string{"-pd-separation"}, fine...)},
		{"-scrape-every", append([]string{"-scrape-every", "0s"}, fine...)},
		{"-scrape-timeout", append([]string{"-scrape-timeout", "-1s"}, fine...)},
		{"-failures", append([]string{"-failures", "0"}, fine...)},
		{"-backoff", append([]string{"-backoff", "0s"}, fine...)},
		{"-max-backoff", append([]string{"-max-backoff", "1ms"}, fine...)},
		{"-max-body", append([]string{"-max-body", "0"}, fine...)},
		{"-session-header", append([]string{"-session-header", ""}, fine...)},
		{"-session-header", append([]string{"-session-header", "X Session"}, fine...)},
		{"-max-attempts", append([]string{"-max-attempts", "0"}, fine...)},
		{"-first-byte-timeout", append([]string{"-first-byte-timeout", "-1s"}, fine...)},
		{"-idle-timeout", append([]string{"-idle-timeout", "-1s"}, fine...)},
		{"-body-timeout", append([]string{"-body-timeout", "-1s"}, fine...)},
		{"-max-bodies", append([]string{"-max-bodies", "1000"}, fine...)},
		{"-drain-delay", append([]string{"-drain-delay", "-1s"}, fine...)},
		{"-drain-timeout", append([]string{"-drain-timeout", "-1s"}, fine...)},
		{"-max-metrics-age", append([]string{"-max-metrics-age", "-1s"}, fine...)},
		{"-session-ttl", append([]string{"-session-ttl", "-1s"}, fine...)},
		{"-tokenize-timeout", append([]string{"-tokenize-timeout", "0s"}, fine...)},
		{"-block-tokens", append([]string{"-block-tokens", "0"}, fine...)},
		{"-stand-ins", []string{"-stand-ins", "-1"}},
		{"-urls", append([]string{"-stand-ins", "1"}, fine...)},
		{"-urls", append([]string{"-demo"}, fine...)},
		{"-log-level", append([]string{"-log-level", "loud"}, fine...)},
		{"-log-format", append([]string{"-log-format", "xml"}, fine...)},
		{"-listen", append([]string{"-listen", "nowhere"}, fine...)},
		{"-decision-log", append([]string{"-decision-log", t.TempDir()}, fine...)},
		{"is no flag", append([]string{"serve"}, fine...)},
		{"-no-such", []string{"-no-such"}},
	} {
		err := run(t.Context(), test.args, io.Discard, io.Discard)
		require.ErrorContains(t, err, test.want, "%v", test.args)
	}
}

func TestStandInsAreAnnouncedOnceTheFlagsAreChecked(t *testing.T) {
	for _, args := range [][]string{{"-listen", "nowhere"}, {"-pd-separation"}, {"-decision-log", t.TempDir()}} {
		var said lockedBuffer
		require.Error(t, run(t.Context(), append([]string{"-stand-ins", "1"}, args...), &said, &said))
		require.NotContains(t, said.String(), "stand-in", "%v", args)
	}
}

// running is a gateway started as the command is.
type running struct {
	url   string
	out   *lockedBuffer
	err   *lockedBuffer
	stop  context.CancelFunc
	ended chan error
}

func runGateway(t *testing.T, args ...string) *running {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	r := &running{out: &lockedBuffer{}, err: &lockedBuffer{}, stop: cancel, ended: make(chan error, 1)}
	t.Cleanup(cancel)
	go func() { r.ended <- run(ctx, append([]string{"-listen", "127.0.0.1:0"}, args...), r.out, r.err) }()
	address := regexp.MustCompile(`serving on (http://\S+)`)
	require.Eventually(t, func() bool {
		found := address.FindStringSubmatch(r.out.String())
		if found != nil {
			r.url = found[1]
		}
		return found != nil
	}, 10*time.Second, time.Millisecond, "%v", r.err)
	return r
}

func TestStopsOnceAllIsAnswered(t *testing.T) {
	like := vllmlike.DefaultConfig()
	like.DecodeRate = 40
	server, err := vllmlike.Start(like)
	require.NoError(t, err)
	defer server.Kill()
	decisions := filepath.Join(t.TempDir(), "decisions.jsonl")
	r := runGateway(t, "-urls", server.URL(), "-decision-log", decisions, "-log-format", "json")
	client := &http.Client{Transport: &http.Transport{}}
	defer client.CloseIdleConnections()
	get := func(path string) (int, string) {
		response, err := client.Get(r.url + path)
		if err != nil {
			return 0, err.Error()
		}
		defer response.Body.Close()
		data, _ := io.ReadAll(response.Body) // cut off when it stops
		return response.StatusCode, string(data)
	}
	require.Eventually(t, func() bool { code, _ := get("/health"); return code == http.StatusOK }, 10*time.Second, 5*time.Millisecond)
	response, err := client.Post(r.url+"/v1/completions", "application/json", strings.NewReader(`{"prompt":"x","max_tokens":12,"stream":true}`))
	require.NoError(t, err)
	defer response.Body.Close()
	r.stop()
	data, err := io.ReadAll(response.Body)
	require.NoError(t, err)
	require.Contains(t, string(data), "[DONE]", "what had begun is answered")
	require.NoError(t, <-r.ended)
	code, _ := get("/health")
	require.Zero(t, code, "it has stopped")

	// The log of decisions is what examples/decide reads: the same decision
	// comes of policy and snapshot.
	line, err := os.ReadFile(decisions)
	require.NoError(t, err)
	require.Equal(t, 1, bytes.Count(line, []byte("\n")))
	var logged struct {
		Name     string
		Policy   kvpolicy.Policy
		Snapshot kvpolicy.Snapshot
		Decision kvpolicy.Decision
		Time     time.Time
	}
	decoder := json.NewDecoder(bytes.NewReader(line))
	decoder.DisallowUnknownFields()
	require.NoError(t, decoder.Decode(&logged))
	require.NotEmpty(t, logged.Name)
	again, err := exec.Command("go", "run", "../decide", decisions).CombinedOutput()
	require.NoError(t, err, string(again))
	want, err := json.Marshal(logged.Decision)
	require.NoError(t, err)
	require.JSONEq(t, fmt.Sprintf(`{"name":%q,%s`, logged.Name, want[1:]), string(again))
	require.WithinDuration(t, time.Now(), logged.Time, time.Minute)

	// And there is a line with every term.
	var terms map[string]any
	for line := range strings.Lines(r.err.String()) {
		if strings.Contains(line, `"msg":"decision"`) {
			require.NoError(t, json.Unmarshal([]byte(line), &terms))
		}
	}
	for _, key := range []string{"request", "attempt", "session", "model", "action", "reason", "target", "context_tokens", "remaining_tokens", "cached_tokens",
		"new_tokens", "score", "contention", "queue", "prefill", "interference", "decode", "loss", "total", "runner_up", "margin", "overcommitted", "degraded"} {
		require.Contains(t, terms, key)
	}
}

func TestItSaysThatItStopsBeforeItDoes(t *testing.T) {
	r := runGateway(t, "-stand-ins", "1", "-drain-delay", "2s")
	client := &http.Client{Transport: &http.Transport{}}
	defer client.CloseIdleConnections()
	health := func() (int, bool) {
		response, err := client.Get(r.url + "/health")
		if err != nil {
			return 0, false
		}
		defer response.Body.Close()
		return response.StatusCode, response.Close
	}
	require.Eventually(t, func() bool { code, _ := health(); return code == http.StatusOK }, 10*time.Second, 5*time.Millisecond)
	r.stop()
	require.Eventually(t, func() bool {
		code, closes := health()
		return code == http.StatusServiceUnavailable && closes
	}, 10*time.Second, time.Millisecond, "said before it ends")
	response, err := client.Post(r.url+"/v1/completions", "application/json", strings.NewReader(`{"prompt":"x","max_tokens":1}`))
	require.NoError(t, err)
	defer response.Body.Close()
	require.Equal(t, http.StatusOK, response.StatusCode, "and what comes is still served")
	require.NoError(t, <-r.ended)
}

func TestWhatTakesTooLongIsCutOff(t *testing.T) {
	like := vllmlike.DefaultConfig()
	like.DecodeRate = 10
	server, err := vllmlike.Start(like)
	require.NoError(t, err)
	defer server.Kill()
	r := runGateway(t, "-urls", server.URL(), "-drain-timeout", "50ms")
	client := &http.Client{Transport: &http.Transport{}}
	defer client.CloseIdleConnections()
	var response *http.Response
	require.Eventually(t, func() bool {
		var err error
		response, err = client.Post(r.url+"/v1/completions", "application/json", strings.NewReader(`{"prompt":"x","max_tokens":1000,"stream":true}`))
		if err == nil && response.StatusCode != http.StatusOK {
			response.Body.Close()
			return false
		}
		return err == nil
	}, 10*time.Second, 5*time.Millisecond)
	defer response.Body.Close()
	r.stop()
	_, err = io.ReadAll(response.Body)
	require.Error(t, err)
	require.NoError(t, <-r.ended)
	require.Eventually(t, func() bool { return server.Busy() == 0 }, 10*time.Second, time.Millisecond)
}

// Every preset serves, those with PD-separation and a hazard model too.
func TestPresets(t *testing.T) {
	for _, name := range kvpolicy.PresetNames() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := runGateway(t, "-stand-ins", "2", "-preset", name, "-decode-rate", "100", "-max-metrics-age", "0")
			client := &http.Client{Transport: &http.Transport{}}
			defer client.CloseIdleConnections()
			require.Eventually(t, func() bool {
				response, err := client.Post(r.url+"/v1/completions", "application/json", strings.NewReader(`{"prompt":"x","max_tokens":1}`))
				if err != nil {
					return false
				}
				defer response.Body.Close()
				return response.StatusCode == http.StatusOK
			}, 10*time.Second, 5*time.Millisecond)
			r.stop()
			require.NoError(t, <-r.ended)
		})
	}
}

func TestTheDemoBeginsOnceItsFlagsAreChecked(t *testing.T) {
	var out lockedBuffer
	require.ErrorContains(t, run(t.Context(), []string{"-demo", "-decision-log", t.TempDir()}, &out, io.Discard), "-decision-log")
	require.Empty(t, out.String())
}

func TestDemo(t *testing.T) {
	if testing.Short() {
		t.Skip("takes ten seconds of waiting")
	}
	t.Parallel()
	decisions := filepath.Join(t.TempDir(), "decisions.jsonl")
	var out lockedBuffer
	require.NoError(t, run(t.Context(), []string{"-demo", "-decision-log", decisions}, &out, io.Discard))
	text := out.String()
	for _, want := range append([]string{"affinity_kept", "gpu-1 dies", "gpu-1 is back", "tokens the servers had", "affinity_kept "}, demoNames[:]...) {
		require.Contains(t, text, want)
	}
	require.NotContains(t, text, "\x1b[", "no colours where there is no terminal")
	for n := range 3 {
		require.Regexp(t, fmt.Sprintf(`gpu-%d +\d+ attempts; in the ledger now: 0`, n), text)
	}
	data, err := os.ReadFile(decisions)
	require.NoError(t, err)
	require.GreaterOrEqual(t, bytes.Count(data, []byte("\n")), demoSessions*demoTurns)
}
