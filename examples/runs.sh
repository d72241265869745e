#!/bin/sh
# Example:
#   runs.sh data folder 'text-luna16-*'
#
# Makes the longer trainings of examples/measurements.md and examples/guide.md:
#
#   runs.sh DATA FOLDER [PATTERN ...]     makes the runs whose names match a pattern, or all
#
# Each line of `runs` below is a name and the command that gives its figures. DATA has imdb.tsv (each line 0 or 1, a tab
# and a review), cifar.bin (gray), shakespeare.txt, Multi30k's train.en and train.de, and the archives' .ts files as
# NAME.train.ts. Each run takes one thread at the lowest priority and leaves FOLDER/NAME.log, whose last line says
# "ended 0". Runs that have ended are left out. Runs that keep checkpoints resume their last one. So the script may be
# stopped and called again, or called twice for two cores. The runs pause while `make bench`, `arena` or `compare`
# measures, which the file /tmp/luna.timing.lock (in TMPDIR) says.
build=${BUILD:-build} data=$1 out=$2 lock=${TMPDIR:-/tmp}/luna.timing.lock
[ "$1" != --help ] && [ "$1" != -h ] || { sed -n '2,15s/^# \{0,1\}//p' "$0"; exit 0; }
[ $# -ge 2 ] && [ -d "$data" ] || { sed -n '2,15s/^# \{0,1\}//p' "$0" >&2; exit 2; }
command -v setsid >/dev/null 2>&1 || { echo "runs.sh: setsid is not here; util-linux has it" >&2; exit 2; }
shift 2
mkdir -p "$out"

quick="--settings quick"
runs() {
  for seed in 1 2; do
    for system in "luna16 luna" "luna128 luna --memory 128" "linear linear" "transformer softmax"; do
      echo "text-${system%% *}-$seed lra train text $quick --data $data/imdb.tsv --attention ${system#* }" \
        "--steps 8000 --warmup 400 --products bf16 --seed $seed --save-every 200"
    done
  done
  for seed in 1 2; do
    for system in "luna16 luna" "transformer softmax"; do
      echo "text-${system%% *}-larger-$seed lra train text $quick --data $data/imdb.tsv --attention ${system#* }" \
        "--layers 4 --dim 128 --ffn 256 --lr 1e-3 --steps 2000 --warmup 200 --products bf16 --seed $seed" \
        "--save-every 100"
    done
  done
  for seed in 1 2; do
    for system in "luna16 luna" "linear linear"; do
      echo "retrieval-${system%% *}-$seed lra train retrieval $quick --data $out/pairs.tsv --attention ${system#* }" \
        "--steps 8000 --warmup 400 --products bf16 --seed $seed --save-every 200"
    done
  done
  for seed in 1 2; do                                      # self-pretraining: what is masked in the reviews, first
    echo "masked-$seed lra pretrain text $quick --data $data/imdb.tsv --steps 8000 --warmup 400 --products bf16" \
      "--seed $seed --save-every 200"
    echo "text-masked-$seed lra train text $quick --data $data/imdb.tsv --begin $out/masked-$seed.safetensors" \
      "--steps 8000 --warmup 400 --products bf16 --seed $seed --save-every 200"
    echo "masked-lists-$seed lra pretrain listops $quick --products bf16 --seed $seed --save-every 50"
    echo "lists-masked-$seed lra train listops $quick --begin $out/masked-lists-$seed.safetensors --products bf16" \
      "--seed $seed --save-every 50"
    echo "lists-$seed lra train listops $quick --products bf16 --seed $seed --save-every 50"
  done
  for seed in 1 2; do
    for system in "luna16 luna" "transformer softmax"; do
      image="lra train image $quick --data $data/cifar.bin --attention ${system#* } --products bf16 --seed $seed"
      image="$image --save-every 200"
      echo "image-${system%% *}-$seed $image --steps 12000 --warmup 600"
      echo "image-${system%% *}-dropout-$seed $image --steps 12000 --warmup 600 --dropout 0.2"
      echo "image-${system%% *}-mirror-$seed $image --steps 12000 --warmup 600 --dropout 0.2 --mirror yes"
      echo "image-${system%% *}-short-$seed $image --steps 3000 --warmup 150 --dropout 0.2 --mirror yes"
    done
  done
  echo "pathfinder-easy-1 lra train pathfinder $quick --difficulty easy --positions grid --growing 0.8 --lr 2e-3" \
    "--warmup 200 --batch 32 --steps 6000 --validations 10 --products bf16 --seed 1 --save-every 200"
  echo "pathfinder-easy-long-1 lra train pathfinder $quick --difficulty easy --positions grid --growing 0.8" \
    "--lr 2e-3 --warmup 200 --batch 32 --steps 24000 --products bf16 --seed 1 --save-every 200"
  number="$quick --difficulty easy --pixels number --decay constant --warmup 1000 --save-every 100"
  for system in "luna16 luna" "transformer softmax"; do   # four seeds each, ended after 300,000 pictures if stuck
    echo "pathfinder-number-${system%% *} lra train pathfinder $number --attention ${system#* } --segment 1" \
      "--steps 15000 --trial 4700 --seeds 1-4 --products bf16"
  done
  echo "pathfinder-number-grid-1 lra train pathfinder $number --segment 1 --segment-for 0.5 --warmup 200 --lr 2e-3" \
    "--batch 8 --steps 40000 --trial 37500 --seed 1"
  for seed in 1 2; do                                      # whole easy pictures from the start
    echo "pathfinder-number-keep-$seed lra train pathfinder $quick --pixels number --positions grid --pooling mean" \
      "--segment 1 --segment-for 1 --warmup 500 --lr 1e-3 --batch 8 --products bf16 --seed $seed --save-every 500" \
      "--difficulty easy --decay constant --steps 80000 --validations 40"
  done
  for seed in 1 2; do                                      # few dark pixels, then whole pictures from there
    few="$quick --pixels number --positions coordinates --pooling mean --segment 1 --segment-for 1 --lr 1e-3 --batch 8"
    few="$few --seed $seed --save-every 500"
    for system in "luna16 luna" "transformer softmax"; do
      name=${system%% *}-$seed
      echo "pathfinder-few-$name lra train pathfinder $few --attention ${system#* } --difficulty easy --dark 0.1" \
        "--warmup 500 --decay constant --steps 80000 --validations 4"
      echo "pathfinder-easy-$name lra train pathfinder $few --attention ${system#* } --difficulty easy" \
        "--begin $out/pathfinder-few-$name.training --warmup 200 --decay cosine --steps 7000 --validations 14"
    done
  done
  deep="$quick --pixels number --positions coordinates --pooling mean --segment 1 --segment-for 1 --batch 8 --layers 4"
  deep="lra train pathfinder $deep --seed 1 --save-every 500"  # the first was stopped at step 40,000
  echo "pathfinder-deep-easy $deep --difficulty easy --dark 0.1 --lr 1e-3 --warmup 500 --decay constant --steps 80000"
  echo "pathfinder-deep-hard $deep --difficulty hard --dark 0.1 --lr 8e-4 --warmup 500 --decay cosine" \
    "--steps 46000 --validations 4 --begin $out/pathfinder-deep-easy.training"
  echo "pathfinder-deep-again $deep --difficulty hard --dark 0.1 --lr 8e-4 --warmup 200 --decay cosine" \
    "--steps 22000 --validations 2 --begin $out/pathfinder-deep-hard.training"
  echo "pathfinder-deep-fresh $deep --difficulty hard --data-seed 2 --dark 0.1 --lr 8e-4 --warmup 200 --decay cosine" \
    "--steps 40000 --validations 2 --begin $out/pathfinder-deep-again.training"
  echo "pathfinder-deep-whole $deep --difficulty hard --data-seed 3 --lr 5e-4 --warmup 200 --decay cosine" \
    "--steps 8000 --validations 2 --begin $out/pathfinder-deep-fresh.training"
  for seed in 1 2; do                                      # what is hidden in half of the pixels, first
    echo "pathfinder-hidden-$seed lra pretrain pathfinder $number --steps 4000 --products bf16 --seed $seed"
    echo "pathfinder-begun-$seed lra train pathfinder $number --begin $out/pathfinder-hidden-$seed.safetensors" \
      "--lr 5e-4 --steps 15000 --products bf16 --seed $seed"
    image="lra train image $quick --data $data/cifar.bin --pixels number --positions coordinates --pooling mean"
    image="$image --mirror yes --shift 4 --layers 4 --batch 16 --dropout 0 --seed $seed --save-every 200"
    for system in "luna16 luna" "transformer softmax"; do  # an eighth of the pixels, a quarter, then whole images
      name=${system%% *}-$seed
      run="$image --attention ${system#* }"
      echo "image-eighth-$name $run --keep 0.125 --lr 1e-3 --warmup 500 --decay constant --steps 14000" \
        "--validations 7"
      echo "image-quarter-$name $run --keep 0.25 --lr 1e-3 --warmup 200 --decay cosine --steps 12000" \
        "--validations 6 --begin $out/image-eighth-$name.training"
      echo "image-whole-$name $run --lr 3e-4 --warmup 100 --decay cosine --steps 1500 --validations 3" \
        "--begin $out/image-quarter-$name.training"
    done
    for system in "luna16 luna" "luna64 luna --memory 64" "transformer softmax"; do  # the first two, with 8 heads
      name=${system%% *}-$seed
      run="$image --attention ${system#* } --heads 8 --lr 5e-4"
      echo "image-heads-eighth-$name $run --keep 0.125 --warmup 500 --decay constant --steps 14000 --validations 7"
      echo "image-heads-quarter-$name $run --keep 0.25 --warmup 200 --decay cosine --steps 12000 --validations 6" \
        "--begin $out/image-heads-eighth-$name.training"
    done
  done
  for seed in 1 2; do
    echo "mlm-begin-$seed mlm pretrain $out/reviews.txt --window 128 --steps 40000 --products bf16 --seed $seed"
    echo "mlm-$seed mlm pretrain $out/reviews.txt --begin $out/mlm-begin-$seed.safetensors --masked 0.3 --window 128" \
      "--steps 40000 --products bf16 --seed $((seed + 2))"
    for rows in 100 1000 10000; do
      echo "mlm-$seed-$rows mlm tune $out/mlm-$seed.safetensors $out/tune.tsv --held $out/test.tsv --rows $rows" \
        "--steps $((rows / 5 + 400)) --lr 3e-3 --products bf16 --seed $seed"
    done
    echo "translate-$seed translate train $data/train.en $data/train.de --products bf16 --seed $seed"
  done
  for fold in 1 2 3 4 5; do
    for forget in no gated; do
      for set in JapaneseVowels PickupGestureWiimoteZ; do
        echo "steps-$set-$forget-$fold series train $data/$set.train.ts --per-step yes --causal yes --held $fold" \
          "--forget $forget"
      done
    done
  done
  for seed in 1 2 3; do
    for system in "gated" "published --forget no" "softmax --attention softmax" "linear --attention linear" \
        "gate --output-gate" "routed16 --forget routed --ffn 582" "routed32 --forget routed --memory 32 --ffn 550"; do
      flags=${system#${system%% *}}
      echo "memory-256-${system%% *}-$seed lm train $data/shakespeare.txt $flags --seed $seed"
      echo "memory-1024-${system%% *}-$seed lm train $data/shakespeare.txt --window 1024 --batch 1 $flags --seed $seed"
      echo "memory-reviews-${system%% *}-$seed lm train $out/excerpt.txt $flags --seed $seed"
    done
    for window in "64 16" "256 4" "1024 1"; do
      for carry in no yes; do
        echo "carry-${window% *}-$carry-$seed lm train $data/shakespeare.txt --window ${window% *}" \
          "--batch ${window#* } --carry $carry --seed $seed"
      done
    done
  done
}

# run NAME PROGRAM FLAG ...: in a process group of its own, which stands still while something is timed
run() {
  name=$1 program=$2 begin=
  shift 2
  tail -n 1 "$out/$name.log" 2>/dev/null | grep -q '^ended 0$' && return
  mkdir "$out/$name.running" 2>/dev/null || ! kill -0 "$(cat "$out/$name.running/process")" 2>/dev/null || return
  echo $$ >"$out/$name.running/process"
  case $program in
    lra) file=$out/$name                                   # of several seeds the last one goes on
      newest=$(ls -t "$file.training" "$file"-[0-9]*.training 2>/dev/null | head -n 1)
      [ -s "$newest" ] && begin="--resume $newest" ;;
    *) file=$out/$name.safetensors ;;
  esac
  setsid sh -c '{ echo 19 >/proc/$$/autogroup; } 2>/dev/null; exec nice -n 19 "$@"' run "$build/$program" "$@" \
    --threads 1 --out "$file" $begin >>"$out/$name.log" 2>&1 </dev/null &      # Linux shares time among sessions first
  child=$!
  trap 'kill -s CONT -- "-$child"; kill -s TERM -- "-$child"; rm -r "$out/$name.running"; exit 1' INT TERM
  while kill -0 "$child" 2>/dev/null; do
    if [ -e "$lock" ]; then kill -s STOP -- "-$child"; else kill -s CONT -- "-$child"; fi 2>/dev/null
    sleep 1
  done
  wait "$child"
  echo "ended $?" >>"$out/$name.log"
  rm -r "$out/$name.running"
}

# every tenth pair of lines, since labels may take turns, is what mlm tune measures on; the others' texts; 3 MB of all
[ -s "$out/test.tsv" ] || awk 'NR % 20 < 2' "$data/imdb.tsv" >"$out/test.tsv"
[ -s "$out/tune.tsv" ] || awk 'NR % 20 >= 2' "$data/imdb.tsv" >"$out/tune.tsv"
[ -s "$out/reviews.txt" ] || cut -f 2 "$out/tune.tsv" >"$out/reviews.txt"
[ -s "$out/excerpt.txt" ] || cut -f 2 "$data/imdb.tsv" | head -c 3000000 >"$out/excerpt.txt"
# both halves of a review, 1, or the first half of one and the second of another, up to 16 before, whatever its label, 0
[ -s "$out/pairs.tsv" ] || LC_ALL=C awk -F '\t' '{ half = int(length($2) / 2); second = substr($2, half + 1)
  print NR % 2 "\t" substr($2, 1, half) "\t" (NR % 2 || NR < 17 ? second : kept[(NR + NR / 2 * 7) % 16])
  kept[NR % 16] = second }' "$data/imdb.tsv" >"$out/pairs.tsv"
runs >"$out/runs.$$"
trap 'rm -f "$out/runs.$$"' EXIT
while read -r name command; do
  for pattern in "${@:-*}"; do
    case $name in $pattern) run "$name" $command; break ;; esac
  done
done <"$out/runs.$$"
