/* examples/luna_ranks.h with several ranks, as threads of this process (collective.h): R ranks give the losses and
   gradients of one rank, with uneven and empty parts, with lengths and dropout; the same bits in every run and for any
   threads; what a layer sends; ranks that differ, hooks that fail, ranks that fail anywhere in a step. */
#include "test.h"
#define LUNA_IMPLEMENTATION
#include "luna.h"
#include "common.h"
#include <stdlib.h>
static bool no_memory;               /* luna_ranks.h gets none */
static void *test_malloc(size_t bytes) { return no_memory ? NULL : malloc(bytes); }
#define malloc test_malloc
#include "collective.h"
#undef malloc

enum { BATCH = 5, LENGTH = 37, TARGET = 19, VOCAB = 29, CLASSES = 3, STEPS = 3, FEATURES = 4, SLOTS = 4 };
typedef enum kind { LM, CLASSIFIER, PAIR, PER_STEP, MASKED, SEQ2SEQ } kind;

typedef struct run {
  const char *name;
  kind kind;
  luna_lm_config lm;
  luna_encoder_config encoder;
  luna_pooling pooling;
  bool features, with_lengths, value;   /* value: mean squared error */
  luna_form form;
  int64_t length, batch;
  const luna_backend *backend;
  int accumulated;                   /* losses a step; 0: 1 */
  int64_t vocab;                     /* of the logits; 0: VOCAB. More than 1024 are computed by panels */
  int threads;
  luna_isa isa;
  /* parts [ranks] of the batch */
  int64_t parts[HUB_RANKS];
  /* results */
  double loss[STEPS];
  float *gradient, *parameters;      /* of the first step, summed over ranks; after the last, of rank 0 */
  int64_t count;
  char error[HUB_RANKS][320];
  float *ranks_gradient[HUB_RANKS];
  double ranks_loss[HUB_RANKS][STEPS];
  uint64_t ranks_hash[HUB_RANKS];    /* of the parameters after the last step */
  int64_t bytes[HUB_RANKS];          /* of the last step */
} run;

static int64_t cut_at(int rank, int ranks, int64_t n) { return n * rank / ranks; }
/* a check in a rank's thread */
static pthread_mutex_t checking = PTHREAD_MUTEX_INITIALIZER;
static void rank_check(bool good, const luna_ctx *ctx, const char *what) {
  pthread_mutex_lock(&checking);
  CHECK(good, "%s: %s", what, luna_error(ctx));
  pthread_mutex_unlock(&checking);
}

/* the data of all ranks: the same numbers for any cut */
static int32_t token(int step, int64_t b, int64_t i, int32_t vocab) {
  return (int32_t)(common_hash(40 + (uint64_t)step, (uint64_t)(b * 10000 + i)) % (uint64_t)vocab);
}
static int32_t length_of(int64_t b, int64_t n) { return (int32_t)(b == 1 ? 3 : b == 3 ? n : 9 + 7 * b); }

typedef struct data {
  int32_t *tokens, *labels, *lengths, *target, *target_labels, *row_labels;
  float *features, *values;
  luna_input input, output;
} data;
/* sequences first .. first + batch, of n rows, and of m in the target */
static data data_of(const run *r, int step, int64_t first, int64_t batch, int64_t n, int64_t m) {
  data d = {0};
  d.tokens = (int32_t *)common_alloc((size_t)(batch * n) * 4);
  d.labels = (int32_t *)common_alloc((size_t)(batch * n) * 4);
  d.lengths = (int32_t *)common_alloc((size_t)batch * 4);
  d.target = (int32_t *)common_alloc((size_t)(batch * m) * 4);
  d.target_labels = (int32_t *)common_alloc((size_t)(batch * m) * 4);
  d.row_labels = (int32_t *)common_alloc((size_t)batch * 4);
  d.features = common_floats(batch * n * FEATURES);
  d.values = common_floats(batch * n);
  for (int64_t b = 0; b < batch; b++) {
    d.lengths[b] = length_of(first + b, r->length);
    d.row_labels[b] = token(step + 500, first + b, 0, CLASSES);
    for (int64_t i = 0; i < n; i++) {
      const bool real = !r->with_lengths || i < d.lengths[b]; /* luna_lm_loss and luna_masked_lm_loss know */
      d.tokens[b * n + i] = token(step, first + b, i, VOCAB);
      d.labels[b * n + i] = (!real && r->kind == PER_STEP) || token(step + 100, first + b, i, 7) == 0 ? -1 :
                            token(step, first + b, i + 1, r->kind == PER_STEP ? CLASSES : VOCAB);
      d.values[b * n + i] = (float)common_number(70, (uint64_t)((first + b) * 10000 + i));
      for (uint64_t f = 0, at = (uint64_t)((first + b) * 10000 + i) * 8; f < FEATURES; f++)
        d.features[(b * n + i) * FEATURES + (int64_t)f] = (float)common_number(60 + (uint64_t)step, at + f);
    }
    for (int64_t i = 0; i < m; i++) {
      d.target[b * m + i] = token(step + 200, first + b, i, VOCAB);
      d.target_labels[b * m + i] = token(step + 200, first + b, i + 1, VOCAB);
    }
  }
  if (batch * n == 0) {              /* of no rows there are no arrays */
    free(d.tokens), free(d.labels), free(d.features), free(d.values);
    d.tokens = d.labels = NULL, d.features = d.values = NULL;
  }
  d.input = (luna_input){ r->features ? NULL : d.tokens, r->with_lengths ? d.lengths : NULL, batch, n,
                          r->features ? d.features : NULL };
  d.output = (luna_input){ d.target, NULL, batch, m, NULL };
  return d;
}
static void data_free(data *d) {
  free(d->tokens), free(d->labels), free(d->lengths), free(d->target), free(d->target_labels), free(d->row_labels);
  free(d->features), free(d->values);
}

typedef struct model {
  luna_lm lm;
  luna_classifier classifier;
  luna_masked_lm masked;
  luna_seq2seq seq2seq;
} model;
static luna_status model_init(model *m, luna_params *params, const run *r) {
  luna_classifier_config classifier = {0};
  luna_masked_lm_config masked = {0};
  luna_seq2seq_config seq2seq = {0};
  luna_lm_config lm = r->lm;
  masked.vocab = seq2seq.vocab = classifier.vocab = VOCAB;
  lm.vocab = seq2seq.target_vocab = r->vocab ? r->vocab : VOCAB;
  lm.features = r->features ? FEATURES : 0;
  lm.outputs = r->features ? VOCAB : 0;
  classifier.encoder = r->encoder;
  classifier.encoder.features = lm.features;
  masked.encoder = seq2seq.encoder = classifier.encoder;
  classifier.classes = r->value ? 1 : CLASSES;
  classifier.pooling = r->pooling;
  classifier.per_step = r->kind == PER_STEP, classifier.pair = r->kind == PAIR;
  switch (r->kind) {
    case LM: return luna_lm_init(&m->lm, params, &lm);
    case MASKED: return luna_masked_lm_init(&m->masked, params, &masked);
    case SEQ2SEQ: return luna_seq2seq_init(&m->seq2seq, params, &seq2seq);
    default: return luna_classifier_init(&m->classifier, params, &classifier);
  }
}
static luna_tensor *model_loss(const model *m, const run *r, const data *d) {
  const luna_classifier *c = &m->classifier;
  switch (r->kind) {
    case LM: return luna_lm_loss(&m->lm, &d->input, d->labels);
    case MASKED: return luna_masked_lm_loss(&m->masked, &d->input, d->labels);
    case SEQ2SEQ:
      return luna_cross_entropy(luna_seq2seq_forward(&m->seq2seq, &d->input, &d->output), d->target_labels, NULL);
    case PAIR: return luna_cross_entropy(luna_classifier_forward_pair(c, &d->input, &d->input), d->row_labels, NULL);
    case PER_STEP: if (!r->value) return luna_cross_entropy(luna_classifier_forward(c, &d->input), d->labels, NULL);
                   return luna_mse(luna_classifier_forward(c, &d->input), d->values);
    default: return luna_cross_entropy(luna_classifier_forward(c, &d->input), d->row_labels, NULL);
  }
}

/* begins a step and differentiates its loss, which it returns */
static double step_loss(luna_ranks *ranks, const model *m, const run *r, const data *d) {
  luna_ranks_begin_step(ranks, &d->input, r->kind == SEQ2SEQ ? &d->output : NULL);
  luna_tensor *loss = model_loss(m, r, d);
  return luna_ranks_backward(ranks, loss, luna_counted(loss));
}

static void rank_main(void *user, const luna_collective *collective) {
  run *r = (run *)user;
  const bool cut = collective != NULL;
  const int rank = cut ? collective->rank : 0;
  hub *h = cut ? ((hub_rank *)collective->user)->h : NULL;
  int64_t first = 0, count = 0;
  luna_options options = { .threads = r->threads ? r->threads : 1, .seed = 5, .form = r->form,
                           .isa = r->isa, .backend = r->backend };
  luna_ctx *ctx = luna_open(&options);
  luna_params *params = luna_params_open(ctx);
  model net = {0};
  model_init(&net, params, r);
  luna_optimizer *sgd = luna_sgd(params, &(luna_optimizer_config){ .lr = 0.05f, .momentum = 0.5f, .clip = 2 });
  luna_ranks ranks;
  rank_check(luna_ranks_open(&ranks, params, sgd, collective) == LUNA_OK, ctx, "open");
  for (int i = 0; cut && i < rank; i++) first += r->parts[i];
  const int64_t batch = cut ? r->parts[rank] : r->batch;
  count = luna_params_element_count(params);
  if (rank == 0) r->count = count;
  r->ranks_gradient[rank] = common_floats(count);
  float *values = common_floats(count);
  for (int step = 0; step < STEPS; step++) {
    data d = data_of(r, step, first, batch, r->length, TARGET);
    const int64_t before = cut ? ((hub_rank *)collective->user)->bytes : 0;
    for (int more = 1; more < r->accumulated; more++) {
      step_loss(&ranks, &net, r, &d);
    }
    r->ranks_loss[rank][step] = step_loss(&ranks, &net, r, &d);
    float *at = r->ranks_gradient[rank];
    for (int64_t i = 0; step == 0 && i < luna_params_tensor_count(params); i++) {
      const luna_tensor *t = luna_params_at(params, i, NULL);
      if (t->grad) luna_read_grad(t, at);
      at += luna_count(t);
    }
    const bool good = luna_ranks_step(&ranks) == LUNA_OK;
    if (!good || luna_error_status(ctx) != LUNA_OK)
      snprintf(r->error[rank], sizeof r->error[rank], "%s", luna_error(ctx));
    r->bytes[rank] = cut ? ((hub_rank *)collective->user)->bytes - before : 0;
    data_free(&d);
    if (*r->error[rank]) {
      if (h) hub_leave(h);
      break;
    }
  }
  float *at = values;
  for (int64_t i = 0; i < luna_params_tensor_count(params); i++) {
    const luna_tensor *t = luna_params_at(params, i, NULL);
    luna_read(t, at);
    at += luna_count(t);
  }
  luna_ranks_close(&ranks);
  r->ranks_hash[rank] = 7;
  for (int64_t i = 0; i < count; i++) {
    uint32_t bits;
    memcpy(&bits, values + i, 4);
    r->ranks_hash[rank] = common_hash(r->ranks_hash[rank], bits);
  }
  if (rank == 0) r->parameters = values;
  else free(values);
  luna_close(ctx);
}
static void run_free(run *r) {
  for (int i = 0; i < HUB_RANKS; i++) free(r->ranks_gradient[i]);
  free(r->gradient), free(r->parameters);
}
/* ranks 0: without a collective */
static run run_on(const run *like, int ranks, const int64_t *parts) {
  run r = *like;
  hub h;
  if (parts) memcpy(r.parts, parts, (size_t)ranks * sizeof *parts);
  if (ranks == 0) rank_main(&r, NULL);
  else {
    hub_open(&h, ranks);
    hub_run(&h, rank_main, &r);
    CHECK(!h.mismatch, "%s on %d ranks: calls of other sizes", r.name, ranks);
    hub_close(&h);
  }
  for (int i = 0; i < (ranks ? ranks : 1); i++) {
    CHECK(!*r.error[i], "%s, rank %d of %d: %s", r.name, i, ranks, r.error[i]);
    CHECK(r.ranks_hash[i] == r.ranks_hash[0] && memcmp(r.ranks_loss[i], r.ranks_loss[0], sizeof r.loss) == 0,
          "%s: rank %d of %d has other losses or parameters than rank 0", r.name, i, ranks);
  }
  r.gradient = common_floats(r.count);
  for (int i = 0; i < (ranks ? ranks : 1); i++)
    for (int64_t j = 0; j < r.count; j++) r.gradient[j] += r.ranks_gradient[i][j];
  memcpy(r.loss, r.ranks_loss[0], sizeof r.loss);
  return r;
}
static void run_compare(const run *one, const run *many, int ranks, double loss, double gradient) {
  char what[160];
  for (int i = 0; i < STEPS; i++)
    CHECK(fabs(many->loss[i] / one->loss[i] - 1) <= loss, "%s on %d ranks, step %d: loss %.9g, of one rank %.9g",
          one->name, ranks, i, many->loss[i], one->loss[i]);
  snprintf(what, sizeof what, "%s on %d ranks: gradient", one->name, ranks);
  test_close(what, many->gradient, one->gradient, (size_t)one->count, gradient);
  snprintf(what, sizeof what, "%s on %d ranks: parameters", one->name, ranks);
  test_close(what, many->parameters, one->parameters, (size_t)one->count, gradient);
}
/* the same bits: losses, every rank's gradient, parameters */
static void run_same(const run *a, const run *b, int ranks, const char *why) {
  bool same = memcmp(a->loss, b->loss, sizeof a->loss) == 0 && a->ranks_hash[0] == b->ranks_hash[0];
  for (int i = 0; i < ranks; i++)
    same = same && memcmp(a->ranks_gradient[i], b->ranks_gradient[i], (size_t)a->count * sizeof(float)) == 0;
  CHECK(same, "%s on %d ranks: other bits %s", a->name, ranks, why);
}

static const int64_t even_batch[5][4] = { {0}, {5}, {3, 2}, {2, 2, 1}, {1, 1, 2, 1} };
static const int64_t odd_batch[5][4] = { {0}, {5}, {0, 5}, {4, 0, 1}, {0, 3, 0, 2} };

static void check(const run *like) {
  run one = run_on(like, 0, NULL);
  for (int ranks = 1; ranks <= (TEST_QUICK ? 2 : 4); ranks++)
    for (int odd = 0; odd < 2; odd++) {
      const int64_t *parts = (odd ? odd_batch : even_batch)[ranks];
      run many = run_on(like, ranks, parts);
      run_compare(&one, &many, ranks, 2e-6, 2e-5);
      if (ranks == 3) {
        run threaded = *like;
        threaded.threads = 3;
        run again = run_on(like, ranks, parts), other = run_on(&threaded, ranks, parts);
        run_same(&many, &again, ranks, "in another run");
        run_same(&many, &other, ranks, "with 3 threads");
        run_free(&again), run_free(&other);
      }
      run_free(&many);
    }
  run_free(&one);
}

/* a device: memory of its own, of which the host reads nothing but by copies */
static void *far_allocate(void *self, size_t bytes) {
  (void)self;
  return malloc(bytes ? bytes : 1);
}
static void far_release(void *self, void *pointer, size_t bytes) {
  (void)self, (void)bytes;
  free(pointer);
}

static run run_of(const char *name, kind k) {
  run r = {0};
  r.name = name, r.kind = k, r.length = LENGTH, r.batch = BATCH;
  r.lm = (luna_lm_config){ .layers = 2, .layer = { .dim = 16, .heads = 2, .memory = SLOTS, .ffn = 24 } };
  r.encoder = (luna_encoder_config){ .layers = 2, .max_length = 64,
                                    .layer = { .dim = 16, .heads = 2, .memory = SLOTS, .ffn = 24 } };
  return r;
}
static void set_dropout(luna_layer_config *c) {
  c->dropout = 0.1f, c->attention_dropout = 0.2f, c->activation_dropout = 0.15f;
}

static void data_parallel(void) {
  run r = run_of("lm", LM);
  r.lm.layer.convolution = 3;
  check(&r);
  r = run_of("lm, dropout", LM);
  set_dropout(&r.lm.layer);
  r.lm.positions = LUNA_POSITIONS_SINUSOIDAL;
  check(&r);
  r = run_of("classifier", CLASSIFIER);
  r.with_lengths = true;
  check(&r);
  r.name = "classifier, dropout";
  set_dropout(&r.encoder.layer);
  check(&r);
  r.name = "classifier, dropout, softmax attention";
  r.encoder.layer.attention = LUNA_ATTENTION_SOFTMAX;
  check(&r);
  r = run_of("pairs", PAIR);
  check(&r);
  r = run_of("values of each step", PER_STEP);
  r.features = r.value = r.with_lengths = true;
  check(&r);
  r = run_of("masked lm", MASKED);
  r.with_lengths = true;
  r.encoder.layer.own_memory = true;
  set_dropout(&r.encoder.layer);
  check(&r);
  r.accumulated = 2;
  r.name = "masked lm, two losses a step";
  check(&r);
  r = run_of("lm on a device", LM);
  luna_backend far = *luna_cpu_backend();
  far.allocate = far_allocate, far.release = far_release;
  r.backend = &far;
  check(&r);
  r = run_of("lm of many tokens", LM);
  r.vocab = 1500;
  check(&r);
  r = run_of("seq2seq", SEQ2SEQ);
  r.with_lengths = true;
  set_dropout(&r.encoder.layer);
  check(&r);
}

/* ---- what is sent: bytes a step and rank ---- */
static int64_t step_bytes(run *r, int ranks, const int64_t *parts) {
  run many = run_on(r, ranks, parts);
  const int64_t bytes = many.bytes[0];
  for (int i = 1; i < ranks; i++)
    CHECK(many.bytes[i] == bytes, "%s: rank %d sends %lld bytes, rank 0 %lld", r->name, i, (long long)many.bytes[i],
          (long long)bytes);
  run_free(&many);
  return bytes;
}
static void sent(void) {
  /* gradients, a count and a loss, and what is compared */
  run r = run_of("bytes of data parallel", LM);
  run one = run_on(&r, 0, NULL);
  const int64_t more = step_bytes(&r, 3, even_batch[3]) - one.count * 4;
  CHECK(more < 256, "a step sends %lld bytes beside the gradients", (long long)more);
  run_free(&one);
}

/* ---- what fails: every rank gets a sentence, and nothing is corrupted (make sanitize) ---- */
typedef enum unlike {
  NOTHING, SEED, FORM, SIZE, FROZEN, INFERENCE, FAILED_INIT, VALUES, OTHER_LENGTH, HEADS, DROPOUT,
  ISA, RATE, VERSION, BUILD, RANKS, UNLIKE_COUNT
} unlike;
typedef struct trial {
  kind kind;
  luna_encoder_config encoder;
  luna_lm_config lm;
  luna_isa isa;
  const luna_backend *backend;
  unlike what;                       /* how rank 1 is unlike rank 0 */
  luna_status status[HUB_RANKS];
  char error[HUB_RANKS][320];
} trial;
/* what a begin compares, from a rank of another build: number 1 its version, 2 its structs, 3 how many ranks there
   are */
static int other_number;
static bool other_gather(void *user, const void *mine, void *all, size_t bytes) {
  int64_t own[LUNA_RANKS_NUMBERS];
  if (bytes != sizeof own) return hub_gather(user, mine, all, bytes);
  memcpy(own, mine, sizeof own);
  own[other_number]++;
  return hub_gather(user, own, all, bytes);
}
static void trial_main(void *user, const luna_collective *collective) {
  trial *t = (trial *)user;
  const int rank = collective->rank;
  const unlike what = rank == 1 ? t->what : NOTHING;
  luna_collective own = *collective;
  luna_ranks ranks;
  luna_options options = { .threads = 1, .seed = what == SEED ? 8 : 7, .isa = t->isa, .backend = t->backend };
  luna_lm_config config = t->lm;
  run r = {0};
  model net = {0};
  if (what == FORM) options.form = LUNA_FORM_FOLDED;
  if (what == SIZE) config.layer.memory++;
  if (what == HEADS) config.layer.heads = 4;
  if (what == DROPOUT) config.layer.dropout = 0.1f;
  if (what == ISA) options.isa = LUNA_ISA_REFERENCE;
  if (what >= VERSION) own.all_gather = other_gather;
  luna_ctx *ctx = luna_open(&options);
  luna_params *params = luna_params_open(ctx);
  r.kind = t->kind, r.lm = config, r.encoder = t->encoder, r.length = 12, 
  model_init(&net, params, &r);
  if (what == FAILED_INIT) luna_param(params, "layers.0.fc1.bias", 1, (int64_t[]){1}, (luna_init){0}); /* once more */
  luna_optimizer *sgd = luna_sgd(params, &(luna_optimizer_config){ .lr = what == RATE ? 0.02f : 0.01f });
  if (what == FROZEN) luna_params_freeze(params, "fc1", true);
  if (what == VALUES) {
    luna_tensor *p = luna_params_at(params, 0, NULL);
    p->data[3] += 1;
  }
  data d = data_of(&r, 0, 0, 2, what == OTHER_LENGTH ? 7 : 6, 4);
  luna_ranks_open(&ranks, params, sgd, &own);
  t->status[rank] = luna_ranks_begin(&ranks, what != INFERENCE, &d.input, NULL);
  if (t->status[rank] == LUNA_OK) {
    luna_tensor *loss = model_loss(&net, &r, &d);
    luna_ranks_backward(&ranks, loss, luna_counted(loss));
    t->status[rank] = luna_ranks_step(&ranks);
  }
  luna_ranks_close(&ranks);
  snprintf(t->error[rank], sizeof t->error[rank], "%s", luna_error(ctx));
  if (t->status[rank] != LUNA_OK) hub_leave(((hub_rank *)collective->user)->h);
  data_free(&d);
  luna_close(ctx);
}
static trial trial_of(kind k) {
  trial t = {0};
  const run r = run_of("", k);
  t.kind = k, t.lm = r.lm, t.encoder = r.encoder;
  return t;
}
static void differ(void) {
  static const char *const names[UNLIKE_COUNT] = { "", "options.seed", "options.form",
      "set of parameters", "set of parameters", "call to begin a step", "outcome of its inits",
      "value of some parameter", "length n", "or config", "or config", "instruction set",
      "config of its optimiser", "version of luna.h", "build", "number of ranks" };
  for (int what = 0; what < UNLIKE_COUNT; what++) {
    trial t = trial_of(LM);
    hub h;
    t.what = (unlike)what;
    other_number = what - VERSION + 1;
    hub_open(&h, 3);
    hub_run(&h, trial_main, &t);
    for (int i = 0; i < 3; i++) {
      const bool own = what == FAILED_INIT && i == 1; /* its own sentence */
      const luna_status expected = !what ? LUNA_OK : own ? LUNA_BAD_ARGUMENT : LUNA_MISMATCH;
      CHECK(t.status[i] == expected, "rank %d, '%s': status %d, %s", i, names[what], (int)t.status[i], t.error[i]);
      CHECK(expected != LUNA_MISMATCH || (strstr(t.error[i], "rank 1 has another") && strstr(t.error[i], names[what])),
            "rank %d: %s", i, t.error[i]);
    }
    CHECK(!h.mismatch, "'%s': calls of other sizes", names[what]);
    hub_close(&h);
  }
}
static void hooks_fail(void) {
  for (int garbage = 0; garbage < 2; garbage++)
    for (int k = 0; k < 2; k++) {
      trial t = trial_of(k ? MASKED : LM);
      int64_t calls, at;
      hub h;
      t.lm.layer.convolution = 3;
      set_dropout(&t.lm.layer);
      hub_open(&h, 2);
      hub_run(&h, trial_main, &t);
      calls = h.rank[0].gathers + h.rank[0].reduces;
      hub_close(&h);
      for (at = 0; at < calls; at++) {
        hub_open(&h, 2);
        *(garbage ? &h.garbage_at : &h.fail_at) = at;
        hub_run(&h, trial_main, &t);
        if (!garbage)
          CHECK(t.status[0] == LUNA_DEVICE_FAILED && t.status[1] == LUNA_DEVICE_FAILED &&
                strstr(t.error[0], "failed on rank 0 of 2"), "model %d, call %d: %d, %s", k, (int)at,
                (int)t.status[0], t.error[0]);
        else CHECK((t.status[0] == LUNA_OK) == !*t.error[0], "garbage from call %d: %d, %s", (int)at,
                   (int)t.status[0], t.error[0]);
        hub_close(&h);
      }
    }
}
/* Where rank 1 fails in its first step; SKIPPED: all ranks only begin that one, ABSENT: they have none. */
typedef enum fault {
  SKIPPED, ABSENT, FORWARD, NULL_LOSS, BACKWARD, LATER_ROUND, BEFORE_THE_STEP, READ, UPDATE, VALIDATION, FAULT_COUNT
} fault;
typedef struct faulty {
  fault what;
  luna_status begun[HUB_RANKS][STEPS], status[HUB_RANKS][STEPS];
  double loss[HUB_RANKS];            /* of the first step */
  uint64_t hash[HUB_RANKS], step[HUB_RANKS];
  char error[HUB_RANKS][STEPS][320], begin_error[HUB_RANKS][STEPS][320];
} faulty;
/* of rank 1 alone: its memory ends, its device copies nothing to the host, or it updates nothing */
static bool memory_ends, reads_fail, updates_fail;
static void *ending_allocate(void *user, size_t bytes) { return memory_ends ? NULL : far_allocate(user, bytes); }
static luna_status failing_copy(luna_ctx *ctx, void *to, const void *from, size_t bytes, int kind) {
  return reads_fail && kind == 2 ? LUNA_DEVICE_FAILED : luna_cpu_backend()->copy(ctx, to, from, bytes, kind);
}
static luna_status failing_update(luna_ctx *ctx, const luna_rule *rule, const luna_update *parts,
                                  const luna_update *table, int64_t count) {
  return updates_fail ? LUNA_DEVICE_FAILED : luna_cpu_backend()->update(ctx, rule, parts, table, count);
}
/* a step of the rank in which `what` fails, or FAULT_COUNT: nothing */
static void faulty_step(faulty *f, fault what, int step, luna_ranks *ranks, const model *net, const run *r) {
  const int rank = ranks->collective.rank;
  luna_ctx *ctx = ranks->ctx;
  data d = data_of(r, step, 2 * rank, 2, 12, 1);
  for (int round = 0; round < (f->what == LATER_ROUND && step == 0 ? 2 : 1); round++) {
    f->begun[rank][step] = f->what == VALIDATION && step == 0 ? luna_ranks_begin_inference(ranks, &d.input, NULL) :
                           luna_ranks_begin_step(ranks, &d.input, NULL);
    snprintf(f->begin_error[rank][step], sizeof f->begin_error[rank][step], "%s", luna_error(ctx));
    if (f->what == SKIPPED && step == 0) return data_free(&d);
    if (what == FORWARD || what == VALIDATION) memory_ends = true;
    luna_tensor *loss = what == NULL_LOSS ? NULL : model_loss(net, r, &d);
    const int64_t counted = luna_counted(loss);
    if (what == BACKWARD) memory_ends = true;
    if (what == LATER_ROUND && round == 1) reads_fail = true;
    const double value = f->what == VALIDATION && step == 0 ? luna_ranks_loss(ranks, loss, counted) :
                         luna_ranks_backward(ranks, loss, counted);
    if (step == 0) f->loss[rank] = value;
  }
  if (what == BEFORE_THE_STEP) luna_fail(ctx, LUNA_UNSUPPORTED, "something of the program's own");
  if (what == READ) reads_fail = true;
  if (what == UPDATE) updates_fail = true;
  f->status[rank][step] = luna_ranks_step(ranks);
  snprintf(f->error[rank][step], sizeof f->error[rank][step], "%s", luna_error(ctx));
  if (rank == 1) memory_ends = reads_fail = updates_fail = false;
  data_free(&d);
}
static void faulty_main(void *user, const luna_collective *collective) {
  faulty *f = (faulty *)user;
  const int rank = collective->rank;
  luna_backend far = *luna_cpu_backend();
  run r = run_of("failures", LM);
  model net = {0};
  luna_ranks ranks;
  luna_options o = { .threads = 1, .seed = 5 };
  far.allocate = far_allocate, far.release = far_release;
  if (rank == 1) far.copy = failing_copy, far.update = failing_update;
  if (f->what == LATER_ROUND || f->what == READ || f->what == UPDATE) o.backend = &far;
  else o.allocator = (luna_allocator){ rank == 1 ? ending_allocate : far_allocate, far_release, NULL };
  luna_ctx *ctx = luna_open(&o);
  luna_params *params = luna_params_open(ctx);
  set_dropout(&r.lm.layer);
  model_init(&net, params, &r);
  luna_optimizer *sgd = luna_sgd(params, &(luna_optimizer_config){ .lr = 0.05f, .momentum = 0.5f });
  rank_check(luna_ranks_open(&ranks, params, sgd, collective) == LUNA_OK, ctx, "open");
  for (int step = f->what == ABSENT; step < STEPS; step++)
    faulty_step(f, rank == 1 && step == 0 ? f->what : FAULT_COUNT, step, &ranks, &net, &r);
  luna_begin_inference(ctx);
  for (int64_t i = 0; i < luna_params_tensor_count(params); i++) {
    const luna_tensor *t = luna_params_at(params, i, NULL);
    float *values = common_floats(luna_count(t));
    luna_read(t, values);
    for (int64_t j = 0; j < luna_count(t); j++) {
      uint32_t bits;
      memcpy(&bits, values + j, 4);
      f->hash[rank] = common_hash(f->hash[rank], bits);
    }
    free(values);
  }
  f->step[rank] = luna_backend_state(ctx)->step;
  luna_ranks_close(&ranks);
  luna_close(ctx);
}
/* All ranks fail with the one that does, at once or, where only the step's end fails, at the next begin. Afterwards
   they go on as if the step had not been, if their parameters are still alike. */
static void ranks_fail(void) {
  static const char *const names[] = { "", "", "forward", "no loss", "backward", "the second loss", "before the step",
                                       "reading gradients", "update", "validation" };
  uint64_t hash[2];
  for (int what = 0; what < FAULT_COUNT; what++) {
    faulty f = { .what = (fault)what };
    hub h;
    hub_open(&h, 3);
    hub_run(&h, faulty_main, &f);
    CHECK(!h.mismatch && !h.failed, "%s: calls of other sizes", names[what]);
    hub_close(&h);
    if (what <= ABSENT) hash[what] = f.hash[0];
    for (int i = 0; i < 3; i++) {
      const bool end = what == READ || what == UPDATE, whole = what != BEFORE_THE_STEP && !end;
      CHECK(f.step[i] == f.step[0], "%s: rank %d counts %d steps, rank 0 %d", names[what], i, (int)f.step[i],
            (int)f.step[0]);
      if (what <= ABSENT) continue;
      CHECK((f.status[i][0] != LUNA_OK) == (!end || i == 1), "%s, rank %d: %d, %s", names[what], i,
            (int)f.status[i][0], f.error[i][0]);
      CHECK(isnan(f.loss[i]) == whole, "%s, rank %d: loss %g", names[what], i, f.loss[i]);
      CHECK(end || i == 1 || strstr(f.error[i][0], "has failed in this step"), "%s, rank %d: %s", names[what], i,
            f.error[i][0]);
      if (end) {
        CHECK(f.begun[i][1] == LUNA_MISMATCH && strstr(f.begin_error[i][1], "rank 1 has failed at the end of the step "
              "before: the device failed"), "%s, rank %d: %s", names[what], i, f.begin_error[i][1]);
        CHECK(f.status[i][1] != LUNA_OK && f.status[i][2] == LUNA_MISMATCH && strstr(f.error[i][2], what == READ ?
              "number of optimiser steps" : "value of some parameter"), "%s, rank %d: %s", names[what], i,
              f.error[i][2]);
        continue;
      }
      CHECK(f.status[i][1] == LUNA_OK && f.status[i][2] == LUNA_OK, "%s, rank %d afterwards: %s, %s", names[what], i,
            f.error[i][1], f.error[i][2]);
      CHECK(f.hash[i] == f.hash[0], "%s: rank %d has other parameters than rank 0", names[what], i);
      if (what == BACKWARD) CHECK(f.hash[i] == hash[SKIPPED], "after a failed luna_backward: other parameters");
      if (what == FORWARD || what == NULL_LOSS || what == VALIDATION)
        CHECK(f.hash[i] == hash[ABSENT], "%s: other parameters", names[what]);
    }
  }
}
static void options(void) {
  luna_collective c = { 0, 1, hub_reduce, hub_gather, NULL };
  luna_options o = { .threads = 1 };
  luna_ctx *ctx = luna_open(&o);
  luna_params *params = luna_params_open(ctx);
  luna_ranks ranks;
  const luna_input none = { 0 };
  /* one rank calls nothing: its user is null */
  CHECK(luna_ranks_open(&ranks, params, NULL, &c) == LUNA_OK && luna_ranks_begin_step(&ranks, &none, NULL) == LUNA_OK,
        "%s", luna_error(ctx));
  luna_ranks_close(&ranks);
  CHECK(luna_ranks_open(&ranks, params, NULL, NULL) == LUNA_OK, "no collective: %s", luna_error(ctx));
  luna_ranks_close(&ranks);
  for (int i = 0; i < 5; i++) {
    luna_collective bad = c;
    bad.ranks = 2;
    luna_begin_inference(ctx);       /* without the sentence before */
    if (i == 0) bad.rank = 2;
    if (i == 1) bad.rank = -1;
    if (i == 2) bad.ranks = (1 << 20) + 1;
    if (i == 3) bad.all_reduce = NULL;
    if (i == 4) bad.all_gather = NULL;
    CHECK(luna_ranks_open(&ranks, params, NULL, &bad) == LUNA_BAD_ARGUMENT &&
          strstr(luna_error(ctx), i < 3 ? "rank outside 0..ranks - 1" : "lacks all_reduce or all_gather"), "%d: %s", i,
          luna_error(ctx));
    CHECK(luna_ranks_begin_step(&ranks, &none, NULL) == LUNA_BAD_ARGUMENT &&
          strstr(luna_error(ctx), "luna_ranks_open"), "%d, a step: %s", i, luna_error(ctx));
    luna_ranks_close(&ranks);
  }
  CHECK(luna_ranks_open(&ranks, NULL, NULL, &c) == LUNA_BAD_ARGUMENT, "no parameters");
  c.ranks = 2;
  luna_begin_inference(ctx);
  no_memory = true;
  CHECK(luna_ranks_open(&ranks, params, NULL, &c) == LUNA_OUT_OF_MEMORY, "without memory: %s", luna_error(ctx));
  no_memory = false;
  for (int again = 0; again < 2; again++) {
    const char *words = again ? "luna_ranks_open has failed" : "no memory for a bucket";
    CHECK(luna_ranks_begin_step(&ranks, &none, NULL) == LUNA_OUT_OF_MEMORY && strstr(luna_error(ctx), words), "%s: %s",
          words, luna_error(ctx));
    CHECK(isnan(luna_ranks_backward(&ranks, NULL, 0)) && luna_ranks_step(&ranks) == LUNA_OUT_OF_MEMORY, "a step: %s",
          luna_error(ctx));
    luna_begin_inference(ctx);       /* without the sentence before */
  }
  luna_ranks_close(&ranks);
  CHECK(luna_ranks_begin_step(&ranks, &none, NULL) == LUNA_BAD_ARGUMENT && isnan(luna_ranks_loss(&ranks, NULL, 0)) &&
        isnan(luna_ranks_backward(&ranks, NULL, 0)) && luna_ranks_step(&ranks) == LUNA_BAD_ARGUMENT, "closed");
  luna_close(ctx);
}

/* ---- models' own tensors, inference, checkpoints, memory ---- */
typedef struct part_test {
  int64_t measured[HUB_RANKS];
} part_test;
/* a stream, and a context without a collective that shares the parameters, are a rank's own: no other one takes part */
static void alone_main(void *user, const luna_collective *collective) {
  run r = run_of("alone", LM);
  luna_options o = { .threads = 1 };
  luna_ctx *ctx = luna_open(&o), *other = luna_open(&o);
  luna_params *params = luna_params_open(ctx);
  model net = {0}, same = {0};
  (void)user;
  model_init(&net, params, &r);
  if (collective->rank == 0) {
    data d = data_of(&r, 0, 0, 1, 12, 1);
    model_init(&same, luna_params_share(other, params), &r);
    luna_stream *stream = luna_stream_open(&net.lm, NULL);
    float *logits = common_floats(VOCAB), *all = common_floats(12 * VOCAB);
    luna_begin_inference(other);
    rank_check(luna_read(luna_lm_forward(&same.lm, &d.input), all) == LUNA_OK, other, "inference");
    for (int i = 0; i < 12; i++) {
      const float *y = luna_stream_step(stream, d.tokens + i);
      if (y) memcpy(logits, y, VOCAB * sizeof *logits);
    }
    test_close("a stream of one rank", logits, all + 11 * VOCAB, VOCAB, 1e-5);
    luna_stream_close(stream);
    data_free(&d);
    free(logits), free(all);
  }
  luna_close(other);
  luna_close(ctx);
}
static void alone(void) {
  hub h;
  hub_open(&h, 2);
  hub_run(&h, alone_main, NULL);
  CHECK(h.rank[0].gathers + h.rank[0].reduces == 0, "one rank alone has called the collective");
  hub_close(&h);
}

/* the first half of a run is saved by 2 ranks; the second half runs on any number */
enum { CURVE = TEST_QUICK ? 20 : 150 };
typedef struct resumed {
  bool save;
  int steps;
  char bytes[1 << 18];
  size_t size;
  double loss[CURVE];
} resumed;
static bool resumed_write(void *user, const void *bytes, size_t size) {
  resumed *r = (resumed *)user;
  if (r->size + size > sizeof r->bytes) return false;
  memcpy(r->bytes + r->size, bytes, size);
  r->size += size;
  return true;
}
static void resumed_main(void *user, const luna_collective *collective) {
  resumed *s = (resumed *)user;
  const int rank = collective ? collective->rank : 0, ranks = collective ? collective->ranks : 1;
  const int64_t first = cut_at(rank, ranks, 4), own = cut_at(rank + 1, ranks, 4) - first;
  run r = run_of("resumed", LM);
  luna_options o = { .threads = 1, .seed = 3 };
  luna_ctx *ctx = luna_open(&o);
  luna_params *params = luna_params_open(ctx);
  model net = {0};
  set_dropout(&r.lm.layer);
  model_init(&net, params, &r);
  luna_optimizer *adam = luna_adamw(params, &(luna_optimizer_config){ .lr = 0.01f, .clip = 1 });
  if (!s->save) rank_check(luna_load_training(adam, luna_bytes(s->bytes, s->size)) == LUNA_OK, ctx, "load");
  luna_ranks shared;
  luna_ranks_open(&shared, params, adam, collective);
  for (int step = 0; step < s->steps; step++) {
    data d = data_of(&r, step + (s->save ? 0 : 4), first, own, 12, 1);
    const double value = step_loss(&shared, &net, &r, &d);
    rank_check(luna_ranks_step(&shared) == LUNA_OK, ctx, "resumed");
    if (rank == 0) s->loss[step] = value;
    data_free(&d);
  }
  if (rank == 0 && s->save) {
    luna_io io = { NULL, resumed_write, s, 0 };
    rank_check(luna_save_training(adam, luna_callbacks(&io)) == LUNA_OK, ctx, "save");
  }
  luna_ranks_close(&shared);
  luna_close(ctx);
}
static void checkpoints(void) {
  resumed *first = (resumed *)common_alloc(sizeof *first), *other = (resumed *)common_alloc(sizeof *other);
  hub h;
  memset(first, 0, sizeof *first);
  first->save = true;
  first->steps = 4;
  hub_open(&h, 2);
  hub_run(&h, resumed_main, first);
  hub_close(&h);
  first->save = false;
  resumed_main(first, NULL);
  for (int ranks = 1; ranks <= 4; ranks++) {
    *other = *first;
    hub_open(&h, ranks);
    hub_run(&h, resumed_main, other);
    hub_close(&h);
    for (int i = 0; i < 4; i++)
      CHECK(fabs(other->loss[i] / first->loss[i] - 1) < 2e-6, "resumed on %d ranks, step %d: %.9g, not %.9g", ranks, i,
            other->loss[i], first->loss[i]);
  }
  free(first), free(other);
}

/* many steps: rounding stays rounding */
static void curves(void) {
  resumed *one = (resumed *)common_alloc(sizeof *one), *many = (resumed *)common_alloc(sizeof *many);
  hub h;
  one->save = many->save = true;
  one->steps = many->steps = CURVE;
  resumed_main(one, NULL);
  CHECK(one->loss[CURVE - 1] < one->loss[0], "the loss rises from %.4f to %.4f", one->loss[0], one->loss[CURVE - 1]);
  double worst = 0;
  many->size = 0;
  hub_open(&h, 3);
  hub_run(&h, resumed_main, many);
  hub_close(&h);
  for (int i = 0; i < CURVE; i++) worst = fmax(worst, fabs(many->loss[i] / one->loss[i] - 1));
  CHECK(worst < 1e-4, "in %d steps losses differ by %.2g", CURVE, worst);
  free(one), free(many);
}

/* a block of the bytes that a measuring context counted, which calls nothing of the collective */
static void measured_main(void *user, const luna_collective *collective) {
  part_test *t = (part_test *)user;
  const int rank = collective->rank;
  run r = run_of("measured", LM);
  void *block = NULL;
  r.lm.layer.convolution = 3;
  for (int pass = 0; pass < 2; pass++) {
    luna_options o = { .threads = 1, .measure = pass == 0, .block = block, .block_size = (size_t)t->measured[rank] };
    luna_ctx *ctx = luna_open(&o);
    luna_params *params = luna_params_open(ctx);
    model net = {0};
    model_init(&net, params, &r);
    luna_optimizer *adam = luna_adam(params, NULL);
    luna_ranks ranks;
    luna_ranks_open(&ranks, params, adam, collective);
    for (int step = 0; step < 2; step++) {
      data d = data_of(&r, step, 2 * rank, 2, 6, 1);
      step_loss(&ranks, &net, &r, &d);
      rank_check(luna_ranks_step(&ranks) == LUNA_OK, ctx, "measured");
      data_free(&d);
    }
    const int64_t peak = (int64_t)luna_memory(ctx).peak;
    if (pass) rank_check(peak <= t->measured[rank], ctx, "more bytes than measured");
    t->measured[rank] = peak;
    luna_ranks_close(&ranks);
    luna_close(ctx);
    if (pass == 0) block = common_alloc((size_t)peak);
  }
  free(block);
}
static void measured(void) {
  part_test t = {0};
  hub h;
  hub_open(&h, 2);
  hub_run(&h, measured_main, &t);
  hub_close(&h);
}

int main(void) {
  options();
  differ();
  hooks_fail();
  ranks_fail();
  alone();
  checkpoints();
  curves();
  measured();
  data_parallel();
  sent();
  return test_report("collective");
}
