#!/bin/sh
# long_line.sh: lines of LINE bytes (1,000,000) for the examples that read lines: each ends in time with a result or one
# sentence, also where memory is short. LINE=100000000 takes minutes, a gigabyte on disk and two of memory. Needs
# $BUILD/lm, classify, translate and series.
cd "$(dirname "$0")/../.." || exit 1
name=long_line program=lm
. tests/programs/cli_checks.sh
line=${LINE:-1000000}
small="--threads 1 --layers 1 --dim 16 --heads 2 --memory 4 --ffn 32 --steps 1 --batch 2"
limits="unlimited"
(ulimit -v 100000 && run --help) 2>/dev/null && limits="unlimited 400000 100000 40000" # KB; not under a sanitizer

# PROGRAM ARGUMENTS...: with input, of any memory; 0, or 2 and one sentence
input=/dev/null
ends() {
  program=$1
  shift
  for limit in $limits; do
    (ulimit -v "$limit" && timeout 600 "$build/$program" "$@" >out 2>err <$input)
    status=$?
    check "$* ends with a result or a sentence in $limit KB, not with $status" \
      [ $status = 0 -o \( $status = 2 -a "$(grep -c "^$program: " err)" = 1 \) ]
  done
}
repeat() { yes "$1" | tr -d '\n' | head -c "$line"; } # the words, as often as fit
rows() { awk -v form="$1\n" 'BEGIN { for (i = 0; i < 60; i++) printf form, i % 2, i }'; }

repeat "words of all sorts, 12 of them; " >text
repeat "x" >same
{ rows '%d	short text number %d'; printf '1\t'; cat text; echo; } >long.tsv
{ rows '%d	short text number %d'; cat text; printf '\ttext\n'; } >label.tsv
{ rows 'text %d number %d	the other text'; cat text; printf '\t'; cat same; echo; } >pairs.tsv
parity() { sed 's/class.*[02468]$/even/; s/class.*/odd/'; }
{ echo @data; rows '0,1,%d:class %d' | parity; repeat 1.5,; echo 1:odd; } >long.ts
{ echo @data; rows '0,1,%d:%d'; printf '0,1:'; cat text; echo; } >class.ts
{ repeat 'x,'; echo; repeat '1,'; echo; } >wide.csv
{ echo a,b; rows '%d,%d'; printf '1,'; tr 'x' 7 <same; echo; } >digits.csv

ends lm train text --out lm.st $small
ends classify train long.tsv --out c.st $small
ends classify train label.tsv --out d.st $small
check "a label of a line's length is refused" grep -q "more than 1000 bytes" err
ends translate train pairs.tsv --out t.st $small
ends series train long.ts --out s.st $small
ends series train class.ts --out s.st $small
check "so is a class" grep -q "more than 1000 bytes" err
ends series train wide.csv --forecast --out s.st $small
ends series train digits.csv --forecast --out s.st $small
"$build/classify" train long.tsv --out c.st $small >out 2>err
input=text
ends classify predict c.st --threads 1
case $limits in *40000) limits=40000 ;; *) limits= ;; esac # with more, a translation as long takes its time
"$build/translate" train pairs.tsv --out t.st $small >out 2>err
ends translate run t.st --threads 1
printf 'a b c d e a b c\ta b c d a b\n' >few.tsv
input=/dev/null limits=unlimited
ends translate eval t.st few.tsv
rm -f text same ./*.tsv ./*.ts ./*.csv
finish
