#!/bin/sh
# flags.sh: what each program's --help says. It ends with 0 and begins with an example command whose flags are there;
# each line of help is a sentence. The table "Flags" of examples/guide.md has the same flags, programs and sentences.
# One name says one thing: the first sentence of a flag is the same in all programs, and no two flags say the same. Only
# recall's --memory says which memories are compared, and elsewhere it is their number of slots.
# flags.sh --write makes the table anew. Needs the programs in $BUILD.
cd "$(dirname "$0")/../.." || exit 1
build=${BUILD:-build}
guide=examples/guide.md
work=$build/flags
programs="lm mlm translate classify listops mnist series lra compress arena attention_map summary export lesson"
programs="$programs recall"
passed=0 failed=0
rm -rf "$work"
mkdir -p "$work"

# none SENTENCE: one check: nothing is wrong, or the sentence and the lines of what is
none() {
  if [ -s "$work/wrong" ]; then
    failed=$((failed + 1))
    echo "flags: $1"
    head -n 10 "$work/wrong"
  else passed=$((passed + 1)); fi
}

# "flag<tab>program<tab>value<tab>help", without the default in brackets and the commands that take it, each once
for program in $programs; do
  "$build/$program" --help 2>/dev/null | awk -v program="$program" '/^  --/ {
    flag = $1; value = $2; sub(/^  --[a-z0-9-]* (FILE|TEXT|NAME|N|X|\[yes\|no\]) */, "")
    if (match($0, /^[a-z, ]*  /)) $0 = substr($0, RLENGTH + 1)
    sub(/ *\([^()]*\)$/, ""); gsub(/\|/, "or"); sub(/^\[yes\|no\]$/, "yes or no", value)
    if (!known[flag, $0]++) print flag "\t" program "\t" value "\t" $0 }'
done >"$work/flags"

# a row for each flag: the programs, and what they say: the sentence that all have, then what some say besides
table() {
  echo '| flag | programs | what it says |'
  echo '|---|---|---|'
  awk -F '\t' '
    function meaning(help) { return index(help, ". ") ? substr(help, 1, index(help, ". ")) : help }
    function rest(help, flag, program) {
      if (program == "recall" && flag == "--memory") return help
      return index(help, ". ") ? substr(help, index(help, ". ") + 2) : ""
    }
    !($1 in help) { help[$1] = $4 }
    help[$1] != $4 { differ[$1] = 1 }
    !(($1, $2) in has) { has[$1, $2] = 1; programs[$1] = programs[$1] (programs[$1] ? ", " : "") $2 }
    rest($4, $1, $2) { if (!(($1, $4) in who)) order[$1] = order[$1] (order[$1] ? "\n" : "") $4
      who[$1, $4] = who[$1, $4] (who[$1, $4] ? ", " : "") $2 }
    END { for (f in help) {
      text = help[f]
      if (f in differ) {
        text = meaning(help[f])
        count = split(order[f], each, "\n")
        for (i = 1; i <= count; i++) text = text " " who[f, each[i]] ": " rest(each[i], f, who[f, each[i]])
      }
      print "| `" f "` | " programs[f] " | " text " |" } }' "$work/flags" | LC_ALL=C sort
}
table >"$work/made"
sed -n '/^## Flags$/,/^## [^F]/p' "$guide" | grep '^|' >"$work/kept"
if [ "$1" = --write ]; then
  awk -v table="$work/made" '/^## Flags$/ { on = 1 } /^## [^F]/ { on = 0 }
    on && /^\|/ { if (!done++) while ((getline line <table) > 0) print line; next }
    { print }' "$guide" >"$work/guide" && cp "$work/guide" "$guide"
  exit
fi
for program in $programs; do                              # each flag of a program is one check
  for flag in $(awk -F '\t' -v p="$program" '$2 == p { print $1 }' "$work/flags" | sort -u); do
    if grep -F "| \`$flag\` |" "$work/kept" | cut -d '|' -f 3 | tr ',' '\n' | grep -q "^ $program *$"; then
      passed=$((passed + 1))
    else
      failed=$((failed + 1))
      echo "flags: $guide does not say that $program has $flag; tests/tools/flags.sh --write writes the table"
    fi
  done
done
diff "$work/kept" "$work/made" >"$work/wrong"
none "the table in $guide is not what --help says; tests/tools/flags.sh --write writes it:"

# one name, one meaning; one meaning, one name
awk -F '\t' '{ help = $4; sub(/\. .*/, ".", help) }
  !($1 in first) { first[$1] = help; whose[$1] = $2 }
  $1 == "--memory" && $2 == "recall" { next }
  first[$1] != help { print $1 " is \"" first[$1] "\" in " whose[$1] " and \"" help "\" in " $2 }' \
  "$work/flags" >"$work/wrong"
none "a flag has two meanings:"
awk -F '\t' '($4 in flag) && flag[$4] != $1 { print flag[$4] " and " $1 " are both \"" $4 "\"" } { flag[$4] = $1 }' \
  "$work/flags" >"$work/wrong"
none "a meaning has two flags:"
# the names of attentions are those of lra, which has all
awk -F '\t' '$1 == "--attention" { sub(/.*NAME is /, "", $4); sub(/\.$/, "", $4); gsub(/,| or/, "", $4)
  print $2 "\t" $4 }' "$work/flags" >"$work/attentions"
awk -F '\t' 'NR == FNR && $1 == "lra" { count = split($2, all, " "); for (i = 1; i <= count; i++) known[all[i]] = 1 }
  NR == FNR { next }
  { n = split($2, own, " "); for (i = 1; i <= n; i++) if (!(own[i] in known)) print $1 " has " own[i] ", lra has not" }
  END { if (NR < 14 || !("softmax" in known)) print "names of attentions are not found in --help" }' \
  "$work/attentions" "$work/attentions" >"$work/wrong"
none "--attention has other names in one program than in another:"
# help: of the programs and of each of their commands
(cd examples && ls [a-z]*.c lra/lra.c) | sed 's,.*/,,; s/\.c$//' | sort >"$work/programs"
echo $programs | tr ' ' '\n' | sort | diff - "$work/programs" >"$work/wrong"
none "these programs are not among those whose --help is tested, or are no more:"
# helps PROGRAM [COMMAND]
helps() {
  "$build/$1" $2 --help >"$work/help" 2>"$work/wrong" </dev/null || echo "it ends with $?" >>"$work/wrong"
  none "$* --help fails:"
  awk -v begin="  $*" 'NR == 1 && $0 != "Example:" || NR == 2 && $0 != begin && index($0, begin " ") != 1 { print }
    END { if (NR < 2) print "it has no example" }' "$work/help" >"$work/wrong"
  none "$* --help does not begin with an example command:"
  awk -v name="$1" 'NR == 2 { for (i = 2; i <= NF; i++) if ($i ~ /^--/) used[$i] = 1 }
    /^  --/ { delete used[$1] } $1 == name { for (i = 2; i <= NF; i++) if (NR > 2) delete used[$i] }
    END { for (flag in used) print flag }' "$work/help" >"$work/wrong"
  none "the example of $* --help has flags that are not there:"
  # after the names and the values: a capital (or the name of a value) and a full stop
  sed -n 's/^  --[a-z0-9-]* [^ ]*  *//p; s/^  [a-z_]* [^-]*\[flags\]  *//p; s/^  [a-z]*   *//p' "$work/help" |
    sed 's/^[a-z_, ]*  *\([A-Z]\)/\1/; s/ *([^()]*)$//' | grep -v '^[A-Z"].*\.$' >"$work/wrong"
  none "$* --help has lines that are no sentences:"
}
# script NAME COMMAND ...: the name in its example, and how it is called
script() {
  name=$1
  shift
  "$@" --help >"$work/help" 2>"$work/wrong" </dev/null || echo "it ends with $?" >>"$work/wrong"
  none "$name --help fails:"
  awk -v begin="  $name " 'NR == 1 && $0 != "Example:" || NR == 2 && index($0, begin) != 1 { print }
    END { if (NR < 2) print "it has no example" }' "$work/help" >"$work/wrong"
  none "$name --help does not begin with an example command:"
}
script runs.sh sh examples/runs.sh
script models.sh sh examples/models/models.sh
if command -v python3 >/dev/null 2>&1; then
  script convert_fairseq.py python3 examples/convert_fairseq.py
  script curves.py python3 examples/lra/curves.py
fi
for program in $programs; do
  helps "$program"
  [ "$(grep -c '^  .*\[flags\]' "$work/help")" -lt 2 ] && continue
  for command in $(sed -n "s/^  $program \([a-z]*\) .*\[flags\].*/\1/p" "$work/help" | sort -u); do
    helps "$program" "$command"
  done
done
# the commands in documents and scripts, "build/lm train ...", have no other flags than their programs
awk -F '\t' 'NR == FNR { known[$2, $1] = 1; programs[$2] = 1; next }
  { line = $0
    while (match(line, /(build|\$build|\$\{build\}|\$\(BUILD\))"?\/(mpi\/|cuda\/)?[a-z_]+"? [^`&|#;]*/)) {
      count = split(substr(line, RSTART, RLENGTH), word, " ")
      line = substr(line, RSTART + RLENGTH)
      program = word[1]; sub(/.*\//, "", program); sub(/"$/, "", program)
      if (program in programs) for (i = 2; i <= count; i++) if (word[i] ~ /^--[a-z]/) {
        found++; flag = word[i]; sub(/[=,.):].*/, "", flag)
        if (!((program, flag) in known) && flag != "--help" && flag != "--quantize")
          print FILENAME ": " program " has no flag " flag } } }
  END { if (found < 40) print "only " found + 0 " flags are found in commands" }' "$work/flags" README.md \
  examples/*.md Makefile examples/models/*.sh examples/mcu/*.sh >"$work/wrong"
none "a document has a command with a flag that is not there:"
# a command that is not there is the first thing that is said
for program in lm mlm translate classify listops mnist series lra compress arena attention_map; do
  if "$build/$program" nonsense 2>&1 >/dev/null | head -n 1 | grep -q "^$program: there is no command nonsense"; then
    passed=$((passed + 1))
  else failed=$((failed + 1)) && echo "flags: $program does not begin with what is wrong"; fi
done
echo "flags: $passed passed, $failed failed"
[ "$failed" = 0 ]
