package kvpolicy

// duplicateID is the index of an instance whose id an earlier one has, -1
// where there is none. It hashes ids into a table on the stack, as a map or a
// sort would allocate; each table size has a function of its own, so that a
// small fleet does not pay for clearing a large table.
func duplicateID(instances []Instance) int {
	switch n := len(instances); {
	case n <= 128:
		return duplicateInSmall(instances)
	case n <= 2048:
		return duplicateInMedium(instances)
	default:
		return duplicateInLarge(instances)
	}
}

//go:noinline
func duplicateInSmall(instances []Instance) int {
	var table [256]uint64
	return duplicateIn(table[:], instances, 0, 1)
}

//go:noinline
func duplicateInMedium(instances []Instance) int {
	var table [4096]uint64
	return duplicateIn(table[:], instances, 0, 1)
}

// duplicateInLarge goes over fleets larger than its table in parts, by hash.
//
//go:noinline
func duplicateInLarge(instances []Instance) int {
	const size, most = 16384, 12288
	first := -1
	parts := uint64((len(instances) + most - 1) / most)
	if parts > 1 {
		parts *= 2 // parts are not exactly equal in size
	}
	for part := uint64(0); part < parts; part++ {
		var table [size]uint64
		if at := duplicateIn(table[:], instances, part, parts); at >= 0 && (first < 0 || at < first) {
			first = at
		}
	}
	return first
}

// duplicateIn looks at the ids of one part. A slot of the table, a power of
// two in length, holds 32 bits of the hash and the index plus one; a full
// table would never end the search, so that what no slot is found for is
// compared with every instance before it.
func duplicateIn(table []uint64, instances []Instance, part, parts uint64) int {
	mask := uint64(len(table) - 1)
	for at := range instances {
		id := instances[at].ID
		h := hash(0, id)
		if parts > 1 && h>>32%parts != part {
			continue
		}
		tag := h &^ 0xffffffff
		slot, tries := h&mask, 0
		for ; table[slot] != 0; slot = (slot + 1) & mask {
			if table[slot]&^0xffffffff == tag && instances[uint32(table[slot])-1].ID == id {
				return at
			}
			if tries++; tries > len(table) {
				for before := range at {
					if instances[before].ID == id {
						return at
					}
				}
				break
			}
		}
		if tries <= len(table) {
			table[slot] = tag | uint64(at+1)
		}
	}
	return -1
}
