package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/kvpolicy/kvpolicy"
	"github.com/kvpolicy/kvpolicy/examples/internal/router"
	"github.com/kvpolicy/kvpolicy/examples/internal/vllmlike"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// cluster is a gateway in front of vLLM-like servers, all of them real HTTP
// servers on loopback.
type cluster struct {
	t       *testing.T
	servers []*vllmlike.Server
	router  *router.Router
	gateway *gateway
	url     string
	client  *http.Client
	log     *lockedBuffer
}

// lockedBuffer is a buffer that a log is written to.
type lockedBuffer struct {
	mu     sync.Mutex
	buffer bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buffer.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buffer.String()
}

// fast is a server that takes hardly any time.
func fast() vllmlike.Config {
	c := vllmlike.DefaultConfig()
	c.PrefillRate, c.DecodeRate, c.Slowdown = 1e7, 1e5, 0
	return c
}

func start(t *testing.T, servers int, like vllmlike.Config, change func(*router.Config, *options)) *cluster {
	t.Helper()
	c := &cluster{t: t, log: &lockedBuffer{}}
	var err error
	c.servers, err = vllmlike.StartMany(servers, like)
	require.NoError(t, err)
	transport := &http.Transport{MaxIdleConnsPerHost: 128, DisableCompression: true}
	scraping := &http.Client{Transport: &http.Transport{}}
	config := router.DefaultConfig()
	config.Client, config.DecisionLog = scraping, c.log
	config.ScrapeEvery, config.Backoff, config.MaxBackoff = 10*time.Millisecond, 30*time.Millisecond, 120*time.Millisecond
	registry := prometheus.NewRegistry()
	config.Registerer = registry
	o := options{sessionHeader: "X-Session-Id", maxBody: 1 << 20, maxBodies: 1 << 30, bodyTimeout: 10 * time.Second, maxAttempts: 3, firstByte: 10 * time.Second, decisionHeaders: true, transport: transport}
	if change != nil {
		change(&config, &o)
	}
	c.router, err = router.New(config)
	require.NoError(t, err)
	var all []router.Instance
	for n, s := range c.servers {
		i, err := router.ParseURLs(s.URL())
		require.NoError(t, err)
		i[0].ID = fmt.Sprintf("server-%d", n)
		all = append(all, i...)
	}
	require.NoError(t, c.router.SetInstances(all))
	c.gateway = newGateway(c.router, registry, o)
	front := httptest.NewServer(c.gateway.handler())
	c.url = front.URL
	c.client = &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 128}}
	t.Cleanup(func() {
		c.client.CloseIdleConnections()
		front.Close()
		c.router.Close()
		transport.CloseIdleConnections()
		scraping.CloseIdleConnections()
		for _, s := range c.servers {
			s.Kill()
		}
	})
	c.eventually("every instance is scraped", func() bool {
		s := c.router.Tracker().Snapshot(trackRequest("probe"), time.Now(), nil)
		for _, i := range s.Instances {
			if i.MetricsAgeSeconds > 60 {
				return false
			}
		}
		return true
	})
	return c
}

func (c *cluster) eventually(what string, is func() bool) {
	c.t.Helper()
	require.Eventually(c.t, is, 10*time.Second, 2*time.Millisecond, what)
}

// inFlight is what all ledgers hold.
func (c *cluster) inFlight() (n int64) {
	for _, s := range c.router.Tracker().Stats(nil) {
		n += s.InFlight
	}
	return n
}

// reply is a response, read to its end.
type reply struct {
	status int
	header http.Header
	body   string
}

func (c *cluster) post(path, body string, header ...string) reply {
	c.t.Helper()
	request, err := http.NewRequest(http.MethodPost, c.url+path, strings.NewReader(body))
	require.NoError(c.t, err)
	for at := 0; at+1 < len(header); at += 2 {
		request.Header.Set(header[at], header[at+1])
	}
	return c.do(request)
}

func (c *cluster) do(request *http.Request) reply {
	c.t.Helper()
	response, err := c.client.Do(request)
	require.NoError(c.t, err)
	defer response.Body.Close()
	data, err := io.ReadAll(response.Body)
	require.NoError(c.t, err)
	return reply{response.StatusCode, response.Header, string(data)}
}

func (c *cluster) get(path string) reply {
	c.t.Helper()
	request, err := http.NewRequest(http.MethodGet, c.url+path, nil)
	require.NoError(c.t, err)
	return c.do(request)
}

// metric is the sum over the gateway's series of a name whose labels hold all of
// these.
func (c *cluster) metric(name string, labels ...string) (total float64) {
	c.t.Helper()
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(c.get("/metrics").body))
	require.NoError(c.t, err)
	for _, m := range families[name].GetMetric() {
		text := fmt.Sprint(m.GetLabel())
		matches := true
		for _, label := range labels {
			matches = matches && strings.Contains(text, `"`+label+`"`)
		}
		if matches {
			total += m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
		}
	}
	return total
}

func chat(text string, more string) string {
	content, _ := json.Marshal(text)
	return fmt.Sprintf(`{"model":"tiny","messages":[{"role":"user","content":%s}]%s}`, content, more)
}

func TestAnswersLikeTheServerItself(t *testing.T) {
	c := start(t, 1, fast(), nil)
	for _, test := range []struct{ path, body string }{
		{"/v1/chat/completions", chat("hello", `,"max_tokens":5`)},
		{"/v1/chat/completions", chat("hello", `,"max_tokens":5,"stream":true,"stream_options":{"include_usage":true}`)},
		{"/v1/completions", `{"model":"tiny","prompt":"hello","max_tokens":3}`},
		{"/v1/completions", `{"model":"tiny","prompt":[1,2,3],"max_tokens":3,"stream":true}`},
		{"/v1/completions", `{"model":"huge","prompt":"hello"}`},
		{"/v1/chat/completions", `{"model":"tiny","messages":[]}`},
	} {
		through := c.post(test.path, test.body, "X-Request-Id", "fixed")
		direct, err := http.Post(c.servers[0].URL()+test.path, "application/json", strings.NewReader(test.body))
		require.NoError(t, err)
		want, err := io.ReadAll(direct.Body)
		require.NoError(t, err)
		direct.Body.Close()
		require.Equal(t, direct.StatusCode, through.status, test.body)
		require.Equal(t, direct.Header.Get("Content-Type"), through.header.Get("Content-Type"))
		// Only the request's id, the time and what is cached by now may differ.
		require.Equal(t, mask(string(want)), mask(strings.ReplaceAll(through.body, "-fixed", "-")), test.body)
		require.Equal(t, "server-0", through.header.Get("X-Kvpolicy-Instance"))
		require.Equal(t, "no_affinity", through.header.Get("X-Kvpolicy-Reason"))
	}
	http.DefaultClient.CloseIdleConnections()
	require.Zero(t, c.inFlight())
}

func mask(s string) string {
	for _, key := range []string{`"created":`, `"cached_tokens":`} {
		parts := strings.Split(s, key)
		for at := 1; at < len(parts); at++ {
			parts[at] = strings.TrimLeft(parts[at], "0123456789")
		}
		s = strings.Join(parts, key)
	}
	return s
}

func TestStreamsWithoutBuffering(t *testing.T) {
	like := fast()
	like.DecodeRate = 50 // a token every 20 ms
	c := start(t, 1, like, nil)
	response, err := c.client.Post(c.url+"/v1/chat/completions", "application/json", strings.NewReader(chat("hello", `,"max_tokens":20,"stream":true`)))
	require.NoError(t, err)
	defer response.Body.Close()
	lines := bufio.NewScanner(response.Body)
	require.True(t, lines.Scan())
	require.Contains(t, lines.Text(), `"role":"assistant"`)
	// The first event is here, and the server is still at it: nothing waits for
	// the end.
	seen := c.servers[0].Seen()
	require.Less(t, seen[0].Completed, 20)
	c.eventually("the first token is in the ledger", func() bool {
		return c.router.Tracker().Snapshot(trackRequest("other"), time.Now(), nil).Instances[0].ActiveDecodes == 1
	})
	events, done := 1, false
	for lines.Scan() {
		if strings.HasPrefix(lines.Text(), "data:") {
			events++
			done = strings.Contains(lines.Text(), "[DONE]")
		}
	}
	require.NoError(t, lines.Err())
	require.Equal(t, 1+20+1+1, events, "the role, the tokens, the finish and the end")
	require.True(t, done)
	require.Zero(t, c.inFlight())
	require.EqualValues(t, 1, c.metric("kvpolicy_ttft_observed_seconds"))
}

func TestSessionsStayAtHome(t *testing.T) {
	c := start(t, 3, fast(), func(r *router.Config, _ *options) {
		// A scrape may see a request that has just ended.
		r.ScrapeEvery, r.Policy.MaxMetricsAgeSeconds = time.Hour, 0
	})
	for _, session := range []struct{ body, header string }{{"", "s1"}, {`,"user":"s2"`, ""}} {
		first := ""
		for turn := range 5 {
			r := c.post("/v1/chat/completions", chat(strings.Repeat(session.body+session.header+" ", 100*(turn+1)), session.body), "X-Session-Id", session.header)
			require.Equal(t, http.StatusOK, r.status, r.body)
			if turn == 0 {
				first = r.header.Get("X-Kvpolicy-Instance")
				continue
			}
			require.Equal(t, first, r.header.Get("X-Kvpolicy-Instance"))
			require.Equal(t, "affinity_kept", r.header.Get("X-Kvpolicy-Reason"))
		}
	}
}

func TestConversationsFindTheirPrefix(t *testing.T) {
	c := start(t, 3, fast(), func(r *router.Config, _ *options) { r.Policy = kvpolicy.UnifiedNoAffinity() })
	prompt := strings.Repeat("some shared words ", 200)
	for range 6 {
		require.Equal(t, http.StatusOK, c.post("/v1/completions", fmt.Sprintf(`{"prompt":%q,"max_tokens":2}`, prompt)).status)
	}
	// The server's own count says that the router's index is right.
	hits, at := 0, ""
	for _, s := range c.servers {
		for _, seen := range s.Seen() {
			require.Equal(t, (len(prompt)+3)/4, seen.PromptTokens)
			if seen.CachedTokens > 0 {
				hits++
				require.Equal(t, (seen.PromptTokens-1)/16*16, seen.CachedTokens)
				at = s.URL()
			}
		}
	}
	require.Equal(t, 5, hits, at)
	require.Positive(t, c.metric("kvpolicy_cached_prompt_tokens_total"))
}

func TestRetriesBeforeTheFirstByte(t *testing.T) {
	for _, test := range []struct {
		name  string
		fault vllmlike.Faults
		kill  bool
	}{
		{"answers with an error", vllmlike.Faults{ErrorRate: 1}, false},
		{"breaks off", vllmlike.Faults{BreakRate: 1}, false},
		{"is dead", vllmlike.Faults{}, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			c := start(t, 2, fast(), func(r *router.Config, _ *options) {
				r.ScrapeEvery, r.TokenizeTimeout = time.Hour, 100*time.Millisecond // health is by requests alone
				r.Policy.MaxMetricsAgeSeconds = 0
			})
			c.servers[0].SetFaults(test.fault)
			if test.kill {
				c.servers[0].Kill()
			}
			for n := range 40 { // of which ties send half to the faulty one
				r := c.post("/v1/completions", fmt.Sprintf(`{"prompt":"p%d","max_tokens":4}`, n))
				require.Equal(t, http.StatusOK, r.status, r.body)
				require.Equal(t, "server-1", r.header.Get("X-Kvpolicy-Instance"))
			}
			c.eventually("released", func() bool { return c.inFlight() == 0 })
			require.EqualValues(t, 3, c.metric("kvpolicy_retries_total", "server-1"), "then it is down")
			require.EqualValues(t, 3, c.metric("kvpolicy_attempts_total", "server-0", "failed"))
			require.Zero(t, c.metric("kvpolicy_instance_ready", "server-0"))
		})
	}
}

// What takes too long is not tried again, but counts against the instance.
func TestTooLate(t *testing.T) {
	c := start(t, 2, fast(), func(r *router.Config, o *options) {
		o.firstByte, r.Tokenize, r.ScrapeEvery, r.Policy.MaxMetricsAgeSeconds = 100*time.Millisecond, false, time.Hour, 0
		r.Failures = 2
	})
	for _, s := range c.servers {
		s.SetFaults(vllmlike.Faults{Hang: true})
	}
	for n := range 3 {
		require.Equal(t, http.StatusGatewayTimeout, c.post("/v1/completions", `{"prompt":"p"}`).status)
		require.EqualValues(t, n+1, c.metric("kvpolicy_attempts_total", "failed"))
	}
	require.Zero(t, c.metric("kvpolicy_retries_total"))
	require.Len(t, c.router.Instances(), 1)
}

// An answer that stands still is cut off, and one that goes on is not.
func TestAnAnswerThatStandsStill(t *testing.T) {
	for _, test := range []struct {
		name  string
		rests []time.Duration // before each event
		whole bool
	}{
		{"it stands still", []time.Duration{0, time.Hour}, false},
		{"it goes on", []time.Duration{0, 400 * time.Millisecond, 400 * time.Millisecond, 400 * time.Millisecond}, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			c := start(t, 1, fast(), func(r *router.Config, o *options) {
				o.idle, o.transport, r.ScrapeEvery, r.Policy.MaxMetricsAgeSeconds = time.Second, &restingTransport{test.rests}, time.Hour, 0
				r.Failures = 1
			})
			response, err := c.client.Post(c.url+"/v1/completions", "application/json", strings.NewReader(`{"prompt":"p","stream":true}`))
			require.NoError(t, err)
			defer response.Body.Close()
			data, err := io.ReadAll(response.Body)
			outcome := "answered"
			if test.whole {
				require.NoError(t, err)
			} else {
				require.ErrorIs(t, err, io.ErrUnexpectedEOF)
				outcome = "failed"
			}
			require.Contains(t, string(data), "event 0")
			c.eventually("released", func() bool { return c.inFlight() == 0 })
			require.EqualValues(t, 1, c.metric("kvpolicy_attempts_total", outcome))
			require.Equal(t, test.whole, len(c.router.Instances()) == 1)
		})
	}
}

// restingTransport answers with a stream that rests before each event.
type restingTransport struct{ rests []time.Duration }

func (s *restingTransport) RoundTrip(request *http.Request) (*http.Response, error) {
	from, to := io.Pipe()
	go func() {
		for n, rest := range s.rests {
			timer := time.NewTimer(rest)
			select {
			case <-request.Context().Done():
				timer.Stop()
				to.CloseWithError(request.Context().Err())
				return
			case <-timer.C:
			}
			_, _ = fmt.Fprintf(to, "data: event %d\n\n", n) // fails where nobody reads any more
		}
		to.Close()
	}()
	return &http.Response{StatusCode: http.StatusOK, Status: "200 OK", Header: http.Header{"Content-Type": {"text/event-stream"}}, Body: from, ContentLength: -1, Request: request}, nil
}

func TestAnInstanceThatCannotBeReached(t *testing.T) {
	c := start(t, 1, fast(), func(r *router.Config, o *options) {
		r.Tokenize, r.ScrapeEvery, r.Failures, o.maxAttempts = false, time.Hour, 1<<30, 1
		r.Policy.MaxMetricsAgeSeconds = 0
	})
	c.servers[0].Kill()
	r := c.post("/v1/completions", `{"prompt":"p"}`)
	require.Equal(t, http.StatusBadGateway, r.status)
	require.Contains(t, r.body, "the server could not be reached")
	require.NotContains(t, r.body, "127.0.0.1", "where it is, is no client's business")
}

func TestNothingIsRetriedAfterTheFirstByte(t *testing.T) {
	like := fast()
	c := start(t, 2, like, nil)
	for _, s := range c.servers {
		s.SetFaults(vllmlike.Faults{BreakRate: 1})
	}
	broken := 0
	for n := range 40 {
		response, err := c.client.Post(c.url+"/v1/completions", "application/json", strings.NewReader(fmt.Sprintf(`{"prompt":"p%d","max_tokens":8,"stream":true}`, n)))
		require.NoError(t, err)
		data, err := io.ReadAll(response.Body)
		response.Body.Close()
		if response.StatusCode == http.StatusOK {
			// What came stays, and the end is no clean one.
			require.ErrorIs(t, err, io.ErrUnexpectedEOF)
			require.NotContains(t, string(data), "[DONE]")
			require.NotEmpty(t, data)
			broken++
		}
	}
	require.Positive(t, broken)
	c.eventually("released", func() bool { return c.inFlight() == 0 })
	answers := map[string]int{}
	for _, s := range c.servers {
		for _, seen := range s.Seen() {
			if seen.Completed > 0 {
				answers[seen.ID]++
			}
		}
	}
	require.Len(t, answers, broken)
	for id, n := range answers {
		require.Equal(t, 1, n, id)
	}
}

func TestTheLastErrorOfAServerIsPassedOn(t *testing.T) {
	c := start(t, 2, fast(), nil)
	for _, s := range c.servers {
		s.SetFaults(vllmlike.Faults{ErrorRate: 1})
	}
	for range 5 {
		r := c.post("/v1/completions", `{"prompt":"p"}`)
		require.Equal(t, http.StatusInternalServerError, r.status)
		require.Contains(t, r.body, "EngineDeadError")
	}
	require.EqualValues(t, 10, c.metric("kvpolicy_attempts_total", "failed"))
	require.Len(t, c.router.Instances(), 2, "what nobody can answer is no instance's fault")
}

func TestRefusals(t *testing.T) {
	like := fast()
	like.Blocks = 8 // 128 tokens
	c := start(t, 2, like, nil)
	c.eventually("the capacity is known", func() bool {
		return c.router.Tracker().Snapshot(trackRequest("probe"), time.Now(), nil).Instances[0].KVCapacityTokens == 128
	})
	for n := 0; len(c.servers[0].Seen()) == 0 || len(c.servers[1].Seen()) == 0; n++ {
		require.Less(t, n, 1000)
		require.Equal(t, http.StatusOK, c.post("/v1/completions", fmt.Sprintf(`{"prompt":"p%d"}`, n)).status)
	}
	for _, s := range c.servers { // a scrape begins once the last is taken in
		before := s.Scrapes()
		c.eventually("it is known that the server has counted", func() bool { return s.Scrapes() >= before+3 })
	}
	r := c.post("/v1/completions", fmt.Sprintf(`{"prompt":%q}`, strings.Repeat("abcd", 500)))
	require.Equal(t, http.StatusTooManyRequests, r.status, r.body)
	require.Equal(t, "false", r.header.Get("X-Should-Retry"))
	require.Empty(t, r.header.Get("Retry-After"))
	require.EqualValues(t, 1, c.metric("kvpolicy_decisions_total", "no_feasible_instance"))

	for _, s := range c.servers {
		s.Kill()
	}
	c.eventually("all are down", func() bool { return len(c.router.Instances()) == 0 })
	r = c.post("/v1/chat/completions", chat("hello", ""))
	require.Equal(t, http.StatusServiceUnavailable, r.status)
	require.Equal(t, "1", r.header.Get("Retry-After"))
	var answer struct {
		Error struct{ Message, Type string }
	}
	require.NoError(t, json.Unmarshal([]byte(r.body), &answer))
	require.Equal(t, "no instance is available", answer.Error.Message)
	require.Equal(t, http.StatusServiceUnavailable, c.get("/health").status)
	require.Equal(t, http.StatusServiceUnavailable, c.get("/v1/models").status)

	for _, s := range c.servers {
		require.NoError(t, s.Revive())
	}
	c.eventually("they are up again", func() bool { return len(c.router.Instances()) == 2 })
	require.Equal(t, http.StatusOK, c.get("/health").status)
	require.Equal(t, http.StatusOK, c.post("/v1/chat/completions", chat("hello", "")).status)
	for _, s := range c.router.Tracker().Stats(nil) {
		require.EqualValues(t, 1, s.Restarts, "another process answers")
	}
}

func TestBadRequests(t *testing.T) {
	c := start(t, 1, fast(), nil)
	for _, test := range []struct {
		name, body string
		status     int
		want       string
	}{
		{"nothing", ``, 400, `"body is empty, must be a JSON object"`},
		{"no JSON", `hello`, 400, `"body is not JSON (invalid character 'h' looking for beginning of value), must be a JSON object"`},
		{"no object", `[]`, 400, `"body is another value, must be a JSON object"`},
		{"two objects", `{} {}`, 400, `"body is followed by something else, must be a JSON object"`},
		{"cut off", `{"prompt":"x"`, 400, `"body is cut off, must be a JSON object"`},
		{"messages", `{"messages":{}}`, 400, `"messages is {, must be an array"`},
		{"a message", `{"messages":[1]}`, 400, "messages[0]"},
		{"max_tokens", `{"prompt":"x","max_tokens":1.5}`, 400, "max_tokens"},
		{"a negative max_tokens", `{"prompt":"x","max_tokens":-1}`, 400, "max_tokens"},
		{"stream", `{"prompt":"x","stream":"yes"}`, 400, "stream"},
		{"prompt", `{"prompt":{}}`, 400, "prompt"},
		{"model", `{"model":7}`, 400, "model"},
		{"size", `{"prompt":"` + strings.Repeat("x", 1<<20) + `"}`, 413, "too large"},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := c.post("/v1/completions", test.body)
			require.Equal(t, test.status, r.status, r.body)
			require.Contains(t, r.body, test.want)
			require.Contains(t, r.body, "invalid_request_error")
			require.NotContains(t, r.body, "kvpolicy")
		})
	}
	require.Empty(t, c.servers[0].Seen())
	for _, test := range []struct {
		reply  reply
		status int
	}{
		{c.get("/v1/completions"), http.StatusMethodNotAllowed},
		{c.post("/v1/models", ""), http.StatusMethodNotAllowed},
		{c.get("/v1/nothing"), http.StatusNotFound},
		{c.post("/", ""), http.StatusNotFound},
	} {
		require.Equal(t, test.status, test.reply.status)
		require.Equal(t, test.status == http.StatusMethodNotAllowed, test.reply.header.Get("Allow") != "")
		require.Equal(t, "application/json", test.reply.header.Get("Content-Type"))
		var answer struct {
			Error struct{ Message, Type string }
		}
		require.NoError(t, json.Unmarshal([]byte(test.reply.body), &answer), test.reply.body)
		require.Equal(t, "invalid_request_error", answer.Error.Type)
	}
}

// A body that does not come is not waited for, and its connection ends.
func TestABodyThatDoesNotCome(t *testing.T) {
	c := start(t, 1, fast(), func(_ *router.Config, o *options) { o.bodyTimeout = 200 * time.Millisecond })
	connection, err := net.Dial("tcp", strings.TrimPrefix(c.url, "http://"))
	require.NoError(t, err)
	defer connection.Close()
	_, err = io.WriteString(connection, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
	require.NoError(t, err)
	answer, err := io.ReadAll(connection)
	require.NoError(t, err)
	require.Contains(t, string(answer), "HTTP/1.1 408")
	require.Contains(t, string(answer), "the body did not come in time")
	require.Empty(t, c.servers[0].Seen())
}

// The time limit is on the body alone.
func TestAnswersMayTakeLongerThanBodies(t *testing.T) {
	like := fast()
	like.DecodeRate = 40
	c := start(t, 1, like, func(_ *router.Config, o *options) { o.bodyTimeout = 100 * time.Millisecond })
	for range 2 {
		r := c.post("/v1/completions", `{"prompt":"x","max_tokens":12,"stream":true}`)
		require.Equal(t, http.StatusOK, r.status)
		require.Contains(t, r.body, "[DONE]")
	}
}

func TestBodiesThatAreThereAtOnce(t *testing.T) {
	like := fast()
	like.DecodeRate = 100
	c := start(t, 1, like, func(_ *router.Config, o *options) { o.maxBodies = 2000 })
	long := `{"prompt":"` + strings.Repeat("x", 1500) + `","stream":true,"max_tokens":%d}`
	response, err := c.client.Post(c.url+"/v1/completions", "application/json", strings.NewReader(fmt.Sprintf(long, 1000)))
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, response.StatusCode)
	r := c.post("/v1/completions", fmt.Sprintf(long, 1))
	require.Equal(t, http.StatusServiceUnavailable, r.status)
	require.Equal(t, "1", r.header.Get("Retry-After"))
	require.Equal(t, http.StatusOK, c.post("/v1/completions", `{"prompt":"x","max_tokens":1}`).status, "a small one has room")
	response.Body.Close()
	c.eventually("there is room", func() bool { return c.post("/v1/completions", fmt.Sprintf(long, 1)).status == http.StatusOK })
	c.eventually("all is released", func() bool {
		if !c.gateway.bodies.TryAcquire(2000) {
			return false
		}
		c.gateway.bodies.Release(2000)
		return true
	})
}

func TestModelsOfAllInstances(t *testing.T) {
	c := start(t, 2, fast(), nil)
	r := c.get("/v1/models")
	require.Equal(t, http.StatusOK, r.status)
	var list struct{ Data []struct{ ID string } }
	require.NoError(t, json.Unmarshal([]byte(r.body), &list))
	require.Len(t, list.Data, 1)
	require.Equal(t, "tiny", list.Data[0].ID)
}

func TestClientsThatGoAreReleased(t *testing.T) {
	like := fast()
	like.DecodeRate = 20
	c := start(t, 1, like, nil)
	for _, stream := range []string{"", `,"stream":true`} {
		ctx, cancel := context.WithCancel(context.Background())
		request, err := http.NewRequestWithContext(ctx, http.MethodPost, c.url+"/v1/completions", strings.NewReader(`{"prompt":"x","max_tokens":1000`+stream+`}`))
		require.NoError(t, err)
		gone := make(chan error, 1)
		go func() {
			response, err := c.client.Do(request)
			if err == nil {
				_, err = io.Copy(io.Discard, response.Body)
				response.Body.Close()
			}
			gone <- err
		}()
		c.eventually("it runs", func() bool { return c.inFlight() == 1 && c.servers[0].Busy() == 1 })
		cancel()
		require.ErrorIs(t, <-gone, context.Canceled)
		c.eventually("it is released, and the server told", func() bool { return c.inFlight() == 0 && c.servers[0].Busy() == 0 })
	}
	c.eventually("counted", func() bool { return c.metric("kvpolicy_attempts_total", "abandoned") == 2 })
	require.EqualValues(t, 1, c.metric("kvpolicy_instance_ready", "server-0"), "which is not the server's fault")
}

func TestEstimatesLearnFromUsage(t *testing.T) {
	like := fast()
	like.Tokenizer = false
	c := start(t, 1, like, nil)
	// A million bytes are about 250,000 tokens to whoever knows nothing; here
	// every token of the prompt is one of 4 bytes, and of the template more.
	body := func(n int) string {
		return fmt.Sprintf(`{"prompt":%q,"max_tokens":7}`, strings.Repeat("abcdefgh", n))
	}
	for range 30 {
		require.Equal(t, http.StatusOK, c.post("/v1/completions", body(20)).status)
	}
	require.EqualValues(t, 1000, c.router.Estimator().Prompt("", 4000))
	require.EqualValues(t, 7, c.router.Estimator().Completion("", 0))
	require.EqualValues(t, 3, c.router.Estimator().Completion("", 3))
	require.Contains(t, c.log.String(), `"context_tokens":40`)
}

func TestTokensAreAskedFor(t *testing.T) {
	c := start(t, 1, fast(), nil)
	require.Equal(t, http.StatusOK, c.post("/v1/chat/completions", chat(strings.Repeat("x", 1000), "")).status)
	seen := c.servers[0].Seen()
	require.Contains(t, c.log.String(), fmt.Sprintf(`"context_tokens":%d`, seen[0].PromptTokens))
	require.Equal(t, 1+1+250+1+1+3, seen[0].PromptTokens, "as its template has it")
}
