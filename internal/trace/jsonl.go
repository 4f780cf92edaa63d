package trace

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

// maxID bounds ids of blocks and chats: whole numbers that a float holds.
const maxID = 1 << 53

// jsonReader reads the JSONL formats.
type jsonReader struct {
	*Reader
	lines    *bufio.Scanner
	line     int
	previous float64
}

func newJSONReader(r *Reader, source io.Reader) *jsonReader {
	lines := bufio.NewScanner(source)
	lines.Buffer(make([]byte, 0, 64<<10), maxLine)
	return &jsonReader{Reader: r, lines: lines}
}

// jsonLine holds each field as it is written, so that an error can quote it
// and a missing field differs from a zero.
type jsonLine struct {
	Timestamp    json.RawMessage `json:"timestamp"`
	InputLength  json.RawMessage `json:"input_length"`
	OutputLength json.RawMessage `json:"output_length"`
	HashIDs      json.RawMessage `json:"hash_ids"`
	ChatID       json.RawMessage `json:"chat_id"`
	ParentChatID json.RawMessage `json:"parent_chat_id"`
	Turn         json.RawMessage `json:"turn"`
	Type         json.RawMessage `json:"type"`
}

func (r *jsonReader) next() (Record, error) {
	for r.lines.Scan() {
		r.line++
		if line := bytes.TrimSpace(r.lines.Bytes()); len(line) > 0 {
			return r.parse(line)
		}
	}
	if err := r.lines.Err(); err != nil {
		return Record{}, &Error{File: r.name, Line: r.line + 1, Err: err}
	}
	return Record{}, io.EOF
}

func (r *jsonReader) parse(line []byte) (Record, error) {
	var fields jsonLine
	if err := json.Unmarshal(line, &fields); err != nil {
		var syntax *json.SyntaxError
		if errors.As(err, &syntax) {
			field := fieldBefore(line, syntax.Offset)
			return Record{}, r.fail(r.line, field, "", "be JSON: "+syntax.Error())
		}
		return Record{}, r.fail(r.line, "line", clip(string(line)), "be a JSON object")
	}
	record := Record{Line: r.line, ThinkSeconds: -1, ServiceSeconds: -1}

	// The longest time in the file's own unit.
	latest, perSecond := maxSeconds, 1.0
	if r.format == Mooncake {
		latest, perSecond = 1000*maxSeconds, 1000
	}
	text, err := r.present("timestamp", fields.Timestamp)
	if err != nil {
		return Record{}, err
	}
	at, err := r.number(r.line, "timestamp", text, 0, latest)
	if err != nil {
		return Record{}, err
	}
	if at < r.previous {
		return Record{}, r.fail(r.line, "timestamp", text, fmt.Sprintf("not be before the line before (%v): sort the file by time", r.previous))
	}
	r.previous = at
	record.ArrivalSeconds = at / perSecond

	input, err := r.whole("input_length", fields.InputLength, 0, maxTokens)
	if err != nil {
		return Record{}, err
	}
	output, err := r.whole("output_length", fields.OutputLength, 0, maxTokens)
	if err != nil {
		return Record{}, err
	}
	record.InputTokens, record.OutputTokens = int(input), int(output)

	if record.BlockIDs, err = r.blockIDs(fields.HashIDs); err != nil {
		return Record{}, err
	}
	size := r.format.BlockTokens()
	if want := (record.InputTokens + size - 1) / size; len(record.BlockIDs) != want {
		return Record{}, r.fail(r.line, "hash_ids", fmt.Sprintf("%d ids", len(record.BlockIDs)),
			fmt.Sprintf("be %d ids, one for each %d tokens of input_length %d begun", want, size, record.InputTokens))
	}
	if r.format == Mooncake {
		return record, nil
	}

	if record.Chat, err = r.whole("chat_id", fields.ChatID, 0, maxID); err != nil {
		return Record{}, err
	}
	if record.ParentChat, err = r.whole("parent_chat_id", fields.ParentChatID, -1, maxID); err != nil {
		return Record{}, err
	}
	if record.ParentChat == record.Chat {
		return Record{}, r.fail(r.line, "parent_chat_id", fmt.Sprint(record.Chat), "be another chat than chat_id")
	}
	turn, err := r.whole("turn", fields.Turn, 0, maxTokens)
	if err != nil {
		return Record{}, err
	}
	record.Turn = int(turn)
	text, err = r.present("type", fields.Type)
	if err != nil {
		return Record{}, err
	}
	if json.Unmarshal(fields.Type, &record.Type) != nil {
		return Record{}, r.fail(r.line, "type", clip(text), "be a string")
	}
	return record, nil
}

// fieldBefore names the place of a syntax error: the last key before it, or
// the byte itself where there is none.
func fieldBefore(line []byte, offset int64) string {
	before := line[:min(offset, int64(len(line)))]
	if end := bytes.LastIndex(before, []byte(`":`)); end > 0 {
		if begin := bytes.LastIndexByte(before[:end], '"'); begin >= 0 {
			return clip(string(before[begin+1 : end]))
		}
	}
	return fmt.Sprintf("byte %d", offset)
}

// present gives a field as it is written, or an error where the line lacks it.
func (r *jsonReader) present(field string, raw json.RawMessage) (string, error) {
	if len(raw) == 0 || string(raw) == "null" {
		return "", r.fail(r.line, field, "", "be present")
	}
	return string(raw), nil
}

func (r *jsonReader) whole(field string, raw json.RawMessage, low, high float64) (int64, error) {
	text, err := r.present(field, raw)
	if err != nil {
		return 0, err
	}
	return r.integer(r.line, field, text, low, high)
}

// blockIDs reads the ids of a line's blocks.
func (r *jsonReader) blockIDs(raw json.RawMessage) ([]int64, error) {
	text, err := r.present("hash_ids", raw)
	if err != nil {
		return nil, err
	}
	var ids []int64
	if json.Unmarshal(raw, &ids) != nil {
		// Read again, slowly, to name the id that is wrong.
		var each []json.RawMessage
		if json.Unmarshal(raw, &each) != nil {
			return nil, r.fail(r.line, "hash_ids", clip(text), "be a list of whole numbers")
		}
		ids = make([]int64, len(each))
		for i := range each {
			if ids[i], err = r.whole(fmt.Sprintf("hash_ids[%d]", i), each[i], 0, maxID); err != nil {
				return nil, err
			}
		}
	}
	for i, id := range ids {
		if id < 0 || id > maxID {
			return nil, r.fail(r.line, fmt.Sprintf("hash_ids[%d]", i), fmt.Sprint(id), fmt.Sprintf("be a whole number from 0 to %d", int64(maxID)))
		}
	}
	return ids, nil
}
