/* blocks.h: softmax attention in which queries see lists of keys [arXiv 1904.10509, 2004.05150, 2007.14062].

     block_pattern p = { .blocks = 2, .queries = starts, .offsets = offsets, .runs = runs };
     block_config config = { .heads = 8, .patterns = &p, .pattern_count = 1 };
     y = block_attention(q, k, v, &config);          q [batch,n,d], k [batch,m,d], v [batch,m,e] -> y [batch,n,e]

   Queries come in blocks. Each block has runs of keys, which all its queries see, except for keys outside the window. A
   query that is in no block, or sees no key, gets zeros, and its log-sum-exp is -Inf. Queries and keys beyond a
   sequence's length are not read. It needs luna.h alone, and runs on the CPU. A window without lists is faster as
   luna_attention_config's left and right.

   How it works: it is a custom op. Tiles of at most 64 queries of a block meet parts of at most 256 of its keys, whose
   rows are gathered. The parts of a softmax merge as they come. Backward computes the weights again from the
   log-sum-exp. So memory does not grow with the keys seen. */
#ifndef LUNA_BLOCKS_H
#define LUNA_BLOCKS_H
#include "luna.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__GNUC__) || defined(__clang__)
#define BLOCK_FN static __attribute__((unused))
#else
#define BLOCK_FN static
#endif

typedef struct block_run {
  int32_t first, count;              /* keys first .. first + count - 1, or those of key_order */
  bool whole;                        /* every query of the block sees all of them, whatever the window */
} block_run;
typedef struct block_pattern {
  bool window;                       /* query i sees the keys j with -left <= j - i <= right */
  int64_t left, right;               /* may be negative: right -1 is j < i */
  bool not_self;                     /* query i does not see key i */
  int64_t blocks;                    /* 0: no lists, a query sees all keys of its window */
  const int32_t *queries;            /* [blocks + 1] ascending: block c has queries queries[c] .. queries[c + 1] - 1 */
  const int32_t *offsets;            /* [blocks + 1] ascending: and sees runs[offsets[c]] .. runs[offsets[c + 1] - 1] */
  const block_run *runs;             /* a key in two runs of a block counts twice */
  const int32_t *query_order;        /* [queries[blocks]] rows, each once: the order of the queries' numbers; or null */
  const int32_t *key_order;          /* [key_count] rows in whose order runs number keys, or null; windows go by rows */
  int64_t key_count;
} block_pattern;
typedef struct block_config {
  int64_t heads;                     /* 0 = 1 */
  const int32_t *lengths;            /* [batch] real queries and keys, or null: all */
  bool causal;                       /* query i sees keys j <= i, except in runs that are whole */
  float scale;                       /* 0 = 1/sqrt(head_dim) */
  float dropout;                     /* of the attention matrix */
  const block_pattern *patterns;     /* copied */
  int64_t pattern_count;             /* 1, heads, or batch * heads */
  luna_tensor **log_sum_exp;         /* where to put the scores' [batch,n,heads], or null; it has a gradient */
} block_config;

/* ---- what the op keeps: this header, then the patterns, their arrays, the lengths and the log-sum-exp ---- */
typedef struct block_state {
  int64_t batch, heads, queries, keys, dim, value_dim; /* dims of a head */
  int64_t numbers;                   /* dropout's element: ((b heads + head) queries + i) numbers + the key's number */
  int64_t pattern_count;
  float scale;
  bool causal, drops, shows;         /* shows: the result has the log-sum-exp as its last columns */
  block_pattern *patterns;
  const int32_t *lengths;
  float *log_sum_exp;                /* [batch, queries, heads] */
} block_state;

enum { BLOCK_QUERIES = 64, BLOCK_KEYS = 256, BLOCK_TASKS = 8 };

BLOCK_FN int64_t block_min(int64_t a, int64_t b) { return a < b ? a : b; }
BLOCK_FN int64_t block_max(int64_t a, int64_t b) { return a > b ? a : b; }

/* Returns where an array of the state is: behind `used` bytes of memory. With memory null it counts the bytes alone. */
BLOCK_FN const void *block_put(const void *from, size_t bytes, char *memory, size_t *used, bool copy) {
  char *to = memory ? memory + *used : NULL;
  if (!from) return NULL;
  *used += (bytes + 15) / 16 * 16;
  if (!to) return from;
  if (copy && bytes) memcpy(to, from, bytes);
  return to;
}
/* Points to the arrays that follow the header in `memory`, and with `copy` copies them there. Returns the bytes. */
BLOCK_FN size_t block_arrays(block_state *s, char *memory, bool copy) {
  const size_t number = sizeof(int32_t);
  size_t used = (sizeof *s + 15) / 16 * 16;
  s->patterns = (block_pattern *)(uintptr_t)block_put(s->patterns, (size_t)s->pattern_count * sizeof *s->patterns,
                                                      memory, &used, copy);
  for (int64_t i = 0; i < s->pattern_count; i++) {
    block_pattern p = s->patterns[i];
    if (p.blocks > 0) {
      const size_t starts = (size_t)(p.blocks + 1) * number;
      p.queries = (const int32_t *)block_put(p.queries, starts, memory, &used, copy);
      p.offsets = (const int32_t *)block_put(p.offsets, starts, memory, &used, copy);
      p.runs = (const block_run *)block_put(p.runs, (size_t)p.offsets[p.blocks] * sizeof *p.runs, memory, &used, copy);
      p.query_order = (const int32_t *)block_put(p.query_order, (size_t)p.queries[p.blocks] * number, memory, &used,
                                                 copy);
      p.key_order = (const int32_t *)block_put(p.key_order, (size_t)p.key_count * number, memory, &used, copy);
    }
    if (memory) s->patterns[i] = p;
  }
  s->lengths = (const int32_t *)block_put(s->lengths, (size_t)s->batch * number, memory, &used, copy);
  s->log_sum_exp = memory ? (float *)(void *)(memory + used) : NULL;
  return used + (size_t)(s->batch * s->queries * s->heads) * sizeof(float);
}

/* ---- a tile: some queries of a block; and the keys that one of them may see ---- */
typedef struct block_key { int32_t row, number; bool whole; } block_key;
typedef struct block_tile {
  const block_state *s;
  const block_pattern *p;
  int64_t pair, b, h, block;
  int64_t length, keys;              /* real queries and keys */
  int64_t left, right;
  int64_t n, low, high;              /* queries; the least and the greatest row */
  int32_t row[BLOCK_QUERIES];
  int64_t run, at;                   /* of the next key */
} block_tile;

BLOCK_FN void block_tile_of(block_tile *t, const block_state *s, int64_t pair) {
  const int64_t unlimited = INT32_MAX;
  memset(t, 0, sizeof *t);
  t->s = s, t->pair = pair;
  t->p = &s->patterns[pair % s->pattern_count];
  t->b = pair / s->heads, t->h = pair % s->heads;
  t->length = s->lengths ? block_min(s->lengths[t->b], s->queries) : s->queries;
  t->keys = s->lengths ? s->lengths[t->b] : s->keys;
  t->left = t->p->window ? block_max(-unlimited, block_min(t->p->left, unlimited)) : unlimited;
  t->right = t->p->window ? block_max(-unlimited, block_min(t->p->right, unlimited)) : unlimited;
  if (s->causal) t->right = block_min(t->right, 0);
}
BLOCK_FN int64_t block_first_query(const block_tile *t, int64_t block) {
  return t->p->blocks ? t->p->queries[block] : block * t->length;
}
/* Takes the next queries of the tile's block, from number *query on; false: there are none. */
BLOCK_FN bool block_next_queries(block_tile *t, int64_t *query) {
  const int64_t end = block_first_query(t, t->block + 1);
  for (t->n = 0; *query < end && t->n < BLOCK_QUERIES; ++*query) {
    const int64_t row = t->p->query_order ? t->p->query_order[*query] : *query;
    if (row >= t->length) continue;
    t->low = t->n ? block_min(t->low, row) : row;
    t->high = t->n ? block_max(t->high, row) : row;
    t->row[t->n++] = (int32_t)row;
  }
  t->run = t->p->blocks ? t->p->offsets[t->block] : 0;
  t->at = 0;
  return t->n > 0;
}
/* Takes up to BLOCK_KEYS keys that one of the queries may see, and returns how many. */
BLOCK_FN int64_t block_next_keys(block_tile *t, block_key *keys) {
  const block_run all = { 0, (int32_t)t->s->keys, false };
  const int64_t end = t->p->blocks ? t->p->offsets[t->block + 1] : 1;
  int64_t n = 0;
  for (; t->run < end; t->run++, t->at = 0) {
    const block_run run = t->p->blocks ? t->p->runs[t->run] : all;
    const int64_t from = run.whole ? 0 : t->low - t->left, to = run.whole ? INT32_MAX : t->high + t->right;
    if (!t->p->key_order) t->at = block_max(t->at, from - run.first);
    for (; t->at < run.count; t->at++) {
      const int64_t number = run.first + t->at, row = t->p->key_order ? t->p->key_order[number] : number;
      if (!t->p->key_order && row > to) break;
      if (row >= t->keys || row < from || row > to) continue;
      if (n == BLOCK_KEYS) return n;
      keys[n].row = (int32_t)row, keys[n].number = (int32_t)number, keys[n].whole = run.whole;
      n++;
    }
  }
  return n;
}
BLOCK_FN bool block_sees(const block_tile *t, int64_t query, const block_key *key) {
  const int64_t distance = key->row - query;
  if (key->whole) return true;
  return distance >= -t->left && distance <= t->right && !(t->p->not_self && distance == 0);
}
/* whether all queries of the tile see the key */
BLOCK_FN bool block_all_see(const block_tile *t, const block_key *key) {
  return key->whole || (!t->p->not_self && key->row >= t->high - t->left && key->row <= t->low + t->right);
}

/* ---- one task's memory and products ---- */
typedef struct block_space {
  float *q, *g, *o, *dq;             /* [queries, dim], [queries, value_dim] twice, [queries, dim] */
  float *k, *v, *dk, *dv;            /* of a part's keys */
  float *scores, *slopes, *mask;     /* [queries, BLOCK_KEYS] */
  block_key *key;
  luna_run run;                      /* for products */
} block_space;
typedef struct block_work {
  const block_state *s;
  luna_tensor *const *in;
  luna_tensor *out;
  luna_run run;
  int64_t tasks;
  bool backward;
} block_work;

BLOCK_FN size_t block_gemm_scratch(int64_t m, int64_t n, int64_t k) {
  luna_gemm_args g;
  memset(&g, 0, sizeof g);
  g.m = m, g.n = n, g.k = k;
  g.transpose_a = g.transpose_b = true; /* needs the most */
  return luna_gemm_scratch(&g);
}
/* Lays out a task's memory from `at` on; returns its bytes. */
BLOCK_FN size_t block_layout(const block_state *s, char *at, block_space *m) {
  const int64_t d = s->dim, dv = s->value_dim, widest = block_max(block_max(d, dv), BLOCK_KEYS);
  const int64_t sizes[11] = { BLOCK_QUERIES * d, BLOCK_QUERIES * dv, BLOCK_QUERIES * dv, BLOCK_QUERIES * d,
                              BLOCK_KEYS * d, BLOCK_KEYS * dv, BLOCK_KEYS * d, BLOCK_KEYS * dv,
                              BLOCK_QUERIES * BLOCK_KEYS, BLOCK_QUERIES * BLOCK_KEYS, BLOCK_QUERIES * BLOCK_KEYS };
  float **const arrays[11] = { &m->q, &m->g, &m->o, &m->dq, &m->k, &m->v, &m->dk, &m->dv,
                               &m->scores, &m->slopes, &m->mask };
  size_t used = 0;
  for (int i = 0; i < 11; i++) {
    if (at) *arrays[i] = (float *)(void *)(at + used);
    used += ((size_t)sizes[i] * sizeof(float) + 63) / 64 * 64;
  }
  if (at) m->key = (block_key *)(void *)(at + used);
  used += (BLOCK_KEYS * sizeof(block_key) + 63) / 64 * 64;
  if (at) m->run.scratch = at + used;
  m->run.scratch_size = (block_gemm_scratch(BLOCK_KEYS, widest, widest) + 63) / 64 * 64;
  return used + m->run.scratch_size;
}
/* C (+)= scale A B */
typedef struct block_matrix { const float *at; int64_t row; bool transposed; } block_matrix;
BLOCK_FN void block_product(const block_space *m, float scale, int64_t rows, int64_t columns, int64_t depth,
                            block_matrix a, block_matrix b, float *c, int64_t c_row, bool add) {
  luna_gemm_args g;
  memset(&g, 0, sizeof g);
  g.a = a.at, g.a_row = a.row, g.transpose_a = a.transposed;
  g.b = b.at, g.b_row = b.row, g.transpose_b = b.transposed;
  g.c = c, g.c_row = c_row;
  g.m = rows, g.n = columns, g.k = depth;
  g.scale = scale;
  g.accumulate = add;
  g.run = m->run;
  (void)luna_gemm_f32(&g);           /* cannot fail: these sizes fit */
}
BLOCK_FN block_matrix block_matrix_of(const float *at, int64_t row, bool transposed) {
  const block_matrix m = { at, row, transposed };
  return m;
}

/* where row `row` of the tile's head begins in a tensor [batch or 1, rows, width of all heads] */
BLOCK_FN int64_t block_place(const block_tile *t, const luna_tensor *x, int64_t width, int64_t row) {
  const int64_t b = x->shape[0] == 1 ? 0 : t->b;
  return (b * x->shape[1] + row) * x->shape[2] + t->h * width;
}
BLOCK_FN void block_gather_queries(const block_tile *t, const luna_tensor *x, const float *from, int64_t width,
                                   float *to) {
  for (int64_t i = 0; i < t->n; i++)
    memcpy(to + i * width, from + block_place(t, x, width, t->row[i]), (size_t)width * sizeof(float));
}
BLOCK_FN void block_gather_keys(const block_tile *t, const luna_tensor *x, const block_key *key, int64_t n,
                                int64_t width, float *to) {
  for (int64_t j = 0; j < n; j++)
    memcpy(to + j * width, x->data + block_place(t, x, width, key[j].row), (size_t)width * sizeof(float));
}
BLOCK_FN void block_add_rows(float *to, const float *from, int64_t n) {
  for (int64_t i = 0; i < n; i++) to[i] += from[i];
}
BLOCK_FN bool block_finite(float x) { return x - x == 0; }
/* NaN and Inf become 0, so that a weight of 0 hides them; returns whether there were any. */
BLOCK_FN bool block_clean(float *x, int64_t n) {
  bool any = false;
  for (int64_t i = 0; i < n; i++) {
    if (block_finite(x[i])) continue;
    x[i] = 0;
    any = true;
  }
  return any;
}
/* Sets the scores of what a query does not see to `value`. */
BLOCK_FN void block_hide(const block_tile *t, const block_key *key, int64_t n, float value, float *scores) {
  for (int64_t j = 0; j < n; j++) {
    if (block_all_see(t, &key[j])) continue;
    for (int64_t i = 0; i < t->n; i++)
      if (!block_sees(t, t->row[i], &key[j])) scores[i * BLOCK_KEYS + j] = value;
  }
}
/* The factors of dropout, those of keys whose numbers follow one another at a time */
BLOCK_FN void block_drop(const block_work *w, const block_tile *t, const block_key *key, int64_t n, float *mask) {
  const block_state *s = t->s;
  for (int64_t i = 0; i < t->n; i++)
    for (int64_t j = 0, end; j < n; j = end) {
      for (end = j + 1; end < n && key[end].number == key[end - 1].number + 1; end++);
      luna_custom_dropout(w->out, (t->pair * s->queries + t->row[i]) * s->numbers + key[j].number, end - j,
                          mask + i * BLOCK_KEYS + j);
    }
}
/* index of a query's log-sum-exp */
BLOCK_FN int64_t block_line(const block_tile *t, int64_t i) {
  return (t->b * t->s->queries + t->row[i]) * t->s->heads + t->h;
}

/* ---- forward ---- */
/* Adds what block_clean left out of V, to the queries that see it. */
BLOCK_FN void block_add_infinite(const block_work *w, const block_tile *t, const block_space *m, int64_t n) {
  const luna_tensor *v = w->in[2];
  const int64_t dv = t->s->value_dim;
  for (int64_t j = 0; j < n; j++) {
    const float *row = v->data + block_place(t, v, dv, m->key[j].row);
    for (int64_t c = 0; c < dv; c++) {
      if (block_finite(row[c])) continue;
      for (int64_t i = 0; i < t->n; i++)
        if (block_sees(t, t->row[i], &m->key[j])) m->o[i * dv + c] += m->scores[i * BLOCK_KEYS + j] * row[c];
    }
  }
}
/* What a query has summed over the parts so far: the largest score, the sum of exp(score - top) */
typedef struct block_stats { float top; double sum; bool sees; } block_stats;
/* A query's scores become weights exp(score - top), and its sums so far fade to the new top. */
BLOCK_FN void block_softmax(block_stats *stats, int64_t n, float *scores, int64_t value_dim, float *out) {
  float top = stats->top;
  double sum = 0;
  for (int64_t j = 0; j < n; j++)
    if (scores[j] > top || scores[j] != scores[j]) top = scores[j];
  if (top == -HUGE_VALF) {           /* it sees nothing yet: two such parts must not give NaN */
    memset(scores, 0, (size_t)n * sizeof(float));
    return;
  }
  const float fade = stats->top == -HUGE_VALF ? 0 : expf(stats->top - top);
  for (int64_t j = 0; j < n; j++) {
    scores[j] = expf(scores[j] - top);
    sum += (double)scores[j];
  }
  for (int64_t c = 0; c < value_dim; c++) out[c] *= fade;
  stats->sum = stats->sum * (double)fade + sum;
  stats->top = top;
}
BLOCK_FN void block_forward_part(const block_work *w, const block_tile *t, const block_space *m, block_stats *stats,
                                 int64_t n) {
  const block_state *s = t->s;
  const int64_t d = s->dim, dv = s->value_dim;
  block_gather_keys(t, w->in[1], m->key, n, d, m->k);
  block_gather_keys(t, w->in[2], m->key, n, dv, m->v);
  block_product(m, s->scale, t->n, n, d, block_matrix_of(m->q, d, false), block_matrix_of(m->k, d, true), m->scores,
                BLOCK_KEYS, false);
  block_hide(t, m->key, n, -HUGE_VALF, m->scores);
  if (s->drops) block_drop(w, t, m->key, n, m->mask);
  for (int64_t i = 0; i < t->n; i++) {
    float *scores = m->scores + i * BLOCK_KEYS;
    for (int64_t j = 0; j < n && !stats[i].sees; j++) stats[i].sees = block_sees(t, t->row[i], &m->key[j]);
    block_softmax(&stats[i], n, scores, dv, m->o + i * dv);
    for (int64_t j = 0; j < n && s->drops; j++) scores[j] *= m->mask[i * BLOCK_KEYS + j];
  }
  const bool infinite = block_clean(m->v, n * dv);
  block_product(m, 1, t->n, dv, n, block_matrix_of(m->scores, BLOCK_KEYS, false), block_matrix_of(m->v, dv, false),
                m->o, dv, true);
  if (infinite) block_add_infinite(w, t, m, n);
}
BLOCK_FN void block_forward_tile(const block_work *w, block_tile *t, const block_space *m) {
  const block_state *s = t->s;
  const int64_t dv = s->value_dim, width = w->out->shape[2];
  block_stats stats[BLOCK_QUERIES];
  int64_t n;
  for (int64_t i = 0; i < t->n; i++) {
    stats[i].top = -HUGE_VALF, stats[i].sum = 0, stats[i].sees = false;
  }
  memset(m->o, 0, (size_t)(t->n * dv) * sizeof(float));
  block_gather_queries(t, w->in[0], w->in[0]->data, s->dim, m->q);
  while ((n = block_next_keys(t, m->key)) > 0) block_forward_part(w, t, m, stats, n);
  for (int64_t i = 0; i < t->n; i++) {
    float *out = w->out->data + (t->b * s->queries + t->row[i]) * width + t->h * dv;
    /* it sees keys, all of a score of -Inf: 0 / 0 */
    const double sum = stats[i].sees && stats[i].sum == 0 ? (double)NAN : stats[i].sum;
    if (!stats[i].sees) continue;
    for (int64_t c = 0; c < dv; c++) out[c] = (float)((double)m->o[i * dv + c] / sum);
    s->log_sum_exp[block_line(t, i)] = (float)((double)stats[i].top + log(sum));
  }
}

/* ---- backward: dP = mask (dO . v), dS = P (dP - delta), where delta = dO . O less the log-sum-exp's gradient ---- */
/* log-sum-exp and delta of a tile's queries */
BLOCK_FN void block_lines(const block_work *w, const block_tile *t, const block_space *m, float *lse, float *delta) {
  const block_state *s = t->s;
  const int64_t dv = s->value_dim, width = w->out->shape[2];
  for (int64_t i = 0; i < t->n; i++) {
    const int64_t row = (t->b * s->queries + t->row[i]) * width;
    const float *g = w->out->grad + row, *y = w->out->data + row;
    double dot = 0;
    memcpy(m->g + i * dv, g + t->h * dv, (size_t)dv * sizeof(float));
    for (int64_t c = 0; c < dv; c++) dot += (double)g[t->h * dv + c] * (double)y[t->h * dv + c];
    if (s->shows) dot -= (double)g[s->heads * dv + t->h];
    lse[i] = s->log_sum_exp[block_line(t, i)];
    delta[i] = (float)dot;
  }
}
BLOCK_FN void block_backward_part(const block_work *w, const block_tile *t, const block_space *m, const float *lse,
                                  const float *delta, int64_t n) {
  const block_state *s = t->s;
  const luna_tensor *k = w->in[1], *v = w->in[2];
  const int64_t d = s->dim, dv = s->value_dim;
  const block_matrix p = block_matrix_of(m->scores, BLOCK_KEYS, true);
  const block_matrix ds = block_matrix_of(m->slopes, BLOCK_KEYS, true);
  block_gather_keys(t, k, m->key, n, d, m->k);
  block_gather_keys(t, v, m->key, n, dv, m->v);
  block_product(m, s->scale, t->n, n, d, block_matrix_of(m->q, d, false), block_matrix_of(m->k, d, true), m->scores,
                BLOCK_KEYS, false);
  block_product(m, 1, t->n, n, dv, block_matrix_of(m->g, dv, false), block_matrix_of(m->v, dv, true), m->slopes,
                BLOCK_KEYS, false);
  if (s->drops) block_drop(w, t, m->key, n, m->mask);
  for (int64_t i = 0; i < t->n; i++)
    for (int64_t j = 0; j < n; j++) {
      const int64_t at = i * BLOCK_KEYS + j;
      const float mask = s->drops ? m->mask[at] : 1, weight = expf(m->scores[at] - lse[i]);
      m->scores[at] = weight * mask;
      m->slopes[at] = weight * (m->slopes[at] * mask - delta[i]);
    }
  block_hide(t, m->key, n, 0, m->scores);
  block_hide(t, m->key, n, 0, m->slopes);
  block_clean(m->k, n * d);
  block_product(m, s->scale, t->n, d, n, block_matrix_of(m->slopes, BLOCK_KEYS, false), block_matrix_of(m->k, d, false),
                m->dq, d, true);
  block_product(m, s->scale, n, d, t->n, ds, block_matrix_of(m->q, d, false), m->dk, d, false);
  block_product(m, 1, n, dv, t->n, p, block_matrix_of(m->g, dv, false), m->dv, dv, false);
  for (int64_t j = 0; j < n; j++) {
    const int64_t row = m->key[j].row;
    if (k->grad) block_add_rows(k->grad + block_place(t, k, d, row), m->dk + j * d, d);
    if (v->grad) block_add_rows(v->grad + block_place(t, v, dv, row), m->dv + j * dv, dv);
  }
}
BLOCK_FN void block_backward_tile(const block_work *w, block_tile *t, const block_space *m) {
  const luna_tensor *q = w->in[0];
  const int64_t d = t->s->dim;
  float lse[BLOCK_QUERIES], delta[BLOCK_QUERIES];
  int64_t n;
  block_gather_queries(t, q, q->data, d, m->q);
  block_lines(w, t, m, lse, delta);
  memset(m->dq, 0, (size_t)(t->n * d) * sizeof(float));
  while ((n = block_next_keys(t, m->key)) > 0) block_backward_part(w, t, m, lse, delta, n);
  for (int64_t i = 0; i < t->n && q->grad; i++)
    block_add_rows(q->grad + block_place(t, q, d, t->row[i]), m->dq + i * d, d);
}

/* ---- tasks: forward shares out tiles, backward the heads or pairs whose gradients are apart ---- */
BLOCK_FN int64_t block_owner(const block_work *w, int64_t pair, int64_t count) {
  const block_state *s = w->s;
  bool one_for_all = false;
  if (!w->backward) return count;
  for (int i = 0; i < 3; i++) one_for_all = one_for_all || w->in[i]->shape[0] == 1;
  return one_for_all ? pair % s->heads : pair;
}
BLOCK_FN void block_task(void *work, int64_t task) {
  const block_work *w = (const block_work *)work;
  const block_state *s = w->s;
  block_space m;
  block_tile t;
  int64_t count = 0;
  memset(&m, 0, sizeof m);
  m.run.isa = w->run.isa;
  block_layout(s, (char *)w->run.scratch + (size_t)task * block_layout(s, NULL, &m), &m);
  for (int64_t pair = 0; pair < s->batch * s->heads; pair++) {
    block_tile_of(&t, s, pair);
    for (t.block = 0; t.block < block_max(t.p->blocks, 1); t.block++) {
      int64_t query = block_first_query(&t, t.block);
      for (; block_next_queries(&t, &query); count++) {
        if (block_owner(w, pair, count) % w->tasks != task) continue;
        if (w->backward) block_backward_tile(w, &t, &m);
        else block_forward_tile(w, &t, &m);
      }
    }
  }
}
BLOCK_FN void block_run_tasks(block_work *w) {
  w->run = luna_custom_run(w->out);
  w->tasks = w->run.parallel_for ? block_max(1, block_min(w->run.threads, BLOCK_TASKS)) : 1;
  if (w->tasks > 1) w->run.parallel_for(w->run.parallel_user, w->tasks, block_task, w);
  else block_task(w, 0);
}
BLOCK_FN luna_status block_op_forward(const luna_tensor *const *in, int count, luna_tensor *out, void *state) {
  block_state *s = (block_state *)state;
  const int64_t lines = s->batch * s->queries, shown = out->shape[2] - s->heads;
  block_work w;
  (void)count;
  memset(&w, 0, sizeof w);
  block_arrays(s, (char *)state, false);
  w.s = s, w.in = (luna_tensor *const *)(uintptr_t)in, w.out = out;
  memset(out->data, 0, (size_t)luna_count(out) * sizeof(float));
  for (int64_t i = 0; i < lines * s->heads; i++) s->log_sum_exp[i] = -HUGE_VALF;
  block_run_tasks(&w);
  for (int64_t i = 0; i < lines && s->shows; i++)
    memcpy(out->data + i * out->shape[2] + shown, s->log_sum_exp + i * s->heads, (size_t)s->heads * sizeof(float));
  return LUNA_OK;
}
BLOCK_FN luna_status block_op_backward(luna_tensor *const *in, int count, const luna_tensor *out, void *state) {
  block_work w;
  (void)count;
  memset(&w, 0, sizeof w);
  block_arrays((block_state *)state, (char *)state, false);
  w.s = (const block_state *)state, w.in = in, w.out = (luna_tensor *)(uintptr_t)out;
  w.backward = true;
  block_run_tasks(&w);
  return LUNA_OK;
}

/* ---- checks ---- */
BLOCK_FN luna_tensor *block_refuse(luna_ctx *ctx, luna_status status, const char *what, int64_t a, int64_t b,
                                   int64_t c, int64_t d, int64_t e) {
  char sentence[400];
  snprintf(sentence, sizeof sentence, what, (long long)a, (long long)b, (long long)c, (long long)d, (long long)e);
  luna_fail(ctx, status, sentence);
  return NULL;
}
/* whether a pattern is valid for these sizes */
BLOCK_FN bool block_pattern_is_good(const block_pattern *p, int64_t queries, int64_t keys) {
  const int64_t numbered = p->key_order ? p->key_count : keys;
  if (p->blocks == 0) return !p->query_order && !p->key_order;
  if (p->blocks < 0 || p->blocks > INT32_MAX || !p->queries || !p->offsets) return false;
  if (p->key_count < 0 || p->key_count > INT32_MAX || p->queries[0] < 0 || p->offsets[0] < 0) return false;
  for (int64_t i = 0; i < p->blocks; i++)
    if (p->queries[i + 1] < p->queries[i] || p->offsets[i + 1] < p->offsets[i]) return false;
  if (p->queries[p->blocks] > queries || (p->offsets[p->blocks] > 0 && !p->runs)) return false;
  for (int64_t i = p->offsets[0]; i < p->offsets[p->blocks]; i++) {
    const block_run run = p->runs[i];
    if (run.first < 0 || run.count < 0 || (int64_t)run.first + run.count > numbered) return false;
  }
  for (int64_t i = 0; p->query_order && i < p->queries[p->blocks]; i++)
    if (p->query_order[i] < 0 || p->query_order[i] >= queries) return false;
  for (int64_t i = 0; p->key_order && i < p->key_count; i++)
    if (p->key_order[i] < 0 || p->key_order[i] >= keys) return false;
  return true;
}
BLOCK_FN bool block_patterns_are_good(const block_config *c, const block_state *s) {
  const int64_t count = c->pattern_count;
  if (!c->patterns || (count != 1 && count != s->heads && count != s->batch * s->heads)) return false;
  if (s->queries > INT32_MAX || s->keys > INT32_MAX) return false;
  for (int64_t i = 0; i < count; i++)
    if (!block_pattern_is_good(&c->patterns[i], s->queries, s->keys)) return false;
  return true;
}
/* Fills in the sizes; false: they do not fit, and the failure is reported. */
BLOCK_FN bool block_sizes(block_state *s, luna_tensor *const in[3], const block_config *c) {
  luna_ctx *ctx = in[0]->ctx;
  const int64_t heads = c->heads ? c->heads : 1;
  s->batch = 1;
  for (int i = 0; i < 3; i++) {
    if (in[i]->rank != 3)
      return block_refuse(ctx, LUNA_BAD_ARGUMENT, "block_attention: input %lld (q, k, v) has %lld axes: it must have "
                          "three, [batch,rows,width]", i, in[i]->rank, 0, 0, 0);
    if (s->batch != 1 && in[i]->shape[0] != 1 && in[i]->shape[0] != s->batch)
      return block_refuse(ctx, LUNA_BAD_ARGUMENT, "block_attention: batches of %lld and %lld; they must be equal, or "
                          "one of them 1", s->batch, in[i]->shape[0], 0, 0, 0);
    if (in[i]->shape[0] != 1) s->batch = in[i]->shape[0];
  }
  s->heads = heads, s->queries = in[0]->shape[1], s->keys = in[1]->shape[1];
  if (in[1]->shape[2] != in[0]->shape[2] || in[2]->shape[1] != s->keys)
    return block_refuse(ctx, LUNA_BAD_ARGUMENT, "block_attention: k [%lld,%lld] and v [%lld,..] do not fit q "
                        "[..,%lld]: k must be as wide as q, and have as many rows as v", s->keys, in[1]->shape[2],
                        in[2]->shape[1], in[0]->shape[2], 0);
  if (heads < 1 || in[0]->shape[2] % heads || in[2]->shape[2] % heads)
    return block_refuse(ctx, LUNA_BAD_ARGUMENT, "block_attention: %lld heads do not divide the widths %lld and %lld",
                        heads, in[0]->shape[2], in[2]->shape[2], 0, 0);
  s->dim = in[0]->shape[2] / heads, s->value_dim = in[2]->shape[2] / heads;
  for (int64_t b = 0; c->lengths && b < s->batch; b++)
    if (c->lengths[b] < 0 || c->lengths[b] > s->keys)
      return block_refuse(ctx, LUNA_BAD_ARGUMENT, "block_attention: lengths[%lld] is %lld, outside 0..%lld", b,
                          c->lengths[b], s->keys, 0, 0);
  if (!block_finite(c->scale))
    return block_refuse(ctx, LUNA_BAD_ARGUMENT, "block_attention: scale is not a finite number", 0, 0, 0, 0, 0);
  if (!block_patterns_are_good(c, s))
    return block_refuse(ctx, LUNA_BAD_ARGUMENT, "block_attention: %lld patterns: there must be 1, heads, or batch * "
                        "heads of them (batch %lld, heads %lld), with ascending queries and offsets, queries of %lld "
                        "rows and runs of %lld keys", c->pattern_count, s->batch, heads, s->queries, s->keys);
  if (in[0]->device != 0)
    return block_refuse(ctx, LUNA_UNSUPPORTED, "block_attention: it runs on the CPU only", 0, 0, 0, 0, 0);
  return true;
}

/* ---- the op ---- */
BLOCK_FN luna_tensor *block_op(luna_tensor *const in[3], block_state *s, const block_config *c) {
  luna_custom custom;
  luna_tensor *y = NULL;
  block_space space;
  int64_t shape[3], ordered = 0;
  for (int64_t i = 0; i < s->pattern_count; i++)
    if (s->patterns[i].key_order) ordered = block_max(ordered, s->patterns[i].key_count);
  /* With orders at least twice the keys, and twice as many until they suffice: ranks, whose parts of a batch have other
     orders, then agree on it. */
  s->numbers = block_max(s->keys, 1) * (ordered > 0 ? 2 : 1);
  while (s->numbers < ordered) s->numbers *= 2;
  const size_t bytes = block_arrays(s, NULL, false);
  char *memory = (char *)calloc(1, bytes);
  if (!memory) return block_refuse(in[0]->ctx, LUNA_OUT_OF_MEMORY, "block_attention: out of memory", 0, 0, 0, 0, 0);
  memset(&custom, 0, sizeof custom);
  memset(&space, 0, sizeof space);
  custom.workspace_size = BLOCK_TASKS * block_layout(s, NULL, &space);
  custom.forward = block_op_forward, custom.backward = block_op_backward;
  custom.dropout = c->dropout;
  custom.dropped = s->batch * s->heads * s->queries * s->numbers;
  block_arrays(s, memory, true);
  memcpy(memory, s, sizeof *s);
  custom.state = memory, custom.state_size = bytes;
  shape[0] = s->batch, shape[1] = s->queries;
  shape[2] = s->heads * s->value_dim + (s->shows ? s->heads : 0);
  y = luna_custom_op(in, 3, 3, shape, &custom);
  free(memory);
  return y;
}
/* softmax(scale Q K^T) V of each head, where a query sees the keys of its pattern; null: a failed op */
BLOCK_FN luna_tensor *block_attention(luna_tensor *q, luna_tensor *k, luna_tensor *v, const block_config *config) {
  luna_tensor *const in[3] = { q, k, v };
  block_state s;
  block_config c;
  if (!q || !k || !v) return NULL;
  memset(&s, 0, sizeof s);
  memset(&c, 0, sizeof c);
  if (config) c = *config;
  if (!block_sizes(&s, in, &c)) return NULL;
  s.scale = c.scale == 0 ? (float)(1 / sqrt((double)s.dim)) : c.scale;
  s.causal = c.causal, s.drops = c.dropout > 0, s.shows = c.log_sum_exp != NULL;
  s.patterns = (block_pattern *)(uintptr_t)c.patterns, s.pattern_count = c.pattern_count;
  s.lengths = c.lengths;
  luna_tensor *y = block_op(in, &s, &c);
  if (!s.shows || !y) return y;
  *c.log_sum_exp = luna_slice(y, 2, s.heads * s.value_dim, s.heads);
  return luna_slice(y, 2, 0, s.heads * s.value_dim);
}
#endif
