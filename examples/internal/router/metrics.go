package router

import (
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvpolicy/kvpolicy"
	"github.com/kvpolicy/kvpolicy/track"
)

// metrics is what the router says of itself. It collects from the tracker, the
// funnel and the accuracy when it is asked.
type metrics struct {
	tracker *track.Tracker

	decisions    *prometheus.CounterVec
	decisionTime prometheus.Histogram
	ends         *prometheus.CounterVec
	retries      *prometheus.CounterVec
	scrapeErrors *prometheus.CounterVec
	promptTokens *prometheus.CounterVec
	cachedTokens *prometheus.CounterVec
	predicted    *prometheus.HistogramVec
	actual       *prometheus.HistogramVec

	mu       sync.Mutex
	funnel   kvpolicy.Funnel
	accuracy kvpolicy.Accuracy
}

var outcomes = [...]string{Answered: "answered", Failed: "failed", Errored: "failed", Abandoned: "abandoned"}

// The descriptions of what is collected when asked.
func describe(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("kvpolicy_"+name, help, labels, nil)
}

// gauges are how things stand with an instance; those that count have names
// that end in total.
var gauges = []struct {
	desc  *prometheus.Desc
	kind  prometheus.ValueType
	value func(s *track.Stats) float64
}{
	{describe("in_flight_requests", "Requests in the ledger.", "instance"), prometheus.GaugeValue, func(s *track.Stats) float64 { return float64(s.InFlight) }},
	{describe("foreign_requests", "Requests that the server had beyond those of the ledger, at the last scrape: the ledger's drift.", "instance"), prometheus.GaugeValue, func(s *track.Stats) float64 { return float64(s.Foreign) }},
	{describe("prefix_blocks", "Blocks in the prefix index.", "instance"), prometheus.GaugeValue, func(s *track.Stats) float64 { return float64(s.PrefixBlocks) }},
	{describe("instance_ready", "1 where the instance takes requests, else 0.", "instance"), prometheus.GaugeValue, func(s *track.Stats) float64 {
		if s.State == track.Ready {
			return 1
		}
		return 0
	}},
	{describe("phantom_requests_total", "Requests dropped from the ledger because the server had none of them.", "instance"), prometheus.CounterValue, func(s *track.Stats) float64 { return float64(s.Phantoms) }},
	{describe("restarts_total", "Times that another process was found behind the instance.", "instance"), prometheus.CounterValue, func(s *track.Stats) float64 { return float64(s.Restarts) }},
	{describe("lost_requests_total", "Requests lost with a process that was replaced.", "instance"), prometheus.CounterValue, func(s *track.Stats) float64 { return float64(s.Lost) }},
}

var (
	funnelDesc = describe("funnel_total", "Decisions by the gate of the PD-separation funnel at which they ended.", "reason")
	biasDesc   = describe("ttft_bias_seconds", "Mean of the observed less the predicted time to the first token.", "reason")
	ratioDesc  = describe("ttft_ratio", "Quantiles of the observed over the predicted time to the first token.", "reason", "quantile")
)

func newMetrics(registerer prometheus.Registerer, tracker *track.Tracker) (*metrics, error) {
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: "kvpolicy", Name: name, Help: help}, labels)
	}
	seconds := prometheus.ExponentialBucketsRange(0.001, 300, 18)
	ttft := func(name, help string) *prometheus.HistogramVec {
		return prometheus.NewHistogramVec(prometheus.HistogramOpts{Namespace: "kvpolicy", Name: name, Help: help, Buckets: seconds}, []string{"reason"})
	}
	m := &metrics{
		tracker:   tracker,
		decisions: counter("decisions_total", "Decisions, by action and reason.", "action", "reason"),
		decisionTime: prometheus.NewHistogram(prometheus.HistogramOpts{Namespace: "kvpolicy", Name: "decision_seconds",
			Help: "Time to take a snapshot, decide on it and count the request.", Buckets: prometheus.ExponentialBucketsRange(1e-6, 0.1, 16)}),
		ends:         counter("attempts_total", "Attempts that ended, by how: answered, failed or abandoned.", "instance", "outcome"),
		retries:      counter("retries_total", "Further attempts at a request, by the instance they went to.", "instance"),
		scrapeErrors: counter("scrape_errors_total", "Scrapes that failed.", "instance"),
		promptTokens: counter("prompt_tokens_total", "Prompt tokens, as the servers counted them.", "instance"),
		cachedTokens: counter("cached_prompt_tokens_total", "Prompt tokens that were cached, as the servers counted them.", "instance"),
		predicted:    ttft("ttft_predicted_seconds", "Time to the first token that decisions predicted, of those that were observed."),
		actual:       ttft("ttft_observed_seconds", "Time from the decision to the first token."),
	}
	if registerer == nil {
		return m, nil
	}
	for _, c := range []prometheus.Collector{m, m.decisions, m.decisionTime, m.ends, m.retries, m.scrapeErrors, m.promptTokens, m.cachedTokens, m.predicted, m.actual} {
		if err := registerer.Register(c); err != nil {
			return nil, err
		}
	}
	return m, nil
}

func (m *metrics) decided(d kvpolicy.Decision, took time.Duration) {
	m.decisions.WithLabelValues(d.Action.String(), d.Reason.String()).Inc()
	m.decisionTime.Observe(took.Seconds())
	m.mu.Lock()
	defer m.mu.Unlock()
	m.funnel.Add(d)
}

func (m *metrics) observed(d kvpolicy.Decision, took time.Duration) {
	predicted, ok := d.PredictedSeconds()
	if !ok {
		return
	}
	m.predicted.WithLabelValues(d.Reason.String()).Observe(predicted)
	m.actual.WithLabelValues(d.Reason.String()).Observe(took.Seconds())
	m.mu.Lock()
	defer m.mu.Unlock()
	_ = m.accuracy.Add(d, max(0, took.Seconds())) // d predicts
}

func (m *metrics) ended(instance string, how Outcome) {
	m.ends.WithLabelValues(instance, outcomes[how]).Inc()
}

func (m *metrics) cached(instance string, u Usage) {
	m.promptTokens.WithLabelValues(instance).Add(float64(u.PromptTokens))
	m.cachedTokens.WithLabelValues(instance).Add(float64(max(0, u.Details.CachedTokens)))
}

// forget drops the series of an instance that has left.
func (m *metrics) forget(instance string) {
	for _, v := range []*prometheus.CounterVec{m.ends, m.retries, m.scrapeErrors, m.promptTokens, m.cachedTokens} {
		v.DeletePartialMatch(prometheus.Labels{"instance": instance})
	}
}

// Describe is part of prometheus.Collector.
func (m *metrics) Describe(to chan<- *prometheus.Desc) {
	for _, g := range gauges {
		to <- g.desc
	}
	to <- funnelDesc
	to <- biasDesc
	to <- ratioDesc
}

// Collect is part of prometheus.Collector.
func (m *metrics) Collect(to chan<- prometheus.Metric) {
	for _, s := range m.tracker.Stats(nil) {
		for _, g := range gauges {
			to <- prometheus.MustNewConstMetric(g.desc, g.kind, g.value(&s), s.ID)
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for reason, count := range m.funnel.All() {
		if reason >= kvpolicy.NewLocalBelowThreshold && reason <= kvpolicy.Triggered {
			to <- prometheus.MustNewConstMetric(funnelDesc, prometheus.CounterValue, float64(count), reason.String())
		}
	}
	for reason := range m.funnel.All() {
		report := m.accuracy.Report(reason)
		if report.Decisions == 0 {
			continue
		}
		to <- prometheus.MustNewConstMetric(biasDesc, prometheus.GaugeValue, report.BiasSeconds, reason.String())
		for _, q := range []struct {
			name  string
			value float64
		}{{"0.5", report.Ratios.P50}, {"0.9", report.Ratios.P90}, {"0.99", report.Ratios.P99}} {
			to <- prometheus.MustNewConstMetric(ratioDesc, prometheus.GaugeValue, q.value, reason.String(), q.name)
		}
	}
}

// Funnel is the number of decisions by reason so far.
func (r *Router) Funnel() kvpolicy.Funnel {
	r.metrics.mu.Lock()
	defer r.metrics.mu.Unlock()
	return r.metrics.funnel
}

// Accuracy is how well the time to the first token was predicted so far.
func (r *Router) Accuracy() *kvpolicy.Accuracy {
	r.metrics.mu.Lock()
	defer r.metrics.mu.Unlock()
	all := new(kvpolicy.Accuracy)
	all.Merge(&r.metrics.accuracy)
	return all
}
