package track

import (
	"testing"

	"github.com/stretchr/testify/assert"
)

// TestLivesAreKeptApart: whoever looked an instance up before it restarted or
// left, and comes to its place in the index after, must not write there.
func TestLivesAreKeptApart(t *testing.T) {
	g := &prefixGroup{holders: map[uint64]uint64{}}
	g.open(3, 1, 10)
	old := place{g, 3, 1}
	assert.Equal(t, 0, g.record(3, 1, []uint64{7, 8}))
	assert.Equal(t, 2, g.record(3, 1, []uint64{7, 8, 9}))
	g.clear(3, 1, 2)
	assert.Empty(t, g.holders)
	g.record(3, 2, []uint64{5})

	assert.Equal(t, 0, g.record(3, 1, []uint64{5, 6}))
	assert.True(t, g.stored(old, StoredBlocks{Hashes: []uint64{1}, Tokens: []uint32{1}}, 1, 10))
	g.resize(3, 1, 1)
	g.clear(3, 1, 0)
	assert.Equal(t, 0, g.held(3, 1))
	assert.Equal(t, 1, g.held(3, 2))
	assert.Equal(t, map[uint64]uint64{5: 1 << 3}, g.holders)

	matches := make([]slotMatch, groupSize)
	g.match([]uint64{5, 6}, matches)
	assert.Equal(t, slotMatch{life: 2, blocks: 1}, matches[3])
	assert.Equal(t, slotMatch{}, matches[4])
}
