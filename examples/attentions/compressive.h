/* compressive.h: Compressive Transformer (Rae et al., ICLR 2020, arXiv 1911.05507): Transformer-XL with a second
   memory, of what leaves the first, compressed.

     C = [compressed; memory; x];   y = attention by relative position of x over C (relative.h)
     old = the rows of [memory; x] that leave;  next_memory = the rest (M rows)
     new = compress(old with zero rows in front up to a multiple of c)
     next_compressed = the last K rows of [compressed; new]
     compress: mean or max of c rows, or conv: y_s = sum_a W[:,:,a] old[s c + a] + bias; or most-used: of the rows that
     leave, without the zero rows, one in c, those that a(old) below looks at most, in their order
     loss = mean of (a(old) - a(new))^2,  a(m) = softmax(q (m k_proj)^T / sqrt(d_h)) (m v_proj) a head
     q, k_proj, v_proj and old are constants in it: it alone trains conv
   base.memory, base.compressed [batch,K,d] come in (null: none), base.next_memory, base.next_compressed, base.loss go
   out. M and K: options memory, compressed; 0 = as many rows as came in. Memories carry no gradient.
   Parameters: see relative.h; conv: compress (weight [d,d,c], bias [d]). Time O(n (K + M + n) d + n d^2). */
#ifndef ATTENTION_COMPRESSIVE_H
#define ATTENTION_COMPRESSIVE_H
#include "relative.h"

enum { COMPRESSIVE_CONV, COMPRESSIVE_MEAN, COMPRESSIVE_MAX, COMPRESSIVE_MOST_USED };
typedef struct compressive {
  attention base;
  int64_t rate, compression, kept, kept_compressed;
  relative proj;
  luna_linear_layer compress;
} compressive;
static const attention_option compressive_options[] = {
  { "rate", ATTENTION_COUNT, offsetof(compressive, rate), "4" }, /* c */
  { "compression", ATTENTION_WORD, offsetof(compressive, compression), "conv|mean|max|most-used" },
  { "memory", ATTENTION_COUNT, offsetof(compressive, kept), "0" },
  { "compressed", ATTENTION_COUNT, offsetof(compressive, kept_compressed), "0" },
  ATTENTION_LAST_OPTION
};

static void compressive_init(void *layer) {
  compressive *a = (compressive *)layer;
  const int64_t d = a->base.dim;
  relative_init(&a->base, &a->proj);
  attention_require_in(&a->base, "rate", a->rate, 1, 1 << 16); /* one row that leaves is padded to so many */
  if (a->compression != COMPRESSIVE_CONV) return;
  a->compress.weight = attention_param(&a->base, "compress.weight", LUNA_INIT_NORMAL, 0.02, d, d, a->rate, 0);
  a->compress.bias = attention_param(&a->base, "compress.bias", LUNA_INIT_ZEROS, 0, d, 0, 0, 0);
}
/* old [batch, groups c, d] -> [batch, groups, d] */
static luna_tensor *compressive_compress(const compressive *a, luna_tensor *old) {
  const int64_t d = a->base.dim, c = a->rate;
  const int axes[3] = { 0, 2, 1 };
  int64_t shape[4], weight[2] = { d, c * d };
  if (!old) return NULL;
  shape[0] = old->shape[0], shape[1] = old->shape[1] / c, shape[2] = c, shape[3] = d;
  if (a->compression == COMPRESSIVE_MEAN) return luna_mean(luna_reshape(old, 4, shape), 2);
  if (a->compression == COMPRESSIVE_MAX) return luna_max(luna_reshape(old, 4, shape), 2);
  shape[2] = c * d;
  return luna_linear(luna_reshape(old, 3, shape), luna_reshape(luna_permute(a->compress.weight, axes), 2, weight),
                     a->compress.bias);
}
/* ---- most-used: in old [batch,R,d], q [batch,n,d], k of old, sizes [batch,3]: real rows of q and of old, rows to
   keep; out [batch,kept,d] ---- */
enum { COMPRESSIVE_ROWS = 64 };
typedef struct compressive_state { int64_t heads; } compressive_state;
static size_t compressive_room(int64_t rows) { /* usage [R], and scores [64,R] */
  return ((size_t)rows * (sizeof(double) + COMPRESSIVE_ROWS * sizeof(float)) + 63) / 64 * 64;
}
/* adds softmax(s) to the usage */
static void compressive_use(const float *s, int64_t n, double scale, double *usage) {
  double max = -INFINITY, sum = 0;
  for (int64_t j = 0; j < n; j++) if ((double)s[j] > max) max = (double)s[j];
  for (int64_t j = 0; j < n; j++) sum += exp(scale * ((double)s[j] - max));
  for (int64_t j = 0; j < n; j++) usage[j] += exp(scale * ((double)s[j] - max)) / sum;
}
static luna_status compressive_used_forward(const luna_tensor *const *in, int count, luna_tensor *out, void *state) {
  const int64_t heads = ((const compressive_state *)state)->heads, rows = in[0]->shape[1], n = in[1]->shape[1],
      d = out->shape[2], dh = d / heads;
  luna_run run = luna_custom_run(out);
  double *usage = (double *)run.scratch;
  float *scores = (float *)(usage + rows);
  (void)count;
  run.scratch = (char *)run.scratch + compressive_room(rows), run.scratch_size -= compressive_room(rows);
  run.parallel_for = NULL, run.threads = 1;
  memset(out->data, 0, (size_t)luna_count(out) * sizeof(float));
  for (int64_t b = 0; b < out->shape[0]; b++) {
    const float *old = in[0]->data + b * rows * d, *size = in[3]->data + 3 * b;
    const int64_t queries = (int64_t)size[0], left = (int64_t)size[1], kept = (int64_t)size[2];
    float *to = out->data + b * out->shape[1] * d;
    memset(usage, 0, (size_t)rows * sizeof *usage);
    for (int64_t h = 0; h < heads; h++)
      for (int64_t i = 0; left > 0 && i < queries; i += COMPRESSIVE_ROWS) {
        const int64_t some = queries - i < COMPRESSIVE_ROWS ? queries - i : (int64_t)COMPRESSIVE_ROWS;
        attention_gemm(run, in[1]->data + (b * n + i) * d + h * dh, d, false, in[2]->data + b * rows * d + h * dh, d,
                       true,
                       scores, left, some, left, dh, false);
        for (int64_t r = 0; r < some; r++) compressive_use(scores + r * left, left, 1 / sqrt((double)dh), usage);
      }
    for (int64_t j = 0, taken = 0; j < left && taken < kept; j++) {
      int64_t more = 0;                /* rows used more than j, of equals the first */
      for (int64_t o = 0; o < left; o++) more += usage[o] > usage[j] || (usage[o] == usage[j] && o < j);
      if (more < kept) memcpy(to + taken++ * d, old + j * d, (size_t)d * sizeof(float));
    }
  }
  return LUNA_OK;
}
static luna_tensor *compressive_used(const compressive *a, const luna_attention_call *call, luna_tensor *q,
                                     luna_tensor *old,
                                     const int32_t *left, const int32_t *groups, int64_t largest) {
  const int64_t batch = call->x->shape[0], sizes[2] = { batch, 3 };
  float *values = (float *)malloc((size_t)(3 * batch + 1) * sizeof(float));
  const compressive_state s = { a->base.heads };
  luna_tensor *in[4], *m = relative_read(call, old);
  int64_t shape[3];
  if (!old || !values) {
    free(values);
    return NULL;
  }
  for (int64_t b = 0; b < batch; b++) {
    values[3 * b] = (float)(call->lengths ? call->lengths[b] : call->x->shape[1]);
    values[3 * b + 1] = (float)left[b], values[3 * b + 2] = (float)groups[b];
  }
  in[0] = old, in[1] = luna_detach(q), in[2] = luna_detach(luna_linear(m, a->proj.k, NULL));
  in[3] = luna_tensor_new(call->x->ctx, values, 2, sizes);
  free(values);
  shape[0] = batch, shape[1] = largest, shape[2] = a->base.dim;
  return attention_op(in, 4, 3, shape, compressive_used_forward, attention_rows_backward, &s, sizeof s,
                      compressive_room(old->shape[1]) + attention_gemm_scratch(COMPRESSIVE_ROWS, old->shape[1],
                          a->base.dim / a->base.heads));
}

/* attention by content of q over m, whose projections are constants */
static luna_tensor *compressive_look(const compressive *a, const luna_attention_call *call, luna_tensor *q,
                                     luna_tensor *m, const int32_t *keys) {
  luna_attention_config c;
  memset(&c, 0, sizeof c);
  c.heads = a->base.heads;
  c.lengths = keys;
  if (call->norm) m = luna_layer_norm(m, luna_detach(call->norm->weight), luna_detach(call->norm->bias), 0);
  return luna_softmax_attention(luna_detach(q), luna_linear(m, luna_detach(a->proj.k), NULL),
                                luna_linear(m, luna_detach(a->proj.v), NULL), &c);
}
/* mean over the batch of each sequence's mean of squares over its real rows */
static luna_tensor *compressive_mean_square(const compressive *a, const luna_attention_call *call,
                                            luna_tensor *difference) {
  const int64_t batch = call->x->shape[0], n = call->x->shape[1], shape[2] = { batch, n }, flat = batch * n;
  float *weights = (float *)malloc((size_t)(flat + 1) * sizeof(float));
  luna_tensor *sum = luna_sum(luna_mul(difference, difference), 2), *w = NULL;
  for (int64_t i = 0; weights && i < flat; i++) {
    const int64_t rows = call->lengths ? call->lengths[i / n] : n;
    weights[i] = i % n < rows ? (float)(1.0 / ((double)(batch * rows) * (double)a->base.dim)) : 0;
  }
  if (weights) w = luna_tensor_new(call->x->ctx, weights, 2, shape);
  free(weights);
  return luna_sum(luna_reshape(luna_mul(sum, w), 1, &flat), 0);
}
/* Next memories and the loss. ends [4 batch]: where the sequences of [memory; input] end, and room */
static void compressive_move(compressive *a, const luna_attention_call *call, luna_tensor *q, int32_t *ends,
                             int64_t kept) {
  const int64_t batch = call->x->shape[0], held = a->base.compressed ? a->base.compressed->shape[1] : 0;
  /* rows that leave; groups of c */
  int32_t *left = ends + batch, *groups = left + batch, *padded = groups + batch;
  const int64_t c = a->rate;
  luna_tensor *all = relative_inputs(call, a->base.memory), *parts[2], *old, *now, *before;
  int64_t largest = 0, fewest = INT32_MAX, count;
  for (int64_t b = 0; b < batch; b++) {
    left[b] = ends[b] - (int32_t)kept;
    groups[b] = (int32_t)((left[b] + c - 1) / c);
    padded[b] = (int32_t)(groups[b] * c);
    if (groups[b] > largest) largest = groups[b];
    if (groups[b] < fewest) fewest = groups[b];
  }
  if (kept > 0) a->base.next_memory = attention_rows(all, ends, NULL, kept);
  a->base.next_compressed = a->base.compressed;
  if (largest == 0) return;
  old = attention_rows(all, left, left, largest * c);
  parts[0] = a->base.compressed;
  parts[1] = a->compression == COMPRESSIVE_MOST_USED ? compressive_used(a, call, q, old, left, groups, largest) :
             compressive_compress(a, attention_rows(all, left, padded, largest * c));
  before = compressive_look(a, call, q, old, left), now = compressive_look(a, call, q, parts[1], groups);
  a->base.loss = compressive_mean_square(a, call, luna_add(now, luna_scale(before, -1)));
  for (int64_t b = 0; b < batch; b++) groups[b] += (int32_t)held;
  count = relative_kept(a->base.compressed, a->kept_compressed, held + fewest);
  a->base.next_compressed = count > 0 ? attention_rows(held ? luna_concat(parts, 2, 1) : parts[1], groups, NULL,
                                                       count) : NULL;
}
static luna_tensor *compressive_forward(void *layer, luna_attention_call *call) {
  compressive *a = (compressive *)layer;
  luna_tensor *q = luna_linear(call->x, a->proj.q, NULL), *parts[2], *past = a->base.memory;
  int64_t first;
  int32_t *ends = relative_ends(call, a->base.memory, &first);
  if (ends && q) compressive_move(a, call, q, ends, relative_kept(a->base.memory, a->kept, first));
  free(ends);
  parts[0] = a->base.compressed, parts[1] = past;
  if (a->base.compressed) past = past ? luna_concat(parts, 2, 1) : a->base.compressed;
  return relative_forward(&a->base, &a->proj, call->x, q, relative_read(call, past), 0, call->lengths);
}
static const attention_system compressive_system = {
  "compressive", "Rae et al., ICLR 2020, arXiv 1911.05507", sizeof(compressive), compressive_options, compressive_init,
      compressive_forward, true,
  false, false
};
#endif
