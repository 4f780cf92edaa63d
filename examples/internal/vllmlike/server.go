// Package vllmlike is a small server that behaves like vLLM's towards a router:
// the OpenAI endpoints with streaming, /tokenize, /health and /metrics, a queue, a
// prefill that takes time in proportion to what is not cached, a prefix cache
// of blocks, decodes that slow each other down, KV transfer between servers,
// failures, death and restart. It has no model: its answers are syllables.
//
// It shares no code with the router, so that the two can be wrong
// independently.
package vllmlike

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"sync"
	"time"
)

// Config says how a server behaves. Take DefaultConfig and assign the fields to
// change.
type Config struct {
	// Model is the name of the served model.
	Model string
	// PrefillRate is in tokens/s, DecodeRate in tokens/s of a stream that decodes
	// alone; both above 0.
	PrefillRate, DecodeRate float64
	// Slowdown is by what share of it each further request makes a decode step
	// longer.
	Slowdown float64
	// MaxRunning bounds the requests that run at once; the others wait.
	MaxRunning int
	// BlockTokens and Blocks are the KV pool.
	BlockTokens, Blocks int
	// Tokenizer says whether there is a /tokenize.
	Tokenizer bool
	// Transfer is what servers exchange KV by, in both roles; nil for a server
	// without a KV connector.
	Transfer *Transfer
	// Seed draws the failures.
	Seed uint64
}

// DefaultConfig is a small server: 4,000 tokens/s of prefill, 100 tokens/s of
// decode and a KV pool of 65,536 tokens.
func DefaultConfig() Config {
	return Config{Model: "tiny", PrefillRate: 4000, DecodeRate: 100, Slowdown: 0.05, MaxRunning: 64, BlockTokens: 16, Blocks: 4096, Tokenizer: true}
}

// Faults are what a server does wrong, to be changed while it runs.
type Faults struct {
	// ErrorRate is the share of requests that are answered with a 500 after they
	// have waited their turn.
	ErrorRate float64
	// BreakRate is the share of responses that break off after some tokens.
	BreakRate float64
	// Hang keeps all requests waiting for ever.
	Hang bool
	// Unhealthy answers /health with a 503.
	Unhealthy bool
}

// StartMany starts n servers that behave alike.
func StartMany(n int, c Config) ([]*Server, error) {
	var all []*Server
	for range n {
		s, err := Start(c)
		if err != nil {
			for _, s := range all {
				s.Kill()
			}
			return nil, err
		}
		all = append(all, s)
	}
	return all, nil
}

// Seen is a request that a server has dealt with, or deals with.
type Seen struct {
	// ID is its X-Request-Id.
	ID string
	// PromptTokens is the length of its prompt, CachedTokens what of that was
	// cached, Completed the number of tokens sent.
	PromptTokens, CachedTokens, Completed int
	// Answered says that all of the answer was written; the client may have
	// gone meanwhile.
	Answered bool
	// RemoteDecode and RemotePrefill are what its kv_transfer_params asked for.
	RemoteDecode, RemotePrefill bool
}

// Server is a server at one address, which may die and come back there.
type Server struct {
	config  Config
	address string

	mu      sync.Mutex
	random  *rand.Rand
	faults  Faults
	seen    []*Seen
	scrapes int
	process *process // nil while it is dead
}

// process is one life of a server.
type process struct {
	server *Server
	http   *http.Server
	stop   context.CancelFunc
	ctx    context.Context

	// dead says that no more work begins, so that waiting for it can end.
	mu   sync.Mutex
	dead bool
	work sync.WaitGroup

	scheduler *scheduler
}

// begin counts a request's work, unless the process is dead.
func (p *process) begin() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.dead {
		p.work.Add(1)
	}
	return !p.dead
}

// Start starts a server at a free port of 127.0.0.1.
func Start(c Config) (*Server, error) {
	s := &Server{config: c, address: "127.0.0.1:0", random: rand.New(rand.NewPCG(c.Seed, 1))}
	if !(c.PrefillRate > 0 && c.DecodeRate > 0 && c.MaxRunning > 0 && c.BlockTokens > 0 && c.Blocks > 0) {
		return nil, errors.New("vllmlike: rates and sizes must be above 0")
	}
	return s, s.Revive()
}

// URL is where the server listens, dead or alive.
func (s *Server) URL() string { return "http://" + s.address }

// Address is its host and port.
func (s *Server) Address() string { return s.address }

// Kill ends the process as a crash does: connections break, and the cache and
// the counters are gone. It waits for the requests to end.
func (s *Server) Kill() {
	s.mu.Lock()
	p := s.process
	s.process = nil
	s.mu.Unlock()
	if p == nil {
		return
	}
	p.mu.Lock()
	p.dead = true
	p.mu.Unlock()
	p.stop()
	_ = p.http.Close()
	p.work.Wait()
}

// Revive starts a new process at the same address. A server that lives is left
// alone.
func (s *Server) Revive() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.process != nil {
		return nil
	}
	// Some connection may have the port meanwhile, though hardly for long.
	listener, err := net.Listen("tcp", s.address)
	for tries := 0; err != nil && tries < 100; tries++ {
		time.Sleep(20 * time.Millisecond)
		listener, err = net.Listen("tcp", s.address)
	}
	if err != nil {
		return fmt.Errorf("vllmlike: %w", err)
	}
	s.address = listener.Addr().String()
	p := &process{server: s, scheduler: newScheduler(s.config, time.Now())}
	p.ctx, p.stop = context.WithCancel(context.Background())
	p.http = &http.Server{Handler: p.handler(), ReadHeaderTimeout: time.Minute}
	s.process = p
	p.work.Add(1)
	go func() {
		defer p.work.Done()
		_ = p.http.Serve(listener) // until Kill
	}()
	return nil
}

// SetFaults says what the server does wrong from now on.
func (s *Server) SetFaults(f Faults) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.faults = f
}

// Seen are the requests that came, in the order of their coming.
func (s *Server) Seen() []Seen {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := make([]Seen, len(s.seen))
	for at, seen := range s.seen {
		all[at] = *seen
	}
	return all
}

// Scrapes is how often /metrics was asked for.
func (s *Server) Scrapes() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.scrapes
}

// Busy is the number of requests that the server has, queued or running.
func (s *Server) Busy() int {
	s.mu.Lock()
	p := s.process
	s.mu.Unlock()
	if p == nil {
		return 0
	}
	running, waiting, _ := p.scheduler.load()
	return running + waiting
}

// draw decides on the faults of one request: whether it fails, and after how
// many tokens it breaks off, -1 for never.
func (s *Server) draw() (f Faults, fails bool, breaksAfter int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	fails, breaksAfter = s.random.Float64() < s.faults.ErrorRate, -1
	if s.random.Float64() < s.faults.BreakRate {
		breaksAfter = s.random.IntN(4)
	}
	return s.faults, fails, breaksAfter
}

// came notes a request; change changes what is noted of it.
func (s *Server) came(id string) (change func(func(*Seen))) {
	seen := &Seen{ID: id}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seen = append(s.seen, seen)
	return func(how func(*Seen)) {
		s.mu.Lock()
		defer s.mu.Unlock()
		how(seen)
	}
}
