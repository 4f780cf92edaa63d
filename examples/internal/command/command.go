// Package command is the main function that the examples share.
package command

import (
	"context"
	"io"
	"os"
	"os/signal"
	"syscall"
)

// Main runs a command and ends the process with its exit status. An interrupt
// or a request to terminate ends the context; a second one ends the process at
// once.
func Main(run func(ctx context.Context, args []string, stdout, stderr io.Writer) int) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)
	os.Exit(run(ctx, os.Args[1:], os.Stdout, os.Stderr))
}
