package kvpolicy

import (
	"fmt"
	"math"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestTryFits(t *testing.T) {
	for _, c := range referenceCases(t) {
		w, aic, err := FitWeibull(c.Durations, c.observed())
		if err != nil {
			fmt.Println(c.Name, c.WeibullMLE, err)
			continue
		}
		s, e := newSample(c.Durations, c.observed(), nil)
		require.NoError(t, e)
		fmt.Println(c.Name, c.WeibullMLE, w.K, w.Lambda, aic, s.score(w.K)*w.K)
		if c.WeibullMLE != nil {
			fmt.Println("    ", w.K/c.WeibullMLE.Shape-1, w.Lambda/c.WeibullMLE.Scale-1)
		}
	}
	_ = math.Pi
}
