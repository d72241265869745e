/* Maps, sums, softmax, layer norm, cross-entropy, the short convolution, dropout and the optimisers' updates of every
   pass against loops in double: all sizes to 70 and some large ones, at odd addresses, in place where that is allowed,
   in pieces where a caller shares them out. How li_each shares them. */
#include "test.h"
#define LUNA_IMPLEMENTATION
#include "luna.h"
#include "common.h"
#include "kernels.h"

/* one check: |got - want| <= tolerance (1 + |want|), element by element */
static void near(const char *what, int64_t n, int64_t count, const float *got, const double *want, double tolerance) {
  double worst = 0;
  for (int64_t i = 0; i < count; i++) {
    const double error = fabs((double)got[i] - want[i]) / (1 + fabs(want[i]));
    if (!(error <= worst)) worst = error == error ? error : INFINITY;
  }
  CHECK(worst <= tolerance, "%s: %s of %d: error %.3g over %.3g", kernels_name, what, (int)n, worst, tolerance);
}
static void equal(const char *what, int64_t n, const float *a, const float *b, int64_t count) {
  CHECK(same(a, b, count), "%s: %s of %d: other bits", kernels_name, what, (int)n);
}

/* ---- maps ---- */
static void check_activations(int64_t n) {
  float *x = random_floats(n, 4), *dy = random_floats(n, 1), *before = random_floats(n, 1);
  double *want = doubles(n);
  for (int kind = LUNA_ACTIVATION_DEFAULT; kind < LUNA_ACTIVATION_COUNT; kind++) {
    /* from here on */
    for (int64_t i = 0; i < n && kind == LUNA_ACTIVATION_LOG; i++) x[i] = 0.1f + (x[i] < 0 ? -x[i] : x[i]);
    float *y = zeros(n), *in_place = copied(x, n), *dx = copied(before, n);
    for (int64_t i = 0; i < n; i++) want[i] = naive_activation(kind, (double)x[i]);
    kernels->activate(kind, n, x, y);
    near("activate", n, n, y, want, 5e-7);
    kernels->activate(kind, n, in_place, in_place);
    equal("activate in place", n, y, in_place, n);
    for (int64_t i = 0; i < n; i++) want[i] = (double)before[i] + (double)dy[i] * naive_slope(kind, (double)x[i]);
    kernels->activate_grad(kind, n, x, dy, true, dx);
    near("activate_grad, added", n, n, dx, want, 5e-7);
    memcpy(dx, dy, (size_t)n * sizeof *dx);
    kernels->activate_grad(kind, n, x, dx, false, dx);
    for (int64_t i = 0; i < n; i++) want[i] = (double)dy[i] * naive_slope(kind, (double)x[i]);
    near("activate_grad in place", n, n, dx, want, 5e-7);
    release(y), release(in_place), release(dx);
  }
  release(x), release(dy), release(before), free(want);
}

enum { ADD, MUL, SCALE, SCALE_ADD, MAPS };
static const char *const map_name[MAPS] = {"add", "mul", "scale", "scale_add"};
static void map_run(const li_kernels *table, int map, int64_t n, const float *a, const float *b, float *y) {
  if (map == ADD) table->add(n, a, b, y);
  if (map == MUL) table->mul(n, a, b, y);
  if (map == SCALE) table->scale(n, 0.3f, a, y);
  if (map == SCALE_ADD) table->scale_add(n, 0.3f, a, y);
}
static double map_exact(int map, double a, double b, double y) {
  const double factor = (double)0.3f;
  return map == ADD ? a + b : map == MUL ? a * b : map == SCALE ? factor * a : y + factor * a;
}
static void check_maps(int64_t n) {
  float *a = random_floats(n, 2), *b = random_floats(n, 2), *before = random_floats(n, 1);
  double *want = doubles(n);
  for (int map = 0; map < MAPS; map++) {
    float *y = copied(before, n), *other = copied(before, n), *left = copied(a, n), *right = copied(b, n);
    map_run(kernels, map, n, a, b, y);
    for (int64_t i = 0; i < n; i++) want[i] = map_exact(map, (double)a[i], (double)b[i], (double)before[i]);
    near(map_name[map], n, n, y, want, 2.5e-7);
    if (map < SCALE_ADD) { /* one rounding: the same bits everywhere; and the result may lie where an argument lies */
      map_run(li_kernels_of(LUNA_ISA_REFERENCE), map, n, a, b, other);
      equal("a map beside the reference", n, y, other, n);
      map_run(kernels, map, n, left, b, left);
      map_run(kernels, map, n, a, right, map == SCALE ? other : right);
      equal("a map in place", n, y, left, n);
      equal("a map in place", n, y, map == SCALE ? other : right, n);
    }
    release(y), release(other), release(left), release(right);
  }
  release(a), release(b), release(before), free(want);
}

/* ---- LUNA_ELEMENTWISE ---- */
static const char *const each_name[] = {
#define NAME(name, tier, reads, cheap, function, inputs, value, da, db, dc) #name,
  LUNA_ELEMENTWISE(NAME)
#undef NAME
};
/* every op, with each input a vector or a single number; some numbers are 0, equal, not finite */
static void check_elementwise(int64_t n) {
  const float odd[6] = {0, -0.0f, 1, (float)INFINITY, -(float)INFINITY, (float)NAN};
  const int inputs[] = {
#define INPUTS(name, tier, reads, cheap, function, inputs, value, da, db, dc) inputs,
    LUNA_ELEMENTWISE(INPUTS)
#undef INPUTS
  };
  const uint64_t seed = kernels_seed;
  float *x[3], *dy = random_floats(n, 1), *before = random_floats(n, 1);
  for (int k = 0; k < 3; k++) x[k] = random_floats(n + 1, 2);
  for (int64_t i = 3; i < n; i += 5) x[0][i] = odd[i % 6], x[i / 5 % 2 ? 1 : 2][i] = odd[i / 5 % 6];
  x[1][0] = -0.5f, x[2][0] = 0.75f;    /* a single low and high */
  for (int kind = LUNA_OP_ADD; kind < LUNA_OP_ADD + (int)(sizeof each_name / sizeof each_name[0]); kind++)
    for (int form = 0; form < 8; form++) {
      const li_elements e = {kind, n, {x[0], x[1], x[2]}, {form & 1 ? 0 : 1, form & 2 ? 0 : 1, form & 4 ? 0 : 1}};
      const int64_t *step = e.step;
      float *y = zeros(n), *other = copied(before, n);
      const char *name = each_name[kind - LUNA_OP_ADD];
      int wrong = 0;
      kernels->elementwise(&e, y);
      for (int64_t i = 0; i < n; i++) {
        const float want = (float)naive_each(kind, (double)x[0][i * step[0]], (double)x[1][i * step[1]],
                                             (double)x[2][i * step[2]]);
        wrong += !(y[i] == want || (y[i] != y[i] && want != want));
      }
      CHECK(wrong == 0, "%s: %s of %d, form %d: %d wrong", kernels_name, name, (int)n, form, wrong);
      for (int input = 0; input < 3; input++) {
        if (!(inputs[kind - LUNA_OP_ADD] >> input & 1)) continue;
        double worst = 0;
        kernels->elementwise_slope(&e, input, dy, y, false);
        memcpy(other, before, (size_t)n * sizeof *other);
        kernels->elementwise_slope(&e, input, dy, other, true);
        for (int64_t i = 0; i < n; i++) {
          const double want = naive_each_slope(kind, input, (double)x[0][i * step[0]], (double)x[1][i * step[1]],
                                         (double)x[2][i * step[2]], (double)dy[i]);
          if (fabs(want) < 1e30 && fabs((double)y[i] - want) / (1 + fabs(want)) > worst)
            worst = fabs((double)y[i] - want) / (1 + fabs(want));
          if (fabs(want) < 1e30 && other[i] != before[i] + y[i]) worst = INFINITY;
        }
        CHECK(worst < 3e-7, "%s: %s of %d, form %d: the gradient of input %d is off by %.3g", kernels_name, name,
              (int)n, form, input, worst);
      }
      release(y), release(other);
    }
  for (int k = 0; k < 3; k++) release(x[k]);
  release(dy), release(before);
  kernels_seed = seed;               /* the other checks' numbers are as without this */
}

/* ---- sums ---- */
static void check_sums(int64_t n, double shift, double tolerance) {
  float *a = random_floats(n, 2), *b = random_floats(n, 2);
  double sum = 0, squares = 0, dot = 0, size = 0, dot_size = 0;
  for (int64_t i = 0; i < n; i++) {
    a[i] = (float)((double)a[i] + shift);
    sum += (double)a[i], size += fabs((double)a[i]), squares += (double)a[i] * (double)a[i];
    dot += (double)a[i] * (double)b[i], dot_size += fabs((double)a[i] * (double)b[i]);
  }
  CHECK(fabs(kernels->sum(n, a) - sum) <= tolerance * size, "%s: sum of %d: %.9g for %.9g", kernels_name, (int)n,
        kernels->sum(n, a), sum);
  CHECK(fabs(kernels->sum_squares(n, a) - squares) <= tolerance * squares, "%s: sum_squares of %d: %.9g for %.9g",
        kernels_name, (int)n,
        kernels->sum_squares(n, a), squares);
  CHECK(fabs((double)kernels->dot(n, a, b) - dot) <= tolerance * dot_size + 6e-8 * fabs(dot),
        "%s: dot of %d: %.9g for %.9g", kernels_name,
        (int)n, (double)kernels->dot(n, a, b), dot);
  release(a), release(b);
}

/* ---- softmax ---- */
static void check_softmax(int64_t rows, int64_t n) {
  const int64_t size = rows * n;
  float *x = random_floats(size, 12), *y = zeros(size), *in_place = copied(x, size), *dy = random_floats(size, 1),
      *dx = random_floats(size, 1);
  double *want = doubles(size);
  /* no score is too large to be compared */
  for (int64_t i = 0; i < n && i < 3; i++) x[i] = in_place[i] = i == 1 ? 300.0f : -300.0f;
  for (int64_t r = 0; r < rows; r++) {
    double max = -INFINITY, sum = 0;
    for (int64_t i = r * n; i < (r + 1) * n; i++) max = fmax(max, (double)x[i]);
    for (int64_t i = r * n; i < (r + 1) * n; i++) sum += want[i] = exp((double)x[i] - max);
    for (int64_t i = r * n; i < (r + 1) * n; i++) want[i] /= sum;
  }
  kernels->softmax(rows, n, x, y);
  near("softmax", n, size, y, want, 5e-7);
  kernels->softmax(rows, n, in_place, in_place);
  equal("softmax in place", n, y, in_place, size);
  for (int64_t r = 0; r < rows; r++) {
    double dot = 0;
    for (int64_t i = r * n; i < (r + 1) * n; i++) dot += (double)y[i] * (double)dy[i];
    for (int64_t i = r * n; i < (r + 1) * n; i++) want[i] = (double)dx[i] + (double)y[i] * ((double)dy[i] - dot);
  }
  kernels->softmax_backward(rows, n, y, dy, dx);
  near("softmax_backward", n, size, dx, want, 5e-7);
  release(x), release(y), release(in_place), release(dy), release(dx), free(want);
}
/* a row of -Inf alone becomes zeros, a NaN or Inf makes its own row NaN and no other */
static void check_softmax_odd(int64_t n) {
  enum { ROWS = 5 };
  float *x = random_floats(ROWS * n, 5), *clean = zeros(ROWS * n), *y = zeros(ROWS * n);
  int wrong = 0;
  kernels->softmax(ROWS, n, x, clean);
  fill(x, n, -(float)INFINITY);
  x[n + n / 2] = (float)NAN;
  x[2 * n + n - 1] = (float)INFINITY;
  kernels->softmax(ROWS, n, x, y);
  for (int64_t i = 0; i < n; i++) wrong += y[i] != 0 || y[n + i] == y[n + i];
  CHECK(wrong == 0 && y[3 * n - 1] != y[3 * n - 1], "%s: softmax of %d with -Inf, NaN and Inf: %d wrong", kernels_name,
        (int)n, wrong);
  equal("softmax beside a NaN", n, y + 3 * n, clean + 3 * n, 2 * n);
  release(x), release(clean), release(y);
}

/* ---- layer norm. back: what its gradient's error may be, for a mean far from 0 leaves few digits of x - mean ---- */
typedef struct normed { double *hat, *rstd; } normed;
static normed norm_exact(int64_t rows, int64_t n, const float *x) {
  normed e;
  e.hat = doubles(rows * n), e.rstd = doubles(rows);
  for (int64_t r = 0; r < rows; r++) {
    double mean = 0, variance = 0;
    for (int64_t i = r * n; i < (r + 1) * n; i++) mean += (double)x[i] / (double)n;
    for (int64_t i = r * n; i < (r + 1) * n; i++) variance += ((double)x[i] - mean) * ((double)x[i] - mean) / (double)n;
    e.rstd[r] = 1 / sqrt(variance + 1e-5);
    for (int64_t i = r * n; i < (r + 1) * n; i++) e.hat[i] = ((double)x[i] - mean) * e.rstd[r];
  }
  return e;
}
static void check_norm_backward(li_layer_norm a, const normed *e, double back) {
  const int64_t rows = a.rows, n = a.n;
  const float *weight = a.weight;
  float *dy = random_floats(rows * n, 1), *dx = random_floats(rows * n, 1);
  double *want = doubles(rows * n);
  for (int64_t r = 0; r < rows; r++) {
    double sum = 0, product = 0;
    for (int64_t i = 0; i < n; i++) {
      const double g = (double)dy[r * n + i] * (weight ? (double)weight[i] : 1);
      sum += g / (double)n, product += g * e->hat[r * n + i] / (double)n;
    }
    for (int64_t i = 0; i < n; i++) {
      const double g = (double)dy[r * n + i] * (weight ? (double)weight[i] : 1);
      want[r * n + i] = (double)dx[r * n + i] + e->rstd[r] * (g - sum - e->hat[r * n + i] * product);
    }
  }
  float *start = copied(dx, rows * n);
  a.dy = dy, a.dx = dx, a.add = true;
  kernels->layer_norm_backward(&a);
  if (n > 2) near("layer_norm_backward", n, rows * n, dx, want, back);
  for (int64_t i = 0; i < rows * n; i++) want[i] -= (double)start[i], dx[i] = (float)NAN;
  a.add = false;
  kernels->layer_norm_backward(&a);
  if (n > 2) near("layer_norm_backward, set", n, rows * n, dx, want, back);
  release(dy), release(dx), release(start), free(want);
}
/* column sums: any split of the columns gives the same bits */
static void check_norm_weights(li_layer_norm a, const normed *e, double back) {
  const int64_t rows = a.rows, n = a.n;
  float *dy = random_floats(rows * n, 1), *dw = random_floats(n, 1), *db = random_floats(n, 1), *dw1 = copied(dw, n),
      *db1 = copied(db, n);
  double *want_w = doubles(n), *want_b = doubles(n);
  const int64_t cut = n / 3, cut2 = (n + 1) / 2;
  for (int64_t i = 0; i < n; i++) {
    want_w[i] = (double)dw[i], want_b[i] = (double)db[i];
    for (int64_t r = 0; r < rows; r++)
      want_w[i] += (double)dy[r * n + i] * e->hat[r * n + i], want_b[i] += (double)dy[r * n + i];
  }
  a.dy = dy, a.dweight = dw, a.dbias = db;
  kernels->layer_norm_weights(&a, 0, n);
  near("layer_norm_weights", n, n, dw, want_w, 2 * back + 2e-8 * (double)rows);
  near("layer_norm_weights, bias", n, n, db, want_b, 1e-6 + 2e-8 * (double)rows);
  a.dweight = dw1, a.dbias = NULL;
  kernels->layer_norm_weights(&a, 0, cut);
  kernels->layer_norm_weights(&a, cut, cut2);
  kernels->layer_norm_weights(&a, cut2, n);
  a.dweight = NULL, a.dbias = db1;
  for (int64_t i = n; i-- > 0;) kernels->layer_norm_weights(&a, i, i + 1);
  equal("layer_norm_weights in pieces", n, dw, dw1, n);
  equal("layer_norm_weights, bias, in pieces", n, db, db1, n);
  release(dy), release(dw), release(db), release(dw1), release(db1), free(want_w), free(want_b);
}
static li_layer_norm norm_of(bool rms, int64_t rows, int64_t n, const float *x, float *y) {
  li_layer_norm a;
  memset(&a, 0, sizeof a);
  a.rms = rms, a.epsilon = 1e-5f, a.rows = rows, a.n = n, a.x = x, a.y = y;
  return a;
}
static void check_norm(int64_t rows, int64_t n, double shift) {
  float *x = random_floats(rows * n, 2), *weight = random_floats(n, 1), *bias = random_floats(n, 1),
      *y = zeros(rows * n), *mean = zeros(rows), *rstd = zeros(rows);
  double *want = doubles(rows * n);
  const double back = shift > 0 ? 1e-3 : 2e-6;
  li_layer_norm a = norm_of(false, rows, n, x, y);
  for (int64_t i = 0; i < rows * n; i++) x[i] = (float)((double)x[i] + shift);
  normed e = norm_exact(rows, n, x);
  for (int without = 3; without >= 0; without--) { /* weight, bias, mean and rstd may be null */
    const float *w = a.weight = without & 1 ? NULL : weight, *b = a.bias = without & 2 ? NULL : bias;
    for (int64_t i = 0; i < rows * n; i++) want[i] = e.hat[i] * (w ? (double)w[i % n] : 1) + (b ? (double)b[i % n] : 0);
    a.mean = without & 1 ? NULL : mean, a.rstd = without & 2 ? NULL : rstd;
    kernels->layer_norm(&a);
    near("layer_norm", n, rows * n, y, want, 1e-6);
  }
  near("layer_norm's rstd", n, n ? rows : 0, rstd, e.rstd, 3e-7);
  check_norm_backward(a, &e, back);
  a.weight = NULL;
  check_norm_backward(a, &e, back);
  check_norm_weights(a, &e, back);
  release(x), release(weight), release(bias), release(y), release(mean), release(rstd), free(want), free(e.hat),
      free(e.rstd);
}
static void check_rms_norm(int64_t rows, int64_t n) {
  const uint64_t seed = kernels_seed;
  float *x = random_floats(rows * n, 2), *weight = random_floats(n, 1), *y = zeros(rows * n),
      *mean = random_floats(rows, 1), *rstd = zeros(rows);
  float *dy = random_floats(rows * n, 1), *dx = random_floats(rows * n, 1), *set = random_floats(rows * n, 1);
  double *want = doubles(rows * n), *slope = doubles(rows * n);
  li_layer_norm a = norm_of(true, rows, n, x, y);
  a.mean = mean, a.rstd = rstd, a.dy = dy;
  for (int with = 0; with < 2; with++) {
    for (int64_t r = 0; r < rows; r++) {
      double squares = 0, moment = 0;
      for (int64_t i = r * n; i < (r + 1) * n; i++) squares += (double)x[i] * (double)x[i] / (double)n;
      squares = 1 / sqrt(squares + 1e-5);
      for (int64_t i = 0; i < n; i++) {
        want[r * n + i] = (double)x[r * n + i] * squares * (with ? (double)weight[i] : 1);
        moment += (double)dy[r * n + i] * want[r * n + i] / (double)n;
      }
      for (int64_t i = 0; i < n; i++)
        slope[r * n + i] = squares * ((double)dy[r * n + i] * (with ? (double)weight[i] : 1) - (double)x[r * n + i] *
                                      squares * moment);
    }
    a.weight = with ? weight : NULL;
    kernels->layer_norm(&a);
    near("rms_norm", n, rows * n, y, want, 5e-7);
    a.dx = set, a.add = false;
    kernels->layer_norm_backward(&a);
    near("rms_norm's gradient", n, rows * n, set, slope, 2e-6);
    for (int64_t i = 0; i < rows * n; i++) slope[i] += (double)dx[i];
    a.dx = dx, a.add = true;
    kernels->layer_norm_backward(&a);
    near("rms_norm's gradient, added", n, rows * n, dx, slope, 2e-6);
  }
  release(x), release(weight), release(y), release(mean), release(rstd), release(dy), release(dx), release(set),
      free(want), free(slope);
  kernels_seed = seed;
}
static void check_sum_rows(int64_t rows, int64_t n) {
  const int64_t stride = n + 3;
  float *x = random_floats(rows * stride, 1), *y = random_floats(n, 1), *pieces = copied(y, n);
  double *want = doubles(n);
  for (int64_t i = 0; i < n; i++) {
    want[i] = (double)y[i];
    for (int64_t r = 0; r < rows; r++) want[i] += (double)0.7f * (double)x[r * stride + i];
  }
  const li_matrix all = li_strided(x, rows, n, stride);
  kernels->sum_rows(all, 0.7f, y);
  near("sum_rows", n, n, y, want, 1e-6 + 2e-8 * (double)rows);
  for (int64_t i = 0; i < n; i += 5)
    kernels->sum_rows(li_columns(all, i, i + 5 < n ? i + 5 : n), 0.7f, pieces + i);
  equal("sum_rows in pieces", n, y, pieces, n);
  release(x), release(y), release(pieces), free(want);
}

/* ---- cross-entropy: every fourth row is ignored ---- */
/* the columns of every row in parts of `width`: near the whole's loss, and its gradient in the logits' place, to its
   bits from the same lse */
static void check_cross_entropy_parts(const li_cross_entropy *whole, int64_t width, const double *want_loss,
                                      const double *want_lse) {
  const int64_t rows = whole->rows, n = whole->classes;
  float *x = zeros(rows * n), *set = zeros(rows * n), *loss = zeros(rows), *lse = zeros(rows);
  li_row_sums *sums = (li_row_sums *)common_alloc((size_t)rows * sizeof *sums);
  li_cross_entropy a = *whole;
  memcpy(x, whole->logits, (size_t)(rows * n) * sizeof *x);
  a.grad = set;
  a.add = false;
  kernels->cross_entropy_backward(&a);
  a.sums = sums;
  a.loss = loss;
  a.lse = lse;
  for (a.first = 0; a.first < n; a.first += width) {
    a.columns = li_min(width, n - a.first);
    a.logits = x + a.first;
    kernels->cross_entropy(&a);
  }
  near("cross_entropy by parts", n, rows, loss, want_loss, 1e-6);
  near("cross_entropy's lse by parts", n, rows, lse, want_lse, 5e-7);
  a.lse = whole->lse;
  for (a.first = 0; a.first < n; a.first += width) {
    a.columns = li_min(width, n - a.first);
    a.logits = x + a.first;
    a.grad = x + a.first;
    kernels->cross_entropy_backward(&a);
  }
  equal("cross_entropy_backward by parts", n, x, set, rows * n);
  release(x), release(set), release(loss), release(lse), free(sums);
}
/* rows without a single finite logit, and a large one after them: by parts as in one; a target on a logit of -Inf is an
   infinite loss, and the gradient finite */
static void check_cross_entropy_odd(double smoothing) {
  const float inf = (float)INFINITY;
  static const int32_t labels[4] = {0, 4, 5, 1};
  const float rows[4][6] = {{-inf, -inf, -inf, -inf, -200, -201}, {-inf, -inf, 3, 3, 90, -inf}, {0, 1, NAN, -inf, 2, 3},
                            {-inf, -inf, -inf, -inf, -inf, -inf}};
  li_cross_entropy a;
  li_row_sums sums[4];
  float loss[2][4], lse[2][4], grad[4][6];
  memset(&a, 0, sizeof a);
  a.labels = labels;
  a.rows = 4;
  a.classes = a.logits_row = a.grad_row = 6;
  a.sums = sums;
  a.smoothing = (float)smoothing, a.factor = 1;
  for (int width = 2; width <= 6; width += 4) {
    a.loss = loss[width == 6];
    a.lse = lse[width == 6];
    for (a.first = 0; a.first < 6; a.first += width) {
      a.columns = width;
      a.logits = rows[0] + a.first;
      kernels->cross_entropy(&a);
    }
  }
  for (int r = 0; r < 4; r++)
    for (int i = 0; i < 2; i++) {
      const double part = (double)(i ? lse : loss)[0][r], whole = (double)(i ? lse : loss)[1][r];
      CHECK(isnan(part) ? isnan(whole) : part == whole || fabs(part - whole) < 1e-6 * fabs(whole),
            "cross_entropy, odd row %d: %g by parts, %g in one", r, part, whole);
    }
  a.first = 0, a.columns = 6, a.logits = rows[0], a.grad = grad[0];
  kernels->cross_entropy_backward(&a);
  for (int r = 0; r < 4; r++) {
    const float want = r == 2 ? NAN : r == 1 && smoothing == 0 ? 0 : inf;
    CHECK(isnan(want) ? isnan(loss[1][r]) : loss[1][r] == want, "%s: smoothing %g, row %d of -Inf: the loss is %g",
          kernels_name, smoothing, r, (double)loss[1][r]);
    for (int j = 0; j < 6 && r != 2; j++) {
      const double target = smoothing / 6 + (j == labels[r] ? 1 - smoothing : 0),
                   p = r == 1 ? j == 4 : r == 0 && j > 3 ? exp(-(double)(j - 4)) / (1 + exp(-1.0)) : 0;
      CHECK(fabs((double)grad[r][j] - p + target) < 1e-6, "%s: smoothing %g, row %d of -Inf: gradient %d is %g, not %g",
            kernels_name, smoothing, r, j, (double)grad[r][j], p - target);
    }
  }
}
static void check_cross_entropy(int64_t rows, int64_t n, double smoothing) {
  const float factor = 0.25f, eps = (float)smoothing;
  float *x = random_floats(rows * n, 6), *loss = zeros(rows), *lse = zeros(rows), *dx = random_floats(rows * n, 1);
  li_cross_entropy a;
  double *want = doubles(rows * n), *want_loss = doubles(rows), *want_lse = doubles(rows);
  int32_t *labels = common_tokens(rows, ++kernels_seed, (int32_t)n);
  for (int64_t r = 0; r < rows; r++) {
    double sum = 0, mean = 0;
    for (int64_t i = r * n; i < (r + 1) * n; i++)
      sum += exp((double)x[i]), mean += (double)x[i] / (double)n, want[i] = (double)dx[i];
    if (r % 4 == 3) labels[r] = -100;
    if (labels[r] < 0) continue;
    want_lse[r] = log(sum);
    want_loss[r] = want_lse[r] - (1 - (double)eps) * (double)x[r * n + labels[r]] - (double)eps * mean;
    for (int64_t i = 0; i < n; i++) {
      const double target = (i == labels[r]) * (1 - (double)eps) + (double)eps / (double)n;
      want[r * n + i] += (double)factor * (exp((double)x[r * n + i] - want_lse[r]) - target);
    }
  }
  memset(&a, 0, sizeof a);
  a.logits = x;
  a.labels = labels;
  a.rows = rows;
  a.classes = a.columns = a.logits_row = a.grad_row = n;
  a.smoothing = eps;
  a.factor = factor;
  a.loss = loss;
  kernels->cross_entropy(&a);
  near("cross_entropy", n, rows, loss, want_loss, 1e-6);
  a.lse = lse;
  kernels->cross_entropy(&a);
  near("cross_entropy's lse", n, rows, lse, want_lse, 5e-7);
  a.grad = dx;
  a.add = true;
  kernels->cross_entropy_backward(&a);
  near("cross_entropy_backward", n, rows * n, dx, want, 1e-6);
  for (int64_t width = 1; width < 2 * n; width = 3 * width + 1)
    check_cross_entropy_parts(&a, width, want_loss, want_lse);
  release(x), release(loss), release(lse), release(dx), free(labels), free(want), free(want_loss), free(want_lse);
}

/* ---- the short convolution ---- */
static void check_convolution_forward(const li_convolution *c) {
  const int64_t rows = c->rows, n = c->n, width = c->width, cut = rows / 2;
  float *y = zeros(rows * n), *z = zeros(rows * n), *later = zeros((width - 1) * n);
  double *want = doubles(rows * n);
  for (int64_t t = 0; t < rows; t++)
    for (int64_t ch = 0; ch < n; ch++) {
      double sum = c->bias ? (double)c->bias[ch] : 0;
      for (int64_t i = 0; i < width; i++) {
        const int64_t from = t - width + 1 + i;
        const float *past = from >= 0 ? c->x + from * n : c->history ? c->history + (from + width - 1) * n : NULL;
        if (past) sum += (double)c->weight[ch * width + i] * (double)past[ch];
      }
      want[t * n + ch] = sum;
    }
  li_convolution a = *c;
  a.y = y;
  kernels->short_convolution(&a);
  near("short_convolution", n, rows * n, y, want, 1e-6);
  /* in two pieces, the second with the first's end as its history: the same bits */
  if (c->history && n > 0 && rows > 0) {
    for (int64_t t = 0; t < width - 1; t++) {
      const int64_t from = cut - width + 1 + t;
      memcpy(later + t * n, from >= 0 ? c->x + from * n : c->history + (from + width - 1) * n,
             (size_t)n * sizeof(float));
    }
    a.rows = cut, a.y = z;
    kernels->short_convolution(&a);
    a.rows = rows - cut, a.x = c->x + cut * n, a.history = later, a.y = z + cut * n;
    kernels->short_convolution(&a);
    equal("short_convolution in pieces", n, y, z, rows * n);
  }
  float *odd = copied(c->x, rows * n);
  for (int64_t i = cut * n; i < rows * n; i++) odd[i] = i % 3 ? (float)NAN : (float)INFINITY;
  a = *c, a.x = odd, a.y = z;
  kernels->short_convolution(&a);
  equal("short_convolution before a NaN", n, y, z, cut * n);
  release(y), release(z), release(later), release(odd), free(want);
}
static void check_convolution_backward(const li_convolution *c) {
  const int64_t rows = c->rows, n = c->n, width = c->width;
  float *dy = random_floats(rows * n, 1), *dx = random_floats(rows * n, 1), *dw = random_floats(n * width, 1),
      *db = random_floats(n, 1), *dw1 = copied(dw, n * width),
    *db1 = copied(db, n);
  double *want_x = doubles(rows * n), *want_w = doubles(n * width), *want_b = doubles(n);
  for (int64_t i = 0; i < rows * n; i++) want_x[i] = (double)dx[i];
  for (int64_t i = 0; i < n * width; i++) want_w[i] = (double)dw[i];
  for (int64_t ch = 0; ch < n; ch++) {
    want_b[ch] = (double)db[ch];
    for (int64_t t = 0; t < rows; t++) {
      want_b[ch] += (double)dy[t * n + ch];
      for (int64_t i = 0; i < width; i++) {
        const int64_t from = t - width + 1 + i;
        if (from < 0) continue;
        want_x[from * n + ch] += (double)c->weight[ch * width + i] * (double)dy[t * n + ch];
        want_w[ch * width + i] += (double)dy[t * n + ch] * (double)c->x[from * n + ch];
      }
    }
  }
  li_convolution a = *c;
  a.dy = dy, a.dx = dx, a.dweight = dw, a.dbias = db;
  kernels->short_convolution_backward(&a);
  near("short_convolution_backward", n, rows * n, dx, want_x, 1e-6);
  kernels->short_convolution_weights(&a, 0, n);
  near("short_convolution_weights", n, n * width, dw, want_w, 1e-6 + 3e-8 * (double)rows);
  near("short_convolution_weights, bias", n, n, db, want_b, 1e-6 + 3e-8 * (double)rows);
  for (int64_t i = 0; i < n; i += 3) {
    a.dweight = dw1, a.dbias = NULL;
    kernels->short_convolution_weights(&a, i, i + 3 < n ? i + 3 : n);
    a.dweight = NULL, a.dbias = db1;
    kernels->short_convolution_weights(&a, i, i + 3 < n ? i + 3 : n);
  }
  equal("short_convolution_weights in pieces", n, dw, dw1, n * width);
  equal("short_convolution_weights, bias, in pieces", n, db, db1, n);
  release(dy), release(dx), release(dw), release(db), release(dw1), release(db1), free(want_x), free(want_w),
      free(want_b);
}
static void check_convolution(int64_t rows, int64_t n, int64_t width, bool history, bool bias) {
  li_convolution c;
  c.rows = rows, c.n = n, c.width = width;
  c.x = random_floats(rows * n, 1), c.weight = random_floats(n * width, 1);
  c.history = history ? random_floats((width - 1) * n, 1) : NULL;
  c.bias = bias ? random_floats(n, 1) : NULL;
  check_convolution_forward(&c);
  check_convolution_backward(&c);
  release(c.x), release(c.weight);
  if (history) release(c.history);
  if (bias) release(c.bias);
}

/* ---- dropout: the rule of Philox, bit for bit; a NaN that is dropped is gone ---- */
static void check_dropout(int64_t first, int64_t n, double probability) {
  li_dropout d = {0};
  float *x = random_floats(n, 1), *y = zeros(n), *in_place = copied(x, n), *sum = random_floats(n, 1),
      *before = copied(sum, n);
  bool good = true, added = true, gone = true;
  d.seed = 0x123456789ABCDEFu, d.op = 7, d.step = 99;
  d.threshold = (uint32_t)(65536 * probability + 0.5);
  d.keep = (float)(1 / (1 - probability));
  kernels->dropout(&d, first, n, x, y, false);
  kernels->dropout(&d, first, n, in_place, in_place, false);
  kernels->dropout(&d, first, n, x, sum, true);
  for (int64_t i = 0; i < n; i++) {
    const float kept = (float)(d.threshold ? exact_dropout(&d, first + i) : (double)d.keep),
        want = kept > 0 ? x[i] * kept : 0;
    good = good && y[i] == want;
    added = added && sum[i] == before[i] + want;
  }
  fill(x, n, (float)NAN);
  kernels->dropout(&d, first, n, x, in_place, false);
  for (int64_t i = 0; i < n; i++) gone = gone && (y[i] == 0) == (in_place[i] == 0);
  CHECK(good, "%s: dropout of %d", kernels_name, (int)n);
  CHECK(added, "%s: dropout that adds, of %d", kernels_name, (int)n);
  CHECK(gone, "%s: dropout of %d NaNs", kernels_name, (int)n);
  release(x), release(y), release(in_place), release(sum), release(before);
}

/* ---- optimisers, each four steps ---- */
enum { UPDATE_SGD, UPDATE_MOMENTUM, UPDATE_NESTEROV, UPDATE_ADAMW, UPDATE_ADAM, UPDATES };
static void update_exact(const li_update *u, int kind, int64_t i, double *value, double *moment[2]) {
  double g = (double)u->factor * (double)u->grad[i], *first = &moment[0][i], *second = &moment[1][i];
  if (kind != UPDATE_ADAMW) g += (double)u->decay * *value;
  if (kind >= UPDATE_ADAMW) {
    *first = (double)u->beta1 * *first + (1 - (double)u->beta1) * g;
    *second = (double)u->beta2 * *second + (1 - (double)u->beta2) * g * g;
    if (kind == UPDATE_ADAMW) *value -= (double)u->lr * (double)u->decay * *value;
    *value -= (double)u->lr * (*first / (double)u->correction1) /
        (sqrt(*second / (double)u->correction2) + (double)u->epsilon);
    return;
  }
  if (kind != UPDATE_SGD) {
    *first = (double)u->momentum * *first + g;
    g = kind == UPDATE_NESTEROV ? g + (double)u->momentum * *first : *first;
  }
  *value -= (double)u->lr * g;
}
static void check_updates(int64_t n) {
  for (int kind = 0; kind < UPDATES; kind++) {
    static const char *const names[UPDATES] = {"sgd", "sgd with momentum", "sgd of Nesterov", "adamw", "adam"};
    static const int moments[UPDATES] = {0, 1, 1, 2, 2};
    li_update u;
    double *value = doubles(n), *moment[2] = {doubles(n), doubles(n)};
    memset(&u, 0, sizeof u);
    u.value = random_floats(n, 1), u.grad = zeros(n);
    for (int k = 0; k < moments[kind]; k++) u.moment[k] = zeros(n);
    u.count = n, u.lr = 0.1f, u.decay = 0.01f, u.factor = 0.5f, u.epsilon = 1e-8f;
    u.momentum = kind ? 0.9f : 0, u.nesterov = kind == UPDATE_NESTEROV, u.coupled = kind == UPDATE_ADAM, u.beta1 = 0.9f,
        u.beta2 = 0.99f;
    for (int64_t i = 0; i < n; i++) value[i] = (double)u.value[i];
    for (int step = 1; step <= 4; step++) {
      bool zeroed = true;
      u.correction1 = (float)(1 - pow((double)u.beta1, step)), u.correction2 = (float)(1 - pow((double)u.beta2, step));
      common_fill(u.grad, n, ++kernels_seed, 1);
      for (int64_t i = 0; i < n; i++) update_exact(&u, kind, i, &value[i], moment);
      (kind >= UPDATE_ADAMW ? kernels->adam : kernels->sgd)(&u);
      near(names[kind], n, n, u.value, value, 2e-6);
      for (int64_t i = 0; i < n; i++) zeroed = zeroed && u.grad[i] == 0;
      CHECK(zeroed, "%s: %d gradients are not zeroed", kernels_name, (int)n);
    }
    release(u.value), release(u.grad), free(value);
    for (int k = 0; k < 2; k++) {
      free(moment[k]);
      if (u.moment[k]) release(u.moment[k]);
    }
  }
}

/* ---- li_each: every piece once, by whichever threads come first ---- */
enum { MOST_PIECES = 200 };
typedef struct tally {
  int64_t pieces, threads;
  int times[MOST_PIECES];
  int outside;                       /* pieces or threads that do not exist, and empty calls */
} tally;
static void tally_task(void *work, int64_t thread, int64_t first, int64_t last) {
  tally *t = (tally *)work;
  if (thread < 0 || thread >= t->threads || first < 0 || first >= last || last > t->pieces) {
    t->outside++;
    return;
  }
  for (int64_t i = first; i < last; i++) t->times[i]++;
}
/* the last thread comes first: it finds its own share, then all others' */
static void last_first(void *user, int64_t count, void (*task)(void *work, int64_t index), void *work) {
  *(int64_t *)user = count;
  while (count-- > 0) task(work, count);
}
static void check_each(int64_t pieces, int64_t threads) {
  int64_t tasks = 1;
  const li_parallel parallel = {last_first, &tasks, threads};
  tally t = {pieces, threads, {0}, 0};
  int wrong = 0;
  li_each(&parallel, pieces, tally_task, &t);
  for (int64_t i = 0; i < pieces; i++) wrong += t.times[i] != 1;
  CHECK(wrong == 0 && t.outside == 0 && tasks <= threads && tasks <= (pieces > 1 ? pieces : 1),
        "%d pieces by %d threads: %d not done once, %d calls outside, %d tasks", (int)pieces, (int)threads, wrong,
        t.outside, (int)tasks);
}

static void check_small(int64_t n) {
  check_activations(n), check_maps(n), check_elementwise(n), check_sums(n, 0, 3e-7), check_softmax(4, n),
      check_norm(5, n, 0), check_rms_norm(5, n), check_sum_rows(5, n),
    check_updates(n);
  if (n > 0) check_softmax_odd(n), check_cross_entropy(9, n, 0), check_cross_entropy(9, n, 0.1);
  check_convolution(n % 9, n, n % 5 + 1, n % 2 != 0, n % 3 != 0);
  check_dropout(n * 13, n, 0.1), check_dropout(n, n, 0), check_dropout(n, n, 0.5);
}

int main(void) {
  const uint32_t zero[4] = {0, 0, 0, 0};
  uint32_t word[4];
  luna_philox(zero, 0, word);
  CHECK(word[0] == 0x6627E8D5u && word[1] == 0xE169C58Du && word[2] == 0xBC57AC4Cu && word[3] == 0x9B00DBD8u,
        "Philox of zeros gives %08x ...", (unsigned)word[0]);
  for (int64_t threads = 1; threads <= 40; threads++)
    for (int64_t pieces = 0; pieces <= MOST_PIECES; pieces++) check_each(pieces, threads);
  for (int at = 0; kernels_next(&at);) {
    for (int64_t n = 0; n <= 70; n++) check_small(n);
    for (int i = 0; i < 3; i++) check_cross_entropy_odd(i / 2.0);
    check_activations(5000), check_maps(5000), check_softmax(2, 5000), check_cross_entropy(3, 20000, 0.1);
    check_norm(700, 133, 0), check_norm(3, 1000, 0), check_norm(3, 300, 1000), check_norm(0, 5, 0),
        check_norm(1, 4000, 30);
    check_sums(1000000, 0, 2e-7), check_sums(1000000, 1000, 2e-7), check_sum_rows(100000, 20);
    for (int64_t width = 1; width < 20; width++) {
      check_convolution(50, 37, width, true, true);
      check_convolution(width, 70, 9, false, true);
      check_convolution(3, 5, width, width % 2 != 0, false);
    }
    check_convolution(600, 200, 4, false, true), check_convolution(0, 10, 4, true, true);
    check_dropout(((int64_t)1 << 36) - 77, 2000, 0.3);
  }
  return test_report("elementwise");
}
