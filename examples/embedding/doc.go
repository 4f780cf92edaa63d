// Package embedding holds, in a package for each host, what embeds kvpolicy
// there: an adapter to copy, beside stand-ins for the host's own types. The
// host's modules are not imported. docs/embedding.md explains them; its code
// is that of these packages, which a test here holds it to.
package embedding
