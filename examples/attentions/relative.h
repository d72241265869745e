/* relative.h: attention by relative position over memory and sequence, of transformer_xl.h and compressive.h
   (Dai et al., ACL 2019, arXiv 1901.02860).

     s_ij = ((q_i + r_w_bias) . k_j + (q_i + r_r_bias) . (r_proj rho(i - j))_head) / sqrt(d_h)
     for j <= i and i - j < window (0: all)
     rho(t) = [sin(t w), cos(t w)],  w_a = 10000^(-2a/d), a < d/2
   q from x, k and v from C = [memory; x]; positions are counted in C. Projections without biases.
   Parameters: q_proj, k_proj, v_proj, out_proj, r_proj [d,d]; r_w_bias, r_r_bias [h,d_h]; all N(0, 0.02).
   For a block of queries (q + r_r_bias) times all distances is one product, whose rows are then shifted. */
#ifndef ATTENTION_RELATIVE_H
#define ATTENTION_RELATIVE_H
#include "scored.h"

typedef struct relative { luna_tensor *q, *k, *v, *out, *r, *r_w_bias, *r_r_bias; } relative;
static void relative_init(attention *a, relative *p) {
  const int64_t d = a->dim, h = a->heads;
  p->q = attention_param(a, "q_proj.weight", LUNA_INIT_NORMAL, 0.02, d, d, 0, 0);
  p->k = attention_param(a, "k_proj.weight", LUNA_INIT_NORMAL, 0.02, d, d, 0, 0);
  p->v = attention_param(a, "v_proj.weight", LUNA_INIT_NORMAL, 0.02, d, d, 0, 0);
  p->out = attention_param(a, "out_proj.weight", LUNA_INIT_NORMAL, 0.02, d, d, 0, 0);
  p->r = attention_param(a, "r_proj.weight", LUNA_INIT_NORMAL, 0.02, d, d, 0, 0);
  p->r_w_bias = attention_param(a, "r_w_bias", LUNA_INIT_NORMAL, 0.02, h, d / h, 0, 0);
  p->r_r_bias = attention_param(a, "r_r_bias", LUNA_INIT_NORMAL, 0.02, h, d / h, 0, 0);
  attention_require(a, d % 2 == 0, "relative positions need an even dim");
}

/* ---- scores of a block ---- */
enum { RELATIVE_QW = SCORED_FIRST, RELATIVE_QR, RELATIVE_K, RELATIVE_R, RELATIVE_INPUTS }; /* r [1,distances,d] */
/* distance 0's place in row i of the block's product with r, and one less to the left for each: column past + i - j */
ATTENTION_FN int64_t relative_distances(const scored_head *h, int64_t first, int64_t rows, int64_t from) {
  return h->s->past + first + rows - from;
}
ATTENTION_FN const float *relative_r(const scored_head *h) { return h->in[RELATIVE_R]->data + h->h * h->dh; }
ATTENTION_FN void relative_scores(const scored_head *h, int64_t first, int64_t rows, int64_t from, int64_t to) {
  const luna_tensor *qw = h->in[RELATIVE_QW], *qr = h->in[RELATIVE_QR], *k = h->in[RELATIVE_K];
  const int64_t reach = relative_distances(h, first, rows, from);
  const float scale = (float)(1 / sqrt((double)h->dh));
  attention_gemm(h->gemm, qw->data + scored_at(h, qw, first), h->d, false, k->data + scored_at(h, k, from), h->d, true,
                 h->p + from, h->m, rows, to - from, h->dh, false);
  attention_gemm(h->gemm, qr->data + scored_at(h, qr, first), h->d, false, relative_r(h), h->d, true, h->extra, h->m,
                 rows, reach, h->dh, false);
  for (int64_t i = 0; i < rows; i++)
    for (int64_t j = from; j < scored_to(h, first + i); j++)
      h->p[i * h->m + j] = scale * (h->p[i * h->m + j] + h->extra[i * h->m + h->s->past + first + i - j]);
}
ATTENTION_FN void relative_backward(scored_head *h, int64_t first, int64_t rows, int64_t from, int64_t to) {
  luna_tensor *qw = h->in[RELATIVE_QW], *qr = h->in[RELATIVE_QR], *k = h->in[RELATIVE_K], *r = h->in[RELATIVE_R];
  const int64_t reach = relative_distances(h, first, rows, from), q = scored_at(h, qw, first),
      key = scored_at(h, k, from);
  const float scale = (float)(1 / sqrt((double)h->dh));
  for (int64_t i = 0; i < rows; i++) {
    memset(h->extra + i * h->m, 0, (size_t)reach * sizeof(float));
    for (int64_t j = from; j < to; j++) h->grad[i * h->m + j] *= scale;
    for (int64_t j = from; j < scored_to(h, first + i); j++)
      h->extra[i * h->m + h->s->past + first + i - j] = h->grad[i * h->m + j];
  }
  if (qw->grad)
    attention_gemm(h->gemm, h->grad + from, h->m, false, k->data + key, h->d, false, qw->grad + q, h->d, rows, h->dh,
                   to - from, true);
  if (k->grad)
    attention_gemm(h->gemm, h->grad + from, h->m, true, qw->data + q, h->d, false, k->grad + key, h->d, to - from,
                   h->dh, rows, true);
  if (qr->grad)
    attention_gemm(h->gemm, h->extra, h->m, false, relative_r(h), h->d, false, qr->grad + q, h->d, rows, h->dh, reach,
                   true);
  if (r->grad)
    attention_gemm(h->gemm, h->extra, h->m, true, qr->data + q, h->d, false, r->grad + h->h * h->dh, h->d, reach, h->dh,
                   rows, true);
}

/* rho(0..count-1) [count,d] */
ATTENTION_FN luna_tensor *relative_rho(luna_ctx *ctx, int64_t count, int64_t d) {
  const int64_t shape[2] = { count, d };
  float *values = (float *)malloc((size_t)(count * d + 1) * sizeof(float));
  luna_tensor *t = NULL;
  for (int64_t i = 0; values && i < count * d; i++) {
    const double angle = (double)(i / d) * pow(10000.0, -2.0 * (double)(i % d % (d / 2)) / (double)d);
    values[i] = (float)(i % d < d / 2 ? sin(angle) : cos(angle));
  }
  if (values) t = luna_tensor_new(ctx, values, 2, shape);
  free(values);
  return t;
}
/* q [batch,n,d] of x; past [batch,M,d] as the projections read it, or null -> y [batch,n,d] */
ATTENTION_FN luna_tensor *relative_forward(const attention *a, const relative *p, luna_tensor *x, luna_tensor *q,
                                           luna_tensor *past, int64_t window, const int32_t *lengths) {
  const int64_t d = a->dim, n = x->shape[1], m = past ? past->shape[1] : 0;
  luna_tensor *in[RELATIVE_INPUTS + 1], *parts[2], *c = x;
  scored s;
  parts[0] = past, parts[1] = x;
  if (past) c = luna_concat(parts, 2, 1);
  memset(&s, 0, sizeof s);
  s.heads = a->heads, s.past = m, s.window = window, s.causal = true;
  s.extra = SCORED_ROWS * (m + n);
  s.scores = relative_scores, s.backward = relative_backward;
  in[SCORED_V] = luna_linear(c, p->v, NULL);
  in[RELATIVE_QW] = luna_add(q, luna_reshape(p->r_w_bias, 1, &d));
  in[RELATIVE_QR] = luna_add(q, luna_reshape(p->r_r_bias, 1, &d));
  in[RELATIVE_K] = luna_linear(c, p->k, NULL);
  in[RELATIVE_R] = luna_linear(relative_rho(x->ctx, m + n, d), p->r, NULL);
  return luna_linear(scored_attention(x, lengths, in, RELATIVE_INPUTS, &s, sizeof s, a->dropout), p->out, NULL);
}

/* ---- memories of the layer's inputs ---- */
/* what attention reads of a memory of inputs: normed where the layer norms its own input */
ATTENTION_FN luna_tensor *relative_read(const luna_attention_call *call, luna_tensor *memory) {
  return memory && call->norm ? luna_norm_layer_forward(call->norm, memory) : memory;
}
/* [memory; the layer's input] */
ATTENTION_FN luna_tensor *relative_inputs(const luna_attention_call *call, luna_tensor *memory) {
  luna_tensor *parts[2];
  parts[0] = memory, parts[1] = luna_detach(luna_mask(call->input, call->lengths));
  return memory ? luna_concat(parts, 2, 1) : parts[1];
}
/* where each sequence of it ends, [batch], for free(); the first one to end, in *first */
ATTENTION_FN int32_t *relative_ends(const luna_attention_call *call, const luna_tensor *memory, int64_t *first) {
  const int64_t batch = call->x->shape[0], past = memory ? memory->shape[1] : 0;
  int32_t *ends = (int32_t *)malloc((size_t)(4 * batch + 1) * sizeof(int32_t)); /* room for compressive.h's */
  *first = past + call->x->shape[1];
  for (int64_t b = 0; ends && b < batch; b++) {
    ends[b] = (int32_t)(past + (call->lengths ? call->lengths[b] : call->x->shape[1]));
    if (ends[b] < *first) *first = ends[b];
  }
  return ends;
}
/* rows that a memory keeps: as many as it had, or the option's, if there are so many */
ATTENTION_FN int64_t relative_kept(const luna_tensor *memory, int64_t option, int64_t rows) {
  const int64_t wanted = option > 0 ? option : memory ? memory->shape[1] : 0;
  return wanted < rows ? wanted : rows;
}
#endif
