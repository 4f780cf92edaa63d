package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/schollz/progressbar/v3"
	"golang.org/x/sync/errgroup"
	"golang.org/x/term"

	"github.com/kvpolicy/kvpolicy/internal/replay"
	"github.com/kvpolicy/kvpolicy/internal/sim"
	"github.com/kvpolicy/kvpolicy/internal/workload"
)

// setting is a pacing and a load: what the tables are made for.
type setting struct {
	pacing workload.Pacing
	load   float64
}

// grid is every run: settings times seeds times rows.
type grid struct {
	*options
	settings []setting
	// ceilings by seed; results by setting, row and seed, nil where a run is
	// not complete.
	ceilings []workload.Ceiling
	results  [][][]*replay.Result
}

// replayAll runs the grid, several runs at a time. On an error, an interruption
// included, the grid holds what was complete, or is nil where nothing can be.
func replayAll(ctx context.Context, o *options, stderr io.Writer) (*grid, error) {
	g := &grid{options: o, ceilings: make([]workload.Ceiling, o.seeds)}
	for _, pacing := range o.pacings {
		for _, load := range o.loads {
			g.settings = append(g.settings, setting{pacing, load})
			results := make([][]*replay.Result, len(o.rows))
			for i := range results {
				results[i] = make([]*replay.Result, o.seeds)
			}
			g.results = append(g.results, results)
		}
	}
	// Ceilings first: they also say how many requests there will be, and find
	// what is wrong in the trace.
	group, groupContext := errgroup.WithContext(ctx)
	group.SetLimit(o.parallel)
	for seed := range g.ceilings {
		group.Go(func() error {
			if err := groupContext.Err(); err != nil {
				return err
			}
			// A pass over a long trace cannot be stopped, only left behind.
			found := make(chan error, 1)
			var ceiling workload.Ceiling
			go func() {
				var err error
				ceiling, err = o.workload.Ceiling(g.source(setting{workload.TraceTime, 1}, seed))
				found <- err
			}()
			select {
			case <-groupContext.Done():
				return groupContext.Err()
			case err := <-found:
				g.ceilings[seed] = ceiling
				return err
			}
		})
	}
	if err := group.Wait(); err != nil {
		return nil, err
	}
	var total, leftOut int64
	for _, c := range g.ceilings {
		leftOut += c.LeftOut
		total += c.Requests * int64(len(g.settings)*len(o.rows))
	}
	if total == 0 && leftOut > 0 {
		return nil, fmt.Errorf("%s has no request left to send: all are longer than -max-context %d", o.workload.Name(), o.source.MaxContextTokens)
	}
	if total == 0 {
		return nil, fmt.Errorf("%s has no request left to send", o.workload.Name())
	}
	bar := newBar(total, stderr)
	group, groupContext = errgroup.WithContext(ctx)
	group.SetLimit(o.parallel)
	// By setting and seed, so that an interrupted grid has whole pairs.
	for s := range g.settings {
		for seed := range o.seeds {
			for i := range o.rows {
				group.Go(func() error {
					if err := groupContext.Err(); err != nil {
						return err
					}
					result, err := g.run(groupContext, s, i, seed, bar)
					if err != nil {
						return fmt.Errorf("%s, seed %d, load %g: %w", o.rows[i].name, o.firstSeed+seed, g.settings[s].load, err)
					}
					g.results[s][i][seed] = result
					return nil
				})
			}
		}
	}
	err := group.Wait()
	_ = bar.Clear() // the terminal's loss
	return g, err
}

// source is what a run is sent.
func (g *grid) source(s setting, seed int) workload.Options {
	w := g.options.source
	w.Pacing = s.pacing
	w.LoadFactor = s.load / g.scale
	w.Seed = uint64(g.firstSeed + seed)
	return w
}

func (g *grid) run(ctx context.Context, s, i, seed int, bar *progressbar.ProgressBar) (*replay.Result, error) {
	const batch = 64
	ended := 0
	profiles := make([]sim.Profile, g.instances)
	for k := range profiles {
		profiles[k] = g.rows[i].profile()
	}
	result, err := replay.Run(ctx, replay.Config{
		Workload:   g.workload,
		Options:    g.source(g.settings[s], seed),
		Policy:     g.rows[i].policy,
		Instances:  profiles,
		View:       g.rows[i].view,
		Objectives: g.objectives,
		Ended: func(float64) {
			if ended++; ended%batch == 0 {
				_ = bar.Add(batch)
			}
		},
	})
	_ = bar.Add(ended % batch)
	return result, err
}

// newBar is a progress bar with the time left on a terminal, and silent
// elsewhere.
func newBar(total int64, stderr io.Writer) *progressbar.ProgressBar {
	file, ok := stderr.(*os.File)
	visible := ok && term.IsTerminal(int(file.Fd()))
	return progressbar.NewOptions64(total,
		progressbar.OptionSetWriter(stderr),
		progressbar.OptionSetVisibility(visible),
		progressbar.OptionSetDescription("requests"),
		progressbar.OptionShowCount(),
		progressbar.OptionSetPredictTime(true),
		progressbar.OptionThrottle(100*time.Millisecond),
		progressbar.OptionClearOnFinish(),
	)
}

func (g *grid) runs() int { return len(g.settings) * len(g.rows) * g.seeds }

// each calls f for every complete run.
func (g *grid) each(f func(s, i, seed int, r *replay.Result)) {
	for s := range g.results {
		for i := range g.results[s] {
			for seed, r := range g.results[s][i] {
				if r != nil {
					f(s, i, seed, r)
				}
			}
		}
	}
}

func (g *grid) complete() (runs int) {
	g.each(func(int, int, int, *replay.Result) { runs++ })
	return runs
}

func (g *grid) requests() (requests int64) {
	g.each(func(_, _, _ int, r *replay.Result) { requests += r.Requests })
	return requests
}

// lost is an error where a request was not served to the end.
func (g *grid) lost() (err error) {
	g.each(func(s, i, seed int, r *replay.Result) {
		if r.Lost() > 0 && err == nil {
			err = fmt.Errorf("%d of %d requests were lost under %s, seed %d, load %g", r.Lost(), r.Requests, g.rows[i].name, g.firstSeed+seed, g.settings[s].load)
		}
	})
	return err
}
