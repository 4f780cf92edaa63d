package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strconv"
	"strings"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	modev3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extproc "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/kvpolicy/kvpolicy/examples/internal/router"
)

// The names of the endpoint picker protocol of the Gateway API Inference
// Extension (proposal 004, version 1.0.0).
const (
	destinationKey       = "x-gateway-destination-endpoint"
	destinationNamespace = "envoy.lb"
	servedKey            = "x-gateway-destination-endpoint-served"
	subsetKey            = "x-gateway-destination-endpoint-subset"
	subsetNamespace      = "envoy.lb.subset_hint"
)

// processor is the ext_proc service.
type processor struct {
	extproc.UnimplementedExternalProcessorServer

	router        *router.Router
	sessionHeader string
	maxBody       int64
	// requestMode and responseMode are the body modes of proxies that do not tell
	// theirs.
	requestMode, responseMode modev3.ProcessingMode_BodySendMode
	// decideAfter is the number of bytes of a streamed body after which it is
	// decided even though more is to come: Envoy stops reading at its buffer
	// limit until it is answered.
	decideAfter int
}

// stream is one HTTP request on its way through the proxy.
type stream struct {
	*processor
	server extproc.ExternalProcessor_ProcessServer

	modes     modes
	path      string
	session   string
	length    int64 // content-length, 0 where unknown
	subset    []string
	hasSubset bool

	gotHeaders      bool // of the request
	headersAnswered bool
	body            []byte // of the request, until it is decided
	unanswered      int    // chunks of the request's body
	attempt         *router.Attempt
	decided         bool
	refused         bool // answered by ourselves: nothing more is to be said

	response int // its status, 0 where not known
	watch    *router.ResponseReader
	finished bool // the response is over
}

// modes are how the proxy treats bodies.
type modes struct {
	request, response modev3.ProcessingMode_BodySendMode
	// waits says that the proxy keeps the request's body back until its headers
	// are answered.
	waits bool
}

// holdsHeaders says that the proxy keeps the request's headers back until its
// body is answered, so that they can be changed then.
func (m modes) holdsHeaders() bool {
	return m.request == modev3.ProcessingMode_BUFFERED || m.request == modev3.ProcessingMode_BUFFERED_PARTIAL
}

// duplex says that the request's body is to be sent back.
func (m modes) duplex() bool { return m.request == modev3.ProcessingMode_FULL_DUPLEX_STREAMED }

// Process is part of extproc.ExternalProcessorServer: one call for each HTTP
// request. However it ends, what it counts is released.
func (p *processor) Process(server extproc.ExternalProcessor_ProcessServer) error {
	s := &stream{processor: p, server: server, modes: modes{p.requestMode, p.responseMode, true}}
	defer s.release()
	for {
		message, err := server.Recv()
		switch {
		case err == io.EOF: // the proxy has closed its side
			return nil
		case err != nil:
			if server.Context().Err() != nil {
				return nil
			}
			return err
		case message.GetObservabilityMode():
			continue // no answer is wanted, so there is nothing to decide
		}
		if err := s.take(message); err != nil {
			return err
		}
		if s.refused {
			return nil
		}
	}
}

// release ends the attempt with the stream.
func (s *stream) release() {
	if s.attempt == nil {
		return
	}
	switch {
	case s.watch != nil && s.watch.Failed:
		s.attempt.End(router.Failed, s.watch, "an error in the stream")
	case s.finished && s.response < http.StatusInternalServerError:
		s.attempt.End(router.Answered, s.watch, "")
	case s.response >= http.StatusInternalServerError:
		s.attempt.End(router.Failed, s.watch, "status "+strconv.Itoa(s.response))
	case s.response > 0 && s.watch == nil:
		// The proxy does not show the response's body: that it has begun well is
		// all there is to know.
		s.attempt.End(router.Answered, nil, "")
	default:
		s.attempt.End(router.Abandoned, s.watch, "")
	}
}

// take takes in a message and answers it.
func (s *stream) take(message *extproc.ProcessingRequest) error {
	if c := message.GetProtocolConfig(); c != nil {
		s.modes = modes{c.GetRequestBodyMode(), c.GetResponseBodyMode(), !c.GetSendBodyWithoutWaitingForHeaderResponse()}
	}
	for _, mode := range []modev3.ProcessingMode_BodySendMode{s.modes.request, s.modes.response} {
		if mode < modev3.ProcessingMode_NONE || mode > modev3.ProcessingMode_FULL_DUPLEX_STREAMED {
			return status.Errorf(codes.Unimplemented, "body mode %v", mode)
		}
	}
	switch r := message.GetRequest().(type) {
	case *extproc.ProcessingRequest_RequestHeaders:
		return s.requestHeaders(message, r.RequestHeaders)
	case *extproc.ProcessingRequest_RequestBody:
		return s.requestBody(r.RequestBody)
	case *extproc.ProcessingRequest_RequestTrailers:
		return s.requestTrailers()
	case *extproc.ProcessingRequest_ResponseHeaders:
		return s.responseHeaders(message, r.ResponseHeaders)
	case *extproc.ProcessingRequest_ResponseBody:
		return s.responseBody(r.ResponseBody)
	case *extproc.ProcessingRequest_ResponseTrailers:
		s.finish()
		return s.send(&extproc.ProcessingResponse{Response: &extproc.ProcessingResponse_ResponseTrailers{ResponseTrailers: &extproc.TrailersResponse{}}})
	}
	return status.Errorf(codes.InvalidArgument, "a message without a part of a request")
}

func (s *stream) send(r *extproc.ProcessingResponse) error { return s.server.Send(r) }

// header is a value of the headers; proxies of today fill the raw value.
func header(h *corev3.HeaderMap, key string) string {
	for _, v := range h.GetHeaders() {
		if strings.EqualFold(v.GetKey(), key) {
			if raw := v.GetRawValue(); len(raw) > 0 {
				return string(raw)
			}
			return v.GetValue()
		}
	}
	return ""
}

func (s *stream) requestHeaders(message *extproc.ProcessingRequest, h *extproc.HttpHeaders) error {
	if s.gotHeaders || s.decided {
		return status.Error(codes.InvalidArgument, "request headers come once, and first")
	}
	s.gotHeaders = true
	s.path = header(h.GetHeaders(), ":path")
	s.session = header(h.GetHeaders(), s.sessionHeader)
	if n, err := strconv.ParseInt(header(h.GetHeaders(), "content-length"), 10, 64); err == nil && n > 0 {
		s.length = n
	}
	s.readSubset(message.GetMetadataContext())
	if s.length > s.maxBody {
		return s.refuse(http.StatusRequestEntityTooLarge, "", "the body is too large")
	}
	switch {
	case h.GetEndOfStream(), s.modes.request == modev3.ProcessingMode_NONE, s.modes.request == modev3.ProcessingMode_STREAMED && s.modes.waits:
		// No body comes before this is answered.
		if err := s.decide(h.GetEndOfStream()); err != nil || s.refused {
			return err
		}
		return s.answerHeaders()
	case s.modes.holdsHeaders():
		s.headersAnswered = true
		return s.send(&extproc.ProcessingResponse{Response: &extproc.ProcessingResponse_RequestHeaders{RequestHeaders: &extproc.HeadersResponse{}}})
	}
	return nil // answered once the body is there
}

// readSubset reads which endpoints the proxy allows.
func (s *stream) readSubset(m *corev3.Metadata) {
	value, ok := m.GetFilterMetadata()[subsetNamespace].GetFields()[subsetKey]
	if !ok {
		return
	}
	s.hasSubset = true
	for _, v := range value.GetListValue().GetValues() {
		s.subset = append(s.subset, strings.TrimSpace(v.GetStringValue()))
	}
	if text := value.GetStringValue(); text != "" { // as other proxies write it
		for part := range strings.SplitSeq(text, ",") {
			s.subset = append(s.subset, strings.TrimSpace(part))
		}
	}
}

// inference tells whether the path takes a prompt.
func (s *stream) inference() bool {
	path, _, _ := strings.Cut(s.path, "?")
	return strings.HasSuffix(path, "/completions") || path == ""
}

// decide picks the endpoints by what is known: all of the body, its beginning,
// or none of it.
func (s *stream) decide(whole bool) error {
	s.decided = true
	var body *router.Body
	if len(s.body) > 0 && s.inference() {
		var err error
		if body, err = router.ParseBody(s.body, !whole); err != nil {
			return s.refuse(http.StatusBadRequest, "", err.Error())
		}
	}
	ctx, cancel := context.WithCancel(s.server.Context())
	defer cancel()
	call := s.router.NewCall(ctx, body, s.session)
	if !whole && s.inference() && (body == nil || !body.Complete) {
		call.CutOff(max(s.length, int64(len(s.body))))
	}
	if s.hasSubset {
		call.Only(s.subset)
	}
	s.body = nil
	attempt, err := call.Next()
	var refused *router.Refusal
	switch {
	case errors.As(err, &refused):
		return s.refuse(refused.Status, refused.RetryAfterSeconds(), refused.Error())
	case err != nil:
		return status.Error(codes.Internal, err.Error())
	}
	s.attempt = attempt
	if body != nil && !body.Stream {
		attempt.Unstreamed()
	}
	return nil
}

// refuse answers in place of an endpoint.
func (s *stream) refuse(code int, retryAfter, message string) error {
	s.refused = true
	kind := "server_error"
	switch {
	case code == http.StatusTooManyRequests:
		kind = "rate_limit_error"
	case code < http.StatusInternalServerError:
		kind = "invalid_request_error"
	}
	data, err := json.Marshal(map[string]any{"error": map[string]any{"message": message, "type": kind, "param": nil, "code": code}})
	if err != nil {
		return status.Error(codes.Internal, err.Error())
	}
	headers := []*corev3.HeaderValueOption{set("content-type", "application/json")}
	if retryAfter != "" {
		headers = append(headers, set("retry-after", retryAfter))
	}
	return s.send(&extproc.ProcessingResponse{Response: &extproc.ProcessingResponse_ImmediateResponse{ImmediateResponse: &extproc.ImmediateResponse{
		Status:  &typev3.HttpStatus{Code: typev3.StatusCode(code)},
		Headers: &extproc.HeaderMutation{SetHeaders: headers},
		Body:    data,
		Details: "kvpolicy: " + strings.ToValidUTF8(message, "\uFFFD"), // a message with anything else cannot be sent
	}}})
}

func set(key, value string) *corev3.HeaderValueOption {
	return &corev3.HeaderValueOption{
		Header:       &corev3.HeaderValue{Key: key, RawValue: []byte(value)},
		AppendAction: corev3.HeaderValueOption_OVERWRITE_IF_EXISTS_OR_ADD,
	}
}

// destination is the change to the request's headers, and the metadata with
// the same value.
func (s *stream) destination() (*extproc.CommonResponse, *structpb.Struct) {
	endpoints := []string{s.attempt.Target.Address()}
	for _, i := range s.attempt.Fallbacks {
		endpoints = append(endpoints, i.Address())
	}
	value := strings.Join(endpoints, ",")
	change := &extproc.CommonResponse{ClearRouteCache: true, HeaderMutation: &extproc.HeaderMutation{SetHeaders: []*corev3.HeaderValueOption{set(destinationKey, value)}}}
	metadata := &structpb.Struct{Fields: map[string]*structpb.Value{destinationNamespace: structpb.NewStructValue(
		&structpb.Struct{Fields: map[string]*structpb.Value{destinationKey: structpb.NewStringValue(value)}})}}
	return change, metadata
}

// answerHeaders answers the request's headers with the destination.
func (s *stream) answerHeaders() error {
	s.headersAnswered = true
	change, metadata := s.destination()
	return s.send(&extproc.ProcessingResponse{
		Response:        &extproc.ProcessingResponse_RequestHeaders{RequestHeaders: &extproc.HeadersResponse{Response: change}},
		DynamicMetadata: metadata,
	})
}

func (s *stream) requestBody(b *extproc.HttpBody) error {
	switch {
	case s.modes.duplex() && (s.decided || !s.gotHeaders):
		return status.Error(codes.InvalidArgument, "the request's body comes after its headers, and ends once")
	case s.decided:
		return s.answerBody(nil, nil) // the rest, of which nothing hangs any more
	}
	if int64(len(s.body)+len(b.GetBody())) > s.maxBody {
		return s.refuse(http.StatusRequestEntityTooLarge, "", "the body is too large")
	}
	s.body = append(s.body, b.GetBody()...)
	s.unanswered++
	switch {
	case b.GetEndOfStream():
		return s.bodyCame(true, true)
	case s.modes.holdsHeaders():
		// It is all that will come; what is not at its end has trailers behind it,
		// or is cut off.
		return s.bodyCame(s.modes.request == modev3.ProcessingMode_BUFFERED || json.Valid(s.body), false)
	case !s.modes.duplex() && len(s.body) >= s.decideAfter:
		return s.bodyCame(false, false)
	}
	return nil
}

func (s *stream) requestTrailers() error {
	if !s.decided {
		if err := s.bodyCame(true, false); err != nil || s.refused {
			return err
		}
	}
	return s.send(&extproc.ProcessingResponse{Response: &extproc.ProcessingResponse_RequestTrailers{RequestTrailers: &extproc.TrailersResponse{}}})
}

// bodyCame decides by the body that is there, and answers what is unanswered.
// ends says that no trailers follow.
func (s *stream) bodyCame(whole, ends bool) error {
	body := s.body
	if err := s.decide(whole); err != nil || s.refused {
		return err
	}
	if !s.headersAnswered && s.gotHeaders {
		if err := s.answerHeaders(); err != nil {
			return err
		}
		if s.modes.duplex() {
			return s.echo(body, ends, requestSide)
		}
		for ; s.unanswered > 0; s.unanswered-- {
			if err := s.answerBody(nil, nil); err != nil {
				return err
			}
		}
		return nil
	}
	change, metadata := s.destination()
	s.unanswered = 0
	return s.answerBody(change, metadata)
}

func (s *stream) answerBody(change *extproc.CommonResponse, metadata *structpb.Struct) error {
	return s.send(&extproc.ProcessingResponse{
		Response:        &extproc.ProcessingResponse_RequestBody{RequestBody: &extproc.BodyResponse{Response: change}},
		DynamicMetadata: metadata,
	})
}

// maxChunk bounds a part of a body that is sent back, in bytes: Envoy takes no
// more than 64 KiB.
const maxChunk = 62 << 10

type side bool

const (
	requestSide  side = true
	responseSide side = false
)

// echo sends a body back as it came, as the mode FULL_DUPLEX_STREAMED wants it.
func (s *stream) echo(body []byte, ends bool, of side) error {
	for first := true; first || len(body) > 0; first = false {
		n := min(len(body), maxChunk)
		part := &extproc.StreamedBodyResponse{Body: body[:n], EndOfStream: ends && n == len(body)}
		body = body[n:]
		if n == 0 && !part.EndOfStream {
			return nil
		}
		answer := &extproc.BodyResponse{Response: &extproc.CommonResponse{BodyMutation: &extproc.BodyMutation{
			Mutation: &extproc.BodyMutation_StreamedResponse{StreamedResponse: part}}}}
		r := &extproc.ProcessingResponse{Response: &extproc.ProcessingResponse_ResponseBody{ResponseBody: answer}}
		if of == requestSide {
			r.Response = &extproc.ProcessingResponse_RequestBody{RequestBody: answer}
		}
		if err := s.send(r); err != nil {
			return err
		}
	}
	return nil
}

func (s *stream) responseHeaders(message *extproc.ProcessingRequest, h *extproc.HttpHeaders) error {
	s.response, _ = strconv.Atoi(header(h.GetHeaders(), ":status")) // 0 where it is none
	if s.attempt != nil {
		served := message.GetMetadataContext().GetFilterMetadata()[destinationNamespace].GetFields()[servedKey].GetStringValue()
		if served != "" {
			s.attempt.Served(served)
		}
	}
	switch {
	case h.GetEndOfStream():
		s.finish()
	case s.modes.response != modev3.ProcessingMode_NONE:
		s.watch = router.NewResponseReader(header(h.GetHeaders(), "content-type"))
	}
	return s.send(&extproc.ProcessingResponse{Response: &extproc.ProcessingResponse_ResponseHeaders{ResponseHeaders: &extproc.HeadersResponse{}}})
}

func (s *stream) responseBody(b *extproc.HttpBody) error {
	if s.watch == nil { // of a proxy that does not tell its modes, or skips the headers
		s.watch = router.NewResponseReader(guessType(b.GetBody()))
	}
	_, _ = s.watch.Write(b.GetBody()) // never fails
	if s.attempt != nil {
		s.attempt.Watched(s.watch)
	}
	if b.GetEndOfStream() || s.watch.Done {
		s.finish()
	}
	if s.modes.response == modev3.ProcessingMode_FULL_DUPLEX_STREAMED {
		return s.echo(b.GetBody(), b.GetEndOfStream(), responseSide)
	}
	return s.send(&extproc.ProcessingResponse{Response: &extproc.ProcessingResponse_ResponseBody{ResponseBody: &extproc.BodyResponse{}}})
}

// guessType tells an event stream by its first bytes.
func guessType(body []byte) string {
	if bytes.HasPrefix(body, []byte("data:")) || bytes.HasPrefix(body, []byte(":")) {
		return "text/event-stream"
	}
	return "application/json"
}

// finish ends the attempt with the response.
func (s *stream) finish() {
	if s.finished {
		return
	}
	s.finished = true
	if s.watch != nil {
		s.watch.Finish()
	}
	s.release()
}
