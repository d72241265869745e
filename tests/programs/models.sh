#!/bin/sh
# models.sh: the small models of examples/models from outside: each says something right.
# Needs $BUILD/lm, classify, series, export, summary, lra and mcu/models.
cd "$(dirname "$0")/../.." || exit 1
root=$PWD
models=$root/examples/models
mcu=$root/examples/mcu
name=models_sh
. tests/programs/cli_checks.sh

program=summary
for model in english motions sentiment pathfinder; do
  check "$model is stored in 8 bits" sh -c "'$build/summary' '$models/$model.safetensors' | grep -q ' I8 '"
done
check "they take 300 KB at most" [ "$(cat "$models"/*.safetensors | wc -c)" -le 300000 ]
check "that of Pathfinder 100 KB at most" [ "$(wc -c <"$models/pathfinder.safetensors")" -le 102400 ]

program=lm
check "English is written" run generate "$models/english.safetensors" --prompt "The " --count 600 --temperature 0.5
# of its words, without names in capitals, most are among these
check "of common words" sh -c "tr 'A-Z' 'a-z' <out | tr -cs 'a-z' '\n' | grep -c -x -E \
  'the|and|to|i|of|my|a|you|that|in|is|not|for|with|me|it|be|this|his|he|your|but|have|as|him|so|will|what|her|by|all' |
  awk '{ exit !(\$1 >= 20) }'"

program=classify
printf '%s\n' "a wonderful film, great acting and a beautiful story, one of the best i have seen" \
  "the worst movie ever, boring, stupid and a complete waste of time" >reviews
check "feelings are told" run predict "$models/sentiment.safetensors" reviews
check "rightly" [ "$(cut -f 1 out | tr '\n' ' ')" = "positive negative " ]

# pictures of a seed that it has not seen: 11 of 16 at least, where chance gets 8
program=lra
right=0
for sample in 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15; do
  run draw "$models/pathfinder.safetensors" --data-seed 77 --sample $sample --plot slots.svg
  share=$(sed -n 's/.*label [01], to which the model gives \([0-9]*\)%.*/\1/p' slots.svg)
  [ "${share:-0}" -gt 50 ] && right=$((right + 1))
done
check "contours are followed, in $right of 16 pictures" [ "$right" -ge 11 ]

# a watch at rest: six numbers, ten seconds long, as a case of the format that the model learnt from
program=series
series() { awk -v c="$1" -v n=100 'BEGIN { for (t = 0; t < n; t++) printf "%s%s", c, t < n - 1 ? "," : "" }'; }
{ printf '%s\n' '@problemName Rest' '@univariate false' '@dimensions 6' \
    '@classLabel true Standing Running Walking Badminton' '@data'
  for x in 0.07 0.39 -0.11 0.02 -0.03 0.01; do printf '%s:' "$(series $x)"; done; echo Standing; } >rest.ts
check "motions are told" run eval "$models/motions.safetensors" rest.ts
check "rest is standing" awk '/accuracy/ { sub(/.*accuracy /, ""); exit !($1 + 0 > 90) }' out
program=export
check "and exported" run "$models/motions.safetensors" --out detector
check "of classes with names" grep -q '0 is Standing, 1 is Running, 2 is Walking, 3 is Badminton' detector.h
check "on microcontrollers, of those that qemu has here" sh -c "BUILD='$build' sh '$mcu/mcu.sh' motions >out"
check "what a watch sees is found" \
  grep -q 'line on: 5: Standing, 48: Walking, 106: Running, 166: Badminton, 228: Standing$' out
finish
