/* Products of operands rounded to bfloat16: the rounding of every instruction set against one by candidates, with ties,
   denormals and what is not finite; AVX-512 without its instruction beside the product in double; the folded unpack
   beside the reference; the same bits for any number of threads. tests/kernels/gemm.c has the product of every
   shape. */
#include "test.h"
#define LUNA_IMPLEMENTATION
#include "luna.h"
#include "common.h"
#ifndef __wasm__
#include "kernels.h"
#endif

#if !defined(LUNA_NO_BF16) && !defined(__wasm__)
static void bf16_product(const li_gemm *g, int64_t threads) {
  const li_parallel parallel = kernels_parallel(threads);
  kernels_scratch s = kernels_scratch_open(li_gemm_scratch(kernels, g, threads));
  li_run_gemm(kernels, g, threads > 1 ? &parallel : NULL, s.at);
  kernels_scratch_close(&s);
}
/* C [m,n] = A B; `layout` 1: A lies in columns, 2: B does */
static li_gemm bf16_gemm(int64_t m, int64_t n, int64_t k, const float *a, const float *b, float *c, int layout) {
  li_gemm g;
  memset(&g, 0, sizeof g);
  g.a = a, g.b = b, g.c = c, g.m = m, g.n = g.c_row = n, g.k = k, g.alpha = 1, g.bf16 = true;
  g.a_row = layout & 1 ? 1 : k, g.a_column = layout & 1 ? m : 1;
  g.b_row = layout & 2 ? 1 : n, g.b_column = layout & 2 ? k : 1;
  g.batch[0] = g.batch[1] = 1;
  return g;
}

/* ---- rounding: the nearest of the two floats around x that end in 16 zeros ---- */
static float bf16_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}
static double bf16_want(uint32_t bits) {
  const float x = bf16_float(bits), low = bf16_float(bits & 0xFFFF0000u);
  const uint32_t up = (bits & 0xFFFF0000u) + 0x10000;
  /* the number after the largest one */
  const double high = (up & 0x7FFFFFFF) == 0x7F800000 ? (bits >> 31 ? -ldexp(1, 128) : ldexp(1, 128)) :
      (double)bf16_float(up);
  if ((bits & 0x7F800000) == 0x7F800000) return (double)x;
  if ((bits & 0x7F800000) == 0) return 0;
  const double below = fabs((double)x - (double)low), above = fabs(high - (double)x);
  const bool odd = (bits >> 16 & 1) != 0;
  const double nearest = below < above || (below == above && !odd) ? (double)low : high;
  return fabs(nearest) < ldexp(1, 128) ? nearest : nearest * (double)INFINITY;
}
static void bf16_check_rounding(void) {
  enum { COUNT = 3000 };
  static const uint32_t special[] = {
    0, 0x80000000, 1, 0x80000001, 0x007FFFFF, 0x00800000, 0x00807FFF, 0x00808000, 0x00808001, 0x00818000, 0x3F800000,
    0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001, 0x3FFF8000, 0x3FFFFFFF, 0xBF818000, 0xBF808000, 0x7F7F7FFF,
    0x7F7F8000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7F800001, 0x7FC00000, 0xFFC12345, 0x7FFFFFFF
  };
  enum { SPECIAL = sizeof special / sizeof special[0] };
  float *x = common_floats(COUNT), *y = common_floats(COUNT), one = 1;
  uint32_t bits[COUNT];
  for (int i = 0; i < COUNT; i++) {
    bits[i] = i < SPECIAL ? special[i] : (uint32_t)common_hash(5, (uint64_t)i);
    if (i >= SPECIAL && i % 4 == 0) bits[i] = (bits[i] & 0xFFFF0000u) | 0x8000; /* ties */
    x[i] = bf16_float(bits[i]);
  }
  for (int layout = 0; layout < 4; layout++) {
    const bool left = layout & 1;    /* x is A: COUNT rows of one number, else B's only row */
    const li_gemm g = left ? bf16_gemm(COUNT, 1, 1, x, &one, y, layout & 2 ? 1 : 0) :
        bf16_gemm(1, COUNT, 1, &one, x, y, layout & 2);
    int wrong = -1;
    bf16_product(&g, 1);
    for (int i = 0; i < COUNT && wrong < 0; i++) {
      const double want = bf16_want(bits[i]);
      if (want == want ? (double)y[i] != want : y[i] == y[i]) wrong = i;
    }
    CHECK(wrong < 0, "%s, layout %d: %.9g (0x%08X) is rounded to %.9g, not %.9g", kernels_name, layout,
          (double)x[wrong < 0 ? 0 : wrong], (unsigned)bits[wrong < 0 ? 0 : wrong], (double)y[wrong < 0 ? 0 : wrong],
          bf16_want(bits[wrong < 0 ? 0 : wrong]));
  }
  free(x), free(y);
}

/* ---- the product, beside one in double of rounded numbers ---- */
static void bf16_check_product(int64_t m, int64_t n, int64_t k) {
  float *a = random_floats(m * k, 1), *b = random_floats(k * n, 1), *c = zeros(m * n), *more = zeros(m * n);
  for (int layout = 0; layout < 4; layout++) {
    li_gemm g = bf16_gemm(m, n, k, a, b, c, layout);
    double worst = 0;
    bf16_product(&g, 1);
    for (int64_t i = 0; i < m; i++)
      for (int64_t j = 0; j < n; j++) {
        double sum = 0, size = 2;
        for (int64_t p = 0; p < k; p++) {
          const double term = (double)li_bf16_of(a[i * g.a_row + p * g.a_column]) *
              (double)li_bf16_of(b[p * g.b_row + j * g.b_column]);
          sum += term, size += fabs(term);
        }
        worst = fmax(worst, fabs((double)c[i * n + j] - sum) / size);
      }
    CHECK(worst <= 5e-7, "%s: [%d,%d] x [%d,%d], layout %d: error %.3g", kernels_name, (int)m, (int)k, (int)k, (int)n,
          layout, worst);
    g.c = more;
    bf16_product(&g, 3);
    CHECK(same(c, more, m * n), "%s: [%d,%d] x [%d,%d], layout %d: other bits with 3 threads", kernels_name, (int)m,
          (int)k, (int)k, (int)n, layout);
  }
  release(a), release(b), release(c), release(more);
}
/* panels made once, for a product of them */
static void bf16_check_panels(int64_t m, int64_t n, int64_t k) {
  float *a = random_floats(m * k, 1), *b = random_floats(k * n, 1), *c = zeros(m * n), *by = zeros(m * n);
  li_gemm g = bf16_gemm(m, n, k, a, b, c, 2);
  const li_parallel parallel = kernels_parallel(3);
  kernels_scratch panels = kernels_scratch_open(li_panels_bytes(kernels, &g));
  bf16_product(&g, 1);
  li_run_make_panels(kernels, &g, &parallel, panels.at);
  g.b_panels = (const float *)(const void *)panels.at;
  g.c = by;
  bf16_product(&g, 2);
  CHECK(same(c, by, m * n), "%s: [%d,%d] x [%d,%d]: other bits from panels", kernels_name, (int)m, (int)k, (int)k,
        (int)n);
  kernels_scratch_close(&panels);
  release(a), release(b), release(c), release(by);
}

/* ---- the folded unpack: a product's result, rounded again, may fall on either side of a tie ---- */
typedef struct bf16_unpack { li_unpack u; float *result[7]; int64_t size[7]; } bf16_unpack;
static void bf16_run_unpack(bf16_unpack *t, const li_kernels *table, int64_t threads) {
  const li_parallel parallel = kernels_parallel(threads);
  for (int i = 0; i < 7; i++) fill(t->result[i], t->size[i], 0);
  for (int backward = 0; backward < 2; backward++) {
    kernels_scratch s = kernels_scratch_open(li_unpack_scratch(table, &t->u, threads, backward != 0));
    if (backward) li_run_unpack_backward(table, &t->u, threads > 1 ? &parallel : NULL, s.at);
    else li_run_unpack(table, &t->u, threads > 1 ? &parallel : NULL, s.at);
    kernels_scratch_close(&s);
  }
}
static void bf16_check_unpack(int64_t batch, int64_t rows, int64_t dim, int64_t heads, int64_t slots) {
  const int64_t x = batch * rows * dim, k = batch * heads * slots * dim;
  const int64_t sizes[7] = {x, batch * rows * heads, x, k, batch * heads * slots, k, dim};
  bf16_unpack t;
  li_unpack *u = &t.u;
  float *first[7];
  memset(&t, 0, sizeof t);
  for (int i = 0; i < 7; i++) t.size[i] = sizes[i], t.result[i] = zeros(sizes[i]);
  u->x = random_floats(x, 1), u->k = random_floats(k, 0.2), u->v = random_floats(k, 1);
  u->bias = random_floats(batch * heads * slots, 1), u->grad_out = random_floats(x, 1);
  u->out = t.result[0], u->lse = t.result[1], u->grad_x = t.result[2], u->grad_k = t.result[3];
  u->grad_bias = t.result[4], u->grad_v = t.result[5], u->grad_out_bias = t.result[6];
  u->batch = batch, u->rows = rows, u->dim = dim, u->heads = heads, u->slots = slots;
  for (int run = 0; run < 3; run++) { /* rounded: by the reference, then by the kernels; then as float */
    u->bf16 = run < 2;
    bf16_run_unpack(&t, run ? kernels : li_kernels_of(LUNA_ISA_REFERENCE), 1);
    for (int i = 0; i < 7; i++) {
      const double error = run ? test_error(t.result[i], first[i], (size_t)sizes[i]) : 0;
      if (run == 0) first[i] = copied(t.result[i], sizes[i]);
      if (run == 1) CHECK(error <= 1e-3, "%s: unpack's result %d: error %.3g", kernels_name, i, error);
      if (run == 2 && i != 6)
        CHECK(error > 5e-5, "%s: unpack's result %d is not rounded: %.3g", kernels_name, i, error);
    }
  }
  u->bf16 = true;
  bf16_run_unpack(&t, kernels, 1);
  for (int i = 0; i < 7; i++) memcpy(first[i], t.result[i], (size_t)sizes[i] * sizeof(float));
  bf16_run_unpack(&t, kernels, 3);
  for (int i = 0; i < 7; i++) {
    CHECK(same(first[i], t.result[i], sizes[i]), "%s: unpack's result %d: other bits with 3 threads", kernels_name, i);
    release(first[i]), release(t.result[i]);
  }
  release(u->x), release(u->k), release(u->v), release(u->bias), release(u->grad_out);
}

int main(void) {
  const li_kernels *reference = li_kernels_of(LUNA_ISA_REFERENCE);
  for (int at = 0; kernels_next_products(&at);) {
    bf16_check_rounding();
    bf16_check_product(1, 1, 1), bf16_check_product(5, 33, 7), bf16_check_product(45, 70, 515);
    if (kernels == reference) continue;
    bf16_check_panels(37, 75, 1001), bf16_check_panels(2, 5, 3);
    bf16_check_unpack(2, 600, 40, 3, 11);
  }
  return test_report("bf16");
}
#else
int main(void) { return test_report("bf16"); }
#endif
