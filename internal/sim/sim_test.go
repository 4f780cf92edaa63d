package sim

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"
)

// recorder is a listener that keeps everything, and sends what arrives where
// route says.
type recorder struct {
	route    func(Request)
	records  []Record
	progress []Progress
	ended    func(Record)
	told     func(Progress)
}

func (l *recorder) Arrived(r Request) { l.route(r) }

func (l *recorder) Progress(p Progress) {
	l.progress = append(l.progress, p)
	if l.told != nil {
		l.told(p)
	}
}

func (l *recorder) Ended(r Record) {
	l.records = append(l.records, r)
	if l.ended != nil {
		l.ended(r)
	}
}

// record is the record of a request, which must have ended once.
func (l *recorder) record(t testing.TB, id uint64) Record {
	t.Helper()
	var found []Record
	for _, r := range l.records {
		if r.Request.ID == id {
			found = append(found, r)
		}
	}
	require.Len(t, found, 1)
	return found[0]
}

func newCluster(t testing.TB, prefix int, profiles ...Profile) (*Cluster, *recorder) {
	t.Helper()
	l := &recorder{}
	c, err := New(Config{Instances: profiles, PrefixBlockTokens: prefix, Listener: l})
	require.NoError(t, err)
	return c, l
}

// chain is n identities of one session, chained by construction: no two sessions share one.
func chain(session uint64, n int) []uint64 {
	blocks := make([]uint64, n)
	for i := range blocks {
		blocks[i] = session<<32 | uint64(i)
	}
	return blocks
}

// checkEmpty states that nothing is held once all requests have ended.
func checkEmpty(t testing.TB, c *Cluster) {
	t.Helper()
	require.Empty(t, c.live)
	for _, in := range c.instances {
		checkInvariants(t, in)
		require.Empty(t, in.members)
		require.Equal(t, in.pool.capacity, in.pool.available(), "blocks still held")
		require.Zero(t, in.pending)
		require.Zero(t, in.ongoing)
		require.Zero(t, in.transfers)
		for _, n := range in.count {
			require.Zero(t, n)
		}
		for _, id := range in.pool.index {
			require.Zero(t, in.pool.nodes[id].held)
		}
	}
}

// checkInvariants recounts an instance from its members.
func checkInvariants(t testing.TB, in *instance) {
	t.Helper()
	p := &in.pool
	private, held := 0, make(map[int32]int32)
	ongoing, pending := 0, 0
	var count [phases]int
	for i, r := range in.members {
		require.Equal(t, i, r.member)
		require.Same(t, in, r.at)
		require.False(t, r.ended)
		private += r.private
		require.GreaterOrEqual(t, r.private, 0)
		for _, id := range r.held {
			held[id]++
		}
		count[r.phase]++
		if r.phase == running && r.owner == nil && !r.prefilling() {
			require.Equal(t, r.context()-1, r.computed, "all but the last token have their KV")
		}
		if r.phase.counts() {
			ongoing += r.context()
		}
		switch r.phase {
		case running, ready, transferring, kept:
			require.GreaterOrEqual(t, (r.private+len(r.held)*p.span)*in.profile.BlockTokens, r.computed)
		default:
			require.Zero(t, r.private+len(r.held))
		}
		if r.phase == ready || r.phase == running {
			pending += max(0, r.goal-r.computed)
		}
	}
	require.Equal(t, in.count, count)
	require.Equal(t, ongoing, in.ongoing)
	require.Equal(t, pending, in.pending)
	require.Equal(t, p.capacity, p.free+private+p.span*len(p.index), "blocks")
	require.GreaterOrEqual(t, p.free, 0)
	require.LessOrEqual(t, count[running], in.profile.MaxRunning)
	unheld := 0
	for hash, id := range p.index {
		require.Equal(t, hash, p.nodes[id].hash)
		require.Equal(t, held[id], p.nodes[id].held, "reference count")
		if p.nodes[id].held == 0 {
			unheld++
		}
	}
	require.Equal(t, p.cached, unheld)
	ring := 0
	for id := p.nodes[0].next; id != 0; id = p.nodes[id].next {
		ring++
		require.Zero(t, p.nodes[id].held)
		require.LessOrEqual(t, ring, unheld)
	}
	require.Equal(t, unheld, ring)
}

// within says how far a measured value is from the published one, and fails
// where it is further than the share allowed.
func within(t *testing.T, what string, published, measured, share float64) {
	t.Helper()
	off := measured/published - 1
	t.Logf("%-28s published %9.4g s, engine %9.4g s, %+5.1f %%", what, published, measured, 100*off)
	require.LessOrEqual(t, math.Abs(off), share, what)
}
