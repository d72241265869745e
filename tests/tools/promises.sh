#!/bin/sh
# promises.sh: each row of the table "Promises and their tests" in examples/guide.md names what holds it: files of
# tests/*/, which are there and which make test or make test-long runs, functions in them (`state.c: restart`), and
# targets of the Makefile, which the gate runs, the long ones apart.
cd "$(dirname "$0")/../.." || exit 1
guide=${GUIDE:-examples/guide.md}
make=$(command -v gmake || echo make)
runs=$(MAKEFLAGS='' "$make" --no-print-directory names) || exit 1
chapters=$(sed -n 's,^#include ".*/\(.*\.c\)".*,\1,p' tests/private.c)
passed=0 failed=0 rows=0
fail() { failed=$((failed + 1)); echo "$guide: $1: ${row%%|*}"; }
is_run() {
  for one in $chapters; do [ "$one" = "$1" ] && return 0; done
  for one in $runs; do case $one in */"${1%.c}" | */"$1") return 0 ;; esac; done
  return 1
}
check() { # one name between backquotes
  case $1 in
    make\ *)
      cat Makefile tests/*/*.mk examples/*/*.mk | grep -q "^${1#make }:" || { fail "there is no $1"; return; }
      [ -e .ci/run ] || { passed=$((passed + 1)); return; } # a tarball has no gate
      case $1 in *fuzz | *soak) passed=$((passed + 1)); return ;; esac
      grep -Eq "^ *(stage make |beside=).*\\b${1#make }\\b" .ci/run || { fail ".ci/run has no $1"; return; } ;;
    *.c | *.sh | *.c:*)
      file=${1%%:*}
      path=$(ls tests/*/"$file" 2>/dev/null) || { fail "there is no $file in a folder of tests/"; return; }
      is_run "$file" || { fail "neither make test nor make test-long runs $path"; return; }
      case $1 in *:*) grep -q "\b${1##*: }(" "$path" || { fail "no function ${1##*: } in $path"; return; } ;; esac
      named=$((named + 1)) ;;
    *) return ;;
  esac
  passed=$((passed + 1))
}
list=${BUILD:-build}/promises
sed -n '/^## Promises and their tests$/,/^## [^P]/s/^| \(.*\) | \([^|]*\) |$/\1|\2/p' "$guide" | sed 1d >"$list"
while IFS= read -r row; do
  rows=$((rows + 1)) named=0
  names=$(echo "${row##*|}" | grep -o '`[^`]*`' | tr -d '`')
  while IFS= read -r name; do check "$name"; done <<END
$names
END
  [ "$named" -gt 0 ] || fail "no file of tests/ holds it"
done <"$list"
rm -f "$list"
[ "$rows" -ge 16 ] || { row=; fail "the table has $rows rows"; }
echo "promises: $passed passed, $failed failed"
[ "$failed" = 0 ]
