/* luna_profile: what it counts, in which scopes, as a table and as JSON; off and on give the same bits; its errors. */
#include "test.h"
#define LUNA_IMPLEMENTATION
#include "luna.h"
#include "common.h"

enum { STEPS = 3, LAYERS = 2, BATCH = 2, N = 24, DIM = 16, FFN = 40, VOCAB = 30 };

typedef struct text { char at[1 << 16]; size_t size; } text;
static void collect(void *user, const char *part) {
  text *t = (text *)user;
  const size_t n = strlen(part);
  if (t->size + n < sizeof t->at) memcpy(t->at + t->size, part, n + 1), t->size += n;
}
static const char *json(luna_ctx *ctx, text *t) {
  t->size = 0;
  CHECK(luna_profile_write(ctx, LUNA_PROFILE_JSON, collect, t) == LUNA_OK, "JSON: %s", luna_error(ctx));
  return t->at;
}
/* the number after "key": from here on; NaN where it is not */
static double number(const char *at, const char *key) {
  char name[40];
  snprintf(name, sizeof name, "\"%s\": ", key);
  at = at ? strstr(at, name) : NULL;
  return at ? strtod(at + strlen(name), NULL) : NAN;
}
/* the op's entry in a scope, or null */
static const char *entry(const char *from, const char *scope, const char *op, const char *pass) {
  char start[200];
  snprintf(start, sizeof start, "{\"scope\": \"%s\", \"op\": \"%s\", \"pass\": \"%s\"", scope, op, pass);
  return strstr(from, start);
}

typedef struct model { luna_ctx *ctx; luna_params *params; luna_lm lm; luna_optimizer *adam; } model;
static bool open_model(model *m, const luna_options *options) {
  luna_lm_config config = {0};
  config.vocab = VOCAB, config.layers = LAYERS;
  config.layer.dim = DIM, config.layer.heads = 2, config.layer.ffn = FFN, config.layer.dropout = 0.1f;
  m->ctx = luna_open(options);
  m->params = luna_params_open(m->ctx);
  return luna_lm_init(&m->lm, m->params, &config) == LUNA_OK && (m->adam = luna_adamw(m->params, NULL)) != NULL;
}
static void steps(model *m, int count) {
  int32_t *tokens = common_tokens(BATCH * N + 1, 3, VOCAB);
  for (int i = 0; i < count; i++) {
    luna_begin_step(m->ctx);
    luna_backward(luna_lm_loss(&m->lm, &(luna_input){ tokens, NULL, BATCH, N, NULL }, tokens + 1));
    CHECK(luna_optimizer_step(m->adam) == LUNA_OK, "step: %s", luna_error(m->ctx));
  }
  free(tokens);
}

static void check_counts(const char *all) {
  static const char layer[] = "lm_loss/lm_features/causal_layer";
  const double product = 2e-9 * STEPS * LAYERS * BATCH * N * 2 * DIM * FFN;
  const char *forward = entry(all, layer, "FEED_FORWARD", "forward"), *at;
  const char *backward = entry(all, layer, "FEED_FORWARD", "backward");
  double sum = 0;
  int depth = 0;
  if (!CHECK(forward && backward, "no feed-forward in %s: %s", layer, all)) return;
  CHECK(fabs(number(forward, "calls") - STEPS * LAYERS) < 0.5, "%g calls forward", number(forward, "calls"));
  CHECK(fabs(number(backward, "calls") - STEPS * LAYERS) < 0.5, "%g calls backward", number(backward, "calls"));
  CHECK(fabs(number(forward, "gflop") / product - 1) < 1e-3, "%g GFLOP forward", number(forward, "gflop"));
  CHECK(fabs(number(backward, "gflop") / (2 * product) - 1) < 1e-3, "%g GFLOP backward", number(backward, "gflop"));
  CHECK(number(forward, "megabytes") > 1e-6 * STEPS * LAYERS * 4 * (2 * BATCH * N * DIM + 2 * DIM * FFN),
        "too few bytes");
  CHECK(entry(all, "lm_loss", "CROSS_ENTROPY", "backward") != NULL, "the loss is not in lm_loss: %s", all);
  CHECK(entry(all, "", "optimizer update", "forward") && entry(all, "", "optimizer norm", "forward"), "no optimiser");
  CHECK(fabs(number(all, "steps") - STEPS) < 0.5, "%g steps", number(all, "steps"));
  for (at = strstr(all, "\"calls\""); at; at = strstr(at + 1, "\"calls\"")) sum += number(at, "ms");
  CHECK(sum + number(all, "between_ops_ms") <= 1.001 * number(all, "ms") + 0.01, "ops take %g of %g ms", sum,
        number(all, "ms"));
  for (at = all; *at; at++) depth += (*at == '{') + (*at == '[') - (*at == '}') - (*at == ']');
  CHECK(depth == 0 && !strstr(all, ",]") && !strstr(all, "nan") && !strstr(all, "Inf"), "not JSON: %s", all);
}

int main(void) {
  static text first, second;
  model m = {0}, off = {0};
  luna_options options = {0};
  options.seed = 5;
  options.threads = 2;
  if (!CHECK(open_model(&m, &options) && open_model(&off, &options), "init: %s", luna_error(m.ctx)))
    return test_report("profile");
  CHECK(luna_profile_write(m.ctx, LUNA_PROFILE_TABLE, collect, &first) != LUNA_OK &&
        luna_error_id_of(m.ctx) == LUNA_ERROR_NO_PROFILE && first.size == 0, "written before begin");
  CHECK(luna_profile_end(m.ctx) != LUNA_OK && luna_error_id_of(m.ctx) == LUNA_ERROR_NO_PROFILE, "end before begin");
  CHECK(luna_profile_resume(m.ctx) != LUNA_OK && luna_error_id_of(m.ctx) == LUNA_ERROR_NO_PROFILE,
        "resumed before begin");
  CHECK(luna_profile_begin(NULL) != LUNA_OK && luna_profile_end(NULL) != LUNA_OK &&
        luna_profile_write(NULL, LUNA_PROFILE_TABLE, collect, &first) != LUNA_OK, "null context");
  steps(&m, 1), steps(&off, 1);
  CHECK(luna_profile_begin(m.ctx) == LUNA_OK, "begin: %s", luna_error(m.ctx));
  CHECK(luna_profile_write(m.ctx, LUNA_PROFILE_TABLE, collect, &first) != LUNA_OK, "written before end");
  steps(&m, STEPS), steps(&off, STEPS);
  CHECK(luna_profile_end(m.ctx) == LUNA_OK, "end: %s", luna_error(m.ctx));
  CHECK(luna_profile_write(m.ctx, LUNA_PROFILE_TABLE, NULL, NULL) != LUNA_OK, "null write");
  check_counts(json(m.ctx, &first));

  steps(&m, 1), steps(&off, 1);      /* after the end nothing is counted */
  CHECK(strcmp(json(m.ctx, &second), first.at) == 0, "counted after the end");
  float *with = common_parameters(m.params), *without = common_parameters(off.params);
  CHECK(memcmp(with, without, (size_t)luna_params_element_count(m.params) * sizeof(float)) == 0,
        "a profile changes bits");
  free(with), free(without);

  const size_t bytes = luna_memory(m.ctx).current;
  luna_profile_begin(m.ctx);         /* anew, in the same memory */
  luna_scope scope = luna_scope_begin(m.ctx);
  luna_tensor *x = luna_relu(luna_params_at(m.params, 0, NULL));
  luna_scope_end(scope, &x, 1);
  luna_profile_end(m.ctx);
  CHECK(luna_memory(m.ctx).current <= bytes + (size_t)VOCAB * DIM * 8 + 4096, "a second profile takes more memory");
  json(m.ctx, &second);
  const char *relu = entry(second.at, "main", "ACTIVATION", "forward");
  CHECK(relu && fabs(number(relu, "calls") - 1) < 0.1 && !strstr(second.at, "lm_loss"), "not anew: %s", second.at);
  CHECK(luna_profile_resume(m.ctx) == LUNA_OK && luna_profile_resume(m.ctx) != LUNA_OK, "resumed once");
  x = luna_relu(luna_params_at(m.params, 0, NULL));
  luna_profile_end(m.ctx);
  const double before = number(second.at, "ms");
  json(m.ctx, &first);
  relu = entry(first.at, "", "ACTIVATION", "forward");
  CHECK(relu && strstr(first.at, "\"main\"") && number(first.at, "ms") >= before, "not resumed: %s", first.at);
  second.size = 0;
  CHECK(luna_profile_write(m.ctx, (luna_profile_format)2, collect, &second) == LUNA_BAD_ARGUMENT && second.size == 0,
        "a format that does not exist: %s", luna_error(m.ctx));
  CHECK(luna_profile_write(m.ctx, LUNA_PROFILE_TABLE, collect, &second) == LUNA_OK, "table: %s", luna_error(m.ctx));
  CHECK(strstr(second.at, "\n") && strstr(second.at, "  main:\n") &&
        strstr(second.at, "ACTIVATION [30,16] -> [30,16]\n"),
        "table: %s", second.at);
  luna_profile_begin(m.ctx);         /* anew, within scopes of the one before */
  luna_scope outer = luna_scope_begin(m.ctx), inner = luna_scope_begin_as(m.ctx, "in", false);
  luna_profile_begin(m.ctx);
  luna_scope_end(inner, &x, 1);
  inner = luna_scope_begin_as(m.ctx, "a \"name\" \\\n", false);
  x = luna_relu(luna_params_at(m.params, 0, NULL));
  luna_scope_end(inner, &x, 1), luna_scope_end(outer, &x, 1);
  luna_profile_end(m.ctx);
  json(m.ctx, &second);
  CHECK(entry(second.at, "a ?name? ??", "ACTIVATION", "forward") != NULL, "begun within scopes: %s", second.at);
  luna_profile_begin(m.ctx);         /* ops of more shapes than there are rows count in their scope */
  luna_begin_inference(m.ctx);
  outer = luna_scope_begin_as(m.ctx, "many", false);
  for (int64_t n = 1; n <= 400; n++) x = luna_relu(luna_tensor_new(m.ctx, NULL, 1, &n));
  luna_scope_end(outer, &x, 1);
  luna_profile_end(m.ctx);
  json(m.ctx, &second);
  int rows = 0;
  for (const char *at = strstr(second.at, "\"many\""); at; at = strstr(at + 1, "\"many\"")) rows++;
  CHECK(rows > 200 && rows < 400, "%d rows", rows);
  second.size = 0;
  luna_profile_write(m.ctx, LUNA_PROFILE_TABLE, collect, &second);
  CHECK(strstr(second.at, "peak\n   400.0") != NULL, "not 400 calls in a scope: %.300s", second.at);
  luna_close(m.ctx), luna_close(off.ctx);
  return test_report("profile");
}
