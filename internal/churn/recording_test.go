package churn

import (
	"errors"
	"os"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/kvpolicy/kvpolicy"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"gonum.org/v1/gonum/integrate/quad"
	"gonum.org/v1/gonum/stat/distuv"
)

const head = "node,group,start_s,duration_seconds,observed,left_truncated,note\n"

func TestRecordingErrors(t *testing.T) {
	for _, c := range []struct{ name, text, place, field string }{
		{"no head", "", "x.csv:1:", "columns"},
		{"no lines", head, "x.csv:", "sessions"},
		{"a missing column", "node,group,start_s,observed,left_truncated\n", "x.csv:1:", "duration_seconds"},
		{"too few fields", head + "a,g,0,1,1,0,\nb,g,0\n", "x.csv:3:", "columns"},
		{"an open quote", head + "\"a,g,0,1,1,0,\n", "x.csv:2:", "columns"},
		{"no node", head + ",g,0,1,1,0,\n", "x.csv:2:", "node"},
		{"no number", head + "a,g,zero,1,1,0,\n", "x.csv:2:", "start_s"},
		{"not a number", head + "a,g,NaN,1,1,0,\n", "x.csv:2:", "start_s"},
		{"an infinite duration", head + "a,g,0,Inf,1,0,\n", "x.csv:2:", "duration_seconds"},
		{"a negative duration", head + "a,g,0,1,1,0,\na,g,5,-1,1,0,\n", "x.csv:3:", "duration_seconds"},
		{"no flag", head + "a,g,0,1,true,0,\n", "x.csv:2:", "observed"},
		{"no second flag", head + "a,g,0,1,1,,\n", "x.csv:2:", "left_truncated"},
		{"an overlap", head + "a,g,9,2,1,0,\na,g,0,10,1,0,\n", "x.csv:2:", "start_s"},
		{"too long a span", head + "a,g,0,1,1,0,\na,g,1e11,1,1,0,\n", "x.csv:", "start_s"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := ReadRecording("x.csv", strings.NewReader(c.text))
			var field *kvpolicy.FieldError
			require.ErrorAs(t, err, &field)
			assert.Equal(t, c.field, field.Path)
			assert.True(t, strings.HasPrefix(err.Error(), c.place), "%v", err)
		})
	}
	broken := errors.New("broken")
	_, err := ReadRecording("x.csv", iotest.ErrReader(broken))
	assert.ErrorIs(t, err, broken)
}

func TestRecordingAsItStands(t *testing.T) {
	// Columns in another order, lines in none; 1,000 s is where it begins.
	r, err := ReadRecording("x.csv", strings.NewReader(`left_truncated,observed,duration_seconds,start_s,group,node
0,1,50,1200,g,a
0,1,100,1000,g,a
0,0,500,1100,h,b
1,1,80,1010,h,c
`))
	require.NoError(t, err)
	assert.Equal(t, 600.0, r.SpanSeconds())
	assert.Equal(t, 10.0, r.MedianStart())
	assert.InDelta(t, 1.5, r.MeanUp(0, 20), 1e-12)
	assert.InDelta(t, 1, r.MeanUp(300, 300), 1e-12)
	s, err := r.Draw(Spot(), 1, 0.1, 150, 300)
	require.NoError(t, err)
	require.Len(t, s.Nodes, 3)
	assert.Equal(t, "a", s.Nodes[0].Name)
	assert.Equal(t, []Session{{-150, -50, true, false}, {50, 100, true, false}}, s.Nodes[0].Sessions)
	assert.Equal(t, []Session{{-140, -60, true, true}}, s.Nodes[1].Sessions)
	assert.Equal(t, []Session{{-50, 450, false, false}}, s.Nodes[2].Sessions)
	names, sessions := s.Seen(450)
	assert.Equal(t, []string{"g", "h"}, names)
	assert.Equal(t, map[string][]kvpolicy.Session{
		"g": {{DurationSeconds: 100, Observed: true}, {DurationSeconds: 50, Observed: true}},
		"h": {{DurationSeconds: 500}},
	}, sessions, "nobody knows how old c was")
	names, sessions = s.Seen(0)
	assert.Equal(t, []string{"g", "h"}, names)
	assert.Equal(t, map[string][]kvpolicy.Session{"g": {{DurationSeconds: 100, Observed: true}}, "h": {{DurationSeconds: 50}}}, sessions)
	assert.InEpsilon(t, 64_000, s.Nodes[0].KVCapacityTokens, 1e-12)
	again, err := r.Draw(Spot(), 2, 0.1, 150, 300)
	require.NoError(t, err)
	assert.Equal(t, s.Nodes[0].Sessions, again.Nodes[0].Sessions, "the seed does not draw sessions")
	assert.NotEqual(t, s.Nodes[0].DecodeRate, again.Nodes[0].DecodeRate)
}

func TestRealRecordings(t *testing.T) {
	for name, want := range map[string]struct{ nodes, ended int }{
		"sessions_p3.csv":              {177, 167},
		"sessions_g4dn.csv":            {79, 74},
		"sessions_gcp_preemptible.csv": {1442, 717},
	} {
		file, err := os.Open("../../../shared/data/spot/" + name)
		if err != nil {
			t.Skip("the recorded sessions are not here: ", err)
		}
		defer file.Close()
		r, err := ReadRecording(name, file)
		require.NoError(t, err)
		s, err := r.Draw(Spot(), 1, 0.1, r.MedianStart(), 900)
		require.NoError(t, err)
		ended := 0
		for _, n := range s.Nodes {
			for _, session := range n.Sessions {
				if session.Failed {
					ended++
				}
			}
		}
		assert.Len(t, s.Nodes, want.nodes)
		assert.Equal(t, want.ended, ended)
		result, err := Run(&s, HazardAware(), DefaultOptions())
		require.NoError(t, err)
		assert.NotZero(t, result.Completed)
	}
}

func TestPopulationIsTheMeanCurve(t *testing.T) {
	for _, kind := range []Kind{Laptop(), Spot(), Server()} {
		p := Population{kind}
		assert.Equal(t, 1.0, p.Survival(0))
		for _, at := range []float64{1, 100, 1000, 10_000} {
			mean := quad.Fixed(func(factor float64) float64 {
				return distuv.Weibull{K: kind.SessionShape, Lambda: factor * kind.SessionScaleSeconds}.Survival(at) / 0.8
			}, 0.6, 1.4, 100, nil, 0)
			assert.InDelta(t, mean, p.Survival(at), 1e-5)
		}
	}
}

func FuzzReadRecording(f *testing.F) {
	f.Add(head + "a,g,0,1,1,0,\n")
	f.Add(head + "a,g,1550509057.265,4648.701,1,0,24h_cap\nb,,2e9,1e8,0,1,\n")
	f.Fuzz(func(t *testing.T, text string) {
		r, err := ReadRecording("x.csv", strings.NewReader(text))
		if err != nil {
			return
		}
		if _, err := r.Draw(Laptop(), 1, 1e-3, r.MedianStart(), 100); err != nil {
			t.Fatalf("what was read can be drawn from: %v", err)
		}
	})
}

// Sessions that follow each other at once, in milliseconds since 1970, and a
// byte order mark.
func TestRecordingAsOthersWriteIt(t *testing.T) {
	r, err := ReadRecording("x.csv", strings.NewReader("\ufeff"+head+"a,g,1555964200.943,13781.196,1,0,\na,g,1555977982.139,60,1,0,\n"))
	require.NoError(t, err)
	s, err := r.Draw(Spot(), 1, 0.1, 0, 60)
	require.NoError(t, err)
	require.Len(t, s.Nodes, 1)
	require.Len(t, s.Nodes[0].Sessions, 2)
	assert.InDelta(t, 13781.196, s.Nodes[0].Sessions[1].StartSeconds, 1e-6)
	_, err = ReadRecording("x.csv", strings.NewReader(head+"a,g,1555964200.943,13781.196,1,0,\na,g,1555977982.138,60,1,0,\n"))
	assert.ErrorContains(t, err, "x.csv:3:", "a millisecond is no rounding")
}
