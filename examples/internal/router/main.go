package router

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"

	"github.com/kvpolicy/kvpolicy/examples/internal/command"
)

// Main is the main function of a server, which runs until it is told to stop.
// The exit status is 2 where run fails, for other reasons than being asked for
// help.
func Main(name string, run func(ctx context.Context, args []string, stdout, stderr io.Writer) error) {
	command.Main(func(ctx context.Context, args []string, stdout, stderr io.Writer) int {
		if err := run(ctx, args, stdout, stderr); err != nil && !errors.Is(err, flag.ErrHelp) {
			fmt.Fprintf(stderr, "%s: %v\n", name, err)
			return 2
		}
		return 0
	})
}
