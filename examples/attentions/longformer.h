/* Longformer: Beltagy et al. 2020, arXiv 2004.05150.
     y_i = softmax over j of q_i k_j / sqrt(d_h), times v_j, where j - i = e g, -left <= e <= right, g the head's
     dilation, or j is a global token; causal: only e <= 0, and no global tokens
     global tokens see everything, by projections of their own: q_global_proj, k_global_proj, v_global_proj
   Options: left, right; global, a list, ascending, of which those beyond a sequence's length are ignored; dilation, a
   list of h, empty: ones. Cost a token: O((left + right + globals) d), a global token's O(n d). */
#ifndef ATTENTION_LONGFORMER_H
#define ATTENTION_LONGFORMER_H
#include "pattern.h"

typedef struct longformer {
  attention base;
  int64_t left, right;
  attention_list dilation, global;
  attention_projections p;
  luna_linear_layer q_global, k_global, v_global; /* where there are global tokens */
} longformer;
static const attention_option longformer_options[] = {
  { "left", ATTENTION_COUNT, offsetof(longformer, left), "256" },
  { "right", ATTENTION_COUNT, offsetof(longformer, right), "256" },
  { "dilation", ATTENTION_LIST, offsetof(longformer, dilation), "" },
  { "global", ATTENTION_LIST, offsetof(longformer, global), "0" },
  ATTENTION_LAST_OPTION
};

static void longformer_init(void *layer) {
  longformer *a = (longformer *)layer;
  const int64_t d = a->base.dim;
  attention_require(&a->base, a->dilation.count == 0 || a->dilation.count == a->base.heads,
                    "longformer: one dilation a head");
  for (int64_t i = 0; i < a->dilation.count; i++)
    attention_require(&a->base, a->dilation.value[i] > 0, "longformer: dilations are above 0");
  for (int64_t i = 0; i < a->global.count; i++)
    attention_require(&a->base, a->global.value[i] > (i ? a->global.value[i - 1] : -1),
                      "longformer: global tokens ascend from 0");
  attention_projections_init(&a->base, &a->p);
  if (a->global.count == 0) return;
  attention_linear(&a->base, &a->q_global, "q_global_proj", d, d, ATTENTION_GAIN);
  attention_linear(&a->base, &a->k_global, "k_global_proj", d, d, ATTENTION_GAIN);
  attention_linear(&a->base, &a->v_global, "v_global_proj", d, d, ATTENTION_GAIN);
}

/* n tokens, of which the first `globals` of the option are global */
typedef struct longformer_tokens { int64_t n, globals; const int64_t *token; } longformer_tokens;
static longformer_tokens longformer_tokens_of(const longformer *a, int64_t n, bool causal) {
  longformer_tokens t = { n, 0, a->global.value };
  while (!causal && t.globals < a->global.count && t.token[t.globals] < n) t.globals++;
  return t;
}
static bool longformer_is_global(const longformer_tokens *t, int64_t i) {
  int64_t g = 0;
  while (g < t->globals && t->token[g] != i) g++;
  return g < t->globals;
}

/* dilation 1, in natural order: between the global tokens blocks of the others, whose keys are the global tokens, and
   within the window the tokens between them */
static void longformer_window(const longformer *a, const longformer_tokens *t, attention_patterns *patterns,
                              int64_t at) {
  block_pattern *p = attention_pattern_lists(patterns, at, 2 * t->globals + 1,
                                                      (2 * t->globals + 1) * (t->globals + 1), 0, 0);
  for (int64_t block = 0; p && block <= t->globals; block++) {
    for (int64_t g = 0, first = 0; g <= t->globals; g++) {
      const int64_t next = g < t->globals ? t->token[g] : t->n;
      attention_pattern_run(p, first, next - first, false);
      if (g < t->globals) attention_pattern_run(p, next, 1, true);
      first = next + 1;
    }
    attention_pattern_block(p, block < t->globals ? t->token[block] : t->n);
    if (block < t->globals) attention_pattern_block(p, t->token[block] + 1); /* sees nothing here */
  }
  if (p) attention_pattern_window(p, a->left, a->right);
}
/* a greater dilation: every gap-th token is a block, in that order; global tokens are the first keys of the order */
static void longformer_dilated(const longformer *a, const longformer_tokens *t, attention_patterns *patterns,
                               int64_t at, int64_t gap) {
  const int64_t blocks = gap < t->n ? gap : t->n;
  block_pattern *p = attention_pattern_lists(patterns, at, blocks, 2 * blocks, t->n, t->n);
  int64_t keys = 0;
  if (!p) return;
  for (; keys < t->globals; keys++) attention_pattern_order(p->key_order, keys, t->token[keys]);
  for (int64_t c = 0; c < blocks; c++) {
    const int64_t first = keys;
    for (int64_t i = c; i < t->n; i += gap) {
      if (longformer_is_global(t, i)) continue;
      attention_pattern_order(p->query_order, keys - t->globals, i);
      attention_pattern_order(p->key_order, keys++, i);
    }
    attention_pattern_run(p, 0, t->globals, true);
    attention_pattern_run(p, first, keys - first, false);
    attention_pattern_block(p, keys - t->globals);
  }
  attention_pattern_window(p, a->left * gap, a->right * gap);
}
/* the global tokens' own attention: each sees everything, the other queries nothing */
static void longformer_whole(const longformer_tokens *t, attention_patterns *patterns) {
  block_pattern *p = attention_pattern_lists(patterns, 0, 1, 1, t->globals, 0);
  for (int64_t g = 0; p && g < t->globals; g++) attention_pattern_order(p->query_order, g, t->token[g]);
  if (!p) return;
  attention_pattern_run(p, 0, t->n, true);
  attention_pattern_block(p, t->globals);
}

static luna_tensor *longformer_local(const longformer *a, const luna_attention_call *call, const longformer_tokens *t) {
  const int64_t heads = a->base.heads;
  luna_tensor *x = call->x, *q = luna_linear_layer_forward(&a->p.q, x), *k = luna_linear_layer_forward(&a->p.k, x);
  luna_tensor *v = luna_linear_layer_forward(&a->p.v, x);
  attention_patterns patterns = attention_patterns_open(heads);
  for (int64_t h = 0; patterns.good && h < heads; h++) {
    const int64_t gap = a->dilation.count ? a->dilation.value[h] : 1;
    if (gap > 1) longformer_dilated(a, t, &patterns, h, gap);
    else longformer_window(a, t, &patterns, h);
    if (call->causal && patterns.good) patterns.at[h].right = 0;
  }
  return attention_sparse(&a->base, q, k, v, &patterns, call->lengths, NULL);
}
static luna_tensor *longformer_forward(void *layer, luna_attention_call *call) {
  const longformer *a = (const longformer *)layer;
  const longformer_tokens t = longformer_tokens_of(a, call->x->shape[1], call->causal);
  luna_tensor *x = call->x, *y = longformer_local(a, call, &t);
  if (y && t.globals) {
    luna_tensor *q = luna_linear_layer_forward(&a->q_global, x), *k = luna_linear_layer_forward(&a->k_global, x);
    luna_tensor *v = luna_linear_layer_forward(&a->v_global, x);
    attention_patterns patterns = attention_patterns_open(1);
    longformer_whole(&t, &patterns);
    y = luna_add(y, attention_sparse(&a->base, q, k, v, &patterns, call->lengths, NULL));
  }
  return luna_linear_layer_forward(&a->p.out, y);
}
static const attention_system longformer_system = {
  "longformer", "Beltagy et al. 2020, arXiv 2004.05150", sizeof(longformer), longformer_options,
  longformer_init, longformer_forward, true, true, false
};
#endif
