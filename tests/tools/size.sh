#!/bin/sh
# size.sh [PART]: bytes of luna.h. Parts, of which all are printed without an argument:
#   chapters   each chapter of the file: a moment when it is asked for alone, else with its object's code too
#   objects    code and constants by build switch; for Cortex-M4 where its compiler is there
#   detector   a detector of 9 numbers a step, 2 outputs, 2 layers of d = 32, l = 16: its weights, its stream's memory
# And --check: whether the detector's program compiles and runs, by $BUILD/luna.o where that is there.
cd "$(dirname "$0")/../.." || exit 1
root=$PWD
build=${BUILD:-build} part=$1
case $build in /*) ;; *) build=$root/$build ;; esac
work=$build/size
cc=${CC:-cc}
arm=arm-none-eabi-gcc
m4="-mcpu=cortex-m4 -mthumb -mfloat-abi=hard -mfpu=fpv4-sp-d16"
mkdir -p "$work"
cd "$work" || exit 1
printf '#define LUNA_IMPLEMENTATION\n#include "luna.h"\n' >luna.c
case $part in
  "" | chapters | objects | detector | --check) ;;
  *) echo "size.sh: there is no part $part; there are chapters, objects and detector" >&2; exit 2 ;;
esac

rows="whole
LUNA_NO_TRAIN
LUNA_NO_STDIO
LUNA_NO_THREADS
LUNA_NO_SIMD
LUNA_NO_TRAIN LUNA_NO_STDIO LUNA_NO_THREADS LUNA_NO_SIMD"

# size of one build into the file $1, or "-" where it does not compile
build() {
  out=$1
  shift
  if "$@" -std=c99 -I"$root" -c luna.c -o "$out.o" 2>/dev/null; then
    ${size:-size} "$out.o" | awk 'NR == 2 { print $1 + $2 }' >"$out"
  else
    echo "-" >"$out"
  fi
}
objects() {
  number=0
  echo "$rows" | while read -r switches; do
    number=$((number + 1))
    flags=$(echo "$switches" | sed 's/whole//;s/LUNA/-DLUNA/g')
    build "$number.Os" $cc -Os $flags &
    build "$number.O2" $cc -O2 $flags &
    if command -v $arm >/dev/null 2>&1; then
      size=arm-none-eabi-size build "$number.m4Os" $arm $m4 -Os $flags
      size=arm-none-eabi-size build "$number.m4O2" $arm $m4 -O2 $flags
    fi
    wait
  done

  machine=$($cc -dumpmachine 2>/dev/null | cut -d - -f 1)
  printf '%-58s %12s %12s' "object size, bytes" "${machine:-here} -Os" "-O2"
  command -v $arm >/dev/null 2>&1 && printf ' %14s %12s' "Cortex-M4 -Os" "-O2" || echo
  echo
  number=0
  echo "$rows" | while read -r switches; do
    number=$((number + 1))
    printf '%-58s %12s %12s' "$switches" "$(cat $number.Os)" "$(cat $number.O2)"
    [ -e "$number.m4Os" ] && printf ' %14s %12s' "$(cat $number.m4Os)" "$(cat $number.m4O2)"
    echo
  done
}

# writes the detector, prints the bytes of its file and of its stream's memory: with this machine's pointers, a little
# more than a Cortex-M4's takes
cat >write.c <<'END'
#define LUNA_IMPLEMENTATION
#include "luna.h"
#include <stdio.h>
static union { double align; char at[1 << 18]; } file;
int main(void) {
  luna_ctx *ctx = luna_open(NULL);
  luna_params *params = luna_params_open(ctx);
  luna_lm model;
  luna_lm_config config = {.features = 9, .outputs = 2, .layers = 2,
    .layer = {.dim = 32, .heads = 4, .ffn = 64, .memory = 16, .convolution = 4, .pre_norm = true}};
  const char *error = luna_error(ctx);
  size_t size = 0, memory = 0;
  if (luna_lm_init(&model, params, &config) == LUNA_OK &&
      luna_save(params, luna_path("detector.safetensors")) == LUNA_OK) {
    FILE *from = fopen("detector.safetensors", "rb");
    size = from ? fread(file.at, 1, sizeof file.at, from) : 0;
    if (from) fclose(from);
    luna_stream_config one = {.chunk = 1}; /* a step at a time, no prefill */
    memory = luna_stream_size(file.at, size, &one, &error);
  }
  if (memory) printf("%lu %lu\n", (unsigned long)size, (unsigned long)memory);
  else fprintf(stderr, "size.sh: %s\n", error);
  luna_close(ctx);
  return memory == 0;
}
END
detector() {
  $cc -std=c99 -O0 -DLUNA_NO_SIMD -I"$root" write.c -o write -lm -lpthread && found=$(./write) || exit 1
  printf '%-58s %12s %12s\n' "a streaming detector, bytes" "weights" "stream"
  printf '%-58s %12s %12s\n\n' "9 numbers, 2 outputs, 2 layers, d = 32, l = 16" "${found% *}" "${found#* }"
}
check() {
  unit=
  [ ! -e "$build/luna.o" ] || unit="-DLI_IMPLEMENTED $build/luna.o"
  $cc -std=c99 -Wall -Wextra -Werror -O0 -I"$root" write.c $unit -o write $CFLAGS -lm -lpthread && found=$(./write) &&
    [ "${found% *}" -gt 10000 ] && [ "${found#* }" -gt 1000 ]
}

# by chapter: bytes of luna.h, and of the object's code, where nm can tell the line that a function begins in
chapters() {
  : >functions
  [ -n "$part" ] || { $cc -std=c99 -O2 -g -I"$root" -c luna.c -o lines.o && nm -S -l lines.o 2>/dev/null |
    sed -n 's/^[0-9a-f]* \([0-9a-f]*\) [TtWw] .*luna\.h:\([0-9]*\).*/\2 \1/p' >functions; }
  LC_ALL=C awk '
  function hex(text,  value, i) {
    for (i = 1; i <= length(text); i++) value = 16 * value + index("0123456789abcdef", substr(text, i, 1)) - 1
    return value
  }
  FILENAME == "functions" { functions++; line[functions] = $1; bytes[functions] = hex($2); next }
  FNR == 1 { order[chapters = 1] = "manual" }
  /^(\/\* |   )>>[a-z]/ {
    tag = $0
    sub(/^.*>>/, "", tag); sub(/[^a-z0-9_].*/, "", tag)
    order[++chapters] = tag
  }
  { source[chapters] += length($0) + 1; chapter_of[FNR] = chapters }
  END {
    for (i = 1; i <= functions; i++) code[chapter_of[line[i]]] += bytes[i]
    printf "%-58s %12s%s\n", "chapter, bytes", "luna.h", functions ? "    code, -O2" : ""
    for (i = 1; i <= chapters; i++) {
      printf "%-58s %12d", order[i], source[i]
      if (functions) printf " %12d", code[i]
      print ""
      all += source[i]
    }
    printf "%-58s %12d\n", "all", all
  }' functions "$root/luna.h"
  echo
}

case $part in
  "") chapters && objects && detector ;;
  --check) check ;;
  *) "$part" ;;
esac
