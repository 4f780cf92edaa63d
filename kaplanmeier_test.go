package kvpolicy

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
)

// referenceCase is a data set that R's survival package was run on.
type referenceCase struct {
	Name        string
	Durations   []float64
	Observed    []int
	Times       []float64
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
		T0   float64
		Rate float64
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
