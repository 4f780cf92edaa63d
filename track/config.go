package track

import (
	"fmt"
	"time"

	"github.com/kvpolicy/kvpolicy"
)

// Config sizes a Tracker. It is a plain value: take DefaultConfig and assign
// the fields to change. Every table is bounded by it, so that a tracker's
// memory is bounded by its configuration, the number of instances and the
// number of requests in flight.
type Config struct {
	// BlockTokens is the number of token ids that the prefix index hashes into
	// one block, 1 to 65536. Default 16, vLLM's block size. KV events need the
	// engine's block size; without them a larger block costs less memory and
	// time, and knows cached prefixes to within one block.
	BlockTokens int
	// TextBlockBytes is the number of bytes of a prompt known only as text that
	// make one block, 1 to 1048576. Default 64, about 16 tokens of English.
	TextBlockBytes int
	// PrefixBlocks bounds the blocks that the prefix index holds for one
	// instance, 0 to 2^30. Default 32768: with 16 tokens a block, 524,288 tokens,
	// the KV pool of an H20 and some more. An instance whose KV capacity is known
	// to be less keeps less. 0 switches the index off. See BytesPerPrefixBlock
	// for the memory.
	PrefixBlocks int
	// Sessions bounds the sessions whose home is remembered, 0 to 2^30; the
	// least recently used go first. Default 65536; 0 remembers none.
	Sessions int
	// SessionTTL is how long after its last turn began or ended a session still
	// has a home, at least 0. Default 30 minutes (ours: in the agentic trace that
	// the policies were published with, nine of ten turns follow within 44 s, so
	// that this is long, and the bound on sessions is what mostly counts). 0
	// remembers none.
	SessionTTL time.Duration
	// Grace is how long a request may be in the ledger without a sign of life
	// while the server does not count it, at least 0. Default 10 s (ours): longer
	// than a request takes to reach the scheduler and the gauges to follow.
	Grace time.Duration
	// EndedRequests bounds the requests whose end is remembered, 1 to 2^30, so
	// that a Begin that arrives after its End does not count for ever; the
	// oldest are forgotten first. Default 65536.
	EndedRequests int
	// HistoryNodes bounds the nodes whose session history is kept, 0 to 2^30;
	// the least recently changed go first. Default 4096; 0 keeps none.
	HistoryNodes int
	// HistorySessions bounds the sessions kept for one node, 1 to 2^20; the
	// oldest go first. Default 64.
	HistorySessions int
}

// DefaultConfig returns the defaults that the fields of Config name.
func DefaultConfig() Config {
	return Config{
		BlockTokens:     16,
		TextBlockBytes:  64,
		PrefixBlocks:    32768,
		Sessions:        65536,
		SessionTTL:      30 * time.Minute,
		Grace:           10 * time.Second,
		EndedRequests:   65536,
		HistoryNodes:    4096,
		HistorySessions: 64,
	}
}

// Validate checks the configuration; New does the same. The error is a
// *kvpolicy.FieldError.
func (c Config) Validate() error {
	const most = 1 << 30
	for _, f := range []struct {
		path             string
		value, low, most int
	}{
		{"block_tokens", c.BlockTokens, 1, 65536},
		{"text_block_bytes", c.TextBlockBytes, 1, 1 << 20},
		{"prefix_blocks", c.PrefixBlocks, 0, most},
		{"sessions", c.Sessions, 0, most},
		{"ended_requests", c.EndedRequests, 1, most},
		{"history_nodes", c.HistoryNodes, 0, most},
		{"history_sessions", c.HistorySessions, 1, 1 << 20},
	} {
		if !(f.value >= f.low && f.value <= f.most) {
			return fieldError(f.path, f.value, fmt.Sprintf("be %d to %d", f.low, f.most))
		}
	}
	if c.SessionTTL < 0 {
		return fieldError("session_ttl", c.SessionTTL, "be at least 0")
	}
	if c.Grace < 0 {
		return fieldError("grace", c.Grace, "be at least 0")
	}
	return nil
}

// fieldError builds the root package's error for a value of any kind.
func fieldError(path string, value any, want string) error {
	text := fmt.Sprint(value)
	if s, ok := value.(string); ok {
		text = fmt.Sprintf("%q", s)
	}
	return &kvpolicy.FieldError{Path: path, Value: text, Want: want}
}
