package kvpolicy

import (
	"encoding/json"
	"errors"
	"fmt"
	"unicode/utf8"
)

// breakdownJSON is the JSON form of a Breakdown.
type breakdownJSON struct {
	Contention   float64 `json:"contention"`
	Queue        float64 `json:"queue"`
	Prefill      float64 `json:"prefill"`
	Interference float64 `json:"interference"`
	Decode       float64 `json:"decode"`
	Loss         float64 `json:"loss"`
	Total        float64 `json:"total"`
}

// MarshalJSON writes the terms and their total.
func (b Breakdown) MarshalJSON() ([]byte, error) {
	return json.Marshal(breakdownJSON{b.Contention, b.Queue, b.Prefill, b.Interference, b.Decode, b.Loss, b.Total()})
}

// UnmarshalJSON reads the terms; the total is left aside.
func (b *Breakdown) UnmarshalJSON(data []byte) error {
	var in breakdownJSON
	if err := json.Unmarshal(data, &in); err != nil {
		return unreadable("cost", err)
	}
	*b = Breakdown{in.Contention, in.Queue, in.Prefill, in.Interference, in.Decode, in.Loss}
	return nil
}

// unreadable makes a FieldError of what encoding/json says, either way; one that is a
// FieldError already stays as it is.
func unreadable(path string, err error) error {
	if errors.Is(err, ErrInvalid) {
		return err
	}
	return &FieldError{Path: path, Want: fmt.Sprintf("have a JSON form (%v)", err)}
}

// moveJSON is the JSON form of a Move.
type moveJSON struct {
	Target          string  `json:"target,omitempty"`
	Method          Method  `json:"method,omitempty"`
	PlannedSeconds  float64 `json:"planned_s"`
	RiskGainSeconds float64 `json:"risk_gain_s"`
	DeltaTSeconds   float64 `json:"delta_t_s"`
	LossStaySeconds float64 `json:"loss_stay_s"`
	LossMoveSeconds float64 `json:"loss_move_s"`
}

// MarshalJSON writes the move in the words of SPEC section 9.
func (m Move) MarshalJSON() ([]byte, error) { return json.Marshal(moveJSON(m)) }

// UnmarshalJSON reads a move that MarshalJSON wrote.
func (m *Move) UnmarshalJSON(data []byte) error {
	if err := json.Unmarshal(data, (*moveJSON)(m)); err != nil {
		return unreadable("move", err)
	}
	return nil
}

// separationJSON is the JSON form of a Separation's verdict; what gate 5 alone
// knows is absent before it.
type separationJSON struct {
	Reason      Reason   `json:"reason,omitempty"`
	NewLocal    int64    `json:"new_local"`
	Source      string   `json:"source,omitempty"`
	NewSource   *int64   `json:"new_source,omitempty"`
	CostLocal   *float64 `json:"cost_local,omitempty"`
	CostMigrate *float64 `json:"cost_migrate,omitempty"`
}

// MarshalJSON writes the verdict in the words of SPEC section 9.
func (v Separation) MarshalJSON() ([]byte, error) {
	out := separationJSON{Reason: v.Reason, NewLocal: v.NewLocal, Source: v.Source}
	if v.Source != "" {
		out.NewSource, out.CostLocal, out.CostMigrate = &v.NewSource, &v.CostLocal, &v.CostMigrate
	}
	return json.Marshal(out)
}

// UnmarshalJSON reads a verdict that MarshalJSON wrote.
func (v *Separation) UnmarshalJSON(data []byte) error {
	var in separationJSON
	if err := json.Unmarshal(data, &in); err != nil {
		return unreadable("pdsep", err)
	}
	*v = Separation{Reason: in.Reason, NewLocal: in.NewLocal, Source: in.Source}
	set(&v.NewSource, in.NewSource)
	set(&v.CostLocal, in.CostLocal)
	set(&v.CostMigrate, in.CostMigrate)
	return nil
}

// MarshalJSON writes the candidate: instance, tier, reason, rank, cost and score,
// and as pdsep and move what it is as a source and as a destination.
func (c Candidate) MarshalJSON() ([]byte, error) {
	out := struct {
		Instance string      `json:"instance"`
		Tier     Tier        `json:"tier"`
		Reason   Reason      `json:"reason"`
		Rank     int         `json:"rank,omitempty"`
		Cost     Breakdown   `json:"cost"`
		Score    float64     `json:"score"`
		PDSep    *Separation `json:"pdsep,omitempty"`
		Move     *Move       `json:"move,omitempty"`
	}{Instance: c.Instance, Tier: c.Tier, Reason: c.Reason, Rank: c.Rank, Cost: c.Cost, Score: c.Score}
	if c.Separation.Reason != 0 {
		out.PDSep = &c.Separation
	}
	if c.Move.Target != "" {
		out.Move = &c.Move
	}
	return json.Marshal(out)
}

// decisionJSON is the JSON form of a Decision: what its action does not say is
// absent. (SPEC section 9; runner_up and margin are ours.)
type decisionJSON struct {
	Action          Action      `json:"action"`
	Target          string      `json:"target,omitempty"`
	Reason          Reason      `json:"reason"`
	Overcommitted   *bool       `json:"overcommitted,omitempty"`
	Degraded        *bool       `json:"degraded,omitempty"`
	Cost            *Breakdown  `json:"cost,omitempty"`
	Score           *float64    `json:"score,omitempty"`
	RunnerUp        string      `json:"runner_up,omitempty"`
	Margin          *float64    `json:"margin,omitempty"`
	PrefillOn       string      `json:"prefill_on,omitempty"`
	PDSep           *Separation `json:"pdsep,omitempty"`
	Method          Method      `json:"method,omitempty"`
	PlannedSeconds  *float64    `json:"planned_s,omitempty"`
	RiskGainSeconds *float64    `json:"risk_gain_s,omitempty"`
	DeltaTSeconds   *float64    `json:"delta_t_s,omitempty"`
	LossStaySeconds *float64    `json:"loss_stay_s,omitempty"`
	LossMoveSeconds *float64    `json:"loss_move_s,omitempty"`
	Candidate       *Move       `json:"candidate,omitempty"`
}

// MarshalJSON writes the decision in the words of SPEC section 9. The zero
// Decision is none and an error.
func (d Decision) MarshalJSON() ([]byte, error) {
	out := decisionJSON{Action: d.Action, Target: d.Target, Reason: d.Reason, PrefillOn: d.PrefillOn,
		RunnerUp: d.RunnerUp, Method: d.Move.Method}
	switch d.Action {
	case Place, PrefillRemote, Recover:
		out.Overcommitted, out.Degraded, out.Cost = &d.Overcommitted, &d.Degraded, &d.Cost
		out.Score, out.Margin = &d.Score, &d.Margin
	case Migrate:
		m := &d.Move
		out.PlannedSeconds, out.RiskGainSeconds, out.DeltaTSeconds = &m.PlannedSeconds, &m.RiskGainSeconds, &m.DeltaTSeconds
		out.LossStaySeconds, out.LossMoveSeconds = &m.LossStaySeconds, &m.LossMoveSeconds
	}
	if d.Separation.Reason != 0 {
		out.PDSep = &d.Separation
	}
	if d.Candidate.Target != "" {
		out.Candidate = &d.Candidate
	}
	for _, id := range []string{d.Target, d.RunnerUp, d.PrefillOn, d.Separation.Source, d.Candidate.Target} {
		if !utf8.ValidString(id) {
			return nil, fieldError("target", id, "be UTF-8 to be written as JSON")
		}
	}
	data, err := json.Marshal(out)
	if err != nil {
		return nil, unreadable("decision", err)
	}
	return data, nil
}

// UnmarshalJSON reads a decision that MarshalJSON wrote, from a log.
func (d *Decision) UnmarshalJSON(data []byte) error {
	var in decisionJSON
	if err := json.Unmarshal(data, &in); err != nil {
		return unreadable("decision", err)
	}
	read := Decision{Action: in.Action, Target: in.Target, Reason: in.Reason, RunnerUp: in.RunnerUp,
		PrefillOn: in.PrefillOn}
	set(&read.Overcommitted, in.Overcommitted)
	set(&read.Degraded, in.Degraded)
	set(&read.Cost, in.Cost)
	set(&read.Score, in.Score)
	set(&read.Margin, in.Margin)
	set(&read.Separation, in.PDSep)
	read.Move.Method = in.Method
	if in.Action == Migrate {
		read.Move.Target = in.Target
	}
	set(&read.Move.PlannedSeconds, in.PlannedSeconds)
	set(&read.Move.RiskGainSeconds, in.RiskGainSeconds)
	set(&read.Move.DeltaTSeconds, in.DeltaTSeconds)
	set(&read.Move.LossStaySeconds, in.LossStaySeconds)
	set(&read.Move.LossMoveSeconds, in.LossMoveSeconds)
	set(&read.Candidate, in.Candidate)
	*d = read
	return nil
}

// set copies a value that is there.
func set[T any](to *T, from *T) {
	if from != nil {
		*to = *from
	}
}
