package track

import (
	"fmt"

	"github.com/hashicorp/golang-lru/v2/simplelru"
)

// StoredBlocks is the KV event of an engine that has put consecutive blocks
// into its prefix cache, such as vLLM's BlockStored.
type StoredBlocks struct {
	// Salt is what TokenPrompt was given for prompts of the same model and
	// adapter.
	Salt Salt
	// Parent is the engine's hash of the block before the first; nil where the
	// first block begins a prompt. An engine whose hashes are longer than 64
	// bits gives any 8 bytes of them, always the same.
	Parent *uint64
	// Hashes are the engine's hashes of the blocks.
	Hashes []uint64
	// Tokens are the token ids in the blocks: Config.BlockTokens for each.
	Tokens []uint32
}

// BlocksStored takes an engine's word that it caches blocks. They join those
// that were recorded when requests were begun; for prompts known as text
// alone, events have no effect. Blocks behind a parent that the tracker does
// not know, because its event was lost or it has fallen out of the bound, are
// left out and counted in Stats.UnlinkedBlocks.
//
// A number of tokens that does not fit the hashes is a FieldError: the engine's
// block size is not Config.BlockTokens.
func (t *Tracker) BlocksStored(instance string, e StoredBlocks) error {
	size := t.config.BlockTokens
	if len(e.Tokens) != len(e.Hashes)*size {
		return fieldError("tokens", fmt.Sprintf("%d long", len(e.Tokens)),
			fmt.Sprintf("be %d long: block_tokens, %d, for each hash", len(e.Hashes)*size, size))
	}
	i, p, err := t.indexed(instance)
	if err != nil || p.group == nil {
		return err
	}
	if !p.group.stored(p, e, size, t.config.PrefixBlocks) {
		t.mu.Lock()
		i.stats.UnlinkedBlocks += int64(len(e.Hashes))
		t.mu.Unlock()
	}
	return nil
}

// stored adds blocks of an event; false where their parent is unknown.
func (g *prefixGroup) stored(p place, e StoredBlocks, blockTokens, bound int) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	s, bit := &g.slots[p.slot], uint64(1)<<p.slot
	if s.life != p.life {
		return true
	}
	g.scattered = true
	if s.engine == nil {
		s.engine, _ = simplelru.NewLRU[uint64, uint64](bound, nil)
	}
	parent := e.Salt.root(rootTokens)
	if e.Parent != nil {
		var known bool
		if parent, known = s.engine.Get(*e.Parent); !known {
			return false
		}
	}
	blocks := chainTokens(make([]uint64, 0, len(e.Hashes)), parent, e.Tokens, blockTokens)
	for at := len(blocks) - 1; at >= 0; at-- { // the first last, as in record
		g.add(s, bit, blocks[at])
		s.engine.Add(e.Hashes[at], blocks[at])
	}
	return true
}

// BlocksRemoved takes an engine's word that it no longer caches blocks, named
// by its own hashes; those that it never named before are passed over. What
// builds on a removed block does not count as cached until that is back.
func (t *Tracker) BlocksRemoved(instance string, hashes []uint64) error {
	_, p, err := t.indexed(instance)
	if err != nil || p.group == nil {
		return err
	}
	g := p.group
	g.mu.Lock()
	defer g.mu.Unlock()
	s := &g.slots[p.slot]
	if s.life != p.life || s.engine == nil {
		return nil
	}
	for _, hash := range hashes {
		if block, known := s.engine.Peek(hash); known {
			s.engine.Remove(hash)
			s.blocks.Remove(block)
		}
	}
	return nil
}

// BlocksCleared takes an engine's word that its prefix cache is empty.
func (t *Tracker) BlocksCleared(instance string) error {
	_, p, err := t.indexed(instance)
	if err == nil && p.group != nil {
		p.group.clear(p.slot, p.life, p.life)
	}
	return err
}

// indexed finds an instance and its place in the prefix index.
func (t *Tracker) indexed(id string) (*instance, place, error) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	i := t.byID[id]
	if i == nil {
		return nil, place{}, unknownInstance("instance", id)
	}
	return i, i.place(), nil
}
