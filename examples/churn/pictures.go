package main

import (
	"bytes"
	"context"
	"fmt"
	"image/color"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"github.com/google/renameio/v2"
	"github.com/kvpolicy/kvpolicy"
	"github.com/kvpolicy/kvpolicy/internal/churn"
	"github.com/kvpolicy/kvpolicy/internal/stats"
	"gonum.org/v1/gonum/stat/distuv"
	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgimg"
	"gonum.org/v1/plot/vg/vgsvg"
)

// writePictures draws everything, and only then writes.
func (r *results) writePictures(ctx context.Context) error {
	pictures := []struct {
		name  string
		plots func() ([]*plot.Plot, error)
	}{
		{"survival", r.survival},
		{"expected_cost", r.expectedCost},
		{"hysteresis", r.hysteresis},
	}
	files := map[string][]byte{}
	for _, p := range pictures {
		plots, err := p.plots()
		if err != nil {
			return fmt.Errorf("picture %s: %w", p.name, err)
		}
		if len(plots) == 0 {
			continue
		}
		if err := render(plots, p.name, files); err != nil {
			return fmt.Errorf("picture %s: %w", p.name, err)
		}
		if ctx.Err() != nil {
			return fmt.Errorf("interrupted; no picture was written")
		}
	}
	if err := os.MkdirAll(r.options.out, 0o755); err != nil {
		return err
	}
	for name, data := range files {
		if err := renameio.WriteFile(filepath.Join(r.options.out, name), data, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// render draws plots one below the other, as PNG and as SVG.
func render(plots []*plot.Plot, name string, files map[string][]byte) error {
	const width = 18 * vg.Centimeter
	height := vg.Length(len(plots)) * 9 * vg.Centimeter
	column := make([][]*plot.Plot, len(plots))
	for i, p := range plots {
		column[i] = []*plot.Plot{p}
	}
	paint := func(canvas vg.CanvasSizer) {
		tiles := draw.Tiles{Rows: len(plots), Cols: 1, PadTop: 6, PadBottom: 6, PadLeft: 6, PadRight: 12, PadY: 14}
		for i, row := range plot.Align(column, tiles, draw.New(canvas)) {
			plots[i].Draw(row[0])
		}
	}
	image := vgimg.PngCanvas{Canvas: vgimg.NewWith(vgimg.UseWH(width, height), vgimg.UseDPI(130), vgimg.UseBackgroundColor(color.White))}
	vector := vgsvg.New(width, height)
	for ending, canvas := range map[string]interface {
		vg.CanvasSizer
		io.WriterTo
	}{".png": image, ".svg": vector} {
		paint(canvas)
		var out bytes.Buffer
		if _, err := canvas.WriteTo(&out); err != nil {
			return err
		}
		files[name+ending] = out.Bytes()
	}
	return nil
}

// colours are told apart by people with any kind of colour vision. (Okabe and
// Ito, Color Universal Design, 2008.)
func colours() []color.RGBA {
	return []color.RGBA{
		{0xd5, 0x5e, 0x00, 0xff}, // vermilion
		{0x00, 0x72, 0xb2, 0xff}, // blue
		{0x00, 0x9e, 0x73, 0xff}, // green
		{0xcc, 0x79, 0xa7, 0xff}, // pink
		{0xe6, 0x9f, 0x00, 0xff}, // orange
		{0x56, 0xb4, 0xe9, 0xff}, // sky
	}
}

// newPlot is a plot with a grid, in a size to read.
func newPlot(title, x, y string) *plot.Plot {
	p := plot.New()
	p.Title.Text, p.X.Label.Text, p.Y.Label.Text = title, x, y
	p.Title.TextStyle.Font.Size, p.Title.Padding = 12, 6
	for _, style := range []*text.Style{&p.X.Label.TextStyle, &p.Y.Label.TextStyle, &p.X.Tick.Label, &p.Y.Tick.Label, &p.Legend.TextStyle} {
		style.Font.Size = font.Length(10)
	}
	p.Legend.Padding, p.Legend.ThumbnailWidth = 2, 24
	grid := plotter.NewGrid()
	grid.Vertical.Color, grid.Horizontal.Color = color.Gray{0xe0}, color.Gray{0xe0}
	p.Add(grid)
	return p
}

// timeAxis has an axis run over seconds, in logarithms.
func timeAxis(axis *plot.Axis, least, greatest float64) {
	axis.Min, axis.Max = least, greatest
	axis.Scale = plot.LogScale{}
	ticks := []plot.Tick{
		{Value: 1, Label: "1 s"}, {Value: 10, Label: "10 s"}, {Value: 60, Label: "1 min"}, {Value: 600, Label: "10 min"},
		{Value: 3600, Label: "1 h"}, {Value: 36_000, Label: "10 h"}, {Value: 4 * 86_400, Label: "4 days"}, {Value: 40 * 86_400, Label: "40 days"},
	}
	var shown []plot.Tick
	for _, tick := range ticks {
		if tick.Value >= least && tick.Value <= greatest {
			shown = append(shown, tick)
		}
	}
	axis.Tick.Marker = plot.ConstantTicks(shown)
}

// logarithmic are n seconds, from least to greatest.
func logarithmic(least, greatest float64, n int) []float64 {
	list := make([]float64, n)
	for i := range list {
		list[i] = least * math.Pow(greatest/least, float64(i)/float64(n-1))
	}
	return list
}

func line(points plotter.XYs, c color.Color, dashed bool) (*plotter.Line, error) {
	l, err := plotter.NewLine(points)
	if err != nil {
		return nil, err
	}
	l.Color, l.Width = c, vg.Points(1.8)
	if dashed {
		l.Dashes = []vg.Length{vg.Points(5), vg.Points(3)}
	}
	return l, nil
}

// survival draws the curves of the kinds of nodes: estimated, with bands, and
// where it is known the true one.
func (r *results) survival() ([]*plot.Plot, error) {
	const most = 6 // groups that can be told apart
	var plots []*plot.Plot
	// A fleet of kinds that the one before has too would show the same twice.
	for _, setting := range r.options.settings[:1] {
		groups, curves, err := r.estimates(setting)
		if err != nil {
			return nil, err
		}
		title := "Sessions of the nodes of " + setting.name
		if len(groups) > most {
			title += fmt.Sprintf(" (the %d groups with most sessions)", most)
			groups = groups[:most]
		}
		p := newPlot(title, "uptime", "share still up, with 95 % bands")
		least, greatest := 10.0, 600.0
		for _, group := range groups {
			if last, _, err := curves[group].Quantile(0.99); err == nil {
				greatest = max(greatest, 2*last)
			}
		}
		timeAxis(&p.X, least, greatest)
		p.Y.Min, p.Y.Max = 0, 1
		p.Legend.Left, p.Legend.Top = true, false
		p.Legend.XOffs, p.Legend.YOffs = vg.Points(8), vg.Points(8)
		for g, group := range groups {
			curve, c := curves[group], colours()[g]
			var estimate, truth plotter.XYs
			var upper, band plotter.XYs
			for _, t := range logarithmic(least, greatest, 700) {
				estimate = append(estimate, plotter.XY{X: t, Y: curve.Survival(t)})
				low, high, err := curve.Band(t, 0.95, kvpolicy.BandLogLog)
				if err != nil {
					return nil, err
				}
				if _, known := curve.StandardError(t); known {
					upper, band = append(upper, plotter.XY{X: t, Y: high}), append(band, plotter.XY{X: t, Y: low})
				}
			}
			for i := len(upper) - 1; i >= 0; i-- {
				band = append(band, upper[i])
			}
			area, err := plotter.NewPolygon(band)
			if err != nil {
				return nil, err
			}
			area.Color = color.NRGBA{c.R, c.G, c.B, 0x38}
			area.LineStyle.Width = 0
			l, err := line(estimate, c, false)
			if err != nil {
				return nil, err
			}
			p.Add(area, l)
			sessions, completed := curve.Sessions()
			name := group
			if name == "" {
				name = "no group"
			}
			p.Legend.Add(fmt.Sprintf("%s: %d sessions, %d ended", name, sessions, completed), l)
			if setting.drawn {
				population := churn.Population{Kind: kindOf(setting, group)}
				for _, t := range logarithmic(least, greatest, 300) {
					truth = append(truth, plotter.XY{X: t, Y: population.Survival(t)})
				}
				l, err := line(truth, color.Black, true)
				if err != nil {
					return nil, err
				}
				l.Width = vg.Points(1)
				p.Add(l)
				if g == len(groups)-1 {
					p.Legend.Add("true, all nodes of the kind", l)
				}
			}
		}
		plots = append(plots, p)
	}
	return plots, nil
}

func kindOf(s setting, name string) churn.Kind {
	for _, kind := range s.kinds {
		if kind.Name == name {
			return kind
		}
	}
	return s.kinds[0]
}

// estimates are the curves of the setting's groups as a strategy has them when
// the first seed's requests begin; of a recording, from all of it. The groups
// with most sessions come first.
func (r *results) estimates(s setting) (groups []string, curves map[string]*kvpolicy.KaplanMeier, err error) {
	scenario, err := s.sample(r.options.seed)
	if err != nil {
		return nil, nil, err
	}
	until := 0.0
	if !s.drawn {
		until = math.MaxFloat64
	}
	groups, seen := scenario.Seen(until)
	curves = map[string]*kvpolicy.KaplanMeier{}
	for _, group := range groups {
		var durations []float64
		var observed []bool
		for _, session := range seen[group] {
			durations = append(durations, session.DurationSeconds)
			observed = append(observed, session.Observed)
		}
		if curves[group], err = kvpolicy.NewKaplanMeier(durations, observed); err != nil {
			return nil, nil, err
		}
	}
	slices.SortStableFunc(groups, func(a, b string) int { return len(seen[b]) - len(seen[a]) })
	return groups, curves, nil
}

// The request whose cost is drawn: long enough to be worth thinking about.
const (
	drawnContext = 1000
	drawnOutput  = 2000
)

// expectedCost draws E = T + L by uptime: what placing a request on a node
// costs, where a like node is there to fall back on.
func (r *results) expectedCost() ([]*plot.Plot, error) {
	setting := r.options.settings[0]
	groups, curves, err := r.estimates(setting)
	if err != nil {
		return nil, err
	}
	policy := churn.HazardAware().Policy
	policy.Transfer, policy.Hazard.StallPenaltySeconds = r.options.play.Transfer, r.options.play.StallPenaltySeconds
	policy.Hazard.Cells = 0 // exact, so that steps of the estimate show as they are
	type source struct {
		label  string
		curve  kvpolicy.Curve
		dashed bool
		colour color.Color
	}
	var plots []*plot.Plot
	for i, kind := range setting.kinds {
		if i == 2 {
			break // a server's risk is too small to be seen
		}
		group := kind.Name
		sources := []source{}
		if setting.drawn {
			sources = append(sources,
				source{"E with the middle node's true curve", distuv.Weibull{K: kind.SessionShape, Lambda: kind.SessionScaleSeconds}, true, color.Black},
				source{"E with the curve estimated for the kind", curves[group], false, colours()[i]})
		} else {
			group = groups[0]
			sources = append(sources, source{"E with the curve estimated for group " + group, curves[group], false, colours()[1]})
		}
		// Beyond the oldest sessions there is nothing but the estimate's tail.
		oldest, _, err := curves[group].Quantile(0.998)
		if err != nil {
			return nil, err
		}
		greatest := 2 * max(oldest, 600)
		p := newPlot(fmt.Sprintf("%d tokens of context, %d to come, on a node of kind %s", drawnContext, drawnOutput, kind.Name),
			"uptime of the node", "expected cost, s (not from 0)")
		timeAxis(&p.X, 10, greatest)
		var base, top float64
		lines := []*plotter.Line{}
		for _, s := range sources {
			var points plotter.XYs
			for _, t := range logarithmic(10, greatest, 500) {
				node := kvpolicy.Instance{ID: "node", PrefillRate: kind.PrefillRate, DecodeRate: kind.DecodeRate, UptimeSeconds: t, Curve: s.curve}
				other := node
				other.ID, other.Curve = "other", nil
				candidates, err := policy.Explain(nil, kvpolicy.Snapshot{
					Request:   kvpolicy.Request{ContextTokens: drawnContext, RemainingTokens: drawnOutput},
					Instances: []kvpolicy.Instance{node, other},
				})
				if err != nil {
					return nil, err
				}
				cost := candidates[0].Cost
				base = cost.Total() - cost.Loss
				top = max(top, cost.Total())
				points = append(points, plotter.XY{X: t, Y: cost.Total()})
			}
			l, err := line(points, s.colour, s.dashed)
			if err != nil {
				return nil, err
			}
			lines = append(lines, l)
		}
		floor, err := line(plotter.XYs{{X: 10, Y: base}, {X: greatest, Y: base}}, color.Gray{0x77}, false)
		if err != nil {
			return nil, err
		}
		margin := max(top-base, 1e-3*base)
		p.Y.Min, p.Y.Max = base-0.1*margin, top+0.5*margin
		for k := len(lines) - 1; k >= 0; k-- {
			p.Add(lines[k])
		}
		p.Add(floor)
		for k, l := range lines {
			p.Legend.Add(sources[k].label, l)
		}
		p.Legend.Add("T, without any loss", floor)
		p.Legend.Top, p.Legend.Left = true, true
		p.Legend.XOffs, p.Legend.YOffs = vg.Points(8), vg.Points(-6)
		plots = append(plots, p)
	}
	return plots, nil
}

// hysteresis draws planned moves against unplanned losses.
func (r *results) hysteresis() ([]*plot.Plot, error) {
	o := r.options
	if o.sweepSeeds == 0 {
		return nil, nil
	}
	losses := func(jobs []*job) []float64 {
		return valuesOf(metric{of: func(x *churn.Result) float64 { return float64(x.UnplannedLosses) }}, jobs)
	}
	var plots []*plot.Plot
	for s, setting := range o.settings {
		p := newPlot(fmt.Sprintf("%s: what hysteresis does (numbers: h in seconds; %d seeds)", setting.name, o.sweepSeeds),
			"planned moves in a run (0 to 1 linear, then logarithmic)", "unplanned losses in a run")
		base := losses(r.table[s][baseline][:o.sweepSeeds])
		var baseMean float64
		for _, x := range base {
			baseMean += x / float64(len(base))
		}
		most := 1.0
		var drawn []plotter.XYs
		for w, way := range o.ways() {
			c := colours()[w]
			points := &intervals{}
			for h := range sweepHysteresis() {
				jobs := r.sweep[s][w][h]
				moves, err := r.mean(valuesOf(metric{of: func(x *churn.Result) float64 { return float64(x.PlannedMoves) }}, jobs))
				if err != nil {
					return nil, err
				}
				c, err := stats.Compare(base, losses(jobs), o.seed)
				if err != nil {
					return nil, err
				}
				d := c.Difference
				// Linear near 0 and logarithmic beyond, so that none and many fit one axis.
				points.XYs = append(points.XYs, plotter.XY{X: math.Asinh(moves.Value), Y: baseMean + d.Value})
				points.errors = append(points.errors, struct{ Low, High float64 }{max(0, d.Value-d.Low), max(0, d.High-d.Value)})
				most = max(most, 1.05*math.Asinh(moves.Value))
			}
			l, err := line(points.XYs, c, false)
			if err != nil {
				return nil, err
			}
			dots, err := plotter.NewScatter(points.XYs)
			if err != nil {
				return nil, err
			}
			dots.GlyphStyle = draw.GlyphStyle{Color: c, Radius: vg.Points(3), Shape: draw.CircleGlyph{}}
			bars, err := plotter.NewYErrorBars(points)
			if err != nil {
				return nil, err
			}
			bars.Color, bars.Width = color.NRGBA{c.R, c.G, c.B, 0x90}, vg.Points(0.8)
			p.Add(bars, l, dots)
			drawn = append(drawn, points.XYs)
			p.Legend.Add(way.Name, l, dots)
		}
		for w, points := range drawn {
			labels, err := labelled(points, 0.05*most, colours()[w], w == 0)
			if err != nil {
				return nil, err
			}
			p.Add(labels)
		}
		l, err := line(plotter.XYs{{X: 0, Y: baseMean}, {X: most, Y: baseMean}}, color.Gray{0x55}, true)
		if err != nil {
			return nil, err
		}
		l.Width = vg.Points(1.2)
		p.Add(l)
		p.Legend.Add("reactive_fastest, no moves (bars: 95 % intervals of the paired difference to it)", l)
		p.X.Min, p.X.Max = 0, most
		var ticks []plot.Tick
		for _, n := range []int{0, 1, 3, 10, 30, 100, 300, 1000, 3000, 10_000} {
			if at := math.Asinh(float64(n)); at <= most {
				ticks = append(ticks, plot.Tick{Value: at, Label: strconv.Itoa(n)})
			}
		}
		p.X.Tick.Marker = plot.ConstantTicks(ticks)
		p.Legend.Top, p.Legend.Left = true, true
		p.Legend.XOffs, p.Legend.YOffs = vg.Points(8), vg.Points(-6)
		span := p.Y.Max - p.Y.Min
		p.Y.Min, p.Y.Max = p.Y.Min-0.05*span, p.Y.Max+0.45*span
		plots = append(plots, p)
	}
	return plots, nil
}

// intervals are points with what they may be off by.
type intervals struct {
	plotter.XYs
	errors []struct{ Low, High float64 }
}

func (i *intervals) YError(k int) (low, high float64) { return i.errors[k].Low, i.errors[k].High }

// labelled writes the hysteresis beside each point; where points would write
// over each other, that of the first and the last of them.
func labelled(points plotter.XYs, apart float64, c color.Color, below bool) (*plotter.Labels, error) {
	h := sweepHysteresis()
	var at plotter.XYs
	var texts []string
	for i := 0; i < len(points); {
		last := i
		for last+1 < len(points) && math.Abs(points[last+1].X-points[i].X) < apart {
			last++
		}
		label := fmt.Sprint(h[i])
		if last > i {
			label += " to " + fmt.Sprint(h[last])
		}
		at, texts = append(at, points[i]), append(texts, label)
		i = last + 1
	}
	labels, err := plotter.NewLabels(plotter.XYLabels{XYs: at, Labels: texts})
	if err != nil {
		return nil, err
	}
	for i := range labels.TextStyle {
		labels.TextStyle[i].Font.Size = 9
		labels.TextStyle[i].Color = c
		labels.TextStyle[i].XAlign = draw.XCenter
		if below {
			labels.TextStyle[i].YAlign = draw.YTop
		}
	}
	labels.Offset = vg.Point{Y: vg.Points(4)}
	if below {
		labels.Offset.Y = -vg.Points(4)
	}
	return labels, nil
}
