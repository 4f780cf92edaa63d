package replay

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"pgregory.net/rapid"
)

// The oracle keeps its entries in a slice, the newest first.
func TestLRUForgetsTheOldest(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		most := rapid.IntRange(1, 8).Draw(t, "most")
		l := newLRU[int, int](most)
		type entry struct{ key, value int }
		var oracle []entry
		for step := range rapid.IntRange(0, 60).Draw(t, "steps") {
			key := rapid.IntRange(0, 12).Draw(t, "key")
			l.put(key, step)
			oracle = slices.DeleteFunc(oracle, func(e entry) bool { return e.key == key })
			oracle = slices.Insert(oracle, 0, entry{key, step})
			oracle = oracle[:min(len(oracle), most)]
			for k := range 13 {
				at := slices.IndexFunc(oracle, func(e entry) bool { return e.key == k })
				value, ok := l.get(k)
				assert.Equal(t, at >= 0, ok)
				assert.Equal(t, at >= 0, l.has(k))
				if at >= 0 {
					assert.Equal(t, oracle[at].value, value)
				}
			}
		}
	})
}

func chain(session uint64, blocks int) []uint64 {
	list := make([]uint64, blocks)
	for i := range list {
		list[i] = session<<32 | uint64(i)
	}
	return list
}

func TestIndexKnowsPrefixes(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		bound := rapid.IntRange(1, 40).Draw(t, "bound")
		x := prefixIndex{newLRU[uint64, struct{}](bound)}
		longest := map[uint64]int{}
		var last uint64
		for range rapid.IntRange(1, 20).Draw(t, "fills") {
			last = rapid.Uint64Range(0, 5).Draw(t, "session")
			blocks := rapid.IntRange(0, 30).Draw(t, "blocks")
			x.fill(chain(last, blocks))
			longest[last] = max(longest[last], blocks)
			assert.GreaterOrEqual(t, x.match(chain(last, blocks)), min(blocks, bound), "what was just put is known, as far as there is room")
		}
		for session := range uint64(6) {
			known := x.match(chain(session, 50))
			assert.LessOrEqual(t, known, longest[session])
			for i, block := range chain(session, 50) {
				assert.Equal(t, i < known, x.blocks.has(block), "what is known of a prompt is a prefix")
			}
		}
	})
}
