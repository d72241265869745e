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
static int64_t naive_shorten(const luna_linformer_config *c, const luna_tensor *e, double x[][DIM], int i, int64_t real,
                             int64_t k,
                             double *out) {
  const int64_t w = (c->max_length + k - 1) / k, windows =
      c->projection == LUNA_LINFORMER_PROJECTION_LINEAR ? k : (real + w - 1) / w;
  for (int64_t r = 0; r < windows; r++) {
    out[r] = c->projection == LUNA_LINFORMER_PROJECTION_MAX ? -INFINITY : 0;
    for (int64_t t = 0; t < real; t++) {
      if (c->projection != LUNA_LINFORMER_PROJECTION_LINEAR && t / w != r) continue;
      if (c->projection == LUNA_LINFORMER_PROJECTION_LINEAR) out[r] += parameter(e, r * c->max_length + t) * x[t][i];
      else if (c->projection == LUNA_LINFORMER_PROJECTION_MEAN) out[r] += x[t][i] / (double)w;
      else if (c->projection == LUNA_LINFORMER_PROJECTION_MAX) out[r] = fmax(out[r], x[t][i]);
      else out[r] += parameter(e, t % w) * x[t][i];
    }
  }
  return windows;
}
static void naive_linformer(naive_layer *a, const luna_attention_layer *layer, int64_t rows, int64_t keys) {
  const luna_linformer_config *c = &layer->config.linformer;
  for (int h = 0; h < HEADS; h++) {
    const int64_t k = c->k_last_head ? c->k + (c->k_last_head - c->k) * h / (HEADS - 1) : c->k;
    double key[HEAD_DIM][KEYS], value[HEAD_DIM][KEYS], weight[KEYS];
    int64_t count = 0;
    for (int i = 0; i < HEAD_DIM; i++) {
      count = naive_shorten(c, layer->e, a->k, h * HEAD_DIM + i, keys, k, key[i]);
      naive_shorten(c, layer->f, a->v, h * HEAD_DIM + i, keys, k, value[i]);
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
static void check_naive(luna_attention_layer_config config, bool cross, bool lengths, const char *what) {
  const luna_init normal = {LUNA_INIT_NORMAL, 0.4f};
  const int64_t rows = cross ? QUERIES : KEYS, shape[2] =
      {config.linformer.projection == LUNA_LINFORMER_PROJECTION_CONVOLUTION ? 1 : KEYS, KEYS};
  luna_ctx *ctx = ctx_open();
  luna_params *params = luna_params_open(ctx);
  luna_attention_layer layer;
  char where[160];
  config.dim = DIM, config.heads = HEADS;
  if (config.linformer.max_length == 0) config.linformer.max_length = KEYS;
  CHECK(luna_attention_layer_init(&layer, params, "attention.", &config) == LUNA_OK, "%s: %s", what, luna_error(ctx));
  common_params(params, 63);
  if (config.linformer.sharing == LUNA_LINFORMER_SHARING_LAYERWISE && config.kind == LUNA_ATTENTION_LINFORMER)
    layer.e = layer.f = luna_param(params, "shared", 2, shape, normal);
  luna_begin_inference(ctx);
  luna_tensor *x = common_tensor(ctx, 12, SOURCES, rows, DIM, 0),
      *context = cross ? common_tensor(ctx, 13, SOURCES, KEYS, DIM, 0) : NULL;
  float *got = values_of(ctx, luna_attention_layer_forward(&layer, x, context, lengths ? key_lengths : NULL), what);
  float *expected = common_floats(SOURCES * rows * DIM);
  naive_layer *a = (naive_layer *)common_alloc(sizeof *a);
  for (int b = 0; b < SOURCES; b++) {
    const float *keys = cross ? context->data : x->data;
    const int64_t real = lengths ? key_lengths[b] : KEYS;
    naive_project(&layer.q, x->data + b * rows * DIM, rows, a->q);
    naive_project(&layer.k, keys + b * KEYS * DIM, KEYS, a->k);
    naive_project(&layer.v, keys + b * KEYS * DIM, KEYS, a->v);
    if (config.kind == LUNA_ATTENTION_LINEAR) naive_linear_attention(a, rows, real, config.causal);
    else naive_linformer(a, &layer, rows, real);
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
  luna_nested_attention_layer_config config = {0};
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
  char what[100];
  for (int i = 0; i < 4; i++) { /* cross or not, lengths or not */
    luna_attention_layer_config config = {0};
    config.kind = LUNA_ATTENTION_LINEAR;
    check_naive(config, i & 1, i & 2, "linear attention");
    config.causal = true;
    if (!(i & 1)) check_naive(config, false, i & 2, "causal linear attention");
    for (int projection = 0; projection < 4; projection++)
      for (int sharing = 0; sharing < 3; sharing++)
        for (int taper = 0; taper < 2; taper++) {
          config.kind = LUNA_ATTENTION_LINFORMER, config.causal = false;
          config.linformer.k = 4, config.linformer.k_last_head = taper ? 2 : 0;
          config.linformer.projection = (luna_linformer_projection)projection;
          config.linformer.sharing = (luna_linformer_sharing)sharing;
          snprintf(what, sizeof what, "Linformer, %s, %s%s", projections[projection], sharings[sharing],
                   taper ? ", k by head" : "");
          check_naive(config, i & 1, i & 2, what);
          if (projection == LUNA_LINFORMER_PROJECTION_LINEAR || sharing == LUNA_LINFORMER_SHARING_LAYERWISE) continue;
          config.linformer.max_length = 8 * KEYS; /* one window, which the keys fill to a half at most */
          snprintf(what, sizeof what, "Linformer, %s, a long window", projections[projection]);
          check_naive(config, i & 1, i & 2, what);
          config.linformer.max_length = 0;
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
static void check_linformer_refusals(void) {
  luna_ctx *ctx = ctx_open();
  luna_params *params = luna_params_open(ctx);
  luna_lm lm;
  luna_lm_config lm_config = {0};
  luna_attention_layer layer;
  luna_attention_layer_config config = {0};
  lm_config.layer.dim = DIM, lm_config.layer.heads = 2, lm_config.layer.attention = LUNA_ATTENTION_LINFORMER;
  refused(ctx, luna_lm_init(&lm, params, &lm_config) == LUNA_UNSUPPORTED, LINFORMER_CAUSAL,
      "Linformer in a language model");
  config.kind = LUNA_ATTENTION_LINFORMER, config.dim = DIM, config.causal = true;
  refused(ctx, luna_attention_layer_init(&layer, params, "a.", &config) == LUNA_UNSUPPORTED, LINFORMER_CAUSAL,
      "causal Linformer");
  config.causal = false;
  for (int i = 0; i < 6; i++) {
    luna_linformer_config l = {4, 0, 0, 9, LUNA_LINFORMER_SHARING_HEADWISE, LUNA_LINFORMER_PROJECTION_LINEAR};
    if (i == 0) l.k = 10;
    if (i == 1) l.k_last_head = 10;
    if (i == 2) l.k_last_layer = -1;
    if (i == 3) l.max_length = -9;
    if (i == 4) l.sharing = (luna_linformer_sharing)3;
    if (i == 5) l.projection = (luna_linformer_projection)4;
    config.linformer = l;
    refused(ctx, luna_attention_layer_init(&layer, params, "a.", &config) == LUNA_BAD_ARGUMENT, VALUE_RANGE,
        "Linformer, bad config %d", i);
  }
  config.kind = LUNA_ATTENTION_LUNA;
  refused(ctx, luna_attention_layer_init(&layer, params, "a.", &config) == LUNA_BAD_ARGUMENT, VALUE_RANGE,
          "an attention layer of Luna's kind");
  CHECK(luna_params_tensor_count(params) == 0, "what was refused leaves %d parameters",
        (int)luna_params_tensor_count(params));
  luna_close(ctx); /* an init that failed stays in its context */
  ctx = ctx_open(), params = luna_params_open(ctx);
  for (int i = 0; i < 4; i++) {
    luna_linformer_config l = {4, 0, 0, 9, LUNA_LINFORMER_SHARING_KEY_VALUE, (luna_linformer_projection)i};
    char name[8] = "0.";
    name[0] = (char)('0' + i);
    config.kind = LUNA_ATTENTION_LINFORMER, config.linformer = l;
    CHECK(luna_attention_layer_init(&layer, params, name, &config) == LUNA_OK, "%s", luna_error(ctx));
    luna_tensor *x = common_tensor(ctx, 1, 2, 9, DIM, 0), *longer = common_tensor(ctx, 1, 2, 10, DIM, 0);
    CHECK(luna_attention_layer_forward(&layer, x, NULL, NULL) && luna_attention_layer_forward(&layer, longer, x, NULL),
          "9 keys: %s",
          luna_error(ctx));
    refused(ctx, !luna_attention_layer_forward(&layer, x, longer, NULL), MAX_LENGTH,
        "10 keys where Linformer has 9 (projection %d)", i);
  }
  luna_linformer_config l = {4, 0, 0, 9, LUNA_LINFORMER_SHARING_LAYERWISE, LUNA_LINFORMER_PROJECTION_LINEAR};
  config.linformer = l;
  CHECK(luna_attention_layer_init(&layer, params, "layerwise.", &config) == LUNA_OK, "%s", luna_error(ctx));
  refused(ctx, !luna_attention_layer_forward(&layer, common_tensor(ctx, 1, 2, 9, DIM, 0), NULL, NULL),
      LINFORMER_PROJECTION,
          "layerwise without a projection");
  luna_close(ctx);
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
