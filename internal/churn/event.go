package churn

import "container/heap"

// eventKind is what happens; at one time they happen in this order.
type eventKind uint8

const (
	serviceEnds eventKind = 1 + iota // of a stay: finished, or outgrown its node's pool
	roundEnds                        // of a hand-off's copying
	nodeEnds
	nodeBegins
	refresh   // of the ages that survival curves know
	placement // of a request: it arrives, or has stalled for long enough
	check     // of all running requests, whether to move them
)

// event is something due. What it concerns may be gone by then.
type event struct {
	seconds float64
	kind    eventKind
	order   int // of scheduling
	node    *node
	stay    *stay
	handOff *handOff
	request *request
}

type agenda struct {
	events    []event
	scheduled int
}

func (a *agenda) schedule(e event) {
	e.order = a.scheduled
	a.scheduled++
	heap.Push(a, e)
}

func (a *agenda) next() event { return heap.Pop(a).(event) }

func (a *agenda) Len() int { return len(a.events) }

func (a *agenda) Less(i, j int) bool {
	x, y := &a.events[i], &a.events[j]
	switch {
	case x.seconds != y.seconds:
		return x.seconds < y.seconds
	case x.kind != y.kind:
		return x.kind < y.kind
	}
	return x.order < y.order
}

func (a *agenda) Swap(i, j int) { a.events[i], a.events[j] = a.events[j], a.events[i] }

func (a *agenda) Push(e any) { a.events = append(a.events, e.(event)) }

func (a *agenda) Pop() any {
	last := len(a.events) - 1
	e := a.events[last]
	a.events[last] = event{}
	a.events = a.events[:last]
	return e
}
