package kvpolicy

import (
	"encoding/csv"
	"errors"
	"io/fs"
	"math"
	"math/rand/v2"
	"os"
	"strconv"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"gonum.org/v1/gonum/stat/distuv"
	"pgregory.net/rapid"
)

func TestFitsAgainstR(t *testing.T) {
	fitted := 0
	for _, c := range referenceCases(t) {
		if c.WeibullMLE != nil {
			fitted++
			w, _, err := FitWeibull(c.Durations, c.observed())
			require.NoError(t, err, c.Name)
			assert.InEpsilon(t, c.WeibullMLE.Shape, w.K, 1e-6, c.Name)
			assert.InEpsilon(t, c.WeibullMLE.Scale, w.Lambda, 1e-6, c.Name)
		}
		for _, tail := range c.Tails {
			if tail.T0 == 0 {
				e, _, err := FitExponential(c.Durations, c.observed())
				require.NoError(t, err, c.Name)
				assert.InEpsilon(t, tail.Rate, e.Rate, 1e-12, c.Name)
			}
		}
	}
	assert.NotZero(t, fitted)
}

// logLikelihood is that of the sessions under a curve, term by term.
func logLikelihood(logDensity, logSurvival func(float64) float64, sessions []Session) float64 {
	sum := 0.0
	for _, s := range sessions {
		if s.DurationSeconds == 0 {
			continue
		}
		if s.Observed {
			sum += logDensity(s.DurationSeconds)
		} else {
			sum += logSurvival(s.DurationSeconds)
		}
		if s.EnteredSeconds > 0 {
			sum -= logSurvival(s.EnteredSeconds)
		}
	}
	return sum
}

// What a fit returns is a maximum: the likelihood, written out, falls to all
// sides of it, and the AIC is made of it. Where there is no fit the sessions
// determine none.
func TestFitsAreMaxima(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 40).Draw(t, "n")
		random := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 1))
		law := distuv.Weibull{K: rapid.SampledFrom([]float64{0.2, 0.6, 1, 3, 30, 300}).Draw(t, "shape"), Lambda: 600, Src: random}
		late, rounded := rapid.Bool().Draw(t, "late"), rapid.Bool().Draw(t, "rounded")
		var sessions []Session
		for range n {
			s := Session{DurationSeconds: law.Rand(), Observed: random.Float64() < 0.7}
			if rounded {
				s.DurationSeconds = math.Round(s.DurationSeconds/100) * 100
			}
			if late && random.Float64() < 0.5 {
				s.EnteredSeconds = s.DurationSeconds * random.Float64() * 0.99
			}
			sessions = append(sessions, s)
		}
		var durations, entered []float64
		var observed []bool
		events, several, longest := 0, false, 0.0
		for _, s := range sessions {
			durations, observed, entered = append(durations, s.DurationSeconds), append(observed, s.Observed), append(entered, s.EnteredSeconds)
			longest = math.Max(longest, s.DurationSeconds)
		}
		for _, s := range sessions {
			if s.Observed && s.DurationSeconds > 0 {
				events++
				several = several || s.DurationSeconds < longest
			}
		}
		e, aicExponential, err := FitExponential(durations, observed, entered...)
		if events == 0 {
			require.ErrorContains(t, err, "observed")
			_, _, err = FitWeibull(durations, observed, entered...)
			require.ErrorContains(t, err, "observed")
			return
		}
		require.NoError(t, err)
		likelihood := func(rate float64) float64 {
			d := distuv.Exponential{Rate: rate}
			return logLikelihood(d.LogProb, func(t float64) float64 { return -rate * t }, sessions)
		}
		most := likelihood(e.Rate)
		require.InDelta(t, 2-2*most, aicExponential, 1e-9*math.Abs(most)+1e-9)
		require.Less(t, likelihood(e.Rate*1.01), most)
		require.Less(t, likelihood(e.Rate/1.01), most)

		w, aicWeibull, err := FitWeibull(durations, observed, entered...)
		if !several {
			require.ErrorContains(t, err, "several lengths")
			return
		}
		if err != nil {
			// Only late entries (a hazard falling faster than any Weibull's) and
			// events too close together leave the range.
			require.ErrorContains(t, err, "determine a Weibull")
			require.True(t, late || law.K > 1, "%v", err)
			return
		}
		both := func(shape, scale float64) float64 {
			d := distuv.Weibull{K: shape, Lambda: scale}
			return logLikelihood(d.LogProb, d.LogSurvival, sessions)
		}
		most = both(w.K, w.Lambda)
		require.InDelta(t, 4-2*most, aicWeibull, 1e-8*math.Abs(most)+1e-8)
		require.LessOrEqual(t, aicWeibull-4, aicExponential-2+1e-6, "one of the Weibulls is the exponential")
		for _, step := range []float64{1e-3, 0.1} {
			for _, direction := range [][2]float64{{1, 0}, {-1, 0}, {0, 1}, {0, -1}, {1, 1}, {1, -1}, {-1, 1}, {-1, -1}} {
				require.LessOrEqual(t, both(w.K*math.Exp(step*direction[0]), w.Lambda*math.Exp(step*direction[1])), most+1e-9*math.Abs(most))
			}
		}
	})
}

func TestFitsFromFarOutTimes(t *testing.T) {
	for _, unit := range []float64{1e-300, 1e-12, 1, 1e6} {
		durations := []float64{1 * unit, 2 * unit, 3 * unit, 4 * unit, 5 * unit}
		w, _, err := FitWeibull(durations, []bool{true, true, true, true, true})
		require.NoError(t, err)
		assert.InEpsilon(t, 2.2938066707123173, w.K, 1e-7)
		assert.InEpsilon(t, 3.3942907181094863*unit, w.Lambda, 1e-7)
	}
}

func TestChooseCurve(t *testing.T) {
	random := rand.New(rand.NewPCG(3, 5))
	draw := func(n int, law interface{ Rand() float64 }, limit float64) (durations []float64, observed []bool) {
		for range n {
			d := law.Rand()
			durations, observed = append(durations, math.Min(d, limit)), append(observed, d < limit)
		}
		return durations, observed
	}
	check := func(want CurveKind, reason CurveReason, durations []float64, observed []bool) CurveChoice {
		t.Helper()
		choice, err := ChooseCurve(durations, observed)
		require.NoError(t, err)
		assert.Equal(t, want, choice.Kind, choice.String())
		assert.Equal(t, reason, choice.Reason, choice.String())
		assert.NoError(t, validateCurve("curve", choice.Curve))
		return choice
	}
	check(KindKaplanMeier, NoCompletedSession, nil, nil)
	check(KindKaplanMeier, NoCompletedSession, []float64{0, 90}, []bool{true, false})
	few := check(KindExponential, FewCompletedSessions, []float64{100, 200, 300}, []bool{true, true, false})
	assert.InEpsilon(t, 2./600, few.Curve.(distuv.Exponential).Rate, 1e-14)

	check(KindKaplanMeier, NoParametricFit, []float64{100, 100, 100, 100, 100}, []bool{true, true, true, true, true})
	durations, observed := draw(400, distuv.Exponential{Rate: 1e-3, Src: random}, 1500)
	check(KindExponential, LowerAIC, durations, observed)
	durations, observed = draw(400, distuv.Weibull{K: 0.6, Lambda: 600, Src: random}, 1500)
	choice := check(KindWeibull, LowerAIC, durations, observed)
	assert.Less(t, choice.WeibullAIC, choice.ExponentialAIC)
	assert.Contains(t, choice.String(), "weibull: lower_aic (AIC exponential ")
	// A limit at which a third of the sessions end is what no Weibull has.
	durations, observed = draw(400, distuv.Exponential{Rate: 1e-3, Src: random}, 1000)
	for i := range observed {
		observed[i] = true
	}
	limited := check(KindKaplanMeier, NoParametricFit, durations, observed)
	assert.Greater(t, limited.Distance, 1.)
}

// The distance is Kolmogorov's statistic where nothing is censored.
func TestDistanceIsKolmogorovs(t *testing.T) {
	durations := []float64{1, 2, 2, 5, 9}
	k := mustKaplanMeier(t, durations, []bool{true, true, true, true, true})
	e := distuv.Exponential{Rate: 0.3}
	most := 0.0
	for i, d := range durations {
		for _, empirical := range []float64{1 - float64(i)/5, 1 - float64(i+1)/5} {
			if d == 2 && empirical == 0.6 { // inside a tie
				continue
			}
			if empirical > 0 {
				most = math.Max(most, math.Abs(empirical-e.Survival(d)))
			}
		}
	}
	assert.InEpsilon(t, most*math.Sqrt(5), k.distance(e), 1e-12)
}

// Two thirds of the machines end at Google's limit of 24 hours or before; no
// Weibull ends there.
func TestChooseCurveOnPreemptibleMachines(t *testing.T) {
	durations, observed := sessionFile(t, "../shared/data/spot/sessions_gcp_preemptible.csv")
	choice, err := ChooseCurve(durations, observed)
	require.NoError(t, err)
	assert.Equal(t, KindKaplanMeier, choice.Kind, choice.String())
	assert.Equal(t, NoParametricFit, choice.Reason)
}

// sessionFile reads sessions with the columns duration_seconds and observed.
func sessionFile(t *testing.T, path string) (durations []float64, observed []bool) {
	t.Helper()
	file, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		t.Skipf("no shared data here: %v", err)
	}
	require.NoError(t, err)
	defer file.Close()
	rows, err := csv.NewReader(file).ReadAll()
	require.NoError(t, err)
	column := map[string]int{}
	for i, name := range rows[0] {
		column[name] = i
	}
	for _, row := range rows[1:] {
		d, err := strconv.ParseFloat(row[column["duration_seconds"]], 64)
		require.NoError(t, err)
		durations, observed = append(durations, d), append(observed, row[column["observed"]] == "1")
	}
	return durations, observed
}

// Two thousand nodes watched for a week, one of them lost: the rate, 8e-10 per
// second, is none that a decision takes.
func TestAChosenCurveCanBeUsed(t *testing.T) {
	for name, c := range map[string]struct{ censored, completed float64 }{
		"hardly ever lost": {600_000, 300_000},
		"lost at once":     {1e-20, 1e-20},
	} {
		t.Run(name, func(t *testing.T) {
			durations, observed := make([]float64, 2000), make([]bool, 2000)
			for i := range durations {
				durations[i] = c.censored
			}
			durations[0], observed[0] = c.completed, true
			if c.censored < 1 {
				for i := range observed {
					observed[i] = true
				}
			}
			var field *FieldError
			_, _, err := FitExponential(durations, observed)
			require.ErrorAs(t, err, &field)
			assert.Equal(t, "observed", field.Path)
			choice, err := ChooseCurve(durations, observed)
			require.NoError(t, err)
			assert.Equal(t, KindKaplanMeier, choice.Kind)
			assert.Equal(t, NoParametricFit, choice.Reason)
			assert.Equal(t, "km: no_parametric_fit", choice.String())
			_, err = ConditionalSurvival(choice.Curve, 0, 1)
			assert.NoError(t, err)
		})
	}
}
