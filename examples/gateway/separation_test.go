package main

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvpolicy/kvpolicy"
	"github.com/kvpolicy/kvpolicy/examples/internal/router"
	"github.com/kvpolicy/kvpolicy/examples/internal/vllmlike"
)

// separating is a policy that has the prefill done elsewhere whenever some
// other instance holds more of the prompt, and places by the number of requests.
func separating() kvpolicy.Policy {
	p := kvpolicy.LeastLoaded()
	p.Separation = kvpolicy.UnifiedV2Relaxed().Separation
	p.Separation.MinNewTokens, p.Separation.MinActiveDecodes = 100, 0
	p.Separation.MinSourceCacheTokens, p.Separation.MinExtraCacheTokens = 100, 100
	p.Transfer.OverheadSeconds, p.Transfer.Bandwidth = 0, 1e12
	return p
}

// separated starts two servers of which the first holds a prompt, and keeps it
// busy by a request of its own, so that the next one is decoded on the second.
func separated(t *testing.T, transfer *vllmlike.Transfer) (c *cluster, body string) {
	like := fast()
	like.Transfer = transfer
	like.DecodeRate = 100
	c = start(t, 2, like, func(r *router.Config, _ *options) {
		r.Policy = separating()
		r.ScrapeEvery, r.Tokenize = time.Hour, false
	})
	prompt := strings.Repeat("a long prompt to ship ", 100)
	body = fmt.Sprintf(`{"model":"tiny","prompt":%q,"max_tokens":3,"min_tokens":2`, prompt)
	// The decision on the first request is free; the second session holds its
	// instance busy.
	first := c.post("/v1/completions", body+"}").header.Get("X-Kvpolicy-Instance")
	if first != "server-0" { // by the hash
		c.servers[0], c.servers[1] = c.servers[1], c.servers[0]
	}
	busy := c.router.NewCall(t.Context(), nil, "")
	busy.Only([]string{c.servers[0].Address()})
	attempt, err := busy.Next()
	require.NoError(t, err)
	t.Cleanup(func() { attempt.End(router.Abandoned, nil, "") })
	return c, body
}

func TestPrefillElsewhere(t *testing.T) {
	for _, test := range []struct{ name, more string }{
		{"whole", `}`},
		{"streamed", `,"stream":true,"stream_options":{"include_usage":true}}`},
		{"completion tokens", `,"max_completion_tokens":3}`},
	} {
		t.Run(test.name, func(t *testing.T) {
			transfer := &vllmlike.Transfer{TokensPerSecond: 1e6}
			c, body := separated(t, transfer)
			r := c.post("/v1/completions", body+test.more, "X-Request-Id", "shipped")
			require.Equal(t, http.StatusOK, r.status, r.body)
			source, target := c.servers[0].Seen(), c.servers[1].Seen()
			require.Len(t, source, 2)
			require.Len(t, target, 1)
			require.True(t, source[1].RemoteDecode)
			require.Equal(t, "shipped", source[1].ID)
			require.Equal(t, 1, source[1].Completed, "a prefill, and no more")
			require.Positive(t, source[1].CachedTokens)
			require.True(t, target[0].RemotePrefill)
			require.Equal(t, "shipped", target[0].ID)
			require.Equal(t, target[0].PromptTokens, target[0].CachedTokens, "nothing is computed twice")
			require.Equal(t, 3, target[0].Completed)
			require.Zero(t, transfer.Held(), "what was held has been fetched")
			require.EqualValues(t, 1, c.metric("kvpolicy_decisions_total", "prefill_remote"))
			require.EqualValues(t, 1, c.metric("kvpolicy_funnel_total", "triggered"))
			c.eventually("released", func() bool { return c.inFlight() == 1 }) // the one that keeps the source busy
		})
	}
}

func TestASourceWithoutAConnector(t *testing.T) {
	c, body := separated(t, nil)
	r := c.post("/v1/completions", body+"}")
	require.Equal(t, http.StatusOK, r.status, r.body)
	require.Len(t, c.servers[0].Seen(), 2)
	target := c.servers[1].Seen()
	require.Len(t, target, 1)
	require.False(t, target[0].RemotePrefill)
	require.Equal(t, 3, target[0].Completed, "the target does it all")
}

func TestASourceThatFails(t *testing.T) {
	c, body := separated(t, &vllmlike.Transfer{TokensPerSecond: 1e6})
	c.servers[0].SetFaults(vllmlike.Faults{ErrorRate: 1})
	r := c.post("/v1/completions", body+"}")
	require.Equal(t, http.StatusOK, r.status, r.body)
	target := c.servers[1].Seen()
	require.Len(t, target, 1)
	require.False(t, target[0].RemotePrefill)
	require.Equal(t, 3, target[0].Completed)
	require.EqualValues(t, 3, c.metric("kvpolicy_decisions_total", "place"), "the first, the busy one and this one")
	c.eventually("released", func() bool { return c.inFlight() == 1 })
}

// A source that hangs is blamed for it, and not the target that waits for it.
func TestASourceThatHangs(t *testing.T) {
	c, body := separated(t, &vllmlike.Transfer{TokensPerSecond: 1e6})
	c.gateway.firstByte = 300 * time.Millisecond
	c.servers[0].SetFaults(vllmlike.Faults{Hang: true})
	r := c.post("/v1/completions", body+"}")
	require.Equal(t, http.StatusGatewayTimeout, r.status, r.body)
	require.Zero(t, c.metric("kvpolicy_attempts_total", "failed"))
	require.EqualValues(t, 1, c.metric("kvpolicy_attempts_total", "abandoned"))
	c.eventually("released", func() bool { return c.inFlight() == 1 })
}
