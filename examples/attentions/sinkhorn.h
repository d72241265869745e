/* Sinkhorn attention: Tay et al. 2020, arXiv 2002.11296. Blocks of w tokens; of each head:
     r_i = sum of block i's keys;   R_ij = (sort(r_i)_j + gumbel_ij) / temperature
     sinkhorn: `iterations` times R -= logsumexp over j, R -= logsumexp over i; P = exp(R)
     softmax: P = softmax over j
     sorted keys of block i, slot s: sum_j P_ij k[j,s]; values likewise
     y = one softmax over block i's own keys and its sorted keys (joint), or two attentions, added (sum)
   Causal: r_i = sum of the keys up to the first token of block i; P = softmax over j < i; own keys j <= i.
   Options: block (w), max_blocks, sort, iterations, temperature, combine, gumbel: training adds base.noise
   [batch, h, max_blocks, max_blocks], which the caller draws, -log(-log u), and sets after each begin (null: none).
   Parameters: sort.weight [max_blocks, d_h], sort.bias. Cost a token: O(w d + n/w d), memory O(w + n/w^2). */
#ifndef ATTENTION_SINKHORN_H
#define ATTENTION_SINKHORN_H
#include "pattern.h"

enum { SINKHORN_SINKHORN, SINKHORN_SOFTMAX, SINKHORN_JOINT = 0, SINKHORN_SUM };
typedef struct sinkhorn {
  attention base;
  int64_t block, max_blocks, sort, iterations, combine, gumbel;
  double temperature;
  attention_projections p;
  luna_linear_layer order;
} sinkhorn;
static const attention_option sinkhorn_options[] = {
  { "block", ATTENTION_COUNT, offsetof(sinkhorn, block), "64" },
  { "max_blocks", ATTENTION_COUNT, offsetof(sinkhorn, max_blocks), "64" },
  { "sort", ATTENTION_WORD, offsetof(sinkhorn, sort), "sinkhorn|softmax" },
  { "iterations", ATTENTION_COUNT, offsetof(sinkhorn, iterations), "7" },
  { "temperature", ATTENTION_NUMBER, offsetof(sinkhorn, temperature), "0.75" },
  { "combine", ATTENTION_WORD, offsetof(sinkhorn, combine), "joint|sum" },
  { "gumbel", ATTENTION_FLAG, offsetof(sinkhorn, gumbel), "false" },
  ATTENTION_LAST_OPTION
};
static void sinkhorn_init(void *layer) {
  sinkhorn *a = (sinkhorn *)layer;
  attention_require(&a->base, a->block > 0 && a->max_blocks > 0, "sinkhorn: block and max_blocks must be above 0");
  attention_require(&a->base, a->temperature > 0, "sinkhorn: temperature must be above 0");
  attention_projections_init(&a->base, &a->p);
  attention_linear(&a->base, &a->order, "sort", a->base.dim / a->base.heads, a->max_blocks, ATTENTION_GAIN);
}

/* what the custom ops below know */
typedef struct sinkhorn_state {
  int64_t batch, n, heads, width, block, blocks, iterations; /* iterations -1: softmax */
  double temperature;
  bool causal;
} sinkhorn_state;
static int64_t sinkhorn_min(int64_t x, int64_t y) { return x < y ? x : y; }
static int64_t sinkhorn_blocks(const sinkhorn_state *s, const luna_tensor *lengths, int64_t b) {
  return (attention_length(lengths, b) + s->block - 1) / s->block;
}

/* ---- r: in k [batch,n,d], lengths; out [batch, blocks, d]; workspace: d doubles ---- */
static void sinkhorn_sums_forward(const luna_tensor *const *in, int count, luna_tensor *out, void *state) {
  const sinkhorn_state *s = (const sinkhorn_state *)state;
  const int64_t d = s->heads * s->width;
  double *sum = (double *)luna_custom_run(out).scratch;
  (void)count;
  memset(out->data, 0, (size_t)luna_count(out) * sizeof(float));
  for (int64_t b = 0; b < s->batch; b++)
    for (int64_t i = 0; i < attention_length(in[1], b); i++) {
      const float *k = in[0]->data + (b * s->n + i) * d;
      float *r = out->data + (b * s->blocks + i / s->block) * d;
      const bool first = i % s->block == 0;
      if (i == 0 || (first && !s->causal)) memset(sum, 0, (size_t)d * sizeof *sum);
      for (int64_t c = 0; c < d; c++) sum[c] += (double)k[c];
      for (int64_t c = 0; (first || !s->causal) && c < d; c++) r[c] = (float)sum[c];
    }
}
static void sinkhorn_sums_backward(luna_tensor *const *in, int count, const luna_tensor *out, void *state) {
  const sinkhorn_state *s = (const sinkhorn_state *)state;
  const int64_t d = s->heads * s->width;
  double *sum = (double *)luna_custom_run(out).scratch;
  (void)count;
  for (int64_t b = 0; in[0]->grad && b < s->batch; b++) {
    memset(sum, 0, (size_t)d * sizeof *sum);
    /* causal: token i is in the sums that end at or after it */
    for (int64_t i = attention_length(in[1], b) - 1; i >= 0; i--) {
      const float *r = out->grad + (b * s->blocks + i / s->block) * d;
      float *k = in[0]->grad + (b * s->n + i) * d;
      for (int64_t c = 0; s->causal && i % s->block == 0 && c < d; c++) sum[c] += (double)r[c];
      for (int64_t c = 0; c < d; c++) k[c] += s->causal ? (float)sum[c] : r[c];
    }
  }
}

/* ---- P: in R [batch, h, blocks, blocks], lengths; out P, zeros beyond a sequence's blocks ---- */
/* x [m, m] minus the log-sum-exp of its rows, or columns; causal: over j < i */
static void sinkhorn_normalise(double *x, int64_t m, bool columns, bool causal) {
  const int64_t step = columns ? m : 1, next = columns ? 1 : m;
  for (int64_t i = 0; i < m; i++) {
    double *line = x + i * next, max = -INFINITY, sum = 0;
    const int64_t count = causal ? i : m;
    for (int64_t j = 0; j < count; j++) if (!(line[j * step] <= max)) max = line[j * step];
    for (int64_t j = 0; j < count; j++) sum += exp(line[j * step] - max);
    for (int64_t j = 0; j < count; j++) line[j * step] -= max + log(sum);
  }
}
/* through one normalisation, whose result is y: g -= exp(y) * sum of g over the line */
static void sinkhorn_normalise_backward(const double *y, double *g, int64_t m, bool columns, bool causal) {
  const int64_t step = columns ? m : 1, next = columns ? 1 : m;
  for (int64_t i = 0; i < m; i++) {
    const int64_t count = causal ? i : m;
    double sum = 0;
    for (int64_t j = 0; j < count; j++) sum += g[i * next + j * step];
    for (int64_t j = 0; j < count; j++) g[i * next + j * step] -= exp(y[i * next + j * step]) * sum;
  }
}
/* one head's steps from r on: x [steps][m, m] gets each one's result, or only the last; returns that */
static double *sinkhorn_steps(const sinkhorn_state *s, const float *r, int64_t m, bool all, double *x) {
  const int64_t steps = s->iterations < 0 ? 1 : 2 * s->iterations;
  for (int64_t i = 0; i < m * m; i++) x[i] = (double)r[i / m * s->blocks + i % m] / s->temperature;
  for (int64_t t = 0; t < steps; t++) {
    if (t && all) x = (double *)memcpy(x + m * m, x, (size_t)(m * m) * sizeof(double));
    sinkhorn_normalise(x, m, t % 2 == 1, s->causal);
  }
  return x;
}
enum { SINKHORN_TASKS = 4 };
typedef struct sinkhorn_work {
  const sinkhorn_state *s;
  const luna_tensor *r, *lengths, *out;
  double *room;                      /* SINKHORN_TASKS times `each` */
  int64_t each;
  bool backward;
} sinkhorn_work;
static int64_t sinkhorn_room(const sinkhorn_state *s) { /* doubles */
  return (s->iterations < 1 ? 2 : 2 * s->iterations + 1) * s->blocks * s->blocks;
}
static void sinkhorn_order_pair(const sinkhorn_work *w, int64_t pair, double *room) {
  const int64_t nb = w->s->blocks, m = sinkhorn_blocks(w->s, w->lengths, pair / w->s->heads);
  const double *y = sinkhorn_steps(w->s, w->r->data + pair * nb * nb, m, w->backward, room);
  float *p = w->out->data + pair * nb * nb;
  double *g = room + w->each - nb * nb;
  if (!w->backward) memset(p, 0, (size_t)(nb * nb) * sizeof(float));
  for (int64_t i = 0; i < m; i++)
    for (int64_t j = 0; j < m; j++) {
      const bool sorted = !w->s->causal || j < i;
      if (w->backward) g[i * m + j] = sorted ? (double)w->out->grad[(pair * nb + i) * nb + j] * exp(y[i * m + j]) : 0;
      else p[i * nb + j] = sorted ? (float)exp(y[i * m + j]) : 0;
    }
  if (!w->backward) return;
  for (int64_t t = w->s->iterations < 0 ? 0 : 2 * w->s->iterations - 1; t >= 0; t--, y -= m * m)
    sinkhorn_normalise_backward(y, g, m, t % 2 == 1, w->s->causal);
  for (int64_t i = 0; i < m; i++)
    for (int64_t j = 0; j < m; j++) w->r->grad[(pair * nb + i) * nb + j] += (float)(g[i * m + j] / w->s->temperature);
}
static void sinkhorn_order_task(void *work, int64_t task) {
  const sinkhorn_work *w = (const sinkhorn_work *)work;
  for (int64_t pair = task; pair < w->s->batch * w->s->heads; pair += SINKHORN_TASKS)
    sinkhorn_order_pair(w, pair, w->room + task * w->each);
}
static void sinkhorn_order_run(const luna_tensor *r, const luna_tensor *lengths, const luna_tensor *out,
                               const void *state, bool backward) {
  const luna_run run = luna_custom_run(out);
  sinkhorn_work w;
  w.s = (const sinkhorn_state *)state;
  w.r = r, w.lengths = lengths, w.out = out, w.backward = backward;
  w.room = (double *)run.scratch;
  w.each = sinkhorn_room(w.s);
  if (!backward || r->grad) attention_parallel(&run, SINKHORN_TASKS, sinkhorn_order_task, &w);
}
static void sinkhorn_order_forward(const luna_tensor *const *in, int count, luna_tensor *out, void *state) {
  (void)count;
  sinkhorn_order_run(in[0], in[1], out, state, false);
}
static void sinkhorn_order_backward(luna_tensor *const *in, int count, const luna_tensor *out, void *state) {
  (void)count;
  sinkhorn_order_run(in[0], in[1], out, state, true);
}

/* ---- sorting: in P, x [batch,n,d], lengths; out [batch, blocks w, d], block i's slot s: sum_j P_ij x[j,s]. A product
   for the slots that the last block fills and one for those it does not; causal: sixteen blocks at a time see the blocks
   before them, and each of them its own, so that no later block is read. ---- */
typedef struct sinkhorn_sort_work {
  const sinkhorn_state *s;
  const luna_tensor *p, *x, *lengths, *out;
  luna_run run;
  size_t each;
  bool backward;
} sinkhorn_sort_work;
/* C [m,n] (+)= A B for `batch` slots of one head: rows of blocks w d apart, slots d apart */
static luna_gemm_args sinkhorn_product(const sinkhorn_state *s, const float *p, const float *x, float *c, int64_t m,
                                       int64_t k, int64_t slots) {
  luna_gemm_args g;
  memset(&g, 0, sizeof g);
  g.a = p, g.b = x, g.c = c;
  g.m = m, g.n = s->width, g.k = k, g.batch = slots;
  g.a_row = s->blocks, g.a_batch = LUNA_SHARED;
  g.b_row = g.c_row = s->block * s->heads * s->width, g.b_batch = g.c_batch = s->heads * s->width;
  return g;
}
static void sinkhorn_multiply(luna_gemm_args g, const luna_run *run, bool accumulate) {
  g.run = *run;
  g.accumulate = accumulate;
  if (g.m > 0 && g.k > 0 && g.batch > 0) (void)luna_gemm_f32(&g);
}
static void sinkhorn_sort_slots(const sinkhorn_sort_work *w, const luna_run *run, int64_t pair, int64_t slot,
                                int64_t slots, int64_t m, int64_t filled) {
  const sinkhorn_state *s = w->s;
  const int64_t d = s->heads * s->width, b = pair / s->heads, column = pair % s->heads * s->width + slot * d,
      nb = s->blocks, row = s->block * d;
  const float *p = w->p->data + pair * nb * nb, *x = w->x->data + b * s->n * d + column;
  float *out = (w->backward ? w->out->grad : w->out->data) + b * nb * row + column;
  luna_gemm_args g;
  if (!w->backward && !s->causal) sinkhorn_multiply(sinkhorn_product(s, p, x, out, m, filled, slots), run, false);
  for (int64_t i = 0; !w->backward && s->causal && i < m; i += 16) {
    const int64_t end = sinkhorn_min(i + 16, m);
    sinkhorn_multiply(sinkhorn_product(s, p + i * nb, x, out + i * row, end - i, i, slots), run, false);
    for (int64_t r = i + 1; r < end; r++)
      sinkhorn_multiply(sinkhorn_product(s, p + r * nb + i, x + i * row, out + r * row, 1, r - i, slots), run, i > 0);
  }
  if (w->backward && w->x->grad) {
    g = sinkhorn_product(s, p, out, w->x->grad + b * s->n * d + column, filled, m, slots);
    g.transpose_a = true;
    sinkhorn_multiply(g, run, true);
  }
  for (int64_t i = 0; w->backward && w->p->grad && i < slots && filled > 0; i++) {
    g = sinkhorn_product(s, out + i * d, x + i * d, w->p->grad + pair * nb * nb, m, s->width, 1);
    g.n = filled, g.transpose_b = true;
    g.a_row = row, g.a_batch = 0, g.c_row = nb, g.c_batch = 0;
    sinkhorn_multiply(g, run, true);
  }
}
static void sinkhorn_sort_task(void *work, int64_t task) {
  const sinkhorn_sort_work *w = (const sinkhorn_sort_work *)work;
  const sinkhorn_state *s = w->s;
  luna_run run;
  memset(&run, 0, sizeof run);
  run.isa = w->run.isa;
  run.scratch = (char *)w->run.scratch + (size_t)task * w->each;
  run.scratch_size = w->each;
  for (int64_t pair = task; pair < s->batch * s->heads; pair += SINKHORN_TASKS) {
    const int64_t m = sinkhorn_blocks(s, w->lengths, pair / s->heads),
        last = attention_length(w->lengths, pair / s->heads) - (m - 1) * s->block;
    if (m == 0) continue;
    sinkhorn_sort_slots(w, &run, pair, 0, last, m, m);
    sinkhorn_sort_slots(w, &run, pair, last, s->block - last, m, m - 1);
  }
}
static size_t sinkhorn_sort_room(const sinkhorn_state *s) {
  luna_gemm_args g = sinkhorn_product(s, NULL, NULL, NULL, s->blocks, s->blocks, s->block);
  const size_t out = luna_gemm_scratch(&g);
  g.n = s->blocks, g.k = s->width, g.batch = 1, g.transpose_b = true, g.a_row = g.c_row = 0,
      g.a_batch = g.b_batch = g.c_batch = 0;
  const size_t slope = luna_gemm_scratch(&g);
  return ((out > slope ? out : slope) + 63) / 64 * 64;
}
static void sinkhorn_sort_run(const luna_tensor *const *in, const luna_tensor *out, const void *state, bool backward) {
  sinkhorn_sort_work w;
  w.s = (const sinkhorn_state *)state;
  w.p = in[0], w.x = in[1], w.lengths = in[2], w.out = out, w.backward = backward;
  w.run = luna_custom_run(out);
  w.each = sinkhorn_sort_room(w.s);
  attention_parallel(&w.run, SINKHORN_TASKS, sinkhorn_sort_task, &w);
}
static void sinkhorn_sort_forward(const luna_tensor *const *in, int count, luna_tensor *out, void *state) {
  (void)count;
  memset(out->data, 0, (size_t)luna_count(out) * sizeof(float));
  sinkhorn_sort_run(in, out, state, false);
}
static void sinkhorn_sort_backward(luna_tensor *const *in, int count, const luna_tensor *out, void *state) {
  (void)count;
  sinkhorn_sort_run((const luna_tensor *const *)in, out, state, true);
}

/* P [batch, h, blocks, blocks] */
static luna_tensor *sinkhorn_order(const sinkhorn *a, const sinkhorn_state *s, luna_tensor *k, luna_tensor *lengths) {
  const int64_t sums[3] = { s->batch, s->blocks, a->base.dim }, split[4] = { s->batch, s->blocks, s->heads, s->width };
  const int heads_first[4] = { 0, 2, 1, 3 };
  luna_tensor *in[2], *r, *noise = a->gumbel ? a->base.noise : NULL;
  in[0] = k, in[1] = lengths;
  r = attention_op(in, 2, 3, sums, sinkhorn_sums_forward, sinkhorn_sums_backward, s, sizeof *s,
                   (size_t)a->base.dim * sizeof(double));
  r = luna_linear(luna_reshape(r, 4, split), a->order.weight, a->order.bias);
  r = luna_permute(luna_slice(r, 3, 0, s->blocks), heads_first);
  if (noise) r = luna_add(r, luna_slice(luna_slice(noise, 2, 0, s->blocks), 3, 0, s->blocks));
  in[0] = r;
  return !r ? NULL : attention_op(in, 2, 4, r->shape, sinkhorn_order_forward, sinkhorn_order_backward, s, sizeof *s,
                                      SINKHORN_TASKS * (size_t)sinkhorn_room(s) * sizeof(double));
}
static luna_tensor *sinkhorn_sorted(const sinkhorn_state *s, luna_tensor *p, luna_tensor *x, luna_tensor *lengths) {
  const int64_t shape[3] = { s->batch, s->blocks * s->block, s->heads * s->width };
  luna_tensor *in[3];
  in[0] = p, in[1] = x, in[2] = lengths;
  return p ? attention_op(in, 3, 3, shape, sinkhorn_sort_forward, sinkhorn_sort_backward, s, sizeof *s,
                          SINKHORN_TASKS * sinkhorn_sort_room(s)) : NULL;
}

/* block i's queries see `own` keys, which begin at row `first` of k, and sorted ones, which begin at row 0 */
static luna_tensor *sinkhorn_attend(const sinkhorn *a, const sinkhorn_state *s, luna_tensor *q, luna_tensor *k,
                                    luna_tensor *v, const int32_t *lengths,
                                    bool own, bool sorted) {
  attention_patterns patterns = attention_patterns_open(lengths ? s->batch * s->heads : 1);
  const int64_t w = s->block, first = sorted ? s->blocks * w : 0;
  for (int64_t pair = 0; patterns.good && pair < patterns.count; pair++) {
    const int64_t n = lengths ? lengths[pair / s->heads] : s->n, blocks = (n + w - 1) / w;
    luna_attention_pattern *p = NULL;
    if (pair % s->heads) attention_pattern_repeat(&patterns, pair);
    else p = attention_pattern_lists(&patterns, pair, blocks, 2 * blocks, 0, 0);
    for (int64_t i = 0; p && i < blocks; i++) {
      const int64_t end = sinkhorn_min((i + 1) * w, n);
      if (sorted && (i > 0 || !s->causal)) attention_pattern_run(p, i * w, sinkhorn_min(w, n), true);
      if (own) attention_pattern_run(p, first + i * w, end - i * w, false);
      attention_pattern_block(p, end);
    }
    if (p && s->causal) attention_pattern_window(p, ATTENTION_UNLIMITED, first);
  }
  return attention_sparse(&a->base, q, k, v, &patterns, NULL, NULL);
}
static luna_tensor *sinkhorn_forward(void *layer, luna_attention_call *call) {
  const sinkhorn *a = (const sinkhorn *)layer;
  luna_tensor *x = call->x, *q = luna_linear_layer_forward(&a->p.q, x), *k = luna_linear_layer_forward(&a->p.k, x);
  luna_tensor *v = luna_linear_layer_forward(&a->p.v, x), *lengths = attention_lengths(x, call->lengths);
  luna_tensor *p, *keys[2], *values[2];
  sinkhorn_state s;
  memset(&s, 0, sizeof s);
  s.batch = x->shape[0], s.n = x->shape[1], s.heads = a->base.heads, s.width = a->base.dim / a->base.heads;
  s.block = a->block, s.blocks = (s.n + a->block - 1) / a->block;
  s.causal = call->causal, s.temperature = a->temperature,
      s.iterations = a->sort == SINKHORN_SOFTMAX || s.causal ? -1 : a->iterations;
  if (s.blocks > a->max_blocks) return attention_fail(x->ctx, &a->base, "the sequence has more than max_blocks blocks");
  if (!k || !v || !lengths) return NULL;
  p = sinkhorn_order(a, &s, k, lengths);
  keys[0] = sinkhorn_sorted(&s, p, k, lengths), keys[1] = k;
  values[0] = sinkhorn_sorted(&s, p, v, lengths), values[1] = v;
  if (!keys[0] || !values[0]) return NULL;
  if (a->combine == SINKHORN_SUM)
    x = luna_add(sinkhorn_attend(a, &s, q, k, v, call->lengths, true, false),
                 sinkhorn_attend(a, &s, q, keys[0], values[0], call->lengths, false, true));
  else x = sinkhorn_attend(a, &s, q, luna_concat(keys, 2, 1), luna_concat(values, 2, 1), call->lengths, true, true);
  return luna_linear_layer_forward(&a->p.out, x);
}
static const attention_system sinkhorn_system = {
  "sinkhorn", "Tay et al. 2020, arXiv 2002.11296", sizeof(sinkhorn), sinkhorn_options,
  sinkhorn_init, sinkhorn_forward, true, true
};
#endif
