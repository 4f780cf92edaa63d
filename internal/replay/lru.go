package replay

// lru is a bounded map that forgets what was put longest ago.
type lru[K comparable, V any] struct {
	most  int
	at    map[K]int32
	nodes []lruNode[K, V] // nodes[0] is the ring's anchor: next is the newest, previous the oldest
}

type lruNode[K comparable, V any] struct {
	key            K
	value          V
	next, previous int32
}

// newLRU makes a map of at most so many entries, at least 1.
func newLRU[K comparable, V any](most int) *lru[K, V] {
	return &lru[K, V]{most: most, at: make(map[K]int32), nodes: make([]lruNode[K, V], 1)}
}

func (l *lru[K, V]) get(key K) (value V, ok bool) {
	n, ok := l.at[key]
	if ok {
		value = l.nodes[n].value
	}
	return value, ok
}

func (l *lru[K, V]) has(key K) bool {
	_, ok := l.at[key]
	return ok
}

// put stores a value and makes it the newest.
func (l *lru[K, V]) put(key K, value V) {
	n, ok := l.at[key]
	switch {
	case ok:
		l.unlink(n)
	case len(l.at) < l.most:
		n = int32(len(l.nodes))
		l.nodes = append(l.nodes, lruNode[K, V]{})
		l.at[key] = n
	default:
		n = l.nodes[0].previous
		l.unlink(n)
		delete(l.at, l.nodes[n].key)
		l.at[key] = n
	}
	newest := l.nodes[0].next
	l.nodes[n] = lruNode[K, V]{key: key, value: value, next: newest}
	l.nodes[newest].previous = n
	l.nodes[0].next = n
}

func (l *lru[K, V]) unlink(n int32) {
	node := &l.nodes[n]
	l.nodes[node.previous].next = node.next
	l.nodes[node.next].previous = node.previous
}
