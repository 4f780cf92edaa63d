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

// agree compares Decide with the oracle on drawn situations, several in each
// run as some bounds are met rarely.
func agree(t *testing.T, draw func(*rapid.T) situation) {
	rapid.Check(t, func(t *rapid.T) {
		for range 5 {
			s := draw(t)
			d, err := s.policy.Decide(s.snapshot)
			require.NoError(t, err)
			newOracle(s).check(t, d)
		}
	})
}

func TestDecideAgreesWithOracle(t *testing.T) {
	hazard := []string{"hazard_aware"}
	separation := []string{"unified_v2_strict", "unified_v2_relaxed"}
	for name, sh := range map[string]shape{
		"placement":           {presets: plainPresets(), noHazard: true, extreme: true},
		"placement by preset": {presets: plainPresets(), noHazard: true, placing: true, untouched: true},
		"separation":          {presets: separation, noHazard: true, placing: true, extreme: true},
		"hazard":              {presets: hazard, placing: true},
		"migration":           {presets: hazard, running: true},
		"anything":            {},
	} {
		t.Run(name, func(t *testing.T) { agree(t, func(t *rapid.T) situation { return drawSituation(t, sh) }) })
	}
	t.Run("hand-off", func(t *testing.T) { agree(t, drawHop) })
}
