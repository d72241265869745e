#!/bin/sh
# export.sh: examples/export.c from outside: what it writes compiles without a warning by gcc and clang, where they are
# here, in C and C++, gives the same bits by all of them, and what luna_stream gives; what cannot be exported is
# refused. Needs $BUILD/export, series and mcu/models. Every option: export_options.sh. On microcontrollers: make mcu.
cd "$(dirname "$0")/../.." || exit 1
root=$PWD
name=export_cli
. tests/programs/cli_checks.sh
. "$root/tests/programs/export_checks.sh"

# --- the detector: all compilers, 10,000 steps
detector="features=9 outputs=2 memory=16 dim=32 heads=4 ffn=64 convolution=4 pre_norm=1 missing=40"
check "a detector" model float 10000 $detector
mkdir -p eight
cp float/model.safetensors float/series.csv float/model.out eight
check "is exported in float" exported float --weights f32
check "and in 8 bits" exported eight
sanitized=
for kind in float eight; do
  first=
  for compiler in "$cc -std=c99 -Os" "gcc -std=gnu17 -O2 -march=native" "clang -std=c11 -O2 -march=native" \
      "g++ -std=c++11 -O2 -x c++" "clang++ -std=c++11 -Os -x c++" "$sanitized"; do
    here "${compiler%% *}" || continue
    check "$kind: $compiler" built $kind $compiler
    [ -n "$first" ] || mv $kind/outputs.txt $kind/first.txt
    [ -z "$first" ] || check "$kind: the same bits by $compiler" same $kind/outputs.txt $kind/first.txt
    first=done
  done
  # the 8-bit model has the float one's functions too
  sanitized="$cc -std=c99 -O1 -fsanitize=address,undefined -fno-sanitize-recover=all"
done
check "float: what luna_stream gives" $models compare float/model.out float/first.txt 1e-5
check "8 bits: near it" $models compare eight/model.out eight/first.txt 0.1
mkdir -p lost
cp eight/main eight/series.csv lost
for place in /dev/full /; do                               # a device that is full, a folder
  [ -e $place ] && rm -f lost/outputs.txt && ln -s $place lost/outputs.txt || continue
  check "outputs that cannot go to $place are an error" sh -c \
    "cd lost && ! ./main >../out 2>../err && grep -q 'cannot write outputs.txt: ' ../err"
done

check "the stack that a step takes in float" stack_of float
check "the stack that a step takes in 8 bits" stack_of eight

# --- small models, which the rest uses
check "a small model of tokens" model tokens 300 $small vocab=37
check "is exported" exported tokens
check "a small model with gates" model gates 300 $small features=3 outputs=3 sharing=1 gated=1 activation=7 \
  pre_norm=1 convolution=4 missing=9
check "one of few dimensions" model few 300 $small features=3 outputs=2 dim=12 ffn=20 activation=6 gated=1 \
  convolution=2
check "one with a horizon" model horizon 300 $small features=3 outputs=2 horizon=50 pre_norm=1

# --- numbers that become too large: the C is finite wherever luna_stream is, and no integer overflows
careful="$cc -std=c99 -O1 -fsanitize=undefined -fno-sanitize-recover=all"
built tokens $careful || careful="$cc -std=c99 -O1"
while read -r fields; do
  check "a model of $fields" model big 60 $small $fields
  for flag in --weights=f32 --weights=i8; do
    [ $flag = --weights=f32 ] && bound=1e-5 || bound=inf
    check "$fields: $flag" exported big $flag
    check "$fields: $flag is built" built big $careful
    check "$fields: $flag is finite" $models compare big/model.out big/outputs.txt $bound
  done
done <<'END'
features=3 outputs=2 glitch=100000000 output_gate=1
features=3 outputs=2 glitch=-900000000 output_gate=1 convolution=2 norm=1
features=3 outputs=2 glitch=900000000 forget=2 convolution=4
features=3 outputs=2 dim=12 ffn=20 sharing=1 large=19
features=3 outputs=2 forget=2 sharing=1 glitch=1000000 large=19
vocab=37 sharing=1 activation=8 positions=2 large=19
features=3 outputs=2 dim=12 ffn=20 sharing=1 glitch=900000000 large=12
features=3 outputs=2 heads=1 memory=8 glitch=1000 large=12
features=3 outputs=2 heads=1 memory=8 glitch=1000 large=18
features=3 outputs=2 glitch=900000000 steep=32 convolution=4 pre_norm=1 sharing=1
features=3 outputs=2 glitch=900000000 steep=32 convolution=3 pre_norm=1 forget=2
features=3 outputs=2 glitch=900000000 forget=3 convolution=4
features=3 outputs=2 forget=3 sharing=1 glitch=1000000 large=19
END
check "in 8 bits too a step without a finite result says so" [ "$(grep -c '^[7f]f[c-f]' big/outputs.txt)" = 1 ]
check "a model whose scores are too large" model big 0 vocab=37 forget=1 large=30
refuses "layer1_scores_b, which export computes .* too large for a float" big/model.safetensors --out x
refuses "layer1_scores_b, which export computes .* too large for a float" big/model.safetensors --out x --weights f32

# --- steps that are refused, learning, and two models in one program
check "a model of tokens with 20 positions" model words 0 vocab=37 dim=16 heads=2 memory=4 positions=3 max_length=20
check "and one of features" model learner 0 features=3 outputs=4 dim=16 heads=2 memory=4 convolution=3
for kind in classes values; do
  mkdir -p $kind
  check "it learns $kind" run learner/model.safetensors --out $kind/learner --learn $kind --weights f32
  check "beside it, the model of tokens" run words/model.safetensors --out $kind/words
  cat >$kind/check.c <<'END'
#include "learner.h"
#include "words.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
static learner_state a, kept;
static words_state b, kept_b;
static float x[3] = { 0.5f, -1, 2 }, y[4], first[4], z[37];
static void step(void) { if (!learner_step(&a, x, y)) exit(1); }
static double loss(void) { /* of the last step's outputs, for class 2 or values 0 1 . 3 */
#ifdef CLASSES
  double sum = 0;
  for (int i = 0; i < 4; i++) sum += exp((double)y[i] - (double)y[2]);
  return log(sum);
#else
  return pow((double)y[0], 2) + pow((double)y[1] - 1, 2) + pow((double)y[3] - 3, 2);
#endif
}
static int learn(float rate) {
#ifdef CLASSES
  return learner_learn(&a, 2, rate);
#else
  const float target[4] = { 0, 1, NAN, 3 };
  return learner_learn(&a, target, rate);
#endif
}
int main(void) {
  int bad = 0;
#define CHECK(c) ((c) ? 0 : (bad++, printf("%s\n", #c)))
  step();
  memcpy(first, y, sizeof y);
  const double before = loss();
  kept = a;
  CHECK(!learn(-1) && !learn(NAN) && !learn(INFINITY) && memcmp(&kept, &a, sizeof a) == 0);
  a.hidden[0] = NAN;                     /* as of a step whose outputs were not finite */
  CHECK(!learn(0.01f) && memcmp(kept.learnt, a.learnt, sizeof a.learnt) == 0);
  a = kept;
#ifdef CLASSES
  CHECK(!learner_learn(&a, 4, 1) && !learner_learn(&a, -1, 1) && memcmp(&kept, &a, sizeof a) == 0);
#endif
  CHECK(learn(0.01f));
  learner_restart(&a);
  step();
  CHECK(loss() < before && loss() > 0.5 * before); /* one small step down the slope */
  for (int i = 0; i < 200; i++) learn(0.02f);
  learner_restart(&a);
  step();
  CHECK(loss() < 0.1 * before);
  learner_forget_learning(&a);
  learner_restart(&a);
  step();
  CHECK(memcmp(first, y, sizeof y) == 0);
  kept = a;
  x[1] = INFINITY;
  CHECK(!learner_step(&a, x, y) && memcmp(&kept, &a, sizeof a) == 0);
  x[1] = -1e30f;
  CHECK(!learner_step(&a, x, y) && memcmp(&kept, &a, sizeof a) == 0);
  x[1] = NAN;
  CHECK(learner_step(&a, x, y));
  for (int i = 0; i < 20; i++) CHECK(words_step(&b, i, z));
  kept_b = b;
  CHECK(!words_step(&b, 0, z)); /* past the positions */
  memset(&b, 0, sizeof b), kept_b = b;
  CHECK(!words_step(&b, 37, z) && !words_step(&b, -1, z) && memcmp(&kept_b, &b, sizeof b) == 0);
  return bad;
}
END
  [ $kind = classes ] && define=-DCLASSES || define=
  check "$kind: learning and refused steps" sh -c \
    "cd $kind && $cc -std=c99 -O1 $strict $define -I. check.c learner.c words.c -o check -lm && ./check >../out"
done

# --- a detector of the walk of some subjects learns from 30 s of another one, and finds more of the 90 s after them
mkdir -p walk
check "a detector is trained" $models subjects walk/model 6000
mv walk/model.csv walk/series.csv
check "it is exported, to learn" exported walk --learn classes
for rate in 0.0 0.003; do
  check "it learns, at a rate of $rate" built walk $cc -std=c99 -O1 -DLEARN_STEPS=1500 -DLEARN_RATE="${rate}f"
  cp walk/main.log "walk/$rate.log"
done
found() { sed -n 's/found of 1000 //p' "walk/$1.log"; }
before=$(found 0.0) after=$(found 0.003)
check "of 1000 steps, $before were found before and now $after" [ "$after" -gt $((before + 150)) ]

# --- a detector of series: its header names columns and classes, and a name ends no comment
awk 'BEGIN { print "speed,he*/at,state"; for (t = 0; t < 300; t++) { f = int(t / 30) % 2
  print sin(t * (f ? 0.8 : 0.3)) "," cos(t) "," (f ? "fast" : "slow") } }' >w.csv
check "a detector of series" "$build/series" train w.csv --label state --causal --steps 2 --out named.safetensors
check "is exported" run named.safetensors --out named
check "its header names its columns" grep -q '^/\* x\[i\]: 0 is speed, 1 is he..at \*/$' named.h
check "and its classes" grep -q 'largest is found: 0 is slow, 1 is fast \*/$' named.h
check "and a program's" grep -q '^#define NAMED_CLASSES' named.h
check "it compiles" $cc -std=c99 -c named.c -o named.o
check "and what y is" grep -q 'p\[1\] > 0.8 where y\[1\] - y\[0\] > 1.386' named.h
LC_ALL=C sed 's/series.column0/series.kolumn0/; s/series.class0/series.klass0/' named.safetensors >holes.safetensors
check "a detector that lacks names" run holes.safetensors --out holes
check "has no tables of names" sh -c '! grep "HOLES_COLUMNS\|HOLES_CLASSES\|1 is" holes.h >out'
for word in head mean gate norm learn; do
  check "$word may be a name" run named.safetensors --out $word --learn classes
  check "$word: it compiles" $cc -std=c99 $strict -I. -c $word.c -o $word.o
done

# --- main.c reads the columns of the model's names, wherever they are, and stops at what is no number
# read_as LINES: main ends without an error on these lines, and its outputs are those of wanted.txt
# stops WORDS LINES: it ends with an error, and says the words
lines() { printf '%b' "$1" >table/series.csv; }
read_as() { lines "$1"; (cd table && ./main >main.log) && same table/outputs.txt table/wanted.txt; }
stops() { lines "$2"; (cd table && ! ./main >main.log) && grep -q "$1" table/main.log; }
mkdir -p table red
cp named.safetensors table/model.safetensors
lines '"speed",he*/at\n0.001,-13\n2,\n12300000000,4\n'
check "a table's model" exported table
check "is built" built table $cc -std=c99 -O1
mv table/outputs.txt table/wanted.txt
check "all lines are read" [ "$(sed -n 's/^steps //p' table/main.log)" = 3 ]
check "columns are found by their names, among others" \
  read_as 'time;he*/at;state;"speed"\r\n17:01;-1.3e1;slow;+1e-3\r\n\r\n17:02;n/a; fast ;2.0\r\n;4; ;1.23e10'
{ echo speed,he*/at; sed '1d; s/,[a-z]*$//' w.csv; } >table/series.csv
(cd table && ./main >main.log)
check "what is found is said by its name" grep -q -x 'line [0-9]*: \(fast\|slow\)' table/main.log
sed "s/fast/$escape[31mfast/; s/speed/$escape[2J/" w.csv >red.csv
check "a detector of names that a terminal would obey" "$build/series" train red.csv --label state --causal \
  --steps 2 --out red/model.safetensors
check "is exported" exported red
sed "1s/.*/$escape[2J,he*\/at/" table/series.csv >red/series.csv
check "and built" built red $cc -std=c99 -O1
check "its classes are said without that" grep -q -x 'line [0-9]*: \(?.31mfast\|slow\)' red/main.log
check "with no escape byte" shown red/main.log
cp table/series.csv red
check "so is a column that is missing" sh -c "cd red && ! ./main >main.log && grep -q 'no column ?.2J$' main.log"
check "a column that is missing is said" stops 'no column he\*/at' 'speed,heat\n1,2\n'
check "so are names that are missing" stops 'does not name the column speed' '1,2\n3,4\n'
check "a word is no number" stops 'line 3, column 2: this is no number' 'speed,he*/at\n1,2\n1,x7\n'
for cell in 1-3 --3 1.2.3 1e 1e- e3 . 0x10; do
  check "$cell is no number" stops 'line 2, column 1: this is no number' "speed,he*/at\n$cell,2\n"
done
check "a line that is too short is said" stops 'line 2 has too few columns' 'speed,he*/at\n1\n'
awk 'BEGIN { for (t = 0; t < 300; t++) print t % 7 ",5," t % 5 "," (t % 9 > 4 ? "up" : "down") }' >numbers.csv
check "a detector of columns without names" "$build/series" train numbers.csv --label 4 --causal --steps 2 \
  --out table/model.safetensors
check "is exported" exported table
lines '3,5,1,up\n'
check "and built" built table $cc -std=c99 -O1
mv table/outputs.txt table/wanted.txt
check "their numbers are their names" read_as '3,,1\n'
check "a place that is not there is said" stops 'line 1 has too few columns' '3,5\n'

# --- what a forecast's outputs mean: by the header, on this computer, what series predict prints
awk 'BEGIN { print "a,b"; for (t = 0; t < 200; t++) print sin(t / 5) * 40 "," cos(t / 9) + 7 }' >f.csv
check "a forecast" "$build/series" train f.csv --forecast --ahead 1,4 --steps 20 --window 300 --out f.safetensors
check "what it finds" sh -c "'$build/series' predict f.safetensors f.csv >found.csv"
check "it is exported" run f.safetensors --out fc --weights f32
check "with what y is" grep -q 'y\[(a \* 2 + i) \* 3 + q\]' fc.h
check "and how far ahead" grep -q '\[1,4\]\[a\]; quantile \[0.1, 0.5, 0.9\]\[q\]' fc.h
LC_ALL=C sed 's/series.change1/series.chance1/' f.safetensors >holes.safetensors
check "a forecast that lacks units" run holes.safetensors --out holes
check "has no table of them" sh -c '! grep -q CHANGES holes.h'
cat >forecast.c <<'END'
#include "fc.h"
#include <math.h>
#include <stdio.h>
int main(void) {
  static fc_state state;
  static const float change[] = { FC_CHANGES };
  float x[2], y[12], found[2];
  double wrong = 0;
  FILE *in = fopen("f.csv", "r"), *made = fopen("found.csv", "r");
  if (!in || !made || fscanf(in, "%*[^\n]") || fscanf(made, "%*[^\n]")) return 2;
  while (fscanf(in, "%f,%f", &x[0], &x[1]) == 2) fc_step(&state, x, y);
  for (int a = 0; a < 2; a++)
    for (int q = 0; q < 3; q++) {
      if (fscanf(made, "%*d,%*d,%*f,%f,%f", &found[0], &found[1]) != 2) return 3;
      for (int i = 0; i < 2; i++) {
        float f[3];
        for (int j = 0; j < 3; j++) f[j] = x[i] + change[a * 2 + i] * y[(a * 2 + i) * 3 + j];
        for (int j = 0; j < 3; j++) {
          const float t = f[j % 2];
          if (t > f[j % 2 + 1]) f[j % 2] = f[j % 2 + 1], f[j % 2 + 1] = t;
        }
        wrong = fmax(wrong, fabs((double)f[q] - (double)found[i]) / (1 + fabs((double)found[i])));
      }
    }
  printf("%g\n", wrong);
  return wrong > 1e-4;
}
END
check "which is what series predict prints" sh -c "$cc -std=c99 -I. forecast.c fc.c -o forecast -lm && ./forecast >out"

# --- files are written beside their places, where nobody else writes, and take them together
mkdir -p beside race/one race/other
echo precious >beside/victim
for link in det.c.tmp det.h.tmp det.c.part .luna-0.tmp .luna-1.tmp; do ln -s victim "beside/$link"; done
check "a planted link does no harm" run tokens/model.safetensors --out beside/det
check "what it points to is as it was" [ "$(cat beside/victim)" = precious ]
check "and the files are files" [ -f beside/det.c -a ! -h beside/det.c -a -f beside/det.h -a ! -h beside/det.h ]
mkdir elsewhere && ln -s ../elsewhere/real.c beside/far.c
check "a name that is a link stays one" sh -c \
  "'$build/export' tokens/model.safetensors --out beside/far >out 2>err && [ -h beside/far.c ] &&
  [ -s elsewhere/real.c ]"
check "nothing else is left" [ "$(ls -A beside elsewhere | grep -c luna-)" = 2 ]
"$build/export" gates/model.safetensors --out race/one/det >out
"$build/export" few/model.safetensors --out race/other/det >out
pair() { same "$1/det.h" "$2/det.h" && same "$1/det.c" "$2/det.c"; }
mixed=0
for i in 1 2 3 4 5 6 7 8 9 10; do
  "$build/export" gates/model.safetensors --out race/det >out 2>err & first=$!
  "$build/export" few/model.safetensors --out race/det >out2 2>err2 || mixed=$((mixed + 1))
  wait $first || mixed=$((mixed + 1))
  pair race race/one || pair race race/other || mixed=$((mixed + 1))
done
check "two exports onto one name do not mix their files" [ $mixed = 0 ]
check "nor leave any" [ "$(ls -A race | wc -l)" = 4 ]

# --- what is refused, without half a file
check "a model with softmax attention" $models write softmax 0 features=2 attention=1
refuses "another attention" softmax.safetensors --out x
echo text >text
refuses "safetensors" text --out x
refuses "missing" nothing.safetensors
refuses "export --help says"
refuses "nothing.safetensors" nothing.safetensors --out x
refuses "is no name for C" float/model.safetensors --out 9x
refuses "is no name for C" float/model.safetensors --out a-b
refuses "is no name for C" float/model.safetensors --out folder/
refuses "called string.h" float/model.safetensors --out string
refuses "called Features.h" float/model.safetensors --out Features
refuses "called luna.h" float/model.safetensors --out luna
refuses "--out" float/model.safetensors
cp float/model.safetensors model.c
refuses "overwrite the model" model.c --out model
check "which is as it was" same model.c float/model.safetensors
refuses "cannot write" float/model.safetensors --out nowhere/x
check "a model whose outputs are scaled" $models write scaled 0 features=2 outputs=2 output_norm=1
refuses "cannot learn on the device" scaled.safetensors --out x --learn values
sed 's/luna.kind/Luna.kind/' float/model.safetensors >hook.safetensors
refuses "attention hook" hook.safetensors --out x
sed 's/luna.horizon/luna.horizen/' horizon/model.safetensors >option.safetensors
refuses "does not know: luna.horizen" option.safetensors --out x
sed 's/"50"/"5x"/' horizon/model.safetensors >number.safetensors
refuses "not a number" number.safetensors --out x
mkdir folder.c 2>/dev/null; mkdir -p y.c
refuses "cannot write" float/model.safetensors --out y
check "no file is left of what was refused" sh -c '! ls x.* y.h ./*.tmp */*.tmp'

finish
