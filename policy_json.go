package kvpolicy

import (
	"encoding/json"
	"math"
)

// member binds a field of a policy to its key, for reading and writing alike.
type member struct {
	key string
	to  any // *float64, *int64, *int, *uint64, *bool or *Score
}

// section is the members of one object of a policy's JSON form. enabled is nil
// where the object is no part that can be switched off.
type section struct {
	key     string
	enabled *bool
	members []member
	// turn switches a part on with its defaults, or off.
	turn func(on bool)
}

// turning makes a turn for a part.
func turning[T any](part *T, defaults func() T) func(on bool) {
	return func(on bool) {
		*part = *new(T)
		if on {
			*part = defaults()
		}
	}
}

// sections is the layout of a policy's JSON form. (SPEC section 9.)
func (p *Policy) sections() []section {
	c, t, g, m := &p.Cost, &p.Transfer, &p.Separation, &p.Migration
	return []section{
		{key: "cost", members: []member{
			{"decode_iteration_s", &c.DecodeIterationSeconds},
			{"prefill_rate", &c.PrefillRate},
			{"prefill_quadratic", &c.PrefillQuadratic},
			{"interference_weight", &c.InterferenceWeight},
			{"decode_rate", &c.DecodeRate},
			{"count_decode", &c.CountDecode},
		}},
		{key: "affinity", enabled: &p.Affinity.Enabled, turn: turning(&p.Affinity, defaultAffinity),
			members: []member{{"overload_factor", &p.Affinity.OverloadFactor}}},
		{key: "pdsep", enabled: &g.Enabled, turn: turning(g, relaxedSeparation), members: []member{
			{"min_new_tokens", &g.MinNewTokens},
			{"min_active_decodes", &g.MinActiveDecodes},
			{"min_source_cache_tokens", &g.MinSourceCacheTokens},
			{"min_extra_cache_tokens", &g.MinExtraCacheTokens},
			{"interference_rate", &g.InterferenceRate},
			{"interference_alpha", &g.InterferenceAlpha},
			{"margin_s", &g.MarginSeconds},
		}},
		{key: "transfer", members: []member{
			{"overhead_s", &t.OverheadSeconds},
			{"recompute_overhead_s", &t.RecomputeOverheadSeconds},
			{"bandwidth", &t.Bandwidth},
			{"kv_bytes_per_token", &t.KVBytesPerToken},
		}},
		{key: "hazard", enabled: &p.Hazard.Enabled, turn: turning(&p.Hazard, defaultHazard), members: []member{
			{"stall_penalty_s", &p.Hazard.StallPenaltySeconds},
			{"cells", &p.Hazard.Cells},
		}},
		{key: "migration", enabled: &m.Enabled, turn: turning(m, defaultMigration), members: []member{
			{"hysteresis_s", &m.HysteresisSeconds},
			{"max_slowdown_s", &m.MaxSlowdownSeconds},
			{"max_hops", &m.MaxHops},
			{"min_remaining_s", &m.MinRemainingSeconds},
			{"overlap_rounds", &m.OverlapRounds},
		}},
	}
}

// members are those outside any section.
func (p *Policy) members() []member {
	return []member{{"seed", &p.Seed}, {"score", &p.Score}, {"max_metrics_age_s", &p.MaxMetricsAgeSeconds}}
}

// read reads the members that are there.
func (f *fields) read(members []member) {
	for _, m := range members {
		switch to := m.to.(type) {
		case *float64:
			f.number(m.key, to)
		case *int64:
			f.count(m.key, to)
		case *int:
			f.small(m.key, to)
		case *uint64:
			f.unsigned(m.key, to)
		case *bool:
			f.flag(m.key, to)
		case *Score:
			f.word(m.key, to)
		}
	}
}

// UnmarshalJSON reads a policy: a preset, unified where none is named, and
// what overrides it. Absent is the preset's value and 0 is 0. Naming affinity,
// pdsep, hazard or migration switches that part on, with its defaults where the
// preset has it off (pdsep: the relaxed gates), null switches it off. An unknown key, a null elsewhere
// or a value out of bounds is a *FieldError, and p is then unchanged. (SPEC
// section 9.)
func (p *Policy) UnmarshalJSON(data []byte) error {
	f := readFields("", data)
	name := ""
	f.text("preset", &name)
	if f.err != nil {
		return f.err
	}
	read, err := Preset(name)
	if err != nil {
		return err
	}
	f.read(read.members())
	for _, s := range read.sections() {
		if s.enabled == nil {
			f.object(s.key, func(inner *fields) { inner.read(s.members) })
			continue
		}
		f.part(s.key, func(on bool) {
			if !on || !*s.enabled { // a part that is on keeps the preset's values
				s.turn(on)
			}
		}, func(inner *fields) { inner.read(s.members) })
	}
	if err := f.finish(); err != nil {
		return err
	}
	if err := read.Validate(); err != nil {
		return err
	}
	*p = read
	return nil
}

// MarshalJSON writes the policy with every value spelled out and every part
// that is off as null, so that it reads back the same whatever the presets
// become. An overload factor of +Inf, which JSON cannot hold, is written as the
// preset sticky. A policy that Validate refuses is an error.
func (p Policy) MarshalJSON() ([]byte, error) {
	if err := p.Validate(); err != nil {
		return nil, err
	}
	out := map[string]any{"preset": "unified"}
	for _, m := range p.members() {
		out[m.key] = m.to
	}
	for _, s := range p.sections() {
		if s.enabled != nil && !*s.enabled {
			out[s.key] = nil
			continue
		}
		object := map[string]any{}
		for _, m := range s.members {
			object[m.key] = m.to
		}
		out[s.key] = object
	}
	if p.Affinity.Enabled && math.IsInf(p.Affinity.OverloadFactor, 1) {
		out["preset"] = "sticky"
		delete(out, "affinity")
	}
	return json.Marshal(out)
}
