package main

import (
	"bytes"
	"fmt"
	"image/color"
	"math"
	"slices"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgimg"
	"gonum.org/v1/plot/vg/vgsvg"

	"github.com/kvpolicy/kvpolicy/internal/replay"
	"github.com/kvpolicy/kvpolicy/internal/stats"
)

// picture is one drawing, both ways.
type picture struct {
	name, caption string
	png, svg      []byte
}

// render draws on both kinds of canvas.
func render(name, caption string, width, height vg.Length, drawing func(draw.Canvas)) (picture, error) {
	p := picture{name: name, caption: caption}
	img := vgimg.NewWith(vgimg.UseWH(width, height), vgimg.UseDPI(144), vgimg.UseBackgroundColor(color.White))
	drawing(draw.New(img))
	var out bytes.Buffer
	if _, err := (vgimg.PngCanvas{Canvas: img}).WriteTo(&out); err != nil {
		return p, err
	}
	p.png = slices.Clone(out.Bytes())
	out.Reset()
	svg := vgsvg.New(width, height)
	drawing(draw.New(svg))
	if _, err := svg.WriteTo(&out); err != nil {
		return p, err
	}
	// Where the font is not installed, one of the same widths is.
	p.svg = bytes.ReplaceAll(out.Bytes(), []byte("font-family:Liberation Sans"), []byte("font-family:Liberation Sans,Arial,Helvetica,sans-serif"))
	return p, nil
}

// colours are told apart by people with any colour vision, the first eight
// after Okabe and Ito with a darker yellow.
func colours() []color.Color {
	return []color.Color{
		color.RGBA{0x00, 0x72, 0xb2, 0xff}, // blue
		color.RGBA{0xd5, 0x5e, 0x00, 0xff}, // vermilion
		color.RGBA{0x00, 0x9e, 0x73, 0xff}, // green
		color.RGBA{0xcc, 0x79, 0xa7, 0xff}, // pink
		color.RGBA{0x00, 0x00, 0x00, 0xff}, // black
		color.RGBA{0xe6, 0x9f, 0x00, 0xff}, // orange
		color.RGBA{0x56, 0xb4, 0xe9, 0xff}, // sky
		color.RGBA{0x7a, 0x6a, 0x00, 0xff}, // olive
		color.RGBA{0x80, 0x80, 0x80, 0xff}, // grey
		color.RGBA{0x6a, 0x3d, 0x9a, 0xff}, // violet
	}
}

// lineStyle is that of the i-th policy, in every picture.
func lineStyle(i int) draw.LineStyle {
	list := colours()
	dashes := [][]vg.Length{nil, {vg.Points(6), vg.Points(2)}, {vg.Points(2), vg.Points(2)}, {vg.Points(8), vg.Points(2), vg.Points(2), vg.Points(2)}}
	return draw.LineStyle{Color: list[i%len(list)], Width: vg.Points(1.6), Dashes: dashes[(i/5)%len(dashes)]}
}

// newPlot is an empty plot with labels and a light grid.
func newPlot(title, x, y string) *plot.Plot {
	p := plot.New()
	p.Title.Text, p.X.Label.Text, p.Y.Label.Text = title, x, y
	p.X.Tick.Marker, p.Y.Tick.Marker = plainTicks{}, plainTicks{}
	p.Title.TextStyle.Font.Size = vg.Points(12)
	p.Title.Padding = vg.Points(4)
	grid := plotter.NewGrid()
	grid.Vertical.Color, grid.Horizontal.Color = color.Gray{0xdd}, color.Gray{0xdd}
	p.Add(grid)
	return p
}

// plainTicks are the usual ones without zeros that say nothing.
type plainTicks struct{}

func (plainTicks) Ticks(low, high float64) []plot.Tick {
	ticks := plot.DefaultTicks{}.Ticks(low, high)
	for i := range ticks {
		if ticks[i].Label != "" {
			ticks[i].Label = fmt.Sprintf("%.6g", ticks[i].Value)
		}
	}
	return ticks
}

// logAxis makes an axis over decimal logarithms, which is what the data are then
// given as. (plot.LogScale misplaces the axis' label when it measures the room
// that a plot needs, and so leaves a gap.)
func logAxis(a *plot.Axis, low, high float64) {
	a.Tick.Marker = logTicks{}
	a.Min, a.Max = math.Log10(low), math.Log10(high)
}

// logTicks labels 1, 2 and 5 of each decade where there are few decades, else 1
// alone.
type logTicks struct{}

func (logTicks) Ticks(low, high float64) []plot.Tick {
	var ticks []plot.Tick
	for exponent := math.Floor(low); exponent <= high; exponent++ {
		for mantissa := 1; mantissa < 10; mantissa++ {
			at := exponent + math.Log10(float64(mantissa))
			if at < low-1e-9 || at > high+1e-9 {
				continue
			}
			label := ""
			if mantissa == 1 || high-low < 3 && (mantissa == 2 || mantissa == 5) {
				label = fmt.Sprintf("%.6g", float64(mantissa)*math.Pow(10, exponent))
			}
			ticks = append(ticks, plot.Tick{Value: at, Label: label})
		}
	}
	return ticks
}

// around gives a range of 1, 2 and 5 steps that holds the values above 0.
func around(values []float64) (low, high float64) {
	low, high = math.Inf(1), 0
	for _, v := range values {
		if v > 0 {
			low, high = min(low, v), max(high, v)
		}
	}
	if high == 0 {
		return 1, 10
	}
	step := func(v float64, up bool) float64 {
		decade := math.Pow(10, math.Floor(math.Log10(v)))
		steps := []float64{1, 2, 5, 10}
		if up {
			for _, s := range steps {
				if s*decade >= v {
					return s * decade
				}
			}
		}
		at := decade
		for _, s := range steps {
			if s*decade <= v {
				at = s * decade
			}
		}
		return at
	}
	low, high = step(low, false), step(high, true)
	if low == high {
		high *= 10
	}
	return low, high
}

const legendWidth = 135 // points

// withLegend draws plots side by side and the legend at their right, over
// nothing.
func withLegend(c draw.Canvas, plots []*plot.Plot, names []string, thumb func(i int) plot.Thumbnailer) {
	tiles := draw.Tiles{Rows: 1, Cols: len(plots), PadX: vg.Points(14), PadTop: vg.Points(6), PadRight: vg.Points(6), PadBottom: vg.Points(4), PadLeft: vg.Points(4)}
	area := draw.Crop(c, 0, -vg.Points(legendWidth), 0, 0)
	for k, canvas := range plot.Align([][]*plot.Plot{plots}, tiles, area)[0] {
		plots[k].Draw(canvas)
	}
	legend := plot.NewLegend()
	legend.Left, legend.Top = true, true
	legend.TextStyle.Font.Size = vg.Points(9)
	legend.Padding = vg.Points(3)
	for i, name := range names {
		legend.Add(shorten(name, 24), thumb(i))
	}
	legend.Draw(draw.Crop(c, c.Max.X-c.Min.X-vg.Points(legendWidth-4), 0, 0, -vg.Points(30)))
}

// shorten keeps a name from running out of its place.
func shorten(name string, most int) string {
	if runes := []rune(name); len(runes) > most {
		return string(runes[:most-1]) + "…"
	}
	return name
}

type thumbLine draw.LineStyle

func (t thumbLine) Thumbnail(c *draw.Canvas) {
	y := c.Center().Y
	c.StrokeLine2(draw.LineStyle(t), c.Min.X, y, c.Max.X, y)
}

type thumbFill struct{ color.Color }

func (t thumbFill) Thumbnail(c *draw.Canvas) {
	c.FillPolygon(t.Color, []vg.Point{c.Min, {X: c.Max.X, Y: c.Min.Y}, c.Max, {X: c.Min.X, Y: c.Max.Y}})
}

// policyLines draws the legend's lines.
func (s *summary) policyLines(c draw.Canvas, plots ...*plot.Plot) {
	names := make([]string, len(s.rows))
	for i, r := range s.rows {
		names[i] = r.name
	}
	withLegend(c, plots, names, func(i int) plot.Thumbnailer { return thumbLine(lineStyle(i)) })
}

// draw makes every picture that the grid has something for, of the first pacing.
func (s *summary) draw() ([]picture, error) {
	plot.DefaultFont.Variant = "Sans"
	main := s.main()[0]
	where := fmt.Sprintf("%s, %s, load %g", s.Workload.Name, main.Pacing, main.Load)
	var list []picture
	for _, make := range []func(settingSummary, string) (*picture, error){
		s.distributions, s.ninetieths, s.funnelBars, s.predictions, s.loads, s.hotspots,
	} {
		p, err := make(main, where)
		if err != nil {
			return nil, err
		}
		if p != nil {
			list = append(list, *p)
		}
	}
	return list, nil
}

// distributions draws the CDFs of TTFT and E2E by policy.
func (s *summary) distributions(main settingSummary, where string) (*picture, error) {
	var plots []*plot.Plot
	for _, d := range []struct {
		title string
		of    func(*replay.Result) *stats.Sketch
	}{
		{"TTFT", func(r *replay.Result) *stats.Sketch { return &r.TTFT }},
		{"E2E", func(r *replay.Result) *stats.Sketch { return &r.E2E }},
	} {
		p := newPlot(d.title+" by policy", d.title+" (s)", "share of requests")
		var seen []float64
		for i, policy := range main.Policies {
			sketch := policy.merged(d.of)
			var points plotter.XYs
			for value, share := range sketch.CDF() {
				// Steps too small to be seen are left out, but not the last one.
				if n := len(points); n > 0 && share < 1 && share-points[n-1].Y < 1.0/500 {
					continue
				}
				points = append(points, plotter.XY{X: math.Log10(max(value, 1e-3)), Y: share})
			}
			if len(points) == 0 {
				continue
			}
			line, err := plotter.NewLine(points)
			if err != nil {
				return nil, err
			}
			line.StepStyle = plotter.PostStep
			line.LineStyle = lineStyle(i)
			p.Add(line)
			seen = append(seen, max(sketch.Quantile(0.01), 1e-3), sketch.Max())
		}
		low, high := around(seen)
		logAxis(&p.X, low, high)
		p.Y.Min, p.Y.Max = 0, 1
		plots = append(plots, p)
	}
	return s.figure("ttft_and_e2e", "Distribution of TTFT and E2E over the requests of all seeds ("+where+").", 900, 380,
		func(c draw.Canvas) { s.policyLines(c, plots...) })
}

func (s *summary) figure(name, caption string, width, height float64, drawing func(draw.Canvas)) (*picture, error) {
	p, err := render(name, caption, vg.Points(width), vg.Points(height), drawing)
	return &p, err
}

// ninetieths draws p90 by offered load.
func (s *summary) ninetieths(main settingSummary, _ string) (*picture, error) {
	if len(s.options.loads) < 2 {
		return nil, nil
	}
	var plots []*plot.Plot
	for _, d := range []struct{ title, metric string }{{"TTFT p90", "ttft_p90_s"}, {"E2E p90", "e2e_p90_s"}} {
		p := newPlot(d.title+" by offered load", "offered load, relative to the trace's", d.title+" (s)")
		var seen []float64
		for i := range s.rows {
			var points plotter.XYs
			for _, setting := range s.byLoad()[0] {
				if v := setting.Policies[i].mean(d.metric); v > 0 {
					points = append(points, plotter.XY{X: setting.Load, Y: math.Log10(v)})
					seen = append(seen, v)
				}
			}
			if len(points) == 0 {
				continue
			}
			line, dots, err := plotter.NewLinePoints(points)
			if err != nil {
				return nil, err
			}
			line.LineStyle = lineStyle(i)
			dots.Color, dots.Shape, dots.Radius = line.Color, draw.CircleGlyph{}, vg.Points(2.2)
			p.Add(line, dots)
		}
		low, high := around(seen)
		logAxis(&p.Y, low, high)
		p.X.Tick.Marker = plot.ConstantTicks(s.loadTicks())
		margin := (slices.Max(s.options.loads) - slices.Min(s.options.loads)) * 0.04
		p.X.Min, p.X.Max = slices.Min(s.options.loads)-margin, slices.Max(s.options.loads)+margin
		plots = append(plots, p)
	}
	return s.figure("p90_by_load", fmt.Sprintf("TTFT and E2E p90 by offered load (%s, %s; means over the seeds).", s.Workload.Name, main.Pacing), 900, 380,
		func(c draw.Canvas) { s.policyLines(c, plots...) })
}

func (s *summary) loadTicks() []plot.Tick {
	var ticks []plot.Tick
	for _, load := range s.options.loads {
		ticks = append(ticks, plot.Tick{Value: load, Label: fmt.Sprint(load)})
	}
	return ticks
}

// bars draws rectangles from the axis' beginning to a value, with a label at
// their end; unlike plotter.BarChart it can do so on a logarithmic axis.
type bars struct {
	list       []bar
	horizontal bool
}

// bar is one of them: where its middle is on the other axis and how thick it
// is, in that axis' units.
type bar struct {
	at, thickness, value float64
	colour               color.Color
	label                string
}

func (b bars) Plot(c draw.Canvas, p *plot.Plot) {
	x, y := p.Transforms(&c)
	style := p.Y.Tick.Label
	style.Font.Size = vg.Points(8)
	for _, bar := range b.list {
		low, high := bar.at-bar.thickness/2, bar.at+bar.thickness/2
		if b.horizontal {
			end := c.Min.X
			if bar.value > p.X.Min {
				end = x(bar.value)
			}
			fill(c, bar.colour, c.Min.X, y(low), end, y(high))
			style.XAlign, style.YAlign = text.XLeft, text.YCenter
			c.FillText(style, vg.Point{X: end + vg.Points(3), Y: y(bar.at)}, bar.label)
			continue
		}
		top := c.Min.Y
		if bar.value > p.Y.Min {
			top = y(bar.value)
		}
		fill(c, bar.colour, x(low), c.Min.Y, x(high), top)
		style.XAlign, style.YAlign = text.XCenter, text.YBottom
		c.FillText(style, vg.Point{X: x(bar.at), Y: top + vg.Points(2)}, bar.label)
	}
}

func fill(c draw.Canvas, colour color.Color, left, bottom, right, top vg.Length) {
	c.FillPolygon(colour, []vg.Point{{X: left, Y: bottom}, {X: right, Y: bottom}, {X: right, Y: top}, {X: left, Y: top}})
}

// funnelBars draws who fell through which gate.
func (s *summary) funnelBars(main settingSummary, where string) (*picture, error) {
	separating := main.separating()
	if len(separating) == 0 {
		return nil, nil
	}
	words := gates()
	p := newPlot("Gates of PD-separation", "requests of all seeds (log scale)", "")
	var list []bar
	var ticks []plot.Tick
	most, thickness := 10.0, 0.8/float64(len(separating))
	for k, word := range words {
		row := float64(len(words) - 1 - k)
		ticks = append(ticks, plot.Tick{Value: row, Label: word.String()})
		for i, policy := range separating {
			n := float64(policy.Funnel[word.String()])
			most = max(most, n)
			at := row + 0.4 - thickness*(float64(i)+0.5)
			list = append(list, bar{at, thickness * 0.92, math.Log10(n), lineStyle(i).Color, whole(n)})
		}
	}
	p.Add(bars{list, true})
	_, high := around([]float64{most * 1.5}) // room for the labels
	logAxis(&p.X, 0.5, high)
	p.Y.Tick.Marker = plot.ConstantTicks(ticks)
	p.Y.Min, p.Y.Max = -0.6, float64(len(words))-0.4
	var names []string
	for _, policy := range separating {
		names = append(names, policy.Name)
	}
	return s.figure("trigger_funnel", "Who fell through which gate of PD-separation, first gate on top ("+where+").", 900, 130+float64(40*len(separating)*len(words))/3,
		func(c draw.Canvas) {
			withLegend(c, []*plot.Plot{p}, names, func(i int) plot.Thumbnailer { return thumbFill{lineStyle(i).Color} })
		})
}

// panels draws one small plot a policy, with a legend at the right where there
// are names for one.
func panels(c draw.Canvas, list []*plot.Plot, columns int, names []string) {
	area := c
	if len(names) > 0 {
		area = draw.Crop(c, 0, -vg.Points(80), 0, 0)
		legend := plot.NewLegend()
		legend.Left, legend.Top = true, true
		legend.TextStyle.Font.Size = vg.Points(9)
		legend.Padding = vg.Points(3)
		for i, name := range names {
			legend.Add(name, thumbLine(lineStyle(i)))
		}
		legend.Draw(draw.Crop(c, c.Max.X-c.Min.X-vg.Points(76), 0, 0, -vg.Points(24)))
	}
	rows := (len(list) + columns - 1) / columns
	grid := make([][]*plot.Plot, rows)
	for k := range rows * columns {
		p := plot.New() // for alignment where there is no panel
		if k < len(list) {
			p = list[k]
		}
		grid[k/columns] = append(grid[k/columns], p)
	}
	tiles := draw.Tiles{Rows: rows, Cols: columns, PadX: vg.Points(10), PadY: vg.Points(8), PadTop: vg.Points(6), PadRight: vg.Points(8), PadBottom: vg.Points(4), PadLeft: vg.Points(4)}
	for r, canvases := range plot.Align(grid, tiles, area) {
		for k, canvas := range canvases {
			if r*columns+k < len(list) {
				grid[r][k].Draw(canvas)
			}
		}
	}
}

// small makes a plot's letters fit a panel.
func small(p *plot.Plot) *plot.Plot {
	p.Title.Text = shorten(p.Title.Text, 30)
	p.Title.TextStyle.Font.Size = vg.Points(10)
	for _, a := range []*plot.Axis{&p.X, &p.Y} {
		a.Label.TextStyle.Font.Size = vg.Points(9)
		a.Tick.Label.Font.Size = vg.Points(8)
	}
	return p
}

// predictions draws the predicted against the actual TTFT.
func (s *summary) predictions(main settingSummary, where string) (*picture, error) {
	const least, shown = 1e-2, 300
	var all []float64
	for _, policy := range main.Policies {
		for _, r := range policy.results {
			for _, q := range r.Predictions {
				all = append(all, max(q.Predicted, least), max(q.Actual, least))
			}
		}
	}
	low, high := around(all)
	var list []*plot.Plot
	for i, policy := range main.Policies {
		p := small(newPlot(policy.Name, "predicted TTFT (s)", "actual TTFT (s)"))
		var points plotter.XYs
		for _, r := range policy.results {
			// Each run's predictions are a uniform sample, and so are its first ones.
			for _, q := range r.Predictions[:min(len(r.Predictions), shown/len(policy.results))] {
				points = append(points, plotter.XY{X: math.Log10(max(q.Predicted, least)), Y: math.Log10(max(q.Actual, least))})
			}
		}
		diagonal, err := plotter.NewLine(plotter.XYs{{X: math.Log10(low), Y: math.Log10(low)}, {X: math.Log10(high), Y: math.Log10(high)}})
		if err != nil {
			return nil, err
		}
		diagonal.Color = color.Gray{0x66}
		p.Add(diagonal)
		if len(points) > 0 {
			dots, err := plotter.NewScatter(points)
			if err != nil {
				return nil, err
			}
			dots.Shape, dots.Radius, dots.Color = draw.CircleGlyph{}, vg.Points(1.3), lineStyle(i).Color
			p.Add(dots)
		}
		logAxis(&p.X, low, high)
		logAxis(&p.Y, low, high)
		list = append(list, p)
	}
	columns := min(len(list), 5)
	rows := (len(list) + columns - 1) / columns
	return s.figure("predicted_vs_actual", "TTFT that the policy's cost expected at dispatch against the actual one, a sample of at most 300 requests a policy; the line is equality, and what is below 10 ms is drawn there ("+where+").",
		float64(190*columns), float64(195*rows), func(c draw.Canvas) { panels(c, list, columns, nil) })
}

// shownLoad is the share of all token-seconds after which the picture ends: a
// few long sessions can leave a fleet nearly idle for most of a run.
const shownLoad = 0.99

// loads draws the load of each instance over time, of the first seed.
func (s *summary) loads(main settingSummary, where string) (*picture, error) {
	var list []*plot.Plot
	most, end := 1.0, 1.0
	for _, policy := range main.Policies {
		p := small(newPlot(policy.Name, "time (s)", "ongoing (k tokens)"))
		if len(policy.results) > 0 {
			series := policy.results[0].OngoingTokens
			for i, means := range series.Means {
				var points plotter.XYs
				for k, v := range means {
					points = append(points, plotter.XY{X: float64(k) * series.BinSeconds, Y: v / 1e3})
					most = max(most, v/1e3)
				}
				if len(points) == 0 {
					continue
				}
				line, err := plotter.NewLine(points)
				if err != nil {
					return nil, err
				}
				line.StepStyle = plotter.PostStep
				line.Color, line.Width = colours()[i%len(colours())], vg.Points(0.9)
				p.Add(line)
			}
			end = max(end, series.Until(shownLoad))
		}
		list = append(list, p)
	}
	for _, p := range list {
		p.X.Min, p.X.Max, p.Y.Min, p.Y.Max = 0, end, 0, most*1.03
	}
	columns := min(len(list), 3)
	rows := (len(list) + columns - 1) / columns
	var names []string
	for i := range min(s.Instances, len(colours())) {
		names = append(names, fmt.Sprintf("instance %d", i))
	}
	return s.figure("load_over_time", "Prompt tokens of unfinished requests on each instance over time, seed 1, until 99 % of all are through ("+where+").",
		float64(290*columns+80), float64(165*rows), func(c draw.Canvas) { panels(c, list, columns, names) })
}

// hotspots draws the TTFT p90 of each instance, worst first.
func (s *summary) hotspots(main settingSummary, where string) (*picture, error) {
	p := newPlot("TTFT p90 of each instance, worst first", "", "TTFT p90 (s)")
	var list []bar
	var ticks []plot.Tick
	var seen []float64
	for i, policy := range main.Policies {
		ranked := make([]float64, s.Instances)
		for _, r := range policy.results {
			values := r.InstanceTTFT(0.9)
			slices.Sort(values)
			slices.Reverse(values)
			for k, v := range values {
				ranked[k] += v / float64(len(policy.results))
			}
		}
		thickness := 0.84 / float64(s.Instances)
		for k, v := range ranked {
			b := bar{at: float64(i) - 0.42 + thickness*(float64(k)+0.5), thickness: thickness * 0.9, value: v, colour: lineStyle(i).Color}
			if k == 0 {
				b.label = plain(policy.mean("hotspot_index"))
			}
			list = append(list, b)
			seen = append(seen, v)
		}
		ticks = append(ticks, plot.Tick{Value: float64(i), Label: shorten(policy.Name, 26)})
	}
	p.Add(bars{list: list})
	p.X.Tick.Marker = plot.ConstantTicks(ticks)
	p.X.Tick.Label.Rotation = math.Pi / 9
	p.X.Tick.Label.XAlign, p.X.Tick.Label.YAlign = text.XRight, text.YTop
	p.X.Min, p.X.Max = -0.6, float64(len(main.Policies))-0.4
	p.Y.Min, p.Y.Max = 0, max(slices.Max(seen)*1.1, 1e-3)
	return s.figure("hotspot", "TTFT p90 of each instance, worst first, means over the seeds by rank; the number is the hotspot index, worst over median ("+where+").", 900, 360,
		func(c draw.Canvas) {
			p.Draw(draw.Crop(c, vg.Points(50), -vg.Points(8), vg.Points(4), -vg.Points(6)))
		})
}
