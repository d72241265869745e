/* linformer.h: Linformer (Wang et al., 2020, arXiv 2006.04768): softmax attention over keys and values that a
   projection has shortened from n rows to k.

     y = softmax(q (E k)^T / sqrt(d_h)) F v per head

   Option projection, E [k,m] of sequences up to m = max_length:
     linear         learned, "e_proj" and "f_proj" [k,m], of which n columns are read
     mean, max      of each window of w = ceil(m / k) rows
     convolution    strided, with a learned kernel [1,w] for each window, which starts as the mean
   Option sharing, of what is learned: headwise: E shortens keys and F values; key-value: E both; layerwise: one E
   both, in all layers of a model: "e_proj" beside "layers.0.", not in it. k falls or rises evenly to k_last_layer in
   the last layer, and within a layer to k_last_head in the last head; 0: it stays. max_length 0: the model's, of a
   layer by itself 512. Not causal. A call's context gives cross-attention: keys, values and lengths are of it.
   Parameters: q_proj, k_proj, v_proj, out_proj; e_proj, f_proj. Time and memory O(n k d). */
#ifndef ATTENTION_LINFORMER_H
#define ATTENTION_LINFORMER_H
#include "base.h"

enum { LINFORMER_HEADWISE, LINFORMER_KEY_VALUE, LINFORMER_LAYERWISE };
enum { LINFORMER_LINEAR, LINFORMER_MEAN, LINFORMER_MAX, LINFORMER_CONVOLUTION };
typedef struct linformer {
  attention base;
  int64_t k, k_last_layer, k_last_head, max_length, sharing, projection;
  attention_projections p;
  luna_tensor *e, *f;                /* e = f unless headwise; null: nothing is learned */
} linformer;
static const attention_option linformer_options[] = {
  { "k", ATTENTION_COUNT, offsetof(linformer, k), "0" }, /* 0: 64, or max_length where that is less */
  { "k_last_layer", ATTENTION_COUNT, offsetof(linformer, k_last_layer), "0" },
  { "k_last_head", ATTENTION_COUNT, offsetof(linformer, k_last_head), "0" },
  { "max_length", ATTENTION_COUNT, offsetof(linformer, max_length), "0" },
  { "sharing", ATTENTION_WORD, offsetof(linformer, sharing), "headwise|key-value|layerwise" },
  { "projection", ATTENTION_WORD, offsetof(linformer, projection), "linear|mean|max|convolution" },
  ATTENTION_LAST_OPTION
};

/* from the first of `count` to the last, evenly; last 0: all the same */
static int64_t linformer_taper(int64_t first, int64_t last, int64_t i, int64_t count) {
  return last == 0 || count < 2 ? first : first + (last - first) * i / (count - 1);
}
static int64_t linformer_window(const linformer *a, int64_t k) { return (a->max_length + k - 1) / k; }

/* ---- parameters ---- */
/* what comes before "e_proj" that layers share: prefix without its "layers.<number>.self_attn."; -1: it has none */
static int linformer_stem(const char *prefix) {
  const char *at = prefix, *found = NULL;
  while ((at = strstr(at, "layers.")) != NULL) found = at++;
  if (!found) return -1;
  at = found + strlen("layers.");
  const size_t digits = strspn(at, "0123456789");
  return digits && strcmp(at + digits, ".self_attn.") == 0 ? (int)(found - prefix) : -1;
}
/* E (or F), large enough for every head's k, and for every layer's up to last_layer when it is not 0: [k,m], or one
   kernel [1,w]. One that is there already is another layer's. */
static luna_tensor *linformer_param(linformer *a, const char *name, int64_t k, int64_t last_layer, int stem) {
  const bool linear = a->projection == LINFORMER_LINEAR;
  int64_t most = k, least = k;
  const int64_t last[2] = { a->k_last_head, last_layer };
  for (int i = 0; i < 2; i++) {
    if (last[i] > most) most = last[i];
    if (last[i] && last[i] < least) least = last[i];
  }
  const int64_t shape[2] = { linear ? most : 1, linear ? a->max_length : linformer_window(a, least) };
  luna_init init;
  char full[256];
  init.kind = linear ? LUNA_INIT_XAVIER : LUNA_INIT_ONES;
  init.scale = linear ? 1.0f : 1.0f / (float)shape[1];
  const int size = snprintf(full, sizeof full, "%.*s%s", stem, a->base.prefix, name);
  attention_require(&a->base, size < (int)sizeof full, "attention linformer: a parameter's name is too long");
  if (!a->base.good) return NULL;
  luna_tensor *t = luna_params_find(a->base.params, full);
  if (!t) t = luna_param(a->base.params, full, 2, shape, init);
  else attention_require(&a->base, t->rank == 2 && t->shape[0] == shape[0] && t->shape[1] == shape[1],
                         "attention linformer: the e_proj that layers share is of another shape");
  a->base.good = a->base.good && t;
  return t;
}
static void linformer_check(linformer *a) {
  if (a->max_length == 0) a->max_length = a->base.max_length ? a->base.max_length : 512;
  attention_require_in(&a->base, "max_length", a->max_length, 1, 1 << 26);
  if (a->base.max_length) attention_require_in(&a->base, "max_length, which is the model's where it is given,",
                                               a->max_length, a->base.max_length, a->base.max_length);
  if (a->k == 0) a->k = a->max_length < 64 ? a->max_length : 64;
  attention_require_in(&a->base, "k", a->k, 1, a->max_length);
  attention_require_in(&a->base, "k_last_layer", a->k_last_layer, 0, a->max_length);
  attention_require_in(&a->base, "k_last_head", a->k_last_head, 0, a->max_length);
}
static void linformer_init(void *layer) {
  linformer *a = (linformer *)layer;
  linformer_check(a);
  if (!a->base.good) return;
  const bool learned = a->projection == LINFORMER_LINEAR || a->projection == LINFORMER_CONVOLUTION;
  const int64_t first = a->k;
  const int whole = (int)strlen(a->base.prefix), stem = linformer_stem(a->base.prefix);
  a->k = linformer_taper(first, a->k_last_layer, a->base.layer, a->base.layers);
  if (learned && a->sharing == LINFORMER_LAYERWISE) {
    attention_require(&a->base, stem >= 0, "attention linformer: sharing layerwise is for the layers of a model, whose "
                      "prefixes end in layers.<number>.self_attn.");
    a->e = linformer_param(a, "e_proj", first, a->k_last_layer, stem);
  }
  attention_projections_init(&a->base, &a->p);
  if (learned && a->sharing != LINFORMER_LAYERWISE) a->e = linformer_param(a, "e_proj", a->k, 0, whole);
  if (learned && a->sharing == LINFORMER_HEADWISE) a->f = linformer_param(a, "f_proj", a->k, 0, whole);
  else a->f = a->e;
}

/* ---- forward ---- */
/* x with -FLT_MAX in the rows from lengths[b] on, or from row n on, [batch,rows,c] */
static luna_tensor *linformer_hide(luna_tensor *x, const int32_t *lengths, int64_t n) {
  if (!x) return NULL;
  const int64_t shape[3] = { x->shape[0], x->shape[1], 1 };
  float *fill = (float *)calloc((size_t)(shape[0] * shape[1] + 1), sizeof(float));
  if (!fill) {
    luna_fail(x->ctx, LUNA_OUT_OF_MEMORY, "attention linformer: out of memory");
    return NULL;
  }
  for (int64_t i = 0; i < shape[0] * shape[1]; i++) {
    const int64_t row = i % shape[1];
    if (row >= n || (lengths && row >= lengths[i / shape[1]])) fill[i] = -3.402823466e+38f;
  }
  x = luna_add(x, luna_tensor_new(x->ctx, fill, 3, shape));
  free(fill);
  return x;
}
/* Keys or values [batch,n,c] shortened to [batch,k,c], or [batch,windows,c]. The last window is filled up to w; where
   it is the only one it need not be: w, from max_length, may be far beyond n. */
static luna_tensor *linformer_shorten(const linformer *a, luna_tensor *x, luna_tensor *e, int64_t k,
                                      const int32_t *lengths) {
  const int64_t batch = x->shape[0], n = x->shape[1], width = x->shape[2];
  const int64_t w = linformer_window(a, k), windows = (n + w - 1) / w;
  const int64_t size = windows == 1 ? n : w, rest = windows * size - n;
  const int64_t split[4] = { batch, windows, size, width }, joined[3] = { batch, windows, width };
  x = luna_mask(x, lengths);
  if (a->projection == LINFORMER_LINEAR) {
    const int axes[3] = { 0, 2, 1 };
    return luna_permute(luna_matmul(x, luna_slice(luna_slice(e, 0, 0, k), 1, 0, n), true, true), axes);
  }
  if (rest > 0) {
    const int64_t shape[3] = { batch, rest, width };
    luna_tensor *const parts[2] = { x, luna_tensor_new(x->ctx, NULL, 3, shape) };
    x = luna_concat(parts, 2, 1);
  }
  if (a->projection == LINFORMER_MAX && (lengths || rest > 0)) x = linformer_hide(x, lengths, n);
  x = luna_reshape(x, 4, split);
  if (a->projection == LINFORMER_MAX) return luna_max(x, 2);
  if (a->projection == LINFORMER_MEAN) return luna_scale(luna_sum(x, 2), 1.0f / (float)w);
  return luna_reshape(luna_matmul(x, luna_slice(e, 1, 0, size), true, true), 3, joined);
}
/* heads [first, first + heads), which share one k */
static luna_tensor *linformer_heads(const linformer *a, luna_tensor *const qkv[3], int64_t first, int64_t heads,
                                    const int32_t *lengths) {
  const int64_t all = a->base.heads, d_h = a->base.dim / all, batch = qkv[0]->shape[0];
  const int64_t k = linformer_taper(a->k, a->k_last_head, first, all), w = linformer_window(a, k);
  luna_tensor *part[3], *y;
  luna_attention_config c;
  int32_t *windows = NULL;
  for (int i = 0; i < 3; i++) part[i] = heads < all ? luna_slice(qkv[i], 2, first * d_h, heads * d_h) : qkv[i];
  if (!part[0] || !part[1] || !part[2]) return NULL;
  if (a->projection != LINFORMER_LINEAR && lengths) {
    windows = (int32_t *)malloc((size_t)(batch + 1) * sizeof(int32_t));
    if (!windows) {
      luna_fail(qkv[0]->ctx, LUNA_OUT_OF_MEMORY, "attention linformer: out of memory");
      return NULL;
    }
    for (int64_t b = 0; b < batch; b++) windows[b] = (int32_t)((lengths[b] + w - 1) / w);
  }
  memset(&c, 0, sizeof c);
  c.heads = heads;
  c.dropout = a->base.dropout;
  c.lengths = windows;
  y = luna_softmax_attention(part[0], linformer_shorten(a, part[1], a->e, k, lengths),
                             linformer_shorten(a, part[2], a->f, k, lengths), &c);
  free(windows);
  return y;
}
static luna_tensor *linformer_mixed(const linformer *a, luna_tensor *const qkv[3], const int32_t *lengths) {
  luna_tensor *parts[2] = { NULL, NULL };
  if (!qkv[0] || !qkv[1] || !qkv[2]) return NULL;
  if (a->k_last_head == 0) return linformer_heads(a, qkv, 0, a->base.heads, lengths);
  for (int64_t h = 0; h < a->base.heads; h++) {
    parts[1] = linformer_heads(a, qkv, h, 1, lengths);
    parts[0] = h == 0 ? parts[1] : luna_concat(parts, 2, 2);
  }
  return parts[0];
}
static luna_tensor *linformer_forward(void *layer, luna_attention_call *call) {
  const linformer *a = (const linformer *)layer;
  luna_tensor *context = call->context ? call->context : call->x, *qkv[3], *y;
  luna_ctx *ctx = call->x->ctx;
  if (context->rank != 3 || context->shape[0] != call->x->shape[0] || context->shape[2] != a->base.dim) {
    luna_fail(ctx, LUNA_BAD_ARGUMENT, "attention linformer: context must be [batch,m,d], of x's batch and d");
    return NULL;
  }
  if (context->shape[1] > a->max_length) {
    char sentence[120];
    snprintf(sentence, sizeof sentence, "attention linformer: a sequence of %lld exceeds max_length %lld",
             (long long)context->shape[1], (long long)a->max_length);
    luna_fail(ctx, LUNA_BAD_ARGUMENT, sentence);
    return NULL;
  }
  const luna_scope scope = luna_scope_begin(ctx);
  qkv[0] = luna_linear_layer_forward(&a->p.q, call->x);
  qkv[1] = luna_linear_layer_forward(&a->p.k, context);
  qkv[2] = luna_linear_layer_forward(&a->p.v, context);
  y = linformer_mixed(a, qkv, call->lengths);
  if (call->gate) y = luna_mul(y, call->gate);
  y = luna_linear_layer_forward(&a->p.out, y);
  return luna_scope_end(scope, &y, 1);
}
static const attention_system linformer_system = {
  "linformer", "Wang et al., 2020, arXiv 2006.04768", sizeof(linformer), linformer_options, linformer_init,
  linformer_forward, false, true, true
};
#endif
