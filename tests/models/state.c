/* A state that is carried from one forward pass to the next, in training too (gradients.c has its gradients), and the
   horizon of models. */
#include "luna.h"

#include <stdlib.h>
#include <string.h>

#include "test.h"
#include "common.h"

enum { BATCH = 2, ROWS = 150, VOCAB = 11, FEATURES = 3 };
static int32_t tokens[BATCH * ROWS], labels[BATCH * ROWS];
static float features[BATCH * ROWS * FEATURES];

typedef struct setup {
  luna_ctx *ctx;
  luna_params *params;
  luna_lm model;
  int64_t outputs;
} setup;
/* features or tokens, each memory, with a convolution or without */
static setup open_model(int variant, int threads) {
  setup s;
  luna_lm_config config = {.layers = 2, .layer = { .dim = 16, .heads = 2, .memory = 4, .ffn = 24 }};
  if (variant % 2) config.features = FEATURES, config.outputs = 5;
  else config.vocab = VOCAB;
  config.layer.forget = (luna_forget)(variant / 2 % 3);
  config.layer.convolution = variant < 6 ? 4 : 0;
  config.layer.pre_norm = variant >= 6;
  config.layer.output_gate = variant >= 6;
  config.layer.horizon = variant == 7 ? 40 : LUNA_HORIZON_NONE;
  s.outputs = variant % 2 ? 5 : VOCAB;
  s.ctx = luna_open(&(luna_options){.threads = threads, .seed = 3});
  s.params = luna_params_open(s.ctx);
  CHECK(luna_lm_init(&s.model, s.params, &config) == LUNA_OK, "%s", luna_error(s.ctx));
  return s;
}
enum { VARIANTS = 12 };
/* rows [first, first + n) of every sequence */
static luna_input window(const setup *s, int64_t first, int64_t n) {
  static int32_t some_tokens[BATCH * ROWS];
  static float some_features[BATCH * ROWS * FEATURES];
  for (int64_t i = 0; i < BATCH * n; i++) {
    const int64_t at = i / n * ROWS + first + i % n;
    some_tokens[i] = tokens[at];
    memcpy(some_features + i * FEATURES, features + at * FEATURES, FEATURES * sizeof(float));
  }
  const bool numbers = s->model.config.features > 0;
  return (luna_input){.tokens = numbers ? NULL : some_tokens, .batch = BATCH, .n = n,
                      .features = numbers ? some_features : NULL};
}
/* the logits of a forward pass, into rows [first, first + n) of `out` */
static void forward(setup *s, luna_lm_state *state, int64_t first, int64_t n, float *out) {
  const luna_input input = window(s, first, n);
  float *part = (float *)malloc((size_t)(BATCH * n * s->outputs) * sizeof(float));
  luna_begin_inference(s->ctx);
  if (state) CHECK(luna_lm_state_continue(state) == LUNA_OK, "%s", luna_error(s->ctx));
  CHECK(luna_read(luna_lm_forward(&s->model, &input), part) == LUNA_OK, "%s", luna_error(s->ctx));
  for (int64_t i = 0; i < BATCH * n; i++)
    memcpy(out + (i / n * ROWS + first + i % n) * s->outputs, part + i * s->outputs,
           (size_t)s->outputs * sizeof(float));
  free(part);
}

/* windows that continue one another are one sequence; a stream's state is the same and goes either way */
static void windows(int variant) {
  static const int64_t sizes[] = {70, 1, 0, 3, 64, 12}; /* a window without rows changes nothing */
  setup s = open_model(variant, 2);
  const size_t count = (size_t)(BATCH * ROWS * s.outputs);
  float *whole = (float *)calloc(count, sizeof(float)), *parts = (float *)calloc(count, sizeof(float));
  luna_lm_state *state = luna_lm_state_open(&s.model, BATCH);
  forward(&s, NULL, 0, ROWS, whole);
  for (int64_t i = 0, at = 0; i < 6; at += sizes[i++]) forward(&s, state, at, sizes[i], parts);
  test_close("windows", parts, whole, count, 2e-6);

  luna_stream *stream = luna_stream_open(&s.model, &(luna_stream_config){.batch = BATCH});
  luna_input input = window(&s, 0, ROWS);
  const size_t size = luna_lm_state_size(state);
  unsigned char *bytes = (unsigned char *)malloc(size), *others = (unsigned char *)malloc(size);
  CHECK(size == luna_stream_state_size(stream), "variant %d: a state of %zu bytes, the stream's has %zu", variant, size,
        luna_stream_state_size(stream));
  CHECK(luna_lm_state_save(state, bytes, size) == LUNA_OK, "%s", luna_error(s.ctx));
  CHECK(luna_stream_prefill(stream, &input) && luna_stream_state_save(stream, others, size) == LUNA_OK, "prefill: %s",
        luna_stream_error(stream));
  /* both go on with the first row */
  input = window(&s, 0, 1);
  float *next = (float *)calloc(count, sizeof(float)), from_stream[2][BATCH * VOCAB];
  for (int i = 0; i < 2; i++) {
    if (i) CHECK(luna_stream_state_load(stream, bytes, size) == LUNA_OK, "%s", luna_stream_error(stream));
    const float *y = input.features ? luna_stream_step_features(stream, input.features) :
                                      luna_stream_step(stream, input.tokens);
    if (CHECK(y, "%s", luna_stream_error(stream)))
      memcpy(from_stream[i], y, (size_t)(BATCH * s.outputs) * sizeof(float));
  }
  test_close("a stream that goes on from a state", from_stream[1], from_stream[0], (size_t)(BATCH * s.outputs), 2e-6);
  luna_begin_inference(s.ctx);
  CHECK(luna_lm_state_load(state, others, size) == LUNA_OK, "%s", luna_error(s.ctx));
  forward(&s, state, 0, 1, next);
  for (int b = 0; b < BATCH; b++)
    test_close("a state that goes on from a stream", next + b * ROWS * s.outputs, from_stream[0] + b * s.outputs,
               (size_t)s.outputs, 2e-6);
  luna_stream_close(stream);
  luna_close(s.ctx);
  free(whole), free(parts), free(bytes), free(others), free(next);
}

/* sequence 1 starts anew after 50 rows */
static void restart(int variant) {
  setup s = open_model(variant, 1);
  const size_t count = (size_t)(BATCH * ROWS * s.outputs), row = (size_t)(ROWS * s.outputs);
  float *on = (float *)calloc(count, sizeof(float)), *anew = (float *)calloc(count, sizeof(float)),
        *got = (float *)calloc(count, sizeof(float));
  luna_lm_state *state = luna_lm_state_open(&s.model, BATCH);
  const int32_t second = 1, wrong = BATCH;
  forward(&s, state, 0, 50, got);
  forward(&s, state, 50, 70, on);
  luna_begin_inference(s.ctx);
  CHECK(luna_lm_state_restart(state, NULL, 0) == LUNA_OK, "%s", luna_error(s.ctx));
  forward(&s, state, 50, 70, anew);
  luna_begin_inference(s.ctx);
  CHECK(luna_lm_state_restart(state, NULL, 0) == LUNA_OK, "%s", luna_error(s.ctx));
  forward(&s, state, 0, 50, got);
  luna_begin_inference(s.ctx);
  CHECK(luna_lm_state_restart(state, &wrong, 1) == LUNA_BAD_ARGUMENT, "a sequence that is not there started anew");
  luna_begin_inference(s.ctx);
  CHECK(luna_lm_state_restart(state, &second, 1) == LUNA_OK, "%s", luna_error(s.ctx));
  forward(&s, state, 50, 70, got);
  const size_t at = (size_t)(50 * s.outputs), n = (size_t)(70 * s.outputs);
  CHECK(memcmp(got + at, on + at, n * sizeof(float)) == 0, "variant %d: sequence 0 does not go on", variant);
  CHECK(memcmp(got + row + at, anew + row + at, n * sizeof(float)) == 0, "variant %d: sequence 1 does not start anew",
        variant);
  luna_close(s.ctx);
  free(on), free(anew), free(got);
}

/* A memory that forgets is saved whole when one sequence, the first one too, has just started anew. */
static void restart_saved(int variant, int32_t anew) {
  setup s = open_model(variant, 1);
  const size_t count = (size_t)(BATCH * ROWS * s.outputs);
  float *want = (float *)calloc(count, sizeof(float)), *got = (float *)calloc(count, sizeof(float));
  luna_lm_state *state = luna_lm_state_open(&s.model, BATCH), *loaded = luna_lm_state_open(&s.model, BATCH);
  const size_t size = luna_lm_state_size(state);
  unsigned char *bytes = (unsigned char *)malloc(size);
  forward(&s, state, 0, 50, want);
  luna_begin_inference(s.ctx);
  CHECK(luna_lm_state_restart(state, &anew, 1) == LUNA_OK && luna_lm_state_save(state, bytes, size) == LUNA_OK &&
            luna_lm_state_load(loaded, bytes, size) == LUNA_OK, "%s", luna_error(s.ctx));
  memset(want, 0, count * sizeof(float));
  forward(&s, state, 50, 1, want);
  forward(&s, loaded, 50, 1, got);
  for (int b = 0; b < BATCH; b++)
    test_close("a saved state with a sequence started anew", got + (b * ROWS + 50) * s.outputs,
               want + (b * ROWS + 50) * s.outputs, (size_t)s.outputs, 2e-6);
  luna_stream *stream = luna_stream_open(&s.model, &(luna_stream_config){.batch = BATCH});
  const luna_input next = window(&s, 50, 1);
  CHECK(luna_stream_state_load(stream, bytes, size) == LUNA_OK, "%s", luna_stream_error(stream));
  const float *y = luna_stream_prefill(stream, &next);
  for (int b = 0; b < BATCH; b++)
    test_close("a stream with a sequence started anew", y + b * s.outputs, want + (b * ROWS + 50) * s.outputs,
               (size_t)s.outputs, 2e-6);
  luna_stream_close(stream);
  luna_close(s.ctx);
  free(want), free(got), free(bytes);
}

/* A pass that fails for want of memory, in training before the end of luna_backward, leaves the state as it was. */
static size_t used, most;            /* bytes in use; 0, or how many can be */
static void *allocate(void *user, size_t size) {
  void *memory = most && used + size > most ? NULL : malloc(size);
  return (void)user, used += memory ? size : 0, memory;
}
static void release(void *user, void *pointer, size_t size) { (void)user, used -= size, free(pointer); }
/* Two windows. The second, longer one has `more` bytes, 0: any number; without enough of them it is made again with all
   memory. Returns whether it was; the state is in `bytes`. */
static bool retried(bool trains, size_t more, unsigned char *bytes, size_t room) {
  const luna_options options = {.threads = 1, .allocator = {allocate, release, NULL}};
  luna_lm_config config = {.vocab = 500, .layers = 1, .layer = {.dim = 8, .heads = 2, .forget = LUNA_FORGET_GATED}};
  luna_lm model;
  bool again = false, good = false;
  luna_ctx *ctx = luna_open(&options);
  luna_params *params = luna_params_open(ctx);
  CHECK(luna_lm_init(&model, params, &config) == LUNA_OK, "%s", luna_error(ctx));
  luna_lm_state *state = luna_lm_state_open(&model, 1);
  for (int i = 0; i < 2 + again; i++) {
    const int first = i ? 4 : 0;
    const luna_input input = {.tokens = tokens + first, .batch = 1, .n = i ? 140 : 4};
    most = i == 1 && more ? used + more : 0;
    (void)(trains ? luna_begin_step(ctx) : luna_begin_inference(ctx));
    luna_lm_state_continue(state);
    good = trains ? luna_backward(luna_lm_loss(&model, &input, labels + first)) == LUNA_OK :
        luna_lm_forward(&model, &input) != NULL;
    again = again || !good;
  }
  CHECK(good && luna_lm_state_size(state) <= room && luna_lm_state_save(state, bytes, room) == LUNA_OK, "%s",
        luna_error(ctx));
  luna_close(ctx);
  return again;
}
static void retries(bool trains) {
  static unsigned char want[1 << 14], got[1 << 14];
  long failed = 0;
  CHECK(!retried(trains, 0, want, sizeof want), "a step fails");
  for (size_t more = 1; retried(trains, more, got, sizeof got); more += 4096, failed++)
    CHECK(memcmp(got, want, sizeof got) == 0, "with %zu more bytes the state has read a window twice", more);
  CHECK(failed > 9, "a step takes %ld times 4 KiB", failed);
}

/* `steps` steps of windows of 30 rows; the sum of the parameters' bits */
static void train(setup *s, luna_lm_state *state, luna_optimizer *adam, int64_t from, int64_t steps) {
  for (int64_t step = from; step < from + steps; step++) {
    const int64_t first = step * 30 % 120;
    int32_t wanted[BATCH * 30];
    for (int64_t i = 0; i < BATCH * 30; i++) wanted[i] = labels[i / 30 * ROWS + first + i % 30] % (int32_t)s->outputs;
    const luna_input input = window(s, first, 30);
    luna_begin_step(s->ctx);
    if (state) luna_lm_state_continue(state);
    luna_backward(luna_lm_loss(&s->model, &input, wanted));
    CHECK(luna_optimizer_step(adam) == LUNA_OK, "%s", luna_error(s->ctx));
  }
}
static bool same(const setup *a, const setup *b) {
  for (int64_t i = 0; i < luna_params_tensor_count(a->params); i++) {
    const luna_tensor *x = luna_params_at(a->params, i, NULL), *y = luna_params_at(b->params, i, NULL);
    if (memcmp(x->data, y->data, (size_t)luna_count(x) * sizeof(float))) return false;
  }
  return true;
}
/* bits: of any number of threads, and of a training that was saved and goes on */
static void training(int variant) {
  char path[300];
  setup a = open_model(variant, 1), b = open_model(variant, 3), c = open_model(variant, 1);
  setup none = open_model(variant, 1);
  luna_lm_state *states[3] = {luna_lm_state_open(&a.model, BATCH), luna_lm_state_open(&b.model, BATCH),
                              luna_lm_state_open(&c.model, BATCH)};
  luna_optimizer *adams[4] = {luna_adamw(a.params, NULL), luna_adamw(b.params, NULL), luna_adamw(c.params, NULL),
                              luna_adamw(none.params, NULL)};
  snprintf(path, sizeof path, "%s/state_test.safetensors", common_build());
  train(&a, states[0], adams[0], 0, 7);
  train(&b, states[1], adams[1], 0, 7);
  CHECK(same(&a, &b), "variant %d: 1 thread and 3 differ", variant);
  train(&none, NULL, adams[3], 0, 7);
  CHECK(!same(&a, &none), "variant %d: the state has no effect", variant);
  CHECK(luna_save_training(adams[3], luna_path(path)) == LUNA_OK, "%s", luna_error(none.ctx));
  CHECK(luna_load_training(adams[2], luna_path(path)) == LUNA_MISMATCH && strstr(luna_error(c.ctx), "state"),
        "a training without a state loads: %s", luna_error(c.ctx));
  train(&none, NULL, adams[3], 0, 1);
  luna_lm_state *measuring = luna_lm_state_open(&a.model, 1); /* is not what training carries */
  luna_input short_input = window(&a, 0, 5);
  short_input.batch = 1;
  luna_begin_inference(a.ctx);
  luna_lm_state_continue(measuring);
  CHECK(luna_lm_forward(&a.model, &short_input), "%s", luna_error(a.ctx));
  CHECK(luna_save_training(adams[0], luna_path(path)) == LUNA_OK, "%s", luna_error(a.ctx));
  CHECK(luna_load_training(adams[2], luna_path(path)) == LUNA_OK, "%s", luna_error(c.ctx));
  train(&a, states[0], adams[0], 7, 4);
  train(&c, states[2], adams[2], 7, 4);
  CHECK(same(&a, &c), "variant %d: a training that goes on has other bits", variant);
  remove(path);
  luna_close(a.ctx), luna_close(b.ctx), luna_close(c.ctx), luna_close(none.ctx);
}

static void refusals(void) {
  setup s = open_model(0, 1), other = open_model(2, 1);
  luna_lm_state *state = luna_lm_state_open(&s.model, BATCH), *three = luna_lm_state_open(&s.model, 3),
                *unlike = luna_lm_state_open(&other.model, BATCH);
  const int32_t lengths[BATCH] = {3, 3};
  const size_t size = luna_lm_state_size(state);
  unsigned char *bytes = (unsigned char *)malloc(2 * size);
  luna_input input = window(&s, 0, 5);
  luna_begin_inference(s.ctx);
  CHECK(luna_lm_state_continue(state) == LUNA_OK && luna_lm_state_continue(state) != LUNA_OK &&
            luna_error_id_of(s.ctx) == LUNA_ERROR_STATE_TWICE, "a state goes on twice in a step");
  luna_begin_inference(s.ctx);
  luna_lm_state_continue(three);
  CHECK(!luna_lm_forward(&s.model, &input) && luna_error_id_of(s.ctx) == LUNA_ERROR_STATE_INPUT, "%s",
        luna_error(s.ctx));
  luna_begin_inference(s.ctx);
  luna_lm_state_continue(state);
  input.lengths = lengths;
  CHECK(!luna_lm_forward(&s.model, &input) && luna_error_id_of(s.ctx) == LUNA_ERROR_STATE_INPUT, "%s",
        luna_error(s.ctx));
  input.lengths = NULL;
  luna_begin_inference(s.ctx);
  luna_lm_state_continue(state);
  CHECK(luna_lm_forward(&s.model, &input) && !luna_lm_forward(&s.model, &input) &&
            luna_error_id_of(s.ctx) == LUNA_ERROR_STATE_TWICE, "two passes of a step go on from one state");
  luna_begin_inference(s.ctx);
  CHECK(luna_lm_state_save(state, bytes, size) == LUNA_OK && luna_lm_state_load(unlike, bytes, size) != LUNA_OK &&
            luna_error_id_of(other.ctx) == LUNA_ERROR_STATE_OTHER, "another model's state loads");
  CHECK(luna_lm_state_load(state, bytes, size - 1) != LUNA_OK, "half a state loads");
  bytes[0] ^= 1;
  CHECK(luna_lm_state_load(state, bytes, size) != LUNA_OK, "a damaged state loads");
  CHECK(!luna_lm_state_open(&s.model, 0) && !luna_lm_state_open(NULL, 1), "a state of no sequences, or no model");
  CHECK(!luna_lm_state_open(&s.model, (int64_t)1 << 40) && luna_error_id_of(s.ctx) == LUNA_ERROR_VALUE_RANGE,
        "a state whose size no integer holds: %s", luna_error(s.ctx));
  luna_params *params = luna_params_open(s.ctx);
  luna_lm softmax;
  luna_lm_config config = {.layers = 1, .layer = {.dim = 8, .heads = 2, .attention = LUNA_ATTENTION_SOFTMAX}};
  CHECK(luna_lm_init(&softmax, params, &config) == LUNA_OK && !luna_lm_state_open(&softmax, 1) &&
            luna_error_id_of(s.ctx) == LUNA_ERROR_STATE_MODEL, "a state of softmax attention");
  luna_close(s.ctx), luna_close(other.ctx);
  free(bytes);
}

/* a state in a file of a training that is of another batch, of another type, or at a place that no sequence can have */
static char file[1 << 20];
static size_t file_size;
static bool to_file(void *user, const void *bytes, size_t size);
static luna_status load_file(luna_optimizer *optimizer) {
  return luna_load_training(optimizer, luna_bytes(file, file_size));
}
static size_t header_size(void) {
  size_t header = 0;
  for (int i = 7; i >= 0; i--) header = header << 8 | (unsigned char)file[i];
  return header;
}
static void check_places(luna_optimizer *adam) {
  static const int64_t wrong[] = {-1, ((int64_t)1 << 53) + 1, INT64_MIN};
  const int64_t rows = 60;
  size_t at = file_size - sizeof rows;
  while (at > 8 + header_size() && memcmp(file + at, &rows, sizeof rows) != 0) at -= sizeof(float);
  if (!CHECK(at > 8 + header_size(), "the file has no position")) return;
  for (int i = 0; i < 3; i++) {
    memcpy(file + at, &wrong[i], sizeof rows);
    CHECK(load_file(adam) == LUNA_MISMATCH, "a state at %.0f loads", (double)wrong[i]);
  }
  memcpy(file + at, &rows, sizeof rows);
  CHECK(load_file(adam) == LUNA_OK, "the file itself does not load");
}
static int dropped;
static void take_log(void *user, luna_status status, const char *text) {
  (void)user;
  dropped += status == LUNA_OK && strstr(text, "luna_lm_state_open") != NULL;
}
/* options.log is told when a training goes on without its state, and only then */
static void drops_state(void) {
  for (int i = 0; i < 4; i++) {
    const bool saved = i % 2, opened = i / 2;
    setup s = open_model(2, 1);
    luna_lm_state *state = saved ? luna_lm_state_open(&s.model, BATCH) : NULL;
    luna_optimizer *adam = luna_adamw(s.params, NULL);
    const luna_io io = {NULL, to_file, NULL, 0};
    train(&s, state, adam, 0, 1);
    file_size = 0;
    CHECK(luna_save_training(adam, luna_callbacks(&io)) == LUNA_OK, "%s", luna_error(s.ctx));
    luna_ctx *ctx = luna_open(&(luna_options){.log = take_log});
    luna_params *params = luna_params_open(ctx);
    luna_lm model;
    CHECK(luna_lm_init(&model, params, &s.model.config) == LUNA_OK, "%s", luna_error(ctx));
    if (opened) luna_lm_state_open(&model, BATCH);
    dropped = 0;
    CHECK(load_file(luna_adamw(params, NULL)) == (opened && !saved ? LUNA_MISMATCH : LUNA_OK), "%s", luna_error(ctx));
    CHECK(dropped == (saved && !opened), "a state that was %s saved, %s opened: the log has %d notes",
          saved ? "" : "not", opened ? "" : "not", dropped);
    luna_close(s.ctx), luna_close(ctx);
  }
}
static void bad_files(void) {
  setup s = open_model(0, 1), two = open_model(0, 1), one = open_model(0, 1);
  luna_lm_state *state = luna_lm_state_open(&s.model, BATCH), *same_batch = luna_lm_state_open(&two.model, BATCH),
                *other_batch = luna_lm_state_open(&one.model, 1);
  luna_optimizer *adam = luna_adamw(s.params, NULL), *adams[2] = {luna_adamw(two.params, NULL),
                                                                  luna_adamw(one.params, NULL)};
  const luna_io io = {NULL, to_file, NULL, 0};
  CHECK(state && same_batch && other_batch, "no state");
  train(&s, state, adam, 0, 2);
  file_size = 0;
  CHECK(luna_save_training(adam, luna_callbacks(&io)) == LUNA_OK, "%s", luna_error(s.ctx));
  CHECK(load_file(adams[1]) == LUNA_MISMATCH && luna_error_id_of(one.ctx) == LUNA_ERROR_STATE_MISSING,
        "a state of %d sequences becomes one of one: %s", BATCH, luna_error(one.ctx));
  if (common_little_endian()) check_places(adams[0]);
  /* the state, which is last, as bytes: a quarter as large */
  char *entry = strstr(file + 8, "\"luna.state\":{\"dtype\":\"F32\""),
       *end = entry ? strstr(entry, "offsets\":[") : NULL;
  if (CHECK(end, "the file has no state")) {
    char digits[40];
    const int64_t first = strtoll(end + 10, &end, 10), last = strtoll(end + 1, NULL, 10);
    const int length = snprintf(digits, sizeof digits, "%lld", (long long)last);
    snprintf(digits, sizeof digits, "%lld", (long long)(first + (last - first) / 4));
    memcpy(end + 1, "                   ", (size_t)length);
    memcpy(end + 1, digits, strlen(digits));
    memcpy(strstr(entry, "F32\""), "I8\" ", 4);
    file_size = 8 + header_size() + (size_t)(first + (last - first) / 4);
    CHECK(load_file(adams[0]) == LUNA_MISMATCH && luna_error_id_of(two.ctx) == LUNA_ERROR_STATE_MISSING,
          "a state of bytes loads: %s", luna_error(two.ctx));
  }
  luna_close(s.ctx), luna_close(two.ctx), luna_close(one.ctx);
}

/* the published memory's means belong to one position: sequences at different ones have no state of a stream */
static void uneven(void) {
  const int32_t second = 1;
  setup s = open_model(0, 1);
  luna_lm_state *state = luna_lm_state_open(&s.model, BATCH);
  const size_t size = luna_lm_state_size(state);
  unsigned char *bytes = (unsigned char *)malloc(size);
  float *out = (float *)calloc((size_t)(BATCH * ROWS * s.outputs), sizeof(float));
  forward(&s, state, 0, 5, out);
  luna_begin_inference(s.ctx);
  CHECK(luna_lm_state_restart(state, &second, 1) == LUNA_OK, "%s", luna_error(s.ctx));
  CHECK(luna_lm_state_save(state, bytes, size) != LUNA_OK && luna_error_id_of(s.ctx) == LUNA_ERROR_STATE_POSITIONS,
        "sequences at different positions are saved: %s", luna_error(s.ctx));
  luna_begin_inference(s.ctx);
  CHECK(luna_lm_state_restart(state, NULL, 0) == LUNA_OK && luna_lm_state_save(state, bytes, size) == LUNA_OK, "%s",
        luna_error(s.ctx));
  bytes[0] ^= 1;
  CHECK(luna_lm_state_load(state, bytes, size) != LUNA_OK && luna_error_id_of(s.ctx) == LUNA_ERROR_STATE_OTHER,
        "a damaged state loads: %s", luna_error(s.ctx));
  bytes[0] ^= 1;
  luna_begin_inference(s.ctx);
  luna_lm_state_continue(state); /* while a pass goes on from it */
  CHECK(luna_lm_state_load(state, bytes, size) != LUNA_OK && luna_error_id_of(s.ctx) == LUNA_ERROR_STATE_TWICE &&
            strstr(luna_error(s.ctx), "luna_lm_state_load"), "a state that is in use loads: %s", luna_error(s.ctx));
  CHECK(luna_lm_state_restart(state, NULL, 0) != LUNA_OK && luna_error_id_of(s.ctx) == LUNA_ERROR_STATE_TWICE &&
            strstr(luna_error(s.ctx), "luna_lm_state_restart"), "it starts anew: %s", luna_error(s.ctx));
  CHECK(luna_lm_state_load(state, NULL, size) != LUNA_OK && luna_error_id_of(s.ctx) == LUNA_ERROR_NULL_ARGUMENT, "%s",
        luna_error(s.ctx));
  CHECK(luna_lm_state_save(state, bytes, size - 1) != LUNA_OK && luna_error_id_of(s.ctx) == LUNA_ERROR_SAVE_BUFFER,
        "a state is saved to too few bytes: %s", luna_error(s.ctx));
  luna_close(s.ctx);
  free(bytes), free(out);
}
/* nor do embeddings of positions, whose sequences a stream has at one position */
static void uneven_positions(void) {
  static unsigned char bytes[1 << 14];
  const int32_t second = 1;
  luna_ctx *ctx = luna_open(NULL);
  luna_params *params = luna_params_open(ctx);
  luna_lm model;
  luna_lm_config config = {.vocab = VOCAB, .layers = 1, .positions = LUNA_POSITIONS_SINUSOIDAL,
                           .layer = {.dim = 8, .heads = 2, .forget = LUNA_FORGET_GATED}};
  CHECK(luna_lm_init(&model, params, &config) == LUNA_OK, "%s", luna_error(ctx));
  luna_lm_state *state = luna_lm_state_open(&model, BATCH);
  luna_begin_inference(ctx);
  luna_lm_state_continue(state);
  CHECK(luna_lm_forward(&model, &(luna_input){.tokens = tokens, .batch = BATCH, .n = 9}), "%s", luna_error(ctx));
  luna_begin_inference(ctx);
  CHECK(luna_lm_state_save(state, bytes, sizeof bytes) == LUNA_OK, "%s", luna_error(ctx));
  CHECK(luna_lm_state_restart(state, &second, 1) == LUNA_OK &&
            luna_lm_state_save(state, bytes, sizeof bytes) != LUNA_OK &&
            luna_error_id_of(ctx) == LUNA_ERROR_STATE_POSITIONS, "different positions are saved: %s", luna_error(ctx));
  luna_close(ctx);
}

/* ---- the horizon: the longest sequence of training, or what the config says, saved with the model ---- */
static bool to_file(void *user, const void *bytes, size_t size) {
  (void)user;
  if (file_size + size >= sizeof file) return false;
  memcpy(file + file_size, bytes, size);
  return file[file_size += size] = 0, true;
}
static const char *save(const luna_params *params) {
  const luna_io io = {.write = to_file};
  file_size = 0;
  CHECK(luna_save(params, luna_callbacks(&io)) == LUNA_OK, "%s", luna_error(luna_params_ctx(params)));
  return file + 8;                   /* its header; the text ends with the first byte 0 of the numbers */
}
/* A set takes its horizon from each file that it loads, unless its own config fixed it. */
static void horizons_of_files(void) {
  static const int64_t fixed[3] = {7, 0, 9}, longest[3] = {7, 12, 9};
  static char files[2][1 << 14];
  size_t sizes[2];
  for (int i = 0; i < 3; i++) {      /* two files; then a set that loads both, and one that keeps its own */
    for (int own = 0; own <= (i == 2); own++) {
      luna_ctx *ctx = luna_open(NULL);
      luna_params *params = luna_params_open(ctx);
      luna_lm model;
      char wanted[40];
      luna_lm_config config = {.vocab = VOCAB, .layers = 1, .layer = {.dim = 8, .heads = 2, .memory = 3}};
      config.layer.horizon = i == 2 && !own ? 0 : fixed[i];
      CHECK(luna_lm_init(&model, params, &config) == LUNA_OK, "%s", luna_error(ctx));
      luna_begin_step(ctx);
      if (i == 1)
        CHECK(luna_lm_loss(&model, &(luna_input){.tokens = tokens, .batch = 1, .n = 12}, tokens + 1), "%s",
              luna_error(ctx));
      for (int k = 0; i == 2 && k < 2; k++) {
        CHECK(luna_load(params, luna_bytes(files[k], sizes[k])) == LUNA_OK, "%s", luna_error(ctx));
        snprintf(wanted, sizeof wanted, "luna.horizon\":\"%d\"", (int)longest[own ? 2 : k]);
        CHECK(strstr(save(params), wanted), "file %d, own %d: not %s", k, own, wanted);
      }
      (void)save(params);
      if (i < 2 && CHECK(file_size <= sizeof files[i], "a file of %zu bytes", file_size))
        memcpy(files[i], file, sizes[i] = file_size);
      luna_close(ctx);
    }
  }
}
static void horizon(int64_t asked, const char *wanted) {
  luna_ctx *ctx = luna_open(NULL), *again = luna_open(NULL);
  luna_params *params = luna_params_open(ctx), *loaded = luna_params_open(again);
  luna_lm model, other;
  luna_lm_config config = {.vocab = VOCAB, .layers = 1, .layer = {.dim = 8, .heads = 2, .memory = 3, .horizon = asked}};
  float got[100 * VOCAB], first[VOCAB];
  CHECK(luna_lm_init(&model, params, &config) == LUNA_OK, "%s", luna_error(ctx));
  luna_optimizer *adam = luna_adamw(params, NULL);
  for (int64_t n = 20; n <= 30; n += 5) {
    luna_begin_step(ctx);
    luna_backward(luna_lm_loss(&model,
        &(luna_input){.tokens = tokens, .batch = 1, .n = n == 25 ? 30 : n == 30 ? 25 : n},
                               tokens + 1));
    CHECK(luna_optimizer_step(adam) == LUNA_OK, "%s", luna_error(ctx));
  }
  const char *header = save(params), *at = strstr(header, "luna.horizon");
  CHECK(wanted ? at && strncmp(at, wanted, strlen(wanted)) == 0 : !at, "horizon %d: the file says %.30s", (int)asked,
        at ? at : "nothing");
  if (!CHECK(luna_load_model_of(LUNA_MODEL_LM, &other, loaded, luna_bytes(file, file_size)) == LUNA_OK, "%s",
             luna_error(again))) return;
  luna_begin_inference(again);
  luna_read(luna_lm_forward(&other, &(luna_input){.tokens = tokens, .batch = 1, .n = 100}), got);
  luna_stream *of_model = luna_stream_open(&other, NULL), *none = luna_stream_open(
      &other, &(luna_stream_config){.horizon = LUNA_HORIZON_NONE});
  void *memory = malloc(luna_stream_size(file, file_size, NULL, NULL));
  luna_stream *of_bytes = luna_stream_open_bytes(file, file_size, NULL, memory,
                                                 luna_stream_size(file, file_size, NULL, NULL), NULL);
  const float *a = NULL, *b = NULL, *c = NULL;
  for (int t = 0; t < 100; t++) {
    a = luna_stream_step(of_model, tokens + t), b = luna_stream_step(of_bytes, tokens + t);
    c = luna_stream_step(none, tokens + t);
    if (t == 0) memcpy(first, c, sizeof first);
  }
  test_close("a stream past its horizon", a, got + 99 * VOCAB, VOCAB, 2e-6);
  if (common_little_endian()) /* files in place are read there alone */
    test_close("a stream of bytes past its horizon", b, got + 99 * VOCAB, VOCAB, 2e-6);
  CHECK((test_error(c, a, VOCAB) > 1e-4) == (wanted != NULL), "horizon %d: as none: %g", (int)asked,
        test_error(c, a, VOCAB));
  luna_stream_close(of_model), luna_stream_close(none);
  free(memory);
  luna_close(ctx), luna_close(again);
}
/* a decoder whose memory forgets, with output gates: its stream gives what the whole forward pass gives; sources
   shorter than the memory too */
static void decoder(luna_forget forget) {
  enum { N = 9, M = 40 };
  static const int32_t lengths[BATCH] = {N, 3};
  luna_ctx *ctx = luna_open(NULL);
  luna_params *params = luna_params_open(ctx);
  luna_seq2seq model;
  luna_seq2seq_config config = {.vocab = VOCAB,
      .encoder = {.layers = 2, .layer = { .dim = 16, .heads = 2, .memory = 5, .ffn = 24 }}};
  float whole[BATCH * M * VOCAB];
  config.encoder.layer.forget = forget, config.encoder.layer.output_gate = true;
  CHECK(luna_seq2seq_init(&model, params, &config) == LUNA_OK, "%s", luna_error(ctx));
  const luna_input source = {.tokens = tokens, .lengths = lengths, .batch = BATCH, .n = N};
  luna_begin_inference(ctx);
  luna_tensor *y = luna_seq2seq_forward(&model, &source, &(luna_input){.tokens = labels, .batch = BATCH, .n = M});
  CHECK(luna_read(y, whole) == LUNA_OK, "%s", luna_error(ctx));
  luna_stream *stream = luna_seq2seq_stream_open(&model, &source, 1);
  for (int t = 0; CHECK(stream, "%s", luna_error(ctx)) && t < M; t++) {
    const int32_t next[BATCH] = {labels[t], labels[M + t]};
    const float *step = luna_stream_step(stream, next);
    if (!CHECK(step, "%s", luna_stream_error(stream))) break;
    for (int b = 0; b < BATCH; b++)
      test_close("a decoder's step", step + b * VOCAB, whole + (b * M + t) * VOCAB, VOCAB, 2e-6);
  }
  luna_stream_close(stream);
  luna_close(ctx);
}
/* a file of a later luna.h */
static void newer(void) {
  setup s = open_model(4, 1);
  const char *error = "";
  char *format = strstr((char *)(uintptr_t)save(s.params), "\"luna.format\":\"2\"");
  luna_ctx *ctx = luna_open(NULL);
  luna_lm model;
  if (!CHECK(format, "the file has no luna.format")) return;
  CHECK(luna_stream_size(file, file_size, NULL, &error) > 0, "%s", error);
  format[15] = '4';
  CHECK(luna_load_model_of(LUNA_MODEL_LM, &model, luna_params_open(ctx), luna_bytes(file, file_size)) != LUNA_OK &&
            strstr(luna_error(ctx), LUNA_VERSION), "a file of a later format: %s", luna_error(ctx));
  CHECK(luna_stream_size(file, file_size, NULL, &error) == 0 && strstr(error, LUNA_VERSION), "%s", error);
  luna_close(ctx), luna_close(s.ctx);
}

int main(void) {
  for (int i = 0; i < BATCH * ROWS; i++) {
    tokens[i] = (i * 7 + i * i / 3) % VOCAB;
    labels[i] = (i * 5 + 3) % VOCAB;
    for (int k = 0; k < FEATURES; k++) features[i * FEATURES + k] = sinf((float)(i * (k + 2)) * 0.37f);
  }
  for (int variant = 0; variant < VARIANTS; variant++) {
    windows(variant);
    if (variant < 6) restart(variant), training(variant);
  }
  refusals();
  bad_files(), drops_state(), uneven(), uneven_positions();
  for (int variant = 2; variant < VARIANTS; variant++)
    for (int32_t anew = 0; variant / 2 % 3 && anew < BATCH; anew++) restart_saved(variant, anew);
  retries(false), retries(true);
  horizons_of_files();
  horizon(0, "luna.horizon\":\"30\"");
  horizon(7, "luna.horizon\":\"7\"");
  horizon(LUNA_HORIZON_NONE, NULL);
  newer();
  for (int forget = 0; forget < 3; forget++) decoder((luna_forget)forget);
  return test_report("state");
}
