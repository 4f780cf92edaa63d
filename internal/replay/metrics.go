package replay

import (
	"github.com/kvpolicy/kvpolicy/internal/stats"
	"github.com/kvpolicy/kvpolicy/internal/workload"
)

// Metric is one figure of a run.
type Metric struct {
	// Name is its name in JSON and CSV; it ends with the unit unless it is a
	// count or a share.
	Name string
	// Meaning says what it is in a line.
	Meaning string
	// Of takes it from a run of which the ceiling is known; false where the run
	// has none, as a ratio to nothing.
	Of func(r *Result, ceiling workload.Ceiling) (float64, bool)
}

// Metrics lists every figure, in the order of the tables.
func Metrics() []Metric {
	list := []Metric{}
	for _, d := range []struct {
		name, meaning string
		of            func(r *Result) *stats.Sketch
	}{
		{"ttft", "time from arrival to the first token", func(r *Result) *stats.Sketch { return &r.TTFT }},
		{"tpot", "mean time between a request's tokens", func(r *Result) *stats.Sketch { return &r.TPOT }},
		{"e2e", "time from arrival to the last token", func(r *Result) *stats.Sketch { return &r.E2E }},
	} {
		list = append(list,
			Metric{d.name + "_mean_s", d.meaning + ", mean", func(r *Result, _ workload.Ceiling) (float64, bool) {
				return d.of(r).Mean(), d.of(r).Count() > 0
			}})
		for _, q := range []struct {
			name string
			p    float64
		}{{"p50", 0.5}, {"p90", 0.9}, {"p99", 0.99}} {
			list = append(list,
				Metric{d.name + "_" + q.name + "_s", d.meaning + ", " + q.name, func(r *Result, _ workload.Ceiling) (float64, bool) {
					return d.of(r).Quantile(q.p), d.of(r).Count() > 0
				}})
		}
	}
	return append(list,
		Metric{"goodput", "share of the requests that met both objectives", func(r *Result, _ workload.Ceiling) (float64, bool) {
			return ratio(float64(r.Good), float64(r.Requests))
		}},
		Metric{"goodput_rps", "requests that met both objectives, a second of the whole run", func(r *Result, _ workload.Ceiling) (float64, bool) {
			return ratio(float64(r.Good), r.EndSeconds)
		}},
		Metric{"cached_share", "share of the prompt tokens that were found cached", func(r *Result, _ workload.Ceiling) (float64, bool) {
			return ratio(float64(r.CachedTokens), float64(r.InputTokens))
		}},
		Metric{"cached_ceiling", "that share on one instance with an endless cache", func(_ *Result, c workload.Ceiling) (float64, bool) {
			return c.Share(), true
		}},
		Metric{"index_error_share", "distance between expected and found cached tokens, over the prompt tokens", func(r *Result, _ workload.Ceiling) (float64, bool) {
			return ratio(float64(r.IndexErrorTokens), float64(r.InputTokens))
		}},
		Metric{"requests_max_min", "requests of the busiest instance over those of the least busy", func(r *Result, _ workload.Ceiling) (float64, bool) {
			values := make([]float64, len(r.Instances))
			for i := range r.Instances {
				values[i] = float64(r.Instances[i].Requests)
			}
			return maxMin(values)
		}},
		Metric{"ongoing_max_min", "mean prompt tokens of unfinished requests, the greatest instance's over the least one's", func(r *Result, _ workload.Ceiling) (float64, bool) {
			return maxMin(r.OngoingTokens.Overall)
		}},
		Metric{"hotspot_index", "TTFT p90 of the worst instance over that of the median one", func(r *Result, _ workload.Ceiling) (float64, bool) {
			index, err := stats.HotspotIndex(r.InstanceTTFT(0.9))
			return index, err == nil
		}},
		Metric{"ttft_actual_over_predicted_p50", "actual over predicted TTFT, median", func(r *Result, _ workload.Ceiling) (float64, bool) {
			return r.PredictionRatio.Quantile(0.5), r.PredictionRatio.Count() > 0
		}},
		Metric{"ttft_actual_over_predicted_p90", "actual over predicted TTFT, p90", func(r *Result, _ workload.Ceiling) (float64, bool) {
			return r.PredictionRatio.Quantile(0.9), r.PredictionRatio.Count() > 0
		}},
		Metric{"triggered", "prefills done on another instance", func(r *Result, _ workload.Ceiling) (float64, bool) {
			return float64(r.Triggered()), true
		}},
		Metric{"triggered_actual_over_predicted_p50", "actual TTFT over cost_migrate of prefills done on another instance, median", func(r *Result, _ workload.Ceiling) (float64, bool) {
			return r.SeparatedRatio.Quantile(0.5), r.SeparatedRatio.Count() > 0
		}},
		Metric{"triggered_transfer_share", "share of the TTFT of prefills done on another instance in which KV was on its way", func(r *Result, _ workload.Ceiling) (float64, bool) {
			return ratio(r.TransferSeconds, r.SeparatedTTFTSeconds)
		}},
		Metric{"preemptions", "times that a request lost its KV cache to others", func(r *Result, _ workload.Ceiling) (float64, bool) {
			return float64(r.Preemptions), true
		}},
		Metric{"end_s", "when the last request was through", func(r *Result, _ workload.Ceiling) (float64, bool) {
			return r.EndSeconds, true
		}},
		Metric{"requests", "requests sent", func(r *Result, _ workload.Ceiling) (float64, bool) {
			return float64(r.Requests), true
		}},
		Metric{"lost", "requests sent and not served to the end", func(r *Result, _ workload.Ceiling) (float64, bool) {
			return float64(r.Lost()), true
		}},
	)
}

// InstanceTTFT is the p-quantile of the TTFT of each instance that served a
// request, in seconds.
func (r *Result) InstanceTTFT(p float64) []float64 {
	var values []float64
	for i := range r.Instances {
		if s := &r.Instances[i].TTFT; s.Count() > 0 {
			values = append(values, s.Quantile(p))
		}
	}
	return values
}

func ratio(of, to float64) (float64, bool) {
	if !(to > 0) {
		return 0, false
	}
	return of / to, true
}

func maxMin(values []float64) (float64, bool) {
	least, most := values[0], values[0]
	for _, v := range values {
		least, most = min(least, v), max(most, v)
	}
	return ratio(most, least)
}
