#!/bin/sh
# mpi_bench.sh: the tables of examples/measurements.md, "On several machines": $BUILD/mpi/tests/mpi_bench on 1, 2 and
# 4 ranks that share this machine, and from its seconds of computation, on paper, a step on 2 to 1024 machines. FORWARD,
# STEP: tokens, 0 for none. RANKS: others than 1, 2 and 4.
cd "$(dirname "$0")/.." || exit 1
. tests/mpi_here.sh
build=${BUILD:-build}
program=$build/mpi/tests/mpi_bench
rows=$build/mpi/bench
: >"$rows"
mpi() { nice "${MPIRUN:-mpirun}" "$@" </dev/null || exit 1; }
mpi -n 3 "$program" layers | tee -a "$rows"
for ranks in ${RANKS:-1 2 4}; do
  [ "${FORWARD:-4194304}" = 0 ] || mpi -n "$ranks" "$program" forward "${FORWARD:-4194304}" | tee -a "$rows"
  [ "${STEP:-1048576}" = 0 ] || mpi -n "$ranks" "$program" step "${STEP:-1048576}" | tee -a "$rows"
done

echo
echo '| | ranks | CPU time of a rank | of all | memory of a rank, MB | with MPI, resident | bytes a rank sends |'
echo '|---|---:|---:|---:|---:|---:|---:|'
grep -E '^(forward|step) ' "$rows" | sort -s -k 1,1 |
  awk '{ printf "| %s of %d tokens | %d | %.0f s | %.0f s | %d | %d | %d |\n", $1, $2, $3, $4, $5, $7, $8, $9 }'

# On paper, from the least CPU time of a step: d 256, 4 layers, 16 slots, 4 heads. Machines of 16 cores; each of a
# step's calls waits 50 us log2 R
echo
echo '| ranks | data, 10 Gbit/s | data, 100 | sequence, 10 | sequence, 100 | GB, sequence | GB, ring attention |'
echo '|---:|---:|---:|---:|---:|---:|---:|'
awk '$1 == "step" { n = $2; cpu = cpu && cpu < $5 ? cpu : $5; gradients = $10; calls = $11 }
  $1 == "data" { whole = $11 }                       # calls where sequences are whole
  function line(x) { return sprintf("%.3g", x) }
  END { if (!n) exit
    layers = 4 * 4 * 16 * (2 * 256 + 4)
    for (R = 2; R <= 1024; R *= 2) {
      wait = 50e-6 * log(R) / log(2)
      sums = 2 * (R - 1) / R * gradients; cut = sums + (R - 1) * layers
       ring = sums + 3 * (R - 1) / R * 2 * n * 256 * 4 * 4
      work = cpu / 16 / R
      printf "| %d | %s | %s | %s | %s | %.3f | %.1f |\n", R,
              line(work + whole * wait + sums / 1.25e9), line(work + whole * wait + sums / 1.25e10),
        line(work + calls * wait + cut / 1.25e9), line(work + calls * wait + cut / 1.25e10), cut / 1e9, ring / 1e9
    } }' "$rows"
