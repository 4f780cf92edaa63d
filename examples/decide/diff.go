package main

import (
	"fmt"
	"strings"

	"github.com/kvpolicy/kvpolicy"
)

// compare decides a line by its own policy and by the override, and prints
// what changes.
func (t *tool) compare(at place, name string, own kvpolicy.Policy, s kvpolicy.Snapshot) {
	before, err := own.Decide(s)
	if err != nil {
		t.bad(at, name, fmt.Errorf("by the line's policy: %w", err))
		return
	}
	after, err := t.override.Decide(s)
	if err != nil {
		t.bad(at, name, fmt.Errorf("by -policy: %w", err))
		return
	}
	t.decided++
	if before.Action == after.Action && before.Target == after.Target && before.PrefillOn == after.PrefillOn &&
		before.Move.Method == after.Move.Method {
		return
	}
	t.changed++
	fmt.Fprintf(t.out, "%s:%d: %s: %s -> %s\n", at.file, at.line, printable(name), describe(before), describe(after))
	for _, side := range []struct {
		title  string
		policy kvpolicy.Policy
	}{{"the line's policy", own}, {"-policy", *t.override}} {
		candidates, err := side.policy.Explain(nil, s)
		if err != nil {
			t.bad(at, name, fmt.Errorf("by %s: %w", side.title, err))
			return
		}
		for _, c := range candidates {
			if c.Instance == before.Target || c.Instance == after.Target || c.Instance == before.PrefillOn ||
				c.Instance == after.PrefillOn {
				fmt.Fprintf(t.out, "    by %s: %s\n", side.title, explain(c))
			}
		}
	}
}

// describe says a decision in a few words.
func describe(d kvpolicy.Decision) string {
	words := []string{d.Action.String()}
	if d.Target != "" {
		words = append(words, d.Target)
	}
	if d.PrefillOn != "" {
		words = append(words, "prefill on "+d.PrefillOn)
	}
	if d.Move.Method != 0 {
		words = append(words, "by "+d.Move.Method.String())
	}
	return fmt.Sprintf("%s (%s)", strings.Join(words, " "), d.Reason)
}

// explain says what a candidate came to.
func explain(c kvpolicy.Candidate) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %s, %s, score %.6g, cost %.6g s = contention %.4g + queue %.4g + prefill %.4g + interference %.4g + decode %.4g + loss %.4g",
		c.Instance, c.Reason, c.Tier, c.Score, c.Cost.Total(), c.Cost.Contention, c.Cost.Queue, c.Cost.Prefill,
		c.Cost.Interference, c.Cost.Decode, c.Cost.Loss)
	if v := c.Separation; v.Reason != 0 {
		fmt.Fprintf(&b, "; as a source: %s", v.Reason)
		if v.Source != "" {
			fmt.Fprintf(&b, " (local %.4g s, migrate %.4g s)", v.CostLocal, v.CostMigrate)
		}
	}
	if m := c.Move; m.Target != "" {
		fmt.Fprintf(&b, "; as a destination: %s, planned %.4g s, risk gain %.4g s, delta T %.4g s", m.Method, m.PlannedSeconds,
			m.RiskGainSeconds, m.DeltaTSeconds)
	}
	return b.String()
}
