#!/bin/sh
# coverage.sh [TEST...]: tests/tools/coverage.py, where there are gcc, gcov and Python
cd "$(dirname "$0")/../.." || exit 1
for tool in gcc gcov python3; do
  command -v "$tool" >/dev/null 2>&1 && continue
  echo "$tool is not here: coverage is not measured"
  echo "coverage: 0 passed, 0 failed"
  exit 0
done
unset TEST_FULL
exec python3 tests/tools/coverage.py "${BUILD:-build}/coverage" "$@"
