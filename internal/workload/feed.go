package workload

import (
	"container/heap"
	"errors"
	"fmt"
	"io"

	"github.com/kvpolicy/kvpolicy"
)

// Feed hands out a workload's requests in order of arrival.
type Feed struct {
	options Options
	source  source

	due  dueHeap
	open map[int64]*openSession
	// upcoming is the source's next session, nil once it has no more.
	upcoming *session
	// cut is the last request kept, where MaxRequests cuts a closed loop.
	cut *due
	// sent and sessions count requests and the sessions that they are of,
	// leftOut the requests that MaxContextTokens leaves out.
	sent              int
	sessions, leftOut int64
	err               error
}

// openSession is a session of which some turn is still to be sent.
type openSession struct {
	*session
	// first is the first turn that is kept, end is one past the last.
	first, end int
	unsent     int
	counted    bool
	// chain is the prompt of turn built.
	chain []uint64
	built int
}

// due is a request whose time is known.
type due struct {
	at      float64
	session int64
	turn    int
}

func (d due) before(other due) bool {
	if d.at != other.at {
		return d.at < other.at
	}
	if d.session != other.session {
		return d.session < other.session
	}
	return d.turn < other.turn
}

type dueHeap []due

func (h dueHeap) Len() int           { return len(h) }
func (h dueHeap) Less(i, j int) bool { return h[i].before(h[j]) }
func (h dueHeap) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *dueHeap) Push(x any)        { *h = append(*h, x.(due)) }
func (h *dueHeap) Pop() any {
	last := (*h)[len(*h)-1]
	*h = (*h)[:len(*h)-1]
	return last
}

// Start begins a replay. The errors are those of the options (a FieldError)
// and of reading the source. The caller closes the feed.
func (w *Workload) Start(options Options) (*Feed, error) {
	options, err := options.withDefaults()
	if err != nil {
		return nil, err
	}
	f := &Feed{options: options, open: make(map[int64]*openSession)}
	if options.MaxRequests > 0 && options.Pacing == ClosedLoop {
		// Which requests are the first by trace time must not depend on how fast
		// they are answered: a pass in trace time finds the last one.
		if f.cut, err = w.lastKept(options); err != nil {
			return nil, err
		}
	}
	if f.source, err = w.open(options); err != nil {
		return nil, err
	}
	if err := f.advance(); err != nil {
		return nil, errors.Join(err, f.source.close())
	}
	return f, nil
}

// lastKept finds the trace time, session and turn of the last request that
// MaxRequests keeps; nil where it keeps all.
func (w *Workload) lastKept(options Options) (last *due, err error) {
	options.Pacing, options.LoadFactor = TraceTime, 1
	f, err := w.Start(options)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	for range options.MaxRequests {
		d, _, err := f.take()
		if errors.Is(err, io.EOF) {
			return nil, nil
		}
		if err != nil {
			return nil, err
		}
		last = &d
	}
	return last, nil
}

// advance reads the source's next session.
func (f *Feed) advance() error {
	next, err := f.source.next()
	if errors.Is(err, io.EOF) {
		f.upcoming = nil
		return nil
	}
	f.upcoming = next
	return err
}

// scaled turns a trace time into a time of the replay.
func (f *Feed) scaled(traceSeconds float64) float64 {
	return (traceSeconds - f.options.FromSeconds) / f.options.LoadFactor
}

// kept says whether truncation leaves a turn in.
func (f *Feed) kept(s *session, k int) bool {
	at := s.start + s.turns[k].offset
	if !(at >= f.options.FromSeconds && at < f.options.UntilSeconds) {
		return false
	}
	return f.cut == nil || !f.cut.before(due{at - f.options.FromSeconds, s.id, k})
}

// admit opens every session that may start before the next request that is
// known, so that the head of the heap is the next request of all.
func (f *Feed) admit() {
	for f.err == nil && f.upcoming != nil {
		s := f.upcoming
		if s.base >= f.options.UntilSeconds || f.cut != nil && s.base > f.cut.at+f.options.FromSeconds {
			f.upcoming = nil
			return
		}
		if len(f.due) > 0 && f.scaled(s.base) > f.due[0].at {
			return
		}
		// Offsets never fall within a session, so what is kept is one stretch.
		o := &openSession{session: s, built: -1}
		for o.first < len(s.turns) && !f.kept(s, o.first) {
			o.first++
		}
		o.end = o.first
		for o.end < len(s.turns) && f.kept(s, o.end) {
			o.end++
		}
		if o.unsent = o.end - o.first; o.unsent > 0 {
			f.open[s.id] = o
			f.release(o, -1, 0)
		}
		f.err = f.advance()
	}
}

// release makes the turns due that wait for nothing but turn k, which ended
// (ClosedLoop) or was sent (TraceTime); k = -1 opens the session.
func (f *Feed) release(o *openSession, k int, endSeconds float64) {
	if f.options.Pacing == TraceTime {
		if next := max(k+1, o.first); next < o.end {
			heap.Push(&f.due, due{f.scaled(o.start + o.turns[next].offset), o.id, next})
		}
		return
	}
	for next := max(k+1, o.first); next < o.end; next++ {
		t := &o.turns[next]
		switch {
		case k < 0 && t.after < o.first:
			heap.Push(&f.due, due{f.scaled(o.start + t.offset), o.id, next})
		case k >= 0 && t.after == k:
			heap.Push(&f.due, due{endSeconds + t.gap, o.id, next})
		}
	}
}

// Peek gives the arrival time of the next request that is known. Not ok: none
// is, because the workload is at its end, or because every session waits for a
// turn to finish, or because reading failed, which Next then says.
func (f *Feed) Peek() (seconds float64, ok bool) {
	f.admit()
	for f.err == nil && len(f.due) > 0 && f.tooLong(f.due[0]) {
		d, o := f.pop()
		f.leftOut++
		f.release(o, d.turn, d.at)
		f.admit()
	}
	if f.err != nil || len(f.due) == 0 || f.full() {
		return 0, false
	}
	return f.due[0].at, true
}

// full says whether MaxRequests have been sent.
func (f *Feed) full() bool {
	return f.options.MaxRequests > 0 && f.sent >= f.options.MaxRequests
}

// tooLong says whether MaxContextTokens leaves a request out.
func (f *Feed) tooLong(d due) bool {
	t := &f.open[d.session].turns[d.turn]
	return f.options.MaxContextTokens > 0 && t.input+t.output > f.options.MaxContextTokens
}

// pop removes the head of the heap.
func (f *Feed) pop() (due, *openSession) {
	d := heap.Pop(&f.due).(due)
	o := f.open[d.session]
	if o.unsent--; o.unsent == 0 {
		delete(f.open, d.session)
	}
	return d, o
}

// take removes the head of the heap and, in trace time, makes its successor
// due.
func (f *Feed) take() (due, *openSession, error) {
	if _, ok := f.Peek(); !ok {
		if f.err != nil {
			return due{}, nil, f.err
		}
		return due{}, nil, io.EOF
	}
	d, o := f.pop()
	f.sent++
	if !o.counted {
		o.counted = true
		f.sessions++
	}
	if f.options.Pacing == TraceTime {
		f.release(o, d.turn, 0)
	}
	return d, o, nil
}

// Next gives the next request that is known, in order of arrival; io.EOF where
// Peek is not ok. With ClosedLoop, io.EOF is not final while requests are
// unfinished: Finish may make others known.
func (f *Feed) Next() (Request, error) {
	d, o, err := f.take()
	if err != nil {
		return Request{}, err
	}
	t := &o.turns[d.turn]
	if t.ids != nil {
		o.chain = o.prompt(d.turn, nil)
	} else {
		for o.built < d.turn {
			o.built++
			o.chain = o.prompt(o.built, o.chain)
		}
	}
	return Request{
		ID:             uint64(d.session)<<turnBits | uint64(d.turn),
		Session:        d.session,
		Turn:           d.turn,
		ArrivalSeconds: d.at,
		InputTokens:    t.input,
		OutputTokens:   t.output,
		Blocks:         o.chain,
	}, nil
}

// Finish says that a request ended, completed or given up for good, at that
// time of the replay. With ClosedLoop it makes the turns known that follow it;
// with TraceTime it does nothing. Each request is finished once. A time that is
// negative, NaN or infinite is a FieldError.
func (f *Feed) Finish(id uint64, endSeconds float64) error {
	if !(endSeconds >= 0 && endSeconds <= 1e15) {
		return &kvpolicy.FieldError{Path: "end_seconds", Value: fmt.Sprint(endSeconds), Want: "be from 0 to 1e15"}
	}
	if o := f.open[int64(id>>turnBits)]; o != nil && f.options.Pacing == ClosedLoop {
		f.release(o, int(id%maxTurns), endSeconds)
	}
	return nil
}

// Close releases the source.
func (f *Feed) Close() error { return f.source.close() }
