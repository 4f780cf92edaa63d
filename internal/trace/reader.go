package trace

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"
	"unicode"

	"github.com/kvpolicy/kvpolicy"
)

// Bounds of what a line may hold. Lengths beyond maxTokens are taken for a
// broken file: no model has such a context, and a prompt of that length could
// not be held as blocks.
const (
	maxTokens  = 1e8
	maxSeconds = 1e12
	maxLine    = 16 << 20
)

// Record is one request as the file gives it. Fields that the format lacks
// are zero, except where said otherwise.
type Record struct {
	// Line is the line of the file, from 1.
	Line int
	// ArrivalSeconds is when the request was sent, in seconds: since the
	// trace's start (Mooncake, Bailian), since the file's first row (Azure),
	// since the session's start (Sessions). Never less than the record before,
	// in the same session for Sessions.
	ArrivalSeconds float64
	// InputTokens is the prompt's length, from 0 to 1e8.
	InputTokens int
	// OutputTokens is the generated length, from 0 to 1e8.
	OutputTokens int
	// BlockIDs names the prompt's blocks of Format.BlockTokens tokens, the last
	// one perhaps partly filled: equal ids are equal prefix blocks. Mooncake and
	// Bailian only. The slice belongs to the caller.
	BlockIDs []int64

	// Chat and ParentChat are Bailian's ids of this request and of the one it
	// continues, -1 for none.
	Chat, ParentChat int64
	// Turn counts a session's requests: from 0 in Sessions, as the file gives
	// it (from 1) in Bailian.
	Turn int
	// Type is Bailian's kind of request, such as "text".
	Type string

	// Session is the session's name. Sessions only.
	Session string
	// Blocks is the number of whole blocks in the prompt, SharedBlocks how many
	// of them, from the first on, equal the session's request before.
	// Sessions only.
	Blocks, SharedBlocks int
	// ThinkSeconds is the client's gap between the end of the request before
	// and this one, and ServiceSeconds what the server took for this one; -1
	// where the file does not say. Sessions only.
	ThinkSeconds, ServiceSeconds float64
}

// Error says which line of which file is wrong and how. It is a
// kvpolicy.ErrInvalid by errors.Is, unless reading itself failed, in which
// case Err is that failure.
type Error struct {
	// File is the name that the reader was given.
	File string
	// Line counts from 1; 0 where the file as a whole is at fault.
	Line int
	// Err is a *kvpolicy.FieldError whose Path names the field as the file
	// does ("input_length", "hash_ids[3]", "TIMESTAMP"), or a failure to read.
	Err error
}

// Error gives file, line, field, value and demand in one line of text.
func (e *Error) Error() string {
	text := strings.TrimPrefix(e.Err.Error(), "kvpolicy: ")
	if e.Line == 0 {
		return fmt.Sprintf("%s: %s", e.File, text)
	}
	return fmt.Sprintf("%s:%d: %s", e.File, e.Line, text)
}

// Unwrap gives the field's error or the failure to read.
func (e *Error) Unwrap() error { return e.Err }

// Reader reads the records of one trace in the file's order.
type Reader struct {
	name   string
	format Format
	next   func() (Record, error)
	err    error
}

// NewReader reads a trace from r; name stands for it in errors. A format of 0
// is told from the first line that is not blank; where that fits none, and
// where r is empty, the error says so. It reads ahead in r but never closes it.
func NewReader(name string, r io.Reader, format Format) (*Reader, error) {
	buffered := bufio.NewReaderSize(r, 64<<10)
	if mark, _ := buffered.Peek(3); string(mark) == "\xef\xbb\xbf" {
		if _, err := buffered.Discard(3); err != nil {
			return nil, &Error{File: name, Err: err}
		}
	}
	reader := &Reader{name: name, format: format}
	var source io.Reader = buffered
	if format == 0 {
		head, line, err := firstLine(buffered)
		if err != nil {
			return nil, &Error{File: name, Line: line, Err: err}
		}
		if reader.format = detect(head); reader.format == 0 {
			return nil, reader.fail(line, "format", "", wantFormat()+": the first line fits none of them")
		}
		// The blank lines before the head are put back, so that lines count right.
		source = io.MultiReader(strings.NewReader(strings.Repeat("\n", line-1)), bytes.NewReader(head), buffered)
	}
	switch reader.format {
	case Mooncake, Bailian:
		reader.next = newJSONReader(reader, source).next
	case Sessions, Azure:
		rows, err := newCSVReader(reader, source)
		if err != nil {
			return nil, err
		}
		reader.next = rows.next
	default:
		return nil, &Error{File: name, Err: &kvpolicy.FieldError{Path: "format", Value: reader.format.String(), Want: wantFormat()}}
	}
	return reader, nil
}

// firstLine reads up to the first line that is not blank and gives it with its
// newline and its number.
func firstLine(r *bufio.Reader) (head []byte, line int, err error) {
	for line = 1; ; line++ {
		head = head[:0]
		for {
			part, err := r.ReadSlice('\n')
			if head = append(head, part...); len(head) > maxLine {
				return nil, line, bufio.ErrTooLong
			}
			if err == nil || err == io.EOF {
				break
			}
			if !errors.Is(err, bufio.ErrBufferFull) {
				return nil, line, err
			}
		}
		if len(head) == 0 {
			return nil, 0, &kvpolicy.FieldError{Path: "trace", Want: "hold at least one line, but is empty"}
		}
		if len(bytes.TrimSpace(head)) > 0 {
			return head, line, nil
		}
	}
}

// Format is the file's format, as named by the caller or told from the file.
func (r *Reader) Format() Format { return r.format }

// Next gives the next record, io.EOF after the last one, or an *Error. An
// error is final: every later call gives it again.
func (r *Reader) Next() (Record, error) {
	if r.err != nil {
		return Record{}, r.err
	}
	record, err := r.next()
	if err != nil {
		r.err = err
		return Record{}, err
	}
	return record, nil
}

// fail builds the error of one field.
func (r *Reader) fail(line int, field, value, want string) *Error {
	return &Error{File: r.name, Line: line, Err: &kvpolicy.FieldError{Path: field, Value: value, Want: want}}
}

// Fail builds the error of a field that is wrong in the light of other lines,
// which the reader does not keep: a chat that comes twice.
func (r *Reader) Fail(line int, field string, value any, want string) error {
	return r.fail(line, field, clip(fmt.Sprint(value)), want)
}

// clip makes a value fit to stand in a line of text: short and printable.
func clip(value string) string {
	const most = 60
	if len(value) > most {
		value = value[:most] + "..."
	}
	if strings.ContainsFunc(value, func(r rune) bool { return !unicode.IsPrint(r) }) {
		return strconv.Quote(value)
	}
	return value
}

// number reads a finite number between low and high.
func (r *Reader) number(line int, field, text string, low, high float64) (float64, error) {
	want := fmt.Sprintf("be a number from %g to %g", low, high)
	if text == "" {
		return 0, r.fail(line, field, "", want+", but is empty")
	}
	value, err := strconv.ParseFloat(text, 64)
	if err != nil || !(value >= low && value <= high) {
		return 0, r.fail(line, field, clip(text), want)
	}
	return value, nil
}

// integer reads a whole number between low and high, both at most 2^53 in
// size; "12.0" and "1.2e1" are whole, "12.5" is not.
func (r *Reader) integer(line int, field, text string, low, high float64) (int64, error) {
	value, err := strconv.ParseInt(text, 10, 64)
	if err == nil && float64(value) >= low && float64(value) <= high {
		return value, nil
	}
	want := fmt.Sprintf("be a whole number from %.0f to %.0f", low, high)
	if text == "" {
		return 0, r.fail(line, field, "", want+", but is empty")
	}
	number, err := strconv.ParseFloat(text, 64)
	if err != nil || !(number >= low && number <= high) || number != math.Trunc(number) {
		return 0, r.fail(line, field, clip(text), want)
	}
	return int64(number), nil
}
