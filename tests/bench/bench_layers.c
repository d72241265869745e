/* bench_layers: layers and models against the machine's multiply-add peak. Flops a token, forward: folded Luna 8hld +
   4d ffn, unfolded 6d^2 + 8ld + 4d ffn, causal 2hld + 6d^2 + 8ld + 2c(hl + d) + 4d ffn in chunks of c = 64, with
   gates 2hld more, with a router (which has no scores) 2hd more; a training step counts three times that, and what is
   computed twice counts once. */
#include "bench.h"

#define DIM 256
#define HEADS 4
#define FFN 1024

typedef enum layer_kind { ENCODER, CAUSAL, FORGETTING, ROUTED } layer_kind;
/* one layer, its input a parameter so that no run copies it */
typedef struct layer_bench {
  luna_ctx *ctx;
  luna_params *params, *inputs;
  luna_optimizer *adam;
  luna_encoder_layer encoder;
  luna_causal_layer causal;
  luna_tensor *x, *p;
  layer_kind kind;
  bool training;
} layer_bench;

static void layer_run(void *arg) {
  layer_bench *b = (layer_bench *)arg;
  luna_tensor *y, *p = b->p;
  const int64_t flat[1] = {-1};
  if (b->training) luna_begin_step(b->ctx);
  else luna_begin_inference(b->ctx);
  y = b->kind != ENCODER ? luna_causal_layer_forward(&b->causal, b->x) :
      luna_encoder_layer_forward(&b->encoder, b->x, &p, NULL);
  if (b->training) {
    luna_backward(luna_mean(luna_reshape(y, 1, flat), 0));
    luna_optimizer_step(b->adam);
  }
  if (luna_error_status(b->ctx) != LUNA_OK) {
    fprintf(stderr, "%s\n", luna_error(b->ctx));
    exit(1);
  }
}

enum { FORWARD, TRAINING, FORWARD_INT8, TRAINING_BF16, FORWARD_BF16, FORWARD_INT8_BF16 };
static void layer_open(layer_bench *b, int threads, int64_t n, int64_t memory, layer_kind kind, int work) {
  luna_options options = {.threads = threads, .isa = bench_isa(),
                          .weights = work == FORWARD_INT8 || work == FORWARD_INT8_BF16 ? LUNA_DTYPE_I8 : LUNA_DTYPE_F32,
                          .products = work >= TRAINING_BF16 ? LUNA_DTYPE_BF16 : LUNA_DTYPE_F32};
  static const luna_forget forgets[] = {LUNA_FORGET_NONE, LUNA_FORGET_NONE, LUNA_FORGET_GATED, LUNA_FORGET_ROUTED};
  luna_layer_config config = {.dim = DIM, .heads = HEADS, .ffn = FFN, .memory = memory, .forget = forgets[kind]};
  const luna_init normal = {LUNA_INIT_NORMAL, 1};
  const int64_t x[3] = {1, n, DIM}, p[3] = {1, memory, DIM};
  memset(b, 0, sizeof *b);
  b->ctx = luna_open(&options);
  b->params = luna_params_open(b->ctx);
  b->inputs = luna_params_open(b->ctx);
  b->x = luna_param(b->inputs, "x", 3, x, normal);
  b->p = luna_param(b->inputs, "p", 3, p, normal);
  b->kind = kind;
  b->training = work == TRAINING || work == TRAINING_BF16;
  if (kind != ENCODER) luna_causal_layer_init(&b->causal, b->params, "", &config);
  else luna_encoder_layer_init(&b->encoder, b->params, "", &config);
  b->adam = luna_adam(b->params, &(luna_optimizer_config){.lr = 1e-4f});
  if (!b->adam) {
    fprintf(stderr, "%s\n", luna_error(b->ctx));
    exit(1);
  }
}

static double folded_flops(double n, double l) { return n * (8 * HEADS * l * DIM + 4. * DIM * FFN); }
static double plain_flops(double n, double l) { return n * (6. * DIM * DIM + 8 * l * DIM + 4. * DIM * FFN); }
static double encoder_flops(double n, double l) {
  return folded_flops(n, l) < plain_flops(n, l) ? folded_flops(n, l) : plain_flops(n, l);
}
static double causal_flops(double n, double l) {
  return n * (2 * HEADS * l * DIM + 6. * DIM * DIM + 8 * l * DIM + 2 * 64 * (HEADS * l + DIM) + 4. * DIM * FFN);
}

static double layer_flops(layer_kind kind, double n, double l) {
  double gates = 0;
  if (kind == FORGETTING) gates = n * 2 * HEADS * l * DIM;
  if (kind == ROUTED) gates = n * 2 * HEADS * DIM;
  return kind == ENCODER ? encoder_flops(n, l) : causal_flops(n, l) + gates;
}

static void layer_rows(const char *name, int64_t n, int64_t memory, layer_kind kind, int threads, double forward,
                       double training) {
  enum { WORKS = 4 };
  static const int works[WORKS] = {FORWARD, TRAINING, TRAINING_BF16, FORWARD_BF16};
  static const char *const names[WORKS] = {"forward", "training step", "training step, bf16", "forward, bf16"};
  const double trip = threads > 1 ? bench_round_trip() : 0, least[WORKS] = {forward, training, 0, 0};
  const int each = threads > 1 ? 2 : 1;
  layer_bench b[2 * WORKS];
  bench_case c[2 * WORKS];
  memset(c, 0, sizeof c);
  for (int i = 0; i < WORKS * each; i++) {
    const int what = i / each;
    c[i].threads = i % each ? threads : 1;
    layer_open(&b[i], c[i].threads, n, memory, kind, works[what]);
    snprintf(c[i].name, sizeof c[i].name, "%s, %s", name, names[what]);
    c[i].flops = (b[i].training ? 3 : 1) * layer_flops(kind, (double)n, (double)memory);
    c[i].run = layer_run;
    c[i].arg = &b[i];
    c[i].ctx = b[i].ctx;
    c[i].min = least[what];
  }
  bench_cases(c, WORKS * each);
  if (c[0].seconds > 0)
    printf("    bf16 by %s: training %.2f, forward %.2f times as fast as float\n",
           luna_isa_name(luna_isa_of(b[2 * each].ctx)),
           c[each].seconds / c[2 * each].seconds, c[0].seconds / c[3 * each].seconds);
  if (threads > 1 && c[1].seconds > 0)
    printf("    the second thread: forward %.2f, training %.2f times one; a word there and back took %.0f ns before, "
           "%.0f after\n", c[0].seconds / c[1].seconds, c[2].seconds / c[3].seconds, trip, bench_round_trip());
  for (int i = 0; i < WORKS * each; i++) luna_close(b[i].ctx);
}

/* Time a token at a great length. The first two steps touch new memory (the second's is in one piece), 2.7 GB of it at
   262,144 tokens, and are not timed. */
static void length_rows(const char *name, layer_kind kind, int threads) {
  for (int training = 0; training < 2; training++) {
    layer_bench b[2];
    bench_case c[2];
    memset(c, 0, sizeof c);
    for (int i = 0; i < 2; i++) {
      const int64_t n = i ? 262144 : 4096;
      layer_open(&b[i], threads, n, 16, kind, training);
      for (int step = 0; step < 2 && bench_is_wanted(name); step++) layer_run(&b[i]);
      snprintf(c[i].name, sizeof c[i].name, "%s, n = %d, %s", name, (int)n, training ? "training step" : "forward");
      c[i].threads = threads;
      c[i].flops = (training ? 3 : 1) * layer_flops(kind, (double)n, 16);
      c[i].run = layer_run;
      c[i].arg = &b[i];
      c[i].ctx = b[i].ctx;
    }
    bench_cases(c, 2);
    if (c[0].seconds > 0)
      printf("    time a token at 262,144: %.3f of that at 4,096\n", c[1].seconds / 64 / c[0].seconds);
    for (int i = 0; i < 2; i++) luna_close(b[i].ctx);
  }
}

/* A training step of one thread and of one a core, each core with a busy neighbour; and of eight times as many threads
   as cores beside as many as cores, without. Runs in turn, medians of 9. */
static double neighbour_time(layer_bench *b, int steps) {
  const double start = bench_seconds();
  for (int i = 0; i < steps; i++) layer_run(b);
  return (bench_seconds() - start) / steps;
}
static void neighbour_rows(void) {
  enum { RUNS = 9, STEPS = 5 };
  const int cores = (int)sysconf(_SC_NPROCESSORS_ONLN), threads[2][2] = {{1, cores}, {cores, 8 * cores}};
  for (int row = 0; row < 2; row++) {
    char name[2][80];
    double seconds[2][RUNS];
    layer_bench b[2];
    for (int i = 0; i < 2; i++)
      snprintf(name[i], sizeof name[i], "training step, %s", row ? "no neighbours" : "a busy loop on each core");
    if (!bench_is_wanted(name[0]) || bench_turns) continue;
    for (int i = 0; i < 2; i++) layer_open(&b[i], threads[row][i], 4096, 16, ENCODER, true), layer_run(&b[i]);
    if (row == 0) bench_busy(cores);
    for (int r = 0; r < RUNS; r++)
      for (int i = 0; i < 2; i++) seconds[i][r] = neighbour_time(&b[i], STEPS);
    bench_quiet();
    for (int i = 0; i < 2; i++) {
      const double median = bench_median(seconds[i], RUNS);
      printf("  %-46s %3d %10.3f\n", name[i], threads[row][i], 1e3 * median);
      if (bench_json)
        fprintf(bench_json, "{\"name\": \"%s\", \"threads\": %d, \"ms\": %.5f}\n", name[i], threads[row][i],
                1e3 * median);
      luna_close(b[i].ctx);
      seconds[i][0] = median;
    }
    printf("    %d threads take %.2f times the time of %d (at most %.2f)\n", threads[row][1],
           seconds[1][0] / seconds[0][0],
           threads[row][0], row ? 1.1 : 1.05);
  }
}

/* A byte classifier's whole training step. The mean pooled, every layer has a gradient; the memory pooled, the last
   layer computes P alone. */
typedef struct classifier_bench {
  luna_ctx *ctx;
  luna_classifier model;
  luna_optimizer *adam;
  int32_t *tokens, labels[8], lengths[8];
  int64_t batch, n;
} classifier_bench;
static void classifier_run(void *arg) {
  classifier_bench *b = (classifier_bench *)arg;
  luna_begin_step(b->ctx);
  luna_backward(luna_cross_entropy(luna_classifier_forward(&b->model,
      &(luna_input){ b->tokens, b->lengths, b->batch, b->n, NULL }), b->labels, NULL));
  luna_optimizer_step(b->adam);
  if (luna_error_status(b->ctx) != LUNA_OK) {
    fprintf(stderr, "%s\n", luna_error(b->ctx));
    exit(1);
  }
}
static void classifier_open(classifier_bench *b, int threads, int64_t batch, int64_t n, luna_recompute_kind recompute,
                            luna_pooling pooling, luna_dtype products) {
  luna_options options = {.threads = threads, .isa = bench_isa(), .products = products};
  luna_classifier_config config = {.classes = 2, .pooling = pooling,
                                   .encoder = {.layers = 4,
                                               .layer = {.dim = DIM, .heads = HEADS, .memory = 16, .ffn = FFN}}};
  luna_params *params;
  memset(b, 0, sizeof *b);
  config.vocab = 256;
  config.encoder.layer.recompute = recompute;
  b->batch = batch;
  b->n = n;
  b->ctx = luna_open(&options);
  params = luna_params_open(b->ctx);
  if (luna_classifier_init(&b->model, params, &config) != LUNA_OK) fprintf(stderr, "%s\n", luna_error(b->ctx)), exit(1);
  b->adam = luna_adam(params, &(luna_optimizer_config){.lr = 1e-4f});
  b->tokens = (int32_t *)malloc((size_t)(batch * n) * sizeof(int32_t));
  for (int64_t i = 0; i < batch * n; i++) b->tokens[i] = (int32_t)(i * 7919 % 256);
  for (int64_t i = 0; i < batch; i++) b->labels[i] = (int32_t)(i % 2), b->lengths[i] = (int32_t)n;
}
static void classifier_rows(int64_t batch, int threads, luna_pooling pooling) {
  static const luna_recompute_kind kinds[] = {LUNA_RECOMPUTE_NONE, LUNA_RECOMPUTE_FFN, LUNA_RECOMPUTE_NONE};
  static const char *const names[] = {"", ", feed-forward recomputed", ", bf16"};
  const bool memory = pooling == LUNA_POOLING_MEMORY;
  classifier_bench b[6];
  bench_case c[6];
  int count = 0, i;
  memset(c, 0, sizeof c);
  for (i = 0; i < 6; i++) {
    const int t = i % 2 ? threads : 1;
    if (i % 2 && threads == 1) continue;
    classifier_open(&b[count], t, batch, 4096, kinds[i / 2], pooling, i / 2 == 2 ? LUNA_DTYPE_BF16 : LUNA_DTYPE_F32);
    snprintf(c[count].name, sizeof c[count].name, "batch %d, %s pooled%s", (int)batch, memory ? "memory" : "mean",
             names[i / 2]);
    c[count].threads = t;
    c[count].flops = memory ? 0 : 3 * 4 * folded_flops((double)(batch * 4096), 16);
    c[count].run = classifier_run;
    c[count].arg = &b[count];
    c[count].ctx = b[count].ctx;
    count++;
  }
  bench_cases(c, count);
  if (c[0].seconds > 0)
    printf("    bf16 trains %.2f times as fast as float\n", c[0].seconds / c[count / 3 * 2].seconds);
  for (i = 0; i < count; i++) {
    free(b[i].tokens);
    luna_close(b[i].ctx);
  }
}

#ifdef BENCH_SHARED                  /* what tests/bench/bench_peers.py calls */
void *peer_layer(int threads, int64_t n, int64_t memory, int kind, int work) { /* kind: a layer_kind */
  layer_bench *b = (layer_bench *)malloc(sizeof *b);
  layer_open(b, threads, n, memory, (layer_kind)kind, work);
  return b;
}
void peer_layer_run(void *b) { layer_run(b); }
void peer_layer_close(void *b) {
  luna_close(((layer_bench *)b)->ctx);
  free(b);
}
void *peer_classifier(int threads, int64_t batch, int64_t n, int recompute, int products) {
  classifier_bench *b = (classifier_bench *)malloc(sizeof *b);
  classifier_open(b, threads, batch, n, recompute ? LUNA_RECOMPUTE_FFN : LUNA_RECOMPUTE_NONE, LUNA_POOLING_MEAN,
                  (luna_dtype)products);
  return b;
}
void peer_classifier_run(void *b) { classifier_run(b); }
void peer_classifier_close(void *b) {
  free(((classifier_bench *)b)->tokens);
  luna_close(((classifier_bench *)b)->ctx);
  free(b);
}
/* C [m,n] = A [m,k] B^T */
int peer_gemm(int64_t m, int64_t n, int64_t k, const float *a, const float *b, float *c, void *scratch, int64_t size) {
  luna_gemm_args g = {.a = a, .b = b, .c = c, .m = m, .n = n, .k = k, .transpose_b = true};
  g.run.isa = bench_isa();
  g.run.scratch = scratch;
  g.run.scratch_size = (size_t)size;
  return luna_gemm_f32(&g);
}
#else

int main(int argc, char **argv) {
  const int threads = 2;
  bench_start(argc, argv);
  bench_budget = 0.3;
  bench_title("Luna encoder layer, n = 4096, d = 256, 4 heads, ffn 1024");
  layer_rows("l = 16", 4096, 16, ENCODER, threads, 0.82, 0.78);
  layer_rows("l = 128", 4096, 128, ENCODER, 1, 0.78, 0.74);
  layer_rows("l = 256", 4096, 256, ENCODER, 1, 0.78, 0.74);
  bench_title("Luna causal layer");
  layer_rows("causal, l = 16", 4096, 16, CAUSAL, threads, 0.74, 0.70);
  layer_rows("causal that forgets, l = 16", 4096, 16, FORGETTING, threads, 0.70, 0.66);
  layer_rows("causal, routed, l = 16", 4096, 16, ROUTED, 1, 0, 0);
  bench_title("time a token at a great length");
  length_rows("encoder", ENCODER, threads);
  length_rows("causal", CAUSAL, threads);
  bench_title("busy neighbours, and more threads than cores");
  neighbour_rows();
  bench_title("4-layer byte classifier, training step");
  classifier_rows(1, threads, LUNA_POOLING_MEMORY);
  classifier_rows(1, threads, LUNA_POOLING_MEAN);
  classifier_rows(4, 1, LUNA_POOLING_MEAN);
  bench_end();
  return 0;
}
#endif
