#!/bin/sh
# form.sh: what holds the form: of luna.h its size, how it reads, its columns, its chapters' tags and its paper map;
# companions that use only what is public; sources of at most 120 columns; texts that name only files that are there,
# and links that lead to a file and a heading; captions of the measurements; README's length; what make alone prints;
# and whether the program of make size compiles.
cd "$(dirname "$0")/../.." || exit 1
limit=996000 # bytes of luna.h, which only falls; a million is the most that code hosts show
passed=0 failed=0
check() { # SENTENCE COMMAND...
  sentence=$1
  shift
  if "$@"; then passed=$((passed + 1)); else failed=$((failed + 1)); echo "form: $sentence"; fi
}
bytes=$(($(wc -c <luna.h)))
check "luna.h has $bytes bytes, more than $limit" [ "$bytes" -le "$limit" ]
# how it reads: function-like macros, conditional expressions in 1000 lines of code, blank lines of the implementation
macros=$(grep -c '^ *# *define [A-Za-z0-9_]*(' luna.h)
check "luna.h has $macros function-like macros, more than 200" [ "$macros" -le 200 ]
deep=$(awk -f tests/tools/nesting.awk luna.h || echo "nesting.awk fails")
check "luna.h has macros that are nested more than two deep: $deep" [ -z "$deep" ]
conditions=$(awk '{ gsub(/"([^"\\]|\\.)*"/, "s"); line = "" }
  { while ($0 != "") {
      at = index($0, inside ? "*/" : "/*")
      if (!inside) line = line (at ? substr($0, 1, at - 1) : $0)
      if (!at) break
      inside = !inside
      $0 = substr($0, at + 2)
    } }
  line !~ /^[ \t]*$/ { lines++; count += gsub(/[?]/, "", line) }
  END { printf "%d", count * 1000 / lines }' luna.h)
check "luna.h has $conditions conditional expressions in 1000 lines of code, more than 25" [ "$conditions" -le 25 ]
blank=$(awk '/>>base: / { on = 1 }
  on { lines++; count += /^$/ }
  END { printf "%d", count * 1000 / lines }' luna.h)
check "of 1000 lines of the implementation $blank are blank, fewer than 60" [ "$blank" -ge 60 ]
# comments of the implementation: one of more than four words begins with a capital, unless its first word is code. That
# is one letter (but not "a"), has one of _0-9([>*, stands before = += (+)= [ or ->, or is a word of the code of the
# comment's own lines or of the three lines below it. None begins with "Of"
small=$(awk '/>>base: / { on = 1 }
  on { gsub(/"([^"\\]|\\.)*"/, "\"\"") }
  on { while ($0 != "") {
      at = index($0, inside ? "*/" : "/*")
      part = at ? substr($0, 1, at - 1) : $0
      if (inside) text[count] = text[count] " " part
      else code[FNR] = code[FNR] " " part
      if (at && !inside) first[++count] = FNR
      if (at || inside) last[count] = FNR
      if (!at) break
      inside = !inside
      $0 = substr($0, at + 2)
    } }
  function used(word, from, to, line) {
    if (word ~ /^(break|case|continue|default|do|else|for|if|return|switch|while)$/) return 0
    for (line = from; line <= to; line++)
      if ((" " code[line] " ") ~ ("[^A-Za-z0-9_]" word "[^A-Za-z0-9_]")) return 1
    return 0
  }
  function is_code(text, word, from, to) {
    if (word ~ /[_0-9(\[>*]/ || text ~ /^[a-z]+ (=|[+]=|[(][+][)]=|\[|->)/) return 1
    sub(/[^a-z].*$/, "", word)
    return length(word) == 1 ? word != "a" : used(word, from, to)
  }
  END {
    for (i = 1; i <= count; i++) {
      sub(/^[ -]+/, "", text[i])
      sub(/[ -]+$/, "", text[i])
      words = split(text[i], word, / +/)
      bad = text[i] ~ /^Of / || (words > 4 && text[i] ~ /^[a-z]/ && !is_code(text[i], word[1], first[i], last[i] + 3))
      if (bad) { print "line " first[i] ": " substr(text[i], 1, 40); exit }
    }
    if (count < 1000) print "only " count + 0 " comments were found"
  }' luna.h)
check "luna.h has a comment that begins in lower case, or with Of: $small" [ -z "$small" ]
sources=$(find luna.h luna_cuda.cuh Makefile examples tests -type f \( -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' \
  -o -name '*.cpp' -o -name '*.py' -o -name '*.sh' -o -name '*.mk' -o -name '*.awk' -o -name '*.js' -o -name '*.mjs' \
  -o -name Makefile \) ! -path 'tests/data/*' ! -path '*/__pycache__/*')
for file in $sources; do
  long=$(LC_ALL=C awk '{ gsub(/[\200-\277]/, "") } length($0) > 120 { print FNR; exit }' "$file")
  check "line $long of $file has more than 120 columns" [ -z "$long" ]
done
twice=$(sed -n 's,^\(/\* \|   \)\(>>[a-z0-9_]*\).*,\2,p' luna.h | sort | uniq -d)
check "a tag of luna.h opens two chapters: $twice" [ -z "$twice" ]
outside=$(awk '/^   >>/ { tag = $1 } /^#define LI_CPU_/ && tag != ">>impl_ops:" { print NR; exit }' luna.h)
check "line $outside of luna.h has an op's row outside >>impl_ops, where all of the op belongs" [ -z "$outside" ]
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
for test in $(echo "$map" | grep -o '[a-z_]*\.c$'); do
  check "the paper map names the test $test, which is not there" [ -n "$(find tests -name "$test")" ]
done
for companion in examples/luna_*.h examples/attentions/*.h; do
  found=$(grep -n '\bli_\|\bLI_' "$companion" | grep -v LI_IMPLEMENTED | head -n 1)
  check "$companion uses what is private: $found" [ -z "$found" ]
done
# what comments and documents name by its path
for text in $sources README.md .github/SECURITY.md examples/*.md; do
  gone=
  for path in $(grep -oE '(^|[^A-Za-z0-9_./)}-])(\$root/)?(tests|examples)/[a-z0-9_/]*[.][a-z][a-z0-9]*' "$text" |
      sed -E 's/^.*(tests|examples)\//\1\//' | grep -v '[.]o$' | sort -u); do
    [ -e "$path" ] || gone="$gone $path"
  done
  check "$text names what is not there:$gone" [ -z "$gone" ]
done

# links of the documents: to a file that is there, and to one heading in it, as GitHub names headings
headings() { # FILE
  awk '/^```/ { code = !code } !code && /^#+ / {
    sub(/^#+ /, ""); $0 = tolower($0); gsub(/[^a-z0-9 _-]/, ""); gsub(/ /, "-"); print }' "$1"
}
links() { # FILE
  awk '/^```/ { code = !code } !code' "$1" | awk '{ gsub(/\]\(/, "\n](") } 1' | sed -n 's/^](\([^) ]*\)).*/\1/p' |
    grep -v '^https\{0,1\}:'
}
count=0
for page in README.md .github/SECURITY.md examples/*.md; do
  for link in $(links $page); do
    file=${link%%#*}
    [ -n "$file" ] && file=$(dirname $page)/$file || file=$page
    count=$((count + 1))
    check "$page has a link to $link, which is not there" [ -e "$file" ]
    case $link in *\#*) check "$page has a link to $link, which is not one heading" \
      [ "$(headings "$file" | grep -cx -- "${link#*#}")" = 1 ] ;;
    esac
  done
done
check "only $count links were found" [ "$count" -ge 150 ]
for heading in $(sed -n 's/^## //p' examples/guide.md | sed 's/[^A-Za-z0-9 _-]//g' | tr 'A-Z ' 'a-z-'); do
  check "the guide's contents have no chapter $heading" \
    sh -c 'sed -n 1,20p examples/guide.md | grep -q "(#$1)"' - "$heading"
done
lines=$(($(wc -l <README.md)))
check "README has $lines lines, more than 220" [ "$lines" -le 220 ]
check "README's first program begins below line 12" \
  [ "$(sed -n '/^#define LUNA_IMPLEMENTATION/{=;q;}' README.md)" -le 12 ]

# each table of the measurements stands below a caption of its own, in bold, and a numbered one says on which processor,
# by which command and how to read it; the numbers count up
bare=$(awk '
  /^## / { skip = /NVIDIA/; caption = "" }
  /^\*\*/ { caption = "" }
  !/^\|/ { caption = caption " " $0; row = 0; next }
  row++ || skip { next }
  { if (caption !~ /\*\*[A-Z].*\.\*\*/) print "line " FNR
    text = tolower(caption)
    if (match(text, /\*\*table [0-9]+\./)) {
      if (substr(text, RSTART + 8, RLENGTH - 9) + 0 != ++count) print "line " FNR " (number)"
      if (text !~ /processor/ || text !~ /command/ || text !~ /how to read/) print "line " FNR " (caption)"
    }
    caption = "" }
  END { if (count < 20) print "there are only " count + 0 " numbered tables" }' examples/measurements.md)
check "examples/measurements.md has tables without their captions: $bare" [ -z "$bare" ]

make=$(command -v gmake || echo make)
# make alone builds nothing and says what there is: first what users want, then every other target
work=${BUILD:-build}/form
rm -rf "$work"
mkdir -p "$work"
MAKEFLAGS='' "$make" --no-print-directory BUILD="$work/none" >"$work/help" 2>&1
check "make alone fails" [ $? = 0 ]
check "make alone builds something" [ ! -e "$work/none" ]
first=$(sed -n '/^$/q; s/^make \([a-z]*\).*/\1/p' "$work/help" | tr '\n' ' ')
check "make alone begins with $first" [ "$first" = "run examples test install docs clean " ]
check "make alone does not go on for maintainers" grep -q '^For maintainers:$' "$work/help"
rules="Makefile tests/*/*.mk examples/*/*.mk"
phony=$(awk '/^\.PHONY:/ { on = 1 } on { print } !/\\$/ { on = 0 }' $rules | sed 's/\.PHONY://; s/\\$//')
for target in $phony; do
  case $target in help | programs | names) continue ;; esac   # these are for the Makefile and the scripts alone
  check "make alone does not name $target" grep -q "^make $target\( \|\$\)" "$work/help"
done
for target in $(sed -n 's/^make \([a-z-]*\).*/\1/p' "$work/help"); do
  check "there is no target $target" grep -q "^$target:" $rules
done

# make size
check "the program of make size does not compile and run" sh tests/tools/size.sh --check
sh tests/tools/size.sh chapters >"$work/chapters"
check "the chapters of make size are not all of luna.h" grep -q "^all  *$bytes\$" "$work/chapters"
rm -rf "$work"
echo "form: $passed passed, $failed failed"
[ "$failed" = 0 ]
