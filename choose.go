package kvpolicy

import (
	"fmt"
	"math"
)

//go:generate stringer -type=CurveKind,CurveReason,PoolLevel,BandScale -linecomment -output=curve_words_string.go

// CurveKind is a family of survival curves, by the word that JSON has for it.
type CurveKind uint8

const (
	KindKaplanMeier CurveKind = 1 + iota // km
	KindExponential                      // exponential
	KindWeibull                          // weibull
)

// MarshalText gives the kind's word.
func (k CurveKind) MarshalText() ([]byte, error) { return marshalWord(k, KindWeibull, "kind") }

// UnmarshalText reads the kind's word.
func (k *CurveKind) UnmarshalText(text []byte) error {
	return unmarshalWord(k, text, KindWeibull, "kind")
}

// CurveReason is why ChooseCurve took the curve that it did.
type CurveReason uint8

const (
	// NoCompletedSession: nothing can be fitted. The Kaplan-Meier curve is that
	// of an unknown node, exp(-t/3600).
	NoCompletedSession CurveReason = 1 + iota // no_completed_session
	// FewCompletedSessions: under DefaultMinSessions are completed, which bear no
	// more than one parameter. The curve is the exponential.
	FewCompletedSessions // few_completed_sessions
	// LowerAIC: of exponential and Weibull this one has the lower AIC, and it
	// stays within the band around the Kaplan-Meier estimate.
	LowerAIC // lower_aic
	// NoParametricFit: the better of exponential and Weibull leaves the band, or
	// the exponential's rate would be out of range, so the Kaplan-Meier estimate
	// itself is taken.
	NoParametricFit // no_parametric_fit
)

// MarshalText gives the reason's word.
func (r CurveReason) MarshalText() ([]byte, error) { return marshalWord(r, NoParametricFit, "reason") }

// UnmarshalText reads the reason's word.
func (r *CurveReason) UnmarshalText(text []byte) error {
	return unmarshalWord(r, text, NoParametricFit, "reason")
}

// hallWellner95 is the asymptotic 95 % point of the greatest distance of a
// Brownian bridge from 0, that of Kolmogorov's statistic.
const hallWellner95 = 1.3580986393225505

// CurveChoice is a curve for sessions and why it was taken.
type CurveChoice struct {
	Curve  Curve
	Kind   CurveKind
	Reason CurveReason
	// ExponentialAIC and WeibullAIC are twice the number of parameters less twice
	// the log-likelihood; lower is better. HasWeibull tells whether a Weibull
	// could be fitted. Both AICs are 0 where nothing was fitted.
	ExponentialAIC, WeibullAIC float64
	HasWeibull                 bool
	// Distance is how far the exponential or Weibull with the lower AIC strays from the
	// Kaplan-Meier estimate, in units of the half-width of its 95 % band: above 1
	// it leaves the band. 0 where nothing was fitted.
	Distance float64
}

// String says which curve was taken and why, in one line.
func (c CurveChoice) String() string {
	text := fmt.Sprintf("%s: %s", c.Kind, c.Reason)
	if c.ExponentialAIC == 0 && !c.HasWeibull { // nothing was fitted
		return text
	}
	text += fmt.Sprintf(" (AIC exponential %.1f", c.ExponentialAIC)
	if c.HasWeibull {
		text += fmt.Sprintf(", Weibull %.1f", c.WeibullAIC)
	}
	return text + fmt.Sprintf("; distance %.2f of the band's)", c.Distance)
}

// ChooseCurve fits sessions, given as for NewKaplanMeier, and takes
//
//   - without a completed session longer than 0, or with a failure rate outside
//     1e-9 to 1e18 per second, the Kaplan-Meier curve;
//   - with fewer than DefaultMinSessions of them, the exponential;
//   - else, of the exponential and the Weibull, the one with the lower AIC, if it
//     stays within the simultaneous 95 % band of Hall and Wellner around the
//     Kaplan-Meier estimate of the sessions longer than 0;
//   - else the Kaplan-Meier curve.
//
// The band is that of a curve given in advance, so that it lets a fitted one
// pass too easily rather than too rarely: a smooth curve is kept unless the
// sessions speak against it (a limit on their length, two kinds of node in
// one). With late entries its sample size is the largest number at risk.
// Errors are those of NewKaplanMeier.
//
// (Hall and Wellner, Confidence bands for a survival curve from censored data,
// Biometrika 67, 1980; Akaike 1974. The rule is ours.)
func ChooseCurve(durations []float64, observed []bool, entered ...float64) (CurveChoice, error) {
	k, err := NewKaplanMeier(durations, observed, entered...)
	if err != nil {
		return CurveChoice{}, err
	}
	empirical := CurveChoice{Curve: k, Kind: KindKaplanMeier, Reason: NoCompletedSession}
	s, err := newSample(durations, observed, entered)
	if err != nil {
		return empirical, nil
	}
	exponential, aic, err := s.exponential()
	if err != nil { // a rate out of range: nodes that are hardly ever lost, or at once
		empirical.Reason = NoParametricFit
		return empirical, nil
	}
	choice := CurveChoice{Curve: exponential, Kind: KindExponential, Reason: LowerAIC, ExponentialAIC: aic}
	if weibull, aic, err := s.weibull(); err == nil {
		choice.HasWeibull, choice.WeibullAIC = true, aic
		if aic < choice.ExponentialAIC && s.events >= DefaultMinSessions {
			choice.Curve, choice.Kind = weibull, KindWeibull
		}
	}
	sortSessions(s.sessions)
	choice.Distance = estimate(s.sessions).distance(choice.Curve) / hallWellner95
	switch {
	case s.events < DefaultMinSessions:
		choice.Reason = FewCompletedSessions
	case choice.Distance > 1:
		choice.Curve, choice.Kind, choice.Reason = k, KindKaplanMeier, NoParametricFit
	}
	return choice, nil
}

// distance is the greatest difference between the estimate and a curve, on
// either side of each event, in the units of Hall and Wellner's band:
// sqrt(n)*|S - curve| / (S*(1 + n*variance of log S)). Without censoring that is
// Kolmogorov's statistic.
func (k *KaplanMeier) distance(curve Curve) float64 {
	n := 0.0
	for _, atRisk := range k.atRisk {
		n = math.Max(n, float64(atRisk))
	}
	most, variance := 0.0, 0.0
	for i, t := range k.times {
		fitted := curve.Survival(t)
		before := k.estimateAt(i)
		most = math.Max(most, math.Abs(before-fitted)/(before*(1+float64(n*variance))))
		d, y := float64(k.events[i]), float64(k.atRisk[i])
		if d == y {
			break // the band is unbounded from here on
		}
		variance += d / (y * (y - d))
		after := k.estimateAt(i + 1)
		most = math.Max(most, math.Abs(after-fitted)/(after*(1+float64(n*variance))))
	}
	return most * math.Sqrt(n)
}
