//go:build tools

// Package tools pins the OpenTofu release that RezusCloud is tested with.
//
// It holds no code: `make tools` builds the program named by the import, and
// go.sum fixes every module it is made of by hash.
package tools

import _ "github.com/opentofu/opentofu/cmd/tofu"
