module github.com/kvpolicy/kvpolicy/examples

go 1.24.0

require github.com/kvpolicy/kvpolicy v0.0.0

replace github.com/kvpolicy/kvpolicy => ../
