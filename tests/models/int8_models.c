/* Models in 8 bits: streams and inference beside the reference, files of luna_save_int8 in every call that loads one,
   and damaged ones; memory; training stays as it is, and what it changes is seen. */
#include "test.h"
#define LUNA_IMPLEMENTATION
#include "luna.h"
#include "common.h"
#include "rounded.h"
#include "st.h"

enum { VOCAB = 40, DIM = 64, N = 50, KINDS = 5, MAX_FILE = 1 << 20 };

typedef struct lm {
  luna_ctx *ctx;
  luna_params *params;
  luna_lm model;
} lm;
static luna_lm_config lm_config(int kind) {
  luna_lm_config c = {0};
  c.vocab = VOCAB, c.layers = 2, c.layer.memory = kind == 1 ? 24 : 6;
  c.layer.dim = DIM, c.layer.heads = kind == 1 ? 4 : 2, c.layer.ffn = 96; /* kind 1: scores are not folded */
  c.layer.pre_norm = kind % 2 == 1, c.layer.gated = kind == 2, c.layer.output_gate = kind == 2;
  c.layer.convolution = kind == 2 ? 0 : 4;
  c.layer.forget = kind == 3 ? LUNA_FORGET_GATED : LUNA_FORGET_NONE;
  if (kind == 4) c.layer.forget = LUNA_FORGET_ROUTED;
  c.layer.sharing = kind == 2 ? LUNA_SHARING_FULL : LUNA_SHARING_TIED;
  if (kind == 3) c.vocab = 0, c.features = 20, c.outputs = 3;
  return c;
}
static lm lm_open(int kind, luna_options options) {
  lm m;
  const luna_lm_config config = lm_config(kind);
  options.seed = 4;
  if (options.threads == 0) options.threads = 1;
  m.ctx = luna_open(&options);
  m.params = luna_params_open(m.ctx);
  CHECK(luna_lm_init(&m.model, m.params, &config) == LUNA_OK, "luna_lm_init: %s", luna_error(m.ctx));
  if (!options.measure) common_params(m.params, 60);
  return m;
}
static const luna_options nothing;
static luna_options in_8_bits(void) {
  luna_options o = nothing;
  o.weights = LUNA_DTYPE_I8;
  return o;
}
/* a file in memory, to be freed */
static uint8_t *file_of(const lm *m, bool int8, size_t *size) {
  uint8_t *bytes = (uint8_t *)common_alloc(MAX_FILE);
  const luna_file file = luna_buffer(bytes, MAX_FILE, size);
  CHECK((int8 ? luna_save_int8(m->params, file) : luna_save(m->params, file)) == LUNA_OK, "%s", luna_error(m->ctx));
  return bytes;
}

/* ---- streams ---- */
static const int32_t *some_tokens(void) {
  static int32_t tokens[N];
  for (int i = 0; i < N; i++) tokens[i] = (int32_t)(common_hash(9, (uint64_t)i) % VOCAB);
  return tokens;
}
static const float *some_features(void) {
  static float features[N * 20];
  common_fill(features, N * 20, 8, 1);
  return features;
}
/* the outputs of N steps, one after the other; closes the stream */
static float *run(luna_stream *s, int kind, const char *what) {
  const int64_t outputs = kind == 3 ? 3 : VOCAB;
  float *y = common_floats(N * outputs);
  for (int t = 0; s && t < N; t++) {
    const float *logits = kind == 3 ? luna_stream_step_features(s, some_features() + t * 20) :
        luna_stream_step(s, some_tokens() + t);
    if (!CHECK(logits && !*luna_stream_error(s), "%s: step %d: %s", what, t, luna_stream_error(s))) break;
    memcpy(y + t * outputs, logits, (size_t)outputs * sizeof *y);
  }
  return y;
}
static float *run_model(const lm *m, int kind, luna_dtype weights) {
  const luna_stream_config c = {.weights = weights};
  luna_stream *s = luna_stream_open(&m->model, &c);
  CHECK(s != NULL, "luna_stream_open: %s", luna_error(m->ctx));
  float *y = run(s, kind, "model");
  luna_stream_close(s);
  return y;
}
static float *run_bytes(const uint8_t *bytes, size_t size, int kind, luna_dtype weights) {
  const luna_stream_config c = {.weights = weights};
  const char *error = "";
  const size_t need = luna_stream_size(bytes, size, &c, &error);
  CHECK(need > 0, "luna_stream_size: %s", error);
  char *memory = (char *)common_alloc(need + 64);
  memset(memory + need, 0x5A, 64);
  luna_stream *s = luna_stream_open_bytes(bytes, size, &c, memory, need, &error);
  CHECK(s != NULL, "luna_stream_open_bytes: %s", error);
  CHECK(!luna_stream_open_bytes(bytes, size, &c, memory, need - 64, &error), "it opens in less than its size");
  s = luna_stream_open_bytes(bytes, size, &c, memory, need, &error);
  float *y = run(s, kind, "file");
  for (int i = 0; i < 64; i++) CHECK(memory[need + (size_t)i] == 0x5A, "the stream writes beyond its memory");
  free(memory);
  return y;
}
/* a stream's outputs, or with `context` an inference's, on an instruction set */
typedef struct rounds { int kind; bool context; } rounds;
static float *logits_of(const lm *m, luna_tensor **loss);
static void rounds_run(void *user, const rounded_how *how, rounded *out) {
  const rounds *r = (const rounds *)user;
  const int64_t count = N * (r->kind == 3 ? 3 : VOCAB);
  luna_options o = how->rounds ? in_8_bits() : nothing;
  o.isa = how->isa;
  lm m = lm_open(r->kind, o);
  for (int64_t i = 0; i < luna_params_tensor_count(m.params); i++) {
    luna_tensor *t = luna_params_at(m.params, i, NULL);
    rounded_nudge(how->nudge, t->data, luna_count(t));
  }
  float *y = r->context ? logits_of(&m, NULL) : run_model(&m, r->kind, LUNA_DTYPE_F32); /* the context's weights */
  rounded_put(out, r->context ? "logits" : "a stream's outputs", false, y, count);
  free(y), luna_close(m.ctx);
}
static void check_streams(int kind) {
  const size_t count = N * (kind == 3 ? 3 : VOCAB);
  rounds by_stream = {kind, false};
  rounded_check("streams in 8 bits", rounds_run, &by_stream, ROUNDED_INT8);
  lm m = lm_open(kind, nothing);
  float *exact = run_model(&m, kind, LUNA_DTYPE_F32), *rounded = run_model(&m, kind, LUNA_DTYPE_I8);
  size_t size, size8;
  uint8_t *bytes = file_of(&m, false, &size), *bytes8 = file_of(&m, true, &size8);
  float *same;
  for (int i = 0; i < 2 && common_little_endian(); i++) { /* a file is read in place there alone */
    same = run_bytes(bytes, size, kind, i ? LUNA_DTYPE_I8 : LUNA_DTYPE_F32);
    CHECK(memcmp(same, i ? rounded : exact, count * sizeof(float)) == 0,
          "kind %d: of a file other bits than of its model", kind);
    free(same);
  }
  /* of a file of 8 bits embeddings and folded scores are made of rounded weights, all other integers are the same */
  for (int way = 0; way < 2 && common_little_endian(); way++) {
    same = run_bytes(bytes8, size8, kind, way ? LUNA_DTYPE_I8 : LUNA_DTYPE_F32);
    rounded_far(false, test_error(same, exact, count));
    luna_ctx *ctx = luna_open(NULL);
    luna_params *params = luna_params_open(ctx);
    lm loaded = {.ctx = ctx, .params = params};
    CHECK(luna_load_model_of(LUNA_MODEL_LM, &loaded.model, params, luna_bytes(bytes8, size8)) == LUNA_OK, "%s",
          luna_error(ctx));
    float *of_loaded = run_model(&loaded, kind, LUNA_DTYPE_I8);
    test_close("a stored one, loaded and rounded again", same, of_loaded, count, 1e-5);
    free(of_loaded), free(same);
    luna_close(ctx);
  }
  free(bytes), free(bytes8), free(exact), free(rounded);
  luna_close(m.ctx);
}
/* chunks have the same integers as steps, batches as single sequences */
static void check_prefill(void) {
  lm m = lm_open(0, nothing);
  const luna_stream_config one = {.weights = LUNA_DTYPE_I8},
      three = {.weights = LUNA_DTYPE_I8, .batch = 3, .chunk = 20};
  luna_stream *s = luna_stream_open(&m.model, &one), *b = luna_stream_open(&m.model, &three);
  float *steps = run(s, 0, "steps");
  int32_t tokens[3 * N];
  for (int i = 0; i < 3 * N; i++) tokens[i] = some_tokens()[i % N];
  const float *y = luna_stream_prefill(b, &(luna_input){.tokens = tokens, .n = N});
  for (int i = 0; i < 3 && y; i++)
    test_close("a prefill in 8 bits", y + i * VOCAB, steps + (N - 1) * VOCAB, VOCAB, 1e-3);
  CHECK(y != NULL, "%s", luna_stream_error(b));
  luna_stream_close(s), luna_stream_close(b), free(steps), luna_close(m.ctx);
}

/* ---- inference in a context ---- */
static float *logits_of(const lm *m, luna_tensor **loss) {
  luna_begin_inference(m->ctx);
  const luna_input input = {.tokens = some_tokens(), .batch = 1, .n = N};
  float *y = common_floats(N * VOCAB);
  luna_tensor *logits = luna_lm_forward(&m->model, &input);
  CHECK(luna_read(logits, y) == LUNA_OK, "%s", luna_error(m->ctx));
  if (loss) *loss = luna_lm_loss(&m->model, &input, some_tokens());
  return y;
}
static float step_of(const lm *m, luna_optimizer *o) {
  luna_begin_step(m->ctx);
  luna_tensor *loss = luna_lm_loss(&m->model, &(luna_input){.tokens = some_tokens(), .batch = 1, .n = N - 1},
                                   some_tokens() + 1);
  const float value = luna_item(loss);
  luna_backward(loss);
  CHECK(luna_optimizer_step(o) == LUNA_OK, "%s", luna_error(m->ctx));
  return value;
}
static void check_context(int kind) {
  lm exact = lm_open(kind, nothing), rounded = lm_open(kind, in_8_bits());
  float *a = logits_of(&exact, NULL), *b;
  rounds by_context = {kind, true};
  rounded_check("inference in 8 bits", rounds_run, &by_context, ROUNDED_INT8);
  luna_options many = in_8_bits();
  many.threads = 3;
  lm threads = lm_open(kind, many);
  b = logits_of(&rounded, NULL);
  float *c = logits_of(&threads, NULL);
  CHECK(memcmp(b, c, N * VOCAB * sizeof *b) == 0, "kind %d: other bits with 3 threads", kind);
  free(a), free(b), free(c), luna_close(threads.ctx);
  /* training has float's bits, also after an inference */
  luna_optimizer *x = luna_adamw(exact.params, NULL), *y = luna_adamw(rounded.params, NULL);
  for (int step = 0; step < 4; step++) {
    const float one = step_of(&exact, x), two = step_of(&rounded, y);
    CHECK(memcmp(&one, &two, sizeof one) == 0, "kind %d, step %d: losses %.9g and %.9g", kind, step, (double)one,
          (double)two);
    free(logits_of(&rounded, NULL));
  }
  /* the copies follow what changes parameters: an optimiser, a file, luna_write; here and where the set is shared */
  luna_ctx *other = luna_open(&(luna_options){.threads = 1, .weights = LUNA_DTYPE_I8});
  lm shared = {.ctx = other, .params = luna_params_share(other, rounded.params)};
  const luna_lm_config config = lm_config(kind);
  CHECK(luna_lm_init(&shared.model, shared.params, &config) == LUNA_OK, "%s", luna_error(other));
  for (int way = 0; way < 3; way++) {
    size_t size;
    if (way == 0) step_of(&exact, x), step_of(&rounded, y);
    if (way > 0) common_params(exact.params, (uint64_t)way);
    uint8_t *bytes = file_of(&exact, false, &size);
    if (way == 1) CHECK(luna_load(rounded.params, luna_bytes(bytes, size)) == LUNA_OK, "%s", luna_error(rounded.ctx));
    for (int64_t i = 0; way == 2 && i < luna_params_tensor_count(exact.params); i++)
      luna_write(luna_params_at(rounded.params, i, NULL), luna_params_at(exact.params, i, NULL)->data);
    lm fresh = lm_open(kind, in_8_bits());
    CHECK(luna_load(fresh.params, luna_bytes(bytes, size)) == LUNA_OK, "%s", luna_error(fresh.ctx));
    a = logits_of(&fresh, NULL), b = logits_of(&rounded, NULL), c = logits_of(&shared, NULL);
    CHECK(memcmp(a, b, N * VOCAB * sizeof *a) == 0, "kind %d, way %d: copies are of older values", kind, way);
    CHECK(memcmp(a, c, N * VOCAB * sizeof *a) == 0, "kind %d, way %d: shared copies are of older values", kind, way);
    free(a), free(b), free(c), free(bytes), luna_close(fresh.ctx);
  }
  luna_close(other), luna_close(exact.ctx), luna_close(rounded.ctx);
}
/* many rows, so that the feed-forward takes blocks, and more classes than a panel of logits has */
static void check_long(void) {
  enum { ROWS = 1000, CLASSES = 1500 };
  int32_t *tokens = common_tokens(ROWS, 3, CLASSES);
  float loss[4], *y[4];
  for (int way = 0; way < 4; way++) { /* float; 8 bits by 1 and 3 threads, and by the reference */
    luna_ctx *ctx = luna_open(&(luna_options){.threads = way == 2 ? 3 : 1, .weights = way ? LUNA_DTYPE_I8 : 0,
                                              .isa = way == 3 ? LUNA_ISA_REFERENCE : LUNA_ISA_BEST});
    luna_params *params = luna_params_open(ctx);
    luna_classifier model;
    luna_linear_layer output;
    luna_classifier_config config = {.classes = 5, .vocab = CLASSES};
    config.encoder.layer.dim = 32, config.encoder.layer.heads = 2, config.encoder.layer.ffn = 48;
    config.encoder.layers = 2, config.encoder.max_length = ROWS, config.per_step = true;
    CHECK(luna_classifier_init(&model, params, &config) == LUNA_OK, "%s", luna_error(ctx));
    CHECK(luna_linear_layer_init(&output, params, "out", 32, CLASSES, (luna_init){LUNA_INIT_XAVIER, 1}) == LUNA_OK,
          "%s", luna_error(ctx));
    common_params(params, 7);
    luna_begin_inference(ctx);
    y[way] = common_floats(ROWS * 5);
    CHECK(luna_read(luna_classifier_forward(&model, &(luna_input){.tokens = tokens, .batch = 1, .n = ROWS}), y[way]) ==
          LUNA_OK, "%s", luna_error(ctx));
    const float value = luna_item(luna_linear_cross_entropy(common_tensor(ctx, 5, ROWS, 32, 0, 0), output.weight,
                                                            output.bias, tokens, NULL));
    loss[way] = value;
    luna_close(ctx);
  }
  rounded_far(false, test_error(y[1], y[0], ROWS * 5));
  test_close("the reference", y[3], y[1], ROWS * 5, 2e-3);
  CHECK(memcmp(y[1], y[2], ROWS * 5 * sizeof(float)) == 0, "a long sequence has other bits with 3 threads");
  CHECK(fabsf(loss[1] - loss[3]) <= 1e-5f * loss[3] && loss[1] != loss[0], "the loss is %g, the reference's %g",
        (double)loss[1], (double)loss[3]);
  for (int way = 0; way < 4; way++) free(y[way]);
  free(tokens);
}
/* a context that measures says what a block must hold */
static void check_block(void) {
  luna_options o = in_8_bits();
  o.measure = true;
  lm m = lm_open(0, o);
  luna_begin_inference(m.ctx);
  (void)luna_lm_forward(&m.model, &(luna_input){.tokens = some_tokens(), .batch = 1, .n = N});
  const size_t size = luna_memory(m.ctx).peak;
  luna_close(m.ctx);
  for (int less = 0; less < 2; less++) {
    void *block = common_alloc(size);
    o.measure = false, o.block = block, o.block_size = less ? size - 64 : size;
    m = lm_open(0, o);
    luna_begin_inference(m.ctx);
    const luna_tensor *y = luna_lm_forward(&m.model, &(luna_input){.tokens = some_tokens(), .batch = 1, .n = N});
    CHECK((y == NULL) == (less == 1), "a block of %zu bytes: %s", o.block_size, luna_error(m.ctx));
    luna_close(m.ctx), free(block);
  }
}

/* ---- files ---- */
static void check_file(int kind) {
  lm m = lm_open(kind, nothing), into = lm_open(kind, nothing);
  size_t size, size8;
  uint8_t *bytes = file_of(&m, false, &size), *bytes8 = file_of(&m, true, &size8);
  CHECK(size8 < size * 45 / 100, "8 bits take %zu of %zu bytes", size8, size);
  for (int way = 0; way < 3; way++) {
    luna_load_report report = {0};
    luna_model any;
    lm empty = {.ctx = luna_open(NULL)};
    empty.params = luna_params_open(empty.ctx);
    common_params(into.params, 1);
    const luna_file file = luna_bytes(bytes8, size8);
    const luna_status status = way == 0 ? luna_load(into.params, file) : way == 1 ?
        luna_load_matching(into.params, file, &report) : luna_load_model(&any, empty.params, file);
    const lm *to = way == 2 ? &empty : &into;
    CHECK(status == LUNA_OK && report.unused == 0 && report.missing == 0, "way %d: %s", way, luna_error(to->ctx));
    CHECK(luna_params_tensor_count(to->params) == luna_params_tensor_count(m.params), "other parameters");
    for (int64_t i = 0; status == LUNA_OK && i < luna_params_tensor_count(m.params); i++) {
      const char *name;
      const luna_tensor *a = luna_params_at(m.params, i, &name), *b = luna_params_find(to->params, name);
      const bool rounded = a->rank == 2 && a->shape[1] >= 16 && strstr(name, "weight") &&
                           !strstr(name, "router"); /* other weights would choose other slots */
      for (int64_t r = 0; b && r < (a->rank == 2 ? a->shape[0] : 1); r++) {
        const int64_t n = a->rank == 2 ? a->shape[1] : a->shape[0];
        float largest = 0, off = 0;
        for (int64_t j = 0; j < n; j++) {
          largest = fmaxf(largest, fabsf(a->data[r * n + j]));
          off = fmaxf(off, fabsf(a->data[r * n + j] - b->data[r * n + j]));
        }
        CHECK(off <= (rounded ? largest / 127 * 0.5001f : 0), "%s, row %lld: off by %g of %g", name, (long long)r,
              (double)off, (double)largest);
      }
    }
    luna_close(empty.ctx);
  }
  free(bytes), free(bytes8);
  luna_close(m.ctx), luna_close(into.ctx);
}
/* replaces text of the header by text of the same length */
static void change(uint8_t *bytes, const char *from, const char *to) {
  const size_t n = strlen(from);
  for (uint8_t *at = bytes + 8; at < bytes + 20000; at++)
    if (memcmp(at, from, n) == 0) {
      memcpy(at, to, n);
      return;
    }
  CHECK(false, "%s is not in the header", from);
}
static void check_damaged(void) {
  static const char *const changes[][2] = {
    {"fc1.weight.scale\"", "fc1.weight.scala\""}, {"fc1.weight\":{\"dtype\":\"I8\"", "fc1.weight\":{\"dtype\":\"U8\""},
    {"fc1.weight.scale\":{\"dtype\":\"F32\"", "fc1.weight.scale\":{\"dtype\":\"I32\""},
    {"fc1.weight.scale\":{\"dtype\":\"F32\",\"shape\":[96]", "fc1.weight.scale\":{\"dtype\":\"F32\",\"shape\":[95]"},
    {"q_proj.weight.scale", "q_proj.weighs.scale"}, {"embed_tokens.weight\":{", "embed_tokenz.weight\":{"}
  };
  size_t size;
  lm m = lm_open(0, nothing);
  for (size_t i = 0; i < sizeof changes / sizeof *changes; i++) {
    uint8_t *bytes = file_of(&m, true, &size);
    const char *error = "";
    luna_model any;
    luna_ctx *ctx = luna_open(NULL);
    change(bytes, changes[i][0], changes[i][1]);
    CHECK(luna_load(m.params, luna_bytes(bytes, size)) != LUNA_OK, "%s: luna_load", changes[i][1]);
    CHECK(luna_load_model(&any, luna_params_open(ctx), luna_bytes(bytes, size)) != LUNA_OK, "%s: luna_load_model",
          changes[i][1]);
    CHECK(*luna_error(ctx), "%s: no sentence", changes[i][1]);
    const size_t need = luna_stream_size(bytes, size, NULL, &error);
    void *memory = common_alloc(need ? need : 1);
    CHECK(!luna_stream_open_bytes(bytes, size, NULL, memory, need, &error) && *error, "%s: a stream", changes[i][1]);
    free(memory), free(bytes);
    luna_close(ctx);
  }
  luna_close(m.ctx);
}

/* bytes of the header become other ones: what still opens can be used, the rest is refused with a sentence */
static void check_mutated(void) {
  static const char alphabet[] = "0123456789,:[]{}\"IF83U.scale";
  size_t size, size8;
  lm m = lm_open(0, nothing), into = lm_open(0, nothing);
  uint8_t *bytes = file_of(&m, true, &size8), *mutant = (uint8_t *)common_alloc(size8);
  size_t header = 0;
  for (int i = 7; i >= 0; i--) header = header << 8 | bytes[i];
  int opened = 0;
  for (uint64_t round = 0; round < 400; round++) {
    size = round % 20 ? size8 : 8 + header + common_hash(round, 1) % (size8 - 8 - header);
    memcpy(mutant, bytes, size);
    for (uint64_t i = 0; i <= round % 3; i++)
      mutant[8 + common_hash(round, 2 * i + 2) % header] =
          (uint8_t)alphabet[common_hash(round, 2 * i + 3) % (sizeof alphabet - 1)];
    const char *error = "";
    const size_t need = luna_stream_size(mutant, size, NULL, &error);
    char *memory = need ? (char *)common_alloc(need) : NULL;
    luna_stream *s = need ? luna_stream_open_bytes(mutant, size, NULL, memory, need, &error) : NULL;
    CHECK(s || *error, "round %d: a stream is refused without a sentence", (int)round);
    for (int t = 0; s && t < 3; t++) (void)luna_stream_step(s, some_tokens() + t);
    const luna_status status = luna_load(into.params, luna_bytes(mutant, size));
    CHECK(status == LUNA_OK || *luna_error(into.ctx), "round %d: a file is refused without a sentence", (int)round);
    opened += s != NULL;
    free(memory);
  }
  CHECK(opened < 400, "every file of 400 damaged ones opens");
  free(bytes), free(mutant), luna_close(m.ctx), luna_close(into.ctx);
}

/* ---- what a trained model loses, on data that it has not seen ---- */
enum { TEXT_ROWS = 128, TEXT_BATCH = 4, TEXT_STEPS = 150, HELD = 40 };
static int32_t text_at(const uint8_t *text, size_t size, size_t i) { return text[i % size]; }
/* bits a byte of HELD windows behind the text that was trained on; by streams, where `weights` says of which */
static double text_bits(const lm *m, const uint8_t *text, size_t from, size_t size, const luna_dtype *weights) {
  double sum = 0;
  for (size_t w = 0; w < HELD; w++) {
    int32_t tokens[TEXT_ROWS + 1];
    for (size_t i = 0; i <= TEXT_ROWS; i++) tokens[i] = text_at(text, size, from + w * TEXT_ROWS + i);
    if (!weights) {
      luna_begin_inference(m->ctx);
      const luna_input input = {.tokens = tokens, .batch = 1, .n = TEXT_ROWS};
      sum += (double)luna_item(luna_lm_loss(&m->model, &input, tokens + 1)) * TEXT_ROWS;
      continue;
    }
    const luna_stream_config c = {.weights = *weights};
    luna_stream *s = luna_stream_open(&m->model, &c);
    for (int i = 0; i < TEXT_ROWS && s; i++) {
      const float *y = luna_stream_step(s, tokens + i);
      double exps = 0;
      for (int k = 0; y && k < 256; k++) exps += exp((double)y[k]);
      if (y) sum += log(exps) - (double)y[tokens[i + 1]];
    }
    luna_stream_close(s);
  }
  return sum / (HELD * TEXT_ROWS) / log(2);
}
static void check_text(void) {
  static uint8_t text[100000];
  FILE *in = fopen("tests/data/excerpt.txt", "rb");
  if (!CHECK(in != NULL, "tests/data/excerpt.txt is not there")) return;
  const size_t size = fread(text, 1, sizeof text, in), train = size - HELD * TEXT_ROWS - 1;
  fclose(in);
  lm m[2];
  const luna_lm_config config = {.vocab = 256, .layers = 2, .layer = {.dim = 64, .heads = 4, .ffn = 256,
    .convolution = 4, .pre_norm = true, .forget = LUNA_FORGET_GATED}};
  for (int i = 0; i < 2; i++) {
    m[i].ctx = luna_open(&(luna_options){.seed = 2, .threads = 2, .weights = i ? LUNA_DTYPE_I8 : LUNA_DTYPE_F32});
    m[i].params = luna_params_open(m[i].ctx);
    CHECK(luna_lm_init(&m[i].model, m[i].params, &config) == LUNA_OK, "%s", luna_error(m[i].ctx));
  }
  luna_optimizer *adam = luna_adamw(m[0].params, &(luna_optimizer_config){.lr = 3e-3f});
  for (uint64_t step = 0; step < TEXT_STEPS; step++) {
    int32_t tokens[TEXT_BATCH * TEXT_ROWS], labels[TEXT_BATCH * TEXT_ROWS];
    for (size_t i = 0; i < TEXT_BATCH * TEXT_ROWS; i++) {
      const size_t at = common_hash(step, i / TEXT_ROWS) % (train - TEXT_ROWS) + i % TEXT_ROWS;
      tokens[i] = text[at], labels[i] = text[at + 1];
    }
    luna_begin_step(m[0].ctx);
    luna_backward(luna_lm_loss(&m[0].model, &(luna_input){.tokens = tokens, .batch = TEXT_BATCH, .n = TEXT_ROWS},
                               labels));
    CHECK(luna_optimizer_step(adam) == LUNA_OK, "%s", luna_error(m[0].ctx));
  }
  for (int64_t i = 0; i < luna_params_tensor_count(m[0].params); i++)
    luna_write(luna_params_at(m[1].params, i, NULL), luna_params_at(m[0].params, i, NULL)->data);
  const luna_dtype rounded = LUNA_DTYPE_I8;
  const double exact = text_bits(&m[0], text, train, size, NULL), inference = text_bits(&m[1], text, train, size, NULL),
      stream = text_bits(&m[0], text, train, size, &rounded);
  printf("a byte model: %.4f bits a byte, in 8 bits %.4f, its stream %.4f\n", exact, inference, stream);
  CHECK(exact < 4.5, "the model has learnt nothing: %.3f bits a byte", exact);
  CHECK(inference < exact + 0.01 && stream < exact + 0.01, "8 bits lose %.4f and %.4f bits a byte", inference - exact,
        stream - exact);
  luna_close(m[0].ctx), luna_close(m[1].ctx);
}
/* sequences of two symbols and a label: which of both there is more of */
static int32_t more_of(uint64_t seed, int64_t n, int32_t *tokens) {
  const uint64_t share = 30 + common_hash(seed, 1) % 41;
  int64_t ones = 0;
  for (int64_t i = 0; i < n; i++) ones += tokens[i] = common_hash(seed, (uint64_t)i + 2) % 100 < share;
  return 2 * ones > n;
}
static void check_classifier(void) {
  enum { BATCH = 16, ROWS = 64, STEPS = 120, CASES = 1000 };
  luna_classifier model[2];
  luna_ctx *ctx[2];
  luna_params *params[2];
  luna_classifier_config config = {.vocab = 2, .classes = 2};
  config.encoder.layers = 2, config.encoder.layer.dim = 32, config.encoder.layer.heads = 2;
  config.encoder.layer.ffn = 64, config.encoder.layer.memory = 8;
  for (int i = 0; i < 2; i++) {
    ctx[i] = luna_open(&(luna_options){.seed = 3, .threads = 2, .weights = i ? LUNA_DTYPE_I8 : LUNA_DTYPE_F32});
    params[i] = luna_params_open(ctx[i]);
    CHECK(luna_classifier_init(&model[i], params[i], &config) == LUNA_OK, "%s", luna_error(ctx[i]));
  }
  luna_optimizer *adam = luna_adamw(params[0], &(luna_optimizer_config){.lr = 2e-3f});
  int32_t tokens[BATCH * ROWS], labels[BATCH], answer[2][BATCH];
  for (uint64_t step = 0; step < STEPS; step++) {
    for (int b = 0; b < BATCH; b++) labels[b] = more_of(step * BATCH + (uint64_t)b, ROWS, tokens + b * ROWS);
    luna_begin_step(ctx[0]);
    const luna_input input = {.tokens = tokens, .batch = BATCH, .n = ROWS};
    luna_backward(luna_cross_entropy(luna_classifier_forward(&model[0], &input), labels, NULL));
    CHECK(luna_optimizer_step(adam) == LUNA_OK, "%s", luna_error(ctx[0]));
  }
  for (int64_t i = 0; i < luna_params_tensor_count(params[0]); i++)
    luna_write(luna_params_at(params[1], i, NULL), luna_params_at(params[0], i, NULL)->data);
  int right = 0, same = 0, cases = 0;
  for (uint64_t at = 0; at < CASES; at += BATCH) {
    for (int b = 0; b < BATCH; b++) labels[b] = more_of(1000000 + at + (uint64_t)b, ROWS, tokens + b * ROWS);
    for (int i = 0; i < 2; i++) {
      luna_begin_inference(ctx[i]);
      const luna_input input = {.tokens = tokens, .batch = BATCH, .n = ROWS};
      CHECK(luna_argmax(luna_classifier_forward(&model[i], &input), answer[i]) == LUNA_OK, "%s", luna_error(ctx[i]));
    }
    for (int b = 0; b < BATCH; b++, cases++) right += answer[0][b] == labels[b], same += answer[0][b] == answer[1][b];
  }
  printf("a classifier: %d of %d right, in 8 bits the same answer in %d\n", right, cases, same);
  CHECK(right > cases * 85 / 100, "the classifier has learnt nothing: %d of %d", right, cases);
  CHECK(same >= cases * 99 / 100, "in 8 bits %d of %d answers are the same", same, cases);
  luna_close(ctx[0]), luna_close(ctx[1]);
}

/* ---- memory, and what is refused ---- */
static void *counted_allocate(void *user, size_t bytes) { return *(size_t *)user += bytes, malloc(bytes); }
static void counted_release(void *user, void *at, size_t bytes) { *(size_t *)user -= bytes, free(at); }
static void check_memory(void) {
  size_t held = 0;
  luna_options o = nothing;
  o.allocator = (luna_allocator){counted_allocate, counted_release, &held};
  o.threads = 1;
  luna_ctx *ctx = luna_open(&o);
  luna_params *params = luna_params_open(ctx);
  luna_lm model;
  const luna_lm_config config = {.vocab = 256, .layers = 4, .layer = {.dim = 256, .heads = 4, .ffn = 1024}};
  CHECK(luna_lm_init(&model, params, &config) == LUNA_OK, "%s", luna_error(ctx));
  const double weights = 4 * (double)luna_params_element_count(params);
  size_t size8, state[2], file[2];
  uint8_t *bytes = (uint8_t *)common_alloc((size_t)weights + 100000);
  for (int int8 = 0; int8 < 2; int8++) {
    const luna_stream_config c = {.weights = int8 ? LUNA_DTYPE_I8 : LUNA_DTYPE_F32, .chunk = 1};
    const size_t before = held;
    luna_stream *s = luna_stream_open(&model, &c);
    state[int8] = held - before;
    luna_stream_close(s);
    const luna_file to = luna_buffer(bytes, (size_t)weights + 100000, &size8);
    CHECK((int8 ? luna_save_int8(params, to) : luna_save(params, to)) == LUNA_OK, "%s", luna_error(ctx));
    file[int8] = luna_stream_size(bytes, size8, &c, NULL);
  }
  const double added = ((double)state[1] - (double)state[0]) / weights;
  /* the file is read in place; the stream's memory beside it, over a float stream's */
  const double stored = ((double)size8 + (double)file[1] - (double)file[0]) / weights;
  printf("of a float model's bytes: quantised at opening adds %.3f, an I8 file and its stream's part take %.3f\n",
         added, stored);
  CHECK(added > 0.15 && added < 0.28, "8 bits add %.3f of the weights", added);
  CHECK(stored > 0.15 && stored < 0.3, "an I8 file's stream takes %.3f of the weights", stored);
  free(bytes), luna_close(ctx);
  CHECK(held == 0, "%zu bytes are not given back", held);
}
/* a parameter that is called as a weight's scales would be: the weight is saved as float, and the file loads */
static void check_scale_name(void) {
  static const char *const names[] = {"layers.0.fc1.weight", "layers.0.fc1.weight.scale", "layers.0.fc2.weight"};
  const int64_t rows[1] = {96};
  lm m = lm_open(0, nothing), loaded = lm_open(0, nothing);
  luna_tensor *own = luna_param(m.params, names[1], 1, rows, (luna_init){LUNA_INIT_NORMAL, 1});
  CHECK(own && luna_param(loaded.params, names[1], 1, rows, (luna_init){LUNA_INIT_ZEROS, 0}), "%s", luna_error(m.ctx));
  size_t size;
  uint8_t *bytes = file_of(&m, true, &size);
  CHECK(luna_load(loaded.params, luna_bytes(bytes, size)) == LUNA_OK, "%s", luna_error(loaded.ctx));
  for (int i = 0; i < 3; i++) {
    const luna_tensor *saved = luna_params_find(m.params, names[i]), *now = luna_params_find(loaded.params, names[i]);
    CHECK((memcmp(saved->data, now->data, (size_t)luna_count(now) * sizeof(float)) == 0) == (i < 2), "%s in 8 bits: %d",
          names[i], i < 2);
  }
  free(bytes), luna_close(m.ctx), luna_close(loaded.ctx);
}
static void check_refused(void) {
  const char *error = "";
  luna_options o = nothing;
  o.weights = (luna_dtype)7, o.error = &error;
  CHECK(!luna_open(&o) && strstr(error, "options.weights"), "%s", error);
  lm m = lm_open(0, nothing);
  const luna_stream_config c = {.weights = (luna_dtype)7};
  CHECK(!luna_stream_open(&m.model, &c) && strstr(luna_error(m.ctx), "config.weights"), "%s", luna_error(m.ctx));
  /* weights that are not finite: the outputs are not, and it is said */
  luna_params_find(m.params, "layers.0.fc1.weight")->data[5] = (float)NAN;
  luna_stream *s = luna_stream_open(&m.model, &(luna_stream_config){.weights = LUNA_DTYPE_I8});
  CHECK(luna_stream_step(s, some_tokens()) && luna_stream_error_id(s) == LUNA_ERROR_STREAM_NOT_FINITE, "%s",
        luna_stream_error(s));
  luna_stream_close(s), luna_close(m.ctx);
}

int main(void) {
  for (int kind = 0; kind < KINDS; kind++) check_streams(kind), check_file(kind);
  for (int kind = 0; kind < KINDS; kind++)
    if (kind != 3) check_context(kind);
  check_prefill();
  check_long();
  rounded_figures("models in 8 bits");
  check_block();
  check_damaged();
  check_mutated();
  check_memory();
  check_refused();
  check_scale_name();
  check_text();
  check_classifier();
  return test_report("int8_models");
}
