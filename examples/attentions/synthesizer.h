/* synthesizer.h: Synthesizer (Tay et al., ICML 2021, arXiv 2005.00743).

     y = out_proj(softmax(S) v),   S [n,n] a head, a sum of terms, option terms: their names joined by "+"
     dense:             S_ij = W2_j . relu(dense1_proj(x_i))_head + b2_j
     factorized_dense:  S_ij = A_i[j / b] B_i[j mod b], A_i and B_i (a and b wide, a b = L) from the same hidden layer
     random:            S = random [h,L,L], trained;     factorized_random: S = random1 random2^T
     dot:               S = q k^T / sqrt(d_h)
     option mixture: term t has the weight softmax(mixture [h,terms])_t; else terms are added.
   L: option length, the longest sequence; S is cut to n x n. Causal: j <= i.
   Parameters: v_proj, out_proj; dense1_proj, dense2 (weight [h,L,d_h], bias [h,L]); dense_a, dense_b (weight [h,a,d_h],
   bias [h,a]); random; random1, random2 [h,L,k]; q_proj, k_proj; mixture. Time O(n^2 d), memory O(n^2 h), as the
   paper's. */
#ifndef ATTENTION_SYNTHESIZER_H
#define ATTENTION_SYNTHESIZER_H
#include "scored.h"

enum {
  SYNTHESIZER_DOT, SYNTHESIZER_DENSE, SYNTHESIZER_FACTORIZED_DENSE, SYNTHESIZER_RANDOM, SYNTHESIZER_FACTORIZED_RANDOM,
      SYNTHESIZER_TERMS
};
static const char *const synthesizer_names[SYNTHESIZER_TERMS] =
    { "dot", "dense", "factorized_dense", "random", "factorized_random" };
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
  /* of factorized_dense; 0: the factor of L next to sqrt(L) */
  { "a", ATTENTION_COUNT, offsetof(synthesizer, a), "0" },
  { "b", ATTENTION_COUNT, offsetof(synthesizer, b), "0" },             /* 0: L / a */
  { "mixture", ATTENTION_FLAG, offsetof(synthesizer, mixed), "false" },
  ATTENTION_LAST_OPTION
};

static bool synthesizer_parse(synthesizer *a) {
  const char *at = a->text;
  while (a->terms < SYNTHESIZER_TERMS) {
    const size_t size = strcspn(at, "+");
    int i = 0;
    while (i < SYNTHESIZER_TERMS && (strlen(synthesizer_names[i]) != size ||
                                     memcmp(at, synthesizer_names[i], size) != 0)) i++;
    for (int j = 0; j < a->terms; j++) if (a->term[j] == i) return false;
    if (i == SYNTHESIZER_TERMS) return false;
    a->term[a->terms++] = i;
    if (!at[size]) return true;
    at += size + 1;
  }
  return false;
}
/* weight [h,width,d_h], Xavier, and bias [h,width] */
static void synthesizer_dense(synthesizer *a, luna_linear_layer *layer, const char *weight, const char *bias,
                              int64_t width) {
  layer->weight = attention_param(&a->base, weight, LUNA_INIT_XAVIER, 1, a->base.heads, width,
                                  a->base.dim / a->base.heads, 0);
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
    for (int64_t i = 1, given = a->a; given == 0 && i * i <= l; i++) if (l % i == 0) a->a = i;
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

/* ---- scores of a block: S is stored as its terms ---- */
typedef struct synthesizer_state {
  scored base;
  int terms, term[SYNTHESIZER_TERMS], mixture; /* the inputs: a tensor a term, mixture (its place; 0: none) */
  int64_t a;                         /* of factorized_dense, whose input is [batch,h,n,a + b] */
} synthesizer_state;

/* row i of term t: its values in x, or, when grad, w x is added to its gradient */
ATTENTION_FN void synthesizer_row(const scored_head *h, int t, int64_t i, int64_t keys, float w, float *x, bool grad) {
  const synthesizer_state *s = (const synthesizer_state *)h->s;
  const luna_tensor *in = h->in[SCORED_FIRST + t];
  const int64_t row = in->rank == 3 ? h->h * in->shape[1] + i : (h->b * s->base.heads + h->h) * h->n + i;
  const int64_t wide = in->shape[in->rank - 1], a = s->a, b = wide - a; /* rank 3: [h,L,L], one for all sequences */
  const float *values = in->data + row * wide;
  float *to = in->grad ? in->grad + row * wide : NULL;
  if (s->term[t] != SYNTHESIZER_FACTORIZED_DENSE) {
    if (!grad) memcpy(x, values, (size_t)keys * sizeof(float));
    for (int64_t j = 0; grad && to && j < keys; j++) to[j] += w * x[j];
    return;
  }
  for (int64_t j = 0; j < keys; j++) {
    if (!grad) x[j] = values[j / b] * values[a + j % b];
    else if (to) to[j / b] += w * x[j] * values[a + j % b], to[a + j % b] += w * x[j] * values[j / b];
  }
}
ATTENTION_FN void synthesizer_weights(const scored_head *h, float *w) {
  const synthesizer_state *s = (const synthesizer_state *)h->s;
  const float *m = s->mixture ? h->in[s->mixture]->data + h->h * s->terms : NULL;
  float max = -HUGE_VALF, sum = 0;
  for (int t = 0; m && t < s->terms; t++) if (m[t] > max) max = m[t];
  for (int t = 0; t < s->terms; t++) sum += w[t] = m ? expf(m[t] - max) : 1;
  for (int t = 0; m && t < s->terms; t++) w[t] /= sum;
}
ATTENTION_FN void synthesizer_scores(const scored_head *h, int64_t first, int64_t rows, int64_t from, int64_t to) {
  float w[SYNTHESIZER_TERMS];
  (void)from;
  synthesizer_weights(h, w);
  for (int64_t i = 0; i < rows; i++)
    for (int t = 0; t < ((const synthesizer_state *)h->s)->terms; t++) {
      synthesizer_row(h, t, first + i, to, 1, h->extra, false);
      for (int64_t j = 0; j < to; j++) h->p[i * h->m + j] = (t ? h->p[i * h->m + j] : 0) + w[t] * h->extra[j];
    }
}
ATTENTION_FN void synthesizer_backward(scored_head *h, int64_t first, int64_t rows, int64_t from, int64_t to) {
  const synthesizer_state *s = (const synthesizer_state *)h->s;
  float w[SYNTHESIZER_TERMS];
  (void)from;
  synthesizer_weights(h, w);
  for (int64_t i = 0; i < rows; i++)
    for (int t = 0; t < s->terms; t++) {
      const float *grad = h->grad + i * h->m;
      synthesizer_row(h, t, first + i, to, w[t], h->grad + i * h->m, true);
      if (s->mixture) synthesizer_row(h, t, first + i, to, 1, h->extra, false);
      for (int64_t j = 0; s->mixture && j < to; j++) h->slope[t] += (double)grad[j] * (double)h->extra[j];
    }
}
ATTENTION_FN void synthesizer_finish(scored_head *h) { /* through the softmax of mixture */
  const synthesizer_state *s = (const synthesizer_state *)h->s;
  float w[SYNTHESIZER_TERMS], *grad = s->mixture ? h->in[s->mixture]->grad : NULL;
  double mean = 0;
  synthesizer_weights(h, w);
  for (int t = 0; t < s->terms; t++) mean += (double)w[t] * h->slope[t];
  for (int t = 0; grad && t < s->terms; t++) grad[h->h * s->terms + t] += (float)((double)w[t] * (h->slope[t] - mean));
}

/* [batch,h,n,d_h] hidden units and 1, times [h,width,d_h] weights and biases */
static luna_tensor *synthesizer_project(const synthesizer *a, luna_tensor *hidden, const luna_linear_layer *layer,
                                        int64_t width) {
  const int64_t h = a->base.heads, shape[3] = { h, width, 1 };
  luna_tensor *w[2] = { luna_slice(layer->weight, 1, 0, width),
                       luna_reshape(luna_slice(layer->bias, 1, 0, width), 3, shape) }, *x[2];
  int64_t ones[4];
  if (!hidden) return NULL;
  memcpy(ones, hidden->shape, sizeof ones);
  ones[3] = 1;
  x[0] = hidden, x[1] = attention_filled(hidden->ctx, 1, 4, ones);
  return luna_matmul(luna_concat(x, 2, 3), luna_concat(w, 2, 2), false, true);
}
static luna_tensor *synthesizer_term(const synthesizer *a, int term, luna_tensor *x, luna_tensor *hidden) {
  const int64_t n = x->shape[1], h = a->base.heads;
  luna_tensor *part[2];
  if (term == SYNTHESIZER_DENSE) return synthesizer_project(a, hidden, &a->dense, n);
  if (term == SYNTHESIZER_RANDOM) return a->random;
  if (term == SYNTHESIZER_FACTORIZED_RANDOM)
    return luna_matmul(luna_slice(a->random1, 1, 0, n), luna_slice(a->random2, 1, 0, n), false, true);
  if (term == SYNTHESIZER_DOT) {
    part[0] = luna_scale(attention_split(luna_linear_layer_forward(&a->q, x), h),
                         (float)(1 / sqrt((double)(a->base.dim / h))));
    return luna_matmul(part[0], attention_split(luna_linear_layer_forward(&a->key, x), h), false, true);
  }
  part[0] = synthesizer_project(a, hidden, &a->dense_a, a->a);
  part[1] = synthesizer_project(a, hidden, &a->dense_b, a->b);
  return luna_concat(part, 2, 3);
}
static luna_tensor *synthesizer_forward(void *layer, luna_attention_call *call) {
  const synthesizer *a = (const synthesizer *)layer;
  luna_tensor *in[LUNA_MAX_INPUTS + 1], *hidden = NULL;
  synthesizer_state s;
  int count = SCORED_FIRST;
  if (call->x->shape[1] > a->length)
    return attention_fail(call->x->ctx, &a->base, "a sequence is longer than its option length");
  memset(&s, 0, sizeof s);
  if (a->hidden.weight)
    hidden = attention_split(luna_relu(luna_linear_layer_forward(&a->hidden, call->x)), a->base.heads);
  for (int t = 0; t < a->terms; t++) in[count++] = synthesizer_term(a, s.term[t] = a->term[t], call->x, hidden);
  if (a->mixture) in[s.mixture = count++] = a->mixture;
  in[SCORED_V] = luna_linear_layer_forward(&a->v, call->x);
  s.terms = a->terms, s.a = a->a;
  s.base.heads = a->base.heads, s.base.causal = call->causal, s.base.extra = call->x->shape[1];
  s.base.scores = synthesizer_scores, s.base.backward = synthesizer_backward, s.base.finish = synthesizer_finish;
  return luna_linear_layer_forward(&a->out, scored_attention(call->x, call->lengths, in, count, &s.base, sizeof s,
                                                             a->base.dropout));
}
static const attention_system synthesizer_system = {
  "synthesizer", "Tay et al., ICML 2021, arXiv 2005.00743", sizeof(synthesizer), synthesizer_options, synthesizer_init,
      synthesizer_forward,
  true, true, false
};
#endif
