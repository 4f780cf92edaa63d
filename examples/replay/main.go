// Command replay sends a request trace through simulated instances behind a
// router, under several policies, and says which one helps and whether the
// difference is more than noise.
//
//	go run ./examples/replay
//	go run ./examples/replay -trace conversation.jsonl -loads 1,0.5,1.5
//	go run ./examples/replay -policies unified,marginal,mine.json -seeds 10 -report out.html
//	go run ./examples/replay -policies unified,unified:truth -baseline unified
//
// Every policy gets the same arrivals for a seed. The figures are means over
// the seeds; differences from the baseline carry a 95 % bootstrap interval of
// the pairs, and where it holds zero the table says "no difference shown".
//
// The exit status is 0, or 1 where a run failed or lost a request, 2 where a
// flag was bad, 130 where it was interrupted; what was complete by then is
// still printed.
package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"time"

	"github.com/kvpolicy/kvpolicy/examples/internal/command"
)

const (
	statusFine        = 0
	statusFailed      = 1
	statusBadFlag     = 2
	statusInterrupted = 130
)

func main() { command.Main(run) }

func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	fail := func(status int, err error) int {
		fmt.Fprintln(stderr, "replay:", err)
		return status
	}
	o, err := parseOptions(args, stderr)
	switch {
	case errors.Is(err, flag.ErrHelp):
		return statusFine
	case err != nil:
		return fail(statusBadFlag, err)
	}
	began := time.Now()
	g, err := replayAll(ctx, o, stderr)
	if g == nil {
		if ctx.Err() != nil {
			return fail(statusInterrupted, errors.New("interrupted before anything was complete"))
		}
		return fail(statusFailed, err)
	}
	s, summaryErr := g.summarize()
	if summaryErr != nil {
		return fail(statusFailed, summaryErr)
	}
	// The files first: a reader that closes the pipe early must not cost them.
	interrupted := ctx.Err() != nil
	var filesErr error
	if !interrupted && err == nil {
		filesErr = s.writeFiles(g)
	}
	var out bytes.Buffer
	if o.json {
		if err := s.writeJSON(&out); err != nil {
			return fail(statusFailed, err)
		}
	} else {
		if err := s.writeText(&out); err != nil {
			return fail(statusFailed, err)
		}
		if !interrupted && err == nil && filesErr == nil {
			fmt.Fprintf(&out, "\n%d runs, %d requests, in %.1f s.\n", g.runs(), g.requests(), time.Since(began).Seconds())
		}
	}
	if _, err := stdout.Write(out.Bytes()); err != nil {
		return fail(statusFailed, err)
	}
	switch {
	case interrupted:
		return fail(statusInterrupted, fmt.Errorf("interrupted after %d of %d runs; no file was written", g.complete(), g.runs()))
	case err != nil:
		return fail(statusFailed, err)
	case filesErr != nil:
		return fail(statusFailed, filesErr)
	}
	if err := g.lost(); err != nil {
		return fail(statusFailed, err)
	}
	return statusFine
}
