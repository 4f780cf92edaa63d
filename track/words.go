package track

import "fmt"

// MarshalText gives the state's word; a state without one is an error.
func (s State) MarshalText() ([]byte, error) { return marshalWord(s, Down, "state") }

// UnmarshalText reads the state's word.
func (s *State) UnmarshalText(text []byte) error { return unmarshalWord(s, text, Down, "state") }

// MarshalText gives the ending's word; an ending without one is an error.
func (e Ending) MarshalText() ([]byte, error) { return marshalWord(e, Lost, "ending") }

// UnmarshalText reads the ending's word.
func (e *Ending) UnmarshalText(text []byte) error { return unmarshalWord(e, text, Lost, "ending") }

// word is an enum whose values 1 to some last one have words.
type word interface {
	~uint8
	fmt.Stringer
}

func marshalWord[W word](w, last W, kind string) ([]byte, error) {
	if w < 1 || w > last {
		return nil, fieldError(kind, uint8(w), fmt.Sprintf("be 1 to %d", uint8(last)))
	}
	return []byte(w.String()), nil
}

func unmarshalWord[W word](to *W, text []byte, last W, kind string) error {
	for w := W(1); w <= last; w++ {
		if w.String() == string(text) {
			*to = w
			return nil
		}
	}
	return fieldError(kind, string(text), fmt.Sprintf("be one of the words from %v to %v", W(1), last))
}
