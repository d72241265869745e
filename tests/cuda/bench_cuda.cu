/* bench_cuda: luna_cuda.cuh on this machine's GPU, in float32, TF32 and BF16, with a graph and without. Each row is a
   share of what the same run gets out of a large device copy (bytes read + written) or a large product of cuBLAS in the
   same precision, measured beside every timed run; and a share of the card's peak, which its clocks give. Medians of 11
   runs or more, of 3 where the time is limited.

     bench [FILE] [--seconds S]     all rows, or those that begin within S seconds; one line of JSON a row goes to FILE
     bench --device                 the device's properties, or why there is none
     bench --stream                 tokens a second of a stream, one launch a token and call by call
     bench --profile                each kind of kernel once between cudaProfilerStart and Stop, for ncu

   make cuda-bench runs it. -DBENCH_TINY makes every size small and the runs one, to go through all of it without a GPU:
     g++ -std=c++17 -O1 -I. -Itests -DBENCH_TINY -x c++ tests/cuda/bench_cuda.cu -x none build/luna.o -lm -lpthread

   Bytes are those that must be read once and written once. Flops a token, forward: attention core 8 l d; nested layer,
   each half in its cheaper form, pack min(4 h l d, 2 d^2 + 4 l d) + unpack min(4 h l d, 4 d^2 + 4 l d), without the
   memory's own products; causal layer 2 h l d + 6 d^2 + 8 l d + 2 c (h l + d) in chunks of c = 64. Training counts
   three times that; what is computed twice counts once. */
#ifndef __CUDACC__
#include "cuda_host.h"
#endif
#include "luna_cuda.cuh"

#ifndef LUNA_CUDA_HOST
#include <cuda_profiler_api.h>
#endif
#include <algorithm>
#include <chrono>
#include <vector>

#ifdef BENCH_TINY
static const int64_t DIM = 64, HEADS = 4, VOCAB = 503, SIDE = 64, COPIED = 1 << 16;
static int64_t N = 64, ROWS = 16, BATCH = 2;
static const int64_t LENGTH = 64, CLASSIFIER_DIM = 32, CLASSIFIER_FFN = 64;
static const int LEAST_RUNS = 1, MOST_RUNS = 1;
#else
static const int64_t DIM = 1024, HEADS = 16, VOCAB = 50257, SIDE = 8192, COPIED = (int64_t)1 << 30;
static int64_t N = 65536, ROWS = 8192, BATCH = 32; /* a profiler's are smaller */
static const int64_t LENGTH = 4096, CLASSIFIER_DIM = 256, CLASSIFIER_FFN = 1024;
static const int LEAST_RUNS = 11, MOST_RUNS = 51;
#endif
static const double BUDGET = 1000;   /* ms a row may take beyond its least number of runs */

static FILE *json;
static luna_cuda_math math = LUNA_CUDA_F32; /* of the rows that follow, */
static bool graphed;                 /* and whether their steps are graphs */
static const char *const precisions[3] = {"float32", "TF32", "BF16"};
static int rows_left, rows_skipped;  /* with counting: so far; for want of time */
static bool counting, profiling;
static double deadline;              /* seconds, or 0 */
static double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
/* whether the row is only counted now, or its time is over */
static bool counted() {
  rows_left += counting ? 1 : -1;
  const bool late = !counting && deadline > 0 && seconds() > deadline;
  rows_skipped += late;
  return counting || late;
}

static void fail(const char *what, const char *why) {
  fprintf(stderr, "%s: %s\n", what, why);
  exit(1);
}
static void must(cudaError_t error, const char *what) {
  if (error != cudaSuccess) fail(what, cudaGetErrorString(error));
}

/* ---- one thing that is timed: a context, and whatever its run needs ---- */
enum layer_kind { CORE, NESTED, CAUSAL };
struct bench {
  luna_ctx *ctx;
  cudaStream_t stream;
  cudaEvent_t begin, end;
  bool marks_itself;                 /* run records both events, for it times a part of what it does */
  luna_graph *graph;                 /* null: none */
  luna_stream *tokens_of;            /* a stream that is timed */
  luna_params *params, *inputs;      /* trained; given, so that no run copies them */
  luna_tensor *x, *q, *p, *weight, *bias;
  luna_optimizer *adam;
  layer_kind kind;
  bool training;
  luna_nested_attention_layer nested;
  luna_causal_attention_layer causal;
  luna_classifier model;
  std::vector<int32_t> tokens, labels, lengths;
  const float *values, *slopes;      /* on the device: what source gives, and what sink gives as its gradient */
};

static void check(const bench *b) {
  if (luna_error_status(b->ctx) != LUNA_OK) fail("bench_cuda", luna_error(b->ctx));
}

static void open_bench(bench *b) {
  luna_options options = {};
  options.backend = luna_cuda_backend_with(0, math);
  b->ctx = luna_open(&options);
  if (!b->ctx) fail("luna_open", "no memory");
  check(b);
  b->stream = luna_cuda_stream(b->ctx);
  b->params = luna_params_open(b->ctx);
  b->inputs = luna_params_open(b->ctx);
  must(cudaEventCreate(&b->begin), "an event");
  must(cudaEventCreate(&b->end), "an event");
}
static void close_bench(bench *b) {
  if (b->adam && luna_optimizer_skipped(b->adam) > 0)
    fail("bench_cuda", "an update was skipped: its time says nothing");
  (void)cudaEventDestroy(b->begin);
  (void)cudaEventDestroy(b->end);
  luna_close(b->ctx);
}

/* values of variance 1, made where they are wanted: products of zeros would draw less power and run at a higher
   clock */
__global__ void fill_kernel(float *x, int64_t count, uint32_t seed) {
  for (int64_t i = lunacu_index(); i < count; i += lunacu_stride()) {
    uint32_t u = ((uint32_t)i ^ seed) * 2654435769u;
    u = (u ^ u >> 15) * 2246822519u;
    u = (u ^ u >> 13) * 3266489917u;
    x[i] = ((float)(u >> 8) * (1.0f / 16777216.0f) - 0.5f) * 3.4641016f;
  }
}
static void fill(cudaStream_t stream, float *x, int64_t count, uint32_t seed) {
  LUNACU_LAUNCH(fill_kernel, lunacu_blocks(count, 8 * LUNACU_BLOCK), LUNACU_BLOCK, 0, stream, x, count,
                seed * 2654435769u);
}
static luna_tensor *input(bench *b, const char *name, int rank, int64_t s0, int64_t s1, int64_t s2) {
  const int64_t shape[3] = {s0, s1, s2};
  const luna_init zeros = {LUNA_INIT_ZEROS, 0};
  luna_tensor *t = luna_param(b->inputs, name, rank, shape, zeros);
  if (!t) fail(name, luna_error(b->ctx));
  fill(b->stream, t->data, luna_count(t), (uint32_t)name[0]);
  return t;
}
static luna_tensor *mean(luna_tensor *x) {
  const int64_t flat[1] = {-1};
  return luna_mean(luna_reshape(x, 1, flat), 0);
}

/* ---- the machine: what a copy and a product reach ---- */
struct machine {
  bench own;
  cublasHandle_t blas;
  double memory, flops[3];           /* the card's peaks, bytes and operations a second; 0: not known */
  float *a, *b, *c;
  char *from, *to;
};
static machine gpu;

static void copy_run(bench *b) {
  must(cudaMemcpyAsync(gpu.to, gpu.from, (size_t)COPIED, cudaMemcpyDeviceToDevice, b->stream), "a copy");
}
static void gemm_run(bench *) { /* as luna_linear: C = A B^T of rows, which are cuBLAS's columns */
  const float one = 1, zero = 0;
  const int side = (int)SIDE;
  const cublasComputeType_t type = math == LUNA_CUDA_TF32 ? CUBLAS_COMPUTE_32F_FAST_TF32 :
      math == LUNA_CUDA_BF16 ? CUBLAS_COMPUTE_32F_FAST_16BF : CUBLAS_COMPUTE_32F;
  const cublasStatus_t status = cublasGemmEx(gpu.blas, CUBLAS_OP_T, CUBLAS_OP_N, side, side, side, &one, gpu.b,
                                             CUDA_R_32F, side, gpu.a, CUDA_R_32F, side, &zero, gpu.c, CUDA_R_32F, side,
                                             type, CUBLAS_GEMM_DEFAULT);
  if (status != CUBLAS_STATUS_SUCCESS) fail("cublasGemmEx", cublasGetStatusString(status));
}
/* dense operations a cycle of a multiprocessor, by the architecture's documents: float32; TF32; BF16 */
static void find_peaks() {
  int value[4] = {0, 0, 0, 0}, major = 0;
  static const cudaDeviceAttr names[4] = {cudaDevAttrMultiProcessorCount, cudaDevAttrClockRate,
                                          cudaDevAttrMemoryClockRate, cudaDevAttrGlobalMemoryBusWidth};
  for (int i = 0; i < 4; i++)
    if (cudaDeviceGetAttribute(&value[i], names[i], 0) != cudaSuccess) value[i] = 0, (void)cudaGetLastError();
  (void)cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0);
  const double cycles = (double)value[0] * value[1] * 1e3;
  gpu.memory = 2.0 * value[2] * 1e3 * value[3] / 8;
  gpu.flops[0] = 256 * cycles;
  gpu.flops[1] = (major == 9 ? 2048 : major == 8 ? 1024 : 0) * cycles;
  gpu.flops[2] = 2 * gpu.flops[1];
}
static void open_machine() {
  const size_t matrix = (size_t)(SIDE * SIDE) * sizeof(float);
  open_bench(&gpu.own);
  find_peaks();
  must(cudaMalloc((void **)&gpu.a, matrix), "memory");
  must(cudaMalloc((void **)&gpu.b, matrix), "memory");
  must(cudaMalloc((void **)&gpu.c, matrix), "memory");
  must(cudaMalloc((void **)&gpu.from, (size_t)COPIED), "memory");
  must(cudaMalloc((void **)&gpu.to, (size_t)COPIED), "memory");
  fill(gpu.own.stream, gpu.a, SIDE * SIDE, 1);
  fill(gpu.own.stream, gpu.b, SIDE * SIDE, 2);
  fill(gpu.own.stream, (float *)gpu.from, COPIED / 4, 3);
  if (cublasCreate(&gpu.blas) != CUBLAS_STATUS_SUCCESS ||
      cublasSetStream(gpu.blas, gpu.own.stream) != CUBLAS_STATUS_SUCCESS ||
      cublasSetMathMode(gpu.blas, CUBLAS_DEFAULT_MATH) != CUBLAS_STATUS_SUCCESS)
    fail("cuBLAS", "cannot be opened");
}
static void close_machine() {
  (void)cublasDestroy(gpu.blas);
  (void)cudaFree(gpu.a);
  (void)cudaFree(gpu.b);
  (void)cudaFree(gpu.c);
  (void)cudaFree(gpu.from);
  (void)cudaFree(gpu.to);
  close_bench(&gpu.own);
}

/* ---- timing and rows ---- */
static double median(std::vector<double> x) {
  const size_t half = x.size() / 2;
  std::sort(x.begin(), x.end());
  return x.size() % 2 ? x[half] : 0.5 * (x[half - 1] + x[half]);
}
/* ms of one run, `times` of them between the events */
static double timed(bench *b, void (*run)(bench *), int times) {
  float ms = 0;
  if (!b->marks_itself) must(cudaEventRecord(b->begin, b->stream), "an event");
  for (int i = 0; i < times; i++) {
    luna_graph_begin(b->graph);
    run(b);
    luna_graph_end(b->graph);
  }
  check(b);
  if (!b->marks_itself) must(cudaEventRecord(b->end, b->stream), "an event");
  must(cudaStreamSynchronize(b->stream), "a run");
  must(cudaEventElapsedTime(&ms, b->begin, b->end), "an event");
  return std::max((double)ms, 1e-6) / times;
}

static double copy_bytes() { return 2.0 * (double)COPIED; }
static double gemm_flops() { return 2.0 * (double)SIDE * (double)SIDE * (double)SIDE; }

/* one run between the profiler's marks */
static void profile(bench *b, void (*run)(bench *)) {
#ifndef LUNA_CUDA_HOST
  must(cudaProfilerStart(), "the profiler");
#endif
  (void)timed(b, run, 1);
#ifndef LUNA_CUDA_HOST
  must(cudaProfilerStop(), "the profiler");
#endif
}
/* ms that the row may take beyond its least number of runs: its part of what is left */
static double row_budget() {
  return deadline > 0 ? 1e3 * std::max(0.0, deadline - seconds()) / (rows_left + 1) : BUDGET;
}
/* Prints a row and its JSON. work: bytes or flops of one run; minimum: the share that is expected, or 0. The row is
   reported in its own unit, and its share is of the copy's or the product's rate just before each of its runs; then
   comes its share of the card's peak. Returns the median in ms. */
static double row(const char *name, bench *b, void (*run)(bench *), double work, bool is_bytes, double minimum) {
  const bool is_machine = b == &gpu.own, limited = deadline > 0;
  const int least = limited ? std::min(3, LEAST_RUNS) : LEAST_RUNS;
  const double budget = row_budget(), began = seconds();
  std::vector<double> ms, shares;
  double spent = 0;
  int times = 1;
  if (graphed && !b->graph) b->graph = luna_graph_open(b->ctx);
  for (int i = 0; i < (b->graph ? 4 : 2); i++) { /* warm; a graph is recorded when a step comes again */
    const double once = timed(b, run, 1);
    times = b->marks_itself || once >= 1 || LEAST_RUNS == 1 ? 1 : (int)std::min(100.0, 1 + 1 / once);
  }
  if (profiling) return profile(b, run), 1;
  while ((int)ms.size() < least || ((int)ms.size() < MOST_RUNS && spent < budget)) {
    const double beside = is_machine ? 0 : is_bytes ? copy_bytes() / timed(&gpu.own, copy_run, 2) :
        gemm_flops() / timed(&gpu.own, gemm_run, 1);
    ms.push_back(timed(b, run, times));
    shares.push_back(is_machine ? 1 : work / ms.back() / beside);
    spent = limited ? 1e3 * (seconds() - began) : spent + ms.back() * times;
  }
  const double found = median(ms), share = median(shares), rate = work / found * 1e-6; /* GB/s or GFLOP/s */
  const double peak = is_bytes ? gpu.memory : gpu.flops[math], of_peak = peak > 0 ? rate * 1e9 / peak : 0;
  const size_t memory = luna_memory(b->ctx).peak;
  const char *reason = b->graph ? luna_graph_reason(b->graph) : "";
  printf("  %-52s %-8s %-5s %9.3f %9.1f %-7s", name, precisions[math], b->graph ? "graph" : "", found,
         is_bytes ? rate : rate * 1e-3, is_bytes ? "GB/s" : "TFLOP/s");
  if (is_machine) printf("        ");
  else printf("  %5.1f%%", 100 * share);
  if (of_peak > 0) printf("  %5.1f%%", 100 * of_peak);
  if (minimum > 0) printf("  (at least %.0f%%)", 100 * minimum);
  if (*reason) printf("  not one launch: %s", reason);
  puts("");
  fflush(stdout);
  if (json)
    fprintf(json,
        "{\"name\": \"%s\", \"precision\": \"%s\", \"graph\": %s, \"gflops\": %.2f, \"share\": %.4f, "
        "\"of_peak\": %.4f, \"ms\": %.5f, \"bytes\": %.0f, \"memory\": %zu}\n", name, precisions[math],
            b->graph ? "true" : "false", is_bytes ? 0 : rate, share, of_peak, found, is_bytes ? work : 0, memory);
  if (json) fflush(json);
  return found;
}
static void title(const char *text) {
  if (!counting)
    printf("\n%s\n  %-52s %-8s %-5s %9s %9s %-7s  %6s  %6s\n", text, "", "", "", "ms", "rate", "", "share", "of peak");
}

/* ---- attention ---- */
static void layer_run(bench *b) {
  luna_tensor *y = NULL;
  if (b->training) luna_begin_step(b->ctx);
  else luna_begin_inference(b->ctx);
  if (b->kind == CORE) {             /* keys are values, in both halves */
    luna_attention_config config = {};
    config.heads = HEADS;
    luna_tensor *packed_context = luna_softmax_attention(b->p, b->x, b->x, &config);
    y = luna_softmax_attention(b->q, packed_context, packed_context, &config);
  } else if (b->kind == NESTED) y = luna_nested_attention_layer_forward(&b->nested, b->x, b->p, NULL, NULL, NULL);
  else y = luna_causal_attention_layer_forward(&b->causal, b->x, b->p, NULL);
  if (b->training) {
    luna_backward(mean(y));
    luna_optimizer_step(b->adam);
  }
}
static double layer_flops(layer_kind kind, double l) {
  const double n = (double)N, d = (double)DIM, h = (double)HEADS;
  if (kind == CORE) return n * 8 * l * d;
  if (kind == NESTED)
    return n * (std::min(4 * h * l * d, 2 * d * d + 4 * l * d) + std::min(4 * h * l * d, 4 * d * d + 4 * l * d));
  return n * (2 * h * l * d + 6 * d * d + 8 * l * d + 2 * 64 * (h * l + d));
}
static void layer_row(const char *text, layer_kind kind, int64_t l, bool training, double minimum) {
  bench b = {};
  char name[96];
  luna_optimizer_config adam = {};
  const bool is_bytes = kind == CORE && l == 16;
  if (counted()) return;
  open_bench(&b);
  b.kind = kind;
  b.training = training;
  b.x = input(&b, "x", 3, 1, N, DIM);
  b.p = input(&b, "p", 3, 1, l, DIM);
  if (kind == CORE) b.q = input(&b, "q", 3, 1, N, DIM);
  if (kind == NESTED) {
    luna_layer_config config = {};
    config.dim = DIM;
    config.heads = HEADS;
    luna_nested_attention_layer_init(&b.nested, b.params, "", &config);
  }
  if (kind == CAUSAL) {
    luna_layer_config config = {};
    config.dim = DIM;
    config.heads = HEADS;
    luna_causal_attention_layer_init(&b.causal, b.params, "", &config);
  }
  adam.lr = 1e-4f;
  if (training) b.adam = luna_adamw(b.params, &adam);
  check(&b);
  snprintf(name, sizeof name, "%s, l = %d, %s", text, (int)l, training ? "training step" : "forward");
  row(name, &b, layer_run, is_bytes ? 12.0 * (double)(N * DIM) : (training ? 3 : 1) * layer_flops(kind, (double)l),
      is_bytes, minimum);
  close_bench(&b);
}

/* ---- one op's backward alone: source gives values and, when the gradient comes to it, marks the end; sink gives a
   gradient and marks the beginning ---- */
static luna_status source_forward(const luna_tensor *const *, int, luna_tensor *out, void *state) {
  const bench *b = *(const bench *const *)state;
  must(cudaMemcpyAsync(out->data, b->values, (size_t)luna_count(out) * sizeof(float), cudaMemcpyDeviceToDevice,
                       b->stream), "a copy");
  must(cudaEventRecord(b->begin, b->stream), "an event");
  return LUNA_OK;
}
static luna_status source_backward(luna_tensor *const *, int, const luna_tensor *, void *state) {
  const bench *b = *(const bench *const *)state;
  must(cudaEventRecord(b->end, b->stream), "an event");
  return LUNA_OK;
}
static luna_status sink_forward(const luna_tensor *const *, int, luna_tensor *out, void *state) {
  const bench *b = *(const bench *const *)state;
  must(cudaMemsetAsync(out->data, 0, sizeof(float), b->stream), "a fill");
  return LUNA_OK;
}
static luna_status sink_backward(luna_tensor *const *in, int, const luna_tensor *, void *state) {
  const bench *b = *(const bench *const *)state;
  must(cudaMemcpyAsync(in[0]->grad, b->slopes, (size_t)luna_count(in[0]) * sizeof(float), cudaMemcpyDeviceToDevice,
                       b->stream), "a copy");
  must(cudaEventRecord(b->begin, b->stream), "an event");
  return LUNA_OK;
}
static luna_tensor *gate(bench *b, luna_tensor *in, int rank, const int64_t *shape, bool is_source) {
  const luna_custom custom = {is_source ? source_forward : sink_forward, is_source ? source_backward : sink_backward,
                              &b, sizeof b, 0, false, 0, 0};
  return luna_custom_op(&in, 1, rank, shape, &custom);
}

/* ---- layer norm, cross-entropy, AdamW ---- */
static void norm_run(bench *b) {
  const int64_t shape[2] = {N, DIM}, one = 1;
  if (!b->training) {
    luna_begin_inference(b->ctx);
    luna_layer_norm(b->x, b->weight, b->bias, 0);
    return;
  }
  luna_begin_step(b->ctx);
  luna_backward(gate(b, luna_layer_norm(gate(b, b->p, 2, shape, true), b->weight, b->bias, 0), 1, &one, false));
}
static void norm_row(bool backward) {
  bench b = {};
  char name[96];
  if (counted()) return;
  open_bench(&b);
  b.training = b.marks_itself = backward;
  b.x = input(&b, "x", 2, N, DIM, 1);
  b.weight = input(&b, "weight", 1, DIM, 1, 1);
  b.bias = input(&b, "bias", 1, DIM, 1, 1);
  b.p = input(&b, "none", 1, 1, 1, 1);
  b.values = b.x->data;
  if (backward) b.slopes = input(&b, "slopes", 2, N, DIM, 1)->data;
  snprintf(name, sizeof name, "layer norm, %d x %d, %s", (int)N, (int)DIM, backward ? "backward" : "forward");
  row(name, &b, norm_run, (backward ? 12.0 : 8.0) * (double)(N * DIM), true, 0.85);
  close_bench(&b);
}

static void cross_entropy_run(bench *b) {
  const int64_t shape[2] = {ROWS, VOCAB};
  luna_begin_step(b->ctx);
  luna_backward(luna_cross_entropy(gate(b, b->p, 2, shape, true), b->labels.data(), NULL));
}
static void cross_entropy_row() {
  bench b = {};
  char name[96];
  if (counted()) return;
  open_bench(&b);
  b.marks_itself = true;
  b.p = input(&b, "none", 1, 1, 1, 1);
  b.values = input(&b, "logits", 2, ROWS, VOCAB, 1)->data;
  for (int64_t i = 0; i < ROWS; i++) b.labels.push_back((int32_t)(i * 7919 % VOCAB));
  snprintf(name, sizeof name, "cross-entropy, %d x %d, forward and backward", (int)ROWS, (int)VOCAB);
  /* logits twice: the loss is there before its gradient; and theirs */
  row(name, &b, cross_entropy_run, 12.0 * (double)(ROWS * VOCAB), true, 0.85);
  close_bench(&b);
}

/* a step wants a backward before it */
static void adamw_run(bench *b) { luna_optimizer_advance(b->adam), luna_optimizer_apply(b->adam); }
static void adamw_row() {
  bench b = {};
  char name[96];
  luna_optimizer_config adam = {};
  if (counted()) return;
  open_bench(&b);
  b.x = input(&b, "x", 2, N, DIM, 1);
  adam.weight_decay = 0.01f;
  b.adam = luna_adamw(b.inputs, &adam);
  luna_begin_step(b.ctx);
  luna_backward(mean(b.x));          /* so that there is a gradient; the updates leave zeros */
  check(&b);
  snprintf(name, sizeof name, "AdamW, %.1fM parameters", (double)(N * DIM) * 1e-6);
  /* value, gradient, two moments, read and written; before it the norm reads the gradient */
  row(name, &b, adamw_run, 36.0 * (double)(N * DIM), true, 0.85);
  close_bench(&b);
}

/* ---- a byte classifier's whole training step, as in bench_layers.c ---- */
static void classifier_run(bench *b) {
  luna_begin_step(b->ctx);
  const luna_input input = {b->tokens.data(), b->lengths.data(), BATCH, LENGTH, NULL};
  luna_backward(luna_cross_entropy(luna_classifier_forward(&b->model, &input), b->labels.data(), NULL));
  luna_optimizer_step(b->adam);
}
static void classifier_row() {
  const double d = (double)CLASSIFIER_DIM, tokens = (double)(BATCH * LENGTH);
  bench b = {};
  char name[96];
  luna_classifier_config config = {};
  luna_optimizer_config adam = {};
  if (counted()) return;
  open_bench(&b);
  config.vocab = 256;
  config.classes = 2;
  config.pooling = LUNA_POOLING_MEAN;
  config.encoder.layers = 4;
  config.encoder.layer.dim = CLASSIFIER_DIM;
  config.encoder.layer.heads = 4;
  config.encoder.layer.ffn = CLASSIFIER_FFN;
  config.encoder.layer.memory = 16;
  if (luna_classifier_init(&b.model, b.params, &config) != LUNA_OK) fail("luna_classifier_init", luna_error(b.ctx));
  adam.lr = 1e-4f;
  b.adam = luna_adam(b.params, &adam);
  for (int64_t i = 0; i < BATCH * LENGTH; i++) b.tokens.push_back((int32_t)(i * 7919 % 256));
  for (int64_t i = 0; i < BATCH; i++) b.labels.push_back((int32_t)(i % 2)), b.lengths.push_back((int32_t)LENGTH);
  snprintf(name, sizeof name, "classifier, batch %d, n = %d, training step", (int)BATCH, (int)LENGTH);
  const double ms = row(name, &b, classifier_run, 3 * 4 * tokens * (8 * 4 * 16 * d + 4 * d * (double)CLASSIFIER_FFN),
                        false, 0);
  if (!profiling)
    printf("    %.0f tokens/s, %.1f MB at most\n", 1e3 * tokens / ms, (double)luna_memory(b.ctx).peak * 1e-6);
  close_bench(&b);
}

/* ---- a stream's tokens, by the clock: a step returns when its logits are there ---- */
static void stream_row(const char *name, bool by_graph) {
  static luna_backend table;           /* without tokens that are graphs */
  bench b = {};
  luna_lm model;
  luna_lm_config config = {};
  luna_options options = {};
  int32_t token = 7;
  long count = 0;
  table = *luna_cuda_backend(0);
  table.token = NULL;
  options.backend = by_graph ? luna_cuda_backend(0) : &table;
  config.layers = 4;
  config.layer.dim = CLASSIFIER_DIM;
  config.layer.ffn = CLASSIFIER_FFN;
  b.ctx = luna_open(&options);
  if (!b.ctx) fail("luna_open", "no memory");
  check(&b);
  if (luna_lm_init(&model, luna_params_open(b.ctx), &config) != LUNA_OK ||
      !(b.tokens_of = luna_stream_open(&model, NULL))) fail("a stream", luna_error(b.ctx));
  for (int i = 0; i < 8; i++)
    if (!luna_stream_step(b.tokens_of, &token)) fail("a stream's step", luna_stream_error(b.tokens_of));
  const double began = seconds();
  while (seconds() - began < (LEAST_RUNS == 1 ? 0.01 : 1.5) && luna_stream_step(b.tokens_of, &token)) count++;
  printf("stream of 4 layers, d = %d, %s: %.0f tokens/s\n", (int)CLASSIFIER_DIM, name,
         (double)count / (seconds() - began));
  luna_stream_close(b.tokens_of);
  luna_close(b.ctx);
}

static int show_device() {
  cudaDeviceProp device;
  luna_options options = {};
  options.backend = luna_cuda_backend(0);
  luna_ctx *ctx = luna_open(&options);
  if (!ctx || luna_error_status(ctx) != LUNA_OK) fail("no device", ctx ? luna_error(ctx) : "no memory");
  must(cudaGetDeviceProperties(&device, 0), "the device");
  find_peaks();
  printf("%.64s: compute capability %d.%d, %d multiprocessors, %.1f GB, %d MB of second-level cache, %d KB of shared "
         "memory a block\npeaks by its clocks: %.0f GB/s, float32 %.1f, TF32 %.0f, BF16 %.0f TFLOP/s\n", device.name,
         device.major, device.minor, device.multiProcessorCount, (double)device.totalGlobalMem * 1e-9,
         device.l2CacheSize >> 20, (int)(device.sharedMemPerBlockOptin >> 10), gpu.memory * 1e-9, gpu.flops[0] * 1e-12,
         gpu.flops[1] * 1e-12, gpu.flops[2] * 1e-12);
  luna_close(ctx);
  return 0;
}

/* the rows of layers and models, in the mode and manner that are set */
static void model_rows() {
  static const int64_t slots[3] = {16, 64, 256};
  static const double causal[2] = {0.40, 0.50};
  char text[96];
  snprintf(text, sizeof text, "n = %d, d = %d, %d heads", (int)N, (int)DIM, (int)HEADS);
  title(text);
  for (int i = 0; i < 3; i++) layer_row("attention core, tied", CORE, slots[i], false, i ? 0.50 : 0.60);
  for (int i = 0; i < 3; i++)
    for (int training = 0; training < 2; training++)
      layer_row("nested attention layer", NESTED, slots[i], training, 0.65);
  for (int i = 0; i < 2; i++)
    for (int training = 0; training < 2; training++)
      layer_row("causal attention layer", CAUSAL, slots[i], training, causal[i]);
  snprintf(text, sizeof text, "4-layer byte classifier, d = %d, 4 heads, ffn %d, l = 16", (int)CLASSIFIER_DIM,
           (int)CLASSIFIER_FFN);
  title(text);
  classifier_row();
}
static void memory_rows() {
  title("what only moves memory");
  norm_row(false);
  norm_row(true);
  adamw_row();
  cross_entropy_row();
}
static void all_rows() {
  for (int i = LUNA_CUDA_F32; i <= LUNA_CUDA_BF16; i++) {
    math = (luna_cuda_math)i;
    model_rows();
    graphed = true;                  /* of kernels that take milliseconds a graph saves nothing */
    classifier_row();
    graphed = false;
    if (math == LUNA_CUDA_F32) memory_rows();
  }
}
/* what a profiler is to see: each kind of kernel once, and small, since it saves what a launch writes and runs it
   several times */
static int profile_rows() {
  profiling = true;
#ifndef BENCH_TINY
  N = 16384, ROWS = 1024, BATCH = 4;
#endif
  memory_rows();
  layer_row("attention core, tied", CORE, 64, false, 0);
  for (int i = LUNA_CUDA_F32; i <= LUNA_CUDA_TF32; i++) {
    math = (luna_cuda_math)i;
    layer_row("nested attention layer", NESTED, 16, true, 0);
    layer_row("causal attention layer", CAUSAL, 16, true, 0);
    classifier_row();
  }
  return 0;
}

int main(int argc, char **argv) {
  const char *file = NULL;
  double limit = 0;
  char text[96];
  cudaDeviceProp device;
  for (int i = 1; i < argc; i++) {
    if (strcmp(argv[i], "--device") == 0) return show_device();
    if (strcmp(argv[i], "--stream") == 0) {
      stream_row("one launch a token", true);
      stream_row("call by call", false);
      return 0;
    }
    if (strcmp(argv[i], "--profile") == 0) return profile_rows();
    if (strcmp(argv[i], "--seconds") == 0 && i + 1 < argc) limit = atof(argv[++i]);
    else file = argv[i];
  }
  open_machine();                    /* without a device, the context's sentence */
  must(cudaGetDeviceProperties(&device, 0), "the device");
  if (file && (json = fopen(file, "w")) == NULL) fail(file, "cannot be written");
  counting = true;
  all_rows();
  counting = false;
  if (limit > 0) deadline = seconds() + limit;
  snprintf(text, sizeof text, "%.64s: what shares are of", device.name);
  title(text);
  snprintf(text, sizeof text, "copy of %.1f MB on the device", (double)COPIED * 1e-6);
  math = LUNA_CUDA_F32;
  row(text, &gpu.own, copy_run, copy_bytes(), true, 0);
  for (int i = LUNA_CUDA_F32; i <= LUNA_CUDA_BF16; i++) {
    math = (luna_cuda_math)i;
    snprintf(text, sizeof text, "gemm %d x %d, k = %d", (int)SIDE, (int)SIDE, (int)SIDE);
    row(text, &gpu.own, gemm_run, gemm_flops(), false, 0);
  }
  all_rows();
  if (rows_skipped) printf("%d rows did not fit in the %.0f seconds\n", rows_skipped, limit);
  close_machine();
  if (json) fclose(json);
#ifdef LUNA_CUDA_HOST
  if (cuda_host.errors) fail("cuda_host", cuda_host.message);
#endif
  return 0;
}
