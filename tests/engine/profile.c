/* luna_trace: its events, their order, what they count and in which scopes; set and unset anywhere it changes no bit.
   examples/luna_profile.h: what it counts, as a table, as JSON and as a timeline; its errors. */
#include "test.h"
#define LUNA_IMPLEMENTATION
#include "luna.h"
#include "examples/luna_profile.h"
#include "common.h"

enum { STEPS = 3, LAYERS = 2, BATCH = 2, N = 24, DIM = 16, FFN = 40, VOCAB = 30 };

typedef struct text { char at[1 << 16]; size_t size; } text;
static void collect(void *user, const char *part) {
  text *t = (text *)user;
  const size_t n = strlen(part);
  if (t->size + n < sizeof t->at) memcpy(t->at + t->size, part, n + 1), t->size += n;
}
static const char *written(luna_profile *p, luna_profile_format format, text *t) {
  t->size = 0;
  CHECK(luna_profile_write(p, format, collect, t) == LUNA_OK, "format %d: %s", (int)format, luna_error(p->ctx));
  return t->at;
}
static const char *json(luna_profile *p, text *t) { return written(p, LUNA_PROFILE_JSON, t); }
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

/* whether each bracket of a text is closed */
static bool is_nested(const char *text) {
  int depth = 0;
  for (; *text && depth >= 0; text++) {
    depth += *text == '{' || *text == '[';
    depth -= *text == '}' || *text == ']';
  }
  return depth == 0;
}

/* ---- luna_trace: what its function was told ---- */
enum { MOST_EVENTS = 4000 };
typedef struct told {
  luna_trace_kind kind;
  char name[40], path[120];
  luna_trace_event event;
} told;
typedef struct listener {
  luna_ctx *ctx;
  told at[MOST_EVENTS];
  int count, open;                     /* open: scopes */
  bool nested;                         /* each end was that of the scope that began last */
  const luna_trace_scope *inside[40];
  int leave_after;                     /* events until it unsets itself; 0: never */
} listener;
static void path_of(const luna_trace_scope *scope, char *out, size_t room) {
  if (!scope) return;
  path_of(scope->outer, out, room);
  if (scope->outer) strncat(out, "/", room - strlen(out) - 1);
  strncat(out, scope->name, room - strlen(out) - 1);
}
static void listen(void *user, const luna_trace_event *e) {
  listener *l = (listener *)user;
  if (l->count == MOST_EVENTS) return;
  told *now = &l->at[l->count++];
  memset(now, 0, sizeof *now);
  now->kind = e->kind;
  now->event = *e;
  strncat(now->name, e->name, sizeof now->name - 1);
  path_of(e->scope, now->path, sizeof now->path);
  if (e->kind == LUNA_TRACE_SCOPE_BEGIN && l->open < 40) l->inside[l->open++] = e->scope;
  if (e->kind == LUNA_TRACE_SCOPE_END) {
    l->nested = l->nested && l->open > 0 && l->inside[l->open - 1] == e->scope;
    l->open -= l->open > 0;
  }
  if (l->leave_after && l->count == l->leave_after) luna_trace(l->ctx, NULL, NULL);
}
static void listen_anew(listener *l, luna_ctx *ctx) {
  memset(l, 0, sizeof *l);
  l->ctx = ctx;
  l->nested = true;
  CHECK(luna_trace(ctx, listen, l) == LUNA_OK, "luna_trace: %s", luna_error(ctx));
}
/* the first event of this kind, name and path from one on; -1: none */
static int find(const listener *l, int from, luna_trace_kind kind, const char *name, const char *path) {
  for (int i = from; i < l->count; i++)
    if (l->at[i].kind == kind && strcmp(l->at[i].name, name) == 0 && strcmp(l->at[i].path, path) == 0) return i;
  return -1;
}
static int count_of(const listener *l, luna_trace_kind kind) {
  int count = 0;
  for (int i = 0; i < l->count; i++) count += l->at[i].kind == kind;
  return count;
}

/* A classifier of steps leaves no scope open for what the caller does after it. */
static void check_per_step(listener *l) {
  static const int32_t tokens[3] = {1, 2, 0};
  luna_ctx *ctx = luna_open(NULL);
  luna_classifier classifier;
  luna_classifier_config config = {0};
  config.vocab = 3, config.classes = 2, config.per_step = true;
  CHECK(luna_classifier_init(&classifier, luna_params_open(ctx), &config) == LUNA_OK, "%s", luna_error(ctx));
  listen_anew(l, ctx);
  luna_begin_inference(ctx);
  CHECK(luna_classifier_forward(&classifier, &(luna_input){tokens, NULL, 1, 3, NULL}) && l->open == 0 && l->nested,
        "%d scopes are open after luna_classifier_forward: %s", l->open, luna_error(ctx));
  luna_close(ctx);
}

static void check_order(model *m, listener *l) {
  static const char loss[] = "lm_loss", layer[] = "lm_loss/lm_features/causal_layer";
  listen_anew(l, m->ctx);
  steps(m, 2);
  luna_trace(m->ctx, NULL, NULL);
  CHECK(l->count > 40 && l->count < MOST_EVENTS && l->nested && l->open == 0, "%d events, %d scopes open", l->count,
        l->open);
  CHECK(l->at[0].kind == LUNA_TRACE_BEGIN && strcmp(l->at[0].name, "luna_begin_step") == 0 && !l->at[0].path[0],
        "first came %s", l->at[0].name);
  CHECK(count_of(l, LUNA_TRACE_BEGIN) == 2 && count_of(l, LUNA_TRACE_OPTIMIZER) == 4, "%d begins, %d of the optimiser",
        count_of(l, LUNA_TRACE_BEGIN), count_of(l, LUNA_TRACE_OPTIMIZER));
  CHECK(count_of(l, LUNA_TRACE_SCOPE_BEGIN) == count_of(l, LUNA_TRACE_SCOPE_END), "scopes do not end");

  const int opened = find(l, 0, LUNA_TRACE_SCOPE_BEGIN, "lm_loss", loss);
  const int inside = find(l, 0, LUNA_TRACE_SCOPE_BEGIN, "causal_layer", layer);
  const int forward = find(l, 0, LUNA_TRACE_FORWARD, "FEED_FORWARD", layer);
  const int closed = find(l, 0, LUNA_TRACE_SCOPE_END, "lm_loss", loss);
  const int first = find(l, 0, LUNA_TRACE_BACKWARD, "CROSS_ENTROPY", loss);
  const int backward = find(l, 0, LUNA_TRACE_BACKWARD, "FEED_FORWARD", layer);
  const int norm = find(l, 0, LUNA_TRACE_OPTIMIZER, "optimizer norm", "");
  const int update = find(l, 0, LUNA_TRACE_OPTIMIZER, "optimizer update", "");
  CHECK(opened == 1 && inside > opened && forward > inside && closed > forward && first > closed && backward > first &&
        norm > backward && update == norm + 1, "the order is %d %d %d %d %d %d %d %d", opened, inside, forward, closed,
        first, backward, norm, update);
  if (forward < 0 || backward < 0 || closed < 0 || update < 0) return;

  const luna_trace_event *f = &l->at[forward].event, *b = &l->at[backward].event;
  const double product = 2.0 * BATCH * N * 2 * DIM * FFN;
  CHECK(f->flops == product && b->flops == 2 * product, "%g and %g flops", f->flops, b->flops);
  CHECK(f->bytes >= 4.0 * (2 * BATCH * N * DIM + 2 * DIM * FFN) && b->bytes > f->bytes, "%g and %g bytes", f->bytes,
        b->bytes);
  CHECK(f->inputs > 1 && f->outputs == 1 && b->inputs == f->inputs && f->in && f->out, "%d inputs, %d outputs",
        f->inputs, f->outputs);
  const luna_trace_event *u = &l->at[update].event;
  CHECK(u->bytes == 4.0 * 8 * (double)luna_params_element_count(m->params) && u->flops == 0 && !u->inputs && !u->in,
        "an update of %g bytes", u->bytes);
  const luna_trace_event *o = &l->at[opened].event, *c = &l->at[closed].event;
  CHECK(c->scope == o->scope && c->start == o->start && c->start + c->seconds >= f->start, "the scope's events");
  for (int i = 0; i < l->count; i++) {
    const luna_trace_event *e = &l->at[i].event;
    CHECK(e->start > 0 && e->seconds >= 0, "event %d starts at %g and takes %g s", i, e->start, e->seconds);
  }
}

/* Shapes are those of the op's tensors, an absent input is null, and nothing is told but of this context. */
static void shapes_of(void *user, const luna_trace_event *e) {
  int64_t *sizes = (int64_t *)user;
  if (e->kind != LUNA_TRACE_FORWARD) return;
  sizes[0]++;
  sizes[1] = e->in[0]->shape[0];
  sizes[2] = e->in[1] ? e->in[1]->shape[1] : -1;
  sizes[3] = e->out[0]->shape[1];
}
static void check_shapes(luna_ctx *ctx, luna_ctx *other) {
  const int64_t a[2] = { 3, 5 }, b[2] = { 5, 7 };
  int64_t sizes[4] = {0};
  luna_begin_inference(ctx);
  luna_begin_inference(other);
  luna_tensor *x = luna_tensor_new(ctx, NULL, 2, a), *y = luna_tensor_new(ctx, NULL, 2, b);
  luna_tensor *z = luna_tensor_new(other, NULL, 2, a);
  luna_trace(ctx, shapes_of, sizes);
  luna_matmul(x, y, false, false);
  luna_relu(z);
  luna_trace(ctx, NULL, NULL);
  luna_matmul(x, y, false, false);
  CHECK(sizes[0] == 1 && sizes[1] == 3 && sizes[2] == 7 && sizes[3] == 7, "%d events, shapes %d %d %d", (int)sizes[0],
        (int)sizes[1], (int)sizes[2], (int)sizes[3]);
}

/* What backward computes again is a forward once more, in the scope of the first. */
static void check_recompute(model *m, listener *l) {
  luna_begin_step(m->ctx);
  listen_anew(l, m->ctx);
  const luna_scope scope = luna_scope_begin_as(m->ctx, "again", true);
  luna_tensor *x = luna_relu(luna_params_at(m->params, 0, NULL));
  x = luna_mul(x, x);
  luna_scope_end(scope, &x, 1);
  const int forward = find(l, 0, LUNA_TRACE_FORWARD, "ACTIVATION", "again");
  const int ended = find(l, 0, LUNA_TRACE_SCOPE_END, "again", "again");
  luna_backward(common_loss(x, 7));
  luna_trace(m->ctx, NULL, NULL);
  const int again = find(l, ended, LUNA_TRACE_FORWARD, "ACTIVATION", "again");
  const int backward = find(l, ended, LUNA_TRACE_BACKWARD, "ACTIVATION", "again");
  CHECK(forward == 1 && ended > forward && again > ended && backward > again, "computed again: %d %d %d %d", forward,
        ended, again, backward);
  luna_params_zero_grad(m->params);
}

/* Scopes that end twice, that are left open, and that began while nobody listened. */
static void check_scopes(luna_ctx *ctx, listener *l) {
  const int64_t shape[1] = { 4 };
  luna_begin_inference(ctx);
  luna_tensor *x = luna_tensor_new(ctx, NULL, 1, shape);
  const luna_scope before = luna_scope_begin_as(ctx, "before", false);
  listen_anew(l, ctx);
  const luna_scope again = luna_scope_begin_as(ctx, "luna_again", false);
  luna_scope_begin_as(ctx, "open", false);
  luna_relu(x);
  luna_scope_end(again, &x, 1);
  const int ended = l->count;
  luna_scope_end(again, &x, 1);
  CHECK(l->count == ended, "a scope that ended twice ends twice");
  luna_relu(x);
  luna_scope_end(before, &x, 1);
  luna_scope_begin_as(ctx, NULL, false);
  luna_begin_inference(ctx);
  x = luna_tensor_new(ctx, NULL, 1, shape);
  luna_relu(x);
  luna_trace(ctx, NULL, NULL);

  static const struct { luna_trace_kind kind; const char *name, *path; } expected[] = {
    { LUNA_TRACE_SCOPE_BEGIN, "again", "again" }, { LUNA_TRACE_SCOPE_BEGIN, "open", "again/open" },
    { LUNA_TRACE_FORWARD, "ACTIVATION", "again/open" }, { LUNA_TRACE_SCOPE_END, "open", "again/open" },
    { LUNA_TRACE_SCOPE_END, "again", "again" }, { LUNA_TRACE_FORWARD, "ACTIVATION", "" },
    { LUNA_TRACE_SCOPE_BEGIN, "scope", "scope" }, { LUNA_TRACE_SCOPE_END, "scope", "scope" },
    { LUNA_TRACE_BEGIN, "luna_begin_inference", "" }, { LUNA_TRACE_FORWARD, "ACTIVATION", "" }
  };
  const int count = (int)(sizeof expected / sizeof expected[0]);
  CHECK(l->count == count && l->open == 0 && l->nested, "%d events, not %d", l->count, count);
  for (int i = 0; i < count && i < l->count; i++)
    CHECK(l->at[i].kind == expected[i].kind && strcmp(l->at[i].name, expected[i].name) == 0 &&
          strcmp(l->at[i].path, expected[i].path) == 0, "event %d: %s in \"%s\"", i, l->at[i].name, l->at[i].path);
}

/* More paths than a context holds: the rest has no events of its own, and its ops are in the scope around. */
static void check_paths(luna_ctx *ctx, listener *l) {
  enum { PATHS = 200 };
  static char name[PATHS][8];
  const int64_t shape[1] = { 4 };
  luna_begin_inference(ctx);
  listen_anew(l, ctx);
  const luna_scope around = luna_scope_begin_as(ctx, "many paths", false);
  luna_tensor *x = luna_tensor_new(ctx, NULL, 1, shape);
  for (int i = 0; i < PATHS; i++) {
    snprintf(name[i], sizeof name[i], "p%d", i);
    const luna_scope scope = luna_scope_begin_as(ctx, name[i], false);
    luna_relu(x);
    luna_scope_end(scope, &x, 1);
  }
  luna_scope_end(around, &x, 1);
  luna_trace(ctx, NULL, NULL);
  const int begun = count_of(l, LUNA_TRACE_SCOPE_BEGIN);
  CHECK(begun > 60 && begun <= 128 && begun == count_of(l, LUNA_TRACE_SCOPE_END) && l->nested && l->open == 0,
        "%d paths", begun);
  CHECK(find(l, 0, LUNA_TRACE_FORWARD, "ACTIVATION", "many paths/p0") > 0 &&
        find(l, 0, LUNA_TRACE_FORWARD, "ACTIVATION", "many paths") > 0 &&
        count_of(l, LUNA_TRACE_FORWARD) == PATHS, "the ops of paths without a place");
}

/* A tracer comes and goes between forward and backward and out of its own function; bits stay. */
static void check_changes(model *m, model *off, listener *l) {
  int32_t *tokens = common_tokens(BATCH * N + 1, 3, VOCAB);
  const luna_input input = { tokens, NULL, BATCH, N, NULL };
  static const char layer[] = "lm_loss/lm_features/causal_layer";
  for (int way = 0; way < 3; way++) {
    luna_begin_step(m->ctx);
    if (way != 1) listen_anew(l, m->ctx);
    if (way == 2) l->leave_after = 7;
    luna_tensor *loss = luna_lm_loss(&m->lm, &input, tokens + 1);
    if (way == 0) luna_trace(m->ctx, NULL, NULL);
    const int forward = way == 1 ? 0 : l->count;
    if (way == 1) listen_anew(l, m->ctx);
    luna_backward(loss);
    luna_optimizer_step(m->adam);
    luna_trace(m->ctx, NULL, NULL);
    luna_begin_step(off->ctx);
    luna_backward(luna_lm_loss(&off->lm, &input, tokens + 1));
    luna_optimizer_step(off->adam);

    if (way == 0)
      CHECK(l->count == forward && !count_of(l, LUNA_TRACE_BACKWARD), "told %d events once unset", l->count - forward);
    if (way == 1)
      CHECK(count_of(l, LUNA_TRACE_BACKWARD) > 10 && l->at[0].kind == LUNA_TRACE_BACKWARD && !l->at[0].path[0] &&
            find(l, 0, LUNA_TRACE_BACKWARD, "FEED_FORWARD", "") > 0, "a forward that nobody heard is in no scope");
    if (way == 2) CHECK(l->count == 7, "%d events after it unset itself at 7", l->count);
  }

  luna_begin_step(m->ctx);             /* heard, unheard, heard again: a backward has its forward's scope */
  listen_anew(l, m->ctx);
  luna_tensor *loss = luna_lm_loss(&m->lm, &input, tokens + 1);
  luna_trace(m->ctx, NULL, NULL);
  listen_anew(l, m->ctx);
  luna_backward(loss);
  luna_optimizer_step(m->adam);
  luna_trace(m->ctx, NULL, NULL);
  CHECK(find(l, 0, LUNA_TRACE_BACKWARD, "FEED_FORWARD", layer) > 0, "a backward is not in its forward's scope");
  luna_begin_step(off->ctx);
  luna_backward(luna_lm_loss(&off->lm, &input, tokens + 1));
  luna_optimizer_step(off->adam);
  free(tokens);
}

static void check_same(model *m, model *off, const char *what) {
  float *with = common_parameters(m->params), *without = common_parameters(off->params);
  CHECK(memcmp(with, without, (size_t)luna_params_element_count(m->params) * sizeof(float)) == 0, "%s changes bits",
        what);
  free(with), free(without);
}

static void *no_memory(void *user, size_t bytes) { return *(bool *)user ? NULL : malloc(bytes); }
static void give(void *user, void *at, size_t bytes) { (void)user, (void)bytes, free(at); }
/* Null contexts and functions, and no memory for paths. */
static void check_trace_errors(listener *l) {
  bool full = false;
  luna_options options = {0};
  options.threads = 1;
  options.allocator.allocate = no_memory, options.allocator.release = give, options.allocator.user = &full;
  luna_ctx *ctx = luna_open(&options);
  const int64_t shape[1] = { 4 };
  CHECK(luna_trace(NULL, listen, l) == LUNA_BAD_ARGUMENT && luna_trace(NULL, NULL, NULL) == LUNA_BAD_ARGUMENT,
        "a null context");
  const size_t bytes = luna_memory(ctx).current;
  CHECK(luna_trace(ctx, NULL, l) == LUNA_OK && luna_memory(ctx).current == bytes, "to unset what was never set");
  luna_begin_inference(ctx);
  luna_tensor *x = luna_tensor_new(ctx, NULL, 1, shape);
  full = true;
  memset(l, 0, sizeof *l);
  CHECK(luna_trace(ctx, listen, l) == LUNA_OUT_OF_MEMORY && luna_error_id_of(ctx) == LUNA_ERROR_NO_MEMORY &&
        strstr(luna_error(ctx), "luna_trace"), "no memory: %s", luna_error(ctx));
  full = false;
  luna_begin_inference(ctx);
  x = luna_relu(luna_tensor_new(ctx, NULL, 1, shape));
  CHECK(x && l->count == 0, "%d events though luna_trace failed", l->count);
  listen_anew(l, ctx);
  luna_relu(x);
  CHECK(l->count == 1, "%d events", l->count);
  CHECK(luna_seconds(NULL) > 0 && luna_seconds(ctx) >= l->at[0].event.start && luna_options_of(ctx)->threads == 1,
        "the clock");
  luna_close(ctx);
}
static void check_trace(const luna_options *options) {
  static listener l;
  model m = {0}, off = {0};
  if (!CHECK(open_model(&m, options) && open_model(&off, options), "init: %s", luna_error(m.ctx))) return;
  check_per_step(&l);
  check_order(&m, &l);
  steps(&off, 2);
  check_changes(&m, &off, &l);
  check_same(&m, &off, "a tracer");
  check_shapes(m.ctx, off.ctx);
  check_recompute(&m, &l);
  check_scopes(m.ctx, &l);
  check_paths(m.ctx, &l);
  check_trace_errors(&l);
  luna_close(m.ctx), luna_close(off.ctx);
}

/* ---- examples/luna_profile.h ---- */

/* whether a call failed because profiles begin, end and are written in this order; the next begin forgets it */
static bool out_of_order(luna_ctx *ctx, luna_status status, const char *call) {
  char sentence[200];
  snprintf(sentence, sizeof sentence, "%s: luna_profile_begin comes before luna_profile_end, and that before "
           "luna_profile_resume and luna_profile_write", call);
  const bool same = status == LUNA_BAD_ARGUMENT && strcmp(luna_error(ctx), sentence) == 0;
  luna_begin_inference(ctx);
  return same;
}
static bool failed_as(luna_ctx *ctx, luna_status status, const char *sentence) {
  const bool same = status == LUNA_BAD_ARGUMENT && strcmp(luna_error(ctx), sentence) == 0;
  luna_begin_inference(ctx);
  return same;
}

static void check_anew(model *m, luna_profile *p, text *first, text *second) {
  const size_t bytes = luna_memory(m->ctx).current;
  luna_profile_begin(p);               /* in the same memory */
  luna_scope scope = luna_scope_begin(m->ctx);
  luna_tensor *x = luna_relu(luna_params_at(m->params, 0, NULL));
  luna_scope_end(scope, &x, 1);
  luna_profile_end(p);
  CHECK(luna_memory(m->ctx).current <= bytes + (size_t)VOCAB * DIM * 8 + 4096, "a second profile takes more memory");
  json(p, second);
  const char *relu = entry(second->at, "check_anew", "ACTIVATION", "forward");
  CHECK(relu && fabs(number(relu, "calls") - 1) < 0.1 && !strstr(second->at, "lm_loss"), "not anew: %s", second->at);
  CHECK(luna_profile_resume(p) == LUNA_OK && luna_profile_resume(p) != LUNA_OK, "resumed once");
  luna_begin_inference(m->ctx);
  x = luna_relu(luna_params_at(m->params, 0, NULL));
  luna_profile_end(p);
  const double before = number(second->at, "ms");
  json(p, first);
  relu = entry(first->at, "", "ACTIVATION", "forward");
  CHECK(relu && strstr(first->at, "\"check_anew\"") && number(first->at, "ms") >= before, "not resumed: %s", first->at);
  written(p, LUNA_PROFILE_TABLE, second);
  CHECK(strstr(second->at, "\n") && strstr(second->at, "  check_anew:\n") &&
        strstr(second->at, "ACTIVATION [30,16] -> [30,16]\n") && strstr(second->at, " 2 threads, peak "),
        "table: %s", second->at);

  luna_profile_begin(p);               /* within scopes of the one before */
  luna_scope outer = luna_scope_begin(m->ctx), inner = luna_scope_begin_as(m->ctx, "in", false);
  luna_profile_begin(p);
  luna_scope_end(inner, &x, 1);
  inner = luna_scope_begin_as(m->ctx, "a \"name\" \\\n", false);
  x = luna_relu(luna_params_at(m->params, 0, NULL));
  luna_scope_end(inner, &x, 1), luna_scope_end(outer, &x, 1);
  luna_profile_end(p);
  json(p, second);
  CHECK(entry(second->at, "check_anew/a ?name? ??", "ACTIVATION", "forward") != NULL, "begun within scopes: %s",
        second->at);
  written(p, LUNA_PROFILE_TIMELINE, second);
  CHECK(strstr(second->at, "{\"name\": \"a ?name? ??\", \"cat\": \"scope\", \"ph\": \"X\", \"pid\": 1") &&
        strstr(second->at, "{\"name\": \"check_anew\", \"cat\": \"scope\", \"ph\": \"X\", \"pid\": 1, \"tid\": 1, "
               "\"ts\": 0.0, "), "a timeline begun within scopes: %s", second->at);
}

static void check_many(model *m, luna_profile *p, text *t) { /* ops of more shapes than there are rows */
  luna_tensor *x = NULL;
  luna_profile_begin(p);
  luna_begin_inference(m->ctx);
  luna_scope outer = luna_scope_begin_as(m->ctx, "many", false);
  for (int64_t n = 1; n <= 400; n++) x = luna_relu(luna_tensor_new(m->ctx, NULL, 1, &n));
  luna_scope_end(outer, &x, 1);
  luna_profile_end(p);
  json(p, t);
  int rows = 0;
  for (const char *at = strstr(t->at, "\"many\""); at; at = strstr(at + 1, "\"many\"")) rows++;
  CHECK(rows > 200 && rows < 400, "%d rows", rows);
  written(p, LUNA_PROFILE_TABLE, t);
  CHECK(strstr(t->at, "peak\n   400.0") != NULL, "not 400 calls in a scope: %.300s", t->at);
}

/* The timeline of a step: as many events as were told, each scope around its ops. */
static void check_timeline(model *m, luna_profile *p, text *t) {
  static const char forward[] = "{\"name\": \"FEED_FORWARD\", \"cat\": \"forward\", \"ph\": \"X\", ";
  static const char backward[] = "{\"name\": \"FEED_FORWARD\", \"cat\": \"backward\", \"ph\": \"X\", ";
  static const char loss[] = "{\"name\": \"lm_loss\", \"cat\": \"scope\", \"ph\": \"X\", ";
  static const char head[] = "{\"displayTimeUnit\": \"ms\", \"otherData\": {\"left_out\": 0}, \"traceEvents\": [\n";
  static const char shapes[] = "\"args\": {\"in\": [2,24,16], \"out\": [2,24,16]}}";
  luna_profile_begin(p);
  steps(m, 1);
  luna_profile_end(p);
  const char *all = written(p, LUNA_PROFILE_TIMELINE, t);
  const char *op = strstr(all, forward), *back = strstr(all, backward), *scope = strstr(all, loss);
  int64_t ops = 0, events = 0;
  if (!CHECK(op && back && scope, "no timeline: %s", all)) return;

  CHECK(strncmp(all, head, sizeof head - 1) == 0 && is_nested(all) && !strstr(all, ",\n]") && !strstr(all, "}\n  {"),
        "not JSON: %s", all);
  const double start = number(scope, "ts"), end = start + number(scope, "dur");
  CHECK(start >= 0 && number(op, "ts") >= start - 1 && number(op, "ts") + number(op, "dur") <= end + 1,
        "the op is not within its scope, in microseconds %g to %g", start, end);
  CHECK(number(back, "ts") >= end - 1 && number(back, "dur") >= 0, "backward begins at %g", number(back, "ts"));
  CHECK(strstr(all, "{\"name\": \"luna_begin_step\", \"cat\": \"begin\", \"ph\": \"i\", \"s\": \"t\", ") &&
        strstr(all, "{\"name\": \"optimizer update\", \"cat\": \"optimizer\", \"ph\": \"X\", "), "begin or optimiser");
  CHECK(strncmp(strstr(op, "\"args\""), shapes, sizeof shapes - 1) == 0, "shapes: %.200s", op);
  for (const char *at = strstr(all, "\"ph\": \"X\""); at; at = strstr(at + 1, "\"ph\": \"X\"")) events++;
  for (const char *at = strstr(all, "\"cat\": \"scope\""); at; at = strstr(at + 1, "\"cat\": \"scope\"")) ops--;
  CHECK(events + ops == p->row[0].calls, "%d of %d ops", (int)(events + ops), (int)p->row[0].calls);
}
/* A timeline has an end, and says how much it left out. */
static void check_left_out(model *m, luna_profile *p) {
  const int64_t shape[1] = { 1 };
  const int64_t most = PROFILE_SPANS;
  luna_profile_begin(p);
  luna_begin_inference(m->ctx);
  luna_tensor *x = luna_tensor_new(m->ctx, NULL, 1, shape);
  for (int64_t i = 0; i < most + 4; i++) {
    if (i % 1000 == 999) {
      luna_begin_inference(m->ctx);
      x = luna_tensor_new(m->ctx, NULL, 1, shape);
    }
    luna_relu(x);
  }
  luna_profile_end(p);
  CHECK(p->span_count == most && p->left_out == 5 + most / 1000, "%d spans, %d left out", (int)p->span_count,
        (int)p->left_out);
  CHECK(p->row[0].calls == most + 4, "%d calls", (int)p->row[0].calls);
}

int main(void) {
  static text first, second;
  model m = {0}, off = {0};
  luna_options options = {0};
  options.seed = 5;
  options.threads = 2;
  check_trace(&options);

  if (!CHECK(open_model(&m, &options) && open_model(&off, &options), "init: %s", luna_error(m.ctx)))
    return test_report("profile");
  luna_profile *p = luna_profile_open(m.ctx);
  if (!CHECK(p, "open: %s", luna_error(m.ctx))) return test_report("profile");
  CHECK(out_of_order(m.ctx, luna_profile_write(p, LUNA_PROFILE_TABLE, collect, &first), "luna_profile_write") &&
        first.size == 0, "written before begin");
  CHECK(out_of_order(m.ctx, luna_profile_end(p), "luna_profile_end"), "end before begin");
  CHECK(out_of_order(m.ctx, luna_profile_resume(p), "luna_profile_resume"), "resumed before begin");
  CHECK(!luna_profile_open(NULL) && luna_profile_begin(NULL) == LUNA_BAD_ARGUMENT &&
        luna_profile_end(NULL) == LUNA_BAD_ARGUMENT && luna_profile_resume(NULL) == LUNA_BAD_ARGUMENT &&
        luna_profile_write(NULL, LUNA_PROFILE_TABLE, collect, &first) == LUNA_BAD_ARGUMENT, "null profile");
  luna_profile_close(NULL);
  steps(&m, 1), steps(&off, 1);
  CHECK(luna_profile_begin(p) == LUNA_OK, "begin: %s", luna_error(m.ctx));
  CHECK(out_of_order(m.ctx, luna_profile_write(p, LUNA_PROFILE_TABLE, collect, &first), "luna_profile_write"),
        "written before end");
  luna_profile_begin(p);               /* without the begin of that check */
  steps(&m, STEPS), steps(&off, STEPS);
  CHECK(luna_profile_end(p) == LUNA_OK, "end: %s", luna_error(m.ctx));
  CHECK(failed_as(m.ctx, luna_profile_write(p, LUNA_PROFILE_TABLE, NULL, NULL), "luna_profile_write: write is null"),
        "null write");
  second.size = 0;
  CHECK(failed_as(m.ctx, luna_profile_write(p, (luna_profile_format)3, collect, &second),
                  "luna_profile_write: format is 3, outside 0..2") && second.size == 0, "a format that does not exist");
  check_counts(json(p, &first));
  CHECK(number(first.at, "peak_gflops") > 0 && strstr(first.at, "\"threads\": 2, "), "no peak: %.200s", first.at);

  steps(&m, 1), steps(&off, 1);        /* after the end nothing is counted */
  CHECK(strcmp(json(p, &second), first.at) == 0, "counted after the end");
  check_same(&m, &off, "a profile");
  check_anew(&m, p, &first, &second);
  check_many(&m, p, &second);
  check_timeline(&m, p, &second);
  check_left_out(&m, p);
  luna_profile_begin(p);               /* a profile that is closed while it runs */
  luna_profile_close(p);
  CHECK(luna_begin_inference(m.ctx) == LUNA_OK && luna_relu(luna_params_at(m.params, 0, NULL)), "after a profile");
  luna_close(m.ctx), luna_close(off.ctx);
  return test_report("profile");
}
