package workload

// Agentic describes the generated agentic workload.
type Agentic struct {
	// Sessions is the number of sessions; 0 = 274, the published window's.
	Sessions int
	// WindowSeconds is the time over which sessions start, a Poisson process at
	// Sessions / WindowSeconds; 0 = 600, the published window's.
	WindowSeconds float64
	// MeanInputTokens is the mean prompt; every length but the answers' scales
	// with it. 0 = 43,904, the published window's (53.3 M tokens over 1,214
	// requests); 33,600 is the published full trace's.
	MeanInputTokens float64
	// BlockTokens is the size of a block; 0 = 64.
	BlockTokens int
}

// NewAgentic makes the generated workload. A field out of range is a
// FieldError.
func NewAgentic(a Agentic) (*Workload, error) {
	return nil, nil
}
