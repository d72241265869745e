#!/bin/sh
# series.sh: examples/series.c from outside, on small tasks made here. Needs $BUILD/series.
cd "$(dirname "$0")/.." || exit 1
name=series_cli
. tests/cli_checks.sh
program=series
# the accuracy that out ends with
over() { tail -n 1 out | sed 's/.*accuracy \([0-9.]*\)%.*/\1/' | awk -v min="$1" '{ exit !($1 + 0 > min) }'; }
small="--layers 1 --dim 16 --heads 2 --memory 4 --ffn 32 --batch 8 --threads 2"

# cases of two dimensions and 10 to 20 steps; what rises is "up", what falls "down"; a number is missing here and there
cases() {
  awk -v count="$1" -v seed="$2" 'BEGIN { srand(seed); print "# a comment"; print "@problemName slopes"; print "@data"
    for (i = 0; i < count; i++) {
      up = i % 2; n = 10 + int(rand() * 10); line = ""
      for (d = 0; d < 2; d++) {
        for (t = 0; t < n; t++) line = line (t ? "," : "") (rand() < 0.03 ? "?" : \
          sprintf("%.3f", (up ? 1 : -1) * t / n + 0.2 * (rand() - 0.5) + 3 * d))
        line = line ":"
      }
      print line (up ? "up" : "down")
    } }'
}
cases 40 1 >slopes.ts
cases 30 2 >test.ts
# a recording: a wave whose length and height say the state; a column of words, one that never changes
awk 'BEGIN { srand(3); print "time;wave;\"other\";state;same"
  for (t = 0; t < 600; t++) { fast = int(t / 50) % 2; a += fast ? 1.2 : 0.3
    printf "t%d;%.4f;%.4f;%s;5\n", t, (fast ? 1 : 0.4) * sin(a) + fast + 0.05 * rand(), cos(a), fast ? "fast" : "slow"
  } }' >waves.csv
: >empty
mkdir folder

check "a class for each case" run train slopes.ts --out a.safetensors --plot a.svg --steps 120 $small
check "the loss is drawn" drawn a.svg
check "it is measured on other cases" run eval a.safetensors test.ts
check "as one line" [ "$(grep -c '^accuracy [0-9]*\.[0-9][0-9]%$' out)" = 1 ]
check "and does well" over 89
awk '!/:/ { print; next } {
  n = split($0, part, ":")
  for (d = 1; d < n; d++) {
    count = split(part[d], x, ",")
    for (t = 0; t < 8 * count; t++) printf "%s%s", t ? "," : "", t % 7 ? x[int(t / 8) + 1] : d % 2 ? "NaN" : "?"
    printf ":"
  }
  print part[n] }' test.ts >long.ts
check "cases eight times as long, with missing numbers" run eval a.safetensors long.ts
check "are measured" grep -q '^accuracy [0-9]*\.[0-9][0-9]%$' out
check "it predicts" run predict a.safetensors test.ts --svg cases.svg
check "a line each" [ "$(grep -c '^\(up\|down\)	[01]\.[0-9]*$' out)" = 30 ]
check "the first is drawn" [ "$(head -c 5 cases.svg)" = "<svg " ]
# labels and columns that a terminal would obey
escape=$(printf '\033')
shown() { ! LC_ALL=C grep -q "$escape" "$1"; }
sed "s/up$/${escape}[31mup/" slopes.ts >red.ts
run train red.ts --steps 1 $small --out red.safetensors
run predict red.safetensors red.ts
check "a label's bytes are its own in a file" grep -q "^$escape\[31mup	" out
if on_terminal --help; then
  check "a terminal gets the labels" on_terminal predict red.safetensors red.ts
  check "all of them" [ "$(LC_ALL=C grep -c '^\(?\[31mup\|down\)	' out)" = 40 ]
  check "without what it would obey" shown out
fi
printf '%s[2Ja,b,c,%s[2Ja\n1,2,3,4\n' "$escape" "$escape" >red.csv
refuses "two columns '?\[2Ja'" train red.csv --forecast
check "nor has a sentence such bytes" shown err
printf '%s[2Ja,b\n1,2\n1,3\n' "$escape" >red.csv
run train red.csv --forecast --steps 1 $small --out red.safetensors
check "nor has what is said of a column" shown out
run train slopes.ts --out b.safetensors --steps 120 $small --threads 1
check "the same seed gives the same model, for any number of threads" same a.safetensors b.safetensors
run train slopes.ts --out b.safetensors --steps 120 $small --seed 9
check "another seed gives another" differ a.safetensors b.safetensors
check "a fifth is held back" run train slopes.ts --out b.safetensors --steps 20 $small --held 2
check "and measured on" grep -q 'not learnt from: accuracy [0-9.]*%' out

for causal in no yes; do
  check "a class at each step, causal: $causal" run train slopes.ts --per-step --causal $causal --window 60 \
    --out s.safetensors --steps 150 $small
  check "is measured" run eval s.safetensors test.ts
  check "and does well" over 69
  check "the columns of a table may have the class" run train waves.csv --label state --causal $causal --window 60 \
    --out w.safetensors --steps 120 $small
  check "the end is measured on" over 69
  check "it is measured on a file" run eval w.safetensors waves.csv
  check "and does well there" over 69
  check "it predicts each row" run predict w.safetensors waves.csv --svg steps.svg
  check "a line each" [ "$(grep -c '^\(fast\|slow\)	[01]\.[0-9]*$' out)" = 600 ]
  check "the states are drawn" [ "$(tags steps.svg rect)" -ge 5 ]
done
check "a forecast" run train waves.csv --forecast --window 60 --out f.safetensors --steps 200 $small
check "is measured" run eval f.safetensors waves.csv
check "against the last value, which is worse" awk '{ gsub(",", ""); exit !($4 < $9) }' out
check "predicts the next row" run predict f.safetensors waves.csv --svg forecast.svg
check "of two numbers" [ "$(grep -c '^-*[0-9.e-]*,-*[0-9.e-]*$' out)" = 1 ]
check "drawn beside what came" [ "$(tags forecast.svg path)" = 4 ]

# what is wrong is said in one sentence, and nothing is written
cp a.safetensors before
refuses "file is missing" train
refuses "is empty" train empty --out a.safetensors
refuses "[a-z]" train folder --out a.safetensors
refuses "cannot read" train missing --out a.safetensors
refuses "--label COLUMN or --forecast" train waves.csv --out a.safetensors
refuses "no column 'none'" train waves.csv --label none --out a.safetensors
refuses "two tasks" train waves.csv --label state --forecast --out a.safetensors
refuses "add --per-step" train slopes.ts --causal --out a.safetensors
refuses "is for tables" train slopes.ts --label 1 --out a.safetensors
refuses "is a table" eval a.safetensors waves.csv
refuses "has cases" eval f.safetensors test.ts
refuses "[a-z]" eval slopes.ts test.ts
wrong() {
  words=$1
  shift
  printf "$@" >wrong.ts
  refuses "$words" train wrong.ts --out a.safetensors
}
wrong "holds no series" '@data\n'
wrong "line 2 is not a case" '@data\n1,2,3\n'
wrong "line 3 has 2 dimensions, not 1" '@data\n1,2:a\n1,2:3,4:b\n'
wrong "number 2 of dimension 1" '@data\n1,x:a\n1,2:b\n'
wrong "number 1 of dimension 1" '@data\n1e999:a\n1:b\n'
wrong "number 1 of dimension 1" '@data\ninf:a\n1:b\n'
wrong "number 1 of dimension 1" '@data\n0x10:a\n1:b\n'
wrong "number 1 of dimension 1" '@data\n\000:a\n1:b\n'
wrong "has 1 classes" '@data\n1,2:a\n'
wrong "time stamps" '@timeStamps true\n@data\n(1,2):a\n'
wrong "time stamps" '@timestamps true\n@data\n(1,2):a\n'
wrong "UTF-8" '@data\n1,2:\377\n1,3:b\n'
awk 'BEGIN { printf "@data\n"; for (i = 0; i < 4097; i++) printf "1:"; print "a" }' >wrong.ts
refuses "more than 4096 dimensions" train wrong.ts --out a.safetensors
wrong "row 3 has not 2 columns" 'a,b\n1,2\n1,2,3\n'
wrong "no column of numbers" 'a,b\nx,y\nz,w\n'
refuses "no column of numbers" train wrong.ts --forecast --out a.safetensors
wrong "line 3 has no class" '@data\n1,2:a\n1,2:?\n'
wrong "no classes to learn" '@classLabel  false\n@data\n1,2:3\n1,3:4\n'
wrong "two columns 'x'" 'x,y,x\n1,a,2\n3,b,4\n'
refuses "--noise changes nothing" train waves.csv --forecast --noise 1 --steps 3 --out a.safetensors
refuses "--pooling changes nothing" train waves.csv --forecast --pooling cls --steps 3 --out a.safetensors
refuses "--positions changes nothing" train waves.csv --forecast --positions learned --steps 3 --out a.safetensors
refuses "--stretch changes nothing" train waves.csv --label state --stretch 0 --steps 3 --out a.safetensors
refuses "--scale changes nothing" train waves.csv --label state --scale 0 --steps 3 --out a.safetensors
printf '@classLabel false\n@data\n1,2,4:3,5,4\n1,3:4,1\n' >odd.ts
check "without classes the last part is a dimension" run train odd.ts --forecast --out n.safetensors --steps 3 $small
check "of two" grep -q 'steps of 2 numbers' out
awk 'BEGIN { print "x,state"
  for (t = 0; t < 60; t++) print t % 7 ",", t % 6 == 5 ? (t % 4 ? "?" : "") : t % 2 ? "odd" : "even" }' >some.csv
check "rows without a class" run train some.csv --label state --out n.safetensors --steps 3 $small
check "make no class" grep -q '2 classes' out
check "the model predicts" run predict n.safetensors some.csv
awk -F, -v first="$(head -n 1 out | cut -f 1)" \
  'NR > 1 { $0 = $1 "," (NR == 2 ? first : "zzz") } { print }' some.csv >zzz.csv
check "a class that the model does not know" run eval n.safetensors zzz.csv
check "is an error of it there too" grep -q '^accuracy 1.67%' out
awk 'BEGIN { printf "\357\273\277"; for (t = 0; t < 40; t++) print t % 7 "," t % 3 }' >mark.csv
check "a byte order mark" run train mark.csv --forecast --out n.safetensors --steps 3 $small
check "is not of the first number" grep -q 'steps of 2 numbers' out
awk 'BEGIN { printf "\357\273\277state,x\n"; for (t = 0; t < 40; t++) print t % 2 ? "odd," t : "even," t }' >mark.csv
check "nor of the first name" run train mark.csv --label state --out n.safetensors --steps 3 $small
printf '\357\273\277' >mark.csv
refuses "is empty" train mark.csv --forecast --out a.safetensors
awk 'BEGIN { print "big,typo,huge,same"; for (t = 0; t < 60; t++)
  print (t % 2 ? "" : "-") "1e30," (t == 8 ? "1e999" : t) "," (t == 9 ? "2e38" : t) ",5" }' >big.csv
check "large numbers" run train big.csv --forecast --out n.safetensors --steps 3 $small
check "give a finite error" grep -q 'absolute error [0-9.e+]*, of the last value [0-9.e+]*$' out
check "what is no number is said" grep -q "column 'typo' is left out: row 10 is not a number" out
check "or is too large" grep -q "column 'huge' is left out: row 11 is not a number" out
check "or never changes" grep -q "column 'same' is left out: it never changes" out
sed 's/1e30/2e38/' big.csv | cut -d , -f 1 >huge.csv
refuses "no column of numbers" train huge.csv --forecast --steps 3 --out a.safetensors
printf '@data\n?:a\n,,:b\n?,?:a\n1:b\n' >odd.ts
check "missing numbers alone, and a series of one step" run train odd.ts --out o.safetensors --steps 3 $small
check "are measured" run eval o.safetensors odd.ts
printf ' @DATA \n?,NaN: a\n  \n# no case\nNA,nan,NAN:b\n 1:b \r\n' >odd.ts
check "capitals, spaces, empty lines and comments" run eval o.safetensors odd.ts
check "three cases" run predict o.safetensors odd.ts
check "of which the blank is none" [ "$(grep -c '^[ab]	' out)" = 3 ]
printf 'x,y\n1,2\nNA,4\n5,3\n' >short.csv
check "a recording too short to hold a fifth back" run train short.csv --forecast --out n.safetensors --steps 3 $small
check "with a missing number: two columns" run predict n.safetensors short.csv
check "in the forecast" grep -q '^-*[0-9.e-]*,-*[0-9.e-]*$' out
printf '@data\n1,2:other\n' >other.ts
check "a class that the model does not know is an error of it" run eval o.safetensors other.ts
refuses "2 dimensions, not 1" eval o.safetensors test.ts
check "the old model is as it was" same a.safetensors before
check "no other file appeared" [ "$(echo *.probe *.tmp*)" = "*.probe *.tmp*" ]
finish
