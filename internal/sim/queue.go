package sim

// eventKind is what an event does.
type eventKind uint8

const (
	eventCall     eventKind = 1 + iota // fn
	eventFeed                          // the next request of feed arrives
	eventAdmit                         // request leaves the front end
	eventWake                          // the instance's run of steps ends
	eventTransfer                      // the transfer of request ends
	eventPoke                          // something changed for an instance from outside
)

// event is something due at a time. seq breaks ties: first scheduled, first run.
type event struct {
	seconds    float64
	seq        uint64
	kind       eventKind
	generation uint32 // of a wake: stale unless it is the instance's
	instance   int32
	request    *request
	feed       *feed
	fn         func()
}

func (a *event) before(b *event) bool {
	if a.seconds != b.seconds {
		return a.seconds < b.seconds
	}
	return a.seq < b.seq
}

// queue is a binary heap of events. container/heap would box each of them.
type queue []event

func (q *queue) push(e event) {
	h := append(*q, e)
	i := len(h) - 1
	for i > 0 {
		parent := (i - 1) / 2
		if !e.before(&h[parent]) {
			break
		}
		h[i] = h[parent]
		i = parent
	}
	h[i] = e
	*q = h
}

func (q *queue) pop() event {
	h := *q
	top, last := h[0], h[len(h)-1]
	h[len(h)-1] = event{} // drop its pointers
	h = h[:len(h)-1]
	if len(h) > 0 {
		i := 0
		for {
			child := 2*i + 1
			if child >= len(h) {
				break
			}
			if child+1 < len(h) && h[child+1].before(&h[child]) {
				child++
			}
			if !h[child].before(&last) {
				break
			}
			h[i] = h[child]
			i = child
		}
		h[i] = last
	}
	*q = h
	return top
}
