/* Mistakes that a newcomer makes. Each must end in a sentence that names the call, the argument and the
   remedy, and in nothing else. */
#include "test.h"
#define LUNA_IMPLEMENTATION
#include "luna.h"
#include "examples/luna_ops.h"
#include "examples/luna_print.h"
#include "common.h"

enum { BATCH = 2, N = 12, VOCAB = 11 };

static bool says(const luna_ctx *ctx, const char *text) { return strstr(luna_error(ctx), text) != NULL; }
/* one check: the sentence has these words */
#define SAYS(ctx, ...) says_all(__LINE__, ctx, (const char *const[]){ __VA_ARGS__, NULL })
static void says_all(int line, const luna_ctx *ctx, const char *const *words) {
  for (; *words; words++) CHECK(says(ctx, *words), "line %d: \"%s\" is not in: %s", line, *words, luna_error(ctx));
}

/* ---- tensors of a step that is over ---- */
static luna_tensor *loss_of(const luna_lm *model, int64_t n) {
  static int32_t tokens[600], labels[600];
  for (int i = 0; i < 600; i++) tokens[i] = i * i % VOCAB, labels[i] = (i * i + 1) % VOCAB;
  return luna_lm_loss(model, &(luna_input){ .tokens = tokens, .batch = 1, .n = n }, labels);
}
static void check_stale(luna_options options) {
  luna_ctx *ctx = luna_open(&options);
  luna_params *params = luna_params_open(ctx);
  luna_lm model;
  float values[64];
  CHECK(luna_lm_init(&model, params, &(luna_lm_config){ .vocab = VOCAB,
                                                        .layer = { .dim = 16, .heads = 2 } }) == LUNA_OK, "%s",
        luna_error(ctx));
  for (int way = 0; way < 8; way++) {
    luna_begin_step(ctx);
    const int64_t shape[2] = {4, 4}, flat[1] = {16};
    luna_tensor *x = luna_require_grad(luna_scale(luna_tensor_new(ctx, NULL, 2, shape), 2)),
        *view = luna_reshape(x, 1, flat);
    luna_tensor *loss = luna_add(loss_of(&model, 600), luna_sum(luna_mul(view, view), 0));
    CHECK(luna_backward(loss) == LUNA_OK && isfinite(luna_item(loss)), "%s", luna_error(ctx));
    if (way % 2) luna_begin_inference(ctx);
    else luna_begin_step(ctx);
    luna_tensor *now = way % 4 < 2 ? NULL : loss_of(&model, 30); /* at once, and after as much work again */
    switch (way / 4) {
      case 0:
        CHECK(isnan(luna_item(loss)) && luna_error_id_of(ctx) == LUNA_ERROR_RELEASED,
              "a loss of the last step is read: %s", luna_error(ctx));
        SAYS(ctx, "luna_item", "a new step began");
        CHECK(luna_read(x, values) != LUNA_OK && luna_read(view, values) != LUNA_OK &&
              luna_read_grad(x, values) != LUNA_OK,
              "a tensor of the last step is read");
        CHECK(!x->data && !luna_keep(x), "a tensor of the last step is kept");
        break;
      default:
        if (way % 2 == 0)
          CHECK(luna_backward(loss) != LUNA_OK && luna_error_id_of(ctx) == LUNA_ERROR_RELEASED, "%s", luna_error(ctx));
        luna_begin_step(ctx);
        luna_begin_inference(ctx); /* two steps later it may be another tensor, and is never another thing */
        (void)luna_item(loss);
        (void)luna_read(x, values);
        luna_begin_step(ctx);
        CHECK(!luna_add(now ? now : loss, loss) || true, "never");
    }
    luna_begin_step(ctx);
    loss = loss_of(&model, 600);
    luna_begin_step(ctx);
    CHECK(!luna_scale(loss, 2) && luna_error_id_of(ctx) == LUNA_ERROR_RELEASED,
          "an op takes a tensor of the last step: %s", luna_error(ctx));
    luna_params_zero_grad(params);
  }
  luna_close(ctx);
}

/* Every call with a tensor of an earlier step fails, however long that is over, with the one sentence, and reads and
   changes nothing, though another tensor lies where what it was a view of did. */
static void count_released(void *user, luna_status status, const char *sentence) {
  *(int *)user += status == LUNA_BAD_ARGUMENT && strstr(sentence, "were released") != NULL;
}
static void swallow_text(void *user, const char *text) { (void)user, (void)text; }
static void check_ended(luna_tensor *t, int *released, const char *what) {
  static const int64_t flat[1] = {-1};
  static const int axes[2] = {1, 0};
  float values[64 * 64];
  int32_t indices[64 * 64];
#define ENDED(call) \
  do { \
    *released = 0; \
    CHECK(call, "%s: %s", what, #call); \
    CHECK(*released == 1, "%s: %s does not say that it was released", what, #call); \
  } while (0)
  ENDED(!luna_keep(t));
  ENDED(!luna_require_grad(t));
  ENDED(!luna_scale(t, 2));
  ENDED(!luna_mean_all(t));
  ENDED(!luna_reshape(t, 1, flat));
  ENDED(!luna_detach(t));
  ENDED(!luna_slice(t, 0, 0, 1));
  ENDED(!luna_permute(t, axes));
  ENDED(!luna_activate(t, LUNA_ACTIVATION_NONE));
  ENDED(!luna_dropout(t, 0));
  ENDED(!luna_expand(t, 1));
  ENDED(!luna_clamp(t, 0, 1));
  ENDED(!luna_as_part(t));
  ENDED(!luna_concat(&t, 1, 0));
  ENDED(!luna_softmax_attention(t, t, t, NULL));
  ENDED(luna_read(t, values) == LUNA_BAD_ARGUMENT);
  ENDED(luna_read_grad(t, values) == LUNA_BAD_ARGUMENT);
  ENDED(luna_write(t, values) == LUNA_BAD_ARGUMENT);
  ENDED(luna_argmax(t, indices) == LUNA_BAD_ARGUMENT);
  ENDED(luna_print(t, swallow_text, NULL) == LUNA_BAD_ARGUMENT);
#undef ENDED
  CHECK(!t->data && !t->grad && !t->base, "%s points to memory", what);
}
static void check_old(luna_options options) {
  const int64_t large[2] = {40, 40}, small[2] = {1, 1};
  int released = 0;
  options.log = count_released, options.log_user = &released;
  for (int age = 1; age < 6; age++) {
    luna_ctx *ctx = luna_open(&options);
    luna_tensor *w = luna_param(luna_params_open(ctx), "w", 2, large, (luna_init){LUNA_INIT_NORMAL, 1});
    luna_begin_step(ctx);
    luna_tensor *x = luna_require_grad(luna_tensor_new(ctx, NULL, 2, large)), *part = luna_slice(x, 0, 39, 1);
    luna_tensor *y = luna_mul(w, x), *view = luna_slice(w, 0, 1, 1), *one = luna_mean_all(y);
    CHECK(luna_backward(one) == LUNA_OK, "%s", luna_error(ctx));
    for (int i = 0; i < age; i++) luna_begin_step(ctx);
    luna_tensor *now = luna_tensor_new(ctx, NULL, 2, small); /* where x was, or was once */
    if (age % 2) check_ended(x, &released, "a tensor");
    check_ended(part, &released, "a view");
    check_ended(y, &released, "a result");
    check_ended(view, &released, "a view of a parameter");
    const int before = released;
    CHECK(isnan(luna_item(one)) && luna_backward(one) == LUNA_BAD_ARGUMENT && released == before + 1,
          "a loss of an earlier step: %s", luna_error(ctx));
    luna_begin_step(ctx);
    CHECK(now && luna_error_status(ctx) == LUNA_OK, "%s", luna_error(ctx));
    luna_close(ctx);
  }
}
/* a scope that was opened in an earlier step releases nothing of this one */
static void check_old_scope(luna_options options) {
  const int64_t shape[2] = {4, 4};
  luna_ctx *ctx = luna_open(&options);
  luna_tensor *w = luna_param(luna_params_open(ctx), "w", 2, shape, (luna_init){LUNA_INIT_NORMAL, 1});
  for (int again = 0; again < 2; again++) {
    luna_begin_step(ctx);
    const luna_scope scope = again ? luna_scope_recompute(ctx) : luna_scope_begin(ctx);
    luna_begin_step(ctx);
    luna_tensor *x = luna_softmax(w, NULL), *y = luna_mul(luna_add(x, luna_tensor_new(ctx, NULL, 2, shape)), w);
    CHECK(luna_scope_end(scope, &y, 1) == y && x->data && y->data, "a scope of an earlier step releases data");
    CHECK(luna_backward(luna_mean_all(y)) == LUNA_OK, "%s", luna_error(ctx));
  }
  luna_close(ctx);
}

/* an init whose hook makes tensors, and fails */
static void *hook_init(void *user, luna_params *params, const char *prefix, const luna_layer_config *config) {
  luna_ctx *ctx = (luna_ctx *)user;
  const int64_t shape[1] = {3};
  luna_tensor *x = luna_tensor_new(ctx, NULL, 1, shape);
  (void)params, (void)prefix, (void)config;
  for (int i = 0; i < 100; i++) x = luna_add_scalar(x, 1);
  return NULL;
}
static luna_tensor *hook_forward(void *layer, luna_attention_call *call) { return layer ? call->x : NULL; }
static void check_hook_init(luna_options options) {
  luna_ctx *ctx = luna_open(&options);
  const luna_attention_hook hook = {hook_init, hook_forward, ctx, NULL, NULL, NULL, NULL};
  luna_causal_layer layer;
  luna_params *params = luna_params_open(ctx);
  luna_lm model;
  for (int i = 0; i < 3; i++) {
    if (i) luna_begin_step(ctx);
    CHECK(luna_causal_layer_init(&layer, params, "a.",
        &(luna_layer_config){ .dim = 8, .heads = 1, .hook = &hook }) != LUNA_OK, "a null hook");
    CHECK(luna_params_tensor_count(params) == 0, "a failed init leaves parameters");
  }
  luna_close(ctx);
  ctx = luna_open(&options);
  params = luna_params_open(ctx);
  luna_lm_init(&model, params, &(luna_lm_config){ .vocab = VOCAB, .layer = { .dim = 16, .heads = 2 } });
  luna_begin_step(ctx);
  const int64_t shape[1] = {3};
  luna_tensor *x = luna_tensor_new(ctx, NULL, 1, shape);
  const luna_attention_hook again = {hook_init, hook_forward, ctx, NULL, NULL, NULL, NULL};
  CHECK(luna_causal_layer_init(&layer, params, "a.", &(luna_layer_config){ .dim = 8, .heads = 1,
      .hook = &again }) != LUNA_OK, "a null hook");
  CHECK(x && luna_add_scalar(x, 1), "%s", luna_error(ctx));
  luna_close(ctx);
}

/* ---- begin, backward, step in another order ---- */
static void check_order(void) {
  luna_ctx *ctx = luna_open(NULL);
  luna_params *params = luna_params_open(ctx);
  luna_lm model;
  luna_lm_init(&model, params, &(luna_lm_config){ .vocab = VOCAB, .layer = { .dim = 16, .heads = 2 } });
  luna_optimizer *adam = luna_adamw(params, NULL);
  luna_tensor *loss = loss_of(&model, 20);
  CHECK(luna_backward(loss) != LUNA_OK, "luna_backward without luna_begin_step");
  SAYS(ctx, "luna_backward", "luna_begin_step");
  luna_begin_step(ctx);
  size_t bytes = 0;
  for (int step = 0; step < 3; step++) {                         /* a loop whose begin was forgotten */
    const luna_status status = luna_backward(loss_of(&model, 20));
    CHECK((status == LUNA_OK) == (step == 0), "round %d without luna_begin_step: %s", step, luna_error(ctx));
    CHECK((luna_optimizer_step(adam) == LUNA_OK) == (step == 0), "round %d: a step", step);
    if (step == 1) bytes = luna_memory(ctx).current;
    if (step == 1) CHECK(luna_error_id_of(ctx) == LUNA_ERROR_SECOND_BACKWARD, "%s", luna_error(ctx));
  }
  SAYS(ctx, "luna_backward", "luna_begin_step", "in the loop");
  CHECK(bytes > 0, "no memory is counted");
  for (int step = 0; step < 3; step++) {
    luna_begin_step(ctx);
    CHECK(luna_backward(loss_of(&model, 20)) == LUNA_OK, "%s", luna_error(ctx));
  }
  CHECK(luna_optimizer_step(adam) == LUNA_OK, "accumulated: %s", luna_error(ctx));
  luna_close(ctx);
}

/* ---- files of another model ---- */
typedef struct buffer { unsigned char at[1 << 17]; size_t size; } buffer;
static bool put(void *user, const void *bytes, size_t size) {
  buffer *b = (buffer *)user;
  if (size > sizeof b->at - b->size) return false;
  memcpy(b->at + b->size, bytes, size);
  b->size += size;
  return true;
}
static void save_to(buffer *b, const luna_params *params) {
  luna_io io = {0};
  io.write = put, io.user = b, b->size = 0;
  CHECK(luna_save(params, luna_callbacks(&io)) == LUNA_OK, "a file cannot be made");
}
static luna_classifier_config classifier_config(int change) {
  luna_classifier_config c = { .vocab = VOCAB, .classes = 3, .pooling = LUNA_POOLING_MEAN,
                               .encoder = { .layers = 1,
                                           .layer = { .dim = 8, .heads = 2, .memory = 4, .dropout = 0.1f } } };
  switch (change) {
    case 1: c.encoder.layer.heads = 4; break;
    case 2: c.pooling = LUNA_POOLING_CLS; break;
    case 3: c.encoder.positions = LUNA_POSITIONS_NONE; break;
    case 4: c.encoder.layer.activation = LUNA_ACTIVATION_GELU; break;
    case 5: c.encoder.layer.pre_norm = true; break;
    case 6: c.encoder.layer.attention = LUNA_ATTENTION_SOFTMAX; break;
    case 7: c.encoder.layers = 2; break;
    case 8: c.encoder.layer.norm = LUNA_NORM_RMS; break;
    case 9: c.per_step = true; break;
    case 10: c.encoder.layer.pack_heads = 1; break;
    case 11: c.encoder.layer.dropout = 0.3f, c.encoder.max_length = 100; break; /* this is the same model */
    default: break;
  }
  return c;
}
static void check_load(void) {
  static const char *const field[11][3] = {{"", "", ""}, {"luna.heads", "is 2 in", "and 4 in"},
                                           {"luna.pooling", "is 2 in", "and 1 in"},
    {"luna.positions", "is 2 in", "and 1 in"}, {"luna.activation", "is 1 in", "and 2 in"},
        {"luna.pre_norm", "is 0 in", "and 1 in"},
    {"luna.attention", "is 0 in", "and 1 in"}, {"luna.layers", "is 1 in", "and 2 in"},
        {"luna.norm", "is 0 in", "and 1 in"},
    {"luna.per_step", "is 0 in", "and 1 in"}, {"luna.pack_heads", "is 2 in", "and 1 in"}};
  static buffer file, before, after;
  luna_ctx *ctx = luna_open(NULL);
  luna_params *params = luna_params_open(ctx);
  luna_classifier model;
  luna_lm lm;
  luna_classifier_config config = classifier_config(0);
  CHECK(luna_classifier_init(&model, params, &config) == LUNA_OK, "%s", luna_error(ctx));
  save_to(&file, params);
  for (int change = 0; change <= 12; change++) {
    luna_ctx *other = luna_open(NULL);
    luna_params *set = luna_params_open(other);
    config = classifier_config(change);
    const luna_status made = change < 12 ? luna_classifier_init(&model, set, &config) : luna_lm_init(&lm, set, NULL);
    CHECK(made == LUNA_OK, "%d: %s", change, luna_error(other));
    if (change < 12) save_to(&before, set);
    const luna_status status = luna_load(set, luna_bytes(file.at, file.size));
    if (change == 0 || change == 11) {
      CHECK(status == LUNA_OK, "the same model is not loaded: %s", luna_error(other));
    } else {
      CHECK(status == LUNA_MISMATCH && luna_error_id_of(other) == LUNA_ERROR_FILE_CONFIG, "change %d is loaded: %s",
            change, luna_error(other));
      if (change == 12) SAYS(other, "luna_load", "luna.kind", "classifier", "causal_lm", "luna_load_model");
      else SAYS(other, "luna_load", field[change][0], field[change][1], field[change][2], "luna_load_model");
      if (change < 12) save_to(&after, set);
      CHECK(change == 12 || (after.size == before.size && memcmp(after.at, before.at, after.size) == 0),
            "%d: a failed load changes something", change);
    }
    luna_close(other);
  }
  luna_close(ctx);
}

/* each kind by its own call, and by the others' */
static luna_status load_kind(int kind, luna_model *m, luna_params *params, const buffer *b) {
  switch (kind) {
    case 0: return luna_load_model(m, params, luna_bytes(b->at, b->size));
    case LUNA_MODEL_LM: return luna_load_model_of(LUNA_MODEL_LM, &m->lm, params, luna_bytes(b->at, b->size));
    case LUNA_MODEL_CLASSIFIER: return luna_load_model_of(LUNA_MODEL_CLASSIFIER, &m->classifier, params,
                                                          luna_bytes(b->at, b->size));
    case LUNA_MODEL_MASKED_LM: return luna_load_model_of(LUNA_MODEL_MASKED_LM, &m->masked_lm, params, luna_bytes(b->at,
        b->size));
    default: return luna_load_model_of(LUNA_MODEL_SEQ2SEQ, &m->seq2seq, params, luna_bytes(b->at, b->size));
  }
}
static luna_tensor *kind_logits(int kind, const luna_model *m) {
  static const int32_t tokens[6] = {1, 2, 3, 4, 5, 6};
  const luna_input in = { .tokens = tokens, .batch = 1, .n = 6 };
  return kind == LUNA_MODEL_LM ? luna_lm_forward(&m->lm, &in) : kind == LUNA_MODEL_CLASSIFIER ?
      luna_classifier_forward(&m->classifier, &in) :
         kind == LUNA_MODEL_MASKED_LM ? luna_masked_lm_forward(&m->masked_lm, &in) :
             luna_seq2seq_forward(&m->seq2seq, &in, &in);
}
static void check_kinds(void) {
  static const char *const names[] = {"", "causal_lm", "classifier", "masked_lm", "seq2seq"};
  static buffer file;
  const luna_encoder_config e = { .layers = 1, .layer = { .dim = 8, .heads = 2, .memory = 4 } };
  for (int kind = 1; kind <= 4; kind++) {
    luna_ctx *ctx = luna_open(NULL);
    luna_params *params = luna_params_open(ctx);
    luna_model m = {0}, loaded;
    float want[6 * 256], got[6 * 256];
    if (kind == LUNA_MODEL_LM)
      luna_lm_init(&m.lm, params, &(luna_lm_config){ .vocab = VOCAB, .layer = { .dim = 8, .heads = 2 } });
    if (kind == LUNA_MODEL_CLASSIFIER)
      luna_classifier_init(&m.classifier, params, &(luna_classifier_config){ .vocab = VOCAB, .encoder = e });
    if (kind == LUNA_MODEL_MASKED_LM)
      luna_masked_lm_init(&m.masked_lm, params, &(luna_masked_lm_config){ .vocab = VOCAB, .encoder = e });
    if (kind == LUNA_MODEL_SEQ2SEQ)
      luna_seq2seq_init(&m.seq2seq, params, &(luna_seq2seq_config){ .vocab = VOCAB, .encoder = e });
    save_to(&file, params);
    luna_begin_inference(ctx);
    const luna_tensor *logits = kind_logits(kind, &m);
    const size_t bytes = (size_t)luna_count(logits) * sizeof(float);
    CHECK(luna_read(logits, want) == LUNA_OK, "%s", luna_error(ctx));
    for (int call = 0; call <= 4; call++) {
      luna_ctx *other = luna_open(NULL);
      luna_params *set = luna_params_open(other);
      const luna_status status = load_kind(call, &loaded, set, &file);
      if (call == 0 || call == kind) {
        luna_begin_inference(other);
        CHECK(status == LUNA_OK && luna_read(kind_logits(kind, &loaded), got) == LUNA_OK &&
              memcmp(got, want, bytes) == 0, "%s by call %d: %s",
              names[kind], call, luna_error(other));
      } else {
        CHECK(status == LUNA_BAD_FILE && luna_error_id_of(other) == LUNA_ERROR_FILE_KIND &&
              luna_params_tensor_count(set) == 0, "%s by call %d: %s",
              names[kind], call, luna_error(other));
        SAYS(other, names[kind], names[call], "luna_load_model");
      }
      luna_close(other);
    }
    luna_close(ctx);
  }
}

/* ---- inputs of another kind, and sentences that name the call, the argument and the remedy ---- */
static void check_inputs(void) {
  luna_ctx *ctx = luna_open(NULL);
  luna_lm lm;
  luna_classifier classifier;
  luna_seq2seq seq2seq;
  luna_lm detector;
  const luna_encoder_config e = { .layers = 1, .layer = { .dim = 8, .heads = 2, .memory = 4 },
                                  .positions = LUNA_POSITIONS_LEARNED,
                                 .max_length = N };
  static const int32_t good[2 * N] = {0}, labels[2 * N] = {0}, bad[2 * N] = {0, 1, 2, VOCAB}, lengths[2] = {N, N + 1},
      four[2 * N] = {0, 0, 0, 0, 0, VOCAB};
  float x[2 * N * 3] = {0};
  luna_lm_init(&lm, luna_params_open(ctx), &(luna_lm_config){ .vocab = VOCAB, .layer = { .dim = 8, .heads = 2 } });
  luna_lm_init(&detector, luna_params_open(ctx), &(luna_lm_config){ .features = 3, .outputs = 2,
                                                                    .layer = { .dim = 8, .heads = 2 } });
  luna_classifier_init(&classifier, luna_params_open(ctx), &(luna_classifier_config){ .vocab = VOCAB, .encoder = e });
  CHECK(luna_seq2seq_init(&seq2seq, luna_params_open(ctx), &(luna_seq2seq_config){ .vocab = VOCAB, .encoder = e }) ==
        LUNA_OK, "%s", luna_error(ctx));
  const luna_input features = { .features = x, .batch = 2, .n = N }, tokens = { .tokens = good, .batch = 2, .n = N },
                   outside = { .tokens = bad, .batch = 2, .n = N }, longer = { .tokens = good, .batch = 1, .n = N + 1 },
                   ragged = { .tokens = good, .lengths = lengths, .batch = 2, .n = N };
#define FAILS(call, ...) \
  (luna_begin_inference(ctx), CHECK((call) == NULL, "%s succeeds", #call), SAYS(ctx, __VA_ARGS__))
  FAILS(luna_lm_forward(&lm, &features), "luna_lm_forward: ", "input.tokens", "in place of features");
  FAILS(luna_lm_loss(&lm, &features, labels), "luna_lm_loss: ", "input.tokens");
  FAILS(luna_classifier_forward(&classifier, &features), "luna_classifier_forward: ", "input.tokens");
  FAILS(luna_seq2seq_forward(&seq2seq, &features, &tokens), "luna_seq2seq_forward: ", "source.tokens");
  FAILS(luna_seq2seq_forward(&seq2seq, &tokens, &features), "luna_seq2seq_forward: ", "target.tokens");
  FAILS(luna_lm_forward(&detector, &tokens), "luna_lm_forward: ", "input.features", "in place of tokens");
  FAILS(luna_lm_forward(&lm, &outside), "luna_lm_forward: ", "input.tokens[3] is 11, outside 0..10");
  FAILS(luna_seq2seq_forward(&seq2seq, &tokens, &outside), "luna_seq2seq_forward: ",
        "target.tokens[3] is 11, outside 0..10");
  FAILS(luna_classifier_forward(&classifier, &ragged), "luna_classifier_forward: ",
        "input.lengths[1] is 13, outside 0..12");
  FAILS(luna_classifier_forward(&classifier, &longer), "luna_classifier_forward: ", "13", "max_length 12");
  FAILS(luna_lm_loss(&lm, &tokens, four), "luna_lm_loss: labels[5] is 11; there are 11 classes");
  const int64_t five[5] = {1, 1, 1, 1, 1};
  FAILS(luna_tensor_new(ctx, NULL, 5, five), "luna_tensor_new: rank is 5, outside 0..4");
  luna_begin_inference(ctx);
  CHECK(luna_input_layer_fit(&lm.input, &features) == LUNA_BAD_ARGUMENT &&
        luna_input_layer_fit(&classifier.encoder.input, &features) == LUNA_BAD_ARGUMENT,
        "features are fitted to a model of tokens");
  SAYS(ctx, "luna_input_layer_fit: ", "tokens", "config");
  x[7] = INFINITY;
  FAILS(luna_lm_forward(&detector, &features), "luna_lm_forward: ", "input.features[7] is Inf",
        "NaN where a number is missing");
  FAILS(luna_input_layer_forward(&detector.input, &features), "luna_input_layer_forward: ", "features[7] is Inf");
#undef FAILS
  const int32_t some[2] = {2, N};                                  /* padding may hold anything */
  luna_begin_inference(ctx);
  x[7] = 0, x[2 * 3] = -INFINITY;
  CHECK(luna_lm_forward(&detector, &(luna_input){ .features = x, .lengths = some, .batch = 2, .n = N }), "%s",
        luna_error(ctx));
  CHECK(luna_input_layer_fit(&detector.input, &(luna_input){ .features = x, .lengths = some, .batch = 2, .n = N }) ==
        LUNA_OK, "%s", luna_error(ctx));
  CHECK(!luna_adamw(lm.params, &(luna_optimizer_config){ .schedule = { .decay = LUNA_DECAY_COSINE } }),
        "a cosine without an end");
  SAYS(ctx, "luna_adamw: schedule.total is 0", "number of steps");
  luna_close(ctx);
}

/* a stream refuses Inf, which would stay in its sums, and reads on as if it had not come */
static void check_stream(void) {
  luna_ctx *ctx = luna_open(NULL);
  luna_lm lm, detector;
  const int32_t token = 1;
  luna_lm_init(&lm, luna_params_open(ctx), &(luna_lm_config){ .vocab = VOCAB, .layer = { .dim = 8, .heads = 2 } });
  CHECK(luna_lm_init(&detector, luna_params_open(ctx), &(luna_lm_config){ .features = 3, .outputs = 2,
                     .layer = { .dim = 8, .heads = 2 } }) == LUNA_OK, "%s",
        luna_error(ctx));
  const float scale[3] = {1, 100, 1};
  luna_write(detector.input.scale, scale);
  luna_stream *of_tokens = luna_stream_open(&lm, NULL), *a = luna_stream_open(&detector, NULL),
      *b = luna_stream_open(&detector, NULL);
  for (int t = 0; t < 20; t++) {
    float x[2][3] = {{(float)t, 1, t % 3 ? NAN : 2}, {INFINITY, 0, 0}};
    if (t % 3 == 1) x[1][0] = 0, x[1][2] = -INFINITY;
    if (t % 3 == 2) x[1][0] = 0, x[1][1] = 3e38f;                    /* finite, but not once it is standardised */
    if (t % 5 == 3) x[1][0] = 0, x[1][1] = 0, x[1][2] = -1e15f;      /* finite, but not once a layer has read it */
    CHECK(!luna_stream_step_features(a, x[1]) && luna_stream_error_id(a) == LUNA_ERROR_STREAM_FEATURE &&
          strstr(luna_stream_error(a), "NaN"), "Inf is read");
    CHECK(!luna_stream_prefill(a, &(luna_input){ .features = x[0], .n = 2 }) && luna_stream_position(a) == t,
          "Inf is read in a prefill");
    const float *y = luna_stream_step_features(a, x[0]), *z = luna_stream_step_features(b, x[0]);
    CHECK(y && z && memcmp(y, z, 2 * sizeof(float)) == 0 && isfinite(y[0]),
          "step %d: refused numbers leave a trace: %s", t, luna_stream_error(a));
  }
  luna_begin_inference(ctx);
  const float large[6] = {0, 0, 0, 0, 0, 1e15f};
  CHECK(!luna_lm_forward(&detector, &(luna_input){ .features = large, .batch = 1, .n = 2 }) &&
        luna_error_id_of(ctx) == LUNA_ERROR_FEATURE_LARGE && strstr(luna_error(ctx), "features[5]"),
        "a whole pass reads 1e15: %s", luna_error(ctx));
  CHECK(!luna_stream_step(a, &token) && strstr(luna_stream_error(a), "luna_stream_step_features") &&
        strstr(luna_stream_error(a), "features"),
        "a token in a stream of features: %s", luna_stream_error(a));
  CHECK(!luna_stream_step_features(of_tokens, scale) &&
        strstr(luna_stream_error(of_tokens), "luna_stream_step_features") &&
        strstr(luna_stream_error(of_tokens), "reads tokens"),
        "features in a stream of tokens: %s", luna_stream_error(of_tokens));
  const int32_t beyond = VOCAB;
  CHECK(!luna_stream_step(of_tokens, &beyond) && strstr(luna_stream_error(of_tokens), "tokens[0] is 11, vocab is 11"),
        "a token beyond the vocabulary: %s", luna_stream_error(of_tokens));
  CHECK(!luna_stream_prefill(of_tokens, &(luna_input){ .tokens = &token }) &&
        strstr(luna_stream_error(of_tokens), "luna_stream_prefill: n is below 1"), "a prefill of nothing: %s",
        luna_stream_error(of_tokens));
  /* weights that are too large: the logits are given, and the sentence says what they are */
  luna_tensor *last = luna_params_at(detector.params, luna_params_tensor_count(detector.params) - 1, NULL);
  float *weights = common_floats(luna_count(last));
  for (int64_t i = 0; i < luna_count(last); i++) weights[i] = INFINITY;
  luna_write(last, weights);
  free(weights);
  luna_stream *c = luna_stream_open(&detector, NULL);
  const float good[3] = {1, 0, 2}, *y = luna_stream_step_features(c, good);
  CHECK(y && !isfinite(y[0]) && luna_stream_error_id(c) == LUNA_ERROR_STREAM_NOT_FINITE, "Inf is an answer: %s",
        luna_stream_error(c));
  luna_stream_close(c);
  luna_stream_close(of_tokens), luna_stream_close(a), luna_stream_close(b);
  luna_close(ctx);
}

/* the state of sequence `which` alone, in a stream of its model and batch; the position, bytes 16 to 23, is left out */
static char *state_of(luna_stream *spare, const luna_stream *s, int32_t which, size_t *size) {
  const int32_t order[2] = {which, which};
  *size = luna_stream_state_size(s);
  char *bytes = malloc(*size);
  CHECK(common_stream_copy(spare, s) == LUNA_OK && luna_stream_reorder(spare, order) == LUNA_OK &&
        luna_stream_state_save(spare, bytes, *size) == LUNA_OK, "%s", luna_stream_error(spare));
  memset(bytes + 16, 0, 8);
  return bytes;
}
static bool same_state(luna_stream *spare, const luna_stream *s, const char *before, int32_t which) {
  size_t size;
  char *now = state_of(spare, s, which, &size);
  const bool same = memcmp(before, now, size) == 0;
  free(now);
  return same;
}

/* A sequence whose features do not fit stays where it was, and the other of its batch makes its steps as if alone. */
static void check_misfits(luna_isa isa, luna_forget forget, int64_t convolution) {
  enum { F = 3 };
  luna_ctx *ctx = luna_open(NULL);
  luna_lm m;
  CHECK(luna_lm_init(&m, luna_params_open(ctx), &(luna_lm_config){ .features = F, .outputs = 2,
      .layer = { .dim = 8, .heads = 2, .forget = forget, .convolution = convolution } }) == LUNA_OK, "%s",
        luna_error(ctx));
  const luna_stream_config two = { .batch = 2, .isa = isa }, one = { .isa = isa };
  luna_stream *s = luna_stream_open(&m, &two), *spare = luna_stream_open(&m, &two), *alone = luna_stream_open(&m, &one);
  size_t size;
  for (int t = 0; t < 30; t++) {
    float x[2][F] = {{1, (float)(t % 7), NAN}, {2, 0, (float)(t % 5)}};
    const bool spoilt = t % 4 == 0;                                /* from the first step on */
    if (spoilt) x[1][t % F] = t % 8 ? 1e15f : -INFINITY;
    char *before = state_of(spare, s, 1, &size);
    const float *y = luna_stream_step_features(s, x[0]), *z = luna_stream_step_features(alone, x[0]);
    CHECK(y && z && memcmp(y, z, 2 * sizeof *y) == 0 && isfinite(y[0]), "step %d: a sequence disturbs another: %s", t,
          luna_stream_error(s));
    CHECK(!spoilt || (y && isnan(y[2]) && isnan(y[3]) && luna_stream_error_id(s) == LUNA_ERROR_STREAM_FEATURE),
          "step %d: %g of a refused sequence, %s", t, y ? (double)y[2] : 0, luna_stream_error(s));
    CHECK(spoilt || (y && isfinite(y[2]) && luna_stream_error_id(s) == LUNA_ERROR_NONE), "step %d: it stays: %s", t,
          luna_stream_error(s));
    CHECK(same_state(spare, s, before, 1) == (spoilt && t > 0) || t == 0, "step %d: the state", t);
    free(before);
  }
  const float bad[2][F] = {{1e20f, 0, 0}, {0, 0, INFINITY}};
  char *before = state_of(spare, s, 0, &size);
  CHECK(!luna_stream_step_features(s, bad[0]) && luna_stream_error_id(s) == LUNA_ERROR_STREAM_FEATURE &&
        luna_stream_position(s) == 30 && same_state(spare, s, before, 0), "a step that no sequence can make");
  free(before);
  luna_stream_close(s), luna_stream_close(spare), luna_stream_close(alone);
  luna_close(ctx);
}
/* Where weights make a row that is not finite, the answer is said to be so, and the state forgets it. */
static void check_overflow(luna_isa isa, luna_forget forget) {
  luna_ctx *ctx = luna_open(NULL);
  luna_lm m;
  CHECK(luna_lm_init(&m, luna_params_open(ctx), &(luna_lm_config){ .vocab = 4, .outputs = 2,
      .layer = { .dim = 8, .heads = 2, .forget = forget } }) == LUNA_OK, "%s", luna_error(ctx));
  float rows[4 * 8];
  CHECK(luna_read(m.embedding, rows) == LUNA_OK, "%s", luna_error(ctx));
  rows[3 * 8] = INFINITY;
  luna_write(m.embedding, rows);
  luna_stream *s = luna_stream_open(&m, &(luna_stream_config){ .isa = isa });
  const int32_t good = 1, bad = 3;
  int32_t many[70];                                                /* of which a stream reads 64 at once */
  for (int i = 0; i < 70; i++) many[i] = i == 40 ? bad : i % 3;
  for (int t = 0; t < 6; t++) {
    const float *y = luna_stream_step(s, &good);
    CHECK(y && isfinite(y[0]) && luna_stream_error_id(s) == LUNA_ERROR_NONE, "token %d: %s", t, luna_stream_error(s));
    y = t % 2 ? luna_stream_step(s, &bad) :
        luna_stream_prefill(s, &(luna_input){ .tokens = many, .n = t < 4 ? 70 : 60 });
    CHECK(y && luna_stream_error_id(s) == LUNA_ERROR_STREAM_NOT_FINITE, "Inf is an answer: %s", luna_stream_error(s));
  }
  luna_stream_close(s);
  luna_close(ctx);
}

/* a stream's memory that is too small: both numbers are said */
static void check_small_memory(void) {
  static double memory[20];
  luna_ctx *ctx = luna_open(NULL);
  luna_params *params = luna_params_open(ctx);
  luna_lm lm;
  const char *error = "";
  char want[100];
  size_t size;
  luna_lm_init(&lm, params, &(luna_lm_config){ .vocab = VOCAB, .layer = { .dim = 8, .heads = 2 } });
  luna_save(params, luna_buffer(NULL, 0, &size));
  char *bytes = malloc(size);
  CHECK(luna_save(params, luna_buffer(bytes, size, &size)) == LUNA_OK, "%s", luna_error(ctx));
  snprintf(want, sizeof want, "is 160, and luna_stream_size %zu", luna_stream_size(bytes, size, NULL, &error));
  CHECK(!luna_stream_open_bytes(bytes, size, NULL, memory, sizeof memory, &error) && strstr(error, want), "%s", error);
  CHECK(!luna_stream_open_bytes(bytes, size, NULL, memory, 1, &error) && strstr(error, "less than luna_stream_size"),
        "%s", error);
  free(bytes);
  luna_close(ctx);
}

/* ---- what fails in silence elsewhere ---- */
static int notes;                                                  /* of options.log, with LUNA_OK */
static char note[400];
static void take_note(void *user, luna_status status, const char *sentence) {
  (void)user;
  if (status != LUNA_OK) return;
  notes++;
  snprintf(note, sizeof note, "%s", sentence);
}
/* Labels of the padding are ignored where lengths say what it is: the loss and its gradients have the bits of labels
   that are -1 there, whatever else stands there. */
static void check_padding(int kind) {
  enum { K = 3, BIG = 1100 };
  static const int32_t lengths[BATCH] = {N - 5, N};
  static const int64_t classes[4] = {2, VOCAB, BIG, VOCAB};        /* features; tokens, few and many; a masked model */
  int32_t tokens[BATCH * N], labels[BATCH * N];
  float x[BATCH * N * K], loss[3];
  float *grad[3] = {NULL, NULL, NULL};
  luna_ctx *ctx = luna_open(NULL);
  luna_params *params = luna_params_open(ctx);
  luna_lm lm;
  luna_masked_lm masked;
  const luna_layer_config layer = { .dim = 8, .heads = 2 };
  if (kind == 3) luna_masked_lm_init(&masked, params, &(luna_masked_lm_config){ .vocab = VOCAB,
                                                        .encoder = { .layers = 1, .layer = layer } });
  else luna_lm_init(&lm, params, &(luna_lm_config){ .features = kind ? 0 : K, .vocab = classes[kind],
                                                    .outputs = kind ? 0 : 2, .layers = 1, .layer = layer });
  luna_tensor *first = luna_params_at(params, 0, NULL);
  for (int i = 0; i < BATCH * N * K; i++) x[i] = (float)(i * i % 7);
  for (int way = 0; way < 3; way++) {                              /* -1, valid ones, anything */
    for (int i = 0; i < BATCH * N; i++) {
      const bool real = i % N < lengths[i / N];
      tokens[i] = i % VOCAB;
      labels[i] = real || way == 1 ? (int32_t)(i % classes[kind]) : way ? INT32_MAX : -1;
    }
    const luna_input input = { .tokens = kind ? tokens : NULL, .features = kind ? NULL : x, .lengths = lengths,
                               .batch = BATCH, .n = N };
    luna_params_zero_grad(params);
    luna_begin_step(ctx);
    luna_tensor *y = kind == 3 ? luna_masked_lm_loss(&masked, &input, labels) : luna_lm_loss(&lm, &input, labels);
    CHECK(luna_backward(y) == LUNA_OK, "kind %d, way %d: %s", kind, way, luna_error(ctx));
    loss[way] = luna_item(y);
    grad[way] = common_floats(luna_count(first));
    luna_read_grad(first, grad[way]);
    CHECK(loss[way] > 0 && memcmp(&loss[way], loss, sizeof *loss) == 0 &&
          memcmp(grad[way], grad[0], (size_t)luna_count(first) * sizeof(float)) == 0,
          "kind %d: labels of the padding change the loss, %g and %g", kind, (double)loss[0], (double)loss[way]);
  }
  for (int way = 0; way < 3; way++) free(grad[way]);
  luna_close(ctx);
}
/* A loss of which nothing counts is 0, which looks like a perfect one: options.log has it. */
static void check_nothing_counts(void) {
  static const int32_t tokens[N] = {0}, none[N] = {-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1};
  luna_ctx *ctx = luna_open(&(luna_options){ .log = take_note });
  luna_lm lm;
  float missing[4] = {NAN, NAN, NAN, NAN};
  const float level = 0.5f;
  const int64_t shape[2] = {4, 1};
  luna_lm_init(&lm, luna_params_open(ctx), &(luna_lm_config){ .vocab = VOCAB, .layer = { .dim = 8, .heads = 2 } });
  for (int way = 0; way < 8; way++) {
    luna_begin_inference(ctx);
    notes = 0;
    luna_tensor *x = luna_tensor_new(ctx, NULL, 2, shape), *y = NULL;
    if (way == 0) y = luna_lm_loss(&lm, &(luna_input){ .tokens = tokens, .batch = 1, .n = N }, none);
    if (way == 1) y = luna_lm_loss(&lm, &(luna_input){ .batch = 1 }, none);
    if (way == 2) y = luna_lm_loss(&lm, &(luna_input){ .n = N }, none);
    if (way == 3) y = luna_mse(x, missing);
    if (way == 4) y = luna_huber(x, missing, 0);
    if (way == 5) y = luna_binary_cross_entropy(x, missing);
    if (way == 6) y = luna_quantile_loss(x, missing, &level, 1);
    if (way == 7) y = luna_cross_entropy(x, (const int32_t[]){-1, -1, -1, 0}, NULL), CHECK(notes == 0, "%s", note);
    CHECK(y && luna_item(y) == 0, "way %d: %s", way, luna_error(ctx));
    CHECK(way == 7 || (notes == 1 && strstr(note, "loss is 0") && strstr(note, way < 3 ? "labels" : "targets")),
          "way %d: %d notes, %s", way, notes, note);
    CHECK(way > 2 || strncmp(note, "luna_lm_loss: ", 14) == 0, "way %d names another call: %s", way, note);
  }
  luna_close(ctx);
}
/* Features far from 1, and means and deviations that were never set: options.log has it, once. */
static void check_unfitted(void) {
  enum { K = 2 };
  static const struct { const char *what; float size; bool fits, writes, trains; int notes; } ways[] = {
    { "large", 300, false, false, true, 1 }, { "small", 0.01f, false, false, true, 1 },
    { "near 1", 1, false, false, true, 0 }, { "none yet", 0, false, false, true, 0 },
    { "fitted", 300, true, false, true, 0 }, { "written", 300, false, true, true, 0 },
    { "not in training", 300, false, false, false, 0 } };
  for (size_t w = 0; w < sizeof ways / sizeof *ways; w++) {
    float x[N * K];
    luna_ctx *ctx = luna_open(&(luna_options){ .log = take_note });
    luna_lm m;
    const luna_input input = { .features = x, .batch = 1, .n = N };
    luna_lm_init(&m, luna_params_open(ctx), &(luna_lm_config){ .features = K, .layers = 1,
                                                               .layer = { .dim = 8, .heads = 2 } });
    for (int i = 0; i < N * K; i++) x[i] = i == 3 ? NAN : ways[w].size * ((float)(i % 5) - 2);
    if (ways[w].fits) luna_input_layer_fit(&m.input, &input);
    if (ways[w].writes) luna_write(m.input.scale, (const float[K]){ 2, 2 });
    notes = 0;
    for (int step = 0; step < 3; step++) {
      ways[w].trains ? luna_begin_step(ctx) : luna_begin_inference(ctx);
      CHECK(luna_lm_forward(&m, &input), "%s: %s", ways[w].what, luna_error(ctx));
    }
    CHECK(notes == ways[w].notes && (!notes || strstr(note, "call luna_input_layer_fit")), "%s: %d notes: %s",
          ways[w].what, notes, note);
    luna_close(ctx);
  }
}
/* fits to nothing, and a model whose outputs' units are never fitted */
static void check_fits(void) {
  enum { K = 2 };
  float x[N * K], none[N * K];
  const int32_t zero = 0;
  luna_ctx *ctx = luna_open(NULL);
  luna_lm m, plain;
  luna_lm_config c = { .features = K, .layers = 1, .output_norm = true, .layer = { .dim = 8, .heads = 2 } };
  luna_params *params = luna_params_open(ctx), *other = luna_params_open(ctx);
  CHECK(luna_lm_init(&m, params, &c) == LUNA_OK, "%s", luna_error(ctx));
  c.output_norm = false;
  CHECK(luna_lm_init(&plain, other, &c) == LUNA_OK, "%s", luna_error(ctx));
  for (int i = 0; i < N * K; i++) x[i] = (float)(100 + i), none[i] = i % 2 ? NAN : INFINITY;
  const luna_input input = { .features = x, .batch = 1, .n = N }, empty = { .features = none, .batch = 1, .n = N },
                   padding = { .features = x, .lengths = &zero, .batch = 1, .n = N };
  CHECK(luna_input_layer_fit(&m.input, &empty) == LUNA_BAD_ARGUMENT, "means of no finite number");
  SAYS(ctx, "luna_input_layer_fit: ", "no finite number in 12 rows of 2");
  CHECK(luna_input_layer_fit(&m.input, &padding) == LUNA_BAD_ARGUMENT, "means of padding");
  CHECK(luna_input_layer_fit(&m.input, &(luna_input){ .features = x, .batch = 1 }) == LUNA_BAD_ARGUMENT,
        "means of no steps");
  SAYS(ctx, "luna_input_layer_fit: ", "no finite number in 0 rows of 2");
  CHECK(luna_lm_fit_outputs(&plain, x, N) == LUNA_BAD_ARGUMENT, "a model without output_norm is fitted");
  SAYS(ctx, "luna_lm_fit_outputs: ", ".output_norm = true");
  for (int way = 0; way < 2; way++) {                              /* not fitted, or to nothing */
    luna_optimizer *adam = luna_adamw(params, NULL);
    luna_begin_step(ctx);
    luna_backward(luna_mse(luna_lm_forward(&m, &input), x));
    CHECK(luna_optimizer_step(adam) == LUNA_BAD_ARGUMENT &&
          luna_error_id_of(ctx) == LUNA_ERROR_OUTPUTS_NOT_FITTED, "outputs in no unit are trained");
    SAYS(ctx, "luna_lm_forward: ", "luna_lm_fit_outputs", ".output_norm");
    luna_begin_inference(ctx);
    CHECK(luna_lm_forward(&m, &input), "a model that was not trained cannot be asked: %s", luna_error(ctx));
    CHECK(luna_lm_fit_outputs(&m, way ? x : none, way ? 0 : N) == LUNA_BAD_ARGUMENT, "outputs of nothing are fitted");
    SAYS(ctx, "luna_lm_fit_outputs: ", way ? "no finite number in 0 rows of 2" : "no finite number in 12 rows of 2");
  }
  for (int way = 0; way < 3; way++) {                              /* fitted, written, loaded */
    static buffer file;
    luna_lm made;
    luna_params *set = luna_params_open(ctx);
    const float ones[K] = {1, 1};
    c.output_norm = true;
    CHECK(luna_lm_init(&made, set, &c) == LUNA_OK, "%s", luna_error(ctx));
    if (way == 0) CHECK(luna_lm_fit_outputs(&made, (const float[K]){0, 0}, 1) == LUNA_OK, "%s", luna_error(ctx));
    if (way == 1) CHECK(luna_write(made.output_scale, ones) == LUNA_OK, "%s", luna_error(ctx));
    if (way == 2) CHECK(luna_load(set, luna_bytes(file.at, file.size)) == LUNA_OK, "%s", luna_error(ctx));
    luna_begin_step(ctx);
    CHECK(luna_backward(luna_mse(luna_lm_forward(&made, &input), x)) == LUNA_OK, "way %d: %s", way, luna_error(ctx));
    save_to(&file, set);
  }
  luna_close(ctx);
}

/* ---- files of a training ---- */
static void save_training_to(buffer *b, const luna_optimizer *optimizer) {
  luna_io io = {0};
  io.write = put, io.user = b, b->size = 0;
  CHECK(luna_save_training(optimizer, luna_callbacks(&io)) == LUNA_OK, "a training's file cannot be made");
}
static void check_training_files(void) {
  static buffer weights, training[2];                              /* without averages and with them */
  luna_ctx *ctx = luna_open(NULL);
  luna_params *params = luna_params_open(ctx), *none = luna_params_open(ctx);
  luna_lm lm;
  luna_lm_init(&lm, params, &(luna_lm_config){ .vocab = VOCAB, .layers = 1, .layer = { .dim = 8, .heads = 2 } });
  luna_optimizer *plain = luna_adamw(params, NULL), *average = luna_adamw(params,
                                                                        &(luna_optimizer_config){ .average = 0.9f });
  save_to(&weights, params), save_training_to(&training[0], plain), save_training_to(&training[1], average);
#define REFUSED(optimizer, file, error, ...) \
  (CHECK(luna_load_training(optimizer, luna_bytes((file).at, (file).size)) != LUNA_OK && \
         luna_error_id_of(ctx) == LUNA_ERROR_##error, "%s", luna_error(ctx)), \
   SAYS(ctx, "luna_load_training: ", __VA_ARGS__))
  REFUSED(plain, weights, NOT_TRAINING, "written by luna_save", "luna_load,", "new moments");
  REFUSED(luna_sgd(params, NULL), training[0], OPTIMIZER_KIND, "is of AdamW", "optimiser SGD");
  REFUSED(plain, training[1], MOMENT_COUNT, "set .average");
  REFUSED(average, training[0], MOMENT_COUNT, "leave .average");
  REFUSED(luna_adamw(none, NULL), training[0], MOMENT_COUNT, "init the model before");
#undef REFUSED
  weights.size -= 100;
  CHECK(luna_load(params, luna_bytes(weights.at, weights.size)) == LUNA_BAD_FILE, "a file that was cut short");
  SAYS(ctx, "luna_load: ", "cut short, copy it again");
  const int64_t one = 1;
  CHECK(luna_param(none, "own", 1, &one, (luna_init){LUNA_INIT_ONES, 0}), "%s", luna_error(ctx));
  save_to(&weights, none);
  luna_model any;
  CHECK(luna_load_model(&any, luna_params_open(ctx), luna_bytes(weights.at, weights.size)) == LUNA_BAD_FILE,
        "layers of one's own are a model");
  SAYS(ctx, "luna_load_model: ", "no luna.kind", "layers of your own", "luna_load");
  luna_close(ctx);
}

/* an op of one's own that fails without a word */
static luna_status own_forward(const luna_tensor *const *in, int count, luna_tensor *out, void *state) {
  (void)in, (void)count, (void)out, (void)state;
  return LUNA_BAD_ARGUMENT;
}
static luna_status own_backward(luna_tensor *const *in, int count, const luna_tensor *out, void *state) {
  (void)in, (void)count, (void)out, (void)state;
  return LUNA_OK;
}
static void check_own_op(void) {
  const int64_t one = 1;
  luna_ctx *ctx = luna_open(NULL);
  luna_tensor *x = luna_tensor_new(ctx, NULL, 1, &one);
  CHECK(!luna_custom_op(&x, 1, 1, &one, &(luna_custom){ .forward = own_forward, .backward = own_backward }),
        "an op that fails");
  SAYS(ctx, "luna_custom_op: ", "of your own", "luna_fail");
  luna_close(ctx);
}

/* a router whose values do not fit its heads, and a routed memory of one slot or without its fade */
static void check_routes(void) {
  static const char *const fits[3] = {"5 heads", "12 heads", "8 heads"};
  const int64_t shape[3] = {2, 6, 12}, heads[5] = {3, 3, 5, 12, 8}, rows[5] = {6, 5, 6, 6, 6};
  luna_ctx *ctx = luna_open(NULL);
  luna_params *params = luna_params_open(ctx);
  for (int way = 0; way < 5; way++) {
    const int64_t narrow[3] = {2, rows[way], heads[way]};
    luna_begin_step(ctx);
    luna_tensor *router = luna_tensor_new(ctx, NULL, 3, shape),
                *w = luna_route(router, luna_tensor_new(ctx, NULL, 3, narrow));
    CHECK((w != NULL) == (way == 0), "way %d: %s", way, luna_error(ctx));
    if (way == 1) SAYS(ctx, "luna_route: strength [2,5,3]", "its n is 5, that of router is 6");
    if (way > 1) SAYS(ctx, "luna_route: 12 router values for ", fits[way - 2], "at least 2");
  }
  for (int way = 0; way < 4; way++) {
    const int64_t fades[2] = {way == 1 ? 4 : 3, 2};
    luna_begin_step(ctx);
    luna_tensor *x = luna_tensor_new(ctx, NULL, 3, shape), *fade = luna_tensor_new(ctx, NULL, way == 2 ? 2 : 1, fades);
    const luna_causal_nested_config config = {.heads = 3, .routed = true, .forget = way ? fade : NULL};
    CHECK((luna_causal_nested_attention(x, x, x, x, &config) != NULL) == (way == 3), "way %d: %s", way,
          luna_error(ctx));
    if (way < 3) SAYS(ctx, "luna_causal_nested_attention: ", "forget");
    if (way < 2) SAYS(ctx, "a routed memory", "[3]");
  }
  luna_begin_step(ctx);
  luna_lm lm;
  luna_lm_config config = {.vocab = VOCAB, .layers = 1};
  config.layer = (luna_layer_config){.dim = 8, .heads = 2, .memory = 1, .forget = LUNA_FORGET_ROUTED};
  CHECK(luna_lm_init(&lm, params, &config) != LUNA_OK && luna_params_tensor_count(params) == 0, "a routed slot: %s",
        luna_error(ctx));
  SAYS(ctx, "luna_lm_init: ", "layer.memory", "1", "2");
  luna_begin_step(ctx);
  config.layer.memory = 2;
  luna_begin_step(ctx);
  CHECK(luna_lm_init(&lm, params, &config) == LUNA_OK, "%s", luna_error(ctx));
  const float in[16] = {0};
  float out[16];
  luna_causal_nested_args a = {.q = in, .k = in, .v = in, .s = in, .out = out, .batch = 1, .rows = 2, .heads = 2,
                               .head_dim = 4, .slots = 4, .routed = true};
  CHECK(luna_causal_nested_attention_f32(&a) == LUNA_BAD_ARGUMENT, "a routed memory without its fade");
  a.forget = in;
  CHECK(luna_causal_nested_attention_f32(&a) == LUNA_OK && out[0] == 0, "a routed memory that nothing is written to");
  luna_close(ctx);
}

int main(void) {
  static double block[1 << 20];
  luna_options options = {0};
  options.threads = 1;
  check_stale(options);
  check_old(options);
  check_old_scope(options);
  options.block = block, options.block_size = sizeof block;
  check_stale(options);
  check_old(options);
  check_hook_init(options);
  options.block = NULL, options.block_size = 0;
  check_hook_init(options);
  check_order();
  check_load();
  check_kinds();
  check_inputs();
  check_stream();
  check_small_memory();
  for (int kind = 0; kind < 4; kind++) check_padding(kind);
  check_nothing_counts();
  check_unfitted();
  check_fits();
  check_training_files();
  check_own_op();
  check_routes();
  for (int i = 0; i < 16; i++) {
    const luna_isa isa = i % 2 ? LUNA_ISA_REFERENCE : LUNA_ISA_BEST;
    check_misfits(isa, (luna_forget)(i / 2 % 4), i / 8 ? 3 : 0);
    if (i < 8) check_overflow(isa, (luna_forget)(i / 2 % 4));
  }
  return test_report("mistakes");
}
