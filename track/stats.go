package track

// Stats is how the tracker stands with one instance: what an operator watches
// to see the ledger drift. The first group are gauges, the second counters
// since the instance joined.
type Stats struct {
	// ID is the instance's.
	ID string
	// State is whether it takes requests.
	State State
	// InFlight is the number of requests in the ledger that count there, those
	// of which it is only the source of the prefill included.
	InFlight int64
	// Foreign is the number of requests that the server had beyond the ledger's
	// at the last scrape.
	Foreign int64
	// PrefixBlocks is the number of blocks in the prefix index.
	PrefixBlocks int

	// Phantoms is the number of requests dropped because the server no longer
	// had them.
	Phantoms int64
	// Restarts is the number of times that another process was found, Lost the
	// number of requests that went with the old ones.
	Restarts, Lost int64
	// UnlinkedBlocks is the number of blocks of KV events left out because their
	// parent was unknown.
	UnlinkedBlocks int64
}

// Stats appends the state of every instance to dst, by id, and returns the
// longer slice.
func (t *Tracker) Stats(dst []Stats) []Stats {
	t.mu.RLock()
	defer t.mu.RUnlock()
	for _, i := range t.instances {
		s := i.stats
		s.State, s.InFlight, s.Foreign = i.state, i.load.requests, i.scrape.foreign
		if i.group != nil {
			s.PrefixBlocks = i.group.held(i.slot, i.life)
		}
		dst = append(dst, s)
	}
	return dst
}
