# cli_checks.sh: what the tests of programs from outside share; read with "." from the root of the repository, with
# `name` set. It goes to the empty folder $build/$name and defines
#   run ARGUMENTS...               runs $build/$program; what it prints is in the files out and err
#   check "SENTENCE" COMMAND...    one check: the command should succeed
#   refuses "WORDS" ARGUMENTS...   three checks: run ends with 2 and one sentence, which has the words
#   short_of_memory ARGUMENTS...   one check: run with ever more memory, until it succeeds, says that it lacks memory
#   on_terminal ARGUMENTS...       runs on a terminal of its own, as out; fails where script(1) is not here
#   shown FILE                     fails where the file has an escape byte, $escape
#   same, differ FILE FILE; drawn FILE (a whole SVG); beyond NUMBER (the percentage that out ends with is greater)
#   interrupted WORDS ARGUMENTS... runs, waits until out has the words, presses Ctrl-C, returns the exit status
#   finish                         the last line, and the status
build=${BUILD:-build}
case $build in /*) ;; *) build=$PWD/$build ;; esac
work=$build/$name
rm -rf "$work"
mkdir -p "$work"
cd "$work" || exit 1

passed=0 failed=0
wc() { command wc "$@" | tr -d ' '; }                    # BSD's puts spaces before the number
command -v timeout >/dev/null 2>&1 || timeout() { shift; "$@"; }
run() { "$build/$program" "$@" >out 2>err; }
check() {
  sentence=$1
  shift
  if "$@" >/dev/null 2>&1; then passed=$((passed + 1)); return; fi
  failed=$((failed + 1))
  echo "failed: $program: $sentence"
  sed 's/^/    out: /' out | tail -n 5
  sed 's/^/    err: /' err | tail -n 5
}
refuses() {
  words=$1
  shift
  run "$@"
  status=$?
  check "$* ends with 2, not $status" [ "$status" = 2 ]
  check "$* says: $words" grep -q -- "$words" err
  check "$* says it in one sentence" [ "$(grep -c "^$program: " err)" = 1 ]
}
short_of_memory() {
  limit=6000 wrong= status=2
  (ulimit -v 100000 && run --help) 2>/dev/null || return 0  # a sanitizer, or a system without this limit
  while [ $status != 0 ] && [ $limit -lt 100000 ]; do
    limit=$((limit + 2000))
    (ulimit -v $limit && run "$@")
    status=$?
    [ $status = 0 ] || [ $status = 127 ] || grep -q "^$program: .*memory" err || wrong="$wrong $limit"
  done
  check "$* says that memory is short, not something else in so many KB:$wrong" [ -z "$wrong" ]
}
on_terminal() {
  words=
  for word; do words="$words '$word'"; done
  command -v script >/dev/null 2>&1 && script -q -e -c "'$build/$program'$words 2>err" /dev/null >out </dev/null
}
escape=$(printf '\033')
shown() { ! LC_ALL=C grep -q "$escape" "$1"; }
same() { cmp -s "$1" "$2"; }
differ() { ! cmp -s "$1" "$2"; }
tags() { tr '<' '\n' <"$1" | grep -c "^$2"; }
drawn() {
  [ "$(head -c 5 "$1")" = "<svg " ] && [ "$(tail -n 1 "$1")" = "</svg>" ] && [ "$(tags "$1" polyline)" -ge 2 ] \
    || return 1
  [ "$(tags "$1" g)" = "$(tags "$1" /g)" ] && [ "$(tags "$1" text)" = "$(tags "$1" /text)" ] || return 1
  ! grep -q -i -E 'nan|inf' "$1" || return 1
  if command -v xmllint >/dev/null 2>&1; then xmllint --noout "$1"; fi
}
beyond() { tail -n 1 out | sed 's/.*: \([0-9.]*\)%.*/\1/' | awk -v min="$1" '{ exit !($1 > min) }'; }
interrupted() {
  words=$1 tries=0
  shift
  "$build/$program" "$@" >out 2>err &
  pid=$!
  while ! grep -q -- "$words" out && [ $tries -lt 1200 ]; do
    sleep 0.1 2>/dev/null || sleep 1
    tries=$((tries + 1))
  done
  sleep 0.2 2>/dev/null || sleep 1
  kill -INT $pid
  wait $pid
}
finish() {
  echo "$name: $passed passed, $failed failed"
  [ "$failed" = 0 ]
}
