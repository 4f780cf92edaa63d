package workload

import (
	"errors"
	"io"
	"math/bits"
)

// Ceiling is what no router and no cache can beat: the tokens that would be
// found cached if one instance with an infinite cache served the requests one
// after the other, in order of trace time, each at once.
type Ceiling struct {
	// Requests that the options keep, and the Sessions that they are of.
	Requests, Sessions int64
	// LeftOut is how many requests MaxContextTokens leaves out.
	LeftOut int64
	// InputTokens and OutputTokens are their sums.
	InputTokens, OutputTokens int64
	// ReusableTokens is how many input tokens lie in blocks that an earlier
	// request left in the cache.
	ReusableTokens int64
	// Sampled says that the workload has more distinct blocks than are held, so
	// that ReusableTokens is an estimate.
	Sampled bool
}

// Share is ReusableTokens over InputTokens, from 0 to 1; 0 for no requests.
func (c Ceiling) Share() float64 {
	if c.InputTokens == 0 {
		return 0
	}
	return float64(c.ReusableTokens) / float64(c.InputTokens)
}

// heldBlocks bounds the blocks that Ceiling remembers: about 64 MB.
const heldBlocks = 1 << 20

// Ceiling reads the workload once and sums up what the options keep. Memory is
// bounded: up to 2^20 distinct blocks the result is exact; beyond, only blocks
// whose hash begins with enough zero bits are remembered and counted for the
// others (adaptive sampling after Wegman), which at that size leaves a standard
// error of the number of distinct blocks of about 0.1 %. Pacing makes no
// difference and may be 0.
func (w *Workload) Ceiling(options Options) (Ceiling, error) {
	return w.ceiling(options, heldBlocks)
}

func (w *Workload) ceiling(options Options, held int) (c Ceiling, err error) {
	options.Pacing = TraceTime
	f, err := w.Start(options)
	if err != nil {
		return Ceiling{}, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	seen := make(map[uint64]struct{})
	// Blocks with at least level leading zero bits stand for 2^level blocks.
	level := 0
	var reusable float64
	for {
		request, err := f.Next()
		if errors.Is(err, io.EOF) {
			c.Sessions, c.LeftOut = f.sessions, f.leftOut
			c.ReusableTokens = min(int64(reusable)*int64(w.blockTokens), c.InputTokens)
			return c, nil
		}
		if err != nil {
			return Ceiling{}, err
		}
		c.Requests++
		c.InputTokens += int64(request.InputTokens)
		c.OutputTokens += int64(request.OutputTokens)
		prompt := request.InputTokens / w.blockTokens
		for i, block := range request.Blocks {
			// Hashes are of blocks with all that is before them, so a block that
			// was seen stands behind blocks that were seen: no prefix is walked.
			if bits.LeadingZeros64(block) < level {
				continue
			}
			if _, cached := seen[block]; !cached {
				seen[block] = struct{}{}
			} else if i < prompt {
				reusable += float64(uint64(1) << level)
			}
		}
		for len(seen) > held {
			level++
			c.Sampled = true
			for block := range seen {
				if bits.LeadingZeros64(block) < level {
					delete(seen, block)
				}
			}
		}
	}
}
