package churn

import "github.com/kvpolicy/kvpolicy"

// learner estimates the curves of nodes from their sessions as far as they have
// been seen: from the node's own where there are enough, else from its group's,
// else from the fleet's.
type learner struct {
	histories *kvpolicy.Histories
}

// newLearner has seen what was over before second 0.
func newLearner(nodes []Node, minSessions int) (learner, error) {
	l := learner{kvpolicy.NewHistories(minSessions)}
	for i := range nodes {
		for k := range nodes[i].Sessions {
			if s := &nodes[i].Sessions[k]; s.EndSeconds <= 0 {
				if err := l.ended(&nodes[i], s); err != nil {
					return l, err
				}
			}
		}
	}
	return l, nil
}

// ended learns from a session that is over.
func (l learner) ended(n *Node, s *Session) error {
	if s.AgeUnknown {
		return nil
	}
	return l.histories.Add(n.Name, n.Group, kvpolicy.Session{DurationSeconds: s.EndSeconds - s.StartSeconds, Observed: s.Failed})
}

// running learns how old a session is that is not over: that is censored there.
func (l learner) running(n *Node, s *Session, now float64) error {
	if s.AgeUnknown {
		return nil
	}
	return l.histories.SetRunning(n.Name, n.Group, now-s.StartSeconds, 0)
}

// curve is the survival curve of a node.
func (l learner) curve(n *Node) kvpolicy.Curve {
	curve, _ := l.histories.Curve(n.Name)
	return curve
}
