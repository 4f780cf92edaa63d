package track

import (
	"encoding/binary"

	"github.com/cespare/xxhash/v2"
)

// Salt keeps prompts apart whose KV differs though their tokens do not.
// Prompts under different salts share no block.
type Salt struct {
	// Model is the name of the served model.
	Model string
	// Adapter is the name of the adapter (LoRA), empty for none.
	Adapter string
}

// Prompt is a prompt cut into blocks, each named by a 64-bit hash of its
// contents and of all blocks before it, so that equal blocks behind different
// prefixes have different names. Make it once per request, and use it for the
// snapshot, the Begin and every retry. The last block that is not full is left
// out: engines share whole blocks only.
//
// Two different prefixes are taken for the same where their 64-bit hashes
// (xxHash) collide. Among n blocks held and one asked for, that has a chance
// of n / 2^64; xxHash does not withstand someone who looks for collisions, and
// what that would win is a request sent to the wrong instance.
type Prompt struct {
	// Blocks are the chained hashes, first block first.
	Blocks []uint64
	// units is the size of the prompt in tokens or, for text, in bytes; 0 for
	// tokens, whose size needs no scaling.
	units int64
	// blockUnits is the size of a block in the same.
	blockUnits int
}

// The kinds of prompts are hashed from different roots.
const (
	rootTokens = "kvpolicy tokens"
	rootText   = "kvpolicy text"
)

// TokenPrompt hashes a prompt that is known by its token ids, in blocks of
// Config.BlockTokens. The hashes are appended to dst[:0], which may be nil; the
// Prompt keeps them. Cached lengths of such a prompt are exact, to within one
// block.
func (t *Tracker) TokenPrompt(dst []uint64, salt Salt, tokens []uint32) Prompt {
	size := t.config.BlockTokens
	return Prompt{Blocks: chainTokens(dst[:0], salt.root(rootTokens), tokens, size), blockUnits: size}
}

// TextPrompt hashes a prompt that is known only as text, in blocks of
// Config.TextBlockBytes; otherwise it is like TokenPrompt. Cached lengths of
// such a prompt are estimates: the share of its bytes that an instance has
// seen, of the request's ContextTokens. The text must be rendered the same way
// for each turn, so that a conversation's next prompt begins with the last.
func (t *Tracker) TextPrompt(dst []uint64, salt Salt, text []byte) Prompt {
	size := t.config.TextBlockBytes
	return Prompt{Blocks: chainText(dst[:0], salt.root(rootText), text, size), units: int64(len(text)), blockUnits: size}
}

// BeginningOf returns p as the beginning of a prompt whose text has so many
// bytes in all, as where the rest of it is not there to be hashed: cached
// lengths are then shares of the whole, and the rest counts as new. A size that
// is not above that of the text changes nothing, and neither does any of a
// TokenPrompt or of the zero Prompt.
func (p Prompt) BeginningOf(textBytes int64) Prompt {
	if p.units > 0 {
		p.units = max(p.units, textBytes)
	}
	return p
}

// cachedTokens is the length, in tokens, of the first blocks of p as a request
// of that context counts them.
func (p *Prompt) cachedTokens(blocks int, context int64) int64 {
	if p.units == 0 {
		return int64(blocks) * int64(p.blockUnits)
	}
	return int64(float64(context) * (float64(blocks*p.blockUnits) / float64(p.units)))
}

// lacking is what of the context is not in the first blocks of p.
func (p *Prompt) lacking(blocks int, context int64) int64 {
	return max(0, context-p.cachedTokens(blocks, context))
}

// root is what the name of the first block is chained to.
func (s Salt) root(kind string) uint64 {
	var parts [3 * 8]byte // each is of one length, so that no two salts run together
	binary.LittleEndian.PutUint64(parts[0:], xxhash.Sum64String(kind))
	binary.LittleEndian.PutUint64(parts[8:], xxhash.Sum64String(s.Model))
	binary.LittleEndian.PutUint64(parts[16:], xxhash.Sum64String(s.Adapter))
	return xxhash.Sum64(parts[:])
}

// A block is hashed in a buffer, behind the name of its parent.
const parentBytes, stackBytes = 8, 8 + 256

// hashBuffer is a buffer for blocks of that many bytes, on the caller's stack
// where they fit there.
func hashBuffer(small *[stackBytes]byte, block int) []byte {
	if need := parentBytes + block; need > stackBytes {
		return make([]byte, need)
	}
	return small[:parentBytes+block]
}

// chainTokens appends the names of the whole blocks of tokens behind parent.
func chainTokens(dst []uint64, parent uint64, tokens []uint32, size int) []uint64 {
	var small [stackBytes]byte
	buffer := hashBuffer(&small, 4*size)
	for ; len(tokens) >= size; tokens = tokens[size:] {
		block, to := tokens[:size], buffer[parentBytes:]
		for ; len(block) >= 4 && len(to) >= 16; block, to = block[4:], to[16:] { // this is what takes the time
			binary.LittleEndian.PutUint64(to, uint64(block[0])|uint64(block[1])<<32)
			binary.LittleEndian.PutUint64(to[8:], uint64(block[2])|uint64(block[3])<<32)
		}
		for at, token := range block {
			binary.LittleEndian.PutUint32(to[4*at:], token)
		}
		binary.LittleEndian.PutUint64(buffer, parent)
		parent = xxhash.Sum64(buffer)
		dst = append(dst, parent)
	}
	return dst
}

// chainText appends the names of the whole blocks of text behind parent.
func chainText(dst []uint64, parent uint64, text []byte, size int) []uint64 {
	var small [stackBytes]byte
	buffer := hashBuffer(&small, size)
	for ; len(text) >= size; text = text[size:] {
		copy(buffer[parentBytes:], text)
		binary.LittleEndian.PutUint64(buffer, parent)
		parent = xxhash.Sum64(buffer)
		dst = append(dst, parent)
	}
	return dst
}
