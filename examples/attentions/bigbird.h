/* BigBird, the form with internal global tokens: Zaheer et al. 2020, arXiv 2007.14062.
     y_i = softmax over j in S(i) of q_i k_j / sqrt(d_h), times v_j, in blocks of b tokens: the first and the last block
     see all; block i sees the set {0, i-1, i, i+1, last} and random_blocks[head, i-1, :]
   Entries of random_blocks that are no block of the sequence are ignored. They are drawn once: r distinct ones out of
   1 .. max_blocks - 2 without i-1, i, i+1, for each head and block. Options: block (b), random (r), max_blocks. Array:
   random_blocks [h, max_blocks - 2, r]. Cost a token: O((5 + r) b d). Not causal. */
#ifndef ATTENTION_BIGBIRD_H
#define ATTENTION_BIGBIRD_H
#include "pattern.h"

typedef struct bigbird {
  attention base;
  int64_t block, random, max_blocks;
  attention_projections p;
  luna_tensor *random_blocks;        /* integers */
} bigbird;
static const attention_option bigbird_options[] = {
  { "block", ATTENTION_COUNT, offsetof(bigbird, block), "64" },
  { "random", ATTENTION_COUNT, offsetof(bigbird, random), "3" },
  { "max_blocks", ATTENTION_COUNT, offsetof(bigbird, max_blocks), "64" },
  ATTENTION_LAST_OPTION
};

/* a row's uniform numbers in [-1, 1) become distinct blocks, -1 where there are no more */
static void bigbird_draw(const bigbird *a, int64_t block, int64_t *candidates, float *row) {
  int64_t count = 0;
  for (int64_t j = 1; j < a->max_blocks - 1; j++)
    if (j < block - 1 || j > block + 1) candidates[count++] = j;
  for (int64_t i = 0; i < a->random; i++) {
    const int64_t left = count - i;
    int64_t at = (int64_t)((0.5 + 0.5 * (double)row[i]) * (double)left);
    if (at >= left) at = left - 1;
    row[i] = left > 0 ? (float)candidates[at < 0 ? 0 : at] : -1;
    if (left > 0) candidates[at < 0 ? 0 : at] = candidates[left - 1];
  }
}
static void bigbird_init(void *layer) {
  bigbird *a = (bigbird *)layer;
  const int64_t rows = a->max_blocks > 2 ? a->max_blocks - 2 : 0;
  attention_require(&a->base, a->block > 0, "bigbird: block must be above 0");
  attention_projections_init(&a->base, &a->p);
  if (rows == 0 || a->random == 0 || !a->base.good) return;
  a->random_blocks = attention_param(&a->base, "random_blocks", LUNA_INIT_UNIFORM, 1, a->base.heads, rows, a->random,
                                     0);
  if (!a->base.good) return;
  float *values = (float *)malloc((size_t)(a->base.heads * rows * a->random) * sizeof(float));
  int64_t *candidates = (int64_t *)malloc((size_t)a->max_blocks * sizeof(int64_t));
  a->base.good = a->base.good && values && candidates && luna_read(a->random_blocks, values) == LUNA_OK;
  for (int64_t i = 0; a->base.good && i < a->base.heads * rows; i++)
    bigbird_draw(a, i % rows + 1, candidates, values + i * a->random);
  a->base.good = a->base.good && luna_write(a->random_blocks, values) == LUNA_OK;
  free(values), free(candidates);
}

/* one head of a sequence of n tokens; random: its rows of random_blocks; seen [nb]: room */
static void bigbird_pattern(const bigbird *a, attention_patterns *patterns, int64_t at, int64_t n, const float *random,
                            bool *seen) {
  const int64_t b = a->block, nb = (n + b - 1) / b, rows = a->random_blocks ? a->random_blocks->shape[1] : 0;
  const int64_t runs = nb < 5 + a->random ? nb : 5 + a->random; /* of a block, at most */
  block_pattern *p = attention_pattern_lists(patterns, at, nb, nb * runs, 0, 0);
  for (int64_t i = 0; p && i < nb; i++) {
    const bool all = i == 0 || i == nb - 1;
    for (int64_t j = 0; j < nb; j++) seen[j] = all || j == 0 || j == nb - 1 || (j >= i - 1 && j <= i + 1);
    for (int64_t r = 0; !all && i <= rows && r < a->random; r++) {
      const float block = random[(i - 1) * a->random + r];
      if (block >= 0 && block < (float)nb) seen[(int64_t)block] = true;
    }
    for (int64_t j = 0, end; j < nb; j = end + 1) {
      for (end = j; end < nb && seen[end]; end++);
      attention_pattern_run(p, j * b, (end * b < n ? end * b : n) - j * b, false);
    }
    attention_pattern_block(p, (i + 1) * b < n ? (i + 1) * b : n);
  }
}
static luna_tensor *bigbird_forward(void *layer, luna_attention_call *call) {
  const bigbird *a = (const bigbird *)layer;
  luna_tensor *x = call->x, *q = luna_linear_layer_forward(&a->p.q, x), *k = luna_linear_layer_forward(&a->p.k, x);
  luna_tensor *v = luna_linear_layer_forward(&a->p.v, x);
  const int64_t n = x->shape[1], heads = a->base.heads, numbers = luna_count(a->random_blocks);
  attention_patterns patterns = attention_patterns_open(call->lengths ? x->shape[0] * heads : heads);
  float *random = (float *)malloc((size_t)(numbers + 1) * sizeof(float));
  bool *seen = (bool *)malloc((size_t)(n + 1));
  patterns.good = patterns.good && random && seen && (numbers == 0 || luna_read(a->random_blocks, random) == LUNA_OK);
  for (int64_t i = 0; patterns.good && i < patterns.count; i++)
    bigbird_pattern(a, &patterns, i, call->lengths ? call->lengths[i / heads] : n,
                    random + i % heads * (numbers / heads), seen);
  free(random), free(seen);
  return luna_linear_layer_forward(&a->p.out, attention_sparse(&a->base, q, k, v, &patterns, call->lengths, NULL));
}
static const attention_system bigbird_system = {
  "bigbird", "Zaheer et al. 2020, arXiv 2007.14062", sizeof(bigbird), bigbird_options,
  bigbird_init, bigbird_forward, false, true, false
};
#endif
