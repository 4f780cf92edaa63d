package main

import (
	"context"
	"fmt"
	"io"
	"os"

	"github.com/kvpolicy/kvpolicy/internal/churn"
	"github.com/schollz/progressbar/v3"
	"golang.org/x/sync/errgroup"
	"golang.org/x/term"
)

// job is one run: a setting, a seed and a strategy.
type job struct {
	setting, seed int
	strategy      churn.Strategy
	result        churn.Result
}

// results are all runs. They stand in an order that does not depend on which
// ended first.
type results struct {
	options *options
	jobs    []*job
	// table[setting][strategy][seed], sweep[setting][way][hysteresis][seed].
	table [][][]*job
	sweep [][][][]*job
}

// What hysteresis does is shown for these, in seconds, with the greatest
// slowdown held at sweepSlowdown: by default it follows the hysteresis, and the
// picture would show the two at once.
func sweepHysteresis() []float64 { return []float64{0, 0.25, 0.5, 1, 2, 4, 8, 16} }

const sweepSlowdown = 10

// ways are the strategies of which it is shown.
func (o *options) ways() []churn.Strategy {
	return []churn.Strategy{churn.HazardAware(), churn.HazardAwareOverlap(o.rounds)}
}

// playAll runs everything.
func playAll(ctx context.Context, o *options, stderr io.Writer) (*results, error) {
	r := &results{options: o}
	add := func(setting, seed int, strategy churn.Strategy) *job {
		j := &job{setting: setting, seed: seed, strategy: strategy}
		r.jobs = append(r.jobs, j)
		return j
	}
	for s := range o.settings {
		var table [][]*job
		for _, strategy := range o.strategies(o.settings[s]) {
			var line []*job
			for seed := range o.seeds {
				line = append(line, add(s, seed, strategy))
			}
			table = append(table, line)
		}
		r.table = append(r.table, table)
		var sweep [][][]*job
		for _, way := range o.ways() {
			var points [][]*job
			for _, hysteresis := range sweepHysteresis() {
				var point []*job
				for seed := range o.sweepSeeds {
					strategy := way
					strategy.Policy.Migration.HysteresisSeconds = hysteresis
					strategy.Policy.Migration.MaxSlowdownSeconds = sweepSlowdown
					strategy.Policy.Migration.MaxHops = o.maxHops
					point = append(point, add(s, seed, strategy))
				}
				points = append(points, point)
			}
			sweep = append(sweep, points)
		}
		r.sweep = append(r.sweep, sweep)
	}

	progress := io.Discard
	if file, ok := stderr.(*os.File); ok && term.IsTerminal(int(file.Fd())) {
		progress = file
	}
	bar := progressbar.NewOptions(len(r.jobs), progressbar.OptionSetWriter(progress),
		progressbar.OptionSetDescription("runs"), progressbar.OptionShowCount(), progressbar.OptionClearOnFinish())
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(o.parallel)
	for _, j := range r.jobs {
		group.Go(func() error {
			if err := ctx.Err(); err != nil {
				return err
			}
			scenario, err := o.settings[j.setting].sample(o.seed + uint64(j.seed))
			if err == nil {
				j.result, err = churn.Run(&scenario, j.strategy, o.play)
				j.result.Outcomes = nil // large, and summed up
			}
			if err != nil {
				return fmt.Errorf("%s, seed %d: %w", o.settings[j.setting].name, o.seed+uint64(j.seed), err)
			}
			return bar.Add(1)
		})
	}
	err := group.Wait()
	if finishErr := bar.Finish(); err == nil {
		err = finishErr
	}
	return r, err
}
