// Package trace reads published request traces, one record at a time, so that
// memory does not grow with the trace's length.
//
// Four formats are known (see [Format]). The format is told from the first
// line unless the caller names one. A line that does not hold what its format
// asks is an [*Error] with file, line and field; reading stops there, because
// what follows a broken line cannot be trusted to be in place.
//
// Order. Timestamps must not fall: within the file for [Mooncake], [Bailian]
// and [Azure], within the session for [Sessions]. A line that is earlier than
// the one before it is an error and is not sorted into place, since sorting
// would hold the whole trace in memory; sort the file first.
//
// Blank lines are skipped, a byte order mark and carriage returns before a
// newline are dropped, unknown keys and columns are ignored.
package trace
