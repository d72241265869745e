/* Arguments: a deterministic fuzz of every public function. A case draws valid arguments and then makes none, one or
   two of them hostile: sizes 0, 1, odd, negative, huge and overflowing; nulls; enums out of range; NaN and Inf; numbers
   out of range; tensors of another context. Afterwards: a valid call succeeded, a failed one left a sentence and its
   id, the models' parameters are as they were, the context still computes; a context's closing gives every byte back.
   Then the orders of closing that luna.h calls legal, and null for each pointer of each function, the other arguments
   valid: build/tests/nulls.h, which tests/robust/nulls.awk makes of tests/tools/api.txt and examples/luna_ops.h. A
   public function that has no case here fails a check, and so does a pointer that is null in no call.
     arguments [function [case]]     runs one function's cases, or one case
   Without TEST_FULL a quarter of the cases runs. */
#include "test.h"
#define LUNA_IMPLEMENTATION
#include "luna.h"
#include "examples/luna_apollo.h"
#include "examples/luna_ops.h"
#include "common.h"
#include <signal.h>
#if defined(__unix__) || defined(__APPLE__)
#include <sys/stat.h>
#include <unistd.h>
#define WATCH(seconds) alarm(seconds) /* a loop over 2^32 rows of nothing is a failure, not a wait */
#else
#define WATCH(seconds) ((void)0)
#endif

enum {
  CASES = 256, HEAVY = 96, CAP = 64 << 20, NUMBERS = 4096, ROOM = 1 << 14, DIM = 8, HEADS = 2, SLOTS = 3, VOCAB = 11,
      FILE_ROOM = 1 << 18
};
#define HUGE_SIZE ((int64_t)1 << 40)

/* ---- a case's numbers, and how many hostile ones it may still have ---- */
static uint64_t case_seed, case_drawn;
static int hostile_left, hostile, broken; /* broken: failures of this case */
static const char *function = "";
static int case_number;

/* which parameter of which function is null in every call, -1: none; whether a failure then has a context to tell */
typedef struct null_row { const char *name; int parameter; const char *of; bool told; } null_row;
static const null_row null_none = {"", -1, "", true};
static null_row null_now = {"", -1, "", true};
static int null_times;               /* how often it was */
static bool null_is(const char *name, int parameter) {
  const bool is = parameter == null_now.parameter && strcmp(name, null_now.name) == 0;
  null_times += is;
  return is;
}
#include "nulls.h"

static uint32_t pick(uint32_t n) { return (uint32_t)(common_hash(case_seed, case_drawn++) % n); }
static bool coin(void) { return pick(2) == 0; }
/* whether the next argument is to be hostile */
static bool turn(void) {
  if (hostile_left == 0 || pick(5) != 0) return false;
  hostile_left--;
  hostile++;
  return true;
}
static void must(bool good, const char *what) {
  CHECK(good, "%s%s%s: %s; repeat with: arguments %s %d", function, *null_now.of ? ", null " : "", null_now.of, what,
        function, case_number);
  broken += !good;
}
/* what a case knows of its arguments does not hold while one of them is null */
static void expect(bool good, const char *what) {
  if (null_now.parameter < 0) must(good, what);
}

static int64_t hostile_size(void) {
  static const int64_t sizes[] = {0, 1, -1, 2, 3, 7, 17, 255, -2, INT32_MAX, (int64_t)INT32_MAX + 1, (int64_t)1 << 32,
                                  ((int64_t)1 << 32) + 1, HUGE_SIZE,
                                  ((int64_t)1 << 47) - 1, (int64_t)1 << 47, ((int64_t)1 << 47) + 1, (int64_t)1 << 62,
                                      INT64_MAX - 1, INT64_MAX, INT64_MIN, INT64_MIN + 1};
  return sizes[pick(sizeof sizes / sizeof sizes[0])];
}
static int64_t size(int64_t usual) { return turn() ? hostile_size() : usual; }
static int64_t small(void) { return size(1 + pick(5)); }
static int number(int usual) {
  static const int numbers[] = {0, 1, -1, 5, 8, 9, 100, INT32_MAX, INT32_MIN};
  return turn() ? numbers[pick(sizeof numbers / sizeof numbers[0])] : usual;
}
static float hostile_real(void) {
  static const float reals[] = {NAN, INFINITY, -INFINITY, -1, 1, 0, 2, 1e30f, -1e-30f, 0.99999997f, 1e-45f};
  return reals[pick(sizeof reals / sizeof reals[0])];
}
static float real(float usual) { return turn() ? hostile_real() : usual; }
static float probability(void) { return real(coin() ? 0 : 0.25f); }
#define ENUM(type, count) ((type)number((int)pick(count)))
static luna_isa isa(void) { /* usually one that this build has */
  const luna_isa usual = (luna_isa)pick(LUNA_ISA_REFERENCE + 1);
  return (luna_isa)number((int)(luna_isa_available(usual) ? usual : LUNA_ISA_BEST));
}
static int64_t product(int64_t a, int64_t b) { /* -1: none that could be meant */
  return a < 0 || b < 0 ? -1 : a && b > ((int64_t)1 << 47) / a ? -1 : a * b;
}

/* ---- an allocator with an end, so that no huge request is ever tried ---- */
typedef struct heap { size_t used, calls; } heap;
static void *heap_take(void *user, size_t bytes) {
  heap *h = (heap *)user;
  void *at = bytes <= CAP - h->used ? malloc(bytes ? bytes : 1) : NULL;
  if (at) h->used += bytes;
  return at;
}
static void heap_give(void *user, void *at, size_t bytes) {
  ((heap *)user)->used -= bytes;
  free(at);
}
static luna_ctx *heap_open(heap *h, bool measure, luna_form form, int threads) {
  luna_options options = {0};
  memset(h, 0, sizeof *h);
  options.threads = threads;
  options.measure = measure;
  options.form = form;
  options.seed = 3;
  options.allocator.allocate = heap_take;
  options.allocator.release = heap_give;
  options.allocator.user = h;
  return luna_open(&options);
}

/* ---- the world a function's cases share ---- */
enum { SETS = 8 };
typedef struct world {
  heap heap, other_heap;
  luna_ctx *ctx, *other;
  bool measure, training;
  luna_params *set[SETS];
  luna_lm lm;
  luna_classifier classifier, pair;
  luna_masked_lm masked;
  luna_seq2seq seq2seq;
  luna_encoder encoder;
  luna_linear_layer linear;
  luna_norm_layer norm;
  luna_nested_attention_layer nested;
  luna_causal_attention_layer causal;
  luna_attention_layer attention[4];
  luna_encoder_layer encoder_layer;
  luna_decoder_layer decoder_layer;
  luna_causal_layer causal_layer;
  luna_optimizer *adam;
  luna_stream *stream, *twin;
  uint64_t sum;
} world;
static world *w;
static float numbers[NUMBERS];
static int32_t tokens[NUMBERS], spare_tokens[NUMBERS];
static float room[ROOM];
static size_t file_size;
static union { double align; uint8_t at[FILE_ROOM]; } file;

static bool file_write(void *user, const void *bytes, size_t n) {
  size_t *used = (size_t *)user;
  if (n > FILE_ROOM - *used) return false;
  memcpy(file.at + *used, bytes, n);
  *used += n;
  return true;
}

static luna_encoder_config small_encoder(void) {
  luna_encoder_config c = {0};
  c.layers = 1;
  c.layer.dim = DIM;
  c.layer.heads = HEADS;
  c.layer.ffn = 12;
  c.layer.memory = SLOTS;
  return c;
}
static luna_layer_config small_layer(void) {
  luna_layer_config c = {0};
  c.dim = DIM;
  c.heads = HEADS;
  c.ffn = 12;
  c.memory = SLOTS;
  return c;
}

static bool models_open(void) {
  luna_lm_config lm = {0};
  luna_classifier_config classifier = {0};
  luna_masked_lm_config masked = {0};
  luna_seq2seq_config seq2seq = {0};
  luna_encoder_config encoder = small_encoder();
  luna_status status = LUNA_OK;
  lm.vocab = classifier.vocab = masked.vocab = seq2seq.vocab = VOCAB;
  lm.layers = 1;
  lm.layer = small_layer();
  lm.layer.convolution = 2;
  classifier.encoder = masked.encoder = seq2seq.encoder = encoder;
  for (int i = 0; i < SETS; i++) w->set[i] = luna_params_open(w->ctx);
  status |= luna_lm_init(&w->lm, w->set[1], &lm);
  status |= luna_classifier_init(&w->classifier, w->set[2], &classifier);
  classifier.pair = true;
  status |= luna_classifier_init(&w->pair, w->set[3], &classifier);
  status |= luna_masked_lm_init(&w->masked, w->set[4], &masked);
  status |= luna_seq2seq_init(&w->seq2seq, w->set[5], &seq2seq);
  status |= luna_encoder_init(&w->encoder, w->set[6], "e.", VOCAB, &encoder);
  w->adam = luna_adamw(w->set[1], NULL);
  return status == LUNA_OK && w->adam;
}
static bool layers_open(void) {
  const luna_init init = {LUNA_INIT_XAVIER, 0};
  luna_layer_config nested = {0};
  luna_layer_config causal = {0};
  luna_layer_config layer = small_layer();
  luna_status status = LUNA_OK;
  nested.dim = causal.dim = DIM;
  nested.heads = causal.heads = HEADS;
  status |= luna_linear_layer_init(&w->linear, w->set[0], "linear", DIM, 5, init);
  status |= luna_norm_layer_init(&w->norm, w->set[0], "norm", DIM, LUNA_NORM_LAYER);
  status |= luna_nested_attention_layer_init(&w->nested, w->set[0], "nested.", &nested);
  status |= luna_causal_attention_layer_init(&w->causal, w->set[0], "causal.", &causal);
  for (int i = 1; i < 3; i++) {
    luna_layer_config attention = {0};
    attention.attention = (luna_attention_kind)i;
    attention.dim = DIM;
    attention.heads = HEADS;
    status |= luna_attention_layer_init(&w->attention[i], w->set[0], i == 1 ? "1." : "2.", &attention);
  }
  status |= luna_encoder_layer_init(&w->encoder_layer, w->set[0], "encoder.", &layer);
  status |= luna_decoder_layer_init(&w->decoder_layer, w->set[0], "decoder.", &layer);
  status |= luna_causal_layer_init(&w->causal_layer, w->set[0], "causal_layer.", &layer);
  return status == LUNA_OK;
}
/* a hash of every parameter of the models */
static uint64_t world_sum(void) {
  uint64_t sum = 0;
  for (int i = 0; i < 7 && !w->measure; i++)
    for (int64_t p = 0; p < luna_params_tensor_count(w->set[i]); p++) {
      const luna_tensor *t = luna_params_at(w->set[i], p, NULL);
      for (int64_t e = 0; e < luna_count(t); e++) {
        uint32_t bits;
        memcpy(&bits, &t->data[e], sizeof bits);
        sum = sum * 31 + bits;
      }
    }
  return sum;
}
static void world_open(world *at, bool measure, luna_form form) {
  luna_stream_config config = {0};
  luna_io io = {0};
  memset(at, 0, sizeof *at);
  w = at;
  w->measure = measure;
  w->ctx = heap_open(&w->heap, measure, form, 2);
  w->other = heap_open(&w->other_heap, measure, form, 1);
  expect(w->ctx && w->other && models_open() && layers_open(), "the test's own models");
  config.batch = 2;
  config.chunk = 3;
  if (!measure) {
    w->stream = luna_stream_open(&w->lm, &config);
    w->twin = luna_stream_open(&w->lm, &config);
    expect(w->stream && w->twin, "the test's own streams");
    io.write = file_write;
    io.user = &file_size;
    file_size = 0;
    expect(luna_save(w->set[1], luna_callbacks(&io)) == LUNA_OK, "the test's own file");
  }
  w->sum = world_sum();
}
static void world_close(void) {
  luna_stream_close(w->stream);
  luna_close(w->ctx);
  luna_stream_close(w->twin);         /* after its context: it has memory of its own */
  luna_close(w->other);
  expect(w->heap.used == 0 && w->other_heap.used == 0, "closing did not give everything back");
}

/* ---- arguments ---- */
static luna_ctx *another(void) { return w->other; }
static int64_t shape_count(int rank, const int64_t *shape) {
  int64_t count = 1;
  for (int a = 0; a < rank; a++) count = product(count, shape[a]);
  return count;
}
static luna_tensor *tensor_in(luna_ctx *ctx, int rank, const int64_t *shape) {
  const int64_t count = shape_count(rank, shape);
  luna_tensor *t = luna_tensor_new(ctx, count >= 0 && count <= NUMBERS && coin() ? numbers : NULL, rank, shape);
  if (t && w->training && coin()) luna_require_grad(t);
  return t;
}
/* a tensor of these sizes, or a hostile one */
static luna_tensor *tensor(int rank, int64_t a, int64_t b, int64_t c, int64_t d) {
  int64_t shape[5] = {a, b, c, d, 1};
  if (!turn()) return tensor_in(w->ctx, rank, shape);
  switch (pick(6)) {
    case 0: return NULL;
    case 1: return tensor_in(another(), rank, shape);
    case 2: return tensor_in(w->ctx, (int)pick(5), shape);
    case 3: shape[pick(4)] = 0; return tensor_in(w->ctx, rank, shape);
    case 4: shape[pick(4)] = hostile_size(); return tensor_in(w->ctx, rank, shape);
    default: shape[pick(4)] = 0, shape[pick(4)] = HUGE_SIZE; return tensor_in(w->ctx, rank, shape);
  }
}
static luna_tensor *optional(int rank, int64_t a, int64_t b, int64_t c, int64_t d) {
  return coin() ? NULL : tensor(rank, a, b, c, d);
}
/* `count` numbers in [0, most], null where the array could not be that long; where sizes overflow nothing may be
   read */
static const int32_t *whole(int32_t *at, int64_t count, int64_t max) {
  if (count > NUMBERS) return NULL;
  for (int64_t i = 0; i < count; i++)
    at[i] = max > 0 ? (int32_t)pick((uint32_t)(max < INT32_MAX ? max : INT32_MAX - 1) + 1) : 0;
  if (turn()) {
    static const int32_t wild[] = {-1, INT32_MIN, INT32_MAX, 1 << 20};
    const uint32_t which = pick(5);
    if (which == 4) return NULL;
    if (count > 0) at[pick((uint32_t)count)] = wild[which];
  }
  return at;
}
static const int32_t *words(int64_t batch, int64_t n) { return whole(tokens, product(batch, n), VOCAB - 1); }
static int64_t first_axis(const luna_tensor *a, const luna_tensor *b) {
  return !a ? b ? b->shape[0] : 1 : b && b->shape[0] > a->shape[0] ? b->shape[0] : a->shape[0];
}
static const int32_t *lengths_of(int64_t batch, int64_t max) {
  static int32_t two[2][NUMBERS]; /* a call may have lengths twice */
  static int at;
  if (coin() || batch > NUMBERS) return NULL;
  return whole(two[at++ % 2], batch < 0 ? 0 : batch, max < 0 ? 0 : max);
}

/* these sequences, or none */
static const luna_input *input_of(const int32_t *t, const int32_t *lengths, int64_t batch, int64_t n) {
  static luna_input inputs[2];
  static int at;
  luna_input *input = &inputs[at++ % 2];
  input->tokens = t, input->lengths = lengths, input->batch = batch, input->n = n;
  return turn() ? NULL : input;
}

/* ---- what came of a call ---- */
#define STATUS(id, status, sentence) LUNA_##status,
static const luna_status error_status[] = {LUNA_OK, LUNA_ERRORS(STATUS)};
/* a failure: its status, its sentence and an id that belongs to it; the other context may have an earlier status */
static bool reported(const luna_ctx *ctx) {
  const luna_status status = luna_error_status(ctx);
  const luna_error_id id = luna_error_id_of(ctx);
  return status != LUNA_OK && *luna_error(ctx) && id > LUNA_ERROR_NONE && id < LUNA_ERROR_COUNT &&
         (id == LUNA_ERROR_BACKEND || ctx == w->other || status == error_status[id]);
}
static bool sentence(void) { return reported(w->ctx) || reported(w->other); }
static void got(bool good, bool reached) {
  if (good) expect(hostile || luna_error_status(w->ctx) == LUNA_OK, "it succeeded, but the context has an error");
  else expect(hostile, luna_error(w->ctx)[0] ? luna_error(w->ctx) : "a valid call failed");
  if (!good && reached && null_now.told) must(sentence(), "it failed without a sentence");
}
static void got_status(luna_status status, bool reached) {
  expect(status >= LUNA_OK && status <= LUNA_NOT_FINITE, "a status that is none");
  got(status == LUNA_OK, reached);
}
/* of an op: a result, through which training goes back; `any` of its inputs was there */
static void got_tensor(luna_tensor *y, bool any) {
  const int64_t count = luna_count(y);
  int64_t flat[2] = {1, count};
  got(y != NULL, any || hostile == 0);
  if (!y || y->ctx != w->ctx) return;
  expect(count >= 0 && y->rank >= 0 && y->rank <= LUNA_MAX_RANK && (y->data || count == 0 || w->measure),
         "a tensor that is none");
  if (count <= ROOM && luna_error_status(w->ctx) == LUNA_OK)
    expect(luna_read(y, room) == LUNA_OK, "the result cannot be read");
  if (!w->training || luna_error_status(w->ctx) != LUNA_OK) return;
  y = luna_sum(luna_reshape(y, 2, flat), 1);
  expect(y != NULL || sentence(), "no sum of the result");
  if (y && luna_backward(y) != LUNA_OK)
    expect(!y->needs_grad || luna_error_status(w->ctx) == LUNA_OUT_OF_MEMORY, luna_error(w->ctx));
}

/* whether a call of it, or in its case, makes something whose failure stays */
static bool makes(const char *name) {
  static const char *const part[] = {"_init", "load", "luna_sgd", "luna_adam", "luna_optimizer_open", "luna_params",
                                     "luna_param", "layer_forward", "known_ffn", "nulls"};
  for (size_t i = 0; i < sizeof part / sizeof part[0]; i++) if (strstr(name, part[i])) return true;
  return false;
}

static void begin(void) {
  expect((w->training ? luna_begin_step(w->ctx) : luna_begin_inference(w->ctx)) == LUNA_OK, "begin failed");
  luna_begin_inference(w->other);
}
/* False when an init, a load or the like has failed: the first begin after it says so, and the next one begins. */
static bool still_works(void) {
  const float two[2] = {1, 2};
  const int64_t shape[1] = {2};
  const luna_status failed = luna_error_status(w->ctx), begun = luna_begin_inference(w->ctx);
  float out[2] = {0, 0};
  luna_tensor *x;
  expect(begun == luna_error_status(w->ctx) && (begun == LUNA_OK) == !*luna_error(w->ctx) &&
             (begun == LUNA_OK) == !luna_error_id_of(w->ctx), "what begin returns is not what the context says");
  if (begun != LUNA_OK) {
    expect(hostile && failed != LUNA_OK && makes(function), "begin does not clear the error");
    expect(luna_begin_inference(w->ctx) == LUNA_OK && !*luna_error(w->ctx), "more than one begin fails");
    return false;
  }
  x = luna_tensor_new(w->ctx, two, 1, shape);
  x = luna_add(x, x);
  expect(luna_read(x, out) == LUNA_OK && (w->measure || (out[0] == 2 && out[1] == 4)), "the context computes no more");
  return true;
}

/* ==== status, functions ==== */
static void case_luna_version(void) { expect(luna_version() == LUNA_VERSION_NUMBER, "another version"); }
static void case_luna_status_text(void) { expect(luna_status_text((luna_status)number(3)) != NULL, "null"); }
static void case_luna_isa_best(void) { expect(luna_isa_available(luna_isa_best()), "the best is not there"); }
static void case_luna_isa_available(void) { luna_isa_available((luna_isa)number(1)); }
static void case_luna_isa_of(void) {
  expect(luna_isa_available(luna_isa_of(turn() ? NULL : w->ctx)), "a context runs on what is not there");
}
static void case_luna_isa_name(void) { expect(luna_isa_name((luna_isa)number(2)) != NULL, "null"); }
static void case_luna_philox(void) {
  uint32_t counter[4] = {1, 2, 3, 4}, out[4];
  luna_philox(turn() ? NULL : counter, 5, turn() ? NULL : out);
}

static void two_shares(void *user, int64_t count, void (*task)(void *work, int64_t index), void *work) {
  (void)user;
  for (int64_t i = 0; i < count; i++) task(work, i);
}
static luna_run run_of(void) {
  static float scratch[10000];
  luna_run run = {0};
  run.isa = isa();
  if (coin()) {
    run.scratch = (char *)scratch + pick(64);
    run.scratch_size = coin() ? sizeof scratch - 64 : pick(3000);
  }
  if (coin()) run.parallel_for = two_shares;
  run.threads = number((int)pick(4));
  return run;
}
/* floats over which parts reach: as luna.h says, in double; negative: an invalid argument */
static double reach(double extent, int64_t count, int64_t given, double dense, bool shared, double *stride) {
  const bool one = shared && given == LUNA_BATCH_SHARED;
  *stride = one ? 0 : given ? (double)given : dense;
  if (extent < 0 || count < 0 || *stride < 0 || dense < 0) return -1;
  return extent + (count > 1 ? (double)(count - 1) * *stride : 0);
}
#define MAX 140737488355328.0
/* what must come of a call: 1 success, 0 refused, -1 our arrays are too small to know */
static int verdict(double extent) { return extent < 0 || extent > MAX ? 0 : extent <= ROOM / 4 ? 1 : -1; }
static int worse(int a, int b) { return a == 0 || b == 0 ? 0 : a < b ? a : b; }
static int64_t stride(void) { return size(coin() ? 0 : 8 + pick(8)); }

static int gemm_args(luna_gemm_args *g) {
  double row, batch, e;
  int v;
  memset(g, 0, sizeof *g);
  g->m = small(), g->n = small(), g->k = small(), g->batch = size(pick(3));
  g->transpose_a = coin(), g->transpose_b = coin(), g->accumulate = coin();
  g->a_row = stride(), g->b_row = stride(), g->c_row = stride();
  if (coin()) g->a_batch = size(LUNA_BATCH_SHARED);
  if (coin()) g->b_batch = size(LUNA_BATCH_SHARED);
  if (coin()) g->c_batch = size(200);
  g->scale = real(coin() ? 0 : 0.5f);
  g->activation = ENUM(luna_activation, 6);
  g->run = run_of();
  const int64_t times = g->batch ? g->batch : 1, ah = g->transpose_a ? g->k : g->m, aw = g->transpose_a ? g->m : g->k,
      bh = g->transpose_b ? g->n : g->k, bw = g->transpose_b ? g->k : g->n;
  e = reach((double)aw, ah, g->a_row, (double)aw, false, &row);
  v = verdict(reach(e, times, g->a_batch, row * (double)ah, true, &batch));
  e = reach((double)bw, bh, g->b_row, (double)bw, false, &row);
  v = worse(v, verdict(reach(e, times, g->b_batch, row * (double)bh, true, &batch)));
  e = reach((double)g->n, g->m, g->c_row, (double)g->n, false, &row);
  v = worse(v, verdict(reach(e, times, g->c_batch, row * (double)g->m, false, &batch)));
  if (v != -1) g->a = g->b = room, g->c = room + ROOM / 2, g->bias = coin() && g->n >= 0 && g->n <= ROOM ? room : NULL;
  if (v != -1 && turn()) g->c = NULL;
  return v;
}
static void got_free(luna_status status, int v) { /* of a call without context */
  expect(status == LUNA_OK || status == LUNA_BAD_ARGUMENT || status == LUNA_UNSUPPORTED || status == LUNA_OUT_OF_MEMORY,
         "a status that is none");
  if (hostile == 0) expect(status == LUNA_OK, "a valid call failed");
  if (v == 0) expect(status == LUNA_BAD_ARGUMENT, "invalid sizes are accepted");
}
static void case_luna_gemm_f32(void) {
  luna_gemm_args g;
  const int v = gemm_args(&g);
  got_free(luna_gemm_f32(turn() ? NULL : &g), v);
}
static void case_luna_gemm_scratch(void) {
  luna_gemm_args g;
  const int v = gemm_args(&g);
  const size_t bytes = luna_gemm_scratch(turn() ? NULL : &g);
  expect(hostile || bytes > 0, "no scratch for a valid call");
  if (v == 0) expect(bytes == 0, "scratch for invalid sizes");
}
static int part_of(int64_t batch, int64_t rows, int64_t heads, int64_t dim, int64_t s[3], bool shared, bool ragged) {
  double one, row;
  double e = reach((double)dim, heads, s[2], (double)dim, false, &one);
  e = reach(e, rows, s[1], (double)heads * (double)dim, false, &row);
  return verdict(ragged ? e : reach(e, batch, s[0], (double)rows * row, shared, &one));
}
static int attention_args(luna_attention_args *a) {
  static int32_t offsets[2][16];
  int64_t queries, keys;
  int v, which;
  memset(a, 0, sizeof *a);
  a->batch = size(1 + pick(3)), a->heads = size(1 + pick(2)), a->queries = small(), a->keys = small(),
      a->head_dim = small(), a->value_dim = size(pick(4));
  a->scale = real(coin() ? 0 : 0.5f);
  a->dropout = probability();
  a->causal = coin();
  a->window = coin();
  a->left = size((int64_t)pick(5)), a->right = size((int64_t)pick(5) - 2);
  a->seed = 9;
  a->run = run_of();
  int64_t s[4][3] = {{0}};
  for (int i = 0; i < 4; i++)
    for (int j = 0; j < 3; j++) s[i][j] = size(0);
  if (coin()) s[0][0] = s[1][0] = size(LUNA_BATCH_SHARED);
  queries = a->queries, keys = a->keys;
  if (a->batch >= 0 && a->batch < 15 && pick(4) == 0) {
    for (int k = 0; k < 2; k++)
      for (int i = 1; i < 16; i++) offsets[k][i] = offsets[k][i - 1] + (int32_t)pick(4);
    a->query_offsets = offsets[0], a->key_offsets = offsets[1];
    queries = offsets[0][a->batch], keys = offsets[1][a->batch];
    if (a->queries >= 0 && a->queries < 4) a->queries = 4;
    if (a->keys >= 0 && a->keys < 4) a->keys = 4;
    if (turn()) a->key_offsets = NULL;
  } else a->lengths = lengths_of(a->batch, a->keys);
  const bool ragged = a->query_offsets != NULL;
  const int64_t dv = a->value_dim ? a->value_dim : a->head_dim;
  v = part_of(a->batch, queries, a->heads, a->head_dim, s[0], true, ragged);
  v = worse(v, part_of(a->batch, keys, a->heads, a->head_dim, s[1], true, ragged));
  v = worse(v, part_of(a->batch, keys, a->heads, dv, s[2], true, ragged));
  v = worse(v, part_of(a->batch, queries, a->heads, dv, s[3], false, ragged));
  if (v == 1 && (a->batch > 64 || a->heads > 64 || a->queries > 1000)) v = -1;
  a->q_batch = s[0][0], a->q_row = s[0][1], a->q_head = s[0][2], a->k_batch = s[1][0], a->k_row = s[1][1],
      a->k_head = s[1][2];
  a->v_batch = s[2][0], a->v_row = s[2][1], a->v_head = s[2][2], a->out_batch = s[3][0], a->out_row = s[3][1],
      a->out_head = s[3][2];
  if (v == -1) return v;
  a->q = room, a->k = room, a->v = room, a->out = room + ROOM / 4, a->log_sum_exp = room + ROOM / 2,
      a->sums = room + ROOM / 2 + ROOM / 8;
  a->grad_out = room, a->grad_sums = coin() ? room : NULL;
  a->grad_q = a->grad_k = a->grad_v = room + 3 * (ROOM / 4);
  if (!ragged && pick(3) == 0) {
    a->sums = turn() ? a->sums : NULL, a->grad_sums = NULL;
    if (coin()) a->grad_log_sum_exp = room;
  }
  which = turn() ? (int)pick(6) : -1;
  if (which == 0) a->q = NULL;
  if (which == 1) a->k = NULL;
  if (which == 2) a->out = NULL;
  if (which == 3) a->log_sum_exp = NULL;
  if (which == 4) a->grad_out = NULL;
  if (which == 5) a->sums = NULL;
  return v;
}
static void case_luna_softmax_attention_f32(void) {
  luna_attention_args a;
  const int v = attention_args(&a);
  got_free(luna_softmax_attention_f32(turn() ? NULL : &a), v);
}
static void case_luna_softmax_attention_backward_f32(void) {
  luna_attention_args a;
  const int v = attention_args(&a);
  a.run.parallel_for = NULL;          /* this test lets gradients overlap */
  got_free(luna_softmax_attention_backward_f32(turn() ? NULL : &a), v);
}
static void case_luna_softmax_attention_scratch(void) {
  luna_attention_args a;
  const int v = attention_args(&a);
  const size_t bytes = luna_softmax_attention_scratch(turn() ? NULL : &a);
  expect(hostile || bytes > 0, "no scratch for a valid call");
  if (v == 0) expect(bytes == 0, "scratch for invalid sizes");
}
static int causal_args(luna_causal_args *c) {
  int64_t none[3] = {0, 0, 0};
  int v;
  memset(c, 0, sizeof *c);
  c->batch = small(), c->rows = small(), c->heads = size(1 + pick(2)), c->dim = small(), c->value_dim = small();
  c->run = run_of();
  v = worse(part_of(c->batch, c->rows, c->heads, c->dim, none, false, false),
            part_of(c->batch, c->rows, c->heads, c->value_dim, none, false, false));
  if (v == -1) return v;
  c->x = c->y = c->z = c->grad_out = room, c->out = room + ROOM / 2;
  c->grad_x = room + ROOM / 2, c->grad_y = c->grad_x + ROOM / 8, c->grad_z = c->grad_y + ROOM / 8;
  if ((double)c->batch * (double)c->rows * (double)c->heads * (double)(c->dim > c->value_dim ? c->dim : c->value_dim) >
      ROOM / 8) c->x = c->y = c->z = NULL;
  if (turn()) c->y = NULL;
  return v;
}
static void case_luna_causal_product_f32(void) {
  luna_causal_args c;
  const int v = causal_args(&c);
  got_free(luna_causal_product_f32(turn() ? NULL : &c), v);
}
static void case_luna_causal_product_backward_f32(void) {
  luna_causal_args c;
  const int v = causal_args(&c);
  got_free(luna_causal_product_backward_f32(turn() ? NULL : &c), v);
}
static void case_luna_causal_product_scratch(void) {
  luna_causal_args c;
  const int v = causal_args(&c);
  const size_t bytes = luna_causal_product_scratch(turn() ? NULL : &c);
  expect(hostile || bytes > 0, "no scratch for a valid call");
  if (v == 0) expect(bytes == 0, "scratch for invalid sizes");
}
static int nested_args(luna_causal_nested_args *a) {
  int64_t none[3] = {0, 0, 0};
  int v;
  memset(a, 0, sizeof *a);
  a->batch = small(), a->rows = small(), a->heads = size(1 + pick(2)), a->head_dim = small(), a->slots = small();
  a->run = run_of();
  v = worse(part_of(a->batch, a->rows, a->heads, a->head_dim, none, false, false),
            part_of(a->batch, a->rows, a->heads, a->slots, none, false, false));
  if (v == -1) return v;
  a->q = a->k = a->v = a->s = a->grad_out = room, a->out = room + ROOM / 2, a->kept = a->out + ROOM / 8;
  a->grad_q = room + ROOM / 2, a->grad_k = a->grad_q + ROOM / 16, a->grad_v = a->grad_k + ROOM / 16;
  if (coin()) a->forget = room;
  if (a->forget) a->routed = coin();
  if ((double)a->batch * (double)a->rows * (double)a->heads *
          (double)(a->head_dim > a->slots ? a->head_dim : a->slots) > ROOM / 32) a->q = a->k = a->v = NULL;
  if (turn()) a->k = NULL;
  return v;
}
static void case_luna_causal_nested_attention_f32(void) {
  luna_causal_nested_args a;
  const int v = nested_args(&a);
  got_free(luna_causal_nested_attention_f32(turn() ? NULL : &a), v);
}
static void case_luna_causal_nested_attention_backward_f32(void) {
  luna_causal_nested_args a;
  const int v = nested_args(&a);
  a.run.parallel_for = NULL;         /* gradients overlap here */
  got_free(luna_causal_nested_attention_backward_f32(turn() ? NULL : &a), v);
}
static void case_luna_causal_nested_attention_scratch(void) {
  luna_causal_nested_args a;
  const int v = nested_args(&a);
  const size_t bytes = luna_causal_nested_attention_scratch(turn() ? NULL : &a);
  expect(hostile || bytes > 0, "no scratch for a valid call");
  if (v == 0) expect(bytes == 0, "scratch for invalid sizes");
}
/* ==== context ==== */
static void case_luna_open(void) {
  static double block[8192];
  heap h = {0};
  luna_options o = {0};
  luna_backend table = *luna_cpu_backend();
  o.threads = number((int)pick(3));
  o.isa = isa();
  o.form = ENUM(luna_form, 3);
  o.measure = coin();
  o.parallel_for = coin() ? two_shares : NULL;
  o.allocator.allocate = heap_take;
  o.allocator.release = turn() ? NULL : heap_give;
  o.allocator.user = &h;
  if (coin()) {
    o.block = (char *)block + pick(64);
    o.block_size = turn() ? pick(2000) : sizeof block - 64;
  }
  if (turn()) o.allocator.allocate = NULL;
  if (turn()) table.version = pick(3);
  if (turn()) table.size = pick(1000);
  if (coin()) o.backend = &table;
  luna_ctx *ctx = luna_open(&o);
  expect(ctx || hostile, "valid options are refused");
  if (ctx) expect(luna_begin_inference(ctx) == LUNA_OK, "a new context cannot begin");
  luna_close(ctx);
  expect(h.used == 0, "closing did not give everything back");
}
static void case_luna_close(void) {
  heap h;
  luna_ctx *ctx = turn() ? NULL : heap_open(&h, coin(), ENUM(luna_form, 3), 1 + (int)pick(3));
  luna_params *params = luna_params_open(ctx);
  if (ctx && coin())
    luna_linear_layer_init(&w->linear, params, "x", small(), small(), (luna_init){LUNA_INIT_XAVIER, 0});
  if (ctx && coin()) tensor_in(ctx, 2, (int64_t[]){3, 4});
  luna_close(ctx);
  if (ctx && null_now.parameter >= 0) { /* null was closed in place of it, so it is open still */
    must(h.used > 0, "closing null closed a context");
    null_now = null_none;
    luna_close(ctx);
  }
  must(!ctx || h.used == 0, "closing did not give everything back");
}
static void case_luna_begin_step(void) {
  luna_ctx *ctx = turn() ? NULL : w->ctx;
  got_status(luna_begin_step(ctx), false);
}
static void case_luna_begin_inference(void) {
  luna_ctx *ctx = turn() ? NULL : w->ctx;
  got_status(luna_begin_inference(ctx), false);
}
static void case_luna_error_status(void) {
  expect((luna_error_status(turn() ? NULL : w->ctx) == LUNA_OK) == (hostile == 0), "the state");
}
static void case_luna_error(void) {
  expect((*luna_error(turn() ? NULL : w->ctx) == 0) == (hostile == 0), "the sentence");
}
static void case_luna_memory(void) {
  expect((luna_memory(turn() ? NULL : w->ctx).peak > 0) == (hostile == 0), "the memory in use");
}

/* ==== tensors ==== */
static void case_luna_count(void) {
  expect(luna_count(turn() ? NULL : tensor_in(w->ctx, 2, (int64_t[]){3, 4})) == (hostile ? 0 : 12), "the count");
}
static void case_luna_tensor_new(void) {
  int64_t shape[4] = {small(), small(), small(), small()};
  const int rank = number((int)pick(5));
  luna_ctx *ctx = turn() ? NULL : w->ctx;
  const int64_t count = rank < 0 || rank > 4 ? -1 : shape_count(rank, shape);
  luna_tensor *t = luna_tensor_new(ctx, count >= 0 && count <= NUMBERS && coin() ? numbers : NULL, rank,
                                   turn() ? NULL : shape);
  if (count < 0) expect(!t, "an invalid shape is accepted");
  got_tensor(t, ctx != NULL);
}
static luna_tensor *any_tensor(void) { return tensor(3, small(), small(), small(), 1); }
static void case_luna_require_grad(void) {
  luna_tensor *x = luna_require_grad(any_tensor());
  got_tensor(luna_scale(x, 2), x != NULL);
}
static void case_luna_item(void) {
  luna_tensor *x = tensor(number((int)pick(3)) & 3, 1, 1, 1, 1);
  const float value = luna_item(x);
  expect(hostile || value == value || (x && x->data && x->data[0] != x->data[0]), "no value");
  if (x && luna_count(x) != 1) expect(value != value && sentence(), "the item of a tensor of several");
}
static void case_luna_read(void) {
  luna_tensor *x = any_tensor();
  if (luna_count(x) <= ROOM) got_status(luna_read(x, turn() ? NULL : room), x != NULL);
}
static void case_luna_read_grad(void) {
  luna_tensor *x = any_tensor(), *y = luna_scale(luna_require_grad(x), 2);
  if (luna_count(x) > ROOM || !y) return;
  if (w->training && x && x->ctx == w->ctx)
    luna_backward(luna_sum(luna_reshape(y, 2, (int64_t[]){1, luna_count(y)}), 1));
  else hostile++;
  got_status(luna_read_grad(x, turn() ? NULL : room), x != NULL);
}
static void case_luna_write(void) {
  luna_tensor *x = any_tensor();
  if (luna_count(x) <= NUMBERS) got_status(luna_write(x, turn() ? NULL : numbers), x != NULL);
}
static void case_luna_write_grad(void) {
  const bool other = turn(); /* a tensor that is no parameter */
  luna_tensor *x = other ? any_tensor() : luna_params_at(w->set[0], pick(4), NULL);
  if (luna_count(x) <= NUMBERS) got_status(luna_write_grad(x, turn() ? NULL : numbers), x != NULL);
}
static void case_luna_counted(void) {
  luna_tensor *x = any_tensor();
  expect(luna_counted(turn() ? NULL : x) == -1, "labels of no loss");
}
static void case_luna_set_counted(void) {
  luna_tensor *x = turn() ? NULL : luna_tensor_new(w->ctx, NULL, 0, NULL);
  expect(luna_set_counted(x, "case", 3, 4) == x && luna_counted(x) == (x ? 3 : -1), "labels of a loss");
}
static void case_luna_begin_part(void) {
  const luna_part part = { size(1), size(8), size(0) };
  got_status(luna_begin_part(w->ctx, turn() ? NULL : &part), w->ctx != NULL);
}
static void case_luna_options_of(void) {
  const luna_options *o = luna_options_of(turn() ? NULL : w->ctx);
  expect(!o || o->threads >= 1, "options of a context");
}
static void case_luna_backward(void) {
  luna_tensor *x = tensor(2, 1, small(), 1, 1), *y;
  luna_require_grad(x);
  y = turn() ? x : luna_sum(luna_mul(x, x), 1);
  if (turn()) y = NULL;
  if (!w->training) hostile++;
  got_status(luna_backward(y), y != NULL);
  if (coin() && y) expect(luna_backward(y) != LUNA_OK && sentence(), "two backwards");
}

/* ==== ops ==== */
static void case_luna_reshape(void) {
  luna_tensor *x = tensor(2, 4, 6, 1, 1);
  int64_t shape[4] = {size(2), size(coin() ? 12 : -1), 1, 1};
  got_tensor(luna_reshape(x, number(2 + (int)pick(3)), turn() ? NULL : shape), x != NULL);
}
static void case_luna_slice(void) {
  luna_tensor *x = tensor(3, 4, size(4), 5, 1);
  got_tensor(luna_slice(x, number((int)pick(3)), size(pick(3)), size(pick(3))), x != NULL);
}
static void case_luna_permute(void) {
  const int axes[LUNA_MAX_RANK] = {number(2), number(0), number(1), 3}; /* as many as a hostile tensor may have */
  luna_tensor *x = any_tensor();
  got_tensor(luna_permute(x, turn() ? NULL : axes), x != NULL);
}
static bool any_of(luna_tensor *const *x, int count) {
  for (int i = 0; i < count; i++) if (x[i]) return true;
  return false;
}
static void case_luna_concat(void) {
  luna_tensor *x[9];
  const int count = number(1 + (int)pick(8)), axis = number(1);
  const int64_t a = small(), b = small();
  for (int i = 0; i < 9; i++) x[i] = tensor(3, a, small(), b, 1);
  if (turn()) got_tensor(luna_concat(NULL, count, axis), false);
  else if (count <= 9) got_tensor(luna_concat(x, count, axis), count > 0 && any_of(x, count < 8 ? count : 8));
}
static void case_luna_expand(void) {
  luna_tensor *x = tensor((int)pick(4), small(), small(), small(), 1);
  got_tensor(luna_expand(x, size(3)), x != NULL);
}
static void binary(luna_tensor *(*op)(luna_tensor *a, luna_tensor *b)) {
  const int64_t s[3] = {small(), small(), small()};
  luna_tensor *a = tensor(3, s[0], s[1], s[2], 1), *b = coin() ? tensor(3, s[0], s[1], s[2], 1) : coin() ?
      tensor(1, s[2], 1, 1, 1) : tensor(0, 1, 1, 1, 1);
  if (turn()) b = a;
  got_tensor(op(a, b), a || b);
}
#define BINARY_CASE(NAME, tier, reads, cheap, name, inputs, value, da, db, dc) \
  static void case_luna_##name(void) { binary(luna_##name); }
LUNA_BINARIES(BINARY_CASE)
static void case_luna_greater(void) { binary(luna_greater); }
static void case_luna_greater_equal(void) { binary(luna_greater_equal); }
static void case_luna_where(void) {
  const int64_t s[3] = {small(), small(), small()};
  luna_tensor *x[3];
  for (int i = 0; i < 3; i++)
    x[i] = coin() ? tensor(3, s[0], coin() ? 1 : s[1], s[2], 1) : tensor(1, coin() ? 1 : s[2], 1, 1, 1);
  got_tensor(luna_where(x[0], x[1], x[2]), any_of(x, 3));
}
static void case_luna_clamp(void) {
  luna_tensor *x = any_tensor();
  got_tensor(luna_clamp(x, real(-1), real(1)), x != NULL);
}
static void case_luna_add_scalar(void) {
  luna_tensor *x = any_tensor();
  got_tensor(luna_add_scalar(x, real(2)), x != NULL);
}
static void case_luna_scale(void) {
  luna_tensor *x = any_tensor();
  got_tensor(luna_scale(x, real(2)), x != NULL);
}
static void reduction(luna_tensor *(*op)(luna_tensor *x, int axis)) {
  luna_tensor *x = any_tensor();
  got_tensor(op(x, number((int)pick(3))), x != NULL);
}
static void case_luna_sum(void) { reduction(luna_sum); }
static void case_luna_mean(void) { reduction(luna_mean); }
static void case_luna_max(void) { reduction(luna_max); }
static void case_luna_min(void) { reduction(luna_min); }
static void case_luna_var(void) { reduction(luna_var); }
static void case_luna_tensor_full(void) {
  const int64_t shape[2] = {size(3), size(4)};
  got_tensor(luna_tensor_full(w->ctx, real(0.5f), 2, shape), true);
}
static void case_luna_tensor_random(void) {
  const int64_t shape[2] = {size(3), size(4)};
  const luna_init init = {turn() ? (luna_init_kind)pick(9) : LUNA_INIT_NORMAL, real(0.5f)};
  got_tensor(luna_tensor_random(w->ctx, init, 7, 2, shape), true);
}
static void case_luna_pad(void) {
  luna_tensor *x = tensor(3, small(), small(), small(), 1);
  got_tensor(luna_pad(x, number((int)pick(3)), size(pick(3)), size(pick(3)), real(0)), x != NULL);
}
static void case_luna_stack(void) {
  luna_tensor *const x[2] = {tensor(2, 2, 3, 1, 1), tensor(2, 2, 3, 1, 1)};
  const int count = turn() ? number(2) : 2;
  got_tensor(luna_stack(x, count > 2 ? 2 : count, number((int)pick(3))), x[0] && x[1] && count > 0);
}
static void case_luna_soft_cross_entropy(void) {
  const int64_t s[2] = {small(), small()};
  luna_tensor *x = tensor(2, s[0], s[1], 1, 1), *p = tensor(2, s[0], s[1], 1, 1);
  got_tensor(luna_soft_cross_entropy(x, p), x && p);
}
static void case_luna_cumsum(void) { reduction(luna_cumsum); }
static void map(luna_tensor *(*op)(luna_tensor *x));
#define UNARY_CASE(name) static void case_luna_##name(void) { map(luna_##name); }
COMMON_UNARY(UNARY_CASE)
static void case_luna_transpose(void) {
  luna_tensor *x = any_tensor();
  got_tensor(luna_transpose(x, number((int)pick(3)), number((int)pick(3))), x != NULL);
}
static const int32_t *some_indices(int64_t n) { /* 16, each below n */
  static int32_t indices[16];
  for (int i = 0; i < 16; i++) indices[i] = turn() ? number(-1) : (int32_t)pick(n > 0 && n < 6 ? n : 1);
  return turn() ? NULL : indices;
}
static void case_luna_gather_rows(void) {
  luna_tensor *x = tensor(1 + (int)pick(3), small(), small(), small(), 1);
  const int64_t count = pick(6);
  got_tensor(luna_gather_rows(x, some_indices(x ? x->shape[0] : 0), turn() ? -2 : count), x != NULL);
}
static void case_luna_scatter_add_rows(void) {
  const int rank = 1 + (int)pick(3);
  const int64_t b = small(), c = small();
  luna_tensor *x = tensor(rank, small(), b, c, 1), *rows =
      tensor(rank, pick(6), turn() ? (b < INT64_MAX ? b + 1 : 0) : b, c, 1);
  got_tensor(luna_scatter_add_rows(x, some_indices(x ? x->shape[0] : 0), luna_count(rows) < 1000 ? rows : NULL), x ||
             rows);
}
static void case_luna_top_k(void) {
  static int32_t indices[ROOM];
  luna_tensor *x = any_tensor();
  const int64_t k = size(1);
  if (k < 1 || k > 5 || luna_count(x) * k <= ROOM)
    got_status(luna_top_k(x, k, turn() ? NULL : indices, coin() ? room : NULL), x != NULL);
}
static void case_luna_argmax(void) {
  static int32_t indices[ROOM];
  luna_tensor *x = any_tensor();
  if (luna_count(x) <= ROOM) got_status(luna_argmax(x, turn() ? NULL : indices), x != NULL);
}
static void traced(void *user, const luna_trace_event *e) {
  int64_t *sizes = (int64_t *)user;
  *sizes += (int64_t)strlen(e->name) + e->inputs;
  for (int i = 0; i < e->outputs; i++) *sizes += luna_count(e->out[i]);
  for (const luna_trace_scope *scope = e->scope; scope; scope = scope->outer) *sizes += (int64_t)strlen(scope->name);
}
static void case_luna_trace(void) {
  static int64_t sizes;
  luna_ctx *ctx = turn() ? NULL : w->ctx;
  luna_tensor *x = any_tensor();
  got_status(luna_trace(ctx, coin() ? traced : NULL, &sizes), ctx != NULL);
  const luna_scope scope = luna_scope_begin_as(w->ctx, turn() ? NULL : "a scope", coin());
  x = luna_scale(x, 2);
  if (turn()) luna_trace(w->ctx, NULL, NULL);
  luna_scope_end(scope, &x, 1);
  if (x && w->training) luna_backward(luna_sum(x, 0));
}
static void case_luna_seconds(void) {
  const double start = luna_seconds(turn() ? NULL : w->ctx);
  (void)any_tensor();
  expect(start == start && start >= 0, "a time that is none");
}
static void case_luna_matmul(void) {
  const int64_t s[2] = {small(), small()}, m = small(), n = small(), k = small();
  const bool ta = coin(), tb = coin(), shared = coin();
  luna_tensor *a = tensor(4, s[0], s[1], ta ? k : m, ta ? m : k);
  luna_tensor *b = shared ? tensor(2, tb ? n : k, tb ? k : n, 1, 1) : tensor(3, s[1], tb ? n : k, tb ? k : n, 1);
  got_tensor(luna_matmul(a, b, ta, tb), a || b);
}
static void case_luna_linear(void) {
  const int64_t in = small(), out = small();
  luna_tensor *x = tensor(3, small(), small(), in, 1), *weight = tensor(2, out, in, 1, 1);
  got_tensor(luna_linear(x, weight, optional(1, out, 1, 1, 1)), x || weight);
}
static void case_luna_feed_forward(void) {
  const int64_t in = small(), hidden = small(), out = small(), b = small(), n = small();
  luna_tensor *x = tensor(3, b, n, in, 1), *w1 = tensor(2, hidden, in, 1, 1), *w2 = tensor(2, out, hidden, 1, 1);
  luna_feed_forward_config c = {0};
  c.activation = ENUM(luna_activation, 6);
  c.activation_dropout = probability();
  c.dropout = probability();
  c.residual = optional(3, b, n, out, 1);
  c.recompute = coin();
  c.gate = optional(2, hidden, in, 1, 1);
  c.gate_bias = optional(1, hidden, 1, 1, 1);
  got_tensor(luna_feed_forward(x, w1, optional(1, hidden, 1, 1, 1), w2, optional(1, out, 1, 1, 1), coin() ? NULL : &c),
             x || w1);
}
static void case_luna_activate(void) {
  luna_tensor *x = any_tensor();
  got_tensor(luna_activate(x, ENUM(luna_activation, LUNA_ACTIVATION_COUNT)), x != NULL);
}
static void map(luna_tensor *(*op)(luna_tensor *x)) {
  luna_tensor *x = any_tensor();
  got_tensor(op(x), x != NULL);
}
#define MAP_CASE(NAME, name, value, slope) static void case_luna_##name(void) { map(luna_##name); }
LUNA_MAPS(MAP_CASE)
static void case_luna_ratio(void) { map(luna_ratio); }
static void case_luna_as_part(void) { map(luna_as_part); }
static void case_luna_detach(void) { map(luna_detach); }
static void masked(luna_tensor *(*op)(luna_tensor *x, const int32_t *lengths)) {
  const int64_t b = small(), n = small();
  luna_tensor *x = turn() ? tensor((int)pick(3), b, n, 1, 1) : tensor(3, b, small(), n, 1);
  got_tensor(op(x, lengths_of(x ? x->shape[0] : b, n)), x != NULL);
}
static void case_luna_softmax(void) { masked(luna_softmax); }
static void case_luna_mask(void) { masked(luna_mask); }
static void case_luna_dropout(void) {
  luna_tensor *x = any_tensor();
  got_tensor(luna_dropout(x, probability()), x != NULL);
}
static void case_luna_layer_norm(void) {
  const int64_t n = small();
  luna_tensor *x = tensor(3, small(), small(), n, 1);
  got_tensor(luna_layer_norm(x, optional(1, n, 1, 1, 1), optional(1, n, 1, 1, 1), 0), x != NULL);
}
static void case_luna_rms_norm(void) {
  const int64_t n = small();
  luna_tensor *x = tensor(3, small(), small(), n, 1);
  got_tensor(luna_rms_norm(x, optional(1, n, 1, 1, 1), 0), x != NULL);
}
static void case_luna_sin(void) { map(luna_sin); }
static void case_luna_cos(void) { map(luna_cos); }
static void case_luna_pow(void) {
  luna_tensor *x = any_tensor();
  got_tensor(luna_pow(x, real(1.5f)), x != NULL);
}
static void case_luna_split(void) {
  const int count = (int)size(1 + pick(3));
  luna_tensor *x = tensor(3, small(), product(count, small()), small(), 1), *parts[8];
  const luna_status status = luna_split(x, number(1), parts, count < 0 ? 0 : count > 8 ? 8 : count);
  got_tensor(status == LUNA_OK ? parts[0] : NULL, x != NULL);
}
static void case_luna_rotary(void) {
  const int64_t h = size(1 + pick(2));
  luna_tensor *x = tensor(3, small(), small(), product(2, product(h, small())), 1);
  got_tensor(luna_rotary(x, h, size(pick(99)), real(500)), x != NULL);
}
static void case_luna_embedding(void) {
  luna_tensor *table = tensor(2, size(VOCAB), small(), 1, 1);
  const int64_t batch = small(), n = small();
  got_tensor(luna_embedding(table, words(batch, n), batch, n), table != NULL);
}
static void case_luna_cross_entropy(void) {
  luna_tensor *logits = tensor(3, small(), small(), size(VOCAB), 1);
  const int64_t rows = logits ? product(logits->shape[0] * (logits->rank > 1),
                                        logits->rank > 2 ? logits->shape[1] : 1) : 1;
  luna_cross_entropy_config c = {0};
  const int32_t *labels = whole(tokens, logits && logits->rank == 4 ? product(rows, logits->shape[2]) : logits &&
                                logits->rank == 1 ? 1 : rows, VOCAB - 1);
  c.smoothing = probability();
  c.ignore = coin();
  c.ignore_index = number(3);
  c.sum = coin();
  got_tensor(luna_cross_entropy(logits, labels, coin() ? NULL : &c), logits != NULL);
}
static void case_luna_weighted_cross_entropy(void) {
  static float weights[NUMBERS];
  luna_tensor *logits = tensor(2, small(), size(VOCAB), 1, 1);
  const int64_t classes = logits && logits->rank ? logits->shape[logits->rank - 1] : 1;
  luna_cross_entropy_config c = {0};
  for (int i = 0; i < NUMBERS; i++) weights[i] = i < VOCAB ? real(0.5f) : 1;
  c.smoothing = probability();
  c.ignore = coin();
  c.ignore_index = number(3);
  c.sum = coin();
  const int32_t *labels = whole(tokens, classes ? luna_count(logits) / classes : 0, VOCAB - 1);
  got_tensor(luna_weighted_cross_entropy(logits, labels, turn() || classes > NUMBERS ? NULL : weights,
                                         coin() ? NULL : &c), logits != NULL);
}
static void case_luna_linear_cross_entropy(void) {
  const int64_t d = small(), classes = size(coin() ? 1031 : VOCAB);
  luna_tensor *x = tensor(3, small(), small(), d, 1), *weight = tensor(2, classes, d, 1, 1);
  const int64_t rows = x ? product(x->shape[0] * (x->rank > 1), x->rank > 2 ? x->shape[1] : 1) : 1;
  luna_cross_entropy_config c = {0};
  const int32_t *labels = whole(tokens, x && x->rank == 4 ? product(rows, x->shape[2]) : x && x->rank == 1 ? 1 : rows,
                                VOCAB - 1);
  c.smoothing = probability();
  c.ignore = coin();
  c.ignore_index = number(3);
  c.sum = coin();
  got_tensor(luna_linear_cross_entropy(x, weight, optional(1, classes, 1, 1, 1), labels, coin() ? NULL : &c),
             x && weight);
}
/* a target for each of x's elements, NaN among them; null where the array could not be that long */
static const float *targets_of(const luna_tensor *x) {
  static float targets[NUMBERS];
  for (int i = 0; i < NUMBERS; i++) targets[i] = i % 9 == 8 ? NAN : fabsf(numbers[i]);
  if (turn()) targets[pick(8)] = hostile_real();
  return turn() || luna_count(x) > NUMBERS ? NULL : targets;
}
static void loss_of(int kind) {
  luna_tensor *x = tensor(3, small(), small(), small(), 1);
  const float *targets = targets_of(x);
  got_tensor(kind == 0 ? luna_mse(x, targets) : kind == 1 ? luna_huber(x, targets, real(0.5f)) :
             luna_binary_cross_entropy(x, targets), x != NULL);
}
static void case_luna_mse(void) { loss_of(0); }
static void case_luna_huber(void) { loss_of(1); }
static void case_luna_binary_cross_entropy(void) { loss_of(2); }
static void case_luna_quantile_loss(void) {
  static float levels[4];
  const int64_t count = size(1 + pick(4));
  luna_tensor *x = tensor(3, small(), small(), count, 1);
  for (int i = 0; i < 4; i++) levels[i] = turn() ? hostile_real() : 0.2f * (float)(i + 1);
  got_tensor(luna_quantile_loss(x, targets_of(x), count > 4 || turn() ? NULL : levels, count), x != NULL);
}
static void case_luna_softmax_attention(void) {
  static int32_t offsets[2][4];
  const int64_t b = small(), n = small(), m = small(), h = size(1 + pick(3)), d = product(h, small()),
      e = product(h, small());
  luna_attention_config c = {0};
  luna_tensor *q, *k, *v, *sums = NULL;
  c.heads = h;
  c.causal = coin();
  c.scale = real(0);
  c.window = coin();
  c.left = size((int64_t)pick(5)), c.right = size((int64_t)pick(5) - 2);
  c.dropout = probability();
  c.sums = coin() ? &sums : NULL;
  if (pick(4) == 0) {
    for (int s = 0; s < 2; s++)
      for (int i = 1; i < 4; i++) offsets[s][i] = offsets[s][i - 1] + (int32_t)pick(4);
    q = tensor(2, offsets[0][3], d, 1, 1), k = tensor(2, offsets[1][3], d, 1, 1), v = tensor(2, offsets[1][3], e, 1, 1);
    c.sequences = 3;
    if (turn()) offsets[pick(2)][pick(4)] = number(2);
    c.query_offsets = turn() ? NULL : offsets[0], c.key_offsets = offsets[1];
  } else {
    q = tensor(3, b, n, d, 1), k = tensor(3, coin() ? 1 : b, m, d, 1), v = tensor(3, b, m, e, 1);
    c.sequences = turn() ? -3 : 0;
    if (coin()) {
      c.sums = turn() ? &sums : NULL;
      c.log_sum_exp = coin() ? &sums : NULL;
    }
    c.lengths = lengths_of(q && k && v ? NUMBERS < q->shape[0] + k->shape[0] + v->shape[0] ? NUMBERS + 1 :
                           q->shape[0] + k->shape[0] + v->shape[0] : b, m);
  }
  got_tensor(luna_softmax_attention(q, k, v, turn() ? NULL : &c), q || k || v);
  for (int s = 0; s < 2; s++) offsets[s][0] = 0;
}
static void case_luna_causal_product(void) {
  const int64_t b = small(), n = small(), h = size(1 + pick(2)), d = product(h, small()), e = product(h, small());
  luna_tensor *x = tensor(3, b, n, d, 1), *y = tensor(3, b, n, d, 1), *z = tensor(3, b, n, e, 1);
  got_tensor(luna_causal_product(x, y, z, h), x || y || z);
}
static void case_luna_short_convolution(void) {
  const int64_t d = small();
  luna_tensor *x = tensor(3, small(), small(), d, 1), *weight = tensor(2, d, small(), 1, 1);
  got_tensor(luna_short_convolution(x, weight, optional(1, d, 1, 1, 1)), x || weight);
}
static void case_luna_pack(void) {
  const int64_t b = small(), m = small(), d = small();
  luna_tensor *weights = tensor(3, b, small(), d, 1), *context = tensor(3, b, m, d, 1), *sums = NULL;
  const luna_pack_config c = { lengths_of(context ? context->shape[0] : b, m), probability(), coin() ? &sums : NULL };
  got_tensor(luna_pack(weights, context, turn() ? NULL : &c), weights || context);
}
static void case_luna_unpack(void) {
  const int64_t b = small(), n = small(), d = small(), h = small(), l = small();
  luna_tensor *x = tensor(3, b, n, d, 1), *k = tensor(4, b, h, l, d), *bias = tensor(3, b, h, l, 1),
      *v = tensor(4, b, h, l, d);
  luna_unpack_config c = {0};
  c.out_bias = optional(1, d, 1, 1, 1);
  c.lengths = lengths_of(x ? x->shape[0] : b, l);
  c.dropout = probability();
  got_tensor(luna_unpack(x, k, bias, v, coin() ? NULL : &c), x || k || bias);
}
static void case_luna_causal_nested_attention(void) {
  const int64_t b = small(), n = small(), h = size(1 + pick(2)), d = product(h, small()), l = product(h, small());
  luna_tensor *q = tensor(3, b, n, d, 1), *k = tensor(3, b, n, d, 1), *v = tensor(3, b, n, d, 1),
      *s = tensor(3, b, n, l, 1);
  const luna_activation omega = turn() ? (luna_activation)number(1) : (luna_activation)(LUNA_ACTIVATION_ELU1 + pick(3));
  luna_causal_nested_config c = {.heads = h, .omega = omega};
  c.routed = pick(3) == 0;
  if (c.routed) c.forget = tensor(1, h, 1, 1, 1);
  else if (turn()) c.forget = tensor(3, b, n, l, 1);
  c.horizon = number(0);
  c.lengths = lengths_of(q ? q->shape[0] : b, l);
  c.dropout = probability();
  got_tensor(luna_causal_nested_attention(q, k, v, s, coin() ? NULL : &c), q || k || v);
}
static void case_luna_route(void) {
  const int64_t b = small(), n = small(), h = size(1 + pick(2));
  luna_tensor *router = tensor(3, b, n, product(h, size(2 + pick(4))), 1), *strength = tensor(3, b, n, h, 1);
  got_tensor(luna_route(router, strength), router || strength);
}
static luna_status double_forward(const luna_tensor *const *in, int count, luna_tensor *out, void *state) {
  const luna_run run = luna_custom_run(out);
  expect(run.threads >= 1 && (!run.scratch_size || run.scratch), "a custom op has no workspace");
  if (run.scratch_size) memset(run.scratch, 1, run.scratch_size);
  for (int64_t i = 0; i < luna_count(out); i++)
    out->data[i] = count > 0 && i < luna_count(in[0]) && *(const char *)state ? 2 * in[0]->data[i] : 0;
  return LUNA_OK;
}
static luna_status double_backward(luna_tensor *const *in, int count, const luna_tensor *out, void *state) {
  (void)state;
  for (int64_t i = 0; count > 0 && in[0]->grad && i < luna_count(out) && i < luna_count(in[0]); i++)
    in[0]->grad[i] += 2 * out->grad[i];
  return LUNA_OK;
}
static void case_luna_custom_op(void) {
  luna_tensor *in[9];
  const int count = number(1 + (int)pick(8));
  const int64_t shape[4] = {small(), small(), small(), small()};
  luna_custom c = {double_forward, double_backward, "ab", 3, 0, false, 0, 0};
  for (int i = 0; i < 9; i++) in[i] = any_tensor();
  if (turn()) c.forward = NULL;
  if (turn()) c.backward = NULL;
  if (turn()) c.state = NULL;
  if (turn()) c.state = NULL, c.state_size = SIZE_MAX;
  c.workspace_size = turn() ? SIZE_MAX : pick(300);
  if (count > 9 || shape_count(4, shape) > 100000) return;
  const bool given = !turn();
  got_tensor(luna_custom_op(given ? in : NULL, count, number(1 + (int)pick(4)), turn() ? NULL : shape,
                            turn() ? NULL : &c), given && any_of(in, count < 8 ? count : 8));
}
static void case_luna_custom_run(void) {
  expect(luna_custom_run(turn() ? NULL : any_tensor()).threads == 0, "luna_custom_run outside a custom op");
}
static void case_luna_custom_dropout(void) { /* outside a custom op it writes nothing */
  float factor = 7;
  luna_custom_dropout(turn() ? NULL : any_tensor(), number(0), turn() ? 0 : 1, &factor);
  expect(factor == 7, "luna_custom_dropout outside a custom op writes");
}
static void case_luna_scope_begin_as(void) {
  const luna_scope scope = luna_scope_begin_as(turn() ? NULL : w->ctx, turn() ? NULL : "a scope", coin()),
      inner = luna_scope_recompute(w->ctx);
  luna_tensor *x = any_tensor(), *y = x ? luna_mul(x, luna_scale(x, 2)) : NULL, *results[2];
  if (turn()) y = luna_scope_end(inner, &y, 1);
  results[0] = turn() ? NULL : y;
  results[1] = coin() ? x : NULL;
  y = luna_scope_end(scope, results, 2);
  expect(y == results[0], "the end of a scope returns what is not its first result");
  got_tensor(y, x != NULL && y != NULL);
}

/* ==== params ==== */
static luna_params *new_set(void) { return luna_params_open(w->ctx); }
static luna_init an_init(void) {
  luna_init init;
  init.kind = ENUM(luna_init_kind, 6);
  init.scale = real(0);
  return init;
}
static void case_luna_params_ctx(void) {
  const luna_params *set = turn() ? NULL : w->set[0];
  expect(luna_params_ctx(set) == (set ? w->ctx : NULL), "a set's context");
}
static void case_luna_params_open(void) {
  luna_ctx *ctx = turn() ? NULL : w->ctx;
  got(luna_params_open(ctx) != NULL, ctx != NULL);
}
static void case_luna_params_share(void) {
  luna_params *set = luna_params_share(coin() ? w->ctx : w->other, w->set[1]);
  luna_lm model;
  luna_lm_config c = w->lm.config;
  if (turn()) c.vocab = hostile_size();
  expect(set != NULL, "no set");
  if (set) got_status(luna_lm_init(&model, set, &c), true);
  if (set && hostile == 0)
    expect(luna_write(luna_params_at(set, 0, NULL), numbers) != LUNA_OK && sentence(), "a shared parameter is written");
}
static void case_luna_param(void) {
  luna_params *set = new_set();
  const int64_t shape[4] = {small(), small(), small(), small()};
  const char *name = turn() ? (coin() ? NULL : coin() ? "luna.x" : "\xff") : "x";
  const int rank = number((int)pick(5));
  if (set) got_tensor(luna_param(set, name, rank, turn() ? NULL : shape, an_init()), true);
  if (set && hostile == 0) {
    expect(!luna_param(set, "x", 0, NULL, (luna_init){LUNA_INIT_ZEROS, 0}) && sentence(), "a name twice");
    hostile = 1;
  }
}
static void case_luna_params_find(void) {
  expect((luna_params_find(turn() ? NULL : w->set[0], turn() ? NULL : "linear.weight") != NULL) == (hostile == 0),
         "finding");
}
static void case_luna_params_tensor_count(void) {
  expect((luna_params_tensor_count(turn() ? NULL : w->set[0]) > 0) == (hostile == 0), "the size");
}
static void case_luna_params_at(void) {
  const char *name;
  expect(luna_params_at(turn() ? NULL : w->set[0], size(3), turn() ? NULL : &name) || hostile, "the parameter");
}
static void case_luna_params_element_count(void) {
  expect((luna_params_element_count(turn() ? NULL : w->set[0]) > 0) == (hostile == 0), "the count");
}
static void case_luna_params_zero_grad(void) { got_status(luna_params_zero_grad(turn() ? NULL : w->set[0]), false); }
static void case_luna_params_freeze(void) {
  luna_params *set = turn() ? NULL : w->set[0];
  const char *name = turn() ? "no such name" : coin() ? NULL : "weight";
  got_status(luna_params_freeze(set, name, true), set != NULL);
  got_status(luna_params_freeze(set, name, false), set != NULL);
}
static void case_luna_params_set_text(void) {
  luna_params *set = turn() ? NULL : w->set[7];
  got_status(luna_params_set_text(set, turn() ? (coin() ? NULL : "luna.key") : "key",
                             turn() ? (coin() ? NULL : "\xff") : "value"), set != NULL);
}
static void case_luna_params_get_text(void) { luna_params_get_text(turn() ? NULL : w->set[7], turn() ? NULL : "key"); }

/* ==== checkpoints ==== */
static bool file_read(void *user, void *bytes, size_t n) {
  size_t *used = (size_t *)user;
  if (n > file_size - *used) return false;
  memcpy(bytes, file.at + *used, n);
  *used += n;
  return true;
}
/* the file of the language model, perhaps damaged */
static const void *bytes_of(size_t *n) {
  static union { double align; uint8_t at[FILE_ROOM]; } damaged;
  *n = file_size;
  if (!turn()) return file.at;
  if (pick(4) == 0) return NULL;
  memcpy(damaged.at, file.at, file_size);
  if (coin()) *n = pick((uint32_t)file_size + 1);
  for (uint32_t i = pick(4); i > 0; i--) damaged.at[pick(coin() ? 64 : (uint32_t)file_size)] = (uint8_t)pick(256);
  return damaged.at + (pick(8) == 0);
}
static char folder[600], path[700];
static const char *a_path(void) {
  return turn() ? (coin() ? NULL : coin() ? "" : coin() ? folder : "no/such/folder/x") : path;
}
static luna_io an_io(size_t *used) {
  luna_io io = {0};
  *used = 0;
  io.read = turn() ? NULL : file_read;
  io.write = turn() ? NULL : file_write;
  io.user = used;
  io.size = turn() ? (coin() ? UINT64_MAX : coin() ? 0 : (uint64_t)hostile_size()) : file_size;
  return io;
}
static luna_params *file_set(void) { /* a set that the file fits */
  luna_lm model;
  luna_params *set = new_set();
  luna_lm_init(&model, set, &w->lm.config);
  return turn() ? NULL : set;
}
static void case_luna_path(void) { expect(luna_path(path).path == path, "the path"); }
static void case_luna_bytes(void) { expect(luna_bytes(path, 3).bytes == path, "the bytes"); }
static void case_luna_callbacks(void) { expect(!luna_callbacks(NULL).io, "null functions"); }
static void case_luna_buffer(void) { /* written to, as long as there is room */
  static uint8_t kept[FILE_ROOM];
  size_t written = 0, n = turn() ? pick((uint32_t)file_size + 1) : sizeof kept;
  if (n < file_size) hostile++;
  const luna_file to = luna_buffer(turn() ? NULL : kept, n, turn() ? NULL : &written);
  got_status(luna_save(turn() ? NULL : w->set[1], to), false);
}
static void file_save_io(void) {
  static uint8_t kept[FILE_ROOM];
  size_t used;
  const size_t n = file_size;
  const luna_io io = an_io(&used);
  memcpy(kept, file.at, n);
  got_status(luna_save(turn() ? NULL : w->set[1], luna_callbacks(turn() ? NULL : &io)), false);
  memcpy(file.at, kept, n);
}
static void file_load_io(void) {
  size_t used;
  const luna_io io = an_io(&used);
  got_status(luna_load(file_set(), luna_callbacks(turn() ? NULL : &io)), false);
}
static void file_load_bytes(void) {
  size_t n;
  const void *bytes = bytes_of(&n);
  luna_params *set = file_set();
  got_status(luna_load(set, luna_bytes(bytes, n)), set != NULL);
}
static void left_out(void *user, const char *name, const char *why) { *(int *)user += name && why; }
static luna_load_report a_match(int *count) {
  luna_load_report m = {0};
  m.report = coin() ? left_out : NULL;
  m.user = count;
  return m;
}
static void file_load_matching_bytes(void) {
  size_t n;
  int count = 0;
  luna_load_report m = a_match(&count);
  const void *bytes = bytes_of(&n);
  luna_params *set = file_set();
  got_status(luna_load_matching(set, luna_bytes(bytes, n), turn() ? NULL : &m), set != NULL);
}
static void seen_pair(void *user, const char *key, const char *value) { *(int *)user += key && value; }
static void seen_tensor(void *user, const luna_file_tensor *entry) {
  if (entry->count <= ROOM) *(int *)user += luna_file_tensor_read(entry, room) == LUNA_OK;
}
static luna_inspection an_inspection(int *count) {
  luna_inspection i = {0};
  i.pair = turn() ? NULL : seen_pair;
  i.tensor = turn() ? NULL : seen_tensor;
  i.user = count;
  return i;
}
static void file_inspect_bytes(void) {
  size_t n;
  int count = 0;
  const luna_inspection i = an_inspection(&count);
  const void *bytes = bytes_of(&n);
  luna_ctx *ctx = turn() ? NULL : w->ctx;
  got_status(luna_inspect(ctx, luna_bytes(bytes, n), turn() ? NULL : &i), false);
}
static void case_luna_file_tensor_read(void) {
  luna_file_tensor e = {0};
  e.dtype = turn() ? (coin() ? "X1" : "I64") : "F32";
  e.rank = 1;
  e.count = e.shape[0] = pick(5);
  e.data = numbers;
  e.bytes = (size_t)e.count * 4;
  const luna_status status = luna_file_tensor_read(turn() ? NULL : &e, turn() ? NULL : room);
  expect((status == LUNA_OK) == (hostile == 0), "the values of an entry");
}
static void case_luna_inspect(void) {
  if (pick(2) == 0) { file_inspect_bytes(); return; }
  int count = 0;
  const luna_inspection i = an_inspection(&count);
  got_status(luna_inspect(turn() ? NULL : w->ctx, luna_path(a_path()), turn() ? NULL : &i), false);
}
static void case_luna_save(void) {
  if (pick(2) == 0) { file_save_io(); return; }
  got_status(luna_save(turn() ? NULL : w->set[1], luna_path(a_path())), false);
}
static void case_luna_save_int8(void) {
  if (pick(2) == 0) { file_save_io(); return; }
  got_status(luna_save_int8(turn() ? NULL : w->set[1], luna_path(a_path())), false);
}
static void case_luna_load(void) {
  if (pick(3) == 0) { file_load_io(); return; }
  if (pick(3) == 0) { file_load_bytes(); return; }
  luna_params *set = file_set();
  got_status(luna_load(set, luna_path(a_path())), set != NULL);
}
static void case_luna_load_matching(void) {
  if (pick(2) == 0) { file_load_matching_bytes(); return; }
  int count = 0;
  luna_load_report m = a_match(&count);
  luna_params *set = file_set();
  got_status(luna_load_matching(set, luna_path(a_path()), turn() ? NULL : &m), set != NULL);
}

/* ==== layers ==== */
static luna_layer_config layer_config(bool causal, bool other) {
  luna_layer_config c = {0};
  c.dim = size(coin() ? DIM : 12);
  c.heads = size(coin() ? 0 : 2);
  c.pack_heads = size(coin() ? 0 : 4);
  c.ffn = size(coin() ? 0 : 5);
  c.sharing = ENUM(luna_sharing, causal ? 2 : 4);
  c.activation = ENUM(luna_activation, 6);
  c.omega = turn() ? (luna_activation)number(0) : coin() ? LUNA_ACTIVATION_DEFAULT : LUNA_ACTIVATION_SOFTPLUS;
  c.pre_norm = coin();
  c.norm = ENUM(luna_norm_kind, 2);
  c.convolution = size(causal ? pick(3) : 0);
  c.dropout = probability();
  c.attention_dropout = probability();
  c.activation_dropout = probability();
  c.bert_init = coin();
  c.attention = other ? ENUM(luna_attention_kind, 3) : LUNA_ATTENTION_LUNA;
  c.recompute = ENUM(luna_recompute_kind, 3);
  return c;
}
static const char *prefix(void) {
  static char longest[300];
  memset(longest, 'p', sizeof longest - 1);
  return turn() ? (coin() ? NULL : longest) : "p.";
}
static luna_tensor *rows(int64_t b, int64_t n, int64_t d) { return tensor(3, b, n, d, 1); }
static void case_luna_linear_layer_init(void) {
  luna_linear_layer layer;
  const int64_t in = small();
  const luna_status status = luna_linear_layer_init(turn() ? NULL : &layer, new_set(), prefix(), in, small(),
                                                    an_init());
  got_status(status, true);
  if (status == LUNA_OK) got_tensor(luna_linear_layer_forward(&layer, rows(2, small(), in)), true);
}
static void case_luna_linear_layer_forward(void) {
  luna_tensor *x = rows(small(), small(), DIM);
  got_tensor(luna_linear_layer_forward(&w->linear, x), true);
}
static void case_luna_norm_layer_init(void) {
  luna_norm_layer layer;
  const int64_t dim = small();
  const luna_status status = luna_norm_layer_init(turn() ? NULL : &layer, new_set(), prefix(), dim,
                                                  ENUM(luna_norm_kind, 2));
  got_status(status, true);
  luna_tensor *x = rows(2, small(), dim);
  if (status == LUNA_OK) got_tensor(luna_norm_layer_forward(&layer, x), x != NULL);
}
static void case_luna_norm_layer_forward(void) {
  luna_tensor *x = rows(small(), small(), DIM);
  got_tensor(luna_norm_layer_forward(&w->norm, x), x != NULL);
}
enum { FEATURES = 3 };
static const luna_input *features_input(void) {
  static luna_input input;
  input.batch = small(), input.n = small();
  input.tokens = NULL;
  input.lengths = lengths_of(input.batch, input.n);
  input.features = turn() || product(product(input.batch, input.n), FEATURES) > NUMBERS ? NULL : numbers;
  return turn() ? NULL : &input;
}
static void case_luna_input_layer_init(void) {
  luna_input_layer layer;
  got_status(luna_input_layer_init(turn() ? NULL : &layer, new_set(), prefix(), size(FEATURES), small(), an_init()),
             true);
}
static luna_input_layer *input_layer(void) {
  static luna_input_layer layer;
  const luna_init init = {LUNA_INIT_XAVIER, 0};
  luna_params *params = luna_params_open(w->ctx);
  if (luna_input_layer_init(&layer, params, "p.", FEATURES, 5, init) != LUNA_OK) return NULL;
  return turn() ? NULL : &layer;
}
static void got_fit(luna_status status, bool reached) {
  hostile += luna_error_id_of(w->ctx) == LUNA_ERROR_FIT_NOTHING;       /* of lengths that are all 0 */
  got_status(status, reached);
}
static void case_luna_input_layer_fit(void) {
  luna_input_layer *layer = input_layer();
  got_fit(luna_input_layer_fit(layer, features_input()), layer != NULL);
}
static void case_luna_lm_fit_outputs(void) {
  luna_lm model;
  luna_lm_config c = {0};
  c.features = 2, c.outputs = 3, c.layers = 1, c.output_norm = !turn();
  c.layer.dim = 8, c.layer.heads = 2, c.layer.ffn = 8;
  const int64_t rows = small();
  const bool made = luna_lm_init(&model, luna_params_open(w->ctx), &c) == LUNA_OK;
  luna_lm *m = made && !turn() ? &model : NULL;
  got_fit(luna_lm_fit_outputs(m, product(rows, 3) > NUMBERS || turn() ? NULL : numbers, rows), m != NULL);
}
static void case_luna_input_layer_forward(void) {
  luna_input_layer *layer = input_layer();
  got_tensor(luna_input_layer_forward(layer, features_input()), layer != NULL);
}
static void nested(const luna_nested_attention_layer *layer) {
  const int64_t b = small(), n = small(), m = small(), d = layer->config.dim;
  luna_tensor *x = rows(b, n, d), *p = rows(b, small(), d), *context = coin() ? NULL : rows(b, m, d),
      *packed_context = NULL;
  const int32_t *lengths = lengths_of(x ? x->shape[0] : b, context ? m : n);
  got_tensor(luna_nested_attention_layer_forward(layer, x, p, context, lengths, coin() ? &packed_context : NULL),
             x != NULL);
}
static void case_luna_nested_attention_layer_init(void) {
  luna_nested_attention_layer layer;
  luna_layer_config c = {0};
  c.dim = size(DIM);
  c.heads = size(pick(3));
  c.pack_heads = size(pick(3));
  c.sharing = ENUM(luna_sharing, 4);
  c.attention_dropout = probability();
  c.bert_init = coin();
  const luna_status status = luna_nested_attention_layer_init(turn() ? NULL : &layer, new_set(), prefix(),
                                                              turn() ? NULL : &c);
  got_status(status, true);
  if (status == LUNA_OK) nested(&layer);
}
static void case_luna_nested_attention_layer_forward(void) { nested(&w->nested); }
static void causal(const luna_causal_attention_layer *layer) {
  const int64_t b = small(), d = layer->config.dim, l = small();
  luna_tensor *x = rows(b, small(), d), *p = coin() ? tensor(2, l, d, 1, 1) : rows(coin() ? b : 1, l, d);
  got_tensor(luna_causal_attention_layer_forward(layer, x, p, lengths_of(x ? x->shape[0] : b, l)), x != NULL);
}
static void case_luna_causal_attention_layer_init(void) {
  luna_causal_attention_layer layer;
  luna_layer_config c = {0};
  c.dim = size(DIM);
  c.heads = size(pick(3));
  c.sharing = ENUM(luna_sharing, 2);
  c.omega = turn() ? (luna_activation)number(0) : LUNA_ACTIVATION_ELU1;
  c.attention_dropout = probability();
  c.forget = ENUM(luna_forget, 4);
  const luna_status status = luna_causal_attention_layer_init(turn() ? NULL : &layer, new_set(), prefix(),
                                                              turn() ? NULL : &c);
  got_status(status, true);
  if (status == LUNA_OK) causal(&layer);
}
static void case_luna_causal_attention_layer_forward(void) { causal(&w->causal); }
static void other_attention(const luna_attention_layer *layer) {
  const int64_t b = small(), n = small(), m = small(), d = layer->config.dim;
  luna_tensor *x = rows(b, n, d), *context = layer->config.causal || coin() ? NULL : rows(b, m, d);
  got_tensor(luna_attention_layer_forward(layer, x, context, lengths_of(x ? x->shape[0] : b, context ? m : n)),
             x != NULL);
}
static void case_luna_attention_layer_init(void) {
  luna_attention_layer layer;
  luna_layer_config c = {0};
  c.attention = (luna_attention_kind)number(1 + (int)pick(2));
  c.dim = size(DIM);
  c.heads = size(pick(3));
  c.causal = coin();
  c.attention_dropout = probability();
  const luna_status status = luna_attention_layer_init(turn() ? NULL : &layer, new_set(), prefix(), turn() ? NULL : &c);
  got_status(status, true);
  if (status == LUNA_OK) other_attention(&layer);
}
static void case_luna_attention_layer_forward(void) { other_attention(&w->attention[1 + pick(2)]); }
static void encoder_layer(const luna_encoder_layer *layer) {
  const int64_t b = small(), n = small(), d = layer->config.dim;
  luna_tensor *x = rows(b, n, d), *p = rows(b, small(), d);
  got_tensor(luna_encoder_layer_forward(layer, x, turn() ? NULL : &p, lengths_of(x ? x->shape[0] : b, n)), x != NULL);
}
static void case_luna_encoder_layer_init(void) {
  luna_encoder_layer layer;
  luna_layer_config c = layer_config(false, true);
  const luna_attention_hook hook = {0};
  c.own_memory = coin();
  c.memory = size(coin() ? 0 : 3);
  if (turn()) c.hook = &hook;
  const luna_status status = luna_encoder_layer_init(turn() ? NULL : &layer, new_set(), prefix(), turn() ? NULL : &c);
  got_status(status, true);
  if (status == LUNA_OK) encoder_layer(&layer);
}
static void case_luna_encoder_layer_forward(void) { encoder_layer(&w->encoder_layer); }
static void decoder_layer(const luna_decoder_layer *layer) {
  const int64_t b = small(), m = small(), d = layer->config.dim;
  luna_tensor *x = rows(b, small(), d), *p = rows(b, small(), d), *context = rows(b, m, d);
  got_tensor(luna_decoder_layer_forward(layer, x, turn() ? NULL : &p, context, lengths_of(x ? x->shape[0] : b, m)),
             x != NULL);
}
static void case_luna_decoder_layer_init(void) {
  luna_decoder_layer layer;
  const luna_layer_config c = layer_config(false, false);
  const luna_status status = luna_decoder_layer_init(turn() ? NULL : &layer, new_set(), prefix(), turn() ? NULL : &c);
  got_status(status, true);
  if (status == LUNA_OK) decoder_layer(&layer);
}
static void case_luna_decoder_layer_forward(void) { decoder_layer(&w->decoder_layer); }
static void case_luna_causal_layer_init(void) {
  luna_causal_layer layer;
  luna_layer_config c = layer_config(true, true);
  c.memory = size(SLOTS);
  const luna_status status = luna_causal_layer_init(turn() ? NULL : &layer, new_set(), prefix(), turn() ? NULL : &c);
  got_status(status, true);
  luna_tensor *x = status == LUNA_OK ? rows(small(), small(), layer.config.dim) : NULL;
  if (status == LUNA_OK) got_tensor(luna_causal_layer_forward(&layer, x), x != NULL);
}
static void case_luna_causal_layer_forward(void) {
  luna_tensor *x = rows(small(), small(), DIM);
  got_tensor(luna_causal_layer_forward(&w->causal_layer, x), x != NULL);
}

/* ==== models ==== */
static luna_encoder_config encoder_config(bool other) {
  luna_encoder_config c = {0};
  c.layer = layer_config(false, other);
  c.layers = size(1 + pick(2));
  c.layer.memory = size(SLOTS);
  c.positions = ENUM(luna_positions, 4);
  c.max_length = size(16);
  c.first_position = size(pick(2));
  c.embedding_scale = ENUM(luna_embedding_scale, 3);
  c.norm_embedding = coin();
  c.tied_layers = coin();
  c.layer.own_memory = other && coin();
  c.keep_padding = coin();
  return c;
}
static int64_t vocab_of(void) { return size(VOCAB); }
static void lm_forward(const luna_lm *model) {
  const int64_t batch = small(), n = small();
  if (model->config.vocab < VOCAB) return;
  got_tensor(luna_lm_forward(model, input_of(words(batch, n), NULL, batch, n)), true);
}
static void case_luna_lm_init(void) {
  luna_lm model;
  luna_lm_config c = {0};
  c.vocab = vocab_of();
  c.layers = size(pick(3));
  c.layer = layer_config(true, true);
  c.layer.memory = size(SLOTS);
  c.positions = ENUM(luna_positions, 4);
  c.max_length = size(coin() ? 0 : 16);
  const luna_status status = luna_lm_init(turn() ? NULL : &model, new_set(), &c);
  got_status(status, true);
  if (status == LUNA_OK) lm_forward(&model);
}
static void case_luna_lm_forward(void) { lm_forward(&w->lm); }
static void encoder_forward(const luna_encoder *e, bool embed) {
  const int64_t batch = small(), n = small();
  luna_tensor *p = pick(4) == 0 ? rows(batch, SLOTS, e->config.layer.dim) : NULL;
  const int32_t *t = words(batch, n), *lengths = lengths_of(batch, n);
  if (e->embedding->shape[0] < VOCAB) return;
  got_tensor((embed ? luna_encoder_embed : luna_encoder_forward)(e, input_of(t, lengths, batch, n), coin() ? &p : NULL),
             true);
}
static void case_luna_encoder_init(void) {
  luna_encoder e;
  const luna_encoder_config c = encoder_config(true);
  const luna_status status = luna_encoder_init(turn() ? NULL : &e, new_set(), prefix(), vocab_of(), turn() ? NULL : &c);
  got_status(status, true);
  if (status == LUNA_OK) encoder_forward(&e, false);
}
static void case_luna_encoder_embed(void) { encoder_forward(&w->encoder, true); }
static void case_luna_encoder_forward(void) { encoder_forward(&w->encoder, false); }
static void classify(const luna_classifier *model) {
  const int64_t batch = small(), n = small(), n2 = small();
  const int32_t *t = words(batch, n), *lengths = lengths_of(batch, n),
      *t2 = whole(spare_tokens, product(batch, n2), VOCAB - 1);
  if (model->config.vocab < VOCAB) return;
  if (model->config.pair != turn())
    got_tensor(luna_classifier_forward_pair(model, input_of(t, lengths, batch, n), input_of(t2, NULL, batch, n2)),
               true);
  else got_tensor(luna_classifier_forward(model, input_of(t, lengths, batch, n)), true);
}
static void case_luna_classifier_init(void) {
  luna_classifier model;
  luna_classifier_config c = {0};
  c.encoder = encoder_config(true);
  c.vocab = vocab_of();
  c.classes = size(pick(4));
  c.pooling = ENUM(luna_pooling, c.encoder.layer.attention ? 3 : 5);
  c.pre_logits = size(coin() ? 0 : 6);
  c.pair = coin();
  const luna_status status = luna_classifier_init(turn() ? NULL : &model, new_set(), turn() ? NULL : &c);
  got_status(status, true);
  if (status == LUNA_OK) classify(&model);
}
static void case_luna_classifier_forward(void) { classify(&w->classifier); }
static void case_luna_classifier_forward_pair(void) { classify(&w->pair); }
static void case_luna_classifier_pool(void) {
  const int64_t b = small(), n = small();
  luna_tensor *x = rows(b, n, DIM), *p = rows(b, SLOTS, DIM);
  luna_classifier copy = w->classifier;
  copy.config.pooling = (luna_pooling)(1 + pick(4));
  got_tensor(luna_classifier_pool(&copy, x, p, lengths_of(first_axis(x, p), n)), x && p);
}
static const int32_t *labels_of(int64_t batch, int64_t n) {
  static int32_t labels[NUMBERS];
  return whole(labels, product(batch, n), VOCAB - 1);
}
static void masked_lm(const luna_masked_lm *model, bool loss) {
  const int64_t batch = small(), n = small();
  const int32_t *t = words(batch, n), *lengths = lengths_of(batch, n), *labels = labels_of(batch, n);
  if (model->config.vocab < VOCAB) return;
  luna_tensor *y = loss ? luna_masked_lm_loss(model, input_of(t, lengths, batch, n), labels) :
                   luna_masked_lm_forward(model, input_of(t, lengths, batch, n));
  got_tensor(y, true);
}
static void case_luna_masked_lm_init(void) {
  luna_masked_lm model;
  luna_masked_lm_config c = {0};
  c.vocab = vocab_of();
  c.encoder = encoder_config(true);
  const luna_status status = luna_masked_lm_init(turn() ? NULL : &model, new_set(), turn() ? NULL : &c);
  got_status(status, true);
  if (status == LUNA_OK) masked_lm(&model, coin());
}
static void case_luna_masked_lm_forward(void) { masked_lm(&w->masked, false); }
static void case_luna_masked_lm_loss(void) { masked_lm(&w->masked, true); }
static void case_luna_lm_loss(void) {
  const int64_t batch = small(), n = small();
  const int32_t *t = words(batch, n), *labels = labels_of(batch, n);
  got_tensor(luna_lm_loss(&w->lm, input_of(t, NULL, batch, n), labels), true);
}
static void seq2seq(const luna_seq2seq *model) {
  const int64_t batch = small(), n = small(), m = small();
  const int32_t *source = words(batch, n), *target = whole(spare_tokens, product(batch, m), VOCAB - 1);
  if (model->config.vocab < VOCAB || model->config.target_vocab < VOCAB) return;
  got_tensor(luna_seq2seq_forward(model, input_of(source, lengths_of(batch, n), batch, n),
                                  input_of(target, NULL, batch, m)), true);
}
static void case_luna_seq2seq_init(void) {
  luna_seq2seq model;
  luna_seq2seq_config c = {0};
  c.vocab = vocab_of();
  c.target_vocab = size(coin() ? 0 : VOCAB);
  c.share_embeddings = coin();
  c.separate_output = coin();
  c.decoder_layers = size(pick(2));
  c.max_target_length = size(coin() ? 0 : 16);
  c.encoder = encoder_config(false);
  const luna_status status = luna_seq2seq_init(turn() ? NULL : &model, new_set(), turn() ? NULL : &c);
  got_status(status, true);
  if (status == LUNA_OK) seq2seq(&model);
}
static void case_luna_seq2seq_forward(void) { seq2seq(&w->seq2seq); }
static void case_luna_seq2seq_loss(void) {
  const int64_t batch = small(), n = small(), m = small();
  const int32_t *source = words(batch, n), *target = whole(spare_tokens, product(batch, m), VOCAB - 1),
      *labels = labels_of(batch, m);
  luna_cross_entropy_config c = {0};
  c.smoothing = real(0.1f);
  got_tensor(luna_seq2seq_loss(&w->seq2seq, input_of(source, lengths_of(batch, n), batch, n),
                               input_of(target, lengths_of(batch, m), batch, m), labels, turn() ? NULL : &c), true);
}
static luna_file a_model_file(void) {
  size_t n;
  const void *bytes = bytes_of(&n);
  return coin() ? luna_bytes(bytes, n) : luna_path(a_path());
}
static void case_luna_load_model(void) {
  luna_model model;
  got_status(luna_load_model(turn() ? NULL : &model, new_set(), a_model_file()), true);
}
static void case_luna_load_model_of(void) { /* the file holds a luna_lm */
  luna_model model;
  const luna_model_kind kind = turn() ? (luna_model_kind)pick(8) : LUNA_MODEL_LM;
  void *const to[8] = {NULL, &model.lm, &model.classifier, &model.masked_lm, &model.seq2seq, NULL, NULL, NULL};
  got_status(luna_load_model_of(kind, turn() ? NULL : to[kind], new_set(), a_model_file()), true);
}

/* ==== trainer ==== */
static luna_schedule schedule(void) {
  luna_schedule s = {0};
  s.decay = ENUM(luna_decay, 5);
  s.warmup = size(pick(4));
  s.total = size(10);
  s.floor = real(0);
  s.warmup_from = real(0);
  s.milestone[0] = size(3);
  s.gamma = real(0);
  return s;
}
static void case_luna_schedule_at(void) {
  const luna_schedule s = schedule();
  const float factor = luna_schedule_at(turn() ? NULL : &s, size(3));
  expect(hostile || (factor >= 0 && factor <= 1), "the factor");
}
/* an optimiser of a set of its own takes a step */
static void trained(luna_optimizer *o, luna_tensor *p) {
  got(o != NULL, true);
  if (!o || w->measure) return;
  expect(luna_begin_step(w->ctx) == LUNA_OK && luna_backward(luna_sum(luna_mul(p, p), 0)) == LUNA_OK, "no gradient");
  got_status(luna_optimizer_step(o), true);
  for (int i = 0; i < 3; i++) expect(p->data[i] == p->data[i], "the optimiser has made NaN");
}
static luna_params *three(luna_tensor **p) {
  luna_params *set = new_set();
  *p = luna_param(set, "p", 1, (int64_t[]){3}, (luna_init){LUNA_INIT_NORMAL, 0});
  return set;
}
static luna_optimizer_config an_optimizer_config(void) {
  luna_optimizer_config c = {0};
  c.lr = real(0), c.momentum = real(0), c.nesterov = c.momentum > 0 && coin();
  c.beta1 = real(0), c.beta2 = real(0), c.epsilon = real(0), c.weight_decay = real(0), c.clip = real(0),
      c.schedule = schedule();
  return c;
}
static void an_optimizer_case(luna_optimizer *(*open)(luna_params *, const luna_optimizer_config *)) {
  const luna_optimizer_config c = an_optimizer_config();
  luna_tensor *p;
  luna_params *set = three(&p);
  trained(open(set, coin() ? NULL : &c), p);
}
static void case_luna_sgd(void) { an_optimizer_case(luna_sgd); }
static void case_luna_adam(void) { an_optimizer_case(luna_adam); }
static void case_luna_adamw(void) { an_optimizer_case(luna_adamw); }
static void case_luna_optimizer_open(void) {
  static const luna_optimizer_hook nameless = {NULL, 1, false, 0, NULL, luna_apollo_update};
  static const luna_optimizer_hook still = {"still", 1, false, 0, NULL, NULL};
  static const luna_optimizer_hook many = {"many", 4, false, 0, NULL, luna_apollo_update};
  static const luna_optimizer_hook loud = {"loud", 1, false, -1, NULL, luna_apollo_update};
  const luna_optimizer_hook *const bad[] = {NULL, &nameless, &still, &many, &loud};
  luna_tensor *p;
  if (coin()) {
    an_optimizer_case(luna_apollo);
    return;
  }
  hostile++;
  expect(!luna_optimizer_open(three(&p), bad[pick(5)], NULL) && sentence(), "an optimiser of a hook that is none");
}
static luna_optimizer *an_optimizer(void) {
  luna_tensor *p;
  luna_params *set = three(&p);
  const luna_optimizer_config averaged = {.average = 0.9f};
  luna_optimizer *o = luna_adamw(set, &averaged);
  if (w->training && o && coin()) luna_backward(luna_sum(luna_mul(p, p), 0));
  return turn() ? NULL : o;
}
static void case_luna_optimizer_add_group(void) {
  luna_param_group g = {0};
  luna_optimizer *o = an_optimizer();
  g.name = turn() ? "nothing" : coin() ? NULL : "p";
  g.max_rank = number((int)pick(3));
  g.lr_factor = real(coin() ? 0 : -1);
  g.decay_factor = real(coin() ? 0 : -1);
  got_status(luna_optimizer_add_group(o, turn() ? NULL : &g), o != NULL);
}
/* without a gradient there may be nothing to step by, and a sentence that says so */
static void stepped(luna_status status, bool reached) {
  if (status != LUNA_OK) hostile++;
  got_status(status, reached);
}
static void case_luna_optimizer_step(void) {
  luna_optimizer *o = an_optimizer();
  stepped(luna_optimizer_step(o), o != NULL);
}
static void case_luna_optimizer_advance(void) {
  luna_optimizer *o = an_optimizer();
  stepped(luna_optimizer_advance(o), o != NULL);
}
static void case_luna_optimizer_apply(void) {
  luna_optimizer *o = an_optimizer();
  stepped(luna_optimizer_apply(o), o != NULL);
}
static void case_luna_optimizer_set_lr(void) {
  luna_optimizer *o = an_optimizer();
  got_status(luna_optimizer_set_lr(o, real(0.5f)), o != NULL);
}
static void case_luna_optimizer_steps(void) {
  expect(luna_optimizer_steps(an_optimizer()) == 0, "steps before the first");
}
static void case_luna_optimizer_skipped(void) {
  expect(luna_optimizer_skipped(an_optimizer()) == 0, "skipped steps before the first");
}
static void case_luna_optimizer_grad_norm(void) { luna_optimizer_grad_norm(an_optimizer()); }
static void case_luna_optimizer_lr(void) { luna_optimizer_lr(an_optimizer()); }
static void case_luna_optimizer_swap_average(void) {
  luna_optimizer *o = an_optimizer();
  got_status(luna_optimizer_swap_average(o), o != NULL);
  got_status(luna_optimizer_swap_average(o), o != NULL);
}
static void case_luna_params_clip_grad(void) { (void)luna_params_clip_grad(turn() ? NULL : w->set[0], real(1)); }
static void file_save_training_io(void) {
  static uint8_t kept[FILE_ROOM];
  size_t used;
  const luna_io io = an_io(&used);
  memcpy(kept, file.at, sizeof kept);
  got_status(luna_save_training(turn() ? NULL : w->adam, luna_callbacks(turn() ? NULL : &io)), false);
  memcpy(file.at, kept, sizeof kept);
}
static void file_load_training_bytes(void) { /* the file has no training in it */
  size_t n;
  const void *bytes = bytes_of(&n);
  luna_optimizer *o = an_optimizer();
  hostile++;
  expect(luna_load_training(o, luna_bytes(bytes, n)) != LUNA_OK && (!o || sentence()),
         "training that is not there is loaded");
}
static void case_luna_save_training(void) {
  if (pick(2) == 0) { file_save_training_io(); return; }
  luna_optimizer *o = an_optimizer();
  got_status(luna_save_training(o, luna_path(a_path())), o != NULL);
}
static void case_luna_load_training(void) {
  if (pick(2) == 0) { file_load_training_bytes(); return; }
  luna_optimizer *o = an_optimizer();
  if (!w->measure) luna_save_training(o, luna_path(path));
  else hostile++;
  got_status(luna_load_training(o, luna_path(a_path())), o != NULL);
}

/* ==== streams ==== */
static luna_stream_config stream_config(void) {
  luna_stream_config c = {0};
  c.batch = size(pick(3));
  c.chunk = size(pick(3));
  c.isa = isa();
  return c;
}
static luna_stream *a_stream(void) {
  if (w->measure) hostile++;          /* it has no streams */
  luna_stream_reset(w->stream);
  return turn() ? NULL : w->stream;
}
static void got_stream(bool good, const luna_stream *s) {
  expect(good || hostile, luna_stream_error(s));
  expect(good || !s || (*luna_stream_error(s) && luna_stream_error_id(s)), "a stream failed without a sentence or id");
}
static void case_luna_stream_size(void) {
  const luna_stream_config c = stream_config();
  const char *error = NULL;
  size_t n;
  const void *bytes = bytes_of(&n);
  const size_t need = luna_stream_size(bytes, n, turn() ? NULL : &c, turn() ? NULL : &error);
  expect(need > 0 || hostile, error ? error : "no size");
  expect(need > 0 || !error || *error, "no sentence");
}
static void case_luna_stream_open_bytes(void) {
  static char memory[1 << 17];
  luna_stream_config c = stream_config();
  const char *error = NULL;
  size_t n;
  const void *bytes = bytes_of(&n);
  luna_stream *s = luna_stream_open_bytes(bytes, n, turn() ? NULL : &c, turn() ? NULL : memory + pick(64),
                                          turn() ? pick(70000) : sizeof memory - 64, turn() ? NULL : &error);
  expect(s || hostile, error ? error : "no stream");
  expect(s || !error || *error, "no sentence");
  if (s) expect(luna_stream_step(s, words(c.batch ? c.batch : 1, 1)) || hostile, luna_stream_error(s));
  luna_stream_close(s);
}
static void case_luna_stream_open(void) {
  const luna_stream_config c = stream_config();
  luna_stream *s = luna_stream_open(turn() ? NULL : &w->lm, coin() ? NULL : &c);
  if (w->measure) hostile++;
  got(s != NULL, false);
  luna_stream_close(s);
}
static void case_luna_stream_close(void) {
  luna_stream *s = turn() ? NULL : luna_stream_open(&w->lm, NULL);
  luna_stream_close(s);
  if (null_now.parameter < 0) return;
  null_now = null_none;
  luna_stream_close(s);
}
static void case_luna_stream_step(void) {
  luna_stream *s = a_stream();
  got_stream(luna_stream_step(s, words(2, 1)) != NULL, s);
}
static void case_luna_stream_step_features(void) {
  luna_lm model;
  luna_lm_config c = {0};
  c.features = FEATURES, c.layer.dim = DIM, c.layer.heads = HEADS, c.layer.memory = SLOTS;
  if (luna_lm_init(&model, luna_params_open(w->ctx), &c) != LUNA_OK) return;
  luna_stream *own = luna_stream_open(&model, NULL), *s = turn() ? (coin() ? w->stream : NULL) : own;
  got_stream(luna_stream_step_features(s, turn() ? NULL : numbers) != NULL || !own, s);
  luna_stream_close(own);
}
static void case_luna_stream_prefill(void) {
  luna_stream *s = a_stream();
  const int64_t n = small();
  got_stream(luna_stream_prefill(s, input_of(words(2, n), NULL, size(coin() ? 0 : 2), n)) != NULL, s);
}
static void case_luna_stream_error(void) {
  expect((*luna_stream_error(a_stream()) == 0) == (hostile == 0), "the sentence");
}
static void case_luna_stream_position(void) { expect(luna_stream_position(a_stream()) == 0, "the position"); }
static void case_luna_stream_reset(void) { luna_stream_reset(a_stream()); }
static void case_luna_stream_reorder(void) {
  luna_stream *s = a_stream();
  got_stream(luna_stream_reorder(s, whole(tokens, 2, 1)) == LUNA_OK, s);
}
static void case_luna_stream_state_size(void) {
  expect((luna_stream_state_size(a_stream()) > 0) == (hostile == 0), "the state's size");
}
static char state[1 << 16];
static void case_luna_stream_state_save(void) {
  luna_stream *s = a_stream();
  expect((luna_stream_state_save(s, turn() ? NULL : state, turn() ? pick(2000) : sizeof state) == LUNA_OK) || hostile,
         "the state is not saved");
}
static void case_luna_stream_state_load(void) {
  luna_stream *s = a_stream();
  size_t n = luna_stream_state_size(w->stream);
  luna_stream_state_save(w->stream, state, sizeof state);
  if (turn()) state[pick(300)] ^= (char)(1 + pick(255));
  if (turn()) n = pick(2000);
  got_stream(luna_stream_state_load(s, turn() ? NULL : state, n) == LUNA_OK, s);
  luna_stream_step(w->stream, words(2, 1));
}
/* a state of the model, or none; the context may not be able to hold one */
static luna_lm_state *a_state(void) {
  luna_lm_state *s = turn() ? NULL : luna_lm_state_open(&w->lm, size(1 + pick(2)));
  if (!s) hostile++;
  return s;
}
static void case_luna_lm_state_open(void) {
  luna_lm_state *s = luna_lm_state_open(turn() ? NULL : &w->lm, size(1 + pick(3)));
  expect((s != NULL) || hostile || w->measure || *luna_error(w->ctx), "no state, and no sentence");
}
static void case_luna_lm_state_continue(void) {
  luna_lm_state *s = a_state();
  const int64_t n = small();
  luna_lm_state_continue(s);
  luna_lm_forward(&w->lm, input_of(words(2, n), NULL, 2, n));
  luna_lm_state_continue(s);
}
static void case_luna_lm_state_restart(void) {
  int32_t which[3] = {number(0), number(1), number(0)};
  luna_lm_state_restart(a_state(), turn() ? NULL : which, pick(4));
}
static void case_luna_lm_state_size(void) { luna_lm_state_size(a_state()); }
static void case_luna_lm_state_save(void) {
  luna_lm_state *s = a_state();
  expect((luna_lm_state_save(s, turn() ? NULL : state, turn() ? pick(2000) : sizeof state) == LUNA_OK) || hostile,
         "the carried state is not saved");
}
static void case_luna_lm_state_load(void) {
  luna_lm_state *s = a_state();
  size_t n = luna_lm_state_size(s);
  luna_lm_state_save(s, state, sizeof state);
  if (turn()) state[pick(300)] ^= (char)(1 + pick(255));
  if (turn()) n = pick(2000);
  luna_lm_state_load(s, turn() ? NULL : state, n);
}
static void sample_from(bool nucleus) {
  luna_sampling s = {0};
  const int64_t vocab = size(VOCAB);
  s.temperature = real(coin() ? 0 : 0.5f);
  s.top_k = number((int)pick(5));
  common_fill(room, NUMBERS, case_seed, 1);
  if (turn()) room[pick(VOCAB)] = hostile_real();
  const float *logits = vocab > NUMBERS || turn() ? NULL : room;
  luna_sampling *how = turn() ? NULL : &s;
  int32_t token;
  if (nucleus) token = luna_sample_top_p(logits, vocab, real(coin() ? 1 : 0.5f), how);
  else token = luna_sample(logits, vocab, how);
  expect(token >= -1 && (token < vocab || token == -1) && (token >= 0 || hostile), "the token");
}
static void case_luna_sample(void) { sample_from(false); }
static void case_luna_sample_top_p(void) { sample_from(true); }
static void case_luna_seq2seq_stream_open(void) {
  const int64_t batch = small(), n = small();
  const int32_t *source = words(batch, n);
  luna_stream *s = luna_seq2seq_stream_open(turn() ? NULL : &w->seq2seq,
                                            input_of(source, lengths_of(batch, n), batch, n), size(1 + pick(2)));
  if (w->measure) hostile++;
  got(s != NULL, false);
  if (s) luna_stream_step(s, words(NUMBERS, 1));
  luna_stream_close(s);
}
static void case_luna_seq2seq_generate(void) {
  static int32_t out[NUMBERS], out_lengths[NUMBERS];
  luna_generate_config search = {0};
  const int64_t batch = small(), n = small();
  const int32_t *source = words(batch, n);
  search.begin = number(1), search.end = number(2);
  search.max_length = size(pick(4));
  if (w->measure) hostile++;
  if (search.max_length < 1000 && batch < 100)
    got_status(luna_seq2seq_generate(turn() ? NULL : &w->seq2seq, input_of(source, lengths_of(batch, n), batch, n),
        turn() ? NULL : &search, turn() ? NULL : out, turn() ? NULL : out_lengths), false);
}

/* ==== backend ==== */
static void case_luna_cpu_backend(void) { expect(luna_cpu_backend() != NULL, "null"); }
static void case_luna_op_name(void) {
  expect(*luna_op_name((luna_op_kind)number((int)pick(LUNA_OP_COUNT))) != 0, "no name");
}
static void case_luna_backend_of(void) {
  expect((luna_backend_of(turn() ? NULL : w->ctx) != NULL) == (hostile == 0), "the backend");
}
static void case_luna_backend_self(void) { luna_backend_self(turn() ? NULL : w->ctx); }
static void case_luna_backend_state(void) {
  expect((luna_backend_state(turn() ? NULL : w->ctx) != NULL) == (hostile == 0 && !w->measure) || w->measure,
         "the state");
}
static void case_luna_fail(void) {
  luna_ctx *ctx = turn() ? NULL : w->ctx;
  expect(luna_fail(ctx, LUNA_UNSUPPORTED, turn() ? NULL : "a sentence") == LUNA_UNSUPPORTED &&
         (!ctx || sentence()), "the failure is lost");
}

/* scopes */
static void case_luna_scope_end(void) {
  luna_scope scope = luna_scope_begin(turn() ? NULL : w->ctx);
  luna_tensor *x = any_tensor(), *y = x ? luna_scale(x, 2) : NULL, *results[2];
  results[0] = turn() ? NULL : coin() ? x : y;
  results[1] = coin() ? NULL : y;
  y = luna_scope_end(scope, turn() ? NULL : results, (int)pick(4) - 1);
  expect(y == NULL || y == results[0], "the end of a scope returns what is not its first result");
}
static void case_luna_keep(void) {
  const luna_scope scope = luna_scope_begin(w->ctx);
  const bool early = coin();
  luna_tensor *x = any_tensor(), *y = x ? luna_scale(x, 2) : NULL, *kept = early ? luna_keep(x) : NULL;
  expect(!early || kept == x, "luna_keep returns another tensor");
  if (!y || x->ctx != w->ctx || luna_count(x) == 0 || luna_error_status(w->ctx) != LUNA_OK) return;
  (void)luna_scope_end(scope, &y, 1);
  kept = luna_keep(x);
  expect(early ? kept == x : kept == NULL && sentence(), "luna_keep after the end of the scope");
}

static void case_luna_error_id_of(void) {
  expect((luna_error_id_of(turn() ? NULL : w->ctx) == LUNA_ERROR_NONE) == (hostile == 0), "the error's id");
}
static void case_luna_stream_error_id(void) {
  expect((luna_stream_error_id(a_stream()) == LUNA_ERROR_NONE) == (hostile == 0), "the error's id");
}

/* ==== the table ==== */
#define FUNCTIONS(F) \
  F(luna_version) F(luna_status_text) F(luna_isa_best) F(luna_isa_available) F(luna_isa_of) F(luna_isa_name) \
  F(luna_gemm_f32) \
  F(luna_gemm_scratch) F(luna_softmax_attention_f32) F(luna_softmax_attention_backward_f32) \
  F(luna_softmax_attention_scratch) F(luna_causal_product_f32) F(luna_causal_product_backward_f32) \
  F(luna_causal_product_scratch) F(luna_causal_nested_attention_f32) F(luna_causal_nested_attention_backward_f32) \
  F(luna_causal_nested_attention_scratch) F(luna_philox) \
  F(luna_open) F(luna_close) F(luna_begin_step) F(luna_begin_inference) \
  F(luna_error_status) F(luna_error) F(luna_memory) F(luna_count) F(luna_tensor_new) F(luna_require_grad) F(luna_item) \
  F(luna_read) F(luna_read_grad) F(luna_write) F(luna_write_grad) F(luna_counted) F(luna_set_counted) \
  F(luna_begin_part) \
  F(luna_options_of) F(luna_backward) F(luna_reshape) F(luna_slice) F(luna_permute) \
  F(luna_concat) F(luna_expand) F(luna_tensor_full) F(luna_tensor_random) \
  F(luna_gather_rows) \
  F(luna_rms_norm) F(luna_params_freeze) F(luna_optimizer_swap_average) \
  F(luna_optimizer_lr) F(luna_argmax) \
  F(luna_where) F(luna_clamp) F(luna_add_scalar) F(luna_scale) F(luna_sum) \
  F(luna_mean) F(luna_max) F(luna_matmul) F(luna_linear) F(luna_feed_forward) F(luna_activate) F(luna_softmax) \
  F(luna_mask) F(luna_ratio) F(luna_rotary) F(luna_as_part) \
  F(luna_detach) F(luna_dropout) \
  F(luna_layer_norm) F(luna_embedding) F(luna_cross_entropy) F(luna_softmax_attention) F(luna_causal_product) \
  F(luna_short_convolution) F(luna_pack) F(luna_unpack) F(luna_causal_nested_attention) F(luna_route) \
  F(luna_custom_op) \
  F(luna_custom_run) F(luna_custom_dropout) F(luna_params_ctx) F(luna_scope_begin_as) F(luna_trace) F(luna_seconds) \
  F(luna_params_open) F(luna_params_share) F(luna_param) \
  F(luna_params_find) \
  F(luna_params_tensor_count) F(luna_params_at) F(luna_params_element_count) F(luna_params_zero_grad) \
  F(luna_params_set_text) F(luna_params_get_text) F(luna_path) F(luna_bytes) F(luna_buffer) F(luna_callbacks) \
  F(luna_file_tensor_read) F(luna_inspect) F(luna_save) F(luna_save_int8) \
  F(luna_load) F(luna_load_matching) F(luna_linear_layer_init) F(luna_linear_layer_forward) F(luna_norm_layer_init) \
  F(luna_norm_layer_forward) F(luna_nested_attention_layer_init) F(luna_nested_attention_layer_forward) \
  F(luna_causal_attention_layer_init) F(luna_causal_attention_layer_forward) F(luna_attention_layer_init) \
  F(luna_attention_layer_forward) F(luna_encoder_layer_init) F(luna_encoder_layer_forward) F(luna_decoder_layer_init) \
  F(luna_decoder_layer_forward) F(luna_causal_layer_init) F(luna_causal_layer_forward) F(luna_lm_init) \
  F(luna_lm_forward) F(luna_encoder_init) F(luna_encoder_embed) F(luna_encoder_forward) F(luna_classifier_init) \
  F(luna_classifier_forward) F(luna_classifier_forward_pair) F(luna_classifier_pool) F(luna_masked_lm_init) \
  F(luna_masked_lm_forward) F(luna_masked_lm_loss) F(luna_seq2seq_init) F(luna_seq2seq_forward) \
  F(luna_seq2seq_loss) \
  F(luna_load_model) F(luna_load_model_of) F(luna_schedule_at) F(luna_sgd) F(luna_adam) F(luna_adamw) \
  F(luna_optimizer_open) \
  F(luna_optimizer_add_group) \
  F(luna_optimizer_step) F(luna_optimizer_advance) F(luna_optimizer_apply) F(luna_optimizer_set_lr) \
  F(luna_optimizer_steps) F(luna_optimizer_skipped) F(luna_optimizer_grad_norm) \
  F(luna_save_training) F(luna_load_training) F(luna_stream_size) \
  F(luna_stream_open_bytes) F(luna_stream_open) F(luna_stream_close) F(luna_stream_step) F(luna_stream_prefill) \
  F(luna_stream_error) F(luna_stream_position) F(luna_stream_reset) F(luna_stream_reorder) \
  F(luna_stream_state_size) F(luna_stream_state_save) F(luna_stream_state_load) F(luna_sample) \
  F(luna_seq2seq_stream_open) F(luna_seq2seq_generate) F(luna_cpu_backend) F(luna_op_name) F(luna_backend_of) \
  F(luna_backend_self) F(luna_backend_state) F(luna_fail) \
  F(luna_error_id_of) F(luna_stream_error_id) \
  F(luna_scope_end) F(luna_keep) F(luna_linear_cross_entropy) F(luna_lm_loss) F(luna_mse) \
  F(luna_input_layer_init) F(luna_input_layer_fit) F(luna_lm_fit_outputs) \
  F(luna_input_layer_forward) \
  F(luna_stream_step_features) F(luna_lm_state_open) F(luna_lm_state_continue) F(luna_lm_state_restart) \
  F(luna_lm_state_size) F(luna_lm_state_save) F(luna_lm_state_load)
/* of examples/luna_ops.h */
#define COMPANIONS(F) \
  F(luna_pad) F(luna_stack) F(luna_split) F(luna_soft_cross_entropy) F(luna_huber) F(luna_quantile_loss) \
  F(luna_binary_cross_entropy) F(luna_weighted_cross_entropy) F(luna_params_clip_grad) F(luna_sin) F(luna_cos) \
  F(luna_pow) F(luna_cumsum) F(luna_scatter_add_rows) F(luna_top_k) F(luna_min) F(luna_var) F(luna_sample_top_p) \
  F(luna_transpose) F(luna_greater) F(luna_greater_equal)
typedef struct row { const char *name; void (*run)(void); int times; } row;
#define ROW(name) {#name, case_##name, 0},
#define ONE_MORE(name) +1
#define NAME_OF(name) #name,
#define BINARY_ROW(NAME, tier, reads, cheap, name, inputs, value, da, db, dc) ROW(luna_##name)
#define MAP_ROW(NAME, name, value, slope) ROW(luna_##name)
#define UNARY_ROW(name) ROW(luna_##name)
static row functions[] = {FUNCTIONS(ROW) COMPANIONS(ROW) COMMON_UNARY(UNARY_ROW) LUNA_BINARIES(BINARY_ROW)
  LUNA_MAPS(MAP_ROW)};
enum { COUNT = sizeof functions / sizeof functions[0] };

static bool heavy(const char *name) {
  return strstr(name, "_init") || strstr(name, "translate") || strstr(name, "load") || strstr(name, "save");
}

static bool run_case(row *f, int at, int number_of) {
  case_number = number_of;
  case_seed = common_hash((uint64_t)at + 1, (uint64_t)number_of);
  case_drawn = 0;
  hostile = broken = 0;
  hostile_left = number_of % 4 == 0 ? 0 : 1 + number_of % 2;
  w->training = number_of / 4 % 2 == 0;
  WATCH(300);
  begin();
  f->run();
  f->times++;
  const bool works = still_works();
  if (number_of % 16 == 15) expect(world_sum() == w->sum, "the models' parameters have changed");
  return works;
}
static void run_function(int at, int first, int last) {
  row *f = &functions[at];
  const int cases = heavy(f->name) ? HEAVY : CASES;
  world one;
  function = f->name;
  for (int kind = 0; kind < 3; kind++) { /* the unfolded form, the folded form, a context that measures */
    world_open(&one, kind == 2, (luna_form)((kind + 1) % 3));
    for (int i = kind * cases; i < (kind + 1) * cases; i++)
      if (i >= first && i <= last && (first == last || test_due(i + at)) && !run_case(f, at, i)) {
        world_close();
        world_open(&one, kind == 2, (luna_form)((kind + 1) % 3));
      }
    world_close();
  }
}

/* ==== null for each pointer, all else valid: no crash, and the context still works ==== */
static void check_null(const null_row *null) {
  enum { DRAWS = 12 };
  int at = 0;
  while (at < COUNT && strcmp(functions[at].name, null->name) != 0) at++;
  if (!CHECK(at < COUNT, "%s has no case in tests/robust/arguments.c", null->name)) return;
  function = null->name;
  null_times = 0;
  for (int draw = 0; draw < DRAWS; draw++) {
    world one;
    world_open(&one, draw % 3 == 2, LUNA_FORM_CHEAPEST);
    case_number = draw;
    case_seed = common_hash((uint64_t)at + 1, (uint64_t)draw + 1000000);
    case_drawn = 0;
    hostile_left = 0;
    hostile = 1;
    w->training = draw % 2 == 0;
    begin();
    null_now = *null;
    WATCH(300);
    functions[at].run();
    null_now = null_none;
    still_works();
    expect(world_sum() == w->sum, "the models' parameters have changed");
    world_close();
  }
  CHECK(null_times > 0, "no call of %s had null for %s", null->name, null->of);
}

/* ==== orders of closing: an owner of a model, a context that shares its parameters, streams of both, one that reads
   loaded bytes, the bytes ==== */
enum { OWNER, SHARER, LOADER, BYTES, OWNER_STREAM, SHARER_STREAM, OBJECTS };
typedef struct closing {
  heap heap[3];
  luna_ctx *ctx[3];
  luna_lm model[3];
  luna_stream *stream[2];
  void *bytes;
  bool open[OBJECTS];
  float logit;
} closing;
static bool closing_open(closing *c) {
  luna_params *owned, *set;
  luna_tensor *y;
  luna_io io = {0};
  memset(c, 0, sizeof *c);
  for (int i = 0; i < 3; i++) c->ctx[i] = heap_open(&c->heap[i], false, LUNA_FORM_CHEAPEST, 1 + i % 2);
  owned = luna_params_open(c->ctx[OWNER]);
  if (luna_lm_init(&c->model[OWNER], owned, &w->lm.config) != LUNA_OK) return false;
  set = luna_params_share(c->ctx[SHARER], owned);
  if (luna_lm_init(&c->model[SHARER], set, &w->lm.config) != LUNA_OK) return false;
  io.write = file_write;
  io.user = &file_size;
  file_size = 0;
  if (luna_save(owned, luna_callbacks(&io)) != LUNA_OK) return false;
  c->bytes = common_alloc(file_size);
  memcpy(c->bytes, file.at, file_size);
  set = luna_params_open(c->ctx[LOADER]);
  if (luna_lm_init(&c->model[LOADER], set, &w->lm.config) != LUNA_OK ||
      luna_load(set, luna_bytes(c->bytes, file_size)) != LUNA_OK) return false;
  for (int i = 0; i < 2; i++) c->stream[i] = luna_stream_open(&c->model[i], NULL);
  for (int i = 0; i < OBJECTS; i++) c->open[i] = true;
  luna_begin_step(c->ctx[OWNER]);     /* and it is closed in the middle of a step */
  y = luna_lm_forward(&c->model[OWNER], &(luna_input){ tokens, NULL, 1, 4, NULL });
  if (!y) return false;
  c->logit = y->data[0];
  luna_backward(luna_cross_entropy(y, tokens, NULL));
  luna_sgd(owned, NULL);
  return c->stream[0] && c->stream[1];
}
static void closing_close(closing *c, int what) {
  c->open[what] = false;
  if (what <= LOADER) luna_close(c->ctx[what]);
  else if (what == BYTES) free(c->bytes);
  else luna_stream_close(c->stream[what - OWNER_STREAM]);
}
/* all that still has what it reads computes what it did */
static void closing_works(closing *c) {
  const bool reads[3] = {c->open[OWNER], c->open[SHARER] && c->open[OWNER], c->open[LOADER]};
  for (int i = 0; i < 3; i++) {
    if (!reads[i]) continue;
    luna_begin_inference(c->ctx[i]);
    luna_tensor *y = luna_lm_forward(&c->model[i], &(luna_input){ tokens, NULL, 1, 4, NULL });
    expect(y && y->data[0] == c->logit, "another closing has changed a model's logits");
  }
  for (int i = 0; i < 2; i++)
    if (c->open[OWNER_STREAM + i] && c->open[OWNER])
      expect(luna_stream_step(c->stream[i], tokens) != NULL, "another closing has stopped a stream");
}
static void check_closing(void) {
  int order[OBJECTS], count = 0;
  function = "closing";
  hostile_left = hostile = 0;
  for (int i = 0; i < 16; i++) tokens[i] = i % VOCAB;
  for (int number_of = 0; number_of < 720; number_of++) { /* every order of the six */
    closing c;
    bool used[OBJECTS] = {false};
    for (int i = 0, rest = number_of, left = 720; i < OBJECTS; i++) {
      int skip = rest / (left /= OBJECTS - i), at = 0;
      rest %= left;
      while (used[at] || skip-- > 0) at++;
      used[order[i] = at] = true;
    }
    case_number = number_of;
    if (!closing_open(&c)) {
      expect(false, "the models of the closings");
      return;
    }
    for (int i = 0; i < OBJECTS; i++) {
      closing_close(&c, order[i]);
      closing_works(&c);
    }
    for (int i = 0; i < 3; i++) expect(c.heap[i].used == 0, "closing did not give everything back");
    count++;
  }
  CHECK(count == 720, "%d orders", count);
}

/* ==== what once crashed or never ended, each by itself ==== */
static void fails(const luna_tensor *y) { expect(y == NULL && sentence(), "it must fail with a sentence"); }
static luna_tensor *shaped(int rank, int64_t a, int64_t b, int64_t c) {
  return luna_require_grad(luna_tensor_new(w->ctx, NULL, rank, (int64_t[]){a, b, c}));
}
/* training goes back over y, or it failed with a sentence */
static void trains(luna_tensor *y) {
  if (!y) expect(sentence(), "it failed without a sentence");
  else expect(luna_backward(luna_sum(luna_reshape(y, 2, (int64_t[]){1, luna_count(y)}), 1)) == LUNA_OK,
              luna_error(w->ctx));
}
static void known_softmax(void) {
  const int32_t lengths[4] = {1, 2, 3, 4};
  fails(luna_softmax(shaped(1, 4, 1, 1), lengths));
}
static void known_slots(void) {       /* a memory of no slots */
  luna_tensor *packed_context;
  trains(luna_nested_attention_layer_forward(&w->nested, shaped(3, 2, 3, DIM), shaped(3, 2, 0, DIM), NULL, NULL,
                                             &packed_context));
}
static void known_slots_unpack(void) {
  const int64_t heads[4] = {1, HUGE_SIZE, 0, 4};
  luna_begin_inference(w->ctx);
  fails(luna_unpack(shaped(3, 1, 2, 4), luna_tensor_new(w->ctx, NULL, 4, heads), shaped(3, 1, HUGE_SIZE, 0),
                    luna_tensor_new(w->ctx, NULL, 4, heads), NULL));
}
static void known_batch(void) {       /* training on a batch of no sequences, with one head */
  luna_lm model;
  luna_lm_config c = w->lm.config;
  c.layer.heads = c.layer.pack_heads = 1;
  expect(luna_lm_init(&model, new_set(), &c) == LUNA_OK, luna_error(w->ctx));
  trains(luna_lm_forward(&model, &(luna_input){ tokens, NULL, 0, 3, NULL }));
}
static void known_rows(void) {        /* rows of nothing */
  const int64_t big = (int64_t)1 << 32;
  const int swap[3] = {1, 0, 2};
  trains(luna_permute(shaped(3, big, 5, 0), swap));
}
static void known_shape(void) {       /* no axis may be longer than a tensor can */
  fails(luna_tensor_new(w->ctx, NULL, 2, (int64_t[]){0, INT64_MAX}));
}
static void known_scratch(void) {
  expect(luna_gemm_scratch(NULL) == 0 && luna_softmax_attention_scratch(NULL) == 0 &&
         luna_causal_product_scratch(NULL) == 0, "scratch for nothing");
}
static void known_generate(void) {    /* 2 n + 10 */
  const luna_generate_config search = {.begin = 0, .end = 1};
  const luna_input source = {tokens, NULL, 1, INT64_MIN + 5, NULL};
  int32_t out[16], length[1];
  expect(luna_seq2seq_generate(&w->seq2seq, &source, &search, out, length) == LUNA_BAD_ARGUMENT && sentence(),
         "an invalid source");
}
static void known_many(void) {        /* too many, the first missing */
  luna_tensor *nine[9] = {NULL};
  for (int i = 1; i < 9; i++) nine[i] = tensor_in(w->ctx, 1, (int64_t[]){2});
  expect(!luna_concat(nine, 9, 0) && sentence(), "nine tensors");
}
static void known_ffn(void) {         /* 4 dim */
  luna_causal_layer layer;
  luna_layer_config c = small_layer();
  c.dim = INT64_MAX / 2;
  c.ffn = 0;
  expect(luna_causal_layer_init(&layer, new_set(), "x", &c) != LUNA_OK && sentence(), "an invalid dim");
}
static void known_hidden(void) {
  trains(luna_feed_forward(shaped(2, 3, 4, 1), shaped(2, 0, 4, 1), shaped(1, 0, 1, 1), shaped(2, 5, 0, 1),
                           shaped(1, 5, 1, 1), NULL));
}
static void known_linear(void) {      /* of no inputs the bias remains */
  const float values[2] = {3, 4};
  float out[4] = {0};
  luna_tensor *y = luna_linear(shaped(2, 2, 0, 1), shaped(2, 2, 0, 1),
                               luna_tensor_new(w->ctx, values, 1, (int64_t[]){2}));
  expect(luna_read(y, out) == LUNA_OK && out[0] == 3 && out[1] == 4 && out[2] == 3 && out[3] == 4, "the bias alone");
}
#define KNOWN(K) \
  K(softmax) K(slots) K(slots_unpack) K(batch) K(rows) K(shape) K(scratch) K(ffn) K(hidden) K(linear) K(generate) \
  K(many)
#define KNOWN_ROW(name) {"known_" #name, known_##name},
static void check_known(const char *only) {
  static const struct { const char *name; void (*run)(void); } known[] = {KNOWN(KNOWN_ROW)};
  for (int form = 1; form < 3; form++)
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
      world one;
      if (only && strcmp(only, known[i].name) != 0) continue;
      world_open(&one, false, (luna_form)form);
      function = known[i].name;
      case_number = form;
      hostile_left = 0;
      hostile = w->training = true;
      WATCH(300);
      begin();
      known[i].run();
      still_works();
      world_close();
    }
}

/* ==== layers and models that are null, or zeroed because their init failed ==== */
static void nothing(const luna_tensor *y) { expect(y == NULL, "a layer or model that is none has a result"); }
/* both a null and a zeroed one */
#define NONE(type, call) \
  do { \
    type zero, *none = NULL; \
    memset(&zero, 0, sizeof zero); \
    nothing(call); \
    none = &zero; \
    nothing(call); \
  } while (0)
/* an init that fails on each of these leaves a struct of zeros, which then computes nothing */
#define FAILS(type, init, forward) \
  do { \
    type zero, broken_one, *none = &broken_one; \
    memset(&zero, 0, sizeof zero); \
    memset(none, 0xA5, sizeof *none); \
    expect((init) != LUNA_OK, "it succeeded"); \
    expect(memcmp(none, &zero, sizeof zero) == 0, "a failed init leaves something behind"); \
    nothing(forward); \
  } while (0)
static luna_tensor *here(void) { return tensor_in(w->ctx, 3, (int64_t[]){1, 2, DIM}); }
static luna_tensor *now(luna_tensor **p) { return *p = here(); }
static void null_forwards(void) {
  luna_tensor *p;
  now(&p);
  NONE(luna_linear_layer, luna_linear_layer_forward(none, here()));
  NONE(luna_norm_layer, luna_norm_layer_forward(none, here()));
  NONE(luna_nested_attention_layer, luna_nested_attention_layer_forward(none, here(), here(), NULL, NULL, NULL));
  NONE(luna_causal_attention_layer, luna_causal_attention_layer_forward(none, here(), here(), NULL));
  NONE(luna_attention_layer, luna_attention_layer_forward(none, here(), NULL, NULL));
  NONE(luna_encoder_layer, luna_encoder_layer_forward(none, here(), &p, NULL));
  NONE(luna_decoder_layer, luna_decoder_layer_forward(none, here(), &p, here(), NULL));
  NONE(luna_causal_layer, luna_causal_layer_forward(none, here()));
  NONE(luna_lm, luna_lm_forward(none, &(luna_input){ tokens, NULL, 1, 2, NULL }));
  NONE(luna_lm, luna_lm_loss(none, &(luna_input){ tokens, NULL, 1, 2, NULL }, tokens));
  NONE(luna_encoder, luna_encoder_embed(none, &(luna_input){ tokens, NULL, 1, 2, NULL }, NULL));
  NONE(luna_encoder, luna_encoder_forward(none, &(luna_input){ tokens, NULL, 1, 2, NULL }, NULL));
  NONE(luna_classifier, luna_classifier_forward(none, &(luna_input){ tokens, NULL, 1, 2, NULL }));
  NONE(luna_classifier, luna_classifier_forward_pair(none, &(luna_input){ tokens, NULL, 1, 2, NULL },
                                                     &(luna_input){ tokens, NULL, 1, 2, NULL }));
  NONE(luna_classifier, luna_classifier_pool(none, here(), here(), NULL));
  NONE(luna_masked_lm, luna_masked_lm_forward(none, &(luna_input){ tokens, NULL, 1, 2, NULL }));
  NONE(luna_masked_lm, luna_masked_lm_loss(none, &(luna_input){ tokens, NULL, 1, 2, NULL }, tokens));
  NONE(luna_seq2seq, luna_seq2seq_forward(none, &(luna_input){ tokens, NULL, 1, 2, NULL },
                                          &(luna_input){ tokens, NULL, 1, 2, NULL }));
  NONE(luna_seq2seq, luna_seq2seq_loss(none, &(luna_input){ tokens, NULL, 1, 2, NULL },
                                       &(luna_input){ tokens, NULL, 1, 2, NULL }, tokens, NULL));
}
static void null_inits(void) {
  const luna_init odd = {LUNA_INIT_XAVIER, NAN};
  luna_layer_config nested_c = {0};
  luna_layer_config causal_c = {0};
  luna_layer_config attention_c = {0};
  luna_layer_config layer_c = small_layer();
  luna_lm_config lm_c = {0};
  luna_encoder_config encoder_c = small_encoder();
  luna_classifier_config classifier_c = {0};
  luna_masked_lm_config masked_c = {0};
  luna_seq2seq_config seq2seq_c = {0};
  luna_tensor *p;
  now(&p);
  attention_c.attention = LUNA_ATTENTION_SOFTMAX;
  nested_c.dim = causal_c.dim = attention_c.dim = DIM;
  nested_c.heads = causal_c.heads = attention_c.heads = layer_c.heads = 3; /* 8 is no multiple */
  encoder_c.layer.heads = 3;
  lm_c.layer = layer_c;
  classifier_c.encoder = masked_c.encoder = seq2seq_c.encoder = encoder_c;
  FAILS(luna_linear_layer, luna_linear_layer_init(none, new_set(), "a", 3, 4, odd),
        luna_linear_layer_forward(none, here()));
  FAILS(luna_norm_layer, luna_norm_layer_init(none, new_set(), "a", -1, LUNA_NORM_LAYER), NULL);
  FAILS(luna_nested_attention_layer, luna_nested_attention_layer_init(none, new_set(), "a", &nested_c),
        luna_nested_attention_layer_forward(none, here(), here(), NULL, NULL, NULL));
  FAILS(luna_causal_attention_layer, luna_causal_attention_layer_init(none, new_set(), "a", &causal_c),
        luna_causal_attention_layer_forward(none, here(), here(), NULL));
  FAILS(luna_attention_layer, luna_attention_layer_init(none, new_set(), "a", &attention_c),
        luna_attention_layer_forward(none, here(), NULL, NULL));
  FAILS(luna_encoder_layer, luna_encoder_layer_init(none, new_set(), "a", &layer_c),
        luna_encoder_layer_forward(none, here(), &p, NULL));
  FAILS(luna_decoder_layer, luna_decoder_layer_init(none, new_set(), "a", &layer_c),
        luna_decoder_layer_forward(none, here(), &p, here(), NULL));
  FAILS(luna_causal_layer, luna_causal_layer_init(none, new_set(), "a", &layer_c),
        luna_causal_layer_forward(none, here()));
  FAILS(luna_lm, luna_lm_init(none, new_set(), &lm_c), luna_lm_forward(none,
      &(luna_input){ tokens, NULL, 1, 2, NULL }));
  FAILS(luna_encoder, luna_encoder_init(none, new_set(), "a", VOCAB, &encoder_c),
        luna_encoder_forward(none, &(luna_input){ tokens, NULL, 1, 2, NULL }, NULL));
  FAILS(luna_classifier, luna_classifier_init(none, new_set(), &classifier_c),
        luna_classifier_forward(none, &(luna_input){ tokens, NULL, 1, 2, NULL }));
  FAILS(luna_masked_lm, luna_masked_lm_init(none, new_set(), &masked_c),
        luna_masked_lm_forward(none, &(luna_input){ tokens, NULL, 1, 2, NULL }));
  FAILS(luna_seq2seq, luna_seq2seq_init(none, new_set(), &seq2seq_c),
      luna_seq2seq_forward(none, &(luna_input){ tokens, NULL, 1, 2, NULL }, &(luna_input){ tokens, NULL, 1, 2, NULL }));
  FAILS(luna_lm, luna_lm_init(none, NULL, &lm_c), luna_lm_forward(none, &(luna_input){ tokens, NULL, 1, 2, NULL }));
}
static void check_nulls(void) {
  function = "nulls";
  case_number = 0;
  for (int i = 0; i < 16; i++) tokens[i] = i % VOCAB;
  for (int training = 0; training < 2; training++) {
    world one;
    hostile_left = hostile = 0;
    world_open(&one, false, LUNA_FORM_CHEAPEST);
    hostile = 1;
    w->training = training != 0;
    begin();
    null_forwards();
    expect(still_works(), "a forward of nothing is remembered");
    begin();
    null_inits();
    expect(!still_works(), "a failed init is forgotten");
    world_close();
  }
}

static void died(int number_of) {
  char text[200];
  snprintf(text, sizeof text, "signal %d in %s%s%s; repeat with: arguments %s %d\n", number_of, function,
           *null_now.of ? ", null " : "", null_now.of, function, case_number);
  fputs(text, stdout);
  fflush(stdout);
  signal(number_of, SIG_DFL);
  raise(number_of);
}

/* ---- every public function of luna.h is in the table ---- */
static FILE *header_open(void) {
  char name[1000];
  const char *slash = strrchr(__FILE__, '/');
  FILE *in = NULL;
  if (slash && (size_t)(slash - __FILE__) < sizeof name - 16) {
    snprintf(name, sizeof name, "%.*s/../../luna.h", (int)(slash - __FILE__), __FILE__);
    in = fopen(name, "r");
  }
  return in ? in : fopen("luna.h", "r");
}
static bool tested(const char *name, size_t length) {
  for (int i = 0; i < COUNT; i++)
    if (strlen(functions[i].name) == length && memcmp(functions[i].name, name, length) == 0) return true;
  return false;
}
static void check_table(void) {
  static const char *const companion_names[] = {COMPANIONS(NAME_OF)};
  static char line[4096];
  const int companions = 0 COMPANIONS(ONE_MORE);
  const size_t nulls = sizeof null_rows / sizeof null_rows[0];
  int declared = companions;
  FILE *in = header_open();
  if (!in) {
    puts("luna.h is not beside the tests: that each of its functions is tested is not checked");
    return;
  }
  while (fgets(line, sizeof line, in) && !strstr(line, "_BACKEND_H */")) {
    char *end = strncmp(line, "LUNA_API ", 9) == 0 ? strchr(line, '(') : NULL, *name = end;
    while (name && name > line && (name[-1] == '_' || (name[-1] >= '0' && name[-1] <= '9') ||
        (name[-1] >= 'a' && name[-1] <= 'z') || (name[-1] >= 'A' && name[-1] <= 'Z'))) name--;
    if (!end) continue;
    declared++;
    CHECK(tested(name, (size_t)(end - name)), "%.*s has no case in tests/robust/arguments.c", (int)(end - name), name);
  }
  fclose(in);
  for (int i = 0; i < companions; i++) {
    size_t row = 0;
    while (row < nulls && strcmp(null_rows[row].name, companion_names[i]) != 0) row++;
    CHECK(row < nulls, "tests/robust/nulls.awk found no definition of %s", companion_names[i]);
  }
  CHECK(declared == COUNT, "luna.h and its companion declare %d functions, the table has %d", declared, (int)COUNT);
}

int main(int argc, char **argv) {
  static const int signals[] = {SIGSEGV, SIGFPE, SIGABRT, SIGILL};
  for (size_t i = 0; i < sizeof signals / sizeof signals[0]; i++) signal(signals[i], died);
#ifdef SIGALRM
  signal(SIGALRM, died);
#endif
  common_fill(numbers, NUMBERS, 1, 1);
  common_fill(room, ROOM, 2, 1);
  snprintf(folder, sizeof folder, "%s/arguments_test", common_build());
#if defined(__unix__) || defined(__APPLE__)
  mkdir(common_build(), 0777);
  mkdir(folder, 0777);
#endif
  snprintf(path, sizeof path, "%s/model.safetensors", folder);
  check_table();
  {
    world one;
    function = "main";
    world_open(&one, false, LUNA_FORM_CHEAPEST);
    expect(luna_save(w->set[1], luna_path(path)) == LUNA_OK, luna_error(w->ctx));
    if (argc == 1) check_closing();
    world_close();
    if (argc == 1) check_nulls();
  }
  for (size_t i = 0; i < sizeof null_rows / sizeof null_rows[0]; i++)
    if (argc == 1 || strcmp(argv[1], null_rows[i].name) == 0) check_null(&null_rows[i]);
  check_known(argc > 1 ? argv[1] : NULL);
  for (int i = 0; i < COUNT; i++) {
    if (argc > 1 && strcmp(argv[1], functions[i].name) != 0) continue;
    run_function(i, argc > 2 ? atoi(argv[2]) : 0, argc > 2 ? atoi(argv[2]) : INT32_MAX);
    CHECK(argc > 2 || functions[i].times >= (test_full() ? 100 : 25), "%s was called %d times", functions[i].name,
          functions[i].times);
  }
  return test_report("arguments");
}
