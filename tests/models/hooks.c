/* Attentions from outside luna.h, and a model that is none of its. */
#include "test.h"
#define LUNA_IMPLEMENTATION
#include "luna.h"
#include "common.h"
#include "models.h"

/* ---- an attention from outside luna.h: a learned moving average, a custom op; y_t = (1 - a) sum_j a^|t-j| x_j, one a
   = sigmoid(decay) a
 * head ---- */
typedef struct average_layer {
  luna_tensor *decay;
  luna_linear_layer out;
} average_layer;
typedef struct average_hook {
  average_layer layers[8];
  /* init number fail_at returns null, after it has made a parameter */
  int made, fail_at, closed;
  /* what forward has seen; strange: a p that is no tensor of the model's sizes */
  int forwards, with_memory, causal, with_lengths, strange;
  luna_tensor *expected_memory;
} average_hook;
typedef struct average_state {
  bool causal, cut;
  int32_t lengths[32];
} average_state;

static bool average_sees(const average_state *s, int64_t b, int64_t t, int64_t j) {
  return (!s->causal || j <= t) && (!s->cut || j < s->lengths[b]);
}
static luna_status average_forward(const luna_tensor *const *in, int count, luna_tensor *out, void *state) {
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
  return LUNA_OK;
}
static luna_status average_backward(luna_tensor *const *in, int count, const luna_tensor *out, void *state) {
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
  return LUNA_OK;
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
  luna_custom custom = {average_forward, average_backward, &state, sizeof state, 0, false, 0, 0};
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
static void average_close(void *layer) {
  const average_layer *a = (const average_layer *)layer;
  CHECK(a >= average_now->layers && a < average_now->layers + average_now->made, "a layer of no hook is closed");
  average_now->closed++;
}
static luna_attention_hook average_open(average_hook *hook, int fail_at) {
  luna_attention_hook h = {average_make, average_run, NULL, average_close, NULL, NULL, NULL};
  memset(hook, 0, sizeof *hook);
  hook->fail_at = fail_at;
  average_now = hook;
  h.user = hook;
  return h;
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
  luna_tensor *loss = luna_cross_entropy(luna_classifier_forward(&model[0],
      &(luna_input){ tokens, lengths, TASK_BATCH, TASK_N, NULL }), labels, NULL);
  const double value = (double)luna_item(loss);
  const int first_run = state.forwards;
  CHECK(luna_backward(loss) == LUNA_OK, "hook: %s", luna_error(ctx));
  CHECK(first_run == 2 && state.forwards == 2, "recompute %d: the hook ran %d times, then %d",
        recompute, first_run, state.forwards - first_run);
  CHECK(state.with_memory == 0 && state.strange == 0,
        "recompute %d: of %d forwards %d have a memory, and the encoder has none", recompute,
        state.forwards, state.with_memory);
  CHECK(state.causal == 0 && state.with_lengths == state.forwards,
        "recompute %d: an encoder's hook is called causal %d times, with lengths %d times of %d", recompute,
            state.causal,
        state.with_lengths, state.forwards);
  /* the gradient, and what the loss does when a decay changes: a central difference in float, to 3% */
  for (int i = 0; i < 2; i++) {
    luna_tensor *decay = state.layers[i].decay;
    float side[2], *g = gradient_of(decay);
    for (int s = 0; s < 2; s++) {
      decay->data[0] = s ? -0.005f : 0.005f;
      luna_begin_step(ctx);
      side[s] = luna_item(luna_cross_entropy(luna_classifier_forward(&model[0],
          &(luna_input){ tokens, lengths, TASK_BATCH, TASK_N, NULL }), labels, NULL));
    }
    decay->data[0] = 0;
    const double difference = ((double)side[0] - (double)side[1]) / 0.01;
    CHECK(fabs(difference - (double)g[0]) <= 3e-2 * fabs(difference) + 1e-4 && g[0] != 0,
          "hook, layer %d: the loss %.4f changes by %.5f a decay, the gradient is %.5f", i, value, difference,
              (double)g[0]);
    free(g);
  }
  luna_params_zero_grad(set[0]);
  const double fell = train_classifier(set[0], &model[0], 100, 1e-2f);
  CHECK(fell < 0.5, "a hooked classifier's loss falls to %.3f of ln 2 only", fell);
  CHECK(state.layers[0].decay->data[0] != 0 && state.layers[1].decay->data[1] != 0,
        "training has not changed the hook's parameters");
  CHECK(luna_save(set[0], luna_path(path.text)) == LUNA_OK && luna_load(set[1], luna_path(path.text)) == LUNA_OK,
        "hook: %s",
        luna_error(ctx));
  for (int i = 0; i < 2; i++) {
    luna_begin_inference(ctx);
    logits[i] = values_of(ctx, luna_classifier_forward(&model[i],
        &(luna_input){ tokens, lengths, TASK_BATCH, TASK_N, NULL }), "logits");
  }
  CHECK(same_bits(logits[0], logits[1], TASK_BATCH * 2),
        "a hooked classifier comes back from its file with other bits");
  luna_params *empty = luna_params_open(ctx);
  refused(ctx, luna_load_model(&any, empty, luna_path(path.text)) == LUNA_BAD_FILE &&
          luna_params_tensor_count(empty) == 0,
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
    luna_tensor *loss = luna_cross_entropy(luna_lm_forward(&model, &(luna_input){ tokens, NULL, 1, 19, NULL }),
                                           tokens + 1, NULL);
    luna_backward(loss);
    if (!CHECK(luna_optimizer_step(adam) == LUNA_OK, "hook: %s", luna_error(ctx))) break;
    last = (double)luna_item(loss);
    if (step == 0) first = last;
  }
  CHECK(last < 0.2 * first, "a hooked language model's loss falls from %.3f to %.3f only", first, last);
  CHECK(state.causal == state.forwards && state.with_memory == 0 && state.with_lengths == 0 && state.forwards == 300,
        "of 300 forwards in a language model %d were made, %d are causal, %d have a memory, %d lengths", state.forwards,
            state.causal,
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
  CHECK(state.closed == 0, "a layer is closed before its context");
  luna_close(ctx);
  CHECK(state.closed == 2, "%d of a hook's 2 layers are closed", state.closed);
}
/* init knows the layer's place, in each kind of model */
static int64_t places[4][3];
static int places_made;
static void *place_make(void *user, luna_params *params, const char *prefix, const luna_layer_config *config) {
  int64_t *place = places[places_made++ % 4];
  (void)params, (void)prefix;
  place[0] = config->layer, place[1] = config->layers, place[2] = config->max_length;
  return user;
}
static void check_places(void) {
  const luna_attention_hook hook = {place_make, average_run, &places_made, NULL, NULL, NULL, NULL};
  luna_lm lm;
  luna_classifier classifier;
  luna_lm_config config = {0};
  luna_classifier_config other = {0};
  config.layers = 3, config.max_length = 77, config.layer.dim = DIM, config.layer.heads = 2, config.layer.hook = &hook;
  other.encoder.layer = config.layer, other.encoder.layers = 3, other.encoder.max_length = 33;
  for (int kind = 0; kind < 3; kind++) { /* a language model, a classifier, one of tied layers */
    luna_ctx *ctx = ctx_open();
    luna_params *params = luna_params_open(ctx);
    places_made = 0;
    other.encoder.tied_layers = kind == 2;
    CHECK((kind == 0 ? luna_lm_init(&lm, params, &config) : luna_classifier_init(&classifier, params, &other)) ==
          LUNA_OK, "%s", luna_error(ctx));
    CHECK(places_made == (kind == 2 ? 1 : 3), "model %d: %d layers are made", kind, places_made);
    for (int i = 0; i < places_made; i++)
      CHECK(places[i][0] == i && places[i][1] == places_made && places[i][2] == (kind ? 33 : 77),
            "model %d, layer %d: its init gets layer %d of %d, max_length %d", kind, i, (int)places[i][0],
            (int)places[i][1], (int)places[i][2]);
    luna_close(ctx);
  }
}
/* a name that files cannot hold is refused, and settings that cannot be saved */
static bool settings_fail(void *user, bool (*put)(void *file, const char *key, const char *value), void *file) {
  (void)user, (void)put, (void)file;
  return false;
}
static bool settings_long(void *user, bool (*put)(void *file, const char *key, const char *value), void *file) {
  char text[3000];
  (void)user;
  memset(text, 'x', sizeof text - 1);
  text[sizeof text - 1] = 0;
  return put(file, "key", text);
}
static void check_names(void) {
  luna_attention_hook hook = {place_make, average_run, &places_made, NULL, NULL, NULL, NULL};
  luna_lm lm;
  luna_lm_config config = {0};
  config.layer.dim = DIM, config.layer.heads = 2, config.layer.hook = &hook;
  for (int i = 0; i < 4; i++) {
    luna_ctx *ctx = ctx_open();
    luna_params *params = luna_params_open(ctx);
    hook.name = i == 0 ? "" : i == 1 ? "a name that is sixty-four characters long or longer than what fits" : "mine";
    hook.save = i == 2 ? settings_fail : i == 3 ? settings_long : NULL;
    CHECK(luna_lm_init(&lm, params, &config) != LUNA_OK &&
              luna_error_id_of(ctx) == (i < 2 ? LUNA_ERROR_VALUE_RANGE : LUNA_ERROR_HOOK_SETTINGS) &&
              luna_params_tensor_count(params) == 0 && !luna_params_get_text(params, "luna.hook"),
          "name or settings %d: \"%s\"", i, luna_error(ctx));
    luna_close(ctx);
  }
}
/* A file's setting of a hook must be the model's, whatever its name is. */
static const char *setting;
static bool settings_put(void *user, bool (*put)(void *file, const char *key, const char *value), void *file) {
  (void)user;
  return put(file, "length", setting);
}
static void check_settings(void) {
  static char file[1 << 16];
  const luna_attention_hook hook = {.init = place_make, .forward = average_run, .user = &places_made, .name = "mine",
                                    .save = settings_put};
  luna_lm_config config = {.layers = 1, .vocab = 5, .layer = {.dim = DIM, .heads = 2, .hook = &hook}};
  size_t size = 0;
  luna_lm lm;
  for (int i = 0; i < 3; i++) {
    luna_ctx *ctx = ctx_open();
    luna_params *params = luna_params_open(ctx);
    setting = i == 2 ? "8" : "9";
    CHECK(luna_lm_init(&lm, params, &config) == LUNA_OK, "%s", luna_error(ctx));
    if (i == 0) CHECK(luna_save(params, luna_buffer(file, sizeof file, &size)) == LUNA_OK, "%s", luna_error(ctx));
    const luna_status status = luna_load(params, luna_bytes(file, size));
    CHECK(i < 2 ? status == LUNA_OK : status != LUNA_OK && luna_error_id_of(ctx) == LUNA_ERROR_FILE_CONFIG,
          "a file with another setting of a hook: %s", luna_error(ctx));
    luna_close(ctx);
  }
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
    CHECK(state.closed == fail_at, "of an init that fails %d layers are closed, not %d", state.closed, fail_at);
    CHECK(luna_params_tensor_count(params) == 1 && luna_params_element_count(params) == 3 &&
          !luna_params_get_text(params, "luna.kind"),
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
              luna_error_id_of(own) == (wrong ? LUNA_ERROR_HOOK_SHAPE : LUNA_ERROR_HOOK_NULL),
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
    CHECK(luna_encoder_layer_forward(&layer, x, NULL, NULL) && state.with_memory == 1 && state.strange == 0,
          "a hook without a memory: %s",
          luna_error(ctx));
  }
  luna_close(ctx);
}
static void check_hooks(void) {
  for (int recompute = LUNA_RECOMPUTE_NONE; recompute <= LUNA_RECOMPUTE_LAYER; recompute++)
    check_hook_classifier((luna_recompute_kind)recompute);
  check_hook_lm();
  check_places();
  check_names(), check_settings();
  check_hook_refusals();
  heap_check("hooks");
}

/* ---- a model that is none of luna.h's: a Luna encoder layer reads a list, a question looks into it through softmax
   attention ---- */
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
  luna_layer_config attention = {0};
  layer.dim = DIM, layer.heads = 2, layer.ffn = 16;
  attention.attention = LUNA_ATTENTION_SOFTMAX, attention.dim = DIM, attention.heads = 2;
  m->embedding = luna_param(params, "embedding", 2, table, normal);
  m->question = luna_param(params, "question", 2, table, normal);
  m->memory = luna_param(params, "memory", 2, slots, normal);
  return m->embedding && m->question && m->memory && luna_encoder_layer_init(&m->reader, params, "reader.", &layer) ==
      LUNA_OK &&
         luna_attention_layer_init(&m->look, params, "look.", &attention) == LUNA_OK &&
         luna_norm_layer_init(&m->norm, params, "norm", DIM, LUNA_NORM_LAYER) == LUNA_OK &&
         luna_linear_layer_init(&m->answer, params, "answer", DIM, 2, xavier) == LUNA_OK;
}
/* is the symbol asked for in the list? list [batch, n], asked [batch] -> [batch, 1, 2] */
static luna_tensor *lookup_forward(const lookup *m, const int32_t *list, const int32_t *lengths, const int32_t *asked,
                                   int64_t batch,
                                   int64_t n) {
  luna_tensor *p = luna_expand(m->memory, batch), *x = luna_embedding(m->embedding, list, batch, n),
              *q = luna_embedding(m->question, asked, batch, 1);
  x = luna_encoder_layer_forward(&m->reader, x, &p, lengths);
  return luna_linear_layer_forward(&m->answer,
                                   luna_norm_layer_forward(&m->norm, luna_add(luna_attention_layer_forward(&m->look, q,
                                       x, lengths), q)));
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
    luna_tensor *loss = luna_cross_entropy(lookup_forward(&model[0], list, lengths, asked, LISTS, LENGTH), labels,
                                           NULL);
    luna_backward(loss);
    if (!CHECK(luna_optimizer_step(adam) == LUNA_OK, "a composed model: %s", luna_error(ctx))) break;
    if (step >= 390) sum += (double)luna_item(loss) / 10 / log(2);
  }
  CHECK(sum < 0.5, "a composed model's loss falls to %.3f of ln 2 only", sum);
  check_moved(set[0], before, "a composed model");
  CHECK(luna_save(set[0], luna_path(path.text)) == LUNA_OK && luna_load(set[1], luna_path(path.text)) == LUNA_OK,
        "a composed model: %s",
        luna_error(ctx));
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

int main(void) {
  check_hooks();
  check_composed();
  return test_report("hooks");
}
