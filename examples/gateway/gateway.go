package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httputil"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"golang.org/x/sync/semaphore"

	"github.com/kvpolicy/kvpolicy"
	"github.com/kvpolicy/kvpolicy/examples/internal/router"
)

// options are what the gateway minds beside the router.
type options struct {
	sessionHeader   string
	maxBody         int64         // bytes
	maxBodies       int64         // bytes of the bodies of all requests that are there at once
	bodyTimeout     time.Duration // how long a request's body may take to come; 0 is for ever
	maxAttempts     int           // at one request, the first included
	firstByte       time.Duration // how long an attempt may take until its first byte; 0 is for ever
	idle            time.Duration // how long it may then stand still; 0 is for ever
	decisionHeaders bool          // whether responses say where they come from and why
	transport       http.RoundTripper
}

// gateway is the HTTP server in front of the instances.
type gateway struct {
	options
	router   *router.Router
	registry *prometheus.Registry
	proxy    *httputil.ReverseProxy
	bodies   *semaphore.Weighted // of maxBodies
	stopping atomic.Bool
}

func newGateway(r *router.Router, registry *prometheus.Registry, o options) *gateway {
	g := &gateway{options: o, router: r, registry: registry, bodies: semaphore.NewWeighted(o.maxBodies)}
	g.proxy = &httputil.ReverseProxy{
		// Where it goes is for RoundTrip to say.
		Rewrite:      func(p *httputil.ProxyRequest) { p.SetXForwarded() },
		Transport:    (*attempts)(g),
		ErrorHandler: g.failed,
		// What breaks off is counted; the log is not for each client that goes.
		ErrorLog: slog.NewLogLogger(r.Logger().Handler(), slog.LevelDebug),
	}
	return g
}

// handler serves the gateway's paths.
func (g *gateway) handler() http.Handler {
	mux := http.NewServeMux()
	for _, route := range []struct {
		method, path, allow string
		serve               http.HandlerFunc
	}{
		{"POST", "/v1/chat/completions", "POST", g.complete},
		{"POST", "/v1/completions", "POST", g.complete},
		{"GET", "/v1/models", "GET, HEAD", g.models},
		{"GET", "/health", "GET, HEAD", g.health},
		{"GET", "/metrics", "GET, HEAD", promhttp.HandlerFor(g.registry, promhttp.HandlerOpts{}).ServeHTTP},
	} {
		mux.HandleFunc(route.method+" "+route.path, route.serve)
		mux.HandleFunc(route.path, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Allow", route.allow)
			writeError(w, http.StatusMethodNotAllowed, "invalid_request_error", "the method must be "+route.method)
		})
	}
	mux.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) {
		writeError(w, http.StatusNotFound, "invalid_request_error", "there is nothing at this path")
	})
	responses := prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: "kvpolicy", Name: "responses_total",
		Help: "Responses to clients, by status."}, []string{"code"})
	g.registry.MustRegister(responses)
	return promhttp.InstrumentHandlerCounter(responses, mux)
}

// exchange is a request on its way through the proxy.
type exchange struct {
	call    *router.Call
	body    *router.Body
	data    []byte
	attempt *router.Attempt // the last
}

type exchangeKey struct{}

// complete serves a completion: it reads the request, and has the proxy send
// it. Whatever happens, the last attempt is ended here at the latest.
func (g *gateway) complete(w http.ResponseWriter, r *http.Request) {
	data, release, ok := g.readBody(w, r)
	defer release()
	if !ok {
		return
	}
	body, err := router.ParseBody(data, false)
	if err != nil {
		writeError(w, http.StatusBadRequest, "invalid_request_error", err.Error())
		return
	}
	x := &exchange{call: g.router.NewCall(r.Context(), body, r.Header.Get(g.sessionHeader)), body: body, data: data}
	defer func() {
		if x.attempt != nil {
			x.attempt.End(router.Abandoned, nil, "")
		}
	}()
	g.proxy.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), exchangeKey{}, x)))
}

// readBody reads the body of a request, or answers why it cannot. It is counted
// among those that are there until it is released.
func (g *gateway) readBody(w http.ResponseWriter, r *http.Request) (data []byte, release func(), ok bool) {
	from := &countedReader{from: http.MaxBytesReader(w, r.Body, g.maxBody), count: g.bodies}
	connection := http.NewResponseController(w)
	if g.bodyTimeout > 0 {
		_ = connection.SetReadDeadline(time.Now().Add(g.bodyTimeout)) // fails where the connection is gone
	}
	data, err := io.ReadAll(from)
	var tooLarge *http.MaxBytesError
	switch {
	case err == nil:
		_ = connection.SetReadDeadline(time.Time{})
	case errors.As(err, &tooLarge):
		writeError(w, http.StatusRequestEntityTooLarge, "invalid_request_error", "the body is too large")
	case errors.Is(err, errBodies):
		w.Header().Set("Retry-After", "1")
		writeError(w, http.StatusServiceUnavailable, "server_error", "too many requests are there already")
	case errors.Is(err, os.ErrDeadlineExceeded):
		writeError(w, http.StatusRequestTimeout, "invalid_request_error", "the body did not come in time")
	default:
		writeError(w, http.StatusBadRequest, "invalid_request_error", "the body breaks off")
	}
	return data, func() { g.bodies.Release(from.n) }, err == nil
}

var errBodies = errors.New("too many bytes are there already")

// countedReader counts what is read as it comes, so that a body which is
// announced and does not come takes no room.
type countedReader struct {
	from  io.Reader
	count *semaphore.Weighted
	n     int64 // bytes counted
}

// Read is part of io.Reader.
func (c *countedReader) Read(p []byte) (int, error) {
	n, err := c.from.Read(p)
	if !c.count.TryAcquire(int64(n)) {
		return 0, errBodies
	}
	c.n += int64(n)
	return n, err
}

// failed answers a request for which there is no response of an instance.
func (g *gateway) failed(w http.ResponseWriter, r *http.Request, err error) {
	var refused *router.Refusal
	switch {
	case errors.As(err, &refused):
		if after := refused.RetryAfterSeconds(); after != "" {
			w.Header().Set("Retry-After", after)
		}
		kind := "server_error"
		switch refused.Status {
		case http.StatusTooManyRequests:
			kind = "rate_limit_error"
			// No waiting makes it fit; OpenAI's clients mind this header.
			w.Header().Set("X-Should-Retry", "false")
		case http.StatusBadRequest:
			kind = "invalid_request_error"
		}
		writeError(w, refused.Status, kind, refused.Error())
	case r.Context().Err() != nil:
		// Nobody is there to read it; the status is for the metrics.
		w.WriteHeader(statusClientGone)
	case errors.Is(err, errFirstByte):
		writeError(w, http.StatusGatewayTimeout, "server_error", "the server did not begin to answer in time")
	default:
		// Addresses and the like are for whoever runs this.
		x := r.Context().Value(exchangeKey{}).(*exchange) // set by complete
		g.router.Logger().Warn("request failed", "request", x.call.ID(), "error", err)
		writeError(w, http.StatusBadGateway, "server_error", "the server could not be reached, or broke off before it answered")
	}
}

// statusClientGone is nginx's status for a request whose client has gone.
const statusClientGone = 499

// writeError answers with an error of OpenAI's form.
func writeError(w http.ResponseWriter, status int, kind, message string) {
	data, _ := json.Marshal(map[string]any{"error": map[string]any{"message": message, "type": kind, "param": nil, "code": status}}) // strings and numbers encode
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(append(data, '\n')) // fails when the client has gone
}

// health is for whoever sends requests here: none should come while no instance
// is ready, nor when this is about to stop.
func (g *gateway) health(w http.ResponseWriter, _ *http.Request) {
	if g.stopping.Load() {
		writeError(w, http.StatusServiceUnavailable, "server_error", "the gateway is stopping")
		return
	}
	if len(g.router.Instances()) == 0 {
		writeError(w, http.StatusServiceUnavailable, "server_error", "no instance is ready")
		return
	}
	_, _ = io.WriteString(w, "ok\n")
}

// modelsTimeout bounds the question which models an instance has.
const modelsTimeout = 5 * time.Second

// models answers with the models of all ready instances, each once.
func (g *gateway) models(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithTimeout(r.Context(), modelsTimeout)
	defer cancel()
	instances := g.router.Instances()
	lists := make([][]json.RawMessage, len(instances))
	var work sync.WaitGroup
	for at, i := range instances {
		work.Add(1)
		go func() {
			defer work.Done()
			lists[at] = g.modelsOf(ctx, r.Header, i)
		}()
	}
	work.Wait()
	seen, all, answered := map[string]bool{}, []json.RawMessage{}, false
	for _, list := range lists {
		answered = answered || list != nil
		for _, raw := range list {
			var m struct{ ID string }
			if json.Unmarshal(raw, &m) == nil && !seen[m.ID] {
				seen[m.ID] = true
				all = append(all, raw)
			}
		}
	}
	if !answered {
		w.Header().Set("Retry-After", "1")
		writeError(w, http.StatusServiceUnavailable, "server_error", "no instance is available")
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(map[string]any{"object": "list", "data": all}) // fails when the client has gone
}

// modelsOf is an instance's list; nil where it does not answer with one.
func (g *gateway) modelsOf(ctx context.Context, header http.Header, i router.Instance) []json.RawMessage {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, i.URL.JoinPath("/v1/models").String(), nil)
	if err != nil {
		return nil
	}
	request.Header["Authorization"] = header["Authorization"]
	response, err := g.transport.RoundTrip(request)
	if err != nil {
		return nil
	}
	defer response.Body.Close()
	var list struct{ Data []json.RawMessage }
	if response.StatusCode != http.StatusOK || json.NewDecoder(io.LimitReader(response.Body, 1<<20)).Decode(&list) != nil {
		return nil
	}
	return slices.Clip(append([]json.RawMessage{}, list.Data...))
}

// withMembers is a JSON object with members set or, where the value is nil,
// taken out. Numbers stay as they were written.
func withMembers(object []byte, set map[string]any) ([]byte, error) {
	var members map[string]json.RawMessage
	if err := json.Unmarshal(object, &members); err != nil {
		return nil, err
	}
	for key, value := range set {
		if value == nil {
			delete(members, key)
			continue
		}
		raw, err := json.Marshal(value)
		if err != nil {
			return nil, err
		}
		members[key] = raw
	}
	return json.Marshal(members)
}

// reusable is a body that can be sent again.
func reusable(to *http.Request, data []byte) {
	to.ContentLength = int64(len(data))
	to.GetBody = func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(data)), nil }
	to.Body, _ = to.GetBody() // never fails
	to.Header.Del("Content-Length")
	to.TransferEncoding = nil
}

// withoutSeparation is a policy whose prefills are all done where the request
// decodes.
func withoutSeparation(p kvpolicy.Policy) kvpolicy.Policy {
	p.Separation.Enabled = false
	return p
}

// joinPath puts a request's path behind an instance's own.
func joinPath(base, path string) string { return strings.TrimSuffix(base, "/") + path }
