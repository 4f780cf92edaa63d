package kvpolicy

// standing is what the order among candidates looks at. (SPEC section 2.)
type standing struct {
	score    float64
	uncached int64
	requests int64
	ongoing  int64
	at       int // index into the instances
	hash     uint64
	hashed   bool // hash is set
}

// order ranks candidates: by score, new tokens, requests, ongoing tokens, each
// ascending, then by the hash of policy seed, request id and instance id, then
// by instance id.
type order struct {
	instances []Instance
	seed      uint64 // of the hash, with policy seed and request id mixed in
}

func (q *pricer) newOrder() order {
	return order{q.instances, hash(mix(q.policy.Seed), q.request.ID)}
}

// stand describes instance at with that score.
func (q *pricer) stand(at int, score float64) standing {
	i := &q.instances[at]
	return standing{score: score, uncached: q.request.uncached(i), requests: i.Requests,
		ongoing: i.OngoingTokens, at: at}
}

// before tells whether a is taken rather than b. It remembers their hashes, as
// the best so far meets many others.
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
	if x, y := o.hash(a), o.hash(b); x != y {
		return x < y
	}
	return o.instances[a.at].ID < o.instances[b.at].ID
}

func (o *order) hash(s *standing) uint64 {
	if !s.hashed {
		s.hash, s.hashed = hash(o.seed, o.instances[s.at].ID), true
	}
	return s.hash
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

// hash is the 64-bit hash that breaks ties and finds repeated ids, and no more
// than that. The length goes into the state first; then each 8-byte
// little-endian word is folded in by exclusive or, and mixed. What is left of
// less than 8 bytes makes a last word: its first and last 4 bytes, or its
// first, middle and last byte, which may overlap; for strings of one length
// that loses nothing. The mixer is the finaliser of SplitMix64 (Steele, Lea and
// Flood, OOPSLA 2014), in which each input bit flips each output bit with a
// probability near one half. It is fixed, so that routers agree across
// machines and processes.
func hash(state uint64, s string) uint64 {
	state += uint64(len(s)) * 0x9e3779b97f4a7c15
	for ; len(s) >= 8; s = s[8:] {
		state = mix(state ^ (half(s) | half(s[4:])<<32))
	}
	switch n := len(s); {
	case n >= 4:
		state ^= half(s) | half(s[n-4:])<<32
	case n > 0:
		state ^= uint64(s[0]) | uint64(s[n/2])<<8 | uint64(s[n-1])<<16
	}
	return mix(state)
}

// half is the first 4 bytes of s.
func half(s string) uint64 {
	return uint64(s[0]) | uint64(s[1])<<8 | uint64(s[2])<<16 | uint64(s[3])<<24
}

// mix is the finaliser of SplitMix64 after one step of its sequence.
func mix(z uint64) uint64 {
	z += 0x9e3779b97f4a7c15
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}
