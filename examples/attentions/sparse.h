/* Sparse Transformer: Child et al. 2019, arXiv 1904.10509.
     y_i = softmax over j in S(i) of q_i k_j / sqrt(d_h), times v_j; all j <= i; l = stride
     strided  A: i - j < l                    C: (i - j) mod l = 0
     fixed    A: floor(i/l) = floor(j/l)      C: j mod l >= l - columns, or first_column and j mod l = 0
   S = A and C together, or with `split` A in even heads and C in odd ones. cls: token 0 sees all and is seen by all,
   and the others count from token 1; that is not causal. Options: pattern, stride, columns, first_column, split, cls.
   Cost a token: O((l + n/l) d). A is a window or a block; fixed C is a list of columns; strided C reads the tokens in
   the order of i mod l. Merged, the strided sets are two attentions that meet in their log-sum-exp. */
#ifndef ATTENTION_SPARSE_H
#define ATTENTION_SPARSE_H
#include "pattern.h"

enum { SPARSE_FIXED, SPARSE_STRIDED };
typedef struct sparse {
  attention base;
  int64_t pattern, stride, columns, first_column, split, cls;
  attention_projections p;
} sparse;
static const attention_option sparse_options[] = {
  { "pattern", ATTENTION_WORD, offsetof(sparse, pattern), "fixed|strided" },
  { "stride", ATTENTION_COUNT, offsetof(sparse, stride), "128" },
  { "columns", ATTENTION_COUNT, offsetof(sparse, columns), "32" },
  { "first_column", ATTENTION_FLAG, offsetof(sparse, first_column), "false" },
  { "split", ATTENTION_FLAG, offsetof(sparse, split), "false" },
  { "cls", ATTENTION_FLAG, offsetof(sparse, cls), "false" },
  ATTENTION_LAST_OPTION
};

static void sparse_init(void *layer) {
  sparse *a = (sparse *)layer;
  attention_require(&a->base, a->stride > 0, "sparse: stride must be above 0");
  attention_projections_init(&a->base, &a->p);
}

/* with cls: token 0's block, before all others */
static void sparse_first(const sparse *a, block_pattern *p, int64_t n) {
  if (!a->cls) return;
  attention_pattern_run(p, 0, n, true);
  attention_pattern_block(p, 1);
}
/* fixed: blocks of l queries; which: 0 A, 1 C, 2 both */
static void sparse_fixed(const sparse *a, attention_patterns *patterns, int64_t at, int64_t n, int which) {
  const int64_t l = a->stride, from = a->cls, blocks = n > from ? (n - from + l - 1) / l : 0;
  const int64_t columns = a->columns < l ? a->columns : l, runs = (which ? blocks * (blocks + 1) : 0) + 2 * blocks + 1;
  block_pattern *p = attention_pattern_lists(patterns, at, blocks + 1, runs, 0, 0);
  if (!p) return;
  attention_pattern_window(p, ATTENTION_UNLIMITED, 0);
  sparse_first(a, p, n);
  for (int64_t i = 0; i < blocks; i++) {
    const int64_t first = from + i * l, end = first + l < n ? first + l : n;
    attention_pattern_run(p, 0, from, true);
    for (int64_t j = 0; which && j < (which == 1 ? i + 1 : i); j++) {
      const int64_t start = from + j * l, last = start + l < n ? start + l : n, column = start + l - columns;
      if (a->first_column && columns < l) attention_pattern_run(p, start, 1, false);
      attention_pattern_run(p, column, last - column, false);
    }
    if (which != 1) attention_pattern_run(p, first, end - first, false);
    attention_pattern_block(p, end);
  }
}
/* strided A: a window, and token 0 */
static void sparse_band(const sparse *a, attention_patterns *patterns, int64_t at, int64_t n) {
  block_pattern *p = attention_pattern_lists(patterns, at, 2, 3, 0, 0);
  if (!p) return;
  attention_pattern_window(p, a->stride - 1, 0);
  sparse_first(a, p, n);
  attention_pattern_run(p, 0, a->cls, true);
  attention_pattern_run(p, a->cls, n - a->cls, false);
  attention_pattern_block(p, n);
}
/* strided C: tokens in the order of their column; `alone`: without A, which else has token 0 and i itself */
static void sparse_strides(const sparse *a, attention_patterns *patterns, int64_t at, int64_t n, bool alone) {
  const int64_t l = a->stride < n ? a->stride : n, from = n > 0 ? a->cls : 0; /* beyond n all strides are the same */
  block_pattern *p = attention_pattern_lists(patterns, at, l + 1, 2 * l + 1, n, n);
  int64_t end = from;
  if (!p) return;
  attention_pattern_window(p, ATTENTION_UNLIMITED, alone ? 0 : -1);
  if (alone) sparse_first(a, p, n);
  else if (from) attention_pattern_block(p, 1);
  for (int64_t c = 0; c < l && from + c < n; c++) {
    const int64_t first = end;
    for (int64_t i = from + c; i < n; i += l, end++) {
      attention_pattern_order(p->query_order, end, i);
      attention_pattern_order(p->key_order, end, i);
    }
    if (alone) attention_pattern_run(p, 0, from, true);
    attention_pattern_run(p, first, end - first, false);
    attention_pattern_block(p, end);
  }
}

static luna_tensor *sparse_forward(void *layer, luna_attention_call *call) {
  const sparse *a = (const sparse *)layer;
  luna_tensor *x = call->x, *q = luna_linear_layer_forward(&a->p.q, x), *k = luna_linear_layer_forward(&a->p.k, x);
  luna_tensor *v = luna_linear_layer_forward(&a->p.v, x), *o[2], *z[2] = { NULL, NULL };
  const int64_t n = x->shape[1], heads = a->base.heads;
  const bool two = a->pattern == SPARSE_STRIDED && !a->split;
  attention_patterns patterns = attention_patterns_open(a->split ? heads : 1);
  if (call->causal && a->cls) {
    attention_patterns_close(&patterns);
    return attention_fail(x->ctx, &a->base, "with cls it is not causal");
  }
  for (int64_t h = 0; h < patterns.count; h++) {
    const int which = !a->split ? 2 : (int)(h % 2);
    if (a->pattern == SPARSE_FIXED) sparse_fixed(a, &patterns, h, n, which);
    else if (which == 1) sparse_strides(a, &patterns, h, n, true);
    else sparse_band(a, &patterns, h, n);
  }
  o[0] = attention_sparse(&a->base, q, k, v, &patterns, call->lengths, two ? &z[0] : NULL);
  if (two) {
    patterns = attention_patterns_open(1);
    sparse_strides(a, &patterns, 0, n, false);
    o[1] = attention_sparse(&a->base, q, k, v, &patterns, call->lengths, &z[1]);
    o[0] = o[0] && o[1] ? attention_merge(&a->base, o, z, 2, NULL) : NULL;
  }
  return luna_linear_layer_forward(&a->p.out, o[0]);
}
static const attention_system sparse_system = {
  "sparse", "Child et al. 2019, arXiv 1904.10509", sizeof(sparse), sparse_options,
  sparse_init, sparse_forward, true, true, false
};
#endif
