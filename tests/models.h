/* What the tests of models share: contexts whose memory is counted, encoders of every sort, a model of each kind.
   Include it after test.h, luna.h and common.h. Tolerances are those of test_close: ||a - b|| / ||b||. */
#ifndef MODELS_H
#define MODELS_H
#include "examples/attentions/attentions.h"
#include <sys/stat.h>
#include <unistd.h>

/* ---- contexts whose memory is counted: everything must be gone when they are closed ---- */
static int64_t heap_live, heap_most;
TEST_UNUSED static void *heap_allocate(void *user, size_t bytes) {
  void *p = malloc(bytes);
  (void)user;
  if (p) heap_live += (int64_t)bytes;
  if (heap_live > heap_most) heap_most = heap_live;
  return p;
}
TEST_UNUSED static void heap_release(void *user, void *pointer, size_t bytes) {
  (void)user;
  heap_live -= (int64_t)bytes;
  free(pointer);
}
/* the hooks of the models that luna_load_model opens */
TEST_UNUSED static const luna_attention_hook *const *loading_hooks(void) {
  static attentions loaded;
  static const luna_attention_hook *const hooks[] = {&loaded.hook, NULL};
  if (!loaded.system) CHECK(attentions_open(&loaded, "linformer"), "%s", loaded.error);
  return hooks;
}
TEST_UNUSED static luna_options plain_options(void) {
  luna_options options = {0};
  options.hooks = loading_hooks();
  options.threads = 1;
  options.seed = 4;
  options.allocator.allocate = heap_allocate;
  options.allocator.release = heap_release;
  return options;
}
TEST_UNUSED static luna_ctx *ctx_open(void) {
  const luna_options options = plain_options();
  luna_ctx *ctx = luna_open(&options);
  if (!ctx) exit(2);
  return ctx;
}
TEST_UNUSED static void heap_check(const char *what) {
  CHECK(heap_live == 0, "%s: %lld bytes leak", what, (long long)heap_live);
  heap_live = 0;
}

/* ---- values and gradients as arrays, to be freed ---- */
#define values_of(ctx, t, what) values_at(__LINE__, ctx, t, what)
/* one NaN when there is no tensor */
TEST_UNUSED static float *values_at(int line, luna_ctx *ctx, const luna_tensor *t, const char *what) {
  float *out = common_floats(t ? luna_count(t) : 1 << 16);
  if (!test_check(t && luna_read(t, out) == LUNA_OK, __FILE__, line, "%s: there is no result: %s", what,
                  luna_error(ctx))) out[0] = NAN;
  return out;
}
TEST_UNUSED static float *gradient_of(const luna_tensor *t) { /* zeros where backward has not been */
  float *out = common_floats(luna_count(t));
  if (t->grad) CHECK(luna_read_grad(t, out) == LUNA_OK, "luna_read_grad fails");
  return out;
}
TEST_UNUSED static float *all_gradients(const luna_params *params) {
  float *out = common_floats(luna_params_element_count(params)), *at = out;
  for (int64_t i = 0; i < luna_params_tensor_count(params); i++) {
    const luna_tensor *p = luna_params_at(params, i, NULL);
    if (p->grad) luna_read_grad(p, at);
    at += luna_count(p);
  }
  return out;
}
TEST_UNUSED static double length_of(const float *x, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; i++) sum += (double)x[i] * (double)x[i];
  return sqrt(sum);
}
TEST_UNUSED static double gradient_size(const luna_tensor *t) {
  float *g = t ? gradient_of(t) : NULL;
  const double size = t ? length_of(g, luna_count(t)) : NAN;
  free(g);
  return size;
}
TEST_UNUSED static bool same_bits(const float *a, const float *b, int64_t n) {
  return a && b && memcmp(a, b, (size_t)n * sizeof(float)) == 0;
}
TEST_UNUSED static double parameter(const luna_tensor *t, int64_t i) { return (double)t->data[i]; }

/* a call that must fail with LUNA_ERROR_id; the context is fit to go on */
#define refused(ctx, failed, id, ...) refused_at(__LINE__, ctx, failed, LUNA_ERROR_##id, __VA_ARGS__)
TEST_UNUSED TEST_FORMAT(5) static void refused_at(int line, luna_ctx *ctx, bool failed, luna_error_id id,
                                                  const char *format, ...) {
  char what[160];
  va_list list;
  va_start(list, format);
  vsnprintf(what, sizeof what, format, list);
  va_end(list);
  test_check(failed && luna_error(ctx)[0] && luna_error_id_of(ctx) == id, __FILE__, line,
             "%s is %s, and the error is %d, not %d: \"%s\"", what, failed ? "refused" : "taken",
                 (int)luna_error_id_of(ctx),
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
TEST_UNUSED static bool has_memory(int v) { return v < 9; }
/* the hooks of the variants from 11 on, which live as long as the program */
TEST_UNUSED static const luna_attention_hook *linformer_hook(int v) {
  static attentions hooks[ENCODERS - 11];
  static const char *const options[ENCODERS - 11] = {"linformer k=5",
                                                     "linformer k=5 k_last_head=3 sharing=key-value projection=mean",
                                                     "linformer k=5 k_last_layer=3 sharing=layerwise projection=max",
                                                     "linformer k=5 k_last_layer=2 sharing=layerwise projection=3",
                                                     "linformer k=5 k_last_layer=8 k_last_head=2 sharing=layerwise",
                                                     "linformer k=5 projection=convolution"};
  attentions *a = &hooks[v - 11];
  if (!a->system) CHECK(attentions_open(a, options[v - 11]), "%s", a->error);
  return &a->hook;
}
TEST_UNUSED static luna_encoder_config encoder_config(int v) {
  luna_encoder_config c = {0};
  c.layers = v == 6 ? 3 : 2, c.layer.memory = SLOTS, c.max_length = 2 * N;
  c.layer.dim = DIM, c.layer.heads = 2, c.layer.ffn = 20;
  c.layer.pre_norm = v == 1 || v == 4 || v == 8 || v == 10;
  c.layer.activation = v == 1 ? LUNA_ACTIVATION_GELU : LUNA_ACTIVATION_DEFAULT;
  c.layer.sharing = v == 2 ? LUNA_SHARING_FULL : v == 3 ? LUNA_SHARING_NO_KEY : v == 4 ? LUNA_SHARING_QK :
      LUNA_SHARING_TIED;
  c.layer.pack_heads = v == 2 ? 3 : 0;
  c.norm_embedding = v == 3 || v == 4 || v == 7;
  c.layer.own_memory = v == 5 || v == 8;
  c.tied_layers = v == 6;
  c.positions = v == 6 ? LUNA_POSITIONS_LEARNED : LUNA_POSITIONS_DEFAULT;
  c.first_position = v == 6 ? 2 : v == 3 ? 1 : 0;
  c.keep_padding = v == 7;
  c.layer.attention = v < 9     ? LUNA_ATTENTION_LUNA
                      : v == 9  ? LUNA_ATTENTION_SOFTMAX
                      : v == 10 ? LUNA_ATTENTION_LINEAR
                                : LUNA_ATTENTION_LUNA;
  if (v > 10) c.layer.hook = linformer_hook(v);
  return c;
}
typedef struct classifier {
  luna_ctx *ctx;
  luna_params *params;
  luna_classifier model;
} classifier;
TEST_UNUSED static bool classifier_open(classifier *c, int v, luna_form form, luna_classifier_config config) {
  luna_options options = plain_options();
  options.form = form;
  c->ctx = luna_open(&options);
  c->params = luna_params_open(c->ctx);
  config.vocab = VOCAB;
  config.classes = 3;
  config.encoder = encoder_config(v);
  if (!CHECK(luna_classifier_init(&c->model, c->params, &config) == LUNA_OK, "%s: %s", encoder_names[v],
             luna_error(c->ctx))) return false;
  common_params(c->params, 60);
  return true;
}
/* tokens [batch, n] with `token` in the padding, or, where that is negative, as they are */
TEST_UNUSED static int32_t *padded_tokens(int64_t batch, int64_t n, const int32_t *lengths, uint64_t seed,
                                          int32_t token) {
  int32_t *tokens = common_tokens(batch * n, seed, VOCAB);
  for (int64_t i = 0; i < batch * n && token >= 0; i++)
    if (i % n >= lengths[i / n]) tokens[i] = token;
  return tokens;
}

/* ---- a model of each kind ---- */
enum { MODELS = 4, TARGET = 8 };
static const char *const model_names[MODELS + 1] = {"", "language model", "classifier", "masked language model",
                                                    "encoder-decoder"};
/* a model of each kind with what it can take from an encoder's config */
TEST_UNUSED static luna_status model_init(luna_model *m, luna_params *params, luna_model_kind kind,
                                          luna_encoder_config encoder) {
  luna_lm_config lm = {0};
  luna_classifier_config classifier = {0};
  luna_masked_lm_config masked_lm = {0};
  luna_seq2seq_config seq2seq = {0};
  m->kind = kind;
  lm.vocab = classifier.vocab = masked_lm.vocab = seq2seq.vocab = VOCAB;
  classifier.classes = 3;
  classifier.encoder = masked_lm.encoder = seq2seq.encoder = encoder;
  lm.layers = encoder.layers, lm.layer = encoder.layer, lm.positions = encoder.positions;
  lm.max_length = encoder.max_length;
  lm.layer.convolution = lm.layer.attention == LUNA_ATTENTION_LUNA ? 4 : 0;
  if (lm.layer.sharing > LUNA_SHARING_FULL) lm.layer.sharing = LUNA_SHARING_TIED;
  return kind == LUNA_MODEL_LM           ? luna_lm_init(&m->lm, params, &lm)
         : kind == LUNA_MODEL_CLASSIFIER ? luna_classifier_init(&m->classifier, params, &classifier)
         : kind == LUNA_MODEL_MASKED_LM  ? luna_masked_lm_init(&m->masked_lm, params, &masked_lm)
                                         : luna_seq2seq_init(&m->seq2seq, params, &seq2seq);
}
/* whether there is a model `kind` like encoder variant v, and unlike the variants before it */
TEST_UNUSED static bool model_exists(luna_model_kind kind, int v) {
  if (kind == LUNA_MODEL_LM) return v < 3 || v == 6 || v == 9 || v == 10;
  return kind == LUNA_MODEL_SEQ2SEQ ? v < 8 && v != 5 : true;
}
/* what the models are given: always the same */
typedef struct texts {
  int32_t tokens[BATCH * N], targets[BATCH * TARGET], labels[BATCH * N], lengths[BATCH];
} texts;
TEST_UNUSED static texts texts_make(void) {
  texts t;
  for (int i = 0; i < BATCH * N; i++) t.tokens[i] = (int32_t)(common_hash(70, (uint64_t)i) % VOCAB);
  for (int i = 0; i < BATCH * TARGET; i++) t.targets[i] = (int32_t)(common_hash(71, (uint64_t)i) % VOCAB);
  for (int i = 0; i < BATCH * N; i++) t.labels[i] = (int32_t)(common_hash(72, (uint64_t)i) % 3);
  memcpy(t.lengths, lengths_of_5, sizeof t.lengths);
  return t;
}
TEST_UNUSED static luna_tensor *model_logits(const luna_model *m, const texts *t) {
  switch (m->kind) {
    case LUNA_MODEL_LM: return luna_lm_forward(&m->lm, &(luna_input){ t->tokens, NULL, BATCH, N, NULL });
    case LUNA_MODEL_CLASSIFIER:
      return m->classifier.config.pair ? luna_classifier_forward_pair(&m->classifier,
          &(luna_input){ t->tokens, t->lengths, BATCH, N, NULL },
              &(luna_input){ t->targets, NULL, BATCH, TARGET, NULL })
                                       : luna_classifier_forward(&m->classifier,
                                           &(luna_input){ t->tokens, t->lengths, BATCH, N, NULL });
    case LUNA_MODEL_MASKED_LM: return luna_masked_lm_forward(&m->masked_lm,
                                                             &(luna_input){ t->tokens, t->lengths, BATCH, N, NULL });
    default: return luna_seq2seq_forward(&m->seq2seq, &(luna_input){ t->tokens, t->lengths, BATCH, N, NULL },
                                         &(luna_input){ t->targets, NULL, BATCH, TARGET, NULL });
  }
}

typedef struct path_text {
  char text[300];
} path_text;
TEST_UNUSED static path_text path_of(void) { /* a file of this process alone */
  path_text path;
  mkdir(common_build(), 0777);
  snprintf(path.text, sizeof path.text, "%s/models_test_%ld.safetensors", common_build(), (long)getpid());
  return path;
}

/* ---- a task to learn ---- */
enum { TASK_BATCH = 24, TASK_N = 12 };
/* sequences of 0 to 3 with lengths; label: is 0 more often there than 1? It never is as often. */
TEST_UNUSED static void counting_task(uint64_t step, int32_t *tokens, int32_t *lengths, int32_t *labels) {
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
TEST_UNUSED static double train_classifier(luna_params *params, const luna_classifier *model, int steps, float lr) {
  luna_ctx *ctx = model->projection->ctx;
  luna_optimizer_config config = {0};
  config.lr = lr;
  luna_optimizer *adam = luna_adamw(params, &config);
  int32_t tokens[TASK_BATCH * TASK_N], lengths[TASK_BATCH], labels[TASK_BATCH];
  double sum = 0;
  for (int step = 0; step < steps; step++) {
    counting_task((uint64_t)step, tokens, lengths, labels);
    luna_begin_step(ctx);
    luna_tensor *loss = luna_cross_entropy(luna_classifier_forward(model,
        &(luna_input){ tokens, lengths, TASK_BATCH, TASK_N, NULL }), labels, NULL);
    luna_backward(loss);
    if (!CHECK(luna_optimizer_step(adam) == LUNA_OK, "step %d: %s", step, luna_error(ctx))) return NAN;
    if (step >= steps - 10) sum += (double)luna_item(loss) / 10 / log(2);
  }
  return sum;
}
/* every matrix has moved from its first values: nothing is left out of the training */
TEST_UNUSED static void check_moved(const luna_params *params, const float *before, const char *what) {
  for (int64_t i = 0; i < luna_params_tensor_count(params); i++) {
    const char *name;
    const luna_tensor *p = luna_params_at(params, i, &name);
    CHECK(p->rank < 2 || !same_bits(p->data, before, luna_count(p)), "%s: training has not changed %s", what, name);
    before += luna_count(p);
  }
}

/* ---- encoder-decoders of every sort ---- */
enum { STEPS = 12 }; /* tokens of a target */
/* bits: pre-norm, full sharing, learned positions, large memory */
TEST_UNUSED static luna_seq2seq_config translator_config(int v) {
  luna_seq2seq_config c = {0};
  c.vocab = VOCAB, c.target_vocab = v % 3 == 0 ? VOCAB : 8, c.share_embeddings = v % 3 == 0,
      c.separate_output = v % 3 == 1;
  c.decoder_layers = v % 5 == 4 ? 3 : 0;
  c.encoder.layers = 2, c.encoder.layer.dim = DIM, c.encoder.layer.heads = 3, c.encoder.layer.ffn = 20;
  /* of a layer 3 heads x 3 slots are folded into the scores, 3 x 8 > 12 + 8 are not */
  c.encoder.layer.memory = v & 8 ? 8 : 3;
  c.encoder.layer.pre_norm = v & 1, c.encoder.layer.sharing = v & 2 ? LUNA_SHARING_FULL : LUNA_SHARING_TIED;
  c.encoder.layer.omega = v == 5 ? LUNA_ACTIVATION_ELU1 : v == 10 ? LUNA_ACTIVATION_SOFTPLUS : LUNA_ACTIVATION_DEFAULT;
  c.encoder.layer.activation = v == 3 ? LUNA_ACTIVATION_GELU : LUNA_ACTIVATION_DEFAULT;
  c.encoder.positions = v & 4 ? LUNA_POSITIONS_LEARNED : v == 1 ? LUNA_POSITIONS_NONE : LUNA_POSITIONS_SINUSOIDAL;
  c.encoder.first_position = v == 2 || v == 4 ? 2 : 0;
  c.encoder.max_length = 16, c.max_target_length = STEPS;
  c.encoder.keep_padding = v == 6, c.encoder.norm_embedding = v == 6;
  return c;
}

#endif
