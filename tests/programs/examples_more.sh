#!/bin/sh
# examples_more.sh: examples/translate.c, mlm.c, summary.c, attention_map.c, lesson.c and compress.c from outside, on
# small tasks made here. Needs the examples in $BUILD.
cd "$(dirname "$0")/../.." || exit 1
root=$PWD
name=examples_more
. tests/programs/cli_checks.sh
small="--layers 1 --dim 32 --heads 2 --memory 8 --ffn 64 --threads 2"
: >empty
mkdir folder

# ---- translate: numbers in words, the other way round
program=translate
awk 'BEGIN { split("null eins zwei drei vier fünf sechs sieben acht neun", de)
  split("zero one two three four five six seven eight nine", en); r = 7
  for (i = 0; i < 1200; i++) { s = t = ""; n = 4 + i % 3
    for (k = 0; k < n; k++) {
      r = (r * 1103515245 + 12345) % 2147483648; d = int(r / 65536) % 10 + 1
      s = s (k ? " " : "") en[d]; t = t (k ? " " : "") de[d]
    }
    print s > "en"; print t > "de"; print s "\t" t > "pairs.tsv" } }'
head -n 40 en >short.en
head -n 40 de >short.de
check "train succeeds" run train en de --out a.safetensors --plot a.svg --steps 500 --batch 32 --lr 0.01 --vocab 400 \
  --dropout 0 $small
check "plain lines when the output is no terminal" [ "$(grep -c '^step .* loss .* tokens/s .* left$' out)" -ge 10 ]
check "it validates as it goes" [ "$(grep -c '^step .*: validation loss .* perplexity' out)" = 10 ]
check "and shows translations" [ "$(grep -c '^  translation ' out)" = 10 ]
check "the loss is drawn" drawn a.svg
check "and nothing else is left" [ "$(echo a.*)" = "a.safetensors a.svg" ]
check "eval succeeds" run eval a.safetensors short.en short.de
check "its BLEU is beyond 50" awk '{ sub(/.*BLEU /, ""); exit !($1 > 50) }' out
cp out first
run eval a.safetensors short.en short.de --threads 1
check "the same for any number of threads" [ "$(sed 's/ in .*//' out)" = "$(sed 's/ in .*//' first)" ]
check "greedy search works too" run eval a.safetensors short.en short.de --beam 1
check "translating into itself is BLEU 100" sh -c \
  "'$build/translate' run a.safetensors <short.en >mine && '$build/translate' eval a.safetensors short.en mine \
   | grep -q 'BLEU 100.00 (13a words, brevity 1.000)'"
check "a translation a line" [ "$(wc -l <mine)" = 40 ]
printf 'one two\r\nfive\n\n\377\200 what? \303\251\303\n' >odd
check "odd lines do no harm" sh -c "'$build/translate' run a.safetensors --beam 2 <odd >out"
check "line for line" [ "$(wc -l <out)" = 4 ]
run train en de --out c.safetensors --steps 20 $small
check "a source in both files is a pair" run train pairs.tsv --out b.safetensors --steps 20 $small --threads 1
check "the same pairs give the same model, for any number of threads" same c.safetensors b.safetensors
printf 'one\0two\r\n%65536sone two\n' '' >long
check "long lines and zero bytes are read whole" \
  sh -c "'$build/translate' run a.safetensors --beam 1 <long >out; [ \$(wc -l <out) -eq 2 ]"
run train en de --out b.safetensors --steps 25 $small
check "the last validation is of the model saved" grep -q '^step 25: validation loss' out
run train en de --out b.safetensors --steps 5 $small
run train en de --out c.safetensors --steps 5 $small --seed 2
check "another seed gives another one" differ b.safetensors c.safetensors
cp a.safetensors before
printf 'no tab here\n' >bad.tsv
head -n 5 en >few.en
head -n 5 de >few.de
head -c 2000 a.safetensors >cut.safetensors
refuses "train, eval or run"
refuses "source file is missing" train
refuses "source file is missing" eval a.safetensors
refuses "no flag --beam" train en de --beam 3
refuses "cannot read missing" train missing de
refuses "cannot read missing" train en missing --out a.safetensors
refuses "is empty" train empty de --out a.safetensors
refuses "same number of lines" train en short.de --out a.safetensors
refuses "no tab" train bad.tsv --out a.safetensors
refuses "5 pairs can be used" train few.en few.de --out a.safetensors
refuses "can be used" train en de --longest 3 --out a.safetensors
refuses "overwrite the target" train en de --out de
refuses "[0-9]" train en de --dim 10 --heads 3 --out a.safetensors
refuses "missing.safetensors" run missing.safetensors
refuses "[a-z]" run cut.safetensors
refuses "same number of lines" eval a.safetensors en short.de
check "the old model is as it was" same a.safetensors before
check "Ctrl-C ends a training well" interrupted '^step .* loss' train en de --steps 4000 --out stopped.safetensors \
  $small
check "it says so" grep -q 'stopped early' out
check "the model is saved" run eval stopped.safetensors short.en short.de

run train en de --out "red$escape[2J.safetensors" --steps 1 $small
check "a name that a terminal would obey is shown without that" shown out
check "as the file that is there" sh -c "grep -q '^red?.2J.safetensors: Training made 1 steps' out"
check "and is measured" run eval "red$escape[2J.safetensors" short.en short.de --beam 1
check "under the same name" sh -c "grep -q '^red?.2J.safetensors has BLEU' out"
# a target line of the character U+009B, which begins a terminal's commands as escape and [ do
head -n 300 en | sed 's/.*/one two/' >red.en
sed "s/.*/$(printf '\302\233')31mred/" red.en >red.de
run train red.en red.de --out red.safetensors --steps 25 --batch 16 --lr 0.02 --dropout 0 $small
check "a translation that is shown has no such character" grep -q '^  translation  ??31mred$' out
check "nor has one that is written" sh -c \
  "head -n 1 red.en | '$build/translate' run red.safetensors --beam 1 >out && [ \"\$(cat out)\" = '??31mred' ]"

# ---- lesson
program=lesson
check "lesson succeeds" run
check "the equations agree with the library's" \
  [ "$(grep -c '^([1-7])\|^section 3\|^the memory ' out) $(grep -c ' agrees, ' out)" = "16 16" ]
check "it sees that \"it\" is the cat" awk '$1 == "it" { found = $3 == 48 && $9 == 48; exit } END { exit !found }' out
check "it counts products" grep -q '^ *1200 *1440000 *9600 *38400$' out
check "its training loop learns" awk '/^step 4000/ { last = $NF } END { exit !(last != "" && last < 0.05) }' out
check "and a slot looks at the first token" \
  awk '/^head [12], slot [1-4] / && $5 > 50 { found = 1 } END { exit !found }' out
check "one slot, n of them, and a frozen P learn it too" \
  [ "$(sed -n '/^8\./,$p' out | grep -o '0\.0[01][0-9][0-9]' | wc -l)" = 3 ]
sed -e '/define LUNA_IMPLEMENTATION/d' -e 's/{ "warm", [^}]*}/&, { "and", "0001 0000" }, { "dry", "0010 0001" }/' \
  -e 's/{ "why", [^}]*}/&, { "what", "0100 0100" }, { "when", "0001 1000" }/' "$root/examples/lesson.c" >longer.c
longer="${CC:-cc} ${CFLAGS:-} -I'$root' longer.c '$build/luna.o' -o longer -lm -lpthread && ./longer >longer.out"
check "words and slots may be added" sh -c "$longer"
check "the equations agree with them too" [ "$(grep -c ' agrees, ' longer.out)" = 16 ]
check "they are in the tables" sh -c "grep -q ' dry ' longer.out && grep -q ' when$' longer.out"

# ---- mlm
program=mlm
awk 'BEGIN { for (i = 0; i < 400; i++)
  print "the moon goes round the earth, and the earth goes round the sun, in " (i * 7 % 30) " days" }' >text
awk 'BEGIN { for (i = 0; i < 300; i++)
  print (i * 7 % 5 < 2) "\tin " (i * 13 % 40) " days the " (i * 7 % 5 < 2 ? "moon" : "sun") " goes round" }' >rows.tsv
window="--window 32 --batch 8"
check "pretrain succeeds" run pretrain text --out m.safetensors --plot m.svg --steps 200 --lr 0.01 $window $small
check "validation loss falls" awk '/^The validation loss/ { exit !($8 < 0.7 * $6) }' out
check "the loss is drawn" drawn m.svg
ended=$(awk '/^The validation loss/ { print $8 }' out)
run pretrain text --out d.safetensors --steps 20 $window $small
run pretrain text --out n.safetensors --steps 20 $window $small --threads 1
check "the same seed gives the same model, for any number of threads" same d.safetensors n.safetensors
check "pretrain goes on from a model" \
  run pretrain text --begin m.safetensors --out n.safetensors --steps 20 --masked 0.4 $window $small
check "all of which is taken" grep -q '^\([0-9]*\) of \1 tensors were taken from m.safetensors' out
check "and begins where that ended" grep -q "^The validation loss went from $ended to " out
run pretrain text --begin m.safetensors --out d.safetensors --steps 20 $window $small
check "other shares masked make another model" differ d.safetensors n.safetensors
check "tune succeeds" run tune m.safetensors rows.tsv --out c.safetensors --plot c.svg --steps 100 --lr 0.01 $window \
  --threads 2
check "it says what did not match" \
  [ "$(grep -c '^  sentence_projection_layer.weight is not in the file$\|^  lm_head.* no parameter here$' out)" = 6 ]
check "it tells both accuracies" \
  grep -q '^The accuracy after 100 steps is [01][.0-9]* pre-trained and [01][.0-9]* from scratch.$' out
check "what can be learnt has been learnt" awk '/^The accuracy after/ { exit !($7 > 0.9) }' out
check "the fine-tuning is drawn" drawn c.svg
for steps in 3 4; do
  check "an encoder that stays, $steps steps" \
    run tune m.safetensors rows.tsv --encoder-lr 0 --out head$steps.safetensors --steps $steps $window
done
check "only the layer on it differs" [ "$(cmp -l head3.safetensors head4.safetensors | wc -l)" -lt 400 ]
run tune m.safetensors rows.tsv --out slow.safetensors --steps 4 $window
check "else the encoder learns too" [ "$(cmp -l head4.safetensors slow.safetensors | wc -l)" -gt 4000 ]
run pretrain text --tokens bytes --out b.safetensors --steps 20 $window $small
check "bytes instead of words" grep -q 'bits per masked byte' out
check "and a classifier of bytes" run tune b.safetensors rows.tsv --out d.safetensors --steps 3 $window
check "few rows to learn from" run tune m.safetensors rows.tsv --out d.safetensors --steps 3 --rows 20 $window
{ printf '\357\273\277'; cat rows.tsv; } >marked.tsv
check "nor does a byte order mark hinder" \
  run tune m.safetensors marked.tsv --out d.safetensors --steps 3 --rows 20 $window
printf '1\tone\nx\ttwo\n' >bad.tsv
printf '0\tone\n1\ttwo\n' >two.tsv
awk 'BEGIN { for (i = 0; i < 400; i++) print i % 2 "\t" (i % 2 ? "the moon goes" : "a sun stays") " round " i % 30 }' \
  >turns.tsv
check "labels that take turns are held in turn too" \
  run tune m.safetensors turns.tsv --out d.safetensors --steps 1 --lr 1e-9 $window
check "so that one class alone is not what is measured" \
  awk '/^Its accuracy on 40 held-out/ { exit !($NF < 0.8 && $NF > 0.2) }' out
check "lines to measure on may come from a file" \
  run tune m.safetensors rows.tsv --held turns.tsv --out d.safetensors --steps 1 $window
check "all of them are" grep -q '^Its accuracy on 400 held-out lines' out
refuses "is empty" tune m.safetensors rows.tsv --held empty --out d.safetensors
refuses "no command dance" dance
refuses "no flag --dim" tune m.safetensors rows.tsv --dim 8
refuses "is not a label" tune m.safetensors bad.tsv --out d.safetensors
refuses "2 lines" tune m.safetensors two.tsv --out d.safetensors
refuses "no masked language model" tune c.safetensors rows.tsv --out d.safetensors
refuses "overwrite the model" tune m.safetensors rows.tsv --out m.safetensors
refuses "is empty" pretrain empty --out m.safetensors
printf 'tiny' >tiny
refuses "has 1 tokens" pretrain tiny --out m.safetensors
check "a short text is read in shorter windows" run pretrain short.en --out d.safetensors --steps 2 --window 4096 \
  --batch 4 $small
check "Ctrl-C ends a training well" \
  interrupted '^step.* left$' pretrain text --steps 4000 --out stopped.safetensors $window $small
check "and it is saved" run tune stopped.safetensors rows.tsv --out d.safetensors --steps 2 $window

# ---- summary
program=summary
check "summary succeeds" run m.safetensors
check "it tells the kind" grep -q 'kind masked_lm, .*vocab 10001' out
check "and what numbers stand for" grep -q 'activation gelu' out
check "of norms too" grep -q 'norm layer' out
check "a tensor, its kind, shape and size" grep -q 'encoder.layers.0.fc1.weight *F32 *64 x 32 *8.2 kB' out
check "the totals" grep -q 'tensors, [0-9]* numbers, .*B' out
check "text pairs of the user are shown" \
  sh -c "'$build/summary' a.safetensors | grep -q '^  translate.pairs [0-9 ]*\.\.\. ([0-9]* bytes)'"
awk 'BEGIN { print "speed,heat,state"; for (t = 0; t < 300; t++) { f = int(t / 30) % 2
  print 20 + 5 * sin(t * (f ? 0.8 : 0.3)) "," 300 + 10 * cos(t * 0.1) "," (f ? "fast" : "slow") } }' >w.csv
printf 'x,y\n' >f.csv
awk 'BEGIN { for (t = 0; t < 200; t++) print t % 7 "," t % 5 }' >>f.csv
check "a forecaster is made" sh -c "'$build/series' train f.csv --forecast --steps 3 --out f.safetensors >out"
check "it is shown" run f.safetensors
check "with what its outputs are" \
  grep -q "^  outputs: .* the change from its column's last number, in its unit, so add" out
check "a model of features is made" sh -c "'$build/series' train w.csv --label state --steps 3 --out s.safetensors >out"
run s.safetensors
check "it has no vocabulary" sh -c '! grep -q "[ ,] vocab" out'
check "a line for each of its features: the column, its mean, its deviation" awk '
  $1 == "speed" && NF == 3 && $2 > 17 && $2 < 23 && $3 > 3 && $3 < 4 { n++ }
  $1 == "heat" && NF == 3 && $2 > 290 && $2 < 310 && $3 > 6 && $3 < 8 { n++ } END { exit n != 2 }' out
cat >outputs.c <<'END'
#include "luna.h"
int main(void) {
  static const float targets[6] = {1, 100, 3, 104, 5, 108};
  luna_lm_config config = {.features = 1, .outputs = 2, .layers = 1, .output_norm = true};
  luna_ctx *ctx = luna_open(NULL);
  luna_params *params = luna_params_open(ctx);
  luna_lm model;
  config.layer.dim = 16;
  return luna_lm_init(&model, params, &config) != LUNA_OK || luna_lm_fit_outputs(&model, targets, 3) != LUNA_OK ||
         luna_save(params, luna_path("o.safetensors")) != LUNA_OK;
}
END
check "a model whose outputs have units is made" sh -c \
  "${CC:-cc} ${CFLAGS:-} -I'$root' outputs.c '$build/luna.o' -o outputs -lm -lpthread && ./outputs"
run o.safetensors
check "a line for each output: its mean and its deviation" awk '
  $1 == "output" { on = 1 } on && $1 == 1 && $2 == 3 && $3 == 1.633 { n++ }
  on && $1 == 2 && $2 == 104 && $3 == 3.266 { n++ } END { exit n != 2 }' out
check "any safetensors file will do" run "$root/tests/data/causal_tied.safetensors"
check "with its pairs" grep -q '^  pack_activation softplus2' out
refuses "one file"
refuses "two files" --quantize m.safetensors
refuses "missing" --quantize missing q.safetensors
cp m.safetensors q.safetensors
ln -s q.safetensors linked.safetensors
for other in q ./q linked; do
  refuses "would overwrite the model itself" --quantize q.safetensors $other.safetensors
done
check "the model stays" same m.safetensors q.safetensors
check "a model's copy in 8 bits" run --quantize m.safetensors q.safetensors
check "it is smaller" [ "$(wc -c <q.safetensors)" -lt "$(($(wc -c <m.safetensors) * 6 / 10))" ]
check "and can be looked at" run q.safetensors
check "a matrix in 8 bits" grep -q 'encoder.layers.0.fc1.weight *I8 *64 x 32 *2.0 kB' out
check "its scales" grep -q 'encoder.layers.0.fc1.weight.scale *F32 *64 ' out
check "and is a model" run --quantize q.safetensors again.safetensors
refuses "missing" missing
refuses "[a-z]" text
refuses "[a-z]" empty
refuses "[a-z]" cut.safetensors
refuses "[a-z]" folder

# ---- attention_map
program=attention_map
good() { [ "$(head -c 5 "$1")" = "<svg " ] && [ "$(tail -n 1 "$1")" = "</svg>" ] \
  && [ "$(tags "$1" g)" = "$(tags "$1" /g)" ] && { ! command -v xmllint || xmllint --noout "$1"; }; }
check "a classifier's map" run draw c.safetensors --text 'in <10> days & "nights" the moon é' --plot c.svg
check "is a whole SVG" good c.svg
check "its characters are escaped" sh -c "grep -q '&#60;' c.svg && grep -q '&#38;' c.svg && grep -q '>é<' c.svg"
check "two maps" [ "$(grep -c '>pack: \|>unpack: ' c.svg)" = 2 ]
check "slots have numbers" [ "$(grep -c '>8</text>' c.svg)" = 4 ]
run draw c.safetensors --text 'in <10> days & "nights" the moon é' --plot d.svg --head 2
check "a head is another map" differ c.svg d.svg
check "the text from the input" sh -c "'$build/attention_map' draw m.safetensors --plot e.svg <text"
check "a long text goes on below" [ "$(grep -c '>pack: ' e.svg)" -ge 10 ]
widths() { sed -n 's/.*width=.\([0-9]*\). height=.[0-9]*. fill=.none.*/\1/p' "$1" >widths; }
widths e.svg
check "in parts of about the same length" \
  sh -c "sort -n widths | awk 'NR == 1 { least = \$1 } END { exit !(NR > 20 && least > 0.85 * \$1) }'"
check "it is a whole SVG" good e.svg
printf 'a\377\200\001\302\002b' >odd
check "odd bytes do no harm" sh -c "'$build/attention_map' draw m.safetensors --plot f.svg <odd"
check "not to the SVG either" good f.svg
check "an encoder-decoder's encoder, with numbers for tokens" \
  run draw a.safetensors --tokens numbers --text '5 6 7 300' --plot g.svg
check "it says how many" grep -q ' 4 tokens' out
check "a text is cut into byte pairs, as it was trained" run draw a.safetensors --text 'one two three' --plot g.svg
check "words are tokens" grep -q ' 4 tokens' out
check "their names stand by them" [ "$(grep -c '>one<\|>two<\|>three<\|>END<' g.svg)" = 8 ]
awk 'BEGIN { for (i = 0; i < 200; i++)
  print (i % 2 ? "good" : "bad") "\ta film that is " (i % 2 ? "splendid" : "dull") ", day " i }' >reviews
tiny="--steps 1 --layers 1 --dim 16 --heads 2 --memory 4 --ffn 32"
"$build/classify" train reviews $tiny --out w.safetensors >/dev/null
"$build/listops" train --longest 9 $tiny --out l.safetensors >/dev/null
"$build/lm" train text $tiny --out lm.safetensors >/dev/null
LC_ALL=C sed 's/mlm.tokens/mlm.broken/' m.safetensors >bare.safetensors
check "a text is cut into words, as it was trained" run draw w.safetensors --text 'Splendid, is it?' --plot w.svg
check "punctuation by itself" grep -q ' 5 tokens' out
check "the picture says what is found" grep -q '; found: \(good\|bad\), [0-9]*%</text>' w.svg
check "the last unpack of a model that pools the memory is not drawn" \
  [ "$(grep -c '>pack: ' w.svg) $(grep -c '>unpack: ' w.svg)" = "1 0" ]
check "and it says why" grep -q 'not trained' out
check "so does the picture" grep -q '>no unpack: .* not trained<' w.svg
check "a list is cut into its symbols" run draw l.safetensors --text '[MAX 2 [MIN 4 7 ] 0 ]' --plot l.svg
check "brackets and operators are tokens" grep -q ' 8 tokens' out
refuses "reads lists" draw l.safetensors --text 'MAX' --plot l.svg
refuses "causal language model" draw lm.safetensors --text x --plot h.svg
refuses "does not say how" draw bare.safetensors --text x --plot h.svg
check "unless the command line does" run draw bare.safetensors --text x --tokens bytes --plot i.svg
cat >masks.c <<'END'
#include "luna.h"
int main(void) {
  const luna_encoder_config config = {.layers = 1, .layer = {.dim = 8, .memory = 2}};
  luna_params *params = luna_params_open(luna_open(NULL));
  luna_masked_lm model;
  return luna_masked_lm_init(&model, params, &(luna_masked_lm_config){.vocab = 1, .encoder = config}) != LUNA_OK ||
         luna_params_set_text(params, "mlm.tokens", "words") != LUNA_OK ||
         luna_save(params, luna_path("masks.safetensors")) != LUNA_OK;
}
END
check "a model of the mask alone is made" sh -c \
  "${CC:-cc} ${CFLAGS:-} -I'$root' masks.c '$build/luna.o' -o masks -lm -lpthread && ./masks"
refuses "has no token for a word" draw masks.safetensors --text x --plot h.svg
refuses "model file is missing" draw
refuses "no layer 2" draw m.safetensors --layer 2 --text x --plot h.svg
refuses "no head 3" draw m.safetensors --head 3 --text x --plot h.svg
refuses "[a-z]" draw m.safetensors --tokens numbers --text '5 999999999999' --plot h.svg
refuses "no text" draw m.safetensors --text '' --plot h.svg
refuses "overwrite the model" draw m.safetensors --text x --plot m.safetensors
refuses "cannot write" draw m.safetensors --text x --plot nowhere/h.svg
refuses "[a-z]" draw text --text x --plot h.svg

# ---- compress
program=compress
head -c 800 "$root/tests/data/excerpt.txt" >short.txt
check "pack succeeds" run pack short.txt --out short.packed --threads 1
check "it says what the network alone would take" grep -q '^The network alone would take [0-9]* bytes.$' out
check "it is shorter" [ "$(wc -c <short.packed)" -lt 600 ]
check "unpack gives the same bytes, with another number of threads" \
  sh -c "'$build/compress' unpack short.packed --out back --threads 2 >out && cmp short.txt back"
check "and is packed alike with it" sh -c \
  "'$build/compress' pack short.txt --out again.packed --threads 2 >out && cmp short.packed again.packed"
run pack short.txt --out network.packed --by network
check "the network alone takes more" [ "$(wc -c <network.packed)" -gt "$(wc -c <short.packed)" ]
check "and gives the same bytes" sh -c "'$build/compress' unpack network.packed --out back >out && cmp short.txt back"
head -c 100000 m.safetensors | cat - rows.tsv >once
{ cat once once; printf '\377\0'; } >many # four parts
check "n-grams read several parts side by side" run pack many --by ngrams --out many.packed
check "what comes again takes little" [ "$(wc -c <many.packed)" -lt "$(($(wc -c <many) * 6 / 10))" ]
check "and give the same bytes" sh -c "'$build/compress' unpack many.packed --out back >out && cmp many back"
# the last of three parts is two bytes shorter, and what the first one looks up last is its end: there is no next byte
awk 'BEGIN { r = 7; size = 3 * 65536 + 1
  for (i = 0; i < size; i++) {
    r = (r * 1103515245 + 12345) % 2147483648; c = substr("abcdefghijklmnopqrstuvwxyz", int(r / 65536) % 26 + 1, 1)
    if (i >= 65524 && i < 65536) c = substr("REPETITIONS.", i - 65523, 1)
    if (i >= size - 12) c = substr("REPETITIONS.", i - size + 13, 1)
    printf "%s", c
  } }' >tail
cat >dirty.c <<'END'
#include <stdlib.h>
#include <string.h>
static void *dirty(size_t count, size_t size) { /* calloc, and behind the block bytes that are not zero */
  char *at = (char *)malloc(count * size + 64);
  if (at) memset(at, 0, count * size), memset(at + count * size, 170, 64);
  return at;
}
#define calloc dirty
#include "examples/compress.c"
END
check "it is compiled with memory that others have used" sh -c \
  "${CC:-cc} ${CFLAGS:-} -DLI_IMPLEMENTED -I'$root' dirty.c '$build/luna.o' -o dirty -lm -lpthread"
check "a text is packed whose last part is shorter" run pack tail --by ngrams --out tail.packed
check "what is behind it is not read" sh -c "./dirty unpack tail.packed --out back >out 2>err && cmp tail back"
printf 'x' >one
check "a byte comes back" sh -c \
  "'$build/compress' pack one --out one.packed && '$build/compress' unpack one.packed --out back && cmp one back"
mkdir beside
echo precious >victim
for link in a.packed.part a.packed.probe .luna-0.tmp; do ln -s ../victim "beside/$link"; done
ln -s nowhere.packed beside/far.packed
printf 'old' | tee beside/.luna-3.tmp >beside/private.packed
chmod 600 beside/private.packed
for place in a far private; do
  check "planted links do no harm to $place" run pack one --by ngrams --out beside/$place.packed
  check "and $place comes back" sh -c \
    "'$build/compress' unpack beside/$place.packed --out back >out && cmp one back"
done
check "what they point to is as it was" [ "$(cat victim)" = precious ]
check "a packed file is a file" [ ! -h beside/a.packed ]
check "a name that is a link stays one" [ -h beside/far.packed -a -s beside/nowhere.packed ]
check "a file keeps its permissions" [ "$(ls -l beside/private.packed | cut -c 1-10)" = -rw------- ]
refuses "Is a directory" pack one --out beside
refuses "Is a directory" pack one --out beside/
ln -s itself beside/itself
refuses "cannot write beside/itself" pack one --out beside/itself
for number in 1 2 3; do
  "$build/compress" pack one --by ngrams --out beside/b.packed >out & first=$!
  check "two that pack onto one name succeed" run pack many --by ngrams --out beside/b.packed
  wait $first || echo first >>err
  check "and leave one of both files" sh -c "cmp beside/b.packed many.packed || cmp beside/b.packed beside/a.packed"
done
check "nothing else is left, nor what another program has left" \
  [ "$(cd beside && echo .l* *)" = ".luna-0.tmp a.packed a.packed.part a.packed.probe b.packed far.packed itself \
nowhere.packed private.packed" ]
printf 'old' >kept
{ head -c 250 short.packed; printf '\125\252'; tail -c +253 short.packed; } >changed.packed
head -c 200 short.packed >cut.packed
head -c 20 short.packed >head.packed
refuses "damaged or cut short" unpack changed.packed --out kept
refuses "damaged or cut short" unpack cut.packed --out kept
refuses "no packed file" unpack head.packed --out kept
refuses "no packed file" unpack short.txt --out kept
refuses "is empty" pack empty --out kept
refuses "is empty" unpack empty --out kept
refuses "cannot read missing" pack missing --out kept
refuses "says which file" pack short.txt
refuses "overwrite the file" pack short.txt --out short.txt
check "and nothing is written" [ "$(cat kept)$(echo *.part)" = "old*.part" ]

# ---- the programs that README and the guide quote: all are built, and the first one runs (make test-long runs all)
for each in "$root"/examples/[0-9]_*.c; do
  each=$(basename "$each" .c)
  check "$each is built" [ -x "$build/$each" ]
done
check "1_attention runs" \
  sh -c "'$build/1_attention' >out && [ \"\$(grep -c '^query [0-2], head 0: [0-9.]*\$' out)\" = 3 ]"

# ---- make docs: each public function has a place on the page, each equation somebody
docs() { python3 "$root/tests/tools/docs.py" "$1" "$root/README.md" docs.html >out; }
quoted() { python3 "$root/tests/tools/docs.py" "$root/luna.h" "$1" docs.html "$2" >out; }
has() { grep -q "$1" docs.html; }
if command -v python3 >/dev/null 2>&1; then
  check "the page of reference is whole" docs "$root/luna.h"
  check "it has chapters" has 'id="trainer"'
  check "and entries" has '<a id="luna_adamw"></a>'
  check "and equations" has 'id="equation7".*luna_causal_product'
  check "and programs of README" has 'luna_lm_init.*&amp;model, params'
  check "and of the guide" has 'luna_custom_op.*&amp;op'
  sed 's/eq\. 7/equation seven/' "$root/luna.h" >other.h
  docs other.h
  check "and says what it lacks" grep -q 'equation 7 is nobody' out
  sed 's/LUNA_DECAY_COSINE/LUNA_DECAY_LINEAR/' "$root/README.md" >readme.md
  check "and which quote of README is not its file" sh -c '[ "$1" = 1 ] && grep -q "$2" out' - \
    "$(quoted readme.md "$root/examples/guide.md"; echo $?)" \
    'examples/2_language_model.c is not what README or the guide quotes'
  sed 's/LUNA_POOLING_MEAN/LUNA_POOLING_CLS/; s/i < 400 && token >= 0/i < 500 \&\& token >= 0/' \
    "$root/examples/guide.md" >guide.md
  check "and which quote of the guide is not its file" sh -c '[ "$1" = 1 ] && grep -q "$2" out' - \
    "$(quoted "$root/README.md" guide.md; echo $?)" 'examples/3_generate.c is not what README or the guide quotes'
  plant() { (cd "$root" && BUILD=$work python3 tests/tools/faults.py --plant) >out 2>&1; }
  check "the faults of make faults are those of this luna.h" plant
else
  echo "python3 is not here: the page of reference is not made"
fi
check "no other file appeared" [ "$(echo *.probe *.tmp* nowhere h.svg)" = "*.probe *.tmp* nowhere h.svg" ]
finish
