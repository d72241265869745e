/* Generates text from what 2_language_model.c has saved, a token at a time.
     cc -O2 -I. examples/3_generate.c -o 3_generate -lm -lpthread */
#define LUNA_IMPLEMENTATION
#include "luna.h"
#include <stdio.h>

int main(void) {
  luna_ctx *ctx = luna_open(NULL);
  luna_lm model;
  if (luna_load_model_of(LUNA_MODEL_LM, &model, luna_params_open(ctx), luna_path("model.safetensors")) != LUNA_OK)
    return puts(luna_error(ctx)), 1;

  luna_stream *stream = luna_stream_open(&model, NULL);
  luna_sampling sampling = { .temperature = 0.8f, .top_k = 40, .seed = 1 };
  int32_t token = 't';
  for (int i = 0; i < 400 && token >= 0; i++) {
    putchar(token);
    token = luna_sample(luna_stream_step(stream, &token), 256, &sampling);
  }
  luna_stream_close(stream);
  luna_close(ctx);
  return 0;
}
