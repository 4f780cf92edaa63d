// Command crossover prints from which context length on shipping a KV cache
// beats computing it again, by link and prefill rate, and draws the map of
// both regimes.
//
//	go run ./examples/crossover [-out DIR]
//
// With -out it writes crossover.png and crossover.svg to DIR. The model is
// kvpolicy.TransferModel, the crossover kvpolicy.Crossover.
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/kvpolicy/kvpolicy"
)

func main() {
	err := run(os.Args[1:], os.Stdout, os.Stderr)
	var bad *flagError
	switch {
	case err == nil || errors.Is(err, flag.ErrHelp):
	case errors.As(err, &bad):
		fmt.Fprintln(os.Stderr, "crossover:", err)
		os.Exit(2)
	default:
		fmt.Fprintln(os.Stderr, "crossover:", err)
		os.Exit(1)
	}
}

// flagError is a flag, or an argument, that is wrong.
type flagError struct{ error }

// rates is a flag that holds prefill rates in tokens/s.
type rates []float64

func (r *rates) String() string {
	words := make([]string, len(*r))
	for i, rate := range *r {
		words[i] = strconv.FormatFloat(rate, 'f', -1, 64)
	}
	return strings.Join(words, ",")
}

func (r *rates) Set(text string) error {
	const most = 8 // columns that a terminal shows, and lines that a picture does
	*r = nil
	for word := range strings.SplitSeq(text, ",") {
		rate, err := strconv.ParseFloat(strings.TrimSpace(word), 64)
		if err != nil || !(rate >= 1e-9 && rate <= 1e18) {
			return fmt.Errorf("%q must be 1e-9 to 1e18 tokens/s", word)
		}
		*r = append(*r, rate)
	}
	if len(*r) > most {
		return fmt.Errorf("must be at most %d rates", most)
	}
	slices.Sort(*r)
	*r = slices.Compact(*r)
	return nil
}

func run(args []string, stdout, stderr io.Writer) error {
	model := kvpolicy.TransferModel{RecomputeOverheadSeconds: 0.2, KVBytesPerToken: 128_000}.WithLink(kvpolicy.LineRate(10))
	prefillRates := rates{250, 3000, 7000, 17_759}
	flags := flag.NewFlagSet("crossover", flag.ContinueOnError)
	flags.SetOutput(io.Discard) // its errors are ours to print, once
	out := flags.String("out", "", "directory to write crossover.png and crossover.svg to")
	flags.Float64Var(&model.OverheadSeconds, "overhead", model.OverheadSeconds, "seconds before the first byte of a transfer")
	flags.Float64Var(&model.RecomputeOverheadSeconds, "recompute-overhead", model.RecomputeOverheadSeconds, "seconds before a recompute's prefill")
	flags.Float64Var(&model.KVBytesPerToken, "kv-bytes", model.KVBytesPerToken, "bytes of KV a token")
	flags.Var(&prefillRates, "prefill-rates", "prefill rates of the destination in tokens/s, separated by commas")
	if err := flags.Parse(args); errors.Is(err, flag.ErrHelp) {
		flags.SetOutput(stderr)
		flags.Usage()
		return err
	} else if err != nil {
		return &flagError{err}
	}
	if flags.NArg() > 0 {
		return &flagError{fmt.Errorf("unexpected argument %q", flags.Arg(0))}
	}
	for _, f := range []struct {
		name  string
		value float64
	}{{"overhead", model.OverheadSeconds}, {"recompute-overhead", model.RecomputeOverheadSeconds}, {"kv-bytes", model.KVBytesPerToken}} {
		if !(f.value >= 0 && f.value <= 1e12) {
			return &flagError{fmt.Errorf("-%s is %v, must be 0 to 1e12", f.name, f.value)}
		}
	}
	if err := printTables(stdout, model, prefillRates); err != nil {
		return err
	}
	if *out == "" {
		return nil
	}
	if err := drawMap(*out, model, prefillRates); err != nil {
		return err
	}
	_, err := fmt.Fprintf(stdout, "\nThe map is in %s and %s.\n", filepath.Join(*out, "crossover.png"), filepath.Join(*out, "crossover.svg"))
	return err
}

// namedLink is a link with a name to print.
type namedLink struct {
	name string
	kvpolicy.Link
}

// lineRates are the link classes of the hazard algorithm note.
func lineRates() []namedLink {
	return []namedLink{
		{"100 Mbit/s", kvpolicy.LineRate(0.1)},
		{"10 Gbit/s", kvpolicy.LineRate(10)},
		{"200 Gbit/s", kvpolicy.LineRate(200)},
	}
}

func printTables(w io.Writer, model kvpolicy.TransferModel, prefillRates []float64) error {
	links := lineRates()
	for i := range links {
		links[i].OverheadSeconds = model.OverheadSeconds
	}
	title := fmt.Sprintf("Line rates, %s bytes of KV a token, overheads %v s of a transfer and %v s of a recompute:",
		thousands(model.KVBytesPerToken), model.OverheadSeconds, model.RecomputeOverheadSeconds)
	if err := printTable(w, title, model, links, prefillRates); err != nil {
		return err
	}
	model.KVBytesPerToken = kvpolicy.H20Qwen3Coder30B().KVBytesPerToken
	title = fmt.Sprintf("\nMooncake between H20s, Qwen3-Coder-30B-A3B, %s bytes of KV a token, overhead %v s of a recompute:",
		thousands(model.KVBytesPerToken), model.RecomputeOverheadSeconds)
	return printTable(w, title, model, []namedLink{
		{"idle: 0.003 s + 9.7 GB/s", kvpolicy.MooncakeIdle()},
		{"loaded: 0.003 s + 3 GB/s", kvpolicy.MooncakeLoaded()},
		{"assumed: 0.3 s + 2.7 GB/s", kvpolicy.MooncakeAssumed()},
		{"observed: 1.73 s + 0.1226 GB/s", kvpolicy.MooncakeObserved()},
	}, prefillRates)
}

// printTable prints c* in tokens, a line a link and a column a prefill rate.
func printTable(w io.Writer, title string, model kvpolicy.TransferModel, links []namedLink, prefillRates []float64) error {
	fmt.Fprintln(w, title)
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(table, "%-32s\t", "transfer is cheaper")
	for _, rate := range prefillRates {
		fmt.Fprintf(table, "at %s tokens/s\t", thousands(rate))
	}
	fmt.Fprintln(table)
	for _, link := range links {
		fmt.Fprintf(table, "%-32s\t", link.name)
		for _, rate := range prefillRates {
			regime, tokens, err := kvpolicy.Crossover(model.WithLink(link.Link), link.Bandwidth, rate)
			if err != nil {
				return err
			}
			fmt.Fprintf(table, "%s\t", cell(regime, tokens))
		}
		fmt.Fprintln(table)
	}
	return table.Flush()
}

// cell is a regime in a word and a number.
func cell(regime kvpolicy.Regime, tokens float64) string {
	switch regime {
	case kvpolicy.TransferAbove:
		return "above " + thousands(tokens)
	case kvpolicy.TransferBelow:
		return "below " + thousands(tokens)
	case kvpolicy.AlwaysTransfer:
		return "always"
	}
	return "never"
}

// thousands rounds x to a whole number and groups its digits by commas; small
// and very large ones keep three digits.
func thousands(x float64) string {
	if x != math.Trunc(x) && x < 10 || x >= 1e15 {
		return strconv.FormatFloat(x, 'g', 3, 64)
	}
	digits := strconv.FormatFloat(math.Round(x), 'f', -1, 64)
	for at := len(digits) - 3; at > 0; at -= 3 {
		digits = digits[:at] + "," + digits[at:]
	}
	return digits
}
