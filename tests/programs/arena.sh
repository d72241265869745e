#!/bin/sh
# arena.sh: examples/arena.c from outside, with small models of short texts: every row of its tables, alone and
# together. Needs $BUILD/arena.
cd "$(dirname "$0")/../.." || exit 1
root=$PWD
name=arena_cli
. tests/programs/cli_checks.sh
program=arena
small="--dim 16 --heads 2 --ffn 16 --threads 2"
rows() { grep -c "^| $1 |" out; } # with this title
numbers() { ! grep -q -w -i -E 'nan|inf' "$1"; }
good() { [ "$(head -c 5 "$1")" = "<svg " ] && [ "$(tail -n 1 "$1")" = "</svg>" ] && numbers "$1" \
  && { ! command -v xmllint || xmllint --noout "$1"; }; }

check "the whole table" run table "$root/luna.h" --window 64 --steps 1 --layers 2 $small --plot a.svg
for title in Transformer Luna-16 Linear.Transformer Reformer Sinkhorn; do
  check "$title, twice" [ "$(rows $title)" = 6 ]
done
for title in Local Linformer Synthesizer BigBird 'Performer, relu as LRA ran it' 'Performer, 256 features' Luna-128 \
  Luna-256 RFA Longformer 'Shared Workspace' ISAB Performer 'RFA, gated' 'Local, two blocks' 'Sparse Transformer' \
  Transformer-XL 'Compressive Transformer'; do
  check "$title" [ "$(rows "$title")" = 3 ]
done
check "its lengths" [ "$(grep -c '| 16 | 32 | 48 | 64 | 256, ' out)" = 6 ]
check "numbers" numbers out
check "no number of the paper, whose lengths are others" sh -c "! grep -q '([0-9]' out"
check "all rows at the longest but the quadratic ones" [ "$(grep -c '256 tokens' err)" = 25 ]
check "the stored scores" grep -q '64: .* steps per second, .* MB of scores' out
check "the plot" good a.svg
check "a bar each, twice" [ "$(grep -c '<rect x=' a.svg)" = 34 ]
printf 'a short text' >short
check "in a short time" run table short --window 64 --seconds 0.6 --steps 1000000 $small
check "no more than it was given, or one step each" awk '/ s in all/ { exit !($4 < 60) }' out

for system in softmax luna performer "rfa gate=true" "local pattern=sliding window=3" sparse longformer \
  "bigbird block=4" reformer "sinkhorn block=8" "synthesizer length=40" workspace "transformer_xl memory=20" \
  "compressive memory=20 compressed=20" isab; do
  causal=no
  [ "$system" = "rfa gate=true" ] && causal=yes
  check "$system alone" run one "$system" short --window 40 --steps 2 --causal $causal $small
  check "$system reports its speed" \
    grep -q "^$system reads 40 tokens at [0-9.]* steps per second in [0-9.]* MB. Its loss is [0-9.]*.$" out
done
cp short luna.h
refuses "overwrite the text" table --plot ./luna.h
check "the text is as it was" same short luna.h
refuses "no such system" one dance short
refuses "no such option" one "rfa dance=3" short
refuses "not a number from 0 to 1000000000: stride" one "sparse stride=2305843009213693952" short
refuses "cannot read missing" table missing
refuses "system file is missing" one

check "Luna's parts" run ablate "$root/luna.h" --steps 1 --layers 1 $small
check "each variant has its row" [ "$(grep -c '^| .* | [0-9.]* | [0-9.]*% | [0-9.]* | [0-9.]* |$' out)" = 10 ]
check "numbers" numbers out
refuses "too short" ablate short
finish
