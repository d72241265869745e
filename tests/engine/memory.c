/* Memory: a measured size works as a block and 64 bytes less do not; no allocation in a steady step; inference and long
   sequences need what they should. Memory that ends is out_of_memory.c's. */
#include "test.h"
#define LUNA_IMPLEMENTATION
#include "luna.h"
#include "common.h"
#include "jobs.h"
#include <time.h>

/* saving too must be possible in what was measured */
static bool swallow(void *user, const void *bytes, size_t size) {
  *(uint64_t *)user = job_hash(*(uint64_t *)user, bytes, size);
  return true;
}
static luna_status saves(job_run *r, uint64_t *bits) {
  luna_io io = {0};
  io.write = swallow;
  io.user = bits;
  const luna_status status = r->optimizer ? luna_save_training(r->optimizer, luna_callbacks(&io)) : LUNA_OK;
  return status == LUNA_OK ? luna_save(r->params, luna_callbacks(&io)) : status;
}

static luna_memory_usage measured(const job *j, int threads) {
  luna_options options = {0};
  luna_memory_usage use = {0, 0};
  outcome ignored;
  options.measure = true;
  options.threads = threads;
  luna_ctx *ctx = luna_open(&options);
  if (CHECK(ctx && job_do(ctx, j, saves, &ignored) == LUNA_OK, "measuring fails: %s", luna_error(ctx)))
    use = luna_memory(ctx);
  luna_close(ctx);
  return use;
}

/* ---- one block ---- */
static void *forbidden_allocate(void *user, size_t bytes) {
  (void)bytes;
  ++*(int *)user;
  return NULL;
}
static void forbidden_release(void *user, void *pointer, size_t bytes) {
  (void)pointer, (void)bytes;
  ++*(int *)user;
}

static void check_block(const job *j, int threads) {
  const char *what = j->name;
  const size_t need = measured(j, threads).peak;
  luna_options options = {0};
  outcome expected;
  int calls = 0;
  options.threads = threads;
  luna_ctx *ctx = luna_open(&options);
  CHECK(job_do(ctx, j, saves, &expected) == LUNA_OK && isfinite(expected.loss), "%s: %s", what, luna_error(ctx));
  /* an inference's first step, which takes chunks, may differ: check_first_step */
  const size_t own = luna_memory(ctx).peak;
  CHECK(j->inference ? own >= need - need / 8 && own <= need + need / 8 : own == need,
        "%s: measured %zu bytes, but with memory of its own the peak is %zu", what, need, own);
  luna_close(ctx);
  options.allocator.allocate = forbidden_allocate;
  options.allocator.release = forbidden_release;
  options.allocator.user = &calls;
  for (size_t place = 0; place < 64; place += place ? 31 : 1) { /* a block at 64 bytes, at an odd place, and between */
    char *memory = (char *)common_alloc(need + 256), *start = memory + (64 - (uintptr_t)memory % 64) + place;
    for (int less = 0; less < 2; less++) {
      outcome got;
      memset(memory, 0xA5, need + 256);
      options.block = start;
      options.block_size = need - (less ? 64 : 0);
      ctx = luna_open(&options);
      const luna_status status = ctx ? job_do(ctx, j, saves, &got) : LUNA_OUT_OF_MEMORY;
      if (!less) {
        CHECK(status == LUNA_OK, "%s: %zu bytes were measured and are not enough: %s", what, need, luna_error(ctx));
        CHECK(memcmp(&got, &expected, sizeof got) == 0, "%s: in a block the result is %.9g, not %.9g", what, got.loss,
              expected.loss);
      } else {
        CHECK(status == LUNA_OUT_OF_MEMORY, "%s: 64 bytes less than measured gives \"%s\"", what,
              luna_status_text(status));
        CHECK(!ctx || (luna_error_status(ctx) == LUNA_OUT_OF_MEMORY && luna_error(ctx)[0]),
              "%s: 64 bytes less says \"%s\"", what,
              luna_error(ctx));
      }
      luna_close(ctx);
      int64_t outside = 0;
      for (size_t i = 0; i < need + 256; i++)
        if ((memory + i < start || memory + i >= start + options.block_size) && (uint8_t)memory[i] != 0xA5) outside++;
      CHECK(outside == 0, "%s: %lld bytes outside the block were written", what, (long long)outside);
    }
    free(memory);
  }
  CHECK(calls == 0, "%s: the allocator was called %d times beside a block", what, calls);
  options.block_size = 100;
  CHECK(!luna_open(&options), "100 bytes are a block");
}

static void check_steady(void) {
  guard g = {0, 0, 0, 0, 0, 0, 0};
  luna_options options = guarded(&g);
  luna_lm model;
  luna_lm_config config = {0};
  luna_ctx *ctx = luna_open(&options);
  luna_params *params = luna_params_open(ctx);
  int32_t *tokens = common_tokens(600, 9, VOCAB);
  int64_t after = 0;
  luna_memory_usage early = {0, 0};
  config.vocab = VOCAB;
  config.layer.dim = DIM;
  CHECK(luna_lm_init(&model, params, &config) == LUNA_OK, "luna_lm_init: %s", luna_error(ctx));
  luna_optimizer *optimizer = luna_adamw(params, NULL);
  for (int step = 0; step < 12; step++) {
    luna_begin_step(ctx);
    luna_backward(luna_cross_entropy(luna_lm_forward(&model, &(luna_input){ tokens, NULL, 2, 290, NULL }), tokens + 1,
                                     NULL));
    CHECK(luna_optimizer_step(optimizer) == LUNA_OK, "step: %s", luna_error(ctx));
    luna_begin_inference(ctx);
    CHECK(luna_lm_forward(&model, &(luna_input){ tokens, NULL, 1, 150, NULL }) != NULL, "inference: %s",
          luna_error(ctx));
    if (step == 3) after = g.calls, early = luna_memory(ctx);
  }
  const luna_memory_usage late = luna_memory(ctx);
  const size_t parameters = (size_t)luna_params_element_count(params) * sizeof(float);
  CHECK(g.calls == after, "eight steady steps allocate %lld times", (long long)(g.calls - after));
  CHECK(early.current == late.current && early.peak == late.peak,
        "memory goes from %zu to %zu bytes in steady steps, its peak from %zu to %zu", early.current, late.current,
            early.peak, late.peak);
  CHECK(late.peak > late.current && late.current > 4 * parameters,
        "memory: %zu bytes, peak %zu, with %zu of parameters and their gradients and moments", late.current, late.peak,
            parameters);
  CHECK((int64_t)late.current <= g.live, "memory counts %zu bytes, the allocator gave %lld", late.current,
        (long long)g.live);
  luna_begin_inference(ctx);
  CHECK(luna_memory(ctx).current < late.current, "begin frees nothing");
  free(tokens);
  luna_close(ctx);
  check_released(&g, "steady", -1);
}

/* ---- the first steps of a context that takes chunks ---- */
enum { PAGE = 4096 };
typedef struct touch_block { struct touch_block *next; size_t bytes; } touch_block;
static void *touch_allocate(void *user, size_t bytes) {
  touch_block *block = (touch_block *)common_alloc(sizeof *block + bytes);
  memset(block + 1, 0xA5, bytes);
  block->bytes = bytes;
  block->next = *(touch_block **)user;
  *(touch_block **)user = block;
  return block + 1;
}
static void touch_release(void *user, void *pointer, size_t bytes) {
  touch_block **link = (touch_block **)user;
  (void)bytes;
  while (*link && (void *)(*link + 1) != pointer) link = &(*link)->next;
  if (!CHECK(*link != NULL, "memory is released that was not allocated")) return;
  touch_block *block = *link;
  *link = block->next;
  free(block);
}
/* bytes of the pages that were written */
static size_t touched(const touch_block *block) {
  static char untouched[PAGE];
  size_t sum = 0;
  memset(untouched, 0xA5, PAGE);
  for (; block; block = block->next)
    for (size_t at = 0; at < block->bytes; at += PAGE) {
      const size_t size = block->bytes - at < PAGE ? block->bytes - at : PAGE;
      if (memcmp((const char *)(block + 1) + at, untouched, size) != 0) sum += size;
    }
  return sum;
}

/* What the first step writes to is little more than luna_memory says, though it does not know its size beforehand;
   soon a step takes what was measured, to the byte */
static void check_first_step(bool training) {
  enum { N = 4096, STEPS = 4 };
  const char *what = training ? "training" : "inference";
  const int32_t label = 1;
  int32_t *tokens = common_tokens(N, 5, 256);
  size_t steady[2];
  for (int measure = 0; measure < 2; measure++) {
    touch_block *blocks = NULL;
    luna_options options = {.measure = measure == 1, .threads = 2};
    luna_classifier_config config = {.encoder = {.layers = 4, .layer = { .dim = 64 }}};
    luna_classifier model;
    options.allocator = (luna_allocator){touch_allocate, touch_release, &blocks};
    luna_ctx *ctx = luna_open(&options);
    luna_params *params = luna_params_open(ctx);
    luna_classifier_init(&model, params, &config);
    luna_optimizer *adam = training ? luna_adamw(params, NULL) : NULL;
    for (int step = 0; step < STEPS; step++) {
      if (training) luna_begin_step(ctx);
      else luna_begin_inference(ctx);
      luna_tensor *logits = luna_classifier_forward(&model, &(luna_input){ tokens, NULL, 1, N, NULL });
      if (training) luna_backward(luna_cross_entropy(logits, &label, NULL));
      if (training) luna_optimizer_step(adam);
      CHECK(luna_error_status(ctx) == LUNA_OK, "%s: %s", what, luna_error(ctx));
      const size_t peak = luna_memory(ctx).peak, is = touched(blocks);
      CHECK(is <= peak + peak / 8 + 65536, "%s, step %d: %zu bytes are written to, luna_memory says %zu", what, step,
            is, peak);
      if (step == 0 && !measure)
        printf("memory: %s's first step writes to %.1f MB, counted are %.1f MB\n", what, (double)is * 1e-6,
               (double)peak * 1e-6);
    }
    steady[measure] = luna_memory(ctx).current;
    luna_close(ctx);
    CHECK(!blocks, "%s: memory is not released", what);
  }
  CHECK(steady[0] == steady[1], "%s: a steady step takes %zu bytes, measured were %zu", what, steady[0], steady[1]);
  free(tokens);
}

/* Sequences of a ragged batch differ in what they need: a measuring context must know their offsets. */
static void *filled_allocate(void *user, size_t bytes) {
  void *memory = malloc(bytes);
  (void)user;
  return memory ? memset(memory, 0xA5, bytes) : NULL;
}
static void filled_release(void *user, void *pointer, size_t bytes) {
  (void)user, (void)bytes;
  free(pointer);
}
static void check_ragged(void) {
  static const int32_t offsets[] = {0, 700, 710, 900};
  const int64_t shape[2] = {offsets[3], 2 * DIM};
  float *targets = common_random(shape[0] * shape[1], 8, 1);
  size_t peak[2];
  for (int measure = 0; measure < 2; measure++) {
    luna_options options = {.measure = measure == 1, .threads = 2};
    options.allocator.allocate = filled_allocate, options.allocator.release = filled_release;
    luna_ctx *ctx = luna_open(&options);
    luna_tensor *x = luna_param(luna_params_open(ctx), "x", 2, shape, (luna_init){LUNA_INIT_NORMAL, 1});
    const luna_attention_config config = {.heads = 2, .query_offsets = offsets, .key_offsets = offsets, .sequences = 3};
    luna_begin_step(ctx);
    luna_tensor *y = luna_softmax_attention(x, x, x, &config);
    CHECK(luna_backward(luna_mse(y, targets)) == LUNA_OK, "ragged attention, measure %d: %s", measure, luna_error(ctx));
    peak[measure] = luna_memory(ctx).peak;
    luna_close(ctx);
  }
  free(targets);
  CHECK(peak[0] == peak[1], "ragged attention takes %zu bytes, measured were %zu", peak[0], peak[1]);
}

/* ---- how much ---- */
/* A batch with padding fits in what was measured with sequences that are all as long as they can be. */
static void check_padding(void) {
  enum { BATCH = 3, N = 20 };
  static int32_t tokens[BATCH * N], labels[BATCH] = {0, 1, 1}, lengths[BATCH] = {N, N, N};
  luna_classifier_config config = {0};
  size_t need = 0;
  config.classes = 2, config.pooling = LUNA_POOLING_MEAN;
  config.vocab = 9, config.encoder.layers = 2, config.encoder.layer.dim = 16, config.encoder.layer.heads = 2;
  config.encoder.layer.memory = 4, config.encoder.layer.ffn = 8;
  for (int run = 0; run < 3; run++) {  /* measured; then two real ones */
    luna_options options = {.measure = run == 0, .threads = 1};
    luna_classifier model;
    luna_status status = LUNA_OK;
    void *block = run ? common_alloc(need) : NULL;
    options.block = block, options.block_size = need;
    luna_ctx *ctx = luna_open(&options);
    luna_params *params = luna_params_open(ctx);
    CHECK(luna_classifier_init(&model, params, &config) == LUNA_OK, "%s", luna_error(ctx));
    luna_optimizer *sgd = luna_sgd(params, NULL);
    lengths[1] = run == 2 ? 5 : N;
    for (int step = 0; step < 2 && status == LUNA_OK; step++) {
      luna_begin_step(ctx);
      const luna_input input = {tokens, lengths, BATCH, N, NULL};
      luna_backward(luna_cross_entropy(luna_classifier_forward(&model, &input), labels, NULL));
      status = luna_optimizer_step(sgd);
    }
    CHECK(status == LUNA_OK, "run %d of a classifier: %s", run, luna_error(ctx));
    if (run == 0) need = luna_memory(ctx).peak;
    luna_close(ctx);
    free(block);
  }
}

static size_t peak_of(bool encoder, bool inference, int64_t layers, int64_t n) {
  const job j = {"sizes", encoder ? JOB_ENCODER : JOB_LM, n, layers, 1, inference, false, LUNA_RECOMPUTE_NONE, 0};
  return measured(&j, 1).peak;
}
static void check_sizes(void) {
  const int64_t n = 4096;
  for (int encoder = 0; encoder < 2; encoder++) {
    const size_t train = peak_of(encoder, false, 8, n), infer = peak_of(encoder, true, 8, n),
        shallow = peak_of(encoder, true, 2, n);
    const size_t weights = peak_of(encoder, true, 8, 1) - peak_of(encoder, true, 2, 1);
    CHECK(infer < train / 4, "8 layers: inference takes %zu bytes, training %zu", infer, train);
    const size_t outputs =
        /* of layers called one by one: the caller may still want them */
        encoder ? 6 * (size_t)n * DIM * sizeof(float) : 0;
    CHECK(infer - weights < shallow + shallow / 8 + outputs,
          "inference takes %zu bytes for 8 layers without their weights, %zu for 2: temporaries stay", infer - weights,
              shallow);
    for (int inference = 0; inference < 2; inference++) {
      const double a = (double)peak_of(encoder, inference, 2, n), b = (double)peak_of(encoder, inference, 2, 2 * n),
                   c = (double)peak_of(encoder, inference, 2, 4 * n);
      const double growth = (c - b) / (b - a);
      /* blocks of small things part pieces, here and there: some percent */
      CHECK(growth > 1.8 && growth < 2.2, "%s, %s: memory for n, 2n, 4n is %.0f, %.0f, %.0f bytes: not linear",
            encoder ? "encoder" : "language model", inference ? "inference" : "training", a, b, c);
    }
  }
}

/* A language model of 30,000 words on 2048 tokens: besides parameters, gradients and moments a step takes the
   logits and their gradient at most, and by luna_lm_loss a fifth of the logits */
static void check_logits_bytes(void) {
  enum { WORDS = 30000, TOKENS = 2048 };
  const double logits = (double)WORDS * TOKENS * sizeof(float);
  int32_t *tokens = common_tokens(TOKENS + 1, 4, WORDS);
  for (int loss = 0; loss < 2; loss++) {
    luna_options options = {.measure = true, .threads = 1};
    luna_lm_config config = {.vocab = WORDS, .layers = 1, .layer = {.dim = DIM, .heads = 2, .ffn = 24}};
    luna_lm model;
    luna_ctx *ctx = luna_open(&options);
    luna_params *params = luna_params_open(ctx);
    const luna_input input = {tokens, NULL, 1, TOKENS, NULL};
    luna_lm_init(&model, params, &config);
    luna_optimizer *adam = luna_adamw(params, NULL);
    for (int step = 0; step < 2; step++) {
      luna_begin_step(ctx);
      luna_backward(loss ? luna_lm_loss(&model, &input, tokens + 1) :
                    luna_cross_entropy(luna_lm_forward(&model, &input), tokens + 1, NULL));
      CHECK(luna_optimizer_step(adam) == LUNA_OK, "measuring a language model: %s", luna_error(ctx));
    }
    const double rest = (double)luna_memory(ctx).peak - 4 * sizeof(float) * (double)luna_params_element_count(params);
    CHECK(rest < (loss ? 0.2 : 2.2) * logits,
        "a step with %d words takes %.1f MB beside its parameters; the logits are %.1f MB", WORDS, rest * 1e-6,
            logits * 1e-6);
    luna_close(ctx);
  }
  free(tokens);
}

/* What the manual says that training takes: a 4-layer byte classifier of 256 dimensions on 4096 tokens, one and four
   sequences */
static size_t classifier_bytes(int64_t batch, luna_recompute_kind recompute, luna_pooling pooling) {
  const int64_t n = 4096;
  luna_options options = {0};
  luna_classifier model;
  luna_classifier_config config = {0};
  int32_t *tokens = (int32_t *)common_alloc((size_t)(batch * n) * sizeof *tokens), labels[4] = {0, 1, 0, 1};
  options.threads = 2;
  options.measure = true;
  config.pooling = pooling;
  config.encoder.layers = 4;
  config.encoder.layer.dim = 256;
  config.encoder.layer.ffn = 1024;
  config.encoder.layer.recompute = recompute;
  luna_ctx *ctx = luna_open(&options);
  luna_params *params = luna_params_open(ctx);
  luna_classifier_init(&model, params, &config);
  luna_optimizer *adam = luna_adamw(params, NULL);
  for (int step = 0; step < 2; step++) {
    luna_begin_step(ctx);
    luna_backward(luna_cross_entropy(luna_classifier_forward(&model, &(luna_input){ tokens, NULL, batch, n, NULL }),
                                     labels, NULL));
    CHECK(luna_optimizer_step(adam) == LUNA_OK, "measuring a classifier: %s", luna_error(ctx));
  }
  const size_t bytes = luna_memory(ctx).peak;
  luna_close(ctx);
  free(tokens);
  return bytes;
}
static void check_training_bytes(void) {
  /* mean, memory pooled */
  static const struct { int64_t batch; luna_recompute_kind recompute; double max[2]; } row[4] = {
    {1, LUNA_RECOMPUTE_NONE, {172e6, 148e6}},
    {1, LUNA_RECOMPUTE_FFN, {108e6, 100e6}},
    {4, LUNA_RECOMPUTE_NONE, {500e6, 410e6}},
    {4, LUNA_RECOMPUTE_FFN, {235e6, 215e6}}};
  for (int i = 0; i < 8; i++) {
    const double bytes = (double)classifier_bytes(row[i / 2].batch, row[i / 2].recompute,
                                                  i % 2 ? LUNA_POOLING_MEMORY : LUNA_POOLING_MEAN);
    CHECK(bytes > 0 && bytes <= row[i / 2].max[i % 2], "training %d x 4096 tokens, recompute %d, takes %.1f MB",
          (int)row[i / 2].batch, row[i / 2].recompute, bytes * 1e-6);
    printf("memory: training %d x 4096 tokens%s, %s pooled: %.1f MB\n", (int)row[i / 2].batch,
           row[i / 2].recompute ? ", feed-forward recomputed" : "", i % 2 ? "memory" : "mean", bytes * 1e-6);
  }
}

/* Many free pieces, none of which is next to another, take no time to speak of: a step of many small tensors, half of
   which are released, makes as many again, and a begin releases all, in a time like that of making them. */
static double processor_seconds(void) { return (double)clock() / CLOCKS_PER_SEC; }
static void check_many_pieces(bool training) {
  const int tensors = TEST_QUICK ? 2000 : 20000;
  const int64_t shape[2] = {8, 8};
  const luna_options options = {.threads = 1};
  luna_ctx *ctx = luna_open(&options);
  luna_tensor *w = luna_param(luna_params_open(ctx), "w", 2, shape, (luna_init){LUNA_INIT_NORMAL, 1}), *x = w;
  for (int step = 0; step < 2; step++) { /* in the first one memory is new to the process */
    if (training) luna_begin_step(ctx);
    else luna_begin_inference(ctx);
    const double start = processor_seconds();
    const luna_scope scope = luna_scope_begin(ctx);
    for (int i = 0; i < tensors; i++) {
      x = luna_scale(w, 2);
      if (i % 2) luna_keep(x);
    }
    const double made = processor_seconds();
    luna_scope_end(scope, &x, 1);
    for (int i = 0; i < tensors; i++) x = luna_scale(w, 3);
    if (training) CHECK(luna_backward(luna_mean_all(x)) == LUNA_OK, "%s", luna_error(ctx));
    CHECK(luna_begin_inference(ctx) == LUNA_OK, "%s", luna_error(ctx));
    const double rest = processor_seconds() - made;
    CHECK(step == 0 || rest <= 20 * (made - start) + 0.1,
          "training %d: %d tensors take %.4f s, and %.4f s what is done with their memory", training, tensors,
          made - start, rest);
  }
  luna_close(ctx);
}

/* What a layer takes beside its arithmetic is the same in a deep model: a measured step, which computes nothing, of 512
   layers takes no more a layer than four times what one of 16 does. By layers squared it would be twenty times. */
static double measured_step(int64_t layers, int steps) {
  const int32_t tokens[4] = {1, 2, 3, 4}, label = 1;
  luna_options options = {0};
  luna_classifier model;
  luna_classifier_config config = {0};
  double least = 1e9;
  options.measure = true;
  config.pooling = LUNA_POOLING_MEAN;
  config.encoder.layers = layers;
  config.encoder.tied_layers = true;
  config.encoder.layer.dim = 4;
  luna_ctx *ctx = luna_open(&options);
  luna_classifier_init(&model, luna_params_open(ctx), &config);
  for (int turn = 0; turn < 3; turn++) {
    const double start = processor_seconds();
    for (int step = 0; step < steps; step++) {
      luna_begin_step(ctx);
      luna_backward(luna_cross_entropy(luna_classifier_forward(&model, &(luna_input){ tokens, NULL, 1, 4, NULL }),
                                       &label, NULL));
    }
    if (processor_seconds() - start < least) least = processor_seconds() - start;
  }
  CHECK(luna_error_status(ctx) == LUNA_OK, "measuring %d layers: %s", (int)layers, luna_error(ctx));
  luna_close(ctx);
  return least;
}
static void check_depth(void) {
  const double few = measured_step(16, 32), many = measured_step(512, 1);
  CHECK(many < 4 * few + 0.02, "512 layers take %.4f s at once, and %.4f s 16 at a time", many, few);
}

/* a backend that is opened is closed, also in a context of one block */
static int opened;
static luna_status count_open(luna_ctx *ctx, int number, void **self) {
  (void)ctx, (void)number;
  *self = &opened;
  return opened++, LUNA_OK;
}
static void count_close(void *self) { CHECK(self == &opened && opened-- == 1, "a backend is closed twice"); }
static void check_close(void) {
  static char block[1 << 20];
  luna_backend backend = *luna_cpu_backend();
  backend.open = count_open, backend.close = count_close;
  for (int i = 0; i < 4; i++) {      /* i & 2: a block that is too small */
    luna_options options = { .backend = &backend, .threads = 1, .block = i ? block : NULL,
                             .block_size = i & 2 ? (size_t)i * 100 : i ? sizeof block : 0 };
    luna_close(luna_open(&options));
    CHECK(opened == 0, "a backend stays open in context %d", i);
  }
}

int main(void) {
  static const job block[] = {
    {"a model saved as it is made", JOB_LM, 40, 1, 0, false, false, LUNA_RECOMPUTE_NONE, 0},
    {"a model for inference, saved as it is made", JOB_MASKED_LM, 40, 1, 0, true, false, LUNA_RECOMPUTE_NONE, 0},
    {"training", JOB_LM, 60, 2, 2, false, false, LUNA_RECOMPUTE_NONE, 0},
    {"training with softmax attention and SGD", JOB_LM, 70, 1, 2, false, true, LUNA_RECOMPUTE_NONE, 0},
    {"training with many words", JOB_LM_LARGE, 60, 1, 2, false, false, LUNA_RECOMPUTE_NONE, 0},
    {"training with many words without logits", JOB_LM_LARGE_LOSS, 60, 1, 2, false, true, LUNA_RECOMPUTE_LAYER, 0.1f},
    {"inference", JOB_LM, 150, 3, 2, true, false, LUNA_RECOMPUTE_NONE, 0},
    {"a loss without logits in inference", JOB_LM_LARGE_LOSS, 150, 3, 2, true, false, LUNA_RECOMPUTE_NONE, 0},
    {"an encoder", JOB_ENCODER, 90, 2, 2, false, false, LUNA_RECOMPUTE_NONE, 0},
    {"an encoder's inference", JOB_ENCODER, 600, 4, 2, true, false, LUNA_RECOMPUTE_NONE, 0},
    {"a classifier, layers computed again", JOB_CLASSIFIER, 40, 2, 2, false, false, LUNA_RECOMPUTE_LAYER, 0.1f},
    {"a Linformer, feed-forwards computed again", JOB_CLASSIFIER, 50, 2, 2, false, true, LUNA_RECOMPUTE_FFN, 0.1f},
    {"a masked language model", JOB_MASKED_LM, 40, 1, 2, false, false, LUNA_RECOMPUTE_FFN, 0.1f},
    {"an encoder-decoder", JOB_SEQ2SEQ, 40, 2, 2, false, false, LUNA_RECOMPUTE_LAYER, 0.1f},
    {"an encoder-decoder's inference", JOB_SEQ2SEQ, 70, 2, 2, true, false, LUNA_RECOMPUTE_NONE, 0},
  };
  for (size_t i = 0; i < sizeof block / sizeof *block; i++) check_block(&block[i], (int)(i % 3) + 1);
  check_close();
  check_steady();
  check_ragged();
  check_padding();
  check_first_step(false);
  check_first_step(true);
  check_many_pieces(false);
  check_many_pieces(true);
  check_depth();
  check_sizes();
  check_training_bytes();
  check_logits_bytes();
  return test_report("memory");
}
