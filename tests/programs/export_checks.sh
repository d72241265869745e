# What tests/programs/export.sh and export_options.sh share. Included after cli_checks.sh.
program=export
mcu=$root/examples/mcu
cc=${CC:-cc}
models=$build/mcu/models
small="layers=2 memory=4 dim=16 heads=2 ffn=24"
strict="-Wall -Wextra -Wpedantic -Wshadow -Wconversion -Werror"
here() { [ -n "$1" ] && command -v "$1" >/dev/null 2>&1; }

# model FOLDER STEPS FIELDS: a model, a series, what luna_stream makes of it
model() {
  folder=$1 steps=$2
  shift 2
  mkdir -p "$folder"
  $models write "$folder/model" "$steps" "$@" && mv "$folder/model.csv" "$folder/series.csv"
}
# exported FOLDER FLAGS: detector.h, detector.c there
exported() {
  folder=$1
  shift
  run "$folder/model.safetensors" --out "$folder/detector" "$@"
}
# built FOLDER COMPILER FLAGS: runs it, outputs.txt is there
built() {
  folder=$1
  shift
  (cd "$folder" && "$@" $strict -I. -I"$mcu" "$mcu/main.c" "$mcu/host.c" detector.c -o main && ./main >main.log)
}

# --- the stack: what a step leaves changed below its caller, beside what the header says
cat >stack.c <<'END'
#include "detector.h"
#include <stdio.h>
enum { PAINTED = 1 << 16, PAINT = 0xA5 };
static detector_state state;
static volatile unsigned char *area;
__attribute__((noinline)) static void find_area(volatile unsigned char *at) { area = at; }
__attribute__((noinline)) static void paint(void) {
  volatile unsigned char bytes[PAINTED];
  for (int i = 0; i < PAINTED; i++) bytes[i] = PAINT;
  find_area(bytes);
}
__attribute__((noinline)) static int changed(void) {
  int i = 0;
  while (i < PAINTED && area[i] == PAINT) i++;
  return PAINTED - i;
}
int main(void) {
  static float y[DETECTOR_OUTPUTS];
#ifdef DETECTOR_FEATURES
  static float x[DETECTOR_FEATURES];
#else
  int x = 0;
#endif
  paint();
  const int stepped = detector_step(&state, x, y), bytes = changed();
  printf("a step takes %d bytes of stack, the header says %d\n", bytes, DETECTOR_STACK);
  return !(stepped == 1 && bytes > DETECTOR_STACK / 4 && bytes <= DETECTOR_STACK);
}
END
stack_of() { # FOLDER
  for level in -Os -O2; do
    $cc -std=gnu99 $level "-I$1" stack.c "$1/detector.c" -o stack 2>stack.log && ./stack || return 1
  done
}

# --- MISRA C:2012, rules 12.1 (precedence is told by parentheses) and 12.3 (no comma operator), where cppcheck is here.
# Reading the weights takes three quarters of the time, so only the first line of each table of numbers is checked.
misra() { # FOLDER
  awk '{ table = /^  [-0-9][-+.0-9a-f, ]*,$/ } !(table && in_table); { in_table = table }' "$1/detector.c" >"$1/misra.c"
  cppcheck --addon=misra --enable=style -q "$1/misra.c" >misra.log 2>&1
  grep -q 'misra-c2012' misra.log && ! grep -A 1 'misra-c2012-12\.[13]\]' misra.log
}
echo 'int f(int a, int b); int f(int a, int b) { return a * 2 + b; }' >rule.c
if here cppcheck && cppcheck --addon=misra --enable=style -q rule.c 2>&1 | grep -q 'misra-c2012-12\.1'; then
  ruled=misra
else
  echo "cppcheck is not here, or has no MISRA rules: they are not checked"
  ruled=true
fi
