#!/bin/sh
# busy.sh: what tests/bench/timing.sh says of a busy machine, by files in place of /proc/stat: nothing of a quiet one,
# nothing of the timed programs themselves, and of other programs and of other machines (steal) how much they took.
cd "$(dirname "$0")/../.." || exit 1
name=busy program=timing root=$PWD
. tests/programs/cli_checks.sh
TMPDIR=$work
export TMPDIR
ticks=$(getconf CLK_TCK 2>/dev/null || echo 100)

# USER IDLE STEAL, in seconds of two processors since the last one
stat() {
  echo "cpu $(($1 * ticks)) 0 0 $(($2 * ticks)) 0 0 0 $(($3 * ticks)) 0 0"
  printf 'cpu0 0\ncpu1 0\n'
}
# what is said where /proc/stat is the file begin, a second later the file second, and at the end the file end
says() {
  (
    cp begin now
    sleep() { cp second now; }
    timing_stat=$work/now
    . "$root/tests/bench/timing.sh"
    cp end now
  ) >out 2>err
}
quiet() { says && [ ! -s err ]; }

stat 1000 1000 0 >begin
stat 1000 1002 0 >second
stat 1000 1022 0 >end
check "nothing of a quiet machine" quiet
stat 1001 1001 0 >second
stat 1001 1021 0 >end
says
check "other programs before the timing" \
  grep -q "^warning: before the timing other programs took 1.0 of 2 processors" err
check "and no more" [ "$(wc -l <err)" -eq 1 ]
stat 1000 1002 0 >second
stat 1015 1007 0 >end
says
check "other programs during it" grep -q "^warning: during the timing other programs took 1.5 of 2 processors" err
check "and those alone" [ "$(wc -l <err)" -eq 1 ]
stat 1009 1012 1 >end
says
check "other machines" grep -q "^warning: during the timing 10% of the time that was wanted went to other machines" err
stat 1020 1002 0 >end
own() { timing_warn "then" "$(head -n 1 second)" "$(head -n 1 end)" "$1" 3 >out 2>err; }
timing_stat=$work/second
(. "$root/tests/bench/timing.sh"; own 23; cp err all; own 13; cat err >>all
  trap 'rm -f "$timing_lock"' EXIT) >out 2>err
check "the timed programs are not others" [ "$(cat all)" = \
  "warning: then other programs took 1.0 of 2 processors: times are too long" ]
(. "$root/tests/bench/timing.sh"; awk 'BEGIN { for (i = 0; i < 3000000; i++) x += i }'; timing_own
  echo "$timing_seconds" >spent) >out 2>err
check "what programs of the shell computed is counted" awk '{ exit !($1 > 0.01) }' spent
says
check "the lock is gone at the end, and all else" [ "$(ls "$work" | grep -c luna.timing)" = 0 ]
check "an interrupted timing ends with its status" sh -c "
  (timing_stat=$work/second; . '$root/tests/bench/timing.sh'; exit 7) 2>/dev/null; [ \$? = 7 ]"
timing_stat=$work/none
(. "$root/tests/bench/timing.sh") >out 2>err
check "a system without /proc/stat says nothing" [ ! -s err ]
finish
