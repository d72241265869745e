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
#include "sorting.h"

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
  attention_require(&a->base, a->block > 0, "sinkhorn: block must be above 0");
  attention_require_in(&a->base, "max_blocks", a->max_blocks, 1, 1 << 20); /* sinkhorn_room fits in 64 bits */
  attention_require_in(&a->base, "iterations", a->iterations, 0, 10000);
  attention_require(&a->base, a->temperature > 0, "sinkhorn: temperature must be above 0");
  attention_projections_init(&a->base, &a->p);
  attention_linear(&a->base, &a->order, "sort", a->base.dim / a->base.heads, a->max_blocks, ATTENTION_GAIN);
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
    block_pattern *p = NULL;
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
  s.block = s.n > 0 ? sinkhorn_min(a->block, s.n) : a->block, s.blocks = (s.n + s.block - 1) / s.block;
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
  sinkhorn_init, sinkhorn_forward, true, true, false
};
#endif
