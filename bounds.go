package kvpolicy

import "math"

// Bounds of what the fields of a snapshot and a policy may hold (SPEC section
// 7). Within them every sum of counts of the request and one instance fits an
// int64 (one over all instances need not: see mean), and every cost is finite.
const (
	maxTokens          = 1_000_000_000_000_000 // 1e15
	maxCount           = 1_000_000_000         // requests, decodes, hops
	maxHops            = 1_000_000             // that a policy allows
	maxSeconds         = 1e12
	minRate            = 1e-9 // of rates that a formula divides by
	maxRate            = 1e18
	maxWeight          = 1e6 // interference weight and alpha, tax share
	maxKVBytesPerToken = 1e12
	maxCells           = 65536
	maxOverlapRounds   = 64
)

// The comparisons affirm, so that NaN fails them.

func withinCount(n, most int64) bool { return n >= 0 && n <= most }

func withinSeconds(x float64) bool { return x >= 0 && x <= maxSeconds }

// finiteRate tells whether x can stand as a rate or bandwidth, used or not.
func finiteRate(x float64) bool { return x >= 0 && x <= math.MaxFloat64 }

// usableRate tells whether a formula can divide by x.
func usableRate(x float64) bool { return x >= minRate && x <= maxRate }

func checkSeconds(path string, x float64) error {
	if !withinSeconds(x) {
		return fieldError(path, x, "be 0 to 1e12 seconds")
	}
	return nil
}

func checkRate(path string, x float64) error {
	if !finiteRate(x) {
		return fieldError(path, x, "be a finite number of at least 0")
	}
	return nil
}
