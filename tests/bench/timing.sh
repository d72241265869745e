# timing.sh, read by `. tests/bench/timing.sh`: holds the file luna.timing.lock in TMPDIR (else /tmp), with this shell's
# number in it, until the shell ends. While it is there somebody times: long runs pause, others that time wait. The file
# of a process that is gone is taken over; one without a number was made by hand, and stays.
#
# Times of a busy machine are too long. Where the system has /proc/stat there is a warning when other programs, or other
# machines of the same host (steal), took the processors in the second before the timing, and when they did during it.
timing_lock=${TMPDIR:-/tmp}/luna.timing.lock
timing_stat=${timing_stat:-/proc/stat}
timing_hold() {
  told=
  until (set -C && echo $$ >"$timing_lock") 2>/dev/null; do
    holder=$(cat "$timing_lock" 2>/dev/null)
    case $holder in ''|*[!0-9]*) return ;; esac
    if kill -0 "$holder" 2>/dev/null; then
      [ -n "$told" ] || echo "process $holder times and holds $timing_lock: waiting for it" >&2
      told=1
      sleep 1
    else
      rm -f "$timing_lock" || return
    fi
  done
  trap timing_end EXIT
  trap 'exit 1' HUP INT TERM
}

# of all processors: user nice system idle iowait irq softirq steal
timing_line() { head -n 1 "$timing_stat" 2>/dev/null; }
# timing_seconds: seconds that the programs of this shell have computed. Not in $(): a subshell has run none.
timing_own() {
  times >"$timing_lock.own"
  timing_seconds=$(tr 'ms' '  ' <"$timing_lock.own" | awk '{ sum += 60 * $1 + $2 + 60 * $3 + $4 }
    END { printf "%.2f", sum }')
  rm -f "$timing_lock.own"
}
# WHEN BEFORE AFTER OWN OWN_BEFORE: two such lines, and the seconds that this shell's programs had computed at each
timing_warn() {
  timing_cores=$(grep -c '^cpu[0-9]' "$timing_stat" 2>/dev/null)
  timing_ticks=$(getconf CLK_TCK 2>/dev/null || echo 100)
  echo "$2 $3" | awk -v when="$1" -v own="$4" -v before="$5" -v cores="$timing_cores" -v ticks="$timing_ticks" '
    NF >= 18 {
      for (i = 2; i <= 9; i++) { spent[i] = $(i + NF / 2) - $i; all += spent[i] }
      used = spent[2] + spent[3] + spent[4]
      if (all <= 0) exit
      others = (used - (own - before) * ticks) * cores / all
      if (others > 0.1)
        printf "warning: %s other programs took %.1f of %d processors: times are too long\n", when, others, cores
      if (spent[9] > 0.02 * (used + spent[9]) && spent[9] > 0.002 * all)
        printf "warning: %s %.0f%% of the time that was wanted went to other machines of this host: " \
               "times are too long\n", when, 100 * spent[9] / (used + spent[9])
    }' >&2
}
timing_end() {
  timing_own
  timing_warn "during the timing" "$timing_begun" "$(timing_line)" "$timing_seconds" "$timing_before"
  rm -f "$timing_lock"
}

timing_hold
timing_begun=$(timing_line)
if [ -n "$timing_begun" ]; then
  sleep 1
  timing_warn "before the timing" "$timing_begun" "$(timing_line)" 0 0
fi
timing_begun=$(timing_line)
timing_own
timing_before=$timing_seconds
