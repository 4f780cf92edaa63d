package replay

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"pgregory.net/rapid"
)

// The oracle keeps every step and integrates each bin from the whole list.
func TestSeriesIsTheExactIntegral(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		type step struct{ at, value float64 }
		steps := []step{{}}
		s := newSeries(2)
		now := 0.0
		for range rapid.IntRange(0, 40).Draw(t, "steps") {
			now += float64(rapid.SampledFrom([]int{0, 0, 1, 7, 64, 1000, 5000}).Draw(t, "gap")) / 4
			value := float64(rapid.IntRange(0, 1000).Draw(t, "value"))
			s.set(1, now, value)
			steps = append(steps, step{now, value})
		}
		end := now + float64(rapid.IntRange(0, 3000).Draw(t, "rest"))/2
		between := func(low, high float64) (sum float64) {
			for k, st := range steps {
				until := end
				if k+1 < len(steps) {
					until = steps[k+1].at
				}
				if from, to := max(st.at, low), min(until, high); to > from {
					sum += st.value * (to - from)
				}
			}
			return sum
		}
		got := s.finish(end)
		assert.LessOrEqual(t, len(got.Means[1]), seriesBins)
		assert.GreaterOrEqual(t, got.BinSeconds*seriesBins, end)
		var last float64
		for k, mean := range got.Means[1] {
			low, high := float64(k)*got.BinSeconds, min(float64(k+1)*got.BinSeconds, end)
			assert.InDelta(t, between(low, high)/(high-low), mean, 1e-6)
			assert.Zero(t, got.Means[0][k])
			last = high
		}
		assert.Equal(t, end, last, "the bins end with the run")
		if end > 0 {
			assert.InDelta(t, between(0, end)/end, got.Overall[1], 1e-6)
		}
		assert.Zero(t, got.Overall[0])
		whole, half := got.Until(1-1e-12), got.Until(0.5)
		assert.LessOrEqual(t, half, whole)
		assert.LessOrEqual(t, whole, end+got.BinSeconds)
	})
}
