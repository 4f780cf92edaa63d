package kvpolicy

// TransferModel prices bringing the KV of n tokens to another instance, by
// transfer or by recompute; both are affine in n. (SPEC section 6.1.)
type TransferModel struct {
	// OverheadSeconds is what any transfer costs before the first byte, 0 to
	// 1e12 s. Default 0.3 (elastic-migration-v2 report).
	OverheadSeconds float64
	// RecomputeOverheadSeconds is what any recompute costs before its prefill,
	// 0 to 1e12 s. Default 0.2 (hazard algorithm note).
	RecomputeOverheadSeconds float64
	// Bandwidth is that of the link of instances that give none, in bytes/s,
	// 1e-9 to 1e18 where used. Default 2.7e9 (elastic-migration-v2 report). 0
	// means that every instance must give its own.
	Bandwidth float64
	// KVBytesPerToken is the size of one token's KV in bytes, 0 to 1e12; see
	// the function KVBytesPerToken. Default 98,304, Qwen3-Coder-30B-A3B in
	// bf16. 0 makes every link infinitely fast.
	KVBytesPerToken float64
}

func (m *TransferModel) validate() error {
	if err := checkSeconds("transfer.overhead_s", m.OverheadSeconds); err != nil {
		return err
	}
	if err := checkSeconds("transfer.recompute_overhead_s", m.RecomputeOverheadSeconds); err != nil {
		return err
	}
	if err := checkRate("transfer.bandwidth", m.Bandwidth); err != nil {
		return err
	}
	if !(m.KVBytesPerToken >= 0 && m.KVBytesPerToken <= maxKVBytesPerToken) {
		return fieldError("transfer.kv_bytes_per_token", m.KVBytesPerToken, "be 0 to 1e12 bytes")
	}
	return nil
}

// KVBytesPerToken is the KV cache that one token takes, in bytes, in a model
// that caches keys and values of headDim elements for each of kvHeads heads in
// each layer: 2 * layers * kvHeads * headDim * bytesPerElement. bytesPerElement
// is 2 for bf16 and fp16, 1 for fp8.
func KVBytesPerToken(layers, kvHeads, headDim, bytesPerElement int) float64 {
	return 2 * float64(layers) * float64(kvHeads) * float64(headDim) * float64(bytesPerElement)
}

// LatentKVBytesPerToken is the same for a model with multi-head latent
// attention, which caches in each layer one latent vector of latentDim
// elements and the ropeDim elements of its decoupled rotary key, whatever the
// number of heads (DeepSeek-V2, arXiv 2405.04434, section 2.1; DeepSeek-V3:
// 61 layers, 512 and 64).
func LatentKVBytesPerToken(layers, latentDim, ropeDim, bytesPerElement int) float64 {
	return float64(layers) * (float64(latentDim) + float64(ropeDim)) * float64(bytesPerElement)
}

// TransferSeconds is what shipping the KV of n tokens over a link of bandwidth
// bytes/s takes: overhead + n * bytes per token / bandwidth. Between two
// instances the bandwidth is the lesser of theirs.
func (m TransferModel) TransferSeconds(n int64, bandwidth float64) float64 {
	return m.transferSeconds(n, bandwidth)
}

func (m *TransferModel) transferSeconds(n int64, bandwidth float64) float64 {
	return m.OverheadSeconds + float64(n)*m.KVBytesPerToken/bandwidth
}

// RecomputeSeconds is what prefilling n tokens again at prefillRate tokens/s
// takes: overhead + n / rate.
func (m TransferModel) RecomputeSeconds(n int64, prefillRate float64) float64 {
	return m.RecomputeOverheadSeconds + float64(n)/prefillRate
}

// Cheapest is the cheaper way to bring the KV of n tokens to an instance, and
// its seconds: transfer only where it is strictly cheaper.
func (m TransferModel) Cheapest(n int64, bandwidth, prefillRate float64) (Method, float64) {
	transfer, recompute := m.TransferSeconds(n, bandwidth), m.RecomputeSeconds(n, prefillRate)
	if transfer < recompute {
		return Transfer, transfer
	}
	return Recompute, recompute
}
