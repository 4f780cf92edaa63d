package kvpolicy

import (
	"encoding/json"
	"errors"
	"fmt"
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

// unreadable makes a FieldError of what encoding/json says; one that is a
// FieldError already stays as it is.
func unreadable(path string, err error) error {
	if errors.Is(err, ErrInvalid) {
		return err
	}
	return &FieldError{Path: path, Want: fmt.Sprintf("be as it was written (%v)", err)}
}

// moveJSON is the JSON form of a Move.
type moveJSON struct {
	Target          string  `json:"target"`
	Method          Method  `json:"method"`
	PlannedSeconds  float64 `json:"planned_s"`
	RiskGainSeconds float64 `json:"risk_gain_s"`
	DeltaTSeconds   float64 `json:"delta_t_s"`
	LossStaySeconds float64 `json:"loss_stay_s"`
	LossMoveSeconds float64 `json:"loss_move_s"`
}

// separationJSON is the JSON form of a Separation's verdict; what gate 5 alone
// knows is absent before it.
type separationJSON struct {
	Reason      Reason   `json:"reason"`
	NewLocal    int64    `json:"new_local"`
	Source      string   `json:"source,omitempty"`
	NewSource   *int64   `json:"new_source,omitempty"`
	CostLocal   *float64 `json:"cost_local,omitempty"`
	CostMigrate *float64 `json:"cost_migrate,omitempty"`
}

// decisionJSON is the JSON form of a Decision: what its action does not say is
// absent. (SPEC section 9; runner_up and margin are ours.)
type decisionJSON struct {
	Action          Action          `json:"action"`
	Target          string          `json:"target,omitempty"`
	Reason          Reason          `json:"reason"`
	Overcommitted   *bool           `json:"overcommitted,omitempty"`
	Degraded        *bool           `json:"degraded,omitempty"`
	Cost            *Breakdown      `json:"cost,omitempty"`
	Score           *float64        `json:"score,omitempty"`
	RunnerUp        string          `json:"runner_up,omitempty"`
	Margin          *float64        `json:"margin,omitempty"`
	PrefillOn       string          `json:"prefill_on,omitempty"`
	PDSep           *separationJSON `json:"pdsep,omitempty"`
	Method          Method          `json:"method,omitempty"`
	PlannedSeconds  *float64        `json:"planned_s,omitempty"`
	RiskGainSeconds *float64        `json:"risk_gain_s,omitempty"`
	DeltaTSeconds   *float64        `json:"delta_t_s,omitempty"`
	LossStaySeconds *float64        `json:"loss_stay_s,omitempty"`
	LossMoveSeconds *float64        `json:"loss_move_s,omitempty"`
	Candidate       *moveJSON       `json:"candidate,omitempty"`
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
	if v := &d.Separation; v.Reason != 0 {
		out.PDSep = &separationJSON{Reason: v.Reason, NewLocal: v.NewLocal, Source: v.Source}
		if v.Source != "" {
			out.PDSep.NewSource, out.PDSep.CostLocal, out.PDSep.CostMigrate = &v.NewSource, &v.CostLocal, &v.CostMigrate
		}
	}
	if d.Candidate.Target != "" {
		candidate := moveJSON(d.Candidate)
		out.Candidate = &candidate
	}
	return json.Marshal(out)
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
	if v := in.PDSep; v != nil {
		read.Separation = Separation{Reason: v.Reason, NewLocal: v.NewLocal, Source: v.Source}
		set(&read.Separation.NewSource, v.NewSource)
		set(&read.Separation.CostLocal, v.CostLocal)
		set(&read.Separation.CostMigrate, v.CostMigrate)
	}
	read.Move.Method = in.Method
	if in.Action == Migrate {
		read.Move.Target = in.Target
	}
	set(&read.Move.PlannedSeconds, in.PlannedSeconds)
	set(&read.Move.RiskGainSeconds, in.RiskGainSeconds)
	set(&read.Move.DeltaTSeconds, in.DeltaTSeconds)
	set(&read.Move.LossStaySeconds, in.LossStaySeconds)
	set(&read.Move.LossMoveSeconds, in.LossMoveSeconds)
	if in.Candidate != nil {
		read.Candidate = Move(*in.Candidate)
	}
	*d = read
	return nil
}

// set copies a value that is there.
func set[T any](to *T, from *T) {
	if from != nil {
		*to = *from
	}
}
