package main

import (
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/kvpolicy/kvpolicy"
)

// Numbers are the same where they differ by at most this much.
const (
	relativeTolerance = 1e-9
	absoluteTolerance = 1e-12
)

// checkLine compares what came of a line with what it wants.
func (t *tool) checkLine(at place, c logged, d kvpolicy.Decision, err error) {
	differences := differences(c.want, d, err)
	if len(differences) == 0 {
		t.checked++
		return
	}
	t.worsen(statusDiffers)
	for _, difference := range differences {
		fmt.Fprintf(t.out, "%s:%d: %s: %s\n", at.file, at.line, printable(c.name), difference)
	}
}

func differences(want map[string]any, d kvpolicy.Decision, err error) []string {
	wanted, wantError := want["error"].(string)
	switch {
	case wantError && err == nil:
		return []string{fmt.Sprintf("error: want %q, got none", wanted)}
	case wantError && !strings.Contains(fold(err.Error()), fold(wanted)):
		return []string{fmt.Sprintf("error: want %q, got %q", wanted, err)}
	case wantError:
		return nil
	case err != nil:
		return []string{fmt.Sprintf("error: want none, got %q", err)}
	}
	data, err := json.Marshal(d)
	if err != nil {
		return []string{fmt.Sprintf("decision: %v", err)}
	}
	var got map[string]any
	if err := json.Unmarshal(data, &got); err != nil {
		return []string{fmt.Sprintf("decision: %v", err)}
	}
	return compareObjects(nil, "", want, got)
}

// printable is a name without what would move the cursor of a terminal.
func printable(name string) string {
	quoted := strconv.Quote(name)
	return quoted[1 : len(quoted)-1]
}

// fold takes case and underscores out of a message.
func fold(s string) string { return strings.ReplaceAll(strings.ToLower(s), "_", "") }

// compareObjects appends the differences of the members that want names.
func compareObjects(dst []string, path string, want, got map[string]any) []string {
	keys := make([]string, 0, len(want))
	for key := range want {
		keys = append(keys, key)
	}
	slices.Sort(keys)
	for _, key := range keys {
		at := path + key
		g, there := got[key]
		if !there {
			dst = append(dst, fmt.Sprintf("%s: want %v, got nothing", at, want[key]))
			continue
		}
		inner, isObject := want[key].(map[string]any)
		if gotObject, both := g.(map[string]any); isObject && both {
			dst = compareObjects(dst, at+".", inner, gotObject)
		} else if !same(want[key], g) {
			dst = append(dst, fmt.Sprintf("%s: want %v, got %v", at, want[key], g))
		}
	}
	return dst
}

// same compares two values that are no objects.
func same(want, got any) bool {
	w, isNumber := want.(float64)
	g, both := got.(float64)
	if isNumber && both {
		return math.Abs(w-g) <= max(absoluteTolerance, relativeTolerance*math.Abs(w))
	}
	wantText, err := json.Marshal(want)
	gotText, gotErr := json.Marshal(got)
	return err == nil && gotErr == nil && string(wantText) == string(gotText)
}
