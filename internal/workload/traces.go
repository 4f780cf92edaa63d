package workload

import (
	"errors"
	"io"
	"math/rand/v2"

	"github.com/kvpolicy/kvpolicy/internal/trace"
)

// NewTrace makes a workload of a trace. open gives the file from its start, as
// often as it is called, once for each Feed; name stands for it in errors. A
// format of 0 is told from the file. The sessions CSV and Bailian's are read
// here, whole; the others are read as they are sent, and what is wrong in them
// comes from Feed.Next.
//
// How a request is made of a line: lengths of 0 count as 1, since a model reads
// and writes at least one token. Mooncake's and Azure's requests are sessions
// of one turn each. Azure's prompts share nothing, and have blocks of 64
// tokens. Bailian's sessions are the chains of parent_chat_id; a parent that
// the file does not hold was cut off, and its child begins a session.
//
// Gaps, for ClosedLoop: the sessions CSV's think_time_s; where it is empty, the
// time between the two requests less api_time_s of the first, at least 0.
// Bailian's file has arrivals only: the gap is the time between the two
// arrivals less a nominal service time of the first (uncached tokens / 7000 +
// 0.02 s an output token, ours), at least 0.
//
// Generated tokens: where a turn of the sessions CSV shares all whole blocks of
// the one before, it is taken to go on with what that one generated (ours: the
// file counts blocks of prompts only, but its prompts grow by at least the
// answer nearly everywhere). Elsewhere a prompt's chain ends with the prompt.
func NewTrace(name string, open func() (io.ReadCloser, error), format trace.Format) (*Workload, error) {
	file, err := open()
	if err != nil {
		return nil, err
	}
	w, err := newTrace(name, open, file, format)
	return w, errors.Join(err, file.Close())
}

func newTrace(name string, open func() (io.ReadCloser, error), file io.Reader, format trace.Format) (*Workload, error) {
	reader, err := trace.NewReader(name, file, format)
	if err != nil {
		return nil, err
	}
	format = reader.Format()
	w := &Workload{name: name, blockTokens: format.BlockTokens()}
	switch format {
	case trace.Sessions:
		sessions, err := loadSessions(reader)
		if err != nil {
			return nil, err
		}
		w.open = func(o Options) (source, error) { return newShuffledSource(sessions, o), nil }
	case trace.Bailian:
		sessions, err := loadBailian(reader)
		if err != nil {
			return nil, err
		}
		w.open = func(o Options) (source, error) { return &recordedSource{sessions: sessions, shift: newShift(o)}, nil }
	default:
		if format == trace.Azure {
			w.blockTokens = 64
		}
		w.open = func(o Options) (source, error) {
			file, err := open()
			if err != nil {
				return nil, err
			}
			reader, err := trace.NewReader(name, file, format)
			if err != nil {
				return nil, errors.Join(err, file.Close())
			}
			return &streamSource{reader: reader, file: file, blockTokens: w.blockTokens, shift: newShift(o)}, nil
		}
	}
	return w, nil
}

const wantTurns = "lead to a session of at most 2^20 requests"

// nominalServiceSeconds stands for how long a request took where a source does
// not say (ours): prefill at the rate of the setting of [M], and 50 tokens/s
// of decoding, a loaded instance's pace.
func nominalServiceSeconds(uncachedTokens, outputTokens int) float64 {
	return float64(uncachedTokens)/7000 + float64(float64(outputTokens)*0.02)
}

// shift moves starts of sessions by a seed's draws.
type shift struct {
	random  *rand.Rand
	seconds float64
}

// newShift gives the shifts of the options' seed; seed 0 shifts nothing.
func newShift(o Options) shift {
	if o.Seed == 0 {
		return shift{}
	}
	return shift{random: rand.New(rand.NewPCG(o.Seed, streamShift)), seconds: o.ShiftSeconds}
}

func (s shift) next() float64 {
	if s.random == nil {
		return 0
	}
	return s.random.Float64() * s.seconds
}

// Streams of the generator that a seed feeds, one for each purpose, so that a
// draw more in one leaves the others as they are.
const (
	streamShift = 1 + iota
	streamStarts
	streamOrder
	streamTurns
	streamSession
)

// streamSource gives the requests of a Mooncake or Azure trace, each a session
// of its own.
type streamSource struct {
	reader      *trace.Reader
	file        io.Closer
	blockTokens int
	shift       shift
	id          int64
}

func (s *streamSource) next() (*session, error) {
	record, err := s.reader.Next()
	if err != nil {
		return nil, err
	}
	id := s.id
	s.id++
	input := max(1, record.InputTokens)
	return &session{
		id:    id,
		base:  record.ArrivalSeconds,
		start: record.ArrivalSeconds + s.shift.next(),
		turns: []turn{{after: -1, input: input, output: max(1, record.OutputTokens), ids: record.BlockIDs, total: input / s.blockTokens}},
		own:   seed(mix(uint64(id))),
	}, nil
}

func (s *streamSource) close() error { return s.file.Close() }

// recordedSource gives the sessions of a Bailian trace at their recorded times.
type recordedSource struct {
	sessions []session
	shift    shift
}

func (s *recordedSource) next() (*session, error) {
	if len(s.sessions) == 0 {
		return nil, io.EOF
	}
	next := s.sessions[0]
	s.sessions = s.sessions[1:]
	next.start = next.base + s.shift.next()
	return &next, nil
}

func (s *recordedSource) close() error { return nil }

// loadBailian gathers the turns of each session. Sessions come in order of
// their first turn.
func loadBailian(reader *trace.Reader) ([]session, error) {
	type place struct{ session, turn int }
	var sessions []session
	chats := make(map[int64]place)
	for {
		record, err := reader.Next()
		if errors.Is(err, io.EOF) {
			return sessions, nil
		}
		if err != nil {
			return nil, err
		}
		if _, twice := chats[record.Chat]; twice {
			return nil, reader.Fail(record.Line, "chat_id", record.Chat, "be in the file once")
		}
		input := max(1, record.InputTokens)
		t := turn{
			after: -1, input: input, output: max(1, record.OutputTokens),
			ids: record.BlockIDs, total: input / trace.Bailian.BlockTokens(),
		}
		parent, known := chats[record.ParentChat]
		if !known {
			chats[record.Chat] = place{len(sessions), 0}
			sessions = append(sessions, session{id: int64(len(sessions)), base: record.ArrivalSeconds, turns: []turn{t}})
			continue
		}
		s := &sessions[parent.session]
		before := &s.turns[parent.turn]
		cached := 0
		if before.after >= 0 {
			cached = sharedTokens(s.turns[before.after].ids, before.ids, before.input)
		}
		if len(s.turns) == maxTurns {
			return nil, reader.Fail(record.Line, "parent_chat_id", record.ParentChat, wantTurns)
		}
		t.after = parent.turn
		t.offset = record.ArrivalSeconds - s.base
		t.gap = max(0, t.offset-before.offset-nominalServiceSeconds(before.input-cached, before.output))
		chats[record.Chat] = place{parent.session, len(s.turns)}
		s.turns = append(s.turns, t)
	}
}

// sharedTokens is how many of the prompt's tokens lie in leading blocks that
// equal those of the prompt before.
func sharedTokens(before, ids []int64, input int) int {
	n := 0
	for n < min(len(before), len(ids)) && before[n] == ids[n] {
		n++
	}
	return min(input, n*trace.Bailian.BlockTokens())
}

// shuffledSource gives the sessions of the sessions CSV in the seed's order,
// their starts a Poisson process.
type shuffledSource struct {
	sessions []session
	order    []int
	starts   *rand.Rand
	rate     float64
	at       float64
}

func newShuffledSource(sessions []session, o Options) *shuffledSource {
	return &shuffledSource{
		sessions: sessions,
		order:    rand.New(rand.NewPCG(o.Seed, streamOrder)).Perm(len(sessions)),
		starts:   rand.New(rand.NewPCG(o.Seed, streamStarts)),
		rate:     o.SessionsPerSecond,
	}
}

func (s *shuffledSource) next() (*session, error) {
	if len(s.order) == 0 {
		return nil, io.EOF
	}
	next := s.sessions[s.order[0]]
	s.order = s.order[1:]
	s.at += s.starts.ExpFloat64() / s.rate
	next.base, next.start = s.at, s.at
	return &next, nil
}

func (s *shuffledSource) close() error { return nil }

// loadSessions gathers the sessions of the sessions CSV in the file's order.
func loadSessions(reader *trace.Reader) ([]session, error) {
	var sessions []session
	var previous trace.Record
	for {
		record, err := reader.Next()
		if errors.Is(err, io.EOF) {
			return sessions, nil
		}
		if err != nil {
			return nil, err
		}
		t := turn{
			after: -1, offset: record.ArrivalSeconds,
			input: max(1, record.InputTokens), output: max(1, record.OutputTokens),
			keep: record.SharedBlocks, total: record.Blocks,
		}
		if len(sessions) == 0 || record.Session != previous.Session {
			id := int64(len(sessions))
			sessions = append(sessions, session{id: id, own: seed(mix(uint64(id)))})
		}
		s := &sessions[len(sessions)-1]
		if len(s.turns) == maxTurns {
			return nil, reader.Fail(record.Line, "session", record.Session, wantTurns)
		}
		if k := len(s.turns); k > 0 {
			before := &s.turns[k-1]
			t.after = k - 1
			if t.gap = record.ThinkSeconds; t.gap < 0 {
				t.gap = max(0, t.offset-before.offset-max(0, previous.ServiceSeconds))
			}
			if record.SharedBlocks == previous.Blocks {
				before.total = max(before.total, min(t.total, (before.input+before.output)/trace.Sessions.BlockTokens()))
				t.keep = before.total
			}
		}
		s.turns = append(s.turns, t)
		previous = record
	}
}
