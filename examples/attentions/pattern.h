/* pattern.h: what the sparse systems share: lists for block_pattern, attention through them, and the merging
   of several attentions of the same queries by their log-sum-exp. */
#ifndef ATTENTION_PATTERN_H
#define ATTENTION_PATTERN_H
#include "base.h"
#include "blocks.h"

/* ---- lists ---- */
typedef struct attention_patterns {
  block_pattern *at;                 /* [count]; zeros see everything */
  int64_t count;
  bool good;                         /* all memory was there */
} attention_patterns;

ATTENTION_FN attention_patterns attention_patterns_open(int64_t count) {
  attention_patterns p;
  p.at = (block_pattern *)calloc((size_t)count + 1, sizeof *p.at);
  p.count = count;
  p.good = p.at != NULL;
  return p;
}
/* Pattern i gets room for so many blocks, runs and rows of orders (0: natural order); null when there is no memory */
ATTENTION_FN block_pattern *attention_pattern_lists(attention_patterns *patterns, int64_t i, int64_t blocks,
                                                    int64_t runs, int64_t queries, int64_t keys) {
  block_pattern *p = patterns->at + i;
  const size_t numbers = (size_t)(2 * (blocks + 2) + queries + keys),
      run_bytes = (size_t)(runs + 1) * sizeof(block_run);
  const bool fits = blocks < INT32_MAX && runs < INT32_MAX; /* their numbers are of 32 bits */
  block_run *memory = patterns->good && fits ? (block_run *)calloc(1, run_bytes + numbers * sizeof(int32_t)) : NULL;
  int32_t *number = (int32_t *)(void *)((char *)memory + (memory ? run_bytes : 0));
  patterns->good = memory != NULL;
  if (!memory) return NULL;
  p->runs = memory;
  p->queries = number;
  p->offsets = number + blocks + 2;
  p->query_order = queries ? number + 2 * (blocks + 2) : NULL;
  p->key_order = keys ? number + 2 * (blocks + 2) + queries : NULL;
  p->key_count = keys;
  return p;
}
/* pattern i is the one before it */
ATTENTION_FN void attention_pattern_repeat(attention_patterns *patterns, int64_t i) {
  patterns->at[i] = patterns->at[i - 1];
}
ATTENTION_FN void attention_patterns_close(attention_patterns *patterns) {
  for (int64_t i = patterns->at ? patterns->count - 1 : -1; i >= 0; i--)
    if (i == 0 || patterns->at[i].runs != patterns->at[i - 1].runs) free((void *)(uintptr_t)patterns->at[i].runs);
  free(patterns->at);
  memset(patterns, 0, sizeof *patterns);
}
/* the block that is being written sees keys first .. first + count - 1 */
ATTENTION_FN void attention_pattern_run(block_pattern *p, int64_t first, int64_t count, bool whole) {
  int32_t *end = (int32_t *)(uintptr_t)p->offsets + p->blocks + 1;
  block_run *run = (block_run *)(uintptr_t)p->runs + *end;
  if (count <= 0) return;
  run->first = (int32_t)first, run->count = (int32_t)count, run->whole = whole;
  ++*end;
}
/* the block has the queries from the last block's end on up to `end`: the next begins */
ATTENTION_FN void attention_pattern_block(block_pattern *p, int64_t end) {
  int32_t *offsets = (int32_t *)(uintptr_t)p->offsets;
  ((int32_t *)(uintptr_t)p->queries)[++p->blocks] = (int32_t)end;
  offsets[p->blocks + 1] = offsets[p->blocks];
}
/* row i of an order is `row` */
ATTENTION_FN void attention_pattern_order(const int32_t *order, int64_t i, int64_t row) {
  ((int32_t *)(uintptr_t)order)[i] = (int32_t)row;
}
ATTENTION_FN void attention_pattern_window(block_pattern *p, int64_t left, int64_t right) {
  p->window = true;
  p->left = left, p->right = right;
}
#define ATTENTION_UNLIMITED INT32_MAX

/* softmax attention by patterns, which are closed; q, k, v [batch,n,d]; lengths may be null */
ATTENTION_FN luna_tensor *attention_sparse(const attention *a, luna_tensor *q, luna_tensor *k, luna_tensor *v,
                                           attention_patterns *patterns, const int32_t *lengths,
                                           luna_tensor **log_sum_exp) {
  block_config c;
  luna_tensor *y = NULL;
  memset(&c, 0, sizeof c);
  c.heads = a->heads, c.dropout = a->dropout, c.lengths = lengths;
  c.patterns = patterns->at, c.pattern_count = patterns->count;
  c.log_sum_exp = log_sum_exp;
  if (!patterns->good && q) attention_fail(q->ctx, a, "out of memory");
  else y = block_attention(q, k, v, &c);
  attention_patterns_close(patterns);
  return y;
}

/* ---- merging: y = sum_r softmax_r(z_r) o_r; `other` where no part saw a key ---- */
typedef struct attention_merge_state { int64_t parts, rows, heads, width; } attention_merge_state;
typedef struct attention_merge_work {
  attention_merge_state s;
  const float *o, *z, *other, *grad;
  float *y, *grad_o, *grad_z, *grad_other;
} attention_merge_work;
enum { ATTENTION_MERGE_ROWS = 64 };

/* weights of a row's head; false where all are empty */
ATTENTION_FN bool attention_merge_weights(const attention_merge_work *w, int64_t row, double *max, double *sum) {
  *max = -INFINITY, *sum = 0;
  for (int64_t r = 0; r < w->s.parts; r++) {
    const double z = (double)w->z[r * w->s.rows + row];
    if (z > *max) *max = z;
  }
  for (int64_t r = 0; r < w->s.parts && *max > -INFINITY; r++) *sum += exp((double)w->z[r * w->s.rows + row] - *max);
  return *max > -INFINITY;
}
/* rows are (batch row, token, head) */
ATTENTION_FN void attention_merge_task(void *work, int64_t item) {
  const attention_merge_work *w = (const attention_merge_work *)work;
  const int64_t d = w->s.width;
  for (int64_t row = item * ATTENTION_MERGE_ROWS; row < w->s.rows && row < (item + 1) * ATTENTION_MERGE_ROWS; row++) {
    double max, sum, mean = 0;
    const bool some = attention_merge_weights(w, row, &max, &sum);
    if (w->y) {
      if (!some && w->other) memcpy(w->y + row * d, w->other + row * d, (size_t)d * sizeof(float));
      else memset(w->y + row * d, 0, (size_t)d * sizeof(float));
    } else if (!some && w->grad_other)
      for (int64_t c = 0; c < d; c++) w->grad_other[row * d + c] += w->grad[row * d + c];
    for (int64_t pass = 0; some && pass < 2; pass++)
      for (int64_t r = 0; r < w->s.parts; r++) {
        const int64_t at = r * w->s.rows + row;
        const float weight = (float)(exp((double)w->z[at] - max) / sum);
        double dot = 0;
        if (weight == 0) continue;
        if (w->y) {
          for (int64_t c = 0; pass && c < d; c++) w->y[row * d + c] += weight * w->o[at * d + c];
          continue;
        }
        for (int64_t c = 0; c < d; c++) dot += (double)w->grad[row * d + c] * (double)w->o[at * d + c];
        if (pass == 0) mean += (double)weight * dot;
        else if (w->grad_z) w->grad_z[at] += (float)((double)weight * (dot - mean));
        for (int64_t c = 0; pass && w->grad_o && c < d; c++) w->grad_o[at * d + c] += weight * w->grad[row * d + c];
      }
  }
}
ATTENTION_FN luna_status attention_merge_forward(const luna_tensor *const *in, int count, luna_tensor *out,
                                                 void *state) {
  const luna_run run = luna_custom_run(out);
  attention_merge_work w;
  memset(&w, 0, sizeof w);
  w.s = *(const attention_merge_state *)state;
  w.o = in[0]->data, w.z = in[1]->data, w.other = count > 2 ? in[2]->data : NULL, w.y = out->data;
  attention_parallel(&run, (w.s.rows + ATTENTION_MERGE_ROWS - 1) / ATTENTION_MERGE_ROWS, attention_merge_task, &w);
  return LUNA_OK;
}
ATTENTION_FN luna_status attention_merge_backward(luna_tensor *const *in, int count, const luna_tensor *out,
                                                  void *state) {
  const luna_run run = luna_custom_run(out);
  attention_merge_work w;
  memset(&w, 0, sizeof w);
  w.s = *(const attention_merge_state *)state;
  w.o = in[0]->data, w.z = in[1]->data, w.grad = out->grad;
  w.grad_o = in[0]->grad, w.grad_z = in[1]->grad, w.grad_other = count > 2 ? in[2]->grad : NULL;
  attention_parallel(&run, (w.s.rows + ATTENTION_MERGE_ROWS - 1) / ATTENTION_MERGE_ROWS, attention_merge_task, &w);
  return LUNA_OK;
}
/* o: parts, each [batch,n,d], z: their log-sum-exp [batch,n,h]; other [batch,n,d] or null: zeros. It changes o, z. */
ATTENTION_FN luna_tensor *attention_merge(const attention *a, luna_tensor **o, luna_tensor **z, int64_t parts,
                                          luna_tensor *other) {
  attention_merge_state s;
  luna_tensor *in[3];
  int64_t rows[3], left = parts;
  if (!o[0] || !z[0]) return NULL;
  memcpy(rows, o[0]->shape, sizeof rows);
  while (left > 1) {                 /* one after the other along the batch, eight at a time */
    const int64_t first = left > 8 ? left - 8 : 0;
    o[first] = luna_concat(o + first, (int)(left - first), 0);
    z[first] = luna_concat(z + first, (int)(left - first), 0);
    left = first + 1;
  }
  in[0] = o[0], in[1] = z[0], in[2] = other;
  s.parts = parts, s.heads = a->heads, s.width = a->dim / a->heads, s.rows = rows[0] * rows[1] * a->heads;
  return attention_op(in, other ? 3 : 2, 3, rows, attention_merge_forward, attention_merge_backward, &s, sizeof s, 0);
}
#endif
