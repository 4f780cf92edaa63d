package churn

import (
	"slices"

	"gonum.org/v1/gonum/stat"
)

// Result is what came of a scenario under a strategy.
type Result struct {
	// Requests is how many arrived, Completed how many of them finished by the
	// horizon; the others were under way.
	Requests, Completed int
	// MeanLatencySeconds and P99LatencySeconds are over the completed: the time
	// from arrival to the last token. 0 where none is. The 99th percentile is
	// the least latency that 99 % do not exceed.
	MeanLatencySeconds, P99LatencySeconds float64
	// UnplannedLosses counts requests that were on a node, or on the link from
	// it, when it ended: running or waiting. One that is lost twice counts twice.
	UnplannedLosses int
	// LostWaiting is how many of these were waiting for their turn.
	LostWaiting int
	// PlannedMoves counts moves begun.
	PlannedMoves int
	// OvertakenMoves is how many of these a node's end undid while KV was being
	// copied.
	OvertakenMoves int
	// Overflows counts requests that outgrew the KV pool of their node.
	Overflows int
	// WastedSeconds is effort that a fleet without ends would not have: stall
	// penalties, recompute overheads, prefill of context whose KV had existed
	// (copies made by recompute for a hand-off too), and standing still for a
	// transfer.
	WastedSeconds float64
	// GoodputTokensPerSecond is output of completed requests per second of the
	// scenario.
	GoodputTokensPerSecond float64
	// Outcomes are the requests, in order of arrival.
	Outcomes []Outcome
}

// Outcome is what came of one request.
type Outcome struct {
	Completed      bool
	LatencySeconds float64 // 0 where it is not
	Losses, Moves  int     // unplanned and planned
}

// finish books what was under way at the horizon, and sums up.
func (r *run) finish() Result {
	r.now = r.scenario.HorizonSeconds
	for _, n := range r.nodes {
		if n.serving != nil {
			r.result.WastedSeconds += n.serving.wasted(r.now)
		}
	}
	for _, h := range r.handOffs {
		if h.stopped {
			r.result.WastedSeconds += r.now - h.began
		}
	}
	var latencies []float64
	tokens := int64(0)
	for _, q := range r.requests {
		o := Outcome{Completed: q.over, Losses: q.losses, Moves: int(q.hops)}
		if q.over {
			o.LatencySeconds = q.finished - q.ArrivalSeconds
			latencies = append(latencies, o.LatencySeconds)
			tokens += q.OutputTokens
		}
		r.result.Outcomes = append(r.result.Outcomes, o)
	}
	r.result.Requests, r.result.Completed = len(r.requests), len(latencies)
	r.result.GoodputTokensPerSecond = float64(tokens) / r.scenario.HorizonSeconds
	if len(latencies) > 0 {
		slices.Sort(latencies)
		r.result.MeanLatencySeconds = stat.Mean(latencies, nil)
		r.result.P99LatencySeconds = stat.Quantile(0.99, stat.Empirical, latencies, nil)
	}
	return r.result
}
