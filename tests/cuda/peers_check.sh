#!/bin/sh
# peers_check.sh: tests/cuda/bench_cuda_peers.py without a GPU: luna.h's kernels by the emulator and PyTorch on the CPU
# must compute the same functions, each row in each precision; a wrong one must be found; and rows are measured to the
# end. PYTHON: the interpreter; without torch, or build/peers_host.so, the script says so and checks nothing.
cd "$(dirname "$0")/../.." || exit 1
build=$(cd "${BUILD:-build}" && pwd) python=${PYTHON:-python3}
export BUILD="$build"
if ! "$python" -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("torch"))' 2>/dev/null ||
    [ ! -f "$build/peers_host.so" ]; then
  echo "no Python with torch, or no $build/peers_host.so: tests/cuda/bench_cuda_peers.py is not checked"
  echo "peers: 0 passed, 0 failed"
  exit 0
fi
passed=0 failed=0
check() { # SENTENCE COMMAND...
  sentence=$1
  shift
  if "$@" >/dev/null 2>&1; then passed=$((passed + 1)); else failed=$((failed + 1)); echo "peers: $sentence"; fi
}
log=$build/peers_check.log
"$python" tests/cuda/bench_cuda_peers.py --dry --check >"$log" 2>&1
status=$?
grep -v ': the result differs' "$log" | grep -v '^both sides agree$'
check "the sides do not agree" test "$status" = 0
check "36 rows are compared, not $(grep -c ': the result differs' "$log")" \
  test "$(grep -c ': the result differs' "$log")" = 36
# a result that is wrong must be found: PyTorch's, with another temperature
mkdir -p "$build/peers_wrong/tests/cuda" "$build/peers_wrong/examples"
cp examples/luna_torch.py "$build/peers_wrong/examples"
wrong=$build/peers_wrong/tests/cuda/bench.py
sed 's/scale = (h \/ d) \*\* 0.5$/scale = (h \/ d) ** 0.49/' tests/cuda/bench_cuda_peers.py >"$wrong"
"$python" "$wrong" --dry --check --only 'causal layer, l = 16, forward' >"$log" 2>&1
check "a wrong result is not found" test $? = 1
check "the values of both sides are not printed" grep -q 'FAILED: .*number [0-9]* is .*, in PyTorch' "$log"
rm -rf "$build/peers_wrong"

"$python" tests/cuda/bench_cuda_peers.py --dry --seconds 3000 --runs 1 --only 'encoder layer, l = 16, forward' \
  >"$log" 2>&1
check "measuring ends with an error" test $? = 0
check "it does not say that the times are nothing" grep -q 'A DRY RUN' "$log"
row='^\| encoder layer, l = 16, forward \| 2 x 128 \| BF16 \| [0-9.]+ \| [0-9.]+ \| [0-9.]+ \| - \| - \| - \| - \| - \|'
check "a row has no times" grep -Eq "$row" "$log"
check "not all rows are measured" grep -Eq '^9 of 9 rows in [0-9]+ s$' "$log"
rm -f "$log"
echo "peers: $passed passed, $failed failed"
[ "$failed" = 0 ]
