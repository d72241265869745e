/* sorting.h: what sinkhorn.h is made of, as custom ops: blocks' sums of keys, the order P of blocks, sorting by it */
#ifndef ATTENTION_SORTING_H
#define ATTENTION_SORTING_H
#include "base.h"

/* what the ops know */
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
static luna_status sinkhorn_sums_forward(const luna_tensor *const *in, int count, luna_tensor *out, void *state) {
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
  return LUNA_OK;
}
static luna_status sinkhorn_sums_backward(luna_tensor *const *in, int count, const luna_tensor *out, void *state) {
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
  return LUNA_OK;
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
static luna_status sinkhorn_order_forward(const luna_tensor *const *in, int count, luna_tensor *out, void *state) {
  (void)count;
  sinkhorn_order_run(in[0], in[1], out, state, false);
  return LUNA_OK;
}
static luna_status sinkhorn_order_backward(luna_tensor *const *in, int count, const luna_tensor *out, void *state) {
  (void)count;
  sinkhorn_order_run(in[0], in[1], out, state, true);
  return LUNA_OK;
}

/* ---- sorting: in P, x [batch,n,d], lengths; out [batch, blocks w, d], block i's slot s: sum_j P_ij x[j,s]. A product
   for the slots that the last block fills and one for those it does not; causal: sixteen blocks at a time see the
   blocks before them, and each of them its own, so that no later block is read. ---- */
typedef struct sinkhorn_sort_work {
  const sinkhorn_state *s;
  const luna_tensor *p, *x, *lengths, *out;
  luna_run run;
  size_t each;
  bool backward;
} sinkhorn_sort_work;
/* The products of `slots` slots of one head, whose blocks are w d floats apart and slots d: of the result, sorted =
   P x; of x's gradient, P^T sorted; and, slot by slot, of P's, sorted x^T. m blocks are sorted, out of `filled`. */
enum { SINKHORN_RESULT, SINKHORN_GRAD_X, SINKHORN_GRAD_P };
static luna_gemm_args sinkhorn_product(const sinkhorn_state *s, int which, const float *a, const float *b, float *c,
                                       int64_t m, int64_t filled, int64_t slots) {
  const int64_t row = s->block * s->heads * s->width, slot = s->heads * s->width;
  luna_gemm_args g;
  memset(&g, 0, sizeof g);
  g.a = a, g.b = b, g.c = c;
  g.m = which == SINKHORN_GRAD_X ? filled : m;
  g.n = which == SINKHORN_GRAD_P ? filled : s->width;
  g.k = which == SINKHORN_RESULT ? filled : which == SINKHORN_GRAD_X ? m : s->width;
  g.transpose_a = which == SINKHORN_GRAD_X, g.transpose_b = which == SINKHORN_GRAD_P;
  g.a_row = which == SINKHORN_GRAD_P ? row : s->blocks, g.b_row = row,
      g.c_row = which == SINKHORN_GRAD_P ? s->blocks : row;
  g.batch = which == SINKHORN_GRAD_P ? 1 : slots;
  if (which != SINKHORN_GRAD_P) g.a_batch = LUNA_BATCH_SHARED, g.b_batch = g.c_batch = slot;
  return g;
}
static void sinkhorn_multiply(luna_gemm_args g, const luna_run *run, bool accumulate) {
  g.run = *run;
  g.accumulate = accumulate;
  if (g.m > 0 && g.n > 0 && g.k > 0 && g.batch > 0) (void)luna_gemm_f32(&g);
}
static void sinkhorn_sort_slots(const sinkhorn_sort_work *w, const luna_run *run, int64_t pair, int64_t slot,
                                int64_t slots, int64_t m, int64_t filled) {
  const sinkhorn_state *s = w->s;
  const int64_t d = s->heads * s->width, b = pair / s->heads, column = pair % s->heads * s->width + slot * d,
      nb = s->blocks, row = s->block * d;
  const float *p = w->p->data + pair * nb * nb, *x = w->x->data + b * s->n * d + column;
  float *out = (w->backward ? w->out->grad : w->out->data) + b * nb * row + column;
  for (int64_t i = 0; !w->backward && i < m; i += s->causal ? 16 : m) {
    const int64_t end = s->causal ? sinkhorn_min(i + 16, m) : m, before = s->causal ? i : filled;
    sinkhorn_multiply(sinkhorn_product(s, SINKHORN_RESULT, p + i * nb, x, out + i * row, end - i, before, slots), run,
                      false);
    for (int64_t r = i + 1; s->causal && r < end; r++)
      sinkhorn_multiply(sinkhorn_product(s, SINKHORN_RESULT, p + r * nb + i, x + i * row, out + r * row, 1, r - i,
                                         slots),
                        run, i > 0);
  }
  if (w->backward && w->x->grad)
    sinkhorn_multiply(sinkhorn_product(s, SINKHORN_GRAD_X, p, out, w->x->grad + b * s->n * d + column, m, filled,
                                       slots),
                      run, true);
  for (int64_t i = 0; w->backward && w->p->grad && i < slots; i++)
    sinkhorn_multiply(sinkhorn_product(s, SINKHORN_GRAD_P, out + i * d, x + i * d, w->p->grad + pair * nb * nb, m,
                                       filled, 1),
                      run, true);
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
  size_t room = 0;
  for (int which = 0; which < 3; which++) {
    const luna_gemm_args g = sinkhorn_product(s, which, NULL, NULL, NULL, s->blocks, s->blocks, s->block);
    const size_t need = luna_gemm_scratch(&g);
    if (need > room) room = need;
  }
  return (room + 63) / 64 * 64;
}
static void sinkhorn_sort_run(const luna_tensor *const *in, const luna_tensor *out, const void *state, bool backward) {
  sinkhorn_sort_work w;
  w.s = (const sinkhorn_state *)state;
  w.p = in[0], w.x = in[1], w.lengths = in[2], w.out = out, w.backward = backward;
  w.run = luna_custom_run(out);
  w.each = sinkhorn_sort_room(w.s);
  attention_parallel(&w.run, SINKHORN_TASKS, sinkhorn_sort_task, &w);
}
static luna_status sinkhorn_sort_forward(const luna_tensor *const *in, int count, luna_tensor *out, void *state) {
  (void)count;
  memset(out->data, 0, (size_t)luna_count(out) * sizeof(float));
  sinkhorn_sort_run(in, out, state, false);
  return LUNA_OK;
}
static luna_status sinkhorn_sort_backward(luna_tensor *const *in, int count, const luna_tensor *out, void *state) {
  (void)count;
  sinkhorn_sort_run((const luna_tensor *const *)in, out, state, true);
  return LUNA_OK;
}
#endif
