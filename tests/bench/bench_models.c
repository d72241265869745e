/* bench_models: a stream against the memory, a detector's steps a second, a GPT's training step, Luna against a softmax
   Transformer whose scores are never stored, and a million tokens. */
#include "bench.h"

#define DIM 256
#define HEADS 4
#define FFN 1024
#define LAYERS 4

static void must(luna_ctx *ctx) {
  if (luna_error_status(ctx) == LUNA_OK) return;
  fprintf(stderr, "%s\n", luna_error(ctx));
  exit(1);
}

/* --- streaming --- */
typedef struct stream_bench {
  luna_ctx *ctx;
  luna_lm model;
  luna_stream *stream;
} stream_bench;
static void stream_run(void *arg) {
  int32_t token = 'a';
  if (!luna_stream_step(((stream_bench *)arg)->stream, &token)) exit(1);
}
static void stream_open(stream_bench *b, int64_t dim, luna_dtype weights) {
  luna_options options = {.threads = 1, .isa = bench_isa()};
  luna_lm_config config = {.vocab = 256, .layers = LAYERS,
                           .layer = {.dim = dim, .heads = HEADS, .memory = 16, .ffn = 4 * dim}};
  b->ctx = luna_open(&options);
  if (luna_lm_init(&b->model, luna_params_open(b->ctx), &config) != LUNA_OK ||
      (b->stream = luna_stream_open(&b->model, &(luna_stream_config){.weights = weights})) == NULL) exit(1);
}
/* in float, and in 8 bits: not in turn, as one's weights drive the other's out of the caches */
static void stream_rows(int64_t dim) {
  stream_bench b[2];
  /* folded pack, q, v, out, feed-forward; the output */
  const int64_t weights = LAYERS * (HEADS * 16 * dim + 3 * dim * dim + 8 * dim * dim) + 256 * dim;
  float *same = (float *)malloc((size_t)weights * sizeof(float));
  bench_case row[2];
  memset(row, 0, sizeof row);
  if (!same) exit(1);
  for (int64_t i = 0; i < weights; i++) same[i] = (float)i; /* pages of zeros may be one page */
  for (int i = 0; i < 2; i++) {
    stream_open(&b[i], dim, i ? LUNA_DTYPE_I8 : LUNA_DTYPE_F32);
    row[i].read = same;
    row[i].floats = i ? weights / 4 : weights;
    snprintf(row[i].name, sizeof row[i].name, "a step, %.1f MB of weights%s", (i ? 1e-6 : 4e-6) * (double)weights,
             i ? " in 8 bits" : "");
    row[i].flops = 2.0 * (double)weights;
    row[i].run = stream_run;
    row[i].arg = &b[i];
    row[i].ctx = b[i].ctx;
    row[i].min = i ? 0 : dim == DIM ? 0.85 : 0;
  }
  bench_cases(&row[0], 1);
  bench_cases(&row[1], 1);
  if (row[0].seconds > 0 && row[1].seconds > 0)
    printf("    d = %d: %.0f tokens a second, %.0f in 8 bits: %.2f times as many\n", (int)dim, 1 / row[0].seconds,
           1 / row[1].seconds, row[0].seconds / row[1].seconds);
  for (int i = 0; i < 2; i++) luna_stream_close(b[i].stream), luna_close(b[i].ctx);
  free(same);
}

/* --- a detector: measurements in, outputs for each --- */
enum { FEATURES = 9, DETECTOR_DIM = 32, DETECTOR_LAYERS = 2 };
static void detector_run(void *arg) {
  static const float x[FEATURES] = {0.5f, -1, 1.5f, 0, 0.25f, -0.75f, 1, -0.5f, 2};
  if (!luna_stream_step_features(((stream_bench *)arg)->stream, x)) exit(1);
}
static void detector_row(void) {
  const int64_t d = DETECTOR_DIM, layer = 4 * 16 * d + 3 * d * d + 4 * d * d; /* multiplications, as above */
  luna_options options = {.threads = 1, .isa = bench_isa()};
  luna_lm_config config = {.features = FEATURES, .outputs = 2, .layers = DETECTOR_LAYERS,
    .layer = {.dim = DETECTOR_DIM, .heads = 4, .memory = 16, .ffn = 2 * DETECTOR_DIM, .convolution = 4,
              .pre_norm = true}};
  stream_bench b;
  bench_case row;
  memset(&row, 0, sizeof row);
  b.ctx = luna_open(&options);
  luna_lm_init(&b.model, luna_params_open(b.ctx), &config);
  must(b.ctx);
  b.stream = luna_stream_open(&b.model, NULL);
  must(b.ctx);
  snprintf(row.name, sizeof row.name, "a step of %d numbers", (int)FEATURES);
  row.flops = 2.0 * (double)(FEATURES * d + DETECTOR_LAYERS * layer + 2 * d);
  row.run = detector_run;
  row.arg = &b;
  row.ctx = b.ctx;
  bench_cases(&row, 1);
  if (row.seconds > 0) printf("    %.0f steps a second\n", 1 / row.seconds);
  luna_stream_close(b.stream);
  luna_close(b.ctx);
}

/* --- a GPT: the sizes that the C trainers of GPT-2 are timed with --- */
typedef struct gpt_bench {
  luna_ctx *ctx;
  luna_lm model;
  luna_optimizer *adam;
  int32_t *tokens;
  int64_t batch, n;
  bool lm_loss;
} gpt_bench;
static void gpt_run(void *arg) {
  gpt_bench *b = (gpt_bench *)arg;
  const luna_input input = {b->tokens, NULL, b->batch, b->n, NULL};
  luna_begin_step(b->ctx);
  luna_backward(b->lm_loss ? luna_lm_loss(&b->model, &input, b->tokens + 1) :
                luna_cross_entropy(luna_lm_forward(&b->model, &input), b->tokens + 1, NULL));
  luna_optimizer_step(b->adam);
  must(b->ctx);
}
static void gpt_rows(int threads) {
  enum { VOCAB = 50257, T = 1024, B = 4 };
  enum { LOGITS, LM_LOSS, BF16, THREADED, CASES };
  gpt_bench b[CASES];
  bench_case c[CASES];
  memset(c, 0, sizeof c);
  for (int i = 0; i < CASES; i++) {
    luna_options options = {.threads = i == THREADED ? threads : 1, .isa = bench_isa(),
                            .products = i == BF16 ? LUNA_DTYPE_BF16 : LUNA_DTYPE_F32};
    luna_lm_config config = {.vocab = VOCAB, .layers = LAYERS, .positions = LUNA_POSITIONS_LEARNED, .max_length = T};
    luna_params *params;
    config.layer = (luna_layer_config){
      .dim = DIM, .heads = HEADS, .ffn = FFN, .activation = LUNA_ACTIVATION_GELU, .pre_norm = true,
          .attention = LUNA_ATTENTION_SOFTMAX
    };
    b[i].ctx = luna_open(&options);
    b[i].batch = B;
    b[i].n = T;
    b[i].lm_loss = i == LM_LOSS;
    params = luna_params_open(b[i].ctx);
    if (luna_lm_init(&b[i].model, params, &config) != LUNA_OK) must(b[i].ctx);
    b[i].adam = luna_adamw(params, &(luna_optimizer_config){.lr = 1e-4f});
    b[i].tokens = (int32_t *)malloc((B * T + 1) * sizeof(int32_t));
    for (int64_t t = 0; t <= B * T; t++) b[i].tokens[t] = (int32_t)(t * 7919 % VOCAB);
    snprintf(c[i].name, sizeof c[i].name, "4 layers, d 256, vocabulary 50257, 4 x 1024 tokens%s",
             b[i].lm_loss ? ", luna_lm_loss" : i == BF16 ? ", bf16" : "");
    c[i].threads = options.threads;
    c[i].flops = 3.0 * B * T * (LAYERS * (24.0 * DIM * DIM + 2.0 * T * DIM) + 2.0 * VOCAB * DIM);
    c[i].run = gpt_run;
    c[i].arg = &b[i];
    c[i].ctx = b[i].ctx;
  }
  bench_cases(c, threads > 1 ? CASES : THREADED);
  printf("    %.2f thousand tokens/s on one thread, %.2f in bf16 (%.2f times), %.2f on %d threads\n",
         B * T / c[LOGITS].seconds * 1e-3, B * T / c[BF16].seconds * 1e-3, c[LOGITS].seconds / c[BF16].seconds,
         B * T / c[THREADED].seconds * 1e-3, threads);
  for (int i = 0; i < CASES; i++) {
    free(b[i].tokens);
    luna_close(b[i].ctx);
  }
}

/* --- classifiers of any attention --- */
typedef struct model_bench {
  luna_ctx *ctx;
  luna_classifier model;
  luna_optimizer *adam;
  int32_t *tokens, label;
  int64_t n;
  bool training;
} model_bench;
static void model_run(void *arg) {
  model_bench *b = (model_bench *)arg;
  luna_tensor *logits;
  if (b->training) luna_begin_step(b->ctx);
  else luna_begin_inference(b->ctx);
  logits = luna_classifier_forward(&b->model, &(luna_input){ b->tokens, NULL, 1, b->n, NULL });
  if (b->training) {
    luna_backward(luna_cross_entropy(logits, &b->label, NULL));
    luna_optimizer_step(b->adam);
  }
  must(b->ctx);
}
static void model_open_in(model_bench *b, luna_dtype weights, int threads, int64_t n, int64_t layers,
                          luna_attention_kind attention, luna_pooling pooling, bool training) {
  luna_options options = {.threads = threads, .isa = bench_isa(), .weights = weights};
  luna_classifier_config config = {.classes = 2, .pooling = pooling,
                                   .encoder = {.layers = layers,
                                               .layer = {.dim = DIM, .heads = HEADS, .memory = 16, .ffn = FFN}}};
  luna_params *params;
  memset(b, 0, sizeof *b);
  config.encoder.layer.attention = attention;
  b->ctx = luna_open(&options);
  params = luna_params_open(b->ctx);
  if (luna_classifier_init(&b->model, params, &config) != LUNA_OK) must(b->ctx);
  b->adam = training ? luna_adamw(params, &(luna_optimizer_config){.lr = 1e-4f}) : NULL;
  b->tokens = (int32_t *)malloc((size_t)n * sizeof(int32_t));
  for (int64_t i = 0; i < n; i++) b->tokens[i] = (int32_t)(i * 7919 % 256);
  b->n = n;
  b->training = training;
}
static void model_open(model_bench *b, int threads, int64_t n, int64_t layers, luna_attention_kind attention,
                       luna_pooling pooling, bool training) {
  model_open_in(b, LUNA_DTYPE_F32, threads, n, layers, attention, pooling, training);
}
static void model_close(model_bench *b) {
  free(b->tokens);
  luna_close(b->ctx);
}
/* what a step takes beside what stays: parameters, gradients, moments */
static double activation_bytes(model_bench *b) {
  const double peak = (double)luna_memory(b->ctx).peak;
  luna_begin_step(b->ctx);
  return peak - (double)luna_memory(b->ctx).current;
}

static void transformer_rows(void) {
  static const double flop_ratio[4] = {2.2, 3.1, 4.0, 4.9}, paper[4] = {1.2, 1.8, 3.7, 5.5};
  for (int i = 0; i < 4; i++) {
    const int64_t n = 1024 * (i + 1);
    model_bench b[2];
    bench_case c[2];
    double bytes[2];
    memset(c, 0, sizeof c);
    for (int j = 0; j < 2; j++) {
      model_open(&b[j], 1, n, LAYERS, j ? LUNA_ATTENTION_SOFTMAX : LUNA_ATTENTION_LUNA, LUNA_POOLING_MEAN, true);
      snprintf(c[j].name, sizeof c[j].name, "%s, n = %d, training step", j ? "softmax Transformer" : "Luna-16", (int)n);
      c[j].run = model_run;
      c[j].arg = &b[j];
      c[j].ctx = b[j].ctx;
    }
    bench_cases(c, 2);
    for (int j = 0; j < 2; j++) {
      bytes[j] = activation_bytes(&b[j]);
      model_close(&b[j]);
    }
    printf("    Luna takes %.2f of the activations' bytes (%.2f computed, were the scores stored), and is %.2f times "
           "as fast (2.2 to 4.9 at 1K to 4K by\n"
           "    the attentions' flops: here %.1f; the paper's Table 2, against stored scores: %.1f)\n",
           bytes[0] / bytes[1], bytes[0] / (bytes[1] + 4.0 * LAYERS * HEADS * (double)(n * n)),
           c[1].seconds / c[0].seconds, flop_ratio[i], paper[i]);
  }
}

/* a classifier of one layer that reads the memory alone, and one that reads every token */
static void inference_rows(void) {
  model_bench b[3];
  bench_case c[3];
  memset(c, 0, sizeof c);
  for (int i = 0; i < 3; i++) {
    model_open_in(&b[i], i == 2 ? LUNA_DTYPE_I8 : LUNA_DTYPE_F32, 1, 4096, 1, LUNA_ATTENTION_LUNA,
                  i ? LUNA_POOLING_MEAN : LUNA_POOLING_MEMORY, false);
    snprintf(c[i].name, sizeof c[i].name, "1 layer, n = 4096, %s pooled, forward%s", i ? "mean" : "memory",
             i == 2 ? " in 8 bits" : "");
    c[i].run = model_run;
    c[i].arg = &b[i];
    c[i].ctx = b[i].ctx;
  }
  bench_cases(c, 3);
  if (c[2].seconds > 0) printf("    8 bits: %.2f times as fast as float\n", c[1].seconds / c[2].seconds);
  for (int i = 0; i < 3; i++) model_close(&b[i]);
}

/* --- a million tokens --- */
static void million_row(int threads) {
  const int64_t n = 1048576;
  model_bench b;
  bench_case row;
  memset(&row, 0, sizeof row);
  snprintf(row.name, sizeof row.name, "forward, n = 1048576, 4 layers, once");
  if (!bench_is_wanted(row.name)) return;
  model_open(&b, threads, n, LAYERS, LUNA_ATTENTION_LUNA, LUNA_POOLING_MEAN, false);
  row.threads = threads;
  row.flops = (double)n * LAYERS * (8. * HEADS * 16 * DIM + 4. * DIM * FFN);
  row.run = model_run;
  row.arg = &b;
  row.ctx = b.ctx;
  row.once = true;
  bench_cases(&row, 1);
  printf("    %.2f GB, %.0f bytes a token\n", 1e-9 * (double)row.bytes, (double)row.bytes / (double)n);
  model_close(&b);
}

#ifdef BENCH_SHARED                  /* what tests/bench/bench_peers.py calls */
void *peer_stream(int64_t dim, int weights) {
  stream_bench *b = (stream_bench *)malloc(sizeof *b);
  stream_open(b, dim, (luna_dtype)weights);
  return b;
}
void peer_stream_run(void *b) { stream_run(b); }
#else

int main(int argc, char **argv) {
  const int threads = 2;
  bench_start(argc, argv);
  bench_title("streaming a 4-layer causal language model, l = 16, share of a read-only pass over its weights");
  stream_rows(DIM);
  stream_rows(4 * DIM);
  bench_title("streaming a detector: 9 numbers a step, 2 layers, d = 32, l = 16");
  detector_row();
  bench_budget = 0.25;
  bench_title("a GPT's training step, causal softmax attention");
  gpt_rows(threads);
  bench_title("Luna-16 and a softmax Transformer whose scores are never stored, 4 layers, one sequence");
  transformer_rows();
  bench_title("a classifier's inference");
  inference_rows();
  bench_title("a million tokens");
  million_row(threads);
  bench_end();
  return 0;
}
#endif
