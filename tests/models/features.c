/* Models of features: tests/data/features (float64 NumPy, tests/models/features.py) on every instruction set and in
   both forms, outputs to 2e-6 and gradients to 2e-5; losses of numbers against their equations and by finite
   differences; missing numbers and padding; the input layer's fit; every model with features in training, saved,
   loaded, resumed and streamed; what is refused. Included by cuda.c, the files run on a device. */
#include "test.h"
#define LUNA_IMPLEMENTATION
#include "luna.h"
#include "examples/luna_ops.h"
#include "common.h"
#include <float.h>
#ifndef _WIN32
#include <sys/stat.h>
#endif

/* ---- what a file of tests/data/features holds besides the model ---- */
typedef struct features_file {
  char loss[40];
  float *features, *targets, *output, *value;
  int32_t *lengths, *labels;
  int64_t shape[3];                  /* of the features */
  int64_t outputs;                   /* numbers in output */
  int grads;
  struct { char name[100]; float *values; int64_t count; } grad[100];
} features_file;

static int32_t *features_integers(const luna_file_tensor *entry) {
  int32_t *out = (int32_t *)common_alloc((size_t)entry->count * sizeof(int32_t));
  for (int64_t i = 0; i < entry->count; i++) {
    const uint8_t *at = (const uint8_t *)entry->data + 4 * i;
    out[i] = (int32_t)((uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24);
  }
  return out;
}
static void features_entry(void *user, const luna_file_tensor *entry) {
  features_file *f = (features_file *)user;
  const char *name = entry->name;
  if (strncmp(name, "luna.test.", 10) != 0) return;
  name += 10;
  if (strcmp(name, "lengths") == 0) f->lengths = features_integers(entry);
  if (strcmp(name, "labels") == 0) f->labels = features_integers(entry);
  if (strcmp(entry->dtype, "F32") != 0) return;
  float *values = common_floats(entry->count);
  luna_file_tensor_read(entry, values);
  if (strcmp(name, "features") == 0) f->features = values, memcpy(f->shape, entry->shape, sizeof f->shape);
  else if (strcmp(name, "targets") == 0) f->targets = values;
  else if (strcmp(name, "output") == 0) f->output = values, f->outputs = entry->count;
  else if (strcmp(name, "loss") == 0) f->value = values;
  else if (strncmp(name, "grad.", 5) == 0 && f->grads < 100) {
    snprintf(f->grad[f->grads].name, sizeof f->grad[0].name, "%s", name + 5);
    f->grad[f->grads].values = values;
    f->grad[f->grads++].count = entry->count;
  } else free(values);
}
static void features_pair(void *user, const char *key, const char *value) {
  features_file *f = (features_file *)user;
  if (strcmp(key, "test.loss") == 0) snprintf(f->loss, sizeof f->loss, "%s", value);
}
static void features_free(features_file *f) {
  free(f->features), free(f->targets), free(f->output), free(f->value), free(f->lengths), free(f->labels);
  for (int i = 0; i < f->grads; i++) free(f->grad[i].values);
}

/* a gradient that is zero in exact arithmetic, as a key's bias, is compared with the file's largest */
static double features_grad_error(const features_file *f, int i, const float *got) {
  double largest = 0, own = 0, off = 0;
  for (int g = 0; g < f->grads; g++)
    for (int64_t j = 0; j < f->grad[g].count; j++) largest = fmax(largest, fabs((double)f->grad[g].values[j]));
  for (int64_t j = 0; j < f->grad[i].count; j++) {
    own = fmax(own, fabs((double)f->grad[i].values[j]));
    off = fmax(off, fabs((double)got[j] - (double)f->grad[i].values[j]));
  }
  return own <= 1e-5 * largest ? off / largest : common_error(got, f->grad[i].values, f->grad[i].count, 0);
}
static luna_tensor *features_loss(const features_file *f, luna_tensor *y) {
  if (strcmp(f->loss, "mse") == 0) return luna_mse(y, f->targets);
  if (strncmp(f->loss, "huber", 5) == 0) return luna_huber(y, f->targets, 0.7f);
  return f->labels ? luna_cross_entropy(y, f->labels, NULL) : luna_binary_cross_entropy(y, f->targets);
}
static luna_tensor *features_forward(const luna_model *model, const luna_input *input) {
  return model->kind == LUNA_MODEL_LM ? luna_lm_forward(&model->lm, input) :
      luna_classifier_forward(&model->classifier, input);
}
/* the same, step by step; padding, which holds numbers that no stream reads, is 0 */
static void features_stream(const char *name, const luna_lm *lm, const features_file *f) {
  const int64_t batch = f->shape[0], n = f->shape[1], k = f->shape[2], outputs = f->outputs / (batch * n);
  luna_stream_config config = {0};
  config.batch = batch;
  luna_stream *s = luna_stream_open(lm, &config);
  float *row = common_floats(batch * k), *got = common_floats(f->outputs), *want = common_floats(f->outputs);
  for (int64_t t = 0; CHECK(s != NULL, "%s: %s", name, luna_error(lm->input.mean->ctx)) && t < n; t++) {
    memset(row, 0, (size_t)(batch * k) * sizeof(float));
    for (int64_t b = 0; b < batch; b++)
      if (t < f->lengths[b]) memcpy(row + b * k, f->features + (b * n + t) * k, (size_t)k * sizeof(float));
    const float *y = luna_stream_step_features(s, row);
    for (int64_t b = 0; CHECK(y != NULL, "%s: %s", name, luna_stream_error(s)) && b < batch; b++)
      for (int64_t i = 0, at = (b * n + t) * outputs; t < f->lengths[b] && i < outputs; i++, at++)
        got[at] = y[b * outputs + i], want[at] = f->output[at];
  }
  CHECK(common_error(got, want, f->outputs, 0) <= 2e-6, "%s: a stream is off by %.3g", name,
        common_error(got, want, f->outputs, 0));
  luna_stream_close(s);
  free(row), free(got), free(want);
}
static void features_run(const char *name, const luna_options *options, bool training) {
  char path[200];
  features_file f;
  luna_model model;
  luna_inspection look = {0};
  luna_ctx *ctx = luna_open(options);
  luna_params *params = luna_params_open(ctx);
  memset(&f, 0, sizeof f);
  look.pair = features_pair, look.tensor = features_entry, look.user = &f;
  snprintf(path, sizeof path, "tests/data/features/%s.safetensors", name);
  if (CHECK(luna_inspect(ctx, luna_path(path), &look) == LUNA_OK && luna_load_model(&model, params,
                                                                                    luna_path(path)) == LUNA_OK &&
            f.features && f.output && f.grads,
            "%s: %s", path, luna_error(ctx))) {
    luna_input input = {0};
    input.features = f.features, input.lengths = f.lengths, input.batch = f.shape[0], input.n = f.shape[1];
    float *got = common_floats(f.outputs);
    if (training) luna_begin_step(ctx);
    else luna_begin_inference(ctx);
    luna_tensor *y = features_forward(&model, &input), *loss = features_loss(&f, y);
    CHECK(luna_count(y) == f.outputs && luna_read(y, got) == LUNA_OK, "%s: %s", name, luna_error(ctx));
    const double error = common_error(got, f.output, f.outputs, 0),
        off = fabs((double)luna_item(loss) / (double)f.value[0] - 1);
    CHECK(error <= 2e-6, "%s on %s: outputs are off by %.3g: %s", name, luna_isa_name(options->isa), error,
          common_where(got, f.output, f.outputs));
    CHECK(off <= 2e-6, "%s on %s: the loss is %.9g, not %.9g", name, luna_isa_name(options->isa),
          (double)luna_item(loss), (double)f.value[0]);
    if (training && CHECK(luna_backward(loss) == LUNA_OK, "%s: %s", name, luna_error(ctx)))
      for (int i = 0; i < f.grads; i++) {
        luna_tensor *p = luna_params_find(params, f.grad[i].name);
        float *grad = common_floats(f.grad[i].count);
        if (p && p->grad) luna_read_grad(p, grad); /* zeros of what the loss does not reach */
        CHECK(p && luna_count(p) == f.grad[i].count && features_grad_error(&f, i, grad) <= 2e-5,
              "%s on %s: the gradient of %s is off by %.3g",
              name, luna_isa_name(options->isa), f.grad[i].name, features_grad_error(&f, i, grad));
        free(grad);
      }
    if (!training && model.kind == LUNA_MODEL_LM) features_stream(name, &model.lm, &f);
    for (int i = 0; i < 2; i++) {
      const char *prefix = model.kind == LUNA_MODEL_LM ? "" : "encoder.";
      snprintf(path, sizeof path, "%sinput_norm.%s", prefix, i ? "scale" : "mean");
      CHECK(luna_params_find(params, path) && !luna_params_find(params, path)->grad, "%s: %s has a gradient", name,
            path);
    }
    free(got);
  }
  features_free(&f);
  luna_close(ctx);
}
static void features_files(const luna_backend *backend) {
  static const char *const names[] = {"classes", "step_values", "yes_or_no", "step_classes", "forecast", "rms_classes",
                                      "rms_steps"};
  for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
    for (int isa = 0; isa < COMMON_ISAS; isa++)
      for (int mode = 0; mode < 4; mode++) {
        luna_options options = {0};
        options.threads = 2, options.isa = common_isas[isa], options.backend = backend;
        options.form = mode & 1 ? LUNA_FORM_FOLDED : LUNA_FORM_UNFOLDED;
        if (luna_isa_available(common_isas[isa]) && (!backend || isa == 0)) features_run(names[i], &options, mode < 2);
      }
}

#ifndef FEATURES_INCLUDED
enum { BATCH = 3, N = 9, K = 3, VOCAB = 11, MODELS = 6 };
static int32_t lengths[BATCH] = {9, 4, 7};
static luna_ctx *ctx_open(uint64_t seed, int threads) {
  luna_options options = {0};
  options.seed = seed, options.threads = threads;
  luna_ctx *ctx = luna_open(&options);
  if (!ctx) exit(2);
  return ctx;
}
static bool same(const float *a, const float *b, int64_t n) { return memcmp(a, b, (size_t)n * sizeof(float)) == 0; }

/* ---- the losses alone ---- */
enum { MSE, HUBER, BINARY, QUANTILE, LOSSES };
static luna_tensor *loss_of(int kind, luna_tensor *x, const float *targets) {
  static const float level = 0.3f;
  int64_t shape[LUNA_MAX_RANK + 1];
  for (int i = 0; x && i < x->rank; i++) shape[i] = x->shape[i];
  if (x) shape[x->rank] = 1;
  return kind == MSE ? luna_mse(x, targets) : kind == HUBER ? luna_huber(x, targets, 0.5f) :
      kind == BINARY ? luna_binary_cross_entropy(x, targets) :
      luna_quantile_loss(x ? luna_reshape(x, x->rank + 1, shape) : NULL, targets, &level, 1);
}
static double equation(int kind, double x, double t) {
  const double e = fabs(x - t);
  if (kind == MSE) return e * e;
  if (kind == HUBER) return e <= 0.5 ? e * e / 2 : 0.5 * (e - 0.25);
  if (kind == QUANTILE) return x < t ? (double)0.3f * e : (1 - (double)0.3f) * e;
  return (x > 0 ? x : 0) + log1p(exp(-fabs(x))) - t * x;
}
static double slope(int kind, double x, double t) {
  const double e = x - t;
  if (kind == QUANTILE) return x < t ? -(double)0.3f : 1 - (double)0.3f;
  return kind == MSE ? 2 * e : kind == HUBER ? (e > 0.5 ? 0.5 : e < -0.5 ? -0.5 : e) : 1 / (1 + exp(-x)) - t;
}
static void check_losses(void) {
  enum { ROWS = 7, COLUMNS = 5, COUNT = ROWS * COLUMNS };
  static const char *const names[LOSSES] = {"luna_mse", "luna_huber", "luna_binary_cross_entropy",
                                            "luna_quantile_loss"};
  const int64_t shape[2] = {ROWS, COLUMNS}, none[2] = {0, COLUMNS};
  luna_ctx *ctx = ctx_open(1, 2);
  for (int kind = 0; kind < LOSSES; kind++)
    for (int large = 0; large < 2; large++) {
      float *x = common_random(COUNT, 3, large ? 80 : 2), *t = common_random(COUNT, 4, 1), *grad = common_floats(COUNT),
          *want = common_floats(COUNT);
      double sum = 0;
      int counted = 0;
      for (int i = 0; i < COUNT; i++) {
        if (kind == BINARY) t[i] = i % 5 == 1 ? 0 : i % 5 == 2 ? 1 : 0.5f + 0.5f * t[i];
        if (i % 7 == 3) t[i] = NAN; /* and what stands there is not looked at */
        if (i == 10) x[i] = NAN;
        if (i == 17) x[i] = INFINITY;
        if (t[i] != t[i]) continue;
        sum += equation(kind, (double)x[i], (double)t[i]);
        counted++;
      }
      for (int i = 0; i < COUNT; i++)
        want[i] = t[i] != t[i] ? 0 : (float)(slope(kind, (double)x[i], (double)t[i]) / counted);
      luna_begin_step(ctx);
      luna_tensor *values = luna_require_grad(luna_tensor_new(ctx, x, 2, shape)), *loss = loss_of(kind, values, t);
      const double value = (double)luna_item(loss);
      CHECK(fabs(value * counted / sum - 1) <= 2e-6, "%s: %.9g, not %.9g: %s", names[kind], value, sum / counted,
            luna_error(ctx));
      CHECK(loss && loss->rank == 1 && loss->shape[0] == 1, "%s is not [1]", names[kind]);
      CHECK(luna_backward(loss) == LUNA_OK && luna_read_grad(values, grad) == LUNA_OK, "%s: %s", names[kind],
            luna_error(ctx));
      test_close(names[kind], grad, want, COUNT, 2e-6);
      free(x), free(t), free(grad), free(want);
    }
  for (int kind = 0; kind < LOSSES; kind++) {
    const float nothing[2] = {NAN, NAN}, fine[2] = {0, 1};
    const int64_t two = 2;
    luna_begin_step(ctx);
    luna_tensor *x = luna_require_grad(luna_tensor_new(ctx, fine, 1, &two));
    luna_tensor *loss = loss_of(kind, x, nothing);
    CHECK(luna_item(loss) == 0 && luna_backward(loss) == LUNA_OK && x->grad && x->grad[0] == 0, "%s of no targets: %s",
          names[kind], luna_error(ctx));
    luna_begin_inference(ctx);
    CHECK(luna_item(loss_of(kind, luna_tensor_new(ctx, NULL, 2, none), NULL)) == 0, "%s of no values: %s", names[kind],
          luna_error(ctx));
    CHECK(!loss_of(kind, NULL, fine), "%s of null", names[kind]);
    luna_begin_inference(ctx);
    x = luna_tensor_new(ctx, fine, 1, &two);
    CHECK(!loss_of(kind, x, NULL) && strstr(luna_error(ctx), "targets is null"), "%s without targets: %s",
          names[kind], luna_error(ctx));
  }
  static const float bad[] = {-0.5f, 1.5f, INFINITY, -INFINITY}, deltas[] = {-1, NAN, INFINITY};
  const int64_t one = 1;
  for (int i = 0; i < 4; i++) {
    luna_begin_inference(ctx);
    CHECK(!luna_binary_cross_entropy(luna_tensor_new(ctx, NULL, 1, &one), &bad[i]) &&
          strstr(luna_error(ctx), "outside 0..1"),
          "a target of %g: %s", (double)bad[i], luna_error(ctx));
  }
  for (int i = 0; i < 3; i++) {
    luna_begin_inference(ctx);
    CHECK(!luna_huber(luna_tensor_new(ctx, NULL, 1, &one), &bad[0], deltas[i]) &&
          strstr(luna_error(ctx), "delta is"),
          "a delta of %g: %s", (double)deltas[i], luna_error(ctx));
  }
  luna_close(ctx);
}

/* several quantiles: the equation, its differences, and that the loss is least where a share of targets lies below */
static void check_quantiles(void) {
  enum { ROWS = 6, LEVELS = 3, COUNT = ROWS * LEVELS, MANY = 1000 };
  static const float levels[LEVELS] = {0.1f, 0.5f, 0.9f}, wrong[] = {0, 1, -0.5f, NAN};
  const int64_t shape[2] = {ROWS, LEVELS}, many[2] = {MANY, 1};
  luna_ctx *ctx = ctx_open(1, 1);
  float *x = common_random(COUNT, 7, 2), *t = common_random(ROWS, 8, 2), *grad = common_floats(COUNT),
      *y = common_floats(MANY), *targets = common_floats(MANY);
  double sum = 0;
  t[2] = NAN;
  for (int i = 0; i < COUNT; i++) {
    const double e = (double)t[i / LEVELS] - (double)x[i], q = (double)levels[i % LEVELS];
    if (e == e) sum += e > 0 ? q * e : (q - 1) * e;
  }
  luna_begin_step(ctx);
  luna_tensor *values = luna_require_grad(luna_tensor_new(ctx, x, 2, shape)),
              *loss = luna_quantile_loss(values, t, levels, LEVELS);
  CHECK(fabs((double)luna_item(loss) * (ROWS - 1) * LEVELS / sum - 1) < 1e-6, "three quantiles: %g, not %g: %s",
        (double)luna_item(loss), sum / (ROWS - 1) / LEVELS, luna_error(ctx));
  CHECK(luna_backward(loss) == LUNA_OK && luna_read_grad(values, grad) == LUNA_OK, "%s", luna_error(ctx));
  for (int i = 0; i < COUNT; i++) {
    double at[2];
    const float was = x[i], h = 1.0f / 64;
    for (int side = 0; side < 2; side++) {
      x[i] = side ? was + h : was - h;
      luna_begin_inference(ctx);
      at[side] = (double)luna_item(luna_quantile_loss(luna_tensor_new(ctx, x, 2, shape), t, levels, LEVELS));
    }
    x[i] = was;
    CHECK(fabs((at[1] - at[0]) / (2 * (double)h) - (double)grad[i]) < 2e-5 || fabsf(was - t[i / LEVELS]) < h,
          "quantile %d: gradient %g, by differences %g", i, (double)grad[i], (at[1] - at[0]) / (2 * (double)h));
  }
  for (int i = 0; i < MANY; i++) targets[i] = (float)((i * 619) % MANY) / MANY; /* each thousandth once */
  for (int q = 0; q < LEVELS; q++) {
    float least = 9, best = 0;
    for (int at = 1; at < 20; at++) {
      for (int i = 0; i < MANY; i++) y[i] = (float)at / 20;
      luna_begin_inference(ctx);
      const float value = luna_item(luna_quantile_loss(luna_tensor_new(ctx, y, 2, many), targets, levels + q, 1));
      if (value < least) least = value, best = (float)at / 20;
    }
    CHECK(fabsf(best - levels[q]) < 0.01f, "the quantile of %g is %g", (double)levels[q], (double)best);
  }
  for (int i = 0; i < 4; i++) {
    luna_begin_inference(ctx);
    CHECK(!luna_quantile_loss(luna_tensor_new(ctx, y, 2, many), targets, wrong + i, 1) &&
          strstr(luna_error(ctx), "between 0 and 1"), "a level of %g: %s", (double)wrong[i], luna_error(ctx));
  }
  luna_begin_inference(ctx);
  CHECK(!luna_quantile_loss(luna_tensor_new(ctx, x, 2, shape), t, levels, 2) &&
        strstr(luna_error(ctx), "the size of levels, 2"), "two levels for three values: %s", luna_error(ctx));
  luna_begin_inference(ctx);
  CHECK(!luna_quantile_loss(luna_tensor_new(ctx, x, 2, shape), t, NULL, 3) &&
        strstr(luna_error(ctx), "levels is null"), "no levels: %s", luna_error(ctx));
  free(x), free(t), free(grad), free(y), free(targets);
  luna_close(ctx);
}

/* ---- outputs in units of their own ---- */
enum { SINE = 300, WINDOW = 60 };
static luna_status sine_model(luna_lm *m, luna_params *params, bool norm) {
  luna_lm_config c = {0};
  c.features = 1, c.layer.dim = 16, c.layer.heads = 2, c.layer.ffn = 32, c.layer.memory = 4, c.output_norm = norm;
  c.layer.forget = LUNA_FORGET_GATED, c.layer.convolution = 4, c.layer.pre_norm = true;
  return luna_lm_init(m, params, &c);
}
static float sine(int t) { return (float)(100 + 20 * sin(0.3 * t)); }
/* the mean squared error of the next number of a sine around 100, of that of repeating the last one, after 200 steps */
static double sine_error(luna_ctx *ctx, luna_lm *m, luna_params *params) {
  float x[SINE], targets[SINE], batch[4 * WINDOW], next[4 * WINDOW];
  double error = 0, last = 0;
  for (int t = 0; t < SINE; t++) x[t] = sine(t), targets[t] = sine(t + 1);
  const luna_input all = {NULL, NULL, 1, SINE, x}, part = {NULL, NULL, 4, WINDOW, batch};
  CHECK(sine_model(m, params, true) == LUNA_OK && luna_input_layer_fit(&m->input, &all) == LUNA_OK &&
        luna_lm_fit_outputs(m, targets, SINE) == LUNA_OK, "%s", luna_error(ctx));
  luna_optimizer_config o = {0};
  o.lr = 1e-2f, o.clip = 1, o.schedule.decay = LUNA_DECAY_COSINE, o.schedule.total = 200, o.schedule.warmup = 20;
  luna_optimizer *adam = luna_adamw(params, &o);
  for (int step = 0; step < 200; step++) {
    for (int i = 0; i < 4 * WINDOW; i++) {
      const int from = (step * 37 + i / WINDOW * 61) % (SINE - WINDOW);
      batch[i] = x[from + i % WINDOW], next[i] = targets[from + i % WINDOW];
    }
    luna_begin_step(ctx);
    luna_backward(luna_mse(luna_lm_forward(m, &part), next));
    if (luna_optimizer_step(adam) != LUNA_OK) break;
  }
  float y[SINE];
  luna_begin_inference(ctx);
  CHECK(luna_read(luna_lm_forward(m, &all), y) == LUNA_OK, "%s", luna_error(ctx));
  for (int t = 10; t < WINDOW; t++)
    error += pow((double)y[t] - (double)targets[t], 2), last += pow((double)x[t] - (double)targets[t], 2);
  return error / last;
}
static void check_output_norm(void) {
  luna_ctx *ctx = ctx_open(3, 1), *other = ctx_open(4, 1);
  luna_params *params = luna_params_open(ctx), *loaded = luna_params_open(other), *plain = luna_params_open(ctx);
  luna_lm m, copy, bare;
  char path[300];
  float x[WINDOW], y[WINDOW], z[WINDOW], fit[2];
  const double error = sine_error(ctx, &m, params);
  CHECK(error < 0.02, "a sine around 100: %.4f of the error of the last value", error);
  for (int t = 0; t < WINDOW; t++) x[t] = sine(t);
  const luna_input in = {NULL, NULL, 1, WINDOW, x};
  luna_begin_inference(ctx);
  CHECK(luna_read(luna_lm_forward(&m, &in), y) == LUNA_OK && luna_read(m.output_mean, fit) == LUNA_OK &&
        luna_read(m.output_scale, fit + 1) == LUNA_OK, "%s", luna_error(ctx));
  CHECK(fabsf(fit[0] - 100) < 1 && fabsf(fit[1] - 14.14f) < 0.3f, "mean %g, deviation %g", (double)fit[0],
        (double)fit[1]);
  luna_stream *stream = luna_stream_open(&m, NULL);
  for (int t = 0; t < WINDOW; t++) {
    const float *step = luna_stream_step_features(stream, x + t);
    z[t] = step ? *step : NAN;
  }
  luna_stream_close(stream);
  test_close("a stream of outputs in their unit", z, y, WINDOW, 1e-5);
  snprintf(path, sizeof path, "%s/output_norm.safetensors", common_build());
  CHECK(luna_save(params, luna_path(path)) == LUNA_OK, "%s", luna_error(ctx));
  CHECK(luna_load_model_of(LUNA_MODEL_LM, &copy, loaded, luna_path(path)) == LUNA_OK &&
        copy.config.output_norm, "%s", luna_error(other));
  remove(path);
  luna_begin_inference(other);
  CHECK(luna_read(luna_lm_forward(&copy, &in), z) == LUNA_OK && same(y, z, WINDOW), "a loaded model: %s",
        luna_error(other));
  CHECK(sine_model(&bare, plain, false) == LUNA_OK && !bare.output_scale, "%s", luna_error(ctx));
  CHECK(luna_lm_fit_outputs(&bare, x, WINDOW) == LUNA_BAD_ARGUMENT, "outputs without a norm were fitted");
  CHECK(luna_lm_fit_outputs(&m, NULL, WINDOW) == LUNA_BAD_ARGUMENT, "no targets were fitted");
  CHECK(luna_lm_fit_outputs(&m, x, -1) == LUNA_BAD_ARGUMENT, "fewer than no rows were fitted");
  luna_close(ctx), luna_close(other);
}

/* ---- every kind of model with features, and one of tokens with outputs ---- */
static const char *const model_names[MODELS] = {"a detector", "a classifier", "a pair", "per step", "a masked model",
                                                "an encoder-decoder"};
static luna_status model_init(luna_model *m, luna_params *params, int which, float dropout) {
  luna_encoder_config e = {0};
  e.layers = 2, e.layer.dim = 12, e.layer.heads = 2, e.layer.ffn = 20, e.layer.memory = 4, e.layer.dropout = dropout,
      e.layer.activation = LUNA_ACTIVATION_GELU;
  memset(m, 0, sizeof *m);
  if (which == 0) {
    luna_lm_config c = {0};
    c.features = K, c.outputs = 2, c.layer = e.layer, c.layer.convolution = 3;
    m->kind = LUNA_MODEL_LM;
    return luna_lm_init(&m->lm, params, &c);
  }
  if (which <= 3) {
    luna_classifier_config c = {0};
    e.features = K, c.classes = 2, c.pair = which == 2, c.per_step = which == 3, c.encoder = e;
    m->kind = LUNA_MODEL_CLASSIFIER;
    return luna_classifier_init(&m->classifier, params, &c);
  }
  if (which == 4) {
    luna_masked_lm_config c = {0};
    e.features = K, c.vocab = VOCAB, c.encoder = e;
    m->kind = LUNA_MODEL_MASKED_LM;
    return luna_masked_lm_init(&m->masked_lm, params, &c);
  }
  luna_seq2seq_config c = {0};
  e.features = K, c.target_vocab = VOCAB, c.encoder = e, c.encoder.layer.pre_norm = true;
  m->kind = LUNA_MODEL_SEQ2SEQ;
  return luna_seq2seq_init(&m->seq2seq, params, &c);
}
static luna_input_layer *input_of(luna_model *m) {
  return m->kind == LUNA_MODEL_LM           ? &m->lm.input
         : m->kind == LUNA_MODEL_CLASSIFIER ? &m->classifier.encoder.input
         : m->kind == LUNA_MODEL_MASKED_LM  ? &m->masked_lm.encoder.input
                                            : &m->seq2seq.encoder.input;
}
static luna_input input_from(const float *x) {
  luna_input input = {0};
  input.features = x, input.lengths = lengths, input.batch = BATCH, input.n = N;
  return input;
}
static luna_tensor *model_forward(const luna_model *m, const float *x) {
  static const int32_t targets[BATCH * 4] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0, 1};
  const luna_input input = input_from(x);
  luna_input target = {0};
  target.tokens = targets, target.batch = BATCH, target.n = 4;
  if (m->kind == LUNA_MODEL_CLASSIFIER && m->classifier.config.pair)
    return luna_classifier_forward_pair(&m->classifier, &input, &input);
  if (m->kind == LUNA_MODEL_MASKED_LM) return luna_masked_lm_forward(&m->masked_lm, &input);
  if (m->kind == LUNA_MODEL_SEQ2SEQ) return luna_seq2seq_forward(&m->seq2seq, &input, &target);
  return features_forward(m, &input);
}
static float *series(uint64_t seed) { /* [BATCH, N, K], some of it missing */
  float *x = common_random(BATCH * N * K, seed, 3);
  for (int i = 5; i < BATCH * N * K; i += 11) x[i] = NAN;
  return x;
}
static float *results(luna_model *m, const float *x, int64_t *count) {
  luna_ctx *ctx = input_of(m)->mean->ctx;
  luna_begin_inference(ctx);
  luna_tensor *y = model_forward(m, x);
  float *out = common_floats(y ? luna_count(y) : 1);
  *count = luna_count(y);
  CHECK(y && luna_read(y, out) == LUNA_OK, "%s", luna_error(ctx));
  return out;
}
static luna_status train_step(luna_ctx *ctx, const luna_model *m, luna_optimizer *adam, const float *x) {
  luna_begin_step(ctx);
  luna_tensor *y = model_forward(m, x);
  float *targets = common_random(luna_count(y), 77, 1);
  luna_backward(luna_mse(y, targets));
  free(targets);
  return luna_optimizer_step(adam);
}

static void check_models(void) {
  char path[300];
  mkdir(common_build(), 0777);
  snprintf(path, sizeof path, "%s/features_test.safetensors", common_build());
  for (int which = 0; which < MODELS; which++) {
    const char *what = model_names[which];
    luna_optimizer_config slow = {0};
    luna_model m, loaded;
    int64_t count, other;
    luna_ctx *ctx = ctx_open(5, 1), *next = ctx_open(6, 2);
    luna_params *params = luna_params_open(ctx), *again = luna_params_open(next);
    float *x = series(8);
    const luna_input input = input_from(x);
    slow.weight_decay = 0.1f;
    if (CHECK(model_init(&m, params, which, 0.1f) == LUNA_OK && luna_input_layer_fit(input_of(&m), &input) == LUNA_OK,
              "%s: %s", what, luna_error(ctx))) {
      luna_optimizer *adam = luna_adamw(params, &slow), *adam_again;
      float mean[2 * K], after[2 * K];
      luna_read(input_of(&m)->mean, mean), luna_read(input_of(&m)->scale, mean + K);
      float *start = results(&m, x, &count);
      for (int i = 0; i < 3; i++) CHECK(train_step(ctx, &m, adam, x) == LUNA_OK, "%s: %s", what, luna_error(ctx));
      luna_read(input_of(&m)->mean, after), luna_read(input_of(&m)->scale, after + K);
      CHECK(same(mean, after, 2 * K), "%s: training changes input_norm", what);
      float *a = results(&m, x, &count);
      CHECK(!same(a, start, count), "%s: training changes nothing", what);
      free(start);
      /* saved and opened by what the file says */
      CHECK(luna_save_training(adam, luna_path(path)) == LUNA_OK && luna_load_model(&loaded, again,
                                                                                    luna_path(path)) == LUNA_OK &&
            loaded.kind == m.kind, "%s: %s; %s",
            what, luna_error(ctx), luna_error(next));
      float *b = results(&loaded, x, &other);
      CHECK(other == count && same(a, b, count), "%s: another model is loaded", what);
      free(a), free(b);
      /* resumed: the bits of a run that never stopped */
      adam_again = luna_adamw(again, &slow);
      CHECK(luna_load_training(adam_again, luna_path(path)) == LUNA_OK, "%s: %s", what, luna_error(next));
      for (int i = 0; i < 2; i++) train_step(ctx, &m, adam, x), train_step(next, &loaded, adam_again, x);
      a = results(&m, x, &count), b = results(&loaded, x, &other);
      CHECK(same(a, b, count), "%s: resumed, it goes on differently", what);
      /* the padding, whatever it holds, and a missing number for a mean */
      for (int v = 0; v < 3; v++) {
        float *y = common_floats(BATCH * N * K);
        memcpy(y, x, BATCH * N * K * sizeof(float));
        for (int64_t i = 0; i < BATCH * N; i++)
          for (int64_t f = 0; f < K; f++) {
            float *at = &y[i * K + f];
            if (i % N >= lengths[i / N]) *at = v == 0 ? NAN : v == 1 ? INFINITY : 1e30f;
            else if (*at != *at && v == 2) *at = mean[f];
          }
        float *c = results(&m, y, &other);
        CHECK(same(a, c, count), "%s: %s changes the result", what,
              v == 2 ? "a mean in a missing number's place" : "the padding");
        free(c), free(y);
      }
      free(a), free(b);
    }
    free(x);
    luna_close(next), luna_close(ctx);
  }
  remove(path);
}

/* a language model of tokens with outputs of its own: a tagger */
static void check_tagger(void) {
  const int32_t tokens[6] = {1, 2, 3, 4, 5, 6}, labels[6] = {0, 2, 1, -1, 2, 0};
  luna_ctx *ctx = ctx_open(2, 1);
  luna_params *params = luna_params_open(ctx);
  luna_lm_config c = {0};
  luna_input input = {0};
  luna_lm lm;
  input.tokens = tokens, input.batch = 2, input.n = 3;
  c.vocab = VOCAB, c.outputs = 3, c.layer.dim = 8, c.layer.heads = 2;
  CHECK(luna_lm_init(&lm, params, &c) == LUNA_OK && lm.embedding && lm.output.weight && lm.output.weight->shape[0] == 3,
        "%s", luna_error(ctx));
  luna_begin_step(ctx);
  luna_tensor *y = luna_lm_forward(&lm, &input);
  const double apart = (double)luna_item(luna_cross_entropy(y, labels, NULL)),
      direct = (double)luna_item(luna_lm_loss(&lm, &input, labels));
  CHECK(y && y->shape[2] == 3 && fabs(apart - direct) <= 1e-6, "its loss is %g, not %g: %s", direct, apart,
        luna_error(ctx));
  luna_close(ctx);
}

/* ---- the input layer ---- */
static void check_fit(void) {
  enum { ROWS = 3, STEPS = 50 };
  const int32_t some[ROWS] = {50, 20, 0};
  float x[ROWS * STEPS * K], mean[K], scale[K];
  luna_ctx *ctx = ctx_open(1, 1);
  luna_params *params = luna_params_open(ctx);
  const luna_init init = {LUNA_INIT_XAVIER, 0};
  luna_input_layer layer;
  luna_input input = {0};
  double want[K] = {0}, deviation[K] = {0};
  int counted[K] = {0};
  CHECK(luna_input_layer_init(&layer, params, "a.", K, 5, init) == LUNA_OK &&
        luna_params_find(params, "a.input_norm.mean") == layer.mean &&
            luna_params_find(params, "a.input_norm.scale") == layer.scale &&
                luna_params_find(params, "a.input_proj.weight") == layer.projection.weight,
        "%s", luna_error(ctx));
  common_fill(x, ROWS * STEPS * K, 3, 2);
  for (int i = 0; i < ROWS * STEPS; i++) {
    x[i * K] += 1000;               /* a deviation far below the mean */
    x[i * K + 1] = 7;               /* one that never changes */
    if (i % 7 == 2) x[i * K + 2] = i % 2 ? NAN : INFINITY;
    if (i % STEPS >= some[i / STEPS]) x[i * K] = x[i * K + 1] = x[i * K + 2] = 1e30f;
    else
      for (int f = 0; f < K; f++) if (isfinite(x[i * K + f])) want[f] += (double)x[i * K + f], counted[f]++;
  }
  for (int f = 0; f < K; f++) want[f] /= counted[f];
  for (int i = 0; i < ROWS * STEPS; i++)
    for (int f = 0; f < K; f++)
      if (i % STEPS < some[i / STEPS] && isfinite(x[i * K + f]))
        deviation[f] += pow((double)x[i * K + f] - want[f], 2) / counted[f];
  input.features = x, input.lengths = some, input.batch = ROWS, input.n = STEPS;
  CHECK(luna_input_layer_fit(&layer, &input) == LUNA_OK, "%s", luna_error(ctx));
  luna_read(layer.mean, mean), luna_read(layer.scale, scale);
  for (int f = 0; f < K; f++) {
    const double expected = f == 1 ? 1 : 1 / sqrt(deviation[f]);
    CHECK(fabs((double)mean[f] / want[f] - 1) <= 1e-6 && fabs((double)scale[f] / expected - 1) <= 1e-6,
          "feature %d: mean %g and scale %g, not %g and %g", f,
          (double)mean[f], (double)scale[f], want[f], expected);
  }
  /* a failed fit changes nothing, and one to no data fails */
  input.features = NULL;
  CHECK(luna_input_layer_fit(&layer, &input) == LUNA_BAD_ARGUMENT && luna_error_id_of(ctx) == LUNA_ERROR_NULL_ARGUMENT,
        "no features: %s", luna_error(ctx));
  CHECK(luna_input_layer_fit(&layer, NULL) == LUNA_BAD_ARGUMENT, "no input: %s", luna_error(ctx));
  CHECK(luna_input_layer_fit(NULL, &input) == LUNA_BAD_ARGUMENT, "no layer");
  luna_begin_inference(ctx);
  CHECK(layer.mean->data[0] == mean[0], "a failed fit changes the mean");
  input.n = 0;
  CHECK(luna_input_layer_fit(&layer, &input) == LUNA_BAD_ARGUMENT, "lengths beyond n: %s", luna_error(ctx));
  input.lengths = NULL;
  luna_begin_inference(ctx);
  CHECK(luna_input_layer_fit(&layer, &input) == LUNA_BAD_ARGUMENT && luna_error_id_of(ctx) == LUNA_ERROR_FIT_NOTHING,
        "no steps: %s", luna_error(ctx));
  /* a deviation whose inverse is no normal float */
  for (int i = 0; i < ROWS * STEPS; i++)
    for (int f = 0; f < K; f++) x[i * K + f] = f == 2 ? (i % 2 ? FLT_MAX : -FLT_MAX) : (float)f;
  input.features = x, input.n = STEPS;
  CHECK(luna_input_layer_fit(&layer, &input) == LUNA_BAD_ARGUMENT && strstr(luna_error(ctx), "feature 2") &&
        luna_error_id_of(ctx) == LUNA_ERROR_FEATURE_SCALE, "a deviation beyond all: %s", luna_error(ctx));
  luna_begin_inference(ctx);
  CHECK(layer.mean->data[1] == mean[1] && layer.scale->data[1] == scale[1],
        "a failed fit changes the mean or the scale");
  input.features = NULL, input.n = 0;
  luna_tensor *y = luna_input_layer_forward(&layer, &input);
  CHECK(y && y->shape[1] == 0 && y->shape[2] == 5, "a forward of no steps: %s", luna_error(ctx));
  luna_close(ctx);
}

/* causality: a step, even one that is large, changes no bit before it; NaN is its mean and reaches nothing else */
static void check_causality(void) {
  luna_model m;
  int64_t count;
  luna_ctx *ctx = ctx_open(9, 1);
  luna_params *params = luna_params_open(ctx);
  float *x = series(12);
  CHECK(model_init(&m, params, 0, 0) == LUNA_OK, "%s", luna_error(ctx));
  float *a = results(&m, x, &count);
  static const float strange[] = {5, NAN, -3e8f, 9e8f};
  for (int v = 0; v < 4; v++) {
    x[3 * K] = strange[v];
    float *b = results(&m, x, &count);
    CHECK(same(a, b, 3 * 2) && same(a + N * 2, b + N * 2, (BATCH - 1) * N * 2),
          "%g at step 3 changes what was before it or another sequence", (double)strange[v]);
    CHECK(!same(a + 6, b + 6, 2), "%g at step 3 changes nothing", (double)strange[v]);
    free(b);
  }
  free(a), free(x);
  luna_close(ctx);
}

/* ---- streams: steps and prefills against the forward of the whole sequence, from a model and from a file's bytes
   ---- */
typedef struct bytes { size_t size; uint8_t at[1 << 16]; } bytes;
static bool bytes_write(void *user, const void *from, size_t size) {
  bytes *b = (bytes *)user;
  if (size > sizeof b->at - b->size) return false;
  memcpy(b->at + b->size, from, size);
  b->size += size;
  return true;
}
static void check_stream(luna_stream *s, const float *x, const float *want, int64_t outputs, const char *what) {
  static float got[BATCH * N * 4], row[BATCH * K], part[BATCH * N * K];
  static uint8_t saved[1 << 16];
  const size_t state = luna_stream_state_size(s);
  double error;
  /* 0, 1: single steps, from a state saved halfway; 2: 5 rows at once, then 4 */
  for (int round = 0; round < 3; round++) {
    luna_input input = {0};
    if (round != 1) luna_stream_reset(s);
    for (int64_t t = round == 1 ? 5 : 0; t < N && round < 2; t++) {
      if (t == 5 && round == 0)
        CHECK(state <= sizeof saved && luna_stream_state_save(s, saved, state) == LUNA_OK, "%s: save: %s", what,
              luna_stream_error(s));
      if (t == 5 && round == 1)
        CHECK(luna_stream_state_load(s, saved, state) == LUNA_OK && luna_stream_position(s) == 5, "%s: load: %s", what,
              luna_stream_error(s));
      for (int64_t b = 0; b < BATCH; b++) memcpy(row + b * K, x + (b * N + t) * K, K * sizeof(float));
      const float *y = luna_stream_step_features(s, row);
      if (!CHECK(y != NULL, "%s: step %d: %s", what, (int)t, luna_stream_error(s))) return;
      for (int64_t b = 0; b < BATCH; b++)
        memcpy(got + (b * N + t) * outputs, y + b * outputs, (size_t)outputs * sizeof(float));
    }
    for (int64_t t = 0; t < N && round == 2; t += input.n) {
      input.n = t ? N - t : 5, input.features = part;
      for (int64_t b = 0; b < BATCH; b++)
        memcpy(part + b * input.n * K, x + (b * N + t) * K, (size_t)(input.n * K) * sizeof(float));
      const float *y = luna_stream_prefill(s, &input);
      if (!CHECK(y != NULL, "%s: prefill: %s", what, luna_stream_error(s))) return;
      for (int64_t b = 0; b < BATCH; b++)
        memcpy(got + (b * N + t + input.n - 1) * outputs, y + b * outputs, (size_t)outputs * sizeof(float));
    }
    error = common_error(got, want, BATCH * N * outputs, 0);
    CHECK(error <= 2e-6, "%s, round %d: a stream is off by %.3g", what, round, error);
  }
  /* what is not for it */
  static const int32_t tokens[BATCH * 2] = {0};
  luna_input input = {0};
  input.tokens = tokens, input.n = 2;
  CHECK(!luna_stream_step(s, tokens) && luna_stream_error_id(s) == LUNA_ERROR_STREAM_NO_FEATURES &&
        !luna_stream_step_features(s, NULL) &&
            luna_stream_error_id(s) == LUNA_ERROR_STREAM_NO_FEATURES && !luna_stream_prefill(s, &input),
                "%s: tokens for features", what);
  CHECK(!luna_stream_step_features(NULL, row), "no stream");
}
static void check_streams(void) {
  for (int isa = 0; isa < COMMON_ISAS; isa++)
    for (int v = 0; v < 3; v++) {
      static bytes file;
      luna_lm_config c = {0};
      luna_stream_config config = {0};
      luna_options options = {0};
      luna_lm lm;
      luna_io io = {0};
      const char *error;
      if (!luna_isa_available(common_isas[isa])) continue;
      options.isa = config.isa = common_isas[isa], options.threads = 1;
      luna_ctx *ctx = luna_open(&options);
      luna_params *params = luna_params_open(ctx);
      float *x = series(30), *want;
      luna_input input = input_from(x);
      c.layer.dim = 12, c.layer.heads = 2, c.layer.ffn = 20;
      c.features = K, c.outputs = v == 1 ? 0 : 4, c.layer.memory = v == 2 ? 9 : 4,
          c.layer.pre_norm = v > 0, c.layer.convolution = v == 1 ? 0 : 4;
      c.positions = v == 2 ? LUNA_POSITIONS_LEARNED : v == 1 ? LUNA_POSITIONS_SINUSOIDAL : LUNA_POSITIONS_NONE;
      const int64_t outputs = v == 1 ? K : 4;
      CHECK(luna_lm_init(&lm, params, &c) == LUNA_OK, "%s", luna_error(ctx));
      common_params(params, 70);
      input.lengths = NULL;
      CHECK(luna_input_layer_fit(&lm.input, &input) == LUNA_OK, "%s", luna_error(ctx));
      luna_begin_inference(ctx);
      want = common_floats(BATCH * N * outputs);
      CHECK(luna_read(luna_lm_forward(&lm, &input), want) == LUNA_OK, "%s", luna_error(ctx));
      config.batch = BATCH;
      luna_stream *s = luna_stream_open(&lm, &config);
      if (CHECK(s != NULL, "%s", luna_error(ctx))) check_stream(s, x, want, outputs, "of a model");
      luna_stream_close(s);
      file.size = 0, io.write = bytes_write, io.user = &file;
      CHECK(luna_save(params, luna_callbacks(&io)) == LUNA_OK, "%s", luna_error(ctx));
      const size_t size = common_little_endian() ? luna_stream_size(file.at, file.size, &config, &error) : 0;
      void *memory = common_alloc(size);
      s = size ? luna_stream_open_bytes(file.at, file.size, &config, memory, size, &error) : NULL;
      if (CHECK(s != NULL || !common_little_endian(), "%s", error) && s) check_stream(s, x, want, outputs, "of bytes");
      free(memory), free(want), free(x);
      luna_close(ctx);
    }
}

/* ---- gradients by central differences: every parameter of a classifier and of a detector, along a random direction
   ---- */
static void check_differences(void) {
  for (int which = 0; which < 4; which++) {
    luna_model m;
    luna_ctx *ctx = ctx_open(3, 1);
    luna_params *params = luna_params_open(ctx);
    float *x = series(21), targets[BATCH * N * 2];
    const luna_input input = input_from(x);
    CHECK(model_init(&m, params, which, 0) == LUNA_OK && luna_input_layer_fit(input_of(&m), &input) == LUNA_OK, "%s",
          luna_error(ctx));
    for (int i = 0; i < BATCH * N * 2; i++)
      targets[i] = i % 5 == 4 ? NAN : (float)(0.5 + 0.5 * common_number(4, (uint64_t)i));
    for (int kind = 0; kind < QUANTILE; kind++) {
      luna_begin_step(ctx);
      CHECK(luna_backward(loss_of(kind, model_forward(&m, x), targets)) == LUNA_OK, "%s", luna_error(ctx));
      for (int64_t i = 0; i < luna_params_tensor_count(params); i++) {
        const char *name;
        luna_tensor *p = luna_params_at(params, i, &name);
        if (!p->grad) continue;
        float *direction = common_random(luna_count(p), 50 + (uint64_t)i, 1), *start = common_floats(luna_count(p));
        double along = 0, value[2];
        const double h = 2e-3;
        luna_read(p, start);
        for (int64_t j = 0; j < luna_count(p); j++) along += (double)p->grad[j] * (double)direction[j];
        for (int side = 0; side < 2; side++) {
          for (int64_t j = 0; j < luna_count(p); j++) p->data[j] = start[j] + (float)(side ? h : -h) * direction[j];
          luna_begin_inference(ctx);
          value[side] = (double)luna_item(loss_of(kind, model_forward(&m, x), targets));
        }
        luna_write(p, start);
        CHECK(fabs((value[1] - value[0]) / (2 * h) - along) <= 2e-3 * (fabs(along) + 0.1),
              "%s, loss %d, %s: %g, by differences %g", model_names[which], kind,
              name, along, (value[1] - value[0]) / (2 * h));
        free(direction), free(start);
      }
      luna_params_zero_grad(params);
    }
    free(x);
    luna_close(ctx);
  }
}

/* ---- a measured step works in a block of that size, and 64 bytes less do not, whatever the data, where a sequence is
   so short that P has padding, too ---- */
static luna_status block_job(luna_ctx *ctx, bool missing) {
  luna_model m;
  luna_params *params = luna_params_open(ctx);
  float *x = common_random(BATCH * N * K, 3, 1);
  luna_status status = model_init(&m, params, 3, 0.1f);
  const luna_input input = input_from(x);
  luna_optimizer *adam = luna_adamw(params, NULL);
  for (int i = 0; missing && i < BATCH * N * K; i += 3) x[i] = NAN;
  if (status == LUNA_OK) status = luna_input_layer_fit(input_of(&m), &input);
  for (int i = 0; i < 2 && status == LUNA_OK; i++) status = train_step(ctx, &m, adam, x);
  free(x);
  return status;
}
static void check_block(void) {
  luna_options options = {0};
  options.measure = true, options.threads = 1;
  luna_ctx *ctx = luna_open(&options);
  const int32_t before = lengths[1];
  lengths[1] = 1;
  CHECK(block_job(ctx, true) == LUNA_OK, "measuring: %s", luna_error(ctx));
  const size_t need = luna_memory(ctx).peak;
  luna_close(ctx);
  options.measure = false;
  for (int i = 0; i < 4; i++) {
    options.block_size = i % 2 ? need - 64 : need;
    options.block = common_alloc(options.block_size);
    ctx = luna_open(&options);
    const luna_status status = ctx ? block_job(ctx, i < 2) : LUNA_OUT_OF_MEMORY;
    CHECK(status == (i % 2 ? LUNA_OUT_OF_MEMORY : LUNA_OK), "%zu of %zu bytes: %s", options.block_size, need,
          luna_error(ctx));
    luna_close(ctx);
    free(options.block);
  }
  lengths[1] = before;
}

/* ---- what is refused ---- */
static void check_refused(void) {
  const int32_t negative[BATCH] = {3, -1, 2}, beyond[BATCH] = {3, N + 1, 2}, tokens[BATCH * N] = {0};
  luna_ctx *ctx = ctx_open(1, 1);
  luna_params *params = luna_params_open(ctx);
  luna_model m;
  float *x = series(2);
  luna_input input = input_from(x);
  CHECK(model_init(&m, params, 0, 0) == LUNA_OK, "%s", luna_error(ctx));
  luna_begin_inference(ctx);
  input.features = NULL, input.tokens = tokens;
  CHECK(!luna_lm_forward(&m.lm, &input) && luna_error_id_of(ctx) == LUNA_ERROR_NULL_ARGUMENT,
        "tokens for features: %s", luna_error(ctx));
  input.features = x;
  for (int i = 0; i < 2; i++) {
    luna_begin_inference(ctx);
    input.lengths = i ? beyond : negative;
    CHECK(!luna_lm_forward(&m.lm, &input) && luna_error_id_of(ctx) == LUNA_ERROR_ELEMENT_RANGE, "lengths: %s",
          luna_error(ctx));
  }
  luna_begin_inference(ctx);
  input.lengths = NULL, input.batch = INT64_MAX / 2;
  CHECK(!luna_lm_forward(&m.lm, &input) && luna_error_id_of(ctx) == LUNA_ERROR_SHAPE, "a batch without end: %s",
        luna_error(ctx));
  luna_input_layer zeroed;
  memset(&zeroed, 0, sizeof zeroed);
  CHECK(!luna_input_layer_forward(&zeroed, &input) && !luna_input_layer_forward(NULL, &input) &&
        luna_input_layer_fit(&zeroed, &input) == LUNA_BAD_ARGUMENT, "a zeroed layer");
  luna_close(ctx);

  for (int i = 0; i < 4; i++) {
    luna_classifier_config c = {0};
    luna_seq2seq_config s = {0};
    luna_classifier classifier;
    luna_seq2seq seq2seq;
    ctx = ctx_open(1, 1), params = luna_params_open(ctx);
    c.encoder.features = i == 0 ? -1 : i == 2 ? (int64_t)1 << 40 : 3, c.pair = c.per_step = i == 1;
    s.encoder.features = 3, s.share_embeddings = true;
    const luna_status status = i < 3 ? luna_classifier_init(&classifier, params, &c) :
        luna_seq2seq_init(&seq2seq, params, &s);
    const luna_error_id id = i % 2 ? LUNA_ERROR_FIELD_UNUSED : LUNA_ERROR_VALUE_RANGE;
    CHECK(status == LUNA_BAD_ARGUMENT && luna_error_id_of(ctx) == id, "config %d: %s", i, luna_error(ctx));
    luna_close(ctx);
  }
  free(x);
}

/* files whose sizes contradict their tensors */
static void check_hostile(void) {
  static const char *const changes[][3] = {
    {"forecast", "\"luna.features\": \"3\"", "\"luna.features\": \"4\""},
        {"forecast", "\"luna.features\": \"3\"", "\"luna.features\": \"0\""},
    {"forecast", "\"luna.outputs\": \"3\"", "\"luna.outputs\": \"2\""},
        {"forecast", "\"luna.outputs\": \"3\"", "\"luna.outputs\": \"0\""},
    {"classes", "\"luna.features\": \"3\"", "\"luna.features\": \"9\""},
        {"classes", "\"luna.features\": \"3\"", "\"luna.features\": \"0\""},
    {"step_values", "\"luna.per_step\": \"1\"", "\"luna.per_step\": \"7\""},
    {"rms_steps", "\"luna.norm\": \"1\"", "\"luna.norm\": \"0\""},
        {"rms_steps", "\"luna.norm\": \"1\"", "\"luna.norm\": \"2\""},
    {"rms_classes", "\"luna.norm\": \"1\"", "\"luna.norm\": \"0\""}};
  static char bytes[1 << 16];
  for (size_t i = 0; i < sizeof changes / sizeof changes[0]; i++) {
    char path[200];
    snprintf(path, sizeof path, "tests/data/features/%s.safetensors", changes[i][0]);
    FILE *file = fopen(path, "rb");
    const size_t size = file ? fread(bytes, 1, sizeof bytes, file) : 0, length = strlen(changes[i][1]);
    if (file) fclose(file);
    size_t at = 0;
    while (at + length < size && memcmp(bytes + at, changes[i][1], length) != 0) at++;
    if (!CHECK(at + length < size, "%s has no %s", path, changes[i][1])) continue;
    luna_ctx *ctx = ctx_open(1, 1);
    luna_model m;
    memcpy(bytes + at, changes[i][2], length);
    CHECK(luna_load_model(&m, luna_params_open(ctx), luna_bytes(bytes, size)) != LUNA_OK && luna_error(ctx)[0],
          "%s with %s is loaded", path, changes[i][2]);
    luna_close(ctx);
  }
}

int main(void) {
  features_files(NULL);
  check_losses();
  check_quantiles();
  check_output_norm();
  check_models();
  check_tagger();
  check_fit();
  check_causality();
  check_streams();
  check_differences();
  check_block();
  check_refused();
  check_hostile();
  return test_report("features");
}
#endif
