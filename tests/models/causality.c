/* No output before token t changes a bit when token t does: to another value, 1e38, Inf or NaN, all of it or one
   number. Attention with the causal mask, causal product, short convolution, causal Luna attention, its layers, the
   language model and its stream; at the first and last token, the edges of chunks and of longer blocks; on every
   instruction set; without TEST_FULL in a quarter of the shapes. The kernel with a stream's state: causal.c. */
#include "test.h"
#define LUNA_IMPLEMENTATION
#include "luna.h"
#include "common.h"

enum { DIM = 24, HEADS = 2, SLOTS = 5, BATCH = 2, MAX = 1100 }; /* at MOST threads share the chunks of a sequence */

typedef struct net {
  luna_ctx *ctx;
  luna_params *params;
  luna_causal_attention_layer attention;
  luna_causal_layer layer;
  luna_tensor *kernel, *memory;
} net;
typedef luna_tensor *(*net_run)(net *m, luna_tensor *x);

static luna_tensor *run_attention(net *m, luna_tensor *x) {
  luna_attention_config c = {0};
  (void)m;
  c.heads = HEADS;
  c.causal = true;
  return luna_softmax_attention(x, x, x, &c);
}
static luna_tensor *run_product(net *m, luna_tensor *x) {
  (void)m;
  return luna_causal_product(x, x, x, HEADS);
}
static luna_tensor *run_convolution(net *m, luna_tensor *x) { return luna_short_convolution(x, m->kernel, NULL); }
static luna_tensor *run_nested(net *m, luna_tensor *x) {
  (void)m;
  return luna_causal_nested_attention(x, x, x, x, &(luna_causal_nested_config){.heads = HEADS});
}
static luna_tensor *run_layer_attention(net *m, luna_tensor *x) {
  return luna_causal_attention_layer_forward(&m->attention, x, m->memory, NULL);
}
static luna_tensor *run_layer(net *m, luna_tensor *x) { return luna_causal_layer_forward(&m->layer, x); }

static const struct {
  const char *name;
  net_run run;
} nets[] = {{"softmax attention", run_attention},
            {"causal product", run_product},
            {"short convolution", run_convolution},
            {"causal nested attention", run_nested},
            {"causal attention layer", run_layer_attention},
            {"causal layer", run_layer}};
#define NETS ((int)(sizeof nets / sizeof nets[0]))

static bool net_open(net *m, luna_isa isa, luna_form form) {
  luna_options options = {0};
  luna_layer_config attention = {0};
  luna_layer_config layer = {0};
  const int64_t kernel[2] = {DIM, 4}, memory[2] = {SLOTS, DIM};
  const luna_init init = {LUNA_INIT_NORMAL, 1};
  options.threads = 3;
  options.isa = isa;
  options.form = form;
  memset(m, 0, sizeof *m);
  m->ctx = luna_open(&options);
  m->params = luna_params_open(m->ctx);
  attention.dim = layer.dim = DIM;
  attention.heads = layer.heads = HEADS;
  layer.memory = SLOTS;
  layer.convolution = 4;
  layer.pre_norm = form == LUNA_FORM_FOLDED;
  layer.omega = form == LUNA_FORM_FOLDED ? LUNA_ACTIVATION_ELU1 : LUNA_ACTIVATION_SOFTPLUS2;
  m->kernel = luna_param(m->params, "kernel", 2, kernel, init);
  m->memory = luna_param(m->params, "memory", 2, memory, init);
  return CHECK(luna_causal_attention_layer_init(&m->attention, m->params, "a.", &attention) == LUNA_OK &&
                   luna_causal_layer_init(&m->layer, m->params, "b.", &layer) == LUNA_OK,
               "init: %s", luna_error(m->ctx));
}

/* the values of the output for an input, in a training step or in inference */
static bool net_values(net *m, net_run run, const float *x, int64_t n, bool training, float *out) {
  const int64_t shape[3] = {BATCH, n, DIM};
  if (training) luna_begin_step(m->ctx);
  else luna_begin_inference(m->ctx);
  luna_tensor *y = run(m, luna_require_grad(luna_tensor_new(m->ctx, x, 3, shape)));
  return CHECK(y && luna_read(y, out) == LUNA_OK, "forward: %s", luna_error(m->ctx));
}

enum { CHANGES = 5 };
static const char *const change_names[CHANGES] = {"another value", "1e38", "Inf", "NaN", "one NaN"};
static void change(float *row, int64_t n, int kind) {
  const float value = kind == 1 ? 1e38f : kind == 2 ? INFINITY : NAN;
  for (int64_t i = 0; i < n; i++) {
    if (kind == 4 && i != n / 2) continue;
    row[i] = kind == 0 ? 1.5f - row[i] : value;
  }
}
static bool same_bits(const float *a, const float *b, int64_t n) {
  return n <= 0 || memcmp(a, b, (size_t)n * sizeof(float)) == 0;
}

/* changes token t of the second sequence: the first one and all before t keep their bits; from t on something moves */
static void check_net(net *m, int which, int64_t n, bool training, const char *what) {
  static const int64_t places[] = {0, 1, 62, 63, 64, 65, 127, 128, 255, 256, 511, 512, 513, 1023, 1024, 1025};
  const int64_t size = n * DIM;
  float *x = common_random(BATCH * size, 3, 1), *changed = common_floats(BATCH * size),
      *before = common_floats(BATCH * size),
        *after = common_floats(BATCH * size);
  if (net_values(m, nets[which].run, x, n, training, before))
    for (size_t p = 0; p <= sizeof places / sizeof places[0]; p++) {
      const int64_t t = p < sizeof places / sizeof places[0] ? places[p] : n - 1;
      if (t >= n || (n > 200 && t > 1 && t < 255)) continue;
      for (int kind = 0; kind < CHANGES; kind++) {
        memcpy(changed, x, (size_t)(BATCH * size) * sizeof(float));
        change(changed + size + t * DIM, DIM, kind);
        if (!net_values(m, nets[which].run, changed, n, training, after)) break;
        CHECK(same_bits(before, after, size), "%s: %s, n = %lld: token %lld of one sequence, made %s, reached another",
              what,
              nets[which].name, (long long)n, (long long)t, change_names[kind]);
        CHECK(same_bits(before + size, after + size, t * DIM),
              "%s: %s, n = %lld: token %lld, made %s, reached an earlier one", what,
              nets[which].name, (long long)n, (long long)t, change_names[kind]);
        CHECK(!same_bits(before + size + t * DIM, after + size + t * DIM, DIM),
              "%s: %s, n = %lld: token %lld, made %s, does not show at its own place", what, nets[which].name,
                  (long long)n, (long long)t,
              change_names[kind]);
      }
    }
  free(x), free(changed), free(before), free(after);
}

/* ---- the language model: the token's embedding row is what becomes 1e38, Inf, NaN; its own column of the logits then
   is, too ---- */
static void check_lm(luna_isa isa, bool pre_norm) {
  enum { VOCAB = 11, N = 130, SPECIAL = VOCAB - 1 };
  static const int64_t places[] = {0, 1, 63, 64, 65, N - 1};
  luna_options options = {0};
  luna_lm_config config = {0};
  luna_lm model;
  options.threads = 2;
  options.isa = isa;
  luna_ctx *ctx = luna_open(&options);
  config.vocab = VOCAB;
  config.layer.memory = SLOTS;
  config.layer.dim = DIM;
  config.layer.heads = HEADS;
  config.layer.convolution = 4;
  config.layer.pre_norm = pre_norm;
  luna_params *params = luna_params_open(ctx);
  int32_t *tokens = common_tokens(BATCH * N, 5, SPECIAL);
  float *before = common_floats(BATCH * N * VOCAB);
  if (!CHECK(luna_lm_init(&model, params, &config) == LUNA_OK, "luna_lm_init: %s", luna_error(ctx))) {
    luna_close(ctx);
    return;
  }
  for (int kind = 0; kind < CHANGES; kind++)
    for (size_t p = 0; p < sizeof places / sizeof places[0]; p++) {
      const int64_t at = N + places[p];
      const int32_t kept = tokens[at];
      if (p == 0) change(model.embedding->data + SPECIAL * DIM, DIM, kind);
      luna_begin_inference(ctx);
      luna_tensor *y = luna_lm_forward(&model, &(luna_input){ tokens, NULL, BATCH, N, NULL });
      if (!CHECK(y && luna_read(y, before) == LUNA_OK, "luna_lm_forward: %s", luna_error(ctx))) break;
      tokens[at] = SPECIAL;
      luna_begin_inference(ctx);
      y = luna_lm_forward(&model, &(luna_input){ tokens, NULL, BATCH, N, NULL });
      tokens[at] = kept;
      if (!CHECK(y != NULL, "luna_lm_forward: %s", luna_error(ctx))) break;
      bool earlier = true, own_place = true;
      for (int64_t r = 0; r <= at; r++) {
        const bool same = same_bits(before + r * VOCAB, y->data + r * VOCAB, VOCAB - 1);
        if (r < at) earlier = earlier && same;
        else own_place = same;
      }
      CHECK(earlier, "%s: language model: token %lld with a row of %s reached an earlier one", luna_isa_name(isa),
            (long long)places[p],
            change_names[kind]);
      CHECK(!own_place, "%s: language model: token %lld with a row of %s does not show at its own place",
            luna_isa_name(isa),
            (long long)places[p], change_names[kind]);
    }
  free(tokens), free(before);
  luna_close(ctx);
}

/* ---- streaming ---- */
/* a stream whose one sequence has met a NaN: the other does not notice, and it forgets the NaN itself */
static void check_stream(luna_isa isa) {
  enum { VOCAB = 11, N = 70 };
  luna_lm_config config = {0};
  luna_stream_config two = {0}, one = {0};
  luna_lm model;
  luna_ctx *ctx = luna_open(NULL);
  luna_params *params = luna_params_open(ctx);
  int32_t *tokens = common_tokens(2 * N, 6, VOCAB - 1);
  config.vocab = VOCAB;
  config.layer.memory = SLOTS;
  config.layer.dim = DIM;
  config.layer.heads = HEADS;
  config.layer.convolution = 3;
  two.batch = 2;
  two.isa = one.isa = isa;
  if (!CHECK(luna_lm_init(&model, params, &config) == LUNA_OK, "luna_lm_init: %s", luna_error(ctx))) {
    luna_close(ctx);
    return;
  }
  for (int i = 0; i < DIM; i++) model.embedding->data[(VOCAB - 1) * DIM + i] = NAN;
  luna_stream *pair = luna_stream_open(&model, &two), *alone = luna_stream_open(&model, &one);
  for (int round = 0; round < 2; round++) { /* by prefill; by steps */
    float first[VOCAB];
    int32_t step[2];
    const float *a = NULL, *b = NULL;
    tokens[N + 40] = VOCAB - 1;
    if (round == 0)
      a = luna_stream_prefill(pair, &(luna_input){ tokens, NULL, 0, N, NULL }),
          b = luna_stream_prefill(alone, &(luna_input){ tokens, NULL, 0, N, NULL });
    for (int i = 0; round == 1 && i < N; i++) {
      step[0] = tokens[i], step[1] = tokens[N + i];
      a = luna_stream_step(pair, step), b = luna_stream_step(alone, step);
      CHECK(a && !isfinite(a[VOCAB]) == (i == 40), "%s: a NaN at step 40 shows at step %d", luna_isa_name(isa), i);
    }
    if (!CHECK(a && b, "stream: %s", luna_stream_error(pair))) break;
    CHECK(same_bits(a, b, VOCAB - 1) && isfinite(a[0]), "%s: a NaN in one sequence of a stream reached the other",
          luna_isa_name(isa));
    CHECK(isfinite(a[VOCAB]), "%s: a NaN stays in a stream", luna_isa_name(isa));
    luna_stream_reset(pair), luna_stream_reset(alone);
    step[0] = 3, step[1] = 3;
    a = luna_stream_step(pair, step);
    memcpy(first, a, sizeof first);
    CHECK(same_bits(first, a + VOCAB, VOCAB - 1) && isfinite(a[VOCAB]),
          "%s: a reset leaves something of what came before", luna_isa_name(isa));
    luna_stream_reset(pair);
  }
  luna_stream_close(pair), luna_stream_close(alone);
  free(tokens);
  luna_close(ctx);
}

int main(void) {
  static const int64_t lengths[] = {1, 2, 63, 64, 65, 130};
  int shape = 0;
  for (int i = 0; i < COMMON_ISAS; i++) {
    if (!luna_isa_available(common_isas[i])) continue;
    for (int form = 0; form < 2; form++) {
      net m;
      char what[32];
      snprintf(what, sizeof what, "%s%s", luna_isa_name(common_isas[i]), form ? ", folded" : "");
      if (net_open(&m, common_isas[i], form ? LUNA_FORM_FOLDED : LUNA_FORM_UNFOLDED))
        for (int which = 0; which < NETS; which++) {
          if (form && which < 4) continue; /* ops have one form */
          for (size_t n = 0; n < sizeof lengths / sizeof lengths[0]; n++) {
            if (test_due(shape++)) check_net(&m, which, lengths[n], true, what);
            if (test_due(shape++)) check_net(&m, which, lengths[n], false, what);
          }
          if (test_due(shape++)) check_net(&m, which, MAX, true, what);
        }
      luna_close(m.ctx);
    }
    check_lm(common_isas[i], false);
    check_lm(common_isas[i], true);
    check_stream(common_isas[i]);
  }
  return test_report("causality");
}
