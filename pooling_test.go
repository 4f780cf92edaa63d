package kvpolicy

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestHistoriesPool(t *testing.T) {
	h := NewHistories(DefaultMinSessions)
	curve, level := h.Curve("nobody")
	assert.Equal(t, LevelFleet, level)
	assert.Equal(t, math.Exp(-1), curve.Survival(3600))

	var laptops, all []float64
	add := func(node, kind string, seconds float64) {
		require.NoError(t, h.Add(node, kind, Session{DurationSeconds: seconds, Observed: true}))
		all = append(all, seconds)
		if kind == "laptop" {
			laptops = append(laptops, seconds)
		}
	}
	ended := func(durations []float64) *KaplanMeier {
		observed := make([]bool, len(durations))
		for i := range observed {
			observed[i] = true
		}
		return mustKaplanMeier(t, durations, observed)
	}
	add("a", "laptop", 100)
	add("a", "laptop", 300)
	add("b", "laptop", 200)
	add("c", "", 9000)
	curve, level = h.Curve("a")
	assert.Equal(t, LevelFleet, level)
	assert.Equal(t, ended(all), curve)

	add("b", "laptop", 250)
	add("b", "laptop", 260) // the fifth of the kind
	curve, level = h.Curve("a")
	assert.Equal(t, LevelKind, level)
	assert.Equal(t, ended(laptops), curve)
	_, level = h.Curve("c")
	assert.Equal(t, LevelFleet, level, "no kind")

	for i := range 2 {
		add("a", "laptop", float64(400+i))
		_, level = h.Curve("a")
		assert.Equal(t, LevelKind, level)
	}
	add("a", "laptop", 410) // the fifth of the node
	curve, level = h.Curve("a")
	assert.Equal(t, LevelNode, level)
	assert.Equal(t, ended([]float64{100, 300, 400, 401, 410}), curve)

	// Censored sessions count in the curve, not towards the minimum.
	for range 9 {
		require.NoError(t, h.Add("d", "", Session{DurationSeconds: 50}))
	}
	fleet, level := h.Curve("d")
	assert.Equal(t, LevelFleet, level)
	n, completed := fleet.Sessions()
	assert.Equal(t, [2]int{len(all) + 9, len(all)}, [2]int{n, completed})
}

func TestHistoriesRunningSessions(t *testing.T) {
	h := NewHistories(0)
	require.NoError(t, h.Add("a", "spot", Session{DurationSeconds: 100, Observed: true}))
	count := func() int {
		curve, level := h.Curve("a")
		assert.Equal(t, LevelNode, level)
		n, _ := curve.Sessions()
		return n
	}
	assert.Equal(t, 1, count())
	for age := 10.0; age < 50; age += 10 {
		require.NoError(t, h.SetRunning("a", "spot", age, 5))
		assert.Equal(t, 2, count(), "the session replaces itself")
	}
	before, _ := h.Curve("a")
	require.NoError(t, h.Add("a", "spot", Session{DurationSeconds: 45, Observed: true}))
	assert.Equal(t, 2, count(), "the running session has ended")
	n, completed := before.Sessions()
	assert.Equal(t, [2]int{2, 1}, [2]int{n, completed}, "a curve given out does not change")

	// A node that changes its kind takes its running session along.
	h = NewHistories(1)
	require.NoError(t, h.Add("old", "spot", Session{DurationSeconds: 9, Observed: true}))
	require.NoError(t, h.Add("fixed", "server", Session{DurationSeconds: 7, Observed: true}))
	require.NoError(t, h.SetRunning("a", "spot", 30, 0))
	curve, level := h.Curve("a")
	assert.Equal(t, LevelKind, level)
	assert.Equal(t, mustKaplanMeier(t, []float64{9, 30}, []bool{true, false}), curve)
	require.NoError(t, h.SetRunning("a", "server", 31, 0))
	curve, _ = h.Curve("a")
	assert.Equal(t, mustKaplanMeier(t, []float64{7, 31}, []bool{true, false}), curve)
	require.NoError(t, h.SetRunning("b", "spot", 1, 0))
	curve, _ = h.Curve("b")
	assert.Equal(t, mustKaplanMeier(t, []float64{9, 1}, []bool{true, false}), curve)
}

func TestHistoriesErrors(t *testing.T) {
	h := NewHistories(1)
	for _, c := range []struct {
		path string
		s    Session
	}{
		{"duration_seconds", Session{DurationSeconds: -1}},
		{"duration_seconds", Session{DurationSeconds: 2e12}},
		{"entered_seconds", Session{DurationSeconds: 5, EnteredSeconds: 6}},
		{"entered_seconds", Session{DurationSeconds: 5, EnteredSeconds: 5, Observed: true}},
	} {
		var field *FieldError
		require.ErrorAs(t, h.Add("a", "", c.s), &field)
		assert.Equal(t, c.path, field.Path)
	}
	assert.ErrorIs(t, h.SetRunning("a", "", 3, 4), ErrInvalid)
	_, level := h.Curve("a")
	assert.Equal(t, LevelFleet, level)
}

// However sessions and questions come, each level's curve is the one that all
// its sessions give at once.
func TestHistoriesAgainstAllAtOnce(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		minimum := rapid.IntRange(0, 4).Draw(t, "minimum")
		h := NewHistories(minimum)
		kinds := []string{"", "x", "y"}
		sessions := map[string][]Session{} // by "node/..", "kind/.." and "fleet"
		running := map[int]Session{}
		for range rapid.IntRange(0, 60).Draw(t, "steps") {
			i := rapid.IntRange(0, 5).Draw(t, "node")
			node, kind := fmt.Sprint(i), kinds[i%3]
			s := Session{DurationSeconds: float64(rapid.IntRange(0, 9).Draw(t, "duration")), Observed: rapid.Bool().Draw(t, "observed")}
			switch rapid.IntRange(0, 2).Draw(t, "what") {
			case 0:
				s.Observed = false
				require.NoError(t, h.SetRunning(node, kind, s.DurationSeconds, 0))
				running[i] = s
			case 1:
				require.NoError(t, h.Add(node, kind, s))
				delete(running, i)
				for _, level := range []string{"node/" + node, "kind/" + kind, "fleet"} {
					sessions[level] = append(sessions[level], s)
				}
			default:
				enough := func(level string) bool {
					completed := 0
					for _, s := range sessions[level] {
						if s.Observed {
							completed++
						}
					}
					return completed >= minimum
				}
				_, known := h.nodes[node]
				want, level, belongs := LevelFleet, "fleet", func(int) bool { return true }
				switch {
				case known && enough("node/"+node):
					want, level, belongs = LevelNode, "node/"+node, func(j int) bool { return j == i }
				case known && kind != "" && enough("kind/"+kind):
					want, level, belongs = LevelKind, "kind/"+kind, func(j int) bool { return kinds[j%3] == kind }
				}
				var durations []float64
				var observed []bool
				for _, s := range sessions[level] {
					durations, observed = append(durations, s.DurationSeconds), append(observed, s.Observed)
				}
				for j := range 6 {
					if s, up := running[j]; up && belongs(j) {
						durations, observed = append(durations, s.DurationSeconds), append(observed, false)
					}
				}
				got, at := h.Curve(node)
				require.Equal(t, want, at)
				expected := mustKaplanMeier(t, durations, observed)
				require.Equal(t, len(expected.sessions), len(got.sessions))
				require.Equal(t, expected.times, got.times)
				require.Equal(t, expected.survival, got.survival)
				require.Equal(t, expected.tailRate, got.tailRate)
			}
		}
	})
}

func BenchmarkHistories(b *testing.B) {
	fill := func() *Histories {
		h := NewHistories(DefaultMinSessions)
		random := rand.New(rand.NewPCG(1, 1))
		for i := range 100_000 {
			if err := h.Add(fmt.Sprint(i%500), "spot", Session{DurationSeconds: random.ExpFloat64() * 3600, Observed: i%3 > 0}); err != nil {
				b.Fatal(err)
			}
		}
		h.Curve("nobody")
		return h
	}
	b.Run("add", func(b *testing.B) {
		h := fill()
		b.ResetTimer()
		for i := range b.N {
			if err := h.Add("7", "spot", Session{DurationSeconds: float64(i % 3600), Observed: true}); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("add and ask the fleet", func(b *testing.B) {
		h := fill()
		b.ResetTimer()
		for i := range b.N {
			if err := h.Add("7", "spot", Session{DurationSeconds: float64(i % 3600), Observed: true}); err != nil {
				b.Fatal(err)
			}
			h.Curve("nobody")
		}
	})
}
