#!/bin/sh
# gpu_check.sh: tests/cuda/gpu.sh without a GPU, with stand-ins for its programs and tools: one hangs and ignores
# signals, one fails, one says too much, one is not there. Checked are what each costs and says, and that the rest runs.
cd "$(dirname "$0")/../.." || exit 1
build=${BUILD:-build}
work=$(pwd)/$build/gpu_check
case $build in /*) work=$build/gpu_check ;; esac
passed=0 failed=0
if ! command -v timeout >/dev/null 2>&1; then
  echo "timeout is not here (coreutils): gpu.sh is not checked"
  echo "gpu_check: 0 passed, 0 failed"
  exit 0
fi
rm -rf "$work"
mkdir -p "$work/bin/tests" "$work/tools"
check() { # SENTENCE COMMAND...
  sentence=$1
  shift
  if "$@" >/dev/null 2>&1; then passed=$((passed + 1)); else failed=$((failed + 1)); echo "gpu_check: $sentence"; fi
}
program() { # FILE, and its text on standard input
  { echo '#!/bin/sh'; cat; } >"$work/$1"
  chmod +x "$work/$1"
}
says() { grep -q -- "$2" "$work/$1"; }
silent() { ! grep -q -- "$2" "$work/$1"; }

program tools/nvidia-smi <<'END'
echo "a card that is none"
END
program tools/compute-sanitizer <<'END'
[ "$2" = synccheck ] || { echo "========= ERROR SUMMARY: 0 errors"; exit 0; }
echo "========= ERROR SUMMARY: 3 errors"
exit 9
END
program tools/ncu <<'END'
head='"ID","Kernel Name","dram__throughput.avg.pct_of_peak_sustained_elapsed","gpu__time_duration.sum"'
head=$head',"sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active"'
echo "==PROF== Profiling \"lunacu_unpack_kernel\" - 0: 0%"
echo "$head"
echo '"","","%","us","%"'
echo '"0","void lunacu_unpack_kernel<64>(lunacu_unpack)","20.0","3.0","70.0"'
echo '"1","void lunacu_unpack_kernel<64>(lunacu_unpack)","40.0","1.0","30.0"'
echo '"2","gemm_of_cublas","10.0","12.0","50.0"'
END
program bin/bench <<'END'
case $1 in
  --device) [ -z "$NO_DEVICE" ] || { echo "no device: luna_open: there is no CUDA device"; exit 1; }
    echo "a device" ;;
  --stream) echo "stream: 5 tokens/s" ;;
  --profile) ;;
  *) echo '{"name": "row"}' >"$1"; echo "a row, $3 seconds" ;;
esac
END
program bin/tests/cuda_small <<'END'
echo "cuda_small: 3 passed, 0 failed"
END
program bin/tests/cuda_forgetting <<'END'
trap '' TERM HUP INT
echo "before it hangs"
sleep 98765
sleep 98765
END
program bin/tests/cuda <<'END'
echo "cuda.c:1: the loss is 1.5, on the CPU 2"
echo "cuda: 1 passed, 1 failed"
exit 1
END
program bin/lm <<'END'
echo "the beginning"
head -c 20000000 /dev/zero | tr '\0' x
echo
echo "the end"
END

run() { # FOLDER, settings...: a run with its files there
  folder=$work/$1
  shift
  mkdir -p "$folder"
  env "$@" OUT="$folder" GPU_BIN="$work/bin" PATH="$work/tools:$PATH" BUILD="$build" timeout 900 \
    sh tests/cuda/gpu.sh >"$folder.out" 2>&1
  echo $? >"$folder.status"
}

# ---- a device, and programs of every kind
run first GPU_STEP_SECONDS=15
check "the script ends by itself, with status 1" test "$(cat "$work/first.status")" = 1
check "its last line counts" says first/report.txt 'of 540 seconds; 3 parts failed'
check "what it prints is its report" says first.out '3 parts failed'
check "the device's properties" says first/report.txt 'a device'
check "a test that passes" says first/report.txt 'test cuda_small: done'
check "its counts" says first/report.txt 'cuda_small: 3 passed, 0 failed'
check "a program that hangs is ended" says first/report.txt 'test cuda_forgetting: FAILED, took more than 15 s'
check "what it said before" says first/tests.txt 'before it hangs'
check "a test that fails" says first/report.txt 'test cuda: FAILED with status 1'
check "the values of both sides" says first/tests.txt 'the loss is 1.5, on the CPU 2'
check "memcheck" says first/report.txt 'memcheck: done'
check "a sanitizer that finds something" says first/report.txt 'synccheck: FAILED with status 123'
check "the benchmark" says first/report.txt 'bench: done'
check "its rows" says first/bench.json '"row"'
check "the benchmark's time" says first/bench.txt 'a row, 3 seconds'
check "a library that is not there" says first/report.txt 'peers: skipped, .*peers.so is not here'
check "the stream" says first/lm.txt 'tokens/s'
check "a file that is too large keeps its beginning" says first/lm.txt 'the beginning'
check "and its end" says first/lm.txt 'the end'
for file in "$work/first"/* "$work/first"/.[a-z]*; do
  [ ! -e "$file" ] || check "$file is too large" test "$(wc -c <"$file")" -le 16777216
done
check "there are too many files" test "$(ls -A "$work/first" | wc -l)" -le 8
if command -v python3 >/dev/null 2>&1; then
  check "the profile's kernels, by their time" says first/report.txt '| gemm_of_cublas | 1 | 75.0% | 10%'
  check "their shares, weighted by time" says first/report.txt \
    '| lunacu_unpack_kernel<64> | 2 | 25.0% | 25% | - | 60% | - |'
fi
left=0
for process in /proc/[0-9]*; do
  [ "$(cat "$process/cmdline" 2>/dev/null | tr '\0' ' ')" != "sleep 98765 " ] || left=$((left + 1))
done
check "what hung still runs" test "$left" = 0

# ---- no device: each step says so; and no time: the same
run second NO_DEVICE=1
check "without a device the status is 1" test "$(cat "$work/second.status")" = 1
check "the device's sentence" says second/report.txt 'device: FAILED .*there is no CUDA device'
for name in 'test cuda_small' memcheck racecheck bench lm stream ncu; do
  check "$name, without a device" says second/report.txt "^$name: skipped, there is no CUDA device"
done
check "something ran without a device" test ! -e "$work/second/tests.txt"
run third GPU_SECONDS=0
check "without time nothing has failed" test "$(cat "$work/third.status")" = 0
check "a step that has no time" says third/report.txt 'device: skipped, the 0 seconds are over'
check "something ran without time" test ! -e "$work/third/tests.txt"
# ---- nothing was built
rm -rf "${work:?}/bin"
run fourth GPU_SECONDS=60
check "what was not built" says fourth/report.txt 'bench is not here (make cuda)'
check "nothing is left to fail" silent fourth/report.txt 'FAILED'

[ "$failed" != 0 ] || rm -rf "$work"
echo "gpu_check: $passed passed, $failed failed"
[ "$failed" = 0 ]
