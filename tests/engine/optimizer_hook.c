/* Optimisers from outside luna.h: Lion as a hook of a few lines, against its equations; its moments in files; a hook
   that a file or a device does not fit. examples/luna_apollo.h, a longer one, is in tests/engine/trainer.c and
   resume.c. */
#include "test.h"
#include "luna.h"
#include "examples/luna_apollo.h"
#include "common.h"

enum { SIZE = 70003, STEPS = 5, ROOM = 1 << 21 };

/* ---- the guide's Lion (arXiv 2302.06675) ---- */
static void lion_update(const luna_optimizer_part *p, const double sums[4]) {
  const float beta1 = p->config->beta1, beta2 = p->config->beta2;
  float *m = p->moment[0];
  (void)sums;
  for (int64_t i = 0; i < p->count; i++) {
    const float g = p->grad[i] * p->factor, c = beta1 * m[i] + (1 - beta1) * g;
    const float sign = (float)((c > 0) - (c < 0));
    p->value[i] -= p->lr * (sign + p->decay * p->value[i]);
    m[i] = beta2 * m[i] + (1 - beta2) * g;
  }
}
static const luna_optimizer_hook lion = {.name = "Lion", .moments = 1, .update = lion_update};

/* ---- what a hook gets: the parts' sums, the schedule's step, the averages ---- */
static void watch_reduce(const luna_optimizer_part *p, double sums[4]) {
  for (int k = 0; k < 4; k++) sums[k] = 0;
  for (int64_t i = 0; i < p->count; i++) {
    sums[0] += 1;
    sums[1] += (double)(p->grad[i] * p->factor);
    sums[3] += (double)p->value[i];
  }
}
/* leaves what it gets in the moments and the value */
static void watch_update(const luna_optimizer_part *p, const double sums[4]) {
  for (int64_t i = 0; i < p->count; i++) {
    p->moment[0][i] = (float)sums[1];
    p->moment[1][i] = (float)sums[3];
    p->moment[2][i] = p->lr;
    p->value[i] = (float)p->step;
  }
}
static const luna_optimizer_hook watch = {"watch", 3, true, 0, watch_reduce, watch_update};

typedef struct fit {
  luna_ctx *ctx;
  luna_params *params;
  luna_tensor *w;
  luna_optimizer *optimizer;
} fit;
static void fit_open(fit *f, const luna_optimizer_hook *hook, const luna_optimizer_config *config, int threads) {
  const luna_options options = {.threads = threads, .seed = 7};
  const int64_t size = SIZE;
  f->ctx = luna_open(&options);
  f->params = luna_params_open(f->ctx);
  f->w = luna_param(f->params, "w", 1, &size, (luna_init){LUNA_INIT_NORMAL, 1});
  f->optimizer = hook ? luna_optimizer_open(f->params, hook, config) : luna_apollo(f->params, config);
  CHECK(f->optimizer, "%s: %s", hook ? hook->name : "Apollo", luna_error(f->ctx));
}
/* the gradient is x, of random numbers in step `step` */
static void fit_step(fit *f, int step, float *x) {
  const int64_t size = SIZE;
  for (int i = 0; i < SIZE; i++) x[i] = (float)common_number(1 + (uint64_t)step, (uint64_t)i);
  luna_begin_step(f->ctx);
  luna_tensor *loss = luna_sum(luna_mul(f->w, luna_tensor_new(f->ctx, x, 1, &size)), 0);
  CHECK(luna_backward(loss) == LUNA_OK && luna_optimizer_step(f->optimizer) == LUNA_OK, "%s", luna_error(f->ctx));
}

static void check_lion(int threads) {
  static const luna_optimizer_config config = {.lr = 0.01f, .beta1 = 0.9f, .beta2 = 0.99f, .weight_decay = 0.1f};
  static double w[SIZE], m[SIZE];
  static float x[SIZE];
  double off = 0;
  fit f;
  fit_open(&f, &lion, &config, threads);
  for (int i = 0; i < SIZE; i++) w[i] = (double)f.w->data[i], m[i] = 0;
  for (int step = 0; step < STEPS; step++) {
    fit_step(&f, step, x);
    for (int i = 0; i < SIZE; i++) {
      const double g = (double)x[i], c = (double)config.beta1 * m[i] + (1 - (double)config.beta1) * g;
      w[i] -= (double)config.lr * ((c > 0) - (c < 0) + (double)config.weight_decay * w[i]);
      m[i] = (double)config.beta2 * m[i] + (1 - (double)config.beta2) * g;
    }
  }
  for (int i = 0; i < SIZE; i++) off = fmax(off, fabs((double)f.w->data[i] - w[i]));
  CHECK(off <= 2e-6, "%d threads: Lion is off by %.3g", threads, off);
  CHECK(f.w->grad[0] == 0 && f.w->grad[SIZE - 1] == 0, "a hook's gradient is not zeroed");
  luna_close(f.ctx);
}

static void check_parts(int threads) {
  luna_optimizer_config config = {.lr = 1, .schedule = {.warmup = 4, .warmup_from = 0.5f}};
  static float x[SIZE];
  static unsigned char bytes[ROOM];
  double gradient = 0, value = 0;
  size_t size;
  fit f;
  fit_open(&f, &watch, &config, threads);
  for (int i = 0; i < SIZE; i++) value += (double)f.w->data[i];
  fit_step(&f, 0, x);
  for (int i = 0; i < SIZE; i++) gradient += (double)x[i];
  CHECK(f.w->data[0] == 1 && f.w->data[SIZE - 1] == 1, "the first update's number is %g", (double)f.w->data[0]);
  CHECK(luna_optimizer_lr(f.optimizer) == 0.5f, "a schedule from 0 begins with %g",
        (double)luna_optimizer_lr(f.optimizer));
  CHECK(luna_save_training(f.optimizer, luna_buffer(bytes, ROOM, &size)) == LUNA_OK, "%s", luna_error(f.ctx));
  const unsigned char *at = NULL;
  for (size_t i = 0; i + 14 < size && !at; i++) if (memcmp(bytes + i, "luna.moment1.w", 14) == 0) at = bytes + i;
  CHECK(at != NULL, "a hook's moments are not saved by their names");
  /* the moments are the file's last three tensors, in this order */
  const float *moments = (const float *)(const void *)(bytes + size - 3 * SIZE * sizeof(float));
  CHECK(fabs((double)moments[0] - gradient) <= 1e-3 && fabs((double)moments[SIZE] - value) <= 1e-3 &&
            moments[2 * SIZE] == 0.5f && moments[3 * SIZE - 1] == 0.5f,
        "%d threads: sums %g, %g and rate %g, not %g, %g and 0.5", threads, (double)moments[0], (double)moments[SIZE],
        (double)moments[2 * SIZE], gradient, value);
  luna_close(f.ctx);
}

/* a run that goes on from a file ends as the one that went on, and other hooks refuse the file */
static void check_resume(void) {
  static const luna_optimizer_config config = {.lr = 0.01f, .beta1 = 0.9f, .beta2 = 0.99f};
  static float x[SIZE];
  static unsigned char bytes[ROOM];
  size_t size;
  fit one, two, other;
  fit_open(&one, &lion, &config, 1);
  fit_open(&two, &lion, &config, 1);
  fit_step(&one, 0, x);
  CHECK(luna_save_training(one.optimizer, luna_buffer(bytes, ROOM, &size)) == LUNA_OK, "%s", luna_error(one.ctx));
  CHECK(luna_load_training(two.optimizer, luna_bytes(bytes, size)) == LUNA_OK, "%s", luna_error(two.ctx));
  fit_step(&one, 1, x);
  fit_step(&two, 1, x);
  CHECK(memcmp(one.w->data, two.w->data, SIZE * sizeof(float)) == 0, "a resumed Lion goes elsewhere");
  fit_open(&other, NULL, NULL, 1);
  CHECK(luna_load_training(other.optimizer, luna_bytes(bytes, size)) == LUNA_MISMATCH &&
            luna_error_id_of(other.ctx) == LUNA_ERROR_OPTIMIZER_KIND && strstr(luna_error(other.ctx), "is of Lion") &&
            strstr(luna_error(other.ctx), "Apollo"),
        "Apollo takes Lion's file: %s", luna_error(other.ctx));
  luna_close(one.ctx), luna_close(two.ctx), luna_close(other.ctx);
}
/* files of before hooks had names are Apollo's: one whose pair of the name has another key, as they lack it */
static void check_old_file(void) {
  static unsigned char bytes[ROOM];
  static float x[SIZE];
  static const char key[] = "\"luna.optimizer_name\"", none[] = "\"luna.optimizer_nome\"";
  size_t size, at = 0;
  fit one, two, other;
  fit_open(&one, NULL, NULL, 1), fit_open(&two, NULL, NULL, 1), fit_open(&other, &lion, NULL, 1);
  fit_step(&one, 0, x);
  CHECK(luna_save_training(one.optimizer, luna_buffer(bytes, ROOM, &size)) == LUNA_OK, "%s", luna_error(one.ctx));
  while (at + sizeof key < size && memcmp(bytes + at, key, sizeof key - 1) != 0) at++;
  if (!CHECK(at + sizeof key < size, "Apollo's file does not name it")) return;
  memcpy(bytes + at, none, sizeof key - 1);
  CHECK(luna_load_training(other.optimizer, luna_bytes(bytes, size)) == LUNA_MISMATCH, "Lion takes an old Apollo");
  CHECK(luna_load_training(two.optimizer, luna_bytes(bytes, size)) == LUNA_OK, "an old Apollo: %s",
        luna_error(two.ctx));
  fit_step(&one, 1, x), fit_step(&two, 1, x);
  CHECK(memcmp(one.w->data, two.w->data, SIZE * sizeof(float)) == 0, "an old Apollo goes elsewhere");
  luna_close(one.ctx), luna_close(two.ctx), luna_close(other.ctx);
}

static void check_refusals(void) {
  static const luna_optimizer_hook bad[] = {
    {NULL, 1, false, 0, NULL, lion_update}, {"", 1, false, 0, NULL, lion_update}, {"x", 1, false, 0, NULL, NULL},
    {"x", 4, false, 0, NULL, lion_update}, {"x", -1, false, 0, NULL, lion_update},
    {"x", 1, false, -1, NULL, lion_update},
    {"a name that is sixty-four characters long or longer than what fits", 1, false, 0, NULL, lion_update}};
  for (size_t i = 0; i <= sizeof bad / sizeof bad[0]; i++) {
    luna_ctx *ctx = luna_open(NULL);
    const bool null = i == sizeof bad / sizeof bad[0];
    CHECK(!luna_optimizer_open(luna_params_open(ctx), null ? NULL : &bad[i], NULL) &&
              strstr(luna_error(ctx), "luna_optimizer_open: "), "hook %d is taken: %s", (int)i, luna_error(ctx));
    luna_close(ctx);
  }
  CHECK(!luna_optimizer_open(NULL, &lion, NULL), "an optimiser of no set");
}

int main(void) {
  check_lion(1), check_lion(3);
  check_parts(1), check_parts(3);
  check_resume();
  check_old_file();
  check_refusals();
  return test_report("optimizer_hook");
}
