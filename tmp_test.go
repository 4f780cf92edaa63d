package kvpolicy
import ("testing";"fmt")
func fleetN(n int, tied bool) Snapshot {
	s := Snapshot{Request: Request{ID:"req-123456", ContextTokens: 20000, RemainingTokens: 300, Affinity: "inst-3"}}
	for i := 0; i < n; i++ {
		in := Instance{ID: fmt.Sprintf("inst-%d", i), KVCapacityTokens: 419000}
		if !tied { in.Requests = int64(i*7%13); in.PendingPrefillTokens=int64(i*7919%50000); in.OngoingTokens=int64(i*104729%300000); in.ActiveDecodes=int64(i%5); in.CachedTokens=int64(i*31%20000); in.KVUsedTokens=int64(i*977%200000) }
		s.Instances = append(s.Instances, in)
	}
	return s
}
func BenchmarkTmp(b *testing.B) {
	for _, name := range []string{"unified","lmetric","least_loaded","unified_v2_relaxed"} {
		p, _ := Preset(name)
		for _, n := range []int{1,8,64,1024,10000} {
			for _, tied := range []bool{false,true} {
			s := fleetN(n, tied)
			b.Run(fmt.Sprintf("%s/%d/%v", name, n, tied), func(b *testing.B) {
				b.ReportAllocs()
				for i := 0; i < b.N; i++ { if _, err := p.Decide(s); err != nil { b.Fatal(err) } }
				b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(n), "ns/inst")
			})
			}
		}
	}
}
