module github.com/kvpolicy/kvpolicy/examples

go 1.24.0

require github.com/kvpolicy/kvpolicy v0.0.0

require (
	github.com/stretchr/testify v1.12.1
	go.yaml.in/yaml/v3 v3.0.5 // indirect
)

replace github.com/kvpolicy/kvpolicy => ../
