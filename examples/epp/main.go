// Command epp is an endpoint picker for gateways built on Envoy: an external
// processor (ext_proc) that answers each request with the instance which a
// kvpolicy policy picks, by the endpoint picker protocol of the Gateway API
// Inference Extension.
//
//	go run ./examples/epp -instances instances.yaml
//	go run ./examples/epp -stand-ins 3
//
// See README.md.
package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"time"

	modev3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extproc "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/reflection"

	"github.com/kvpolicy/kvpolicy/examples/internal/router"
)

func main() { router.Main("epp", run) }

// settings are all that the flags say.
type settings struct {
	shared                    *router.Flags
	listen, metricsListen     string
	drain                     time.Duration
	fallbacks, standIns       int
	requestMode, responseMode string
	decideAfter               int
	cert, key, clientCA       string

	modes modes
	tls   *tls.Config // nil for plain text
}

// bodyModes are the modes as flags have them, at the number that Envoy has.
var bodyModes = []string{"none", "streamed", "buffered", "buffered-partial", "full-duplex-streamed"}

func parse(args []string, stderr io.Writer) (*settings, error) {
	s := &settings{}
	flags := flag.NewFlagSet("epp", flag.ContinueOnError)
	flags.SetOutput(stderr)
	s.shared = router.AddFlags(flags)
	// Envoy waits 200 ms for an answer, unless it is told otherwise.
	if err := flags.Set("tokenize-timeout", "100ms"); err != nil {
		return nil, err
	}
	flags.Lookup("tokenize-timeout").DefValue = "100ms"
	flags.StringVar(&s.listen, "listen", "127.0.0.1:9002", "the `ADDRESS` to serve gRPC on")
	flags.StringVar(&s.metricsListen, "metrics-listen", "127.0.0.1:9090", "the `ADDRESS` to serve /metrics on; empty for nowhere")
	flags.DurationVar(&s.drain, "drain-timeout", 30*time.Second, "how long streams may take to end once the picker is told to stop")
	flags.IntVar(&s.fallbacks, "fallbacks", 2, "further endpoints to name, for the proxy's retries")
	modes := "none, streamed, buffered, buffered-partial or full-duplex-streamed"
	flags.StringVar(&s.requestMode, "request-body-mode", "buffered", "the request body mode of proxies that do not tell theirs: "+modes)
	flags.StringVar(&s.responseMode, "response-body-mode", "none", "the response body mode of proxies that do not tell theirs, likewise")
	flags.IntVar(&s.decideAfter, "decide-after", 256<<10, "bytes of a streamed request body after which to decide without the rest")
	flags.StringVar(&s.cert, "tls-cert", "", "serve TLS with the certificate in this PEM `FILE`")
	flags.StringVar(&s.key, "tls-key", "", "the key of -tls-cert, a PEM `FILE`")
	flags.StringVar(&s.clientCA, "tls-client-ca", "", "ask clients for a certificate signed by one in this PEM `FILE`")
	flags.IntVar(&s.standIns, "stand-ins", 0, "start this many small vLLM-like servers in this process, as the instances")
	if err := flags.Parse(args); err != nil {
		return nil, err
	}
	switch {
	case flags.NArg() > 0:
		return nil, fmt.Errorf("%q is no flag", flags.Arg(0))
	case s.drain < 0:
		return nil, router.FlagError("drain-timeout", s.drain, "be at least 0")
	case s.fallbacks < 0 || s.fallbacks > 100:
		return nil, router.FlagError("fallbacks", s.fallbacks, "be 0 to 100")
	case s.decideAfter < 1:
		return nil, router.FlagError("decide-after", s.decideAfter, "be at least 1")
	case s.standIns < 0 || s.standIns > 100:
		return nil, router.FlagError("stand-ins", s.standIns, "be 0 to 100")
	}
	for _, m := range []struct {
		flag, value string
		to          *modev3.ProcessingMode_BodySendMode
	}{{"request-body-mode", s.requestMode, &s.modes.request}, {"response-body-mode", s.responseMode, &s.modes.response}} {
		at := slices.Index(bodyModes, m.value)
		if at < 0 {
			return nil, router.FlagError(m.flag, m.value, "be "+strings.Join(bodyModes, ", "))
		}
		*m.to = modev3.ProcessingMode_BodySendMode(at)
	}
	var err error
	s.tls, err = s.readTLS()
	return s, err
}

func (s *settings) readTLS() (*tls.Config, error) {
	switch {
	case s.cert == "" && s.key == "" && s.clientCA == "":
		return nil, nil
	case s.cert == "":
		return nil, errors.New("-tls-cert must be given with -tls-key and -tls-client-ca")
	case s.key == "":
		return nil, errors.New("-tls-key must be given with -tls-cert")
	}
	pair, err := tls.LoadX509KeyPair(s.cert, s.key)
	if err != nil {
		return nil, fmt.Errorf("-tls-cert, -tls-key: %w", err)
	}
	c := &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12}
	if s.clientCA == "" {
		return c, nil
	}
	data, err := os.ReadFile(s.clientCA)
	if err != nil {
		return nil, fmt.Errorf("-tls-client-ca: %w", err)
	}
	c.ClientCAs, c.ClientAuth = x509.NewCertPool(), tls.RequireAndVerifyClientCert
	if !c.ClientCAs.AppendCertsFromPEM(data) {
		return nil, fmt.Errorf("-tls-client-ca: %s has no certificate", s.clientCA)
	}
	return c, nil
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	s, err := parse(args, stderr)
	if err != nil {
		return err
	}
	config, err := s.shared.Config(stderr)
	if err != nil {
		return err
	}
	var discover router.Discovery
	if s.standIns > 0 {
		if err := s.shared.WithoutInstances(); err != nil {
			return err
		}
	} else if discover, err = s.shared.Discovery(config); err != nil {
		return err
	}
	if config.Policy.Separation.Enabled {
		// The protocol names one destination, and no place for the prefill.
		config.Policy.Separation.Enabled = false
		config.Logger.Warn("the policy's pdsep is off: the protocol has no place for it")
	}
	config.Fallbacks = s.fallbacks
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
	var metrics net.Listener
	if s.metricsListen != "" {
		if metrics, err = net.Listen("tcp", s.metricsListen); err != nil {
			return errors.Join(fmt.Errorf("-metrics-listen: %w", err), listener.Close())
		}
	}
	if s.standIns > 0 { // when nothing can be wrong with the flags any more
		var stop func()
		if discover, stop, err = router.StandIns(s.standIns, "epp", stderr); err != nil {
			return errors.Join(err, listener.Close())
		}
		defer stop()
	}
	if metrics != nil {
		fmt.Fprintf(stdout, "epp: serving metrics on http://%s/metrics\n", metrics.Addr())
	}
	fmt.Fprintf(stdout, "epp: serving on %s\n", listener.Addr())
	return serve(ctx, listener, metrics, config, discover, s)
}

// The services whose health the protocol names.
const (
	livenessService  = "liveness"
	readinessService = "readiness"
)

// serve runs the picker until the context ends, then for -drain-delay, and then
// until the streams that it has by then end, or -drain-timeout is over. metrics is nil for nowhere.
func serve(ctx context.Context, listener, metrics net.Listener, config router.Config, discover router.Discovery, s *settings) error {
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	config.Registerer = registry
	r, err := router.New(config)
	if err != nil {
		return errors.Join(err, listener.Close())
	}
	defer r.Close()
	defer config.Client.CloseIdleConnections()
	const besideBody = 1 << 20 // headers and metadata of a message
	options := []grpc.ServerOption{grpc.MaxRecvMsgSize(int(min(s.shared.MaxBody, 1<<30)) + besideBody)}
	if s.tls != nil {
		options = append(options, grpc.Creds(credentials.NewTLS(s.tls)))
	}
	server := grpc.NewServer(options...)
	extproc.RegisterExternalProcessorServer(server, &processor{router: r, sessionHeader: s.shared.SessionHeader, maxBody: s.shared.MaxBody,
		requestMode: s.modes.request, responseMode: s.modes.response, decideAfter: s.decideAfter})
	well := health.NewServer()
	healthpb.RegisterHealthServer(server, well)
	reflection.Register(server)
	setReady := func(ready bool) {
		is := healthpb.HealthCheckResponse_NOT_SERVING
		if ready {
			is = healthpb.HealthCheckResponse_SERVING
		}
		for _, service := range []string{"", readinessService, extproc.ExternalProcessor_ServiceDesc.ServiceName} {
			well.SetServingStatus(service, is)
		}
	}
	well.SetServingStatus(livenessService, healthpb.HealthCheckResponse_SERVING)
	setReady(false)

	working, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	ended := make(chan error, 3)
	done := make(chan struct{}, 2)
	go func() { ended <- server.Serve(listener) }()
	go func() {
		defer func() { done <- struct{}{} }()
		if err := discover(working, r); err != nil {
			ended <- err
		}
	}()
	go func() {
		defer func() { done <- struct{}{} }()
		select {
		case <-r.Synced():
			setReady(true)
		case <-working.Done():
		}
	}()
	if metrics != nil {
		mux := http.NewServeMux()
		mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
		web := &http.Server{Handler: mux, ReadHeaderTimeout: time.Minute, ErrorLog: slog.NewLogLogger(config.Logger.Handler(), slog.LevelDebug)}
		go func() { ended <- web.Serve(metrics) }()
		defer web.Close()
	}
	delay := s.shared.DrainDelay
	select {
	case <-ctx.Done():
	case err = <-ended:
		delay = 0
	}
	config.Logger.Info("stopping")
	well.Shutdown()
	select {
	case <-time.After(delay):
	case late := <-ended:
		err = errors.Join(err, late)
	}
	late := time.AfterFunc(s.drain, func() {
		config.Logger.Warn("streams are cut off")
		server.Stop()
	})
	server.GracefulStop()
	late.Stop()
	cancel()
	<-done
	<-done
	return err
}
