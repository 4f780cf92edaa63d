package stats

import (
	"fmt"
	"iter"
	"math"

	"github.com/kvpolicy/kvpolicy"
)

const (
	// RelativeError bounds the error of Sketch.Quantile and Sketch.CDF's values.
	RelativeError = 1.0 / 256

	// binBits is the number of bits of the mantissa that tell bins apart: each
	// doubling has 2^7 bins of equal width, the widest of which, in relation to
	// its values, is the first, 1/128 wide. Its middle is 1/256 away at most.
	binBits  = 7
	binShift = 52 - binBits
	// Bins hold values from smallest up to largest. Smaller ones, 0 among them,
	// count as 0 where they are asked for, larger ones are refused.
	smallest = 1.0 / (1 << 30) // about 1e-9
	largest  = 1 << 40         // about 1e12
)

// Sketch collects non-negative values, of which there may be any number, in
// memory that depends on their spread alone: 1 kB for each doubling between the
// least and the greatest, at most 72 kB. Count, sum, least and greatest are
// exact (the sum to rounding, compensated). A quantile is within RelativeError,
// 0.4 %, of the value that Quantile would give for all values, and values below
// 2^-30 may read as 0. The bins are cut from the bits of the float, not from a
// logarithm, so that every machine makes the same ones. The zero value is empty
// and ready for use.
type Sketch struct {
	count, zeros uint64
	// sum + lost is the sum: lost gathers what rounding took (Neumaier 1974).
	sum, lost      float64
	least, highest float64
	// bins[i] counts the values of bin first + i.
	bins  []uint64
	first int
}

// Add collects one value, from 0 to 2^40. Any other is a FieldError and leaves
// the sketch as it was.
func (s *Sketch) Add(value float64) error {
	if !(value >= 0 && value <= largest) {
		return &kvpolicy.FieldError{Path: "value", Value: fmt.Sprint(value), Want: fmt.Sprintf("be from 0 to %g", float64(largest))}
	}
	if s.count == 0 {
		s.least, s.highest = value, value
	}
	s.least, s.highest = min(s.least, value), max(s.highest, value)
	s.count++
	s.addSum(value)
	if value < smallest {
		s.zeros++
		return nil
	}
	bin := int(math.Float64bits(value) >> binShift)
	s.cover(bin, bin)
	s.bins[bin-s.first]++
	return nil
}

// Merge adds all that other collected. It equals adding other's values one by
// one, but for the rounding of the sum.
func (s *Sketch) Merge(other *Sketch) {
	if other.count == 0 {
		return
	}
	if s.count == 0 {
		s.least, s.highest = other.least, other.highest
	}
	s.least, s.highest = min(s.least, other.least), max(s.highest, other.highest)
	s.count += other.count
	s.zeros += other.zeros
	s.addSum(other.sum)
	s.lost += other.lost
	if len(other.bins) == 0 {
		return
	}
	s.cover(other.first, other.first+len(other.bins)-1)
	for i, n := range other.bins {
		s.bins[other.first+i-s.first] += n
	}
}

func (s *Sketch) addSum(value float64) {
	sum := s.sum + value
	if s.sum >= value {
		s.lost += (s.sum - sum) + value
	} else {
		s.lost += (value - sum) + s.sum
	}
	s.sum = sum
}

// cover makes room for the bins from low to high.
func (s *Sketch) cover(low, high int) {
	if len(s.bins) > 0 {
		low, high = min(low, s.first), max(high, s.first+len(s.bins)-1)
		if high-low+1 == len(s.bins) {
			return
		}
	}
	// Whole doublings, so that growth is rare.
	low, high = low&^(1<<binBits-1), high|(1<<binBits-1)
	bins := make([]uint64, high-low+1)
	if len(s.bins) > 0 {
		copy(bins[s.first-low:], s.bins)
	}
	s.bins, s.first = bins, low
}

// Count is the number of values.
func (s *Sketch) Count() uint64 { return s.count }

// Sum is the sum of the values.
func (s *Sketch) Sum() float64 { return s.sum + s.lost }

// Mean is the mean of the values, 0 where there are none.
func (s *Sketch) Mean() float64 {
	if s.count == 0 {
		return 0
	}
	return s.Sum() / float64(s.count)
}

// Min is the least value, 0 where there are none.
func (s *Sketch) Min() float64 { return s.least }

// Max is the greatest value, 0 where there are none.
func (s *Sketch) Max() float64 { return s.highest }

// Quantile is the p-quantile, to RelativeError: p from 0 (Min) to 1 (Max), both
// exact; a p outside, NaN too, reads as the nearer bound, NaN as 0. 0 where
// there are no values.
func (s *Sketch) Quantile(p float64) float64 {
	if !(p > 0) {
		return s.least
	}
	if p >= 1 {
		return s.highest
	}
	target := p * float64(s.count)
	for value, below := range s.steps() {
		if float64(below) >= target {
			return value
		}
	}
	return s.highest
}

// CDF gives the distribution as steps: ascending values, each with the share of
// all values that do not exceed it, to RelativeError of the value. The last is
// (Max, 1), exactly. Nothing for an empty sketch.
func (s *Sketch) CDF() iter.Seq2[float64, float64] {
	return func(yield func(float64, float64) bool) {
		for value, below := range s.steps() {
			if below == s.count {
				value = s.highest
			}
			if !yield(value, float64(below)/float64(s.count)) {
				return
			}
		}
	}
}

// steps gives each bin that holds values: what stands for them, and how many
// values it and those before it hold.
func (s *Sketch) steps() iter.Seq2[float64, uint64] {
	return func(yield func(float64, uint64) bool) {
		below := s.zeros
		if below > 0 && !yield(s.least, below) {
			return
		}
		for i, n := range s.bins {
			if n == 0 {
				continue
			}
			below += n
			bits := uint64(s.first+i) << binShift
			middle := math.Float64frombits(bits | 1<<(binShift-1))
			if !yield(min(max(middle, s.least), s.highest), below) {
				return
			}
		}
	}
}
