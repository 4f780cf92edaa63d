package main

import (
	"github.com/kvpolicy/kvpolicy"
	"github.com/kvpolicy/kvpolicy/track"
)

// trackRequest is a request that was never sent.
func trackRequest(id string) track.Request {
	return track.Request{Request: kvpolicy.Request{ID: id}}
}
