package track

// home is where a session's last turn went.
type home struct {
	instance string
	life     uint64 // of the instance then: its KV did not outlive it
	seen     float64
}

// bind makes an instance the home of a session.
func (t *Tracker) bind(session string, i *instance, now float64) {
	if session != "" && t.sessions != nil {
		t.sessions.Add(session, home{i.id, i.life, now})
	}
}

// touch renews a session whose home is still that instance.
func (t *Tracker) touch(session string, i *instance, now float64) {
	if t.homeOf(session, now) == i.id {
		t.bind(session, i, now)
	}
}

// homeOf is the id of a session's home; empty where it has none, its time is
// up, or its instance has left or restarted.
func (t *Tracker) homeOf(session string, now float64) string {
	if session == "" || t.sessions == nil {
		return ""
	}
	h, ok := t.sessions.Peek(session)
	if !ok || now-h.seen > t.config.SessionTTL.Seconds() {
		return ""
	}
	if i := t.byID[h.instance]; i == nil || i.life != h.life {
		return ""
	}
	return h.instance
}
