package main

import (
	"bytes"
	"context"
	"encoding/xml"
	"errors"
	"fmt"
	"image/png"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func churned(ctx context.Context, args ...string) (status int, stdout, stderr string) {
	var out, errs bytes.Buffer
	status = run(ctx, args, &out, &errs)
	return status, out.String(), errs.String()
}

func tiny(more ...string) []string {
	return append([]string{"-fleet", "volunteer", "-hours", "0.1", "-warmup", "1", "-seeds", "3", "-sweep-seeds", "1"}, more...)
}

func TestTableAndPictures(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "new", "pictures")
	status, out, errs := churned(context.Background(), tiny("-seeds", "5", "-out", dir, "-parallel", "1")...)
	require.Equal(t, statusFine, status, errs)
	for _, word := range []string{"random", "reactive_fastest", "hazard_aware", "hazard_aware_overlap", "oracle",
		"latency mean s", "latency p99 s", "unplanned losses", "planned moves", "wasted s", "completed", "goodput tokens/s",
		"no difference shown", "hysteresis", dir} {
		assert.Contains(t, out, word)
	}
	assert.Contains(t, errs, "46 runs in", "and no progress bar where nobody watches")
	assert.NotContains(t, errs, "\r")
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	var names []string
	for _, entry := range entries {
		names = append(names, entry.Name())
		data, err := os.ReadFile(filepath.Join(dir, entry.Name()))
		require.NoError(t, err)
		if strings.HasSuffix(entry.Name(), ".png") {
			_, err := png.Decode(bytes.NewReader(data))
			assert.NoError(t, err, entry.Name())
			continue
		}
		decoder := xml.NewDecoder(bytes.NewReader(data))
		for err == nil {
			_, err = decoder.Token()
		}
		assert.ErrorIs(t, err, io.EOF, entry.Name())
	}
	assert.Equal(t, []string{"expected_cost.png", "expected_cost.svg", "hysteresis.png", "hysteresis.svg", "survival.png", "survival.svg"}, names)

	table, _, _ := strings.Cut(out, "Pictures are in")
	_, again, _ := churned(context.Background(), tiny("-seeds", "5", "-out", "", "-parallel", "3")...)
	assert.Equal(t, table, again, "however many run at a time")
	_, other, _ := churned(context.Background(), tiny("-seeds", "5", "-out", "", "-seed", "2")...)
	assert.NotEqual(t, table, other)
}

func sessionsFile(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "sessions.csv")
	require.NoError(t, os.WriteFile(path, []byte("node,group,start_s,duration_seconds,observed,left_truncated,note\n"+text), 0o644))
	return path
}

func TestRecordedSessions(t *testing.T) {
	var lines strings.Builder
	for i := range 40 {
		fmt.Fprintf(&lines, "n%d,g%d,%d,%d,%d,0,\n", i, i%8, 5000+60*i, 300+100*(i%7), i%5/4^1)
	}
	dir := t.TempDir()
	args := []string{"-sessions", sessionsFile(t, lines.String()), "-hours", "0.2", "-seeds", "2", "-sweep-seeds", "1", "-kind", "laptop"}
	status, out, errs := churned(context.Background(), append(args, "-out", dir)...)
	require.Equal(t, statusFine, status, errs)
	assert.Contains(t, out, "sessions: recorded sessions, from 0.32 h after the first;")
	assert.Contains(t, out, "kind laptop")
	files, err := os.ReadDir(dir)
	require.NoError(t, err)
	assert.Len(t, files, 6)

	status, later, errs := churned(context.Background(), append(args, "-out", "", "-start", "0.1")...)
	require.Equal(t, statusFine, status, errs)
	assert.Contains(t, later, "from 0.10 h after the first;")
	assert.NotContains(t, later, "Pictures")
}

func TestBadFlagsAreNamed(t *testing.T) {
	good := sessionsFile(t, "a,g,0,3600,1,0,\nb,g,3600,36000,1,0,\n")
	for _, c := range []struct {
		args  []string
		named string
	}{
		{[]string{"-hours", "0"}, "-hours is 0"},
		{[]string{"-hours", "NaN"}, "-hours is NaN"},
		{[]string{"-warmup", "-1"}, "-warmup is -1"},
		{[]string{"-seeds", "0"}, "-seeds is 0"},
		{[]string{"-seeds", "two"}, "-seeds"},
		{[]string{"-sweep-seeds", "-1"}, "-sweep-seeds is -1"},
		{[]string{"-check", "0"}, "-check is 0"},
		{[]string{"-stall", "Inf"}, "-stall is +Inf"},
		{[]string{"-min-sessions", "-1"}, "-min-sessions is -1"},
		{[]string{"-hysteresis", "-1"}, "-hysteresis is -1"},
		{[]string{"-max-hops", "-1"}, "-max-hops is -1"},
		{[]string{"-rounds", "65"}, "-rounds is 65"},
		{[]string{"-parallel", "0"}, "-parallel is 0"},
		{[]string{"-rate", "0"}, "-rate is 0"},
		{[]string{"-rate", "NaN"}, "-rate is NaN"},
		{[]string{"-fleet", "mixed,large"}, `-fleet names "large"`},
		{[]string{"-fleet", "mixed,mixed"}, `-fleet names "mixed" twice`},
		{[]string{"-kind", "spot"}, "-kind has no meaning without -sessions"},
		{[]string{"-start", "1"}, "-start has no meaning without -sessions"},
		{[]string{"-sessions", good, "-fleet", "mixed"}, "-fleet has no meaning beside -sessions"},
		{[]string{"-sessions", good, "-warmup", "1"}, "-warmup has no meaning beside -sessions"},
		{[]string{"-sessions", good, "-start", "-1"}, "-start is -1"},
		{[]string{"-sessions", good, "-start", "10"}, "-hours is 2, must end within the recording"},
		{[]string{"-sessions", sessionsFile(t, "a,g,0,60,1,0,\nb,g,36000,60,1,0,\n"), "-start", "1"}, "-start is 1, must begin"},
		{[]string{"-sessions", good, "-kind", "phone"}, `-kind is "phone"`},
		{[]string{"-sessions", "nowhere.csv"}, "-sessions: open nowhere.csv"},
		{[]string{"-sessions", sessionsFile(t, "a,g,0,60,1,0,\nb,g,0,-60,1,0,\n")}, `sessions.csv:3: kvpolicy: duration_seconds is "-60"`},
		{[]string{"sessions.csv"}, `"sessions.csv" is no flag`},
		{[]string{"-unknown"}, "-unknown"},
	} {
		status, out, errs := churned(context.Background(), c.args...)
		assert.Equal(t, statusBad, status, "%v", c.args)
		assert.Empty(t, out)
		assert.Contains(t, errs, c.named)
	}
	status, _, errs := churned(context.Background(), "-h")
	assert.Equal(t, statusFine, status)
	assert.Contains(t, errs, "-sessions FILE")
}

func TestInterruptedLeavesNothing(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	dir := filepath.Join(t.TempDir(), "pictures")
	status, out, errs := churned(ctx, tiny("-out", dir)...)
	assert.Equal(t, statusInterrupted, status)
	assert.Empty(t, out)
	assert.Contains(t, errs, "interrupted")
	_, err := os.Stat(dir)
	assert.True(t, errors.Is(err, os.ErrNotExist))
}
