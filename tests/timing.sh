# timing.sh, read by `. tests/timing.sh`: holds the file luna.timing.lock in TMPDIR (else /tmp), with this shell's
# number in it, until the shell ends. While it is there somebody times: long runs pause, others that time wait. The file
# of a process that is gone is taken over; one without a number was made by hand, and stays.
timing_lock=${TMPDIR:-/tmp}/luna.timing.lock
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
  trap 'rm -f "$timing_lock"' EXIT
  trap 'exit 1' HUP INT TERM
}
timing_hold
