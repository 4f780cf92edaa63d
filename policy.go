package kvpolicy

// Policy is what to decide by: a score, the constants of the cost, and the
// parts that are switched on. It is a plain value: copy a preset, assign the
// fields to change, and share the result between goroutines as you like.
// The zero Policy names no score and is an error; start from a preset.
type Policy struct {
	// Seed goes into the hash that breaks ties. Routers that should break them
	// alike share it. Default 0.
	Seed uint64
	// Score is what candidates are ordered by.
	Score Score
	// MaxMetricsAgeSeconds is the greatest age at which metrics count as fresh,
	// inclusive, 0 to 1e12 s. 0, the default, switches the distinction off.
	MaxMetricsAgeSeconds float64
	// Cost holds the constants of the cost.
	Cost CostModel
	// Affinity is the pair of gates that keep a session at its home.
	Affinity AffinityGates
	// Separation is the gate funnel of prefill-decode separation.
	Separation SeparationGates
	// Transfer prices moving KV, for Separation and Migration.
	Transfer TransferModel
	// Hazard prices the loss of a node.
	Hazard HazardModel
	// Migration moves running requests before their node disappears.
	Migration MigrationRule
}

// Score names what candidates are ordered by; the lowest is best.
type Score uint8

const (
	// ScoreCost is the unified cost in seconds, SPEC section 2.
	ScoreCost Score = 1 + iota // cost
	// ScoreLMetric is (pending prefill + new tokens) * requests (LMetric, arXiv
	// 2603.15202). An idle instance scores 0 whatever it caches.
	ScoreLMetric // lmetric
	// ScoreLeastWork is pending prefill + new tokens, without a parameter.
	ScoreLeastWork // least_work
	// ScoreLeastLoaded is the number of requests.
	ScoreLeastLoaded // least_loaded
)

// CostModel holds the constants of the cost of SPEC section 2.
type CostModel struct {
	// DecodeIterationSeconds is what one request more makes each decode step
	// longer, as the contention term counts it, 0 to 1e12 s. Default 0.05, an
	// H20's (migration-policy note); 0 switches contention off.
	DecodeIterationSeconds float64
	// PrefillRate is the prefill throughput in tokens/s of instances that give
	// none, 1e-9 to 1e18 where used. Default 7000, an H20's (migration-policy
	// note). 0 means that every instance must give its own.
	PrefillRate float64
	// PrefillQuadratic is q, the seconds per token squared that attention over
	// the position adds to prefill, 0 to 1. Default 0 (ours).
	PrefillQuadratic float64
	// InterferenceWeight is the share of its prefill that a request is charged
	// for each request it delays, 0 to 1e6. Default 0; 0.3 in Marginal (ours,
	// after the elastic-migration-v2 report's alpha).
	InterferenceWeight float64
	// DecodeRate is the decode speed of one stream in tokens/s of instances
	// that give none, 1e-9 to 1e18 where used. Default 0: every instance must
	// give its own where decode is counted.
	DecodeRate float64
	// CountDecode adds remaining_tokens / decode rate to the cost. Default
	// false.
	CountDecode bool
}

// AffinityGates keep a session on the instance that served its last turn
// unless that is overloaded or too costly. (SPEC section 3; migration-policy
// note.)
type AffinityGates struct {
	// Enabled switches the gates on.
	Enabled bool
	// OverloadFactor is f, at least 1, both times inclusive: the home is kept
	// while its ongoing tokens are at most f times the candidates' mean, and
	// its score is at most f times the best. Default 2; +Inf always keeps it.
	// Where the best score is 0, as LMetric has it on any idle instance, only a
	// home that scores 0 too is kept.
	OverloadFactor float64
}

// SeparationGates decide whether the prefill is done on another instance and
// its KV shipped. The first gate that fails is the reason. (SPEC section 4;
// elastic-migration-v2 report.) The thresholds are inclusive.
type SeparationGates struct {
	// Enabled switches PD-separation on.
	Enabled bool
	// MinNewTokens is the least prefill on the chosen instance worth moving, 0
	// to 1e15 tokens. Strict 16,000, relaxed 8,000.
	MinNewTokens int64
	// MinActiveDecodes is the least number of decodes worth protecting there, 0
	// to 1e9. Strict 2, relaxed 1.
	MinActiveDecodes int64
	// MinSourceCacheTokens is the least prefix that a source must cache, 0 to
	// 1e15 tokens. Strict 8,000, relaxed 4,000.
	MinSourceCacheTokens int64
	// MinExtraCacheTokens is how much more than the chosen instance it must
	// cache, 0 to 1e15 tokens. Strict 4,000, relaxed 2,000.
	MinExtraCacheTokens int64
	// InterferenceRate is the rate at which a prefill slows decodes, in
	// tokens/s, 1e-9 to 1e18. Default 8000 (ours, fitted with the alpha).
	InterferenceRate float64
	// InterferenceAlpha is how much each decode beyond the first adds, 0 to
	// 1e6. Default 0.3 (ours, fitted to the report's five published costs).
	InterferenceAlpha float64
	// MarginSeconds is by how much shipping must beat prefilling locally,
	// strictly, 0 to 1e12 s. Default 0.
	MarginSeconds float64
}

// HazardModel prices the loss of a node: its expected value over the request's
// time there enters the cost of every instance that has a curve. (SPEC
// section 5; hazard algorithm note.)
type HazardModel struct {
	// Enabled switches the hazard model on.
	Enabled bool
	// StallPenaltySeconds is what an unplanned loss costs on top of the
	// recompute, 0 to 1e12 s. Default 2.
	StallPenaltySeconds float64
	// Cells is the number of cells of the sum that approximates the loss
	// integral, 1 to 65536. Default 16, as in the note. 0 asks for the exact
	// value, which never steps at a cell's edge; it takes a third of the time of
	// 16 cells on step and exponential curves, and some five times as long on
	// others.
	Cells int
}

// MigrationRule moves a running request when that removes more expected loss
// than it costs, and only then: see SPEC section 6.3. It needs a hazard model
// and counted decode.
type MigrationRule struct {
	// Enabled switches migration on.
	Enabled bool
	// HysteresisSeconds is h: the risk gain must exceed it, 0 to 1e12 s.
	// Default 2.
	HysteresisSeconds float64
	// MaxSlowdownSeconds is how much later the request may end, exclusive, 0 to
	// 1e12 s. 0, the default, stands for the hysteresis.
	MaxSlowdownSeconds float64
	// MaxHops is how many planned moves a request may make, 0 to 1e6. Default
	// 3; 0 allows none.
	MaxHops int64
	// MinRemainingSeconds is the least decode time left that is worth a move,
	// inclusive, 0 to 1e12 s. Default 5.
	MinRemainingSeconds float64
	// OverlapRounds is how many rounds of copying may overlap with decoding on
	// the source before the request stops, 0 to 64. 0, the default, is
	// stop-and-copy. (SPEC section 6.4; ours.)
	OverlapRounds int
}

// Decide decides on s by the default policy, Unified.
func Decide(s Snapshot) (Decision, error) { return Unified().Decide(s) }

// Decide decides what to do with the request of s: place a new one, keep or
// move a running one, recover one whose instance is gone. The same policy and
// snapshot always give the same decision, whatever the order of the instances.
// It takes time linear in the number of instances, and allocates nothing (beyond
// 12,288 instances, one table).
//
// Invariant: every product that is added is rounded first, so that architectures
// with and without fused multiply-add agree. The loss of a hazard model goes
// through exp and its like, which differ between architectures in their last
// bit: there decisions agree but for ties as close as that.
//
// A policy or snapshot that breaks a bound is a *FieldError, and the Decision
// is then zero. No available or feasible instance is no error but a Reject.
func (p Policy) Decide(s Snapshot) (d Decision, err error) {
	// A Decision and what leads to it are large: they are filled in place, since
	// copying them would take longer than deciding on a small fleet.
	if err = p.decide(&s, &d); err != nil {
		return Decision{}, err
	}
	return d, nil
}

func (p *Policy) decide(s *Snapshot, d *Decision) error {
	q := pricer{policy: p, request: &s.Request, instances: s.Instances}
	if err := q.prepare(); err != nil {
		return err
	}
	if s.Request.RunningOn == "" {
		return q.place(d)
	}
	if source := s.find(s.Request.RunningOn); source >= 0 && !s.Instances[source].Unavailable {
		return q.stayOrMigrate(source, d)
	}
	return q.recover(d)
}

// Validate checks the policy alone. Decide does the same first; call it where
// a policy is read, to find the fault before the first request does.
func (p Policy) Validate() error { return p.validate() }

func (p *Policy) validate() error {
	if !(p.Score >= ScoreCost && p.Score <= ScoreLeastLoaded) {
		return fieldError("score", uint8(p.Score), "be one of the scores, as every preset has it")
	}
	if err := checkSeconds("max_metrics_age_s", p.MaxMetricsAgeSeconds); err != nil {
		return err
	}
	if err := p.Cost.validate(); err != nil {
		return err
	}
	if p.Affinity.Enabled && !(p.Affinity.OverloadFactor >= 1) {
		return fieldError("affinity.overload_factor", p.Affinity.OverloadFactor, "be at least 1")
	}
	if err := p.Transfer.validate(); err != nil {
		return err
	}
	if p.Separation.Enabled {
		if err := p.Separation.validate(); err != nil {
			return err
		}
	}
	if p.Hazard.Enabled {
		if err := checkSeconds("hazard.stall_penalty_s", p.Hazard.StallPenaltySeconds); err != nil {
			return err
		}
		if !(p.Hazard.Cells >= 0 && p.Hazard.Cells <= maxCells) {
			return fieldError("hazard.cells", p.Hazard.Cells, "be 0 (exact) to 65536")
		}
	}
	if p.Migration.Enabled {
		return p.validateMigration()
	}
	return nil
}

func (c *CostModel) validate() error {
	if err := checkSeconds("cost.decode_iteration_s", c.DecodeIterationSeconds); err != nil {
		return err
	}
	if err := checkRate("cost.prefill_rate", c.PrefillRate); err != nil {
		return err
	}
	if !(c.PrefillQuadratic >= 0 && c.PrefillQuadratic <= 1) {
		return fieldError("cost.prefill_quadratic", c.PrefillQuadratic, "be 0 to 1")
	}
	if !(c.InterferenceWeight >= 0 && c.InterferenceWeight <= maxWeight) {
		return fieldError("cost.interference_weight", c.InterferenceWeight, "be 0 to 1e6")
	}
	return checkRate("cost.decode_rate", c.DecodeRate)
}
