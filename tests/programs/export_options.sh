#!/bin/sh
# export_options.sh: examples/export.c with a small model of every option: its C gives what luna_stream gives, and takes
# the stack that its header says. Needs $BUILD/export and mcu/models.
cd "$(dirname "$0")/../.." || exit 1
root=$PWD
name=export_options
. tests/programs/cli_checks.sh
. "$root/tests/programs/export_checks.sh"

# --- every option: a small model each, in float as luna_stream and in 8 bits near it; without TEST_FULL one of the
# two. With it each is checked for MISRA, in the gate one of the two.
number=0
while read -r fields; do
  number=$((number + 1))
  check "a model of $fields" model "m$number" 300 $small $fields
  for flag in --weights=f32 --weights=i8; do
    [ $flag = --weights=f32 ] && odd=1 || odd=0
    [ -n "$TEST_FULL" ] || [ $((number % 2)) = $odd ] || continue
    check "$fields: $flag" exported "m$number" $flag
    check "$fields: $flag is built" built "m$number" $cc -std=c99 -O0
    [ $flag = --weights=f32 ] && bound=1e-5 || bound=0.2
    check "$fields: $flag is near luna_stream" $models compare "m$number/model.out" "m$number/outputs.txt" $bound
    check "$fields: $flag takes the stack that it says" stack_of "m$number"
    if [ -n "$TEST_FULL" ] && { [ -z "$GATE" ] || [ $((number % 2)) != $odd ]; }; then
      check "$fields: $flag meets the rules of MISRA" $ruled "m$number"
    fi
  done
done <<'END'
vocab=37
vocab=37 positions=2 pre_norm=1 convolution=3 missing=0
vocab=37 positions=3 max_length=300 outputs=5 norm=1
features=3 outputs=3 sharing=1 gated=1 activation=7 pre_norm=1 convolution=4 missing=9
features=3 outputs=1 omega=3 activation=2 memory=16
features=17 outputs=5 omega=4 activation=8 norm=1 pre_norm=1 convolution=1
features=3 outputs=2 dim=12 ffn=20 activation=6 gated=1 convolution=2
features=2 outputs=2 dim=21 heads=3 ffn=15 memory=5 activation=3 positions=2
features=2 outputs=2 dim=18 heads=1 ffn=19 memory=3 activation=4
features=3 outputs=2 horizon=50 pre_norm=1
vocab=37 sharing=1 horizon=5000
vocab=37 horizon=1
vocab=37 forget=2 output_gate=1 pre_norm=1 convolution=4
features=3 outputs=2 forget=2 sharing=1 memory=16
features=3 outputs=2 forget=1 sharing=1
vocab=37 forget=3 output_gate=1 pre_norm=1 convolution=4
features=3 outputs=2 forget=3 sharing=1 memory=16
features=3 outputs=4 forget=3 dim=12 heads=3 memory=2 norm=1
features=9 outputs=2 forget=3 memory=32 dim=32 heads=4 convolution=4 pre_norm=1 missing=9
vocab=37 output_gate=1 forget=1
features=3 outputs=4 output_norm=1 pre_norm=1
END

check "a model of features meets the rules of MISRA" $ruled m10
check "a model of tokens meets the rules of MISRA" $ruled m14

finish
