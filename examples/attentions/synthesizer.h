/* synthesizer.h: Synthesizer (Tay et al., ICML 2021, arXiv 2005.00743).

     y = out_proj(softmax(S) v),   S [n,n] a head, a sum of terms, option terms: their names joined by "+"
     dense:             S_ij = W2_j . relu(dense1_proj(x_i))_head + b2_j
     factorized_dense:  S_ij = A_i[j / b] B_i[j mod b], A_i and B_i (a and b wide, a b = L) from the same hidden layer
     random:            S = random [h,L,L], trained;     factorized_random: S = random1 random2^T
     dot:               S = q k^T / sqrt(d_h)
     option mixture: term t has the weight softmax(mixture [h,terms])_t; else terms are added.
   L: option length, the longest sequence; S is cut to n x n. Causal: j <= i.
   Parameters: v_proj, out_proj; dense1_proj, dense2 (weight [h,L,d_h], bias [h,L]); dense_a, dense_b (weight [h,a,d_h],
   bias [h,a]); random; random1, random2 [h,L,k]; q_proj, k_proj; mixture. Time O(n^2 d), memory O(n^2 h), as the paper's. */
#ifndef ATTENTION_SYNTHESIZER_H
#define ATTENTION_SYNTHESIZER_H
#include "base.h"

enum { SYNTHESIZER_DOT, SYNTHESIZER_DENSE, SYNTHESIZER_FACTORIZED_DENSE, SYNTHESIZER_RANDOM, SYNTHESIZER_FACTORIZED_RANDOM, SYNTHESIZER_TERMS };
static const char *const synthesizer_names[SYNTHESIZER_TERMS] = { "dot", "dense", "factorized_dense", "random", "factorized_random" };
typedef struct synthesizer {
  attention base;
  char text[ATTENTION_TEXT_SIZE];
  int64_t length, k, a, b, mixed;
  int terms, term[SYNTHESIZER_TERMS];
  luna_linear_layer q, key, v, out, hidden, dense, dense_a, dense_b;
  luna_tensor *random, *random1, *random2, *mixture;
} synthesizer;
static const attention_option synthesizer_options[] = {
  { "terms", ATTENTION_TEXT, offsetof(synthesizer, text), "dense" },
  { "length", ATTENTION_COUNT, offsetof(synthesizer, length), "512" }, /* L */
  { "k", ATTENTION_COUNT, offsetof(synthesizer, k), "8" },             /* of factorized_random; LRA 32 */
  { "a", ATTENTION_COUNT, offsetof(synthesizer, a), "0" },             /* of factorized_dense; 0: the factor of L next to sqrt(L) */
  { "b", ATTENTION_COUNT, offsetof(synthesizer, b), "0" },             /* 0: L / a */
  { "mixture", ATTENTION_FLAG, offsetof(synthesizer, mixed), "false" },
  ATTENTION_LAST_OPTION
};

static bool synthesizer_parse(synthesizer *a) {
  const char *at = a->text;
  while (a->terms < SYNTHESIZER_TERMS) {
    const size_t size = strcspn(at, "+");
    int i = 0;
    while (i < SYNTHESIZER_TERMS && (strlen(synthesizer_names[i]) != size || memcmp(at, synthesizer_names[i], size) != 0)) i++;
    for (int j = 0; j < a->terms; j++) if (a->term[j] == i) return false;
    if (i == SYNTHESIZER_TERMS) return false;
    a->term[a->terms++] = i;
    if (!at[size]) return true;
    at += size + 1;
  }
  return false;
}
/* weight [h,width,d_h], Xavier, and bias [h,width] */
static void synthesizer_dense(synthesizer *a, luna_linear_layer *layer, const char *weight, const char *bias, int64_t width) {
  layer->weight = attention_param(&a->base, weight, LUNA_INIT_XAVIER, 1, a->base.heads, width, a->base.dim / a->base.heads, 0);
  layer->bias = attention_param(&a->base, bias, LUNA_INIT_ZEROS, 0, a->base.heads, width, 0, 0);
}
static void synthesizer_term_init(synthesizer *a, int term) {
  const int64_t d = a->base.dim, h = a->base.heads, l = a->length;
  if (term == SYNTHESIZER_DOT) {
    attention_linear(&a->base, &a->q, "q_proj", d, d, ATTENTION_GAIN);
    attention_linear(&a->base, &a->key, "k_proj", d, d, ATTENTION_GAIN);
  }
  if ((term == SYNTHESIZER_DENSE || term == SYNTHESIZER_FACTORIZED_DENSE) && !a->hidden.weight)
    attention_linear(&a->base, &a->hidden, "dense1_proj", d, d, 1);
  if (term == SYNTHESIZER_DENSE) synthesizer_dense(a, &a->dense, "dense2.weight", "dense2.bias", l);
  if (term == SYNTHESIZER_FACTORIZED_DENSE) {
    if (a->a == 0 && a->b > 0) a->a = l / a->b;
    for (int64_t i = 1; a->a == 0 || (a->b == 0 && i * i <= l && i <= a->a); i++) if (l % i == 0 && i * i <= l) a->a = i;
    if (a->b == 0) a->b = l / a->a;
    attention_require(&a->base, a->a * a->b == l, "synthesizer: a times b is not length");
    synthesizer_dense(a, &a->dense_a, "dense_a.weight", "dense_a.bias", a->a);
    synthesizer_dense(a, &a->dense_b, "dense_b.weight", "dense_b.bias", a->b);
  }
  if (term == SYNTHESIZER_RANDOM) a->random = attention_param(&a->base, "random", LUNA_INIT_XAVIER, 1, h, l, l, 0);
  if (term == SYNTHESIZER_FACTORIZED_RANDOM) {
    attention_require(&a->base, a->k > 0, "synthesizer: factorized_random needs k above 0");
    a->random1 = attention_param(&a->base, "random1", LUNA_INIT_XAVIER, 1, h, l, a->k, 0);
    a->random2 = attention_param(&a->base, "random2", LUNA_INIT_XAVIER, 1, h, l, a->k, 0);
  }
}
static void synthesizer_init(void *layer) {
  synthesizer *a = (synthesizer *)layer;
  attention_require(&a->base, synthesizer_parse(a), "synthesizer: terms are dot, dense, factorized_dense, random and "
                    "factorized_random, joined by + and each at most once");
  attention_require(&a->base, a->length > 0, "synthesizer: length must be above 0");
  attention_linear(&a->base, &a->v, "v_proj", a->base.dim, a->base.dim, ATTENTION_GAIN);
  attention_linear(&a->base, &a->out, "out_proj", a->base.dim, a->base.dim, 1);
  for (int i = 0; i < a->terms && a->base.good; i++) synthesizer_term_init(a, a->term[i]);
  if (a->mixed) a->mixture = attention_param(&a->base, "mixture", LUNA_INIT_ZEROS, 0, a->base.heads, a->terms, 0, 0);
}

/* ---- softmax(S) v as one op, by blocks of rows: S is stored as its terms, the softmax is not ---- */
#define SYNTHESIZER_ROWS 64
enum { SYNTHESIZER_LENGTHS, SYNTHESIZER_V, SYNTHESIZER_FIRST }; /* inputs; then each term's, mixture, mask */
typedef struct synthesizer_state {
  int terms, term[SYNTHESIZER_TERMS], at[SYNTHESIZER_TERMS], mixture, mask; /* places among the inputs; 0: none */
  int64_t heads, a;                  /* a: of factorized_dense, whose input is [batch,h,n,a + b] */
  bool causal;
} synthesizer_state;
typedef struct synthesizer_call {
  const synthesizer_state *s;
  luna_tensor *const *in;
  const luna_tensor *out;
  luna_run run;
} synthesizer_call;
typedef struct synthesizer_head { int64_t b, h, n, d, dh, keys; float w[SYNTHESIZER_TERMS], *p, *grad, *term; luna_run gemm; } synthesizer_head;

ATTENTION_FN size_t synthesizer_scratch(int64_t n, int64_t dh) {
  const size_t a = attention_gemm_scratch(SYNTHESIZER_ROWS, dh, n), b = attention_gemm_scratch(SYNTHESIZER_ROWS, n, dh);
  const size_t c = attention_gemm_scratch(n, dh, SYNTHESIZER_ROWS), max = a > b ? a : b;
  return (max > c ? max : c) + 64;
}
ATTENTION_FN int64_t synthesizer_sees(const synthesizer_call *c, const synthesizer_head *p, int64_t i) { return c->s->causal ? i + 1 : p->keys; }
/* row i of term t: its values in x, or, when grad, w x is added to its gradient */
ATTENTION_FN void synthesizer_row(const synthesizer_call *c, const synthesizer_head *p, int t, int64_t i, float w, float *x, bool grad) {
  const luna_tensor *in = c->in[c->s->at[t]];
  const int64_t keys = synthesizer_sees(c, p, i), row = in->rank == 3 ? p->h * in->shape[1] + i : (p->b * c->s->heads + p->h) * p->n + i;
  const int64_t wide = in->shape[in->rank - 1], a = c->s->a, b = wide - a; /* rank 3: [h,s,s], one for all sequences */
  const float *values = in->data + row * wide;
  float *to = in->grad ? in->grad + row * wide : NULL;
  if (c->s->term[t] != SYNTHESIZER_FACTORIZED_DENSE) {
    if (!grad) memcpy(x, values, (size_t)keys * sizeof(float));
    for (int64_t j = 0; grad && to && j < keys; j++) to[j] += w * x[j];
    return;
  }
  for (int64_t j = 0; j < keys; j++) {
    if (!grad) x[j] = values[j / b] * values[a + j % b];
    else if (to) to[j / b] += w * x[j] * values[a + j % b], to[a + j % b] += w * x[j] * values[j / b];
  }
}
ATTENTION_FN void synthesizer_open(const synthesizer_call *c, synthesizer_head *p, int64_t h, int64_t b) {
  const float *m = c->s->mixture ? c->in[c->s->mixture]->data + h * c->s->terms : NULL;
  float max = -HUGE_VALF, sum = 0, *at;
  p->b = b, p->h = h, p->n = c->out->shape[1], p->d = c->out->shape[2], p->dh = p->d / c->s->heads;
  p->keys = attention_length(c->in[SYNTHESIZER_LENGTHS], b);
  for (int t = 0; m && t < c->s->terms; t++) if (m[t] > max) max = m[t];
  for (int t = 0; t < c->s->terms; t++) sum += p->w[t] = m ? expf(m[t] - max) : 1;
  for (int t = 0; m && t < c->s->terms; t++) p->w[t] /= sum;
  p->gemm = c->run;
  p->gemm.parallel_for = NULL;
  p->gemm.scratch_size = c->run.scratch_size / (size_t)c->s->heads / 64 * 64;
  at = (float *)(void *)((char *)c->run.scratch + (size_t)h * p->gemm.scratch_size);
  p->p = at, p->grad = at + SYNTHESIZER_ROWS * p->n, p->term = at + 2 * SYNTHESIZER_ROWS * p->n;
  p->gemm.scratch = p->term + p->n;
  p->gemm.scratch_size -= (size_t)((2 * SYNTHESIZER_ROWS + 1) * p->n) * sizeof(float);
}
/* rows i.. of the attention matrix, before the mask; zeros where nothing is seen */
ATTENTION_FN void synthesizer_matrix(const synthesizer_call *c, synthesizer_head *h, int64_t first, int64_t rows) {
  memset(h->p, 0, (size_t)(rows * h->n) * sizeof(float));
  for (int64_t i = 0; i < rows; i++) {
    const int64_t keys = synthesizer_sees(c, h, first + i);
    float *p = h->p + i * h->n, max = -HUGE_VALF;
    double sum = 0;
    for (int t = 0; t < c->s->terms; t++) {
      synthesizer_row(c, h, t, first + i, 1, h->term, false);
      for (int64_t j = 0; j < keys; j++) p[j] += h->w[t] * h->term[j];
    }
    for (int64_t j = 0; j < keys; j++) if (p[j] > max) max = p[j];
    for (int64_t j = 0; j < keys; j++) sum += (double)(p[j] = expf(p[j] - max));
    for (int64_t j = 0; j < keys; j++) p[j] = (float)((double)p[j] / sum);
  }
}
ATTENTION_FN void synthesizer_mask(const synthesizer_call *c, const synthesizer_head *h, int64_t first, int64_t rows, float *x) {
  const float *mask = c->s->mask ? c->in[c->s->mask]->data + ((h->b * c->s->heads + h->h) * h->n + first) * h->n : NULL;
  for (int64_t i = 0; mask && i < rows * h->n; i++) x[i] *= mask[i];
}
ATTENTION_FN void synthesizer_forward_head(void *work, int64_t head) {
  const synthesizer_call *c = (const synthesizer_call *)work;
  synthesizer_head h;
  for (int64_t b = 0; b < c->out->shape[0]; b++) {
    synthesizer_open(c, &h, head, b);
    const int64_t base = b * h.n * h.d + head * h.dh;
    const float *v = c->in[SYNTHESIZER_V]->data + base;
    float *y = c->out->data + base;
    for (int64_t i = 0; i < h.n; i++) memset(y + i * h.d, 0, (size_t)h.dh * sizeof(float));
    for (int64_t at = 0; at < h.keys; at += SYNTHESIZER_ROWS) { /* later values, which may be Inf, are not multiplied by 0 */
      const int64_t rows = h.keys - at < SYNTHESIZER_ROWS ? h.keys - at : SYNTHESIZER_ROWS, before = c->s->causal ? at : h.keys;
      synthesizer_matrix(c, &h, at, rows);
      synthesizer_mask(c, &h, at, rows, h.p);
      if (before) attention_gemm(h.gemm, h.p, h.n, false, v, h.d, false, y + at * h.d, h.d, rows, h.dh, before, false);
      for (int64_t i = 0; i < rows; i++)
        for (int64_t j = before; j <= at + i; j++)
          for (int64_t e = 0; e < h.dh; e++) y[(at + i) * h.d + e] += h.p[i * h.n + j] * v[j * h.d + e];
    }
  }
}
ATTENTION_FN void synthesizer_backward_rows(const synthesizer_call *c, synthesizer_head *h, int64_t at, int64_t rows, double *slope) {
  const int64_t base = h->b * h->n * h->d + h->h * h->dh, seen = c->s->causal ? at + rows : h->keys;
  const luna_tensor *v = c->in[SYNTHESIZER_V];
  const float *g = c->out->grad + base + at * h->d;
  attention_gemm(h->gemm, g, h->d, false, v->data + base, h->d, true, h->grad, h->n, rows, seen, h->dh, false);
  synthesizer_mask(c, h, at, rows, h->grad);
  for (int64_t i = 0; i < rows; i++) {
    const int64_t keys = synthesizer_sees(c, h, at + i);
    float *p = h->p + i * h->n, *grad = h->grad + i * h->n;
    double dot = 0;
    for (int64_t j = 0; j < keys; j++) dot += (double)p[j] * (double)grad[j];
    for (int64_t j = 0; j < keys; j++) grad[j] = p[j] * (grad[j] - (float)dot);
    for (int t = 0; t < c->s->terms; t++) {
      synthesizer_row(c, h, t, at + i, h->w[t], grad, true);
      if (c->s->mixture) synthesizer_row(c, h, t, at + i, 1, h->term, false);
      for (int64_t j = 0; c->s->mixture && j < keys; j++) slope[t] += (double)grad[j] * (double)h->term[j];
    }
  }
  synthesizer_mask(c, h, at, rows, h->p);
  if (v->grad) attention_gemm(h->gemm, h->p, h->n, true, g, h->d, false, v->grad + base, h->d, seen, h->dh, rows, true);
}
ATTENTION_FN void synthesizer_backward_head(void *work, int64_t head) {
  const synthesizer_call *c = (const synthesizer_call *)work;
  double slope[SYNTHESIZER_TERMS] = { 0, 0, 0, 0, 0 }, mean = 0;
  float *mixture = c->s->mixture ? c->in[c->s->mixture]->grad : NULL;
  synthesizer_head h;
  for (int64_t b = 0; b < c->out->shape[0]; b++) { /* in order: they share random and mixture */
    synthesizer_open(c, &h, head, b);
    for (int64_t at = 0; at < h.keys; at += SYNTHESIZER_ROWS) {
      const int64_t rows = h.keys - at < SYNTHESIZER_ROWS ? h.keys - at : SYNTHESIZER_ROWS;
      synthesizer_matrix(c, &h, at, rows);
      synthesizer_backward_rows(c, &h, at, rows, slope);
    }
  }
  for (int t = 0; t < c->s->terms; t++) mean += (double)h.w[t] * slope[t];
  for (int t = 0; mixture && t < c->s->terms; t++) mixture[head * c->s->terms + t] += (float)((double)h.w[t] * (slope[t] - mean));
}
ATTENTION_FN void synthesizer_forward_op(const luna_tensor *const *in, int count, luna_tensor *out, void *state) {
  synthesizer_call c;
  (void)count;
  c.s = (const synthesizer_state *)state, c.in = (luna_tensor *const *)(uintptr_t)in, c.out = out, c.run = luna_custom_run(out);
  attention_parallel(&c.run, c.s->heads, synthesizer_forward_head, &c);
}
ATTENTION_FN void synthesizer_backward_op(luna_tensor *const *in, int count, const luna_tensor *out, void *state) {
  synthesizer_call c;
  (void)count;
  c.s = (const synthesizer_state *)state, c.in = in, c.out = out, c.run = luna_custom_run(out);
  attention_parallel(&c.run, c.s->heads, synthesizer_backward_head, &c);
}

/* [batch,h,n,d_h] hidden units and 1, times [h,width,d_h] weights and biases */
static luna_tensor *synthesizer_project(const synthesizer *a, luna_tensor *hidden, const luna_linear_layer *layer, int64_t width) {
  const int64_t h = a->base.heads, shape[3] = { h, width, 1 };
  luna_tensor *w[2], *x[2];
  int64_t ones[4];
  if (!hidden) return NULL;
  memcpy(ones, hidden->shape, sizeof ones);
  ones[3] = 1;
  w[0] = luna_slice(layer->weight, 1, 0, width);
  w[1] = luna_reshape(luna_slice(layer->bias, 1, 0, width), 3, shape);
  x[0] = hidden;
  x[1] = attention_filled(hidden->ctx, 1, 4, ones);
  return luna_matmul(luna_concat(x, 2, 3), luna_concat(w, 2, 2), false, true);
}
static luna_tensor *synthesizer_term(const synthesizer *a, int term, luna_tensor *x, luna_tensor *hidden) {
  const int64_t n = x->shape[1], h = a->base.heads;
  luna_tensor *part[2];
  if (term == SYNTHESIZER_DENSE) return synthesizer_project(a, hidden, &a->dense, n);
  if (term == SYNTHESIZER_RANDOM) return a->random;
  if (term == SYNTHESIZER_FACTORIZED_RANDOM) return luna_matmul(luna_slice(a->random1, 1, 0, n), luna_slice(a->random2, 1, 0, n), false, true);
  if (term == SYNTHESIZER_DOT) {
    part[0] = luna_scale(attention_split(luna_linear_layer_forward(&a->q, x), h), (float)(1 / sqrt((double)(a->base.dim / h))));
    return luna_matmul(part[0], attention_split(luna_linear_layer_forward(&a->key, x), h), false, true);
  }
  part[0] = synthesizer_project(a, hidden, &a->dense_a, a->a);
  part[1] = synthesizer_project(a, hidden, &a->dense_b, a->b);
  return luna_concat(part, 2, 3);
}
static luna_tensor *synthesizer_forward(void *layer, luna_attention_call *call) {
  const synthesizer *a = (const synthesizer *)layer;
  const int64_t batch = call->x->shape[0], n = call->x->shape[1], h = a->base.heads, shape[4] = { batch, h, n, n };
  luna_tensor *in[LUNA_MAX_INPUTS + 1], *hidden = NULL;
  synthesizer_state s;
  int count = SYNTHESIZER_FIRST;
  size_t bytes;
  if (n > a->length) return attention_fail(call->x->ctx, &a->base, "a sequence is longer than its option length");
  memset(&s, 0, sizeof s);
  in[SYNTHESIZER_LENGTHS] = attention_lengths(call->x, call->lengths);
  in[SYNTHESIZER_V] = luna_linear_layer_forward(&a->v, call->x);
  if (a->hidden.weight) hidden = attention_split(luna_relu(luna_linear_layer_forward(&a->hidden, call->x)), h);
  for (int t = 0; t < a->terms; t++) {
    s.at[t] = count;
    in[count++] = synthesizer_term(a, s.term[t] = a->term[t], call->x, hidden);
  }
  if (a->mixture) in[s.mixture = count++] = a->mixture;
  if (a->base.dropout > 0) in[s.mask = count++] = luna_dropout(attention_filled(call->x->ctx, 1, 4, shape), a->base.dropout);
  s.terms = a->terms, s.heads = h, s.a = a->a, s.causal = call->causal;
  bytes = (size_t)((2 * SYNTHESIZER_ROWS + 1) * n) * sizeof(float) + synthesizer_scratch(n, a->base.dim / h);
  return luna_linear_layer_forward(&a->out, attention_op(in, count, 3, call->x->shape, synthesizer_forward_op, synthesizer_backward_op, &s, sizeof s,
                                                         (bytes + 63) / 64 * 64 * (size_t)h));
}
static const attention_system synthesizer_system = {
  "synthesizer", "Tay et al., ICML 2021, arXiv 2005.00743", sizeof(synthesizer), synthesizer_options, synthesizer_init, synthesizer_forward,
  true, true
};
#endif
