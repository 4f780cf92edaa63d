package main

import (
	"bytes"
	"cmp"
	"fmt"
	"image/color"
	"math"
	"os"
	"path/filepath"
	"slices"

	"github.com/google/renameio/v2"
	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/plotutil"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"

	"github.com/kvpolicy/kvpolicy"
)

// The extent of the map.
const (
	leastBandwidth, mostBandwidth = 1e6, 1e12 // bytes/s
	leastTokens, mostTokens       = 10.0, 1e6
)

// regimes is the map of both regimes: context length against bandwidth.
type regimes struct {
	model kvpolicy.TransferModel
	rates []float64
}

// boundary is the context, cut to the map, at which the cheaper method changes;
// above tells on which side of it transfer is the cheaper.
func (r regimes) boundary(bandwidth, rate float64) (tokens float64, above bool, err error) {
	regime, tokens, err := kvpolicy.Crossover(r.model, bandwidth, rate)
	if regime == kvpolicy.AlwaysTransfer { // below a crossover at infinity
		return mostTokens, false, err
	}
	return min(max(tokens, leastTokens), mostTokens), regime != kvpolicy.TransferBelow, err
}

// plot draws the map.
func (r regimes) plot() (*plot.Plot, error) {
	p := plot.New()
	p.Title.Text = fmt.Sprintf("Ship the KV cache, or compute it again?\n%s bytes of KV a token, overheads %v s of a transfer, %v s of a recompute",
		thousands(r.model.KVBytesPerToken), r.model.OverheadSeconds, r.model.RecomputeOverheadSeconds)
	p.Title.Padding = vg.Points(10)
	p.X.Label.Text, p.Y.Label.Text = "link bandwidth (bytes/s)", "context (tokens)"
	p.X.Scale, p.Y.Scale = plot.LogScale{}, plot.LogScale{}
	p.X.Tick.Marker, p.Y.Tick.Marker = decades{bytesPerSecond}, decades{thousands}
	p.X.Min, p.X.Max, p.Y.Min, p.Y.Max = leastBandwidth, mostBandwidth, leastTokens, mostTokens
	for _, size := range []*vg.Length{&p.Title.TextStyle.Font.Size, &p.X.Label.TextStyle.Font.Size, &p.Y.Label.TextStyle.Font.Size} {
		*size = vg.Points(13)
	}
	grid := plotter.NewGrid()
	grid.Vertical.Color, grid.Horizontal.Color = color.Gray{Y: 225}, color.Gray{Y: 225}
	p.Add(grid)
	for _, rate := range r.rates {
		if err := r.addRegion(p, rate); err != nil {
			return nil, err
		}
	}
	for i, rate := range r.rates {
		if err := r.addLine(p, rate, plotutil.DarkColors[i%len(plotutil.DarkColors)]); err != nil {
			return nil, err
		}
	}
	if err := r.addLinks(p); err != nil {
		return nil, err
	}
	return p, r.addLabels(p)
}

// edge is the boundary at one prefill rate along the map.
func (r regimes) edge(rate float64) (edge plotter.XYs, above []bool, err error) {
	const steps = 800
	for i := range steps + 1 {
		bandwidth := leastBandwidth * math.Pow(mostBandwidth/leastBandwidth, float64(i)/steps)
		tokens, isAbove, err := r.boundary(bandwidth, rate)
		if err != nil {
			return nil, nil, err
		}
		edge, above = append(edge, plotter.XY{X: bandwidth, Y: tokens}), append(above, isAbove)
	}
	return edge, above, nil
}

// addRegion adds where transfer is the cheaper at one prefill rate. The regions
// overlap: the darker, the more rates.
func (r regimes) addRegion(p *plot.Plot, rate float64) error {
	edge, above, err := r.edge(rate)
	if err != nil {
		return err
	}
	outline, back := make(plotter.XYs, len(edge)), make(plotter.XYs, len(edge))
	for i, at := range edge {
		outline[i], back[i] = at, plotter.XY{X: at.X, Y: leastTokens}
		if above[i] {
			back[i].Y = mostTokens
		}
	}
	slices.Reverse(back)
	region, err := plotter.NewPolygon(append(outline, back...))
	if err != nil {
		return err
	}
	region.Color = color.NRGBA{R: 30, G: 90, B: 160, A: 30}
	region.LineStyle.Width = 0
	p.Add(region)
	return nil
}

// addLine adds the line that bounds the region, and the rate beside it.
func (r regimes) addLine(p *plot.Plot, rate float64, c color.Color) error {
	edge, _, err := r.edge(rate)
	if err != nil {
		return err
	}
	var visible plotter.XYs // without the stretches along the map's own edge
	end := len(edge) - 1
	for i, at := range edge {
		inside := at.Y > leastTokens && at.Y < mostTokens
		if inside || i > 0 && edge[i-1].Y != at.Y || i < end && edge[i+1].Y != at.Y {
			visible = append(visible, at)
		}
	}
	if len(visible) < 2 { // the crossover lies off the map
		return nil
	}
	line, err := plotter.NewLine(visible)
	if err != nil {
		return err
	}
	line.LineStyle = draw.LineStyle{Color: c, Width: vg.Points(2.2)}
	p.Add(line)
	words := "prefill " + thousands(rate) + " tokens/s"
	if last := visible[len(visible)-1]; last.X == edge[end].X {
		return addText(p, last.X, last.Y, words, vg.Point{X: vg.Points(-4), Y: vg.Points(4)}, func(s *text.Style) {
			s.Font.Size, s.Color, s.XAlign = vg.Points(11), c, text.XRight
		})
	}
	// Along the steep part, where the lines are furthest apart.
	const height = 3e4
	at := slices.MinFunc(visible, func(a, b plotter.XY) int {
		return cmp.Compare(math.Abs(math.Log(a.Y/height)), math.Abs(math.Log(b.Y/height)))
	})
	return addText(p, at.X, height, words, vg.Point{X: vg.Points(-4)}, func(s *text.Style) {
		s.Font.Size, s.Color, s.Rotation, s.XAlign = vg.Points(11), c, math.Pi/2, text.XCenter
	})
}

// addLinks adds a dashed line for each link class.
func (r regimes) addLinks(p *plot.Plot) error {
	for _, link := range lineRates() {
		line, err := plotter.NewLine(plotter.XYs{{X: link.Bandwidth, Y: leastTokens}, {X: link.Bandwidth, Y: mostTokens}})
		if err != nil {
			return err
		}
		line.LineStyle = draw.LineStyle{Color: color.Gray{Y: 110}, Width: vg.Points(1), Dashes: []vg.Length{vg.Points(4), vg.Points(3)}}
		p.Add(line)
		if err := addText(p, link.Bandwidth, leastTokens*1.25, link.name, vg.Point{X: vg.Points(4)}, func(s *text.Style) {
			s.Font.Size = vg.Points(11)
		}); err != nil {
			return err
		}
	}
	return nil
}

// The cells that the map is looked at by to find room for a label.
const columns, rows = 48, 40

// cells are those of a region.
type cells [columns][rows]bool

// addLabels writes into the regions where all rates agree, where they are
// widest, which method is the cheaper.
func (r regimes) addLabels(p *plot.Plot) error {
	agrees := map[kvpolicy.Method]*cells{kvpolicy.Transfer: {}, kvpolicy.Recompute: {}}
	crossed := func(column, halfWidth int) bool {
		return slices.ContainsFunc(lineRates(), func(link namedLink) bool {
			at := columns * math.Log(link.Bandwidth/leastBandwidth) / math.Log(mostBandwidth/leastBandwidth)
			return math.Abs(at-0.5-float64(column)) < float64(halfWidth)+0.5
		})
	}
	place := func(column, row float64) (bandwidth, tokens float64) {
		return leastBandwidth * math.Pow(mostBandwidth/leastBandwidth, (column+0.5)/columns),
			leastTokens * math.Pow(mostTokens/leastTokens, (row+0.5)/rows)
	}
	for column := range columns {
		for row := range rows {
			bandwidth, tokens := place(float64(column), float64(row))
			votes := map[kvpolicy.Method]int{}
			for _, rate := range r.rates {
				method, _ := r.model.Cheapest(int64(tokens), bandwidth, rate)
				votes[method]++
			}
			for method, n := range votes {
				agrees[method][column][row] = n == len(r.rates)
			}
		}
	}
	for _, method := range []kvpolicy.Method{kvpolicy.Transfer, kvpolicy.Recompute} {
		words := method.String() + " is cheaper"
		if len(r.rates) > 1 {
			words += "\nat every rate shown"
		}
		const halfWidth, halfHeight = 4, 2 // of the label
		column, row, room := -1, -1, 0
		for c := halfWidth; c < columns-halfWidth; c++ {
			for y := halfHeight; y < rows-halfHeight; y++ {
				n := 2 * margin(agrees[method], c, y, halfWidth, halfHeight)
				if n > 0 && !crossed(c, halfWidth) { // at equal room rather beside the line of a link
					n++
				}
				if n > room {
					column, row, room = c, y, n
				}
			}
		}
		if room == 0 {
			continue
		}
		x, y := place(float64(column), float64(row))
		if err := addText(p, x, y, words, vg.Point{}, func(s *text.Style) {
			s.Font.Size, s.XAlign, s.YAlign = vg.Points(12), text.XCenter, text.YCenter
		}); err != nil {
			return err
		}
	}
	return nil
}

// margin is by how many rows a label's box around a cell can grow up and down
// and still lie within the region; 0 where it does not.
func margin(region *cells, column, row, halfWidth, halfHeight int) int {
	for grown := 0; ; grown++ {
		for c := column - halfWidth; c <= column+halfWidth; c++ {
			for y := row - halfHeight - grown; y <= row+halfHeight+grown; y++ {
				if y < 0 || y >= rows || !region[c][y] {
					return grown
				}
			}
		}
	}
}

func addText(p *plot.Plot, x, y float64, words string, offset vg.Point, change func(*text.Style)) error {
	labels, err := plotter.NewLabels(plotter.XYLabels{XYs: plotter.XYs{{X: x, Y: y}}, Labels: []string{words}})
	if err != nil {
		return err
	}
	labels.TextStyle[0].Color = color.Gray{Y: 60}
	change(&labels.TextStyle[0])
	labels.Offset = offset
	p.Add(labels)
	return nil
}

// decades marks every power of ten, and the lesser digits without a label.
type decades struct{ label func(float64) string }

func (d decades) Ticks(low, high float64) []plot.Tick {
	var ticks []plot.Tick
	for decade := math.Floor(math.Log10(low)); decade <= math.Ceil(math.Log10(high)); decade++ {
		for digit := 1.0; digit <= 9; digit++ {
			value := digit * math.Pow(10, decade)
			if value < low*(1-1e-9) || value > high*(1+1e-9) {
				continue
			}
			tick := plot.Tick{Value: value}
			if digit == 1 {
				tick.Label = d.label(value)
			}
			ticks = append(ticks, tick)
		}
	}
	return ticks
}

// bytesPerSecond writes a bandwidth with its prefix.
func bytesPerSecond(x float64) string {
	for _, unit := range []struct {
		size float64
		name string
	}{{1e12, "TB/s"}, {1e9, "GB/s"}, {1e6, "MB/s"}} {
		if x >= unit.size*(1-1e-9) {
			return fmt.Sprintf("%.0f %s", x/unit.size, unit.name)
		}
	}
	return fmt.Sprintf("%.0f B/s", x)
}

// drawMap writes the map to the directory, as PNG and as SVG.
func drawMap(directory string, model kvpolicy.TransferModel, rates []float64) error {
	p, err := regimes{model, rates}.plot()
	if err != nil {
		return err
	}
	if err := os.MkdirAll(directory, 0o755); err != nil {
		return err
	}
	for _, format := range []string{"png", "svg"} {
		picture, err := p.WriterTo(24*vg.Centimeter, 17*vg.Centimeter, format)
		if err != nil {
			return err
		}
		var data bytes.Buffer
		if _, err := picture.WriteTo(&data); err != nil {
			return err
		}
		// Whole or not at all, whenever it is interrupted.
		if err := renameio.WriteFile(filepath.Join(directory, "crossover."+format), data.Bytes(), 0o644); err != nil {
			return err
		}
	}
	return nil
}
