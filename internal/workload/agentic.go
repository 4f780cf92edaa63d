package workload

import (
	"fmt"
	"io"
	"math"
	"math/rand/v2"

	"github.com/kvpolicy/kvpolicy"
	"gonum.org/v1/gonum/stat/distuv"
)

// Agentic describes the generated workload: sessions of a coding agent, made
// to the published statistics of the setting of [M] and [V2] (FACTS, "Setting").
// The zero value is the published window.
//
// How a session is made (the shapes are ours, their parameters fitted to the
// published figures): it begins with one of four system prompts that all
// sessions of its kind share, and a lognormal task. Each later turn's prompt is
// the one before, what was generated, and a lognormal tool result. Tasks and
// tool results scale with a lognormal level of the session. Now and then (4.5 %
// of later turns) everything behind the system prompt is new, as when an
// agent's history is rewritten; at the length limit it is summarised to a
// quarter of it. Answers are lognormal. Gaps are drawn from the published
// quantiles, joined by straight lines in the logarithm.
//
// What comes out, pooled over eight seeds (agentic_test.go holds it to this).
// Exact: the number of sessions. Within 3 % of the published figure: requests,
// input tokens, the p50 and mean prompt, the p50 answer; gaps, within 6 % at
// each quantile; the share of tokens found across sessions (4.9 to 5.0 %
// against 4.8 %) and the part of what is reusable that the same session left
// (93.5 % against 93 %). Less well: the p90 prompt (6 % low), the mean answer
// (4 % low). Only roughly: the requests with at least 8,000 and 16,000 tokens
// new to an infinite cache (23 and 13 %), since the 24 and 11 % that [V2]
// counted were on instances that evict. One seed's input tokens are within 15 %
// or so of the mean.
// Not published, so ours alone: how many turns which session has, the ceiling
// that follows (0.77), and how gaps, lengths and turns depend on each other
// (here they do not, but for the level).
//
// In trace time a turn is sent one gap after the nominal end of the one before:
// tokens not shared with it / 7000 + 0.02 s an output token (ours).
type Agentic struct {
	// Sessions is the number of sessions, at most 2^40; 0 = 274, the published
	// window's.
	Sessions int
	// WindowSeconds is the time over which sessions start, a Poisson process of
	// rate Sessions / WindowSeconds; from 1e-3 to 1e12. 0 = 600 (ours: the
	// published window's name says w600).
	WindowSeconds float64
	// MeanInputTokens is the mean prompt, from 1,000 to 1e6; every length but
	// the answers' scales with it, which makes the mean of much shorter prompts
	// about 2,000 tokens longer than asked for. 0 = 43,904, the published window's (53.3 M
	// tokens in 1,214 requests), at which the p50 and p90 are 1.31 times the
	// published full trace's. 33,600 gives the full trace's own.
	MeanInputTokens float64
	// BlockTokens is the size of a block, from 1 to 65,536; 0 = 64.
	BlockTokens int
}

// The published figures that the generator draws from.
const (
	publishedSessions  = 274
	publishedWindow    = 600.0
	publishedInput     = 53.3e6 / 1214
	fullTraceInput     = 33600.0
	answerMedian       = 80.0
	answerMean         = 445.0
	answerMost         = 32768 // ours: bounds the lognormal's tail
	turnsMost          = 120   // ours, likewise
	agenticBlockTokens = 64
)

// gapQuantiles are the published quantiles of the time between a turn's end and
// the next turn's arrival. The first and the last point are ours: the last is
// where the published mean of 37 s comes out.
var gapQuantiles = [...]struct{ p, seconds float64 }{
	{0, 0.2}, {0.25, 0.69}, {0.39, 1}, {0.5, 1.6}, {0.75, 8.6}, {0.9, 44}, {1, 1080},
}

// systemPrompts are the kinds of agents: how many of 100 sessions are of the
// kind, and its system prompt's tokens at the full trace's scale (ours).
var systemPrompts = [...]struct {
	percent int
	tokens  float64
}{{25, 2200}, {25, 5300}, {30, 9000}, {20, 14400}}

// Parameters of the lognormals at the full trace's scale, fitted (ours).
const (
	turnsMedian, turnsSigma = 2.37, 1.0
	levelSigma              = 1.4
	taskMedian, taskSigma   = 4000.0, 1.2
	toolMedian, toolSigma   = 1250.0, 0.6
	answerSigma             = 1.88
	rewriteChance           = 0.045
	lengthLimit             = 200600.0 // the model's 262,144 at the window's scale
	summaryShare            = 0.25
)

// NewAgentic makes the generated workload. A field out of range is a
// FieldError.
func NewAgentic(a Agentic) (*Workload, error) {
	if a.Sessions == 0 {
		a.Sessions = publishedSessions
	}
	if a.WindowSeconds == 0 {
		a.WindowSeconds = publishedWindow
	}
	if a.MeanInputTokens == 0 {
		a.MeanInputTokens = publishedInput
	}
	if a.BlockTokens == 0 {
		a.BlockTokens = agenticBlockTokens
	}
	for _, f := range []struct {
		path             string
		value, low, high float64
	}{
		{"sessions", float64(a.Sessions), 1, 1 << 40},
		{"window_seconds", a.WindowSeconds, 1e-3, 1e12},
		{"mean_input_tokens", a.MeanInputTokens, 1000, 1e6},
		{"block_tokens", float64(a.BlockTokens), 1, 65536},
	} {
		if !(f.value >= f.low && f.value <= f.high) {
			return nil, &kvpolicy.FieldError{Path: f.path, Value: fmt.Sprint(f.value), Want: fmt.Sprintf("be 0 or from %g to %g", f.low, f.high)}
		}
	}
	return &Workload{
		name:        "agentic",
		blockTokens: a.BlockTokens,
		open: func(o Options) (source, error) {
			return &agenticSource{
				Agentic: a,
				seed:    o.Seed,
				scale:   a.MeanInputTokens / fullTraceInput,
				starts:  rand.New(rand.NewPCG(o.Seed, streamStarts)),
				strata:  rand.New(rand.NewPCG(o.Seed, streamTurns)),
			}, nil
		},
	}, nil
}

// agenticSource generates one session after the other.
type agenticSource struct {
	Agentic
	seed           uint64
	scale          float64
	starts, strata *rand.Rand
	turns, levels  []int
	made           int
	at             float64
}

func (g *agenticSource) close() error { return nil }

// lognormal of a median; z is a standard normal draw.
func lognormal(median, sigma, z float64) float64 { return median * math.Exp(sigma*z) }

func (g *agenticSource) next() (*session, error) {
	if g.made == g.Sessions {
		return nil, io.EOF
	}
	g.at += g.starts.ExpFloat64() * g.WindowSeconds / float64(g.Sessions)
	id := g.made
	// Each published window's worth of sessions takes one draw from each of as
	// many equal slices of the distributions of turns and level, so that every
	// seed has about the published totals in spite of the heavy tails.
	slice := id % publishedSessions
	if slice == 0 {
		g.turns, g.levels = g.strata.Perm(publishedSessions), g.strata.Perm(publishedSessions)
	}
	g.made++
	random := rand.New(rand.NewPCG(mix(g.seed)+uint64(id), streamSession))
	normal := func(slice int) float64 {
		u := (float64(slice) + random.Float64()) / publishedSessions
		return distuv.UnitNormal.Quantile(min(max(u, 1e-9), 1-1e-9))
	}
	turns := int(min(math.Ceil(lognormal(turnsMedian, turnsSigma, normal(g.turns[slice]))), turnsMost))
	level := g.scale * lognormal(1, levelSigma, normal(g.levels[slice]))

	s := &session{id: int64(id), base: g.at, start: g.at, own: seed(mix(mix(g.seed) ^ uint64(id))), turns: make([]turn, 0, turns)}
	kind, percent := 0, random.IntN(100)
	for percent >= systemPrompts[kind].percent {
		percent -= systemPrompts[kind].percent
		kind++
	}
	s.system = seed(mix(uint64(kind)))
	system := int(systemPrompts[kind].tokens * g.scale)
	s.systemBlocks = system / g.BlockTokens
	limit := int(lengthLimit * g.scale)

	answer := func() int {
		return int(min(max(math.Round(lognormal(answerMedian, answerSigma, random.NormFloat64())), 1), answerMost))
	}
	input := min(limit, system+1+int(level*lognormal(taskMedian, taskSigma, random.NormFloat64())))
	s.turns = append(s.turns, turn{after: -1, input: input, output: answer(), keep: s.systemBlocks, total: input / g.BlockTokens})
	fresh := input
	for k := 1; k < turns; k++ {
		before := &s.turns[k-1]
		added := 1 + int(level*lognormal(toolMedian, toolSigma, random.NormFloat64()))
		t := turn{
			after:  k - 1,
			gap:    gapSeconds(random.Float64()),
			input:  before.input + before.output + added,
			output: answer(),
			keep:   s.systemBlocks,
		}
		t.offset = before.offset + nominalServiceSeconds(fresh, before.output) + t.gap
		rewritten := random.Float64() < rewriteChance
		switch {
		case t.input > limit:
			t.input = system + int(summaryShare*float64(limit))
			fresh = t.input - system
		case rewritten:
			fresh = t.input - system
		default:
			before.total = (before.input + before.output) / g.BlockTokens
			t.keep = before.total
			fresh = before.output + added
		}
		t.total = t.input / g.BlockTokens
		s.turns = append(s.turns, t)
	}
	return s, nil
}

// gapSeconds is the quantile function of the gaps, p from 0 to 1.
func gapSeconds(p float64) float64 {
	i := 1
	for i < len(gapQuantiles)-1 && p > gapQuantiles[i].p {
		i++
	}
	low, high := gapQuantiles[i-1], gapQuantiles[i]
	share := (p - low.p) / (high.p - low.p)
	return low.seconds * math.Pow(high.seconds/low.seconds, share)
}
