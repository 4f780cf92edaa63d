package kvpolicy

import "slices"

// DefaultMinSessions is how many completed sessions a node needs for a curve of
// its own (SPEC 5.1).
const DefaultMinSessions = 5

// PoolLevel is whose sessions a curve was estimated from.
type PoolLevel uint8

const (
	LevelNode  PoolLevel = 1 + iota // node
	LevelKind                       // kind
	LevelFleet                      // fleet
)

// MarshalText gives the level's word.
func (l PoolLevel) MarshalText() ([]byte, error) { return marshalWord(l, LevelFleet, "level") }

// UnmarshalText reads the level's word.
func (l *PoolLevel) UnmarshalText(text []byte) error {
	return unmarshalWord(l, text, LevelFleet, "level")
}

// Histories collects the sessions of many nodes and gives one curve per node:
// from the node's own sessions where enough of them are completed, else from
// those of all nodes of its kind (laptop, spot, ...; ours, optional), else from
// those of all nodes.
//
// Adding a session takes constant time. Curves are estimated when they are
// asked for, and kept until a session is added that they rest on: the first
// question after that takes O(n), n being the sessions of the level that
// answers, and later ones none. The curves given out do not change.
//
// The order in which sessions were added changes nothing. A Histories is not
// safe for use by several goroutines at once; its curves are. It is made by
// NewHistories.
type Histories struct {
	minSessions int
	fleet       history
	kinds       map[string]*history
	nodes       map[string]*nodeHistory
}

// nodeHistory is a node's sessions, and the one that is running.
type nodeHistory struct {
	history
	kind    *history // nil without one
	running Session
	up      bool
}

// history is the sessions of a node, a kind or the fleet.
type history struct {
	sorted    []Session // by compareSessions; shared with curves, never written
	added     []Session // since
	completed int
	members   []*nodeHistory // the nodes whose running sessions belong here
	curve     *KaplanMeier   // nil: to be estimated
}

// NewHistories makes an empty collection. A node, or a kind, with fewer than
// minSessions completed sessions takes the curve of the level above;
// DefaultMinSessions is what the specification uses, and 0 never pools.
func NewHistories(minSessions int) *Histories {
	return &Histories{minSessions: minSessions, kinds: map[string]*history{}, nodes: map[string]*nodeHistory{}}
}

// Add adds a session that is over, or that is known until some age and no
// longer watched (not Observed), of a node of a kind; kind "" is none. It ends
// the session that SetRunning set. Errors are the FieldErrors
// "duration_seconds" and "entered_seconds", see Session.
func (h *Histories) Add(node, kind string, s Session) error {
	if err := s.validate(); err != nil {
		return err
	}
	n := h.node(node, kind)
	n.up = false
	n.add(s)
	if n.kind != nil {
		n.kind.add(s)
	}
	h.fleet.add(s)
	return nil
}

// SetRunning tells the age, in seconds, of the session that a node is in now,
// and the age at which watching it began. It counts as one censored session,
// until the next call replaces it or Add ends it. As it makes the curves
// that rest on it be estimated anew, call it at the rate at which they should
// age, such as once a minute, not for every decision. Errors as in Add.
func (h *Histories) SetRunning(node, kind string, ageSeconds, enteredSeconds float64) error {
	s := Session{DurationSeconds: ageSeconds, EnteredSeconds: enteredSeconds}
	if err := s.validate(); err != nil {
		return err
	}
	n := h.node(node, kind)
	n.running, n.up = s, true
	n.curve = nil
	if n.kind != nil {
		n.kind.curve = nil
	}
	h.fleet.curve = nil
	return nil
}

// Curve is the curve of a node, and whose sessions it was estimated from. A
// node never heard of takes the fleet's, and a fleet without sessions has
// exp(-t/3600).
func (h *Histories) Curve(node string) (*KaplanMeier, PoolLevel) {
	if n := h.nodes[node]; n != nil {
		if n.completed >= h.minSessions {
			return n.estimate(), LevelNode
		}
		if n.kind != nil && n.kind.completed >= h.minSessions {
			return n.kind.estimate(), LevelKind
		}
	}
	return h.fleet.estimate(), LevelFleet
}

// node finds or makes a node, and moves it to the kind. Its running session
// moves along; sessions that were added stay with the kind that they were
// added under.
func (h *Histories) node(name, kind string) *nodeHistory {
	n := h.nodes[name]
	if n == nil {
		n = &nodeHistory{}
		n.members = []*nodeHistory{n}
		h.nodes[name] = n
		h.fleet.members = append(h.fleet.members, n)
	}
	var of *history
	if kind != "" {
		if of = h.kinds[kind]; of == nil {
			of = &history{}
			h.kinds[kind] = of
		}
	}
	if of == n.kind {
		return n
	}
	if n.kind != nil {
		n.kind.curve = nil
		n.kind.members = slices.DeleteFunc(n.kind.members, func(m *nodeHistory) bool { return m == n })
	}
	if of != nil {
		of.curve = nil
		of.members = append(of.members, n)
	}
	n.kind = of
	return n
}

// validate is the error of a session that stands alone.
func (s Session) validate() error {
	switch late, want := s.fault(); {
	case want == "":
		return nil
	case late:
		return fieldError("entered_seconds", s.EnteredSeconds, want)
	default:
		return fieldError("duration_seconds", s.DurationSeconds, want)
	}
}

func (h *history) add(s Session) {
	h.added = append(h.added, s)
	if s.Observed {
		h.completed++
	}
	h.curve = nil
}

// estimate brings the curve up to date.
func (h *history) estimate() *KaplanMeier {
	if h.curve != nil {
		return h.curve
	}
	if len(h.added) > 0 {
		h.sorted = mergeSessions(h.sorted, h.added)
		h.added = nil
	}
	var running []Session
	for _, n := range h.members {
		if n.up {
			running = append(running, n.running)
		}
	}
	h.curve = estimate(mergeSessions(h.sorted, running))
	return h.curve
}

// mergeSessions is the sorted union of sorted sessions and some more, which are
// left sorted. It writes to neither's sorted part.
func mergeSessions(sorted, more []Session) []Session {
	if len(more) == 0 {
		return sorted
	}
	slices.SortFunc(more, compareSessions)
	merged := make([]Session, 0, len(sorted)+len(more))
	for len(sorted) > 0 && len(more) > 0 {
		if compareSessions(sorted[0], more[0]) <= 0 {
			merged, sorted = append(merged, sorted[0]), sorted[1:]
		} else {
			merged, more = append(merged, more[0]), more[1:]
		}
	}
	return append(append(merged, sorted...), more...)
}
