package main

import (
	"fmt"
	"io"
	"strings"

	"github.com/kvpolicy/kvpolicy/internal/churn"
	"github.com/kvpolicy/kvpolicy/internal/stats"
	"github.com/olekukonko/tablewriter"
	"github.com/olekukonko/tablewriter/renderer"
	"github.com/olekukonko/tablewriter/tw"
)

// metric is a column.
type metric struct {
	name     string
	decimals int
	of       func(*churn.Result) float64
}

func metrics() []metric {
	return []metric{
		{"latency mean s", 2, func(r *churn.Result) float64 { return r.MeanLatencySeconds }},
		{"latency p99 s", 1, func(r *churn.Result) float64 { return r.P99LatencySeconds }},
		{"unplanned losses", 1, func(r *churn.Result) float64 { return float64(r.UnplannedLosses) }},
		{"of them waiting", 1, func(r *churn.Result) float64 { return float64(r.LostWaiting) }},
		{"planned moves", 1, func(r *churn.Result) float64 { return float64(r.PlannedMoves) }},
		{"wasted s", 0, func(r *churn.Result) float64 { return r.WastedSeconds }},
		{"completed", 1, func(r *churn.Result) float64 { return float64(r.Completed) }},
		{"goodput tokens/s", 1, func(r *churn.Result) float64 { return r.GoodputTokensPerSecond }},
	}
}

func valuesOf(m metric, jobs []*job) []float64 {
	values := make([]float64, len(jobs))
	for i, j := range jobs {
		values[i] = m.of(&j.result)
	}
	return values
}

// mean is a mean with its interval.
func (r *results) mean(values []float64) (stats.Estimate, error) {
	c, err := stats.Compare(make([]float64, len(values)), values, r.options.seed)
	return c.Difference, err
}

func (r *results) print(out io.Writer) error {
	o := r.options
	for s, setting := range o.settings {
		fmt.Fprintf(out, "%s: %s. Means over %d seeds from %d on, with 95 %% intervals.\n", setting.name, setting.about, o.seeds, o.seed)
		lines, differences := [][]string{{"strategy"}}, [][]string{{"difference to\n" + r.table[s][baseline][0].strategy.Name}}
		for _, m := range metrics() {
			lines[0] = append(lines[0], m.name)
			differences[0] = append(differences[0], m.name)
		}
		for i, jobs := range r.table[s] {
			line, difference := []string{jobs[0].strategy.Name}, []string{jobs[0].strategy.Name}
			for _, m := range metrics() {
				values := valuesOf(m, jobs)
				mean, err := r.mean(values)
				if err != nil {
					return err
				}
				line = append(line, m.interval(mean, "%.*f"))
				c, err := stats.Compare(valuesOf(m, r.table[s][baseline]), values, o.seed)
				if err != nil {
					return err
				}
				text := m.interval(c.Difference, "%+.*f")
				if c.Verdict == stats.NoDifferenceShown || c.Verdict == stats.TooFewPairs {
					text += "\n" + c.Verdict.String()
				}
				difference = append(difference, text)
			}
			lines = append(lines, line)
			if i != baseline {
				differences = append(differences, difference)
			}
		}
		for _, table := range [][][]string{lines, differences} {
			if err := printTable(out, table); err != nil {
				return err
			}
		}
		if err := r.printSweep(out, s); err != nil {
			return err
		}
	}
	return nil
}

// printSweep prints what hysteresis does.
func (r *results) printSweep(out io.Writer, s int) error {
	o := r.options
	if o.sweepSeeds == 0 {
		return nil
	}
	fmt.Fprintf(out, "What hysteresis does, greatest slowdown %d s, %d seeds:\n", sweepSlowdown, o.sweepSeeds)
	head := []string{"hysteresis s"}
	shown := metrics()
	shown = []metric{shown[4], shown[2], shown[5], shown[0]}
	for _, way := range o.ways() {
		for _, m := range shown {
			head = append(head, way.Name+"\n"+m.name)
		}
	}
	table := [][]string{head}
	for h, hysteresis := range sweepHysteresis() {
		line := []string{fmt.Sprint(hysteresis)}
		for w := range o.ways() {
			for _, m := range shown {
				mean, err := r.mean(valuesOf(m, r.sweep[s][w][h]))
				if err != nil {
					return err
				}
				line = append(line, fmt.Sprintf("%.*f", m.decimals, mean.Value))
			}
		}
		table = append(table, line)
	}
	return printTable(out, table)
}

// interval is an estimate as text, on two lines.
func (m metric) interval(e stats.Estimate, format string) string {
	text := func(x float64) string {
		return strings.Replace(fmt.Sprintf(format, m.decimals, x), "-", "−", 1)
	}
	if e.Low == e.High {
		return text(e.Value)
	}
	return text(e.Value) + "\n[" + text(e.Low) + ", " + text(e.High) + "]"
}

func printTable(out io.Writer, lines [][]string) error {
	table := tablewriter.NewTable(out,
		tablewriter.WithRenderer(renderer.NewBlueprint(tw.Rendition{Symbols: tw.NewSymbols(tw.StyleASCII)})),
		tablewriter.WithHeaderAutoFormat(tw.Off),
		tablewriter.WithRowAutoWrap(tw.WrapNone),
		tablewriter.WithHeaderAutoWrap(tw.WrapNone),
		tablewriter.WithRowAlignment(tw.AlignRight))
	table.Header(lines[0])
	if err := table.Bulk(lines[1:]); err != nil {
		return err
	}
	if err := table.Render(); err != nil {
		return err
	}
	_, err := fmt.Fprintln(out)
	return err
}
