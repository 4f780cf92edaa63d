// Command decide decides logged snapshots: it reads cases, one JSON object a
// line, from files or standard input, and writes one decision a line.
//
//	go run ./examples/decide cases.jsonl
//	go run ./examples/decide -check vectors.jsonl
//	go run ./examples/decide -policy candidate.json -diff log.jsonl
//
// A case is {"name", "policy", "snapshot", "want"}; policy defaults to unified
// and want is needed for -check alone. A line that cannot be decided comes out
// as {"name", "line", "error"}, and the rest goes on. The exit status is 0, or
// 1 where a check differs, or 2 where a line or a flag was bad or there was
// nothing to check (go run makes 1 of every status but 0).
package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"

	"github.com/kvpolicy/kvpolicy"
)

const (
	statusFine = iota
	statusDiffers
	statusBad
)

func main() {
	os.Exit(run(os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}

// tool is one run over all its inputs.
type tool struct {
	check    bool
	diff     bool
	override *kvpolicy.Policy // decides every line where it is not nil
	several  bool             // inputs, so that a line is named with its file
	out      *bufio.Writer
	status   int
	checked  int
	changed  int
	decided  int // by both policies, for -diff
	lines    int
}

func run(args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	flags := flag.NewFlagSet("decide", flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.Usage = func() {
		fmt.Fprintln(stderr, "usage: decide [-check] [-policy FILE [-diff]] [FILE ...]\nReads cases, a JSON object a line; standard input where no file is named, or - is.")
		flags.PrintDefaults()
	}
	t := tool{out: bufio.NewWriter(stdout)}
	flags.BoolVar(&t.check, "check", false, "compare each decision with the line's want and print what differs")
	flags.BoolVar(&t.diff, "diff", false, "print which decisions -policy changes, and why")
	policyFile := flags.String("policy", "", "decide every line by the policy in this JSON `FILE`")
	switch err := flags.Parse(args); {
	case errors.Is(err, flag.ErrHelp):
		return statusFine
	case err != nil:
		return statusBad
	}
	if t.diff && (*policyFile == "" || t.check) {
		fmt.Fprintln(stderr, "decide: -diff needs -policy, and goes without -check")
		return statusBad
	}
	if *policyFile != "" {
		var err error
		if t.override, err = readPolicy(*policyFile); err != nil {
			fmt.Fprintln(stderr, "decide:", err)
			return statusBad
		}
	}
	t.several = flags.NArg() > 1
	if flags.NArg() == 0 {
		t.read("standard input", stdin, stderr)
	}
	for _, name := range flags.Args() {
		if name == "-" {
			t.read("standard input", stdin, stderr)
			continue
		}
		file, err := os.Open(name)
		if err != nil {
			fmt.Fprintln(stderr, "decide:", err)
			t.worsen(statusBad)
			continue
		}
		t.read(name, file, stderr)
		file.Close()
	}
	switch {
	case t.check:
		fmt.Fprintf(t.out, "%d of %d lines as wanted\n", t.checked, t.lines)
		if t.lines == 0 {
			fmt.Fprintln(stderr, "decide: nothing to check")
			t.worsen(statusBad)
		}
	case t.diff:
		fmt.Fprintf(t.out, "%d of %d decisions change\n", t.changed, t.decided)
	}
	if err := t.out.Flush(); err != nil {
		fmt.Fprintln(stderr, "decide:", err)
		t.worsen(statusBad)
	}
	return t.status
}

func readPolicy(name string) (*kvpolicy.Policy, error) {
	data, err := os.ReadFile(name)
	if err != nil {
		return nil, err
	}
	var p kvpolicy.Policy
	if err := json.Unmarshal(bytes.TrimPrefix(data, byteOrderMark), &p); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return &p, nil
}

func (t *tool) worsen(status int) { t.status = max(t.status, status) }

// byteOrderMark is what some editors put in front of UTF-8.
var byteOrderMark = []byte("\xef\xbb\xbf")

// read decides the lines of one input. What it has to say is written out before
// it waits for more.
func (t *tool) read(name string, from io.Reader, stderr io.Writer) {
	lines := bufio.NewReader(from)
	for number := 1; ; number++ {
		if lines.Buffered() == 0 {
			t.out.Flush() // an error stays, for the last Flush
		}
		line, err := lines.ReadBytes('\n')
		if number == 1 {
			line = bytes.TrimPrefix(line, byteOrderMark)
		}
		if line = bytes.TrimSpace(line); len(line) > 0 {
			t.lines++
			t.line(place{file: name, line: number}, line)
		}
		if err == io.EOF {
			return
		}
		if err != nil {
			fmt.Fprintf(stderr, "decide: %s: %v\n", name, err)
			t.worsen(statusBad)
			return
		}
	}
}

// place is where a line stands.
type place struct {
	file string
	line int
}

// logged is a line as it is written.
type logged struct {
	name             string
	policy, snapshot json.RawMessage // nil where absent
	want             map[string]any  // nil where absent
}

func (t *tool) line(at place, data []byte) {
	c, policy, snapshot, err := parse(data)
	if err == nil && t.diff {
		t.compare(at, c.name, policy, snapshot)
		return
	}
	if err == nil && t.check && c.want == nil {
		err = errors.New("want must be there for -check")
	}
	if t.check && c.want == nil {
		t.bad(at, c.name, err)
		return
	}
	var decision kvpolicy.Decision
	if err == nil {
		if t.override != nil {
			policy = *t.override
		}
		decision, err = policy.Decide(snapshot)
	}
	if t.check {
		t.checkLine(at, c, decision, err)
		return
	}
	if err == nil {
		err = t.write(c.name, decision)
	}
	if err != nil {
		t.bad(at, c.name, err)
	}
}

// parse reads a line; what could be read of it comes back with an error too.
func parse(data []byte) (c logged, p kvpolicy.Policy, s kvpolicy.Snapshot, err error) {
	members, err := split(data)
	if err != nil {
		return c, p, s, err
	}
	take := func(key string) json.RawMessage {
		value := members[key]
		delete(members, key)
		return value
	}
	if name := take("name"); name != nil {
		if err := json.Unmarshal(name, &c.name); err != nil {
			return c, p, s, fmt.Errorf("name: %w", err)
		}
	}
	if want := take("want"); want != nil {
		if c.want, err = parseWant(want); err != nil {
			return c, p, s, fmt.Errorf("want: %w", err)
		}
	}
	c.policy, c.snapshot = take("policy"), take("snapshot")
	take("decision") // these two a router's log may hold besides
	take("time")
	for _, key := range slices.Sorted(maps.Keys(members)) {
		return c, p, s, fmt.Errorf("%s must not be there: a line is name, policy, snapshot and want", key)
	}
	p = kvpolicy.Unified()
	if c.policy != nil {
		if err := json.Unmarshal(c.policy, &p); err != nil {
			return c, p, s, fmt.Errorf("policy: %w", err)
		}
	}
	if c.snapshot == nil {
		return c, p, s, errors.New("snapshot must be there")
	}
	err = json.Unmarshal(c.snapshot, &s)
	return c, p, s, err
}

// split reads the members of a JSON object. Keys are taken as they stand and
// once each: a line must not be read more loosely than what is in it.
func split(data []byte) (members map[string]json.RawMessage, err error) {
	defer func() {
		if err == io.EOF { // there is no end to a line but its closing brace
			err = io.ErrUnexpectedEOF
		}
	}()
	decoder := json.NewDecoder(bytes.NewReader(data))
	if token, err := decoder.Token(); err != nil {
		return nil, err
	} else if token != json.Delim('{') {
		return nil, errors.New("a line must be a JSON object")
	}
	members = map[string]json.RawMessage{}
	for decoder.More() {
		token, err := decoder.Token()
		if err != nil {
			return nil, err
		}
		key, _ := token.(string) // a key is always a string
		if _, twice := members[key]; twice {
			return nil, fmt.Errorf("%s must appear once", key)
		}
		var value json.RawMessage
		if err := decoder.Decode(&value); err != nil {
			return nil, err
		}
		members[key] = value
	}
	if _, err := decoder.Token(); err != nil { // the closing brace
		return nil, err
	}
	if _, err := decoder.Token(); err != io.EOF {
		return nil, errors.New("a line must hold one JSON object and no more")
	}
	return members, nil
}

// parseWant reads what a case wants, which must be something.
func parseWant(data []byte) (map[string]any, error) {
	var want map[string]any
	if err := json.Unmarshal(data, &want); err != nil {
		return nil, err
	}
	text, isText := want["error"].(string)
	if _, isError := want["error"]; len(want) == 0 || isError && (!isText || fold(text) == "") {
		return nil, errors.New("must name a field, or an error by some of its message")
	}
	return want, nil
}

// write writes a decision with the name of its case in front.
func (t *tool) write(name string, d kvpolicy.Decision) error {
	decision, err := json.Marshal(d)
	if err != nil {
		return err
	}
	head, err := json.Marshal(name)
	if err != nil {
		return err
	}
	fmt.Fprintf(t.out, `{"name":%s,%s`+"\n", head, decision[1:])
	return nil
}

func (t *tool) bad(at place, name string, err error) {
	t.worsen(statusBad)
	out := struct {
		Name  string `json:"name"`
		File  string `json:"file,omitempty"`
		Line  int    `json:"line"`
		Error string `json:"error"`
	}{Name: name, Line: at.line, Error: err.Error()}
	if t.several {
		out.File = at.file
	}
	line, err := json.Marshal(out)
	if err != nil { // a struct of strings and a number always encodes
		panic(err)
	}
	fmt.Fprintf(t.out, "%s\n", line)
}
