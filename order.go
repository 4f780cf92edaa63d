package kvpolicy

// standing is what the order among candidates looks at. (SPEC section 2.)
type standing struct {
	score    float64
	uncached int64
	requests int64
	ongoing  int64
	at       int // index into the instances; the id breaks what the hash leaves equal
}

// order ranks candidates: by score, new tokens, requests, ongoing tokens, each
// ascending, then by the hash of policy seed, request id and instance id, then
// by instance id.
type order struct {
	instances []Instance
	seed      uint64 // of the hash, with policy seed and request id mixed in
}

func newOrder(p *Policy, r *Request, instances []Instance) order {
	return order{instances, hash(mix(p.Seed), r.ID)}
}

// stand describes instance at with that score.
func (q *pricer) stand(at int, score float64) standing {
	i := &q.instances[at]
	return standing{score, q.request.uncached(i), i.Requests, i.OngoingTokens, at}
}

// before tells whether a is taken rather than b.
func (o *order) before(a, b *standing) bool {
	switch {
	case a.score != b.score:
		return a.score < b.score
	case a.uncached != b.uncached:
		return a.uncached < b.uncached
	case a.requests != b.requests:
		return a.requests < b.requests
	case a.ongoing != b.ongoing:
		return a.ongoing < b.ongoing
	}
	x, y := o.instances[a.at].ID, o.instances[b.at].ID
	if hx, hy := hash(o.seed, x), hash(o.seed, y); hx != hy {
		return hx < hy
	}
	return x < y
}

// lostBy is why a candidate was not taken that stands behind the one that was.
func lostBy(taken, other *standing) Reason {
	switch {
	case taken.score != other.score:
		return HigherScore
	case taken.uncached != other.uncached:
		return MoreNewTokens
	case taken.requests != other.requests:
		return MoreRequests
	case taken.ongoing != other.ongoing:
		return MoreOngoingTokens
	}
	return TieHash
}

// hash is the 64-bit hash that breaks ties, and no more than that: each
// 8-byte little-endian word of s, the last one padded with zeros, is folded
// into the state by exclusive or and mixed; the length is folded in last. The
// mixer is the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014),
// in which each input bit flips each output bit with a probability near one
// half. It is fixed, so that routers agree across machines and processes.
func hash(state uint64, s string) uint64 {
	length := uint64(len(s))
	for ; len(s) >= 8; s = s[8:] {
		word := uint64(s[0]) | uint64(s[1])<<8 | uint64(s[2])<<16 | uint64(s[3])<<24 |
			uint64(s[4])<<32 | uint64(s[5])<<40 | uint64(s[6])<<48 | uint64(s[7])<<56
		state = mix(state ^ word)
	}
	var word uint64
	for i := len(s) - 1; i >= 0; i-- {
		word = word<<8 | uint64(s[i])
	}
	return mix(mix(state^word) + length)
}

// mix is the finaliser of SplitMix64 after one step of its sequence.
func mix(z uint64) uint64 {
	z += 0x9e3779b97f4a7c15
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}
