package embedding_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var (
	anyCode = regexp.MustCompile("(?m)^```go$")
	excerpt = regexp.MustCompile("(?ms)^<!-- (\\S+\\.go) -->\n```go\n(.*?)^```$")
	cited   = regexp.MustCompile(`\b(?:Test|Example_)\w+`)
)

func read(t *testing.T, name string) string {
	text, err := os.ReadFile(name)
	require.NoError(t, err)
	return string(text)
}

// The code on the page is that of the packages here, but for its indentation.
func TestTheDocumentationIsTheTestedCode(t *testing.T) {
	page := read(t, "../../docs/embedding.md")
	excerpts := excerpt.FindAllStringSubmatch(page, -1)
	require.NotEmpty(t, excerpts)
	require.Len(t, excerpts, len(anyCode.FindAllString(page, -1)), "each block of code says which file it is from")
	for _, e := range excerpts {
		require.Contains(t, flush(read(t, e[1])), "\n"+flush(e[2]), "%s has changed", e[1])
	}
}

// flush is code without its indentation.
func flush(code string) string {
	lines := strings.Split(code, "\n")
	for at, line := range lines {
		lines[at] = strings.TrimLeft(line, "\t")
	}
	return strings.Join(lines, "\n")
}

// Each adapter is on the page, and so is no test that is not here.
func TestTheDocumentationNamesWhatIsHere(t *testing.T) {
	page := read(t, "../../docs/embedding.md")
	tests := read(t, "example_test.go")
	files, err := filepath.Glob("*/*.go")
	require.NoError(t, err)
	for _, name := range files {
		switch {
		case strings.HasSuffix(name, "_test.go"):
			tests += read(t, name)
		case filepath.Base(name) != "host.go":
			require.Contains(t, page, "(../examples/embedding/"+filepath.ToSlash(name)+")")
		}
	}
	names := cited.FindAllString(page, -1)
	require.NotEmpty(t, names)
	for _, name := range names {
		require.Contains(t, tests, "func "+name+"(")
	}
}
