/* Causal Luna attention with a horizon, with a memory that forgets, with a routed memory and with an output gate:
   tests/data/memory (float64, tests/models/forgetting.py) on every instruction set, outputs to 2e-6 and gradients to
   2e-5, models also as streams; odd sizes and long sequences against a recurrence in double, forward and backward;
   finite differences; scores and gates at their ends; exact causality; the same bits for any number of threads.
   TEST_FULL in the environment: longer ones. With FORGETTING_CUDA, linked with cuda_device.cu: the same on a device,
   without what is the CPU's alone. */
#include "test.h"
#define LUNA_IMPLEMENTATION
#include "luna.h"
#include "common.h"
#include "naive.h"
#ifdef FORGETTING_CUDA
#include "cuda/cuda_device.h"
#define NAME "cuda_forgetting"
#define ON_DEVICE cuda_backend(0, CUDA_F32)
static const luna_isa isas[1] = {LUNA_ISA_BEST};
#else
#define NAME "forgetting"
#define ON_DEVICE NULL
#define isas common_isas
#endif
#define ISAS ((int)(sizeof isas / sizeof isas[0]))
/* the emulator runs a part of what takes it long, but for TEST_FULL outside the gate */
static bool less_here(void) { return ON_DEVICE && (!test_full() || getenv("GATE")); }

#define OUTPUT_LIMIT 2e-6
#define GRADIENT_LIMIT 2e-5
#define TRUE_ZERO 1e-5 /* of the largest gradient (root mean squares): below it one counts as zero, as in golden.c */
#define FAR 14.999f    /* the clamp of scores is at 15 */
#define MOST 0.6321205f /* just below 1 - 1/e, the most that a token writes to a slot */

/* ---- a call of the op: inputs, and what comes of them. Of a routed memory s is w, and gates are the fade of each
   head ---- */
enum { GATED, PUBLISHED, ROUTED, FORMS };
static const char *const form_names[FORMS] = {"forgetting", "horizon", "routed"};
enum { Q, K, V, S, GATES, INPUTS };
static const char *const input_names[INPUTS] = {"q", "k", "v", "s", "gates"};
typedef struct call {
  int64_t batch, n, dim, heads, slots; /* dim: of q, all heads */
  int64_t horizon;
  luna_activation omega;
  bool routed;
  float *in[INPUTS];                 /* v null: k; gates null: the published form */
  float *grad_out;
  int32_t *lengths;
} call;
/* faded: of a routed memory, the sum of what its rows add to the gradients of fade, all taken as positive */
typedef struct results {
  float *y, *grad[INPUTS];
  double faded;
} results;

static int64_t width_of(const call *c, int i) { return i < S ? c->dim : c->heads * c->slots; }
static bool per_row(const call *c, int i) { return i != GATES || !c->routed; }
static int64_t count_of(const call *c, int i) { return per_row(c, i) ? c->batch * c->n * width_of(c, i) : c->heads; }
static int64_t real_slots(const call *c, int64_t b) {
  return c->lengths && c->lengths[b] < c->slots ? c->lengths[b] : c->slots;
}
static void call_close(call *c) {
  for (int i = 0; i < INPUTS; i++) free(c->in[i]);
  free(c->grad_out), free(c->lengths);
}
static results results_open(const call *c) {
  results r;
  r.y = common_floats(count_of(c, Q)), r.faded = 0;
  for (int i = 0; i < INPUTS; i++) r.grad[i] = c->in[i] ? common_floats(count_of(c, i)) : NULL;
  return r;
}
static void results_close(results *r) {
  free(r->y);
  for (int i = 0; i < INPUTS; i++) free(r->grad[i]);
}

/* random; gates = middle + spread (-1..1), or none when spread is negative; routed: w by a router of such scores */
typedef struct ranges {
  double scores, middle, spread;
  bool routed;
} ranges;
/* router values become w */
static void call_route(call *c) {
  double *w = (double *)common_alloc((size_t)c->slots * sizeof(double));
  for (int64_t i = 0; i < c->batch * c->n * c->heads; i++) {
    float *row = c->in[S] + i * c->slots;
    naive_route(row, c->slots, 4 * common_number(22, (uint64_t)i), w);
    for (int64_t s = 0; s < c->slots; s++) row[s] = (float)w[s];
  }
  free(w);
}
static call call_open(int64_t batch, int64_t n, int64_t heads, int64_t head_dim, int64_t slots, ranges r) {
  call c;
  memset(&c, 0, sizeof c);
  c.batch = batch, c.n = n, c.heads = heads, c.dim = heads * head_dim, c.slots = slots, c.routed = r.routed;
  for (int i = 0; i <= S; i++) c.in[i] = common_random(count_of(&c, i), 10 + (uint64_t)i, i == S ? r.scores : 2);
  if (r.routed) call_route(&c);
  c.grad_out = common_random(count_of(&c, Q), 20, 1);
  if (r.spread < 0) return c;
  c.in[GATES] = common_random(count_of(&c, GATES), 21, r.spread);
  for (int64_t i = 0; i < count_of(&c, GATES); i++) c.in[GATES][i] += (float)r.middle;
  return c;
}
/* sequences with fewer slots than there are, also none; what is masked is never read */
static void call_mask(call *c) {
  const bool given = c->lengths != NULL;
  if (!given) c->lengths = (int32_t *)common_alloc((size_t)c->batch * sizeof(int32_t));
  for (int64_t b = 0; b < c->batch && !given; b++)
    c->lengths[b] = (int32_t)(b == 1 ? 0 : b == 2 ? c->slots + 5 : 1 + (b * 7 + c->slots / 2) % c->slots);
  for (int i = S; i < INPUTS; i++)
    for (int64_t j = 0; c->in[i] && per_row(c, i) && j < count_of(c, i); j++)
      if (j % c->slots >= real_slots(c, j / (c->n * c->heads * c->slots))) c->in[i][j] = j % 2 ? NAN : 3e38f;
}

static luna_ctx *ctx_open(luna_isa isa, int threads) {
  luna_options options = {0};
  options.isa = isa, options.threads = threads, options.backend = ON_DEVICE;
  luna_ctx *ctx = luna_open(&options);
  if (!ctx) exit(2);
  return ctx;
}
static luna_tensor *input_of(luna_ctx *ctx, const call *c, int i) {
  const int64_t shape[3] = {c->batch, c->n, width_of(c, i)};
  if (!c->in[i]) return NULL;
  return luna_require_grad(luna_tensor_new(ctx, c->in[i], per_row(c, i) ? 3 : 1, per_row(c, i) ? shape : &c->heads));
}
/* y, and in training the gradients of sum(grad_out y) */
static bool call_run(luna_ctx *ctx, const call *c, bool training, results *r) {
  const int64_t shape[3] = {c->batch, c->n, c->dim}, flat[2] = {1, count_of(c, Q)};
  luna_causal_nested_config config = {0};
  luna_tensor *in[INPUTS];
  if (training) luna_begin_step(ctx);
  else luna_begin_inference(ctx);
  for (int i = 0; i < INPUTS; i++) in[i] = input_of(ctx, c, i);
  config.heads = c->heads, config.omega = c->omega, config.lengths = c->lengths;
  config.horizon = c->horizon, config.forget = in[GATES], config.routed = c->routed;
  luna_tensor *y = luna_causal_nested_attention(in[Q], in[K], in[V] ? in[V] : in[K], in[S], &config);
  if (!y || luna_read(y, r->y) != LUNA_OK) return CHECK(false, "forward: %s", luna_error(ctx)) != 0;
  if (!training) return true;
  luna_tensor *loss = luna_sum(luna_reshape(luna_mul(y, luna_tensor_new(ctx, c->grad_out, 3, shape)), 2, flat), 1);
  if (luna_backward(loss) != LUNA_OK) return CHECK(false, "backward: %s", luna_error(ctx)) != 0;
  for (int i = 0; i < INPUTS; i++) {
    if (!in[i]) continue;
    memset(r->grad[i], 0, (size_t)count_of(c, i) * sizeof(float));
    if (in[i]->grad) luna_read_grad(in[i], r->grad[i]);
  }
  return true;
}

/* ---- the same in double, row by row. Of one head, K and V are the memory [slots, head_dim] after row t,
   K_t = keep K_{t-1} + add k_t, and r [rows, slots] is each row's of whatever has a name ---- */
typedef struct exact {
  const call *c;
  int64_t b, h, rows, slots, width;
  double *keep, *add, *z, *p, *keys, *values; /* [rows, slots], [rows, slots, width]; z: what slots weigh, if routed */
  double *d[INPUTS];                 /* of all heads, as the inputs lie */
  double faded;
} exact;

static int64_t exact_at(const exact *e, int i, int64_t t) { /* where row t of an input is, of this head */
  const int64_t width = width_of(e->c, i);
  return (e->b * e->rows + t) * width + e->h * (width / e->c->heads);
}
static const float *exact_row(const exact *e, int i, int64_t t) {
  return e->c->in[i == V && !e->c->in[V] ? K : i] + exact_at(e, i, t);
}
static double clamped(double score) { return score > 15 ? 15 : score < -15 ? -15 : score; }
static double log_gate(double x) { return fmax(-(fmax(-x, 0) + log1p(exp(-fabs(x)))) / 16, -1); }
static double log_gate_slope(double x) { return log_gate(x) > -1 ? 1 / (1 + exp(x)) / 16 : 0; }
/* what a gate leaves of a slot's weight, and what the row adds to it */
static double exact_left(const exact *e, int64_t t, int64_t s) {
  if (e->c->routed) return (1 - (double)exact_row(e, S, t)[s]) * exp(-naive_fade((double)e->c->in[GATES][e->h]));
  return exp(log_gate((double)exact_row(e, GATES, t)[s]));
}
static double exact_weight(const exact *e, double score) { return e->c->routed ? score : exp(clamped(score)); }
static int exact_omega(const call *c) { return (int)(c->omega ? c->omega : LUNA_ACTIVATION_SOFTPLUS2); }

static void exact_weights(exact *e) { /* keep and add */
  for (int64_t s = 0; s < e->slots; s++) {
    double z = 0;
    for (int64_t t = 0; t < e->rows; t++) {
      const double score = (double)exact_row(e, S, t)[s];
      double *keep = &e->keep[t * e->slots + s], *add = &e->add[t * e->slots + s];
      if (e->c->in[GATES]) {
        const double old = z * exact_left(e, t, s), w = exact_weight(e, score);
        e->z[t * e->slots + s] = z = old + w;
        *keep = z > 0 ? old / z : 1, *add = z > 0 ? w / z : 0;
      } else {
        const double count = (double)(e->c->horizon && t >= e->c->horizon ? e->c->horizon : t + 1);
        *keep = 1 - 1 / count, *add = naive_activation(exact_omega(e->c), score) / count;
      }
    }
  }
}
static void exact_forward(exact *e, float *y) {
  const double scale = 1 / sqrt((double)e->width);
  for (int64_t t = 0; t < e->rows; t++) {
    const float *q = exact_row(e, Q, t), *k = exact_row(e, K, t), *v = exact_row(e, V, t);
    double *p = e->p + t * e->slots;
    int64_t seen = 0;
    for (int64_t s = 0; s < e->slots; s++) {
      const int64_t r = t * e->slots + s, at = r * e->width, before = at - e->slots * e->width;
      p[s] = 0;
      for (int64_t i = 0; i < e->width; i++) {
        e->keys[at + i] = (t ? e->keep[r] * e->keys[before + i] : 0) + e->add[r] * (double)k[i];
        e->values[at + i] = (t ? e->keep[r] * e->values[before + i] : 0) + e->add[r] * (double)v[i];
        p[s] += scale * (double)q[i] * e->keys[at + i];
      }
      if (e->c->routed) p[s] = naive_empty(e->z[r]) ? -INFINITY : p[s] + log(e->z[r]);
      seen += p[s] > -INFINITY;
    }
    (void)naive_softmax(p, e->slots);
    for (int64_t s = 0; s < e->slots && seen == 0; s++) p[s] = 0;
    for (int64_t i = 0; i < e->width; i++) {
      double sum = 0;
      for (int64_t s = 0; s < e->slots; s++) sum += p[s] * e->values[(t * e->slots + s) * e->width + i];
      y[exact_at(e, Q, t) + i] = (float)sum;
    }
  }
}
/* the gradients of one row's y: to q, and added to those of the memory after it, dk and dv [slots, width], and of the
   logarithm of what its slots weigh */
static void exact_row_backward(exact *e, int64_t t, double *dk, double *dv, double *zeta) {
  const double scale = 1 / sqrt((double)e->width), *p = e->p + t * e->slots;
  const float *q = exact_row(e, Q, t), *g = e->c->grad_out + exact_at(e, Q, t);
  double mean = 0;
  for (int pass = 0; pass < 2; pass++)
    for (int64_t s = 0; s < e->slots; s++) {
      const double *keys = e->keys + (t * e->slots + s) * e->width, *values = e->values + (t * e->slots + s) * e->width;
      double dp = 0;
      for (int64_t i = 0; i < e->width; i++) dp += (double)g[i] * values[i];
      if (pass == 0) mean += p[s] * dp;
      else if (e->c->routed) zeta[s] += p[s] * (dp - mean);
      for (int64_t i = 0; pass == 1 && i < e->width; i++) {
        const double du = p[s] * (dp - mean) * scale;
        e->d[Q][exact_at(e, Q, t) + i] += du * keys[i];
        dk[s * e->width + i] += du * (double)q[i];
        dv[s * e->width + i] += p[s] * (double)g[i];
      }
    }
}
/* from the gradients of the logarithms of a row's weight and of what its gate leaves */
static void exact_gate_backward(exact *e, int64_t t, int64_t s, double of_weight, double of_left) {
  const double score = (double)exact_row(e, S, t)[s];
  double *ds = &e->d[S][exact_at(e, S, t) + s];
  if (e->c->routed) {
    const double fade = naive_fade((double)e->c->in[GATES][e->h]);
    *ds = score > 0 ? of_weight / score - of_left / (1 - score) : 0;
    e->d[GATES][e->h] -= of_left * fade * (1 - 4 * fade);
    e->faded += fabs(of_left) * fade * (1 - 4 * fade);
    return;
  }
  *ds = fabs(score) < 15 ? of_weight : 0;
  e->d[GATES][exact_at(e, GATES, t) + s] = of_left * log_gate_slope((double)exact_row(e, GATES, t)[s]);
}
/* zeta [slots]: z dz, which a slot's later rows hand on */
static void exact_backward(exact *e) {
  double *dk = (double *)common_alloc((size_t)(e->slots * (2 * e->width + 1)) * sizeof(double)),
         *dv = dk + e->slots * e->width, *zeta = dv + e->slots * e->width;
  for (int64_t t = e->rows; t-- > 0;) {
    const float *k = exact_row(e, K, t), *v = exact_row(e, V, t);
    exact_row_backward(e, t, dk, dv, zeta);
    for (int64_t s = 0; s < e->slots; s++) {
      const int64_t r = t * e->slots + s, before = (r - e->slots) * e->width;
      const double keep = e->keep[r], add = e->add[r], score = (double)exact_row(e, S, t)[s];
      double dadd = 0, dkeep = 0;
      for (int64_t i = 0; i < e->width; i++) {
        double *gk = &dk[s * e->width + i], *gv = &dv[s * e->width + i];
        dadd += *gk * (double)k[i] + *gv * (double)v[i];
        if (t) dkeep += *gk * e->keys[before + i] + *gv * e->values[before + i];
        e->d[K][exact_at(e, K, t) + i] += add * *gk;
        e->d[V][exact_at(e, V, t) + i] += add * *gv;
        *gk *= keep, *gv *= keep;
      }
      if (e->c->in[GATES]) { /* keep = 1 - add */
        const double drho = dadd - dkeep;
        zeta[s] -= add * drho;
        const double of_log = add * (drho + zeta[s]); /* the gradient of ln w, but for the gate's */
        zeta[s] *= keep;
        exact_gate_backward(e, t, s, of_log, zeta[s]);
      } else {
        const double count = (double)(e->c->horizon && t >= e->c->horizon ? e->c->horizon : t + 1);
        e->d[S][exact_at(e, S, t) + s] = dadd / count * naive_slope(exact_omega(e->c), score);
      }
    }
  }
  free(dk);
}
static void exact_run(const call *c, results *r) {
  exact e;
  memset(&e, 0, sizeof e);
  e.c = c, e.rows = c->n, e.width = c->dim / c->heads;
  for (int i = 0; i < INPUTS; i++) e.d[i] = (double *)common_alloc((size_t)count_of(c, i) * sizeof(double));
  memset(r->y, 0, (size_t)count_of(c, Q) * sizeof(float));
  for (e.b = 0; e.b < c->batch; e.b++)
    for (e.h = 0; e.h < c->heads; e.h++) {
      e.slots = real_slots(c, e.b);
      const int64_t each = e.rows * e.slots;
      double *memory = (double *)common_alloc((size_t)(each * (4 + 2 * e.width)) * sizeof(double));
      e.keep = memory, e.add = e.keep + each, e.z = e.add + each, e.p = e.z + each, e.keys = e.p + each,
          e.values = e.keys + each * e.width;
      if (e.slots > 0) exact_weights(&e), exact_forward(&e, r->y), exact_backward(&e);
      free(memory);
    }
  for (int i = 0; i < INPUTS; i++) {
    for (int64_t j = 0; c->in[i] && j < count_of(c, i); j++)
      r->grad[i][j] = (float)(e.d[i][j] + (i == K && !c->in[V] ? e.d[V][j] : 0));
    free(e.d[i]);
  }
  r->faded = e.faded;
}

/* ---- comparison ---- */
static double rms(const float *x, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; i++) sum += (double)x[i] * (double)x[i];
  return n ? sqrt(sum / (double)n) : 0;
}
static double max_of(const float *x, int64_t n) { /* NaN when there is one */
  double max = 0;
  for (int64_t i = 0; i < n; i++)
    if (!(fabs((double)x[i]) <= max)) max = fabs((double)x[i]);
  return max;
}
static double max_off(const float *got, const float *want, int64_t n) {
  double max = 0;
  for (int64_t i = 0; i < n; i++) {
    const double off = fabs((double)got[i] - (double)want[i]);
    if (!(off <= max)) max = off;
  }
  return max;
}
/* relative; of one that is zero beside the largest, by that */
static double gradient_error(const float *got, const float *want, int64_t n, double largest) {
  if (rms(want, n) > TRUE_ZERO * largest) return common_error(got, want, n, 0);
  const double max = max_off(got, want, n);
  return max > 0 ? max / largest : 0;
}
/* the worst, and where it was; of outputs, of gradients, and of the first row's gates, as a part of the limit */
enum { WORST = 3 };
typedef struct worst { double error; char where[200]; } worst;
static void worst_note(worst *w, double error, const char *name, const char *how, const char *values) {
  if (error <= w->error || w->error != w->error) return;
  w->error = error;
  snprintf(w->where, sizeof w->where, "%s, %s: %s", name, how, values);
}
static void results_compare(const call *c, const results *got, const results *want, worst *w, const char *how) {
  double largest = 0;
  worst_note(&w[0], common_error(got->y, want->y, count_of(c, Q), 1e-6), "y", how,
             common_where(got->y, want->y, count_of(c, Q)));
  for (int i = 0; i < INPUTS; i++) if (c->in[i]) largest = fmax(largest, rms(want->grad[i], count_of(c, i)));
  for (int i = 0; i < INPUTS; i++) {
    if (!c->in[i]) continue;
    double error = gradient_error(got->grad[i], want->grad[i], count_of(c, i), largest);
    /* the gradients of fade are sums over all rows, which may be near 0 beside their terms */
    if (!per_row(c, i)) error = fmin(error, max_off(got->grad[i], want->grad[i], c->heads) / want->faded);
    worst_note(&w[1], error, input_names[i], how, common_where(got->grad[i], want->grad[i], count_of(c, i)));
  }
  for (int64_t i = 0; c->routed && i < count_of(c, S); i++)
    if (c->in[S][i] == 0 && got->grad[S][i] != 0) worst_note(&w[1], 1, "s", how, "where nothing is written");
  if (!c->in[GATES] || c->routed) return;
  /* before the first row there is nothing to forget; a sum over all rows says so up to rounding */
  const double limit = GRADIENT_LIMIT * (c->n > 1 ? max_of(want->grad[GATES], count_of(c, GATES)) : largest);
  for (int64_t b = 0; b < c->batch && limit > 0; b++) {
    const double first = max_of(got->grad[GATES] + b * c->n * width_of(c, GATES), width_of(c, GATES));
    worst_note(&w[2], first / limit, "gates", how, "of the first row");
  }
}
static void worst_check(const worst *w, const char *what) {
  CHECK(w[2].error <= 1, "%s: the first row's gates have a gradient, %.3g of what rounding may make (%s)", what,
        w[2].error, w[2].where);
  CHECK(w[0].error <= OUTPUT_LIMIT, "%s: an output is off by %.3g (%s)", what, w[0].error, w[0].where);
  CHECK(w[1].error <= GRADIENT_LIMIT, "%s: a gradient is off by %.3g (%s)", what, w[1].error, w[1].where);
}
static bool same(const float *a, const float *b, int64_t n) {
  return n <= 0 || memcmp(a, b, (size_t)n * sizeof(float)) == 0;
}
/* by luna.h, on every instruction set, in training and in inference, beside what is wanted */
static void call_compare(const call *c, const results *want, worst *w) {
  const int64_t tail = c->n < 1000 ? 0 : 1000, at = count_of(c, Q) - tail * c->dim;
  for (int i = 0; i < ISAS; i++) {
    /* the reference's time grows with the square */
    if (!luna_isa_available(isas[i]) || (isas[i] == LUNA_ISA_REFERENCE && tail)) continue;
    const char *how = luna_isa_name(isas[i]);
    luna_ctx *ctx = ctx_open(isas[i], 2);
    results got = results_open(c);
    if (call_run(ctx, c, true, &got)) results_compare(c, &got, want, w, how);
    worst_note(&w[0], common_error(got.y + at, want->y + at, tail * c->dim, 0), "y's last rows", how,
               common_where(got.y + at, want->y + at, tail * c->dim));
    if (call_run(ctx, c, false, &got))
      worst_note(&w[0], common_error(got.y, want->y, count_of(c, Q), 1e-6), "y of an inference", how,
                 common_where(got.y, want->y, count_of(c, Q)));
    results_close(&got);
    luna_close(ctx);
  }
}
static void worst_print(const worst *w, const char *what) {
  printf(NAME ": %s: outputs %.2g (%s), gradients %.2g (%s)\n", what, w[0].error, w[0].where, w[1].error,
         w[1].where);
}

/* ---- files ---- */
typedef struct file_entry { char name[100]; float *floats; int32_t *integers; int64_t shape[3], count; } file_entry;
typedef struct file {
  char op[16];
  int64_t heads, slots, horizon, omega;
  int entries;
  file_entry entry[100];
} file;
static void file_pair(void *user, const char *key, const char *value) {
  file *f = (file *)user;
  static const char *const keys[4] = {"heads", "slots", "horizon", "omega"};
  int64_t *const numbers[4] = {&f->heads, &f->slots, &f->horizon, &f->omega};
  if (strcmp(key, "luna.test.op") == 0) snprintf(f->op, sizeof f->op, "%s", value);
  for (int i = 0; i < 4; i++) if (strcmp(key, keys[i]) == 0) *numbers[i] = strtol(value, NULL, 10);
}
static void file_tensor(void *user, const luna_file_tensor *t) {
  file *f = (file *)user;
  if (f->entries == 100 || t->rank > 3) exit(2);
  file_entry *e = &f->entry[f->entries++];
  snprintf(e->name, sizeof e->name, "%s", t->name);
  e->count = t->count;
  memcpy(e->shape, t->shape, sizeof e->shape);
  if (strcmp(t->dtype, "I32") != 0) {
    e->floats = common_floats(t->count);
    luna_file_tensor_read(t, e->floats);
    return;
  }
  e->integers = (int32_t *)common_alloc((size_t)t->count * sizeof(int32_t));
  for (int64_t i = 0; i < t->count; i++) {
    const uint8_t *at = (const uint8_t *)t->data + 4 * i;
    e->integers[i] = (int32_t)((uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24);
  }
}
static bool file_open(file *f, const char *path) {
  luna_inspection look = {0};
  luna_ctx *ctx = ctx_open(LUNA_ISA_BEST, 1);
  memset(f, 0, sizeof *f);
  look.pair = file_pair, look.tensor = file_tensor, look.user = f;
  const bool good = CHECK(luna_inspect(ctx, luna_path(path), &look) == LUNA_OK, "%s", luna_error(ctx)) != 0;
  luna_close(ctx);
  return good;
}
static void file_close(file *f) {
  for (int i = 0; i < f->entries; i++) free(f->entry[i].floats), free(f->entry[i].integers);
}
static file_entry *file_find(file *f, const char *prefix, const char *name) {
  char full[120];
  snprintf(full, sizeof full, "%s%s", prefix, name);
  for (int i = 0; i < f->entries; i++) if (strcmp(f->entry[i].name, full) == 0) return &f->entry[i];
  return NULL;
}
static float *file_take(file *f, const char *prefix, const char *name) { /* the caller's from here on; or null */
  file_entry *e = file_find(f, prefix, name);
  float *values = e ? e->floats : NULL;
  if (e) e->floats = NULL;
  return values;
}

static void check_op_file(const char *name) {
  char path[200];
  file f;
  worst own[WORST] = {{0, ""}}, w[WORST] = {{0, ""}};
  call c;
  results want;
  memset(&c, 0, sizeof c), memset(&want, 0, sizeof want);
  snprintf(path, sizeof path, "tests/data/memory/%s.safetensors", name);
  const file_entry *q = file_open(&f, path) ? file_find(&f, "", "q") : NULL, *lengths = file_find(&f, "", "lengths");
  if (CHECK(q && f.heads && f.slots, "%s is no op's file", path)) {
    c.batch = q->shape[0], c.n = q->shape[1], c.dim = q->shape[2], c.heads = f.heads, c.slots = f.slots;
    c.horizon = f.horizon, c.omega = (luna_activation)f.omega;
    for (int i = 0; i < INPUTS; i++)
      c.in[i] = file_take(&f, "", input_names[i]), want.grad[i] = file_take(&f, "grad.", input_names[i]);
    c.grad_out = file_take(&f, "", "grad_out"), want.y = file_take(&f, "", "y");
    if (lengths) {
      c.lengths = (int32_t *)common_alloc((size_t)c.batch * sizeof(int32_t));
      memcpy(c.lengths, lengths->integers, (size_t)c.batch * sizeof(int32_t));
      call_mask(&c);
    }
    c.routed = strcmp(f.op, "routed") == 0;
    CHECK((strcmp(f.op, "horizon") != 0) == (c.in[GATES] != NULL), "%s: gates", path);
    results recurrence = results_open(&c);
    exact_run(&c, &recurrence);
    want.faded = recurrence.faded;
    results_compare(&c, &recurrence, &want, own, "the recurrence in double");
    CHECK(own[0].error <= 1e-7 && own[1].error <= 1e-6, "%s: this test's recurrence is off by %.3g and %.3g", name,
          own[0].error, own[1].error);
    results_close(&recurrence);
    call_compare(&c, &want, w);
    worst_print(w, name);
    worst_check(w, name);
  }
  results_close(&want), call_close(&c), file_close(&f);
}

/* luna_route's file */
static void check_route_file(const char *name) {
  char path[200];
  file f;
  worst w[WORST] = {{0, ""}};
  snprintf(path, sizeof path, "tests/data/memory/%s.safetensors", name);
  const bool good = file_open(&f, path);
  const file_entry *in[2] = {file_find(&f, "", "router"), file_find(&f, "", "strength")},
                   *grad[2] = {file_find(&f, "grad.", "router"), file_find(&f, "grad.", "strength")},
                   *want = file_find(&f, "", "w"), *grad_out = file_find(&f, "", "grad_out");
  if (CHECK(good && in[0] && in[1] && grad[0] && grad[1] && want && grad_out, "%s lacks something", path))
    for (int i = 0; i < ISAS; i++) {
      if (!luna_isa_available(isas[i])) continue;
      luna_ctx *ctx = ctx_open(isas[i], 2);
      luna_tensor *x[2];
      const int64_t flat[2] = {1, want->count};
      float *got = common_floats(want->count);
      double largest = 0;
      luna_begin_step(ctx);
      for (int k = 0; k < 2; k++) {
        x[k] = luna_require_grad(luna_tensor_new(ctx, in[k]->floats, 3, in[k]->shape));
        largest = fmax(largest, rms(grad[k]->floats, grad[k]->count));
      }
      luna_tensor *y = luna_route(x[0], x[1]), *g = luna_tensor_new(ctx, grad_out->floats, 3, want->shape);
      CHECK(luna_read(y, got) == LUNA_OK, "%s: %s", name, luna_error(ctx));
      CHECK(luna_backward(luna_sum(luna_reshape(luna_mul(y, g), 2, flat), 1)) == LUNA_OK, "%s: %s", name,
            luna_error(ctx));
      worst_note(&w[0], common_error(got, want->floats, want->count, 0), "w", luna_isa_name(isas[i]),
                 common_where(got, want->floats, want->count));
      int other = 0;
      for (int64_t j = 0; j < want->count; j++) other += (got[j] == 0) != (want->floats[j] == 0);
      CHECK(other == 0, "%s, %s: %d slots are chosen otherwise", name, luna_isa_name(isas[i]), other);
      for (int k = 0; k < 2; k++) {
        memset(got, 0, (size_t)grad[k]->count * sizeof(float));
        luna_read_grad(x[k], got);
        worst_note(&w[1], gradient_error(got, grad[k]->floats, grad[k]->count, largest), k ? "strength" : "router",
                   luna_isa_name(isas[i]), common_where(got, grad[k]->floats, grad[k]->count));
      }
      free(got);
      luna_close(ctx);
    }
  worst_print(w, name);
  worst_check(w, name);
  file_close(&f);
}

/* ---- models ---- */
enum { STREAMED = 6, MODELS = 8 };       /* the first have a stream */
static const char *const model_names[MODELS] = {"model_gated", "model_post_norm", "model_routed", "model_horizon",
                                                "model_constant", "model_routed_full", "model_softmax",
                                                "model_rotary"};
typedef struct net { luna_ctx *ctx; luna_params *params; luna_lm lm; } net;

static void model_path(char *path, size_t size, const char *name, const char *end) {
  snprintf(path, size, "tests/data/memory/%s%s.safetensors", name, end);
}
/* trained: to be trained on sequences longer than its horizon. A file's grows with them, a config's stays. */
static bool net_open(net *m, const char *name, luna_isa isa, luna_form form, bool trained) {
  luna_options options = {0};
  luna_model model;
  char path[200];
  options.threads = 2, options.isa = isa, options.form = form, options.backend = ON_DEVICE;
  m->ctx = luna_open(&options);
  m->params = luna_params_open(m->ctx);
  model_path(path, sizeof path, name, "");
  if (!CHECK(luna_load_model(&model, m->params, luna_path(path)) == LUNA_OK && model.kind == LUNA_MODEL_LM, "%s: %s",
             name,
             luna_error(m->ctx))) return false;
  m->lm = model.lm;
  if (!trained || strcmp(name, "model_horizon") != 0) return true;
  luna_lm_config config = model.lm.config;
  config.layer.horizon = 37;
  m->params = luna_params_open(m->ctx);
  return CHECK(luna_lm_init(&m->lm, m->params, &config) == LUNA_OK && luna_load(m->params, luna_path(path)) == LUNA_OK,
               "%s: %s",
               name, luna_error(m->ctx)) != 0;
}
static luna_tensor *net_forward(const net *m, const int32_t *tokens, int64_t batch, int64_t n) {
  luna_input input = {0};
  input.tokens = tokens, input.batch = batch, input.n = n;
  luna_tensor *y = luna_lm_forward(&m->lm, &input);
  CHECK(y != NULL, "luna_lm_forward: %s", luna_error(m->ctx));
  return y;
}
/* tokens [batch, n] row by row -> logits [batch, n, vocab] */
static bool stream_steps(luna_stream *s, const int32_t *tokens, int64_t batch, int64_t n, int64_t vocab, float *out) {
  int32_t now[8];
  for (int64_t t = 0; t < n; t++) {
    for (int64_t b = 0; b < batch; b++) now[b] = tokens[b * n + t];
    const float *logits = luna_stream_step(s, now);
    if (!logits) return CHECK(false, "step %lld: %s", (long long)t, luna_stream_error(s)) != 0;
    for (int64_t b = 0; b < batch; b++)
      memcpy(out + (b * n + t) * vocab, logits + b * vocab, (size_t)vocab * sizeof(float));
  }
  return true;
}
/* the same in parts of the given sizes, again and again; of `out` only the rows where they end are set, and all others
   become what is wanted */
static bool stream_prefills(luna_stream *s, const int32_t *tokens, const int64_t shape[3], const int64_t parts[6],
                            float *out, const float *want) {
  const int64_t batch = shape[0], n = shape[1], vocab = shape[2];
  int32_t *part = (int32_t *)common_alloc((size_t)(batch * n) * sizeof(int32_t));
  bool good = true;
  memcpy(out, want, (size_t)(batch * n * vocab) * sizeof(float));
  for (int64_t at = 0, i = 0; good && at < n; i++) {
    luna_input input = {0};
    input.n = parts[i % 6] < n - at ? parts[i % 6] : n - at, input.tokens = part;
    for (int64_t j = 0; j < batch * input.n; j++) part[j] = tokens[j / input.n * n + at + j % input.n];
    at += input.n;
    const float *logits = luna_stream_prefill(s, &input);
    good = CHECK(logits != NULL, "prefill: %s", luna_stream_error(s)) != 0;
    for (int64_t b = 0; good && b < batch; b++)
      memcpy(out + (b * n + at - 1) * vocab, logits + b * vocab, (size_t)vocab * sizeof(float));
  }
  free(part);
  return good;
}
/* beside the rows that parts end with alone, not all n */
static double rows_error(const float *got, const float *want, const int64_t shape[3], const int64_t parts[6]) {
  double off = 0, size = 0;
  for (int64_t b = 0; b < shape[0]; b++)
    for (int64_t at = 0, i = 0; at < shape[1]; i++) {
      at += parts[i % 6] < shape[1] - at ? parts[i % 6] : shape[1] - at;
      for (int64_t j = (b * shape[1] + at - 1) * shape[2]; j < (b * shape[1] + at) * shape[2]; j++) {
        off += ((double)got[j] - (double)want[j]) * ((double)got[j] - (double)want[j]);
        size += (double)want[j] * (double)want[j];
      }
    }
  return sqrt(off / size);
}
static void check_stream(const net *m, const int32_t *tokens, const file_entry *logits, luna_isa isa, worst *w) {
  static const int64_t parts[6] = {1, 63, 1, 2, 20, 5};
  const int64_t *shape = logits->shape;
  luna_stream_config config = {0};
  config.batch = shape[0], config.isa = isa, config.chunk = 16;
  luna_stream *s = luna_stream_open(&m->lm, &config);
  float *got = common_floats(logits->count);
  if (CHECK(s != NULL, "luna_stream_open: %s", luna_error(m->ctx)) &&
      stream_steps(s, tokens, shape[0], shape[1], shape[2], got)) {
    worst_note(&w[0], common_error(got, logits->floats, logits->count, 0), "steps", luna_isa_name(isa),
               common_where(got, logits->floats, logits->count));
    for (int round = 0; round < 2; round++) { /* in chunks of 16 rows, and in the default's */
      if (round) {
        luna_stream_close(s);
        config.chunk = 0;
        s = luna_stream_open(&m->lm, &config);
      } else luna_stream_reset(s);
      if (s && stream_prefills(s, tokens, shape, parts, got, logits->floats))
        worst_note(&w[0], rows_error(got, logits->floats, shape, parts), "prefills", luna_isa_name(isa),
                   common_where(got, logits->floats, logits->count));
    }
  }
  luna_stream_close(s);
  free(got);
}
static void check_net_gradients(const net *m, file *expected, worst *w, const char *how) {
  double largest = 0;
  int compared = 0, count = 0;
  for (int i = 0; i < expected->entries; i++)
    if (strncmp(expected->entry[i].name, "grad.", 5) == 0) {
      count++;
      largest = fmax(largest, rms(expected->entry[i].floats, expected->entry[i].count));
    }
  for (int64_t i = 0; i < luna_params_tensor_count(m->params); i++) {
    const char *name;
    const luna_tensor *p = luna_params_at(m->params, i, &name);
    const file_entry *want = file_find(expected, "grad.", name);
    if (!CHECK(want && want->count == luna_count(p), "%s: no grad.%s of that size", how, name)) continue;
    float *got = common_floats(want->count);
    if (p->grad) luna_read_grad(p, got);
    worst_note(&w[1], gradient_error(got, want->floats, want->count, largest), name, how,
               common_where(got, want->floats, want->count));
    free(got);
    compared++;
  }
  CHECK(compared == count, "%s: %d gradients of %d were compared", how, compared, count);
}
static void check_net(const char *name, file *expected, luna_isa isa, luna_form form, worst *w) {
  const file_entry *tokens = file_find(expected, "", "tokens"), *labels = file_find(expected, "", "labels"),
                   *logits = file_find(expected, "", "logits"), *value = file_find(expected, "", "loss");
  const int64_t batch = logits->shape[0], n = logits->shape[1];
  float *got = common_floats(logits->count);
  char how[64];
  snprintf(how, sizeof how, "%s%s", luna_isa_name(isa), form == LUNA_FORM_FOLDED ? " folded" : "");
  for (int training = 0; training < 2; training++) {
    net m;
    if (net_open(&m, name, isa, form, training != 0)) {
      if (training) luna_begin_step(m.ctx);
      else luna_begin_inference(m.ctx);
      luna_tensor *y = net_forward(&m, tokens->integers, batch, n), *loss = luna_cross_entropy(y, labels->integers,
                                                                                               NULL);
      if (y) luna_read(y, got);
      worst_note(&w[0], common_error(got, logits->floats, logits->count, 0), training ? "training" : "inference", how,
                 common_where(got, logits->floats, logits->count));
      worst_note(&w[0], fabs((double)luna_item(loss) / (double)value->floats[0] - 1), "loss", how,
                 common_where(&(float){luna_item(loss)}, value->floats, 1));
      if (training && CHECK(luna_backward(loss) == LUNA_OK, "%s: %s", name, luna_error(m.ctx)))
        check_net_gradients(&m, expected, w, how);
      if (m.lm.config.layer.attention == LUNA_ATTENTION_LUNA) check_stream(&m, tokens->integers, logits, isa, w);
    }
    luna_close(m.ctx);
  }
  free(got);
}
/* a stream of the file as it is, without a context */
static void check_borrowed(const char *name, const file_entry *tokens, const file_entry *logits, worst *w) {
  char path[200];
  const char *error = NULL;
  luna_stream_config config = {0};
  model_path(path, sizeof path, name, "");
  FILE *in = fopen(path, "rb");
  uint8_t *bytes = (uint8_t *)common_alloc(1 << 16);
  const size_t size = in ? fread(bytes, 1, 1 << 16, in) : 0;
  if (in) fclose(in);
  config.batch = logits->shape[0];
  const size_t needed = luna_stream_size(bytes, size, &config, &error);
  void *memory = common_alloc(needed);
  luna_stream *s = needed ? luna_stream_open_bytes(bytes, size, &config, memory, needed, &error) : NULL;
  float *got = common_floats(logits->count);
  if (CHECK(s != NULL, "%s: %s", name, error ? error : "") &&
      stream_steps(s, tokens->integers, logits->shape[0], logits->shape[1], logits->shape[2], got))
    worst_note(&w[0], common_error(got, logits->floats, logits->count, 0), "steps", "from the file's bytes",
               common_where(got, logits->floats, logits->count));
  luna_stream_close(s);
  free(got), free(memory), free(bytes);
}
static void check_model_file(const char *name) {
  char path[200];
  worst w[WORST] = {{0, ""}};
  file f;
  model_path(path, sizeof path, name, ".expected");
  if (file_open(&f, path) && CHECK(file_find(&f, "", "tokens") && file_find(&f, "", "labels") &&
                                   file_find(&f, "", "logits") && file_find(&f, "", "loss"), "%s lacks something",
                                   path)) {
    for (int i = 0; i < 2 * ISAS; i++)
      if (luna_isa_available(isas[i / 2]) && !(less_here() && i % 2 != (strcmp(name, "model_gated") == 0)))
        check_net(name, &f, isas[i / 2], i % 2 ? LUNA_FORM_FOLDED : LUNA_FORM_UNFOLDED, w);
    if (!ON_DEVICE && common_little_endian() && strcmp(name, "model_softmax") != 0 &&
        strcmp(name, "model_rotary") != 0)
      check_borrowed(name, file_find(&f, "", "tokens"), file_find(&f, "", "logits"), w);
    worst_print(w, name);
    worst_check(w, name);
  }
  file_close(&f);
}

/* ---- sizes that are no multiple of anything; scores and gates on both sides of their clamps ---- */
static const ranges mixed = {18, -6, 22, false}, soft = {3, 2, 5, false}, published = {4, 0, -1, false},
                    routed = {3, -1, 4, true};
static const ranges *const usual[FORMS] = {&soft, &published, &routed};
static void check_sizes(void) {
  static const int64_t rows[8] = {1, 2, 63, 64, 65, 129, 200, 515},
    sizes[6][3] = {{2, 7, 5}, {1, 16, 16}, {3, 32, 16}, {1, 1, 1}, {1, 65, 66}, {1, 5, 33}};
  static const luna_activation omegas[3] = {LUNA_ACTIVATION_DEFAULT, LUNA_ACTIVATION_SOFTPLUS, LUNA_ACTIVATION_ELU1};
  for (int r = 0; r < 8; r++)
    for (int z = 0; z < 6; z++)
      for (int form = 0; form < FORMS; form++) {
        const int64_t *size = sizes[z] /* heads, head_dim, slots */, batch = z == 0 && rows[r] < 200 ? 4 : 1;
        worst w[WORST] = {{0, ""}};
        char what[120];
        if (z > 0 && rows[r] != 65 && ((r + z) % 3 || rows[r] > 200 || z == 4)) continue;
        /* of two rows with scores far apart the gates have a gradient that is rounding's */
        const ranges of = form == GATED && rows[r] > 2 ? mixed : *usual[form];
        call c = call_open(batch, rows[r], size[0], size[1], size[2], of);
        if (form == PUBLISHED) c.horizon = 1 + (r * 37 + z * 11) % 90, c.omega = omegas[(r + z) % 3];
        if (batch > 1) call_mask(&c);
        results want = results_open(&c);
        exact_run(&c, &want);
        call_compare(&c, &want, w);
        snprintf(what, sizeof what, "%s, batch %d, rows %d, heads %d, head_dim %d, slots %d, horizon %d",
                 form_names[form], (int)batch, (int)rows[r], (int)size[0], (int)size[1], (int)size[2],
                 (int)c.horizon);
        worst_check(w, what);
        results_close(&want), call_close(&c);
      }
}

/* a horizon that is not reached changes no bit */
static void check_within(luna_isa isa) {
  static const int64_t horizons[3] = {130, 131, (int64_t)1 << 40};
  luna_ctx *ctx = ctx_open(isa, 2);
  call c = call_open(2, 130, 2, 6, 5, published);
  results none = results_open(&c), got = results_open(&c);
  call_run(ctx, &c, true, &none);
  for (int i = 0; i < 3; i++) {
    c.horizon = horizons[i];
    bool equal = call_run(ctx, &c, true, &got) && same(got.y, none.y, count_of(&c, Q));
    for (int j = 0; j <= S; j++) equal = equal && same(got.grad[j], none.grad[j], count_of(&c, j));
    CHECK(equal, "%s: a horizon of %lld changes 130 rows", luna_isa_name(isa), (long long)horizons[i]);
  }
  c.horizon = 129;
  CHECK(call_run(ctx, &c, false, &got) && !same(got.y, none.y, count_of(&c, Q)), "%s: a horizon of 129 changes nothing",
        luna_isa_name(isa));
  results_close(&none), results_close(&got), call_close(&c);
  luna_close(ctx);
}

/* beyond the clamps all is as at the clamps, to the bit, and has no gradient */
static void check_clamps(luna_isa isa) {
  static const float wild[2][6] = {{INFINITY, -INFINITY, 1e38f, -1e38f, 15.5f, -100},
                                   {INFINITY, -INFINITY, 1e38f, -1e38f, 300, -40}},
    tame[2][6] = {{15, -15, 15, -15, 15, -15}, {200, -30, 200, -30, 200, -30}};
  luna_ctx *ctx = ctx_open(isa, 2);
  call c = call_open(1, 130, 2, 6, 5, mixed);
  results a = results_open(&c), b = results_open(&c);
  const int64_t n = count_of(&c, S);
  for (int ends = 0; ends < 2; ends++) {
    for (int64_t i = 0; i < n; i += 3) {
      c.in[S][i] = (ends ? wild : tame)[0][i / 3 % 6];
      c.in[GATES][n - 1 - i] = (ends ? wild : tame)[1][i / 3 % 6];
    }
    call_run(ctx, &c, true, ends ? &b : &a);
  }
  CHECK(same(a.y, b.y, count_of(&c, Q)), "%s: scores and gates beyond the clamps give other outputs",
        luna_isa_name(isa));
  for (int i = 0; i < S; i++)
    CHECK(same(a.grad[i], b.grad[i], count_of(&c, i)), "%s: beyond the clamps the gradient of %s is another",
          luna_isa_name(isa), input_names[i]);
  int wrong = 0;
  for (int64_t i = 0; i < n; i += 3) wrong += b.grad[S][i] != 0 || b.grad[GATES][n - 1 - i] != 0;
  for (int64_t i = 0; i < n; i++) wrong += !isfinite(b.grad[S][i]) || !isfinite(b.grad[GATES][i]);
  CHECK(wrong == 0, "%s: %d gradients beyond the clamps are not zero, or some not finite", luna_isa_name(isa), wrong);
  results_close(&a), results_close(&b), call_close(&c);
  luna_close(ctx);
}

/* ---- finite differences of luna.h's own outputs, at four points: the error is that of float32 outputs ---- */
/* ---- the function without a context: the op's bits, also of a sequence in pieces, and without scratch to 2e-6 ---- */
static void args_of(const call *c, luna_isa isa, const results *r, luna_causal_nested_args *a) {
  memset(a, 0, sizeof *a);
  a->q = c->in[Q], a->k = c->in[K], a->v = c->in[V], a->s = c->in[S], a->forget = c->in[GATES];
  a->routed = c->routed;
  a->batch = c->batch, a->rows = c->n, a->heads = c->heads, a->head_dim = c->dim / c->heads, a->slots = c->slots;
  a->lengths = c->lengths, a->omega = c->omega, a->horizon = c->horizon, a->run.isa = isa;
  a->out = r->y, a->grad_out = c->grad_out;
  a->grad_q = r->grad[Q], a->grad_k = r->grad[K], a->grad_v = r->grad[V], a->grad_s = r->grad[S];
  a->grad_forget = r->grad[GATES];
}
static void check_pieces(const call *c, luna_causal_nested_args a, const results *want) {
  const int64_t parts[5] = {1, 1, 90, 1, c->n - 93}, numbers = a.heads * a.slots * (2 * a.head_dim + 1);
  double *state = (double *)common_alloc((size_t)numbers * sizeof(double));
  float *y = common_floats(count_of(c, Q));
  for (int64_t i = 0; i < numbers; i++) state[i] = NAN; /* not read */
  a.state = state, a.out = y;
  for (int p = 0; p < 5; p++) {
    a.rows = parts[p];
    CHECK(luna_causal_nested_attention_f32(&a) == LUNA_OK, "a piece of %lld rows", (long long)a.rows);
    a.position += a.rows, a.out += a.rows * c->dim;
    a.q += a.rows * c->dim, a.k += a.rows * c->dim, a.v += a.rows * c->dim, a.s += a.rows * a.heads * a.slots;
    if (a.forget && !a.routed) a.forget += a.rows * a.heads * a.slots;
  }
  test_close("a sequence in pieces", y, want->y, (size_t)count_of(c, Q), OUTPUT_LIMIT);
  CHECK(luna_causal_nested_attention_backward_f32(&a) == LUNA_BAD_ARGUMENT, "backward of a piece");
  free(state), free(y);
}
static void check_function(luna_isa isa, ranges range, int64_t batch, int64_t horizon) {
  call c = call_open(batch, 130, 2, 8, 5, range);
  luna_ctx *ctx = ctx_open(isa, 1);
  c.horizon = horizon;
  if (batch > 1) call_mask(&c);
  for (int64_t b = 0; c.lengths && b < batch; b++) if (c.lengths[b] > c.slots) c.lengths[b] = (int32_t)c.slots;
  results want = results_open(&c), got = results_open(&c);
  luna_causal_nested_args a;
  args_of(&c, isa, &got, &a);
  a.kept = common_floats((a.forget ? 2 : 1) * count_of(&c, S));
  const size_t size = luna_causal_nested_attention_scratch(&a);
  void *scratch = common_alloc(size);
  CHECK(call_run(ctx, &c, true, &want), "the op: %s", luna_error(ctx));
  a.run.scratch = scratch, a.run.scratch_size = size;
  for (int i = 0; i < INPUTS; i++) if (got.grad[i]) memset(got.grad[i], 0, (size_t)count_of(&c, i) * sizeof(float));
  CHECK(luna_causal_nested_attention_f32(&a) == LUNA_OK && same(got.y, want.y, count_of(&c, Q)), "forward differs");
  CHECK(luna_causal_nested_attention_backward_f32(&a) == LUNA_OK, "backward fails");
  for (int i = 0; i < INPUTS; i++)
    CHECK(!got.grad[i] || same(got.grad[i], want.grad[i], count_of(&c, i)), "the gradient of %s differs",
          input_names[i]);
  a.run.scratch = NULL;
  CHECK(luna_causal_nested_attention_f32(&a) == LUNA_OK, "without scratch");
  test_close("without scratch", got.y, want.y, (size_t)count_of(&c, Q), OUTPUT_LIMIT);
  CHECK(luna_causal_nested_attention_backward_f32(&a) == (a.forget ? LUNA_OUT_OF_MEMORY : LUNA_OK),
        "backward of 130 rows in 8 KB");
  a.run.scratch = scratch;
  if (batch == 1) check_pieces(&c, a, &want);
  a.omega = LUNA_ACTIVATION_GELU;
  CHECK(luna_causal_nested_attention_f32(&a) == LUNA_BAD_ARGUMENT, "an omega that is not positive");
  free(a.kept), free(scratch);
  results_close(&want), results_close(&got), call_close(&c);
  luna_close(ctx);
}

static double loss_of(luna_ctx *ctx, const call *c, results *r) {
  double sum = 0;
  if (!call_run(ctx, c, false, r)) return NAN;
  for (int64_t i = 0; i < count_of(c, Q); i++) sum += (double)r->y[i] * (double)c->grad_out[i];
  return sum;
}
static void check_differences(luna_isa isa, int form, luna_activation omega) {
  const double steps[INPUTS] = {0.06, 0.06, 0.06, form == ROUTED ? 0.03 : 0.06, 0.25};
  luna_ctx *ctx = ctx_open(isa, 1);
  call c = call_open(2, 6, 2, 3, 3, *usual[form]);
  if (form == PUBLISHED) c.horizon = 4, c.omega = omega;
  for (int64_t i = 0; form == ROUTED && i < count_of(&c, S); i++) /* steps stay within 0 and 1 - 1/e */
    if (c.in[S][i] > 0) c.in[S][i] = 0.2f + 0.4f * c.in[S][i];
  call_mask(&c);
  results r = results_open(&c), other = results_open(&c);
  if (call_run(ctx, &c, true, &r))
    for (int i = 0; i < INPUTS; i++) {
      if (!c.in[i]) continue;
      float *difference = common_floats(count_of(&c, i));
      for (int64_t j = 0; j < count_of(&c, i); j++) {
        static const double place[4] = {2, 1, -1, -2}, factor[4] = {-1, 8, -8, 1};
        const float kept = c.in[i][j];
        if (!(fabs((double)kept) < 1e30)) continue;     /* masked */
        if (c.routed && i == S && kept == 0) continue;  /* not chosen, and so it stays */
        double sum = 0;
        for (int k = 0; k < 4; k++) {
          c.in[i][j] = kept + (float)(place[k] * steps[i]);
          sum += factor[k] * loss_of(ctx, &c, &other);
        }
        c.in[i][j] = kept;
        difference[j] = (float)(sum / (12 * steps[i]));
      }
      const double error = common_error(r.grad[i], difference, count_of(&c, i), 0);
      CHECK(error <= 1e-3, "%s, %s: the gradient of %s is %.3g off finite differences", luna_isa_name(isa),
            form_names[form], input_names[i], error);
      free(difference);
    }
  results_close(&r), results_close(&other), call_close(&c);
  luna_close(ctx);
}

/* ---- causality: whatever a row is, it changes no bit before it, nor in another sequence or head; a NaN shows ---- */
enum { CHANGES = 7 };
typedef struct causality { luna_ctx *ctx; call c; results before, after; int wrong, lost; } causality;
static float changed(float x, int kind) {
  static const float values[CHANGES] = {0, 1e38f, -3e38f, INFINITY, -INFINITY, NAN, NAN};
  return kind == 0 ? 1.5f - x : values[kind];
}
static void causality_try(causality *t, int input, int64_t row, int kind, bool training) {
  const call *c = &t->c;
  const int64_t width = width_of(c, input), each = width / c->heads, d = c->dim, size = c->n * d;
  float *at = c->in[input] + (c->n + row) * width; /* of the second sequence */
  float *kept = common_floats(width);
  const bool one = kind == CHANGES - 1; /* one number of the first head */
  memcpy(kept, at, (size_t)width * sizeof(float));
  for (int64_t i = 0; i < width; i++) if (!one || i == each / 2) at[i] = changed(at[i], kind);
  if (call_run(t->ctx, c, training, &t->after)) {
    const float *was = t->before.y, *is = t->after.y;
    t->wrong += !same(was, is, size + row * d);
    for (int64_t r = row; one && r < c->n; r++)
      t->wrong += !same(was + size + r * d + d / c->heads, is + size + r * d + d / c->heads, d - d / c->heads);
    /* at the first row there is nothing to forget, and its weight counts for nothing */
    if (kind >= 5 && (row > 0 || input < S)) {
      const float seen = is[size + row * d + (input < S ? each / 2 : 0)];
      t->lost += seen == seen;
    }
  }
  memcpy(at, kept, (size_t)width * sizeof(float));
  free(kept);
}
static void check_causality(luna_isa isa, int form) {
  static const int64_t rows[5] = {0, 1, 63, 64, 129};
  causality t;
  memset(&t, 0, sizeof t);
  t.ctx = ctx_open(isa, 2);
  t.c = call_open(2, 130, 2, 6, 3, *usual[form]);
  if (form == PUBLISHED) t.c.horizon = 50;
  t.before = results_open(&t.c), t.after = results_open(&t.c);
  call_run(t.ctx, &t.c, false, &t.before);
  for (int input = 0; input < (form == GATED ? INPUTS : GATES); input++)
    for (int r = 0; r < 5; r++)
      for (int kind = 0; kind < CHANGES; kind += ON_DEVICE ? 3 : 1)
        if (!less_here() || (input + r) % 3 == 0) causality_try(&t, input, rows[r], kind, (r + kind) % 2 == 0);
  CHECK(t.wrong == 0, "%s, %s: %d times something before or beside a row changed", luna_isa_name(isa),
        form_names[form], t.wrong);
  CHECK(t.lost == 0, "%s, %s: %d times a NaN was lost", luna_isa_name(isa), form_names[form], t.lost);
  results_close(&t.before), results_close(&t.after), call_close(&t.c);
  luna_close(t.ctx);
}
/* the same of models: the last token's embedding is what becomes odd, and with it its own column of the logits */
static void check_model_causality(const char *name, luna_isa isa) {
  enum { N = 130 };
  static const int64_t rows[3] = {0, 64, N - 1};
  net m;
  if (net_open(&m, name, isa, LUNA_FORM_CHEAPEST, false)) {
    const int64_t vocab = m.lm.config.vocab, dim = m.lm.config.layer.dim, size = N * vocab;
    int32_t *tokens = common_tokens(2 * N, 5, (int32_t)vocab - 1);
    float *before = common_floats(2 * size), *after = common_floats(2 * size);
    int wrong = 0, lost = 0;
    luna_begin_inference(m.ctx);
    luna_read(net_forward(&m, tokens, 2, N), before);
    for (int kind = 1; kind < CHANGES; kind += 2)
      for (int r = 0; r < 3; r++) {
        const int64_t at = N + rows[r];
        const int32_t kept = tokens[at];
        for (int64_t i = 0; i < dim; i++) m.lm.embedding->data[(vocab - 1) * dim + i] = changed(0, kind);
        tokens[at] = (int32_t)vocab - 1;
        luna_begin_inference(m.ctx);
        luna_read(net_forward(&m, tokens, 2, N), after);
        tokens[at] = kept;
        for (int64_t row = 0; row < at; row++) wrong += !same(before + row * vocab, after + row * vocab, vocab - 1);
        lost += same(before + at * vocab, after + at * vocab, vocab - 1);
      }
    CHECK(wrong == 0 && lost == 0, "%s, %s: %d rows before an odd token changed, %d times it did not show", name,
          luna_isa_name(isa), wrong, lost);
    free(tokens), free(before), free(after);
  }
  luna_close(m.ctx);
}

/* ---- the same bits for any number of threads, and of a sequence in any place ---- */
static void check_threads(luna_isa isa, int64_t batch, int form) {
  static const int threads[4] = {1, 2, 3, 7};
  call c = call_open(batch, 1000, 2, 8, 8, form == GATED ? mixed : *usual[form]);
  if (form == PUBLISHED) c.horizon = 300;
  if (batch > 1) call_mask(&c), c.lengths[1] = 6;
  results first = results_open(&c), r = results_open(&c);
  for (int i = 0; i < 4; i++) {
    luna_ctx *ctx = ctx_open(isa, threads[i]);
    bool equal = call_run(ctx, &c, true, i ? &r : &first) && (!i || same(r.y, first.y, count_of(&c, Q)));
    for (int j = 0; i && j < INPUTS; j++)
      equal = equal && (!c.in[j] || same(r.grad[j], first.grad[j], count_of(&c, j)));
    CHECK(equal, "%s, %s, batch %d: other bits with %d threads", luna_isa_name(isa), form_names[form], (int)batch,
          threads[i]);
    equal = call_run(ctx, &c, false, &r) && same(r.y, first.y, count_of(&c, Q));
    CHECK(equal, "%s, %s, batch %d, %d threads: inference has other bits", luna_isa_name(isa), form_names[form],
          (int)batch, threads[i]);
    if (i == 0 && batch > 1) {
      call alone = c;
      alone.batch = 1, alone.grad_out += (batch - 1) * c.n * c.dim, alone.lengths += batch - 1;
      for (int j = 0; j < INPUTS; j++)
        if (c.in[j] && per_row(&c, j)) alone.in[j] += (batch - 1) * c.n * width_of(&c, j);
      equal = call_run(ctx, &alone, true, &r) && same(r.y, first.y + (batch - 1) * c.n * c.dim, count_of(&alone, Q));
      for (int j = 0; j < INPUTS; j++)
        equal = equal && (!c.in[j] || !per_row(&c, j) ||
                          same(r.grad[j], first.grad[j] + (batch - 1) * c.n * width_of(&c, j), count_of(&alone, j)));
      CHECK(equal, "%s, %s: the last sequence alone has other bits", luna_isa_name(isa), form_names[form]);
    }
    luna_close(ctx);
  }
  results_close(&first), results_close(&r), call_close(&c);
}

/* ---- long ---- */
/* forward at once, by prefills and by single steps */
static void check_long_stream(const char *name, int64_t n) {
  static const int64_t parts[6] = {1, 64, 63, 300, 5, 1000};
  net m;
  if (net_open(&m, name, LUNA_ISA_BEST, LUNA_FORM_CHEAPEST, false)) {
    const int64_t vocab = m.lm.config.vocab, shape[3] = {1, n, vocab}, last = n / 2 * vocab;
    int32_t *tokens = common_tokens(n, 8, (int32_t)vocab);
    float *whole = common_floats(n * vocab), *steps = common_floats(n * vocab), *prefills = common_floats(n * vocab);
    luna_begin_step(m.ctx);              /* longer sequences than those of training follow */
    CHECK(net_forward(&m, tokens, 1, 70) != NULL, "%s: %s", name, luna_error(m.ctx));
    luna_stream *s = luna_stream_open(&m.lm, NULL);
    luna_begin_inference(m.ctx);
    luna_read(net_forward(&m, tokens, 1, n), whole);
    if (CHECK(s != NULL, "luna_stream_open: %s", luna_error(m.ctx)) && stream_steps(s, tokens, 1, n, vocab, steps)) {
      test_close("single steps beside the whole", steps, whole, (size_t)(n * vocab), OUTPUT_LIMIT);
      test_close("the last half of the steps beside the whole", steps + n * vocab - last, whole + n * vocab - last,
                 (size_t)last, OUTPUT_LIMIT);
      luna_stream_reset(s);
      if (stream_prefills(s, tokens, shape, parts, prefills, whole)) {
        const double error = rows_error(prefills, whole, shape, parts),
                     beside = rows_error(prefills, steps, shape, parts);
        CHECK(error <= OUTPUT_LIMIT && beside <= OUTPUT_LIMIT,
              "%s: prefills of %d tokens are off by %.3g, and by %.3g beside steps", name, (int)n, error, beside);
      }
      printf(NAME ": %s, %d tokens: steps %.2g beside the whole\n", name, (int)n,
             common_error(steps, whole, n * vocab, 0));
    }
    luna_stream_close(s);
    free(tokens), free(whole), free(steps), free(prefills);
  }
  luna_close(m.ctx);
}
/* no drift: the last steps of a long stream, beside all rows at once of the last tokens alone. A routed memory has
   forgotten the others. */
static void check_drift(const char *name, int64_t n) {
  enum { TAIL = 6000, LAST = 1000 };
  net m;
  if (net_open(&m, name, LUNA_ISA_BEST, LUNA_FORM_CHEAPEST, false)) {
    const int64_t vocab = m.lm.config.vocab, count = LAST * vocab;
    int32_t *tokens = common_tokens(n, 9, (int32_t)vocab);
    float *whole = common_floats(TAIL * vocab), *steps = common_floats(count);
    luna_stream *s = luna_stream_open(&m.lm, NULL);
    luna_begin_inference(m.ctx);
    luna_read(net_forward(&m, tokens + n - TAIL, 1, TAIL), whole);
    bool good = CHECK(s != NULL, "luna_stream_open: %s", luna_error(m.ctx)) != 0;
    for (int64_t t = 0; good && t < n - LAST; t++) good = luna_stream_step(s, tokens + t) != NULL;
    if (CHECK(good, "%s: a step: %s", name, luna_stream_error(s)) &&
        stream_steps(s, tokens + n - LAST, 1, LAST, vocab, steps))
      test_close("the last steps of a long stream", steps, whole + TAIL * vocab - count, (size_t)count, OUTPUT_LIMIT);
    luna_stream_close(s);
    free(tokens), free(whole), free(steps);
  }
  luna_close(m.ctx);
}
/* What rows write: scores at both ends, or the most to one slot; or the most to each slot in turn, so that what it
   holds fades to 0 before it is written to again. */
enum { AS_DRAWN, AT_ENDS, IN_TURN };
static void call_write(call *c, int writes) {
  for (int64_t j = 0; writes != AS_DRAWN && j < count_of(c, S); j++) {
    const int64_t slot = j % c->slots, turn = writes == IN_TURN ? j / c->slots * 5 / c->n % c->slots : 0;
    if (c->routed) c->in[S][j] = slot == turn ? MOST : 0;
    else c->in[S][j] = c->in[S][j] < 0 ? -FAR : FAR;
  }
}
/* a slot that alone is written to, with weights around the one below which it is empty: nothing is read then */
static void check_empty(luna_isa isa) {
  static const float weights[3] = {0, 0.98e-12f, 1.06e-12f};
  const ranges lasting = {3, -40, 0, true};
  luna_ctx *ctx = ctx_open(isa, 1);
  for (int i = 0; i < 3; i++) {
    call c = call_open(1, 1, 1, 4, 2, lasting);
    results want = results_open(&c), got = results_open(&c);
    c.in[S][0] = weights[i], c.in[S][1] = 0;
    exact_run(&c, &want);
    const bool good = call_run(ctx, &c, true, &got) &&
                      common_error(got.y, want.y, count_of(&c, Q), 1e-6) <= OUTPUT_LIMIT;
    CHECK(good && (rms(got.y, count_of(&c, Q)) > 0) == (i == 2), "%s: a slot that weighs %g", luna_isa_name(isa),
          (double)weights[i]);
    for (int j = 0; j < INPUTS && i < 2; j++)
      CHECK(max_of(got.grad[j], count_of(&c, j)) == 0, "%s: %s of a slot that weighs %g has a gradient",
            luna_isa_name(isa), input_names[j], (double)weights[i]);
    results_close(&want), results_close(&got), call_close(&c);
  }
  luna_close(ctx);
}
/* single rows with a state, of slots that fade to 0 before they are written to again */
static void check_turns(luna_isa isa, int64_t n) {
  const ranges fastest = {3, 40, 0, true};
  call c = call_open(1, n, 2, 3, 3, fastest);
  call_write(&c, IN_TURN);
  results want = results_open(&c), got = results_open(&c);
  luna_causal_nested_args a;
  exact_run(&c, &want);
  args_of(&c, isa, &got, &a);
  a.rows = 1;
  a.state = (double *)common_alloc((size_t)(a.heads * a.slots * (2 * a.head_dim + 1)) * sizeof(double));
  bool good = true;
  for (; a.position < n && good; a.position++) {
    good = luna_causal_nested_attention_f32(&a) == LUNA_OK;
    a.out += c.dim, a.q += c.dim, a.k += c.dim, a.v += c.dim, a.s += a.heads * a.slots;
  }
  const double error = common_error(got.y, want.y, count_of(&c, Q), 0);
  CHECK(good && error <= OUTPUT_LIMIT, "%s: slots that fade to 0 are off by %.3g", luna_isa_name(isa), error);
  free(a.state);
  results_close(&want), results_close(&got), call_close(&c);
}
/* gates and scores at their ends, against the recurrence in double */
static void check_extremes(int64_t n) {
  static const struct { const char *what; ranges r; int writes; int64_t horizon; } cases[] = {
    {"never forgetting", {2, 40, 0, false}, AS_DRAWN, 0},
    {"never forgetting, scores of -15 and 15", {1, 40, 0, false}, AT_ENDS, 0},
    {"seldom forgetting", {3, 8, 2, false}, AS_DRAWN, 0},
    {"-1 throughout, scores of -15 and 15", {1, -40, 0, false}, AT_ENDS, 0},
    {"just above -1, scores of -15 and 15", {1, -15.9, 0.05, false}, AT_ENDS, 0},
    {"a horizon", {4, 0, -1, false}, AS_DRAWN, 100},
    {"no horizon", {4, 0, -1, false}, AS_DRAWN, 0},
    {"routed", {3, -6, 0, true}, AS_DRAWN, 0},
    {"routed, never fading", {3, -40, 0, true}, AS_DRAWN, 0},
    {"routed, fading fastest", {3, 40, 0, true}, AS_DRAWN, 0},
    {"routed, never fading, all in one slot", {3, -40, 0, true}, AT_ENDS, 0},
    {"routed, fading fastest, all in one slot", {3, 40, 0, true}, AT_ENDS, 0},
    {"routed, fading fastest, one slot after the other", {3, 40, 0, true}, IN_TURN, 0}};
  for (int i = 0; i < (int)(sizeof cases / sizeof cases[0]); i += less_here() ? 2 : 1) {
    worst w[WORST] = {{0, ""}};
    char what[100];
    call c = call_open(1, n, 1, 2, cases[i].r.routed ? 3 : 2, cases[i].r);
    c.horizon = cases[i].horizon;
    call_write(&c, cases[i].writes);
    results want = results_open(&c);
    exact_run(&c, &want);
    call_compare(&c, &want, w);
    snprintf(what, sizeof what, "%s, %d rows", cases[i].what, (int)n);
    worst_print(w, what);
    worst_check(w, what);
    results_close(&want), call_close(&c);
  }
}

/* the same bits whatever order a device's threads come in, and no finding about its kernels */
#ifdef FORGETTING_CUDA
static void check_orders(const ranges *of) {
  call c = call_open(2, 2200, 2, 5, 3, *of);
  results first = results_open(&c), r = results_open(&c);
  luna_ctx *ctx = ctx_open(LUNA_ISA_BEST, 1);
  for (unsigned seed = 1; seed <= (less_here() ? 2u : 3u); seed++) {
    cuda_seed(seed);
    bool equal = call_run(ctx, &c, true, seed > 1 ? &r : &first);
    for (int j = -1; seed > 1 && j < INPUTS; j++)
      equal = equal && same(j < 0 ? r.y : r.grad[j], j < 0 ? first.y : first.grad[j], count_of(&c, j < 0 ? Q : j));
    CHECK(equal, "in order %u: other bits", seed);
  }
  luna_close(ctx);
  results_close(&first), results_close(&r), call_close(&c);
}
static void check_device(void) {
  const char *message = "";
  check_orders(&mixed);
  check_orders(&routed);
  CHECK(cuda_errors(&message) == 0, "%llu findings about kernels, the first: %s", cuda_errors(&message), message);
  CHECK(cuda_allocated() == 0, "%zu bytes are left on the device", cuda_allocated());
}
#else
static void check_device(void) {}
#endif

int main(void) {
  static const char *const ops[] = {"one_row", "lengths", "heads", "one_slot", "tied", "slots", "never", "seldom",
                                    "clamped", "edge", "mixed", "horizon_1", "horizon_2", "horizon_7", "horizon_64",
                                    "horizon_100", "routed_one_row", "routed_heads", "routed_rows", "routed_faded"};
  const bool full = test_full();
#ifdef FORGETTING_CUDA
  char why[400];
  if (cuda_absent(why, sizeof why)) return CHECK(0, "%s", why), test_report(NAME);
#endif
  for (size_t i = 0; i < sizeof ops / sizeof ops[0]; i++) check_op_file(ops[i]);
  check_route_file("routed_route");
  for (int i = 0; i < MODELS; i++)
    if (!less_here() || i % 3 == 0) check_model_file(model_names[i]);
  check_sizes();
  for (int i = 0; i < ISAS; i++) {
    const luna_isa isa = isas[i];
    if (!luna_isa_available(isa)) continue;
    check_within(isa);
    check_clamps(isa);
    for (int k = 0; k < 6 && !ON_DEVICE; k++)
      check_function(isa, *usual[k / 2], k % 2 ? 3 : 1, k % 2 ? 0 : 50);
    for (int form = 0; form < FORMS; form++) check_causality(isa, form);
    for (int m = 0; m < MODELS && !ON_DEVICE; m++) check_model_causality(model_names[m], isa);
    check_empty(isa);
    if (!ON_DEVICE) check_turns(isa, TEST_QUICK ? 2000 : 16000);
    for (int k = 0; k < 2 * FORMS && isa != LUNA_ISA_REFERENCE && !ON_DEVICE; k++)
      check_threads(isa, k % 2 ? 3 : 1, k / 2);
  }
  for (int k = 0; k < 2 && !ON_DEVICE; k++) {
    const luna_isa isa = k ? LUNA_ISA_REFERENCE : LUNA_ISA_BEST;
    for (int form = 0; form < FORMS; form++) check_differences(isa, form, LUNA_ACTIVATION_DEFAULT);
    check_differences(isa, PUBLISHED, LUNA_ACTIVATION_ELU1);
  }
  for (int i = 0; i < STREAMED; i += less_here() ? 3 : 1)
    check_long_stream(model_names[i], less_here() ? 150 : ON_DEVICE ? 300 : full ? 100000 : TEST_QUICK ? 1000 : 10000);
  if (!ON_DEVICE) check_drift("model_routed", full ? 1 << 20 : TEST_QUICK ? 8000 : 1 << 16);
  check_extremes(less_here() ? 2200 : ON_DEVICE ? 4500 : full ? 1 << 20 : TEST_QUICK ? 2000 : 1 << 14);
  check_device();
  return test_report(NAME);
}
