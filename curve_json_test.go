package kvpolicy

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"gonum.org/v1/gonum/stat/distuv"
	"pgregory.net/rapid"
)

func TestEncodeCurve(t *testing.T) {
	k := mustKaplanMeier(t, []float64{3600, 60}, []bool{false, true})
	faster, err := k.WithTailRate(0.5)
	require.NoError(t, err)
	w, e := distuv.Weibull{K: 0.6, Lambda: 600}, distuv.Exponential{Rate: 1e-12}
	for _, c := range []struct {
		curve Curve
		want  string
	}{
		{k, `{"kind":"km","durations":[60,3600],"observed":[1,0]}`},
		{faster, `{"kind":"km","durations":[60,3600],"observed":[1,0],"tail_rate":0.5}`},
		{mustKaplanMeier(t, nil, nil), `{"kind":"km","durations":[],"observed":[]}`},
		{mustKaplanMeier(t, []float64{9, 60}, []bool{true, true}, 0, 10), `{"kind":"km","durations":[9,60],"observed":[1,1],"entered":[0,10]}`},
		{w, `{"kind":"weibull","shape":0.6,"scale":600}`},
		{&w, `{"kind":"weibull","shape":0.6,"scale":600}`},
		{e, `{"kind":"exponential","rate":1e-12}`},
		{&e, `{"kind":"exponential","rate":1e-12}`},
	} {
		data, err := EncodeCurve(c.curve)
		require.NoError(t, err)
		assert.Equal(t, c.want, string(data))
	}
	for path, curve := range map[string]Curve{
		"curve is a kvpolicy.plainCurve": plainCurve{w},
		"curve is a <nil>":               nil,
		"curve is a *distuv.Weibull":     (*distuv.Weibull)(nil),
		"curve is a *distuv.Exponential": (*distuv.Exponential)(nil),
		"curve is an empty KaplanMeier":  (*KaplanMeier)(nil),
		"curve.shape is 0":               distuv.Weibull{Lambda: 1},
		"curve.rate is 0":                distuv.Exponential{},
	} {
		_, err := EncodeCurve(curve)
		assert.ErrorIs(t, err, ErrInvalid)
		assert.ErrorContains(t, err, path)
	}
}

func TestCurvesSurviveJSON(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		k := drawKaplanMeier(t)
		if rapid.Bool().Draw(t, "other tail") {
			var err error
			k, err = k.WithTailRate(rapid.Float64Range(1e-300, 1e18).Draw(t, "tail rate"))
			require.NoError(t, err)
		}
		data, err := EncodeCurve(k)
		require.NoError(t, err)
		back, err := DecodeCurve(data)
		require.NoError(t, err)
		require.Equal(t, Curve(k), back)
	})
}

func TestDecodeCurve(t *testing.T) {
	for text, want := range map[string]Curve{
		`{"kind":"km","durations":[60,3600.0],"observed":[true,0.0]}`: mustKaplanMeier(t, []float64{60, 3600}, []bool{true, false}),
		`{"kind":"km","durations":[6e1],"observed":[1.0]}`:            mustKaplanMeier(t, []float64{60}, []bool{true}),
		`{"observed":[], "durations":[], "kind":"km"}`:                mustKaplanMeier(t, nil, nil),
		`{"kind":"km","durations":[],"observed":[],"entered":[]}`:     mustKaplanMeier(t, nil, nil),
		`{"kind":"weibull","shape":1,"scale":2.5}`:                    distuv.Weibull{K: 1, Lambda: 2.5},
		`{"kind":"exponential","rate":1e-12}`:                         distuv.Exponential{Rate: 1e-12},
	} {
		got, err := DecodeCurve([]byte(text))
		require.NoError(t, err, text)
		assert.Equal(t, want, got, text)
	}
}

func TestDecodeCurveErrors(t *testing.T) {
	for _, c := range [][2]string{
		{`{"kind":"gompertz"}`, "kind"},
		{`{"Kind":"km"}`, "kind"},
		{`{}`, "kind"},
		{`{"kind":null}`, "kind"},
		{`{"kind":3}`, "kind"},
		{`{"kind":"km"}`, "durations"},
		{`{"kind":"km","durations":[]}`, "observed"},
		{`{"kind":"km","durations":null,"observed":[]}`, "durations"},
		{`{"kind":"km","durations":[1,2],"observed":[1]}`, "observed"},
		{`{"kind":"km","durations":[1,2],"observed":[1,2]}`, "observed[1]"},
		{`{"kind":"km","durations":[1,2],"observed":[1,null]}`, "observed[1]"},
		{`{"kind":"km","durations":[1,2],"observed":[1,"1"]}`, "observed[1]"},
		{`{"kind":"km","durations":[1,-2],"observed":[1,1]}`, "durations[1]"},
		{`{"kind":"km","durations":[1,1e13],"observed":[1,1]}`, "durations[1]"},
		{`{"kind":"km","durations":[1e999],"observed":[1]}`, "durations[0]"},
		{`{"kind":"km","durations":["1"],"observed":[1]}`, "durations[0]"},
		{`{"kind":"km","durations":[1],"observed":[1],"entered":[2]}`, "entered[0]"},
		{`{"kind":"km","durations":[1],"observed":[1],"entered":[]}`, "entered"},
		{`{"kind":"km","durations":[1],"observed":[1],"tail_rate":0}`, "tail_rate"},
		{`{"kind":"km","durations":[1],"observed":[1],"shape":2}`, "shape"},
		{`{"kind":"weibull","shape":0.0,"scale":5}`, "shape"},
		{`{"kind":"weibull","shape":1}`, "scale"},
		{`{"kind":"weibull","shape":1,"scale":-5}`, "scale"},
		{`{"kind":"weibull","shape":1001,"scale":5}`, "shape"},
		{`{"kind":"weibull","shape":1,"scale":2e12}`, "scale"},
		{`{"kind":"weibull","shape":1,"scale":5,"rate":1}`, "rate"},
		{`{"kind":"exponential","rate":0}`, "rate"},
		{`{"kind":"exponential","rate":-1}`, "rate"},
		{`{"kind":"exponential","rate":true}`, "rate"},
		{`{"kind":"exponential","rate":1,"rate":1}`, "rate"},
		{`{"kind":"exponential"}`, "rate"},
	} {
		for path, prefix := range map[string]string{"": "", "curves[spot]": "curves[spot]."} {
			curve, err := decodeCurve(path, []byte(c[0]))
			var field *FieldError
			require.ErrorAs(t, err, &field, c[0])
			assert.Equal(t, prefix+c[1], field.Path, c[0])
			assert.Nil(t, curve)
		}
	}
	for _, text := range []string{``, `[]`, `null`, `{"kind":"km"`, `{"kind":"exponential","rate":1} 2`} {
		_, err := DecodeCurve([]byte(text))
		assert.ErrorIs(t, err, ErrInvalid, text)
	}
}

// Whatever is read is a curve that can be used, or refused by name, and that
// is written and read back the same.
func FuzzDecodeCurve(f *testing.F) {
	for _, seed := range []string{
		`{"kind":"km","durations":[60,3600],"observed":[1,0]}`,
		`{"kind":"km","durations":[9,60],"observed":[true,false],"entered":[0,10],"tail_rate":0.5}`,
		`{"kind":"km","durations":[0,0,5e-324,1e12],"observed":[1,1,1,1]}`,
		`{"kind":"weibull","shape":0.6,"scale":600}`, `{"kind":"weibull","shape":1e-300,"scale":1e-300}`,
		`{"kind":"exponential","rate":1e-300}`, `{"kind":"exponential","rate":1e300}`, `{"kind":null}`, `[]`, `{`,
	} {
		f.Add([]byte(seed), 60.0, 400.0)
	}
	f.Fuzz(func(t *testing.T, data []byte, age, to float64) {
		curve, err := DecodeCurve(data)
		if err != nil {
			require.ErrorIs(t, err, ErrInvalid)
			return
		}
		encoded, err := EncodeCurve(curve)
		require.NoError(t, err)
		again, err := DecodeCurve(encoded)
		require.NoError(t, err)
		require.Equal(t, curve, again)
		u := Exposure{ContextTokens: 4500, DecodeRate: 12, WaitSeconds: 20, RemainingTokens: 3000, FallbackPrefillRate: 250, OverheadSeconds: 2.2}
		for _, cells := range []int{0, 16} {
			loss, err := ExpectedLoss(curve, age, 0, to, cells, u)
			if err != nil {
				require.ErrorIs(t, err, ErrInvalid)
				continue
			}
			require.GreaterOrEqual(t, loss, 0.)
			require.LessOrEqual(t, loss, u.At(to)*(1+1e-12))
		}
	})
}
