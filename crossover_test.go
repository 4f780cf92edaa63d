package kvpolicy_test

import (
	"bytes"
	"encoding/json"
	"math"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/kvpolicy/kvpolicy"
)

func TestCrossoverGolden(t *testing.T) {
	data, err := os.ReadFile(filepath.Join(goldenDir, "crossover.jsonl"))
	if os.IsNotExist(err) {
		t.Skipf("%s is not there: the golden vectors are handed out apart from the module", goldenDir)
	}
	require.NoError(t, err)
	require.NotEmpty(t, data)
	for line := range bytes.Lines(data) {
		var c struct {
			Overhead          float64         `json:"overhead_s"`
			RecomputeOverhead float64         `json:"recompute_overhead_s"`
			PrefillRate       float64         `json:"prefill_rate"`
			KVBytesPerToken   float64         `json:"kv_bytes_per_token"`
			Bandwidth         float64         `json:"bandwidth"`
			Regime            kvpolicy.Regime `json:"regime"`
			Tokens            *float64        `json:"tokens"`
		}
		require.NoError(t, json.Unmarshal(line, &c))
		regime, tokens, err := kvpolicy.Crossover(kvpolicy.TransferModel{
			OverheadSeconds: c.Overhead, RecomputeOverheadSeconds: c.RecomputeOverhead, KVBytesPerToken: c.KVBytesPerToken,
		}, c.Bandwidth, c.PrefillRate)
		require.NoError(t, err)
		assert.Equal(t, c.Regime, regime, string(line))
		switch {
		case c.Tokens == nil:
			assert.Equal(t, math.Inf(1), tokens, string(line))
		case *c.Tokens == 0:
			assert.Zero(t, tokens, string(line))
		default:
			assert.InEpsilon(t, *c.Tokens, tokens, 1e-9, string(line))
		}
	}
}

// The table of the hazard algorithm note.
func TestCrossoverTable(t *testing.T) {
	for _, c := range []struct {
		prefillRate, gigabits, tokens float64
	}{
		{3000, 0.1, math.Inf(1)}, {3000, 10, 1299}, {3000, 200, 914},
		{250, 0.1, math.Inf(1)}, {250, 10, 77}, {250, 200, 75},
	} {
		link := kvpolicy.LineRate(c.gigabits)
		m := kvpolicy.TransferModel{RecomputeOverheadSeconds: 0.2, KVBytesPerToken: 128_000}.WithLink(link)
		_, tokens, err := kvpolicy.Crossover(m, link.Bandwidth, c.prefillRate)
		require.NoError(t, err)
		assert.Equal(t, c.tokens, math.Round(tokens), "%+v", c)
	}
}

// crossoverCase draws a model, a link and a destination in every regime, at the
// bounds between them too.
func crossoverCase(t *rapid.T) (m kvpolicy.TransferModel, bandwidth, prefillRate float64) {
	rate := rapid.OneOf(rapid.SampledFrom([]float64{1e-9, 250, 7000, 1 << 13, 1e18}), rapid.Float64Range(1e-9, 1e18),
		rapid.Custom(func(t *rapid.T) float64 { return math.Exp(rapid.Float64Range(-20, 41).Draw(t, "ln rate")) }))
	prefillRate = rate.Draw(t, "prefill rate")
	m.KVBytesPerToken = rapid.OneOf(rapid.SampledFrom([]float64{0, 98304, 1e12}), rapid.Float64Range(0, 1e6)).Draw(t, "kv")
	even := m.KVBytesPerToken * prefillRate // here both cost the same a token
	switch rapid.SampledFrom([]string{"any", "even", "nearly even", "infinite"}).Draw(t, "link") {
	case "any":
		bandwidth = rate.Draw(t, "bandwidth")
	case "even":
		bandwidth = even
	case "nearly even":
		bandwidth = even * (1 + rapid.Float64Range(-1e-6, 1e-6).Draw(t, "off even"))
	case "infinite":
		bandwidth = math.Inf(1)
	}
	if !(bandwidth >= 1e-9 && bandwidth <= 1e18 || math.IsInf(bandwidth, 1)) {
		bandwidth = 1e18
	}
	overhead := rapid.OneOf(rapid.SampledFrom([]float64{0, 0.2, 0.3, 1e12}), rapid.Float64Range(0, 10))
	m.OverheadSeconds = overhead.Draw(t, "overhead")
	m.RecomputeOverheadSeconds = m.OverheadSeconds
	if !rapid.Bool().Draw(t, "equal overheads") {
		m.RecomputeOverheadSeconds = overhead.Draw(t, "recompute overhead")
	}
	return m, bandwidth, prefillRate
}

// inRegime draws a case of one regime, away from the bounds between them.
func inRegime(t *rapid.T, want kvpolicy.Regime) (m kvpolicy.TransferModel, bandwidth, prefillRate float64) {
	prefillRate = rapid.Float64Range(100, 1e5).Draw(t, "prefill rate")
	m.KVBytesPerToken = rapid.Float64Range(1e3, 1e6).Draw(t, "kv")
	faster, slower := rapid.Float64Range(1.001, 1e3).Draw(t, "faster"), rapid.Float64Range(1e-3, 0.999).Draw(t, "slower")
	less, more := rapid.Float64Range(0, 1).Draw(t, "less"), rapid.Float64Range(1.001, 10).Draw(t, "more")
	even := m.KVBytesPerToken * prefillRate // here both cost the same a token
	switch want {
	case kvpolicy.TransferAbove:
		m.OverheadSeconds, m.RecomputeOverheadSeconds, bandwidth = more, less, even*faster
	case kvpolicy.TransferBelow:
		m.OverheadSeconds, m.RecomputeOverheadSeconds, bandwidth = less, more, even*slower
	case kvpolicy.AlwaysTransfer:
		m.OverheadSeconds, m.RecomputeOverheadSeconds, bandwidth = less, more, even*faster
	case kvpolicy.NeverTransfer:
		m.OverheadSeconds, m.RecomputeOverheadSeconds, bandwidth = more, less, even*slower
	}
	return m, bandwidth, prefillRate
}

// Invariant: on both sides of the crossover the cheaper method is the one that
// the regime says, wherever the two costs can be told apart.
func TestCrossoverAgreesWithTheCheaper(t *testing.T) {
	t.Run("any", rapid.MakeCheck(func(t *rapid.T) {
		m, bandwidth, prefillRate := crossoverCase(t)
		checkCrossover(t, m, bandwidth, prefillRate)
	}))
	for _, want := range []kvpolicy.Regime{kvpolicy.TransferAbove, kvpolicy.TransferBelow, kvpolicy.AlwaysTransfer, kvpolicy.NeverTransfer} {
		t.Run(want.String(), rapid.MakeCheck(func(t *rapid.T) {
			m, bandwidth, prefillRate := inRegime(t, want)
			require.Equal(t, want, checkCrossover(t, m, bandwidth, prefillRate))
		}))
	}
}

func checkCrossover(t *rapid.T, m kvpolicy.TransferModel, bandwidth, prefillRate float64) kvpolicy.Regime {
	regime, tokens, err := kvpolicy.Crossover(m, bandwidth, prefillRate)
	require.NoError(t, err)
	require.Equal(t, regime == kvpolicy.NeverTransfer, math.IsInf(tokens, 1))
	require.True(t, tokens >= 0)
	if regime == kvpolicy.AlwaysTransfer {
		require.Zero(t, tokens)
	}
	lengths := []int64{0, 1, 2, 1000, 1e15, rapid.Int64Range(0, 1e15).Draw(t, "n"), rapid.Int64Range(0, 1e6).Draw(t, "short n")}
	if tokens < 1e15 {
		at := int64(tokens)
		lengths = append(lengths, at-1, at, at+1, at+2, at/2, at*2, int64(tokens*(1-2e-9)), int64(tokens*(1+2e-9))+1)
	}
	for _, n := range lengths {
		finite := regime == kvpolicy.TransferAbove || regime == kvpolicy.TransferBelow
		if n < 0 || n > 1e15 || finite && math.Abs(float64(n)-tokens) <= 1e-9*tokens {
			continue
		}
		transfer, recompute := m.TransferSeconds(n, bandwidth), m.RecomputeSeconds(n, prefillRate)
		method, seconds := m.Cheapest(n, bandwidth, prefillRate)
		require.Equal(t, math.Min(transfer, recompute), seconds)
		if math.Abs(transfer-recompute) <= 1e-12*math.Max(transfer, recompute) {
			continue
		}
		want := kvpolicy.Recompute
		switch regime {
		case kvpolicy.TransferAbove:
			if float64(n) > tokens {
				want = kvpolicy.Transfer
			}
		case kvpolicy.TransferBelow:
			if float64(n) < tokens {
				want = kvpolicy.Transfer
			}
		case kvpolicy.AlwaysTransfer:
			want = kvpolicy.Transfer
		}
		require.Equal(t, want, method, "%v at %v, n %d", regime, tokens, n)
	}
	return regime
}

func TestCrossoverRefuses(t *testing.T) {
	good := kvpolicy.TransferModel{OverheadSeconds: 0.5, RecomputeOverheadSeconds: 0.2, KVBytesPerToken: 128_000}
	bad := []float64{-1, math.NaN(), math.Inf(-1)}
	for _, x := range bad {
		for path, spoil := range map[string]func(*kvpolicy.TransferModel){
			"transfer.overhead_s":           func(m *kvpolicy.TransferModel) { m.OverheadSeconds = x },
			"transfer.recompute_overhead_s": func(m *kvpolicy.TransferModel) { m.RecomputeOverheadSeconds = x },
			"transfer.kv_bytes_per_token":   func(m *kvpolicy.TransferModel) { m.KVBytesPerToken = x },
		} {
			m := good
			spoil(&m)
			_, _, err := kvpolicy.Crossover(m, 1e9, 3000)
			requireFieldError(t, err, path)
		}
	}
	for _, x := range append(bad, 0, 1e-10, 1e19) {
		_, _, err := kvpolicy.Crossover(good, x, 3000)
		requireFieldError(t, err, "bandwidth")
		_, _, err = kvpolicy.Crossover(good, 1e9, x)
		requireFieldError(t, err, "prefill_rate")
	}
	_, _, err := kvpolicy.Crossover(good, 1e9, math.Inf(1))
	requireFieldError(t, err, "prefill_rate")
}

func TestKVBytesPerToken(t *testing.T) {
	assert.Equal(t, 98_304.0, kvpolicy.KVBytesPerToken(48, 4, 128, 2))
	assert.Equal(t, 131_072.0, kvpolicy.KVBytesPerToken(32, 8, 128, 2)) // Llama-3.1-8B
	assert.Equal(t, 70_272.0, kvpolicy.LatentKVBytesPerToken(61, 512, 64, 2))
	assert.Equal(t, kvpolicy.H20Qwen3Coder30B().KVBytesPerToken, kvpolicy.UnifiedV2Relaxed().Transfer.KVBytesPerToken)
}
