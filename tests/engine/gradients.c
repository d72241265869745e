/* Every op and layer of op_cases.h: luna_backward against central finite differences, in a double-precision build of
   the scalar path (`float` is double inside luna.h and here), 1e-6 relative for each input and parameter. */
#include <float.h>
#include <limits.h>
#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#include <unistd.h>
#elif defined(_WIN32)                /* its declarations need float as it is */
#define WIN32_LEAN_AND_MEAN
#define NOMINMAX
#include <windows.h>
#endif
#include "test.h"

#define float double
#define LI_DOUBLE
#define LUNA_NO_SIMD
#define LUNA_NO_THREADS
#define LUNA_NO_STDIO
#define LUNA_IMPLEMENTATION
#include "luna.h"
#include "op_cases.h"

#define STEP 1e-5 /* the error of a central difference is about STEP^2 f''' + 1e-16 f / STEP */
#define TOLERANCE 1e-6
#define FLOOR 1e-3        /* gradients smaller than this are compared absolutely */
#define MOST_ELEMENTS (TEST_QUICK ? 8 : 600) /* a larger array is checked along random directions */
#define DIRECTIONS (TEST_QUICK ? 2 : 6)

static double worst;
static const char *worst_name = "none";

/* derivative of the loss along `direction` (element `only` when that is >= 0) of input i */
static double gradient_difference(trial *t, const op_case *c, int variant, int i, const double *direction,
                                  int64_t only) {
  trial_array *a = &t->input[i];
  double side[2] = {0, 0};
  double *saved = common_floats(a->count);
  memcpy(saved, a->values, (size_t)a->count * sizeof *saved);
  for (int s = 0; s < 2; s++) {
    const double step = s ? -STEP : STEP;
    for (int64_t j = 0; j < a->count; j++)
      a->values[j] = saved[j] + (only < 0 ? step * direction[j] : j == only ? step : 0);
    if (!trial_run(t, c, variant, false)) side[s] = NAN;
    else side[s] = t->value;
  }
  memcpy(a->values, saved, (size_t)a->count * sizeof *saved);
  free(saved);
  return (side[0] - side[1]) / (2 * STEP);
}

static double gradient_error(trial *t, const op_case *c, int variant, int i) {
  const int64_t n = t->input[i].count;
  double *gradient = common_floats(n), error = 0;
  memcpy(gradient, t->input[i].gradient, (size_t)n * sizeof *gradient);
  if (n <= MOST_ELEMENTS) {
    double *difference = common_floats(n);
    for (int64_t j = 0; j < n; j++) difference[j] = gradient_difference(t, c, variant, i, NULL, j);
    error = common_error(gradient, difference, n, FLOOR);
    free(difference);
  } else {
    double size = FLOOR * FLOOR * (double)n, off = 0;
    for (int64_t j = 0; j < n; j++) size += gradient[j] * gradient[j];
    /* for random directions the mean of (difference . direction)^2 is |difference|^2 / 3 */
    for (int k = 0; k < DIRECTIONS; k++) {
      double *direction = common_random(n, 5000 + (uint64_t)k, 1), along = 0;
      for (int64_t j = 0; j < n; j++) along += gradient[j] * direction[j];
      along -= gradient_difference(t, c, variant, i, direction, -1);
      off += 3 * along * along / DIRECTIONS;
      free(direction);
    }
    error = sqrt(off / size);
  }
  free(gradient);
  return error;
}

static void gradient_case(const op_case *c, int variant) {
  trial t;
  memset(&t, 0, sizeof t);
  t.options.threads = 1;
  t.options.seed = 7;
  if (!CHECK(trial_run(&t, c, variant, true), "%s, variant %d: %s", c->name, variant, t.error)) {
    trial_free(&t);
    return;
  }
  const int inputs = t.inputs;
  for (int i = 0; i < inputs; i++) {
    const double error = gradient_error(&t, c, variant, i);
    CHECK(error <= TOLERANCE, "%s, variant %d, input %d of %d (%lld numbers): gradient is off by %.3g", c->name,
          variant, i, inputs,
          (long long)t.input[i].count, error);
    if (!(error <= worst)) worst = error, worst_name = c->name;
  }
  trial_free(&t);
}

/* A language model that goes on from a state: the same one each time, which a stream of the first parameters has left.
   Without a horizon, with one that the state has passed, and with a memory that forgets in two ways. */
static void carried(trial *t, int v) {
  static const int32_t tokens[24] = {1, 4, 2, 3, 0, 1, 1, 2, 4, 4, 0, 3, 2, 2, 1, 0, 3, 4, 1, 2, 0, 0, 4, 3};
  static unsigned char *kept[4];
  luna_lm model;
  luna_lm_config config = {0};
  config.vocab = 5, config.layers = 2, config.layer.memory = 3;
  config.layer.dim = 4, config.layer.heads = 2, config.layer.ffn = 6;
  config.layer.convolution = v % 2 ? 3 : 0;
  config.layer.sharing = v % 2 ? LUNA_SHARING_FULL : LUNA_SHARING_TIED;
  config.layer.horizon = v == 1 ? 6 : LUNA_HORIZON_NONE;
  config.layer.forget = v == 2 ? LUNA_FORGET_CONSTANT : v == 3 ? LUNA_FORGET_GATED : LUNA_FORGET_NONE;
  config.layer.recompute = v == 3 ? LUNA_RECOMPUTE_LAYER : LUNA_RECOMPUTE_NONE;
  if (luna_lm_init(&model, trial_params(t, LUNA_FORM_CHEAPEST), &config)) t->broken = true;
  in1(t, 1);
  in_params(t);
  luna_lm_state *state = luna_lm_state_open(&model, 2);
  const size_t size = luna_lm_state_size(state);
  if (state && !kept[v]) {
    luna_stream *stream = luna_stream_open(&model, &(luna_stream_config){.batch = 2});
    kept[v] = (unsigned char *)malloc(size);
    if (!luna_stream_prefill(stream, &(luna_input){.tokens = tokens, .batch = 2, .n = 4})) t->broken = true;
    if (luna_stream_state_save(stream, kept[v], size)) t->broken = true;
    luna_stream_close(stream);
  }
  if (luna_lm_state_load(state, kept[v], size) || luna_lm_state_continue(state)) t->broken = true;
  give(t, luna_lm_forward(&model, &(luna_input){.tokens = tokens + 8, .batch = 2, .n = 8}));
  give(t, luna_scale(t->tensor[0], 1));
}

int main(int argc, char **argv) { /* a name runs that case alone */
  static const op_case state = {"a carried state", carried, 4};
  for (int v = 0; v < 4; v++) gradient_case(&state, v);
  for (int i = 0; i < OP_CASES; i++)
    if (argc < 2 || strcmp(argv[1], op_cases[i].name) == 0)
      for (int v = 0; v < op_cases[i].variants; v++) gradient_case(&op_cases[i], v);
  printf("gradients: worst relative error %.2g (%s)\n", worst, worst_name);
  return test_report("gradients");
}
