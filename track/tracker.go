package track

import (
	"sync"
	"time"

	"github.com/hashicorp/golang-lru/v2/simplelru"

	"github.com/kvpolicy/kvpolicy"
)

// Tracker remembers between decisions what a Snapshot needs. Its methods may
// be called from any number of goroutines. It keeps no time of its own: every
// method that needs the time is told it. Times may come from any clock that
// all callers share; where one is earlier than another that came before, ages
// are taken for 0 rather than negative.
type Tracker struct {
	config Config

	// mu guards everything below it. The prefix index has locks of its own, per
	// 64 instances, because it takes time in proportion to the prompt; they are
	// taken inside mu or without it, and mu never inside them.
	mu        sync.RWMutex
	byID      map[string]*instance
	instances []*instance // by id
	lives     uint64
	groups    []*prefixGroup // appended to and never changed
	requests  map[Key]*entry
	begins    uint64
	// base is the first time that Join was told, from which seconds count.
	base     time.Time
	hasBase  bool
	ended    *simplelru.LRU[Key, struct{}]
	sessions *simplelru.LRU[string, home]   // nil where none are remembered
	history  *simplelru.LRU[string, record] // nil where none is kept
	fitted   *kvpolicy.Histories            // nil before FitCurves
}

// New returns a tracker without instances. The error is that of
// Config.Validate.
func New(c Config) (*Tracker, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	t := &Tracker{config: c, byID: map[string]*instance{}, requests: map[Key]*entry{}}
	// NewLRU fails for sizes below 1 alone.
	t.ended, _ = simplelru.NewLRU[Key, struct{}](c.EndedRequests, nil)
	if c.Sessions > 0 && c.SessionTTL > 0 {
		t.sessions, _ = simplelru.NewLRU[string, home](c.Sessions, nil)
	}
	if c.HistoryNodes > 0 {
		t.history, _ = simplelru.NewLRU[string, record](c.HistoryNodes, nil)
	}
	return t, nil
}

// seconds is an instant as the tracker keeps it: the seconds since its base,
// which keeps the monotonic clock where the callers' times have one.
func (t *Tracker) seconds(instant time.Time) float64 { return instant.Sub(t.base).Seconds() }
