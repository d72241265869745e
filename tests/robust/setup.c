/* What happens when something cannot be made: every layer's and model's init failing by a bad argument and by each
   allocation, then the manual's loop; null arguments and zeroed structs; configs that contradict themselves; training
   that finds only NaN; steps without a backward; parameters made after the optimiser. */
#include "test.h"
#define LUNA_IMPLEMENTATION
#include "luna.h"
#include "examples/luna_apollo.h"
#include "common.h"

enum { BATCH = 2, N = 5, DIM = 8, SLOTS = 3, VOCAB = 11 };

/* ---- all layers and models alike ---- */
typedef enum made_kind {
  LINEAR,
  NORM,
  NESTED,
  CAUSAL_ATTENTION,
  SOFTMAX,
  ENCODER_LAYER,
  DECODER_LAYER,
  CAUSAL_LAYER,
  LM,
  ENCODER,
  CLASSIFIER,
  PAIR,
  MASKED_LM,
  SEQ2SEQ,
  LM_FILE,
  ANY_FILE,
  LM_PATH,
  ANY_PATH,
  KINDS
} made_kind;
static const char *const kind_names[KINDS] = {"linear layer",
                                              "norm layer",
                                              "nested attention",
                                              "causal attention",
                                              "softmax attention",
                                              "encoder layer",
                                              "decoder layer",
                                              "causal layer",
                                              "language model",
                                              "encoder",
                                              "classifier",
                                              "classifier of pairs",
                                              "masked language model",
                                              "encoder-decoder",
                                              "a language model's bytes",
                                              "any model's bytes",
                                              "a language model's file",
                                              "any model's file"};
static const bool is_model[KINDS] = {[LM] = 1,      [ENCODER] = 1, [CLASSIFIER] = 1, [PAIR] = 1,    [MASKED_LM] = 1,
                                     [SEQ2SEQ] = 1, [LM_FILE] = 1, [ANY_FILE] = 1,   [LM_PATH] = 1, [ANY_PATH] = 1};
typedef union made {
  luna_linear_layer linear;
  luna_norm_layer norm;
  luna_nested_attention_layer nested;
  luna_causal_attention_layer causal_attention;
  luna_attention_layer attention;
  luna_encoder_layer encoder_layer;
  luna_decoder_layer decoder_layer;
  luna_causal_layer causal_layer;
  luna_lm lm;
  luna_encoder encoder;
  luna_classifier classifier;
  luna_masked_lm masked_lm;
  luna_seq2seq seq2seq;
  luna_model model;
} made;
static const size_t made_size[KINDS] = {sizeof(luna_linear_layer),
                                        sizeof(luna_norm_layer),
                                        sizeof(luna_nested_attention_layer),
                                        sizeof(luna_causal_attention_layer),
                                        sizeof(luna_attention_layer),
                                        sizeof(luna_encoder_layer),
                                        sizeof(luna_decoder_layer),
                                        sizeof(luna_causal_layer),
                                        sizeof(luna_lm),
                                        sizeof(luna_encoder),
                                        sizeof(luna_classifier),
                                        sizeof(luna_classifier),
                                        sizeof(luna_masked_lm),
                                        sizeof(luna_seq2seq),
                                        sizeof(luna_lm),
                                        sizeof(luna_model),
                                        sizeof(luna_lm),
                                        sizeof(luna_model)};

typedef struct bytes {
  uint8_t *at;
  size_t size;
} bytes;
static bytes lm_file, classifier_file; /* checkpoints, as bytes and on disk */
static char lm_path[300], classifier_path[300];
static bool bytes_write(void *user, const void *more, size_t size) {
  bytes *b = (bytes *)user;
  b->at = (uint8_t *)realloc(b->at, b->size + size + 1);
  if (!b->at) exit(2);
  memcpy(b->at + b->size, more, size);
  b->size += size;
  return true;
}

/* bad: 0, or one of two ways to be refused; no_config: null for a config, or for the file */
static luna_status init(made_kind kind, made *m, luna_params *params, int bad, bool no_config) {
  const int64_t heads = bad == 1 ? 3 : 2, dim = bad == 2 ? -1 : DIM;
  const luna_init normal = {LUNA_INIT_NORMAL, 1};
  luna_layer_config nested = {.dim = dim, .heads = heads};
  luna_layer_config causal = {.dim = dim, .heads = heads};
  luna_layer_config attention = {
      .attention = LUNA_ATTENTION_SOFTMAX, .dim = dim, .heads = heads};
  luna_layer_config layer = {.dim = dim, .heads = heads, .memory = SLOTS, .ffn = 12, .pre_norm = true};
  luna_encoder_config encoder = {.layers = 2,
                                 .positions = LUNA_POSITIONS_LEARNED,
                                 .max_length = N,
                                 .layer = {.dim = dim, .heads = heads, .memory = SLOTS, .ffn = 12, .pre_norm = true}};
  luna_lm_config lm = {.vocab = bad == 2 ? -1 : VOCAB,
                       .layer = {.dim = DIM, .heads = heads, .memory = SLOTS, .ffn = 12, .convolution = 3}};
  luna_classifier_config classifier = {
      .vocab = VOCAB, .classes = 3, .pre_logits = 6, .pair = kind == PAIR, .encoder = encoder};
  luna_masked_lm_config masked_lm = {.vocab = VOCAB, .encoder = encoder};
  luna_seq2seq_config seq2seq = {.vocab = VOCAB, .encoder = encoder};
  const size_t cut = bad ? 100 : 0;
  switch (kind) {
    case LINEAR: return luna_linear_layer_init(m ? &m->linear : NULL, params, "x.", DIM, bad ? -1 : DIM, normal);
    case NORM: return luna_norm_layer_init(m ? &m->norm : NULL, params, "x.", bad ? -1 : DIM, LUNA_NORM_LAYER);
    case NESTED:
      return luna_nested_attention_layer_init(m ? &m->nested : NULL, params, "x.", no_config ? NULL : &nested);
    case CAUSAL_ATTENTION:
      return luna_causal_attention_layer_init(m ? &m->causal_attention : NULL, params, "x.",
                                              no_config ? NULL : &causal);
    case SOFTMAX:
      return luna_attention_layer_init(m ? &m->attention : NULL, params, "x.", no_config ? NULL : &attention);
    case ENCODER_LAYER:
      return luna_encoder_layer_init(m ? &m->encoder_layer : NULL, params, "x.", no_config ? NULL : &layer);
    case DECODER_LAYER:
      return luna_decoder_layer_init(m ? &m->decoder_layer : NULL, params, "x.", no_config ? NULL : &layer);
    case CAUSAL_LAYER:
      return luna_causal_layer_init(m ? &m->causal_layer : NULL, params, "x.", no_config ? NULL : &layer);
    case LM: return luna_lm_init(m ? &m->lm : NULL, params, no_config ? NULL : &lm);
    case ENCODER: return luna_encoder_init(m ? &m->encoder : NULL, params, "x.", VOCAB, no_config ? NULL : &encoder);
    case CLASSIFIER:
    case PAIR: return luna_classifier_init(m ? &m->classifier : NULL, params, no_config ? NULL : &classifier);
    case MASKED_LM: return luna_masked_lm_init(m ? &m->masked_lm : NULL, params, no_config ? NULL : &masked_lm);
    case SEQ2SEQ: return luna_seq2seq_init(m ? &m->seq2seq : NULL, params, no_config ? NULL : &seq2seq);
    case LM_FILE:
      return luna_load_model_of(LUNA_MODEL_LM, m ? &m->lm : NULL, params, luna_bytes(no_config ? NULL : lm_file.at,
                                                                                     lm_file.size - cut));
    case ANY_FILE:
      return luna_load_model(m ? &m->model : NULL, params, luna_bytes(no_config ? NULL : classifier_file.at,
                                                                      classifier_file.size - cut));
    case LM_PATH:
      return luna_load_model_of(LUNA_MODEL_LM, m ? &m->lm : NULL, params, luna_path(no_config  ? NULL
                          : bad == 1 ? "no/such/file"
                          : bad      ? classifier_path
                                     : lm_path));
    default:
      return luna_load_model(m ? &m->model : NULL, params, luna_path(no_config  ? NULL
                             : bad == 1 ? "no/such/file"
                             : bad      ? "no"
                                        : classifier_path));
  }
}
static luna_tensor *forward(made_kind kind, const made *m, luna_ctx *ctx) {
  static const int32_t tokens[BATCH * N + 1] = {3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5}, lengths[BATCH] = {N, 2},
      shorter[BATCH] = {N - 1, 2};
  luna_tensor *x = common_tensor(ctx, 5, BATCH, N, DIM, 0), *p = common_tensor(ctx, 6, BATCH, SLOTS, DIM, 0);
  switch (kind) {
    case LINEAR: return luna_linear_layer_forward(m ? &m->linear : NULL, x);
    case NORM: return luna_norm_layer_forward(m ? &m->norm : NULL, x);
    case NESTED: return luna_nested_attention_layer_forward(m ? &m->nested : NULL, x, p, NULL, lengths, NULL);
    case CAUSAL_ATTENTION: return luna_causal_attention_layer_forward(m ? &m->causal_attention : NULL, x, p, NULL);
    case SOFTMAX: return luna_attention_layer_forward(m ? &m->attention : NULL, x, NULL, lengths);
    case ENCODER_LAYER: return luna_encoder_layer_forward(m ? &m->encoder_layer : NULL, x, &p, lengths);
    case DECODER_LAYER: return luna_decoder_layer_forward(m ? &m->decoder_layer : NULL, x, &p, x, lengths);
    case CAUSAL_LAYER: return luna_causal_layer_forward(m ? &m->causal_layer : NULL, x);
    case LM_FILE:
    case LM_PATH:
    case LM: return luna_lm_forward(m ? &m->lm : NULL, &(luna_input){ tokens, NULL, BATCH, N, NULL });
    case ENCODER: return luna_encoder_forward(m ? &m->encoder : NULL, &(luna_input){ tokens, lengths, BATCH, N, NULL },
                                              NULL);
    case PAIR: return luna_classifier_forward_pair(m ? &m->classifier : NULL,
        &(luna_input){ tokens, lengths, BATCH, N, NULL }, &(luna_input){ tokens + 1, lengths, BATCH, N, NULL });
    case MASKED_LM: return luna_masked_lm_forward(m ? &m->masked_lm : NULL,
                                                  &(luna_input){ tokens, lengths, BATCH, N, NULL });
    case SEQ2SEQ:
      return luna_seq2seq_forward(m ? &m->seq2seq : NULL, &(luna_input){ tokens, lengths, BATCH, N, NULL },
                                  &(luna_input){ tokens + 1, shorter, BATCH, N - 1, NULL });
    case CLASSIFIER: return luna_classifier_forward(m ? &m->classifier : NULL,
                                                    &(luna_input){ tokens, lengths, BATCH, N, NULL });
    default: return luna_classifier_forward(m ? &m->model.classifier : NULL,
                                            &(luna_input){ tokens, lengths, BATCH, N, NULL });
  }
}
static bool is_zero(const made *m, made_kind kind) {
  static const made zero;
  return memcmp(m, &zero, made_size[kind]) == 0;
}

/* The manual's loop, which looks at nothing but the step's status */
static luna_status loop(made_kind kind, const made *m, luna_ctx *ctx, luna_optimizer *optimizer, int steps,
                        float *last) {
  luna_status status = LUNA_OK;
  for (int step = 0; step < steps && status == LUNA_OK; step++) {
    luna_begin_step(ctx);
    luna_tensor *loss = common_loss(forward(kind, m, ctx), 9);
    luna_backward(loss);
    status = luna_optimizer_step(optimizer);
    *last = luna_item(loss);
  }
  return status;
}

static luna_ctx *ctx_open(void) {
  luna_options options = {.threads = 1, .seed = 3};
  return luna_open(&options);
}

/* ---- files to load ---- */
static void write_files(const char *folder) {
  for (int i = 0; i < 2; i++) {
    made m;
    bytes *file = i ? &classifier_file : &lm_file;
    const luna_io io = {NULL, bytes_write, file, 0};
    luna_ctx *ctx = ctx_open();
    luna_params *params = luna_params_open(ctx);
    snprintf(i ? classifier_path : lm_path, sizeof lm_path, "%s/setup_test_%d.safetensors", folder, i);
    CHECK(init(i ? CLASSIFIER : LM, &m, params, 0, false) == LUNA_OK && luna_save(params,
                                                                                  luna_callbacks(&io)) == LUNA_OK &&
              luna_save(params, luna_path(i ? classifier_path : lm_path)) == LUNA_OK,
          "%s", luna_error(ctx));
    luna_close(ctx);
  }
}

/* ---- an init that is refused ---- */
static void check_refused(made_kind kind, int bad) {
  made m;
  float last = 0;
  char sentence[400];
  luna_ctx *ctx = ctx_open();
  luna_params *params = luna_params_open(ctx);
  memset(&m, 0xA5, sizeof m);
  luna_status status = init(kind, &m, params, bad, false);
  CHECK(status != LUNA_OK && luna_error(ctx)[0], "%s, bad %d, is taken", kind_names[kind], bad);
  CHECK(is_zero(&m, kind) && luna_params_tensor_count(params) == 0, "%s, bad %d, leaves something behind",
        kind_names[kind],
        bad);
  snprintf(sentence, sizeof sentence, "%s", luna_error(ctx));
  luna_optimizer *adam = luna_adamw(params, NULL);
  CHECK(loop(kind, &m, ctx, adam, 1, &last) == status && luna_error_status(ctx) == status &&
            strcmp(luna_error(ctx), sentence) == 0,
        "%s, bad %d: after the loop luna_error says \"%s\", not \"%s\"", kind_names[kind], bad, luna_error(ctx),
        sentence);
  CHECK(luna_begin_step(ctx) == LUNA_OK && luna_begin_inference(ctx) == LUNA_OK && luna_error(ctx)[0] == 0,
        "%s, bad %d: more than one begin reports it: %s", kind_names[kind], bad, luna_error(ctx));
  CHECK(!forward(kind, &m, ctx) && (is_model[kind] || strstr(luna_error(ctx), sentence)),
        "%s, bad %d: its forward says \"%s\", not \"%s\"", kind_names[kind], bad, luna_error(ctx), sentence);
  CHECK(!forward(kind, NULL, ctx), "%s, bad %d, goes forward", kind_names[kind], bad);
  status = init(kind, &m, params, 3 - bad, false);
  CHECK(status != LUNA_OK && !luna_stream_open(kind == LM ? &m.lm : NULL, NULL), "%s: another bad one is taken",
        kind_names[kind]);
  snprintf(sentence, sizeof sentence, "%s", luna_error(ctx));
  (void)init(kind, &m, params, bad, false); /* a second failure, and a success: the first is reported */
  CHECK(init(kind, &m, params, 0, false) == LUNA_OK && luna_begin_step(ctx) == status &&
            strcmp(luna_error(ctx), sentence) == 0, "%s: a begin says \"%s\", not \"%s\"", kind_names[kind],
        luna_error(ctx), sentence);
  CHECK(loop(kind, &m, ctx, adam, 2, &last) == LUNA_OK && isfinite(last),
        "%s: after a bad init a good one does not train: %s", kind_names[kind], luna_error(ctx));
  luna_close(ctx);
}

/* ---- a parameter that could not be made: a layer without it would train in silence ---- */
static void check_param(void) {
  const luna_init normal = {LUNA_INIT_NORMAL, 1};
  const int64_t two[2] = {2, 2};
  luna_ctx *ctx = ctx_open();
  luna_params *params = luna_params_open(ctx);
  luna_tensor *w = luna_param(params, "w", 2, two, normal), *b = luna_param(params, "w", 1, two, normal);
  luna_optimizer *sgd = luna_sgd(params, NULL);
  CHECK(w && !b && luna_begin_step(ctx) == LUNA_BAD_ARGUMENT && luna_error_id_of(ctx) == LUNA_ERROR_PARAM_EXISTS,
        "a name twice: \"%s\"", luna_error(ctx));
  luna_backward(luna_mean(luna_reshape(luna_linear(luna_tensor_new(ctx, NULL, 2, two), w, b), 1, (int64_t[]){4}), 0));
  CHECK(luna_optimizer_step(sgd) == LUNA_BAD_ARGUMENT, "a layer trains without its bias");
  luna_close(ctx);
}

/* ---- why luna_open failed ---- */
static void log_last(void *user, luna_status status, const char *sentence) {
  snprintf((char *)user, 320, "%d: %s", (int)status, sentence);
}
static void *alloc_never(void *user, size_t size) { return (void)user, (void)size, NULL; }
static void release_never(void *user, void *at, size_t size) { (void)user, (void)at, (void)size; }
static void check_open(void) {
  static const char *const reason[] = {"threads", "isa", "allocate", "form", "backend", "block is too small",
                                       "no memory"};
  static char block[64];
  char logged[320];
  luna_backend backend = *luna_cpu_backend();
  backend.version++;
  for (int i = 0; i < 7; i++) {
    const char *why = "";
    luna_options options = {.threads = i == 0 ? -1 : 1, .log = log_last, .log_user = logged, .error = &why};
    if (i == 1) options.isa = (luna_isa)99;
    if (i == 2) options.allocator.allocate = alloc_never;
    if (i == 3) options.form = (luna_form)9;
    if (i == 4) options.backend = &backend;
    if (i == 5) options.block = block, options.block_size = sizeof block;
    if (i == 6) options.allocator = (luna_allocator){alloc_never, release_never, NULL};
    CHECK(!luna_open(&options) && strstr(why, reason[i]) && strstr(logged, why), "luna_open with a bad %s: \"%s\"",
          reason[i], why);
  }
}

/* ---- the manual's regression ---- */
static void check_regression(void) {
  enum { SAMPLES = 8, WORDS = 6 };
  int32_t tokens[SAMPLES * WORDS];
  float targets[SAMPLES], first = 0, last = 0;
  int64_t shape[2] = {SAMPLES, 1};
  luna_ctx *ctx = ctx_open();
  luna_params *params = luna_params_open(ctx);
  luna_classifier model;
  const luna_classifier_config config = {.vocab = 10, .classes = 1,
                                         .encoder = {.layers = 1, .layer = {.dim = 16, .memory = 4}}};
  const luna_input input = {tokens, NULL, SAMPLES, WORDS, NULL};
  for (int i = 0; i < SAMPLES * WORDS; i++) tokens[i] = (i * 7 + i / WORDS) % 10;
  for (int i = 0; i < SAMPLES; i++) targets[i] = (float)(i % 4) - 1.5f;
  CHECK(luna_classifier_init(&model, params, &config) == LUNA_OK, "%s", luna_error(ctx));
  luna_optimizer *adam = luna_adam(params, &(luna_optimizer_config){.lr = 1e-2f});
  for (int step = 0; step < 80; step++) {
    luna_begin_step(ctx);
    luna_tensor *y = luna_classifier_forward(&model, &input);
    luna_tensor *error = luna_add(y, luna_scale(luna_tensor_new(ctx, targets, 2, shape), -1));
    luna_tensor *loss = luna_mean(luna_reshape(luna_mul(error, error), 1, shape), 0);
    luna_backward(loss);
    CHECK(luna_optimizer_step(adam) == LUNA_OK, "%s", luna_error(ctx));
    last = luna_item(loss);
    if (step == 0) first = last;
  }
  CHECK(last < first / 10, "regression: the loss went from %g to %g", (double)first, (double)last);
  luna_close(ctx);
}

/* ---- layers and models have the same defaults ---- */
static void check_defaults(void) {
  luna_ctx *ctx = ctx_open();
  luna_params *params = luna_params_open(ctx);
  const int64_t x_shape[3] = {2, 5, 128}, p_shape[3] = {2, 3, 128};
  luna_nested_attention_layer nested;
  luna_causal_attention_layer causal;
  luna_attention_layer attention;
  luna_encoder_layer encoder_layer;
  luna_decoder_layer decoder_layer;
  luna_causal_layer causal_layer;
  luna_lm lm;
  luna_encoder encoder;
  const luna_layer_config narrow = {.dim = 12};
  CHECK(luna_nested_attention_layer_init(&nested, params, "a.", NULL) == LUNA_OK &&
            luna_causal_attention_layer_init(&causal, params, "b.", NULL) == LUNA_OK &&
            luna_attention_layer_init(&attention, params, "c.", NULL) == LUNA_OK &&
            luna_encoder_layer_init(&encoder_layer, params, "d.", NULL) == LUNA_OK &&
            luna_decoder_layer_init(&decoder_layer, params, "e.", NULL) == LUNA_OK &&
            luna_causal_layer_init(&causal_layer, params, "f.", NULL) == LUNA_OK &&
            luna_encoder_init(&encoder, params, "g.", 0, NULL) == LUNA_OK && luna_lm_init(&lm, params, NULL) == LUNA_OK,
        "all by default: \"%s\"", luna_error(ctx));
  const int64_t dim[] = {nested.config.dim,        causal.config.dim,       attention.config.dim,
                         encoder_layer.config.dim, decoder_layer.config.dim, causal_layer.config.dim,
                         encoder.config.layer.dim, lm.config.layer.dim};
  const int64_t heads[] = {nested.config.heads,        causal.config.heads,       attention.config.heads,
                           encoder_layer.config.heads, decoder_layer.config.heads, causal_layer.config.heads,
                           encoder.config.layer.heads, lm.config.layer.heads};
  for (int i = 0; i < 8; i++)
    CHECK(dim[i] == 128 && heads[i] == 4, "default %d: dim %d, heads %d", i, (int)dim[i], (int)heads[i]);
  CHECK(attention.config.attention == LUNA_ATTENTION_SOFTMAX && causal_layer.memory->shape[0] == 16 &&
            causal_layer.config.causal && encoder.embedding->shape[0] == 256 && lm.config.layer.ffn == 512 &&
            lm.config.layer.dim == 128,
        "attention, memory, vocab, ffn by default");
  CHECK(luna_encoder_layer_init(&encoder_layer, params, "h.", &narrow) == LUNA_OK && encoder_layer.config.heads == 4 &&
            encoder_layer.config.ffn == 48,
        "a dim alone: \"%s\"", luna_error(ctx));
  luna_begin_inference(ctx);
  luna_tensor *x = luna_tensor_new(ctx, NULL, 3, x_shape), *p = luna_tensor_new(ctx, NULL, 3, p_shape);
  CHECK(luna_nested_attention_layer_forward(&nested, x, p, NULL, NULL, NULL) &&
            luna_attention_layer_forward(&attention, x, NULL, NULL) && luna_causal_layer_forward(&causal_layer, x),
        "forward by default: \"%s\"", luna_error(ctx));
  luna_close(ctx);
}

/* ---- nulls and zeroed structs ---- */
static void check_nulls(made_kind kind) {
  made m;
  float last = 0;
  luna_ctx *ctx = ctx_open();
  luna_params *params = luna_params_open(ctx);
  memset(&m, 0xA5, sizeof m);
  CHECK(init(kind, &m, NULL, 0, false) == LUNA_BAD_ARGUMENT && is_zero(&m, kind), "%s: no set", kind_names[kind]);
  CHECK(init(kind, NULL, params, 0, false) == LUNA_BAD_ARGUMENT && luna_error(ctx)[0], "%s: no struct",
        kind_names[kind]);
  CHECK(init(kind, NULL, NULL, 0, true) == LUNA_BAD_ARGUMENT, "%s: nothing at all", kind_names[kind]);
  if (kind != LINEAR && kind != NORM) {
    memset(&m, 0xA5, sizeof m);
    luna_status status = init(kind, &m, params, 0, true);
    const bool defaults = kind <= SEQ2SEQ;
    CHECK(defaults ? status == LUNA_OK && luna_begin_step(ctx) != LUNA_OK && luna_begin_step(ctx) == LUNA_OK
                   : (status == LUNA_BAD_ARGUMENT || status == LUNA_BAD_FILE) && is_zero(&m, kind) &&
                       luna_error(ctx)[0],
          "%s: no config", kind_names[kind]);
  }
  luna_close(ctx);
  ctx = ctx_open();
  memset(&m, 0, sizeof m);
  for (int i = 0; i < 2; i++) {
    luna_begin_step(ctx);
    CHECK(!forward(kind, i ? &m : NULL, ctx) && (is_model[kind] || luna_error_status(ctx) == LUNA_BAD_ARGUMENT),
          "%s: %s goes forward", kind_names[kind], i ? "a zeroed struct" : "null");
  }
  luna_optimizer *sgd =
      luna_sgd(luna_params_open(ctx), NULL); /* nothing has failed yet, and the loop does not go unnoticed */
  CHECK(loop(kind, &m, ctx, sgd, 2, &last) == LUNA_BAD_ARGUMENT && luna_error(ctx)[0] && isnan(last),
        "%s: a loop with a zeroed struct is fine", kind_names[kind]);
  luna_close(ctx);
  /* luna_open failed */
  memset(&m, 0xA5, sizeof m);
  params = luna_params_open(NULL);
  CHECK(init(kind, &m, params, 0, false) == LUNA_BAD_ARGUMENT &&
            loop(kind, &m, NULL, luna_adamw(params, NULL), 2, &last) == LUNA_BAD_ARGUMENT && luna_error(NULL)[0],
        "%s: a loop without a context is fine", kind_names[kind]);
}
/* what takes a layer, a model, a set, an optimiser or a context, given none */
static void check_null_calls(void) {
  static const luna_lm lm;
  static const luna_seq2seq seq2seq;
  static const luna_classifier classifier;
  static const luna_masked_lm masked_lm;
  static const luna_encoder encoder;
  const int32_t tokens[4] = {1, 2, 3, 4};
  int32_t out[32], length[4];
  const luna_generate_config search = {.begin = 0, .end = 1};
  const luna_init normal = {LUNA_INIT_NORMAL, 1}, odd = {(luna_init_kind)77, 1}, nan = {LUNA_INIT_NORMAL, NAN};
  const luna_io none = {NULL, NULL, NULL, 0};
  const luna_param_group group = {.max_rank = 1};
  const luna_file_tensor entry = {0};
  const int64_t two = 2;
  luna_tensor *p = NULL;
  luna_ctx *ctx = ctx_open();
  luna_params *params = luna_params_open(ctx);
  luna_optimizer *sgd = luna_sgd(params, NULL);
  CHECK(luna_begin_step(NULL) == LUNA_BAD_ARGUMENT && luna_begin_inference(NULL) == LUNA_BAD_ARGUMENT &&
            luna_error_status(NULL) == LUNA_BAD_ARGUMENT,
        "no context");
  CHECK(!luna_params_open(NULL) && !luna_params_share(NULL, params) && !luna_params_share(NULL, NULL),
        "sets of no context");
  CHECK(!luna_param(NULL, "a", 1, &two, normal) && !luna_params_find(NULL, "a") && !luna_params_find(params, NULL) &&
            luna_params_tensor_count(NULL) == 0 && !luna_params_at(NULL, 0, NULL) &&
                luna_params_element_count(NULL) == 0 &&
            luna_params_zero_grad(NULL) == LUNA_BAD_ARGUMENT &&
                luna_params_set_text(NULL, "a", "b") == LUNA_BAD_ARGUMENT &&
            luna_params_set_text(params, NULL, "b") == LUNA_BAD_ARGUMENT &&
            luna_params_set_text(params, "a", NULL) == LUNA_BAD_ARGUMENT && !luna_params_get_text(NULL, "a") &&
            !luna_params_get_text(params, NULL),
        "no set, or no name");
  for (int i = 0; i < 4; i++) {
    luna_begin_inference(ctx);
    CHECK(!luna_param(params, i == 0 ? NULL : "a", 1, i == 1 ? NULL : &two,
                      i == 2   ? odd
                      : i == 3 ? nan
                               : normal) &&
              luna_error_status(ctx) == LUNA_BAD_ARGUMENT && luna_error(ctx)[0],
          "bad parameter %d", i);
  }
  CHECK(!luna_lm_forward(&lm, &(luna_input){ tokens, NULL, 1, 4, NULL }) &&
        !luna_encoder_embed(&encoder, &(luna_input){ tokens, NULL, 1, 4, NULL }, &p) &&
            !luna_encoder_embed(NULL, &(luna_input){ tokens, NULL, 1, 4, NULL }, NULL) &&
            !luna_masked_lm_loss(&masked_lm, &(luna_input){ tokens, NULL, 1, 4, NULL }, tokens) &&
            !luna_masked_lm_loss(NULL, &(luna_input){ tokens, NULL, 1, 4, NULL }, tokens) &&
                !luna_classifier_forward(&classifier, &(luna_input){ tokens, NULL, 1, 4, NULL }),
        "zeroed models go forward");
  CHECK(!luna_stream_open(NULL, NULL) && !luna_stream_open(&lm, NULL) &&
            !luna_seq2seq_stream_open(NULL, &(luna_input){ tokens, NULL, 1, 4, NULL }, 1) &&
            !luna_seq2seq_stream_open(&seq2seq, &(luna_input){ tokens, NULL, 1, 4, NULL }, 1) &&
            luna_seq2seq_generate(NULL, &(luna_input){ tokens, NULL, 1, 4, NULL }, &search, out, length) ==
                LUNA_BAD_ARGUMENT &&
            luna_seq2seq_generate(&seq2seq, &(luna_input){ tokens, NULL, 1, 4, NULL }, &search, out, length) ==
                LUNA_BAD_ARGUMENT,
        "streams of zeroed models");
  luna_begin_inference(ctx);
  luna_tensor *x = common_tensor(ctx, 1, 1, 4, DIM, 0);
  CHECK(!luna_classifier_pool(NULL, x, NULL, NULL) && luna_error_status(ctx) == LUNA_BAD_ARGUMENT &&
            !luna_classifier_pool(&classifier, x, x, NULL) && !luna_classifier_pool(&classifier, NULL, NULL, NULL),
        "pooling by no model");
  CHECK(!luna_sgd(NULL, NULL) && !luna_adam(NULL, NULL) && !luna_adamw(NULL, NULL) && !luna_apollo(NULL, NULL) &&
            luna_schedule_at(NULL, 1) == 1.0f, /* the default: constant */
        "optimisers of no set");
  CHECK(
      luna_optimizer_step(NULL) == LUNA_BAD_ARGUMENT && luna_optimizer_advance(NULL) == LUNA_BAD_ARGUMENT &&
          luna_optimizer_apply(NULL) == LUNA_BAD_ARGUMENT && luna_optimizer_add_group(NULL,
                                                                                      &group) == LUNA_BAD_ARGUMENT &&
          luna_optimizer_add_group(sgd, NULL) == LUNA_BAD_ARGUMENT &&
              luna_optimizer_set_lr(NULL, 1) == LUNA_BAD_ARGUMENT &&
          luna_optimizer_steps(NULL) == 0 && luna_optimizer_skipped(NULL) == 0 && luna_optimizer_grad_norm(NULL) == 0,
      "no optimiser");
  CHECK(luna_save(NULL, luna_callbacks(&none)) == LUNA_BAD_ARGUMENT && luna_save(params,
      luna_callbacks(NULL)) == LUNA_BAD_ARGUMENT &&
            luna_save(params, luna_callbacks(&none)) == LUNA_BAD_ARGUMENT && luna_load(NULL,
                luna_callbacks(&none)) == LUNA_BAD_ARGUMENT &&
            luna_load(params, luna_callbacks(NULL)) == LUNA_BAD_ARGUMENT && luna_load(params,
                luna_callbacks(&none)) == LUNA_BAD_ARGUMENT &&
            luna_save_training(NULL, luna_callbacks(&none)) == LUNA_BAD_ARGUMENT &&
            luna_save_training(sgd, luna_callbacks(NULL)) == LUNA_BAD_ARGUMENT &&
            luna_save_training(sgd, luna_callbacks(&none)) == LUNA_BAD_ARGUMENT &&
            luna_load_training(NULL, luna_bytes("", 0)) == LUNA_BAD_ARGUMENT,
        "nothing to write or read with");
  CHECK(luna_file_tensor_read(&entry, NULL) == LUNA_BAD_ARGUMENT &&
            luna_file_tensor_read(NULL, NULL) == LUNA_BAD_ARGUMENT, "an empty entry");
  luna_close(ctx);
}

/* ---- memory that ends: an allocator whose calls from `from` to `to` fail ---- */
typedef struct heap {
  int64_t calls, from, to, blocks;
} heap;
static void *heap_allocate(void *user, size_t size) {
  heap *h = (heap *)user;
  const int64_t call = h->calls++;
  if (call >= h->from && call < h->to) return NULL;
  h->blocks++;
  return malloc(size);
}
static void heap_release(void *user, void *at, size_t size) {
  (void)size;
  ((heap *)user)->blocks--;
  free(at);
}
static luna_ctx *heap_open(heap *h, int64_t from, int64_t to) {
  luna_options options = {.threads = 1, .seed = 3, .allocator = {heap_allocate, heap_release, NULL}};
  memset(h, 0, sizeof *h);
  h->from = from, h->to = to;
  options.allocator.user = h;
  return luna_open(&options);
}
/* the manual's program; where the struct is after its init failed it must be zero */
static luna_status program(made_kind kind, luna_ctx *ctx, made *m, float *last) {
  memset(m, 0xA5, sizeof *m);
  luna_params *params = luna_params_open(ctx);
  luna_status status = init(kind, m, params, 0, false);
  CHECK(status == LUNA_OK || is_zero(m, kind), "%s: an init without memory leaves a struct that is not zero",
        kind_names[kind]);
  status = loop(kind, m, ctx, luna_adamw(params, NULL), 2, last);
  return status;
}
static void check_memory(made_kind kind) {
  heap h;
  made m;
  float expected = NAN;
  luna_ctx *ctx = heap_open(&h, 0, 0);
  CHECK(program(kind, ctx, &m, &expected) == LUNA_OK && isfinite(expected), "%s: %s", kind_names[kind],
        luna_error(ctx));
  luna_close(ctx);
  const int64_t total = h.calls;
  int64_t survived = 0;
  for (int once = 0; once < 2; once++)
    for (int64_t k = 0; k < total; k++) {
      float got = NAN;
      ctx = heap_open(&h, k, once ? k + 1 : INT64_MAX);
      const luna_status status = program(kind, ctx, &m, &got);
      if (status == LUNA_OK)
        CHECK(once && memcmp(&got, &expected, sizeof got) == 0, "%s: without allocation %d the loss is %g, not %g",
              kind_names[kind], (int)k, (double)got, (double)expected);
      else
        CHECK((status == LUNA_OUT_OF_MEMORY || status == LUNA_BAD_ARGUMENT) && luna_error(ctx)[0] &&
                  (!ctx || luna_error_status(ctx) == LUNA_OUT_OF_MEMORY),
              "%s: without allocation %d the loop says %s, the context \"%s\"", kind_names[kind], (int)k,
              luna_status_text(status), luna_error(ctx));
      if (once && ctx && status != LUNA_OK) { /* again, with memory: in a new set */
        CHECK(program(kind, ctx, &m, &got) == LUNA_OK, "%s: after allocation %d failed it does not go again: %s",
              kind_names[kind], (int)k, luna_error(ctx));
        survived++;
      }
      luna_close(ctx);
      CHECK(h.blocks == 0, "%s: without allocation %d, %d blocks are left", kind_names[kind], (int)k, (int)h.blocks);
    }
  CHECK(survived > 10, "%s: only %d allocations failed", kind_names[kind], (int)survived);
}
/* an init that fails brings back the text pairs it has replaced */
static void check_pairs(void) {
  heap h;
  for (int64_t k = 1, going = 1; going; k++) {
    made m, other;
    luna_ctx *ctx = heap_open(&h, 0, 0);
    luna_params *params = luna_params_open(ctx);
    CHECK(init(LM, &m, params, 0, false) == LUNA_OK, "%s", luna_error(ctx));
    h.from = h.calls + k, h.to = INT64_MAX;
    going = init(CLASSIFIER, &other, params, 0, false) != LUNA_OK;
    const char *kind = luna_params_get_text(params, "luna.kind"), *layers = luna_params_get_text(params, "luna.layers");
    CHECK(kind && layers && strcmp(kind, going ? "causal_lm" : "classifier") == 0 && strcmp(layers, "2") == 0,
          "without allocation %d the set's kind is %s", (int)k, kind);
    luna_close(ctx);
  }
}

/* ---- errors: the table, and the numbers and shapes in its sentences ---- */
static void says(const luna_ctx *ctx, luna_error_id id, const char *sentence) {
  CHECK(luna_error_id_of(ctx) == id && strcmp(luna_error(ctx), sentence) == 0, "error %d, not %d: \"%s\", not \"%s\"",
        (int)luna_error_id_of(ctx), (int)id, luna_error(ctx), sentence);
}
static void check_errors(void) {
#define ERROR(id, status, sentence) {LUNA_ERROR_##id, LUNA_##status},
  static const struct { luna_error_id id; luna_status status; } errors[] = {LUNA_ERRORS(ERROR)};
  static const struct { float value; const char *text; } reals[] = {
      {1.5f, "1.5"}, {-0.25f, "-0.25"}, {NAN, "NaN"}, {-INFINITY, "-Inf"}, {3e30f, "3e30"}, {-1e-9f, "-1e-9"}, {1,
          "1"}};
  const int count = (int)(sizeof errors / sizeof *errors);
  const int64_t shape[2] = {4, 8}, huge[2] = {(int64_t)1 << 40, -3}, one = 1;
  const int32_t labels[4] = {7, 8, -1, 0};
  char logged[320] = "", sentence[160];
  luna_options options = {.threads = 1, .log = log_last, .log_user = logged};
  luna_ctx *ctx = luna_open(&options);
  luna_params *params = luna_params_open(ctx);
  luna_lm lm;
  CHECK(count == LUNA_ERROR_COUNT - 1 && LUNA_ERROR_NONE == 0, "%d errors, the last %d", count,
      (int)LUNA_ERROR_COUNT - 1);
  for (int i = 0; i < count; i++) {
    CHECK((int)errors[i].id == i + 1 && errors[i].status > LUNA_OK && errors[i].status <= LUNA_NOT_FINITE,
          "error %d is %d, status %d", i + 1, (int)errors[i].id, (int)errors[i].status);
  }
  CHECK(luna_error_id_of(NULL) == LUNA_ERROR_NO_CONTEXT && luna_stream_error_id(NULL) == LUNA_ERROR_NO_STREAM, "null");
  CHECK(*luna_error(NULL) && *luna_stream_error(NULL), "null has no sentence");
  luna_begin_inference(ctx);
  luna_tensor *x = luna_tensor_new(ctx, NULL, 2, shape);
  CHECK(luna_error_id_of(ctx) == LUNA_ERROR_NONE && !*luna_error(ctx), "an error before any");
  luna_slice(x, 1, 5, 9);
  says(ctx, LUNA_ERROR_SLICE_RANGE, "luna_slice: start 5 + count 9 exceeds axis 1 of [4,8]");
  CHECK(strcmp(logged, "1: luna_slice: start 5 + count 9 exceeds axis 1 of [4,8]") == 0, "logged: %s", logged);
  luna_begin_inference(ctx);
  luna_tensor_new(ctx, NULL, 2, huge);
  snprintf(sentence, sizeof sentence,
      "luna_tensor_new: the shape [1099511627776,-3] of rank 2 is invalid: at most 4 axes, "
           "none negative, and %lld elements in all", (long long)1 << (sizeof(size_t) < 8 ? 28 : 47));
  says(ctx, LUNA_ERROR_SHAPE, sentence);
  x = luna_tensor_new(ctx, NULL, 1, &one);
  luna_begin_inference(ctx);
  luna_item(x);                      /* of the step before */
  says(ctx, LUNA_ERROR_RELEASED, "luna_item: the values of tensor [1] were released: its scope ended (call luna_keep "
                                 "before) or a new step began (make it again after luna_begin_step or "
                                 "luna_begin_inference)");
  luna_begin_inference(ctx);
  luna_cross_entropy(luna_tensor_new(ctx, NULL, 2, shape), labels, NULL);
  says(ctx, LUNA_ERROR_LABEL_RANGE, "luna_cross_entropy: labels[1] is 8; there are 8 classes (a negative label is "
                                    "ignored)");
  for (size_t i = 0; i < sizeof reals / sizeof *reals; i++) {
    luna_begin_inference(ctx);
    x = luna_tensor_new(ctx, NULL, 2, shape);
    if (!luna_dropout(x, reals[i].value)) {
      snprintf(sentence, sizeof sentence, "luna_dropout: dropout is %s, outside [0, 1)", reals[i].text);
      says(ctx, LUNA_ERROR_PROBABILITY, sentence);
    } else CHECK(0, "dropout %s", reals[i].text);
  }
  CHECK(luna_load(params, luna_path("no/such/file")) == LUNA_CANNOT_READ, "a file that is not there is loaded");
  says(ctx, LUNA_ERROR_CANNOT_OPEN, "luna_load: 'no/such/file' cannot be opened; does it exist, and may it be "
                                     "read?");
  CHECK(luna_load(params, luna_bytes("12345678", 8)) == LUNA_BAD_FILE &&
        luna_error_id_of(ctx) == LUNA_ERROR_NOT_SAFETENSORS,
      "8 bytes");
  const luna_lm_config bad = {.layer = {.dim = 36, .heads = 5}};
  CHECK(luna_lm_init(&lm, params, &bad) == LUNA_BAD_ARGUMENT, "5 heads of 36");
  says(ctx, LUNA_ERROR_HEADS, "luna_lm_init: dim 36 is not a multiple of heads 5"); /* the call,
      not the layer's init inside */
  CHECK(luna_begin_inference(ctx) == LUNA_BAD_ARGUMENT, "a failed init is forgotten"); /* the next begin says it */
  says(ctx, LUNA_ERROR_HEADS, "luna_lm_init: dim 36 is not a multiple of heads 5");
  CHECK(luna_begin_inference(ctx) == LUNA_OK && !luna_error_id_of(ctx), "after it: %s", luna_error(ctx));
  CHECK(luna_lm_init(&lm, params, NULL) == LUNA_OK && luna_begin_inference(ctx) == LUNA_OK, "%s", luna_error(ctx));
  const luna_lm_config relu = {.layer = {.omega = LUNA_ACTIVATION_RELU}};
  CHECK(luna_lm_init(&lm, luna_params_open(ctx), &relu) == LUNA_BAD_ARGUMENT &&
            luna_error_id_of(ctx) == LUNA_ERROR_OMEGA, "omega is ReLU: %s", luna_error(ctx));
  CHECK(luna_lm_init(&lm, luna_params_open(ctx), NULL) == LUNA_OK && luna_begin_inference(ctx) == LUNA_BAD_ARGUMENT &&
            luna_error_id_of(ctx) == LUNA_ERROR_OMEGA && luna_begin_inference(ctx) == LUNA_OK, "%s", luna_error(ctx));
  CHECK(luna_fail(ctx, LUNA_UNSUPPORTED, "a sentence of its own") == LUNA_UNSUPPORTED, "luna_fail");
  says(ctx, LUNA_ERROR_BACKEND, "a sentence of its own");
  luna_close(ctx);
}

/* ---- configs that contradict themselves ---- */
static void check_contradictions(void) {
  static const char *const part[] = {"convolution", "attention"};
  static luna_attention_hook hook; /* of no use, but not looked at first */
  made m;
  for (int same = 0; same < 2; same++)
    for (int i = 0; i < 2; i++)
      for (int kind = ENCODER; kind <= SEQ2SEQ; kind++) {
        luna_encoder_config e = {.max_length = 20, .layer = {.dim = 16, .heads = 2, .memory = SLOTS, .ffn = 24}};
        if (i == 0) e.layer.convolution = same ? 0 : 3;
        if (i == 1 && !same) e.layer.attention = LUNA_ATTENTION_SOFTMAX, e.layer.hook = &hook;
        if (kind == SEQ2SEQ && i == 1) continue; /* has Luna attention */
        luna_classifier_config classifier = {.pooling = LUNA_POOLING_MEAN, .encoder = e};
        luna_masked_lm_config masked_lm = {.encoder = e};
        luna_seq2seq_config seq2seq = {.encoder = e};
        luna_ctx *ctx = ctx_open();
        luna_params *params = luna_params_open(ctx);
        const luna_status status = kind == ENCODER     ? luna_encoder_init(&m.encoder, params, "", VOCAB, &e)
                                   : kind == MASKED_LM ? luna_masked_lm_init(&m.masked_lm, params, &masked_lm)
                                   : kind == SEQ2SEQ   ? luna_seq2seq_init(&m.seq2seq, params, &seq2seq)
                                                       : luna_classifier_init(&m.classifier, params, &classifier);
        CHECK(same ? status == LUNA_OK : status == LUNA_BAD_ARGUMENT &&
            luna_error_id_of(ctx) == LUNA_ERROR_FIELD_UNUSED,
              "%s, %s, %s: \"%s\"", kind_names[kind], part[i], same ? "the same" : "another", luna_error(ctx));
        luna_close(ctx);
      }
  for (int i = 0; i < 8; i++) { /* what a layer would leave aside */
    luna_layer_config c = {.dim = DIM, .heads = 2};
    if (i == 0 || i == 1) c.convolution = 2;
    if (i == 2 || i == 3) c.own_memory = true;
    if (i == 4) c.sharing = LUNA_SHARING_NO_KEY;
    if (i > 4) c.causal = true;
    luna_ctx *ctx = ctx_open();
    luna_params *params = luna_params_open(ctx);
    const luna_status status = i == 0 || i == 5   ? luna_encoder_layer_init(&m.encoder_layer, params, "", &c)
                               : i == 7           ? luna_nested_attention_layer_init(&m.nested, params, "", &c)
                               : i < 3 || i == 6  ? luna_decoder_layer_init(&m.decoder_layer, params, "", &c)
                                                  : luna_causal_layer_init(&m.causal_layer, params, "", &c);
    CHECK(status == LUNA_BAD_ARGUMENT && luna_error_id_of(ctx) == LUNA_ERROR_FIELD_UNUSED,
          "an option that layer %d does not have: \"%s\"", i, luna_error(ctx));
    luna_close(ctx);
  }
  const luna_layer_config no_key = {.dim = DIM, .heads = 2, .sharing = LUNA_SHARING_NO_KEY};
  luna_ctx *causal = ctx_open();
  CHECK(luna_causal_attention_layer_init(&m.causal_attention, luna_params_open(causal), "", &no_key) ==
            LUNA_BAD_ARGUMENT && luna_error_id_of(causal) == LUNA_ERROR_VALUE_RANGE,
        "causal attention without a key: \"%s\"", luna_error(causal));
  luna_close(causal);
  static const luna_error_id sgd_errors[10] = {
      LUNA_ERROR_NESTEROV, LUNA_ERROR_PROBABILITY, LUNA_ERROR_NEGATIVE, LUNA_ERROR_SCHEDULE_TOTAL,
      LUNA_ERROR_VALUE_RANGE, LUNA_ERROR_NEGATIVE, LUNA_ERROR_NEGATIVE, LUNA_ERROR_PROBABILITY, LUNA_ERROR_PROBABILITY,
      LUNA_ERROR_NONE};
  for (int i = 0; i < 10; i++) { /* optimisers */
    luna_optimizer_config c = {
        .lr = 0.1f, .momentum = i == 1 ? NAN : 0, .nesterov = i == 0, .weight_decay = i == 2 ? INFINITY : 0};
    if (i == 3) c.schedule.decay = LUNA_DECAY_COSINE;
    if (i == 4) c.schedule.decay = (luna_decay)9;
    if (i == 5) c.schedule.floor = NAN;
    if (i == 6) c.schedule.gamma = INFINITY;
    if (i == 7) c.momentum = -1;
    if (i == 8) c.average = 1;
    luna_ctx *ctx = ctx_open();
    luna_params *params = luna_params_open(ctx);
    CHECK(!luna_sgd(params, &c) == (i < 9) && luna_error_id_of(ctx) == sgd_errors[i], "SGD, bad config %d: %s", i,
          luna_error(ctx));
    CHECK(luna_begin_step(ctx) == (i < 9 ? LUNA_BAD_ARGUMENT : LUNA_OK) && luna_adamw(params, NULL) &&
              luna_begin_step(ctx) == LUNA_OK,
          "SGD, bad config %d: an optimiser that failed stays", i);
    luna_close(ctx);
  }
}

/* ---- training: loss = sum of weights times parameters, by a factor that may not be finite ---- */
typedef struct run {
  luna_ctx *ctx;
  luna_params *params;
  luna_optimizer *optimizer;
} run;
static const int64_t sizes[3] = {7, 4, 9};
static luna_optimizer *optimizer_of(luna_params *params, int kind, int64_t max_skips) {
  luna_optimizer_config sgd = {.lr = 0.1f, .momentum = 0.5f, .weight_decay = 0.1f, .max_skips = max_skips};
  luna_optimizer_config adam = {.lr = 0.01f, .weight_decay = 0.1f, .max_skips = max_skips};
  luna_optimizer_config apollo = {.lr = 0.1f, .max_skips = max_skips};
  return kind == 0   ? luna_sgd(params, &sgd)
         : kind == 1 ? luna_adam(params, &adam)
         : kind == 2 ? luna_adamw(params, &adam)
                     : luna_apollo(params, &apollo);
}
static void run_param(const run *r, int i) {
  const luna_init normal = {LUNA_INIT_NORMAL, 1};
  const char name[2] = {(char)('a' + i), 0};
  CHECK(luna_param(r->params, name, 1, &sizes[i], normal) != NULL, "%s", luna_error(r->ctx));
}
static run run_open(luna_ctx *ctx, int params, int kind, int64_t max_skips) {
  run r = {ctx, luna_params_open(ctx), NULL};
  for (int i = 0; i < params; i++) run_param(&r, i);
  r.optimizer = optimizer_of(r.params, kind, max_skips);
  CHECK(r.optimizer != NULL, "%s", luna_error(ctx));
  return r;
}
static luna_tensor *run_loss(const run *r, int params, int step, float factor) {
  luna_tensor *loss = NULL;
  for (int i = 0; i < params; i++) {
    luna_tensor *p = luna_params_at(r->params, i, NULL),
                *part = common_loss(luna_mul(p, p), (uint64_t)(100 * step + i));
    loss = loss ? luna_add(loss, part) : part;
  }
  return luna_scale(loss, factor);
}
static luna_status run_step(const run *r, int params, int step, float factor) {
  luna_begin_step(r->ctx);
  luna_backward(run_loss(r, params, step, factor));
  return luna_optimizer_step(r->optimizer);
}
static bytes saved(const run *r) {
  bytes b = {NULL, 0};
  const luna_io io = {NULL, bytes_write, &b, 0};
  CHECK(luna_save_training(r->optimizer, luna_callbacks(&io)) == LUNA_OK, "%s", luna_error(r->ctx));
  return b;
}
static bool same_bytes(bytes a, bytes b) {
  const bool same = a.size == b.size && memcmp(a.at, b.at, a.size) == 0;
  free(a.at), free(b.at);
  return same;
}

static void check_not_finite(int kind) {
  for (int i = 0; i < 3; i++) {
    const int64_t max_skips = i == 0 ? 0 : i == 1 ? 3 : -1, limit = i == 0 ? 10 : i == 1 ? 3 : 1000;
    run r = run_open(ctx_open(), 2, kind, max_skips);
    CHECK(run_step(&r, 2, 0, 1) == LUNA_OK, "%s", luna_error(r.ctx));
    float *before = common_parameters(r.params);
    for (int round = 0; round < 2; round++) {
      for (int step = 1; step <= 12; step++) {
        const luna_status status = run_step(&r, 2, step, NAN);
        CHECK(status == (step >= limit ? LUNA_NOT_FINITE : LUNA_OK) && luna_error_status(r.ctx) == status,
              "max_skips %d, NaN %d: %s", (int)max_skips, step, luna_status_text(status));
        if (step >= limit)
          CHECK(luna_error_id_of(r.ctx) == LUNA_ERROR_SKIPPED_STEPS, "\"%s\"", luna_error(r.ctx));
      }
      float *after = common_parameters(r.params);
      CHECK(memcmp(before, after, (size_t)luna_params_element_count(r.params) * sizeof(float)) == 0,
            "skipped steps change the parameters");
      free(after), free(before);
      CHECK(run_step(&r, 2, 20, 1) == LUNA_OK && luna_error_status(r.ctx) == LUNA_OK, "a good step after NaN: %s",
            luna_error(r.ctx));
      before = common_parameters(r.params);
    }
    CHECK(luna_optimizer_skipped(r.optimizer) == 24 && luna_optimizer_steps(r.optimizer) == 3, "%d skipped",
          (int)luna_optimizer_skipped(r.optimizer));
    free(before);
    luna_close(r.ctx);
  }
}
/* a run loaded after skipped steps counts on; a file without that counter begins from none */
static void check_not_finite_resumed(void) {
  for (int old = 0; old < 2; old++) {
    run r = run_open(ctx_open(), 2, 2, 5), again = run_open(ctx_open(), 2, 2, 5);
    for (int step = 0; step < 4; step++) run_step(&r, 2, step, step ? NAN : 1);
    bytes file = saved(&r);
    for (size_t i = 0; old && i + 20 < file.size; i++)
      if (memcmp(file.at + i, "luna.skipped_in_row", 19) == 0) memcpy(file.at + i, "other", 5);
    CHECK(luna_load_training(again.optimizer, luna_bytes(file.at, file.size)) == LUNA_OK, "%s", luna_error(again.ctx));
    for (int step = 4; step < 10; step++) {
      const luna_status a = run_step(&r, 2, step, NAN), b = run_step(&again, 2, step, NAN);
      CHECK(b == (step - (old ? 4 : 1) >= 4 ? LUNA_NOT_FINITE : LUNA_OK) && (old || a == b), "step %d: %s, resumed %s",
            step, luna_status_text(a), luna_status_text(b));
    }
    free(file.at);
    luna_close(r.ctx), luna_close(again.ctx);
  }
}
/* one optimiser's NaN does not stop another's step */
static luna_status none_forward(const luna_tensor *const *in, int count, luna_tensor *out, void *state) {
  (void)in, (void)count, (void)state;
  out->data[0] = 0;
  return LUNA_OK;
}
static luna_status nan_backward(luna_tensor *const *in, int count, const luna_tensor *out, void *state) {
  (void)count, (void)out, (void)state;
  in[0]->grad[0] += NAN;
  return LUNA_OK;
}
/* a user's op that fails, with and without a sentence of its own */
static luna_status failing_forward(const luna_tensor *const *in, int count, luna_tensor *out, void *state) {
  (void)in, (void)count;
  out->data[0] = 0;
  return *(const int *)state ? LUNA_OK : LUNA_UNSUPPORTED;
}
static luna_status failing_backward(luna_tensor *const *in, int count, const luna_tensor *out, void *state) {
  (void)in, (void)count, (void)state;
  return luna_fail(out->ctx, LUNA_CANNOT_READ, "the table is gone");
}
static void check_custom_fails(void) {
  const int64_t one = 1;
  luna_ctx *ctx = ctx_open();
  run r = run_open(ctx, 1, 0, 2);
  for (int works = 0; works < 2; works++) {
    const luna_custom custom = {failing_forward, failing_backward, &works, sizeof works, 0, false, 0, 0};
    luna_tensor *w = luna_params_at(r.params, 0, NULL);
    luna_begin_step(ctx);
    luna_tensor *y = luna_custom_op(&w, 1, 1, &one, &custom);
    CHECK(!y == !works && luna_error_status(ctx) == (works ? LUNA_OK : LUNA_UNSUPPORTED), "forward: %s",
          luna_error(ctx));
    CHECK(works ? luna_backward(y) == LUNA_CANNOT_READ : luna_backward(y) != LUNA_OK, "backward: %s", luna_error(ctx));
    CHECK(strstr(luna_error(ctx), works ? "the table is gone" : "luna_custom_op"), "\"%s\"", luna_error(ctx));
    CHECK(luna_optimizer_step(r.optimizer) != LUNA_OK, "a step whose op failed is made");
  }
  luna_close(ctx);
}
static void check_not_finite_two(void) {
  luna_ctx *ctx = ctx_open();
  run bad = run_open(ctx, 1, 0, 2), good = run_open(ctx, 1, 0, 2);
  const luna_custom custom = {none_forward, nan_backward, NULL, 0, 0, false, 0, 0};
  const int64_t one = 1;
  for (int step = 0; step < 4; step++) {
    luna_tensor *w = luna_params_at(bad.params, 0, NULL);
    float *before = common_parameters(good.params), *after;
    luna_begin_step(ctx);
    luna_backward(luna_add(run_loss(&good, 1, step, 1), luna_custom_op(&w, 1, 1, &one, &custom)));
    CHECK(luna_optimizer_step(bad.optimizer) == (step < 1 ? LUNA_OK : LUNA_NOT_FINITE) &&
              luna_optimizer_step(good.optimizer) == LUNA_OK,
          "step %d: %s", step, luna_error(ctx));
    after = common_parameters(good.params);
    CHECK(memcmp(before, after, (size_t)sizes[0] * sizeof(float)) != 0 &&
              luna_optimizer_steps(good.optimizer) == step + 1,
          "another optimiser's NaN stops a step");
    free(before), free(after);
  }
  luna_close(ctx);
}

/* ---- a device: the CPU's rows on memory of its own ---- */
static int64_t device_reads;
static void *device_allocate(void *self, size_t size) {
  (void)self;
  return malloc(size + 1);
}
static void device_release(void *self, void *at, size_t size) {
  (void)self, (void)size;
  free(at);
}
static luna_status device_copy(luna_ctx *ctx, void *to, const void *from, size_t size, int direction) {
  device_reads += direction == 2;
  return luna_cpu_backend()->copy(ctx, to, from, size, direction);
}
static void check_device(void) {
  luna_backend backend = *luna_cpu_backend();
  luna_options options = {.threads = 1, .seed = 3, .backend = &backend};
  backend.allocate = device_allocate, backend.release = device_release, backend.copy = device_copy;
  run r = run_open(luna_open(&options), 2, 2, 3);
  luna_status status = LUNA_OK;
  for (int step = 0; step < 12; step++) {
    const int64_t reads = device_reads;
    const bool read = step > 6 || step == 1;
    luna_begin_step(r.ctx);
    luna_tensor *loss = run_loss(&r, 2, step, step < 9 ? NAN : 1);
    luna_backward(loss);
    status = luna_optimizer_step(r.optimizer);
    CHECK(device_reads == reads, "step %d reads from the device", step);
    CHECK(status == (step < 8 || step > 9 ? LUNA_OK : LUNA_NOT_FINITE), "on a device, step %d: %s", step,
          luna_status_text(status));
    if (read) luna_item(loss);
    if (step > 8)
      CHECK(device_reads == reads + 2 + (step == 9), "step %d: reading a number takes %d reads", step,
            (int)(device_reads - reads));
  }
  luna_close(r.ctx);
}

/* ---- a step without a backward ---- */
static void check_backward_missing(bool measure) {
  luna_options options = {.threads = 1, .measure = measure};
  luna_ctx *ctx = luna_open(&options);
  run r = run_open(ctx, 2, 2, 0);
  luna_optimizer *second = luna_sgd(r.params, NULL);
  CHECK(run_step(&r, 2, 0, 1) == LUNA_OK && luna_optimizer_step(second) == LUNA_OK, "two optimisers, one backward: %s",
        luna_error(ctx));
  luna_begin_step(ctx);
  run_loss(&r, 2, 1, 1);
  CHECK(luna_optimizer_step(r.optimizer) == LUNA_BAD_ARGUMENT && luna_error_id_of(ctx) == LUNA_ERROR_NO_BACKWARD &&
            luna_error_status(ctx) == LUNA_BAD_ARGUMENT,
        "a step without a backward: \"%s\"", luna_error(ctx));
  luna_begin_step(ctx);
  CHECK(luna_backward(NULL) == LUNA_BAD_ARGUMENT && luna_optimizer_step(r.optimizer) == LUNA_BAD_ARGUMENT &&
            luna_optimizer_step(second) == LUNA_BAD_ARGUMENT,
        "a null loss makes a step");
  for (int i = 0; i < 3; i++) {
    luna_begin_step(ctx);
    CHECK(luna_backward(run_loss(&r, 2, i, 1)) == LUNA_OK, "%s", luna_error(ctx));
  }
  luna_begin_inference(ctx);
  CHECK(luna_optimizer_step(r.optimizer) == LUNA_OK && luna_optimizer_step(r.optimizer) == LUNA_BAD_ARGUMENT,
        "accumulated gradients make one step: %s", luna_error(ctx));
  luna_begin_step(ctx);
  CHECK(luna_optimizer_advance(r.optimizer) == LUNA_OK && luna_optimizer_apply(r.optimizer) == LUNA_OK,
        "the halves look for a backward: %s", luna_error(ctx));
  if (!measure)
    CHECK(luna_optimizer_steps(r.optimizer) == 3 && luna_optimizer_steps(second) == 1, "refused steps count");
  luna_close(ctx);
}

/* ---- parameters made after the optimiser: as if made before it, but in no loss until then ---- */
static void check_late(int kind) {
  enum { JOIN = 3, STEPS = 7 };
  const luna_param_group group = {.name = "c", .lr_factor = 0.5f, .decay_factor = 2},
      all = {.max_rank = 2, .lr_factor = 2, .decay_factor = -1};
  run early = run_open(ctx_open(), 3, kind, 0), late = run_open(ctx_open(), 1, kind, 0), again;
  bytes file = {NULL, 0};
  for (int i = 0; i < 2; i++)
    CHECK(luna_optimizer_add_group(i ? late.optimizer : early.optimizer, &all) == LUNA_OK, "%s", luna_error(late.ctx));
  CHECK(luna_optimizer_add_group(early.optimizer, &group) == LUNA_OK &&
            luna_optimizer_add_group(late.optimizer, &group) == LUNA_MISMATCH,
        "groups: %s", luna_error(early.ctx));
  for (int step = 0; step < STEPS; step++) {
    const int params = step < JOIN ? 1 : 3;
    if (step == JOIN) {
      run_param(&late, 1);
      free(saved(&late).at); /* takes it in; the next only the step */
      run_param(&late, 2);
      CHECK(luna_optimizer_add_group(late.optimizer, &group) == LUNA_OK, "a group of a late parameter: %s",
            luna_error(late.ctx));
    }
    CHECK(run_step(&early, params, step, 1) == LUNA_OK && run_step(&late, params, step, 1) == LUNA_OK, "%s %s",
          luna_error(early.ctx), luna_error(late.ctx));
    if (step >= JOIN)
      CHECK(same_bytes(saved(&early), saved(&late)), "optimiser %d: with late parameters step %d has other bits", kind,
            step);
    if (step == JOIN + 1) file = saved(&late);
  }
  /* into an optimiser whose parameters are late too */
  again = run_open(ctx_open(), 1, kind, 0);
  CHECK(luna_optimizer_add_group(again.optimizer, &all) == LUNA_OK, "%s", luna_error(again.ctx));
  run_param(&again, 1), run_param(&again, 2);
  CHECK(luna_load_training(again.optimizer, luna_bytes(file.at, file.size)) == LUNA_OK &&
            luna_optimizer_add_group(again.optimizer, &group) == LUNA_OK,
        "%s", luna_error(again.ctx));
  for (int step = JOIN + 2; step < STEPS; step++) run_step(&again, 3, step, 1);
  CHECK(same_bytes(saved(&early), saved(&again)), "optimiser %d: a run with late parameters resumes elsewhere", kind);
  free(file.at);
  luna_close(early.ctx), luna_close(late.ctx), luna_close(again.ctx);
}
/* memory ends while parameters join: the step does nothing, and made again it is the step that it would have been */
static void check_late_memory(void) {
  heap h;
  run want = run_open(ctx_open(), 1, 2, 0);
  for (int step = 0; step < 3; step++) {
    if (step == 1) run_param(&want, 1), run_param(&want, 2);
    run_step(&want, step ? 3 : 1, step, 1);
  }
  int failures = 0;
  for (int64_t k = 0, going = 1; going; k++) {
    run r = run_open(heap_open(&h, 0, 0), 1, 2, 0);
    run_step(&r, 1, 0, 1);
    bytes before = saved(&r), after = {NULL, 0};
    run_param(&r, 1), run_param(&r, 2);
    luna_begin_step(r.ctx);
    luna_backward(run_loss(&r, 3, 1, 1));
    h.from = h.calls + k, h.to = INT64_MAX;
    const luna_status status = luna_optimizer_step(r.optimizer);
    h.from = h.to = 0;
    going = status != LUNA_OK;
    if (going) {
      failures++;
      CHECK(status == LUNA_OUT_OF_MEMORY && luna_optimizer_steps(r.optimizer) == 1 && luna_error(r.ctx)[0],
            "joining without memory: %s", luna_error(r.ctx));
      luna_begin_step(r.ctx);
      CHECK(luna_optimizer_step(r.optimizer) == LUNA_OK, "joining again: %s",
            luna_error(r.ctx)); /* its backward was not used */
    }
    after = saved(&r);
    CHECK(after.size > before.size, "late parameters are not saved");
    free(before.at), free(after.at);
    run_step(&r, 3, 2, 1);
    float *a = common_parameters(want.params), *b = common_parameters(r.params);
    CHECK(memcmp(a, b, (size_t)luna_params_element_count(r.params) * sizeof(float)) == 0,
          "after memory ended in a join, training goes elsewhere");
    free(a), free(b);
    luna_close(r.ctx);
  }
  CHECK(failures > 3, "only %d allocations of a join failed", failures);
  luna_close(want.ctx);
}

/* dim, ffn and omega have the same bounds in every layer and model: the largest are accepted, others are refused */
enum { BOUND_KINDS = 11 };
static luna_status bounded(int kind, luna_params *params, luna_layer_config c) {
  union {
    luna_nested_attention_layer nested; luna_causal_attention_layer causal; luna_attention_layer attention;
    luna_encoder_layer encoder_layer; luna_decoder_layer decoder_layer; luna_causal_layer causal_layer;
    luna_encoder encoder; luna_lm lm; luna_classifier classifier; luna_masked_lm masked_lm; luna_seq2seq seq2seq;
  } u;
  const luna_encoder_config e = {.layers = 1, .layer = c};
  luna_layer_config other = c;
  other.attention = LUNA_ATTENTION_SOFTMAX;
  switch (kind) {
    case 0: return luna_nested_attention_layer_init(&u.nested, params, "", &c);
    case 1: return luna_causal_attention_layer_init(&u.causal, params, "", &c);
    case 2: return luna_attention_layer_init(&u.attention, params, "", &other);
    case 3: return luna_encoder_layer_init(&u.encoder_layer, params, "", &c);
    case 4: return luna_decoder_layer_init(&u.decoder_layer, params, "", &c);
    case 5: return luna_causal_layer_init(&u.causal_layer, params, "", &c);
    case 6: return luna_encoder_init(&u.encoder, params, "", 9, &e);
    case 7: return luna_lm_init(&u.lm, params, &(luna_lm_config){.layers = 1, .layer = c});
    case 8: return luna_classifier_init(&u.classifier, params,
                                        &(luna_classifier_config){.vocab = 9, .classes = 2, .encoder = e});
    case 9: return luna_masked_lm_init(&u.masked_lm, params, &(luna_masked_lm_config){.vocab = 9, .encoder = e});
    default: return luna_seq2seq_init(&u.seq2seq, params, &(luna_seq2seq_config){.vocab = 9, .encoder = e});
  }
}
static void check_bounds(void) {
  static const struct {
    luna_layer_config config;
    const char *says;                /* null: accepted */
  } bounds[] = {
    {{.dim = 1 << 20, .heads = 1, .ffn = 1 << 22, .omega = LUNA_ACTIVATION_ELU1}, NULL},
    {{.dim = (1 << 20) + 1, .heads = 1, .ffn = 8}, "dim is 1048577, outside 1..1048576"},
    {{.dim = 8, .heads = 1, .ffn = (1 << 22) + 1}, "ffn is 4194305, outside 1..4194304"},
    {{.dim = 8, .heads = 1, .omega = LUNA_ACTIVATION_GELU}, "omega is 2"},
    {{.dim = 8, .heads = 1, .omega = LUNA_ACTIVATION_SIGMOID}, "omega is 6"},
    {{.dim = 8, .heads = 1, .sharing = (luna_sharing)4}, "sharing is 4"}};
  for (int i = sizeof(size_t) < 8; i < 6; i++) /* where the largest does not fit */
    for (int kind = 0; kind < BOUND_KINDS; kind++) {
      const bool refused = bounds[i].says != NULL;
      luna_ctx *ctx = luna_open(&(luna_options){.measure = true, .threads = 1});
      const luna_status status = bounded(kind, luna_params_open(ctx), bounds[i].config);
      CHECK(refused ? status == LUNA_BAD_ARGUMENT && strstr(luna_error(ctx), bounds[i].says) : status == LUNA_OK,
            "bounds %d of kind %d: %s", i, kind, luna_error(ctx));
      luna_close(ctx);
    }
}

int main(void) {
  write_files(common_build());
  for (int kind = 0; kind < KINDS; kind++) {
    check_refused((made_kind)kind, 1), check_refused((made_kind)kind, 2);
    check_nulls((made_kind)kind);
    check_memory((made_kind)kind);
  }
  check_param();
  check_open();
  check_regression();
  check_defaults();
  check_bounds();
  check_null_calls();
  check_pairs();
  check_errors();
  check_contradictions();
  for (int kind = 0; kind < 4; kind++) check_not_finite(kind), check_late(kind);
  check_not_finite_resumed();
  check_custom_fails();
  check_not_finite_two();
  check_device();
  check_backward_missing(false), check_backward_missing(true);
  check_late_memory();
  free(lm_file.at), free(classifier_file.at);
  remove(lm_path), remove(classifier_path);
  return test_report("setup");
}
