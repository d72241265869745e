/* Scopes: what they release, what stays, and the op table's columns, on which that rests. */
#define LUNA_IMPLEMENTATION
#include "luna.h"
#include "test.h"

#include "op_can.h"

/* --- the columns: backward reads no other data than the table says, and all that it says --- */
static const int table_reads[] = {
#define READS(name, tier, reads, cheap) reads,
#define READS_EACH(name, tier, reads, cheap, function, inputs, value, da, db, dc) reads,
  LUNA_OPS(READS, READS_EACH)
#undef READS_EACH
#undef READS
};
static const bool table_cheap[] = {
#define CHEAP(name, tier, reads, cheap) cheap,
#define CHEAP_EACH(name, tier, reads, cheap, function, inputs, value, da, db, dc) cheap,
  LUNA_OPS(CHEAP, CHEAP_EACH)
#undef CHEAP_EACH
#undef CHEAP
};
#define OUT 8                        /* the first bit of results */
static luna_backend poisoning;
/* data that one kind of op reads, spoilt to see that it does; kind -1: all that is not read */
static int poison_kind, poison_bit;
static bool poison_met;

static luna_status poisoned_backward(luna_op *op) {
  luna_tensor *spoilt[LUNA_MAX_INPUTS + 2];
  float *data[LUNA_MAX_INPUTS + 2];
  int count = 0;
  for (int bit = 0; bit < OUT + op->outputs; bit++) {
    luna_tensor *t = bit >= OUT ? op->out[bit - OUT] : bit < op->inputs ? op->in[bit] : NULL;
    const bool read = table_reads[op->kind] >> bit & 1;
    if (!t || !t->data || luna_count(t) == 0 || (poison_kind < 0 ? read : op->kind != (luna_op_kind)poison_kind ||
                                                 bit != poison_bit)) continue;
    bool twice = false;              /* one tensor as two inputs, of which backward reads one */
    for (int i = 0; poison_kind < 0 && i < op->inputs; i++)
      twice = twice || (op->in[i] == t && (table_reads[op->kind] >> i & 1));
    if (twice) continue;
    float *nan = common_floats(luna_count(t));
    for (int64_t i = 0; i < luna_count(t); i++) nan[i] = NAN;
    spoilt[count] = t;
    data[count++] = t->data;
    t->data = nan;
    poison_met = true;
  }
  const luna_status status = luna_cpu_backend()->op[op->kind].backward(op);
  while (count-- > 0) {
    free(spoilt[count]->data);
    spoilt[count]->data = data[count];
  }
  return status;
}

/* whether the gradients of a case are the same with the data spoilt */
static bool same_gradients(const op_case *c, int variant, luna_isa isa) {
  trial plain, spoilt;
  bool same = true;
  memset(&plain, 0, sizeof plain);
  memset(&spoilt, 0, sizeof spoilt);
  plain.options.threads = spoilt.options.threads = 1;
  plain.options.isa = spoilt.options.isa = isa;
  spoilt.options.backend = &poisoning;
  if (!trial_run(&plain, c, variant, true) || !trial_run(&spoilt, c, variant, true)) same = false;
  for (int i = 0; i < plain.inputs && same; i++)
    same = memcmp(plain.input[i].gradient, spoilt.input[i].gradient, (size_t)plain.input[i].count * sizeof(float)) == 0;
  trial_free(&plain);
  trial_free(&spoilt);
  return same;
}

static void check_columns(void) {
  bool needed[LUNA_OP_COUNT][OUT + 2];
  memset(needed, 0, sizeof needed);
  poisoning = *luna_cpu_backend();
  for (int kind = 0; kind < LUNA_OP_COUNT; kind++) poisoning.op[kind].backward = poisoned_backward;
  for (int i = 0; i < OP_CASES; i++)
    for (int v = 0; v < op_cases[i].variants; v++) {
      poison_kind = -1;
      CHECK(same_gradients(&op_cases[i], v, LUNA_ISA_BEST) && same_gradients(&op_cases[i], v, LUNA_ISA_REFERENCE),
            "%s, variant %d: backward reads data that LUNA_OPS does not name", op_cases[i].name, v);
      for (poison_kind = 0; poison_kind < LUNA_OP_COUNT && !TEST_QUICK; poison_kind++)
        for (poison_bit = 0; poison_bit < OUT + 2; poison_bit++) {
          if (!(table_reads[poison_kind] >> poison_bit & 1) || needed[poison_kind][poison_bit] ||
              poison_kind == LUNA_OP_CUSTOM) continue;
          poison_met = false;
          if (!same_gradients(&op_cases[i], v, LUNA_ISA_BEST) && poison_met) needed[poison_kind][poison_bit] = true;
        }
    }
  for (int kind = 0; kind < LUNA_OP_COUNT; kind++) {
    CHECK(!table_cheap[kind] || !(table_reads[kind] >> OUT), "%s is cheap, but reads its result",
          luna_op_name((luna_op_kind)kind));
    for (int bit = 0; bit < OUT + 2 && !TEST_QUICK && kind != LUNA_OP_CUSTOM; bit++)
      CHECK(!(table_reads[kind] >> bit & 1) || needed[kind][bit],
            "%s: LUNA_OPS says that backward reads %s %d; it does not",
            luna_op_name((luna_op_kind)kind), bit >= OUT ? "result" : "input", bit % OUT);
  }
}

/* --- what a scope's end does --- */
static luna_ctx *open_ctx(bool training) {
  luna_options options = {.threads = 1};
  luna_ctx *ctx = luna_open(&options);
  if (training) luna_begin_step(ctx);
  else luna_begin_inference(ctx);
  return ctx;
}
/* a result of the step before, with elements and without, is refused by the next step */
static void check_old(bool training) {
  luna_ctx *ctx = open_ctx(training);
  for (int64_t rows = 0; rows < 2; rows++) {
    const int64_t shape[2] = {rows, 2}, large[2] = {3000, 300};
    luna_tensor *old = luna_scale(luna_require_grad(luna_tensor_new(ctx, NULL, 2, shape)), 2);
    for (int i = 0; i < 20; i++) luna_tensor_new(ctx, NULL, 2, large); /* chunks that the begin makes one */
    if (training) luna_begin_step(ctx);
    else luna_begin_inference(ctx);
    CHECK(old && !luna_add(old, old) && luna_error_id_of(ctx) == LUNA_ERROR_RELEASED,
          "%d rows of the step before are taken: %s", (int)rows, luna_error(ctx));
    if (training) luna_begin_step(ctx);
    else luna_begin_inference(ctx);
  }
  luna_close(ctx);
}
static void check_results(bool training) {
  luna_ctx *ctx = open_ctx(training);
  luna_tensor *x = luna_require_grad(common_tensor(ctx, 1, 8, 6, 0, 0));
  const luna_scope outer = luna_scope_begin(ctx), inner = luna_scope_begin(ctx);
  luna_tensor *sum = luna_add(x, x), *view = luna_slice(luna_scale(x, 2), 0, 2, 3), *kept = luna_scale(x, 5), *both[2];
  float *got = common_floats(48);
  CHECK(luna_keep(kept) == kept && luna_keep(NULL) == NULL, "luna_keep does not return its tensor");
  both[0] = luna_scale(sum, 3);
  both[1] = view;
  CHECK(luna_scope_end(inner, both, 2) == both[0], "a scope's end does not return its first result");
  CHECK(!sum->data && both[0]->data && view->base->data && kept->data,
        "the end released a result, or did not release the rest");
  CHECK(luna_read(sum, got) == LUNA_BAD_ARGUMENT && luna_error_id_of(ctx) == LUNA_ERROR_RELEASED,
        "reading what was released: %s", luna_error(ctx));
  CHECK(luna_error_status(ctx) == LUNA_BAD_ARGUMENT, "no failure is on record");
  if (training) luna_begin_step(ctx);
  else luna_begin_inference(ctx);
  x = luna_require_grad(common_tensor(ctx, 1, 8, 6, 0, 0));
  {
    const luna_scope again = luna_scope_begin(ctx);
    luna_tensor *y = x, *before;
    for (int i = 0; i < 3; i++) {
      before = y;
      y = luna_scale(y, 2);
      CHECK(luna_scope_end(again, &y, 1) == y && y->data && (i == 0 || !before->data),
            "round %d of a loop keeps its predecessor", i);
    }
    luna_read(y, got);
    CHECK(got[7] == 8 * x->data[7], "after three doublings %g is %g", (double)x->data[7], (double)got[7]);
    CHECK(luna_keep(before) == NULL && luna_error_id_of(ctx) == LUNA_ERROR_RELEASED,
          "luna_keep of what was released: %s", luna_error(ctx));
  }
  CHECK(luna_scope_end(outer, NULL, 1) == NULL && luna_scope_end(luna_scope_begin(NULL), both, 1) == both[0],
        "an end without results or context");
  free(got);
  luna_close(ctx);
}

/* a released input is refused with a sentence, not read */
static void check_released_input(void) {
  luna_ctx *ctx = open_ctx(false);
  const luna_scope scope = luna_scope_begin(ctx);
  luna_tensor *x = common_tensor(ctx, 1, 4, 4, 0, 0), *y = luna_scale(x, 2), *rows = luna_slice(x, 0, 1, 2);
  y = luna_scope_end(scope, &y, 1);
  CHECK(y && luna_add(y, x) == NULL && luna_error_id_of(ctx) == LUNA_ERROR_RELEASED, "an op on a released tensor: %s",
        luna_error(ctx));
  luna_begin_inference(ctx);
  CHECK(luna_scale(rows, 2) == NULL || !rows, "an op on a view of a released tensor gave a result");
  luna_close(ctx);
}

/* Training: what backward reads stays or is computed again; gradients are those without scopes, bit for bit */
static luna_tensor *block(luna_tensor *x, luna_tensor *w, bool scoped) {
  const luna_scope scope = luna_scope_begin(x->ctx);
  luna_tensor *y = luna_gelu(luna_linear(luna_layer_norm(x, NULL, NULL, 0), w, NULL));
  y = luna_add(x, luna_dropout(luna_linear(luna_relu(luna_scale(y, 0.5f)), w, NULL), 0.2f));
  return scoped ? luna_scope_end(scope, &y, 1) : y;
}
static size_t train(bool scoped, bool recomputed, float *gradient) {
  luna_options options = {.threads = 1, .seed = 5};
  luna_ctx *ctx = luna_open(&options);
  luna_params *params = luna_params_open(ctx);
  const int64_t shape[2] = {16, 16};
  luna_tensor *w = luna_param(params, "w", 2, shape, (luna_init){LUNA_INIT_XAVIER, 1}), *x, *loss;
  luna_begin_step(ctx);
  x = common_tensor(ctx, 3, 64, 16, 0, 0);
  for (int i = 0; i < 6; i++) {
    const luna_scope scope = luna_scope_begin(ctx);
    x = block(x, w, scoped);
    if (recomputed) x = luna_layer_norm(x, NULL, NULL, 0);
    if (scoped) x = luna_scope_end(scope, &x, 1);
  }
  loss = common_loss(x, 9);
  CHECK(luna_backward(loss) == LUNA_OK, "%s", luna_error(ctx));
  luna_read_grad(w, gradient);
  const size_t peak = luna_memory(ctx).peak;
  luna_close(ctx);
  return peak;
}
static void check_training(void) {
  float *with = common_floats(256), *without = common_floats(256);
  for (int recomputed = 0; recomputed < 2; recomputed++) {
    const size_t less = train(true, recomputed, with), more = train(false, recomputed, without);
    CHECK(memcmp(with, without, 256 * sizeof(float)) == 0, "scopes change gradients");
    CHECK(less < more - 6 * 64 * 16 * sizeof(float), "with scopes a step takes %zu bytes, without %zu", less, more);
  }
  free(with);
  free(without);
}

/* What a scope's end leaves to backward is released by it; what luna_keep or nobody's scope holds stays */
static void check_after_backward(void) {
  luna_ctx *ctx = open_ctx(true);
  luna_tensor *x = luna_require_grad(common_tensor(ctx, 1, 8, 6, 0, 0));
  const luna_scope scope = luna_scope_begin(ctx);
  luna_tensor *inner = luna_mul(x, x), *kept = luna_keep(luna_mul(x, inner)), *y = luna_mul(inner, kept), *loss;
  y = luna_scope_end(scope, &y, 1);
  loss = common_loss(luna_mul(y, y), 3);
  CHECK(inner->data && kept->data, "the end released what backward reads");
  CHECK(luna_backward(loss) == LUNA_OK, "%s", luna_error(ctx));
  CHECK(!inner->data && kept->data && y->data, "backward released a result, or did not release the rest");
  luna_close(ctx);
}

/* What the table says of doing things in place saves memory: without the bit a step takes more */
static luna_tensor *in_place_part(luna_op_kind kind, luna_tensor *x) {
  const luna_scope scope = luna_scope_begin(x->ctx);
  luna_tensor *y = luna_scale(x, 2);
  y = kind == LUNA_OP_ADD ? luna_add(y, x) : kind == LUNA_OP_SCALE ? luna_scale(y, 3) : luna_dropout(y, 0.1f);
  return luna_scope_end(scope, &y, 1);
}
static size_t in_place_peak(luna_op_kind kind, int without) {
  luna_backend backend = *luna_cpu_backend();
  luna_options options = {.threads = 1, .measure = true, .backend = &backend};
  const int64_t shape[2] = {64, 64}, flat[2] = {1, 64 * 64};
  luna_feed_forward_config c = {.recompute = true};
  backend.op[kind].can &= ~without;
  luna_ctx *ctx = luna_open(&options);
  luna_params *params = luna_params_open(ctx);
  luna_tensor *x = luna_param(params, "x", 2, shape, (luna_init){LUNA_INIT_XAVIER, 1}), *y;
  luna_begin_step(ctx);
  if (kind == LUNA_OP_FEED_FORWARD) {
    c.residual = y = luna_scale(x, 2);
    y = luna_feed_forward(y, x, NULL, x, NULL, &c);
  } else if (kind == LUNA_OP_LAYER_NORM) y = luna_layer_norm(luna_mul(x, x), NULL, NULL, 0);
  else {                             /* computed again when its gradient is there, and little else will be */
    const luna_scope scope = luna_scope_begin(ctx);
    luna_tensor *part = in_place_part(kind, x);
    y = luna_add(luna_gelu(part), part);
    luna_scope_end(scope, &y, 1);
  }
  CHECK(luna_backward(luna_sum(luna_reshape(y, 2, flat), 1)) == LUNA_OK, "%s", luna_error(ctx));
  const size_t peak = luna_memory(ctx).peak;
  luna_close(ctx);
  return peak;
}
static void check_in_place(luna_op_kind kind, int bit) {
  const size_t with = in_place_peak(kind, 0), without = in_place_peak(kind, bit);
  CHECK(with < without, "%s: a step takes %zu bytes in place, %zu otherwise", luna_op_name(kind), with, without);
}

/* models: memory of an inference does not grow with layers by more than small things, and hidden values can be kept */
static size_t inference(int64_t layers) {
  luna_options options = {.threads = 1, .measure = true};
  luna_ctx *ctx = luna_open(&options);
  luna_lm model;
  luna_lm_config config = {.vocab = 64, .layers = layers,
                           .layer = {.dim = 32, .heads = 2, .memory = 8, .convolution = 4}};
  int32_t *tokens = common_tokens(512, 1, 64);
  size_t before;
  luna_lm_init(&model, luna_params_open(ctx), &config);
  before = luna_memory(ctx).current;
  luna_begin_inference(ctx);
  CHECK(luna_lm_forward(&model, &(luna_input){.tokens = tokens, .batch = 1, .n = 512}) != NULL, "%s", luna_error(ctx));
  before = luna_memory(ctx).peak - before;
  luna_close(ctx);
  free(tokens);
  return before;
}
static luna_tensor *seen;
static void *look_init(void *user, luna_params *params, const char *prefix, const luna_layer_config *config) {
  const int64_t shape[2] = {config->dim, config->dim};
  char name[64];
  (void)user;
  snprintf(name, sizeof name, "%sw", prefix);
  return luna_param(params, name, 2, shape, (luna_init){LUNA_INIT_XAVIER, 1});
}
static luna_tensor *look_forward(void *layer, luna_attention_call *call) {
  luna_tensor *y = luna_linear(call->x, (luna_tensor *)layer, NULL);
  seen = luna_keep(luna_gelu(y));
  return luna_mul(y, seen);
}
static void check_models(void) {
  const size_t one = inference(2), more = inference(8);
  CHECK(more < one + one / 5, "an inference of 2 layers takes %zu bytes, of 8 layers %zu", one, more);
  const luna_attention_hook hook = {look_init, look_forward, NULL, NULL, NULL, NULL, NULL};
  luna_ctx *ctx = open_ctx(false);
  luna_lm model;
  luna_lm_config config = {.vocab = 8, .layers = 1, .layer = {.dim = 4, .heads = 1, .hook = &hook}};
  const int32_t tokens[3] = {1, 2, 3};
  float values[12];
  luna_lm_init(&model, luna_params_open(ctx), &config);
  for (int training = 0; training < 2; training++) {
    if (training) luna_begin_step(ctx);
    else luna_begin_inference(ctx);
    CHECK(luna_lm_forward(&model, &(luna_input){.tokens = tokens, .batch = 1, .n = 3}), "%s", luna_error(ctx));
    CHECK(seen && luna_read(seen, values) == LUNA_OK, "what a hook kept cannot be read: %s", luna_error(ctx));
  }
  luna_close(ctx);
}

int main(void) {
  check_columns();
  can_check(luna_cpu_backend(), NULL);
  check_results(false);
  check_old(true), check_old(false);
  check_results(true);
  check_released_input();
  check_training();
  check_after_backward();
  check_in_place(LUNA_OP_ADD, LUNA_FORWARD_IN_PLACE);
  check_in_place(LUNA_OP_SCALE, LUNA_FORWARD_IN_PLACE);
  check_in_place(LUNA_OP_DROPOUT, LUNA_FORWARD_IN_PLACE);
  check_in_place(LUNA_OP_FEED_FORWARD, LUNA_ADDS_IN_PLACE(0));
  check_in_place(LUNA_OP_LAYER_NORM, LUNA_GRAD_IN_PLACE(0));
  check_models();
  return test_report("scopes");
}
