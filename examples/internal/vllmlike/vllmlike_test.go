package vllmlike

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"pgregory.net/rapid"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// The cache holds what a plain list of all prompts would, as long as it is large
// enough for them, and never more than its size.
func TestPrefixCache(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := DefaultConfig()
		c.BlockTokens, c.Blocks = rapid.IntRange(1, 4).Draw(t, "block"), 1000
		s := newScheduler(c, time.Now())
		small := c
		small.Blocks = 3
		bounded := newScheduler(small, time.Now())
		var seen [][]uint32
		for range rapid.IntRange(1, 12).Draw(t, "prompts") {
			prompt := rapid.SliceOfN(rapid.Uint32Range(0, 2), 1, 20).Draw(t, "prompt")
			longest := 0
			for _, other := range seen {
				n := 0
				for n < min(len(prompt), len(other)) && prompt[n] == other[n] {
					n++
				}
				longest = max(longest, n/c.BlockTokens*c.BlockTokens)
			}
			if longest >= len(prompt) { // the last token is always computed
				longest = (len(prompt) - 1) / c.BlockTokens * c.BlockTokens
			}
			require.Equal(t, longest, s.match(prompt))
			require.LessOrEqual(t, bounded.match(prompt), longest)
			s.insert(prompt)
			bounded.insert(prompt)
			require.LessOrEqual(t, len(bounded.blocks), 3)
			require.Equal(t, len(bounded.blocks), bounded.used.Len())
			seen = append(seen, prompt)
		}
	})
}

func TestARestartForgets(t *testing.T) {
	s, err := Start(DefaultConfig())
	require.NoError(t, err)
	defer s.Kill()
	client := &http.Client{Transport: &http.Transport{}}
	defer client.CloseIdleConnections()
	ask := func() {
		response, err := client.Post(s.URL()+"/v1/completions", "application/json", strings.NewReader(fmt.Sprintf(`{"prompt":%q,"max_tokens":1}`, strings.Repeat("x", 400))))
		require.NoError(t, err)
		require.Equal(t, http.StatusOK, response.StatusCode)
		_, err = io.Copy(io.Discard, response.Body)
		require.NoError(t, err)
		require.NoError(t, response.Body.Close())
	}
	counted := func() string {
		response, err := client.Get(s.URL() + "/metrics")
		require.NoError(t, err)
		defer response.Body.Close()
		page, err := io.ReadAll(response.Body)
		require.NoError(t, err)
		for line := range strings.Lines(string(page)) {
			if strings.HasPrefix(line, "vllm:prompt_tokens_total") {
				return strings.Fields(line)[1]
			}
		}
		return "none"
	}
	ask()
	ask()
	require.Equal(t, "200", counted())
	s.Kill()
	_, err = client.Get(s.URL() + "/health")
	require.Error(t, err)
	require.NoError(t, s.Revive())
	require.NoError(t, s.Revive(), "it lives already")
	require.Equal(t, "0", counted())
	ask()
	var cached []int
	for _, seen := range s.Seen() {
		require.True(t, seen.Answered)
		cached = append(cached, seen.CachedTokens)
	}
	require.Equal(t, []int{0, 96, 0}, cached)
	require.Zero(t, s.Busy())
	_, err = Start(Config{})
	require.Error(t, err)
}
