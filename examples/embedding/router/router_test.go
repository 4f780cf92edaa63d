package router

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/kvpolicy/kvpolicy"
	"github.com/kvpolicy/kvpolicy/track"
)

func newRouter(t testing.TB, instances ...string) *Router {
	tracker, err := track.New(track.DefaultConfig())
	require.NoError(t, err)
	for _, id := range instances {
		require.NoError(t, tracker.Join(id, track.InstanceInfo{}, time.Now()))
	}
	policy := kvpolicy.Unified()
	policy.MaxMetricsAgeSeconds = 60
	return &Router{Policy: policy, Tracker: tracker, Attempts: 3}
}

func request(r *Router, id string, tokens int) track.Request {
	ids := make([]uint32, tokens)
	for at := range ids {
		ids[at] = uint32(len(id)*1000 + int(id[len(id)-1]))
	}
	request := track.Request{Prompt: r.Tracker.TokenPrompt(nil, track.Salt{Model: "m"}, ids)}
	request.ID, request.ContextTokens = id, int64(tokens)
	return request
}

// idle requires that nothing is left in the ledger.
func idle(t *testing.T, r *Router) {
	for _, i := range r.Tracker.Snapshot(track.Request{}, time.Now(), nil).Instances {
		require.Zero(t, i.Requests+i.OngoingTokens+i.PendingPrefillTokens+i.ActiveDecodes, "%+v", i)
	}
}

func TestAnAnswerIsSeenFromItsFirstTokenToItsEnd(t *testing.T) {
	r := newRouter(t, "a")
	see := func() kvpolicy.Instance {
		return r.Tracker.Snapshot(track.Request{}, time.Now(), nil).Instances[0]
	}
	err := r.Serve(context.Background(), request(r, "r", 160), func(_ context.Context, target string, seen func(int64)) error {
		require.Equal(t, "a", target)
		require.EqualValues(t, 160, see().PendingPrefillTokens)
		seen(0) // a first part that does not tell
		require.Zero(t, see().PendingPrefillTokens)
		seen(40)
		require.EqualValues(t, 200, see().OngoingTokens)
		require.EqualValues(t, 1, see().ActiveDecodes)
		return nil
	})
	require.NoError(t, err)
	idle(t, r)
	require.Contains(t, r.Report(), "no_affinity")
}

func TestTriesAnotherInstanceBeforeTheFirstTokenAlone(t *testing.T) {
	r := newRouter(t, "a", "b", "c")
	broken := errors.New("connection refused")
	var tried []string
	err := r.Serve(context.Background(), request(r, "r", 160), func(_ context.Context, target string, _ func(int64)) error {
		tried = append(tried, target)
		return broken
	})
	require.ErrorIs(t, err, broken)
	require.ElementsMatch(t, []string{"a", "b", "c"}, tried, "each once")

	tried = nil
	err = r.Serve(context.Background(), request(r, "s", 160), func(_ context.Context, target string, seen func(int64)) error {
		tried = append(tried, target)
		if len(tried) == 2 {
			seen(1)
		}
		return broken
	})
	require.ErrorIs(t, err, broken)
	require.Len(t, tried, 2, "half an answer is not sent twice")

	ctx, cancel := context.WithCancel(context.Background())
	tried = nil
	err = r.Serve(ctx, request(r, "u", 160), func(ctx context.Context, target string, _ func(int64)) error {
		tried = append(tried, target)
		cancel()
		return ctx.Err()
	})
	require.ErrorIs(t, err, context.Canceled)
	require.Len(t, tried, 1, "the client has gone")
	idle(t, r)
}

func TestCountsAreReleasedOnce(t *testing.T) {
	r := newRouter(t, "a")
	kept := request(r, "kept", 160)
	_, err := r.begin(kept, nil)
	require.NoError(t, err)
	gone := request(r, "gone", 160)
	err = r.Serve(context.Background(), gone, func(context.Context, string, func(int64)) error {
		require.True(t, r.Tracker.End(gone.Key(), time.Now()), "a disconnect noticed elsewhere")
		return io.ErrUnexpectedEOF
	})
	require.ErrorIs(t, err, io.ErrUnexpectedEOF)
	var refusal *Refusal
	require.ErrorAs(t, err, &refusal, "there is no other instance")
	i := r.Tracker.Snapshot(track.Request{}, time.Now(), nil).Instances[0]
	require.EqualValues(t, 1, i.Requests)
	require.EqualValues(t, 160, i.OngoingTokens)
}

func TestAtOnceTheySpread(t *testing.T) {
	instances := []string{"a", "b", "c", "d", "e", "f", "g", "h"}
	r := newRouter(t, instances...)
	var all sync.WaitGroup
	for at := range 800 {
		all.Add(1)
		go func() {
			defer all.Done()
			request := track.Request{}
			request.ID, request.ContextTokens = fmt.Sprint(at), 1000
			_, err := r.begin(request, nil)
			assert.NoError(t, err)
		}()
	}
	all.Wait()
	for _, i := range r.Tracker.Snapshot(track.Request{}, time.Now(), nil).Instances {
		require.EqualValues(t, 100, i.Requests)
	}
}

func TestRefusals(t *testing.T) {
	send := func(context.Context, string, func(int64)) error { return errors.New("not to be sent") }
	var refusal *Refusal
	r := newRouter(t)
	require.ErrorAs(t, r.Serve(context.Background(), request(r, "r", 160), send), &refusal)
	require.Equal(t, 503, refusal.Status())

	require.NoError(t, r.Tracker.Join("small", track.InstanceInfo{KVCapacityTokens: 100}, time.Now()))
	require.ErrorAs(t, r.Serve(context.Background(), request(r, "r", 160), send), &refusal)
	require.Equal(t, 429, refusal.Status())
	require.EqualError(t, refusal, "refused: no_feasible_instance")
}

func TestANeverScrapedInstanceDoesNotWinByLookingIdle(t *testing.T) {
	r := newRouter(t, "scraped", "unknown")
	running, waiting := 30.0, 10.0
	require.NoError(t, r.Tracker.Observe("scraped", track.Metrics{Running: &running, Waiting: &waiting}, time.Now()))
	d, err := r.begin(request(r, "r", 160), nil)
	require.NoError(t, err)
	require.Equal(t, "scraped", d.Target)
	require.False(t, d.Degraded)
	d, err = r.begin(request(r, "s", 160), []string{"scraped"})
	require.NoError(t, err)
	require.True(t, d.Degraded)
}
