#!/bin/sh
# form.sh: what holds the form of luna.h: its size, its columns, its chapters' tags, and companions that use only what
# is public.
cd "$(dirname "$0")/../.." || exit 1
limit=1062000 # bytes of luna.h; 1000000 when the parts that leave it have left
passed=0 failed=0
check() { # SENTENCE COMMAND...
  sentence=$1
  shift
  if "$@"; then passed=$((passed + 1)); else failed=$((failed + 1)); echo "form: $sentence"; fi
}
bytes=$(($(wc -c <luna.h)))
check "luna.h has $bytes bytes, more than $limit" [ "$bytes" -le "$limit" ]
long=$(awk 'length($0) > 120 { print NR; exit }' luna.h)
check "line $long of luna.h has more than 120 columns" [ -z "$long" ]
twice=$(sed -n 's,^\(/\* \|   \)\(>>[a-z0-9_]*\).*,\2,p' luna.h | sort | uniq -d)
check "a tag of luna.h opens two chapters: $twice" [ -z "$twice" ]
for companion in examples/luna_*.h examples/attentions/*.h; do
  found=$(grep -n '\bli_\|\bLI_' "$companion" | grep -v LI_IMPLEMENTED | head -n 1)
  check "$companion uses what is private: $found" [ -z "$found" ]
done
echo "form: $passed passed, $failed failed"
[ "$failed" = 0 ]
