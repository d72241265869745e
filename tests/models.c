/* Models: classifier, positions, masking, every attention, hooks, models of one's own, segments, recomputation, encoder-decoder with
   its stream and searches, checkpoints that say what they are. Tolerances are those of test_close: ||a - b|| / ||b||. */
#include "test.h"
#define LUNA_IMPLEMENTATION
#include "luna.h"
#include "common.h"
#include <sys/stat.h>
#include <unistd.h>

/* ---- contexts whose memory is counted: everything must be gone when they are closed ---- */
static int64_t heap_live, heap_most;
static void *heap_allocate(void *user, size_t bytes) {
  void *p = malloc(bytes);
  (void)user;
  if (p) heap_live += (int64_t)bytes;
  if (heap_live > heap_most) heap_most = heap_live;
  return p;
}
static void heap_release(void *user, void *pointer, size_t bytes) {
  (void)user;
  heap_live -= (int64_t)bytes;
  free(pointer);
}
static luna_options plain_options(void) {
  luna_options options = {0};
  options.threads = 1;
  options.seed = 4;
  options.allocator.allocate = heap_allocate;
  options.allocator.release = heap_release;
  return options;
}
static luna_ctx *ctx_open(void) {
  const luna_options options = plain_options();
  luna_ctx *ctx = luna_open(&options);
  if (!ctx) exit(2);
  return ctx;
}
static void heap_check(const char *what) {
  CHECK(heap_live == 0, "%s: %lld bytes leak", what, (long long)heap_live);
  heap_live = 0;
}

/* ---- values and gradients as arrays, to be freed ---- */
#define values_of(ctx, t, what) values_at(__LINE__, ctx, t, what)
static float *values_at(int line, luna_ctx *ctx, const luna_tensor *t, const char *what) { /* one NaN when there is no tensor */
  float *out = common_floats(t ? luna_count(t) : 1 << 16);
  if (!test_check(t && luna_read(t, out) == LUNA_OK, __FILE__, line, "%s: there is no result: %s", what, luna_error(ctx))) out[0] = NAN;
  return out;
}
static float *gradient_of(const luna_tensor *t) { /* zeros where backward has not been */
  float *out = common_floats(luna_count(t));
  if (t->grad) CHECK(luna_read_grad(t, out) == LUNA_OK, "luna_read_grad fails");
  return out;
}
static float *all_gradients(const luna_params *params) {
  float *out = common_floats(luna_params_element_count(params)), *at = out;
  for (int64_t i = 0; i < luna_params_tensor_count(params); i++) {
    const luna_tensor *p = luna_params_at(params, i, NULL);
    if (p->grad) luna_read_grad(p, at);
    at += luna_count(p);
  }
  return out;
}
static double length_of(const float *x, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; i++) sum += (double)x[i] * (double)x[i];
  return sqrt(sum);
}
static double gradient_size(const luna_tensor *t) {
  float *g = t ? gradient_of(t) : NULL;
  const double size = t ? length_of(g, luna_count(t)) : NAN;
  free(g);
  return size;
}
static bool same_bits(const float *a, const float *b, int64_t n) { return a && b && memcmp(a, b, (size_t)n * sizeof(float)) == 0; }
static double parameter(const luna_tensor *t, int64_t i) { return (double)t->data[i]; }

/* a call that must fail with LUNA_ERROR_id; the context is fit to go on */
#define refused(ctx, failed, id, ...) refused_at(__LINE__, ctx, failed, LUNA_ERROR_##id, __VA_ARGS__)
TEST_FORMAT(5) static void refused_at(int line, luna_ctx *ctx, bool failed, luna_error_id id, const char *format, ...) {
  char what[160];
  va_list list;
  va_start(list, format);
  vsnprintf(what, sizeof what, format, list);
  va_end(list);
  test_check(failed && luna_error(ctx)[0] && luna_ctx_error_id(ctx) == id, __FILE__, line,
             "%s is %s, and the error is %d, not %d: \"%s\"", what, failed ? "refused" : "taken",
                 (int)luna_ctx_error_id(ctx),
             (int)id, luna_error(ctx));
  luna_begin_inference(ctx);
}

/* ---- small encoders of every sort ---- */
enum { VOCAB = 11, DIM = 12, SLOTS = 6, BATCH = 5, N = 14, ENCODERS = 17 };
static const int32_t lengths_of_5[BATCH] = {1, 3, 6, 9, N};
static const char *const encoder_names[ENCODERS] = {"luna",
                                                    "pre-norm, gelu",
                                                    "full, pack heads",
                                                    "no key, normed embedding",
                                                    "shared qk, pre-norm, normed embedding",
                                                    "own memory",
                                                    "tied, learned",
                                                    "kept padding",
                                                    "own memory, pre-norm",
                                                    "softmax",
                                                    "linear, pre-norm",
                                                    "Linformer: linear, headwise",
                                                    "Linformer: mean, key-value",
                                                    "Linformer: max, layerwise",
                                                    "Linformer: convolution, layerwise",
                                                    "Linformer: linear, layerwise",
                                                    "Linformer: convolution, headwise"};
static bool has_memory(int v) { return v < 9; }
static luna_encoder_config encoder_config(int v) {
  luna_encoder_config c = {0};
  luna_linformer_config *l = &c.layer.linformer;
  c.layers = v == 6 ? 3 : 2, c.dim = DIM, c.heads = 2, c.ffn = 20, c.memory = SLOTS, c.max_length = 2 * N;
  c.layer.pre_norm = v == 1 || v == 4 || v == 8 || v == 10;
  c.layer.activation = v == 1 ? LUNA_ACTIVATION_GELU : LUNA_ACTIVATION_NONE;
  c.layer.sharing = v == 2 ? LUNA_SHARING_FULL : v == 3 ? LUNA_SHARING_NO_KEY : v == 4 ? LUNA_SHARING_QK : LUNA_SHARING_TIED;
  c.layer.pack_heads = v == 2 ? 3 : 0;
  c.norm_embedding = v == 3 || v == 4 || v == 7;
  c.own_memory = v == 5 || v == 8;
  c.tied_layers = v == 6;
  c.positions = v == 6 ? LUNA_POSITIONS_LEARNED : LUNA_POSITIONS_DEFAULT;
  c.first_position = v == 6 ? 2 : v == 3 ? 1 : 0;
  c.keep_padding = v == 7;
  c.layer.attention = v < 9     ? LUNA_ATTENTION_LUNA
                      : v == 9  ? LUNA_ATTENTION_SOFTMAX
                      : v == 10 ? LUNA_ATTENTION_LINEAR
                                : LUNA_ATTENTION_LINFORMER;
  l->k = v >= 11 ? 5 : 0;
  l->k_last_head = v == 12 ? 3 : v == 15 ? 2 : 0;
  l->k_last_layer = v == 13 ? 3 : v == 14 ? 2 : v == 15 ? 8 : 0;
  l->sharing = v == 12 ? LUNA_LINFORMER_SHARING_KEY_VALUE : v == 11 || v == 16 ? LUNA_LINFORMER_SHARING_HEADWISE : LUNA_LINFORMER_SHARING_LAYERWISE;
  l->projection = v == 12              ? LUNA_LINFORMER_PROJECTION_MEAN
                  : v == 13            ? LUNA_LINFORMER_PROJECTION_MAX
                  : v == 14 || v == 16 ? LUNA_LINFORMER_PROJECTION_CONVOLUTION
                                       : LUNA_LINFORMER_PROJECTION_LINEAR;
  return c;
}
typedef struct classifier {
  luna_ctx *ctx;
  luna_params *params;
  luna_classifier model;
} classifier;
static bool classifier_open(classifier *c, int v, luna_form form, luna_classifier_config config) {
  luna_options options = plain_options();
  options.form = form;
  c->ctx = luna_open(&options);
  c->params = luna_params_open(c->ctx);
  config.vocab = VOCAB;
  config.classes = 3;
  config.encoder = encoder_config(v);
  if (!CHECK(luna_classifier_init(&c->model, c->params, &config) == LUNA_OK, "%s: %s", encoder_names[v], luna_error(c->ctx))) return false;
  common_params(c->params, 60);
  return true;
}
/* tokens [batch, n] with `token` in the padding, or, where that is negative, as they are */
static int32_t *padded_tokens(int64_t batch, int64_t n, const int32_t *lengths, uint64_t seed, int32_t token) {
  int32_t *tokens = common_tokens(batch * n, seed, VOCAB);
  for (int64_t i = 0; i < batch * n && token >= 0; i++)
    if (i % n >= lengths[i / n]) tokens[i] = token;
  return tokens;
}

/* ---- classifier: a sequence of a padded batch gives what it gives alone, whatever stands in the padding ---- */
static float *classified(classifier *c, const int32_t *tokens, const int32_t *lengths, int64_t batch, int64_t n) {
  luna_begin_inference(c->ctx);
  return values_of(c->ctx, luna_classifier_forward(&c->model, &(luna_input){ tokens, lengths, batch, n, NULL }), "luna_classifier_forward");
}
static void check_alone(int v, luna_form form, luna_pooling pooling) {
  luna_classifier_config config = {0};
  classifier c;
  char what[160];
  config.pooling = pooling;
  config.pre_logits = v % 2 ? 7 : 0;
  if (classifier_open(&c, v, form, config)) {
    int32_t *tokens = padded_tokens(BATCH, N, lengths_of_5, 1, -1);
    float *batch = classified(&c, tokens, lengths_of_5, BATCH, N);
    for (int32_t pad = 0; pad < VOCAB; pad += VOCAB - 1) {
      int32_t *other = padded_tokens(BATCH, N, lengths_of_5, 1, pad);
      float *got = classified(&c, other, lengths_of_5, BATCH, N);
      CHECK(same_bits(got, batch, BATCH * 3), "%s, pooling %d, form %d: logits change with the tokens in the padding", encoder_names[v],
            pooling, form);
      free(other), free(got);
    }
    float all[2][BATCH * 3]; /* each by itself; each by itself with padding */
    for (int b = 0; b < BATCH; b++) {
      const int32_t length = lengths_of_5[b], more = length < N ? 1 : 0;
      float *alone = classified(&c, tokens + b * N, NULL, 1, length), *longer = classified(&c, tokens + b * N, &length, 1, length + more);
      memcpy(all[0] + 3 * b, alone, 3 * sizeof(float)), memcpy(all[1] + 3 * b, longer, 3 * sizeof(float));
      free(alone), free(longer);
    }
    snprintf(what, sizeof what, "%s, pooling %d, form %d: sequences alone and in a batch", encoder_names[v], pooling, form);
    test_close(what, batch, all[0], BATCH * 3, 2e-6);
    snprintf(what, sizeof what, "%s, pooling %d, form %d: sequences in a batch and alone with padding", encoder_names[v], pooling, form);
    test_close(what, batch, all[1], BATCH * 3, 2e-6);
    free(tokens), free(batch);
  }
  luna_close(c.ctx);
}

/* what comes out of padded places: zeros, unless they are kept */
static void check_padding(int v) {
  luna_classifier_config config = {0};
  classifier c;
  if (classifier_open(&c, v, LUNA_FORM_CHEAPEST, config)) {
    int32_t *tokens = common_tokens(BATCH * N, 1, VOCAB);
    const bool kept = c.model.encoder.config.keep_padding;
    luna_begin_inference(c.ctx);
    float *x = values_of(c.ctx, luna_encoder_forward(&c.model.encoder, &(luna_input){ tokens, lengths_of_5, BATCH, N, NULL }, NULL), "luna_encoder_forward");
    for (int64_t i = 0; i < BATCH * N; i++) {
      const bool padding = i % N >= lengths_of_5[i / N];
      CHECK((length_of(x + i * DIM, DIM) == 0) == (padding && !kept), "%s: place %d of sequence %d, %s, holds %.3g", encoder_names[v],
            (int)(i % N), (int)(i / N), padding ? "padding" : "a token", length_of(x + i * DIM, DIM));
    }
    free(tokens), free(x);
  }
  luna_close(c.ctx);
}

/* ---- classifier: features and logits by their definition, in double, from what luna_encoder_forward gives ---- */
static double *hand_features(classifier *c, const int32_t *tokens, const int32_t *lengths, int64_t batch, int64_t n) {
  double *f = (double *)common_alloc((size_t)(batch * DIM) * sizeof(double));
  luna_tensor *p = NULL;
  luna_begin_inference(c->ctx);
  luna_tensor *tx = luna_encoder_forward(&c->model.encoder, &(luna_input){ tokens, lengths, batch, n, NULL }, &p);
  const luna_pooling pooling = c->model.config.pooling;
  const bool memory = pooling == LUNA_POOLING_MEMORY || pooling == LUNA_POOLING_MEMORY_BATCH;
  const int64_t slots = memory && p ? p->shape[1] : 0, rows = memory ? slots : n;
  float *x = values_of(c->ctx, memory ? p : tx, "luna_encoder_forward");
  for (int64_t b = 0; b < batch; b++) {
    const int64_t length = lengths ? lengths[b] : n, count = pooling == LUNA_POOLING_CLS                             ? 1
                                                             : pooling == LUNA_POOLING_MEMORY_BATCH || length > rows ? rows
                                                                                                                  : length;
    for (int64_t i = 0; i < count; i++)
      for (int64_t j = 0; j < DIM; j++) f[b * DIM + j] += (double)x[(b * rows + i) * DIM + j] / (double)count;
  }
  free(x);
  return f;
}
/* logits of features [batch, width] */
static float *hand_logits(const classifier *c, const double *f, int64_t batch, int64_t width) {
  const luna_linear_layer *pre = &c->model.pre_logits;
  const int64_t inner = pre->weight ? pre->weight->shape[0] : width;
  float *out = common_floats(batch * 3);
  for (int64_t b = 0; b < batch; b++) {
    double h[64];
    for (int64_t i = 0; i < inner; i++) {
      h[i] = pre->weight ? parameter(pre->bias, i) : f[b * width + i];
      for (int64_t j = 0; pre->weight && j < width; j++) h[i] += parameter(pre->weight, i * width + j) * f[b * width + j];
      if (pre->weight) h[i] *= 0.5 * (1 + erf(h[i] / sqrt(2)));
    }
    for (int64_t i = 0; i < 3; i++) {
      double sum = 0;
      for (int64_t j = 0; j < inner; j++) sum += parameter(c->model.projection, i * inner + j) * h[j];
      out[b * 3 + i] = (float)sum;
    }
  }
  return out;
}
static void check_pooling(int v, luna_pooling pooling, bool pair, int64_t n) { /* n below SLOTS: a batch that has not all slots */
  luna_classifier_config config = {0};
  classifier c;
  char what[160];
  config.pooling = pooling;
  config.pair = pair;
  config.pre_logits = (v + (int)pooling) % 2 ? 9 : 0;
  if (classifier_open(&c, v, LUNA_FORM_CHEAPEST, config)) {
    int32_t lengths[BATCH], *tokens = common_tokens(BATCH * n, 2, VOCAB), *second = common_tokens(BATCH * N, 3, VOCAB);
    const int64_t width = pair ? 4 * DIM : DIM;
    for (int b = 0; b < BATCH; b++) lengths[b] = 1 + (int32_t)((n - 1) * b / (BATCH - 1));
    double *a = hand_features(&c, tokens, lengths, BATCH, n), *b = hand_features(&c, second, lengths_of_5, BATCH, N);
    double *f = (double *)common_alloc((size_t)(BATCH * width) * sizeof(double));
    for (int64_t i = 0; i < BATCH * DIM; i++) {
      double *row = f + i / DIM * width + i % DIM;
      row[0] = a[i];
      if (pair) row[DIM] = b[i], row[2 * DIM] = a[i] * b[i], row[3 * DIM] = a[i] - b[i];
    }
    float *expected = hand_logits(&c, f, BATCH, width);
    luna_begin_inference(c.ctx);
    float *got = values_of(c.ctx,
                           pair ? luna_classifier_forward_pair(&c.model, &(luna_input){ tokens, lengths, BATCH, n, NULL }, &(luna_input){ second, lengths_of_5, BATCH, N, NULL })
                                : luna_classifier_forward(&c.model, &(luna_input){ tokens, lengths, BATCH, n, NULL }),
                           "logits");
    snprintf(what, sizeof what, "%s, pooling %d of %d tokens%s: logits against the definition", encoder_names[v], pooling, (int)n,
             pair ? ", pairs" : "");
    test_close(what, got, expected, BATCH * 3, 2e-6);
    luna_begin_inference(c.ctx);
    refused_at(__LINE__, c.ctx,
            pair ? !luna_classifier_forward(&c.model, &(luna_input){ tokens, lengths, BATCH, n, NULL })
                 : !luna_classifier_forward_pair(&c.model, &(luna_input){ tokens, lengths, BATCH, n, NULL }, &(luna_input){ second, lengths_of_5, BATCH, N, NULL }),
            pair ? LUNA_ERROR_CLASSIFIER_PAIR : LUNA_ERROR_CLASSIFIER_SINGLE, "the other number of sequences");
    free(tokens), free(second), free(a), free(b), free(f), free(expected), free(got);
  }
  luna_close(c.ctx);
}
static void check_classifier_refusals(void) {
  luna_ctx *ctx = ctx_open();
  luna_params *params = luna_params_open(ctx);
  luna_classifier model;
  luna_classifier_config config = {0};
  config.encoder = encoder_config(9);
  config.pooling = LUNA_POOLING_MEMORY;
  refused(ctx, luna_classifier_init(&model, params, &config) == LUNA_BAD_ARGUMENT, POOLING_MEMORY,
      "pooling the memory of softmax attention");
  config.pooling = (luna_pooling)5;
  refused(ctx, luna_classifier_init(&model, params, &config) == LUNA_BAD_ARGUMENT, VALUE_RANGE, "pooling 5");
  config.pooling = LUNA_POOLING_DEFAULT;
  config.classes = -1;
  refused(ctx, luna_classifier_init(&model, params, &config) == LUNA_BAD_ARGUMENT, VALUE_RANGE, "-1 classes");
  config.classes = 2, config.encoder.heads = 5;
  refused(ctx, luna_classifier_init(&model, params, &config) == LUNA_BAD_ARGUMENT, HEADS, "5 heads of 12");
  config.encoder.heads = 2, config.encoder.layers = 100000;
  refused(ctx, luna_classifier_init(&model, params, &config) == LUNA_BAD_ARGUMENT, VALUE_RANGE, "100000 layers");
  refused(ctx, luna_classifier_init(NULL, params, &config) == LUNA_BAD_ARGUMENT, NULL_ARGUMENT, "no place for a model");
  CHECK(luna_params_tensor_count(params) == 0 && !luna_params_get(params, "luna.kind"), "refused inits leave %d parameters",
        (int)luna_params_tensor_count(params));
  luna_close(ctx);
}

/* one layer applied three times = three layers with its parameters; its gradient is the sum of theirs */
static void copy_tied(const luna_params *tied, const luna_params *untied) {
  for (int64_t i = 0; i < luna_params_tensor_count(untied); i++) {
    const char *name;
    char one[200];
    luna_tensor *p = luna_params_at(untied, i, &name);
    const char *layer = strstr(name, "layers.");
    snprintf(one, sizeof one, "%s", name);
    if (layer) one[layer - name + 7] = '0';
    const luna_tensor *from = luna_params_find(tied, one);
    if (CHECK(from && luna_count(from) == luna_count(p), "the tied model has no %s", one))
      memcpy(p->data, from->data, (size_t)luna_count(p) * sizeof(float));
  }
}
static void check_tied(void) {
  const int32_t labels[BATCH] = {0, 1, 2, 1, 0};
  luna_ctx *ctx = ctx_open();
  luna_params *set[2];
  luna_classifier model[2];
  float *logits[2];
  int32_t *tokens = common_tokens(BATCH * N, 4, VOCAB);
  for (int i = 0; i < 2; i++) {
    luna_classifier_config config = {0};
    config.vocab = VOCAB, config.classes = 3, config.encoder = encoder_config(6), config.encoder.tied_layers = i == 0;
    set[i] = luna_params_open(ctx);
    CHECK(luna_classifier_init(&model[i], set[i], &config) == LUNA_OK, "tied %d: %s", i, luna_error(ctx));
  }
  common_params(set[0], 61);
  copy_tied(set[0], set[1]);
  for (int i = 0; i < 2; i++) {
    luna_begin_step(ctx);
    luna_tensor *y = luna_classifier_forward(&model[i], &(luna_input){ tokens, lengths_of_5, BATCH, N, NULL });
    logits[i] = values_of(ctx, y, "logits");
    luna_backward(luna_cross_entropy(y, labels));
  }
  CHECK(same_bits(logits[0], logits[1], BATCH * 3), "tied layers give other bits than copies of one layer");
  for (int64_t i = 0; i < luna_params_tensor_count(set[0]); i++) {
    const char *name;
    luna_tensor *p = luna_params_at(set[0], i, &name);
    const int64_t count = luna_count(p);
    float *got = gradient_of(p), *sum = common_floats(count);
    for (int k = 0; k < 3; k++) {
      char one[200];
      snprintf(one, sizeof one, "%s", name);
      char *layer = strstr(one, "layers.");
      if (layer) layer[7] = (char)('0' + k);
      float *g = gradient_of(luna_params_find(set[1], one));
      for (int64_t j = 0; j < count && (layer || k == 0); j++) sum[j] += g[j];
      free(g);
    }
    CHECK(common_error(got, sum, count, 1e-4) <= 5e-6, "%s: the tied gradient is not the sum of three, by %.3g", name,
          common_error(got, sum, count, 1e-4));
    free(got), free(sum);
  }
  free(tokens), free(logits[0]), free(logits[1]);
  luna_close(ctx);
}

/* non-contextual P: every layer's own learns, and none goes on to the next layer */
static void check_own_memory(void) {
  const int32_t labels[BATCH] = {0, 1, 2, 1, 0};
  char name[100];
  for (int own = 0; own < 2; own++) {
    luna_classifier_config config = {0};
    classifier c;
    if (!classifier_open(&c, own ? 5 : 0, LUNA_FORM_CHEAPEST, config)) return;
    int32_t *tokens = common_tokens(BATCH * N, 4, VOCAB);
    luna_begin_step(c.ctx);
    CHECK(luna_backward(luna_cross_entropy(luna_classifier_forward(&c.model, &(luna_input){ tokens, lengths_of_5, BATCH, N, NULL }), labels)) == LUNA_OK, "%s",
          luna_error(c.ctx));
    for (int i = 0; i < 2; i++) {
      snprintf(name, sizeof name, "encoder.layers.%d.projected_embeddings", i);
      const luna_tensor *p = luna_params_find(c.params, name);
      if (!own) CHECK(!p, "a model whose memory goes through the layers has %s", name);
      else CHECK(p && p->shape[0] == SLOTS && gradient_size(p) > 1e-4, "%s gets no gradient", name);
    }
    const luna_tensor *memory = luna_params_find(c.params, "encoder.projected_embeddings");
    CHECK(own ? !memory : gradient_size(memory) > 1e-4, "own memory %d: encoder.projected_embeddings", own);
    const luna_tensor *first = luna_params_find(c.params, "encoder.layers.0.self_atten_proj_layer_norm.weight"),
                      *last = luna_params_find(c.params, "encoder.layers.1.self_atten_proj_layer_norm.weight");
    CHECK(gradient_size(last) > 1e-4 && (own ? gradient_size(first) == 0 : gradient_size(first) > 1e-4),
          "own memory %d: what only P' of the first layer can bring has a gradient of %.3g, of the last %.3g", own, gradient_size(first),
          gradient_size(last));
    if (own) {
      luna_begin_inference(c.ctx);
      luna_tensor *x = common_tensor(c.ctx, 5, BATCH, N, DIM, 0), *none = NULL, *some = common_tensor(c.ctx, 6, BATCH, SLOTS, DIM, 0),
                  *before = some;
      float *a = values_of(c.ctx, luna_encoder_layer_forward(&c.model.encoder.layers[1], x, &none, NULL), "layer"),
            *b = values_of(c.ctx, luna_encoder_layer_forward(&c.model.encoder.layers[1], x, &some, NULL), "layer");
      CHECK(same_bits(a, b, BATCH * N * DIM), "a layer with its own memory reads the one that comes in");
      CHECK(some && some != before && none, "a layer with its own memory does not give P'");
      free(b);
      b = values_of(c.ctx, luna_encoder_layer_forward(&c.model.encoder.layers[1], x, NULL, NULL), "layer");
      CHECK(same_bits(a, b, BATCH * N * DIM), "a layer with its own memory gives another X without P'");
      free(a), free(b);
    }
    free(tokens);
    luna_close(c.ctx);
  }
}
static void check_classifiers(void) {
  for (int v = 0; v < ENCODERS; v++) {
    const bool memory = has_memory(v);
    check_padding(v);
    for (luna_form form = LUNA_FORM_CHEAPEST; form <= (memory ? LUNA_FORM_FOLDED : LUNA_FORM_CHEAPEST); form = (luna_form)(form + 1))
      check_alone(v, form, LUNA_POOLING_DEFAULT);
    check_alone(v, LUNA_FORM_CHEAPEST, LUNA_POOLING_CLS);
    check_alone(v, LUNA_FORM_CHEAPEST, LUNA_POOLING_MEAN);
    for (luna_pooling pooling = LUNA_POOLING_DEFAULT; pooling <= (memory ? LUNA_POOLING_MEMORY_BATCH : LUNA_POOLING_MEAN);
         pooling = (luna_pooling)(pooling + 1)) {
      check_pooling(v, pooling, false, N);
      if (v < 2 || v == 5 || v == 9) check_pooling(v, pooling, true, SLOTS - 2), check_pooling(v, pooling, false, SLOTS - 2);
    }
  }
  check_classifier_refusals();
  check_tied();
  check_own_memory();
  heap_check("classifiers");
}

/* ---- positions: against libm's sine and cosine in double, of frequencies rounded to float ---- */
static void check_sinusoids(int64_t dim, int64_t first, int64_t n) {
  luna_ctx *ctx = ctx_open();
  luna_params *params = luna_params_open(ctx);
  luna_encoder encoder;
  luna_encoder_config config = {0};
  luna_tensor *p = NULL;
  const int64_t half = dim / 2;
  config.dim = dim, config.heads = 1, config.layers = 1, config.ffn = 1, config.memory = 5;
  config.first_position = first;
  if (CHECK(luna_encoder_init(&encoder, params, "", 2, &config) == LUNA_OK, "luna_encoder_init: %s", luna_error(ctx))) {
    int32_t *tokens = common_tokens(n, 1, 2);
    double worst = 0;
    memset(encoder.embedding->data, 0, (size_t)(2 * dim) * sizeof(float));
    memset(encoder.memory->data, 0, (size_t)(5 * dim) * sizeof(float));
    luna_begin_inference(ctx);
    float *x = values_of(ctx, luna_encoder_embed(&encoder, &(luna_input){ tokens, NULL, 1, n, NULL }, &p), "luna_encoder_embed"),
          *memory = values_of(ctx, p, "the memory");
    for (int64_t t = 0; t < n + 5; t++) /* the tokens, then the slots, which are counted from 0 */
      for (int64_t i = 0; i < dim; i++) {
        const float frequency = (float)exp(-(double)(half ? i % half : 0) * log(10000.0) / (half > 1 ? (double)(half - 1) : 1));
        const double angle = (double)(t < n ? first + t : t - n) * (double)frequency, expected = i == 2 * half ? 0
                                                                                                 : i < half    ? sin(angle)
                                                                                                               : cos(angle);
        const double off = fabs((double)(t < n ? x[t * dim + i] : memory[(t - n) * dim + i]) - expected);
        if (!(off <= worst)) worst = off;
      }
    CHECK(worst <= 1e-7, "positions %lld to %lld in %lld dimensions are off by %.3g", (long long)first, (long long)(first + n),
          (long long)dim, worst);
    free(tokens), free(x), free(memory);
  }
  luna_close(ctx);
}
/* x = s E[token] + position, s = sqrt(dim) or, with learned positions, 1; P = s M, no position; what is longer is refused */
static void check_embedding(luna_positions positions, luna_embedding_scale scale) {
  enum { FIRST = 2, LONGEST = 9 };
  luna_ctx *ctx = ctx_open();
  luna_params *params = luna_params_open(ctx);
  luna_encoder encoder;
  luna_encoder_config config = encoder_config(0);
  luna_tensor *p = NULL;
  int32_t *tokens = common_tokens(LONGEST + 1, 7, VOCAB);
  const double s = scale == LUNA_EMBEDDING_SCALE_SQRT_DIM || (scale == LUNA_EMBEDDING_SCALE_DEFAULT && positions != LUNA_POSITIONS_LEARNED) ? sqrt(DIM) : 1;
  config.positions = positions, config.embedding_scale = scale, config.first_position = FIRST, config.max_length = LONGEST;
  CHECK(luna_encoder_init(&encoder, params, "", VOCAB, &config) == LUNA_OK, "%s", luna_error(ctx));
  luna_begin_inference(ctx);
  float *x = values_of(ctx, luna_encoder_embed(&encoder, &(luna_input){ tokens, NULL, 1, LONGEST, NULL }, &p), "luna_encoder_embed"),
        *memory = values_of(ctx, p, "the memory");
  float *expected = common_floats(LONGEST * DIM), *slots = common_floats(SLOTS * DIM);
  for (int64_t i = 0; i < LONGEST * DIM; i++)
    expected[i] = (float)(s * parameter(encoder.embedding, tokens[i / DIM] * DIM + i % DIM) +
                          (positions == LUNA_POSITIONS_LEARNED ? parameter(encoder.positions, FIRST * DIM + i) : 0));
  for (int64_t i = 0; i < SLOTS * DIM; i++) slots[i] = (float)(s * parameter(encoder.memory, i));
  test_close("embedded tokens", x, expected, LONGEST * DIM, 1e-6);
  test_close("the embedded memory", memory, slots, SLOTS * DIM, 1e-6);
  luna_begin_inference(ctx);
  p = NULL;
  luna_tensor *more = luna_encoder_embed(&encoder, &(luna_input){ tokens, NULL, 1, LONGEST + 1, NULL }, &p);
  if (positions == LUNA_POSITIONS_LEARNED) {
    CHECK(luna_ctx_status(ctx) == LUNA_BAD_ARGUMENT, "10 tokens, 9 positions: %s", luna_status_text(luna_ctx_status(ctx)));
    refused(ctx, !more, MAX_LENGTH, "a sequence longer than the learned positions");
  } else CHECK(more != NULL, "no positions, and yet: %s", luna_error(ctx));
  free(tokens), free(x), free(memory), free(expected), free(slots);
  luna_close(ctx);
}
static void check_learned_lm(void) { /* a language model's learned positions count from 0 */
  luna_ctx *ctx = ctx_open();
  luna_params *params = luna_params_open(ctx);
  luna_lm model;
  luna_lm_config config = {0};
  int32_t *tokens = common_tokens(9, 7, VOCAB);
  config.vocab = VOCAB, config.layer.dim = DIM, config.layer.heads = 2, config.positions = LUNA_POSITIONS_LEARNED, config.max_length = 8;
  CHECK(luna_lm_init(&model, params, &config) == LUNA_OK && model.positions && model.positions->shape[0] == 8, "%s", luna_error(ctx));
  luna_begin_inference(ctx);
  CHECK(luna_lm_forward(&model, &(luna_input){ tokens, NULL, 1, 8, NULL }) != NULL, "8 tokens: %s", luna_error(ctx));
  refused(ctx, !luna_lm_forward(&model, &(luna_input){ tokens, NULL, 1, 9, NULL }), MAX_LENGTH,
      "a language model's sequence of 9");
  free(tokens);
  luna_close(ctx);
}
static void check_positions(void) {
  static const int64_t dims[] = {1, 2, 3, 7, 12, 64}, firsts[] = {0, 1, 2, 63, 64, 1000, 65537, 1000000 - 130, 1000000};
  for (size_t i = 0; i < sizeof dims / sizeof *dims; i++)
    for (size_t j = 0; j < sizeof firsts / sizeof *firsts; j++) check_sinusoids(dims[i], firsts[j], 130);
  for (int scale = 0; scale < 3; scale++)
    check_embedding(LUNA_POSITIONS_LEARNED, (luna_embedding_scale)scale), check_embedding(LUNA_POSITIONS_NONE, (luna_embedding_scale)scale);
  check_learned_lm();
  heap_check("positions");
}

/* ---- masking: which places, what becomes of them, and nothing else ---- */
enum { ROWS = 200, COLUMNS = 1100, PLACES = ROWS * COLUMNS };
typedef struct masked {
  int32_t *input, *labels;
  int64_t count;
} masked;
static masked mask(const luna_masking *masking, const int32_t *tokens, const int32_t *lengths) {
  masked m;
  m.input = (int32_t *)common_alloc(PLACES * sizeof(int32_t));
  m.labels = (int32_t *)common_alloc(PLACES * sizeof(int32_t));
  m.count = luna_mask_tokens(masking, &(luna_input){ tokens, lengths, ROWS, COLUMNS, NULL }, m.input, m.labels);
  return m;
}
static void masked_free(masked *m) { free(m->input), free(m->labels); }
static bool masked_same(const masked *a, const masked *b) {
  return a->count == b->count && memcmp(a->input, b->input, PLACES * sizeof(int32_t)) == 0 &&
         memcmp(a->labels, b->labels, PLACES * sizeof(int32_t)) == 0;
}
/* `count` of `of` tries at probability p, within 5 deviations */
static void check_rate(const char *what, int64_t count, int64_t of, double p) {
  const double off = ((double)count - (double)of * p) / sqrt((double)of * p * (1 - p));
  CHECK(fabs(off) <= 5, "%s: %lld of %lld, %.1f deviations from %.3g", what, (long long)count, (long long)of, off, p);
}
static void check_mask_rates(luna_masking masking, int32_t vocab, const int32_t *tokens, const int32_t *lengths) {
  masked m = mask(&masking, tokens, lengths);
  const int32_t below = masking.vocab ? masking.vocab : masking.mask;
  int64_t real = 0, chosen = 0, hidden = 0, random = 0, drawn[64] = {0}, wrong = 0;
  for (int64_t i = 0; i < PLACES; i++) {
    const bool inside = !lengths || i % COLUMNS < lengths[i / COLUMNS];
    real += inside;
    if (m.labels[i] < 0) wrong += m.labels[i] != -1 || m.input[i] != tokens[i];
    else {
      wrong += !inside || m.labels[i] != tokens[i];
      chosen++;
      hidden += m.input[i] == masking.mask;
      if (m.input[i] == masking.mask || m.input[i] == tokens[i]) continue;
      random++;
      if (m.input[i] >= 0 && m.input[i] < below) drawn[m.input[i]]++;
      else wrong++;
    }
  }
  CHECK(wrong == 0,
        "masking is wrong in %lld places: a label that is not the token, an input that changed without one, a place beyond a length",
        (long long)wrong);
  CHECK(m.count == chosen, "%lld places are chosen, counted %lld", (long long)chosen, (long long)m.count);
  check_rate("chosen", chosen, real, masking.probability > 0 ? (double)masking.probability : 0.15);
  check_rate("masked", hidden, chosen, 0.8);
  /* a random token is by chance the one that was there: 1 of `vocab` for tokens below `below` */
  check_rate("random", random, chosen, 0.1 * (1 - (double)below / vocab / below));
  for (int32_t t = 0; t < below; t++) check_rate("one random token", drawn[t], random, 1.0 / below);
  masked_free(&m);
}
static void check_masking(void) {
  const int32_t vocab = 20;
  int32_t *tokens = common_tokens(PLACES, 8, vocab), lengths[ROWS], *alias = (int32_t *)common_alloc(PLACES * sizeof(int32_t));
  luna_masking masking = {0, 20, 0, 7, 1}, other;
  for (int b = 0; b < ROWS; b++) lengths[b] = b == 0 ? 0 : 900 + (int32_t)(common_hash(9, (uint64_t)b) % 201);
  check_mask_rates(masking, vocab, tokens, NULL);
  check_mask_rates(masking, vocab, tokens, lengths);
  other = masking, other.vocab = 12;
  check_mask_rates(other, vocab, tokens, lengths);
  other = masking, other.probability = 0.4f;
  check_mask_rates(other, vocab, tokens, lengths);
  masked first = mask(&masking, tokens, lengths), again = mask(&masking, tokens, lengths);
  CHECK(masked_same(&first, &again), "the same seed and step mask otherwise");
  masked_free(&again);
  for (int i = 0; i < 4; i++) {
    other = masking;
    if (i < 3) other.step += i == 0 ? 1 : i == 1 ? (uint64_t)1 << 32 : (uint64_t)1 << 40;
    else other.seed++;
    again = mask(&other, tokens, lengths);
    int64_t both = 0;
    for (int64_t j = 0; j < PLACES; j++) both += first.labels[j] >= 0 && again.labels[j] >= 0;
    check_rate("chosen in two steps", both, first.count, 0.15);
    masked_free(&again);
  }
  memcpy(alias, tokens, PLACES * sizeof(int32_t));
  again = first;
  again.labels = (int32_t *)common_alloc(PLACES * sizeof(int32_t));
  again.input = alias;
  again.count = luna_mask_tokens(&masking, &(luna_input){ alias, lengths, ROWS, COLUMNS, NULL }, alias, again.labels);
  CHECK(masked_same(&first, &again), "masking in place masks otherwise");
  CHECK(luna_mask_tokens(&masking, NULL, alias, alias) == 0 &&
            luna_mask_tokens(&masking, &(luna_input){ NULL, NULL, 1, 1, NULL }, alias, alias) == 0,
        "null is masked");
  other = (luna_masking){0, 256, 256, 0, 0}; /* what fits a luna_masked_lm of the default config */
  masked given = mask(&other, tokens, lengths), none = mask(NULL, tokens, lengths);
  CHECK(none.count > 0 && masked_same(&given, &none), "null masking is not the default");
  masked_free(&given), masked_free(&none);
  masked_free(&first), masked_free(&again), free(tokens);
}
/* logits at the chosen places alone: the loss and the gradients of all logits with labels at those places */
static void check_masked_loss(int v, luna_form form) {
  luna_options options = plain_options();
  luna_masked_lm model;
  luna_masked_lm_config config = {0};
  luna_masking masking = {0.3f, VOCAB, 0, 3, 5};
  int32_t *tokens = common_tokens(BATCH * N, 11, VOCAB), input[BATCH * N], labels[BATCH * N];
  float loss[2], *gradient[2];
  char what[200];
  options.form = form;
  luna_ctx *ctx = luna_open(&options);
  luna_params *params = luna_params_open(ctx);
  config.vocab = VOCAB + 1, config.encoder = encoder_config(v);
  CHECK(luna_masked_lm_init(&model, params, &config) == LUNA_OK, "%s: %s", encoder_names[v], luna_error(ctx));
  common_params(params, 62);
  luna_mask_tokens(&masking, &(luna_input){ tokens, lengths_of_5, BATCH, N, NULL }, input, labels);
  for (int i = 0; i < 2; i++) {
    luna_params_zero_grad(params);
    luna_begin_step(ctx);
    luna_tensor *y = i ? luna_masked_lm_loss(&model, &(luna_input){ input, lengths_of_5, BATCH, N, NULL }, labels)
                       : luna_cross_entropy(luna_masked_lm_forward(&model, &(luna_input){ input, lengths_of_5, BATCH, N, NULL }), labels);
    loss[i] = luna_item(y);
    CHECK(luna_backward(y) == LUNA_OK, "%s: %s", encoder_names[v], luna_error(ctx));
    gradient[i] = all_gradients(params);
  }
  snprintf(what, sizeof what, "%s: the masked loss", encoder_names[v]);
  test_close(what, loss + 1, loss, 1, 1e-6);
  for (int64_t i = 0, at = 0; i < luna_params_tensor_count(params); i++) {
    const char *name;
    const int64_t count = luna_count(luna_params_at(params, i, &name));
    const double off = common_error(gradient[1] + at, gradient[0] + at, count, 1e-4);
    CHECK(off <= 1e-5, "%s: the masked loss's gradient of %s is off by %.3g", encoder_names[v], name, off);
    at += count;
  }
  for (int i = 0; i < BATCH * N; i++) labels[i] = -1;
  luna_begin_step(ctx);
  refused(ctx, !luna_masked_lm_loss(&model, &(luna_input){ input, lengths_of_5, BATCH, N, NULL }, labels), NO_LABELS,
      "no label at all");
  refused(ctx, !luna_masked_lm_loss(&model, &(luna_input){ input, lengths_of_5, BATCH, N, NULL }, NULL), NULL_ARGUMENT,
      "null for labels");
  labels[3] = VOCAB + 1;
  luna_begin_step(ctx);
  refused(ctx, !luna_masked_lm_loss(&model, &(luna_input){ input, lengths_of_5, BATCH, N, NULL }, labels), LABEL_RANGE,
      "a label beyond the vocabulary");
  CHECK(!luna_masked_lm_loss(&model, &(luna_input){ input, lengths_of_5, BATCH, N, NULL }, labels) &&
            strstr(luna_error(ctx), "labels[3] is "), "a label's place is the caller's: %s", luna_error(ctx));
  free(tokens), free(gradient[0]), free(gradient[1]);
  luna_close(ctx);
}
/* luna_lm_loss and the cross-entropy of the logits: of few words and of many, some without a label, in training and in inference */
static void check_lm_loss(int64_t vocab, bool inference) {
  enum { TOKENS = 26 };
  const luna_lm_config config = {.vocab = vocab, .layers = 2, .layer = {.dim = 12, .heads = 2, .ffn = 20, .pre_norm = true}};
  int32_t *tokens = common_tokens(TOKENS, 4, (int32_t)vocab), *labels = common_tokens(TOKENS, 5, (int32_t)vocab);
  const luna_input input = {tokens, NULL, 2, TOKENS / 2, NULL};
  luna_ctx *ctx = luna_open(NULL);
  luna_params *params = luna_params_open(ctx);
  luna_lm model;
  float loss[2], *gradient[2] = {NULL, NULL};
  CHECK(luna_lm_init(&model, params, &config) == LUNA_OK, "luna_lm_init: %s", luna_error(ctx));
  labels[3] = labels[TOKENS - 1] = -1;
  for (int i = 0; i < 2; i++) {
    luna_params_zero_grad(params);
    if (inference) luna_begin_inference(ctx);
    else luna_begin_step(ctx);
    luna_tensor *y = i ? luna_lm_loss(&model, &input, labels) : luna_cross_entropy(luna_lm_forward(&model, &input), labels);
    loss[i] = luna_item(y);
    if (!inference) CHECK(luna_backward(y) == LUNA_OK, "luna_lm_loss: %s", luna_error(ctx));
    if (!inference) gradient[i] = all_gradients(params);
  }
  test_close("luna_lm_loss", loss + 1, loss, 1, 1e-6);
  if (!inference) test_close("luna_lm_loss's gradient", gradient[1], gradient[0], (size_t)luna_params_element_count(params), 2e-6);
  refused(ctx, !luna_lm_loss(&model, &input, NULL), NULL_ARGUMENT, "null for labels");
  free(gradient[0]), free(gradient[1]), free(tokens), free(labels);
  luna_close(ctx);
}

static void check_masked_lm(void) {
  check_masking();
  for (int i = 0; i < 4; i++) check_lm_loss(i % 2 ? 2200 : VOCAB, i > 1);
  for (int v = 0; v < ENCODERS; v += 3) check_masked_loss(v, LUNA_FORM_CHEAPEST);
  check_masked_loss(0, LUNA_FORM_FOLDED);
  heap_check("masked language model");
}

/* ---- linear attention and Linformer by their definitions: naive loops in double ---- */
enum { HEADS = 3, HEAD_DIM = DIM / HEADS, QUERIES = 7, KEYS = 11, SOURCES = 4 };
static const int32_t key_lengths[SOURCES] = {KEYS, 4, 1, 0};
typedef struct naive {
  double q[QUERIES > KEYS ? QUERIES : KEYS][DIM], k[KEYS][DIM], v[KEYS][DIM], y[QUERIES > KEYS ? QUERIES : KEYS][DIM];
} naive;
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
static double elu1(double x) { return x > 0 ? x + 1 : exp(x); }
static void naive_linear_attention(naive *a, int64_t rows, int64_t keys, bool causal) {
  for (int64_t t = 0; t < rows; t++)
    for (int h = 0; h < HEADS; h++) {
      double sum = 0, out[HEAD_DIM] = {0};
      for (int64_t j = 0; j < keys && (!causal || j <= t); j++) {
        double weight = 0;
        for (int i = h * HEAD_DIM; i < (h + 1) * HEAD_DIM; i++) weight += elu1(a->q[t][i]) * elu1(a->k[j][i]);
        for (int i = 0; i < HEAD_DIM; i++) out[i] += weight * a->v[j][h * HEAD_DIM + i];
        sum += weight;
      }
      for (int i = 0; i < HEAD_DIM; i++) a->y[t][h * HEAD_DIM + i] = sum > 0 ? out[i] / sum : 0;
    }
}
/* column `i` of the real rows of x, shortened to k; the number of rows there are then */
static int64_t naive_shorten(const luna_linformer_config *c, const luna_tensor *e, double x[][DIM], int i, int64_t real, int64_t k,
                             double *out) {
  const int64_t w = (c->max_length + k - 1) / k, windows = c->projection == LUNA_LINFORMER_PROJECTION_LINEAR ? k : (real + w - 1) / w;
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
static void naive_linformer(naive *a, const luna_attention_layer *layer, int64_t rows, int64_t keys) {
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
      double sum = 0;
      for (int64_t r = 0; r < count; r++) {
        weight[r] = 0;
        for (int i = 0; i < HEAD_DIM; i++) weight[r] += a->q[t][h * HEAD_DIM + i] * key[i][r] / sqrt(HEAD_DIM);
        sum += weight[r] = exp(weight[r]);
      }
      for (int i = 0; i < HEAD_DIM; i++) {
        a->y[t][h * HEAD_DIM + i] = 0;
        for (int64_t r = 0; r < count; r++) a->y[t][h * HEAD_DIM + i] += weight[r] / sum * value[i][r];
      }
    }
  }
}
static void check_naive(luna_attention_layer_config config, bool cross, bool lengths, const char *what) {
  const luna_init normal = {LUNA_INIT_NORMAL, 0.4f};
  const int64_t rows = cross ? QUERIES : KEYS, shape[2] = {config.linformer.projection == LUNA_LINFORMER_PROJECTION_CONVOLUTION ? 1 : KEYS, KEYS};
  luna_ctx *ctx = ctx_open();
  luna_params *params = luna_params_open(ctx);
  luna_attention_layer layer;
  char where[160];
  config.dim = DIM, config.heads = HEADS;
  config.linformer.max_length = KEYS;
  CHECK(luna_attention_layer_init(&layer, params, "attention.", &config) == LUNA_OK, "%s: %s", what, luna_error(ctx));
  common_params(params, 63);
  if (config.linformer.sharing == LUNA_LINFORMER_SHARING_LAYERWISE && config.kind == LUNA_ATTENTION_LINFORMER)
    layer.e = layer.f = luna_param(params, "shared", 2, shape, normal);
  luna_begin_inference(ctx);
  luna_tensor *x = common_tensor(ctx, 12, SOURCES, rows, DIM, 0), *context = cross ? common_tensor(ctx, 13, SOURCES, KEYS, DIM, 0) : NULL;
  float *got = values_of(ctx, luna_attention_layer_forward(&layer, x, context, lengths ? key_lengths : NULL), what);
  float *expected = common_floats(SOURCES * rows * DIM);
  naive *a = (naive *)common_alloc(sizeof *a);
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
    snprintf(where, sizeof where, "%s%s%s, sequence %d, against naive loops", what, cross ? ", context" : "", lengths ? ", lengths" : "",
             b);
    test_close(where, got + b * rows * DIM, expected + b * rows * DIM, (size_t)(rows * DIM), 2e-6);
  }
  free(got), free(expected), free(a);
  luna_close(ctx);
}
/* Luna attention in its four sharing modes, eqs. 3-5: pack, then unpack */
enum { PACK_HEADS = 2, MEMORY = 5 };
static void naive_softmax(double q[][DIM], double k[][DIM], double v[][DIM], double y[][DIM], int64_t rows, int64_t keys, int heads) {
  for (int64_t t = 0; t < rows; t++)
    for (int h = 0; h < heads; h++) {
      double weight[KEYS], sum = 0;
      for (int64_t j = 0; j < keys; j++) {
        weight[j] = 0;
        for (int i = h * (DIM / heads); i < (h + 1) * (DIM / heads); i++) weight[j] += q[t][i] * k[j][i] / sqrt(DIM / heads);
        sum += weight[j] = exp(weight[j]);
      }
      for (int i = h * (DIM / heads); i < (h + 1) * (DIM / heads); i++) {
        y[t][i] = 0;
        for (int64_t j = 0; j < keys; j++) y[t][i] += weight[j] / sum * v[j][i];
      }
    }
}
static void naive_rows(const luna_linear_layer *layer, double x[][DIM], int64_t rows, double y[][DIM]) {
  for (int64_t t = 0; t < rows; t++) naive_linear(layer, x[t], y[t]);
}
static void naive_nested(const luna_nested_attention_layer *l, double x[][DIM], double p[][DIM], double context[][DIM], int64_t rows,
                         int64_t real, float *out, float *packed_context) {
  const luna_sharing sharing = l->config.sharing;
  double q[KEYS][DIM], k[KEYS][DIM], v[KEYS][DIM], y[KEYS][DIM], yp[MEMORY][DIM];
  naive_rows(&l->pq, p, MEMORY, q);
  naive_rows(&l->pv, context, KEYS, v);
  if (sharing == LUNA_SHARING_NO_KEY) memcpy(k, context, sizeof k);
  else naive_rows(sharing == LUNA_SHARING_TIED ? &l->pv : sharing == LUNA_SHARING_QK ? &l->pq : &l->pk, context, KEYS, k);
  naive_softmax(q, k, v, yp, MEMORY, real, PACK_HEADS);
  naive_rows(&l->q, x, rows, q);
  naive_rows(&l->v, yp, MEMORY, v);
  if (sharing == LUNA_SHARING_NO_KEY) memcpy(k, yp, sizeof yp);
  else naive_rows(sharing == LUNA_SHARING_TIED ? &l->v : sharing == LUNA_SHARING_QK ? &l->q : &l->k, yp, MEMORY, k);
  naive_softmax(q, k, v, y, rows, real < MEMORY ? real : MEMORY, HEADS);
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
  CHECK(luna_nested_attention_layer_init(&layer, params, "", &config) == LUNA_OK, "sharing %d: %s", sharing, luna_error(ctx));
  CHECK(luna_params_tensor_count(params) == 2 * (sharing == LUNA_SHARING_FULL ? 7 : 5), "sharing %d has %d parameters", sharing,
        (int)luna_params_tensor_count(params));
  common_params(params, 68);
  luna_begin_inference(ctx);
  luna_tensor *x = common_tensor(ctx, 14, SOURCES - 1, rows, DIM, 0), *p = common_tensor(ctx, 15, SOURCES - 1, MEMORY, DIM, 0),
              *context = cross ? common_tensor(ctx, 16, SOURCES - 1, KEYS, DIM, 0) : NULL;
  float *got = values_of(ctx, luna_nested_attention_layer_forward(&layer, x, p, context, lengths ? key_lengths : NULL, &packed_context),
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
    snprintf(what, sizeof what, "sharing %d, form %d%s%s, sequence %d: Y_X by eqs. 3-5", sharing, form, cross ? ", context" : "",
             lengths ? ", lengths" : "", b);
    test_close(what, got + b * rows * DIM, expected, (size_t)(rows * DIM), 2e-6);
    snprintf(what, sizeof what, "sharing %d, form %d%s%s, sequence %d: Y_P by eqs. 3-5", sharing, form, cross ? ", context" : "",
             lengths ? ", lengths" : "", b);
    test_close(what, got_packed + b * MEMORY * DIM, expected_packed, MEMORY * DIM, 2e-6);
  }
  free(got), free(got_packed);
  luna_close(ctx);
}
static void check_naives(void) {
  static const char *const projections[] = {"linear", "mean", "max", "convolution"}, *const sharings[] = {"headwise", "key-value",
                                                                                                          "layerwise"};
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
          snprintf(what, sizeof what, "Linformer, %s, %s%s", projections[projection], sharings[sharing], taper ? ", k by head" : "");
          check_naive(config, i & 1, i & 2, what);
        }
  }
}

/* ---- every attention trains ---- */
enum { TASK_BATCH = 24, TASK_N = 12 };
/* sequences of 0 to 3 with lengths; label: is 0 more often there than 1? It never is as often. */
static void counting_task(uint64_t step, int32_t *tokens, int32_t *lengths, int32_t *labels) {
  for (int b = 0; b < TASK_BATCH; b++) {
    int32_t *row = tokens + b * TASK_N, more = 0;
    lengths[b] = 5 + (int32_t)(common_hash(20 + step, (uint64_t)b) % (TASK_N - 4));
    for (int i = 0; i < TASK_N; i++) {
      row[i] = (int32_t)(common_hash(1000 + step, (uint64_t)(b * TASK_N + i)) % 4);
      if (i < lengths[b]) more += row[i] == 0 ? 1 : row[i] == 1 ? -1 : 0;
    }
    const int32_t last = row[lengths[b] - 1];
    if (more == 0) more = last == 0 ? -1 : 1, row[lengths[b] - 1] = last == 0 ? 2 : last == 1 ? 2 : 0;
    labels[b] = more > 0;
  }
}
/* trains on the task and returns the mean loss of the last 10 steps, in parts of ln 2; NaN when something failed */
static double train_classifier(luna_params *params, const luna_classifier *model, int steps, float lr) {
  luna_ctx *ctx = model->projection->ctx;
  luna_optimizer_config config = {0};
  config.lr = lr;
  luna_optimizer *adam = luna_adamw(params, &config);
  int32_t tokens[TASK_BATCH * TASK_N], lengths[TASK_BATCH], labels[TASK_BATCH];
  double sum = 0;
  for (int step = 0; step < steps; step++) {
    counting_task((uint64_t)step, tokens, lengths, labels);
    luna_begin_step(ctx);
    luna_tensor *loss = luna_cross_entropy(luna_classifier_forward(model, &(luna_input){ tokens, lengths, TASK_BATCH, TASK_N, NULL }), labels);
    luna_backward(loss);
    if (!CHECK(luna_optimizer_step(adam) == LUNA_OK, "step %d: %s", step, luna_error(ctx))) return NAN;
    if (step >= steps - 10) sum += (double)luna_item(loss) / 10 / log(2);
  }
  return sum;
}
/* every matrix has moved from its first values: nothing is left out of the training */
static void check_moved(const luna_params *params, const float *before, const char *what) {
  for (int64_t i = 0; i < luna_params_tensor_count(params); i++) {
    const char *name;
    const luna_tensor *p = luna_params_at(params, i, &name);
    CHECK(p->rank < 2 || !same_bits(p->data, before, luna_count(p)), "%s: training has not changed %s", what, name);
    before += luna_count(p);
  }
}
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
  config.vocab = 5, config.layers = 1, config.memory = 4;
  config.layer.dim = DIM, config.layer.heads = 2, config.layer.ffn = 20, config.layer.convolution = 4, config.layer.attention = kind;
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
      luna_tensor *loss = luna_cross_entropy(luna_lm_forward(&model, &(luna_input){ tokens, NULL, 4, 24, NULL }), labels);
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
  CHECK(luna_params_tensor_count(params) == 0, "what was refused leaves %d parameters", (int)luna_params_tensor_count(params));
  luna_close(ctx); /* an init that failed stays in its context */
  ctx = ctx_open(), params = luna_params_open(ctx);
  for (int i = 0; i < 4; i++) {
    luna_linformer_config l = {4, 0, 0, 9, LUNA_LINFORMER_SHARING_KEY_VALUE, (luna_linformer_projection)i};
    char name[8] = "0.";
    name[0] = (char)('0' + i);
    config.kind = LUNA_ATTENTION_LINFORMER, config.linformer = l;
    CHECK(luna_attention_layer_init(&layer, params, name, &config) == LUNA_OK, "%s", luna_error(ctx));
    luna_tensor *x = common_tensor(ctx, 1, 2, 9, DIM, 0), *longer = common_tensor(ctx, 1, 2, 10, DIM, 0);
    CHECK(luna_attention_layer_forward(&layer, x, NULL, NULL) && luna_attention_layer_forward(&layer, longer, x, NULL), "9 keys: %s",
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
  for (int i = 0; i < 32; i++) check_sharing((luna_sharing)(i / 8), i & 4 ? LUNA_FORM_FOLDED : LUNA_FORM_UNFOLDED, i & 1, i & 2);
  for (int v = 0; v < ENCODERS; v++) check_classifier_trains(v);
  for (int kind = LUNA_ATTENTION_LUNA; kind <= LUNA_ATTENTION_LINEAR; kind++) check_lm_trains((luna_attention_kind)kind);
  check_linformer_refusals();
  heap_check("attentions");
}

/* ---- an attention from outside luna.h: a learned moving average, a custom op; y_t = (1 - a) sum_j a^|t-j| x_j, one a = sigmoid(decay) a
 * head ---- */
typedef struct average_layer {
  luna_tensor *decay;
  luna_linear_layer out;
} average_layer;
typedef struct average_hook {
  average_layer layers[8];
  int made, fail_at;                                        /* init number fail_at returns null, after it has made a parameter */
  int forwards, with_memory, causal, with_lengths, strange; /* what forward has seen; strange: a p that is no tensor of the model's sizes */
  luna_tensor *expected_memory;
} average_hook;
typedef struct average_state {
  bool causal, cut;
  int32_t lengths[32];
} average_state;

static bool average_sees(const average_state *s, int64_t b, int64_t t, int64_t j) {
  return (!s->causal || j <= t) && (!s->cut || j < s->lengths[b]);
}
static void average_forward(const luna_tensor *const *in, int count, luna_tensor *out, void *state) {
  const average_state *s = (const average_state *)state;
  const int64_t n = out->shape[1], d = out->shape[2], heads = in[1]->shape[0];
  (void)count;
  for (int64_t i = 0; i < luna_count(out); i++) {
    const int64_t b = i / (n * d), t = i / d % n;
    const double a = 1 / (1 + exp(-parameter(in[1], i % d / (d / heads))));
    double sum = 0;
    for (int64_t j = 0; j < n; j++)
      if (average_sees(s, b, t, j)) sum += pow(a, (double)llabs(t - j)) * parameter(in[0], (b * n + j) * d + i % d);
    out->data[i] = (float)((1 - a) * sum);
  }
}
static void average_backward(luna_tensor *const *in, int count, const luna_tensor *out, void *state) {
  const average_state *s = (const average_state *)state;
  const int64_t n = out->shape[1], d = out->shape[2], heads = in[1]->shape[0];
  (void)count;
  for (int64_t i = 0; i < luna_count(out); i++) {
    const int64_t b = i / (n * d), t = i / d % n, h = i % d / (d / heads);
    const double a = 1 / (1 + exp(-parameter(in[1], h)));
    double slope = 0;
    for (int64_t j = 0; j < n; j++) {
      const double k = (double)llabs(t - j), power = pow(a, k), x = parameter(in[0], (b * n + j) * d + i % d);
      if (!average_sees(s, b, t, j)) continue;
      if (in[0]->grad) in[0]->grad[(b * n + j) * d + i % d] += (float)((1 - a) * power) * out->grad[i];
      slope += x * ((1 - a) * k * power / a - power);
    }
    if (in[1]->grad) in[1]->grad[h] += (float)(slope * a * (1 - a)) * out->grad[i];
  }
}
static void *average_make(void *user, luna_params *params, const char *prefix, const luna_layer_config *config) {
  average_hook *hook = (average_hook *)user;
  average_layer *layer = &hook->layers[hook->made];
  const int64_t heads[1] = {config->heads};
  const luna_init zeros = {LUNA_INIT_ZEROS, 0}, xavier = {LUNA_INIT_XAVIER, 1};
  char name[100];
  snprintf(name, sizeof name, "%sdecay", prefix);
  layer->decay = luna_param(params, name, 1, heads, zeros);
  if (hook->made++ == hook->fail_at) return NULL;
  snprintf(name, sizeof name, "%saverage.", prefix);
  return luna_linear_layer_init(&layer->out, params, name, config->dim, config->dim, xavier) == LUNA_OK ? layer : NULL;
}
static average_hook *average_now; /* forward gets only the layer */
static luna_tensor *average_run(void *layer, luna_attention_call *call) {
  const average_layer *a = (const average_layer *)layer;
  luna_tensor *x = call->x, *p = call->p;
  const int32_t *lengths = call->lengths;
  const bool causal = call->causal;
  average_state state;
  luna_custom custom = {average_forward, average_backward, &state, sizeof state, 0, false};
  luna_tensor *in[2];
  memset(&state, 0, sizeof state);
  state.causal = causal;
  state.cut = lengths != NULL;
  for (int64_t b = 0; lengths && b < x->shape[0]; b++) state.lengths[b] = lengths[b];
  average_now->forwards++;
  average_now->with_memory += p != NULL;
  average_now->strange += p != average_now->expected_memory;
  average_now->causal += causal;
  average_now->with_lengths += lengths != NULL;
  in[0] = x, in[1] = a->decay;
  return luna_linear_layer_forward(&a->out, luna_custom_op(in, 2, 3, x->shape, &custom));
}
static luna_attention_hook average_open(average_hook *hook, int fail_at) {
  luna_attention_hook h = {average_make, average_run, NULL};
  memset(hook, 0, sizeof *hook);
  hook->fail_at = fail_at;
  average_now = hook;
  h.user = hook;
  return h;
}

typedef struct path_text {
  char text[300];
} path_text;
static path_text path_of(void) { /* a file of this process alone */
  const char *build = getenv("BUILD");
  path_text path;
  if (!build) build = "build";
  mkdir(build, 0777);
  snprintf(path.text, sizeof path.text, "%s/models_test_%ld.safetensors", build, (long)getpid());
  return path;
}

static void check_hook_classifier(luna_recompute_kind recompute) {
  average_hook state;
  const luna_attention_hook hook = average_open(&state, -1);
  const path_text path = path_of();
  luna_ctx *ctx = ctx_open();
  luna_params *set[2];
  luna_classifier model[2];
  luna_model any;
  luna_classifier_config config = {0};
  int32_t tokens[TASK_BATCH * TASK_N], lengths[TASK_BATCH], labels[TASK_BATCH];
  float *logits[2];
  config.vocab = 4, config.pooling = LUNA_POOLING_CLS, config.encoder = encoder_config(0);
  config.encoder.layer.hook = &hook, config.encoder.layer.recompute = recompute;
  for (int i = 0; i < 2; i++) {
    set[i] = luna_params_open(ctx);
    CHECK(luna_classifier_init(&model[i], set[i], &config) == LUNA_OK, "hook: %s", luna_error(ctx));
    CHECK(luna_params_find(set[i], "encoder.layers.1.self_attn.decay") &&
              luna_params_find(set[i], "encoder.layers.0.self_attn.average.weight") &&
              !luna_params_find(set[i], "encoder.projected_embeddings") &&
              !luna_params_find(set[i], "encoder.layers.0.self_attn.q_proj.weight"),
          "a hooked classifier has not the hook's parameters alone");
  }
  counting_task(0, tokens, lengths, labels);
  luna_begin_step(ctx);
  luna_tensor *loss = luna_cross_entropy(luna_classifier_forward(&model[0], &(luna_input){ tokens, lengths, TASK_BATCH, TASK_N, NULL }), labels);
  const double value = (double)luna_item(loss);
  const int first_run = state.forwards;
  CHECK(luna_backward(loss) == LUNA_OK, "hook: %s", luna_error(ctx));
  CHECK(first_run == 2 && state.forwards == 2, "recompute %d: the hook ran %d times, then %d",
        recompute, first_run, state.forwards - first_run);
  CHECK(state.with_memory == 0 && state.strange == 0, "recompute %d: of %d forwards %d have a memory, and the encoder has none", recompute,
        state.forwards, state.with_memory);
  CHECK(state.causal == 0 && state.with_lengths == state.forwards,
        "recompute %d: an encoder's hook is called causal %d times, with lengths %d times of %d", recompute, state.causal,
        state.with_lengths, state.forwards);
  for (int i = 0; i < 2; i++) { /* the gradient, and what the loss does when a decay changes: a central difference in float, to 3% */
    luna_tensor *decay = state.layers[i].decay;
    float side[2], *g = gradient_of(decay);
    for (int s = 0; s < 2; s++) {
      decay->data[0] = s ? -0.005f : 0.005f;
      luna_begin_step(ctx);
      side[s] = luna_item(luna_cross_entropy(luna_classifier_forward(&model[0], &(luna_input){ tokens, lengths, TASK_BATCH, TASK_N, NULL }), labels));
    }
    decay->data[0] = 0;
    const double difference = ((double)side[0] - (double)side[1]) / 0.01;
    CHECK(fabs(difference - (double)g[0]) <= 3e-2 * fabs(difference) + 1e-4 && g[0] != 0,
          "hook, layer %d: the loss %.4f changes by %.5f a decay, the gradient is %.5f", i, value, difference, (double)g[0]);
    free(g);
  }
  luna_params_zero_grad(set[0]);
  const double fell = train_classifier(set[0], &model[0], 100, 1e-2f);
  CHECK(fell < 0.5, "a hooked classifier's loss falls to %.3f of ln 2 only", fell);
  CHECK(state.layers[0].decay->data[0] != 0 && state.layers[1].decay->data[1] != 0, "training has not changed the hook's parameters");
  CHECK(luna_save(set[0], path.text) == LUNA_OK && luna_load(set[1], path.text) == LUNA_OK, "hook: %s", luna_error(ctx));
  for (int i = 0; i < 2; i++) {
    luna_begin_inference(ctx);
    logits[i] = values_of(ctx, luna_classifier_forward(&model[i], &(luna_input){ tokens, lengths, TASK_BATCH, TASK_N, NULL }), "logits");
  }
  CHECK(same_bits(logits[0], logits[1], TASK_BATCH * 2), "a hooked classifier comes back from its file with other bits");
  luna_params *empty = luna_params_open(ctx);
  refused(ctx, luna_load_model(&any, empty, path.text) == LUNA_BAD_FILE && luna_params_tensor_count(empty) == 0,
      NOT_A_MODEL,
          "the file of a hooked model, without the hook");
  free(logits[0]), free(logits[1]);
  remove(path.text);
  luna_close(ctx);
}
static void check_hook_lm(void) {
  average_hook state;
  const luna_attention_hook hook = average_open(&state, -1);
  luna_ctx *ctx = ctx_open();
  luna_params *params = luna_params_open(ctx);
  luna_lm model;
  luna_lm_config config = {0};
  luna_optimizer_config adamw = {0};
  int32_t *tokens = common_tokens(20, 3, 5);
  float *before, *after;
  double first = 0, last = 0;
  adamw.lr = 1e-2f;
  config.vocab = 5, config.layer.dim = DIM, config.layer.heads = 2, config.layer.ffn = 20, config.layer.hook = &hook;
  CHECK(luna_lm_init(&model, params, &config) == LUNA_OK, "hook: %s", luna_error(ctx));
  luna_optimizer *adam = luna_adamw(params, &adamw);
  for (int step = 0; step < 150; step++) {
    luna_begin_step(ctx);
    luna_tensor *loss = luna_cross_entropy(luna_lm_forward(&model, &(luna_input){ tokens, NULL, 1, 19, NULL }), tokens + 1);
    luna_backward(loss);
    if (!CHECK(luna_optimizer_step(adam) == LUNA_OK, "hook: %s", luna_error(ctx))) break;
    last = (double)luna_item(loss);
    if (step == 0) first = last;
  }
  CHECK(last < 0.2 * first, "a hooked language model's loss falls from %.3f to %.3f only", first, last);
  CHECK(state.causal == state.forwards && state.with_memory == 0 && state.with_lengths == 0 && state.forwards == 300,
        "of 300 forwards in a language model %d were made, %d are causal, %d have a memory, %d lengths", state.forwards, state.causal,
        state.with_memory, state.with_lengths);
  for (int i = 0; i < 2; i++) {
    luna_begin_inference(ctx);
    before = values_of(ctx, luna_lm_forward(&model, &(luna_input){ tokens, NULL, 1, 20, NULL }), "logits");
    tokens[12] = (tokens[12] + 1) % 5;
    luna_begin_inference(ctx);
    after = values_of(ctx, luna_lm_forward(&model, &(luna_input){ tokens, NULL, 1, 20, NULL }), "logits");
    CHECK(same_bits(before, after, 12 * 5) && !same_bits(before + 12 * 5, after + 12 * 5, 5),
          "token 12 changes what comes before it, or not what comes after");
    free(before), free(after);
  }
  refused(ctx, !luna_stream_open(&model, NULL), STREAM_ATTENTION, "streaming a hooked model");
  free(tokens);
  luna_close(ctx);
}
static luna_tensor *null_run(void *layer, luna_attention_call *call) {
  (void)layer, (void)call;
  return NULL;
}
static luna_tensor *wrong_shape_run(void *layer, luna_attention_call *call) {
  (void)layer;
  return luna_mean(call->x, 0);
}
static void check_hook_refusals(void) {
  average_hook state;
  luna_ctx *ctx = ctx_open();
  luna_params *params = luna_params_open(ctx);
  luna_classifier classifier;
  luna_lm lm;
  luna_seq2seq seq2seq;
  luna_encoder_layer layer;
  const int64_t one[1] = {3};
  const luna_init zeros = {LUNA_INIT_ZEROS, 0};
  luna_param(params, "mine", 1, one, zeros);
  for (int fail_at = 0; fail_at < 2; fail_at++) {
    luna_classifier_config c = {0};
    luna_lm_config l = {0};
    luna_attention_hook hook = average_open(&state, fail_at);
    c.encoder = encoder_config(0), c.encoder.layer.hook = &hook;
    refused(ctx, luna_classifier_init(&classifier, params, &c) != LUNA_OK, HOOK_INIT,
        "a classifier whose hook's init %d returns null",
            fail_at);
    hook = average_open(&state, fail_at);
    l.layer.hook = &hook;
    refused(ctx, luna_lm_init(&lm, params, &l) != LUNA_OK, HOOK_INIT,
        "a language model whose hook's init %d returns null", fail_at);
    CHECK(luna_params_tensor_count(params) == 1 && luna_params_element_count(params) == 3 && !luna_params_get(params, "luna.kind"),
          "a hook that fails leaves %d parameters", (int)luna_params_tensor_count(params));
  }
  luna_layer_config config = {0};
  luna_attention_hook half = average_open(&state, -1), whole = half;
  half.forward = NULL;
  config.dim = DIM, config.heads = 2, config.hook = &half;
  refused(ctx, luna_encoder_layer_init(&layer, params, "x.", &config) == LUNA_BAD_ARGUMENT, NULL_ARGUMENT,
      "a hook without forward");
  for (int wrong = 0; wrong < 2; wrong++) { /* a forward that returns null, another shape */
    const int64_t shape[3] = {1, 4, DIM};
    luna_ctx *own = ctx_open();
    luna_attention_hook bad = average_open(&state, -1);
    bad.forward = wrong ? wrong_shape_run : null_run;
    config.hook = &bad;
    CHECK(luna_encoder_layer_init(&layer, luna_params_open(own), "x.", &config) == LUNA_OK, "%s", luna_error(own));
    luna_begin_inference(own);
    luna_tensor *none = NULL;
    CHECK(!luna_encoder_layer_forward(&layer, luna_tensor_new(own, NULL, 3, shape), &none, NULL) &&
              luna_ctx_error_id(own) == (wrong ? LUNA_ERROR_HOOK_SHAPE : LUNA_ERROR_HOOK_NULL),
          "a hook's result %d: \"%s\"", wrong, luna_error(own));
    luna_close(own);
  }
  luna_seq2seq_config s = {0};
  s.encoder = encoder_config(0), s.encoder.layer.hook = &whole;
  refused(ctx, luna_seq2seq_init(&seq2seq, params, &s) == LUNA_UNSUPPORTED, LUNA_ONLY,
      "an encoder-decoder with a hook");
  luna_classifier_config c = {0};
  c.pooling = LUNA_POOLING_MEMORY, c.encoder = s.encoder;
  refused(ctx, luna_classifier_init(&classifier, params, &c) == LUNA_BAD_ARGUMENT, POOLING_MEMORY,
      "pooling the memory of a hooked model");
  config.hook = &whole; /* a layer by itself passes on the memory it is given */
  for (int recompute = LUNA_RECOMPUTE_NONE; recompute <= LUNA_RECOMPUTE_LAYER; recompute++) {
    char name[8] = "0.";
    name[0] = (char)('0' + recompute);
    config.recompute = (luna_recompute_kind)recompute;
    CHECK(luna_encoder_layer_init(&layer, params, name, &config) == LUNA_OK, "%s", luna_error(ctx));
    luna_begin_inference(ctx);
    luna_tensor *x = common_tensor(ctx, 1, 2, 5, DIM, 0), *p = common_tensor(ctx, 2, 2, 3, DIM, 0), *given = p;
    state.expected_memory = p;
    state.forwards = state.with_memory = state.strange = 0;
    CHECK(luna_encoder_layer_forward(&layer, x, &p, NULL) && p == given && state.with_memory == 1 && state.strange == 0,
          "a hook does not get the layer's memory: %s", luna_error(ctx));
    state.expected_memory = NULL;
    CHECK(luna_encoder_layer_forward(&layer, x, NULL, NULL) && state.with_memory == 1 && state.strange == 0, "a hook without a memory: %s",
          luna_error(ctx));
  }
  luna_close(ctx);
}
static void check_hooks(void) {
  for (int recompute = LUNA_RECOMPUTE_NONE; recompute <= LUNA_RECOMPUTE_LAYER; recompute++) check_hook_classifier((luna_recompute_kind)recompute);
  check_hook_lm();
  check_hook_refusals();
  heap_check("hooks");
}

/* ---- a model that is none of luna.h's: a Luna encoder layer reads a list, a question looks into it through softmax attention ---- */
typedef struct lookup {
  luna_tensor *embedding, *question, *memory;
  luna_encoder_layer reader;
  luna_attention_layer look;
  luna_norm_layer norm;
  luna_linear_layer answer;
} lookup;
static bool lookup_init(lookup *m, luna_params *params) {
  const int64_t table[2] = {6, DIM}, slots[2] = {4, DIM};
  const luna_init normal = {LUNA_INIT_NORMAL, 0.5f}, xavier = {LUNA_INIT_XAVIER, 1};
  luna_layer_config layer = {0};
  luna_attention_layer_config attention = {0};
  layer.dim = DIM, layer.heads = 2, layer.ffn = 16;
  attention.kind = LUNA_ATTENTION_SOFTMAX, attention.dim = DIM, attention.heads = 2;
  m->embedding = luna_param(params, "embedding", 2, table, normal);
  m->question = luna_param(params, "question", 2, table, normal);
  m->memory = luna_param(params, "memory", 2, slots, normal);
  return m->embedding && m->question && m->memory && luna_encoder_layer_init(&m->reader, params, "reader.", &layer) == LUNA_OK &&
         luna_attention_layer_init(&m->look, params, "look.", &attention) == LUNA_OK &&
         luna_norm_layer_init(&m->norm, params, "norm", DIM, LUNA_NORM_LAYER) == LUNA_OK &&
         luna_linear_layer_init(&m->answer, params, "answer", DIM, 2, xavier) == LUNA_OK;
}
/* is the symbol asked for in the list? list [batch, n], asked [batch] -> [batch, 1, 2] */
static luna_tensor *lookup_forward(const lookup *m, const int32_t *list, const int32_t *lengths, const int32_t *asked, int64_t batch,
                                   int64_t n) {
  luna_tensor *p = luna_expand(m->memory, batch), *x = luna_embedding(m->embedding, list, batch, n),
              *q = luna_embedding(m->question, asked, batch, 1);
  x = luna_encoder_layer_forward(&m->reader, x, &p, lengths);
  return luna_linear_layer_forward(&m->answer,
                                   luna_norm_layer_forward(&m->norm, luna_add(luna_attention_layer_forward(&m->look, q, x, lengths), q)));
}
static void check_composed(void) {
  enum { LISTS = 32, LENGTH = 8 };
  const path_text path = path_of();
  luna_ctx *ctx = ctx_open();
  luna_params *set[2];
  lookup model[2];
  luna_optimizer_config adamw = {0};
  int32_t list[LISTS * LENGTH], asked[LISTS], labels[LISTS], lengths[LISTS];
  float *y[2];
  double sum = 0;
  adamw.lr = 1e-2f;
  for (int i = 0; i < 2; i++) {
    set[i] = luna_params_open(ctx);
    CHECK(lookup_init(&model[i], set[i]), "a composed model: %s", luna_error(ctx));
    if (i) common_params(set[i], 64);
  }
  luna_optimizer *adam = luna_adamw(set[0], &adamw);
  float *before = common_parameters(set[0]);
  for (int step = 0; step < 400; step++) {
    for (int b = 0; b < LISTS; b++) {
      asked[b] = (int32_t)(common_hash(40, (uint64_t)(step * LISTS + b)) % 6);
      lengths[b] = 1 + (int32_t)(common_hash(41, (uint64_t)(step * LISTS + b)) % LENGTH);
      labels[b] = 0;
      for (int i = 0; i < LENGTH; i++) {
        list[b * LENGTH + i] = (int32_t)(common_hash(42 + (uint64_t)step, (uint64_t)(b * LENGTH + i)) % 6);
        if (i < lengths[b] && list[b * LENGTH + i] == asked[b]) labels[b] = 1;
      }
    }
    luna_begin_step(ctx);
    luna_tensor *loss = luna_cross_entropy(lookup_forward(&model[0], list, lengths, asked, LISTS, LENGTH), labels);
    luna_backward(loss);
    if (!CHECK(luna_optimizer_step(adam) == LUNA_OK, "a composed model: %s", luna_error(ctx))) break;
    if (step >= 390) sum += (double)luna_item(loss) / 10 / log(2);
  }
  CHECK(sum < 0.5, "a composed model's loss falls to %.3f of ln 2 only", sum);
  check_moved(set[0], before, "a composed model");
  CHECK(luna_save(set[0], path.text) == LUNA_OK && luna_load(set[1], path.text) == LUNA_OK, "a composed model: %s", luna_error(ctx));
  for (int i = 0; i < 2; i++) {
    luna_begin_inference(ctx);
    y[i] = values_of(ctx, lookup_forward(&model[i], list, lengths, asked, LISTS, LENGTH), "a composed model");
  }
  CHECK(same_bits(y[0], y[1], LISTS * 2), "a composed model comes back from its file with other bits");
  free(y[0]), free(y[1]), free(before);
  remove(path.text);
  luna_close(ctx);
  heap_check("a composed model");
}

/* ---- segments: the memory that one leaves is what the next begins with ---- */
enum { SEGMENT = 9 };
typedef struct segments {
  luna_ctx *ctx;
  luna_params *params;
  luna_encoder encoder;
} segments;
static void segments_open(segments *s, int v) {
  luna_encoder_config config = encoder_config(v);
  s->ctx = ctx_open();
  s->params = luna_params_open(s->ctx);
  CHECK(luna_encoder_init(&s->encoder, s->params, "", VOCAB, &config) == LUNA_OK, "%s", luna_error(s->ctx));
  common_params(s->params, 65);
}
/* two segments of tokens below 5 and of the others, in one step; the gradients of a loss of the second alone */
typedef enum crossing { STRAIGHT, DETACHED, AS_CONSTANT } crossing;
static float *two_segments(segments *s, crossing how, float **x) {
  int32_t first[2 * SEGMENT], second[2 * SEGMENT];
  luna_tensor *p = NULL;
  for (int i = 0; i < 2 * SEGMENT; i++)
    first[i] = (int32_t)(common_hash(50, (uint64_t)i) % 5), second[i] = 5 + (int32_t)(common_hash(51, (uint64_t)i) % (VOCAB - 5));
  luna_params_zero_grad(s->params);
  luna_begin_step(s->ctx);
  luna_encoder_forward(&s->encoder, &(luna_input){ first, NULL, 2, SEGMENT, NULL }, &p);
  if (how == DETACHED) p = luna_detach(p);
  if (how == AS_CONSTANT) {
    float *values = values_of(s->ctx, p, "the memory");
    luna_begin_step(s->ctx);
    const int64_t shape[3] = {2, SLOTS, DIM};
    p = luna_tensor_new(s->ctx, values, 3, shape);
    free(values);
  }
  luna_tensor *y = luna_encoder_forward(&s->encoder, &(luna_input){ second, NULL, 2, SEGMENT, NULL }, &p);
  *x = values_of(s->ctx, y, "the second segment");
  luna_tensor *both = luna_add(common_loss(y, 52), common_loss(p, 53));
  CHECK(luna_backward(both) == LUNA_OK, "segments: %s", luna_error(s->ctx));
  return all_gradients(s->params);
}
static void check_detach(int v) {
  segments s;
  float *x[3], *g[3];
  double early[3];
  segments_open(&s, v);
  for (int how = 0; how < 3; how++) {
    g[how] = two_segments(&s, (crossing)how, &x[how]);
    float *table = gradient_of(luna_params_find(s.params, "embed_tokens.weight"));
    early[how] = length_of(table, 5 * DIM);
    CHECK(length_of(table + 5 * DIM, (VOCAB - 5) * DIM) > 1e-3, "%s: the second segment's own tokens have no gradient", encoder_names[v]);
    free(table);
  }
  CHECK(same_bits(x[0], x[1], 2 * SEGMENT * DIM) && same_bits(x[0], x[2], 2 * SEGMENT * DIM), "%s: luna_detach changes values",
        encoder_names[v]);
  CHECK(early[STRAIGHT] > 1e-3, "%s: no gradient goes back to the segment before", encoder_names[v]);
  CHECK(early[DETACHED] == 0 && gradient_size(luna_params_find(s.params, "projected_embeddings")) == 0,
        "%s: through luna_detach goes a gradient of %.3g", encoder_names[v], early[DETACHED]);
  CHECK(same_bits(g[DETACHED], g[AS_CONSTANT], luna_params_element_count(s.params)), "%s: luna_detach has other gradients than a constant",
        encoder_names[v]);
  for (int how = 0; how < 3; how++) free(x[how]), free(g[how]);
  luna_close(s.ctx);
}
/* `count` segments, the memory carried over begins, or in one inference; the last X and P, to be freed */
static float *many_segments(segments *s, const int32_t *tokens, int64_t count, bool carried, bool forgetting, float **memory,
                            size_t *peak_early, size_t *peak) {
  const int64_t shape[3] = {1, SLOTS, DIM};
  float *values = common_floats(SLOTS * DIM), *x = NULL;
  luna_tensor *p = NULL, *y = NULL;
  for (int64_t i = 0; i < count; i++) {
    if (i == 0 || carried) luna_begin_inference(s->ctx);
    if (i && carried) p = luna_tensor_new(s->ctx, values, 3, shape);
    if (forgetting) p = NULL;
    y = luna_encoder_forward(&s->encoder, &(luna_input){ tokens + i * SEGMENT, NULL, 1, SEGMENT, NULL }, &p);
    if (!CHECK(y && luna_read(p, values) == LUNA_OK, "segment %lld: %s", (long long)i, luna_error(s->ctx))) break;
    if (i == 1 && peak_early) *peak_early = luna_memory(s->ctx).peak;
  }
  if (peak) *peak = luna_memory(s->ctx).peak;
  x = values_of(s->ctx, y, "the last segment");
  if (memory) *memory = values;
  else free(values);
  return x;
}
static void check_carried(int v) {
  enum { COUNT = 50, LATER = 5 };
  segments s;
  size_t early = 0, late = 0;
  int32_t *tokens = common_tokens(COUNT * SEGMENT, 54, VOCAB);
  float *pa, *pb;
  segments_open(&s, v);
  float *a = many_segments(&s, tokens, COUNT, true, false, &pa, &early, &late);
  CHECK(early == late, "%s: memory in use grows from %zu bytes in the second segment to %zu in the 50th", encoder_names[v], early, late);
  float *b = many_segments(&s, tokens, COUNT, false, false, &pb, NULL, NULL);
  CHECK(same_bits(a, b, SEGMENT * DIM) && same_bits(pa, pb, SLOTS * DIM), "%s: a memory carried over luna_begin_inference gives other bits",
        encoder_names[v]);
  free(a), free(b), free(pa), free(pb);
  a = many_segments(&s, tokens, LATER, true, false, &pa, NULL, NULL);
  tokens[3] = (tokens[3] + 1) % VOCAB;
  b = many_segments(&s, tokens, LATER, true, false, &pb, NULL, NULL);
  CHECK(test_error(b, a, SEGMENT * DIM) > 1e-4 && test_error(pb, pa, SLOTS * DIM) > 1e-4,
        "%s: a token of the first segment changes the fifth by %.3g only", encoder_names[v], test_error(b, a, SEGMENT * DIM));
  free(a), free(b), free(pa), free(pb);
  a = many_segments(&s, tokens, LATER, true, true, NULL, NULL, NULL);
  tokens[3] = (tokens[3] + 1) % VOCAB;
  b = many_segments(&s, tokens, LATER, true, true, NULL, NULL, NULL);
  CHECK(same_bits(a, b, SEGMENT * DIM), "%s: a segment without a memory depends on the one before", encoder_names[v]);
  free(a), free(b), free(tokens);
  luna_close(s.ctx);
}
/* The class stands in the first of three segments, and the answer is read from the last one's memory. */
static void check_memory_trains(void) {
  luna_ctx *ctx = ctx_open();
  luna_params *params = luna_params_open(ctx);
  luna_classifier model;
  luna_classifier_config config = {0};
  luna_optimizer_config adamw = {0};
  int32_t tokens[3][16 * SEGMENT], labels[16];
  double sum = 0;
  adamw.lr = 1e-2f;
  config.vocab = VOCAB, config.encoder = encoder_config(0);
  CHECK(luna_classifier_init(&model, params, &config) == LUNA_OK, "%s", luna_error(ctx));
  luna_optimizer *adam = luna_adamw(params, &adamw);
  for (int step = 0; step < 120; step++) {
    luna_tensor *p = NULL, *x = NULL;
    for (int i = 0; i < 3 * 16 * SEGMENT; i++)
      tokens[i / (16 * SEGMENT)][i % (16 * SEGMENT)] = (int32_t)(common_hash(55 + (uint64_t)step, (uint64_t)i) % (VOCAB - 2));
    for (int b = 0; b < 16; b++) {
      labels[b] = (int32_t)(common_hash(56, (uint64_t)(step * 16 + b)) % 2);
      tokens[0][b * SEGMENT + step % SEGMENT] = VOCAB - 2 + labels[b];
    }
    luna_begin_step(ctx);
    for (int i = 0; i < 3; i++) x = luna_encoder_forward(&model.encoder, &(luna_input){ tokens[i], NULL, 16, SEGMENT, NULL }, &p);
    luna_tensor *loss = luna_cross_entropy(luna_linear(luna_classifier_pool(&model, x, p, NULL), model.projection, NULL), labels);
    luna_backward(loss);
    if (!CHECK(luna_optimizer_step(adam) == LUNA_OK, "segments: %s", luna_error(ctx))) break;
    if (step >= 110) sum += (double)luna_item(loss) / 10 / log(2);
  }
  CHECK(sum < 0.3, "what stands in the first of three segments: the loss falls to %.3f of ln 2 only", sum);
  luna_close(ctx);
}
static void check_segments(void) {
  for (int v = 0; v < 8; v += v == 0 ? 1 : 3) check_detach(v), check_carried(v); /* post-norm, pre-norm, shared, kept padding */
  check_memory_trains();
  heap_check("segments");
}

/* ---- recomputation: the same bits for less memory ---- */
enum { MODELS = 4, TARGET = 8 };
static const char *const model_names[MODELS + 1] = {"", "language model", "classifier", "masked language model", "encoder-decoder"};
/* a model of each kind with what it can take from an encoder's config */
static luna_status model_init(luna_model *m, luna_params *params, luna_model_kind kind, luna_encoder_config encoder) {
  luna_lm_config lm = {0};
  luna_classifier_config classifier = {0};
  luna_masked_lm_config masked_lm = {0};
  luna_seq2seq_config seq2seq = {0};
  m->kind = kind;
  lm.vocab = classifier.vocab = masked_lm.vocab = seq2seq.vocab = VOCAB;
  classifier.classes = 3;
  classifier.encoder = masked_lm.encoder = seq2seq.encoder = encoder;
  lm.layers = encoder.layers, lm.memory = encoder.memory, lm.layer = encoder.layer, lm.positions = encoder.positions,
  lm.max_length = encoder.max_length;
  lm.layer.dim = encoder.dim, lm.layer.heads = encoder.heads, lm.layer.ffn = encoder.ffn;
  lm.layer.convolution = lm.layer.attention == LUNA_ATTENTION_LUNA ? 4 : 0;
  if (lm.layer.sharing > LUNA_SHARING_FULL) lm.layer.sharing = LUNA_SHARING_TIED;
  return kind == LUNA_MODEL_LM           ? luna_lm_init(&m->lm, params, &lm)
         : kind == LUNA_MODEL_CLASSIFIER ? luna_classifier_init(&m->classifier, params, &classifier)
         : kind == LUNA_MODEL_MASKED_LM  ? luna_masked_lm_init(&m->masked_lm, params, &masked_lm)
                                         : luna_seq2seq_init(&m->seq2seq, params, &seq2seq);
}
/* whether there is a model `kind` like encoder variant v, and unlike the variants before it */
static bool model_exists(luna_model_kind kind, int v) {
  if (kind == LUNA_MODEL_LM) return v < 3 || v == 6 || v == 9 || v == 10;
  return kind == LUNA_MODEL_SEQ2SEQ ? v < 8 && v != 5 : true;
}
/* what the models are given: always the same */
typedef struct texts {
  int32_t tokens[BATCH * N], targets[BATCH * TARGET], labels[BATCH * N], lengths[BATCH];
} texts;
static texts texts_make(void) {
  texts t;
  for (int i = 0; i < BATCH * N; i++) t.tokens[i] = (int32_t)(common_hash(70, (uint64_t)i) % VOCAB);
  for (int i = 0; i < BATCH * TARGET; i++) t.targets[i] = (int32_t)(common_hash(71, (uint64_t)i) % VOCAB);
  for (int i = 0; i < BATCH * N; i++) t.labels[i] = (int32_t)(common_hash(72, (uint64_t)i) % 3);
  memcpy(t.lengths, lengths_of_5, sizeof t.lengths);
  return t;
}
static luna_tensor *model_logits(const luna_model *m, const texts *t) {
  switch (m->kind) {
    case LUNA_MODEL_LM: return luna_lm_forward(&m->lm, &(luna_input){ t->tokens, NULL, BATCH, N, NULL });
    case LUNA_MODEL_CLASSIFIER:
      return m->classifier.config.pair ? luna_classifier_forward_pair(&m->classifier, &(luna_input){ t->tokens, t->lengths, BATCH, N, NULL }, &(luna_input){ t->targets, NULL, BATCH, TARGET, NULL })
                                       : luna_classifier_forward(&m->classifier, &(luna_input){ t->tokens, t->lengths, BATCH, N, NULL });
    case LUNA_MODEL_MASKED_LM: return luna_masked_lm_forward(&m->masked_lm, &(luna_input){ t->tokens, t->lengths, BATCH, N, NULL });
    default: return luna_seq2seq_forward(&m->seq2seq, &(luna_input){ t->tokens, t->lengths, BATCH, N, NULL }, &(luna_input){ t->targets, NULL, BATCH, TARGET, NULL });
  }
}
/* Two accumulated steps with dropout everywhere: loss and gradients, [1 + parameters], to be freed. What the model was given is overwritten
   before luna_backward, which needs none of it. */
static float *recomputed(luna_model_kind kind, int v, luna_recompute_kind recompute, int threads, int64_t *count) {
  luna_options options = plain_options();
  luna_encoder_config encoder = encoder_config(v);
  luna_model m;
  float loss = NAN;
  options.threads = threads;
  encoder.layer.recompute = recompute;
  encoder.layer.dropout = encoder.layer.attention_dropout = encoder.layer.activation_dropout = 0.1f;
  luna_ctx *ctx = luna_open(&options);
  luna_params *params = luna_params_open(ctx);
  CHECK(model_init(&m, params, kind, encoder) == LUNA_OK, "%s: %s", model_names[kind], luna_error(ctx));
  common_params(params, 66);
  for (int step = 0; step < 2; step++) {
    texts t = texts_make();
    luna_begin_step(ctx);
    luna_tensor *y = luna_cross_entropy(model_logits(&m, &t), t.labels);
    loss = luna_item(y);
    memset(&t, 0, sizeof t);
    CHECK(luna_backward(y) == LUNA_OK, "%s, %s, recompute %d: %s", model_names[kind], encoder_names[v], recompute, luna_error(ctx));
  }
  float *gradients = all_gradients(params), *out;
  *count = 1 + luna_params_element_count(params);
  out = common_floats(*count);
  out[0] = loss;
  memcpy(out + 1, gradients, (size_t)(*count - 1) * sizeof(float));
  free(gradients);
  luna_close(ctx);
  return out;
}
static void check_recomputed(luna_model_kind kind, int v) {
  int64_t count = 0;
  float *keep = recomputed(kind, v, LUNA_RECOMPUTE_NONE, 1, &count);
  CHECK(isfinite(keep[0]) && length_of(keep + 1, count - 1) > 1e-3, "%s, %s: loss %.3f, gradients %.3g", model_names[kind],
        encoder_names[v], (double)keep[0], length_of(keep + 1, count - 1));
  for (int i = 1; i < 6; i++) { /* 1 and 3 threads; none, the feed-forward, the layer */
    float *again = recomputed(kind, v, (luna_recompute_kind)(i / 2), i % 2 ? 3 : 1, &count);
    CHECK(same_bits(again, keep, count), "%s, %s: recompute %d on %d threads: loss %.9g for %.9g, gradients off by %.3g", model_names[kind],
          encoder_names[v], i / 2, i % 2 ? 3 : 1, (double)again[0], (double)keep[0], test_error(again + 1, keep + 1, (size_t)(count - 1)));
    free(again);
  }
  free(keep);
}

/* recomputed scopes: that return an input, one tensor twice, a view, something without a gradient; scopes within scopes */
enum { BLOCKS = 8 };
static luna_tensor *odd_block(int which, luna_tensor *const *in, luna_tensor **second, bool again) {
  const luna_scope scope = again ? luna_scope_recompute(in[0]->ctx) : luna_scope_begin(in[0]->ctx);
  const int64_t flat[1] = {-1};
  luna_tensor *y = luna_dropout(luna_gelu(luna_linear(in[0], in[1], NULL)), 0.3f), *both[2] = {y, y};
  switch (which) {
    case 0: both[1] = luna_relu(y); break;
    case 1: both[1] = in[0]; break; /* an input as it came */
    case 2: both[0] = in[0]; break;
    case 3: break;                  /* one tensor twice */
    case 4:                         /* views, one of an input */
      both[0] = luna_slice(y, 0, 1, 1);
      both[1] = luna_reshape(in[0], 1, flat);
      break;
    case 5: both[1] = luna_detach(y); break; /* one without a gradient */
    case 6: {                       /* what the scope inside releases is a constant: no op makes it again */
      const luna_scope inner = luna_scope_begin(in[0]->ctx);
      y = luna_scope_end(scope, &y, 1);
      y = luna_add(y, luna_relu(luna_detach(in[0])));
      both[1] = luna_scope_end(inner, &y, 1);
      both[0] = luna_gelu(y);
      break;
    }
    default: {
      luna_tensor *deep = NULL, *mid = odd_block(0, in, &deep, true);
      both[0] = luna_linear(mid, in[1], NULL);
      both[1] = luna_add(deep, y);
    }
  }
  *second = both[1];
  return luna_scope_end(scope, both, 2);
}
static void check_blocks(void) {
  for (int which = 0; which < BLOCKS; which++) {
    const int64_t shape[2] = {DIM, DIM};
    const luna_init normal = {LUNA_INIT_NORMAL, 0.3f};
    float *got[3][4];
    for (int i = 0; i < 3; i++) { /* as it is, recomputed, in inference */
      luna_ctx *ctx = ctx_open();
      luna_params *params = luna_params_open(ctx);
      luna_tensor *in[2], *second = NULL, *y;
      in[1] = luna_param(params, "weight", 2, shape, normal);
      if (i < 2) luna_begin_step(ctx);
      else luna_begin_inference(ctx);
      in[0] = luna_require_grad(common_tensor(ctx, 73, 2, 3, DIM, 0));
      luna_tensor *x = in[0];
      in[0] = luna_scale(x, 2);
      y = odd_block(which, in, &second, i > 0);
      got[i][0] = values_of(ctx, y, "a block");
      got[i][1] = values_of(ctx, second, "a block's second result");
      if (i < 2) {
        luna_tensor *loss = luna_add(luna_add(common_loss(y, 74), common_loss(second, 75)), common_loss(in[0], 76));
        CHECK(luna_backward(loss) == LUNA_OK, "block %d: %s", which, luna_error(ctx));
        got[i][2] = gradient_of(x);
        got[i][3] = gradient_of(in[1]);
        if (i) {
          const int64_t sizes[4] = {luna_count(y), luna_count(second), luna_count(x), luna_count(in[1])};
          static const char *const parts[4] = {"result", "second result", "input's gradient", "weight's gradient"};
          for (int part = 0; part < 4; part++) /* where two gradients meet in one tensor, their sum's order may be another */
            CHECK(same_bits(got[0][part], got[1][part], sizes[part]) ||
                      (which >= 1 && which <= 3 && test_error(got[1][part], got[0][part], (size_t)sizes[part]) <= 1e-6),
                  "block %d computed again: the %s is off by %.3g", which, parts[part],
                  test_error(got[1][part], got[0][part], (size_t)sizes[part]));
        }
      }
      luna_close(ctx);
    }
    for (int i = 0; i < 3; i++)
      for (int part = 0; part < (i < 2 ? 4 : 2); part++) free(got[i][part]);
  }
}

/* ---- what training a long classifier takes, measured ---- */
typedef struct long_run {
  float loss, *gradients; /* to be freed */
  int64_t count;
} long_run;
static luna_status long_classifier(luna_ctx *ctx, int64_t dim, int64_t n, luna_recompute_kind recompute, luna_pooling pooling, long_run *out) {
  luna_classifier model;
  luna_classifier_config config = {0};
  luna_params *params = luna_params_open(ctx);
  int32_t *tokens = common_tokens(n, 77, 256), label = 1;
  config.encoder.layers = 4, config.encoder.dim = dim, config.encoder.heads = 4, config.encoder.memory = 16;
  config.encoder.layer.dropout = config.encoder.layer.attention_dropout = config.encoder.layer.activation_dropout = 0.1f;
  config.encoder.layer.recompute = recompute;
  config.pooling = pooling;
  luna_status status = params ? luna_classifier_init(&model, params, &config) : luna_ctx_status(ctx);
  for (int step = 0; step < 2 && status == LUNA_OK; step++) {
    luna_begin_step(ctx);
    luna_tensor *loss = luna_cross_entropy(luna_classifier_forward(&model, &(luna_input){ tokens, NULL, 1, n, NULL }), &label);
    luna_backward(loss);
    status = luna_ctx_status(ctx);
    if (out && status == LUNA_OK) out->loss = luna_item(loss);
  }
  if (out) out->count = luna_params_element_count(params), out->gradients = status == LUNA_OK ? all_gradients(params) : NULL;
  free(tokens);
  return status;
}
/* long enough for each of three threads to have its share */
static void check_recomputed_long(void) {
  long_run first = {0, NULL, 0};
  for (int i = 0; i < 6; i++) {
    luna_options options = plain_options();
    long_run now = {NAN, NULL, 0};
    options.threads = i % 2 ? 3 : 1;
    luna_ctx *ctx = luna_open(&options);
    CHECK(long_classifier(ctx, 64, 1500, (luna_recompute_kind)(i / 2), LUNA_POOLING_MEAN, &now) == LUNA_OK, "recompute %d: %s", i / 2, luna_error(ctx));
    luna_close(ctx);
    if (i == 0) first = now;
    CHECK(same_bits(&now.loss, &first.loss, 1) && same_bits(now.gradients, first.gradients, first.count),
          "1500 tokens, recompute %d on %d threads: other bits", i / 2, options.threads);
    if (i) free(now.gradients);
  }
  free(first.gradients);
}
static size_t measured(int64_t dim, int64_t n, luna_recompute_kind recompute, luna_pooling pooling) {
  luna_options options = plain_options();
  options.measure = true;
  heap_most = heap_live;
  luna_ctx *ctx = luna_open(&options);
  CHECK(long_classifier(ctx, dim, n, recompute, pooling, NULL) == LUNA_OK, "measuring: %s", luna_error(ctx));
  CHECK(heap_most <= 4 << 20, "measuring what takes %zu bytes takes %lld itself", luna_memory(ctx).peak, (long long)heap_most);
  const size_t peak = luna_memory(ctx).peak;
  luna_close(ctx);
  return peak;
}
/* measured first: 0.439 and 0.440 of 29 floats a token and dimension (64 dimensions: 0.512 of 33); 0.470 to 0.509, for of four layers one is always whole. Less is kept than
   before either was there: gradients and norms go as soon as they can (it was 8806 MiB in 256 dimensions). */
static void check_savings(void) {
  for (int64_t dim = 64; dim <= 256; dim *= 2) {
    const double keep = (double)measured(dim, 65536, LUNA_RECOMPUTE_NONE, LUNA_POOLING_MEAN), ffn = (double)measured(dim, 65536, LUNA_RECOMPUTE_FFN, LUNA_POOLING_MEAN) / keep,
                 layer = (double)measured(dim, 65536, LUNA_RECOMPUTE_LAYER, LUNA_POOLING_MEAN) / keep;
    printf(
        "models: training on 65536 tokens in %d dimensions takes %.0f MiB; recomputing the feed-forwards %.3f of that, the layers %.3f\n",
        (int)dim, keep / 1048576, ffn, layer);
    CHECK(keep <= (double)(dim * 65536 * 4) * (dim == 64 ? 36 : 31) && ffn <= (dim == 64 ? 0.54 : 0.46), "%d dimensions: recomputing the feed-forwards takes %.3f of the memory", (int)dim, ffn);
    CHECK(layer <= 0.53, "%d dimensions: recomputing the layers takes %.3f of the memory", (int)dim, layer);
  }
}
static void check_measured_block(luna_recompute_kind recompute, luna_pooling pooling) {
  const size_t need = measured(32, 300, recompute, pooling);
  luna_options options = plain_options();
  long_run expected = {NAN, NULL, 0}, got = expected;
  luna_ctx *ctx = luna_open(&options);
  CHECK(long_classifier(ctx, 32, 300, recompute, pooling, &expected) == LUNA_OK, "%s", luna_error(ctx));
  CHECK(luna_memory(ctx).peak == need, "recompute %d: measured %zu bytes, taken are %zu", recompute, need, luna_memory(ctx).peak);
  luna_close(ctx);
  options.allocator.allocate = NULL, options.allocator.release = NULL;
  options.block = common_alloc(need + 64);
  for (int less = 0; less < 2; less++) {
    options.block_size = need - (less ? 64 : 0);
    ctx = luna_open(&options);
    const luna_status status = ctx ? long_classifier(ctx, 32, 300, recompute, pooling, &got) : LUNA_OUT_OF_MEMORY;
    if (!less)
      CHECK(status == LUNA_OK && same_bits(got.gradients, expected.gradients, expected.count),
            "recompute %d: a block of the %zu bytes measured: %s", recompute, need, luna_error(ctx));
    else
      CHECK(status == LUNA_OUT_OF_MEMORY && luna_error(ctx)[0], "recompute %d: 64 bytes less than measured: %s, \"%s\"", recompute,
            luna_status_text(status), luna_error(ctx));
    luna_close(ctx);
    free(got.gradients);
  }
  free(expected.gradients), free(options.block);
}
static void check_recomputing(void) {
  for (luna_model_kind kind = LUNA_MODEL_LM; kind <= LUNA_MODEL_SEQ2SEQ; kind = (luna_model_kind)(kind + 1))
    for (int v = 0; v < ENCODERS; v++)
      if (model_exists(kind, v)) check_recomputed(kind, v);
  check_recomputed_long();
  check_blocks();
  for (int i = 0; i < 6; i++) check_measured_block((luna_recompute_kind)(i / 2), i % 2 ? LUNA_POOLING_MEMORY : LUNA_POOLING_MEAN);
  check_savings();
  heap_check("recomputation");
}

/* ---- what nobody reads is not computed: X of the last layer where P is pooled, the last P where X alone is read ---- */
static int64_t op_calls[LUNA_OP_COUNT];
static luna_status counted_forward(luna_op *op) {
  op_calls[op->kind]++;
  return luna_cpu_backend()->op[op->kind].forward(op);
}
static luna_backend counted_backend(void) {
  luna_backend backend = *luna_cpu_backend();
  for (int i = 0; i < LUNA_OP_COUNT; i++) backend.op[i].forward = counted_forward;
  return backend;
}
/* logits by luna_classifier_forward, or by hand from all that luna_encoder_forward computes */
static luna_tensor *unread_features(const luna_classifier *model, const luna_input *input) {
  luna_tensor *p = NULL;
  luna_encoder_forward(&model->encoder, input, &p);
  return luna_classifier_pool(model, NULL, p, input->lengths);
}
static luna_tensor *unread_logits(const luna_classifier *model, const texts *t, bool by_hand) {
  const luna_input first = {t->tokens, t->lengths, BATCH, N, NULL}, second = {t->targets, NULL, BATCH, TARGET, NULL};
  luna_tensor *part[4];
  if (!by_hand)
    return model->config.pair ? luna_classifier_forward_pair(model, &first, &second) : luna_classifier_forward(model, &first);
  part[0] = unread_features(model, &first);
  if (model->config.pair) {
    part[1] = unread_features(model, &second);
    part[2] = luna_mul(part[0], part[1]);
    part[3] = luna_add(part[0], luna_scale(part[1], -1));
    part[0] = luna_concat(part, 4, 1);
  }
  return luna_linear(part[0], model->projection, NULL);
}
/* whether P alone does not need this parameter */
static bool is_unread(const char *name, const luna_encoder_config *c) {
  static const char *const rest[] = {"self_attn.q_proj.", "self_attn.k_proj.", "self_attn.v_proj.", "self_attn.c_proj.",
                                     "self_attn.out_proj.", "fc1.", "fc2.", "final_layer_norm."};
  char last[40];
  snprintf(last, sizeof last, "encoder.layers.%d.", (int)(c->tied_layers ? 0 : c->layers - 1));
  if (strncmp(name, "encoder.layer_norm.", 19) == 0) return true;
  if (strncmp(name, last, strlen(last)) != 0) /* a memory of its own: nothing reads P' of the layer before */
    return c->own_memory && !c->layer.pre_norm && strstr(name, "self_atten_proj_layer_norm.");
  if (c->tied_layers && c->layers > 1) return false;
  name += strlen(last);
  if (!c->layer.pre_norm && strncmp(name, "self_attn_layer_norm.", 21) == 0) return true;
  for (size_t i = 0; i < sizeof rest / sizeof *rest; i++)
    if (strncmp(name, rest[i], strlen(rest[i])) == 0) return true;
  return false;
}
typedef struct unread {
  luna_ctx *ctx;
  luna_params *params;
  luna_classifier model;
  luna_backend backend;
  texts t;
} unread;
static void unread_open(unread *u, luna_encoder_config encoder, luna_pooling pooling, bool pair, luna_form form) {
  luna_options options = plain_options();
  luna_classifier_config config = {0};
  config.vocab = VOCAB, config.classes = 3, config.pooling = pooling, config.pair = pair, config.encoder = encoder;
  u->backend = counted_backend();
  u->t = texts_make();
  options.form = form, options.backend = &u->backend;
  u->ctx = luna_open(&options);
  u->params = luna_params_open(u->ctx);
  CHECK(luna_classifier_init(&u->model, u->params, &config) == LUNA_OK, "%s", luna_error(u->ctx));
  common_params(u->params, 61);
}
static luna_optimizer *unread_optimizer(luna_params *params, int kind) {
  const luna_optimizer_config sgd = {.lr = 0.01f, .momentum = 0.9f, .weight_decay = 0.1f, .clip = 1};
  const luna_optimizer_config adam = {.lr = 0.01f, .weight_decay = 0.1f, .clip = 1};
  const luna_optimizer_config apollo = {.weight_decay = 0.1f, .clip = 1};
  const luna_param_group group = {.name = "layers.", .lr = 2, .weight_decay = 0.2f};
  luna_optimizer *o = kind == 0 ? luna_sgd(params, &sgd) : kind == 1 ? luna_adam(params, &adam) : kind == 2 ? luna_adamw(params, &adam) : luna_apollo(params, &apollo);
  CHECK(luna_optimizer_group(o, &group) == LUNA_OK, "a group that decays what has no gradient");
  return o;
}
/* the same bits as by hand, fewer ops and bytes; what has no gradient stays as it is */
static void check_unread(int v, luna_recompute_kind recompute, luna_form form, bool pair, luna_pooling pooling) {
  luna_encoder_config encoder = encoder_config(v);
  int64_t calls[2][LUNA_OP_COUNT];
  size_t peak[2];
  float *logits[2], *gradients[2];
  unread u[2];
  encoder.layer.recompute = recompute;
  for (int hand = 0; hand < 2; hand++) {
    unread_open(&u[hand], encoder, pooling, pair, form);
    luna_begin_inference(u[hand].ctx);
    memset(op_calls, 0, sizeof op_calls);
    logits[hand] = values_of(u[hand].ctx, unread_logits(&u[hand].model, &u[hand].t, hand), "logits");
    memcpy(calls[hand], op_calls, sizeof op_calls);
    luna_begin_step(u[hand].ctx);
    CHECK(luna_backward(luna_cross_entropy(unread_logits(&u[hand].model, &u[hand].t, hand), u[hand].t.labels)) == LUNA_OK, "%s",
          luna_error(u[hand].ctx));
    gradients[hand] = all_gradients(u[hand].params);
    peak[hand] = luna_memory(u[hand].ctx).peak;
  }
  const int64_t count = luna_params_element_count(u->params), times = pair ? 2 : 1;
  CHECK(same_bits(logits[0], logits[1], BATCH * 3), "%s, pair %d: other logits than by hand", encoder_names[v], pair);
  CHECK(same_bits(gradients[0], gradients[1], count), "%s, pair %d, recompute %d: other gradients than by hand", encoder_names[v], pair, recompute);
  CHECK(peak[0] < peak[1] || (recompute == LUNA_RECOMPUTE_LAYER && peak[0] == peak[1]), "%s, pair %d, recompute %d: the peak is %zu bytes, with X computed %zu",
        encoder_names[v], pair, recompute, peak[0], peak[1]);
  CHECK(calls[0][LUNA_OP_FEED_FORWARD] == times * (encoder.layers - 1) && calls[1][LUNA_OP_FEED_FORWARD] == times * encoder.layers,
        "%s, pair %d: %d feed-forwards, by hand %d", encoder_names[v], pair, (int)calls[0][LUNA_OP_FEED_FORWARD], (int)calls[1][LUNA_OP_FEED_FORWARD]);
  if (form == LUNA_FORM_FOLDED)
    CHECK(calls[0][LUNA_OP_UNPACK] == times * (encoder.layers - 1) && calls[1][LUNA_OP_UNPACK] == times * encoder.layers && calls[0][LUNA_OP_PACK] == times * encoder.layers,
          "%s, pair %d: %d unpacks, by hand %d", encoder_names[v], pair, (int)calls[0][LUNA_OP_UNPACK], (int)calls[1][LUNA_OP_UNPACK]);
  for (int64_t i = 0; i < luna_params_tensor_count(u->params); i++) {
    const char *name;
    const luna_tensor *p = luna_params_at(u->params, i, &name);
    CHECK(!p->grad == !luna_params_at(u[1].params, i, NULL)->grad && (!p->grad || !is_unread(name, &encoder)), "%s, pair %d: %s has a gradient",
          encoder_names[v], pair, name);
  }
  for (int hand = 0; hand < 2; hand++) luna_close(u[hand].ctx), free(logits[hand]), free(gradients[hand]);
}
static void check_unread_trained(int v, int kind) {
  unread u;
  unread_open(&u, encoder_config(v), LUNA_POOLING_DEFAULT, false, LUNA_FORM_CHEAPEST);
  luna_optimizer *optimizer = unread_optimizer(u.params, kind);
  float *before = common_parameters(u.params), *at = before;
  double norm = NAN;
  for (int step = 0; step < 3; step++) {
    luna_begin_step(u.ctx);
    luna_backward(luna_cross_entropy(unread_logits(&u.model, &u.t, false), u.t.labels));
    float *gradients = all_gradients(u.params);
    norm = length_of(gradients, luna_params_element_count(u.params));
    free(gradients);
    CHECK(luna_optimizer_step(optimizer) == LUNA_OK, "%s", luna_error(u.ctx));
    CHECK(fabs((double)luna_optimizer_norm(optimizer) - norm) <= 1e-5 * norm, "%s: the norm is %.7g, of the gradients %.7g", encoder_names[v],
          (double)luna_optimizer_norm(optimizer), norm);
  }
  for (int64_t i = 0; i < luna_params_tensor_count(u.params); at += luna_count(luna_params_at(u.params, i++, NULL))) {
    const char *name;
    const luna_tensor *p = luna_params_at(u.params, i, &name);
    const bool same = same_bits(p->data, at, luna_count(p));
    CHECK(p->grad ? !same : same, "%s, optimiser %d: %s, %s a gradient, is %schanged", encoder_names[v], kind, name, p->grad ? "with" : "without", same ? "un" : "");
    CHECK(!is_unread(name, &u.model.config.encoder) || !p->grad, "%s, optimiser %d: %s has a gradient", encoder_names[v], kind, name);
  }
  free(before);
  luna_close(u.ctx);
}
/* post-norm layers: three norms each, a decoder's four; the last P' of each model below has no reader */
static void check_unread_memory(luna_recompute_kind recompute) {
  static const luna_model_kind kinds[] = {LUNA_MODEL_CLASSIFIER, LUNA_MODEL_MASKED_LM, LUNA_MODEL_SEQ2SEQ};
  for (int i = 0; i < 4; i++) {        /* the fourth: own memories, where no P' has a reader */
    const luna_model_kind kind = kinds[i % 3];
    const int norms = i == 0 ? 3 * 2 - 1 : i == 1 ? 3 * 2 - 1 + 1 : i == 2 ? 3 * 2 + 4 * 2 - 1 : 2 * 2;
    luna_options options = plain_options();
    const luna_backend backend = counted_backend();
    luna_encoder_config encoder = encoder_config(i == 3 ? 5 : 0);
    const texts t = texts_make();
    luna_model m;
    options.backend = &backend;
    encoder.layer.recompute = recompute;
    luna_ctx *ctx = luna_open(&options);
    luna_params *params = luna_params_open(ctx);
    CHECK(model_init(&m, params, kind, encoder) == LUNA_OK, "%s", luna_error(ctx));
    if (kind == LUNA_MODEL_CLASSIFIER) m.classifier.config.pooling = LUNA_POOLING_MEAN;
    for (int training = 0; training < 2; training++) {
      if (training) luna_begin_step(ctx);
      else luna_begin_inference(ctx);
      memset(op_calls, 0, sizeof op_calls);
      const bool good = model_logits(&m, &t) != NULL;
      CHECK(good && op_calls[LUNA_OP_LAYER_NORM] == norms, "%s, own memory %d, training %d: %d norms for %d", model_names[kind], i == 3,
            training, (int)op_calls[LUNA_OP_LAYER_NORM], norms);
    }
    luna_close(ctx);
  }
}
/* what the manual says of the default classifier with one layer; pooling without an X, and without what is pooled */
static void check_unread_default(void) {
  luna_ctx *ctx = ctx_open();
  luna_params *params = luna_params_open(ctx);
  luna_classifier model;
  luna_classifier_config config = {0};
  const int32_t tokens[3] = {1, 2, 3}, label = 1;
  int64_t unread = 0;
  config.encoder.layers = 1;
  CHECK(luna_classifier_init(&model, params, &config) == LUNA_OK, "%s", luna_error(ctx));
  luna_begin_step(ctx);
  luna_backward(luna_cross_entropy(luna_classifier_forward(&model, &(luna_input){ tokens, NULL, 1, 3, NULL }), &label));
  for (int64_t i = 0; i < luna_params_tensor_count(params); i++) {
    const luna_tensor *p = luna_params_at(params, i, NULL);
    unread += p->grad ? 0 : luna_count(p);
  }
  CHECK(unread == 181760 && luna_params_element_count(params) == 250112, "%d of %d parameters have no gradient", (int)unread, (int)luna_params_element_count(params));
  luna_begin_inference(ctx);
  luna_tensor *x = common_tensor(ctx, 1, 1, 3, 128, 0), *p = common_tensor(ctx, 2, 1, 3, 128, 0);
  CHECK(luna_classifier_pool(&model, NULL, p, NULL) && luna_ctx_status(ctx) == LUNA_OK, "pooling P takes an X: %s", luna_error(ctx));
  refused(ctx, !luna_classifier_pool(&model, x, NULL, NULL), NULL_ARGUMENT, "pooling P without one");
  refused(ctx, !luna_classifier_pool(&model, NULL, NULL, NULL), NULL_ARGUMENT, "pooling nothing");
  x = common_tensor(ctx, 1, 3, 128, 0, 0);
  refused(ctx, !luna_classifier_pool(&model, NULL, x, NULL), SEQUENCE_SHAPE, "pooling a P without a batch");
  model.config.pooling = LUNA_POOLING_MEAN;
  p = common_tensor(ctx, 2, 1, 3, 128, 0);
  refused(ctx, !luna_classifier_pool(&model, NULL, p, NULL), NULL_ARGUMENT, "pooling X without one");
  luna_close(ctx);
}
static void check_unread_all(void) {
  for (int v = 0; v < ENCODERS && has_memory(v); v++) {
    for (luna_recompute_kind recompute = LUNA_RECOMPUTE_NONE; recompute <= LUNA_RECOMPUTE_LAYER; recompute = (luna_recompute_kind)(recompute + 1))
      for (int i = 0; i < 4; i++)
        check_unread(v, recompute, i % 2 ? LUNA_FORM_FOLDED : LUNA_FORM_UNFOLDED, i / 2, i / 2 ? LUNA_POOLING_MEMORY_BATCH : LUNA_POOLING_DEFAULT);
    for (int kind = 0; kind < 4; kind++) check_unread_trained(v, kind);
  }
  check_unread_memory(LUNA_RECOMPUTE_NONE);
  check_unread_memory(LUNA_RECOMPUTE_LAYER);
  check_unread_default();
  heap_check("what nobody reads");
}

/* ---- encoder-decoder: the stream against luna_seq2seq_forward ---- */
enum { SOURCE = 9, STEPS = 12, MOST_BEAM = 4 };
typedef struct translator {
  luna_ctx *ctx;
  luna_params *params;
  luna_seq2seq model;
} translator;
static bool translator_open(translator *t, const luna_seq2seq_config *config, uint64_t seed) {
  t->ctx = ctx_open();
  t->params = luna_params_open(t->ctx);
  if (!CHECK(luna_seq2seq_init(&t->model, t->params, config) == LUNA_OK, "luna_seq2seq_init: %s", luna_error(t->ctx))) return false;
  common_params(t->params, seed);
  return true;
}
static luna_seq2seq_config translator_config(int v) { /* bits: pre-norm, full sharing, learned positions, large memory */
  luna_seq2seq_config c = {0};
  c.vocab = VOCAB, c.target_vocab = v % 3 == 0 ? VOCAB : 8, c.share_embeddings = v % 3 == 0, c.separate_output = v % 3 == 1;
  c.decoder_layers = v % 5 == 4 ? 3 : 0;
  c.encoder.layers = 2, c.encoder.dim = DIM, c.encoder.heads = 3, c.encoder.ffn = 20;
  c.encoder.memory = v & 8 ? 8 : 3; /* of a layer 3 heads x 3 slots are folded into the scores, 3 x 8 > 12 + 8 are not */
  c.encoder.layer.pre_norm = v & 1, c.encoder.layer.sharing = v & 2 ? LUNA_SHARING_FULL : LUNA_SHARING_TIED;
  c.encoder.layer.omega = v == 5 ? LUNA_ACTIVATION_ELU1 : v == 10 ? LUNA_ACTIVATION_SOFTPLUS : LUNA_ACTIVATION_NONE;
  c.encoder.layer.activation = v == 3 ? LUNA_ACTIVATION_GELU : LUNA_ACTIVATION_NONE;
  c.encoder.positions = v & 4 ? LUNA_POSITIONS_LEARNED : v == 1 ? LUNA_POSITIONS_NONE : LUNA_POSITIONS_SINUSOIDAL;
  c.encoder.first_position = v == 2 || v == 4 ? 2 : 0;
  c.encoder.max_length = 16, c.max_target_length = STEPS;
  c.encoder.keep_padding = v == 6, c.encoder.norm_embedding = v == 6;
  return c;
}
/* logits of targets [rows, m] of sources repeated `beam` times, [rows, m, vocab], to be freed */
static float *teacher(translator *t, const int32_t *source, const int32_t *lengths, int64_t batch, int64_t n, int64_t beam,
                      const int32_t *target, int64_t m) {
  int32_t *repeated = (int32_t *)common_alloc((size_t)(batch * beam * n) * sizeof(int32_t)), repeated_lengths[32];
  for (int64_t i = 0; i < batch * beam; i++) {
    memcpy(repeated + i * n, source + i / beam * n, (size_t)n * sizeof(int32_t));
    repeated_lengths[i] = lengths ? lengths[i / beam] : 0;
  }
  luna_begin_inference(t->ctx);
  float *out =
      values_of(t->ctx, luna_seq2seq_forward(&t->model, &(luna_input){ repeated, lengths ? repeated_lengths : NULL, batch * beam, n, NULL }, &(luna_input){ target, NULL, batch * beam, m, NULL }),
                "luna_seq2seq_forward");
  free(repeated);
  return out;
}
static void check_decoder_stream(int v, int64_t beam, bool with_lengths) {
  enum { SOURCES_3 = 3, MOST_ROWS = 3 * MOST_BEAM };
  static const int32_t source_lengths[SOURCES_3] = {5, 1, SOURCE};
  const int32_t *lengths = with_lengths ? source_lengths : NULL;
  const luna_seq2seq_config config = translator_config(v);
  const int64_t rows = SOURCES_3 * beam, vocab = config.target_vocab;
  translator t;
  char what[120];
  int32_t now[MOST_ROWS], from[MOST_ROWS];
  if (translator_open(&t, &config, 80)) {
    int32_t *source = common_tokens(SOURCES_3 * SOURCE, 81, VOCAB), *target = common_tokens(rows * STEPS, 82, (int32_t)vocab),
            moved[MOST_ROWS * STEPS];
    luna_stream *s = luna_seq2seq_stream_open(&t.model, &(luna_input){ source, lengths, SOURCES_3, SOURCE, NULL }, beam);
    float *got = common_floats(rows * STEPS * vocab);
    if (CHECK(s != NULL, "luna_seq2seq_stream_open: %s", luna_error(t.ctx))) {
      for (int part = 0; part < 2; part++) { /* as it is; with the sequences of each source changing places at every third step */
        luna_stream_reset(s);
        if (part) CHECK(luna_stream_prefill(s, &(luna_input){ target, NULL, 0, 1, NULL }) != NULL, "prefill: %s", luna_stream_error(s)), luna_stream_reset(s);
        CHECK(luna_stream_position(s) == 0, "a stream that was reset is at %d", (int)luna_stream_position(s));
        for (int64_t step = 0; step < STEPS; step++) {
          for (int64_t i = 0; i < rows; i++) now[i] = target[i * STEPS + step];
          const float *logits = luna_stream_step(s, now);
          if (!CHECK(logits != NULL, "step %d: %s", (int)step, luna_stream_error(s))) break;
          for (int64_t i = 0; i < rows; i++) memcpy(got + (i * STEPS + step) * vocab, logits + i * vocab, (size_t)vocab * sizeof(float));
          if (!part || step % 3 != 2) continue;
          for (int64_t i = 0; i < rows; i++)
            from[i] = (int32_t)(i / beam * beam + (int64_t)(common_hash(83, (uint64_t)(i + step)) % (uint64_t)beam));
          CHECK(luna_stream_reorder(s, from) == LUNA_OK, "luna_stream_reorder: %s", luna_stream_error(s));
          float *row =
              common_floats(rows * STEPS * vocab); /* what was read and given so far moves with them; what comes is each place's own */
          memcpy(row, got, (size_t)(rows * STEPS * vocab) * sizeof(float)), memcpy(moved, target, (size_t)(rows * STEPS) * sizeof(int32_t));
          for (int64_t i = 0; i < rows; i++) {
            memcpy(got + i * STEPS * vocab, row + from[i] * STEPS * vocab, (size_t)((step + 1) * vocab) * sizeof(float));
            memcpy(target + i * STEPS, moved + from[i] * STEPS, (size_t)(step + 1) * sizeof(int32_t));
          }
          free(row);
        }
        float *expected = teacher(&t, source, lengths, SOURCES_3, SOURCE, beam, target, STEPS);
        for (int64_t step = 0; step < STEPS; step++) {
          float a[MOST_ROWS * VOCAB], b[MOST_ROWS * VOCAB];
          for (int64_t i = 0; i < rows; i++) {
            memcpy(a + i * vocab, got + (i * STEPS + step) * vocab, (size_t)vocab * sizeof(float));
            memcpy(b + i * vocab, expected + (i * STEPS + step) * vocab, (size_t)vocab * sizeof(float));
          }
          snprintf(what, sizeof what, "model %d, beam %d%s%s: step %d against luna_seq2seq_forward", v, (int)beam,
                   with_lengths ? ", lengths" : "", part ? ", reordered" : "", (int)step);
          test_close(what, a, b, (size_t)(rows * vocab), 2e-6);
        }
        free(expected);
      }
      if (config.encoder.positions == LUNA_POSITIONS_LEARNED)
        CHECK(!luna_stream_step(s, now) && luna_stream_error_id(s) == LUNA_ERROR_STREAM_POSITIONS,
            "step %d of %d learned positions: \"%s\"", STEPS,
              STEPS, luna_stream_error(s));
      else CHECK(luna_stream_step(s, now) != NULL, "step %d: %s", STEPS, luna_stream_error(s));
      now[0] = (int32_t)vocab;
      CHECK(!luna_stream_step(s, now) && luna_stream_error(s)[0], "a token beyond the target's vocabulary is taken");
      luna_stream_close(s);
    }
    free(source), free(target), free(got);
  }
  luna_close(t.ctx);
}
/* a decoder's state saved, loaded and copied goes on with the same bits, in a stream of the same sources */
static void check_decoder_state(void) {
  enum { TWO = 2, AT = 5 };
  const luna_seq2seq_config config = translator_config(9);
  translator t;
  if (translator_open(&t, &config, 120)) {
    int32_t *source = common_tokens(TWO * SOURCE, 121, VOCAB), *target = common_tokens(TWO * STEPS, 122, VOCAB);
    luna_stream *s[3];
    float kept[TWO * VOCAB];
    for (int i = 0; i < 3; i++) s[i] = luna_seq2seq_stream_open(&t.model, &(luna_input){ source, NULL, TWO, SOURCE, NULL }, 1);
    if (CHECK(s[0] && s[1] && s[2], "luna_seq2seq_stream_open: %s", luna_error(t.ctx))) {
      const size_t size = luna_stream_state_size(s[0]);
      void *state = common_alloc(size);
      for (int step = 0; step < AT; step++) luna_stream_step(s[0], target + TWO * step);
      luna_stream_step(s[1], target + 1);
      CHECK(luna_stream_state_save(s[0], state, size) == LUNA_OK && luna_stream_state_load(s[1], state, size) == LUNA_OK &&
                luna_stream_copy(s[2], s[0]) == LUNA_OK,
            "%s%s", luna_stream_error(s[1]), luna_stream_error(s[2]));
      for (int step = AT; step < STEPS; step++) {
        memcpy(kept, luna_stream_step(s[0], target + TWO * step), sizeof kept);
        for (int i = 1; i < 3; i++)
          CHECK(same_bits(luna_stream_step(s[i], target + TWO * step), kept, TWO * config.target_vocab),
                "a decoder's state that was %s goes on with other bits", i == 1 ? "saved and loaded" : "copied");
      }
      free(state);
    }
    for (int i = 0; i < 3; i++) luna_stream_close(s[i]);
    free(source), free(target);
  }
  luna_close(t.ctx);
}
/* rows that are padding in a target change nothing before them, and forward's own bounds */
static void check_seq2seq_forward(void) {
  static const int32_t source_lengths[2] = {5, SOURCE}, target_lengths[2] = {3, 6};
  const luna_seq2seq_config config = translator_config(4);
  translator t;
  if (translator_open(&t, &config, 84)) {
    int32_t *source = common_tokens(2 * SOURCE, 85, VOCAB), *target = common_tokens(2 * STEPS, 86, 8);
    luna_begin_inference(t.ctx);
    float *all = values_of(t.ctx, luna_seq2seq_forward(&t.model, &(luna_input){ source, source_lengths, 2, SOURCE, NULL }, &(luna_input){ target, NULL, 2, 6, NULL }), "logits"),
          *some = values_of(t.ctx, luna_seq2seq_forward(&t.model, &(luna_input){ source, source_lengths, 2, SOURCE, NULL }, &(luna_input){ target, target_lengths, 2, 6, NULL }), "logits");
    for (int b = 0; b < 2; b++)
      CHECK(same_bits(all + b * 6 * 8, some + b * 6 * 8, target_lengths[b] * 8), "target %d: its length changes what is before its end", b);
    CHECK(!same_bits(all + 3 * 8, some + 3 * 8, 8), "a padded place of a target is read");
    luna_tensor *longest = luna_seq2seq_forward(&t.model, &(luna_input){ source, source_lengths, 2, SOURCE, NULL }, &(luna_input){ target, NULL, 2, STEPS, NULL });
    CHECK(longest != NULL, "%d places: %s", STEPS, luna_error(t.ctx));
    refused(t.ctx, !luna_seq2seq_forward(&t.model, &(luna_input){ source, source_lengths, 1, SOURCE, NULL },
        &(luna_input){ target, NULL, 1, STEPS + 1, NULL }), MAX_LENGTH,
            "a target longer than its learned positions");
    free(source), free(target), free(all), free(some);
  }
  luna_close(t.ctx);
}

/* ---- searches: against the same rules in the plainest form, over luna_seq2seq_forward ---- */
enum { MAX = 9, BEGIN = 1, END = 2 };
typedef struct hypothesis {
  int32_t tokens[MAX + 2]; /* from BEGIN */
  int64_t length;           /* without BEGIN */
  double score;
} hypothesis;
/* log-probabilities of what comes after h */
static void next_of(translator *t, const int32_t *source, int64_t n, const hypothesis *h, double *out) {
  const int64_t vocab = t->model.config.target_vocab;
  float *logits = teacher(t, source, NULL, 1, n, 1, h->tokens, h->length + 1);
  const float *last = logits + h->length * vocab;
  double sum = 0;
  for (int64_t i = 0; i < vocab; i++) sum += exp((double)last[i] - (double)last[0]);
  for (int64_t i = 0; i < vocab; i++) out[i] = (double)last[i] - (double)last[0] - log(sum);
  free(logits);
}
static double final_score(double score, int64_t length, double penalty) { return score / pow((double)(length + 1), penalty); }
static int better(const void *a, const void *b) {
  const double x = ((const hypothesis *)a)->score, y = ((const hypothesis *)b)->score;
  return x > y ? -1 : x < y;
}
/* The best finished hypothesis, its score final. Of all continuations the 2 beam best are looked at; ends among the first `beam` are
   results, the first `beam` others go on. */
static hypothesis naive_search(translator *t, const int32_t *source, int64_t n, int64_t beam, int64_t max, double penalty,
                               bool exhaustive) {
  const int64_t vocab = t->model.config.target_vocab;
  hypothesis *live = (hypothesis *)common_alloc((size_t)beam * sizeof *live),
             *all = (hypothesis *)common_alloc((size_t)(beam * vocab) * sizeof *all), best;
  int64_t count = 1, results = 0;
  double *next = (double *)common_alloc((size_t)vocab * sizeof *next);
  memset(&best, 0, sizeof best);
  best.score = -INFINITY;
  live[0].tokens[0] = BEGIN;
  for (int64_t length = 0; length <= max && count > 0; length++) {
    int64_t candidates = 0;
    for (int64_t i = 0; i < count; i++) {
      next_of(t, source, n, &live[i], next);
      for (int32_t token = 0; token < vocab; token++) {
        if (length == max && token != END) continue;
        all[candidates] = live[i];
        all[candidates].tokens[length + 1] = token;
        all[candidates].score += next[token];
        all[candidates++].length++;
      }
    }
    qsort(all, (size_t)candidates, sizeof *all, better);
    count = 0;
    for (int64_t i = 0; i < candidates && i < 2 * beam && count < beam; i++) {
      if (all[i].tokens[length + 1] != END) live[count++] = all[i];
      else if (i < beam) {
        results++;
        all[i].score = final_score(all[i].score, length, penalty);
        if (all[i].score > best.score) best = all[i];
      }
    }
    if (!exhaustive && results >= beam) break;
    if (exhaustive && results && count && final_score(live[0].score, max, penalty) <= best.score) break;
  }
  best.length--; /* without END */
  free(live), free(all), free(next);
  return best;
}
static void check_result(const char *what, const int32_t *out, int32_t length, float score, const hypothesis *expected) {
  bool same = length == expected->length;
  for (int64_t i = 0; same && i < expected->length; i++) same = out[i] == expected->tokens[i + 1];
  CHECK(same, "%s: %d tokens, %d %d %d ..., and not %d, %d %d %d ...", what, (int)length, (int)out[0], (int)out[1], (int)out[2],
        (int)expected->length, (int)expected->tokens[1], (int)expected->tokens[2], (int)expected->tokens[3]);
  CHECK(fabs((double)score - expected->score) <= 1e-5 * (1 + fabs(expected->score)), "%s: the score is %.7g, and not %.7g", what,
        (double)score, expected->score);
}
static double penalty_of(float length_penalty) { return length_penalty == 0 ? 1 : length_penalty < 0 ? 0 : (double)length_penalty; }

static void check_searches(int v, uint64_t seed) {
  static const float penalties[] = {0, -1, 0.6f, 2};
  static const int64_t beams[] = {1, 2, 4, 8};
  const luna_seq2seq_config config = translator_config(v);
  translator t;
  char what[120];
  if (translator_open(&t, &config, seed)) {
    int32_t *source = common_tokens(SOURCE, seed, VOCAB), out[MAX], length = -1;
    float score = NAN;
    for (int i = 0; i < 4; i++)
      for (int j = 0; j < 4; j++)
        for (int exhaustive = 0; exhaustive < 2; exhaustive++) {
          luna_beam_config search = {0};
          if (exhaustive && i == 0 && j > 0) continue; /* greedy with an exhaustive search: once */
          search.begin = BEGIN, search.end = END, search.beam = beams[i], search.max_length = MAX, search.length_penalty = penalties[j],
          search.exhaustive = exhaustive;
          if (i == 0 && j == 1) search.beam = 0; /* the default */
          memset(out, 0, sizeof out);
          snprintf(what, sizeof what, "model %d, beam %d, penalty %g%s", v, (int)beams[i], (double)penalties[j],
                   exhaustive ? ", exhaustive" : "");
          CHECK(luna_seq2seq_generate(&t.model, &search, &(luna_input){ source, NULL, 1, SOURCE, NULL }, out, &length, &score) == LUNA_OK, "%s: %s", what,
                luna_error(t.ctx));
          hypothesis expected = naive_search(&t, source, SOURCE, beams[i], MAX, penalty_of(penalties[j]), exhaustive);
          check_result(what, out, length, score, &expected);
        }
    free(source);
  }
  luna_close(t.ctx);
}
/* greedy: the likeliest token, step by step, until END or `most` tokens */
static void check_greedy(int v) {
  const luna_seq2seq_config config = translator_config(v);
  translator t;
  if (translator_open(&t, &config, 87)) {
    for (uint64_t seed = 0; seed < 6; seed++) {
      int32_t *source = common_tokens(SOURCE, 88 + seed, VOCAB), out[MAX], length = -1;
      luna_beam_config search = {0};
      hypothesis h;
      double next[VOCAB], ended = -1;
      memset(&h, 0, sizeof h);
      h.tokens[0] = BEGIN;
      for (; h.length < MAX && ended < 0; h.length++) {
        int32_t likeliest = 0;
        next_of(&t, source, SOURCE, &h, next);
        for (int32_t i = 1; i < config.target_vocab; i++) likeliest = next[i] > next[likeliest] ? i : likeliest;
        h.tokens[h.length + 1] = likeliest;
        if (likeliest == END) ended = (double)h.length;
      }
      if (ended >= 0) h.length--;
      search.begin = BEGIN, search.end = END, search.max_length = MAX;
      CHECK(luna_seq2seq_generate(&t.model, &search, &(luna_input){ source, NULL, 1, SOURCE, NULL }, out, &length, NULL) == LUNA_OK, "%s", luna_error(t.ctx));
      CHECK(length == h.length && memcmp(out, h.tokens + 1, (size_t)length * sizeof(int32_t)) == 0,
            "model %d, source %d: greedy gives %d tokens, %d %d ..., and not %d, %d %d ...", v, (int)seed, (int)length, (int)out[0],
            (int)out[1], (int)h.length, (int)h.tokens[1], (int)h.tokens[2]);
      free(source);
    }
  }
  luna_close(t.ctx);
}

/* Four tokens that can be (one of them the end) and up to three of them: with a beam wide enough every sequence is looked at, and the best
   of all 40 is found. A beam is at most as wide as the vocabulary, so that this one has 32 more tokens, all but impossible. */
enum { LIVE = 4, WIDE = 36, SHORT = 3 };
static double enumerate(translator *t, const int32_t *source, const hypothesis *h, double penalty, hypothesis *best) {
  double next[WIDE], mass = 0;
  next_of(t, source, SOURCE, h, next);
  for (int32_t token = 0; token < LIVE; token++) {
    hypothesis more = *h;
    mass += exp(next[token]);
    more.score += next[token];
    more.tokens[++more.length] = token;
    if (token != END && h->length < SHORT) enumerate(t, source, &more, penalty, best);
    if (token != END) continue;
    more.length--;
    more.score = final_score(more.score, more.length, penalty);
    if (more.score > best->score) *best = more;
  }
  return mass;
}
static void check_exhaustive(uint64_t seed) {
  static const float penalties[] = {-1, 0.3f, 0, 1.5f, 4};
  luna_seq2seq_config config = translator_config(0);
  translator t;
  char what[100];
  config.target_vocab = WIDE, config.share_embeddings = false, config.separate_output = true;
  if (translator_open(&t, &config, seed)) {
    int32_t *source = common_tokens(SOURCE, seed, VOCAB), out[SHORT], length = -1;
    float score = NAN;
    const luna_norm_layer *last = &t.model.layers[t.model.config.decoder_layers - 1].feed_forward.norm;
    last->weight->data[0] = 0, last->bias->data[0] = 1; /* what the output sees has a 1 in front: a bias, -30 for the impossible */
    for (int token = 0; token < WIDE; token++) t.model.output->data[token * DIM] = token < LIVE ? 0 : -30;
    for (int j = 0; j < 5; j++)
      for (int exhaustive = 0; exhaustive < 2; exhaustive++) {
        luna_beam_config search = {0};
        hypothesis begin, best;
        memset(&begin, 0, sizeof begin);
        begin.tokens[0] = BEGIN, best = begin, best.score = -INFINITY;
        const double mass = enumerate(&t, source, &begin, penalty_of(penalties[j]), &best);
        CHECK(mass > 0.9999, "the four tokens have %.6f of the probability", mass);
        search.begin = BEGIN, search.end = END, search.beam = WIDE, search.max_length = SHORT, search.length_penalty = penalties[j],
        search.exhaustive = exhaustive;
        CHECK(luna_seq2seq_generate(&t.model, &search, &(luna_input){ source, NULL, 1, SOURCE, NULL }, out, &length, &score) == LUNA_OK, "%s", luna_error(t.ctx));
        snprintf(what, sizeof what, "of all sequences, seed %d, penalty %g%s", (int)seed, (double)penalties[j],
                 exhaustive ? ", exhaustive" : "");
        check_result(what, out, length, score, &best);
      }
    free(source);
  }
  luna_close(t.ctx);
}
/* several sources in a batch, padded, equal each alone; `most` may be more than the learned positions leave room for */
static void check_batch_of_sources(int v, int64_t max) {
  enum { COUNT = 4, ROOM = 40 };
  static const int32_t lengths[COUNT] = {4, SOURCE, 1, 6};
  const luna_seq2seq_config config = translator_config(v);
  translator t;
  if (translator_open(&t, &config, 89)) {
    int32_t *source = common_tokens(COUNT * SOURCE, 90, VOCAB), out[COUNT * ROOM], one[ROOM], length[COUNT], one_length;
    float score[COUNT], one_score;
    for (int64_t beam = 1; beam <= 3; beam += 2) {
      luna_beam_config search = {0};
      search.begin = BEGIN, search.end = END, search.beam = beam, search.max_length = max;
      const int64_t room = max ? max : 2 * SOURCE + 10;
      for (int i = 0; i < COUNT * ROOM; i++) out[i] = -7;
      CHECK(luna_seq2seq_generate(&t.model, &search, &(luna_input){ source, lengths, COUNT, SOURCE, NULL }, out, length, score) == LUNA_OK, "%s", luna_error(t.ctx));
      for (int i = 0; i < COUNT; i++) {
        search.max_length = room;
        CHECK(luna_seq2seq_generate(&t.model, &search, &(luna_input){ source + i * SOURCE, NULL, 1, lengths[i], NULL }, one, &one_length, &one_score) == LUNA_OK, "%s",
              luna_error(t.ctx));
        search.max_length = max;
        CHECK(one_length <= room && length[i] == one_length && memcmp(out + i * room, one, (size_t)one_length * sizeof(int32_t)) == 0 &&
                  fabs((double)(score[i] - one_score)) <= 1e-5,
              "model %d, beam %d, most %d: source %d of a batch gives %d tokens, %d %d ..., score %.5f; alone %d, %d %d ..., %.5f", v,
              (int)beam, (int)max, i, (int)length[i], (int)out[i * room], (int)out[i * room + 1], (double)score[i], (int)one_length,
              (int)one[0], (int)one[1], (double)one_score);
        if (config.encoder.positions == LUNA_POSITIONS_LEARNED) CHECK(one_length < STEPS, "%d tokens with %d positions", (int)one_length, STEPS);
      }
    }
    free(source);
  }
  luna_close(t.ctx);
}
static void check_search_refusals(void) {
  const luna_seq2seq_config config = translator_config(2);
  translator t;
  if (translator_open(&t, &config, 91)) {
    int32_t *source = common_tokens(SOURCE, 92, VOCAB), out[64], length = 0, bad[SOURCE] = {0}, lengths[1] = {SOURCE + 1};
    const luna_beam_config good = {BEGIN, END, 2, MAX, 0, false};
    luna_beam_config s[10];
    float score;
    for (int i = 0; i < 10; i++) s[i] = good;
    s[0].begin = -1, s[1].begin = 8, s[2].end = -1, s[3].end = 8, s[4].beam = -1, s[5].beam = 9, s[6].max_length = -1, s[7].max_length = INT64_MAX,
    s[8].beam = INT64_MAX, s[9].max_length = INT64_MIN;
    for (int i = 0; i < 10; i++)
      refused(t.ctx, luna_seq2seq_generate(&t.model, &s[i], &(luna_input){ source, NULL, 1, SOURCE, NULL }, out, &length,
          &score) != LUNA_OK, VALUE_RANGE, "bad search %d", i);
    refused(t.ctx, luna_seq2seq_generate(&t.model, NULL, &(luna_input){ source, NULL, 1, SOURCE, NULL }, out, &length,
        &score) == LUNA_BAD_ARGUMENT, NULL_ARGUMENT,
            "no search");
    refused(t.ctx, luna_seq2seq_generate(&t.model, &good, &(luna_input){ source, NULL, 1, SOURCE, NULL }, NULL, &length,
        &score) == LUNA_BAD_ARGUMENT, NULL_ARGUMENT,
            "no place for the result");
    refused(t.ctx, luna_seq2seq_generate(&t.model, &good, &(luna_input){ source, NULL, 1, SOURCE, NULL }, out, NULL,
        &score) == LUNA_BAD_ARGUMENT, NULL_ARGUMENT,
            "no place for the length");
    refused(t.ctx, luna_seq2seq_generate(&t.model, &good, &(luna_input){ source, NULL, 0, SOURCE, NULL }, out, &length,
        &score) == LUNA_BAD_ARGUMENT, VALUE_RANGE,
            "no source");
    refused(t.ctx, luna_seq2seq_generate(&t.model, &good, &(luna_input){ source, NULL, 1, -1, NULL }, out, &length,
        &score) == LUNA_BAD_ARGUMENT, VALUE_RANGE,
            "a source of -1 tokens");
    refused(t.ctx, luna_seq2seq_generate(&t.model, &good, &(luna_input){ NULL, NULL, 1, SOURCE, NULL }, out, &length,
        &score) != LUNA_OK, NULL_ARGUMENT, "null for a source");
    refused(t.ctx, luna_seq2seq_generate(&t.model, &good, &(luna_input){ source, lengths, 1, SOURCE, NULL }, out, &length,
        &score) != LUNA_OK, ELEMENT_RANGE,
            "a length beyond the source");
    bad[4] = VOCAB;
    refused(t.ctx, luna_seq2seq_generate(&t.model, &good, &(luna_input){ bad, NULL, 1, SOURCE, NULL }, out, &length,
        &score) != LUNA_OK, ELEMENT_RANGE,
            "a source token beyond the vocabulary");
    CHECK(luna_seq2seq_generate(NULL, &good, &(luna_input){ source, NULL, 1, SOURCE, NULL }, out, &length, &score) == LUNA_BAD_ARGUMENT, "no model");
    refused(t.ctx, !luna_seq2seq_stream_open(&t.model, &(luna_input){ source, NULL, 0, SOURCE, NULL }, 1), VALUE_RANGE,
        "a stream of no source");
    refused(t.ctx, !luna_seq2seq_stream_open(&t.model, &(luna_input){ source, NULL, 1, SOURCE, NULL }, -1), VALUE_RANGE,
        "a stream of -1 sequences");
    luna_stream *one = luna_seq2seq_stream_open(&t.model, &(luna_input){ source, NULL, 1, SOURCE, NULL }, 0);
    CHECK(one && luna_stream_step(one, &good.begin), "beam 0 is not one sequence: \"%s\"", luna_error(t.ctx));
    luna_stream_close(one);
    refused(t.ctx, !luna_seq2seq_stream_open(&t.model, &(luna_input){ source, NULL, 1, SOURCE, NULL }, INT64_MAX),
        VALUE_RANGE, "a stream of 2^63 sequences");
    CHECK(!luna_seq2seq_stream_open(NULL, &(luna_input){ source, NULL, 1, SOURCE, NULL }, 1), "a stream of no model");
    CHECK(luna_seq2seq_generate(&t.model, &good, &(luna_input){ source, NULL, 1, SOURCE, NULL }, out, &length, &score) == LUNA_OK, "after what was refused: %s",
          luna_error(t.ctx));
    const int32_t nothing[1] = {0}; /* an empty source is one: nothing to attend to */
    float empty = NAN;
    CHECK(luna_seq2seq_generate(&t.model, &good, &(luna_input){ source, nothing, 1, SOURCE, NULL }, out, &length, &score) == LUNA_OK && isfinite(score),
          "a length of 0: %s", luna_error(t.ctx));
    CHECK(luna_seq2seq_generate(&t.model, &good, &(luna_input){ source, NULL, 1, 0, NULL }, out, &length, &empty) == LUNA_OK && fabs((double)(empty - score)) <= 1e-6,
          "a source of no tokens: score %g, %g when all of it is padding: %s", (double)empty, (double)score, luna_error(t.ctx));
    static const float odd[] = {NAN, INFINITY, -INFINITY};
    for (int i = 0; i < 6; i++) { /* in the output, which only the logits see; in the first layer, whence it goes everywhere */
      float *at = i < 3 ? &t.model.output->data[3 * DIM + 1] : &t.model.layers[0].feed_forward.fc1.weight->data[5];
      const float kept = *at;
      *at = odd[i % 3];
      luna_beam_config search = good;
      search.beam = 1 + i % 2;
      const luna_status status = luna_seq2seq_generate(&t.model, &search, &(luna_input){ source, NULL, 1, SOURCE, NULL }, out, &length, &score);
      if (status == LUNA_OK)
        CHECK(!isnan(odd[i % 3]) && isfinite(score), "weights that are not finite give a result of score %g", (double)score);
      else refused(t.ctx, true, LOGITS_NOT_FINITE, "a weight of %g", (double)odd[i % 3]);
      *at = kept;
    }
    free(source);
  }
  luna_close(t.ctx);
}
static void check_translation(void) {
  for (int v = 0; v < 16; v++)
    for (int64_t beam = 1; beam <= 3; beam += 2) check_decoder_stream(v, beam, (v + beam / 2) % 2);
  check_decoder_state();
  check_seq2seq_forward();
  for (int v = 0; v < 16; v += 3) check_greedy(v);
  check_searches(5, 93), check_searches(2, 94), check_searches(8, 95);
  for (uint64_t seed = 96; seed < 100; seed++) check_exhaustive(seed);
  check_batch_of_sources(1, MAX), check_batch_of_sources(10, 0), check_batch_of_sources(4, MAX), check_batch_of_sources(7, 30),
      check_batch_of_sources(12, 0);
  check_search_refusals();
  heap_check("translation");
}

/* ---- checkpoints that say what they are ---- */
typedef struct bytes {
  uint8_t *at;
  size_t size, room;
} bytes;
static bool bytes_write(void *user, const void *from, size_t size) {
  bytes *b = (bytes *)user;
  if (b->size + size > b->room) {
    b->room = 2 * (b->size + size);
    b->at = (uint8_t *)realloc(b->at, b->room);
    if (!b->at) exit(2);
  }
  memcpy(b->at + b->size, from, size);
  b->size += size;
  return true;
}
static bytes saved(const luna_params *params) {
  bytes b = {NULL, 0, 0};
  luna_io io = {NULL, bytes_write, NULL, 0};
  io.user = &b;
  CHECK(luna_save_io(params, &io) == LUNA_OK, "luna_save_io fails");
  return b;
}
/* the file with the first `from` of its header replaced */
static bytes edited(const bytes *file, const char *from, const char *to) {
  uint64_t size = 0;
  bytes out = {NULL, 0, 0};
  for (int i = 0; i < 8; i++) size |= (uint64_t)file->at[i] << 8 * i;
  char *header = (char *)common_alloc((size_t)size + 1);
  memcpy(header, file->at + 8, (size_t)size);
  const char *found = strstr(header, from);
  if (CHECK(found != NULL, "the header has no %s", from)) {
    const uint64_t length = size - strlen(from) + strlen(to);
    for (int i = 0; i < 8; i++) bytes_write(&out, &(uint8_t){(uint8_t)(length >> 8 * i)}, 1);
    bytes_write(&out, header, (size_t)(found - header));
    bytes_write(&out, to, strlen(to));
    bytes_write(&out, found + strlen(from), (size_t)size - (size_t)(found - header) - strlen(from));
    bytes_write(&out, file->at + 8 + size, file->size - 8 - (size_t)size);
  }
  free(header);
  return out;
}
/* a model of its own context, from a file; the context tells why not */
typedef struct opened {
  luna_ctx *ctx;
  luna_params *params;
  luna_model model;
} opened;
static luna_status open_bytes(opened *o, const bytes *file) {
  o->ctx = ctx_open();
  o->params = luna_params_open(o->ctx);
  return luna_load_model_bytes(&o->model, o->params, file->at, file->size);
}
static bool comes_back(const opened *a, const opened *b) { /* the same kind, with the same logits bit for bit */
  if (a->model.kind != b->model.kind || luna_params_tensor_count(a->params) != luna_params_tensor_count(b->params)) return false;
  const texts t = texts_make();
  luna_begin_inference(a->ctx), luna_begin_inference(b->ctx);
  luna_tensor *x = model_logits(&a->model, &t), *y = model_logits(&b->model, &t);
  return (x && y && luna_count(x) == luna_count(y) && same_bits(x->data, y->data, luna_count(x))) ||
         (!x && !y && luna_error(a->ctx)[0] && luna_error(b->ctx)[0]);
}
enum { EXTRAS = 6 };
/* v below ENCODERS: the encoder's variants; beyond: what kinds have of their own */
static bool opened_init(opened *o, luna_model_kind kind, int v) {
  luna_classifier_config classifier = {0};
  luna_seq2seq_config seq2seq = {0};
  luna_status status;
  memset(o, 0, sizeof *o);
  if (v < ENCODERS ? !model_exists(kind, v) : kind != LUNA_MODEL_CLASSIFIER && kind != LUNA_MODEL_SEQ2SEQ) return false;
  o->ctx = ctx_open();
  o->params = luna_params_open(o->ctx);
  o->model.kind = kind;
  if (v < ENCODERS) status = model_init(&o->model, o->params, kind, encoder_config(v));
  else if (kind == LUNA_MODEL_CLASSIFIER) {
    classifier.vocab = VOCAB, classifier.classes = 4;
    classifier.encoder = encoder_config(v % 2 ? 3 : 8);
    classifier.pooling = (luna_pooling)((v - ENCODERS) % 5), classifier.pair = v % 2, classifier.pre_logits = v % 3 ? 7 : 0;
    status = luna_classifier_init(&o->model.classifier, o->params, &classifier);
  } else {
    seq2seq = translator_config(v - ENCODERS);
    seq2seq.target_vocab = VOCAB;
    status = luna_seq2seq_init(&o->model.seq2seq, o->params, &seq2seq);
  }
  common_params(o->params, 100);
  return CHECK(status == LUNA_OK, "%s %d: %s", model_names[kind], v, luna_error(o->ctx));
}
static void check_comes_back(luna_model_kind kind, int v) {
  opened a, b;
  if (!opened_init(&a, kind, v)) return;
  luna_params_set(a.params, "note", "kept");
  bytes file = saved(a.params);
  const luna_status status = open_bytes(&b, &file);
  CHECK(status == LUNA_OK && comes_back(&a, &b), "%s %d does not come back from its file: %s", model_names[kind], v, luna_error(b.ctx));
  const char *note = luna_params_get(b.params, "note");
  CHECK(note && strcmp(note, "kept") == 0, "%s %d: a text pair is lost", model_names[kind], v);
  bytes again = saved(b.params);
  CHECK(again.size == file.size && memcmp(again.at, file.at, file.size) == 0, "%s %d: saved, loaded and saved it is another file",
        model_names[kind], v);
  refused(b.ctx, luna_load_model_bytes(&b.model, b.params, file.at, file.size) == LUNA_BAD_ARGUMENT, SET_NOT_EMPTY,
          "%s %d: loading into a set that is not empty", model_names[kind], v);
  CHECK(luna_params_tensor_count(b.params) == luna_params_tensor_count(a.params), "%s %d: a refused load took the set's parameters", model_names[kind], v);
  free(file.at), free(again.at);
  luna_close(a.ctx), luna_close(b.ctx);
}
/* what a file that is not loaded must leave: a sentence, an empty set, no memory */
static void check_nothing_left(const opened *o, int64_t before, const char *what) {
  CHECK(luna_error(o->ctx)[0] && luna_params_tensor_count(o->params) == 0 && luna_params_element_count(o->params) == 0 &&
            !luna_params_get(o->params, "luna.kind"),
        "%s: refused with \"%s\", %d parameters left", what, luna_error(o->ctx), (int)luna_params_tensor_count(o->params));
  CHECK(heap_live - before <= 0, "%s: %lld bytes more than before stay in use", what, (long long)(heap_live - before));
}
/* a file of changed metadata: a model of all its tensors, or nothing at all; whether it was loaded */
static bool check_claim(const bytes *file, int64_t tensors, const char *what) {
  opened o, again;
  o.ctx = ctx_open();
  o.params = luna_params_open(o.ctx);
  const int64_t before = heap_most = heap_live;
  const luna_status status = luna_load_model_bytes(&o.model, o.params, file->at, file->size);
  CHECK(heap_most - before <= 8 * (int64_t)file->size + 200000, "%s: a file of %d bytes made luna.h take %lld", what, (int)file->size,
        (long long)(heap_most - before));
  if (status != LUNA_OK) check_nothing_left(&o, before, what);
  else {
    bytes copy = saved(o.params);
    CHECK(luna_params_tensor_count(o.params) == tensors, "%s: a model of %d tensors is loaded from %d", what, (int)luna_params_tensor_count(o.params),
          (int)tensors);
    const luna_status second = open_bytes(&again, &copy);
    CHECK(second == LUNA_OK && comes_back(&o, &again), "%s: it is loaded, but not what was saved of that: %s", what, luna_error(again.ctx));
    luna_close(again.ctx);
    free(copy.at);
  }
  luna_close(o.ctx);
  return status == LUNA_OK;
}
typedef struct pairs {
  char key[64][48], value[64][24];
  int count;
} pairs;
static void pairs_take(void *user, const char *key, const char *value) {
  pairs *p = (pairs *)user;
  if (p->count == 64) return;
  snprintf(p->key[p->count], sizeof p->key[0], "%s", key);
  snprintf(p->value[p->count++], sizeof p->value[0], "%s", value);
}
static void check_claims(luna_model_kind kind, int v) {
  static const char *const values[] = {"0", "1", "3", "1000", "999999999", "x", "", NULL}; /* null: no such pair */
  opened o;
  pairs all;
  luna_inspection inspection = {pairs_take, NULL, NULL};
  int loaded = 0, refusals = 0;
  if (!opened_init(&o, kind, v)) return;
  bytes file = saved(o.params);
  all.count = 0;
  inspection.user = &all;
  CHECK(luna_inspect_bytes(o.ctx, file.at, file.size, &inspection) == LUNA_OK && all.count >= 15, "%s: %d pairs: %s", model_names[kind],
        all.count, luna_error(o.ctx));
  for (int i = 0; i < all.count; i++)
    for (size_t j = 0; j < sizeof values / sizeof *values; j++) {
      char from[100], to[100], what[200];
      snprintf(from, sizeof from, "\"%s\":\"%s\"", all.key[i], all.value[i]);
      if (values[j]) snprintf(to, sizeof to, "\"%s\":\"%s\"", all.key[i], values[j]);
      else snprintf(to, sizeof to, "\"removed\":\"%s\"", all.value[i]);
      snprintf(what, sizeof what, "%s %d with %s", model_names[kind], v, to);
      bytes wrong = edited(&file, from, to);
      if (check_claim(&wrong, luna_params_tensor_count(o.params), what)) loaded++;
      else refusals++;
      free(wrong.at);
    }
  CHECK(loaded >= 10 && refusals >= 4 * all.count, "%s %d: of %d changes of metadata %d are loaded", model_names[kind], v,
        loaded + refusals, loaded);
  for (size_t cut = 0; cut < file.size; cut += cut < 64 ? 1 : 131) {
    const bytes piece = {file.at, cut, 0};
    opened part;
    char what[80];
    part.ctx = ctx_open();
    part.params = luna_params_open(part.ctx);
    const int64_t before = heap_live;
    snprintf(what, sizeof what, "%s %d cut to %d bytes", model_names[kind], v, (int)cut);
    CHECK(luna_load_model_bytes(&part.model, part.params, piece.at, piece.size) != LUNA_OK, "%s is loaded", what);
    check_nothing_left(&part, before, what);
    luna_close(part.ctx);
  }
  free(file.at);
  luna_close(o.ctx);
}
static void check_model_paths(void) {
  const path_text path = path_of();
  opened a, b;
  for (luna_model_kind kind = LUNA_MODEL_LM; kind <= LUNA_MODEL_SEQ2SEQ; kind = (luna_model_kind)(kind + 1)) {
    opened_init(&a, kind, 0);
    b.ctx = ctx_open();
    b.params = luna_params_open(b.ctx);
    CHECK(luna_save(a.params, path.text) == LUNA_OK && luna_load_model(&b.model, b.params, path.text) == LUNA_OK && comes_back(&a, &b),
          "%s by path: %s", model_names[kind], luna_error(b.ctx));
    luna_params *empty = luna_params_open(b.ctx);
    refused(b.ctx, luna_load_model(&b.model, empty, "no/such/file") == LUNA_CANNOT_READ, CANNOT_OPEN,
        "a file that is not there");
    refused(b.ctx, luna_load_model(NULL, empty, path.text) == LUNA_BAD_ARGUMENT, NULL_ARGUMENT, "no place for a model");
    CHECK(luna_load_model(&b.model, NULL, path.text) == LUNA_BAD_ARGUMENT, "no set");
    bytes file = saved(a.params), other = edited(&file, "\"luna.kind\":\"", "\"luna.kind\":\"un");
    refused(b.ctx, luna_load_model_bytes(&b.model, empty, other.at, other.size) == LUNA_BAD_FILE, NOT_A_MODEL,
        "a kind that is none");
    free(file.at), free(other.at);
    luna_close(a.ctx), luna_close(b.ctx);
    remove(path.text);
  }
}

/* ---- what fits: a masked language model's encoder for a classifier ---- */
typedef struct reported {
  char line[40][160];
  int count;
} reported;
static void told_take(void *user, const char *name, const char *why) {
  reported *t = (reported *)user;
  if (t->count < 40) snprintf(t->line[t->count], sizeof t->line[0], "%s: %s", name, why);
  t->count++;
}
static bool was_reported(const reported *t, const char *line) {
  int found = 0;
  for (int i = 0; i < t->count && i < 40; i++) found += strcmp(t->line[i], line) == 0;
  return found == 1;
}
static void check_matching(void) {
  static const char *const lines[] = {"encoder.embed_positions.weight: has another shape in the file",
                                      "pre_logits.0.weight: is not in the file",
                                      "pre_logits.0.bias: is not in the file",
                                      "sentence_projection_layer.weight: is not in the file",
                                      "lm_head.dense.weight: is in the file and no parameter here",
                                      "lm_head.dense.bias: is in the file and no parameter here",
                                      "lm_head.layer_norm.weight: is in the file and no parameter here",
                                      "lm_head.layer_norm.bias: is in the file and no parameter here",
                                      "lm_head.bias: is in the file and no parameter here"};
  enum { LINES = sizeof lines / sizeof *lines };
  const path_text path = path_of();
  luna_ctx *ctx = ctx_open();
  luna_params *from = luna_params_open(ctx), *to = luna_params_open(ctx), *lm_set = luna_params_open(ctx);
  luna_masked_lm masked_lm;
  luna_masked_lm_config masked_config = {0};
  luna_classifier classifier;
  luna_classifier_config config = {0};
  luna_lm lm;
  bytes file = {NULL, 0, 0};
  luna_io io = {NULL, bytes_write, NULL, 0};
  reported t;
  luna_load_report match = {told_take, NULL, -1, -1, -1}, quiet = {NULL, NULL, -1, -1, -1};
  masked_config.vocab = config.vocab = VOCAB, masked_config.encoder = config.encoder = encoder_config(6);
  config.encoder.max_length = 20, config.pre_logits = 5;
  CHECK(luna_masked_lm_init(&masked_lm, from, &masked_config) == LUNA_OK && luna_classifier_init(&classifier, to, &config) == LUNA_OK &&
            luna_lm_init(&lm, lm_set, NULL) == LUNA_OK,
        "%s", luna_error(ctx));
  common_params(from, 101), common_params(to, 102);
  io.user = &file;
  luna_optimizer *adam = luna_adamw(from, NULL); /* a training checkpoint, whose moments are no parameters */
  CHECK(luna_save_training_io(adam, &io) == LUNA_OK && luna_save(lm_set, path.text) == LUNA_OK, "%s", luna_error(ctx));
  for (int way = 0; way < 3; way++) {
    float *before = common_parameters(to), *at = before;
    t.count = 0;
    match.user = &t;
    luna_load_report *m = way == 0 ? &match : way == 1 ? &quiet : NULL;
    CHECK(luna_load_matching_bytes(to, file.at, file.size, m) == LUNA_OK, "%s", luna_error(ctx));
    if (m)
      CHECK(m->loaded == luna_params_tensor_count(to) - 4 && m->missing == 4 && m->unused == 5, "%d are loaded, %d left as they were, %d left out",
            (int)m->loaded, (int)m->missing, (int)m->unused);
    for (int i = 0; i < LINES && way == 0; i++) CHECK(was_reported(&t, lines[i]), "\"%s\" is not reported", lines[i]);
    CHECK(way || t.count == LINES, "%d things are reported, not %d", t.count, LINES);
    for (int64_t i = 0; i < luna_params_tensor_count(to); i++) {
      const char *name;
      const luna_tensor *p = luna_params_at(to, i, &name), *q = luna_params_find(from, name);
      const bool fits = q && luna_count(q) == luna_count(p);
      CHECK(same_bits(p->data, fits ? q->data : at, luna_count(p)), "%s is %s", name, fits ? "not what the file has" : "changed");
      at += luna_count(p);
    }
    free(before);
    common_params(to, 103 + (uint64_t)way);
  }
  float *before = common_parameters(to), *after;
  refused(ctx, luna_load_matching(to, path.text, &quiet) == LUNA_MISMATCH, NOTHING_MATCHES,
      "a file of which nothing fits");
  CHECK(quiet.loaded == 0 && quiet.missing == luna_params_tensor_count(to) && quiet.unused == luna_params_tensor_count(lm_set),
        "nothing fits: %d are loaded, %d left as they were, %d left out", (int)quiet.loaded, (int)quiet.missing, (int)quiet.unused);
  for (size_t cut = 0; cut < file.size; cut += 997)
    refused(ctx, luna_load_matching_bytes(to, file.at, cut, NULL) == LUNA_BAD_FILE, NOT_SAFETENSORS,
        "a file cut to %d bytes", (int)cut);
  refused(ctx, luna_load_matching(to, "no/such/file", NULL) == LUNA_CANNOT_READ, CANNOT_OPEN,
      "a file that is not there");
  CHECK(luna_load_matching_bytes(NULL, file.at, file.size, NULL) == LUNA_BAD_ARGUMENT, "no set");
  after = common_parameters(to);
  CHECK(same_bits(before, after, luna_params_element_count(to)), "files that do not fit change parameters");
  CHECK(luna_save(from, path.text) == LUNA_OK && luna_load_matching(to, path.text, &quiet) == LUNA_OK && quiet.missing == 4, "by path: %s",
        luna_error(ctx));
  free(before), free(after), free(file.at);
  remove(path.text);
  luna_close(ctx);
}
static void check_checkpoints(void) {
  for (luna_model_kind kind = LUNA_MODEL_LM; kind <= LUNA_MODEL_SEQ2SEQ; kind = (luna_model_kind)(kind + 1)) {
    for (int v = 0; v < ENCODERS + 16; v++) check_comes_back(kind, v);
    check_claims(kind, 0);
  }
  check_claims(LUNA_MODEL_CLASSIFIER, 6), check_claims(LUNA_MODEL_CLASSIFIER, 12), check_claims(LUNA_MODEL_CLASSIFIER, 14),
      check_claims(LUNA_MODEL_CLASSIFIER, ENCODERS + 1);
  check_claims(LUNA_MODEL_SEQ2SEQ, ENCODERS + 5), check_claims(LUNA_MODEL_MASKED_LM, 5), check_claims(LUNA_MODEL_LM, 10),
      check_claims(LUNA_MODEL_LM, 6);
  check_model_paths();
  check_matching();
  heap_check("checkpoints");
}

int main(void) {
  check_classifiers();
  check_positions();
  check_masked_lm();
  check_attentions();
  check_hooks();
  check_composed();
  check_segments();
  check_recomputing();
  check_unread_all();
  check_translation();
  check_checkpoints();
  return test_report("models");
}
