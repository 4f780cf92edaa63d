package kvpolicy

import (
	"cmp"
	"fmt"
	"math"
	"math/bits"
	"slices"
	"sort"

	"gonum.org/v1/gonum/mathext"
)

// Session is one session of a node: the time from when it came up to when it
// was lost, as far as it was watched.
type Session struct {
	// DurationSeconds is the node's age when the session ended or was last seen
	// open, 0 to 1e12.
	DurationSeconds float64
	// Observed tells that the session ended then. A session that is still open,
	// or whose end is no failure (a planned shutdown), is censored: false.
	Observed bool
	// EnteredSeconds is the age at which watching began, where the node was
	// already up by then (left truncation): below DurationSeconds, or equal to it
	// for a censored session, which then says nothing. 0, as usual, is a session
	// that was watched from its start.
	EnteredSeconds float64
}

// KaplanMeier is the Kaplan-Meier estimate of a survival curve from sessions
// that may be censored, with an exponential tail behind the last event. It is
// made by NewKaplanMeier and does not change after that, so that goroutines
// may share it. Of a nil or zero one only Survival may be asked.
type KaplanMeier struct {
	sessions []Session // ascending by compareSessions
	times    []float64 // the distinct times at which sessions ended, ascending
	events   []int32   // how many ended there
	atRisk   []int32   // out of how many that were up and watched
	// survival has one value more than times: survival[i] is the estimate once i
	// event times have passed. It is scaled by 2^(blockBits*block[i]), so that it
	// does not underflow where small risk sets, which late entries make
	// possible, have the survival halve over and over. block is nil for all 0.
	survival []float64
	block    []int32
	// moment is a binary tree over the drops of survival: node (width+i)>>h
	// holds, of the 2^h events from i on, the sum of drop * (time - times[i]);
	// the leaves, h = 0, would hold 0 and are left out. Sums that are centred on their own first time have terms of one sign, so
	// that what is read off them has lost no digit. They are in the scale of
	// survival[i].
	moment   []float64
	width    int
	tailRate float64
}

const blockBits = 256

// NewKaplanMeier estimates the survival curve of sessions, in O(n log n).
//
// Session i ended at the age of durations[i] seconds (0 to 1e12) where
// observed[i] is true, and was still open at that age, or ended as planned,
// where it is false. entered, which may be left out, gives for every session
// the age at which watching began (left truncation); see Session.
//
// At each distinct event time t, S *= 1 - events(t)/atRisk(t), where those at
// risk have entered < t <= duration (entered <= t at 0): a session censored at
// t still is. Where all at risk end at once S would be 0 for good, and a node
// older than every session seen could not be told from any other: S is halved
// instead, at the last event as at one before which later entries follow.
// Beyond the last event time the curve decays as exp(-rate*(t - last)), with
// rate = 1/mean(completed durations), or 1/3600 where none is completed or
// their mean is 0. No session at all gives exp(-t/3600). The mean of completed
// sessions is too short under heavy censoring; MaximumLikelihoodTail replaces it.
//
// The input is copied. Errors are FieldErrors: "durations[4]", "observed" or
// "entered" (of another length than durations), "entered[4]".
// (Kaplan and Meier 1958; SPEC 5.1; the rule of halving and the tail are ours.)
func NewKaplanMeier(durations []float64, observed []bool, entered ...float64) (*KaplanMeier, error) {
	sessions, err := newSessions(durations, observed, entered)
	if err != nil {
		return nil, err
	}
	sortSessions(sessions)
	return estimate(sessions), nil
}

// newSessions checks parallel slices and joins them.
func newSessions(durations []float64, observed []bool, entered []float64) ([]Session, error) {
	if len(durations) > math.MaxInt32 {
		return nil, &FieldError{Path: "durations", Value: fmt.Sprintf("%d long", len(durations)), Want: "be at most 2^31 - 1 long"}
	}
	if len(observed) != len(durations) {
		return nil, &FieldError{Path: "observed", Value: fmt.Sprintf("%d long", len(observed)), Want: fmt.Sprintf("be as long as durations, %d", len(durations))}
	}
	if len(entered) != len(durations) && len(entered) != 0 {
		return nil, &FieldError{Path: "entered", Value: fmt.Sprintf("%d long", len(entered)), Want: fmt.Sprintf("be as long as durations, %d, or absent", len(durations))}
	}
	sessions := make([]Session, len(durations))
	for i, duration := range durations {
		s := Session{DurationSeconds: duration, Observed: observed[i]}
		if len(entered) > 0 {
			s.EnteredSeconds = entered[i]
		}
		switch late, want := s.fault(); {
		case want == "":
		case late:
			return nil, fieldError(fmt.Sprintf("entered[%d]", i), s.EnteredSeconds, want)
		default:
			return nil, fieldError(fmt.Sprintf("durations[%d]", i), duration, want)
		}
		sessions[i] = s
	}
	return sessions, nil
}

// fault tells what is wrong with a session, and with which field of it.
func (s Session) fault() (late bool, want string) {
	switch {
	case !withinSeconds(s.DurationSeconds):
		return false, "be 0 to 1e12 seconds"
	case !(s.EnteredSeconds >= 0 && s.EnteredSeconds <= s.DurationSeconds):
		return true, "be 0 to the session's duration"
	case s.Observed && s.EnteredSeconds > 0 && s.EnteredSeconds == s.DurationSeconds:
		return true, "be below the duration of a session that ended"
	}
	return false, ""
}

// compareSessions is a total order, so that the estimate does not depend on
// the order in which sessions came.
func compareSessions(a, b Session) int {
	switch {
	case a.DurationSeconds < b.DurationSeconds:
		return -1
	case a.DurationSeconds > b.DurationSeconds:
		return 1
	case a.Observed != b.Observed:
		if a.Observed {
			return -1
		}
		return 1
	}
	return cmp.Compare(a.EnteredSeconds, b.EnteredSeconds)
}

// sortSessions sorts by compareSessions. Where none was entered late, all of a
// session fits a word that sorts alike, in a third of the time: the bits of a
// number of at least 0 ascend with it, and its sign leaves room for one more.
func sortSessions(sessions []Session) {
	keys := make([]uint64, len(sessions))
	for i, s := range sessions {
		if s.EnteredSeconds > 0 {
			slices.SortFunc(sessions, compareSessions)
			return
		}
		keys[i] = math.Float64bits(s.DurationSeconds) << 1
		if !s.Observed {
			keys[i]++
		}
	}
	slices.Sort(keys)
	for i, key := range keys {
		sessions[i] = Session{DurationSeconds: math.Float64frombits(key >> 1), Observed: key&1 == 0}
	}
}

// estimate builds the curve from sorted sessions, which it keeps.
func estimate(sessions []Session) *KaplanMeier {
	k := &KaplanMeier{sessions: sessions}
	distinct, last := 0, math.Inf(-1)
	var entries []float64 // the late ones
	for _, s := range sessions {
		if s.EnteredSeconds > 0 {
			entries = append(entries, s.EnteredSeconds)
		}
		if s.Observed && s.DurationSeconds != last {
			distinct++
			last = s.DurationSeconds
		}
	}
	slices.Sort(entries)
	k.tailRate = defaultTailRate(sessions)

	k.times = make([]float64, 0, distinct)
	k.events = make([]int32, 0, distinct)
	k.atRisk = make([]int32, 0, distinct)
	k.survival = append(make([]float64, 0, distinct+1), 1)
	s, scale, entry := 1.0, int32(0), 0
	for i := 0; i < len(sessions); {
		t := sessions[i].DurationSeconds
		next, events := i, int32(0)
		for ; next < len(sessions) && sessions[next].DurationSeconds == t; next++ {
			if sessions[next].Observed {
				events++
			}
		}
		if events > 0 {
			for entry < len(entries) && entries[entry] < t {
				entry++
			}
			atRisk := int32(len(sessions) - i - (len(entries) - entry))
			if events < atRisk {
				s *= float64(atRisk-events) / float64(atRisk)
			} else {
				s /= 2
			}
			if s < 0x1p-256 {
				s *= 0x1p256
				scale++
				if k.block == nil {
					k.block = make([]int32, len(k.survival), distinct+1)
				}
			}
			k.times = append(k.times, t)
			k.events = append(k.events, events)
			k.atRisk = append(k.atRisk, atRisk)
			k.survival = append(k.survival, s)
			if k.block != nil {
				k.block = append(k.block, scale)
			}
		}
		i = next
	}
	k.sumMoments()
	return k
}

// defaultTailRate is 1/mean of the completed sessions, which come sorted.
func defaultTailRate(sessions []Session) float64 {
	completed, sum := 0, 0.0
	for _, s := range sessions {
		if s.Observed {
			completed++
			sum += s.DurationSeconds
		}
	}
	if sum == 0 {
		return unknownRate
	}
	// A mean below the least normal number would give an infinite rate.
	return math.Min(float64(completed)/sum, math.MaxFloat64)
}

// sumMoments fills the tree over the drops, from the leaves up. A node that
// would reach beyond the last event is never read.
func (k *KaplanMeier) sumMoments() {
	n := len(k.times)
	if n < 2 {
		return
	}
	k.width = 1 << bits.Len(uint(n-1))
	k.moment = make([]float64, k.width)
	for h := 1; 1<<h <= n; h++ {
		half := 1 << (h - 1)
		for i := 0; i+2*half <= n; i += 2 * half {
			drop := k.scaled(k.survival[i+half], i+half, i) - k.scaled(k.survival[i+2*half], i+2*half, i)
			sum := float64(drop * (k.times[i+half] - k.times[i]))
			if h > 1 {
				sum += k.moment[(k.width+i)>>(h-1)] + k.scaled(k.moment[(k.width+i+half)>>(h-1)], i+half, i)
			}
			k.moment[(k.width+i)>>h] = sum
		}
	}
}

// scaled turns a value in the scale of survival[from] into that of survival[to].
func (k *KaplanMeier) scaled(value float64, from, to int) float64 {
	if k.block == nil {
		return value
	}
	return math.Ldexp(value, int(k.block[to]-k.block[from])*blockBits)
}

// passed counts the event times that are at most x, given that the count is
// low to high.
func (k *KaplanMeier) passed(x float64, low, high int) int {
	if low < high && k.times[low] > x {
		return low // the common case of a short step
	}
	for low < high {
		middle := int(uint(low+high) >> 1)
		if k.times[middle] <= x {
			low = middle + 1
		} else {
			high = middle
		}
	}
	return low
}

// estimateAt is the estimate once index event times have passed.
func (k *KaplanMeier) estimateAt(index int) float64 {
	return k.scaled(k.survival[index], index, 0)
}

// last is the time of the last event, 0 without one: where the tail begins.
func (k *KaplanMeier) last() float64 {
	if len(k.times) == 0 {
		return 0
	}
	return k.times[len(k.times)-1]
}

// Survival is the estimated probability that a session lasts longer than t
// seconds: 1 before 0, right-continuous, on the tail beyond the last event. A
// nil or zero KaplanMeier reads as no data, exp(-t/3600), here; a loss or a
// conditional survival of it is an error.
func (k *KaplanMeier) Survival(t float64) float64 {
	if !(t >= 0) {
		return 1
	}
	if k == nil || len(k.survival) == 0 {
		return math.Exp(-t * unknownRate)
	}
	index := k.passed(t, 0, len(k.times))
	s := k.estimateAt(index)
	if index == len(k.times) {
		s *= math.Exp(-k.tailRate * (t - k.last()))
	}
	return s
}

// Sessions is the number of sessions, and how many of them were completed.
func (k *KaplanMeier) Sessions() (sessions, completed int) {
	for _, events := range k.events {
		completed += int(events)
	}
	return len(k.sessions), completed
}

// CumulativeHazard is the Nelson-Aalen estimate at t seconds: the sum of
// events/atRisk over the event times until t, and beyond the last of them
// TailRate a second more. exp(-CumulativeHazard) is close to Survival, not
// equal. (Nelson 1972, Aalen 1978.)
func (k *KaplanMeier) CumulativeHazard(t float64) float64 {
	index := k.passed(t, 0, len(k.times))
	sum := 0.0
	for i := range index {
		sum += float64(k.events[i]) / float64(k.atRisk[i])
	}
	if index == len(k.times) && t > k.last() {
		sum += float64(k.tailRate * (t - k.last()))
	}
	return sum
}

// greenwood is the sum of Greenwood's formula once index event times have
// passed: the variance of log S. It is +Inf from a time on at which all at
// risk ended.
func (k *KaplanMeier) greenwood(index int) float64 {
	sum := 0.0
	for i := range index {
		d, y := float64(k.events[i]), float64(k.atRisk[i])
		sum += d / (y * (y - d)) // +Inf for y = d
	}
	return sum
}

// variance is that of log S at t, +Inf where it is not known.
func (k *KaplanMeier) variance(t float64) float64 {
	if len(k.times) == 0 && t > 0 { // all of the curve is the tail of an unknown node
		return math.Inf(1)
	}
	return k.greenwood(k.passed(t, 0, len(k.times)))
}

// StandardError is Greenwood's standard error of Survival(t). It is not known,
// false, where the estimate is a convention: from the time on at which all that
// were at risk ended, and beyond 0 where no session ended at all. On the tail it is that of the estimate at the last
// event, scaled with the curve: the tail's rate is taken as given.
// (Greenwood 1926.)
func (k *KaplanMeier) StandardError(t float64) (standardError float64, known bool) {
	sum := k.variance(t)
	if math.IsInf(sum, 1) {
		return 0, false
	}
	return k.Survival(t) * math.Sqrt(sum), true
}

// BandScale is the scale on which a confidence band is symmetric.
type BandScale uint8

const (
	// BandLog is symmetric in log S, the default of R's survfit; its upper limit
	// is cut at 1.
	BandLog BandScale = 1 + iota // log
	// BandLogLog is symmetric in log(-log S). It stays within (0, 1) by itself
	// and covers better in small samples.
	BandLogLog // log_log
)

// MarshalText gives the scale's word.
func (s BandScale) MarshalText() ([]byte, error) { return marshalWord(s, BandLogLog, "scale") }

// UnmarshalText reads the scale's word.
func (s *BandScale) UnmarshalText(text []byte) error {
	return unmarshalWord(s, text, BandLogLog, "scale")
}

// Band is the pointwise confidence band of Survival at t seconds, level being
// its coverage in (0, 1), such as 0.95. Before the first event both limits are
// 1, as the variance there is 0; where StandardError is not known they are 0
// and 1. Errors are FieldErrors: "level", "scale".
// (Kalbfleisch and Prentice 2002, 1.4.)
func (k *KaplanMeier) Band(t, level float64, scale BandScale) (lower, upper float64, err error) {
	if !(level > 0 && level < 1) {
		return 0, 0, fieldError("level", level, "be above 0 and below 1")
	}
	if scale != BandLog && scale != BandLogLog {
		return 0, 0, fieldError("scale", int(scale), "be BandLog or BandLogLog")
	}
	sum, s := k.variance(t), k.Survival(t)
	if math.IsInf(sum, 1) || s == 0 {
		return 0, 1, nil
	}
	if sum == 0 {
		return s, s, nil
	}
	z := mathext.NormalQuantile((1+level)/2) * math.Sqrt(sum)
	if scale == BandLog {
		return s * math.Exp(-z), math.Min(1, s*math.Exp(z)), nil
	}
	logarithm := math.Log(s)
	return math.Exp(logarithm * math.Exp(-z/logarithm)), math.Exp(logarithm * math.Exp(z/logarithm)), nil
}

// Quantile is the age by which a share p of sessions, above 0 and below 1, has
// ended: the first time with S <= 1 - p. Where the data do not reach that far
// it is read off the tail, and withinData is false. Other conventions (R takes
// the middle of a step that hits the level exactly) differ only there; S within
// 1e-12 of the level counts as on it. The error is the FieldError "p".
func (k *KaplanMeier) Quantile(p float64) (seconds float64, withinData bool, err error) {
	if !(p > 0 && p < 1) {
		return 0, false, fieldError("p", p, "be above 0 and below 1")
	}
	level := (1 - p) * (1 + 1e-12)
	n := len(k.times)
	index := sort.Search(n, func(i int) bool { return k.estimateAt(i+1) <= level })
	if index < n {
		return k.times[index], true, nil
	}
	// From logarithms, of the survival's scale too, so that nothing underflows.
	depth := math.Log(k.survival[n]) - math.Log1p(-p)
	if k.block != nil {
		depth -= float64(blockBits*k.block[n]) * math.Ln2
	}
	return k.last() + math.Max(0, depth)/k.tailRate, false, nil
}

// RestrictedMean is the mean of min(session, horizon): the integral of Survival
// from 0 to horizon, in seconds, 0 to 1e31, the tail included, in O(log n).
// The error is the FieldError "horizon".
func (k *KaplanMeier) RestrictedMean(horizon float64) (float64, error) {
	if err := checkHorizon("horizon", horizon); err != nil {
		return 0, err
	}
	c, err := newConditional(k, 0)
	if err != nil {
		return 0, err
	}
	if horizon == 0 {
		return 0, nil
	}
	excess := c.meanExcess(0, horizon)
	c.rewind()
	mean := excess + c.at(horizon).survival() // of S over (0, horizon], scaled by 2^lift
	return horizon * math.Ldexp(mean, -c.lift), nil
}

// TailRate is the rate, per second, at which the curve decays beyond the last
// event.
func (k *KaplanMeier) TailRate() float64 { return k.tailRate }

// WithTailRate is the same estimate with another tail rate, per second, above 0
// and at most 1e18. The error is the FieldError "tail_rate".
func (k *KaplanMeier) WithTailRate(rate float64) (*KaplanMeier, error) {
	if !(rate > 0 && rate <= maxRate) {
		return nil, fieldError("tail_rate", rate, "be above 0 and at most 1e18 per second")
	}
	other := *k
	other.tailRate = rate
	return &other, nil
}

// ExcessRate is the maximum-likelihood rate, per second, of an exponential law
// of what sessions last beyond the age of t seconds: the sessions that ended
// after t, over all the time that was watched beyond t. Unlike the mean of
// completed sessions it counts the time of the censored ones. The error is the
// FieldError "t": no session ended beyond it.
func (k *KaplanMeier) ExcessRate(t float64) (float64, error) {
	events, exposure := 0, 0.0
	for i := len(k.sessions) - 1; i >= 0 && k.sessions[i].DurationSeconds > t; i-- {
		s := k.sessions[i]
		if s.Observed {
			events++
		}
		exposure += s.DurationSeconds - math.Max(t, s.EnteredSeconds)
	}
	rate := float64(events) / exposure
	if !(t >= 0 && rate > 0 && rate <= maxRate) {
		return 0, fieldError("t", t, "be at least 0 and leave a completed session beyond it: take an earlier age")
	}
	return rate, nil
}

// MaximumLikelihoodTail is the same estimate with ExcessRate for its tail, from
// the age on that the given share of all durations, completed or not, does not
// exceed: 0 takes all sessions, 0.5 those longer than the median. The higher
// the share, the more the tail follows the oldest sessions, and the fewer of
// them there are; it is ours, with no default. The error is the FieldError
// "quantile": outside [0, 1), or no session ended beyond it.
func (k *KaplanMeier) MaximumLikelihoodTail(quantile float64) (*KaplanMeier, error) {
	if !(quantile >= 0 && quantile < 1) {
		return nil, fieldError("quantile", quantile, "be at least 0 and below 1")
	}
	age := 0.0
	if rank := int(math.Ceil(quantile * float64(len(k.sessions)))); rank > 0 {
		age = k.sessions[rank-1].DurationSeconds
	}
	rate, err := k.ExcessRate(age)
	if err != nil {
		return nil, fieldError("quantile", quantile, fmt.Sprintf("leave a completed session beyond it, %v seconds: take a lower one", age))
	}
	return k.WithTailRate(rate)
}
