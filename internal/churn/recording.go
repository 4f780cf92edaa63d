package churn

import (
	"bufio"
	"cmp"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"

	"github.com/kvpolicy/kvpolicy"
)

// Recording is sessions of real nodes.
type Recording struct {
	sessions []recorded // in order of start; the first starts at 0
	span     float64    // until the last end
}

// recorded is one of them, and the line on which it stands.
type recorded struct {
	Session
	node, group string
	line        int
}

// ReadRecording reads a CSV file of sessions. Its first line names the columns,
// in any order: node, group (what curves are pooled by, may be empty), start_s
// (of any clock), duration_seconds, observed (1 = the node was lost then, 0 =
// it was still up, or was stopped on purpose) and left_truncated (1 = it had
// been up before start_s already); others are ignored. Errors begin with
// name and line, and are kvpolicy.FieldErrors that name the column where one is
// to blame.
func ReadRecording(name string, from io.Reader) (*Recording, error) {
	buffered := bufio.NewReader(from)
	const mark = "\ufeff" // with which some spreadsheets begin
	if start, _ := buffered.Peek(len(mark)); string(start) == mark {
		buffered.Discard(len(mark))
	}
	file := csv.NewReader(buffered)
	file.ReuseRecord = true
	fail := func(line int, column, value, want string) error {
		return fmt.Errorf("%s:%d: %w", name, line, &kvpolicy.FieldError{Path: column, Value: strconv.Quote(value), Want: want})
	}
	columns := [...]string{"node", "group", "start_s", "duration_seconds", "observed", "left_truncated"}
	var at [len(columns)]int
	head, err := file.Read()
	if err != nil {
		return nil, readError(name, err)
	}
	for i, column := range columns {
		if at[i] = slices.Index(head, column); at[i] < 0 {
			return nil, fmt.Errorf("%s:1: %w", name, &kvpolicy.FieldError{Path: column, Want: "be a column"})
		}
	}
	r := &Recording{}
	for {
		fields, err := file.Read()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, readError(name, err)
		}
		line, _ := file.FieldPos(0)
		text := func(i int) string { return fields[at[i]] }
		number := func(i int, least, most float64) (float64, error) {
			value, err := strconv.ParseFloat(text(i), 64)
			if err != nil || !(value >= least && value <= most) {
				return 0, fail(line, columns[i], text(i), fmt.Sprintf("be a number from %g to %g", least, most))
			}
			return value, nil
		}
		flag := func(i int) (bool, error) {
			if text(i) != "0" && text(i) != "1" {
				return false, fail(line, columns[i], text(i), "be 0 or 1")
			}
			return text(i) == "1", nil
		}
		if text(0) == "" {
			return nil, fail(line, columns[0], "", "not be empty")
		}
		s := recorded{node: text(0), group: text(1), line: line}
		var duration float64
		if s.StartSeconds, err = number(2, -1e12, 1e12); err == nil {
			if duration, err = number(3, 0, 1e8); err == nil {
				if s.Failed, err = flag(4); err == nil {
					s.AgeUnknown, err = flag(5)
				}
			}
		}
		if err != nil {
			return nil, err
		}
		s.EndSeconds = s.StartSeconds + duration
		r.sessions = append(r.sessions, s)
	}
	if len(r.sessions) == 0 {
		return nil, fmt.Errorf("%s: %w", name, &kvpolicy.FieldError{Path: "sessions", Want: "be at least one line below the head"})
	}
	slices.SortStableFunc(r.sessions, func(a, b recorded) int { return cmp.Compare(a.StartSeconds, b.StartSeconds) })
	first, last := r.sessions[0].StartSeconds, map[string]float64{}
	for i := range r.sessions {
		s := &r.sessions[i]
		if end, seen := last[s.node]; seen && s.StartSeconds < end {
			// One session's start and duration may add up to a last bit more than the
			// next one's start says: seconds since 1970 leave few digits.
			if end-s.StartSeconds <= 4*0x1p-52*math.Abs(end) {
				s.StartSeconds, s.EndSeconds = end, max(end, s.EndSeconds)
			} else {
				return nil, fail(s.line, "start_s", fmt.Sprint(s.StartSeconds), fmt.Sprintf("not lie before %v, when the session of %s before ends", end, s.node))
			}
		}
		last[s.node] = s.EndSeconds
		s.StartSeconds -= first
		s.EndSeconds -= first
		r.span = max(r.span, s.EndSeconds)
	}
	if !(r.span <= 1e9) {
		return nil, fmt.Errorf("%s: %w", name, &kvpolicy.FieldError{Path: "start_s", Value: fmt.Sprintf("%v s later in the last line", r.span), Want: "span at most 1e9 seconds"})
	}
	return r, nil
}

func readError(name string, err error) error {
	var malformed *csv.ParseError
	switch {
	case errors.Is(err, io.EOF):
		return fmt.Errorf("%s:1: %w", name, &kvpolicy.FieldError{Path: "columns", Want: "be named in the first line"})
	case errors.As(err, &malformed):
		return fmt.Errorf("%s:%d: %w", name, malformed.Line, &kvpolicy.FieldError{Path: "columns", Want: "be as many as in the first line, in valid CSV: " + malformed.Err.Error()})
	}
	return fmt.Errorf("%s: %w", name, err)
}

// SpanSeconds is how long it takes from the first start to the last end.
func (r *Recording) SpanSeconds() float64 { return r.span }

// MedianStart is when half of the sessions have begun, in seconds from the first
// start: a time with as many of them to learn from as to come.
func (r *Recording) MedianStart() float64 { return r.sessions[(len(r.sessions)-1)/2].StartSeconds }

// MeanUp is how many nodes are up on average within so many seconds from start.
func (r *Recording) MeanUp(start, seconds float64) float64 {
	up := 0.0
	for _, s := range r.sessions {
		up += max(0, min(s.EndSeconds, start+seconds)-max(s.StartSeconds, start))
	}
	return up / seconds
}

// Draw draws a scenario on the recorded nodes: it begins so many seconds after
// the first start, and what was over by then is there to learn from. The seed
// draws requests, and the nodes' rates, as Fleet.Draw does for nodes of that
// kind; the sessions are as recorded.
func (r *Recording) Draw(kind Kind, seed uint64, rate, start, horizon float64) (Scenario, error) {
	s := Scenario{Seed: seed, HorizonSeconds: horizon}
	index := map[string]int{}
	for _, session := range r.sessions {
		i, seen := index[session.node]
		if !seen {
			i = len(s.Nodes)
			index[session.node] = i
			node := kind.draw(newSource(seed, streamNode, i))
			node.Name, node.Group = session.node, session.group
			s.Nodes = append(s.Nodes, node)
		}
		moved := session.Session
		moved.StartSeconds -= start
		moved.EndSeconds -= start
		s.Nodes[i].Sessions = append(s.Nodes[i].Sessions, moved)
	}
	s.drawRequests(rate)
	return s, s.validate()
}
