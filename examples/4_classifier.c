/* Trains a classifier of sequences of different lengths and saves it: sevens.safetensors.
     cc -O2 -I. examples/4_classifier.c -o 4_classifier -lm -lpthread */
#define LUNA_IMPLEMENTATION
#include "luna.h"
#include <stdio.h>

int main(void) {
  enum { batch = 16, n = 60 };
  int32_t tokens[batch * n], lengths[batch], labels[batch];
  luna_ctx *ctx = luna_open(NULL);
  luna_params *params = luna_params_open(ctx);
  luna_classifier model;
  luna_classifier_init(&model, params, &(luna_classifier_config){ .vocab = 10, .classes = 2,
    .encoder = { .layers = 2, .layer = { .dim = 64, .heads = 4, .memory = 16, .ffn = 128, .dropout = 0.1f } } });
  luna_optimizer *adam = luna_adamw(params, &(luna_optimizer_config){ .lr = 1e-3f, .weight_decay = 0.01f, .clip = 1,
    .schedule = { .decay = LUNA_DECAY_COSINE, .warmup = 20, .total = 200, .floor = 0.05f } });
  if (luna_optimizer_add_group(adam, &(luna_param_group){ .max_rank = 1, .decay_factor = -1 }) != LUNA_OK)
    return puts(luna_error(ctx)), 1;                             /* no decay on norms, biases */
  for (int step = 0; step < 200; step++) {
    for (int b = 0; b < batch; b++) {                            /* is there a 7? */
      lengths[b] = 20 + (7 * b + step) % (n - 20);
      labels[b] = (b + step) % 2;
      for (int i = 0; i < n; i++) tokens[b * n + i] = (i * i + 3 * b + step) % 7;
      if (labels[b]) tokens[b * n + (11 * step + b) % lengths[b]] = 7;
    }
    luna_begin_step(ctx);
    luna_input input = { .tokens = tokens, .lengths = lengths, .batch = batch, .n = n };
    luna_tensor *loss = luna_cross_entropy(luna_classifier_forward(&model, &input), labels, NULL);
    luna_backward(loss);
    if (luna_optimizer_step(adam) != LUNA_OK) return puts(luna_error(ctx)), 1;
    if (step % 20 == 0) printf("%d %.4f\n", step, (double)luna_item(loss));   /* before the next begin, which ends it */
  }
  luna_params_set_text(params, "labels", "no,yes");              /* texts of your own travel in the file */
  if (luna_save(params, luna_path("sevens.safetensors")) != LUNA_OK) puts(luna_error(ctx));
  luna_close(ctx);
  return 0;
}
