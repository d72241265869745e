#!/bin/sh
# Example:
#   models.sh data folder
#
# Makes the small models beside this script again, from the files in DATA, in FOLDER. It takes some minutes, and three
# quarters of an hour for Pathfinder.
#
#   english.safetensors     bytes of English: build/lm generate; 2 layers of 40 dimensions, a memory that forgets
#   motions.safetensors     standing, running, walking or badminton, at each tenth of a second, from three numbers of a
#                           watch's accelerometer and three of its gyroscope, in the order, units and axes of the
#                           archive's BasicMotions: build/series predict, build/export
#   sentiment.safetensors   negative or positive: build/classify predict
#   pathfinder.safetensors  whether one contour joins two discs, in the Long Range Arena's easy pictures: build/lra eval
#
# DATA has shakespeare.txt, BasicMotions.train.ts and imdb.tsv, a line "0 or 1, a tab, a review"; examples/guide.md says
# where they come from ("Data sets"). All are stored in 8 bits. On one instruction set the same commands give the same
# bytes: those beside this script are of AVX-512. The guide says how well each does on held-out data.
build=${BUILD:-build} data=$1 out=$2
[ "$1" != --help ] && [ "$1" != -h ] || { sed -n '2,19s/^# \{0,1\}//p' "$0"; exit 0; }
[ -d "$data" ] && [ -n "$out" ] || { sed -n '2,19s/^# \{0,1\}//p' "$0" >&2; exit 2; }
mkdir -p "$out" && set -e

"$build/lm" train "$data/shakespeare.txt" --dim 40 --ffn 96 --memory 12 --batch 8 --steps 12000 \
  --out "$out/english.float"

"$build/series" train "$data/BasicMotions.train.ts" --per-step yes --causal yes --held 1 --dim 24 --ffn 48 \
  --out "$out/motions.float"

# every tenth pair of lines is kept to measure on, a pair since labels may take turns
awk -F '\t' 'NR % 20 >= 2 { print ($1 ? "positive" : "negative") "\t" $2 }' "$data/imdb.tsv" >"$out/learnt.tsv"
awk -F '\t' 'NR % 20 < 2 { print ($1 ? "positive" : "negative") "\t" $2 }' "$data/imdb.tsv" >"$out/kept.tsv"
"$build/classify" train "$out/learnt.tsv" --vocab 2000 --dim 32 --ffn 64 --memory 8 --steps 3000 \
  --out "$out/sentiment.float"

for name in english motions sentiment; do
  "$build/summary" --quantize "$out/$name.float" "$out/$name.safetensors"
done
"$build/classify" eval "$out/sentiment.safetensors" "$out/kept.tsv"

# a tenth of the dark pixels at first, then whole pictures
few="--settings quick --difficulty easy --dim 48 --pixels number --positions coordinates --pooling mean --segment 1"
few="$few --segment-for 1 --batch 8 --lr 1e-3 --seed 2 --save-every 500"
"$build/lra" train pathfinder $few --dark 0.1 --warmup 500 --decay constant --steps 60000 --validations 4 \
  --out "$out/pathfinder.few"
"$build/lra" train pathfinder $few --begin "$out/pathfinder.few.training" --warmup 200 --decay cosine --steps 5000 \
  --validations 10 --out "$out/pathfinder.float"
"$build/lra" quantize "$out/pathfinder.float.safetensors" --out "$out/pathfinder.safetensors"
"$build/lra" eval "$out/pathfinder.safetensors" --data-seed 77
