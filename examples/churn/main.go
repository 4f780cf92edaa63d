// Command churn runs requests on nodes that come and go, under strategies that
// know more or less about when a node will be lost, and says what each costs.
//
//	go run ./examples/churn
//	go run ./examples/churn -fleet volunteer -seeds 50 -hysteresis 1
//	go run ./examples/churn -sessions ../shared/data/spot/sessions_p3.csv
//
// The strategies: random; reactive_fastest (the fastest finish, recovered after
// a loss); hazard_aware (the preset, with survival curves estimated from the
// sessions seen until then); hazard_aware_true_curves (told the laws that the
// sessions are drawn from); hazard_aware_overlap (copies while the source
// decodes); oracle (knows every node's end). For a seed all of them see the same
// churn, arrivals, lengths and estimates; what a node, a loss and a move are is
// written in the package internal/churn.
//
// Figures are means over the seeds with 95 % intervals; differences are paired
// by seed, and where their interval holds zero the table says "no difference
// shown". Pictures go to -out: survival (of the fleet's kinds), expected_cost
// (E = T + L by uptime), hysteresis (planned moves against unplanned losses).
//
// The exit status is 0, or 1 where a run failed, 2 where a flag or the file of
// sessions was bad, 130 where it was interrupted; then no file is written.
package main

import (
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
	statusBad         = 2
	statusInterrupted = 130
)

func main() { command.Main(run) }

func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	fail := func(status int, err error) int {
		fmt.Fprintln(stderr, "churn:", err)
		return status
	}
	began := time.Now()
	o, err := parseOptions(args, stderr)
	switch {
	case errors.Is(err, flag.ErrHelp):
		return statusFine
	case err != nil:
		return fail(statusBad, err)
	}
	results, err := playAll(ctx, o, stderr)
	switch {
	case ctx.Err() != nil:
		return fail(statusInterrupted, errors.New("interrupted; no file was written"))
	case err != nil:
		return fail(statusFailed, err)
	}
	if err := results.print(stdout); err != nil {
		return fail(statusFailed, err)
	}
	if o.out != "" {
		if err := results.writePictures(ctx); err != nil {
			if ctx.Err() != nil {
				return fail(statusInterrupted, err)
			}
			return fail(statusFailed, err)
		}
		fmt.Fprintf(stdout, "Pictures are in %s.\n", o.out)
	}
	fmt.Fprintf(stderr, "churn: %d runs in %.1f s\n", len(results.jobs), time.Since(began).Seconds())
	return statusFine
}
