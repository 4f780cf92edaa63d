package trace

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/kvpolicy/kvpolicy"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

const (
	mooncakeLine = `{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 2353, 2354]}`
	bailianLine  = `{"chat_id": 159, "parent_chat_id": 55, "timestamp": 61.114, "input_length": 33, "output_length": 132, "type": "text", "turn": 2, "hash_ids": [1089, 1090, 13148]}`
	sessionsHead = "session,turn,t_s,model,in_tokens,out_tokens,api_time_s,think_time_s,blocks64,shared_prefix_blocks,stop\r\n"
	azureHead    = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
)

// readAll gives every record up to the end or the first error.
func readAll(text string, format Format) ([]Record, error) {
	reader, err := NewReader("t", strings.NewReader(text), format)
	if err != nil {
		return nil, err
	}
	var records []Record
	for {
		record, err := reader.Next()
		if errors.Is(err, io.EOF) {
			return records, nil
		}
		if err != nil {
			return records, err
		}
		records = append(records, record)
	}
}

func TestReadEachFormat(t *testing.T) {
	for _, c := range []struct {
		name, text string
		format     Format
		want       []Record
	}{
		{"mooncake", "\n" + mooncakeLine + "\r\n", Mooncake, []Record{{
			Line: 2, ArrivalSeconds: 27.482, InputTokens: 6955, OutputTokens: 52, ThinkSeconds: -1, ServiceSeconds: -1,
			BlockIDs: []int64{46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 2353, 2354},
		}}},
		{"mooncake, nothing in it, whole floats", "\xef\xbb\xbf" + `{"timestamp": 1e3, "input_length": 0.0, "output_length": 3e0, "hash_ids": [], "extra": {}}`, Mooncake, []Record{{
			Line: 1, ArrivalSeconds: 1, OutputTokens: 3, BlockIDs: []int64{}, ThinkSeconds: -1, ServiceSeconds: -1,
		}}},
		{"bailian", bailianLine, Bailian, []Record{{
			Line: 1, ArrivalSeconds: 61.114, InputTokens: 33, OutputTokens: 132, BlockIDs: []int64{1089, 1090, 13148},
			Chat: 159, ParentChat: 55, Turn: 2, Type: "text", ThinkSeconds: -1, ServiceSeconds: -1,
		}}},
		{"sessions", sessionsHead + "a,0,0.5,m,640,7,,0.0,10,0,\r\na,2,9,m,700,0,1.5,,10,10,x\r\nb,0,3,m,63,1,2,4,0,0,\r\n", Sessions, []Record{
			{Line: 2, ArrivalSeconds: 0.5, InputTokens: 640, OutputTokens: 7, Session: "a", Blocks: 10, ThinkSeconds: 0, ServiceSeconds: -1},
			{Line: 3, ArrivalSeconds: 9, InputTokens: 700, Session: "a", Turn: 2, Blocks: 10, SharedBlocks: 10, ThinkSeconds: -1, ServiceSeconds: 1.5},
			{Line: 4, ArrivalSeconds: 3, InputTokens: 63, OutputTokens: 1, Session: "b", ThinkSeconds: 4, ServiceSeconds: 2},
		}},
		{"azure", azureHead + "2023-11-16 18:17:03.9799600,4808,10\n\n2023-11-16 18:17:04.0319600,110,27\n2024-05-10 00:00:00.009930+00:00,2,0\n", Azure, []Record{
			{Line: 2, InputTokens: 4808, OutputTokens: 10, ThinkSeconds: -1, ServiceSeconds: -1},
			{Line: 4, ArrivalSeconds: 0.052, InputTokens: 110, OutputTokens: 27, ThinkSeconds: -1, ServiceSeconds: -1},
			{Line: 5, ArrivalSeconds: 15_140_576.02997, InputTokens: 2, ThinkSeconds: -1, ServiceSeconds: -1},
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			for _, format := range []Format{0, c.format} {
				records, err := readAll(c.text, format)
				require.NoError(t, err)
				assert.Equal(t, c.want, records)
			}
			reader, err := NewReader("t", strings.NewReader(c.text), 0)
			require.NoError(t, err)
			assert.Equal(t, c.format, reader.Format())
		})
	}
}

func TestMalformedLines(t *testing.T) {
	mooncake := func(old, new string) string {
		return mooncakeLine + "\n" + strings.Replace(mooncakeLine, old, new, 1)
	}
	bailian := func(old, new string) string { return bailianLine + "\n" + strings.Replace(bailianLine, old, new, 1) }
	session := func(rows ...string) string { return sessionsHead + strings.Join(rows, "\n") }
	for _, c := range []struct {
		name   string
		format Format
		text   string
		want   string
	}{
		{"negative input", 0, mooncake("6955", "-6955"), `t:2: input_length is -6955, must be a whole number from 0 to 100000000`},
		{"fraction", 0, mooncake("6955", "6955.5"), `t:2: input_length is 6955.5, must be a whole number`},
		{"quoted", 0, mooncake("6955", `"6955"`), `t:2: input_length is "6955", must be a whole number`},
		{"too long", 0, mooncake("6955", "1e300"), `t:2: input_length is 1e300, must be a whole number`},
		{"negative output", 0, mooncake(": 52", ": -1"), `t:2: output_length is -1, must`},
		{"missing", 0, mooncake(`"output_length": 52, `, ""), `t:2: output_length must be present`},
		{"null", 0, mooncake(`52`, "null"), `t:2: output_length must be present`},
		{"negative time", 0, mooncake("27482", "-1"), `t:2: timestamp is -1, must be a number from 0 to 1e+15`},
		{"earlier", 0, mooncake("27482", "27481"), `t:2: timestamp is 27481, must not be before the line before (27482)`},
		{"NaN", 0, mooncake("27482", "NaN"), `t:2: timestamp must be JSON: invalid character 'N' looking for beginning of value`},
		{"cut off", 0, mooncake("]}", ""), `must be JSON: unexpected end of JSON input`},
		{"two on a line", 0, mooncake("]}", "]}{}"), `must be JSON: invalid character '{' after top-level value`},
		{"a list", 0, mooncakeLine + "\n[]", `t:2: line is [], must be a JSON object`},
		{"a block too few", 0, mooncake(", 2354", ""), `t:2: hash_ids is 13 ids, must be 14 ids`},
		{"negative id", 0, mooncake("2354", "-2354"), `t:2: hash_ids[13] is -2354, must be`},
		{"fractional id", 0, mooncake(", 48", ", 48.5"), `t:2: hash_ids[2] is 48.5, must be`},
		{"ids no list", 0, mooncake("[46", `"[46`), `t:2: hash_ids must be JSON`},
		{"ids an object", 0, `{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": {}}`, `t:1: hash_ids is {}, must be a list`},
		{"own parent", 0, bailian("55", "159"), `t:2: parent_chat_id is 159, must be another`},
		{"parent under -1", 0, bailian("55", "-2"), `t:2: parent_chat_id is -2, must`},
		{"no parent", 0, bailian(`"parent_chat_id": 55, `, ""), `t:2: parent_chat_id must be present`},
		{"type", 0, bailian(`"text"`, "7"), `t:2: type is 7, must be a string`},
		{"turn", 0, bailian(`"turn": 2`, `"turn": 1.5`), `t:2: turn is 1.5, must be a whole number`},
		{"mooncake as bailian", Bailian, mooncakeLine, `t:1: hash_ids is 14 ids, must be 435 ids`},
		{"json as csv", Sessions, mooncakeLine, `t:1: column 2 must be CSV`},
		{"csv as json", Mooncake, azureHead, `t:1: byte 1 must be JSON`},
		{"unknown", 0, "\n\nfoo,bar\n", `t:3: format must be one of mooncake, bailian, sessions, azure: the first line fits none`},
		{"unknown object", 0, `{"a": 1}`, `t:1: format must be one of`},
		{"no format", 9, mooncakeLine, `t: format is Format(9), must be one of`},
		{"empty", 0, "", `t: trace must hold at least one line, but is empty`},
		{"blank", 0, " \n\n", `t: trace must hold at least one line, but is empty`},
		{"empty csv", Azure, "\n", `t: trace must hold at least one line, but is empty`},
		{"column missing", 0, "session,turn,shared_prefix_blocks\n", `t:1: t_s must be a column of the header`},
		{"column twice", 0, "TIMESTAMP,ContextTokens,GeneratedTokens,TIMESTAMP\n", `t:1: TIMESTAMP must stand once`},
		{"short row", 0, azureHead + "2023-11-16 18:17:03,1\n", `t:2: line is 2 fields, must have 3 fields`},
		{"quote", 0, azureHead + "2023-11-16 18:17:03,1\",2\n", `t:2: column 22 must be CSV`},
		{"open quote", 0, azureHead + "2023-11-16 18:17:03,1,\"2\n2023-11-16 18:17:04,1,2\n", `t:2: row must be CSV`},
		{"no time", 0, azureHead + "\n16.11.2023,1,2\n", `t:3: TIMESTAMP is 16.11.2023, must be a date and time`},
		{"earlier row", 0, azureHead + "2023-11-16 18:17:03,1,2\n2023-11-16 18:17:02,1,2\n", `t:3: TIMESTAMP is 2023-11-16 18:17:02, must not be before`},
		{"empty field", 0, azureHead + "2023-11-16 18:17:03,,2\n", `t:2: ContextTokens must be a whole number from 0 to 100000000, but is empty`},
		{"NaN tokens", 0, azureHead + "2023-11-16 18:17:03,NaN,2\n", `t:2: ContextTokens is NaN, must`},
		{"negative tokens", 0, azureHead + "2023-11-16 18:17:03,1,-2\n", `t:2: GeneratedTokens is -2, must`},
		{"line in a field", 0, azureHead + "2023-11-16 18:17:03,1,\"2\n3\"\n", `t:2: GeneratedTokens is "2\n3", must`},
		{"no session", 0, session(",0,0,m,64,1,,,1,0,"), `t:2: session must be present`},
		{"begins late", 0, session("a,1,0,m,64,1,,,1,0,"), `t:2: turn is 1, must be 0 where a session begins`},
		{"apart", 0, session("a,0,0,m,64,1,,,1,0,", "b,0,0,m,64,1,,,1,0,", "a,1,0,m,64,1,,,1,1,"), `t:4: turn is 1, must be 0 where`},
		{"turn again", 0, session("a,0,0,m,64,1,,,1,0,", "a,0,0,m,64,1,,,1,0,"), `t:3: turn is 0, must be above`},
		{"time back", 0, session("a,0,5,m,64,1,,,1,0,", "a,1,4,m,64,1,,,1,0,"), `t:3: t_s is 4, must not be before`},
		{"time infinite", 0, session("a,0,Inf,m,64,1,,,1,0,"), `t:2: t_s is Inf, must be a number`},
		{"think NaN", 0, session("a,0,0,m,64,1,,NaN,1,0,"), `t:2: think_time_s is NaN, must`},
		{"api negative", 0, session("a,0,0,m,64,1,-1,,1,0,"), `t:2: api_time_s is -1, must`},
		{"blocks", 0, session("a,0,0,m,127,1,,,2,0,"), `t:2: blocks64 is 2, must be 1, the whole blocks`},
		{"first shares", 0, session("a,0,0,m,64,1,,,1,1,"), `t:2: shared_prefix_blocks is 1, must be at most 0`},
		{"shares too much", 0, session("a,0,0,m,64,1,,,1,0,", "a,1,0,m,640,1,,,10,2,"), `t:3: shared_prefix_blocks is 2, must be at most 1`},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := readAll(c.text, c.format)
			assert.ErrorContains(t, err, c.want)
			assert.ErrorIs(t, err, kvpolicy.ErrInvalid)
			var at *Error
			require.ErrorAs(t, err, &at)
			assert.Equal(t, "t", at.File)
		})
	}
}

func TestErrorsAreFinal(t *testing.T) {
	reader, err := NewReader("t", strings.NewReader("{}\n"+mooncakeLine), Mooncake)
	require.NoError(t, err)
	_, first := reader.Next()
	require.Error(t, first)
	_, second := reader.Next()
	assert.Same(t, first, second)
}

func TestFailureToReadIsPassedOn(t *testing.T) {
	broken := errors.New("disk gone")
	for _, text := range []string{mooncakeLine + "\n", azureHead + "2023-11-16 18:17:03,1,2\n"} {
		for _, format := range []Format{0, Mooncake, Azure} {
			reader, err := NewReader("t", io.MultiReader(strings.NewReader(text), iotest.ErrReader(broken)), format)
			for err == nil {
				_, err = reader.Next()
			}
			var at *Error
			require.ErrorAs(t, err, &at)
			if format == 0 || (format == Azure) == strings.HasPrefix(text, "T") {
				assert.ErrorIs(t, err, broken)
			}
		}
	}
	_, err := NewReader("t", iotest.ErrReader(broken), 0)
	assert.ErrorIs(t, err, broken)
	_, err = NewReader("t", iotest.ErrReader(broken), Azure)
	assert.ErrorIs(t, err, broken)
}

func TestALineIsBounded(t *testing.T) {
	_, err := readAll(`{"hash_ids": [`+strings.Repeat(" ", maxLine)+"\n", 0)
	assert.ErrorContains(t, err, "token too long")
	_, err = readAll(mooncakeLine+"\n"+strings.Repeat(" ", maxLine+1), Mooncake)
	assert.ErrorContains(t, err, "t:2: bufio.Scanner: token too long")
}

// A reader must not hold what it has read: here an endless file is read for a
// while, in whose every line only the time differs.
func TestMemoryIsFlat(t *testing.T) {
	lines := 0
	reader, err := NewReader("t", readerFunc(func(p []byte) (int, error) {
		lines++
		return copy(p, strings.Replace(mooncakeLine, "27482", fmt.Sprint(lines), 1)+"\n"), nil
	}), 0)
	require.NoError(t, err)
	read := func(n int) func() {
		return func() {
			for range n {
				_, err := reader.Next()
				require.NoError(t, err)
			}
		}
	}
	read(1000)()
	allocated := testing.AllocsPerRun(5, read(1000))
	later := testing.AllocsPerRun(5, read(1000))
	assert.InDelta(t, allocated, later, 0.02*allocated)
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }

func TestFormatWords(t *testing.T) {
	for _, format := range formats() {
		text, err := format.MarshalText()
		require.NoError(t, err)
		var back Format
		require.NoError(t, back.UnmarshalText(text))
		assert.Equal(t, format, back)
	}
	_, err := Format(0).MarshalText()
	assert.ErrorIs(t, err, kvpolicy.ErrInvalid)
	assert.ErrorContains(t, new(Format).UnmarshalText([]byte("csv")), `format is csv, must be one of mooncake, bailian, sessions, azure`)
}

// What is written as a line reads back as it was, whatever the numbers are.
func TestReadsWhatWasWritten(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 20).Draw(t, "n")
		var mooncake, sessions strings.Builder
		sessions.WriteString(sessionsHead)
		var wantMooncake, wantSessions []Record
		at, before := 0, 0
		for i := range n {
			at += rapid.SampledFrom([]int{0, 0, 1, 999, 1 << 26}).Draw(t, "later")
			input := rapid.SampledFrom([]int{0, 1, 63, 64, 511, 512, 513, 5000}).Draw(t, "input")
			output := rapid.SampledFrom([]int{0, 1, 1e8}).Draw(t, "output")
			ids := make([]int64, (input+511)/512)
			texts := make([]string, len(ids))
			for k := range ids {
				ids[k] = rapid.SampledFrom([]int64{0, 7, 1 << 53}).Draw(t, "id")
				texts[k] = fmt.Sprint(ids[k])
			}
			fmt.Fprintf(&mooncake, `{"hash_ids":[%s],"output_length":%d,"timestamp":%d,"input_length":%d}`+"\n", strings.Join(texts, ","), output, at, input)
			wantMooncake = append(wantMooncake, Record{Line: i + 1, ArrivalSeconds: float64(at) / 1000, InputTokens: input, OutputTokens: output, BlockIDs: ids, ThinkSeconds: -1, ServiceSeconds: -1})

			shared := 0
			if i > 0 {
				shared = rapid.IntRange(0, min(before, input/64)).Draw(t, "shared")
			}
			before = input / 64
			fmt.Fprintf(&sessions, "s,%d,%d,m,%d,%d,%d,,%d,%d,\n", i, at, input, output, at, before, shared)
			wantSessions = append(wantSessions, Record{Line: i + 2, ArrivalSeconds: float64(at), InputTokens: input, OutputTokens: output, Session: "s", Turn: i, Blocks: before, SharedBlocks: shared, ThinkSeconds: -1, ServiceSeconds: float64(at)})
		}
		got, err := readAll(mooncake.String(), 0)
		require.NoError(t, err)
		assert.Equal(t, wantMooncake, got)
		got, err = readAll(sessions.String(), 0)
		require.NoError(t, err)
		assert.Equal(t, wantSessions, got)
	})
}

func FuzzReader(f *testing.F) {
	for _, text := range []string{mooncakeLine, bailianLine, sessionsHead + "a,0,0,m,64,1,,,1,0,", azureHead + "2023-11-16 18:17:03.97,1,2"} {
		f.Add(text+"\n"+text, uint8(0))
		f.Add(text, uint8(1))
	}
	f.Fuzz(func(t *testing.T, text string, format uint8) {
		records, err := readAll(text, Format(format%6))
		if err != nil {
			var at *Error
			require.ErrorAs(t, err, &at)
			assert.GreaterOrEqual(t, at.Line, 0)
			assert.LessOrEqual(t, at.Line, strings.Count(text, "\n")+1)
			assert.NotContains(t, err.Error(), "\n")
		}
		for _, r := range records {
			assert.True(t, r.ArrivalSeconds >= 0 && r.ArrivalSeconds <= 1e12)
			assert.True(t, r.InputTokens >= 0 && r.InputTokens <= maxTokens && r.OutputTokens >= 0 && r.OutputTokens <= maxTokens)
			assert.True(t, r.SharedBlocks >= 0 && r.SharedBlocks <= r.Blocks)
			assert.True(t, r.ThinkSeconds >= -1 && r.ServiceSeconds >= -1)
		}
	})
}

// open gives one of the shared files, or skips the test.
func open(t *testing.T, name string) io.Reader {
	file, err := os.Open("../../../shared/data/" + name)
	if err != nil {
		t.Skip("the shared data is not here: ", err)
	}
	t.Cleanup(func() { assert.NoError(t, file.Close()) })
	return file
}

func TestRealFiles(t *testing.T) {
	for name, want := range map[string]struct {
		format         Format
		records, input int
	}{
		"mooncake/conversation_first6000.jsonl": {Mooncake, 6000, 76643649},
		"agentic_coding/requests.csv":           {Sessions, 11598, 1453962456},
	} {
		t.Run(name, func(t *testing.T) {
			reader, err := NewReader(name, open(t, name), 0)
			require.NoError(t, err)
			assert.Equal(t, want.format, reader.Format())
			records, input := 0, 0
			for {
				record, err := reader.Next()
				if errors.Is(err, io.EOF) {
					break
				}
				require.NoError(t, err)
				records++
				input += record.InputTokens
			}
			assert.Equal(t, want.records, records)
			assert.Equal(t, want.input, input)
		})
	}
}
