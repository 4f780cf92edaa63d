package kvpolicy

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"gonum.org/v1/gonum/stat/distuv"
	"pgregory.net/rapid"
)

func TestExposure(t *testing.T) {
	u := Exposure{ContextTokens: 1000, DecodeRate: 10, WaitSeconds: 5, RemainingTokens: 100, FallbackPrefillRate: 200, OverheadSeconds: 2.2}
	for _, c := range [][2]float64{{0, 7.2}, {5, 7.2}, {6, 7.25}, {15, 7.7}, {1e12, 7.7}} {
		assert.InDelta(t, c[1], u.At(c[0]), 1e-14)
	}
	assert.Equal(t, 3., Exposure{OverheadSeconds: 3, DecodeRate: 5}.At(1e9), "no tokens need no fallback")
}

// Loss of an exponential curve, by hand: with a constant exposure it is the
// probability of failing times it, with one that grows all along it adds
// growth*(1/rate - (T + 1/rate)*exp(-rate*T)).
func TestLossOfExponentialInClosedForm(t *testing.T) {
	for _, rate := range []float64{1e-9, 1e-5, 1e-3, 0.1, 30} {
		for _, horizon := range []float64{1e-3, 1, 500, 1e6} {
			z := rate * horizon
			curve := distuv.Exponential{Rate: rate}
			constant, err := ExpectedLoss(curve, 77, 0, horizon, 0, Exposure{ContextTokens: 900, FallbackPrefillRate: 300, OverheadSeconds: 2})
			require.NoError(t, err)
			assert.InEpsilon(t, 5*-math.Expm1(-z), constant, 1e-13)
			linear, err := ExpectedLoss(curve, 77, 0, horizon, 0, Exposure{DecodeRate: 12, RemainingTokens: 1e18, FallbackPrefillRate: 300})
			require.NoError(t, err)
			if z > 0.1 {
				assert.InEpsilon(t, 12./300*(1/rate-(horizon+1/rate)*math.Exp(-z)), linear, 1e-12)
			} else {
				// rate * T^2 * (1/2 - z/3 + z^2/8 - z^3/30 + z^4/144 - ...)
				series := 0.5 - z/3 + z*z/8 - z*z*z/30 + z*z*z*z/144 - math.Pow(z, 5)/840 + math.Pow(z, 6)/5760
				assert.InEpsilon(t, 12./300*rate*horizon*horizon*series, linear, 1e-10)
			}
		}
	}
}

// Expected values by mpmath quadrature with 60 digits.
func TestExactLossOfWeibull(t *testing.T) {
	for _, c := range [][12]float64{
		{0.6, 600, 0, 0, 800, 4500, 12, 20, 3000, 250, 2.2, 18.413832792861331},
		{0.6, 600, 1800, 0, 800, 4500, 12, 20, 3000, 250, 2.2, 11.180348358143801},
		{3, 1200, 600, 18, 393, 4500, 12, 5, 3000, 250, 10.2, 12.834105704032258},
		{1000, 600, 0, 0, 1e24, 0, 12, 0, 1e15, 250, 0, 28.783404647556349},
		{1000, 600, 599, 0, 3, 100, 12, 0, 1000, 250, 2, 2.4441694213915012},
		{0.05, 1e6, 0, 0, 1e9, 1000, 0.001, 10, 1e15, 0.001, 2, 18257174.948910093},
		{2, 100, 2628.26, 0, 5, 4500, 12, 0.01, 3000, 250, 2, 18.62648564186697},
		{1.5, 28800, 1e12, 0, 10, 4500, 12, 1e-9, 3000, 250, 2, 19.197514919974383},
		{0.01, 1, 0, 0, 1e20, 0, 1, 0, 1e15, 100, 0, 420084981074.30719},
		{2.5, 30000, 10000, 100, 100.001, 10, 12, 0, 1e6, 250, 0, 7.8661956462513664e-8},
		{6, 600, 5, 0.001, 1e6, 10, 5000, 1, 1e9, 1000, 1, 2754.1680008910439},
	} {
		u := Exposure{ContextTokens: c[5], DecodeRate: c[6], WaitSeconds: c[7], RemainingTokens: c[8], FallbackPrefillRate: c[9], OverheadSeconds: c[10]}
		w := distuv.Weibull{K: c[0], Lambda: c[1]}
		got, err := ExpectedLoss(w, c[2], c[3], c[4], 0, u)
		require.NoError(t, err)
		assert.InEpsilon(t, c[11], got, 1e-10, "%v", c)
		if c[2] < 2000 { // else Survival underflows and LogSurvival cancels
			got, err = ExpectedLoss(plainCurve{w}, c[2], c[3], c[4], 0, u)
			require.NoError(t, err)
			assert.InEpsilon(t, c[11], got, 1e-8, "plain %v", c)
		}
	}
}

// directLoss is the exact loss of a step curve, drop by drop, by definition.
func directLoss(k *KaplanMeier, age, from, to float64, u Exposure) float64 {
	value := func(x float64) float64 { // of the step at the age x
		s := 1.0
		for i, t := range k.times {
			if t <= x {
				s = k.survival[i+1]
			}
		}
		return s
	}
	last := 0.0
	if len(k.times) > 0 {
		last = k.times[len(k.times)-1]
	}
	loss, before := 0.0, 1.0
	for i, t := range k.times {
		after := k.survival[i+1]
		if t > age+from && t <= age+to {
			loss += (before - after) * u.At(math.Min(math.Max(t-age, from), to))
		}
		before = after
	}
	loss /= value(age)
	// The tail between the kinks of the exposure: what is lost there, priced at
	// the mean time of failure.
	begin := math.Max(from, last-age)
	if begin >= to {
		return loss
	}
	survival := math.Exp(-k.tailRate * begin)
	if age <= last {
		survival = value(last) / value(age) * math.Exp(-k.tailRate*(begin-(last-age)))
	}
	edges := []float64{begin}
	for _, edge := range []float64{u.WaitSeconds, u.WaitSeconds + u.RemainingTokens/math.Max(u.DecodeRate, 1e-300)} {
		if edge > begin && edge < to {
			edges = append(edges, edge)
		}
	}
	edges = append(edges, to)
	for i := range edges[1:] {
		l, h := edges[i], edges[i+1]
		z := k.tailRate * (h - l)
		mean := 0.5 - z/12 // of where in between a failure falls, for small z
		if z > 1e-3 {
			mean = 1/z - 1/math.Expm1(z)
		}
		lost := survival * math.Exp(-k.tailRate*(l-begin)) * -math.Expm1(-z)
		// From points inside, as a kink's float may be that of the next one.
		early, late := u.At(l+(h-l)/4), u.At(l+(h-l)*3/4)
		loss += lost * (early + (late-early)*(mean-0.25)*2)
	}
	return loss
}

func drawExposure(t *rapid.T) Exposure {
	tokens := rapid.SampledFrom([]float64{0, 1, 100, 4500, 1e6, 1e15})
	rate := rapid.SampledFrom([]float64{1e-9, 0.5, 12, 250, 7000, 1e18})
	return Exposure{
		ContextTokens:       tokens.Draw(t, "context"),
		DecodeRate:          rapid.OneOf(rapid.Just(0.), rate).Draw(t, "decode rate"),
		WaitSeconds:         drawSeconds("wait").Draw(t, "wait"),
		RemainingTokens:     tokens.Draw(t, "remaining"),
		FallbackPrefillRate: rate.Draw(t, "fallback"),
		OverheadSeconds:     rapid.SampledFrom([]float64{0, 2.2, 500}).Draw(t, "overhead"),
	}
}

func drawSpan(t *rapid.T) (from, to float64) {
	span := rapid.OneOf(drawSeconds("span"), rapid.SampledFrom([]float64{1e18, 1e24})).Draw(t, "span")
	from = rapid.OneOf(rapid.Just(0.), drawSeconds("from")).Draw(t, "from")
	return from, from + span
}

func TestLossAgainstDirectSum(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		k := drawKaplanMeier(t)
		if k.block != nil {
			t.Skip("the oracle reads the steps as they stand")
		}
		u := drawExposure(t)
		u.DecodeRate = math.Min(u.DecodeRate, 1e6) // else a ramp is shorter than times are exact
		age := rapid.SampledFrom([]float64{0, 1, 50, 123.4, 600, 1e4}).Draw(t, "age")
		from := rapid.SampledFrom([]float64{0, 0, 1, 37.5, 300}).Draw(t, "from")
		to := from + rapid.SampledFrom([]float64{0.25, 12, 50, 471, 1e5}).Draw(t, "span")
		want := directLoss(k, age, from, to, u)
		got, err := ExpectedLoss(k, age, from, to, 0, u)
		require.NoError(t, err)
		require.InDelta(t, want, got, 1e-10*want+1e-15*u.At(to), "k %v %v", k.times, k.survival)
	})
}

func TestLossProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		curve, u := drawCurve(t), drawExposure(t)
		age := drawSeconds("age").Draw(t, "age")
		from, to := drawSpan(t)
		cells := rapid.SampledFrom([]int{0, 0, 1, 2, 16, 100}).Draw(t, "cells")
		loss, err := ExpectedLoss(curve, age, from, to, cells, u)
		require.NoError(t, err)
		begin, err := ConditionalSurvival(curve, age, from)
		require.NoError(t, err)
		end, err := ConditionalSurvival(curve, age, to)
		require.NoError(t, err)
		require.GreaterOrEqual(t, loss, 0.)
		// The difference of two survivals is itself known only to the rounding of
		// their logarithms, and of what a foreign curve returns: the sum goes down
		// to the least of what it returned at any edge.
		noise := 2e-15 * (1 - math.Log(math.Max(begin, 1e-300)))
		if l, ok := curve.(logCurve); ok {
			noise += 2e-15 * -l.LogSurvival(age+to)
		}
		if w, ok := curve.(distuv.Weibull); ok {
			noise *= 1 + w.K/2 // times which the rounding of age + from is raised
		}
		require.LessOrEqual(t, loss, (begin-end+math.Min(noise, 1)*begin)*u.At(to)*(1+1e-12)+1e-300, "from %v to %v", from, to)

		dearer := u
		dearer.OverheadSeconds += rapid.SampledFrom([]float64{1e-9, 1, 1e6}).Draw(t, "more")
		more, err := ExpectedLoss(curve, age, from, to, cells, dearer)
		require.NoError(t, err)
		require.GreaterOrEqual(t, more, loss)
	})
}

// Splitting the span splits the loss, which ties the exact values of short and
// of long spans together, whatever the age.
func TestExactLossAddsUp(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		curve, u := drawCurve(t), drawExposure(t)
		age := rapid.SampledFrom([]float64{0, 1, 50, 123.5, 600, 16384}).Draw(t, "age")
		a := rapid.SampledFrom([]float64{0, 0.25, 3, 512}).Draw(t, "a")
		b := a + rapid.SampledFrom([]float64{0.5, 16, 300, 4096}).Draw(t, "to the middle")
		c := b + rapid.SampledFrom([]float64{0.5, 16, 300, 4096}).Draw(t, "to the end")
		whole := must(ExpectedLoss(curve, age, a, c, 0, u))
		parts := must(ExpectedLoss(curve, age, a, b, 0, u)) + must(ExpectedLoss(curve, age, b, c, 0, u))
		tolerance := 4e-10*whole + 1e-300
		if _, plain := curve.(plainCurve); plain {
			tolerance += 1e-15 * u.At(c) // of subtracted survivals
		} else if l, ok := curve.(logCurve); ok {
			tolerance += 4e-16 * math.Max(1, -l.LogSurvival(age)) * u.At(c)
		}
		require.InDelta(t, whole, parts, tolerance)
	})
}

func TestCellsTendToTheExactLoss(t *testing.T) {
	durations, observed := benchmarkSessions(200)
	for name, curve := range map[string]Curve{
		"steps": mustKaplanMeier(t, durations, observed), "weibull": distuv.Weibull{K: 0.6, Lambda: 600},
		"exponential": distuv.Exponential{Rate: 1e-3}, "plain": plainCurve{distuv.Weibull{K: 3, Lambda: 1200}},
	} {
		for _, age := range []float64{0, 333, 1800, 9000} {
			exact := must(ExpectedLoss(curve, age, 12, 700, 0, benchmarkExposure))
			// A failure is priced at most half a cell from where it falls.
			slope := benchmarkExposure.DecodeRate / benchmarkExposure.FallbackPrefillRate
			lost := must(ConditionalSurvival(curve, age, 12)) - must(ConditionalSurvival(curve, age, 700))
			for _, cells := range []int{1, 16, 256, 4096, 65536} {
				got := must(ExpectedLoss(curve, age, 12, 700, cells, benchmarkExposure))
				assert.InDelta(t, exact, got, lost*slope*688/float64(cells)/2+1e-9*exact, "%s age %v cells %v", name, age, cells)
			}
		}
	}
}

// oneCellAtATime is the sum by its definition.
func oneCellAtATime(k *KaplanMeier, age, from, to float64, cells int, u Exposure) float64 {
	loss := 0.0
	edge := func(i int) float64 { return from + (to-from)*float64(i)/float64(cells) }
	for i := range cells {
		lost := must(ConditionalSurvival(k, age, edge(i))) - must(ConditionalSurvival(k, age, edge(i+1)))
		loss += lost * u.At((edge(i)+edge(i+1))/2)
	}
	return loss
}

func TestCellsByDefinition(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		k, u := drawKaplanMeier(t), drawExposure(t)
		age := rapid.SampledFrom([]float64{0, 50, 100, 250, 1e4}).Draw(t, "age")
		from := rapid.SampledFrom([]float64{0, 50, 64}).Draw(t, "from")
		to := from + rapid.SampledFrom([]float64{50, 100, 800, 1600}).Draw(t, "span")
		cells := rapid.SampledFrom([]int{1, 2, 4, 16}).Draw(t, "cells")
		want := oneCellAtATime(k, age, from, to, cells, u)
		got := must(ExpectedLoss(k, age, from, to, cells, u))
		require.InDelta(t, want, got, 1e-12*want+1e-15*u.At(to))
	})
}

// Sessions are drawn from the curve itself; the mean cost of those that end
// within the span is the loss, to within its standard error.
func TestLossAgainstMonteCarlo(t *testing.T) {
	random := rand.New(rand.NewPCG(7, 11))
	durations, observed := benchmarkSessions(200)
	steps := mustKaplanMeier(t, durations, observed)
	weibull := distuv.Weibull{K: 1.5, Lambda: 2400}
	const draws, age, to = 400_000, 900.0, 500.0
	u := benchmarkExposure
	for _, c := range []struct {
		name  string
		curve Curve
		draw  func() float64 // a time of failure from now, given the age
	}{
		{"weibull", weibull, func() float64 {
			h := math.Pow(age/weibull.Lambda, weibull.K) + random.ExpFloat64()
			return weibull.Lambda*math.Pow(h, 1/weibull.K) - age
		}},
		{"steps", steps, func() float64 {
			level := random.Float64() * steps.Survival(age)
			seconds, _, err := steps.Quantile(1 - level)
			require.NoError(t, err)
			return seconds - age
		}},
	} {
		var sum, squares, sumCells, squaresCells float64
		for range draws {
			cost, costInCells := 0.0, 0.0
			if failure := c.draw(); failure <= to {
				cost = u.At(failure)
				costInCells = u.At((math.Ceil(failure/to*16) - 0.5) * to / 16)
			}
			sum, squares = sum+cost, squares+cost*cost
			sumCells, squaresCells = sumCells+costInCells, squaresCells+costInCells*costInCells
		}
		check := func(what string, cells int, sum, squares float64) {
			mean := sum / draws
			standardError := math.Sqrt((squares/draws - mean*mean) / draws)
			assert.InDelta(t, mean, must(ExpectedLoss(c.curve, age, 0, to, cells, u)), 4*standardError, "%s %s", c.name, what)
			assert.Less(t, standardError, mean/100, "a check that tells something")
		}
		check("exact", 0, sum, squares)
		check("16 cells", 16, sumCells, squaresCells)
	}
}

// Every time times a power of two, every rate divided by it: every loss times
// it, to the last bit where no quadrature or logarithm of a session comes in.
func TestLossScalesWithTime(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		factor := math.Ldexp(1, rapid.IntRange(-12, 12).Draw(t, "power"))
		age := rapid.SampledFrom([]float64{0, 3.7, 51, 444, 1e5}).Draw(t, "age")
		to := rapid.SampledFrom([]float64{0.3, 40, 777, 1e5}).Draw(t, "to")
		u := Exposure{ContextTokens: 4500, DecodeRate: 12, WaitSeconds: 3.3, RemainingTokens: 3000, FallbackPrefillRate: 250, OverheadSeconds: 2.2}
		slow := u
		slow.DecodeRate, slow.FallbackPrefillRate = u.DecodeRate/factor, u.FallbackPrefillRate/factor
		slow.WaitSeconds, slow.OverheadSeconds = u.WaitSeconds*factor, u.OverheadSeconds*factor
		durations := rapid.SliceOfN(rapid.Float64Range(0.5, 900), 1, 50).Draw(t, "durations")
		observed := rapid.SliceOfN(rapid.Bool(), len(durations), len(durations)).Draw(t, "observed")
		observed[0] = true
		scaled := make([]float64, len(durations))
		for i, d := range durations {
			scaled[i] = d * factor
		}
		pairs := [][2]Curve{
			{mustKaplanMeier(t, durations, observed), mustKaplanMeier(t, scaled, observed)},
			{distuv.Weibull{K: 0.6, Lambda: 600}, distuv.Weibull{K: 0.6, Lambda: 600 * factor}},
			{distuv.Exponential{Rate: 1e-3}, distuv.Exponential{Rate: 1e-3 / factor}},
		}
		for _, pair := range pairs {
			for _, cells := range []int{0, 16} {
				a := must(ExpectedLoss(pair[0], age, 0, to, cells, u))
				b := must(ExpectedLoss(pair[1], age*factor, 0, to*factor, cells, slow))
				require.Equal(t, a*factor, b, "%T cells %d", pair[0], cells)
			}
		}
	})
}

// A curve of steps that is known by its Survival alone is found by quadrature.
func TestQuadratureOfSteps(t *testing.T) {
	durations, observed := benchmarkSessions(200)
	k := mustKaplanMeier(t, durations, observed)
	for _, age := range []float64{0, 700, 4000} {
		want := must(ExpectedLoss(k, age, 3, 800, 0, benchmarkExposure))
		got := must(ExpectedLoss(plainCurve{k}, age, 3, 800, 0, benchmarkExposure))
		assert.InEpsilon(t, want, got, 1e-10, "age %v", age)
	}
}

// The work for a curve is bounded however it behaves.
func TestQuadratureEnds(t *testing.T) {
	asked := 0
	jagged := curveFunc(func(t float64) float64 {
		asked++
		return math.Floor(1e6/(1+t)+0.5) / 1e6 * (1 - 1e-7*math.Abs(math.Sin(1e9*t)))
	})
	loss := must(ExpectedLoss(jagged, 0, 0, 1e9, 0, benchmarkExposure))
	assert.LessOrEqual(t, asked, 3*maxEvaluations+2000)
	smooth := curveFunc(func(t float64) float64 { return 1 / (1 + t) })
	assert.InEpsilon(t, must(ExpectedLoss(smooth, 0, 0, 1e9, 0, benchmarkExposure)), loss, 1e-4)
}

func TestLobattoRules(t *testing.T) {
	// With S = 1 - t^n until 1, the integrand in v is of degree 2+3n.
	for n := 1.0; n <= 5; n++ {
		c := conditional{form: formPlain, base: 1, plain: curveFunc(func(t float64) float64 { return 1 - math.Pow(t, n) })}
		q := quadrature{c: &c, width: 1, end: point{0, 0}}
		fine, uncertainty := q.lobatto(0.5, q.excess(0.125), 0.75, q.excess(0.75*0.75*0.75), 1, 0)
		assert.InEpsilon(t, 1-1./8-(1-math.Pow(8, -n-1))/(n+1), fine, 1e-14, "n = %v", n)
		if 2+3*n <= 9 {
			assert.Less(t, uncertainty, 1e-15, "n = %v", n)
		} else {
			assert.Greater(t, uncertainty, 1e-12, "n = %v", n)
		}
	}
}

// A fall that ends before the first node of the first panel is seen.
func TestQuadratureOfAnEarlyFall(t *testing.T) {
	u := Exposure{DecodeRate: 1, RemainingTokens: 1e9, FallbackPrefillRate: 1}
	for _, scale := range []float64{1e-5, 1e-7, 1e-9} {
		for _, shape := range []float64{0.4, 1.7} {
			w := distuv.Weibull{K: shape, Lambda: scale}
			assert.InEpsilon(t, w.Mean(), must(ExpectedLoss(w, 0, 0, 16.5, 0, u)), 1e-10, "%v", w)
		}
		// A share dies at once, the rest lasts.
		mixed := curveFunc(func(t float64) float64 { return 0.9*math.Exp(-t/scale) + 0.1*math.Exp(-t/10) })
		want := 0.9*scale + 0.1*(10-(16.5+10)*math.Exp(-1.65))
		assert.InEpsilon(t, want, must(ExpectedLoss(mixed, 0, 0, 16.5, 0, u)), 1e-10, "scale %v", scale)
	}
}

func TestLossAllocatesNothing(t *testing.T) {
	w, e := distuv.Weibull{K: 0.6, Lambda: 600}, distuv.Exponential{Rate: 1e-3}
	durations, observed := benchmarkSessions(200)
	for _, curve := range []Curve{mustKaplanMeier(t, durations, observed), w, &w, e, &e, logCurve{w}, plainCurve{w}} {
		for _, cells := range []int{0, 16} {
			assert.Zero(t, testing.AllocsPerRun(20, func() {
				_, _ = ExpectedLoss(curve, 60, 1, 800, cells, benchmarkExposure)
			}), "%T", curve)
		}
		assert.Zero(t, testing.AllocsPerRun(20, func() { _, _ = ConditionalSurvival(curve, 60, 800) }), "%T", curve)
	}
}

// benchmarkSessions are n sessions of a spot node, four in ten still open.
func benchmarkSessions(n int) (durations []float64, observed []bool) {
	random := rand.New(rand.NewPCG(1, 2))
	weibull := distuv.Weibull{K: 1.5, Lambda: 2400, Src: random}
	for range n {
		durations = append(durations, weibull.Rand())
		observed = append(observed, random.Float64() < 0.6)
	}
	return durations, observed
}

var benchmarkExposure = Exposure{ContextTokens: 4500, DecodeRate: 12, WaitSeconds: 20, RemainingTokens: 3000, FallbackPrefillRate: 250, OverheadSeconds: 2.2}

func BenchmarkExpectedLoss(b *testing.B) {
	durations, observed := benchmarkSessions(200)
	for _, curve := range []struct {
		name  string
		curve Curve
	}{
		{"km200", mustKaplanMeier(b, durations, observed)},
		{"weibull", distuv.Weibull{K: 0.6, Lambda: 600}},
		{"exponential", distuv.Exponential{Rate: 1e-4}},
		{"plain", plainCurve{distuv.Weibull{K: 0.6, Lambda: 600}}},
	} {
		for _, age := range []float64{0, 1800, 20000} {
			for _, cells := range []int{16, 0} {
				b.Run(fmt.Sprintf("%s/age=%v/cells=%d", curve.name, age, cells), func(b *testing.B) {
					b.ReportAllocs()
					for range b.N {
						if _, err := ExpectedLoss(curve.curve, age, 0, 800, cells, benchmarkExposure); err != nil {
							b.Fatal(err)
						}
					}
				})
			}
		}
	}
}
