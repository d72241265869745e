/* Segments: the memory that one leaves is what the next begins with. */
#include "test.h"
#define LUNA_IMPLEMENTATION
#include "luna.h"
#include "common.h"
#include "models.h"

/* ---- segments: the memory that one leaves is what the next begins with ---- */
enum { SEGMENT = 9 };
typedef struct segments {
  luna_ctx *ctx;
  luna_params *params;
  luna_encoder encoder;
} segments;
static void segments_open(segments *s, int v) {
  luna_encoder_config config = encoder_config(v);
  s->ctx = ctx_open();
  s->params = luna_params_open(s->ctx);
  CHECK(luna_encoder_init(&s->encoder, s->params, "", VOCAB, &config) == LUNA_OK, "%s", luna_error(s->ctx));
  common_params(s->params, 65);
}
/* two segments of tokens below 5 and of the others, in one step; the gradients of a loss of the second alone */
typedef enum crossing { STRAIGHT, DETACHED, AS_CONSTANT } crossing;
static float *two_segments(segments *s, crossing how, float **x) {
  int32_t first[2 * SEGMENT], second[2 * SEGMENT];
  luna_tensor *p = NULL;
  for (int i = 0; i < 2 * SEGMENT; i++)
    first[i] = (int32_t)(common_hash(50, (uint64_t)i) % 5),
        second[i] = 5 + (int32_t)(common_hash(51, (uint64_t)i) % (VOCAB - 5));
  luna_params_zero_grad(s->params);
  luna_begin_step(s->ctx);
  luna_encoder_forward(&s->encoder, &(luna_input){ first, NULL, 2, SEGMENT, NULL }, &p);
  if (how == DETACHED) p = luna_detach(p);
  if (how == AS_CONSTANT) {
    float *values = values_of(s->ctx, p, "the memory");
    luna_begin_step(s->ctx);
    const int64_t shape[3] = {2, SLOTS, DIM};
    p = luna_tensor_new(s->ctx, values, 3, shape);
    free(values);
  }
  luna_tensor *y = luna_encoder_forward(&s->encoder, &(luna_input){ second, NULL, 2, SEGMENT, NULL }, &p);
  *x = values_of(s->ctx, y, "the second segment");
  luna_tensor *both = luna_add(common_loss(y, 52), common_loss(p, 53));
  CHECK(luna_backward(both) == LUNA_OK, "segments: %s", luna_error(s->ctx));
  return all_gradients(s->params);
}
static void check_detach(int v) {
  segments s;
  float *x[3], *g[3];
  double early[3];
  segments_open(&s, v);
  for (int how = 0; how < 3; how++) {
    g[how] = two_segments(&s, (crossing)how, &x[how]);
    float *table = gradient_of(luna_params_find(s.params, "embed_tokens.weight"));
    early[how] = length_of(table, 5 * DIM);
    CHECK(length_of(table + 5 * DIM, (VOCAB - 5) * DIM) > 1e-3, "%s: the second segment's own tokens have no gradient",
          encoder_names[v]);
    free(table);
  }
  CHECK(same_bits(x[0], x[1], 2 * SEGMENT * DIM) && same_bits(x[0], x[2], 2 * SEGMENT * DIM),
        "%s: luna_detach changes values",
        encoder_names[v]);
  CHECK(early[STRAIGHT] > 1e-3, "%s: no gradient goes back to the segment before", encoder_names[v]);
  CHECK(early[DETACHED] == 0 && gradient_size(luna_params_find(s.params, "projected_embeddings")) == 0,
        "%s: through luna_detach goes a gradient of %.3g", encoder_names[v], early[DETACHED]);
  CHECK(same_bits(g[DETACHED], g[AS_CONSTANT], luna_params_element_count(s.params)),
        "%s: luna_detach has other gradients than a constant",
        encoder_names[v]);
  for (int how = 0; how < 3; how++) free(x[how]), free(g[how]);
  luna_close(s.ctx);
}
/* `count` segments, the memory carried over begins, or in one inference; the last X and P, to be freed */
static float *many_segments(segments *s, const int32_t *tokens, int64_t count, bool carried, bool forgetting,
                            float **memory,
                            size_t *peak_early, size_t *peak) {
  const int64_t shape[3] = {1, SLOTS, DIM};
  float *values = common_floats(SLOTS * DIM), *x = NULL;
  luna_tensor *p = NULL, *y = NULL;
  for (int64_t i = 0; i < count; i++) {
    if (i == 0 || carried) luna_begin_inference(s->ctx);
    if (i && carried) p = luna_tensor_new(s->ctx, values, 3, shape);
    if (forgetting) p = NULL;
    y = luna_encoder_forward(&s->encoder, &(luna_input){ tokens + i * SEGMENT, NULL, 1, SEGMENT, NULL }, &p);
    if (!CHECK(y && luna_read(p, values) == LUNA_OK, "segment %lld: %s", (long long)i, luna_error(s->ctx))) break;
    if (i == 1 && peak_early) *peak_early = luna_memory(s->ctx).peak;
  }
  if (peak) *peak = luna_memory(s->ctx).peak;
  x = values_of(s->ctx, y, "the last segment");
  if (memory) *memory = values;
  else free(values);
  return x;
}
static void check_carried(int v) {
  enum { COUNT = 50, LATER = 5 };
  segments s;
  size_t early = 0, late = 0;
  int32_t *tokens = common_tokens(COUNT * SEGMENT, 54, VOCAB);
  float *pa, *pb;
  segments_open(&s, v);
  float *a = many_segments(&s, tokens, COUNT, true, false, &pa, &early, &late);
  CHECK(early == late, "%s: memory in use grows from %zu bytes in the second segment to %zu in the 50th",
        encoder_names[v], early, late);
  float *b = many_segments(&s, tokens, COUNT, false, false, &pb, NULL, NULL);
  CHECK(same_bits(a, b, SEGMENT * DIM) && same_bits(pa, pb, SLOTS * DIM),
        "%s: a memory carried over luna_begin_inference gives other bits",
        encoder_names[v]);
  free(a), free(b), free(pa), free(pb);
  a = many_segments(&s, tokens, LATER, true, false, &pa, NULL, NULL);
  tokens[3] = (tokens[3] + 1) % VOCAB;
  b = many_segments(&s, tokens, LATER, true, false, &pb, NULL, NULL);
  CHECK(test_error(b, a, SEGMENT * DIM) > 1e-4 && test_error(pb, pa, SLOTS * DIM) > 1e-4,
        "%s: a token of the first segment changes the fifth by %.3g only", encoder_names[v],
            test_error(b, a, SEGMENT * DIM));
  free(a), free(b), free(pa), free(pb);
  a = many_segments(&s, tokens, LATER, true, true, NULL, NULL, NULL);
  tokens[3] = (tokens[3] + 1) % VOCAB;
  b = many_segments(&s, tokens, LATER, true, true, NULL, NULL, NULL);
  CHECK(same_bits(a, b, SEGMENT * DIM), "%s: a segment without a memory depends on the one before", encoder_names[v]);
  free(a), free(b), free(tokens);
  luna_close(s.ctx);
}
/* The class stands in the first of three segments, and the answer is read from the last one's memory. */
static void check_memory_trains(void) {
  luna_ctx *ctx = ctx_open();
  luna_params *params = luna_params_open(ctx);
  luna_classifier model;
  luna_classifier_config config = {0};
  luna_optimizer_config adamw = {0};
  int32_t tokens[3][16 * SEGMENT], labels[16];
  double sum = 0;
  adamw.lr = 1e-2f;
  config.vocab = VOCAB, config.encoder = encoder_config(0);
  CHECK(luna_classifier_init(&model, params, &config) == LUNA_OK, "%s", luna_error(ctx));
  luna_optimizer *adam = luna_adamw(params, &adamw);
  for (int step = 0; step < 120; step++) {
    luna_tensor *p = NULL, *x = NULL;
    for (int i = 0; i < 3 * 16 * SEGMENT; i++)
      tokens[i / (16 * SEGMENT)][i % (16 * SEGMENT)] = (int32_t)(common_hash(55 + (uint64_t)step,
          (uint64_t)i) % (VOCAB - 2));
    for (int b = 0; b < 16; b++) {
      labels[b] = (int32_t)(common_hash(56, (uint64_t)(step * 16 + b)) % 2);
      tokens[0][b * SEGMENT + step % SEGMENT] = VOCAB - 2 + labels[b];
    }
    luna_begin_step(ctx);
    for (int i = 0; i < 3; i++)
      x = luna_encoder_forward(&model.encoder, &(luna_input){ tokens[i], NULL, 16, SEGMENT, NULL }, &p);
    luna_tensor *loss = luna_cross_entropy(luna_linear(luna_classifier_pool(&model, x, p, NULL), model.projection,
                                                       NULL), labels, NULL);
    luna_backward(loss);
    if (!CHECK(luna_optimizer_step(adam) == LUNA_OK, "segments: %s", luna_error(ctx))) break;
    if (step >= 110) sum += (double)luna_item(loss) / 10 / log(2);
  }
  CHECK(sum < 0.3, "what stands in the first of three segments: the loss falls to %.3f of ln 2 only", sum);
  luna_close(ctx);
}
static void check_segments(void) {
  /* post-norm, pre-norm, shared, kept padding */
  for (int v = 0; v < 8; v += v == 0 ? 1 : 3) check_detach(v), check_carried(v);
  check_memory_trains();
  heap_check("segments");
}

int main(void) {
  check_segments();
  return test_report("carried_memory");
}
