/* scored.h: softmax attention over scores of any kind, forward and backward: the kernel of synthesizer.h and
   relative.h.

     y_i = sum_j softmax_j(s_ij) v_j over the keys that query i sees
     these are: all; causal: j <= past + i; window: past + i - j < window
   v [batch,m,d], of which the first past + length rows are real. By blocks of 64 queries: a system fills a block's
   scores and takes their gradients, so that no [n,m] matrix is stored. Heads are shared out to threads. */
#ifndef ATTENTION_SCORED_H
#define ATTENTION_SCORED_H
#include "base.h"

#define SCORED_ROWS 64
enum { SCORED_LENGTHS, SCORED_V, SCORED_FIRST }; /* inputs of the op; then the system's */
typedef struct scored_head scored_head;
typedef struct scored {              /* the first member of a system's state */
  int64_t heads, past, window;
  bool causal;
  int mask;                          /* the place of the dropout mask [batch,h,n,m] among the inputs; 0: none */
  int64_t extra, each;               /* floats that a block of the system needs; bytes of workspace a head */
  /* scores of queries first.. and keys from..to-1 -> h->p[row * m + key] */
  void (*scores)(const scored_head *h, int64_t first, int64_t rows, int64_t from, int64_t to);
  /* the same places of h->grad, zeros where nothing is seen, -> added to the inputs' gradients */
  void (*backward)(scored_head *h, int64_t first, int64_t rows, int64_t from, int64_t to);
  void (*finish)(scored_head *h);    /* after a head's last block, or null */
} scored;
struct scored_head {                 /* one head of one sequence */
  const scored *s;
  luna_tensor *const *in;
  const luna_tensor *out;
  int64_t b, h, n, m, d, dh, length; /* length: real queries */
  float *p, *grad, *extra;           /* [64,m], [64,m]; the system's */
  double slope[8];                   /* the system's, zeros before a head's first block */
  luna_run gemm;
};
typedef struct scored_call {
  const scored *s; luna_tensor *const *in; const luna_tensor *out; luna_run run;
} scored_call;

ATTENTION_FN int64_t scored_from(const scored_head *h, int64_t i) {
  const int64_t from = h->s->past + i + 1 - h->s->window;
  return h->s->window > 0 && from > 0 ? from : 0;
}
ATTENTION_FN int64_t scored_to(const scored_head *h, int64_t i) {
  return h->s->past + (h->s->causal ? i + 1 : h->length);
}
/* the first element of this head in row i of a tensor [batch,rows,d] */
ATTENTION_FN int64_t scored_at(const scored_head *h, const luna_tensor *t, int64_t i) {
  return (h->b * t->shape[1] + i) * h->d + h->h * h->dh;
}

ATTENTION_FN void scored_open(const scored_call *c, scored_head *h, int64_t head, int64_t b) {
  h->s = c->s, h->in = c->in, h->out = c->out;
  h->b = b, h->h = head, h->n = c->out->shape[1], h->m = c->in[SCORED_V]->shape[1], h->d = c->out->shape[2],
      h->dh = h->d / c->s->heads;
  h->length = attention_length(c->in[SCORED_LENGTHS], b);
  h->p = (float *)(void *)((char *)c->run.scratch + head * c->s->each);
  h->grad = h->p + SCORED_ROWS * h->m, h->extra = h->grad + SCORED_ROWS * h->m;
  h->gemm = c->run;
  h->gemm.parallel_for = NULL;
  h->gemm.scratch = h->extra + c->s->extra;
  h->gemm.scratch_size = (size_t)(c->s->each - ((char *)h->gemm.scratch - (char *)h->p));
}
/* scores -> attention matrix, zeros where nothing is seen */
ATTENTION_FN void scored_softmax(scored_head *h, int64_t first, int64_t rows, int64_t from, int64_t to) {
  h->s->scores(h, first, rows, from, to);
  for (int64_t i = 0; i < rows; i++) {
    float *p = h->p + i * h->m, max = -HUGE_VALF;
    const int64_t a = scored_from(h, first + i), b = scored_to(h, first + i);
    for (int64_t j = a; j < b; j++) if (p[j] > max) max = p[j];
    for (int64_t j = a; j < b; j++) p[j] = expf(p[j] - max);
    const float share = (float)(1 / attention_sum(p + a, b - a));
    for (int64_t j = a; j < b; j++) p[j] *= share;
    for (int64_t j = from; j < a; j++) p[j] = 0;
    for (int64_t j = b; j < to; j++) p[j] = 0;
  }
}
ATTENTION_FN void scored_mask(const scored_head *h, int64_t first, int64_t rows, float *x) {
  const float *mask = h->s->mask ? h->in[h->s->mask]->data + ((h->b * h->s->heads + h->h) * h->n + first) * h->m : NULL;
  for (int64_t i = 0; mask && i < rows * h->m; i++) x[i] *= mask[i];
}
/* a block's output; what it does not see, which may be Inf, is not multiplied by 0 */
ATTENTION_FN void scored_forward_rows(scored_head *h, int64_t first, int64_t rows, int64_t from, int64_t to) {
  const int64_t known = h->s->causal ? h->s->past + first : to; /* keys that all rows but for their windows see */
  const float *v = h->in[SCORED_V]->data + scored_at(h, h->in[SCORED_V], 0);
  float *y = h->out->data + scored_at(h, h->out, first);
  if (known > from)
    attention_gemm(h->gemm, h->p + from, h->m, false, v + from * h->d, h->d, false, y, h->d, rows, h->dh, known - from,
                   false);
  for (int64_t i = 0, next = known; i < rows && known < to; i++) {
    if (i % 16 == 0 && i > 0) {
      attention_gemm(h->gemm, h->p + i * h->m + known, h->m, false, v + known * h->d, h->d, false, y + i * h->d, h->d,
                     rows - i < 16 ? rows - i : 16, h->dh, i, true);
      next = known + i;
    }
    for (int64_t j = next; j <= known + i; j++)
      for (int64_t e = 0; e < h->dh; e++) y[i * h->d + e] += h->p[i * h->m + j] * v[j * h->d + e];
  }
}
ATTENTION_FN void scored_backward_rows(scored_head *h, int64_t first, int64_t rows, int64_t from, int64_t to) {
  const int64_t v = scored_at(h, h->in[SCORED_V], from);
  const float *g = h->out->grad + scored_at(h, h->out, first);
  attention_gemm(h->gemm, g, h->d, false, h->in[SCORED_V]->data + v, h->d, true, h->grad + from, h->m, rows, to - from,
                 h->dh, false);
  scored_mask(h, first, rows, h->grad);
  for (int64_t i = 0; i < rows; i++) {
    float *p = h->p + i * h->m, *grad = h->grad + i * h->m;
    /* y's product with its gradient, but of the numbers that it is subtracted from: of few keys little is left */
    const double dot = attention_dot(p + from, grad + from, to - from);
    for (int64_t j = from; j < to; j++) grad[j] = p[j] * (grad[j] - (float)dot);
  }
  h->s->backward(h, first, rows, from, to);
  scored_mask(h, first, rows, h->p);
  if (!h->in[SCORED_V]->grad) return;
  attention_gemm(h->gemm, h->p + from, h->m, true, g, h->d, false, h->in[SCORED_V]->grad + v, h->d, to - from, h->dh,
                 rows, true);
}
/* one head of all sequences, in order, for they may share parameters */
ATTENTION_FN void scored_head_run(const scored_call *c, int64_t head, bool backward) {
  scored_head h;
  memset(h.slope, 0, sizeof h.slope);
  for (int64_t b = 0; b < c->out->shape[0]; b++) {
    scored_open(c, &h, head, b);
    for (int64_t i = 0; !backward && i < h.n; i++)
      memset(h.out->data + scored_at(&h, h.out, i), 0, (size_t)h.dh * sizeof(float));
    for (int64_t first = 0; first < h.length; first += SCORED_ROWS) {
      const int64_t rows = h.length - first < SCORED_ROWS ? h.length - first : SCORED_ROWS;
      const int64_t from = scored_from(&h, first), to = scored_to(&h, first + rows - 1);
      scored_softmax(&h, first, rows, from, to);
      if (backward) scored_backward_rows(&h, first, rows, from, to);
      else scored_mask(&h, first, rows, h.p), scored_forward_rows(&h, first, rows, from, to);
    }
  }
  if (backward && c->s->finish) c->s->finish(&h);
}
ATTENTION_FN void scored_forward_head(void *work, int64_t head) {
  scored_head_run((const scored_call *)work, head, false);
}
ATTENTION_FN void scored_backward_head(void *work, int64_t head) {
  scored_head_run((const scored_call *)work, head, true);
}
ATTENTION_FN luna_status scored_forward(const luna_tensor *const *in, int count, luna_tensor *out, void *state) {
  scored_call c;
  (void)count;
  c.s = (const scored *)state, c.in = (luna_tensor *const *)(uintptr_t)in, c.out = out, c.run = luna_custom_run(out);
  attention_parallel(&c.run, c.s->heads, scored_forward_head, &c);
  return LUNA_OK;
}
ATTENTION_FN luna_status scored_backward(luna_tensor *const *in, int count, const luna_tensor *out, void *state) {
  scored_call c;
  (void)count;
  c.s = (const scored *)state, c.in = in, c.out = out, c.run = luna_custom_run(out);
  attention_parallel(&c.run, c.s->heads, scored_backward_head, &c);
  return LUNA_OK;
}
/* in: room for one input more than count, of which [SCORED_LENGTHS] is filled in here; s: the system's state, of
   state_size bytes. -> y [batch,n,d] of x's shape */
ATTENTION_FN luna_tensor *scored_attention(luna_tensor *x, const int32_t *lengths, luna_tensor **in, int count,
                                           scored *s, size_t state_size, float dropout) {
  luna_tensor *const v = in[SCORED_V];
  int64_t shape[4], m, dh, wide;
  size_t bytes, other;
  if (!x || !v) return NULL;
  shape[0] = x->shape[0], shape[1] = s->heads, shape[2] = x->shape[1], shape[3] = m = v->shape[1];
  dh = x->shape[2] / s->heads;
  wide = m > SCORED_ROWS ? m : SCORED_ROWS;
  in[SCORED_LENGTHS] = attention_lengths(x, lengths);
  if (dropout > 0) in[s->mask = count++] = luna_dropout(luna_as_part(attention_filled(x->ctx, 1, 4, shape)), dropout);
  bytes = attention_gemm_scratch(SCORED_ROWS, wide, dh), other = attention_gemm_scratch(SCORED_ROWS, dh, wide);
  if (other > bytes) bytes = other;
  if ((other = attention_gemm_scratch(wide, dh, SCORED_ROWS)) > bytes) bytes = other;
  s->each = (int64_t)((bytes + 127) / 64 * 64) + ((2 * SCORED_ROWS * m + s->extra) * (int64_t)sizeof(float) + 63) / 64 *
      64;
  return attention_op(in, count, 3, x->shape, scored_forward, scored_backward, s, state_size,
                      (size_t)(s->each * s->heads));
}
#endif
