package churn

import (
	"fmt"
	"math/rand/v2"
	"slices"

	"github.com/kvpolicy/kvpolicy"
)

// run is one scenario being played by one strategy.
type run struct {
	scenario *Scenario
	strategy *Strategy
	options  *Options
	policy   kvpolicy.Policy
	now      float64
	agenda   agenda
	nodes    []*node
	byName   map[string]*node
	requests []*request
	handOffs []*handOff // under way, in the order in which they began
	backlog  []*request // that no node can take, in the order in which they came
	learner  learner
	choices  *rand.Rand
	snapshot kvpolicy.Snapshot
	result   Result
	// observe, where set, is told of everything that happens. Tests set it.
	observe func(happening)
}

// happening is something that happened.
type happening struct {
	seconds float64
	what    string
	request *request // nil for a node's
	node    *node    // nil for a request's that has none
}

func (r *run) tell(what string, q *request, n *node) {
	if r.observe != nil {
		r.observe(happening{r.now, what, q, n})
	}
}

// Run plays the scenario by the strategy. The same input gives the same result,
// bit for bit. Errors are kvpolicy.FieldErrors.
func Run(scenario *Scenario, strategy Strategy, options Options) (Result, error) {
	return (&run{}).play(scenario, &strategy, &options)
}

func (r *run) play(scenario *Scenario, strategy *Strategy, options *Options) (Result, error) {
	if err := r.begin(scenario, strategy, options); err != nil {
		return Result{}, err
	}
	for {
		if more, err := r.step(); err != nil {
			return Result{}, fmt.Errorf("%s at %v s: %w", strategy.Name, r.now, err)
		} else if !more {
			return r.finish(), nil
		}
	}
}

// begin sets everything up.
func (r *run) begin(scenario *Scenario, strategy *Strategy, options *Options) error {
	if err := scenario.validate(); err != nil {
		return err
	}
	if err := options.validate(); err != nil {
		return err
	}
	r.scenario, r.strategy, r.options = scenario, strategy, options
	r.policy = strategy.Policy
	r.policy.Transfer = options.Transfer
	if r.policy.Hazard.StallPenaltySeconds = options.StallPenaltySeconds; strategy.Knowledge == KnowsEnds {
		r.policy.Hazard.StallPenaltySeconds = 0 // it never stalls
	}
	r.choices = rand.New(newSource(scenario.Seed, streamChoices, 0))
	r.byName = make(map[string]*node, len(scenario.Nodes))
	var err error
	if r.learner, err = newLearner(scenario.Nodes, options.MinSessions); err != nil {
		return err
	}
	for i := range scenario.Nodes {
		n := &node{Node: &scenario.Nodes[i]}
		r.nodes = append(r.nodes, n)
		r.byName[n.Name] = n
		for n.session < len(n.Sessions) && n.Sessions[n.session].EndSeconds <= 0 {
			n.session++
		}
		r.expect(n)
	}
	for i := range scenario.Requests {
		q := &request{Request: &scenario.Requests[i], name: fmt.Sprintf("request-%d", i)}
		r.requests = append(r.requests, q)
		r.agenda.schedule(event{seconds: q.ArrivalSeconds, kind: placement, request: q})
	}
	if strategy.Knowledge == KnowsSessions {
		r.agenda.schedule(event{kind: refresh})
	}
	if r.policy.Migration.Enabled {
		r.agenda.schedule(event{seconds: options.CheckSeconds, kind: check})
	}
	return nil
}

// step has the next event happen, if there is one before the horizon.
func (r *run) step() (more bool, err error) {
	if r.agenda.Len() == 0 {
		return false, nil
	}
	e := r.agenda.next()
	if e.seconds > r.scenario.HorizonSeconds {
		return false, nil
	}
	r.now = e.seconds
	return true, r.handle(e)
}

func (r *run) handle(e event) error {
	switch e.kind {
	case serviceEnds:
		if !e.stay.left {
			r.serviceEnds(e.stay)
		}
	case roundEnds:
		if !e.handOff.over {
			r.roundEnds(e.handOff)
		}
	case nodeEnds:
		return r.nodeEnds(e.node)
	case nodeBegins:
		return r.nodeBegins(e.node)
	case refresh:
		r.agenda.schedule(event{seconds: r.now + r.options.RefreshSeconds, kind: refresh})
		return r.refresh()
	case placement:
		return r.place(e.request)
	case check:
		r.agenda.schedule(event{seconds: r.now + r.options.CheckSeconds, kind: check})
		return r.check()
	}
	return nil
}

// expect schedules the beginning of the session that the node comes to.
func (r *run) expect(n *node) {
	if n.session < len(n.Sessions) {
		r.agenda.schedule(event{seconds: max(0, n.present().StartSeconds), kind: nodeBegins, node: n})
	}
}

func (r *run) nodeBegins(n *node) error {
	n.up = true
	r.tell("begins", nil, n)
	r.agenda.schedule(event{seconds: n.present().EndSeconds, kind: nodeEnds, node: n})
	waiting := r.backlog
	r.backlog = nil
	for _, q := range waiting {
		if err := r.place(q); err != nil {
			return err
		}
	}
	return nil
}

func (r *run) nodeEnds(n *node) error {
	n.up = false
	r.tell("ends", nil, n)
	if err := r.learner.ended(n.Node, n.present()); err != nil {
		return err
	}
	n.session++
	r.expect(n)
	for _, h := range slices.Clone(r.handOffs) {
		if h.to != n && h.from != n {
			continue
		}
		r.result.OvertakenMoves++
		r.cancel(h)
		if q := h.request; h.stopped && h.from == n {
			r.lose(q, n)
		} else if h.stopped { // its KV is still on the source
			q.stay = newStay(q, h.from)
			q.stay.kv = true
			h.from.line = slices.Insert(h.from.line, 0, q.stay)
			r.serve(h.from)
		}
	}
	here := slices.Clone(n.line)
	if n.serving != nil {
		here = slices.Insert(here, 0, n.serving)
	}
	for _, s := range here {
		q, waited := s.request, s != n.serving
		r.leave(s, s.generatedBy(r.now))
		switch {
		case r.strategy.Knowledge != KnowsEnds:
			if waited {
				r.result.LostWaiting++
			}
			r.lose(q, n)
			continue
		case !waited:
			r.moves(q, n)
		}
		if err := r.place(q); err != nil {
			return err
		}
	}
	return nil
}

// moves counts a planned move.
func (r *run) moves(q *request, from *node) {
	q.hops++
	r.result.PlannedMoves++
	r.tell("moves", q, from)
}

// lose has a request stall because its node is gone.
func (r *run) lose(q *request, n *node) {
	r.tell("lost", q, n)
	q.losses++
	r.result.UnplannedLosses++
	r.stall(q)
}

// stall has a request stand still until its loss has been noticed.
func (r *run) stall(q *request) {
	q.lost = true
	until := min(r.now+r.options.StallPenaltySeconds, r.scenario.HorizonSeconds)
	r.result.WastedSeconds += until - r.now
	r.agenda.schedule(event{seconds: r.now + r.options.StallPenaltySeconds, kind: placement, request: q})
}

// join puts a stay at the end of its node's line.
func (r *run) join(s *stay) {
	s.node.line = append(s.node.line, s)
	r.serve(s.node)
}

// serve begins with the next in line, if the node is up and idle.
func (r *run) serve(n *node) {
	if !n.up || n.serving != nil || len(n.line) == 0 {
		return
	}
	s := n.line[0]
	n.line = slices.Delete(n.line, 0, 1)
	n.serving, s.begun = s, r.now
	overhead, q := r.options.Transfer.RecomputeOverheadSeconds, s.request
	if s.fill != nil {
		r.copyRound(s.fill, overhead, float64(q.PromptTokens+q.stay.generatedBy(r.now)))
		return
	}
	if !s.kv && q.built > 0 {
		s.redone = overhead + float64(min(q.built, q.context()))/n.PrefillRate
	}
	r.decode(s, s.setupSeconds(overhead))
}

// decode has a served stay decode after so many seconds of setup.
func (r *run) decode(s *stay, setup float64) {
	q := s.request
	s.decodeFrom, s.before = r.now+setup, q.generated
	s.tokens = max(0, min(q.OutputTokens-q.generated, s.node.KVCapacityTokens-q.context()))
	r.tell("served", q, s.node)
	r.agenda.schedule(event{seconds: s.decodeFrom + float64(s.tokens)/s.node.DecodeRate, kind: serviceEnds, stay: s})
}

// serviceEnds completes a request, or sends it on where its node's pool is full.
func (r *run) serviceEnds(s *stay) {
	q := s.request
	if q.moving != nil {
		r.cancel(q.moving)
	}
	r.leave(s, s.before+s.tokens)
	if q.generated < q.OutputTokens {
		r.tell("overflows", q, s.node)
		r.result.Overflows++
		r.stall(q)
		return
	}
	q.over, q.finished = true, r.now
	r.tell("finishes", q, s.node)
}

// leave takes a stay off its node, with so many tokens generated for its
// request in all, and has the node go on with the next.
func (r *run) leave(s *stay, generated int64) {
	n, q := s.node, s.request
	s.left = true
	if q.stay == s {
		q.stay, q.generated = nil, generated
	}
	if s != n.serving {
		n.line = without(n.line, s)
		return
	}
	r.result.WastedSeconds += s.wasted(r.now)
	if s.fill == nil {
		q.built = max(q.built, s.builtBy(r.now))
		n.evict(q.context())
	}
	n.serving = nil
	r.serve(n)
}

// refresh has the survival curves learn the ages of the sessions that are
// running.
func (r *run) refresh() error {
	for _, n := range r.nodes {
		if n.up {
			if err := r.learner.running(n.Node, n.present(), r.now); err != nil {
				return err
			}
		}
	}
	return nil
}
