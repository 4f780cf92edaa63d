package trace

import (
	"bytes"
	"encoding/csv"
	"encoding/json"
	"slices"
	"strings"

	"github.com/kvpolicy/kvpolicy"
)

// Format is the layout of a trace file.
type Format int

//go:generate stringer -type=Format -linecomment

const (
	// Mooncake is the JSONL of the Mooncake traces: timestamp (ms since the
	// trace's start), input_length and output_length (tokens), hash_ids (one id
	// per block of 512 tokens of the prompt, the last one perhaps partly
	// filled, so ceil(input_length / 512) of them; equal ids are equal prefix
	// blocks). Source: github.com/kvcache-ai/Mooncake, FAST25-release/traces.
	Mooncake Format = 1 + iota // mooncake
	// Bailian is the JSONL of Alibaba's Qwen-Bailian traces: chat_id,
	// parent_chat_id (-1 for the first turn of a session), timestamp (s),
	// input_length, output_length, type, turn, hash_ids (blocks of 16 tokens,
	// ceil(input_length / 16) of them). Source:
	// github.com/alibaba-edu/qwen-bailian-usagetraces-anon, README.
	Bailian // bailian
	// Sessions is a CSV of whole agent sessions with the columns session, turn
	// (from 0), t_s (s since the session's start), in_tokens, out_tokens,
	// think_time_s (the client's gap before the request, may be empty),
	// blocks64 (whole blocks of 64 tokens in the prompt),
	// shared_prefix_blocks (how many leading blocks equal the request before in
	// the session; 0 for a first one), and perhaps api_time_s (the server's
	// time, may be empty). The rows of a session stand together.
	Sessions // sessions
	// Azure is the CSV of Azure's LLM inference traces of 2023 and 2024:
	// TIMESTAMP (date and time, optionally with an offset from UTC),
	// ContextTokens, GeneratedTokens. It says nothing about shared prefixes.
	// Source: github.com/Azure/AzurePublicDataset.
	Azure // azure
)

// formats lists every format, in the order in which an error names them.
func formats() []Format { return []Format{Mooncake, Bailian, Sessions, Azure} }

// BlockTokens is the number of tokens that one block id or block count of the
// format stands for: 512, 16 or 64, and 0 for Azure, which has none.
func (f Format) BlockTokens() int {
	switch f {
	case Mooncake:
		return 512
	case Bailian:
		return 16
	case Sessions:
		return 64
	}
	return 0
}

// MarshalText gives the format's word.
func (f Format) MarshalText() ([]byte, error) {
	if !slices.Contains(formats(), f) {
		return nil, &kvpolicy.FieldError{Path: "format", Value: f.String(), Want: wantFormat()}
	}
	return []byte(f.String()), nil
}

// UnmarshalText reads a format's word ("mooncake", "bailian", "sessions",
// "azure"); any other is a FieldError.
func (f *Format) UnmarshalText(text []byte) error {
	for _, known := range formats() {
		if known.String() == string(text) {
			*f = known
			return nil
		}
	}
	return &kvpolicy.FieldError{Path: "format", Value: string(text), Want: wantFormat()}
}

func wantFormat() string {
	words := make([]string, 0, len(formats()))
	for _, f := range formats() {
		words = append(words, f.String())
	}
	return "be one of " + strings.Join(words, ", ")
}

// detect tells the format from the first line that is not blank, 0 where it
// fits none.
func detect(line []byte) Format {
	line = bytes.TrimSpace(line)
	if bytes.HasPrefix(line, []byte("{")) {
		var keys map[string]json.RawMessage
		if json.Unmarshal(line, &keys) != nil {
			return 0
		}
		if _, ok := keys["chat_id"]; ok {
			return Bailian
		}
		if _, ok := keys["hash_ids"]; ok {
			return Mooncake
		}
		return 0
	}
	columns, err := csv.NewReader(bytes.NewReader(line)).Read()
	if err != nil {
		return 0
	}
	if slices.Contains(columns, "shared_prefix_blocks") {
		return Sessions
	}
	if slices.Contains(columns, "ContextTokens") {
		return Azure
	}
	return 0
}
