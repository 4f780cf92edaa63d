package kvpolicy

import "math/bits"

// Fleets up to these sizes have their ids checked in a table on the stack, as
// a map would allocate. Each size has a function of its own, so that a small
// fleet does not pay for clearing a large table. No table is more than three
// quarters full.
const (
	smallFleet  = 64
	mediumFleet = 2048
	largeFleet  = 12288
)

// duplicateID is the index of an instance whose id an earlier one has, -1
// where there is none. Beyond a large fleet it allocates a table.
func duplicateID(instances []Instance) int {
	switch n := len(instances); {
	case n <= smallFleet:
		return duplicateInSmall(instances)
	case n <= mediumFleet:
		return duplicateInMedium(instances)
	case n <= largeFleet:
		return duplicateInLarge(instances)
	default:
		return duplicateIn(make([]uint64, 2<<bits.Len(uint(n))), instances)
	}
}

//go:noinline
func duplicateInSmall(instances []Instance) int {
	var table [2 * smallFleet]uint64
	return duplicateIn(table[:], instances)
}

//go:noinline
func duplicateInMedium(instances []Instance) int {
	var table [2 * mediumFleet]uint64
	return duplicateIn(table[:], instances)
}

//go:noinline
func duplicateInLarge(instances []Instance) int {
	var table [16384]uint64
	return duplicateIn(table[:], instances)
}

// duplicateIn hashes the ids into table, a power of two in length. A slot holds
// 32 bits of the hash and the index plus one, so that most other ids are told
// apart without a look at them.
func duplicateIn(table []uint64, instances []Instance) int {
	mask := uint64(len(table) - 1)
	for at := range instances {
		id := instances[at].ID
		h := hash(0, id)
		tag, slot := h&^0xffffffff, h&mask
		for ; table[slot] != 0; slot = (slot + 1) & mask {
			if table[slot]&^0xffffffff == tag && instances[uint32(table[slot])-1].ID == id {
				return at
			}
		}
		table[slot] = tag | uint64(at+1)
	}
	return -1
}
