package main

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/olekukonko/tablewriter"
	"github.com/olekukonko/tablewriter/renderer"
	"github.com/olekukonko/tablewriter/tw"
)

// header says what was run, a line each.
func (s *summary) header() []string {
	w := s.Workload
	lines := []string{
		fmt.Sprintf("Workload %s: %.0f requests of %.0f sessions, %.1f M input and %.2f M output tokens, %.1f %% of the input reusable.",
			w.Name, w.Requests, w.Sessions, w.InputTokens/1e6, w.OutputTokens/1e6, w.ReusableShare*100),
	}
	if w.LeftOut > 0 {
		lines = append(lines, fmt.Sprintf("Left out: %s requests longer than %d tokens.", count(w.LeftOut), w.MaxContext))
	}
	lines = append(lines, fmt.Sprintf("Fleet: %d instances (%s), %d tokens of KV each.", s.Instances, s.Fleet, capacity()))
	if slices.ContainsFunc(s.rows, func(r row) bool { return r.connector != connectorNone }) {
		var with []string
		for _, r := range s.rows {
			if r.connector != connectorNone {
				with = append(with, r.name+" "+string(r.connector))
			}
		}
		lines = append(lines, "Connector loaded: "+strings.Join(with, ", ")+"; for the others none.")
	}
	same := !slices.ContainsFunc(s.rows, func(r row) bool { return r.view != s.rows[0].view })
	if same {
		lines = append(lines, "Router sees: "+describeView(s.rows[0].view)+".")
	} else {
		for _, r := range s.rows {
			lines = append(lines, "Router of "+r.name+" sees: "+describeView(r.view)+".")
		}
	}
	lines = append(lines, fmt.Sprintf("Seeds %d to %d, every policy on the same arrivals.", s.options.firstSeed, s.options.firstSeed+s.Seeds-1))
	if !s.Complete {
		lines = append(lines, "INTERRUPTED: the tables hold what was complete.")
	}
	return lines
}

func (s *summary) writeText(out io.Writer) error {
	for _, line := range s.header() {
		fmt.Fprintln(out, line)
	}
	for _, t := range s.allTables() {
		fmt.Fprintf(out, "\n%s\n", t.Title)
		if err := t.writeText(out); err != nil {
			return err
		}
		for _, note := range t.Notes {
			fmt.Fprintln(out, note)
		}
	}
	return nil
}

func (t tableSpec) writeText(out io.Writer) error {
	align := make(tw.Alignment, len(t.Head))
	for i := range align {
		align[i] = tw.AlignRight
	}
	align[0] = tw.AlignLeft
	separators := tw.Separators{BetweenRows: tw.Off, BetweenColumns: tw.Off, ShowHeader: tw.On}
	if slices.ContainsFunc(t.Rows, func(r []string) bool { return strings.Contains(strings.Join(r, ""), "\n") }) {
		separators.BetweenRows = tw.On
	}
	table := tablewriter.NewTable(out,
		tablewriter.WithRenderer(renderer.NewBlueprint(tw.Rendition{
			Borders:  tw.Border{Left: tw.Off, Right: tw.Off, Top: tw.On, Bottom: tw.On},
			Symbols:  tw.NewSymbols(tw.StyleLight),
			Settings: tw.Settings{Separators: separators},
		})),
		tablewriter.WithHeaderAutoFormat(tw.Off),
		tablewriter.WithHeaderAutoWrap(tw.WrapNone),
		tablewriter.WithRowAutoWrap(tw.WrapNone),
		tablewriter.WithHeaderAlignmentConfig(tw.CellAlignment{PerColumn: align}),
		tablewriter.WithRowAlignmentConfig(tw.CellAlignment{PerColumn: align}),
		tablewriter.WithTrimSpace(tw.Off),
	)
	table.Header(t.Head)
	if err := table.Bulk(t.Rows); err != nil {
		return err
	}
	return table.Render()
}
