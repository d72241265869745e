/* examples/attentions/blocks.h: softmax attention by lists of keys: windows, runs, orders of queries and keys, lengths
   with NaN behind them, dropout, forward and backward, against loops in double over each query's keys; on every
   instruction set, to the same bits for any number of threads. Gradients are those of dense softmax attention where the
   pattern is dense. A NaN reaches no query that does not see it. Parts of which a query sees nothing give no NaN. */
#include "test.h"
#define LUNA_IMPLEMENTATION
#include "luna.h"
#include "examples/attentions/blocks.h"
#include "common.h"
#include "naive.h"

/* ---- random patterns ---- */
enum { WINDOW = 1, LISTS = 2, ORDERS = 4, LENGTHS = 8, DROPOUT = 16, CAUSAL = 32, SHARED = 64, WHOLE = 128,
       NOT_SELF = 256, SINGLE = 512, SORTED = 1024 }; /* SORTED: orders are 0, 1, 2, ... */
typedef struct call {
  block_config config;
  block_pattern *patterns;
  int flags;
  int64_t batch, heads, queries, keys, dim, value_dim;
  int64_t q_count, k_count, v_count, out_count, rows;
  float *arrays[4];                  /* q, k, v, grad_out */
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
static void pattern_draw(block_pattern *p, int flags, int64_t queries, int64_t keys) {
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
  block_run *runs = (block_run *)common_alloc((size_t)(3 * blocks) * sizeof *runs);
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
static void pattern_free(const block_pattern *p) {
  free((void *)p->queries), free((void *)p->offsets), free((void *)p->runs), free((void *)p->query_order),
      free((void *)p->key_order);
}

static call call_of(int flags, int64_t batch, int64_t heads, int64_t queries, int64_t keys, int64_t dim,
                    int64_t value_dim) {
  const int64_t count = flags & SINGLE ? 1 : flags & LENGTHS ? heads : batch * heads;
  call c;
  memset(&c, 0, sizeof c);
  c.flags = flags;
  c.batch = batch, c.heads = heads, c.queries = queries, c.keys = keys, c.dim = dim, c.value_dim = value_dim;
  c.patterns = (block_pattern *)common_alloc((size_t)count * sizeof *c.patterns);
  for (int64_t i = 0; i < count; i++) pattern_draw(&c.patterns[i], flags, queries, keys);
  c.config.heads = heads, c.config.causal = (flags & CAUSAL) != 0;
  c.config.dropout = flags & DROPOUT ? 0.25f : 0;
  c.config.patterns = c.patterns, c.config.pattern_count = count;
  c.rows = batch * queries * heads;
  c.q_count = c.rows * dim, c.out_count = c.rows * value_dim;
  c.k_count = (flags & SHARED ? 1 : batch) * keys * heads * dim;
  c.v_count = (flags & SHARED ? 1 : batch) * keys * heads * value_dim;
  const int64_t sizes[4] = {c.q_count, c.k_count, c.v_count, c.out_count};
  for (int i = 0; i < 4; i++) c.arrays[i] = common_random(sizes[i], 7 + (uint64_t)i, i < 2 ? 2 : 1);
  c.grad_lse = common_random(c.rows, 99, 1);
  if (flags & LENGTHS) {
    c.lengths = numbers(batch);
    for (int64_t b = 0; b < batch; b++)
      c.lengths[b] = (int32_t)(b == 1 ? 0 : (queries < keys ? queries : keys) - b * 3);
    c.config.lengths = c.lengths;
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
  for (int i = 0; i < 4; i++) free(c->arrays[i]);
  for (int64_t i = 0; i < c->config.pattern_count; i++) pattern_free(&c->patterns[i]);
  free(c->patterns), free(c->grad_lse), free(c->lengths);
}

/* ---- the reference: a query's keys one by one, in double ---- */
typedef struct seen { int64_t count, *row, *number, numbers; } seen;
static void see(const block_pattern *p, bool causal, int64_t keys, int64_t i, int64_t block, seen *s) {
  const int64_t first = p->blocks ? p->offsets[block] : 0, last = p->blocks ? p->offsets[block + 1] : 1;
  for (int64_t r = first; r < last; r++) {
    const int64_t from = p->blocks ? p->runs[r].first : 0, count = p->blocks ? p->runs[r].count : keys;
    for (int64_t f = from; f < from + count; f++) {
      const int64_t j = p->key_order ? p->key_order[f] : f, ahead = j - i;
      bool sees = !p->window || (ahead >= -p->left && ahead <= p->right);
      if ((p->not_self && ahead == 0) || (causal && ahead > 0)) sees = false;
      if (p->blocks && p->runs[r].whole) sees = true;
      if (!sees || j >= keys) continue;
      s->row[s->count] = j, s->number[s->count++] = f;
    }
  }
}
static void seen_of(const call *c, int64_t b, int64_t h, int64_t i, seen *s) {
  const block_pattern *p = &c->patterns[(b * c->heads + h) % c->config.pattern_count];
  const int64_t keys = c->lengths ? c->lengths[b] : c->keys;
  int64_t ordered = c->keys;
  for (int64_t k = 0; k < c->config.pattern_count; k++)
    if (c->patterns[k].key_order && c->patterns[k].key_count > ordered) ordered = c->patterns[k].key_count;
  for (s->numbers = c->keys; s->numbers < ordered; s->numbers *= 2);
  s->count = 0;
  if (c->lengths && i >= c->lengths[b]) return;
  if (!p->blocks) see(p, c->config.causal, keys, i, 0, s);
  for (int64_t block = 0; block < p->blocks; block++)
    for (int64_t at = p->queries[block]; at < p->queries[block + 1]; at++)
      if ((p->query_order ? p->query_order[at] : at) == i) see(p, c->config.causal, keys, i, block, s);
}
static double dropout_of(const call *c, int64_t element) {
  const double p = (double)c->config.dropout;
  if (!(p > 0)) return 1;
  return naive_dropped(5, 0, 1, (uint64_t)element, p) ? 0 : 1 / (1 - p);
}
/* want: out, lse, grad_q, grad_k, grad_v; sees: [rows, keys] whether, or null */
static void reference(const call *c, float *const *want, bool *sees) {
  const double scale = 1 / sqrt((double)c->dim);
  seen s;
  s.row = (int64_t *)common_alloc((size_t)(8 * c->keys + 200) * 8),
      s.number = (int64_t *)common_alloc((size_t)(8 * c->keys + 200) * 8);
  double *p = (double *)common_alloc((size_t)(8 * c->keys + 200) * 8);
  for (int64_t row = 0; row < c->rows; row++) {
    const int64_t h = row % c->heads, i = row / c->heads % c->queries, b = row / c->heads / c->queries,
        kb = c->flags & SHARED ? 0 : b;
    const int64_t d = c->dim, dv = c->value_dim;
    const float *q = c->arrays[0] + row * d, *g = c->arrays[3] + row * dv;
    double mean = 0;
    seen_of(c, b, h, i, &s);
    for (int64_t e = 0; e < s.count; e++) {
      p[e] = scale * naive_dot(q, c->arrays[1] + ((kb * c->keys + s.row[e]) * c->heads + h) * d, d);
      if (sees) sees[row * c->keys + s.row[e]] = true;
    }
    want[1][row] = (float)naive_softmax(p, s.count);
    if (!s.count) want[1][row] = -INFINITY;
    for (int64_t e = 0; e < s.count; e++) {
      const int64_t at = ((kb * c->keys + s.row[e]) * c->heads + h) * dv;
      const double keep = dropout_of(c, ((b * c->heads + h) * c->queries + i) * s.numbers + s.number[e]);
      for (int64_t x = 0; x < dv; x++) {
        want[0][row * dv + x] += (float)(p[e] * keep * (double)c->arrays[2][at + x]);
        want[4][at + x] += (float)(p[e] * keep * (double)g[x]);
      }
      mean += p[e] * keep * naive_dot(g, c->arrays[2] + at, dv);
    }
    for (int64_t e = 0; e < s.count; e++) {
      const int64_t key = (kb * c->keys + s.row[e]) * c->heads + h;
      const double keep = dropout_of(c, ((b * c->heads + h) * c->queries + i) * s.numbers + s.number[e]);
      const double ds = scale * p[e] * (keep * naive_dot(g, c->arrays[2] + key * dv, dv) - mean +
                                        (double)c->grad_lse[row]);
      for (int64_t x = 0; x < d; x++) {
        want[2][row * d + x] += (float)(ds * (double)c->arrays[1][key * d + x]);
        want[3][key * d + x] += (float)(ds * (double)q[x]);
      }
    }
  }
  free(s.row), free(s.number), free(p);
}

/* ---- runs ---- */
/* a tensor of a step [rows of a batch, rows, width], of which a gradient is wanted */
static luna_tensor *tensor_of(luna_ctx *ctx, const float *values, int64_t batch, int64_t rows, int64_t width) {
  const int64_t shape[3] = {batch, rows, width};
  return luna_tensor_new(ctx, values, 3, shape);
}
/* the sum of x y */
static luna_tensor *inner(luna_tensor *x, luna_tensor *y) {
  const int64_t flat[2] = {1, luna_count(x)};
  return luna_sum(luna_reshape(luna_mul(x, y), 2, flat), 1);
}
static luna_tensor *attend(const call *c, luna_tensor *const in[3], luna_tensor **lse) {
  block_config config = c->config;
  config.log_sum_exp = lse;
  return block_attention(in[0], in[1], in[2], &config);
}
/* got: out, log-sum-exp, grad_q, grad_k, grad_v */
static void run(const call *c, luna_isa isa, int threads, luna_tensor *(*by)(const call *c, luna_tensor *const in[3],
                luna_tensor **lse), float *const *got) {
  const int64_t k_batch = c->flags & SHARED ? 1 : c->batch;
  luna_options options = {.threads = threads, .isa = isa, .seed = 5};
  luna_ctx *ctx = luna_open(&options);
  luna_tensor *in[3], *lse = NULL;
  luna_begin_step(ctx);
  in[0] = luna_require_grad(tensor_of(ctx, c->arrays[0], c->batch, c->queries, c->heads * c->dim));
  in[1] = luna_require_grad(tensor_of(ctx, c->arrays[1], k_batch, c->keys, c->heads * c->dim));
  in[2] = luna_require_grad(tensor_of(ctx, c->arrays[2], k_batch, c->keys, c->heads * c->value_dim));
  luna_tensor *out = by(c, in, &lse);
  if (CHECK(out && lse, "%s", luna_error(ctx))) {
    luna_read(out, got[0]), luna_read(lse, got[1]);
    luna_tensor *loss = inner(out, tensor_of(ctx, c->arrays[3], c->batch, c->queries, c->heads * c->value_dim));
    loss = luna_add(loss, inner(lse, tensor_of(ctx, c->grad_lse, c->batch, c->queries, c->heads)));
    CHECK(luna_backward(loss) == LUNA_OK, "%s", luna_error(ctx));
    for (int i = 0; i < 3; i++) luna_read_grad(in[i], got[2 + i]);
  }
  luna_close(ctx);
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
  static const int threads[3] = {1, 2, 5};
  static const char *const names[5] = {"out", "log-sum-exp", "grad_q", "grad_k", "grad_v"};
  float *want[5], *got[3][5];
  bool *sees = (bool *)common_alloc((size_t)(c.rows * keys));
  for (int i = 0; i < 5; i++) {
    want[i] = common_floats(sizes[i]);
    for (int t = 0; t < 3; t++) got[t][i] = common_floats(sizes[i]);
  }
  reference(&c, want, sees);
  for (int isa = 0; isa < COMMON_ISAS; isa++) {
    if (!luna_isa_available(common_isas[isa])) continue;
    for (int t = 0; t < 3; t++) {
      char what[160];
      run(&c, common_isas[isa], threads[t], attend, got[t]);
      for (int i = 0; i < 5; i++) {
        snprintf(what, sizeof what, "flags %d, %lld queries, %lld keys, %s, %d threads: %s", flags, (long long)queries,
                 (long long)keys, luna_isa_name(common_isas[isa]), threads[t], names[i]);
        if (i == 1) close_lse(got[t][1], want[1], c.rows, what);
        else test_close(what, got[t][i], want[i], (size_t)sizes[i], i ? 1e-5 : 2e-6);
        if (t > 0)
          CHECK(memcmp(got[t][i], got[0][i], (size_t)sizes[i] * sizeof(float)) == 0, "%s has other bits than with 1",
                what);
      }
    }
    /* a NaN in one key */
    const int64_t j = keys / 3, dv = c.value_dim;
    if (flags & SHARED) continue;
    for (int64_t x = 0; x < heads * dim; x++) c.arrays[1][j * heads * dim + x] = (float)NAN;
    for (int64_t x = 0; x < heads * dv; x++) c.arrays[2][j * heads * dv + x] = x % 2 ? INFINITY : (float)NAN;
    run(&c, common_isas[isa], 1, attend, got[2]);
    bool same = true, reached = true;
    for (int64_t row = 0; row < c.rows; row++) {
      const bool blind = row >= queries * heads || !sees[row * keys + j];
      const bool equal = memcmp(got[2][0] + row * dv, got[0][0] + row * dv, (size_t)dv * sizeof(float)) == 0 &&
                         memcmp(got[2][2] + row * dim, got[0][2] + row * dim, (size_t)dim * sizeof(float)) == 0;
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
    for (int t = 0; t < 3; t++) free(got[t][i]);
  }
  free(sees);
  call_free(&c);
}

/* ---- where a pattern is all keys, or all before, it is dense attention ---- */
static luna_tensor *dense(const call *c, luna_tensor *const in[3], luna_tensor **lse) {
  luna_attention_config config = {.heads = c->heads, .causal = c->config.causal, .log_sum_exp = lse};
  return luna_softmax_attention(in[0], in[1], in[2], &config);
}
static void check_dense(bool causal) {
  call c = call_of(SINGLE | (causal ? CAUSAL : 0), 2, 3, 70, 70, 8, 8);
  const int64_t count = c.q_count;
  float *got[2][5];
  for (int i = 0; i < 2; i++) {
    for (int k = 0; k < 5; k++) got[i][k] = common_floats(count);
    run(&c, LUNA_ISA_BEST, 2, i ? attend : dense, got[i]);
  }
  test_close("a dense pattern's result", got[1][0], got[0][0], (size_t)count, 1e-6);
  test_close("a dense pattern's log-sum-exp", got[1][1], got[0][1], (size_t)c.rows, 1e-6);
  for (int k = 2; k < 5; k++) test_close("a dense pattern's gradient", got[1][k], got[0][k], (size_t)count, 2e-6);
  for (int i = 0; i < 2; i++)
    for (int k = 0; k < 5; k++) free(got[i][k]);
  call_free(&c);
}
/* queries, keys and values are one tensor, whose gradient the three add to: the same bits for any number of threads */
static void one_tensor(int threads, bool apart, float *grad) {
  enum { N = 1300, D = 16 };
  luna_options options = {.threads = threads};
  const block_pattern window = {.window = true, .left = 40, .right = 9};
  const block_config c = {.heads = 2, .patterns = &window, .pattern_count = 1};
  luna_ctx *ctx = luna_open(&options);
  luna_tensor *in[3];
  float *values = common_random(N * D, 40, 1.5), *part = common_floats(N * D);
  luna_begin_step(ctx);
  for (int i = 0; i < 3; i++) in[i] = i && !apart ? in[0] : luna_require_grad(tensor_of(ctx, values, 1, N, D));
  luna_tensor *out = block_attention(in[0], in[1], in[2], &c);
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
/* one head of width 1, two queries that see themselves alone; values 5 and 7 */
static void self(luna_isa isa, const float q[2], const float k[2], float out[2], float lse[2]) {
  static const float v[2] = {5, 7};
  const block_pattern window = {.window = true};
  luna_options options = {.isa = isa};
  luna_ctx *ctx = luna_open(&options);
  luna_tensor *sums = NULL;
  const block_config c = {.scale = 1, .patterns = &window, .pattern_count = 1, .log_sum_exp = &sums};
  luna_begin_inference(ctx);
  luna_tensor *y = block_attention(tensor_of(ctx, q, 1, 2, 1), tensor_of(ctx, k, 1, 2, 1), tensor_of(ctx, v, 1, 2, 1),
                                   &c);
  CHECK(y && luna_read(y, out) == LUNA_OK && luna_read(sums, lse) == LUNA_OK, "%s", luna_error(ctx));
  luna_close(ctx);
}
/* scores below -3e38 are scores, and Inf times -1 is no hidden key */
static void check_low_scores(void) {
  for (int i = 0; i < COMMON_ISAS * 2; i++) {
    const bool low = i % 2;
    const float q[2] = {low ? 1e19f : INFINITY, 1}, k[2] = {low ? -2e19f : -1, -1};
    const char *name = luna_isa_name(common_isas[i / 2]);
    float out[2], lse[2];
    if (!luna_isa_available(common_isas[i / 2])) continue;
    self(common_isas[i / 2], q, k, out, lse);
    CHECK(low ? out[0] == 5 && fabs((double)lse[0] / -2e38 - 1) < 1e-6 : out[0] != out[0] && lse[0] != lse[0],
          "%s: a score of %g gives %g, log-sum-exp %g", name, (double)(q[0] * k[0]), (double)out[0], (double)lse[0]);
    CHECK(out[1] == 7 && fabs((double)lse[1] + 1) < 1e-6, "the query beside it: %g", (double)out[1]);
  }
}
/* Two parts of keys, of which a query sees neither, and then a third, whose key it sees; and no keys at all */
static void check_empty_parts(void) {
  enum { N = 3 * BLOCK_KEYS };
  static const int32_t queries[2] = {0, 2}, offsets[2] = {0, 2};
  const block_run runs[2] = {{0, N - 1, false}, {N - 1, 1, true}};
  const block_pattern p = {.window = true, .left = 0, .right = N, .not_self = true, .blocks = 1, .queries = queries,
                           .offsets = offsets, .runs = runs};
  float *values = common_random(N, 3, 1), out[3 * BLOCK_KEYS];
  luna_ctx *ctx = luna_open(NULL);
  for (int none = 0; none < 2; none++) {
    block_pattern pattern = p;
    const block_config c = {.patterns = &pattern, .pattern_count = 1};
    pattern.left = none ? 0 : -N;    /* beyond the last key: only the whole run is seen */
    luna_begin_inference(ctx);
    luna_tensor *x = tensor_of(ctx, values, 1, N, 1), *nothing = tensor_of(ctx, NULL, 1, 0, 1);
    if (none) pattern.blocks = 0;
    luna_tensor *y = none ? block_attention(x, nothing, nothing, &c) : block_attention(x, x, x, &c);
    CHECK(y && luna_read(y, out) == LUNA_OK, "%s", luna_error(ctx));
    for (int i = 0; y && i < N; i++) {
      const float want = none || i > 1 ? 0 : values[N - 1];
      CHECK(out[i] == want, "query %d, which sees %s: %g", i, none ? "no key" : "the last key", (double)out[i]);
    }
  }
  luna_close(ctx);
  free(values);
}
static void check_failures(void) {
  static const int32_t falling[3] = {0, 5, 3}, past[3] = {0, 2, 9}, good[3] = {0, 2, 4}, lengths[1] = {5};
  static const block_run runs[4] = {{0, 4, false}, {3, 2, false}, {-1, 1, false}, {0, 4, false}};
  const block_pattern p[6] = {{.blocks = 2, .queries = falling, .offsets = good, .runs = runs + 3},
                              {.blocks = 2, .queries = past, .offsets = good, .runs = runs + 3},
                              {.blocks = 1, .queries = good, .offsets = good, .runs = runs}, /* key 4 */
                              {.blocks = 1, .queries = good, .offsets = good, .runs = runs + 2},
                              {.blocks = 1, .queries = good, .offsets = good},
                              {.query_order = good}};
  const block_pattern window = {.window = true};
  static const struct { block_config c; const char *says; } bad[] = {
    {{.heads = 4}, "4 heads do not divide the widths 6 and 6"}, {{.heads = -1}, "-1 heads"},
    {{.lengths = lengths}, "lengths[0] is 5, outside 0..4"}, {{.scale = INFINITY}, "scale is not a finite number"},
    {{.dropout = 1}, "dropout"}, {{.dropout = -1}, "dropout"}};
  luna_ctx *ctx = luna_open(NULL);
  for (int i = 0; i < 7; i++) {
    const block_config c = {.patterns = i < 6 ? &p[i] : &window, .pattern_count = i < 6 ? 1 : 5};
    luna_begin_inference(ctx);
    luna_tensor *x = tensor_of(ctx, NULL, 1, 4, 6);
    CHECK(!block_attention(x, x, x, &c) && luna_error_status(ctx) == LUNA_BAD_ARGUMENT &&
          strstr(luna_error(ctx), "patterns: there must be 1, heads, or batch * heads of them (batch 1, heads 1)"),
          "invalid pattern %d: %s", i, luna_error(ctx));
  }
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    block_config c = bad[i].c;
    c.patterns = &window, c.pattern_count = 1;
    luna_begin_inference(ctx);
    luna_tensor *x = tensor_of(ctx, NULL, 1, 4, 6);
    CHECK(!block_attention(x, x, x, &c) && strstr(luna_error(ctx), bad[i].says), "\"%s\" is wanted: %s", bad[i].says,
          luna_error(ctx));
  }
  for (int i = 0; i < 5; i++) {
    static const char *const says[5] = {"batches of 2 and 3", "k [4,8] and v [4,..] do not fit q [..,6]",
                                        "k [4,6] and v [5,..]", "input 1 (q, k, v) has 2 axes", "patterns: there must"};
    const int64_t flat[2] = {4, 6};
    const block_config c = {.patterns = i == 4 ? NULL : &window, .pattern_count = 1};
    luna_begin_inference(ctx);
    luna_tensor *q = tensor_of(ctx, NULL, 2, 4, 6), *k = tensor_of(ctx, NULL, i == 0 ? 3 : 2, 4, i == 1 ? 8 : 6);
    luna_tensor *v = tensor_of(ctx, NULL, 2, i == 2 ? 5 : 4, 6);
    if (i == 3) k = luna_tensor_new(ctx, NULL, 2, flat);
    CHECK(!block_attention(q, k, v, &c) && strstr(luna_error(ctx), says[i]), "\"%s\" is wanted: %s", says[i],
          luna_error(ctx));
  }
  CHECK(!block_attention(NULL, NULL, NULL, NULL), "an op of nothing");
  luna_close(ctx);
}
/* the same dropout in a scope that is computed again */
static void check_recompute(void) {
  call c = call_of(LISTS | ORDERS | DROPOUT, 2, 2, 37, 41, 8, 8);
  float *grad[2] = {common_floats(c.q_count), common_floats(c.q_count)};
  for (int again = 0; again < 2; again++) {
    luna_options options = {.threads = 2, .seed = 5};
    luna_ctx *ctx = luna_open(&options);
    luna_tensor *in[3];
    luna_begin_step(ctx);
    for (int i = 0; i < 3; i++)
      in[i] = luna_require_grad(tensor_of(ctx, c.arrays[i], c.batch, i ? c.keys : c.queries, 2 * c.dim));
    const luna_scope scope = luna_scope_begin_as(ctx, "attention", again == 1);
    luna_tensor *y = block_attention(in[0], in[1], in[2], &c.config);
    luna_scope_end(scope, &y, 1);
    CHECK(y && luna_backward(common_loss(y, 5)) == LUNA_OK, "%s", luna_error(ctx));
    luna_read_grad(in[0], grad[again]);
    luna_close(ctx);
  }
  CHECK(memcmp(grad[0], grad[1], (size_t)c.q_count * sizeof(float)) == 0, "gradients differ where it is run again");
  free(grad[0]), free(grad[1]);
  call_free(&c);
}

int main(void) {
  check_dense(false);
  check_dense(true);
  check_one_tensor();
  check_empty_parts();
  check_recompute();
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
  return test_report("blocks");
}
