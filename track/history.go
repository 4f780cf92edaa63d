package track

import (
	"time"

	"github.com/kvpolicy/kvpolicy"
)

// record is the sessions of one node that are over, oldest first.
type record struct {
	kind     string
	sessions []kvpolicy.Session
}

// fittedCurve is a survival curve, and the name that snapshots call it by.
type fittedCurve struct {
	curve kvpolicy.Curve
	name  string
}

// Histories returns the sessions of every node that is remembered, those that
// are running now included. Nodes are named by the ids of their instances.
func (t *Tracker) Histories(now time.Time) *kvpolicy.Histories {
	t.mu.RLock()
	defer t.mu.RUnlock()
	h := kvpolicy.NewHistories(kvpolicy.DefaultMinSessions)
	// Sessions are kept within what Histories asks of them.
	if t.history != nil {
		for _, id := range t.history.Keys() {
			r, _ := t.history.Peek(id)
			for _, s := range r.sessions {
				_ = h.Add(id, r.kind, s)
			}
		}
	}
	for _, i := range t.instances {
		s := i.session(t.seconds(now), false)
		_ = h.SetRunning(i.id, i.known.Kind, s.DurationSeconds, s.EnteredSeconds)
	}
	return h
}

// FitCurves gives every instance a Kaplan-Meier curve, from the sessions of its
// node where at least kvpolicy.DefaultMinSessions of them are completed, else
// of its kind, else of all. Call it about once a minute where the policy has a
// hazard model; it takes time in proportion to the sessions that are
// remembered, most of it without holding up anybody. Instances that join later
// take the curve of their node, kind or fleet as of then, those that joined
// before the first call have none, and never fail.
func (t *Tracker) FitCurves(now time.Time) {
	h := t.Histories(now)
	fitted := map[*instance]fittedCurve{}
	kinds := map[*instance]string{}
	t.mu.RLock()
	for _, i := range t.instances {
		kinds[i] = i.known.Kind
	}
	t.mu.RUnlock()
	for i, kind := range kinds {
		fitted[i] = curveOf(h, i.id, kind)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.fitted = h
	for i, f := range fitted {
		i.survival = f
	}
}

// curveOf is the curve of a node.
func curveOf(h *kvpolicy.Histories, id, kind string) fittedCurve {
	curve, level := h.Curve(id)
	switch level {
	case kvpolicy.LevelNode:
		return fittedCurve{curve, "node " + id}
	case kvpolicy.LevelKind:
		return fittedCurve{curve, "kind " + kind}
	}
	return fittedCurve{curve, "fleet"}
}

// session is the instance's present session as it stands at the end.
func (i *instance) session(end float64, observed bool) kvpolicy.Session {
	s := kvpolicy.Session{DurationSeconds: age(i.started, end), EnteredSeconds: age(i.started, i.watched)}
	if s.EnteredSeconds >= s.DurationSeconds {
		s.EnteredSeconds = s.DurationSeconds // watched for no time: it says nothing
	} else {
		s.Observed = observed
	}
	return s
}

// closeSession writes the instance's session into the history of its node.
func (t *Tracker) closeSession(i *instance, end float64, observed bool) {
	if t.history == nil {
		return
	}
	r, _ := t.history.Get(i.id)
	if most := t.config.HistorySessions; len(r.sessions) >= most {
		r.sessions = append([]kvpolicy.Session(nil), r.sessions[len(r.sessions)-most+1:]...)
	}
	t.history.Add(i.id, record{i.known.Kind, append(r.sessions, i.session(end, observed))})
}

// age is the time from one instant to another, within what a snapshot allows.
func age(from, to float64) float64 { return min(max(0, to-from), maxSeconds) }
