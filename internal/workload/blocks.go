package workload

// seed names a stream of tokens.
type seed uint64

// mix is a bijection of 64-bit words in which each bit of the input changes
// each bit of the output about half the time (the finalizer of MurmurHash3,
// after D. Stafford's variant 13, as in SplitMix64).
func mix(x uint64) uint64 {
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// chain hashes a block's identity together with that of all blocks before it.
func chain(before, content uint64) uint64 {
	return mix(before + 0x9e3779b97f4a7c15 + mix(content+0x632be59bd9b4e019))
}

// chainIDs gives the chain of the first n of the ids.
func chainIDs(ids []int64, n int) []uint64 {
	blocks := make([]uint64, n)
	before := uint64(0)
	for i := range blocks {
		before = chain(before, uint64(ids[i]))
		blocks[i] = before
	}
	return blocks
}

// extend gives the first keep blocks of before, then new ones of the stream up
// to total. The result shares no memory with before. Blocks made by different
// streams, or at different moments of one stream, differ: moment tells apart
// what a session writes at the same place after it went back.
func extend(before []uint64, keep, total int, stream seed, moment int) []uint64 {
	blocks := make([]uint64, total)
	n := copy(blocks, before[:min(keep, total)])
	last := uint64(0)
	if n > 0 {
		last = blocks[n-1]
	}
	content := mix(uint64(stream)) + uint64(moment)
	for ; n < total; n++ {
		last = chain(last, content)
		blocks[n] = last
	}
	return blocks
}

// prompt gives the chain of the session's turn k, given the chain of turn k-1
// (nil for the first).
func (s *session) prompt(k int, before []uint64) []uint64 {
	t := &s.turns[k]
	if t.ids != nil {
		return chainIDs(t.ids, t.total)
	}
	if k == 0 {
		before = extend(nil, 0, s.systemBlocks, s.system, 0)
	}
	return extend(before, t.keep, t.total, s.own, k)
}
