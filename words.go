package kvpolicy

import (
	"fmt"
	"strings"
)

// Every enum is its word in text and JSON. A value without a word, the zero
// value included, is an error in both directions.

// word is an enum whose values 1 to some last one have words.
type word interface {
	~uint8
	fmt.Stringer
}

// The last value of each enum.
const (
	lastAction = Reject
	lastReason = LowerGain
	lastMethod = Recompute
	lastTier   = Down
	lastScore  = ScoreLeastLoaded
	lastRegime = NeverTransfer
)

func marshalWord[W word](w, last W, kind string) ([]byte, error) {
	if w < 1 || w > last {
		return nil, fieldError(kind, uint8(w), fmt.Sprintf("be 1 to %d", uint8(last)))
	}
	return []byte(w.String()), nil
}

func unmarshalWord[W word](to *W, text []byte, last W, kind string) error {
	words := make([]string, 0, last)
	for w := W(1); w <= last; w++ {
		if w.String() == string(text) {
			*to = w
			return nil
		}
		words = append(words, w.String())
	}
	return fieldError(kind, string(text), "be one of "+strings.Join(words, ", "))
}

// MarshalText gives the action's word.
func (a Action) MarshalText() ([]byte, error) { return marshalWord(a, lastAction, "action") }

// UnmarshalText reads the action's word.
func (a *Action) UnmarshalText(text []byte) error {
	return unmarshalWord(a, text, lastAction, "action")
}

// MarshalText gives the reason's word.
func (r Reason) MarshalText() ([]byte, error) { return marshalWord(r, lastReason, "reason") }

// UnmarshalText reads the reason's word.
func (r *Reason) UnmarshalText(text []byte) error {
	return unmarshalWord(r, text, lastReason, "reason")
}

// MarshalText gives the method's word.
func (m Method) MarshalText() ([]byte, error) { return marshalWord(m, lastMethod, "method") }

// UnmarshalText reads the method's word.
func (m *Method) UnmarshalText(text []byte) error {
	return unmarshalWord(m, text, lastMethod, "method")
}

// MarshalText gives the tier's word.
func (t Tier) MarshalText() ([]byte, error) { return marshalWord(t, lastTier, "tier") }

// UnmarshalText reads the tier's word.
func (t *Tier) UnmarshalText(text []byte) error { return unmarshalWord(t, text, lastTier, "tier") }

// MarshalText gives the score's word.
func (s Score) MarshalText() ([]byte, error) { return marshalWord(s, lastScore, "score") }

// UnmarshalText reads the score's word.
func (s *Score) UnmarshalText(text []byte) error { return unmarshalWord(s, text, lastScore, "score") }

// MarshalText gives the regime's word.
func (r Regime) MarshalText() ([]byte, error) { return marshalWord(r, lastRegime, "regime") }

// UnmarshalText reads the regime's word.
func (r *Regime) UnmarshalText(text []byte) error {
	return unmarshalWord(r, text, lastRegime, "regime")
}
