package kvpolicy

import (
	"encoding/json"
	"fmt"
	"slices"
	"unicode/utf8"
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
			data, ok := inner.takeNullable(name)
			if !ok {
				return
			}
			if data == nil {
				data = json.RawMessage("null")
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
	if _, named := f.members["curve"]; named {
		f.text("curve", &i.CurveName)
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
// JSON form, nor has an id that is not UTF-8 or a number that is not finite:
// each is a *FieldError.
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
	for _, text := range []struct{ path, text string }{{"request.id", s.Request.ID},
		{"request.affinity", s.Request.Affinity}, {"request.running_on", s.Request.RunningOn}} {
		if !utf8.ValidString(text.text) {
			return nil, fieldError(text.path, text.text, "be UTF-8 to be written as JSON")
		}
	}
	names := curveNames{listed: out.Curves, names: map[string]string{}, estimates: map[*KaplanMeier]string{}}
	for at, i := range s.Instances {
		if !utf8.ValidString(i.ID) {
			return nil, instanceError(at, "id", i.ID, "be UTF-8 to be written as JSON")
		}
		out.Instances[at].Instance = i
		name, err := names.of(at, &i)
		if err != nil {
			return nil, err
		}
		out.Instances[at].Curve = name
	}
	data, err := json.Marshal(out)
	if err != nil {
		return nil, unreadable("snapshot", err)
	}
	return data, nil
}

// curveNames gives each curve of a snapshot one name.
type curveNames struct {
	listed    map[string]json.RawMessage // by name
	names     map[string]string          // by what is listed
	estimates map[*KaplanMeier]string    // so that a shared one is encoded once
	made      int                        // names made up
}

// of is the name of an instance's curve, empty for none.
func (c *curveNames) of(at int, i *Instance) (string, error) {
	if i.Curve == nil {
		return "", nil
	}
	estimate, shared := i.Curve.(*KaplanMeier)
	if name, known := c.estimates[estimate]; shared && known && (i.CurveName == "" || i.CurveName == name) {
		return name, nil
	}
	data, err := EncodeCurve(i.Curve)
	if err != nil {
		return "", i.curveError(at, &FieldError{Path: i.curvePath(at), Want: "have a JSON form: " + err.Error()})
	}
	name := i.CurveName
	if listed, taken := c.listed[name]; name == "" || !utf8.ValidString(name) || taken && !slices.Equal(listed, data) {
		if name = c.names[string(data)]; name == "" {
			name = c.make()
		}
	}
	c.listed[name], c.names[string(data)] = data, name
	if shared {
		c.estimates[estimate] = name
	}
	return name, nil
}

// make is a name that no curve has.
func (c *curveNames) make() string {
	for {
		name := fmt.Sprintf("c%d", c.made)
		c.made++
		if _, taken := c.listed[name]; !taken {
			return name
		}
	}
}
