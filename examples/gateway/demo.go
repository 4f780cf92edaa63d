package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/term"

	"github.com/kvpolicy/kvpolicy"
	"github.com/kvpolicy/kvpolicy/examples/internal/router"
	"github.com/kvpolicy/kvpolicy/examples/internal/vllmlike"
)

// The scripted load: each session begins with the system prompt that all share
// and a document of its own, and asks several times about it.
const (
	demoSessions      = 8
	demoTurns         = 4
	demoSystemTokens  = 800
	demoLeastDocument = 1200 // tokens
	demoMostDocument  = 4000
	demoAnswerTokens  = 32
	demoBetween       = 350 * time.Millisecond // sessions begin this far apart
	demoThink         = 700 * time.Millisecond // about, between two turns
	demoDeath         = 4 * time.Second        // when a server dies
	demoReturn        = 7 * time.Second        // when it is back
	demoLimit         = 50 * time.Second       // when the demo gives up
)

var demoNames = [demoSessions]string{"ada", "brouwer", "curie", "dirac", "erdos", "fermat", "galois", "hopper"}

// demonstration is the demo as it runs.
type demonstration struct {
	out     io.Writer
	colour  bool
	servers []*vllmlike.Server
	url     string
	client  *http.Client
	began   time.Time

	mu       sync.Mutex
	records  map[string][]router.Record // by call
	all      []router.Record
	names    map[string]string // of instances, by id
	prompted int64             // tokens, as the servers counted them
	cached   int64
}

// demo runs the demo. It ends by itself.
func demo(ctx context.Context, s *settings, stdout, stderr io.Writer) error {
	ctx, cancel := context.WithTimeout(ctx, demoLimit)
	defer cancel()
	like := vllmlike.DefaultConfig()
	config, err := s.shared.Config(stderr)
	if err != nil {
		return err
	}
	keep, err := s.shared.OpenDecisionLog()
	if err != nil {
		return err
	}
	// The policy's constants are those of the servers, which serve as well as any
	// hardware to see whether it predicts.
	config.Policy = withoutSeparation(config.Policy)
	config.Policy.Cost.PrefillRate = like.PrefillRate
	config.Policy.Cost.DecodeRate = like.DecodeRate
	config.Policy.Cost.DecodeIterationSeconds = like.Slowdown / like.DecodeRate
	config.ScrapeEvery, config.Backoff, config.Failures = 100*time.Millisecond, 500*time.Millisecond, 2

	d := &demonstration{out: stdout, colour: isTerminal(stdout), began: time.Now(), records: map[string][]router.Record{}, names: map[string]string{},
		client: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: demoSessions}}}
	defer d.client.CloseIdleConnections()
	if d.servers, err = vllmlike.StartMany(3, like); err != nil {
		return err
	}
	var instances []router.Instance
	for n, server := range d.servers {
		defer server.Kill()
		i, err := router.ParseURLs(server.URL())
		if err != nil {
			return err
		}
		i[0].ID = fmt.Sprintf("gpu-%d", n)
		instances = append(instances, i...)
	}
	var log bytes.Buffer
	config.DecisionLog = &log // written to under the recorder's lock, read when all is over
	config.OnDecision = d.decided
	config.Logger = slog.New(&eventHandler{d})
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	d.url = "http://" + listener.Addr().String()
	serving, stop := context.WithCancel(ctx)
	defer stop()
	var gateway *router.Router
	got := make(chan *router.Router, 1)
	ended := make(chan error, 1)
	go func() {
		ended <- serve(serving, listener, config, func(ctx context.Context, r *router.Router) error {
			got <- r
			return router.Fixed(instances)(ctx, r)
		}, s)
	}()
	select {
	case gateway = <-got:
	case err := <-ended:
		return err
	}
	d.head(like, len(instances))
	if err := d.load(ctx); err != nil {
		stop()
		return errors.Join(err, <-ended)
	}
	stop()
	if err := <-ended; err != nil {
		return err
	}
	d.summary(gateway, config.Policy)
	return d.keepLog(keep, log.Bytes())
}

func isTerminal(w io.Writer) bool {
	file, ok := w.(*os.File)
	if !ok || os.Getenv("NO_COLOR") != "" {
		return false
	}
	return term.IsTerminal(int(file.Fd()))
}

// paint colours a text by an ANSI code, where that is seen.
func (d *demonstration) paint(code, text string) string {
	if !d.colour {
		return text
	}
	return "\x1b[" + code + "m" + text + "\x1b[0m"
}

// instance is an instance's name in its colour, padded.
func (d *demonstration) instance(id string) string {
	codes := map[string]string{"gpu-0": "36", "gpu-1": "33", "gpu-2": "35"}
	return d.paint(codes[id], fmt.Sprintf("%-6s", id))
}

func (d *demonstration) printf(format string, args ...any) {
	d.mu.Lock()
	defer d.mu.Unlock()
	fmt.Fprintf(d.out, format, args...)
}

func (d *demonstration) clock() string { return fmt.Sprintf("%5.1fs", time.Since(d.began).Seconds()) }

// event prints what happened, between the lines of requests.
func (d *demonstration) event(text string) {
	d.printf("%s  %s\n", d.clock(), d.paint("1;31", "-- "+text))
}

// eventHandler prints what the router logs of instances, and no decisions:
// those are printed with what became of them.
type eventHandler struct{ d *demonstration }

func (h *eventHandler) Enabled(_ context.Context, l slog.Level) bool { return l >= slog.LevelInfo }
func (h *eventHandler) WithAttrs([]slog.Attr) slog.Handler           { return h }
func (h *eventHandler) WithGroup(string) slog.Handler                { return h }
func (h *eventHandler) Handle(_ context.Context, r slog.Record) error {
	text := r.Message
	if text != "instance down" && text != "instance up again" {
		return nil
	}
	r.Attrs(func(a slog.Attr) bool {
		if a.Key == "instance" {
			text += ": " + a.Value.String()
		}
		return true
	})
	h.d.event(text)
	return nil
}

func (d *demonstration) decided(r router.Record) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.records[r.Name] = append(d.records[r.Name], r)
	d.all = append(d.all, r)
}

func (d *demonstration) head(like vllmlike.Config, n int) {
	d.printf("%s\n\n", d.paint("1", "kvpolicy gateway: a scripted load"))
	d.printf("%d vLLM-like servers (prefill %.0f tokens/s, decode %.0f tokens/s, a prefix cache each) behind %s.\n", n, like.PrefillRate, like.DecodeRate, d.url)
	d.printf("%d sessions of %d turns share a system prompt of %d tokens, and have a document of their own.\n", demoSessions, demoTurns, demoSystemTokens)
	d.printf("gpu-1 dies at %v and is back at %v.\n", demoDeath, demoReturn)
	d.printf("A line is printed when its answer is complete, at that time since the start; queue, prefill, TTFT and seen are seconds.\n\n")
	d.printf("%s\n", d.paint("1", "  time  session turn  prompt  cached  where   why                          queue + prefill = TTFT predicted      seen   next best"))
}

// text is made of words whose number of tokens at the servers is known: four
// bytes are one.
func demoText(seed string, tokens int) string {
	var b strings.Builder
	for n := 0; b.Len() < 4*tokens; n++ {
		fmt.Fprintf(&b, "%s word %d. ", seed, n)
	}
	return b.String()[:4*tokens]
}

// load sends the sessions, while a server dies and comes back.
func (d *demonstration) load(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var work sync.WaitGroup
	defer work.Wait()
	work.Add(1)
	go func() {
		defer work.Done()
		if !pause(ctx, demoDeath) {
			return
		}
		d.event("gpu-1 dies, with all that it has cached")
		d.servers[1].Kill()
		if !pause(ctx, demoReturn-demoDeath) {
			return
		}
		d.event("gpu-1 is back, with nothing cached")
		if err := d.servers[1].Revive(); err != nil {
			cancel(err)
		}
	}()
	var sessions sync.WaitGroup
	for n, name := range demoNames {
		sessions.Add(1)
		go func() {
			defer sessions.Done()
			random := rand.New(rand.NewPCG(11, uint64(n)))
			if !pause(ctx, time.Duration(n)*demoBetween) {
				return
			}
			if err := d.session(ctx, name, random); err != nil {
				cancel(fmt.Errorf("session %s: %w", name, err))
			}
		}()
	}
	sessions.Wait()
	if err := context.Cause(ctx); err != nil {
		return err
	}
	return nil
}

// pause waits, and tells whether the context has not ended.
func pause(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

type demoMessage struct {
	Role    string `json:"role"`
	Content string `json:"content"`
}

// session is a conversation: each turn sends all that was said before.
func (d *demonstration) session(ctx context.Context, name string, random *rand.Rand) error {
	document := demoText(name, demoLeastDocument+random.IntN(demoMostDocument-demoLeastDocument))
	messages := []demoMessage{{"system", demoText("system", demoSystemTokens)}, {"user", document}}
	for turn := 1; turn <= demoTurns; turn++ {
		if turn > 1 {
			if !pause(ctx, demoThink/2+time.Duration(random.Int64N(int64(demoThink)))) {
				return nil
			}
			messages = append(messages, demoMessage{"user", demoText(fmt.Sprintf("%s asks %d", name, turn), 40)})
		}
		answer, err := d.turn(ctx, name, turn, messages)
		if err != nil {
			return err
		}
		messages = append(messages, demoMessage{"assistant", answer})
	}
	return nil
}

// turn sends a turn, prints what became of it, and returns the answer. A turn
// whose answer breaks off is sent again, as clients do.
func (d *demonstration) turn(ctx context.Context, name string, turn int, messages []demoMessage) (string, error) {
	for tries := 0; ; tries++ {
		answer, err := d.send(ctx, name, turn, messages)
		if err == nil || ctx.Err() != nil || tries == 3 {
			return answer, err
		}
		d.event(fmt.Sprintf("%s's answer breaks off (%v), and it asks again", name, err))
	}
}

func (d *demonstration) send(ctx context.Context, name string, turn int, messages []demoMessage) (string, error) {
	body, err := json.Marshal(map[string]any{"model": "tiny", "messages": messages, "max_tokens": demoAnswerTokens, "stream": true,
		"stream_options": map[string]any{"include_usage": true}})
	if err != nil {
		return "", err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, d.url+"/v1/chat/completions", bytes.NewReader(body))
	if err != nil {
		return "", err
	}
	request.Header.Set("X-Session-Id", name)
	began := time.Now()
	response, err := d.client.Do(request)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		data, _ := io.ReadAll(io.LimitReader(response.Body, 1000)) // what can be read of it
		return "", fmt.Errorf("%s: %s", response.Status, bytes.TrimSpace(data))
	}
	var answer strings.Builder
	var first time.Duration
	var usage router.Usage
	lines := bufio.NewScanner(response.Body)
	for lines.Scan() {
		data, ok := strings.CutPrefix(lines.Text(), "data: ")
		if !ok {
			continue
		}
		if first == 0 {
			first = time.Since(began)
		}
		var event struct {
			Choices []struct{ Delta demoMessage }
			Usage   *router.Usage
		}
		if json.Unmarshal([]byte(data), &event) != nil { // [DONE]
			continue
		}
		for _, choice := range event.Choices {
			answer.WriteString(choice.Delta.Content)
		}
		if event.Usage != nil {
			usage = *event.Usage
		}
	}
	if err := lines.Err(); err != nil {
		return "", err
	}
	d.mu.Lock()
	records := slices.Clone(d.records[response.Header.Get("X-Kvpolicy-Request")])
	d.prompted += usage.PromptTokens
	d.cached += usage.Details.CachedTokens
	d.mu.Unlock()
	for at, r := range records {
		d.row(name, turn, r, at == len(records)-1, first, usage)
	}
	return answer.String(), nil
}

// row prints an attempt; of the last the time to the first token was seen.
func (d *demonstration) row(name string, turn int, r router.Record, last bool, first time.Duration, u router.Usage) {
	c := r.Decision.Cost
	seen, cached := "failed", r.CachedTokens
	predicted, _ := r.Decision.PredictedSeconds()
	if last {
		seen, cached = fmt.Sprintf("%.2f s", first.Seconds()), u.Details.CachedTokens
	}
	next := ""
	if r.Decision.RunnerUp != "" {
		next = fmt.Sprintf("%s %+.3f", r.Decision.RunnerUp, r.Decision.Margin)
	}
	reason := r.Decision.Reason.String()
	if r.Attempt > 0 {
		reason += ", retry"
	}
	d.printf("%s  %-8s %2d  %6d  %6d  %s  %-27s  %5.2f + %7.2f = %12.2f s %9s   %s\n", d.clock(), name, turn, r.Snapshot.Request.ContextTokens, cached,
		d.instance(r.Decision.Target), reason, c.Contention+c.Queue, c.Prefill, predicted, seen, next)
}

// summary prints what came of it all.
func (d *demonstration) summary(r *router.Router, p kvpolicy.Policy) {
	d.mu.Lock()
	all := d.all
	prompted, cached := d.prompted, d.cached
	d.mu.Unlock()
	d.printf("\n%s\n", d.paint("1", "Where"))
	for _, s := range r.Tracker().Stats(nil) {
		n := 0
		for _, record := range all {
			if record.Decision.Target == s.ID {
				n++
			}
		}
		d.printf("  %s  %3d attempts; in the ledger now: %d; restarts seen: %d\n", d.instance(s.ID), n, s.InFlight, s.Restarts)
	}
	d.printf("\n%s\n%s", d.paint("1", "Why"), indent(r.Funnel().String()))
	d.printf("\n%s\n  Of %d prompt tokens the servers had %d cached: %.0f %%.\n", d.paint("1", "Cache"), prompted, cached, 100*float64(cached)/float64(max(1, prompted)))
	var lacking int64
	for _, record := range all {
		lacking += record.NewTokens
	}
	for _, name := range []string{"least_loaded", "lmetric"} {
		other, err := kvpolicy.Preset(name)
		if err != nil { // both are presets
			continue
		}
		other.Cost = p.Cost
		differs, its := 0, int64(0)
		for _, record := range all {
			o, err := other.Decide(record.Snapshot)
			if err != nil {
				continue
			}
			if o.Target != record.Decision.Target {
				differs++
			}
			for _, i := range record.Snapshot.Instances {
				if i.ID == o.Target {
					its += max(0, record.Snapshot.Request.ContextTokens-i.CachedTokens)
				}
			}
		}
		d.printf("  On the same snapshots %s would have decided %d of %d otherwise, with %d tokens to prefill in place of %d.\n", name, differs, len(all), its, lacking)
	}
	d.printf("\n%s\n%s", d.paint("1", "Time to the first token, predicted and observed"), indent(r.Accuracy().String()))
}

func indent(text string) string {
	return "  " + strings.ReplaceAll(strings.TrimRight(text, "\n"), "\n", "\n  ") + "\n"
}

// keepLog writes the decisions to where they can be replayed from: to a file of
// its own where there is none.
func (d *demonstration) keepLog(file *os.File, log []byte) error {
	if file == nil {
		var err error
		if file, err = os.CreateTemp("", "kvpolicy-decisions-*.jsonl"); err != nil {
			return err
		}
	}
	_, err := file.Write(log)
	if err := errors.Join(err, file.Close()); err != nil {
		return err
	}
	d.printf("\nThe decisions are in %s. To decide them by another policy, and see what changes and why:\n"+
		"  echo '{\"preset\":\"least_loaded\"}' > other.json\n  go run ./examples/decide -policy other.json -diff %s\n", file.Name(), file.Name())
	return nil
}
