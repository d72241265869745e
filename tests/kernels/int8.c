/* Products in 8 bits: the integers of every instruction set against a naive loop, to the last unit, at odd and largest
   sizes; rounding of rows; the whole product, with bias, activation and residual, the same bits for any number of
   threads and from panels. */
#include "test.h"
#define LUNA_IMPLEMENTATION
#include "luna.h"
#include "common.h"
#ifndef __wasm__
#include "kernels.h"
#endif

#ifndef LUNA_NO_INT8
/* the loops that this machine can run; offset: what is added to q */
typedef struct int8_set { const char *name; const li_int8_loops *loops; int offset; } int8_set;
static int int8_sets(int8_set *sets) {
  static const struct { luna_isa isa; int offset; } isas[] = {
    {LUNA_ISA_SCALAR, 0}, {LUNA_ISA_SSE2, 0}, {LUNA_ISA_AVX2, 0}, {LUNA_ISA_AVX512, 0}, {LUNA_ISA_NEON, 0},
    {LUNA_ISA_WASM, 0}, {LUNA_ISA_AVX2_VNNI, 128}, {LUNA_ISA_AVX512_VNNI, 128}, {LUNA_ISA_AMX, 128}};
  int count = 0;
  for (size_t i = 0; i < sizeof isas / sizeof *isas; i++) {
    const li_kernels *table = li_kernels_of(isas[i].isa);
    if (table) sets[count++] = (int8_set){luna_isa_name(isas[i].isa), table->int8, isas[i].offset};
  }
  return count;
}

/* ---- sums ---- */
enum { INT8_RANDOM, INT8_HIGH, INT8_LOW, INT8_CANCEL, INT8_FILLS };
static const char *const int8_fill_name[INT8_FILLS] = {"random", "127 by 127", "127 by -127", "cancelling"};
/* integer i of row `row`: of x where side is 0, else of W. Cancelling: partial sums become as large as they can, and
   the whole small enough for a float to hold each unit. */
static int int8_value(int fill, int side, int64_t row, int64_t i, int64_t k) {
  if (fill == INT8_HIGH) return 127;
  if (fill == INT8_LOW) return side ? -127 : 127;
  const int any = (int)(common_hash((uint64_t)side + 1, (uint64_t)(row * k + i)) % 255) - 127;
  if (fill == INT8_RANDOM || i >= k / 2 * 2) return i == 0 && !side ? 127 : any;
  if (i == 0 || i == k - 1) return side ? any : 127;
  return side || i < k / 2 ? 127 : -127;
}
typedef struct int8_trial {
  int64_t m, n, k;
  float *x;
  li_int8 *w;
  void *memory;
} int8_trial;
static int8_trial int8_open(int64_t m, int64_t n, int64_t k, int fill) {
  int8_trial t = {m, n, k, common_floats(m * k), NULL, common_alloc(li_int8_bytes(n, k))};
  t.w = li_int8_place(t.memory, n, k);
  for (int64_t i = 0; i < m * k; i++) t.x[i] = (float)int8_value(fill, 0, i / k, i % k, k);
  for (int64_t i = 0; i < n * k; i++) ((int8_t *)(uintptr_t)t.w->at)[i] = (int8_t)int8_value(fill, 1, i / k, i % k, k);
  for (int64_t r = 0; r < n; r++) ((float *)(uintptr_t)t.w->scale)[r] = 1;
  li_int8_sum(t.w);
  return t;
}
static void int8_close(int8_trial *t) { free(t->x), free(t->memory); }
static int64_t int8_naive(const int8_trial *t, int64_t i, int64_t j) {
  int64_t sum = 0;
  for (int64_t p = 0; p < t->k; p++) sum += (int64_t)t->x[i * t->k + p] * t->w->at[j * t->k + p];
  return sum;
}
/* all rows by all columns, in blocks, from W as it lies or from panels */
static void int8_multiply(const li_int8_loops *loops, const int8_trial *t, bool panels, float *y) {
  const int64_t q_row = (t->k * loops->bytes + 127) / 64 * 64,
      panel = (t->k + loops->qk - 1) / loops->qk * loops->qk * loops->qn * loops->bytes;
  const size_t panel_size = (size_t)((t->n + loops->qn - 1) / loops->qn * panel);
  char *q = (char *)common_alloc((size_t)(t->m * q_row) + 64), *memory = (char *)common_alloc(panel_size);
  float *scales = common_floats(t->m);
  memset(q, 0x55, (size_t)(t->m * q_row));
  for (int64_t i = 0; i < t->m; i++) scales[i] = loops->quantize(t->k, t->x + i * t->k, q + i * q_row);
  loops->panels(t->n, t->k, t->w->at, memory);
  for (int64_t i = 0; i < t->m; i += loops->qm) {
    const li_int8_block b = {li_min(loops->qm, t->m - i), t->n, t->k, q_row, q + i * q_row, scales + i,
                             panels ? NULL : t->w->at, memory, t->w->scale, NULL, t->w->sums, y + i * t->n, t->n, NULL,
                             false};
    loops->rows(&b);
  }
  free(q), free(memory), free(scales);
}
static void int8_check_sums(void) {
  static const int64_t sizes[][3] = {
    {1, 1, 1}, {3, 2, 1}, {1, 5, 3}, {2, 33, 17}, {5, 16, 31}, {14, 32, 64}, {15, 70, 129}, {29, 31, 255},
    {32, 32, 64}, {70, 70, 130}, {40, 65, 100}, {1, 3, LI_INT8_MAX}, {17, 2, LI_INT8_MAX}, {2, 1, LI_INT8_MAX - 1}
  };
  int8_set sets[9];
  const int count = int8_sets(sets);
  CHECK(count > 0, "no instruction set has loops");
  for (int s = 0; s < count; s++) printf("%s%s", s ? ", " : "int8 by ", sets[s].name);
  puts("");
  for (size_t z = 0; z < sizeof sizes / sizeof *sizes; z++)
    for (int fill = 0; fill < INT8_FILLS; fill++) {
      int8_trial t = int8_open(sizes[z][0], sizes[z][1], sizes[z][2], fill);
      float *y = common_floats(t.m * t.n), *want = common_floats(t.m * t.n);
      for (int64_t i = 0; i < t.m * t.n; i++) {
        const int64_t sum = int8_naive(&t, i / t.n, i % t.n);
        want[i] = (float)sum;
        CHECK(sum >= INT32_MIN && sum <= INT32_MAX, "the sum %lld is no int32", (long long)sum);
        if (fill == INT8_CANCEL) CHECK(sum < 1 << 24 && sum > -(1 << 24), "%lld is not small", (long long)sum);
      }
      for (int s = 0; s < 2 * count; s++) {
        int8_multiply(sets[s / 2].loops, &t, s % 2, y);
        int64_t at = 0;
        while (at + 1 < t.m * t.n && y[at] == want[at]) at++;
        CHECK(y[at] == want[at], "%s, %s, %lld x %lld x %lld%s: row %lld, column %lld is %.9g, not %.9g",
              sets[s / 2].name, int8_fill_name[fill], (long long)t.m, (long long)t.n, (long long)t.k,
              s % 2 ? ", panels" : "",
              (long long)(at / t.n), (long long)(at % t.n), (double)y[at], (double)want[at]);
      }
      free(y), free(want), int8_close(&t);
    }
}

/* ---- rows: division, ties to even, zeros, what is not finite ---- */
static int int8_integer(const int8_set *set, const char *q, int64_t i) {
  if (set->loops->bytes == 2) {
    int16_t x;
    memcpy(&x, q + 2 * i, 2);
    return x;
  }
  return set->offset ? (int)(uint8_t)q[i] - set->offset : (int8_t)q[i];
}
/* x[0] is 127 times an odd scale, and the others lie at most two units beside its halves. 2^-106: remainders of
   division are denormal there. */
static void int8_near_ties(float *x, int n, int row) {
  static const int exponents[] = {-106, -100, -99, 0, 60, 120};
  const int step = row / 8;
  const float mantissa = 1 + ldexpf(step < 6 ? 1 : (float)(common_hash(3, (uint64_t)row) >> 41), -23);
  const float scale = ldexpf(mantissa, exponents[step % 6]);
  for (int i = 0; i < n; i++) {
    int32_t bits;
    x[i] = scale * ((float)i + 0.5f);
    memcpy(&bits, x + i, sizeof bits);
    bits += i % 5 - 2;
    memcpy(x + i, &bits, sizeof bits);
  }
  x[0] = 127 * scale;
}
static void int8_check_rows(void) {
  enum { K = 77 };
  int8_set sets[9];
  const int count = int8_sets(sets);
  float x[K];
  char q[1024];
  for (int row = 0; row < 400; row++) {
    const int kind = row % 8;
    const double size = kind == 5 ? 1e-31 : kind == 6 ? 3e38 : ldexp(1, row % 40 - 20);
    common_fill(x, K, (uint64_t)row + 1, size);
    for (int i = 0; i < K && kind == 1; i++) x[i] = (float)(size * (i % 255 - 127) / 2); /* halves */
    if (kind == 1) x[0] = (float)(127 * size);
    if (kind == 7) int8_near_ties(x, K, row);
    for (int i = 0; i < K && kind == 2; i++) x[i] = 0;
    if (kind == 3) x[row % K] = (float)NAN;
    if (kind == 4) x[row % K] = row % 16 < 8 ? (float)INFINITY : -(float)INFINITY;
    float largest = 0;
    for (int i = 0; i < K; i++) largest = fabsf(x[i]) > largest ? fabsf(x[i]) : largest;
    const bool finite = kind != 3 && kind != 4;
    const float scale = largest < 1e-30f ? 0 : largest / 127, own = li_int8_row_scale(K, x);
    CHECK(finite ? own == scale : own != own, "row %d: the reference's scale is %g, not %g", row, (double)own,
          (double)scale);
    for (int s = 0; s < count; s++) {
      const float got = sets[s].loops->quantize(K, x, q);
      CHECK(finite ? got == scale : got != got, "%s, row %d: scale %g, not %g", sets[s].name, row, (double)got,
            (double)scale);
      for (int i = 0; i < K; i++) {
        const float y = finite && scale > 0 ? x[i] / scale : 0;
        const int want = (int)nearbyint((double)y), is = int8_integer(&sets[s], q, i);
        CHECK(is == want && (!finite || li_int8_of(x[i], scale) == want), "%s, row %d: %.9g / %.9g is %d, not %d",
              sets[s].name, row, (double)x[i], (double)scale, is, want);
      }
    }
  }
}

/* ---- the whole product ---- */
#ifndef __wasm__                     /* it has no threads */
static void int8_check_products(void) {
  static const int64_t sizes[][3] = {{1, 40, 64}, {7, 100, 33}, {16, 33, 48}, {17, 70, 256}, {90, 50, 31}, {33, 1, 20},
                                     {70, 70, 200}};
  int at = 0;
  while (kernels_next_products(&at))
    for (size_t z = 0; z < sizeof sizes / sizeof *sizes; z++)
      for (int mode = 0; mode < 8; mode++) {
        const int64_t m = sizes[z][0], n = sizes[z][1], k = sizes[z][2], c_row = n + 3, first = 2;
        float *x = common_random(m * k, 1, 2), *w = common_random((n + first) * k, 2, 1),
            *bias = common_random(n, 3, 1),
            *residual = common_random(m * c_row, 4, 1), *want = common_random(m * c_row, 5, 1);
        float *y = common_floats(m * c_row);
        void *memory = common_alloc(li_int8_bytes(n + first, k));
        li_int8 *weight = li_int8_place(memory, n + first, k);
        CHECK(li_int8_fill(weight, w), "a weight is not finite");
        li_gemm g;
        memset(&g, 0, sizeof g);
        g.a = x, g.b_int8 = weight, g.b_first = first, g.bias = mode & 1 ? bias : NULL;
        g.m = m, g.n = n, g.k = g.a_row = k, g.a_column = 1, g.c_row = c_row, g.batch[0] = g.batch[1] = 1, g.alpha = 1;
        g.activation = mode & 2 ? LUNA_ACTIVATION_RELU : LI_NO_ACTIVATION;
        g.residual = mode & 4 ? residual : NULL;
        for (int64_t i = 0; i < m; i++)
          for (int64_t j = 0; j < n; j++) {
            const float scale = li_int8_row_scale(k, x + i * k);
            int64_t sum = 0;
            for (int64_t p = 0; p < k; p++) sum += weight->at[(first + j) * k + p] * li_int8_of(x[i * k + p], scale);
            float v = (float)sum * (weight->scale[first + j] * scale);
            if (mode & 1) v += bias[j];
            if (mode & 2) v = v > 0 ? v : 0;
            want[i * c_row + j] = mode & 4 ? v + residual[i * c_row + j] : v;
          }
        for (int way = 0; way < 2 * KERNELS_THREADS; way++) {
          li_parallel parallel = kernels_parallel(kernels_threads[way / 2]);
          kernels_scratch panels = kernels_scratch_open(way % 2 ? li_panels_bytes(kernels, &g) : 0);
          g.b_panels = NULL;
          if (way % 2) li_run_make_panels(kernels, &g, &parallel, panels.at);
          if (way % 2) g.b_panels = (const float *)(const void *)panels.at;
          kernels_scratch scratch = kernels_scratch_open(li_gemm_scratch(kernels, &g, parallel.threads));
          common_fill(y, m * c_row, 5, 1);
          g.c = y;
          li_run_gemm(kernels, &g, &parallel, scratch.at);
          CHECK(memcmp(y, want, (size_t)(m * c_row) * sizeof *y) == 0,
                "%s, %lld x %lld x %lld, mode %d, %lld threads%s: other bits", kernels_name, (long long)m, (long long)n,
                (long long)k, mode, (long long)parallel.threads, way % 2 ? ", panels" : "");
          kernels_scratch_close(&scratch), kernels_scratch_close(&panels);
        }
        free(x), free(w), free(bias), free(residual), free(want), free(y), free(memory);
      }
}
#endif
#endif

int main(void) {
#ifndef LUNA_NO_INT8
  int8_check_sums();
  int8_check_rows();
#ifndef __wasm__
  int8_check_products();
#endif
#endif
  return test_report("int8");
}
