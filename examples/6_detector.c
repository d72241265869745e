/* Trains a detector on whole recordings, and streams one: an answer a step.
     cc -O2 -I. examples/6_detector.c -o 6_detector -lm -lpthread */
#define LUNA_IMPLEMENTATION
#include "luna.h"
#include <math.h>
#include <stdio.h>

int main(void) {
  enum { batch = 8, n = 120, k = 2 };
  static float x[batch * n * k];
  static int32_t labels[batch * n];                        /* the class of each step, not shifted; -1: ignored */
  for (int i = 0; i < batch * n; i++) {
    int b = i / n, t = i % n;
    labels[i] = t > 30 + 7 * b && t < 80 + 4 * b;
    x[i * k] = 20 + 5 * sinf(0.3f * (float)t + (float)b);
    x[i * k + 1] = sinf(0.3f * (float)t + (float)b + (labels[i] ? 1.5f : 0));
  }
  luna_ctx *ctx = luna_open(NULL);
  luna_params *params = luna_params_open(ctx);
  luna_lm model;                                           /* causal: no step sees a later one */
  luna_lm_init(&model, params, &(luna_lm_config){ .features = k, .outputs = 2, .layers = 2,
    .layer = { .dim = 32, .heads = 4, .convolution = 8, .pre_norm = true, .forget = LUNA_FORGET_GATED } });
  luna_input input = { .features = x, .batch = batch, .n = n };
  luna_input_layer_fit(&model.input, &input);
  luna_optimizer *adam = luna_adamw(params, &(luna_optimizer_config){ .lr = 3e-3f, .clip = 1 });
  for (int step = 0; step < 200; step++) {
    luna_begin_step(ctx);
    luna_backward(luna_lm_loss(&model, &input, labels));
    if (luna_optimizer_step(adam) != LUNA_OK) return puts(luna_error(ctx)), 1;
  }
  luna_stream *stream = luna_stream_open(&model, NULL);
  for (int t = 0; stream && t < n; t++) {                  /* the first recording, which it has learnt from */
    const float *y = luna_stream_step_features(stream, x + t * k);        /* [outputs]; null: luna_stream_error */
    const float share = y ? 1 / (1 + expf(y[0] - y[1])) : 0;              /* softmax: of class 1 */
    if (y && t % 10 == 0) printf("step %d: %.0f%% for class 1, is %d\n", t, 100 * (double)share, (int)labels[t]);
  }
  luna_stream_close(stream);                               /* luna_stream_reset(stream) before another recording */
  luna_close(ctx);
  return 0;
}
