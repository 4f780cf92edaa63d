package router

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/net/http/httpguts"

	"github.com/kvpolicy/kvpolicy"
)

// Flags are the flags that a gateway and an endpoint picker share.
type Flags struct {
	preset, policy         string
	urls, file, dns        string
	dnsEvery               time.Duration
	maxMetricsAge          time.Duration
	prefillRate            float64
	decodeRate             float64
	decisionLog            string
	logLevel, logFormat    string
	scrapeEvery, scrapeFor time.Duration
	failures               int
	backoff, maxBackoff    time.Duration
	tokenize               bool
	tokenizeFor            time.Duration
	blockTokens            int
	sessionTTL             time.Duration

	// SessionHeader is the name of the header that names the session.
	SessionHeader string
	// MaxBody bounds the body of a request in bytes.
	MaxBody int64
	// DrainDelay is how long requests are still taken once the process is told to
	// stop and says that it is not ready.
	DrainDelay time.Duration
}

// AddFlags adds the flags to a set.
func AddFlags(to *flag.FlagSet) *Flags {
	d, f := DefaultConfig(), &Flags{}
	to.StringVar(&f.preset, "preset", "unified", "decide by this preset: "+strings.Join(kvpolicy.PresetNames(), ", "))
	to.StringVar(&f.policy, "policy", "", "decide by the policy in this JSON `FILE`, in place of -preset")
	to.StringVar(&f.urls, "urls", "", "the instances, as URLs separated by commas")
	to.StringVar(&f.file, "instances", "", "the instances, as this YAML or JSON `FILE`, which is watched")
	to.StringVar(&f.dns, "dns", "", "the instances, as the addresses of this `HOST:PORT`, looked up every -dns-every")
	to.DurationVar(&f.dnsEvery, "dns-every", 5*time.Second, "the time between two look-ups of -dns")
	to.DurationVar(&f.maxMetricsAge, "max-metrics-age", 5*time.Second, "how old metrics may be and count as fresh, where the policy does not say; 0 for any age")
	to.Float64Var(&f.prefillRate, "prefill-rate", 0, "the prefill rate of an instance in tokens/s; 0 for the policy's")
	to.Float64Var(&f.decodeRate, "decode-rate", 0, "the decode rate of a stream in tokens/s; 0 for the policy's")
	to.StringVar(&f.decisionLog, "decision-log", "", "append each decision to this `FILE`, for examples/decide")
	to.StringVar(&f.logLevel, "log-level", "info", "log from this level on: debug, info (a line a decision), warn or error")
	to.StringVar(&f.logFormat, "log-format", "text", "log as text or json")
	to.DurationVar(&f.scrapeEvery, "scrape-every", d.ScrapeEvery, "the time between two scrapes of an instance's /metrics")
	to.DurationVar(&f.scrapeFor, "scrape-timeout", d.ScrapeTimeout, "how long a scrape may take")
	to.IntVar(&f.failures, "failures", d.Failures, "failures in a row that take an instance out")
	to.DurationVar(&f.backoff, "backoff", d.Backoff, "how long an instance is out before it is tried again; doubles up to -max-backoff")
	to.DurationVar(&f.maxBackoff, "max-backoff", d.MaxBackoff, "the longest such time")
	to.BoolVar(&f.tokenize, "tokenize", d.Tokenize, "ask instances for the tokens of a prompt by /tokenize; else they are estimated")
	to.DurationVar(&f.tokenizeFor, "tokenize-timeout", d.TokenizeTimeout, "how long that may take before the tokens are estimated")
	to.IntVar(&f.blockTokens, "block-tokens", d.Track.BlockTokens, "the block size of the prefix index in tokens")
	to.DurationVar(&f.sessionTTL, "session-ttl", d.Track.SessionTTL, "how long after its last turn a session has a home; 0 for no sessions")
	to.StringVar(&f.SessionHeader, "session-header", "X-Session-Id", "the header that names the session; without it the body's user does")
	to.Int64Var(&f.MaxBody, "max-body", 16<<20, "the largest body of a request in bytes")
	to.DurationVar(&f.DrainDelay, "drain-delay", 0, "how long to say not to be ready, and still serve, once told to stop")
	return f
}

// FlagError says which flag is wrong.
func FlagError(name string, value any, want string) error {
	return fmt.Errorf("-%s is %v and must %s", name, value, want)
}

// Config is what the flags say, besides the decision log. The errors name the
// flag.
func (f *Flags) Config(logTo io.Writer) (Config, error) {
	c := DefaultConfig()
	for _, d := range []struct {
		name  string
		value time.Duration
		least time.Duration
	}{
		{"dns-every", f.dnsEvery, 1}, {"max-metrics-age", f.maxMetricsAge, 0}, {"scrape-every", f.scrapeEvery, time.Millisecond},
		{"scrape-timeout", f.scrapeFor, time.Millisecond}, {"backoff", f.backoff, time.Millisecond}, {"max-backoff", f.maxBackoff, f.backoff},
		{"tokenize-timeout", f.tokenizeFor, 1}, {"session-ttl", f.sessionTTL, 0},
		{"drain-delay", f.DrainDelay, 0},
	} {
		if d.value < d.least {
			return c, FlagError(d.name, d.value, fmt.Sprintf("be at least %v", d.least))
		}
	}
	switch {
	case f.failures < 1:
		return c, FlagError("failures", f.failures, "be at least 1")
	case !httpguts.ValidHeaderFieldName(f.SessionHeader):
		return c, FlagError("session-header", strconv.Quote(f.SessionHeader), "be the name of a header")
	case f.MaxBody < 1:
		return c, FlagError("max-body", f.MaxBody, "be at least 1")
	case !(f.prefillRate >= 0 && f.prefillRate <= 1e18):
		return c, FlagError("prefill-rate", f.prefillRate, "be 0 to 1e18")
	case !(f.decodeRate >= 0 && f.decodeRate <= 1e18):
		return c, FlagError("decode-rate", f.decodeRate, "be 0 to 1e18")
	}
	policy, err := f.readPolicy()
	if err != nil {
		return c, err
	}
	if policy.MaxMetricsAgeSeconds == 0 {
		policy.MaxMetricsAgeSeconds = f.maxMetricsAge.Seconds()
	}
	if f.prefillRate > 0 {
		policy.Cost.PrefillRate = f.prefillRate
	}
	if f.decodeRate > 0 {
		policy.Cost.DecodeRate = f.decodeRate
	}
	if err := policy.Validate(); err != nil {
		return c, fmt.Errorf("-policy: %w", err)
	}
	if f.file == "" && policy.Cost.CountDecode && policy.Cost.DecodeRate == 0 {
		return c, FlagError("decode-rate", 0, "be above 0: the policy counts decode, and only a file of -instances can say it otherwise")
	}
	c.Policy = policy
	c.ScrapeEvery, c.ScrapeTimeout, c.Failures, c.Backoff, c.MaxBackoff = f.scrapeEvery, f.scrapeFor, f.failures, f.backoff, f.maxBackoff
	c.Tokenize, c.TokenizeTimeout = f.tokenize, f.tokenizeFor
	c.Track.BlockTokens, c.Track.SessionTTL = f.blockTokens, f.sessionTTL
	if err := c.Track.Validate(); err != nil {
		return c, fmt.Errorf("-block-tokens: %w", err)
	}
	// Instances are not to send the router elsewhere, nor a proxy to stand
	// between.
	c.Client = &http.Client{
		Transport:     &http.Transport{MaxIdleConnsPerHost: 4, IdleConnTimeout: time.Minute, DialContext: (&net.Dialer{Timeout: f.scrapeFor}).DialContext},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	var level slog.Level
	if err := level.UnmarshalText([]byte(f.logLevel)); err != nil {
		return c, FlagError("log-level", f.logLevel, "be debug, info, warn or error")
	}
	options := &slog.HandlerOptions{Level: level}
	switch f.logFormat {
	case "text":
		c.Logger = slog.New(slog.NewTextHandler(logTo, options))
	case "json":
		c.Logger = slog.New(slog.NewJSONHandler(logTo, options))
	default:
		return c, FlagError("log-format", f.logFormat, "be text or json")
	}
	return c, nil
}

func (f *Flags) readPolicy() (kvpolicy.Policy, error) {
	if f.policy == "" {
		p, err := kvpolicy.Preset(f.preset)
		if err != nil {
			return p, fmt.Errorf("-preset: %w", err)
		}
		return p, nil
	}
	var p kvpolicy.Policy
	data, err := os.ReadFile(f.policy)
	if err == nil {
		err = json.Unmarshal(data, &p)
	}
	if err != nil {
		return p, fmt.Errorf("-policy %s: %w", f.policy, err)
	}
	return p, nil
}

// OpenDecisionLog opens the file of -decision-log; nil where there is none.
func (f *Flags) OpenDecisionLog() (*os.File, error) {
	if f.decisionLog == "" {
		return nil, nil
	}
	file, err := os.OpenFile(f.decisionLog, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, fmt.Errorf("-decision-log: %w", err)
	}
	return file, nil
}

// Discovery is where a router's instances come from.
type Discovery func(ctx context.Context, r *Router) error

// WithoutInstances checks that no instances are given, where they come from
// elsewhere.
func (f *Flags) WithoutInstances() error {
	for name, value := range map[string]string{"urls": f.urls, "instances": f.file, "dns": f.dns} {
		if value != "" {
			return FlagError(name, strconv.Quote(value), "be left out with -stand-ins and -demo")
		}
	}
	return nil
}

// Discovery is what -urls, -instances or -dns say, of which there must be one.
// It sets the router's instances and keeps on doing so until the context ends.
// What they are now is checked against the router's configuration.
func (f *Flags) Discovery(c Config) (Discovery, error) {
	given := 0
	for _, text := range []string{f.urls, f.file, f.dns} {
		if text != "" {
			given++
		}
	}
	if given != 1 {
		return nil, errors.New("one of -urls, -instances and -dns must be given, and no more than one; or -stand-ins, for a first look")
	}
	switch {
	case f.urls != "":
		all, err := ParseURLs(f.urls)
		if err == nil {
			err = c.checkInstances(all)
		}
		if err != nil {
			return nil, fmt.Errorf("-urls: %w", err)
		}
		return Fixed(all), nil
	case f.file != "":
		all, err := ReadInstances(f.file)
		if err == nil {
			if err = c.checkInstances(all); err != nil {
				err = fmt.Errorf("%s: %w", f.file, err)
			}
		}
		if err != nil {
			return nil, fmt.Errorf("-instances: %w", err)
		}
		return func(ctx context.Context, r *Router) error { return r.WatchFile(ctx, f.file) }, nil
	}
	host, port, err := net.SplitHostPort(f.dns)
	if err == nil {
		if n, bad := strconv.ParseUint(port, 10, 16); bad != nil || n == 0 || host == "" {
			err = errors.New("bad")
		}
	}
	if err != nil {
		return nil, FlagError("dns", strconv.Quote(f.dns), "be like vllm.default.svc:8000")
	}
	return func(ctx context.Context, r *Router) error {
		r.WatchDNS(ctx, host, port, f.dnsEvery, net.DefaultResolver.LookupHost)
		return nil
	}, nil
}

// Fixed are instances that stay as they are.
func Fixed(all []Instance) Discovery {
	return func(ctx context.Context, r *Router) error {
		if err := r.SetInstances(all); err != nil {
			return err
		}
		<-ctx.Done()
		return nil
	}
}
