# nesting.awk: prints each chain of macros of luna.h in which more than two levels have parameters
#     awk -f tests/tools/nesting.awk luna.h
# A macro uses another one if its text has the other's name, and both are defined at some line, from #define to #undef.
# A name may be pasted: LI_CPU_##name uses all macros that begin so. Two kinds of macros add no level: macros without
# parameters, and tables of rows, which call a parameter (LUNA_OPS). A row stands for code at the place where the table
# is used, and a table that lists another one would otherwise repeat its rows.
function strip(text,    at) {   # comments and strings
  gsub(/"([^"\\]|\\.)*"/, "\"\"", text)
  while ((at = index(text, "/*")) > 0)
    text = substr(text, 1, at - 1) " " (match(text, /\*\//) ? substr(text, RSTART + 2) : "")
  return text
}
function define(text, line,    id, parts, count, i, at) {
  sub(/^ *# *define +/, "", text)
  match(text, /^[A-Za-z0-9_]+/)
  id = ++macros
  name[id] = substr(text, 1, RLENGTH)
  ids[name[id]] = ids[name[id]] " " id
  first[id] = line
  last[id] = 1e9
  text = substr(text, RLENGTH + 1)
  level[id] = has[id] = substr(text, 1, 1) == "("
  count = 0
  if (has[id]) count = split(substr(text, 2, index(text, ")") - 2), parts, / *, */)
  if (has[id]) text = substr(text, index(text, ")") + 1)
  text = " " text " "
  for (i = 1; i <= count; i++)   # parameters become @
    while (parts[i] != "..." && match(text, "[^A-Za-z0-9_]" parts[i] "[^A-Za-z0-9_]")) {
      at = RSTART + RLENGTH - 1
      if (substr(text, at) ~ /^ *\(/) level[id] = 0
      text = substr(text, 1, RSTART) "@" substr(text, at)
    }
  gsub(/ *## */, "", text)
  body[id] = text
}
# Returns the levels of a macro's deepest chain, whose names `chain` keeps.
function depth(id,    text, word, rest, other) {
  if (id in known) return known[id]
  known[id] = level[id]   # also ends a chain that comes back here
  chain[id] = name[id]
  for (text = body[id]; match(text, /[A-Za-z0-9_@]+/); text = rest) {
    word = substr(text, RSTART, RLENGTH)
    rest = substr(text, RSTART + RLENGTH)
    if (word ~ /^@+$/) continue
    if (word ~ /@/) {
      gsub(/@/, "[A-Za-z0-9_]+", word)
      for (other = 1; other <= macros; other++)
        if (name[other] ~ "^" word "$" && (!has[other] || rest ~ /^ *\(/)) use(id, other)
    } else if (word in ids && word != name[id]) uses(id, ids[word])
  }
  return known[id]
}
function uses(id, list,    others, count, i) {
  count = split(list, others, " ")
  for (i = 1; i <= count; i++) use(id, others[i])
}
function use(id, other,    d) {
  if (first[id] >= last[other] || first[other] >= last[id]) return
  d = level[id] + depth(other)
  if (d <= known[id]) return
  known[id] = d
  chain[id] = name[id] " > " chain[other]
}
{ if (text == "") line = NR
  text = text $0 }
/\\$/ { sub(/\\$/, " ", text); next }
text ~ /^ *# *define / { define(strip(text), line) }
text ~ /^ *# *undef / {
  split(text, words, / +/)
  count = split(ids[words[2]], old, " ")
  for (i = 1; i <= count; i++) if (last[old[i]] > NR) last[old[i]] = NR
}
{ text = "" }
END { for (i = 1; i <= macros; i++) if (level[i] && depth(i) > 2) print "line " first[i] ": " chain[i] }
