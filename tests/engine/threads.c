/* The same bits for any number of threads, on a pool or on a caller's parallel_for, in any order; contexts that open
   and close, contexts and streams that read one set of parameters, each in a thread of its own; a child of fork. Clean
   under the thread sanitizer (make sanitize). */
#include "test.h"
#define LUNA_IMPLEMENTATION
#include "luna.h"
#include "common.h"
#include <pthread.h>
#ifndef _WIN32
#include <sys/wait.h>
#include <unistd.h>
#endif

enum { STEPS = TEST_QUICK ? 2 : 20 };

/* ---- parallel_for of a caller's: backwards; and threads made for each call ---- */
static void backwards(void *user, int64_t count, void (*task)(void *work, int64_t index), void *work) {
  (void)user;
  while (count-- > 0) task(work, count);
}
typedef struct share {
  void (*task)(void *work, int64_t index);
  void *work;
  int64_t index;
} share;
static void *share_run(void *argument) {
  const share *s = (const share *)argument;
  s->task(s->work, s->index);
  return NULL;
}
static void spawning(void *user, int64_t count, void (*task)(void *work, int64_t index), void *work) {
  pthread_t thread[16];
  share shares[16];
  (void)user;
  for (int64_t i = 0; i < count; i++) {
    shares[i].task = task, shares[i].work = work, shares[i].index = i;
    if (pthread_create(&thread[i], NULL, share_run, &shares[i]) != 0) exit(2);
  }
  for (int64_t i = 0; i < count; i++) pthread_join(thread[i], NULL);
}

/* ---- two models ---- */
typedef struct trained {
  float *values;
  int64_t count;
  double loss;
} trained;

static luna_tensor *lm_loss(luna_lm *model, int step) {
  enum { BATCH = 1, N = 600 }; /* enough work for threads to share a sequence's chunks */
  int32_t *tokens = common_tokens(BATCH * (N + 1), 90 + (uint64_t)step, 40);
  luna_tensor *loss = luna_cross_entropy(luna_lm_forward(model, &(luna_input){ tokens, NULL, BATCH, N, NULL }),
                                         tokens + 1, NULL);
  free(tokens);
  return loss;
}

typedef struct encoder {
  luna_tensor *table, *memory;
  luna_encoder_layer layer[2];
  luna_linear_layer head;
} encoder;
static bool encoder_init(encoder *e, luna_params *params) {
  luna_layer_config config = {0};
  const int64_t table[2] = {40, 24}, memory[2] = {6, 24};
  const luna_init normal = {LUNA_INIT_NORMAL, 0.2f}, xavier = {LUNA_INIT_XAVIER, 1};
  config.dim = 24;
  config.heads = 4;
  config.pack_heads = 2;
  config.ffn = 50;
  config.activation = LUNA_ACTIVATION_GELU;
  config.dropout = config.attention_dropout = config.activation_dropout = 0.1f;
  e->table = luna_param(params, "table", 2, table, normal);
  e->memory = luna_param(params, "memory", 2, memory, normal);
  return e->table && e->memory && luna_encoder_layer_init(&e->layer[0], params, "0.", &config) == LUNA_OK &&
         luna_encoder_layer_init(&e->layer[1], params, "1.", &config) == LUNA_OK &&
         luna_linear_layer_init(&e->head, params, "head", 24, 5, xavier) == LUNA_OK;
}
static luna_tensor *encoder_loss(encoder *e, int step) {
  enum { BATCH = 2, N = 1100 };
  static const int32_t lengths[BATCH] = {1100, 530}, labels[BATCH] = {3, 1};
  int32_t *tokens = common_tokens(BATCH * N, 95 + (uint64_t)step, 40);
  luna_tensor *x = luna_embedding(e->table, tokens, BATCH, N), *p = luna_expand(e->memory, BATCH);
  for (int i = 0; i < 2; i++) x = luna_encoder_layer_forward(&e->layer[i], x, &p, lengths);
  free(tokens);
  return luna_cross_entropy(luna_linear_layer_forward(&e->head, luna_add(luna_mean(x, 1), luna_mean(p, 1))), labels,
                            NULL);
}

/* the parameters after training with these options */
static trained train(luna_options options, bool lm) {
  trained t = {NULL, 0, 0};
  luna_lm_config config = {0};
  luna_optimizer_config adam = {0};
  luna_lm model;
  encoder e;
  options.seed = 12;
  luna_ctx *ctx = luna_open(&options);
  luna_params *params = luna_params_open(ctx);
  config.vocab = 40;
  config.layer.dim = 32;
  config.layer.heads = 2;
  config.layer.ffn = 50;
  config.layer.convolution = 4;
  config.layer.dropout = config.layer.attention_dropout = config.layer.activation_dropout = 0.1f;
  adam.lr = 3e-3f;
  adam.clip = 0.5f;
  adam.weight_decay = 0.01f;
  if (!CHECK(lm ? luna_lm_init(&model, params, &config) == LUNA_OK : encoder_init(&e, params), "init: %s",
             luna_error(ctx)))
    return luna_close(ctx), t;
  luna_optimizer *optimizer = luna_adamw(params, &adam);
  for (int step = 0; step < STEPS; step++) {
    luna_begin_step(ctx);
    luna_tensor *loss = lm ? lm_loss(&model, step) : encoder_loss(&e, step);
    luna_backward(loss);
    if (!CHECK(luna_optimizer_step(optimizer) == LUNA_OK, "step: %s", luna_error(ctx))) break;
    t.loss = (double)luna_item(loss);
  }
  t.count = luna_params_element_count(params);
  t.values = common_floats(t.count);
  for (int64_t i = 0, at = 0; i < luna_params_tensor_count(params); i++) {
    const luna_tensor *p = luna_params_at(params, i, NULL);
    luna_read(p, t.values + at);
    at += luna_count(p);
  }
  luna_close(ctx);
  return t;
}

static void check_training(bool lm, luna_form form, luna_isa isa) {
  static const struct {
    int threads;
    luna_parallel_for run;
    const char *name;
  } ways[] = {{1, NULL, "1 thread"},
              {2, NULL, "2 threads"},
              {3, NULL, "3 threads"},
              {7, NULL, "7 threads"},
              {5, backwards, "5 shares backwards"},
              {3, spawning, "3 threads made for each call"}};
  trained first = {NULL, 0, 0};
  for (size_t i = 0; i < sizeof ways / sizeof ways[0]; i++) {
    luna_options options = {0};
    if (TEST_QUICK && i != 0 && i != 2) continue;
    options.threads = ways[i].threads;
    options.parallel_for = ways[i].run;
    options.form = form;
    options.isa = isa;
    trained t = train(options, lm);
    if (i == 0) {
      first = t;
      CHECK(t.values && isfinite(t.loss), "training went wrong: the loss is %g", t.loss);
      continue;
    }
    int64_t differ = 0;
    for (int64_t j = 0; t.values && first.values && j < t.count; j++)
      differ += memcmp(&t.values[j], &first.values[j], sizeof(float)) != 0;
    CHECK(t.values && t.count == first.count && differ == 0,
          "%s, form %d, %s: %lld of %lld parameters have other bits after %d steps with %s than with 1 thread",
          lm ? "language model" : "encoder", (int)form, luna_isa_name(isa), (long long)differ, (long long)t.count,
              STEPS, ways[i].name);
    free(t.values);
  }
  free(first.values);
}

/* ---- a feed-forward of more rows than a block: forward each thread has blocks of its own ---- */
static float *feed_forward_of(int threads, luna_activation activation, float dropout, int64_t *count) {
  enum { ROWS = 715, DIM = 24, HIDDEN = 40 };
  luna_options options = {0};
  options.threads = threads;
  options.seed = 3;
  luna_ctx *ctx = luna_open(&options);
  luna_params *params = luna_params_open(ctx);
  const int64_t w1[2] = {HIDDEN, DIM}, w2[2] = {DIM, HIDDEN}, rows[2] = {ROWS, DIM};
  const luna_init init = {LUNA_INIT_NORMAL, 1};
  luna_tensor *x = luna_param(params, "x", 2, rows, init), *a = luna_param(params, "a", 2, w1, init),
              *b = luna_param(params, "b", 2, w2, init);
  luna_feed_forward_config config = {0};
  config.activation = activation;
  config.activation_dropout = config.dropout = dropout;
  luna_begin_step(ctx);
  luna_tensor *y = luna_feed_forward(x, a, NULL, b, NULL, &config);
  luna_backward(common_loss(y, 5));
  *count = ROWS * DIM + 2 * HIDDEN * DIM;
  float *values = common_floats(*count + ROWS * DIM);
  luna_read(y, values + *count);
  luna_read_grad(x, values);
  luna_read_grad(a, values + ROWS * DIM);
  luna_read_grad(b, values + ROWS * DIM + HIDDEN * DIM);
  *count += ROWS * DIM;
  CHECK(luna_error_status(ctx) == LUNA_OK, "%s", luna_error(ctx));
  luna_close(ctx);
  return values;
}
static void check_feed_forward(void) {
  static const luna_activation activations[2] = {LUNA_ACTIVATION_RELU, LUNA_ACTIVATION_GELU};
  static const int threads[] = {2, 3, 7, 16};
  for (int form = 0; form < 4; form++) {
    int64_t count;
    float *one = feed_forward_of(1, activations[form % 2], form / 2 ? 0.2f : 0, &count);
    for (size_t i = 0; i < sizeof threads / sizeof threads[0]; i++) {
      float *many = feed_forward_of(threads[i], activations[form % 2], form / 2 ? 0.2f : 0, &count);
      CHECK(memcmp(one, many, (size_t)count * sizeof(float)) == 0,
            "feed-forward, form %d: other bits with %d threads than with one", form, threads[i]);
      free(many);
    }
    free(one);
  }
}

/* one tensor as queries and keys, values, or both: its gradient has the same bits for any number of threads */
static float *same_input_of(int threads, int form, int64_t *count) {
  const luna_options options = {.threads = threads};
  const luna_attention_config config = {.heads = 2, .causal = form == 3};
  luna_ctx *ctx = luna_open(&options);
  luna_begin_step(ctx);
  luna_tensor *x = luna_require_grad(common_tensor(ctx, 1, 2, 700, 8, 0)), *z = common_tensor(ctx, 2, 2, 700, 8, 0);
  luna_tensor *y = luna_softmax_attention(x, form == 1 ? z : x, form == 2 ? z : x, &config);
  CHECK(luna_backward(common_loss(y, 3)) == LUNA_OK, "attention of one tensor: %s", luna_error(ctx));
  *count = luna_count(x);
  float *grad = common_floats(*count);
  luna_read_grad(x, grad);
  luna_close(ctx);
  return grad;
}
static void check_same_input(void) {
  static const int threads[] = {2, 5, 16};
  for (int form = 0; form < 4; form++) {
    int64_t count;
    float *one = same_input_of(1, form, &count);
    for (int i = 0; i < 3; i++) {
      float *many = same_input_of(threads[i], form, &count);
      CHECK(memcmp(one, many, (size_t)count * sizeof(float)) == 0,
            "attention of one tensor, form %d: other bits with %d threads than with one", form, threads[i]);
      free(many);
    }
    free(one);
  }
}

/* ---- many readers of one set of parameters ---- */
typedef struct reader {
  const luna_params *shared;
  const luna_lm *model;
  luna_form form;
  int number;
  float *out;
  bool good;
} reader;
enum { READER_N = 80, READER_ROUNDS = TEST_QUICK ? 2 : 5 };

static void *reader_context(void *argument) { /* a context of its own, the parameters of another */
  reader *r = (reader *)argument;
  luna_options options = {0};
  options.threads = 2;
  options.form = r->form;
  encoder e;
  luna_ctx *ctx = luna_open(&options);
  r->good = encoder_init(&e, luna_params_share(ctx, r->shared));
  for (int round = 0; r->good && round < READER_ROUNDS; round++) {
    luna_begin_inference(ctx);
    luna_tensor *x = common_tensor(ctx, 1, 2, READER_N, 24, 0), *p = common_tensor(ctx, 2, 2, 6, 24, 0);
    for (int i = 0; i < 2; i++) x = luna_encoder_layer_forward(&e.layer[i], x, &p, NULL);
    r->good = luna_read(luna_linear_layer_forward(&e.head, x), r->out) == LUNA_OK;
  }
  if (!r->good) printf("reader %d, form %d: %s\n", r->number, (int)r->form, luna_error(ctx));
  luna_close(ctx);
  return NULL;
}
static void *reader_stream(void *argument) { /* one stream steps while others open, step and close */
  reader *r = (reader *)argument;
  int32_t *tokens = common_tokens(200, 7, 40);
  r->good = true;
  for (int round = 0; r->good && round < READER_ROUNDS; round++) {
    luna_stream *s = luna_stream_open(r->model, NULL), *copy = luna_stream_open(r->model, NULL);
    const float *y = s && copy ? luna_stream_prefill(s, &(luna_input){ tokens, NULL, 0, 100, NULL }) : NULL;
    for (int i = 100; y && i < 150; i++) y = luna_stream_step(s, tokens + i);
    y = y && common_stream_copy(copy, s) == LUNA_OK ? luna_stream_prefill(copy,
        &(luna_input){ tokens + 150, NULL, 0, 50, NULL }) : NULL;
    r->good = y != NULL;
    if (y) memcpy(r->out, y, 40 * sizeof(float));
    luna_stream_close(s), luna_stream_close(copy);
  }
  free(tokens);
  return NULL;
}
/* contexts of their own, opened and closed; the first of all finds the instruction sets */
static void *reader_opens(void *argument) {
  reader *r = (reader *)argument;
  luna_options options = {0};
  options.threads = 2;
  r->good = true;
  for (int round = 0; r->good && round < 4 * READER_ROUNDS; round++) {
    luna_ctx *ctx = luna_open(&options);
    luna_begin_inference(ctx);
    r->good = luna_read(luna_softmax(common_tensor(ctx, 3, 4, 10, 0, 0), NULL), r->out) == LUNA_OK;
    luna_close(ctx);
  }
  return NULL;
}

static void check_readers(const char *what, void *(*run)(void *), const luna_params *shared, const luna_lm *model,
                          luna_form form,
                          int64_t count) {
  enum { READERS = 5 };
  reader readers[READERS];
  pthread_t thread[READERS];
  for (int i = 0; i < READERS; i++) {
    readers[i].shared = shared, readers[i].model = model, readers[i].form = form, readers[i].number = i,
        readers[i].good = false;
    readers[i].out = common_floats(count);
  }
  for (int i = 1; i < READERS; i++) /* all but one at once, then that one alone */
    if (pthread_create(&thread[i], NULL, run, &readers[i]) != 0) exit(2);
  for (int i = 1; i < READERS; i++) pthread_join(thread[i], NULL);
  run(&readers[0]);
  for (int i = 0; i < READERS; i++) {
    CHECK(readers[i].good, "%s, form %d: reader %d failed", what, (int)form, i);
    CHECK(memcmp(readers[i].out, readers[0].out, (size_t)count * sizeof(float)) == 0,
          "%s, form %d: several readers at once see other bits than one", what, (int)form);
  }
  for (int i = 0; i < READERS; i++) free(readers[i].out);
}

static void check_sharing(void) {
  encoder e;
  luna_lm model;
  luna_lm_config config = {0};
  luna_ctx *ctx = luna_open(NULL);
  luna_params *params = luna_params_open(ctx), *more = luna_params_open(ctx);
  config.vocab = 40;
  config.layer.dim = 24;
  config.layer.heads = 3;
  if (CHECK(encoder_init(&e, params) && luna_lm_init(&model, more, &config) == LUNA_OK, "init: %s", luna_error(ctx))) {
    check_readers("contexts", reader_context, params, NULL, LUNA_FORM_UNFOLDED, 2 * READER_N * 5);
    check_readers("contexts", reader_context, params, NULL, LUNA_FORM_FOLDED, 2 * READER_N * 5);
    check_readers("streams", reader_stream, NULL, &model, LUNA_FORM_CHEAPEST, 40);
  }
  luna_close(ctx);
}

/* ---- fork ---- */
#ifndef _WIN32
typedef struct forked {
  luna_ctx *ctx, *sharer;
  luna_params *params;
  luna_lm model, shared;
  luna_optimizer *optimizer;
  luna_stream *stream;
} forked;
enum { FORKED_STEPS = 2 };

static bool forked_open(forked *f, int threads) {
  luna_options options = {0};
  luna_lm_config config = {0};
  options.threads = threads;
  config.vocab = 40, config.layers = 1, config.layer.dim = 32, config.layer.heads = 2, config.layer.ffn = 50;
  f->ctx = luna_open(&options), f->sharer = luna_open(&options);
  f->params = luna_params_open(f->ctx);
  if (luna_lm_init(&f->model, f->params, &config) != LUNA_OK) return false;
  f->optimizer = luna_sgd(f->params, NULL);
  f->stream = luna_stream_open(&f->model, NULL);
  return f->optimizer && f->stream &&
         luna_lm_init(&f->shared, luna_params_share(f->sharer, f->params), &config) == LUNA_OK;
}
/* from this step to the last, then one of the stream and one of the sharing set: parameters and both logits, or null */
static float *forked_run(forked *f, int step) {
  const int32_t tokens[2] = {7, 8};
  for (; step < FORKED_STEPS; step++) {
    luna_begin_step(f->ctx);
    if (luna_backward(lm_loss(&f->model, step)) != LUNA_OK || luna_optimizer_step(f->optimizer) != LUNA_OK) return NULL;
  }
  const int64_t count = luna_params_element_count(f->params);
  float *out = (float *)realloc(common_parameters(f->params), (size_t)(count + 120) * sizeof(float));
  const float *logits = luna_stream_step(f->stream, tokens);
  luna_begin_inference(f->sharer);
  if (!out || !logits || luna_read(luna_lm_forward(&f->shared, &(luna_input){ tokens, NULL, 1, 2, NULL }),
                                   out + count + 40) != LUNA_OK) exit(2);
  memcpy(out + count, logits, 40 * sizeof(float));
  return out;
}
static void forked_close(forked *f) { luna_stream_close(f->stream), luna_close(f->sharer), luna_close(f->ctx); }

/* what a process makes of the run after its first step: 0 when it has the bits of one that never forked */
static int forked_end(forked *f, const float *expected) {
  float *out = forked_run(f, 1);
  const size_t size = (size_t)(luna_params_element_count(f->params) + 120) * sizeof(float);
  const int status = !out ? 3 : memcmp(out, expected, size) != 0 ? 4 : 0;
  free(out);
  forked_close(f);
  return status;
}
/* way 0: workers wait for the next call; 1: they sleep; 2: in the middle of a step */
static void check_fork(int way, const float *expected) {
  forked f;
  int status = -1;
  if (!CHECK(forked_open(&f, 3), "fork: init fails")) return;
  luna_begin_step(f.ctx);
  luna_tensor *loss = lm_loss(&f.model, 0);
  if (way != 2) luna_backward(loss), luna_optimizer_step(f.optimizer);
  if (way == 1) usleep(20000);
  fflush(stdout);
  const pid_t child = fork();
  if (way == 2) luna_backward(loss), luna_optimizer_step(f.optimizer);
  if (child == 0) {
    alarm(300); /* a child that waits for threads it does not have is killed */
    _exit(forked_end(&f, expected));
  }
  const bool ended = child > 0 && waitpid(child, &status, 0) == child;
  CHECK(ended && WIFEXITED(status) && WEXITSTATUS(status) == 0,
        "fork, way %d: the child ended with %s %d", way, WIFSIGNALED(status) ? "signal" : "status",
        WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
  CHECK(forked_end(&f, expected) == 0, "fork, way %d: the parent goes on with other bits", way);
}
static void check_forks(void) {
  forked parent;
  float *expected = forked_open(&parent, 1) ? forked_run(&parent, 0) : NULL;
  if (CHECK(expected != NULL, "fork: %s", luna_error(parent.ctx)))
    for (int way = 0; way < 3; way++) check_fork(way, expected);
  forked_close(&parent);
  free(expected);
}
#endif

/* ---- no more threads run than there are cores ---- */
#ifdef __linux__
static int threads_now(void) {
  char line[256];
  int count = 0;
  FILE *f = fopen("/proc/self/status", "r");
  while (f && fgets(line, sizeof line, f)) if (strncmp(line, "Threads:", 8) == 0) count = atoi(line + 8);
  if (f) fclose(f);
  return count;
}
static void check_cores(void) {
  const int cores = (int)sysconf(_SC_NPROCESSORS_ONLN), before = threads_now();
  luna_options options = {0};
  options.threads = cores + 9;
  luna_ctx *ctx = luna_open(&options);
  const int more = threads_now() - before;
  CHECK(ctx && before > 0 && more <= cores - 1, "a context of %d threads starts %d on %d cores", options.threads, more,
        cores);
  luna_close(ctx);
}
#endif

int main(void) {
  check_readers("opening", reader_opens, NULL, NULL, LUNA_FORM_CHEAPEST, 40);
#ifdef __linux__
  check_cores();
#endif
#ifndef _WIN32
  check_forks();
#endif
  check_training(true, LUNA_FORM_CHEAPEST, LUNA_ISA_BEST);
  if (!TEST_QUICK) check_training(false, LUNA_FORM_UNFOLDED, LUNA_ISA_BEST);
  check_training(false, LUNA_FORM_FOLDED, LUNA_ISA_BEST);
  if (luna_isa_available(LUNA_ISA_SSE2)) check_training(true, LUNA_FORM_CHEAPEST, LUNA_ISA_SSE2);
  check_feed_forward();
  check_same_input();
  check_sharing();
  return test_report("threads");
}
