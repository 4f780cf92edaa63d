package replay

import (
	"math/rand/v2"

	"github.com/kvpolicy/kvpolicy"
	"github.com/kvpolicy/kvpolicy/internal/sim"
	"github.com/kvpolicy/kvpolicy/internal/stats"
)

// InstanceResult is what one instance served.
type InstanceResult struct {
	// Requests are those completed there.
	Requests int64
	// TTFT is the distribution of their times to the first token, in seconds.
	TTFT stats.Sketch
}

// Prediction is the time to the first token of one request: what the policy's
// cost expected when it was sent, and what it was. In seconds.
type Prediction struct {
	Predicted float64 `json:"predicted_s"`
	Actual    float64 `json:"actual_s"`
}

// sampledPredictions is how many predictions a run keeps for a picture.
const sampledPredictions = 300

// leastPrediction is what an expected time counts as at least where one is
// divided by it: less than a millisecond is no expectation.
const leastPrediction = 1e-3

// Result is what came of a run.
type Result struct {
	// Requests arrived, and Completed of them were served to the end.
	Requests, Completed int64
	// Good of them met both objectives.
	Good int64
	// TTFT, TPOT and E2E are the distributions over the completed requests of
	// the time from arrival to the first token, of the mean time between tokens
	// (requests of two tokens and more), and of the time from arrival to the
	// end, in seconds.
	TTFT, TPOT, E2E stats.Sketch
	// InputTokens of all requests, CachedTokens of them found in the cache when
	// their prefill started, PrefilledTokens computed, those after a preemption
	// included, OutputTokens generated.
	InputTokens, CachedTokens, PrefilledTokens, OutputTokens int64
	// IndexErrorTokens is the sum over the requests of the distance between
	// the cached tokens that the router expected and those that there were.
	IndexErrorTokens int64
	// Preemptions of requests that lost their KV cache to others.
	Preemptions int64
	// EndSeconds is when the last request was through.
	EndSeconds float64
	// Instances is what each one served, OngoingTokens how many prompt tokens of
	// unfinished requests each held over time.
	Instances     []InstanceResult
	OngoingTokens Series
	// Funnel counts the decisions, rejects not among them, by why targets were
	// targets and by the verdicts of the gates of PD-separation.
	Funnel kvpolicy.Funnel
	// PredictionRatio is the distribution of the actual over the predicted time
	// to the first token; a prediction counts as 1 ms at least.
	PredictionRatio stats.Sketch
	// SeparatedRatio is the same of the requests whose prefill was done
	// elsewhere.
	SeparatedRatio stats.Sketch
	// SeparatedTTFTSeconds is the sum of their times to the first token,
	// TransferSeconds the part of it that KV was on its way.
	SeparatedTTFTSeconds, TransferSeconds float64
	// Predictions is a uniform sample of at most 300 requests.
	Predictions []Prediction
}

// Lost is how many requests were not served to the end.
func (r *Result) Lost() int64 { return r.Requests - r.Completed }

// add counts a completed request.
func (r *Result) add(record *sim.Record, f *dispatched, o Objectives, random *rand.Rand) error {
	r.Completed++
	ttft := record.FirstTokenSeconds - f.arrivalSeconds
	good := ttft <= o.TTFTSeconds
	for _, value := range []struct {
		to      *stats.Sketch
		seconds float64
	}{
		{&r.TTFT, ttft},
		{&r.E2E, record.EndSeconds - f.arrivalSeconds},
		{&r.Instances[record.Instance].TTFT, ttft},
		{&r.PredictionRatio, ttft / max(f.predictedTTFT, leastPrediction)},
	} {
		if err := value.to.Add(value.seconds); err != nil {
			return err
		}
	}
	if f.source != sim.NoInstance {
		if err := r.SeparatedRatio.Add(ttft / max(f.predictedTTFT, leastPrediction)); err != nil {
			return err
		}
		r.SeparatedTTFTSeconds += ttft
		r.TransferSeconds += record.TransferSeconds
	}
	if record.GeneratedTokens > 1 {
		tpot := (record.EndSeconds - record.FirstTokenSeconds) / float64(record.GeneratedTokens-1)
		good = good && tpot <= o.TPOTSeconds
		if err := r.TPOT.Add(tpot); err != nil {
			return err
		}
	}
	if good {
		r.Good++
	}
	r.Instances[record.Instance].Requests++
	r.CachedTokens += int64(record.CachedTokens)
	r.PrefilledTokens += int64(record.PrefilledTokens)
	r.OutputTokens += int64(record.GeneratedTokens)
	r.Preemptions += int64(record.Preemptions)
	distance := f.predictedCached - int64(record.CachedTokens)
	r.IndexErrorTokens += max(distance, -distance)
	// Reservoir sampling: each completed request is in with equal chance.
	p := Prediction{Predicted: f.predictedTTFT, Actual: ttft}
	if len(r.Predictions) < sampledPredictions {
		r.Predictions = append(r.Predictions, p)
	} else if k := random.Int64N(r.Completed); k < sampledPredictions {
		r.Predictions[k] = p
	}
	return nil
}

// Triggered is how many prefills PD-separation moved.
func (r *Result) Triggered() int64 { return r.Funnel.Count(kvpolicy.Triggered) }
