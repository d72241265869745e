/* gemm against a triple loop in double and against the reference: odd sizes, any strides, batches, epilogues; the same
   bits for any number of threads, for a row alone, for a column alone, and from the product that attention and causal
   kernels use; all of it with operands rounded to bfloat16, too. */
#include "test.h"
#define LUNA_IMPLEMENTATION
#include "luna.h"
#include "common.h"
#include "kernels.h"

/* ---- one multiplication: its arguments, its matrices, what C was before and what it must become ---- */
typedef struct trial {
  li_gemm g;
  float *a, *b, *bias, *before;
  int64_t c_size;
  double *want, *want_pre, *scale; /* scale: the sum of |terms|, what an element's error is measured by */
} trial;

/* Random strides: rows, columns or neither dense, a few floats of NaN between rows; an operand may be shared by the
   whole batch. */
static float *operand(int64_t rows, int64_t columns, int64_t b0, int64_t b1, int64_t *row, int64_t *column,
                      int64_t batch[2]) {
  const int64_t layout = pick(4), gap = pick(3), shared = pick(4) == 0;
  *row = layout == 1 ? 1 : layout == 2 ? 2 * columns + gap : columns + gap;
  *column = layout == 1 ? rows + gap : layout == 2 ? 2 : 1;
  const int64_t size = rows > 0 && columns > 0 ? (rows - 1) * *row + (columns - 1) * *column + 1 : 0, step = size + gap;
  batch[0] = shared ? 0 : b1 * step;
  batch[1] = shared ? 0 : step;
  const int64_t all = size == 0 || b0 * b1 == 0 ? 0 : shared ? size : (b0 * b1 - 1) * step + size;
  float *x = zeros(all);
  fill(x, all, (float)NAN);
  kernels_seed++;
  const int64_t matrices = shared && all > 0 ? 1 : b0 * b1;
  for (int64_t p = 0; p < matrices; p++)
    for (int64_t i = 0; i < rows; i++)
      for (int64_t j = 0; j < columns; j++) {
        const uint64_t index = (uint64_t)((p * rows + i) * columns + j);
        x[p * step + i * *row + j * *column] = (float)common_number(kernels_seed, index);
      }
  return x;
}

enum { ALPHA = 1, BIAS = 2, ACCUMULATE = 4, ACTIVATION = 8, PRE = 16, DOTS = 32, ROUNDED = 64, MODES = 128 };
#ifdef LUNA_NO_BF16
#define rounded(x, by) (x)
#else
#define rounded(x, by) ((by) ? li_bf16_of(x) : (x))
#endif

static trial trial_open(int64_t m, int64_t n, int64_t k, int64_t b0, int64_t b1, int mode) {
  trial t;
  memset(&t, 0, sizeof t);
  li_gemm *g = &t.g;
  g->m = m, g->n = n, g->k = k;
  g->batch[0] = b0, g->batch[1] = b1;
  t.a = operand(m, k, b0, b1, &g->a_row, &g->a_column, g->a_batch);
  t.b = operand(k, n, b0, b1, &g->b_row, &g->b_column, g->b_batch);
  t.bias = random_floats(n, 1);
  g->c_row = n + pick(3);
  g->c_batch[1] = m > 0 ? (m - 1) * g->c_row + n : 0;
  g->c_batch[0] = b1 * g->c_batch[1];
  t.c_size = b0 * g->c_batch[0];
  t.before = random_floats(t.c_size, 1);
  g->a = t.a, g->b = t.b;
  g->bias = mode & BIAS ? t.bias : NULL;
  g->alpha = mode & ALPHA ? 0.37f : 1;
  g->accumulate = (mode & ACCUMULATE) != 0;
#ifndef LUNA_NO_BF16
  g->bf16 = (mode & ROUNDED) != 0;
#endif
  g->dots = (mode & DOTS) != 0 && !g->bf16;
  g->activation = mode & ACTIVATION ? (int)pick(LUNA_ACTIVATION_SOFTPLUS2 + 1) : LUNA_ACTIVATION_DEFAULT;
  t.want = doubles(t.c_size), t.want_pre = doubles(t.c_size), t.scale = doubles(t.c_size);
  return t;
}
static void trial_close(trial *t) {
  release(t->a), release(t->b), release(t->bias), release(t->before);
  free(t->want), free(t->want_pre), free(t->scale);
}

static void gemm_reference(trial *t) {
  const li_gemm *g = &t->g;
  for (int64_t i = 0; i < t->c_size; i++) { /* what lies between rows stays */
    t->want[i] = t->want_pre[i] = (double)t->before[i];
    t->scale[i] = -1;
  }
  for (int64_t x = 0; x < g->batch[0]; x++)
    for (int64_t y = 0; y < g->batch[1]; y++)
      for (int64_t i = 0; i < g->m; i++)
        for (int64_t j = 0; j < g->n; j++) {
          const float *a = g->a + x * g->a_batch[0] + y * g->a_batch[1] + i * g->a_row;
          const float *b = g->b + x * g->b_batch[0] + y * g->b_batch[1] + j * g->b_column;
          const int64_t at = x * g->c_batch[0] + y * g->c_batch[1] + i * g->c_row + j;
          double sum = 0, size = 0;
          for (int64_t p = 0; p < g->k; p++) {
            const double term = (double)rounded(a[p * g->a_column], g->bf16) *
                (double)rounded(b[p * g->b_row], g->bf16);
            sum += term, size += fabs(term);
          }
          t->want_pre[at] = (double)g->alpha * sum + (g->bias ? (double)g->bias[j] : 0);
          t->want[at] = naive_activation(g->activation, t->want_pre[at]) + (g->accumulate ? (double)t->before[at] : 0);
          t->scale[at] = size + 2;
        }
}

/* the worst error of an element over the size of its terms; what must not be written counts as 1 when it was */
static double trial_error(const trial *t, const float *c, const double *want) {
  double worst = 0;
  for (int64_t i = 0; i < t->c_size; i++) {
    const double difference = fabs((double)c[i] - want[i]),
        error = t->scale[i] < 0 ? difference > 0 : difference / t->scale[i];
    if (!(error <= worst)) worst = error == error ? error : INFINITY;
  }
  return worst;
}

static void gemm_run(const li_kernels *table, const li_gemm *g, int64_t threads) {
  const li_parallel parallel = kernels_parallel(threads);
  kernels_scratch s = kernels_scratch_open(li_gemm_scratch(table, g, threads));
  li_run_gemm(table, g, threads > 1 ? &parallel : NULL, s.at);
  kernels_scratch_close(&s);
}

/* ---- one row, one column, and the inner product of the other kernels: the same bits ---- */
static void check_alone(const trial *t, const float *c, bool column) {
  li_gemm g = t->g;
  const int64_t i = column ? 0 : pick(g.m), j = column ? pick(g.n) : 0;
  float *own = copied(t->before, t->c_size), *pre = copied(t->before, t->c_size);
  bool equal = true;
  g.batch[0] = g.batch[1] = 1;
  if (column) g.n = 1;
  else g.m = 1;
  g.a += i * g.a_row;
  g.b += j * g.b_column;
  if (g.bias) g.bias += j;
  g.c = own + i * g.c_row + j;
  g.pre = g.pre ? pre + i * g.c_row + j : NULL;
  gemm_run(kernels, &g, 1);
  for (int64_t r = 0; r < g.m; r++) equal = equal && same(g.c + r * g.c_row, c + (i + r) * g.c_row + j, g.n);
  CHECK(equal, "%s: a %s of [%d,%d] x [%d,%d] alone has other bits", kernels_name, column ? "column" : "row",
        (int)t->g.m, (int)g.k,
        (int)g.k, (int)t->g.n);
  release(own), release(pre);
}
static void check_trial(const trial *t, const float *c) {
  const li_gemm *g = &t->g;
  float *panels = zeros(li_panels_size(kernels, g->n, g->k)), *own = copied(t->before, t->c_size);
  const li_matrix a = {g->a, g->m, g->k, g->a_row, g->a_column}, b = {g->b, g->k, g->n, g->b_row, g->b_column};
  li_matmul(kernels, g->alpha, a, b, li_into(own, g->c_row, g->accumulate), panels);
  CHECK(same(own, c, g->c_batch[1]), "%s: product [%d,%d] x [%d,%d] and gemm differ", kernels_name, (int)g->m,
        (int)g->k, (int)g->k,
        (int)g->n);
  release(panels), release(own);
}

static void check(int64_t m, int64_t n, int64_t k, int64_t b0, int64_t b1, int mode) {
  trial t = trial_open(m, n, k, b0, b1, mode);
  float *c = zeros(t.c_size), *pre = zeros(t.c_size), *first = zeros(t.c_size);
  const size_t bytes = (size_t)t.c_size * sizeof(float);
  double error[2];
  gemm_reference(&t);
  t.g.c = c;
  t.g.pre = mode & PRE ? pre : NULL;
  for (int s = 0; s <= KERNELS_THREADS; s++) { /* the last time: the reference */
    memcpy(c, t.before, bytes), memcpy(pre, t.before, bytes);
    gemm_run(s < KERNELS_THREADS ? kernels : li_kernels_of(LUNA_ISA_REFERENCE), &t.g,
        s < KERNELS_THREADS ? kernels_threads[s] : 1);
    if (s == 0) {
      memcpy(first, c, bytes);
      error[0] = trial_error(&t, c, t.want), error[1] = mode & PRE ? trial_error(&t, pre, t.want_pre) : 0;
      CHECK(error[0] <= 5e-7 && error[1] <= 5e-7,
            "%s: [%d,%d] x [%d,%d], batch %d x %d, mode %d, activation %d: error %.3g, of the pre-activation %.3g",
                kernels_name, (int)m,
            (int)k, (int)k, (int)n, (int)b0, (int)b1, mode, t.g.activation, error[0], error[1]);
    } else if (s < KERNELS_THREADS)
      CHECK(same(c, first, t.c_size), "%s: [%d,%d] x [%d,%d], batch %d x %d, mode %d: other bits with %d threads",
            kernels_name, (int)m,
            (int)k, (int)k, (int)n, (int)b0, (int)b1, mode,
            (int)kernels_threads[s]);
  }
  for (int64_t i = 0; i < t.c_size; i++) t.want[i] = (double)first[i];
  error[0] = trial_error(&t, c, t.want);
  CHECK(error[0] <= 8e-7, "%s: [%d,%d] x [%d,%d], mode %d: %.3g from the reference", kernels_name, (int)m, (int)k,
        (int)k, (int)n, mode,
        error[0]);
  if (m > 0 && n > 0 && b0 > 0 && b1 > 0) {
    check_alone(&t, first, false);
    check_alone(&t, first, true);
    if (kernels->panels && !(mode & (BIAS | ACTIVATION | PRE | DOTS | ROUNDED))) check_trial(&t, first);
  }
  release(c), release(pre), release(first), trial_close(&t);
}

/* ---- what is not finite stays in its row and column, and is not lost there ---- */
static void check_not_finite(float odd) {
  enum { M = 37, N = 45, K = 600 };
  li_gemm g;
  float *a = random_floats(M * K, 1), *b = random_floats(K * N, 1), *clean = zeros(M * N), *c = zeros(M * N);
  memset(&g, 0, sizeof g);
  g.a = a, g.b = b, g.c = clean, g.m = M, g.n = N, g.k = K, g.alpha = 1;
  g.a_row = K, g.b_row = g.c_row = N, g.a_column = g.b_column = g.batch[0] = g.batch[1] = 1;
  gemm_run(kernels, &g, 1);
  for (int side = 0; side < 2; side++) {
    float *at = side ? b + 290 * N + 44 : a + 36 * K + 3, was = *at;
    int wrong = 0, lost = 0;
    *at = odd;
    g.c = c;
    gemm_run(kernels, &g, 2);
    for (int64_t i = 0; i < M; i++)
      for (int64_t j = 0; j < N; j++) {
        const bool touched = side ? j == 44 : i == 36;
        wrong += !touched && c[i * N + j] != clean[i * N + j];
        lost += touched && fabs((double)c[i * N + j]) < 1e30;
      }
    CHECK(wrong == 0 && lost == 0, "%s: %g in %s reaches %d elements it should not, and not %d that it should",
          kernels_name, (double)odd,
          side ? "B" : "A", wrong, lost);
    *at = was;
  }
  release(a), release(b), release(clean), release(c);
}

/* random sizes, drawn one after the other, for a call's arguments are evaluated in any order */
typedef struct range { int64_t min, count; } range; /* of `count` sizes; of a batch: the most of either */
static void check_random(int times, range m, range n, range k, range batch, int modes) {
  while (times-- > 0) {
    const int64_t rows = m.min + pick(m.count), columns = n.min + pick(n.count), depth = k.min + pick(k.count);
    const int64_t b0 = 1 + pick(batch.min), b1 = 1 + pick(batch.count);
    check(rows, columns, depth, b0, b1, modes < 0 ? (int)pick(MODES) : modes);
  }
}

int main(void) {
  const range small = {0, 41}, batch = {3, 2}, one = {1, 1};
  const range high = {0, 80}, wide = {0, 300}, deep = {200, 900}, tall = {230, 300}, few = {1, 16}, broad = {1000, 200},
      next = {513, 50};
  const int share = test_full() ? 1 : 3; /* of what is drawn at random */
  for (int at = 0; kernels_next_products(&at);) {
    if (at > COMMON_ISAS) { /* its products in float32 are AVX2's or AVX-512's */
      for (int i = 0; i < 60 / share; i++) check_random(1, small, small, small, batch, (int)pick(MODES) | ROUNDED);
      for (int i = 0; i < 6; i++) check_random(1, i % 2 ? tall : few, i % 2 ? small : broad, deep, one,
                                               (int)pick(MODES) | ROUNDED);
      for (int mode = 0; mode < 4; mode++) check_random(1, high, high, next, one, ACCUMULATE | ROUNDED | 8 * mode);
      continue;
    }
    check_random(300 / share, small, small, small, batch, -1);
    check_random(12 / share, high, wide, deep, one, -1);
    check_random(4 / share, tall, small, deep, one, -1);
    check_random(4 / share, few, broad, wide, one, -1);
    /* no epilogue */
    for (int mode = 0; mode < 8; mode++) check(3 + 30 * mode, 70 - 9 * mode, 130 * (mode % 3), 2, 1, mode & 5);
    for (int mode = 0; mode < 4; mode++) {
      if (!test_full() && (at + mode) % 2) continue;
      check_random(1, tall, high, next, one, ACCUMULATE | ACTIVATION | mode);
      check_random(1, tall, high, next, one, ACCUMULATE | ROUNDED | 8 * mode);
    }
    check(0, 5, 5, 1, 1, 0), check(5, 0, 5, 1, 1, 0), check(5, 7, 0, 2, 2, ALPHA | BIAS | ACTIVATION),
        check(5, 7, 0, 1, 1, ACCUMULATE),
      check(5, 5, 5, 0, 1, 0), check(1, 1, 1, 1, 1, 0);
    check_not_finite((float)NAN), check_not_finite((float)INFINITY), check_not_finite(-(float)INFINITY);
  }
  return test_report("gemm");
}
