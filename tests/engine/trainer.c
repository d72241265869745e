/* Random numbers and dropout, parameter sets; optimisers and schedules against their formulas in double and against
   torch's numbers; groups, accumulation, steps with a NaN or Inf. */
#include "test.h"
#define LUNA_IMPLEMENTATION
#include "luna.h"
#include "examples/luna_apollo.h"
#include "examples/luna_ops.h"
#include "common.h"
#include "st.h"
#include "naive.h"
#include <float.h>

static luna_ctx *open_seeded(uint64_t seed, luna_isa isa) {
  luna_options options = {0};
  options.threads = 1;
  options.seed = seed;
  options.isa = isa;
  return luna_open(&options);
}
static luna_init init_of(luna_init_kind kind, float scale) {
  luna_init init;
  init.kind = kind;
  init.scale = scale;
  return init;
}

/* ---- Philox and dropout ---- */
static void check_philox(void) { /* the known answers of Random123 */
  static const struct {
    uint32_t counter[4];
    uint64_t key;
    uint32_t out[4];
  } known[3] = {
      {{0, 0, 0, 0}, 0, {0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u}},
      {{0xffffffffu, 0xffffffffu, 0xffffffffu, 0xffffffffu}, 0xffffffffffffffffu,
       {0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu}},
      {{0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u}, 0x299f31d0a4093822u,
       {0xd16cfe09u, 0x94fdccebu, 0x5001e420u, 0x24126ea1u}}};
  for (int i = 0; i < 3; i++) {
    uint32_t out[4];
    luna_philox(known[i].counter, known[i].key, out);
    CHECK(memcmp(out, known[i].out, sizeof out) == 0, "Philox answer %d is %08x %08x %08x %08x", i, out[0], out[1],
          out[2], out[3]);
  }
}


static void check_dropout_rule(luna_isa isa) {
  const uint64_t seed = 0x123456789abcdefu;
  const int64_t n = 100003;
  luna_ctx *ctx = open_seeded(seed, isa);
  for (uint32_t step = 1; step <= 2; step++) {
    luna_begin_step(ctx);
    for (uint32_t op = 0; op < 3; op++) {
      static const double probability[3] = {0.1, 0.5, 0.999};
      const float keep = (float)(1 / (1 - probability[op]));
      luna_tensor *x = common_tensor(ctx, op, n, 0, 0, 0);
      if (op < 2) luna_require_grad(x); /* whether a gradient is wanted makes no difference */
      luna_tensor *y = luna_dropout(x, (float)probability[op]);
      int64_t wrong = 0;
      if (!CHECK(x && y, "%s: dropout failed: %s", luna_isa_name(isa), luna_error(ctx))) continue;
      for (int64_t e = 0; e < n; e++) {
        const float expected = naive_dropped(seed, op, step, (uint64_t)e, (float)probability[op]) ? 0 :
            x->data[e] * keep;
        if (!(fabs((double)y->data[e] - (double)expected) <= 1e-4 * fabs((double)expected))) wrong++;
      }
      CHECK(wrong == 0, "%s, step %u, dropout %u: %lld of %lld elements break the 16-bit rule", luna_isa_name(isa),
            step, op,
            (long long)wrong, (long long)n);
    }
  }
  luna_close(ctx);
}

static void check_dropout_statistics(void) {
  const int64_t n = 200000;
  luna_ctx *ctx = open_seeded(3, LUNA_ISA_BEST);
  float *ones = common_floats(n);
  for (int64_t i = 0; i < n; i++) ones[i] = 1;
  luna_begin_step(ctx);
  luna_tensor *x = luna_require_grad(luna_tensor_new(ctx, ones, 1, &n)), *a = luna_dropout(x, 0.25f),
      *b = luna_dropout(x, 0.25f);
  int64_t dropped = 0, both = 0;
  for (int64_t i = 0; a && b && i < n; i++) dropped += a->data[i] == 0, both += a->data[i] == 0 && b->data[i] == 0;
  CHECK(fabs((double)dropped / (double)n - 0.25) < 0.005, "a quarter of %lld dropped means %lld", (long long)n,
        (long long)dropped);
  CHECK(fabs((double)both / (double)n - 0.0625) < 0.003, "two masks are not independent: %lld dropped by both",
        (long long)both);
  CHECK(luna_dropout(x, 0) == x, "dropout of 0 is not the tensor itself");
  luna_begin_inference(ctx);
  x = luna_tensor_new(ctx, ones, 1, &n);
  CHECK(x && luna_dropout(x, 0.5f) == x, "dropout does something in inference");
  free(ones);
  luna_close(ctx);
}

/* ---- parameter sets ---- */
static void check_params(void) {
  luna_ctx *ctx = open_seeded(5, LUNA_ISA_BEST);
  luna_params *params = luna_params_open(ctx);
  const int64_t shape[2] = {40, 50}, other[1] = {7};
  const char *name = NULL;
  luna_tensor *w = luna_param(params, "w", 2, shape, init_of(LUNA_INIT_XAVIER, 1)),
              *b = luna_param(params, "b", 1, other, init_of(LUNA_INIT_ZEROS, 0));
  CHECK(w && b && luna_params_tensor_count(params) == 2 && luna_params_element_count(params) == 2007,
        "two parameters make %lld, %lld numbers",
        (long long)luna_params_tensor_count(params), (long long)luna_params_element_count(params));
  CHECK(luna_params_find(params, "w") == w && luna_params_find(params, "b") == b && !luna_params_find(params, "c") &&
            !luna_params_find(params, ""),
        "find does not find what there is");
  CHECK(luna_params_at(params, 1, &name) == b && name && strcmp(name, "b") == 0, "at(1) is %s", name ? name : "null");
  CHECK(!luna_params_at(params, 2, &name) && !luna_params_at(params, -1, NULL), "at() gives what is not there");
  luna_begin_step(ctx);
  CHECK(!luna_param(params, "w", 1, other, init_of(LUNA_INIT_ONES, 0)) &&
      luna_error_id_of(ctx) == LUNA_ERROR_PARAM_EXISTS,
        "a name twice: %s", luna_error(ctx));
  CHECK(luna_params_tensor_count(params) == 2, "a refused parameter is in the set");
  luna_begin_step(ctx);
  CHECK(!luna_param(params, NULL, 1, other, init_of(LUNA_INIT_ONES, 0)), "a parameter without a name");
  luna_begin_step(ctx);
  CHECK(luna_params_set_text(params, "author", "nobody") == LUNA_OK &&
        luna_params_set_text(params, "author", "somebody \"else\"") == LUNA_OK,
        "set: %s", luna_error(ctx));
  CHECK(luna_params_get_text(params, "author") && strcmp(luna_params_get_text(params, "author"),
                                                         "somebody \"else\"") == 0,
        "get does not give what was set");
  CHECK(!luna_params_get_text(params, "nothing"), "get gives what was not set");
  luna_close(ctx);
}

/* values depend on seed and name alone */
static void check_params_values(void) {
  static const char *const names[3] = {"a", "b", "c"};
  const int64_t shape[2] = {30, 20};
  luna_tensor *p[3][3];
  luna_ctx *ctx[3];
  for (int c = 0; c < 3; c++) {
    ctx[c] = open_seeded(c == 2 ? 9 : 8, c == 1 ? LUNA_ISA_REFERENCE : LUNA_ISA_BEST);
    luna_params *params = luna_params_open(ctx[c]);
    for (int i = 0; i < 3; i++) {
      const int at = c == 1 ? 2 - i : i; /* in another order */
      p[c][at] = luna_param(params, names[at], 2, shape, init_of(at ? LUNA_INIT_NORMAL : LUNA_INIT_XAVIER, 0));
    }
  }
  for (int i = 0; i < 3; i++) {
    if (!CHECK(p[0][i] && p[1][i] && p[2][i], "a parameter failed: %s", luna_error(ctx[0]))) continue;
    CHECK(memcmp(p[0][i]->data, p[1][i]->data, 600 * sizeof(float)) == 0,
          "parameter %s depends on more than seed and name", names[i]);
    CHECK(memcmp(p[0][i]->data, p[2][i]->data, 600 * sizeof(float)) != 0, "parameter %s does not depend on the seed",
          names[i]);
  }
  CHECK(p[0][1] && p[0][2] && memcmp(p[0][1]->data, p[0][2]->data, 600 * sizeof(float)) != 0,
        "two names have the same values");
  for (int c = 0; c < 3; c++) luna_close(ctx[c]);
}

static void check_params_distribution(void) {
  luna_ctx *ctx = open_seeded(11, LUNA_ISA_BEST);
  luna_params *params = luna_params_open(ctx);
  const int64_t shape[2] = {100, 300};
  static const luna_init_kind kinds[5] = {LUNA_INIT_ZEROS, LUNA_INIT_ONES, LUNA_INIT_XAVIER, LUNA_INIT_NORMAL,
                                          LUNA_INIT_UNIFORM};
  static const char *const names[5] = {"zeros", "ones", "xavier", "normal", "uniform"};
  static const double deviation[5] = {0, 0, 0.5, 0.02, 0.25}, scale[5] = {0, 0, 0.5, 0.02, 0.25};
  for (int k = 0; k < 5; k++) {
    luna_tensor *p = luna_param(params, names[k], 2, shape, init_of(kinds[k], (float)scale[k]));
    double mean = 0, square = 0, max = 0, bound;
    if (!CHECK(p != NULL, "%s: %s", names[k], luna_error(ctx))) continue;
    for (int64_t i = 0; i < 30000; i++) {
      const double x = (double)p->data[i];
      mean += x / 30000, square += x * x / 30000;
      if (fabs(x) > max) max = fabs(x);
    }
    bound = k == 2 ? 0.5 * sqrt(6.0 / 400) : k == 4 ? 0.25 : 0; /* Xavier uniform: gain sqrt(6 / (in + out)) */
    const double expected = k == 3 ? deviation[k] : k == 1 ? 1 : bound / sqrt(3.0);
    CHECK(fabs(sqrt(square) - expected) <= 0.02 * expected, "%s: root mean square %g, expected %g", names[k],
          sqrt(square), expected);
    CHECK(fabs(mean - (k == 1)) <= 0.02 * expected, "%s: mean %g", names[k], mean);
    if (k == 2 || k == 4)
      CHECK(max <= bound * 1.000001 && max > 0.99 * bound, "%s: largest %g, bound %g", names[k], max, bound);
  }
  luna_close(ctx);
}

/* ---- optimisers: loss = sum c w^2, so that the gradient is 2 c w ---- */
#define PARTS 3
static const int64_t part_size[PARTS] = {7, 15, 1};
typedef struct fit {
  luna_ctx *ctx;
  luna_params *params;
  luna_optimizer *optimizer;
  double w[PARTS][16], first[PARTS][16], second[PARTS][16], gradient[PARTS][16], norm;
} fit;

static double fit_weight(int part, int64_t i) { return (double)(float)common_number(50 + (uint64_t)part, (uint64_t)i); }

static void fit_open_in(fit *f, luna_ctx *ctx) {
  static const char *const names[PARTS] = {"a", "b", "c"};
  memset(f, 0, sizeof *f);
  f->ctx = ctx;
  f->params = luna_params_open(f->ctx);
  for (int k = 0; k < PARTS; k++) {
    luna_tensor *p = luna_param(f->params, names[k], 1, &part_size[k], init_of(LUNA_INIT_NORMAL, 1));
    for (int64_t i = 0; p && i < part_size[k]; i++) f->w[k][i] = (double)p->data[i];
  }
}
static void fit_open(fit *f) { fit_open_in(f, open_seeded(1, LUNA_ISA_BEST)); }
static luna_tensor *fit_loss(fit *f) {
  luna_tensor *loss = NULL;
  for (int k = 0; k < PARTS; k++) {
    luna_tensor *p = luna_params_at(f->params, k, NULL), *part = common_loss(luna_mul(p, p), 50 + (uint64_t)k);
    loss = loss ? luna_add(loss, part) : part;
  }
  return loss;
}
static luna_status fit_step(fit *f) {
  luna_begin_step(f->ctx);
  luna_backward(fit_loss(f));
  f->norm = 0;
  for (int k = 0; k < PARTS; k++)
    for (int64_t i = 0; i < part_size[k]; i++) {
      f->gradient[k][i] = 2 * fit_weight(k, i) * f->w[k][i];
      f->norm += f->gradient[k][i] * f->gradient[k][i];
    }
  f->norm = sqrt(f->norm);
  return luna_optimizer_step(f->optimizer);
}
static void fit_compare(fit *f, const char *what, int step) {
  for (int k = 0; k < PARTS; k++) {
    const luna_tensor *p = luna_params_at(f->params, k, NULL);
    double off = 0, size = 0;
    for (int64_t i = 0; i < part_size[k]; i++) {
      off += ((double)p->data[i] - f->w[k][i]) * ((double)p->data[i] - f->w[k][i]);
      size += f->w[k][i] * f->w[k][i];
    }
    CHECK(sqrt(off) <= 2e-6 * sqrt(size), "%s: after step %d parameter %d is off by %.3g", what, step, k,
          sqrt(off / size));
  }
}

static void check_sgd(const char *what, const luna_optimizer_config *config) {
  fit f;
  const double lr = config && config->lr != 0 ? (double)config->lr : 0.01;
  luna_optimizer_config c = {0};
  fit_open(&f);
  if (config) c = *config;
  f.optimizer = luna_sgd(f.params, config);
  if (!CHECK(f.optimizer != NULL, "%s: %s", what, luna_error(f.ctx))) {
    luna_close(f.ctx);
    return;
  }
  for (int step = 1; step <= 5; step++) {
    CHECK(fit_step(&f) == LUNA_OK, "%s: %s", what, luna_error(f.ctx));
    const double factor = c.clip > 0 && f.norm > (double)c.clip ? (double)c.clip / f.norm : 1;
    const double rate = lr * (double)luna_schedule_at(&c.schedule, step);
    CHECK(fabs((double)luna_optimizer_grad_norm(f.optimizer) - f.norm) <= 1e-5 * f.norm, "%s: norm %g, expected %g",
          what,
          (double)luna_optimizer_grad_norm(f.optimizer), f.norm);
    for (int k = 0; k < PARTS; k++)
      for (int64_t i = 0; i < part_size[k]; i++) {
        const double g = factor * f.gradient[k][i] + (double)c.weight_decay * f.w[k][i];
        f.first[k][i] = (double)c.momentum * f.first[k][i] + g;
        f.w[k][i] -= rate * (c.momentum == 0 ? g : c.nesterov ? g + (double)c.momentum * f.first[k][i] : f.first[k][i]);
      }
    fit_compare(&f, what, step);
  }
  CHECK(luna_optimizer_steps(f.optimizer) == 5 && luna_optimizer_skipped(f.optimizer) == 0,
        "%s: the count of steps is %lld", what,
        (long long)luna_optimizer_steps(f.optimizer));
  luna_close(f.ctx);
}

static void check_adamw(const char *what, const luna_optimizer_config *config) {
  fit f;
  luna_optimizer_config c = {0};
  if (config) c = *config;
  const double lr = c.lr != 0 ? (double)c.lr : 1e-3, b1 = c.beta1 != 0 ? (double)c.beta1 : 0.9,
      b2 = c.beta2 != 0 ? (double)c.beta2 : 0.999;
  const double epsilon = c.epsilon != 0 ? (double)c.epsilon : 1e-8;
  fit_open(&f);
  f.optimizer = luna_adamw(f.params, config);
  if (!CHECK(f.optimizer != NULL, "%s: %s", what, luna_error(f.ctx))) {
    luna_close(f.ctx);
    return;
  }
  for (int step = 1; step <= 5; step++) {
    CHECK(fit_step(&f) == LUNA_OK, "%s: %s", what, luna_error(f.ctx));
    const double factor = c.clip > 0 && f.norm > (double)c.clip ? (double)c.clip / f.norm : 1;
    const double rate = lr * (double)luna_schedule_at(&c.schedule, step);
    for (int k = 0; k < PARTS; k++)
      for (int64_t i = 0; i < part_size[k]; i++) {
        const double g = factor * f.gradient[k][i];
        f.first[k][i] = b1 * f.first[k][i] + (1 - b1) * g;
        f.second[k][i] = b2 * f.second[k][i] + (1 - b2) * g * g;
        f.w[k][i] -= rate * (double)c.weight_decay * f.w[k][i];
        f.w[k][i] -= rate * f.first[k][i] / (1 - pow(b1, step)) /
            (sqrt(f.second[k][i] / (1 - pow(b2, step))) + epsilon);
      }
    fit_compare(&f, what, step);
  }
  luna_close(f.ctx);
}

static void check_optimizers(void) {
  luna_optimizer_config sgd = {0};
  luna_optimizer_config adam = {0};
  check_sgd("SGD", NULL);
  sgd.lr = 0.05f;
  sgd.weight_decay = 0.1f;
  check_sgd("SGD with decay", &sgd);
  sgd.momentum = 0.9f;
  check_sgd("SGD with momentum", &sgd);
  sgd.nesterov = true;
  check_sgd("SGD with Nesterov's momentum", &sgd);
  sgd.clip = 0.7f;
  sgd.schedule.decay = LUNA_DECAY_COSINE;
  sgd.schedule.warmup = 2;
  sgd.schedule.total = 6;
  sgd.schedule.floor = 0.1f;
  check_sgd("SGD clipped and scheduled", &sgd);
  check_adamw("AdamW", NULL);
  adam.lr = 0.02f;
  adam.beta1 = 0.8f;
  adam.beta2 = 0.95f;
  adam.epsilon = 1e-3f;
  adam.weight_decay = 0.3f;
  check_adamw("AdamW with its own numbers", &adam);
  adam.clip = 0.5f;
  adam.schedule.decay = LUNA_DECAY_INVERSE_SQRT;
  adam.schedule.warmup = 2;
  check_adamw("AdamW clipped and scheduled", &adam);
}

/* a field that an optimiser does not have changes no bit */
static void check_one_config(void) {
  static luna_optimizer *(*const open[])(luna_params *, const luna_optimizer_config *) =
      {luna_sgd, luna_adam, luna_adamw, luna_apollo};
  for (int kind = 0; kind < 4; kind++) {
    fit f[2];
    for (int all = 0; all < 2; all++) {
      luna_optimizer_config c = {0};
      c.lr = 0.02f;
      if (all || kind == LUNA_OPTIMIZER_SGD) c.momentum = 0.5f, c.nesterov = true;
      if (all || kind != LUNA_OPTIMIZER_SGD) c.beta1 = 0.75f, c.epsilon = 1e-3f;
      if (all || kind == LUNA_OPTIMIZER_ADAM || kind == LUNA_OPTIMIZER_ADAMW) c.beta2 = 0.9f;
      fit_open(&f[all]);
      f[all].optimizer = open[kind](f[all].params, &c);
      for (int step = 0; step < 3; step++) CHECK(fit_step(&f[all]) == LUNA_OK, "%s", luna_error(f[all].ctx));
    }
    for (int k = 0; k < PARTS; k++)
      CHECK(!memcmp(luna_params_at(f[0].params, k, NULL)->data, luna_params_at(f[1].params, k, NULL)->data,
                    (size_t)part_size[k] * sizeof(float)),
            "optimiser %d: parameter %d depends on fields of others", kind, k);
    for (int all = 0; all < 2; all++) luna_close(f[all].ctx);
  }
}

static double read_weight(const fit *f, int part, int64_t i) {
  return (double)luna_params_at(f->params, part, NULL)->data[i];
}

/* gradients: accumulate over begins, are zeroed by the step, a NaN skips, an error stops */
static void check_protocol(void) {
  fit f;
  float once[16], twice[16];
  const float nan = NAN;
  luna_optimizer_config config = {0};
  fit_open(&f);
  luna_tensor *a = luna_params_at(f.params, 1, NULL);
  config.lr = 0.1f;
  f.optimizer = luna_sgd(f.params, &config);
  luna_begin_step(f.ctx);
  CHECK(luna_backward(fit_loss(&f)) == LUNA_OK && luna_read_grad(a, once) == LUNA_OK, "backward: %s",
        luna_error(f.ctx));
  luna_begin_step(f.ctx);
  CHECK(luna_backward(fit_loss(&f)) == LUNA_OK && luna_read_grad(a, twice) == LUNA_OK, "backward: %s",
        luna_error(f.ctx));
  for (int i = 0; i < 15; i++)
    CHECK(fabs((double)twice[i] - 2 * (double)once[i]) <= 1e-6 * fabs((double)once[i]),
          "gradient %d does not accumulate: %g, then %g", i,
          (double)once[i], (double)twice[i]);
  CHECK(luna_optimizer_step(f.optimizer) == LUNA_OK, "step: %s", luna_error(f.ctx));
  luna_begin_step(f.ctx);
  CHECK(luna_backward(fit_loss(&f)) == LUNA_OK && luna_read_grad(a, twice) == LUNA_OK, "backward: %s",
        luna_error(f.ctx));
  for (int i = 0; i < 15; i++)
    CHECK(fabs((double)twice[i]) < fabs((double)once[i]) * 1.5, "the step did not zero gradient %d", i);
  CHECK(luna_params_zero_grad(f.params) == LUNA_OK, "zero_grad: %s", luna_error(f.ctx));
  if (luna_read_grad(a, twice) == LUNA_OK)
    for (int i = 0; i < 15; i++) CHECK(twice[i] == 0, "zero_grad left %g", (double)twice[i]);

  const double before = read_weight(&f, 0, 0), step_before = (double)luna_optimizer_steps(f.optimizer);
  for (int bad = 0; bad < 2; bad++) {
    luna_begin_step(f.ctx);
    luna_backward(luna_scale(fit_loss(&f), bad ? INFINITY : nan));
    CHECK(luna_optimizer_step(f.optimizer) == LUNA_OK, "a NaN among the gradients is an error: %s", luna_error(f.ctx));
    CHECK(read_weight(&f, 0, 0) == before, "a %s among the gradients reached the parameters", bad ? "Inf" : "NaN");
    CHECK(luna_optimizer_skipped(f.optimizer) == bad + 1, "%lld skipped",
          (long long)luna_optimizer_skipped(f.optimizer));
  }
  CHECK((double)luna_optimizer_steps(f.optimizer) == step_before, "a skipped step counts as a step");
  luna_begin_step(f.ctx);
  luna_backward(fit_loss(&f));
  CHECK(luna_optimizer_step(f.optimizer) == LUNA_OK && read_weight(&f, 0, 0) != before &&
        isfinite(read_weight(&f, 0, 0)),
        "after a NaN was skipped the next step does not work: its gradients were kept");

  const double again = read_weight(&f, 0, 0);
  luna_begin_step(f.ctx);
  luna_tensor *loss = fit_loss(&f);
  luna_backward(loss);
  luna_matmul(a, a, false, false);
  CHECK(luna_error_status(f.ctx) != LUNA_OK && luna_optimizer_step(f.optimizer) == luna_error_status(f.ctx),
        "the optimiser's step hides an earlier error");
  CHECK(read_weight(&f, 0, 0) == again, "the optimiser's step used gradients although a call failed");
  luna_close(f.ctx);
}

/* a step by its halves is the same step; without the first the rate stays what it was */
static void check_halves(void) {
  luna_optimizer_config config = {0};
  fit whole, halves;
  config.lr = 0.01f;
  config.schedule.warmup = 3;
  fit_open(&whole);
  fit_open(&halves);
  whole.optimizer = luna_adamw(whole.params, &config);
  halves.optimizer = luna_adamw(halves.params, &config);
  for (int step = 0; step < 5; step++) {
    CHECK(fit_step(&whole) == LUNA_OK, "step %d fails", step);
    luna_begin_step(halves.ctx);
    luna_backward(fit_loss(&halves));
    CHECK(luna_optimizer_advance(halves.optimizer) == LUNA_OK && luna_optimizer_apply(halves.optimizer) == LUNA_OK,
          "step %d by halves fails", step);
    for (int k = 0; k < PARTS; k++)
      for (int64_t i = 0; i < part_size[k]; i++)
        CHECK(read_weight(&whole, k, i) == read_weight(&halves, k, i), "step %d by halves differs", step);
  }
  CHECK(luna_optimizer_advance(NULL) == LUNA_BAD_ARGUMENT && luna_optimizer_apply(NULL) == LUNA_BAD_ARGUMENT,
        "no optimiser makes half a step");

  luna_tensor *a = luna_params_at(whole.params, 0, NULL);
  const float values[7] = {1, 2, 3, 4, 5, 6, 7};
  float back[7] = {0};
  CHECK(luna_write(a, values) == LUNA_OK && luna_read(a, back) == LUNA_OK && memcmp(values, back, sizeof back) == 0,
        "luna_write does not write");
  CHECK(luna_write(a, NULL) == LUNA_BAD_ARGUMENT && luna_write(NULL, values) == LUNA_BAD_ARGUMENT,
        "luna_write writes nothing, or nowhere");
  luna_params *shared = luna_params_share(whole.ctx, whole.params);
  luna_tensor *borrowed = luna_param(shared, "a", 1, &part_size[0], init_of(LUNA_INIT_NORMAL, 1));
  CHECK(borrowed && luna_write(borrowed, back) == LUNA_BAD_ARGUMENT, "luna_write changes what is borrowed");
  luna_close(whole.ctx);
  luna_close(halves.ctx);
}

static void check_set_lr(void) {
  fit f;
  fit_open(&f);
  f.optimizer = luna_sgd(f.params, NULL);
  CHECK(luna_optimizer_set_lr(f.optimizer, 0) == LUNA_OK, "a learning rate of 0: %s", luna_error(f.ctx));
  const double before = read_weight(&f, 0, 0);
  CHECK(fit_step(&f) == LUNA_OK && read_weight(&f, 0, 0) == before, "a learning rate of 0 moves the parameters");
  luna_optimizer_set_lr(f.optimizer, 0.5f);
  CHECK(fit_step(&f) == LUNA_OK, "step: %s", luna_error(f.ctx));
  const double expected = before - 0.5 * f.gradient[0][0];
  CHECK(fabs(read_weight(&f, 0, 0) - expected) < 1e-5, "set_lr has no effect");
  luna_close(f.ctx);
}

/* luna_optimizer_lr is what the step used: SGD without momentum moves a parameter by it */
static void check_lr(void) {
  const int64_t one = 1;
  luna_ctx *ctx = open_seeded(1, LUNA_ISA_BEST);
  luna_params *params = luna_params_open(ctx);
  luna_tensor *w = luna_param(params, "w", 1, &one, init_of(LUNA_INIT_ONES, 1));
  luna_optimizer_config config = {0};
  config.lr = 0.5f;
  config.schedule.decay = LUNA_DECAY_LINEAR;
  config.schedule.warmup = 2;
  config.schedule.total = 6;
  luna_optimizer *sgd = luna_sgd(params, &config);
  CHECK(luna_optimizer_lr(NULL) == 0 && luna_optimizer_lr(sgd) == 0.25f, "the first step's rate will be %g",
        (double)luna_optimizer_lr(sgd));
  for (int step = 1; step <= 6; step++) {
    const float before = w->data[0];
    luna_begin_step(ctx);
    if (step == 5) luna_optimizer_set_lr(sgd, 0.25f);
    luna_backward(luna_scale(w, 1));
    luna_optimizer_step(sgd);
    const float lr = luna_optimizer_lr(sgd), want = (step < 5 ? 0.5f : 0.25f) *
        luna_schedule_at(&config.schedule, step);
    CHECK(lr == want && fabsf(before - w->data[0] - lr) < 1e-6f, "step %d: the rate is %g, not %g, and w moved by %g",
          step, (double)lr,
          (double)want, (double)(before - w->data[0]));
  }
  luna_close(ctx);
}

/* One by one each parameter of a model is frozen: it has no gradient and does not change, and all others have the
   gradient, read by their names, that they had. */
static const int32_t frozen_tokens[16] = {3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3};
static const int32_t frozen_labels[2] = {2, 0};
static luna_tensor *frozen_loss(int kind, luna_params *params, void *model, bool init) {
  const luna_input input = {frozen_tokens, NULL, 2, 8, NULL};
  luna_classifier_config classifier = {0};
  luna_seq2seq_config seq2seq = {0};
  luna_lm_config lm = {0};
  lm.vocab = classifier.vocab = seq2seq.vocab = 11;
  lm.layer.dim = classifier.encoder.layer.dim = seq2seq.encoder.layer.dim = 16;
  lm.layer.heads = classifier.encoder.layer.heads = seq2seq.encoder.layer.heads = 2;
  lm.layer.memory = classifier.encoder.layer.memory = seq2seq.encoder.layer.memory = 4;
  lm.layer.convolution = 3;
  classifier.classes = 3;
  if (init) {
    if (kind == 0) luna_lm_init((luna_lm *)model, params, &lm);
    if (kind == 1) luna_classifier_init((luna_classifier *)model, params, &classifier);
    if (kind == 2) luna_seq2seq_init((luna_seq2seq *)model, params, &seq2seq);
    return NULL;
  }
  if (kind == 0) return luna_lm_loss((luna_lm *)model, &input, frozen_tokens);
  if (kind == 1) return luna_cross_entropy(luna_classifier_forward((luna_classifier *)model, &input), frozen_labels,
                                           NULL);
  return luna_cross_entropy(luna_seq2seq_forward((luna_seq2seq *)model, &input, &input), frozen_tokens, NULL);
}
static void check_frozen(int kind, luna_form form) {
  luna_options options = {0};
  union { luna_lm lm; luna_classifier classifier; luna_seq2seq seq2seq; } model;
  options.threads = 1;
  options.form = form;
  luna_ctx *ctx = luna_open(&options);
  luna_params *params = luna_params_open(ctx);
  frozen_loss(kind, params, &model, true);
  const int64_t count = luna_params_tensor_count(params);
  float **gradient = (float **)common_alloc((size_t)(count + 1) * sizeof *gradient),
      *now = common_floats(luna_params_element_count(params));
  luna_optimizer *sgd = luna_sgd(params, NULL);
  for (int64_t frozen = -1; frozen < count; frozen++) {
    const char *frozen_name = "none", *name;
    luna_tensor *t = frozen >= 0 ? luna_params_at(params, frozen, &frozen_name) : NULL;
    if (t)
      CHECK(luna_params_freeze(params, frozen_name, true) == LUNA_OK, "freezing %s: %s", frozen_name, luna_error(ctx));
    luna_begin_step(ctx);
    CHECK(luna_backward(frozen_loss(kind, params, &model, false)) == LUNA_OK, "%s frozen: %s", frozen_name,
          luna_error(ctx));
    for (int64_t i = 0; i < count; i++) {
      luna_params_at(params, i, &name);
      luna_tensor *p = luna_params_find(params, name);
      if (strstr(name, frozen_name)) CHECK(!p->grad, "%s is frozen and has a gradient", name);
      else if (frozen < 0) {
        gradient[i] = common_floats(luna_count(p));
        if (p->grad) luna_read_grad(p, gradient[i]);
      } else if (p->grad) {
        luna_read_grad(p, now);
        CHECK(common_error(now, gradient[i], luna_count(p), 1e-3) < 1e-5, "%s frozen: the gradient of %s is another",
              frozen_name, name);
      }
    }
    if (t) {
      float *before = common_floats(luna_count(t));
      luna_read(t, before);
      if (frozen == count - 1) luna_optimizer_step(sgd); /* the others change: nothing is compared after it */
      CHECK(memcmp(before, t->data, (size_t)luna_count(t) * sizeof(float)) == 0, "%s is frozen and was changed",
            frozen_name);
      free(before);
      CHECK(luna_params_freeze(params, frozen_name, false) == LUNA_OK && t->needs_grad, "thawing %s", frozen_name);
    }
    luna_params_zero_grad(params);
  }
  for (int i = 0; i < 3; i++) {       /* between forward and backward: one frozen, all, and one thawed */
    const char *name = "none";
    const luna_tensor *first = luna_params_at(params, 0, &name);
    luna_begin_step(ctx);
    CHECK(luna_params_freeze(params, name, i == 2) == LUNA_OK, "after begin: %s", luna_error(ctx));
    luna_tensor *loss = frozen_loss(kind, params, &model, false);
    CHECK(luna_params_freeze(params, i == 1 ? NULL : name, i < 2) == LUNA_BAD_ARGUMENT &&
              luna_error_id_of(ctx) == LUNA_ERROR_FREEZE_TAPE, "between forward and backward: %s", luna_error(ctx));
    CHECK(first->needs_grad == (i < 2) && luna_backward(loss) == LUNA_BAD_ARGUMENT, "the step goes on");
  }
  luna_begin_step(ctx);
  CHECK(luna_backward(frozen_loss(kind, params, &model, false)) == LUNA_OK &&
            luna_params_freeze(params, NULL, true) == LUNA_OK && luna_params_freeze(params, NULL, false) == LUNA_OK,
        "after backward: %s", luna_error(ctx));
  CHECK(luna_params_freeze(params, "nothing", true) == LUNA_MISMATCH &&
        luna_error_id_of(ctx) == LUNA_ERROR_FREEZE_EMPTY, "freezing nothing: %s", luna_error(ctx));
  for (int64_t i = 0; i < count; i++) free(gradient[i]);
  free(gradient), free(now);
  luna_close(ctx);
}

static void check_schedules(void) {
  luna_schedule s = {0};
  const struct {
    luna_decay decay;
    int64_t warmup, total;
    double floor;
    int64_t step;
    double factor;
  } known[] = {{LUNA_DECAY_CONSTANT, 0, 0, 0, 1, 1},           {LUNA_DECAY_CONSTANT, 0, 0, 0, 1000000, 1},
               {LUNA_DECAY_CONSTANT, 10, 0, 0, 1, 0.1},        {LUNA_DECAY_CONSTANT, 10, 0, 0, 5, 0.5},
               {LUNA_DECAY_CONSTANT, 10, 0, 0, 10, 1},         {LUNA_DECAY_CONSTANT, 10, 0, 0, 11, 1},
               {LUNA_DECAY_INVERSE_SQRT, 100, 0, 0, 50, 0.5},  {LUNA_DECAY_INVERSE_SQRT, 100, 0, 0, 100, 1},
               {LUNA_DECAY_INVERSE_SQRT, 100, 0, 0, 400, 0.5}, {LUNA_DECAY_INVERSE_SQRT, 100, 0, 0, 10000, 0.1},
               {LUNA_DECAY_LINEAR, 10, 110, 0.2, 10, 1},       {LUNA_DECAY_LINEAR, 10, 110, 0.2, 60, 0.6},
               {LUNA_DECAY_LINEAR, 10, 110, 0.2, 110, 0.2},    {LUNA_DECAY_LINEAR, 10, 110, 0.2, 500, 0.2},
               {LUNA_DECAY_COSINE, 10, 110, 0.2, 60, 0.6},     {LUNA_DECAY_COSINE, 10, 110, 0, 35, 0.8535534},
               {LUNA_DECAY_COSINE, 10, 110, 0.2, 110, 0.2},    {LUNA_DECAY_COSINE, 10, 110, 0.2, 5000, 0.2},
               {LUNA_DECAY_COSINE, 0, 100, 0, 100, 0}};
  for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
    s.decay = known[i].decay, s.warmup = known[i].warmup, s.total = known[i].total, s.floor = (float)known[i].floor;
    const double factor = (double)luna_schedule_at(&s, known[i].step);
    CHECK(fabs(factor - known[i].factor) < 1e-6,
          "schedule %d with warm-up %lld, total %lld at step %lld: %g, expected %g",
          (int)known[i].decay, (long long)s.warmup, (long long)s.total, (long long)known[i].step, factor,
              known[i].factor);
  }
  const luna_schedule gap = {.decay = LUNA_DECAY_MILESTONES, .milestone = {10, 0, 20}, .gamma = 0.5f};
  CHECK(luna_schedule_at(&gap, 21) == 0.5f, "a milestone after a 0: %g", (double)luna_schedule_at(&gap, 21));
}

/* ---- stored numbers: torch's optimisers and schedules, and the authors' Apollo, in float64
   (tests/engine/optimizers.py)
   ---- */
#define STORED "tests/data/optimizers.safetensors"
enum { STORED_STEPS = 10 };
/* A step rounds parameter and moments some four times, by at most 6e-8: SGD and Adam end within 2e-7. Apollo, whose
   directions are quotients of moments, within 6e-7. One rounding too many in a step, or one in a hyperparameter, is
   more. */
#define STORED_LIMIT 1e-6
typedef struct stored {
  uint8_t *bytes;
  st_file st;
} stored;

static void stored_open(stored *s) {
  size_t size;
  memset(s, 0, sizeof *s);
  const char *wrong = st_read(&s->st, STORED, &s->bytes, &size);
  CHECK(!wrong, STORED ": %s", wrong);
}
/* the n numbers of tensor "kind.a", or "kind.a.b"; null when there is none */
static float *stored_floats(const stored *s, const char *kind, int a, int b, int64_t *n) {
  char name[64];
  st_item t;
  if (b < 0) snprintf(name, sizeof name, "%s.%d", kind, a);
  else snprintf(name, sizeof name, "%s.%d.%d", kind, a, b);
  if (!st_find(&s->st, name, &t)) return NULL;
  float *values = common_floats(t.count);
  st_floats(&t, values);
  *n = t.count;
  return values;
}
static bool stored_text(const stored *s, const char *kind, int at, char *out, size_t room) {
  char key[32];
  st_item pair;
  snprintf(key, sizeof key, "%s.%d", kind, at);
  return st_meta(&s->st, key, &pair) && (size_t)snprintf(out, room, "%s", pair.text) < room;
}
/* "adam lr=0.1 milestone=2 milestone=5": the number after the given occurrence of " key="; 0 when there is none */
static float stored_option(const char *text, const char *key, int occurrence) {
  const size_t n = strlen(key);
  for (; (text = strchr(text, ' ')) != NULL; text++)
    if (strncmp(text + 1, key, n) == 0 && text[1 + n] == '=' && occurrence-- == 0)
      return (float)strtod(text + 2 + n, NULL);
  return 0;
}
static bool stored_is(const char *text, const char *word) {
  return strncmp(text, word, strlen(word)) == 0 && text[strlen(word)] <= ' ';
}
static luna_schedule stored_schedule(const char *text) {
  static const char *const words[5] = {"constant", "inverse_sqrt", "linear", "cosine", "milestones"};
  luna_schedule s;
  memset(&s, 0, sizeof s);
  for (int i = 0; i < 5; i++)
    if (stored_is(text, words[i])) s.decay = (luna_decay)i;
  s.warmup = (int64_t)stored_option(text, "warmup", 0), s.warmup_from = stored_option(text, "warmup_from", 0);
  s.total = (int64_t)stored_option(text, "total", 0), s.floor = stored_option(text, "floor", 0),
      s.gamma = stored_option(text, "gamma", 0);
  for (int i = 0; i < 4; i++) s.milestone[i] = (int64_t)stored_option(text, "milestone", i);
  return s;
}
static luna_optimizer *stored_optimizer(luna_params *params, const char *text) {
  const bool apollo = stored_is(text, "apollo");
  luna_optimizer_config c = {0};
  c.lr = stored_option(text, "lr", 0), c.weight_decay = stored_option(text, "weight_decay", 0),
      c.clip = stored_option(text, "clip", 0);
  c.momentum = stored_option(text, "momentum", 0), c.nesterov = stored_option(text, "nesterov", 0) != 0;
  c.beta1 = stored_option(text, apollo ? "beta" : "beta1", 0), c.beta2 = stored_option(text, "beta2", 0);
  c.epsilon = stored_option(text, "epsilon", 0);
  if (apollo) c.schedule = stored_schedule(text);
  if (stored_is(text, "sgd")) return luna_sgd(params, &c);
  if (apollo) return luna_apollo(params, &c);
  return stored_is(text, "adamw") ? luna_adamw(params, &c) : stored_is(text, "adam") ? luna_adam(params, &c) : NULL;
}

/* adds to the gradients of every parameter these numbers, exactly: loss = sum over all of parameter x number */
static luna_status backward_of(luna_params *params, float *const *gradient) {
  luna_tensor *loss = NULL;
  for (int64_t i = 0; i < luna_params_tensor_count(params); i++) {
    luna_tensor *p = luna_params_at(params, i, NULL);
    const int64_t flat[2] = {1, luna_count(p)};
    luna_tensor *part = luna_sum(luna_reshape(luna_mul(p, luna_tensor_new(p->ctx, gradient[i], p->rank, p->shape)), 2,
                                              flat), 1);
    loss = loss ? luna_add(loss, part) : part;
  }
  return luna_backward(loss);
}

static void check_stored_case(const stored *s, int at, const char *text, luna_isa isa) {
  static const int64_t shapes[PARTS][2] = {{3, 5}, {7, 0}, {130, 0}};
  static const char *const names[PARTS] = {"a", "b", "c"};
  float *gradient[PARTS], *expected[PARTS], *row[PARTS];
  bool good = true;
  luna_ctx *ctx = open_seeded(1, isa);
  luna_params *params = luna_params_open(ctx);
  for (int k = 0; k < PARTS; k++) {
    luna_tensor *p = luna_param(params, names[k], k ? 1 : 2, shapes[k], init_of(LUNA_INIT_ZEROS, 0));
    int64_t starts = 0, gradients = 0, rows = 0;
    float *start = stored_floats(s, "start", k, -1, &starts);
    gradient[k] = stored_floats(s, "gradient", k, -1, &gradients), expected[k] = stored_floats(s, "case", at, k, &rows);
    good = CHECK(p && starts == luna_count(p) && gradients == STORED_STEPS * starts && rows == gradients,
                 STORED ": parameter %d of case %d is not as it should be", k, at) && good;
    if (good) memcpy(p->data, start, (size_t)starts * sizeof(float));
    free(start);
  }
  luna_optimizer *optimizer = stored_optimizer(params, text);
  good = CHECK(optimizer != NULL, "%s: no optimiser: %s", text, luna_error(ctx)) && good;
  for (int step = 0; step < STORED_STEPS && good; step++) {
    luna_begin_step(ctx);
    for (int k = 0; k < PARTS; k++) row[k] = gradient[k] + step * luna_count(luna_params_at(params, k, NULL));
    backward_of(params, row);
    CHECK(luna_optimizer_step(optimizer) == LUNA_OK, "%s: %s", text, luna_error(ctx));
    for (int k = 0; k < PARTS; k++) {
      const luna_tensor *p = luna_params_at(params, k, NULL);
      const double error = test_error(p->data, expected[k] + step * luna_count(p), (size_t)luna_count(p));
      CHECK(error <= STORED_LIMIT, "%s, %s: after step %d parameter %s is off by %.3g", luna_isa_name(isa), text,
            step + 1, names[k], error);
    }
  }
  for (int k = 0; k < PARTS; k++) free(gradient[k]), free(expected[k]);
  luna_close(ctx);
}
static void check_stored(void) {
  stored s;
  char text[200];
  int cases = 0, schedules = 0;
  stored_open(&s);
  for (; stored_text(&s, "case", cases, text, sizeof text); cases++)
    for (int i = 0; i < COMMON_ISAS; i++)
      if (luna_isa_available(common_isas[i])) check_stored_case(&s, cases, text, common_isas[i]);
  for (; stored_text(&s, "schedule", schedules, text, sizeof text); schedules++) {
    const luna_schedule schedule = stored_schedule(text);
    int64_t n = 0;
    float *factors = stored_floats(&s, "schedule", schedules, -1, &n);
    CHECK(n >= 10, STORED ": schedule %d has %d numbers", schedules, (int)n);
    for (int64_t step = 1; step <= n; step++) {
      const double factor = (double)luna_schedule_at(&schedule, step), expected = (double)factors[step - 1];
      CHECK(fabs(factor - expected) <= 2e-7, "%s: %.9g at step %d, torch has %.9g", text, factor, (int)step, expected);
    }
    free(factors);
  }
  CHECK(cases >= 8 && schedules >= 7, STORED " has %d optimisers and %d schedules", cases, schedules);
  free(s.bytes);
}

/* Apollo's sums go over a whole parameter, in blocks, whatever the number of threads */
static void check_apollo_large(void) {
  enum { SIZE = 70003, STEPS = 6 };
  static double w[SIZE], m[SIZE], B[SIZE], d[SIZE];
  static float gradient[SIZE];
  const int64_t n = SIZE;
  luna_optimizer_config config = {0};
  luna_tensor *p[2];
  luna_ctx *ctx[2];
  luna_params *params[2];
  luna_optimizer *optimizer[2];
  double beta, alpha, four, along, bent, off = 0, size = 0;
  float *const gradients[1] = {gradient};
  config.lr = 0.25f, config.beta1 = 0.75f, config.weight_decay = 0.5f, config.schedule.warmup = 4;
  beta = (double)config.beta1;
  for (int c = 0; c < 2; c++) {
    luna_options options = {0};
    options.threads = c ? 3 : 1;
    ctx[c] = luna_open(&options), params[c] = luna_params_open(ctx[c]);
    p[c] = luna_param(params[c], "w", 1, &n, init_of(LUNA_INIT_NORMAL, 1));
    optimizer[c] = luna_apollo(params[c], &config);
  }
  for (int i = 0; i < SIZE && p[0]; i++) w[i] = (double)p[0]->data[i], m[i] = B[i] = d[i] = 0;
  for (int step = 0; step < STEPS; step++) {
    const double rate = 0.25 * (step < 4 ? (double)0.01f + (1 - (double)0.01f) * step / 4 : 1);
    for (int i = 0; i < SIZE; i++)
      gradient[i] = (float)((step % 4 < 2 ? 1 : -1) * common_number(1, (uint64_t)i) + 0.25 *
                            common_number(2 + (uint64_t)step, (uint64_t)i));
    for (int c = 0; c < 2; c++) {
      luna_begin_step(ctx[c]);
      backward_of(params[c], gradients);
      CHECK(luna_optimizer_step(optimizer[c]) == LUNA_OK, "Apollo: %s", luna_error(ctx[c]));
    }
    alpha = (1 - beta) / (1 - pow(beta, step + 1)), four = along = bent = 0;
    for (int i = 0; i < SIZE; i++) four += d[i] * d[i] * d[i] * d[i];
    four = pow(four, 0.25) + (double)1e-4f;
    for (int i = 0; i < SIZE; i++) {
      const double v = d[i] / four * (d[i] / four), delta = (double)gradient[i] + 0.5 * w[i] - m[i];
      along += delta / four * (d[i] / four), bent += B[i] * v;
    }
    for (int i = 0; i < SIZE; i++) {
      m[i] += alpha * ((double)gradient[i] + 0.5 * w[i] - m[i]);
      B[i] += d[i] / four * (d[i] / four) * (-alpha * along - bent);
      d[i] = m[i] / (fabs(B[i]) > 1 ? fabs(B[i]) : 1);
      w[i] -= rate * d[i];
    }
  }
  for (int i = 0; i < SIZE; i++)
    off += ((double)p[0]->data[i] - w[i]) * ((double)p[0]->data[i] - w[i]), size += w[i] * w[i];
  CHECK(sqrt(off) <= STORED_LIMIT * sqrt(size), "Apollo on %d numbers is off by %.3g", SIZE, sqrt(off / size));
  CHECK(memcmp(p[0]->data, p[1]->data, SIZE * sizeof(float)) == 0, "Apollo depends on the number of threads");
  luna_close(ctx[0]), luna_close(ctx[1]);
}

/* ---- groups: SGD with rate 0.1 and decay 0.2, so that a step is w - 0.1 lr (g + decay w) ---- */
static void check_groups(void) {
  static const char *const names[4] = {"layer.weight", "layer.bias", "head.weight", "head.norm"};
  static const int64_t shape[2] = {3, 5};
  static const int axes[4] = {2, 1, 2, 1};
  static const struct {
    luna_param_group group[2];
    float lr[4], decay[4];
  } cases[] = {
      {{{NULL, 1, 0, -1}}, {1, 1, 1, 1}, {0.2f, 0, 0.2f, 0}},
      {{{"head", 0, 0.5f, 0.5f}}, {1, 1, 0.5f, 0.5f}, {0.2f, 0.2f, 0.1f, 0.1f}},
      {{{"head", 1, 2, 0}}, {1, 1, 1, 2}, {0.2f, 0.2f, 0.2f, 0.2f}},
      {{{"layer.", 0, -1, 0}}, {0, 0, 1, 1}, {0.2f, 0.2f, 0.2f, 0.2f}},
      /* the last that fits counts */
      {{{NULL, 0, -1, -1}, {"weight", 0, 3, 1.5f}}, {3, 0, 3, 0}, {0.3f, 0, 0.3f, 0}},
      {{{"weight", 0, 3, 1.5f}, {NULL, 1, 0.25f, -1}}, {3, 0.25f, 3, 0.25f}, {0.3f, 0, 0.3f, 0}}};
  float gradient[15];
  float *const gradients[4] = {gradient, gradient, gradient, gradient};
  common_fill(gradient, 15, 3, 1);
  for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++) {
    luna_ctx *ctx = open_seeded(1, LUNA_ISA_BEST);
    luna_params *params = luna_params_open(ctx);
    luna_optimizer_config config = {0};
    float before[4][15];
    double norm = 0;
    for (int i = 0; i < 4; i++) {
      luna_tensor *p = luna_param(params, names[i], axes[i], axes[i] == 2 ? shape : shape + 1,
                                  init_of(LUNA_INIT_NORMAL, 1));
      luna_read(p, before[i]);
    }
    config.lr = 0.1f, config.weight_decay = 0.2f;
    luna_optimizer *sgd = luna_sgd(params, &config);
    for (int g = 0; g < 2; g++) {
      const luna_param_group *group = &cases[c].group[g];
      if (g == 0 || group->name || group->max_rank)
        CHECK(luna_optimizer_add_group(sgd, group) == LUNA_OK, "group %d of case %d: %s", g, (int)c, luna_error(ctx));
    }
    luna_begin_step(ctx);
    backward_of(params, gradients);
    CHECK(luna_optimizer_step(sgd) == LUNA_OK, "case %d: %s", (int)c, luna_error(ctx));
    for (int i = 0; i < 4; i++) {
      const luna_tensor *p = luna_params_at(params, i, NULL);
      double off = 0;
      for (int64_t j = 0; j < luna_count(p); j++) {
        const double expected = (double)before[i][j] - 0.1 * (double)cases[c].lr[i] *
            ((double)gradient[j] + (double)cases[c].decay[i] * (double)before[i][j]);
        off = fmax(off, fabs((double)p->data[j] - expected));
        norm += (double)gradient[j] * (double)gradient[j];
      }
      CHECK(off <= 5e-7 && (cases[c].lr[i] > 0 || off == 0), "case %d: %s is off by %g", (int)c, names[i], off);
      CHECK(p->grad && p->grad[0] == 0 && p->grad[luna_count(p) - 1] == 0, "case %d: the gradient of %s is left",
            (int)c, names[i]);
    }
    CHECK(fabs((double)luna_optimizer_grad_norm(sgd) - sqrt(norm)) <= 1e-6 * sqrt(norm),
          "case %d: norm %g, of all %g", (int)c,
          (double)luna_optimizer_grad_norm(sgd), sqrt(norm));
    luna_close(ctx);
  }
}
static void check_groups_refused(void) {
  const luna_param_group nowhere = {"nowhere", 0, 0, 0}, lr = {NULL, 0, INFINITY, 0}, decay = {NULL, 0, 0, NAN},
      all = {NULL, 0, 0, 0};
  fit f;
  fit_open(&f);
  f.optimizer = luna_sgd(f.params, NULL);
  CHECK(luna_optimizer_add_group(f.optimizer, &nowhere) == LUNA_MISMATCH &&
      luna_error_id_of(f.ctx) == LUNA_ERROR_GROUP_EMPTY, "a group of none: \"%s\"", luna_error(f.ctx));
  CHECK(luna_optimizer_add_group(f.optimizer, &lr) == LUNA_BAD_ARGUMENT &&
        luna_optimizer_add_group(f.optimizer, &decay) == LUNA_BAD_ARGUMENT &&
            luna_optimizer_add_group(f.optimizer, NULL) == LUNA_BAD_ARGUMENT &&
                luna_optimizer_add_group(NULL, &all) == LUNA_BAD_ARGUMENT,
        "an invalid group is accepted");
  luna_close(f.ctx);
}

/* ---- steps with a NaN or Inf ---- */
/* x itself, through which a gradient goes back with `poison` added to its first element */
static luna_status poison_forward(const luna_tensor *const *in, int count, luna_tensor *out, void *state) {
  (void)count, (void)state;
  memcpy(out->data, in[0]->data, (size_t)luna_count(out) * sizeof(float));
  return LUNA_OK;
}
static luna_status poison_backward(luna_tensor *const *in, int count, const luna_tensor *out, void *state) {
  (void)count;
  for (int64_t i = 0; in[0]->grad && i < luna_count(out); i++)
    in[0]->grad[i] += out->grad[i] + (i == 0 ? *(const float *)state : 0);
  return LUNA_OK;
}
static luna_tensor *poisoned(luna_tensor *x, float poison) {
  const luna_custom custom = {poison_forward, poison_backward, &poison, sizeof poison, 0, false, 0, 0};
  return luna_custom_op(&x, 1, x->rank, x->shape, &custom);
}
/* sum c w^2 of every part, but a gradient with `poison` in it at one part, and a number of no gradient added to the
   loss */
static luna_tensor *poison_loss(fit *f, int part, float poison, float add) {
  const int64_t one = 1;
  luna_tensor *loss = luna_tensor_new(f->ctx, &add, 1, &one);
  for (int k = 0; k < PARTS; k++) {
    luna_tensor *p = luna_params_at(f->params, k, NULL);
    if (k == part) p = poisoned(p, poison);
    loss = luna_add(loss, common_loss(luna_mul(p, p), 50 + (uint64_t)k));
  }
  return loss;
}

typedef struct reports {
  int calls;
  luna_status status;
  char sentence[200];
} reports;
static void tell(void *user, luna_status status, const char *sentence) {
  reports *t = (reports *)user;
  t->calls++, t->status = status;
  snprintf(t->sentence, sizeof t->sentence, "%s", sentence);
}
static void fit_open_logged(fit *f, reports *t) {
  luna_options options = {0};
  options.threads = 1, options.seed = 1, options.log = tell, options.log_user = t;
  memset(t, 0, sizeof *t);
  fit_open_in(f, luna_open(&options));
}
static luna_optimizer *optimizer_of(luna_params *params, int kind) {
  luna_optimizer_config sgd = {0};
  sgd.lr = 0.05f, sgd.momentum = 0.9f;
  return kind == LUNA_OPTIMIZER_SGD ? luna_sgd(params, &sgd) : kind == LUNA_OPTIMIZER_ADAM ? luna_adam(params, NULL) :
      kind == LUNA_OPTIMIZER_ADAMW ? luna_adamw(params, NULL) : luna_apollo(params, NULL);
}
/* parameters and moments, as a checkpoint has them */
typedef struct saved { uint8_t at[1 << 14]; size_t size; } saved;
static bool saved_write(void *user, const void *bytes, size_t size) {
  saved *s = (saved *)user;
  if (s->size + size > sizeof s->at) return false;
  memcpy(s->at + s->size, bytes, size);
  s->size += size;
  return true;
}
static int fit_read(const fit *f, float *out) {
  saved s;
  luna_io io = {0};
  st_file file;
  st_item t;
  int n = 0;
  io.write = saved_write, io.user = &s, s.size = 0;
  if (!CHECK(luna_save_training(f->optimizer, luna_callbacks(&io)) == LUNA_OK && !st_open(&file, s.at, s.size),
             "moments: %s",
             luna_error(f->ctx)))
    return 0;
  for (size_t cursor = 0; st_next(&file, &cursor, &t);)
    if (!t.is_pair && st_floats(&t, out + n)) n += (int)t.count;
  return n;
}
static void check_nonfinite(int kind) {
  static const struct {
    int part;
    float poison, add;
    const char *what;
  } bad[] = {{-1, 0, NAN, "a NaN in the loss alone"},           {-1, 0, INFINITY, "an Inf in the loss alone"},
             {-1, 0, -INFINITY, "a -Inf in the loss alone"},    {0, NAN, 0, "a NaN in a gradient alone"},
             {1, INFINITY, 0, "an Inf in a gradient alone"},    {2, -INFINITY, 0, "a -Inf in a gradient alone"},
             {1, NAN, NAN, "a NaN in a gradient and the loss"}};
  enum { BAD = sizeof bad / sizeof bad[0], ROOM = 4 * 64 };
  float before[ROOM], after[ROOM], value;
  fit f, calm;
  reports t;
  fit_open_logged(&f, &t), fit_open(&calm);
  f.optimizer = optimizer_of(f.params, kind), calm.optimizer = optimizer_of(calm.params, kind);
  for (int i = 0; i < BAD; i++) {
    fit_step(&f), fit_step(&calm);
    const int n = fit_read(&f, before);
    const int64_t steps = luna_optimizer_steps(f.optimizer);
    luna_begin_step(f.ctx);
    luna_tensor *loss = poison_loss(&f, bad[i].part, bad[i].poison, bad[i].add),
        *kept = luna_params_at(f.params, 0, NULL);
    CHECK(luna_backward(loss) == LUNA_OK && isfinite(loss->data[0]) == (bad[i].add == 0), "kind %d, %s: %s", kind,
          bad[i].what, luna_error(f.ctx));
    CHECK(luna_optimizer_step(f.optimizer) == LUNA_OK && luna_error_status(f.ctx) == LUNA_OK,
          "kind %d, %s is an error: %s", kind, bad[i].what, luna_error(f.ctx));
    CHECK(fit_read(&f, after) == n && memcmp(before, after, (size_t)n * sizeof(float)) == 0,
          "kind %d, %s reaches parameters or moments", kind, bad[i].what);
    CHECK(luna_optimizer_skipped(f.optimizer) == i + 1 && luna_optimizer_steps(f.optimizer) == steps,
          "kind %d, %s: %lld skipped, %lld made", kind, bad[i].what,
          (long long)luna_optimizer_skipped(f.optimizer), (long long)luna_optimizer_steps(f.optimizer));
    for (int k = 0; k < PARTS; k++) {
      const luna_tensor *p = luna_params_at(f.params, k, NULL);
      for (int64_t j = 0; j < part_size[k]; j++)
        CHECK(p->grad[j] == 0, "kind %d, %s: a gradient is left", kind, bad[i].what);
    }
    CHECK(t.calls == i, "kind %d, %s: reported before anything was read", kind, bad[i].what);
    if (i % 2) luna_read(kept, after);
    else value = luna_item(loss), (void)value;
    CHECK(t.calls == i + 1 && t.status == LUNA_OK && strstr(t.sentence, "skipped"),
          "kind %d, %s: reported %d times, \"%s\"", kind, bad[i].what, t.calls, t.sentence);
    luna_item(loss);
    CHECK(t.calls == i + 1, "kind %d, %s: reported again", kind, bad[i].what);
  }
  /* a step that was skipped leaves no trace (but in Apollo, whose warm-up counts it) */
  fit_step(&f), fit_step(&calm);
  const int n = fit_read(&f, before);
  CHECK(fit_read(&calm, after) == n && (kind == LUNA_OPTIMIZER_HOOK ||
      memcmp(before, after, (size_t)n * sizeof(float)) == 0), "kind %d: skipped steps leave a trace", kind);
  luna_close(f.ctx), luna_close(calm.ctx);
}
static void check_nonfinite_rest(void) {
  fit f;
  reports t;
  /* of two micro-batches only the first has a NaN, in the loss alone */
  fit_open_logged(&f, &t);
  f.optimizer = luna_adamw(f.params, NULL);
  const double before = read_weight(&f, 0, 0);
  luna_begin_step(f.ctx);
  luna_backward(poison_loss(&f, -1, 0, NAN));
  CHECK(fit_step(&f) == LUNA_OK && read_weight(&f, 0, 0) == before && luna_optimizer_skipped(f.optimizer) == 1,
        "a NaN in the loss of an earlier micro-batch is forgotten");
  CHECK(fit_step(&f) == LUNA_OK && read_weight(&f, 0, 0) != before && luna_optimizer_skipped(f.optimizer) == 1,
        "a NaN counts for the step after its own");
  luna_close(f.ctx);
  /* who drops the gradients drops the NaN too */
  fit_open_logged(&f, &t);
  f.optimizer = luna_adamw(f.params, NULL);
  luna_begin_step(f.ctx);
  luna_backward(poison_loss(&f, -1, 0, NAN));
  luna_params_zero_grad(f.params);
  CHECK(fit_step(&f) == LUNA_OK && luna_optimizer_skipped(f.optimizer) == 0 && read_weight(&f, 0, 0) != before,
        "luna_params_zero_grad leaves a NaN of the loss for the next step");
  luna_close(f.ctx);
  /* the gradient of what is frozen counts for nothing */
  fit_open_logged(&f, &t);
  f.optimizer = luna_adamw(f.params, NULL);
  luna_params_freeze(f.params, "b", true);
  const double still = read_weight(&f, 1, 0);
  luna_begin_step(f.ctx);
  luna_backward(poison_loss(&f, 1, NAN, 0));
  CHECK(luna_optimizer_step(f.optimizer) == LUNA_OK && luna_optimizer_skipped(f.optimizer) == 0,
        "a NaN in a frozen parameter's gradient skips the step");
  CHECK(read_weight(&f, 0, 0) != before && read_weight(&f, 1, 0) == still &&
        isfinite(luna_optimizer_grad_norm(f.optimizer)),
        "frozen: %g, norm %g", read_weight(&f, 1, 0),
        (double)luna_optimizer_grad_norm(f.optimizer));
  luna_close(f.ctx);
}

/* ---- finite gradients of any size are clipped, and their norm is right ---- */
static void check_large_gradients(luna_isa isa) {
  enum { SIZE = 1003 };
  const int64_t n = SIZE;
  static float gradient[SIZE];
  float *const gradients[1] = {gradient};
  luna_optimizer_config config = {0};
  luna_ctx *ctx = open_seeded(1, isa);
  luna_params *params = luna_params_open(ctx);
  luna_tensor *w = luna_param(params, "w", 1, &n, init_of(LUNA_INIT_ZEROS, 0));
  config.lr = 0.5f, config.clip = 2;
  luna_optimizer *sgd = luna_sgd(params, &config);
  for (float size = 1e-3f; w && size < 3e38f; size *= 1e3f) {
    double norm = 0, off = 0;
    memset(w->data, 0, sizeof gradient);     /* so that the loss is 0 */
    for (int i = 0; i < SIZE; i++) {
      gradient[i] = i % 3 ? (float)common_number(7, (uint64_t)i) * size : (float)common_number(8, (uint64_t)i);
      norm += (double)gradient[i] * (double)gradient[i];
    }
    norm = sqrt(norm);
    luna_begin_step(ctx);
    CHECK(backward_of(params, gradients) == LUNA_OK && luna_optimizer_step(sgd) == LUNA_OK, "%s", luna_error(ctx));
    CHECK(luna_optimizer_skipped(sgd) == 0, "%s: finite gradients of %g are skipped", luna_isa_name(isa), (double)size);
    CHECK(fabs((double)luna_optimizer_grad_norm(sgd) - norm) <= 1e-6 * norm ||
          (norm > (double)FLT_MAX && isinf(luna_optimizer_grad_norm(sgd))), "%s: the norm is %g, not %g",
              luna_isa_name(isa),
          (double)luna_optimizer_grad_norm(sgd), norm);
    for (int i = 0; i < SIZE; i++) {
      const double want = -0.5 * (double)gradient[i] * (norm > 2 ? 2 / norm : 1);
      off = fmax(off, fabs((double)w->data[i] - want));
    }
    CHECK(off <= 1e-6, "%s: gradients of %g are clipped to others, off by %g", luna_isa_name(isa), (double)size, off);
  }
  luna_close(ctx);
}

/* ---- whatever the rates and the gradients, a step leaves finite numbers, or what there was ---- */
static float any_of(const float *values, int count, int run, int at) {
  return values[common_hash((uint64_t)run, (uint64_t)at) % (uint64_t)count];
}
static void check_extremes(luna_isa isa) {
  static const float lr[6] = {1e-6f, 1, 1e6f, 1e9f, 1e12f, 1e38f}, clip[4] = {0, 0, 1, 1e30f};
  static const float decay[6] = {0, 0, 0.1f, 1e3f, 1e6f, 1e38f}, momentum[3] = {0, 0.9f, 0.99999994f};
  static const float size[10] = {0, 1e-30f, 1e-10f, 1, 1e8f, 1e10f, 1e17f, 1e19f, 1e25f, 3e38f};
  enum { RUNS = 400, STEPS = 6, ROOM = 4 * 64 };
  float gradient[PARTS][16], *gradients[PARTS] = {gradient[0], gradient[1], gradient[2]}, before[ROOM], after[ROOM];
  int made = 0, skipped = 0, refused = 0;
  luna_ctx *const ctx = open_seeded(1, isa);
  for (int run = 0; run < RUNS; run++) {
    const int kind = run % 4;
    luna_optimizer_config c = {0};
    fit f = {0};
    f.ctx = ctx, f.params = luna_params_open(ctx);
    for (int k = 0; k < PARTS; k++) {
      static const char *const names[PARTS] = {"a", "b", "c"};
      luna_param(f.params, names[k], 1, &part_size[k], init_of(LUNA_INIT_ZEROS, 0));
    }
    c.lr = any_of(lr, 6, run, 0), c.weight_decay = any_of(decay, 6, run, 1), c.clip = any_of(clip, 4, run, 2),
      c.max_skips = -1;
    if (kind == LUNA_OPTIMIZER_SGD) c.momentum = any_of(momentum, 3, run, 3);
    c.nesterov = c.momentum > 0 && run % 8 == 0;
    f.optimizer = kind == LUNA_OPTIMIZER_SGD ? luna_sgd(f.params, &c) : kind == LUNA_OPTIMIZER_ADAM ?
      luna_adam(f.params, &c) : kind == LUNA_OPTIMIZER_ADAMW ? luna_adamw(f.params, &c) : luna_apollo(f.params, &c);
    for (int step = 0; step < STEPS && f.optimizer; step++) {
      const float scale = any_of(size, 10, run, 10 + step);
      luna_tensor *loss = NULL;
      luna_begin_step(ctx);
      for (int k = 0; k < PARTS; k++) {
        luna_tensor *p = luna_params_at(f.params, k, NULL);
        for (int64_t i = 0; i < part_size[k]; i++)
          gradients[k][i] = scale * (float)common_number((uint64_t)run, (uint64_t)(step * 100 + k * 20 + i));
        luna_tensor *zero = luna_sub(p, luna_tensor_new(ctx, p->data, 1, &part_size[k]));
        zero = luna_sum_all(luna_mul(zero, luna_tensor_new(ctx, gradients[k], 1, &part_size[k])));
        loss = loss ? luna_add(loss, zero) : zero;
      }
      CHECK(luna_backward(loss) == LUNA_OK, "run %d: %s", run, luna_error(ctx));
      const int n = fit_read(&f, before);
      const int64_t was = luna_optimizer_skipped(f.optimizer);
      const luna_status status = luna_optimizer_step(f.optimizer);
      bool finite = true;
      fit_read(&f, after);
      for (int i = 0; i < n; i++) finite = finite && isfinite(after[i]);
      CHECK(status == LUNA_OK || (status == LUNA_BAD_ARGUMENT && luna_error_id_of(ctx) == LUNA_ERROR_RATES),
            "run %d, step %d: %s", run, step, luna_error(ctx));
      const bool same = status != LUNA_OK || luna_optimizer_skipped(f.optimizer) > was;
      made += !same, skipped += same && status == LUNA_OK, refused += status != LUNA_OK;
      CHECK(same ? memcmp(before, after, (size_t)n * sizeof(float)) == 0 : finite,
            "%s, kind %d, lr %g, decay %g, clip %g, step %d of gradients of %g: %s", luna_isa_name(isa), kind,
            (double)c.lr, (double)c.weight_decay, (double)c.clip, step, (double)scale,
            same ? "numbers that should stay do not" : "a number is not finite");
    }
  }
  CHECK(made > RUNS / 2 && skipped > RUNS / 20 && refused > RUNS / 2, "%d steps made, %d skipped, %d refused", made,
        skipped, refused);
  luna_close(ctx);
}
static void check_rates_refused(void) {
  luna_optimizer_config config = {0};
  fit f;
  fit_open(&f);
  config.momentum = 1;
  CHECK(!luna_sgd(f.params, &config) && luna_error_id_of(f.ctx) == LUNA_ERROR_PROBABILITY, "a momentum of 1: %s",
        luna_error(f.ctx));
  CHECK(luna_begin_step(f.ctx) == LUNA_BAD_ARGUMENT, "a begin does not report it");
  config.momentum = 0, config.lr = 1e38f;
  f.optimizer = luna_adam(f.params, &config);
  luna_begin_step(f.ctx);
  luna_backward(fit_loss(&f));
  CHECK(luna_optimizer_step(f.optimizer) == LUNA_BAD_ARGUMENT && strstr(luna_error(f.ctx), "'a'") &&
        luna_optimizer_lr(f.optimizer) == 1e38f, "a rate of 1e38: %s", luna_error(f.ctx));
  luna_optimizer_set_lr(f.optimizer, 0.1f);
  CHECK(fit_step(&f) == LUNA_OK && luna_optimizer_steps(f.optimizer) == 1, "a good rate after it: %s",
        luna_error(f.ctx));
  luna_close(f.ctx);
}

/* ---- the gradients of k micro-batches, each a k-th of the loss, are those of one batch ---- */
static void check_accumulation(void) {
  enum { BATCH = 4, N = 9 };
  luna_ctx *ctx[2];
  luna_params *params[2];
  luna_lm model[2];
  luna_optimizer *optimizer[2];
  luna_lm_config config;
  int32_t *tokens = common_tokens(BATCH * N, 1, 11), *labels = common_tokens(BATCH * N, 2, 11);
  memset(&config, 0, sizeof config);
  config.vocab = 11, config.layer.memory = 3, config.layer.dim = 8, config.layer.heads = 2, config.layer.ffn = 12;
  for (int c = 0; c < 2; c++) {
    ctx[c] = open_seeded(3, LUNA_ISA_BEST), params[c] = luna_params_open(ctx[c]);
    CHECK(luna_lm_init(&model[c], params[c], &config) == LUNA_OK, "%s", luna_error(ctx[c]));
    luna_optimizer_config sgd = {0};
    sgd.lr = 0.5f, sgd.momentum = 0.9f, sgd.clip = 1;
    optimizer[c] = luna_sgd(params[c], &sgd);
  }
  for (int step = 0; step < 3; step++) {
    for (int c = 0; c < 2; c++)
      for (int b = 0; b < (c ? BATCH : 1); b++) {
        luna_begin_step(ctx[c]);
        luna_tensor *loss = luna_cross_entropy(luna_lm_forward(&model[c],
            &(luna_input){ tokens + b * N, NULL, c ? 1 : BATCH, N, NULL }), labels + b * N, NULL);
        CHECK(luna_backward(c ? luna_scale(loss, 1.0f / BATCH) : loss) == LUNA_OK, "%s", luna_error(ctx[c]));
      }
    for (int c = 0; c < 2; c++) CHECK(luna_optimizer_step(optimizer[c]) == LUNA_OK, "%s", luna_error(ctx[c]));
    for (int64_t i = 0; i < luna_params_tensor_count(params[0]); i++) {
      const char *name;
      const luna_tensor *one = luna_params_at(params[0], i, &name), *many = luna_params_at(params[1], i, NULL);
      /* a bias that starts from 0 stays near it */
      const double error = common_error(many->data, one->data, luna_count(one), 0.1);
      CHECK(error <= 1e-6, "step %d: %s is off by %.3g after micro-batches", step, name, error);
    }
  }
  free(tokens), free(labels);
  luna_close(ctx[0]), luna_close(ctx[1]);
}

/* ---- moving averages of the parameters: by their formula, the same for any number of threads ---- */
static void check_average(int kind) {
  enum { UPDATES = 6 };
  const double a = (double)0.9f;
  luna_optimizer_config c = {0};
  double average[PARTS][16] = {{0}};
  float before[PARTS][16];
  char file[8192];
  size_t size = 0;
  fit f;
  c.lr = 0.05f, c.average = 0.9f;
  fit_open(&f);
  f.optimizer = kind == LUNA_OPTIMIZER_SGD ? luna_sgd(f.params, &c) : kind == LUNA_OPTIMIZER_ADAMW ?
      luna_adamw(f.params, &c) : luna_apollo(f.params, &c);
  luna_params_freeze(f.params, "c", true);
  for (int step = 1; step <= UPDATES; step++) {
    CHECK(fit_step(&f) == LUNA_OK, "averages: %s", luna_error(f.ctx));
    for (int k = 0; k < PARTS; k++)
      for (int64_t i = 0; i < part_size[k]; i++) {
        before[k][i] = luna_params_at(f.params, k, NULL)->data[i];
        average[k][i] += ((double)before[k][i] - average[k][i]) * (1 - a) / (1 - pow(a, step));
      }
  }
  CHECK(luna_optimizer_swap_average(f.optimizer) == LUNA_OK, "%s", luna_error(f.ctx));
  for (int k = 0; k < PARTS; k++)
    for (int64_t i = 0; i < part_size[k]; i++) {
      const float is = luna_params_at(f.params, k, NULL)->data[i];
      CHECK(fabs((double)is - (k == 2 ? (double)before[k][i] : average[k][i])) <= 1e-6,
            "kind %d: average %d of parameter %d is %g, not %g", kind, (int)i, k, (double)is, average[k][i]);
    }
  CHECK(fit_step(&f) == LUNA_BAD_ARGUMENT && luna_error_id_of(f.ctx) == LUNA_ERROR_AVERAGE_SWAPPED,
        "a step of averages: \"%s\"", luna_error(f.ctx));
  luna_begin_step(f.ctx);
  CHECK(luna_save_training(f.optimizer, luna_buffer(file, sizeof file, &size)) == LUNA_BAD_ARGUMENT &&
        luna_error_id_of(f.ctx) == LUNA_ERROR_AVERAGE_SWAPPED, "averages saved as parameters: \"%s\"",
        luna_error(f.ctx));
  CHECK(luna_optimizer_swap_average(f.optimizer) == LUNA_OK, "%s", luna_error(f.ctx));
  for (int k = 0; k < PARTS; k++)
    CHECK(memcmp(before[k], luna_params_at(f.params, k, NULL)->data, (size_t)part_size[k] * sizeof(float)) == 0,
          "parameter %d comes back with other bits", k);
  luna_close(f.ctx);
}
static void check_average_rest(void) {
  const int64_t size = 100000;
  luna_optimizer_config c = {0};
  float *values[2];
  fit f;
  fit_open(&f);
  f.optimizer = luna_adamw(f.params, NULL);
  CHECK(luna_optimizer_swap_average(f.optimizer) == LUNA_BAD_ARGUMENT &&
        luna_error_id_of(f.ctx) == LUNA_ERROR_AVERAGE_NONE && luna_optimizer_swap_average(NULL) == LUNA_BAD_ARGUMENT,
        "an optimiser without averages: \"%s\"", luna_error(f.ctx));
  luna_close(f.ctx);
  c.average = 0.99f;
  for (int i = 0; i < 2; i++) {      /* one thread, three; a parameter that joins later begins at its value */
    luna_options options = {0};
    options.threads = i ? 3 : 1, options.seed = 4;
    luna_ctx *ctx = luna_open(&options);
    luna_params *params = luna_params_open(ctx);
    luna_tensor *w = luna_param(params, "w", 1, &size, init_of(LUNA_INIT_NORMAL, 1)), *late = NULL;
    luna_optimizer *o = luna_adamw(params, &c);
    for (int step = 0; step < 12; step++) {
      if (step == 10) late = luna_param(params, "late", 1, &size, init_of(LUNA_INIT_ONES, 0));
      luna_begin_step(ctx);
      luna_tensor *loss = luna_sum(luna_mul(w, w), 0);
      if (late) loss = luna_add(loss, luna_sum(luna_mul(late, late), 0));
      if (step == 10) loss = luna_scale(loss, INFINITY); /* the step is skipped */
      CHECK(luna_backward(loss) == LUNA_OK && luna_optimizer_step(o) == LUNA_OK, "averages: %s", luna_error(ctx));
    }
    CHECK(luna_optimizer_swap_average(o) == LUNA_OK && late && late->data[7] > 0.99f && late->data[7] <= 1,
          "an average that begins later is %g", late ? (double)late->data[7] : 0);
    values[i] = common_floats(size);
    CHECK(luna_read(w, values[i]) == LUNA_OK, "%s", luna_error(ctx));
    luna_close(ctx);
  }
  CHECK(memcmp(values[0], values[1], (size_t)size * sizeof(float)) == 0, "three threads average to other bits");
  free(values[0]), free(values[1]);
}

#ifndef LUNA_NO_INT8
static void check_average_int8(void) { /* a copy of the weights in 8 bits is made again */
  const int64_t shape[2] = {16, 32};
  luna_optimizer_config c = {0};
  luna_options options = {0};
  float ones[32], y[16], w[16 * 32];
  options.threads = 1, options.weights = LUNA_DTYPE_I8;
  c.lr = 0.4f, c.average = 0.9f;
  luna_ctx *ctx = luna_open(&options);
  luna_params *params = luna_params_open(ctx);
  luna_tensor *weight = luna_param(params, "w.weight", 2, shape, init_of(LUNA_INIT_NORMAL, 1));
  luna_optimizer *o = luna_sgd(params, &c);
  for (int i = 0; i < 32; i++) ones[i] = 1;
  for (int step = 0; step < 3; step++) {
    luna_begin_step(ctx);
    luna_backward(luna_sum(luna_sum(luna_mul(weight, weight), 1), 0));
    CHECK(luna_optimizer_step(o) == LUNA_OK, "%s", luna_error(ctx));
  }
  for (int swap = 0; swap < 2; swap++) {
    double off = 0, size = 0;
    if (swap) luna_optimizer_swap_average(o);
    luna_begin_inference(ctx);
    luna_tensor *product = luna_linear(luna_tensor_new(ctx, ones, 2, (int64_t[]){1, 32}), weight, NULL);
    CHECK(luna_read(product, y) == LUNA_OK && luna_read(weight, w) == LUNA_OK, "%s", luna_error(ctx));
    for (int r = 0; r < 16; r++) {
      double sum = 0;
      for (int i = 0; i < 32; i++) sum += (double)w[32 * r + i];
      off += ((double)y[r] - sum) * ((double)y[r] - sum), size += sum * sum;
    }
    CHECK(off < 0.003 * size, "weights in 8 bits are off by %.3g, swapped %d times", sqrt(off / size), swap);
  }
  luna_close(ctx);
}
#else
static void check_average_int8(void) {}
#endif

/* ---- gradients clipped by themselves ---- */
static void check_clip(void) {
  static const float max[4] = {0, 1e9f, 0.5f, 0.5f};
  fit f;
  fit_open(&f);
  for (int i = 0; i < 4; i++) {
    luna_begin_step(f.ctx);
    luna_params_zero_grad(f.params);
    luna_tensor *loss = fit_loss(&f);
    CHECK(luna_backward(i == 3 ? luna_scale(loss, 1e30f) : loss) == LUNA_OK, "%s", luna_error(f.ctx));
    double sum = 0, after = 0, was[PARTS][16];
    for (int k = 0; k < PARTS; k++)
      for (int64_t j = 0; j < part_size[k]; j++) {
        was[k][j] = (double)luna_params_at(f.params, k, NULL)->grad[j];
        sum += was[k][j] * was[k][j];
      }
    const double norm = sqrt(sum), factor = max[i] > 0 && norm > (double)max[i] ? (double)max[i] / norm : 1;
    const float is = luna_params_clip_grad(f.params, max[i]);
    CHECK(fabs((double)is - norm) <= 1e-6 * norm, "clipping to %g: norm %g, not %g", (double)max[i], (double)is, norm);
    for (int k = 0; k < PARTS; k++)
      for (int64_t j = 0; j < part_size[k]; j++) {
        const double g = (double)luna_params_at(f.params, k, NULL)->grad[j];
        after += fabs(g - factor * was[k][j]);
      }
    CHECK(after <= 1e-6 * factor * norm, "clipping to %g: gradients are off by %g", (double)max[i], after);
  }
  luna_tensor *p = luna_params_at(f.params, 0, NULL);
  p->grad[3] = INFINITY;
  const float other = p->grad[2];
  CHECK(isinf(luna_params_clip_grad(f.params, 1)) && p->grad[2] == other, "a gradient that is Inf changes others");
  p->grad[3] = NAN;
  CHECK(isnan(luna_params_clip_grad(f.params, 1)) && p->grad[2] == other, "a gradient that is NaN changes others");
  CHECK(isnan(luna_params_clip_grad(f.params, -1)) && strstr(luna_error(f.ctx), "max_norm is -1") &&
        isnan(luna_params_clip_grad(NULL, 1)), "clipping to -1: \"%s\"", luna_error(f.ctx));
  luna_close(f.ctx);
}

int main(void) {
  check_philox();
  for (int i = 0; i < COMMON_ISAS; i++)
    if (luna_isa_available(common_isas[i])) check_dropout_rule(common_isas[i]);
  check_dropout_statistics();
  check_params();
  check_params_values();
  check_params_distribution();
  check_optimizers();
  check_one_config();
  check_protocol();
  check_halves();
  check_set_lr();
  check_lr();
  for (int kind = 0; kind < 6; kind++) check_frozen(kind % 3, kind < 3 ? LUNA_FORM_FOLDED : LUNA_FORM_UNFOLDED);
  check_schedules();
  check_stored();
  check_apollo_large();
  check_groups();
  check_groups_refused();
  for (int kind = LUNA_OPTIMIZER_SGD; kind <= LUNA_OPTIMIZER_HOOK; kind++) check_nonfinite(kind);
  check_nonfinite_rest();
  for (int i = 0; i < COMMON_ISAS; i++)
    if (luna_isa_available(common_isas[i])) check_large_gradients(common_isas[i]);
  check_extremes(LUNA_ISA_BEST);
  check_extremes(LUNA_ISA_REFERENCE);
  check_rates_refused();
  check_accumulation();
  check_average(LUNA_OPTIMIZER_SGD), check_average(LUNA_OPTIMIZER_ADAMW), check_average(LUNA_OPTIMIZER_HOOK);
  check_average_rest();
  check_average_int8();
  check_clip();
  return test_report("trainer");
}
