#!/bin/sh
# gpu.sh: all that a machine with a GPU is wanted for, in one command with a limit: make gpu. It compiles nothing and
# installs nothing: make cuda has built build/cuda before, here or on the machine that this folder was carried from.
#   OUT          where its files go (build/gpu): at most 8, of 16 MiB at most
#   GPU_SECONDS  for everything (540); GPU_STEP_SECONDS: for each step at most, to try the script
#   GPU_BIN      the programs (build/cuda); GPU_ANYWAY=1: runs every step where no device is found, too
#   PYTHON       a Python that has PyTorch with CUDA (python3)
# Each step has a time of its own, and writes its file as it goes: what hangs or fails costs that step alone, and says
# so in report.txt. The status is 0 when every step that could run has succeeded.
cd "$(dirname "$0")/../.." || exit 1
build=${BUILD:-build} out=${OUT:-${BUILD:-build}/gpu} python=${PYTHON:-python3}
bin=${GPU_BIN:-$build/cuda}
largest=16000000
PATH=$PATH:/usr/local/cuda/bin:/opt/nvidia/nsight-compute:/usr/local/cuda/compute-sanitizer
export PATH PYTHONUNBUFFERED=1
unset TEST_FULL
mkdir -p "$out" || exit 1
report=$out/report.txt
for file in report.txt tests.txt sanitizer.txt bench.txt bench.json peers.md lm.txt ncu.txt; do
  rm -f "${out:?}/$file"
done
started=$(date +%s)
budget=${GPU_SECONDS:-540}
failed=0
say() { echo "$*" | tee -a "$report"; }
have() { command -v "$1" >/dev/null 2>&1; }
left() { echo $((started + budget - $(date +%s))); }

# seconds that a part may take: what it wants, or what is left
seconds_for() {
  seconds=$1
  [ -z "$GPU_STEP_SECONDS" ] || [ "$seconds" -le "$GPU_STEP_SECONDS" ] || seconds=$GPU_STEP_SECONDS
  rest=$(($(left) - 3))
  [ "$seconds" -le "$rest" ] || seconds=$rest
}
# A file that grew too large keeps its beginning and its end.
shorten() {
  size=$(wc -c <"$1")
  [ "$size" -gt "$largest" ] || return 0
  { head -c 4000000 "$1"; printf '\n... %s bytes are left out ...\n' $((size - 8000000)); tail -c 4000000 "$1"; } \
    >"$1.short" && mv "$1.short" "$1"
}
# part NAME SECONDS FILE COMMAND...: runs it, with what it prints at the end of FILE, and says how it ended. A process
# that cannot be ended, since the driver holds it, is left behind.
part() {
  name=$1 file=$out/$3
  seconds_for "$2"
  shift 3
  if [ "$seconds" -lt 1 ]; then
    say "$name: skipped, the $budget seconds are over"
    return 1
  fi
  printf '\n== %s: %s\n' "$name" "$*" >>"$file"
  rm -f "$out/.status"
  { timeout -k 2 "$seconds" "$@" >>"$file" 2>&1 </dev/null; echo $? >"$out/.status"; } &
  runner=$! since=$(date +%s)
  while kill -0 "$runner" 2>/dev/null && [ $(($(date +%s) - since)) -le $((seconds + 6)) ]; do sleep 0.2; done
  status=$(cat "$out/.status" 2>/dev/null)
  rm -f "$out/.status"
  took=$(($(date +%s) - since))
  shorten "$file"
  case $status in
    0) say "$name: done in $took s"; return 0 ;;
    124 | 137) say "$name: FAILED, took more than $seconds s and was ended" ;;
    '') say "$name: FAILED, did not end within $seconds s, nor when it was killed: it is left behind" ;;
    *) say "$name: FAILED with status $status after $took s: $(tail -n 1 "$file" | cut -c1-200)" ;;
  esac
  failed=$((failed + 1))
  return 1
}
# whether programs of $bin and tools are here; else a sentence
need() {
  name=$1
  shift
  for what; do
    case $what in
      @*) [ -f "$bin/${what#@}" ] || { say "$name: skipped, $bin/${what#@} is not here (make cuda)"; return 1; } ;;
      *) have "$what" || { say "$name: skipped, $what is not here"; return 1; } ;;
    esac
  done
  [ -n "$device" ] || { say "$name: skipped, there is no CUDA device"; return 1; }
}

# ---- cuBLAS is the one library that no program here carries: beside CUDA, or in PyTorch's wheels
lacks() { ldd "$bin/bench" 2>/dev/null | sed -n 's/^[[:space:]]*\([^ ]*\) => not found.*/\1/p' | tr '\n' ' '; }
if [ -n "$(lacks)" ] && have "$python"; then
  for folder in $(timeout 20 "$python" -c 'import glob, sys
for at in sys.path: print(*glob.glob(at + "/nvidia/*/lib"), sep="\n")' 2>/dev/null) /usr/local/cuda/lib64; do
    ls "$folder"/libcublas* >/dev/null 2>&1 && LD_LIBRARY_PATH=$folder${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  done
  export LD_LIBRARY_PATH
fi

# ---- 1. what is here
say "$(date -u '+%Y-%m-%d %H:%M:%S') UTC, $budget seconds; files in $out"
have timeout || { say "timeout is not here (coreutils): nothing is run"; exit 1; }
if have nvidia-smi; then part 'nvidia-smi' 5 report.txt nvidia-smi; else say "nvidia-smi is not here"; fi
if have nvcc; then part 'nvcc' 5 report.txt nvcc --version; else say "nvcc is not here; nothing needs it"; fi
[ -z "$(lacks)" ] || say "libraries that the programs need and that are not here: $(lacks)"
device=$GPU_ANYWAY
if [ ! -f "$bin/bench" ]; then
  say "device: $bin/bench is not here (make cuda)"
elif part 'device' 20 report.txt "$bin/bench" --device; then
  device=1
fi

# ---- 2. the tests
for test in 'cuda_small 60' 'cuda_forgetting 40' 'cuda 110'; do
  program=${test% *}
  need "test $program" "@tests/$program" && part "test $program" "${test#* }" tests.txt "$bin/tests/$program" &&
    say "  $(tail -n 1 "$out/tests.txt")"
done

# ---- 3. the sanitizers: every access of the small test; races and barriers of what has most of both
if need 'memcheck' @tests/cuda_small compute-sanitizer; then
  # without errors of calls: the test makes some on purpose
  part 'memcheck' 60 sanitizer.txt compute-sanitizer --tool memcheck --report-api-errors no --print-limit 50 \
    --error-exitcode 9 "$bin/tests/cuda_small"
fi
# each case by a process of its own, since racecheck takes a minute for some
cases='softmax_attention pack unpack causal_product causal_nested forgetting optimizers'
for tool in racecheck synccheck; do
  # shellcheck disable=SC2086,SC2016
  need "$tool" @tests/cuda_small compute-sanitizer && part "$tool" 60 sanitizer.txt sh -c \
    'program=$1 tool=$2 && shift 2 && printf "%s\n" "$@" | xargs -P 8 -I{} compute-sanitizer --tool "$tool" \
    --print-limit 50 --error-exitcode 9 "$program" {}' sh "$bin/tests/cuda_small" "$tool" $cases
done

# ---- 4. speed, as shares of what the card gives
need 'bench' @bench && { seconds_for 60; part 'bench' 66 bench.txt "$bin/bench" "$out/bench.json" \
  --seconds $((seconds - 12 > 0 ? seconds - 12 : 1)); }

# ---- 5. PyTorch beside it
need 'peers' @peers.so "$python" && { seconds_for 150; part 'peers' 160 peers.md env BUILD="$(dirname "$bin")" \
  "$python" tests/cuda/bench_cuda_peers.py --seconds $((seconds - 15 > 0 ? seconds - 15 : 1)); }

# ---- 6. a training, on the device and on the CPU; a stream
text=tests/data/excerpt.txt
if need 'lm' @lm; then
  # the losses agree to four digits in the first fifty steps; later rounding decides when a plateau ends
  for way in '--device cuda --graph' '--device cuda' '--device cpu'; do
    # shellcheck disable=SC2086
    part "lm $way" 15 lm.txt "$bin/lm" train "$text" --steps 150 --seed 1 $way --out "$out/.lm" &&
      say "  $(grep '49/150' "$out/lm.txt" | tail -n 1); at the end $(grep 'bits/byte' "$out/lm.txt" | tail -n 1)"
  done
  rm -f "$out"/.lm*
fi
need 'stream' @bench && part 'stream' 10 lm.txt "$bin/bench" --stream

# ---- 7. the ten kernels that take most time
metrics=gpu__time_duration.sum,dram__throughput.avg.pct_of_peak_sustained_elapsed
metrics=$metrics,sm__throughput.avg.pct_of_peak_sustained_elapsed
metrics=$metrics,sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active
metrics=$metrics,sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active
if need 'ncu' @bench ncu "$python"; then
  # clocks stay as they are: the card is not ours alone
  part 'ncu' 60 ncu.txt ncu --csv --page raw --profile-from-start off --clock-control none --metrics "$metrics" \
    "$bin/bench" --profile
  "$python" tests/cuda/kernels.py "$out/ncu.txt" >"$out/.kernels" 2>&1 && say "$(cat "$out/.kernels")"
  cat "$out/.kernels" >>"$out/ncu.txt"
  rm -f "$out/.kernels"
  shorten "$out/ncu.txt"
fi

say "$(($(date +%s) - started)) of $budget seconds; $failed parts failed"
[ "$failed" = 0 ]
