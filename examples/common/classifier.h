/* classifier.h: samples for the examples that classify: batches of similar length, and how many a model gets right.
   Included after example.h.

   A program says in a `struct samples` what there is, and for a sample's number writes its tokens and returns its
   label:
     batch_open(&s)                    memory for batches: 0, or 2 after a sentence. batch_close() at the end
     batch_random(&s, step)            the batch of a training step: from --seed and the step alone
     batch_at(&s, first, count, at)    the batch at `at` of samples first .. first + count - 1
     train_classifier(ctx, params, &s) a model of the flags, trained and saved: 0, or 2 after a sentence; it opens and
                                       closes the memory itself, as eval_classifier does */
#include "../luna_ops.h"
#include "attention_choice.h"
#include "calibration.h"

#define QUICK 500                    /* samples that validations during a training look at, at most */
/* batches fetched at once and sorted by length, so that little of a batch is padding */
#define POOL 16

typedef struct samples {
  const char *title;
  int64_t vocab, classes, longest;   /* tokens 0 .. vocab - 1, at most `longest` in a sample; labels 0 .. classes - 1 */
  int64_t parts;                     /* sequences of a sample, which follow one another in a batch; 0 = 1 */
  int64_t training, held;            /* samples to learn from; samples kept for validation, which come after them */
  const int64_t *counts;             /* how many of each class there are to learn from, or null: unknown */
  int32_t (*fetch)(int64_t index, int32_t *tokens, int32_t *lengths); /* writes sample `index`, tokens [parts,longest],
                                        lengths [parts]; returns its label */
  luna_tensor *(*logits)(const luna_input *input); /* of a model that is no luna_classifier: [samples,classes] */
  int (*chosen)(luna_params *params); /* or null: called when the model is chosen and its temperature set, to say more
                                        and keep what else there is to choose; in eval without params: to say more
                                        alone. Returns 0, or 2 after a sentence */
} samples;

/* input: parts sequences of each of count samples. Of the pool, until it is filled again */
typedef struct batch { luna_input input; int64_t count; const int32_t *labels; } batch;

static struct pool {                 /* POOL batches of samples */
  int64_t first, count;              /* which samples lie here */
  int32_t *tokens, *batch;           /* [rows, parts, longest]; those of one batch [set.batch, parts, its longest] */
  int32_t *lengths, *sorted_lengths; /* [rows, parts] */
  int64_t n;                         /* rows of the last batch's sequences, on all ranks */
  int32_t *labels, *sizes, *order, *sorted_labels; /* sizes: of a sample's longest part; order: samples by size */
} pool;

TOOL int64_t parts_of(const samples *s) { return s->parts ? s->parts : 1; }

TOOL int batch_open(const samples *s) {
  const size_t rows = POOL * (size_t)set.batch, parts = (size_t)parts_of(s), sample = parts * (size_t)s->longest;
  pool = (struct pool){ .tokens = (int32_t *)calloc(rows * (POOL + 1) / POOL, sample * sizeof(int32_t)),
                        .lengths = (int32_t *)calloc(rows, (2 * parts + 4) * sizeof(int32_t)) };
  if (!pool.tokens || !pool.lengths) return fail("out of memory");
  pool.batch = pool.tokens + rows * sample;
  pool.sorted_lengths = pool.lengths + rows * parts, pool.labels = pool.sorted_lengths + rows * parts;
  pool.sizes = pool.labels + rows, pool.order = pool.sizes + rows, pool.sorted_labels = pool.order + rows;
  return 0;
}
TOOL void batch_close(void) { free(pool.tokens), free(pool.lengths); }

TOOL int by_length(const void *a, const void *b) {
  int32_t i = *(const int32_t *)a, j = *(const int32_t *)b, more = pool.sizes[i] - pool.sizes[j];
  return more ? more : i - j;
}

/* Fetches `count` samples from `first` on, or, where it is negative, random ones of the training's. */
TOOL void pool_fill(const samples *s, int64_t first, int64_t count) {
  if (pool.count == count && pool.first == first) return;  /* they are here */
  pool.first = first, pool.count = count;
  const int64_t parts = parts_of(s);
  for (int64_t i = 0; i < count; i++) {
    int64_t index = first < 0 ? (int64_t)(draw(0, -first, i) % (uint64_t)s->training) : first + i;
    int32_t *lengths = pool.lengths + i * parts;
    pool.labels[i] = s->fetch(index, pool.tokens + i * parts * s->longest, lengths);
    pool.order[i] = (int32_t)i, pool.sizes[i] = 0;
    for (int64_t p = 0; p < parts; p++) if (lengths[p] > pool.sizes[i]) pool.sizes[i] = lengths[p];
  }
  qsort(pool.order, (size_t)count, sizeof(int32_t), by_length);
  for (int64_t i = 0; i < count; i++) {
    memcpy(pool.sorted_lengths + i * parts, pool.lengths + pool.order[i] * parts, (size_t)parts * sizeof(int32_t));
    pool.sorted_labels[i] = pool.labels[pool.order[i]];
  }
}

/* `count` of the pool's samples from `at` on, in the order of their lengths; of them this rank's. */
TOOL batch pool_batch(const samples *s, int64_t at, int64_t count) {
  const int64_t parts = parts_of(s), n = pool.sizes[pool.order[at + count - 1]]; /* the longest is the last */
  const portion own = rank_part(count);
  pool.n = n;
  const int32_t *lengths = pool.sorted_lengths + (at += own.first) * parts;
  for (int64_t i = 0; i < own.count * parts; i++) {
    const int64_t real = lengths[i] < n ? lengths[i] : n;
    const int64_t from = pool.order[at + i / parts] * parts + i % parts;
    memcpy(pool.batch + i * n, pool.tokens + from * s->longest, (size_t)real * sizeof(int32_t));
    memset(pool.batch + i * n + real, 0, (size_t)(n - real) * sizeof(int32_t));
  }
  return (batch){ { pool.batch, lengths, own.count * parts, n, NULL }, own.count, pool.sorted_labels + at };
}

TOOL batch batch_random(const samples *s, int64_t step) {  /* short and long batches by turns */
  pool_fill(s, -1 - step / POOL * POOL, POOL * set.batch);
  return pool_batch(s, (step * 7 + 3) % POOL * set.batch, set.batch);
}

TOOL batch batch_at(const samples *s, int64_t first, int64_t count, int64_t at) {
  int64_t block = at / (POOL * set.batch) * POOL * set.batch, left = count - block, rows = count - at;
  pool_fill(s, first + block, left < POOL * set.batch ? left : POOL * set.batch);
  return pool_batch(s, at - block, rows < set.batch ? rows : set.batch);
}

static calibration looked_at;        /* the logits of the samples that accuracy() looked at, of all ranks */
static float *balance;               /* with --balance the factors of classes in the loss; else null */
static double threshold;             /* the probability from which on the rarest class is the answer; 0: none */
static int32_t rarest;

/* The answer: the likeliest class, or by the threshold. Shares may be in any unit that has their order and sum. */
TOOL int32_t answer_of(const float *shares, int64_t classes) {
  const int32_t left_out = threshold > 0 ? rarest : -1;
  int32_t best = left_out == 0;
  if (threshold > 0 && (double)shares[rarest] >= threshold) return rarest;
  for (int32_t c = 1; c < classes; c++) if (c != left_out && shares[c] > shares[best]) best = c;
  return best;
}
TOOL void shares_of(float *logits, int64_t classes) { /* probabilities instead of logits */
  double most = -HUGE_VAL, sum = 0;
  for (int64_t c = 0; c < classes; c++) most = fmax(most, (double)logits[c]);
  for (int64_t c = 0; c < classes; c++) sum += exp((double)logits[c] - most);
  for (int64_t c = 0; c < classes; c++) logits[c] = (float)(exp((double)logits[c] - most) / sum);
}

/* Adds a batch's logits to `looked_at`: `count` of them are this rank's, of `rows` on all ranks, which get those of the
   others from them. False on failure. */
TOOL bool look_at(const samples *s, const float *logits, const int32_t *labels, int64_t count, int64_t rows) {
  const portion own = rank_part(rows);
  const int64_t each = s->classes + 1;
  for (int64_t i = 0; i < count && own.count == rows; i++)
    calibration_add(&looked_at, logits + i * s->classes, labels[i]);
  if (own.count == rows) return true;
  double *all = (double *)memset(grow(NULL, rows * each, sizeof *all), 0, (size_t)(rows * each) * sizeof *all);
  float *row = (float *)grow(NULL, each, sizeof *row);
  for (int64_t i = 0; i < count * each; i++)
    all[own.first * each + i] = i % each ? (double)logits[i / each * s->classes + i % each - 1] :
        (double)labels[i / each];
  const bool good = ranks.all_reduce(ranks.user, all, rows * each, LUNA_REDUCTION_SUM_F64);
  for (int64_t i = 0; good && i < rows; i++) {
    for (int64_t c = 0; c < s->classes; c++) row[c] = (float)all[i * each + 1 + c];
    calibration_add(&looked_at, row, (int32_t)all[i * each]);
  }
  return free(all), free(row), good;
}
/* The share of right answers among `count` samples from `first` on, and their mean loss; negative on failure. */
TOOL double accuracy(luna_ctx *ctx, const luna_classifier *model, const samples *s, int64_t first, int64_t count,
                     double *loss) {
  float *logits = (float *)grow(NULL, set.batch * s->classes, sizeof(float));
  int64_t right = 0, rows;
  *loss = 0;
  calibration_close(&looked_at), looked_at.classes = s->classes;
  for (int64_t at = 0; at < count; at += set.batch) {
    batch b = batch_at(s, first, count, at);
    rows = count - at < set.batch ? count - at : set.batch;
    if (begin_look(ctx, b.input) != LUNA_OK) return free(logits), -1;
    luna_tensor *out = s->logits ? s->logits(&b.input) : luna_classifier_forward(model, &b.input);
    *loss += loss_over_ranks(luna_cross_entropy(out, b.labels, NULL)) * (double)rows / (double)count;
    if (!isfinite(*loss) || luna_read(out, logits) != LUNA_OK) return free(logits), -1;
    for (int64_t i = 0; balance && i < b.count; i++) unbalance(logits + i * s->classes, balance, s->classes);
    if (!look_at(s, logits, b.labels, b.count, rows)) return free(logits), -1;
    for (int64_t i = 0; i < b.count; i++) {
      float *x = logits + i * s->classes;
      shares_of(x, s->classes);
      right += answer_of(x, s->classes) == b.labels[i];
    }
  }
  free(logits);
  if (balance && looked_at.count) *loss = calibration_loss(&looked_at, 1);
  const double all = rank_total((double)right);
  return isfinite(all) ? all / (double)count : -1;
}

/* Looks how a model does that is being trained, on at most `count` of the samples kept for it; negative on failure.
   `best`, where it is not null, keeps the model if it is the best so far: by average precision, which sees rare classes
   as well as frequent ones. */
TOOL double validate(luna_ctx *ctx, const luna_classifier *model, const samples *s, progress *bar, int64_t count,
                     best_model *best) {
  double loss, since = progress_validates();
  const double share = accuracy(ctx, model, s, s->training, s->held < count ? s->held : count, &loss);
  const double precision = calibration_rank(&looked_at, rarest).precision;
  char format[40];
  snprintf(format, sizeof format, precision == precision ? "validation AP %%.1f%%%%, %.1f%%%% right" :
           "validation %%.1f%%%%", 100 * share);
  progress_validated(bar, since, loss, format, 100 * (precision == precision ? precision : share));
  const double error = precision == precision ? ranking_error(precision, bar->step) : 1 - share;
  if (best && share >= 0 && best_keep(best, model->params, bar->step, error, loss) != LUNA_OK) return -1;
  return share;
}

/* Divides the logits of a model by the temperature that makes its probabilities right for the samples just measured.
   Says what that gains, and what the shares of classes alone would have. Returns 0, or 2 after a sentence. */
TOOL int set_temperature(luna_ctx *ctx, const luna_classifier *model, const samples *s) {
  const double t = calibration_temperature(&looked_at);
  if (looked_at.count == 0) return 0;
  printf("The log loss is %.4f", calibration_loss(&looked_at, 1));
  if (t < 1 || t > 1) printf(", with temperatures of the other half %.4f", calibration_crossed(&looked_at));
  if (s->counts)
    printf("; the class shares of the training data alone have %.4f", calibration_base(&looked_at, s->counts));
  printf(".\n");
  if (t >= 1 && t <= 1) return 0;
  printf("The temperature %.3f is chosen by these samples. It changes their expected calibration error to %.2f%% from "
         "%.2f%%.\n", t,
         100 * calibration_error(&looked_at, t), 100 * calibration_error(&looked_at, 1));
  for (int64_t i = 0; i < looked_at.count * looked_at.classes; i++)
    looked_at.logits[i] = (float)((double)looked_at.logits[i] / t);
  for (int64_t c = 0; balance && c < s->classes; c++) balance[c] = (float)pow((double)balance[c], 1 / t);
  return calibration_apply(model->projection, t) == LUNA_OK ? 0 : failed(ctx);
}
/* What of the rarest class the samples just measured show: how it is ranked, and its threshold for --aim. */
TOOL void say_rarest(const char *name, int64_t size) {
  ranked *list = calibration_ranking(&looked_at, rarest, 1);
  const ranking r = ranking_of(list, looked_at.count);
  aim wanted;
  reached got;
  if (r.precision == r.precision) {
    printf("'"), put_shown(stdout, name, size);
    printf("' is the label of %lld of %lld samples. Its average precision is %.1f%%, the area under its ROC curve "
           "%.1f%%.%s\n",
           (long long)r.is, (long long)looked_at.count, 100 * r.precision, 100 * r.area,
           r.is < FEW ? " With so few samples that is mostly chance." : "");
  }
  if (set.aim && read_aim(set.aim, &wanted) && r.precision == r.precision) {
    threshold = threshold_for(list, looked_at.count, wanted, &got);
    printf("The threshold is %.4f for %s%s. On the same samples it has a precision of %.1f%% and a recall of %.1f%%.\n",
           threshold, set.aim, got.met ? "" : ", which it cannot reach", 100 * got.precision, 100 * got.recall);
  } else if (set.aim) printf("There is no threshold: validation takes samples with and without the rarest class.\n");
  free(list);
}

/* Saves the best model, measures it on all samples kept for that, and draws the loss. Returns 0, or 2 after a
   sentence. */
TOOL int finish_training(luna_ctx *ctx, const luna_classifier *model, const samples *s, progress *bar,
                         best_model *best) {
  const double took = seconds() - bar->start;
  progress_end(bar);
  if (bar->step == 0) return fail("the training was stopped before its first step, so no model was written");
  if (best_end(best, model->params, bar) != LUNA_OK) return failed(ctx);
  if (ranks.rank == 0 && luna_save(model->params, luna_path(set.out)) != LUNA_OK) return failed(ctx);
  if (interrupted) say("The training was stopped at step %lld. Its model is in %s.", (long long)bar->step, set.out);
  const double share = validate(ctx, model, s, bar, s->held, NULL);
  int status = share < 0 ? failed(ctx) : set_temperature(ctx, model, s);
  if (!status && s->chosen) status = s->chosen(model->params);
  calibration_close(&looked_at);
  if (!status && ranks.rank == 0 && luna_save(model->params, luna_path(set.out)) != LUNA_OK) status = failed(ctx);
  if (status) return status;
  say("%s: Training made %lld steps in %.0f s and %.1f MB. Accuracy on %lld held-out samples%s: %.2f%% (loss %.3f)",
      set.out, (long long)bar->step, took, megabytes(ctx), (long long)s->held,
      s->held < LEAST_CALIBRATED ? "" : ", which chose the model and its temperature", 100 * share,
      bar->validation.y[bar->validation.count - 1]);
  return plot(bar, s->title);
}

/* Makes a classifier in `params` and trains it: AdamW, a linear warm-up and a cosine. Returns 0, or 2 after a
   sentence. */
TOOL int train_classifier_on(luna_ctx *ctx, luna_params *params, const samples *s) {
  static progress bar;
  static best_model best;
  luna_classifier model;
  luna_classifier_config config = {
    .vocab = s->vocab, .classes = s->classes, .pooling = (luna_pooling)set.pooling,
    .encoder = {
      .layers = set.layers,
      .positions = (luna_positions)set.positions, .max_length = s->longest,
      .layer = { .dim = set.dim, .heads = set.heads, .memory = set.memory, .ffn = set.ffn,
                 .dropout = (float)set.dropout, .activation = LUNA_ACTIVATION_GELU, .pre_norm = true,
                 .recompute = (luna_recompute_kind)set.recompute }
    }
  };
  choose_attention(&config.encoder.layer);
  if (luna_classifier_init(&model, params, &config) != LUNA_OK) return failed(ctx);
  luna_optimizer *adam = luna_adamw(params, &(luna_optimizer_config){
    .lr = (float)set.lr, .weight_decay = 0.01f, .clip = 1,
    .schedule = { .decay = LUNA_DECAY_COSINE, .warmup = set.steps < 1000 ? set.steps / 10 : 100,
                  .total = set.steps, .floor = 0.05f }
  });
  if (!adam) return failed(ctx);
  if (s->counts) rarest = rarest_of(s->counts, s->classes);
  if (set.balance) balance_of(s->counts, s->classes, balance = (float *)grow(NULL, s->classes, sizeof(float)));
  say("%s: There are %lld classes and %lld samples to validate on. The model has %lld parameters.", s->title,
      (long long)s->classes, (long long)s->held, (long long)luna_params_element_count(params));
  fflush(stdout);

  best_model *const keeps = s->held >= LEAST_CALIBRATED ? &best : NULL; /* of fewer chance would choose */
  bar.last = 1 + (double)s->held / QUICK;
  if (!share_training(model.params, adam)) return failed(ctx);
  progress_start(&bar, 0);
  while (bar.step < set.steps && !interrupted && best_awaited(&best)) {
    if (progress_due(&bar) && validate(ctx, &model, s, &bar, QUICK, keeps) < 0) return failed(ctx);
    batch b = batch_random(s, bar.step);
    begin_training(ctx, b.input);
    luna_tensor *loss = luna_weighted_cross_entropy(luna_classifier_forward(&model, &b.input), b.labels, balance, NULL);
    differentiate(loss, luna_counted(loss));
    if (learn_from(adam) != LUNA_OK) return failed(ctx);
    progress_step(&bar, learnt_loss(loss), (double)(b.input.batch * b.input.n * ranks.ranks));
  }
  const bool last = bar.step > 0 && best_awaited(&best);
  if (last && validate(ctx, &model, s, &bar, QUICK, keeps) < 0) return failed(ctx);
  return finish_training(ctx, &model, s, &bar, &best);
}

TOOL int train_classifier(luna_ctx *ctx, luna_params *params, const samples *s) {
  int status = batch_open(s);
  if (!status) status = train_classifier_on(ctx, params, s);
  return batch_close(), status;
}

/* Loads a classifier that this program wrote, and looks that it has this vocabulary and these classes; 0: any. */
TOOL int load_classifier(luna_model *model, luna_ctx *ctx, luna_params *params, const char *path, int64_t vocab,
                         int64_t classes) {
  if (luna_load_model(model, params, luna_path(path)) != LUNA_OK) return failed(ctx);
  const luna_classifier_config *config = &model->classifier.config;
  if (model->kind == LUNA_MODEL_CLASSIFIER && !config->pair && !config->per_step &&
      (!vocab || config->vocab == vocab) && (!classes || config->classes == classes)) return 0;
  return fail("%s is not a model that %s made", path, program);
}

/* Measures a model on all samples; `looked_at` has their logits until the next measurement. */
TOOL int eval_classifier(luna_ctx *ctx, const luna_classifier *model, const samples *s) {
  int64_t count = s->training + s->held;
  double loss, share = -1;
  int status = batch_open(s);
  if (!status && (share = accuracy(ctx, model, s, 0, count, &loss)) < 0) status = failed(ctx);
  if (!status && s->chosen) status = s->chosen(NULL);
  if (!status)
    say("%s: Accuracy on %lld samples: %.2f%% (loss %.3f, expected calibration error %.2f%%)", s->title,
        (long long)count, 100 * share, loss, 100 * calibration_error(&looked_at, 1));
  return batch_close(), status;
}
