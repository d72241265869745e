#!/bin/sh
# cli.sh: examples/lm.c from outside: training, writing, measuring, wrong use and interruption. Needs lm, summary.
cd "$(dirname "$0")/../.." || exit 1
name=cli program=lm
. tests/programs/cli_checks.sh
lm() { run "$@"; }

i=0
while [ $i -lt 120 ]; do
  echo "$i: the moon goes round the earth, and the earth goes round the sun, in $((i * 7 % 30)) days"
  i=$((i + 1))
done >text
size=$(wc -c <text)
small="--layers 1 --dim 16 --heads 2 --memory 4 --ffn 32 --window 32 --batch 4 --threads 2"

# ---- it learns, and says so
check "lm train succeeds" lm train text --out a.safetensors --steps 60 $small
check "plain lines when the output is no terminal" [ "$(grep -c '^step ' out)" -ge 10 ]
check "no carriage return in them" sh -c "! grep -q \"$(printf '\r')\" out"
check "a line has nats, bits per byte, speed and the time left" \
  grep -q '^step .* nats .* bits/byte .* tokens/s .* left$' out
check "samples before and after" [ "$(grep -c '^---- A sample .* step\. ' out)" = 2 ]
check "the last line has both validation losses" \
  sh -c "tail -n 1 out | grep -q 'validation loss went from [0-9.]* to [0-9.]* nats'"
check "the first one is near ln 256" \
  sh -c "tail -n 1 out | sed 's/.*went from \([0-9.]*\) to .*/\1/' | awk '{ exit !(\$1 > 5.4 && \$1 < 5.7) }'"
check "validation loss falls" \
  sh -c "tail -n 1 out | sed 's/.*went from \([0-9.]*\) to \([0-9.]*\) nats.*/\1 \2/' |
    awk '{ exit !(\$2 < 0.8 * \$1) }'"
check "the model is there" [ -s a.safetensors ]
check "and nothing beside it" [ "$(echo a.safetensors*)" = a.safetensors ]
lm train text --out b.safetensors --steps 60 $small
check "the same seed gives the same model" same a.safetensors b.safetensors
lm train text --out b.safetensors --steps 60 $small --threads 3
check "so does another number of threads" same a.safetensors b.safetensors
lm train text --out b.safetensors --steps 60 $small --seed 2
check "another seed gives another one" differ a.safetensors b.safetensors
head -c $((size - size / 10)) text >head.text
{ cat head.text; head -c $((size / 10)) text | tr 'a-z' 'b-za'; } >other.text
lm train other.text --out b.safetensors --steps 10 $small
lm train text --out c.safetensors --steps 10 $small
check "the last tenth is not trained on" same b.safetensors c.safetensors
rm -f b.safetensors c.safetensors

# ---- other attentions, to compare with: they train, and do not generate
for attention in softmax linear; do
  check "$attention attention trains" lm train text --attention $attention --out o.safetensors --steps 60 $small
  check "and learns" sh -c "tail -n 1 out | sed 's/.*went from \([0-9.]*\) to \([0-9.]*\) nats.*/\1 \2/' |
    awk '{ exit !(\$2 < 0.8 * \$1) }'"
  check "it has no samples" [ "$(grep -c '^---- ' out)" = 0 ]
  check "and another model than Luna" differ a.safetensors o.safetensors
  refuses "only Luna attention streams" generate o.safetensors
done

# ---- a routed memory, with a gate on its output unless that is refused
check "a routed memory trains" lm train text --forget routed --out r.safetensors --steps 60 --save-every 30 $small
check "and learns" sh -c "tail -n 1 out | sed 's/.*went from \([0-9.]*\) to \([0-9.]*\) nats.*/\1 \2/' |
  awk '{ exit !(\$2 < 0.8 * \$1) }'"
check "its file says so, and that its output has a gate" \
  sh -c "'$build/summary' r.safetensors | grep 'forget routed' | grep -q 'output_gate 1'"
check "it writes" lm generate r.safetensors --count 20 --prompt "the moon"
check "its training is resumed with the gate that it had" lm train text --resume r.safetensors --out r.safetensors
check "the gate can be left out" \
  lm train text --forget routed --output-gate no --out n.safetensors --steps 4 --save-every 2 $small
check "and its file has none" sh -c "! '$build/summary' n.safetensors | grep -q 'output_gate 1'"
check "nor has the training that is resumed" lm train text --resume n.safetensors --out n.safetensors
refuses "layer.memory is 1, outside 2" train text --forget routed --memory 1 --out n.safetensors --steps 1
rm -f o.safetensors

# ---- it writes, and measures
check "lm generate succeeds" lm generate a.safetensors --count 200 --prompt "the moon"
check "it begins with the prompt" grep -q '^the moon' out
check "and writes as many bytes as asked" [ "$(wc -c <out)" = 209 ]
cp out first
lm generate a.safetensors --count 200 --prompt "the moon"
check "the same seed writes the same" same out first
lm generate a.safetensors --count 200 --prompt "the moon" --seed 5
check "another seed something else" differ out first
lm generate a.safetensors --count 50 --top-k 1 && cp out first
lm generate a.safetensors --count 50 --top-k 1 --seed 9
check "--top-k 1 is greedy" same out first
check "an empty prompt is a line break" lm generate a.safetensors --count 10 --prompt ""
check "lm eval succeeds" lm eval a.safetensors text
check "it gives bits per byte" grep -q '[0-9]\.[0-9]* bits per byte' out
cp out first
check "and in 8 bits" lm eval a.safetensors text --weights i8
bits() { sed -n 's/.* loss of \([0-9.]*\) bits per byte.*/\1/p' "$1"; }
check "about as well" \
  sh -c "echo $(bits first) $(bits out) | awk '{ exit !(NF == 2 && \$2 < \$1 + 0.02 && \$2 > \$1 - 0.02) }'"
check "it writes in 8 bits" lm generate a.safetensors --count 20 --prompt "the moon" --weights i8
lm eval a.safetensors text --threads 1
check "the same for any number of threads" same out first
tail -c $((size / 10)) text >tail.text
lm train text --out b.safetensors --steps 60 --carry $small && cp out first
lm eval b.safetensors tail.text --carry
check "a memory that is carried is validated so, as one sequence" [ \
  "$(tail -n 1 first | sed 's/.* to \([0-9.]*\) nats.*/\1/')" = \
  "$(sed 's/.*(\([0-9.]*\) nats).*/\1/' out | awk '{ printf "%.3f", $1 }')" ]
rm b.safetensors
printf 'ab' >two
check "two bytes can be measured" lm eval a.safetensors two
check "lm --help succeeds" lm --help
check "it names the flags" grep -q -- --temperature out
check "with the commands that take them" grep -q -- '--seed N  *train, generate  ' out
check "and the formats of files" grep -q '^  text  *Any file' out
check "lm eval --help succeeds" lm eval --help
check "it names the flags of eval" grep -q -- '--window N' out
check "and no others" sh -c "! grep -q -- --temperature out"
check "-h after other words is the same" sh -c "'$build/lm' eval missing -h | cmp - out"
lm generate a.safetensors --count 50 --seed 5 && cp out first
lm generate a.safetensors --count=50 --seed=5
check "--name=value is --name value" same out first
check "a value may have an equals sign" lm generate a.safetensors --count=5 --prompt=a=b
check "all of it" grep -q '^a=b' out

# ---- products in 16 bits
check "lm train --products bf16 succeeds" lm train text --out h.safetensors --steps 20 --save-every 10 $small \
  --products bf16
check "it learns" \
  sh -c "tail -n 1 out | sed 's/.*went from \([0-9.]*\) to \([0-9.]*\) nats.*/\1 \2/' | awk '{ exit !(\$2 < \$1) }'"

# ---- texts that are short
printf 'a text shorter than any window, but not too short' >short
check "a short text is trained on in shorter windows" lm train short --out short.safetensors --steps 2 $small \
  --window 4096 --save-every 1
check "and it says so" grep -q 'The text is short, so windows have' out
check "the same command goes on" sh -c "'$build/lm' train short --out short.safetensors --steps 4 --save-every 3 \
  $small --window 4096 && '$build/lm' train short --resume short.safetensors --window 4096 \
  | grep -q 'made all its 4 steps'"

# ---- short of memory at any place
short_of_memory train text --out short.safetensors --steps 1 --threads 1 --window 64

# ---- wrong use: exit 2, a sentence, and nothing is overwritten
cp a.safetensors before
: >empty
printf 'tiny' >tiny
head -c 300 text >not.safetensors
head -c 200 a.safetensors >cut.safetensors
mkdir folder
refuses "train, generate or eval"
refuses "no command dance" dance
refuses "text file is missing" train
refuses "model file is missing" generate
refuses "text file is missing" eval a.safetensors
refuses "one word too many" train text text
refuses "no flag --stepz" train text --stepz 3
refuses "no flag --steps" generate a.safetensors --steps 3
refuses "needs a value" train text --steps
refuses "whole number" train text --steps three
refuses "whole number" train text --steps=
refuses "no flag --step;" train text --step=3
refuses "whole number" train text --steps 1.5
refuses "whole number" train text --steps 0 --out a.safetensors
refuses "whole number" train text --steps -5 --out a.safetensors
refuses "whole number" train text --threads 99999999999999999999 --out a.safetensors
refuses "built without CUDA" train text --device cuda --out a.safetensors
refuses "built without MPI" train text --parallel data --out a.safetensors
refuses "takes a number" train text --lr nan --out a.safetensors
refuses "takes a number" generate a.safetensors --temperature -1
refuses "cannot read missing" train missing --out a.safetensors
refuses "cannot read folder" train folder --out a.safetensors
refuses "is empty" train empty --out a.safetensors
refuses "has 4 bytes" train tiny --out a.safetensors
refuses "cannot write" train text --out nowhere/a.safetensors
refuses "cannot write" train text --out folder
refuses "overwrite the text" train text --out text
refuses "overwrite the text" train text --out ./text
ln -s text link 2>/dev/null && refuses "overwrite the text" train text --out link
refuses "both" train text --out b.safetensors --plot a.safetensors --resume ./a.safetensors
if mkfifo pipe 2>/dev/null; then
  refuses "cannot write pipe" train text --out pipe
  refuses "cannot write pipe" train text --plot pipe
  check "the pipe is as it was" [ -p pipe ]
fi
refuses "[0-9]" train text --dim 10 --heads 3 --out a.safetensors
refuses "missing.safetensors" generate missing.safetensors
refuses "[a-z]" generate not.safetensors
refuses "[a-z]" generate cut.safetensors
refuses "[a-z]" generate empty
refuses "[a-z]" generate folder
refuses "[a-z]" eval not.safetensors text
refuses "cannot read missing" eval a.safetensors missing
refuses "is empty" eval a.safetensors empty
check "the old model is as it was" same a.safetensors before
check "so is the text" [ "$(wc -c <text)" = "$size" ]
check "no other file appeared" [ "$(echo *.probe *.tmp* nowhere)" = "*.probe *.tmp* nowhere" ]
if [ -e /dev/full ]; then
  "$build/lm" generate a.safetensors --count 10 >/dev/full 2>err
  check "a full disk is noticed" [ $? = 2 ]
  "$build/lm" eval a.safetensors text >/dev/full 2>err
  check "by what prints a few lines, too" [ $? = 2 ]
  check "which says so" grep -q '^lm: cannot write the output: .' err
  "$build/lm" train text --out full.safetensors --steps 3 $small >/dev/full 2>err
  check "a training does not end for lost lines about it" [ $? = 0 ]
fi

# ---- Ctrl-C saves what has been learnt
interrupted '^step.* left$' train text --out stopped.safetensors --steps 10000 $small # it has taken 500 steps then
check "an interrupted training ends well" [ $? = 0 ]
check "it says what it did" grep -q '^The training was stopped at step .* stopped.safetensors' out
check "the model is saved" lm eval stopped.safetensors text
check "and has learnt something" sh -c "sed 's/.* of \([0-9.]*\) bits.*/\1/' out | awk '{ exit !(\$1 < 6) }'"

# ---- also when Ctrl-C ends the reader of its output
if mkfifo log 2>/dev/null; then
  cat log >out &
  reader=$!
  "$build/lm" train text --out piped.safetensors --steps 100000000 $small >log 2>err &
  pid=$! tries=0
  while ! grep -q '^---- A sample before' out && [ $tries -lt 1200 ]; do
    sleep 0.1 2>/dev/null || sleep 1
    tries=$((tries + 1))
  done
  sleep 1
  kill -STOP $pid
  kill -KILL $reader
  wait $reader 2>/dev/null
  kill -INT $pid
  kill -CONT $pid
  wait $pid
  check "without a reader an interrupted training ends well" [ $? = 0 ]
  check "and the model is saved" lm eval piped.safetensors text
fi

# ---- a training that goes on: killed in the middle, to the same bits as one that was never stopped
long="$small --steps 1500 --dropout 0.1"
lm train text --out whole.safetensors --save-every 1500 $long
"$build/lm" train text --out going.safetensors --save-every 10 $long >out 2>err &
pid=$!
tries=0
while [ ! -e going.safetensors ] && [ $tries -lt 1200 ]; do sleep 0.1 2>/dev/null || sleep 1; tries=$((tries + 1)); done
cp going.safetensors middle.safetensors
kill -KILL $pid
wait $pid 2>/dev/null
check "a checkpoint of a training is a model" lm eval middle.safetensors text
cp middle.safetensors on.safetensors
check "it goes on, into the same file, drawing the loss" \
  lm train text --resume on.safetensors --out on.safetensors --save-every 100 --plot on.svg
check "it says from where" grep -q '^The training of on.safetensors is resumed after step [1-9][0-9]*' out
check "to the same bits" same on.safetensors whole.safetensors
check "the loss is drawn" drawn on.svg
lm train text --out b.safetensors --plot b.svg --profile b.json --steps 40 $small
check "with a point for the start, each tenth and the end" [ "$(tags b.svg circle)" = 11 ]
check "the time of each op is written" grep -q '"op": "FEED_FORWARD", "pass": "backward"' b.json
check "of training steps alone" grep -q '"steps": 40,' b.json
check "or a timeline" lm train text --out b.safetensors --profile b.timeline.json --steps 3 $small
check "of each op" grep -q '"name": "FEED_FORWARD", "cat": "backward", "ph": "X"' b.timeline.json
rm -f b.safetensors b.svg b.json b.timeline.json
# ---- what backward computes again
deep="$small --layers 3 --window 256 --ffn 128 --steps 30 --dropout 0.1"
losses() { sed -n 's/^\(step.*\) [0-9.]*k tokens.*/\1/p; s/.*validation loss went/validation loss went/p' out; }
peak() { sed -n 's/.* s and \([0-9.]*\) MB\. .*/\1/p' "$1"; }
lm train text --out b.safetensors $deep
losses >kept && cp out kept.out
for what in ffn layer; do
  check "--recompute $what trains" lm train text --out c.safetensors --recompute $what $deep
  losses >again
  check "with the same losses" [ "$(cat kept)" = "$(cat again)" ]
  check "in less memory: $(peak kept.out) MB, then $(peak out)" \
    awk "BEGIN { exit !($(peak out) < 0.9 * $(peak kept.out)) }"
  lm eval b.safetensors text && sed 's/^[^ ]* //' out >first
  lm eval c.safetensors text && sed 's/^[^ ]* //' out >second
  check "the same weights" same first second
done
check "a training that goes on may compute again" \
    lm train text --resume middle.safetensors --out b.safetensors --recompute ffn
lm eval b.safetensors text && sed 's/^[^ ]* //' out >first
lm eval whole.safetensors text && sed 's/^[^ ]* //' out >second
check "to the same weights" same first second
rm -f b.safetensors c.safetensors
check "a training that has ended goes on with nothing to do" lm train text --resume on.safetensors --profile b.json
check "and says so" grep -q "^on.safetensors has made all its 1500 steps. This training is finished" out
check "and leaves it" same on.safetensors whole.safetensors
check "it goes on with products in 16 bits" \
  lm train text --resume middle.safetensors --out b.safetensors --products bf16
check "and says so" grep -q 'had products in float32, and goes on in bf16' out
refuses "was 1500 in the training of middle.safetensors" train text --resume middle.safetensors --steps 9
refuses "began with another text" train other.text --resume middle.safetensors
LC_ALL=C sed 's/"lm.device":"cpu"/"lm.device":"cuda"/; s/"lm.lr":"0.005"/"lm.lr":".005"/' middle.safetensors >gpu
refuses "give --device cuda" train text --resume gpu --out b.safetensors
cp middle.safetensors on.safetensors
check "it goes on without --save-every" lm train text --resume on.safetensors --out on.safetensors
check "and is saved as a training" same on.safetensors whole.safetensors
refuses "was 4 in the training of middle.safetensors" train text --resume middle.safetensors --batch 8
refuses "holds no training" train text --resume a.safetensors
refuses "[a-z]" train text --resume missing.safetensors
refuses "[a-z]" train text --resume not.safetensors
refuses "both" train text --out a.safetensors --plot a.safetensors
refuses "both" train text --out not_yet.safetensors --plot "./../$name/not_yet.safetensors"
refuses "cannot write" train text --out b.safetensors --plot nowhere/loss.svg

# ---- text that a terminal would obey
awk -v e="$escape" 'BEGIN { for (i = 0; i < 3000; i++) printf "%s\303\251", e }' >red.text
check "a text of escape bytes" lm train red.text --out red.safetensors --steps 80 --lr 0.02 $small
check "its samples are shown" shown out
red="generate red.safetensors --count 200 --temperature 0.1"
lm $red --prompt "$escape[31m"
check "what is written has its own bytes in a file" grep -q "^$escape\[31m.*$escape" out
if on_terminal --help; then
  check "a terminal gets a text" on_terminal $red --prompt "$escape[31m"
  check "without what it would obey" shown out
  check "and its characters are whole" grep -q '^?\[31m.*?é?é' out
fi

finish
