package churn

import (
	"fmt"

	"github.com/kvpolicy/kvpolicy"
)

// Options say how a scenario is played; see DefaultOptions.
type Options struct {
	// CheckSeconds is the interval at which running requests are checked for a
	// move, 1e-3 to 1e12 s.
	CheckSeconds float64
	// RefreshSeconds is the interval at which survival curves learn the ages of
	// the sessions that are running, 1e-3 to 1e12 s. Those that end are learnt
	// at once.
	RefreshSeconds float64
	// MinSessions is how many completed sessions a node needs for a curve of its
	// own, and a group likewise.
	MinSessions int
	// StallPenaltySeconds is how long a lost request stands still before it is
	// placed anew, 0 to 1e12 s.
	StallPenaltySeconds float64
	// Transfer is what moving costs. Its bandwidth is not used, as nodes have
	// their own.
	Transfer kvpolicy.TransferModel
}

// DefaultOptions are checks every 10 s and curves refreshed every minute (both
// ours: the source names no interval), 5 sessions, a stall of 2 s, overheads of
// 0.5 s for a transfer and 0.2 s for a recompute, and 131,072 bytes of KV a
// token (hazard algorithm note).
func DefaultOptions() Options {
	preset := kvpolicy.HazardAware()
	preset.Transfer.OverheadSeconds = 0.5
	preset.Transfer.KVBytesPerToken = 131_072
	return Options{
		CheckSeconds:        10,
		RefreshSeconds:      60,
		MinSessions:         kvpolicy.DefaultMinSessions,
		StallPenaltySeconds: preset.Hazard.StallPenaltySeconds,
		Transfer:            preset.Transfer,
	}
}

func (o *Options) validate() error {
	for _, seconds := range []struct {
		path         string
		value, least float64
	}{{"check_s", o.CheckSeconds, 1e-3}, {"refresh_s", o.RefreshSeconds, 1e-3}, {"stall_penalty_s", o.StallPenaltySeconds, 0}} {
		if !(seconds.value >= seconds.least && seconds.value <= 1e12) {
			return &kvpolicy.FieldError{Path: seconds.path, Value: fmt.Sprint(seconds.value), Want: fmt.Sprintf("be %v to 1e12 seconds", seconds.least)}
		}
	}
	if o.MinSessions < 0 {
		return &kvpolicy.FieldError{Path: "min_sessions", Value: fmt.Sprint(o.MinSessions), Want: "be at least 0"}
	}
	return nil
}
