# sh tests/bench/compare.sh REF: time and peak memory of every row of make bench, of luna.h at the git revision REF
# (before) and of this tree (after). Both run this tree's benchmarks, which take turns run by run; where those do not
# compile against REF's luna.h, before is REF's own, program by program.
#   RUNS=7              of each row and build after the first, which is not counted
#   ROWS=classifier     only rows with this in their name, and those that belong to them
#   BENCH=bench_models  only this program's rows
# ratio: the median of the ratios of runs one after the other; noise: their median distance from it. Last line: the rows
# whose time grew by more than 2% beyond the noise, or whose peak grew by more than 5%. Fails only where something does
# not build or run. All of it stays in BUILD/compare.
cd "$(dirname "$0")/../.." || exit 1
cc=${CC:-cc} flags=${CFLAGS:--O2} libs=${LIBS:--lm -lpthread} runs=${RUNS:-7} out=${BUILD:-build}/compare
ref=$(git rev-parse --verify --quiet "$1^{commit}") \
  || { echo "usage: sh tests/bench/compare.sh REF, a git revision; \"$1\" is none"; exit 1; }
benches=${BENCH:-bench_kernels bench_layers bench_models}
[ -n "$ROWS" ] && BENCH_ROWS=$ROWS && export BENCH_ROWS
rm -rf "$out"
mkdir -p "$out/before/tests" "$out/after" && mkfifo "$out/a" "$out/b" || exit 1
fail() {
  cat "$out/$1/$bench.txt"
  echo "$bench, $1, does not run"
  exit 1
}
git show "$ref:luna.h" >"$out/before/luna.h" && cp luna.h "$out/after/luna.h" || exit 1
old() { git show "$ref:tests/bench/$1" 2>/dev/null || git show "$ref:tests/$1" 2>/dev/null; } # where it was before
old bench.h >"$out/before/tests/bench.h"

for side in before after; do
  printf '#define LUNA_IMPLEMENTATION\n#include "luna.h"\n' >"$out/$side/luna.c"
  $cc $flags -c "$out/$side/luna.c" -o "$out/$side/luna.o" || exit 1
  for bench in $benches; do
    build="$cc $flags -DLI_IMPLEMENTED -I$out/$side -o $out/$side/$bench $out/$side/luna.o -x c"
    $build "tests/bench/$bench.c" -x none $libs 2>"$out/$side/$bench.log" && continue
    [ $side = before ] && old "$bench.c" >"$out/before/tests/$bench.c" &&
      $build "$out/before/tests/$bench.c" -x none $libs && echo "$bench: $1 runs its own" >"$out/before/own_$bench" &&
      cat "$out/before/own_$bench" && continue
    cat "$out/$side/$bench.log"
    echo "$bench does not compile"
    exit 1
  done
done

. tests/bench/timing.sh
for bench in $benches; do
  printf '%-40s\r' "$bench" >&2
  if [ -e "$out/before/own_$bench" ]; then # knows nothing of turns
    run=1
    while [ $run -le "$runs" ]; do
      for side in before after; do
        "$out/$side/$bench" "$out/$side/row" >"$out/$side/$bench.txt" 2>&1 || fail $side
        { echo; cat "$out/$side/row"; } >>"$out/$side/$bench.json"
      done
      run=$((run + 1))
    done
  else
    BENCH_RUNS=$runs BENCH_TURN=first "$out/before/$bench" "$out/before/$bench.json" >"$out/before/$bench.txt" 2>&1 \
      3<"$out/a" 4>"$out/b" &
    BENCH_RUNS=$runs BENCH_TURN=second "$out/after/$bench" "$out/after/$bench.json" >"$out/after/$bench.txt" 2>&1 \
      4>"$out/a" 3<"$out/b" || { kill $!; fail after; }
    wait $! || fail before
  fi
  for side in before after; do { echo; cat "$out/$side/$bench.json"; } | sed "s/^/$side $bench /"; done >>"$out/rows"
done

awk -v ref="$1" '
function field(key,  at, text) {
  at = index($0, "\"" key "\": ")
  if (!at) return ""
  text = substr($0, at + length(key) + 4)
  if (substr(text, 1, 1) == "\"") return substr(text, 2, index(substr(text, 2), "\"") - 1)
  sub(/[,}].*/, "", text)
  return text
}
function median(x, n,  i, j, t) { # sorts x[1..n]
  for (i = 2; i <= n; i++) {
    t = x[i]
    for (j = i - 1; j >= 1 && x[j] > t; j--) x[j + 1] = x[j]
    x[j + 1] = t
  }
  return n % 2 ? x[(n + 1) / 2] : (x[n / 2] + x[n / 2 + 1]) / 2
}
function add(time) { ms[$1, row, ++count[$1, row]] = time + 0 }
function megabytes(bytes) { return bytes > 0 ? sprintf("%.1f", bytes * 1e-6) : "" }
function ratio(a, b) { return a > 0 && b > 0 ? sprintf("%.3f", b / a) : "" }
NF == 2 { split("", seen); next } # a program begins
{
  row = $2 ": " field("name") (field("threads") > 1 ? ", " field("threads") " threads" : "")
  sub(/^bench_/, "", row)
  if (seen[row]++) row = row " #" seen[row] # a name that a program has twice
  if (!(row in known)) { known[row] = 1; order[++rows] = row }
  runs = $0
  if (sub(/.*"runs": \[/, "", runs) && sub(/\].*/, "", runs)) {
    n = split(runs, time, ", ")
    for (i = 1; i <= n; i++) add(time[i])
  } else add(field("ms"))
  bytes = field("peak") == "" ? field("bytes") : field("peak")
  if (bytes + 0 > peak[$1, row]) peak[$1, row] = bytes + 0
}
END {
  printf "%-68s %10s %10s %6s %6s %9s %9s %6s\n", "before: " ref, "before ms", "after", "ratio", "noise", "before MB", \
    "after", "ratio"
  for (i = 1; i <= rows; i++) {
    row = order[i]
    if (!count["before", row] || !count["after", row]) {
      printf "%-68s only %s\n", row, count["before", row] ? "before" : "after"
      continue
    }
    n = count["before", row] < count["after", row] ? count["before", row] : count["after", row]
    for (k = 1; k <= n; k++) {
      first[k] = ms["before", row, k]
      second[k] = ms["after", row, k]
      ratios[k] = second[k] / first[k]
    }
    change = median(ratios, n)
    for (k = 1; k <= n; k++) off[k] = ratios[k] > change ? ratios[k] / change - 1 : 1 - ratios[k] / change
    noise = median(off, n)
    a = peak["before", row]
    b = peak["after", row]
    printf "%-68s %10.3f %10.3f %6s %5.1f%% %9s %9s %6s\n", row, median(first, n), median(second, n),
      sprintf("%.3f", change), 100 * noise, megabytes(a), megabytes(b), ratio(a, b)
    if (n > 2 && change > 1.02 + noise) slower = slower (slower ? "; " : "") row
    if (a > 0 && b > a * 1.05) larger = larger (larger ? "; " : "") row
  }
  printf "%d rows. Time more than 2%% beyond noise: %s. Peak more than 5%%: %s\n", rows, slower ? slower : "none",
    larger ? larger : "none"
}' "$out/rows" | tee "$out/table"
