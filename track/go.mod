module github.com/kvpolicy/kvpolicy/track

go 1.24.0

require (
	github.com/cespare/xxhash/v2 v2.3.0
	github.com/hashicorp/golang-lru/v2 v2.0.7
	github.com/kvpolicy/kvpolicy v0.0.0
)

replace github.com/kvpolicy/kvpolicy => ../
