/* What nobody reads is not computed. */
#include "test.h"
#define LUNA_IMPLEMENTATION
#include "luna.h"
#include "examples/luna_apollo.h"
#include "common.h"
#include "models.h"

/* ---- what nobody reads is not computed: X of the last layer where P is pooled, the last P where X alone is read
   ---- */
static int64_t op_calls[LUNA_OP_COUNT];
static luna_status counted_forward(luna_op *op) {
  op_calls[op->kind]++;
  return luna_cpu_backend()->op[op->kind].forward(op);
}
static luna_backend counted_backend(void) {
  luna_backend backend = *luna_cpu_backend();
  for (int i = 0; i < LUNA_OP_COUNT; i++) backend.op[i].forward = counted_forward;
  return backend;
}
/* logits by luna_classifier_forward, or by hand from all that luna_encoder_forward computes */
static luna_tensor *unread_features(const luna_classifier *model, const luna_input *input) {
  luna_tensor *p = NULL;
  luna_encoder_forward(&model->encoder, input, &p);
  return luna_classifier_pool(model, NULL, p, input->lengths);
}
static luna_tensor *unread_logits(const luna_classifier *model, const texts *t, bool by_hand) {
  const luna_input first = {t->tokens, t->lengths, BATCH, N, NULL}, second = {t->targets, NULL, BATCH, TARGET, NULL};
  luna_tensor *part[4];
  if (!by_hand)
    return model->config.pair ? luna_classifier_forward_pair(model, &first, &second) :
        luna_classifier_forward(model, &first);
  part[0] = unread_features(model, &first);
  if (model->config.pair) {
    part[1] = unread_features(model, &second);
    part[2] = luna_mul(part[0], part[1]);
    part[3] = luna_add(part[0], luna_scale(part[1], -1));
    part[0] = luna_concat(part, 4, 1);
  }
  return luna_linear(part[0], model->projection, NULL);
}
/* whether P alone does not need this parameter */
static bool is_unread(const char *name, const luna_encoder_config *c) {
  static const char *const rest[] = {"self_attn.q_proj.", "self_attn.k_proj.", "self_attn.v_proj.", "self_attn.c_proj.",
                                     "self_attn.out_proj.", "fc1.", "fc2.", "final_layer_norm."};
  char last[40];
  snprintf(last, sizeof last, "encoder.layers.%d.", (int)(c->tied_layers ? 0 : c->layers - 1));
  if (strncmp(name, "encoder.layer_norm.", 19) == 0) return true;
  if (strncmp(name, last, strlen(last)) != 0) /* a memory of its own: nothing reads P' of the layer before */
    return c->layer.own_memory && !c->layer.pre_norm && strstr(name, "self_atten_proj_layer_norm.");
  if (c->tied_layers && c->layers > 1) return false;
  name += strlen(last);
  if (!c->layer.pre_norm && strncmp(name, "self_attn_layer_norm.", 21) == 0) return true;
  for (size_t i = 0; i < sizeof rest / sizeof *rest; i++)
    if (strncmp(name, rest[i], strlen(rest[i])) == 0) return true;
  return false;
}
typedef struct unread {
  luna_ctx *ctx;
  luna_params *params;
  luna_classifier model;
  luna_backend backend;
  texts t;
} unread;
static void unread_open(unread *u, luna_encoder_config encoder, luna_pooling pooling, bool pair, luna_form form) {
  luna_options options = plain_options();
  luna_classifier_config config = {0};
  config.vocab = VOCAB, config.classes = 3, config.pooling = pooling, config.pair = pair, config.encoder = encoder;
  u->backend = counted_backend();
  u->t = texts_make();
  options.form = form, options.backend = &u->backend;
  u->ctx = luna_open(&options);
  u->params = luna_params_open(u->ctx);
  CHECK(luna_classifier_init(&u->model, u->params, &config) == LUNA_OK, "%s", luna_error(u->ctx));
  common_params(u->params, 61);
}
static luna_optimizer *unread_optimizer(luna_params *params, int kind) {
  const luna_optimizer_config sgd = {.lr = 0.01f, .momentum = 0.9f, .weight_decay = 0.1f, .clip = 1};
  const luna_optimizer_config adam = {.lr = 0.01f, .weight_decay = 0.1f, .clip = 1};
  const luna_optimizer_config apollo = {.weight_decay = 0.1f, .clip = 1};
  const luna_param_group group = {.name = "layers.", .lr_factor = 2, .decay_factor = 2};
  luna_optimizer *o = kind == 0 ? luna_sgd(params, &sgd) : kind == 1 ? luna_adam(params, &adam) : kind == 2 ?
      luna_adamw(params, &adam) : luna_apollo(params, &apollo);
  CHECK(luna_optimizer_add_group(o, &group) == LUNA_OK, "a group that decays what has no gradient");
  return o;
}
/* the same bits as by hand, fewer ops and bytes; what has no gradient stays as it is */
static void check_unread(int v, luna_recompute_kind recompute, luna_form form, bool pair, luna_pooling pooling) {
  luna_encoder_config encoder = encoder_config(v);
  int64_t calls[2][LUNA_OP_COUNT];
  size_t peak[2];
  float *logits[2], *gradients[2];
  unread u[2];
  encoder.layer.recompute = recompute;
  for (int hand = 0; hand < 2; hand++) {
    unread_open(&u[hand], encoder, pooling, pair, form);
    luna_begin_inference(u[hand].ctx);
    memset(op_calls, 0, sizeof op_calls);
    logits[hand] = values_of(u[hand].ctx, unread_logits(&u[hand].model, &u[hand].t, hand), "logits");
    memcpy(calls[hand], op_calls, sizeof op_calls);
    luna_begin_step(u[hand].ctx);
    CHECK(luna_backward(luna_cross_entropy(unread_logits(&u[hand].model, &u[hand].t, hand), u[hand].t.labels, NULL)) ==
          LUNA_OK, "%s",
          luna_error(u[hand].ctx));
    gradients[hand] = all_gradients(u[hand].params);
    peak[hand] = luna_memory(u[hand].ctx).peak;
  }
  const int64_t count = luna_params_element_count(u->params), times = pair ? 2 : 1;
  CHECK(same_bits(logits[0], logits[1], BATCH * 3), "%s, pair %d: other logits than by hand", encoder_names[v], pair);
  CHECK(same_bits(gradients[0], gradients[1], count), "%s, pair %d, recompute %d: other gradients than by hand",
        encoder_names[v], pair, recompute);
  CHECK(peak[0] < peak[1] || (recompute == LUNA_RECOMPUTE_LAYER && peak[0] == peak[1]),
        "%s, pair %d, recompute %d: the peak is %zu bytes, with X computed %zu",
        encoder_names[v], pair, recompute, peak[0], peak[1]);
  CHECK(calls[0][LUNA_OP_FEED_FORWARD] == times * (encoder.layers - 1) &&
        calls[1][LUNA_OP_FEED_FORWARD] == times * encoder.layers,
        "%s, pair %d: %d feed-forwards, by hand %d", encoder_names[v], pair, (int)calls[0][LUNA_OP_FEED_FORWARD],
            (int)calls[1][LUNA_OP_FEED_FORWARD]);
  if (form == LUNA_FORM_FOLDED)
    CHECK(calls[0][LUNA_OP_UNPACK] == times * (encoder.layers - 1) &&
          calls[1][LUNA_OP_UNPACK] == times * encoder.layers &&
          calls[0][LUNA_OP_SOFTMAX_ATTENTION] == times * encoder.layers,
          "%s, pair %d: %d unpacks, by hand %d", encoder_names[v], pair, (int)calls[0][LUNA_OP_UNPACK],
              (int)calls[1][LUNA_OP_UNPACK]);
  for (int64_t i = 0; i < luna_params_tensor_count(u->params); i++) {
    const char *name;
    const luna_tensor *p = luna_params_at(u->params, i, &name);
    CHECK(!p->grad == !luna_params_at(u[1].params, i, NULL)->grad && (!p->grad || !is_unread(name, &encoder)),
          "%s, pair %d: %s has a gradient",
          encoder_names[v], pair, name);
  }
  for (int hand = 0; hand < 2; hand++) luna_close(u[hand].ctx), free(logits[hand]), free(gradients[hand]);
}
static void check_unread_trained(int v, int kind) {
  unread u;
  unread_open(&u, encoder_config(v), LUNA_POOLING_DEFAULT, false, LUNA_FORM_CHEAPEST);
  luna_optimizer *optimizer = unread_optimizer(u.params, kind);
  float *before = common_parameters(u.params), *at = before;
  double norm = NAN;
  for (int step = 0; step < 3; step++) {
    luna_begin_step(u.ctx);
    luna_backward(luna_cross_entropy(unread_logits(&u.model, &u.t, false), u.t.labels, NULL));
    float *gradients = all_gradients(u.params);
    norm = length_of(gradients, luna_params_element_count(u.params));
    free(gradients);
    CHECK(luna_optimizer_step(optimizer) == LUNA_OK, "%s", luna_error(u.ctx));
    CHECK(fabs((double)luna_optimizer_grad_norm(optimizer) - norm) <= 1e-5 * norm,
          "%s: the norm is %.7g, of the gradients %.7g", encoder_names[v],
          (double)luna_optimizer_grad_norm(optimizer), norm);
  }
  for (int64_t i = 0; i < luna_params_tensor_count(u.params); at += luna_count(luna_params_at(u.params, i++, NULL))) {
    const char *name;
    const luna_tensor *p = luna_params_at(u.params, i, &name);
    const bool same = same_bits(p->data, at, luna_count(p));
    CHECK(p->grad ? !same : same, "%s, optimiser %d: %s, %s a gradient, is %schanged", encoder_names[v], kind, name,
          p->grad ? "with" : "without", same ? "un" : "");
    CHECK(!is_unread(name, &u.model.config.encoder) || !p->grad, "%s, optimiser %d: %s has a gradient",
          encoder_names[v], kind, name);
  }
  free(before);
  luna_close(u.ctx);
}
/* post-norm layers: three norms each, a decoder's four; the last P' of each model below has no reader */
static void check_unread_memory(luna_recompute_kind recompute) {
  static const luna_model_kind kinds[] = {LUNA_MODEL_CLASSIFIER, LUNA_MODEL_MASKED_LM, LUNA_MODEL_SEQ2SEQ};
  for (int i = 0; i < 4; i++) {        /* the fourth: own memories, where no P' has a reader */
    const luna_model_kind kind = kinds[i % 3];
    const int norms = i == 0 ? 3 * 2 - 1 : i == 1 ? 3 * 2 - 1 + 1 : i == 2 ? 3 * 2 + 4 * 2 - 1 : 2 * 2;
    luna_options options = plain_options();
    const luna_backend backend = counted_backend();
    luna_encoder_config encoder = encoder_config(i == 3 ? 5 : 0);
    const texts t = texts_make();
    luna_model m;
    options.backend = &backend;
    encoder.layer.recompute = recompute;
    luna_ctx *ctx = luna_open(&options);
    luna_params *params = luna_params_open(ctx);
    CHECK(model_init(&m, params, kind, encoder) == LUNA_OK, "%s", luna_error(ctx));
    if (kind == LUNA_MODEL_CLASSIFIER) m.classifier.config.pooling = LUNA_POOLING_MEAN;
    for (int training = 0; training < 2; training++) {
      if (training) luna_begin_step(ctx);
      else luna_begin_inference(ctx);
      memset(op_calls, 0, sizeof op_calls);
      const bool good = model_logits(&m, &t) != NULL;
      CHECK(good && op_calls[LUNA_OP_LAYER_NORM] == norms, "%s, own memory %d, training %d: %d norms for %d",
            model_names[kind], i == 3,
            training, (int)op_calls[LUNA_OP_LAYER_NORM], norms);
    }
    luna_close(ctx);
  }
}
/* what the manual says of the default classifier with one layer; pooling without an X, and without what is pooled */
static void check_unread_default(void) {
  luna_ctx *ctx = ctx_open();
  luna_params *params = luna_params_open(ctx);
  luna_classifier model;
  luna_classifier_config config = {0};
  const int32_t tokens[3] = {1, 2, 3}, label = 1;
  int64_t unread = 0;
  config.encoder.layers = 1;
  CHECK(luna_classifier_init(&model, params, &config) == LUNA_OK, "%s", luna_error(ctx));
  luna_begin_step(ctx);
  luna_backward(luna_cross_entropy(luna_classifier_forward(&model, &(luna_input){ tokens, NULL, 1, 3, NULL }), &label,
                                   NULL));
  for (int64_t i = 0; i < luna_params_tensor_count(params); i++) {
    const luna_tensor *p = luna_params_at(params, i, NULL);
    unread += p->grad ? 0 : luna_count(p);
  }
  CHECK(unread == 181760 && luna_params_element_count(params) == 250112, "%d of %d parameters have no gradient",
        (int)unread, (int)luna_params_element_count(params));
  luna_begin_inference(ctx);
  luna_tensor *x = common_tensor(ctx, 1, 1, 3, 128, 0), *p = common_tensor(ctx, 2, 1, 3, 128, 0);
  CHECK(luna_classifier_pool(&model, NULL, p, NULL) && luna_error_status(ctx) == LUNA_OK, "pooling P takes an X: %s",
        luna_error(ctx));
  refused(ctx, !luna_classifier_pool(&model, x, NULL, NULL), NULL_ARGUMENT, "pooling P without one");
  refused(ctx, !luna_classifier_pool(&model, NULL, NULL, NULL), NULL_ARGUMENT, "pooling nothing");
  x = common_tensor(ctx, 1, 3, 128, 0, 0);
  refused(ctx, !luna_classifier_pool(&model, NULL, x, NULL), SEQUENCE_SHAPE, "pooling a P without a batch");
  model.config.pooling = LUNA_POOLING_MEAN;
  p = common_tensor(ctx, 2, 1, 3, 128, 0);
  refused(ctx, !luna_classifier_pool(&model, NULL, p, NULL), NULL_ARGUMENT, "pooling X without one");
  luna_close(ctx);
}
static void check_unread_all(void) {
  for (int v = 0; v < ENCODERS && has_memory(v); v++) {
    for (luna_recompute_kind recompute = LUNA_RECOMPUTE_NONE; recompute <= LUNA_RECOMPUTE_LAYER; recompute =
         (luna_recompute_kind)(recompute + 1))
      for (int i = 0; i < 4; i++)
        check_unread(v, recompute, i % 2 ? LUNA_FORM_FOLDED : LUNA_FORM_UNFOLDED, i / 2,
                     i / 2 ? LUNA_POOLING_MEMORY_BATCH : LUNA_POOLING_DEFAULT);
    for (int kind = 0; kind < 4; kind++) check_unread_trained(v, kind);
  }
  check_unread_memory(LUNA_RECOMPUTE_NONE);
  check_unread_memory(LUNA_RECOMPUTE_LAYER);
  check_unread_default();
  heap_check("what nobody reads");
}

int main(void) {
  check_unread_all();
  return test_report("dead_results");
}
