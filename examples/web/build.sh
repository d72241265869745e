#!/bin/sh
# build.sh PAGE.html: compiles page.c with clang for WASM SIMD and puts it, with page.js, engine.js, pieces of luna.h,
# a text to learn and a model of English, into page.html: one file that needs nothing else. Beside it is left
# web/page.wasm, for tests/programs/web.mjs. Debian has what it takes: clang, lld, wasi-libc, libclang-rt-*-dev-wasm32.
here=$(dirname "$0") out=$1 header=$(dirname "$0")/../../luna.h
work=$(dirname "$out")/web
wasm=$work/page.wasm
clang=${CLANG:-clang}
mkdir -p "$work" || exit 1

printf '#include <stdlib.h>\n' >"$work/probe.c"
target='--target=wasm32-wasi -mexec-model=reactor -msimd128'
if ! $clang $target "$work/probe.c" -o "$work/probe.wasm" >"$work/probe.log" 2>&1; then
  rm -f "$out" "$wasm"
  echo "$clang makes no WebAssembly here (Debian: clang lld wasi-libc libclang-rt-14-dev-wasm32): the page is not built"
  exit 0
fi
# -Os trains as fast as -O2 here, in fewer bytes. 2 GB at most: addresses above that would be negative to JavaScript.
$clang $target -Os -Wall -Wextra -I "$here/../.." "$here/page.c" -o "$wasm" \
  -Wl,--gc-sections,--strip-all,--export=malloc,--export=free,--max-memory=2147483648 || exit 1
gzip -9 -n -c "$wasm" | base64 | tr -d '\n' >"$work/page.base64" || exit 1
gzip -9 -n -c "$here/../models/english.safetensors" | base64 | tr -d '\n' >"$work/english.base64" || exit 1

# A line <!-- file NAME --> is replaced by that file, <!-- text --> by the beginning of luna.h, as much as is enough to
# learn, and <!-- luna.h: BEGINNING --> by the definition in luna.h that begins so after its macro, up to its brace.
awk -v here="$here" -v header="$header" -v work="$work" '
  function escaped(s) { gsub(/&/, "\\&amp;", s); gsub(/</, "\\&lt;", s); return s }
  function cat(file,   line) { while ((getline line <file) > 0) print line; close(file) }
  function excerpt(start,   line, bare, out, taking, found) {
    while (!found && (getline line <header) > 0) {
      bare = line
      sub(/^LI_[A-Z]* /, "", bare)
      if (bare != line && index(bare, start) == 1) { taking = 1; out = "" }
      if (!taking) continue
      out = out escaped(line) "\n"
      if (out !~ /{/ && line ~ /;$/) taking = 0          # a declaration
      found = taking && line == "}"
    }
    close(header)
    if (!found) { print "build.sh: luna.h has no \"" start "\"" >"/dev/stderr"; exit bad = 1 }
    printf "<pre class=lines tabindex=0><code>%s</code></pre>\n", out
  }
  function text(   line, size) {
    while (size < 56000 && (getline line <header) > 0) { print line; size += length(line) + 1 }
    close(header)
  }
  /^<!-- luna\.h: .* -->$/ { excerpt(substr($0, 14, length($0) - 17)); next }
  /^<!-- file .* -->$/ { cat(here "/" $3); next }
  /^<!-- text -->$/ { text(); next }
  /^<!-- wasm -->$/ { cat(work "/page.base64"); next }
  /^<!-- english -->$/ { cat(work "/english.base64"); next }
  { print }
  END { exit bad }
' "$here/page.html" >"$out.part" && mv "$out.part" "$out" || exit 1
echo "$out: $(wc -c <"$out" | tr -d ' ') bytes, $(gzip -9 -c "$out" | wc -c | tr -d ' ') by gzip -9"
