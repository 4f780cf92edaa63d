package replay

// seriesBins is how many bins a series has at most.
const seriesBins = 512

// Series is how a number went over time on each instance, as means over equal
// bins.
type Series struct {
	// BinSeconds is the width of a bin, a power of two.
	BinSeconds float64
	// Means holds, for each instance, the mean over each bin; the last bin is
	// cut at the run's end. Instances have equally many, at most 512.
	Means [][]float64
	// Overall is each instance's mean over the whole run.
	Overall []float64
}

// Until is the time by which the given share of the whole, over all instances,
// has gone by; 0 where there is none.
func (s Series) Until(share float64) float64 {
	var all []float64
	var total float64
	for _, means := range s.Means {
		for k, v := range means {
			if k == len(all) {
				all = append(all, 0)
			}
			all[k] += v
			total += v
		}
	}
	var sum float64
	for k, v := range all {
		if sum += v; sum > 0 && sum >= float64(share*total) {
			return float64(k+1) * s.BinSeconds
		}
	}
	return 0
}

// series integrates step functions, one for each instance, in bins that double
// when the time outgrows them, so that memory does not grow with time.
type series struct {
	width    float64
	value    []float64
	since    []float64 // when value[i] was last integrated
	integral [][seriesBins]float64
}

func newSeries(instances int) *series {
	return &series{
		width:    1,
		value:    make([]float64, instances),
		since:    make([]float64, instances),
		integral: make([][seriesBins]float64, instances),
	}
}

// set says that instance i has the value from a time on, not before the last.
func (s *series) set(i int, seconds, value float64) {
	s.advance(i, seconds)
	s.value[i] = value
}

func (s *series) advance(i int, seconds float64) {
	for seconds > s.width*seriesBins {
		s.double()
	}
	for s.since[i] < seconds {
		bin := min(int(s.since[i]/s.width), seriesBins-1)
		end := min(float64(bin+1)*s.width, seconds)
		s.integral[i][bin] += float64(s.value[i] * (end - s.since[i]))
		s.since[i] = end
	}
}

func (s *series) double() {
	s.width *= 2
	for i := range s.integral {
		bins := &s.integral[i]
		for k := range seriesBins / 2 {
			bins[k] = bins[2*k] + bins[2*k+1]
		}
		clear(bins[seriesBins/2:])
	}
}

// finish is the series up to a time.
func (s *series) finish(seconds float64) Series {
	out := Series{BinSeconds: s.width}
	for i := range s.value {
		s.advance(i, seconds)
	}
	out.BinSeconds = s.width
	for i := range s.value {
		var means []float64
		var sum float64
		for bin := 0; bin < seriesBins && float64(bin)*s.width < seconds; bin++ {
			sum += s.integral[i][bin]
			means = append(means, s.integral[i][bin]/min(s.width, seconds-float64(bin)*s.width))
		}
		out.Means = append(out.Means, means)
		if seconds > 0 {
			sum /= seconds
		}
		out.Overall = append(out.Overall, sum)
	}
	return out
}
