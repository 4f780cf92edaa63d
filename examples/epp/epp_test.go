package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	modev3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extproc "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/kvpolicy/kvpolicy"
	"github.com/kvpolicy/kvpolicy/examples/internal/router"
	"github.com/kvpolicy/kvpolicy/examples/internal/vllmlike"
	"github.com/kvpolicy/kvpolicy/track"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// picker is a picker in front of vLLM-like servers, and a client of it.
type picker struct {
	t       *testing.T
	servers []*vllmlike.Server
	router  *router.Router
	client  extproc.ExternalProcessorClient
}

func startPicker(t *testing.T, servers int, change func(*router.Config, *processor)) *picker {
	t.Helper()
	p := &picker{t: t}
	like := vllmlike.DefaultConfig()
	like.PrefillRate, like.DecodeRate, like.Slowdown = 1e7, 1e5, 0
	var err error
	p.servers, err = vllmlike.StartMany(servers, like)
	require.NoError(t, err)
	scraping := &http.Client{Transport: &http.Transport{}}
	config := router.DefaultConfig()
	config.Client, config.Fallbacks = scraping, 2
	config.ScrapeEvery, config.Backoff, config.MaxBackoff = 10*time.Millisecond, 30*time.Millisecond, 120*time.Millisecond
	service := &processor{sessionHeader: "X-Session-Id", maxBody: 1 << 20, requestMode: modev3.ProcessingMode_BUFFERED, decideAfter: 1 << 16}
	if change != nil {
		change(&config, service)
	}
	p.router, err = router.New(config)
	require.NoError(t, err)
	service.router = p.router
	var urls []string
	for _, s := range p.servers {
		urls = append(urls, s.URL())
	}
	all, err := router.ParseURLs(strings.Join(urls, ","))
	require.NoError(t, err)
	require.NoError(t, p.router.SetInstances(all))
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	server := grpc.NewServer()
	extproc.RegisterExternalProcessorServer(server, service)
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	connection, err := grpc.NewClient(listener.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	require.NoError(t, err)
	p.client = extproc.NewExternalProcessorClient(connection)
	t.Cleanup(func() {
		require.NoError(t, connection.Close())
		server.Stop()
		require.NoError(t, <-served)
		p.router.Close()
		scraping.CloseIdleConnections()
		for _, s := range p.servers {
			s.Kill()
		}
	})
	p.eventually("every instance is scraped", func() bool {
		for _, i := range p.snapshot().Instances {
			if i.MetricsAgeSeconds > 60 {
				return false
			}
		}
		return true
	})
	return p
}

func (p *picker) snapshot() kvpolicy.Snapshot {
	return p.router.Tracker().Snapshot(track.Request{Request: kvpolicy.Request{ID: "probe"}}, time.Now(), nil)
}

func (p *picker) eventually(what string, is func() bool) {
	p.t.Helper()
	require.Eventually(p.t, is, 10*time.Second, 2*time.Millisecond, what)
}

func (p *picker) inFlight() (n int64) {
	for _, s := range p.router.Tracker().Stats(nil) {
		n += s.InFlight
	}
	return n
}

// envoy is a proxy's side of one stream.
type envoy struct {
	t      *testing.T
	stream extproc.ExternalProcessor_ProcessClient
	cancel context.CancelFunc
	config *extproc.ProtocolConfiguration // sent with the first message
}

func (p *picker) open(config *extproc.ProtocolConfiguration) *envoy {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	p.t.Cleanup(cancel)
	stream, err := p.client.Process(ctx)
	require.NoError(p.t, err)
	return &envoy{p.t, stream, cancel, config}
}

func mode(request, response modev3.ProcessingMode_BodySendMode) *extproc.ProtocolConfiguration {
	return &extproc.ProtocolConfiguration{RequestBodyMode: request, ResponseBodyMode: response}
}

func (e *envoy) send(r *extproc.ProcessingRequest) {
	e.t.Helper()
	r.ProtocolConfig, e.config = e.config, nil
	require.NoError(e.t, e.stream.Send(r))
}

func (e *envoy) receive() *extproc.ProcessingResponse {
	e.t.Helper()
	r, err := e.stream.Recv()
	require.NoError(e.t, err)
	require.NoError(e.t, r.ValidateAll())
	return r
}

// silent checks that no answer comes.
func (e *envoy) silent() {
	e.t.Helper()
	came := make(chan any, 1)
	go func() {
		r, err := e.stream.Recv()
		came <- fmt.Sprint(r, err)
	}()
	select {
	case r := <-came:
		e.t.Fatalf("an answer came too early: %v", r)
	case <-time.After(30 * time.Millisecond):
	}
	e.cancel() // Recv is taken
	<-came
}

// half closes the proxy's side, and waits for the picker's end.
func (e *envoy) half() {
	e.t.Helper()
	require.NoError(e.t, e.stream.CloseSend())
	_, err := e.stream.Recv()
	require.ErrorIs(e.t, err, io.EOF)
}

// fails receives the error that ends the stream.
func (e *envoy) fails(code codes.Code) {
	e.t.Helper()
	_, err := e.stream.Recv()
	require.Equal(e.t, code, status.Code(err), "%v", err)
}

func headers(end bool, pairs ...string) *extproc.HttpHeaders {
	m := &corev3.HeaderMap{}
	for at := 0; at < len(pairs); at += 2 {
		m.Headers = append(m.Headers, &corev3.HeaderValue{Key: pairs[at], RawValue: []byte(pairs[at+1])})
	}
	return &extproc.HttpHeaders{Headers: m, EndOfStream: end}
}

func requestHeaders(end bool, pairs ...string) *extproc.ProcessingRequest {
	pairs = append([]string{":method", "POST", ":path", "/v1/chat/completions"}, pairs...)
	return &extproc.ProcessingRequest{Request: &extproc.ProcessingRequest_RequestHeaders{RequestHeaders: headers(end, pairs...)}}
}

func requestBody(data string, end bool) *extproc.ProcessingRequest {
	return &extproc.ProcessingRequest{Request: &extproc.ProcessingRequest_RequestBody{RequestBody: &extproc.HttpBody{Body: []byte(data), EndOfStream: end}}}
}

func requestTrailers() *extproc.ProcessingRequest {
	return &extproc.ProcessingRequest{Request: &extproc.ProcessingRequest_RequestTrailers{RequestTrailers: &extproc.HttpTrailers{}}}
}

func responseHeaders(end bool, pairs ...string) *extproc.ProcessingRequest {
	return &extproc.ProcessingRequest{Request: &extproc.ProcessingRequest_ResponseHeaders{ResponseHeaders: headers(end, pairs...)}}
}

func responseBody(data string, end bool) *extproc.ProcessingRequest {
	return &extproc.ProcessingRequest{Request: &extproc.ProcessingRequest_ResponseBody{ResponseBody: &extproc.HttpBody{Body: []byte(data), EndOfStream: end}}}
}

// destination is what a response says of where to go, in the headers and in
// the metadata, which must be the same.
func (e *envoy) destination(r *extproc.ProcessingResponse) []string {
	e.t.Helper()
	change := r.GetRequestHeaders().GetResponse()
	if change == nil {
		change = r.GetRequestBody().GetResponse()
	}
	var value string
	for _, h := range change.GetHeaderMutation().GetSetHeaders() {
		require.Equal(e.t, "x-gateway-destination-endpoint", h.GetHeader().GetKey())
		require.Equal(e.t, corev3.HeaderValueOption_OVERWRITE_IF_EXISTS_OR_ADD, h.GetAppendAction())
		value = string(h.GetHeader().GetRawValue())
	}
	require.NotEmpty(e.t, value, "%v", r)
	require.True(e.t, change.GetClearRouteCache())
	require.Equal(e.t, map[string]any{"envoy.lb": map[string]any{"x-gateway-destination-endpoint": value}}, r.GetDynamicMetadata().AsMap())
	return strings.Split(value, ",")
}

// noDestination checks that a response lets the request go on as it is.
func noDestination(t *testing.T, r *extproc.ProcessingResponse) {
	t.Helper()
	require.Nil(t, r.GetDynamicMetadata())
	require.Nil(t, r.GetRequestHeaders().GetResponse().GetHeaderMutation())
	require.Nil(t, r.GetImmediateResponse())
}

// immediate is the status and the text of an answer in place of an endpoint.
func (e *envoy) immediate(want int) (headers map[string]string, body string) {
	e.t.Helper()
	i := e.receive().GetImmediateResponse()
	require.NotNil(e.t, i)
	require.EqualValues(e.t, want, i.GetStatus().GetCode())
	headers = map[string]string{}
	for _, h := range i.GetHeaders().GetSetHeaders() {
		headers[h.GetHeader().GetKey()] = string(h.GetHeader().GetRawValue())
	}
	require.Equal(e.t, "application/json", headers["content-type"])
	_, err := e.stream.Recv()
	require.ErrorIs(e.t, err, io.EOF, "nothing follows")
	return headers, string(i.GetBody())
}

func prompt(text, more string) string {
	return fmt.Sprintf(`{"model":"tiny","messages":[{"role":"user","content":%q}]%s}`, text, more)
}

const (
	none     = modev3.ProcessingMode_NONE
	streamed = modev3.ProcessingMode_STREAMED
	buffered = modev3.ProcessingMode_BUFFERED
	partial  = modev3.ProcessingMode_BUFFERED_PARTIAL
	duplex   = modev3.ProcessingMode_FULL_DUPLEX_STREAMED
)

// TestBodyModes goes through a whole exchange in each body mode. The prompt has
// been seen by the second instance alone, so that a picker which reads the body
// picks that.
func TestBodyModes(t *testing.T) {
	text := strings.Repeat("a long shared prefix ", 2000)
	body := prompt(text, "")
	length := fmt.Sprint(len(body))
	for _, test := range []struct {
		name      string
		config    *extproc.ProtocolConfiguration
		readsBody bool
		run       func(t *testing.T, e *envoy) []string
	}{
		{"buffered", mode(buffered, none), true, func(t *testing.T, e *envoy) []string {
			e.send(requestHeaders(false, "content-length", length))
			noDestination(t, e.receive())
			e.send(requestBody(body, true))
			return e.destination(e.receive())
		}},
		{"a mode that is not told", nil, true, func(t *testing.T, e *envoy) []string {
			e.send(requestHeaders(false))
			noDestination(t, e.receive())
			e.send(requestBody(body, true))
			return e.destination(e.receive())
		}},
		{"buffered, with trailers", mode(buffered, none), true, func(t *testing.T, e *envoy) []string {
			e.send(requestHeaders(false))
			noDestination(t, e.receive())
			e.send(requestBody(body, false))
			at := e.destination(e.receive())
			e.send(requestTrailers())
			require.NotNil(t, e.receive().GetRequestTrailers())
			return at
		}},
		{"buffered, without headers", mode(buffered, none), true, func(t *testing.T, e *envoy) []string {
			e.send(requestBody(body, true))
			return e.destination(e.receive())
		}},
		{"buffered partial, all of it", mode(partial, none), true, func(t *testing.T, e *envoy) []string {
			e.send(requestHeaders(false))
			noDestination(t, e.receive())
			e.send(requestBody(body, true))
			return e.destination(e.receive())
		}},
		{"streamed, body kept back", mode(streamed, none), false, func(t *testing.T, e *envoy) []string {
			e.send(requestHeaders(false, "content-length", length))
			at := e.destination(e.receive())
			for _, part := range []string{body[:100], body[100:]} {
				e.send(requestBody(part, part != body[:100]))
				require.NotNil(t, e.receive().GetRequestBody())
			}
			return at
		}},
		{"streamed", &extproc.ProtocolConfiguration{RequestBodyMode: streamed, SendBodyWithoutWaitingForHeaderResponse: true}, true, func(t *testing.T, e *envoy) []string {
			e.send(requestHeaders(false))
			e.send(requestBody(body[:100], false))
			e.send(requestBody(body[100:], true))
			at := e.destination(e.receive())
			for range 2 {
				require.NotNil(t, e.receive().GetRequestBody())
			}
			return at
		}},
		{"streamed, with trailers", &extproc.ProtocolConfiguration{RequestBodyMode: streamed, SendBodyWithoutWaitingForHeaderResponse: true}, true, func(t *testing.T, e *envoy) []string {
			e.send(requestHeaders(false))
			e.send(requestBody(body, false))
			e.send(requestTrailers())
			at := e.destination(e.receive())
			require.NotNil(t, e.receive().GetRequestBody())
			require.NotNil(t, e.receive().GetRequestTrailers())
			return at
		}},
		{"full duplex", mode(duplex, none), true, func(t *testing.T, e *envoy) []string {
			e.send(requestHeaders(false))
			e.send(requestBody(body[:50], false))
			e.send(requestBody(body[50:], true))
			at := e.destination(e.receive())
			e.echoed(body, true)
			return at
		}},
		{"full duplex, with trailers", mode(duplex, none), true, func(t *testing.T, e *envoy) []string {
			e.send(requestHeaders(false))
			e.send(requestBody(body, false))
			e.send(requestTrailers())
			at := e.destination(e.receive())
			e.echoed(body, false)
			require.NotNil(t, e.receive().GetRequestTrailers())
			return at
		}},
		{"none", mode(none, none), false, func(t *testing.T, e *envoy) []string {
			e.send(requestHeaders(false, "content-length", length))
			return e.destination(e.receive())
		}},
		{"no body", mode(duplex, none), false, func(t *testing.T, e *envoy) []string {
			e.send(requestHeaders(true))
			return e.destination(e.receive())
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			p := startPicker(t, 3, nil)
			// The prompt goes to one instance, and is over there.
			parsed, err := router.ParseBody([]byte(body), false)
			require.NoError(t, err)
			call := p.router.NewCall(context.Background(), parsed, "")
			call.Only([]string{p.servers[1].Address()})
			first, err := call.Next()
			require.NoError(t, err)
			first.End(router.Answered, nil, "")

			e := p.open(test.config)
			at := test.run(t, e)
			require.Len(t, at, 3, "one and two fallbacks")
			require.ElementsMatch(t, at, []string{p.servers[0].Address(), p.servers[1].Address(), p.servers[2].Address()})
			if test.readsBody {
				require.Equal(t, p.servers[1].Address(), at[0])
			}
			require.EqualValues(t, 1, p.inFlight())
			e.send(responseHeaders(false, ":status", "200", "content-type", "application/json"))
			require.NotNil(t, e.receive().GetResponseHeaders())
			require.EqualValues(t, 1, p.inFlight(), "it is being answered")
			e.half()
			p.eventually("released", func() bool { return p.inFlight() == 0 })
		})
	}
}

// echoed receives a request's body that is sent back in parts.
func (e *envoy) echoed(want string, ends bool) {
	e.t.Helper()
	var got bytes.Buffer
	for got.Len() < len(want) {
		part := e.receive().GetRequestBody().GetResponse().GetBodyMutation().GetStreamedResponse()
		require.NotNil(e.t, part)
		require.LessOrEqual(e.t, len(part.GetBody()), 64<<10)
		got.Write(part.GetBody())
		require.Equal(e.t, ends && got.Len() == len(want), part.GetEndOfStream())
	}
	require.Equal(e.t, want, got.String())
}

// A body that is cut off, or of which more is to come than the picker waits
// for, still leads to where its beginning is cached.
func TestABodyThatIsCutOff(t *testing.T) {
	p := startPicker(t, 3, func(c *router.Config, s *processor) { c.Tokenize, s.decideAfter = false, 1<<15 })
	text := strings.Repeat("a long shared prefix ", 2000)
	body := fmt.Sprintf(`{"model":"tiny","messages":[{"role":"system","content":%q},{"role":"user","content":%q}]}`, text, strings.Repeat("x", 9000))
	e := p.open(mode(buffered, none))
	e.send(requestHeaders(false))
	e.receive()
	e.send(requestBody(body, true))
	home := e.destination(e.receive())[0]
	e.half()
	for _, test := range []struct {
		name   string
		config *extproc.ProtocolConfiguration
	}{
		{"buffered partial", mode(partial, none)},
		{"streamed", &extproc.ProtocolConfiguration{RequestBodyMode: streamed, SendBodyWithoutWaitingForHeaderResponse: true}},
	} {
		t.Run(test.name, func(t *testing.T) {
			for range 5 {
				e := p.open(test.config)
				e.send(requestHeaders(false, "content-length", fmt.Sprint(len(body))))
				if test.config.RequestBodyMode == partial {
					noDestination(t, e.receive())
				}
				e.send(requestBody(body[:len(body)-4000], false))
				require.Equal(t, home, e.destination(e.receive())[0])
				if test.config.RequestBodyMode == streamed {
					require.NotNil(t, e.receive().GetRequestBody())
					e.send(requestBody(body[len(body)-4000:], true))
					require.NotNil(t, e.receive().GetRequestBody(), "the rest is let through")
				}
				e.half()
			}
		})
	}
	p.eventually("released", func() bool { return p.inFlight() == 0 })
}

// The length of what was not read is taken from the headers, else from what came.
func TestWhatIsCutOffHasItsWeight(t *testing.T) {
	p := startPicker(t, 1, func(c *router.Config, s *processor) { c.Tokenize, s.decideAfter = false, 1<<12 })
	long := prompt(strings.Repeat("x", 40000), "")
	short := fmt.Sprintf(`{"messages":[{"role":"user","content":%q},{"role":"user","content":"%s`, strings.Repeat("x", 8000), strings.Repeat("y", 2000))
	streaming := &extproc.ProtocolConfiguration{RequestBodyMode: streamed, SendBodyWithoutWaitingForHeaderResponse: true}
	for _, test := range []struct {
		name, body string
		length     int64 // content-length, 0 for none
		want       int64 // pending tokens
	}{
		{"a message that has no end yet", long[:8192], 40000, 10000},
		{"no length", long[:8192], 0, 2048},
		{"some of the messages", short, 40000, 10000},
		{"a length that cannot be, and 8000 bytes are cached", short, 10, int64(len(short)+3)/4 - 2000},
		{"token ids", `{"prompt":[` + strings.Repeat("1,", 4096) + `1],"user":"`, 40000, 4097},
	} {
		t.Run(test.name, func(t *testing.T) {
			e := p.open(streaming)
			pairs := []string{}
			if test.length > 0 {
				pairs = append(pairs, "content-length", fmt.Sprint(test.length))
			}
			e.send(requestHeaders(false, pairs...))
			e.send(requestBody(test.body, false))
			e.destination(e.receive())
			require.NotNil(t, e.receive().GetRequestBody())
			i := p.snapshot().Instances[0]
			require.Equal(t, test.want, i.PendingPrefillTokens)
			e.half()
			p.eventually("released", func() bool { return p.inFlight() == 0 })
		})
	}
}

func TestTheResponseIsWatched(t *testing.T) {
	events := []string{
		`data: {"choices":[{"delta":{"role":"assistant","content":""}}]}` + "\n\n",
		`data: {"choices":[{"delta":{"content":"ba"}}]}` + "\n\nda", `ta: {"choices":[{"delta":{"content":"du"}}]}` + "\n\n",
		`data: {"choices":[],"usage":{"prompt_tokens":40,"completion_tokens":2}}` + "\n\n",
		"data: [DONE]\n\n",
	}
	for _, response := range []modev3.ProcessingMode_BodySendMode{streamed, duplex} {
		t.Run(response.String(), func(t *testing.T) {
			p := startPicker(t, 1, nil)
			e := p.open(mode(buffered, response))
			e.send(requestHeaders(false))
			e.receive()
			e.send(requestBody(prompt("hello", `,"stream":true`), true))
			e.destination(e.receive())
			require.EqualValues(t, 0, p.snapshot().Instances[0].ActiveDecodes)
			e.send(responseHeaders(false, ":status", "200", "content-type", "text/event-stream"))
			require.NotNil(t, e.receive().GetResponseHeaders())
			for at, event := range events {
				e.send(responseBody(event, false))
				back := e.receive().GetResponseBody()
				require.NotNil(t, back)
				if response == duplex {
					require.Equal(t, event, string(back.GetResponse().GetBodyMutation().GetStreamedResponse().GetBody()))
				} else {
					require.Nil(t, back.GetResponse())
				}
				if at == 0 {
					require.EqualValues(t, 1, p.snapshot().Instances[0].ActiveDecodes, "the first token was seen")
				}
			}
			require.Zero(t, p.inFlight(), "[DONE] is the end for whoever reads it")
			e.send(responseBody("", true))
			last := e.receive().GetResponseBody()
			if response == duplex {
				require.True(t, last.GetResponse().GetBodyMutation().GetStreamedResponse().GetEndOfStream())
			}
			e.half()
			require.EqualValues(t, 2, p.router.Estimator().Completion("tiny", 0), "the usage was read")
		})
	}
}

func TestRefusals(t *testing.T) {
	p := startPicker(t, 2, nil)
	p.eventually("the capacity is known", func() bool { return p.snapshot().Instances[1].KVCapacityTokens == 65536 })
	ask := func(body string) *envoy {
		e := p.open(mode(buffered, none))
		e.send(requestHeaders(false))
		e.receive()
		e.send(requestBody(body, true))
		return e
	}
	h, body := ask(prompt(strings.Repeat("abcd", 70_000), "")).immediate(http.StatusTooManyRequests)
	require.NotContains(t, h, "retry-after")
	require.Contains(t, body, "larger than the KV cache")
	for _, test := range []struct{ body, want string }{
		{`nonsense`, "body"}, {`{"messages":3}`, "messages"}, {`{"prompt":"x","max_tokens":-1}`, "max_tokens"}, {`{"prompt":"x"`, "body"},
		{`{"stream":"` + strings.Repeat("é", 40) + `"}`, "stream"}, {"{\"stream\":\"\xff\"}", "stream"}, {`[]`, "JSON object"},
	} {
		_, body := ask(test.body).immediate(http.StatusBadRequest)
		require.Contains(t, body, test.want)
	}
	ask(`{"prompt":"` + strings.Repeat("x", 1<<20) + `"}`).immediate(http.StatusRequestEntityTooLarge)
	e := p.open(mode(buffered, none))
	e.send(requestHeaders(false, "content-length", "2000000"))
	e.immediate(http.StatusRequestEntityTooLarge)

	for _, s := range p.servers {
		s.Kill()
	}
	p.eventually("all are down", func() bool { return len(p.router.Instances()) == 0 })
	h, body = ask(prompt("hello", "")).immediate(http.StatusServiceUnavailable)
	require.Equal(t, "1", h["retry-after"])
	require.Contains(t, body, "no instance is available")
	require.Zero(t, p.inFlight())
}

func TestTheProxySaysWhichEndpointsItAllows(t *testing.T) {
	p := startPicker(t, 3, nil)
	hint := func(v any) *corev3.Metadata {
		value, err := structpb.NewStruct(map[string]any{"x-gateway-destination-endpoint-subset": v})
		require.NoError(t, err)
		return &corev3.Metadata{FilterMetadata: map[string]*structpb.Struct{"envoy.lb.subset_hint": value}}
	}
	two := []any{p.servers[2].Address(), p.servers[0].Address(), "10.9.9.9:80"}
	for _, v := range []any{two, fmt.Sprintf("%v, %v", two[0], two[1])} {
		e := p.open(mode(none, none))
		r := requestHeaders(false)
		r.MetadataContext = hint(v)
		e.send(r)
		require.ElementsMatch(t, []string{p.servers[0].Address(), p.servers[2].Address()}, e.destination(e.receive()))
		e.half()
	}
	for _, v := range []any{[]any{}, []any{"10.9.9.9:80"}} {
		e := p.open(mode(none, none))
		r := requestHeaders(false)
		r.MetadataContext = hint(v)
		e.send(r)
		e.immediate(http.StatusServiceUnavailable)
	}
}

func TestTheProxySaysWhichEndpointServed(t *testing.T) {
	p := startPicker(t, 2, nil)
	for n := range 3 {
		e := p.open(mode(none, none))
		e.send(requestHeaders(false))
		at := e.destination(e.receive())
		r := responseHeaders(false, ":status", "200")
		served, err := structpb.NewStruct(map[string]any{"x-gateway-destination-endpoint-served": at[1]})
		require.NoError(t, err)
		r.MetadataContext = &corev3.Metadata{FilterMetadata: map[string]*structpb.Struct{"envoy.lb": served}}
		e.send(r)
		require.NotNil(t, e.receive().GetResponseHeaders())
		for _, s := range p.router.Tracker().Stats(nil) {
			if s.ID == at[1] {
				require.EqualValues(t, 1, s.InFlight, "request %d counts where it is served", n)
			} else {
				require.Zero(t, s.InFlight)
			}
		}
		e.half()
	}
	p.eventually("released", func() bool { return p.inFlight() == 0 })
}

func TestFailuresTakeAnInstanceOut(t *testing.T) {
	p := startPicker(t, 2, func(c *router.Config, _ *processor) {
		c.ScrapeEvery, c.Policy.MaxMetricsAgeSeconds = time.Hour, 0
	})
	bad := p.servers[0].Address()
	for range 100 {
		e := p.open(mode(none, none))
		e.send(requestHeaders(false))
		code := "200"
		if e.destination(e.receive())[0] == bad {
			code = "502"
		}
		e.send(responseHeaders(true, ":status", code))
		e.receive()
		e.half()
	}
	require.Len(t, p.router.Instances(), 1)
	require.Equal(t, p.servers[1].Address(), p.router.Instances()[0].Address())
}

func TestSessions(t *testing.T) {
	p := startPicker(t, 3, func(c *router.Config, _ *processor) {
		c.ScrapeEvery, c.Policy = time.Hour, kvpolicy.Sticky()
	})
	var homes []string
	for turn := range 4 {
		e := p.open(mode(buffered, none))
		e.send(requestHeaders(false, "x-session-id", "conversation"))
		e.receive()
		e.send(requestBody(prompt(strings.Repeat("words ", 100*(turn+1)), ""), true))
		homes = append(homes, e.destination(e.receive())[0])
		e.half()
	}
	require.Equal(t, []string{homes[0], homes[0], homes[0], homes[0]}, homes)
}

func TestStreamsThatEndTooEarly(t *testing.T) {
	p := startPicker(t, 1, nil)
	half := func(e *envoy) { e.half() }
	gone := func(e *envoy) { e.cancel() }
	for name, leave := range map[string]func(*envoy){"half-closed": half, "gone": gone} {
		for _, test := range []struct {
			name  string
			until func(e *envoy)
		}{
			{"at once", func(*envoy) {}},
			{"before the body", func(e *envoy) {
				e.send(requestHeaders(false))
				e.receive()
			}},
			{"in the middle of the body", func(e *envoy) {
				e.config = mode(duplex, none)
				e.send(requestHeaders(false))
				e.send(requestBody(`{"messages":[`, false))
			}},
			{"once decided", func(e *envoy) {
				e.config = mode(none, none)
				e.send(requestHeaders(false))
				e.destination(e.receive())
			}},
			{"in the middle of the response", func(e *envoy) {
				e.config = mode(none, streamed)
				e.send(requestHeaders(false))
				e.receive()
				e.send(responseHeaders(false, ":status", "200", "content-type", "text/event-stream"))
				e.receive()
				e.send(responseBody("data: {\"choices\":[{\"text\":\"a\"}]}\n\n", false))
				e.receive()
			}},
		} {
			t.Run(name+" "+test.name, func(t *testing.T) {
				e := p.open(nil)
				test.until(e)
				leave(e)
				p.eventually("released", func() bool { return p.inFlight() == 0 })
			})
		}
	}
	require.Len(t, p.router.Instances(), 1, "which is no fault of the instance")
}

func TestMalformedStreams(t *testing.T) {
	p := startPicker(t, 1, nil)
	for _, test := range []struct {
		name   string
		config *extproc.ProtocolConfiguration
		code   codes.Code
		send   func(e *envoy)
	}{
		{"an empty message", nil, codes.InvalidArgument, func(e *envoy) { e.send(&extproc.ProcessingRequest{}) }},
		{"headers twice", mode(duplex, none), codes.InvalidArgument, func(e *envoy) {
			e.send(requestHeaders(false))
			e.send(requestHeaders(false))
		}},
		{"headers after the body", mode(buffered, none), codes.InvalidArgument, func(e *envoy) {
			e.send(requestBody(prompt("x", ""), true))
			e.destination(e.receive())
			e.send(requestHeaders(false))
		}},
		{"a body before the headers", mode(duplex, none), codes.InvalidArgument, func(e *envoy) { e.send(requestBody("{}", true)) }},
		{"a body that ends twice", mode(duplex, none), codes.InvalidArgument, func(e *envoy) {
			e.send(requestHeaders(false))
			e.send(requestBody(`{"prompt":"x"}`, true))
			e.destination(e.receive())
			e.receive()
			e.send(requestBody(`{"prompt":"x"}`, true))
		}},
		{"a mode of gRPC", mode(modev3.ProcessingMode_GRPC, none), codes.Unimplemented, func(e *envoy) { e.send(requestHeaders(false)) }},
		{"an unknown mode", mode(99, none), codes.Unimplemented, func(e *envoy) { e.send(requestHeaders(false)) }},
	} {
		t.Run(test.name, func(t *testing.T) {
			e := p.open(test.config)
			test.send(e)
			e.fails(test.code)
			p.eventually("released", func() bool { return p.inFlight() == 0 })
		})
	}
	t.Run("a response without a request", func(t *testing.T) {
		e := p.open(nil)
		e.send(responseHeaders(false, ":status", "?"))
		require.NotNil(t, e.receive().GetResponseHeaders())
		e.send(responseBody("x", true))
		require.NotNil(t, e.receive().GetResponseBody())
		e.half()
	})
	t.Run("observability mode", func(t *testing.T) {
		e := p.open(mode(none, none))
		r := requestHeaders(false)
		r.ObservabilityMode = true
		e.send(r)
		e.silent()
		require.Zero(t, p.inFlight())
	})
}
