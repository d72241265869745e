/* Other attentions: examples/attentions. tests/models/golden.c holds their numbers; here, for each with several options
   and more than one block of rows: a sequence in a batch against it alone, padding, causality, threads, directional
   derivatives, memory, language models, checkpoints, recomputation, segments, and what is refused. */
#include "test.h"
#include "luna.h"
#include "examples/attentions/attentions.h"
#include "common.h"

#define DIM 24
#define HEADS 3
#define BATCH 3
#define ROWS 150
static const int32_t lengths[BATCH] = {ROWS, 71, 1};

/* BOTH: causal and not. ROUGH: no derivatives of it by differences, for a small step may change an order or a choice.
   LOOKS_AHEAD: a later token may change which earlier ones are attended */
enum { CAUSAL = 1, FULL = 2, BOTH = 3, ROUGH = 4, LOOKS_AHEAD = 8 };
static const struct { const char *options; int forms; } cases[] = {
  {"performer features=40", BOTH},
  {"performer features=0 kernel=relu", BOTH},
  {"performer features=70 kernel=relu ortho_scaling=true eps=0.01", BOTH},
  {"rfa features=20", BOTH},
  {"rfa features=40 gate=true orthogonal=true", CAUSAL},
  {"rfa features=9 tau=2 scale=0.1 eps=1", BOTH},
  {"rfa features=30 kernel=arccosine", BOTH},
  {"rfa features=30 kernel=arccosine gate=true", CAUSAL | ROUGH}, /* a step changes many relus' sides */
  {"synthesizer terms=dense length=150", BOTH},
  {"synthesizer terms=dot+random length=160 mixture=true", BOTH},
  {"synthesizer terms=factorized_dense+factorized_random length=150 a=10 k=3", BOTH},
  {"synthesizer terms=dot+dense+factorized_dense+random+factorized_random length=150 mixture=true", BOTH},
  {"workspace", FULL | ROUGH},
  {"workspace slots=3 topk=200 unit_gates=true mlp_layers=1", FULL},
  {"workspace topk=7 renormalise=false", FULL | ROUGH},
  {"transformer_xl", CAUSAL},
  {"transformer_xl window=20", CAUSAL},
  {"compressive memory=30 compressed=10 rate=3", CAUSAL},
  {"compressive memory=30 compressed=10 compression=max", CAUSAL},
  {"compressive memory=30 compressed=10 compression=most-used", CAUSAL},
  {"local window=20", BOTH},
  {"local window=16 backward=1 forward=1", BOTH},
  {"local pattern=sliding window=30", BOTH},
  {"local pattern=lra window=20", BOTH},
  {"sparse stride=20 columns=4", CAUSAL},
  {"sparse stride=12 columns=3 first_column=true split=true", CAUSAL},
  {"sparse pattern=strided stride=16 cls=true", FULL},
  {"longformer left=20 right=11 global=0,3", FULL},
  {"longformer left=30 dilation=1,2,3 global=", BOTH},
  {"bigbird block=16 max_blocks=10", FULL},
  {"bigbird block=8 random=2 max_blocks=30", FULL},
  {"reformer chunk=16 buckets=10 rounds=2", BOTH | ROUGH | LOOKS_AHEAD},
  {"reformer chunk=200 buckets=4 rounds=1", BOTH | ROUGH | LOOKS_AHEAD},
  {"sinkhorn block=20 max_blocks=8", BOTH},
  {"sinkhorn block=64 max_blocks=3 sort=softmax combine=sum", BOTH},
  {"isab inducing=5", FULL},
  {"isab inducing=3 norm=false", FULL},
};
#define CASES (sizeof cases / sizeof cases[0])

/* one layer with a context of its own */
typedef struct one {
  attentions choice;
  luna_ctx *ctx;
  luna_params *params;
  attention *layer;
  bool causal;
  const char *name;
} one;
static bool one_open(one *o, const char *name, bool causal, const luna_options *options) {
  luna_layer_config config = {0};
  memset(o, 0, sizeof *o);
  o->name = name, o->causal = causal;
  o->ctx = luna_open(options);
  o->params = luna_params_open(o->ctx);
  config.dim = DIM, config.heads = HEADS;
  if (!CHECK(attentions_open(&o->choice, name), "%s: %s", name, o->choice.error)) return false;
  o->layer = (attention *)o->choice.hook.init(&o->choice, o->params, "", &config);
  return CHECK(o->layer, "%s: %s", name, luna_error(o->ctx)) != 0;
}
static void one_close(one *o) {
  if (o->layer) o->choice.hook.close(o->layer);
  attentions_close(&o->choice);
  luna_close(o->ctx);
}
/* x [batch, rows, DIM] -> y; *out: what the hook handed out */
static luna_tensor *one_run(one *o, luna_tensor *x, const int32_t *each, luna_attention_call *out) {
  luna_attention_call call;
  memset(&call, 0, sizeof call);
  call.x = call.input = x, call.lengths = each, call.causal = o->causal;
  luna_tensor *y = o->choice.hook.forward(o->layer, &call);
  CHECK(y, "%s: %s", o->name, luna_error(o->ctx));
  if (out) *out = call;
  return y;
}
static luna_tensor *one_tensor(one *o, const float *x, int64_t batch, int64_t rows) {
  const int64_t shape[3] = {batch, rows, DIM};
  return luna_tensor_new(o->ctx, x, 3, shape);
}
static luna_tensor *total(one *o, luna_tensor *y, const luna_attention_call *call) {
  luna_tensor *loss = common_loss(luna_mask(y, call->lengths), 7);
  if (call->next_p) loss = luna_add(loss, common_loss(call->next_p, 8));
  return attentions_loss(&o->choice, loss);
}

static float *inputs; /* [BATCH, ROWS, DIM] */
#define INPUTS (BATCH * ROWS * DIM)

static void check_alone(const char *name, bool causal) {
  one o;
  if (!one_open(&o, name, causal, NULL)) return;
  float *all = common_floats(INPUTS), *alone = common_floats(ROWS * DIM);
  luna_begin_inference(o.ctx);
  luna_read(one_run(&o, one_tensor(&o, inputs, BATCH, ROWS), lengths, NULL), all);
  for (int b = 0; b < BATCH; b++) {
    luna_begin_inference(o.ctx);
    luna_read(one_run(&o, one_tensor(&o, inputs + b * ROWS * DIM, 1, lengths[b]), NULL, NULL), alone);
    test_close(name, all + b * ROWS * DIM, alone, (size_t)(lengths[b] * DIM), 2e-6);
  }
  free(all), free(alone);
  one_close(&o);
}

/* y and gradients with something else beyond the lengths, or on other threads, bit by bit */
static float *results(const char *name, bool causal, int threads, float padding, int64_t *count) {
  luna_options options = {0};
  luna_attention_call call;
  one o;
  options.threads = threads;
  if (!one_open(&o, name, causal, &options)) return NULL;
  float *x = common_floats(INPUTS);
  for (int64_t i = 0; i < INPUTS; i++) x[i] = i / DIM % ROWS >= lengths[i / (ROWS * DIM)] ? padding : inputs[i];
  luna_begin_step(o.ctx);
  luna_tensor *in = luna_require_grad(one_tensor(&o, x, BATCH, ROWS)),
      *y = luna_mask(one_run(&o, in, lengths, &call), lengths);
  const int64_t size = 2 * INPUTS + luna_params_element_count(o.params);
  float *all = common_floats(size), *at = all + 2 * INPUTS;
  luna_read(y, all);
  CHECK(luna_backward(total(&o, y, &call)) == LUNA_OK, "%s: %s", name, luna_error(o.ctx));
  luna_read_grad(in, all + INPUTS);
  for (int64_t i = 0; i < luna_params_tensor_count(o.params); i++) {
    const luna_tensor *p = luna_params_at(o.params, i, NULL);
    if (p->grad) luna_read_grad(p, at);
    at += luna_count(p);
  }
  free(x);
  one_close(&o);
  *count = size;
  return all;
}
static void check_bits(const char *name, bool causal) {
  int64_t count = 0;
  float *zero = results(name, causal, 1, 0, &count), *nan = results(name, causal, 1, NAN, &count),
      *three = results(name, causal, 3, 0, &count);
  CHECK(zero && nan && memcmp(zero, nan, (size_t)count * sizeof(float)) == 0,
        "%s: NaN in the padding changes something", name);
  CHECK(zero && three && memcmp(zero, three, (size_t)count * sizeof(float)) == 0, "%s: three threads change bits",
        name);
  free(zero), free(nan), free(three);
}

static void check_causality(const char *name) {
  static const float changes[3] = {3, INFINITY, NAN};
  one o;
  if (!one_open(&o, name, true, NULL)) return;
  float *all = common_floats(ROWS * DIM), *got = common_floats(ROWS * DIM), *x = common_floats(ROWS * DIM);
  luna_begin_inference(o.ctx);
  luna_read(one_run(&o, one_tensor(&o, inputs, 1, ROWS), NULL, NULL), all);
  for (int i = 0; i < 9; i++) {
    const int64_t cut = i % 3 == 0 ? 1 : i % 3 == 1 ? 90 : ROWS - 1;
    for (int64_t j = 0; j < ROWS * DIM; j++) x[j] = inputs[j] + (j >= cut * DIM ? changes[i / 3] : 0);
    luna_begin_inference(o.ctx);
    luna_read(one_run(&o, one_tensor(&o, x, 1, ROWS), NULL, NULL), got);
    CHECK(memcmp(all, got, (size_t)(cut * DIM) * sizeof(float)) == 0, "%s: a token before %d depends on it", name,
          (int)cut);
  }
  free(all), free(got), free(x);
  one_close(&o);
}

/* ---- derivatives along a random direction, of x and of each parameter ---- */
static double value(one *o, luna_tensor *shifted, const char *what, const float *at, const float *direction, float by) {
  luna_attention_call call;
  double sum = 0;
  float *x = shifted ? common_floats(luna_count(shifted)) : common_floats(INPUTS);
  const int64_t count = shifted ? luna_count(shifted) : INPUTS;
  for (int64_t i = 0; i < count; i++) x[i] = at[i] + by * direction[i];
  if (shifted) luna_write(shifted, x);
  luna_begin_step(o->ctx);
  luna_tensor *in = luna_require_grad(one_tensor(o, shifted ? inputs : x, BATCH, ROWS)),
      *y = one_run(o, in, lengths, &call);
  float *out = common_floats(INPUTS);
  luna_read(luna_mask(y, lengths), out);
  float *weights = common_random(INPUTS, 7, 1);
  for (int64_t i = 0; i < INPUTS; i++) sum += (double)out[i] * (double)weights[i];
  free(out), free(weights), free(x);
  if (call.next_p) {
    const int64_t size = luna_count(call.next_p);
    out = common_floats(size), weights = common_random(size, 8, 1);
    luna_read(call.next_p, out);
    for (int64_t i = 0; i < size; i++) sum += (double)out[i] * (double)weights[i];
    free(out), free(weights);
  }
  if (shifted) luna_write(shifted, at);
  /* all else is constant in it */
  if (o->layer->loss && strncmp(what, "compress", 8) == 0) sum += (double)luna_item(o->layer->loss);
  return sum;
}
static void check_direction(one *o, luna_tensor *parameter, const char *what, const float *at, const float *grad,
                            int64_t count) {
  float *direction = common_random(count, 11, 1);
  double slope = 0, size = 0;
  const float by = 5e-4f; /* small: few of the relus change sides */
  for (int64_t i = 0; i < count; i++)
    slope += (double)grad[i] * (double)direction[i], size += (double)grad[i] * (double)grad[i];
  const double got = (value(o, parameter, what, at, direction, by) - value(o, parameter, what, at, direction, -by)) /
      (2 * (double)by);
  CHECK(fabs(got - slope) <= 0.02 * sqrt(size) + 0.04,
        "%s (%s): %s changes the loss by %.5g, its gradient says %.5g of %.3g", o->name,
        o->causal ? "causal" : "full", what, got, slope, sqrt(size));
  free(direction);
}
static void check_derivatives(const char *name, bool causal) {
  luna_attention_call call;
  one o;
  if (!one_open(&o, name, causal, NULL)) return;
  common_params(o.params, 40);
  luna_begin_step(o.ctx);
  luna_tensor *in = luna_require_grad(one_tensor(&o, inputs, BATCH, ROWS)), *y = one_run(&o, in, lengths, &call);
  CHECK(luna_backward(total(&o, y, &call)) == LUNA_OK, "%s: %s", name, luna_error(o.ctx));
  float *grad = common_floats(INPUTS);
  luna_read_grad(in, grad);
  check_direction(&o, NULL, "x", inputs, grad, INPUTS);
  free(grad);
  for (int64_t i = 0; i < luna_params_tensor_count(o.params); i++) {
    const char *what;
    luna_tensor *p = luna_params_at(o.params, i, &what);
    if (!p->grad) continue; /* an array */
    float *at = common_floats(luna_count(p));
    grad = common_floats(luna_count(p));
    luna_read(p, at), luna_read_grad(p, grad);
    check_direction(&o, p, what, at, grad, luna_count(p));
    free(at), free(grad);
  }
  one_close(&o);
}

/* ---- in models: training in one block of the size that a measuring context found, checkpoints, recomputation ---- */
static double train(const char *name, bool causal, luna_options *options, luna_recompute_kind recompute, int steps,
                    float **parameters) {
  int32_t tokens[2 * 48], labels[2 * 48];
  luna_classifier classifier;
  luna_lm lm;
  attentions choice;
  double last = 0;
  luna_ctx *ctx = luna_open(options);
  luna_params *params = luna_params_open(ctx);
  luna_layer_config layer = {0};
  for (int i = 0; i < 2 * 48; i++)
    tokens[i] = (causal ? i : i + i / 48) * 7 % 11 % 5, labels[i] = causal ? (i + 1) * 7 % 11 % 5 : i % 2;
  luna_input input = {.tokens = tokens, .batch = 2, .n = 48};
  if (!CHECK(attentions_open(&choice, name), "%s: %s", name, choice.error)) return 0;
  layer.dim = DIM, layer.heads = HEADS;
  layer.hook = &choice.hook, layer.recompute = recompute, layer.pre_norm = true;
  if (causal) {
    luna_lm_config c = {0};
    c.vocab = 5, c.layer = layer, c.positions = LUNA_POSITIONS_SINUSOIDAL;
    CHECK(luna_lm_init(&lm, params, &c) == LUNA_OK, "%s: %s", name, luna_error(ctx));
  } else {
    luna_classifier_config c = {0};
    c.vocab = 5, c.classes = 2, c.encoder.layer = layer;
    CHECK(luna_classifier_init(&classifier, params, &c) == LUNA_OK, "%s: %s", name, luna_error(ctx));
  }
  const luna_optimizer_config config = {0};
  luna_optimizer *adam = luna_adamw(params, &config);
  for (int step = 0; step < steps; step++) {
    luna_begin_step(ctx);
    luna_tensor *loss = causal ? luna_lm_loss(&lm, &input, labels) :
        luna_cross_entropy(luna_classifier_forward(&classifier, &input), labels, NULL);
    loss = attentions_loss(&choice, loss);
    CHECK(luna_backward(loss) == LUNA_OK, "%s: %s", name, luna_error(ctx));
    last = (double)luna_item(loss);
    CHECK(luna_optimizer_step(adam) == LUNA_OK, "%s: %s", name, luna_error(ctx));
  }
  if (parameters) *parameters = common_parameters(params);
  options->block_size = luna_memory(ctx).peak;
  luna_close(ctx);
  attentions_close(&choice);
  return last;
}

static void check_models(const char *name, bool causal) {
  luna_options options = {0}, measure = {0};
  float *plain, *again, *block;
  options.threads = measure.threads = 1;
  measure.measure = true;
  train(name, causal, &measure, LUNA_RECOMPUTE_NONE, 2, NULL);
  train(name, causal, &options, LUNA_RECOMPUTE_NONE, 2, &plain);
  train(name, causal, &options, LUNA_RECOMPUTE_LAYER, 2, &again);
  options.block_size = measure.block_size;
  options.block = common_alloc(options.block_size);
  luna_ctx *ctx = luna_open(&options);
  if (CHECK(ctx, "%s: no context in %d bytes", name, (int)options.block_size)) {
    luna_close(ctx);
    train(name, causal, &options, LUNA_RECOMPUTE_NONE, 2, &block);
    const size_t bytes = options.block_size ? sizeof(float) : 0;
    CHECK(bytes && memcmp(plain, block, 1000 * bytes) == 0, "%s: training in one block is another training", name);
    free(block);
  }
  CHECK(memcmp(plain, again, 1000 * sizeof(float)) == 0, "%s: recomputed layers train otherwise", name);
  free(options.block), free(plain), free(again);
}
static void check_learning(const char *name, bool causal) {
  luna_options options = {0};
  const double first = train(name, causal, &options, LUNA_RECOMPUTE_NONE, 1, NULL);
  memset(&options, 0, sizeof options);
  const double last = train(name, causal, &options, LUNA_RECOMPUTE_NONE, 40, NULL);
  CHECK(last < 0.9 * first, "%s: the loss falls from %.3f to %.3f only", name, first, last);
}

typedef struct memory_file { unsigned char *bytes; size_t size, at; } memory_file;
static bool memory_write(void *user, const void *bytes, size_t size) {
  memory_file *f = (memory_file *)user;
  f->bytes = (unsigned char *)realloc(f->bytes, f->size + size);
  if (!f->bytes) return false;
  memcpy(f->bytes + f->size, bytes, size);
  f->size += size;
  return true;
}
/* arrays that are not trained are saved too */
static void check_checkpoint(const char *name, bool causal) {
  luna_options options = {0};
  memory_file file = {NULL, 0, 0};
  luna_io io = {NULL, memory_write, NULL, 0};
  float *y[2];
  one o;
  io.user = &file;
  for (int i = 0; i < 2; i++) {
    options.seed = (uint64_t)i + 1;
    y[i] = common_floats(INPUTS);
    if (!one_open(&o, name, causal, &options)) return;
    if (i == 0) CHECK(luna_save(o.params, luna_callbacks(&io)) == LUNA_OK, "%s: %s", name, luna_error(o.ctx));
    else CHECK(luna_load(o.params, luna_bytes(file.bytes, file.size)) == LUNA_OK, "%s: %s", name, luna_error(o.ctx));
    luna_begin_inference(o.ctx);
    luna_read(one_run(&o, one_tensor(&o, inputs, BATCH, ROWS), NULL, NULL), y[i]);
    one_close(&o);
  }
  CHECK(memcmp(y[0], y[1], INPUTS * sizeof(float)) == 0, "%s: comes back from its file with other bits", name);
  free(y[0]), free(y[1]), free(file.bytes);
}

/* a whole model opens from its file alone: the system and its options are in it */
static float *model_logits(luna_ctx *ctx, const luna_model *m) {
  int32_t tokens[2 * 48];
  float *y = common_floats(2 * 48 * 5);
  for (int i = 0; i < 2 * 48; i++) tokens[i] = i * 7 % 11 % 5;
  const luna_input input = {.tokens = tokens, .batch = 2, .n = 48};
  luna_begin_inference(ctx);
  luna_tensor *t = m->kind == LUNA_MODEL_LM ? luna_lm_forward(&m->lm, &input) :
                                              luna_classifier_forward(&m->classifier, &input);
  CHECK(t && luna_read(t, y) == LUNA_OK, "%s", luna_error(ctx));
  return y;
}
static void check_model_file(const char *name, bool causal) {
  const luna_io io = {NULL, memory_write, NULL, 0};
  memory_file file = {NULL, 0, 0};
  attentions choice, found, other;
  char system[32];
  luna_model made, opened;
  luna_ctx *ctx = luna_open(NULL);
  luna_params *params = luna_params_open(ctx);
  luna_layer_config layer = {.dim = DIM, .heads = HEADS, .hook = &choice.hook};
  luna_io to = io;
  to.user = &file;
  memset(&made, 0, sizeof made);
  memcpy(system, name, strcspn(name, " "));
  system[strcspn(name, " ")] = 0;
  CHECK(attentions_open(&choice, name) && attentions_open(&found, system), "%s: %s", name, choice.error);
  CHECK(attentions_open(&other, strcmp(system, "isab") ? "isab" : "rfa"), "%s", other.error);
  made.kind = causal ? LUNA_MODEL_LM : LUNA_MODEL_CLASSIFIER;
  if (causal)
    CHECK(luna_lm_init(&made.lm, params, &(luna_lm_config){.vocab = 5, .layer = layer}) == LUNA_OK, "%s: %s", name,
          luna_error(ctx));
  else
    CHECK(luna_classifier_init(&made.classifier, params,
                               &(luna_classifier_config){.vocab = 5, .encoder = {.layer = layer}}) == LUNA_OK,
          "%s: %s", name, luna_error(ctx));
  CHECK(luna_save(params, luna_callbacks(&to)) == LUNA_OK, "%s: %s", name, luna_error(ctx));
  const luna_attention_hook *const hooks[] = {&other.hook, &found.hook, NULL};
  for (int with = 0; with < 2; with++) {
    const luna_options options = {.seed = 5, .hooks = with ? hooks : NULL};
    luna_ctx *again = luna_open(&options);
    luna_params *set = luna_params_open(again);
    const luna_status status = luna_load_model(&opened, set, luna_bytes(file.bytes, file.size));
    if (with) {
      float *a = model_logits(ctx, &made), *b = NULL;
      if (CHECK(status == LUNA_OK && opened.kind == made.kind, "%s: %s", name, luna_error(again)))
        b = model_logits(again, &opened);
      CHECK(b && memcmp(a, b, 2 * 48 * 5 * sizeof(float)) == 0, "%s: a model comes back as another", name);
      free(a), free(b);
    } else {
      CHECK(status == LUNA_UNSUPPORTED && luna_error_id_of(again) == LUNA_ERROR_HOOK_UNKNOWN &&
                strstr(luna_error(again), system) && luna_params_tensor_count(set) == 0,
            "%s opens without its hook: %s", name, luna_error(again));
    }
    luna_close(again);
  }
  attentions_close(&choice), attentions_close(&found), attentions_close(&other);
  luna_close(ctx);
  free(file.bytes);
}
/* a file whose options are none is refused with a sentence that names the system */
static void check_bad_options(void) {
  const luna_io io = {NULL, memory_write, NULL, 0};
  memory_file file = {NULL, 0, 0};
  attentions choice;
  luna_lm lm;
  luna_model opened;
  luna_io to = io;
  to.user = &file;
  attentions_open(&choice, "performer kernel=relu");
  const luna_attention_hook *const hooks[] = {&choice.hook, NULL};
  const luna_options options = {.hooks = hooks};
  luna_ctx *ctx = luna_open(&options);
  luna_params *params = luna_params_open(ctx), *set = luna_params_open(ctx);
  const luna_lm_config config = {.vocab = 5, .layer = {.dim = DIM, .heads = HEADS, .hook = &choice.hook}};
  CHECK(luna_lm_init(&lm, params, &config) == LUNA_OK && luna_save(params, luna_callbacks(&to)) == LUNA_OK, "%s",
        luna_error(ctx));
  char room[4096];
  const char *error = NULL;
  CHECK(!luna_stream_open_bytes(file.bytes, file.size, NULL, room, sizeof room, &error) && error &&
            strstr(error, "only Luna attention streams"),
        "a stream of a file with a hook: %s", error ? error : "no sentence");
  for (size_t i = 0; i + 4 < file.size; i++)
    if (memcmp(file.bytes + i, "relu\"", 5) == 0) memcpy(file.bytes + i, "rely", 4);
  CHECK(luna_load_model(&opened, set, luna_bytes(file.bytes, file.size)) == LUNA_BAD_ARGUMENT &&
            luna_error_id_of(ctx) == LUNA_ERROR_HOOK_SETTINGS && strstr(luna_error(ctx), "'performer'") &&
            luna_params_tensor_count(set) == 0,
        "an option that is none: %s", luna_error(ctx));
  luna_close(ctx);
  attentions_close(&choice);
  free(file.bytes);
}

/* two segments, the second with the first as memory, are one long sequence */
static void check_segments(void) {
  one o;
  luna_attention_call call;
  const int64_t half = ROWS / 2;
  if (!one_open(&o, "transformer_xl memory=75", true, NULL)) return;
  common_params(o.params, 3);
  float *whole = common_floats(ROWS * DIM), *part = common_floats(half * DIM), *memory = common_floats(half * DIM);
  luna_begin_inference(o.ctx);
  luna_read(one_run(&o, one_tensor(&o, inputs, 1, ROWS), NULL, NULL), whole);
  for (int segment = 0; segment < 2; segment++) {
    luna_begin_inference(o.ctx);
    o.layer->memory = segment ? one_tensor(&o, memory, 1, half) : NULL;
    luna_read(one_run(&o, one_tensor(&o, inputs + segment * half * DIM, 1, half), NULL, &call), part);
    test_close("a segment", part, whole + segment * half * DIM, (size_t)(half * DIM), 2e-6);
    CHECK(call.kept[0] == o.layer->next_memory, "the next segment's memory is not handed out");
    if (CHECK(o.layer->next_memory && luna_count(o.layer->next_memory) == half * DIM,
              "there is no memory for the next segment"))
      luna_read(o.layer->next_memory, memory);
    CHECK(memcmp(memory, inputs + segment * half * DIM, (size_t)(half * DIM) * sizeof(float)) == 0,
          "a memory is not the segment's inputs");
  }
  free(whole), free(part), free(memory);
  one_close(&o);
}
/* of a layer that norms its input the memory keeps what came in, and attention reads it normed */
static void check_normed_memory(void) {
  attentions choice;
  luna_causal_layer layer;
  luna_layer_config config = {0};
  luna_ctx *ctx = luna_open(NULL);
  luna_params *params = luna_params_open(ctx);
  float *y[2] = {common_floats(ROWS * DIM), common_floats(ROWS * DIM)}, *memory = common_floats(ROWS * DIM);
  const int64_t half = ROWS / 2, size = half * DIM, whole[3] = {1, ROWS, DIM}, part[3] = {1, half, DIM};
  CHECK(attentions_open(&choice, "transformer_xl memory=75"), "%s", choice.error);
  config.dim = DIM, config.heads = HEADS, config.hook = &choice.hook, config.pre_norm = true;
  CHECK(luna_causal_layer_init(&layer, params, "", &config) == LUNA_OK, "%s", luna_error(ctx));
  common_params(params, 9);
  attention *a = (attention *)layer.hook_state;
  luna_begin_inference(ctx);
  luna_read(luna_causal_layer_forward(&layer, luna_tensor_new(ctx, inputs, 3, whole)), y[0]);
  for (int segment = 0; segment < 2; segment++) {
    luna_begin_inference(ctx);
    a->memory = segment ? luna_tensor_new(ctx, memory, 3, part) : NULL;
    luna_read(luna_causal_layer_forward(&layer, luna_tensor_new(ctx, inputs + segment * size, 3, part)),
              y[1] + segment * size);
    if (CHECK(a->next_memory, "there is no memory")) luna_read(a->next_memory, memory);
    CHECK(memcmp(memory, inputs + segment * size, (size_t)size * sizeof(float)) == 0,
          "a memory is not the layer's input");
  }
  test_close("segments of a layer with a norm", y[1], y[0], ROWS * DIM, 2e-6);
  free(y[0]), free(y[1]), free(memory);
  attentions_close(&choice);
  luna_close(ctx);
}
/* Compressive Transformer as a model: memories grow to their options, the loss trains the compression */
static void check_growth(void) {
  luna_options options = {0};
  attentions choice;
  int32_t tokens[40], labels[40];
  luna_ctx *ctx = luna_open(&options);
  luna_params *params = luna_params_open(ctx);
  luna_lm_config c = {0};
  luna_lm lm;
  float *held[2][2] = {{NULL, NULL}, {NULL, NULL}};
  int64_t rows[2] = {0, 0};
  for (int i = 0; i < 40; i++) tokens[i] = i % 5, labels[i] = (i + 1) % 5;
  luna_input input = {.tokens = tokens, .batch = 2, .n = 20};
  attentions_open(&choice, "compressive memory=30 compressed=8 rate=4");
  c.vocab = 5, c.layer.dim = DIM, c.layer.heads = HEADS, c.layer.hook = &choice.hook, c.layer.pre_norm = true;
  CHECK(luna_lm_init(&lm, params, &c) == LUNA_OK, "%s", luna_error(ctx));
  for (int segment = 0; segment < 5; segment++) {
    /* 10 rows leave in segment 1, then 20 */
    static const int64_t memory[5] = {20, 30, 30, 30, 30}, compressed[5] = {0, 3, 8, 8, 8};
    luna_begin_step(ctx);
    for (int l = 0; l < 2; l++) {
      attention *layer = (attention *)lm.layers[l].hook_state;
      const int64_t shape[2][3] = {{2, rows[0], DIM}, {2, rows[1], DIM}};
      layer->memory = rows[0] ? luna_tensor_new(ctx, held[l][0], 3, shape[0]) : NULL;
      layer->compressed = rows[1] ? luna_tensor_new(ctx, held[l][1], 3, shape[1]) : NULL;
    }
    luna_tensor *loss = attentions_loss(&choice, luna_lm_loss(&lm, &input, labels));
    CHECK(luna_backward(loss) == LUNA_OK, "%s", luna_error(ctx));
    rows[0] = memory[segment], rows[1] = compressed[segment];
    for (int l = 0; l < 2; l++) {
      attention *layer = (attention *)lm.layers[l].hook_state;
      luna_tensor *next[2] = {layer->next_memory, layer->next_compressed};
      for (int k = 0; k < 2; k++) {
        CHECK((next[k] ? next[k]->shape[1] : 0) == rows[k], "segment %d: memory %d has %d rows", segment, k,
              next[k] ? (int)next[k]->shape[1] : 0);
        free(held[l][k]);
        held[l][k] = common_floats(luna_count(next[k]));
        if (next[k]) CHECK(luna_read(next[k], held[l][k]) == LUNA_OK, "%s", luna_error(ctx));
      }
      CHECK((layer->loss != NULL) == (segment > 0), "segment %d: %s", segment, layer->loss ? "a loss" : "no loss");
    }
    luna_params_zero_grad(params);
  }
  for (int l = 0; l < 2; l++) free(held[l][0]), free(held[l][1]);
  attentions_close(&choice);
  luna_close(ctx);
}

/* ---- by their definitions, in double ---- */
/* rows of x times NAME.weight^T + NAME.bias */
static void naive_linear(const one *o, const char *name, const double *x, int64_t rows, double *y) {
  char full[64];
  snprintf(full, sizeof full, "%s.weight", name);
  const luna_tensor *w = luna_params_find(o->params, full);
  snprintf(full, sizeof full, "%s.bias", name);
  const luna_tensor *bias = luna_params_find(o->params, full);
  for (int64_t i = 0; i < rows; i++)
    for (int64_t c = 0; c < DIM; c++) {
      double sum = bias ? (double)bias->data[c] : 0;
      for (int64_t e = 0; e < DIM; e++) sum += x[i * DIM + e] * (double)w->data[c * DIM + e];
      y[i * DIM + c] = sum;
    }
}
/* RFA's arc-cosine kernel: the features of row x of head h */
enum { ARC_ROWS = 20, ARC_FEATURES = 30 };
static void naive_arccosine(const one *o, int64_t h, const double *x, double *phi) {
  const float *w = luna_params_find(o->params, "features")->data, *sigma = luna_params_find(o->params, "sigma")->data;
  double size = 0;
  for (int64_t e = 0; e < DIM / HEADS; e++) size += x[e] * x[e];
  size = sqrt(size) + 1e-3;
  for (int64_t j = 0; j < ARC_FEATURES; j++) {
    double z = 0;
    for (int64_t e = 0; e < DIM / HEADS; e++)
      z += (double)w[(h * ARC_FEATURES + j) * (DIM / HEADS) + e] * (double)sigma[h * (DIM / HEADS) + e] / 2 * x[e] /
          size;
    phi[j] = z > 0 ? z / sqrt(ARC_FEATURES) : 0;
  }
}
static void check_arccosine(bool causal) {
  double x[ARC_ROWS * DIM], q[ARC_ROWS * DIM], k[ARC_ROWS * DIM], v[ARC_ROWS * DIM], joined[ARC_ROWS * DIM] = {0},
      want[ARC_ROWS * DIM];
  float got[ARC_ROWS * DIM], expected[ARC_ROWS * DIM];
  one o;
  if (!one_open(&o, "rfa features=30 kernel=arccosine tau=2", causal, NULL)) return;
  common_params(o.params, 12);
  for (int i = 0; i < ARC_ROWS * DIM; i++) x[i] = (double)inputs[i];
  naive_linear(&o, "q_proj", x, ARC_ROWS, q), naive_linear(&o, "k_proj", x, ARC_ROWS, k),
      naive_linear(&o, "v_proj", x, ARC_ROWS, v);
  for (int64_t h = 0; h < HEADS; h++)
    for (int64_t i = 0; i < ARC_ROWS; i++) {
      const int64_t at = h * (DIM / HEADS);
      double phi[2][ARC_FEATURES], sum = 0;
      naive_arccosine(&o, h, q + i * DIM + at, phi[0]);
      for (int64_t j = 0; j < (causal ? i + 1 : ARC_ROWS); j++) {
        double a = 0;
        naive_arccosine(&o, h, k + j * DIM + at, phi[1]);
        for (int64_t m = 0; m < ARC_FEATURES; m++) a += phi[0][m] * phi[1][m];
        sum += a;
        for (int64_t e = 0; e < DIM / HEADS; e++) joined[i * DIM + at + e] += a * v[j * DIM + at + e];
      }
      for (int64_t e = 0; e < DIM / HEADS; e++) joined[i * DIM + at + e] /= sum > 1e-3 ? sum : 1e-3;
    }
  naive_linear(&o, "out_proj", joined, ARC_ROWS, want);
  for (int i = 0; i < ARC_ROWS * DIM; i++) expected[i] = (float)want[i];
  luna_begin_inference(o.ctx);
  luna_read(one_run(&o, one_tensor(&o, inputs, 1, ARC_ROWS), NULL, NULL), got);
  test_close("RFA's arc-cosine kernel", got, expected, ARC_ROWS * DIM, 2e-6);
  one_close(&o);
}
/* of the 120 rows that leave, the 30 that the tokens attend to most */
static void check_most_used(void) {
  enum { LEFT = 120, KEPT = 30 };
  double *x = (double *)common_alloc(3 * ROWS * DIM * sizeof(double)), *q = x + ROWS * DIM, *k = q + ROWS * DIM,
      usage[LEFT] = {0};
  float *got = common_floats(KEPT * DIM);
  one o;
  if (!one_open(&o, "compressive memory=30 compressed=40 rate=4 compression=most-used", true, NULL)) return;
  common_params(o.params, 12);
  for (int i = 0; i < ROWS * DIM; i++) x[i] = (double)inputs[i];
  naive_linear(&o, "q_proj", x, ROWS, q), naive_linear(&o, "k_proj", x, ROWS, k);
  for (int64_t i = 0; i < ROWS; i++)
    for (int64_t h = 0; h < HEADS; h++) {
      double p[LEFT], sum = 0;
      for (int64_t j = 0; j < LEFT; j++) {
        double dot = 0;
        for (int64_t e = h * (DIM / HEADS); e < (h + 1) * (DIM / HEADS); e++) dot += q[i * DIM + e] * k[j * DIM + e];
        sum += p[j] = exp(dot / sqrt(DIM / HEADS));
      }
      for (int64_t j = 0; j < LEFT; j++) usage[j] += p[j] / sum;
    }
  luna_begin_inference(o.ctx);
  one_run(&o, one_tensor(&o, inputs, 1, ROWS), NULL, NULL);
  const luna_tensor *t = o.layer->next_compressed;
  if (CHECK(t && luna_count(t) == KEPT * DIM, "most-used keeps %d numbers", t ? (int)luna_count(t) : 0))
    luna_read(t, got);
  for (int64_t j = 0, next = 0; j < LEFT; j++) {
    int more = 0;
    for (int64_t i = 0; i < LEFT; i++) more += usage[i] > usage[j];
    const bool kept = next < KEPT && memcmp(got + next * DIM, inputs + j * DIM, DIM * sizeof(float)) == 0;
    CHECK(kept == (more < KEPT), "row %d, of which %d are used more, is %s", (int)j, more, kept ? "kept" : "lost");
    next += kept;
  }
  free(x), free(got);
  one_close(&o);
}
/* random features drawn again: other ones, the same for the same seed, of the same distribution */
static void check_redraw(const char *name, bool orthogonal) {
  one o;
  float *x[4];
  if (!one_open(&o, name, true, NULL)) return;
  luna_tensor *t = luna_params_find(o.params, "features");
  const int64_t count = luna_count(t), d = DIM / HEADS;
  double mean = 0, square = 0, across = 0;
  for (int i = 0; i < 4; i++) {
    x[i] = common_floats(count);
    if (i) CHECK(attentions_redraw(&o.choice, i == 3 ? 5 : 4 + (uint64_t)i), "%s: %s", name, luna_error(o.ctx));
    luna_read(t, x[i]);
  }
  CHECK(memcmp(x[0], x[1], (size_t)count * sizeof(float)) != 0 &&
        memcmp(x[1], x[2], (size_t)count * sizeof(float)) != 0, "%s: not drawn again", name);
  CHECK(memcmp(x[1], x[3], (size_t)count * sizeof(float)) == 0, "%s: a seed gives two draws", name);
  for (int64_t i = 0; i < count; i++)
    mean += (double)x[1][i] / (double)count, square += (double)x[1][i] * (double)x[1][i] / (double)count;
  for (int64_t e = 0; e < d; e++) across += (double)x[1][e] * (double)x[1][d + e];
  CHECK(fabs(mean) < 0.05 && fabs(square - 1) < 0.1, "%s: mean %.3f and mean square %.3f", name, mean, square);
  CHECK((fabs(across) < 1e-5) == orthogonal, "%s: the product of its first two rows is %.3g", name, across);
  for (int i = 0; i < 4; i++) free(x[i]);
  one_close(&o);
}

/* the Workspace's memory goes from layer to layer, and out */
static void check_workspace_layers(void) {
  int32_t tokens[2 * ROWS];
  attentions choice;
  luna_ctx *ctx = luna_open(NULL);
  luna_params *params = luna_params_open(ctx);
  luna_encoder_config c = {0};
  luna_encoder encoder;
  luna_tensor *p = NULL;
  for (int i = 0; i < 2 * ROWS; i++) tokens[i] = i % 7;
  luna_input input = {.tokens = tokens, .batch = 2, .n = ROWS};
  attentions_open(&choice, "workspace slots=4");
  c.layer.dim = DIM, c.layer.heads = HEADS, c.layers = 3, c.layer.hook = &choice.hook;
  CHECK(luna_encoder_init(&encoder, params, "", 7, &c) == LUNA_OK, "%s", luna_error(ctx));
  luna_begin_step(ctx);
  luna_tensor *x = luna_encoder_forward(&encoder, &input, &p);
  CHECK(x && p && p->rank == 3 && p->shape[1] == 4, "the last layer's p is not handed out");
  CHECK(luna_backward(common_loss(p, 3)) == LUNA_OK, "%s", luna_error(ctx));
  for (int l = 0; l < 3; l++) /* through p alone: the last layer's p reaches the first layer's parameters */
    CHECK(((workspace *)encoder.layers[l].hook_state)->gate_scale->grad, "layer %d has no gradient through p", l);
  attentions_close(&choice);
  luna_close(ctx);
}

/* What counts has a limit, in options, in a model's file and in options that a program sets */
static const char *endless(void *file, const char *key) {
  return strcmp(key, (const char *)file) ? NULL : "9223372036854775807";
}
static void check_limits(void) {
  static const struct { const char *system, *option, *value; } over[] = {
    {"sparse", "stride", "2305843009213693952"}, {"sparse", "stride", "9223372036854775807"},
    {"sparse", "stride", "99999999999999999999"}, {"sparse", "stride", "1000000001"},
    {"longformer", "dilation", "9223372036854775807,2"}, {"longformer", "global", "0,-1"},
    {"bigbird", "random", "9223372036854775802"}, {"sinkhorn", "iterations", "4611686018427387904"},
    {"compressive", "rate", "4294967296"}, {"local", "forward", "9223372036854775807"}, {"isab", "inducing", "-1"},
  };
  static const struct { const char *options, *why; } made[] = {
    {"sinkhorn iterations=10001", "iterations is 10001, and must be in [0,10000]"},
    {"sinkhorn max_blocks=1048577", "max_blocks is 1048577, and must be in [1,1048576]"},
    {"compressive rate=65537 compression=mean", "rate is 65537, and must be in [1,65536]"},
    {"bigbird max_blocks=1000000000 random=1000000000", ""},
    {"sparse", "attention sparse: stride is 9223372036854775807, and must be in [0,1000000000]"},
    {"longformer", "attention longformer: dilation is 9223372036854775807, and must be in [0,1000000000]"},
  };
  /* beyond a sequence all sizes are one */
  static const struct { const char *far, *near; bool causal; } same[] = {
    {"sparse pattern=strided stride=1000000000", "sparse pattern=strided stride=150", true},
    {"sparse pattern=strided stride=1000000000 split=true", "sparse pattern=strided stride=150 split=true", true},
    {"sparse stride=1000000000 columns=1000000000", "sparse stride=150 columns=150", true},
    {"bigbird block=4 max_blocks=2 random=1000000000", "bigbird block=4 max_blocks=2 random=0", false},
    {"bigbird block=1000000000", "bigbird block=150", false},
    {"longformer dilation=1000000000,2,1000000000 left=1000000000 global=1000000000",
     "longformer dilation=150,2,150 left=150 global=", false},
    {"local window=4 backward=1000000000 forward=1000000000", "local window=4 backward=40 forward=40", false},
    {"local window=1000000000", "local window=150", false},
    {"local pattern=sliding window=1000000000", "local pattern=sliding window=150", false},
    {"sinkhorn block=1000000000", "sinkhorn block=150", false},
    {"reformer chunk=1000000000", "reformer chunk=150", false},
    {"transformer_xl window=1000000000 memory=1000000000", "transformer_xl window=150 memory=150", true},
  };
  char text[128];
  attentions a;
  for (size_t i = 0; i < sizeof over / sizeof *over; i++) {
    snprintf(text, sizeof text, "%s %s=%s", over[i].system, over[i].option, over[i].value);
    CHECK(!attentions_open(&a, text) && strstr(a.error, over[i].system) && strstr(a.error, over[i].option) &&
              strstr(a.error, " from 0 to 1000000000"), "'%s': %s", text, a.error);
    if (!CHECK(attentions_open(&a, over[i].system), "%s", a.error)) continue;
    snprintf(text, sizeof text, "%s", over[i].option);
    CHECK(!a.hook.load(&a, endless, text) && strstr(a.error, " from 0 to 1000000000"), "%s of a file: %s", text,
          a.error);
    attentions_close(&a);
  }
  for (size_t i = 0; i < sizeof made / sizeof *made; i++) {
    const luna_layer_config config = {.dim = DIM, .heads = HEADS, .hook = &a.hook};
    luna_ctx *ctx = luna_open(NULL);
    luna_params *params = luna_params_open(ctx);
    if (CHECK(attentions_open(&a, made[i].options), "%s", a.error)) {
      if (strcmp(made[i].options, "sparse") == 0) ((sparse *)a.options)->stride = INT64_MAX;
      if (strcmp(made[i].options, "longformer") == 0)
        ((longformer *)a.options)->dilation = (attention_list){HEADS, {INT64_MAX, 1, 1}};
      CHECK(!a.hook.init(&a, params, "", &config) && luna_error_status(ctx) != LUNA_OK &&
                strstr(luna_error(ctx), made[i].why), "%s is made: %s", made[i].options, luna_error(ctx));
      attentions_close(&a);
    }
    luna_close(ctx);
  }
  for (size_t i = 0; i < sizeof same / sizeof *same; i++) {
    float *y[2] = {common_floats(ROWS * DIM), common_floats(ROWS * DIM)};
    for (int k = 0; k < 2; k++) {
      one o;
      if (!one_open(&o, k ? same[i].near : same[i].far, same[i].causal, NULL)) continue;
      luna_begin_inference(o.ctx);
      luna_read(one_run(&o, one_tensor(&o, inputs, 1, ROWS), NULL, NULL), y[k]);
      one_close(&o);
    }
    test_close(same[i].far, y[0], y[1], ROWS * DIM, 2e-6);
    free(y[0]), free(y[1]);
  }
}

static void check_refusals(void) {
  static const char *const bad[] = {"nothing", "performer feature=3", "performer features=-1", "performer features=3x",
                                    "performer kernel=exp",
                                    "performer eps=", "rfa gate=yes", "isab inducing",
                                        "compressive compression=conv|mean", ""};
  static const struct { const char *name; bool causal; int64_t dim; } made[] = {
    {"performer features=0", false, DIM}, {"synthesizer terms=dot+dot", false, DIM},
        {"synthesizer terms=dance", false, DIM},
    {"synthesizer terms=factorized_dense length=10 a=3", false, DIM}, {"isab", false, DIM + 1},
        {"rfa tau=0", true, DIM},
  };
  static const struct { const char *name; bool causal; } run[] = {
    {"isab", true}, {"workspace", true}, {"transformer_xl", false}, {"compressive", false}, {"rfa gate=true", false},
        {"synthesizer length=10", true},
  };
  luna_layer_config config = {0};
  attentions a;
  for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
    CHECK(!attentions_open(&a, bad[i]) && a.error[0], "'%s' is accepted", bad[i]); /* and leaves nothing to close */
  for (size_t i = 0; i < sizeof made / sizeof made[0]; i++) {
    luna_encoder_layer layer;
    luna_ctx *ctx = luna_open(NULL);
    luna_params *params = luna_params_open(ctx);
    if (!CHECK(attentions_open(&a, made[i].name), "%s", a.error)) continue;
    config.dim = made[i].dim, config.heads = HEADS, config.hook = &a.hook;
    CHECK(luna_encoder_layer_init(&layer, params, "x.", &config) != LUNA_OK &&
          luna_error_id_of(ctx) == LUNA_ERROR_BACKEND &&
              luna_params_tensor_count(params) == 0, "%s is made: %s", made[i].name, luna_error(ctx));
    luna_close(ctx);
    attentions_close(&a);
  }
  for (size_t i = 0; i < sizeof run / sizeof run[0]; i++) {
    one o;
    luna_attention_call call;
    if (!one_open(&o, run[i].name, run[i].causal, NULL)) continue;
    luna_begin_inference(o.ctx);
    memset(&call, 0, sizeof call);
    call.x = call.input = one_tensor(&o, inputs, 1, ROWS), call.causal = run[i].causal;
    CHECK(!o.choice.hook.forward(o.layer, &call) && luna_error_status(o.ctx) == LUNA_UNSUPPORTED &&
          strstr(luna_error(o.ctx), "attention "),
          "%s runs: %s", run[i].name, luna_error(o.ctx));
    one_close(&o);
  }
}

/* One `attentions` for models of several contexts, one after the other: what was drawn for a closed one is gone. */
static void check_contexts(void) {
  static const int32_t tokens[4] = {1, 2, 3, 0};
  attentions a;
  CHECK(attentions_open(&a, "rfa features=8"), "%s", a.error);
  luna_lm_config config = {.vocab = 5, .layers = 1, .layer = {.dim = DIM, .heads = HEADS, .hook = &a.hook}};
  luna_ctx *ctx = NULL;
  for (int round = 0; round < 3; round++) {
    luna_lm lm;
    luna_close(ctx);
    ctx = luna_open(NULL);
    luna_params *params = luna_params_open(ctx);
    CHECK(luna_lm_init(&lm, params, &config) == LUNA_OK && attentions_redraw(&a, 5), "%s", luna_error(ctx));
    luna_begin_step(ctx);
    const luna_input input = {tokens, NULL, 1, 4, NULL};
    CHECK(luna_backward(attentions_loss(&a, luna_lm_loss(&lm, &input, tokens))) == LUNA_OK, "%s", luna_error(ctx));
  }
  attentions_close(&a); /* before the last context, which frees its layers */
  luna_close(ctx);
}
/* What is trained alone, or refused */
static void check_frozen_and_gated(void) {
  static const int32_t tokens[4] = {1, 2, 3, 0};
  char text[400] = "longformer global=0", *end = text + strlen(text);
  attentions a;
  float grad[2][DIM];
  CHECK(attentions_open(&a, "rfa features=8"), "%s", a.error);
  luna_lm_config config = {.vocab = 5, .layers = 1, .layer = {.dim = DIM, .heads = HEADS, .hook = &a.hook}};
  for (int frozen = 0; frozen < 2; frozen++) {
    luna_lm lm;
    luna_ctx *ctx = luna_open(&(luna_options){.seed = 3});
    luna_params *params = luna_params_open(ctx);
    CHECK(luna_lm_init(&lm, params, &config) == LUNA_OK, "%s", luna_error(ctx));
    luna_tensor *sigma = luna_params_find(params, "layers.0.self_attn.sigma");
    if (!CHECK(sigma && luna_count(sigma) <= DIM, "sigma is not there")) return;
    if (frozen) luna_params_freeze(params, NULL, true), luna_params_freeze(params, "sigma", false);
    luna_begin_step(ctx);
    const luna_input input = {tokens, NULL, 1, 4, NULL};
    CHECK(luna_backward(luna_lm_loss(&lm, &input, tokens)) == LUNA_OK &&
          luna_read_grad(sigma, grad[frozen]) == LUNA_OK, "%s", luna_error(ctx));
    CHECK(grad[frozen][0] != 0, "sigma has no gradient, frozen %d", frozen);
    if (frozen) test_close("sigma alone", grad[1], grad[0], (size_t)luna_count(sigma), 1e-5);
    luna_close(ctx);
  }
  config.layer.output_gate = true;
  luna_lm lm;
  luna_ctx *ctx = luna_open(NULL);
  CHECK(luna_lm_init(&lm, luna_params_open(ctx), &config) != LUNA_OK && strstr(luna_error(ctx), "output_gate"), "%s",
        luna_error(ctx));
  luna_close(ctx), attentions_close(&a);
  for (int i = 1; i < 60; i++) end += snprintf(end, sizeof text - (size_t)(end - text), ",%d", i);
  if (CHECK(attentions_open(&a, text), "a list of 60 numbers: %s", a.error)) attentions_close(&a);
}

int main(void) {
  inputs = common_random(INPUTS, 1, 1);
  for (size_t i = 0; i < CASES; i++)
    for (int form = CAUSAL; form <= FULL; form++) {
      const char *name = cases[i].options;
      const bool causal = form == CAUSAL;
      if (!(cases[i].forms & form)) continue;
      check_alone(name, causal);
      check_bits(name, causal);
      if (causal && !(cases[i].forms & LOOKS_AHEAD)) check_causality(name);
      if (!(cases[i].forms & ROUGH)) check_derivatives(name, causal);
      check_models(name, causal);
      check_learning(name, causal);
      check_checkpoint(name, causal);
      check_model_file(name, causal);
    }
  check_bad_options();
  check_segments();
  check_normed_memory();
  check_growth();
  check_workspace_layers();
  check_arccosine(false);
  check_arccosine(true);
  check_most_used();
  check_redraw("performer features=400", true);
  check_redraw("rfa features=150", false);
  check_redraw("rfa features=150 orthogonal=true", true);
  check_refusals();
  check_limits();
  check_contexts();
  check_frozen_and_gated();
  free(inputs);
  return test_report("attentions");
}
