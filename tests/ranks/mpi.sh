#!/bin/sh
# mpi.sh: build/mpi/tests/mpi on 1 to 4 ranks, and the examples that make mpi builds, from outside. Ranks share this
# machine.
cd "$(dirname "$0")/../.." || exit 1
name=mpi_cli root=$PWD
. tests/programs/cli_checks.sh
program=lm
. "$root/tests/ranks/mpi_here.sh"
mpi() { timeout 300 "${MPIRUN:-mpirun}" "$@" >out 2>err </dev/null; }
lm=$build/mpi/lm
small="--window 48 --layers 2 --dim 32 --heads 2 --memory 8 --ffn 64 --convolution 3 --dropout 0.1 --threads 1"
for i in 1 2 3 4 5 6 7 8; do cat "$root/tests/ranks/mpi.sh"; done >text

for ranks in 1 2 3 4; do
  mpi -n $ranks "$build/mpi/tests/mpi"
  status=$? counts=$(sed -n 's/^mpi: \([0-9]*\) passed, \([0-9]*\) failed$/\1 \2/p' out)
  check "the program on $ranks ranks ends with 0, not $status" [ "$status" = 0 ]
  [ -z "$counts" ] || passed=$((passed + ${counts% *})) failed=$((failed + ${counts#* }))
  check "the program on $ranks ranks counts its checks" [ -n "$counts" ]
  grep bytes out
done

# the losses of the progress lines and of the last one; whether those of two runs are within a share of 1e-3
losses() {
  sed -n 's/^step *\([0-9]*\).*[0-9]  *\([0-9.]*\) nats.*/\1 \2/p
          s/.*validation loss went from \([0-9.]*\) to \([0-9.]*\) nats.*/\1 \2/p' "$1"
}
near() {
  losses "$1" >a; losses "$2" >b
  [ "$(wc -l <a)" -gt 10 ] &&
    paste a b | awk '{ d = $2 / $4 - 1; if ($1 != $3 || d * d > 1e-6) bad = 1 } END { exit bad }'
}
mpi -n 1 "$lm" train text --steps 200 --out one.st $small
check "one rank needs no --parallel" cp out one
for ranks in 2 3; do
  mpi -n $ranks "$lm" train text --steps 200 --out many.st --parallel data --plot many.svg $small
  check "$ranks ranks end with 0, not $?" [ "$?" = 0 ]
  check "$ranks ranks: the losses of one rank" near out one
  check "$ranks ranks: rank 0 alone talks" [ "$(grep -c 'validation loss' out)" = 1 ]
  check "$ranks ranks: what was sent is counted" \
    grep -q "^rank 0 of $ranks .* and handed [0-9]* bytes to MPI in [1-9]" out
  check "$ranks ranks: one picture" drawn many.svg
  cp many.st first
  [ $ranks = 2 ] || mpi -n $ranks "$lm" train text --steps 200 --out many.st --parallel data $small --threads 2
  check "$ranks ranks: the same bits again, with other threads" same first many.st
  check "$ranks ranks: no file is left over" [ "$(echo many*)" = "many.st many.svg" ]
done

# A rank that is killed ends the others: of ranks in order of their start, the last, or rank 0, which saves.
alive() {
  ps -A -o pid= -o stat= -o args= |
    awk -v program="$lm" '$3 == program && / killed.st/ && $2 !~ /^Z/ { print $1 }' | sort -n
}
killed() { # WHAT WHICH SECONDS ARGUMENTS...: mpirun with them, of which a rank is killed so long after the first save
  what=$1 which=$2 after=$3
  shift 3
  rm -f killed.st
  timeout 300 "${MPIRUN:-mpirun}" "$@" --out killed.st >out 2>err </dev/null &
  job=$!
  tries=0
  until [ -s killed.st ] || [ $tries = 1200 ]; do sleep 0.1; tries=$((tries + 1)); done
  sleep "$after"
  alive | "$which" -n 1 >victim
  check "$what: there is a rank to kill" kill -9 "$(cat victim)"
  wait $job
  status=$?
  check "$what: mpirun ends with an error of its own, not $status" test "$status" -ne 0 -a "$status" -ne 124
  check "$what: something is said" [ -s err ]
  tries=0
  until [ -z "$(alive)" ] || [ $tries = 600 ]; do sleep 0.1; tries=$((tries + 1)); done
  check "$what: no rank is left" [ -z "$(alive)" ]
}
for after in 0 0.02 0.05 0.1 0.2; do
  killed "rank 0 killed while it saves" head $after -n 2 "$lm" train text --steps 100000 --save-every 1 \
    --parallel data $small
  check "the file is whole, $after s after the first" mpi -n 1 "$lm" eval killed.st text --threads 1
done
# the checkpoint goes on
run_3="-n 3 $lm train text --steps 400 --save-every 20 --parallel data $small"
mpi $run_3 --out whole.st
check "a run that is not killed" cp out whole
killed "the last rank killed" tail 0 $run_3
cp killed.st other.st
mpi -n 3 "$lm" train text --resume killed.st --out killed.st --save-every 20 --parallel data --threads 1
check "it goes on" grep -q "is resumed after step" out
check "to the bits of a run that was never killed" same whole.st killed.st
check "what a killed rank had begun to write is removed" [ -z "$(ls -A | grep '^\.luna')" ]
mpi -n 2 "$lm" train text --resume other.st --out other.st --save-every 20 --parallel data --threads 1
sed -n 's/.* to \([0-9.]*\) nats.*/\1/p' whole out >ends
check "on two ranks within rounding" \
  awk 'NR == 1 { a = $1 } NR == 2 { d = $1 / a - 1; good = d * d < 1e-6 } END { exit !good }' ends

# failures end all ranks, with a sentence
says() { # "SENTENCE" "WORDS" ARGUMENTS...: mpirun with them ends with an error and one line that has the words
  sentence=$1 words=$2
  shift 2
  mpi "$@"
  status=$?
  check "$sentence: ends with an error, not $status" test "$status" -ne 0 -a "$status" -ne 124
  check "$sentence: says $words" [ "$(grep -c "^lm: .*$words" err)" = 1 ]
}
base="--steps 20 --out bad.st --parallel data"
says "one rank without the text" "cannot read missing" \
  -n 1 "$lm" train text $base $small : -n 1 "$lm" train missing $base $small
says "a rank with another model" "rank 1" \
  -n 1 "$lm" train text $base $small : -n 1 "$lm" train text $base $small --dim 64
says "a rank with other heads" "rank 1 .* or config" \
  -n 1 "$lm" train text $base $small : -n 1 "$lm" train text $base $small --heads 4
says "ranks without --parallel" "with --parallel data" -n 2 "$lm" train text $small
says "a wrong flag on all" "has no flag --what" -n 3 "$lm" train text --what 1
says "a folder that is not there" "cannot write" -n 2 "$lm" train text $base --out nowhere/bad.st $small
check "nothing was written" [ ! -e bad.st ]

# classifiers: the accuracy and loss of one rank
program=listops
classes() { # PROGRAM ARGUMENTS...
  what=$1
  shift
  mpi -n 1 "$build/mpi/$what" train "$@" --out one.st
  sed -n 's/.*Accuracy on/Accuracy on/p' out >one
  check "$what on one rank" [ -s one ]
  mpi -n 3 "$build/mpi/$what" train "$@" --out many.st --parallel data
  sed -n 's/.*Accuracy on/Accuracy on/p' out >many
  check "$what: as on one rank, $(cat one many)" same one many
}
awk 'BEGIN { srand(4); for (i = 0; i < 200; i++) { good = i % 2; line = ""
  for (k = 0; k < 3 + 12 * rand(); k++) line = line " " (rand() < 0.5 ? "the" : good ? "fine" : "poor")
  print (good ? "yes" : "no") "\t" line " end" } }' >labelled
classes listops --steps 40 --batch 8 --dim 32 --heads 2 --memory 8 --ffn 32 --valid 50 --threads 1
classes classify labelled --steps 40 --batch 8 --dim 32 --heads 2 --memory 8 --ffn 32 --vocab 50 --threads 1

# series: the losses of one rank, and its score of what was held
program=series
sizes="--dim 16 --heads 2 --memory 4 --ffn 32 --batch 5 --layers 2 --steps 30 --patience 0 --threads 1"
awk 'BEGIN { srand(1); print "@data"; for (i = 0; i < 60; i++) { n = 9 + int(rand() * 9)
  for (d = 0; d < 2; d++) { for (t = 0; t < n; t++)
  printf "%s%s", t ? "," : "", rand() < 0.03 ? "?" : (i % 2 ? 1 : -1) * t / n + 0.2 * rand()
    printf ":" } print i % 2 ? "up" : "down" } }' >slopes.ts
awk 'BEGIN { print "wave,other,state"; for (t = 0; t < 400; t++) { f = int(t / 50) % 2
  a += f ? 1.2 : 0.3; printf "%.4f,%.4f,%s\n", sin(a) + f, cos(a), f ? "fast" : "slow" } }' >waves.csv
series_losses() {
  sed -n 's/^step *\([0-9]*\).* loss \([0-9.]*\).*/\1 \2/p
          s/^On held.* \(accuracy\|deviations,\) \([0-9.]*\).*/\1 \2/p' "$1"
}
series_near() {
  series_losses one >a; series_losses out >b
  [ "$(grep -c . a)" = 31 ] &&
    paste -d ' ' a b | awk '{ d = $2 - $4; if ($1 != $3 || d * d > 2e-6) bad = 1 } END { exit bad }'
}
for what in "slopes.ts --held 2" "slopes.ts --held 1 --per-step --window 40" \
  "waves.csv --label state --causal --window 40" "waves.csv --forecast --window 40 --recompute layer" \
  "waves.csv --forecast --window 40 --carry"; do
  mpi -n 1 "$build/mpi/series" train $what --out one.st $sizes
  check "series $what on one rank" cp out one
  mpi -n 3 "$build/mpi/series" train $what --out many.st --parallel data $sizes
  check "series $what: the losses of one rank" series_near
  check "series $what: rank 0 saves the model" mpi -n 1 "$build/mpi/series" eval many.st "${what%% *}"
  rm -f one.st many.st
done

# lra: the curve of one rank, its best model, a training that goes on
program=lra
rm -f one.* many.*
sizes="--settings quick --longest 80 --layers 2 --dim 16 --heads 2 --memory 4 --ffn 16 --batch 4 --steps 20 --threads 1"
sizes="$sizes --dropout 0.1 --attention-dropout 0.1"
awk 'BEGIN { for (i = 0; i < 60; i++) { s = ""
  for (k = 0; k < 5 + i % 9; k++) s = s (i % 2 ? " good" : " bad")
  print i % 2 "\tfilm" s "\tother" substr(s, 1, 9) } }' >pairs
cut -f 1,2 pairs >texts
curve() {
  paste -d , one.csv many.csv |
    awk -F , 'NR > 1 { d = $2 / $6 - 1; if ($1 != $5 || d * d > 1e-9 || $4 != $8) bad = 1 }
              END { exit bad || NR != 21 }'
}
for what in "text --data texts --pooling mean" "text --data texts --pooling cls" \
  "retrieval --data pairs --pooling cls --recompute ffn"; do
  mpi -n 1 "$build/mpi/lra" train $what --out one $sizes
  check "lra $what on one rank" cp one.txt one
  mpi -n 4 "$build/mpi/lra" train $what --out many --parallel data $sizes
  check "lra $what: the curve of one rank" curve
  check "lra $what: its report" sh -c "sed 's/^seconds.*//' one >a; sed 's/^seconds.*//' many.txt | cmp - a"
  check "lra $what: no other file" [ "$(echo many.*)" = "many.csv many.safetensors many.txt" ]
  rm -f many.*
done
for attention in synthesizer reformer; do # dropout masks of their own making
  mpi -n 1 "$build/mpi/lra" train text --data texts --out one $sizes --attention $attention
  mpi -n 3 "$build/mpi/lra" train text --data texts --out many --parallel data $sizes --attention $attention
  check "lra --attention $attention: the curve of one rank" curve
done
mpi -n 3 "$build/mpi/lra" train text --data texts --out whole --parallel data $sizes --save-every 12
cp whole.training on.training && cp whole.safetensors on.safetensors && cp whole.csv on.csv
mpi -n 3 "$build/mpi/lra" train text --data texts --resume on.training --parallel data --threads 1
check "lra goes on" grep -q "is resumed after step 12" out
check "to the bits of a run that was never stopped" same whole.safetensors on.safetensors
check "and its curve" same whole.csv on.csv
finish
