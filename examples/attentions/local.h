/* Local attention: Parmar et al. 2018, arXiv 1802.05751; the baseline of Long Range Arena, arXiv 2011.04006.
     y_i = softmax over j in S(i) of q_i k_j / sqrt(d_h), times v_j; causal: also j <= i
     block    floor(i/w) - backward <= floor(j/w) <= floor(i/w) + forward
     sliding  |i - j| <= w
     lra      i = j (mod floor(n/w) + 1): what the benchmark's released code attends to, tokens that many apart
   Options: pattern, window (w), backward, forward. Cost a token: O(w d). */
#ifndef ATTENTION_LOCAL_H
#define ATTENTION_LOCAL_H
#include "pattern.h"

enum { LOCAL_BLOCK, LOCAL_SLIDING, LOCAL_LRA };
typedef struct local {
  attention base;
  int64_t pattern, window, backward, forward;
  attention_projections p;
} local;
static const attention_option local_options[] = {
  { "pattern", ATTENTION_WORD, offsetof(local, pattern), "block|sliding|lra" },
  { "window", ATTENTION_COUNT, offsetof(local, window), "50" },
  { "backward", ATTENTION_COUNT, offsetof(local, backward), "0" },
  { "forward", ATTENTION_COUNT, offsetof(local, forward), "0" },
  ATTENTION_LAST_OPTION
};

static void local_init(void *layer) {
  local *a = (local *)layer;
  attention_require(&a->base, a->window > 0 || a->pattern == LOCAL_SLIDING, "local: window must be above 0");
  attention_projections_init(&a->base, &a->p);
}

/* one pattern for all: blocks of w queries, each with one run */
static attention_patterns local_blocks(const local *a, int64_t n) {
  attention_patterns patterns = attention_patterns_open(1);
  const int64_t w = a->window, blocks = (n + w - 1) / w;
  block_pattern *p = attention_pattern_lists(&patterns, 0, blocks, blocks, 0, 0);
  for (int64_t i = 0; p && i < blocks; i++) {
    const int64_t first = i > a->backward ? i - a->backward : 0,
        last = i + a->forward < blocks ? (i + a->forward + 1) * w : n;
    attention_pattern_run(p, first * w, (last < n ? last : n) - first * w, false);
    attention_pattern_block(p, (i + 1) * w < n ? (i + 1) * w : n);
  }
  return patterns;
}
/* the tokens of a sequence of `length` in groups that attend to themselves: i and j are in one when i = j (mod G) */
static void local_groups(attention_patterns *patterns, int64_t at, int64_t length, int64_t w) {
  const int64_t groups = length / w + 1;
  block_pattern *p = attention_pattern_lists(patterns, at, groups, groups, length, length);
  int64_t n = 0;
  for (int64_t g = 0; p && g < groups; g++) {
    const int64_t first = n;
    for (int64_t i = g; i < length; i += groups, n++) {
      attention_pattern_order(p->query_order, n, i);
      attention_pattern_order(p->key_order, n, i);
    }
    attention_pattern_run(p, first, n - first, false);
    attention_pattern_block(p, n);
  }
}
static attention_patterns local_lra(const local *a, const luna_tensor *x, const int32_t *lengths) {
  const int64_t batch = x->shape[0], heads = a->base.heads;
  attention_patterns patterns = attention_patterns_open(lengths ? batch * heads : 1);
  for (int64_t i = 0; patterns.good && i < patterns.count; i++)
    if (i % heads == 0) local_groups(&patterns, i, lengths ? lengths[i / heads] : x->shape[1], a->window);
    else attention_pattern_repeat(&patterns, i);
  return patterns;
}

static luna_tensor *local_forward(void *layer, luna_attention_call *call) {
  const local *a = (const local *)layer;
  luna_tensor *x = call->x, *q = luna_linear_layer_forward(&a->p.q, x), *k = luna_linear_layer_forward(&a->p.k, x);
  luna_tensor *v = luna_linear_layer_forward(&a->p.v, x);
  const bool groups = a->pattern == LOCAL_LRA;
  attention_patterns patterns = a->pattern == LOCAL_BLOCK ? local_blocks(a, x->shape[1]) :
                                groups ? local_lra(a, x, call->lengths) : attention_patterns_open(1);
  for (int64_t i = 0; patterns.good && i < patterns.count; i++)
    attention_pattern_window(&patterns.at[i], a->pattern == LOCAL_SLIDING ? a->window : ATTENTION_UNLIMITED,
                             call->causal ? 0 : a->pattern == LOCAL_SLIDING ? a->window : ATTENTION_UNLIMITED);
  return luna_linear_layer_forward(&a->p.out, attention_sparse(&a->base, q, k, v, &patterns, call->lengths, NULL));
}
static const attention_system local_system = {
  "local", "Parmar et al. 2018, arXiv 1802.05751", sizeof(local), local_options,
  local_init, local_forward, true, true, false
};
#endif
