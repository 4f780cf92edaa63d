package kvpolicy_test

import (
	"fmt"

	"github.com/kvpolicy/kvpolicy"
	"gonum.org/v1/gonum/stat/distuv"
)

func ExampleNewKaplanMeier() {
	// Five sessions of a node; the last two are still open, or were shut down as
	// planned.
	curve, err := kvpolicy.NewKaplanMeier(
		[]float64{600, 1200, 1800, 1800, 2400},
		[]bool{true, true, true, false, false})
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Printf("up after 20 minutes: %.2f\n", curve.Survival(1200))
	lower, upper, _ := curve.Band(1200, 0.95, kvpolicy.BandLogLog)
	fmt.Printf("95%% band: %.2f to %.2f\n", lower, upper)
	median, withinData, _ := curve.Quantile(0.5)
	fmt.Println("median:", median, withinData)
	mean, _ := curve.RestrictedMean(1800)
	fmt.Printf("mean of the first half hour: %.0f s\n", mean)
	// Output:
	// up after 20 minutes: 0.60
	// 95% band: 0.13 to 0.88
	// median: 1800 true
	// mean of the first half hour: 1440 s
}

func ExampleConditionalSurvival() {
	// A laptop that has been up for six hours is likelier to stay than one that
	// came up a minute ago.
	laptop := distuv.Weibull{K: 0.6, Lambda: 600}
	for _, age := range []float64{60, 6 * 3600} {
		s, err := kvpolicy.ConditionalSurvival(laptop, age, 300)
		if err != nil {
			fmt.Println(err)
			return
		}
		fmt.Printf("%.3f\n", s)
	}
	// Output:
	// 0.616
	// 0.931
}

func ExampleExpectedLoss() {
	spot := distuv.Weibull{K: 3, Lambda: 1200}
	// 4500 tokens of context that grow by 12 a second once 2 s have passed, to be
	// prefilled at 250 tokens/s elsewhere if the node is lost.
	exposure := kvpolicy.Exposure{
		ContextTokens: 4500, DecodeRate: 12, WaitSeconds: 2, RemainingTokens: 3000,
		FallbackPrefillRate: 250, OverheadSeconds: 2.2,
	}
	for _, cells := range []int{16, 0} {
		loss, err := kvpolicy.ExpectedLoss(spot, 600, 0, 252, cells, exposure)
		if err != nil {
			fmt.Println(err)
			return
		}
		fmt.Printf("%.5f s\n", loss)
	}
	// Output:
	// 5.52943 s
	// 5.52986 s
}

func ExampleChooseCurve() {
	durations := []float64{310, 620, 700, 810, 905, 980, 1010, 1100, 1180, 1300, 1500}
	observed := make([]bool, len(durations))
	for i := range observed {
		observed[i] = i != 3 // the fourth is still open
	}
	choice, err := kvpolicy.ChooseCurve(durations, observed)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(choice)
	// Output:
	// weibull: lower_aic (AIC exponential 161.0, Weibull 149.0; distance 0.34 of the band's)
}

func ExampleHistories() {
	histories := kvpolicy.NewHistories(kvpolicy.DefaultMinSessions)
	for i := range 5 {
		err := histories.Add("laptop-1", "laptop", kvpolicy.Session{DurationSeconds: float64(600 * (i + 1)), Observed: true})
		if err != nil {
			fmt.Println(err)
			return
		}
	}
	if err := histories.SetRunning("laptop-2", "laptop", 240, 0); err != nil {
		fmt.Println(err)
		return
	}
	for _, node := range []string{"laptop-1", "laptop-2", "spot-1"} {
		curve, level := histories.Curve(node)
		fmt.Printf("%s: by %s, up after 10 minutes %.2f\n", node, level, curve.Survival(600))
	}
	// Output:
	// laptop-1: by node, up after 10 minutes 0.80
	// laptop-2: by kind, up after 10 minutes 0.80
	// spot-1: by fleet, up after 10 minutes 0.80
}

func ExampleEncodeCurve() {
	// A batch job fits and writes; a router reads at start.
	curve, _, err := kvpolicy.FitExponential([]float64{1000, 3000, 4000}, []bool{true, true, false})
	if err != nil {
		fmt.Println(err)
		return
	}
	data, err := kvpolicy.EncodeCurve(curve)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Printf("%s\n", data)
	back, err := kvpolicy.DecodeCurve(data)
	fmt.Println(back.Survival(4000) == curve.Survival(4000), err)
	// Output:
	// {"kind":"exponential","rate":0.00025}
	// true <nil>
}
