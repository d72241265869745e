/* Classifies a sequence by what 4_classifier.c has saved.
     cc -O2 -I. examples/5_use_classifier.c -o 5_use_classifier -lm -lpthread */
#define LUNA_IMPLEMENTATION
#include "luna.h"
#include <stdio.h>

int main(void) {
  const int32_t tokens[30] = { 3, 1, 4, 1, 5, 2, 6, 5, 3, 5, 0, 2, 7, 1 };
  luna_ctx *ctx = luna_open(NULL);
  luna_params *params = luna_params_open(ctx);
  luna_classifier model;                                         /* luna_load_model loads any kind, and says which */
  int32_t guess;
  if (luna_load_model_of(LUNA_MODEL_CLASSIFIER, &model, params, luna_path("sevens.safetensors")) != LUNA_OK)
    return puts(luna_error(ctx)), 1;
  luna_begin_inference(ctx);
  luna_tensor *logits = luna_classifier_forward(&model, &(luna_input){ .tokens = tokens, .batch = 1, .n = 30 });
  if (luna_argmax(logits, &guess) != LUNA_OK) return puts(luna_error(ctx)), 1;
  printf("class %d of %s\n", (int)guess, luna_params_get_text(params, "labels"));
  luna_close(ctx);
  return 0;
}
