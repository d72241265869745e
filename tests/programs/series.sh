#!/bin/sh
# series.sh: examples/series.c from outside, on small tasks made here. Needs $BUILD/series and summary.
cd "$(dirname "$0")/../.." || exit 1
root=$PWD
name=series_cli
. tests/programs/cli_checks.sh
program=series
# the accuracy that out ends with
over() { tail -n 1 out | sed 's/.*accuracy \([0-9.]*\)%.*/\1/' | awk -v min="$1" '{ exit !($1 + 0 > min) }'; }
measured="^accuracy [0-9.]*%, balanced [0-9.]*%; always '[a-z]*': [0-9.]*%; expected calibration error [0-9.]*%$"
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
check "as one line" [ "$(grep -c "$measured" out)" = 1 ]
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
check "are measured" grep -q "$measured" out
check "it predicts" run predict a.safetensors test.ts --plot cases.svg
check "a line each" [ "$(grep -c '^[0-9]*,\(up\|down\),[01]\.[0-9]*,[01]\.[0-9]*$' out)" = 30 ]
check "under a header with the classes" [ "$(head -n 1 out)" = "series,found,down,up" ]
check "with probabilities that sum to 1, the found one's the greatest" awk -F, 'NR > 1 { s = $3 + $4
  if (s < 0.999 || s > 1.001 || ($2 == "up") != ($4 > $3)) bad = 1 } END { exit bad }' out
# PICTURE WORDS...: a whole picture without numbers that are none, with these words as texts
shows() {
  picture=$1
  shift
  [ "$(head -c 5 "$picture")" = "<svg " ] && [ "$(tail -n 1 "$picture")" = "</svg>" ] || return 1
  ! grep -q -i -E '[" ]-?(nan|inf)' "$picture" || return 1
  ! command -v xmllint >/dev/null 2>&1 || xmllint --noout "$picture" || return 1
  for text; do grep -q ">$text</text>" "$picture" || return 1; done
}
check "the first is drawn, with its axes" shows cases.svg measured step "dimension 1" "dimension 2"
check "and its class" \
  grep -q 'series 1, steps 1 to [0-9]*: \(up\|down\) with [0-9]*%; true: \(up\|down\)</text>' cases.svg
check "and the next ones" grep -q 'series 12, steps 1 to' cases.svg
check "twelve at most" [ "$(grep -c '>series [0-9]*, steps' cases.svg)" = 12 ]
check "which is said" grep -q 'the first 12 of 30 series' cases.svg
# labels and columns that a terminal would obey
sed "s/up$/${escape}[31mup/" slopes.ts >red.ts
run train red.ts --steps 1 $small --out red.safetensors
run predict red.safetensors red.ts
check "a label's bytes are its own in a file" grep -q "^[0-9]*,$escape\[31mup," out
if on_terminal --help; then
  check "a terminal gets the labels" on_terminal predict red.safetensors red.ts
  check "all of them" [ "$(LC_ALL=C grep -c '^[0-9]*,\(?\[31mup\|down\),' out)" = 40 ]
  check "without what it would obey" shown out
fi
sed "s/up$/$(printf 'm"\303\274,de')/" slopes.ts >tired.ts
run train tired.ts --steps 1 $small --out tired.safetensors
tired=$(printf '"m""\303\274,de"')
check "a label with a comma and a quote" run predict tired.safetensors tired.ts
check "is in quotes, its own doubled" [ "$(head -n 1 out)" = "series,found,down,$tired" ]
if on_terminal --help; then
  check "on a terminal" on_terminal predict tired.safetensors tired.ts
  check "its characters of more bytes are whole" grep -q "^series,found,down,$tired" out
fi
printf '%s[2Ja,b,c,%s[2Ja\n1,2,3,4\n' "$escape" "$escape" >red.csv
refuses "two columns '?\[2Ja'" train red.csv --forecast
check "nor has a sentence such bytes" shown err
printf '%s[2Ja,b\n1,2\n1,3\n' "$escape" >red.csv
run train red.csv --forecast --steps 1 $small --out red.safetensors
check "nor has what is said of a column" shown out
awk -v name="$escape[2Ja" 'BEGIN { print name ",b"; for (t = 0; t < 60; t++) print t "," t % 7 }' >red.csv
run train red.csv --forecast --steps 1 $small --out red.safetensors
check "nor has what might be dropped" grep -q -- '--drop ?\[2Ja leaves it out' out
check "nothing that is said has" shown out
cp red.csv "red$escape[2J.csv"
run train "red$escape[2J.csv" --forecast --steps 1 $small --out "red$escape[2J.safetensors"
check "nor have names of files" shown out
run train slopes.ts --out b.safetensors --steps 120 $small --threads 1
check "the same seed gives the same model, for any number of threads" same a.safetensors b.safetensors
run train slopes.ts --out b.safetensors --steps 120 $small --seed 9
check "another seed gives another" differ a.safetensors b.safetensors
check "a fifth is held back" run train slopes.ts --out b.safetensors --steps 20 $small --held 2
check "and measured on" grep -q 'held-out data: accuracy [0-9.]*%' out

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
  check "which it has learnt from" grep -q '^warning: The model was trained on waves.csv, except for a part' out
  check "it predicts each row" run predict w.safetensors waves.csv --plot steps.svg
  check "a line each, numbered" awk -F, 'NR == 1 { bad = $0 != "series,step,found,slow,fast"; next }
    $1 != 1 || $2 != NR - 1 || ($3 != "slow" && $3 != "fast") { bad = 1 } END { exit bad || NR != 601 }' out
  check "the states are drawn, true and found" shows steps.svg wave other "true class" found slow fast
  check "all, and closer where the rarer class begins" \
    awk '/>steps [0-9]* to [0-9]*</ { n++ } END { exit n < 3 }' steps.svg
  check "true classes are whole, what is found is the lower the less probable" \
    awk '/<rect/ && /fill="#(0072B2|E69F00)"/ { match($0, /height="[0-9.]*/)
      high[substr($0, RSTART + 8, RLENGTH - 8)] = 1 }
      END { for (h in high) n++; exit !("22.0" in high && n > 3) }' steps.svg
  if [ -c /dev/full ]; then
    for rows in 20 601; do
      head -n $rows waves.csv >some.csv
      check "$rows lines that cannot be written are an error, with its reason" sh -c "
        '$build/series' predict w.safetensors some.csv 2>err >/dev/full
        [ \$? = 2 ] && grep -q 'cannot write the predictions: No space' err"
    done
  fi
  check "some steps are drawn" run predict w.safetensors waves.csv --plot part.svg --from 101 --to 150
  check "and no others" [ "$(grep -o '>steps [0-9]* to [0-9]*' part.svg)" = ">steps 101 to 150" ]
done
check "a routed memory" run train waves.csv --label state --causal --forget routed --window 60 --out r.safetensors \
  --steps 120 $small
check "does well on the end" over 69
check "its file says so, and that its output has a gate" \
  sh -c "'$build/summary' r.safetensors | grep 'forget routed' | grep -q 'output_gate 1'"
check "an attention that is a hook" run train slopes.ts --attention linformer --out l.safetensors --steps 3 $small
check "is measured" run eval l.safetensors test.ts
check "by its name" sh -c "'$build/summary' l.safetensors | grep -q linformer"
check "a class at each step has it, too" run train waves.csv --label state --causal no --attention linformer \
  --out l.safetensors --steps 3 $small
refuses "linformer sees all steps" train waves.csv --label state --attention linformer --out l.safetensors
refuses "linformer sees all steps" train waves.csv --forecast --attention linformer --out l.safetensors
check "a forecast" run train waves.csv --forecast --window 60 --out f.safetensors --steps 200 $small
check "is measured" run eval f.safetensors waves.csv
for task in "waves.csv --forecast" "waves.csv --label state" "slopes.ts --per-step"; do
  check "$task: a window longer than the data" run train $task --window 1000000 --steps 2 $small --out long.safetensors
  rows=$(sed -n 's/.*: --window 1000000 is longer than the \([0-9]*\) steps to train on, so .*/\1/p' out)
  check "is one of all there is, $rows" [ "${rows:-0}" -gt 99 ]
  sed -n 's/^\(step .* loss [0-9.]*\) .*/\1/p' out >long
  run train $task --window "$rows" --steps 2 $small --out whole.safetensors
  sed -n 's/^\(step .* loss [0-9.]*\) .*/\1/p' out >whole
  check "and learns as with --window $rows" same long whole
  check "of which nothing need be said" sh -c '! grep -q "is longer than" out'
done
check "against the last value, which is worse" awk '/ahead: mean/ { gsub("[,;]", ""); exit !($8 < $13) }' out
check "whose outputs are changes in the data's unit" \
  [ "$(LC_ALL=C grep -a -o '"series.change[01]":"1"' f.safetensors | wc -l)" = 2 ]
check "predicts the next row" run predict f.safetensors waves.csv --plot forecast.svg
check "of two numbers, each with bounds" [ "$(grep -c '^1,1,0.[159],-*[0-9.e-]*,-*[0-9.e-]*$' out)" = 3 ]
check "under their columns' names" [ "$(head -n 1 out)" = "series,ahead,quantile,wave,other" ]
check "which do not cross" awk -F, 'NR > 1 { if (NR > 2 && ($4 < a || $5 < b)) bad = 1; a = $4; b = $5 }
  END { exit bad || NR != 4 }' out
check "drawn beside what came, with bounds" shows forecast.svg wave other measured "forecast, 1 ahead" "80% interval"
check "each column twice: all, and the last 200 steps" \
  [ "$(grep -c 'stroke="#333333" stroke-width="1.2"' forecast.svg)" = 4 ]
check "with its bounds" [ "$(grep -c 'fill-opacity="0.25" d="M[0-9]' forecast.svg)" = 4 ]
check "up to the step that is forecast" grep -q '>steps 402 to 601<' forecast.svg
refuses "add it" predict f.safetensors waves.csv --from 3
refuses "leave no step" predict f.safetensors waves.csv --plot part.svg --from 9000
refuses "is after" predict f.safetensors waves.csv --plot part.svg --from 9 --to 8
awk 'BEGIN { print "a<b&c,x"; for (t = 0; t < 40; t++) print t % 7 "," t % 3 }' >odd.csv
run train odd.csv --forecast --steps 1 $small --out odd.safetensors
run predict odd.safetensors odd.csv --plot odd.svg
check "names are text, whatever is in them" shows odd.svg 'a&lt;b&amp;c' x

# what it says of a model is true: three classes of 6, 3 and 1 cases, of which a model that says "a" always knows one
awk 'BEGIN { print "@data"
  for (i = 0; i < 20; i++) print i % 3 "," i % 2 ":" (i % 10 < 6 ? "a" : i % 10 < 9 ? "b" : "c") }' >abc.ts
run train abc.ts --out abc.safetensors --steps 1 --lr 1e-9 $small
check "a model that has learnt nothing" run eval abc.safetensors abc.ts
counts() { # from the matrix alone: each class's recall, precision and F1, then the last line
  awk '/found as/ { matrix = 1; next } matrix && /^ *[1-3] [abc]/ {
         n++
         for (f = 1; f <= 3; f++) { m[n, f] = $(2 + f); row[n] += m[n, f]; column[f] += m[n, f]; all += m[n, f] } }
       END { for (c = 1; c <= 3; c++) {
               right += m[c, c]; recall += m[c, c] / row[c]; if (row[c] > most) most = row[c]
               printf "%s %d %.1f%% %s %.1f%%\n", substr("abc", c, 1), row[c], 100 * m[c, c] / row[c],
                 column[c] ? sprintf("%.1f%%", 100 * m[c, c] / column[c]) : "-", 200 * m[c, c] / (row[c] + column[c]) }
             printf "accuracy %.2f%%, balanced %.2f%%; always '"'a'"': %.2f%%\n", 100 * right / all, 100 * recall / 3,
               100 * most / all }' out
}
said() { sed -n 's/^\([abc]\)  */\1 /p' out | sed 's/  */ /g' | cut -d ' ' -f 1-5
  sed -n 's/^\(accuracy.*\); expected.*/\1/p' out; }
check "is measured as its own matrix says" [ "$(counts)" = "$(said)" ]
check "of which the most frequent class is 60%" grep -q "always 'a': 60.00%" out
check "each class once" [ "$(said | wc -l)" = 4 ]

# detectors: from a recording whose class the number itself says, but for the steps at which it changes
awk 'BEGIN { print "x,state"; for (t = 0; t < 600; t++) { s = int(t / 20) % 2
  print (t % 20 < 3 && t > 20 ? 1 - s : s) "," (s ? "on" : "off") } }' >late.csv
check "a detector" run train late.csv --label state --causal --out late.safetensors --window 60 --steps 1 $small
check "has a delay" grep -q '^class .* begins *found *delay' out
check "and each class begins as often as it does" awk '/^(on|off)  / { n += $8 } END { exit n != 5 }' out
check "what is found, and what false, is said" grep -q '^A beginning is found if .* It is false if ' out
check "a detector that errs" run train late.csv --label state --causal --out late.safetensors --window 60 --steps 60 \
  $small
awk 'BEGIN { print "x,state"; for (t = 0; t < 600; t++) { s = int(t / 20) % 2
  print (t % 20 > 7 && t % 20 < 12 ? 1 - s : s) "," (s ? "on" : "off") } }' >false.csv
check "finds" sh -c "'$build/series' predict late.safetensors false.csv >found.txt"
check "and is measured" run eval late.safetensors false.csv
tail -n +2 found.txt | cut -d , -f 3 >founds.txt
tail -n +2 false.csv | cut -d , -f 2 | paste - founds.txt | awk '
  NR > 1 && $2 != before && $2 != $1 { n[$2]++ } { before = $2 }
  END { print "off", n["off"] + 0; print "on", n["on"] + 0 }' >alarms.txt
check "false begins are counted" sh -c "awk '/^(on|off) / { print \$1, \$NF }' out | sort | diff - alarms.txt >&2"
check "there are some false ones" awk '{ n += $2 } END { exit n < 5 }' alarms.txt
awk 'BEGIN { print "x,state"; for (t = 0; t < 300; t++) print t % 7 "," (t < 150 ? "slow" : "brisk") }' >late_class.csv
check "what is not learnt from has one class" run train late_class.csv --label state --steps 2 $small \
  --out c.safetensors
check "which has no balance" grep -q "balanced is not defined, 'slow' is absent; always 'brisk': 100.00%" out
awk 'BEGIN { print "x,is_anomaly"; for (t = 0; t < 300; t++) print t % 7 ",0" }' >one.csv
refuses "column 'is_anomaly' is '0' in every row" train one.csv --label is_anomaly --out x

# rare events: ten short incidents in 4,000 rows, none of them in the last 700
awk 'BEGIN { srand(11); print "load,noise,state"; for (t = 0; t < 4000; t++) { bad = t % 330 > 310 && t < 3300
  printf "%.3f,%.3f,%s\n", sin(t / 20) + (bad ? 1.2 : 0) + rand(), rand(), bad ? "incident" : "ok" } }' >rare.csv
check "a rare class" run train rare.csv --label state --held 2 --steps 150 $small --window 100 --out rare.safetensors \
  --aim f1
check "is counted in each part" awk '/numbers in 2 classes/ { sub(/.*incident. is /, ""); n = split($0, part, ";")
  for (i = 1; i <= n; i++) { split(part[i], of, " "); is += of[1]; all += of[3]; if (!(of[1] > 0)) bad = 1 }
  exit bad || n != 3 || is != 190 || all != 4000 }' out
check "which warns of few" grep -q "^warning: 'incident' comes [1-9] times* in the part that chooses the model" out
check "a threshold is chosen" grep -q '^The threshold is 0.[0-9]* for f1. In validation it has a precision of ' out
check "average precision is in the table" awk '/^incident/ { exit !($6 + 0 > 20 && $7 + 0 > 60) }' out
check "its log loss is below the shares'" awk '/^The log loss/ { exit !($5 + 0 < $NF + 0) }' out
check "other thresholds are listed, more found for less precision" awk '/^probability/ { on = 1; next }
  on && /^ *0/ { n++; if ($1 > was && n > 1) bad = 1; was = $1 } END { exit bad || n < 2 }' out
check "a linear model is beside it" grep -q '^linear model of rolling means and deviations  *[0-9.]*%' out
grep '^incident' out >learnt
sed -n '1p;802,1601p' rare.csv >second.csv
check "the model keeps its threshold" run eval rare.safetensors second.csv
beside=$(sed -n 's/^linear model.* \([0-9.]*%\)  *[0-9.]*%  *[0-9.]*$/\1/p' out)
together=$(sed -n 's/^both together  *\([0-9.]*%\) .*/\1/p' out)
check "and the linear model" run eval rare.safetensors second.csv --by linear
check "whose average precision is what stands beside the model's" \
  [ "$beside" = "$(awk '/^incident/ { print $6 }' out)" ]
check "both together" run eval rare.safetensors second.csv --by both
check "have the average precision that stands beside them" [ "$together" = "$(awk '/^incident/ { print $6 }' out)" ]
run train rare.csv --label state --held 2 --steps 60 $small --window 100 --out plain.safetensors
check "without an aim there is no threshold" [ "$(grep -c '^The threshold' out)" = 0 ]
refuses "--aim takes" train rare.csv --label state --aim F1 --out a.safetensors
refuses "--aim takes" train rare.csv --label state --aim precision=2 --out a.safetensors
refuses "are for classes" train waves.csv --forecast --aim f1 --out a.safetensors
refuses "has no linear model" predict f.safetensors waves.csv --by linear
# a class that is in no part but the first: no temperature can be fitted
awk 'BEGIN { srand(12); print "x,state"; for (t = 0; t < 1500; t++) print rand() "," (t == 700 ? "incident" : "ok") }' \
  >once.csv
check "a class that validation lacks" run train once.csv --label state --steps 30 $small --out once.safetensors
check "leaves the temperature alone" [ "$(grep -c '^The temperature' out)" = 0 ]
check "and is warned of" grep -q "comes 0 times in the part that chooses the model" out

# forecasts: errors count alike in each column, whatever its unit; columns can be chosen
awk 'BEGIN { print "ms,big,wave,flat"; for (t = 0; t < 400; t++) printf "%d,%.4f,%.4f,3\n", 15 * t,
  1000 * sin(t * 1.3), sin(t * 0.9) }' >units.csv
check "a forecast of columns of different units" run train units.csv --forecast --out u.safetensors --steps 3 $small
check "a clock is named" grep -q "column 'ms' only rises.* is read like any other.*--drop ms leaves it out" out
check "and what is constant" grep -q "column 'flat' is left out, as it never changes" out
number=" *[0-9.e+]*"
check "each column has its line" \
  [ "$(grep -c "^\(ms\|big\|wave\)  *1 $number $number $number% $number% $number *[0-9]*\(  the .* wins\)*$" out)" = 3 ]
check "one column is dropped" run train units.csv --forecast --drop ms,3 --out u.safetensors --steps 3 $small
check "so that one is left" grep -q 'steps of 1 numbers' out
awk 'BEGIN { for (t = 0; t < 320; t++) { s += sin(t * 1.3); q += sin(t * 1.3) ^ 2 }
  m = s / 320; d = sqrt(q / 320 - m * m)
  for (t = 320; t < 399; t++) { e = sin((t + 1) * 1.3) - sin(t * 1.3); a += e < 0 ? -e : e }
  printf "%.4f\n", a / 79 / d }' >wanted
check "its error is in deviations" sh -c "sed -n 's/.*of the last value \([0-9.]*\).*/\1/p' out | paste wanted - |
  awk '{ d = \$1 / \$2 - 1; exit !(d * d < 0.001) }'"
check "two are chosen" run train units.csv --forecast --columns 2,wave --out u.safetensors --steps 3 $small
check "so that two are left" grep -q 'steps of 2 numbers' out
check "a clock that is chosen is meant" \
  run train units.csv --forecast --columns ms,wave --out u.safetensors --steps 3 $small
check "and not spoken of" sh -c "grep -q 'steps of 2 numbers' out && ! grep -q 'only rises' out"
awk 'BEGIN { print "when,wave"; for (t = 0; t < 400; t++) printf "2026-01-%02d 10:%02d,%.4f\n", 1 + t / 60, t % 60,
  sin(t) }' >dates.csv
check "a column of dates" run train dates.csv --forecast --out d.safetensors --steps 3 $small
check "is left out, with one of them" \
  grep -q "column 'when' is left out: line 2 has '2026-01-01 10:00', which is no number or" out
check "windows that continue one another" run train units.csv --forecast --drop ms --carry --window 50 \
  --out c.safetensors --steps 60 $small
check "are read as one sequence, whatever their length" run eval c.safetensors units.csv
head -n 81 units.csv >tail.csv
run train units.csv --forecast --drop ms --carry --window 50 --held 1 --out c.safetensors --steps 60 $small
grep '^On held' out | sed 's/^[^:]*: //' >trained
run eval c.safetensors tail.csv
check "each recording from its beginning, in training as later" \
  sh -c "[ -s trained ] && grep ' ahead: ' out | cmp - trained"
run train units.csv --forecast --drop ms --window 50 --held 1 --out n.safetensors --steps 60 $small
check "which is another model than one of windows by themselves" differ c.safetensors n.safetensors
refuses "no column 'tide'" train units.csv --forecast --drop tide --out a.safetensors
refuses "is not of numbers: line 2" train waves.csv --forecast --columns time --out a.safetensors
refuses "are for tables" train slopes.ts --drop 1 --out a.safetensors
refuses "--carry is for a recording" train waves.csv --label state --causal no --carry --out a.safetensors

# several steps ahead: what is periodic is as easy far ahead as near, and intervals hold what they say
awk 'BEGIN { srand(4); print "x"
  for (t = 0; t < 1500; t++) printf "%.4f\n", 100 + 2 * sin(t * 0.5236) + 4 * rand() }' >sine.csv
check "a forecast of 1, 6 and 24 steps" run train sine.csv --forecast --ahead 1,6,24 --window 60 --out h.safetensors \
  --steps 400 $small
check "has a line for each" [ "$(grep -c ' ahead: mean absolute error' out)" = 3 ]
check "it finds the season" awk '/^x  / && $1 == "x" { n++; if ($8 % 12) bad = 1 } END { exit bad || n != 3 }' out
check "which at 6 is better than the last value" awk '/ 6 ahead:/ { gsub("[,;]", ""); for (i = 1; i < NF; i++) {
  if ($i == "season") season = $(i + 1)
  if ($i == "value") last = $(i + 1) } } END { exit !(season < 0.6 * last) }' out
check "far better than the last value at 6" awk '/ 6 ahead:/ { gsub("[,;]", ""); for (i = 1; i < NF; i++) {
  if ($i == "deviations") error = $(i + 1)
  if ($i == "value") last = $(i + 1) } } END { exit !(error < 0.6 * last) }' out
check "an interval holds about what it says" \
  awk '/ hold / { sub("%", "", $NF); n++; if ($NF + 0 < 60 || $NF + 0 > 95) bad = 1 }
  END { exit bad || n != 3 }' out
check "three forecasts" run predict h.safetensors sine.csv --plot three.svg
check "are drawn, each distance" shows three.svg "forecast, 1 ahead" "forecast, 6 ahead" "forecast, 24 ahead"
check "to the last one's step" grep -q '>steps 1325 to 1524<' three.svg
check "of three quantiles" [ "$(grep -c '^1,\(1\|6\|24\),0.[159],[0-9.]*$' out)" = 9 ]
check "that do not cross" awk -F, 'NR > 1 { if ($2 == ahead && $4 < was) bad = 1; ahead = $2; was = $4 }
  END { exit bad }' out
awk 'BEGIN {
  print "x,hour,y"
  for (t = 0; t < 600; t++) print 10 * (t % 24 == 5) + t % 3 "," t % 24 "," t % 5
}' >hours.csv
check "a column that is read alone" run train hours.csv --forecast --inputs hour --window 60 --out i.safetensors \
  --steps 60 $small
check "is not measured" sh -c "grep -q '^x  ' out && grep -q '^y  ' out && ! grep -q '^hour  ' out"
check "nor forecast" run predict i.safetensors hours.csv --plot hours.svg
check "in the table" [ "$(head -n 1 out)" = "series,ahead,quantile,x,y" ]
check "of three lines" [ "$(grep -c '^1,1,0.[159],[-0-9.e]*,[-0-9.e]*$' out)" = 3 ]
tail -n 3 out >other
check "every step's forecasts" run predict i.safetensors hours.csv --every
check "are numbered" awk -F, 'NR == 1 { bad = $0 != "series,step,ahead,quantile,x,y"; next }
  $2 != int((NR - 2) / 3) + 1 { bad = 1 } END { exit bad || NR != 1801 }' out
check "and end as without" [ "$(tail -n 3 out | cut -d , -f 1,3-)" = "$(cat other)" ]
refuses "no column to forecast" train hours.csv --forecast --inputs x,hour,y --out a.safetensors
refuses "no column 'day'" train hours.csv --forecast --inputs day --out a.safetensors
refuses "is for forecasts" train hours.csv --label hour --inputs x --out a.safetensors
refuses "is for forecasts" predict rare.safetensors rare.csv --every
check "without intervals" run train sine.csv --forecast --interval 0 --window 60 --out h.safetensors --steps 3 $small
check "there are none" [ "$(grep -c intervals out)" = 0 ]
for wrong in 0 6,1 1,,2 1,x 1,; do
  refuses "--ahead takes" train sine.csv --forecast --ahead $wrong --out a.safetensors
done
refuses "has 1500 steps, of which at most 1200 in a row .* --ahead 1,1200 must" train sine.csv --forecast \
  --ahead 1,1200 --out a.safetensors
refuses "at most 1[0-9] in a row" train slopes.ts --forecast --ahead 20 --out a.safetensors
check "a forecast farther than the part held out" run train sine.csv --forecast --ahead 1,400 --out h.safetensors \
  --steps 3 $small
check "is not measured" grep -q '^On held-out data: 400 ahead: there is nothing to measure on$' out
check "no figure is none" sh -c "! grep -q -i nan out"
refuses "--interval changes nothing" train slopes.ts --interval 50 --out a.safetensors

# cells: every word for nothing, and one that is a slip
awk 'BEGIN { split("NA N/A na null None ? - NaN", w, " "); print "x,y"; for (t = 0; t < 300; t++) {
  x = t % 40 == 7 ? " " w[int(t / 40) + 1] " " : t % 40 == 8 ? "\" \"" : t % 7
  print x "," (t == 99 ? "oops" : t % 5) } }' >nothing.csv
check "words for what is missing" run train nothing.csv --forecast --out m.safetensors --steps 3 $small
check "are no other column" grep -q 'steps of 2 numbers' out
check "one bad cell is a warning" grep -q "line 101, column 'y': 'oops' is not a number and counts as missing$" out
check "and no other" [ "$(grep -c 'counts as missing' out)" = 1 ]
check "also where a model reads it" run predict m.safetensors nothing.csv
check "but not among what it finds" grep -q "line 101, column 'y': 'oops'" err
check "which is a name and three lines" [ "$(wc -l <out)" = 4 ]
awk '{ if (NR == 12) sub(/[0-9]\.[0-9]*,/, "x7,"); print }' slopes.ts >slip.ts
check "a case with a slip" run train slip.ts --out m.safetensors --steps 3 $small
check "is a warning too" grep -q "line 12, number [0-9]* of dimension 1: '-*x7' is not a number" out

# probabilities are what they say: labels of which three in ten are wrong cannot be known better than so
awk 'BEGIN { srand(6); print "@data"; for (i = 0; i < 2000; i++) { up = i % 2; line = ""
  for (t = 0; t < 8; t++) line = line (t ? "," : "") (up ? t : -t) / 8 + rand()
  print line ":" (rand() < 0.3 ? 1 - up : up) } }' >doubt.ts
check "labels that are often wrong" run train doubt.ts --held 1 --valid 0.25 --out d.safetensors --steps 200 \
  --lr 0.01 $small
check "a temperature is found" \
  grep -q '^The temperature [0-9.]* is chosen by [0-9]* validation samples. It changes their expected calibration' out
check "probabilities are off by little" awk '/^On held/ { sub("%", "", $NF); exit !($NF + 0 < 12) }' out
check "none is surer than can be" run predict d.safetensors doubt.ts
check "on average" awk -F, 'NR > 1 { s += $3 > $4 ? $3 : $4 } END { s /= NR - 1; exit !(s > 0.55 && s < 0.82) }' out

# validation: the best model is kept, and training ends where none gets better
cases 150 5 >many.ts
check "validation" run train many.ts --out v.safetensors --valid 0.2 --steps 60 --patience 0 $small
check "is shown" grep -q 'validation AP [0-9.]*%' out
check "without it none is" run train many.ts --out v.safetensors --valid 0 --steps 60 $small
check "said" [ "$(grep -c validation out)" = 0 ]
awk 'BEGIN { srand(9); print "x"; for (t = 0; t < 600; t++) print rand() }' >noise.csv
check "of noise nothing can be learnt" run train noise.csv --forecast --window 50 --lr 0.02 --patience 2 --steps 400 \
  --out v.safetensors $small
check "so that training ends early" grep -q 'The training ends early. The model of step [0-9]* is the best' out
best=$(sed -n 's/.*The model of step \([0-9]*\) is.*/\1/p' out)
check "at its best" [ "${best:-400}" -lt 300 ]
# by chance a model may rank a rare class best before it has learnt anything: that is never the one that is kept
awk 'BEGIN { x = 7; print "a,b,state"; for (i = 0; i < 1500; i++) { x = x * 16807 % 2147483647; y = x % 1000
  x = x * 16807 % 2147483647; print y / 100 "," x % 1000 / 100 "," (x % 23 == 0 ? "rare" : "ok") } }' >chance.csv
for seed in 2 3 4 5; do
  check "classes by chance, seed $seed" run train chance.csv --label state --window 50 --steps 12 --patience 3 \
    --seed $seed --layers 1 --dim 8 --heads 2 --memory 4 --ffn 16 --out v.safetensors
  check "the model of step 0 is not the best" \
    sh -c "grep -q 'validation AP' out && ! grep -q 'The model of step 0 is' out"
done

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
wrong "'a' is the class of every case" '@data\n1,2:a\n'
wrong "time stamps" '@timeStamps true\n@data\n(1,2):a\n'
wrong "time stamps" '@timestamps true\n@data\n(1,2):a\n'
wrong "UTF-8" '@data\n1,2:\377\n1,3:b\n'
awk 'BEGIN { printf "@data\n"; for (i = 0; i < 4097; i++) printf "1:"; print "a" }' >wrong.ts
refuses "more than 4096 dimensions" train wrong.ts --out a.safetensors
wrong "has no rows below its header" 'a,b\n'
wrong "row 3 has 3 columns, the first row 2" 'a,b\n1,2\n1,2,3\n'
wrong "no column of numbers" 'a,b\nx,y\nz,w\n'
refuses "no column of numbers" train wrong.ts --forecast --out a.safetensors
wrong "line 3 has no class" '@data\n1,2:a\n1,2:?\n'
wrong "no classes to learn" '@classLabel  false\n@data\n1,2:3\n1,3:4\n'
wrong "two columns 'x'" 'x,y,x\n1,a,2\n3,b,4\n'
refuses "--noise changes nothing" train waves.csv --forecast --noise 1 --steps 3 --out a.safetensors
refuses "--pooling changes nothing" train waves.csv --forecast --pooling cls --steps 3 --out a.safetensors
refuses "--positions changes nothing" train waves.csv --forecast --positions learned --steps 3 --out a.safetensors
refuses "--forget changes nothing" train slopes.ts --forget routed --steps 3 --out a.safetensors
refuses "--forget changes nothing" train waves.csv --label state --causal no --forget no --steps 3 --out a.safetensors
refuses "--ahead changes nothing" train slopes.ts --ahead 5 --steps 3 --out a.safetensors
refuses "--causal changes nothing" train waves.csv --forecast --causal no --steps 3 --out a.safetensors
refuses "--per-step changes nothing" train waves.csv --label state --per-step no --steps 3 --out a.safetensors
refuses "--per-step is for classes" train waves.csv --forecast --per-step --steps 3 --out a.safetensors
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
awk -F, -v first="$(sed -n 2p out | cut -d , -f 3)" \
  'NR > 1 { $0 = $1 "," (NR == 2 ? first : "zzz") } { print }' some.csv >zzz.csv
check "a class that the model does not know" run eval n.safetensors zzz.csv
check "is an error of it there too" grep -q '^accuracy 1.67%' out
awk 'BEGIN { printf "\357\273\277"; for (t = 0; t < 40; t++) print t % 7 "," t % 3 }' >mark.csv
check "a byte order mark" run train mark.csv --forecast --out n.safetensors --steps 3 $small
check "is not of the first number" grep -q 'steps of 2 numbers' out
awk 'BEGIN { printf "\357\273\277state,x\n"; for (t = 0; t < 40; t++) print t % 2 ? "odd," t : "even," t }' >mark.csv
check "nor of the first name" run train mark.csv --label state --out n.safetensors --steps 3 $small
# decimal commas, as tables of some countries have them: the same numbers, to the last bit
awk 'BEGIN { print "a;b"; for (t = 0; t < 300; t++) printf "%d.%d;%.3f\n", t % 7, t % 10, t % 5 / 3 }' >points.csv
tr . , <points.csv >commas.csv
check "a table with decimal points" run train points.csv --forecast --steps 5 $small --out points.safetensors
check "and with decimal commas" run train commas.csv --forecast --steps 5 $small --out commas.safetensors
run predict points.safetensors points.csv
cp out other
check "predicts" run predict commas.safetensors commas.csv
check "the same" same out other
sed 1d commas.csv >bare.csv
check "without a header, too" run train bare.csv --forecast --steps 5 $small --out bare.safetensors
check "two columns" grep -q 'steps of 2 numbers' out
awk 'BEGIN { for (t = 0; t < 300; t++) printf "%d,%d;%d\n", t % 7, t % 10, t % 5 }' | tr ';' , >ragged.csv
check "three columns are three" run train ragged.csv --forecast --steps 2 $small --out bare.safetensors
printf '\357\273\277' >mark.csv
refuses "is empty" train mark.csv --forecast --out a.safetensors
awk 'BEGIN { print "big,typo,huge,same"; for (t = 0; t < 60; t++)
  print (t % 2 ? "" : "-") "1e30," (t % 9 == 8 ? "1e999" : t) "," (t % 9 == 0 ? "2e38" : t) ",5" }' >big.csv
check "large numbers" run train big.csv --forecast --out n.safetensors --steps 3 $small
check "give a finite error" \
  grep -q 'in deviations, [0-9.e+]*, of the last value [0-9.e+]*, of the season [0-9.e+]*;' out
check "what is no number is said" grep -q "column 'typo' is left out: line 10 has '[^']*', which is no number" out
check "or is too large" \
  grep -q "column 'huge' is left out: line 2 has '[^']*', which is no number or too large" out
check "or never changes" grep -q "column 'same' is left out, as it never changes" out
sed 's/1e30/2e38/' big.csv | cut -d , -f 1 >huge.csv
refuses "no column of numbers" train huge.csv --forecast --steps 3 --out a.safetensors
printf '@data\n?:a\n,,:b\n?,?:a\n1:b\n' >odd.ts
check "missing numbers alone, and a series of one step" run train odd.ts --out o.safetensors --steps 3 $small
check "are measured" run eval o.safetensors odd.ts
printf ' @DATA \n?,NaN: a\n  \n# no case\nNA,nan,NAN:b\n 1:b \r\n' >odd.ts
check "capitals, spaces, empty lines and comments" run eval o.safetensors odd.ts
check "three cases" run predict o.safetensors odd.ts
check "of which the blank is none" [ "$(grep -c '^[1-3],[ab],' out)" = 3 ]
printf 'x,y\n1,2\nNA,4\n5,3\n' >short.csv
check "a recording too short to hold a fifth back" run train short.csv --forecast --out n.safetensors --steps 3 $small
check "with a missing number: two columns" run predict n.safetensors short.csv
check "in the forecast" grep -q '^1,1,0.5,-*[0-9.e-]*,-*[0-9.e-]*$' out
awk 'BEGIN { print "x,y"; for (t = 0; t < 300; t++)
  print 50 + t % 7 "," (t < 5 || t % 9 == 4 || t > 290 ? "" : t % 5) }' >gaps.csv
check "columns with gaps" run train gaps.csv --forecast --window 50 --out gaps.safetensors --steps 60 $small
check "are forecast" run predict gaps.safetensors gaps.csv
check "from the last number, where the last cell is missing" awk -F, 'NR > 1 { n++
  if (!($4 > 30 && $4 < 80 && $5 > -9 && $5 < 9)) bad = 1 } END { exit bad || n != 3 }' out
check "and no forecast is nan" sh -c "! grep -q -i nan out"
printf '@data\n1,2:other\n' >other.ts
check "a class that the model does not know is an error of it" run eval o.safetensors other.ts
# a model file with more columns than a file may have
cat >wide.c <<'END'
#include <stdio.h>
#include "luna.h"
int main(void) {
  luna_lm_config config = {.features = 4097, .outputs = 4097, .layers = 1};
  luna_ctx *ctx = luna_open(NULL);
  luna_params *params = luna_params_open(ctx);
  luna_lm model;
  config.layer.dim = config.layer.ffn = 2, config.layer.heads = config.layer.memory = 1;
  bool good = luna_lm_init(&model, params, &config) == LUNA_OK;
  good = good && luna_params_set_text(params, "series.task0", "0 1 1 32 0 0") == LUNA_OK;
  good = good && luna_params_set_text(params, "series.ahead0", "1") == LUNA_OK;
  for (int i = 0; i < 4097 && good; i++) {
    char key[40];
    snprintf(key, sizeof key, "series.change%d", i);
    good = luna_params_set_text(params, key, "1") == LUNA_OK;
  }
  good = good && luna_save(params, luna_path("wide.safetensors")) == LUNA_OK;
  luna_close(ctx);
  return good ? 0 : 1;
}
END
check "a model that is too wide is made" sh -c \
  "${CC:-cc} ${CFLAGS:-} -I'$root' wide.c '$build/luna.o' -o wide -lm -lpthread && ./wide"
refuses "wide.safetensors is not a model that series made" predict wide.safetensors other.ts
refuses "2 dimensions, not 1" eval o.safetensors test.ts
check "the old model is as it was" same a.safetensors before
check "no other file appeared" [ "$(echo *.probe *.tmp*)" = "*.probe *.tmp*" ]
finish
