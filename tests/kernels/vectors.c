/* The vector vocabulary of every pass against libm in double: exp, log, activations and their slopes over every
   1,009th float there is; NaN, Inf and the edges; partial loads and stores, comparisons, the sums over lanes. */
#include "test.h"
enum {
  VECTORS_EXP, VECTORS_LOG, VECTORS_FUNCTIONS,
  VECTORS_ADD = VECTORS_FUNCTIONS, VECTORS_SUB, VECTORS_MUL, VECTORS_DIV, VECTORS_MAX, VECTORS_MIN, VECTORS_SQRT,
      VECTORS_ABS, VECTORS_LT,
    VECTORS_LE,
  VECTORS_GT, VECTORS_FMA, VECTORS_FNMA, VECTORS_ALL
};
#define LUNA_IMPLEMENTATION
#define LUNA_HEADER_FILENAME "tests/kernels/vectors_pass.h"
#include "luna.h"
#include "common.h"
#include "kernels.h"

static const char *const vectors_name[VECTORS_ALL] = {
  "exp", "log", "add", "sub", "mul", "div", "max", "min", "sqrt", "abs", "lt", "le", "gt", "fma", "fnma"
};

typedef struct vectors_pass {
  luna_isa isa;
  void (*map)(int which, int64_t n, const float *x, const float *z, float *y);
  void (*singles)(int which, int64_t n, const float *x, float *y);
  int (*lanes)(const float *x, float out[3]);
} vectors_pass;
#define VECTORS_PASS(isa, suffix) \
  {isa, li_vectors_map_##suffix, li_vectors_singles_##suffix, li_vectors_lanes_##suffix}
static const vectors_pass vectors_passes[] = {
  VECTORS_PASS(LUNA_ISA_REFERENCE, scalar),
#if LI_BASELINE == LI_ISA_sse2
  VECTORS_PASS(LUNA_ISA_SSE2, sse2),
#endif
#if LI_BASELINE == LI_ISA_avx2 || (defined(LI_X86) && LI_BASELINE < LI_ISA_avx2)
  VECTORS_PASS(LUNA_ISA_AVX2, avx2),
#endif
#if LI_BASELINE == LI_ISA_avx512 || defined(LI_X86)
  VECTORS_PASS(LUNA_ISA_AVX512, avx512),
#endif
#if LI_BASELINE == LI_ISA_neon
  VECTORS_PASS(LUNA_ISA_NEON, neon),
#endif
#if LI_BASELINE == LI_ISA_wasm
  VECTORS_PASS(LUNA_ISA_WASM, wasm),
#endif
};
static const vectors_pass *pass;

static float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}
static bool same_bits(float a, float b) { return memcmp(&a, &b, sizeof a) == 0 || (a != a && b != b); }
/* is the sign bit not set? NaN counts as positive */
static bool positive(float x) { return x != x || !signbit(x); }

/* ---- accuracy: every STRIDE-th bit pattern, so that all magnitudes and both signs are met ---- */
enum { STRIDE = 1009, BLOCK = 4096 };

typedef struct accuracy { double relative, absolute; float at; } accuracy;
static void accuracy_of(accuracy *worst, const float *x, const float *got, const double *want, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    const double error = got[i] == got[i] ? fabs((double)got[i] - want[i]) : INFINITY;
    if (error > worst->absolute) worst->absolute = error;
    if (fabs(want[i]) < 1.1754944e-38) continue; /* a result too small to be normal may be 0 */
    if (error / fabs(want[i]) > worst->relative) worst->relative = error / fabs(want[i]), worst->at = x[i];
  }
}

/* what is promised of a function between least and most; the maps are those of the kernels table */
typedef struct claim { const char *name; int function, activation, slope; double min, max, relative, absolute; } claim;
static const claim claims[] = {
  {"exp", VECTORS_EXP, 0, 0, -87, 0, 2e-7, 1e-7},
  {"exp", VECTORS_EXP, 0, 0, 0, 88.72, 2e-7, INFINITY},
  {"exp", VECTORS_EXP, 0, 0, -INFINITY, -87, 1, 1.3e-38},
  {"log", VECTORS_LOG, 0, 0, 0, INFINITY, 2e-7, INFINITY},
  {"relu", -1, LUNA_ACTIVATION_RELU, 0, -INFINITY, INFINITY, 0, 0},
  {"gelu", -1, LUNA_ACTIVATION_GELU, 0, -5, INFINITY, 1e-6, INFINITY},
  {"gelu", -1, LUNA_ACTIVATION_GELU, 0, -INFINITY, 5, 1e-5, 5e-7},
  {"elu1", -1, LUNA_ACTIVATION_ELU1, 0, -87, INFINITY, 2e-7, INFINITY},
  {"softplus", -1, LUNA_ACTIVATION_SOFTPLUS, 0, -87, INFINITY, 3e-7, INFINITY},
  {"softplus2", -1, LUNA_ACTIVATION_SOFTPLUS2, 0, -125, INFINITY, 4e-7, INFINITY},
  {"sigmoid", -1, LUNA_ACTIVATION_SIGMOID, 0, -87, INFINITY, 3e-7, 1.2e-7},
  {"silu", -1, LUNA_ACTIVATION_SILU, 0, -87, INFINITY, 3e-7, INFINITY},
  {"tanh", -1, LUNA_ACTIVATION_TANH, 0, -INFINITY, INFINITY, 3e-7, 2e-7},
  {"exp", -1, LUNA_ACTIVATION_EXP, 0, -87, 88.72, 2e-7, INFINITY},
  {"log", -1, LUNA_ACTIVATION_LOG, 0, 0, INFINITY, 2e-7, INFINITY},
  {"sqrt", -1, LUNA_ACTIVATION_SQRT, 0, 0, INFINITY, 1.2e-7, INFINITY},
  {"rsqrt", -1, LUNA_ACTIVATION_RSQRT, 0, 1e-37, INFINITY, 2e-7, INFINITY},
  {"abs", -1, LUNA_ACTIVATION_ABS, 0, -INFINITY, INFINITY, 0, 0},
  {"relu's slope", -1, LUNA_ACTIVATION_RELU, 1, -INFINITY, INFINITY, 0, 0},
  {"gelu's slope", -1, LUNA_ACTIVATION_GELU, 1, -INFINITY, INFINITY, INFINITY, 4e-7},
  {"elu1's slope", -1, LUNA_ACTIVATION_ELU1, 1, -87, INFINITY, 2e-7, 1e-7},
  {"softplus's slope", -1, LUNA_ACTIVATION_SOFTPLUS, 1, -87, INFINITY, 3e-7, 2e-7},
  {"softplus2's slope", -1, LUNA_ACTIVATION_SOFTPLUS2, 1, -125, INFINITY, 3e-7, 2e-7},
  {"sigmoid's slope", -1, LUNA_ACTIVATION_SIGMOID, 1, -87, INFINITY, INFINITY, 1.5e-7},
  {"silu's slope", -1, LUNA_ACTIVATION_SILU, 1, -INFINITY, INFINITY, INFINITY, 5e-7},
  {"tanh's slope", -1, LUNA_ACTIVATION_TANH, 1, -INFINITY, INFINITY, INFINITY, 3e-7},
  {"exp's slope", -1, LUNA_ACTIVATION_EXP, 1, -87, 88.72, 2e-7, INFINITY},
  {"log's slope", -1, LUNA_ACTIVATION_LOG, 1, 1e-37, 1e37, 1.2e-7, INFINITY},
  {"sqrt's slope", -1, LUNA_ACTIVATION_SQRT, 1, 1e-37, INFINITY, 2e-7, INFINITY},
  {"rsqrt's slope", -1, LUNA_ACTIVATION_RSQRT, 1, 1e-24, 1e24, 4e-7, INFINITY},
  {"abs's slope", -1, LUNA_ACTIVATION_ABS, 1, 1e-45, INFINITY, 0, 0},
};
enum { CLAIMS = sizeof claims / sizeof *claims };

static double claim_exact(const claim *c, double x) {
  if (c->function == VECTORS_EXP) return exp(x);
  if (c->function == VECTORS_LOG) return log(x);
  return c->slope ? naive_slope(c->activation, x) : naive_activation(c->activation, x);
}
static void claim_run(const claim *c, int64_t n, const float *x, const float *ones, float *y) {
  fill(y, n, 0);
  if (c->function >= 0) pass->map(c->function, n, x, x, y);
  else if (c->slope) kernels->activate_grad(c->activation, n, x, ones, true, y);
  else kernels->activate(c->activation, n, x, y);
}

/* one claim on all instruction sets at once: the reference costs the most */
static void check_claim(const claim *c) {
  enum { PASSES = sizeof vectors_passes / sizeof *vectors_passes };
  float *x = zeros(BLOCK), *y = zeros(BLOCK), *ones = zeros(BLOCK);
  double *want = doubles(BLOCK);
  accuracy worst[PASSES];
  memset(worst, 0, sizeof worst);
  fill(ones, BLOCK, 1);
  for (uint64_t bits = 0, more = 1; more;) {
    int64_t n = 0;
    for (; n < BLOCK && (more = bits <= UINT32_MAX) != 0; bits += STRIDE) {
      x[n] = float_of((uint32_t)bits);
      if ((double)x[n] >= c->min && (double)x[n] <= c->max && fabs((double)x[n]) < INFINITY) n++;
    }
    for (int64_t i = 0; i < n; i++) want[i] = claim_exact(c, (double)x[i]);
    for (int p = 0; p < PASSES; p++) {
      pass = &vectors_passes[p];
      kernels = li_kernels_of(pass->isa);
      if (!kernels) continue;
      claim_run(c, n, x, ones, y);
      accuracy_of(&worst[p], x, y, want, n);
    }
  }
  for (int p = 0; p < PASSES; p++)
    CHECK(worst[p].relative <= c->relative && worst[p].absolute <= c->absolute,
          "%s: %s from %g to %g: relative %.3g (at %.9g) over %.3g, absolute %.3g over %.3g",
          luna_isa_name(vectors_passes[p].isa), c->name, c->min, c->max, worst[p].relative, (double)worst[p].at,
              c->relative,
            worst[p].absolute, c->absolute);
  release(x), release(y), release(ones), free(want);
}

/* ---- edges ---- */
static float value_of(int which, float x) {
  float y;
  pass->map(which, 1, &x, &x, &y);
  return y;
}
static void check_edges(void) {
  const float inf = (float)INFINITY, nan = (float)NAN, tiny = 1e-40f;
  const struct { int which; float x, y; } exact[] = {
    {VECTORS_EXP, 0, 1}, {VECTORS_EXP, -0.0f, 1}, {VECTORS_EXP, tiny, 1}, {VECTORS_EXP, -tiny, 1},
        {VECTORS_EXP, -inf, 0},
    {VECTORS_EXP, inf, inf},
    {VECTORS_EXP, 88.8f, inf}, {VECTORS_EXP, 3e38f, inf}, {VECTORS_EXP, -3e38f, 0}, {VECTORS_EXP, -110, 0},
        {VECTORS_EXP, nan, nan},
    {VECTORS_LOG, 1, 0}, {VECTORS_LOG, 0, -inf}, {VECTORS_LOG, inf, inf}, {VECTORS_LOG, nan, nan},
  };
  for (size_t i = 0; i < sizeof exact / sizeof *exact; i++) {
    const float y = value_of(exact[i].which, exact[i].x);
    CHECK(same_bits(y, exact[i].y), "%s: %s(%g) = %.9g", kernels_name, vectors_name[exact[i].which], (double)exact[i].x,
          (double)y);
  }
  for (int i = 0; i < 1000; i++) { /* 0 and Inf are reached from the right side, and the result never turns negative */
    const float low = -86 - 0.002f * (float)i, high = 87.7f + 0.0011f * (float)i;
    const float y = value_of(VECTORS_EXP, low), z = value_of(VECTORS_EXP, high);
    CHECK(positive(y) && (double)y <= 1.001 * exp((double)low) && positive(z) &&
          (double)z >= 0.999 * exp((double)high) * (z < inf),
          "%s: exp(%g) = %g, exp(%g) = %g",
          kernels_name, (double)low, (double)y, (double)high, (double)z);
  }
}
/* maps of NaN, Inf, -Inf, 0, -0 and a negative number: as C's math.h has it */
static void check_map_edges(void) {
  const float inf = (float)INFINITY, nan = (float)NAN, x[6] = {nan, inf, -inf, 0, -0.0f, -2},
      one[6] = {1, 1, 1, 1, 1, 1};
  const struct { int kind; float y[5]; } known[] = {
    {LUNA_ACTIVATION_SIGMOID, {1, 0, 0.5f, 0.5f, 77}}, {LUNA_ACTIVATION_SILU, {inf, nan, 0, -0.0f, 77}},
    {LUNA_ACTIVATION_TANH, {1, -1, 0, -0.0f, 77}}, {LUNA_ACTIVATION_EXP, {inf, 0, 1, 1, 77}},
    {LUNA_ACTIVATION_LOG, {inf, nan, -inf, -inf, nan}}, {LUNA_ACTIVATION_SQRT, {inf, nan, 0, -0.0f, nan}},
    {LUNA_ACTIVATION_RSQRT, {0, nan, inf, -inf, nan}}, {LUNA_ACTIVATION_ABS, {inf, inf, 0, 0, 2}},
  };
  for (int kind = LUNA_ACTIVATION_DEFAULT; kind < LUNA_ACTIVATION_COUNT; kind++) {
    float y[6], slope[6] = {0, 0, 0, 0, 0, 0};
    kernels->activate(kind, 6, x, y);
    kernels->activate_grad(kind, 6, x, one, true, slope);
    CHECK(y[0] != y[0] && (kind == LUNA_ACTIVATION_DEFAULT || kind == LUNA_ACTIVATION_NONE || slope[0] != slope[0]),
          "%s: map %d of NaN is %g, its slope %g", kernels_name,
          kind, (double)y[0], (double)slope[0]);
    for (size_t k = 0; k < sizeof known / sizeof *known; k++)
      for (int i = 0; known[k].kind == kind && i < 5; i++)
        CHECK(same_bits(y[i + 1], known[k].y[i]) || known[k].y[i] == 77, "%s: map %d of %g is %g", kernels_name, kind,
              (double)x[i + 1],
              (double)y[i + 1]);
    if (kind > LUNA_ACTIVATION_SOFTPLUS2) continue;
    CHECK(same_bits(y[1], inf), "%s: activation %d of Inf is %g", kernels_name, kind, (double)y[1]);
    CHECK(kind == LUNA_ACTIVATION_DEFAULT || kind == LUNA_ACTIVATION_GELU || y[2] == 0,
          "%s: activation %d of -Inf is %g",
          kernels_name, kind, (double)y[2]);
    CHECK(fabs((double)y[3] - naive_activation(kind, 0)) < 1e-7, "%s: activation %d of 0 is %g", kernels_name, kind,
          (double)y[3]);
  }
}

/* ---- a number's result does not depend on its lane, nor on how many there are; nothing beyond them is touched ---- */
static float arithmetic(int which, float a, float b) {
  switch (which) {
    case VECTORS_ADD: return a + b;
    case VECTORS_SUB: return a - b;
    case VECTORS_MUL: return a * b;
    case VECTORS_DIV: return a / b;
    case VECTORS_MAX: return a > b ? a : b;
    case VECTORS_MIN: return a < b ? a : b;
    case VECTORS_SQRT: return sqrtf(a);
    case VECTORS_ABS: return fabsf(a);
    case VECTORS_LT: return a < b ? 1.0f : 0.0f;
    case VECTORS_LE: return a <= b ? 1.0f : 0.0f;
    case VECTORS_GT: return a > b ? 1.0f : 0.0f;
    default: return 0;
  }
}
static void check_lanes(int which) {
  enum { N = 99 };
  const float odd[6] = {(float)NAN, (float)INFINITY, -(float)INFINITY, 0, -0.0f, 1e-41f};
  float *x = random_floats(N, 10), *z = random_floats(N, 10), *whole = zeros(N);
  for (int i = 0; i < 12; i++) x[5 + 7 * i] = odd[i % 6], z[5 + 7 * i + i % 2] = odd[(i * 5 / 6 + i) % 6];
  pass->map(which, N, x, z, whole);
  for (int64_t i = 0; i < N && which >= VECTORS_FUNCTIONS && which < VECTORS_FMA; i++)
    CHECK(same_bits(whole[i], arithmetic(which, x[i], z[i])), "%s: %s(%g, %g) = %g", kernels_name, vectors_name[which],
          (double)x[i],
          (double)z[i], (double)whole[i]);
  for (int64_t i = 0; i < N && which >= VECTORS_FMA; i++) {
    const double product = (double)x[i] * (double)z[i], exact = which == VECTORS_FMA ? product - 1 : -1 - product;
    CHECK(!isfinite(exact) || fabs((double)whole[i] - exact) <= 2e-7 * (1 + fabs(product)), "%s: %s(%g, %g, -1) = %g",
          kernels_name,
          vectors_name[which], (double)x[i], (double)z[i],
          (double)whole[i]);
  }
  for (int64_t n = 0; n <= 40; n++) {
    const int64_t at = n % 11; /* arrays that end where they are read to, in an allocation of their own */
    float *a = copied(x + at, n), *b = copied(z + at, n), *y = zeros(n + 1);
    bool equal = true;
    y[n] = 77;
    pass->map(which, n, a, b, y);
    for (int64_t i = 0; i < n; i++) equal = equal && same_bits(y[i], whole[at + i]);
    CHECK(equal && y[n] == 77, "%s: %s of %d numbers differs from the same among %d, or is written beyond",
          kernels_name,
          vectors_name[which], (int)n, (int)N);
    release(a), release(b), release(y);
  }
  for (int64_t i = 0; i < N && which <= VECTORS_LOG; i++) {
    float y;
    pass->singles(which, 1, x + i, &y);
    CHECK(same_bits(y, whole[i]), "%s: %s of a single %g is %.9g, in a vector %.9g", kernels_name, vectors_name[which],
          (double)x[i],
          (double)y, (double)whole[i]);
  }
  release(x), release(z), release(whole);
}
static void check_reductions(void) {
  float x[16], out[3];
  for (int round = 0; round < 50; round++) {
    double sum = 0, size = 0;
    float max = -(float)INFINITY;
    common_fill(x, 16, ++kernels_seed, 10);
    const int n = pass->lanes(x, out);
    for (int i = 0; i < n; i++) sum += (double)x[i], size += fabs((double)x[i]), max = x[i] > max ? x[i] : max;
    CHECK(fabs((double)out[0] - sum) <= 3e-7 * size && out[1] == max && out[2] == x[0],
          "%s: over %d lanes: sum %g for %g, largest %g for %g, first %g for %g", kernels_name, n,
          (double)out[0], sum, (double)out[1], (double)max, (double)out[2], (double)x[0]);
    x[round % n] = (float)NAN;
    pass->lanes(x, out);
    CHECK(out[0] != out[0], "%s: a NaN in lane %d is lost in the sum", kernels_name, round % n);
  }
}

int main(void) {
  for (int i = 0; i < CLAIMS; i++) check_claim(&claims[i]);
  for (size_t p = 0; p < sizeof vectors_passes / sizeof *vectors_passes; p++) {
    pass = &vectors_passes[p];
    kernels = li_kernels_of(pass->isa);
    kernels_name = luna_isa_name(pass->isa);
    if (!kernels) continue;
    check_edges();
    check_map_edges();
    check_reductions();
    for (int which = 0; which < VECTORS_ALL; which++) check_lanes(which);
  }
  return test_report("vectors");
}
