#!/bin/sh
# fuzz_coverage.sh FOLDER: the lines of luna.h's chapters that fuzz_safetensors runs on the files of a folder, the
# corpus of make fuzz; those that it does not run are listed in $BUILD/fuzz/coverage/not_run. Needs gcc and gcov.
cd "$(dirname "$0")/../.." || exit 1
work=${BUILD:-build}/fuzz/coverage root=$PWD
corpus=$(cd "$1" && pwd) || exit 1
mkdir -p "$work" && cd "$work" || exit 1
rm -f ./*.gcda ./*.gcno
${CC:-gcc} -O0 --coverage -w -I"$root" -I"$root/tests" "$root/tests/files/fuzz_safetensors.c" -o fuzz_safetensors \
  -lm -lpthread || exit 1
(cd "$root" && "$OLDPWD/fuzz_safetensors" "$corpus") | tail -n 1
gcov -p ./*.gcno >/dev/null 2>&1
awk -F : -v files="$(find "$corpus" -type f | wc -l)" '
  $3 ~ /^   >>[a-z]/ { chapter = $3; sub(/^ *>>(impl_)?/, "", chapter); sub(/[^a-z].*/, "", chapter) }
  $1 ~ /[0-9]/ || $1 ~ /#####/ { lines[chapter]++ }
  $1 ~ /[0-9]/ { ran[chapter]++ }
  $1 ~ /#####/ { print chapter ": " substr($0, index($0, ":") + 1) >"not_run" }
  END {
    printf "%d files\n", files
    for (c in lines) printf "%-12s %5d lines, %5d run, %5.1f%%\n", c, lines[c], ran[c], 100 * ran[c] / lines[c]
  }' ./*luna.h.gcov | sort
