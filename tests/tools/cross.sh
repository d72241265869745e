#!/bin/sh
# cross.sh: builds the tests that look closest at bits and bytes for other machines and runs them here, emulated where
# they must be. ROWS: these rows alone; TESTS: these tests, of which aarch64:golden
# runs on that row alone. What is not installed is named and skipped; Debian has:
# gcc-*-linux-gnu*, qemu-user, musl-tools, mingw-w64, wine64, wasi-libc, libclang-rt-*-dev-wasm32, lld, nodejs.
cd "$(dirname "$0")/../.." || exit 1
build=${BUILD:-build}/cross
make=${MAKE:-make}
programs=${TESTS:-golden resume checkpoints stream stream_bytes gradients threads int8 bf16}
limit=${LIMIT:-600}                                      # seconds a program

# windows-vc: the way of Visual C++, in luna.h's base chapter, as far as gcc can go it.
# 64-bit offsets: without them readdir of a 32-bit program under qemu fails where a folder's offsets are hashes (ext4).
# name    | compiler                   | flags                              | runner; nothing: this kernel | without
vc="-DLI_MSVC -D_M_X64 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni -mavx2 -mfma -mxsave"
trap="-fsanitize=undefined -fsanitize-undefined-trap-on-error"
table="
s390x     | s390x-linux-gnu-gcc        | -static -DTEST_QUICK=1             | qemu-s390x  |
aarch64   | aarch64-linux-gnu-gcc      | -static -DTEST_QUICK=1             | qemu-aarch64 |
armhf     | arm-linux-gnueabihf-gcc    | -static -DTEST_QUICK=1 -D_FILE_OFFSET_BITS=64 | qemu-arm    |
riscv64   | riscv64-linux-gnu-gcc      | -static -DTEST_QUICK=1             | qemu-riscv64 |
i686      | i686-linux-gnu-gcc         | -static -msse2 -mfpmath=sse $trap |  |
musl      | musl-gcc                   | -static                            |             |
windows   | x86_64-w64-mingw32-gcc     | -static -D__USE_MINGW_ANSI_STDIO=1 | wine        |
windows-vc | x86_64-w64-mingw32-gcc    | -static -D__USE_MINGW_ANSI_STDIO=1 $vc | wine |
wasm      | clang --target=wasm32-wasi | -msimd128                 | node --no-warnings tests/tools/wasi.mjs | threads
"
export WINEDEBUG=-all WINEPREFIX="$PWD/$build/wine"

run_row() {                                              # NAME; the last line: "N passed, N failed", or "skipped: ..."
  line=$(echo "$table" | grep "^$1 ")
  field() { echo "$line" | cut -d '|' -f "$1" | sed 's/^ *//; s/ *$//'; }
  cc=$(field 2) flags=$(field 3) runner=$(field 4) without=$(field 5) targets= built=
  for tool in "${cc%% *}" ${runner%% *}; do
    command -v "$tool" >/dev/null 2>&1 || { echo "skipped: $1: $tool is not here"; return; }
  done
  mkdir -p "$build/$1/tests"
  printf '#include <stdio.h>\n#include <math.h>\nint main(void) { return puts("runs") < 0; }\n' >"$build/$1/probe.c"
  $cc $flags "$build/$1/probe.c" -o "$build/$1/probe.exe" -lm && $runner "$build/$1/probe.exe" ||
    { echo "skipped: $1: $cc has no library here, or its programs do not run"; return; }
  for program in $programs; do
    case $program in "$1":*) program=${program#*:} ;; *:*) continue ;; esac
    [ "$program" = "$without" ] || targets="$targets $build/$1/tests/$program"
  done
  rm -f $targets
  $make -k -s BUILD="$build/$1" CC="$cc" CFLAGS="-O2 $flags" $targets
  for target in $targets; do
    [ ! -e "$target.exe" ] || target=$target.exe
    built="$built $target"
  done
  JOBS=1 BUILD=$build/$1 RUNNER="timeout $limit $runner" sh tests/run.sh $built
}

# ---- as many rows at a time as there are cores
rows=${ROWS:-$(echo "$table" | sed -n 's/ .*|.*//p')}
jobs=${JOBS:-$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)}
mkdir -p "$build"
worker() {
  at=0
  for row in $rows; do
    at=$((at + 1))
    [ $((at % jobs)) = "$1" ] || continue
    start=$(date +%s)
    run_row "$row" >"$build/$row.log" 2>&1
    echo "== $row, $(($(date +%s) - start)) s: $(tail -n 1 "$build/$row.log")"
  done
}
for job in $(seq 0 $((jobs - 1))); do worker "$job" & done
wait

passed=0 failed=0
for row in $rows; do
  counts=$(tail -n 1 "$build/$row.log" | sed -n 's/^\([0-9][0-9]*\) passed, \([0-9][0-9]*\) failed$/\1 \2/p')
  good=${counts% *} bad=${counts#* }
  case $(tail -n 1 "$build/$row.log") in skipped:*) continue ;; esac
  if [ -z "$counts" ]; then
    echo "$row did not end"
    good=0 bad=1
  fi
  [ "$bad" = 0 ] || cat "$build/$row.log"
  passed=$((passed + good)) failed=$((failed + bad))
done
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
