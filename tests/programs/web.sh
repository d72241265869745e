#!/bin/sh
# web.sh: tests of the page that make web builds: what it computes, under node and beside the same in machine code; then
# the page itself in headless Chromium. What is not installed is named and skipped. Screenshots are left in build/web.
cd "$(dirname "$0")/../.." || exit 1
build=${BUILD:-build}
cc=${CC:-cc}
for skipped in "node:node is not here" "gzip:gzip is not here"; do
  command -v "${skipped%%:*}" >/dev/null 2>&1 || { echo "skipped: ${skipped#*:}"; echo "0 passed, 0 failed"; exit 0; }
done
if [ ! -e "$build/luna.html" ]; then
  echo "skipped: there is no $build/luna.html"
  echo "0 passed, 0 failed"
  exit 0
fi
# the same training in machine code: BYTES of a file, STEPS, and the instruction set at compile time
cat >"$build/web/native.c" <<'END'
#include "examples/web/page.c"
#include <stdio.h>
#include <time.h>
void page_write(const void *bytes, size_t size) { (void)bytes, (void)size; }
static bool write_to(void *file, const void *bytes, size_t size) {
  return fwrite(bytes, 1, size, (FILE *)file) == size;
}
/* Writes a model whose memory is routed, to look at. */
static int write_routed(const char *path) {
  FILE *file = fopen(path, "wb");
  luna_io io = { NULL, write_to, file, 0 };
  luna_ctx *ctx = luna_open(&(luna_options){ .threads = 1, .seed = 1 });
  luna_lm model;
  luna_lm_init(&model, luna_params_open(ctx), &(luna_lm_config){ .layer = { .dim = 32, .heads = 2, .memory = 8,
    .ffn = 64, .convolution = 4, .forget = LUNA_FORGET_ROUTED, .output_gate = true } });
  const luna_status status = file ? luna_save(model.params, luna_callbacks(&io)) : LUNA_CANNOT_WRITE;
  if (file) fclose(file);
  return luna_close(ctx), status != LUNA_OK;
}
int main(int count, char **given) {
  if (count == 2) return write_routed(given[1]);
  const int size = atoi(given[2]), steps = atoi(given[3]);
  unsigned char *bytes = (unsigned char *)malloc((size_t)size);
  FILE *f = fopen(given[1], "rb");
  if (!f || !bytes || fread(bytes, 1, (size_t)size, f) != (size_t)size || !page_text(bytes, size)) return 1;
  for (int i = 4; i < count; i++) ((int32_t *)page_settings())[i - 4] = atoi(given[i]);
  if (!page_open()) return puts(page_error()), 1;
  struct timespec from, to;
  double loss = 0, best = 1e9;
  for (int i = 0; i < steps; i++) {
    clock_gettime(CLOCK_MONOTONIC, &from);
    loss = page_train(5e-3, steps);
    clock_gettime(CLOCK_MONOTONIC, &to);
    const double took = 1e3 * (double)(to.tv_sec - from.tv_sec) + 1e-6 * (double)(to.tv_nsec - from.tv_nsec);
    if (took < best) best = took;
  }
  return printf("%.9g %.3f\n", loss, best) < 0;
}
END
isa=BEST
case $(uname -m) in x86_64) isa=SSE2 ;; esac
[ "$build/web/native" -nt luna.h ] && [ "$build/web/native" -nt examples/web/page.c ] ||
  $cc -O2 -D_POSIX_C_SOURCE=199309L -DPAGE_ISA=LUNA_ISA_$isa -I. "$build/web/native.c" -o "$build/web/native" -lm ||
  exit 1
exec node --no-warnings tests/programs/web.mjs "$build" "$@"
