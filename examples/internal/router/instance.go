package router

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/kvpolicy/kvpolicy"
	"github.com/kvpolicy/kvpolicy/track"
)

// Instance is a server that requests can be sent to.
type Instance struct {
	// ID names the instance: in decisions, logs and metrics. By default the
	// address.
	ID string
	// URL is where the server listens, such as http://10.0.0.1:8000.
	URL *url.URL
	// Draining takes no new requests and finishes those it has.
	Draining bool
	// Info is what is known of the instance beforehand.
	Info track.InstanceInfo
}

// Address is the host and port of the instance, as Envoy wants it.
func (i Instance) Address() string {
	port := i.URL.Port()
	switch {
	case port != "":
		return i.URL.Host
	case i.URL.Scheme == "https":
		return i.URL.Host + ":443"
	}
	return i.URL.Host + ":80"
}

// instanceEntry is an instance as a file lists it.
type instanceEntry struct {
	ID               string  `yaml:"id"`
	URL              string  `yaml:"url"`
	Kind             string  `yaml:"kind"`
	Draining         bool    `yaml:"draining"`
	PrefillRate      float64 `yaml:"prefill_rate"`
	DecodeRate       float64 `yaml:"decode_rate"`
	Bandwidth        float64 `yaml:"bandwidth"`
	KVCapacityTokens int64   `yaml:"kv_capacity_tokens"`
}

// ParseInstances reads an instances file, YAML or JSON:
//
//	instances:
//	- url: http://10.0.0.1:8000
//	- {id: spot-7, url: "http://10.0.0.2:8000", kind: spot, prefill_rate: 17000, draining: true}
//
// Besides url everything may be left out; see track.InstanceInfo. An unknown
// key is an error, and so are an id that comes twice, an entry that is null and
// a second YAML document. An empty list is no
// instances; a file without the list is an error, since it may be half written.
func ParseInstances(data []byte) ([]Instance, error) {
	var file struct {
		Instances []instanceEntry `yaml:"instances"`
	}
	decoder := yaml.NewDecoder(bytes.NewReader(data))
	decoder.KnownFields(true)
	if err := decoder.Decode(&file); err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	if err := decoder.Decode(&yaml.Node{}); err != io.EOF {
		return nil, errors.New("the file must be one YAML document, and nothing behind it")
	}
	// The decoder passes over entries that are null.
	var raw struct{ Instances []yaml.Node }
	if err := yaml.Unmarshal(data, &raw); err != nil {
		return nil, err
	}
	for at, node := range raw.Instances {
		if len(raw.Instances) != len(file.Instances) && (node.Tag == "!!null" || node.Alias != nil && node.Alias.Tag == "!!null") {
			return nil, &kvpolicy.FieldError{Path: fmt.Sprintf("instances[%d]", at), Value: "null", Want: "be an instance"}
		}
	}
	if file.Instances == nil {
		return nil, &kvpolicy.FieldError{Path: "instances", Value: "missing", Want: "be a list, [] for none"}
	}
	all := make([]Instance, 0, len(file.Instances))
	for at, entry := range file.Instances {
		i, err := parseInstance(entry)
		if err != nil {
			return nil, fmt.Errorf("instances[%d]: %w", at, err)
		}
		all = append(all, i)
	}
	return all, unique(all)
}

// ParseURLs reads a comma-separated list of URLs, as a flag has it.
func ParseURLs(list string) ([]Instance, error) {
	var all []Instance
	for text := range strings.SplitSeq(list, ",") {
		i, err := parseInstance(instanceEntry{URL: strings.TrimSpace(text)})
		if err != nil {
			return nil, err
		}
		all = append(all, i)
	}
	return all, unique(all)
}

func parseInstance(e instanceEntry) (Instance, error) {
	u, err := url.Parse(e.URL)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "" || u.User != nil || u.RawQuery != "" || u.Fragment != "" {
		return Instance{}, &kvpolicy.FieldError{Path: "url", Value: strconv.Quote(e.URL), Want: "be like http://10.0.0.1:8000"}
	}
	if port := u.Port(); port != "" {
		if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
			return Instance{}, &kvpolicy.FieldError{Path: "url", Value: strconv.Quote(e.URL), Want: "have a port of 1 to 65535"}
		}
	}
	i := Instance{ID: e.ID, URL: u, Draining: e.Draining, Info: track.InstanceInfo{
		Kind: e.Kind, PrefillRate: e.PrefillRate, DecodeRate: e.DecodeRate, Bandwidth: e.Bandwidth, KVCapacityTokens: e.KVCapacityTokens,
	}}
	if i.ID == "" {
		i.ID = i.Address()
	}
	return i, nil
}

// unique checks that no id and no address comes twice.
func unique(all []Instance) error {
	var ids, addresses []string
	for at, i := range all {
		if slices.Contains(ids, i.ID) {
			return fmt.Errorf("instances[%d]: %w", at, &kvpolicy.FieldError{Path: "id", Value: strconv.Quote(i.ID), Want: "be another than those before"})
		}
		if slices.Contains(addresses, i.Address()) {
			return fmt.Errorf("instances[%d]: %w", at, &kvpolicy.FieldError{Path: "url", Value: strconv.Quote(i.URL.String()), Want: "be another than those before"})
		}
		ids, addresses = append(ids, i.ID), append(addresses, i.Address())
	}
	return nil
}
