/* base.h: what the systems of attentions.h share: a layer, its options, its parameters, its custom ops. A system is a
   file

     NAME.h   typedef struct NAME { attention base; its options; its parameters; } NAME;
              static const attention_option NAME_options[] = { ..., { NULL, ATTENTION_COUNT, 0, NULL } };
              static void NAME_init(void *layer);
                makes parameters by attention_param and attention_linear
              static luna_tensor *NAME_forward(void *layer, luna_attention_call *call);
                x [batch,n,d] -> y [batch,n,d]
              static const attention_system NAME_system = { ... };

   and a line of attentions.h. What forward may count on, but for a plain system: call->x has zeros beyond each length,
   whatever stood there. */
#ifndef ATTENTION_BASE_H
#define ATTENTION_BASE_H
#include "luna.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__GNUC__) || defined(__clang__)
#define ATTENTION_FN static __attribute__((unused))
#else
#define ATTENTION_FN static
#endif

/* ---- options: hyper-parameters by name, each a field of the layer's struct ---- */
#define ATTENTION_TEXT_SIZE 64
typedef enum attention_option_kind {
  ATTENTION_COUNT,                   /* int64_t, 0 .. ATTENTION_MOST */
  ATTENTION_NUMBER,                  /* double */
  ATTENTION_FLAG,                    /* int64_t, 0 or 1; "false", "true" */
  ATTENTION_WORD,                    /* int64_t, the place in a list "block|sliding|lra" */
  ATTENTION_TEXT,                    /* char [ATTENTION_TEXT_SIZE] */
  ATTENTION_LIST                     /* attention_list of such counts: "1,2,4", or "" */
} attention_option_kind;
/* The most that an option may count: sums of two options fit in 32 bits, and an option times a length in 64. */
#define ATTENTION_MOST 1000000000
#define ATTENTION_LIST_SIZE 64
typedef struct attention_list { int64_t count, value[ATTENTION_LIST_SIZE]; } attention_list;
typedef struct attention_option {
  const char *name;
  attention_option_kind kind;
  size_t at;                         /* offsetof its field */
  const char *value;                 /* the default; of a word the list, whose first is the default */
} attention_option;
#define ATTENTION_LAST_OPTION { NULL, ATTENTION_COUNT, 0, NULL }

/* ---- a layer ---- */
typedef struct attention_system attention_system;
typedef struct attention {
  const attention_system *system;
  struct attention *next;            /* the layer made before this one, from the same `attentions` */
  int64_t dim, heads;                /* d, h; d_h = dim / heads */
  int64_t layer, layers, max_length; /* as of luna_layer_config; of a layer by itself 0 */
  float dropout;                     /* of attention matrices */
  bool bert_init;
  luna_params *params;               /* during init: where parameters go, */
  const char *prefix;                /* what is before their names, */
  bool good;                         /* and whether all have been made */
  /* What the caller may set after each begin, else null: the segment before's memories [batch,M,d], [batch,K,d];
     random numbers of a step (Gumbel's). */
  luna_tensor *memory, *compressed, *noise;
  /* What forward leaves until the next begin, null where a system has none: the next segment's memories, without
     gradient; a loss [1] to be added to the model's. */
  luna_tensor *next_memory, *next_compressed, *loss;
  luna_tensor *drawn;                /* what attentions_redraw draws again, or null; with which rows */
  int rows;
  bool left;                         /* its context or attentions_close has let it go; the other one will free it */
} attention;
struct attention_system {
  const char *name;                  /* also the `kind` of golden files */
  const char *source;
  size_t size;                       /* of the layer's struct */
  const attention_option *options;
  void (*init)(void *layer);
  luna_tensor *(*forward)(void *layer, luna_attention_call *call);
  bool causal, bidirectional;        /* the forms it has */
  bool plain;                        /* luna.h's ops alone, with lengths: it runs on devices, and x comes as it is */
};

ATTENTION_FN luna_tensor *attention_fail(luna_ctx *ctx, const attention *a, const char *what) {
  char sentence[200];
  snprintf(sentence, sizeof sentence, "attention %s: %s", a->system->name, what);
  luna_fail(ctx, LUNA_UNSUPPORTED, sentence);
  return NULL;
}
/* for init: a condition on options and sizes */
ATTENTION_FN void attention_require(attention *a, bool condition, const char *what) {
  if (condition || !a->good) return;
  a->good = false;
  luna_fail(luna_params_ctx(a->params), LUNA_BAD_ARGUMENT, what);
}
/* Requires, for init, that option `name` is in [min, max]. */
ATTENTION_FN void attention_require_in(attention *a, const char *name, int64_t value, int64_t min, int64_t max) {
  char sentence[160];
  snprintf(sentence, sizeof sentence, "attention %s: %s is %lld, and must be in [%lld,%lld]", a->system->name, name,
           (long long)value, (long long)min, (long long)max);
  attention_require(a, value >= min && value <= max, sentence);
}
/* Requires, for init, that all counts are in [0, ATTENTION_MOST], also where they were set without their text. */
ATTENTION_FN void attention_require_counts(attention *a) {
  for (const attention_option *o = a->system->options; o->name; o++) {
    const void *at = (const char *)a + o->at;
    attention_list list;
    memset(&list, 0, sizeof list);
    if (o->kind == ATTENTION_COUNT) memcpy(list.value, at, sizeof(int64_t)), list.count = 1;
    if (o->kind == ATTENTION_LIST) memcpy(&list, at, sizeof list);
    attention_require(a, list.count >= 0 && list.count <= ATTENTION_LIST_SIZE, "attentions: too long a list");
    for (int64_t i = 0; i < list.count && a->good; i++)
      attention_require_in(a, o->name, list.value[i], 0, ATTENTION_MOST);
  }
}

/* ---- parameters, by name after the layer's prefix; axes that are 0 are absent ---- */
ATTENTION_FN luna_tensor *attention_param(attention *a, const char *name, luna_init_kind kind, double scale, int64_t n0,
                                          int64_t n1, int64_t n2, int64_t n3) {
  const int64_t shape[4] = { n0, n1, n2, n3 };
  luna_tensor *t = NULL;
  luna_init init;
  char full[256];
  int rank = 1;
  while (rank < 4 && shape[rank] > 0) rank++;
  init.kind = a->bert_init && kind == LUNA_INIT_XAVIER ? LUNA_INIT_NORMAL : kind;
  init.scale = a->bert_init && kind == LUNA_INIT_XAVIER ? 0.02f : (float)scale;
  if (a->good && snprintf(full, sizeof full, "%s%s", a->prefix, name) < (int)sizeof full)
    t = luna_param(a->params, full, rank, shape, init);
  a->good = t != NULL;
  return t;
}
/* NAME.weight [out,in], Xavier of that gain, and NAME.bias [out], zeros */
ATTENTION_FN void attention_linear(attention *a, luna_linear_layer *layer, const char *name, int64_t in, int64_t out,
                                   double gain) {
  char full[128];
  snprintf(full, sizeof full, "%s.weight", name);
  layer->weight = attention_param(a, full, LUNA_INIT_XAVIER, gain, out, in, 0, 0);
  snprintf(full, sizeof full, "%s.bias", name);
  layer->bias = attention_param(a, full, LUNA_INIT_ZEROS, 0, out, 0, 0, 0);
}
/* NAME.weight [dim], ones, and NAME.bias [dim], zeros */
ATTENTION_FN void attention_norm_init(attention *a, luna_norm_layer *layer, const char *name) {
  char full[128];
  snprintf(full, sizeof full, "%s.weight", name);
  layer->weight = attention_param(a, full, LUNA_INIT_ONES, 1, a->dim, 0, 0, 0);
  snprintf(full, sizeof full, "%s.bias", name);
  layer->bias = attention_param(a, full, LUNA_INIT_ZEROS, 0, a->dim, 0, 0, 0);
}
#define ATTENTION_GAIN 0.70710678    /* of q, k and v; out has 1 */
typedef struct attention_projections { luna_linear_layer q, k, v, out; } attention_projections;
ATTENTION_FN void attention_projections_init(attention *a, attention_projections *p) {
  attention_linear(a, &p->q, "q_proj", a->dim, a->dim, ATTENTION_GAIN);
  attention_linear(a, &p->k, "k_proj", a->dim, a->dim, ATTENTION_GAIN);
  attention_linear(a, &p->v, "v_proj", a->dim, a->dim, ATTENTION_GAIN);
  attention_linear(a, &p->out, "out_proj", a->dim, a->dim, 1);
}
/* An array that is drawn once, saved with the parameters, replaced by luna_write, and not trained: N(0,1). Forward
   reads it through luna_detach. */
ATTENTION_FN luna_tensor *attention_array(attention *a, const char *name, int64_t n0, int64_t n1, int64_t n2,
                                          int64_t n3) {
  return attention_param(a, name, LUNA_INIT_NORMAL, 1, n0, n1, n2, n3);
}
/* row minus its parts along the rows before it in its block of d rows */
ATTENTION_FN void attention_orthogonal_row(float *x, int64_t i, int64_t d) {
  for (int64_t j = i / d * d; j < i; j++) {
    double dot = 0, size = 0;
    for (int64_t c = 0; c < d; c++) {
      dot += (double)x[i * d + c] * (double)x[j * d + c];
      size += (double)x[j * d + c] * (double)x[j * d + c];
    }
    for (int64_t c = 0; c < d; c++) x[i * d + c] -= (float)(dot / size * (double)x[j * d + c]);
  }
}
ATTENTION_FN double attention_size(const float *x, int64_t d) {
  double sum = 0;
  for (int64_t c = 0; c < d; c++) sum += (double)x[c] * (double)x[c];
  return sqrt(sum);
}
/* An array [.., rows, d] that was drawn from N(0,1) -> rows orthogonal in blocks of d: the Q^T of each block's QR
   decomposition, each times the norm that the row had, which is independent of Q, or times sqrt(d). */
ATTENTION_FN void attention_orthogonal_rows(attention *a, luna_tensor *array, bool root) {
  const int64_t d = array->shape[array->rank - 1], rows = luna_count(array) / d, each = array->shape[array->rank - 2];
  float *x = (float *)malloc((size_t)luna_count(array) * sizeof(float));
  if (x && luna_read(array, x) == LUNA_OK && array->data) {
    for (int64_t i = 0; i < rows; i++) {
      const double norm = root ? sqrt((double)d) : attention_size(x + i * d, d);
      float *head = x + i / each * each * d;
      /* twice: to float's precision */
      for (int pass = 0; pass < 2; pass++) attention_orthogonal_row(head, i % each, d);
      const double factor = norm / attention_size(x + i * d, d);
      for (int64_t c = 0; c < d; c++) x[i * d + c] = (float)(factor * (double)x[i * d + c]);
    }
    a->good = a->good && luna_write(array, x) == LUNA_OK;
  }
  free(x);
}
/* The random features of a kernel, "features" [n0,n1,n2]: rows N(0,1), or orthogonal of Gaussians' norms or sqrt(d) */
enum { ATTENTION_NORMAL, ATTENTION_ORTHOGONAL, ATTENTION_ORTHOGONAL_ROOT };
ATTENTION_FN void attention_rows_of(attention *a) {
  if (a->drawn && a->rows) attention_orthogonal_rows(a, a->drawn, a->rows == ATTENTION_ORTHOGONAL_ROOT);
}
ATTENTION_FN luna_tensor *attention_features(attention *a, int rows, int64_t n0, int64_t n1, int64_t n2) {
  a->drawn = attention_array(a, "features", n0, n1, n2, 0);
  a->rows = rows;
  attention_rows_of(a);
  return a->drawn;
}
/* draws them again, as a function of seed and layer; false: no memory */
ATTENTION_FN bool attention_redraw(attention *a, uint64_t seed, uint32_t layer) {
  const int64_t count = luna_count(a->drawn);
  float *x = (float *)malloc((size_t)(count + 1) * sizeof(float));
  for (int64_t i = 0; x && i < count; i += 2) {
    const uint32_t counter[4] = { (uint32_t)i, layer, 0, 0x72656472 };
    uint32_t random[4];
    luna_philox(counter, seed, random);
    const double size = sqrt(-2 * log(((double)random[0] + 1) / 4294967296.0));
    const double angle = (double)random[1] * (6.283185307179586 / 4294967296.0);
    x[i] = (float)(size * cos(angle)), x[i + 1] = (float)(size * sin(angle));
  }
  a->good = x && luna_write(a->drawn, x) == LUNA_OK;
  free(x);
  if (a->good) attention_rows_of(a);
  return a->good;
}

/* ---- tensors ---- */
/* [batch,n,d] -> [batch,h,n,d_h], and back */
ATTENTION_FN luna_tensor *attention_split(luna_tensor *x, int64_t heads) {
  const int axes[4] = { 0, 2, 1, 3 };
  int64_t shape[4];
  if (!x) return NULL;
  shape[0] = x->shape[0], shape[1] = x->shape[1], shape[2] = heads, shape[3] = x->shape[2] / heads;
  return luna_permute(luna_reshape(x, 4, shape), axes);
}
ATTENTION_FN luna_tensor *attention_join(luna_tensor *x) {
  const int axes[4] = { 0, 2, 1, 3 };
  int64_t shape[3];
  if (!x) return NULL;
  shape[0] = x->shape[0], shape[1] = x->shape[2], shape[2] = x->shape[1] * x->shape[3];
  return luna_reshape(luna_permute(x, axes), 3, shape);
}
/* a constant of the step, every element `value` */
ATTENTION_FN luna_tensor *attention_filled(luna_ctx *ctx, float value, int rank, const int64_t *shape) {
  int64_t count = 1;
  luna_tensor *t = NULL;
  float *values;
  for (int i = 0; i < rank; i++) count *= shape[i];
  values = (float *)malloc((size_t)(count + 1) * sizeof(float));
  for (int64_t i = 0; values && i < count; i++) values[i] = value;
  if (values) t = luna_tensor_new(ctx, values, rank, shape);
  free(values);
  return t;
}

/* row i is the unit vector e_i, [rows,columns] */
ATTENTION_FN luna_tensor *attention_unit_rows(luna_ctx *ctx, int rank, const int64_t *shape) {
  float *values = (float *)calloc((size_t)(shape[0] * shape[1] + 1), sizeof(float));
  luna_tensor *t = NULL;
  for (int64_t i = 0; values && i < shape[0] && i < shape[1]; i++) values[i * shape[1] + i] = 1;
  if (values) t = luna_tensor_new(ctx, values, rank, shape);
  free(values);
  return t;
}

ATTENTION_FN double attention_sum(const float *x, int64_t n) { /* in four parts, which need not wait for each other */
  double sum[4] = { 0, 0, 0, 0 };
  int64_t i = 0;
  for (; i + 4 <= n; i += 4) for (int k = 0; k < 4; k++) sum[k] += (double)x[i + k];
  for (; i < n; i++) sum[0] += (double)x[i];
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}
ATTENTION_FN double attention_dot(const float *x, const float *y, int64_t n) {
  double sum[4] = { 0, 0, 0, 0 };
  int64_t i = 0;
  for (; i + 4 <= n; i += 4) for (int k = 0; k < 4; k++) sum[k] += (double)x[i + k] * (double)y[i + k];
  for (; i < n; i++) sum[0] += (double)x[i] * (double)y[i];
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

/* ---- custom ops ---- */
/* lengths [batch] as a tensor: a custom op's input, for its state would have to hold as many */
ATTENTION_FN luna_tensor *attention_lengths(const luna_tensor *x, const int32_t *lengths) {
  const int64_t batch = x->shape[0];
  float *values = (float *)malloc((size_t)(batch + 1) * sizeof(float));
  luna_tensor *t;
  if (!values) return NULL;
  for (int64_t b = 0; b < batch; b++) values[b] = (float)(lengths ? lengths[b] : x->shape[1]);
  t = luna_tensor_new(x->ctx, values, 1, &batch);
  free(values);
  return t;
}
ATTENTION_FN int64_t attention_length(const luna_tensor *lengths, int64_t b) { return (int64_t)lengths->data[b]; }

typedef luna_status (*attention_op_forward)(const luna_tensor *const *in, int count, luna_tensor *out, void *state);
typedef luna_status (*attention_op_backward)(luna_tensor *const *in, int count, const luna_tensor *out, void *state);
ATTENTION_FN luna_tensor *attention_op(luna_tensor *const *in, int count, int rank, const int64_t *shape,
                                       attention_op_forward forward, attention_op_backward backward, const void *state,
                                       size_t state_size, size_t workspace_size) {
  luna_custom custom;
  memset(&custom, 0, sizeof custom);
  custom.forward = forward;
  custom.backward = backward;
  custom.state = state;
  custom.state_size = state_size;
  custom.workspace_size = workspace_size;
  return luna_custom_op(in, count, rank, shape, &custom);
}
/* attention_rows's op: y[b,i] = x[b, first + i], or zeros where that is not in [0, end); [batch,2] holds first and
   end */
ATTENTION_FN luna_status attention_rows_forward(const luna_tensor *const *in, int count, luna_tensor *out,
                                                void *state) {
  const int64_t d = out->shape[2];
  (void)count, (void)state;
  for (int64_t r = 0; r < out->shape[0] * out->shape[1]; r++) {
    const int64_t b = r / out->shape[1], row = (int64_t)in[1]->data[2 * b] + r % out->shape[1];
    if (row < 0 || row >= (int64_t)in[1]->data[2 * b + 1]) memset(out->data + r * d, 0, (size_t)d * sizeof(float));
    else memcpy(out->data + r * d, in[0]->data + (b * in[0]->shape[1] + row) * d, (size_t)d * sizeof(float));
  }
  return LUNA_OK;
}
ATTENTION_FN luna_status attention_rows_backward(luna_tensor *const *in, int count, const luna_tensor *out,
                                                 void *state) {
  (void)in, (void)count, (void)out, (void)state;
  return LUNA_OK;
}
/* Rows of each sequence of x [batch,n,d] up to end[b]: the last take[b] of them, or the last count; zeros before row 0
   and after the end -> [batch,count,d]. For memories: no gradient flows through it. */
ATTENTION_FN luna_tensor *attention_rows(luna_tensor *x, const int32_t *end, const int32_t *take, int64_t count) {
  luna_tensor *in[2] = { NULL, NULL };
  int64_t shape[3], spans[2];
  float *values;
  if (!x) return NULL;
  shape[0] = spans[0] = x->shape[0], shape[1] = count, shape[2] = x->shape[2], spans[1] = 2;
  values = (float *)malloc((size_t)(2 * shape[0] + 1) * sizeof(float));
  for (int64_t b = 0; values && b < shape[0]; b++) {
    values[2 * b] = (float)(end[b] - (take ? take[b] : count));
    values[2 * b + 1] = (float)end[b];
  }
  if (values) in[0] = luna_detach(x), in[1] = luna_tensor_new(x->ctx, values, 2, spans);
  free(values);
  return in[1] ? attention_op(in, 2, 3, shape, attention_rows_forward, attention_rows_backward, NULL, 0, 0) : NULL;
}

/* task(work, i) for each i in [0, count), on the context's threads */
ATTENTION_FN void attention_parallel(const luna_run *run, int64_t count, void (*task)(void *work, int64_t i),
                                     void *work) {
  if (run->parallel_for && run->threads > 1) run->parallel_for(run->parallel_user, count, task, work);
  else for (int64_t i = 0; i < count; i++) task(work, i);
}
/* C (+)= A B of dense or strided rows on the calling thread */
ATTENTION_FN void attention_gemm(luna_run run, const float *a, int64_t a_row, bool transpose_a, const float *b,
                                 int64_t b_row,
                              bool transpose_b, float *c, int64_t c_row, int64_t m, int64_t n, int64_t k, bool add) {
  luna_gemm_args g;
  memset(&g, 0, sizeof g);
  g.a = a, g.b = b, g.c = c;
  g.m = m, g.n = n, g.k = k;
  g.a_row = a_row, g.b_row = b_row, g.c_row = c_row;
  g.transpose_a = transpose_a, g.transpose_b = transpose_b;
  g.accumulate = add;
  g.run = run;
  (void)luna_gemm_f32(&g);           /* cannot fail: the scratch has room for its shape */
}
/* scratch for products of at most these sizes */
ATTENTION_FN size_t attention_gemm_scratch(int64_t m, int64_t n, int64_t k) {
  luna_gemm_args g;
  memset(&g, 0, sizeof g);
  g.m = m, g.n = n, g.k = k;
  g.transpose_a = true;              /* needs the most */
  return luna_gemm_scratch(&g) + 64;
}
#endif
