#!/bin/sh
# install.sh: what the README says of installing: make install and pkg-config, its CMake and its Meson lines; and the
# programs of the guide, linked so. What is not here is named and left out. CMAKE, MESON, PKG_CONFIG: the programs.
cd "$(dirname "$0")/.." || exit 1
root=$PWD
build=${BUILD:-build}
case $build in /*) ;; *) build=$PWD/$build ;; esac
work=$build/install
cc=${CC:-cc}
rm -rf "$work"
mkdir -p "$work/project"

passed=0 failed=0
check() {                                                # a sentence, then a command that should succeed
  sentence=$1
  shift
  if "$@" >"$work/out" 2>&1; then passed=$((passed + 1)); return; fi
  failed=$((failed + 1))
  echo "failed: $sentence"
  sed 's/^/    /' "$work/out" | tail -n 12
}
have() { command -v "$1" >/dev/null 2>&1 || { echo "skipped: $1 is not here"; return 1; }; }
block() {
  awk -v kind="$1" '$0 == "```" kind { inside = 1; next } /^```/ { if (inside) exit } inside' "$root/README.md"
}

# the README's first program, as one that only includes luna.h
block c | grep -v '^#define LUNA_IMPLEMENTATION' >"$work/project/main.c"
printf '#define LUNA_IMPLEMENTATION\n#include "luna.h"\n' >"$work/project/luna.c"
cp luna.h "$work/project"

# ---- make install, into a staging folder as packagers do, and into a prefix
check "make install" make -s install BUILD="$build" PREFIX="$work/prefix"
check "make install DESTDIR" make -s install BUILD="$build" DESTDIR="$work/stage" PREFIX=/usr
check "the same files" \
  [ "$(cd "$work/prefix" && find . -type f | sort)" = "$(cd "$work/stage/usr" && find . -type f | sort)" ]
check "luna.pc names the prefix" grep -q '^prefix=/usr$' "$work/stage/usr/lib/pkgconfig/luna.pc"
version=$(sed -n 's/^#define LUNA_VERSION "\(.*\)"/\1/p' luna.h)
if have "${PKG_CONFIG:-pkg-config}"; then
  pkg() { PKG_CONFIG_PATH=$work/prefix/lib/pkgconfig "${PKG_CONFIG:-pkg-config}" "$@" luna; }
  check "pkg-config knows the version" [ "$(pkg --modversion)" = "$version" ]
  flags=$(pkg --cflags --libs)
else
  flags="-I$work/prefix/include -L$work/prefix/lib -lluna -lm -lpthread"
fi
check "a program links the library" $cc "$work/project/main.c" $flags -o "$work/main"
check "and runs" "$work/main"

# ---- the programs of the guide and, with TEST_FULL, of README run, in their order: some read what others wrote
mkdir "$work/run"
awk '/^```c$/ { inside = 1; text = ""; next }
     /^```/ {
       if (inside && text ~ /int main\(/) printf "%s", text > (folder "/program" 10 + count++ ".c")
       inside = 0; next
     }
     inside && !/^#define LUNA_IMPLEMENTATION/ { text = text $0 "\n" }' folder="$work/run" \
  ${TEST_FULL:+"$root/README.md"} "$root/examples/guide.md"
awk 'BEGIN {
  split("the moon and sun goes round a day , with night", w); split("good bad", label); split("splendid dreadful", own)
  for (i = 0; i < 400; i++) {
    line = label[i % 2 + 1] "\t"
    for (k = 0; k < 6 + i * 7 % 20; k++) {
      r = (r * 5 + i + k) % 997; line = line (k == i % 6 ? own[i % 2 + 1] : w[r % 10 + 1]) " "
    }
    print line
  }
}' >"$work/run/mine.tsv"
cd "$work/run" || exit 1
for program in program*.c; do
  check "$program is compiled" $cc -std=c99 -Wall -Wextra -Werror "$program" $flags -o "${program%.c}"
  check "$program runs" "./${program%.c}"
done
ask=$(grep -l '"what a film"' program*.c)
asked() { "./${ask%.c}" "a splendid day" | grep -q '^good: [5-9][0-9]\.\|^good: 100'; }
check "it has learnt from a file" asked
[ ! -x "$build/classify" ] || check "build/classify reads its model" "$build/classify" eval mine.safetensors mine.tsv
cd "$root" || exit 1

# ---- CMake and Meson
if have "${CMAKE:-cmake}"; then
  block cmake >"$work/project/CMakeLists.txt"
  check "cmake configures" env CC="$cc" "${CMAKE:-cmake}" -S "$work/project" -B "$work/cmake" -DCMAKE_BUILD_TYPE=Debug
  check "cmake builds" "${CMAKE:-cmake}" --build "$work/cmake"
  check "its program runs" "$work/cmake/main"
fi
if have "${MESON:-meson}" && have ninja; then
  block meson >"$work/project/meson.build"
  check "meson configures" env CC="$cc" "${MESON:-meson}" setup --buildtype=debug "$work/meson" "$work/project"
  check "meson builds" "${MESON:-meson}" compile -C "$work/meson"
  check "its program runs" "$work/meson/main"
fi
echo "install: $passed passed, $failed failed"
[ "$failed" = 0 ]
