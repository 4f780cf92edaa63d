package router

import (
	"bytes"
	"encoding/json"
	"strings"
)

// Usage is what a server says it has counted.
type Usage struct {
	PromptTokens     int64 `json:"prompt_tokens"`
	CompletionTokens int64 `json:"completion_tokens"`
	Details          struct {
		CachedTokens int64 `json:"cached_tokens"`
	} `json:"prompt_tokens_details"`
}

// ResponseReader watches a response body go by, for its first token, the number
// of tokens so far and the usage. It keeps no more than one event of a stream,
// and of a body that is not streamed no more than maxWatched bytes.
type ResponseReader struct {
	stream  bool
	pending []byte
	skip    bool // the rest of a line, or of a body, that is too long

	// Begun tells whether a token was seen. Tokens is the number of tokens
	// seen: events with something in them, and where the server tells usage, that.
	// Servers that put several tokens into one event are undercounted until then.
	Begun  bool
	Tokens int64
	// Usage is what the server said last, nil where it said nothing.
	Usage *Usage
	// Done tells that the stream has said that it is at its end.
	Done bool
	// Failed tells that the server has put an error into the stream.
	Failed bool
}

// maxWatched bounds what is kept of a response.
const maxWatched = 1 << 20

// NewResponseReader reads a response of a content type.
func NewResponseReader(contentType string) *ResponseReader {
	return &ResponseReader{stream: strings.HasPrefix(strings.ToLower(strings.TrimSpace(contentType)), "text/event-stream")}
}

// Write takes in what came next. It never fails.
func (r *ResponseReader) Write(p []byte) (int, error) {
	n := len(p)
	if !r.stream {
		r.keep(p)
		return n, nil
	}
	for {
		at := bytes.IndexByte(p, '\n')
		if at < 0 {
			r.keep(p)
			return n, nil
		}
		line := p[:at]
		if len(r.pending) > 0 {
			r.keep(line)
			line = r.pending
		}
		if !r.skip {
			r.line(line)
		}
		r.pending, r.skip, p = r.pending[:0], false, p[at+1:]
	}
}

func (r *ResponseReader) keep(p []byte) {
	if r.skip || len(r.pending)+len(p) > maxWatched {
		r.skip, r.pending = true, nil
		return
	}
	r.pending = append(r.pending, p...)
}

// chunk is what both a whole response and an event of a stream look like.
type chunk struct {
	Choices []struct {
		Text  string `json:"text"`
		Delta *struct {
			Content   string            `json:"content"`
			Reasoning string            `json:"reasoning"`
			Thoughts  string            `json:"reasoning_content"` // vLLM's older name for it
			ToolCalls []json.RawMessage `json:"tool_calls"`
		} `json:"delta"`
	} `json:"choices"`
	Usage *Usage `json:"usage"`
	Error any    `json:"error"`
}

func (r *ResponseReader) line(line []byte) {
	data, ok := bytes.CutPrefix(line, []byte("data:"))
	if !ok {
		return
	}
	data = bytes.TrimSpace(data)
	r.Done = r.Done || string(data) == "[DONE]"
	var c chunk
	if json.Unmarshal(data, &c) != nil { // what is no business of ours
		return
	}
	r.Failed = r.Failed || c.Error != nil
	for _, choice := range c.Choices {
		r.Begun = true // vLLM sends the role with the first token
		d := choice.Delta
		if choice.Text != "" || d != nil && (d.Content != "" || d.Reasoning != "" || d.Thoughts != "" || len(d.ToolCalls) > 0) {
			r.Tokens++
		}
	}
	r.take(c.Usage)
}

func (r *ResponseReader) take(u *Usage) {
	if u == nil || u.PromptTokens < 0 || u.CompletionTokens < 0 {
		return
	}
	r.Usage = u
	r.Tokens = max(r.Tokens, u.CompletionTokens)
}

// Finish takes in the end of the body.
func (r *ResponseReader) Finish() {
	switch {
	case r.skip || len(r.pending) == 0:
	case r.stream:
		r.line(r.pending)
	default:
		var c chunk
		if json.Unmarshal(r.pending, &c) == nil {
			r.take(c.Usage)
		}
	}
	r.pending = nil
}
