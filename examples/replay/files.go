package main

import (
	"bytes"
	"encoding/csv"
	"encoding/json"
	"errors"
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

// writeFile writes a file that comes into being whole, or is replaced whole,
// with the permissions that it had. A link stays: what it leads to is replaced.
// What is no regular file, such as a device or a pipe, is written to.
func writeFile(path string, data []byte) error {
	if info, err := os.Stat(path); err == nil && !info.Mode().IsRegular() {
		file, err := os.OpenFile(path, os.O_WRONLY, 0)
		if err != nil {
			return err
		}
		_, err = file.Write(data)
		return errors.Join(err, file.Close())
	}
	if real, err := filepath.EvalSymlinks(path); err == nil {
		path = real
	}
	return renameio.WriteFile(path, data, 0o644, renameio.WithExistingPermissions())
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
				if err := writeFile(filepath.Join(dir, p.name+ending), data); err != nil {
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
		return writeFile(s.options.report, html)
	}
	return nil
}

// writeCSV writes a line for every run.
func writeCSV(path string, g *grid, metrics []replay.Metric) (err error) {
	var out bytes.Buffer
	w := csv.NewWriter(&out)
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
	return writeFile(path, out.Bytes())
}
