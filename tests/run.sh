#!/bin/sh
# run.sh PROGRAM...: runs them, JOBS at a time (at most four; without it as many as there are cores), shows what each
# has printed when it ends, and adds up the last lines, "name: N passed, N failed". A program that ends without such a
# line counts as one failed and is named. Another run.sh in the same folder waits: the programs write files there.
# LOGS: a folder in place of BUILD for the logs and for this. RUNNER: what runs a program of another machine.
build=${LOGS:-${BUILD:-build}}
log_of() { echo "$build/logs/$(echo "$1" | tr / _).log"; }

if [ "$1" = --one ]; then
  log=$(log_of "$2")
  case $2 in
    *.sh) sh "$2" ;;
    /*) $RUNNER "$2" ;;
    *) $RUNNER "./$2" ;;
  esac >"$log" 2>&1 </dev/null
  echo "$?" >"$log.status"
  times >"$log.times"                                    # of this shell, then of what it ran
  seconds=$(awk 'NR == 2 { split($0, t, /[ms ]+/); printf "%.1f", 60 * (t[1] + t[3]) + t[2] + t[4] }' "$log.times")
  { echo "== $2, $seconds s of processor time"; cat "$log"; }
  exit 0
fi

jobs=${JOBS:-$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)}
[ "$jobs" -le 4 ] || jobs=4
xargs -P 1 true </dev/null 2>/dev/null || jobs=           # this xargs knows no -P: one at a time
mkdir -p "$build" || exit 1
lock=$build/running told=
until mkdir "$lock" 2>/dev/null; do
  other=$(cat "$lock/process" 2>/dev/null)
  if [ -n "$other" ] && ! kill -0 "$other" 2>/dev/null; then rm -rf "$lock"; continue; fi # it was killed
  [ -n "$told" ] || echo "other tests run in $build (process $other): waiting for them"
  told=1
  sleep 1
done
echo $$ >"$lock/process"
trap 'rm -rf "$lock"' EXIT
trap 'exit 1' HUP INT TERM
rm -rf "$build/logs"
mkdir -p "$build/logs"
printf '%s\n' "$@" | xargs ${jobs:+-P "$jobs"} -I '{}' sh "$0" --one '{}'

passed=0 failed=0 named=
for program; do
  log=$(log_of "$program")
  status=$(cat "$log.status" 2>/dev/null)
  counts=$(tail -n 1 "$log" 2>/dev/null | tr -d '\r' \
    | sed -n 's/^\(.*[^0-9]\)\{0,1\}\([0-9][0-9]*\) passed, \([0-9][0-9]*\) failed$/\2 \3/p')
  good=${counts% *} bad=${counts#* }
  if [ -z "$counts" ]; then
    echo "$program ended with status $status before its last line"
    good=0 bad=1
  elif [ "$status" != 0 ] && [ "$bad" = 0 ]; then
    echo "$program reports no failure but ended with status $status"
    bad=1
  fi
  [ "$bad" = 0 ] || named="$named $program"
  passed=$((passed + good)) failed=$((failed + bad))
done
[ -z "$named" ] || echo "failed:$named"
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
