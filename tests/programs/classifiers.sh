#!/bin/sh
# classifiers.sh: examples/listops.c, classify.c and mnist.c from outside, on small tasks made here. Needs
# $BUILD/listops, classify and mnist.
cd "$(dirname "$0")/../.." || exit 1
name=classifiers
. tests/programs/cli_checks.sh
small="--layers 1 --dim 16 --heads 2 --memory 4 --ffn 32 --batch 16 --lr 0.01 --threads 2"

# what every one of them does: a training that succeeds; then the same again, another seed, and fewer threads
trains() {                                               # the minimum accuracy, then arguments
  minimum=$1
  shift
  check "$* succeeds" run "$@" --out a.safetensors --plot a.svg
  check "plain lines when the output is no terminal" [ "$(grep -c '^step .* loss .* tokens/s .* left$' out)" -ge 10 ]
  check "they tell how well it does" grep -q '^step .* validation AP [0-9.]*%, [0-9.]*% right ' out
  check "each validation once, in the line of its step" awk '/^step .* validation / {
  split($2, of, "/"); wrong += of[1] != n++ * of[2] / 10 } END { exit wrong || n != 11 }' out
  check "the accuracy is beyond $minimum%" beyond "$minimum"
  check "the loss is drawn" drawn a.svg
  check "and nothing else is left" [ "$(echo a.*)" = "a.safetensors a.svg" ]
  run "$@" --out b.safetensors --threads 1
  check "the same seed gives the same model, for any number of threads" same a.safetensors b.safetensors
  run "$@" --out b.safetensors --seed 9
  check "another seed gives another one" differ a.safetensors b.safetensors
}
untouched() {
  check "the old model is as it was" same a.safetensors before
  check "no other file appeared" [ "$(echo *.probe *.tmp* nowhere)" = "*.probe *.tmp* nowhere" ]
  check "--help succeeds" run --help
  check "it names the flags" grep -q -- --pooling out
}
awk 'BEGIN { for (i = 0; i < 300; i++) print "plain text, line " i }' >text
: >empty
mkdir folder

# ---- listops
program=listops
lists="--shortest 4 --longest 9 --depth 2"
trains 30 train $lists --valid 200 --steps 200 $small
check "listops eval succeeds" run eval a.safetensors $lists
check "it gives the accuracy" beyond 30
check "listops write succeeds" run write $lists --count 300
cp out lists
check "as many lines as asked" [ "$(wc -l <lists)" = 300 ]
check "of answers and lists" [ "$(grep -c '^[0-9]	\[\(MIN\|MAX\|MED\|SM\)\( [0-9]\)* \]$' lists)" = 300 ]
check "the answers are right" awk -F '\t' '{
    n = split($2, t, " "); m = n - 2; sum = 0
    for (i = 1; i <= m; i++) { v[i] = t[i + 1]; sum += v[i] }
    for (i = 1; i <= m; i++) for (k = i + 1; k <= m; k++) if (v[k] < v[i]) { h = v[i]; v[i] = v[k]; v[k] = h }
    median = int((v[int((m + 1) / 2)] + v[int(m / 2) + 1]) / 2)
    want = t[1] == "[MIN" ? v[1] : t[1] == "[MAX" ? v[m] : t[1] == "[SM" ? sum % 10 : median
    if (want != $1) exit 1
  }' lists
run write --longest 200 --shortest 100 --count 50
check "deep lists are as long as asked" awk -F '\t' '{ n = split($2, t, " "); if (n < 100 || n > 200) exit 1 }' out
check "a file is learnt from" run train --data lists --steps 2 $small --out b.safetensors
check "and measured" run eval b.safetensors --data lists
sed 's/\[/( ( [/; s/$/ )/' lists >round
cp out plain && run eval b.safetensors --data round
check "round brackets are spaces" [ "$(sed 's/^round/lists/' out)" = "$(cat plain)" ]
{ printf '\357\273\277'; cat lists; } >marked && run eval b.safetensors --data marked
check "a byte order mark is no part of the first line" [ "$(sed 's/^marked/lists/' out)" = "$(cat plain)" ]
for attention in softmax linear linformer; do
  check "--attention $attention" run train $lists --steps 2 $small --out b.safetensors --attention $attention \
    --pooling mean
  check "its model loads" run eval b.safetensors $lists
done
check "lists that eval measures on are not written" \
  sh -c "'$build/listops' eval a.safetensors $lists --count 300 | cut -d : -f 2- >made; cp lists written; \
    '$build/listops' eval a.safetensors --data written | cut -d : -f 2- >file; ! cmp -s made file"
awk 'BEGIN { for (i = 0; i < 200; i++) print (i % 2 ? "good" : "bad") "\ttext " i }' >two_labels
"$build/classify" train two_labels --vocab 15 --steps 1 $small --out two.safetensors >out 2>err
refuses "not a model that listops made" eval two.safetensors
cp a.safetensors before
head -c 300 a.safetensors >cut.safetensors
printf '3\t[MAX 3 1 ]\n4 [MIN 4 5 ]\n' >notab
printf '3\t[MAX 3 1 ]\n4\t[MAX 4 x ]\n' >strange
printf '3\t[MAX 3 1 ]\n' >short
printf '3\t\n' >none
head -c 3000 a.safetensors >bytes
refuses "train, eval or write"
refuses "one word too many" train text
refuses "whole number" train --shortest 0
refuses "too rare" train --shortest 50 --longest 20 --out a.safetensors
refuses "too rare" write --shortest 90 --longest 100 --depth 2
refuses "one of these" train --attention lunar --out a.safetensors
refuses "Luna attention" train --attention softmax --pooling memory --out a.safetensors
refuses "no flag --attention" eval a.safetensors --attention luna
refuses "line 2 is not" train --data notab --out a.safetensors
refuses "line 2 has something" train --data strange --out a.safetensors
refuses "minimum is 10" train --data short --out a.safetensors
refuses "line 1 is not\|line 1 has no" train --data none --out a.safetensors
refuses "line 1 is not" train --data bytes --out a.safetensors
refuses "is empty" train --data empty --out a.safetensors
refuses "cannot read folder" train --data folder --out a.safetensors
refuses "both" train --data lists --out lists
refuses "cannot write" train --out nowhere/a.safetensors
refuses "model file is missing" eval
refuses "[a-z]" eval cut.safetensors
refuses "[a-z]" eval text
refuses "[a-z]" eval folder
untouched

# ---- classify
program=classify
rm -f a.* b.* before
awk 'BEGIN {
  split("moon,earth,sun,the,goes,round,and,a,day,night", w, ",")
  for (i = 0; i < 400; i++) {
    n = 3 + i * 7 % 20; line = i % 3 == 0 ? "good\t" : i % 3 == 1 ? "bad\t" : "so so\t"
    own = i % 3 == 0 ? "Splendid!" : i % 3 == 1 ? "dreadful" : "fair"
    for (k = 0; k < n; k++) { s = s * 5 % 997 + i + k; line = line (k ? " " : "") (k == i % n ? own : w[1 + s % 10]) }
    print line
  }
}' >reviews
trains 80 train reviews --steps 120 $small
check "classify eval succeeds" run eval a.safetensors reviews
check "it gives the accuracy" beyond 80
check "and says what the model has seen" grep -q '^warning: The model was trained on reviews, except for a part' out
head -n 100 reviews >other_reviews
run eval a.safetensors other_reviews
check "of another file it does not" sh -c "! grep -q 'was trained on' out"
cp out unmarked && { printf '\357\273\277'; cat other_reviews; } >marked && mv marked other_reviews
check "a byte order mark is no part of the first label" run eval a.safetensors other_reviews
check "nor of anything else" cmp -s out unmarked
printf '\357\273\277' >mark
refuses "mark is empty" eval a.safetensors mark
printf '%s\n\n%s\n%s' 'the moon and the splendid! earth goes round' 'a dreadful day and the dreadful night' \
  'sun and fair moon goes round a day' >lines
check "classify predict succeeds" "$build/classify" predict a.safetensors <lines
"$build/classify" predict a.safetensors <lines >out 2>err
check "a label and a probability for each line" [ "$(grep -c '^\(good\|bad\|so so\)	[01]\.[0-9]*$' out)" = 4 ]
check "from a file, too" sh -c "'$build/classify' predict a.safetensors lines | cmp - out"
check "they are right" [ "$(sed -n '1p;3p;4p' out | cut -f 1 | tr '\n' ,)" = "good,bad,so so," ]
"$build/classify" predict a.safetensors --top 2 <lines >top 2>err
check "and the next likeliest, together no more than 1" awk -F '\t' 'NF != 4 || $2 + $4 > 1.002 || $2 < $4 { bad = 1 }
  END { exit bad || NR == 0 }' top
check "an input that cannot be read is no end of it" \
  sh -c "! '$build/classify' predict a.safetensors </tmp 2>err && grep -q '^classify: cannot read the input: .' err"
check "no lines, no labels" sh -c "'$build/classify' predict a.safetensors <empty | cmp - empty"
awk '{ print $0 "\r" }' lines >crlf
check "line ends of two bytes are no text" \
  sh -c "'$build/classify' predict a.safetensors <crlf >crlf.out; '$build/classify' predict a.safetensors <lines \
    | cmp - crlf.out"
head -c 20000 /dev/urandom | "$build/classify" predict a.safetensors >out 2>err
check "any bytes can be read" [ $? = 0 ]
awk 'BEGIN { for (i = 0; i < 400; i++) {
  s = (s * 7919 + 104729) % 65521; print (s % 2 ? "heads" : "tails") "\tthrow " i } }' >coins
check "of coins nothing can be learnt" run train coins --steps 2000 $small --patience 1 --out c.safetensors
check "the training ends early, and the best model is kept" \
  grep -q '^The training ends early. The model of step [0-9]* is the best by validation and is kept.$' out
check "in whose line no validation is better" awk '/^step/ && /validation/ { split($2, of, "/")
  sub(".*validation AP ", ""); at[of[1]] = $1 + 0; if (at[of[1]] > most) most = at[of[1]] }
  /^The training ends early/ { exit !(at[$9] == most) }' out
check "long before its steps" awk '/^c.safetensors:/ && $4 < 1900 { found = 1 } END { exit !found }' out
check "with --patience 0 it does not end" run train coins --steps 300 $small --patience 0 --out c.safetensors
check "all steps are made" grep -q '^c.safetensors: Training made 300 steps' out
check "what is saved is as good on these lines as its validation was" awk '
  /^step/ && /% right/ { split($2, of, "/"); sub(/.*%, /, ""); at[of[1]] = $1 + 0; last = of[1] }
  /is the best by validation/ { for (i = 1; i < NF; i++) if ($i == "step") last = $(i + 1) }
  /^c.safetensors/ { sub(/.*held-out samples[^:]*: /, ""); d = $1 - at[last]; good = d < 0.06 && d > -0.06 }
  END { exit !good }' out
awk 'BEGIN { srand(5); split("disk slow login page fine thanks great order late", w, " "); for (i = 0; i < 1500; i++) {
  rare = i % 20 == 7; line = rare ? "alarm" : "ok"; line = line "\t"
  for (k = 0; k < 8; k++) line = line (k ? " " : "") (rare && k == 3 && rand() < 0.9 ? "smoke" : w[1 + int(9 * rand())])
  print line } }' >alarms
for balance in no yes; do
  check "a rare label, balanced: $balance" run train alarms --steps 200 $small --aim precision=0.8 --balance $balance \
    --out rare.safetensors
  check "its log loss is less than the shares of classes have" awk '/^The log loss/ { n++; bad = !($5 + 0 < $NF + 0) }
    END { exit bad || n != 1 }' out
  check "it is ranked, and few of it is said" \
    grep -q "^'alarm' is the label of [0-9] of 1[0-9]* samples. Its average precision is [0-9.]*%, .*%. With so few" out
  check "a threshold is chosen" grep -q '^The threshold is 0.[0-9]* for precision=0.8' out
  check "the model keeps it" sh -c "cut -f 2 alarms | '$build/classify' predict rare.safetensors >found"
  check "as probabilities say that the data have the labels" awk -F '\t' '{ s += $1 == "alarm" ? $2 : 1 - $2
    n += $1 == "alarm" } END { s /= NR; exit !(s > 0.03 && s < 0.08 && n > 30 && n < 110) }' found
done
refuses "--aim takes" train alarms --aim precision --out rare.safetensors
rm -f rare.safetensors
# a model that has learnt nothing may by chance rank a rare label best, with these seeds by far: it is never kept
awk 'BEGIN { x = 7; for (i = 0; i < 1500; i++) { line = ""
  for (k = 0; k < 5; k++) { x = x * 16807 % 2147483647; line = line (k ? " " : "") "word" x % 50 }
  x = x * 16807 % 2147483647; print (x % 23 == 0 ? "rare" : "ok") "\t" line } }' >chance
for seed in 20 22 35; do
  check "labels by chance, seed $seed" run train chance --steps 12 --patience 3 --lr 0.03 --seed $seed \
    --layers 1 --dim 8 --heads 2 --memory 4 --ffn 16 --out c.safetensors
  check "the model of step 0 ranks best" awk '/validation AP/ { sub(/.*validation AP /, ""); at[n++] = $1 + 0 }
    END { for (i = 1; i < n; i++) worse += at[i] >= at[0]; exit worse > 0 || n < 4 }' out
  check "and is not kept" sh -c "grep -q 'The model of step [1-9][0-9]* is the best' out"
done
awk 'NR <= 100' coins >few_coins
run train few_coins --steps 300 $small --patience 1 --out c.safetensors
check "of few samples chance would choose: the last model is kept" \
  sh -c "grep -q '^c.safetensors: Training made 300 steps' out && ! grep -q 'is the best' out"
rm -f c.safetensors
check "bytes as tokens" run train reviews --tokens bytes --longest 60 --steps 3 $small --out b.safetensors
check "the model knows it" run eval b.safetensors reviews
run train reviews --steps 1 $small --out b.safetensors
check "about a tenth of the lines is kept to validate" grep -q 'Accuracy on [34][0-9] held-out samples' out
run train reviews --steps 1 $small --out b.safetensors --seed 7
check "for another seed too" grep -q 'Accuracy on [34][0-9] held-out samples' out
rm -f b.safetensors
cp a.safetensors before
printf 'a\tx\nb\ty\n' >two
awk 'BEGIN { for (i = 0; i < 2000; i++) print i "\ttext" }' >many
awk 'BEGIN { for (i = 0; i < 20; i++) print "same\ttext" }' >one
refuses "train, eval or predict"
refuses "text file is missing" train
refuses "text file is missing" eval a.safetensors
refuses "line 1 is not a label" train text --out a.safetensors
refuses "it takes more" train two --out a.safetensors
refuses "it takes more" train one --out a.safetensors
refuses "more than 1000 labels" train many --out a.safetensors
printf 'a\0b\ttext\n' >zero
refuses "zero byte" train zero --out a.safetensors
refuses "is empty" train empty --out a.safetensors
refuses "cannot read missing" train missing --out a.safetensors
refuses "overwrite the text" train reviews --out reviews
refuses "does not know" eval a.safetensors two
refuses "[a-z]" eval text reviews
refuses "[a-z]" predict cut.safetensors
refuses "[0-9]" train reviews --dim 10 --heads 3 --out a.safetensors
untouched
interrupted '^step.* left$' train reviews --steps 100000 $small --out stopped.safetensors
check "an interrupted training ends well" [ $? = 0 ]
check "it says what it did" grep -q '^The training was stopped at step .* stopped.safetensors' out
check "the model is saved, and has learnt something" run eval stopped.safetensors reviews
check "its accuracy" beyond 50

# ---- mnist
program=mnist
rm -f a.* b.* before
# an awk program that prints octal numbers
bytes() { awk "$1" | sed 's/[0-9][0-9]*/\\0&/g' | tr -d '\n ' >octal; printf '%b' "$(cat octal)"; }
header() { printf '\0\0\010'; printf "$1"; }
pixels='BEGIN { for (i = 0; i < 240; i++) for (y = 0; y < 8; y++) for (x = 0; x < 8; x++) { s = (s * 25 + 71) % 509
  lit = (i % 3 == 0 && y < 3) || (i % 3 == 1 && x < 3) || (i % 3 == 2 && y > 4)
  print lit ? 300 + s % 78 : s % 60 < 8 ? 7 : 30 } }'
{ header '\003\0\0\0\360\0\0\0\010\0\0\0\010'; bytes "$(echo "$pixels" | sed 's/300 + s % 78/377/')"; } >images
{ header '\001\0\0\0\360'; bytes 'BEGIN { for (i = 0; i < 240; i++) print i % 3 }'; } >labels
check "240 images were made" [ "$(wc -c <images) $(wc -c <labels)" = "15376 248" ]
trains 80 train images labels --steps 120 $small
check "mnist eval succeeds" run eval a.safetensors images labels
check "it gives the accuracy" beyond 80
run train images labels --steps 20 $small --out kept.safetensors
check "--recompute layer trains" run train images labels --steps 20 $small --recompute layer --out again.safetensors
check "to the same bits" same kept.safetensors again.safetensors
check "mnist show succeeds" run show a.safetensors images --count 3
check "it draws and reads" \
  [ "$(grep -c '^Image [0-2] shows [0-2], with probability [01]\.' out) $(grep -c '^........$' out)" = "3 24" ]
cp a.safetensors before
head -c 1000 images >cut
{ header '\003\377\377\377\377\377\377\377\377\377\377\377\377'; cat text; } >huge
{ header '\003\0\0\0\0\0\0\0\010\0\0\0\010'; cat text; } >nothing
{ header '\001\0\0\0\010'; printf '\0\1\2\0\1\2\0\1'; } >eight
{ header '\001\0\0\0\360'; bytes 'BEGIN { for (i = 0; i < 240; i++) print i % 5 }'; } >five
{ header '\003\0\0\0\003\0\0\0\001\0\0\0\001'; printf 'abc'; } >three
{ header '\001\0\0\0\003'; printf '\0\1\0'; } >threelabels
printf '\0\0\010\003' >header
refuses "train, eval or show"
refuses "labels file is missing" train images
refuses "images file is missing" eval a.safetensors
refuses "no IDX file of bytes with 3 axes" train labels images --out a.safetensors
refuses "no IDX file of bytes with 1 axes" train images images --out a.safetensors
refuses "no IDX file" train text labels --out a.safetensors
refuses "no IDX file" train header labels --out a.safetensors
refuses "promises" train cut labels --out a.safetensors
refuses "promises 4294967295" train huge labels --out a.safetensors
refuses "promises 0" train nothing labels --out a.safetensors
refuses "240 images, but eight has 8 labels" train images eight --out a.safetensors
refuses "minimum is 6" train three threelabels --out a.safetensors
refuses "is empty" train empty labels --out a.safetensors
refuses "cannot read missing" train images missing --out a.safetensors
refuses "overwrite the labels" train images labels --out labels
refuses "does not know" eval a.safetensors images five
refuses "[a-z]" eval text images labels
refuses "[a-z]" show cut.safetensors images
untouched

finish
