package router

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/kvpolicy/kvpolicy"
	"github.com/kvpolicy/kvpolicy/examples/internal/vllmlike"
	"github.com/kvpolicy/kvpolicy/track"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func newTestRouter(t testing.TB, change func(*Config)) *Router {
	t.Helper()
	c := DefaultConfig()
	transport := &http.Transport{}
	c.Client = &http.Client{Transport: transport}
	c.ScrapeEvery, c.ScrapeTimeout, c.Backoff, c.MaxBackoff = 5*time.Millisecond, time.Second, 20*time.Millisecond, 80*time.Millisecond
	if change != nil {
		change(&c)
	}
	r, err := New(c)
	require.NoError(t, err)
	t.Cleanup(func() {
		r.Close()
		transport.CloseIdleConnections()
	})
	return r
}

func eventually(t *testing.T, what string, is func() bool) {
	t.Helper()
	require.Eventually(t, is, 10*time.Second, time.Millisecond, what)
}

// nowhere are instances at which nobody listens.
func nowhere(t *testing.T, n int) []Instance {
	t.Helper()
	var urls []string
	for at := range n {
		urls = append(urls, fmt.Sprintf("http://127.0.0.1:%d", at+1))
	}
	all, err := ParseURLs(strings.Join(urls, ","))
	require.NoError(t, err)
	return all
}

func ids(all []Instance) (names []string) {
	for _, i := range all {
		names = append(names, i.ID)
	}
	return names
}

// still is a router that does nothing by itself.
func still(c *Config) { c.ScrapeEvery, c.Failures, c.Policy.MaxMetricsAgeSeconds = time.Hour, 1<<30, 0 }

func TestRequestsThatComeAtOnceSpread(t *testing.T) {
	r := newTestRouter(t, still)
	require.NoError(t, r.SetInstances(nowhere(t, 8)))
	var counts [9]atomic.Int64
	var work sync.WaitGroup
	body, err := ParseBody([]byte(`{"prompt":"`+strings.Repeat("x", 4000)+`"}`), false)
	require.NoError(t, err)
	r.config.Tokenize = false
	for n := range 800 {
		work.Add(1)
		go func() {
			defer work.Done()
			own := *body
			own.Text = []byte(strings.ReplaceAll(string(body.Text), "xx", fmt.Sprintf("%03d", n)))
			a, err := r.NewCall(context.Background(), &own, "").Next()
			if err != nil {
				t.Error(err)
				return
			}
			var port int
			_, err = fmt.Sscanf(a.Target.URL.Port(), "%d", &port)
			if err != nil {
				t.Error(err)
			}
			counts[port].Add(1)
		}()
	}
	work.Wait()
	for port := 1; port <= 8; port++ {
		require.EqualValues(t, 100, counts[port].Load(), "instance %d", port)
	}
}

func TestInstancesJoinChangeAndLeave(t *testing.T) {
	r := newTestRouter(t, still)
	select {
	case <-r.Synced():
		t.Fatal("nothing was told")
	default:
	}
	all := nowhere(t, 3)
	require.NoError(t, r.SetInstances(all))
	<-r.Synced()
	require.Equal(t, ids(all), ids(r.Instances()))

	call := r.NewCall(context.Background(), nil, "session")
	a, err := call.Next()
	require.NoError(t, err)
	all[1].Draining = true
	require.NoError(t, r.SetInstances(all[:2]))
	require.Equal(t, ids(all[:1]), ids(r.Instances()), "one drains, one has left")
	a.End(Answered, nil, "") // wherever it was, and be it gone
	for range 20 {
		b, err := r.NewCall(context.Background(), nil, "").Next()
		require.NoError(t, err)
		require.Equal(t, all[0].ID, b.Target.ID)
		b.End(Answered, nil, "")
	}
	for _, test := range []struct {
		path   string
		change func(all []Instance)
	}{
		{"instances[1]: kvpolicy: prefill_rate", func(all []Instance) { all[1].Info.PrefillRate = -1 }},
		{"instances[1]: kvpolicy: id", func(all []Instance) { all[1].ID = all[0].ID }},
		{"instances[1]: kvpolicy: kv_capacity_tokens", func(all []Instance) { all[1].Info.KVCapacityTokens = -1 }},
	} {
		bad := nowhere(t, 2)
		bad[0].ID = "new"
		test.change(bad)
		require.ErrorContains(t, r.SetInstances(bad), test.path)
		require.Equal(t, ids(all[:1]), ids(r.Instances()), "nothing has changed")
	}
	require.NoError(t, r.SetInstances(nil))
	_, err = r.NewCall(context.Background(), nil, "").Next()
	var refused *Refusal
	require.ErrorAs(t, err, &refused)
	require.Equal(t, http.StatusServiceUnavailable, refused.Status)
	require.Equal(t, kvpolicy.NoAvailableInstance, refused.Reason)
	require.Equal(t, "1", refused.RetryAfterSeconds())
}

func TestAPolicyThatNeedsMoreThanIsKnown(t *testing.T) {
	r := newTestRouter(t, func(c *Config) { still(c); c.Policy = kvpolicy.HazardAware() })
	require.ErrorContains(t, r.SetInstances(nowhere(t, 1)), "instances[0]: kvpolicy: decode_rate")
	all := nowhere(t, 1)
	all[0].Info.DecodeRate = 50
	require.NoError(t, r.SetInstances(all))
	_, err := New(Config{})
	require.ErrorContains(t, err, "policy")
}

func TestDownAndUpAgain(t *testing.T) {
	server, err := vllmlike.Start(vllmlike.DefaultConfig())
	require.NoError(t, err)
	defer server.Kill()
	r := newTestRouter(t, nil)
	all, err := ParseURLs(server.URL())
	require.NoError(t, err)
	require.NoError(t, r.SetInstances(all))
	ready := func(n int) func() bool { return func() bool { return len(r.Instances()) == n } }

	server.Kill()
	eventually(t, "scrapes fail", ready(0))
	require.NoError(t, server.Revive())
	eventually(t, "it is tried again", ready(1))

	server.SetFaults(vllmlike.Faults{Unhealthy: true})
	fail := func() {
		for range r.config.Failures {
			a, err := r.NewCall(context.Background(), nil, "").Next()
			if err != nil {
				return
			}
			a.End(Failed, nil, "test")
		}
	}
	fail()
	require.True(t, ready(0)())
	time.Sleep(3 * r.config.MaxBackoff)
	require.True(t, ready(0)(), "while it says that it is not well, it stays down, though it can be scraped")
	server.SetFaults(vllmlike.Faults{})
	eventually(t, "it is well", ready(1))

	// A failure here and there is none.
	for range 20 {
		for _, how := range []Outcome{Failed, Failed, Answered} {
			a, err := r.NewCall(context.Background(), nil, "").Next()
			require.NoError(t, err)
			a.End(how, nil, "test")
			a.End(Failed, nil, "only the first end counts")
		}
	}
	require.True(t, ready(1)())
}

func TestCallsThatAvoidAndFallBack(t *testing.T) {
	r := newTestRouter(t, func(c *Config) { still(c); c.Fallbacks = 9 })
	all := nowhere(t, 4)
	require.NoError(t, r.SetInstances(all))
	call := r.NewCall(context.Background(), nil, "")
	seen := map[string]bool{}
	for range 4 {
		a, err := call.Next()
		require.NoError(t, err)
		require.False(t, seen[a.Target.ID])
		seen[a.Target.ID] = true
		require.Len(t, a.Fallbacks, 4-len(seen))
		for _, f := range a.Fallbacks {
			require.False(t, seen[f.ID])
		}
		a.End(Failed, nil, "test")
		call.Avoid(a.Target.ID)
	}
	_, err := call.Next()
	require.ErrorContains(t, err, "no instance is available")
	require.Len(t, r.Instances(), 4)
	for _, s := range r.tracker.Stats(nil) {
		require.Zero(t, s.InFlight)
	}
}

func TestFilesAreWatched(t *testing.T) {
	r := newTestRouter(t, still)
	dir := t.TempDir()
	file := filepath.Join(dir, "instances.yaml")
	list := func(ports ...int) []byte {
		text := "instances:\n"
		for _, port := range ports {
			text += fmt.Sprintf("- url: http://127.0.0.1:%d\n", port)
		}
		return []byte(text)
	}
	require.NoError(t, os.WriteFile(file, list(1, 2), 0o600))
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- r.WatchFile(ctx, file) }()
	is := func(n int) func() bool { return func() bool { return len(r.Instances()) == n } }
	eventually(t, "it is read", is(2))
	require.NoError(t, os.WriteFile(file, list(1, 2, 3), 0o600))
	eventually(t, "it is written again", is(3))
	require.NoError(t, os.WriteFile(file, []byte("nonsense"), 0o600))
	time.Sleep(3 * settle)
	require.True(t, is(3)(), "what cannot be read changes nothing")
	require.NoError(t, os.Remove(file))
	time.Sleep(3 * settle)
	require.True(t, is(3)(), "nor does a file that is gone")
	require.NoError(t, os.WriteFile(filepath.Join(dir, "next"), list(1), 0o600))
	require.NoError(t, os.Rename(filepath.Join(dir, "next"), file))
	eventually(t, "it is replaced", is(1))
	// As Kubernetes does it: the file is a link into a folder that is a link.
	for n, name := range []string{"v1", "v2"} {
		require.NoError(t, os.Mkdir(filepath.Join(dir, name), 0o700))
		require.NoError(t, os.WriteFile(filepath.Join(dir, name, "instances.yaml"), list([]int{1, 2, 3, 4}[:n+2]...), 0o600))
	}
	require.NoError(t, os.Remove(file))
	require.NoError(t, os.Symlink("v1", filepath.Join(dir, "data")))
	require.NoError(t, os.Symlink(filepath.Join("data", "instances.yaml"), file))
	eventually(t, "the link is there", is(2))
	require.NoError(t, os.Symlink("v2", filepath.Join(dir, "data.next")))
	require.NoError(t, os.Rename(filepath.Join(dir, "data.next"), filepath.Join(dir, "data")))
	eventually(t, "the link leads elsewhere", is(3))
	require.NoError(t, os.RemoveAll(dir))
	time.Sleep(3 * settle)
	require.True(t, is(3)(), "nor does a folder that is gone")
	for n, made := range []string{"made again", "and watched again"} {
		require.NoError(t, os.MkdirAll(dir, 0o700))
		require.NoError(t, os.WriteFile(file, list([]int{1, 2}[:n+1]...), 0o600))
		eventually(t, made, is(n+1))
	}
	cancel()
	require.NoError(t, <-ended)
	require.Error(t, r.WatchFile(context.Background(), filepath.Join(dir, "missing", "file")))
}

func TestOtherFilesInTheFolderDoNotMatter(t *testing.T) {
	var lines atomic.Int64
	dir := t.TempDir()
	noise, err := os.Create(filepath.Join(dir, "log"))
	require.NoError(t, err)
	defer noise.Close()
	r := newTestRouter(t, func(c *Config) {
		still(c)
		c.Logger = slog.New(slog.NewTextHandler(writerFunc(func(p []byte) (int, error) {
			lines.Add(1)
			return noise.Write(p)
		}), nil))
	})
	file := filepath.Join(dir, "instances.yaml")
	require.NoError(t, os.WriteFile(file, []byte("instances: [{url: 'http://127.0.0.1:1'}]"), 0o600))
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- r.WatchFile(ctx, file) }()
	eventually(t, "it is read", func() bool { return len(r.Instances()) == 1 })

	// A fault that is logged into the folder is not logged again because of that.
	require.NoError(t, os.WriteFile(file, []byte("nonsense"), 0o600))
	eventually(t, "it is logged", func() bool { return lines.Load() >= 2 })
	time.Sleep(4 * settle)
	require.LessOrEqual(t, lines.Load(), int64(3), "joined, at most half a write, and the fault")

	// A change is seen though the folder is never left alone.
	require.NoError(t, os.WriteFile(file, []byte("instances: [{url: 'http://127.0.0.1:1'}, {url: 'http://127.0.0.1:2'}]"), 0o600))
	eventually(t, "it is read again", func() bool {
		_, err := noise.WriteString("x\n")
		return err == nil && len(r.Instances()) == 2
	})
	cancel()
	require.NoError(t, <-ended)
}

type writerFunc func(p []byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

func TestNamesAreLookedUp(t *testing.T) {
	r := newTestRouter(t, still)
	answers := make(chan []string)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		r.WatchDNS(ctx, "vllm", "8000", time.Millisecond, func(ctx context.Context, host string) ([]string, error) {
			select {
			case a := <-answers:
				if a == nil {
					return nil, errors.New("no such host")
				}
				return a, nil
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		})
	}()
	for _, step := range []struct{ answer, want []string }{
		{[]string{"10.0.0.2", "10.0.0.1", "10.0.0.1"}, []string{"10.0.0.1:8000", "10.0.0.2:8000"}},
		{nil, []string{"10.0.0.1:8000", "10.0.0.2:8000"}},
		{[]string{"::1", "10.0.0.2"}, []string{"10.0.0.2:8000"}},
		{[]string{"fd00::2", "fd00::1"}, []string{"[fd00::1]:8000", "[fd00::2]:8000"}},
		{[]string{"fd00::1", "10.0.0.3", "fd00::2"}, []string{"10.0.0.3:8000"}},
		{[]string{}, nil},
	} {
		answers <- step.answer
		eventually(t, "as it is told", func() bool { return fmt.Sprint(ids(r.Instances())) == fmt.Sprint(step.want) })
	}
	cancel()
	<-ended
}

func TestServersWithoutATokenizerAreNotAskedForLong(t *testing.T) {
	like := vllmlike.DefaultConfig()
	like.Tokenizer = false
	without, err := vllmlike.Start(like)
	require.NoError(t, err)
	defer without.Kill()
	with, err := vllmlike.Start(vllmlike.DefaultConfig())
	require.NoError(t, err)
	defer with.Kill()
	r := newTestRouter(t, still)
	all, err := ParseURLs(without.URL() + "," + with.URL())
	require.NoError(t, err)
	require.NoError(t, r.SetInstances(all))
	body, err := ParseBody([]byte(`{"model":"tiny","prompt":"12345678"}`), false)
	require.NoError(t, err)
	asked := 0
	for range 10 {
		if r.tokenize(context.Background(), body) != nil {
			asked++
		}
	}
	require.GreaterOrEqual(t, asked, 9)
	unknown, err := ParseBody([]byte(`{"model":"other","prompt":"12345678"}`), false)
	require.NoError(t, err)
	require.Nil(t, r.tokenize(context.Background(), unknown))
	require.Len(t, r.tokenize(context.Background(), body), 2, "a wrong model is the client's fault, and costs nobody the tokenizer")
}

func TestOneLongPromptDoesNotCostTheOthersTheTokenizer(t *testing.T) {
	slow := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, request *http.Request) {
		if data, _ := io.ReadAll(request.Body); len(data) > 1000 {
			<-request.Context().Done()
			return
		}
		_, _ = io.WriteString(w, `{"tokens":[1,2]}`)
	}))
	defer slow.Close()
	r := newTestRouter(t, func(c *Config) {
		still(c)
		c.TokenizeTimeout = 100 * time.Millisecond
	})
	all, err := ParseURLs(slow.URL)
	require.NoError(t, err)
	require.NoError(t, r.SetInstances(all))
	ask := func(bytes int) int {
		body, err := ParseBody([]byte(`{"prompt":"`+strings.Repeat("x", bytes)+`"}`), false)
		require.NoError(t, err)
		return len(r.tokenize(context.Background(), body))
	}
	require.Zero(t, ask(4000), "it takes too long")
	require.Equal(t, 2, ask(10), "a short one is still asked for")
	before := time.Now()
	require.Zero(t, ask(4000))
	require.Zero(t, ask(3000))
	require.Less(t, time.Since(before), 100*time.Millisecond, "long ones are not, for a while")
}

func TestRequestsFarTooLong(t *testing.T) {
	r := newTestRouter(t, still)
	require.NoError(t, r.SetInstances(nowhere(t, 1)))
	body, err := ParseBody([]byte(`{"prompt":"x","max_tokens":999999999999999999,"user":"`+strings.Repeat("é", 400)+`"}`), false)
	require.NoError(t, err)
	call := r.NewCall(context.Background(), body, "")
	require.LessOrEqual(t, len(call.request.Session), 256)
	a, err := call.Next()
	require.NoError(t, err)
	a.End(Abandoned, nil, "")
	call.request.ContextTokens = -1
	_, err = call.Next()
	var refused *Refusal
	require.ErrorAs(t, err, &refused)
	require.Equal(t, http.StatusBadRequest, refused.Status)
}

func TestTheLedgerMovesWithTheAnswer(t *testing.T) {
	r := newTestRouter(t, still)
	r.config.Tokenize = false
	require.NoError(t, r.SetInstances(nowhere(t, 1)))
	body, err := ParseBody([]byte(`{"prompt":"`+strings.Repeat("x", 4000)+`","stream":true}`), false)
	require.NoError(t, err)
	call := r.NewCall(context.Background(), body, "")
	a, err := call.Next()
	require.NoError(t, err)
	view := func() kvpolicy.Instance {
		return r.tracker.Snapshot(track.Request{Request: kvpolicy.Request{ID: "other"}}, time.Now(), nil).Instances[0]
	}
	require.EqualValues(t, 1000, view().PendingPrefillTokens)
	w := NewResponseReader("text/event-stream")
	for range 2 * progressEvery {
		_, _ = w.Write([]byte("data: {\"choices\":[{\"text\":\"a\"}]}\n\n"))
		a.Watched(w)
	}
	require.Zero(t, view().PendingPrefillTokens)
	require.EqualValues(t, 1, view().ActiveDecodes)
	require.EqualValues(t, 1000+2*progressEvery, view().OngoingTokens)
	a.End(Answered, w, "")
	require.Zero(t, view().Requests)
	require.EqualValues(t, 2*progressEvery, r.estimator.Completion("", 0))
	require.EqualValues(t, 1, r.Accuracy().Total().Decisions)

	// Without a stream, the prefill is taken for done when it should be.
	call = r.NewCall(context.Background(), &Body{Text: []byte(strings.Repeat("y", 400))}, "")
	a, err = call.Next()
	require.NoError(t, err)
	a.Unstreamed()
	require.EqualValues(t, 100, view().PendingPrefillTokens)
	eventually(t, "by the prediction", func() bool { return view().PendingPrefillTokens == 0 })
	require.Zero(t, view().ActiveDecodes)
	a.End(Answered, nil, "")
	require.Zero(t, view().Requests)
}

func TestTooLargeForNowAndForEver(t *testing.T) {
	r := newTestRouter(t, still)
	all := nowhere(t, 2)
	all[0].Info.KVCapacityTokens, all[1].Info.KVCapacityTokens = 100, 1000
	require.NoError(t, r.SetInstances(all))
	r.config.Tokenize = false
	for _, test := range []struct {
		bytes, status int
		avoid         bool
	}{
		{2000, http.StatusServiceUnavailable, true}, // the one that could hold it is not to be had
		{8000, http.StatusTooManyRequests, true},
		{8000, http.StatusTooManyRequests, false},
	} {
		call := r.NewCall(context.Background(), &Body{Text: make([]byte, test.bytes)}, "")
		if test.avoid {
			call.Avoid(all[1].ID)
		}
		_, err := call.Next()
		var refused *Refusal
		require.ErrorAs(t, err, &refused)
		require.Equal(t, test.status, refused.Status, err)
		require.Equal(t, kvpolicy.NoFeasibleInstance, refused.Reason)
		require.Equal(t, test.status == http.StatusServiceUnavailable, refused.RetryAfterSeconds() != "")
	}
}

// BenchmarkDecide is all that a request costs the router between its body and
// its being sent, and after it is answered: 64 instances, a prompt of 4,000 tokens.
func BenchmarkDecide(b *testing.B) {
	r := newTestRouter(b, still)
	var urls []string
	for at := range 64 {
		urls = append(urls, fmt.Sprintf("http://127.0.0.1:%d", at+1))
	}
	all, err := ParseURLs(strings.Join(urls, ","))
	require.NoError(b, err)
	require.NoError(b, r.SetInstances(all))
	r.config.Tokenize = false
	body := &Body{Text: make([]byte, 16_000)}
	b.ReportAllocs()
	for b.Loop() {
		a, err := r.NewCall(context.Background(), body, "session").Next()
		if err != nil {
			b.Fatal(err)
		}
		a.End(Answered, nil, "")
	}
}

// A request at which every instance fails must not take them all out, and one
// that fails others' requests must go.
func TestErrorsAreHeldBackUntilAnotherAnswers(t *testing.T) {
	for _, test := range []struct {
		name string
		ends []Outcome // of the attempts of a call, each at another instance
		bad  bool      // in the answer, that the request is
		down int       // instances, after as many calls as take one out
	}{
		{"all fail alike", []Outcome{Errored, Errored, Errored}, false, 0},
		{"another answers", []Outcome{Errored, Answered}, false, 2},
		{"another finds it bad", []Outcome{Errored, Answered}, true, 0},
		{"another does not answer at all", []Outcome{Errored, Failed}, false, 2},
		{"the client goes", []Outcome{Errored, Abandoned}, false, 0},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := newTestRouter(t, func(c *Config) { still(c); c.Failures = 3 })
			require.NoError(t, r.SetInstances(nowhere(t, 3)))
			// Which instance a call begins with is a matter of its random name, and
			// only so many errors without an answer between them take one out.
			for n := 0; n < 20 || n < 5000 && len(r.Instances()) > 3-test.down; n++ {
				call := r.NewCall(context.Background(), nil, "")
				for _, how := range test.ends {
					a, err := call.Next()
					if err != nil {
						break
					}
					if test.bad && how == Answered {
						call.Absolve()
					}
					a.End(how, nil, "test")
					call.Avoid(a.Target.ID)
				}
			}
			require.Len(t, r.Instances(), 3-test.down)
		})
	}
}
