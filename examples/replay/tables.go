package main

import (
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/kvpolicy/kvpolicy/internal/replay"
	"github.com/kvpolicy/kvpolicy/internal/stats"
)

// tableSpec is a table before it is text or HTML. A cell may have several lines.
type tableSpec struct {
	Title string
	Notes []string
	Head  []string
	Rows  [][]string
}

// column is one figure of a table.
type column struct {
	head, metric string
	format       func(float64) string
}

func seconds(v float64) string      { return significant(v, 3) }
func milliseconds(v float64) string { return significant(v*1e3, 3) }
func percent(v float64) string      { return significant(v*100, 3) }
func plain(v float64) string        { return significant(v, 3) }
func whole(v float64) string        { return strconv.FormatFloat(v, 'f', 0, 64) }

// significant is v with so many significant digits, without an exponent.
func significant(v float64, digits int) string {
	if v == 0 || math.IsNaN(v) {
		return map[bool]string{true: "0", false: "–"}[v == 0]
	}
	decimals := digits - 1 - int(math.Floor(math.Log10(math.Abs(v))))
	return strconv.FormatFloat(v, 'f', max(0, min(decimals, 9)), 64)
}

// count is a mean of counts: one below 10 that is no whole number keeps two
// digits, so that few are not none.
func count(v float64) string {
	switch {
	case math.IsNaN(v):
		return "–"
	case v < 10 && v != math.Trunc(v):
		return significant(v, 2)
	}
	return whole(v)
}

// latencyColumns, fleetColumns and comparedColumns are those of the tables.
func latencyColumns() []column {
	var list []column
	for _, d := range []struct {
		head, metric string
		format       func(float64) string
	}{{"TTFT s", "ttft", seconds}, {"TPOT ms", "tpot", milliseconds}, {"E2E s", "e2e", seconds}} {
		for k, q := range []string{"mean", "p50", "p90", "p99"} {
			head := q
			if k == 0 {
				head = d.head + "\nmean"
			} else {
				head = "\n" + q
			}
			list = append(list, column{head, d.metric + "_" + q + "_s", d.format})
		}
	}
	return list
}

func fleetColumns() []column {
	return []column{
		{"goodput\n%", "goodput", percent},
		{"cached\n%", "cached_share", percent},
		{"ceiling\n%", "cached_ceiling", percent},
		{"index\nerror %", "index_error_share", percent},
		{"requests\nmax/min", "requests_max_min", plain},
		{"ongoing\nmax/min", "ongoing_max_min", plain},
		{"hotspot\nindex", "hotspot_index", plain},
		{"TTFT act/pred\np50", "ttft_actual_over_predicted_p50", plain},
		{"\np90", "ttft_actual_over_predicted_p90", plain},
		{"pre-\nempted", "preemptions", count},
		{"pre-\nfilled\nelsewhere", "triggered", plain},
		{"lost", "lost", count},
	}
}

func comparedColumns() []column {
	return []column{
		{"TTFT mean\ns", "ttft_mean_s", seconds},
		{"TTFT p90\ns", "ttft_p90_s", seconds},
		{"TPOT p90\nms", "tpot_p90_s", milliseconds},
		{"E2E mean\ns", "e2e_mean_s", seconds},
		{"E2E p90\ns", "e2e_p90_s", seconds},
		{"goodput\n%", "goodput", percent},
	}
}

// allTables are the tables of the summary.
func (s *summary) allTables() []tableSpec {
	var list []tableSpec
	for _, setting := range s.main() {
		where := fmt.Sprintf("%s, load %g", setting.Pacing, setting.Load)
		list = append(list,
			s.figures("Latency ("+where+")", setting, latencyColumns(),
				fmt.Sprintf("Means over %d seeds of each run's figure.", s.Seeds)+s.partly()),
			s.figures("Cache, balance and prediction ("+where+")", setting, fleetColumns(),
				fmt.Sprintf("Goodput: TTFT at most %g s and TPOT at most %g ms. Ceiling: one instance with an endless cache. Index error: distance between the cached tokens that the router expected and those found.", s.Objectives.TTFT, s.Objectives.TPOT*1e3),
				"Ongoing: mean prompt tokens of unfinished requests. Hotspot index: TTFT p90 of the worst instance over the median one's. act/pred: actual TTFT over contention + queue + prefill of the policy's cost.",
			))
		if len(s.rows) > 1 {
			list = append(list, s.compared(where, setting))
		}
		if len(setting.separating()) > 0 {
			list = append(list, s.funnel(where, setting))
		}
	}
	if len(s.Settings) > len(s.main()) {
		list = append(list, s.sweep())
	}
	return list
}

// label is a row's name, and how many of its seeds are complete where not all
// but some are: its means are of other arrivals then than those of other rows.
func (s *summary) label(p policySummary) string {
	if p.Runs == 0 || p.Runs == s.Seeds {
		return p.Name
	}
	return fmt.Sprintf("%s (%d of %d)", p.Name, p.Runs, s.Seeds)
}

// partly explains the labels where the replay was interrupted.
func (s *summary) partly() string {
	if s.Complete {
		return ""
	}
	return " Policies with seeds missing say so: their figures are of fewer arrivals, and compare with the baseline's over those alone."
}

func (s *summary) figures(title string, setting settingSummary, columns []column, notes ...string) tableSpec {
	t := tableSpec{Title: title, Notes: notes, Head: []string{"policy"}}
	for _, c := range columns {
		t.Head = append(t.Head, c.head)
	}
	for _, p := range setting.Policies {
		cells := []string{s.label(p)}
		for _, c := range columns {
			cells = append(cells, c.format(p.mean(c.metric)))
		}
		t.Rows = append(t.Rows, cells)
	}
	return t
}

func (s *summary) compared(where string, setting settingSummary) tableSpec {
	columns := comparedColumns()
	t := tableSpec{
		Title: fmt.Sprintf("Against %s, paired (%s)", s.Baseline, where),
		Notes: []string{fmt.Sprintf("Change of the mean over %d paired seeds; in brackets the difference with its 95 %% bootstrap interval, in the column's unit. \"No difference shown\": the interval holds zero.", s.Seeds) + s.few() + s.partly()},
		Head:  []string{"policy"},
	}
	for _, c := range columns {
		t.Head = append(t.Head, c.head)
	}
	for i, p := range setting.Policies {
		if s.rows[i].name == s.Baseline {
			continue
		}
		cells := []string{s.label(p)}
		for _, c := range columns {
			cells = append(cells, comparison(p.Metrics[c.metric].AgainstBaseline, c.format))
		}
		t.Rows = append(t.Rows, cells)
	}
	return t
}

// few says what too few seeds cannot show.
func (s *summary) few() string {
	if s.Seeds >= 5 {
		return ""
	}
	return " Fewer than 5 seeds carry no verdict: the interval is the least and the greatest difference."
}

// comparison is a cell: what the verdict is, and the difference's interval.
func comparison(c *stats.Comparison, format func(float64) string) string {
	if c == nil {
		return "–"
	}
	change := ""
	if c.Ratio != (stats.Estimate{}) {
		change = fmt.Sprintf(" %+.1f %%", (c.Ratio.Value-1)*100)
	}
	interval := fmt.Sprintf("[%s, %s]", signed(c.Difference.Low, format), signed(c.Difference.High, format))
	switch c.Verdict {
	case stats.TooFewPairs:
		if c.Pairs == 1 {
			return strings.TrimSpace(change) + "\none pair, no interval"
		}
		return strings.TrimSpace(change) + "\n" + interval
	case stats.NoDifferenceShown:
		return "no difference shown\n" + interval
	}
	return c.Verdict.String() + change + "\n" + interval
}

func signed(v float64, format func(float64) string) string {
	if v > 0 {
		return "+" + format(v)
	}
	return format(v)
}

func (s *summary) funnel(where string, setting settingSummary) tableSpec {
	t := tableSpec{
		Title: "Who fell through which gate of PD-separation (" + where + ")",
		Notes: []string{"Requests of all seeds, and their share."},
		Head:  []string{"gate"},
	}
	separating := setting.separating()
	for _, p := range separating {
		t.Head = append(t.Head, s.label(p))
	}
	for _, gate := range gates() {
		word := gate.String()
		cells := []string{word}
		for _, p := range separating {
			var all int64
			for _, n := range p.Funnel {
				all += n
			}
			cells = append(cells, fmt.Sprintf("%d (%s %%)", p.Funnel[word], percent(float64(p.Funnel[word])/float64(max(all, 1)))))
		}
		t.Rows = append(t.Rows, cells)
	}
	last := []string{"actual TTFT over cost_migrate of the triggered, median"}
	transfer := []string{"part of their TTFT in which KV was on its way"}
	for _, p := range separating {
		ratio := math.NaN()
		if moved := p.merged(func(r *replay.Result) *stats.Sketch { return &r.SeparatedRatio }); moved.Count() > 0 {
			ratio = moved.Quantile(0.5)
		}
		last = append(last, plain(ratio))
		var moving, all float64
		for _, r := range p.results {
			moving += r.TransferSeconds
			all += r.SeparatedTTFTSeconds
		}
		transfer = append(transfer, percent(moving/all)+" %")
	}
	t.Rows = append(t.Rows, last, transfer)
	return t
}

// saturatedBelow is the part of the goodput at the least load below which a
// load counts as saturating.
const saturatedBelow = 0.9

func (s *summary) sweep() tableSpec {
	t := tableSpec{
		Title: "By offered load",
		Notes: []string{fmt.Sprintf("TTFT p90 s / E2E p90 s / goodput %%. Saturated from: the least load of the sweep at which the goodput is below %g of that at the least load.", saturatedBelow)},
		Head:  []string{"policy"},
	}
	for i := range s.rows {
		t.Rows = append(t.Rows, []string{s.rows[i].name})
	}
	for _, pacing := range s.byLoad() {
		for _, setting := range pacing {
			t.Head = append(t.Head, fmt.Sprintf("load %g\n%s", setting.Load, setting.Pacing))
		}
		t.Head = append(t.Head, "saturated\nfrom")
		for i := range s.rows {
			from := "–"
			for k := len(pacing) - 1; k >= 0; k-- {
				if pacing[k].Policies[i].mean("goodput") < saturatedBelow*pacing[0].Policies[i].mean("goodput") {
					from = fmt.Sprint(pacing[k].Load)
				}
			}
			for _, setting := range pacing {
				p := setting.Policies[i]
				t.Rows[i] = append(t.Rows[i], seconds(p.mean("ttft_p90_s"))+" / "+seconds(p.mean("e2e_p90_s"))+" / "+percent(p.mean("goodput"))+strings.TrimPrefix(s.label(p), p.Name))
			}
			t.Rows[i] = append(t.Rows[i], from)
		}
	}
	return t
}
