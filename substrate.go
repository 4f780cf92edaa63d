package kvpolicy

import (
	"fmt"
	"math"
)

// Substrate is what PD-separation stands on: a KV connector that makes every
// request slower, and some requests that gain. (SPEC section 4; the argument is
// the elastic-migration-v2 report's.)
type Substrate struct {
	// TaxShare is what the connector adds to every request's TTFT when nothing
	// is ever moved, as a share of the mean TTFT, 0 to 1e6: 0.45 is 45 %.
	TaxShare float64
	// MeanTTFTSeconds is the mean TTFT without a connector, 0 to 1e12 s. With 1
	// every result in seconds is in multiples of it.
	MeanTTFTSeconds float64
	// TriggerRate is the share of requests that are separated, 0 to 1; see
	// Funnel.Share(Triggered).
	TriggerRate float64
	// SavedSeconds is what one separated request saves, 0 to 1e12 s.
	SavedSeconds float64
}

// SubstrateVerdict is whether a KV connector pays, and what would make it pay.
type SubstrateVerdict struct {
	// Pays says that NetSeconds is positive.
	Pays bool
	// NetSeconds is what the average request gains; negative is lost.
	NetSeconds float64
	// BreakEvenSavedSeconds is what a separated request would have to save at
	// that trigger rate; +Inf where nothing triggers and there is a tax.
	BreakEvenSavedSeconds float64
	// BreakEvenTriggerRate is the share of requests that would have to be
	// separated at that saving; more than 1 means that even all of them would
	// not do, +Inf that nothing is saved and there is a tax.
	BreakEvenTriggerRate float64
}

// Judge weighs the tax against the saving: net = rate * saved - tax * mean TTFT,
// seconds a request. A field out of its range is a FieldError.
func (s Substrate) Judge() (SubstrateVerdict, error) {
	if !(s.TaxShare >= 0 && s.TaxShare <= maxWeight) {
		return SubstrateVerdict{}, fieldError("tax_share", s.TaxShare, "be 0 to 1e6, a share of the mean TTFT (0.45 for 45 %)")
	}
	if err := checkSeconds("mean_ttft_s", s.MeanTTFTSeconds); err != nil {
		return SubstrateVerdict{}, err
	}
	if !(s.TriggerRate >= 0 && s.TriggerRate <= 1) {
		return SubstrateVerdict{}, fieldError("trigger_rate", s.TriggerRate, "be 0 to 1, a share of the requests (0.0041 for 0.41 %)")
	}
	if err := checkSeconds("saved_s", s.SavedSeconds); err != nil {
		return SubstrateVerdict{}, err
	}
	tax := float64(s.TaxShare * s.MeanTTFTSeconds)
	net := float64(s.TriggerRate*s.SavedSeconds) - tax
	return SubstrateVerdict{
		Pays:                  net > 0,
		NetSeconds:            net,
		BreakEvenSavedSeconds: breakEven(tax, s.TriggerRate),
		BreakEvenTriggerRate:  breakEven(tax, s.SavedSeconds),
	}, nil
}

// breakEven is the factor that makes up for the tax; without a tax it is 0.
func breakEven(tax, by float64) float64 {
	switch {
	case tax == 0:
		return 0
	case by == 0:
		return math.Inf(1)
	}
	return tax / by
}

// String is the verdict as a sentence.
func (v SubstrateVerdict) String() string {
	verb := "does not pay"
	if v.Pays {
		verb = "pays"
	}
	return fmt.Sprintf("%s: %+.4g s a request; break-even at %.4g s saved a separated request, or at %.4g %% of requests separated",
		verb, v.NetSeconds, v.BreakEvenSavedSeconds, 100*v.BreakEvenTriggerRate)
}

// ConnectorTax is what a KV connector costs when nothing is ever moved, as
// shares of the value without a connector: 0.38 is 38 % more.
type ConnectorTax struct {
	TTFTP90, TPOTP90, E2EP90 float64
	// HotspotIndex is that of the report, which does not define it.
	HotspotIndex float64
}

// NIXLTax is the published tax of vLLM's NixlConnector on 8 H20 instances under
// a saturating agentic replay, one run. It is of the p90s: no mean is
// published. (Elastic-migration-v2 report, 2026-05-26, result 1.) It is a
// matter of saturation: where 95 % of the offered throughput is served it is 2 %
// or nothing, where 70 % is, 17 % of the TTFT p90. (Published beside the report,
// undated.)
func NIXLTax() ConnectorTax {
	return ConnectorTax{TTFTP90: 0.38, TPOTP90: 0.16, E2EP90: 0.17, HotspotIndex: 0.002}
}

// MooncakeTax is the same of vLLM's MooncakeConnector.
func MooncakeTax() ConnectorTax {
	return ConnectorTax{TTFTP90: 0.45, TPOTP90: 0.25, E2EP90: 0.27, HotspotIndex: 0.19}
}
