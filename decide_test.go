package kvpolicy_test

import (
	"testing"

	"github.com/kvpolicy/kvpolicy"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// plainPresets have no hazard model.
func plainPresets() (names []string) {
	for _, name := range kvpolicy.PresetNames() {
		if name != "hazard_aware" {
			names = append(names, name)
		}
	}
	return names
}

// agree draws situations of the shape and compares Decide with the oracle.
func agree(t *testing.T, sh shape) {
	rapid.Check(t, func(t *rapid.T) {
		s := drawSituation(t, sh)
		d, err := s.policy.Decide(s.snapshot)
		require.NoError(t, err)
		newOracle(s).check(t, d)
	})
}

func TestDecideAgreesWithOracle(t *testing.T) {
	hazard := []string{"hazard_aware"}
	separation := []string{"unified_v2_strict", "unified_v2_relaxed"}
	t.Run("placement", func(t *testing.T) { agree(t, shape{presets: plainPresets(), noHazard: true, extreme: true}) })
	t.Run("placement as preset", func(t *testing.T) {
		agree(t, shape{presets: plainPresets(), noHazard: true, placing: true, untouched: true})
	})
	t.Run("separation", func(t *testing.T) { agree(t, shape{presets: separation, noHazard: true, placing: true, extreme: true}) })
	t.Run("hazard placement", func(t *testing.T) { agree(t, shape{presets: hazard, placing: true}) })
	t.Run("migration", func(t *testing.T) { agree(t, shape{presets: hazard, running: true}) })
	t.Run("anything", func(t *testing.T) { agree(t, shape{}) })
}
