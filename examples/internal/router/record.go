package router

import (
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"sync"
	"time"

	"github.com/kvpolicy/kvpolicy"
)

// Record is a decision and what it was decided on.
type Record struct {
	// Name is the id of the call, Attempt counts its attempts from 0.
	Name    string
	Attempt int
	Time    time.Time
	Session string
	Model   string
	// CachedTokens and NewTokens are what of the prompt the target holds, and
	// lacks.
	CachedTokens, NewTokens int64
	Snapshot                kvpolicy.Snapshot
	Decision                kvpolicy.Decision
}

// target fills in what the snapshot says of the target.
func (r *Record) target(s kvpolicy.Snapshot, d kvpolicy.Decision) {
	for at := range s.Instances {
		if i := &s.Instances[at]; i.ID == d.Target {
			r.CachedTokens = min(i.CachedTokens, s.Request.ContextTokens)
			r.NewTokens = s.Request.ContextTokens - r.CachedTokens
		}
	}
}

// recorder writes decisions where they are to be written.
type recorder struct {
	keeps  bool // whether the snapshot is needed once decided
	logger *slog.Logger
	policy json.RawMessage
	on     func(Record)

	mu     sync.Mutex
	to     io.Writer
	faulty bool // the log cannot be written to, which is said once
}

func newRecorder(c Config) (*recorder, error) {
	r := &recorder{keeps: c.DecisionLog != nil || c.OnDecision != nil, logger: c.Logger, on: c.OnDecision, to: c.DecisionLog}
	var err error
	r.policy, err = json.Marshal(c.Policy)
	return r, err
}

// logLine is a line of the decision log, as examples/decide reads it.
type logLine struct {
	Name     string            `json:"name"`
	Time     time.Time         `json:"time"`
	Policy   json.RawMessage   `json:"policy"`
	Snapshot kvpolicy.Snapshot `json:"snapshot"`
	Decision kvpolicy.Decision `json:"decision"`
}

func (r *recorder) write(v Record) {
	r.log(v)
	if r.on != nil {
		r.on(v)
	}
	if r.to == nil {
		return
	}
	line, err := json.Marshal(logLine{v.Name, v.Time, r.policy, v.Snapshot, v.Decision})
	r.mu.Lock()
	defer r.mu.Unlock()
	if err == nil {
		_, err = r.to.Write(append(line, '\n'))
	}
	if err != nil && !r.faulty {
		r.logger.Error("decision log", "error", err)
	}
	r.faulty = err != nil
}

func (r *recorder) log(v Record) {
	ctx := context.Background()
	if !r.logger.Enabled(ctx, slog.LevelInfo) {
		return
	}
	d := v.Decision
	attributes := []slog.Attr{
		slog.String("request", v.Name), slog.Int("attempt", v.Attempt), slog.String("session", v.Session), slog.String("model", v.Model),
		slog.String("action", d.Action.String()), slog.String("reason", d.Reason.String()), slog.String("target", d.Target),
		slog.Int64("context_tokens", v.Snapshot.Request.ContextTokens), slog.Int64("remaining_tokens", v.Snapshot.Request.RemainingTokens),
		slog.Int64("cached_tokens", v.CachedTokens), slog.Int64("new_tokens", v.NewTokens),
		slog.Float64("score", d.Score), slog.Float64("contention", d.Cost.Contention), slog.Float64("queue", d.Cost.Queue),
		slog.Float64("prefill", d.Cost.Prefill), slog.Float64("interference", d.Cost.Interference), slog.Float64("decode", d.Cost.Decode),
		slog.Float64("loss", d.Cost.Loss), slog.Float64("total", d.Cost.Total()),
		slog.String("runner_up", d.RunnerUp), slog.Float64("margin", d.Margin),
		slog.Bool("overcommitted", d.Overcommitted), slog.Bool("degraded", d.Degraded),
	}
	if p := d.Separation; p.Reason != 0 {
		attributes = append(attributes, slog.Group("pdsep", slog.String("reason", p.Reason.String()), slog.String("prefill_on", d.PrefillOn),
			slog.Int64("new_local", p.NewLocal), slog.Int64("new_source", p.NewSource), slog.String("source", p.Source),
			slog.Float64("cost_local", p.CostLocal), slog.Float64("cost_migrate", p.CostMigrate)))
	}
	r.logger.LogAttrs(ctx, slog.LevelInfo, "decision", attributes...)
}
