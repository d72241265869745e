/* Functions of single numbers, attention and its parts by their equations: naive loops in double, for every test that
   needs one. Include it after test.h, luna.h and common.h. */
#ifndef NAIVE_H
#define NAIVE_H
#include <math.h>

TEST_UNUSED static double naive_activation(int kind, double x) {
  switch (kind) {
    case LUNA_ACTIVATION_RELU: return x > 0 ? x : 0;
    case LUNA_ACTIVATION_GELU: return 0.5 * x * erfc(-x / sqrt(2));
    case LUNA_ACTIVATION_ELU1: return x > 0 ? x + 1 : exp(x);
    case LUNA_ACTIVATION_SOFTPLUS: return fmax(x, 0) + log1p(exp(-fabs(x)));
    case LUNA_ACTIVATION_SOFTPLUS2: return fmax(x, 0) + log1p(exp2(-fabs(x))) / log(2);
    case LUNA_ACTIVATION_SIGMOID: return 1 / (1 + exp(-x));
    case LUNA_ACTIVATION_SILU: return x / (1 + exp(-x));
    case LUNA_ACTIVATION_TANH: return tanh(x);
    case LUNA_ACTIVATION_LEAKY_RELU: return x > 0 ? x : 0.01 * x;
    case LUNA_ACTIVATION_EXP: return exp(x);
    case LUNA_ACTIVATION_LOG: return log(x);
    case LUNA_ACTIVATION_SQRT: return sqrt(x);
    case LUNA_ACTIVATION_RSQRT: return 1 / sqrt(x);
    case LUNA_ACTIVATION_ABS: return fabs(x);
    default: return x;
  }
}
TEST_UNUSED static double naive_slope(int kind, double x) {
  switch (kind) {
    case LUNA_ACTIVATION_RELU: return x > 0;
    case LUNA_ACTIVATION_GELU: return 0.5 * erfc(-x / sqrt(2)) + x * exp(-x * x / 2) * 0.39894228040143267794;
    case LUNA_ACTIVATION_ELU1: return x > 0 ? 1 : exp(x);
    case LUNA_ACTIVATION_SOFTPLUS: return 1 / (1 + exp(-x));
    case LUNA_ACTIVATION_SOFTPLUS2: return 1 / (1 + exp2(-x));
    case LUNA_ACTIVATION_SIGMOID: return 1 / (1 + exp(-x)) / (1 + exp(x));
    case LUNA_ACTIVATION_SILU: return (1 + x / (1 + exp(x))) / (1 + exp(-x));
    case LUNA_ACTIVATION_TANH: return 1 - tanh(x) * tanh(x);
    case LUNA_ACTIVATION_LEAKY_RELU: return x > 0 ? 1 : 0.01;
    case LUNA_ACTIVATION_EXP: return exp(x);
    case LUNA_ACTIVATION_LOG: return 1 / x;
    case LUNA_ACTIVATION_SQRT: return 0.5 / sqrt(x);
    case LUNA_ACTIVATION_RSQRT: return -0.5 / (x * sqrt(x));
    case LUNA_ACTIVATION_ABS: return x > 0 ? 1 : -1;
    default: return 1;
  }
}
/* an op of LUNA_ELEMENTWISE, and the gradient of input `input` where g is the result's */
TEST_UNUSED static double naive_each(int kind, double a, double b, double c) {
  switch (kind) {
    case LUNA_OP_ADD: return a + b;
    case LUNA_OP_SUB: return a - b;
    case LUNA_OP_MUL: return a * b;
    case LUNA_OP_DIV: return a / b;
    case LUNA_OP_MINIMUM: return a != a || b != b ? NAN : fmin(a, b);
    case LUNA_OP_MAXIMUM: return a != a || b != b ? NAN : fmax(a, b);
    case LUNA_OP_LESS: return a < b;
    case LUNA_OP_LESS_EQUAL: return a <= b;
    case LUNA_OP_EQUAL: return a == b;
    case LUNA_OP_NOT_EQUAL: return a != b;
    case LUNA_OP_WHERE: return a != 0 ? b : c;
    case LUNA_OP_CLAMP: return a < b ? b : a > c ? c : a;
    default: return NAN;
  }
}
TEST_UNUSED static double naive_each_slope(int kind, int input, double a, double b, double c, double g) {
  switch (kind) {
    case LUNA_OP_SUB: return input ? -g : g;
    case LUNA_OP_MUL: return input ? g * a : g * b;
    case LUNA_OP_DIV: return input ? -g * a / (b * b) : g / b;
    case LUNA_OP_MINIMUM: return input == (b < a) ? g : 0;
    case LUNA_OP_MAXIMUM: return input == (a < b) ? g : 0;
    case LUNA_OP_WHERE: return (input == 1) == (a != 0) ? g : 0;
    case LUNA_OP_CLAMP: return a < b || a > c ? 0 : g;
    default: return g;
  }
}
/* The rule of luna_dropout: of element e half-word e mod 8 of counter (e / 8, op number, step), key = seed, which drops
   it when below round(65536 p). */
TEST_UNUSED static uint32_t naive_half_word(uint64_t seed, uint32_t op, uint32_t step, uint64_t e) {
  const uint32_t counter[4] = {(uint32_t)(e / 8), (uint32_t)(e / 8 >> 32), op, step};
  uint32_t word[4];
  luna_philox(counter, seed, word);
  return word[e % 8 / 2] >> 16 * (e % 2) & 0xFFFFu;
}
TEST_UNUSED static bool naive_dropped(uint64_t seed, uint32_t op, uint32_t step, uint64_t e, double p) {
  return naive_half_word(seed, op, step, e) < (uint32_t)floor(65536 * p + 0.5);
}
TEST_UNUSED static double naive_dot(const float *a, const float *b, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; i++) sum += (double)a[i] * (double)b[i];
  return sum;
}
/* p becomes softmax(p); returns log-sum-exp, 0 of none */
TEST_UNUSED static double naive_softmax(double *p, int64_t n) {
  double max = -INFINITY, sum = 0;
  for (int64_t j = 0; j < n; j++) max = fmax(max, p[j]);
  for (int64_t j = 0; j < n; j++) sum += p[j] = exp(p[j] - max);
  for (int64_t j = 0; j < n; j++) p[j] /= sum;
  return n > 0 ? max + log(sum) : 0;
}

/* luna_route's w of one head at one token: sum_j e^(ln sigmoid(R_j)) is divided by its largest term, for small ones */
TEST_UNUSED static void naive_route(const float *router, int64_t slots, double strength, double *w) {
  int64_t chosen[2] = {-1, -1};
  double share[2], sum = 0;
  for (int i = 0; i < 2; i++)
    for (int64_t s = 0; s < slots; s++)
      if (s != chosen[0] && (chosen[i] < 0 || router[s] > router[chosen[i]])) chosen[i] = s;
  for (int64_t s = 0; s < slots; s++) w[s] = 0;
  for (int i = 0; i < 2 && i < slots; i++) {
    share[i] = naive_activation(LUNA_ACTIVATION_SOFTPLUS, -(double)router[chosen[0]]);
    share[i] = exp(share[i] - naive_activation(LUNA_ACTIVATION_SOFTPLUS, -(double)router[chosen[i]]));
    sum += share[i];
  }
  const double a = naive_activation(LUNA_ACTIVATION_SIGMOID, fmin(fmax(strength, -15), 15));
  for (int i = 0; i < 2 && i < slots; i++) w[chosen[i]] = -expm1(-a * share[i] / sum);
}
/* of a routed memory: what a head's slots fade by, and whether a slot that weighs z is empty */
TEST_UNUSED static double naive_fade(double fade) { return naive_activation(LUNA_ACTIVATION_SIGMOID, fade) / 4; }
TEST_UNUSED static bool naive_empty(double z) { return z * LUNA_FORGET_SCALE < ldexp(1, -86); }

/* rows of the longest of n sequences */
TEST_UNUSED static int64_t naive_longest(const int32_t *offsets, int64_t n) {
  int64_t most = 0;
  for (int64_t b = 0; b < n; b++) most = offsets[b + 1] - offsets[b] > most ? offsets[b + 1] - offsets[b] : most;
  return most;
}
/* whether query i sees key j of a band; window null: of all keys, where not causal */
typedef struct naive_window { int64_t left, right; } naive_window;
TEST_UNUSED static bool naive_sees(const naive_window *window, bool causal, int64_t i, int64_t j) {
  if (causal && j > i) return false;
  return !window || (j - i >= -window->left && j - i <= window->right);
}

typedef struct naive {
  int64_t batch, heads, queries, keys, dim, value_dim;
  const int32_t *lengths, *query_offsets, *key_offsets;
  double scale, dropout;
  bool causal;
  uint64_t seed;
  uint32_t op, step;
} naive;
TEST_UNUSED static double naive_kept(const naive *a, int64_t e) { /* of weight e: 0 or 1 / (1 - p) */
  return naive_dropped(a->seed, a->op, a->step, (uint64_t)e, a->dropout) ? 0 : 1 / (1 - a->dropout);
}
/* softmax attention of dense [batch, rows, heads, dim] or ragged rows */
TEST_UNUSED static void naive_attention(const naive *a, const float *q, const float *k, const float *v, float *out,
                                        float *lse, float *sums) {
  for (int64_t b = 0; b < a->batch; b++) {
    const int64_t q0 = a->query_offsets ? a->query_offsets[b] : b * a->queries,
        k0 = a->key_offsets ? a->key_offsets[b] : b * a->keys;
    const int64_t rows = a->query_offsets ? a->query_offsets[b + 1] - q0 : a->queries;
    const int64_t all = a->lengths ? a->lengths[b] : a->key_offsets ? a->key_offsets[b + 1] - k0 : a->keys;
    for (int64_t i = 0; i < rows; i++)
      for (int64_t h = 0; h < a->heads; h++) {
        const int64_t keys = a->causal && i + 1 < all ? i + 1 : all;
        double *p = (double *)common_alloc((size_t)(keys + 1) * sizeof(double)), kept = 0;
        float *y = out + ((q0 + i) * a->heads + h) * a->value_dim;
        for (int64_t j = 0; j < keys; j++)
          p[j] = a->scale * naive_dot(q + ((q0 + i) * a->heads + h) * a->dim, k + ((k0 + j) * a->heads + h) * a->dim,
                                      a->dim);
        const double log_sum = naive_softmax(p, keys);
        for (int64_t j = 0; j < keys; j++)
          kept += p[j] *= naive_kept(a, ((b * a->heads + h) * a->queries + i) * a->keys + j);
        if (sums) sums[(q0 + i) * a->heads + h] = (float)kept;
        for (int64_t e = 0; e < a->value_dim; e++) {
          double total = 0;
          for (int64_t j = 0; j < keys; j++) total += p[j] * (double)v[((k0 + j) * a->heads + h) * a->value_dim + e];
          y[e] = (float)total;
        }
        if (lse) lse[(q0 + i) * a->heads + h] = (float)log_sum;
        free(p);
      }
  }
}

#endif
