package router

import (
	"math"
	"sync"

	lru "github.com/hashicorp/golang-lru/v2/simplelru"
)

// Estimator tells how many tokens a text has and an answer will have, where
// nobody knows, and learns both from what servers say they have counted, for
// each model apart.
type Estimator struct {
	mu     sync.Mutex
	models *lru.LRU[string, *learned]
}

// learned are decaying sums, so that the last 50 or so answers count.
type learned struct {
	bytes, tokens       float64
	answers, completion float64
}

const (
	// priorBytesPerToken is what is taken before anything is learned: English
	// text in the tokenizers of today. It weighs as much as priorTokens.
	priorBytesPerToken = 4.0
	priorTokens        = 256.0
	decay              = 0.98
	maxModels          = 1024
)

// NewEstimator returns an estimator that has learned nothing.
func NewEstimator() *Estimator {
	models, _ := lru.NewLRU[string, *learned](maxModels, nil) // fails for sizes below 1 alone
	return &Estimator{models: models}
}

// Prompt estimates the tokens of a text of so many bytes.
func (e *Estimator) Prompt(model string, bytes int64) int64 {
	e.mu.Lock()
	defer e.mu.Unlock()
	l := &learned{}
	if known, ok := e.models.Get(model); ok {
		l = known
	}
	ratio := (priorBytesPerToken*priorTokens + l.bytes) / (priorTokens + l.tokens)
	return int64(math.Ceil(float64(bytes) / ratio))
}

// Completion estimates the tokens of an answer: the mean of the last ones, but
// not more than the client asks for where that is above 0. 0 is unknown.
func (e *Estimator) Completion(model string, most int64) int64 {
	e.mu.Lock()
	defer e.mu.Unlock()
	l, ok := e.models.Get(model)
	if !ok || l.answers == 0 {
		return most
	}
	n := int64(math.Round(l.completion / l.answers))
	if most > 0 {
		n = min(n, most)
	}
	return max(n, 1)
}

// LearnPrompt takes in that a text of so many bytes had so many tokens.
func (e *Estimator) LearnPrompt(model string, bytes, tokens int64) {
	if bytes <= 0 || tokens <= 0 || tokens > bytes*4 { // the latter is no prompt of that text: an image, or a template
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	l := e.of(model)
	l.bytes, l.tokens = decay*l.bytes+float64(bytes), decay*l.tokens+float64(tokens)
}

// LearnCompletion takes in that an answer had so many tokens.
func (e *Estimator) LearnCompletion(model string, tokens int64) {
	if tokens <= 0 {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	l := e.of(model)
	l.answers, l.completion = decay*l.answers+1, decay*l.completion+float64(tokens)
}

func (e *Estimator) of(model string) *learned {
	l, ok := e.models.Get(model)
	if !ok {
		l = &learned{}
		e.models.Add(model, l)
	}
	return l
}
