/* luna_cuda.cuh against the CPU: every op, layer and model with its gradients, the authors' golden files, training,
   checkpoints, a step as a graph, the rounded modes, failures, also of streams. Links with cuda_device.cu: on a machine
   without a GPU (make test) kernels run through cuda_host.h, in three orders, and whatever it finds is a failure; make
   cuda-test is the same on a GPU. With CUDA_SMALL, linked with build/luna.o: one variant of each op and layer in
   one order, graphs of streams, memory, refusals. */
#include "test.h"
#include <pthread.h>
#include <stdbool.h>
static bool cuda_separate; /* each tensor on the device in an allocation of its own */
#define LI_SEPARATE cuda_separate
#define LUNA_IMPLEMENTATION
#include "luna.h"
#include "engine/device_checks.h"
#include "engine/op_can.h"
#include "cuda_device.h"
#define GOLDEN_INCLUDED
#include "models/golden.c"
#define FEATURES_INCLUDED
#include "models/features.c"

#if defined(__SANITIZE_ADDRESS__)
#define CUDA_SANITIZED 1
#elif defined(__has_feature)
#define CUDA_SANITIZED __has_feature(address_sanitizer)
#else
#define CUDA_SANITIZED 0
#endif
#ifndef CUDA_SMALL
#define CUDA_SMALL 0
#endif

static device cuda;

/* ---- a custom op with kernels of its own ---- */
static void check_custom(void) {
  enum { COUNT = 300 };
  const int64_t n = COUNT;
  float *a = common_random(n, 1, 1), *b = common_random(n, 2, 1), got[3][COUNT];
  luna_ctx *ctx = device_open(&cuda, 1);
  luna_begin_step(ctx);
  luna_tensor *in[2] = {luna_require_grad(luna_tensor_new(ctx, a, 1, &n)),
                        luna_require_grad(luna_tensor_new(ctx, b, 1, &n))};
  luna_tensor *y = luna_custom_op(in, 2, 1, &n, &cuda_square);
  luna_read(y, got[0]);
  CHECK(luna_backward(luna_sum(y, 0)) == LUNA_OK, "a custom op has no backward: %s", luna_error(ctx));
  luna_read_grad(in[0], got[1]);
  luna_read_grad(in[1], got[2]);
  for (int64_t i = 0; i < n; i++) {
    const float square = 0.5f * a[i] * b[i] * b[i], da = 0.5f * b[i] * b[i], db = a[i] * b[i];
    if (fabsf(got[0][i] - square) > 1e-6f || fabsf(got[1][i] - da) > 1e-6f || fabsf(got[2][i] - db) > 1e-6f)
      CHECK(0, "element %d of a custom op is %g, not %g, its gradients %g and %g, not %g and %g", (int)i,
            (double)got[0][i], (double)square, (double)got[1][i], (double)got[2][i], (double)da, (double)db);
  }
  luna_close(ctx);
  free(a), free(b);
}

/* ---- steps one by one, and the same steps in graphs: other tokens in each, dropout, a rate that changes, one that is
   skipped for a NaN, one with more tokens, and an inference between two that moves the step's memory ---- */
enum { GRAPH_STEPS = 14, GRAPH_NAN = 5, GRAPH_LONG = 6, GRAPH_MOVED = 8 };
typedef struct graph_results {
  float losses[GRAPH_STEPS], *parameters;
  int64_t skipped;
} graph_results;
static luna_tensor *graph_logits(device_run *r, const int32_t *tokens, int64_t n) {
  return luna_lm_forward(&r->lm, &(luna_input){ tokens, NULL, 2, n, NULL });
}
static void graph_run(bool graphed, int kind, graph_results *results) {
  device_run r;
  float kept = 0;
  memset(results, 0, sizeof *results);
  if (!device_run_start(&r, &cuda, kind, 9, "a graph")) return luna_close(r.ctx);
  luna_graph *graph = graphed ? luna_graph_open(r.ctx) : NULL;
  CHECK(!graphed || graph, "no graph opens: %s", luna_error(r.ctx));
  for (int step = 0; step < GRAPH_STEPS; step++) {
    const int64_t n = step == GRAPH_LONG ? 25 : 19;
    int32_t *tokens = common_tokens(2 * n + 1, 40 + (uint64_t)step, 31);
    float *all = common_parameters(r.params);
    if (step == GRAPH_NAN) kept = all[5], cuda_poke(r.ctx, r.lm.embedding->data + 5, NAN);
    if (step == GRAPH_NAN + 1) cuda_poke(r.ctx, r.lm.embedding->data + 5, kept);
    free(all);
    if (step == GRAPH_MOVED) {
      int32_t *many = common_tokens(80, 3, 31);
      luna_begin_inference(r.ctx);
      CHECK(graph_logits(&r, many, 40) != NULL, "an inference: %s", luna_error(r.ctx));
      free(many);
    }
    cuda_counted();
    CHECK(luna_graph_begin(graph) == LUNA_OK, "a graph does not begin: %s", luna_error(r.ctx));
    luna_begin_step(r.ctx);
    luna_tensor *loss = luna_cross_entropy(graph_logits(&r, tokens, n), tokens + 1, NULL);
    luna_backward(loss);
    CHECK(luna_optimizer_step(r.optimizer) == LUNA_OK, "step %d: %s", step, luna_error(r.ctx));
    free(tokens);
    CHECK(luna_graph_end(graph) == LUNA_OK, "step %d in a graph: %s", step, luna_error(r.ctx));
    const cuda_counts is = cuda_counted();
    const bool whole = graph && (step == 4 || step >= GRAPH_STEPS - 2);
    const bool ran = cuda_emulated() ? is.replays == 1 : whole; /* a device does not count */
    CHECK((!cuda_emulated() && !whole) || (*luna_graph_reason(graph) == 0) == (graph && ran),
          "step %d: %ld graphs run, the reason is: %s", step, is.replays, luna_graph_reason(graph));
    CHECK(!whole || !cuda_emulated() || (is.replays == 1 && is.launches == 0 && is.copies == 1 &&
                                         is.synchronisations == 0),
          "optimiser %d, step %d is %ld graphs, %ld launches, %ld copies, %ld waits: %s", kind, step, is.replays,
              is.launches,
          is.copies, is.synchronisations, luna_graph_reason(graph));
    results->losses[step] = luna_item(loss);
  }
  results->skipped = luna_optimizer_skipped(r.optimizer);
  results->parameters = common_parameters(r.params);
  luna_close(r.ctx);
}
static void check_graph(void) {
  for (int kind = 2; kind < DEVICE_RUNS; kind++) { /* AdamW, with all that an optimiser has, Apollo, a routed memory */
    graph_results one, whole;
    device_run r;
    graph_run(false, kind, &one);
    graph_run(true, kind, &whole);
    CHECK(one.skipped == 1 && whole.skipped == 1, "optimiser %d: %lld steps are skipped, %lld in graphs", kind,
          (long long)one.skipped, (long long)whole.skipped);
    for (int step = 0; step < GRAPH_STEPS; step++)
      CHECK(memcmp(&one.losses[step], &whole.losses[step], sizeof(float)) == 0 ||
                (step == GRAPH_NAN && one.losses[step] != one.losses[step] && whole.losses[step] != whole.losses[step]),
            "optimiser %d, step %d: the loss is %.9g, in a graph %.9g", kind, step, (double)one.losses[step],
            (double)whole.losses[step]);
    if (device_run_start(&r, NULL, kind, 9, "a graph") && one.parameters && whole.parameters)
      CHECK(memcmp(one.parameters, whole.parameters, (size_t)luna_params_element_count(r.params) * sizeof(float)) == 0,
            "optimiser %d: graphs end in other parameters: %s", kind,
            common_where(whole.parameters, one.parameters, luna_params_element_count(r.params)));
    luna_close(r.ctx);
    free(one.parameters), free(whole.parameters);
  }
}

/* what makes a step run by itself: a custom op that does not say that it may be recorded, and reading before the end */
static void graph_square(luna_ctx *ctx, luna_graph *graph, const luna_custom *custom, bool reads, float value,
                         bool whole) {
  const int64_t one = 1;
  luna_graph_begin(graph);
  luna_begin_step(ctx);
  luna_tensor *x = luna_require_grad(luna_tensor_new(ctx, &value, 1, &one)), *both[2] = {x, x};
  luna_tensor *y = luna_scale(luna_custom_op(both, 2, 1, &one, custom), 3);
  if (reads)
    CHECK(luna_item(y) == 1.5f * value * value * value, "read before the end, a custom op's result is %g",
          (double)luna_item(y));
  CHECK(luna_backward(y) == LUNA_OK && luna_graph_end(graph) == LUNA_OK, "a custom op in a graph: %s", luna_error(ctx));
  CHECK((*luna_graph_reason(graph) == 0) == whole, "a custom op: %s", luna_graph_reason(graph));
  CHECK(luna_item(y) == 1.5f * value * value * value, "a custom op of %g in a graph is %g, not %g", (double)value,
        (double)luna_item(y), (double)(1.5f * value * value * value));
}
/* logits that are made by parts */
static void check_graph_logits(void) {
  enum { ROWS = 6, IN = 4, CLASSES = 1100, COUNT = CLASSES * IN };
  const int64_t shape[2] = {CLASSES, IN}, rows[2] = {ROWS, IN};
  float *gradient[2] = {common_floats(COUNT), common_floats(COUNT)};
  for (int graphed = 0; graphed < 2; graphed++) {
    luna_ctx *ctx = device_open(&cuda, 1);
    luna_params *params = luna_params_open(ctx);
    luna_tensor *w = luna_param(params, "w", 2, shape, (luna_init){LUNA_INIT_NORMAL, 1});
    luna_graph *graph = graphed ? luna_graph_open(ctx) : NULL;
    for (int step = 0; step < 6; step++) {
      float *x = common_random(ROWS * IN, 60 + (uint64_t)step, 1);
      int32_t *labels = common_tokens(ROWS, 90 + (uint64_t)step, CLASSES);
      luna_graph_begin(graph);
      luna_begin_step(ctx);
      luna_backward(luna_linear_cross_entropy(luna_tensor_new(ctx, x, 2, rows), w, NULL, labels, NULL));
      CHECK(luna_graph_end(graph) == LUNA_OK && luna_error_status(ctx) == LUNA_OK, "many classes in a graph: %s",
            luna_error(ctx));
      free(x), free(labels);
    }
    CHECK(!graphed || *luna_graph_reason(graph) == 0, "many classes: %s", luna_graph_reason(graph));
    luna_read_grad(w, gradient[graphed]);
    luna_close(ctx);
  }
  CHECK(memcmp(gradient[0], gradient[1], COUNT * sizeof(float)) == 0,
        "many classes have another gradient in a graph: %s", common_where(gradient[1], gradient[0], COUNT));
  free(gradient[0]), free(gradient[1]);
}
static void check_graph_reasons(void) {
  luna_custom custom = cuda_square;
  luna_ctx *ctx = device_open(&cuda, 1), *host = luna_open(NULL);
  luna_graph *graph = luna_graph_open(ctx), *other = luna_graph_open(ctx);
  for (int step = 0; step < 5; step++) graph_square(ctx, graph, &custom, false, 2, false);
  CHECK(strstr(luna_graph_reason(graph), "custom op"), "a custom op: %s", luna_graph_reason(graph));
  custom.recordable = true;
  for (int step = 0; step < 6; step++)
    graph_square(ctx, graph, &custom, step == 4, (float)step, step != 0 && step != 4);
  CHECK(luna_graph_begin(graph) == LUNA_OK && luna_graph_begin(other) == LUNA_BAD_ARGUMENT &&
            luna_graph_end(other) == LUNA_BAD_ARGUMENT && strstr(luna_error(ctx), "take turns"),
        "two graphs at a time: %s", luna_error(ctx));
  luna_graph_close(graph);           /* one that has begun */
  CHECK(luna_begin_step(ctx) == LUNA_OK && luna_graph_end(NULL) == LUNA_OK, "after a graph: %s", luna_error(ctx));
  CHECK(luna_graph_begin(other) == LUNA_OK && luna_graph_end(other) == LUNA_OK, "a graph of nothing: %s",
        luna_error(ctx));
  CHECK(!luna_graph_open(host) && luna_error_status(host) == LUNA_OK && *luna_graph_reason(NULL), "the CPU has graphs");
  luna_close(ctx);
  luna_close(host);
}

/* work of the user's own between begin and end comes after what was called before it */
static void check_graph_order(void) {
  const int64_t one = 1;
  const float two = 2;
  luna_ctx *ctx = device_open(&cuda, 1);
  luna_graph *graph = luna_graph_open(ctx);
  for (int step = 0; step < 4; step++) {
    luna_graph_begin(graph);
    luna_begin_inference(ctx);
    luna_tensor *x = luna_tensor_new(ctx, &two, 1, &one);
    if (step == 2) cuda_poke(ctx, x->data, 5);
    luna_tensor *y = luna_scale(x, 3);
    CHECK(luna_graph_end(graph) == LUNA_OK && luna_item(y) == (step == 2 ? 15 : 6), "step %d in order is %g: %s", step,
          (double)luna_item(y), luna_error(ctx));
    CHECK(step != 2 || strstr(luna_graph_reason(graph), "luna_cuda_stream"), "its stream was asked for: %s",
          luna_graph_reason(graph));
  }
  luna_close(ctx);
}

/* a stream's tokens: from the third on each is one launch, after a chunk too, but for one inside a graph; with the bits
   of a device without graphs */
static void check_stream_graphs(void) {
  enum { TOKENS = 9 };
  luna_backend table = *cuda.backend;
  device without = cuda;
  table.token = NULL;
  without.backend = &table;
  for (int kind = 0; kind < 3; kind++) {
    device_models m[2];
    const bool one = device_models_open(&m[0], &without, kind), two = device_models_open(&m[1], &cuda, kind);
    if (one && two) {
      const int64_t batch = m[0].config.batch, row = batch * STREAM_VOCAB;
      int32_t *tokens = common_tokens(batch * TOKENS, 7, STREAM_VOCAB);
      luna_stream *s[2] = {device_stream(&m[0], 1), device_stream(&m[1], 1)};
      luna_graph *graph = luna_graph_open(m[1].ctx[1]);
      for (int at = 0; at < TOKENS; at++) {
        luna_graph_begin(at == 6 ? graph : NULL);
        const float *expected = luna_stream_step(s[0], tokens + at * batch);
        cuda_counted();
        const float *got = luna_stream_step(s[1], tokens + at * batch);
        const cuda_counts is = cuda_counted();
        CHECK(luna_graph_end(at == 6 ? graph : NULL) == LUNA_OK, "a token in a graph: %s", luna_error(m[1].ctx[1]));
        CHECK(expected && got && memcmp(expected, got, (size_t)row * sizeof(float)) == 0,
              "kind %d, token %d has other bits in a graph: %s", kind, at, common_where(got, expected, row));
        CHECK(at < 3 || at == 6 || !cuda_emulated() || (is.replays == 1 && is.launches + is.copies == 2),
              "kind %d, token %d is %ld graphs, %ld launches, %ld copies, %ld waits", kind, at, is.replays, is.launches,
              is.copies, is.synchronisations);
        if (at == 4)
          CHECK(luna_stream_prefill(s[0], &(luna_input){ tokens, NULL, 0, 2, NULL }) &&
                luna_stream_prefill(s[1], &(luna_input){ tokens, NULL, 0, 2, NULL }), "a prefill fails");
      }
      CHECK(strstr(luna_graph_reason(graph), "a stream worked"), "a token in a graph: %s", luna_graph_reason(graph));
      luna_stream_close(s[0]), luna_stream_close(s[1]);
      free(tokens);
    }
    for (int i = 0; i < 4; i++) luna_close(m[i / 2].ctx[i % 2]);
  }
}

/* a context that shares a set, in a graph */
static void check_shared_graph(void) {
  static const int32_t tokens[20] = {3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4};
  device_run owner;
  luna_lm lm;
  float expected[20 * 31], got[20 * 31] = {0};
  if (device_run_start(&owner, &cuda, 2, 9, "a shared graph")) {
    luna_ctx *ctx = device_open(&cuda, 1);
    luna_graph *graph = luna_graph_open(ctx);
    CHECK(luna_lm_init(&lm, luna_params_share(ctx, owner.params), &owner.lm.config) == LUNA_OK, "sharing: %s",
          luna_error(ctx));
    for (int i = 0; i < 6; i++) {
      luna_graph_begin(graph);
      luna_begin_inference(ctx);
      luna_tensor *y = luna_lm_forward(&lm, &(luna_input){ tokens, NULL, 1, 20, NULL });
      CHECK(luna_graph_end(graph) == LUNA_OK && luna_read(y, i ? got : expected) == LUNA_OK, "a shared set: %s",
            luna_error(ctx));
      CHECK(i == 0 || memcmp(got, expected, sizeof got) == 0, "inference %d of a shared set has other bits: %s", i,
            common_where(got, expected, 20 * 31));
    }
    CHECK(*luna_graph_reason(graph) == 0, "a shared set's inference is not recorded: %s", luna_graph_reason(graph));
    luna_close(ctx);
  }
  luna_close(owner.ctx);
}

/* ---- what luna_memory says is what the device gives, within 10%; a steady step takes no more; few copies ---- */
static void check_memory(void) {
  enum { N = 256, BATCH = 2, VOCAB = 64 };
  const size_t opened = cuda.backend->opened;
  luna_classifier model;
  luna_classifier_config config = {.vocab = VOCAB, .classes = 3,
                                   .encoder = {.layers = 2, .layer = { .dim = 48, .heads = 2, .ffn = 192 }}};
  int32_t *tokens = common_tokens(N * BATCH, 3, VOCAB);
  const int32_t labels[BATCH] = {1, 2};
  const luna_input input = {tokens, NULL, BATCH, N, NULL};
  if (!cuda_emulated()) return;
  for (int training = 0; training < 2; training++) {
    luna_ctx *ctx = device_open(&cuda, 1);
    luna_params *params = luna_params_open(ctx);
    CHECK(luna_classifier_init(&model, params, &config) == LUNA_OK, "a classifier: %s", luna_error(ctx));
    luna_optimizer *adam = luna_adamw(params, NULL);
    cuda_counted();
    for (int step = 0; step < 4; step++) {
      luna_tensor *logits;
      if (training) luna_begin_step(ctx);
      else luna_begin_inference(ctx);
      logits = luna_classifier_forward(&model, &input);
      if (training) luna_backward(luna_cross_entropy(logits, labels, NULL));
      if (training) luna_optimizer_step(adam);
      const size_t said = luna_memory(ctx).peak - opened;
      const cuda_counts is = cuda_counted();
      CHECK(luna_error_status(ctx) == LUNA_OK, "step %d: %s", step, luna_error(ctx));
      /* the first steps, which take one chunk after the other, lose the ends of chunks */
      CHECK((double)(is.max_allocated - opened) <= 1.1 * (double)said || step < (training ? 2 : 3),
            "%s, step %d: the device gives %zu bytes, luna_memory says %zu", training ? "training" : "inference", step,
            is.max_allocated - opened, said);
      CHECK(is.copies <= 8, "%s, step %d: %ld copies", training ? "training" : "inference", step, is.copies);
    }
    luna_close(ctx);
  }
  free(tokens);
}

/* of 30,000 words on 2048 tokens a step stores the logits and their gradient at most, and by luna_lm_loss parts of them
   alone */
static void check_logits_bytes(void) {
  enum { WORDS = 30000, TOKENS = 2048 };
  const double logits = (double)WORDS * TOKENS * sizeof(float);
  int32_t *tokens = common_tokens(TOKENS + 1, 4, WORDS);
  for (int loss = 0; loss < 2; loss++) {
    luna_options options = {.measure = true, .threads = 1, .backend = cuda.backend};
    luna_lm_config config = {.vocab = WORDS, .layers = 1, .layer = {.dim = 16, .heads = 2, .ffn = 24}};
    luna_lm model;
    luna_ctx *ctx = luna_open(&options);
    luna_params *params = luna_params_open(ctx);
    const luna_input input = {tokens, NULL, 1, TOKENS, NULL};
    CHECK(luna_lm_init(&model, params, &config) == LUNA_OK, "measuring: %s", luna_error(ctx));
    luna_begin_step(ctx);
    CHECK(luna_backward(loss ? luna_lm_loss(&model, &input, tokens + 1)
                             : luna_cross_entropy(luna_lm_forward(&model, &input), tokens + 1, NULL)) == LUNA_OK,
          "measuring: %s", luna_error(ctx));
    const double rest = (double)(luna_memory(ctx).peak - cuda.backend->opened) -
                        2 * sizeof(float) * (double)luna_params_element_count(params);
    CHECK(rest < (loss ? 0.4 : 2.4) * logits,
          "a step with %d words takes %.1f MB beside its parameters; the logits are %.1f MB", WORDS, rest * 1e-6,
          logits * 1e-6);
    luna_close(ctx);
  }
  free(tokens);
}

/* ---- optimisers as on the CPU: many parameters, some empty, one frozen; few launches whatever their number ---- */
enum { MANY = 90 };
static luna_optimizer *many_open(luna_ctx *ctx, int kind, luna_tensor *p[MANY]) {
  luna_params *params = luna_params_open(ctx);
  for (int i = 0; i < MANY; i++) {
    const int64_t size = i == 40 ? 40000 : i % 13;
    char name[16];
    snprintf(name, sizeof name, i % 7 ? "p%d" : "cold%d", i);
    p[i] = luna_param(params, name, 1, &size, (luna_init){LUNA_INIT_NORMAL, 1});
  }
  luna_optimizer *o = kind == 0   ? luna_sgd(params, &(luna_optimizer_config){.momentum = 0.9f, .clip = 0.5f})
                      : kind == 1 ? luna_adamw(params, &(luna_optimizer_config){.weight_decay = 0.1f, .clip = 0.5f,
                                                                                       .average = 0.9f})
                                  : luna_apollo(params, NULL);
  luna_params_freeze(params, "cold", true);
  luna_optimizer_add_group(o, &(luna_param_group){.name = "p1", .lr_factor = 0.5f, .decay_factor = -1});
  return o;
}
static void many_step(luna_ctx *ctx, luna_tensor *p[MANY]) {
  luna_begin_step(ctx);
  luna_tensor *loss = NULL;
  for (int i = 0; i < MANY; i++) {
    if (!luna_count(p[i])) continue;
    luna_tensor *sum = luna_sum(luna_mul(p[i], p[i]), 0);
    loss = loss ? luna_add(loss, sum) : sum;
  }
  CHECK(luna_backward(luna_scale(loss, 0.01f)) == LUNA_OK, "many parameters: %s", luna_error(ctx));
}
static void check_optimizers(void) {
  for (int kind = 0; kind < 3; kind++) {
    device host = cuda;
    luna_tensor *p[2][MANY];
    host.backend = NULL;
    luna_ctx *ctx[2] = {device_open(&host, 3), device_open(&cuda, 3)};
    luna_optimizer *o[2] = {many_open(ctx[0], kind, p[0]), many_open(ctx[1], kind, p[1])};
    for (int step = 0; step < 3; step++)
      for (int i = 0; i < 2; i++) {
        many_step(ctx[i], p[i]);
        cuda_counted();
        CHECK(luna_optimizer_step(o[i]) == LUNA_OK, "optimiser %d: %s", kind, luna_error(ctx[i]));
        const cuda_counts is = cuda_counted();
        /* averages begin with a copy each */
        CHECK(is.launches <= 6 && is.copies <= 2 + (kind == 1 && step == 0 ? MANY : 0),
              "optimiser %d: %ld launches and %ld copies for %d parameters", kind, is.launches, is.copies, MANY);
      }
    for (int i = 0; i < 2 && kind == 1; i++)
      CHECK(luna_optimizer_swap_average(o[i]) == LUNA_OK, "averages: %s", luna_error(ctx[i]));
    for (int i = 0; i < MANY; i++) {
      const int64_t n = luna_count(p[0][i]);
      float *expected = common_floats(n), *got = common_floats(n);
      luna_read(p[0][i], expected);
      luna_read(p[1][i], got);
      CHECK(common_error(got, expected, n, 1e-6) <= 1e-5, "optimiser %d: parameter %d is off by %.3g: %s", kind, i,
            common_error(got, expected, n, 1e-6), common_where(got, expected, n));
      if (p[1][i]->grad) luna_read_grad(p[1][i], got); /* a frozen one has none */
      for (int64_t j = 0; p[1][i]->grad && j < n; j++)
        if (got[j] != 0) { CHECK(0, "optimiser %d leaves gradient %d: %g", kind, i, (double)got[j]); break; }
      free(expected), free(got);
    }
    luna_close(ctx[0]);
    luna_close(ctx[1]);
  }
}

/* ---- gradients clipped by themselves, as on the CPU ---- */
static void check_clip(void) {
  device host = cuda;
  float norm[2][2], *g[2];
  const int64_t size = 70000;
  host.backend = NULL;
  for (int i = 0; i < 2; i++) {
    luna_ctx *ctx = device_open(i ? &cuda : &host, 3);
    luna_params *params = luna_params_open(ctx);
    luna_tensor *w = luna_param(params, "w", 1, &size, (luna_init){LUNA_INIT_NORMAL, 1});
    g[i] = common_floats(size);
    luna_begin_step(ctx);
    CHECK(luna_backward(luna_sum(luna_mul(w, w), 0)) == LUNA_OK, "clipping: %s", luna_error(ctx));
    for (int k = 0; k < 2; k++) norm[i][k] = luna_params_clip_grad(params, 3);
    CHECK(luna_read_grad(w, g[i]) == LUNA_OK && fabsf(norm[i][1] - 3) < 1e-4f, "clipped to a norm of %g: %s",
          (double)norm[i][1], luna_error(ctx));
    luna_close(ctx);
  }
  CHECK(fabsf(norm[1][0] / norm[0][0] - 1) < 1e-6f && common_error(g[1], g[0], size, 1e-6) <= 1e-6,
        "clipped gradients: norm %g and %g, off by %.3g: %s", (double)norm[1][0], (double)norm[0][0],
        common_error(g[1], g[0], size, 1e-6), common_where(g[1], g[0], size));
  free(g[0]), free(g[1]);
}

/* ---- errors of the user's own calls are neither reported nor reset; a custom op's are reported ---- */
static void check_foreign_errors(void) {
  const int64_t n = 8;
  device_run r;
  cuda_left_error();
  for (int kind = 0; kind < 3; kind++) {
    /* a query that is not ready leaves no error */
    static const char *const names[3] = {"cudaErrorMemoryAllocation", "cudaSuccess", "cudaErrorInvalidValue"};
    const char *name = names[kind];
    if (kind == 0) cuda_leave_error();
    if (!device_run_start(&r, &cuda, 2, 1, name)) break;
    if (kind == 1) cuda_leave_not_ready(r.ctx);
    if (kind == 2) cuda_leave_launch(r.ctx);
    for (int step = 0; step < 2; step++) {
      const float loss = device_step(&r, step);
      CHECK(loss == loss && luna_error_status(r.ctx) == LUNA_OK, "%s of the user fails step %d: %s", name, step,
            luna_error(r.ctx));
    }
    luna_close(r.ctx);
    const char *left = cuda_left_error();
    CHECK(strcmp(left, name) == 0, "the user's %s became %s", name, left);
  }
  luna_ctx *ctx = device_open(&cuda, 1);
  luna_begin_inference(ctx);
  luna_tensor *x = luna_tensor_new(ctx, NULL, 1, &n), *both[2] = {x, x};
  CHECK(luna_custom_op(both, 2, 1, &n, &cuda_square) && luna_error_status(ctx) == LUNA_OK, "a custom op: %s",
        luna_error(ctx));
  CHECK(!luna_custom_op(&x, 1, 1, &n, &cuda_unlaunched) && luna_error_id_of(ctx) == LUNA_ERROR_BACKEND &&
      strstr(luna_error(ctx), "invalid argument"),
        "a custom op that cannot be launched: %s", luna_error(ctx));
  const char *left = cuda_left_error();
  CHECK(strcmp(left, "cudaSuccess") == 0, "a custom op's error was reported and stays: %s", left);
  luna_close(ctx);
  if (!cuda_emulated() || !device_run_start(&r, &cuda, 2, 1, "no memory")) return;
  cuda_fail(CUDA_NO_MEMORY, 1); /* given out again by the device after what was kept is released */
  device_step(&r, 0);
  left = cuda_left_error();
  CHECK(luna_error_status(r.ctx) == LUNA_OK && strcmp(left, "cudaSuccess") == 0,
        "a failure that was made good stays: %s, %s",
        left, luna_error(r.ctx));
  luna_close(r.ctx);
  /* a kernel of the user's that faults takes the device with it: what reads next says so, and closing still works */
  if (!device_run_start(&r, &cuda, 2, 1, "a fault of the user's")) return;
  device_step(&r, 0);
  cuda_fail(CUDA_FAULT, 1);
  cuda_poke(r.ctx, r.lm.embedding->data, 0);
  const float loss = device_step(&r, 1);
  CHECK(loss != loss && luna_error_id_of(r.ctx) == LUNA_ERROR_BACKEND &&
            strstr(luna_error(r.ctx), "CUDA device 0: an illegal memory access"),
        "after a fault of the user's kernel a step's loss is %g: %s", (double)loss, luna_error(r.ctx));
  luna_close(r.ctx);
  cuda_mend();
  CHECK(cuda_allocated() == 0, "a fault of the user's kernel leaves %zu bytes", cuda_allocated());
}

/* ---- two threads, each with contexts of its own on the one device, opened while the other thread works, and captures
   its steps in graphs: the bits of each alone ---- */
enum { THREADS = 2, THREAD_ROUNDS = 3, THREAD_STEPS = 4 };
typedef struct thread_run {
  int number;
  bool graphed, opened;
  float losses[THREAD_ROUNDS * THREAD_STEPS];
  char error[200];
} thread_run;
static void *thread_steps(void *arg) { /* no CHECK in here: it counts without a lock */
  thread_run *t = (thread_run *)arg;
  t->opened = true;
  for (int i = 0; i < THREAD_ROUNDS * THREAD_STEPS && t->opened; i += THREAD_STEPS) {
    device_run r;
    t->opened = device_run_open(&r, &cuda, 2, 20 + (uint64_t)t->number);
    luna_graph *graph = t->opened && t->graphed ? luna_graph_open(r.ctx) : NULL;
    for (int step = 0; step < THREAD_STEPS && t->opened; step++) {
      int32_t *tokens = common_tokens(19, 70 + (uint64_t)(10 * t->number + step), 31);
      luna_graph_begin(graph);
      luna_begin_step(r.ctx);
      luna_tensor *loss = luna_lm_loss(&r.lm, &(luna_input){ tokens, NULL, 2, 9, NULL }, tokens + 1);
      luna_backward(loss);
      luna_optimizer_step(r.optimizer);
      luna_graph_end(graph);
      t->losses[i + step] = luna_item(loss);
      free(tokens);
    }
    if (!t->opened || luna_error_status(r.ctx) != LUNA_OK)
      snprintf(t->error, sizeof t->error, "%s", r.ctx ? luna_error(r.ctx) : "no context");
    luna_close(r.ctx);
  }
  return NULL;
}
static void check_threads(void) {
  thread_run alone[THREADS], together[THREADS];
  pthread_t threads[THREADS];
  memset(alone, 0, sizeof alone), memset(together, 0, sizeof together);
  for (int i = 0; i < THREADS; i++) {
    alone[i].number = together[i].number = i;
    together[i].graphed = i == 1;
    thread_steps(&alone[i]);
  }
  for (int i = 0; i < THREADS; i++)
    if (pthread_create(&threads[i], NULL, thread_steps, &together[i]) != 0) exit(2);
  for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
  for (int i = 0; i < THREADS; i++)
    for (int step = 0; step < THREAD_ROUNDS * THREAD_STEPS; step++)
      CHECK(together[i].opened && memcmp(&alone[i].losses[step], &together[i].losses[step], sizeof(float)) == 0,
            "thread %d, step %d: the loss is %.9g, alone %.9g: %s, %s", i, step, (double)together[i].losses[step],
            (double)alone[i].losses[step], together[i].error, alone[i].error);
}

/* ---- contexts closed while their work is queued, in a graph that has begun, or with a stream that has not been read;
   what another context computes meanwhile stays right ---- */
static void check_closing(void) {
  static const int32_t tokens[38] = {3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4};
  device_run other, again;
  float expected = NAN;
  if (device_run_start(&again, &cuda, 2, 9, "closing")) expected = device_step(&again, 0);
  luna_close(again.ctx);
  for (int kind = 0; kind < 4; kind++) {
    device_run r;
    const bool open = device_run_start(&other, &cuda, 2, 9, "another context");
    if (device_run_start(&r, &cuda, 2, 1, "a context to be closed") && open) {
      luna_graph *graph = kind % 2 ? luna_graph_open(r.ctx) : NULL;
      for (int step = 0; step < 4; step++) { /* queued, recorded, or launched as a graph; none is read */
        luna_graph_begin(graph);
        luna_begin_step(r.ctx);
        luna_backward(luna_lm_loss(&r.lm, &(luna_input){ tokens, NULL, 2, 18, NULL }, tokens + 1));
        luna_optimizer_step(r.optimizer);
        if (kind != 3 || step < 3) luna_graph_end(graph);
      }
      if (kind == 2) {
        luna_begin_inference(r.ctx);
        luna_stream *s = luna_stream_open(&r.lm, NULL);
        CHECK(luna_stream_step(s, tokens), "a stream before closing: %s", luna_error(r.ctx));
        luna_stream_close(s);
      }
      CHECK(luna_error_status(r.ctx) == LUNA_OK, "closing, kind %d: %s", kind, luna_error(r.ctx));
      luna_close(r.ctx);
      const float loss = device_step(&other, 0);
      CHECK(memcmp(&loss, &expected, sizeof loss) == 0, "closing, kind %d: another context's loss is %.9g, not %.9g",
            kind, (double)loss, (double)expected);
    }
    luna_close(other.ctx);
    CHECK(cuda_allocated() == 0, "closing, kind %d: %zu bytes are left", kind, cuda_allocated());
  }
}

/* ---- memory that ends in the middle of a step, which is longer than those before: a sentence; and when there is
   memory again the context goes on as one that never failed, in graphs too ---- */
static bool full_step(device_run *r, luna_graph *graph, int64_t n, float *loss) {
  int32_t *tokens = common_tokens(2 * n + 1, 40 + (uint64_t)n, 31);
  luna_graph_begin(graph);
  luna_begin_step(r->ctx);
  luna_tensor *t = luna_cross_entropy(luna_lm_forward(&r->lm, &(luna_input){ tokens, NULL, 2, n, NULL }), tokens + 1,
                                      NULL);
  luna_backward(t);
  luna_optimizer_step(r->optimizer);
  luna_graph_end(graph);
  free(tokens);
  *loss = luna_error_status(r->ctx) == LUNA_OK ? luna_item(t) : NAN;
  return luna_error_status(r->ctx) == LUNA_OK;
}
static void check_full(void) {
  enum { SHORT = 9, LONG = 60, STEP = CUDA_SMALL ? 1 << 17 : 1 << 15 };
  for (int graphed = 0; graphed < 2 && cuda_emulated(); graphed++) {
    bool failed = true;
    for (int at = 0; failed && CHECK(at < 1 << 22, "a longer step never has memory"); at += STEP) {
      device_run r, other;
      float want, got;
      if (!device_run_start(&r, &cuda, 2, 9, "full") || !device_run_start(&other, &cuda, 2, 9, "not full")) break;
      luna_graph *graph = graphed ? luna_graph_open(r.ctx) : NULL;
      for (int step = 0; step < 4; step++)
        CHECK(full_step(&r, graph, SHORT, &got) && full_step(&other, NULL, SHORT, &want), "before memory ends: %s, %s",
              luna_error(r.ctx), luna_error(other.ctx));
      cuda_fail(CUDA_FULL, at);
      failed = !full_step(&r, graph, LONG, &got);
      if (failed)
        CHECK(luna_error_status(r.ctx) == LUNA_OUT_OF_MEMORY && strstr(luna_error(r.ctx), "memory"),
              "memory ends in a step: %s", luna_error(r.ctx));
      cuda_fail(CUDA_FULL, 1 << 30);
      for (int step = 0; step < 3; step++) {
        const int64_t n = step == 0 ? LONG : SHORT;
        const bool steps = (step == 0 && !failed) || full_step(&r, graph, n, &got);
        CHECK(steps && full_step(&other, NULL, n, &want) && memcmp(&got, &want, sizeof got) == 0,
              "%d bytes were left: then the loss of step %d is %.9g, not %.9g: %s", at, step, (double)got, (double)want,
              luna_error(r.ctx));
      }
      luna_close(r.ctx), luna_close(other.ctx);
      cuda_mend();
      CHECK(cuda_allocated() == 0, "memory that ended leaves %zu bytes", cuda_allocated());
      CHECK(at > 0 || failed, "a longer step needs no memory");
    }
  }
}

/* ---- tensors of more than 2^31 elements, and more than 65,535 items along every axis of a grid. Of each launch the
   first and the last blocks run: the first item, the last, and the last below 2^31, forward and backward, must be what
   the CPU finds of these alone. ---- */
enum { VAST_WIDTH = 512, VAST_ROWS = (1 << 22) + 3, VAST_ITEMS = 70001, VAST_BLOCKS = 16, VAST_MORE = 64,
       VAST_PICKED = 3 };
static int64_t vast_picked[VAST_PICKED];       /* which items */
static luna_tensor *vast_scale(luna_tensor *x) { return luna_scale(x, 3); }
static luna_tensor *vast_gelu(luna_tensor *x) { return luna_activate(x, LUNA_ACTIVATION_GELU); }
static luna_tensor *vast_mul(luna_tensor *x) { return luna_mul(x, common_tensor(x->ctx, 4, VAST_WIDTH, 0, 0, 0)); }
static luna_tensor *vast_softmax(luna_tensor *x) { return luna_softmax(x, NULL); }
static luna_tensor *vast_norm(luna_tensor *x) {
  luna_tensor *weight = common_tensor(x->ctx, 5, VAST_WIDTH, 0, 0, 0),
              *bias = common_tensor(x->ctx, 6, VAST_WIDTH, 0, 0, 0);
  return luna_layer_norm(x, weight, bias, 0);
}
static luna_tensor *vast_narrow(luna_tensor *x) {
  return luna_linear(x, common_tensor(x->ctx, 7, 8, VAST_WIDTH, 0, 0), NULL);
}
static luna_tensor *vast_widen(luna_tensor *x) {
  return luna_linear(x, common_tensor(x->ctx, 8, VAST_WIDTH, 8, 0, 0), NULL);
}
static luna_tensor *vast_gather(luna_tensor *x) { /* rows, of the whole or of those picked */
  int32_t rows[VAST_PICKED];
  for (int i = 0; i < VAST_PICKED; i++) rows[i] = x->shape[0] > VAST_PICKED ? (int32_t)vast_picked[i] : i;
  return luna_gather_rows(x, rows, VAST_PICKED);
}
static luna_tensor *vast_attention(luna_tensor *x) {
  const luna_attention_config config = {.heads = 4};
  return luna_softmax_attention(x, x, x, &config);
}
static luna_tensor *vast_product(luna_tensor *x) { return luna_causal_product(x, x, x, 4); }
static luna_layer_config vast_layer(luna_forget forget) {
  return (luna_layer_config){.dim = 16, .heads = 2, .ffn = 8, .memory = 3, .forget = forget};
}
static luna_tensor *vast_encoder(luna_tensor *x) {
  const luna_layer_config config = vast_layer(LUNA_FORGET_NONE);
  luna_encoder_layer layer;
  if (luna_encoder_layer_init(&layer, luna_params_open(x->ctx), "", &config) != LUNA_OK) return NULL;
  luna_tensor *p = luna_expand(common_tensor(x->ctx, 9, 3, 16, 0, 0), x->shape[0]);
  return luna_encoder_layer_forward(&layer, x, &p, NULL);
}
static luna_tensor *vast_causal_of(luna_tensor *x, luna_forget forget) {
  const luna_layer_config config = vast_layer(forget);
  luna_causal_layer layer;
  if (luna_causal_layer_init(&layer, luna_params_open(x->ctx), "", &config) != LUNA_OK) return NULL;
  return luna_causal_layer_forward(&layer, x);
}
static luna_tensor *vast_causal(luna_tensor *x) { return vast_causal_of(x, LUNA_FORGET_NONE); }
static luna_tensor *vast_forgetting(luna_tensor *x) { return vast_causal_of(x, LUNA_FORGET_GATED); }
static luna_tensor *vast_routed(luna_tensor *x) { return vast_causal_of(x, LUNA_FORGET_ROUTED); }

typedef struct vast {
  const char *name;
  luna_tensor *(*op)(luna_tensor *x);
  int64_t items, rows, width;                  /* x: [items,rows,width], or of no rows [items,width] */
  bool gathers;                                /* the result has only what is picked */
  unsigned blocks;                             /* at either end, that run */
  bool small;                                  /* with CUDA_SMALL, too */
} vast;
static const vast vasts[] = {
  {"scale", vast_scale, VAST_ROWS, 0, VAST_WIDTH, false, VAST_BLOCKS, false},
  {"gelu", vast_gelu, VAST_ROWS, 0, VAST_WIDTH, false, VAST_BLOCKS, true},
  {"mul", vast_mul, VAST_ROWS, 0, VAST_WIDTH, false, VAST_BLOCKS, false},
  {"softmax", vast_softmax, VAST_ROWS, 0, VAST_WIDTH, false, VAST_BLOCKS, true},
  /* the backward pass has the last row in its last block, and 1024 rows before it in other ones of a map */
  {"layer norm", vast_norm, (1 << 22) + 1024, 0, VAST_WIDTH, false, 560, false},
  {"linear, x", vast_narrow, VAST_ROWS, 0, VAST_WIDTH, false, VAST_BLOCKS, false},
  {"linear, y", vast_widen, VAST_ROWS, 0, 8, false, VAST_BLOCKS, true},
  {"gather_rows", vast_gather, VAST_ROWS, 0, VAST_WIDTH, true, VAST_BLOCKS, true},
  /* whose items take several blocks of a head each */
  {"softmax_attention", vast_attention, VAST_ROWS / 16 + 2, 16, VAST_WIDTH, false, VAST_MORE, false},
  {"causal_product", vast_product, VAST_ROWS / 16 + 2, 16, VAST_WIDTH, false, VAST_MORE, false},
  {"attention of many", vast_attention, VAST_ITEMS, 2, 8, false, VAST_BLOCKS, false},
  {"product of many", vast_product, VAST_ITEMS, 2, 8, false, VAST_BLOCKS, false},
  {"encoder layer of many", vast_encoder, VAST_ITEMS, 2, 16, false, VAST_BLOCKS, true},
  {"causal layer of many", vast_causal, VAST_ITEMS, 2, 16, false, VAST_BLOCKS, false},
  {"forgetting layer of many", vast_forgetting, VAST_ITEMS, 2, 16, false, VAST_BLOCKS, true},
  {"routed layer of many", vast_routed, VAST_ITEMS, 2, 16, false, VAST_BLOCKS, false},
};
/* the picked items' results and gradients, of all items on the device, of these alone on the CPU; how many numbers a
   result has */
static int64_t vast_run(const vast *v, const device *d, float *x, float *y, float *slopes) {
  const int64_t each = (v->rows ? v->rows : 1) * v->width, items = d ? v->items : VAST_PICKED, flat = -1;
  const int64_t shape[3] = {items, v->rows ? v->rows : v->width, v->width};
  luna_ctx *ctx = device_open(d, 3);
  luna_begin_step(ctx);
  luna_tensor *in = luna_require_grad(luna_tensor_new(ctx, d ? NULL : x, v->rows ? 3 : 2, shape));
  for (int i = 0; i < VAST_PICKED && d && in; i++)
    cuda_move(ctx, in->data + vast_picked[i] * each, x + i * each, each, false);
  luna_tensor *out = luna_keep(v->op(in));
  const int64_t made = out ? luna_count(out) / (v->gathers ? VAST_PICKED : items) : 0;
  luna_tensor *with = out ? common_tensor(ctx, 11, out->shape[out->rank - 1], 0, 0, 0) : NULL;
  luna_tensor *loss = luna_sum(luna_reshape(luna_mul(out, with), 1, &flat), 0);
  CHECK(luna_backward(loss) == LUNA_OK && luna_error_status(ctx) == LUNA_OK, "%s of %lld items: %s", v->name,
        (long long)items, luna_error(ctx));
  for (int i = 0; i < VAST_PICKED && luna_error_status(ctx) == LUNA_OK; i++) {
    const int64_t at = d ? vast_picked[i] : i, from = v->gathers ? i : at;
    if (d) {
      CHECK(cuda_move(ctx, out->data + from * made, y + i * made, made, true) &&
            cuda_move(ctx, in->grad + at * each, slopes + i * each, each, true), "%s: nothing can be read", v->name);
    } else {
      memcpy(y + i * made, out->data + from * made, (size_t)made * sizeof(float));
      memcpy(slopes + i * each, in->grad + at * each, (size_t)each * sizeof(float));
    }
  }
  luna_close(ctx);
  return made;
}
static void check_vast(void) {
  for (size_t k = 0; k < sizeof vasts / sizeof *vasts; k++) {
    const vast *v = &vasts[k];
    if (CUDA_SMALL && !v->small) continue;
    if (!cuda_vast(v->blocks)) return;
    const int64_t each = (v->rows ? v->rows : 1) * v->width, wide = each > VAST_WIDTH ? each : VAST_WIDTH,
        room = VAST_PICKED * wide;
    float *x = common_random(room, 1, 1), *y[2], *slopes[2];
    for (int i = 0; i < 2; i++) y[i] = common_floats(room), slopes[i] = common_floats(room);
    const bool below = v->items > VAST_ITEMS && v->blocks <= VAST_MORE; /* the item before element 2^31 */
    vast_picked[1] = v->items - 1;
    vast_picked[2] = below ? ((int64_t)1 << 31) / wide - 1 : v->items - 2;
    const int64_t made = vast_run(v, NULL, x, y[0], slopes[0]);
    vast_run(v, &cuda, x, y[1], slopes[1]);
    for (int i = 0; i < VAST_PICKED; i++) {
      const double off = common_error(y[1] + i * made, y[0] + i * made, made, 1e-3),
          slope_off = common_error(slopes[1] + i * each, slopes[0] + i * each, each, 1e-2);
      CHECK(off <= 1e-5 && slope_off <= 1e-4, "%s, item %lld of %lld: off by %.3g, its gradient by %.3g; it begins "
            "with %g, on the CPU %g, its gradient with %g and %g", v->name, (long long)vast_picked[i],
            (long long)v->items, off, slope_off, (double)y[1][i * made], (double)y[0][i * made],
            (double)slopes[1][i * each], (double)slopes[0][i * each]);
    }
    free(x);
    for (int i = 0; i < 2; i++) free(y[i]), free(slopes[i]);
    CHECK(cuda_allocated() == 0, "%s of many leaves %zu bytes", v->name, cuda_allocated());
  }
  cuda_vast(0);
}
/* no launch so far has needed more shared memory than any device gives unasked, or much of a grid but its x */
static void check_launches(void) {
  CHECK(cuda_max_shared() <= 48 << 10, "a launch has %zu bytes of shared memory: more than 48 KB, and no attribute "
        "asks for it", cuda_max_shared());
  CHECK(cuda_max_grid() <= 65535, "a launch has %u blocks along y or z", cuda_max_grid());
}

/* ---- another device is current before each call; and each tensor lies alone, so that overruns are found ---- */
static void check_strict(void) {
  device d = cuda;
  if (!cuda_emulated()) return;
  d.seed = NULL;
  for (int exact = 0; exact < 2; exact++) {
    cuda_separate = exact;
    d.backend = cuda_strict_backend(exact);
    if (exact) device_cases(&d, NULL);
    if (CUDA_SANITIZED) continue; /* slow: the cases alone, whose every read and write is checked */
    device_training(&d);
    device_sharing(&d);
    device_serving(&d);
  }
  cuda_separate = false;
}
static void check_overrun(void) { /* that it is found */
  const char *message = "";
  if (!cuda_emulated() || CUDA_SANITIZED) return; /* there it ends the program */
  cuda_quiet(true);
  for (int64_t n = 15; n < 18; n++) {
    device d = cuda;
    cuda_separate = true;
    d.backend = cuda_strict_backend(true);
    float *values = common_random(n, 1, 1);
    luna_ctx *ctx = device_open(&d, 1);
    luna_begin_inference(ctx);
    luna_tensor *x = luna_tensor_new(ctx, values, 1, &n), *y = luna_custom_op(&x, 1, 1, &n, &cuda_overrun);
    luna_tensor *next = luna_tensor_new(ctx, values, 1, &n);
    CHECK(y && next && luna_read(y, values) == LUNA_OK, "the custom op: %s", luna_error(ctx));
    CHECK(cuda_errors(&message) > 0 && strstr(message, "wrote beside"),
          "a kernel that writes beside one tensor of %d is not found: %s", (int)n, message);
    luna_close(ctx);
    free(values);
    cuda_separate = false;
    cuda_mend();
  }
  cuda_quiet(false);
}

/* ---- cuBLASLt adds biases and residuals; where it refuses, or knows no way, a kernel does ---- */
static void check_endings(void) {
  enum { ROWS = 37, DIM = 24 };
  const int64_t shape[2] = {ROWS, DIM}, square[2] = {DIM, DIM}, width = DIM;
  float *x = common_random(ROWS * DIM, 1, 1);
  for (int refused = 0; refused < 3 && cuda_emulated(); refused++) {
    device d = cuda;
    luna_ctx *ctx = device_open(&d, 1);
    luna_feed_forward_config config = {0};
    if (refused) cuda_fail(refused == 1 ? CUDA_NO_ENDINGS : CUDA_NO_WAYS, 1);
    luna_begin_inference(ctx);
    luna_tensor *w = luna_tensor_new(ctx, x, 2, square), *b = luna_tensor_new(ctx, x, 1, &width);
    config.residual = luna_tensor_new(ctx, x, 2, shape);
    cuda_counted();
    luna_tensor *y = luna_feed_forward(config.residual, w, b, w, b, &config);
    const long launches = cuda_counted().launches;
    CHECK(y && launches == 3 + (refused > 0), "a feed-forward is %ld launches: %s", launches, luna_error(ctx));
    luna_close(ctx);
    d.seed = NULL;
    d.big = true;
    if (refused != 1) device_cases(&d, "linear");
    if (refused != 1) device_cases(&d, "feed_forward");
    cuda_mend();
  }
  free(x);
}

/* ---- TF32 and BF16 round products, and nothing else ---- */
static void check_math(void) {
  static const double limit[3] = {1e-6, 2e-3, 2e-2}, min[3] = {0, 1e-6, 1e-5};
  enum { M = 70, N = 50, K = 60 };
  const int64_t sizes[4] = {M, K, N, K};
  float *x = common_random(M * K, 1, 1), *w = common_random(N * K, 2, 1), *exact = common_floats(M * N),
      *got = common_floats(M * N);
  for (int i = 0; i < M; i++)
    for (int j = 0; j < N; j++) {
      double sum = 0;
      for (int k = 0; k < K; k++) sum += (double)x[i * K + k] * (double)w[j * K + k];
      exact[i * N + j] = (float)sum;
    }
  for (int math = 0; math < 3; math++) {
    device d = cuda;
    d.backend = cuda_backend(0, (cuda_math)math);
    luna_ctx *ctx = device_open(&d, 1);
    luna_begin_inference(ctx);
    CHECK(luna_read(luna_linear(luna_tensor_new(ctx, x, 2, sizes), luna_tensor_new(ctx, w, 2, sizes + 2), NULL), got) ==
          LUNA_OK, "mode %d: %s", math, luna_error(ctx));
    const double error = common_error(got, exact, M * N, 1e-6);
    CHECK(error <= limit[math] && error >= min[math], "a product in mode %d is off by %.3g: %s", math, error,
          common_where(got, exact, M * N));
    luna_close(ctx);
  }
  free(x), free(w), free(exact), free(got);
}

/* What the ops' cases lack of the routed memory: rows before the first write and after all has faded, whose results are
   0; slots that are chosen between equals, or far from the others. */
static void op_unwritten(trial *t, int v) {
  enum { ROWS = 200, HEADS = 2, DIM = 3, SLOTS = 5, FADES = 100, FADED = 125, AGAIN = 180 };
  const int64_t shape[2] = {ROWS, 1};
  float written[ROWS], got[ROWS * HEADS * DIM];
  luna_tensor *q = in3(t, 1, ROWS, HEADS * DIM), *k = in3(t, 1, ROWS, HEADS * DIM),
              *values = in3(t, 1, ROWS, HEADS * DIM),
              *router = luna_scale(in3(t, 1, ROWS, HEADS * SLOTS), v ? 300 : 0), *strength = in3(t, 1, ROWS, HEADS),
              *fade = luna_add_scalar(in1(t, HEADS), 40);
  for (int i = 0; i < ROWS; i++) written[i] = i == 2 || i == 4 || i >= AGAIN;
  luna_tensor *chosen = luna_route(router, strength);
  luna_tensor *w = luna_mul(chosen, luna_tensor_new(t->ctx, written, 2, shape));
  luna_causal_nested_config c = {.heads = HEADS, .forget = fade, .routed = true};
  luna_tensor *y = luna_causal_nested_attention(q, k, values, w, &c);
  give(t, chosen), give(t, y);
  if (!y || luna_read(y, got) != LUNA_OK) return;
  for (int i = 0; i < ROWS * HEADS * DIM; i++) {
    const int row = i / (HEADS * DIM);
    const bool empty = row < 2 || (row >= FADED && row < AGAIN);
    CHECK((row >= FADES && row < FADED) || (fabsf(got[i]) < 1e-20f) == empty, "a routed memory %s, row %d has %g",
          empty ? "is empty" : "is not empty", row, (double)got[i]);
  }
}
/* a sequence of several windows of chunks, of which each has its part in the gradient of fade */
static void op_windows(trial *t, int v) {
  enum { ROWS = 2200, HEADS = 2, DIM = 3, SLOTS = 5 };
  luna_tensor *q = in3(t, 1, ROWS, HEADS * DIM), *k = in3(t, 1, ROWS, HEADS * DIM),
              *w = luna_route(luna_scale(in3(t, 1, ROWS, HEADS * SLOTS), 3), in3(t, 1, ROWS, HEADS));
  luna_causal_nested_config c = {.heads = HEADS, .forget = in1(t, HEADS), .routed = true};
  (void)v;
  give(t, luna_causal_nested_attention(q, k, k, w, &c));
}
static void check_routed(void) {
  static const op_case unwritten = {"unwritten slots", op_unwritten, 2}, windows = {"windows", op_windows, 1};
  const float odd[5] = {1, NAN, 3, NAN, 5}, zero = 0; /* a NaN is above all, so it shows */
  const int64_t shape[3] = {1, 1, 5}, one[3] = {1, 1, 1};
  float w[5] = {0};
  luna_ctx *ctx = device_open(&cuda, 1);
  luna_begin_inference(ctx);
  luna_read(luna_route(luna_tensor_new(ctx, odd, 3, shape), luna_tensor_new(ctx, &zero, 3, one)), w);
  CHECK(isnan(w[1]) && isnan(w[3]) && w[4] == 0, "a NaN of the router does not show: %g %g", (double)w[1],
        (double)w[3]);
  luna_close(ctx);
  if (!CUDA_SMALL) device_case(&cuda, &windows, 0, false); /* a PTX's exp leaves other rests of a fade */
  for (int v = 0; v < unwritten.variants; v++) device_case(&cuda, &unwritten, v, false);
}
/* no such device, no such mode: a sentence, not the CPU */
static void check_no_backend(void) {
  static const struct { int device, math; } wrong[] = {{16, 0}, {-1, 0}, {0, 3}};
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
    device d = cuda;
    d.backend = cuda_backend(wrong[i].device, (cuda_math)wrong[i].math);
    luna_ctx *ctx = device_open(&d, 1);
    CHECK(luna_error_status(ctx) == LUNA_BAD_ARGUMENT && strstr(luna_error(ctx), "a device that is not 0 to 15"),
          "device %d, mode %d: %s", wrong[i].device, wrong[i].math, luna_error(ctx));
    CHECK(luna_begin_step(ctx) == LUNA_BAD_ARGUMENT && !luna_tensor_new(ctx, NULL, 0, NULL), "it works");
    luna_close(ctx);
  }
}

/* On tensor cores too a row that is not finite reaches no row before it, and all after it. */
static void check_rounded_rows(const device *d, bool product) {
  enum { N = 150, HEADS = 2, WIDTH = 40, BAD = 90 };
  const int64_t shape[3] = {1, N, HEADS * WIDTH}, n = shape[1] * shape[2];
  const luna_attention_config config = {.heads = HEADS, .causal = true};
  float *x = common_random(n, 1, 1), *y = common_random(n, 2, 1), *z = common_random(n, 3, 1),
        *got[2] = {common_floats(n), common_floats(n)};
  for (int bad = 0; bad < 2; bad++) {
    luna_ctx *ctx = device_open(d, 1);
    luna_begin_inference(ctx);
    if (bad) z[BAD * shape[2] + 3] = NAN;
    luna_tensor *a = luna_tensor_new(ctx, x, 3, shape), *b = luna_tensor_new(ctx, y, 3, shape),
                *c = luna_tensor_new(ctx, z, 3, shape);
    CHECK(luna_read(product ? luna_causal_product(a, b, c, HEADS) : luna_softmax_attention(a, b, c, &config),
                    got[bad]) == LUNA_OK, "%s", luna_error(ctx));
    luna_close(ctx);
  }
  CHECK(memcmp(got[0], got[1], sizeof(float) * BAD * (size_t)shape[2]) == 0, "product %d: a NaN goes back: %s", product,
        common_where(got[1], got[0], BAD * shape[2]));
  for (int i = BAD; i < N; i++)
    CHECK(isnan(got[1][i * shape[2] + 3]) && !isnan(got[1][i * shape[2] + 4]), "product %d: row %d has %g, %g", product,
          i, (double)got[1][i * shape[2] + 3], (double)got[1][i * shape[2] + 4]);
  free(x), free(y), free(z), free(got[0]), free(got[1]);
}
/* A context whose products round may read a set of one whose products do not. */
static void check_rounded_set(void) {
  enum { N = 40, DIM = 32 };
  const int64_t shape[2] = {N, DIM};
  float *x = common_random(N * DIM, 1, 1), *got[2] = {common_floats(N * DIM), common_floats(N * DIM)};
  device rounded = cuda;
  rounded.backend = cuda_backend(0, CUDA_TF32);
  luna_ctx *ctx[2] = {device_open(&cuda, 1), device_open(&rounded, 1)};
  luna_params *params = luna_params_open(ctx[0]), *shared = luna_params_share(ctx[1], params);
  for (int i = 0; i < 2; i++) {
    luna_linear_layer layer;
    CHECK(luna_linear_layer_init(&layer, i ? shared : params, "fc", DIM, DIM, (luna_init){LUNA_INIT_XAVIER, 0}) ==
          LUNA_OK, "%s", luna_error(ctx[i]));
    luna_begin_inference(ctx[i]);
    CHECK(luna_read(luna_linear_layer_forward(&layer, luna_tensor_new(ctx[i], x, 2, shape)), got[i]) == LUNA_OK, "%s",
          luna_error(ctx[i]));
  }
  const double error = common_error(got[1], got[0], N * DIM, 1e-6);
  CHECK(error <= 1e-3 && error > 0, "a shared set's products in TF32 are off by %g: %s", error,
        common_where(got[1], got[0], N * DIM));
  luna_close(ctx[1]), luna_close(ctx[0]);
  free(x), free(got[0]), free(got[1]);
}
/* attention and the causal products by tensor cores, op by op; the golden files */
static void check_rounded(void) {
  check_rounded_set();
  static const double limit[3] = {0, 1e-3, 1e-2};
  static const char *const names[] = {"softmax_attention", "pack", "causal_product", "causal_nested", "routed"};
  for (int math = 1; math < 3; math++) {
    device d = cuda;
    d.backend = golden_backend = cuda_backend(0, (cuda_math)math);
    d.output_limit = d.gradient_limit = limit[math];
    d.seed = NULL;
    for (int i = 0; i < OP_CASES; i++)
      for (int n = 0; n < 5; n++) {
        d.gradient_limit = limit[math] * (n == 4 ? 8 : 1); /* what a slot's gates get is a difference of sums */
        if (!strstr(op_cases[i].name, names[n])) continue;
        for (int v = 0; v < (CUDA_SMALL ? 1 : op_cases[i].variants); v++) device_case(&d, &op_cases[i], v, true);
        for (int v = 0; v < (CUDA_SMALL ? 0 : op_cases[i].variants); v++) device_case(&d, &op_cases[i], v, false);
      }
    d.gradient_limit = limit[math];
    check_rounded_rows(&d, false);
    check_rounded_rows(&d, true);
    golden_rounded = limit[math];
    if (!CUDA_SMALL) golden_folder("tests/data");
  }
  golden_rounded = 0;
}

/* ---- a loop that copies to the device and reads nothing leaves it work ---- */
static void check_staging(void) {
  enum { COPIES = 24, COUNT = 150001 };
  const int64_t n = COUNT;
  float *x = common_random(n, 1, 1), *got = common_floats(n);
  luna_tensor *y[COPIES];
  luna_ctx *ctx = device_open(&cuda, 1);
  luna_begin_inference(ctx);
  (void)luna_tensor_new(ctx, NULL, 1, &n);
  cuda_counted();
  for (int i = 0; i < COPIES; i++) {
    x[7] = (float)i;
    luna_tensor *copied = luna_tensor_new(ctx, x, 1, &n);
    for (int k = 0; k < 3; k++) y[i] = luna_scale(k ? y[i] : copied, 0.5f);
  }
  const cuda_counts is = cuda_counted();
  CHECK(!cuda_emulated() || is.drains == 0, "%ld of %ld waits left the device idle", is.drains, is.synchronisations);
  for (int i = 0; i < COPIES; i++) {
    CHECK(luna_read(y[i], got) == LUNA_OK, "%s", luna_error(ctx));
    CHECK(got[7] == 0.125f * (float)i && got[COUNT - 1] == 0.125f * x[COUNT - 1], "copy %d has %g, %g, not %g, %g", i,
          (double)got[7], (double)got[COUNT - 1], 0.125 * i, 0.125 * (double)x[COUNT - 1]);
  }
  luna_close(ctx);
  free(x), free(got);
}

/* ---- failures: a sentence in the context, nothing left behind, and contexts on the CPU go on ---- */
static void expect_error(luna_ctx *ctx, const char *what, const char *part) {
  CHECK((!ctx || luna_error_status(ctx) != LUNA_OK) && strstr(luna_error(ctx), part), "%s: the sentence is: %s", what,
        luna_error(ctx));
}
static void check_failures(void) {
  device_run r, on_host;
  if (!cuda_emulated()) return;
  for (int i = 0; i < 8; i++) {
    static const struct { cuda_failure what; int at; const char *part; } failures[8] = {
      {CUDA_NO_DEVICE, 1, "there is no CUDA device"},
      {CUDA_OLD_DEVICE, 1, "8.0 or newer is needed"},
      {CUDA_NO_KERNELS, 209, "-gencode arch=compute_90,code=sm_90, or for every newer device too with"},
      {CUDA_NO_KERNELS, 218, "-gencode arch=compute_90,code=sm_90: the driver did not take"}, /* invalid PTX */
      {CUDA_NO_KERNELS, 221, "-gencode arch=compute_90,code=sm_90: the driver did not take"}, /* no compiler */
      {CUDA_NO_KERNELS, 222, "-gencode arch=compute_90,code=sm_90: the driver did not take"}, /* newer PTX */
      {CUDA_NO_KERNELS, 223, "-gencode arch=compute_90,code=sm_90: the driver did not take"}, /* compiler off */
      {CUDA_NO_LAUNCH, 1, "CUDA device 0: unspecified launch failure"},
    };
    cuda_fail(failures[i].what, failures[i].at);
    luna_ctx *ctx = device_open(&cuda, 1);
    expect_error(ctx, "a device that cannot be used", failures[i].part);
    CHECK(luna_error_status(ctx) == (i < 7 ? LUNA_UNSUPPORTED : LUNA_DEVICE_FAILED), "%s: status %d", failures[i].part,
          (int)luna_error_status(ctx));
    CHECK(luna_begin_step(ctx) != LUNA_OK && !luna_params_find(luna_params_open(ctx), "x") &&
              (i == 7 || !luna_tensor_new(ctx, NULL, 0, NULL)),
          "a context without its device works");
    luna_close(ctx);
    cuda_mend();
  }
  /* each allocation fails in turn, later each fifth: opening (null without memory for the context), parameters,
     moments, steps */
  for (int at = 1; at < 500; at += at < 60 ? 1 : 5) {
    cuda_fail(CUDA_NO_MEMORY, at);
    const bool open = device_run_open(&r, &cuda, 2, 1);
    const float loss = open ? device_step(&r, 0) : NAN;
    const bool failed = !open || loss != loss;
    if (failed)
      expect_error(r.ctx, "memory runs out", !r.ctx ? "luna_open failed" : at < 5 ? "CUDA" : "memory");
    luna_close(r.ctx);
    cuda_mend();
    CHECK(cuda_allocated() == 0, "allocation %d fails and leaves %zu bytes", at, cuda_allocated());
    if (!failed) break;
    CHECK(at < 495, "allocations fail for ever");
  }
  long launches = 0;                   /* of a step */
  if (device_run_start(&r, &cuda, 2, 1, "a step")) {
    cuda_counted();
    device_step(&r, 0);
    luna_begin_inference(r.ctx);
    launches = cuda_counted().launches;
  }
  luna_close(r.ctx);
  CHECK(launches > 50, "a step has %ld launches", launches);
  for (int kind = 0; kind < 2; kind++)
    for (int at = 1; at < launches; at += 23) {
      if (!device_run_start(&on_host, NULL, 2, 1, "the CPU") || !device_run_start(&r, &cuda, 2, 1, "a failure")) break;
      const float first = device_step(&on_host, 0);
      luna_begin_inference(r.ctx); /* what opening queued is done */
      float *all = common_parameters(r.params);
      cuda_fail(kind ? CUDA_FAULT : CUDA_NO_LAUNCH, at);
      const float loss = device_step(&r, 0);
      const luna_status status = luna_read(r.lm.embedding, all);
      CHECK(loss != loss || status != LUNA_OK, "%s %d of a step fails without an error", kind ? "kernel" : "launch",
            at);
      expect_error(r.ctx, kind ? "a fault" : "a launch", "CUDA device 0");
      const float next = device_step(&on_host, 1);
      CHECK(first == first && next == next && next != first, "the CPU's context suffers");
      free(all);
      luna_close(r.ctx);
      luna_close(on_host.ctx);
      cuda_mend();
      CHECK(cuda_allocated() == 0, "%zu bytes are left", cuda_allocated());
    }
}

/* streams: memory that ends while one is opened, and a device that fails in a step */
static luna_stream *open_stream(device_models *m, luna_seq2seq *decoder, bool decodes) {
  static const int32_t source[6] = {3, 1, 4, 1, 5, 9};
  return decodes ? luna_seq2seq_stream_open(decoder, &(luna_input){ source, NULL, 2, 3, NULL }, 2) :
      luna_stream_open(&m->lm[1], &m->config);
}
static void check_stream_failures(void) {
  static const int32_t tokens[12] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};
  luna_seq2seq_config config = {0};
  if (!cuda_emulated()) return;
  config.vocab = 17;
  config.encoder.layer.dim = 16;
  config.encoder.layer.memory = 3;
  for (int decodes = 0; decodes < 2; decodes++) {
    bool failed = true;
    for (int at = 0; failed && CHECK(at < 1 << 20, "opening a stream fails for ever"); at += 1 << 14) {
      device_models m;
      luna_seq2seq decoder;
      if (!device_models_open(&m, &cuda, 2)) break;
      luna_params *params = luna_params_open(m.ctx[1]);
      CHECK(luna_seq2seq_init(&decoder, params, &config) == LUNA_OK, "a decoder: %s", luna_error(m.ctx[1]));
      luna_begin_inference(m.ctx[1]);
      cuda_fail(CUDA_FULL, at);
      luna_stream *s = open_stream(&m, &decoder, decodes);
      failed = s == NULL;
      if (failed) expect_error(m.ctx[1], "a stream without memory", "memory");
      cuda_mend();
      if (failed) luna_begin_inference(m.ctx[1]);
      luna_stream *next = failed ? open_stream(&m, &decoder, decodes) : NULL; /* the context goes on */
      CHECK(!failed || luna_stream_step(next, tokens), "after a failure no stream opens: %s", luna_error(m.ctx[1]));
      CHECK(failed || luna_stream_step(s, tokens), "a stream does not step: %s", luna_stream_error(s));
      luna_stream_close(s), luna_stream_close(next);
      luna_close(m.ctx[0]), luna_close(m.ctx[1]);
      CHECK(cuda_allocated() == 0, "a stream without memory leaves %zu bytes", cuda_allocated());
      CHECK(at > 0 || failed, "a stream opens without memory");
    }
    for (int kind = 0; kind < 2; kind++)
      for (int at = 1; at < 36; at += 9) { /* a prefill has as many launches */
        device_models m;
        luna_seq2seq decoder;
        char sentence[400];
        int32_t order[4] = {0, 0, 0, 0};
        if (!device_models_open(&m, &cuda, 2)) break;
        luna_params *params = luna_params_open(m.ctx[1]);
        CHECK(luna_seq2seq_init(&decoder, params, &config) == LUNA_OK, "a decoder: %s", luna_error(m.ctx[1]));
        luna_stream *s = open_stream(&m, &decoder, decodes);
        const size_t size = luna_stream_state_size(s);
        char *state = (char *)common_alloc(size);
        CHECK(luna_stream_step(s, tokens) && luna_stream_state_save(s, state, size) == LUNA_OK,
              "a stream does not begin: %s", luna_stream_error(s));
        cuda_fail(kind ? CUDA_FAULT : CUDA_NO_LAUNCH, at);
        CHECK(!luna_stream_prefill(s, &(luna_input){ tokens, NULL, 0, 3, NULL }),
              "%s %d of a prefill fails without an error", kind ? "kernel" : "launch", at);
        CHECK(luna_stream_error_id(s) == LUNA_ERROR_BACKEND && strstr(luna_stream_error(s), "CUDA device 0"),
            "a device's failure in a stream: %s", luna_stream_error(s));
        snprintf(sentence, sizeof sentence, "%s", luna_stream_error(s));
        luna_stream_reset(s);
        CHECK(!luna_stream_step(s, tokens) && strcmp(luna_stream_error(s), sentence) == 0,
              "after a failure a stream goes on: %s", luna_stream_error(s));
        CHECK(luna_stream_reorder(s, order) != LUNA_OK && luna_stream_state_save(s, state, size) != LUNA_OK &&
              luna_stream_state_load(s, state, size) != LUNA_OK, "after a failure a state is there");
        luna_stream_close(s);
        free(state);
        luna_close(m.ctx[0]), luna_close(m.ctx[1]);
        cuda_mend();
        CHECK(cuda_allocated() == 0, "a stream whose device failed leaves %zu bytes", cuda_allocated());
      }
  }
}

static void check_findings(void) {
  const char *message = "";
  CHECK(cuda_errors(&message) == 0, "%llu findings about kernels, the first: %s", cuda_errors(&message), message);
  CHECK(cuda_allocated() == 0, "%zu bytes are left on the device", cuda_allocated());
}
/* the cases whose names hold one of the words, and optimisers; for tools that make all take long */
static void check_named(int words, char **word) {
  cuda.seed = NULL;
  for (int w = 0; w < words; w++) {
    if (strcmp(word[w], "optimizers") == 0) check_optimizers();
    for (int i = 0; i < OP_CASES; i++)
      if (strstr(op_cases[i].name, word[w]) && op_case_applies(&op_cases[i], cuda.backend))
        device_case(&cuda, &op_cases[i], 0, false);
  }
}
static void check_small(void) {
  cuda.seed = NULL;
  check_no_backend();
  check_routed();
  for (int i = 0; i < OP_CASES; i++)
    if (strcmp(op_cases[i].name, cuda.skip) != 0 && op_case_applies(&op_cases[i], cuda.backend))
      device_case(&cuda, &op_cases[i], 0, false);
  device_refusals(&cuda);
  device_misfits(&cuda, LUNA_FORGET_GATED), device_misfits(&cuda, LUNA_FORGET_ROUTED);
  check_custom();
  check_shared_graph();
  check_stream_graphs();
  check_graph_logits();
  check_graph_reasons();
  check_graph_order();
  check_memory();
  check_optimizers();
  check_clip();
  check_foreign_errors();
  check_staging();
  check_endings();
  check_rounded();
  check_threads();
  check_closing();
  check_full();
  check_vast();
  check_launches();
  check_findings();
}

int main(int argc, char **argv) {
  char why[400];
  if (cuda_absent(why, sizeof why)) return CHECK(0, "%s", why), test_report(CUDA_SMALL ? "cuda_small" : "cuda");
  cuda.backend = cuda_backend(0, CUDA_F32);
  cuda.output_limit = cuda.gradient_limit = 1e-5;
  cuda.skip = "custom_op";
  cuda.seed = cuda_seed;
  if (CUDA_SANITIZED) cuda.seed = NULL; /* slow, and the order is not its matter */
  if (CUDA_SMALL && argc > 1) return check_named(argc - 1, argv + 1), test_report("cuda_small");
  if (CUDA_SMALL) return check_small(), test_report("cuda_small");
  device_all(&cuda, argc > 1 ? argv[1] : NULL);
  if (argc <= 1) {
    cuda.seed = NULL;
    cuda.big = true;
    if (!CUDA_SANITIZED) device_cases(&cuda, NULL);
    if (!CUDA_SANITIZED) can_check(cuda.backend, cuda.skip);
    check_custom();
    check_graph();
    check_shared_graph();
    check_stream_graphs();
    check_graph_logits();
    check_graph_reasons();
    check_graph_order();
    check_memory();
    check_logits_bytes();
    check_optimizers();
    check_clip();
    check_foreign_errors();
    check_strict();
    check_no_backend();
      check_math();
    check_rounded();
    check_staging();
    check_endings();
    check_threads();
    check_closing();
    check_full();
    check_vast();
    golden_backend = cuda.backend;
    golden_folder("tests/data");
    features_files(cuda.backend);
  }
  check_launches();
  check_findings();
  if (argc <= 1) check_overrun();
  if (argc <= 1) check_failures();
  if (argc <= 1) check_stream_failures();
  return test_report("cuda");
}
