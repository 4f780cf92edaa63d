package main

import (
	"encoding/csv"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"strconv"

	"github.com/google/renameio/v2"

	"github.com/kvpolicy/kvpolicy/internal/replay"
)

func (s *summary) writeJSON(out io.Writer) error {
	encoder := json.NewEncoder(out)
	encoder.SetIndent("", " ")
	return encoder.Encode(s)
}

// writeFiles writes what the flags ask for. Each file comes into being whole.
func (s *summary) writeFiles(g *grid) error {
	if s.options.csv != "" {
		if err := writeCSV(s.options.csv, g, s.metrics); err != nil {
			return err
		}
	}
	if s.options.pictures == "" && s.options.report == "" {
		return nil
	}
	pictures, err := s.draw()
	if err != nil {
		return err
	}
	if dir := s.options.pictures; dir != "" {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
		for _, p := range pictures {
			for ending, data := range map[string][]byte{".png": p.png, ".svg": p.svg} {
				if err := renameio.WriteFile(filepath.Join(dir, p.name+ending), data, 0o644); err != nil {
					return err
				}
			}
		}
	}
	if s.options.report != "" {
		html, err := s.html(pictures)
		if err != nil {
			return err
		}
		return renameio.WriteFile(s.options.report, html, 0o644)
	}
	return nil
}

// writeCSV writes a line for every run.
func writeCSV(path string, g *grid, metrics []replay.Metric) (err error) {
	file, err := renameio.NewPendingFile(path, renameio.WithPermissions(0o644))
	if err != nil {
		return err
	}
	defer file.Cleanup()
	w := csv.NewWriter(file)
	head := []string{"pacing", "load", "policy", "connector", "seed"}
	for _, m := range metrics {
		head = append(head, m.Name)
	}
	for _, gate := range gates() {
		head = append(head, gate.String())
	}
	if err := w.Write(head); err != nil {
		return err
	}
	g.each(func(s, i, seed int, r *replay.Result) {
		line := []string{
			g.settings[s].pacing.String(), strconv.FormatFloat(g.settings[s].load, 'g', -1, 64),
			g.rows[i].name, string(g.rows[i].connector), strconv.Itoa(seed + 1),
		}
		for _, m := range metrics {
			value, ok := m.Of(r, g.ceilings[seed])
			text := ""
			if ok {
				text = strconv.FormatFloat(value, 'g', -1, 64)
			}
			line = append(line, text)
		}
		for _, gate := range gates() {
			line = append(line, strconv.FormatInt(r.Funnel.Count(gate), 10))
		}
		if err == nil {
			err = w.Write(line)
		}
	})
	if w.Flush(); err == nil {
		err = w.Error()
	}
	if err != nil {
		return err
	}
	return file.CloseAtomicallyReplace()
}
