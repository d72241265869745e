#!/bin/sh
# run.sh PROGRAM...: runs each, shows what it prints, and adds up the last lines, "name: N passed, N failed". A program
# that ends without such a line counts as one failed and is named. RUNNER: what runs a program of another machine.
build=${BUILD:-build}
mkdir -p "$build/logs"
passed=0 failed=0 named=
for program; do
  log=$build/logs/$(basename "$program").log
  echo "== $program"
  case $program in
    *.sh) sh "$program" ;;
    /*) "$program" ;;
    *) $RUNNER "./$program" ;;
  esac >"$log" 2>&1 </dev/null
  status=$?
  cat "$log"
  counts=$(tail -n 1 "$log" | tr -d '\r' \
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
