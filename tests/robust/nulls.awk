# Out of the functions in tests/tools/api.txt, which tests/tools/api.py compares with luna.h, and of those that
# examples/luna_ops.h defines, C for tests/robust/arguments.c: each function once more, which passes null for the one
# parameter that the test asks for, and a row for each pointer.
BEGIN {
  print "/* made by tests/robust/nulls.awk */"
  # without these there may be no context to report to
  telling = "luna_(ctx|params|tensor|optimizer|stream|lm|lm_state|classifier|masked_lm|seq2seq|encoder|[a-z_]*layer) "
}

# what luna_cuda.cuh declares is not there without a device
/^function / && !/luna_(cuda|graph)_/ { write(substr($0, length("function ") + 1)) }
# a companion's definition, whose parameters may go on in the next lines
/^OPS_FN / { while ($0 !~ /[{;]/ && (getline more) > 0) { sub(/^ +/, " ", more); $0 = $0 more } }
/^OPS_FN [^(]*luna_[a-z0-9_]+\(.*\) \{/ {
  sub(/^OPS_FN /, "")
  sub(/ \{.*/, "")
  write($0)
}

function write(prototype,    name, result, parameters, count, arguments, k, given) {
  match(prototype, /luna_[a-z0-9_]+\(/)
  name = substr(prototype, RSTART, RLENGTH - 1)
  result = substr(prototype, 1, RSTART - 1)
  parameters = substr(prototype, RSTART + RLENGTH, length(prototype) - RSTART - RLENGTH)
  count = separate(parameters)
  arguments = ""
  printf "static %snull_%s(%s) {\n", result, name, parameters
  for (k = 1; k <= count; k++) {
    given = named(part[k])
    arguments = arguments (k > 1 ? ", " : "") given
    if (part[k] !~ /[*[]/ || given == "user") continue # which only the test's own function reads
    printf "  if (null_is(\"%s\", %d)) %s = NULL;\n", name, k - 1, given
    rows = rows sprintf("  {\"%s\", %d, \"%s\", %s},\n", name, k - 1, given, part[k] ~ telling ? "false" : "true")
  }
  printf "  %s%s(%s);\n}\n", result == "void " ? "" : "return ", name, arguments
  names[++functions] = name
}

END {
  printf "static const null_row null_rows[] = {\n%s};\n", rows
  for (k = 1; k <= functions; k++) printf "#define %s null_%s\n", names[k], names[k]
}

# part[1..]: what commas separate that are in no bracket
function separate(text,    i, c, depth, count) {
  count = 1
  part[1] = ""
  for (i = 1; i <= length(text); i++) {
    c = substr(text, i, 1)
    depth += (c == "(") - (c == ")")
    if (c == "," && depth == 0) part[++count] = ""
    else part[count] = part[count] c
  }
  return text == "void" ? 0 : count
}

# the name that a parameter declares
function named(text) {
  sub(/\)\(.*/, "", text)            # of a function
  sub(/\[.*/, "", text)
  match(text, /[A-Za-z0-9_]+$/)
  return substr(text, RSTART)
}
