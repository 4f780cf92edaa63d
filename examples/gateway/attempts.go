package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"time"

	"github.com/kvpolicy/kvpolicy"
	"github.com/kvpolicy/kvpolicy/examples/internal/router"
)

// attempts is the gateway as the proxy's transport: it decides where a request
// goes, and tries again elsewhere as long as nothing has come of it. A response
// that it returns has its first byte.
type attempts gateway

// RoundTrip is part of http.RoundTripper.
func (g *attempts) RoundTrip(request *http.Request) (*http.Response, error) {
	x := request.Context().Value(exchangeKey{}).(*exchange) // set by complete
	var last error
	for range g.maxAttempts {
		attempt, err := x.call.Next()
		if err != nil {
			return broken(request, last, err)
		}
		x.attempt = attempt
		response, err := g.try(request, x, attempt)
		if err == nil {
			if response.StatusCode >= http.StatusBadRequest {
				x.call.Absolve()
			}
			if g.decisionHeaders {
				response.Header.Set("X-Kvpolicy-Instance", attempt.Target.ID)
				response.Header.Set("X-Kvpolicy-Reason", attempt.Decision.Reason.String())
				response.Header.Set("X-Kvpolicy-Request", x.call.ID())
			}
			return response, nil
		}
		if gone := request.Context().Err(); gone != nil {
			attempt.End(router.Abandoned, nil, "")
			return nil, gone
		}
		var source *sourceError
		if errors.As(err, &source) {
			attempt.SourceFailed(err.Error())
			attempt.End(router.Abandoned, nil, "")
		} else {
			attempt.End(g.outcome(err), nil, err.Error())
			x.call.Avoid(attempt.Target.ID)
		}
		if errors.Is(err, errFirstByte) {
			// Mostly it is the load, to which another attempt would add; and the
			// client has waited long enough.
			return nil, err
		}
		last = err
	}
	return broken(request, last, last)
}

// outcome is how an attempt ended that has failed. A server answers 500 when it
// is broken and when it chokes on the request: where others are asked too, they
// tell which.
func (g *attempts) outcome(err error) router.Outcome {
	var status *statusError
	if g.maxAttempts > 1 && errors.As(err, &status) {
		switch status.response.StatusCode {
		case http.StatusInternalServerError, http.StatusNotImplemented:
			return router.Errored
		}
	}
	return router.Failed
}

// broken ends a request for which no instance is left: with the last response
// that one gave, else with the error.
func broken(request *http.Request, last, err error) (*http.Response, error) {
	var status *statusError
	if !errors.As(last, &status) {
		return nil, err
	}
	status.response.Request = request
	status.response.ContentLength = int64(len(status.body)) // it may have been longer
	status.response.Header.Set("Content-Length", strconv.Itoa(len(status.body)))
	status.response.Body = io.NopCloser(bytes.NewReader(status.body))
	return status.response, nil
}

// statusError is a response that is worth trying elsewhere.
type statusError struct {
	response *http.Response
	body     []byte
}

func (e *statusError) Error() string { return "the instance answered " + e.response.Status }

// sourceError is what keeps the source of a prefill from doing it.
type sourceError struct{ err error }

func (e *sourceError) Error() string { return "prefill: " + e.err.Error() }
func (e *sourceError) Unwrap() error { return e.err }

var (
	errFirstByte = errors.New("no byte came in time")
	errIdle      = errors.New("nothing more came in time")
)

// maxErrorBody bounds what is kept of a response that is not passed on, in bytes.
const maxErrorBody = 64 << 10

// try sends a request to an instance, and returns the response once its first
// byte is there.
func (g *attempts) try(request *http.Request, x *exchange, a *router.Attempt) (_ *http.Response, err error) {
	ctx, cancel := context.WithCancelCause(request.Context())
	defer func() {
		if err != nil {
			var source *sourceError
			switch {
			case context.Cause(ctx) != errFirstByte:
			case errors.As(err, &source):
				err = &sourceError{errFirstByte}
			default:
				err = errFirstByte
			}
			cancel(nil)
		}
	}()
	if g.firstByte > 0 {
		timer := time.AfterFunc(g.firstByte, func() { cancel(errFirstByte) })
		defer timer.Stop()
	}
	data := x.data
	if a.Decision.Action == kvpolicy.PrefillRemote {
		params, err := g.prefill(ctx, request, x, a)
		if err != nil {
			return nil, &sourceError{err}
		}
		a.Prefilled()
		if params != nil {
			if data, err = withMembers(data, map[string]any{"kv_transfer_params": params}); err != nil {
				return nil, err
			}
		}
	}
	if !x.body.Stream {
		a.Unstreamed()
	}
	response, err := g.transport.RoundTrip(g.outgoing(ctx, request, x, a.Target, data))
	if err != nil {
		return nil, err
	}
	if response.StatusCode >= http.StatusInternalServerError {
		kept, err := io.ReadAll(io.LimitReader(response.Body, maxErrorBody))
		response.Body.Close()
		if err != nil {
			return nil, err
		}
		return nil, &statusError{response, kept}
	}
	first := bufio.NewReader(response.Body)
	if _, err := first.Peek(1); err != nil && err != io.EOF {
		response.Body.Close()
		return nil, err
	}
	body := &watchedBody{body: response.Body, from: first, left: response.ContentLength, attempt: a, cancel: cancel, ctx: ctx, client: request.Context(),
		watch: router.NewResponseReader(response.Header.Get("Content-Type"))}
	if g.idle > 0 {
		body.idleFor = g.idle
		body.idle = time.AfterFunc(g.idle, func() { cancel(errIdle) })
	}
	response.Body = body
	return response, nil
}

// outgoing is a request as it goes to an instance.
func (g *attempts) outgoing(ctx context.Context, request *http.Request, x *exchange, to router.Instance, data []byte) *http.Request {
	out := request.Clone(ctx)
	out.URL.Scheme, out.URL.Host, out.Host = to.URL.Scheme, to.URL.Host, to.URL.Host
	out.URL.Path, out.URL.RawPath = joinPath(to.URL.Path, request.URL.Path), ""
	// Compressed, the response could not be watched.
	out.Header.Set("Accept-Encoding", "identity")
	if out.Header.Get("X-Request-Id") == "" {
		out.Header.Set("X-Request-Id", x.call.ID())
	}
	reusable(out, data)
	return out
}

// prefill has the source of a PrefillRemote prefill the prompt, by vLLM's
// protocol for KV connectors: the same request for one token that is not
// streamed, with kv_transfer_params that ask for a remote decode. The params of
// the response are what the target needs to fetch the KV; nil where the source
// has no connector, so that the target prefills by itself.
func (g *attempts) prefill(ctx context.Context, request *http.Request, x *exchange, a *router.Attempt) (json.RawMessage, error) {
	set := map[string]any{
		"kv_transfer_params": map[string]any{"do_remote_decode": true, "do_remote_prefill": false,
			"remote_engine_id": nil, "remote_block_ids": nil, "remote_host": nil, "remote_port": nil},
		"max_tokens": 1, "stream": false,
		"stream_options": nil, "min_tokens": nil, "max_completion_tokens": nil,
	}
	data, err := withMembers(x.data, set)
	if err != nil {
		return nil, err
	}
	response, err := g.transport.RoundTrip(g.outgoing(ctx, request, x, a.Source, data))
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("the source answered %s", response.Status)
	}
	var answer struct {
		Params json.RawMessage `json:"kv_transfer_params"`
	}
	if err := json.NewDecoder(io.LimitReader(response.Body, g.maxBody)).Decode(&answer); err != nil {
		return nil, err
	}
	if len(answer.Params) == 0 || string(answer.Params) == "null" {
		g.router.Logger().Warn("the source has no KV connector; the target prefills by itself", "source", a.Source.ID)
		return nil, nil
	}
	return answer.Params, nil
}

// watchedBody is the body of a response on its way to the client.
type watchedBody struct {
	body    io.ReadCloser
	from    io.Reader
	left    int64 // bytes to come, negative where unknown
	attempt *router.Attempt
	watch   *router.ResponseReader
	cancel  context.CancelCauseFunc
	ctx     context.Context // that cancel ends
	client  context.Context
	idle    *time.Timer // cancels where nothing comes for so long; nil for never
	idleFor time.Duration
}

// Read is part of io.ReadCloser.
func (b *watchedBody) Read(p []byte) (int, error) {
	// That a client is slow to take what came is not the instance's doing.
	if b.idle != nil {
		b.idle.Reset(b.idleFor)
	}
	n, err := b.from.Read(p)
	if b.idle != nil {
		b.idle.Stop()
	}
	if n > 0 {
		_, _ = b.watch.Write(p[:n]) // never fails
		b.attempt.Watched(b.watch)
		b.left -= int64(n)
	}
	switch {
	// Whoever has all of the answer may send the next turn before the end of the
	// body is seen here, and must not find this one still in the ledger.
	case err == io.EOF, err == nil && (b.left == 0 || b.watch.Done):
		b.watch.Finish()
		if b.watch.Failed {
			b.attempt.End(router.Failed, b.watch, "an error in the stream")
		} else {
			b.attempt.End(router.Answered, b.watch, "")
		}
	case err == nil:
	case b.client.Err() != nil:
		b.attempt.End(router.Abandoned, b.watch, "")
	default:
		if context.Cause(b.ctx) == errIdle {
			err = errIdle
		}
		b.attempt.End(router.Failed, b.watch, err.Error())
	}
	return n, err
}

// Close is part of io.ReadCloser. A body that was not read to its end was the
// client's to give up.
func (b *watchedBody) Close() error {
	if b.idle != nil {
		b.idle.Stop()
	}
	b.attempt.End(router.Abandoned, b.watch, "")
	b.cancel(nil)
	return b.body.Close()
}
