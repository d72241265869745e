/* Streaming: against the training form, steps against chunks, 10^5 tokens, saving, copying,
   reordering, streams opened from a checkpoint's bytes, what is refused, sampling. */
#include "test.h"
#define LUNA_IMPLEMENTATION
#include "luna.h"
#include "examples/luna_ops.h"
#include "common.h"

enum { VOCAB = 29, DIM = 16, SLOTS = 4, KINDS = 4 };

typedef struct lm {
  luna_ctx *ctx;
  luna_params *params;
  luna_lm model;
} lm;

static bool lm_open(lm *m, int kind, luna_isa isa) {
  luna_options options = {0};
  luna_lm_config config = {0};
  options.threads = 1;
  options.isa = isa;
  options.seed = 4;
  m->ctx = luna_open(&options);
  m->params = luna_params_open(m->ctx);
  config.vocab = VOCAB;
  config.layers = kind == 3 ? 1 : 3;
  config.layer.memory = SLOTS;
  config.layer.dim = DIM;
  config.layer.heads = kind == 3 ? 1 : 2;
  config.layer.pre_norm = kind % 2 == 1;
  config.layer.convolution = kind == 2 ? 0 : kind == 3 ? 7 : 4;
  config.layer.sharing = kind >= 2 ? LUNA_SHARING_FULL : LUNA_SHARING_TIED;
  config.layer.omega = kind == 1 ? LUNA_ACTIVATION_ELU1 : kind == 2 ?
      LUNA_ACTIVATION_SOFTPLUS : LUNA_ACTIVATION_DEFAULT;
  config.layer.activation = kind == 1 ? LUNA_ACTIVATION_GELU : LUNA_ACTIVATION_DEFAULT;
  if (!CHECK(luna_lm_init(&m->model, m->params, &config) == LUNA_OK, "luna_lm_init: %s", luna_error(m->ctx)))
    return false;
  common_params(m->params, 60);
  return true;
}
static luna_stream *stream_open(const lm *m, int64_t batch, int64_t chunk, luna_isa isa) {
  luna_stream_config config = {0};
  config.batch = batch;
  config.chunk = chunk;
  config.isa = isa;
  luna_stream *s = luna_stream_open(&m->model, &config);
  CHECK(s != NULL, "luna_stream_open: %s", luna_error(m->ctx));
  return s;
}
/* one token of each sequence of tokens [batch, n] */
static const float *step_at(luna_stream *s, const int32_t *tokens, int64_t batch, int64_t n, int64_t t) {
  int32_t now[8];
  for (int64_t b = 0; b < batch; b++) now[b] = tokens[b * n + t];
  return luna_stream_step(s, now);
}
/* columns [from, from + count) of tokens [batch, n], as one prefill */
static const float *prefill_at(luna_stream *s, const int32_t *tokens, int64_t batch, int64_t n, int64_t from,
                               int64_t count) {
  int32_t *part = (int32_t *)common_alloc((size_t)(batch * count) * sizeof(int32_t));
  for (int64_t i = 0; i < batch * count; i++) part[i] = tokens[i / count * n + from + i % count];
  const float *logits = luna_stream_prefill(s, &(luna_input){ part, NULL, 0, count, NULL });
  free(part);
  return logits;
}

/* ---- against the training form: steps give every row of the logits, prefills of odd sizes the rows where they end
   ---- */
static void check_training_form(int kind, luna_isa isa, int64_t batch) {
  static const int64_t parts[] = {1, 63, 1, 64, 65, 2, 7, 130, 3};
  const int64_t n = 336;
  lm m;
  if (!lm_open(&m, kind, isa)) {
    luna_close(m.ctx);
    return;
  }
  int32_t *tokens = common_tokens(batch * n, 70, VOCAB);
  float *expected = common_floats(batch * n * VOCAB), *got = common_floats(batch * n * VOCAB),
      *row = common_floats(batch * VOCAB);
  luna_begin_inference(m.ctx);
  luna_tensor *y = luna_lm_forward(&m.model, &(luna_input){ tokens, NULL, batch, n, NULL });
  if (CHECK(y && luna_read(y, expected) == LUNA_OK, "luna_lm_forward: %s", luna_error(m.ctx))) {
    luna_stream *s = stream_open(&m, batch, 0, isa), *p = stream_open(&m, batch, kind == 1 ? 16 : 0, isa);
    for (int64_t t = 0; t < n; t++) {
      const float *logits = step_at(s, tokens, batch, n, t);
      if (!CHECK(logits != NULL, "step %lld: %s", (long long)t, luna_stream_error(s))) break;
      for (int64_t b = 0; b < batch; b++) memcpy(got + (b * n + t) * VOCAB, logits + b * VOCAB, VOCAB * sizeof(float));
    }
    char what[96];
    snprintf(what, sizeof what, "model %d, batch %d, %s: steps against the training form", kind, (int)batch,
             luna_isa_name(isa));
    test_close(what, got, expected, (size_t)(batch * n * VOCAB), 5e-6);
    CHECK(luna_stream_position(s) == n, "after %lld steps the position is %lld", (long long)n,
          (long long)luna_stream_position(s));
    snprintf(what, sizeof what, "model %d, batch %d, %s: prefills against the training form", kind, (int)batch,
             luna_isa_name(isa));
    for (size_t i = 0, at = 0; i < sizeof parts / sizeof parts[0]; at += (size_t)parts[i++]) {
      const float *logits = prefill_at(p, tokens, batch, n, (int64_t)at, parts[i]);
      if (!CHECK(logits != NULL, "prefill: %s", luna_stream_error(p))) break;
      for (int64_t b = 0; b < batch; b++)
        memcpy(row + b * VOCAB, expected + (b * n + (int64_t)at + parts[i] - 1) * VOCAB, VOCAB * sizeof(float));
      test_close(what, logits, row, (size_t)(batch * VOCAB), 1e-5);
    }
    CHECK(luna_stream_position(p) == n, "after prefills of %lld tokens the position is %lld", (long long)n,
          (long long)luna_stream_position(p));
    luna_stream_close(s), luna_stream_close(p);
  }
  free(tokens), free(expected), free(got), free(row);
  luna_close(m.ctx);
}

/* ---- 10^5 tokens: steps and prefills stay together, and memory stays what it was ---- */
static void check_long(luna_isa isa) {
  const int64_t n = TEST_QUICK ? 10000 : 100000;
  lm m;
  if (!lm_open(&m, 3, isa)) {
    luna_close(m.ctx);
    return;
  }
  int32_t *tokens = common_tokens(n, 71, VOCAB);
  luna_stream *s = stream_open(&m, 1, 0, isa), *p = stream_open(&m, 1, 0, isa);
  const size_t memory = luna_memory(m.ctx).current;
  int64_t done = 0;
  for (int64_t next = 1000; next <= n; next *= 10) {
    const float *a = NULL, *b = luna_stream_prefill(p, &(luna_input){ tokens + done, NULL, 0, next - done, NULL });
    for (; done < next; done++) a = luna_stream_step(s, tokens + done);
    char what[64];
    snprintf(what, sizeof what, "steps against prefill after %lld tokens", (long long)next);
    test_close(what, a, b, VOCAB, 2e-6);
  }
  CHECK(luna_memory(m.ctx).current == memory, "a stream's memory grew from %zu to %zu bytes", memory,
        luna_memory(m.ctx).current);
  luna_stream_close(s), luna_stream_close(p);
  free(tokens);
  luna_close(m.ctx);
}

/* ---- the state in the caller's hands ---- */
static bool same_logits(const float *a, const float *b, int64_t n) {
  return a && b && memcmp(a, b, (size_t)n * sizeof(float)) == 0;
}

static void check_state(int kind) {
  enum { BATCH = 3, N = 90 };
  lm m, other;
  if (!lm_open(&m, kind, LUNA_ISA_BEST)) {
    luna_close(m.ctx);
    return;
  }
  int32_t *tokens = common_tokens(BATCH * N, 72, VOCAB);
  float kept[BATCH * VOCAB];
  luna_stream *a = stream_open(&m, BATCH, 0, LUNA_ISA_BEST), *b = stream_open(&m, BATCH, 32, LUNA_ISA_BEST),
              *single = stream_open(&m, 1, 0, LUNA_ISA_BEST);
  const size_t size = luna_stream_state_size(a);
  uint8_t *state = (uint8_t *)common_alloc(size);
  prefill_at(a, tokens, BATCH, N, 0, 50);
  CHECK(luna_stream_state_save(a, state, size) == LUNA_OK, "save: %s", luna_stream_error(a));
  memcpy(kept, step_at(a, tokens, BATCH, N, 50), sizeof kept);
  step_at(b, tokens, BATCH, N, 7);
  CHECK(luna_stream_state_load(b, state, size) == LUNA_OK && luna_stream_position(b) == 50, "load: %s",
        luna_stream_error(b));
  CHECK(same_logits(step_at(b, tokens, BATCH, N, 50), kept, BATCH * VOCAB), "a loaded state goes on with other bits");
  CHECK(common_stream_copy(b, a) == LUNA_OK, "copy: %s", luna_stream_error(b));
  memcpy(kept, step_at(a, tokens, BATCH, N, 51), sizeof kept);
  CHECK(same_logits(step_at(b, tokens, BATCH, N, 51), kept, BATCH * VOCAB) && luna_stream_position(b) == 52,
        "a copied state goes on with other bits");

  const int32_t from[BATCH] = {2, 0, 2};
  float reordered[BATCH * VOCAB];
  CHECK(luna_stream_reorder(a, from) == LUNA_OK, "reorder: %s", luna_stream_error(a));
  int32_t next[BATCH] = {5, 6, 5};
  memcpy(reordered, luna_stream_step(a, next), sizeof reordered);
  int32_t straight[BATCH] = {6, 1, 5};
  const float *y = luna_stream_step(b, straight);
  CHECK(same_logits(reordered, y + 2 * VOCAB, VOCAB) && same_logits(reordered + VOCAB, y, VOCAB) &&
            same_logits(reordered + 2 * VOCAB, y + 2 * VOCAB, VOCAB),
        "reordered sequences go on with other bits");

  luna_stream_reset(a), luna_stream_reset(b);
  CHECK(luna_stream_position(a) == 0, "after a reset the position is %lld", (long long)luna_stream_position(a));
  luna_stream *random_floats = stream_open(&m, BATCH, 0, LUNA_ISA_BEST);
  memcpy(kept, prefill_at(random_floats, tokens, BATCH, N, 0, 66), sizeof kept);
  CHECK(same_logits(prefill_at(a, tokens, BATCH, N, 0, 66), kept, BATCH * VOCAB),
        "a stream that was reset differs from a new one");
  for (int i = 0; i < BATCH; i++) { /* one sequence of a batch = alone */
    luna_stream_reset(single);
    y = luna_stream_prefill(single, &(luna_input){ tokens + i * N, NULL, 0, 66, NULL });
    CHECK(same_logits(y, kept + i * VOCAB, VOCAB), "sequence %d of a batch has other bits than alone", i);
  }

  /* refusals leave the state */
  const int64_t position = luna_stream_position(a);
  int32_t bad[BATCH] = {0, VOCAB, 0}, negative[BATCH] = {-1, 0, 0}, outside[BATCH] = {0, 3, 0};
  common_stream_copy(b, a);
  CHECK(!luna_stream_step(a, bad) && luna_stream_error_id(a) == LUNA_ERROR_STREAM_TOKEN,
      "a token out of range is taken");
  CHECK(!luna_stream_step(a, negative) && luna_stream_error_id(a) == LUNA_ERROR_STREAM_TOKEN,
      "a negative token is taken");
  CHECK(!luna_stream_prefill(a, &(luna_input){ bad, NULL, 0, 1, NULL }) &&
        luna_stream_error_id(a) == LUNA_ERROR_STREAM_TOKEN,
      "prefill of a token out of range");
  CHECK(!luna_stream_prefill(a, &(luna_input){ tokens, NULL, 0, -1, NULL }) &&
      luna_stream_error_id(a) == LUNA_ERROR_STREAM_NO_STEPS, "prefill of -1 tokens");
  CHECK(!luna_stream_step(a, NULL) && luna_stream_error_id(a) == LUNA_ERROR_STREAM_NO_TOKENS, "step of null");
  CHECK(luna_stream_reorder(a, outside) != LUNA_OK && luna_stream_error_id(a) == LUNA_ERROR_STREAM_ORDER,
      "reorder from sequence 3 of 3");
  CHECK(common_stream_copy(a, single) != LUNA_OK && luna_stream_error_id(a) == LUNA_ERROR_STREAM_STATE_SIZE,
      "copy of another batch");
  CHECK(luna_stream_state_save(a, state, size - 1) != LUNA_OK &&
        luna_stream_state_load(a, state, size - 1) != LUNA_OK &&
            luna_stream_error_id(a) == LUNA_ERROR_STREAM_STATE_SIZE,
        "a state of another size");
  luna_stream_state_save(a, state, size);
  for (int i = 0; i < 5; i++) { /* a saved state begins with its kind, its batch, its position and the model's sizes */
    static const struct { size_t at; int64_t value; } wrong[5] = {{0, 1}, {8, BATCH + 1}, {16, -1},
                                                                  {16, ((int64_t)1 << 53) + 1}, {24, 77}};
    int64_t right;
    memcpy(&right, (char *)state + wrong[i].at, sizeof right);
    memcpy((char *)state + wrong[i].at, &wrong[i].value, sizeof right);
    CHECK(luna_stream_state_load(a, state, size) != LUNA_OK && luna_stream_error_id(a) == LUNA_ERROR_STREAM_STATE,
          "a state with another number at byte %d is taken", (int)wrong[i].at);
    memcpy((char *)state + wrong[i].at, &right, sizeof right);
  }
  CHECK(luna_stream_state_load(a, state, size) == LUNA_OK, "the state itself is not taken: %s", luna_stream_error(a));
  memset(state, 0xA5, size);
  CHECK(luna_stream_state_load(a, state, size) != LUNA_OK && luna_stream_error_id(a) == LUNA_ERROR_STREAM_STATE,
      "a state of noise is taken");
  CHECK(luna_stream_position(a) == position, "refused calls moved the position to %lld",
        (long long)luna_stream_position(a));
  memcpy(kept, step_at(b, tokens, BATCH, N, 70), sizeof kept);
  CHECK(same_logits(step_at(a, tokens, BATCH, N, 70), kept, BATCH * VOCAB) && luna_stream_error(a)[0] == 0 &&
      !luna_stream_error_id(a),
        "refused calls changed the state: %s", luna_stream_error(a));

  if (lm_open(&other, (kind + 1) % KINDS, LUNA_ISA_BEST)) {
    luna_stream *foreign = stream_open(&other, BATCH, 0, LUNA_ISA_BEST);
    if (luna_stream_state_size(foreign) != size)
      CHECK(common_stream_copy(foreign, a) != LUNA_OK, "a state of another model's sizes is copied");
    luna_stream_close(foreign);
  }
  luna_close(other.ctx);
  luna_stream_close(a), luna_stream_close(b), luna_stream_close(single), luna_stream_close(random_floats);
  free(tokens), free(state);
  luna_close(m.ctx);
}

/* ---- a stream from a checkpoint's bytes ---- */
static void check_bytes(int kind) {
  enum { N = 100 };
  lm m;
  common_bytes file = {NULL, 0, 0, 0};
  luna_io io = {NULL, common_write, NULL, 0};
  luna_stream_config config = {0};
  const char *error = "";
  io.user = &file;
  if (!lm_open(&m, kind, LUNA_ISA_BEST) || !CHECK(luna_save(m.params, luna_callbacks(&io)) == LUNA_OK,
                                                  "luna_save: %s",
                                                  luna_error(m.ctx))) {
    luna_close(m.ctx);
    return;
  }
  int32_t *tokens = common_tokens(2 * N, 73, VOCAB);
  config.batch = 2;
  const size_t size = luna_stream_size(file.at, file.size, &config, &error);
  CHECK(size > 0, "luna_stream_size: %s", error);
  char *memory = (char *)common_alloc(size + 64);
  luna_stream *a = luna_stream_open_bytes(file.at, file.size, &config, memory, size, &error),
      *b = stream_open(&m, 2, 0, LUNA_ISA_BEST);
  if (!common_little_endian())
    CHECK(!a && strstr(error, "little-endian"), "read in place on a big-endian machine: %s", error);
  else if (CHECK(a != NULL, "luna_stream_open_bytes: %s", error)) {
    float kept[2 * VOCAB];
    memcpy(kept, prefill_at(b, tokens, 2, N, 0, 70), sizeof kept);
    CHECK(same_logits(prefill_at(a, tokens, 2, N, 0, 70), kept, 2 * VOCAB),
          "model %d: a stream from bytes has other bits", kind);
    for (int t = 70; t < N; t++) {
      memcpy(kept, step_at(b, tokens, 2, N, t), sizeof kept);
      CHECK(same_logits(step_at(a, tokens, 2, N, t), kept, 2 * VOCAB),
            "model %d: a stream from bytes has other bits at step %d", kind, t);
    }
    luna_stream_close(a);
  }
  error = "";
  CHECK(!luna_stream_open_bytes(file.at, file.size, &config, memory, size - 64, &error) && error[0],
        "64 bytes too few are enough");
  CHECK(luna_stream_open_bytes(file.at, file.size, &config, memory + 8, size, &error) || !common_little_endian(),
        "memory at an odd place: %s", error);
  char *odd = memory + 64 - (uintptr_t)memory % 64 + 1; /* 63 bytes before the next place to begin at */
  error = "";
  CHECK(!luna_stream_open_bytes(file.at, file.size, &config, odd, 10, &error) && error[0], "10 bytes are enough");
  error = "";
  CHECK(!luna_stream_open_bytes(file.at, file.size, &config, NULL, size, &error) && error[0], "no memory is enough");
  config.batch = -1;
  error = "";
  CHECK(luna_stream_size(file.at, file.size, &config, &error) == 0 && error[0], "a batch of -1 has a size");
  config.batch = 2;
  /* a file cut anywhere, and one with a byte of its header changed */
  for (size_t cut = 0; cut < file.size; cut += cut >= 3000 ? 97 : TEST_QUICK ? 11 : 1) {
    uint8_t *piece = (uint8_t *)common_alloc(cut), *changed = (uint8_t *)common_alloc(file.size);
    memcpy(piece, file.at, cut);
    memcpy(changed, file.at, file.size);
    changed[cut] ^= 0x10;
    error = "";
    if (luna_stream_open_bytes(piece, cut, &config, memory, size, &error) || !error[0])
      CHECK(false, "a file cut to %zu bytes is opened (\"%s\")", cut, error);
    a = luna_stream_open_bytes(changed, file.size, &config, memory, size, &error); /* may be fine: a weight changed */
    if (a) luna_stream_step(a, tokens), luna_stream_close(a);
    free(piece), free(changed);
  }
  luna_stream_close(b);

  lm loaded;
  luna_options defaults = {0};
  loaded.ctx = luna_open(&defaults);
  loaded.params = luna_params_open(loaded.ctx);
  if (CHECK(luna_load_model_of(LUNA_MODEL_LM, &loaded.model, loaded.params, luna_bytes(file.at,
                                                                                       file.size)) == LUNA_OK,
            "luna_load_model_of: %s",
            luna_error(loaded.ctx))) {
    CHECK(luna_params_tensor_count(loaded.params) == luna_params_tensor_count(m.params), "%lld parameters were loaded",
          (long long)luna_params_tensor_count(loaded.params));
    for (int64_t i = 0; i < luna_params_tensor_count(m.params); i++) {
      const char *name = "";
      const luna_tensor *p = luna_params_at(m.params, i, &name), *q = luna_params_find(loaded.params, name);
      CHECK(q && luna_count(q) == luna_count(p) && memcmp(p->data, q->data, (size_t)luna_count(p) * sizeof(float)) == 0,
            "parameter %s came back with other bits", name);
    }
  }
  luna_close(loaded.ctx);
  free(tokens), free(memory), free(file.at);
  luna_close(m.ctx);
}

/* ---- what a stream takes: little for single rows, whose products need no scratch, and all of it when it is opened
   ---- */
static int64_t allocations;
static void *counted_allocate(void *user, size_t bytes) {
  (void)user;
  allocations++;
  return malloc(bytes);
}
static void counted_release(void *user, void *at, size_t bytes) {
  (void)user, (void)bytes;
  free(at);
}
static void check_memory(void) {
  /* dim, layers, slots, vocabulary, bytes at most */
  static const int64_t sizes[2][5] = {{64, 2, 16, 256, 132031}, {32, 1, 8, 64, 54975}};
  for (int i = 0; i < 2; i++) {
    common_bytes file = {NULL, 0, 0, 0};
    luna_io io = {NULL, common_write, NULL, 0};
    luna_stream_config one = {0};
    luna_options options = {0};
    luna_lm_config config = {0};
    luna_lm model;
    const char *error = "";
    int32_t tokens[70] = {0};
    options.threads = 1;
    options.allocator.allocate = counted_allocate;
    options.allocator.release = counted_release;
    luna_ctx *ctx = luna_open(&options);
    luna_params *params = luna_params_open(ctx);
    config.layer.dim = sizes[i][0];
    config.layers = sizes[i][1];
    config.layer.memory = sizes[i][2];
    config.vocab = sizes[i][3];
    config.layer.convolution = i == 0 ? 4 : 0;
    io.user = &file;
    if (CHECK(luna_lm_init(&model, params, &config) == LUNA_OK && luna_save(params, luna_callbacks(&io)) == LUNA_OK,
              "%s",
              luna_error(ctx))) {
      one.chunk = 1;
      const size_t bytes = luna_stream_size(file.at, file.size, &one, &error);
      CHECK(bytes > 0 && bytes <= (size_t)sizes[i][4], "a stream of %d dimensions takes %zu bytes %s", (int)sizes[i][0],
            bytes, error);
      luna_stream *s = luna_stream_open(&model, NULL);
      const int64_t before = allocations;
      CHECK(luna_stream_prefill(s, &(luna_input){ .tokens = tokens, .n = 70 }) && luna_stream_step(s, tokens) &&
            luna_stream_reorder(s, tokens) == LUNA_OK,
            "a stream: %s", luna_stream_error(s));
      CHECK(allocations == before, "steps of a stream have made %lld allocations", (long long)(allocations - before));
      luna_stream_close(s);
    }
    free(file.at);
    luna_close(ctx);
  }
}

/* ---- the model with the most tensors is measured: it opens, from a model and from a file in the bytes that are asked
   for, in no fewer, and runs; each layer more takes as many bytes ---- */
static void check_most(void) {
  size_t sizes[3] = {0, 0, 0};
  for (int i = 0; i < 3; i++) {
    luna_lm_config config = {0};
    luna_lm model;
    const char *error = "";
    common_bytes file = {NULL, 0, 0, 0};
    luna_io io = {NULL, common_write, &file, 0};
    const float row[3] = {1, 2, 3};
    luna_ctx *ctx = luna_open(NULL);
    luna_params *params = luna_params_open(ctx);
    config.features = 3, config.outputs = 2, config.layers = i + 1, config.output_norm = true;
    config.positions = LUNA_POSITIONS_LEARNED;
    config.layer.dim = config.layer.ffn = 8, config.layer.heads = 2, config.layer.memory = 100;
    config.layer.pre_norm = config.layer.output_gate = config.layer.gated = true;
    config.layer.convolution = 4, config.layer.forget = LUNA_FORGET_GATED, config.layer.sharing = LUNA_SHARING_FULL;
    if (!CHECK(luna_lm_init(&model, params, &config) == LUNA_OK && luna_save(params, luna_callbacks(&io)) == LUNA_OK,
               "%s", luna_error(ctx))) return;
    luna_stream *s = luna_stream_open(&model, NULL);
    CHECK(s && luna_stream_step_features(s, row), "%d layers: %s %s", i + 1, luna_error(ctx), luna_stream_error(s));
    luna_stream_close(s);
    sizes[i] = luna_stream_size(file.at, file.size, NULL, &error);
    CHECK(sizes[i] > 0, "luna_stream_size: %s", error);
    void *memory = common_alloc(sizes[i]);
    CHECK(!luna_stream_open_bytes(file.at, file.size, NULL, memory, sizes[i] - 64, &error) && *error,
          "%d layers: 64 bytes too few are enough", i + 1);
    s = luna_stream_open_bytes(file.at, file.size, NULL, memory, sizes[i], &error);
    CHECK(!common_little_endian() || (s && luna_stream_step_features(s, row)), "%d layers: %s %s", i + 1, error,
          luna_stream_error(s));
    free(memory), free(file.at);
    luna_close(ctx);
  }
  CHECK(sizes[2] - sizes[1] <= sizes[1] - sizes[0] + 64 && sizes[1] - sizes[0] <= sizes[2] - sizes[1] + 64,
        "layers take %zu and %zu bytes", sizes[1] - sizes[0], sizes[2] - sizes[1]);
}

/* ---- a step of single rows runs the ops that an earlier one has recorded: the bits of a stream that records each time
   ---- */
typedef struct pair {
  luna_stream *s[2];                 /* the second forgets what it has recorded before each call */
  int64_t batch, features, vocab, outputs;
  const char *what;
  int kind;
} pair;
static const float *pair_run(const pair *p, int i, int64_t n, const int32_t *tokens, const float *features) {
  luna_stream *s = p->s[i];
  if (i) li_bump_forget(&s->bump);
  if (n > 1) return luna_stream_prefill(s, &(luna_input){ tokens, NULL, 0, n, features });
  return features ? luna_stream_step_features(s, features) : luna_stream_step(s, tokens);
}
static void pair_check(const pair *p) {
  const size_t size = luna_stream_state_size(p->s[0]);
  char *state[3] = {common_alloc(size), common_alloc(size), common_alloc(size)};
  for (int64_t t = 0; t < 80; t++) {
    const int64_t n = t % 7 == 3 ? 2 + t % 5 * 4 : 1;
    int32_t *tokens = common_tokens(p->batch * n, 700 + (uint64_t)t, p->vocab), order[8];
    float *features = p->features ? common_random(p->batch * n * p->features, 800 + (uint64_t)t, 1) : NULL;
    const float *y[2];
    for (int i = 0; i < 2; i++) {
      luna_stream *s = p->s[i];
      if (t == 30) luna_stream_reset(s);
      if (t == 40) CHECK(luna_stream_state_save(s, state[2], size) == LUNA_OK, "saving: %s", luna_stream_error(s));
      if (t == 50) CHECK(luna_stream_state_load(s, state[2], size) == LUNA_OK, "loading: %s", luna_stream_error(s));
      if (t % 11 == 5) { /* fails, and changes nothing */
        int32_t wrong[8] = {-1};
        float huge[8 * 4];
        for (int f = 0; f < 8 * 4; f++) huge[f] = INFINITY; /* of all sequences */
        CHECK(!pair_run(p, i, 1, wrong, p->features ? huge : NULL) && *luna_stream_error(s), "%s %d: token -1", p->what,
              p->kind);
      }
      y[i] = pair_run(p, i, n, tokens, features);
      for (int64_t b = 0; b < p->batch; b++) order[b] = (int32_t)((b * 2 + t) % p->batch);
      if (t % 3 == 1) CHECK(luna_stream_reorder(s, order) == LUNA_OK, "reordering: %s", luna_stream_error(s));
    }
    CHECK(y[0] && y[1] && memcmp(y[0], y[1], (size_t)(p->batch * p->outputs) * sizeof(float)) == 0,
          "%s %d, batch %d: the logits of step %d have other bits", p->what, p->kind, (int)p->batch, (int)t);
    CHECK(n > 1 || p->s[0]->bump.count > 0, "%s %d: step %d is not recorded", p->what, p->kind, (int)t);
    for (size_t i = 0; i < p->s[0]->bump.count; i++)
      CHECK(!p->s[0]->bump.ops[i].own, "%s %d: a recorded op points to what its call has left", p->what, p->kind);
    free(tokens), free(features);
  }
  for (int i = 0; i < 2; i++) {
    CHECK(luna_stream_state_save(p->s[i], state[i], size) == LUNA_OK, "saving: %s", luna_stream_error(p->s[i]));
    luna_stream_close(p->s[i]);
  }
  CHECK(memcmp(state[0], state[1], size) == 0, "%s %d, batch %d: the state has other bits", p->what, p->kind,
        (int)p->batch);
  for (int i = 0; i < 3; i++) free(state[i]);
}
static void check_replay(int kind) {
  lm m;
  if (lm_open(&m, kind, LUNA_ISA_BEST))
    for (int64_t batch = 1; batch < 4; batch += 2)
      for (int64_t chunk = 1; chunk < 9; chunk += 7) {
        pair p = {{NULL, NULL}, batch, 0, VOCAB, VOCAB, "model", kind};
        for (int i = 0; i < 2; i++) p.s[i] = stream_open(&m, batch, chunk, LUNA_ISA_BEST);
        if (p.s[0] && p.s[1]) pair_check(&p);
      }
  luna_close(m.ctx);
}
static void check_replay_features(int kind) {
  luna_ctx *ctx = luna_open(NULL);
  luna_params *params = luna_params_open(ctx);
  luna_lm_config config = {0};
  luna_stream_config two = {.batch = 2, .chunk = 4};
  luna_lm model;
  config.features = 3;
  config.outputs = 5;
  config.layers = 2;
  config.layer.memory = SLOTS;
  config.layer.dim = DIM;
  config.layer.heads = 2;
  config.positions = kind ? LUNA_POSITIONS_LEARNED : LUNA_POSITIONS_SINUSOIDAL;
  config.max_length = 1000;
  if (CHECK(luna_lm_init(&model, params, &config) == LUNA_OK, "luna_lm_init: %s", luna_error(ctx))) {
    pair p = {{NULL, NULL}, 2, 3, 2, 5, "model of features", kind};
    for (int i = 0; i < 2; i++) p.s[i] = luna_stream_open(&model, &two);
    if (CHECK(p.s[0] && p.s[1], "luna_stream_open: %s", luna_error(ctx))) pair_check(&p);
  }
  luna_close(ctx);
}
/* A state's first eight bytes name its layout. Means that fill whole lines of 64 bytes keep the old mark; others have a
   new one, and a state with the old mark is refused there. */
static void check_state_mark(void) {
  static const int32_t token = 3;
  for (int whole = 0; whole < 2; whole++) {
    luna_ctx *ctx = luna_open(NULL);
    luna_params *params = luna_params_open(ctx);
    luna_lm_config config = {0};
    luna_lm model;
    unsigned char state[1024];
    config.vocab = 11;
    config.layers = 1;
    config.layer.dim = whole ? 8 : 6;
    config.layer.heads = 2;
    config.layer.memory = 3;
    CHECK(luna_lm_init(&model, params, &config) == LUNA_OK, "luna_lm_init: %s", luna_error(ctx));
    luna_stream *s = luna_stream_open(&model, NULL);
    const size_t size = luna_stream_state_size(s);
    if (CHECK(s && size <= sizeof state && luna_stream_step(s, &token) &&
              luna_stream_state_save(s, state, size) == LUNA_OK, "saving: %s", luna_stream_error(s))) {
      const uint16_t one = 1;
      const size_t last = *(const unsigned char *)&one ? 7 : 0; /* of a little-endian machine's number, or else */
      CHECK(state[last] == (whole ? '1' : '2'), "the mark ends with %d", state[last]);
      CHECK(luna_stream_state_load(s, state, size) == LUNA_OK, "loading: %s", luna_stream_error(s));
      state[last] = '1';
      CHECK((luna_stream_state_load(s, state, size) == LUNA_OK) == (whole == 1), "another layout: %s",
            luna_stream_error(s));
    }
    luna_stream_close(s);
    luna_close(ctx);
  }
}
static void check_replay_decoder(int kind) {
  static const int32_t source[12] = {3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8}, lengths[2] = {6, 3};
  luna_ctx *ctx = luna_open(NULL);
  luna_params *params = luna_params_open(ctx);
  luna_seq2seq_config config = {0};
  luna_seq2seq model;
  config.vocab = config.target_vocab = 17;
  config.encoder.layer.dim = DIM;
  config.encoder.layer.heads = 4;
  config.encoder.layers = config.decoder_layers = 2;
  config.encoder.layer.memory = kind == 2 ? 40 : 5; /* folded, and not */
  config.encoder.layer.pre_norm = kind == 1;
  config.encoder.positions = kind == 1 ? LUNA_POSITIONS_LEARNED : LUNA_POSITIONS_SINUSOIDAL;
  config.max_target_length = 1000;
  if (CHECK(luna_seq2seq_init(&model, params, &config) == LUNA_OK, "luna_seq2seq_init: %s", luna_error(ctx))) {
    const int64_t sources = kind ? 2 : 1;
    pair p = {{NULL, NULL}, 3 * sources, 0, 17, 17, "decoder", kind};
    common_params(params, 61);
    for (int i = 0; i < 2; i++)
      p.s[i] = luna_seq2seq_stream_open(&model, &(luna_input){ source, lengths, sources, 6, NULL }, 3);
    if (CHECK(p.s[0] && p.s[1], "luna_seq2seq_stream_open: %s", luna_error(ctx))) pair_check(&p);
  }
  luna_close(ctx);
}

/* ---- sampling ---- */
static void check_sampling(void) {
  enum { N = 6, DRAWS = 60000 };
  const float logits[N] = {0.5f, 2, -1, 1.5f, -INFINITY, 0}, bad[3] = {0, NAN, 1}, tie[3] = {1, 1, 0};
  luna_sampling s = {0, 0, 0, 0}, same = {1, 0, 7, 0}, again = {1, 0, 7, 0};
  CHECK(luna_sample(NULL, 5, &s) == -1 && luna_sample(bad, 3, &s) == -1 && luna_sample(logits, 0, &s) == -1,
        "null, NaN or nothing can be sampled");
  for (int i = 0; i < 100; i++) {
    if (i == 50) s.temperature = 3, s.top_k = 1;
    CHECK(luna_sample(logits, N, i ? &s : NULL) == 1, "%s is not the largest", i < 50 ? "temperature 0" : "top_k 1");
  }
  CHECK(luna_sample(tie, 3, &s) <= 1, "greedy among equals");
  for (int i = 0; i < 50; i++)
    CHECK(luna_sample(logits, N, &same) == luna_sample(logits, N, &again), "one seed gives two sequences");
  CHECK(same.drawn == 50, "50 draws are counted as %llu", (unsigned long long)same.drawn);
  for (int wrong = 0; wrong < 3; wrong++) {
    const float top_p = wrong == 0 ? -0.1f : wrong == 1 ? 1.1f : (float)NAN;
    s.top_k = 0;
    CHECK(luna_sample_top_p(logits, N, top_p, &s) == -1, "top_p %g can be sampled", (double)top_p);
  }
  for (int mode = 0; mode < 6; mode++) { /* all; hot; cold; top 3; the first two, as a part of all and of the top 3 */
    const double temperature = mode == 1 ? 2 : mode == 2 ? 0.5 : 1;
    int64_t count[N] = {0};
    double p[N], sum = 0, worst = 0;
    luna_sampling now = {0, 0, 0, 0};
    now.temperature = (float)temperature;
    now.top_k = mode == 3 || mode == 5 ? 3 : 0;
    const float top_p = mode == 4 ? 0.7f : mode == 5 ? 0.85f : 1;
    now.seed = (uint64_t)mode + 1;
    for (int i = 0; i < DRAWS; i++) {
      const int32_t token = mode < 4 ? luna_sample(logits, N, &now) : luna_sample_top_p(logits, N, top_p, &now);
      if (CHECK(token >= 0 && token < N, "sampled %d", (int)token)) count[token]++;
    }
    for (int i = 0; i < N; i++)
      sum += p[i] = mode >= 3 && (i != 0 || mode > 3) && i != 1 && i != 3 ? 0 : exp((double)logits[i] / temperature);
    for (int i = 0; i < N; i++) {
      const double expected = p[i] / sum, deviation = sqrt(expected * (1 - expected) / DRAWS),
                   off = fabs((double)count[i] / DRAWS - expected);
      if (expected == 0) CHECK(count[i] == 0, "mode %d: token %d of probability 0 was drawn", mode, i);
      else if (off / deviation > worst) worst = off / deviation;
    }
    CHECK(worst < 4.5, "mode %d: a frequency is %.1f deviations from its probability", mode, worst);
  }
}

/* top_p draws from the likeliest tokens alone whose probabilities reach it, and from each of them */
static void check_nucleus(void) {
  enum { N = 40, DRAWS = 3000 };
  for (int round = 0; round < 60; round++) {
    float *x = common_random(N, 400 + (uint64_t)round, round % 3 == 0 ? 0.3 : 4);
    const double top_p = 0.05 + 0.9 * (round % 7) / 7, temperature = round % 2 ? 1 : 0.7;
    luna_sampling now = {(float)temperature, 0, 9, 0};
    bool drawn[N] = {false};
    for (int i = 0; i < N && round % 5 == 0; i++) x[i] = floorf(x[i]); /* with equal ones */
    for (int i = 0; i < DRAWS; i++) drawn[luna_sample_top_p(x, N, (float)top_p, &now)] = true;
    double total = 0;
    for (int i = 0; i < N; i++) total += exp((double)x[i] / temperature);
    for (int i = 0; i < N; i++) {
      double larger = 0, own = exp((double)x[i] / temperature) / total;
      for (int j = 0; j < N; j++) if (x[j] > x[i]) larger += exp((double)x[j] / temperature) / total;
      CHECK(fabs(larger - top_p) < 1e-5 || own * DRAWS < 30 || drawn[i] == (larger < top_p),
            "top_p %g: token %d, after %g of the probability, %s",
            top_p, i, larger, drawn[i] ? "was drawn" : "was never drawn");
      CHECK(larger < top_p + 1e-5 || !drawn[i], "top_p %g: token %d, after %g of the probability, was drawn", top_p, i,
            larger);
    }
    free(x);
  }
}

/* The sentence is of this call, after an earlier failure too. */
static void check_config(void) {
  static const struct { luna_stream_config config; const char *field; } bad[] = {
    {{.chunk = -2}, "config.chunk"}, {{.chunk = INT64_MAX}, "config.chunk"}, {{.batch = -1}, "config.batch"},
    {{.batch = INT64_MAX}, "config.batch"}, {{.isa = (luna_isa)99}, "config.isa"},
    {{.weights = (luna_dtype)99}, "config.weights"}, {{.horizon = -2}, "config.horizon"}};
  lm m;
  if (lm_open(&m, 0, LUNA_ISA_BEST))
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
      for (size_t before = 0; before < sizeof bad / sizeof bad[0]; before++) {
        luna_begin_inference(m.ctx);
        luna_stream_open(&m.model, &bad[before].config);
        CHECK(!luna_stream_open(&m.model, &bad[i].config) && luna_error_id_of(m.ctx) == LUNA_ERROR_STREAM_CONFIG &&
              strstr(luna_error(m.ctx), bad[i].field), "%s after %s: %s", bad[i].field, bad[before].field,
              luna_error(m.ctx));
      }
  luna_close(m.ctx);
}

int main(void) {
  for (int i = 0; i < COMMON_ISAS; i++) {
    if (!luna_isa_available(common_isas[i])) continue;
    for (int kind = 0; kind < KINDS; kind++) {
      check_training_form(kind, common_isas[i], 1);
      check_training_form(kind, common_isas[i], 3);
    }
  }
  check_long(LUNA_ISA_BEST);
  check_long(LUNA_ISA_REFERENCE);
  for (int kind = 0; kind < KINDS; kind++) {
    check_state(kind);
    check_bytes(kind);
    check_replay(kind);
  }
  check_replay_features(0), check_replay_features(1);
  for (int kind = 0; kind < 3; kind++) check_replay_decoder(kind);
  check_memory();
  check_most();
  check_config();
  check_state_mark();
  check_sampling();
  check_nucleus();
  return test_report("stream");
}
