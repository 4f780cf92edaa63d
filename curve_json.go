package kvpolicy

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"

	"gonum.org/v1/gonum/stat/distuv"
)

// curveJSON is what EncodeCurve writes.
type curveJSON struct {
	Kind CurveKind `json:"kind"`
	*kaplanMeierJSON
	Shape *float64 `json:"shape,omitempty"`
	Scale *float64 `json:"scale,omitempty"`
	Rate  *float64 `json:"rate,omitempty"`
}

// kaplanMeierJSON leaves out neither array where there are no sessions, only what
// is as by default.
type kaplanMeierJSON struct {
	Durations []float64 `json:"durations"`
	Observed  []int     `json:"observed"`
	Entered   []float64 `json:"entered,omitempty"`
	TailRate  float64   `json:"tail_rate,omitempty"`
}

// EncodeCurve writes a *KaplanMeier, a Weibull or an exponential as JSON, in
// the form that a snapshot lists curves in:
//
//	{"kind":"km","durations":[60,3600],"observed":[1,0]}
//	{"kind":"weibull","shape":0.6,"scale":600}
//	{"kind":"exponential","rate":0.0001}
//
// durations and scale are in seconds, rate per second. Sessions are written in
// ascending order. Where it is not by default, a Kaplan-Meier curve also has
// "entered" (seconds, one per session) and "tail_rate" (per second); both are
// extensions of ours. DecodeCurve gives the same curve, bit for bit.
// Errors are FieldErrors: "curve" for any other type or a nil pointer,
// "curve.shape", "curve.scale" and "curve.rate" for what DecodeCurve would refuse.
func EncodeCurve(curve Curve) ([]byte, error) {
	switch c := curve.(type) {
	case *KaplanMeier:
		if err := validateCurve("curve", c); err != nil {
			return nil, err
		}
		return json.Marshal(curveJSON{Kind: KindKaplanMeier, kaplanMeierJSON: c.document()})
	case *distuv.Weibull:
		if c != nil {
			return EncodeCurve(*c)
		}
	case *distuv.Exponential:
		if c != nil {
			return EncodeCurve(*c)
		}
	case distuv.Weibull:
		if err := validateWeibull("curve", c.K, c.Lambda); err != nil {
			return nil, err
		}
		return json.Marshal(curveJSON{Kind: KindWeibull, Shape: &c.K, Scale: &c.Lambda})
	case distuv.Exponential:
		if !positive(c.Rate) {
			return nil, fieldError("curve.rate", c.Rate, wantRate)
		}
		return json.Marshal(curveJSON{Kind: KindExponential, Rate: &c.Rate})
	}
	return nil, &FieldError{Path: "curve", Value: fmt.Sprintf("a %T", curve), Want: "be a *KaplanMeier, distuv.Weibull or distuv.Exponential"}
}

const wantRate = "be a finite number above 0"

func positive(x float64) bool { return x > 0 && x <= math.MaxFloat64 }

func (k *KaplanMeier) document() *kaplanMeierJSON {
	document := &kaplanMeierJSON{Durations: make([]float64, len(k.sessions)), Observed: make([]int, len(k.sessions))}
	for i, s := range k.sessions {
		document.Durations[i] = s.DurationSeconds
		if s.Observed {
			document.Observed[i] = 1
		}
		if s.EnteredSeconds > 0 && document.Entered == nil {
			document.Entered = make([]float64, len(k.sessions))
		}
		if document.Entered != nil {
			document.Entered[i] = s.EnteredSeconds
		}
	}
	if k.tailRate != defaultTailRate(k.sessions) {
		document.TailRate = k.tailRate
	}
	return document
}

// DecodeCurve reads the JSON that EncodeCurve writes. Keys are exact, an
// unknown one is an error, as are null, observed of another length than
// durations or with values other than 0, 1, true and false, and a shape, scale
// or rate that is not above 0, or above 1e3 for a shape and 1e12 for a scale
// (whether a rate is within 1e-9 to 1e18 is asked where it is used). Errors are FieldErrors with the path, such as
// "durations[4]".
func DecodeCurve(data []byte) (Curve, error) { return decodeCurve("", data) }

// decodeCurve is DecodeCurve of a curve that stands at path.
func decodeCurve(path string, data []byte) (Curve, error) {
	f := readFields(path, data)
	var kind CurveKind
	f.require("kind", `be given: "km", "weibull" or "exponential"`)
	f.word("kind", &kind)
	var curve Curve
	switch {
	case f.err != nil:
	case kind == KindKaplanMeier:
		curve = f.kaplanMeier()
	case kind == KindWeibull:
		w := distuv.Weibull{K: f.required("shape", wantShape), Lambda: f.required("scale", wantScale)}
		if f.err == nil {
			f.err = validateWeibull(f.path, w.K, w.Lambda)
		}
		curve = w
	default:
		e := distuv.Exponential{Rate: f.required("rate", wantRate)}
		if f.err == nil && !positive(e.Rate) {
			f.err = fieldError(f.at("rate"), e.Rate, wantRate)
		}
		curve = e
	}
	if err := f.finish(); err != nil {
		return nil, err
	}
	return curve, nil
}

// require notes the absence of a member.
func (f *fields) require(key, want string) {
	if _, ok := f.members[key]; !ok && f.err == nil {
		f.err = &FieldError{Path: f.at(key), Want: want}
	}
}

// required reads a number that must be there.
func (f *fields) required(key, want string) float64 {
	f.require(key, "be given: "+want)
	var x float64
	f.number(key, &x)
	return x
}

// kaplanMeier reads the sessions and builds the curve.
func (f *fields) kaplanMeier() Curve {
	f.require("durations", "be given: an array of seconds")
	f.require("observed", "be given: an array of 0 and 1, as long as durations")
	var observed []bool
	durations := f.numbers("durations")
	f.list("observed", func(i int, data json.RawMessage) {
		switch x, want := parseNumber(data); {
		case string(data) == "true" || want == "" && x == 1:
			observed = append(observed, true)
		case string(data) == "false" || want == "" && x == 0:
			observed = append(observed, false)
		default:
			f.fail(fmt.Sprintf("observed[%d]", i), data, "be 0, 1, true or false")
		}
	})
	_, late := f.members["entered"]
	entered := f.numbers("entered")
	_, chosen := f.members["tail_rate"]
	var tailRate float64
	f.number("tail_rate", &tailRate)
	if f.err != nil {
		return nil
	}
	if late && len(entered) != len(durations) {
		f.err = &FieldError{Path: f.at("entered"), Value: fmt.Sprintf("%d long", len(entered)), Want: fmt.Sprintf("be as long as durations, %d", len(durations))}
		return nil
	}
	k, err := NewKaplanMeier(durations, observed, entered...)
	if err == nil && chosen {
		k, err = k.WithTailRate(tailRate)
	}
	var field *FieldError
	if errors.As(err, &field) {
		f.err = &FieldError{Path: f.at(field.Path), Value: field.Value, Want: field.Want}
		return nil
	}
	return k
}

// numbers reads an array of numbers.
func (f *fields) numbers(key string) []float64 {
	var numbers []float64
	f.list(key, func(i int, data json.RawMessage) {
		x, want := parseNumber(data)
		if want != "" {
			f.fail(fmt.Sprintf("%s[%d]", key, i), data, want)
			return
		}
		numbers = append(numbers, x)
	})
	return numbers
}
