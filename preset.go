package kvpolicy

import (
	"math"
	"strings"
)

// Unified orders by the unified cost in seconds and keeps sessions at home
// within twice the mean load and twice the best cost. It is the default.
// (Migration-policy note.)
func Unified() Policy {
	return Policy{
		Score:    ScoreCost,
		Cost:     CostModel{DecodeIterationSeconds: 0.05, PrefillRate: 7000},
		Affinity: defaultAffinity(),
		Transfer: defaultTransfer(),
	}
}

// Marginal is Unified with an interference weight of 0.3: a request is also
// charged for the delay that its prefill inflicts on those already there.
// (Ours.)
func Marginal() Policy {
	p := Unified()
	p.Cost.InterferenceWeight = 0.3
	return p
}

// UnifiedNoAffinity is Unified without affinity: always the least cost.
func UnifiedNoAffinity() Policy {
	p := Unified()
	p.Affinity = AffinityGates{}
	return p
}

// LMetric orders by (pending prefill + new tokens) * requests, without
// affinity. (LMetric, arXiv 2603.15202.)
func LMetric() Policy { return scoreOnly(ScoreLMetric) }

// LeastWork orders by the prefill work left, pending + new tokens, without
// affinity; it has no parameter.
func LeastWork() Policy { return scoreOnly(ScoreLeastWork) }

// LeastLoaded orders by the number of requests, without affinity.
func LeastLoaded() Policy { return scoreOnly(ScoreLeastLoaded) }

func scoreOnly(score Score) Policy {
	p := UnifiedNoAffinity()
	p.Score = score
	return p
}

// Hybrid puts Unified's affinity gates around the LMetric score. Since an idle
// instance scores 0 there, it lets go of any home that scores more than 0 as
// soon as some candidate scores 0.
func Hybrid() Policy {
	p := Unified()
	p.Score = ScoreLMetric
	return p
}

// Sticky keeps every session at home while the home is a candidate, whatever
// its load.
func Sticky() Policy {
	p := Unified()
	p.Affinity.OverloadFactor = math.Inf(1)
	return p
}

// UnifiedV2Strict is Unified with PD-separation behind the strict gates (v2.0
// of the elastic-migration-v2 report).
func UnifiedV2Strict() Policy {
	p := Unified()
	p.Separation = relaxedSeparation()
	p.Separation.MinNewTokens = 16000
	p.Separation.MinActiveDecodes = 2
	p.Separation.MinSourceCacheTokens = 8000
	p.Separation.MinExtraCacheTokens = 4000
	return p
}

// UnifiedV2Relaxed is Unified with PD-separation behind the relaxed gates
// (v2.1 of the elastic-migration-v2 report).
func UnifiedV2Relaxed() Policy {
	p := Unified()
	p.Separation = relaxedSeparation()
	return p
}

// HazardAware orders by cost with decode and the expected loss of the node
// counted, contention and affinity left out, and moves running requests before
// their node disappears. (Hazard algorithm note.) Instances must give a decode
// rate, or Cost.DecodeRate.
func HazardAware() Policy {
	p := UnifiedNoAffinity()
	p.Cost.DecodeIterationSeconds = 0
	p.Cost.CountDecode = true
	p.Hazard = defaultHazard()
	p.Migration = defaultMigration()
	return p
}

func defaultAffinity() AffinityGates { return AffinityGates{Enabled: true, OverloadFactor: 2} }

func relaxedSeparation() SeparationGates {
	return SeparationGates{
		Enabled:              true,
		MinNewTokens:         8000,
		MinActiveDecodes:     1,
		MinSourceCacheTokens: 4000,
		MinExtraCacheTokens:  2000,
		InterferenceRate:     8000,
		InterferenceAlpha:    0.3,
	}
}

func defaultTransfer() TransferModel {
	return TransferModel{
		OverheadSeconds:          0.3,
		RecomputeOverheadSeconds: 0.2,
		Bandwidth:                2.7e9,
		KVBytesPerToken:          KVBytesPerToken(48, 4, 128, 2),
	}
}

func defaultHazard() HazardModel {
	return HazardModel{Enabled: true, StallPenaltySeconds: 2, Cells: 16}
}

func defaultMigration() MigrationRule {
	return MigrationRule{Enabled: true, HysteresisSeconds: 2, MaxHops: 3, MinRemainingSeconds: 5}
}

// PresetNames returns the names that Preset knows, in the words of the JSON
// form, with unified, the default, first.
func PresetNames() []string {
	return []string{"unified", "marginal", "unified_no_affinity", "lmetric", "least_work", "hybrid", "sticky",
		"least_loaded", "unified_v2_strict", "unified_v2_relaxed", "hazard_aware"}
}

// Preset returns the preset of that name, one of PresetNames; the empty name
// is unified. An unknown name is a FieldError at "preset".
func Preset(name string) (Policy, error) {
	switch name {
	case "", "unified":
		return Unified(), nil
	case "marginal":
		return Marginal(), nil
	case "unified_no_affinity":
		return UnifiedNoAffinity(), nil
	case "lmetric":
		return LMetric(), nil
	case "least_work":
		return LeastWork(), nil
	case "hybrid":
		return Hybrid(), nil
	case "sticky":
		return Sticky(), nil
	case "least_loaded":
		return LeastLoaded(), nil
	case "unified_v2_strict":
		return UnifiedV2Strict(), nil
	case "unified_v2_relaxed":
		return UnifiedV2Relaxed(), nil
	case "hazard_aware":
		return HazardAware(), nil
	}
	return Policy{}, fieldError("preset", name, "be one of "+strings.Join(PresetNames(), ", "))
}
