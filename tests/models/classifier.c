/* The classifier: the same alone and in a padded batch, pooling, tied layers, layers with a memory of their own. */
#include "test.h"
#define LUNA_IMPLEMENTATION
#include "luna.h"
#include "common.h"
#include "models.h"

/* ---- classifier: a sequence of a padded batch gives what it gives alone, whatever stands in the padding ---- */
static float *classified(classifier *c, const int32_t *tokens, const int32_t *lengths, int64_t batch, int64_t n) {
  luna_begin_inference(c->ctx);
  return values_of(c->ctx, luna_classifier_forward(&c->model, &(luna_input){ tokens, lengths, batch, n, NULL }),
                   "luna_classifier_forward");
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
      CHECK(same_bits(got, batch, BATCH * 3), "%s, pooling %d, form %d: logits change with the tokens in the padding",
            encoder_names[v],
            pooling, form);
      free(other), free(got);
    }
    float all[2][BATCH * 3]; /* each by itself; each by itself with padding */
    for (int b = 0; b < BATCH; b++) {
      const int32_t length = lengths_of_5[b], more = length < N ? 1 : 0;
      float *alone = classified(&c, tokens + b * N, NULL, 1, length),
          *longer = classified(&c, tokens + b * N, &length, 1, length + more);
      memcpy(all[0] + 3 * b, alone, 3 * sizeof(float)), memcpy(all[1] + 3 * b, longer, 3 * sizeof(float));
      free(alone), free(longer);
    }
    snprintf(what, sizeof what, "%s, pooling %d, form %d: sequences alone and in a batch", encoder_names[v], pooling,
             form);
    test_close(what, batch, all[0], BATCH * 3, 2e-6);
    snprintf(what, sizeof what, "%s, pooling %d, form %d: sequences in a batch and alone with padding",
             encoder_names[v], pooling, form);
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
    float *x = values_of(c.ctx, luna_encoder_forward(&c.model.encoder,
        &(luna_input){ tokens, lengths_of_5, BATCH, N, NULL }, NULL), "luna_encoder_forward");
    for (int64_t i = 0; i < BATCH * N; i++) {
      const bool padding = i % N >= lengths_of_5[i / N];
      CHECK((length_of(x + i * DIM, DIM) == 0) == (padding && !kept), "%s: place %d of sequence %d, %s, holds %.3g",
            encoder_names[v],
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
    const int64_t length = lengths ? lengths[b] : n;
    const bool all = pooling == LUNA_POOLING_MEMORY_BATCH || length > rows;
    const int64_t count = pooling == LUNA_POOLING_CLS ? 1 : all ? rows : length;
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
      for (int64_t j = 0; pre->weight && j < width; j++)
        h[i] += parameter(pre->weight, i * width + j) * f[b * width + j];
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
/* n below SLOTS: a batch that has not all slots */
static void check_pooling(int v, luna_pooling pooling, bool pair, int64_t n) {
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
                           pair ? luna_classifier_forward_pair(&c.model,
                               &(luna_input){ tokens, lengths, BATCH, n, NULL },
                                   &(luna_input){ second, lengths_of_5, BATCH, N, NULL })
                                : luna_classifier_forward(&c.model, &(luna_input){ tokens, lengths, BATCH, n, NULL }),
                           "logits");
    snprintf(what, sizeof what, "%s, pooling %d of %d tokens%s: logits against the definition", encoder_names[v],
             pooling, (int)n,
             pair ? ", pairs" : "");
    test_close(what, got, expected, BATCH * 3, 2e-6);
    luna_begin_inference(c.ctx);
    refused_at(__LINE__, c.ctx,
            pair ? !luna_classifier_forward(&c.model, &(luna_input){ tokens, lengths, BATCH, n, NULL })
                 : !luna_classifier_forward_pair(&c.model, &(luna_input){ tokens, lengths, BATCH, n, NULL },
                                                 &(luna_input){ second, lengths_of_5, BATCH, N, NULL }),
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
  config.classes = 2, config.encoder.layer.heads = 5;
  refused(ctx, luna_classifier_init(&model, params, &config) == LUNA_BAD_ARGUMENT, HEADS, "5 heads of 12");
  config.encoder.layer.heads = 2, config.encoder.layers = 100000;
  refused(ctx, luna_classifier_init(&model, params, &config) == LUNA_BAD_ARGUMENT, VALUE_RANGE, "100000 layers");
  refused(ctx, luna_classifier_init(NULL, params, &config) == LUNA_BAD_ARGUMENT, NULL_ARGUMENT, "no place for a model");
  CHECK(luna_params_tensor_count(params) == 0 && !luna_params_get_text(params, "luna.kind"),
        "refused inits leave %d parameters",
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
    luna_backward(luna_cross_entropy(y, labels, NULL));
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
    CHECK(luna_backward(luna_cross_entropy(luna_classifier_forward(&c.model,
        &(luna_input){ tokens, lengths_of_5, BATCH, N, NULL }), labels, NULL)) == LUNA_OK, "%s",
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
          "own memory %d: what only P' of the first layer can bring has a gradient of %.3g, of the last %.3g", own,
              gradient_size(first),
          gradient_size(last));
    if (own) {
      luna_begin_inference(c.ctx);
      luna_tensor *x = common_tensor(c.ctx, 5, BATCH, N, DIM, 0), *none = NULL,
          *some = common_tensor(c.ctx, 6, BATCH, SLOTS, DIM, 0),
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
    for (luna_form form = LUNA_FORM_CHEAPEST; form <= (memory ? LUNA_FORM_FOLDED : LUNA_FORM_CHEAPEST); form =
         (luna_form)(form + 1))
      check_alone(v, form, LUNA_POOLING_DEFAULT);
    check_alone(v, LUNA_FORM_CHEAPEST, LUNA_POOLING_CLS);
    check_alone(v, LUNA_FORM_CHEAPEST, LUNA_POOLING_MEAN);
    for (luna_pooling pooling = LUNA_POOLING_DEFAULT; pooling <=
         (memory ? LUNA_POOLING_MEMORY_BATCH : LUNA_POOLING_MEAN);
         pooling = (luna_pooling)(pooling + 1)) {
      check_pooling(v, pooling, false, N);
      if (v < 2 || v == 5 || v == 9)
        check_pooling(v, pooling, true, SLOTS - 2), check_pooling(v, pooling, false, SLOTS - 2);
    }
  }
  check_classifier_refusals();
  check_tied();
  check_own_memory();
  heap_check("classifiers");
}

int main(void) {
  check_classifiers();
  return test_report("classifier");
}
