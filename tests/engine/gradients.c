/* Every op and layer of op_cases.h: luna_backward against central finite differences, in a double-precision build of
   the scalar path (`float` is double inside luna.h and here), 1e-6 relative for each input and parameter. Then, since
   this build has no tests/kernels/backward_reference.h, as a user's: the reference infers every case, and says that it
   cannot train. */
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
#undef LI_BACKWARD_REFERENCE

#include <math.h>
#define fabsf fabs /* which takes these doubles as they are */
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
   Without a horizon, with one that the state has passed, and with a memory that forgets in three ways. */
static void carried(trial *t, int v) {
  static const int32_t tokens[24] = {1, 4, 2, 3, 0, 1, 1, 2, 4, 4, 0, 3, 2, 2, 1, 0, 3, 4, 1, 2, 0, 0, 4, 3};
  static const luna_forget forget[5] = {LUNA_FORGET_NONE, LUNA_FORGET_NONE, LUNA_FORGET_CONSTANT, LUNA_FORGET_GATED,
                                        LUNA_FORGET_ROUTED};
  static unsigned char *kept[5];
  luna_lm model;
  luna_lm_config config = {0};
  config.vocab = 5, config.layers = 2, config.layer.memory = 3;
  config.layer.dim = 4, config.layer.heads = 2, config.layer.ffn = 6;
  config.layer.convolution = v % 2 ? 3 : 0;
  config.layer.sharing = v % 2 ? LUNA_SHARING_FULL : LUNA_SHARING_TIED;
  config.layer.horizon = v == 1 ? 6 : LUNA_HORIZON_NONE;
  config.layer.forget = forget[v];
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

/* ---- the reference without a backward pass ---- */
/* A case's results in inference, beside those of the scalar kernels. Where these fail, as what is for training alone
   does, the reference fails with the same sentence. */
static void reference_case(const op_case *c, int variant) {
  trial want, got;
  memset(&want, 0, sizeof want);
  memset(&got, 0, sizeof got);
  want.infers = got.infers = true;
  want.options.threads = got.options.threads = 1;
  got.options.isa = LUNA_ISA_REFERENCE;
  const bool good = trial_run(&want, c, variant, false);
  CHECK(trial_run(&got, c, variant, false) == good && strcmp(got.error, want.error) == 0,
        "%s, variant %d: \"%s\", by the reference \"%s\"", c->name, variant, want.error, got.error);
  for (int i = 0; good && i < want.outputs; i++) {
    const double error = common_error(got.output[i].values, want.output[i].values, want.output[i].count, FLOOR);
    CHECK(error <= TOLERANCE, "%s, variant %d: output %d of the reference is off by %.3g", c->name, variant, i, error);
  }
  trial_free(&want);
  trial_free(&got);
}

/* luna_begin_step fails, and luna_backward then, too, until the next begin. An optimiser still takes gradients. */
static void reference_step(void) {
  const luna_options options = {.isa = LUNA_ISA_REFERENCE};
  const int64_t two = 2;
  const float ones[2] = {1, 1};
  const luna_optimizer_config config = {.lr = 1};
  luna_ctx *ctx = luna_open(&options);
  luna_params *params = luna_params_open(ctx);
  luna_tensor *w = luna_param(params, "w", 1, &two, (luna_init){LUNA_INIT_ZEROS, 0});
  for (int again = 0; again < 2; again++) {
    CHECK(luna_begin_step(ctx) == LUNA_UNSUPPORTED && luna_error_id_of(ctx) == LUNA_ERROR_REFERENCE_STEP,
          "a step begins: \"%s\"", luna_error(ctx));
    CHECK(strstr(luna_error(ctx), "LUNA_ISA_REFERENCE") && strstr(luna_error(ctx), "luna_begin_inference"),
          "it says \"%s\"", luna_error(ctx));
    CHECK(luna_backward(luna_sum(luna_exp(w), 0)) == LUNA_UNSUPPORTED && !w->grad, "a gradient is computed after it");
    CHECK(luna_begin_inference(ctx) == LUNA_OK && fabs(luna_item(luna_sum(luna_exp(w), 0)) - 2) < 1e-6,
          "inference after it: \"%s\"", luna_error(ctx));
  }
  luna_optimizer *optimizer = luna_sgd(params, &config);
  CHECK(luna_write_grad(w, ones) == LUNA_OK && fabs(luna_params_clip_grad(params, 0) - sqrt(2.0)) < 1e-9,
        "the norm of a gradient: \"%s\"", luna_error(ctx));
  CHECK(luna_optimizer_advance(optimizer) == LUNA_OK && luna_optimizer_apply(optimizer) == LUNA_OK &&
            w->data[0] < 0 && w->data[0] == w->data[1], "an update: \"%s\"", luna_error(ctx));
  luna_close(ctx);
}

/* The backward functions refuse the reference, and what they would run by it: a call without scratch. */
static void reference_calls(void) {
  enum { ROWS = 3, HEADS = 2, DIM = 4, COUNT = ROWS * HEADS * DIM };
  float in[COUNT], out[COUNT], grad[COUNT], kept[COUNT], lse[ROWS * HEADS];
  for (int i = 0; i < COUNT; i++) in[i] = (float)i / COUNT, grad[i] = 7;
  luna_attention_args a = {.q = in, .k = in, .v = in, .out = out, .log_sum_exp = lse, .batch = 1, .heads = HEADS,
                           .queries = ROWS, .keys = ROWS, .head_dim = DIM, .grad_out = in, .grad_q = grad,
                           .grad_k = grad, .grad_v = grad};
  luna_causal_args c = {.x = in, .y = in, .z = in, .out = out, .batch = 1, .rows = ROWS, .heads = HEADS, .dim = DIM,
                        .value_dim = DIM, .grad_out = in, .grad_x = grad, .grad_y = grad, .grad_z = grad};
  luna_causal_nested_args n = {.q = in, .k = in, .v = in, .s = in, .out = out, .kept = kept, .batch = 1, .rows = ROWS,
                               .heads = HEADS, .head_dim = DIM, .slots = DIM, .grad_out = in, .grad_q = grad,
                               .grad_k = grad, .grad_v = grad, .grad_s = grad};
  void *scratch = malloc(1 << 22);
  for (int way = 0; way < 3; way++) { /* without scratch; the reference; the scalar kernels with scratch */
    static const luna_status backward[3] = {LUNA_OUT_OF_MEMORY, LUNA_UNSUPPORTED, LUNA_OK};
    a.run = c.run = n.run = (luna_run){.isa = way == 1 ? LUNA_ISA_REFERENCE : LUNA_ISA_BEST,
                                       .scratch = way ? scratch : NULL, .scratch_size = 1 << 22};
    CHECK(luna_softmax_attention_f32(&a) == LUNA_OK && luna_causal_product_f32(&c) == LUNA_OK &&
              luna_causal_nested_attention_f32(&n) == LUNA_OK, "way %d: a forward call fails", way);
    const luna_status got[3] = {luna_softmax_attention_backward_f32(&a), luna_causal_product_backward_f32(&c),
                                luna_causal_nested_attention_backward_f32(&n)};
    for (int i = 0; i < 3; i++)
      CHECK(got[i] == backward[way], "way %d: backward call %d gives \"%s\"", way, i, luna_status_text(got[i]));
    int same = 0;
    for (int i = 0; i < COUNT; i++) same += grad[i] == 7;
    CHECK(way == 2 ? same < COUNT : same == COUNT, "way %d: %d of %d gradients are as before", way, same, COUNT);
  }
  free(scratch);
}

int main(int argc, char **argv) { /* a name runs that case alone */
  static const op_case state = {"a carried state", carried, 5};
  for (int v = 0; v < state.variants; v++) gradient_case(&state, v);
  for (int i = 0; i < OP_CASES; i++)
    if (argc < 2 || strcmp(argv[1], op_cases[i].name) == 0)
      for (int v = 0; v < op_cases[i].variants; v++) {
        gradient_case(&op_cases[i], v);
        reference_case(&op_cases[i], v);
      }
  reference_step();
  reference_calls();
  printf("gradients: worst relative error %.2g (%s)\n", worst, worst_name);
  return test_report("gradients");
}
