// Package decisionlog writes decisions so that examples/decide reads them back:
// decides them again, under the same policy or another.
package decisionlog

import (
	"encoding/json"
	"io"
	"sync"
	"time"

	"github.com/kvpolicy/kvpolicy"
)

// Log writes a decision a line. It may be used from any number of goroutines.
type Log struct {
	policy json.RawMessage
	mu     sync.Mutex
	to     io.Writer
}

// New makes a log of decisions by a policy; the error is that of a policy
// that has no JSON form.
func New(to io.Writer, policy kvpolicy.Policy) (*Log, error) {
	text, err := json.Marshal(policy)
	return &Log{policy: text, to: to}, err
}

// line is what examples/decide reads.
type line struct {
	Name     string            `json:"name"`
	Time     time.Time         `json:"time"`
	Policy   json.RawMessage   `json:"policy"`
	Snapshot kvpolicy.Snapshot `json:"snapshot"`
	Decision kvpolicy.Decision `json:"decision"`
}

// Write writes one decision, in one Write to what is below. Call it before the
// snapshot's buffer is used again.
func (l *Log) Write(s kvpolicy.Snapshot, d kvpolicy.Decision, now time.Time) error {
	text, err := json.Marshal(line{s.Request.ID, now, l.policy, s, d})
	if err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	_, err = l.to.Write(append(text, '\n'))
	return err
}
