/* Sizes of 0 in every function that takes tensors, arrays or sequences: no rows, no keys, no tokens,
    no classes. What is
   asked for either works, gradients included, with finite numbers, or fails with a sentence. */
#include "test.h"
#define LUNA_IMPLEMENTATION
#include "luna.h"
#include "examples/luna_mask.h"
#include "examples/luna_ops.h"
#include "common.h"

static luna_ctx *ctx;
static bool training;
static char what[160];

/* a tensor of these axes, up to the first that is negative, with a gradient */
static luna_tensor *axes(uint64_t seed, int64_t a, int64_t b, int64_t c, int64_t d) {
  const int64_t shape[4] = {a, b, c, d};
  int rank = 0;
  int64_t count = 1;
  while (rank < 4 && shape[rank] >= 0) count *= shape[rank++];
  float *values = common_random(count, seed, 1);
  luna_tensor *t = luna_require_grad(luna_tensor_new(ctx, count ? values : NULL, rank, shape));
  free(values);
  return t;
}
static luna_tensor *rows(uint64_t seed, int64_t a, int64_t b, int64_t c) { return axes(seed, a, b, c, -1); }

static int made, refused;
static void all_finite(const luna_tensor *t, bool grad, const char *name) {
  const int64_t n = luna_count(t);
  float *values = common_floats(n);
  int64_t wrong = 0;
  if (!grad || t->grad) {
    CHECK((grad ? luna_read_grad(t, values) : luna_read(t, values)) == LUNA_OK, "%s: %s is not read: %s", what, name,
          luna_error(ctx));
    for (int64_t i = 0; i < n; i++) wrong += !isfinite(values[i]);
    CHECK(wrong == 0, "%s: %d of %d numbers of %s are not finite", what, (int)wrong, (int)n, name);
  }
  free(values);
}
/* y works, or there is a sentence */
static void tried(luna_tensor *y, luna_tensor *const *in, int count) {
  if (!y) {
    refused++;
    CHECK(luna_error_status(ctx) != LUNA_OK && luna_error(ctx)[0], "%s: null without a sentence", what);
    return;
  }
  made++;
  CHECK(luna_error_status(ctx) == LUNA_OK, "%s works, with \"%s\"", what, luna_error(ctx));
  all_finite(y, false, "the result");
  if (!training || !y->needs_grad) return;
  luna_tensor *loss = luna_sum_all(y);
  CHECK(luna_backward(loss) == LUNA_OK, "%s: backward: %s", what, luna_error(ctx));
  for (int i = 0; i < count; i++) if (in[i]) all_finite(in[i], true, "a gradient");
}
#define TRY(expression, ...) do { \
    luna_tensor *in_[] = { __VA_ARGS__ }; \
    luna_tensor *y_ = (expression); \
    tried(y_, in_, (int)(sizeof in_ / sizeof in_[0])); \
    if (training) luna_begin_step(ctx); \
    else luna_begin_inference(ctx); \
  } while (0)
#define NAME(...) snprintf(what, sizeof what, __VA_ARGS__)

static const int32_t zeros[64] = {0}, minus[64] = {-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1};

static void check_ops(int64_t b, int64_t n, int64_t d) {
#define X(seed) rows(seed, b, n, d)
#define OP(expression) do { \
    luna_tensor *x = X(1), *z = X(2); \
    (void)z; \
    NAME("[%d,%d,%d] %s", (int)b, (int)n, (int)d, #expression); \
    TRY(expression, x, z); \
  } while (0)
  const int64_t flat[1] = {-1}, two[2] = {b * n, d}, four[4] = {b, n, 1, d};
  const int order[3] = {2, 0, 1};
  luna_tensor *both[2];
  OP(luna_reshape(x, 1, flat));
  OP(luna_reshape(x, 2, two));
  OP(luna_reshape(x, 4, four));
  OP(luna_slice(x, 0, 0, b));
  OP(luna_slice(x, 1, 0, 0));
  OP(luna_slice(x, 2, d, 0));
  OP(luna_permute(x, order));
  OP(luna_transpose(x, 0, 2));
  for (int axis = 0; axis < 3; axis++) {
    OP((both[0] = x, both[1] = z, luna_concat(both, 2, axis)));
    OP(luna_sum(x, axis));
    OP(luna_mean(x, axis));
    OP(luna_cumsum(x, axis));
    OP(luna_max(x, axis));
  }
  OP(luna_expand(x, 0));
  OP(luna_expand(x, 3));
  OP(luna_sum_all(x));
  OP(luna_mean_all(x));
  OP(luna_add(x, z));
  OP(luna_mul(x, z));
  OP(luna_div(x, luna_add_scalar(luna_abs(z), 1)));
  OP(luna_where(luna_greater(x, z), x, z));
  OP(luna_clamp(x, -1, 1));
  OP(luna_scale(x, 2));
  OP(luna_matmul(x, z, false, true));
  OP(luna_matmul(x, z, true, false));
  OP(luna_linear(x, axes(3, 5, d, -1, -1), axes(4, 5, -1, -1, -1)));
  OP(luna_linear(x, axes(3, 0, d, -1, -1), axes(4, 0, -1, -1, -1)));
  OP(luna_feed_forward(x, axes(3, 5, d, -1, -1), NULL, axes(4, d, 5, -1, -1), NULL, NULL));
  OP(luna_feed_forward(x, axes(3, 0, d, -1, -1), NULL, axes(4, d, 0, -1, -1), NULL, NULL));
  OP(luna_gelu(x));
  OP(luna_neg(x));
  OP(luna_pad(x, 1, 0, 0, 1));
  OP(luna_pad(x, 1, 2, 1, 1));
  OP(luna_stack((luna_tensor *const[]){x, z}, 2, 1));
  OP(luna_soft_cross_entropy(x, luna_softmax(z, NULL)));
  OP(luna_softmax(x, NULL));
  OP(luna_softmax(x, zeros));
  OP(luna_log_softmax(x));
  OP(luna_mask(x, zeros));
  OP(luna_ratio(x));
  OP(luna_sin(x));
  OP(luna_pow(x, 2));
  OP((luna_split(luna_concat((luna_tensor *const[]){x, z}, 2, 1), 1, both, 2), both[1]));
  OP(luna_rotary(axes(3, b, n, 4, -1), 2, 3, 0));
  OP(luna_detach(x));
  OP(luna_dropout(x, 0.5f));
  OP(luna_rms_norm(x, axes(3, d, -1, -1, -1), 0));
  OP(luna_layer_norm(x, axes(3, d, -1, -1, -1), axes(4, d, -1, -1, -1), 0));
  OP(luna_layer_norm(x, NULL, NULL, 0));
  OP(luna_gather_rows(x, zeros, 0));
  OP(luna_gather_rows(x, zeros, 2));
  OP(luna_scatter_add_rows(x, zeros, rows(5, 0, n, d)));
  OP(luna_scatter_add_rows(x, zeros, rows(5, 2, n, d)));
  OP(luna_cross_entropy(x, zeros, NULL));
  OP(luna_cross_entropy(x, minus, NULL));
  OP(luna_weighted_cross_entropy(x, minus, (const float[]){1, 1, 1, 1, 1, 1, 1, 1}, NULL));
  for (int k = 0; k < 4; k++) {
    luna_cross_entropy_config c = {0};
    c.sum = k & 1, c.smoothing = k & 2 ? 0.5f : 0;
    OP(luna_cross_entropy(x, minus, &c));
    OP(luna_linear_cross_entropy(x, axes(3, 5, d, -1, -1), axes(4, 5, -1, -1, -1), minus, &c));
    OP(luna_linear_cross_entropy(x, axes(3, 1100, d, -1, -1), axes(4, 1100, -1, -1, -1), minus, &c));
    OP(luna_linear_cross_entropy(x, axes(3, 1100, d, -1, -1), axes(4, 1100, -1, -1, -1), zeros, &c));
    OP(luna_linear_cross_entropy(x, axes(3, 0, d, -1, -1), axes(4, 0, -1, -1, -1), minus, &c));
  }
  float targets[64] = {0};
  for (int k = 0; k < 64; k++) targets[k] = k % 2 ? NAN : 1;
  OP(luna_mse(x, targets));
  OP(luna_huber(x, targets, 0));
  OP(luna_binary_cross_entropy(x, targets));
  const float levels[1] = {0.2f};
  const int64_t column[2] = {b * n * d, 1};
  OP(luna_quantile_loss(luna_reshape(x, 2, column), targets, levels, 1));
  OP(luna_short_convolution(x, axes(3, d, 3, -1, -1), axes(4, d, -1, -1, -1)));
  OP(luna_short_convolution(x, axes(3, d, 0, -1, -1), NULL));
  OP(luna_causal_product(x, z, x, 1));
  OP(luna_causal_product(x, z, x, d ? d : 2));
  OP(luna_embedding(axes(3, 5, d, -1, -1), zeros, b, n));
  OP(luna_embedding(axes(3, 0, d, -1, -1), zeros, b, n));
  OP(luna_causal_nested_attention(x, x, z, rows(7, b, n, 4), NULL));
  OP(luna_causal_nested_attention(x, x, z, rows(7, b, n, 0), NULL));
  for (int64_t m = 0; m < 4; m += 3) {
    OP(luna_softmax_attention(x, rows(5, b, m, d), rows(6, b, m, d), NULL));
    for (int k = 0; k < 2; k++) {
      luna_attention_config c = {0};
      luna_tensor *sums = NULL, *lse = NULL;
      c.lengths = k ? zeros : NULL, c.causal = k, c.heads = d ? d : 2, c.sums = &sums;
      OP(luna_softmax_attention(x, rows(5, b, m, d), rows(6, b, m, d), &c));
      c.sums = NULL, c.log_sum_exp = k ? NULL : &lse;
      OP(luna_softmax_attention(x, rows(5, b, m, d), rows(6, b, m, 0), &c));
      luna_attention_config p = {0};
      p.window = true, p.left = 1, p.lengths = c.lengths;
      OP(luna_softmax_attention(x, rows(5, b, m, d), rows(6, b, m, d), &p));
      const int32_t offsets[3] = {0, 0, 0}, many[3] = {0, (int32_t)n, (int32_t)n}, keys[3] = {0, (int32_t)m,
          (int32_t)m};
      luna_attention_config r = {0};
      r.sequences = 2, r.query_offsets = many, r.key_offsets = keys;
      OP(luna_softmax_attention(luna_slice(luna_reshape(x, 2, two), 0, 0, b ? n : 0), axes(5, m, d, -1, -1), axes(6,
          m, d, -1, -1), &r));
      r.sequences = 0, r.query_offsets = r.key_offsets = offsets;
      OP(luna_softmax_attention(axes(4, 0, d, -1, -1), axes(5, 0, d, -1, -1), axes(6, 0, d, -1, -1), &r));
    }
    OP(luna_pack(x, rows(5, b, m, d), NULL));
    OP(luna_pack(x, rows(5, b, m, d), &(luna_pack_config){ zeros, 0, NULL }));
    OP(luna_unpack(x, axes(5, b, 2, m, d), rows(6, b, 2, m), axes(7, b, 2, m, d), NULL));
    OP(luna_unpack(x, axes(5, b, 0, m, d), rows(6, b, 0, m), axes(7, b, 0, m, d), NULL));
    luna_unpack_config u = {0};
    u.lengths = zeros;
    OP(luna_unpack(x, axes(5, b, 2, m, d), rows(6, b, 2, m), axes(7, b, 2, m, d), &u));
  }
  {
    luna_tensor *x = X(1);
    int32_t index[64];
    float value[64];
    for (int64_t k = 0; k < 3; k++) {
      luna_status s = luna_top_k(x, k, index, value);
      CHECK(s == LUNA_OK || luna_error(ctx)[0], "top %d of [%d,%d,%d]: %s", (int)k, (int)b, (int)n, (int)d,
          luna_error(ctx));
    }
    luna_status s = luna_argmax(x, index);
    CHECK(s == LUNA_OK || luna_error(ctx)[0], "argmax of [%d,%d,%d]: no sentence", (int)b, (int)n, (int)d);
    training ? luna_begin_step(ctx) : luna_begin_inference(ctx);
    x = X(1);
    CHECK(isnan(luna_item(x)) || luna_count(x) == 1, "item of nothing is a number");
    training ? luna_begin_step(ctx) : luna_begin_inference(ctx);
  }
}

/* ---- layers ---- */
static const int64_t axis[2] = {0, 3};
static luna_params *params;
static void params_finite(void) {
  for (int64_t i = 0; i < luna_params_tensor_count(params); i++) {
    const char *name;
    luna_tensor *p = luna_params_at(params, i, &name);
    all_finite(p, true, name);
  }
}
#define LAYER(expression, ...) do { \
    TRY(expression, __VA_ARGS__); \
    params_finite(); \
    luna_params_zero_grad(params); \
    begin(); \
  } while (0)
static void begin(void) { if (training) luna_begin_step(ctx); else luna_begin_inference(ctx); }
static void good(luna_status status) { CHECK(status == LUNA_OK, "%s: %s", what, luna_error(ctx)); }

static void check_layers(luna_form form) {
  luna_options options = {0};
  options.threads = 2, options.form = form;
  for (int variant = 0; variant < 12; variant++) {
    ctx = luna_open(&options);
    params = luna_params_open(ctx);
    luna_layer_config c = {0};
    c.dim = 8, c.heads = 2, c.ffn = 12;
    c.pre_norm = variant & 1, c.gated = variant == 3, c.norm = variant == 4 ? LUNA_NORM_RMS : LUNA_NORM_LAYER;
    c.attention = variant < 6 ? LUNA_ATTENTION_LUNA : (luna_attention_kind)(variant % 2 + 1);
    c.recompute = (luna_recompute_kind)(variant % 3), c.own_memory = variant == 5;
    c.dropout = c.attention_dropout = c.activation_dropout = variant == 2 ? 0.1f : 0;
    luna_encoder_layer encoder;
    luna_causal_layer causal;
    luna_decoder_layer decoder;
    const bool luna = c.attention == LUNA_ATTENTION_LUNA;
    NAME("init %d", variant);
    good(luna_encoder_layer_init(&encoder, params, "e", &c));
    luna_layer_config cc = c;
    cc.own_memory = false;
    luna_layer_config conv = cc;
    conv.convolution = variant % 4, conv.memory = 4;
    good(luna_causal_layer_init(&causal, params, "c", &conv));
    if (luna) good(luna_decoder_layer_init(&decoder, params, "d", &cc));
    for (int way = 0; way < 2; way++)
      for (int k = 0; k < 16; k++) {
        const int64_t b = k & 1 ? 2 : 0, n = axis[k >> 1 & 1], m = axis[k >> 2 & 1], l = k & 8 ? 4 : 0;
        training = way == 0;
        begin();
        luna_tensor *x = rows(1, b, n, 8), *p = rows(2, b, l, 8), *y = rows(3, b, m, 8);
        NAME("encoder layer %d form %d [%d,%d] p %d", variant, form, (int)b, (int)n, (int)l);
        luna_tensor *q = p;
        LAYER(luna_encoder_layer_forward(&encoder, x, &q, NULL), x, p);
        x = rows(1, b, n, 8), p = rows(2, b, l, 8), q = p;
        NAME("encoder layer %d [%d,%d] p %d lengths 0", variant, (int)b, (int)n, (int)l);
        LAYER(luna_encoder_layer_forward(&encoder, x, &q, zeros), x, p);
        x = rows(1, b, n, 8);
        NAME("causal layer %d [%d,%d]", variant, (int)b, (int)n);
        LAYER(luna_causal_layer_forward(&causal, x), x);
        if (luna) {
          for (int some = 0; some < 2; some++) {
            x = rows(1, b, n, 8), p = rows(2, b, l, 8), y = rows(3, b, m, 8), q = p;
            NAME("decoder layer %d [%d,%d] p %d context %d, lengths %d", variant, (int)b, (int)n, (int)l, (int)m, some);
            LAYER(luna_decoder_layer_forward(&decoder, x, &q, y, some ? zeros : NULL), x, p, y);
            x = rows(1, b, n, 8), p = rows(2, b, l, 8), y = rows(3, b, m, 8), q = p;
            NAME("nested attention %d [%d,%d] p %d context %d, lengths %d", variant, (int)b, (int)n, (int)l, (int)m,
                some);
            LAYER(luna_nested_attention_layer_forward(&encoder.attention, x, p, y, some ? zeros : NULL, &q), x, p, y);
            x = rows(1, b, n, 8), p = rows(2, b, l, 8);
            NAME("causal attention %d [%d,%d] p %d lengths %d", variant, (int)b, (int)n, (int)l, some);
            LAYER(luna_causal_attention_layer_forward(&causal.attention, x, p, some ? zeros : NULL), x, p);
          }
        } else {
          for (int some = 0; some < 2; some++) {
            x = rows(1, b, n, 8), y = rows(3, b, m, 8);
            NAME("attention %d [%d,%d] context %d lengths %d", variant, (int)b, (int)n, (int)m, some);
            LAYER(luna_attention_layer_forward(&encoder.other_attention, x, y, some ? zeros : NULL), x, y);
          }
        }
      }
    luna_close(ctx);
  }
}

/* ---- models ---- */
static void check_models(luna_form form) {
  luna_options options = {0};
  options.threads = 2, options.form = form;
  for (int variant = 0; variant < 24; variant++) {
    ctx = luna_open(&options);
    params = luna_params_open(ctx);
    luna_params *cp = luna_params_open(ctx), *mp = luna_params_open(ctx), *sp = luna_params_open(ctx);
    const bool features = variant % 3 == 2;
    luna_lm_config lc = {0};
    luna_classifier_config kc = {0};
    luna_masked_lm_config mc = {0};
    luna_seq2seq_config sc = {0};
    luna_encoder_config ec = {0};
    luna_layer_config layer = {0};
    layer.dim = 8, layer.heads = 2, layer.ffn = 12;
    layer.pre_norm = variant & 1, layer.dropout = variant == 5 ? 0.1f : 0;
    layer.attention = variant < 12 ? LUNA_ATTENTION_LUNA : (luna_attention_kind)(variant % 3);
    lc.layer = ec.layer = layer;
    lc.layer.convolution = variant % 4;
    lc.layer.memory = ec.layer.memory = 4;
    lc.features = features ? 3 : 0, lc.vocab = features ? 0 : variant == 4 ? 1200 : 11;
    ec.features = lc.features;
    lc.positions = ec.positions = (luna_positions)(variant % 3);
    lc.max_length = ec.max_length = 8;
    ec.layer.own_memory = variant % 5 == 4 && layer.attention == LUNA_ATTENTION_LUNA, ec.tied_layers = variant % 7 == 3,
        ec.norm_embedding = variant % 6 == 1;
    ec.keep_padding = variant % 4 == 3;
    lc.outputs = variant % 4 == 1 ? 2 : 0;
    kc.encoder = mc.encoder = sc.encoder = ec;
    sc.encoder.layer.attention = LUNA_ATTENTION_LUNA, sc.encoder.layer.own_memory = false;
    kc.vocab = features ? 0 : 11, mc.vocab = features ? 5 : 11, sc.vocab = features ? 0 : 11, sc.target_vocab = 11;
    kc.classes = 3, kc.per_step = variant % 6 == 5, kc.pair = variant % 4 == 2 && !kc.per_step;
    kc.pooling = kc.per_step ? LUNA_POOLING_DEFAULT : (luna_pooling)(variant % 5);
    if (layer.attention != LUNA_ATTENTION_LUNA && kc.pooling >= LUNA_POOLING_MEMORY) kc.pooling = LUNA_POOLING_MEAN;
    luna_lm lm;
    luna_classifier classifier;
    luna_masked_lm masked;
    luna_seq2seq seq2seq;
    NAME("init %d", variant);
    good(luna_lm_init(&lm, params, &lc));
    good(luna_classifier_init(&classifier, cp, &kc));
    good(luna_masked_lm_init(&masked, mp, &mc));
    good(luna_seq2seq_init(&seq2seq, sp, &sc));
    luna_params *const lp = params;
    for (int way = 0; way < 2; way++)
      for (int k = 0; k < 16; k++) {
        const int64_t b = k & 1 ? 2 : 0, n = axis[k >> 1 & 1], m = k & 4 ? 2 : 0;
        static const float numbers[64] = {0};
        const int32_t *lengths = k & 8 ? zeros : NULL;
        const bool nothing = b * n == 0;
        luna_input in = {features || nothing ? NULL : zeros, lengths, b, n, features && !nothing ? numbers : NULL};
        luna_input target = {b * m > 0 ? zeros : NULL, NULL, b, m, NULL};
        training = way == 0;
        begin();
        params = lp;
        const int32_t *all = nothing ? NULL : way ? zeros : minus;
        NAME("lm %d form %d way %d [%d,%d] lengths %d", variant, form, way, (int)b, (int)n, lengths != NULL);
        LAYER(luna_lm_forward(&lm, &in), NULL);
        LAYER(luna_lm_loss(&lm, &in, zeros), NULL);
        LAYER(luna_lm_loss(&lm, &in, minus), NULL);
        LAYER(luna_lm_loss(&lm, &in, all), NULL);
        params = cp;
        NAME("classifier %d form %d way %d [%d,%d] lengths %d pooling %d pair %d step %d", variant, form, way, (int)b,
            (int)n, lengths != NULL, kc.pooling, kc.pair, kc.per_step);
        if (kc.pair) LAYER(luna_classifier_forward_pair(&classifier, &in, &in), NULL);
        else LAYER(luna_classifier_forward(&classifier, &in), NULL);
        if (!kc.pair) LAYER(luna_cross_entropy(luna_classifier_forward(&classifier, &in), zeros, NULL), NULL);
        luna_tensor *p = NULL;
        NAME("encoder %d way %d [%d,%d] lengths %d", variant, way, (int)b, (int)n, lengths != NULL);
        LAYER(luna_encoder_forward(&classifier.encoder, &in, &p), NULL);
        params = mp;
        NAME("masked lm %d way %d [%d,%d] lengths %d", variant, way, (int)b, (int)n, lengths != NULL);
        LAYER(luna_masked_lm_forward(&masked, &in), NULL);
        LAYER(luna_masked_lm_loss(&masked, &in, minus), NULL);
        LAYER(luna_masked_lm_loss(&masked, &in, zeros), NULL);
        int32_t masked_tokens[64], labels[64];
        if (!features) CHECK(luna_mask_tokens(&in, NULL, masked_tokens, labels) >= 0, "mask");
        params = sp;
        NAME("seq2seq %d way %d [%d,%d] to %d lengths %d", variant, way, (int)b, (int)n, (int)m, lengths != NULL);
        LAYER(luna_seq2seq_forward(&seq2seq, &in, &target), NULL);
        luna_generate_config search = {0};
        search.end = 1, search.max_length = m;
        int32_t out[256], out_lengths[4] = {0};
        luna_status s = luna_seq2seq_generate(&seq2seq, &in, &search, out, out_lengths);
        CHECK(s == LUNA_OK || luna_error(ctx)[0], "%s: no sentence", what);
        for (int i = 0; i < b && s == LUNA_OK; i++)
          CHECK(out_lengths[i] >= 0 && out_lengths[i] <= (m ? m : 2 * n + 10), "%s: length %d", what,
                (int)out_lengths[i]);
        begin();
        luna_stream *d = luna_seq2seq_stream_open(&seq2seq, &in, 1);
        CHECK(d || luna_error(ctx)[0], "%s: no stream, no sentence", what);
        if (d) {
          const float *y = luna_stream_step(d, zeros);
          CHECK(y || luna_stream_error(d)[0], "%s: no step, no sentence", what);
          for (int i = 0; y && i < 11 * b; i++) CHECK(isfinite(y[i]), "%s: a logit is %g", what, (double)y[i]);
          luna_stream_close(d);
        }
      }
    luna_close(ctx);
  }
}

int main(void) {
  for (int isa = 0; isa < COMMON_ISAS; isa++) {
    if (!luna_isa_available(common_isas[isa])) continue;
    for (int way = 0; way < 2; way++) {
      luna_options options = {0};
      options.threads = 2, options.isa = common_isas[isa];
      ctx = luna_open(&options), training = way == 0;
      training ? luna_begin_step(ctx) : luna_begin_inference(ctx);
      for (int k = 0; k < 8; k++) check_ops(k & 1 ? 2 : 0, k & 2 ? 3 : 0, k & 4 ? 4 : 0);
      luna_close(ctx);
    }
  }
  for (int form = 0; form < 3; form++) check_layers((luna_form)form), check_models((luna_form)form);
  CHECK(made > 10000 && refused > 0, "%d calls worked, %d were refused", made, refused);
  return test_report("empty");
}
