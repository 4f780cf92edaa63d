package track

import (
	"math/bits"
	"sync"

	"github.com/hashicorp/golang-lru/v2/simplelru"
)

// groupSize is the number of instances whose prefixes one group indexes: the
// bits of a word.
const groupSize = 64

// prefixGroup is the prefix index of up to 64 instances. Each instance has a
// least-recently-used list of its own, which bounds it; holders says of each
// block which instances hold it, so that one walk along a prompt finds what
// all of them hold.
//
// Invariant: bit s of holders[b] is set iff slots[s].blocks contains b, and no
// word in holders is 0.
//
// Invariant: until scattered, who holds a block holds every block before it,
// and a block is always younger than those that build on it. For a prompt is
// recorded whole, its first block last, so that what falls out of a list is the
// end of a prefix, never its beginning. KV events may break that.
type prefixGroup struct {
	mu        sync.RWMutex
	holders   map[uint64]uint64
	scattered bool // some instance of the group has sent KV events
	slots     [groupSize]prefixSlot
}

// prefixSlot is one instance's part of a group; life is 0 while it is free.
type prefixSlot struct {
	life   uint64
	blocks *simplelru.LRU[uint64, struct{}]
	// engine translates the engine's own block hashes, once KV events came.
	engine *simplelru.LRU[uint64, uint64]
}

// slotMatch is how much of a prompt the instance in a slot holds.
type slotMatch struct {
	life   uint64
	blocks int
}

// open takes a slot into use for the life of an instance. size is at least 1.
func (g *prefixGroup) open(slot int, life uint64, size int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	s, bit := &g.slots[slot], uint64(1)<<slot
	s.life, s.engine = life, nil
	s.blocks, _ = simplelru.NewLRU(size, func(block uint64, _ struct{}) { // fails for sizes below 1 alone
		if rest := g.holders[block] &^ bit; rest != 0 {
			g.holders[block] = rest
		} else {
			delete(g.holders, block)
		}
	})
}

// clear drops what a slot holds in a life, and goes on to the next: 0 frees
// the slot.
func (g *prefixGroup) clear(slot int, life, next uint64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	s := &g.slots[slot]
	if s.life != life {
		return
	}
	s.blocks.Purge()
	s.engine = nil
	s.life = next
	if len(g.holders) == 0 {
		g.holders = make(map[uint64]uint64) // maps do not shrink
	}
}

// match writes into dst, one element a slot, how many leading blocks of a
// prompt each instance holds.
func (g *prefixGroup) match(blocks []uint64, dst []slotMatch) {
	g.mu.RLock()
	defer g.mu.RUnlock()
	for slot := range g.slots {
		dst[slot].life = g.slots[slot].life
	}
	g.find(blocks, ^uint64(0), dst)
}

// find matches the instances of a set.
func (g *prefixGroup) find(blocks []uint64, set uint64, dst []slotMatch) {
	if !g.scattered {
		g.bisect(blocks, 0, len(blocks), set, dst)
		return
	}
	for at := 0; at < len(blocks) && set != 0; at++ {
		holders := g.holders[blocks[at]]
		setMatch(dst, set&^holders, at)
		set &= holders
	}
	setMatch(dst, set, len(blocks))
}

// bisect matches the instances of a set, who hold at least low blocks and at
// most high, where who holds a block holds those before it. It looks at a
// number of blocks in proportion to the logarithm of the prompt's length, for
// each length that somebody holds.
func (g *prefixGroup) bisect(blocks []uint64, low, high int, set uint64, dst []slotMatch) {
	for set != 0 && low < high {
		middle := int(uint(low+high) / 2)
		more := g.holders[blocks[middle]] & set
		g.bisect(blocks, low, middle, set&^more, dst)
		set, low = more, middle+1
	}
	setMatch(dst, set, low)
}

// setMatch notes how many blocks the instances of a set hold.
func setMatch(dst []slotMatch, set uint64, blocks int) {
	for ; set != 0; set &= set - 1 {
		dst[bits.TrailingZeros64(set)].blocks = blocks
	}
}

// record notes that an instance is given a prompt, and tells how many of its
// leading blocks it held before. It does nothing where the life of the
// instance is over.
func (g *prefixGroup) record(slot int, life uint64, blocks []uint64) (held int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	s, bit := &g.slots[slot], uint64(1)<<slot
	if s.life != life {
		return 0
	}
	var matches [groupSize]slotMatch
	g.find(blocks, bit, matches[:])
	for at := len(blocks) - 1; at >= 0; at-- {
		g.add(s, bit, blocks[at])
	}
	return matches[slot].blocks
}

// add makes a block the youngest of a slot.
func (g *prefixGroup) add(s *prefixSlot, bit, block uint64) {
	if _, ok := s.blocks.Get(block); ok {
		return
	}
	s.blocks.Add(block, struct{}{})
	g.holders[block] |= bit
}

// resize bounds a slot.
func (g *prefixGroup) resize(slot int, life uint64, size int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if s := &g.slots[slot]; s.life == life {
		s.blocks.Resize(size)
	}
}

// held is the number of blocks that a slot holds.
func (g *prefixGroup) held(slot int, life uint64) int {
	g.mu.RLock()
	defer g.mu.RUnlock()
	if s := &g.slots[slot]; s.life == life {
		return s.blocks.Len()
	}
	return 0
}
