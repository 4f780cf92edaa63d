package kvpolicy_test

import (
	"math"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/kvpolicy/kvpolicy"
)

func TestSubstrateUnderTheReportsNumbers(t *testing.T) {
	// In multiples of the mean TTFT, which the report does not give; a separated
	// request saves all of it, the most that the report grants.
	v, err := kvpolicy.Substrate{
		TaxShare: kvpolicy.MooncakeTax().TTFTP90, MeanTTFTSeconds: 1, TriggerRate: 5.0 / 1214, SavedSeconds: 1,
	}.Judge()
	require.NoError(t, err)
	assert.False(t, v.Pays)
	assert.InDelta(t, 0.0041-0.45, v.NetSeconds, 1e-4)
	assert.InDelta(t, 109.26, v.BreakEvenSavedSeconds, 1e-9)
	assert.InDelta(t, 0.45, v.BreakEvenTriggerRate, 1e-15)
	assert.Equal(t, "does not pay: -0.4459 s a request; break-even at 109.3 s saved a separated request, or at 45 % of requests separated", v.String())

	v, err = kvpolicy.Substrate{TaxShare: kvpolicy.NIXLTax().TTFTP90, MeanTTFTSeconds: 1, TriggerRate: 0.5, SavedSeconds: 1}.Judge()
	require.NoError(t, err)
	assert.True(t, v.Pays)
	assert.Contains(t, v.String(), "pays: +0.12 s a request")
}

func TestSubstrateBreakEven(t *testing.T) {
	size := rapid.OneOf(rapid.Just(0.0), rapid.Float64Range(1e-9, 1), rapid.Float64Range(1, 1e6))
	share := rapid.OneOf(rapid.Just(0.0), rapid.Just(1.0), rapid.Float64Range(1e-9, 1))
	rapid.Check(t, func(t *rapid.T) {
		s := kvpolicy.Substrate{
			TaxShare: size.Draw(t, "tax"), MeanTTFTSeconds: size.Draw(t, "mean"),
			TriggerRate: share.Draw(t, "rate"), SavedSeconds: size.Draw(t, "saved"),
		}
		v, err := s.Judge()
		require.NoError(t, err)
		assert.Equal(t, v.NetSeconds > 0, v.Pays)
		tax := s.TaxShare * s.MeanTTFTSeconds
		if math.IsInf(v.BreakEvenSavedSeconds, 1) {
			assert.True(t, tax > 0 && s.TriggerRate == 0)
		} else {
			assert.InEpsilon(t, 1+tax, 1+s.TriggerRate*v.BreakEvenSavedSeconds, 1e-12)
			if s.SavedSeconds > v.BreakEvenSavedSeconds*(1+1e-9) && s.TriggerRate > 0 {
				assert.True(t, v.Pays)
			} else if s.SavedSeconds < v.BreakEvenSavedSeconds*(1-1e-9) {
				assert.False(t, v.Pays)
			}
		}
		if math.IsInf(v.BreakEvenTriggerRate, 1) {
			assert.True(t, tax > 0 && s.SavedSeconds == 0)
		} else {
			assert.InEpsilon(t, 1+tax, 1+s.SavedSeconds*v.BreakEvenTriggerRate, 1e-12)
		}
	})
}

func TestSubstrateRefuses(t *testing.T) {
	good := kvpolicy.Substrate{TaxShare: 0.45, MeanTTFTSeconds: 3, TriggerRate: 0.0041, SavedSeconds: 1}
	for path, spoil := range map[string]func(*kvpolicy.Substrate, float64){
		"tax_share":    func(s *kvpolicy.Substrate, x float64) { s.TaxShare = x },
		"mean_ttft_s":  func(s *kvpolicy.Substrate, x float64) { s.MeanTTFTSeconds = x },
		"trigger_rate": func(s *kvpolicy.Substrate, x float64) { s.TriggerRate = x },
		"saved_s":      func(s *kvpolicy.Substrate, x float64) { s.SavedSeconds = x },
	} {
		for _, x := range []float64{-1e-300, math.NaN(), math.Inf(1), 1e13} {
			s := good
			spoil(&s, x)
			v, err := s.Judge()
			requireFieldError(t, err, path)
			assert.Zero(t, v)
		}
	}
	s := good
	s.TriggerRate = 41 // a percentage is no share
	_, err := s.Judge()
	requireFieldError(t, err, "trigger_rate")
}

// requireFieldError requires a FieldError at path.
func requireFieldError(t require.TestingT, err error, path string) {
	var field *kvpolicy.FieldError
	require.ErrorIs(t, err, kvpolicy.ErrInvalid)
	require.ErrorAs(t, err, &field)
	require.Equal(t, path, field.Path)
}
