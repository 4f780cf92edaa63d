package kvpolicy

import (
	"encoding/json"
	"fmt"
	"math"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// asSpecified tells whether a number matches as SPEC section 9 asks.
func asSpecified(want, got float64) bool {
	return math.Abs(got-want) <= math.Max(1e-12, 1e-9*math.Abs(want))
}

func TestGoldenSurvival(t *testing.T) {
	for i, line := range curveLines[struct {
		Curve  json.RawMessage
		Probes []struct {
			Age      float64 `json:"age_s"`
			Dt       float64 `json:"dt_s"`
			Survival float64
		}
	}](t, "../shared/golden/survival.jsonl") {
		curve, err := DecodeCurve(line.Curve)
		require.NoError(t, err)
		for _, probe := range line.Probes {
			got, err := ConditionalSurvival(curve, probe.Age, probe.Dt)
			require.NoError(t, err)
			assert.True(t, asSpecified(probe.Survival, got), "line %d, %+v: %v", i+1, probe, got)
		}
	}
}

// goldenCase is as much of a golden case as the loss of an instance needs.
type goldenCase struct {
	Name   string
	Policy struct {
		Preset string
		Cost   *struct {
			DecodeIteration *float64 `json:"decode_iteration_s"`
		}
		Hazard *struct {
			StallPenalty *float64 `json:"stall_penalty_s"`
			Cells        *int
		}
		Migration *struct {
			OverlapRounds int `json:"overlap_rounds"`
		}
		Transfer map[string]float64
	}
	Snapshot struct {
		Request struct {
			Context   float64 `json:"context_tokens"`
			Remaining float64 `json:"remaining_tokens"`
			RunningOn string  `json:"running_on"`
		}
		Instances []goldenInstance
		Curves    map[string]json.RawMessage
	}
	Want struct {
		Action, Target, Reason string
		Cost                   *struct{ Loss *float64 }
		LossStay               *float64 `json:"loss_stay_s"`
		LossMove               *float64 `json:"loss_move_s"`
		Planned                *float64 `json:"planned_s"`
		Candidate              *struct {
			Target   string
			LossStay *float64 `json:"loss_stay_s"`
			LossMove *float64 `json:"loss_move_s"`
		}
	}
}

type goldenInstance struct {
	ID            string
	Requests      float64
	Pending       float64 `json:"pending_prefill_tokens"`
	Cached        float64 `json:"cached_tokens"`
	Wait          float64 `json:"wait_s"`
	Prefill       float64 `json:"prefill_rate"`
	Decode        float64 `json:"decode_rate"`
	Uptime        float64 `json:"uptime_s"`
	Curve         string
	Unavailable   bool
	Interrupted   bool
	MetricsAge    float64 `json:"metrics_age_s"`
	CapacityTotal float64 `json:"kv_capacity_tokens"`
}

// loss is L_i by SPEC 5 for the instance with this name, with a prefill term
// where prefill is set, of a request in the given state.
func (c *goldenCase) loss(t *testing.T, id string, prefill bool, context, remaining, aged float64) float64 {
	stall, cells, iteration, overhead := 2.0, 16, 0.0, 0.2
	if h := c.Policy.Hazard; h != nil {
		if h.StallPenalty != nil {
			stall = *h.StallPenalty
		}
		if h.Cells != nil {
			cells = *h.Cells
		}
	}
	if p := c.Policy.Cost; p != nil && p.DecodeIteration != nil {
		iteration = *p.DecodeIteration
	}
	if o, ok := c.Policy.Transfer["recompute_overhead_s"]; ok {
		overhead = o
	}
	fallback := 0.0
	var it goldenInstance
	for _, i := range c.Snapshot.Instances {
		if i.Prefill == 0 {
			i.Prefill = 7000
		}
		if i.ID == id {
			it = i
		} else if !i.Unavailable {
			fallback = math.Max(fallback, i.Prefill)
		}
	}
	require.NotEmpty(t, it.ID)
	wait := it.Requests*iteration + it.Pending/it.Prefill + it.Wait
	total := wait + remaining/it.Decode
	if prefill {
		total += math.Max(0, context-it.Cached) / it.Prefill
	}
	u := Exposure{ContextTokens: context, DecodeRate: it.Decode, WaitSeconds: wait, RemainingTokens: remaining,
		FallbackPrefillRate: fallback, OverheadSeconds: overhead + stall}
	if fallback == 0 {
		u = Exposure{OverheadSeconds: total + stall}
	}
	var curve Curve
	if it.Curve != "" {
		var err error
		curve, err = DecodeCurve(c.Snapshot.Curves[it.Curve])
		require.NoError(t, err)
	}
	loss, err := ExpectedLoss(curve, it.Uptime+aged, 0, total, cells, u)
	require.NoError(t, err)
	return loss
}

// The golden cases check whole decisions; here the loss in them alone is
// checked, worked out from the snapshot by the words of the specification.
func TestGoldenLosses(t *testing.T) {
	for _, file := range []string{"hazard", "migration", "edges"} {
		t.Run(file, func(t *testing.T) {
			checked := 0
			for _, c := range curveLines[goldenCase](t, fmt.Sprintf("../shared/golden/%s.jsonl", file)) {
				if c.Policy.Preset != "hazard_aware" {
					continue
				}
				r := c.Snapshot.Request
				check := func(want *float64, got float64, what string) {
					checked++
					assert.True(t, asSpecified(*want, got), "%s: %s: want %v, got %v", c.Name, what, *want, got)
				}
				if w := c.Want; w.Cost != nil && w.Cost.Loss != nil && (w.Action == "place" || w.Action == "recover") {
					check(w.Cost.Loss, c.loss(t, w.Target, true, r.Context, r.Remaining, 0), "loss")
				}
				if c.Policy.Migration != nil && c.Policy.Migration.OverlapRounds > 0 {
					continue // the hand-off changes what is left to lose
				}
				target, stay, move := c.Want.Target, c.Want.LossStay, c.Want.LossMove
				if candidate := c.Want.Candidate; candidate != nil {
					target, stay, move = candidate.Target, candidate.LossStay, candidate.LossMove
				}
				if stay != nil {
					check(stay, c.loss(t, r.RunningOn, false, r.Context, r.Remaining, 0), "loss_stay_s")
				}
				if move != nil {
					check(move, c.loss(t, target, false, r.Context, r.Remaining, 0), "loss_move_s")
				}
			}
			assert.NotZero(t, checked)
		})
	}
}
