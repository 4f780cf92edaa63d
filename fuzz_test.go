package kvpolicy_test

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"testing"

	"github.com/kvpolicy/kvpolicy"
	"github.com/stretchr/testify/require"
	"gonum.org/v1/gonum/stat/distuv"
)

func FuzzPolicyJSON(f *testing.F) {
	for _, name := range kvpolicy.PresetNames() {
		p, err := kvpolicy.Preset(name)
		require.NoError(f, err)
		data, err := json.Marshal(p)
		require.NoError(f, err)
		f.Add(data)
	}
	f.Add([]byte(`{"preset":"hazard_aware","hazard":{"cells":0},"migration":{"overlap_rounds":64},"pdsep":{"margin_s":1e-300}}`))
	f.Add([]byte(`{"affinity":null,"cost":{"prefill_quadratic":1,"prefill_rate":1e-9}}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		var p kvpolicy.Policy
		if err := p.UnmarshalJSON(data); err != nil {
			require.ErrorIs(t, err, kvpolicy.ErrInvalid)
			require.Equal(t, kvpolicy.Policy{}, p)
			return
		}
		require.NoError(t, p.Validate())
		written, err := json.Marshal(p)
		require.NoError(t, err)
		var back kvpolicy.Policy
		require.NoError(t, back.UnmarshalJSON(written))
		again, err := json.Marshal(back)
		require.NoError(t, err)
		require.Equal(t, string(written), string(again))
		fuzzDecide(t, p, equalFleet(3))
	})
}

func FuzzSnapshotJSON(f *testing.F) {
	f.Add([]byte(`{"request":{"id":"r","context_tokens":9000,"remaining_tokens":10,"affinity":"a"},"instances":[{"id":"a","requests":3,"cached_tokens":8000},{"id":"b","active_decodes":2}]}`))
	f.Add([]byte(`{"request":{"running_on":"a","remaining_tokens":900},"instances":[{"id":"a","decode_rate":20,"curve":"c"},{"id":"b","decode_rate":20}],"curves":{"c":{"kind":"exponential","rate":0.05}}}`))
	f.Add([]byte(`{"instances":[{"id":"a","decode_rate":9,"uptime_s":1e12,"curve":"k"},{"id":"b","kv_capacity_tokens":1,"kv_used_tokens":1}],"curves":{"k":{"kind":"km","durations":[1,2,2],"observed":[1,0,true]}}}`))
	f.Add([]byte(`{"instances":[{"id":"a","decode_rate":9,"curve":"w"}],"curves":{"w":{"kind":"weibull","shape":1000,"scale":1e-300}}}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		var s kvpolicy.Snapshot
		if err := s.UnmarshalJSON(data); err != nil {
			require.ErrorIs(t, err, kvpolicy.ErrInvalid)
			require.Equal(t, kvpolicy.Snapshot{}, s)
			return
		}
		written, err := json.Marshal(s)
		require.NoError(t, err)
		var back kvpolicy.Snapshot
		require.NoError(t, back.UnmarshalJSON(written))
		again, err := json.Marshal(back)
		require.NoError(t, err)
		require.Equal(t, string(written), string(again))
		for _, name := range kvpolicy.PresetNames() {
			p, err := kvpolicy.Preset(name)
			require.NoError(t, err)
			fuzzDecide(t, p, s)
		}
	})
}

// fuzzDecide decides on what may be invalid: there is an error and no decision,
// or a decision that is sound.
func fuzzDecide(t *testing.T, p kvpolicy.Policy, s kvpolicy.Snapshot) {
	d, err := p.Decide(s)
	explained, errExplain := p.Explain(nil, s)
	if err != nil {
		require.ErrorIs(t, err, kvpolicy.ErrInvalid)
		require.Equal(t, kvpolicy.Decision{}, d)
		require.ErrorIs(t, errExplain, kvpolicy.ErrInvalid)
		return
	}
	requireSound(t, d)
	require.NoError(t, errExplain)
	checkExplained(t, s, d, explained)
	next, err := s.Apply(d)
	require.NoError(t, err)
	require.Len(t, next.Instances, len(s.Instances))
}

// numbers reads arbitrary numbers off the fuzzer's bytes, zero at their end.
type numbers struct{ *bytes.Reader }

func (n numbers) bits() (x uint64) {
	var word [8]byte
	_, _ = n.Read(word[:])
	return binary.LittleEndian.Uint64(word[:])
}
func (n numbers) float() float64 { return math.Float64frombits(n.bits()) }
func (n numbers) count() int64   { return int64(n.bits()) }
func (n numbers) byte() byte     { b, _ := n.ReadByte(); return b }

// flip overrides a value that is valid with an arbitrary one, now and then.
func flip[T any](n numbers, to *T, read func() T) {
	if n.byte()%4 == 1 {
		*to = read()
	}
}

func FuzzDecide(f *testing.F) {
	f.Add([]byte{})
	f.Add(bytes.Repeat([]byte{2, 3, 0, 1, 0, 0, 0, 0, 0, 0, 0xf0, 0x3f}, 40))
	f.Add(bytes.Repeat([]byte{10, 1, 1, 0, 0, 0, 0, 0, 0, 0xf0, 0x7f, 9}, 40))
	f.Add(bytes.Repeat([]byte{4, 1, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f}, 60))
	f.Fuzz(func(t *testing.T, data []byte) {
		n := numbers{bytes.NewReader(data)}
		names := kvpolicy.PresetNames()
		p, err := kvpolicy.Preset(names[int(n.byte())%len(names)])
		require.NoError(t, err)
		p.Cost.DecodeRate = 40
		s := equalFleet(int(n.byte() % 5))
		for _, x := range []*float64{&p.MaxMetricsAgeSeconds, &p.Cost.DecodeIterationSeconds, &p.Cost.PrefillRate,
			&p.Cost.PrefillQuadratic, &p.Cost.InterferenceWeight, &p.Cost.DecodeRate, &p.Affinity.OverloadFactor,
			&p.Separation.InterferenceRate, &p.Separation.InterferenceAlpha, &p.Separation.MarginSeconds,
			&p.Transfer.OverheadSeconds, &p.Transfer.RecomputeOverheadSeconds, &p.Transfer.Bandwidth, &p.Transfer.KVBytesPerToken,
			&p.Hazard.StallPenaltySeconds, &p.Migration.HysteresisSeconds, &p.Migration.MaxSlowdownSeconds, &p.Migration.MinRemainingSeconds} {
			flip(n, x, n.float)
		}
		p.Hazard.Cells = int(n.byte()) - 1
		p.Migration.OverlapRounds = int(n.byte()) - 1
		r := &s.Request
		for _, x := range []*int64{&r.ContextTokens, &r.RemainingTokens, &r.Hops} {
			flip(n, x, n.count)
		}
		someone := func() string { return fmt.Sprintf("inst-%d", n.byte()%6) }
		flip(n, &r.Affinity, someone)
		flip(n, &r.RunningOn, someone)
		for k := range s.Instances {
			i := &s.Instances[k]
			for _, x := range []*int64{&i.Requests, &i.PendingPrefillTokens, &i.OngoingTokens, &i.ActiveDecodes,
				&i.CachedTokens, &i.KVCapacityTokens, &i.KVUsedTokens} {
				flip(n, x, n.count)
			}
			for _, x := range []*float64{&i.WaitSeconds, &i.PrefillRate, &i.DecodeRate, &i.Bandwidth, &i.UptimeSeconds, &i.MetricsAgeSeconds} {
				flip(n, x, n.float)
			}
			switch n.byte() % 8 {
			case 1:
				i.Curve = distuv.Exponential{Rate: n.float()}
			case 2:
				i.Curve = distuv.Weibull{K: n.float(), Lambda: n.float()}
			case 3:
				i.Curve = brokenCurve{n.float()}
			case 4:
				i.Unavailable = true
			}
		}
		fuzzDecide(t, p, s)
	})
}

// brokenCurve is no survival curve: it has the same value at every age.
type brokenCurve struct{ value float64 }

func (c brokenCurve) Survival(float64) float64 { return c.value }
