/* Attention layers against their definitions in double, and that every attention trains. */
#include "test.h"
#define LUNA_IMPLEMENTATION
#include "luna.h"
#include "common.h"
#include "models.h"
#include "naive.h"

/* ---- linear attention and Linformer by their definitions: naive loops in double ---- */
enum { HEADS = 3, HEAD_DIM = DIM / HEADS, QUERIES = 7, KEYS = 11, SOURCES = 4 };
static const int32_t key_lengths[SOURCES] = {KEYS, 4, 1, 0};
typedef struct naive_layer {
  double q[QUERIES > KEYS ? QUERIES : KEYS][DIM], k[KEYS][DIM], v[KEYS][DIM], y[QUERIES > KEYS ? QUERIES : KEYS][DIM];
} naive_layer;
static void naive_linear(const luna_linear_layer *layer, const double *x, double *y) { /* one row */
  for (int i = 0; i < DIM; i++) {
    y[i] = parameter(layer->bias, i);
    for (int j = 0; j < DIM; j++) y[i] += parameter(layer->weight, i * DIM + j) * x[j];
  }
}
static void naive_project(const luna_linear_layer *layer, const float *x, int64_t rows, double y[][DIM]) {
  for (int64_t t = 0; t < rows; t++) {
    double row[DIM];
    for (int i = 0; i < DIM; i++) row[i] = (double)x[t * DIM + i];
    naive_linear(layer, row, y[t]);
  }
}
static void naive_linear_attention(naive_layer *a, int64_t rows, int64_t keys, bool causal) {
  for (int64_t t = 0; t < rows; t++)
    for (int h = 0; h < HEADS; h++) {
      double sum = 0, out[HEAD_DIM] = {0};
      for (int64_t j = 0; j < keys && (!causal || j <= t); j++) {
        double weight = 0;
        for (int i = h * HEAD_DIM; i < (h + 1) * HEAD_DIM; i++)
          weight += naive_activation(LUNA_ACTIVATION_ELU1, a->q[t][i]) *
              naive_activation(LUNA_ACTIVATION_ELU1, a->k[j][i]);
        for (int i = 0; i < HEAD_DIM; i++) out[i] += weight * a->v[j][h * HEAD_DIM + i];
        sum += weight;
      }
      for (int i = 0; i < HEAD_DIM; i++) a->y[t][h * HEAD_DIM + i] = sum > 0 ? out[i] / sum : 0;
    }
}
/* column `i` of the real rows of x, shortened to k; the number of rows there are then */
static int64_t naive_shorten(const linformer *c, const luna_tensor *e, double x[][DIM], int i, int64_t real,
                             int64_t k,
                             double *out) {
  const int64_t w = (c->max_length + k - 1) / k, windows =
      c->projection == LINFORMER_LINEAR ? k : (real + w - 1) / w;
  for (int64_t r = 0; r < windows; r++) {
    out[r] = c->projection == LINFORMER_MAX ? -INFINITY : 0;
    for (int64_t t = 0; t < real; t++) {
      if (c->projection != LINFORMER_LINEAR && t / w != r) continue;
      if (c->projection == LINFORMER_LINEAR) out[r] += parameter(e, r * c->max_length + t) * x[t][i];
      else if (c->projection == LINFORMER_MEAN) out[r] += x[t][i] / (double)w;
      else if (c->projection == LINFORMER_MAX) out[r] = fmax(out[r], x[t][i]);
      else out[r] += parameter(e, t % w) * x[t][i];
    }
  }
  return windows;
}
static void naive_linformer(naive_layer *a, const linformer *c, int64_t rows, int64_t keys) {
  for (int h = 0; h < HEADS; h++) {
    const int64_t k = c->k_last_head ? c->k + (c->k_last_head - c->k) * h / (HEADS - 1) : c->k;
    double key[HEAD_DIM][KEYS], value[HEAD_DIM][KEYS], weight[KEYS];
    int64_t count = 0;
    for (int i = 0; i < HEAD_DIM; i++) {
      count = naive_shorten(c, c->e, a->k, h * HEAD_DIM + i, keys, k, key[i]);
      naive_shorten(c, c->f, a->v, h * HEAD_DIM + i, keys, k, value[i]);
    }
    for (int64_t t = 0; t < rows; t++) {
      for (int64_t r = 0; r < count; r++) {
        weight[r] = 0;
        for (int i = 0; i < HEAD_DIM; i++) weight[r] += a->q[t][h * HEAD_DIM + i] * key[i][r] / sqrt(HEAD_DIM);
      }
      naive_softmax(weight, count);
      for (int i = 0; i < HEAD_DIM; i++) {
        a->y[t][h * HEAD_DIM + i] = 0;
        for (int64_t r = 0; r < count; r++) a->y[t][h * HEAD_DIM + i] += weight[r] * value[i][r];
      }
    }
  }
}
/* options: Linformer's, or null: linear attention */
static void check_naive(const char *options, bool causal, bool cross, bool lengths, const char *what) {
  const int64_t rows = cross ? QUERIES : KEYS;
  luna_ctx *ctx = ctx_open();
  luna_params *params = luna_params_open(ctx);
  luna_attention_layer layer;
  luna_layer_config config = {0};
  luna_layer_config sizes = {0};
  attentions choice;
  linformer *l = NULL;
  char where[160];
  config.attention = LUNA_ATTENTION_LINEAR, config.causal = causal;
  config.dim = sizes.dim = DIM, config.heads = sizes.heads = HEADS;
  if (!options) CHECK(luna_attention_layer_init(&layer, params, "attention.", &config) == LUNA_OK, "%s: %s", what,
                      luna_error(ctx));
  else {
    CHECK(attentions_open(&choice, options), "%s: %s", what, choice.error);
    l = (linformer *)choice.hook.init(&choice, params, "layers.0.self_attn.", &sizes);
    if (!CHECK(l, "%s: %s", what, luna_error(ctx))) return;
    layer.q = l->p.q, layer.k = l->p.k, layer.v = l->p.v, layer.out = l->p.out;
  }
  common_params(params, 63);
  luna_begin_inference(ctx);
  luna_tensor *x = common_tensor(ctx, 12, SOURCES, rows, DIM, 0),
      *context = cross ? common_tensor(ctx, 13, SOURCES, KEYS, DIM, 0) : NULL;
  luna_attention_call call = {0};
  call.x = call.input = x, call.context = context, call.lengths = lengths ? key_lengths : NULL;
  float *got = values_of(ctx, l ? choice.hook.forward(l, &call) :
                         luna_attention_layer_forward(&layer, x, context, call.lengths), what);
  float *expected = common_floats(SOURCES * rows * DIM);
  naive_layer *a = (naive_layer *)common_alloc(sizeof *a);
  for (int b = 0; b < SOURCES; b++) {
    const float *keys = cross ? context->data : x->data;
    const int64_t real = lengths ? key_lengths[b] : KEYS;
    naive_project(&layer.q, x->data + b * rows * DIM, rows, a->q);
    naive_project(&layer.k, keys + b * KEYS * DIM, KEYS, a->k);
    naive_project(&layer.v, keys + b * KEYS * DIM, KEYS, a->v);
    if (l) naive_linformer(a, l, rows, real);
    else naive_linear_attention(a, rows, real, causal);
    for (int64_t t = 0; t < rows; t++) {
      double out[DIM];
      naive_linear(&layer.out, a->y[t], out);
      for (int i = 0; i < DIM; i++) expected[(b * rows + t) * DIM + i] = (float)out[i];
    }
  }
  for (int b = 0; b < SOURCES; b++) {
    snprintf(where, sizeof where, "%s%s%s, sequence %d, against naive loops", what, cross ? ", context" : "",
             lengths ? ", lengths" : "",
             b);
    test_close(where, got + b * rows * DIM, expected + b * rows * DIM, (size_t)(rows * DIM), 2e-6);
  }
  free(got), free(expected), free(a);
  luna_close(ctx);
  if (l) choice.hook.close(l), attentions_close(&choice);
}
/* Luna attention in its four sharing modes, eqs. 3-5: pack, then unpack */
enum { PACK_HEADS = 2, MEMORY = 5 };
static void naive_heads(double q[][DIM], double k[][DIM], double v[][DIM], double y[][DIM], int64_t rows, int64_t keys,
                        int heads) {
  for (int64_t t = 0; t < rows; t++)
    for (int h = 0; h < heads; h++) {
      double weight[KEYS] = {0};
      for (int64_t j = 0; j < keys; j++)
        for (int i = h * (DIM / heads); i < (h + 1) * (DIM / heads); i++)
          weight[j] += q[t][i] * k[j][i] / sqrt(DIM / heads);
      naive_softmax(weight, keys);
      for (int i = h * (DIM / heads); i < (h + 1) * (DIM / heads); i++) {
        y[t][i] = 0;
        for (int64_t j = 0; j < keys; j++) y[t][i] += weight[j] * v[j][i];
      }
    }
}
static void naive_rows(const luna_linear_layer *layer, double x[][DIM], int64_t rows, double y[][DIM]) {
  for (int64_t t = 0; t < rows; t++) naive_linear(layer, x[t], y[t]);
}
static void naive_nested(const luna_nested_attention_layer *l, double x[][DIM], double p[][DIM], double context[][DIM],
                         int64_t rows,
                         int64_t real, float *out, float *packed_context) {
  const luna_sharing sharing = l->config.sharing;
  double q[KEYS][DIM], k[KEYS][DIM], v[KEYS][DIM], y[KEYS][DIM], yp[MEMORY][DIM];
  naive_rows(&l->pq, p, MEMORY, q);
  naive_rows(&l->pv, context, KEYS, v);
  if (sharing == LUNA_SHARING_NO_KEY) memcpy(k, context, sizeof k);
  else naive_rows(sharing == LUNA_SHARING_TIED ? &l->pv : sharing == LUNA_SHARING_QK ? &l->pq : &l->pk, context, KEYS,
                  k);
  naive_heads(q, k, v, yp, MEMORY, real, PACK_HEADS);
  naive_rows(&l->q, x, rows, q);
  naive_rows(&l->v, yp, MEMORY, v);
  if (sharing == LUNA_SHARING_NO_KEY) memcpy(k, yp, sizeof yp);
  else naive_rows(sharing == LUNA_SHARING_TIED ? &l->v : sharing == LUNA_SHARING_QK ? &l->q : &l->k, yp, MEMORY, k);
  naive_heads(q, k, v, y, rows, real < MEMORY ? real : MEMORY, HEADS);
  naive_rows(&l->out, y, rows, q);
  for (int64_t i = 0; i < rows * DIM; i++) out[i] = (float)q[i / DIM][i % DIM];
  for (int64_t i = 0; i < MEMORY * DIM; i++) packed_context[i] = (float)yp[i / DIM][i % DIM];
}
static void check_sharing(luna_sharing sharing, luna_form form, bool cross, bool lengths) {
  const int64_t rows = cross ? QUERIES : KEYS;
  luna_options options = plain_options();
  luna_nested_attention_layer layer;
  luna_layer_config config = {0};
  luna_tensor *packed_context = NULL;
  char what[100];
  options.form = form;
  luna_ctx *ctx = luna_open(&options);
  luna_params *params = luna_params_open(ctx);
  config.dim = DIM, config.heads = HEADS, config.pack_heads = PACK_HEADS, config.sharing = sharing;
  CHECK(luna_nested_attention_layer_init(&layer, params, "", &config) == LUNA_OK, "sharing %d: %s", sharing,
        luna_error(ctx));
  CHECK(luna_params_tensor_count(params) == 2 * (sharing == LUNA_SHARING_FULL ? 7 : 5), "sharing %d has %d parameters",
        sharing,
        (int)luna_params_tensor_count(params));
  common_params(params, 68);
  luna_begin_inference(ctx);
  luna_tensor *x = common_tensor(ctx, 14, SOURCES - 1, rows, DIM, 0),
      *p = common_tensor(ctx, 15, SOURCES - 1, MEMORY, DIM, 0),
              *context = cross ? common_tensor(ctx, 16, SOURCES - 1, KEYS, DIM, 0) : NULL;
  float *got = values_of(ctx, luna_nested_attention_layer_forward(&layer, x, p, context, lengths ? key_lengths : NULL,
                                                                  &packed_context),
                         "Luna attention"),
        *got_packed = values_of(ctx, packed_context, "Y_P");
  for (int b = 0; b < SOURCES - 1; b++) {
    double row[3][KEYS][DIM];
    float expected[KEYS * DIM], expected_packed[MEMORY * DIM];
    for (int64_t i = 0; i < KEYS * DIM; i++) {
      row[0][i / DIM][i % DIM] = i < rows * DIM ? parameter(x, b * rows * DIM + i) : 0;
      row[1][i / DIM][i % DIM] = i < MEMORY * DIM ? parameter(p, b * MEMORY * DIM + i) : 0;
      row[2][i / DIM][i % DIM] = parameter(cross ? context : x, b * KEYS * DIM + i);
    }
    naive_nested(&layer, row[0], row[1], row[2], rows, lengths ? key_lengths[b] : KEYS, expected, expected_packed);
    snprintf(what, sizeof what, "sharing %d, form %d%s%s, sequence %d: Y_X by eqs. 3-5", sharing, form,
             cross ? ", context" : "",
             lengths ? ", lengths" : "", b);
    test_close(what, got + b * rows * DIM, expected, (size_t)(rows * DIM), 2e-6);
    snprintf(what, sizeof what, "sharing %d, form %d%s%s, sequence %d: Y_P by eqs. 3-5", sharing, form,
             cross ? ", context" : "",
             lengths ? ", lengths" : "", b);
    test_close(what, got_packed + b * MEMORY * DIM, expected_packed, MEMORY * DIM, 2e-6);
  }
  free(got), free(got_packed);
  luna_close(ctx);
}
static void check_naives(void) {
  static const char *const projections[] = {"linear", "mean", "max", "convolution"},
      *const sharings[] = {"headwise", "key-value", "layerwise"};
  char options[160];
  for (int i = 0; i < 4; i++) { /* cross or not, lengths or not */
    check_naive(NULL, false, i & 1, i & 2, "linear attention");
    if (!(i & 1)) check_naive(NULL, true, false, i & 2, "causal linear attention");
    for (int projection = 0; projection < 4; projection++)
      for (int sharing = 0; sharing < 3; sharing++)
        for (int variant = 0; variant < 3; variant++) { /* 1: k by head; 2: one window, which the keys do not fill */
          const int longest = variant == 2 ? 8 * KEYS : KEYS;
          if (variant == 2 && (projection == 0 || sharing == 2)) continue;
          snprintf(options, sizeof options, "linformer k=4 k_last_head=%d max_length=%d projection=%s sharing=%s",
                   variant == 1 ? 2 : 0, longest, projections[projection], sharings[sharing]);
          check_naive(options, false, i & 1, i & 2, options);
        }
  }
}

/* ---- every attention trains ---- */
/* The answer is read from X[0], which knows of the other tokens by attention alone. */
static void check_classifier_trains(int v) {
  luna_ctx *ctx = ctx_open();
  luna_params *params = luna_params_open(ctx);
  luna_classifier model;
  luna_classifier_config config = {0};
  config.vocab = 4, config.pooling = LUNA_POOLING_CLS;
  config.encoder = encoder_config(v), config.encoder.max_length = TASK_N;
  if (CHECK(luna_classifier_init(&model, params, &config) == LUNA_OK, "%s: %s", encoder_names[v], luna_error(ctx))) {
    float *before = common_parameters(params);
    const double loss = train_classifier(params, &model, 120, 6e-3f);
    CHECK(loss < 0.5, "%s: the loss falls to %.3f of ln 2 only", encoder_names[v], loss);
    check_moved(params, before, encoder_names[v]);
    free(before);
  }
  luna_close(ctx);
}
/* A pattern of period 9 whose next token the last three tokens say: the convolution reads four. */
static void check_lm_trains(luna_attention_kind kind) {
  static const int32_t pattern[9] = {0, 1, 2, 0, 1, 3, 0, 1, 4};
  luna_ctx *ctx = ctx_open();
  luna_params *params = luna_params_open(ctx);
  luna_lm model;
  luna_lm_config config = {0};
  luna_optimizer_config adamw = {0};
  int32_t tokens[4 * 24], labels[4 * 24];
  double last = NAN;
  config.vocab = 5, config.layers = 1, config.layer.memory = 4;
  config.layer.dim = DIM, config.layer.heads = 2, config.layer.ffn = 20, config.layer.convolution = 4,
      config.layer.attention = kind;
  adamw.lr = 1e-2f;
  if (CHECK(luna_lm_init(&model, params, &config) == LUNA_OK, "language model %d: %s", kind, luna_error(ctx))) {
    float *before = common_parameters(params);
    luna_optimizer *adam = luna_adamw(params, &adamw);
    for (int step = 0; step < 150; step++) {
      for (int i = 0; i < 4 * 24; i++) {
        const int at = (int)(common_hash(30 + (uint64_t)step, (uint64_t)(i / 24)) % 9) + i % 24;
        tokens[i] = pattern[at % 9];
        labels[i] = i % 24 < 2 ? -1 : pattern[(at + 1) % 9];
      }
      luna_begin_step(ctx);
      luna_tensor *loss = luna_cross_entropy(luna_lm_forward(&model, &(luna_input){ tokens, NULL, 4, 24, NULL }),
                                             labels, NULL);
      luna_backward(loss);
      if (!CHECK(luna_optimizer_step(adam) == LUNA_OK, "language model %d: %s", kind, luna_error(ctx))) break;
      last = (double)luna_item(loss) / log(5);
    }
    CHECK(last < 0.2, "a language model with attention %d: the loss falls to %.3f of ln 5 only", kind, last);
    check_moved(params, before, "language model");
    free(before);
  }
  luna_close(ctx);
}
/* a layer by itself, or null */
static void *linformer_layer(attentions *choice, const char *options, luna_params *params, const char *prefix,
                             int64_t max_length) {
  luna_layer_config sizes = {0};
  sizes.dim = DIM, sizes.heads = 2, sizes.max_length = max_length;
  CHECK(attentions_open(choice, options), "%s: %s", options, choice->error);
  return choice->hook.init(choice, params, prefix, &sizes);
}
static void check_says(luna_ctx *ctx, bool refused, luna_status status, const char *why, const char *what) {
  CHECK(refused && luna_error_status(ctx) == status && strstr(luna_error(ctx), why), "%s: \"%s\"", what,
        luna_error(ctx));
}
static void check_linformer_refusals(void) {
  static const char *const bad[] = {"linformer k_last_layer=-1", "linformer max_length=-9", "linformer sharing=3",
                                    "linformer projection=4", "linformer projection=minimum"};
  static const struct { const char *options, *why; int64_t max_length; } made[] = {
    {"linformer k=10 max_length=9", "k is 10, and must be in [1,9]", 0},
    {"linformer k=4 k_last_head=10", "k_last_head is 10, and must be in [0,9]", 9},
    {"linformer k=4 k_last_layer=10", "k_last_layer is 10, and must be in [0,9]", 9},
    {"linformer max_length=20", "max_length, which is the model's where it is given, is 20", 21},
    {"linformer sharing=layerwise", "sharing layerwise is for the layers of a model", 9},
  };
  static const char *const projections[] = {"linear", "mean", "max", "convolution"};
  attentions choice;
  luna_lm lm;
  luna_lm_config lm_config = {0};
  luna_attention_layer layer;
  luna_layer_config config = {0};
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
    CHECK(!attentions_open(&choice, bad[i]) && choice.error[0], "%s is accepted", bad[i]);
  for (size_t i = 0; i < sizeof made / sizeof *made; i++) {
    luna_ctx *ctx = ctx_open();
    luna_params *params = luna_params_open(ctx);
    check_says(ctx, !linformer_layer(&choice, made[i].options, params, "a.", made[i].max_length), LUNA_BAD_ARGUMENT,
               made[i].why, made[i].options);
    CHECK(luna_params_tensor_count(params) == 0, "%s leaves parameters", made[i].options);
    luna_close(ctx);
    attentions_close(&choice);
  }
  luna_ctx *ctx = ctx_open();
  luna_params *params = luna_params_open(ctx);
  const int32_t tokens[3] = {1, 2, 3};
  CHECK(attentions_open(&choice, "linformer"), "%s", choice.error);
  lm_config.layer.dim = DIM, lm_config.layer.heads = 2, lm_config.layer.hook = &choice.hook;
  CHECK(luna_lm_init(&lm, params, &lm_config) == LUNA_OK, "%s", luna_error(ctx));
  luna_begin_inference(ctx);
  check_says(ctx, !luna_lm_forward(&lm, &(luna_input){tokens, NULL, 1, 3, NULL}), LUNA_UNSUPPORTED,
             "it has no causal form", "a language model");
  luna_close(ctx);
  attentions_close(&choice);
  ctx = ctx_open(), params = luna_params_open(ctx);
  for (int kind = 0; kind < 5; kind += 3) { /* Luna's kind, and what was Linformer's */
    config.attention = (luna_attention_kind)kind, config.dim = DIM;
    refused(ctx, luna_attention_layer_init(&layer, params, "a.", &config) == LUNA_BAD_ARGUMENT, VALUE_RANGE,
            "an attention layer of kind %d", kind);
  }
  luna_close(ctx); /* an init that failed stays in its context */
  for (int i = 0; i < 4; i++) {
    char options[80];
    luna_attention_call call = {0};
    ctx = ctx_open(), params = luna_params_open(ctx);
    snprintf(options, sizeof options, "linformer k=4 max_length=9 projection=%s", projections[i]);
    void *l = linformer_layer(&choice, options, params, "a.", 0);
    luna_begin_inference(ctx);
    luna_tensor *x = common_tensor(ctx, 1, 2, 9, DIM, 0), *longer = common_tensor(ctx, 1, 2, 10, DIM, 0);
    call.x = longer, call.context = x;
    CHECK(l && choice.hook.forward(l, &call), "9 keys: %s", luna_error(ctx));
    call.x = x, call.context = longer;
    check_says(ctx, !choice.hook.forward(l, &call), LUNA_BAD_ARGUMENT, "a sequence of 10 exceeds max_length 9",
               options);
    luna_begin_inference(ctx);
    call.x = common_tensor(ctx, 1, 2, 9, DIM, 0), call.context = common_tensor(ctx, 1, 1, 9, DIM, 0);
    check_says(ctx, !choice.hook.forward(l, &call), LUNA_BAD_ARGUMENT, "of x's batch and d", options);
    choice.hook.close(l);
    luna_close(ctx);
    attentions_close(&choice);
  }
}
static void check_attentions(void) {
  check_naives();
  for (int i = 0; i < 32; i++)
    check_sharing((luna_sharing)(i / 8), i & 4 ? LUNA_FORM_FOLDED : LUNA_FORM_UNFOLDED, i & 1, i & 2);
  for (int v = 0; v < ENCODERS; v++) check_classifier_trains(v);
  for (int kind = LUNA_ATTENTION_LUNA; kind <= LUNA_ATTENTION_LINEAR; kind++)
    check_lm_trains((luna_attention_kind)kind);
  check_linformer_refusals();
  heap_check("attentions");
}

int main(void) {
  check_attentions();
  return test_report("attention_layers");
}
