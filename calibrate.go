package kvpolicy

import (
	"cmp"
	"fmt"
	"math"
	"math/bits"
	"slices"

	"gonum.org/v1/gonum/floats"
	"gonum.org/v1/gonum/stat"
)

// TransferSample is one observed transfer of KV.
type TransferSample struct {
	// Bytes is what was moved, 0 to 1e27: tokens times KV bytes per token.
	Bytes float64
	// Seconds is what it took, 0 to 1e12. Take it from where the gate decides to
	// where the KV can be used, else what the fit leaves out the gate will not
	// see either.
	Seconds float64
	// DestinationLoad is how loaded the destination was, in any unit that more
	// is more, such as its requests: 0, or 1e-9 to 1e15. Where it is the same in
	// all samples, as 0 is, it does not enter the fit.
	DestinationLoad float64
}

// PrefillSample is one observed prefill.
type PrefillSample struct {
	// New and Cached are the tokens computed, 1 to 1e15, and those of the prefix
	// that were cached before, 0 to 1e15.
	New, Cached int64
	// Seconds is what the prefill took without its wait in the queue, 1e-9 to
	// 1e12.
	Seconds float64
}

// ContentionSample is the pace of decoding beside others.
type ContentionSample struct {
	// Requests is how many others were on the instance, 0 to 1e9.
	Requests int64
	// SecondsPerToken is what a token took, 0 to 1e12 s.
	SecondsPerToken float64
}

// FitQuality is how far a fit can be believed.
type FitQuality struct {
	// Samples is how many there were.
	Samples int
	// ErrorsKnown says that the standard errors could be found. It is false where
	// one sample alone, or a few of many, has all sizes but one: the line then
	// hangs on it, and the samples cannot tell how far it can be believed.
	ErrorsKnown bool
	// R2 is the share of the variance of the observed seconds that the fit
	// explains, at most 1; a fit worse than their mean has a negative one, as a
	// quantile's may well be. 0 where the seconds are all the same.
	R2 float64
	// Residuals are observed less fitted seconds.
	Residuals Residuals
}

// Residuals are quantiles of observed less fitted seconds.
type Residuals struct{ Min, P10, P50, P90, Max float64 }

// TransferFit is a fitted link, for TransferModel.WithLink.
//
// The errors are standard errors, for every estimator, and for seconds that
// scatter more at larger sizes alike: by the jackknife, from 64 samples on by
// balanced half-samples. They assume samples independent of each other. Below 64
// samples that of a quantile is rough, and of an outer one rather too small. They
// are 0 where FitQuality.ErrorsKnown is false.
type TransferFit struct {
	// Link is the fit: at LoadMean, where loads were given.
	Link
	// OverheadError and BandwidthError are standard errors, in s and bytes/s.
	OverheadError, BandwidthError float64
	// LoadSeconds is by how much a transfer is longer per unit of destination
	// load, at least 0, and LoadError its standard error; LoadMean is the mean
	// load of the samples. All are 0 where no loads were given.
	LoadSeconds, LoadError, LoadMean float64
	FitQuality
}

// AtLoad is the link at a destination load other than the samples' mean.
func (f TransferFit) AtLoad(load float64) Link {
	f.OverheadSeconds = max(0, f.OverheadSeconds+float64(f.LoadSeconds*(load-f.LoadMean)))
	return f.Link
}

// PrefillFit is a fitted prefill, for CostModel.PrefillRate and
// CostModel.PrefillQuadratic. The errors are as in TransferFit.
type PrefillFit struct {
	PrefillRate      float64 // tokens/s
	PrefillQuadratic float64 // s per token squared, 0 to 1
	// RateError and QuadraticError are standard errors, in the same units.
	RateError, QuadraticError float64
	FitQuality
}

// ContentionFit is a fitted contention, for CostModel.DecodeIterationSeconds.
// The errors are as in TransferFit.
type ContentionFit struct {
	// DecodeIterationSeconds is by how much a token takes longer per request.
	DecodeIterationSeconds float64
	// AloneSeconds is what a token takes alone.
	AloneSeconds float64
	// IterationError and AloneError are standard errors, in s.
	IterationError, AloneError float64
	FitQuality
}

// FitTransfer fits seconds = overhead + bytes / bandwidth, the model of
// TransferModel.TransferSeconds, to observed transfers. With AtQuantile(0.9) the
// gate then goes by what nine transfers in ten keep, rather than by the mean.
// Where loads are given, seconds per unit of load is a third coefficient; at a
// quantile they are refused.
//
// An overhead that would come out negative is 0, and the bandwidth that which
// fits best then, the load's share being as it was. It is a FieldError if a sample is out of bounds, if there are
// fewer than two sizes, if larger transfers do not take longer, or if the load
// just follows the size. It takes O(n log n) time, for 1e5 samples at a quantile
// half a minute; the order of the samples is of no consequence.
func FitTransfer(samples []TransferSample, by Estimator) (TransferFit, error) {
	const maxBytes, leastLoad = maxTokens * maxKVBytesPerToken, 1e-9
	observed := make([]observation, len(samples))
	for i, s := range samples {
		switch {
		case !(s.Bytes >= 0 && s.Bytes <= maxBytes):
			return TransferFit{}, sampleError(i, "bytes", s.Bytes, "be 0 to 1e27 bytes")
		case !withinSeconds(s.Seconds):
			return TransferFit{}, sampleError(i, "seconds", s.Seconds, "be 0 to 1e12 seconds")
		case !(s.DestinationLoad == 0 || s.DestinationLoad >= leastLoad && s.DestinationLoad <= maxTokens):
			return TransferFit{}, sampleError(i, "destination_load", s.DestinationLoad, "be 0, or 1e-9 to 1e15")
		}
		observed[i] = observation{x: s.Bytes, y: s.Seconds, load: s.DestinationLoad, scale: 1}
	}
	fit, err := fitLine(observed, by, "sizes in bytes: log transfers of short and of long contexts")
	if err != nil {
		return TransferFit{}, err
	}
	if bandwidth := 1 / fit.slope; !fit.rises || !usableRate(bandwidth) {
		return TransferFit{}, &FieldError{Path: "samples", Want: "take longer the more bytes are moved: " +
			"the time is not the link's, or sizes differ too little; add large transfers, and leave out those that waited for something else"}
	}
	bandwidth := 1 / fit.slope
	return TransferFit{
		Link:           Link{fit.intercept, bandwidth},
		OverheadError:  fit.interceptError,
		BandwidthError: fit.slopeError * bandwidth * bandwidth,
		LoadSeconds:    fit.perLoad,
		LoadError:      fit.perLoadError,
		LoadMean:       fit.loadMean,
		FitQuality:     fit.quality,
	}, nil
}

// FitPrefill fits seconds = new / rate + q ((cached + new)^2 - cached^2), the
// prefill term of the cost, to observed prefills, relative to their seconds, so
// that a short prefill counts as much as a long one. Divided by the new tokens
// it is a line, seconds per token = 1/rate + q (2 cached + new), and that is
// what the estimators see.
//
// A quadratic term that would come out negative is 0. It is a FieldError if a
// sample is out of bounds, if there are fewer than two values of 2 cached + new,
// or if nothing is left for the rate. Cost and order as for FitTransfer.
func FitPrefill(samples []PrefillSample, by Estimator) (PrefillFit, error) {
	const minSeconds = 1e-9 // less could not be squared and divided by
	observed := make([]observation, len(samples))
	for i, s := range samples {
		switch {
		case !(s.New >= 1 && s.New <= maxTokens):
			return PrefillFit{}, sampleError(i, "new", s.New, "be 1 to 1e15 tokens")
		case !withinCount(s.Cached, maxTokens):
			return PrefillFit{}, sampleError(i, "cached", s.Cached, "be 0 to 1e15 tokens")
		case !(s.Seconds >= minSeconds && s.Seconds <= maxSeconds):
			return PrefillFit{}, sampleError(i, "seconds", s.Seconds, "be 1e-9 to 1e12 seconds")
		}
		tokens := float64(s.New)
		pace := s.Seconds / tokens
		observed[i] = observation{x: float64(2*s.Cached + s.New), y: pace, scale: tokens, relative: true}
	}
	fit, err := fitLine(observed, by, "values of 2 cached + new: log prefills of short and of long prompts")
	if err != nil {
		return PrefillFit{}, err
	}
	rate := 1 / fit.intercept
	if !usableRate(rate) {
		return PrefillFit{}, &FieldError{Path: "samples", Want: "leave something for the rate: " +
			"the seconds grow with the square alone; add short prefills, and leave out what waited in the queue"}
	}
	if !(fit.slope <= 1) {
		return PrefillFit{}, fieldError("prefill_quadratic", fit.slope, "come out as 0 to 1: are the seconds in seconds?")
	}
	return PrefillFit{
		PrefillRate:      rate,
		PrefillQuadratic: fit.slope,
		RateError:        fit.interceptError * rate * rate,
		QuadraticError:   fit.slopeError,
		FitQuality:       fit.quality,
	}, nil
}

// FitContention fits seconds a token = alone + requests * decode iteration to
// the pace of decoding beside others. Pace measured while others only decode
// gives what decoding costs; pace over whole requests, prefills of the others
// included, gives what the contention term of the cost stands for.
//
// It is a FieldError if a sample is out of bounds, if there are fewer than two
// counts of requests, or if more requests do not make a token slower. Cost and
// order as for FitTransfer.
func FitContention(samples []ContentionSample, by Estimator) (ContentionFit, error) {
	observed := make([]observation, len(samples))
	for i, s := range samples {
		switch {
		case !withinCount(s.Requests, maxCount):
			return ContentionFit{}, sampleError(i, "requests", s.Requests, "be 0 to 1e9")
		case !withinSeconds(s.SecondsPerToken):
			return ContentionFit{}, sampleError(i, "seconds_per_token", s.SecondsPerToken, "be 0 to 1e12 seconds")
		}
		observed[i] = observation{x: float64(s.Requests), y: s.SecondsPerToken, scale: 1}
	}
	fit, err := fitLine(observed, by, "counts of requests: log the pace on idle and on busy instances")
	if err != nil {
		return ContentionFit{}, err
	}
	if !fit.rises {
		return ContentionFit{}, &FieldError{Path: "samples", Want: "take longer a token the more requests there are: " +
			"add busier instances, or switch contention off with a decode_iteration_s of 0"}
	}
	return ContentionFit{
		DecodeIterationSeconds: fit.slope,
		AloneSeconds:           fit.intercept,
		IterationError:         fit.slopeError,
		AloneError:             fit.interceptError,
		FitQuality:             fit.quality,
	}, nil
}

func sampleError(at int, field string, value any, want string) error {
	return fieldError(fmt.Sprintf("samples[%d].%s", at, field), value, want)
}

// observation is a sample as a point of a line; scale * y are its seconds.
type observation struct {
	x, y, load, scale float64
	relative          bool // weight by 1/y^2
}

// fitted is a line with what can be said about it.
type fitted struct {
	line
	perLoad, loadMean                        float64
	interceptError, slopeError, perLoadError float64
	rises                                    bool // beyond rounding
	quality                                  FitQuality
}

// fitLine lays a line through the observations, which it sorts, and finds its
// errors by laying it again without some of them. sizes says what must differ.
func fitLine(observed []observation, by Estimator, sizes string) (fitted, error) {
	if err := by.validate(); err != nil {
		return fitted{}, err
	}
	if len(observed) < 2 {
		return fitted{}, fieldError("samples", len(observed), "be of at least two different "+sizes)
	}
	slices.SortFunc(observed, func(a, b observation) int {
		return cmp.Or(cmp.Compare(a.x, b.x), cmp.Compare(a.y, b.y), cmp.Compare(a.load, b.load), cmp.Compare(a.scale, b.scale))
	})
	// Within 0 to 1 no square of x overflows, or underflows to nothing; the scale
	// is a power of two, and changes no digit.
	_, exponent := math.Frexp(observed[len(observed)-1].x)
	for i := range observed {
		observed[i].x = math.Ldexp(observed[i].x, -exponent)
	}
	f := fitted{loadMean: meanLoad(observed)}
	if f.loadMean > 0 && by.kind == quantileRegression {
		return fitted{}, &FieldError{Path: "samples", Want: "have one destination load for a line at a quantile: " +
			"the slow transfers' share of the load is not the others'; leave the loads out, or fit the samples of each load apart"}
	}
	var err error
	if f.line, f.perLoad, err = f.lay(observed, by, sizes); err != nil {
		return fitted{}, err
	}
	first, last := observed[0], observed[len(observed)-1]
	f.rises = f.slope*(last.x-first.x) > 1e-12*f.at(last.x)
	var intercepts, slopes, perLoads []float64
	sets, scale := withoutSome(observed)
	for _, set := range sets {
		l, perLoad, err := f.lay(set, by, sizes)
		if err != nil { // what was left out decides alone
			intercepts = nil
			break
		}
		intercepts = append(intercepts, l.intercept-f.intercept)
		slopes = append(slopes, l.slope-f.slope)
		perLoads = append(perLoads, perLoad-f.perLoad)
	}
	f.quality = f.judge(observed)
	if f.quality.ErrorsKnown = intercepts != nil; f.quality.ErrorsKnown {
		f.interceptError = scale * floats.Norm(intercepts, 2)
		f.slopeError = scale * floats.Norm(slopes, 2)
		f.perLoadError = scale * floats.Norm(perLoads, 2)
	}
	f.slope, f.slopeError = math.Ldexp(f.slope, -exponent), math.Ldexp(f.slopeError, -exponent)
	return f, nil
}

// withoutSome are the sets of samples from which the errors are had, and by what
// the root of the sum of the squared deviations is multiplied. Few samples are
// left out one by one (the jackknife). A quantile's error is not to be had that
// way; of many samples, sorted by size, one of each two neighbours is left out
// (balanced half-samples; McCarthy, Review of the ISI 37, 1969).
func withoutSome(observed []observation) (sets [][]observation, scale float64) {
	const halves = 32 // a power of two
	n := len(observed)
	if n < 2*halves {
		for out := range n {
			sets = append(sets, slices.Concat(observed[:out], observed[out+1:]))
		}
		return sets, math.Sqrt(float64(n-1) / float64(n))
	}
	for half := range uint(halves) {
		set := make([]observation, 0, n/2+1)
		for pair := range n / 2 {
			// The parities are the signs of a Hadamard matrix.
			set = append(set, observed[2*pair+bits.OnesCount(uint(pair)%halves&half)%2])
		}
		sets = append(sets, append(set, observed[n&^1:]...))
	}
	return sets, 1 / math.Sqrt(halves)
}

// meanLoad is the mean load, 0 where all are the same.
func meanLoad(observed []observation) float64 {
	sum, differ := 0.0, false
	for _, o := range observed {
		sum += o.load
		differ = differ || o.load != observed[0].load
	}
	if !differ {
		return 0
	}
	return sum / float64(len(observed))
}

// lay lays the line through some of the observations. What the load explains
// beyond what the size does is taken out first: the slope of the seconds'
// residuals against the load's, which for least squares makes the three
// coefficients those of the joint fit (Frisch and Waugh, Econometrica 1, 1933).
func (f *fitted) lay(observed []observation, by Estimator, sizes string) (l line, perLoad float64, err error) {
	c := cloud{x: make([]float64, len(observed)), y: make([]float64, len(observed))}
	for i, o := range observed {
		c.x[i], c.y[i] = o.x, o.y
		if o.relative {
			c.weights = append(c.weights, 1/(o.y*o.y))
		}
	}
	if c.weights != nil { // to 1 on average: stat divides by their sum less 1
		floats.Scale(float64(len(c.weights))/floats.Sum(c.weights), c.weights)
	}
	if !(c.width() > sameSize) { // of the greatest x of all, which is about 1
		return line{}, 0, &FieldError{Path: "samples", Want: "be of at least two different " + sizes}
	}
	if f.loadMean > 0 {
		if perLoad, err = loadSlope(observed, c, by); err != nil {
			return line{}, 0, err
		}
		for i, o := range observed {
			c.y[i] -= float64(perLoad * (o.load - f.loadMean))
		}
	}
	return by.lay(c), perLoad, nil
}

// loadSlope is how many seconds a unit of load adds, at least 0.
func loadSlope(observed []observation, c cloud, by Estimator) (float64, error) {
	loads := cloud{x: c.x, y: make([]float64, len(observed))}
	for i, o := range observed {
		loads.y[i] = o.load
	}
	load, seconds := by.free(loads), by.free(c)
	type pair struct{ load, seconds float64 }
	rest := make([]pair, len(observed))
	for i, o := range observed {
		rest[i] = pair{o.load - load.at(o.x), o.y - seconds.at(o.x)}
	}
	slices.SortFunc(rest, func(a, b pair) int { return cmp.Compare(a.load, b.load) })
	r := cloud{x: make([]float64, len(rest)), y: make([]float64, len(rest))}
	for i, p := range rest {
		r.x[i], r.y[i] = p.load, p.seconds
	}
	if !(r.width() > sameSize*slices.Max(loads.y)) {
		return 0, &FieldError{Path: "samples", Want: "have destination loads that do not just follow the bytes: " +
			"leave the loads out, or log transfers of one size at different loads"}
	}
	return max(0, by.free(r).slope), nil
}

// judge is how well the line meets the observations.
func (f *fitted) judge(observed []observation) FitQuality {
	seconds, estimates, residuals := make([]float64, len(observed)), make([]float64, len(observed)), make([]float64, len(observed))
	for i, o := range observed {
		seconds[i] = o.y * o.scale
		estimates[i] = (f.at(o.x) + float64(f.perLoad*(o.load-f.loadMean))) * o.scale
		residuals[i] = seconds[i] - estimates[i]
	}
	slices.Sort(residuals)
	at := func(p float64) float64 { return stat.Quantile(p, stat.Empirical, residuals, nil) }
	q := FitQuality{
		Samples:   len(observed),
		Residuals: Residuals{Min: residuals[0], P10: at(0.1), P50: at(0.5), P90: at(0.9), Max: residuals[len(residuals)-1]},
	}
	if r2 := stat.RSquaredFrom(estimates, seconds, nil); r2 >= -math.MaxFloat64 { // else they have no variance
		q.R2 = r2
	}
	return q
}
