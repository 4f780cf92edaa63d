package main

import (
	"context"
	"io"
)

func demo(ctx context.Context, s *settings, stdout, stderr io.Writer) error { return nil }
