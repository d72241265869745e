#!/bin/sh
# size.sh: object sizes of luna.h (code and constants, bytes) by build switch; for Cortex-M4 where its compiler is there.
cd "$(dirname "$0")/.." || exit 1
root=$PWD
work=${BUILD:-build}/size
cc=${CC:-cc}
arm=arm-none-eabi-gcc
m4="-mcpu=cortex-m4 -mthumb -mfloat-abi=hard -mfpu=fpv4-sp-d16"
mkdir -p "$work"
cd "$work" || exit 1
printf '#define LUNA_IMPLEMENTATION\n#include "luna.h"\n' >luna.c

rows="whole
LUNA_NO_TRAIN
LUNA_NO_STDIO
LUNA_NO_THREADS
LUNA_NO_SIMD
LUNA_NO_TRAIN LUNA_NO_STDIO LUNA_NO_THREADS LUNA_NO_SIMD
LUNA_ONLY_STREAM
LUNA_ONLY_STREAM LUNA_NO_SIMD"

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
