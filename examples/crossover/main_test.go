package main

import (
	"bytes"
	"encoding/xml"
	"image/png"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/kvpolicy/kvpolicy"
)

func TestTables(t *testing.T) {
	var out bytes.Buffer
	require.NoError(t, run([]string{"-prefill-rates", "3000,250"}, &out, io.Discard))
	rows := map[string][]string{}
	for line := range strings.Lines(out.String()) {
		fields := strings.Split(strings.Join(strings.Fields(line), " "), " ")
		rows[strings.Join(fields[:min(2, len(fields))], " ")] = fields
	}
	for start, want := range map[string]string{ // 250 tokens/s first: rates are sorted
		"100 Mbit/s":   "never never",
		"10 Gbit/s":    "above 77 above 1,299",
		"200 Gbit/s":   "above 75 above 914",
		"idle: 0.003":  "s + 9.7 GB/s always always",
		"assumed: 0.3": "s + 2.7 GB/s above 25 above 337",
	} {
		require.Contains(t, rows, start)
		assert.Equal(t, want, strings.Join(rows[start][2:], " "), start)
	}
	assert.Contains(t, out.String(), "128,000 bytes of KV a token, overheads 0.5 s of a transfer and 0.2 s of a recompute")
}

// The other regimes, and equal overheads.
func TestTablesInEveryRegime(t *testing.T) {
	var out bytes.Buffer
	require.NoError(t, run([]string{"-overhead", "0.1"}, &out, io.Discard))
	assert.Contains(t, out.String(), "below 2,170")
	assert.Contains(t, out.String(), "always")
	out.Reset()
	require.NoError(t, run([]string{"-overhead", "0.2"}, &out, io.Discard))
	assert.Contains(t, out.String(), "above 0")
}

func TestPictures(t *testing.T) {
	for _, args := range [][]string{
		nil, {"-overhead", "0.1"}, {"-overhead", "0.2"}, {"-kv-bytes", "0"}, {"-prefill-rates", "1e-9"},
		{"-prefill-rates", "1e18,1,2,3,4,5,6,7"}, {"-overhead", "1e12", "-recompute-overhead", "0"},
	} {
		directory := filepath.Join(t.TempDir(), "new")
		require.NoError(t, run(append(args, "-out", directory), io.Discard, io.Discard), args)
		data, err := os.ReadFile(filepath.Join(directory, "crossover.png"))
		require.NoError(t, err)
		picture, err := png.Decode(bytes.NewReader(data))
		require.NoError(t, err)
		assert.Greater(t, picture.Bounds().Dx(), 800)
		svg, err := os.ReadFile(filepath.Join(directory, "crossover.svg"))
		require.NoError(t, err)
		var document struct {
			XMLName xml.Name `xml:"svg"`
		}
		require.NoError(t, xml.Unmarshal(svg, &document))
		for _, words := range []string{"link bandwidth (bytes/s)", "context (tokens)", "10 Gbit/s"} {
			assert.Contains(t, string(svg), words)
		}
		if args == nil {
			for _, words := range []string{"transfer is cheaper", "recompute is cheaper", "prefill 7,000 tokens/s"} {
				assert.Contains(t, string(svg), words)
			}
		}
	}
}

func TestBadFlags(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	for _, c := range []struct{ args, says string }{
		{"-overhead -1", "-overhead is -1, must be 0 to 1e12"},
		{"-overhead NaN", "-overhead is NaN"},
		{"-recompute-overhead Inf", "-recompute-overhead is +Inf"},
		{"-kv-bytes -1", "-kv-bytes is -1"},
		{"-kv-bytes many", "-kv-bytes"},
		{"-prefill-rates 0", `"0" must be 1e-9 to 1e18 tokens/s`},
		{"-prefill-rates 250,", `"" must be`},
		{"-prefill-rates NaN", `"NaN" must be`},
		{"-prefill-rates 1,2,3,4,5,6,7,8,9", "at most 8 rates"},
		{"-unknown", "not defined"},
		{"word", `unexpected argument "word"`},
		{"-out " + file, "file"},
	} {
		err := run(strings.Fields(c.args), io.Discard, io.Discard)
		assert.ErrorContains(t, err, c.says, c.args)
	}
}

func TestThousands(t *testing.T) {
	for x, want := range map[float64]string{0: "0", 0.25: "0.25", 9.82: "9.82", 75.4: "75", 999.6: "1,000", 128_000: "128,000", 1e6: "1,000,000", 1e18: "1e+18"} {
		assert.Equal(t, want, thousands(x))
	}
}

func TestBoundaryIsTheCrossover(t *testing.T) {
	m := kvpolicy.TransferModel{RecomputeOverheadSeconds: 0.2, KVBytesPerToken: 128_000}.WithLink(kvpolicy.LineRate(10))
	tokens, above, err := regimes{model: m}.boundary(1.25e9, 3000)
	require.NoError(t, err)
	assert.True(t, above)
	assert.InDelta(t, 1299, tokens, 0.5)
}
