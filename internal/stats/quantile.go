package stats

import (
	"fmt"
	"math"
	"slices"

	"github.com/kvpolicy/kvpolicy"
	"gonum.org/v1/gonum/stat"
)

// Quantile is the p-quantile of the values, which it does not change; p from 0
// (the least) to 1 (the greatest). No values, a value that is NaN or infinite,
// or another p is a FieldError.
func Quantile(p float64, values []float64) (float64, error) {
	if !(p >= 0 && p <= 1) {
		return 0, &kvpolicy.FieldError{Path: "p", Value: fmt.Sprint(p), Want: "be from 0 to 1"}
	}
	if err := checkValues("values", values); err != nil {
		return 0, err
	}
	sorted := slices.Sorted(slices.Values(values))
	return stat.Quantile(p, stat.Empirical, sorted, nil), nil
}

// checkValues wants at least one value, all of them finite.
func checkValues(path string, values []float64) error {
	if len(values) == 0 {
		return &kvpolicy.FieldError{Path: path, Want: "hold at least one value"}
	}
	for i, v := range values {
		if !(math.Abs(v) <= math.MaxFloat64) {
			return &kvpolicy.FieldError{Path: fmt.Sprintf("%s[%d]", path, i), Value: fmt.Sprint(v), Want: "be finite"}
		}
	}
	return nil
}

// HotspotIndex says how far the worst instance is from the usual one: the
// highest of the values over their median, where a value is one instance's TTFT
// p90 (ours, FACTS: the report that prints a hotspot index does not define it).
// At least 1; 1 where all are alike, all zero included. Instances that served
// nothing have no p90 and are left out by the caller. No values, a negative one,
// or a median of 0 under a highest above 0 is a FieldError.
func HotspotIndex(values []float64) (float64, error) {
	median, err := Quantile(0.5, values)
	if err != nil {
		return 0, err
	}
	if least := slices.Min(values); least < 0 {
		return 0, &kvpolicy.FieldError{Path: "values", Value: fmt.Sprint(least), Want: "be at least 0"}
	}
	highest := slices.Max(values)
	if highest == median {
		return 1, nil
	}
	index := highest / median
	if !(index <= math.MaxFloat64) {
		return 0, &kvpolicy.FieldError{Path: "values", Value: fmt.Sprint(median), Want: "have a median that the highest can be divided by"}
	}
	return index, nil
}
