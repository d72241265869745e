/* Several ranks, as threads of this process (collective.h): R ranks give the losses and gradients of one rank, data and
   sequence parallel, uneven and empty parts, with lengths and dropout; the same bits in every run and for any threads;
   what a layer sends; ranks that differ, hooks that fail. */
#include "test.h"
#define LUNA_IMPLEMENTATION
#include "luna.h"
#include "common.h"
#include "collective.h"

enum { BATCH = 5, LENGTH = 37, TARGET = 19, VOCAB = 29, CLASSES = 3, STEPS = 3, FEATURES = 4, SLOTS = 4 };
typedef enum kind { LM, CLASSIFIER, PER_STEP, MASKED, SEQ2SEQ } kind;

typedef struct run {
  const char *name;
  kind kind;
  luna_lm_config lm;
  luna_encoder_config encoder;
  luna_pooling pooling;
  bool features, with_lengths, value;   /* value: mean squared error */
  luna_form form;
  int threads;
  luna_isa isa;
  /* parts [ranks] of the batch or of the rows */
  int64_t parts[HUB_RANKS];
  /* results */
  double loss[STEPS];
  float *gradient, *parameters;      /* of the first step, summed over ranks; after the last, of rank 0 */
  int64_t count;
  char error[HUB_RANKS][320];
  float *ranks_gradient[HUB_RANKS];
  double ranks_loss[HUB_RANKS][STEPS];
  uint64_t ranks_hash[HUB_RANKS];    /* of the parameters after the last step */
  int64_t bytes[HUB_RANKS], peak[HUB_RANKS]; /* of the last step */
} run;

/* the data of all ranks: the same numbers for any cut */
static int32_t token(int step, int64_t b, int64_t i, int32_t vocab) {
  return (int32_t)(common_hash(40 + (uint64_t)step, (uint64_t)(b * 1000 + i)) % (uint64_t)vocab);
}
static int32_t length_of(int64_t b) { return (int32_t)(b == 1 ? 3 : b == 3 ? LENGTH : 9 + 7 * b % LENGTH); }

typedef struct data {
  int32_t *tokens, *labels, *lengths, *target, *target_labels, *row_labels;
  float *features, *values;
  luna_input input, output;
} data;
/* sequences first .. first + batch, rows of them from row .. row + n */
static data data_of(const run *r, int step, int64_t first, int64_t batch, int64_t row, int64_t n, int64_t target_row,
                    int64_t m) {
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
    d.lengths[b] = length_of(first + b);
    d.row_labels[b] = token(step + 500, first + b, 0, CLASSES);
    for (int64_t i = 0; i < n; i++) {
      const bool real = !r->with_lengths || row + i < d.lengths[b];
      d.tokens[b * n + i] = token(step, first + b, row + i, VOCAB);
      d.labels[b * n + i] = !real || token(step + 100, first + b, row + i, 7) == 0 ? -1 :
                            token(step, first + b, row + i + 1, r->kind == PER_STEP ? CLASSES : VOCAB);
      d.values[b * n + i] = (float)common_number(70, (uint64_t)((first + b) * 1000 + row + i));
      for (int64_t f = 0; f < FEATURES; f++)
        d.features[(b * n + i) * FEATURES + f] = (float)common_number(60 + (uint64_t)step,
                                                                      (uint64_t)(((first + b) * 1000 + row + i) * 8 + f));
    }
    for (int64_t i = 0; i < m; i++) {
      d.target[b * m + i] = token(step + 200, first + b, target_row + i, VOCAB);
      d.target_labels[b * m + i] = token(step + 200, first + b, target_row + i + 1, VOCAB);
    }
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
  lm.vocab = masked.vocab = seq2seq.vocab = classifier.vocab = VOCAB;
  lm.features = classifier.features = masked.features = seq2seq.features = r->features ? FEATURES : 0;
  lm.outputs = r->features ? VOCAB : 0;
  classifier.encoder = masked.encoder = seq2seq.encoder = r->encoder;
  classifier.classes = r->value ? 1 : CLASSES;
  classifier.pooling = r->pooling;
  classifier.per_step = r->kind == PER_STEP;
  seq2seq.target_vocab = VOCAB;
  switch (r->kind) {
    case LM: return luna_lm_init(&m->lm, params, &lm);
    case MASKED: return luna_masked_lm_init(&m->masked, params, &masked);
    case SEQ2SEQ: return luna_seq2seq_init(&m->seq2seq, params, &seq2seq);
    default: return luna_classifier_init(&m->classifier, params, &classifier);
  }
}
static luna_tensor *model_loss(const model *m, const run *r, const data *d) {
  switch (r->kind) {
    case LM: return luna_lm_loss(&m->lm, &d->input, d->labels);
    case MASKED: return luna_masked_lm_loss(&m->masked, &d->input, d->labels);
    case SEQ2SEQ: return luna_cross_entropy(luna_seq2seq_forward(&m->seq2seq, &d->input, &d->output), d->target_labels);
    case PER_STEP: if (!r->value) return luna_cross_entropy(luna_classifier_forward(&m->classifier, &d->input), d->labels);
                   return luna_mse(luna_classifier_forward(&m->classifier, &d->input), d->values);
    default: return luna_cross_entropy(luna_classifier_forward(&m->classifier, &d->input), d->row_labels);
  }
}

static void rank_main(void *user, const luna_collective *collective) {
  run *r = (run *)user;
  const bool cut = collective != NULL;
  const int rank = cut ? collective->rank : 0;
  const bool rows = cut && collective->mode == LUNA_PARALLEL_SEQUENCE, batches = cut && !rows;
  hub *h = cut ? ((hub_rank *)collective->user)->h : NULL;
  int64_t first = 0, count = 0, target_first = 0, m = TARGET;
  luna_options options = { .threads = r->threads ? r->threads : 1, .seed = 5, .collective = collective, .form = r->form,
                           .isa = r->isa };
  luna_ctx *ctx = luna_open(&options);
  luna_params *params = luna_params_open(ctx);
  model net = {0};
  model_init(&net, params, r);
  luna_optimizer *sgd = luna_sgd(params, &(luna_sgd_config){ .lr = 0.05f, .momentum = 0.5f, .clip = 2 });
  for (int i = 0; cut && i < rank; i++) first += r->parts[i];
  if (rows) target_first = TARGET * rank / collective->ranks, m = TARGET * (rank + 1) / collective->ranks - target_first;
  const int64_t n = rows ? r->parts[rank] : LENGTH, batch = batches ? r->parts[rank] : BATCH;
  r->count = count = luna_params_element_count(params);
  r->ranks_gradient[rank] = common_floats(count);
  float *values = common_floats(count);
  for (int step = 0; step < STEPS; step++) {
    data d = data_of(r, step, batches ? first : 0, batch, rows ? first : 0, n, target_first, m);
    const int64_t before = cut ? ((hub_rank *)collective->user)->bytes : 0;
    luna_begin_step(ctx);
    luna_tensor *loss = model_loss(&net, r, &d);
    luna_backward(loss);
    float *at = r->ranks_gradient[rank];
    for (int64_t i = 0; step == 0 && i < luna_params_tensor_count(params); i++) {
      const luna_tensor *t = luna_params_at(params, i, NULL);
      if (t->has_grad) luna_read_grad(t, at);
      at += luna_count(t);
    }
    r->ranks_loss[rank][step] = loss ? (double)luna_item(loss) : NAN;
    const bool good = luna_optimizer_step(sgd) == LUNA_OK;
    if (!good || luna_ctx_status(ctx) != LUNA_OK) snprintf(r->error[rank], sizeof r->error[rank], "%s", luna_error(ctx));
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
  r->peak[rank] = (int64_t)luna_memory(ctx).peak;
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
static run run_on(const run *like, int ranks, luna_parallelism mode, const int64_t *parts) {
  run r = *like;
  hub h;
  if (parts) memcpy(r.parts, parts, (size_t)ranks * sizeof *parts);
  if (ranks == 0) rank_main(&r, NULL);
  else {
    hub_open(&h, ranks, mode);
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
static const int64_t even_rows[5][4] = { {0}, {37}, {18, 19}, {12, 12, 13}, {9, 9, 9, 10} };
static const int64_t odd_rows[5][4] = { {0}, {37}, {0, 37}, {30, 0, 7}, {1, 34, 0, 2} };

static void check(const run *like, luna_parallelism mode) {
  const bool rows = mode == LUNA_PARALLEL_SEQUENCE;
  run one = run_on(like, 0, mode, NULL);
  for (int ranks = 1; ranks <= (TEST_QUICK ? 2 : 4); ranks++)
    for (int odd = 0; odd < 2; odd++) {
      const int64_t *parts = rows ? odd ? odd_rows[ranks] : even_rows[ranks] : odd ? odd_batch[ranks] : even_batch[ranks];
      run many = run_on(like, ranks, mode, parts);
      run_compare(&one, &many, ranks, 2e-6, 2e-5);
      if (ranks == 3) {
        run threaded = *like;
        threaded.threads = 3;
        run again = run_on(like, ranks, mode, parts), other = run_on(&threaded, ranks, mode, parts);
        run_same(&many, &again, ranks, "in another run");
        run_same(&many, &other, ranks, "with 3 threads");
        run_free(&again), run_free(&other);
      }
      run_free(&many);
    }
  run_free(&one);
}

static run run_of(const char *name, kind k) {
  run r = {0};
  r.name = name, r.kind = k;
  r.lm = (luna_lm_config){ .layers = 2, .dim = 16, .heads = 2, .ffn = 24, .memory = SLOTS };
  r.encoder = (luna_encoder_config){ .layers = 2, .dim = 16, .heads = 2, .ffn = 24, .memory = SLOTS, .max_length = 64 };
  return r;
}
static void set_dropout(luna_layer_config *c) { c->dropout = 0.1f, c->attention_dropout = 0.2f, c->activation_dropout = 0.15f; }

static void data_parallel(void) {
  run r = run_of("data, lm", LM);
  r.lm.layer.convolution = 3;
  check(&r, LUNA_PARALLEL_DATA);
  r = run_of("data, lm, dropout", LM);
  set_dropout(&r.lm.layer);
  r.lm.positions = LUNA_POSITIONS_SINUSOIDAL;
  check(&r, LUNA_PARALLEL_DATA);
  r = run_of("data, classifier", CLASSIFIER);
  r.with_lengths = true;
  check(&r, LUNA_PARALLEL_DATA);
  r.name = "data, classifier, dropout";
  set_dropout(&r.encoder.layer);
  check(&r, LUNA_PARALLEL_DATA);
  r.name = "data, classifier, dropout, softmax attention";
  r.encoder.layer.attention = LUNA_ATTENTION_SOFTMAX;
  check(&r, LUNA_PARALLEL_DATA);
  r = run_of("data, values of each step", PER_STEP);
  r.features = r.value = r.with_lengths = true;
  check(&r, LUNA_PARALLEL_DATA);
  r = run_of("data, masked lm", MASKED);
  r.with_lengths = true;
  r.encoder.own_memory = true;
  set_dropout(&r.encoder.layer);
  check(&r, LUNA_PARALLEL_DATA);
  r = run_of("data, seq2seq", SEQ2SEQ);
  r.with_lengths = true;
  set_dropout(&r.encoder.layer);
  check(&r, LUNA_PARALLEL_DATA);
}

static void sequence_parallel(void) {
  run r = run_of("rows, classifier", CLASSIFIER);
  check(&r, LUNA_PARALLEL_SEQUENCE);
  r.name = "rows, classifier, unfolded";
  r.form = LUNA_FORM_UNFOLDED;
  check(&r, LUNA_PARALLEL_SEQUENCE);
  r.name = "rows, classifier, folded, lengths";
  r.form = LUNA_FORM_FOLDED;
  r.with_lengths = true;
  check(&r, LUNA_PARALLEL_SEQUENCE);
  r.name = "rows, classifier, CLS, pre-norm, learned positions";
  r.pooling = LUNA_POOLING_CLS;
  r.encoder.layer.pre_norm = true;
  r.encoder.positions = LUNA_POSITIONS_LEARNED;
  check(&r, LUNA_PARALLEL_SEQUENCE);
  r.name = "rows, classifier, mean, own memory, dropout";
  r.pooling = LUNA_POOLING_MEAN;
  r.encoder.own_memory = true;
  set_dropout(&r.encoder.layer);
  check(&r, LUNA_PARALLEL_SEQUENCE);
  r = run_of("rows, masked lm, dropout", MASKED);
  r.form = LUNA_FORM_FOLDED;
  set_dropout(&r.encoder.layer);
  check(&r, LUNA_PARALLEL_SEQUENCE);
  r = run_of("rows, values of each step, recomputed layers", PER_STEP);
  r.features = r.value = r.with_lengths = true;
  r.encoder.layer.recompute = LUNA_RECOMPUTE_LAYER;
  check(&r, LUNA_PARALLEL_SEQUENCE);
  r = run_of("rows, classifier, linear attention", CLASSIFIER);
  r.encoder.layer.attention = LUNA_ATTENTION_LINEAR;
  r.with_lengths = true;
  check(&r, LUNA_PARALLEL_SEQUENCE);

  r = run_of("rows, lm", LM);
  check(&r, LUNA_PARALLEL_SEQUENCE);
  r.name = "rows, lm, convolution";
  r.lm.layer.convolution = 6;
  r.lm.positions = LUNA_POSITIONS_LEARNED;
  check(&r, LUNA_PARALLEL_SEQUENCE);
  r.name = "rows, lm, convolution, dropout, recomputed layers";
  set_dropout(&r.lm.layer);
  r.lm.layer.recompute = LUNA_RECOMPUTE_LAYER;
  check(&r, LUNA_PARALLEL_SEQUENCE);
  r = run_of("rows, lm of features, recomputed layers", LM);
  r.features = r.with_lengths = true;
  r.lm.layer.recompute = LUNA_RECOMPUTE_LAYER;
  check(&r, LUNA_PARALLEL_SEQUENCE);
  r = run_of("rows, lm, linear attention", LM);
  r.lm.layer.attention = LUNA_ATTENTION_LINEAR;
  check(&r, LUNA_PARALLEL_SEQUENCE);
  r = run_of("rows, seq2seq, lengths, dropout", SEQ2SEQ);
  r.with_lengths = true;
  set_dropout(&r.encoder.layer);
  check(&r, LUNA_PARALLEL_SEQUENCE);
}

int main(void) {
  data_parallel();
  sequence_parallel();
  return test_report("collective");
}
