package kvpolicy_test

import (
	"fmt"

	"github.com/kvpolicy/kvpolicy"
	"gonum.org/v1/gonum/stat/distuv"
)

// Published prefill times of an H20 alone give the constants of the cost.
func ExampleFitPrefill() {
	fit, err := kvpolicy.FitPrefill([]kvpolicy.PrefillSample{
		{New: 2048, Seconds: 0.143},
		{New: 8192, Seconds: 0.583},
		{New: 32768, Seconds: 4.52},
		{New: 65536, Seconds: 15.6},
		{New: 131072, Seconds: 57.0},
	}, kvpolicy.LeastSquares())
	if err != nil {
		panic(err)
	}
	policy := kvpolicy.Unified()
	policy.Cost.PrefillRate, policy.Cost.PrefillQuadratic = fit.PrefillRate, fit.PrefillQuadratic
	fmt.Printf("%.0f tokens/s, %.3g s per token squared, R^2 %.4f\n", policy.Cost.PrefillRate, policy.Cost.PrefillQuadratic, fit.R2)
	// Output:
	// 17758 tokens/s, 2.71e-09 s per token squared, R^2 0.9959
}

// A gate that is to hold for nine transfers in ten goes by the p90.
func ExampleAtQuantile() {
	var samples []kvpolicy.TransferSample
	for _, gigabytes := range []float64{0.5, 1, 1.5, 2, 2.5, 3} {
		for _, slowdown := range []float64{1, 1, 1, 1, 1, 1, 1, 2, 3, 3} {
			samples = append(samples, kvpolicy.TransferSample{
				Bytes:   gigabytes * 1e9,
				Seconds: slowdown * (0.1 + gigabytes/3),
			})
		}
	}
	for _, by := range []kvpolicy.Estimator{kvpolicy.LeastSquares(), kvpolicy.Robust(), kvpolicy.AtQuantile(0.9)} {
		fit, err := kvpolicy.FitTransfer(samples, by)
		if err != nil {
			panic(err)
		}
		fmt.Printf("2 GB take %.2f s\n", fit.Seconds(2e9))
	}
	// Output:
	// 2 GB take 1.15 s
	// 2 GB take 0.77 s
	// 2 GB take 2.30 s
}

// How much one request more slows the others down.
func ExampleFitContention() {
	fit, err := kvpolicy.FitContention([]kvpolicy.ContentionSample{
		{Requests: 0, SecondsPerToken: 0.006},
		{Requests: 4, SecondsPerToken: 0.019},
		{Requests: 8, SecondsPerToken: 0.029},
		{Requests: 16, SecondsPerToken: 0.054},
	}, kvpolicy.Robust())
	if err != nil {
		panic(err)
	}
	fmt.Printf("%.4f s alone, %.4f s for each other request\n", fit.AloneSeconds, fit.DecodeIterationSeconds)
	// Output:
	// 0.0063 s alone, 0.0030 s for each other request
}

// Under the published tax and trigger rate a KV connector does not pay.
func ExampleSubstrate_Judge() {
	verdict, err := kvpolicy.Substrate{
		TaxShare:        kvpolicy.MooncakeTax().TTFTP90,
		MeanTTFTSeconds: 1, // all seconds are in mean TTFTs
		TriggerRate:     0.0041,
		SavedSeconds:    1,
	}.Judge()
	if err != nil {
		panic(err)
	}
	fmt.Println(verdict)
	// Output:
	// does not pay: -0.4459 s a request; break-even at 109.8 s saved a separated request, or at 45 % of requests separated
}

// Predicted against actual shows on the first day that a model is wrong.
func ExampleAccuracy() {
	decision := kvpolicy.Decision{
		Action: kvpolicy.PrefillRemote, Target: "4", PrefillOn: "3", Reason: kvpolicy.NoAffinity,
		Separation: kvpolicy.Separation{Reason: kvpolicy.Triggered, CostMigrate: 2.16},
	}
	var accuracy kvpolicy.Accuracy
	if err := accuracy.Add(decision, 45.13); err != nil {
		panic(err)
	}
	total := accuracy.Total()
	fmt.Printf("off by %+.2f s, observed is %.1f times predicted\n", total.BiasSeconds, total.Ratios.Max)
	// Output:
	// off by +42.97 s, observed is 20.9 times predicted
}

// The funnel shows where requests fall through the gates.
func ExampleFunnel() {
	var funnel kvpolicy.Funnel
	policy := kvpolicy.UnifiedV2Relaxed()
	for _, context := range []int64{500, 4_000, 9_000, 30_000} {
		decision, err := policy.Decide(kvpolicy.Snapshot{
			Request: kvpolicy.Request{ContextTokens: context},
			Instances: []kvpolicy.Instance{
				{ID: "decoding", ActiveDecodes: 3},
				{ID: "caching", Requests: 200, CachedTokens: 30_000},
			},
		})
		if err != nil {
			panic(err)
		}
		funnel.Add(decision)
	}
	fmt.Print(funnel)
	// Output:
	// gate                               decisions      share
	// new_local_below_threshold                  2    50.00 %
	// chosen_no_active_decode                    0     0.00 %
	// src_cache_below_threshold                  0     0.00 %
	// src_not_meaningfully_more_cache            0     0.00 %
	// cost_benefit_not_enough_margin             0     0.00 %
	// triggered                                  2    50.00 %
	// all                                        4   100.00 %
	// reason                             decisions      share
	// no_affinity                                4   100.00 %
	// all                                        4   100.00 %
}

// A KV cache of keys and values, and one of latent vectors.
func ExampleLatentKVBytesPerToken() {
	fmt.Println(kvpolicy.KVBytesPerToken(48, 4, 128, 2), "bytes a token: Qwen3-Coder-30B-A3B in bf16")
	fmt.Println(kvpolicy.LatentKVBytesPerToken(61, 512, 64, 2), "bytes a token: DeepSeek-V3 in bf16")
	// Output:
	// 98304 bytes a token: Qwen3-Coder-30B-A3B in bf16
	// 70272 bytes a token: DeepSeek-V3 in bf16
}

// Under heavy censoring the default tail, one over the mean of the completed
// sessions, dies too fast; the maximum-likelihood one counts the open sessions
// too.
func ExampleKaplanMeier_MaximumLikelihoodTail() {
	nodes := distuv.Weibull{K: 1, Lambda: 10_000}
	var durations []float64
	var observed []bool
	for i := range 200 { // all watched for 2,000 s
		life := nodes.Quantile((float64(i) + 0.5) / 200)
		durations = append(durations, min(life, 2_000))
		observed = append(observed, life < 2_000)
	}
	curve, err := kvpolicy.NewKaplanMeier(durations, observed)
	if err != nil {
		panic(err)
	}
	better, err := curve.MaximumLikelihoodTail(0)
	if err != nil {
		panic(err)
	}
	fmt.Printf("a failure every %.0f s by default, every %.0f s by maximum likelihood\n", 1/curve.TailRate(), 1/better.TailRate())
	// Output:
	// a failure every 959 s by default, every 10071 s by maximum likelihood
}
