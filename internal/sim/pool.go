package sim

// pool is an instance's KV cache: a number of blocks, each of which is free,
// private to a request, or part of a shared prefix block.
//
// A prefix block is `span` blocks with an identity and a count of the requests that hold it; at zero it stays
// cached, in order of last use, until its room is needed.
//
// Invariant: free + private + span*len(index) == capacity, and available() >= 0.
// Invariant: where identities are chained, a cached prefix block's
// predecessor is cached too, is held whenever it is held, and is
// evicted after it. Requests hold prefixes, give them back last block first, and
// share rather than duplicate a block that is already there; so both hold,
// and the longest cached prefix can be found by bisection.
type pool struct {
	capacity int // blocks
	span     int // blocks in a prefix block
	free     int // blocks
	cached   int // prefix blocks that nobody holds
	index    map[uint64]int32
	nodes    []node
	spare    []int32 // unused nodes
	// The ring of unheld nodes runs through nodes[0], a sentinel: its next is
	// the least recently used.
	version uint64 // counts changes of the set of cached identities
}

type node struct {
	hash       uint64
	held       int32 // -1 for a node that is not in use
	prev, next int32
	follower   int32 // a guess at the next block of the chain, which spares the index
}

// find returns the node of an identity that comes after another node's in a chain, 0
// for the first.
func (p *pool) find(hash uint64, after int32) (int32, bool) {
	if id := p.nodes[after].follower; id != 0 && p.nodes[id].hash == hash && p.nodes[id].held >= 0 {
		return id, true
	}
	id, ok := p.index[hash]
	if ok {
		p.nodes[after].follower = id
	}
	return id, ok
}

func newPool(capacity, span int) pool {
	return pool{
		capacity: capacity, span: span, free: capacity,
		index: make(map[uint64]int32), nodes: make([]node, 1),
	}
}

// available is how many blocks can be taken: free ones and those of unheld prefixes.
func (p *pool) available() int { return p.free + p.cached*p.span }

// take makes n blocks private; n is at most available().
func (p *pool) take(n int) {
	for p.free < n {
		p.evict()
	}
	p.free -= n
}

// give frees n private blocks.
func (p *pool) give(n int) { p.free += n }

func (p *pool) evict() {
	id := p.nodes[0].next
	p.unlink(id)
	delete(p.index, p.nodes[id].hash)
	p.nodes[id].held = -1
	p.spare = append(p.spare, id)
	p.free += p.span
	p.version++
}

func (p *pool) unlink(id int32) {
	n := &p.nodes[id]
	p.nodes[n.prev].next = n.next
	p.nodes[n.next].prev = n.prev
	p.cached--
}

func (p *pool) hold(id int32) {
	if p.nodes[id].held == 0 {
		p.unlink(id)
	}
	p.nodes[id].held++
}

func (p *pool) release(id int32) {
	n := &p.nodes[id]
	n.held--
	if n.held > 0 {
		return
	}
	tail := p.nodes[0].prev
	n.prev, n.next = tail, 0
	p.nodes[tail].next = id
	p.nodes[0].prev = id
	p.cached++
}

// publish turns span private blocks into a prefix block that the caller holds, after
// another in its chain or 0. Where there is one of that identity already, that
// is held instead and the private ones are freed.
func (p *pool) publish(hash uint64, after int32) int32 {
	if id, ok := p.find(hash, after); ok {
		p.hold(id)
		p.free += p.span
		return id
	}
	var id int32
	if n := len(p.spare); n > 0 {
		id = p.spare[n-1]
		p.spare = p.spare[:n-1]
	} else {
		id = int32(len(p.nodes))
		p.nodes = append(p.nodes, node{})
	}
	p.nodes[id] = node{hash: hash, held: 1}
	p.nodes[after].follower = id
	p.index[hash] = id
	p.version++
	return id
}

// prefix is how many leading identities are cached. hint is a guess at it.
func (p *pool) prefix(blocks []uint64, hint int) int {
	return bisect(len(blocks), hint, func(i int) bool {
		_, ok := p.index[blocks[i]]
		return ok
	})
}

// heldPrefix is how many leading identities, of which all are cached, are held.
func (p *pool) heldPrefix(blocks []uint64) int {
	return bisect(len(blocks), len(blocks), func(i int) bool {
		id, ok := p.index[blocks[i]]
		return ok && p.nodes[id].held > 0
	})
}

// bisect returns the first i in [0, n] at which ok, true and then false, is not true.
// A right hint costs two calls, a wrong one O(log n).
func bisect(n, hint int, ok func(int) bool) int {
	low, high := 0, n // ok before low, not ok from high on
	if hint = min(hint, n); hint > 0 {
		if ok(hint - 1) {
			low = hint
		} else {
			high = hint - 1
		}
	}
	if low == hint && hint < high {
		if ok(hint) {
			low = hint + 1
		} else {
			high = hint
		}
	}
	for low < high {
		if mid := int(uint(low+high) >> 1); ok(mid) {
			low = mid + 1
		} else {
			high = mid
		}
	}
	return low
}
