/* Random numbers and dropout, parameter sets, optimisers and schedules against their formulas in double. */
#include "test.h"
#define LUNA_IMPLEMENTATION
#include "luna.h"
#include "common.h"

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
      {{0xffffffffu, 0xffffffffu, 0xffffffffu, 0xffffffffu}, 0xffffffffffffffffu, {0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu}},
      {{0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u}, 0x299f31d0a4093822u, {0xd16cfe09u, 0x94fdccebu, 0x5001e420u, 0x24126ea1u}}};
  for (int i = 0; i < 3; i++) {
    uint32_t out[4];
    luna_philox(known[i].counter, known[i].key, out);
    CHECK(memcmp(out, known[i].out, sizeof out) == 0, "Philox answer %d is %08x %08x %08x %08x", i, out[0], out[1], out[2], out[3]);
  }
}

/* the rule of luna_dropout: half-word e mod 8 of counter (e / 8, op number, step), key = seed, below round(65536 p) */
static bool naive_dropped(uint64_t seed, uint32_t op, uint32_t step, uint64_t e, double p) {
  const uint32_t counter[4] = {(uint32_t)(e / 8), (uint32_t)(e / 8 >> 32), op, step};
  uint32_t word[4];
  luna_philox(counter, seed, word);
  const uint32_t half = e % 2 ? word[e % 8 / 2] >> 16 : word[e % 8 / 2] & 0xFFFFu;
  return half < (uint32_t)floor(65536 * p + 0.5);
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
        const float expected = naive_dropped(seed, op, step, (uint64_t)e, (float)probability[op]) ? 0 : x->data[e] * keep;
        if (!(fabs((double)y->data[e] - (double)expected) <= 1e-4 * fabs((double)expected))) wrong++;
      }
      CHECK(wrong == 0, "%s, step %u, dropout %u: %lld of %lld elements break the 16-bit rule", luna_isa_name(isa), step, op,
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
  luna_tensor *x = luna_require_grad(luna_tensor_new(ctx, ones, 1, &n)), *a = luna_dropout(x, 0.25f), *b = luna_dropout(x, 0.25f);
  int64_t dropped = 0, both = 0;
  for (int64_t i = 0; a && b && i < n; i++) dropped += a->data[i] == 0, both += a->data[i] == 0 && b->data[i] == 0;
  CHECK(fabs((double)dropped / (double)n - 0.25) < 0.005, "a quarter of %lld dropped means %lld", (long long)n, (long long)dropped);
  CHECK(fabs((double)both / (double)n - 0.0625) < 0.003, "two masks are not independent: %lld dropped by both", (long long)both);
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
  luna_tensor *w = luna_param(params, "w", 2, shape, init_of(LUNA_XAVIER, 1)),
              *b = luna_param(params, "b", 1, other, init_of(LUNA_ZEROS, 0));
  CHECK(w && b && luna_params_size(params) == 2 && luna_params_count(params) == 2007, "two parameters make %lld, %lld numbers",
        (long long)luna_params_size(params), (long long)luna_params_count(params));
  CHECK(luna_params_find(params, "w") == w && luna_params_find(params, "b") == b && !luna_params_find(params, "c") &&
            !luna_params_find(params, ""),
        "find does not find what there is");
  CHECK(luna_params_at(params, 1, &name) == b && name && strcmp(name, "b") == 0, "at(1) is %s", name ? name : "null");
  CHECK(!luna_params_at(params, 2, &name) && !luna_params_at(params, -1, NULL), "at() gives what is not there");
  luna_begin_step(ctx);
  CHECK(!luna_param(params, "w", 1, other, init_of(LUNA_ONES, 0)) && luna_state(ctx) == LUNA_BAD_ARGUMENT && strstr(luna_error(ctx), "w"),
        "a name twice: %s", luna_error(ctx));
  CHECK(luna_params_size(params) == 2, "a refused parameter is in the set");
  luna_begin_step(ctx);
  CHECK(!luna_param(params, NULL, 1, other, init_of(LUNA_ONES, 0)), "a parameter without a name");
  luna_begin_step(ctx);
  CHECK(luna_params_set(params, "author", "nobody") == LUNA_OK && luna_params_set(params, "author", "somebody \"else\"") == LUNA_OK,
        "set: %s", luna_error(ctx));
  CHECK(luna_params_get(params, "author") && strcmp(luna_params_get(params, "author"), "somebody \"else\"") == 0,
        "get does not give what was set");
  CHECK(!luna_params_get(params, "nothing"), "get gives what was not set");
  luna_close(ctx);
}

/* values depend on seed and name alone */
static void check_params_values(void) {
  static const char *const names[3] = {"a", "b", "c"};
  const int64_t shape[2] = {30, 20};
  luna_tensor *p[3][3];
  luna_ctx *ctx[3];
  for (int c = 0; c < 3; c++) {
    ctx[c] = open_seeded(c == 2 ? 9 : 8, c == 1 ? LUNA_ISA_SCALAR : LUNA_ISA_BEST);
    luna_params *params = luna_params_open(ctx[c]);
    for (int i = 0; i < 3; i++) {
      const int at = c == 1 ? 2 - i : i; /* in another order */
      p[c][at] = luna_param(params, names[at], 2, shape, init_of(at ? LUNA_NORMAL : LUNA_XAVIER, 0));
    }
  }
  for (int i = 0; i < 3; i++) {
    if (!CHECK(p[0][i] && p[1][i] && p[2][i], "a parameter failed: %s", luna_error(ctx[0]))) continue;
    CHECK(memcmp(p[0][i]->data, p[1][i]->data, 600 * sizeof(float)) == 0, "parameter %s depends on more than seed and name", names[i]);
    CHECK(memcmp(p[0][i]->data, p[2][i]->data, 600 * sizeof(float)) != 0, "parameter %s does not depend on the seed", names[i]);
  }
  CHECK(p[0][1] && p[0][2] && memcmp(p[0][1]->data, p[0][2]->data, 600 * sizeof(float)) != 0, "two names have the same values");
  for (int c = 0; c < 3; c++) luna_close(ctx[c]);
}

static void check_params_distribution(void) {
  luna_ctx *ctx = open_seeded(11, LUNA_ISA_BEST);
  luna_params *params = luna_params_open(ctx);
  const int64_t shape[2] = {100, 300};
  static const luna_init_kind kinds[5] = {LUNA_ZEROS, LUNA_ONES, LUNA_XAVIER, LUNA_NORMAL, LUNA_UNIFORM};
  static const char *const names[5] = {"zeros", "ones", "xavier", "normal", "uniform"};
  static const double deviation[5] = {0, 0, 0.5, 0.02, 0.25}, scale[5] = {0, 0, 0.5, 0.02, 0.25};
  for (int k = 0; k < 5; k++) {
    luna_tensor *p = luna_param(params, names[k], 2, shape, init_of(kinds[k], (float)scale[k]));
    double mean = 0, square = 0, most = 0, bound;
    if (!CHECK(p != NULL, "%s: %s", names[k], luna_error(ctx))) continue;
    for (int64_t i = 0; i < 30000; i++) {
      const double x = (double)p->data[i];
      mean += x / 30000, square += x * x / 30000;
      if (fabs(x) > most) most = fabs(x);
    }
    bound = k == 2 ? 0.5 * sqrt(6.0 / 400) : k == 4 ? 0.25 : 0; /* Xavier uniform: gain sqrt(6 / (in + out)) */
    const double expected = k == 3 ? deviation[k] : k == 1 ? 1 : bound / sqrt(3.0);
    CHECK(fabs(sqrt(square) - expected) <= 0.02 * expected, "%s: root mean square %g, expected %g", names[k], sqrt(square), expected);
    CHECK(fabs(mean - (k == 1)) <= 0.02 * expected, "%s: mean %g", names[k], mean);
    if (k == 2 || k == 4) CHECK(most <= bound * 1.000001 && most > 0.99 * bound, "%s: largest %g, bound %g", names[k], most, bound);
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

static void fit_open(fit *f) {
  static const char *const names[PARTS] = {"a", "b", "c"};
  memset(f, 0, sizeof *f);
  f->ctx = open_seeded(1, LUNA_ISA_BEST);
  f->params = luna_params_open(f->ctx);
  for (int k = 0; k < PARTS; k++) {
    luna_tensor *p = luna_param(f->params, names[k], 1, &part_size[k], init_of(LUNA_NORMAL, 1));
    for (int64_t i = 0; p && i < part_size[k]; i++) f->w[k][i] = (double)p->data[i];
  }
}
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
    CHECK(sqrt(off) <= 2e-6 * sqrt(size), "%s: after step %d parameter %d is off by %.3g", what, step, k, sqrt(off / size));
  }
}

static void check_sgd(const char *what, const luna_sgd_config *config) {
  fit f;
  const double lr = config && config->lr != 0 ? (double)config->lr : 0.01;
  luna_sgd_config c = {0};
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
    CHECK(fabs((double)luna_optimizer_norm(f.optimizer) - f.norm) <= 1e-5 * f.norm, "%s: norm %g, expected %g", what,
          (double)luna_optimizer_norm(f.optimizer), f.norm);
    for (int k = 0; k < PARTS; k++)
      for (int64_t i = 0; i < part_size[k]; i++) {
        const double g = factor * f.gradient[k][i] + (double)c.weight_decay * f.w[k][i];
        f.first[k][i] = (double)c.momentum * f.first[k][i] + g;
        f.w[k][i] -= rate * (c.momentum == 0 ? g : c.nesterov ? g + (double)c.momentum * f.first[k][i] : f.first[k][i]);
      }
    fit_compare(&f, what, step);
  }
  CHECK(luna_optimizer_steps(f.optimizer) == 5 && luna_optimizer_skipped(f.optimizer) == 0, "%s: the count of steps is %lld", what,
        (long long)luna_optimizer_steps(f.optimizer));
  luna_close(f.ctx);
}

static void check_adamw(const char *what, const luna_adamw_config *config) {
  fit f;
  luna_adamw_config c = {0};
  if (config) c = *config;
  const double lr = c.lr != 0 ? (double)c.lr : 1e-3, b1 = c.beta1 != 0 ? (double)c.beta1 : 0.9, b2 = c.beta2 != 0 ? (double)c.beta2 : 0.999;
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
        f.w[k][i] -= rate * f.first[k][i] / (1 - pow(b1, step)) / (sqrt(f.second[k][i] / (1 - pow(b2, step))) + epsilon);
      }
    fit_compare(&f, what, step);
  }
  luna_close(f.ctx);
}

static void check_optimizers(void) {
  luna_sgd_config sgd = {0};
  luna_adamw_config adam = {0};
  check_sgd("SGD", NULL);
  sgd.lr = 0.05f;
  sgd.weight_decay = 0.1f;
  check_sgd("SGD with decay", &sgd);
  sgd.momentum = 0.9f;
  check_sgd("SGD with momentum", &sgd);
  sgd.nesterov = true;
  check_sgd("SGD with Nesterov's momentum", &sgd);
  sgd.clip = 0.7f;
  sgd.schedule.decay = LUNA_COSINE;
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
  adam.schedule.decay = LUNA_INVERSE_SQRT;
  adam.schedule.warmup = 2;
  check_adamw("AdamW clipped and scheduled", &adam);
}

static double read_weight(const fit *f, int part, int64_t i) { return (double)luna_params_at(f->params, part, NULL)->data[i]; }

/* gradients: accumulate over begins, are zeroed by the step, a NaN skips, an error stops */
static void check_protocol(void) {
  fit f;
  float once[16], twice[16];
  const float nan = NAN;
  luna_sgd_config config = {0};
  fit_open(&f);
  luna_tensor *a = luna_params_at(f.params, 1, NULL);
  config.lr = 0.1f;
  f.optimizer = luna_sgd(f.params, &config);
  luna_begin_step(f.ctx);
  CHECK(luna_backward(fit_loss(&f)) == LUNA_OK && luna_read_grad(a, once) == LUNA_OK, "backward: %s", luna_error(f.ctx));
  luna_begin_step(f.ctx);
  CHECK(luna_backward(fit_loss(&f)) == LUNA_OK && luna_read_grad(a, twice) == LUNA_OK, "backward: %s", luna_error(f.ctx));
  for (int i = 0; i < 15; i++)
    CHECK(fabs((double)twice[i] - 2 * (double)once[i]) <= 1e-6 * fabs((double)once[i]), "gradient %d does not accumulate: %g, then %g", i,
          (double)once[i], (double)twice[i]);
  CHECK(luna_optimizer_step(f.optimizer) == LUNA_OK, "step: %s", luna_error(f.ctx));
  luna_begin_step(f.ctx);
  CHECK(luna_backward(fit_loss(&f)) == LUNA_OK && luna_read_grad(a, twice) == LUNA_OK, "backward: %s", luna_error(f.ctx));
  for (int i = 0; i < 15; i++) CHECK(fabs((double)twice[i]) < fabs((double)once[i]) * 1.5, "the step did not zero gradient %d", i);
  CHECK(luna_params_zero_grad(f.params) == LUNA_OK, "zero_grad: %s", luna_error(f.ctx));
  if (luna_read_grad(a, twice) == LUNA_OK)
    for (int i = 0; i < 15; i++) CHECK(twice[i] == 0, "zero_grad left %g", (double)twice[i]);

  const double before = read_weight(&f, 0, 0), step_before = (double)luna_optimizer_steps(f.optimizer);
  for (int bad = 0; bad < 2; bad++) {
    luna_begin_step(f.ctx);
    luna_backward(luna_scale(fit_loss(&f), bad ? INFINITY : nan));
    CHECK(luna_optimizer_step(f.optimizer) == LUNA_OK, "a NaN among the gradients is an error: %s", luna_error(f.ctx));
    CHECK(read_weight(&f, 0, 0) == before, "a %s among the gradients reached the parameters", bad ? "Inf" : "NaN");
    CHECK(luna_optimizer_skipped(f.optimizer) == bad + 1, "%lld skipped", (long long)luna_optimizer_skipped(f.optimizer));
  }
  CHECK((double)luna_optimizer_steps(f.optimizer) == step_before, "a skipped step counts as a step");
  luna_begin_step(f.ctx);
  luna_backward(fit_loss(&f));
  CHECK(luna_optimizer_step(f.optimizer) == LUNA_OK && read_weight(&f, 0, 0) != before && isfinite(read_weight(&f, 0, 0)),
        "after a NaN was skipped the next step does not work: its gradients were kept");

  const double again = read_weight(&f, 0, 0);
  luna_begin_step(f.ctx);
  luna_tensor *loss = fit_loss(&f);
  luna_backward(loss);
  luna_matmul(a, a, false, false);
  CHECK(luna_state(f.ctx) != LUNA_OK && luna_optimizer_step(f.optimizer) == luna_state(f.ctx),
        "the optimiser's step hides an earlier error");
  CHECK(read_weight(&f, 0, 0) == again, "the optimiser's step used gradients although a call failed");
  luna_close(f.ctx);
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

static void check_schedules(void) {
  luna_schedule s = {LUNA_CONSTANT, 0, 0, 0};
  const struct {
    luna_decay decay;
    int64_t warmup, total;
    double floor;
    int64_t step;
    double factor;
  } known[] = {{LUNA_CONSTANT, 0, 0, 0, 1, 1},           {LUNA_CONSTANT, 0, 0, 0, 1000000, 1},
               {LUNA_CONSTANT, 10, 0, 0, 1, 0.1},        {LUNA_CONSTANT, 10, 0, 0, 5, 0.5},
               {LUNA_CONSTANT, 10, 0, 0, 10, 1},         {LUNA_CONSTANT, 10, 0, 0, 11, 1},
               {LUNA_INVERSE_SQRT, 100, 0, 0, 50, 0.5},  {LUNA_INVERSE_SQRT, 100, 0, 0, 100, 1},
               {LUNA_INVERSE_SQRT, 100, 0, 0, 400, 0.5}, {LUNA_INVERSE_SQRT, 100, 0, 0, 10000, 0.1},
               {LUNA_LINEAR, 10, 110, 0.2, 10, 1},       {LUNA_LINEAR, 10, 110, 0.2, 60, 0.6},
               {LUNA_LINEAR, 10, 110, 0.2, 110, 0.2},    {LUNA_LINEAR, 10, 110, 0.2, 500, 0.2},
               {LUNA_COSINE, 10, 110, 0.2, 60, 0.6},     {LUNA_COSINE, 10, 110, 0, 35, 0.8535534},
               {LUNA_COSINE, 10, 110, 0.2, 110, 0.2},    {LUNA_COSINE, 10, 110, 0.2, 5000, 0.2},
               {LUNA_COSINE, 0, 100, 0, 100, 0}};
  for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
    s.decay = known[i].decay, s.warmup = known[i].warmup, s.total = known[i].total, s.floor = (float)known[i].floor;
    const double factor = (double)luna_schedule_at(&s, known[i].step);
    CHECK(fabs(factor - known[i].factor) < 1e-6, "schedule %d with warm-up %lld, total %lld at step %lld: %g, expected %g",
          (int)known[i].decay, (long long)s.warmup, (long long)s.total, (long long)known[i].step, factor, known[i].factor);
  }
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
  check_protocol();
  check_set_lr();
  check_schedules();
  return test_report("trainer");
}
