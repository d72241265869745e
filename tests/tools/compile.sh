#!/bin/sh
# compile.sh: compiles luna.h strictly in every language, mode and build switch, looks at the symbols of the objects,
# and compiles the examples and the programs of README and of the guide. Only $CC is needed; other compilers are used
# where they are there. Without TEST_FULL it compiles the cases that find most, by $CC and g++ alone.
cd "$(dirname "$0")/../.." || exit 1
root=$PWD
work=${BUILD:-build}/compile
cc=${CC:-cc}
rm -rf "$work"
mkdir -p "$work"
cd "$work" || exit 1

c_strict="-Wall -Wextra -Wpedantic -Wshadow -Wconversion -Werror -I$root"
cpp_strict="-Wall -Wextra -Wpedantic -Werror -I$root"
id_of() { echo "$1" | tr -c 'a-zA-Z0-9+\n' _; }
have() { command -v "${1%% *}" >/dev/null 2>&1; }

# ---- sources
printf '#define LUNA_IMPLEMENTATION\n#include "luna.h"\n' >implementation.c
printf '#include <stdio.h>\n#include <stdlib.h>\n#include <time.h>\n#define LUNA_IMPLEMENTATION\n#include "luna.h"\n' \
  >after.c
printf '%s\n' '#define LUNA_STATIC' '#define LUNA_IMPLEMENTATION' '#include "luna.h"' \
  'int main(void) { return luna_isa_best() == LUNA_ISA_BEST; }' >static.c
printf '%s\n' '#include "luna.h"' '#define LUNA_BACKEND' '#include "luna.h"' 'luna_isa which(void);' \
  'luna_isa which(void) { return luna_isa_best(); }' \
  'typedef char backend[sizeof(luna_backend) > sizeof(luna_op_functions) && LUNA_OP_COUNT > LUNA_OP_CUSTOM ? 1 : -1];' \
  >declarations.c
printf '#include "luna.h"\nluna_op op;\n' >hidden.c
printf '%s\n' '#include "luna.h"' '#define LUNA_IMPLEMENTATION' '#include "luna.h"' '#include "luna.h"' \
  '#define LUNA_IMPLEMENTATION' '#include "luna.h"' >twice.c
printf '%s\n' '#include "luna.h"' 'luna_isa which(void);' \
  'int main(void) { return luna_isa_best() == LUNA_ISA_BEST || which() != luna_isa_best(); }' >main.c
printf '#include "examples/attentions/attentions.h"\n#include "examples/luna_ops.h"\n' >attentions.c
# a user's macros before it, of letters and words that nothing of ours may be called
for name in A B C D E F G H I J K L M N O P Q R S T U V W X Y Z A_PITCH ADD ALONG BATCH BF16 BLOCK BLOCK_SIZE CHUNK \
    COLUMNS COLS DEBUG DEEP DEPTH DIM DIV FADES FIRST FORGETS FUNCTION HEADS HEIGHT KEYS LAST LAYERS LINEAR MASK \
    MATMUL MAX MIN MUL ORDER PACK PITCH ROWS SCALE SENDS SIZE SLOPES STATE STEPS SUB TALL TAPS THREADS TILE TURNS \
    VOCAB W1 W2 WARP WHOLE WIDE WIDTH; do
  echo "#define $name @"
done >capitals.h
printf '#include "capitals.h"\n#define LUNA_IMPLEMENTATION\n#include "luna.h"\n' >capitals.c
printf '#include "tests/cuda/cuda_host.h"\n#include "capitals.h"\n#include "luna_cuda.cuh"\n' >capitals.cpp
for source in implementation after static declarations twice main attentions; do cp $source.c $source.cpp; done
sed -i.old 's/^luna_isa which(void);/extern "C" luna_isa which(void);/' declarations.cpp main.cpp

for page in README examples/guide; do
  awk -v page="$(basename $page)" '/^```(c|cpp)$/ { kind = substr($0, 4); text = ""; next }
     /^```/ {
       if (kind != "" && text ~ /int main\(/) { printf "%s", text > (page (++count) "." kind) }
       kind = ""; next
     }
     kind != "" { text = text $0 "\n" }' "$root/$page.md"
done

# ---- cases: one a line, "name<TAB>command"; `few` are those that run without TEST_FULL
: >cases
add() { [ -z "$TEST_FULL" ] || few "$@"; }
few() { printf '%s\t%s\n' "$1" "$2" >>cases; }
# skipped NAME: in the full form, a line that says so
skipped() { [ -z "$TEST_FULL" ] || echo "skipped: $1 is not here"; }

version=$($cc --version 2>/dev/null | head -n 1 | cut -d ' ' -f 2-)
opt=-O0
set -- "$cc"
[ -z "$TEST_FULL" ] || { opt=-O2; set -- "$cc" gcc clang; }
for c; do
  have "$c" || { skipped "$c"; continue; }
  [ "$c" = "$cc" ] || [ "$($c --version | head -n 1 | cut -d ' ' -f 2-)" != "$version" ] || continue # gcc is cc
  [ ! -e "$(id_of "$c").c99" ] || continue
  id=$(id_of "$c")
  : >"$id.c99"
  few "$c -std=c99 $opt" "$c -std=c99 $opt $c_strict -c implementation.c -o $id-c99.o"
  add "$c -std=c11" "$c -std=c11 $c_strict -fsyntax-only implementation.c"
  add "$c: stdio.h, stdlib.h, time.h before it" "$c -std=c99 $c_strict -c after.c -o $id-after.o"
  few "$c: LUNA_STATIC" "$c -std=c99 $c_strict static.c -o $id-static -lm -lpthread && ./$id-static"
  few "$c: a user's macros of capital letters" "$c -std=c99 $c_strict -fsyntax-only capitals.c"
  few "$c: declarations alone" "$c -std=c99 $c_strict -c declarations.c -o $id-declarations.o"
  few "$c: without LUNA_BACKEND no backend" \
    "$c -I$root -fsyntax-only hidden.c 2>&1 | grep -q 'error: unknown type name'"
  add "$c: implementation twice in one unit" "$c -std=c99 $c_strict -fsyntax-only twice.c"
  switches="LUNA_NO_TRAIN -DLUNA_NO_STDIO -DLUNA_NO_THREADS -DLUNA_NO_SIMD"
  few "$c: $switches" "$c -std=c99 $c_strict -D$switches -fsyntax-only implementation.c"
  for switch in LUNA_NO_TRAIN LUNA_NO_STDIO LUNA_NO_THREADS LUNA_NO_SIMD LUNA_NO_INT8 LUNA_NO_BF16; do
    add "$c: $switch" "$c -std=c99 $c_strict -D$switch -fsyntax-only implementation.c"
  done
  for example in "$root"/examples/*.c "$root/examples/lra/lra.c"; do
    add "$c: $(basename "$example")" "$c -std=c99 $c_strict -fsyntax-only $example"
  done
done
if [ -z "$TEST_FULL" ] && have g++; then
  few "g++ -std=c++11" "g++ -std=c++11 $cpp_strict -fsyntax-only implementation.cpp"
  few "g++: a user's macros of capital letters before luna_cuda.cuh" \
    "g++ -std=c++17 $cpp_strict -Wno-unused-function -fsyntax-only capitals.cpp"
fi
for c in g++ clang++; do
  have "$c" || { skipped "$c"; continue; }
  add "$c -std=c++11" "$c -std=c++11 -O1 $cpp_strict -c implementation.cpp -o $c-cpp11.o"
  add "$c -std=c++17 -Wold-style-cast" "$c -std=c++17 $cpp_strict -Wold-style-cast -fsyntax-only implementation.cpp"
  add "$c: stdio.h, stdlib.h, time.h before it" "$c -std=c++11 $cpp_strict -fsyntax-only after.cpp"
  add "$c: LUNA_STATIC" "$c -std=c++11 $cpp_strict -fsyntax-only static.cpp"
  add "$c: examples/attentions" "$c -std=c++11 $cpp_strict -fsyntax-only attentions.cpp"
  add "$c: declarations alone" "$c -std=c++11 $cpp_strict -c declarations.cpp -o $c-declarations.o"
done
if have aarch64-linux-gnu-gcc; then
  add "aarch64-linux-gnu-gcc -std=c99" "aarch64-linux-gnu-gcc -std=c99 $c_strict -fsyntax-only implementation.c"
else
  echo "skipped: aarch64-linux-gnu-gcc is not here"
fi
# excess precision: no bits to promise, so no program; the sentence names flags, and with them it compiles
if have i686-linux-gnu-gcc; then
  i686="i686-linux-gnu-gcc -I$root -fsyntax-only implementation.c"
  for x87 in "" "-std=c99" "-msse -mfpmath=sse"; do
    add "i686 $x87: refused" "$i686 $x87 2>&1 | grep -- '#error.*-msse2 -mfpmath=sse'"
  done
  add "i686 with SSE2" "$i686 -std=c99 -msse2 -mfpmath=sse $c_strict"
else
  skipped i686-linux-gnu-gcc
fi
if have s390x-linux-gnu-gcc; then
  s390x="s390x-linux-gnu-gcc -std=c99 -I$root -fsyntax-only implementation.c"
  add "s390x -std=c99: refused" "$s390x 2>&1 | grep -- '#error.*-fexcess-precision=fast'"
  add "s390x -std=c99 -fexcess-precision=fast" "$s390x -fexcess-precision=fast $c_strict"
else
  skipped s390x-linux-gnu-gcc
fi
# Windows and macOS as clang sees them, without their libraries: what luna.h calls is declared here
if have clang; then
  mkdir libc
  printf '#include <stddef.h>\nvoid *malloc(size_t);\nvoid free(void *);\n' >libc/stdlib.h
  printf '%s\n' '#include <stddef.h>' 'void *memcpy(void *, const void *, size_t), *memset(void *, int, size_t);' \
    'void *memmove(void *, const void *, size_t), *memchr(const void *, int, size_t);' \
    'int memcmp(const void *, const void *, size_t), strcmp(const char *, const char *);' \
    'int strncmp(const char *, const char *, size_t);' 'size_t strlen(const char *);' \
    'char *strstr(const char *, const char *), *strchr(const char *, int), *strrchr(const char *, int);' >libc/string.h
  printf '%s\n' '#define INFINITY __builtin_inff()' '#define NAN __builtin_nanf("")' \
    '#define isnan(x) __builtin_isnan(x)' '#define isfinite(x) __builtin_isfinite(x)' \
    'float sqrtf(float), fabsf(float);' \
    'double sqrt(double), fabs(double), floor(double), exp(double), ldexp(double, int), log(double);' \
    'double sin(double), cos(double), pow(double, double), ceil(double);' >libc/math.h
  :
fi
for c in x86_64-w64-mingw32-gcc; do
  have "$c" || { skipped "$c"; continue; }
  simd="-mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx2 -mfma -mxsave"
  add "$c: the way of Visual C++" \
    "$c -std=c99 -O1 -Wall -Wextra -Werror -DLI_MSVC -D_M_X64 $simd -I$root -fsyntax-only implementation.c"
  for example in "$root"/examples/*.c "$root/examples/lra/lra.c"; do
    add "$c: $(basename "$example")" \
      "$c -std=c99 -O1 -Wall -Wextra -Werror -I$root $example -o $(basename "$example").exe"
  done
done
# the public part is the one that tests/tools/api.txt lists and README's Changes names, and a change to it is seen
if have python3; then
  few "the public part is that of tests/tools/api.txt and of Changes" "CC='$cc' python3 $root/tests/tools/api.py"
  mkdir changed && cp "$root/luna_cuda.cuh" changed
  sed 's/^LUNA_API int luna_version(void);/LUNA_API long luna_version(void);/' "$root/luna.h" >changed/luna.h
  few "another prototype is noticed" \
    "CC='$cc' python3 $root/tests/tools/api.py changed | grep 'added: function long luna_version(void)'"
else
  echo "skipped: the public part is not compared: python3 is not here"
fi
c_warn="-Wall -Wextra -Wpedantic -Werror"
for program in README*.c guide*.c guide*.cpp; do
  [ -e "$program" ] || continue
  case $program in
    README*) few "$program" "$cc -std=c99 -fsyntax-only -Wall -Wextra -Wpedantic -Werror -I$root $program" ;;
    *.cpp) have g++ && add "the guide: $program" "g++ -std=c++11 -fsyntax-only $cpp_strict $program" ;;
    *) add "the guide: $program" "$cc -std=c99 -fsyntax-only $c_warn -I$root -I$root/examples $program" ;;
  esac
done

# ---- run them, as many at a time as there are cores
jobs=$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
count=$(awk 'END { print NR }' cases)
worker() {
  for number in $(seq "$1" "$jobs" "$count"); do
    command=$(sed -n "${number}p" cases | cut -f 2)
    if sh -c "$command" >"log$number" 2>&1; then : >"passed$number"; fi
  done
}
for first in $(seq 1 "$jobs"); do worker "$first" & done
wait

passed=0 failed=0
good() { passed=$((passed + 1)); }
bad() { failed=$((failed + 1)); echo "failed: $*"; }
for number in $(seq 1 "$count"); do
  if [ -e "passed$number" ]; then
    good
  else
    bad "$(sed -n "${number}p" cases | tr '\t' '\n')"
    head -n 20 "log$number"
  fi
done
[ -e README1.c ] || bad "README has no program to compile"
[ -e guide1.c ] || bad "the guide has no program to compile"

# ---- what the objects hold
symbols() { nm "$@" 2>/dev/null | awk 'NF >= 3 && $(NF - 1) ~ /[A-TV-Z]/ { print $NF }' | sed 's/^_//'; }
wanted() { nm -u "$@" 2>/dev/null | awk '{ print $NF }' | sed 's/^_//;s/@.*//'; }
for object in *-c99.o *-stream.o *-cpp11.o; do
  [ -e "$object" ] || continue
  foreign=$(symbols -g "$object" | grep -v '^luna_')
  if [ -n "$(symbols -g "$object")" ] && [ -z "$foreign" ]; then good
  else bad "$object has external symbols that do not start with luna_:" $foreign; fi
done
# no state outside contexts, but the word that keeps which instruction sets there are
for object in *-c99.o; do
  [ -e "$object" ] || continue
  state=$(nm -f sysv "$object" 2>/dev/null | awk -F '|' '$NF ~ /^ *[.](data|bss|tbss|tdata)$/ { print $1 }')
  if [ "$(echo "$state" | grep -c .)" -le 1 ]; then good
  else bad "$object has more than one mutable global:" $state; fi
done
link() {                                                 # two units with declarations, one with the implementation
  if "$@" -lm -lpthread -o link >link.log 2>&1 && ./link; then good; else bad "two units linked: $*"; cat link.log; fi
}
for c in "$cc" gcc clang; do
  id=$(id_of "$c")
  [ -e "$id-c99.o" ] && link $c -I"$root" main.c "$id-declarations.o" "$id-c99.o"
done
for c in g++ clang++; do
  [ -e "$c-cpp11.o" ] && link $c -std=c++11 -I"$root" main.cpp "$c-declarations.o" "$c-cpp11.o"
done
echo "compile: $passed passed, $failed failed"
[ "$failed" = 0 ]
