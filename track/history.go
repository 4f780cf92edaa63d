package track

import (
	"slices"
	"strings"
	"time"
)

// Session is one session of a node, from when it came up to when it was lost,
// as far as it was watched.
type Session struct {
	// DurationSeconds is the node's age when the session ended or was last seen.
	DurationSeconds float64
	// Observed tells that it ended then, unplanned. A session that is still
	// open, or whose end was planned, is censored.
	Observed bool
	// EnteredSeconds is the node's age when watching began (left truncation).
	EnteredSeconds float64
}

// NodeHistory is the sessions of one node, oldest first.
type NodeHistory struct {
	Node     string
	Sessions []Session
}

// History returns the sessions of every node that is remembered, those of now
// included as censored, in the order of the nodes' names.
func (t *Tracker) History(now time.Time) []NodeHistory {
	t.mu.RLock()
	defer t.mu.RUnlock()
	if t.history == nil {
		return nil
	}
	byNode := map[string][]Session{}
	for _, node := range t.history.Keys() {
		sessions, _ := t.history.Peek(node)
		byNode[node] = slices.Clone(sessions)
	}
	for _, i := range t.instances {
		byNode[i.node()] = append(byNode[i.node()], i.session(t.seconds(now), false))
	}
	histories := make([]NodeHistory, 0, len(byNode))
	for node, sessions := range byNode {
		histories = append(histories, NodeHistory{node, sessions})
	}
	slices.SortFunc(histories, func(a, b NodeHistory) int { return strings.Compare(a.Node, b.Node) })
	return histories
}

// node is the name of the instance's history.
func (i *instance) node() string {
	if i.known.Node != "" {
		return i.known.Node
	}
	return i.id
}

// session is the instance's present session as it stands at the end.
func (i *instance) session(end float64, observed bool) Session {
	s := Session{DurationSeconds: age(i.started, end), Observed: observed, EnteredSeconds: age(i.started, i.watched)}
	if s.EnteredSeconds >= s.DurationSeconds { // watched for no time: nothing was observed
		s.EnteredSeconds, s.Observed = s.DurationSeconds, false
	}
	return s
}

// closeSession writes the instance's session into the history of its node.
func (t *Tracker) closeSession(i *instance, end float64, observed bool) {
	if t.history == nil {
		return
	}
	sessions, _ := t.history.Get(i.node())
	if len(sessions) >= t.config.HistorySessions {
		sessions = sessions[len(sessions)-t.config.HistorySessions+1:]
	}
	t.history.Add(i.node(), append(slices.Clip(sessions), i.session(end, observed)))
}

// age is the time from one instant to another, within what a snapshot allows.
func age(from, to float64) float64 { return min(max(0, to-from), maxSeconds) }
