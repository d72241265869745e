#!/bin/sh
# mcu.sh: make mcu. Runs exported models on a Cortex-M4F, M7, M0 and two 32-bit RISC-V in qemu, and compares the bits of
# all outputs with this computer's.
#
#   mcu.sh motions    the gesture detector of examples/models watches watch.csv: 24 s, made up, of a watch on one who
#                     stands, walks, runs, plays badminton and stands again
#   mcu.sh            that, and what exports take: a detector (9 numbers a step, 2 outputs, 2 layers of d = 32, l = 16)
#                     in float and in 8 bits, and in 8 bits with a routed memory, for STEPS steps (10000), by clang
#                     and with -O2 for a tenth of them; and the code of a language model of bytes
#
# Counts are of instructions, not of cycles, by qemu -icount shift=0; RAM is the state and the stack. Needs
# $BUILD/export and $BUILD/mcu/models; what else is missing is said and left out.
cd "$(dirname "$0")" || exit 1
mcu=$PWD
build=${BUILD:-build}
case $build in /*) ;; *) build=$mcu/../../$build ;; esac
steps=${STEPS:-10000}
few=$((steps / 10 > 0 ? steps / 10 : 1))
models=$build/mcu/models
work=$build/mcu/boards
rm -rf "$work"
mkdir -p "$work" && cd "$work" || exit 1
failed=0

# fails "SENTENCE": one more failure
fails() { failed=$((failed + 1)); echo "failed: $1"; }
# has PROGRAM: whether it is here; says so once when it is not
has() {
  command -v "$1" >/dev/null 2>&1 && return 0
  [ -e "missing_$1" ] || echo "$1 is not here: what needs it is left out"
  : >"missing_$1"
  return 1
}

# board NAME: how to compile for it and to run it
board() {
  arm="-mthumb -ffunction-sections" libc=/usr/include/newlib start="cortex_m.c -T $mcu/cortex_m.ld"
  gcc=arm-none-eabi-gcc target=arm-none-eabi specs=--specs=nano.specs qemu=qemu-system-arm define=
  enums=-fshort-enums
  case $1 in
    m4f) arch="-mcpu=cortex-m4 $arm -mfloat-abi=hard -mfpu=fpv4-sp-d16" machine="-M mps2-an386" ;;
    m7) arch="-mcpu=cortex-m7 $arm -mfloat-abi=hard -mfpu=fpv5-sp-d16" machine="-M mps2-an500" ;;
    m0) arch="-mcpu=cortex-m0 $arm" machine="-M microbit" define=-DTICK=125 ;;
    rv32*) gcc=riscv64-unknown-elf-gcc target=riscv32-unknown-elf specs=--specs=picolibc.specs
      libc=/usr/lib/picolibc/riscv64-unknown-elf/include start="riscv.c -T $mcu/riscv.ld"
      qemu=qemu-system-riscv32 machine="-M virt -bios none" arch="-march=$1 -ffunction-sections" enums=
      case $1 in *f*) arch="$arch -mabi=ilp32f" ;; *) arch="$arch -mabi=ilp32" ;; esac ;;
  esac
}

# compiled KIND FOLDER COMPILER LEVEL MAIN FLAGS: FOLDER/main.elf and model.o, the model by COMPILER, the rest by gcc
compiled() {
  from=$1 to=$2 level=$4 main=$5 model=$2/model.o
  [ "$3" = gcc ] && cc="$gcc $specs" || cc="clang --target=$target -isystem $libc $enums"
  shift 5
  mkdir -p "$to"
  $cc $arch -$level -std=c99 -Wall -Wextra -Wconversion -c "$from/detector.c" -o "$to/model.o" || return 1
  [ "$main" = main.c ] || model=     # which count.c includes
  $gcc $arch -$level -std=c99 -Wall -Wextra $specs $define "$@" -nostartfiles -Wl,--gc-sections,-z,noexecstack \
    -I"$from" "$mcu/$main" "$mcu/semihosting.c" "$mcu/"$start $model -o "$to/main.elf"
}
# emulated FOLDER FLAGS: runs main.elf there; what it prints is in out
emulated() {
  to=$1
  shift
  (cd "$to" && timeout 900 $qemu $machine -nographic -semihosting-config enable=on,target=native "$@" \
    -kernel main.elf </dev/null >out 2>&1)
}
# sizes OBJECT: bytes of code, of weights
sizes() {
  ${gcc%gcc}size -A "$1" |
    awk '/^\.text/ { code += $2 } /^\.s?(rodata|data)/ { weights += $2 } END { print code + 0, weights + 0 }'
}
printed() { sed -n "s/^$2 //p" "$1/out" | tr -d '\r'; }
# compared KIND FOLDER STEPS: whether the bits are this computer's
compared() {
  head -n "$3" "$1/outputs.txt" >"$2/first.txt"
  cmp -s "$2/first.txt" "$2/outputs.txt" || fails "$2: outputs are not the computer's"
}

ends() {
  echo "failed: $failed"
  [ $failed = 0 ]
  exit
}
boards="m4f m7 m0 rv32imac rv32imafc"

# --- motions
# found FOLDER: "5: Standing, 48: Walking, ...", as the program said it
found() { sed -n 's/^line //p' "$1/out" | tr -d '\r' | paste -s -d , - | sed 's/,/, /g'; }
mkdir -p motions
cp "$mcu/../models/motions.safetensors" motions/model.safetensors
cp "$mcu/watch.csv" motions/model.csv
cp "$mcu/watch.csv" motions/series.csv
"$build/export" motions/model.safetensors --out motions/detector &&
  ${CC:-cc} -std=c99 -Os -Imotions -I"$mcu" "$mcu/main.c" "$mcu/host.c" motions/detector.c -o motions/main &&
  (cd motions && ./main >out) && "$models" stream motions/model || exit 1
printf 'motions: beside luna_stream, '
"$models" compare motions/model.out motions/outputs.txt 0.1 || fails "motions: too far"
echo "what is found, from which line on: $(found motions)"
for name in $boards; do
  board $name
  has "$gcc" && has "$qemu" || continue
  folder=$name.motions
  compiled motions "$folder" gcc Os main.c || { fails "$folder does not compile"; continue; }
  cp motions/series.csv "$folder"
  emulated "$folder" || fails "$folder: qemu"
  compared motions "$folder" 240
  [ "$(found "$folder")" = "$(found motions)" ] || fails "$folder: it finds $(found "$folder")"
  echo "$name: $(found "$folder")"
done
[ "$1" != motions ] || ends

# --- this computer
shape="features=9 outputs=2 memory=16 dim=32 heads=4 ffn=64 convolution=4 pre_norm=1 missing=40"
"$models" write detector "$steps" $shape && "$models" write remembering "$steps" $shape forget=3 output_gate=1 || exit 1
kinds="float eight routed"
for kind in $kinds; do
  mkdir -p $kind
  [ $kind = routed ] && model=remembering || model=detector
  [ $kind = float ] && flag=--weights=f32 || flag=--weights=i8
  "$build/export" $model.safetensors --out $kind/detector $flag || exit 1
  cp $model.csv $kind/series.csv
  ${CC:-cc} -std=c99 -Os -I$kind -I"$mcu" "$mcu/main.c" "$mcu/host.c" $kind/detector.c -o $kind/main || exit 1
  (cd $kind && ./main >out) || fails "$kind: the computer's program"
  printf '%s: beside luna_stream, ' $kind
  "$models" compare $model.out $kind/outputs.txt $([ $kind = float ] && echo 1e-5) || fails "$kind: too far"
done

# --- boards
row='%-10s %-6s %-6s %6s %8s %7s %7s %7s %10s %10s\n'
printf "\n$row" board weights by code weights state stack RAM "a step" "a product"
for name in $boards; do
  board $name
  has "$gcc" && has "$qemu" || continue
  for kind in $kinds; do
    for compiler in gcc clang; do
      [ $compiler = gcc ] || has clang || continue
      for level in Os O2; do
        folder=$name.$kind.$compiler.$level
        compiled $kind "$folder" $compiler $level main.c || { fails "$folder does not compile"; continue; }
        [ $compiler$level = gccOs ] && n=$steps || n=$few
        head -n "$n" $kind/series.csv >"$folder/series.csv"
        emulated "$folder" || fails "$folder: qemu"
        compared $kind "$folder" "$n"
        stack=$(printed "$folder" stack) state=$(printed "$folder" state)
        head -n 100 $kind/series.csv >"$folder/series.csv"
        emulated "$folder" -icount shift=0
        count=$(printed "$folder" "instructions a step, with -icount:")
        each=-
        if [ $compiler = gcc ]; then
          mkdir -p "$folder/count"
          [ $kind = float ] && eight= || eight=-DEIGHT
          compiled $kind "$folder/count" gcc $level count.c $eight && emulated "$folder/count" -icount shift=0 &&
            each=$(tr -d '\r' <"$folder/count/out" | awk '{ printf "%.2f", $1 / 100 }')
        fi
        set -- $(sizes "$folder/model.o")
        printf "$row" $name $kind "$compiler${level#O}" "$1" "$2" "$state" "$stack" $((state + stack)) "$count" "$each"
        [ $kind = routed ] && most=5500 || most=5000
        [ $compiler$level != gccOs ] || { [ "$1" -le $most ] && [ $((state + stack)) -le 12000 ]; } ||
          fails "$folder: more than $most bytes of code or 12000 of RAM"
      done
    done
  done
done

# --- a language model of tokens: code alone
"$models" write words 0 vocab=256 dim=32 heads=4 memory=16 ffn=64 convolution=4 pre_norm=1
board m4f
for kind in float eight; do
  has "$gcc" || continue
  [ $kind = float ] && flag=--weights=f32 || flag=--weights=i8
  mkdir -p words.$kind
  "$build/export" words.safetensors --out words.$kind/detector $flag >out &&
    compiled words.$kind words.$kind gcc Os main.c &&
    printf 'a model of 256 tokens, m4f, %s, gccs: code %s, weights %s\n' $kind $(sizes words.$kind/model.o) ||
    fails "a model of tokens, $kind"
done
ends
