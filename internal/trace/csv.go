package trace

import (
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
)

// csvReader reads the CSV formats.
type csvReader struct {
	*Reader
	rows    *csv.Reader
	columns []string
	line    int
	row     []string

	// Azure: when the file begins. Sessions: the row before.
	began    time.Time
	started  bool
	previous Record
}

// requiredColumns are the columns that a format cannot do without.
func requiredColumns(f Format) []string {
	if f == Azure {
		return []string{"TIMESTAMP", "ContextTokens", "GeneratedTokens"}
	}
	return []string{"session", "turn", "t_s", "in_tokens", "out_tokens", "think_time_s", "blocks64", "shared_prefix_blocks"}
}

func newCSVReader(reader *Reader, source io.Reader) (*csvReader, error) {
	r := &csvReader{Reader: reader, rows: csv.NewReader(source)}
	r.rows.ReuseRecord = true
	if err := r.read(); err != nil {
		if errors.Is(err, io.EOF) {
			return nil, r.fail(0, "trace", "", "hold at least one line, but is empty")
		}
		return nil, err
	}
	for _, name := range r.row {
		name = strings.TrimSpace(name)
		if slices.Contains(r.columns, name) {
			return nil, r.fail(r.line, clip(name), "", "stand once in the header")
		}
		r.columns = append(r.columns, name)
	}
	for _, name := range requiredColumns(r.format) {
		if !slices.Contains(r.columns, name) {
			return nil, r.fail(r.line, name, "", "be a column of the header")
		}
	}
	return r, nil
}

// read takes the next row into r.row, or gives io.EOF.
func (r *csvReader) read() error {
	row, err := r.rows.Read()
	if err == nil {
		r.line, _ = r.rows.FieldPos(0)
		r.row = row
		return nil
	}
	var parse *csv.ParseError
	switch {
	case errors.Is(err, io.EOF):
		return io.EOF
	case errors.Is(err, csv.ErrFieldCount):
		line, _ := r.rows.FieldPos(0)
		return r.fail(line, "line", fmt.Sprintf("%d fields", len(row)), fmt.Sprintf("have %d fields, as the header has", len(r.columns)))
	case errors.As(err, &parse):
		// A quote that is never closed is at fault where its row begins.
		if parse.StartLine != parse.Line {
			return r.fail(parse.StartLine, "row", "", "be CSV: it holds a quote that is not closed on its line")
		}
		return r.fail(parse.Line, fmt.Sprintf("column %d", parse.Column), "", "be CSV: "+parse.Err.Error())
	}
	return &Error{File: r.name, Line: r.line + 1, Err: err}
}

// field gives a column of the row, "" where the file lacks the column.
func (r *csvReader) field(name string) string {
	if i := slices.Index(r.columns, name); i >= 0 {
		return strings.TrimSpace(r.row[i])
	}
	return ""
}

func (r *csvReader) whole(name string) (int, error) {
	value, err := r.integer(r.line, name, r.field(name), 0, maxTokens)
	return int(value), err
}

// seconds reads a time; where the column may be empty, that reads as -1.
func (r *csvReader) seconds(name string, mayBeEmpty bool) (float64, error) {
	text := r.field(name)
	if text == "" && mayBeEmpty {
		return -1, nil
	}
	return r.number(r.line, name, text, 0, maxSeconds)
}

func (r *csvReader) next() (Record, error) {
	if err := r.read(); err != nil {
		return Record{}, err
	}
	record := Record{Line: r.line, ThinkSeconds: -1, ServiceSeconds: -1}
	var err error
	if r.format == Azure {
		err = r.azure(&record)
	} else {
		err = r.session(&record)
	}
	if err != nil {
		return Record{}, err
	}
	r.previous, r.started = record, true
	return record, nil
}

func (r *csvReader) azure(record *Record) (err error) {
	text := r.field("TIMESTAMP")
	// The offset is absent in 2023's files and present in 2024's; fractions of
	// a second are read by the parser without standing in the layout.
	at, err := time.Parse("2006-01-02 15:04:05", text)
	if err != nil {
		at, err = time.Parse("2006-01-02 15:04:05Z07:00", text)
	}
	if err != nil {
		return r.fail(r.line, "TIMESTAMP", clip(text), "be a date and time such as 2023-11-16 18:17:03.9799600")
	}
	if !r.started {
		r.began = at
	}
	record.ArrivalSeconds = at.Sub(r.began).Seconds()
	if record.ArrivalSeconds < r.previous.ArrivalSeconds {
		return r.fail(r.line, "TIMESTAMP", text, "not be before the row before: sort the file by time")
	}
	if record.InputTokens, err = r.whole("ContextTokens"); err != nil {
		return err
	}
	record.OutputTokens, err = r.whole("GeneratedTokens")
	return err
}

func (r *csvReader) session(record *Record) (err error) {
	if record.Session = strings.Clone(r.field("session")); record.Session == "" {
		return r.fail(r.line, "session", "", "be present")
	}
	first := !r.started || record.Session != r.previous.Session
	if record.Turn, err = r.whole("turn"); err != nil {
		return err
	}
	if first && record.Turn != 0 {
		return r.fail(r.line, "turn", clip(r.field("turn")), "be 0 where a session begins: a session's rows must stand together, from its first turn")
	}
	if !first && record.Turn <= r.previous.Turn {
		return r.fail(r.line, "turn", clip(r.field("turn")), fmt.Sprintf("be above the session's turn before (%d)", r.previous.Turn))
	}
	if record.ArrivalSeconds, err = r.seconds("t_s", false); err != nil {
		return err
	}
	if !first && record.ArrivalSeconds < r.previous.ArrivalSeconds {
		return r.fail(r.line, "t_s", clip(r.field("t_s")), fmt.Sprintf("not be before the session's turn before (%v)", r.previous.ArrivalSeconds))
	}
	if record.InputTokens, err = r.whole("in_tokens"); err != nil {
		return err
	}
	if record.OutputTokens, err = r.whole("out_tokens"); err != nil {
		return err
	}
	if record.ThinkSeconds, err = r.seconds("think_time_s", true); err != nil {
		return err
	}
	if record.ServiceSeconds, err = r.seconds("api_time_s", true); err != nil {
		return err
	}
	if record.Blocks, err = r.whole("blocks64"); err != nil {
		return err
	}
	if want := record.InputTokens / 64; record.Blocks != want {
		return r.fail(r.line, "blocks64", clip(r.field("blocks64")), fmt.Sprintf("be %d, the whole blocks of 64 tokens in in_tokens %d", want, record.InputTokens))
	}
	if record.SharedBlocks, err = r.whole("shared_prefix_blocks"); err != nil {
		return err
	}
	most := 0
	if !first {
		most = min(record.Blocks, r.previous.Blocks)
	}
	if record.SharedBlocks > most {
		return r.fail(r.line, "shared_prefix_blocks", clip(r.field("shared_prefix_blocks")), fmt.Sprintf("be at most %d, what this prompt and the session's prompt before can share", most))
	}
	return nil
}
