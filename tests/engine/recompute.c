/* What training keeps: recomputed feed-forwards and layers give the same bits for less memory. */
#include "test.h"
#define LUNA_IMPLEMENTATION
#include "luna.h"
#include "common.h"
#include "models.h"

/* ---- recomputation: the same bits for less memory ---- */
/* Two accumulated steps with dropout everywhere: loss and gradients, [1 + parameters], to be freed. What the model was
   given is overwritten before luna_backward, which needs none of it. */
static float *recomputed(luna_model_kind kind, int v, luna_recompute_kind recompute, int threads, int64_t *count) {
  luna_options options = plain_options();
  luna_encoder_config encoder = encoder_config(v);
  luna_model m;
  float loss = NAN;
  options.threads = threads;
  encoder.layer.recompute = recompute;
  encoder.layer.dropout = encoder.layer.attention_dropout = encoder.layer.activation_dropout = 0.1f;
  luna_ctx *ctx = luna_open(&options);
  luna_params *params = luna_params_open(ctx);
  CHECK(model_init(&m, params, kind, encoder) == LUNA_OK, "%s: %s", model_names[kind], luna_error(ctx));
  common_params(params, 66);
  for (int step = 0; step < 2; step++) {
    texts t = texts_make();
    luna_begin_step(ctx);
    luna_tensor *y = luna_cross_entropy(model_logits(&m, &t), t.labels, NULL);
    loss = luna_item(y);
    memset(&t, 0, sizeof t);
    CHECK(luna_backward(y) == LUNA_OK, "%s, %s, recompute %d: %s", model_names[kind], encoder_names[v], recompute,
          luna_error(ctx));
  }
  float *gradients = all_gradients(params), *out;
  *count = 1 + luna_params_element_count(params);
  out = common_floats(*count);
  out[0] = loss;
  memcpy(out + 1, gradients, (size_t)(*count - 1) * sizeof(float));
  free(gradients);
  luna_close(ctx);
  return out;
}
static void check_recomputed(luna_model_kind kind, int v) {
  int64_t count = 0;
  float *keep = recomputed(kind, v, LUNA_RECOMPUTE_NONE, 1, &count);
  CHECK(isfinite(keep[0]) && length_of(keep + 1, count - 1) > 1e-3, "%s, %s: loss %.3f, gradients %.3g",
        model_names[kind],
        encoder_names[v], (double)keep[0], length_of(keep + 1, count - 1));
  for (int i = 1; i < 6; i++) { /* 1 and 3 threads; none, the feed-forward, the layer */
    float *again = recomputed(kind, v, (luna_recompute_kind)(i / 2), i % 2 ? 3 : 1, &count);
    CHECK(same_bits(again, keep, count),
          "%s, %s: recompute %d on %d threads: loss %.9g for %.9g, gradients off by %.3g", model_names[kind],
          encoder_names[v], i / 2, i % 2 ? 3 : 1, (double)again[0], (double)keep[0],
              test_error(again + 1, keep + 1, (size_t)(count - 1)));
    free(again);
  }
  free(keep);
}

/* recomputed scopes: that return an input, one tensor twice, a view, something without a gradient; scopes within
   scopes */
enum { BLOCKS = 8 };
static luna_tensor *odd_block(int which, luna_tensor *const *in, luna_tensor **second, bool again) {
  const luna_scope scope = again ? luna_scope_recompute(in[0]->ctx) : luna_scope_begin(in[0]->ctx);
  const int64_t flat[1] = {-1};
  luna_tensor *y = luna_dropout(luna_gelu(luna_linear(in[0], in[1], NULL)), 0.3f), *both[2] = {y, y};
  switch (which) {
    case 0: both[1] = luna_relu(y); break;
    case 1: both[1] = in[0]; break; /* an input as it came */
    case 2: both[0] = in[0]; break;
    case 3: break;                  /* one tensor twice */
    case 4:                         /* views, one of an input */
      both[0] = luna_slice(y, 0, 1, 1);
      both[1] = luna_reshape(in[0], 1, flat);
      break;
    case 5: both[1] = luna_detach(y); break; /* one without a gradient */
    case 6: {                       /* what the scope inside releases is a constant: no op makes it again */
      const luna_scope inner = luna_scope_begin(in[0]->ctx);
      y = luna_scope_end(scope, &y, 1);
      y = luna_add(y, luna_relu(luna_detach(in[0])));
      both[1] = luna_scope_end(inner, &y, 1);
      both[0] = luna_gelu(y);
      break;
    }
    default: {
      luna_tensor *deep = NULL, *mid = odd_block(0, in, &deep, true);
      both[0] = luna_linear(mid, in[1], NULL);
      both[1] = luna_add(deep, y);
    }
  }
  *second = both[1];
  return luna_scope_end(scope, both, 2);
}
static void check_blocks(void) {
  for (int which = 0; which < BLOCKS; which++) {
    const int64_t shape[2] = {DIM, DIM};
    const luna_init normal = {LUNA_INIT_NORMAL, 0.3f};
    float *got[3][4];
    for (int i = 0; i < 3; i++) { /* as it is, recomputed, in inference */
      luna_ctx *ctx = ctx_open();
      luna_params *params = luna_params_open(ctx);
      luna_tensor *in[2], *second = NULL, *y;
      in[1] = luna_param(params, "weight", 2, shape, normal);
      if (i < 2) luna_begin_step(ctx);
      else luna_begin_inference(ctx);
      in[0] = luna_require_grad(common_tensor(ctx, 73, 2, 3, DIM, 0));
      luna_tensor *x = in[0];
      in[0] = luna_scale(x, 2);
      y = odd_block(which, in, &second, i > 0);
      got[i][0] = values_of(ctx, y, "a block");
      got[i][1] = values_of(ctx, second, "a block's second result");
      if (i < 2) {
        luna_tensor *loss = luna_add(luna_add(common_loss(y, 74), common_loss(second, 75)), common_loss(in[0], 76));
        CHECK(luna_backward(loss) == LUNA_OK, "block %d: %s", which, luna_error(ctx));
        got[i][2] = gradient_of(x);
        got[i][3] = gradient_of(in[1]);
        if (i) {
          const int64_t sizes[4] = {luna_count(y), luna_count(second), luna_count(x), luna_count(in[1])};
          static const char *const parts[4] = {"result", "second result", "input's gradient", "weight's gradient"};
          /* where two gradients meet in one tensor, their sum's order may be another */
          for (int part = 0; part < 4; part++)
            CHECK(same_bits(got[0][part], got[1][part], sizes[part]) ||
                      (which >= 1 && which <= 3 && test_error(got[1][part], got[0][part], (size_t)sizes[part]) <= 1e-6),
                  "block %d computed again: the %s is off by %.3g", which, parts[part],
                  test_error(got[1][part], got[0][part], (size_t)sizes[part]));
        }
      }
      luna_close(ctx);
    }
    for (int i = 0; i < 3; i++)
      for (int part = 0; part < (i < 2 ? 4 : 2); part++) free(got[i][part]);
  }
}

/* ---- long chains of cheap ops: what their scope's end releases is computed again a few times, not once for every way
   to it ---- */
enum { AGAIN_MAX = 16 };             /* ops that are run again for one of the tape, at most */
static luna_backend counting;
static int64_t runs, runs_max;
static luna_status counted_forward(luna_op *op) {
  if (++runs > runs_max) return LUNA_UNSUPPORTED;
  return luna_cpu_backend()->op[op->kind].forward(op);
}
/* shared: each result is read twice; read: backward needs each result */
static luna_tensor *chain(luna_tensor *x, bool shared, bool read, int steps) {
  for (int i = 0; i < steps; i++) {
    if (shared) x = luna_add(luna_scale(x, 0.01f), x);
    if (read) x = luna_gelu(x);
  }
  return luna_gelu(x);
}
/* a step: the bits of the gradient, and the peak; false: it fails, or runs too many ops again */
static bool chain_step(bool shared, bool read, int steps, bool scoped, float *gradient, size_t *peak) {
  const int64_t shape[2] = {4, 4}, ops = (int64_t)steps * (2 * shared + read) + 1;
  luna_options options = plain_options();
  options.backend = &counting;
  luna_ctx *ctx = luna_open(&options);
  luna_tensor *w = luna_param(luna_params_open(ctx), "w", 2, shape, (luna_init){LUNA_INIT_NORMAL, 1});
  runs_max = INT64_MAX;
  luna_begin_step(ctx);
  const luna_scope scope = luna_scope_begin(ctx);
  luna_tensor *y = chain(w, shared, read, steps);
  if (scoped) y = luna_scope_end(scope, &y, 1);
  luna_tensor *loss = common_loss(y, 5);
  runs = 0, runs_max = AGAIN_MAX * ops;
  const bool good = luna_backward(loss) == LUNA_OK && luna_read_grad(w, gradient) == LUNA_OK;
  CHECK(good, "a chain of %lld ops, scoped %d: more than %lld are run again: %s", (long long)ops, scoped,
        (long long)runs_max, luna_error(ctx));
  *peak = luna_memory(ctx).peak;
  luna_close(ctx);
  return good;
}
static void check_chains(void) {
  static const int steps[3] = {20, 400, TEST_QUICK ? 1000 : 2000};
  counting = *luna_cpu_backend();
  for (int kind = 0; kind < LUNA_OP_COUNT; kind++) counting.op[kind].forward = counted_forward;
  for (int i = 0; i < 9; i++) {
    const bool shared = i % 3 != 1, read = i % 3 != 0;
    float with[16], without[16];
    size_t less, more;
    if (!chain_step(shared, read, steps[i / 3], true, with, &less)) return; /* a longer one may never end */
    if (!chain_step(shared, read, steps[i / 3], false, without, &more)) return;
    CHECK(same_bits(with, without, 16), "a scope changes the gradient of a chain of %d steps", steps[i / 3]);
    CHECK(less <= more, "a chain of %d steps takes %zu bytes in a scope, %zu without", steps[i / 3], less, more);
  }
}

/* ---- scopes that are run again, one of which ends inside the other; and a cheap op in one, whose result the scope
   around it releases: the bits are those without scopes ---- */
static luna_tensor *overlapping(luna_tensor *w, bool scoped) {
  const luna_scope first = luna_scope_recompute(w->ctx);
  luna_tensor *x = luna_add(luna_softmax(luna_matmul(w, w, false, false), NULL), w);
  const luna_scope second = luna_scope_recompute(w->ctx);
  x = luna_softmax(luna_matmul(x, w, false, false), NULL);
  if (scoped) x = luna_scope_end(first, &x, 1);
  x = luna_softmax(luna_matmul(x, w, false, false), NULL);
  return scoped ? luna_scope_end(second, &x, 1) : x;
}
static luna_tensor *cheap_result(luna_tensor *w, bool scoped) {
  const luna_scope outer = luna_scope_begin(w->ctx), inner = luna_scope_recompute(w->ctx);
  luna_tensor *x = luna_layer_norm(luna_scale(w, 2), NULL, NULL, 0), *y;
  if (scoped) x = luna_scope_end(inner, &x, 1);
  y = luna_matmul(x, x, false, false);
  for (int i = 0; i < 4; i++) y = luna_softmax(luna_matmul(y, x, false, false), NULL);
  return scoped ? luna_scope_end(outer, &y, 1) : y;
}
static void check_again(luna_tensor *(*block)(luna_tensor *w, bool scoped), const char *what) {
  const int64_t shape[2] = {8, 8};
  float *gradient[2];
  for (int scoped = 0; scoped < 2; scoped++) {
    luna_ctx *ctx = ctx_open();
    luna_tensor *w = luna_param(luna_params_open(ctx), "w", 2, shape, (luna_init){LUNA_INIT_NORMAL, 1});
    luna_begin_step(ctx);
    CHECK(luna_backward(common_loss(block(w, scoped), 6)) == LUNA_OK, "%s: %s", what, luna_error(ctx));
    gradient[scoped] = gradient_of(w);
    luna_close(ctx);
  }
  CHECK(same_bits(gradient[0], gradient[1], 64), "%s change the gradient", what);
  free(gradient[0]), free(gradient[1]);
}

/* ---- what training a long classifier takes, measured ---- */
typedef struct long_run {
  float loss, *gradients; /* to be freed */
  int64_t count;
} long_run;
static luna_status long_classifier(luna_ctx *ctx, int64_t dim, int64_t n, luna_recompute_kind recompute,
                                   luna_pooling pooling, long_run *out) {
  luna_classifier model;
  luna_classifier_config config = {0};
  luna_params *params = luna_params_open(ctx);
  int32_t *tokens = common_tokens(n, 77, 256), label = 1;
  config.encoder.layers = 4, config.encoder.layer.dim = dim, config.encoder.layer.heads = 4,
      config.encoder.layer.memory = 16;
  config.encoder.layer.dropout = config.encoder.layer.attention_dropout = config.encoder.layer.activation_dropout =
      0.1f;
  config.encoder.layer.recompute = recompute;
  config.pooling = pooling;
  luna_status status = params ? luna_classifier_init(&model, params, &config) : luna_error_status(ctx);
  for (int step = 0; step < 2 && status == LUNA_OK; step++) {
    luna_begin_step(ctx);
    luna_tensor *loss = luna_cross_entropy(luna_classifier_forward(&model, &(luna_input){ tokens, NULL, 1, n, NULL }),
                                           &label, NULL);
    luna_backward(loss);
    status = luna_error_status(ctx);
    if (out && status == LUNA_OK) out->loss = luna_item(loss);
  }
  if (out)
    out->count = luna_params_element_count(params), out->gradients = status == LUNA_OK ? all_gradients(params) : NULL;
  free(tokens);
  return status;
}
/* long enough for each of three threads to have its share */
static void check_recomputed_long(void) {
  long_run first = {0, NULL, 0};
  for (int i = 0; i < 6; i++) {
    luna_options options = plain_options();
    long_run now = {NAN, NULL, 0};
    options.threads = i % 2 ? 3 : 1;
    luna_ctx *ctx = luna_open(&options);
    CHECK(long_classifier(ctx, 64, 1500, (luna_recompute_kind)(i / 2), LUNA_POOLING_MEAN, &now) == LUNA_OK,
          "recompute %d: %s", i / 2, luna_error(ctx));
    luna_close(ctx);
    if (i == 0) first = now;
    CHECK(same_bits(&now.loss, &first.loss, 1) && same_bits(now.gradients, first.gradients, first.count),
          "1500 tokens, recompute %d on %d threads: other bits", i / 2, options.threads);
    if (i) free(now.gradients);
  }
  free(first.gradients);
}
static size_t measured(int64_t dim, int64_t n, luna_recompute_kind recompute, luna_pooling pooling) {
  luna_options options = plain_options();
  options.measure = true;
  heap_most = heap_live;
  luna_ctx *ctx = luna_open(&options);
  CHECK(long_classifier(ctx, dim, n, recompute, pooling, NULL) == LUNA_OK, "measuring: %s", luna_error(ctx));
  CHECK(heap_most <= 4 << 20, "measuring what takes %zu bytes takes %lld itself", luna_memory(ctx).peak,
        (long long)heap_most);
  const size_t peak = luna_memory(ctx).peak;
  luna_close(ctx);
  return peak;
}
/* measured first: 0.439 and 0.440 of 29 floats a token and dimension (64 dimensions: 0.512 of 33); 0.470 to 0.509, for
   of four layers one is always whole. Less is kept than before either was there: gradients and norms go as soon as they
   can (it was 8806 MiB in 256 dimensions). */
static void check_savings(void) {
  for (int64_t dim = 64; dim <= 256; dim *= 2) {
    const double keep = (double)measured(dim, 65536, LUNA_RECOMPUTE_NONE, LUNA_POOLING_MEAN),
        ffn = (double)measured(dim, 65536, LUNA_RECOMPUTE_FFN, LUNA_POOLING_MEAN) / keep,
                 layer = (double)measured(dim, 65536, LUNA_RECOMPUTE_LAYER, LUNA_POOLING_MEAN) / keep;
    printf("models: training on 65536 tokens in %d dimensions takes %.0f MiB; recomputing the feed-forwards %.3f of "
           "that, the layers %.3f\n", (int)dim, keep / 1048576, ffn, layer);
    CHECK(keep <= (double)(dim * 65536 * 4) * (dim == 64 ? 36 : 31) && ffn <= (dim == 64 ? 0.54 : 0.46),
          "%d dimensions: recomputing the feed-forwards takes %.3f of the memory", (int)dim, ffn);
    CHECK(layer <= 0.53, "%d dimensions: recomputing the layers takes %.3f of the memory", (int)dim, layer);
  }
}
static void check_measured_block(luna_recompute_kind recompute, luna_pooling pooling) {
  const size_t need = measured(32, 300, recompute, pooling);
  luna_options options = plain_options();
  long_run expected = {NAN, NULL, 0}, got = expected;
  luna_ctx *ctx = luna_open(&options);
  CHECK(long_classifier(ctx, 32, 300, recompute, pooling, &expected) == LUNA_OK, "%s", luna_error(ctx));
  CHECK(luna_memory(ctx).peak == need, "recompute %d: measured %zu bytes, taken are %zu", recompute, need,
        luna_memory(ctx).peak);
  luna_close(ctx);
  options.allocator.allocate = NULL, options.allocator.release = NULL;
  options.block = common_alloc(need + 64);
  for (int less = 0; less < 2; less++) {
    options.block_size = need - (less ? 64 : 0);
    ctx = luna_open(&options);
    const luna_status status = ctx ? long_classifier(ctx, 32, 300, recompute, pooling, &got) : LUNA_OUT_OF_MEMORY;
    if (!less)
      CHECK(status == LUNA_OK && same_bits(got.gradients, expected.gradients, expected.count),
            "recompute %d: a block of the %zu bytes measured: %s", recompute, need, luna_error(ctx));
    else
      CHECK(status == LUNA_OUT_OF_MEMORY && luna_error(ctx)[0], "recompute %d: 64 bytes less than measured: %s, \"%s\"",
            recompute,
            luna_status_text(status), luna_error(ctx));
    luna_close(ctx);
    free(got.gradients);
  }
  free(expected.gradients), free(options.block);
}
static void check_recomputing(void) {
  for (luna_model_kind kind = LUNA_MODEL_LM; kind <= LUNA_MODEL_SEQ2SEQ; kind = (luna_model_kind)(kind + 1))
    for (int v = 0; v < ENCODERS; v++)
      if (model_exists(kind, v)) check_recomputed(kind, v);
  check_recomputed_long();
  check_blocks();
  check_chains();
  check_again(overlapping, "scopes that overlap");
  check_again(cheap_result, "scopes around a cheap result");
  for (int i = 0; i < 6; i++)
    check_measured_block((luna_recompute_kind)(i / 2), i % 2 ? LUNA_POOLING_MEMORY : LUNA_POOLING_MEAN);
  check_savings();
  heap_check("recomputation");
}

int main(void) {
  check_recomputing();
  return test_report("recompute");
}
