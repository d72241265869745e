#!/bin/sh
# form.sh: what holds the form of luna.h: its size, its columns, its chapters' tags, and companions that use only what is public.
cd "$(dirname "$0")/.." || exit 1
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
# the paper map of the manual: each "name >>chapter" is a function that begins a line in that chapter, each test a file
map=$(sed -n '/^   THE PAPER IN THIS FILE/,/^   SWITCHES/p' luna.h)
names=$(echo "$map" | grep -o '[A-Za-z_]*(*[a-z0-9_]*)* >>[a-z_]*')
check "the paper map has $(echo "$names" | wc -l) names, not 35" [ "$(echo "$names" | wc -l)" -eq 35 ]
for row in '1/3 pack' '4 unpack' '6 layer' '7 chunks' '7 stream' forgets Adam; do
  check "the paper map has no row \"$row\"" grep -q "^   $row  *li_\|^   $row  *luna_" <<END
$map
END
done
missing=$(echo "$names" | awk '
  NR == FNR { name[NR] = $1; chapter[NR] = $2; next }
  match($0, /^(\/\* |   )>>[a-z0-9_]+/) { tag = substr($0, RSTART + 3, RLENGTH - 3) }
  /^L[IU][A-Z_]* / {
    for (i in name) {
      at = index($0, name[i] "(")
      if (tag == chapter[i] && at && substr($0, at - 1, 1) ~ /[ *]/) delete name[i]
    }
  }
  END { for (i in name) print name[i], chapter[i] }' - luna.h)
check "luna.h has no function where its paper map says: $missing" [ -z "$missing" ]
for test in $(echo "$map" | grep -o 'tests/[a-z_]*\.c'); do
  check "the paper map names $test, which is not there" [ -f "$test" ]
done
for companion in examples/luna_*.h examples/attentions/*.h; do
  found=$(grep -n '\bli_\|\bLI_' "$companion" | grep -v LI_IMPLEMENTED | head -n 1)
  check "$companion uses what is private: $found" [ -z "$found" ]
done
echo "form: $passed passed, $failed failed"
[ "$failed" = 0 ]
