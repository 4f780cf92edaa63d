// Package workload says what a replay sends: sessions of turns, each turn a
// request with its time, its lengths and its prompt as a chain of block hashes.
//
//	load, err := workload.NewAgentic(workload.Agentic{})          // generated
//	load, err := workload.NewTrace(name, open, 0)                 // a file
//	feed, err := load.Start(workload.Options{Pacing: workload.ClosedLoop, Seed: 3})
//	for {
//		at, ok := feed.Peek()  // when the next request that is known arrives
//		...
//		request, err := feed.Next()  // io.EOF where none is known
//		...
//		err = feed.Finish(request.ID, end)
//	}
//
// A Workload is what is sent, without a random state: the same Options give
// the same requests, bit for bit, so several policies can be compared on equal
// arrivals by starting one Feed each with the same Seed. A Workload may be used
// by several goroutines at once, a Feed by one.
//
// # Prompts
//
// Request.Blocks has one hash for every whole block of Workload.BlockTokens
// tokens. The hashes are chained: two requests with the same hash at position
// i share all tokens up to the end of block i, and an equal block behind a
// different prefix has a different hash. A prompt's last, partly filled block
// has no hash of its own, because KV caches share whole blocks only.
// Where it is known how the session goes on, the chain runs past the prompt
// over the blocks that the generated tokens will fill; the next turn finds them.
//
// # Time
//
// The trace time of a request is when the source says that it was sent, before
// Options change anything. Truncation goes by trace time, so that every pacing
// and every policy gets the same requests.
//
// # Memory
//
// A Feed holds the sessions that are open, not those to come, and builds a
// prompt when its request is due. The generator, Mooncake and Azure traces are
// streamed: memory does not depend on their length. The sessions CSV is held
// as about 80 bytes a request, because each seed sends its sessions in another
// order. A Bailian trace is held whole, because the turns of its sessions lie
// apart in the file.
package workload
