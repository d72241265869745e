/* Positions: sinusoids against libm, learned tables, the scale of embeddings. */
#include "test.h"
#define LUNA_IMPLEMENTATION
#include "luna.h"
#include "common.h"
#include "models.h"

/* ---- positions: against libm's sine and cosine in double, of frequencies rounded to float ---- */
static void check_sinusoids(int64_t dim, int64_t first, int64_t n) {
  luna_ctx *ctx = ctx_open();
  luna_params *params = luna_params_open(ctx);
  luna_encoder encoder;
  luna_encoder_config config = {0};
  luna_tensor *p = NULL;
  const int64_t half = dim / 2;
  config.layer.dim = dim, config.layer.heads = 1, config.layers = 1, config.layer.ffn = 1, config.layer.memory = 5;
  config.first_position = first;
  if (CHECK(luna_encoder_init(&encoder, params, "", 2, &config) == LUNA_OK, "luna_encoder_init: %s", luna_error(ctx))) {
    int32_t *tokens = common_tokens(n, 1, 2);
    double worst = 0;
    memset(encoder.embedding->data, 0, (size_t)(2 * dim) * sizeof(float));
    memset(encoder.memory->data, 0, (size_t)(5 * dim) * sizeof(float));
    luna_begin_inference(ctx);
    float *x = values_of(ctx, luna_encoder_embed(&encoder, &(luna_input){ tokens, NULL, 1, n, NULL }, &p),
                         "luna_encoder_embed"),
          *memory = values_of(ctx, p, "the memory");
    for (int64_t t = 0; t < n + 5; t++) /* the tokens, then the slots, which are counted from 0 */
      for (int64_t i = 0; i < dim; i++) {
        const float frequency = (float)exp(-(double)(half ? i % half : 0) * log(10000.0) /
                                           (half > 1 ? (double)(half - 1) : 1));
        const double angle = (double)(t < n ? first + t : t - n) * (double)frequency;
        const double expected = i == 2 * half ? 0 : i < half ? sin(angle) : cos(angle);
        const double off = fabs((double)(t < n ? x[t * dim + i] : memory[(t - n) * dim + i]) - expected);
        if (!(off <= worst)) worst = off;
      }
    CHECK(worst <= 1e-7, "positions %lld to %lld in %lld dimensions are off by %.3g", (long long)first,
          (long long)(first + n),
          (long long)dim, worst);
    free(tokens), free(x), free(memory);
  }
  luna_close(ctx);
}
/* x = s E[token] + position, s = sqrt(dim) or, with learned positions, 1; P = s M, no position; what is longer is
   refused */
static void check_embedding(luna_positions positions, luna_embedding_scale scale) {
  enum { FIRST = 2, LONGEST = 9 };
  luna_ctx *ctx = ctx_open();
  luna_params *params = luna_params_open(ctx);
  luna_encoder encoder;
  luna_encoder_config config = encoder_config(0);
  luna_tensor *p = NULL;
  int32_t *tokens = common_tokens(LONGEST + 1, 7, VOCAB);
  const double s = scale == LUNA_EMBEDDING_SCALE_SQRT_DIM ||
      (scale == LUNA_EMBEDDING_SCALE_DEFAULT && positions != LUNA_POSITIONS_LEARNED) ? sqrt(DIM) : 1;
  config.positions = positions, config.embedding_scale = scale, config.first_position = FIRST,
      config.max_length = LONGEST;
  CHECK(luna_encoder_init(&encoder, params, "", VOCAB, &config) == LUNA_OK, "%s", luna_error(ctx));
  luna_begin_inference(ctx);
  float *x = values_of(ctx, luna_encoder_embed(&encoder, &(luna_input){ tokens, NULL, 1, LONGEST, NULL }, &p),
                       "luna_encoder_embed"),
        *memory = values_of(ctx, p, "the memory");
  float *expected = common_floats(LONGEST * DIM), *slots = common_floats(SLOTS * DIM);
  for (int64_t i = 0; i < LONGEST * DIM; i++)
    expected[i] = (float)(s * parameter(encoder.embedding, tokens[i / DIM] * DIM + i % DIM) +
                          (positions == LUNA_POSITIONS_LEARNED ? parameter(encoder.positions, FIRST * DIM + i) : 0));
  for (int64_t i = 0; i < SLOTS * DIM; i++) slots[i] = (float)(s * parameter(encoder.memory, i));
  test_close("embedded tokens", x, expected, LONGEST * DIM, 1e-6);
  test_close("the embedded memory", memory, slots, SLOTS * DIM, 1e-6);
  luna_begin_inference(ctx);
  p = NULL;
  luna_tensor *more = luna_encoder_embed(&encoder, &(luna_input){ tokens, NULL, 1, LONGEST + 1, NULL }, &p);
  if (positions == LUNA_POSITIONS_LEARNED) {
    CHECK(luna_error_status(ctx) == LUNA_BAD_ARGUMENT, "10 tokens, 9 positions: %s",
          luna_status_text(luna_error_status(ctx)));
    refused(ctx, !more, MAX_LENGTH, "a sequence longer than the learned positions");
  } else CHECK(more != NULL, "no positions, and yet: %s", luna_error(ctx));
  free(tokens), free(x), free(memory), free(expected), free(slots);
  luna_close(ctx);
}
static void check_learned_lm(void) { /* a language model's learned positions count from 0 */
  luna_ctx *ctx = ctx_open();
  luna_params *params = luna_params_open(ctx);
  luna_lm model;
  luna_lm_config config = {0};
  int32_t *tokens = common_tokens(9, 7, VOCAB);
  config.vocab = VOCAB, config.layer.dim = DIM, config.layer.heads = 2, config.positions = LUNA_POSITIONS_LEARNED,
      config.max_length = 8;
  CHECK(luna_lm_init(&model, params, &config) == LUNA_OK && model.positions && model.positions->shape[0] == 8, "%s",
        luna_error(ctx));
  luna_begin_inference(ctx);
  CHECK(luna_lm_forward(&model, &(luna_input){ tokens, NULL, 1, 8, NULL }) != NULL, "8 tokens: %s", luna_error(ctx));
  refused(ctx, !luna_lm_forward(&model, &(luna_input){ tokens, NULL, 1, 9, NULL }), MAX_LENGTH,
      "a language model's sequence of 9");
  free(tokens);
  luna_close(ctx);
}
static void check_positions(void) {
  static const int64_t dims[] = {1, 2, 3, 7, 12, 64}, firsts[] = {0, 1, 2, 63, 64, 1000, 65537, 1000000 - 130, 1000000};
  for (size_t i = 0; i < sizeof dims / sizeof *dims; i++)
    for (size_t j = 0; j < sizeof firsts / sizeof *firsts; j++) check_sinusoids(dims[i], firsts[j], 130);
  for (int scale = 0; scale < 3; scale++)
    check_embedding(LUNA_POSITIONS_LEARNED, (luna_embedding_scale)scale),
        check_embedding(LUNA_POSITIONS_NONE, (luna_embedding_scale)scale);
  check_learned_lm();
  heap_check("positions");
}

int main(void) {
  check_positions();
  return test_report("positions");
}
