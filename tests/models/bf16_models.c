/* Training with products of bfloat16: every kind of model, the same bits for any number of threads and when resumed,
   finite; each op beside the reference, which rounds the same operands; what the option changes and what not; what a
   checkpoint and its loading say of it. */
#include "test.h"
#define LUNA_BACKEND
#include "luna.h"
#include "common.h"
#include "rounded.h"
#ifdef __linux__
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
#endif
#ifdef TILES_EMULATED                /* tests/kernels/tiles_emulated.c: slow */
enum { EMULATED = 1 };
#else
enum { EMULATED = 0 };
#endif

enum { VOCAB = 50, N = 70, BATCH = 4, STEPS = 3, KINDS = 5, MAX_FILE = 1 << 20, SENTENCE = 300 };

#ifndef LUNA_NO_BF16
static luna_status logged_status;
static char logged[SENTENCE];
static void remember(void *user, luna_status status, const char *sentence) {
  (void)user;
  logged_status = status;
  snprintf(logged, sizeof logged, "%s", sentence);
}

/* ---- causal and softmax language models with either loss, encoders with the memory or the mean pooled ---- */
typedef struct model {
  int kind;
  luna_ctx *ctx;
  luna_params *params;
  luna_optimizer *adam;
  union { luna_lm lm; luna_classifier classifier; } as;
} model;
static const char *const kind_names[KINDS] = {"causal", "causal, scores not folded", "softmax", "folded", "gated"};
static model model_open(int kind, luna_options options) {
  model m;
  luna_layer_config layer = {0};
  luna_status status;
  memset(&m, 0, sizeof m);
  m.kind = kind;
  layer.dim = 48, layer.heads = 4, layer.ffn = kind ? 96 : 100, layer.dropout = 0.1f;
  layer.activation = kind % 2 ? LUNA_ACTIVATION_GELU : LUNA_ACTIVATION_RELU;
  layer.pre_norm = kind == 2, layer.gated = kind == 4;
  if (kind == 2) layer.attention = LUNA_ATTENTION_SOFTMAX;
  if (kind == 1) layer.recompute = LUNA_RECOMPUTE_FFN;
  options.seed = 3;
  m.ctx = luna_open(&options);
  m.params = luna_params_open(m.ctx);
  if (kind < 3) {
    luna_lm_config config = {0};
    config.vocab = VOCAB, config.layers = 2, config.layer = layer, config.layer.memory = kind == 1 ? 24 : 5;
    status = luna_lm_init(&m.as.lm, m.params, &config);
  } else {
    luna_classifier_config config = {0};
    config.vocab = VOCAB, config.classes = 3, config.pooling = kind == 3 ? LUNA_POOLING_MEAN : LUNA_POOLING_MEMORY;
    config.encoder.layers = 2, config.encoder.layer = layer, config.encoder.layer.memory = kind == 3 ? 2 : 20;
    status = luna_classifier_init(&m.as.classifier, m.params, &config);
  }
  CHECK(status == LUNA_OK, "%s: %s", kind_names[kind], luna_error(m.ctx));
  luna_optimizer_config adam = {0};
  adam.lr = 1e-3f;
  m.adam = luna_adam(m.params, &adam);
  return m;
}
static float model_step(model *m) {
  static int32_t tokens[BATCH * N], next[BATCH * N], labels[BATCH] = {0, 2};
  luna_input input = {0};
  for (int i = 0; i < BATCH * N; i++) {
    tokens[i] = (int32_t)(common_hash(3, (uint64_t)i) % VOCAB);
    next[i] = (int32_t)(common_hash(3, (uint64_t)i + 1) % VOCAB);
  }
  input.tokens = tokens, input.batch = BATCH, input.n = N;
  luna_begin_step(m->ctx);
  luna_tensor *loss = m->kind == 2 ? luna_cross_entropy(luna_lm_forward(&m->as.lm, &input), next, NULL) :
      m->kind < 3 ? luna_lm_loss(&m->as.lm, &input, next) :
      luna_cross_entropy(luna_classifier_forward(&m->as.classifier, &input), labels, NULL);
  const float value = luna_item(loss);
  luna_backward(loss);
  CHECK(luna_optimizer_step(m->adam) == LUNA_OK, "%s: %s", kind_names[m->kind], luna_error(m->ctx));
  return value;
}
/* all parameters, to be freed */
static uint8_t *model_file(const model *m, size_t *size) {
  uint8_t *bytes = (uint8_t *)common_alloc(MAX_FILE);
  CHECK(luna_save_training(m->adam, luna_buffer(bytes, MAX_FILE, size)) == LUNA_OK, "%s", luna_error(m->ctx));
  return bytes;
}
static luna_options options_of(luna_dtype products, int threads) {
  luna_options o = {0};
  o.products = products, o.threads = threads, o.log = remember;
  return o;
}

static void check_training(int kind) {
  float loss[4];
  uint8_t *file[4];
  size_t size[4];
  for (int run = 0; run < 4; run++) { /* float32, then bf16 with 1, 2, 3 threads */
    model m = model_open(kind, options_of(run ? LUNA_DTYPE_BF16 : LUNA_DTYPE_F32, run ? run : 1));
    for (int s = 0; s < STEPS; s++) loss[run] = model_step(&m);
    CHECK(isfinite(loss[run]) && luna_optimizer_skipped(m.adam) == 0, "%s: the loss is %g", kind_names[kind],
          (double)loss[run]);
    file[run] = model_file(&m, &size[run]);
    luna_close(m.ctx);
    if (run > 1)
      CHECK(size[run] == size[1] && memcmp(file[run], file[1], size[1]) == 0, "%s: other bits with %d threads",
            kind_names[kind], run);
  }
  CHECK(loss[0] != loss[1], "%s: the loss is %.7g in bf16, too", kind_names[kind], (double)loss[0]);
  printf("%s: the loss after %d steps is %.7g, in bf16 %.7g\n", kind_names[kind], STEPS, (double)loss[0],
         (double)loss[1]);
  for (int run = 0; run < 4; run++) free(file[run]);
}

/* ---- a run goes on to the bit; with other products it goes on, and the log says so ---- */
typedef struct found { char products[16]; } found;
static void found_pair(void *user, const char *key, const char *value) {
  if (strcmp(key, "luna.products") == 0) snprintf(((found *)user)->products, 16, "%s", value);
}
static void check_resume(int kind) {
  for (int bf16 = 0; bf16 < 2; bf16++) {
    const luna_options options = options_of(bf16 ? LUNA_DTYPE_BF16 : LUNA_DTYPE_F32, 1);
    model whole = model_open(kind, options);
    size_t size, sizes[2];
    for (int s = 0; s < STEPS; s++) (void)model_step(&whole);
    uint8_t *middle = model_file(&whole, &size), *end[2];
    found f = {""};
    luna_inspection inspection = {0};
    inspection.pair = found_pair, inspection.user = &f;
    CHECK(luna_inspect(whole.ctx, luna_bytes(middle, size), &inspection) == LUNA_OK, "%s", luna_error(whole.ctx));
    CHECK(strcmp(f.products, bf16 ? "bf16" : "") == 0, "the checkpoint has luna.products \"%s\"", f.products);
    (void)model_step(&whole);
    end[0] = model_file(&whole, &sizes[0]);
    for (int other = 0; other < 2; other++) {
      model m = model_open(kind, options_of(bf16 != other ? LUNA_DTYPE_BF16 : LUNA_DTYPE_F32, 1));
      logged[0] = 0;
      CHECK(luna_load_training(m.adam, luna_bytes(middle, size)) == LUNA_OK, "%s", luna_error(m.ctx));
      if (other)
        CHECK(logged_status == LUNA_OK && strstr(logged, bf16 ? "products in bf16, and goes on in float32" :
                                                 "products in float32, and goes on in bf16"),
              "the log has \"%s\"", logged);
      else CHECK(!logged[0], "the log has \"%s\"", logged);
      (void)model_step(&m);
      end[1] = model_file(&m, &sizes[1]);
      const bool same = sizes[0] == sizes[1] && memcmp(end[0], end[1], sizes[0]) == 0;
      CHECK(same == !other, "%s: resumed in %s: %s bits", kind_names[kind], other ? "the other" : "the same",
            same ? "the same" : "other");
      free(end[1]);
      luna_close(m.ctx);
    }
    free(middle), free(end[0]);
    luna_close(whole.ctx);
  }
}

/* ---- each op's result and gradients beside the reference's ---- */
enum { OPS = 11, ROWS = 30, WIDTH = 40, TALL = 300, DEEP = 600 };
static void op_run(void *user, const rounded_how *how, rounded *out) {
  static const int64_t shapes[OPS][6][4] = {
    {{ROWS, WIDTH}, {60, WIDTH}, {60}}, {{ROWS, WIDTH}, {60, WIDTH}, {60}, {33, 60}, {33}},
    {{ROWS, WIDTH}, {60, WIDTH}, {60}}, {{1, ROWS, WIDTH}, {1, 2, 5, WIDTH}, {1, 2, 5}, {1, 2, 5, WIDTH}},
    /* a hidden layer that is kept in words where products are by tiles: of a block of rows, of several, of deep sums */
    {{ROWS, WIDTH}, {96, WIDTH}, {96}, {33, 96}, {33}}, {{TALL, DEEP}, {64, DEEP}, {64}, {DEEP, 64}, {DEEP}},
    {{2, ROWS, WIDTH}, {2, 50, WIDTH}, {2, 50, WIDTH}}, {{2, ROWS, WIDTH}, {2, 50, WIDTH}, {2, 50, WIDTH}},
    {{ROWS, WIDTH}, {96, WIDTH}, {96}, {33, 96}, {33}}, {{ROWS, WIDTH}, {96, WIDTH}, {96}, {33, 96}, {33}},
    {{TALL, DEEP}, {64, DEEP}, {64}, {DEEP, 64}, {DEEP}}
  };
  luna_feed_forward_config curved = {.activation = LUNA_ACTIVATION_GELU};
  luna_attention_config attention = {.heads = 2};
  const int op = *(const int *)user;
  luna_options options = options_of(how->rounds ? LUNA_DTYPE_BF16 : LUNA_DTYPE_F32, 2);
  const luna_init normal = {LUNA_INIT_NORMAL, 0.3f};
  options.isa = how->isa;
  luna_ctx *ctx = luna_open(&options);
  luna_params *params = luna_params_open(ctx);
  luna_tensor *in[6] = {NULL}, *y = NULL;
  int32_t labels[ROWS];
  for (int i = 0; i < ROWS; i++) labels[i] = i * 7 % 60;
  for (int i = 0; i < 6 && shapes[op][i][0]; i++) {
    const char name[2] = {(char)('a' + i), 0};
    int rank = 1;
    while (rank < 4 && shapes[op][i][rank]) rank++;
    in[i] = luna_param(params, name, rank, shapes[op][i], normal);
    rounded_nudge(how->nudge, in[i]->data, luna_count(in[i]));
  }
  luna_begin_step(ctx);
  if (op == 0) y = luna_linear(in[0], in[1], in[2]);
  if (op == 1 || op == 4 || op == 5) y = luna_feed_forward(in[0], in[1], in[2], in[3], in[4], NULL);
  if (op == 2) y = luna_linear_cross_entropy(in[0], in[1], in[2], labels, NULL);
  if (op == 3) y = luna_unpack(in[0], in[1], in[2], in[3], NULL);
  curved.recompute = op == 9;
  if (op == 10) curved.activation = LUNA_ACTIVATION_SILU;
  if (op >= 8) y = luna_feed_forward(in[0], in[1], in[2], in[3], in[4], &curved);
  if (op == 7) attention.scale = 0.3f;
  if (op == 6 || op == 7) y = luna_softmax_attention(in[0], in[1], in[2], &attention);
  if (!CHECK(y != NULL, "%s", luna_error(ctx))) exit(1);
  float *values = common_floats(luna_count(y));
  luna_read(y, values);
  rounded_put(out, "the result", false, values, luna_count(y));
  free(values);
  /* by a fixed gradient, so that what differs is the op's own */
  luna_tensor *by = luna_tensor_random(ctx, normal, 9, y->rank, y->shape);
  CHECK(luna_backward(luna_sum_all(luna_mul(y, by))) == LUNA_OK, "%s", luna_error(ctx));
  for (int i = 0; i < 6 && in[i]; i++) {
    const char name[] = {'g', 'r', 'a', 'd', '.', (char)('a' + i), 0};
    values = common_floats(luna_count(in[i]));
    luna_read_grad(in[i], values);
    rounded_put(out, name, true, values, luna_count(in[i]));
    free(values);
  }
  luna_close(ctx);
}
static void check_ops(void) {
  static const char *const names[OPS] = {"linear", "feed-forward", "linear cross-entropy", "unpack",
                                         "feed-forward, kept in words", "feed-forward, deep", "softmax attention",
                                         "softmax attention, scaled", "feed-forward with GELU",
                                         "feed-forward with GELU, computed again", "feed-forward with SiLU, deep"};
    static const luna_isa isas[] = {LUNA_ISA_AMX, LUNA_ISA_AVX512_BF16, LUNA_ISA_AVX512, LUNA_ISA_AVX2, LUNA_ISA_BEST};
  for (size_t i = 0; i < (EMULATED ? 1 : sizeof isas / sizeof *isas); i++)
    for (int op = 0; op < OPS && luna_isa_available(isas[i]); op++) {
      char what[100];
      snprintf(what, sizeof what, "%s, %s", names[op], luna_isa_name(isas[i]));
      rounded_isa = isas[i];
      rounded_check(what, op_run, &op, ROUNDED_BF16);
      rounded_figures(what);
    }
}

/* ---- what the option says, and what stays float32: luna_matmul, and streams ---- */
static void *no_memory(void *user, size_t bytes) { return (void)user, (void)bytes, (void *)NULL; }
static void check_option(void) {
  static const int64_t shape[2] = {8, 32};
  static int32_t token = 7;
  const char *error = "";
  luna_options o = options_of(LUNA_DTYPE_I8, 1);
  o.error = &error;
  CHECK(luna_open(&o) == NULL && strstr(error, "options.products"), "products I8: \"%s\"", error);
  o.products = LUNA_DTYPE_F32, o.weights = LUNA_DTYPE_BF16;
  CHECK(luna_open(&o) == NULL && strstr(error, "options.weights"), "weights BF16: \"%s\"", error);
  luna_backend device = *luna_cpu_backend();
  device.allocate = no_memory;
  o.products = LUNA_DTYPE_BF16, o.weights = LUNA_DTYPE_F32, o.backend = &device;
  CHECK(luna_open(&o) == NULL && strstr(error, "must be 0 on a device"), "on a device: \"%s\"", error);
  float product[2][64], logits[2][VOCAB];
  for (int bf16 = 0; bf16 < 2; bf16++) {
    model m = model_open(0, options_of(bf16 ? LUNA_DTYPE_BF16 : LUNA_DTYPE_F32, 1));
    float values[256];
    common_fill(values, 256, 2, 1);
    luna_begin_inference(m.ctx);
    luna_tensor *x = luna_tensor_new(m.ctx, values, 2, shape);
    CHECK(luna_read(luna_matmul(x, x, false, true), product[bf16]) == LUNA_OK, "%s", luna_error(m.ctx));
    luna_stream *s = luna_stream_open(&m.as.lm, NULL);
    const float *y = luna_stream_step(s, &token);
    if (y) memcpy(logits[bf16], y, sizeof logits[0]);
    luna_stream_close(s);
    luna_close(m.ctx);
  }
  CHECK(memcmp(product[0], product[1], sizeof product[0]) == 0, "luna_matmul is rounded");
  CHECK(memcmp(logits[0], logits[1], sizeof logits[0]) == 0, "a stream is rounded");
}

/* ---- which products run: tiles where the system permits them, which it does not to a thread with a small signal
   stack; the context then opens without them ---- */
static int refused_isa(void) {       /* of a context in a process that has not asked before; -1: none */
  static char stack[4096];
  const luna_options o = options_of(LUNA_DTYPE_BF16, 1);
#ifdef __linux__
  const stack_t small = {.ss_sp = stack, .ss_size = sizeof stack};
  if (sigaltstack(&small, NULL) != 0) return -1;
#endif
  (void)stack;
  luna_ctx *ctx = luna_open(&o);
  const int isa = ctx ? (int)luna_isa_of(ctx) : -1;
  luna_close(ctx);
  return isa;
}
/* vdpbf16ps is the best on AMD's processors; on Intel's it has half the flops of float32's FMA, and is not chosen */
static void check_maker(void) {
#if defined(__x86_64__) && defined(__GNUC__)
  const luna_isa best = luna_isa_best();
  const bool there = luna_isa_available(LUNA_ISA_AVX512_BF16);
  CHECK(!__builtin_cpu_is("intel") || best != LUNA_ISA_AVX512_BF16, "on Intel's processor the best is %s",
        luna_isa_name(best));
  CHECK(!__builtin_cpu_is("amd") || !there || best == LUNA_ISA_AVX512_BF16, "on AMD's processor the best is %s",
        luna_isa_name(best));
#endif
}
static void check_isa(void) {
  const luna_options plain = options_of(LUNA_DTYPE_F32, 1), rounds = options_of(LUNA_DTYPE_BF16, 1);
#ifdef __linux__
  int status = -1;
  const pid_t child = fork();
  if (child == 0) _exit(refused_isa());
  CHECK(child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status), "the child ends by itself");
  const int refused = WEXITSTATUS(status);
  CHECK(refused != LUNA_ISA_AMX && refused != 255, "with a signal stack of 4 KB a context runs %s",
        luna_isa_name((luna_isa)refused));
#endif
  luna_ctx *ctx[2] = {luna_open(&plain), luna_open(&rounds)};
  const luna_isa want = luna_isa_available(LUNA_ISA_AMX) ? LUNA_ISA_AMX : luna_isa_best();
  CHECK(luna_isa_of(ctx[0]) == luna_isa_best(), "float32 runs %s", luna_isa_name(luna_isa_of(ctx[0])));
  CHECK(luna_isa_of(ctx[1]) == want, "bf16 runs %s, not %s", luna_isa_name(luna_isa_of(ctx[1])), luna_isa_name(want));
  luna_close(ctx[0]), luna_close(ctx[1]);
}

int main(void) {
  if (!EMULATED) check_isa();        /* first: permission lasts as long as the process */
  check_maker();
  for (int kind = EMULATED ? KINDS - 1 : 0; kind < KINDS; kind++) check_training(kind);
  if (!EMULATED) check_resume(0), check_resume(3);
  check_ops();
  check_option();
  return test_report("bf16_models");
}
#else
int main(void) {
  const char *error = "";
  luna_options o = {0};
  o.products = LUNA_DTYPE_BF16, o.error = &error;
  CHECK(luna_open(&o) == NULL && strstr(error, "LUNA_NO_BF16"), "products in bf16: \"%s\"", error);
  return test_report("bf16_models");
}
#endif
