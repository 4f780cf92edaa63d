package kvpolicy

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"math/big"
	"slices"
	"strconv"
	"strings"
)

// fields reads one JSON object member by member. encoding/json alone would
// take "Requests" for "requests", null for "leave it", and could not say where
// in the document a bad value stands; a policy or a snapshot must not be read
// that loosely. The first fault is kept and later reads do nothing.
type fields struct {
	path    string // where the object stands, empty at the top
	members map[string]json.RawMessage
	err     error
}

// readFields splits data, one JSON object, into its members.
func readFields(path string, data []byte) *fields {
	f := &fields{path: path, members: map[string]json.RawMessage{}}
	place := path
	if place == "" {
		place = "input"
	}
	decoder := json.NewDecoder(bytes.NewReader(data))
	token, err := decoder.Token()
	if err == nil && token != json.Delim('{') {
		f.err = &FieldError{Path: place, Value: excerpt(data), Want: "be a JSON object"}
		return f
	}
	for err == nil && decoder.More() {
		if token, err = decoder.Token(); err != nil {
			break
		}
		key := token.(string)
		var member json.RawMessage
		if err = decoder.Decode(&member); err != nil {
			break
		}
		if _, twice := f.members[key]; twice {
			f.err = &FieldError{Path: f.at(key), Want: "appear once"}
			return f
		}
		f.members[key] = member
	}
	if err == nil {
		_, err = decoder.Token() // the closing brace
	}
	if err == nil {
		if _, err = decoder.Token(); err == nil {
			err = errors.New("more follows the object")
		} else if errors.Is(err, io.EOF) {
			err = nil
		}
	}
	if err != nil {
		f.err = &FieldError{Path: place, Want: fmt.Sprintf("be one JSON object (%v)", err)}
	}
	return f
}

// excerpt is what of a JSON value an error message shows.
func excerpt(data []byte) string {
	const most = 40
	data = bytes.TrimSpace(data)
	if len(data) > most {
		return string(data[:most]) + "..."
	}
	return string(data)
}

// at is the path of a member.
func (f *fields) at(key string) string {
	if f.path == "" {
		return key
	}
	return f.path + "." + key
}

// fail keeps the first fault.
func (f *fields) fail(key string, data []byte, want string) {
	if f.err == nil {
		f.err = &FieldError{Path: f.at(key), Value: excerpt(data), Want: want}
	}
}

// take hands out a member once. Null is a fault: it would be neither the
// default nor a value.
func (f *fields) take(key string) (json.RawMessage, bool) {
	data, ok := f.takeNullable(key)
	if ok && data == nil {
		f.fail(key, []byte("null"), "not be null: leave it out for the default")
		return nil, false
	}
	return data, ok
}

// takeNullable hands out a member once, nil where it is null.
func (f *fields) takeNullable(key string) (json.RawMessage, bool) {
	data, ok := f.members[key]
	if !ok || f.err != nil {
		return nil, false
	}
	delete(f.members, key)
	if string(data) == "null" {
		return nil, true
	}
	return data, true
}

// object reads a member that is an object; read sees nothing where it is absent.
func (f *fields) object(key string, read func(*fields)) {
	if data, ok := f.take(key); ok {
		f.within(f.at(key), data, read)
	}
}

// within reads data as an object that stands at path and adopts its fault.
func (f *fields) within(path string, data []byte, read func(*fields)) {
	inner := readFields(path, data)
	if inner.err == nil {
		read(inner)
	}
	if err := inner.finish(); err != nil && f.err == nil {
		f.err = err
	}
}

// part reads a member that switches a part of a policy on by being named and
// off by being null.
func (f *fields) part(key string, turn func(on bool), read func(*fields)) {
	data, ok := f.takeNullable(key)
	if !ok {
		return
	}
	turn(data != nil)
	if data != nil {
		f.within(f.at(key), data, read)
	}
}

// list reads a member that is an array, an element at a time.
func (f *fields) list(key string, read func(index int, data json.RawMessage)) {
	data, ok := f.take(key)
	if !ok {
		return
	}
	var elements []json.RawMessage
	if err := json.Unmarshal(data, &elements); err != nil || data[0] != '[' {
		f.fail(key, data, "be an array")
		return
	}
	for i, element := range elements {
		if f.err != nil {
			return
		}
		read(i, element)
	}
}

// number reads a finite number.
func (f *fields) number(key string, to *float64) {
	if data, ok := f.take(key); ok {
		x, want := parseNumber(data)
		if want != "" {
			f.fail(key, data, want)
			return
		}
		*to = x
	}
}

// parseNumber reads a JSON number; want is what was asked of it, empty where it is one.
func parseNumber(data []byte) (x float64, want string) {
	if len(data) == 0 || data[0] != '-' && (data[0] < '0' || data[0] > '9') {
		return 0, "be a number"
	}
	x, err := strconv.ParseFloat(string(data), 64)
	if err != nil || math.IsInf(x, 0) {
		return 0, "be a finite number"
	}
	return x, ""
}

// count reads a whole number; 3.0 and 3e0 are whole, 1e-400 is not.
func (f *fields) count(key string, to *int64) {
	data, ok := f.take(key)
	if !ok {
		return
	}
	n, want := parseCount(string(data))
	if want != "" {
		f.fail(key, data, want)
		return
	}
	*to = n
}

// parseCount reads a whole number exactly, as a float64 would round to one;
// want is what was asked of it, empty where it is one.
func parseCount(text string) (n int64, want string) {
	const whole = "be a whole number of at most 19 digits"
	if n, err := strconv.ParseInt(text, 10, 64); err == nil {
		return n, ""
	}
	if _, want := parseNumber([]byte(text)); want != "" {
		return 0, want
	}
	// A big.Rat of a long number, or of one with a large exponent, would take
	// memory without bound.
	const longest, largest = 64, 64
	if len(text) > longest {
		return 0, whole
	}
	if _, exponent, ok := strings.Cut(strings.ToLower(text), "e"); ok {
		if e, err := strconv.Atoi(exponent); err != nil || e > largest || e < -largest {
			return 0, whole
		}
	}
	exact, ok := new(big.Rat).SetString(text)
	if !ok || !exact.IsInt() || !exact.Num().IsInt64() {
		return 0, whole
	}
	return exact.Num().Int64(), ""
}

// small reads a whole number into an int of any width.
func (f *fields) small(key string, to *int) {
	n := int64(*to)
	f.count(key, &n)
	if f.err == nil && n != int64(int32(n)) {
		f.fail(key, strconv.AppendInt(nil, n, 10), "be a whole number of at most 2^31 - 1")
		return
	}
	*to = int(n)
}

// unsigned reads a whole number of 0 to 2^64 - 1.
func (f *fields) unsigned(key string, to *uint64) {
	if data, ok := f.take(key); ok {
		n, err := strconv.ParseUint(string(data), 10, 64)
		if err != nil {
			f.fail(key, data, "be a whole number of 0 to 2^64 - 1")
			return
		}
		*to = n
	}
}

// text reads a string.
func (f *fields) text(key string, to *string) {
	if data, ok := f.take(key); ok {
		var s string
		if data[0] != '"' || json.Unmarshal(data, &s) != nil {
			f.fail(key, data, "be a string")
			return
		}
		*to = s
	}
}

// flag reads a boolean.
func (f *fields) flag(key string, to *bool) {
	if data, ok := f.take(key); ok {
		switch string(data) {
		case "true":
			*to = true
		case "false":
			*to = false
		default:
			f.fail(key, data, "be true or false")
		}
	}
}

// word reads a string that to knows how to parse.
func (f *fields) word(key string, to interface{ UnmarshalText([]byte) error }) {
	var s string
	if _, ok := f.members[key]; !ok {
		return
	}
	f.text(key, &s)
	if f.err == nil {
		if err := to.UnmarshalText([]byte(s)); err != nil {
			f.err = fieldError(f.at(key), s, wantOf(err))
		}
	}
}

// wantOf is the demand that a FieldError without a place makes.
func wantOf(err error) string {
	var field *FieldError
	if errors.As(err, &field) {
		return field.Want
	}
	return err.Error()
}

// finish is the first fault, or the first member by name that nobody asked for.
func (f *fields) finish() error {
	if f.err != nil || len(f.members) == 0 {
		return f.err
	}
	return &FieldError{Path: f.at(f.names()[0]), Want: "not be there: no such key is known"}
}

// names are the members not yet taken, sorted, so that the first fault is the
// same in every run.
func (f *fields) names() []string {
	names := make([]string, 0, len(f.members))
	for key := range f.members {
		names = append(names, key)
	}
	slices.Sort(names)
	return names
}
