/* The masked language model: which places are masked, and losses of those places alone; the loss of a language
   model. */
#include "test.h"
#define LUNA_IMPLEMENTATION
#include "luna.h"
#include "examples/luna_mask.h"
#include "common.h"
#include "models.h"

/* ---- masking: which places, what becomes of them, and nothing else ---- */
enum { ROWS = 200, COLUMNS = 1100, PLACES = ROWS * COLUMNS };
typedef struct masked {
  int32_t *input, *labels;
  int64_t count;
} masked;
static masked mask(const luna_masking *masking, const int32_t *tokens, const int32_t *lengths) {
  masked m;
  m.input = (int32_t *)common_alloc(PLACES * sizeof(int32_t));
  m.labels = (int32_t *)common_alloc(PLACES * sizeof(int32_t));
  m.count = luna_mask_tokens(&(luna_input){ tokens, lengths, ROWS, COLUMNS, NULL }, masking, m.input, m.labels);
  return m;
}
static void masked_free(masked *m) { free(m->input), free(m->labels); }
static bool masked_same(const masked *a, const masked *b) {
  return a->count == b->count && memcmp(a->input, b->input, PLACES * sizeof(int32_t)) == 0 &&
         memcmp(a->labels, b->labels, PLACES * sizeof(int32_t)) == 0;
}
/* `count` of `of` tries at probability p, within 5 deviations */
static void check_rate(const char *what, int64_t count, int64_t of, double p) {
  const double off = ((double)count - (double)of * p) / sqrt((double)of * p * (1 - p));
  CHECK(fabs(off) <= 5, "%s: %lld of %lld, %.1f deviations from %.3g", what, (long long)count, (long long)of, off, p);
}
static void check_mask_rates(luna_masking masking, int32_t vocab, const int32_t *tokens, const int32_t *lengths) {
  masked m = mask(&masking, tokens, lengths);
  const int32_t below = masking.vocab ? masking.vocab : masking.mask;
  int64_t real = 0, chosen = 0, hidden = 0, random = 0, drawn[64] = {0}, wrong = 0;
  for (int64_t i = 0; i < PLACES; i++) {
    const bool inside = !lengths || i % COLUMNS < lengths[i / COLUMNS];
    real += inside;
    if (m.labels[i] < 0) wrong += m.labels[i] != -1 || m.input[i] != tokens[i];
    else {
      wrong += !inside || m.labels[i] != tokens[i];
      chosen++;
      hidden += m.input[i] == masking.mask;
      if (m.input[i] == masking.mask || m.input[i] == tokens[i]) continue;
      random++;
      if (m.input[i] >= 0 && m.input[i] < below) drawn[m.input[i]]++;
      else wrong++;
    }
  }
  CHECK(wrong == 0,
        "masking is wrong in %lld places: a label that is not the token, an input that changed without one, a place "
        "beyond a length", (long long)wrong);
  CHECK(m.count == chosen, "%lld places are chosen, counted %lld", (long long)chosen, (long long)m.count);
  check_rate("chosen", chosen, real, masking.probability > 0 ? (double)masking.probability : 0.15);
  check_rate("masked", hidden, chosen, 0.8);
  /* a random token is by chance the one that was there: 1 of `vocab` for tokens below `below` */
  check_rate("random", random, chosen, 0.1 * (1 - (double)below / vocab / below));
  for (int32_t t = 0; t < below; t++) check_rate("one random token", drawn[t], random, 1.0 / below);
  masked_free(&m);
}
static void check_masking(void) {
  const int32_t vocab = 20;
  int32_t *tokens = common_tokens(PLACES, 8, vocab), lengths[ROWS],
      *alias = (int32_t *)common_alloc(PLACES * sizeof(int32_t));
  luna_masking masking = {0, 20, 0, 7, 1}, other;
  for (int b = 0; b < ROWS; b++) lengths[b] = b == 0 ? 0 : 900 + (int32_t)(common_hash(9, (uint64_t)b) % 201);
  check_mask_rates(masking, vocab, tokens, NULL);
  check_mask_rates(masking, vocab, tokens, lengths);
  other = masking, other.vocab = 12;
  check_mask_rates(other, vocab, tokens, lengths);
  other = masking, other.probability = 0.4f;
  check_mask_rates(other, vocab, tokens, lengths);
  masked first = mask(&masking, tokens, lengths), again = mask(&masking, tokens, lengths);
  CHECK(masked_same(&first, &again), "the same seed and step mask otherwise");
  masked_free(&again);
  for (int i = 0; i < 4; i++) {
    other = masking;
    if (i < 3) other.step += i == 0 ? 1 : i == 1 ? (uint64_t)1 << 32 : (uint64_t)1 << 40;
    else other.seed++;
    again = mask(&other, tokens, lengths);
    int64_t both = 0;
    for (int64_t j = 0; j < PLACES; j++) both += first.labels[j] >= 0 && again.labels[j] >= 0;
    check_rate("chosen in two steps", both, first.count, 0.15);
    masked_free(&again);
  }
  memcpy(alias, tokens, PLACES * sizeof(int32_t));
  again = first;
  again.labels = (int32_t *)common_alloc(PLACES * sizeof(int32_t));
  again.input = alias;
  again.count = luna_mask_tokens(&(luna_input){ alias, lengths, ROWS, COLUMNS, NULL }, &masking, alias, again.labels);
  CHECK(masked_same(&first, &again), "masking in place masks otherwise");
  CHECK(luna_mask_tokens(NULL, &masking, alias, alias) == -1 &&
            luna_mask_tokens(&(luna_input){ NULL, NULL, 1, 1, NULL }, &masking, alias, alias) == -1 &&
            luna_mask_tokens(&(luna_input){ alias, NULL, -1, 1, NULL }, &masking, alias, alias) == -1 &&
            luna_mask_tokens(&(luna_input){ alias, NULL, 1, 1, NULL }, &(luna_masking){ 1.5f, 0, 0, 0, 0 }, alias,
                             alias) == -1,
        "what cannot be masked is");
  CHECK(luna_mask_tokens(&(luna_input){ NULL, NULL, 0, 7, NULL }, &masking, NULL, NULL) == 0, "no places are an error");
  other = (luna_masking){0, 256, 256, 0, 0}; /* what fits a luna_masked_lm of the default config */
  masked given = mask(&other, tokens, lengths), none = mask(NULL, tokens, lengths);
  CHECK(none.count > 0 && masked_same(&given, &none), "null masking is not the default");
  masked_free(&given), masked_free(&none);
  masked_free(&first), masked_free(&again), free(tokens);
}
/* logits at the chosen places alone: the loss and the gradients of all logits with labels at those places */
static void check_masked_loss(int v, luna_form form) {
  luna_options options = plain_options();
  luna_masked_lm model;
  luna_masked_lm_config config = {0};
  luna_masking masking = {0.3f, VOCAB, 0, 3, 5};
  int32_t *tokens = common_tokens(BATCH * N, 11, VOCAB), input[BATCH * N], labels[BATCH * N];
  float loss[2], *gradient[2];
  char what[200];
  options.form = form;
  luna_ctx *ctx = luna_open(&options);
  luna_params *params = luna_params_open(ctx);
  config.vocab = VOCAB + 1, config.encoder = encoder_config(v);
  CHECK(luna_masked_lm_init(&model, params, &config) == LUNA_OK, "%s: %s", encoder_names[v], luna_error(ctx));
  common_params(params, 62);
  luna_mask_tokens(&(luna_input){ tokens, lengths_of_5, BATCH, N, NULL }, &masking, input, labels);
  for (int i = 0; i < 2; i++) {
    luna_params_zero_grad(params);
    luna_begin_step(ctx);
    luna_tensor *y = i ? luna_masked_lm_loss(&model, &(luna_input){ input, lengths_of_5, BATCH, N, NULL }, labels)
                       : luna_cross_entropy(luna_masked_lm_forward(&model,
                           &(luna_input){ input, lengths_of_5, BATCH, N, NULL }), labels, NULL);
    loss[i] = luna_item(y);
    CHECK(luna_backward(y) == LUNA_OK, "%s: %s", encoder_names[v], luna_error(ctx));
    gradient[i] = all_gradients(params);
  }
  snprintf(what, sizeof what, "%s: the masked loss", encoder_names[v]);
  test_close(what, loss + 1, loss, 1, 1e-6);
  for (int64_t i = 0, at = 0; i < luna_params_tensor_count(params); i++) {
    const char *name;
    const int64_t count = luna_count(luna_params_at(params, i, &name));
    const double off = common_error(gradient[1] + at, gradient[0] + at, count, 1e-4);
    CHECK(off <= 1e-5, "%s: the masked loss's gradient of %s is off by %.3g", encoder_names[v], name, off);
    at += count;
  }
  for (int i = 0; i < BATCH * N; i++) labels[i] = -1;
  luna_begin_step(ctx);
  luna_tensor *none = luna_masked_lm_loss(&model, &(luna_input){ input, lengths_of_5, BATCH, N, NULL }, labels);
  CHECK(none && luna_item(none) == 0 && luna_backward(none) == LUNA_OK, "no label at all: %s", luna_error(ctx));
  luna_begin_step(ctx);
  refused(ctx, !luna_masked_lm_loss(&model, &(luna_input){ input, lengths_of_5, BATCH, N, NULL }, NULL), NULL_ARGUMENT,
      "null for labels");
  labels[0] = VOCAB + 1;
  luna_begin_step(ctx);
  refused(ctx, !luna_masked_lm_loss(&model, &(luna_input){ input, lengths_of_5, BATCH, N, NULL }, labels), LABEL_RANGE,
      "a label beyond the vocabulary");
  CHECK(!luna_masked_lm_loss(&model, &(luna_input){ input, lengths_of_5, BATCH, N, NULL }, labels) &&
            strstr(luna_error(ctx), "labels[0] is "), "a label's place is the caller's: %s", luna_error(ctx));
  free(tokens), free(gradient[0]), free(gradient[1]);
  luna_close(ctx);
}
/* luna_lm_loss and the cross-entropy of the logits: of few words and of many, some without a label, in training and in
   inference */
static void check_lm_loss(int64_t vocab, bool inference) {
  enum { TOKENS = 26 };
  const luna_lm_config config = {.vocab = vocab, .layers = 2,
                                 .layer = {.dim = 12, .heads = 2, .ffn = 20, .pre_norm = true}};
  int32_t *tokens = common_tokens(TOKENS, 4, (int32_t)vocab), *labels = common_tokens(TOKENS, 5, (int32_t)vocab);
  const luna_input input = {tokens, NULL, 2, TOKENS / 2, NULL};
  luna_ctx *ctx = luna_open(NULL);
  luna_params *params = luna_params_open(ctx);
  luna_lm model;
  float loss[2], *gradient[2] = {NULL, NULL};
  CHECK(luna_lm_init(&model, params, &config) == LUNA_OK, "luna_lm_init: %s", luna_error(ctx));
  labels[3] = labels[TOKENS - 1] = -1;
  for (int i = 0; i < 2; i++) {
    luna_params_zero_grad(params);
    if (inference) luna_begin_inference(ctx);
    else luna_begin_step(ctx);
    luna_tensor *y = i ? luna_lm_loss(&model, &input, labels) :
        luna_cross_entropy(luna_lm_forward(&model, &input), labels, NULL);
    loss[i] = luna_item(y);
    if (!inference) CHECK(luna_backward(y) == LUNA_OK, "luna_lm_loss: %s", luna_error(ctx));
    if (!inference) gradient[i] = all_gradients(params);
  }
  test_close("luna_lm_loss", loss + 1, loss, 1, 1e-6);
  if (!inference)
    test_close("luna_lm_loss's gradient", gradient[1], gradient[0], (size_t)luna_params_element_count(params), 2e-6);
  refused(ctx, !luna_lm_loss(&model, &input, NULL), NULL_ARGUMENT, "null for labels");
  free(gradient[0]), free(gradient[1]), free(tokens), free(labels);
  luna_close(ctx);
}

static void check_masked_lm(void) {
  check_masking();
  for (int i = 0; i < 4; i++) check_lm_loss(i % 2 ? 2200 : VOCAB, i > 1);
  for (int v = 0; v < ENCODERS; v += 3) check_masked_loss(v, LUNA_FORM_CHEAPEST);
  check_masked_loss(0, LUNA_FORM_FOLDED);
  heap_check("masked language model");
}

int main(void) {
  check_masked_lm();
  return test_report("masked_lm");
}
