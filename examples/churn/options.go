package main

import (
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"github.com/kvpolicy/kvpolicy/internal/churn"
)

// options is what the flags say.
type options struct {
	settings   []setting
	hours      float64
	seeds      int
	seed       uint64
	sweepSeeds int
	play       churn.Options
	hysteresis float64
	maxHops    int64
	rounds     int
	parallel   int
	out        string
}

// setting is a fleet and a demand; a seed makes a scenario of it.
type setting struct {
	name   string // what it is called
	about  string // in a sentence
	kinds  []churn.Kind
	drawn  bool // from laws that are known; else the nodes are recorded
	sample func(seed uint64) (churn.Scenario, error)
}

// parseOptions reads the flags. Errors name the flag.
func parseOptions(args []string, stderr io.Writer) (*options, error) {
	o := &options{play: churn.DefaultOptions()}
	flags := flag.NewFlagSet("churn", flag.ContinueOnError)
	flags.SetOutput(io.Discard) // the caller prints the error, once
	fleets := flags.String("fleet", "mixed,volunteer", "the published `FLEETS` to draw nodes from: mixed, volunteer")
	sessions := flags.String("sessions", "", "take nodes and their sessions from this CSV `FILE` instead")
	kind := flags.String("kind", "spot", "what the nodes of -sessions are: laptop, spot or server")
	start := flags.Float64("start", -1, "begin so many `HOURS` after the recording's first session; what is over by then is learnt from (default when half of its sessions have begun)")
	rate := flags.Float64("rate", 0, "requests per second (default the fleet's published rate; with -sessions, 0.02 for each node that is up on average)")
	flags.Float64Var(&o.hours, "hours", 2, "for so many hours requests arrive and are served")
	warmup := flags.Float64("warmup", 24, "draw so many hours of churn before that, to learn from")
	flags.IntVar(&o.seeds, "seeds", 20, "the number of seeds")
	flags.Uint64Var(&o.seed, "seed", 1, "the first of them")
	flags.IntVar(&o.sweepSeeds, "sweep-seeds", 8, "how many of them show what hysteresis does, 0 for none")
	flags.Float64Var(&o.play.CheckSeconds, "check", o.play.CheckSeconds, "`SECONDS` between two checks of what is running")
	flags.Float64Var(&o.play.StallPenaltySeconds, "stall", o.play.StallPenaltySeconds, "`SECONDS` for which a lost request stands still before it is placed again")
	flags.IntVar(&o.play.MinSessions, "min-sessions", o.play.MinSessions, "completed sessions that a node needs for a curve of its own")
	flags.Float64Var(&o.hysteresis, "hysteresis", churn.HazardAware().Policy.Migration.HysteresisSeconds, "`SECONDS` of risk that a move must remove")
	flags.Int64Var(&o.maxHops, "max-hops", churn.HazardAware().Policy.Migration.MaxHops, "planned moves allowed per request")
	flags.IntVar(&o.rounds, "rounds", 4, "rounds of copying that hazard_aware_overlap overlaps with decoding")
	flags.IntVar(&o.parallel, "parallel", runtime.GOMAXPROCS(0), "runs at a time")
	flags.StringVar(&o.out, "out", filepath.Join("out", "churn"), "write the pictures into this `DIR`, made if need be; empty for none")
	if err := flags.Parse(args); err != nil {
		if err == flag.ErrHelp {
			flags.SetOutput(stderr)
			fmt.Fprintln(stderr, "usage: churn [flags]\nRuns requests on nodes that come and go, and compares strategies.")
			flags.PrintDefaults()
		}
		return nil, err
	}
	if flags.NArg() > 0 {
		return nil, fmt.Errorf("%q is no flag; -sessions names a file of sessions", flags.Arg(0))
	}
	given := map[string]bool{}
	flags.Visit(func(f *flag.Flag) { given[f.Name] = true })
	for _, f := range []struct {
		name               string
		value, least, most float64
	}{
		{"hours", o.hours, 0.01, 240},
		{"warmup", *warmup, 0, 2400},
		{"seeds", float64(o.seeds), 1, 10_000},
		{"sweep-seeds", float64(o.sweepSeeds), 0, 10_000},
		{"check", o.play.CheckSeconds, 0.1, 1e6},
		{"stall", o.play.StallPenaltySeconds, 0, 1e6},
		{"min-sessions", float64(o.play.MinSessions), 0, 1e6},
		{"hysteresis", o.hysteresis, 0, 1e6},
		{"max-hops", float64(o.maxHops), 0, 1e6},
		{"rounds", float64(o.rounds), 1, 64},
		{"parallel", float64(o.parallel), 1, 1024},
	} {
		if !(f.value >= f.least && f.value <= f.most) {
			return nil, fmt.Errorf("-%s is %v, must be %v to %v", f.name, f.value, f.least, f.most)
		}
	}
	if given["rate"] && !(*rate >= 1e-4 && *rate <= 100) {
		return nil, fmt.Errorf("-rate is %v, must be 0.0001 to 100 requests per second", *rate)
	}
	o.sweepSeeds = min(o.sweepSeeds, o.seeds)
	if *sessions != "" {
		for _, name := range []string{"fleet", "warmup"} {
			if given[name] {
				return nil, fmt.Errorf("-%s has no meaning beside -sessions, whose nodes come and go as recorded", name)
			}
		}
		if given["start"] && !(*start >= 0) {
			return nil, fmt.Errorf("-start is %v, must be at least 0 hours", *start)
		}
		return o, o.record(*sessions, *kind, *start*3600, *rate)
	}
	for _, name := range []string{"kind", "start"} {
		if given[name] {
			return nil, fmt.Errorf("-%s has no meaning without -sessions", name)
		}
	}
	for _, name := range strings.Split(*fleets, ",") {
		known := []churn.Fleet{churn.Mixed(), churn.Volunteer()}
		i := slices.IndexFunc(known, func(f churn.Fleet) bool { return f.Name == name })
		if i < 0 {
			return nil, fmt.Errorf("-fleet names %q, must name mixed or volunteer", name)
		}
		if slices.ContainsFunc(o.settings, func(s setting) bool { return s.name == name }) {
			return nil, fmt.Errorf("-fleet names %q twice", name)
		}
		o.draw(known[i], *rate, *warmup)
	}
	return o, nil
}

// draw adds a fleet.
func (o *options) draw(fleet churn.Fleet, rate, warmup float64) {
	if rate == 0 {
		rate = fleet.RequestRate
	}
	s := setting{name: fleet.Name, drawn: true}
	var nodes []string
	for _, group := range fleet.Groups {
		s.kinds = append(s.kinds, group.Kind)
		nodes = append(nodes, fmt.Sprintf("%d of kind %s", group.Count, group.Kind.Name))
	}
	s.about = fmt.Sprintf("%s; %v requests/s for %v h, after %v h of churn to learn from", strings.Join(nodes, ", "), rate, o.hours, warmup)
	s.sample = func(seed uint64) (churn.Scenario, error) {
		return fleet.Draw(seed, rate, o.hours*3600, warmup*3600)
	}
	o.settings = append(o.settings, s)
}

// record adds the nodes of a file of sessions.
func (o *options) record(name, kindName string, start, rate float64) error {
	kind, known := churn.KindByName(kindName)
	if !known {
		return fmt.Errorf("-kind is %q, must be laptop, spot or server", kindName)
	}
	file, err := os.Open(name)
	if err != nil {
		return fmt.Errorf("-sessions: %w", err)
	}
	defer file.Close()
	recording, err := churn.ReadRecording(name, file)
	if err != nil {
		return fmt.Errorf("-sessions: %w", err)
	}
	horizon := o.hours * 3600
	if start < 0 {
		start = min(recording.MedianStart(), max(0, recording.SpanSeconds()-horizon))
	}
	if start+horizon > recording.SpanSeconds() {
		return fmt.Errorf("-hours is %v, must end within the recording, which ends %.3g h after -start", o.hours, (recording.SpanSeconds()-start)/3600)
	}
	up := recording.MeanUp(start, horizon)
	if up == 0 {
		return fmt.Errorf("-start is %.3g, must begin %v h in which some node is up", start/3600, o.hours)
	}
	if rate == 0 {
		rate = min(100, max(1e-4, 0.02*up))
	}
	o.settings = []setting{{
		name:  strings.TrimSuffix(filepath.Base(name), filepath.Ext(name)),
		about: fmt.Sprintf("recorded sessions, from %.2f h after the first; %.1f nodes of kind %s up on average; %.3g requests/s for %v h", start/3600, up, kind.Name, rate, o.hours),
		kinds: []churn.Kind{kind},
		sample: func(seed uint64) (churn.Scenario, error) {
			return recording.Draw(kind, seed, rate, start, horizon)
		},
	}}
	return nil
}

// strategies are the lines of the setting's table.
func (o *options) strategies(s setting) []churn.Strategy {
	list := []churn.Strategy{churn.Random(), churn.ReactiveFastest(), churn.HazardAware()}
	if s.drawn {
		list = append(list, churn.HazardAwareKnowing())
	}
	list = append(list, churn.HazardAwareOverlap(o.rounds), churn.Oracle())
	for i := range list {
		if m := &list[i].Policy.Migration; m.Enabled {
			m.HysteresisSeconds, m.MaxHops = o.hysteresis, o.maxHops
		}
	}
	return list
}

// baseline is the strategy that the others are compared with.
const baseline = 1
