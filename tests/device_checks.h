/* A backend whose memory the host cannot read, against the CPU: every op and layer with its gradients, training to the same losses, checkpoints that
   move either way, and what is refused. Used by device.c (the CPU's own rows behind a wall) and cuda.c. */
#ifndef DEVICE_CHECKS_H
#define DEVICE_CHECKS_H
#include "op_cases.h"

typedef struct device {
  const luna_backend *backend;
  double output_limit, gradient_limit; /* relative error against the CPU; 0: the same bits */
  bool big;                            /* the larger sizes of the op cases */
  const char *skip;                    /* a case that does not apply, or null */
  void (*seed)(unsigned seed);         /* sets the order in which things are done that may be done in any; null: no such thing */
} device;

static luna_ctx *device_open(const device *d, uint64_t seed) {
  luna_options options = {0};
  options.backend = d ? d->backend : NULL;
  options.threads = 1;
  options.seed = seed;
  return luna_open(&options);
}

static void device_compare(const char *what, const char *part, int i, const trial_array *got, const trial_array *expected, bool gradient, double limit) {
  const float *a = gradient ? got->gradient : got->values, *b = gradient ? expected->gradient : expected->values;
  if (limit == 0) CHECK(memcmp(a, b, (size_t)expected->count * sizeof(float)) == 0, "%s: %s %d has other bits", what, part, i);
  else {
    const double error = common_error(a, b, expected->count, gradient ? 0.1 : 1e-3);
    CHECK(error <= limit, "%s: %s %d is off by %.3g", what, part, i, error);
  }
}
static void device_case(const device *d, const op_case *c, int variant, bool big) {
  trial here, there;
  char what[128];
  /* through many ops rounding grows: the limit there is that between instruction sets */
  const bool whole = strstr(c->name, "_layer") || strstr(c->name, "lm") || strstr(c->name, "classifier") || strstr(c->name, "seq2seq");
  memset(&here, 0, sizeof here);
  memset(&there, 0, sizeof there);
  here.big = there.big = big;
  here.options.threads = there.options.threads = 1;
  there.options.backend = d->backend;
  snprintf(what, sizeof what, "%s, variant %d%s, on the device", c->name, variant, big ? ", big" : "");
  if (CHECK(trial_run(&here, c, variant, true), "%s: the CPU: %s", what, here.error) && CHECK(trial_run(&there, c, variant, true), "%s: %s", what, there.error)) {
    for (int i = 0; i < here.outputs; i++) device_compare(what, "output", i, &there.output[i], &here.output[i], false, d->output_limit);
    for (int i = 0; i < here.inputs; i++) device_compare(what, "the gradient of input", i, &there.input[i], &here.input[i], true, whole ? 4 * d->gradient_limit : d->gradient_limit);
    for (unsigned seed = 2; d->seed && seed <= 3; seed++) { /* the same bits in any order */
      trial again;
      memset(&again, 0, sizeof again);
      again.big = big;
      again.options = there.options;
      d->seed(seed);
      if (CHECK(trial_run(&again, c, variant, true), "%s, again: %s", what, again.error)) {
        for (int i = 0; i < here.outputs; i++) device_compare(what, "again, output", i, &again.output[i], &there.output[i], false, 0);
        for (int i = 0; i < here.inputs; i++) device_compare(what, "again, the gradient of input", i, &again.input[i], &there.input[i], true, 0);
      }
      trial_free(&again);
    }
  }
  trial_free(&here);
  trial_free(&there);
}
static void device_cases(const device *d, const char *only) {
  for (int i = 0; i < OP_CASES; i++) {
    if ((d->skip && strcmp(op_cases[i].name, d->skip) == 0) || (only && !strstr(op_cases[i].name, only))) continue;
    for (int v = 0; v < op_cases[i].variants; v++) device_case(d, &op_cases[i], v, d->big);
  }
}

/* ---- training: a small language model with dropout, a schedule and clipping, by each optimiser ---- */
#define DEVICE_STEPS 4
typedef struct device_run {
  luna_ctx *ctx;
  luna_params *params;
  luna_lm lm;
  luna_optimizer *optimizer;
} device_run;
static bool device_run_open(device_run *r, const device *d, int kind, uint64_t seed) {
  luna_lm_config config = {0};
  luna_sgd_config sgd = {0};
  luna_adamw_config adamw = {0};
  luna_apollo_config apollo = {0};
  config.vocab = 31;
  config.layers = 2;
  config.layer.dim = 16;
  config.layer.heads = 2;
  config.memory = 4;
  config.layer.ffn = 24;
  config.layer.dropout = 0.1f;
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
  r->optimizer = kind == 0 ? luna_sgd(r->params, &sgd) : kind == 1 ? luna_adam(r->params, &adamw) : kind == 2 ? luna_adamw(r->params, &adamw) : luna_apollo(r->params, &apollo);
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
  luna_tensor *t = luna_cross_entropy(luna_lm_forward(&r->lm, tokens, batch, n), tokens + batch * n);
  luna_backward(t);
  loss = luna_item(t);
  if (luna_optimizer_step(r->optimizer) != LUNA_OK) loss = NAN;
  free(tokens);
  return loss;
}
static void device_training(const device *d) {
  static const char *const kinds[4] = {"SGD", "Adam", "AdamW", "Apollo"};
  for (int kind = 0; kind < 4; kind++) {
    device_run here, there;
    const bool open = device_run_start(&here, NULL, kind, 5, kinds[kind]);
    if (device_run_start(&there, d, kind, 5, kinds[kind]) && open) {
      const int64_t count = luna_params_count(here.params);
      for (int step = 0; step < DEVICE_STEPS; step++) {
        const float a = device_step(&here, step), b = device_step(&there, step);
        const double off = fabs((double)a - (double)b) / fabs((double)a);
        CHECK(off <= 10 * d->output_limit, "%s, step %d: the loss is %.9g, on the CPU %.9g", kinds[kind], step, (double)b, (double)a);
      }
      float *a = common_parameters(here.params), *b = common_parameters(there.params);
      const double error = common_error(b, a, count, 1e-3), norm = (double)luna_optimizer_norm(here.optimizer);
      CHECK(error <= 10 * d->gradient_limit, "%s: the parameters are off by %.3g", kinds[kind], error);
      CHECK(fabs((double)luna_optimizer_norm(there.optimizer) - norm) <= 10 * d->gradient_limit * norm, "%s: the norm is %g, on the CPU %g", kinds[kind],
            (double)luna_optimizer_norm(there.optimizer), norm);
      CHECK(luna_optimizer_steps(there.optimizer) == DEVICE_STEPS && luna_optimizer_skipped(there.optimizer) == 0, "%s: %lld steps, %lld skipped", kinds[kind],
            (long long)luna_optimizer_steps(there.optimizer), (long long)luna_optimizer_skipped(there.optimizer));
      free(a), free(b);
    }
    luna_close(here.ctx);
    luna_close(there.ctx);
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
      CHECK(luna_save_training_io(first.optimizer, &io) == LUNA_OK, "%s: saving fails", what);
      CHECK(luna_load_training_bytes(second.optimizer, file.bytes, file.size) == LUNA_OK, "%s: loading fails", what);
      CHECK(luna_save_training_io(second.optimizer, &out) == LUNA_OK, "%s: saving again fails", what);
      CHECK(copy.size == file.size && memcmp(copy.bytes, file.bytes, file.size) == 0, "%s: the file changes on the way", what);
      for (int step = 2; step < 4; step++) {
        const float a = device_step(&first, step), b = device_step(&second, step);
        CHECK(fabs((double)a - (double)b) <= 10 * d->output_limit * fabs((double)a), "%s, step %d: the loss is %.9g, not %.9g", what, step, (double)b, (double)a);
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
  device_told += status == LUNA_OK && strstr(sentence, "1 steps skipped so far, the last in step 2") != NULL;
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
    luna_tensor *x = luna_tensor_new(ctx, step == 1 ? bad : good, 2, shape), *loss = luna_sum(luna_sum(luna_mul(x, w), 1), 0);
    luna_read(w, before);
    CHECK(luna_backward(loss) == LUNA_OK && luna_optimizer_step(adam) == LUNA_OK, "step %d fails", step);
    luna_read(w, after);
    CHECK((memcmp(before, after, sizeof before) == 0) == (step == 1), "step %d: w %s", step, step == 1 ? "changes" : "does not change");
  }
  CHECK(luna_optimizer_skipped(adam) == 1 && luna_optimizer_steps(adam) == 2, "%lld steps skipped, %lld made", (long long)luna_optimizer_skipped(adam), (long long)luna_optimizer_steps(adam));
  CHECK(device_told == 1, "the skipped step was told %d times", device_told);
  luna_close(ctx);
}

/* ---- reading, writing, and what a device refuses ---- */
static void device_refusals(const device *d) {
  const int64_t shape[2] = {2, 3};
  const float values[6] = {1, 2, 3, 4, 5, 6}, others[6] = {6, 5, 4, 3, 2, 1};
  float back[6] = {0};
  char block[4096];
  device_run here, there;
  luna_options options = {0};
  options.backend = d->backend;
  options.block = block;
  options.block_size = sizeof block;
  CHECK(!luna_open(&options), "a block of host memory serves a device");
  const bool open = device_run_start(&here, NULL, 0, 1, "refusals");
  if (device_run_start(&there, d, 0, 1, "refusals") && open) {
    luna_begin_inference(there.ctx);
    luna_tensor *t = luna_tensor_new(there.ctx, values, 2, shape);
    CHECK(t->device == d->backend->device && t->device != 0, "the tensor is on device %d", t->device);
    CHECK(luna_read(t, back) == LUNA_OK && memcmp(back, values, sizeof back) == 0, "what is read is not what was written");
    CHECK(luna_write(t, others) == LUNA_OK && luna_read(t, back) == LUNA_OK && memcmp(back, others, sizeof back) == 0, "luna_write does not write");
    luna_begin_inference(here.ctx);
    luna_tensor *sum = luna_add(t, luna_tensor_new(here.ctx, values, 2, shape));
    CHECK(!sum && strstr(luna_error(there.ctx), "another context"), "a host tensor in a device's op: %s", luna_error(there.ctx));
    luna_params *shared = luna_params_share(there.ctx, here.params);
    luna_lm lm;
    luna_status status = luna_lm_init(&lm, shared, &here.lm.config);
    CHECK(status != LUNA_OK && strstr(luna_error(there.ctx), "another device"), "sharing the CPU's parameters: %s", luna_error(there.ctx));
    device_file file = {NULL, 0, 0};
    luna_io io = {0};
    io.write = device_file_write;
    io.user = &file;
    luna_save_io(here.params, &io);
    status = luna_load_borrowed(there.params, file.bytes, file.size);
    CHECK(status != LUNA_OK && strstr(luna_error(there.ctx), "device"), "borrowing: %s", luna_error(there.ctx));
    CHECK(luna_load_bytes(there.params, file.bytes, file.size) == LUNA_OK, "loading a copy fails");
    free(file.bytes);
  }
  luna_close(here.ctx);
  luna_close(there.ctx);
}

/* ---- serving: streams and translations of a model on the device are those of its copy on the CPU ---- */
static void device_serving(const device *d) {
  static const int32_t source[10] = {3, 1, 4, 1, 5, 9, 2, 6, 5, 3}, lengths[2] = {5, 3};
  device_run here, there;
  device_file file = {NULL, 0, 0};
  luna_io io = {0};
  luna_search search = {0};
  luna_seq2seq_config config = {0};
  luna_seq2seq model[2];
  luna_ctx *ctx[2];
  int32_t out[2][2][12], out_lengths[2][2];
  memset(out, 0, sizeof out);
  io.write = device_file_write;
  io.user = &file;
  const bool open = device_run_start(&here, NULL, 0, 1, "serving");
  if (device_run_start(&there, d, 0, 2, "serving") && open) {
    luna_save_io(there.params, &io);
    luna_load_bytes(here.params, file.bytes, file.size);
    luna_stream *a = luna_stream_open(&here.lm, NULL), *b = luna_stream_open(&there.lm, NULL);
    if (CHECK(a && b, "a stream does not open"))
      for (int t = 0; t < 10; t++) {
        const float *x = luna_stream_step(a, source + t), *y = luna_stream_step(b, source + t);
        CHECK(x && y && memcmp(x, y, 31 * sizeof(float)) == 0, "token %d of a stream has other logits", t);
      }
    luna_stream_close(a);
    luna_stream_close(b);
  }
  luna_close(here.ctx);
  luna_close(there.ctx);
  free(file.bytes);
  config.vocab = 17;
  config.encoder.dim = 16;
  config.encoder.heads = 2;
  config.encoder.layers = 2;
  config.encoder.memory = 4;
  config.encoder.ffn = 24;
  search.beam = 3;
  search.most = 12;
  search.begin = 0;
  search.end = 1;
  for (int i = 0; i < 2; i++) {
    ctx[i] = device_open(i ? d : NULL, 3);
    luna_params *params = luna_params_open(ctx[i]);
    const bool good = luna_seq2seq_init(&model[i], params, &config) == LUNA_OK && luna_translate(&model[i], &search, source, lengths, 2, 5, out[i][0], out_lengths[i], NULL) == LUNA_OK;
    CHECK(good, "a translation on %s: %s", i ? "the device" : "the CPU", luna_error(ctx[i]));
  }
  CHECK(memcmp(out_lengths[0], out_lengths[1], sizeof out_lengths[0]) == 0 && memcmp(out[0], out[1], sizeof out[0]) == 0, "the device translates otherwise");
  luna_close(ctx[0]);
  luna_close(ctx[1]);
}

static void device_all(const device *d, const char *only) {
  device_cases(d, only);
  if (only) return;
  device_training(d);
  device_checkpoints(d);
  device_skips(d);
  device_serving(d);
  device_refusals(d);
}
#endif
