/* Reformer, attention by locality-sensitive hashing: Kitaev et al. 2020, arXiv 2001.04451. Of each head, in rounds r:
     k = q / sqrt(mean(q^2) + 1e-6);   bucket_r(i) = argmax [q_i rot_r, -q_i rot_r]
     the tokens in the order of (bucket, position) are cut into chunks of c; S_r(i) = i's chunk and the one before it,
     but not i itself; causal: j < i. The chunk before a round's first is the last one of the round before (of the last
     round for r = 0)
     o_r(i) = softmax over S_r(i) of q_i k_j / sqrt(d_h), times v_j;   z_r(i) its log-sum-exp
     y_i = sum_r softmax_r(z_r(i)) o_r(i); v_i where every S_r(i) is empty
   No gradient passes the buckets. Causal is which keys are attended: a later token may move the chunks' borders.
   Options: chunk (c), buckets (even), rounds. Array: rotations [h, d_h, rounds, buckets/2].
   Cost a token: O(rounds (c d + buckets d)) and the sort. */
#ifndef ATTENTION_REFORMER_H
#define ATTENTION_REFORMER_H
#include "pattern.h"

typedef struct reformer {
  attention base;
  int64_t chunk, buckets, rounds;
  luna_linear_layer qk, v, out;
  luna_tensor *rotations;
} reformer;
static const attention_option reformer_options[] = {
  { "chunk", ATTENTION_COUNT, offsetof(reformer, chunk), "64" },
  { "buckets", ATTENTION_COUNT, offsetof(reformer, buckets), "64" },
  { "rounds", ATTENTION_COUNT, offsetof(reformer, rounds), "4" },
  ATTENTION_LAST_OPTION
};
static void reformer_init(void *layer) {
  reformer *a = (reformer *)layer;
  const int64_t d = a->base.dim;
  attention_require(&a->base, a->chunk > 0 && a->rounds > 0, "reformer: chunk and rounds must be above 0");
  attention_require(&a->base, a->buckets > 0 && a->buckets % 2 == 0, "reformer: buckets must be even");
  attention_linear(&a->base, &a->qk, "qk_proj", d, d, ATTENTION_GAIN);
  attention_linear(&a->base, &a->v, "v_proj", d, d, ATTENTION_GAIN);
  attention_linear(&a->base, &a->out, "out_proj", d, d, 1);
  a->rotations = attention_array(&a->base, "rotations", a->base.heads, d / a->base.heads, a->rounds, a->buckets / 2);
}

/* ---- k = q / sqrt(mean(q^2) + 1e-6), a custom op over rows of width d_h ---- */
typedef struct reformer_norm {
  int64_t width, rows;
  const float *q, *dk;
  float *k, *dq;
} reformer_norm;
static void reformer_norm_task(void *work, int64_t item) {
  const reformer_norm *w = (const reformer_norm *)work;
  const int64_t end = (item + 1) * 256 < w->rows ? (item + 1) * 256 : w->rows, d = w->width;
  for (int64_t row = item * 256; row < end; row++) {
    const float *q = w->q + row * d;
    double squares = 0, dot = 0;
    for (int64_t c = 0; c < d; c++) {
      squares += (double)q[c] * (double)q[c];
      if (w->dk) dot += (double)q[c] * (double)w->dk[row * d + c];
    }
    const double factor = 1 / sqrt(squares / (double)d + 1e-6), slope = dot * factor * factor * factor / (double)d;
    for (int64_t c = 0; c < d && w->k; c++) w->k[row * d + c] = (float)((double)q[c] * factor);
    for (int64_t c = 0; c < d && w->dq; c++)
      w->dq[row * d + c] += (float)((double)w->dk[row * d + c] * factor - (double)q[c] * slope);
  }
}
static luna_status reformer_norm_forward(const luna_tensor *const *in, int count, luna_tensor *out, void *state) {
  const luna_run run = luna_custom_run(out);
  reformer_norm w = { *(const int64_t *)state, luna_count(out) / *(const int64_t *)state, in[0]->data, NULL, out->data,
                      NULL };
  (void)count;
  attention_parallel(&run, (w.rows + 255) / 256, reformer_norm_task, &w);
  return LUNA_OK;
}
static luna_status reformer_norm_backward(luna_tensor *const *in, int count, const luna_tensor *out, void *state) {
  const luna_run run = luna_custom_run(out);
  reformer_norm w = { *(const int64_t *)state, luna_count(out) / *(const int64_t *)state, in[0]->data, out->grad, NULL,
                      in[0]->grad };
  (void)count;
  if (w.dq) attention_parallel(&run, (w.rows + 255) / 256, reformer_norm_task, &w);
  return LUNA_OK;
}

/* ---- hashing: q_i rot_r for each row, head and token as floats [batch, h, n, rounds, buckets/2], to be freed ---- */
static float *reformer_hashes(const reformer *a, luna_tensor *q) {
  const int64_t heads = a->base.heads, width = a->base.dim / heads, half = a->rounds * a->buckets / 2;
  const int64_t split[4] = { q->shape[0], q->shape[1], heads, width }, flat[3] = { heads, width, half };
  const int heads_first[4] = { 0, 2, 1, 3 };
  const luna_scope scope = luna_scope_begin(q->ctx);
  luna_tensor *z = luna_permute(luna_reshape(luna_detach(q), 4, split), heads_first), *none = NULL;
  z = luna_matmul(z, luna_reshape(luna_detach(a->rotations), 3, flat), false, false);
  float *out = z ? (float *)malloc((size_t)(luna_count(z) + 1) * sizeof(float)) : NULL;
  if (out && luna_read(z, out) != LUNA_OK) {
    free(out);
    out = NULL;
  }
  luna_scope_end(scope, &none, 1);
  return out;
}
/* a round's order of n tokens, whose hashes are `step` apart: a counting sort, stable. start [buckets + 1]: room */
static void reformer_sort(const reformer *a, int64_t n, const float *hash, int64_t step, int32_t *bucket,
                          int64_t *start, int32_t *order) {
  const int64_t half = a->buckets / 2;
  memset(start, 0, (size_t)(a->buckets + 1) * sizeof *start);
  for (int64_t i = 0; i < n; i++) {
    const float *z = hash + i * step;
    int64_t best = 0;
    for (int64_t j = 1; j < a->buckets; j++)
      if ((j < half ? z[j] : -z[j - half]) > (best < half ? z[best] : -z[best - half])) best = j;
    bucket[i] = (int32_t)best;
    start[best + 1]++;
  }
  for (int64_t j = 0; j < a->buckets; j++) start[j + 1] += start[j];
  for (int64_t i = 0; i < n; i++) order[start[bucket[i]]++] = (int32_t)i;
}
/* A round's pattern: chunks of `order`; its keys are before's last chunk and then `order`, so that a chunk and the one
   before it are one run */
static void reformer_pattern(const reformer *a, attention_patterns *patterns, int64_t at, int64_t n,
                             const int32_t *order, const int32_t *before, bool causal) {
  const int64_t c = a->chunk, chunks = (n + c - 1) / c, last = n > 0 ? n - (chunks - 1) * c : 0;
  block_pattern *p = attention_pattern_lists(patterns, at, chunks, chunks, n, n + last);
  if (!p) return;
  for (int64_t i = 0; i < last; i++) attention_pattern_order(p->key_order, i, before[n - last + i]);
  for (int64_t i = 0; i < n; i++) {
    attention_pattern_order(p->query_order, i, order[i]);
    attention_pattern_order(p->key_order, last + i, order[i]);
  }
  for (int64_t i = 0; i < chunks; i++) {
    const int64_t first = i ? last + (i - 1) * c : 0, end = (i + 1) * c < n ? (i + 1) * c : n;
    attention_pattern_run(p, first, last + end - first, false);
    attention_pattern_block(p, end);
  }
  p->not_self = true;
  if (causal) attention_pattern_window(p, ATTENTION_UNLIMITED, -1);
}

/* each round's order [batch, h, rounds, n], to be freed; only the first lengths[b] are set */
static int32_t *reformer_orders(const reformer *a, luna_tensor *q, const int32_t *lengths) {
  const int64_t n = q->shape[1], pairs = q->shape[0] * a->base.heads, half = a->buckets / 2;
  float *hash = reformer_hashes(a, q);
  int32_t *order = (int32_t *)malloc((size_t)(pairs * a->rounds * n + 1) * sizeof *order);
  int32_t *bucket = (int32_t *)malloc((size_t)(n + 1) * sizeof *bucket);
  int64_t *start = (int64_t *)malloc((size_t)(a->buckets + 1) * sizeof *start);
  const bool good = hash && order && bucket && start;
  for (int64_t i = 0; good && i < pairs * a->rounds; i++)
    reformer_sort(a, lengths ? lengths[i / a->rounds / a->base.heads] : n,
                  hash + i / a->rounds * n * a->rounds * half + i % a->rounds * half,
                  a->rounds * half, bucket, start, order + i * n);
  free(hash), free(bucket), free(start);
  if (good) return order;
  free(order);
  return NULL;
}
static luna_tensor *reformer_round(const reformer *a, const luna_attention_call *call, luna_tensor *const qkv[3],
                                   const int32_t *orders,
                                   int64_t round, luna_tensor **z) {
  const int64_t n = call->x->shape[1], heads = a->base.heads, pairs = call->x->shape[0] * heads;
  attention_patterns patterns = attention_patterns_open(pairs);
  for (int64_t i = 0; patterns.good && i < pairs; i++)
    reformer_pattern(a, &patterns, i, call->lengths ? call->lengths[i / heads] : n,
                     orders + (i * a->rounds + round) * n,
                     orders + (i * a->rounds + (round ? round : a->rounds) - 1) * n, call->causal);
  return attention_sparse(&a->base, qkv[0], qkv[1], qkv[2], &patterns, call->lengths, z);
}

static luna_tensor *reformer_forward(void *layer, luna_attention_call *call) {
  const reformer *a = (const reformer *)layer;
  const int64_t width = a->base.dim / a->base.heads;
  luna_tensor *qkv[3], *y = NULL;
  qkv[0] = luna_linear_layer_forward(&a->qk, call->x), qkv[2] = luna_linear_layer_forward(&a->v, call->x);
  qkv[1] = qkv[0] ? attention_op(qkv, 1, 3, qkv[0]->shape, reformer_norm_forward, reformer_norm_backward, &width,
                                 sizeof width, 0) : NULL;
  if (!qkv[1] || !qkv[2]) return NULL;
  int32_t *orders = reformer_orders(a, qkv[0], call->lengths);
  luna_tensor **o = (luna_tensor **)calloc((size_t)(2 * a->rounds), sizeof(luna_tensor *)), **z = o + a->rounds;
  for (int64_t r = 0; orders && o && r < a->rounds; r++) o[r] = reformer_round(a, call, qkv, orders, r, &z[r]);
  if (orders && o) y = attention_merge(&a->base, o, z, a->rounds, qkv[2]);
  else attention_fail(call->x->ctx, &a->base, "out of memory");
  free(orders), free(o);
  return luna_linear_layer_forward(&a->out, y);
}
static const attention_system reformer_system = {
  "reformer", "Kitaev et al. 2020, arXiv 2001.04451", sizeof(reformer), reformer_options,
  reformer_init, reformer_forward, true, true, false
};
#endif
