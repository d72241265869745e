/* A detector and a forecaster from bytes, as a microcontroller has them: the file's bytes and the stream's
   memory are static arrays, no allocator is called. Against the outputs in tests/data/features. It has an
   implementation of its own: not that of build/luna.o (LI_IMPLEMENTED). It counts its calls of malloc and the like. */
#include "test.h"
#include <stdlib.h>
#include <string.h>
static int allocations;
static void *counted_malloc(size_t size) {
  allocations++;
  return malloc(size);
}
TEST_UNUSED static void *counted_calloc(size_t count, size_t size) {
  allocations++;
  return calloc(count, size);
}
TEST_UNUSED static void *counted_realloc(void *old, size_t size) {
  allocations++;
  return realloc(old, size);
}
#define malloc counted_malloc
#define calloc counted_calloc
#define realloc counted_realloc
#define LUNA_NO_INT8
#define LUNA_IMPLEMENTATION
#include "luna.h"
#undef malloc
#undef calloc
#undef realloc

enum { BATCH = 3, N = 7, K = 3 };
static const int64_t huge = (int64_t)1 << 50;
static const int lengths[BATCH] = {7, 2, 5};
static union { float align; unsigned char at[1 << 16]; } file;
static double memory[1 << 14];

/* a tensor of the file, by a plain look at its header; null when it is not there */
static const float *find(const char *name) {
  char key[80];
  unsigned long long header = 0;
  for (int i = 7; i >= 0; i--) header = header << 8 | file.at[i];
  snprintf(key, sizeof key, "\"luna.test.%s\"", name);
  const char *at = strstr((const char *)file.at + 8, key);
  at = at ? strstr(at, "\"data_offsets\": [") : NULL;
  return at ? (const float *)(const void *)(file.at + 8 + header + strtoul(at + 17, NULL, 10)) : NULL;
}

/* every call that a stream from bytes has, after its steps: none may allocate */
static void check_allocations(const char *name, luna_stream *s, const float *x) {
  static char state[1 << 14];
  const int32_t order[BATCH] = {2, 0, 1};
  const luna_input two = {.batch = BATCH, .n = 2, .features = x};
  const size_t size = luna_stream_state_size(s);
  CHECK(size <= sizeof state && luna_stream_state_save(s, state, sizeof state) == LUNA_OK, "%s: save", name);
  CHECK(luna_stream_reorder(s, order) == LUNA_OK, "%s: reorder", name);
  CHECK(luna_stream_prefill(s, &two) && luna_stream_position(s) == N + 2, "%s: %s", name, luna_stream_error(s));
  luna_stream_reset(s);
  CHECK(luna_stream_state_load(s, state, size) == LUNA_OK && luna_stream_position(s) == N, "%s: load", name);
  CHECK(allocations == 0, "%s: opening, stepping and saving call malloc %d times", name, allocations);
}

static void check(const char *name, int outputs) {
  char path[100];
  const char *error = "";
  luna_stream_config config;
  memset(&config, 0, sizeof config);
  memset(&file, 0, sizeof file);
  config.batch = BATCH;
  snprintf(path, sizeof path, "tests/data/features/%s.safetensors", name);
  FILE *from = fopen(path, "rb");
  const size_t size = from ? fread(file.at, 1, sizeof file.at - 1, from) : 0;
  if (from) fclose(from);
  const float *x = find("features"), *want = find("output");
  if (!CHECK(x && want, "%s cannot be read", path)) return;
  allocations = 0;
  const size_t need = luna_stream_size(file.at, size, &config, &error);
  CHECK(need > 0 && need <= sizeof memory, "%s: %lu bytes: %s", name, (unsigned long)need, error);
  luna_stream *s = luna_stream_open_bytes(file.at, size, &config, memory, sizeof memory, &error);
  if (!CHECK(s != NULL, "%s: %s", name, error)) return;
  for (int t = 0; t < N; t++) {
    float row[BATCH * K] = {0};        /* padding is 0: in the file it holds numbers that no stream reads */
    for (int b = 0; b < BATCH; b++) if (t < lengths[b]) memcpy(row + b * K, x + (b * N + t) * K, K * sizeof(float));
    const float *y = luna_stream_step_features(s, row);
    if (!CHECK(y != NULL, "%s: %s", name, luna_stream_error(s))) return;
    for (int b = 0; b < BATCH; b++)
      if (t < lengths[b]) test_close(name, y + b * outputs, want + (b * N + t) * outputs, (size_t)outputs, 1e-5);
  }
  CHECK(luna_stream_position(s) == N, "%s: after %d steps it is at %d", name, (int)N, (int)luna_stream_position(s));
  CHECK(!luna_stream_step_features(s, NULL) && luna_stream_error_id(s) == LUNA_ERROR_STREAM_NO_FEATURES,
        "%s: null features", name);
  check_allocations(name, s, x);
  const luna_input longer = {.batch = BATCH, .n = huge + 1, .features = x};
  CHECK(!luna_stream_prefill(s, &longer) && luna_stream_error_id(s) == LUNA_ERROR_STREAM_TOO_MANY_TOKENS,
        "%s: too large an n", name);
  luna_stream_close(s);
  for (int i = 0; i < 100; i++) {    /* any sizes; on i686 tests/tools/cross.sh traps what is undefined */
    const int64_t wide = (int64_t)(1 + i % 5 * 2) << i / 5 * 2;
    luna_stream_config any = {.batch = i % 2 ? wide : 1, .chunk = i % 2 ? 1 : wide};
    const size_t bytes = luna_stream_size(file.at, size, &any, &error);
    CHECK((bytes == 0) == (*error != 0), "%s: batch %g, chunk %g: %lu bytes, %s", name, (double)any.batch,
          (double)any.chunk, (unsigned long)bytes, error);
  }
  for (int i = 0; i < 4; i++) {      /* sizes whose lower 32 bits are good ones */
    luna_stream_config large = {.batch = i < 2 ? huge + 1 : 1, .chunk = i % 2 ? huge + 1 : 1};
    if (i == 0) large.batch = -huge + 1;
    CHECK(i == 2 || luna_stream_size(file.at, size, &large, &error) == 0, "%s: batch %g, chunk %g", name,
          (double)large.batch, (double)large.chunk);
  }
  memmove(file.at + 1, file.at, size);
  CHECK(luna_stream_size(file.at + 1, size, &config, &error) == 0 && strstr(error, "aligned"),
        "%s at an address that is not aligned: %s", name, error);
}

/* a file that lacks a tensor: the error names it */
static void check_lacking(const char *name) {
  char path[100];
  const char *error = "", *key = "\"layers.1.fc2.bias\"";
  luna_stream_config config;
  memset(&config, 0, sizeof config);
  snprintf(path, sizeof path, "tests/data/features/%s.safetensors", name);
  FILE *from = fopen(path, "rb");
  const size_t size = from ? fread(file.at, 1, sizeof file.at - 1, from) : 0;
  if (from) fclose(from);
  char *at = strstr((char *)file.at + 8, key);
  if (!CHECK(at != NULL, "%s has no %s", name, key)) return;
  at[1 + 9] = 'x';                   /* layers.1.xc2.bias */
  CHECK(!luna_stream_open_bytes(file.at, size, &config, memory, sizeof memory, &error) &&
        strstr(error, "layers.1.fc2.bias is missing"),
        "%s without a bias: %s", name, error);
}

/* a file with weights in 8 bits: its size is refused already, in one sentence */
static void check_int8(void) {
  const char *error = "", from[] = "\"F32\", \"shape\": [8]", to[] = "\"I8\", \"shape\": [32]";
  FILE *in = fopen("tests/data/features/forecast.safetensors", "rb");
  const size_t size = in ? fread(file.at, 1, sizeof file.at - 1, in) : 0;
  if (in) fclose(in);
  char *at = strstr((char *)file.at + 8, from);
  if (!CHECK(at != NULL, "forecast has no %s", from)) return;
  memcpy(at, to, sizeof to - 1);
  const size_t need = luna_stream_size(file.at, size, NULL, &error);
  CHECK(need == 0 && strstr(error, "weights in 8 bits"), "8 bits: %lu bytes: %s", (unsigned long)need, error);
}

/* what a caller's sizes say beyond 32 bits counts, where a stream's own have no more */
static void check_sample(void) {
  const float logits[4] = {0, 1, 3, 2};
  CHECK(luna_sample(logits, huge + 4, NULL) == -1 && luna_sample(logits, -huge + 4, NULL) == -1,
        "sizes of a vocabulary");
  CHECK(luna_sample(logits, 4, NULL) == 2, "the largest");
}

int main(void) {
  const unsigned short one = 1;
  if (*(const unsigned char *)&one == 1) { /* a file is read in place where numbers are little-endian */
    check("step_classes", 2);
    check("forecast", 3);
    check_lacking("forecast");
    check_int8();
    check("rms_steps", 2);
  } else CHECK(true, "never");
  check_sample();
  luna_ctx *ctx = luna_open(NULL);     /* what does allocate is counted */
  CHECK(ctx && allocations > 0, "a context is opened without a call of malloc: nothing is counted");
  luna_close(ctx);
  return test_report("stream_bytes");
}
