package vllmlike

import (
	"container/list"
	"context"
	"hash/fnv"
	"slices"
	"sync"
	"time"
)

// scheduler is the engine: who waits, who runs, what is cached.
type scheduler struct {
	config  Config
	started time.Time
	slots   chan struct{} // one for each request that runs
	turn    chan struct{} // whoever holds it prefills

	mu                sync.Mutex
	running, waiting  int
	held              int // blocks of running requests
	queries, hits     int // of the prefix cache, in tokens
	prompted, decoded int // tokens
	blocks            map[uint64]*list.Element
	used              *list.List // of blocks' hashes, the last used first
}

func newScheduler(c Config, now time.Time) *scheduler {
	return &scheduler{config: c, started: now, slots: make(chan struct{}, c.MaxRunning), turn: make(chan struct{}, 1),
		blocks: map[uint64]*list.Element{}, used: list.New()}
}

func (s *scheduler) load() (running, waiting int, usage float64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.running, s.waiting, min(1, float64(s.held)/float64(s.config.Blocks))
}

func (s *scheduler) count(change func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change()
}

func take(ctx context.Context, from chan struct{}) error {
	select {
	case from <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func sleepUntil(ctx context.Context, t time.Time) error {
	left := time.Until(t)
	if left < 50*time.Microsecond { // less than a timer is good for
		return ctx.Err()
	}
	timer := time.NewTimer(left)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// run takes a request through the engine: it waits for its turn, prefills what
// is not cached and decodes; emit is called with each token when it is there.
// Where the KV comes from another server, prefill waits for the transfer
// instead. cached is called when the prefill begins.
func (s *scheduler) run(ctx context.Context, prompt []uint32, output []uint32, transfer time.Duration, cached func(int), emit func(token int) error) error {
	s.count(func() { s.waiting++ })
	waiting := true
	defer func() {
		if waiting {
			s.count(func() { s.waiting-- })
		}
	}()
	if err := take(ctx, s.slots); err != nil {
		return err
	}
	defer func() { <-s.slots }()
	remote := transfer >= 0
	if !remote {
		if err := take(ctx, s.turn); err != nil {
			return err
		}
	}
	done := func() {
		if !remote {
			<-s.turn
		}
	}
	blocks := (len(prompt) + len(output) + s.config.BlockTokens - 1) / s.config.BlockTokens
	waiting = false
	s.count(func() { s.waiting--; s.running++; s.held += blocks })
	defer s.count(func() { s.running--; s.held -= blocks })

	known := s.match(prompt)
	if remote {
		known = len(prompt)
	}
	cached(known)
	now := time.Now()
	ready := now.Add(seconds(float64(len(prompt)-known) / s.config.PrefillRate))
	if remote {
		ready = now.Add(transfer)
	}
	err := sleepUntil(ctx, ready)
	done()
	if err != nil {
		return err
	}
	s.insert(prompt)
	next := time.Now()
	for token := range output {
		running, _, _ := s.load()
		next = next.Add(seconds((1 + s.config.Slowdown*float64(running-1)) / s.config.DecodeRate))
		if token == 0 {
			next = time.Now() // the prefill gives the first token
		}
		if err := sleepUntil(ctx, next); err != nil {
			return err
		}
		s.count(func() { s.decoded++ })
		if err := emit(token); err != nil {
			return err
		}
	}
	s.insert(slices.Concat(prompt, output))
	return nil
}

// hashes names the whole blocks of a prompt, each with all before it.
func (s *scheduler) hashes(tokens []uint32) []uint64 {
	h := fnv.New64a()
	var names []uint64
	for at, token := range tokens {
		_, _ = h.Write([]byte{byte(token), byte(token >> 8), byte(token >> 16), byte(token >> 24)})
		if (at+1)%s.config.BlockTokens == 0 {
			names = append(names, h.Sum64())
		}
	}
	return names
}

// match is how many leading tokens are cached. At least one is always computed,
// as in vLLM.
func (s *scheduler) match(tokens []uint32) int {
	names := s.hashes(tokens)
	s.mu.Lock()
	defer s.mu.Unlock()
	n := 0
	for _, name := range names {
		e, ok := s.blocks[name]
		if !ok {
			break
		}
		s.used.MoveToFront(e)
		n += s.config.BlockTokens
	}
	n = max(0, min(n, (len(tokens)-1)/s.config.BlockTokens*s.config.BlockTokens))
	s.queries += len(tokens)
	s.hits += n
	s.prompted += len(tokens)
	return n
}

// insert caches blocks; the least recently used go.
func (s *scheduler) insert(tokens []uint32) {
	names := s.hashes(tokens)
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, name := range slices.Backward(names) { // so that the ends of prompts go first
		if e, ok := s.blocks[name]; ok {
			s.used.MoveToFront(e)
			continue
		}
		s.blocks[name] = s.used.PushFront(name)
		if len(s.blocks) > s.config.Blocks {
			oldest := s.used.Back()
			delete(s.blocks, s.used.Remove(oldest).(uint64))
		}
	}
}

// Transfer is the network over which servers exchange KV.
type Transfer struct {
	// TokensPerSecond is its speed, and Overhead what each transfer takes on top.
	TokensPerSecond float64
	Overhead        time.Duration

	mu   sync.Mutex
	held map[string]int // tokens of prompts that wait to be fetched, by engine and first block
}

// hold keeps a prompt's KV for another server to fetch.
func (t *Transfer) hold(name string, tokens int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.held == nil {
		t.held = map[string]int{}
	}
	t.held[name] = tokens
}

// fetch takes it, once; it tells whether it was there.
func (t *Transfer) fetch(name string) (time.Duration, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	tokens, ok := t.held[name]
	delete(t.held, name)
	return t.Overhead + seconds(float64(tokens)/t.TokensPerSecond), ok
}

// Held is the number of prompts that wait to be fetched.
func (t *Transfer) Held() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.held)
}
