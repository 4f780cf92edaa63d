package router

import (
	"fmt"
	"io"
	"strings"

	"github.com/kvpolicy/kvpolicy/examples/internal/vllmlike"
)

// StandIns starts small vLLM-like servers in this process and announces where
// they listen, for a server called name. They are the instances that the
// Discovery finds, until stop ends them.
func StandIns(count int, name string, announce io.Writer) (discover Discovery, stop func(), err error) {
	servers, err := vllmlike.StartMany(count, vllmlike.DefaultConfig())
	if err != nil {
		return nil, nil, err
	}
	stop = func() {
		for _, server := range servers {
			server.Kill()
		}
	}
	var urls []string
	for n, server := range servers {
		fmt.Fprintf(announce, "%s: stand-in %d listens on %s\n", name, n, server.URL())
		urls = append(urls, server.URL())
	}
	all, err := ParseURLs(strings.Join(urls, ","))
	if err != nil {
		stop()
		return nil, nil, err
	}
	return Fixed(all), stop, nil
}
