#!/bin/sh
# recall.sh: examples/recall.c from outside, in short trainings of few pairs. Needs $BUILD/recall.
cd "$(dirname "$0")/../.." || exit 1
name=recall_sh
. tests/programs/cli_checks.sh
program=recall
short="--pairs 4 --steps 6 --slots 4"

check "all memories" run $short
check "a title, and a row for each memory in their order" \
  [ "$(sed -n '2,$s/ .*//p' out | tr '\n' ' ')" = "memory routed gated published linear softmax " ]
check "a number of parameters and two percentages in each row" awk '
  NR > 2 { good = NF == 4 && $2 > 50000; for (i = 3; i <= 4; i++) good = good && $i >= 0 && $i <= 100 && $i ~ /\.[0-9]$/
    rows += good } END { exit rows != 5 || NR != 7 }' out
cp out all
check "one memory" run $short --memory linear --threads 2
check "it has the numbers that it has beside others, on any number of threads" \
  [ "$(grep '^linear' out)" = "$(grep '^linear' all)" ]
check "two memories, in any order" run $short --memory linear,routed
check "have their rows" [ "$(sed -n '3,$p' out)" = "$(grep '^routed\|^linear' all)" ]
check "more pairs" run --pairs 8 --steps 2 --slots 4 --memory linear
check "are two sizes, twice" [ "$(sed -n '2s/  */ /gp' out)" = "memory parameters 4 pairs 8 pairs 4 pairs 8 pairs" ]
check "another seed" run $short --memory routed --seed 2
check "gives other numbers" [ "$(grep '^routed' out)" != "$(grep '^routed' all)" ]
check "more slots are more parameters" sh -c "'$build/recall' --pairs 4 --steps 1 --slots 8 --memory routed >more &&
  [ \$(awk 'END { print \$2 }' more) -gt \$(awk '/^routed/ { print \$2 }' all) ]"
check "a picture" run $short --memory routed --plot slots.svg
check "is a whole SVG of 40 KB at most" sh -c \
  "[ \"\$(head -c 5 slots.svg)\" = '<svg ' ] && [ \"\$(tail -n 1 slots.svg)\" = '</svg>' ] && \
   [ \$(wc -c <slots.svg) -le 40000 ] && ! grep -q -i -E 'nan|inf' slots.svg"
check "each of 40 tokens goes to two slots in each of 4 heads, and to at least one with some weight" awk '
  /^<g fill/ { groups++; n = gsub(/<path/, ""); bad += n < 1 || n > 2 }
  END { exit bad > 0 || groups != 160 }' slots.svg
named() { grep -c ">$1<" slots.svg; }
check "keys and values have names" [ "$(named 'key [0-9]*') $(named 'value [0-9]*')" = "4 4" ]
check "and questions" [ "$(named 'key [0-9]*?')" -ge 10 ]
refuses "'hash', which is no memory" --memory routed,hash
refuses "'', which is no memory" --memory ,gated
refuses "names no memory" --memory ''
refuses "'route', which is no memory" --memory route
refuses "takes one of these names, not '5': 4 8" --pairs 5
refuses "from 2 to 4096, not '1'" --slots 1
refuses "whole number from 1" --steps 0
refuses "no flag --dim" --dim 32
refuses "one word too many" text
refuses "needs a value" --seed
refuses "which --memory does not name" --memory gated --plot other.svg
refuses "cannot write nowhere/slots.svg" --plot nowhere/slots.svg
check "no other file appeared" [ "$(echo *.svg)" = slots.svg ]
finish
