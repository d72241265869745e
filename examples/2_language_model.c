/* Trains a causal language model of bytes and saves it: model.safetensors.
     cc -O2 -I. examples/2_language_model.c -o 2_language_model -lm -lpthread */
#define LUNA_IMPLEMENTATION
#include "luna.h"
#include <stdio.h>

int main(void) {
  const char text[] = "the moon goes round the earth, and the earth goes round the sun. ";
  enum { n = 256, size = sizeof text - 1 };
  int32_t tokens[n], next[n];

  luna_ctx *ctx = luna_open(NULL);                         /* all cores, best instruction set */
  luna_params *params = luna_params_open(ctx);
  luna_lm model;
  luna_lm_init(&model, params, &(luna_lm_config){ .layers = 2,
    .layer = { .dim = 64, .heads = 4, .convolution = 4, .forget = LUNA_FORGET_GATED } });
  luna_optimizer *adam = luna_adamw(params, &(luna_optimizer_config){ .lr = 5e-3f, .clip = 1,
    .schedule = { .decay = LUNA_DECAY_COSINE, .warmup = 20, .total = 400 } });
  for (int step = 0; step < 400; step++) {
    for (int i = 0; i < n; i++)                            /* windows of the text, each time from another place */
      tokens[i] = (unsigned char)text[(i + 7 * step) % size], next[i] = (unsigned char)text[(i + 7 * step + 1) % size];
    luna_begin_step(ctx);                                  /* releases all tensors of the step before, inputs too */
    luna_tensor *loss = luna_lm_loss(&model, &(luna_input){ .tokens = tokens, .batch = 1, .n = n }, next);
    luna_backward(loss);
    if (luna_optimizer_step(adam) != LUNA_OK) break;       /* any failure so far arrives here, and LUNA_NOT_FINITE */
    if (step % 40 == 0) printf("%d %.4f\n", step, (double)luna_item(loss));
  }
  if (luna_error_status(ctx) != LUNA_OK || luna_save(params, luna_path("model.safetensors")) != LUNA_OK)
    puts(luna_error(ctx));
  luna_close(ctx);
  return 0;
}
