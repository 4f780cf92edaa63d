package track_test

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/kvpolicy/kvpolicy"
	"github.com/kvpolicy/kvpolicy/track"
)

func TestWords(t *testing.T) {
	type words struct {
		States  []track.State
		Endings []track.Ending
	}
	want := words{[]track.State{track.Ready, track.Draining, track.Down}, []track.Ending{track.Planned, track.Lost}}
	text, err := json.Marshal(want)
	require.NoError(t, err)
	assert.JSONEq(t, `{"States": ["ready", "draining", "down"], "Endings": ["planned", "lost"]}`, string(text))
	var got words
	require.NoError(t, json.Unmarshal(text, &got))
	assert.Equal(t, want, got)
	for _, bad := range []string{`{"States": ["up"]}`, `{"Endings": [""]}`} {
		assert.ErrorIs(t, json.Unmarshal([]byte(bad), &got), kvpolicy.ErrInvalid)
	}
	for _, bad := range []any{track.State(0), track.State(4), track.Ending(3)} {
		_, err := json.Marshal(bad)
		assert.ErrorIs(t, err, kvpolicy.ErrInvalid)
	}
}
