package kvpolicy

//go:generate stringer -type=Action,Reason,Method,Tier,Score,Regime -linecomment -output=words_string.go

// Action is what a decision asks for.
type Action uint8

const (
	// Place sends a new request to the target, which prefills and decodes it.
	Place Action = 1 + iota // place
	// PrefillRemote has the prefill done on Decision.PrefillOn and the KV cache
	// shipped to the target, which decodes. (SPEC section 4.)
	PrefillRemote // prefill_remote
	// Stay leaves a running request where it is; the target is that instance.
	Stay // stay
	// Migrate moves a running request to the target before its node disappears,
	// by Decision.Move.Method. (SPEC section 6.3.)
	Migrate // migrate
	// Recover places a running request anew because its instance is gone or
	// unavailable; its context is prefilled again on the target.
	Recover // recover
	// Reject names no instance: none is available, or none can ever hold the
	// request.
	Reject // reject
)

// Reason is why: of a decision, of a gate of the PD-separation funnel, or of a
// candidate that was not taken. The list only ever grows at its end.
type Reason uint8

const (
	// NoAffinity: the request names no home, or the policy minds none; the best
	// candidate was taken.
	NoAffinity Reason = 1 + iota // no_affinity
	// AffinityKept: the session's home passed both gates and was taken.
	AffinityKept // affinity_kept
	// AffinityOverloaded: the home holds more than overload_factor times the
	// candidates' mean of ongoing tokens; the best was taken.
	AffinityOverloaded // affinity_overloaded
	// AffinityTooCostly: the home's score is more than overload_factor times
	// the best; the best was taken.
	AffinityTooCostly // affinity_too_costly
	// AffinityUnavailable: the home is unknown, unavailable, stale or full; the
	// best was taken.
	AffinityUnavailable // affinity_unavailable
	// NoAvailableInstance rejects: every instance is unavailable, or there is none.
	NoAvailableInstance // no_available_instance
	// NoFeasibleInstance rejects: no KV pool among the instances considered
	// could hold the request, even empty.
	NoFeasibleInstance // no_feasible_instance

	// SourceLost: the instance that ran the request is gone or unavailable.
	SourceLost // source_lost
	// RiskRemoved: the move removes more expected loss than it costs; of a
	// candidate, why the request leaves the instance that runs it.
	RiskRemoved // risk_removed
	// MigrationDisabled: the policy has no migration.
	MigrationDisabled // migration_disabled
	// MaxHopsReached: the request has made max_hops planned moves.
	MaxHopsReached // max_hops
	// MinRemaining: too little work is left, or it is unknown how much.
	MinRemaining // min_remaining
	// NoDestination: no other instance is available, fresh enough, has room for
	// the request and would be filled in time.
	NoDestination // no_destination
	// RiskGainBelowHysteresis: the best destination's risk gain does not exceed
	// the hysteresis.
	RiskGainBelowHysteresis // risk_gain_below_hysteresis
	// DestinationSlower: the best destination would finish the request too much
	// later.
	DestinationSlower // destination_slower
	// WouldReturn: an overlapped hand-off would pay, but the destination is not
	// safer by more than the hysteresis, so that the request would bounce.
	WouldReturn // would_return

	// NewLocalBelowThreshold: gate 1, the chosen instance has too little to prefill.
	NewLocalBelowThreshold // new_local_below_threshold
	// ChosenNoActiveDecode: gate 2, too few decodes to protect on the chosen instance.
	ChosenNoActiveDecode // chosen_no_active_decode
	// SourceCacheBelowThreshold: gate 3, no source caches enough of the prompt.
	SourceCacheBelowThreshold // src_cache_below_threshold
	// SourceNotMeaningfullyMoreCache: gate 4, no source caches enough more than
	// the chosen instance.
	SourceNotMeaningfullyMoreCache // src_not_meaningfully_more_cache
	// CostBenefitNotEnoughMargin: gate 5, shipping the KV cache from the best
	// source does not beat prefilling locally by more than the margin.
	CostBenefitNotEnoughMargin // cost_benefit_not_enough_margin
	// Triggered: all five gates passed.
	Triggered // triggered

	// Taken: this candidate is the target of the decision.
	Taken // taken
	// InstanceUnavailable: the candidate is unavailable.
	InstanceUnavailable // instance_unavailable
	// MetricsStale: the candidate's metrics are too old while another's are fresh.
	MetricsStale // metrics_stale
	// NoRoomNow: the candidate's free KV does not hold the request while
	// another's does.
	NoRoomNow // no_room_now
	// NeverFits: the candidate's whole KV pool is too small for the request.
	NeverFits // never_fits
	// HigherScore: another candidate has a lower score.
	HigherScore // higher_score
	// MoreNewTokens: equal score, but another has fewer tokens to prefill.
	MoreNewTokens // more_new_tokens
	// MoreRequests: equal up to there, but another has fewer requests.
	MoreRequests // more_requests
	// MoreOngoingTokens: equal up to there, but another has fewer ongoing tokens.
	MoreOngoingTokens // more_ongoing_tokens
	// TieHash: equal in all of these; the hash of policy seed, request and
	// instance fell for another.
	TieHash // tie_hash
	// HomeKept: the candidate is the best, but the session's home passed the
	// affinity gates.
	HomeKept // home_kept
	// LowerGain: another destination's risk gain less slowdown is greater.
	LowerGain // lower_gain

)

// Method is how the KV of a request comes to its new instance.
type Method uint8

const (
	// Transfer ships the KV cache over the link.
	Transfer Method = 1 + iota // transfer
	// Recompute prefills the context again on the destination.
	Recompute // recompute
)

// Tier is how well an instance can take the request. Only instances of the tier
// FitsNow are candidates, or of FitsEmpty where there are none of that. (SPEC
// section 2; ours.)
type Tier uint8

const (
	// FitsNow: fresh enough, and the free KV holds the request.
	FitsNow Tier = 1 + iota // fits_now
	// FitsEmpty: fresh enough, and the whole KV pool would hold the request:
	// it has to wait there, and the decision is overcommitted.
	FitsEmpty // fits_empty
	// TooSmall: fresh enough, but the KV pool can never hold the request.
	TooSmall // too_small
	// Stale: metrics older than the policy allows while another instance is
	// fresh. Where none is fresh, none is stale, and the decision is degraded.
	Stale // stale
	// Down: unavailable.
	Down // down
)

// Breakdown is the cost of an instance term by term, in seconds, each finite
// and at least 0. (SPEC section 2.)
type Breakdown struct {
	// Contention is the share of each decode step that the requests already
	// there take: requests times decode_iteration_s.
	Contention float64
	// Queue is the prefill work ahead of the request, and the wait known from
	// elsewhere.
	Queue float64
	// Prefill is the request's own prefill of what is not cached.
	Prefill float64
	// Interference is the delay that this prefill inflicts on the requests
	// already there: a cost to others, no part of the request's own time.
	Interference float64
	// Decode is the output still to come, where the policy counts it.
	Decode float64
	// Loss is the expected unplanned loss over the request's time there, where
	// the policy has a hazard model.
	Loss float64
}

// Total is the cost: the sum of the terms.
func (b Breakdown) Total() float64 {
	return total(b.Contention, b.Queue, b.Prefill, b.Interference, b.Decode, b.Loss)
}

// total adds the terms in the one order in which scores are compared.
func total(contention, queue, prefill, interference, decode, loss float64) float64 {
	return contention + queue + prefill + interference + decode + loss
}

// time is T of SPEC section 5: how long the request would be there.
func (b Breakdown) time() float64 { return b.Contention + b.Queue + b.Prefill + b.Decode }

// Separation is the verdict of the PD-separation funnel. (SPEC section 4.)
type Separation struct {
	// Reason is Triggered, or the first gate that failed; 0 where the policy
	// has no PD-separation, or the action is none that it concerns.
	Reason Reason
	// NewLocal is what the chosen instance would have to prefill, in tokens.
	NewLocal int64
	// Source is the best source, NewSource what it would have to prefill in
	// tokens. Source and what follows are set from gate 5 on.
	Source    string
	NewSource int64
	// CostLocal and CostMigrate are the two costs compared, in seconds.
	CostLocal   float64
	CostMigrate float64
}

// Move is a planned move of a running request to a destination. (SPEC
// sections 6.3 and 6.4.)
type Move struct {
	// Target is the destination.
	Target string
	// Method is the cheaper of transfer and recompute.
	Method Method
	// PlannedSeconds is the time for which the request stands still: C of SPEC
	// section 6 for stop-and-copy, the stall of an overlapped hand-off.
	PlannedSeconds float64
	// RiskGainSeconds is the expected loss that the move removes, less what it
	// costs.
	RiskGainSeconds float64
	// DeltaTSeconds is how much later the request would end; negative is earlier.
	DeltaTSeconds float64
	// LossStaySeconds and LossMoveSeconds are the two expected losses compared.
	LossStaySeconds float64
	LossMoveSeconds float64
}

// Decision is what to do with a request, and why. The zero Decision is none;
// on an error Decide returns it.
type Decision struct {
	// Action is what to do.
	Action Action
	// Target is the id of the instance that decodes the request; empty for a
	// reject.
	Target string
	// Reason is why the target is the target.
	Reason Reason
	// Overcommitted says that no candidate has room now: the target can hold
	// the request only once others have left.
	Overcommitted bool
	// Degraded says that the metrics of every available instance are older than
	// the policy allows. Said by Place, PrefillRemote and Recover alone.
	Degraded bool
	// Cost is the target's cost, set for Place, PrefillRemote and Recover. It
	// prices the prefill on the target, for PrefillRemote too: what the source
	// makes of it stands in Separation.
	Cost Breakdown
	// Score is what the candidates were ordered by, lower is better: seconds
	// for the score Cost, tokens times requests for LMetric, tokens for
	// LeastWork, requests for LeastLoaded.
	Score float64
	// RunnerUp is the best candidate that is not the target, empty where there
	// is none.
	RunnerUp string
	// Margin is the runner-up's score less the target's; 0 without a runner-up,
	// negative where affinity kept a home that scores worse than the best.
	Margin float64
	// PrefillOn is the id of the instance that prefills, for PrefillRemote.
	PrefillOn string
	// Separation is the verdict of the PD-separation funnel, where it ran.
	Separation Separation
	// Move is the move of a Migrate; of a Recover only its Method, Recompute.
	Move Move
	// Candidate is the best destination that was not taken, for a Stay that
	// had one.
	Candidate Move
}
