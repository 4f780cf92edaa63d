package kvpolicy_test

import (
	"fmt"
	"math"

	"github.com/kvpolicy/kvpolicy"
	"gonum.org/v1/gonum/stat/distuv"
	"pgregory.net/rapid"
)

// situation is one drawn input of Decide, and what the oracle must know beside
// it: the survival of the curves, by name, in a form that shares no code with
// the package.
type situation struct {
	policy   kvpolicy.Policy
	snapshot kvpolicy.Snapshot
	survival map[string]survival
}

// shape says which situations to draw.
type shape struct {
	presets   []string // to start from; all of them where it is empty
	running   bool     // the request runs on an instance that is available
	placing   bool     // the request is new
	noHazard  bool     // no curve, no hazard model, no migration
	untouched bool     // the preset as it is
	extreme   bool     // now and then numbers at the bounds of what is legal
	instances int      // at most, 8 where it is 0
	written   bool     // only curves that have a JSON form
}

// oneIn is true once in n draws, and shrinks to false.
func oneIn(t *rapid.T, n int, label string) bool {
	return rapid.IntRange(1, n).Draw(t, label) == n
}

// drawTokens favours zero, the thresholds of the PD-separation gates and their
// neighbours.
func drawTokens(t *rapid.T, extreme bool, label string) int64 {
	choices := []*rapid.Generator[int64]{
		rapid.SampledFrom([]int64{0, 0, 1, 100, 1999, 2000, 2001, 3999, 4000, 4001, 7999, 8000, 8001, 15999, 16000, 16001, 20000, 40000}),
		rapid.Int64Range(0, 60000),
	}
	if extreme {
		choices = append(choices, rapid.SampledFrom([]int64{1e9, 1e12, 1e15 - 1, 1e15}))
	}
	return rapid.OneOf(choices...).Draw(t, label)
}

func drawCount(t *rapid.T, extreme bool, label string) int64 {
	choices := []*rapid.Generator[int64]{rapid.Int64Range(0, 3), rapid.Int64Range(0, 60)}
	if extreme {
		choices = append(choices, rapid.SampledFrom([]int64{1e6, 1e9 - 1, 1e9}))
	}
	return rapid.OneOf(choices...).Draw(t, label)
}

// drawSeconds draws a time from 0 to most; the extremes reach both ends of
// what floating point and the bounds allow.
func drawSeconds(t *rapid.T, most float64, extreme bool, label string) float64 {
	choices := []*rapid.Generator[float64]{
		rapid.SampledFrom([]float64{0, 0, 0.125, most / 4, most / 2, most}),
		rapid.Float64Range(0, most),
	}
	if extreme {
		choices = append(choices, rapid.SampledFrom([]float64{math.SmallestNonzeroFloat64, 1e-300, 1e-9, 1e9, 1e12}))
	}
	return rapid.OneOf(choices...).Draw(t, label)
}

// drawRate draws a rate near the given typical one, 0 for the policy's.
func drawRate(t *rapid.T, typical float64, extreme bool, label string) float64 {
	choices := []*rapid.Generator[float64]{
		rapid.SampledFrom([]float64{0, 0, 0, typical, typical / 2, typical * 4}),
		rapid.Float64Range(typical/10, typical*10),
	}
	if extreme {
		choices = append(choices, rapid.SampledFrom([]float64{1e-9, 1e18}))
	}
	return rapid.OneOf(choices...).Draw(t, label)
}

// drawCapacity draws 0 for unknown, or a pool that holds need to the token,
// misses it by one, or is ample.
func drawCapacity(t *rapid.T, need int64, label string) int64 {
	return min(rapid.OneOf(
		rapid.Just(int64(0)),
		rapid.SampledFrom([]int64{max(need-1, 1), max(need, 1), need + 1}),
		rapid.Int64Range(1, 500000),
	).Draw(t, label), 1e15)
}

// drawCurve draws a curve of each kind, one that never fails (nil) among them,
// that fails soon, later or hardly ever, and its survival for the oracle.
func drawCurve(t *rapid.T, sh shape, label string) (kvpolicy.Curve, survival) {
	kinds := 4
	if sh.written {
		kinds = 3
	}
	switch rapid.IntRange(0, kinds).Draw(t, label+" kind") {
	case 1:
		rate := rapid.SampledFrom([]float64{1e-6, 1e-4, 1e-3, 1e-2, 0.05}).Draw(t, label+" rate")
		return distuv.Exponential{Rate: rate}, exponentialSurvival(rate)
	case 2:
		shape := rapid.SampledFrom([]float64{0.6, 1, 1.5, 3, 6}).Draw(t, label+" shape")
		scale := rapid.SampledFrom([]float64{60, 600, 1200, 28800}).Draw(t, label+" scale")
		return distuv.Weibull{K: shape, Lambda: scale}, weibullSurvival(shape, scale)
	case 3:
		durations, observed := drawSessions(t, label+" sessions")
		curve, err := kvpolicy.NewKaplanMeier(durations, observed)
		if err != nil {
			t.Fatalf("Kaplan-Meier: %v", err)
		}
		return curve, kaplanMeierSurvival(durations, observed)
	case 4:
		rate := rapid.SampledFrom([]float64{1e-3, 1e-2}).Draw(t, label+" foreign rate")
		return foreign{rate}, exponentialSurvival(rate)
	}
	return nil, survival{}
}

// foreign is a curve of a type that the package does not know.
type foreign struct{ rate float64 }

func (f foreign) Survival(t float64) float64 { return math.Exp(-f.rate * t) }

// drawSessions draws what a Kaplan-Meier estimate is made of: ties, sessions of
// no length, all censored and none at all among them.
func drawSessions(t *rapid.T, label string) (durations []float64, observed []bool) {
	for range rapid.SampledFrom([]int{3, 0, 1, 2, 8, 30}).Draw(t, label) {
		d := rapid.Float64Range(1, 3000).Draw(t, "duration")
		switch n := len(durations); {
		case n > 0 && oneIn(t, 4, "tie"):
			d = durations[n-1]
		case oneIn(t, 20, "none"):
			d = 0
		}
		durations = append(durations, d)
		observed = append(observed, rapid.SampledFrom([]bool{true, true, false}).Draw(t, "observed"))
	}
	return durations, observed
}

func drawInstance(t *rapid.T, id string, r *kvpolicy.Request, extreme bool) kvpolicy.Instance {
	i := kvpolicy.Instance{
		ID:                   id,
		Requests:             drawCount(t, extreme, "requests"),
		PendingPrefillTokens: drawTokens(t, extreme, "pending"),
		OngoingTokens:        drawTokens(t, extreme, "ongoing"),
		ActiveDecodes:        drawCount(t, extreme, "decodes"),
		WaitSeconds:          drawSeconds(t, 20, extreme, "wait"),
		PrefillRate:          drawRate(t, 7000, extreme, "prefill rate"),
		DecodeRate:           drawRate(t, 40, extreme, "decode rate"),
		Bandwidth:            drawRate(t, 2.7e9, extreme, "bandwidth"),
		KVUsedTokens:         drawTokens(t, extreme, "used"),
		UptimeSeconds:        drawSeconds(t, 2000, false, "uptime"),
		Unavailable:          oneIn(t, 8, "unavailable"),
		MetricsAgeSeconds:    rapid.SampledFrom([]float64{0, 0, 4, 5, 6, 60}).Draw(t, "metrics age"),
	}
	i.CachedTokens = rapid.OneOf(
		rapid.SampledFrom([]int64{0, r.ContextTokens, min(r.ContextTokens+1, 1e15), max(0, r.ContextTokens-8000), max(0, r.ContextTokens-1)}),
		rapid.Just(drawTokens(t, extreme, "cached")),
	).Draw(t, "cached kind")
	uncached := max(0, r.ContextTokens-i.CachedTokens)
	i.KVCapacityTokens = rapid.OneOf(
		rapid.Just(int64(0)),
		rapid.Just(drawCapacity(t, i.KVUsedTokens+uncached+r.RemainingTokens, "capacity by what is free")),
		rapid.Just(drawCapacity(t, r.ContextTokens+r.RemainingTokens, "capacity by the whole")),
	).Draw(t, "capacity kind")
	return i
}

// drawPolicy draws a preset with some of its numbers overridden. Policy rates
// are always given, so that an instance may leave its own out.
func drawPolicy(t *rapid.T, sh shape) kvpolicy.Policy {
	names := sh.presets
	if len(names) == 0 {
		names = kvpolicy.PresetNames()
	}
	p, err := kvpolicy.Preset(rapid.SampledFrom(names).Draw(t, "preset"))
	if err != nil {
		t.Fatalf("preset: %v", err)
	}
	p.Cost.DecodeRate = 40
	if sh.noHazard {
		p.Hazard.Enabled, p.Migration.Enabled = false, false
	}
	if sh.untouched {
		return p
	}
	extreme := sh.extreme && oneIn(t, 6, "extreme policy")
	p.Seed = rapid.Uint64().Draw(t, "seed")
	p.MaxMetricsAgeSeconds = rapid.SampledFrom([]float64{0, 0, 5}).Draw(t, "max metrics age")
	if oneIn(t, 3, "cost drawn") {
		p.Cost.DecodeIterationSeconds = drawSeconds(t, 0.5, extreme, "decode iteration")
		p.Cost.PrefillQuadratic = rapid.SampledFrom([]float64{0, 2.711e-9, 1e-6}).Draw(t, "quadratic")
		p.Cost.InterferenceWeight = rapid.SampledFrom([]float64{0, 0.3, 1}).Draw(t, "interference weight")
		if extreme {
			p.Cost.PrefillQuadratic = rapid.SampledFrom([]float64{0, 1e-300, 1}).Draw(t, "extreme quadratic")
			p.Cost.InterferenceWeight = rapid.SampledFrom([]float64{0, 1e6}).Draw(t, "extreme weight")
		}
	}
	if !p.Migration.Enabled {
		p.Cost.CountDecode = rapid.Bool().Draw(t, "count decode")
	}
	if oneIn(t, 3, "affinity drawn") {
		p.Affinity = kvpolicy.AffinityGates{
			Enabled:        true,
			OverloadFactor: rapid.SampledFrom([]float64{1, 1.1, 1.5, 2, 3, 1e300, math.Inf(1)}).Draw(t, "overload factor"),
		}
	}
	if oneIn(t, 3, "pdsep drawn") {
		p.Separation = drawSeparation(t, extreme)
	}
	if oneIn(t, 3, "transfer drawn") {
		p.Transfer = kvpolicy.TransferModel{
			OverheadSeconds:          drawSeconds(t, 2, extreme, "overhead"),
			RecomputeOverheadSeconds: drawSeconds(t, 2, extreme, "recompute overhead"),
			Bandwidth:                rapid.SampledFrom([]float64{4e6, 1.25e9, 2.7e9, 2.5e10}).Draw(t, "link"),
			KVBytesPerToken:          rapid.SampledFrom([]float64{0, 98304, 131072}).Draw(t, "kv bytes"),
		}
	}
	if p.Hazard.Enabled && oneIn(t, 2, "hazard drawn") {
		p.Hazard.StallPenaltySeconds = rapid.SampledFrom([]float64{2, 0, 30, 200}).Draw(t, "stall penalty")
		p.Hazard.Cells = rapid.SampledFrom([]int{0, 1, 16, 40}).Draw(t, "cells")
	}
	if p.Migration.Enabled {
		p.Migration.HysteresisSeconds = rapid.SampledFrom([]float64{0, 0.1, 2, 20}).Draw(t, "hysteresis")
		p.Migration.MaxSlowdownSeconds = rapid.SampledFrom([]float64{0, 0, 1, 30}).Draw(t, "max slowdown")
		p.Migration.MaxHops = rapid.SampledFrom([]int64{3, 3, 3, 3, 3, 3, 0, 1}).Draw(t, "max hops")
		p.Migration.MinRemainingSeconds = rapid.SampledFrom([]float64{0, 5, 5}).Draw(t, "min remaining")
		p.Migration.OverlapRounds = rapid.SampledFrom([]int{0, 0, 1, 4, 64}).Draw(t, "overlap rounds")
	}
	return p
}

func drawSeparation(t *rapid.T, extreme bool) kvpolicy.SeparationGates {
	return kvpolicy.SeparationGates{
		Enabled:              true,
		MinNewTokens:         rapid.SampledFrom([]int64{0, 1, 8000, 16000}).Draw(t, "min new"),
		MinActiveDecodes:     rapid.SampledFrom([]int64{0, 1, 2}).Draw(t, "min decodes"),
		MinSourceCacheTokens: rapid.SampledFrom([]int64{0, 4000, 8000}).Draw(t, "min source cache"),
		MinExtraCacheTokens:  rapid.SampledFrom([]int64{0, 2000, 4000}).Draw(t, "min extra cache"),
		InterferenceRate:     rapid.SampledFrom([]float64{2000, 8000, 20000}).Draw(t, "interference rate"),
		InterferenceAlpha:    rapid.SampledFrom([]float64{0, 0.3, 2}).Draw(t, "interference alpha"),
		MarginSeconds:        drawSeconds(t, 1, extreme, "margin"),
	}
}

// drawSituation draws a valid situation. One instance in three is a copy of an
// earlier one with at most one number changed, for ties at every level of the
// order.
func drawSituation(t *rapid.T, sh shape) situation {
	extreme := sh.extreme && oneIn(t, 4, "extreme snapshot")
	s := situation{policy: drawPolicy(t, sh), survival: map[string]survival{}}
	r := &s.snapshot.Request
	r.ID = fmt.Sprintf("request-%d", rapid.IntRange(0, 1000).Draw(t, "request"))
	r.ContextTokens = drawTokens(t, extreme, "context")
	if s.policy.Separation.Enabled && oneIn(t, 2, "long context") {
		r.ContextTokens = rapid.SampledFrom([]int64{16000, 18000, 24000, 40000}).Draw(t, "context to share")
	}
	r.RemainingTokens = drawTokens(t, extreme, "remaining")
	if s.policy.Hazard.Enabled { // for durations that curves say something about
		r.RemainingTokens = rapid.SampledFrom([]int64{0, 1, 199, 200, 201, 500, 2000, 8000}).Draw(t, "remaining output")
	}
	least := 0
	if sh.running {
		least = 1
	}
	most := sh.instances
	if most == 0 {
		most = 8
	}
	n := rapid.OneOf(rapid.SampledFrom([]int{2, 3, 5, most}), rapid.IntRange(least, most)).Draw(t, "instances")
	for k := range n {
		id := fmt.Sprintf("i%d", k)
		if k > 0 && oneIn(t, 3, "copy") {
			c := s.snapshot.Instances[rapid.IntRange(0, k-1).Draw(t, "of")]
			c.ID = id
			switch rapid.IntRange(0, 5).Draw(t, "but for") {
			case 1:
				c.Requests = drawCount(t, extreme, "requests")
			case 2:
				c.OngoingTokens = drawTokens(t, extreme, "ongoing")
			case 3:
				c.CachedTokens = drawTokens(t, extreme, "cached")
			case 4:
				c.PendingPrefillTokens = drawTokens(t, extreme, "pending")
			}
			s.snapshot.Instances = append(s.snapshot.Instances, c)
			continue
		}
		i := drawInstance(t, id, r, extreme)
		if !sh.noHazard {
			curve, known := drawCurve(t, sh, "curve")
			if curve != nil {
				i.Curve, i.CurveName = curve, "curve of "+id
				s.survival[i.CurveName] = known
			}
		}
		s.snapshot.Instances = append(s.snapshot.Instances, i)
	}
	someone := func(label string) string {
		return rapid.SampledFrom(s.snapshot.Instances).Draw(t, label).ID
	}
	switch choice := rapid.IntRange(0, 4).Draw(t, "affinity"); {
	case choice == 4:
		r.Affinity = "gone"
	case choice > 0 && n > 0:
		r.Affinity = someone("home")
	}
	r.Hops = rapid.SampledFrom([]int64{0, 0, 0, 0, 0, 0, 1, 2, 3, 1e9}).Draw(t, "hops")
	switch {
	case sh.running:
		r.RunningOn = someone("source")
		for k := range s.snapshot.Instances {
			if i := &s.snapshot.Instances[k]; i.ID == r.RunningOn {
				i.Unavailable = false
				if !sh.noHazard && oneIn(t, 2, "doomed") {
					rate := rapid.SampledFrom([]float64{0.01, 0.05, 0.5}).Draw(t, "doom")
					i.Curve, i.CurveName = distuv.Exponential{Rate: rate}, "doom"
					s.survival["doom"] = exponentialSurvival(rate)
				}
			}
		}
	case sh.placing:
	default:
		switch choice := rapid.IntRange(0, 5).Draw(t, "running"); {
		case choice == 5:
			r.RunningOn = "gone"
		case choice > 2 && n > 0:
			r.RunningOn = someone("source")
		}
	}
	return s
}

// permuted is the snapshot with its instances in another order.
func permuted(t *rapid.T, s kvpolicy.Snapshot) kvpolicy.Snapshot {
	s.Instances = rapid.Permutation(s.Instances).Draw(t, "order")
	return s
}
