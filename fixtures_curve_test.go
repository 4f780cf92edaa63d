package kvpolicy

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
	"gonum.org/v1/gonum/stat/distuv"
)

// curveLines reads a file of one JSON value a line from the shared data, and
// skips the test where it is absent.
func curveLines[T any](t *testing.T, path string) []T {
	t.Helper()
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		t.Skipf("no shared data here: %v", err)
	}
	require.NoError(t, err)
	var values []T
	lines := bufio.NewScanner(bytes.NewReader(data))
	lines.Buffer(nil, 1<<24)
	for lines.Scan() {
		if len(bytes.TrimSpace(lines.Bytes())) == 0 {
			continue
		}
		var value T
		require.NoError(t, json.Unmarshal(lines.Bytes(), &value))
		values = append(values, value)
	}
	require.NoError(t, lines.Err())
	require.NotEmpty(t, values)
	return values
}

// plainCurve hides everything of a curve but Survival.
type plainCurve struct{ curve Curve }

func (c plainCurve) Survival(t float64) float64 { return c.curve.Survival(t) }

// logCurve hides everything of a Weibull but its logarithm.
type logCurve struct{ weibull distuv.Weibull }

func (c logCurve) Survival(t float64) float64    { return c.weibull.Survival(t) }
func (c logCurve) LogSurvival(t float64) float64 { return c.weibull.LogSurvival(t) }

// curveFunc is a curve given as a function.
type curveFunc func(float64) float64

func (f curveFunc) Survival(t float64) float64 { return f(t) }

func mustKaplanMeier(t require.TestingT, durations []float64, observed []bool, entered ...float64) *KaplanMeier {
	k, err := NewKaplanMeier(durations, observed, entered...)
	require.NoError(t, err)
	return k
}
