package kvpolicy

import (
	"fmt"
	"math"

	"gonum.org/v1/gonum/stat/distuv"
)

// Curve is the survival curve of a node: the probability that a node is still
// up at the age of t seconds. Any type with this method serves; gonum's
// distuv.Weibull and distuv.Exponential do as they are, by value or by pointer.
//
// A Weibull's K is above 0 and at most 1e3, its Lambda above 0 and at most 1e12
// s, and an exponential's Rate 1e-9 to 1e18 per second, where they are used.
//
// Survival must not rise, and must stay within [0, 1] with Survival(0) = 1 or
// less. A *KaplanMeier, a Weibull and an exponential are not asked for it,
// and so stay right where Survival itself underflows.
// Of any other type a method LogSurvival(t float64) float64, where it has one,
// is preferred to Survival for the same reason (a type that embeds a
// distribution and overrides its Survival must override its LogSurvival too).
// With Survival alone:
//
//   - a value that is NaN or infinite is an error;
//   - a value below 0 or above 1 is read as 0 or 1, and in a sum of cells one
//     above an earlier value as that earlier value (the exact loss of a curve
//     that rises is not defined, but finite and at least 0);
//   - a curve that returns 0 at the age from which it is asked says nothing
//     about what follows, and is read as exp(-t/3600) from there.
//
// A decision calls Survival on the caller's goroutine, and a panic in it is the
// caller's. (SPEC 5.1.)
type Curve interface {
	Survival(t float64) float64
}

const (
	// unknownRate is the failure rate, per second, of a node of which nothing is
	// known: one an hour (SPEC 5.1).
	unknownRate = 1.0 / 3600
	// maxShape and maxScaleSeconds bound the parameters of a Weibull curve (SPEC 7).
	maxShape        = 1e3
	maxScaleSeconds = 1e12
	// maxHorizonSeconds bounds the ages and the spans that a loss is taken over.
	// It is wider than the bound of an input's times: T is a sum of quotients,
	// and an age in the future is an age plus such a T.
	maxHorizonSeconds = 1e31
)

// logSurvivor is what many distributions of gonum and other libraries offer.
type logSurvivor interface {
	LogSurvival(t float64) float64
}

// form is how a curve is computed.
type form uint8

const (
	formSteps       form = 1 + iota // Kaplan-Meier: steps, then an exponential tail
	formExponential                 // a constant hazard
	formWeibull
	formLog   // another curve, by LogSurvival
	formPlain // another curve, by Survival
)

// conditional is a curve seen from an age at which the node is up. It is a
// value that lives on the stack of the caller, so that a loss allocates nothing.
type conditional struct {
	form form
	// age is the node's now, and offset the time from now to the moment from
	// which this is conditioned: time t of the methods is the age
	// age + (offset + t). The two stay apart so that the edges of cells fall on
	// the same floating-point ages whether a loss starts now or later.
	age, offset float64

	steps *KaplanMeier
	first int     // steps: how many event times the base has passed,
	index int     // ... and how many the point asked last
	tail  float64 // steps: when the tail begins
	// base is the value of the curve at the base, or its logarithm (log). Points
	// are relative to it, but for those of steps, whose differences are then exact.
	base float64
	lift int // steps: points are scaled by 2^lift, see KaplanMeier.block

	rate         float64 // exponential, and the tail of steps
	shape, scale float64
	start        float64 // Weibull: the age of the base
	hazard       float64 // Weibull: the cumulative hazard at the base

	plain Curve
	log   logSurvivor

	invalid bool    // a curve returned a value that is none ...
	value   float64 // ... namely this one
}

// point is a survival, as step * exp(-hazard) relative to the base of its
// conditional. Step curves and plain ones move the first, the others the
// second, a tail behind steps both.
type point struct{ step, hazard float64 }

// drop is the survival lost from p to a later q. Each part is either the
// difference of two stored values or an expm1, so that nothing cancels where
// the survival is near 1.
func (p point) drop(q point) float64 {
	lost := p.step - q.step
	if p.hazard != q.hazard {
		lost += float64(q.step * -math.Expm1(p.hazard-q.hazard))
		if p.hazard != 0 {
			scale := math.Exp(-p.hazard)
			if scale == 0 {
				return 0 // hazards of +Inf, whose difference is none
			}
			lost *= scale
		}
	}
	return lost
}

func (p point) survival() float64 {
	if p.hazard == 0 {
		return p.step
	}
	return p.step * math.Exp(-p.hazard)
}

// validateCurve tells whether a formula can use the curve: its parameters are
// in range (SPEC 7) and a pointer to one of the known types points somewhere.
// What another type returns is seen only when it is asked.
func validateCurve(path string, curve Curve) error {
	switch c := curve.(type) {
	case *KaplanMeier:
		if c == nil || len(c.survival) == 0 {
			return &FieldError{Path: path, Value: "an empty KaplanMeier", Want: "be made by NewKaplanMeier"}
		}
	case distuv.Weibull:
		return validateWeibull(path, c.K, c.Lambda)
	case *distuv.Weibull:
		if c == nil {
			return &FieldError{Path: path, Value: "a nil *distuv.Weibull", Want: "point to a curve"}
		}
		return validateWeibull(path, c.K, c.Lambda)
	case distuv.Exponential:
		return validateExponential(path, c.Rate)
	case *distuv.Exponential:
		if c == nil {
			return &FieldError{Path: path, Value: "a nil *distuv.Exponential", Want: "point to a curve"}
		}
		return validateExponential(path, c.Rate)
	}
	return nil
}

const (
	wantShape = "be above 0 and at most 1e3"
	wantScale = "be above 0 and at most 1e12 seconds"
)

func validateWeibull(path string, shape, scale float64) error {
	if !(shape > 0 && shape <= maxShape) {
		return fieldError(memberPath(path, "shape"), shape, wantShape)
	}
	if !(scale > 0 && scale <= maxScaleSeconds) {
		return fieldError(memberPath(path, "scale"), scale, wantScale)
	}
	return nil
}

// memberPath is the path of a member of what stands at path, if at any.
func memberPath(path, key string) string {
	if path == "" {
		return key
	}
	return path + "." + key
}

func validateExponential(path string, rate float64) error {
	if !usableRate(rate) {
		return fieldError(path+".rate", rate, "be 1e-9 to 1e18 per second")
	}
	return nil
}

// newConditional conditions a curve, which is not nil, on being up at age.
func newConditional(curve Curve, age float64) (conditional, error) {
	if err := validateCurve("curve", curve); err != nil {
		return conditional{}, err
	}
	c := conditional{age: age}
	switch k := curve.(type) {
	case *KaplanMeier:
		c.form, c.steps = formSteps, k
	case distuv.Weibull:
		c.form, c.shape, c.scale = formWeibull, k.K, k.Lambda
	case *distuv.Weibull:
		c.form, c.shape, c.scale = formWeibull, k.K, k.Lambda
	case distuv.Exponential:
		c.form, c.rate = formExponential, k.Rate
	case *distuv.Exponential:
		c.form, c.rate = formExponential, k.Rate
	case logSurvivor:
		c.form, c.log = formLog, k
	default:
		c.form, c.plain = formPlain, curve
	}
	c.anchor()
	return c, c.err()
}

// err is the value that a curve should not have returned, if any.
func (c *conditional) err() error {
	if !c.invalid {
		return nil
	}
	return fieldError("curve", c.value, fmt.Sprintf("have a survival that is a number, from the age of %v seconds on", c.age))
}

// anchor computes what is asked of the curve at its base.
func (c *conditional) anchor() {
	switch c.form {
	case formSteps:
		k := c.steps
		x := c.age + c.offset
		c.first = k.passed(x, 0, len(k.times))
		c.rewind()
		c.base = k.survival[c.index]
		if k.block != nil {
			var exponent int
			c.base, exponent = math.Frexp(c.base)
			c.lift = blockBits*int(k.block[c.index]) - exponent
		}
		c.rate, c.tail = k.tailRate, math.Inf(1)
		if c.index == len(k.times) {
			c.tail = 0
		} else if n := len(k.times); n > 0 {
			c.tail = (k.times[n-1] - c.age) - c.offset
		}
	case formWeibull:
		c.start = c.age + c.offset
		c.hazard = powerOfRatio(c.start, c.scale, c.shape)
	case formLog:
		if c.base = c.logAt(0); math.IsInf(c.base, -1) {
			c.form, c.rate = formExponential, unknownRate
		}
	case formPlain:
		if c.base = c.plainAt(0); c.base == 0 {
			c.form, c.rate = formExponential, unknownRate
		}
	}
}

// advance moves the base by t and returns the survival until there.
func (c *conditional) advance(t float64) float64 {
	if t == 0 {
		return 1
	}
	survival := c.survival(t)
	if survival == 0 {
		return 0
	}
	c.offset += t
	c.anchor()
	return survival
}

// survival is S(age + offset + t | age + offset).
func (c *conditional) survival(t float64) float64 {
	return c.at(t).survival() / c.norm()
}

// norm is what turns the drops of this conditional into probabilities.
func (c *conditional) norm() float64 {
	if c.form == formSteps {
		return c.base
	}
	return 1
}

// rewind has a step curve look for event times from its base on again.
func (c *conditional) rewind() { c.index = c.first }

// at evaluates the curve. A step curve looks for event times from the point
// asked last on: ask in ascending order, or rewind.
func (c *conditional) at(t float64) point {
	switch c.form {
	case formSteps:
		return c.stepAt(t)
	case formExponential:
		return point{1, c.rate * t}
	case formWeibull:
		return point{1, c.weibullHazard(t)}
	case formLog:
		return point{1, math.Max(0, c.base-c.logAt(t))}
	default:
		return point{math.Min(c.plainAt(t)/c.base, 1), 0}
	}
}

func (c *conditional) stepAt(t float64) point {
	k := c.steps
	n := len(k.times)
	if c.index < n {
		c.index = k.passed(c.age+(c.offset+t), c.index, n)
	}
	p := point{step: k.survival[c.index]}
	if k.block != nil {
		p.step = math.Ldexp(p.step, c.lift-blockBits*int(k.block[c.index]))
	}
	if c.index == n && t > c.tail {
		p.hazard = c.rate * (t - c.tail)
	}
	return p
}

// plainAt asks a curve that has only Survival, and logAt one that has its
// logarithm. The first value that is none is kept.
func (c *conditional) plainAt(t float64) float64 {
	s := c.plain.Survival(c.age + (c.offset + t))
	if math.IsNaN(s) || math.IsInf(s, 0) {
		c.reject(s)
		return 0
	}
	return math.Max(0, math.Min(s, 1))
}

func (c *conditional) logAt(t float64) float64 {
	s := c.log.LogSurvival(c.age + (c.offset + t))
	if math.IsNaN(s) || math.IsInf(s, 1) {
		c.reject(s)
		return math.Inf(-1)
	}
	return math.Min(s, 0)
}

func (c *conditional) reject(s float64) {
	if !c.invalid {
		c.invalid, c.value = true, s
	}
}

// weibullHazard is ((start + t)/scale)^shape - (start/scale)^shape, without
// the subtraction: with z = shape*log(1 + t/start) it is the lower power times
// expm1(z), or the upper one times -expm1(-z).
func (c *conditional) weibullHazard(t float64) float64 {
	if t == 0 {
		return 0
	}
	if c.start == 0 {
		return powerOfRatio(t, c.scale, c.shape)
	}
	z := c.shape * math.Log1p(t/c.start)
	if math.IsInf(z, 1) { // a quotient beyond a float64
		z = c.shape * logarithmOfRatio(t, c.start)
	}
	switch {
	case z < 4 && c.hazard >= tinyPower && c.hazard <= hugePower:
		return c.hazard * math.Expm1(z)
	case z < 4 && c.hazard > hugePower:
		// The lower power may have overflowed, while its product with a tiny
		// expm1 has not.
		return math.Exp(float64(c.shape*logarithmOfRatio(c.start, c.scale)) + logarithm(math.Expm1(z)))
	default:
		// The lower power may have underflowed, and expm1(z) loses as many digits
		// as z has before the point.
		return powerOfRatio(c.start+t, c.scale, c.shape) * -math.Expm1(-z)
	}
}

// Powers between these are exact to rounding, and far from under- or overflow.
const tinyPower, hugePower = 1e-290, 1e305

// powerOfRatio is (x/scale)^shape, also where the quotient leaves the range of
// a float64 and the power does not.
func powerOfRatio(x, scale, shape float64) float64 {
	if x == 0 {
		return 0
	}
	if ratio := x / scale; ratio >= tinyPower && ratio <= hugePower {
		return math.Pow(ratio, shape)
	}
	return math.Exp(shape * logarithmOfRatio(x, scale))
}

// logarithmOfRatio is log(x/y), also where the quotient leaves the range.
func logarithmOfRatio(x, y float64) float64 {
	if ratio := x / y; ratio >= tinyPower && ratio <= hugePower {
		return math.Log(ratio)
	}
	return logarithm(x) - logarithm(y)
}

// logarithm is math.Log, but for numbers below the normal ones too, of which
// math.Log on amd64 (Go 1.26) returns about -709 whatever they are.
func logarithm(x float64) float64 {
	if x >= 0x1p-1022 {
		return math.Log(x)
	}
	return math.Log(x*0x1p64) - float64(64*math.Ln2)
}

// ConditionalSurvival is S(age + t)/S(age), the probability that a node which
// is up at age is up t seconds later. Both are in seconds, 0 to 1e31. It is 1
// at t = 0, never rises with t, and is right at ages where S itself has
// underflowed, for the curves that Curve names. A nil curve never fails: 1.
//
// Errors are FieldErrors: "age" and "t" out of range, "curve" (or its "shape",
// "scale" or "rate") where the curve cannot be used or returned no number.
// (SPEC 5.1.)
func ConditionalSurvival(curve Curve, age, t float64) (float64, error) {
	if err := checkHorizon("age", age); err != nil {
		return 0, err
	}
	if err := checkHorizon("t", t); err != nil {
		return 0, err
	}
	if curve == nil {
		return 1, nil
	}
	c, err := newConditional(curve, age)
	if err != nil {
		return 0, err
	}
	s := c.survival(t)
	if err := c.err(); err != nil {
		return 0, err
	}
	return s, nil
}

func checkHorizon(path string, seconds float64) error {
	if !(seconds >= 0 && seconds <= maxHorizonSeconds) {
		return fieldError(path, seconds, "be 0 to 1e31 seconds")
	}
	return nil
}
