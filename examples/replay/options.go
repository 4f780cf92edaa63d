package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"github.com/kvpolicy/kvpolicy"
	"github.com/kvpolicy/kvpolicy/internal/replay"
	"github.com/kvpolicy/kvpolicy/internal/sim"
	"github.com/kvpolicy/kvpolicy/internal/trace"
	"github.com/kvpolicy/kvpolicy/internal/workload"
)

// options is what the flags say.
type options struct {
	workload   *workload.Workload
	source     workload.Options // all but pacing, seed and load
	scale      float64
	rows       []row
	baseline   int // of rows
	instances  int
	seeds      int
	firstSeed  int
	pacings    []workload.Pacing
	loads      []float64
	objectives replay.Objectives
	parallel   int
	json       bool
	csv        string
	pictures   string
	report     string
	command    string
}

// row is one line of the tables: a policy, what its router sees and what its
// servers have loaded.
type row struct {
	name      string
	policy    kvpolicy.Policy
	view      replay.View
	connector connector
}

// connector is a KV connector of the servers.
type connector string

const (
	connectorAuto     connector = "auto"
	connectorNone     connector = "none"
	connectorNIXL     connector = "nixl"
	connectorMooncake connector = "mooncake"
)

// mooncakeStepSeconds is what Mooncake's connector adds to a step. The published
// 1.4 ms (sim.H20) are taken for NIXL's; Mooncake's are scaled by what the two
// added to TPOT p90 in [V2], 4.2 ms against 2.7 ms (ours).
const mooncakeStepSeconds = 1.4e-3 * 4.2 / 2.7

// profile is an instance with the row's connector.
func (r row) profile() sim.Profile {
	p := sim.H20()
	p.ConnectorLoaded = r.connector != connectorNone
	if r.connector == connectorMooncake {
		p.ConnectorStepSeconds = mooncakeStepSeconds
	}
	return p
}

const usage = `usage: replay [flags]

Sends a trace, or a generated agentic workload, through simulated instances
(H20, Qwen3-Coder-30B-A3B, vLLM-like; docs/engine.md) behind a router, and
compares policies run by run on equal arrivals.

An entry of -policies is a preset (%s)
or the path of a JSON file with a policy, optionally followed by settings of its
own, each after a colon: connector=, truth, signals=, index=, scrape=, delay=,
index-tokens=; for example unified:connector=nixl or marginal:index=engine.

`

// parseOptions reads the flags. Errors name the flag.
func parseOptions(args []string, stderr io.Writer) (*options, error) {
	o := &options{command: "replay " + strings.Join(args, " ")}
	flags := flag.NewFlagSet("replay", flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	traceFile := flags.String("trace", "", "replay this `FILE`; absent: a generated agentic workload")
	format := flags.String("format", "auto", "the trace's `FORMAT`: auto, mooncake, bailian, sessions or azure")
	sessions := flags.Int("sessions", 0, "`N` sessions of the generated workload; 0 = 274, the published window's")
	rate := flags.Float64("session-rate", 0, "starts of sessions per second of a sessions CSV, which does not say; 0 = 0.01")
	policies := flags.String("policies", "", "comma-separated `LIST` of policies; absent: every preset but those that count on failures")
	baseline := flags.String("baseline", "", "the `POLICY` of the list that others are compared with; absent: the first")
	pacings := flags.String("pacing", "closed", "`LIST` of closed (a turn waits for its predecessor's end and its own gap) and trace (by trace time)")
	loads := flags.String("loads", "", "comma-separated offered loads `F,...` relative to the trace's; the first is what the tables are about, the others show in the sweep; absent: 1 for a trace, 1,0.5,0.75,1.25 for the generated workload")
	flags.Float64Var(&o.scale, "scale", 1, "stretch the trace's times by this factor before -loads: 2 sends at half the speed")
	flags.IntVar(&o.instances, "instances", 8, "`N` instances")
	flags.IntVar(&o.seeds, "seeds", 5, "`K` paired runs a policy, with the seeds from -first-seed on; where a trace has times of its own, each seed but 0 moves every session (every request, where there are none) later by up to -shift, before -window and -limit")
	flags.IntVar(&o.firstSeed, "first-seed", 1, "first `SEED`; -first-seed 0 -seeds 1 replays a trace as it was recorded")
	flags.Float64Var(&o.source.ShiftSeconds, "shift", 10, "bound in `SECONDS` of what a seed moves arrivals by")
	flags.Float64Var(&o.objectives.TTFTSeconds, "slo-ttft", 5, "goodput asks for a TTFT of at most so many `SECONDS`")
	flags.Float64Var(&o.objectives.TPOTSeconds, "slo-tpot", 0.1, "goodput asks for a TPOT of at most so many `SECONDS`")
	flags.IntVar(&o.source.MaxRequests, "limit", 0, "send the first `N` requests only; 0 = all")
	flags.Float64Var(&o.source.UntilSeconds, "window", 0, "send the first so many `SECONDS` of the trace only; 0 = all")
	flags.IntVar(&o.source.MaxContextTokens, "max-context", 262144, "leave out requests whose prompt and output are longer than `N` tokens, as a server refuses them; 0 = none")
	connectorName := flags.String("connector", "auto", "KV `CONNECTOR` loaded: none, nixl, mooncake, or auto: mooncake for policies with PD-separation, none for others")
	truth := flags.Bool("truth", false, "show the router each engine's state and cache as they are; -signals, -index, -scrape, -delay and -index-tokens are not read then")
	signals := flags.String("signals", "tracked", "the router's load signals: tracked (its own requests in flight) or scraped")
	index := flags.String("index", "dispatch", "the router's cache signal: dispatch or first-token (its own index, filled then), or engine (asks the engine at each decision)")
	scrape := flags.Float64("scrape", 1, "`SECONDS` between two scrapes of the metrics")
	delay := flags.Float64("delay", 0.05, "age of a scrape in `SECONDS` when the router has it")
	indexTokens := flags.Int("index-tokens", 0, "bound of the router's index of each instance in `TOKENS`; 0 = its KV pool")
	flags.BoolVar(&o.json, "json", false, "print JSON instead of tables")
	flags.StringVar(&o.csv, "csv", "", "write every run's figures to this `FILE`")
	flags.StringVar(&o.pictures, "pictures", "", "write pictures (PNG and SVG) to this `DIR`")
	flags.StringVar(&o.report, "report", "", "write tables and pictures to this HTML `FILE`")
	flags.IntVar(&o.parallel, "parallel", runtime.GOMAXPROCS(0), "`N` runs at a time")
	if err := flags.Parse(args); err != nil {
		if err == flag.ErrHelp {
			fmt.Fprintf(stderr, usage, strings.Join(defaultPolicies(), ", "))
			flags.SetOutput(stderr)
			flags.PrintDefaults()
		}
		return nil, err
	}
	if flags.NArg() > 0 {
		return nil, fmt.Errorf("%q is no flag: every input has one (-trace FILE)", flags.Arg(0))
	}
	for _, f := range []struct {
		name      string
		value     float64
		low, high float64
	}{
		{"scale", o.scale, 1e-6, 1e6},
		{"instances", float64(o.instances), 1, 4096},
		{"seeds", float64(o.seeds), 1, 10000},
		{"first-seed", float64(o.firstSeed), 0, 1e9},
		{"shift", o.source.ShiftSeconds, 1e-9, 1e6},
		{"sessions", float64(*sessions), 0, 1e9},
		{"session-rate", *rate, 0, 1e6},
		{"slo-ttft", o.objectives.TTFTSeconds, 1e-9, 1e9},
		{"slo-tpot", o.objectives.TPOTSeconds, 1e-9, 1e9},
		{"limit", float64(o.source.MaxRequests), 0, 1e9},
		{"window", o.source.UntilSeconds, 0, 1e12},
		{"max-context", float64(o.source.MaxContextTokens), 0, 1e9},
		{"scrape", *scrape, 1e-3, 1e6},
		{"delay", *delay, 0, 1e6},
		{"index-tokens", float64(*indexTokens), 0, 1e9},
		{"parallel", float64(o.parallel), 1, 1024},
	} {
		if !(f.value >= f.low && f.value <= f.high) {
			return nil, fmt.Errorf("-%s is %g, must be %g to %g", f.name, f.value, f.low, f.high)
		}
	}
	o.source.SessionsPerSecond = *rate
	var empty error
	flags.Visit(func(f *flag.Flag) {
		if f.Value.String() == "" {
			empty = fmt.Errorf("-%s is empty", f.Name)
		}
	})
	if empty != nil {
		return nil, empty
	}

	// What a row has unless it says otherwise, in the words of its own settings.
	defaults := row{view: replay.View{Truth: *truth, ScrapeSeconds: *scrape, DelaySeconds: *delay, IndexTokens: *indexTokens}}
	for _, s := range []struct{ name, value string }{{"connector", *connectorName}, {"signals", *signals}, {"index", *index}} {
		if err := defaults.set(s.name, s.value); err != nil {
			return nil, fmt.Errorf("-%w", err)
		}
	}
	entries := defaultPolicies()
	if *policies != "" {
		entries = strings.Split(*policies, ",")
		for i := range entries {
			entries[i] = strings.TrimSpace(entries[i])
		}
	}
	for _, entry := range entries {
		r, err := defaults.parse(entry)
		if err != nil {
			return nil, fmt.Errorf("-policies: %w", err)
		}
		if slices.ContainsFunc(o.rows, func(other row) bool { return other.name == r.name }) {
			return nil, fmt.Errorf("-policies: %s is there twice; a file's row has the file's name without .json", r.name)
		}
		o.rows = append(o.rows, r)
	}
	if *baseline != "" {
		o.baseline = slices.IndexFunc(o.rows, func(r row) bool { return r.name == *baseline })
		if o.baseline < 0 {
			return nil, fmt.Errorf("-baseline %s is none of the policies replayed", *baseline)
		}
	}
	for _, word := range strings.Split(*pacings, ",") {
		p, ok := map[string]workload.Pacing{"closed": workload.ClosedLoop, "trace": workload.TraceTime}[word]
		if !ok || slices.Contains(o.pacings, p) {
			return nil, fmt.Errorf("-pacing is %q, must be a list of closed and trace", *pacings)
		}
		o.pacings = append(o.pacings, p)
	}
	if *loads == "" {
		*loads = "1,0.5,0.75,1.25"
		if *traceFile != "" {
			*loads = "1"
		}
	}
	for _, word := range strings.Split(*loads, ",") {
		f, err := strconv.ParseFloat(word, 64)
		if err != nil || !(f >= 1e-3 && f <= 1e3) || slices.Contains(o.loads, f) {
			return nil, fmt.Errorf("-loads is %q, must be a list of different numbers from 0.001 to 1000", *loads)
		}
		if !(f/o.scale >= 1e-6 && f/o.scale <= 1e6) {
			return nil, fmt.Errorf("-loads %g over -scale %g is %g, must be 1e-06 to 1e+06", f, o.scale, f/o.scale)
		}
		o.loads = append(o.loads, f)
	}
	for _, f := range []struct{ name, path string }{{"csv", o.csv}, {"report", o.report}} {
		if f.path == "" {
			continue
		}
		if info, err := os.Stat(filepath.Dir(f.path)); err != nil || !info.IsDir() {
			return nil, fmt.Errorf("-%s %s: there is no such directory", f.name, f.path)
		}
		if info, err := os.Stat(f.path); err == nil && info.IsDir() {
			return nil, fmt.Errorf("-%s %s is a directory, must be a file", f.name, f.path)
		}
	}
	if o.csv != "" && filepath.Clean(o.csv) == filepath.Clean(o.report) {
		return nil, fmt.Errorf("-csv and -report are both %s", o.csv)
	}
	if o.pictures != "" {
		if info, err := os.Stat(o.pictures); err == nil && !info.IsDir() {
			return nil, fmt.Errorf("-pictures %s is a file, must be a directory", o.pictures)
		}
	}
	return o, o.open(*traceFile, *format, *sessions)
}

// open makes the workload.
func (o *options) open(file, format string, sessions int) (err error) {
	var f trace.Format
	if format != "auto" {
		if err := f.UnmarshalText([]byte(format)); err != nil {
			return fmt.Errorf("-format is %q, must be auto, mooncake, bailian, sessions or azure", format)
		}
	}
	if file == "" {
		if format != "auto" {
			return fmt.Errorf("-format %s goes with -trace", format)
		}
		if o.workload, err = workload.NewAgentic(workload.Agentic{Sessions: sessions}); err != nil {
			return fmt.Errorf("-sessions: %w", err)
		}
		return nil
	}
	if sessions != 0 {
		return fmt.Errorf("-sessions goes without -trace")
	}
	open := func() (io.ReadCloser, error) { return os.Open(file) }
	if o.workload, err = workload.NewTrace(filepath.Base(file), open, f); err != nil {
		return fmt.Errorf("-trace %s: %w", file, err)
	}
	return nil
}

// defaultPolicies are the presets that do not count on failures.
func defaultPolicies() []string {
	return slices.DeleteFunc(kvpolicy.PresetNames(), func(name string) bool {
		p, err := kvpolicy.Preset(name)
		return err != nil || p.Hazard.Enabled || p.Migration.Enabled
	})
}

// parse makes the row of an entry of -policies, with r for what it leaves open.
func (r row) parse(entry string) (row, error) {
	policy, settings, _ := strings.Cut(entry, ":")
	r.name = policy
	if strings.HasSuffix(policy, ".json") {
		data, err := os.ReadFile(policy)
		if err != nil {
			return r, err
		}
		if err := json.Unmarshal(data, &r.policy); err != nil {
			return r, fmt.Errorf("%s: %w", policy, err)
		}
		r.name = strings.TrimSuffix(filepath.Base(policy), ".json")
	} else {
		p, err := kvpolicy.Preset(policy)
		if err != nil || policy == "" {
			return r, fmt.Errorf("%q is neither a preset nor a .json file", policy)
		}
		r.policy = p
	}
	if settings != "" {
		r.name += ":" + settings
		for _, setting := range strings.Split(settings, ":") {
			key, value, _ := strings.Cut(setting, "=")
			if err := r.set(key, value); err != nil {
				return r, fmt.Errorf("%s: %w", entry, err)
			}
		}
	}
	switch {
	case r.policy.Cost.CountDecode:
		return r, fmt.Errorf("%s counts decode (cost.count_decode), and the router here knows no output length", r.name)
	case r.policy.Hazard.Enabled || r.policy.Migration.Enabled:
		return r, fmt.Errorf("%s counts on failures, and no instance fails here", r.name)
	case r.policy.Separation.Enabled && r.connector == connectorNone:
		return r, fmt.Errorf("%s has PD-separation, which needs a connector", r.name)
	case r.connector == connectorAuto && r.policy.Separation.Enabled:
		r.connector = connectorMooncake
	case r.connector == connectorAuto:
		r.connector = connectorNone
	}
	if err := r.policy.Validate(); err != nil {
		return r, fmt.Errorf("%s: %w", r.name, err)
	}
	return r, nil
}

// set changes one setting of a row.
func (r *row) set(key, value string) error {
	number := func(low, high float64, to func(float64)) error {
		f, err := strconv.ParseFloat(value, 64)
		if err != nil || !(f >= low && f <= high) {
			return fmt.Errorf("%s is %q, must be a number from %g to %g", key, value, low, high)
		}
		to(f)
		return nil
	}
	switch key {
	case "connector":
		switch c := connector(value); c {
		case connectorAuto, connectorNone, connectorNIXL, connectorMooncake:
			r.connector = c
			return nil
		}
		return fmt.Errorf("connector is %q, must be auto, none, nixl or mooncake", value)
	case "truth":
		if value != "" {
			return fmt.Errorf("truth takes no value")
		}
		r.view.Truth = true
		return nil
	case "signals":
		for _, s := range []replay.LoadSource{replay.Tracked, replay.Scraped} {
			if s.String() == value {
				r.view.Load = s
				return nil
			}
		}
		return fmt.Errorf("signals is %q, must be tracked or scraped", value)
	case "index":
		for _, s := range []replay.CacheSource{replay.AtDispatch, replay.AtFirstToken, replay.AskEngine} {
			if s.String() == value {
				r.view.Cache = s
				return nil
			}
		}
		return fmt.Errorf("index is %q, must be dispatch, first-token or engine", value)
	case "scrape":
		return number(1e-3, 1e6, func(f float64) { r.view.ScrapeSeconds = f })
	case "delay":
		return number(0, 1e6, func(f float64) { r.view.DelaySeconds = f })
	case "index-tokens":
		return number(0, 1e9, func(f float64) { r.view.IndexTokens = int(math.Round(f)) })
	}
	return fmt.Errorf("%q is no setting: connector, truth, signals, index, scrape, delay, index-tokens", key)
}
