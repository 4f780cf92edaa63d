package router

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/fsnotify/fsnotify"
)

// settle is how long a file must have been left alone before it is read, since
// writers touch it several times.
const settle = 50 * time.Millisecond

// patience is how long a change may wait for that, where something else in the
// folder, such as a log, is written all the time.
const patience = time.Second

// lookEvery is how often a file is read though nothing was heard of it: its
// folder may have been removed, and the watch with it, or lie on a file system
// that tells nothing.
const lookEvery = time.Second

// ReadInstances reads an instances file.
func ReadInstances(file string) ([]Instance, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	return parseFile(file, data)
}

func parseFile(file string, data []byte) ([]Instance, error) {
	all, err := ParseInstances(data)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	return all, nil
}

// WatchFile keeps a router's instances to those of a file, until the context
// ends. The file's folder is watched, so that a file that is replaced, or a
// symbolic link that is changed as Kubernetes does with a ConfigMap, is seen
// too; what else happens there is passed over. The file is also read every
// second, so that a folder that is removed and made again is found. A file is
// read as it is: only one that is replaced by renaming is never seen half
// written. A file that cannot be read leaves
// the instances as they are and is logged.
func (r *Router) WatchFile(ctx context.Context, file string) error {
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		return err
	}
	defer watcher.Close()
	if err := watcher.Add(filepath.Dir(file)); err != nil {
		return err
	}
	// The first reading comes after the watch, so that no change falls between.
	read := time.NewTimer(0)
	defer read.Stop()
	var due time.Time // when it is read at the latest, zero for not at all
	last := "nothing" // what the last reading found
	changed := func() {
		now := time.Now()
		if due.IsZero() {
			due = now.Add(patience)
		}
		read.Reset(min(settle, max(0, due.Sub(now))))
	}
	look := time.NewTicker(lookEvery)
	defer look.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-watcher.Events:
			changed()
		case <-look.C:
			// A folder that is watched may be added again. Where there is none, the
			// reading will say so.
			_ = watcher.Add(filepath.Dir(file))
			changed()
		case err := <-watcher.Errors:
			r.config.Logger.Warn("watching instances", "file", file, "error", err)
		case <-read.C:
			due = time.Time{}
			data, err := os.ReadFile(file)
			found := fmt.Sprintf("%q, %v", data, err)
			if found == last {
				continue
			}
			last = found
			var all []Instance
			if err == nil {
				all, err = parseFile(file, data)
			}
			if err == nil {
				err = r.SetInstances(all)
			}
			if err != nil {
				r.config.Logger.Error("instances left as they are", "error", err)
			}
		}
	}
}

// Resolve looks up the addresses of a host; net.DefaultResolver.LookupHost.
type Resolve func(ctx context.Context, host string) ([]string, error)

// oneFamily leaves the addresses of IPv4, where there are any.
func oneFamily(addresses []string) []string {
	var four []string
	for _, text := range addresses {
		if a, err := netip.ParseAddr(text); err == nil && a.Is4() {
			four = append(four, text)
		}
	}
	if four == nil {
		return addresses
	}
	return four
}

// WatchDNS keeps a router's instances to the addresses of a host, such as a
// headless service, asked at an interval until the context ends. All of them
// listen on the same port. Where the host has addresses of both families, those
// of IPv4 count alone: a dual-stack service lists each server under both. While the host cannot be looked up, the instances
// stay as they are.
func (r *Router) WatchDNS(ctx context.Context, host, port string, every time.Duration, lookup Resolve) {
	ticker := time.NewTicker(every)
	defer ticker.Stop()
	for {
		addresses, err := lookup(ctx, host)
		if err == nil {
			slices.Sort(addresses)
			var all []Instance
			for _, address := range oneFamily(slices.Compact(addresses)) {
				at := net.JoinHostPort(address, port)
				all = append(all, Instance{ID: at, URL: &url.URL{Scheme: "http", Host: at}})
			}
			err = r.SetInstances(all)
		}
		if err != nil && ctx.Err() == nil {
			r.config.Logger.Error("instances left as they are", slog.String("host", host), "error", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}
