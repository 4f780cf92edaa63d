// Command gateway is an OpenAI-compatible reverse proxy in front of vLLM
// servers that sends each request where a kvpolicy policy says.
//
//	go run ./examples/gateway -urls http://10.0.0.1:8000,http://10.0.0.2:8000
//	go run ./examples/gateway -stand-ins 3
//	go run ./examples/gateway -demo
//
// It serves /v1/chat/completions, /v1/completions, /v1/models, /health and
// /metrics. See README.md.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/kvpolicy/kvpolicy/examples/internal/router"
)

func main() { router.Main("gateway", run) }

// settings are all that the flags say.
type settings struct {
	shared     *router.Flags
	options    options
	listen     string
	drain      time.Duration
	separation bool
	standIns   int
	demo       bool
}

func parse(args []string, stderr io.Writer) (*settings, error) {
	s := &settings{}
	flags := flag.NewFlagSet("gateway", flag.ContinueOnError)
	flags.SetOutput(stderr)
	s.shared = router.AddFlags(flags)
	flags.StringVar(&s.listen, "listen", "127.0.0.1:8080", "the `ADDRESS` to serve on")
	flags.IntVar(&s.options.maxAttempts, "max-attempts", 3, "attempts at a request, each at another instance, before its first byte")
	flags.DurationVar(&s.options.firstByte, "first-byte-timeout", 5*time.Minute, "how long an attempt may take until its first byte, which is not retried then; 0 is for ever")
	flags.DurationVar(&s.options.idle, "idle-timeout", 5*time.Minute, "how long an answer that has begun may stand still before it is cut off; 0 is for ever")
	flags.DurationVar(&s.options.bodyTimeout, "body-timeout", time.Minute, "how long the body of a request may take to come; 0 is for ever")
	flags.Int64Var(&s.options.maxBodies, "max-bodies", 512<<20, "the bytes of the bodies of all requests that are not answered; the next one gets a 503")
	flags.DurationVar(&s.drain, "drain-timeout", 30*time.Second, "how long requests may take to end once the gateway is told to stop")
	flags.BoolVar(&s.options.decisionHeaders, "decision-headers", true, "say in the response's X-Kvpolicy headers where it comes from and why")
	flags.BoolVar(&s.separation, "pd-separation", false, "let the policy have prefills done elsewhere; needs a KV connector on every instance")
	flags.IntVar(&s.standIns, "stand-ins", 0, "start this many small vLLM-like servers in this process, as the instances")
	flags.BoolVar(&s.demo, "demo", false, "start three such servers, send a scripted load through the gateway and print what went where and why")
	if err := flags.Parse(args); err != nil {
		return nil, err
	}
	switch {
	case flags.NArg() > 0:
		return nil, fmt.Errorf("%q is no flag", flags.Arg(0))
	case s.options.maxAttempts < 1 || s.options.maxAttempts > 100:
		return nil, router.FlagError("max-attempts", s.options.maxAttempts, "be 1 to 100")
	case s.options.firstByte < 0:
		return nil, router.FlagError("first-byte-timeout", s.options.firstByte, "be at least 0")
	case s.options.idle < 0:
		return nil, router.FlagError("idle-timeout", s.options.idle, "be at least 0")
	case s.options.bodyTimeout < 0:
		return nil, router.FlagError("body-timeout", s.options.bodyTimeout, "be at least 0")
	case s.options.maxBodies < s.shared.MaxBody:
		return nil, router.FlagError("max-bodies", s.options.maxBodies, "be at least -max-body")
	case s.drain < 0:
		return nil, router.FlagError("drain-timeout", s.drain, "be at least 0")
	case s.standIns < 0 || s.standIns > 100:
		return nil, router.FlagError("stand-ins", s.standIns, "be 0 to 100")
	}
	s.options.sessionHeader, s.options.maxBody = s.shared.SessionHeader, s.shared.MaxBody
	// Responses are passed on as they are: not decompressed, and as long as
	// they take.
	s.options.transport = &http.Transport{
		DialContext:         (&net.Dialer{Timeout: 5 * time.Second, KeepAlive: 15 * time.Second}).DialContext,
		MaxIdleConnsPerHost: 256, IdleConnTimeout: 90 * time.Second, DisableCompression: true,
	}
	return s, nil
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	s, err := parse(args, stderr)
	if err != nil {
		return err
	}
	if s.demo || s.standIns > 0 {
		if err := s.shared.WithoutInstances(); err != nil {
			return err
		}
	}
	if s.demo {
		return demo(ctx, s, stdout, stderr)
	}
	config, err := s.shared.Config(stderr)
	if err != nil {
		return err
	}
	var discover router.Discovery
	if s.standIns == 0 {
		if discover, err = s.shared.Discovery(config); err != nil {
			return err
		}
	}
	if config.Policy.Separation.Enabled && !s.separation {
		config.Policy = withoutSeparation(config.Policy)
		config.Logger.Warn("the policy's pdsep is off: it needs -pd-separation")
	} else if s.separation && !config.Policy.Separation.Enabled {
		return router.FlagError("pd-separation", true, "go with a policy that has pdsep, such as -preset unified_v2_relaxed")
	}
	if file, err := s.shared.OpenDecisionLog(); err != nil {
		return err
	} else if file != nil {
		defer file.Close()
		config.DecisionLog = file
	}
	listener, err := net.Listen("tcp", s.listen)
	if err != nil {
		return fmt.Errorf("-listen: %w", err)
	}
	if s.standIns > 0 { // when nothing can be wrong with the flags any more
		var stop func()
		if discover, stop, err = router.StandIns(s.standIns, "gateway", stderr); err != nil {
			return errors.Join(err, listener.Close())
		}
		defer stop()
	}
	fmt.Fprintf(stdout, "gateway: serving on http://%s\n", listener.Addr())
	return serve(ctx, listener, config, discover, s)
}

// serve runs the gateway until the context ends, then for -drain-delay, and then
// until the requests that it has by then are answered, or -drain-timeout is over.
func serve(ctx context.Context, listener net.Listener, config router.Config, discover router.Discovery, s *settings) error {
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	config.Registerer = registry
	r, err := router.New(config)
	if err != nil {
		return errors.Join(err, listener.Close())
	}
	defer r.Close()
	g := newGateway(r, registry, s.options)
	// Requests are cut off by this, and not by the signal.
	requests, cut := context.WithCancel(context.Background())
	defer cut()
	server := &http.Server{Handler: g.handler(), ReadHeaderTimeout: time.Minute, IdleTimeout: 2 * time.Minute,
		ErrorLog:    slog.NewLogLogger(config.Logger.Handler(), slog.LevelDebug),
		BaseContext: func(net.Listener) context.Context { return requests }}
	working, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	ended := make(chan error, 2)
	go func() { ended <- server.Serve(listener) }()
	discovering := make(chan struct{})
	go func() {
		defer close(discovering)
		if err := discover(working, r); err != nil {
			ended <- err
		}
	}()
	delay := s.shared.DrainDelay
	select {
	case <-ctx.Done():
	case err = <-ended:
		delay = 0
	}
	config.Logger.Info("stopping")
	g.stopping.Store(true)
	server.SetKeepAlivesEnabled(false)
	select {
	case <-time.After(delay):
	case late := <-ended:
		err = errors.Join(err, late)
	}
	draining, over := context.WithTimeout(context.Background(), s.drain)
	defer over()
	if late := server.Shutdown(draining); late != nil {
		config.Logger.Warn("requests are cut off", "error", late)
		cut()
		_ = server.Close()
	}
	cancel()
	<-discovering
	if t, ok := s.options.transport.(*http.Transport); ok {
		t.CloseIdleConnections()
	}
	config.Client.CloseIdleConnections()
	return err
}
