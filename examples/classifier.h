/* classifier.h: how the examples that tell sequences apart train and measure a luna_classifier. Included after example.h.

   A program says what there is to learn in a `struct task`; train_classifier() learns it, and accuracy() measures a model on it. */
#define POOL 16                      /* batches fetched at once and sorted by length, so that little of a batch is padding */

typedef struct task {
  const char *title;
  int64_t vocab, classes, longest;   /* tokens 0 .. vocab - 1, at most `longest` in a sample; labels 0 .. classes - 1 */
  int64_t training, held;            /* samples to learn from; samples kept for validation, which come after them */
  int32_t (*fetch)(int64_t index, int32_t *tokens, int32_t *length); /* writes sample `index`, returns its label */
} task;

typedef struct pool {
  int32_t *tokens, *batch, *lengths, *labels; /* tokens: `longest` a sample. batch: what the model reads */
  int32_t *order;                    /* samples by length */
  int32_t *sorted_lengths, *sorted_labels;
} pool;

TOOL bool pool_open(pool *p, const task *t) {
  size_t rows = POOL * (size_t)set.batch;
  *p = (pool){ 0 };
  if ((p->tokens = (int32_t *)calloc(rows * (POOL + 1) / POOL, (size_t)t->longest * sizeof(int32_t))) == NULL) return false;
  if ((p->lengths = (int32_t *)calloc(rows, 5 * sizeof(int32_t))) == NULL) return false;
  p->batch = p->tokens + rows * (size_t)t->longest;
  p->labels = p->lengths + rows, p->order = p->labels + rows, p->sorted_lengths = p->order + rows, p->sorted_labels = p->sorted_lengths + rows;
  return true;
}
TOOL void pool_close(pool *p) { free(p->tokens), free(p->lengths); }

static const int32_t *compared;
TOOL int by_length(const void *a, const void *b) {
  int32_t i = *(const int32_t *)a, j = *(const int32_t *)b, more = compared[i] - compared[j];
  return more ? more : i - j;
}

/* Fetches `rows` samples: those from `first` on, or random ones of the training's for step number -first. */
TOOL void pool_fill(pool *p, const task *t, int64_t first, int64_t rows) {
  for (int64_t i = 0; i < rows; i++) {
    int64_t index = first < 0 ? (int64_t)(draw(0, -first, i) % (uint64_t)t->training) : first + i;
    p->labels[i] = t->fetch(index, p->tokens + i * t->longest, &p->lengths[i]);
    p->order[i] = (int32_t)i;
  }
  compared = p->lengths;
  qsort(p->order, (size_t)rows, sizeof(int32_t), by_length);
  for (int64_t i = 0; i < rows; i++) p->sorted_lengths[i] = p->lengths[p->order[i]], p->sorted_labels[i] = p->labels[p->order[i]];
}

/* Logits of `rows` samples from the pool's `at` on, in the order of their lengths. */
TOOL luna_tensor *pool_classify(const pool *p, const task *t, const luna_classifier *model, int64_t at, int64_t rows) {
  int64_t n = p->sorted_lengths[at + rows - 1];            /* the longest is the last */
  for (int64_t i = 0; i < rows; i++) {
    int64_t length = p->sorted_lengths[at + i];
    memcpy(p->batch + i * n, p->tokens + p->order[at + i] * t->longest, (size_t)length * sizeof(int32_t));
    memset(p->batch + i * n + length, 0, (size_t)(n - length) * sizeof(int32_t));
  }
  return luna_classifier_forward(model, &(luna_input){ p->batch, p->sorted_lengths + at, rows, n, NULL });
}

/* The share of right answers among `count` samples from `first` on, and their mean loss; negative on failure. */
TOOL double accuracy(luna_ctx *ctx, const luna_classifier *model, const task *t, pool *p, int64_t first, int64_t count, double *loss) {
  int64_t right = 0, classes = t->classes, rows, size;
  float *logits = (float *)malloc((size_t)(set.batch * classes) * sizeof(float));
  *loss = 0;
  for (int64_t done = 0; logits && done < count; done += size) {
    pool_fill(p, t, first + done, size = count - done < POOL * set.batch ? count - done : POOL * set.batch);
    for (int64_t at = 0; at < size; at += rows) {
      rows = size - at < set.batch ? size - at : set.batch;
      luna_begin_inference(ctx);
      luna_tensor *out = pool_classify(p, t, model, at, rows);
      *loss += (double)(luna_item(luna_cross_entropy(out, p->sorted_labels + at))) * (double)rows / (double)count;
      if (luna_read(out, logits) != LUNA_OK) return free(logits), -1;
      for (int64_t i = 0; i < rows; i++) {
        int32_t best = 0;
        for (int32_t c = 1; c < classes; c++) if (logits[i * classes + c] > logits[i * classes + best]) best = c;
        right += best == p->sorted_labels[at + i];
      }
    }
  }
  free(logits);
  return logits && isfinite(*loss) ? (double)right / (double)count : -1;
}

static progress bar;

/* Ten times, and at the end, it is measured how well the model does on (some of) the samples that it does not learn from. */
TOOL bool learn(luna_ctx *ctx, luna_classifier *model, luna_optimizer *adam, const task *t, pool *p, pool *held) {
  double loss_held;
  progress_start(&bar, 0);
  while (bar.step < set.steps && !interrupted) {
    if (bar.step % POOL == 0) pool_fill(p, t, -1 - bar.step, POOL * set.batch);
    int64_t at = (bar.step * 7 + 3) % POOL * set.batch;    /* short and long batches by turns */
    luna_begin_step(ctx);
    luna_tensor *loss = luna_cross_entropy(pool_classify(p, t, model, at, set.batch), p->sorted_labels + at);
    luna_backward(loss);
    if (luna_optimizer_step(adam) != LUNA_OK) return false;
    progress_step(&bar, (double)luna_item(loss), (double)(set.batch * p->sorted_lengths[at + set.batch - 1]));
    if (bar.step % (set.steps < 10 ? 1 : set.steps / 10) || bar.step == set.steps) continue;
    double share = accuracy(ctx, model, t, held, t->training, t->held < 500 ? t->held : 500, &loss_held);
    if (share < 0) return false;
    curve_add(&bar.validation, (double)bar.step, loss_held);
    snprintf(bar.note, sizeof bar.note, "validation %.1f%%", 100 * share);
  }
  progress_end(&bar);
  return true;
}

/* Trains a model that the common settings describe, writes it to --out, and tells how well it does on the samples held back. */
TOOL int train_classifier(luna_ctx *ctx, luna_params *params, const task *t) {
  luna_classifier model;
  pool p = { 0 }, held = { 0 };
  double start = seconds(), loss = 0, share = -1;
  luna_classifier_config config = { .vocab = t->vocab, .classes = t->classes, .pooling = (luna_pooling)set.pooling, .encoder = {
    .layers = set.layers, .dim = set.dim, .heads = set.heads, .ffn = set.ffn, .memory = set.memory,
    .positions = (luna_positions)set.positions, .max_length = t->longest,
    .layer = { .activation = LUNA_ACTIVATION_GELU, .pre_norm = true, .dropout = (float)set.dropout,
      .attention = (luna_attention_kind)set.attention, .linformer = { .k = t->longest < 64 ? t->longest : 64 } } } };
  if (luna_classifier_init(&model, params, &config) != LUNA_OK) return failed(ctx);
  luna_optimizer *adam = luna_adamw(params, &(luna_adamw_config){ .lr = (float)set.lr, .weight_decay = 0.01f, .clip = 1,
    .schedule = { .decay = LUNA_DECAY_COSINE, .warmup = set.steps < 1000 ? set.steps / 10 : 100, .total = set.steps, .floor = 0.05f } });
  if (!adam) return failed(ctx);
  printf("%s: %lld classes, %lld samples to validate on; %lld parameters\n", t->title, (long long)t->classes, (long long)t->held,
         (long long)luna_params_element_count(params));
  fflush(stdout);

  bool room = pool_open(&p, t) && pool_open(&held, t);
  bool fine = room && learn(ctx, &model, adam, t, &p, &held) && (bar.step == 0 || luna_save(params, set.out) == LUNA_OK);
  if (fine && bar.step > 0) share = accuracy(ctx, &model, t, &held, t->training, t->held, &loss);
  pool_close(&p), pool_close(&held);
  if (!room) return fail("out of memory");
  if (fine && bar.step == 0) return fail("stopped before the first step: nothing learnt, nothing written");
  if (share < 0) return failed(ctx);
  curve_add(&bar.validation, (double)bar.step, loss);
  if (interrupted) printf("stopped at step %lld: what has been learnt is in %s\n", (long long)bar.step, set.out);
  printf("%s: %lld steps in %.0f s, accuracy on %lld samples not learnt from: %.2f%% (loss %.3f)\n", set.out, (long long)bar.step, seconds() - start,
         (long long)t->held, 100 * share, loss);
  return plot(&bar, t->title);
}

/* Loads what train_classifier() wrote, and looks that it is a model of this vocabulary. */
TOOL int load_classifier(luna_model *model, luna_ctx *ctx, luna_params *params, const char *path, int64_t vocab) {
  if (luna_load_model(model, params, path) != LUNA_OK) return failed(ctx);
  if (model->kind == LUNA_MODEL_CLASSIFIER && model->classifier.config.vocab == vocab && !model->classifier.config.pair) return 0;
  return fail("%s is not a model that %s made", path, program);
}

/* Measures a model on all of a task's samples. */
TOOL int eval_classifier(luna_ctx *ctx, const luna_classifier *model, const task *t) {
  pool p;
  double loss, share = pool_open(&p, t) ? accuracy(ctx, model, t, &p, 0, t->training + t->held, &loss) : -1;
  pool_close(&p);
  if (share < 0) return luna_ctx_status(ctx) == LUNA_OK ? fail("out of memory") : failed(ctx);
  printf("%s: accuracy on %lld samples: %.2f%% (loss %.3f)\n", t->title, (long long)(t->training + t->held), 100 * share, loss);
  return 0;
}
