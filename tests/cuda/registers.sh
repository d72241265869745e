#!/bin/sh
# registers.sh LOG: of what ptxas -v said, a line a kernel: architecture, registers, bytes of spills, name; last how
# many kernels there are and spill.
awk '
  /Compiling entry function/ { split($0, part, "'"'"'"); name = part[2]; arch = part[4] }
  /bytes spill stores/ { for (i = 1; i <= NF; i++) if ($i == "bytes" && $(i + 1) == "spill") spill += $(i - 1) }
  /Used [0-9]+ registers/ {
    for (i = 1; i <= NF; i++) if ($i == "Used") print arch, $(i + 1), spill + 0, name
    spill = 0
  }
' "$1" | { command -v c++filt >/dev/null 2>&1 && c++filt || cat; } | sed 's/(.*//' | sort -k4 -k1 | awk '
  {
    printf "%s  %3d registers  %5d bytes spilled  %s\n", $1, $2, $3, substr($0, index($0, $4))
    kernels++
    if ($3 > 0) spilling++
    if ($2 > max) max = $2
  }
  END { printf "%d kernels, at most %d registers, %d that spill\n", kernels, max, spilling }'
