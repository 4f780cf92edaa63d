package router

import (
	"context"
	"fmt"
	"io"
	"math"
	"net/http"
	"strconv"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/kvpolicy/kvpolicy/track"
)

// maxScrape bounds the size of a metrics page in bytes.
const maxScrape = 16 << 20

// ParseMetrics reads a vLLM server's /metrics, in the Prometheus text format.
// Where the server runs several engines (data parallelism), requests and blocks
// are those of all of them together and the KV usage is their mean. What is not
// there stays unknown.
func ParseMetrics(from io.Reader) (track.Metrics, error) {
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(from)
	if err != nil {
		return track.Metrics{}, err
	}
	m := track.Metrics{
		Running: sum(families["vllm:num_requests_running"]),
		Waiting: sum(families["vllm:num_requests_waiting"]),
		Counter: sum(families["vllm:prompt_tokens_total"]),
	}
	usage := families["vllm:kv_cache_usage_perc"]
	if usage == nil {
		usage = families["vllm:gpu_cache_usage_perc"] // the name before vLLM 0.10
	}
	if total := sum(usage); total != nil {
		mean := *total / float64(len(usage.Metric))
		m.KVUsage = &mean
	}
	if started := sum(families["process_start_time_seconds"]); started != nil && *started > 0 && *started < 1e12 {
		whole, fraction := math.Modf(*started)
		m.StartedAt = time.Unix(int64(whole), int64(fraction*1e9))
	}
	for _, engine := range families["vllm:cache_config_info"].GetMetric() {
		for _, label := range engine.GetLabel() {
			n, err := strconv.ParseInt(label.GetValue(), 10, 64)
			if err != nil { // "None", before the engine has profiled its memory
				continue
			}
			switch label.GetName() {
			case "block_size":
				m.BlockTokens = n
			case "num_gpu_blocks":
				m.Blocks += n
			}
		}
	}
	return m, nil
}

// sum adds up a family's values; nil where there are none.
func sum(family *dto.MetricFamily) *float64 {
	if family == nil || len(family.Metric) == 0 {
		return nil
	}
	total := 0.0
	for _, m := range family.Metric {
		switch {
		case m.Gauge != nil:
			total += m.Gauge.GetValue()
		case m.Counter != nil:
			total += m.Counter.GetValue()
		case m.Untyped != nil:
			total += m.Untyped.GetValue()
		}
	}
	return &total
}

// scrape asks an instance for its metrics.
func (r *Router) scrape(ctx context.Context, i Instance) (track.Metrics, error) {
	response, err := r.get(ctx, i, "/metrics")
	if err != nil {
		return track.Metrics{}, &silentError{err}
	}
	defer discard(response.Body)
	if response.StatusCode != http.StatusOK {
		err := fmt.Errorf("%s/metrics answered %s", i.URL, response.Status)
		if response.StatusCode >= http.StatusInternalServerError {
			err = &silentError{err}
		}
		return track.Metrics{}, err
	}
	return ParseMetrics(io.LimitReader(response.Body, maxScrape))
}

func (r *Router) get(ctx context.Context, i Instance, path string) (*http.Response, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, i.URL.JoinPath(path).String(), nil)
	if err != nil {
		return nil, err
	}
	return r.config.Client.Do(request)
}

// discard reads what little may be left of a body, so that the connection can
// be used again, and closes it.
func discard(body io.ReadCloser) {
	_, _ = io.CopyN(io.Discard, body, 64<<10)
	_ = body.Close()
}
