package router

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"

	"github.com/kvpolicy/kvpolicy"
)

// Body is what a router reads of the JSON body of a request to
// /v1/chat/completions or /v1/completions. Everything else in it is the
// server's business.
type Body struct {
	Model string
	// User is the OpenAI field of that name; it names the session where no
	// header does.
	User string
	// Stream tells whether the answer comes as server-sent events.
	Stream bool
	// MaxTokens is max_completion_tokens, or max_tokens where that is absent; 0
	// where both are.
	MaxTokens int64
	// Chat tells a chat from a completion.
	Chat bool
	// Text is the prompt, rendered the same way for each turn of a conversation,
	// so that the next one begins with this one.
	Text []byte
	// Tokens is the prompt of a completion that is given as token ids; Text is
	// then empty.
	Tokens []uint32
	// Complete is false where the body was cut off, as Envoy does in the mode
	// BUFFERED_PARTIAL; what came before the cut is there.
	Complete bool

	// tokenize holds the members that decide on the tokens, for /tokenize.
	tokenize map[string]json.RawMessage
}

// ParseBody reads a body. With partial, one that ends too early is no error. The
// error is a *RequestError with the path of the member, "body" for the whole.
func ParseBody(data []byte, partial bool) (*Body, error) {
	b := &Body{tokenize: map[string]json.RawMessage{}}
	err := b.read(json.NewDecoder(bytes.NewReader(data)))
	cut := errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF)
	var field *kvpolicy.FieldError
	var syntax *json.SyntaxError
	switch {
	case err == nil:
		b.Complete = true
		return b, nil
	case errors.As(err, &field):
		return nil, &RequestError{field}
	case partial && cut:
		return b, nil
	}
	field = &kvpolicy.FieldError{Path: "body", Value: err.Error(), Want: "be a JSON object"}
	switch {
	case cut && len(bytes.TrimSpace(data)) == 0:
		field.Value = "empty"
	case cut:
		field.Value = "cut off"
	case errors.As(err, &syntax):
		field.Value = "not JSON (" + err.Error() + ")"
	}
	return nil, &RequestError{field}
}

// RequestError says to a client what is wrong with its request.
type RequestError struct{ field *kvpolicy.FieldError }

// Error leaves out who says so, which is no client's business.
func (e *RequestError) Error() string { return strings.TrimPrefix(e.field.Error(), "kvpolicy: ") }

// Unwrap is the *kvpolicy.FieldError.
func (e *RequestError) Unwrap() error { return e.field }

// read walks over the members of the outermost object, so that a body that is
// cut off gives what is before the cut.
func (b *Body) read(d *json.Decoder) error {
	if token, err := d.Token(); err != nil {
		return err
	} else if token != json.Delim('{') {
		return errors.New("another value")
	}
	for d.More() {
		token, err := d.Token()
		if err != nil {
			return err
		}
		key, _ := token.(string) // the keys of an object are strings
		if key == "messages" {
			b.Chat = true
			if err := b.readMessages(d); err != nil {
				return err
			}
			continue
		}
		var value json.RawMessage
		if err := d.Decode(&value); err != nil {
			return err
		}
		if err := b.member(key, value); err != nil {
			return err
		}
	}
	if _, err := d.Token(); err != nil { // the closing brace
		return err
	}
	if _, err := d.Token(); err != io.EOF {
		return errors.New("followed by something else")
	}
	return nil
}

func (b *Body) readMessages(d *json.Decoder) error {
	token, err := d.Token()
	if err != nil {
		return err
	}
	if token != json.Delim('[') {
		return &kvpolicy.FieldError{Path: "messages", Value: fmt.Sprint(token), Want: "be an array"}
	}
	var all []json.RawMessage
	for d.More() {
		var message json.RawMessage
		if err := d.Decode(&message); err != nil {
			return err
		}
		all = append(all, message)
		if err := b.render(message, len(all)-1); err != nil {
			return err
		}
	}
	if _, err := d.Token(); err != nil {
		return err
	}
	raw, err := json.Marshal(all)
	if err != nil {
		return err
	}
	b.tokenize["messages"] = raw
	return nil
}

// render appends a message to the text: its role and what it says, as chat
// templates do it, and what is not text as it stands.
func (b *Body) render(message json.RawMessage, at int) error {
	var m struct {
		Role      string          `json:"role"`
		Content   json.RawMessage `json:"content"`
		ToolCalls json.RawMessage `json:"tool_calls"`
	}
	if err := json.Unmarshal(message, &m); err != nil {
		return &kvpolicy.FieldError{Path: fmt.Sprintf("messages[%d]", at), Value: beginning(message), Want: "be a message"}
	}
	b.Text = append(append(b.Text, m.Role...), '\n')
	var text string
	var parts []json.RawMessage
	switch {
	case json.Unmarshal(m.Content, &text) == nil:
		b.Text = append(b.Text, text...)
	case json.Unmarshal(m.Content, &parts) == nil:
		for _, part := range parts {
			var p struct{ Type, Text string }
			if json.Unmarshal(part, &p) == nil && p.Type == "text" {
				b.Text = append(b.Text, p.Text...)
			} else {
				b.Text = append(b.Text, part...)
			}
		}
	default:
		b.Text = append(b.Text, m.Content...)
	}
	b.Text = append(append(b.Text, m.ToolCalls...), '\n')
	return nil
}

// beginning is as much of a value as an error shows.
func beginning(value json.RawMessage) string {
	return strings.ToValidUTF8(string(value[:min(len(value), 60)]), "\uFFFD")
}

// wholeNumber reads a whole number, which may be written as 16.0: vLLM takes
// that.
func wholeNumber(value json.RawMessage, to *int64) error {
	err := json.Unmarshal(value, to)
	var f float64
	if err == nil || json.Unmarshal(value, &f) != nil || f != math.Trunc(f) || math.Abs(f) > 1e15 {
		return err
	}
	*to = int64(f)
	return nil
}

// member takes in a member other than messages.
func (b *Body) member(key string, value json.RawMessage) error {
	null := bytes.Equal(value, []byte("null"))
	var err error
	switch key {
	case "model":
		b.tokenize[key] = value
		err = json.Unmarshal(value, &b.Model)
	case "user":
		err = json.Unmarshal(value, &b.User)
	case "stream":
		err = json.Unmarshal(value, &b.Stream)
	case "max_completion_tokens":
		err = wholeNumber(value, &b.MaxTokens)
	case "max_tokens":
		if b.MaxTokens == 0 {
			err = wholeNumber(value, &b.MaxTokens)
		}
	case "prompt":
		if null {
			return nil
		}
		b.tokenize[key] = value
		err = b.prompt(value)
	case "tools":
		// The templates put tools before the messages; clients do not.
		if !null {
			b.tokenize[key] = value
			b.Text = append(bytes.Clone(value), b.Text...)
		}
	case "add_special_tokens", "add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs":
		b.tokenize[key] = value
	}
	if err != nil || b.MaxTokens < 0 {
		want := map[string]string{"model": "be a string", "user": "be a string", "stream": "be true or false",
			"prompt": "be a string, token ids, or an array of strings"}[key]
		if want == "" {
			want = "be a whole number of at least 0"
		}
		return &kvpolicy.FieldError{Path: key, Value: beginning(value), Want: want}
	}
	return nil
}

// prompt takes in a prompt. Its first bytes tell of what kind it is, so that a
// long one is decoded once.
func (b *Body) prompt(value json.RawMessage) error {
	first := byte(0) // of the array's first element
	if inner := bytes.TrimLeft(value[1:], " \t\r\n"); len(inner) > 0 {
		first = inner[0]
	}
	switch {
	case value[0] == '"':
		var text string
		if err := json.Unmarshal(value, &text); err != nil {
			return err
		}
		b.Text = append(b.Text, text...)
	case value[0] == '[' && first == '"':
		var texts []string
		if err := json.Unmarshal(value, &texts); err != nil {
			return err
		}
		for _, t := range texts {
			b.Text = append(append(b.Text, t...), '\n')
		}
	case value[0] == '[' && first == '[':
		var several [][]uint32
		if err := json.Unmarshal(value, &several); err != nil {
			return err
		}
		b.Tokens = slices.Concat(several...)
	default:
		return json.Unmarshal(value, &b.Tokens)
	}
	return nil
}

// TokenizeRequest is the body of the request to vLLM's /tokenize that counts
// this prompt; nil where that cannot be asked: for token ids, several prompts
// at once, and a body that was cut off.
func (b *Body) TokenizeRequest() []byte {
	prompt := b.tokenize["prompt"]
	if !b.Complete || b.Tokens != nil || !b.Chat && (len(prompt) == 0 || prompt[0] != '"') {
		return nil
	}
	// Raw messages that were decoded encode again.
	data, _ := json.Marshal(b.tokenize)
	return data
}
