#!/bin/sh
# flags.sh: the table "Flags" of examples/guide.md beside each program's --help: the same flags, the same programs, and
# for each flag the words of a program that has it. flags.sh --write makes the table anew. Needs the programs in $BUILD.
cd "$(dirname "$0")/.." || exit 1
build=${BUILD:-build}
guide=examples/guide.md
work=$build/flags
programs="lm mlm translate classify listops mnist series lra compress arena attention_map summary export lesson"
passed=0 failed=0
rm -rf "$work"
mkdir -p "$work"

# "flag<tab>program<tab>help", without the default in brackets and the commands that take it
for program in $programs; do
  "$build/$program" --help 2>/dev/null | awk -v program="$program" '/^  --/ {
    flag = $1; sub(/^  --[a-z0-9-]* (FILE|TEXT|NAME|N|X|\[yes\|no\]) */, "")
    if (match($0, /^[a-z, ]*  /)) $0 = substr($0, RLENGTH + 1)
    sub(/ *\([^()]*\)$/, ""); gsub(/\|/, "or"); print flag "\t" program "\t" $0 }'
done >"$work/flags"

# a row for each flag: programs, and the words of the first of them
table() {
  echo '| flag | programs | what it says |'
  echo '|---|---|---|'
  awk -F '\t' '!($1 in help) { help[$1] = $3 } { programs[$1] = programs[$1] (programs[$1] ? ", " : "") $2 }
    END { for (f in help) print "| `" f "` | " programs[f] " | " help[f] " |" }' "$work/flags" | LC_ALL=C sort
}
table >"$work/made"
sed -n '/^## Flags$/,/^## [^F]/p' "$guide" | grep '^|' >"$work/kept"
if [ "$1" = --write ]; then
  awk -v table="$work/made" '/^## Flags$/ { on = 1 } on && /^\|/ { if (!done++) while ((getline line <table) > 0) print line
    next } /^## [^F]/ { on = 0 } { print }' "$guide" >"$work/guide" && cp "$work/guide" "$guide"
  exit
fi
for program in $programs; do                              # each flag of a program is one check
  for flag in $(awk -F '\t' -v p="$program" '$2 == p { print $1 }' "$work/flags"); do
    if grep -F "| \`$flag\` |" "$work/kept" | cut -d '|' -f 3 | tr ',' '\n' | grep -q "^ $program *$"; then
      passed=$((passed + 1))
    else
      failed=$((failed + 1))
      echo "flags: $guide does not say that $program has $flag; tests/flags.sh --write writes the table"
    fi
  done
done
if cmp -s "$work/made" "$work/kept"; then passed=$((passed + 1)); else
  failed=$((failed + 1))
  echo "flags: the table in $guide is not what --help says; tests/flags.sh --write writes it:"
  diff "$work/kept" "$work/made" | head -n 10
fi
# a command that is not there is the first thing that is said
for program in lm series lra classify; do
  if "$build/$program" nonsense 2>&1 >/dev/null | head -n 1 | grep -q "^$program: there is no command nonsense"; then
    passed=$((passed + 1))
  else failed=$((failed + 1)) && echo "flags: $program does not begin with what is wrong"; fi
done
echo "flags: $passed passed, $failed failed"
[ "$failed" = 0 ]
