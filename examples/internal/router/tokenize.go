package router

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"
)

const (
	// maxTokenized bounds the answer of a tokenizer in bytes.
	maxTokenized = 64 << 20
	// noTokenizer is how long a server without a tokenizer is not asked again,
	// nor one that was too slow, for prompts of half that length and more.
	noTokenizer = time.Minute
)

// errPrompt says that it is the prompt which cannot be tokenized.
var errPrompt = errors.New("the server refuses to tokenize the prompt")

// tokenize asks an instance for the tokens of a prompt, by vLLM's /tokenize; nil
// where none can tell in time. Every instance serves the same models, so that
// any of them will do.
func (r *Router) tokenize(ctx context.Context, body *Body) []uint32 {
	if !r.config.Tokenize {
		return nil
	}
	request := body.TokenizeRequest()
	if request == nil {
		return nil
	}
	m, instance := r.tokenizer(time.Now(), len(request))
	if m == nil {
		return nil
	}
	asking, cancel := context.WithTimeout(ctx, r.config.TokenizeTimeout)
	defer cancel()
	tokens, err := r.askTokens(asking, instance, request)
	if err != nil && !errors.Is(err, errPrompt) && ctx.Err() == nil {
		m.mu.Lock()
		m.noTokens, m.noTokensFrom = time.Now().Add(noTokenizer), 0
		if errors.Is(err, context.DeadlineExceeded) {
			// It may be the prompt's length, which others need not suffer for.
			m.noTokensFrom = (len(request) + 1) / 2
		}
		m.mu.Unlock()
		r.config.Logger.Info("prompts are estimated for a while", "instance", instance.ID, "error", err)
	}
	return tokens
}

// tokenizer finds an instance to ask for a prompt of so many bytes, each in its
// turn.
func (r *Router) tokenizer(now time.Time, size int) (*member, Instance) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for range r.order {
		r.turn++
		m := r.order[r.turn%uint64(len(r.order))]
		m.mu.Lock()
		ready := !m.isDown && (!now.Before(m.noTokens) || size < m.noTokensFrom)
		m.mu.Unlock()
		if ready {
			return m, m.instance
		}
	}
	return nil, Instance{}
}

func (r *Router) askTokens(ctx context.Context, i Instance, body []byte) ([]uint32, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, i.URL.JoinPath("/tokenize").String(), bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	request.Header.Set("Content-Type", "application/json")
	response, err := r.config.Client.Do(request)
	if err != nil {
		return nil, err
	}
	defer discard(response.Body)
	data, err := io.ReadAll(io.LimitReader(response.Body, maxTokenized))
	if err != nil {
		return nil, err
	}
	var answer struct {
		Tokens []uint32        `json:"tokens"`
		Error  json.RawMessage `json:"error"`
	}
	err = json.Unmarshal(data, &answer)
	switch {
	case response.StatusCode == http.StatusOK:
		return answer.Tokens, err
	case response.StatusCode < http.StatusInternalServerError && err == nil && answer.Error != nil:
		return nil, errPrompt // such as an unknown model; a server without the page has no "error"
	}
	return nil, fmt.Errorf("%s/tokenize answered %s", i.URL, response.Status)
}
