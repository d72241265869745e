/* Longformer: Beltagy et al. 2020, arXiv 2004.05150.
     y_i = softmax over j of q_i k_j / sqrt(d_h), times v_j, where j - i = e g, -left <= e <= right, g the head's dilation, or
     j is a global token; causal: only e <= 0, and no global tokens
     global tokens see everything, by projections of their own: q_global_proj, k_global_proj, v_global_proj
   Options: left, right, globals (how many global tokens). Arrays: dilation [h], ones; global [globals], 0, 1, ... ascending:
   those beyond a sequence's length are ignored. Cost a token: O((left + right + globals) d), a global token's O(n d). */
#ifndef ATTENTION_LONGFORMER_H
#define ATTENTION_LONGFORMER_H
#include "pattern.h"

typedef struct longformer {
  attention base;
  int64_t left, right, globals;
  attention_projections p;
  luna_linear_layer q_global, k_global, v_global;
  luna_tensor *dilation, *global;    /* integers */
} longformer;
static const attention_option longformer_options[] = {
  { "left", ATTENTION_COUNT, offsetof(longformer, left), "256" },
  { "right", ATTENTION_COUNT, offsetof(longformer, right), "256" },
  { "globals", ATTENTION_COUNT, offsetof(longformer, globals), "1" },
  ATTENTION_LAST_OPTION
};

static void longformer_init(void *layer) {
  longformer *a = (longformer *)layer;
  const int64_t d = a->base.dim;
  attention_projections_init(&a->base, &a->p);
  a->dilation = attention_param(&a->base, "dilation", LUNA_INIT_ONES, 1, a->base.heads, 0, 0, 0);
  if (a->globals == 0 || !a->base.good) return;
  attention_linear(&a->base, &a->q_global, "q_global_proj", d, d, ATTENTION_GAIN);
  attention_linear(&a->base, &a->k_global, "k_global_proj", d, d, ATTENTION_GAIN);
  attention_linear(&a->base, &a->v_global, "v_global_proj", d, d, ATTENTION_GAIN);
  a->global = attention_param(&a->base, "global", LUNA_INIT_ZEROS, 0, a->globals, 0, 0, 0);
  float *first = (float *)malloc((size_t)a->globals * sizeof(float));
  for (int64_t i = 0; first && i < a->globals; i++) first[i] = (float)i;
  if (!first || (a->global && luna_write(a->global, first) != LUNA_OK)) a->base.good = false;
  free(first);
}

/* the global tokens of a sequence of n, ascending, and which those are */
typedef struct longformer_tokens { int64_t n, globals; int64_t *token; bool *is_global; } longformer_tokens;
static bool longformer_tokens_open(const longformer *a, int64_t n, bool causal, longformer_tokens *t) {
  const int64_t globals = causal || !a->global ? 0 : a->globals;
  float *values = (float *)calloc((size_t)globals + 1, sizeof(float));
  memset(t, 0, sizeof *t);
  t->n = n;
  t->token = (int64_t *)calloc((size_t)globals + 1, sizeof(int64_t));
  t->is_global = (bool *)calloc((size_t)n + 1, sizeof(bool));
  const bool good = values && t->token && t->is_global && (globals == 0 || luna_read(a->global, values) == LUNA_OK);
  for (int64_t i = 0; good && i < globals; i++)
    if (values[i] >= 0 && values[i] < (float)n && !t->is_global[(int64_t)values[i]]) {
      t->token[t->globals++] = (int64_t)values[i];
      t->is_global[(int64_t)values[i]] = true;
    }
  free(values);
  return good;
}
static void longformer_tokens_close(longformer_tokens *t) { free(t->token), free(t->is_global); }

/* dilation 1, in natural order: between the global tokens blocks of the others, whose keys are the global tokens, and
   within the window the tokens between them */
static void longformer_window(const longformer *a, const longformer_tokens *t, attention_patterns *patterns, int64_t at) {
  luna_attention_pattern *p = attention_pattern_lists(patterns, at, 2 * t->globals + 1, (2 * t->globals + 1) * (t->globals + 1), 0, 0);
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
static void longformer_dilated(const longformer *a, const longformer_tokens *t, attention_patterns *patterns, int64_t at, int64_t gap) {
  luna_attention_pattern *p = attention_pattern_lists(patterns, at, gap, 2 * gap, t->n, t->n);
  int64_t keys = 0;
  if (!p) return;
  for (; keys < t->globals; keys++) attention_pattern_order(p->key_order, keys, t->token[keys]);
  for (int64_t c = 0; c < gap; c++) {
    const int64_t first = keys;
    for (int64_t i = c; i < t->n; i += gap) {
      if (t->is_global[i]) continue;
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
  luna_attention_pattern *p = attention_pattern_lists(patterns, 0, 1, 1, t->globals, 0);
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
  float *dilation = (float *)calloc((size_t)heads, sizeof(float));
  patterns.good = patterns.good && dilation && luna_read(a->dilation, dilation) == LUNA_OK;
  for (int64_t h = 0; patterns.good && h < heads; h++) {
    const int64_t gap = dilation[h] > 1 ? dilation[h] < (float)t->n ? (int64_t)dilation[h] : t->n : 1;
    if (gap > 1) longformer_dilated(a, t, &patterns, h, gap);
    else longformer_window(a, t, &patterns, h);
    if (call->causal && patterns.good) patterns.at[h].right = 0;
  }
  free(dilation);
  return attention_sparse(&a->base, q, k, v, &patterns, call->lengths, NULL);
}
static luna_tensor *longformer_forward(void *layer, luna_attention_call *call) {
  const longformer *a = (const longformer *)layer;
  luna_tensor *x = call->x, *y = NULL;
  longformer_tokens t;
  if (!longformer_tokens_open(a, x->shape[1], call->causal, &t)) attention_fail(x->ctx, &a->base, "out of memory");
  else y = longformer_local(a, call, &t);
  if (y && t.globals) {
    luna_tensor *q = luna_linear_layer_forward(&a->q_global, x), *k = luna_linear_layer_forward(&a->k_global, x);
    luna_tensor *v = luna_linear_layer_forward(&a->v_global, x);
    attention_patterns patterns = attention_patterns_open(1);
    longformer_whole(&t, &patterns);
    y = luna_add(y, attention_sparse(&a->base, q, k, v, &patterns, call->lengths, NULL));
  }
  longformer_tokens_close(&t);
  return luna_linear_layer_forward(&a->p.out, y);
}
static const attention_system longformer_system = { "longformer", "Beltagy et al. 2020, arXiv 2004.05150", sizeof(longformer), longformer_options,
                                                    longformer_init, longformer_forward, true, true };
#endif
