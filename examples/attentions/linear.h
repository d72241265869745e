/* linear.h: linear attention over a feature map, forward and backward: the kernel of performer.h and rfa.h.

     y_i = num_i / D(den_i),   [num_i, den_i] = sum_j w_ij (phi_q(q_i) . phi_k(k_j)) [v_j, 1]
   bidirectional: w = 1. Causal: j <= i, w_ij = b_j prod_{j < s <= i} f_s, which is what
     S_t = f_t S_{t-1} + b_t phi_k(k_t) [v_t, 1]^T,   [num_t, den_t] = phi_q(q_t)^T S_t
   unrolls to; gated: f = g, b = 1 - g, g = sigmoid(gate); else f = b = 1 up to powers of two: a map may give a key the
   factor 2^e, and S is held relative to the largest e so far, so that a later key changes no bit of an earlier result.
   D(x) = x, or max(x, eps), or max(|x|, eps), without gradient where it clamps.

   By chunks of 64 rows; features exist for one chunk at a time, and backward computes them again: time O(n m d_h),
   memory O(n d_h) and the states [m,d_h+1], for any n. Threads take heads of sequences. */
#ifndef ATTENTION_LINEAR_H
#define ATTENTION_LINEAR_H
#include "base.h"

#define LINEAR_CHUNK 64
#define LINEAR_TASKS 16
typedef enum linear_clamp { LINEAR_RATIO, LINEAR_CLAMP, LINEAR_CLAMP_SIZE } linear_clamp;

typedef struct linear_kernel linear_kernel;
typedef struct linear_rows {         /* one chunk of one head's queries or keys */
  const float *x;                    /* [rows, d_h], `stride` floats apart */
  const float *w;                    /* [m, d_h], w_stride apart, or null */
  int64_t rows, stride, w_stride;
  bool key;
  float max;                         /* of the sequence's keys, when kernel->key_max */
  float *phi;                        /* [rows, features] */
  float *exponent;                   /* [rows] of keys: phi is to be multiplied by 2^exponent; 0 before the map runs */
  float *scratch;                    /* kernel->scratch floats a row */
  luna_run gemm;
} linear_rows;
struct linear_kernel {
  int64_t heads, head_dim, features, projected; /* features: of phi; projected: rows of w */
  int64_t scratch;
  bool causal, key_max;              /* key_max: the map wants the maximum of w . k over all keys; bidirectional */
  linear_clamp clamp;
  float eps, scale;                  /* eps: of D when it clamps, else the map's; scale: the map's */
  void (*map)(const linear_kernel *kernel, const linear_rows *rows);
  /* adds to grad_x (as x) and to grad_w (as w), unless null; grad_phi [rows, features] may be overwritten */
  void (*map_backward)(const linear_kernel *kernel, const linear_rows *rows, float *grad_phi, float *grad_x,
                       float *grad_w);
};

/* ---- the work of one call: tensors, and a part of the workspace for each of `tasks` ---- */
enum { LINEAR_Q, LINEAR_K, LINEAR_V, LINEAR_LENGTHS, LINEAR_W, LINEAR_GATE, LINEAR_INPUTS };
typedef struct linear_state {
  linear_kernel kernel;
  int inputs[LINEAR_INPUTS];         /* each one's place among the op's inputs; -1: none */
  int64_t tasks, each, n;            /* each: floats of workspace a task */
} linear_state;
typedef struct linear_call {
  const linear_state *state;
  luna_tensor *in[LINEAR_INPUTS];
  const luna_tensor *out;
  luna_run run;
} linear_call;
typedef struct linear_head {         /* one head of one sequence, as a task sees it */
  const linear_call *call;
  const linear_kernel *k;
  int64_t b, h, n, m, e, d;          /* e = d_h + 1; d = width of all heads */
  int64_t base;                      /* of the head's first element in q, k, v and out */
  float key_max, top;                /* top: the exponent that the state is relative to */
  linear_rows q, key;
  float *value, *result, *scores, *weight, *grad_phi, *grad_value; /* [C,e], [C,e], [C,C], [C], [C,m], [C,e] */
  float *sum, *grad_sum;             /* [m,e] */
  float *f, *in, *den, *flow;        /* [n]: f and b of each row, its den, and q . dq - k . dk */
} linear_head;

ATTENTION_FN int64_t linear_take(float **at, float **out, int64_t count) {
  const int64_t size = (count + 15) / 16 * 16;
  *out = *at;
  if (*at) *at += size;
  return size;
}
/* lays a head's arrays out from `at`; null: only counts them. Returns floats. */
ATTENTION_FN int64_t linear_lay(linear_head *p, const linear_kernel *k, int64_t n, float *at) {
  const int64_t m = k->features, e = k->head_dim + 1, c = LINEAR_CHUNK;
  int64_t size = 0;
  float *gemm = NULL;
  size_t bytes;
  int64_t largest = m > c ? m : c;
  if (k->projected > largest) largest = k->projected;
  if (e > largest) largest = e;
  bytes = attention_gemm_scratch(largest, largest, largest);
  size += linear_take(&at, &p->q.phi, c * m) + linear_take(&at, &p->key.phi, c * m);
  size += linear_take(&at, &p->q.scratch, c * k->scratch) + linear_take(&at, &p->key.scratch, c * k->scratch);
  size += linear_take(&at, &p->key.exponent, c) + linear_take(&at, &p->weight, c);
  size += linear_take(&at, &p->value, c * e) + linear_take(&at, &p->result, c * e) +
      linear_take(&at, &p->scores, c * c);
  size += linear_take(&at, &p->grad_phi, c * m) + linear_take(&at, &p->grad_value, c * e);
  size += linear_take(&at, &p->sum, m * e) + linear_take(&at, &p->grad_sum, m * e);
  size += linear_take(&at, &p->f, n) + linear_take(&at, &p->in, n) + linear_take(&at, &p->den, n) +
      linear_take(&at, &p->flow, n);
  size += linear_take(&at, &gemm, (int64_t)(bytes / sizeof(float)) + 1);
  memset(&p->q.gemm, 0, sizeof p->q.gemm);
  p->q.gemm.scratch = gemm, p->q.gemm.scratch_size = bytes;
  return size;
}
ATTENTION_FN void linear_open(linear_head *p, const linear_call *call, int64_t task, int64_t b, int64_t h) {
  const linear_state *s = call->state;
  const luna_tensor *w = call->in[LINEAR_W];
  p->call = call, p->k = &s->kernel;
  linear_lay(p, p->k, s->n, (float *)call->run.scratch + task * s->each);
  p->q.gemm.isa = call->run.isa;
  p->key.gemm = p->q.gemm;
  p->b = b, p->h = h;
  p->n = attention_length(call->in[LINEAR_LENGTHS], b);
  p->m = p->k->features, p->e = p->k->head_dim + 1, p->d = p->k->heads * p->k->head_dim;
  p->base = b * s->n * p->d + h * p->k->head_dim;
  p->q.w = p->key.w = NULL;
  p->q.w_stride = p->key.w_stride = 0;
  if (w) { /* [m, d_h], or [m, heads, d_h] */
    p->q.w = p->key.w = w->data + (w->rank == 3 ? h * p->k->head_dim : 0);
    p->q.w_stride = p->key.w_stride = w->rank == 3 ? w->shape[1] * w->shape[2] : w->shape[1];
  }
  p->q.stride = p->key.stride = p->d;
  p->q.key = false, p->key.key = true;
  p->q.exponent = NULL;
  p->q.max = p->key.max = 0;
  p->top = -HUGE_VALF;
}
ATTENTION_FN void linear_map(linear_head *p, linear_rows *r, int which, int64_t at, int64_t rows) {
  r->x = p->call->in[which]->data + p->base + at * p->d;
  r->rows = rows;
  for (int64_t i = 0; r->key && i < rows; i++) r->exponent[i] = 0;
  p->k->map(p->k, r);
}
/* keys' features, and [v, 1] */
ATTENTION_FN void linear_keys(linear_head *p, int64_t at, int64_t rows) {
  linear_map(p, &p->key, LINEAR_K, at, rows);
  for (int64_t i = 0; i < rows; i++) {
    memcpy(p->value + i * p->e, p->call->in[LINEAR_V]->data + p->base + (at + i) * p->d,
           (size_t)(p->e - 1) * sizeof(float));
    p->value[i * p->e + p->e - 1] = 1;
  }
}
/* f and b of a chunk's rows */
ATTENTION_FN void linear_factors(linear_head *p, int64_t at, int64_t rows) {
  const luna_tensor *gate = p->call->in[LINEAR_GATE];
  for (int64_t i = 0; i < rows; i++) {
    const float e = p->key.exponent[i];
    if (gate) {
      const float g = gate->data[(p->b * p->call->state->n + at + i) * p->k->heads + p->h];
      p->f[at + i] = 1 / (1 + expf(-g));
      p->in[at + i] = 1 / (1 + expf(g));
    } else {
      const float top = e > p->top ? e : p->top;
      p->f[at + i] = p->top == -HUGE_VALF ? 1.0f : ldexpf(1, (int)(p->top - top));
      p->in[at + i] = ldexpf(1, (int)(e - top));
      p->top = top;
    }
  }
}
/* scores[i,j] = phi_q(i) . phi_k(j) */
ATTENTION_FN void linear_scores(linear_head *p, int64_t rows) {
  attention_gemm(p->q.gemm, p->q.phi, p->m, false, p->key.phi, p->m, true, p->scores, LINEAR_CHUNK, rows, rows, p->m,
                 false);
}
/* weight[j] for row i of the chunk, from those for row i - 1 */
ATTENTION_FN void linear_weights(linear_head *p, int64_t at, int64_t i) {
  for (int64_t j = 0; j < i; j++) p->weight[j] *= p->f[at + i];
  p->weight[i] = p->in[at + i];
}
/* sum = decay sum + phi^T diag(weight) value; weight null: 1, else that of grad_value and result which is not value is
   overwritten */
ATTENTION_FN void linear_absorb(linear_head *p, float *sum, const float *phi, const float *weight, const float *value,
                                int64_t rows, float decay) {
  float *weighted = value == p->grad_value ? p->result : p->grad_value;
  if (decay != 1) for (int64_t i = 0; i < p->m * p->e; i++) sum[i] *= decay;
  for (int64_t i = 0; weight && i < rows; i++)
    for (int64_t c = 0; c < p->e; c++) weighted[i * p->e + c] = weight[i] * value[i * p->e + c];
  attention_gemm(p->q.gemm, phi, p->m, true, weight ? weighted : value, p->e, false, sum, p->e, p->m, p->e, rows, true);
}
/* the sums over all keys, when bidirectional; key_max first */
ATTENTION_FN void linear_all_keys(linear_head *p) {
  memset(p->sum, 0, (size_t)(p->m * p->e) * sizeof(float));
  if (p->k->causal) return;
  for (int find = p->k->key_max; find >= 0; find--) {
    float max = -HUGE_VALF;
    for (int64_t at = 0; at < p->n; at += LINEAR_CHUNK) {
      const int64_t rows = p->n - at < LINEAR_CHUNK ? p->n - at : LINEAR_CHUNK;
      if (find) {
        p->key.x = p->call->in[LINEAR_K]->data + p->base + at * p->d;
        attention_gemm(p->q.gemm, p->key.x, p->d, false, p->key.w, p->key.w_stride, true, p->key.phi, p->m, rows, p->m,
                    p->k->head_dim, false);
        for (int64_t i = 0; i < rows * p->m; i++) if (p->key.phi[i] > max) max = p->key.phi[i];
      } else {
        linear_keys(p, at, rows);
        linear_absorb(p, p->sum, p->key.phi, NULL, p->value, rows, 1);
      }
    }
    if (find) p->key.max = max;
  }
}
/* [num, den] of a chunk's queries -> result; the state moves on past it. *left: the product of the chunk's f */
ATTENTION_FN void linear_chunk(linear_head *p, int64_t at, int64_t rows, bool absorb) {
  float left = 1;
  linear_map(p, &p->q, LINEAR_Q, at, rows);
  attention_gemm(p->q.gemm, p->q.phi, p->m, false, p->sum, p->e, false, p->result, p->e, rows, p->e, p->m, false);
  if (!p->k->causal) return;
  linear_keys(p, at, rows);
  linear_factors(p, at, rows);
  linear_scores(p, rows);
  for (int64_t i = 0; i < rows; i++) {
    left *= p->f[at + i];
    linear_weights(p, at, i);
    for (int64_t c = 0; c < p->e; c++) p->result[i * p->e + c] *= left;
    for (int64_t j = 0; j <= i; j++) p->scores[i * LINEAR_CHUNK + j] *= p->weight[j];
  }
  for (int64_t i = 0, first = 0; i < rows; i++) { /* later values, which may be Inf, are not multiplied by 0 */
    float *y = p->result + i * p->e;
    if (i % 16 == 0 && (first = i) > 0)
      attention_gemm(p->q.gemm, p->scores + i * LINEAR_CHUNK, LINEAR_CHUNK, false, p->value, p->e, false, y, p->e,
                     rows - i < 16 ? rows - i : 16, p->e, i, true);
    for (int64_t j = first; j <= i; j++)
      for (int64_t c = 0; c < p->e; c++) y[c] += p->scores[i * LINEAR_CHUNK + j] * p->value[j * p->e + c];
  }
  if (absorb) linear_absorb(p, p->sum, p->key.phi, p->weight, p->value, rows, left);
}
ATTENTION_FN float linear_divisor(const linear_kernel *k, float den) {
  if (k->clamp == LINEAR_CLAMP_SIZE && den < 0) den = -den;
  return k->clamp != LINEAR_RATIO && !(den >= k->eps) ? k->eps : den;
}

ATTENTION_FN void linear_forward_head(linear_head *p) {
  float *out = p->call->out->data + p->base;
  linear_all_keys(p);
  for (int64_t at = 0; at < p->n; at += LINEAR_CHUNK) {
    const int64_t rows = p->n - at < LINEAR_CHUNK ? p->n - at : LINEAR_CHUNK;
    linear_chunk(p, at, rows, true);
    for (int64_t i = 0; i < rows; i++) {
      const float divisor = linear_divisor(p->k, p->result[i * p->e + p->e - 1]);
      for (int64_t c = 0; c < p->e - 1; c++) out[(at + i) * p->d + c] = p->result[i * p->e + c] / divisor;
    }
  }
  for (int64_t i = p->n; i < p->call->state->n; i++) memset(out + i * p->d, 0, (size_t)(p->e - 1) * sizeof(float));
}
ATTENTION_FN void linear_forward_task(void *work, int64_t task) {
  const linear_call *call = (const linear_call *)work;
  const int64_t heads = call->state->kernel.heads;
  for (int64_t i = task; i < call->out->shape[0] * heads; i += call->state->tasks) {
    linear_head p;
    linear_open(&p, call, task, i / heads, i % heads);
    linear_forward_head(&p);
  }
}

/* the gradient of [num, den] of a chunk's rows -> grad_value; dens are those that forward found */
ATTENTION_FN void linear_seed(linear_head *p, int64_t at, int64_t rows) {
  for (int64_t i = 0; i < rows; i++) {
    const int64_t row = p->base + (at + i) * p->d;
    const float *y = p->call->out->data + row, *g = p->call->out->grad + row;
    const float den = p->den[at + i], divisor = linear_divisor(p->k, den);
    float *out = p->grad_value + i * p->e, dot = 0;
    const bool clamped = p->k->clamp != LINEAR_RATIO && !((p->k->clamp == LINEAR_CLAMP_SIZE ? fabsf(den) : den) >=
                                                          p->k->eps);
    for (int64_t c = 0; c < p->e - 1; c++) out[c] = g[c] / divisor, dot += g[c] * y[c];
    out[p->e - 1] = clamped ? 0 : (divisor == den ? -dot : dot) / divisor;
  }
}
ATTENTION_FN float *linear_grad(const linear_head *p, int which, int64_t at) {
  float *grad = p->call->in[which]->grad;
  return grad ? grad + p->base + at * p->d : NULL;
}
ATTENTION_FN void linear_map_back(linear_head *p, const linear_rows *r, int which, int64_t at) {
  const luna_tensor *w = p->call->in[LINEAR_W];
  float *grad_x = linear_grad(p, which, at);
  float *grad_w = w && w->grad ? w->grad + (r->w - w->data) : NULL;
  if (grad_x || grad_w) p->k->map_backward(p->k, r, p->grad_phi, grad_x, grad_w);
}

/* from the first chunk to the last: queries, whose gradients read the state before them */
ATTENTION_FN void linear_back_queries(linear_head *p) {
  for (int64_t at = 0; at < p->n; at += LINEAR_CHUNK) {
    const int64_t rows = p->n - at < LINEAR_CHUNK ? p->n - at : LINEAR_CHUNK;
    float left = 1;
    linear_chunk(p, at, rows, false);
    for (int64_t i = 0; i < rows; i++) p->den[at + i] = p->result[i * p->e + p->e - 1];
    linear_seed(p, at, rows);
    if (!p->k->causal) linear_absorb(p, p->grad_sum, p->q.phi, NULL, p->grad_value, rows, 1);
    attention_gemm(p->q.gemm, p->grad_value, p->e, false, p->sum, p->e, true, p->grad_phi, p->m, rows, p->m, p->e,
                   false);
    if (p->k->causal) {
      attention_gemm(p->q.gemm, p->grad_value, p->e, false, p->value, p->e, true, p->scores, LINEAR_CHUNK, rows, rows,
                     p->e, false);
      for (int64_t i = 0; i < rows; i++) {
        left *= p->f[at + i];
        linear_weights(p, at, i);
        for (int64_t c = 0; c < p->m; c++) p->grad_phi[i * p->m + c] *= left;
        for (int64_t j = 0; j < rows; j++) p->scores[i * LINEAR_CHUNK + j] *= j <= i ? p->weight[j] : 0;
      }
      attention_gemm(p->q.gemm, p->scores, LINEAR_CHUNK, false, p->key.phi, p->m, false, p->grad_phi, p->m, rows, p->m,
                     rows, true);
      linear_absorb(p, p->sum, p->key.phi, p->weight, p->value, rows, left);
      for (int64_t i = 0; i < rows; i++)
        p->flow[at + i] = (float)attention_dot(p->q.phi + i * p->m, p->grad_phi + i * p->m, p->m);
    }
    linear_map_back(p, &p->q, LINEAR_Q, at);
  }
}
/* from the last to the first: keys and values, whose gradients read the gradient of the state after them */
ATTENTION_FN void linear_back_keys(linear_head *p) {
  for (int64_t at = (p->n - 1) / LINEAR_CHUNK * LINEAR_CHUNK; at >= 0; at -= LINEAR_CHUNK) {
    const int64_t rows = p->n - at < LINEAR_CHUNK ? p->n - at : LINEAR_CHUNK;
    float *grad_v = linear_grad(p, LINEAR_V, at), left = 1;
    linear_keys(p, at, rows);
    attention_gemm(p->q.gemm, p->value, p->e, false, p->grad_sum, p->e, true, p->grad_phi, p->m, rows, p->m, p->e,
                   false);
    attention_gemm(p->q.gemm, p->key.phi, p->m, false, p->grad_sum, p->e, false, p->result, p->e, rows, p->e, p->m,
                   false);
    if (p->k->causal) {
      linear_map(p, &p->q, LINEAR_Q, at, rows);
      linear_seed(p, at, rows);
      linear_scores(p, rows);
      for (int64_t i = 0; i < rows; i++) linear_weights(p, at, i);
      for (int64_t j = 0; j < rows; j++) {
        for (int64_t c = 0; c < p->m; c++) p->grad_phi[j * p->m + c] *= p->weight[j];
        for (int64_t c = 0; c < p->e; c++) p->result[j * p->e + c] *= p->weight[j];
      }
      for (int64_t i = 0; i < rows; i++) {
        linear_weights(p, at, i);
        for (int64_t j = 0; j < rows; j++) p->scores[i * LINEAR_CHUNK + j] *= j <= i ? p->weight[j] : 0;
      }
      attention_gemm(p->q.gemm, p->scores, LINEAR_CHUNK, true, p->grad_value, p->e, false, p->result, p->e, rows, p->e,
                     rows, true);
    }
    for (int64_t i = 0; grad_v && i < rows; i++)
      for (int64_t c = 0; c < p->e - 1; c++) grad_v[i * p->d + c] += p->result[i * p->e + c];
    if (p->k->causal) {
      attention_gemm(p->q.gemm, p->grad_value, p->e, false, p->value, p->e, true, p->scores, LINEAR_CHUNK, rows, rows,
                     p->e, false);
      for (int64_t i = 0; i < rows; i++) {
        linear_weights(p, at, i);
        for (int64_t j = 0; j < rows; j++) p->scores[i * LINEAR_CHUNK + j] *= j <= i ? p->weight[j] : 0;
      }
      attention_gemm(p->q.gemm, p->scores, LINEAR_CHUNK, true, p->q.phi, p->m, false, p->grad_phi, p->m, rows, p->m,
                     rows, true);
      for (int64_t i = 0; i < rows; i++) p->weight[i] = left *= p->f[at + i];
      linear_absorb(p, p->grad_sum, p->q.phi, p->weight, p->grad_value, rows, left);
    }
    for (int64_t i = 0; p->call->in[LINEAR_GATE] && i < rows; i++) { /* den is not needed any more: k . dk */
      p->den[at + i] = (float)attention_dot(p->key.phi + i * p->m, p->grad_phi + i * p->m, p->m);
      p->flow[at + i] -= p->den[at + i];
    }
    linear_map_back(p, &p->key, LINEAR_K, at);
  }
}
/* d log f_t = sum over i >= t of (q . dq - k . dk)_i: the pairs that reach over t; and b = 1 - f */
ATTENTION_FN void linear_back_gate(linear_head *p) {
  const luna_tensor *gate = p->call->in[LINEAR_GATE];
  double reach = 0;
  if (!gate || !gate->grad) return;
  for (int64_t t = p->n - 1; t >= 0; t--) {
    reach += (double)p->flow[t];
    gate->grad[(p->b * p->call->state->n + t) * p->k->heads + p->h] +=
        (float)(reach * (double)p->in[t] - (double)p->f[t] * (double)p->den[t]);
  }
}
ATTENTION_FN void linear_backward_head(linear_head *p) {
  linear_all_keys(p);
  memset(p->grad_sum, 0, (size_t)(p->m * p->e) * sizeof(float));
  linear_back_queries(p);
  linear_back_keys(p);
  linear_back_gate(p);
}
/* Heads are shared out where w has a gradient, for all sequences add to it, in order; else heads of sequences. */
ATTENTION_FN void linear_backward_task(void *work, int64_t task) {
  const linear_call *call = (const linear_call *)work;
  const int64_t heads = call->state->kernel.heads, batch = call->out->shape[0];
  const bool by_head = call->in[LINEAR_W] && call->in[LINEAR_W]->grad;
  for (int64_t i = 0; i < batch * heads; i++) {
    linear_head p;
    if ((by_head ? i % heads : i) % call->state->tasks != task) continue;
    linear_open(&p, call, task, i / heads, i % heads);
    linear_backward_head(&p);
  }
}

ATTENTION_FN void linear_call_open(linear_call *call, luna_tensor *const *in, const luna_tensor *out,
                                   const linear_state *s) {
  call->state = s;
  call->out = out;
  for (int i = 0; i < LINEAR_INPUTS; i++) call->in[i] = s->inputs[i] < 0 ? NULL : in[s->inputs[i]];
  call->run = luna_custom_run(out);
}
ATTENTION_FN luna_status linear_forward(const luna_tensor *const *in, int count, luna_tensor *out, void *state) {
  const linear_state *s = (const linear_state *)state;
  linear_call call;
  (void)count;
  linear_call_open(&call, (luna_tensor *const *)(uintptr_t)in, out, s);
  attention_parallel(&call.run, s->tasks, linear_forward_task, &call);
  return LUNA_OK;
}
ATTENTION_FN luna_status linear_backward(luna_tensor *const *in, int count, const luna_tensor *out, void *state) {
  const linear_state *s = (const linear_state *)state;
  linear_call call;
  (void)count;
  linear_call_open(&call, in, out, s);
  attention_parallel(&call.run, s->tasks, linear_backward_task, &call);
  return LUNA_OK;
}
/* q, k, v [batch,n,d], w as the kernel's map wants it or null, gate [batch,n,heads] or null -> y [batch,n,d] */
ATTENTION_FN luna_tensor *linear_attention(const linear_kernel *kernel, luna_tensor *q, luna_tensor *k, luna_tensor *v,
                                           luna_tensor *w, luna_tensor *gate, const int32_t *lengths) {
  luna_tensor *given[LINEAR_INPUTS], *in[LINEAR_INPUTS];
  linear_state s;
  linear_head p;
  int count = 0;
  if (!q || !k || !v) return NULL;
  memset(&s, 0, sizeof s);
  given[LINEAR_Q] = q, given[LINEAR_K] = k, given[LINEAR_V] = v, given[LINEAR_W] = w, given[LINEAR_GATE] = gate;
  given[LINEAR_LENGTHS] = attention_lengths(q, lengths);
  for (int i = 0; i < LINEAR_INPUTS; i++) {
    s.inputs[i] = given[i] ? count : -1;
    if (given[i]) in[count++] = given[i];
  }
  s.kernel = *kernel;
  s.n = q->shape[1];
  s.tasks = q->shape[0] * kernel->heads < LINEAR_TASKS ? q->shape[0] * kernel->heads : LINEAR_TASKS;
  s.each = linear_lay(&p, kernel, s.n, NULL);
  return attention_op(in, count, 3, q->shape, linear_forward, linear_backward, &s, sizeof s,
                      (size_t)(s.tasks * s.each) * sizeof(float));
}
#endif
