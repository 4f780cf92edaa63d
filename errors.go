package kvpolicy

import (
	"errors"
	"fmt"
)

// ErrInvalid is what every error of this package is, by errors.Is: a snapshot,
// a policy, a curve or a sample that cannot be decided on. The particulars are
// in the *FieldError that errors.As finds.
var ErrInvalid = errors.New("kvpolicy: invalid input")

// FieldError says which field of the input is wrong, what it holds and what is
// asked of it. It is an ErrInvalid by errors.Is.
type FieldError struct {
	// Path leads to the field in the words of the JSON form, such as
	// "instances[2].cached_tokens" or "curves[spot].durations[4]".
	Path string
	// Value is what the field holds, as text; empty where the field is missing.
	Value string
	// Want is what is asked of the field, as the end of the sentence "must ...".
	Want string
}

// Error gives path, value and demand in one line.
func (e *FieldError) Error() string {
	if e.Value == "" {
		return fmt.Sprintf("kvpolicy: %s must %s", e.Path, e.Want)
	}
	return fmt.Sprintf("kvpolicy: %s is %s, must %s", e.Path, e.Value, e.Want)
}

// Unwrap makes every FieldError an ErrInvalid.
func (e *FieldError) Unwrap() error { return ErrInvalid }

// fieldError builds a FieldError for a value of any kind.
func fieldError(path string, value any, want string) *FieldError {
	text := fmt.Sprint(value)
	if s, ok := value.(string); ok {
		text = fmt.Sprintf("%q", s)
	}
	return &FieldError{Path: path, Value: text, Want: want}
}
