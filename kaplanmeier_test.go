package kvpolicy

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"math/big"
	"os"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// referenceCase is a data set that R's survival package was run on.
type referenceCase struct {
	Name        string
	Durations   []float64
	Observed    []int
	Times       []float64
	NRisk       []int `json:"n_risk"`
	Surv        []float64
	Cumhaz      []float64
	StdErr      []*float64          `json:"std_err"`
	LowerLog    []*float64          `json:"lower_log"`
	UpperLog    []*float64          `json:"upper_log"`
	LowerLogLog []*float64          `json:"lower_loglog"`
	UpperLogLog []*float64          `json:"upper_loglog"`
	Quantiles   map[string]*float64 `json:"quantile_first"`
	RMST        []struct{ Tau, Value float64 }
	Conditional []struct{ Uptime, Horizon, Prob float64 }
	Tails       []struct {
		T0       float64
		Events   int
		Exposure float64
		Rate     float64
	} `json:"exponential_tail"`
	WeibullMLE *struct{ Shape, Scale float64 } `json:"weibull_mle"`
}

func (c *referenceCase) observed() []bool {
	observed := make([]bool, len(c.Observed))
	for i, o := range c.Observed {
		observed[i] = o == 1
	}
	return observed
}

func referenceCases(t *testing.T) []referenceCase {
	t.Helper()
	data, err := os.ReadFile("../shared/data/survival/km_reference.json")
	if errors.Is(err, fs.ErrNotExist) {
		t.Skipf("no shared data here: %v", err)
	}
	require.NoError(t, err)
	var reference struct{ Cases []referenceCase }
	require.NoError(t, json.Unmarshal(data, &reference))
	require.NotEmpty(t, reference.Cases)
	return reference.Cases
}

// R's curve is flat behind the last event and 0 where all fail at it; ours has a
// tail and half the value before. Until the last event they are the same.
func TestAgainstR(t *testing.T) {
	for _, c := range referenceCases(t) {
		t.Run(c.Name, func(t *testing.T) {
			k := mustKaplanMeier(t, c.Durations, c.observed())
			last := k.last()
			near := func(want, got float64, what string) {
				t.Helper()
				assert.InDelta(t, want, got, 1e-12*math.Max(1, math.Abs(want)), what)
			}
			before := 1.0
			for i, time := range c.Times {
				if time > last {
					break
				}
				what := fmt.Sprintf("at %v", time)
				near(c.Cumhaz[i], k.CumulativeHazard(time), what)
				se, known := k.StandardError(time)
				if c.Surv[i] == 0 {
					near(before/2, k.Survival(time), what)
					assert.False(t, known, what)
					for _, scale := range []BandScale{BandLog, BandLogLog} {
						lower, upper, err := k.Band(time, 0.95, scale)
						require.NoError(t, err)
						assert.Equal(t, [2]float64{0, 1}, [2]float64{lower, upper}, what)
					}
					continue
				}
				before = c.Surv[i]
				near(c.Surv[i], k.Survival(time), what)
				assert.True(t, known, what)
				near(*c.StdErr[i], se, what)
				for scale, limits := range map[BandScale][2]*float64{
					BandLog: {c.LowerLog[i], c.UpperLog[i]}, BandLogLog: {c.LowerLogLog[i], c.UpperLogLog[i]},
				} {
					lower, upper, err := k.Band(time, 0.95, scale)
					require.NoError(t, err)
					if limits[0] == nil { // R has none where S is 1
						assert.Equal(t, [2]float64{1, 1}, [2]float64{lower, upper}, what)
						continue
					}
					near(*limits[0], lower, what)
					near(*limits[1], upper, what)
				}
			}
			for p, want := range c.Quantiles {
				var share float64
				require.NoError(t, json.Unmarshal([]byte(p), &share))
				got, withinData, err := k.Quantile(share)
				require.NoError(t, err)
				switch {
				case want == nil:
					assert.False(t, withinData, p)
					assert.Greater(t, got, last, p)
				case c.Surv[slices.Index(c.Times, *want)] == 0 && !withinData: // half is above the level
					assert.Greater(t, got, last, p)
				default:
					assert.True(t, withinData, p)
					assert.Equal(t, *want, got, p)
				}
				if !withinData {
					near(1-share, k.Survival(got), p)
				}
			}
			for _, r := range c.RMST {
				if r.Tau <= last {
					got, err := k.RestrictedMean(r.Tau)
					require.NoError(t, err)
					near(r.Value, got, fmt.Sprintf("restricted mean to %v", r.Tau))
				}
			}
			for _, r := range c.Conditional {
				if r.Uptime+r.Horizon < last {
					got, err := ConditionalSurvival(k, r.Uptime, r.Horizon)
					require.NoError(t, err)
					near(r.Prob, got, fmt.Sprintf("%+v", r))
				}
			}
			for _, r := range c.Tails {
				got, err := k.ExcessRate(r.T0)
				require.NoError(t, err)
				assert.InEpsilon(t, r.Rate, got, 1e-12)
			}
		})
	}
}

// exactly is the estimate from its definition, in rational numbers, with a pass
// over all sessions for each event time.
func exactly(durations []float64, observed []bool, entered []float64, t float64) *big.Rat {
	s := big.NewRat(1, 1)
	times := slices.Clone(durations)
	slices.Sort(times)
	for _, time := range slices.Compact(times) {
		if time > t {
			break
		}
		var events, atRisk int64
		for i, d := range durations {
			if d >= time && (entered == nil || entered[i] == 0 || entered[i] < time) {
				atRisk++
				if d == time && observed[i] {
					events++
				}
			}
		}
		switch {
		case events == 0:
		case events == atRisk:
			s.Mul(s, big.NewRat(1, 2))
		default:
			s.Mul(s, big.NewRat(atRisk-events, atRisk))
		}
	}
	return s
}

func TestKaplanMeierByDefinition(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		k := drawKaplanMeier(t)
		var durations, entered []float64
		var observed []bool
		for _, s := range k.sessions {
			durations, observed, entered = append(durations, s.DurationSeconds), append(observed, s.Observed), append(entered, s.EnteredSeconds)
		}
		for i := range k.times {
			want, _ := exactly(durations, observed, entered, k.times[i]).Float64()
			require.InEpsilon(t, want, k.Survival(k.times[i]), 1e-13)
		}
		// The order of sessions changes nothing, and they are copied.
		order := rapid.Permutation(k.sessions).Draw(t, "order")
		for i, s := range order {
			durations[i], observed[i], entered[i] = s.DurationSeconds, s.Observed, s.EnteredSeconds
		}
		shuffled := mustKaplanMeier(t, durations, observed, entered...)
		for i := range durations {
			durations[i], observed[i], entered[i] = -1, true, 5
		}
		require.Equal(t, k, shuffled)
	})
}

func TestKaplanMeierTail(t *testing.T) {
	for _, c := range []struct {
		name      string
		durations []float64
		observed  []bool
		rate      float64
		atLast    float64
	}{
		{"no sessions", nil, nil, 1. / 3600, 1},
		{"all censored", []float64{50, 90}, []bool{false, false}, 1. / 3600, 1},
		{"all fail", []float64{100, 300}, []bool{true, true}, 1. / 200, 0.25},
		{"one fails", []float64{100}, []bool{true}, 1. / 100, 0.5},
		{"no length", []float64{0, 0}, []bool{true, true}, 1. / 3600, 0.5},
		{"a longer one is open", []float64{100, 300}, []bool{true, false}, 1. / 100, 0.5},
		{"denormal", []float64{5e-324}, []bool{true}, math.MaxFloat64, 0.5},
	} {
		k := mustKaplanMeier(t, c.durations, c.observed)
		assert.Equal(t, c.rate, k.TailRate(), c.name)
		assert.InEpsilon(t, c.atLast, k.Survival(k.last()), 1e-15, c.name)
		assert.InEpsilon(t, c.atLast*math.Exp(-1), k.Survival(k.last()+1/c.rate), 1e-12, c.name)
		s, err := ConditionalSurvival(k, 1e12, 1/c.rate)
		require.NoError(t, err)
		assert.InEpsilon(t, math.Exp(-1), s, 1e-12, c.name)
	}
	k := mustKaplanMeier(t, []float64{100, 200, 200, 400, 400}, []bool{true, true, false, false, false})
	excess, err := k.MaximumLikelihoodTail(0)
	require.NoError(t, err)
	assert.InEpsilon(t, 2./1300, excess.TailRate(), 1e-15)
	excess, err = k.MaximumLikelihoodTail(0.2)
	require.NoError(t, err)
	assert.InEpsilon(t, 1./800, excess.TailRate(), 1e-15, "what 4 sessions lasted beyond 100")
	assert.Equal(t, 1./150, k.TailRate(), "the estimate itself is unchanged")
	assert.Equal(t, k.Survival(199), excess.Survival(199))
	late := mustKaplanMeier(t, []float64{100, 200}, []bool{true, true}, 0, 150)
	rate, err := late.ExcessRate(0)
	require.NoError(t, err)
	assert.InEpsilon(t, 2./150, rate, 1e-15)
}

// Sessions that follow one another, each watched alone: every one halves the
// estimate, far below what a float64 holds.
func TestLateEntriesWithoutUnderflow(t *testing.T) {
	const n = 5000
	durations, entered, observed := make([]float64, n), make([]float64, n), make([]bool, n)
	for i := range n {
		durations[i], entered[i], observed[i] = float64(i+1), float64(i), true
	}
	k := mustKaplanMeier(t, durations, observed, entered...)
	assert.Zero(t, k.Survival(n-1))
	for _, age := range []float64{0, 255, 256, 257, 2000.5, 4990} {
		for _, ahead := range []int{1, 2, 9, 300, 1000} {
			if int(age)+ahead > n {
				continue
			}
			s, err := ConditionalSurvival(k, age, float64(ahead))
			require.NoError(t, err)
			assert.InEpsilon(t, math.Pow(2, -float64(ahead)), s, 1e-12, "age %v ahead %v", age, ahead)
			// The loss: an event i ahead has the weight 2^-i.
			want := 0.0
			for i := 1; i <= ahead; i++ {
				want += math.Pow(2, -float64(i)) * (7 + 2*(math.Floor(age)+float64(i)-age))
			}
			loss, err := ExpectedLoss(k, age, 0, float64(ahead), 0, Exposure{OverheadSeconds: 7, DecodeRate: 2, RemainingTokens: 1e9, FallbackPrefillRate: 1})
			require.NoError(t, err)
			assert.InEpsilon(t, want, loss, 1e-12, "age %v ahead %v", age, ahead)
		}
	}
	seconds, within, err := k.Quantile(0.999)
	require.NoError(t, err)
	assert.True(t, within)
	assert.Equal(t, 10., seconds)
}

func TestRestrictedMean(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		k := drawKaplanMeier(t)
		horizon := rapid.SampledFrom([]float64{0, 1, 75, 600, 1e5}).Draw(t, "horizon")
		got, err := k.RestrictedMean(horizon)
		require.NoError(t, err)
		want, from, s := 0.0, 0.0, 1.0
		for i, time := range k.times {
			if time > horizon {
				break
			}
			want += s * (time - from)
			from, s = time, k.Survival(k.times[i])
		}
		if next := k.passed(horizon, 0, len(k.times)); next < len(k.times) {
			want += s * (horizon - from)
		} else if horizon > from {
			want += s * -math.Expm1(-k.tailRate*(horizon-from)) / k.tailRate
		}
		require.InDelta(t, want, got, 1e-12*want+1e-300)
	})
}

func TestKaplanMeierErrors(t *testing.T) {
	nan := math.NaN()
	for _, c := range []struct {
		path      string
		durations []float64
		observed  []bool
		entered   []float64
	}{
		{"observed", []float64{1, 2}, []bool{true}, nil},
		{"observed", nil, []bool{true}, nil},
		{"entered", []float64{1, 2}, []bool{true, true}, []float64{0}},
		{"durations[1]", []float64{1, -2}, []bool{true, true}, nil},
		{"durations[0]", []float64{nan, -2}, []bool{true, true}, nil},
		{"durations[1]", []float64{1e12, 1.1e12}, []bool{true, true}, nil},
		{"durations[0]", []float64{math.Inf(1)}, []bool{false}, nil},
		{"entered[1]", []float64{5, 5}, []bool{true, true}, []float64{1, 6}},
		{"entered[1]", []float64{5, 5}, []bool{true, true}, []float64{1, 5}},
		{"entered[0]", []float64{5}, []bool{false}, []float64{-1}},
		{"entered[0]", []float64{5}, []bool{false}, []float64{nan}},
	} {
		_, err := NewKaplanMeier(c.durations, c.observed, c.entered...)
		var field *FieldError
		require.ErrorAs(t, err, &field)
		assert.Equal(t, c.path, field.Path)
		_, _, err = FitWeibull(c.durations, c.observed, c.entered...)
		require.ErrorAs(t, err, &field)
		assert.Equal(t, c.path, field.Path)
		_, err = ChooseCurve(c.durations, c.observed, c.entered...)
		require.ErrorAs(t, err, &field)
		assert.Equal(t, c.path, field.Path)
	}
	k := mustKaplanMeier(t, []float64{5, 5}, []bool{true, false}, 0, 5)
	assert.Equal(t, 0.5, k.Survival(5), "a session first seen at its end says nothing")
	for path, err := range map[string]error{
		"p":         third(k.Quantile(1)),
		"level":     third(k.Band(1, nan, BandLog)),
		"scale":     third(k.Band(1, 0.95, 0)),
		"horizon":   second(k.RestrictedMean(-1)),
		"t":         second(k.ExcessRate(5)),
		"quantile":  second(k.MaximumLikelihoodTail(1)),
		"tail_rate": second(k.WithTailRate(0)),
	} {
		var field *FieldError
		require.ErrorAs(t, err, &field, path)
		assert.Equal(t, path, field.Path)
	}
	assert.ErrorContains(t, second(k.ExcessRate(nan)), "t is NaN")
	assert.ErrorContains(t, second(k.MaximumLikelihoodTail(0.9)), "take a lower one")
}

func second[A any](_ A, err error) error        { return err }
func third[A, B any](_ A, _ B, err error) error { return err }

func TestSortSessions(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		sessions := slices.Clone(drawKaplanMeier(t).sessions)
		if len(sessions) > 0 {
			sessions = rapid.Permutation(sessions).Draw(t, "order")
		}
		want := slices.Clone(sessions)
		slices.SortFunc(want, compareSessions)
		sortSessions(sessions)
		require.Equal(t, want, sessions)
	})
}

func TestSessionsOfKaplanMeier(t *testing.T) {
	n, completed := mustKaplanMeier(t, []float64{1, 2, 2}, []bool{true, true, false}).Sessions()
	assert.Equal(t, [2]int{3, 2}, [2]int{n, completed})
}

func BenchmarkKaplanMeier(b *testing.B) {
	durations, observed := benchmarkSessions(100_000)
	b.ReportAllocs()
	for range b.N {
		if _, err := NewKaplanMeier(durations, observed); err != nil {
			b.Fatal(err)
		}
	}
}

// Of a node that was never seen to fail nothing is known beyond age 0.
func TestBandWithoutAnEvent(t *testing.T) {
	for name, durations := range map[string][]float64{"no session": nil, "all censored": {100, 200}} {
		t.Run(name, func(t *testing.T) {
			k, err := NewKaplanMeier(durations, make([]bool, len(durations)))
			require.NoError(t, err)
			se, known := k.StandardError(0)
			assert.True(t, known && se == 0)
			_, known = k.StandardError(7200)
			assert.False(t, known)
			lower, upper, err := k.Band(7200, 0.95, BandLogLog)
			require.NoError(t, err)
			assert.Equal(t, [2]float64{0, 1}, [2]float64{lower, upper})
		})
	}
}
