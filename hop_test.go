package kvpolicy_test

import (
	"fmt"
	"math"
	"os"
	"strings"
	"testing"

	"github.com/kvpolicy/kvpolicy"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"gonum.org/v1/gonum/stat/distuv"
)

// hop is the question that the hazard algorithm note leaves open: whether
// moving before a loss ever pays between two nodes with 100 Mbit/s between
// them. docs/migration.md tells the answer in the tables that are computed
// here.
type hop struct {
	stallPenalty, maxSlowdown, hysteresis float64 // hysteresis 0 is the default
	rounds                                int
}

const (
	hopLongest = 7200 // seconds of uptime looked at: 1 node in 10^93 gets that old
	hopScale   = 1200
)

// move is the move to the other node, made or not, when the node that runs the
// request has been up for so long.
func (h hop) move(t *testing.T, uptime float64) (kvpolicy.Move, kvpolicy.Decision) {
	t.Helper()
	policy := kvpolicy.HazardAware()
	policy.Transfer.OverheadSeconds, policy.Transfer.KVBytesPerToken = 0.5, 128_000
	policy.Hazard.StallPenaltySeconds = h.stallPenalty
	policy.Migration.OverlapRounds, policy.Migration.MaxSlowdownSeconds = h.rounds, h.maxSlowdown
	if h.hysteresis > 0 {
		policy.Migration.HysteresisSeconds = h.hysteresis
	}
	from := kvpolicy.Instance{ID: "i", PrefillRate: 250, DecodeRate: 12, Bandwidth: 12.5e6, UptimeSeconds: uptime,
		Curve: distuv.Weibull{K: 3, Lambda: hopScale}}
	to := from
	to.ID, to.UptimeSeconds = "j", 60
	d, err := policy.Decide(kvpolicy.Snapshot{
		Request:   kvpolicy.Request{ID: "r", ContextTokens: 4500, RemainingTokens: 2000, RunningOn: "i"},
		Instances: []kvpolicy.Instance{from, to},
	})
	require.NoError(t, err)
	if d.Action == kvpolicy.Migrate {
		return d.Move, d
	}
	return d.Candidate, d
}

// first is the least uptime, in whole seconds, for which holds is true; -1
// where there is none within hopLongest.
func (h hop) first(t *testing.T, holds func(kvpolicy.Move, kvpolicy.Decision) bool) int {
	t.Helper()
	for uptime := range hopLongest + 1 {
		if holds(h.move(t, float64(uptime))) {
			return uptime
		}
	}
	return -1
}

func gains(seconds float64) func(kvpolicy.Move, kvpolicy.Decision) bool {
	return func(m kvpolicy.Move, _ kvpolicy.Decision) bool { return m.RiskGainSeconds > seconds }
}

func fires(_ kvpolicy.Move, d kvpolicy.Decision) bool { return d.Action == kvpolicy.Migrate }

// requireInDoc demands that docs/migration.md holds the table.
func requireInDoc(t *testing.T, rows []string) {
	t.Helper()
	text, err := os.ReadFile("docs/migration.md")
	require.NoError(t, err)
	table := strings.Join(rows, "\n")
	assert.True(t, strings.Contains(string(text), table), "docs/migration.md should hold\n\n%s", table)
}

func TestStopAndCopyOnAWideAreaHop(t *testing.T) {
	stop := hop{stallPenalty: 10}
	t.Run("the gains are the published ones", func(t *testing.T) {
		for uptime, gain := range map[float64]float64{120: -18.0, 600: -14.3, 1200: -6.3, 1800: 1.9} {
			m, d := stop.move(t, uptime)
			assert.InDelta(t, gain, m.RiskGainSeconds, 0.05)
			assert.InDelta(t, 18.2, m.PlannedSeconds, 1e-12)
			assert.Equal(t, kvpolicy.RiskGainBelowHysteresis, d.Reason)
		}
	})
	t.Run("negative at every uptime is not so", func(t *testing.T) {
		assert.Equal(t, 1648, stop.first(t, gains(0)), "it turns positive at 27 and a half minutes")
		assert.Equal(t, 1810, stop.first(t, gains(2)), "and exceeds the hysteresis at 30")
		m, d := stop.move(t, 1810)
		assert.Equal(t, kvpolicy.DestinationSlower, d.Reason, "but the move takes longer than it may")
		assert.InDelta(t, 18.2, m.DeltaTSeconds, 1e-9)
	})
	t.Run("it never fires by default, whatever the stall penalty", func(t *testing.T) {
		for _, penalty := range []float64{0, 2, 5, 10, 20, 30, 100, 1000} {
			assert.Equal(t, -1, hop{stallPenalty: penalty}.first(t, fires), "%v s", penalty)
		}
	})
	t.Run("a hysteresis above 18.2 s lets it take that long, and asks for as much gain", func(t *testing.T) {
		assert.Equal(t, -1, hop{stallPenalty: 17, hysteresis: 18.3}.first(t, fires))
		assert.Equal(t, 3205, hop{stallPenalty: 18, hysteresis: 18.3}.first(t, fires))
	})
	t.Run("it fires where it may take that long", func(t *testing.T) {
		assert.Equal(t, 1810, hop{stallPenalty: 10, maxSlowdown: 30}.first(t, fires))
	})
}

func TestHopByUptime(t *testing.T) {
	rows := []string{
		"| uptime, min | share of nodes that get there | L_i, s | stop and copy: gain, s | delta T, s | verdict | 4 rounds: gain, s | delta T, s | verdict |",
		"|---:|---:|---:|---:|---:|---|---:|---:|---|",
	}
	for _, minutes := range []float64{2, 5, 10, 20, 30, 40, 60, 90, 120} {
		uptime := 60 * minutes
		stop, stopped := hop{stallPenalty: 10}.move(t, uptime)
		overlap, overlapped := hop{stallPenalty: 10, rounds: 4}.move(t, uptime)
		share := 100 * math.Exp(-math.Pow(uptime/hopScale, 3))
		text := fmt.Sprintf("%.1f %%", share)
		if share < 0.05 {
			text = fmt.Sprintf("%.1g %%", share)
		}
		rows = append(rows, fmt.Sprintf("| %.0f | %s | %.1f | %+.1f | %+.1f | `%s` | %+.1f | %+.3f | `%s` |", minutes, text, stop.LossStaySeconds,
			stop.RiskGainSeconds, stop.DeltaTSeconds, stopped.Reason, overlap.RiskGainSeconds, overlap.DeltaTSeconds, overlapped.Reason))
	}
	requireInDoc(t, rows)
}

func TestHopByStallPenalty(t *testing.T) {
	from := func(uptime int) string {
		if uptime < 0 {
			return "never"
		}
		return fmt.Sprint(uptime)
	}
	rows := []string{
		"| stall penalty, s | gain above 0 from | above 2 from | greatest gain, s (at) | fires from | with `max_slowdown_s` 30 from | 1 round fires from | 4 rounds fire from |",
		"|---:|---:|---:|---:|---:|---:|---:|---:|",
	}
	last := hopLongest
	for _, penalty := range []float64{0, 2, 5, 10, 20, 30} {
		stop := hop{stallPenalty: penalty}
		greatest, at := math.Inf(-1), 0
		for uptime := 0; uptime <= hopLongest; uptime++ {
			if m, _ := stop.move(t, float64(uptime)); m.RiskGainSeconds > greatest {
				greatest, at = m.RiskGainSeconds, uptime
			}
		}
		four := hop{stallPenalty: penalty, rounds: 4}
		fire := four.first(t, fires)
		require.Greater(t, fire, 0, "with overlap it pays for any penalty")
		require.Less(t, fire, last, "and the sooner the dearer a stall is")
		last = fire
		rows = append(rows, fmt.Sprintf("| %v | %s | %s | %+.1f (%d) | %s | %s | %s | %s |", penalty,
			from(stop.first(t, gains(0))), from(stop.first(t, gains(2))), greatest, at, from(stop.first(t, fires)),
			from(hop{stallPenalty: penalty, maxSlowdown: 30}.first(t, fires)),
			from(hop{stallPenalty: penalty, rounds: 1}.first(t, fires)), from(fire)))
	}
	requireInDoc(t, rows)
}
