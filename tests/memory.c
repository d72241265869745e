/* Memory: a measured size works as a block and 64 bytes less do not; every allocation made to fail in turn; no allocation in a steady
   step; inference and long sequences need what they should. */
#include "test.h"
#define LUNA_IMPLEMENTATION
#include "luna.h"
#include "common.h"

enum { VOCAB = 23, DIM = 16 };

/* ---- what is done with a context: returns the first failure, or LUNA_OK and a number ---- */
typedef struct job {
  int64_t n, layers;
  bool inference, encoder, sgd;
  int steps;
  luna_model_kind model; /* one of these, or 0: the language model, or encoder layers */
  luna_recomputing recompute;
  float dropout;
} job;

static luna_status job_encoder(luna_ctx *ctx, const job *j, double *result) {
  luna_encoder_layer layer[8];
  luna_layer_config config = {0};
  const int64_t memory[2] = {5, DIM}, flat[2] = {1, j->n * DIM};
  const luna_init init = {LUNA_NORMAL, 1};
  luna_params *params = luna_params_open(ctx);
  config.dim = DIM;
  config.heads = 4;
  config.ffn = 24;
  luna_tensor *slots = luna_param(params, "p", 2, memory, init), *loss = NULL;
  luna_status status = slots ? LUNA_OK : luna_state(ctx);
  for (int64_t i = 0; i < j->layers && status == LUNA_OK; i++) {
    char name[16];
    snprintf(name, sizeof name, "%d.", (int)i);
    status = luna_encoder_layer_init(&layer[i], params, name, &config);
  }
  for (int step = 0; step < j->steps && status == LUNA_OK; step++) {
    if (j->inference) luna_begin_inference(ctx);
    else luna_begin_step(ctx);
    const int64_t shape[3] = {1, j->n, DIM};
    luna_tensor *x = luna_tensor_new(ctx, NULL, 3, shape), *p = luna_repeat(slots, 1);
    for (int64_t i = 0; i < j->layers; i++) x = luna_encoder_layer_forward(&layer[i], x, &p, NULL);
    loss = luna_mean(luna_reshape(x, 2, flat), 1);
    status = luna_state(ctx);
    if (status == LUNA_OK && !j->inference) status = luna_backward(loss);
    if (status == LUNA_OK && !loss) status = LUNA_UNSUPPORTED; /* never: a null without an error */
  }
  if (status == LUNA_OK && result) *result = (double)luna_item(loss);
  return status;
}

/* the loss of a step, and without an optimiser no more */
static luna_status job_learn(luna_ctx *ctx, luna_tensor *loss, luna_optimizer *optimizer) {
  if (luna_state(ctx) != LUNA_OK) return luna_state(ctx);
  if (!loss) return LUNA_UNSUPPORTED; /* never: a null without an error */
  if (!optimizer) return LUNA_OK;
  luna_backward(loss);
  return luna_optimizer_step(optimizer);
}

static luna_status job_lm(luna_ctx *ctx, const job *j, double *result) {
  luna_lm model;
  luna_lm_config config = {0};
  luna_optimizer *optimizer = NULL;
  luna_tensor *loss = NULL;
  int32_t *tokens = common_tokens(2 * (j->n + 1), 8, VOCAB);
  luna_params *params = luna_params_open(ctx);
  luna_status status = params ? LUNA_OK : luna_state(ctx);
  config.vocab = VOCAB;
  config.layers = j->layers;
  config.memory = 4;
  config.layer.dim = DIM;
  config.layer.heads = 2;
  config.layer.ffn = 24;
  config.layer.convolution = 4;
  if (status == LUNA_OK) status = luna_lm_init(&model, params, &config);
  if (status == LUNA_OK && !j->inference) {
    optimizer = j->sgd ? luna_sgd(params, NULL) : luna_adamw(params, NULL);
    if (!optimizer) status = luna_state(ctx) == LUNA_OK ? LUNA_UNSUPPORTED : luna_state(ctx); /* a null without an error must not be */
  }
  for (int step = 0; step < j->steps && status == LUNA_OK; step++) {
    if (j->inference) luna_begin_inference(ctx);
    else luna_begin_step(ctx);
    loss = luna_cross_entropy(luna_lm_forward(&model, tokens, 2, j->n), tokens + 1);
    status = job_learn(ctx, loss, optimizer);
  }
  if (status == LUNA_OK && result) *result = (double)luna_item(loss);
  free(tokens);
  return status;
}

/* the other models, with padding, dropout, every kind of position and optimiser */
static luna_status job_model_init(luna_ctx *ctx, const job *j, luna_model *model, luna_params *params, luna_optimizer **optimizer) {
  luna_classifier_config classifier = {0};
  luna_masked_lm_config masked_lm = {0};
  luna_seq2seq_config seq2seq = {0};
  luna_encoder_config encoder = {0};
  luna_status status;
  encoder.layers = j->layers, encoder.dim = DIM, encoder.heads = 2, encoder.ffn = 24, encoder.memory = 5, encoder.max_length = j->n;
  encoder.norm_embedding = true;
  encoder.positions = j->model == LUNA_MODEL_MASKED_LM ? LUNA_LEARNED : LUNA_SINUSOIDAL;
  encoder.layer.dropout = j->dropout;
  encoder.layer.recompute = j->recompute;
  classifier.vocab = masked_lm.vocab = seq2seq.vocab = VOCAB;
  classifier.encoder = masked_lm.encoder = seq2seq.encoder = encoder;
  classifier.encoder.layer.attention = j->sgd ? LUNA_ATTENTION_LINFORMER : LUNA_ATTENTION_LUNA;
  classifier.encoder.layer.linformer.k = 7;
  status = j->model == LUNA_MODEL_CLASSIFIER  ? luna_classifier_init(&model->classifier, params, &classifier)
           : j->model == LUNA_MODEL_MASKED_LM ? luna_masked_lm_init(&model->masked_lm, params, &masked_lm)
                                              : luna_seq2seq_init(&model->seq2seq, params, &seq2seq);
  if (status != LUNA_OK || j->inference) return status;
  *optimizer = j->model == LUNA_MODEL_CLASSIFIER ? luna_adam(params, NULL) : luna_apollo(params, NULL);
  return *optimizer ? LUNA_OK : luna_state(ctx);
}
static luna_status job_model(luna_ctx *ctx, const job *j, double *result) {
  luna_model model;
  luna_optimizer *optimizer = NULL;
  luna_tensor *loss = NULL;
  int32_t *tokens = common_tokens(3 * j->n, 8, VOCAB), labels[2] = {1, 0};
  const int32_t lengths[2] = {(int32_t)j->n, 3};
  luna_params *params = luna_params_open(ctx);
  luna_status status = params ? LUNA_OK : luna_state(ctx);
  if (status == LUNA_OK) status = job_model_init(ctx, j, &model, params, &optimizer);
  for (int step = 0; step < j->steps && status == LUNA_OK; step++) {
    if (j->inference) luna_begin_inference(ctx);
    else luna_begin_step(ctx);
    if (j->model == LUNA_MODEL_CLASSIFIER) loss = luna_cross_entropy(luna_classify(&model.classifier, tokens, lengths, 2, j->n), labels);
    else if (j->model == LUNA_MODEL_MASKED_LM) loss = luna_masked_lm_loss(&model.masked_lm, tokens, lengths, tokens + 1, 2, j->n);
    else loss = luna_cross_entropy(luna_seq2seq_forward(&model.seq2seq, tokens, lengths, j->n, tokens + 1, NULL, j->n / 2, 2), tokens);
    status = job_learn(ctx, loss, optimizer);
  }
  if (status == LUNA_OK && result) *result = (double)luna_item(loss);
  free(tokens);
  return status;
}
static luna_status job_run(luna_ctx *ctx, const job *j, double *result) {
  if (j->model) return job_model(ctx, j, result);
  return j->encoder ? job_encoder(ctx, j, result) : job_lm(ctx, j, result);
}

static luna_memory_use measured(const job *j, int threads) {
  luna_options options = {0};
  luna_memory_use use = {0, 0};
  options.measure = true;
  options.threads = threads;
  luna_ctx *ctx = luna_open(&options);
  if (CHECK(ctx && job_run(ctx, j, NULL) == LUNA_OK, "measuring fails: %s", luna_error(ctx))) use = luna_memory(ctx);
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

static void check_block(const job *j, int threads, const char *what) {
  const size_t need = measured(j, threads).peak;
  luna_options options = {0};
  double expected = NAN;
  int calls = 0;
  options.threads = threads;
  luna_ctx *ctx = luna_open(&options);
  CHECK(job_run(ctx, j, &expected) == LUNA_OK && isfinite(expected), "%s: %s", what, luna_error(ctx));
  CHECK(luna_memory(ctx).peak == need, "%s: measured %zu bytes, but with memory of its own the peak is %zu", what, need,
        luna_memory(ctx).peak);
  luna_close(ctx);
  options.allocator.allocate = forbidden_allocate;
  options.allocator.release = forbidden_release;
  options.allocator.user = &calls;
  for (size_t place = 0; place < 64; place += place ? 31 : 1) { /* a block at 64 bytes, at an odd place, and between */
    char *memory = (char *)common_alloc(need + 256), *start = memory + (64 - (uintptr_t)memory % 64) + place;
    for (int less = 0; less < 2; less++) {
      double got = NAN;
      memset(memory, 0xA5, need + 256);
      options.block = start;
      options.block_size = need - (less ? 64 : 0);
      ctx = luna_open(&options);
      const luna_status status = ctx ? job_run(ctx, j, &got) : LUNA_OUT_OF_MEMORY;
      if (!less) {
        CHECK(status == LUNA_OK, "%s: %zu bytes were measured and are not enough: %s", what, need, luna_error(ctx));
        CHECK(memcmp(&got, &expected, sizeof got) == 0, "%s: in a block the result is %.9g, not %.9g", what, got, expected);
      } else {
        CHECK(status == LUNA_OUT_OF_MEMORY, "%s: 64 bytes less than measured gives \"%s\"", what, luna_status_text(status));
        CHECK(!ctx || (luna_state(ctx) == LUNA_OUT_OF_MEMORY && luna_error(ctx)[0]), "%s: 64 bytes less says \"%s\"", what,
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

/* ---- an allocator that fails ---- */
typedef struct guard {
  int64_t calls, fail_from, fail_to; /* calls with a number in [fail_from, fail_to) fail */
  int64_t live, blocks, most, wrong;
} guard;
static void *guard_allocate(void *user, size_t bytes) {
  guard *g = (guard *)user;
  const int64_t call = g->calls++;
  if (call >= g->fail_from && call < g->fail_to) return NULL;
  char *p = (char *)malloc(bytes + 24); /* its size in front, and an alignment of only 8 */
  if (!p) exit(2);
  memset(p, 0xA5, bytes + 24);
  memcpy(p, &bytes, sizeof bytes);
  g->live += (int64_t)bytes;
  g->blocks++;
  if (g->live > g->most) g->most = g->live;
  return p + 24;
}
static void guard_release(void *user, void *pointer, size_t bytes) {
  guard *g = (guard *)user;
  size_t size;
  char *p = (char *)pointer - 24;
  memcpy(&size, p, sizeof size);
  if (size != bytes) g->wrong++;
  g->live -= (int64_t)size;
  g->blocks--;
  free(p);
}
static luna_options guarded(guard *g) {
  luna_options options = {0};
  options.threads = 1;
  options.allocator.allocate = guard_allocate;
  options.allocator.release = guard_release;
  options.allocator.user = g;
  return options;
}
static void check_released(const guard *g, const char *what, int64_t at) {
  CHECK(g->live == 0 && g->blocks == 0, "%s, allocation %lld failed: %lld bytes in %lld blocks leak", what, (long long)at,
        (long long)g->live, (long long)g->blocks);
  CHECK(g->wrong == 0, "%s, allocation %lld failed: %lld releases with another size", what, (long long)at, (long long)g->wrong);
}

static void check_failures(const job *j, const char *what) {
  guard g = {0, 0, 0, 0, 0, 0, 0};
  luna_options options = guarded(&g);
  double expected = NAN;
  luna_ctx *ctx = luna_open(&options);
  CHECK(job_run(ctx, j, &expected) == LUNA_OK, "%s: %s", what, luna_error(ctx));
  luna_close(ctx);
  check_released(&g, what, -1);
  const int64_t total = g.calls;
  CHECK(total > 10, "%s: only %lld allocations to fail", what, (long long)total);
  for (int once = 0; once < 2; once++) /* all from the k-th on; the k-th alone */
    for (int64_t k = 0; k < total; k++) {
      double got = NAN;
      memset(&g, 0, sizeof g);
      g.fail_from = k;
      g.fail_to = once ? k + 1 : INT64_MAX;
      ctx = luna_open(&options);
      luna_status status = ctx ? job_run(ctx, j, &got) : LUNA_OUT_OF_MEMORY;
      if (once && status == LUNA_OK)
        CHECK(memcmp(&got, &expected, sizeof got) == 0, "%s: allocation %lld failed without a word, and the result is %.9g, not %.9g", what,
              (long long)k, got, expected);
      else {
        CHECK(status == LUNA_OUT_OF_MEMORY, "%s: allocation %lld failed: \"%s\"", what, (long long)k, luna_status_text(status));
        CHECK(!ctx || luna_error(ctx)[0], "%s: allocation %lld failed without a sentence", what, (long long)k);
      }
      if (once && ctx && status != LUNA_OK) { /* survived: all of it again in the same context */
        luna_begin_inference(ctx);
        status = job_run(ctx, j, &got);
        CHECK(status == LUNA_OK && memcmp(&got, &expected, sizeof got) == 0,
              "%s: after allocation %lld failed the same context gives %.9g, not %.9g: %s", what, (long long)k, got, expected,
              luna_error(ctx));
      }
      luna_close(ctx);
      check_released(&g, what, k);
    }
}

/* a failed step leaves the model as it was: with memory again, training goes on to the same parameters */
static void check_survival(void) {
  enum { N = 40 };
  guard g = {0, 0, 0, 0, 0, 0, 0};
  luna_options options = guarded(&g);
  float expected = NAN;
  int64_t failures = 0;
  for (int64_t skip = -1; skip < 12; skip++) { /* how many allocations of the second step succeed before one fails */
    luna_lm model;
    luna_lm_config config = {0};
    memset(&g, 0, sizeof g);
    luna_ctx *ctx = luna_open(&options);
    luna_params *params = luna_params_open(ctx);
    int32_t *tokens = common_tokens(4 * N, 9, VOCAB);
    config.vocab = VOCAB;
    config.layer.dim = DIM;
    luna_sgd_config sgd = {0};
    sgd.momentum = 0.9f;
    luna_lm_init(&model, params, &config);
    luna_optimizer *optimizer = luna_sgd(params, &sgd);
    luna_tensor *loss = NULL;
    for (int step = 0; step < 3; step++) {
      const int64_t n = step == 1 ? 3 * N : N; /* the second step needs more memory */
      for (int attempt = 0; attempt < 2; attempt++) {
        if (step == 1 && attempt == 0 && skip >= 0) g.fail_from = g.calls + skip, g.fail_to = INT64_MAX;
        luna_begin_step(ctx);
        loss = luna_cross_entropy(luna_lm_forward(&model, tokens, 1, n), tokens + 1);
        luna_backward(loss);
        const luna_status status = luna_optimizer_step(optimizer);
        g.fail_from = g.fail_to = 0;
        if (status == LUNA_OK) break;
        failures++;
        CHECK(status == LUNA_OUT_OF_MEMORY && attempt == 0, "a step without memory says \"%s\"", luna_error(ctx));
        luna_params_zero_grad(params); /* backward may have begun to add */
      }
    }
    const float last = luna_item(loss);
    if (skip < 0) expected = last;
    CHECK(memcmp(&last, &expected, sizeof last) == 0, "after a failed step (%lld allocations in) training goes on to %.9g, not %.9g",
          (long long)skip, (double)last, (double)expected);
    free(tokens);
    luna_close(ctx);
    check_released(&g, "survival", skip);
  }
  CHECK(failures > 0, "no step was made to fail");
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
  luna_memory_use early = {0, 0};
  config.vocab = VOCAB;
  config.layer.dim = DIM;
  CHECK(luna_lm_init(&model, params, &config) == LUNA_OK, "luna_lm_init: %s", luna_error(ctx));
  luna_optimizer *optimizer = luna_adamw(params, NULL);
  for (int step = 0; step < 12; step++) {
    luna_begin_step(ctx);
    luna_backward(luna_cross_entropy(luna_lm_forward(&model, tokens, 2, 290), tokens + 1));
    CHECK(luna_optimizer_step(optimizer) == LUNA_OK, "step: %s", luna_error(ctx));
    luna_begin_inference(ctx);
    CHECK(luna_lm_forward(&model, tokens, 1, 150) != NULL, "inference: %s", luna_error(ctx));
    if (step == 3) after = g.calls, early = luna_memory(ctx);
  }
  const luna_memory_use late = luna_memory(ctx);
  const size_t parameters = (size_t)luna_params_count(params) * sizeof(float);
  CHECK(g.calls == after, "eight steady steps allocate %lld times", (long long)(g.calls - after));
  CHECK(early.current == late.current && early.peak == late.peak,
        "memory goes from %zu to %zu bytes in steady steps, its peak from %zu to %zu", early.current, late.current, early.peak, late.peak);
  CHECK(late.peak > late.current && late.current > 4 * parameters,
        "memory: %zu bytes, peak %zu, with %zu of parameters and their gradients and moments", late.current, late.peak, parameters);
  CHECK((int64_t)late.current <= g.live, "memory counts %zu bytes, the allocator gave %lld", late.current, (long long)g.live);
  luna_begin_inference(ctx);
  CHECK(luna_memory(ctx).current < late.current, "begin frees nothing");
  free(tokens);
  luna_close(ctx);
  check_released(&g, "steady", -1);
}

/* ---- how much ---- */
static size_t peak_of(bool encoder, bool inference, int64_t layers, int64_t n) {
  job j = {0, 0, false, false, false, 1, (luna_model_kind)0, LUNA_KEEP_ALL, 0};
  j.encoder = encoder, j.inference = inference, j.layers = layers, j.n = n;
  return measured(&j, 1).peak;
}
static void check_sizes(void) {
  const int64_t n = 4096;
  for (int encoder = 0; encoder < 2; encoder++) {
    const size_t train = peak_of(encoder, false, 8, n), infer = peak_of(encoder, true, 8, n), shallow = peak_of(encoder, true, 2, n);
    const size_t weights = peak_of(encoder, true, 8, 1) - peak_of(encoder, true, 2, 1);
    CHECK(infer < train / 4, "8 layers: inference takes %zu bytes, training %zu", infer, train);
    const size_t outputs =
        encoder ? 6 * (size_t)n * DIM * sizeof(float) : 0; /* of layers called one by one: the caller may still want them */
    CHECK(infer - weights < shallow + shallow / 8 + outputs,
          "inference takes %zu bytes for 8 layers without their weights, %zu for 2: temporaries stay", infer - weights, shallow);
    for (int inference = 0; inference < 2; inference++) {
      const double a = (double)peak_of(encoder, inference, 2, n), b = (double)peak_of(encoder, inference, 2, 2 * n),
                   c = (double)peak_of(encoder, inference, 2, 4 * n);
      const double growth = (c - b) / (b - a);
      CHECK(growth > 1.9 && growth < 2.1, "%s, %s: memory for n, 2n, 4n is %.0f, %.0f, %.0f bytes: not linear",
            encoder ? "encoder" : "language model", inference ? "inference" : "training", a, b, c);
    }
  }
}

/* What the manual says that training takes: a 4-layer byte classifier of 256 dimensions on 4096 tokens, one and four sequences */
static size_t classifier_bytes(int64_t batch, luna_recomputing recompute, luna_pooling pooling) {
  const int64_t n = 4096;
  luna_options options = {0};
  luna_classifier model;
  luna_classifier_config config = {0};
  int32_t *tokens = (int32_t *)common_alloc((size_t)(batch * n) * sizeof *tokens), labels[4] = {0, 1, 0, 1};
  options.threads = 2;
  options.measure = true;
  config.pooling = pooling;
  config.encoder.layers = 4;
  config.encoder.dim = 256;
  config.encoder.ffn = 1024;
  config.encoder.layer.recompute = recompute;
  luna_ctx *ctx = luna_open(&options);
  luna_params *params = luna_params_open(ctx);
  luna_classifier_init(&model, params, &config);
  luna_optimizer *adam = luna_adamw(params, NULL);
  for (int step = 0; step < 2; step++) {
    luna_begin_step(ctx);
    luna_backward(luna_cross_entropy(luna_classify(&model, tokens, NULL, batch, n), labels));
    CHECK(luna_optimizer_step(adam) == LUNA_OK, "measuring a classifier: %s", luna_error(ctx));
  }
  const size_t bytes = luna_memory(ctx).peak;
  luna_close(ctx);
  free(tokens);
  return bytes;
}
static void check_training_bytes(void) {
  static const struct { int64_t batch; luna_recomputing recompute; double most; } row[4] = {
    {1, LUNA_KEEP_ALL, 200e6}, {1, LUNA_RECOMPUTE_FFN, 127e6}, {4, LUNA_KEEP_ALL, 530e6}, {4, LUNA_RECOMPUTE_FFN, 270e6}};
  for (int i = 0; i < 8; i++) {
    const double bytes = (double)classifier_bytes(row[i / 2].batch, row[i / 2].recompute, i % 2 ? LUNA_POOL_MEMORY : LUNA_POOL_MEAN);
    CHECK(bytes > 0 && bytes <= row[i / 2].most, "training %d x 4096 tokens, recompute %d, takes %.1f MB", (int)row[i / 2].batch, row[i / 2].recompute, bytes * 1e-6);
    printf("memory: training %d x 4096 tokens%s, %s pooled: %.1f MB\n", (int)row[i / 2].batch, row[i / 2].recompute ? ", feed-forward recomputed" : "", i % 2 ? "memory" : "mean", bytes * 1e-6);
  }
}

int main(void) {
  const luna_model_kind none = (luna_model_kind)0;
  const job training = {60, 2, false, false, false, 2, none, LUNA_KEEP_ALL, 0}, sgd = {70, 1, false, false, true, 2, none, LUNA_KEEP_ALL, 0};
  const job inference = {150, 3, true, false, false, 2, none, LUNA_KEEP_ALL, 0}, encoder = {90, 2, false, true, false, 2, none, LUNA_KEEP_ALL, 0};
  const job encoder_inference = {600, 4, true, true, false, 2, none, LUNA_KEEP_ALL, 0};
  job classifier = {40, 2, false, false, false, 2, LUNA_MODEL_CLASSIFIER, LUNA_RECOMPUTE_LAYER, 0.1f};
  const job linformer = {50, 2, false, false, true, 2, LUNA_MODEL_CLASSIFIER, LUNA_RECOMPUTE_FFN, 0.1f};
  const job masked_lm = {40, 1, false, false, false, 2, LUNA_MODEL_MASKED_LM, LUNA_RECOMPUTE_FFN, 0.1f};
  job seq2seq = {40, 2, false, false, false, 2, LUNA_MODEL_SEQ2SEQ, LUNA_RECOMPUTE_LAYER, 0.1f};
  const job seq2seq_inference = {70, 2, true, false, false, 2, LUNA_MODEL_SEQ2SEQ, LUNA_KEEP_ALL, 0};
  check_block(&training, 1, "training");
  check_block(&training, 3, "training on 3 threads");
  check_block(&sgd, 1, "training with SGD");
  check_block(&inference, 1, "inference");
  check_block(&encoder, 2, "an encoder");
  check_block(&encoder_inference, 1, "an encoder's inference");
  check_block(&classifier, 2, "a classifier, layers computed again");
  check_block(&linformer, 1, "a Linformer, feed-forwards computed again");
  check_block(&masked_lm, 1, "a masked language model");
  check_block(&seq2seq, 1, "an encoder-decoder");
  check_block(&seq2seq_inference, 3, "an encoder-decoder's inference");
  classifier.dropout = seq2seq.dropout = 0; /* whose masks a second run in the same context would not repeat */
  check_failures(&classifier, "a classifier");
  check_failures(&seq2seq, "an encoder-decoder");
  check_failures(&training, "training");
  check_failures(&inference, "inference");
  check_failures(&encoder, "an encoder");
  check_survival();
  check_steady();
  check_sizes();
  check_training_bytes();
  return test_report("memory");
}
