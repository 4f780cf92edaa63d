// Package stats says what a replay measured: quantiles in bounded memory,
// paired differences with bootstrap intervals, and the hotspot index.
//
// One convention of quantile holds everywhere: the p-quantile of n values is
// the smallest of them that at least p*n of them do not exceed (the inverse of
// the empirical distribution, type 1 of Hyndman and Fan 1996; gonum's
// stat.Empirical). It is always one of the values, the median of an even number
// of values the lower of the middle two.
package stats
