/* Softmax attention by patterns: windows, lists of runs of keys, orders of queries and keys, lengths with NaN behind
   them, dropout, forward and backward, against loops in double over each query's keys; with and without scratch, on
   every instruction set, to the same bits for any number of threads. The op's gradients are those of dense softmax
   attention where the pattern is. A NaN reaches no query that does not see it. */
#include "test.h"
#define LUNA_IMPLEMENTATION
#include "luna.h"
#include "common.h"
#include "naive.h"

/* ---- random patterns ---- */
enum { WINDOW = 1, LISTS = 2, ORDERS = 4, LENGTHS = 8, DROPOUT = 16, CAUSAL = 32, SHARED = 64, WHOLE = 128,
       NOT_SELF = 256, SINGLE = 512, SORTED = 1024 }; /* SORTED: orders are 0, 1, 2, ... */
typedef struct call {
  luna_attention_args a;
  luna_attention_pattern *patterns;
  int flags;
  int64_t q_count, k_count, v_count, out_count, rows;
  float *arrays[9]; /* q, k, v, grad_out, out, lse, grad_q, grad_k, grad_v */
  float *grad_lse;
  int32_t *lengths;
} call;

static uint64_t drawn;
static int64_t draw(int64_t below) { return below > 0 ? (int64_t)(common_hash(12345, drawn++) % (uint64_t)below) : 0; }
static int32_t *numbers(int64_t n) { return (int32_t *)common_alloc((size_t)n * sizeof(int32_t)); }

/* `count` rows below n; each once where `once` */
static int32_t *order_of(int64_t count, int64_t n, bool once) {
  int32_t *order = numbers(count), *all = numbers(n);
  for (int64_t i = 0; i < n; i++) all[i] = (int32_t)i;
  for (int64_t i = 0; i < count; i++) {
    const int64_t at = once ? i + draw(n - i) : draw(n);
    order[i] = all[at];
    if (once) all[at] = all[i];
  }
  free(all);
  return order;
}
static void pattern_draw(luna_attention_pattern *p, int flags, int64_t queries, int64_t keys) {
  memset(p, 0, sizeof *p);
  p->window = (flags & WINDOW) != 0;
  p->left = draw(keys / 2 + 1), p->right = draw(keys / 2 + 1) - 2;
  p->not_self = (flags & NOT_SELF) != 0;
  if (!(flags & LISTS)) return;
  const int64_t blocks = 1 + draw(6), wanted = queries - draw(3);
  const int64_t numbered = flags & ORDERS ? keys + draw(20) : keys;
  int32_t *at = numbers(blocks + 1), *offsets = numbers(blocks + 1);
  for (int64_t c = 0; c <= blocks; c++)
    at[c] = (int32_t)(c == blocks ? wanted : wanted * c / blocks + draw(2)), offsets[c] = (int32_t)(c * 3);
  luna_key_run *runs = (luna_key_run *)common_alloc((size_t)(3 * blocks) * sizeof *runs);
  for (int64_t r = 0; r < 3 * blocks; r++) {
    runs[r].first = (int32_t)draw(numbered);
    runs[r].count = (int32_t)draw(1 + (numbered - runs[r].first) / (r % 3 ? 2 : 1));
    runs[r].whole = (flags & WHOLE) && r % 2;
  }
  p->blocks = blocks, p->queries = at, p->offsets = offsets, p->runs = runs;
  for (int64_t c = 0; c < blocks; c++) if (at[c] > at[c + 1]) at[c] = at[c + 1];
  if (!(flags & ORDERS)) return;
  int32_t *query_order = order_of(wanted, queries, true), *key_order = order_of(numbered, keys, false);
  for (int64_t i = 0; (flags & SORTED) && i < wanted; i++) query_order[i] = (int32_t)i;
  for (int64_t i = 0; (flags & SORTED) && i < numbered; i++) key_order[i] = (int32_t)(i % keys);
  p->query_order = query_order, p->key_order = key_order;
  p->key_count = numbered;
}
static void pattern_free(const luna_attention_pattern *p) {
  free((void *)p->queries), free((void *)p->offsets), free((void *)p->runs), free((void *)p->query_order),
      free((void *)p->key_order);
}

static call call_of(int flags, int64_t batch, int64_t heads, int64_t queries, int64_t keys, int64_t dim,
                    int64_t value_dim) {
  call c;
  memset(&c, 0, sizeof c);
  luna_attention_args *a = &c.a;
  c.flags = flags;
  a->batch = batch, a->heads = heads, a->queries = queries, a->keys = keys, a->head_dim = dim, a->value_dim = value_dim;
  a->causal = (flags & CAUSAL) != 0;
  a->pattern_count = flags & SINGLE ? 1 : flags & LENGTHS ? heads : batch * heads;
  c.patterns = (luna_attention_pattern *)common_alloc((size_t)a->pattern_count * sizeof *c.patterns);
  for (int64_t i = 0; i < a->pattern_count; i++) pattern_draw(&c.patterns[i], flags, queries, keys);
  a->patterns = c.patterns;
  c.rows = batch * queries * heads;
  c.q_count = c.rows * dim, c.out_count = c.rows * value_dim;
  c.k_count = (flags & SHARED ? 1 : batch) * keys * heads * dim,
      c.v_count = (flags & SHARED ? 1 : batch) * keys * heads * value_dim;
  if (flags & SHARED) a->k_batch = a->v_batch = LUNA_BATCH_SHARED;
  const int64_t sizes[9] = {c.q_count, c.k_count, c.v_count, c.out_count, c.out_count, c.rows, c.q_count, c.k_count,
                             c.v_count};
  for (int i = 0; i < 9; i++)
    c.arrays[i] = i < 4 ? common_random(sizes[i], 7 + (uint64_t)i, i < 2 ? 2 : 1) : common_floats(sizes[i]);
  c.grad_lse = common_random(c.rows, 99, 1);
  a->q = c.arrays[0], a->k = c.arrays[1], a->v = c.arrays[2], a->grad_out = c.arrays[3];
  a->out = c.arrays[4], a->log_sum_exp = c.arrays[5], a->grad_q = c.arrays[6], a->grad_k = c.arrays[7],
      a->grad_v = c.arrays[8];
  a->grad_log_sum_exp = c.grad_lse;
  if (flags & DROPOUT) a->dropout = 0.25f, a->seed = 5, a->dropout_op = 3, a->step = 2;
  if (flags & LENGTHS) {
    c.lengths = numbers(batch);
    for (int64_t b = 0; b < batch; b++)
      c.lengths[b] = (int32_t)(b == 1 ? 0 : (queries < keys ? queries : keys) - b * 3);
    a->lengths = c.lengths;
    for (int i = 0; i < 4; i++) {
      const int64_t rows = i == 1 || i == 2 ? keys : queries, width = sizes[i] / (batch * rows);
      for (int64_t b = 0; b < batch; b++)
        for (int64_t at = (b * rows + c.lengths[b]) * width; at < (b + 1) * rows * width; at++)
          c.arrays[i][at] = (float)NAN;
    }
  }
  return c;
}
static void call_free(call *c) {
  for (int i = 0; i < 9; i++) free(c->arrays[i]);
  for (int64_t i = 0; i < c->a.pattern_count; i++) pattern_free(&c->patterns[i]);
  free(c->patterns), free(c->grad_lse), free(c->lengths);
}

/* ---- the reference: a query's keys one by one, in double ---- */
typedef struct seen { int64_t count, *row, *number, numbers; } seen;
static void seen_of(const call *c, int64_t b, int64_t h, int64_t i, seen *s) {
  const luna_attention_args *a = &c->a;
  const luna_attention_pattern *p = &a->patterns[a->pattern_count == 1 ? 0 : a->pattern_count == a->heads ? h :
                                                 b * a->heads + h];
  s->numbers = p->key_order ? p->key_count : a->keys;
  s->count = naive_seen(p, a->causal, a->keys, a->lengths ? &a->lengths[b] : NULL, i, s->row, s->number);
}
static double dropout_of(const luna_attention_args *a, int64_t element) {
  if (!(a->dropout > 0)) return 1;
  return naive_dropped(a->seed, a->dropout_op, a->step, (uint64_t)element, (double)a->dropout) ? 0 :
      (double)(1 / (1 - a->dropout));
}
/* want: out, lse, grad_q, grad_k, grad_v; sees: [rows, keys] whether, or null */
static void reference(const call *c, float *const *want, bool *sees) {
  const luna_attention_args *a = &c->a;
  const double scale = 1 / sqrt((double)a->head_dim);
  seen s;
  s.row = (int64_t *)common_alloc((size_t)(8 * a->keys + 200) * 8),
      s.number = (int64_t *)common_alloc((size_t)(8 * a->keys + 200) * 8);
  double *p = (double *)common_alloc((size_t)(8 * a->keys + 200) * 8);
  for (int64_t row = 0; row < c->rows; row++) {
    const int64_t h = row % a->heads, i = row / a->heads % a->queries, b = row / a->heads / a->queries,
        kb = c->flags & SHARED ? 0 : b;
    const int64_t d = a->head_dim, dv = a->value_dim;
    const float *q = a->q + row * d, *g = a->grad_out + row * dv;
    double mean = 0;
    seen_of(c, b, h, i, &s);
    for (int64_t e = 0; e < s.count; e++) {
      p[e] = scale * naive_dot(q, a->k + ((kb * a->keys + s.row[e]) * a->heads + h) * d, d);
      if (sees) sees[row * a->keys + s.row[e]] = true;
    }
    want[1][row] = (float)naive_softmax(p, s.count);
    if (!s.count) want[1][row] = -INFINITY;
    for (int64_t e = 0; e < s.count; e++) {
      const int64_t at = ((kb * a->keys + s.row[e]) * a->heads + h) * dv;
      const double keep = dropout_of(a, ((b * a->heads + h) * a->queries + i) * s.numbers + s.number[e]);
      for (int64_t x = 0; x < dv; x++) {
        want[0][row * dv + x] += (float)(p[e] * keep * (double)a->v[at + x]);
        want[4][at + x] += (float)(p[e] * keep * (double)g[x]);
      }
      mean += p[e] * keep * naive_dot(g, a->v + at, dv);
    }
    for (int64_t e = 0; e < s.count; e++) {
      const int64_t key = (kb * a->keys + s.row[e]) * a->heads + h;
      const double keep = dropout_of(a, ((b * a->heads + h) * a->queries + i) * s.numbers + s.number[e]);
      const double ds = scale * p[e] * (keep * naive_dot(g, a->v + key * dv, dv) - mean +
                                        (double)a->grad_log_sum_exp[row]);
      for (int64_t x = 0; x < d; x++) {
        want[2][row * d + x] += (float)(ds * (double)a->k[key * d + x]);
        want[3][key * d + x] += (float)(ds * (double)q[x]);
      }
    }
  }
  free(s.row), free(s.number), free(p);
}

/* ---- runs ---- */
static void backwards(void *user, int64_t count, void (*task)(void *work, int64_t index), void *work) {
  (void)user;
  while (count-- > 0) task(work, count);
}
static void run(call *c, int threads, float *const *got) {
  luna_attention_args a = c->a;
  const int64_t sizes[5] = {c->out_count, c->rows, c->q_count, c->k_count, c->v_count};
  void *memory = NULL;
  for (int i = 0; i < 5; i++) memset(got[i], 0, (size_t)sizes[i] * sizeof(float));
  a.out = got[0], a.log_sum_exp = got[1], a.grad_q = got[2], a.grad_k = got[3], a.grad_v = got[4];
  a.run.parallel_for = threads > 1 ? backwards : NULL;
  a.run.threads = threads;
  if (threads > 0) {
    a.run.scratch_size = luna_softmax_attention_scratch(&a);
    a.run.scratch = memory = common_alloc(a.run.scratch_size);
  }
  CHECK(luna_softmax_attention_f32(&a) == LUNA_OK, "forward failed");
  CHECK(luna_softmax_attention_backward_f32(&a) == LUNA_OK, "backward failed");
  free(memory);
}
static void close_lse(const float *got, const float *want, int64_t rows, const char *what) {
  bool same = true;
  for (int64_t i = 0; i < rows; i++)
    same = same && (want[i] == -INFINITY ? got[i] == -INFINITY :
                    fabs((double)got[i] - (double)want[i]) < 1e-5 * (1 + fabs((double)want[i])));
  CHECK(same, "%s: log-sum-exp", what);
}
static void check(int flags, int64_t batch, int64_t heads, int64_t queries, int64_t keys, int64_t dim,
                  int64_t value_dim) {
  call c = call_of(flags, batch, heads, queries, keys, dim, value_dim);
  const int64_t sizes[5] = {c.out_count, c.rows, c.q_count, c.k_count, c.v_count};
  static const int threads[4] = {0, 1, 2, 5};
  static const char *const names[5] = {"out", "log-sum-exp", "grad_q", "grad_k", "grad_v"};
  float *want[5], *got[4][5];
  bool *sees = (bool *)common_alloc((size_t)(c.rows * keys));
  for (int i = 0; i < 5; i++) {
    want[i] = common_floats(sizes[i]);
    for (int t = 0; t < 4; t++) got[t][i] = common_floats(sizes[i]);
  }
  reference(&c, want, sees);
  for (int isa = 0; isa < COMMON_ISAS; isa++) {
    if (!luna_isa_available(common_isas[isa])) continue;
    c.a.run.isa = common_isas[isa];
    for (int t = 0; t < 4; t++) {
      char what[160];
      run(&c, threads[t], got[t]);
      for (int i = 0; i < 5; i++) {
        snprintf(what, sizeof what, "flags %d, %lld queries, %lld keys, %s, %d threads: %s", flags, (long long)queries,
                 (long long)keys, luna_isa_name(common_isas[isa]), threads[t], names[i]);
        if (i == 1) close_lse(got[t][1], want[1], c.rows, what);
        else test_close(what, got[t][i], want[i], (size_t)sizes[i], i ? 1e-5 : 2e-6);
        if (t > 1)
          CHECK(memcmp(got[t][i], got[1][i], (size_t)sizes[i] * sizeof(float)) == 0, "%s has other bits than with 1",
                what);
      }
    }
    /* a NaN in one key */
    const int64_t j = keys / 3, dv = c.a.value_dim;
    if (flags & SHARED) continue;
    for (int64_t x = 0; x < heads * dim; x++) c.arrays[1][j * heads * dim + x] = (float)NAN;
    for (int64_t x = 0; x < heads * dv; x++) c.arrays[2][j * heads * dv + x] = x % 2 ? INFINITY : (float)NAN;
    run(&c, 1, got[2]);
    bool same = true, reached = true;
    for (int64_t row = 0; row < c.rows; row++) {
      const bool blind = row >= queries * heads || !sees[row * keys + j];
      const bool equal = memcmp(got[2][0] + row * dv, got[1][0] + row * dv, (size_t)dv * sizeof(float)) == 0 &&
                         memcmp(got[2][2] + row * dim, got[1][2] + row * dim, (size_t)dim * sizeof(float)) == 0;
      same = same && (!blind || equal);
      reached = reached && (blind || got[2][0][row * dv] != got[2][0][row * dv]);
    }
    CHECK(same, "flags %d, %s: a NaN reaches a query that does not see it", flags, luna_isa_name(common_isas[isa]));
    CHECK(reached, "flags %d, %s: a NaN is lost", flags, luna_isa_name(common_isas[isa]));
    common_fill(c.arrays[1], c.k_count, 8, 2), common_fill(c.arrays[2], c.v_count, 9, 1);
    if (flags & LENGTHS) break;       /* the padding was NaN */
  }
  for (int i = 0; i < 5; i++) {
    free(want[i]);
    for (int t = 0; t < 4; t++) free(got[t][i]);
  }
  free(sees);
  call_free(&c);
}

/* ---- the op: where a pattern is all keys, or all before, it is dense attention; failures say why ---- */
static void dense(const luna_attention_pattern *pattern, bool causal, float *y, float *grad) {
  enum { B = 2, N = 70, D = 24 };
  const int64_t shape[3] = {B, N, D};
  luna_options options = {.threads = 2};
  luna_attention_config c = {.heads = 3, .causal = causal && !pattern, .patterns = pattern,
                              .pattern_count = pattern ? 1 : 0};
  luna_ctx *ctx = luna_open(&options);
  luna_tensor *in[3];
  luna_begin_step(ctx);
  for (int i = 0; i < 3; i++) {
    float *values = common_random(B * N * D, 40 + (uint64_t)i, 1.5);
    in[i] = luna_require_grad(luna_tensor_new(ctx, values, 3, shape));
    free(values);
  }
  luna_tensor *out = luna_softmax_attention(in[0], in[1], in[2], &c);
  CHECK(out && luna_read(out, y) == LUNA_OK && luna_backward(common_loss(out, 5)) == LUNA_OK, "%s", luna_error(ctx));
  for (int i = 0; i < 3; i++) luna_read_grad(in[i], grad + i * B * N * D);
  luna_close(ctx);
}
static void check_dense(bool causal) {
  enum { COUNT = 2 * 70 * 24 };
  luna_attention_pattern p = {.window = causal, .left = INT32_MAX, .right = 0};
  float *y[2], *grad[2];
  for (int i = 0; i < 2; i++) {
    y[i] = common_floats(COUNT), grad[i] = common_floats(3 * COUNT);
    dense(i ? &p : NULL, causal, y[i], grad[i]);
  }
  test_close("a dense pattern's result", y[1], y[0], COUNT, 1e-6);
  test_close("a dense pattern's gradients", grad[1], grad[0], 3 * COUNT, 2e-6);
  for (int i = 0; i < 2; i++) free(y[i]), free(grad[i]);
}
/* queries, keys and values are one tensor, whose gradient the three add to: the same bits for any number of threads */
static void one_tensor(int threads, bool apart, float *grad) {
  enum { N = 1300, D = 16 };
  const int64_t shape[3] = {1, N, D};
  luna_options options = {.threads = threads};
  luna_attention_pattern window = {.window = true, .left = 40, .right = 9};
  luna_attention_config c = {.heads = 2, .patterns = &window, .pattern_count = 1};
  luna_ctx *ctx = luna_open(&options);
  luna_tensor *in[3];
  float *values = common_random(N * D, 40, 1.5), *part = common_floats(N * D);
  luna_begin_step(ctx);
  for (int i = 0; i < 3; i++) in[i] = i && !apart ? in[0] : luna_require_grad(luna_tensor_new(ctx, values, 3, shape));
  luna_tensor *out = luna_softmax_attention(in[0], in[1], in[2], &c);
  CHECK(out && luna_backward(common_loss(out, 5)) == LUNA_OK, "%s", luna_error(ctx));
  for (int i = 0; i < (apart ? 3 : 1); i++) {
    luna_read_grad(in[i], part);
    for (int k = 0; k < N * D; k++) grad[k] = part[k] + (i ? grad[k] : 0);
  }
  luna_close(ctx);
  free(values), free(part);
}
static void check_one_tensor(void) {
  enum { COUNT = 1300 * 16 };
  float *grad[3] = {common_floats(COUNT), common_floats(COUNT), common_floats(COUNT)};
  one_tensor(1, false, grad[0]), one_tensor(3, false, grad[1]), one_tensor(1, true, grad[2]);
  CHECK(memcmp(grad[0], grad[1], COUNT * sizeof(float)) == 0, "one tensor's gradient has other bits with 3 threads");
  test_close("one tensor's gradient", grad[0], grad[2], COUNT, 2e-6);
  for (int i = 0; i < 3; i++) free(grad[i]);
}
/* no keys: zeros */
static void check_no_keys(void) {
  const luna_attention_pattern window = {.window = true, .left = 1, .right = 1};
  float q[8] = {1, 2, 3, 4, 5, 6, 7, 8}, out[8];
  luna_attention_args a = {.q = q, .k = q, .v = q, .out = out, .batch = 1, .heads = 1, .queries = 4, .head_dim = 2,
                           .patterns = &window, .pattern_count = 1, .dropout = 0.5f};
  for (int i = 0; i < 8; i++) out[i] = 9;
  CHECK(luna_softmax_attention_f32(&a) == LUNA_OK, "attention over no keys fails");
  for (int i = 0; i < 8; i++) CHECK(out[i] == 0, "attention over no keys: %g", (double)out[i]);
}
/* scores below -3e38, that of a hidden key, are scores, and Inf times -1 is no hidden key: as the reference has them */
static void check_low_scores(void) {
  const luna_attention_pattern self = {.window = true};
  for (int i = 0; i < COMMON_ISAS * 2; i++) {
    const bool low = i % 2;
    const float q[2] = {low ? 1e19f : INFINITY, 1}, k[2] = {low ? -2e19f : -1, -1}, v[2] = {5, 7};
    float out[2], sums[2];
    luna_attention_args a = {.q = q, .k = k, .v = v, .out = out, .log_sum_exp = sums, .batch = 1, .heads = 1,
                             .queries = 2, .keys = 2, .head_dim = 1, .scale = 1, .patterns = &self,
                             .pattern_count = 1, .run = {.isa = common_isas[i / 2]}};
    if (!luna_isa_available(common_isas[i / 2])) continue;
    const size_t size = luna_softmax_attention_scratch(&a);
    a.run.scratch = common_alloc(size), a.run.scratch_size = size;
    CHECK(luna_softmax_attention_f32(&a) == LUNA_OK, "low scores: the call fails");
    CHECK(low ? out[0] == 5 && fabs((double)sums[0] / -2e38 - 1) < 1e-6 : out[0] != out[0] && sums[0] != sums[0],
          "%s: a score of %g gives %g, log-sum-exp %g", luna_isa_name(common_isas[i / 2]), (double)(q[0] * k[0]),
          (double)out[0], (double)sums[0]);
    CHECK(out[1] == 7 && fabs((double)sums[1] + 1) < 1e-6, "the query beside it: %g", (double)out[1]);
    free(a.run.scratch);
  }
}
static void check_failures(void) {
  static const int32_t falling[3] = {0, 5, 3}, past[3] = {0, 2, 9}, good[3] = {0, 2, 4};
  static const luna_key_run runs[4] = {{0, 4, false}, {3, 2, false}, {-1, 1, false}, {0, 4, false}};
  const int64_t shape[3] = {1, 4, 6};
  luna_attention_pattern p[6] = {{.blocks = 2, .queries = falling, .offsets = good, .runs = runs + 3},
                                 {.blocks = 2, .queries = past, .offsets = good, .runs = runs + 3},
                                 {.blocks = 1, .queries = good, .offsets = good, .runs = runs}, /* key 4 */
                                 {.blocks = 1, .queries = good, .offsets = good, .runs = runs + 2},
                                 {.blocks = 1, .queries = good, .offsets = good},
                                 {.query_order = good}};
  luna_ctx *ctx = luna_open(NULL);
  for (int i = 0; i < 8; i++) {
    luna_tensor *sums, *x;
    luna_attention_config c = {.patterns = &p[i % 6], .pattern_count = i == 6 ? 5 : 1};
    luna_attention_pattern window = {.window = true};
    if (i > 5) c.patterns = &window;
    if (i == 7) c.sums = &sums;
    luna_begin_inference(ctx);
    x = luna_tensor_new(ctx, NULL, 3, shape);
    CHECK(!luna_softmax_attention(x, x, x, &c) && luna_error_id_of(ctx) == LUNA_ERROR_PATTERNS,
          "invalid pattern %d is accepted", i);
  }
  luna_close(ctx);
}

int main(void) {
  check_dense(false);
  check_dense(true);
  check_one_tensor();
  check_no_keys();
  check_low_scores();
  check_failures();
  static const int kinds[] = {0, WINDOW, WINDOW | CAUSAL, WINDOW | NOT_SELF, WINDOW | LENGTHS, WINDOW | DROPOUT,
                               WINDOW | SHARED, LISTS, LISTS | LENGTHS,
                              LISTS | WINDOW | WHOLE, LISTS | CAUSAL | DROPOUT, LISTS | ORDERS,
                                  LISTS | ORDERS | WINDOW | WHOLE, LISTS | ORDERS | CAUSAL | NOT_SELF,
                              LISTS | ORDERS | LENGTHS | WINDOW, LISTS | ORDERS | DROPOUT, LISTS | SHARED | WINDOW,
                                  LISTS | SINGLE | LENGTHS, NOT_SELF | CAUSAL, LISTS | ORDERS | SORTED | CAUSAL,
                              LISTS | ORDERS | SORTED | WINDOW, LISTS | ORDERS | SORTED | WINDOW | NOT_SELF | WHOLE};
  for (int i = 0; i < (int)(sizeof kinds / sizeof *kinds); i++) {
    check(kinds[i], 2, 3, 37, 41, 5, 7);
    check(kinds[i], 2, 2, 150, 140, 16, 16);
    if (!TEST_QUICK) check(kinds[i] | SINGLE, 1, 1, 300, 1300, 8, 24);
  }
  return test_report("sparse");
}
