package main

import (
	"bytes"
	_ "embed"
	"encoding/base64"
	"html/template"
	"regexp"
)

//go:embed report.html
var reportHTML string

// html is the report: one file that needs no other.
func (s *summary) html(pictures []picture) ([]byte, error) {
	type figure struct {
		Name, Caption string
		Drawing       template.URL
	}
	var figures []figure
	for _, p := range pictures {
		figures = append(figures, figure{p.name, p.caption, template.URL("data:image/svg+xml;base64," + base64.StdEncoding.EncodeToString(p.svg))})
	}
	t, err := template.New("report").Funcs(template.FuncMap{"lines": lines, "verdict": verdictClass}).Parse(reportHTML)
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	err = t.Execute(&out, map[string]any{
		"Summary": s,
		"Header":  s.header(),
		"Tables":  s.allTables(),
		"Figures": figures,
	})
	return out.Bytes(), err
}

// lines splits a cell.
func lines(cell string) []string { return regexp.MustCompile("\n").Split(cell, -1) }

// verdictClass colours a comparison.
func verdictClass(cell string) string {
	switch {
	case len(cell) > 5 && cell[:5] == "lower":
		return "lower"
	case len(cell) > 6 && cell[:6] == "higher":
		return "higher"
	case len(cell) > 13 && cell[:13] == "no difference":
		return "none"
	}
	return ""
}
