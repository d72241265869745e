/* Ops: every instruction set against the reference; values against naive loops in double; fused against composed,
   folded against unfolded, ragged against alone; views; what is refused and how it is said. Gradients themselves:
   tests/engine/gradients.c. */
#include "test.h"
#define LUNA_IMPLEMENTATION
#include "luna.h"
#include "examples/luna_print.h"
#include "op_cases.h"

static luna_ctx *open_plain(luna_isa isa) {
  luna_options options = {0};
  options.threads = 2;
  options.isa = isa;
  return luna_open(&options);
}

/* ---- every case on every instruction set, and on three threads, against the reference ---- */
static void compare_trials(const trial *got, const trial *expected, const char *what, double output_limit,
                           double gradient_limit) {
  for (int i = 0; i < expected->outputs; i++) {
    const double error = common_error(got->output[i].values, expected->output[i].values, expected->output[i].count,
                                      1e-3);
    CHECK(error <= output_limit, "%s: output %d is off by %.3g", what, i, error);
  }
  for (int i = 0; i < expected->inputs; i++) {
    const double error = common_error(got->input[i].gradient, expected->input[i].gradient, expected->input[i].count,
                                      0.1); /* sums of numbers about 1 that cancel */
    CHECK(error <= gradient_limit, "%s: the gradient of input %d is off by %.3g", what, i, error);
  }
}
static void check_isas(const op_case *c, int variant, bool big) {
  trial reference, other;
  char what[128];
  memset(&reference, 0, sizeof reference);
  reference.big = big;
  reference.options.isa = LUNA_ISA_REFERENCE;
  reference.options.threads = 1;
  if (!CHECK(trial_run(&reference, c, variant, true), "%s, variant %d: %s", c->name, variant, reference.error)) {
    trial_free(&reference);
    return;
  }
  for (int i = 0; i < COMMON_ISAS; i++) {
    if (!luna_isa_available(common_isas[i]) || common_isas[i] == LUNA_ISA_REFERENCE) continue;
    memset(&other, 0, sizeof other);
    other.big = big;
    other.options.isa = common_isas[i];
    other.options.threads = 3;
    snprintf(what, sizeof what, "%s, variant %d%s, %s", c->name, variant, big ? ", big" : "",
             luna_isa_name(common_isas[i]));
    if (CHECK(trial_run(&other, c, variant, true), "%s: %s", what, other.error))
      compare_trials(&other, &reference, what, 2e-6, 4e-5);
    trial_free(&other);
  }
  trial_free(&reference);
}

/* ---- every op against its oracle: on the reference and on the best instruction set, sizes small and big ---- */
static luna_op_kind oracle_last;           /* the op that ran last */
static bool oracle_met[LUNA_OP_COUNT];     /* whose results were compared */
static int oracle_results;                 /* that were compared */
static luna_status oracle_forward(luna_op *op) {
  oracle_last = op->kind;
  return luna_cpu_backend()->op[op->kind].forward(op);
}
static void oracle_compared(void) {
  oracle_met[oracle_last] = true;
  oracle_results++;
}
static void check_oracle(const op_case *c, int variant, const luna_backend *table) {
  for (int mode = 0; mode < 4; mode++) {
    trial t;
    memset(&t, 0, sizeof t);
    t.big = mode & 1;
    t.oracles = true;
    t.compared = oracle_compared;
    t.options.backend = table;
    t.options.isa = mode & 2 ? LUNA_ISA_BEST : LUNA_ISA_REFERENCE;
    t.options.threads = 2;
    if (CHECK(trial_run(&t, c, variant, false), "%s, variant %d: %s", c->name, variant, t.error))
      CHECK(t.off < 2e-6, "%s, variant %d, %s%s: %.3g off its oracle", c->name, variant, t.big ? "big, " : "",
            luna_isa_name(t.options.isa), t.off);
    trial_free(&t);
  }
}
/* Cases whose first variant has no oracle are those of layers. all: else until one fails */
static void check_oracles(bool all) {
  luna_backend table = *luna_cpu_backend();
  for (int kind = 0; kind < LUNA_OP_COUNT; kind++) table.op[kind].forward = oracle_forward;
  for (int i = 0; i < OP_CASES; i++) {
    const int before = oracle_results;
    check_oracle(&op_cases[i], 0, &table);
    for (int v = 1; oracle_results > before && v < op_cases[i].variants; v++) check_oracle(&op_cases[i], v, &table);
    if (test_failed && !all) return;
  }
  oracle_met[LUNA_OP_SINUSOIDS] = true;    /* in tests/models/positions.c: it is part of a layer alone */
  for (int kind = 0; kind < LUNA_OP_COUNT; kind++)
    CHECK(oracle_met[kind], "%s has no oracle beside its case", luna_op_name((luna_op_kind)kind));
}

/* ---- fused ops against their compositions: the same cases on a backend without tier 2 ---- */
static void check_composed(const op_case *c, int variant) {
  luna_backend tier1 = *luna_cpu_backend();
  trial fused, composed;
  char what[128];
  memset(&fused, 0, sizeof fused);
  memset(&composed, 0, sizeof composed);
#define TIER(name, tier, reads, cheap) \
  if (tier == 2) tier1.op[LUNA_OP_##name].forward = NULL;
#define TIER_EACH(name, tier, reads, cheap, function, inputs, value, da, db, dc)
  LUNA_OPS(TIER, TIER_EACH)
#undef TIER
#undef TIER_EACH
  fused.big = composed.big = true;
  composed.options.backend = &tier1;
  snprintf(what, sizeof what, "%s, variant %d, composed", c->name, variant);
  if (CHECK(trial_run(&fused, c, variant, true), "%s, fused: %s", what, fused.error) &&
      CHECK(trial_run(&composed, c, variant, true), "%s: %s", what, composed.error))
    compare_trials(&composed, &fused, what, 2e-6, 2e-5);
  trial_free(&fused);
  trial_free(&composed);
}

/* ---- folded against unfolded, with the same dropout masks ---- */
static void run_form(trial *t, int v) { /* sharing, dropout, lengths; t->options.form is set before */
  static const int32_t lengths[3] = {6, 29, 0};
  luna_nested_attention_layer layer;
  luna_layer_config config = {0};
  luna_tensor *packed_context = NULL;
  config.dim = 40;
  config.heads = 5;
  config.pack_heads = 4;
  config.sharing = (luna_sharing)(v % 4);
  config.attention_dropout = v & 4 ? 0.25f : 0;
  if (luna_nested_attention_layer_init(&layer, trial_params(t, t->options.form), "", &config)) t->broken = true;
  luna_tensor *x = in3(t, 3, 21, 40), *p = in3(t, 3, 8, 40), *context = in3(t, 3, 29, 40);
  in_params(t);
  give(t, luna_nested_attention_layer_forward(&layer, x, p, context, v & 8 ? lengths : NULL, &packed_context));
  give(t, packed_context);
}
static void check_forms(void) {
  static const op_case c = {"folded against unfolded", run_form, 16};
  for (int v = 0; v < c.variants; v++) {
    trial unfolded, folded;
    char what[64];
    memset(&unfolded, 0, sizeof unfolded);
    memset(&folded, 0, sizeof folded);
    unfolded.options.form = LUNA_FORM_UNFOLDED;
    folded.options.form = LUNA_FORM_FOLDED;
    snprintf(what, sizeof what, "%s, variant %d", c.name, v);
    if (CHECK(trial_run(&unfolded, &c, v, true), "%s: %s", what, unfolded.error) &&
        CHECK(trial_run(&folded, &c, v, true), "%s: %s", what, folded.error))
      compare_trials(&folded, &unfolded, what, 2e-6, 2e-5);
    trial_free(&unfolded);
    trial_free(&folded);
  }
}

/* ---- values against loops in double ---- */
static void naive_causal(int64_t batch, int64_t n, int64_t heads, int64_t d1, int64_t d2, const float *x,
                         const float *y, const float *z,
                         float *out) {
  double *s = (double *)common_alloc((size_t)(d1 * d2) * sizeof(double));
  for (int64_t b = 0; b < batch; b++)
    for (int64_t h = 0; h < heads; h++) {
      memset(s, 0, (size_t)(d1 * d2) * sizeof(double));
      for (int64_t t = 0; t < n; t++) {
        const int64_t at = (b * n + t) * heads + h;
        for (int64_t i = 0; i < d1; i++)
          for (int64_t j = 0; j < d2; j++) s[i * d2 + j] += (double)y[at * d1 + i] * (double)z[at * d2 + j];
        for (int64_t j = 0; j < d2; j++) {
          double sum = 0;
          for (int64_t i = 0; i < d1; i++) sum += (double)x[at * d1 + i] * s[i * d2 + j];
          out[at * d2 + j] = (float)(sum / (double)(t + 1));
        }
      }
    }
  free(s);
}
static const char *values_isa = ""; /* what check_values runs on */
/* a tensor's values against what is expected, within 2e-6 */
static void expect_values(luna_ctx *ctx, const char *what, const luna_tensor *t, const float *expected, int64_t n) {
  char name[96];
  snprintf(name, sizeof name, "%s (%s)", what, values_isa);
  if (CHECK(t && luna_count(t) == n, "%s: %lld elements, not %lld: %s", name, (long long)luna_count(t), (long long)n,
            luna_error(ctx)))
    test_close(name, t->data, expected, (size_t)n, 2e-6);
}

static void check_values_maps(luna_ctx *ctx) {
  static const luna_activation kinds[6] = {LUNA_ACTIVATION_NONE, LUNA_ACTIVATION_RELU, LUNA_ACTIVATION_GELU,
                                           LUNA_ACTIVATION_ELU1, LUNA_ACTIVATION_SOFTPLUS, LUNA_ACTIVATION_SOFTPLUS2};
  const int64_t n = 2001;
  float *x = common_random(n, 1, 1), *y = common_floats(n);
  for (int64_t i = 0; i < n; i++) x[i] = x[i] * (i % 3 == 0 ? 90.0f : i % 3 == 1 ? 8.0f : 1e-3f);
  luna_begin_inference(ctx);
  luna_tensor *t = luna_tensor_new(ctx, x, 1, &n);
  for (int k = 0; k < 6; k++) {
    double worst = 0;
    luna_tensor *a = luna_activate(t, kinds[k]);
    for (int64_t i = 0; a && i < n; i++) {
      const double expected = naive_activation(kinds[k], (double)x[i]), off = fabs((double)a->data[i] - expected);
      if (off / (fabs(expected) + 1e-6) > worst) worst = off / (fabs(expected) + 1e-6);
      y[i] = (float)expected;
    }
    expect_values(ctx, "activation", a, y, n);
    CHECK(worst < 2e-5 || kinds[k] == LUNA_ACTIVATION_GELU, "activation %d (%s) is off by %.3g relative", (int)kinds[k],
          values_isa, worst);
  }
  free(x);
  free(y);
}

static void check_values_made(luna_ctx *ctx) {
  const float three[2] = {3, 3};
  const int64_t many = 4000;
  const luna_init normal = {LUNA_INIT_NORMAL, 2}, uniform = {LUNA_INIT_UNIFORM, 3};
  float *drawn = common_floats(many), *again = common_floats(many);
  for (int k = 0; k < 2; k++) { /* a normal's variance is 4, a uniform's 3; the same seed, and another */
    double mean = 0, square = 0;
    luna_read(luna_tensor_random(ctx, k ? uniform : normal, 1, 1, &many), drawn);
    for (int64_t i = 0; i < many; i++) mean += (double)drawn[i] / 4000,
        square += (double)drawn[i] * (double)drawn[i] / 4000;
    CHECK(fabs(mean) < 0.15 && fabs(square - (k ? 3 : 4)) < 0.4, "random numbers of mean %g, square %g", mean, square);
    luna_read(luna_tensor_random(ctx, k ? uniform : normal, 1, 1, &many), again);
    CHECK(memcmp(drawn, again, (size_t)many * sizeof(float)) == 0, "one seed gives two tensors");
    luna_read(luna_tensor_random(ctx, k ? uniform : normal, 2, 1, &many), again);
    CHECK(memcmp(drawn, again, 8 * sizeof(float)) != 0, "two seeds give one tensor");
  }
  free(drawn), free(again);
  expect_values(ctx, "one number", luna_tensor_full(ctx, 3, 1, (const int64_t[1]){2}), three, 2);
}

/* LUNA_ACTIVATION_NONE is none also where the default is another */
static void check_values_no_activation(luna_ctx *ctx) {
  enum { M = 3 };
  const int64_t shape[2] = {M, M};
  float *x = common_random(M * M, 5, 1), *w = common_random(M * M, 6, 1), y[M * M], again[M * M];
  luna_begin_inference(ctx);
  luna_tensor *tx = luna_tensor_new(ctx, x, 2, shape), *tw = luna_tensor_new(ctx, w, 2, shape);
  const luna_feed_forward_config none = {.activation = LUNA_ACTIVATION_NONE},
      relu = {.activation = LUNA_ACTIVATION_RELU};
  luna_read(luna_linear(luna_linear(tx, tw, NULL), tw, NULL), y);
  expect_values(ctx, "a feed-forward without activation", luna_feed_forward(tx, tw, NULL, tw, NULL, &none), y, M * M);
  luna_read(luna_feed_forward(tx, tw, NULL, tw, NULL, &relu), y);
  expect_values(ctx, "a feed-forward by default", luna_feed_forward(tx, tw, NULL, tw, NULL, NULL), y, M * M);
  luna_gemm_args g = {.a = x, .b = w, .c = y, .m = M, .n = M, .k = M};
  luna_gemm_f32(&g);
  g.activation = LUNA_ACTIVATION_NONE, g.c = again;
  CHECK(luna_gemm_f32(&g) == LUNA_OK && memcmp(y, again, sizeof y) == 0, "a product without activation is another");
  free(x), free(w);
}

/* broadcasting, in shapes that join and shapes that do not, beside loops over four axes */
static void check_values_broadcast(luna_ctx *ctx) {
  static const int64_t shapes[6][2][4] = {{{2, 3, 4, 5}, {2, 3, 4, 5}}, {{1, 3, 1, 5}, {2, 1, 4, 1}},
                                          {{2, 1, 1, 5}, {1, 3, 4, 1}},
                                          {{2, 3, 1, 1}, {2, 3, 4, 5}}, {{1, 1, 1, 1}, {2, 3, 4, 5}},
                                              {{2, 1, 4, 5}, {1, 3, 4, 5}}};
  luna_begin_inference(ctx);
  for (int v = 0; v < 12; v++) {
    const int64_t *a = shapes[v % 6][v / 6], *b = shapes[v % 6][1 - v / 6];
    const int64_t na = a[0] * a[1] * a[2] * a[3], nb = b[0] * b[1] * b[2] * b[3];
    float *x = common_random(na, 31, 1), *y = common_random(nb, 32, 1), *want = common_floats(120),
        *picked = common_floats(120);
    for (int64_t i = 0; i < 120; i++) {
      const int64_t at[4] = {i / 60, i / 20 % 3, i / 5 % 4, i % 5};
      int64_t ia = 0, ib = 0;
      for (int k = 0; k < 4; k++) ia = ia * a[k] + at[k] % a[k], ib = ib * b[k] + at[k] % b[k];
      want[i] = (float)((double)x[ia] - (double)y[ib]);
      picked[i] = x[ia] < y[ib] ? x[ia] : 7;
    }
    luna_tensor *tx = luna_tensor_new(ctx, x, 4, a), *ty = luna_tensor_new(ctx, y, 4, b),
        *seven = luna_add_scalar(luna_scale(ty, 0), 7);
    expect_values(ctx, "broadcast sub", luna_sub(tx, ty), want, 120);
    expect_values(ctx, "broadcast where", luna_where(luna_greater(ty, tx), tx, seven), picked, 120);
    free(x), free(y), free(want), free(picked);
  }
  const int64_t none[2] = {0, 3}, three = 3;
  luna_tensor *empty = luna_add(luna_tensor_new(ctx, NULL, 2, none), luna_tensor_new(ctx, NULL, 1, &three));
  CHECK(empty && luna_count(empty) == 0 && empty->shape[1] == 3, "a sum of no rows: %s", luna_error(ctx));
  const int64_t quotients[2] = {3, 3};
  const float parts[9] = {1e-40f, 3e-40f, 1e-40f, INFINITY, 1, 0, 2, 6, 2}, quotient[6] = {1, 3, 0, 0, 1, 3};
  luna_tensor *ratio = luna_ratio(luna_tensor_new(ctx, parts, 2, quotients));
  for (int i = 0; i < 6; i++)
    CHECK(ratio && fabs((double)(ratio->data[i] - quotient[i])) < 1e-4, "a ratio of %g, not %g",
          ratio ? (double)ratio->data[i] : NAN, (double)quotient[i]);
  const int64_t narrow[2] = {3, 0};
  const int32_t ignored[3] = {-1, -1, -1};
  luna_begin_step(ctx);
  luna_tensor *loss = luna_cross_entropy(luna_require_grad(luna_tensor_new(ctx, NULL, 2, narrow)), ignored, NULL);
  CHECK(luna_backward(loss) == LUNA_OK && luna_item(loss) == 0, "the loss of no classes: %s", luna_error(ctx));
}

typedef struct printed { char text[2000]; } printed;
static void print_to(void *user, const char *text) {
  printed *p = (printed *)user;
  const size_t at = strlen(p->text);
  snprintf(p->text + at, sizeof p->text - at, "%s", text);
}
static void check_printed(luna_ctx *ctx, const float *values, int rank, const int64_t *shape, const char *want) {
  printed p = {{0}};
  luna_tensor *t = luna_tensor_new(ctx, values, rank, shape);
  const luna_status status = luna_print(t, print_to, &p);
  CHECK(status == LUNA_OK && strcmp(p.text, want) == 0, "printed is\n%snot\n%s", p.text, want);
}
static void check_host_results(luna_ctx *ctx) {
  const float x[10] = {3, -1, 7, 7, 0, 2, NAN, 5, -INFINITY, NAN},
      numbers[12] = {1, -2.5f, 0, 1e7f, 4, 5, 6, 7, 8, 9, 10, (float)NAN};
  const int32_t order[6] = {2, 3, 0, 1, 4, 2}, first[2] = {2, 1};
  const int64_t shape[2] = {2, 5}, cube[3] = {2, 2, 3}, one = 1, wide[2] = {7, 1000}, none[2] = {3, 0};
  int32_t indices[6];
  float values[6];
  luna_begin_inference(ctx);
  luna_tensor *t = luna_tensor_new(ctx, x, 2, shape);
  CHECK(luna_top_k(t, 3, indices, values) == LUNA_OK && memcmp(indices, order, sizeof order) == 0 && values[0] == 7 &&
        values[2] == 3 &&
          values[3] != values[3] && values[5] == 5, "top 3: %d %d %d, %d %d %d", indices[0], indices[1], indices[2],
              indices[3], indices[4], indices[5]);
  CHECK(luna_argmax(t, indices) == LUNA_OK && memcmp(indices, first, sizeof first) == 0, "argmax: %d %d", indices[0],
        indices[1]);
  CHECK(luna_top_k(t, 6, indices, NULL) == LUNA_BAD_ARGUMENT && strstr(luna_error(ctx), "k is 6, outside 1..5"),
        "top 6 of 5: %s", luna_error(ctx));
  luna_begin_inference(ctx);
  check_printed(ctx, numbers, 3, cube,
                "[[[   1 -2.5    0]\n  [ 1e7    4    5]]\n\n [[   6    7    8]\n  [   9   10  NaN]]]\n");
  check_printed(ctx, numbers + 1, 1, &one, "[-2.5]\n");
  check_printed(ctx, numbers + 1, 0, NULL, "-2.5\n");
  check_printed(ctx, NULL, 2, none, "[]\n");
  check_printed(ctx, NULL, 2, wide,
                "[[0 0 0 ... 0 0 0]\n [0 0 0 ... 0 0 0]\n [0 0 0 ... 0 0 0]\n ...\n [0 0 0 ... 0 0 0]\n"
                                    " [0 0 0 ... 0 0 0]\n [0 0 0 ... 0 0 0]]\n");
}

/* beside libm's, NaN and Inf too; pow's gradient at 0; parts of an axis */
/* what luna_weighted_cross_entropy refuses, and that weights of 1 change nothing */
static void check_weighted(luna_ctx *ctx) {
  enum { ROWS = 3, CLASSES = 4 };
  const int64_t shape[2] = {ROWS, CLASSES};
  const int32_t labels[ROWS] = {2, -1, 3}, beyond[ROWS] = {2, -1, 4}, none[ROWS] = {-1, -1, -1};
  const float ones[CLASSES] = {1, 1, 1, 1};
  luna_cross_entropy_config c = {0};
  for (int bad = 0; bad < 3; bad++) {
    float weights[CLASSES] = {1, bad == 0 ? -1.0f : bad == 1 ? INFINITY : NAN, 1, 1};
    luna_begin_inference(ctx);
    luna_tensor *x = common_tensor(ctx, 5, ROWS, CLASSES, 0, 0);
    CHECK(!luna_weighted_cross_entropy(x, labels, weights, NULL) &&
          strstr(luna_error(ctx), "luna_weighted_cross_entropy: weights[1] is "), "%s", luna_error(ctx));
  }
  luna_begin_inference(ctx);
  luna_tensor *x = luna_tensor_new(ctx, NULL, 2, shape);
  CHECK(!luna_weighted_cross_entropy(x, beyond, ones, NULL) &&
        strstr(luna_error(ctx), "labels[2] is 4; there are 4 classes"), "%s", luna_error(ctx));
  luna_begin_inference(ctx);
  x = luna_tensor_new(ctx, NULL, 2, shape);
  CHECK(!luna_weighted_cross_entropy(x, NULL, ones, NULL) && strstr(luna_error(ctx), "labels is null"), "%s",
        luna_error(ctx));
  luna_begin_inference(ctx);
  x = luna_tensor_new(ctx, NULL, 2, shape);
  c.smoothing = 1.5f;
  CHECK(!luna_weighted_cross_entropy(x, labels, ones, &c) && strstr(luna_error(ctx), "smoothing is 1.5"), "%s",
        luna_error(ctx));
  luna_begin_inference(ctx);
  CHECK(!luna_weighted_cross_entropy(NULL, labels, ones, NULL), "a loss of null");
  x = common_tensor(ctx, 5, ROWS, CLASSES, 0, 0);
  CHECK(!luna_greater(x, common_tensor(ctx, 5, ROWS, 0, 0, 0)) &&
        strstr(luna_error(ctx), "luna_greater: [3,4] and [3] do not broadcast"), "%s", luna_error(ctx));
  luna_begin_inference(ctx);
  c.smoothing = 0.2f;
  x = common_tensor(ctx, 5, ROWS, CLASSES, 0, 0);
  luna_tensor *plain = luna_cross_entropy(x, labels, &c), *loss = luna_weighted_cross_entropy(x, labels, ones, &c);
  CHECK(fabsf(luna_item(loss) - luna_item(plain)) < 1e-6f && luna_counted(loss) == 2, "%g, without weights %g",
        (double)luna_item(loss), (double)luna_item(plain));
  loss = luna_weighted_cross_entropy(x, none, ones, NULL);
  CHECK(luna_item(loss) == 0 && luna_counted(loss) == 0, "no label counts: %g", (double)luna_item(loss));
  c.sum = true;
  CHECK(luna_counted(luna_weighted_cross_entropy(x, labels, ones, &c)) == -1, "a sum is a mean");
}
static void check_functions(luna_ctx *ctx) {
  static const float values[] = {0, -0.0f, 0.5f, -3, 100, -12345.678f, 3e8f, 2e9f, 1e38f, INFINITY, -INFINITY, NAN};
  enum { COUNT = sizeof values / sizeof values[0] };
  const int64_t shape[2] = {2, COUNT / 2};
  luna_tensor *x = luna_tensor_new(ctx, values, 2, shape), *parts[3], *none[2] = {x, x};
  luna_tensor *got[4] = {luna_sin(x), luna_cos(x), luna_pow(x, 2), luna_pow(x, -0.5f)};
  for (int f = 0; f < 4; f++)
    for (int i = 0; i < COUNT && CHECK(got[f] != NULL, "function %d: %s", f, luna_error(ctx)); i++) {
      const double v = (double)values[i], want = f == 0 ? sin(v) : f == 1 ? cos(v) : pow(v, f == 2 ? 2 : -0.5);
      const float y = got[f]->data[i];
      CHECK(isnan(want) ? isnan(y) : (float)want == y || fabs((double)y - want) <= 1e-7 * fabs(want),
            "function %d of %g is %.9g, not %.9g", f, v, (double)y, want);
    }
  CHECK(luna_split(x, 1, parts, 3) == LUNA_OK && parts[2]->shape[1] == COUNT / 6 &&
        parts[1]->data[0] == values[COUNT / 6],
        "three parts: %s", luna_error(ctx));
  CHECK(luna_split(x, 0, parts, 3) == LUNA_BAD_ARGUMENT && !parts[0] &&
        strstr(luna_error(ctx), "which are not 3 equal parts"),
        "2 rows are 3 parts");
  luna_begin_inference(ctx);
  CHECK(luna_split(NULL, 0, none, 2) == LUNA_BAD_ARGUMENT && !none[1], "parts of null");
  x = luna_tensor_new(ctx, values, 1, &shape[0]);
  CHECK(luna_split(x, 1, none, 1) == LUNA_BAD_ARGUMENT &&
        strstr(luna_error(ctx), "luna_split: tensor [2] has no axis 1"),
        "parts along an axis that is not there");
  luna_begin_inference(ctx);
}

/* a sequence in two pieces has the bits of the whole */
static void check_rotary(luna_ctx *ctx) {
  enum { B = 2, N = 150, H = 3, D = 6, WIDTH = H * D, FIRST = 90 };
  const int64_t shape[3] = {B, N, WIDTH};
  float *values = (float *)malloc(B * N * WIDTH * sizeof(float));
  for (int i = 0; i < B * N * WIDTH; i++) values[i] = sinf(0.37f * (float)i);
  luna_tensor *x = luna_tensor_new(ctx, values, 3, shape), *y = luna_rotary(x, H, FIRST, 500);
  luna_tensor *parts[2] = {luna_rotary(luna_slice(x, 1, 0, 47), H, FIRST, 500),
                           luna_rotary(luna_slice(x, 1, 47, N - 47), H, FIRST + 47, 500)};
  luna_tensor *whole = luna_concat(parts, 2, 1);
  CHECK(y && whole && memcmp(y->data, whole->data, B * N * WIDTH * sizeof(float)) == 0, "rotary positions in pieces");
  free(values);
}

static void check_values(luna_isa isa) {
  luna_ctx *ctx = open_plain(isa);
  values_isa = luna_isa_name(isa);
  check_values_maps(ctx);
  check_values_no_activation(ctx);
  check_values_made(ctx);
  check_values_broadcast(ctx);
  check_rotary(ctx);
  check_functions(ctx);
  check_weighted(ctx);
  check_host_results(ctx);
  luna_close(ctx);
}

/* ---- ragged, padded and alone: the same bits ---- */
enum { PACK_PARTS = 4, PACK_DIM = 30, PACK_MOST = 600 };
static const int32_t pack_lengths[PACK_PARTS] = {37, 1, 600, 0};

/* [batch, rows, PACK_DIM], or [rows, PACK_DIM] for batch 0 */
static luna_tensor *pack_input(luna_ctx *ctx, const float *values, int64_t batch, int64_t rows) {
  const int64_t shape[3] = {batch, rows, PACK_DIM};
  return luna_require_grad(luna_tensor_new(ctx, values, batch ? 3 : 2, batch ? shape : shape + 1));
}
static void check_packed(luna_isa isa, bool causal) {
  const int64_t total = 638, numbers = total * PACK_DIM;
  float *x[3], *out = common_floats(numbers), *grads = common_floats(3 * numbers),
      *one = common_floats(PACK_MOST * PACK_DIM),
               *part = common_floats(3 * PACK_MOST * PACK_DIM);
  int32_t offsets[PACK_PARTS + 1] = {0};
  luna_ctx *ctx = open_plain(isa);
  luna_attention_config config = {0};
  for (int i = 0; i < 3; i++) x[i] = common_random(numbers, 30 + (uint64_t)i, 1);
  for (int i = 0; i < PACK_PARTS; i++) offsets[i + 1] = offsets[i] + pack_lengths[i];
  config.heads = 3;
  config.causal = causal;
  config.sequences = PACK_PARTS;
  config.query_offsets = config.key_offsets = offsets;
  luna_begin_step(ctx);
  luna_tensor *q = pack_input(ctx, x[0], 0, total), *k = pack_input(ctx, x[1], 0, total),
      *v = pack_input(ctx, x[2], 0, total);
  luna_tensor *y = luna_softmax_attention(q, k, v, &config);
  const int64_t flat[2] = {1, numbers};
  CHECK(luna_backward(luna_sum(luna_reshape(luna_mul(y, y), 2, flat), 1)) == LUNA_OK && luna_read(y, out) == LUNA_OK,
        "ragged: %s",
        luna_error(ctx));
  luna_read_grad(q, grads), luna_read_grad(k, grads + numbers), luna_read_grad(v, grads + 2 * numbers);
  config.sequences = 0;
  config.query_offsets = config.key_offsets = NULL;
  for (int i = 0; i < PACK_PARTS; i++) {
    const int64_t at = (int64_t)offsets[i] * PACK_DIM, n = (int64_t)pack_lengths[i] * PACK_DIM, alone_flat[2] = {1, n};
    if (n == 0) continue;
    luna_begin_step(ctx);
    luna_tensor *a = pack_input(ctx, x[0] + at, 1, pack_lengths[i]),
        *b = pack_input(ctx, x[1] + at, 1, pack_lengths[i]),
                *c = pack_input(ctx, x[2] + at, 1, pack_lengths[i]);
    luna_tensor *alone = luna_softmax_attention(a, b, c, &config);
    if (!CHECK(luna_backward(luna_sum(luna_reshape(luna_mul(alone, alone), 2, alone_flat), 1)) == LUNA_OK, "alone: %s",
               luna_error(ctx)))
      continue;
    luna_read(alone, one);
    CHECK(memcmp(one, out + at, (size_t)n * sizeof(float)) == 0, "%s%s: ragged sequence %d has other bits than alone",
          luna_isa_name(isa),
          causal ? ", causal" : "", i);
    luna_read_grad(a, part), luna_read_grad(b, part + n), luna_read_grad(c, part + 2 * n);
    for (int g = 0; g < 3; g++)
      CHECK(memcmp(part + g * n, grads + g * numbers + at, (size_t)n * sizeof(float)) == 0,
            "%s%s: the gradient of %c of ragged sequence %d has other bits than alone", luna_isa_name(isa),
                causal ? ", causal" : "",
            "qkv"[g], i);
  }
  luna_close(ctx);
  free(out), free(grads), free(one), free(part);
  for (int i = 0; i < 3; i++) free(x[i]);
}

/* padded to the longest, in any place of the batch: the same bits as alone, whatever lies behind the lengths */
static void check_padded(luna_isa isa) {
  const int64_t m = 600, n = 21, d = PACK_DIM;
  static const int32_t lengths[3] = {37, 600, 513};
  float *q = common_random(3 * n * d, 40, 1), *k = common_random(3 * m * d, 41, 1),
      *v = common_random(3 * m * d, 42, 1);
  for (int b = 0; b < 3; b++)
    for (int64_t i = lengths[b] * d; i < m * d; i++) k[b * m * d + i] = v[b * m * d + i] = NAN;
  luna_ctx *ctx = open_plain(isa);
  luna_attention_config config = {0};
  config.heads = 3;
  config.lengths = lengths;
  for (int mode = 0; mode < 2; mode++) { /* softmax attention; pack */
    luna_begin_step(ctx);
    luna_tensor *tq = pack_input(ctx, q, 3, n), *tk = pack_input(ctx, k, 3, m),
        *tv = mode ? tk : pack_input(ctx, v, 3, m);
    luna_tensor *y = mode ? luna_pack(tq, tk, &(luna_pack_config){ lengths, 0, NULL }) :
                         luna_softmax_attention(tq, tk, tv, &config);
    if (!CHECK(y && luna_backward(common_loss(y, 3)) == LUNA_OK, "padded: %s", luna_error(ctx))) continue;
    int64_t bad = 0, touched = 0;
    for (int64_t i = 0; i < luna_count(y); i++) bad += !isfinite(y->data[i]) || !isfinite(tq->grad[i]);
    for (int64_t i = 0; i < 3 * m * d; i++)
      if (i / d % m >= lengths[i / (m * d)]) touched += tk->grad[i] != 0 || tv->grad[i] != 0;
      else bad += !isfinite(tk->grad[i]) || !isfinite(tv->grad[i]);
    CHECK(bad == 0, "%s, mode %d: NaN behind the lengths reached %lld numbers", luna_isa_name(isa), mode,
          (long long)bad);
    CHECK(touched == 0, "%s, mode %d: %lld gradients behind the lengths are not zero", luna_isa_name(isa), mode,
          (long long)touched);
    float *kept = common_floats(luna_count(y));
    luna_read(y, kept);
    luna_begin_inference(ctx);
    for (int b = 0; b < 3; b++) {
      luna_attention_config one = {0};
      one.heads = 3;
      tq = pack_input(ctx, q + b * n * d, 1, n), tk = pack_input(ctx, k + b * m * d, 1, lengths[b]),
      tv = pack_input(ctx, v + b * m * d, 1, lengths[b]);
      y = mode ? luna_pack(tq, tk, NULL) : luna_softmax_attention(tq, tk, tv, &one);
      CHECK(y && memcmp(y->data, kept + b * n * d, (size_t)(n * d) * sizeof(float)) == 0,
            "%s, mode %d: padded sequence %d has other bits than alone", luna_isa_name(isa), mode, b);
    }
    free(kept);
  }
  luna_close(ctx);
  free(q), free(k), free(v);
}

/* masked memory slots of unpack and of causal nested attention hold NaN */
static void check_slots(luna_isa isa) {
  static const int32_t lengths[2] = {2, 4};
  luna_ctx *ctx = open_plain(isa);
  luna_begin_step(ctx);
  luna_tensor *x = luna_require_grad(common_tensor(ctx, 1, 2, 9, 12, 0)),
      *k = luna_require_grad(common_tensor(ctx, 2, 2, 3, 5, 12));
  luna_tensor *bias = luna_require_grad(common_tensor(ctx, 3, 2, 3, 5, 0)),
      *v = luna_require_grad(common_tensor(ctx, 4, 2, 3, 5, 12));
  for (int64_t i = 0; i < 2 * 3 * 5; i++)
    if (i % 5 >= lengths[i / 15]) {
      bias->data[i] = NAN;
      for (int e = 0; e < 12; e++) k->data[i * 12 + e] = v->data[i * 12 + e] = NAN;
    }
  luna_tensor *y = luna_unpack(x, k, bias, v, &(luna_unpack_config){.lengths = lengths});
  if (CHECK(y && luna_backward(common_loss(y, 5)) == LUNA_OK, "unpack: %s", luna_error(ctx))) {
    int64_t bad = 0;
    for (int64_t i = 0; i < luna_count(y); i++) bad += !isfinite(y->data[i]) || !isfinite(x->grad[i]);
    for (int64_t i = 0; i < luna_count(k); i++)
      bad += i / 12 % 5 >= lengths[i / 180] ? k->grad[i] != 0 || v->grad[i] != 0 : !isfinite(k->grad[i]) ||
          !isfinite(v->grad[i]);
    CHECK(bad == 0, "%s: NaN in masked memory slots reached %lld numbers of unpack", luna_isa_name(isa),
          (long long)bad);
  }
  luna_close(ctx);
}

/* luna_route where values are equal, far apart or beyond the clamp: the lower index is chosen, and what is not chosen
   gets 0 and has no gradient */
static void check_ties(luna_isa isa) {
  enum { ROWS = 10, SLOTS = 5 };
  static const float router[ROWS][SLOTS] = {
    {1, 1, 1, 1, 1}, {0, 2, 2, 2, 0}, {3, 1, 1, 1, 1}, {-1, -1, 4, -1, 4}, {-300, -301, -302, -300, -300},
    {1e4f, -1e4f, -1e4f, -2e4f, -3e4f}, {-3e38f, 3e38f, 3e38f, 0, 0}, {-0.0f, 0, -1, 0, -0.0f},
    {-INFINITY, 2, -INFINITY, -INFINITY, -INFINITY}, {1, 2, 3, 4, 5}};
  static const float strength[ROWS] = {0, 1, -1, 15, 15.5f, 1e30f, -16, INFINITY, 2, -INFINITY};
  const int64_t shape[3] = {1, ROWS, SLOTS}, narrow[3] = {1, ROWS, 1};
  luna_ctx *ctx = open_plain(isa);
  luna_begin_step(ctx);
  luna_tensor *x = luna_require_grad(luna_tensor_new(ctx, router[0], 3, shape)),
              *a = luna_require_grad(luna_tensor_new(ctx, strength, 3, narrow)), *y = luna_route(x, a);
  if (CHECK(y && luna_backward(common_loss(y, 5)) == LUNA_OK, "luna_route: %s", luna_error(ctx)))
    for (int row = 0; row < ROWS; row++) {
      double want[SLOTS];
      naive_route(router[row], SLOTS, (double)strength[row], want);
      for (int s = 0; s < SLOTS; s++) {
        const double got = (double)y->data[row * SLOTS + s], slope = (double)x->grad[row * SLOTS + s];
        CHECK(fabs(got - want[s]) <= 2e-6 * want[s], "%s, row %d: slot %d gets %.9g, not %.9g", luna_isa_name(isa), row,
              s, got, want[s]);
        CHECK(want[s] > 0 ? isfinite(slope) : slope == 0, "%s, row %d: slot %d has the gradient %g", luna_isa_name(isa),
              row, s, slope);
      }
      const bool beyond = fabs((double)strength[row]) > 15;
      CHECK(isfinite(a->grad[row]) && (beyond ? a->grad[row] == 0 : a->grad[row] != 0),
            "%s: strength %g has the gradient %g", luna_isa_name(isa), (double)strength[row], (double)a->grad[row]);
    }
  for (int at = 0; at < 2 * SLOTS; at++) { /* a NaN, or two, are chosen, so they show */
    float odd[SLOTS] = {1, 2, 3, 4, 5};
    odd[at % SLOTS] = odd[at < SLOTS ? at : 0] = (float)NAN;
    const int64_t one[3] = {1, 1, SLOTS}, single[3] = {1, 1, 1};
    y = luna_route(luna_tensor_new(ctx, odd, 3, one), luna_tensor_new(ctx, strength, 3, single));
    CHECK(y && isnan(y->data[at % SLOTS]), "%s: a NaN for slot %d is lost", luna_isa_name(isa), at % SLOTS);
  }
  luna_close(ctx);
}

/* ---- views ---- */
static void check_views(void) {
  luna_ctx *ctx = open_plain(LUNA_ISA_BEST);
  const int64_t shape[2] = {6, 4}, back[3] = {2, -1, 4};
  luna_begin_step(ctx);
  luna_tensor *x = luna_require_grad(common_tensor(ctx, 1, 6, 4, 0, 0));
  luna_tensor *rows = luna_slice(x, 0, 2, 3), *column = luna_slice(x, 1, 2, 1), *inner = luna_slice(rows, 0, 1, 2),
              *cube = luna_reshape(x, 3, back);
  if (!CHECK(x && rows && column && inner && cube, "views: %s", luna_error(ctx))) {
    luna_close(ctx);
    return;
  }
  CHECK(rows->data == x->data + 8 && inner->data == x->data + 12 && cube->data == x->data,
        "a slice of axis 0 or a reshape is not a view");
  CHECK(rows->base == x && inner->base == x && cube->base == x,
        "a view's owner is wrong");
  CHECK(column->data != x->data + 2 && !column->base && column->data[1] == x->data[6],
        "a slice of axis 1 is not a copy of the column");
  CHECK(cube->rank == 3 && cube->shape[0] == 2 && cube->shape[1] == 3 && cube->shape[2] == 4 && cube->shape[3] == 1,
        "reshape with -1 gives [%lld,%lld,%lld]", (long long)cube->shape[0], (long long)cube->shape[1],
            (long long)cube->shape[2]);
  CHECK(luna_count(NULL) == 0 && luna_count(x) == 24 && x->rank == 2 && x->shape[2] == 1 &&
        x->dtype == LUNA_DTYPE_F32 && x->ctx == ctx,
        "a tensor's fields are wrong");
  CHECK(luna_slice(x, 0, 6, 0) && luna_count(luna_slice(x, 0, 0, 0)) == 0, "an empty slice: %s", luna_error(ctx));
  luna_tensor *loss = luna_add(common_loss(inner, 1), common_loss(luna_reshape(cube, 2, shape), 2));
  CHECK(luna_backward(loss) == LUNA_OK, "backward through views: %s", luna_error(ctx));
  float whole[24], piece[8];
  CHECK(luna_read_grad(x, whole) == LUNA_OK && luna_read_grad(inner, piece) == LUNA_OK &&
        memcmp(piece, whole + 12, sizeof piece) == 0,
        "a view's gradient is not its part of the owner's");
  for (int i = 0; i < 24; i++) {
    const double expected =
        (double)(float)common_number(2, (uint64_t)i) + (i >= 12 &&
            i < 20 ? (double)(float)common_number(1, (uint64_t)(i - 12)) : 0);
    CHECK(fabs((double)whole[i] - expected) < 1e-6, "gradient %d through views is %g, expected %g", i, (double)whole[i],
          expected);
  }
  luna_close(ctx);
}

static void check_items(void) {
  luna_ctx *ctx = open_plain(LUNA_ISA_BEST);
  const int64_t one = 1, two = 2;
  const float value = 2.5f, pair[2] = {1, 2};
  float out[2] = {0, 0};
  luna_begin_inference(ctx);
  luna_tensor *a = luna_tensor_new(ctx, &value, 1, &one), *b = luna_tensor_new(ctx, pair, 1, &two),
              *zeros = luna_tensor_new(ctx, NULL, 1, &two);
  luna_tensor *scalar = luna_sum(b, 0);
  CHECK(luna_item(a) == 2.5f && scalar && luna_count(scalar) == 1 && luna_item(scalar) == 3,
        "luna_item gives %g and %g",
        (double)luna_item(a), (double)luna_item(scalar));
  CHECK(luna_read(b, out) == LUNA_OK && out[1] == 2 && luna_read(zeros, out) == LUNA_OK && out[0] == 0 && out[1] == 0,
        "luna_read does not read");
  CHECK(luna_error_status(ctx) == LUNA_OK, "reading is an error: %s", luna_error(ctx));
  CHECK(isnan(luna_item(b)) && luna_error_status(ctx) != LUNA_OK, "luna_item of two elements is no error");
  CHECK(isnan(luna_item(NULL)) && luna_read(NULL, out) != LUNA_OK && luna_read(b, NULL) != LUNA_OK, "null can be read");
  luna_begin_inference(ctx);
  b = luna_tensor_new(ctx, pair, 1, &two);
  CHECK(luna_read_grad(b, out) != LUNA_OK && luna_error_id_of(ctx) == LUNA_ERROR_NO_GRAD,
      "a gradient that is not there can be read");
  luna_close(ctx);
}

/* ---- an op's result gives its gradient back, unless it was asked for; what was computed forward stays ---- */
static void check_gradients_kept(void) {
  const int64_t shape[2] = {3, 4}, flat[1] = {-1};
  luna_ctx *ctx = open_plain(LUNA_ISA_BEST);
  float values[12], grad[12];
  for (int i = 0; i < 12; i++) values[i] = (float)i;
  luna_begin_step(ctx);
  luna_tensor *x = luna_require_grad(luna_tensor_new(ctx, values, 2, shape)),
      *asked = luna_require_grad(luna_scale(x, 2)), *view = luna_reshape(asked, 1, flat);
  luna_tensor *other = luna_relu(view), *viewed = luna_scale(other, 3),
      *again = luna_require_grad(luna_reshape(viewed, 2, shape));
  CHECK(luna_backward(luna_sum(luna_reshape(luna_relu(again), 1, flat), 0)) == LUNA_OK, "backward: %s",
        luna_error(ctx));
  CHECK(luna_read_grad(x, grad) == LUNA_OK && grad[0] == 0 && grad[5] == 6, "x: %s", luna_error(ctx));
  CHECK(luna_read_grad(asked, grad) == LUNA_OK && grad[5] == 3 && luna_read_grad(view, grad) == LUNA_OK && grad[5] == 3,
        "a result that was asked for: %s", luna_error(ctx));
  CHECK(luna_read_grad(again, grad) == LUNA_OK && grad[5] == 1, "a view that was asked for: %s", luna_error(ctx));
  CHECK(!other->grad && luna_read_grad(other, grad) != LUNA_OK && luna_error_id_of(ctx) == LUNA_ERROR_NO_GRAD,
      "a result without luna_require_grad kept its gradient");
  CHECK(luna_read(other, grad) == LUNA_OK && grad[5] == 10, "a result can no longer be read after backward");
  luna_close(ctx);
}

/* ---- views whose owner has no gradient of its own ---- */
static void check_gradients_of_views(void) {
  const int64_t shape[2] = {3, 4}, flat[1] = {-1}, row[2] = {1, 4};
  luna_ctx *ctx = open_plain(LUNA_ISA_BEST);
  luna_params *params = luna_params_open(ctx);
  luna_tensor *w = luna_param(params, "w", 2, shape, (luna_init){LUNA_INIT_NORMAL, 1}), *lse = w, *sums = w;
  float grad[12];
  for (int step = 0; step < 3; step++) { /* memory that was written to is used again */
    luna_begin_step(ctx);
    luna_params_zero_grad(params);
    luna_tensor *each = luna_sum(luna_mul(luna_exp(w), luna_add_scalar(w, 3)), 1);
    CHECK(luna_backward(luna_slice(each, 0, step, 1)) == LUNA_OK && luna_read_grad(w, grad) == LUNA_OK, "%s",
          luna_error(ctx));
    for (int i = 0; i < 12; i++)
      CHECK((grad[i] != 0) == (i / 4 == step), "loss %d has gradient %g of number %d", step, (double)grad[i], i);
  }

  luna_begin_step(ctx);
  luna_params_zero_grad(params);
  luna_tensor *cut = luna_require_grad(luna_detach(luna_scale(w, 2)));
  CHECK(luna_backward(luna_sum(luna_reshape(luna_mul(cut, cut), 1, flat), 0)) == LUNA_OK &&
        luna_read_grad(cut, grad) == LUNA_OK && fabsf(grad[5] - 4 * w->data[5]) < 1e-5f, "%s", luna_error(ctx));
  CHECK(luna_read_grad(w, grad) == LUNA_OK && grad[5] == 0, "a gradient of %g goes through luna_detach",
        (double)grad[5]);

  /* a constant that is broadcast, and a view of it that wants a gradient */
  luna_begin_step(ctx);
  luna_tensor *h = luna_tensor_full(ctx, 2, 2, row), *y = luna_mul(h, w),
              *r = luna_require_grad(luna_reshape(h, 1, flat)), *z = luna_mul(r, r);
  CHECK(luna_backward(luna_add(luna_sum(luna_reshape(y, 1, flat), 0), luna_sum(z, 0))) == LUNA_OK &&
        luna_read_grad(r, grad) == LUNA_OK && grad[0] == 4 && grad[3] == 4, "a view of a constant has gradient %g: %s",
        (double)grad[0], luna_error(ctx));

  luna_begin_step(ctx);
  CHECK(!luna_softmax_attention(NULL, w, w, &(luna_attention_config){.log_sum_exp = &lse}) && !lse &&
        !luna_pack(NULL, w, &(luna_pack_config){.sums = &sums}) && !sums, "a failed op leaves a second result");
  luna_close(ctx);
}

/* ---- refusals: null, the error's id, and a sentence that names the function ---- */
typedef struct refusal {
  int logged;
} refusal;
static void refusal_log(void *user, luna_status status, const char *sentence) {
  (void)status;
  ((refusal *)user)->logged += sentence[0] != 0;
}
static void refused(luna_ctx *ctx, const void *result, luna_error_id id, const char *call) {
  const char *said = luna_error(ctx);
  const size_t named = strcspn(said, ":"); /* luna_cross_entropy for luna_cross_entropy */
  CHECK(!result, "%s gives a tensor", call);
  CHECK(luna_error_status(ctx) == LUNA_BAD_ARGUMENT, "%s leaves the state \"%s\"", call,
        luna_status_text(luna_error_status(ctx)));
  CHECK(luna_error_id_of(ctx) == id, "%s leaves error %d, not %d: \"%s\"", call, (int)luna_error_id_of(ctx), (int)id,
      said);
  CHECK(named > 0 && strncmp(said, call, named) == 0, "%s says \"%s\"", call, said);
}
#define REFUSED(call, id) (luna_begin_step(ctx), refused(ctx, call, LUNA_ERROR_##id, #call))

static luna_tensor *refusal_param(luna_params *params, const char *name, int64_t a, int64_t b, int64_t c) {
  const int64_t shape[3] = {a, b, c};
  const luna_init init = {LUNA_INIT_NORMAL, 1};
  return luna_param(params, name, c ? 3 : b ? 2 : 1, shape, init);
}

static void check_refusals_shapes(luna_ctx *ctx, luna_params *params) {
  luna_tensor *a = refusal_param(params, "a", 37, 41, 0), *b = refusal_param(params, "b", 43, 47, 0),
              *v = refusal_param(params, "v", 53, 0, 0);
  luna_tensor *cube = refusal_param(params, "cube", 3, 41, 36), *many[9] = {a, b, a, a, a, a, a, a, a};
  const int64_t wrong[2] = {5, 7}, twice[2] = {-1, -1}, five[5] = {37, 41, 1, 1, 1}, negative[2] = {-37, -41},
                huge[2] = {(int64_t)1 << 40, (int64_t)1 << 40};
  const int same[2] = {1, 1}, outside[2] = {0, 2};
  REFUSED(luna_reshape(a, 2, wrong), RESHAPE);
  REFUSED(luna_reshape(a, 2, twice), RESHAPE);
  REFUSED(luna_reshape(a, 5, five), VALUE_RANGE);
  REFUSED(luna_reshape(a, 2, negative), RESHAPE);
  REFUSED(luna_slice(a, 2, 0, 1), AXIS);
  REFUSED(luna_slice(a, -1, 0, 1), AXIS);
  REFUSED(luna_slice(a, 0, 30, 8), SLICE_RANGE);
  REFUSED(luna_slice(a, 1, -1, 2), SLICE_RANGE);
  REFUSED(luna_slice(a, 1, 1, -2), SLICE_RANGE);
  REFUSED(luna_slice(a, 1, INT64_MAX, 2), SLICE_RANGE);
  REFUSED(luna_permute(a, same), PERMUTE_AXES);
  REFUSED(luna_permute(a, outside), PERMUTE_AXES);
  REFUSED(luna_concat(many, 2, 0), CONCAT_SHAPES);
  REFUSED(luna_concat(many, 9, 0), TOO_MANY_TENSORS);
  CHECK(!luna_concat(many, 0, 0) && !luna_concat(NULL, 2, 0), "concat of nothing");
  REFUSED(luna_concat(many + 2, 2, 2), AXIS);
  REFUSED(luna_expand(a, -3), VALUE_RANGE);
  REFUSED(luna_expand(a, (int64_t)1 << 60), SHAPE);
  REFUSED(luna_add(a, b), BROADCAST);
  REFUSED(luna_sub(v, a), BROADCAST);
  REFUSED(luna_less(a, v), BROADCAST);
  REFUSED(luna_where(a, a, v), BROADCAST);
  REFUSED(luna_clamp(a, 1, (float)NAN), CLAMP);
  REFUSED(luna_sum(a, 2), AXIS);
  REFUSED(luna_mean(a, -1), AXIS);
  REFUSED(luna_matmul(a, b, false, false), MATMUL_INNER);
  REFUSED(luna_matmul(a, a, true, true), MATMUL_INNER);
  REFUSED(luna_matmul(v, a, false, false), MATMUL_AXES);
  REFUSED(luna_matmul(b, cube, true, false), MATMUL_AXES);
  REFUSED(luna_layer_norm(a, NULL, NULL, -1), EPSILON);
  REFUSED(luna_rms_norm(a, NULL, (float)NAN), EPSILON);
  REFUSED(luna_rotary(a, 1, 0, 0), SHAPES);
  REFUSED(luna_rotary(cube, 1, -1, 0), VALUE_RANGE);
  REFUSED(luna_rotary(cube, 1, 0, -1), ROTARY_BASE);
  REFUSED(luna_rotary(cube, 1, 0, INFINITY), ROTARY_BASE);
  REFUSED(luna_linear(a, b, NULL), SHAPES);
  REFUSED(luna_linear(a, a, v), SHAPES);
  REFUSED(luna_linear(a, v, NULL), SHAPES);
  REFUSED(luna_tensor_new(ctx, NULL, 5, five), VALUE_RANGE);
  REFUSED(luna_tensor_new(ctx, NULL, 2, negative), SHAPE);
  REFUSED(luna_tensor_new(ctx, NULL, 2, huge), SHAPE);
}

static void check_refusals_rows(luna_ctx *ctx, luna_params *params) {
  luna_tensor *a = luna_params_find(params, "a"), *b = luna_params_find(params, "b"),
      *v = luna_params_find(params, "v"),
              *cube = luna_params_find(params, "cube");
  int32_t lengths[37] = {0}, tokens[4] = {0, 5, 36, 2}, labels[37] = {0};
  luna_cross_entropy_config config = {0};
  lengths[3] = -1;
  REFUSED(luna_softmax(a, lengths), ELEMENT_RANGE);
  REFUSED(luna_activate(a, (luna_activation)77), VALUE_RANGE);
  REFUSED(luna_dropout(a, 1), PROBABILITY);
  REFUSED(luna_dropout(a, -0.1f), PROBABILITY);
  REFUSED(luna_dropout(a, NAN), PROBABILITY);
  REFUSED(luna_layer_norm(a, v, NULL, 0), SHAPES);
  REFUSED(luna_layer_norm(a, NULL, v, 0), SHAPES);
  tokens[2] = 37;
  REFUSED(luna_embedding(a, tokens, 2, 2), ELEMENT_RANGE);
  tokens[2] = -1;
  REFUSED(luna_embedding(a, tokens, 2, 2), ELEMENT_RANGE);
  REFUSED(luna_embedding(a, tokens, -2, 2), SHAPE);
  REFUSED(luna_embedding(a, NULL, 2, 2), NULL_ARGUMENT);
  REFUSED(luna_embedding(v, tokens, 2, 2), SHAPES);
  labels[9] = 41;
  REFUSED(luna_cross_entropy(a, labels, NULL), LABEL_RANGE);
  REFUSED(luna_cross_entropy(a, NULL, NULL), NULL_ARGUMENT);
  labels[9] = 1030;
#define LARGE common_tensor(ctx, 1, 1030, 41, 0, 0)
  REFUSED(luna_linear_cross_entropy(a, LARGE, NULL, labels, NULL), LABEL_RANGE);
  REFUSED(luna_linear_cross_entropy(a, LARGE, NULL, NULL, NULL), NULL_ARGUMENT);
  REFUSED(luna_linear_cross_entropy(a, LARGE, v, labels, NULL), SHAPES);
  REFUSED(luna_linear_cross_entropy(b, LARGE, NULL, labels, NULL), SHAPES);
  labels[9] = 0;
  config.smoothing = 1.5f;
  REFUSED(luna_cross_entropy(a, labels, &config), SMOOTHING);
  REFUSED(luna_linear_cross_entropy(a, LARGE, NULL, labels, &config), SMOOTHING);
#undef LARGE
  REFUSED(luna_short_convolution(a, b, NULL), SHAPES);
  REFUSED(luna_short_convolution(cube, b, NULL), SHAPES);
  REFUSED(luna_custom_op(&a, 1, 1, (const int64_t[1]){3}, NULL), NULL_ARGUMENT);
  luna_tensor *const nine[9] = {a, a, a, a, a, a, a, a, a};
  REFUSED(luna_custom_op(nine, 9, 1, (const int64_t[1]){3}, &(luna_custom){.forward = op_custom_forward}),
      TOO_MANY_TENSORS);
}

static void check_refusals_attention(luna_ctx *ctx, luna_params *params) {
  luna_tensor *a = luna_params_find(params, "a"), *cube = luna_params_find(params, "cube"),
      *q = refusal_param(params, "q", 3, 11, 36);
  luna_tensor *two = refusal_param(params, "two", 2, 41, 36), *narrow = refusal_param(params, "narrow", 3, 41, 30),
              *short_ = refusal_param(params, "short", 3, 17, 36);
  luna_tensor *flat = refusal_param(params, "flat", 20, 36, 0), *d = refusal_param(params, "d", 36, 0, 0);
  int32_t lengths[3] = {41, 42, 0}, offsets[4] = {0, 5, 4, 20}, beyond[4] = {0, 5, 9, 21}, good[4] = {0, 5, 9, 20};
  luna_attention_config c = {0};
  c.heads = 5;
  REFUSED(luna_softmax_attention(q, cube, cube, &c), HEADS);
  c.heads = -1;
  REFUSED(luna_softmax_attention(q, cube, cube, &c), HEADS);
  c.heads = 4;
  REFUSED(luna_softmax_attention(q, two, two, &c), BATCHES_DIFFER);
  REFUSED(luna_softmax_attention(q, narrow, cube, &c), SHAPES);
  REFUSED(luna_softmax_attention(q, cube, short_, &c), SHAPES);
  REFUSED(luna_softmax_attention(a, a, a, &c), SHAPES);
  c.dropout = 1;
  REFUSED(luna_softmax_attention(q, cube, cube, &c), PROBABILITY);
  c.dropout = 0;
  c.lengths = lengths;
  REFUSED(luna_softmax_attention(q, cube, cube, &c), ELEMENT_RANGE);
  c.lengths = NULL;
  c.sequences = 3;
  c.query_offsets = good;
  REFUSED(luna_softmax_attention(flat, flat, flat, &c), NULL_ARGUMENT);
  c.key_offsets = offsets;
  REFUSED(luna_softmax_attention(flat, flat, flat, &c), OFFSETS);
  c.key_offsets = beyond;
  REFUSED(luna_softmax_attention(flat, flat, flat, &c), ELEMENT_RANGE);
  REFUSED(luna_causal_product(q, cube, cube, 4), SHAPES);
  REFUSED(luna_causal_product(q, q, q, 5), HEADS);
  REFUSED(luna_pack(q, two, NULL), SHAPES);
  REFUSED(luna_pack(q, narrow, NULL), SHAPES);
  REFUSED(luna_pack(q, cube, (&(luna_pack_config){ lengths, 0, NULL })), ELEMENT_RANGE);
  REFUSED(luna_pack(q, cube, (&(luna_pack_config){ NULL, 2, NULL })), PROBABILITY);
  REFUSED(luna_unpack(q, cube, cube, cube, NULL), SHAPES);
  REFUSED(luna_feed_forward(q, cube, NULL, cube, NULL, NULL), SHAPES);
  REFUSED(luna_causal_nested_attention(q, q, cube, q, NULL), SHAPES);
  REFUSED(luna_causal_nested_attention(q, q, q, q, &(luna_causal_nested_config){.heads = 5}), HEADS);
  REFUSED(luna_causal_nested_attention(q, q, q, q, (&(luna_causal_nested_config){.heads = 4, .routed = true})), ROUTED);
  REFUSED(luna_causal_nested_attention(q, q, q, q, (&(luna_causal_nested_config){.heads = 4, .routed = true,
                                                                               .forget = d})), ROUTED);
  REFUSED(luna_causal_nested_attention(q, q, q, q, (&(luna_causal_nested_config){.heads = 4, .routed = true,
                                                                               .forget = q})), SHAPES);
  REFUSED(luna_route(q, cube), SHAPES);
  REFUSED(luna_route(q, d), SHAPES);
  REFUSED(luna_route(q, q), ROUTE_SLOTS);
  REFUSED(luna_route(q, luna_slice(q, 2, 0, 24)), ROUTE_SLOTS);
  REFUSED(luna_causal_nested_attention(q, q, q, q, &(luna_causal_nested_config){.omega = LUNA_ACTIVATION_GELU}), OMEGA);
  REFUSED(luna_layer_norm(cube, d, a, 0), SHAPES);
}

/* the sentence of shapes that do not fit: the argument's name, its shape, all shapes, and the axis that differs */
static void said(luna_ctx *ctx, const void *result, const char *sentence) {
  CHECK(!result && strcmp(luna_error(ctx), sentence) == 0, "\"%s\", not \"%s\"", luna_error(ctx), sentence);
  luna_begin_step(ctx);
}
static void check_sentences(luna_ctx *ctx, luna_params *params) {
  luna_tensor *x = refusal_param(params, "x", 2, 3, 8), *w = refusal_param(params, "w", 5, 8, 0),
              *v = refusal_param(params, "five", 5, 0, 0), *none = refusal_param(params, "none", 8, 0, 0);
  luna_feed_forward_config c = {.residual = x};
  luna_begin_step(ctx);
  said(ctx, luna_linear(x, x, NULL), "luna_linear: weight [2,3,8] does not fit \"x [...,i] weight [o,i] bias? [o] "
       "residual? [...,o]\": the number of axes");
  said(ctx, luna_linear(x, luna_transpose(w, 0, 1), v), "luna_linear: weight [8,5] does not fit \"x [...,i] weight "
       "[o,i] bias? [o] residual? [...,o]\": its i is 5, that of x is 8");
  said(ctx, luna_layer_norm(x, NULL, v, 0),
       "luna_layer_norm: bias [5] does not fit \"x [...,d] weight? [d] bias? [d]\": "
       "its d is 5, that of x is 8");
  said(ctx, luna_ratio(luna_slice(none, 0, 0, 0)), "luna_ratio: x [0] does not fit \"x [...,N]\": N is at least 1");
  said(ctx, luna_feed_forward(luna_slice(x, 0, 0, 1), w, NULL, luna_transpose(w, 0, 1), NULL, &c),
       "luna_feed_forward: residual [2,3,8] does not fit \"x [...,i] w1 [f,i] b1? [f] w2 [o,f] b2? [o] residual? "
       "[...,o] gate? [f,i] gate_bias? [f]\": the leading axes");
  said(ctx, luna_feed_forward(x, w, NULL, NULL, NULL, NULL), "luna_feed_forward: w2 is null");
  said(ctx, luna_causal_product(x, x, x, 3), "luna_causal_product: dim 8 is not a multiple of heads 3");
}

static void check_refusals_layers(luna_ctx *ctx, luna_params *params) {
  luna_nested_attention_layer attention;
  luna_encoder_layer encoder;
  luna_lm lm;
  luna_layer_config config = {0};
  luna_layer_config layer = {0};
  luna_lm_config model = {0};
  const int64_t size = luna_params_tensor_count(params);
  config.dim = 36;
  config.heads = 5;
  luna_begin_step(ctx);
  CHECK(luna_nested_attention_layer_init(&attention, params, "x.", &config) != LUNA_OK &&
      luna_error_id_of(ctx) == LUNA_ERROR_HEADS,
        "36 dimensions for 5 heads: \"%s\"", luna_error(ctx));
  config.heads = 4;
  config.pack_heads = 7;
  luna_begin_step(ctx);
  CHECK(luna_nested_attention_layer_init(&attention, params, "x.", &config) != LUNA_OK &&
      luna_error_id_of(ctx) == LUNA_ERROR_HEADS,
        "7 pack heads: \"%s\"", luna_error(ctx));
  layer.dim = -4;
  luna_begin_step(ctx);
  CHECK(luna_encoder_layer_init(&encoder, params, "x.", &layer) != LUNA_OK &&
      luna_error_id_of(ctx) == LUNA_ERROR_VALUE_RANGE,
        "a layer of -4 dimensions: \"%s\"",
        luna_error(ctx));
  layer.dim = 36;
  layer.dropout = 1;
  luna_begin_step(ctx);
  CHECK(luna_encoder_layer_init(&encoder, params, "x.", &layer) != LUNA_OK &&
      luna_error_id_of(ctx) == LUNA_ERROR_PROBABILITY,
        "a layer that drops all: \"%s\"",
        luna_error(ctx));
  model.vocab = -1;
  luna_begin_step(ctx);
  CHECK(luna_lm_init(&lm, params, &model) != LUNA_OK && luna_error_id_of(ctx) == LUNA_ERROR_VALUE_RANGE,
      "a vocabulary of -1: \"%s\"", luna_error(ctx));
  CHECK(luna_params_tensor_count(params) == size, "refused layers left %lld parameters in the set",
        (long long)(luna_params_tensor_count(params) - size));
  CHECK(luna_begin_step(ctx) != LUNA_OK && luna_begin_step(ctx) == LUNA_OK, "a begin reports a refusal once");
  config.pack_heads = 0;
  CHECK(luna_nested_attention_layer_init(&attention, params, "x.", &config) == LUNA_OK, "%s", luna_error(ctx));
}

static void check_refusals_null(luna_ctx *ctx, luna_params *params) {
  luna_tensor *a = luna_params_find(params, "a"), *some[2] = {a, NULL}, *none = NULL;
  luna_tensor *x = refusal_param(params, "nx", 2, 5, 36),
      *k = luna_param(params, "nk", 4, (const int64_t[4]){2, 4, 3, 36}, (luna_init){LUNA_INIT_NORMAL, 1});
  luna_tensor *bias = refusal_param(params, "nbias", 2, 4, 3);
  luna_encoder_layer layer = {0};
  luna_lm lm;
  const luna_layer_config config = {.dim = 36, .heads = 4};
  CHECK(luna_encoder_layer_init(&layer, params, "null.", &config) == LUNA_OK, "%s", luna_error(ctx));
  REFUSED(luna_concat(some, 2, 0), NULL_ARGUMENT);
  REFUSED(luna_permute(a, NULL), NULL_ARGUMENT);
  REFUSED(luna_reshape(a, 2, NULL), SHAPE);
  REFUSED(luna_add(a, NULL), NULL_ARGUMENT);
  REFUSED(luna_unpack(x, k, bias, NULL, NULL), NULL_ARGUMENT);
  REFUSED(luna_causal_nested_attention(x, x, x, NULL, NULL), NULL_ARGUMENT);
  REFUSED(luna_route(x, NULL), NULL_ARGUMENT);
  REFUSED(luna_encoder_layer_forward(&layer, x, &none, NULL), NULL_ARGUMENT);
  luna_begin_step(ctx);
  CHECK(luna_params_set_text(params, NULL, "v") != LUNA_OK && luna_error_id_of(ctx) == LUNA_ERROR_NULL_ARGUMENT,
        "\"%s\"",
      luna_error(ctx));
  CHECK(luna_lm_init(NULL, params, NULL) != LUNA_OK && luna_error_id_of(ctx) == LUNA_ERROR_NULL_ARGUMENT, "\"%s\"",
      luna_error(ctx));
  CHECK(luna_begin_step(ctx) == LUNA_BAD_ARGUMENT && luna_begin_step(ctx) == LUNA_OK, "a begin reports an init once");
  CHECK(luna_lm_init(&lm, params, NULL) == LUNA_OK, "%s", luna_error(ctx));
  CHECK(luna_read(a, NULL) != LUNA_OK && luna_error_id_of(ctx) == LUNA_ERROR_NULL_ARGUMENT, "\"%s\"", luna_error(ctx));
}

static void check_sticky(luna_ctx *ctx, luna_params *params, refusal *r) {
  luna_tensor *a = luna_params_find(params, "a"), *b = luna_params_find(params, "b");
  char first[400];
  luna_begin_step(ctx);
  CHECK(luna_error_status(ctx) == LUNA_OK && luna_error(ctx)[0] == 0, "begin leaves \"%s\"", luna_error(ctx));
  const int before = r->logged;
  luna_tensor *bad = luna_add(a, b);
  snprintf(first, sizeof first, "%s", luna_error(ctx));
  CHECK(!luna_matmul(a, b, false, false) && strcmp(first, luna_error(ctx)) == 0 &&
      luna_error_id_of(ctx) == LUNA_ERROR_BROADCAST,
        "a later error replaced the first: \"%s\"", luna_error(ctx));
  CHECK(r->logged == before + 2, "two failures were logged %d times", r->logged - before);
  CHECK(!luna_gelu(bad) && !luna_add(bad, a) && !luna_add(a, bad) &&
        !luna_linear(luna_layer_norm(bad, NULL, NULL, 0), a, NULL) &&
            !luna_reshape(bad, 0, NULL) && !luna_softmax_attention(a, bad, b, NULL) && !luna_require_grad(bad) &&
            !luna_cross_entropy(bad, NULL, NULL) && !luna_slice(bad, 0, 0, 1),
        "an op gives something for a null input");
  CHECK(strcmp(first, luna_error(ctx)) == 0 && r->logged == before + 2, "ops on null speak: \"%s\"", luna_error(ctx));
  CHECK(luna_backward(bad) != LUNA_OK, "backward of null");
  luna_tensor *fine = luna_gelu(a);
  CHECK(fine || luna_error_status(ctx) != LUNA_OK, "state");
  CHECK(luna_begin_step(ctx) == LUNA_OK && luna_error_status(ctx) == LUNA_OK && luna_error(ctx)[0] == 0,
        "begin does not clear \"%s\"",
        luna_error(ctx));
  CHECK(luna_backward(luna_gelu(a)) == LUNA_BAD_ARGUMENT && luna_error_id_of(ctx) == LUNA_ERROR_NOT_ONE_ELEMENT,
      "backward of [37,41]: \"%s\"", luna_error(ctx));
  luna_begin_inference(ctx);
  CHECK(luna_backward(luna_sum(luna_sum(a, 0), 0)) == LUNA_BAD_ARGUMENT && luna_error_id_of(ctx) == LUNA_ERROR_NO_TAPE,
      "backward in inference: \"%s\"",
        luna_error(ctx));
  luna_ctx *other = open_plain(LUNA_ISA_BEST);
  luna_begin_step(other);
  luna_tensor *foreign = common_tensor(other, 1, 37, 41, 0, 0),
      *own = (luna_begin_step(ctx), common_tensor(ctx, 1, 37, 41, 0, 0));
  for (int kind = 0; kind < 6; kind++) {
    const int64_t flat[1] = {37 * 41};
    luna_begin_step(ctx), own = common_tensor(ctx, 1, 37, 41, 0, 0);
    luna_begin_step(other), foreign = common_tensor(other, 1, 37, 41, 0, 0);
    luna_tensor *both[2] = {own, foreign}, *stale = foreign;
    if (kind == 5) luna_begin_step(other);
    luna_tensor *y = kind == 0 ? luna_add(own, foreign) : kind == 1 ? luna_matmul(foreign, own, false, true) :
      kind == 2 ? luna_linear(own, own, luna_reshape(foreign, 1, flat)) : kind == 3 ? luna_concat(both, 2, 0) :
      kind == 4 ? luna_softmax_attention(own, own, foreign, NULL) : luna_mul(own, stale);
    CHECK(!y && luna_error_id_of(ctx) == LUNA_ERROR_OTHER_CONTEXT &&
          luna_error_id_of(other) == LUNA_ERROR_OTHER_CONTEXT && strcmp(luna_error(ctx), luna_error(other)) == 0,
          "op %d of tensors of two contexts: \"%s\" and \"%s\"", kind, luna_error(ctx), luna_error(other));
  }
  luna_close(other);
}

static void check_refusals(void) {
  refusal r = {0};
  luna_options options = {0};
  options.threads = 1;
  options.log = refusal_log;
  options.log_user = &r;
  luna_ctx *ctx = luna_open(&options);
  luna_params *params = luna_params_open(ctx);
  check_refusals_shapes(ctx, params);
  check_refusals_rows(ctx, params);
  check_refusals_attention(ctx, params);
  check_sentences(ctx, params);
  check_refusals_layers(ctx, params);
  check_refusals_null(ctx, params);
  check_sticky(ctx, params, &r);
  luna_begin_step(ctx); /* the last: what could not be made is reported by the next begin */
  const int64_t huge[2] = {(int64_t)1 << 40, (int64_t)1 << 40};
  refused(ctx, luna_param(params, "p", 2, huge, (luna_init){LUNA_INIT_ZEROS, 0}), LUNA_ERROR_SHAPE, "luna_param");
  refused(ctx, luna_param(params, "a", 1, huge, (luna_init){LUNA_INIT_ZEROS, 0}), LUNA_ERROR_PARAM_EXISTS,
      "luna_param");
  luna_close(ctx);
  luna_options bad = {0};
  bad.threads = -1;
  CHECK(!luna_open(&bad), "-1 threads");
  luna_close(NULL);
  for (int i = 0; i <= LUNA_UNSUPPORTED; i++) CHECK(luna_status_text((luna_status)i)[0], "status %d has no text", i);
  for (int i = 0; i < LUNA_OP_COUNT; i++) CHECK(luna_op_name((luna_op_kind)i)[0], "op %d has no name", i);
}

/* ---- logits that are stored with their gradient, and logits that are never made: the same bits of any number of
   threads, and the same loss and gradients up to rounding ---- */
enum {
  LOGIT_ROWS = 41, LOGIT_IN = 19, LOGIT_CLASSES = 2600, LOGIT_VALUES =
      1 + LOGIT_ROWS * LOGIT_IN + LOGIT_CLASSES * (LOGIT_IN + 1)
};
typedef enum logit_kind { LOGITS_STORED, LOGITS_NEVER, LOGIT_KINDS } logit_kind;
static size_t logits_step(luna_isa isa, int threads, logit_kind kind, bool made, float *out) {
  luna_options options = {.threads = threads, .isa = isa};
  luna_ctx *ctx = luna_open(&options);
  int32_t *labels = common_tokens(LOGIT_ROWS, 3, LOGIT_CLASSES);
  luna_tensor *leaf[3], *x, *logits = NULL, *loss;
  const luna_cross_entropy_config config = {.smoothing = 0.1f};
  const int64_t counts[3] = {LOGIT_ROWS * LOGIT_IN, LOGIT_CLASSES * LOGIT_IN, LOGIT_CLASSES};
  labels[7] = -1;
  luna_begin_step(ctx);
  leaf[0] = luna_require_grad(common_tensor(ctx, 2, LOGIT_ROWS, LOGIT_IN, 0, 0));
  leaf[1] = luna_require_grad(common_tensor(ctx, 1, LOGIT_CLASSES, LOGIT_IN, 0, 0));
  leaf[2] = luna_require_grad(common_tensor(ctx, 3, LOGIT_CLASSES, 0, 0, 0));
  x = made ? luna_scale(leaf[0], 0.5f) : leaf[0]; /* a gradient that is set, or added to */
  if (kind == LOGITS_NEVER) loss = luna_linear_cross_entropy(x, leaf[1], leaf[2], labels, &config);
  else {
    logits = luna_linear(x, leaf[1], leaf[2]);
    luna_require_grad(logits);
    loss = luna_cross_entropy(logits, labels, &config);
  }
  CHECK(luna_backward(loss) == LUNA_OK, "logits, kind %d: %s", (int)kind, luna_error(ctx));
  CHECK((logits && logits->grad) == (kind == LOGITS_STORED), "logits, kind %d: whether their gradient is there",
        (int)kind);
  *out++ = luna_item(loss);
  for (int i = 0; i < 3; out += counts[i++])
    CHECK(luna_read_grad(leaf[i], out) == LUNA_OK, "logits, kind %d: %s", (int)kind, luna_error(ctx));
  const size_t peak = luna_memory(ctx).peak;
  luna_close(ctx);
  free(labels);
  return peak;
}
static void check_logits(luna_isa isa) {
  const size_t bytes = (size_t)(LOGIT_ROWS * LOGIT_CLASSES) * sizeof(float);
  float *out[LOGIT_KINDS], *again = common_floats(LOGIT_VALUES);
  size_t peak[LOGIT_KINDS];
  for (int made = 0; made < 2; made++) {
    for (int kind = 0; kind < LOGIT_KINDS; kind++) {
      out[kind] = common_floats(LOGIT_VALUES);
      peak[kind] = logits_step(isa, 1, (logit_kind)kind, made, out[kind]);
      for (int threads = 2; threads < 5; threads++) {
        logits_step(isa, threads, (logit_kind)kind, made, again);
        CHECK(memcmp(out[kind], again, LOGIT_VALUES * sizeof(float)) == 0,
              "logits, kind %d, %s: %d threads give other bits", kind, luna_isa_name(isa), threads);
      }
    }
    test_close("linear cross-entropy", out[LOGITS_NEVER], out[LOGITS_STORED], LOGIT_VALUES, 2e-6);
    CHECK(peak[LOGITS_NEVER] + 4 * bytes / 3 < peak[LOGITS_STORED], "logits never made: %zu bytes, stored %zu",
          peak[LOGITS_NEVER], peak[LOGITS_STORED]);
    for (int kind = 0; kind < LOGIT_KINDS; kind++) free(out[kind]);
  }
  free(again);
}
static void check_no_rows(void) {
  luna_ctx *ctx = luna_open(NULL);
  luna_begin_step(ctx);
  const int64_t shape[2] = {0, 4};
  luna_tensor *weight = luna_require_grad(common_tensor(ctx, 2, 1030, 4, 0, 0)),
      *none = luna_tensor_new(ctx, NULL, 2, shape);
  const int32_t label = 1030;
  luna_tensor *loss = luna_linear_cross_entropy(none, weight, NULL, &label, NULL);
  CHECK(loss && luna_item(loss) == 0 && luna_backward(loss) == LUNA_OK, "linear cross-entropy of no rows: %s",
        luna_error(ctx));
  luna_close(ctx);
}

/* ---- the calls without a context ---- */
static void reversed(void *user, int64_t count, void (*task)(void *work, int64_t index), void *work) {
  (void)user;
  while (count-- > 0) task(work, count);
}
/* null scratch, exact scratch at an odd address, and three shares */
static void *run_set(luna_run *run, int mode, size_t need) {
  char *memory = mode ? (char *)common_alloc(need + 1) : NULL;
  run->scratch = memory ? memory + 1 : NULL;
  run->scratch_size = mode ? need : 0;
  return memory;
}
static void run_share(luna_run *run, int mode) {
  run->parallel_for = mode == 2 ? reversed : NULL;
  run->threads = mode == 2 ? 3 : 0;
}

static void check_gemm(luna_isa isa) {
  const int64_t sizes[5][3] = {{1, 1, 1}, {37, 29, 300}, {5, 70, 3}, {64, 64, 64}, {0, 5, 7}};
  for (int s = 0; s < 5; s++)
    for (int v = 0; v < 24; v++) {
      const int64_t m = sizes[s][0], n = sizes[s][1], k = sizes[s][2], pad = v % 3;
      const bool ta = (v & 1) != 0, tb = (v & 2) != 0;
      luna_gemm_args g = {0};
      g.m = m, g.n = n, g.k = k, g.batch = 2;
      g.transpose_a = ta, g.transpose_b = tb;
      g.a_row = pad ? (ta ? m : k) + pad : 0, g.b_row = pad ? (tb ? k : n) + pad : 0, g.c_row = pad ? n + pad : 0;
      const int64_t ar = (ta ? m : k) + pad, br = (tb ? k : n) + pad, cr = n + pad, an = ar * (ta ? k : m),
          bn = br * (tb ? n : k),
                    cn = cr * m;
      float *a = common_random(2 * an + 1, 1, 1), *b = common_random(bn + 1, 2, 1), *bias = common_random(n, 3, 1),
            *c = common_random(2 * cn + 1, 4, 1), *first = common_random(2 * cn + 1, 4, 1);
      g.a = a, g.b = b, g.c = c;
      g.b_batch = LUNA_BATCH_SHARED;
      g.scale = v >= 12 ? 0.5f : 0;
      g.bias = v & 4 ? bias : NULL;
      g.activation = v & 8 ? LUNA_ACTIVATION_GELU : LUNA_ACTIVATION_DEFAULT;
      g.accumulate = v >= 12;
      g.run.isa = isa;
      run_share(&g.run, v % 3);
      void *memory = run_set(&g.run, v % 3, luna_gemm_scratch(&g));
      CHECK(luna_gemm_f32(&g) == LUNA_OK, "gemm failed");
      double off = 0, size = 1e-12;
      for (int64_t e = 0; e < 2 * cn; e++) {
        const int64_t i = e % cn / cr, j = e % cr;
        double sum = 0;
        if (j >= n) {
          if (c[e] != first[e]) off = INFINITY; /* wrote between the rows */
          continue;
        }
        for (int64_t p = 0; p < k; p++)
          sum += (double)a[e / cn * an + (ta ? p * ar + i : i * ar + p)] * (double)b[tb ? j * br + p : p * br + j];
        sum = naive_activation(g.activation, sum * (v >= 12 ? 0.5 : 1) + (g.bias ? (double)bias[j] : 0)) +
              (g.accumulate ? (double)first[e] : 0);
        off += ((double)c[e] - sum) * ((double)c[e] - sum);
        size += sum * sum;
      }
      CHECK(sqrt(off / size) < 2e-6, "luna_gemm_f32 %s, [%lld,%lld,%lld], variant %d: off by %.3g", luna_isa_name(isa),
            (long long)m,
            (long long)n, (long long)k, v, sqrt(off / size));
      free(a), free(b), free(bias), free(c), free(first), free(memory);
    }
  luna_gemm_args bad = {0};
  bad.m = bad.n = bad.k = 4;
  CHECK(luna_gemm_f32(&bad) == LUNA_BAD_ARGUMENT, "gemm of null pointers");
  bad.m = -1;
  CHECK(luna_gemm_f32(&bad) == LUNA_BAD_ARGUMENT, "gemm of -1 rows");
}

/* forward against naive loops, backward against differences of a weighted sum; without scratch = with, nearly */
static void check_attention_call(luna_isa isa, int v) {
  static const int32_t lengths[2] = {70, 3}, offsets[3] = {0, 30, 41}, key_offsets[3] = {0, 9, 100};
  luna_attention_args a = {0};
  naive expected = {2, 3, 41, 90, 7, 5, NULL, NULL, NULL, 1 / sqrt(7.0), 0, false, 9, 2, 5};
  const bool ragged = v == 3 || v == 5;
  const int64_t qr = ragged ? 41 : 82, kr = ragged ? 100 : 180, qn = qr * 21, kn = kr * 21, vn = kr * 15, on = qr * 15;
  float *q = common_random(qn, 1, 2), *k = common_random(kn, 2, 2), *values = common_random(vn, 3, 1),
      *g = common_random(on, 4, 1);
  float *out[3], *grad[3], *lse = common_floats(qr * 3), *want = common_floats(on), *want_lse = common_floats(qr * 3),
                           *sums = common_floats(qr * 3), *want_sums = common_floats(qr * 3);
  a.batch = 2, a.heads = 3, a.queries = 41, a.keys = 90, a.head_dim = 7, a.value_dim = 5;
  if (ragged) a.queries = expected.queries = 30, a.keys = expected.keys = 91; /* of the longest sequence */
  a.lengths = expected.lengths = v == 1 ? lengths : NULL;
  a.causal = expected.causal = v == 2;
  a.query_offsets = expected.query_offsets = ragged ? offsets : NULL;
  a.key_offsets = expected.key_offsets = ragged ? key_offsets : NULL;
  a.dropout = v >= 4 ? 0.3f : 0;
  expected.dropout = (double)a.dropout;
  a.seed = 9, a.dropout_op = 2, a.step = 5;
  a.q = q, a.k = k, a.v = values, a.log_sum_exp = lse, a.sums = v >= 4 ? sums : NULL, a.grad_out = g,
  a.grad_sums = v >= 4 ? want_lse : NULL;
  a.run.isa = isa;
  naive_attention(&expected, q, k, values, want, want_lse, want_sums);
  for (int mode = 0; mode < 3; mode++) {
    out[mode] = common_floats(on);
    grad[mode] = common_floats(qn + kn + vn);
    a.out = out[mode];
    a.grad_q = grad[mode], a.grad_k = grad[mode] + qn, a.grad_v = grad[mode] + qn + kn;
    run_share(&a.run, mode);
    void *memory = run_set(&a.run, mode, luna_softmax_attention_scratch(&a));
    CHECK(luna_softmax_attention_f32(&a) == LUNA_OK && luna_softmax_attention_backward_f32(&a) == LUNA_OK,
          "luna_softmax_attention_f32 failed");
    test_close("luna_softmax_attention_f32", out[mode], want, (size_t)on, 2e-6);
    test_close("log_sum_exp", lse, want_lse, (size_t)qr * 3, 2e-6);
    if (a.sums) test_close("row sums", sums, want_sums, (size_t)qr * 3, 2e-6);
    free(memory);
  }
  test_close("attention without scratch", out[0], out[1], (size_t)on, 2e-6);
  test_close("attention backward without scratch", grad[0], grad[1], (size_t)(qn + kn + vn), 1e-5);
  CHECK(memcmp(out[1], out[2], (size_t)on * 4) == 0 && memcmp(grad[1], grad[2], (size_t)(qn + kn + vn) * 4) == 0,
        "%s, variant %d: attention in three shares has other bits", luna_isa_name(isa), v);
  for (int i = 0; i < 3; i++) free(out[i]), free(grad[i]);
  free(q), free(k), free(values), free(g), free(lse), free(want), free(want_lse), free(sums), free(want_sums);
}

/* strides: heads apart, rows apart, one K and V shared by the batch: its gradient is the sum over the batch, in
   order */
static void check_attention_strides(luna_isa isa) {
  enum { B = 3, H = 2, N = 9, M = 14, D = 6, ROW = 40, HEAD = 11 };
  float *q = common_random(B * N * ROW, 1, 1), *k = common_random(M * ROW, 2, 1), *v = common_random(M * ROW, 3, 1),
        *g = common_random(B * N * H * D, 4, 1);
  float *dense_q = common_floats(B * N * H * D), *dense_k = common_floats(B * M * H * D),
      *dense_v = common_floats(B * M * H * D),
        *out = common_floats(B * N * H * D), *want = common_floats(B * N * H * D);
  float *lse = common_floats(B * N * H), *gk = common_floats(M * ROW), *gd = common_floats(B * M * H * D);
  luna_attention_args a = {0}, d = {0};
  naive expected = {B, H, N, M, D, D, NULL, NULL, NULL, 1 / sqrt(6.0), 0, false, 0, 0, 0};
  for (int i = 0; i < B * N * H * D; i++) dense_q[i] = q[i / (H * D) * ROW + i / D % H * HEAD + i % D];
  for (int i = 0; i < B * M * H * D; i++) {
    const int at = i / (H * D) % M * ROW + i / D % H * HEAD + i % D;
    dense_k[i] = k[at], dense_v[i] = v[at];
  }
  naive_attention(&expected, dense_q, dense_k, dense_v, want, NULL, NULL);
  a.batch = B, a.heads = H, a.queries = N, a.keys = M, a.head_dim = D;
  d = a;
  a.q = q, a.k = k, a.v = v, a.out = out, a.log_sum_exp = lse, a.grad_out = g, a.grad_k = gk;
  a.q_row = a.k_row = a.v_row = ROW, a.q_head = a.k_head = a.v_head = HEAD;
  a.k_batch = a.v_batch = LUNA_BATCH_SHARED;
  a.run.isa = d.run.isa = isa;
  void *memory = run_set(&a.run, 1, luna_softmax_attention_scratch(&a));
  CHECK(luna_softmax_attention_f32(&a) == LUNA_OK && luna_softmax_attention_backward_f32(&a) == LUNA_OK,
        "strided attention failed");
  test_close("attention with strides", out, want, B * N * H * D, 2e-6);
  d.q = dense_q, d.k = dense_k, d.v = dense_v, d.out = out, d.log_sum_exp = lse, d.grad_out = g, d.grad_k = gd;
  void *more = run_set(&d.run, 1, luna_softmax_attention_scratch(&d));
  CHECK(luna_softmax_attention_f32(&d) == LUNA_OK && luna_softmax_attention_backward_f32(&d) == LUNA_OK,
        "dense attention failed");
  double off = 0, size = 0;
  for (int i = 0; i < M * H * D; i++) {
    const double sum = (double)gd[i] + (double)gd[i + M * H * D] + (double)gd[i + 2 * M * H * D];
    const double got = (double)gk[i / (H * D) * ROW + i / D % H * HEAD + i % D];
    off += (got - sum) * (got - sum), size += sum * sum;
  }
  CHECK(off <= 1e-11 * size, "%s: the gradient of a shared K is not the sum over the batch: off by %.3g",
        luna_isa_name(isa),
        sqrt(off / size));
  free(q), free(k), free(v), free(g), free(dense_q), free(dense_k), free(dense_v), free(out), free(want), free(lse),
      free(gk), free(gd),
      free(memory), free(more);
}

static void check_causal_call(luna_isa isa, int64_t rows) {
  enum { B = 2, H = 2, D1 = 14, D2 = 20 };
  const int64_t xn = B * rows * H * D1, zn = B * rows * H * D2;
  float *x = common_random(xn, 1, 1), *y = common_random(xn, 2, 1), *z = common_random(zn, 3, 1),
      *g = common_random(zn, 4, 1),
        *want = common_floats(zn);
  float *out[3], *grad[3];
  luna_causal_args c = {0};
  c.x = x, c.y = y, c.z = z, c.grad_out = g, c.batch = B, c.rows = rows, c.heads = H, c.dim = D1, c.value_dim = D2;
  c.run.isa = isa;
  naive_causal(B, rows, H, D1, D2, x, y, z, want);
  for (int mode = 0; mode < 3; mode++) {
    out[mode] = common_floats(zn);
    grad[mode] = common_floats(2 * xn + zn);
    c.out = out[mode];
    c.grad_x = grad[mode], c.grad_y = grad[mode] + xn, c.grad_z = grad[mode] + 2 * xn;
    run_share(&c.run, mode);
    void *memory = run_set(&c.run, mode, luna_causal_product_scratch(&c));
    CHECK(luna_causal_product_f32(&c) == LUNA_OK && luna_causal_product_backward_f32(&c) == LUNA_OK,
          "luna_causal_product_f32 failed");
    test_close("luna_causal_product_f32", out[mode], want, (size_t)zn, 2e-6);
    free(memory);
  }
  test_close("causal product backward without scratch", grad[0], grad[1], (size_t)(2 * xn + zn), 2e-6);
  CHECK(memcmp(out[1], out[2], (size_t)zn * 4) == 0 && memcmp(grad[1], grad[2], (size_t)(2 * xn + zn) * 4) == 0,
        "%s, %lld rows: the causal product in three shares has other bits", luna_isa_name(isa), (long long)rows);
  for (int i = 0; i < 3; i++) free(out[i]), free(grad[i]);
  free(x), free(y), free(z), free(g), free(want);
}

/* how much scratch depends on the sizes alone: it can be asked before there are arrays, which only the call itself
   misses */
static void check_scratch(luna_isa isa) {
  luna_gemm_args g = {.m = 3, .n = 4, .k = 5};
  luna_attention_args a = {.batch = 1, .heads = 2, .queries = 3, .keys = 4, .head_dim = 5};
  luna_causal_args c = {.batch = 1, .rows = 3, .heads = 2, .dim = 4, .value_dim = 5};
  g.run.isa = a.run.isa = c.run.isa = isa;
  CHECK(luna_gemm_scratch(&g) > 0 && luna_softmax_attention_scratch(&a) > 0 && luna_causal_product_scratch(&c) > 0,
        "no scratch without arrays");
  CHECK(luna_gemm_f32(&g) == LUNA_BAD_ARGUMENT && luna_softmax_attention_f32(&a) == LUNA_BAD_ARGUMENT &&
            luna_softmax_attention_backward_f32(&a) == LUNA_BAD_ARGUMENT &&
                luna_causal_product_f32(&c) == LUNA_BAD_ARGUMENT &&
            luna_causal_product_backward_f32(&c) == LUNA_BAD_ARGUMENT, "a call without arrays is taken");
}

static void check_calls(luna_isa isa) {
  check_scratch(isa);
  check_gemm(isa);
  for (int v = 0; v < 6; v++) check_attention_call(isa, v);
  check_attention_strides(isa);
  check_causal_call(isa, 1);
  check_causal_call(isa, 63);
  check_causal_call(isa, 300);
}

#ifndef TEST_ORACLES
#define TEST_ORACLES 1               /* 0: under the memory sanitizer */
#endif
/* with an argument: the oracles alone, for tests/tools/faults.py */
int main(int count, char **arguments) {
  (void)arguments;
  if (TEST_ORACLES || count > 1) check_oracles(count == 1);
  if (count > 1) return test_report("oracles");
  for (int i = 0; i < OP_CASES; i++)
    for (int v = 0; v < op_cases[i].variants; v++) {
      check_isas(&op_cases[i], v, false);
      check_isas(&op_cases[i], v, true);
      if (strstr(op_cases[i].name, "pack") || strstr(op_cases[i].name, "causal") || strstr(op_cases[i].name, "layer") ||
          strstr(op_cases[i].name, "feed") || strcmp(op_cases[i].name, "linear_cross_entropy") == 0 ||
          strcmp(op_cases[i].name, "lm") == 0)
        check_composed(&op_cases[i], v);
    }
  check_forms();
  for (int i = 0; i < COMMON_ISAS; i++) {
    if (!luna_isa_available(common_isas[i])) continue;
    check_values(common_isas[i]);
    check_packed(common_isas[i], false);
    check_packed(common_isas[i], true);
    check_padded(common_isas[i]);
    check_slots(common_isas[i]);
    check_ties(common_isas[i]);
    check_calls(common_isas[i]);
    check_logits(common_isas[i]);
  }
  check_no_rows();
  check_views();
  check_items();
  check_gradients_kept();
  check_gradients_of_views();
  check_refusals();
  return test_report("ops");
}
