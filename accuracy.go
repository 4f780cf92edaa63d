package kvpolicy

import (
	"cmp"
	"fmt"
	"math"
)

// PredictedSeconds is the time that the decision predicts, and false where it
// predicts none:
//
//   - Place and Recover: the time to the first token, contention, queue and
//     prefill;
//   - PrefillRemote: the same by way of the source, Separation.CostMigrate,
//     which is what the elastic-migration-v2 report compares with the TTFT;
//   - Migrate: how long the request stands still, Move.PlannedSeconds.
func (d Decision) PredictedSeconds() (float64, bool) {
	switch d.Action {
	case Place, Recover:
		return d.Cost.Contention + d.Cost.Queue + d.Cost.Prefill, true
	case PrefillRemote:
		return d.Separation.CostMigrate, true
	case Migrate:
		return d.Move.PlannedSeconds, true
	}
	return 0, false
}

// Accuracy compares what decisions predicted with what was then observed, per
// reason. The zero Accuracy is ready to use. It holds some 4 kB for each
// reason seen, however many decisions are added. It is not safe for concurrent
// use; fill one per goroutine and Merge them. Do not copy one in use.
type Accuracy struct {
	groups [lastReason + 1]*accuracyGroup
}

// Bounds of the bins of the ratio observed / predicted.
const (
	ratioAccuracy = 0.02 // relative error of a quantile, half a bin
	leastRatio    = 1e-4
	mostRatio     = 1e4
	leastSeconds  = 1e-3
	ratioBins     = 466 // ln(mostRatio/leastRatio) / (2 ln(1+ratioAccuracy)), up
	worstKept     = 5
)

type accuracyGroup struct {
	count               int64
	predicted, observed float64 // sums, s
	least, most         float64 // ratio
	bins                [ratioBins]int64
	worst               [worstKept]Misprediction // the worst first, the rest zero
}

// Misprediction is one decision and what came of it.
type Misprediction struct {
	// Target is the decision's target, PrefillOn where it prefilled elsewhere.
	Target, PrefillOn string
	// PredictedSeconds and ObservedSeconds are the two times.
	PredictedSeconds, ObservedSeconds float64
	// Ratio is observed / predicted, both taken as at least 1 ms: below that
	// nothing is a misprediction, and a cached prompt may predict 0.
	Ratio float64
}

// AccuracyReport is how well predictions of one kind held.
type AccuracyReport struct {
	// Decisions is how many were added. The rest is 0 where it is 0.
	Decisions int64
	// PredictedSeconds and ObservedSeconds are the means; the bias is observed
	// less predicted, positive where the model promises too much.
	PredictedSeconds, ObservedSeconds, BiasSeconds float64
	// Ratios are quantiles of Misprediction.Ratio, each within 2 % of the sample
	// at that rank where it lies in 1e-4 to 1e4; Min and Max are exact.
	Ratios Ratios
	// Worst are the decisions, at most 5, with the greatest difference between
	// predicted and observed seconds, in either direction, the greatest first.
	Worst []Misprediction
}

// Ratios are quantiles of observed / predicted.
type Ratios struct{ Min, P10, P50, P90, P99, Max float64 }

// Add takes a decision and the seconds then observed for what
// Decision.PredictedSeconds names: the TTFT, or how long a migrating request
// stood still. It counts under Separation.Reason for PrefillRemote, else under
// Reason, and allocates only for a reason not seen before. Seconds outside 0 to
// 1e12 or a decision that predicts nothing are a FieldError and are not counted.
func (a *Accuracy) Add(d Decision, observedSeconds float64) error {
	predicted, ok := d.PredictedSeconds()
	if !ok {
		return fieldError("action", d.Action.String(), "be place, prefill_remote, recover or migrate: others predict no time")
	}
	if err := checkSeconds("observed_s", observedSeconds); err != nil {
		return err
	}
	if !(predicted >= 0 && predicted <= 1e100) { // no policy prices near that; its sums are finite
		return fieldError("predicted_s", predicted, "be 0 to 1e100 seconds, as Decide has it")
	}
	reason := d.Reason
	if d.Action == PrefillRemote {
		reason = d.Separation.Reason
	}
	if reason < 1 || reason > lastReason {
		return fieldError("reason", uint8(reason), "be that of a decision")
	}
	if a.groups[reason] == nil {
		a.groups[reason] = new(accuracyGroup)
	}
	a.groups[reason].add(Misprediction{
		Target: d.Target, PrefillOn: d.PrefillOn,
		PredictedSeconds: predicted, ObservedSeconds: observedSeconds,
		Ratio: max(observedSeconds, leastSeconds) / max(predicted, leastSeconds),
	})
	return nil
}

func (g *accuracyGroup) add(m Misprediction) {
	if g.count == 0 {
		g.least = m.Ratio
	}
	g.count++
	g.predicted += m.PredictedSeconds
	g.observed += m.ObservedSeconds
	g.least, g.most = min(g.least, m.Ratio), max(g.most, m.Ratio)
	g.bins[ratioBin(m.Ratio)]++
	g.keep(m)
}

// binWidth is the logarithm of the ratio of a bin's bounds.
func binWidth() float64 { return 2 * math.Log1p(ratioAccuracy) }

func ratioBin(ratio float64) int {
	bin := math.Floor(math.Log(ratio/leastRatio) / binWidth())
	return int(min(max(bin, 0), ratioBins-1))
}

// keep inserts m among the worst, where it is one of them. The order is total,
// so that merging in any order keeps the same.
func (g *accuracyGroup) keep(m Misprediction) {
	for i := range g.worst {
		if compareWorst(m, g.worst[i]) < 0 {
			m, g.worst[i] = g.worst[i], m
		}
	}
}

// compareWorst puts the greater difference first and what is no misprediction
// yet, the zero value, last.
func compareWorst(a, b Misprediction) int {
	return cmp.Or(
		cmp.Compare(b.difference(), a.difference()),
		cmp.Compare(b.Ratio, a.Ratio),
		cmp.Compare(a.Target, b.Target),
		cmp.Compare(a.PrefillOn, b.PrefillOn),
		cmp.Compare(b.ObservedSeconds, a.ObservedSeconds),
		cmp.Compare(b.PredictedSeconds, a.PredictedSeconds),
	)
}

func (m Misprediction) difference() float64 { return math.Abs(m.ObservedSeconds - m.PredictedSeconds) }

// Merge adds what b holds; b is unchanged.
func (a *Accuracy) Merge(b *Accuracy) {
	for reason, from := range b.groups {
		if from == nil {
			continue
		}
		if a.groups[reason] == nil {
			a.groups[reason] = new(accuracyGroup)
		}
		a.groups[reason].merge(from)
	}
}

func (g *accuracyGroup) merge(from *accuracyGroup) {
	if g.count == 0 {
		g.least = from.least
	}
	g.count += from.count
	g.predicted += from.predicted
	g.observed += from.observed
	g.least, g.most = min(g.least, from.least), max(g.most, from.most)
	for i, n := range from.bins {
		g.bins[i] += n
	}
	for _, m := range from.worst {
		if m.Ratio > 0 {
			g.keep(m)
		}
	}
}

// Report is the report of one reason.
func (a *Accuracy) Report(r Reason) AccuracyReport {
	if r > lastReason || a.groups[r] == nil {
		return AccuracyReport{}
	}
	return a.groups[r].report()
}

// Total is the report of all reasons together.
func (a *Accuracy) Total() AccuracyReport {
	var all accuracyGroup
	for _, g := range a.groups {
		if g != nil {
			all.merge(g)
		}
	}
	return all.report()
}

func (g *accuracyGroup) report() AccuracyReport {
	if g.count == 0 {
		return AccuracyReport{}
	}
	n := float64(g.count)
	r := AccuracyReport{
		Decisions:        g.count,
		PredictedSeconds: g.predicted / n,
		ObservedSeconds:  g.observed / n,
		BiasSeconds:      (g.observed - g.predicted) / n,
		Ratios: Ratios{Min: g.least, P10: g.quantile(0.1), P50: g.quantile(0.5),
			P90: g.quantile(0.9), P99: g.quantile(0.99), Max: g.most},
	}
	for _, m := range g.worst {
		if m.Ratio > 0 {
			r.Worst = append(r.Worst, m)
		}
	}
	return r
}

// quantile is the middle of the bin that holds the sample of rank ceil(q n),
// but never beyond the least and the greatest sample.
func (g *accuracyGroup) quantile(q float64) float64 {
	rank := max(1, int64(math.Ceil(q*float64(g.count))))
	var below int64
	for bin, n := range g.bins {
		if below += n; below >= rank {
			middle := leastRatio * math.Exp(float64((float64(bin)+0.5)*binWidth()))
			return min(max(middle, g.least), g.most)
		}
	}
	return g.most
}

// String is a table, a line a reason and one of all, and the worst of all.
func (a *Accuracy) String() string {
	total := a.Total()
	if total.Decisions == 0 {
		return "no decisions\n"
	}
	text := fmt.Appendf(nil, "%-24s%10s%12s%11s%10s%23s\n", "reason", "decisions", "predicted", "observed", "bias", "ratio p50 / p90 / max")
	line := func(label string, r AccuracyReport) {
		text = fmt.Appendf(text, "%-24s%10d %9.3f s %8.3f s %+7.2f s %8.2f %6.2f %6.2f\n", label, r.Decisions,
			r.PredictedSeconds, r.ObservedSeconds, r.BiasSeconds, r.Ratios.P50, r.Ratios.P90, r.Ratios.Max)
	}
	for reason, g := range a.groups {
		if g != nil {
			line(Reason(reason).String(), g.report())
		}
	}
	line("all", total)
	text = append(text, "worst:\n"...)
	for _, m := range total.Worst {
		from := ""
		if m.PrefillOn != "" {
			from = " from " + m.PrefillOn
		}
		text = fmt.Appendf(text, "  %s%s: predicted %.2f s, observed %.2f s, ratio %.1f\n", m.Target, from,
			m.PredictedSeconds, m.ObservedSeconds, m.Ratio)
	}
	return string(text)
}
