package kvpolicy

import "errors"

// The survival curves come with their own change; until then a hazard model is
// refused.
var errNoCurves = errors.New("survival curves are not there yet")

type Curve interface{ Survival(t float64) float64 }

type Exposure struct {
	ContextTokens, DecodeRate, WaitSeconds, RemainingTokens, FallbackPrefillRate, OverheadSeconds float64
}

func ExpectedLoss(curve Curve, age, from, to float64, cells int, u Exposure) (float64, error) {
	return 0, errNoCurves
}
func validateCurve(path string, curve Curve) error        { return errNoCurves }
func decodeCurve(path string, data []byte) (Curve, error) { return nil, errNoCurves }
func EncodeCurve(curve Curve) ([]byte, error)             { return nil, errNoCurves }
