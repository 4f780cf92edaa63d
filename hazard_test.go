package kvpolicy

import (
	"errors"
	"fmt"
	"math"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"gonum.org/v1/gonum/stat/distuv"
	"pgregory.net/rapid"
)

// Expected values by mpmath with 800 digits from the doubles as they stand.
func TestConditionalSurvivalOfWeibullFarOut(t *testing.T) {
	for _, c := range []struct{ shape, scale, age, t, want float64 }{
		{0.6, 600, 0, 1, 0.97869695140426229734},
		{0.6, 600, 0, 1e-9, 0.99999991427465706183},
		{3, 1200, 600, 60, 0.95946926150361898155},
		{2, 100, 2628.26, 10, 0.0051615415195756058137}, // S(age) = 1e-300
		{2, 100, 2628.26, 0.001, 0.99947448603086113125},
		{3, 1200, 1e12, 1e-24, 0.9999999982638888904}, // S(age) = exp(-6e26)
		{1000, 600, 599, 0.5, 0.78205197032868670597},
		{1000, 600, 1200, 1e-300, 0.00013245886769550447662},
		{0.001, 1e12, 0, 1e-300, 0.61414237899461855805},
		{0.001, 1e-300, 0, 1e24, 0.12140440088117321392}, // t/scale overflows
		{1.5, 28800, 1e12, 1e-8, 0.99999999693096015581},
		{0.6, 1e-3, 1e9, 1e6, 0}, // 9e-4130
		{1000, 1e12, 1, 1e12, 0.36787944080356288042},
		{700, 1, 1.5, 1e-127, 0.91788633975881597555},
		{0.5, 3600, 1e-300, 1e12, 0},                     // 6e-7239
		{0.001, 1e-9, 1e-310, 1, 0.59398278071752870437}, // t/age overflows
	} {
		got, err := ConditionalSurvival(distuv.Weibull{K: c.shape, Lambda: c.scale}, c.age, c.t)
		require.NoError(t, err)
		// A relative error of the hazard is one of the survival times the hazard.
		assert.InDelta(t, c.want, got, 4e-13*c.want, "%+v", c)
	}
}

func TestConditionalSurvivalOfStepsAndTail(t *testing.T) {
	k := mustKaplanMeier(t, []float64{100, 200, 300, 300, 500}, []bool{true, true, true, false, false})
	tail := 1.0 / 200
	for _, c := range []struct{ age, t, want float64 }{
		{0, 0, 1},
		{0, 99, 1},
		{0, 100, 0.8}, // an event at the end is lost
		{100, 99, 1},  // one at the age is past
		{100, 100, 0.75},
		{0, 300, 0.4},
		{250, 100, 2. / 3 * math.Exp(-50*tail)},
		{300, 100, math.Exp(-100 * tail)},
		{1e12, 100, math.Exp(-100 * tail)}, // S(age) = exp(-5e9)
		{1e30, 1e-6, math.Exp(-1e-6 * tail)},
	} {
		got, err := ConditionalSurvival(k, c.age, c.t)
		require.NoError(t, err)
		assert.InEpsilon(t, c.want, got, 1e-14, "%+v", c)
	}
}

func TestCurvesOfTheKnownTypesByPointer(t *testing.T) {
	w, e := distuv.Weibull{K: 0.6, Lambda: 600}, distuv.Exponential{Rate: 1e-3}
	for _, pair := range [][2]Curve{{w, &w}, {e, &e}} {
		for _, cells := range []int{0, 16} {
			a, err := ExpectedLoss(pair[0], 60, 3, 400, cells, benchmarkExposure)
			require.NoError(t, err)
			b, err := ExpectedLoss(pair[1], 60, 3, 400, cells, benchmarkExposure)
			require.NoError(t, err)
			assert.Equal(t, a, b)
		}
	}
}

func TestForeignCurves(t *testing.T) {
	w := distuv.Weibull{K: 3, Lambda: 1200}
	for _, foreign := range []Curve{plainCurve{w}, logCurve{w}, curveFunc(w.Survival)} {
		for _, age := range []float64{0, 600, 3000} {
			want, err := ConditionalSurvival(w, age, 90)
			require.NoError(t, err)
			got, err := ConditionalSurvival(foreign, age, 90)
			require.NoError(t, err)
			assert.InEpsilon(t, want, got, 1e-12)
			for _, cells := range []int{0, 1, 16} {
				want, err := ExpectedLoss(w, age, 5, 400, cells, benchmarkExposure)
				require.NoError(t, err)
				got, err := ExpectedLoss(foreign, age, 5, 400, cells, benchmarkExposure)
				require.NoError(t, err)
				assert.InEpsilon(t, want, got, 1e-10, "%T age %v cells %v", foreign, age, cells)
			}
		}
	}
	t.Run("by its logarithm where it underflows", func(t *testing.T) {
		want, err := ConditionalSurvival(w, 30000, 0.01)
		require.NoError(t, err)
		require.Zero(t, w.Survival(30000))
		got, err := ConditionalSurvival(logCurve{w}, 30000, 0.01)
		require.NoError(t, err)
		assert.InEpsilon(t, want, got, 1e-10)
	})
	t.Run("0 at the age reads as unknown", func(t *testing.T) {
		for _, foreign := range []Curve{plainCurve{w}, logCurve{distuv.Weibull{K: 1e3, Lambda: 1}}, curveFunc(func(float64) float64 { return 0 })} {
			got, err := ConditionalSurvival(foreign, 30000, 900)
			require.NoError(t, err)
			assert.InEpsilon(t, math.Exp(-0.25), got, 1e-14)
			loss, err := ExpectedLoss(foreign, 30000, 0, 900, 0, Exposure{OverheadSeconds: 1})
			require.NoError(t, err)
			assert.InEpsilon(t, -math.Expm1(-0.25), loss, 1e-14)
		}
	})
	t.Run("0 at the start of the loss, but not at the age", func(t *testing.T) {
		loss, err := ExpectedLoss(plainCurve{w}, 0, 30000, 30900, 0, Exposure{OverheadSeconds: 1})
		require.NoError(t, err)
		assert.Zero(t, loss)
	})
}

func TestForeignCurvesThatAreNone(t *testing.T) {
	bad := math.NaN()
	for _, value := range []float64{math.NaN(), math.Inf(1), math.Inf(-1)} {
		bad = value
		for name, curve := range map[string]Curve{
			"always": curveFunc(func(float64) float64 { return bad }),
			"later": curveFunc(func(t float64) float64 {
				if t > 700 {
					return bad
				}
				return 1 / (1 + t)
			}),
		} {
			for _, cells := range []int{0, 16} {
				loss, err := ExpectedLoss(curve, 0, 0, 800, cells, benchmarkExposure)
				var field *FieldError
				require.ErrorAs(t, err, &field, name)
				assert.Equal(t, "curve", field.Path)
				assert.Equal(t, fmt.Sprint(bad), field.Value)
				assert.Zero(t, loss)
			}
			_, err := ConditionalSurvival(curve, 1, 800)
			assert.ErrorIs(t, err, ErrInvalid)
		}
	}
	t.Run("out of range and rising", func(t *testing.T) {
		over := curveFunc(func(t float64) float64 { return 1.5 - t/100 })
		got, err := ConditionalSurvival(over, 0, 75)
		require.NoError(t, err)
		assert.Equal(t, 0.75, got) // 1.5 reads as 1
		got, err = ConditionalSurvival(over, 0, 200)
		require.NoError(t, err)
		assert.Zero(t, got)
		rising := curveFunc(func(t float64) float64 { return math.Min(1, 0.5+t/1000) })
		got, err = ConditionalSurvival(rising, 0, 75)
		require.NoError(t, err)
		assert.Equal(t, 1., got)
		for _, cells := range []int{0, 16} {
			loss, err := ExpectedLoss(rising, 0, 0, 800, cells, benchmarkExposure)
			require.NoError(t, err)
			assert.Zero(t, loss)
		}
		wave := curveFunc(func(t float64) float64 { return 0.6 + 0.4*math.Cos(t/10) })
		for _, cells := range []int{0, 1, 16, 1000} {
			loss, err := ExpectedLoss(wave, 0, 0, 800, cells, benchmarkExposure)
			require.NoError(t, err)
			assert.GreaterOrEqual(t, loss, 0.)
			assert.LessOrEqual(t, loss, benchmarkExposure.At(800))
		}
	})
}

func TestInvalidCurvesAndTimes(t *testing.T) {
	valid := distuv.Exponential{Rate: 1e-3}
	for _, c := range []struct {
		path            string
		curve           Curve
		age, from, to   float64
		cells           int
		u               Exposure
		alsoConditional bool
	}{
		{path: "curve", curve: (*KaplanMeier)(nil), alsoConditional: true},
		{path: "curve", curve: &KaplanMeier{}, alsoConditional: true},
		{path: "curve", curve: (*distuv.Weibull)(nil), alsoConditional: true},
		{path: "curve", curve: (*distuv.Exponential)(nil), alsoConditional: true},
		{path: "curve.shape", curve: distuv.Weibull{K: 0, Lambda: 1}, alsoConditional: true},
		{path: "curve.shape", curve: &distuv.Weibull{K: -1, Lambda: 1}, alsoConditional: true},
		{path: "curve.shape", curve: distuv.Weibull{K: math.NaN(), Lambda: 1}, alsoConditional: true},
		{path: "curve.shape", curve: distuv.Weibull{K: 1001, Lambda: 1}, alsoConditional: true},
		{path: "curve.scale", curve: distuv.Weibull{K: 1, Lambda: math.Inf(1)}, alsoConditional: true},
		{path: "curve.scale", curve: distuv.Weibull{K: 1, Lambda: 0}, alsoConditional: true},
		{path: "curve.rate", curve: distuv.Exponential{Rate: 0}, alsoConditional: true},
		{path: "curve.rate", curve: distuv.Exponential{Rate: 1e-10}, alsoConditional: true},
		{path: "curve.rate", curve: &distuv.Exponential{Rate: 2e18}, alsoConditional: true},
		{path: "curve.rate", curve: distuv.Exponential{Rate: math.NaN()}, alsoConditional: true},
		{path: "age", curve: valid, age: -1, alsoConditional: true},
		{path: "age", curve: valid, age: math.NaN(), alsoConditional: true},
		{path: "age", age: math.Inf(1), alsoConditional: true},
		{path: "from", curve: valid, from: math.NaN()},
		{path: "to", curve: valid, from: 2, to: 1},
		{path: "to", curve: valid, to: math.Inf(1)},
		{path: "cells", curve: valid, cells: -1},
		{path: "cells", curve: valid, cells: 65537},
		{path: "exposure.context_tokens", curve: valid, u: Exposure{ContextTokens: -1, FallbackPrefillRate: 1}},
		{path: "exposure.decode_rate", curve: valid, u: Exposure{DecodeRate: math.NaN()}},
		{path: "exposure.wait_s", curve: valid, u: Exposure{WaitSeconds: math.Inf(1)}},
		{path: "exposure.remaining_tokens", curve: valid, u: Exposure{RemainingTokens: -1}},
		{path: "exposure.fallback_prefill_rate", curve: valid, u: Exposure{ContextTokens: 1}},
		{path: "exposure.fallback_prefill_rate", u: Exposure{RemainingTokens: 1, FallbackPrefillRate: math.NaN()}},
		{path: "exposure.overhead_s", curve: valid, u: Exposure{OverheadSeconds: -2}},
	} {
		if c.to == 0 {
			c.to = c.from + 1
		}
		loss, err := ExpectedLoss(c.curve, c.age, c.from, c.to, c.cells, c.u)
		var field *FieldError
		require.ErrorAs(t, err, &field, "%+v", c)
		assert.Equal(t, c.path, field.Path)
		assert.Zero(t, loss)
		if c.alsoConditional {
			_, err := ConditionalSurvival(c.curve, c.age, 1)
			require.ErrorAs(t, err, &field, "%+v", c)
			assert.Equal(t, c.path, field.Path)
		}
	}
	_, err := ConditionalSurvival(valid, 0, -1)
	assert.ErrorContains(t, err, "t is -1")
	assert.Equal(t, math.Exp(-0.5), (*KaplanMeier)(nil).Survival(1800))
	assert.True(t, errors.Is(validateCurve("curves[spot]", distuv.Weibull{}), ErrInvalid))
	assert.ErrorContains(t, validateCurve("curves[spot]", distuv.Weibull{}), "curves[spot].shape")
}

func TestNoCurveNeverFails(t *testing.T) {
	s, err := ConditionalSurvival(nil, 5, 1e12)
	require.NoError(t, err)
	assert.Equal(t, 1., s)
	for _, cells := range []int{0, 16} {
		loss, err := ExpectedLoss(nil, 5, 0, 100, cells, benchmarkExposure)
		require.NoError(t, err)
		assert.Zero(t, loss)
	}
}

// Generators: zeros, ties, boundaries, huge and tiny values on purpose.

func drawSeconds(label string) *rapid.Generator[float64] {
	return rapid.Custom(func(t *rapid.T) float64 {
		return rapid.OneOf(
			rapid.SampledFrom([]float64{0, 1, 2, 3, 10, 60, 600, 3600, 1e-300, 5e-324, 1e-9, 1e12}),
			rapid.Float64Range(0, 10),
			rapid.Float64Range(0, 1e5),
			rapid.Map(rapid.Float64Range(-9, 12), func(x float64) float64 { return math.Pow(10, x) }),
		).Draw(t, label)
	})
}

func drawKaplanMeier(t *rapid.T) *KaplanMeier {
	n := rapid.IntRange(0, 60).Draw(t, "n")
	seconds := drawSeconds("duration")
	if rapid.Bool().Draw(t, "ties") {
		seconds = rapid.Map(rapid.IntRange(0, 12), func(i int) float64 { return float64(i) * 50 })
	}
	durations, observed := make([]float64, n), make([]bool, n)
	for i := range durations {
		durations[i] = seconds.Draw(t, "duration")
		observed[i] = rapid.Bool().Draw(t, "observed")
	}
	var entered []float64
	if rapid.Bool().Draw(t, "late") {
		entered = make([]float64, n)
		for i, d := range durations {
			if e := d * rapid.SampledFrom([]float64{0, 0, 0.5, 0.9, 0.999}).Draw(t, "entered"); e < d {
				entered[i] = e
			}
		}
	}
	return mustKaplanMeier(t, durations, observed, entered...)
}

func drawCurve(t *rapid.T) Curve {
	weibull := func() distuv.Weibull {
		return distuv.Weibull{
			K:      rapid.SampledFrom([]float64{1e-3, 0.3, 0.6, 1, 1.5, 3, 20, 1e3}).Draw(t, "shape"),
			Lambda: rapid.SampledFrom([]float64{1e-9, 1, 600, 28800, 1e12}).Draw(t, "scale"),
		}
	}
	switch rapid.IntRange(0, 5).Draw(t, "kind of curve") {
	case 0:
		return weibull()
	case 1:
		return distuv.Exponential{Rate: rapid.SampledFrom([]float64{1e-9, 1e-4, 1, 1e18}).Draw(t, "rate")}
	case 2:
		return plainCurve{weibull()}
	case 3:
		return logCurve{weibull()}
	default:
		return drawKaplanMeier(t)
	}
}

func TestConditionalSurvivalProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		curve := drawCurve(t)
		age := drawSeconds("age").Draw(t, "age")
		start, err := ConditionalSurvival(curve, age, 0)
		require.NoError(t, err)
		require.Equal(t, 1., start)
		a, b := drawSeconds("t").Draw(t, "a"), drawSeconds("t").Draw(t, "b")
		early, err := ConditionalSurvival(curve, age, math.Min(a, b))
		require.NoError(t, err)
		late, err := ConditionalSurvival(curve, age, math.Max(a, b))
		require.NoError(t, err)
		require.LessOrEqual(t, early, 1.)
		require.GreaterOrEqual(t, late, 0.)
		// Rounding of exp and expm1 is all that may rise.
		require.LessOrEqual(t, late, early*(1+1e-15))
		if k, ok := curve.(*KaplanMeier); ok && k.Survival(age) > 1e-290 && age < 1e9 {
			require.InDelta(t, k.Survival(age+a)/k.Survival(age), must(ConditionalSurvival(k, age, a)), 1e-6)
		}
	})
}

func must(x float64, err error) float64 {
	if err != nil {
		panic(err)
	}
	return x
}
