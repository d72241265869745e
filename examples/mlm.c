/* mlm: a masked language model on bytes, and what it is for: a classifier that starts from it learns from fewer
   examples.

     cc -O2 -I. examples/mlm.c -o mlm -lm -lpthread

     mlm pretrain FILE [--out M] [--steps N] [--window W] ...
       learns to fill in the masked bytes of a text
     mlm tune M FILE.tsv [--out C] [--rows N] [--valid FILE.tsv] ...
       from lines "label TAB text", labels 0, 1, ...: a classifier with M's encoder, and beside it, to compare, the same
       from scratch; both are measured on --valid or, without it, on a tenth of the lines, chosen by chance
   Ctrl-C ends the training early and keeps what has been learnt. */
#define LUNA_IMPLEMENTATION
#include "luna.h"

#include "example.h"

#define MASK 256                     /* the token after the bytes */
#define MOST_CLASSES 1000

static struct settings set = {
  .out = "mlm.safetensors",
  .steps = 3000, .batch = 16, .lr = 1e-3,
  .layers = 3, .dim = 128, .heads = 4, .memory = 16, .ffn = 512, .dropout = 0.1,
  .seed = 1
};
static struct { int64_t window, rows; const char *valid; } own = { .window = 256 };

static const flag flags[] = {
  FLAGS_TRAIN_OF("pt"),
  { "--window", "pt", WHOLE(own.window, 2, 65536), "bytes of a text that are read at once" },
  { "--rows", "t", WHOLE(own.rows, 0, 1e9), "lines to learn from, at most, chosen by chance; 0 for all" },
  { "--valid", "t", READS(own.valid), "lines to measure on; without it a tenth of the others, chosen by chance" },
  FLAGS_MODEL_OF("p"),
  { "--attention", "p", CHOICE(set.attention, "luna softmax linear linformer"), "kind of attention" },
  FLAG_SEED("pt"),
  FLAG_THREADS("pt"),
  FLAG_PRODUCTS("pt"),
  { 0 }
};

static progress bar;
static int32_t *tokens, *labels;     /* a batch [batch,window], to be freed at tokens */

static void make_batch(void) {
  tokens = (int32_t *)grow(NULL, 2 * set.batch * own.window, sizeof(int32_t));
  labels = tokens + set.batch * own.window;
}

static luna_optimizer *optimizer(luna_params *params) {
  return luna_adamw(params, &(luna_optimizer_config){ .lr = (float)set.lr, .weight_decay = 0.01f, .clip = 1,
    .schedule = { .decay = LUNA_DECAY_LINEAR, .warmup = set.steps / 20 + 1, .total = set.steps + 1 } });
}

static int keep(luna_ctx *ctx, luna_params *params) { /* 0, or 2 after a sentence */
  progress_end(&bar);
  if (bar.step == 0) return fail("stopped before the first step: nothing learnt, nothing written");
  if (luna_params_set_text(params, "mlm.tokens", "bytes") != LUNA_OK ||
      luna_save(params, luna_path(set.out)) != LUNA_OK)
    return failed(ctx);
  printf("%s: %lld steps in %.0f s%s\n", set.out, (long long)bar.step, seconds() - bar.start,
         interrupted ? ", stopped early" : "");
  return 0;
}

/* ---- pretrain ---------------------------------------------------------------------------------------------------- */

/* Windows of the text, some bytes masked: the mean loss of those. The same step takes the same windows and masks. */
static luna_tensor *loss_of(const luna_masked_lm *model, contents text, int64_t step) {
  luna_masking masking = { .mask = MASK, .seed = (uint64_t)set.seed, .step = (uint64_t)step };
  for (int64_t row = 0; row < set.batch; row++) {
    const unsigned char *from = text.data + draw(0, step, row) % (uint64_t)(text.size - own.window + 1);
    for (int64_t i = 0; i < own.window; i++) tokens[row * own.window + i] = from[i];
  }
  luna_mask_tokens(&(luna_input){ tokens, NULL, set.batch, own.window, NULL }, &masking, tokens, labels);
  return luna_masked_lm_loss(model, &(luna_input){ tokens, NULL, set.batch, own.window, NULL }, labels);
}

static double validate(luna_ctx *ctx, const luna_masked_lm *model, contents held) { /* the mean loss; NaN on failure */
  double sum = 0, since = progress_validates();
  for (int64_t i = 0; i < 16 && sum >= 0; i++)             /* a begin would clear the context's sentence */
    luna_begin_inference(ctx), sum += (double)luna_item(loss_of(model, held, -1 - i)) / 16;
  progress_validated(&bar, since, sum, "validation %.3f", sum);
  return sum;
}

static int pretrain_on(luna_ctx *ctx, contents text, contents held) {
  luna_params *params = luna_params_open(ctx);
  luna_masked_lm model;
  luna_masked_lm_config config = {
    .encoder = { .layers = set.layers,
                 .layer = { .dim = set.dim, .heads = set.heads, .memory = set.memory, .ffn = set.ffn,
                            .dropout = (float)set.dropout, .attention = (luna_attention_kind)set.attention,
                            .activation = LUNA_ACTIVATION_GELU, .pre_norm = true } }
  };
  if (luna_masked_lm_init(&model, params, &config) != LUNA_OK) return failed(ctx);
  luna_optimizer *adam = optimizer(params);
  printf("%lld bytes to learn from, %lld to validate on; %lld parameters\n", (long long)text.size, (long long)held.size,
         (long long)luna_params_element_count(params));
  if (!adam) return failed(ctx);
  progress_start(&bar, 0);
  while (bar.step < set.steps && !interrupted) {
    if (progress_due(&bar) && !(validate(ctx, &model, held) >= 0)) return failed(ctx);
    luna_begin_step(ctx);
    luna_tensor *loss = loss_of(&model, text, bar.step);
    luna_backward(loss);
    if (luna_optimizer_step(adam) != LUNA_OK) return failed(ctx);
    progress_step(&bar, (double)luna_item(loss), (double)(set.batch * own.window));
  }
  if (keep(ctx, params)) return 2;
  double first = bar.validation.y[0], last = validate(ctx, &model, held);
  printf("validation loss %.3f -> %.3f nats, %.3f bits per masked byte\n", first, last, last / 0.69314718055994530942);
  return last >= 0 ? plot(&bar, "masked language model") : failed(ctx);
}

static int pretrain(luna_ctx *ctx, const char **words) {
  contents all;
  if (read_file(words[0], &all)) return 2;
  contents held = { all.data + (all.size - all.size / 10), all.size / 10 }, text = { all.data, all.size - held.size };
  int status = 0;
  if (held.size >= 2 && own.window > held.size)
    printf("windows cut to %lld bytes: the text is short\n", (long long)(own.window = held.size));
  make_batch();
  if (held.size < 2) status = fail("%s has %lld bytes; to train and validate takes 20", words[0], (long long)all.size);
  else status = pretrain_on(ctx, text, held);
  return free(tokens), free(all.data), status;
}

/* ---- tune -------------------------------------------------------------------------------------------------------- */

typedef struct row { const unsigned char *text; int64_t size; int32_t label; } row;
/* What is measured on lies behind what is learnt from. */
typedef struct data { contents files[2]; row *rows; int64_t learnt, held, classes; } data;

/* Appends a file's lines to rows. Returns 0, or 2 after a sentence. */
static int read_rows(data *d, contents *file, const char *path) {
  int64_t at = 0, size, lines = 1, number = 0;
  if (read_file(path, file)) return 2;
  for (int64_t i = 0; i < file->size; i++) lines += file->data[i] == '\n';
  d->rows = (row *)grow(d->rows, d->learnt + lines, sizeof(row));
  for (const unsigned char *line; (line = next_line(*file, &at, &size)) != NULL;) {
    char *end = (char *)file->data;
    long label = size > 0 && *line >= '0' && *line <= '9' ? strtol((const char *)line, &end, 10) : MOST_CLASSES;
    row r = { (unsigned char *)end + 1, line + size - (unsigned char *)end - 1, (int32_t)label };
    number++;
    if (label >= MOST_CLASSES || *end != '\t' || r.size < 1)
      return fail("line %lld of %s is no label from 0 to %d, tab, text", (long long)number, path, MOST_CLASSES - 1);
    d->rows[d->learnt++] = r;
    if (label >= d->classes) d->classes = label + 1;
  }
  return 0;
}

static void shuffle(row *rows, int64_t count, uint64_t seed) {
  for (int64_t i = count - 1; i > 0; i--) {
    int64_t k = (int64_t)(splitmix(&seed) % (uint64_t)(i + 1));
    row r = rows[i];
    rows[i] = rows[k], rows[k] = r;
  }
}

static int read_data(data *d, const char *path) { /* 0, or 2 after a sentence */
  if (read_rows(d, &d->files[0], path)) return 2;
  int64_t lines = d->learnt;
  if (lines < 10) return fail("%s has %lld lines; to train and test takes 10", path, (long long)lines);
  if (!own.valid) shuffle(d->rows, lines, 0);              /* for files have an order; the same tenth for any --seed */
  if (own.valid && read_rows(d, &d->files[1], own.valid)) return 2;
  if (own.valid && d->learnt == lines) return fail("%s has no lines", own.valid);
  d->held = own.valid ? d->learnt - lines : lines / 10;
  d->learnt -= d->held;
  shuffle(d->rows, d->learnt, (uint64_t)set.seed);
  return 0;
}

static void put(const row *r, int64_t at, int32_t *lengths) { /* row `at` of the batch */
  lengths[at] = (int32_t)(r->size < own.window ? r->size : own.window);
  for (int64_t i = 0; i < own.window; i++) tokens[at * own.window + i] = i < lengths[at] ? r->text[i] : 0;
  labels[at] = r->label;
}

/* negative on failure */
static double accuracy(luna_ctx *ctx, const luna_classifier *model, const data *d, int32_t *lengths) {
  double right = 0;
  for (const row *r = d->rows + d->learnt; r < d->rows + d->learnt + d->held; r++) {
    int32_t found;
    put(r, 0, lengths);
    luna_begin_inference(ctx);
    if (luna_argmax(luna_classifier_forward(model, &(luna_input){ tokens, lengths, 1, lengths[0], NULL }),
                    &found) != LUNA_OK) return -1;
    right += found == r->label;
  }
  return right / (double)d->held;
}

static void report(void *user, const char *name, const char *why) {
  printf("  "), put_shown(stdout, name, (int64_t)strlen(name)), printf(" %s\n", why), (void)user;
}

/* A classifier with the given encoder, its weights from a checkpoint or, null, from scratch. Returns 0, or 2 after a
   sentence. */
static int train(luna_ctx *ctx, luna_params *params, const luna_encoder_config *encoder, const char *path,
                 const data *d, double *right) {
  int64_t used = own.rows && own.rows < d->learnt ? own.rows : d->learnt;
  luna_classifier model;
  luna_classifier_config config = { .vocab = MASK + 1, .classes = d->classes, .pooling = LUNA_POOLING_MEAN,
                                   .encoder = *encoder };
  luna_load_report match = { .report = report };
  if (luna_classifier_init(&model, params, &config) != LUNA_OK) return failed(ctx);
  if (path && luna_load_matching(params, luna_path(path), &match) != LUNA_OK) return failed(ctx);
  if (path)
    printf("%lld of %lld tensors taken from %s\n", (long long)match.loaded, (long long)luna_params_tensor_count(params),
           path);
  luna_optimizer *adam = optimizer(params);
  if (!adam) return failed(ctx);
  int32_t *lengths = (int32_t *)grow(NULL, set.batch, sizeof(int32_t));
  int status = 0;
  progress_start(&bar, 0);
  while (bar.step < set.steps && !interrupted && !status) {
    for (int64_t i = 0; i < set.batch; i++) put(&d->rows[draw(0, bar.step, i) % (uint64_t)used], i, lengths);
    luna_begin_step(ctx);
    luna_tensor *loss = luna_cross_entropy(luna_classifier_forward(&model,
        &(luna_input){ tokens, lengths, set.batch, own.window, NULL }), labels, NULL);
    luna_backward(loss);
    if (luna_optimizer_step(adam) != LUNA_OK) status = failed(ctx);
    else progress_step(&bar, (double)luna_item(loss), (double)(set.batch * own.window));
  }
  if (!status && (*right = accuracy(ctx, &model, d, lengths)) < 0) status = failed(ctx);
  return free(lengths), status;
}

static int tune_on(luna_ctx *ctx, const char *path, const data *d) {
  luna_model model;
  double right[2] = { 0, 0 };
  if (luna_load_model(&model, luna_params_open(ctx), luna_path(path)) != LUNA_OK) return failed(ctx);
  if (model.kind != LUNA_MODEL_MASKED_LM || model.masked_lm.config.vocab != MASK + 1)
    return fail("%s holds no masked language model on bytes", path);
  for (int i = 0; i < 2 && !interrupted; i++) {            /* from the checkpoint, which is kept, then from scratch */
    luna_params *params = luna_params_open(ctx);
    printf("---- a classifier %s\n", i ? "from scratch" : "with the encoder of the masked language model");
    memset(&bar, 0, sizeof bar);
    if (train(ctx, params, &model.masked_lm.config.encoder, i ? NULL : path, d, &right[i])) return 2;
    if (i == 0 && (keep(ctx, params) || plot(&bar, "fine-tuning"))) return 2;
    printf("accuracy on %lld lines: %.4f\n", (long long)d->held, right[i]);
  }
  if (!interrupted)
    printf("accuracy after %lld steps: %.4f pre-trained, %.4f from scratch\n", (long long)bar.step, right[0], right[1]);
  return 0;
}

static int tune(luna_ctx *ctx, const char **words) {
  data d = { 0 };
  int status = read_data(&d, words[1]);
  make_batch();
  if (!status) status = tune_on(ctx, words[0], &d);
  return free(tokens), free(d.rows), free(d.files[0].data), free(d.files[1].data), status;
}

static const command commands[] = {
  { "pretrain", { "text: any file, whose bytes are the tokens" }, "learns to fill in masked bytes", pretrain },
  { "tune", { "model: a file that pretrain wrote", "lines: a number from 0, a tab and a text" },
   "makes a classifier of it", tune },
  { 0 }
};

int main(int count, char **given) {
  if (count > 1 && strcmp(given[1], "tune") == 0) set.out = "tuned.safetensors";
  return example("mlm", commands, flags, count, given);
}
