package kvpolicy

import (
	"fmt"
	"iter"
)

// Funnel counts decisions by reason: at which gate of the PD-separation funnel
// each ended, and why its target was the target. It is a plain value of fixed
// size and the zero Funnel is ready to use; it is not safe for concurrent use,
// but a copy is a snapshot, and funnels filled apart can be added up by Merge.
// (The table is that of the elastic-migration-v2 report, result 2.)
type Funnel struct {
	counts [lastReason + 1]int64 // no reason is both a decision's and a gate's
}

// Add counts a decision under its Reason and, where the PD-separation funnel
// ran, under its Separation.Reason. The zero Decision counts nowhere. It does
// not allocate.
func (f *Funnel) Add(d Decision) {
	for _, r := range [...]Reason{d.Reason, d.Separation.Reason} {
		if r >= 1 && r <= lastReason {
			f.counts[r]++
		}
	}
}

// Merge adds the counts of g.
func (f *Funnel) Merge(g Funnel) {
	for r, n := range g.counts {
		f.counts[r] += n
	}
}

// Count is how many decisions were counted under r.
func (f Funnel) Count(r Reason) int64 {
	if r > lastReason {
		return 0
	}
	return f.counts[r]
}

// Share is the share of r, 0 to 1: of a gate's reason among the decisions for
// which the PD-separation funnel ran, of any other among all decisions. It is 0
// where there are none.
func (f Funnel) Share(r Reason) float64 {
	total := f.total(r)
	if total == 0 {
		return 0
	}
	return float64(f.Count(r)) / float64(total)
}

// All yields every reason that was counted and its count, in the order of the
// reasons: what an exporter of metrics needs.
func (f Funnel) All() iter.Seq2[Reason, int64] {
	return func(yield func(Reason, int64) bool) {
		for r, n := range f.counts {
			if n != 0 && !yield(Reason(r), n) {
				return
			}
		}
	}
}

func isGate(r Reason) bool { return r >= NewLocalBelowThreshold && r <= Triggered }

// total is the sum of the counts that r shares its table with.
func (f Funnel) total(r Reason) int64 {
	var sum int64
	for other, n := range f.All() {
		if isGate(other) == isGate(r) {
			sum += n
		}
	}
	return sum
}

// String is the report's table: a line for each of the gates in their order,
// those at which nothing ended too, then for each other reason that was
// counted, with counts and shares in per cent. A table without a count is left
// out; the empty Funnel is "no decisions".
func (f Funnel) String() string {
	var text []byte
	line := func(label string, count int64, share float64) {
		text = fmt.Appendf(text, "%-34s%10d%9.2f %%\n", label, count, 100*share)
	}
	if gates := f.total(Triggered); gates > 0 {
		text = fmt.Appendf(text, "%-34s%10s%11s\n", "gate", "decisions", "share")
		for r := NewLocalBelowThreshold; r <= Triggered; r++ {
			line(r.String(), f.Count(r), f.Share(r))
		}
		line("all", gates, 1)
	}
	if decisions := f.total(NoAffinity); decisions > 0 {
		text = fmt.Appendf(text, "%-34s%10s%11s\n", "reason", "decisions", "share")
		for r, n := range f.All() {
			if !isGate(r) {
				line(r.String(), n, f.Share(r))
			}
		}
		line("all", decisions, 1)
	}
	if text == nil {
		return "no decisions\n"
	}
	return string(text)
}
