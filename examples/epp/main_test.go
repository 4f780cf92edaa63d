package main

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"sync"
	"testing"
	"time"

	bootstrapv3 "github.com/envoyproxy/go-control-plane/envoy/config/bootstrap/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/router/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/load_balancing_policies/override_host/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/load_balancing_policies/round_robin/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/upstreams/http/v3"
	extproc "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	reflectionpb "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"

	"github.com/kvpolicy/kvpolicy/examples/internal/vllmlike"
)

func TestFlagsThatAreWrongAreNamed(t *testing.T) {
	fine := []string{"-urls", "http://127.0.0.1:1"}
	for _, test := range []struct {
		want string
		args []string
	}{
		{"-urls, -instances and -dns", nil},
		{"-fallbacks", append([]string{"-fallbacks", "-1"}, fine...)},
		{"-decide-after", append([]string{"-decide-after", "0"}, fine...)},
		{"-request-body-mode", append([]string{"-request-body-mode", "grpc"}, fine...)},
		{"-response-body-mode", append([]string{"-response-body-mode", ""}, fine...)},
		{"-drain-timeout", append([]string{"-drain-timeout", "-1s"}, fine...)},
		{"-stand-ins", []string{"-stand-ins", "1000"}},
		{"-tls-cert", append([]string{"-tls-key", "k"}, fine...)},
		{"-tls-cert", append([]string{"-tls-client-ca", "k"}, fine...)},
		{"-tls-key", append([]string{"-tls-cert", "c"}, fine...)},
		{"-tls-cert, -tls-key", append([]string{"-tls-cert", "missing", "-tls-key", "missing"}, fine...)},
		{"-preset", append([]string{"-preset", "x"}, fine...)},
		{"-listen", append([]string{"-listen", "nowhere"}, fine...)},
		{"-metrics-listen", append([]string{"-listen", "127.0.0.1:0", "-metrics-listen", "nowhere"}, fine...)},
		{"is no flag", append([]string{"serve"}, fine...)},
	} {
		err := run(t.Context(), test.args, io.Discard, io.Discard)
		require.ErrorContains(t, err, test.want, "%v", test.args)
	}
}

// running is a picker started as the command is.
type running struct {
	out              *lockedBuffer
	address, metrics string
	stop             context.CancelFunc
	ended            chan error
}

type lockedBuffer struct {
	mu   sync.Mutex
	text []byte
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.text = append(b.text, p...)
	return len(p), nil
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return string(b.text)
}

func runPicker(t *testing.T, args ...string) *running {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	r := &running{out: &lockedBuffer{}, stop: cancel, ended: make(chan error, 1)}
	t.Cleanup(cancel)
	go func() {
		r.ended <- run(ctx, append([]string{"-listen", "127.0.0.1:0", "-metrics-listen", "127.0.0.1:0"}, args...), r.out, r.out)
	}()
	said := regexp.MustCompile(`metrics on (\S+)\s+epp: serving on (\S+)`)
	require.Eventually(t, func() bool {
		found := said.FindStringSubmatch(r.out.String())
		if found != nil {
			r.metrics, r.address = found[1], found[2]
		}
		return found != nil
	}, 10*time.Second, time.Millisecond, "%v", r.out)
	return r
}

func dial(t *testing.T, address string, with credentials.TransportCredentials) *grpc.ClientConn {
	t.Helper()
	connection, err := grpc.NewClient(address, grpc.WithTransportCredentials(with))
	require.NoError(t, err)
	t.Cleanup(func() { _ = connection.Close() }) // closed by then, perhaps
	return connection
}

func TestServesHealthReflectionAndMetrics(t *testing.T) {
	file := filepath.Join(t.TempDir(), "instances.yaml")
	server, err := vllmlike.Start(vllmlike.DefaultConfig())
	require.NoError(t, err)
	defer server.Kill()
	require.NoError(t, os.WriteFile(file, []byte("instances: [{url: '"+server.URL()+"'}]"), 0o600))
	r := runPicker(t, "-instances", file)
	connection := dial(t, r.address, insecure.NewCredentials())
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	well := healthpb.NewHealthClient(connection)
	for _, service := range []string{"", "liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"} {
		require.Eventually(t, func() bool {
			answer, err := well.Check(ctx, &healthpb.HealthCheckRequest{Service: service})
			return err == nil && answer.Status == healthpb.HealthCheckResponse_SERVING
		}, 10*time.Second, 2*time.Millisecond, service)
	}
	_, err = well.Check(ctx, &healthpb.HealthCheckRequest{Service: "other"})
	require.Equal(t, codes.NotFound, status.Code(err))

	reflected, err := reflectionpb.NewServerReflectionClient(connection).ServerReflectionInfo(ctx)
	require.NoError(t, err)
	require.NoError(t, reflected.Send(&reflectionpb.ServerReflectionRequest{MessageRequest: &reflectionpb.ServerReflectionRequest_ListServices{}}))
	list, err := reflected.Recv()
	require.NoError(t, err)
	require.Contains(t, list.String(), "envoy.service.ext_proc.v3.ExternalProcessor")
	require.NoError(t, reflected.CloseSend())

	stream, err := extproc.NewExternalProcessorClient(connection).Process(ctx)
	require.NoError(t, err)
	e := &envoy{t: t, stream: stream, cancel: cancel}
	e.send(requestHeaders(true))
	require.Equal(t, []string{server.Address()}, e.destination(e.receive()))

	client := &http.Client{Transport: &http.Transport{}}
	defer client.CloseIdleConnections()
	response, err := client.Get(r.metrics)
	require.NoError(t, err)
	page, err := io.ReadAll(response.Body)
	require.NoError(t, err)
	require.NoError(t, response.Body.Close())
	require.Contains(t, string(page), `kvpolicy_in_flight_requests{instance="`+server.Address()+`"} 1`)

	// It waits for the stream, and no longer says that it is well.
	watch, err := well.Watch(ctx, &healthpb.HealthCheckRequest{Service: "readiness"})
	require.NoError(t, err)
	first, err := watch.Recv()
	require.NoError(t, err)
	require.Equal(t, healthpb.HealthCheckResponse_SERVING, first.Status)
	r.stop()
	second, err := watch.Recv()
	require.NoError(t, err)
	require.Equal(t, healthpb.HealthCheckResponse_NOT_SERVING, second.Status)
	e.send(responseHeaders(false, ":status", "200"))
	require.NotNil(t, e.receive().GetResponseHeaders())
	e.half()
	cancel() // the watch is a stream too
	require.NoError(t, <-r.ended)
}

func TestStreamsThatDoNotEndAreCutOff(t *testing.T) {
	r := runPicker(t, "-stand-ins", "1", "-drain-timeout", "30ms")
	stream, err := extproc.NewExternalProcessorClient(dial(t, r.address, insecure.NewCredentials())).Process(context.Background())
	require.NoError(t, err)
	e := &envoy{t: t, stream: stream}
	require.Eventually(t, func() bool {
		e.stream, err = extproc.NewExternalProcessorClient(dial(t, r.address, insecure.NewCredentials())).Process(context.Background())
		require.NoError(t, err)
		e.send(requestHeaders(true))
		return e.receive().GetRequestHeaders() != nil
	}, 10*time.Second, 5*time.Millisecond)
	r.stop()
	require.NoError(t, <-r.ended)
	_, err = stream.Recv()
	require.Error(t, err)
}

// authority is a certificate that signs others.
type authority struct {
	t    *testing.T
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	dir  string
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	a := &authority{t: t, dir: t.TempDir()}
	a.cert, a.key = a.sign("authority", nil)
	return a
}

// sign makes a certificate, by itself or by the authority, and writes it and its
// key to files.
func (a *authority) sign(name string, by *authority) (*x509.Certificate, *ecdsa.PrivateKey) {
	a.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(a.t, err)
	template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: by == nil, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}}
	parent, signer := template, key
	if by != nil {
		parent, signer = by.cert, by.key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, &key.PublicKey, signer)
	require.NoError(a.t, err)
	cert, err := x509.ParseCertificate(der)
	require.NoError(a.t, err)
	raw, err := x509.MarshalPKCS8PrivateKey(key)
	require.NoError(a.t, err)
	for file, block := range map[string]*pem.Block{"cert": {Type: "CERTIFICATE", Bytes: der}, "key": {Type: "PRIVATE KEY", Bytes: raw}} {
		require.NoError(a.t, os.WriteFile(a.file(name, file), pem.EncodeToMemory(block), 0o600))
	}
	return cert, key
}

func (a *authority) file(name, kind string) string { return filepath.Join(a.dir, name+"."+kind) }

func (a *authority) pair(name string) tls.Certificate {
	a.t.Helper()
	pair, err := tls.LoadX509KeyPair(a.file(name, "cert"), a.file(name, "key"))
	require.NoError(a.t, err)
	return pair
}

func TestMutualTLS(t *testing.T) {
	ours, others := newAuthority(t), newAuthority(t)
	ours.sign("picker", ours)
	ours.sign("proxy", ours)
	others.sign("stranger", others)
	r := runPicker(t, "-stand-ins", "1", "-tls-cert", ours.file("picker", "cert"), "-tls-key", ours.file("picker", "key"), "-tls-client-ca", ours.file("authority", "cert"))
	roots := x509.NewCertPool()
	roots.AddCert(ours.cert)
	for _, test := range []struct {
		name string
		with credentials.TransportCredentials
		fine bool
	}{
		{"the proxy", credentials.NewTLS(&tls.Config{RootCAs: roots, Certificates: []tls.Certificate{ours.pair("proxy")}}), true},
		{"nobody", credentials.NewTLS(&tls.Config{RootCAs: roots}), false},
		{"a stranger", credentials.NewTLS(&tls.Config{RootCAs: roots, Certificates: []tls.Certificate{others.pair("stranger")}}), false},
		{"plain text", insecure.NewCredentials(), false},
	} {
		t.Run(test.name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
			defer cancel()
			_, err := healthpb.NewHealthClient(dial(t, r.address, test.with)).Check(ctx, &healthpb.HealthCheckRequest{Service: "liveness"})
			if test.fine {
				require.NoError(t, err)
			} else {
				require.Equal(t, codes.Unavailable, status.Code(err), "%v", err)
			}
		})
	}
	r.stop()
	require.NoError(t, <-r.ended)
	err := run(t.Context(), []string{"-stand-ins", "1", "-tls-cert", ours.file("picker", "cert"), "-tls-key", ours.file("picker", "key"),
		"-tls-client-ca", ours.file("picker", "key")}, io.Discard, io.Discard)
	require.ErrorContains(t, err, "-tls-client-ca")
}

// The configuration for Envoy is valid by Envoy's own definitions; whether
// Envoy does with it what it should takes an Envoy.
func TestTheConfigurationForEnvoy(t *testing.T) {
	data, err := os.ReadFile("envoy.yaml")
	require.NoError(t, err)
	var tree any
	require.NoError(t, yaml.Unmarshal(data, &tree))
	data, err = json.Marshal(tree)
	require.NoError(t, err)
	var bootstrap bootstrapv3.Bootstrap
	require.NoError(t, protojson.Unmarshal(data, &bootstrap)) // an unknown field or type is an error
	require.NoError(t, bootstrap.ValidateAll())
	require.Len(t, bootstrap.GetStaticResources().GetClusters(), 2)
}
