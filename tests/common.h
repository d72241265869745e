/* What several tests share; include it after luna.h and test.h. Numbers come from a hash of (seed, index), so that
   every test is the same on every machine. */
#ifndef COMMON_H
#define COMMON_H
#include <stdlib.h>
#include <string.h>
#ifdef _WIN32
#include <direct.h>
#include <io.h>
#define mkdir(path, mode) _mkdir(path)
#endif

#define COMMON_ISAS 7
static const luna_isa common_isas[COMMON_ISAS] = {LUNA_ISA_SCALAR, LUNA_ISA_SSE2, LUNA_ISA_AVX2,
                                                  LUNA_ISA_AVX512, LUNA_ISA_NEON, LUNA_ISA_WASM, LUNA_ISA_REFERENCE};

TEST_UNUSED static uint64_t common_hash(uint64_t seed, uint64_t index) {
  uint64_t x = seed * 0x9E3779B97F4A7C15u + index * 0xD1B54A32D192ED03u + 0x2545F4914F6CDD1Du;
  for (int i = 0; i < 3; i++) x = (x ^ (x >> 29)) * 0xBF58476D1CE4E5B9u;
  return x ^ (x >> 32);
}

/* where tests write files: the folder they were built in */
TEST_UNUSED static const char *common_build(void) {
  const char *build = getenv("BUILD");
  return build ? build : "build";
}

/* bytes that grow; limit: the byte at which writing fails, 0 = never */
typedef struct common_bytes { uint8_t *at; size_t size, room, limit; } common_bytes;
TEST_UNUSED static bool common_write(void *user, const void *bytes, size_t size) {
  common_bytes *b = (common_bytes *)user;
  if (b->limit && b->size + size > b->limit) return false;
  if (b->size + size > b->room) {
    b->room = 2 * (b->size + size);
    b->at = (uint8_t *)realloc(b->at, b->room);
    if (!b->at) exit(2);
  }
  if (size) memcpy(b->at + b->size, bytes, size);
  b->size += size;
  return true;
}

/* can F32 be read in place from a checkpoint? Its numbers are little-endian */
TEST_UNUSED static bool common_little_endian(void) {
  const uint16_t one = 1;
  return *(const uint8_t *)&one == 1;
}

/* uniform in [-1, 1) */
TEST_UNUSED static double common_number(uint64_t seed, uint64_t index) {
  return (double)(common_hash(seed, index) >> 11) / 4503599627370496.0 - 1;
}

TEST_UNUSED static void common_fill(float *x, int64_t n, uint64_t seed, double scale) {
  for (int64_t i = 0; i < n; i++) x[i] = (float)(scale * common_number(seed, (uint64_t)i));
}

TEST_UNUSED static void *common_alloc(size_t bytes) {
  void *p = calloc(bytes ? bytes : 1, 1);
  if (!p) {
    puts("the test itself is out of memory");
    exit(2);
  }
  return p;
}
TEST_UNUSED static float *common_floats(int64_t n) { return (float *)common_alloc((size_t)n * sizeof(float)); }
TEST_UNUSED static float *common_random(int64_t n, uint64_t seed, double scale) {
  float *x = common_floats(n);
  common_fill(x, n, seed, scale);
  return x;
}

/* random tokens below `vocab` */
TEST_UNUSED static int32_t *common_tokens(int64_t n, uint64_t seed, int32_t vocab) {
  int32_t *tokens = (int32_t *)common_alloc((size_t)n * sizeof(int32_t));
  for (int64_t i = 0; i < n; i++) tokens[i] = (int32_t)(common_hash(seed, (uint64_t)i) % (uint64_t)vocab);
  return tokens;
}

/* a random tensor of up to four axes (0: no such axis) in the context, from the given seed */
TEST_UNUSED static luna_tensor *common_tensor(luna_ctx *ctx, uint64_t seed, int64_t a, int64_t b, int64_t c,
                                              int64_t d) {
  const int64_t shape[4] = {a, b, c, d};
  int rank = 0;
  int64_t count = 1;
  while (rank < 4 && shape[rank] > 0) count *= shape[rank++];
  float *values = common_random(count, seed, 1);
  luna_tensor *t = luna_tensor_new(ctx, values, rank, shape);
  free(values);
  return t;
}

/* sum of y times fixed random weights, [1]: a loss through which every output has its own gradient */
TEST_UNUSED static luna_tensor *common_loss(luna_tensor *y, uint64_t seed) {
  const int64_t flat[2] = {1, luna_count(y)};
  if (!y) return NULL;
  return luna_sum(luna_reshape(luna_mul(y, common_tensor(y->ctx, seed, y->shape[0], y->rank > 1 ? y->shape[1] : 0,
                                                         y->rank > 2 ? y->shape[2] : 0, y->rank > 3 ? y->shape[3] : 0)),
                               2, flat),
                  1);
}

/* Where two arrays differ most, for a sentence: both values there, and how many differ. Good until the fourth next. */
TEST_UNUSED static const char *common_where(const float *got, const float *expected, int64_t n) {
  static char room[4][96];
  static int turn;
  int64_t worst = 0, differ = 0;
  double off = -1;
  for (int64_t i = 0; got && expected && i < n; i++) {
    const double d = fabs((double)got[i] - (double)expected[i]);
    if (memcmp(got + i, expected + i, sizeof *got) == 0) continue;
    differ++;
    if (!(d <= off) && off == off) worst = i, off = d;
  }
  turn = (turn + 1) % 4;
  if (!got || !expected || n <= 0) return "there is nothing to compare";
  snprintf(room[turn], sizeof room[turn], "number %lld is %.9g, not %.9g; %lld of %lld differ", (long long)worst,
           (double)got[worst], (double)expected[worst], (long long)differ, (long long)n);
  return room[turn];
}

/* test_error with a floor of one's own: the root mean square below which b counts as zero */
TEST_UNUSED static double common_error(const float *a, const float *b, int64_t n, double floor) {
  double difference = 0, size = 0;
  for (int64_t i = 0; i < n; i++) {
    const double d = (double)a[i] - (double)b[i];
    difference += d * d;
    size += (double)b[i] * (double)b[i];
  }
  size = sqrt(size);
  floor *= sqrt((double)n);
  return n ? sqrt(difference) / (size < floor ? floor : size) : 0;
}

/* gives every parameter of the set random values: matrices of variance 1/in, vectors within 0.5 of what they were */
TEST_UNUSED static void common_params(luna_params *params, uint64_t seed) {
  for (int64_t i = 0; i < luna_params_tensor_count(params); i++) {
    luna_tensor *p = luna_params_at(params, i, NULL);
    const double scale = p->rank > 1 ? sqrt(3.0 / (double)p->shape[p->rank - 1]) : 0.5;
    for (int64_t j = 0; j < luna_count(p); j++)
      p->data[j] = (float)((p->rank > 1 ? 0 : (double)p->data[j]) + scale *
                           common_number(seed + (uint64_t)i, (uint64_t)j));
  }
}

/* ops of one tensor and nothing else: from a name here come the cases of op_cases.h and of arguments.c */
#define COMMON_UNARY(U) U(sum_all) U(mean_all) U(log_softmax) U(neg)

/* every parameter's values, one after the other, to be freed */
TEST_UNUSED static float *common_parameters(const luna_params *params) {
  float *out = common_floats(luna_params_element_count(params)), *at = out;
  for (int64_t i = 0; i < luna_params_tensor_count(params); i++) {
    const luna_tensor *p = luna_params_at(params, i, NULL);
    luna_read(p, at);
    at += luna_count(p);
  }
  return out;
}


/* lets one stream go on from another's state */
TEST_UNUSED static luna_status common_stream_copy(luna_stream *to, const luna_stream *from) {
  const size_t size = luna_stream_state_size(from);
  void *state = malloc(size ? size : 1);
  luna_status status = state ? luna_stream_state_save(from, state, size) : LUNA_OUT_OF_MEMORY;
  if (status == LUNA_OK) status = luna_stream_state_load(to, state, size);
  free(state);
  return status;
}
#endif
