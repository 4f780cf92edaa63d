package kvpolicy

import (
	"fmt"
	"math"

	"gonum.org/v1/gonum/optimize"
	"gonum.org/v1/gonum/stat/distuv"
)

// FitExponential is the maximum-likelihood exponential curve of sessions, given
// as for NewKaplanMeier (censored and late ones too), and its AIC: completed
// sessions over the time watched. Sessions of length 0 are left out: a curve is
// asked what happens to a node that is up. Errors are FieldErrors: those of
// NewKaplanMeier, and "observed" where there is no completed session to fit, or
// where the rate would leave the range of a curve.
func FitExponential(durations []float64, observed []bool, entered ...float64) (curve distuv.Exponential, aic float64, err error) {
	s, err := newSample(durations, observed, entered)
	if err != nil {
		return curve, 0, err
	}
	return s.exponential()
}

// FitWeibull is the maximum-likelihood Weibull curve of sessions, given as for
// NewKaplanMeier (censored and late ones too), and its AIC. The scale has a
// closed form for a given shape, so that one dimension is left to search.
// Sessions of length 0 are left out, as in FitExponential. Errors are
// FieldErrors: those of NewKaplanMeier, and "observed" where the sessions
// determine no Weibull: none is completed, the completed ones all have the
// length of the longest (the likelihood then grows with the shape for ever), or
// the shape or scale would leave the range of a curve.
func FitWeibull(durations []float64, observed []bool, entered ...float64) (curve distuv.Weibull, aic float64, err error) {
	s, err := newSample(durations, observed, entered)
	if err != nil {
		return curve, 0, err
	}
	return s.weibull()
}

// sample is what the likelihoods need of sessions longer than 0. Times are
// relative to the longest, so that no power of them overflows.
type sample struct {
	sessions   []Session
	longest    float64
	events     float64
	exposure   float64 // sum of the times watched, relative
	logEvents  float64 // sum of log(relative duration) of the completed
	logLengths []float64
	logEntries []float64 // -Inf for a session watched from its start
}

func newSample(durations []float64, observed []bool, entered []float64) (*sample, error) {
	all, err := newSessions(durations, observed, entered)
	if err != nil {
		return nil, err
	}
	s := &sample{}
	for _, session := range all {
		if session.DurationSeconds > 0 {
			s.sessions = append(s.sessions, session)
			s.longest = math.Max(s.longest, session.DurationSeconds)
		}
	}
	for _, session := range s.sessions {
		length := logarithm(session.DurationSeconds / s.longest)
		s.logLengths = append(s.logLengths, length)
		s.logEntries = append(s.logEntries, logarithm(session.EnteredSeconds/s.longest))
		s.exposure += (session.DurationSeconds - session.EnteredSeconds) / s.longest
		if session.Observed {
			s.events++
			s.logEvents += length
		}
	}
	if s.events == 0 {
		return nil, &FieldError{Path: "observed", Value: "without a completed session longer than 0", Want: "hold one at least: pool the sessions of several nodes, or use NewKaplanMeier"}
	}
	return s, nil
}

func (s *sample) exponential() (distuv.Exponential, float64, error) {
	rate := s.events / s.exposure // per longest session
	logLikelihood := s.events * (math.Log(rate) - math.Log(s.longest) - 1)
	curve := distuv.Exponential{Rate: rate / s.longest}
	if !usableRate(curve.Rate) { // no decision would take it
		return distuv.Exponential{}, 0, &FieldError{Path: "observed", Value: fmt.Sprintf("fitted by a rate of %.3g per second", curve.Rate),
			Want: "determine a rate of 1e-9 to 1e18 per second: use NewKaplanMeier"}
	}
	return curve, 2 - 2*logLikelihood, nil
}

// powers is the sum of length^shape - entry^shape, relative, and its derivative
// by the shape.
func (s *sample) powers(shape float64) (sum, derivative float64) {
	for i, length := range s.logLengths {
		power := math.Exp(shape * length)
		sum += power
		derivative += power * length
		if entry := s.logEntries[i]; !math.IsInf(entry, -1) {
			sum -= math.Exp(shape * entry)
			derivative -= math.Exp(shape*entry) * entry
		}
	}
	return sum, derivative
}

// score is the derivative of the profile log-likelihood by the shape, per
// completed session.
func (s *sample) score(shape float64) float64 {
	sum, derivative := s.powers(shape)
	return 1/shape + s.logEvents/s.events - derivative/sum
}

// profile is the greatest log-likelihood for a shape, per completed session, of
// relative times.
func (s *sample) profile(shape float64) float64 {
	sum, _ := s.powers(shape)
	return math.Log(shape) + (shape-1)*s.logEvents/s.events - math.Log(sum/s.events) - 1
}

func (s *sample) weibull() (distuv.Weibull, float64, error) {
	undetermined := func(value, want string) (distuv.Weibull, float64, error) {
		return distuv.Weibull{}, 0, &FieldError{Path: "observed", Value: value, Want: want}
	}
	if s.logEvents == 0 {
		return undetermined("true for sessions of one length, the longest, alone",
			"hold completed sessions of several lengths: use FitExponential or NewKaplanMeier")
	}
	problem := optimize.Problem{
		Func: func(x []float64) float64 { return -s.profile(math.Exp(x[0])) },
		Grad: func(gradient, x []float64) { gradient[0] = -math.Exp(x[0]) * s.score(math.Exp(x[0])) },
	}
	result, err := optimize.Minimize(problem, []float64{0}, &optimize.Settings{GradientThreshold: 1e-9}, &optimize.BFGS{})
	if result == nil {
		return undetermined("not to be fitted", fmt.Sprintf("determine a Weibull shape (%v): use FitExponential or NewKaplanMeier", err))
	}
	shape := math.Exp(result.X[0])
	sum, _ := s.powers(shape)
	scale := s.longest * math.Pow(sum/s.events, 1/shape)
	// A search that stopped early shows in the slope, whatever its status says.
	if slope := shape * s.score(shape); !(math.Abs(slope) < 1e-6 && shape >= 1e-3) || validateWeibull("", shape, scale) != nil {
		return undetermined(fmt.Sprintf("fitted by shape %.3g and scale %.3g s", shape, scale),
			"determine a Weibull with a shape of 1e-3 to 1e3 and a scale of at most 1e12 s: use FitExponential or NewKaplanMeier")
	}
	logLikelihood := s.events * (s.profile(shape) - math.Log(s.longest))
	return distuv.Weibull{K: shape, Lambda: scale}, 4 - 2*logLikelihood, nil
}
