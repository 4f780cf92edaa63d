package replay

import "sort"

// prefixIndex is what a router believes one instance to have cached: the block
// identities of the prompts it sent there, the longest unused forgotten first.
type prefixIndex struct{ blocks *lru[uint64, struct{}] }

// fill notes a prompt. The first blocks are put last, so that of a prompt the
// end is forgotten first: what is known of it stays a prefix.
func (x prefixIndex) fill(prompt []uint64) {
	for i := len(prompt) - 1; i >= 0; i-- {
		x.blocks.put(prompt[i], struct{}{})
	}
}

// match is how many leading blocks of a prompt are known. Blocks are chained,
// so what is known of a prompt is nearly always a prefix; where it is not, the
// answer is some known block whose successor is not known.
func (x prefixIndex) match(prompt []uint64) int {
	return sort.Search(len(prompt), func(i int) bool { return !x.blocks.has(prompt[i]) })
}
