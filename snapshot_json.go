package kvpolicy

import (
	"encoding/json"
	"fmt"
	"slices"
)

// UnmarshalJSON reads a snapshot: request, instances, and the curves that
// instances name. Absent is 0. An unknown key, a null, a fractional count or
// the name of no curve is a *FieldError, and s is then unchanged; bounds are
// Decide's to check. (SPEC section 9.)
func (s *Snapshot) UnmarshalJSON(data []byte) error {
	f := readFields("", data)
	var read Snapshot
	curves := map[string]Curve{}
	f.object("curves", func(inner *fields) {
		for _, name := range inner.names() {
			data, ok := inner.take(name)
			if !ok {
				return
			}
			curves[name], inner.err = decodeCurve(fmt.Sprintf("curves[%s]", name), data)
		}
	})
	f.object("request", func(inner *fields) {
		r := &read.Request
		inner.text("id", &r.ID)
		inner.count("context_tokens", &r.ContextTokens)
		inner.count("remaining_tokens", &r.RemainingTokens)
		inner.text("affinity", &r.Affinity)
		inner.text("running_on", &r.RunningOn)
		inner.count("hops", &r.Hops)
	})
	f.list("instances", func(index int, data json.RawMessage) {
		f.within(fmt.Sprintf("instances[%d]", index), data, func(inner *fields) {
			var i Instance
			i.read(inner, curves)
			read.Instances = append(read.Instances, i)
		})
	})
	if err := f.finish(); err != nil {
		return err
	}
	*s = read
	return nil
}

// read reads an instance.
func (i *Instance) read(f *fields, curves map[string]Curve) {
	f.text("id", &i.ID)
	f.count("requests", &i.Requests)
	f.count("pending_prefill_tokens", &i.PendingPrefillTokens)
	f.count("ongoing_tokens", &i.OngoingTokens)
	f.count("active_decodes", &i.ActiveDecodes)
	f.count("cached_tokens", &i.CachedTokens)
	f.number("wait_s", &i.WaitSeconds)
	f.number("prefill_rate", &i.PrefillRate)
	f.number("decode_rate", &i.DecodeRate)
	f.number("bandwidth", &i.Bandwidth)
	f.count("kv_capacity_tokens", &i.KVCapacityTokens)
	f.count("kv_used_tokens", &i.KVUsedTokens)
	f.number("uptime_s", &i.UptimeSeconds)
	f.flag("unavailable", &i.Unavailable)
	f.number("metrics_age_s", &i.MetricsAgeSeconds)
	if f.text("curve", &i.CurveName); i.CurveName != "" {
		curve, known := curves[i.CurveName]
		if !known && f.err == nil {
			f.err = fieldError(f.at("curve"), i.CurveName, "be the name of one of the snapshot's curves")
		}
		i.Curve = curve
	}
}

// MarshalJSON writes the snapshot. Curves are listed once each, by CurveName;
// one without a name, or whose name stands for another curve already, is given
// one. A curve that is neither Kaplan-Meier, Weibull nor exponential has no
// JSON form and is an error.
func (s Snapshot) MarshalJSON() ([]byte, error) {
	type instance struct {
		Instance
		Curve string `json:"curve,omitempty"`
	}
	out := struct {
		Request   Request                    `json:"request"`
		Instances []instance                 `json:"instances"`
		Curves    map[string]json.RawMessage `json:"curves,omitempty"`
	}{Request: s.Request, Instances: make([]instance, len(s.Instances)), Curves: map[string]json.RawMessage{}}
	for at, i := range s.Instances {
		out.Instances[at].Instance = i
		if i.Curve == nil {
			continue
		}
		data, err := EncodeCurve(i.Curve)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", i.curvePath(at), err)
		}
		name := i.CurveName
		for n := 0; ; n++ {
			if name != "" {
				if listed, taken := out.Curves[name]; !taken || slices.Equal(listed, data) {
					break
				}
			}
			name = fmt.Sprintf("c%d", n)
		}
		out.Curves[name] = data
		out.Instances[at].Curve = name
	}
	return json.Marshal(out)
}
