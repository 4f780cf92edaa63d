package router

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/kvpolicy/kvpolicy"
	"github.com/kvpolicy/kvpolicy/track"
)

func TestParseBody(t *testing.T) {
	for _, test := range []struct {
		name, body string
		want       Body
	}{
		{"a chat", `{"model":"m","user":"u","stream":true,"max_tokens":7,"messages":[{"role":"system","content":"be kind"},{"role":"user","content":"hi"}]}`,
			Body{Model: "m", User: "u", Stream: true, MaxTokens: 7, Chat: true, Text: []byte("system\nbe kind\nuser\nhi\n")}},
		{"parts", `{"messages":[{"role":"user","content":[{"type":"text","text":"see"},{"type":"image_url","image_url":{"url":"x"}}]}]}`,
			Body{Chat: true, Text: []byte("user\nsee" + `{"type":"image_url","image_url":{"url":"x"}}` + "\n")}},
		{"tools come first, wherever they stand", `{"messages":[{"role":"assistant","content":null,"tool_calls":[1]}],"tools":[{"type":"function"}]}`,
			Body{Chat: true, Text: []byte(`[{"type":"function"}]` + "assistant\n[1]\n")}},
		{"a completion", `{"prompt":"hi","max_tokens":null}`, Body{Text: []byte("hi")}},
		{"token ids", `{"prompt":[5,6]}`, Body{Tokens: []uint32{5, 6}}},
		{"several lists of token ids", `{"prompt":[[5],[6,7]]}`, Body{Tokens: []uint32{5, 6, 7}}},
		{"several prompts", `{"prompt":["a","b"]}`, Body{Text: []byte("a\nb\n")}},
		{"the newer limit counts", `{"max_tokens":5,"max_completion_tokens":3,"prompt":"x"}`, Body{MaxTokens: 3, Text: []byte("x")}},
		{"wherever it stands", `{"max_completion_tokens":3,"max_tokens":5,"prompt":"x"}`, Body{MaxTokens: 3, Text: []byte("x")}},
		{"nothing", `{}`, Body{}},
		{"others are the server's business", `{"temperature":"hot","logit_bias":[[[]]],"prompt":"x"}`, Body{Text: []byte("x")}},
	} {
		t.Run(test.name, func(t *testing.T) {
			b, err := ParseBody([]byte(test.body), false)
			require.NoError(t, err)
			require.True(t, b.Complete)
			b.Complete, b.tokenize = false, nil
			require.Equal(t, test.want, *b)
		})
	}
}

func TestPromptsOfEveryKind(t *testing.T) {
	for text, want := range map[string]Body{
		`"x"`: {Text: []byte("x")}, `""`: {}, `[]`: {Tokens: []uint32{}}, `[ ]`: {Tokens: []uint32{}}, "[\n\t\"a\" ,\"b\"]": {Text: []byte("a\nb\n")},
		`[ 4294967295]`: {Tokens: []uint32{1<<32 - 1}}, `[ [1], []]`: {Tokens: []uint32{1}}, `null`: {},
	} {
		b, err := ParseBody([]byte(`{"prompt":`+text+`}`), false)
		require.NoError(t, err, text)
		require.Equal(t, string(want.Text), string(b.Text), text)
		require.Equal(t, want.Tokens, b.Tokens, text)
	}
	for _, text := range []string{`7`, `true`, `{}`, `["a",1]`, `[1,"a"]`, `[[1],2]`, `[["a"]]`, `[{}]`, `[-1]`, `[1.5]`, `[4294967296]`} {
		_, err := ParseBody([]byte(`{"prompt":`+text+`}`), false)
		require.ErrorContains(t, err, "prompt", text)
	}
}

func TestABodyThatIsCutOffGivesItsBeginning(t *testing.T) {
	whole := `{"model":"m","messages":[{"role":"user","content":"one"},{"role":"user","content":"two"}],"stream":true}`
	full, err := ParseBody([]byte(whole), false)
	require.NoError(t, err)
	longest := 0
	for cut := range len(whole) {
		_, err := ParseBody([]byte(whole[:cut]), false)
		require.Error(t, err)
		b, err := ParseBody([]byte(whole[:cut]), true)
		require.NoError(t, err, whole[:cut])
		require.False(t, b.Complete)
		require.Nil(t, b.TokenizeRequest())
		require.True(t, bytes.HasPrefix(full.Text, b.Text))
		require.GreaterOrEqual(t, len(b.Text), longest, "more of the body never gives less")
		longest = len(b.Text)
	}
	require.Equal(t, len(full.Text), longest)
	_, err = ParseBody([]byte(`{"messages":7`), true)
	require.Error(t, err, "what is wrong stays wrong")
}

// The prompt of a turn begins with that of the turn before: what the prefix
// index lives by.
func TestTurnsBeginWithTheTurnBefore(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var messages []map[string]string
		var before []byte
		for range rapid.IntRange(1, 6).Draw(t, "turns") {
			messages = append(messages, map[string]string{"role": rapid.SampledFrom([]string{"user", "assistant", "tool"}).Draw(t, "role"), "content": rapid.String().Draw(t, "content")})
			data, err := json.Marshal(map[string]any{"messages": messages, "tools": []int{1}, "stream": true})
			require.NoError(t, err)
			b, err := ParseBody(data, false)
			require.NoError(t, err)
			require.True(t, bytes.HasPrefix(b.Text, before))
			before = b.Text
		}
	})
}

func TestTokenizeRequest(t *testing.T) {
	for _, test := range []struct{ body, want string }{
		{`{"model":"m","prompt":"hi","max_tokens":3,"add_special_tokens":false}`, `{"add_special_tokens":false,"model":"m","prompt":"hi"}`},
		{`{"messages":[{"role":"user","content":"hi"}],"tools":[{}],"chat_template_kwargs":{"a":1},"stream":true}`,
			`{"chat_template_kwargs":{"a":1},"messages":[{"role":"user","content":"hi"}],"tools":[{}]}`},
		{`{"prompt":["a","b"]}`, ``}, {`{"prompt":[1]}`, ``}, {`{}`, ``},
	} {
		b, err := ParseBody([]byte(test.body), false)
		require.NoError(t, err)
		require.Equal(t, test.want, string(b.TokenizeRequest()), test.body)
	}
}

func FuzzParseBody(f *testing.F) {
	f.Add([]byte(`{"model":"m","messages":[{"role":"user","content":"hi"}],"max_tokens":1}`), true)
	f.Add([]byte(`{"prompt":[1,2`), true)
	f.Add([]byte(`{"prompt":["x"]} `), false)
	f.Fuzz(func(t *testing.T, data []byte, partial bool) {
		b, err := ParseBody(data, partial)
		if err != nil {
			require.Nil(t, b)
			require.ErrorIs(t, err, kvpolicy.ErrInvalid)
			return
		}
		require.GreaterOrEqual(t, b.MaxTokens, int64(0))
		if request := b.TokenizeRequest(); request != nil {
			require.True(t, json.Valid(request))
		}
		if b.Complete {
			require.True(t, json.Valid(data))
		}
	})
}

func TestParseMetrics(t *testing.T) {
	page := `# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="m"} 1.5e+06
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_cpu_blocks="None",num_gpu_blocks="1000"} 1.0
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="1",num_cpu_blocks="None",num_gpu_blocks="1000"} 1.0
# TYPE process_start_time_seconds gauge
process_start_time_seconds 1.7e+09
# TYPE vllm:e2e_request_latency_seconds histogram
vllm:e2e_request_latency_seconds_bucket{le="+Inf"} 1
vllm:e2e_request_latency_seconds_count 1
vllm:e2e_request_latency_seconds_sum 1
`
	m, err := ParseMetrics(strings.NewReader(page))
	require.NoError(t, err)
	require.EqualValues(t, 4, *m.Running)
	require.EqualValues(t, 2, *m.Waiting)
	require.EqualValues(t, 0.5, *m.KVUsage)
	require.EqualValues(t, 1.5e6, *m.Counter)
	require.EqualValues(t, 16, m.BlockTokens)
	require.EqualValues(t, 2000, m.Blocks)
	require.Equal(t, time.Unix(1_700_000_000, 0), m.StartedAt)

	m, err = ParseMetrics(strings.NewReader("vllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"None\"} 1\nvllm:gpu_cache_usage_perc 0.5\n"))
	require.NoError(t, err)
	require.Nil(t, m.Running, "what is not there is unknown")
	require.Nil(t, m.Counter)
	require.Zero(t, m.Blocks)
	require.EqualValues(t, 0.5, *m.KVUsage, "the older name")
	require.True(t, m.StartedAt.IsZero())

	_, err = ParseMetrics(strings.NewReader("<html>"))
	require.Error(t, err)
}

func FuzzParseMetrics(f *testing.F) {
	f.Add("vllm:num_requests_running 1\nprocess_start_time_seconds NaN\n")
	f.Add("vllm:cache_config_info{block_size=\"-1\"} 1\n")
	f.Fuzz(func(t *testing.T, page string) {
		m, err := ParseMetrics(strings.NewReader(page))
		if err != nil {
			return
		}
		// Whatever it is, the tracker takes it or says what is wrong.
		tracker, err := track.New(track.DefaultConfig())
		require.NoError(t, err)
		require.NoError(t, tracker.Join("a", track.InstanceInfo{}, time.Now()))
		if err := tracker.Observe("a", m, time.Now()); err != nil {
			require.ErrorIs(t, err, kvpolicy.ErrInvalid)
		}
	})
}

// A response reads the same however it is cut into pieces.
func TestResponsesInPieces(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var text strings.Builder
		tokens := rapid.IntRange(0, 20).Draw(t, "tokens")
		newline := rapid.SampledFrom([]string{"\n", "\r\n"}).Draw(t, "newline")
		if rapid.Bool().Draw(t, "ping") {
			text.WriteString(": ping" + newline + newline)
		}
		fmt.Fprintf(&text, `data: {"choices":[{"delta":{"role":"assistant","content":""}}]}%s%s`, newline, newline)
		for range tokens {
			content, err := json.Marshal(rapid.StringN(1, 9, -1).Draw(t, "content"))
			require.NoError(t, err)
			fmt.Fprintf(&text, `data: {"choices":[{"delta":{"content":%s}}]}%s%s`, content, newline, newline)
		}
		usage := rapid.Bool().Draw(t, "usage")
		if usage {
			fmt.Fprintf(&text, `data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":%d,"prompt_tokens_details":{"cached_tokens":4}}}%s%s`, tokens+1, newline, newline)
		}
		text.WriteString("data: [DONE]" + newline + newline)
		r := NewResponseReader("Text/Event-Stream; charset=utf-8")
		for left := text.String(); len(left) > 0; {
			n := rapid.IntRange(1, len(left)).Draw(t, "piece")
			_, _ = r.Write([]byte(left[:n]))
			left = left[n:]
		}
		r.Finish()
		require.True(t, r.Begun)
		require.True(t, r.Done)
		require.False(t, r.Failed)
		if usage {
			require.EqualValues(t, tokens+1, r.Tokens)
			require.EqualValues(t, 4, r.Usage.Details.CachedTokens)
		} else {
			require.EqualValues(t, tokens, r.Tokens)
			require.Nil(t, r.Usage)
		}
	})
}

func TestResponsesThatAreNotAsTheyShouldBe(t *testing.T) {
	r := NewResponseReader("text/event-stream")
	_, _ = r.Write([]byte("data: {\"error\":{\"message\":\"x\"}}\n\ndata: nonsense\n\nevent: x\ndata: {\"choices\":[{\"text\":\"a\"}]}"))
	require.False(t, r.Begun)
	require.True(t, r.Failed)
	r.Finish()
	require.True(t, r.Begun, "the last line counts without its end")

	r = NewResponseReader("text/event-stream")
	_, _ = r.Write([]byte(`data: {"choices":[{"delta":{"content":"","tool_calls":null}},{"delta":{"tool_calls":[]}}],"error":null}` + "\n"))
	require.False(t, r.Failed, "null is no error")
	require.Zero(t, r.Tokens, "nor a tool call")
	_, _ = r.Write([]byte(`data: {"choices":[{"delta":{"reasoning":"hm"}}]}` + "\n" + `data: {"choices":[{"delta":{"tool_calls":[{}]}}]}` + "\n"))
	require.EqualValues(t, 2, r.Tokens)

	r = NewResponseReader("text/event-stream")
	for range 40 { // a line without end is not kept
		_, _ = r.Write(bytes.Repeat([]byte("x"), 100_000))
		require.LessOrEqual(t, cap(r.pending), 2*maxWatched)
	}
	_, _ = r.Write([]byte("\ndata: {\"choices\":[{\"text\":\"a\"}]}\n"))
	require.EqualValues(t, 1, r.Tokens, "the next one is read")

	r = NewResponseReader("application/json")
	_, _ = r.Write([]byte(`{"choices":[{"message":{"content":"hi"}}],"usage":{"prompt_tokens":3,"completion_tokens":2}}`))
	require.False(t, r.Begun)
	r.Finish()
	require.EqualValues(t, 2, r.Tokens)
	r = NewResponseReader("application/json")
	_, _ = r.Write([]byte(`{"usage":{"prompt_tokens":-3}}`))
	r.Finish()
	require.Nil(t, r.Usage)
}

func TestWholeNumbersMayHaveAPoint(t *testing.T) {
	for text, want := range map[string]int64{"16": 16, "16.0": 16, "1.6e1": 16, "null": 0, "999999999999999999": 999999999999999999} {
		b, err := ParseBody([]byte(`{"max_tokens":`+text+`}`), false)
		require.NoError(t, err, text)
		require.Equal(t, want, b.MaxTokens, text)
	}
	for _, text := range []string{"1.5", "-2.0", "1e300", "1e400", `"5"`, "true"} {
		_, err := ParseBody([]byte(`{"max_tokens":`+text+`}`), false)
		require.ErrorContains(t, err, "max_tokens", text)
	}
}

func TestParseInstances(t *testing.T) {
	all, err := ParseInstances([]byte("instances:\n- url: http://10.0.0.1:8000\n- {id: b, url: 'https://host', kind: spot, draining: true, prefill_rate: 5, kv_capacity_tokens: 7}\n"))
	require.NoError(t, err)
	require.Len(t, all, 2)
	require.Equal(t, "10.0.0.1:8000", all[0].ID)
	require.Equal(t, "host:443", all[1].Address())
	require.True(t, all[1].Draining)
	require.Equal(t, "spot", all[1].Info.Kind)
	all, err = ParseInstances([]byte(`{"instances":[{"url":"http://[::1]"}]}`))
	require.NoError(t, err)
	require.Equal(t, "[::1]:80", all[0].Address())
	all, err = ParseInstances([]byte("instances: []"))
	require.NoError(t, err)
	require.Empty(t, all)
	for text, want := range map[string]string{
		"instances: [{url: 'ftp://x'}]":                             "instances[0]: kvpolicy: url",
		"instances: [{url: 'http://x:0'}]":                          "port",
		"instances: [{url: 'http://x', colour: red}]":               "colour",
		"instances: [{url: 'http://x'}, {url: 'http://x:80'}]":      "instances[1]: kvpolicy: id",
		"instances: [{id: a, url: 'http://x'}, {url: http://x:80}]": "instances[1]: kvpolicy: url",
		"instances: 7":                     "line 1",
		"":                                 "instances is missing",
		"instances:\n":                     "instances is missing",
		"instances: [null]":                "instances[0]",
		"instances:\n- url: http://x\n-\n": "instances[1]",
		"instances: [{url: http://x, kind: &a null}, *a]": "instances[1]",
		"instances: []\n---\ninstances: []\n":             "one YAML document",
		"instances: []\n---\n":                            "one YAML document",
		"instances: []\n---\n}":                           "one YAML document",
		"other: []":                                       "other",
	} {
		_, err := ParseInstances([]byte(text))
		require.ErrorContains(t, err, want, text)
	}
}

func TestEstimator(t *testing.T) {
	e := NewEstimator()
	require.EqualValues(t, 25, e.Prompt("m", 100), "4 bytes a token, before anything is known")
	require.EqualValues(t, 0, e.Prompt("m", 0))
	require.EqualValues(t, 0, e.Completion("m", 0), "unknown")
	require.EqualValues(t, 9, e.Completion("m", 9))
	for range 300 {
		e.LearnPrompt("m", 2000, 1000)
		e.LearnCompletion("m", 50)
	}
	require.InDelta(t, 50, e.Prompt("m", 100), 1)
	require.EqualValues(t, 50, e.Completion("m", 0))
	require.EqualValues(t, 50, e.Completion("m", 1000))
	require.EqualValues(t, 10, e.Completion("m", 10))
	require.EqualValues(t, 25, e.Prompt("other", 100), "models are learned apart")
	e.LearnPrompt("m", 0, 5)
	e.LearnPrompt("m", 5, -1)
	e.LearnCompletion("m", -1)
	require.InDelta(t, 50, e.Prompt("m", 100), 1, "nonsense teaches nothing")
}
