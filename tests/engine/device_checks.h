/* A backend whose memory the host cannot read, against the CPU: every op and layer with its gradients, training to the
   same losses, checkpoints that move either way, and what is refused. Used by device.c (the CPU's own rows behind a
   wall) and cuda.c. */
#ifndef DEVICE_CHECKS_H
#define DEVICE_CHECKS_H
#include "examples/luna_beam.h"
#include "op_cases.h"
#include "examples/luna_apollo.h"

typedef struct device {
  const luna_backend *backend;
  double output_limit, gradient_limit; /* relative error against the CPU; 0: the same bits */
  bool big;                            /* the larger sizes of the op cases */
  const char *skip;                    /* a case that does not apply, or null */
  /* sets the order in which things are done that may be done in any; null: no such thing */
  void (*seed)(unsigned seed);
} device;

static luna_ctx *device_open(const device *d, uint64_t seed) {
  luna_options options = {0};
  options.backend = d ? d->backend : NULL;
  options.threads = 1;
  options.seed = seed;
  return luna_open(&options);
}

static void device_compare(const char *what, const char *part, int i, const trial_array *got,
                           const trial_array *expected, bool gradient, double limit) {
  const float *a = gradient ? got->gradient : got->values, *b = gradient ? expected->gradient : expected->values;
  if (limit == 0)
    CHECK(memcmp(a, b, (size_t)expected->count * sizeof(float)) == 0, "%s: %s %d has other bits: %s", what, part, i,
          common_where(a, b, expected->count));
  else {
    const double error = common_error(a, b, expected->count, gradient ? 0.1 : 1e-3);
    CHECK(error <= limit, "%s: %s %d is off by %.3g: %s", what, part, i, error, common_where(a, b, expected->count));
  }
}
static void device_case(const device *d, const op_case *c, int variant, bool big) {
  trial on_host, on_device;
  char what[128];
  /* through many ops rounding grows: the limit there is that between instruction sets */
  const bool whole = strstr(c->name, "_layer") || strstr(c->name, "lm") || strstr(c->name, "classifier") ||
      strstr(c->name, "seq2seq");
  memset(&on_host, 0, sizeof on_host);
  memset(&on_device, 0, sizeof on_device);
  on_host.big = on_device.big = big;
  on_host.options.threads = on_device.options.threads = 1;
  on_device.options.backend = d->backend;
  snprintf(what, sizeof what, "%s, variant %d%s, on the device", c->name, variant, big ? ", big" : "");
  if (CHECK(trial_run(&on_host, c, variant, true), "%s: the CPU: %s", what, on_host.error) &&
      CHECK(trial_run(&on_device, c, variant, true), "%s: %s", what, on_device.error)) {
    for (int i = 0; i < on_host.outputs; i++)
      device_compare(what, "output", i, &on_device.output[i], &on_host.output[i], false, d->output_limit);
    for (int i = 0; i < on_host.inputs; i++)
      device_compare(what, "the gradient of input", i, &on_device.input[i], &on_host.input[i], true,
                     whole ? 4 * d->gradient_limit : d->gradient_limit);
    for (unsigned seed = 2; d->seed && seed <= 3; seed++) { /* the same bits in any order */
      trial again;
      memset(&again, 0, sizeof again);
      again.big = big;
      again.options = on_device.options;
      d->seed(seed);
      if (CHECK(trial_run(&again, c, variant, true), "%s, again: %s", what, again.error)) {
        for (int i = 0; i < on_host.outputs; i++)
          device_compare(what, "again, output", i, &again.output[i], &on_device.output[i], false, 0);
        for (int i = 0; i < on_host.inputs; i++)
          device_compare(what, "again, the gradient of input", i, &again.input[i], &on_device.input[i], true, 0);
      }
      trial_free(&again);
    }
  }
  trial_free(&on_host);
  trial_free(&on_device);
}
static void device_cases(const device *d, const char *only) {
  for (int i = 0; i < OP_CASES; i++) {
    if ((d->skip && strcmp(op_cases[i].name, d->skip) == 0) || (only && !strstr(op_cases[i].name, only))) continue;
    for (int v = 0; v < op_cases[i].variants && op_case_applies(&op_cases[i], d->backend); v++)
      device_case(d, &op_cases[i], v, d->big);
  }
}

/* ---- training: a small language model with dropout, a schedule and clipping, by each optimiser ---- */
#define DEVICE_STEPS 4
#define DEVICE_RUNS 5
typedef struct device_run {
  luna_ctx *ctx;
  luna_params *params;
  luna_lm lm;
  luna_optimizer *optimizer;
} device_run;
static bool device_run_open(device_run *r, const device *d, int kind, uint64_t seed) {
  static const luna_forget forget[DEVICE_RUNS] = {LUNA_FORGET_NONE, LUNA_FORGET_NONE, LUNA_FORGET_GATED,
                                                  LUNA_FORGET_CONSTANT, LUNA_FORGET_ROUTED};
  luna_lm_config config = {0};
  luna_optimizer_config sgd = {0};
  luna_optimizer_config adamw = {0};
  luna_optimizer_config apollo = {0};
  config.vocab = 31;
  config.layers = 2;
  config.layer.dim = 16;
  config.layer.heads = 2;
  config.layer.memory = 4;
  config.layer.ffn = 24;
  config.layer.dropout = 0.1f;
  /* the memories: published, with a horizon, by gates, constant, routed */
  config.layer.horizon = kind == 1 ? 7 : 0;
  config.layer.forget = forget[kind];
  config.layer.output_gate = kind == 2 || kind == 4;
  config.layer.attention_dropout = kind == 2 || kind == 4 ? 0.1f : 0;
  sgd.momentum = 0.9f;
  sgd.lr = 0.05f;
  adamw.clip = 0.5f;
  adamw.weight_decay = 0.01f;
  adamw.schedule.warmup = 2;
  apollo.weight_decay = 1e-3f;
  memset(r, 0, sizeof *r);
  r->ctx = device_open(d, seed);
  r->params = r->ctx ? luna_params_open(r->ctx) : NULL;
  if (!r->params || luna_lm_init(&r->lm, r->params, &config) != LUNA_OK) return false;
  r->optimizer = kind == 0 ? luna_sgd(r->params, &sgd) : kind == 1 ? luna_adam(r->params, &adamw) : kind != 3 ?
      luna_adamw(r->params, &adamw) : luna_apollo(r->params, &apollo);
  return r->optimizer != NULL;
}
static bool device_run_start(device_run *r, const device *d, int kind, uint64_t seed, const char *what) {
  const bool open = device_run_open(r, d, kind, seed);
  return CHECK(open, "%s: on %s: %s", what, d ? "the device" : "the CPU", luna_error(r->ctx));
}
static float device_step(device_run *r, int step) {
  const int64_t batch = 3, n = 20;
  int32_t *tokens = common_tokens(2 * batch * n, 70 + (uint64_t)step, 31);
  float loss;
  luna_begin_step(r->ctx);
  luna_tensor *t = luna_cross_entropy(luna_lm_forward(&r->lm, &(luna_input){ tokens, NULL, batch, n, NULL }),
                                      tokens + batch * n, NULL);
  luna_backward(t);
  loss = luna_item(t);
  if (luna_optimizer_step(r->optimizer) != LUNA_OK) loss = NAN;
  free(tokens);
  return loss;
}
static void device_training(const device *d) {
  static const char *const kinds[DEVICE_RUNS] = {"SGD", "Adam", "AdamW", "Apollo", "AdamW, routed"};
  for (int kind = 0; kind < DEVICE_RUNS; kind++) {
    device_run on_host, on_device;
    const bool open = device_run_start(&on_host, NULL, kind, 5, kinds[kind]);
    if (device_run_start(&on_device, d, kind, 5, kinds[kind]) && open) {
      const int64_t count = luna_params_element_count(on_host.params);
      for (int step = 0; step < DEVICE_STEPS; step++) {
        const float a = device_step(&on_host, step), b = device_step(&on_device, step);
        const double off = fabs((double)a - (double)b) / fabs((double)a);
        CHECK(off <= 10 * d->output_limit, "%s, step %d: the loss is %.9g, on the CPU %.9g", kinds[kind], step,
              (double)b, (double)a);
      }
      float *a = common_parameters(on_host.params), *b = common_parameters(on_device.params);
      const double error = common_error(b, a, count, 1e-3), norm = (double)luna_optimizer_grad_norm(on_host.optimizer);
      CHECK(error <= 10 * d->gradient_limit, "%s: the parameters are off by %.3g: %s", kinds[kind], error,
            common_where(b, a, count));
      CHECK(fabs((double)luna_optimizer_grad_norm(on_device.optimizer) - norm) <= 10 * d->gradient_limit * norm,
            "%s: the norm is %g, on the CPU %g", kinds[kind],
            (double)luna_optimizer_grad_norm(on_device.optimizer), norm);
      CHECK(luna_optimizer_steps(on_device.optimizer) == DEVICE_STEPS &&
            luna_optimizer_skipped(on_device.optimizer) == 0, "%s: %lld steps, %lld skipped", kinds[kind],
            (long long)luna_optimizer_steps(on_device.optimizer),
                (long long)luna_optimizer_skipped(on_device.optimizer));
      free(a), free(b);
    }
    luna_close(on_host.ctx);
    luna_close(on_device.ctx);
  }
}

/* ---- a training checkpoint goes from either to the other, and training goes on there as it would have ---- */
typedef struct device_file {
  char *bytes;
  size_t size, at;
} device_file;
static bool device_file_write(void *user, const void *bytes, size_t size) {
  device_file *f = (device_file *)user;
  char *more = (char *)realloc(f->bytes, f->size + size + 1);
  if (!more) return false;
  f->bytes = more;
  memcpy(f->bytes + f->size, bytes, size);
  f->size += size;
  return true;
}
static void device_checkpoints(const device *d) {
  for (int way = 0; way < 2; way++) {
    const device *from = way ? d : NULL, *to = way ? NULL : d;
    const char *what = way ? "from the device to the CPU" : "from the CPU to the device";
    device_run first, second;
    device_file file = {NULL, 0, 0}, copy = {NULL, 0, 0};
    luna_io io = {0}, out = {0};
    io.write = out.write = device_file_write;
    io.user = &file;
    out.user = &copy;
    const bool open = device_run_start(&first, from, 2, 5, what);
    if (device_run_start(&second, to, 2, 6, what) && open) {
      for (int step = 0; step < 2; step++) device_step(&first, step);
      CHECK(luna_save_training(first.optimizer, luna_callbacks(&io)) == LUNA_OK, "%s: saving fails", what);
      CHECK(luna_load_training(second.optimizer, luna_bytes(file.bytes, file.size)) == LUNA_OK, "%s: loading fails",
            what);
      CHECK(luna_save_training(second.optimizer, luna_callbacks(&out)) == LUNA_OK, "%s: saving again fails", what);
      CHECK(copy.size == file.size && memcmp(copy.bytes, file.bytes, file.size) == 0, "%s: the file changes on the way",
            what);
      for (int step = 2; step < 4; step++) {
        const float a = device_step(&first, step), b = device_step(&second, step);
        CHECK(fabs((double)a - (double)b) <= 10 * d->output_limit * fabs((double)a),
              "%s, step %d: the loss is %.9g, not %.9g", what, step, (double)b, (double)a);
      }
    }
    free(file.bytes), free(copy.bytes);
    luna_close(first.ctx);
    luna_close(second.ctx);
  }
}

/* ---- a loss that is not finite skips the step, and the next reading tells ---- */
static int device_told;
static void device_log(void *user, luna_status status, const char *sentence) {
  (void)user;
  device_told += status == LUNA_OK && strstr(sentence, "1 steps skipped up to step 2") != NULL;
}
static void device_skips(const device *d) {
  luna_options options = {0};
  const int64_t shape[2] = {2, 3};
  const float good[6] = {1, 2, 3, 4, 5, 6}, bad[6] = {1, 2, NAN, 4, 5, 6};
  luna_init init = {0};
  float before[3], after[3];
  options.backend = d->backend;
  options.threads = 1;
  options.log = device_log;
  luna_ctx *ctx = luna_open(&options);
  luna_params *params = luna_params_open(ctx);
  luna_tensor *w = luna_param(params, "w", 1, &shape[1], init);
  luna_optimizer *adam = luna_adam(params, NULL);
  device_told = 0;
  for (int step = 0; step < 3; step++) {
    luna_begin_step(ctx);
    luna_tensor *x = luna_tensor_new(ctx, step == 1 ? bad : good, 2, shape),
        *loss = luna_sum(luna_sum(luna_mul(x, w), 1), 0);
    luna_read(w, before);
    CHECK(luna_backward(loss) == LUNA_OK && luna_optimizer_step(adam) == LUNA_OK, "step %d fails", step);
    luna_read(w, after);
    CHECK((memcmp(before, after, sizeof before) == 0) == (step == 1), "step %d: w %s", step,
          step == 1 ? "changes" : "does not change");
  }
  CHECK(luna_optimizer_skipped(adam) == 1 && luna_optimizer_steps(adam) == 2, "%lld steps skipped, %lld made",
        (long long)luna_optimizer_skipped(adam), (long long)luna_optimizer_steps(adam));
  CHECK(device_told == 1, "the skipped step was reported %d times", device_told);
  luna_close(ctx);
}
/* finite gradients whose squares are beyond a float: their norm, clipped by SGD; Adam, which has no clip, skips them */
static void device_large(const device *d) {
  enum { SIZE = 33001 };
  const int64_t n = SIZE;
  luna_optimizer_config clipped = {0};
  const luna_init init = {0};
  float *zeros = common_floats(n), *gradient = common_floats(n), *got = common_floats(n);
  clipped.lr = 1, clipped.clip = 100;
  luna_ctx *ctx = device_open(d, 5);
  luna_params *params = luna_params_open(ctx);
  luna_tensor *w = luna_param(params, "w", 1, &n, init);
  luna_optimizer *sgd = luna_sgd(params, &clipped), *adam = luna_adam(params, NULL);
  for (int step = 0; step < 4; step++) {
    const float sizes[4] = {1, 1e15f, 1e25f, 3e38f};
    double norm = 0, off = 0;
    for (int64_t i = 0; i < n; i++) {
      gradient[i] = (float)common_number(3, (uint64_t)i) * (i % 7 ? 1 : sizes[step]);
      norm += (double)gradient[i] * (double)gradient[i];
    }
    norm = sqrt(norm);
    luna_write(w, zeros);
    for (int way = 0; way < 2; way++) {
      luna_begin_step(ctx);
      luna_tensor *loss = luna_sum(luna_mul(w, luna_tensor_new(ctx, gradient, 1, &n)), 0);
      CHECK(luna_backward(loss) == LUNA_OK && luna_optimizer_step(way ? adam : sgd) == LUNA_OK, "%s", luna_error(ctx));
      if (!way) luna_read(w, got);
      if (!way) luna_write(w, zeros);
    }
    for (int64_t i = 0; i < n; i++)
      off = fmax(off, fabs((double)got[i] + (double)gradient[i] / norm * fmin(norm, 100)));
    CHECK(off <= 1e-4, "gradients of %g are clipped to others, off by %g", (double)sizes[step], off);
    CHECK(fabs((double)luna_optimizer_grad_norm(sgd) - norm) <= 1e-6 * norm || (norm > 3.4e38 &&
          isinf(luna_optimizer_grad_norm(sgd))), "the norm is %g, not %g", (double)luna_optimizer_grad_norm(sgd), norm);
  }
  CHECK(luna_optimizer_skipped(sgd) == 0 && luna_optimizer_skipped(adam) == 2, "%lld steps skipped, %lld of Adam",
        (long long)luna_optimizer_skipped(sgd), (long long)luna_optimizer_skipped(adam));
  free(zeros), free(gradient), free(got);
  luna_close(ctx);
}
/* two skipped steps in a row, found when the loss is read, make the next an error, until a good one has been read */
static void device_not_finite(const device *d) {
  const luna_status want[6] = {LUNA_OK, LUNA_OK, LUNA_OK, LUNA_NOT_FINITE, LUNA_NOT_FINITE, LUNA_OK};
  const int64_t shape[1] = {3};
  const float value[2][3] = {{1, 2, 3}, {1, NAN, 3}};
  const luna_init init = {LUNA_INIT_ONES, 1};
  luna_optimizer_config config = {0};
  luna_ctx *ctx = device_open(d, 5);
  luna_params *params = luna_params_open(ctx);
  luna_tensor *w = luna_param(params, "w", 1, shape, init);
  config.max_skips = 2;
  luna_optimizer *adam = luna_adamw(params, &config);
  for (int step = 0; step < 6; step++) {
    luna_begin_step(ctx);
    luna_tensor *loss = luna_sum(luna_mul(luna_tensor_new(ctx, value[step > 0 && step < 4], 1, shape), w), 0);
    luna_backward(loss);
    const luna_status got = luna_optimizer_step(adam);
    CHECK(got == want[step], "step %d: %s, not %s", step, luna_status_text(got), luna_status_text(want[step]));
    luna_item(loss);
  }
  CHECK(luna_optimizer_skipped(adam) == 3 && luna_optimizer_steps(adam) == 3, "%lld steps skipped, %lld made",
        (long long)luna_optimizer_skipped(adam), (long long)luna_optimizer_steps(adam));
  luna_close(ctx);
}

/* ---- a target on a logit of -Inf is an infinite loss with a finite gradient, also where logits are not stored ---- */
static void infinite_logits_in(luna_ctx *ctx, const char *what, int64_t classes, float smoothing) {
  enum { ROWS = 4, IN = 3 };
  const int64_t wide[2] = {classes, IN};
  luna_params *params = luna_params_open(ctx);
  const luna_init init = {LUNA_INIT_XAVIER, 1};
  luna_tensor *weight = luna_param(params, "w", 2, wide, init), *bias = luna_param(params, "b", 1, &classes, init);
  luna_tensor *of[3] = {NULL, weight, bias};
  float *b = common_floats(classes), *got = common_floats(classes * IN);
  for (int64_t i = 0; i < classes; i++)
    b[i] = i % 5 == 2 || i > classes - 3 ? -INFINITY : (float)common_number(4, (uint64_t)i);
  if (bias) luna_write(bias, b);
  for (int way = 0; way < 2; way++)
    for (int at = 0; at < 3; at++) {     /* the label: of a number, between numbers, at the end */
      const int32_t label = at == 0 ? 3 : at == 1 ? 2 : (int32_t)classes - 1, labels[ROWS] = {label, -1, label, label};
      const bool infinite = at > 0 || smoothing > 0;
      luna_cross_entropy_config config = {0};
      config.smoothing = smoothing;
      luna_begin_step(ctx);
      luna_tensor *x = luna_require_grad(common_tensor(ctx, 9, ROWS, IN, 0, 0));
      luna_tensor *loss = way ? luna_linear_cross_entropy(x, weight, bias, labels, &config) :
        luna_cross_entropy(luna_linear(x, weight, bias), labels, &config);
      CHECK(luna_backward(loss) == LUNA_OK, "%s: %s", what, luna_error(ctx));
      const float value = luna_item(loss);
      CHECK(infinite ? value == INFINITY : value > 0 && value < 10, "%s: %d classes, smoothing %g, way %d, label %d: "
            "the loss is %g", what, (int)classes, (double)smoothing, way, (int)label, (double)value);
      of[0] = x;
      for (int k = 0; k < 3; k++) {
        int64_t wrong = 0;
        luna_read_grad(of[k], got);
        for (int64_t i = 0; i < luna_count(of[k]); i++) wrong += !(fabsf(got[i]) < 10);
        CHECK(wrong == 0, "%s: %d classes, smoothing %g, way %d, label %d: %d of gradient %d are not finite", what,
              (int)classes, (double)smoothing, way, (int)label, (int)wrong, k);
      }
      luna_params_zero_grad(params);
    }
  free(b), free(got);
}
static void device_infinite_logits(const device *d) {
  for (int i = -1; i < COMMON_ISAS; i++) {
    luna_options options = {0};
    options.threads = 2;
    if (i >= 0) options.isa = common_isas[i];
    if (i >= 0 && !luna_isa_available(common_isas[i])) continue;
    luna_ctx *ctx = i < 0 ? device_open(d, 3) : luna_open(&options);
    for (int k = 0; k < 6; k++)
      infinite_logits_in(ctx, i < 0 ? "device" : luna_isa_name(options.isa), k % 2 ? 1100 : 9, (float)(k / 2) / 2);
    luna_close(ctx);
  }
}

/* ---- contexts that share a set read what its owner has queued, though no call waited; the second shares it ---- */
static luna_tensor *device_infer(luna_ctx *ctx, const luna_lm *lm) {
  static const int32_t tokens[20] = {3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4};
  luna_begin_inference(ctx);
  return luna_lm_forward(lm, &(luna_input){ tokens, NULL, 2, 10, NULL });
}
static void device_sharing_once(const device *d, unsigned seed) {
  enum { COUNT = 20 * 31 };
  static const int32_t token[1] = {7};
  device_run owner;
  luna_ctx *ctx[2] = {device_open(d, 1), device_open(d, 2)};
  luna_lm lm[2];
  float expected[COUNT] = {0}, got[2][COUNT] = {{0}};
  if (device_run_start(&owner, d, 2, 5, "sharing")) {
    const luna_params *from = owner.params;
    for (int i = 0; i < 2; i++) {
      luna_params *shared = luna_params_share(ctx[i], from);
      CHECK(luna_lm_init(&lm[i], shared, &owner.lm.config) == LUNA_OK, "sharing: %s", luna_error(ctx[i]));
      from = shared;
    }
    for (int step = 0; step < 3; step++) {
      if (step > 0) device_step(&owner, step); /* the updates are queued, not waited for */
      for (int i = 0; i < 2; i++) luna_read(device_infer(ctx[i], &lm[i]), got[i]);
      luna_read(device_infer(owner.ctx, &owner.lm), expected);
      for (int i = 0; i < 2; i++)
        CHECK(memcmp(got[i], expected, sizeof expected) == 0,
              "seed %u, step %d: sharer %d reads other values than its owner has: %s", seed, step, i,
              common_where(got[i], expected, COUNT));
    }
    device_step(&owner, 3);
    luna_stream *s[2] = {luna_stream_open(&lm[0], NULL),
                         luna_stream_open(&owner.lm, NULL)}; /* with no begin before the first */
    const float *logits[2] = {luna_stream_step(s[0], token), luna_stream_step(s[1], token)};
    CHECK(logits[0] && logits[1] && memcmp(logits[0], logits[1], 31 * sizeof(float)) == 0,
          "seed %u: a stream of a shared set has other logits: %s", seed, common_where(logits[0], logits[1], 31));
    luna_stream_close(s[0]), luna_stream_close(s[1]);
  }
  luna_close(ctx[1]);
  luna_close(ctx[0]);
  luna_close(owner.ctx);
}
static void device_sharing(const device *d) {
  for (unsigned seed = 1; seed <= (d->seed ? 12u : 1u); seed++) {
    if (d->seed) d->seed(seed);
    device_sharing_once(d, seed);
  }
}

/* ---- a context that measures needs no device ---- */
static void device_measures(const device *d) {
  luna_options options = {0};
  luna_lm_config config = {0};
  luna_lm lm;
  options.backend = d->backend;
  options.measure = true;
  options.threads = 1;
  config.vocab = 31;
  config.layer.dim = 16;
  luna_ctx *ctx = luna_open(&options);
  if (CHECK(ctx && luna_lm_init(&lm, luna_params_open(ctx), &config) == LUNA_OK, "measuring on a device: %s",
            luna_error(ctx)))
    CHECK(device_infer(ctx, &lm) && luna_memory(ctx).peak > 31 * 16 * sizeof(float), "measured are %zu bytes: %s",
          luna_memory(ctx).peak, luna_error(ctx));
  luna_close(ctx);
}

/* ---- reading, writing, and what a device refuses ---- */
static void device_refusals(const device *d) {
  const int64_t shape[2] = {2, 3};
  const float values[6] = {1, 2, 3, 4, 5, 6}, others[6] = {6, 5, 4, 3, 2, 1};
  float back[6] = {0};
  char block[4096];
  device_run on_host, on_device;
  luna_options options = {0};
  options.backend = d->backend;
  options.block = block;
  options.block_size = sizeof block;
  CHECK(!luna_open(&options), "a block of host memory serves a device");
  const bool open = device_run_start(&on_host, NULL, 0, 1, "refusals");
  if (device_run_start(&on_device, d, 0, 1, "refusals") && open) {
    luna_begin_inference(on_device.ctx);
    luna_tensor *t = luna_tensor_new(on_device.ctx, values, 2, shape);
    CHECK(t->device == d->backend->device && t->device != 0, "the tensor is on device %d", t->device);
    CHECK(luna_read(t, back) == LUNA_OK && memcmp(back, values, sizeof back) == 0,
          "what is read is not what was written: %s", common_where(back, values, 6));
    CHECK(luna_write(t, others) == LUNA_OK && luna_read(t, back) == LUNA_OK && memcmp(back, others, sizeof back) == 0,
          "luna_write does not write: %s", common_where(back, others, 6));
    luna_begin_inference(on_host.ctx);
    luna_tensor *sum = luna_add(t, luna_tensor_new(on_host.ctx, values, 2, shape));
    CHECK(!sum && luna_error_id_of(on_device.ctx) == LUNA_ERROR_OTHER_CONTEXT, "a host tensor in a device's op: %s",
        luna_error(on_device.ctx));
    luna_params *shared = luna_params_share(on_device.ctx, on_host.params);
    luna_lm lm;
    luna_status status = luna_lm_init(&lm, shared, &on_host.lm.config);
    CHECK(status != LUNA_OK && luna_error_id_of(on_device.ctx) == LUNA_ERROR_BORROW_DEVICE,
        "sharing the CPU's parameters: %s", luna_error(on_device.ctx));
    device_file file = {NULL, 0, 0};
    luna_io io = {0};
    io.write = device_file_write;
    io.user = &file;
    luna_save(on_host.params, luna_callbacks(&io));
    CHECK(luna_load(on_device.params, luna_bytes(file.bytes, file.size)) == LUNA_OK, "loading a copy fails");
    free(file.bytes);
  }
  luna_close(on_host.ctx);
  luna_close(on_device.ctx);
}

/* ---- serving: streams and translations of a model on the device are those of its copy on the CPU ---- */
#define DEVICE_STREAM_LIMIT 1e-5
static bool device_same_weights(luna_params *from, luna_params *to) {
  device_file file = {NULL, 0, 0};
  luna_io io = {0};
  io.write = device_file_write;
  io.user = &file;
  const bool good = luna_save(from, luna_callbacks(&io)) == LUNA_OK && luna_load(to, luna_bytes(file.bytes,
                                                                                                file.size)) == LUNA_OK;
  free(file.bytes);
  return good;
}
static void device_random_weights(luna_params *params) { /* no norm or bias that is as it began */
  for (int64_t i = 0; i < luna_params_tensor_count(params); i++) {
    luna_tensor *p = luna_params_at(params, i, NULL);
    float *x = common_random(luna_count(p), 300 + (uint64_t)i,
                             p->rank > 1 ? sqrt(3.0 / (double)p->shape[p->rank - 1]) : 0.5);
    for (int64_t j = 0; j < luna_count(p) && p->rank == 1; j++) x[j] += 0.7f;
    luna_write(p, x);
    free(x);
  }
}

enum { STREAM_VOCAB = 29, STREAM_KINDS = 12, STREAM_TOKENS = 60 };
typedef struct device_models { /* [0] on the CPU, [1] on the device */
  luna_ctx *ctx[2];
  luna_lm lm[2];
  luna_stream_config config;
} device_models;
/* kinds: folded scores and not, keys tied and not, convolutions, norms before and after, positions, omegas, a horizon,
   memories that forget, one sequence and three */
static bool device_models_open(device_models *m, const device *d, int kind) {
  static const luna_activation omegas[3] = {LUNA_ACTIVATION_SOFTPLUS2, LUNA_ACTIVATION_SOFTPLUS, LUNA_ACTIVATION_ELU1},
      activations[3] = {LUNA_ACTIVATION_RELU, LUNA_ACTIVATION_GELU, LUNA_ACTIVATION_RELU};
  static const luna_positions positions[3] = {LUNA_POSITIONS_NONE, LUNA_POSITIONS_SINUSOIDAL, LUNA_POSITIONS_LEARNED};
  static const int64_t convolutions[4] = {0, 4, 1, 7};
  const bool unfolded = kind == 1 || kind == 4 || kind == 7 || kind == 10;
  const bool wide = kind == 8 || kind == 9 || kind == 11; /* more than a block has threads */
  luna_lm_config config = {0};
  luna_params *params[2];
  config.vocab = STREAM_VOCAB;
  config.layers = 2;
  config.max_length = 2 * STREAM_TOKENS;
  config.layer.memory = unfolded ? 13 : kind == 6 ? 20 : 5;
  config.layer.dim = kind == 3 ? 20 : kind == 6 ? 40 : 16;
  config.layer.heads = kind == 6 ? 1 : 4;
  config.layer.ffn = 24;
  config.layer.sharing = kind % 2 ? LUNA_SHARING_FULL : LUNA_SHARING_TIED;
  config.layer.convolution = convolutions[kind % 4];
  config.layer.pre_norm = kind / 2 % 2 == 1;
  config.layer.omega = omegas[(kind + kind / 3) % 3];
  config.layer.activation = activations[kind % 3];
  config.positions = positions[kind % 3];
  config.layer.horizon = kind == 3 ? 17 : 0;
  config.layer.forget = kind == 7 ? LUNA_FORGET_CONSTANT : LUNA_FORGET_NONE;
  if (kind == 5 || kind == 9) config.layer.forget = LUNA_FORGET_GATED;
  if (kind >= 10) config.layer.forget = LUNA_FORGET_ROUTED;
  config.layer.output_gate = kind == 5 || kind == 10;
  if (wide) config.layers = 1, config.layer.memory = 258, config.layer.dim = 260, config.layer.heads = 1;
  memset(m, 0, sizeof *m);
  m->config.batch = kind < 2 || wide ? 1 : 3;
  m->config.chunk = 5;
  for (int i = 0; i < 2; i++) {
    m->ctx[i] = device_open(i ? d : NULL, 3);
    params[i] = luna_params_open(m->ctx[i]);
    if (!CHECK(params[i] && luna_lm_init(&m->lm[i], params[i], &config) == LUNA_OK, "streams, kind %d: %s", kind,
               luna_error(m->ctx[i]))) return false;
  }
  device_random_weights(params[0]);
  return CHECK(device_same_weights(params[0], params[1]), "streams, kind %d: the weights do not move", kind);
}
static luna_stream *device_stream(const device_models *m, int at) {
  luna_stream *s = luna_stream_open(&m->lm[at], &m->config);
  CHECK(s != NULL, "a stream does not open: %s", luna_error(m->ctx[at]));
  return s;
}
/* columns [from, from + count) of tokens [batch, STREAM_TOKENS] */
static const float *device_advance(luna_stream *s, int64_t batch, const int32_t *tokens, int64_t from, int64_t count) {
  int32_t part[3 * STREAM_TOKENS] = {0};
  for (int64_t i = 0; i < batch * count; i++) part[i] = tokens[i / count * STREAM_TOKENS + from + i % count];
  return count == 1 ? luna_stream_step(s, part) : luna_stream_prefill(s, &(luna_input){ part, NULL, 0, count, NULL });
}
static void device_close_logits(const char *what, int kind, const float *got, const float *expected, int64_t count) {
  if (!CHECK(got && expected, "streams, kind %d, %s: no logits", kind, what)) return;
  const double error = common_error(got, expected, count, 1e-3);
  CHECK(error <= DEVICE_STREAM_LIMIT, "streams, kind %d, %s: the logits are off by %.3g: %s", kind, what, error,
        common_where(got, expected, count));
}
/* the device's stream through steps, prefills, and a reordering: all logits, one after the other */
#define STREAM_PARTS 9
static int64_t device_stream_part(int i) {
  static const int64_t parts[STREAM_PARTS] = {1, 1, 13, 1, 5, 1, 10, 2, 1};
  return parts[i];
}
static void device_stream_run(luna_stream *s, int64_t batch, const int32_t *tokens, float *logits) {
  static const int32_t order[3] = {2, 0, 0}, none[1] = {0};
  int64_t at = 0;
  for (int i = 0; i < STREAM_PARTS; at += device_stream_part(i++)) {
    const float *y = device_advance(s, batch, tokens, at, device_stream_part(i));
    if (!CHECK(y != NULL, "a stream stops: %s", luna_stream_error(s))) return;
    memcpy(logits + i * batch * STREAM_VOCAB, y, (size_t)(batch * STREAM_VOCAB) * sizeof(float));
    if (i == 4)
      CHECK(luna_stream_reorder(s, batch > 1 ? order : none) == LUNA_OK, "reordering: %s", luna_stream_error(s));
  }
  CHECK(luna_stream_position(s) == at, "after %lld tokens a stream is at %lld", (long long)at,
        (long long)luna_stream_position(s));
}
static void device_stream_kind(const device *d, int kind) {
  static const int32_t nowhere[3] = {1, 3, 0};
  device_models m;
  if (device_models_open(&m, d, kind)) {
    const int64_t batch = m.config.batch, row = batch * STREAM_VOCAB, all = STREAM_PARTS * row;
    int32_t *tokens = common_tokens(batch * STREAM_TOKENS, 70 + (uint64_t)kind, STREAM_VOCAB),
        bad[3] = {1, STREAM_VOCAB, 2};
    float *expected = common_floats(all), *got = common_floats(all), *again = common_floats(all);
    const size_t memory = luna_memory(m.ctx[1]).current;
    luna_stream *on_host = device_stream(&m, 0), *on_device = device_stream(&m, 1), *other = device_stream(&m, 1),
        *third = device_stream(&m, 0);
    CHECK(luna_memory(m.ctx[1]).current == memory, "streams, kind %d: opening takes %zu bytes of the context's step",
          kind, luna_memory(m.ctx[1]).current - memory);
    if (on_host && on_device && other && third) {
      const size_t size = luna_stream_state_size(on_host);
      char *state = (char *)common_alloc(size), *moved = (char *)common_alloc(size);
      device_stream_run(on_host, batch, tokens, expected);
      device_stream_run(on_device, batch, tokens, got);
      for (int i = 0; i < STREAM_PARTS; i++)
        device_close_logits(device_stream_part(i) > 1 ? "a prefill" : "a step", kind, got + i * row, expected + i * row,
                            row);
      device_stream_run(other, batch, tokens, again);
      CHECK(memcmp(got, again, (size_t)all * sizeof(float)) == 0,
            "streams, kind %d: a second stream has other bits: %s", kind, common_where(again, got, all));
      for (unsigned seed = 2; d->seed && (kind == 2 || kind == 4 || kind == 10) && seed <= 3; seed++) {
        d->seed(seed);
        luna_stream_reset(other);
        CHECK(luna_stream_position(other) == 0, "streams, kind %d: a reset stream is at %lld", kind,
              (long long)luna_stream_position(other));
        device_stream_run(other, batch, tokens, again);
        CHECK(memcmp(got, again, (size_t)all * sizeof(float)) == 0,
              "streams, kind %d: a run in another order has other bits: %s", kind, common_where(again, got, all));
      }
      luna_stream_reset(other);
      device_stream_run(other, batch, tokens, again);
      CHECK(memcmp(got, again, (size_t)all * sizeof(float)) == 0, "streams, kind %d: a reset stream has other bits: %s",
            kind, common_where(again, got, all));

      /* what is refused changes nothing */
      const int64_t position = luna_stream_position(on_device);
      bad[0] = batch == 1 ? -1 : 1;
      CHECK(!luna_stream_step(on_device, bad) && luna_stream_error_id(on_device) == LUNA_ERROR_STREAM_TOKEN,
          "streams, kind %d: a bad token: %s", kind, luna_stream_error(on_device));
      CHECK(luna_stream_reorder(on_device, nowhere) != LUNA_OK || batch == 1,
            "streams, kind %d: a sequence that does not exist is continued", kind);
      CHECK(luna_stream_state_load(on_device, state, size) != LUNA_OK, "streams, kind %d: zeros are a state", kind);
      CHECK(luna_stream_position(on_device) == position, "streams, kind %d: what is refused moves a stream", kind);

      /* saved here and loaded there, saved there and loaded here */
      CHECK(luna_stream_state_size(on_device) == size && luna_stream_state_size(other) == size,
            "streams, kind %d: the device's states have another size", kind);
      CHECK(luna_stream_state_save(on_device, state, size) == LUNA_OK &&
          luna_stream_state_load(third, state, size) == LUNA_OK,
              "streams, kind %d: a state does not come from the device", kind);
      CHECK(luna_stream_state_save(third, moved, size) == LUNA_OK && memcmp(state, moved, size) == 0,
            "streams, kind %d: a state changes on its way", kind);
      CHECK(luna_stream_state_save(on_host, state, size) == LUNA_OK &&
          luna_stream_state_load(other, state, size) == LUNA_OK, "streams, kind %d: a state does not go to the device",
              kind);
      CHECK(luna_stream_state_save(other, moved, size) == LUNA_OK && memcmp(state, moved, size) == 0,
            "streams, kind %d: a state changes on its way back", kind);
      const float *y = device_advance(on_host, batch, tokens, position, 3);
      device_close_logits("from a state of the device", kind, device_advance(third, batch, tokens, position, 3), y,
                          row);
      device_close_logits("from a state of the CPU", kind, device_advance(other, batch, tokens, position, 3), y, row);
      device_close_logits("after what was refused", kind, device_advance(on_device, batch, tokens, position, 3), y,
                          row);

      /* copied on the device, from it, and to it */
      CHECK(common_stream_copy(other, on_device) == LUNA_OK && luna_stream_position(other) == position + 3,
            "streams, kind %d: copying on the device: %s", kind, luna_stream_error(other));
      y = device_advance(on_device, batch, tokens, position + 3, 1);
      const float *copied = device_advance(other, batch, tokens, position + 3, 1);
      CHECK(y && copied && memcmp(copied, y, (size_t)row * sizeof(float)) == 0,
            "streams, kind %d: a copy has other bits: %s", kind, common_where(copied, y, row));
      CHECK(common_stream_copy(third, on_device) == LUNA_OK && common_stream_copy(other, on_host) == LUNA_OK,
            "streams, kind %d: copying between the two", kind);
      y = device_advance(on_device, batch, tokens, position + 4, 1);
      device_close_logits("copied from the device", kind, device_advance(third, batch, tokens, position + 4, 1), y,
                          row);
      y = device_advance(on_host, batch, tokens, position + 3, 1);
      device_close_logits("copied to the device", kind, device_advance(other, batch, tokens, position + 3, 1), y, row);
      free(state), free(moved);
    }
    luna_stream_close(on_host), luna_stream_close(on_device), luna_stream_close(other), luna_stream_close(third);
    free(tokens), free(expected), free(got), free(again);
  }
  luna_close(m.ctx[0]);
  luna_close(m.ctx[1]);
}
/* A sequence whose feature does not fit stays as it was, on the device as on the host, to which states go and back. */
static void device_misfits(const device *d, luna_forget forget) {
  luna_lm_config config = {0};
  luna_ctx *ctx[2];
  luna_params *params[2];
  luna_lm lm[2];
  luna_stream *s[2];
  config.features = 2, config.outputs = 3, config.layer.dim = 16, config.layer.heads = 2, config.layers = 2;
  config.layer.forget = forget, config.layer.convolution = 3;
  for (int i = 0; i < 2; i++) {
    ctx[i] = device_open(i ? d : NULL, 3);
    params[i] = luna_params_open(ctx[i]);
    if (!CHECK(luna_lm_init(&lm[i], params[i], &config) == LUNA_OK, "%s", luna_error(ctx[i]))) return;
  }
  CHECK(device_same_weights(params[0], params[1]), "misfits: the weights do not move");
  for (int i = 0; i < 2; i++) s[i] = luna_stream_open(&lm[i], &(luna_stream_config){ .batch = 2 });
  for (int t = 0; t < 12 && s[0] && s[1]; t++) {
    const float x[4] = {(float)(t % 3), 1, t % 4 == 2 ? 1e20f : 2, (float)(t % 5)};
    const float *want = luna_stream_step_features(s[0], x), *got = luna_stream_step_features(s[1], x);
    if (!CHECK(want && got, "misfits, step %d: %s", t, luna_stream_error(s[1]))) break;
    CHECK(luna_stream_error_id(s[1]) == luna_stream_error_id(s[0]), "misfits, step %d: %s", t, luna_stream_error(s[1]));
    for (int i = 0; i < 6; i++)
      CHECK(isnan(want[i]) ? isnan(got[i]) : fabs((double)(got[i] - want[i])) < DEVICE_STREAM_LIMIT,
            "misfits, step %d: output %d is %g, on the host %g", t, i, (double)got[i], (double)want[i]);
  }
  for (int i = 0; i < 2; i++) luna_stream_close(s[i]), luna_close(ctx[i]);
}
/* a state goes from the device of one context to another's */
static void device_stream_apart(const device *d) {
  device_models m[2];
  luna_stream *s[2] = {NULL, NULL};
  for (int i = 0; i < 2; i++)
    if (device_models_open(&m[i], d, 0)) s[i] = device_stream(&m[i], 1);
  CHECK(common_stream_copy(s[0], s[1]) == LUNA_OK,
      "copying between contexts: %s", luna_stream_error(s[0]));
  for (int i = 0; i < 2; i++) {
    luna_stream_close(s[i]);
    luna_close(m[i].ctx[0]), luna_close(m[i].ctx[1]);
  }
}
/* from a state said to be at a position: after 10^9 tokens what a few more move is far below what float32 has of it;
   after none, what it holds is nothing */
static void device_stream_at(const device *d, int64_t late) {
  device_models m;
  if (device_models_open(&m, d, 4)) { /* without a convolution: a state is doubles */
    const int64_t batch = m.config.batch;
    int32_t *tokens = common_tokens(batch * STREAM_TOKENS, 90, STREAM_VOCAB);
    luna_stream *s[2] = {device_stream(&m, 0), device_stream(&m, 1)};
    const size_t size = luna_stream_state_size(s[0]), words = size / sizeof(double);
    double *start = (double *)common_alloc(size), *end[2] =
        {(double *)common_alloc(size), (double *)common_alloc(size)}, off = 0, moved = 0;
    const float *y[2] = {NULL, NULL};
    if (s[0] && s[1] && CHECK(device_advance(s[0], batch, tokens, 0, 10) &&
                              luna_stream_state_save(s[0], start, size) == LUNA_OK, "a stream does not begin")) {
      memcpy((char *)start + 16, &late, sizeof late); /* after a word that marks it and the batch */
      for (size_t i = words - 4 * (size_t)batch * 16 * 13; late == 0 && i < words; i++) start[i] = NAN;
      for (int i = 0; i < 2; i++) {
        CHECK(luna_stream_state_load(s[i], start, size) == LUNA_OK && luna_stream_position(s[i]) == late,
              "a late state: %s", luna_stream_error(s[i]));
        (void)device_advance(s[i], batch, tokens, 10, 20);
        y[i] = device_advance(s[i], batch, tokens, 30, 1);
        CHECK(luna_stream_state_save(s[i], end[i], size) == LUNA_OK, "saving a late state");
      }
      device_close_logits(late ? "after 10^9 tokens" : "from no tokens", 4, y[1], y[0], batch * STREAM_VOCAB);
      for (size_t i = 3; i < words; i++)
        off += pow(end[1][i] - end[0][i], 2), moved += pow(end[0][i] - (late ? start[i] : 0), 2);
      CHECK(moved > 0 && sqrt(off) <= DEVICE_STREAM_LIMIT * sqrt(moved),
          "after %lld tokens a state moves by %.3g, on the device by %.3g beside it", (long long)late, sqrt(moved),
              sqrt(off));
    }
    luna_stream_close(s[0]), luna_stream_close(s[1]);
    free(tokens), free(start), free(end[0]), free(end[1]);
  }
  luna_close(m.ctx[0]);
  luna_close(m.ctx[1]);
}
/* a stream that is opened and used between forward and backward of a training step leaves the step as it was */
static void device_stream_in_step(const device *d) {
  float *parameters[2] = {NULL, NULL};
  int64_t count = 0;
  for (int with = 0; with < 2; with++) {
    device_run r;
    if (device_run_start(&r, d, 2, 8, "a stream in a step")) {
      int32_t *tokens = common_tokens(40, 5, 31);
      count = luna_params_element_count(r.params);
      luna_begin_step(r.ctx);
      luna_tensor *logits = luna_lm_forward(&r.lm, &(luna_input){ tokens, NULL, 2, 19, NULL });
      luna_stream *s = with ? luna_stream_open(&r.lm, NULL) : NULL;
      CHECK(!with || luna_stream_prefill(s, &(luna_input){ tokens, NULL, 0, 7, NULL }), "a stream in a step: %s",
            luna_error(r.ctx));
      luna_tensor *loss = luna_cross_entropy(logits, tokens + 1, NULL);
      CHECK(luna_backward(loss) == LUNA_OK && luna_optimizer_step(r.optimizer) == LUNA_OK,
            "a step with a stream in it: %s", luna_error(r.ctx));
      parameters[with] = common_parameters(r.params);
      luna_stream_close(s);
      free(tokens);
    }
    luna_close(r.ctx);
  }
  CHECK(parameters[0] && parameters[1] && memcmp(parameters[0], parameters[1], (size_t)count * sizeof(float)) == 0,
        "a stream in a step changes what is learned: %s", common_where(parameters[1], parameters[0], count));
  free(parameters[0]), free(parameters[1]);
}

/* decoders: streams of one source and of three, of different lengths, some shorter than the memory; and whole
   translations */
static void device_decoder(const device *d, int kind) {
  static const int32_t source[15] = {3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9}, lengths[3] = {5, 2, 4},
      order[6] = {1, 1, 3, 2, 4, 5};
  const int64_t sources = kind % 2 ? 3 : 1, beam = kind == 3 ? 1 : 2, batch = sources * beam;
  luna_seq2seq_config config = {0};
  luna_seq2seq model[2];
  luna_ctx *ctx[2];
  luna_params *params[2];
  luna_stream *s[2] = {NULL, NULL};
  luna_beam_config search = {0};
  luna_generate_config greedy = {0};
  int32_t out[2][24], out_lengths[2][3];
  float score[2][3];
  bool good = true;
  config.vocab = 17;
  config.encoder.layer.dim = 16;
  config.encoder.layer.heads = 4;
  config.encoder.layers = 2;
  config.encoder.layer.memory = 4;
  config.encoder.layer.ffn = 24;
  /* 24 scores from 8 and 3: not folded */
  if (kind == 4) config.encoder.layer.heads = 8, config.encoder.layer.memory = 3, config.encoder.layer.dim = 8;
  if (kind == 1) config.encoder.layer.heads = 8; /* 32 from 16 and 4: nor here */
  config.encoder.positions = kind % 3 == 1 ? LUNA_POSITIONS_LEARNED : LUNA_POSITIONS_SINUSOIDAL;
  config.encoder.layer.pre_norm = kind / 2 % 2 == 1;
  config.encoder.layer.sharing = kind % 2 ? LUNA_SHARING_FULL : LUNA_SHARING_TIED;
  config.encoder.first_position = kind % 3; /* 1: of learned positions, 2: of sinusoidal ones */
  config.separate_output = kind == 2;
  search.beam = 3;
  search.max_length = 8;
  search.begin = 0;
  search.end = 1;
  greedy.end = 1, greedy.max_length = 8;
  memset(out, 0, sizeof out);
  for (int i = 0; i < 2; i++) {
    ctx[i] = device_open(i ? d : NULL, 3);
    params[i] = luna_params_open(ctx[i]);
    good = CHECK(params[i] && luna_seq2seq_init(&model[i], params[i], &config) == LUNA_OK, "decoder %d: %s", kind,
                 luna_error(ctx[i])) && good;
  }
  if (good) {
    device_random_weights(params[0]);
    CHECK(device_same_weights(params[0], params[1]), "decoder %d: the weights do not move", kind);
    for (int i = 0; i < 2; i++) {
      s[i] = luna_seq2seq_stream_open(&model[i], &(luna_input){ source, lengths, sources, 5, NULL }, beam);
      CHECK(s[i] != NULL, "decoder %d: %s", kind, luna_error(ctx[i]));
    }
    for (int t = 0; t < 8 && s[0] && s[1]; t++) {
      int32_t *tokens = common_tokens(2 * batch, 40 + (uint64_t)t, 17);
      const float *y[2];
      for (int i = 0; i < 2; i++) {
        y[i] = t == 5 ? luna_stream_prefill(s[i], &(luna_input){ tokens, NULL, 0, 2, NULL }) :
            luna_stream_step(s[i], tokens);
        if (t == 3 && batch == 6)
          CHECK(luna_stream_reorder(s[i], order) == LUNA_OK, "decoder %d: %s", kind, luna_stream_error(s[i]));
      }
      const double error = y[0] && y[1] ? common_error(y[1], y[0], batch * 17, 1e-3) : 1;
      CHECK(error <= DEVICE_STREAM_LIMIT, "decoder %d, token %d: the logits are off by %.3g: %s; %s", kind, t, error,
            common_where(y[1], y[0], batch * 17), luna_stream_error(s[1]));
      free(tokens);
    }
    luna_stream_close(s[0]), luna_stream_close(s[1]);
    for (int beam = 0; beam < 2; beam++) {
      const luna_input words = { source, lengths, sources, 5, NULL };
      for (int i = 0; i < 2; i++) {
        const luna_status status =
            beam ? luna_beam_search(&model[i], &words, &search, out[i], out_lengths[i], score[i]) :
            luna_seq2seq_generate(&model[i], &words, &greedy, out[i], out_lengths[i]);
        CHECK(status == LUNA_OK, "a translation on %s: %s", i ? "the device" : "the CPU", luna_error(ctx[i]));
      }
      CHECK(memcmp(out_lengths[0], out_lengths[1], (size_t)sources * sizeof(int32_t)) == 0 &&
            memcmp(out[0], out[1], sizeof out[0]) == 0, "decoder %d: the device translates otherwise: %d tokens that "
            "begin with %d, on the CPU %d with %d", kind, (int)out_lengths[1][0], (int)out[1][0],
            (int)out_lengths[0][0], (int)out[0][0]);
    }
    CHECK(common_error(score[1], score[0], sources, 1e-3) <= DEVICE_STREAM_LIMIT,
          "decoder %d: a translation's score is %g, on the CPU %g", kind, (double)score[1][0], (double)score[0][0]);
  }
  luna_close(ctx[0]);
  luna_close(ctx[1]);
}
static void device_serving(const device *d) {
  for (int kind = 0; kind < STREAM_KINDS; kind++) device_stream_kind(d, kind);
  device_misfits(d, LUNA_FORGET_NONE), device_misfits(d, LUNA_FORGET_GATED), device_misfits(d, LUNA_FORGET_ROUTED);
  device_stream_apart(d);
  device_stream_at(d, 1000000000);
  device_stream_at(d, 0);
  device_stream_in_step(d);
  for (int kind = 0; kind < 5; kind++) device_decoder(d, kind);
}

static void device_all(const device *d, const char *only) {
  device_cases(d, only);
  if (only) return;
  device_training(d);
  device_checkpoints(d);
  device_skips(d);
  device_large(d);
  device_infinite_logits(d);
  device_not_finite(d);
  device_sharing(d);
  device_measures(d);
  device_serving(d);
  device_refusals(d);
}
#endif
