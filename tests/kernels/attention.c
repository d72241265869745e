/* Softmax attention and the folded unpack, forward and backward, against loops in double and the reference: odd sizes,
   strides, lengths with NaN behind them, causal, dropout, shared operands. The same bits for any number of threads,
   ragged or alone, however many queries there are; a query's past is never touched by what comes after it. */
#include "test.h"
#define LUNA_IMPLEMENTATION
#include "luna.h"
#include "common.h"
#include "kernels.h"

static char sentence[200]; /* what is being tried */

/* ---- the reference, one query of one head at a time ---- */
enum { OUT, LSE, SUMS, GRAD_Q, GRAD_K, GRAD_V };
/* the keys it sees; where it begins in each array */
typedef struct line { int64_t keys, q, k, v, out, row, element; } line;

static line line_of(const li_attention *a, int64_t b, int64_t h, int64_t i) {
  const int64_t query = a->query_offsets ? a->query_offsets[b] : 0, key = a->key_offsets ? a->key_offsets[b] : 0;
  line at;
  at.keys = a->key_offsets ? a->key_offsets[b + 1] - key : a->keys;
  if (a->lengths && a->lengths[b] < at.keys) at.keys = a->lengths[b];
  const int64_t first = i > a->left ? i - a->left : 0, last = i + 1 + a->right;
  if (last < at.keys) at.keys = last;
  at.q = (a->query_offsets ? query * a->q_row : b * a->q_batch) + i * a->q_row + h * a->q_head;
  at.out = (a->query_offsets ? query * a->out_row : b * a->out_batch) + i * a->out_row + h * a->out_head;
  at.k = (a->key_offsets ? key * a->k_row : b * a->k_batch) + h * a->k_head;
  at.v = (a->key_offsets ? key * a->v_row : b * a->v_batch) + h * a->v_head;
  at.row = ((a->query_offsets ? query : b * a->queries) + i) * a->heads + h;
  at.element = ((b * a->heads + h) * a->queries + i) * a->keys + first;
  at.k += first * a->k_row, at.v += first * a->v_row;
  at.keys = at.keys > first ? at.keys - first : 0;
  return at;
}
static void reference_line(const li_attention *a, line at, double **want, double *p, double *dp) {
  const li_dropout dropout = li_attention_dropout(a);
  double kept = 0, mean = 0;
  for (int64_t j = 0; j < at.keys; j++)
    p[j] = (double)a->scale * naive_dot(a->q + at.q, a->k + at.k + j * a->k_row, a->head_dim);
  want[LSE][at.row] = naive_softmax(p, at.keys);
  if (at.keys == 0) want[LSE][at.row] = -(double)INFINITY;
  for (int64_t c = 0; c < a->value_dim; c++) want[OUT][at.out + c] = 0;
  for (int64_t j = 0; j < at.keys; j++) {
    const double keep = exact_dropout(&dropout, at.element + j),
        g = naive_dot(a->grad_out + at.out, a->v + at.v + j * a->v_row, a->value_dim);
    for (int64_t c = 0; c < a->value_dim; c++) {
      want[OUT][at.out + c] += p[j] * keep * (double)a->v[at.v + j * a->v_row + c];
      want[GRAD_V][at.v + j * a->v_row + c] += p[j] * keep * (double)a->grad_out[at.out + c];
    }
    dp[j] = keep * (g + (double)a->grad_sums[at.row]);
    kept += p[j] * keep, mean += p[j] * dp[j];
  }
  want[SUMS][at.row] = kept;
  for (int64_t j = 0; j < at.keys; j++)
    for (int64_t c = 0; c < a->head_dim; c++) {
      const double ds = p[j] * (dp[j] - mean) * (double)a->scale;
      want[GRAD_Q][at.q + c] += ds * (double)a->k[at.k + j * a->k_row + c];
      want[GRAD_K][at.k + j * a->k_row + c] += ds * (double)a->q[at.q + c];
    }
}
static void reference(const li_attention *a, double **want) {
  double *p = doubles(a->keys), *dp = doubles(a->keys);
  for (int64_t b = 0; b < a->batch; b++)
    for (int64_t h = 0; h < a->heads; h++)
      for (int64_t i = 0; i < a->queries; i++) reference_line(a, line_of(a, b, h, i), want, p, dp);
  free(p), free(dp);
}

static void run_pass(const li_attention *a, const li_kernels *table, int64_t threads, bool backward) {
  const li_parallel parallel = kernels_parallel(threads);
  kernels_scratch s = kernels_scratch_open(li_attention_scratch(table, a, threads, backward));
  if (backward) li_run_attention_backward(table, a, &parallel, s.at);
  else li_run_attention(table, a, &parallel, s.at);
  kernels_scratch_close(&s);
}
static void run(const void *call, const li_kernels *table, int64_t threads) {
  run_pass((const li_attention *)call, table, threads, false);
  run_pass((const li_attention *)call, table, threads, true);
}

/* ---- one call: STRIDED has q as [batch, heads, queries, dim] and gaps in the others, ALIAS one array for keys and
   values ---- */
enum { CAUSAL = 1, LENGTHS = 2, DROPOUT = 4, SHARED_Q = 8, SHARED_KV = 16, STRIDED = 32, ALIAS = 64, WINDOW = 128 };
typedef struct shape { int64_t batch, heads, queries, keys, dim, value_dim; int flags; } shape;
typedef struct band { int64_t left, right; } band;        /* of WINDOW */
static const band no_band = {0, 0};
typedef struct arrays { float *q, *k, *v, *grad_out, *grad_sums; int32_t *lengths; int64_t sizes[4]; } arrays;

static li_attention attention_of(const shape *s, band window) {
  const int64_t h = s->heads, gap = s->flags & STRIDED ? 3 : 0;
  li_attention a;
  memset(&a, 0, sizeof a);
  a.batch = s->batch, a.heads = h, a.queries = s->queries, a.keys = s->keys, a.head_dim = s->dim,
      a.value_dim = s->value_dim;
  a.causal = (s->flags & CAUSAL) != 0;
  a.window = (s->flags & WINDOW) != 0, a.left = window.left, a.right = window.right;
  li_attention_band(&a);
  a.scale = s->dim > 0 ? (float)(1 / sqrt((double)s->dim)) : 1;
  a.q_head = gap ? s->dim * s->queries : s->dim, a.q_row = gap ? s->dim : h * s->dim,
      a.q_batch = h * s->queries * s->dim + gap;
  a.k_head = s->dim, a.k_row = h * s->dim + gap, a.k_batch = s->keys * a.k_row;
  a.v_head = s->value_dim, a.v_row = h * s->value_dim + gap, a.v_batch = s->keys * a.v_row;
  a.out_head = s->value_dim, a.out_row = h * s->value_dim + gap, a.out_batch = s->queries * a.out_row;
  if (s->flags & DROPOUT) a.dropout = 0.25f, a.seed = 77, a.dropout_op = 3, a.step = 9;
  return a;
}
/* what keys a row has not is NaN: to read one would show */
static void hide_keys(const li_attention *a, float *x, int64_t batch, int64_t row, int64_t width) {
  for (int64_t b = 0; b < a->batch && batch > 0; b++)
    for (int64_t j = a->lengths[b]; j < a->keys; j++) fill(x + b * batch + j * row, width, (float)NAN);
}
static arrays arrays_of(li_attention *a, int flags) {
  arrays x;
  const int64_t rows = a->batch * a->queries * a->heads;
  if (flags & SHARED_Q) a->q_batch = 0;
  if (flags & SHARED_KV) a->k_batch = a->v_batch = 0;
  x.sizes[0] = flags & SHARED_Q ? a->heads * a->queries * a->head_dim : a->batch * a->q_batch;
  x.sizes[1] = flags & SHARED_KV ? a->keys * a->k_row : a->batch * a->k_batch;
  x.sizes[2] = flags & SHARED_KV ? a->keys * a->v_row : a->batch * a->v_batch;
  x.sizes[3] = a->batch * a->out_batch;
  a->q = x.q = random_floats(x.sizes[0], 2);
  a->k = x.k = random_floats(x.sizes[1], 2);
  x.v = flags & ALIAS ? x.k : random_floats(x.sizes[2], 1);
  a->v = x.v;
  a->grad_out = x.grad_out = random_floats(x.sizes[3], 1);
  a->grad_sums = x.grad_sums = random_floats(rows, 1);
  x.lengths = (int32_t *)common_alloc((size_t)a->batch * sizeof(int32_t));
  for (int64_t b = 0; b < a->batch; b++) x.lengths[b] = b == 1 ? 0 : (int32_t)(a->keys - b * 37 % (a->keys + 1));
  if (flags & LENGTHS) {
    a->lengths = x.lengths;
    hide_keys(a, x.k, a->k_batch, a->k_row, a->heads * a->head_dim);
    hide_keys(a, x.v, a->v_batch, a->v_row, a->heads * a->value_dim);
  }
  return x;
}
static void arrays_close(const arrays *x) {
  if (x->v != x->k) release(x->v);
  release(x->q), release(x->k), release(x->grad_out), release(x->grad_sums), free(x->lengths);
}
static outputs outputs_of(li_attention *a, const arrays *x) {
  const int64_t rows = a->batch * a->queries * a->heads;
  outputs o;
  memset(&o, 0, sizeof o);
  a->out = outputs_add(&o, "out", false, x->sizes[3]);
  a->log_sum_exp = outputs_add(&o, "log-sum-exp", false, rows);
  a->sums = outputs_add(&o, "sums", false, rows);
  a->grad_q = outputs_add(&o, "grad_q", true, x->sizes[0]);
  a->grad_k = outputs_add(&o, "grad_k", true, x->sizes[1]);
  a->grad_v = x->v == x->k ? a->grad_k : outputs_add(&o, "grad_v", true, x->sizes[2]);
  return o;
}
static void check_attention(const shape *s, band window) {
  li_attention a = attention_of(s, window);
  const arrays x = arrays_of(&a, s->flags);
  outputs o = outputs_of(&a, &x);
  if (x.v == x.k) o.want[GRAD_V] = o.want[GRAD_K];
  reference(&a, o.want);
  snprintf(sentence, sizeof sentence, "batch %d, heads %d, queries %d, keys %d, dim %d, %d, flags %d", (int)s->batch,
           (int)s->heads,
           (int)s->queries, (int)s->keys, (int)s->dim,
           (int)s->value_dim, s->flags);
  outputs_check(&o, sentence, run, &a);
  outputs_close(&o), arrays_close(&x);
}

/* ---- ragged sequences are each alone, bit for bit ---- */
static void check_ragged(int flags, int64_t threads) {
  enum { COUNT = 5, HEADS = 2, DIM = 24, VALUE = 20, Q = HEADS * DIM, V = HEADS * VALUE };
  const int32_t queries[COUNT] = {70, 0, 300, 16, 600}, keys[COUNT] = {130, 20, 700, 1100, 600};
  int32_t q_at[COUNT + 1] = {0}, k_at[COUNT + 1] = {0};
  const bool causal = flags & CAUSAL;
  const shape s = {COUNT, HEADS, 600, 1100, DIM, VALUE, flags};
  const band window = {45, 60};
  li_attention a = attention_of(&s, window);
  for (int b = 0; b < COUNT; b++)
    q_at[b + 1] = q_at[b] + queries[b], k_at[b + 1] = k_at[b] + (causal ? queries[b] : keys[b]);
  const int64_t n = q_at[COUNT], m = k_at[COUNT];
  float *q = random_floats(n * Q, 2), *k = random_floats(m * Q, 2), *v = random_floats(m * V, 1),
      *grad_out = random_floats(n * V, 1);
  const int64_t sizes[5] = {n * V, n * HEADS, n * Q, m * Q, m * V};
  float *ragged[5], *alone[5];
  for (int i = 0; i < 5; i++) ragged[i] = zeros(sizes[i]), alone[i] = zeros(sizes[i]);
  a.q = q, a.k = k, a.v = v, a.grad_out = grad_out, a.query_offsets = q_at, a.key_offsets = k_at;
  a.out = ragged[0], a.log_sum_exp = ragged[1], a.grad_q = ragged[2], a.grad_k = ragged[3], a.grad_v = ragged[4];
  run(&a, kernels, threads);
  for (int b = 0; b < COUNT; b++) {
    li_attention one = a;
    one.query_offsets = one.key_offsets = NULL, one.batch = 1, one.queries = q_at[b + 1] - q_at[b],
        one.keys = k_at[b + 1] - k_at[b];
    one.q += q_at[b] * Q, one.k += k_at[b] * Q, one.v += k_at[b] * V, one.grad_out += q_at[b] * V;
    one.out = alone[0] + q_at[b] * V, one.log_sum_exp = alone[1] + q_at[b] * HEADS, one.grad_q = alone[2] + q_at[b] * Q;
    one.grad_k = alone[3] + k_at[b] * Q, one.grad_v = alone[4] + k_at[b] * V;
    run(&one, kernels, 1 + threads % 3);
  }
  for (int i = 0; i < 5; i++)
    CHECK(same(ragged[i], alone[i], sizes[i]), "%s: ragged%s, %d threads: array %d has other bits than each alone",
                                    kernels_name, causal ? ", causal" : flags ? ", of a window" : "", (int)threads, i);
  for (int i = 0; i < 5; i++) release(ragged[i]), release(alone[i]);
  release(q), release(k), release(v), release(grad_out);
}

/* ---- a query's bits do not depend on how many there are ---- */
static void check_prefix(int64_t keys, bool dropout) {
  const int64_t counts[] = {1, 3, 16, 40, 64, 65, 200, 700};
  /* a dropped element's number counts queries: one head */
  shape s = {1, dropout ? 1 : 2, 1200, keys, 24, 24, dropout ? DROPOUT : 0};
  li_attention a = attention_of(&s, no_band);
  const arrays x = arrays_of(&a, s.flags);
  outputs all = outputs_of(&a, &x), some;
  a.grad_k = a.grad_v = NULL;
  run(&a, kernels, 1);
  for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
    a.queries = counts[i];
    some = outputs_of(&a, &x);
    a.grad_k = a.grad_v = NULL;
    run(&a, kernels, 1 + (int64_t)i);
    for (int r = OUT; r <= GRAD_Q; r++)
      CHECK(same(some.got[r], all.got[r], counts[i] * (r == LSE || r == SUMS ? s.heads : s.heads * 24)),
            "%s: %d of 1200 queries, %d keys: %s has other bits", kernels_name, (int)counts[i],
            (int)keys, all.name[r]);
    outputs_close(&some);
  }
  outputs_close(&all), arrays_close(&x);
}

/* ---- causal is exact: what is at row t never reaches a row before it, and a NaN is not lost after it ---- */
static void check_causality(int64_t n, int64_t t, float odd, int64_t threads) {
  enum { HEADS = 2, DIM = 17, VALUE = 19, Q = HEADS * DIM, V = HEADS * VALUE };
  const shape s = {1, HEADS, n, n, DIM, VALUE, CAUSAL};
  li_attention a = attention_of(&s, no_band);
  const arrays x = arrays_of(&a, s.flags);
  float *clean = zeros(n * V), *out = zeros(n * V);
  a.out = clean;
  run_pass(&a, kernels, 1, false);
  for (int which = 0; which < 2; which++) { /* a value; then query and key too */
    int64_t bad = 0;
    fill(x.v + t * V, V, odd);
    if (which) fill(x.q + t * Q, Q, odd), fill(x.k + t * Q, Q, odd);
    a.out = out;
    run_pass(&a, kernels, threads, false);
    for (int64_t i = t * V; i < n * V; i++) bad += !(fabs((double)out[i]) < 1e30);
    CHECK(same(out, clean, t * V), "%s: %g at row %d of %d reaches what is before it", kernels_name, (double)odd,
          (int)t, (int)n);
    CHECK(odd == odd ? isfinite(odd) || bad >= V : bad == (n - t) * V, "%s: %g at row %d of %d is lost: %d of %d",
          kernels_name,
          (double)odd, (int)t, (int)n, (int)bad, (int)((n - t) * V));
  }
  release(clean), release(out), arrays_close(&x);
}

/* ---- a window is exact: what a query does not see never reaches it, and a NaN that it sees is not lost ---- */
static void check_window(band window, float odd) {
  enum { N = 1300, AT = 700, D = 17 };
  const shape s = {1, 1, N, N, D, D, WINDOW};
  li_attention a = attention_of(&s, window);
  const arrays x = arrays_of(&a, s.flags);
  outputs clean = outputs_of(&a, &x);
  run(&a, kernels, 1);
  outputs got = outputs_of(&a, &x);
  fill(x.k + AT * D, D, odd), fill(x.v + AT * D, D, odd);
  run(&a, kernels, 3);
  int64_t reached = 0, lost = 0;
  for (int64_t i = 0; i < N; i++) {
    const float *out = got.got[OUT] + i * D;
    const bool sees = AT - i >= -window.left && AT - i <= window.right;
    if (sees) lost += out[0] == out[0];
    else if (!same(out, clean.got[OUT] + i * D, D)) reached++;
    else if (!same(got.got[GRAD_Q] + i * D, clean.got[GRAD_Q] + i * D, D)) reached++;
  }
  CHECK(reached == 0 && lost == 0, "%s: window %d, %d: %g at a key reaches %d queries that do not see it, and is lost "
        "by %d", kernels_name, (int)window.left, (int)window.right, (double)odd, (int)reached, (int)lost);
  outputs_close(&clean), outputs_close(&got), arrays_close(&x);
}
/* scores below -3e38, that of a hidden key, are scores, and Inf times -1 is no hidden key: as the reference has them */
static void check_low_scores(bool low) {
  const float q[2] = {low ? 1e19f : INFINITY, 1}, k[2] = {low ? -2e19f : -1, -1}, v[2] = {5, 7};
  float out[2], lse[2];
  const shape s = {1, 1, 2, 2, 1, 1, WINDOW};
  li_attention a = attention_of(&s, no_band);
  a.q = q, a.k = k, a.v = v, a.out = out, a.log_sum_exp = lse;
  run_pass(&a, kernels, 1, false);
  CHECK(low ? out[0] == 5 && fabs((double)lse[0] / -2e38 - 1) < 1e-6 : out[0] != out[0] && lse[0] != lse[0],
        "%s: a score of %g gives %g, log-sum-exp %g", kernels_name, (double)(q[0] * k[0]), (double)out[0],
        (double)lse[0]);
  CHECK(out[1] == 7 && fabs((double)lse[1] + 1) < 1e-6, "the query beside it: %g", (double)out[1]);
}

/* ---- the folded unpack ---- */
enum { U_OUT, U_LSE, U_X, U_K, U_V, U_BIAS, U_OUT_BIAS };
enum { NO_OUT_BIAS = 8 };
static void unpack_run(const void *call, const li_kernels *table, int64_t threads) {
  const li_unpack *u = (const li_unpack *)call;
  const li_parallel parallel = kernels_parallel(threads);
  for (int backward = 0; backward < 2; backward++) {
    kernels_scratch s = kernels_scratch_open(li_unpack_scratch(table, u, threads, backward != 0));
    if (backward) li_run_unpack_backward(table, u, &parallel, s.at);
    else li_run_unpack(table, u, &parallel, s.at);
    kernels_scratch_close(&s);
  }
}
/* one row of one head: adds to out and the gradients */
static void unpack_reference(const li_unpack *u, double **want, int64_t b, int64_t h, int64_t i) {
  const int64_t d = u->dim, row = b * u->rows + i, first = (b * u->heads + h) * u->slots,
      slots = u->lengths ? u->lengths[b] : u->slots;
  const float *x = u->x + row * d, *g = u->grad_out + row * d;
  double *p = doubles(slots), *dp = doubles(slots), mean = 0;
  for (int64_t s = 0; s < slots; s++) p[s] = (double)u->bias[first + s] + naive_dot(x, u->k + (first + s) * d, d);
  want[U_LSE][row * u->heads + h] = naive_softmax(p, slots);
  for (int64_t s = 0; s < slots; s++) {
    const double keep = exact_dropout(&u->dropout, ((b * u->heads + h) * u->rows + i) * u->slots + s);
    for (int64_t c = 0; c < d; c++) {
      want[U_OUT][row * d + c] += p[s] * keep * (double)u->v[(first + s) * d + c];
      want[U_V][(first + s) * d + c] += p[s] * keep * (double)g[c];
    }
    dp[s] = keep * naive_dot(g, u->v + (first + s) * d, d);
    mean += p[s] * dp[s];
  }
  for (int64_t s = 0; s < slots; s++) {
    const double ds = p[s] * (dp[s] - mean);
    want[U_BIAS][first + s] += ds;
    for (int64_t c = 0; c < d; c++) {
      want[U_X][row * d + c] += ds * (double)u->k[(first + s) * d + c];
      want[U_K][(first + s) * d + c] += ds * (double)x[c];
    }
  }
  free(p), free(dp);
}
/* batch row 2 alone: the same bits */
static void unpack_alone(const li_unpack *all, const outputs *o) {
  const int64_t d = all->dim, x = all->rows * d, k = all->heads * all->slots * d, b = 2;
  float *out = zeros(x), *grad_x = zeros(x), *grad_k = zeros(k), *lse = zeros(all->rows * all->heads);
  li_unpack u = *all;
  fill(grad_x, x, KERNELS_START), fill(grad_k, k, KERNELS_START);
  u.batch = 1, u.x += b * x, u.k += b * k, u.v += b * k, u.bias += b * u.heads * u.slots, u.grad_out += b * x;
  if (u.lengths) u.lengths += b;
  u.out = out, u.lse = lse, u.grad_x = grad_x, u.grad_k = grad_k, u.grad_v = u.grad_bias = u.grad_out_bias = NULL;
  unpack_run(&u, kernels, 2);
  CHECK(same(out, o->got[U_OUT] + b * x, x) && same(grad_x, o->got[U_X] + b * x, x) &&
        same(grad_k, o->got[U_K] + b * k, k),
        "%s: %s: row 2 alone has other bits", kernels_name, sentence);
  release(out), release(grad_x), release(grad_k), release(lse);
}
static void check_unpack(int64_t batch, int64_t rows, int64_t dim, int64_t heads, int64_t slots, int flags) {
  const int64_t x_size = batch * rows * dim, k_size = batch * heads * slots * dim, bias_size = batch * heads * slots;
  float *x = random_floats(x_size, 1), *k = random_floats(k_size, 2 / sqrt((double)dim)), *v = random_floats(k_size, 1),
      *bias = random_floats(bias_size, 1);
  float *out_bias = random_floats(dim, 1), *grad_out = random_floats(x_size, 1);
  int32_t *lengths = (int32_t *)common_alloc((size_t)batch * sizeof(int32_t));
  li_unpack u;
  outputs o;
  memset(&u, 0, sizeof u), memset(&o, 0, sizeof o);
  u.batch = batch, u.rows = rows, u.dim = dim, u.heads = heads, u.slots = slots;
  u.x = x, u.k = k, u.v = v, u.bias = bias, u.grad_out = grad_out, u.out_bias = flags & NO_OUT_BIAS ? NULL : out_bias;
  if (flags & LENGTHS) u.lengths = lengths;
  if (flags & DROPOUT)
    u.dropout.seed = 5, u.dropout.op = 1, u.dropout.step = 2, u.dropout.threshold = 6554, u.dropout.keep = 1 / 0.9f;
  for (int64_t b = 0; b < batch; b++) {
    lengths[b] = b == 1 ? 0 : (int32_t)(slots - b * 5 % (slots + 1));
    for (int64_t s = b * heads * slots; s < (b + 1) * heads * slots && u.lengths; s++)
      if (s % slots >= lengths[b])
        bias[s] = (float)NAN, fill(k + s * dim, dim, (float)NAN), fill(v + s * dim, dim, (float)NAN);
  }
  u.out = outputs_add(&o, "out", false, x_size);
  u.lse = outputs_add(&o, "log-sum-exp", false, batch * rows * heads);
  u.grad_x = outputs_add(&o, "grad_x", true, x_size);
  u.grad_k = outputs_add(&o, "grad_k", true, k_size);
  u.grad_v = outputs_add(&o, "grad_v", true, k_size);
  u.grad_bias = outputs_add(&o, "grad_bias", true, bias_size);
  u.grad_out_bias = outputs_add(&o, "grad_out_bias", true, dim);
  for (int64_t i = 0; i < x_size; i++) {
    o.want[U_OUT][i] = u.out_bias ? (double)out_bias[i % dim] : 0;
    o.want[U_OUT_BIAS][i % dim] += (double)grad_out[i];
  }
  for (int64_t b = 0; b < batch; b++)
    for (int64_t h = 0; h < heads; h++)
      for (int64_t i = 0; i < rows; i++) unpack_reference(&u, o.want, b, h, i);
  snprintf(sentence, sizeof sentence, "unpack, batch %d, rows %d, dim %d, heads %d, slots %d, flags %d", (int)batch,
           (int)rows, (int)dim,
           (int)heads, (int)slots, flags);
  outputs_check(&o, sentence, unpack_run, &u);
  if (batch > 2 && !(flags & DROPOUT)) unpack_alone(&u, &o); /* a dropped element's number counts the batch */
  outputs_close(&o), release(x), release(k), release(v), release(bias), release(out_bias), release(grad_out),
      free(lengths);
}

static const shape shapes[] = { /* batch, heads, queries, keys, dim, value_dim */
  {1, 1, 1, 1, 1, 1, 0}, {2, 3, 5, 7, 3, 2, 0}, {1, 2, 0, 5, 4, 4, 0}, {1, 2, 5, 0, 4, 4, 0}, {1, 1, 4, 6, 0, 3, 0},
      {1, 1, 4, 6, 3, 0, 0},
  {0, 1, 4, 6, 3, 2, 0},
  {2, 2, 64, 512, 16, 16, 0}, {1, 2, 130, 1030, 33, 20, STRIDED}, {1, 1, 1100, 70, 12, 40, 0},
      {1, 1, 1, 3000, 64, 64, 0},
  {1, 1, 40, 700, 300, 280, DROPOUT},
  {1, 2, 700, 700, 32, 32, CAUSAL}, {2, 1, 600, 520, 20, 24, CAUSAL | LENGTHS | STRIDED},
      {3, 2, 65, 1200, 20, 24, CAUSAL | LENGTHS},
  {1, 1, 513, 1025, 64, 65, CAUSAL | DROPOUT}, {2, 2, 520, 600, 8, 8, CAUSAL | DROPOUT | STRIDED | ALIAS},
  {3, 2, 16, 1500, 20, 20, LENGTHS | SHARED_Q}, {3, 2, 16, 1500, 20, 20, LENGTHS | DROPOUT | SHARED_Q},
  {3, 2, 600, 16, 20, 20, LENGTHS | DROPOUT | SHARED_KV},
  {3, 1, 30, 40, 8, 8, LENGTHS | DROPOUT | SHARED_Q | SHARED_KV | ALIAS}, {3, 2, 600, 600, 8, 8, SHARED_KV | ALIAS},
  {5, 2, 600, 30, 8, 8, SHARED_Q | SHARED_KV | ALIAS},
};
/* and of what a query sees before and after it */
static const struct { shape s; band window; } windows[] = {
  {{1, 2, 1300, 1300, 16, 24, WINDOW}, {40, 9}}, {{2, 1, 700, 700, 24, 20, WINDOW | STRIDED}, {200, 0}},
  {{1, 1, 1300, 1300, 8, 8, WINDOW | DROPOUT}, {0, 600}}, {{2, 2, 600, 1700, 20, 20, WINDOW | LENGTHS}, {3, 700}},
  {{1, 1, 1300, 300, 8, 16, WINDOW}, {100, 100}}, {{2, 1, 300, 1300, 8, 8, WINDOW | CAUSAL}, {70, 50}},
  {{1, 1, 700, 1300, 8, 8, WINDOW}, {-530, 600}}, {{1, 1, 1300, 1300, 8, 8, WINDOW | ALIAS}, {650, -120}},
  {{3, 2, 150, 140, 5, 7, WINDOW | SHARED_KV | DROPOUT}, {17, 2}}, {{3, 2, 150, 140, 8, 8, WINDOW | SHARED_Q}, {2, 66}},
  {{1, 1, 70, 1600, 16, 16, WINDOW}, {30, 900}}, {{1, 1, 37, 41, 5, 7, WINDOW}, {1, -3}},
  {{1, 1, 20, 9, 4, 4, WINDOW}, {5, -6}},
};

/* a's part of a whole, whose dropout's numbers are those of li_dropout */
static void run_part(const luna_attention_args *args, uint64_t first) {
  li_attention a;
  CHECK(li_attention_of(args, &a), "attention of a part");
  li_attention_own part = {.dropout = li_attention_dropout(&a)};
  part.dropout.first = first;
  a.own = &part;
  const li_parallel parallel = kernels_parallel(1);
  kernels_scratch scratch = kernels_scratch_open(li_attention_scratch(kernels, &a, 1, false));
  li_run_attention(kernels, &a, &parallel, scratch.at);
  kernels_scratch_close(&scratch);
}
/* without keys, of a window */
static void check_window_without_keys(void) {
  enum { N = 6, D = 8 };
  float *q = common_random(N * D, 4, 1), part[N * D], lse[N];
  luna_attention_args a = { .q = q, .out = part, .log_sum_exp = lse, .batch = 1, .heads = 1, .queries = N,
                            .head_dim = D, .dropout = 0.5f, .seed = 9, .window = true, .left = 1, .right = 1 };
  a.k = a.v = q;
  a.run.scratch_size = luna_softmax_attention_scratch(&a);
  a.run.scratch = common_alloc(a.run.scratch_size);
  for (int i = 0; i < N * D; i++) part[i] = 9;
  run_part(&a, 3);
  for (int i = 0; i < N * D; i++) CHECK(part[i] == 0, "%s: a part without keys: %g", kernels_name, (double)part[i]);
  for (int i = 0; i < N; i++) CHECK(lse[i] == -INFINITY, "%s: its log-sum-exp: %g", kernels_name, (double)lse[i]);
  free(q), free(a.run.scratch);
}

int main(void) {
  const float odd[4] = {(float)NAN, (float)INFINITY, -(float)INFINITY, 1e38f};
  for (int at = 0; kernels_next(&at);) {
    check_window_without_keys();
    check_low_scores(false), check_low_scores(true);
    check_window((band){40, 9}, (float)NAN), check_window((band){600, -3}, INFINITY);
    check_window((band){3, 700}, (float)NAN);
    for (int i = 0; i < (int)(sizeof shapes / sizeof *shapes); i++)
      if (test_full() || (at + i) % 3 == 0) check_attention(&shapes[i], no_band);
    for (int i = 0; i < (int)(sizeof windows / sizeof *windows); i++)
      if (test_full() || (at + i) % 3 == 0) check_attention(&windows[i].s, windows[i].window);
    for (int threads = 1; threads < 8; threads += 3) {
      if (!test_full() && (at + threads / 3) % 3 != 0) continue;
      check_ragged(0, threads);
      check_ragged(CAUSAL, threads);
      check_ragged(WINDOW, threads);
    }
    /* the reference goes row by row, whatever their number */
    const bool rows_alone = common_isas[at - 1] == LUNA_ISA_REFERENCE && !test_full();
    for (int dropout = 0; dropout < 2; dropout++) {
      check_prefix(5, dropout), check_prefix(50, dropout);
      if (!rows_alone && (test_full() || (at + dropout) % 2)) check_prefix(513, dropout), check_prefix(1100, dropout);
    }
    for (int i = 0; i < 4; i++)
      for (int64_t threads = 1; threads < 8; threads += 3) {
        if (!test_full() && (at + i + threads / 3) % 3) continue;
        check_causality(3, 1, odd[i], threads), check_causality(90, 10, odd[i], threads);
        check_causality(200, 64, odd[i], threads), check_causality(600, 511, odd[i], threads);
        check_causality(600, 515, odd[i], threads);
      }
    check_unpack(1, 1, 1, 1, 1, 0), check_unpack(2, 70, 12, 3, 5, 0), check_unpack(1, 1200, 40, 4, 16, 0),
        check_unpack(1, 0, 4, 2, 3, 0),
      check_unpack(1, 5, 4, 2, 0, 0);
    check_unpack(3, 130, 33, 2, 17, LENGTHS), check_unpack(3, 70, 20, 4, 16, LENGTHS | DROPOUT | NO_OUT_BIAS),
      check_unpack(3, 600, 24, 2, 40, LENGTHS | DROPOUT);
    check_unpack(2, 65, 300, 3, 130, LENGTHS), check_unpack(3, 200, 16, 2, 8, NO_OUT_BIAS);
  }
  return test_report("attention");
}
