package main

import (
	"cmp"
	"fmt"
	"math"
	"slices"

	"github.com/kvpolicy/kvpolicy"
	"github.com/kvpolicy/kvpolicy/internal/replay"
	"github.com/kvpolicy/kvpolicy/internal/sim"
	"github.com/kvpolicy/kvpolicy/internal/stats"
)

// bootstrapSeed makes the intervals repeat.
const bootstrapSeed = 1

// summary is what the grid says: the JSON output as it stands, and what tables
// and pictures are made of.
type summary struct {
	Command  string          `json:"command"`
	Workload workloadSummary `json:"workload"`
	Fleet    string          `json:"fleet"`
	// Instances is how many there are.
	Instances  int               `json:"instances"`
	Objectives objectivesSummary `json:"objectives"`
	Seeds      int               `json:"seeds"`
	Baseline   string            `json:"baseline"`
	// Complete is false where the replay was interrupted.
	Complete bool `json:"complete"`
	// Meanings says what each metric is.
	Meanings map[string]string `json:"metrics"`
	Settings []settingSummary  `json:"settings"`

	metrics []replay.Metric
	rows    []row
	options *options
}

type objectivesSummary struct {
	TTFT float64 `json:"ttft_s"`
	TPOT float64 `json:"tpot_s"`
}

// workloadSummary is the mean over the seeds.
type workloadSummary struct {
	Name           string  `json:"name"`
	Requests       float64 `json:"requests"`
	Sessions       float64 `json:"sessions"`
	InputTokens    float64 `json:"input_tokens"`
	OutputTokens   float64 `json:"output_tokens"`
	ReusableShare  float64 `json:"reusable_share"`
	LeftOut        float64 `json:"left_out_requests"`
	MaxContext     int     `json:"max_context_tokens"`
	CeilingSampled bool    `json:"reusable_share_is_an_estimate"`
}

type settingSummary struct {
	Pacing   string          `json:"pacing"`
	Load     float64         `json:"load"`
	Policies []policySummary `json:"policies"`
}

type policySummary struct {
	Name      string    `json:"name"`
	Connector connector `json:"connector"`
	// Runs is how many seeds are complete.
	Runs    int                      `json:"runs"`
	Metrics map[string]metricSummary `json:"metrics"`
	// Reasons and Funnel are sums over the seeds.
	Reasons map[string]int64 `json:"reasons"`
	Funnel  map[string]int64 `json:"funnel,omitempty"`
	results []*replay.Result // complete ones
}

// metricSummary is a metric over the seeds. A run without the metric has a null
// in Values.
type metricSummary struct {
	Mean            *float64          `json:"mean"`
	Values          []*float64        `json:"values"`
	AgainstBaseline *stats.Comparison `json:"against_baseline,omitempty"`
}

func (g *grid) summarize() (*summary, error) {
	s := &summary{
		Command:    g.command,
		Fleet:      "H20, Qwen3-Coder-30B-A3B, vLLM-like",
		Instances:  g.instances,
		Objectives: objectivesSummary{g.objectives.TTFTSeconds, g.objectives.TPOTSeconds},
		Seeds:      g.seeds,
		Baseline:   g.rows[g.baseline].name,
		Complete:   g.complete() == g.runs(),
		Meanings:   map[string]string{},
		metrics:    replay.Metrics(),
		rows:       g.rows,
		options:    g.options,
	}
	for _, m := range s.metrics {
		s.Meanings[m.Name] = m.Meaning
	}
	w := &s.Workload
	w.Name, w.MaxContext = g.workload.Name(), g.options.source.MaxContextTokens
	for _, c := range g.ceilings {
		n := float64(g.seeds)
		w.Requests += float64(c.Requests) / n
		w.Sessions += float64(c.Sessions) / n
		w.InputTokens += float64(c.InputTokens) / n
		w.OutputTokens += float64(c.OutputTokens) / n
		w.ReusableShare += c.Share() / n
		w.LeftOut += float64(c.LeftOut) / n
		w.CeilingSampled = w.CeilingSampled || c.Sampled
	}
	for at, setting := range g.settings {
		out := settingSummary{Pacing: setting.pacing.String(), Load: setting.load}
		for i := range g.rows {
			p, err := g.policy(s, at, i)
			if err != nil {
				return nil, err
			}
			out.Policies = append(out.Policies, p)
		}
		s.Settings = append(s.Settings, out)
	}
	return s, nil
}

// policy sums up a row under a setting.
func (g *grid) policy(s *summary, at, i int) (policySummary, error) {
	r := g.rows[i]
	p := policySummary{Name: r.name, Connector: r.connector, Metrics: map[string]metricSummary{}, Reasons: map[string]int64{}}
	if r.policy.Separation.Enabled {
		p.Funnel = map[string]int64{}
	}
	var all kvpolicy.Funnel
	for _, result := range g.results[at][i] {
		if result == nil {
			continue
		}
		p.Runs++
		p.results = append(p.results, result)
		all.Merge(result.Funnel)
	}
	for reason, n := range all.All() {
		if slices.Contains(gates(), reason) {
			p.Funnel[reason.String()] = n
		} else {
			p.Reasons[reason.String()] = n
		}
	}
	for _, m := range s.metrics {
		var out metricSummary
		var sum, count float64
		var base, values []float64
		for seed, result := range g.results[at][i] {
			var value *float64
			if result != nil {
				if v, ok := m.Of(result, g.ceilings[seed]); ok {
					value = &v
					sum += v
					count++
					if other := g.results[at][g.baseline][seed]; other != nil {
						if b, ok := m.Of(other, g.ceilings[seed]); ok {
							base, values = append(base, b), append(values, v)
						}
					}
				}
			}
			out.Values = append(out.Values, value)
		}
		if count > 0 {
			mean := sum / count
			out.Mean = &mean
		}
		if i != g.baseline && len(values) > 0 {
			c, err := stats.Compare(base, values, bootstrapSeed)
			if err != nil {
				return p, fmt.Errorf("%s of %s: %w", m.Name, p.Name, err)
			}
			out.AgainstBaseline = &c
		}
		p.Metrics[m.Name] = out
	}
	return p, nil
}

// mean is a metric's mean over the seeds, NaN where there is none.
func (p policySummary) mean(name string) float64 {
	if m := p.Metrics[name].Mean; m != nil {
		return *m
	}
	return math.NaN()
}

// merged adds up a sketch over the seeds.
func (p policySummary) merged(of func(*replay.Result) *stats.Sketch) *stats.Sketch {
	var all stats.Sketch
	for _, r := range p.results {
		all.Merge(of(r))
	}
	return &all
}

// main is the setting of each pacing that the tables are about: the first load.
func (s *summary) main() (main []settingSummary) {
	for _, setting := range s.Settings {
		if setting.Load == s.Settings[0].Load {
			main = append(main, setting)
		}
	}
	return main
}

// gates are the verdicts of PD-separation in the order of its gates.
func gates() []kvpolicy.Reason {
	var list []kvpolicy.Reason
	for r := kvpolicy.NewLocalBelowThreshold; r <= kvpolicy.Triggered; r++ {
		list = append(list, r)
	}
	return list
}

// separating are the policies with PD-separation.
func (s settingSummary) separating() []policySummary {
	return slices.DeleteFunc(slices.Clone(s.Policies), func(p policySummary) bool { return p.Funnel == nil })
}

// byLoad are the settings of each pacing by ascending load.
func (s *summary) byLoad() [][]settingSummary {
	var list [][]settingSummary
	for pacing := range slices.Chunk(slices.Clone(s.Settings), len(s.options.loads)) {
		slices.SortFunc(pacing, func(a, b settingSummary) int { return cmp.Compare(a.Load, b.Load) })
		list = append(list, pacing)
	}
	return list
}

// describeView says what a row's router sees.
func describeView(v replay.View) string {
	if v.Truth {
		return "truth"
	}
	load, index := "tracked", "dispatch"
	if v.Load != 0 {
		load = v.Load.String()
	}
	if v.Cache != 0 {
		index = v.Cache.String()
	}
	return fmt.Sprintf("load %s, index %s, scrape %g s, delay %g s", load, index, v.ScrapeSeconds, v.DelaySeconds)
}

// capacity is the KV pool of an instance in tokens.
func capacity() int { return sim.H20().KVCapacityTokens }
