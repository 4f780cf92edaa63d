package vllmlike

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

func (p *process) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/chat/completions", func(w http.ResponseWriter, r *http.Request) { p.generate(w, r, true) })
	mux.HandleFunc("POST /v1/completions", func(w http.ResponseWriter, r *http.Request) { p.generate(w, r, false) })
	mux.HandleFunc("GET /v1/models", func(w http.ResponseWriter, _ *http.Request) {
		c := p.server.config
		writeJSON(w, http.StatusOK, map[string]any{"object": "list", "data": []any{map[string]any{
			"id": c.Model, "object": "model", "created": p.scheduler.started.Unix(), "owned_by": "vllm", "max_model_len": c.Blocks * c.BlockTokens}}})
	})
	if p.server.config.Tokenizer {
		mux.HandleFunc("POST /tokenize", p.tokenize)
	}
	mux.HandleFunc("GET /health", func(w http.ResponseWriter, _ *http.Request) {
		if f, _, _ := p.server.draw(); f.Unhealthy {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	})
	page := p.metrics()
	mux.HandleFunc("GET /metrics", func(w http.ResponseWriter, r *http.Request) {
		p.server.mu.Lock()
		p.server.scrapes++
		p.server.mu.Unlock()
		page.ServeHTTP(w, r)
	})
	mux.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusNotFound, map[string]string{"detail": "Not Found"})
	})
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !p.begin() {
			panic(http.ErrAbortHandler)
		}
		defer p.work.Done()
		if f, _, _ := p.server.draw(); f.Hang {
			select {
			case <-r.Context().Done():
			case <-p.ctx.Done():
			}
			panic(http.ErrAbortHandler)
		}
		mux.ServeHTTP(w, r)
	})
}

// metrics is what vLLM's page has that routers read, under the same names.
func (p *process) metrics() http.Handler {
	registry, s, c := prometheus.NewRegistry(), p.scheduler, p.server.config
	labels := prometheus.Labels{"engine": "0", "model_name": c.Model}
	gauge := func(name string, value func() float64) {
		registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, ConstLabels: labels}, value))
	}
	counter := func(name string, value *int) {
		registry.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{Name: name, ConstLabels: labels}, func() float64 {
			s.mu.Lock()
			defer s.mu.Unlock()
			return float64(*value)
		}))
	}
	gauge("vllm:num_requests_running", func() float64 { running, _, _ := s.load(); return float64(running) })
	gauge("vllm:num_requests_waiting", func() float64 { _, waiting, _ := s.load(); return float64(waiting) })
	gauge("vllm:kv_cache_usage_perc", func() float64 { _, _, usage := s.load(); return usage })
	counter("vllm:prefix_cache_queries_total", &s.queries)
	counter("vllm:prefix_cache_hits_total", &s.hits)
	counter("vllm:prompt_tokens_total", &s.prompted)
	counter("vllm:generation_tokens_total", &s.decoded)
	registry.MustRegister(
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "vllm:cache_config_info", ConstLabels: prometheus.Labels{
			"engine": "0", "block_size": strconv.Itoa(c.BlockTokens), "num_gpu_blocks": strconv.Itoa(c.Blocks),
			"cache_dtype": "auto", "gpu_memory_utilization": "0.9", "num_cpu_blocks": "None"}}, func() float64 { return 1 }),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "process_start_time_seconds"}, func() float64 {
			return float64(s.started.UnixNano()) / 1e9
		}))
	return promhttp.HandlerFor(registry, promhttp.HandlerOpts{})
}

func writeJSON(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(v) // fails when the client has gone
}

// fail answers with an error as vLLM words it.
func fail(w http.ResponseWriter, status int, kind, format string, args ...any) {
	writeJSON(w, status, map[string]any{"error": map[string]any{"message": fmt.Sprintf(format, args...), "type": kind, "param": nil, "code": status}})
}

// transferParams are vLLM's kv_transfer_params.
type transferParams struct {
	RemoteDecode   bool     `json:"do_remote_decode"`
	RemotePrefill  bool     `json:"do_remote_prefill"`
	RemoteEngineID *string  `json:"remote_engine_id"`
	RemoteBlockIDs []uint64 `json:"remote_block_ids"`
	RemoteHost     *string  `json:"remote_host"`
	RemotePort     *int     `json:"remote_port"`
}

// generation is the body of a request.
type generation struct {
	Model    string `json:"model"`
	Messages []struct {
		Role    string          `json:"role"`
		Content json.RawMessage `json:"content"`
	} `json:"messages"`
	Prompt              json.RawMessage `json:"prompt"`
	MaxTokens           *int            `json:"max_tokens"`
	MaxCompletionTokens *int            `json:"max_completion_tokens"`
	MinTokens           int             `json:"min_tokens"`
	Stream              bool            `json:"stream"`
	StreamOptions       *struct {
		IncludeUsage bool `json:"include_usage"`
	} `json:"stream_options"`
	Transfer *transferParams `json:"kv_transfer_params"`
}

// The tokens that stand around messages.
const (
	startToken = 1
	endToken   = 2
)

// encode makes a token of each four bytes.
func encode(dst []uint32, text string) []uint32 {
	for len(text) > 0 {
		n := min(4, len(text))
		h := fnv.New32a()
		_, _ = h.Write([]byte(text[:n]))
		dst = append(dst, h.Sum32()>>1+16)
		text = text[n:]
	}
	return dst
}

// tokens is the prompt, by a chat template much like those in use.
func (g *generation) tokens(chat bool) ([]uint32, error) {
	if !chat {
		var text string
		var ids []uint32
		if json.Unmarshal(g.Prompt, &text) == nil {
			return encode(nil, text), nil
		}
		err := json.Unmarshal(g.Prompt, &ids)
		return ids, err
	}
	var all []uint32
	for _, m := range g.Messages {
		text := string(m.Content)
		var plain string
		if json.Unmarshal(m.Content, &plain) == nil {
			text = plain
		}
		all = append(encode(encode(append(all, startToken), m.Role), text), endToken)
	}
	if len(all) == 0 {
		return nil, errors.New("messages must not be empty")
	}
	return encode(append(all, startToken), "assistant"), nil
}

// syllable is the text of a token of an answer: four bytes.
func syllable(seed uint32, at int) string {
	const consonants, vowels = "bdfgklmnprstvz", "aeiou"
	n := seed ^ uint32(at)*2654435761
	n ^= n >> 15
	text := string(consonants[n%14]) + string(vowels[n/14%5]) + string(consonants[n/70%14])
	return text + " "
}

// read reads a request, or answers why it is none.
func (p *process) read(w http.ResponseWriter, r *http.Request, chat bool) (g generation, prompt []uint32, ok bool) {
	if err := json.NewDecoder(r.Body).Decode(&g); err != nil {
		fail(w, http.StatusBadRequest, "BadRequestError", "%v", err)
		return g, nil, false
	}
	if c := p.server.config; g.Model != "" && g.Model != c.Model {
		fail(w, http.StatusNotFound, "NotFoundError", "The model `%s` does not exist.", g.Model)
		return g, nil, false
	}
	prompt, err := g.tokens(chat || g.Messages != nil)
	if err != nil {
		fail(w, http.StatusBadRequest, "BadRequestError", "%v", err)
		return g, nil, false
	}
	return g, prompt, true
}

func (p *process) tokenize(w http.ResponseWriter, r *http.Request) {
	if _, prompt, ok := p.read(w, r, false); ok {
		c := p.server.config
		writeJSON(w, http.StatusOK, map[string]any{"count": len(prompt), "max_model_len": c.Blocks * c.BlockTokens, "tokens": prompt, "token_strs": nil})
	}
}

var (
	errBroken = errors.New("the response is to break off here")
	errGone   = errors.New("the client has gone")
)

func (p *process) generate(w http.ResponseWriter, r *http.Request, chat bool) {
	note := p.server.came(r.Header.Get("X-Request-Id"))
	g, prompt, ok := p.read(w, r, chat)
	if !ok {
		return
	}
	c := p.server.config
	most := 16
	if g.MaxTokens != nil {
		most = *g.MaxTokens
	}
	if g.MaxCompletionTokens != nil {
		most = *g.MaxCompletionTokens
	}
	if most < 1 || g.MinTokens > most || g.StreamOptions != nil && !g.Stream {
		fail(w, http.StatusBadRequest, "BadRequestError", "max_tokens, min_tokens or stream_options is wrong")
		return
	}
	if longest := c.Blocks * c.BlockTokens; len(prompt)+most > longest {
		fail(w, http.StatusBadRequest, "BadRequestError", "This model's maximum context length is %d tokens.", longest)
		return
	}
	note(func(s *Seen) { s.PromptTokens = len(prompt) })
	h := fnv.New32a()
	for _, token := range prompt {
		_, _ = h.Write([]byte{byte(token), byte(token >> 8), byte(token >> 16), byte(token >> 24)})
	}
	a := answer{w: w, g: &g, chat: chat, seed: h.Sum32(), id: r.Header.Get("X-Request-Id"), prompt: len(prompt), model: c.Model}
	var output []uint32
	for at := range most {
		output = encode(output, syllable(a.seed, at))
	}
	transfer := time.Duration(-1)
	if t := g.Transfer; t != nil && c.Transfer != nil {
		note(func(s *Seen) { s.RemoteDecode, s.RemotePrefill = t.RemoteDecode, t.RemotePrefill })
		if t.RemotePrefill {
			name := held(t)
			took, there := c.Transfer.fetch(name)
			if !there {
				fail(w, http.StatusInternalServerError, "InternalServerError", "no KV is held as %s", name)
				return
			}
			transfer = took
		}
	}

	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	defer context.AfterFunc(p.ctx, cancel)()
	_, fails, breaksAfter := p.server.draw()
	err := p.scheduler.run(ctx, prompt, output, transfer, func(n int) {
		a.cached = n
		note(func(s *Seen) { s.CachedTokens = n })
	}, func(token int) error {
		if fails || token == breaksAfter {
			return errBroken
		}
		note(func(s *Seen) { s.Completed++ })
		return a.token(token)
	})
	switch {
	case fails:
		fail(w, http.StatusInternalServerError, "InternalServerError", "EngineDeadError")
		return
	case err != nil: // the process has died, the client has gone, or it is to break off
		panic(http.ErrAbortHandler)
	}
	if t := g.Transfer; t != nil && t.RemoteDecode && c.Transfer != nil {
		engine, port, host := "engine-"+p.server.address, 5600, "127.0.0.1"
		a.transfer = &transferParams{RemotePrefill: true, RemoteEngineID: &engine, RemoteBlockIDs: p.scheduler.hashes(prompt), RemoteHost: &host, RemotePort: &port}
		c.Transfer.hold(held(a.transfer), len(prompt))
	}
	if a.end(most) == nil {
		note(func(s *Seen) { s.Answered = true })
	}
}

// held is the name under which KV is held for another server.
func held(t *transferParams) string {
	if t.RemoteEngineID == nil {
		return "nothing"
	}
	return fmt.Sprint(*t.RemoteEngineID, t.RemoteBlockIDs)
}

// answer writes a response.
type answer struct {
	w        http.ResponseWriter
	g        *generation
	chat     bool
	seed     uint32
	id       string
	model    string
	prompt   int
	cached   int
	begun    bool
	text     strings.Builder
	transfer *transferParams
}

func (a *answer) base(object string) map[string]any {
	prefix := "cmpl-"
	if a.chat {
		prefix = "chatcmpl-"
	}
	return map[string]any{"id": prefix + a.id, "object": object, "created": time.Now().Unix(), "model": a.model}
}

func (a *answer) event(choice map[string]any) error {
	object := "text_completion"
	if a.chat {
		object = "chat.completion.chunk"
	}
	v := a.base(object)
	v["choices"] = []any{}
	if choice != nil {
		choice["index"] = 0
		v["choices"] = []any{choice}
	} else {
		v["usage"] = a.usage(a.text.Len() / 4)
	}
	data, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return a.send(string(data))
}

func (a *answer) send(data string) error {
	if _, err := a.w.Write([]byte("data: " + data + "\n\n")); err != nil {
		return errGone
	}
	return http.NewResponseController(a.w).Flush()
}

func (a *answer) token(at int) error {
	text := syllable(a.seed, at)
	a.text.WriteString(text)
	if !a.g.Stream {
		return nil
	}
	if !a.begun {
		a.begun = true
		a.w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
		if a.chat {
			if err := a.event(map[string]any{"delta": map[string]any{"role": "assistant", "content": ""}, "finish_reason": nil}); err != nil {
				return err
			}
		}
	}
	if a.chat {
		return a.event(map[string]any{"delta": map[string]any{"content": text}, "finish_reason": nil})
	}
	return a.event(map[string]any{"text": text, "finish_reason": nil})
}

func (a *answer) usage(completed int) map[string]any {
	return map[string]any{"prompt_tokens": a.prompt, "completion_tokens": completed, "total_tokens": a.prompt + completed,
		"prompt_tokens_details": map[string]any{"cached_tokens": a.cached}}
}

// end writes what follows the last token.
func (a *answer) end(completed int) error {
	if a.g.Stream {
		last := map[string]any{"text": "", "finish_reason": "length"}
		if a.chat {
			last = map[string]any{"delta": map[string]any{}, "finish_reason": "length"}
		}
		err := a.event(last)
		if err == nil && a.g.StreamOptions != nil && a.g.StreamOptions.IncludeUsage {
			err = a.event(nil)
		}
		if err == nil {
			err = a.send("[DONE]")
		}
		return err
	}
	object, choice := "text_completion", map[string]any{"index": 0, "text": a.text.String(), "finish_reason": "length"}
	if a.chat {
		object, choice = "chat.completion", map[string]any{"index": 0, "finish_reason": "length",
			"message": map[string]any{"role": "assistant", "content": a.text.String()}}
	}
	v := a.base(object)
	v["choices"], v["usage"] = []any{choice}, a.usage(completed)
	if a.transfer != nil {
		v["kv_transfer_params"] = a.transfer
	}
	writeJSON(a.w, http.StatusOK, v)
	return nil
}
