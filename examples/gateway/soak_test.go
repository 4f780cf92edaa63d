package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/kvpolicy/kvpolicy/examples/internal/router"
	"github.com/kvpolicy/kvpolicy/examples/internal/vllmlike"
)

// fate is what became of one request of the soak, as its client saw it.
type fate uint8

const (
	complete fate = 1 + iota // 200, and all of the answer
	refused                  // a status of 500 or more
	cutOff                   // 200, and then the connection broke
	left                     // the client went before
)

// TestSoak sends many requests through a gateway whose servers fail, break off
// and die, from clients that go at random. In the end nothing may be left:
// in no ledger, on no server, no goroutine; and each request must have been
// answered once.
func TestSoak(t *testing.T) {
	requests, workers := 10_000, 48
	if testing.Short() {
		requests = 1500
	}
	// Registered first, and so run last, when all is closed.
	running := goleak.IgnoreCurrent()
	t.Cleanup(func() { goleak.VerifyNone(t, running) })
	c := start(t, 4, fast(), func(r *router.Config, _ *options) {
		r.DecisionLog = nil
		r.Failures = 5
		r.ScrapeEvery = 50 * time.Millisecond
	})
	for _, s := range c.servers {
		s.SetFaults(vllmlike.Faults{ErrorRate: 0.03, BreakRate: 0.03})
	}
	stop := make(chan struct{})
	var dying sync.WaitGroup
	dying.Add(1)
	deaths := 0
	go func() { // one server dies and comes back, as long as it lasts
		defer dying.Done()
		for {
			select {
			case <-stop:
				return
			case <-time.After(300 * time.Millisecond):
			}
			c.servers[0].Kill()
			deaths++
			time.Sleep(200 * time.Millisecond)
			if err := c.servers[0].Revive(); err != nil {
				t.Errorf("revive: %v", err)
				return
			}
		}
	}()

	fates := make([]fate, requests)
	var next atomic.Int64
	var work sync.WaitGroup
	began := time.Now()
	for worker := range workers {
		work.Add(1)
		go func() {
			defer work.Done()
			random := rand.New(rand.NewPCG(7, uint64(worker)))
			for {
				n := int(next.Add(1)) - 1
				if n >= requests {
					return
				}
				fates[n] = c.soakOne(n, random)
			}
		}()
	}
	work.Wait()
	took := time.Since(began)
	close(stop)
	dying.Wait()

	counts := map[fate]int{}
	for n, f := range fates {
		require.NotZero(t, f, "request %d had no fate", n)
		counts[f]++
	}
	t.Logf("%d requests in %v: %d complete, %d refused, %d cut off, %d whose client left; %d deaths of a server",
		requests, took.Round(time.Millisecond), counts[complete], counts[refused], counts[cutOff], counts[left], deaths)
	require.Positive(t, deaths)
	for f := complete; f <= left; f++ {
		if f != refused { // three servers in a row must fail for that
			require.Positive(t, counts[f])
		}
	}
	require.Greater(t, counts[complete], requests*3/4)

	c.eventually("every ledger is at zero", func() bool { return c.inFlight() == 0 })
	c.eventually("every server is idle", func() bool {
		for _, s := range c.servers {
			if s.Busy() != 0 {
				return false
			}
		}
		return true
	})
	for _, i := range c.router.Tracker().Snapshot(trackRequest("probe"), time.Now(), nil).Instances {
		require.Zero(t, i.PendingPrefillTokens)
		require.Zero(t, i.ActiveDecodes)
	}
	// What the mortal server has written may have died with it on the way; what
	// the others have written was read.
	answers, mortal := map[string]int{}, map[string]bool{}
	for at, s := range c.servers {
		for _, seen := range s.Seen() {
			switch {
			case seen.Answered && at == 0:
				mortal[seen.ID] = true
			case seen.Answered:
				answers[seen.ID]++
			}
		}
	}
	for n, f := range fates {
		got := answers[soakID(n)]
		require.LessOrEqual(t, got, 1, "request %d was answered twice", n)
		switch f {
		case complete:
			require.True(t, got == 1 || mortal[soakID(n)], "request %d was answered by a server", n)
		case refused, cutOff:
			require.Zero(t, got, "request %d was answered, but not to its client", n)
		}
	}
	attempts := c.metric("kvpolicy_attempts_total")
	require.EqualValues(t, c.metric("kvpolicy_decisions_total", "place"), attempts, "each attempt ended once")
}

func soakID(n int) string { return fmt.Sprintf("soak-%d", n) }

// soakOne sends a request, and checks what comes of it.
func (c *cluster) soakOne(n int, random *rand.Rand) fate {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	tokens := 1 + random.IntN(8)
	stream := random.IntN(2) == 0
	session := random.IntN(200)
	body := fmt.Sprintf(`{"model":"tiny","prompt":%q,"max_tokens":%d,"stream":%v}`, strings.Repeat(fmt.Sprintf("session %d ", session), 1+random.IntN(30)), tokens, stream)
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, c.url+"/v1/completions", strings.NewReader(body))
	if err != nil {
		c.t.Error(err)
		return 0
	}
	request.Header.Set("X-Request-Id", soakID(n))
	request.Header.Set("X-Session-Id", fmt.Sprint(session))
	leaves := random.IntN(10) == 0
	if leaves {
		timer := time.AfterFunc(time.Duration(random.IntN(5000))*time.Microsecond, cancel)
		defer timer.Stop()
	}
	response, err := c.client.Do(request)
	if err != nil {
		if !leaves {
			c.t.Errorf("request %d: %v", n, err)
			return 0
		}
		return left
	}
	defer response.Body.Close()
	data, err := io.ReadAll(response.Body)
	switch {
	case ctx.Err() != nil:
		return left
	case response.StatusCode >= http.StatusInternalServerError && err == nil:
		return refused
	case response.StatusCode != http.StatusOK:
		c.t.Errorf("request %d: %s %s", n, response.Status, data)
		return 0
	case err != nil:
		return cutOff
	}
	text, ended := 0, true
	if stream {
		ended = strings.HasSuffix(string(data), "data: [DONE]\n\n")
		for line := range strings.Lines(string(data)) {
			var event struct{ Choices []struct{ Text string } }
			if json.Unmarshal([]byte(strings.TrimPrefix(line, "data: ")), &event) == nil {
				for _, choice := range event.Choices {
					text += len(choice.Text)
				}
			}
		}
	} else {
		var answer struct{ Choices []struct{ Text string } }
		if err := json.Unmarshal(data, &answer); err != nil || len(answer.Choices) != 1 {
			c.t.Errorf("request %d: %q", n, data)
			return 0
		}
		text = len(answer.Choices[0].Text)
	}
	if text != 4*tokens || !ended {
		c.t.Errorf("request %d: %d bytes of text for %d tokens: %q", n, text, tokens, data)
		return 0
	}
	return complete
}
