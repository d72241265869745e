/* mlm: a masked language model, and a classifier that starts from it to learn from fewer examples. An hour of
   pre-training is enough for that, minutes are not (examples/measurements.md).

     cc -O2 -I. examples/mlm.c -o mlm -lm -lpthread

     mlm pretrain FILE [--out M] [--steps N] [--window W] ...
       trains a model to fill in the masked words or bytes of a text
     mlm tune M FILE.tsv [--out C] [--rows N] [--held FILE.tsv] ...
       trains a classifier with M's encoder on lines "label TAB text", with labels 0, 1, ..., and for comparison the
       same from scratch; both are measured on --held or, without it, on a random tenth of the lines
   Ctrl-C ends the training early and keeps the model. */
#define LUNA_IMPLEMENTATION
#include "luna.h"

#include "common/example.h"
#include "common/attention_choice.h"
#include "luna_mask.h"
#include "common/tokens.h"

#define MOST_CLASSES 1000

static struct settings set = {
  .out = "mlm.safetensors",
  .steps = 3000, .batch = 16, .lr = 1e-3,
  .layers = 3, .dim = 128, .heads = 4, .memory = 16, .ffn = 512, .dropout = 0.1,
  .seed = 1
};
/* vocab: the tokens of a text; the one after them masks */
static struct {
  int64_t tokens, vocab, window, rows;
  double masked, head_lr, encoder_lr;
  const char *begin, *held;
} own = { .vocab = 10000, .window = 256, .masked = 0.15, .head_lr = 0.03, .encoder_lr = 1e-4 };

static const flag flags[] = {
  FLAGS_TRAIN_OF("pt"),
  { "--tokens", "p", CHOICE(own.tokens, "words bytes"), "Chooses what a text is cut into." },
  { "--vocab", "p", WHOLE(own.vocab, 2, 1e7),
    "Limits the vocabulary to N tokens. Words are hashed into it; there are 256 bytes." },
  { "--window", "pt", WHOLE(own.window, 2, 65536), "Reads N tokens or steps at once. A token is a word or a byte." },
  { "--masked", "p", REAL(own.masked, 0.001, 1), "Masks a share X of the tokens." },
  { "--begin", "p", READS(own.begin), "Begins with those tensors of model FILE whose names and shapes fit." },
  { "--head-lr", "t", REAL(own.head_lr, 1e-9, 10),
    "Sets the learning rate of the new layer on a pre-trained encoder to X." },
  { "--encoder-lr", "t", REAL(own.encoder_lr, 0, 10),
    "Sets the learning rate of a pre-trained encoder to X. 0 freezes it. From scratch all layers learn at --lr." },
  { "--rows", "t", WHOLE(own.rows, 0, 1e9), "Trains on at most N lines, chosen at random. 0 takes all." },
  { "--held", "t", READS(own.held),
   "Says which data are held out. They are the lines of FILE or, without it, a random tenth of the lines." },
  FLAGS_MODEL_OF("p"),
  { "--attention", "p", CHOICE(set.attention, "luna softmax linear linformer"), "Chooses the kind of attention." },
  FLAG_SEED("pt"),
  FLAG_THREADS("pt"),
  FLAG_PRODUCTS("pt"),
  { 0 }
};

static progress bar;
static int32_t *tokens, *labels;     /* a batch [batch,window], to be freed at tokens */

/* -> how many, at most max */
static int64_t cut(span text, int64_t max, int32_t *out) {
  return own.tokens ? cut_bytes(text, max, out) : cut_words(text, own.vocab, max, out, NULL);
}

static void make_batch(void) {
  tokens = (int32_t *)grow(NULL, 2 * set.batch * own.window, sizeof(int32_t));
  labels = tokens + set.batch * own.window;
}

static luna_optimizer *optimizer(luna_params *params, double lr) {
  return luna_adamw(params, &(luna_optimizer_config){ .lr = (float)lr, .weight_decay = 0.01f, .clip = 1,
    .schedule = { .decay = LUNA_DECAY_LINEAR, .warmup = set.steps / 20 + 1, .total = set.steps + 1 } });
}

static int keep(luna_ctx *ctx, luna_params *params) { /* 0, or 2 after a sentence */
  progress_end(&bar);
  if (bar.step == 0) return fail("the training was stopped before its first step, so no model was written");
  if (luna_params_set_text(params, "mlm.tokens", own.tokens ? "bytes" : "words") != LUNA_OK ||
      luna_save(params, luna_path(set.out)) != LUNA_OK)
    return failed(ctx);
  say("%s: Training made %lld steps in %.0f s%s.", set.out, (long long)bar.step, seconds() - bar.start,
      interrupted ? " and was stopped early" : "");
  return 0;
}

/* ---- pretrain ---------------------------------------------------------------------------------------------------- */

/* Windows of the text, some tokens masked: the mean loss of those. The same step takes the same windows and masks; what
   is validated on, in steps below 0, has 15% masked, so that losses compare. */
static luna_tensor *loss_of(const luna_masked_lm *model, ints text, int64_t step) {
  luna_masking masking = { .probability = step < 0 ? 0 : (float)own.masked, .mask = (int32_t)own.vocab,
                           .seed = (uint64_t)set.seed, .step = (uint64_t)step };
  for (int64_t row = 0; row < set.batch; row++)
    memcpy(tokens + row * own.window, text.at + draw(0, step, row) % (uint64_t)(text.size - own.window + 1),
           (size_t)own.window * sizeof(int32_t));
  luna_mask_tokens(&(luna_input){ tokens, NULL, set.batch, own.window, NULL }, &masking, tokens, labels);
  return luna_masked_lm_loss(model, &(luna_input){ tokens, NULL, set.batch, own.window, NULL }, labels);
}

static double validate(luna_ctx *ctx, const luna_masked_lm *model, ints held) { /* the mean loss; NaN on failure */
  double sum = 0, since = progress_validates();
  for (int64_t i = 0; i < 16 && sum >= 0; i++)             /* a begin would clear the context's sentence */
    luna_begin_inference(ctx), sum += (double)luna_item(loss_of(model, held, -1 - i)) / 16;
  progress_validated(&bar, since, sum, "validation %.3f", sum);
  return sum;
}

static int pretrain_on(luna_ctx *ctx, ints text, ints held) {
  luna_params *params = luna_params_open(ctx);
  luna_masked_lm model;
  luna_masked_lm_config config = {
    .vocab = own.vocab + 1,
    .encoder = { .layers = set.layers,
                 .layer = { .dim = set.dim, .heads = set.heads, .memory = set.memory, .ffn = set.ffn,
                            .dropout = (float)set.dropout,
                            .activation = LUNA_ACTIVATION_GELU, .pre_norm = true } }
  };
  choose_attention(&config.encoder.layer);
  if (luna_masked_lm_init(&model, params, &config) != LUNA_OK) return failed(ctx);
  if (own.begin && begin_with(ctx, params, own.begin, true)) return 2;
  luna_optimizer *adam = optimizer(params, set.lr);
  printf("The model trains on %lld %s and is validated on %lld. It has %lld parameters.\n", (long long)text.size,
         own.tokens ? "bytes" : "words", (long long)held.size, (long long)luna_params_element_count(params));
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
  printf("The validation loss went from %.3f to %.3f nats, %.3f bits per masked %s.\n", first, last,
         last / 0.69314718055994530942,
         own.tokens ? "byte" : "word");
  return last >= 0 ? plot(&bar, "masked language model") : failed(ctx);
}

static int pretrain(luna_ctx *ctx, const char **words) {
  contents file;
  if (read_file(words[0], &file)) return 2;
  if (own.tokens) own.vocab = 256;
  ints all = { (int32_t *)grow(NULL, file.size + 1, sizeof(int32_t)), 0, file.size };
  all.size = cut((span){ file.data, file.size }, file.size, all.at);
  ints text = { all.at, all.size - all.size / 10, 0 }, held = { all.at + text.size, all.size / 10, 0 };
  int status = 0;
  if (held.size >= 2 && own.window > held.size)
    printf("The text is short, so windows have %lld tokens.\n", (long long)(own.window = held.size));
  make_batch();
  if (held.size < 2)
    status = fail("%s has %lld tokens; training and validation take at least 20", words[0], (long long)all.size);
  else status = pretrain_on(ctx, text, held);
  return free(tokens), free(all.at), free(file.data), status;
}

/* ---- tune -------------------------------------------------------------------------------------------------------- */

typedef struct row { const unsigned char *text; int64_t size; int32_t label; } row;
/* What is measured on lies behind what is learnt from. */
typedef struct data { contents files[2]; row *rows; int64_t learnt, held, classes; } data;

/* Appends a file's lines to rows. Returns 0, or 2 after a sentence. */
static int read_rows(data *d, contents *file, const char *path) {
  int64_t at = 0, size, lines = 1, number = 0;
  if (read_lines_file(path, file)) return 2;
  for (int64_t i = 0; i < file->size; i++) lines += file->data[i] == '\n';
  d->rows = (row *)grow(d->rows, d->learnt + lines, sizeof(row));
  for (const unsigned char *line; (line = next_line(*file, &at, &size)) != NULL;) {
    char *end = (char *)file->data;
    long label = size > 0 && *line >= '0' && *line <= '9' ? strtol((const char *)line, &end, 10) : MOST_CLASSES;
    row r = { (unsigned char *)end + 1, line + size - (unsigned char *)end - 1, (int32_t)label };
    number++;
    if (label >= MOST_CLASSES || *end != '\t' || r.size < 1)
      return fail("line %lld of %s is not a label from 0 to %d, a tab and a text", (long long)number, path,
                  MOST_CLASSES - 1);
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
  if (lines < 10) return fail("%s has %lld lines; training and testing take at least 10", path, (long long)lines);
  if (!own.held) shuffle(d->rows, lines, 0);              /* for files have an order; the same tenth for any --seed */
  if (own.held && read_rows(d, &d->files[1], own.held)) return 2;
  if (own.held && d->learnt == lines) return fail("%s has no lines", own.held);
  d->held = own.held ? d->learnt - lines : lines / 10;
  d->learnt -= d->held;
  shuffle(d->rows, d->learnt, (uint64_t)set.seed);
  return 0;
}

static void put(const row *r, int64_t at, int32_t *lengths) { /* row `at` of the batch */
  int32_t *to = tokens + at * own.window;
  memset(to, 0, (size_t)own.window * sizeof *to);
  lengths[at] = (int32_t)cut((span){ r->text, r->size }, own.window, to);
  if (lengths[at] == 0) lengths[at] = 1;                   /* spaces alone */
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

/* A pre-trained encoder learns slowly, or not at all, while the layer on it is new. */
static luna_status teach_encoder(luna_params *params, luna_optimizer *adam) {
  const luna_param_group group = { .name = "encoder", .lr_factor = (float)(own.encoder_lr / own.head_lr) };
  return own.encoder_lr > 0 ? luna_optimizer_add_group(adam, &group) : luna_params_freeze(params, "encoder", true);
}

/* A classifier with the given encoder, its weights from a checkpoint or, null, from scratch. Returns 0, or 2 after a
   sentence. */
static int train(luna_ctx *ctx, luna_params *params, const luna_encoder_config *encoder, const char *path,
                 const data *d, double *right) {
  int64_t used = own.rows && own.rows < d->learnt ? own.rows : d->learnt;
  luna_classifier model;
  luna_classifier_config config = { .vocab = own.vocab + 1, .classes = d->classes, .pooling = LUNA_POOLING_MEAN,
                                   .encoder = *encoder };
  if (luna_classifier_init(&model, params, &config) != LUNA_OK) return failed(ctx);
  if (path && begin_with(ctx, params, path, true)) return 2;
  luna_optimizer *adam = optimizer(params, path ? own.head_lr : set.lr);
  if (!adam || (path && teach_encoder(params, adam) != LUNA_OK)) return failed(ctx);
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
  luna_params *pretrained = luna_params_open(ctx);
  if (luna_load_model(&model, pretrained, luna_path(path)) != LUNA_OK) return failed(ctx);
  const char *as = luna_params_get_text(pretrained, "mlm.tokens");
  own.tokens = as && strcmp(as, "bytes") == 0;
  own.vocab = model.kind == LUNA_MODEL_MASKED_LM ? model.masked_lm.config.vocab - 1 : 0;
  if (own.vocab < 2 || !as || (own.tokens ? own.vocab != 256 : strcmp(as, "words") != 0))
    return fail("%s is no masked language model that mlm pretrain made", path);
  for (int i = 0; i < 2 && !interrupted; i++) {            /* from the checkpoint, which is kept, then from scratch */
    luna_params *params = luna_params_open(ctx);
    printf("---- A classifier is trained %s.\n", i ? "from scratch" : "on the encoder of the masked language model");
    memset(&bar, 0, sizeof bar);
    if (train(ctx, params, &model.masked_lm.config.encoder, i ? NULL : path, d, &right[i])) return 2;
    if (i == 0 && (keep(ctx, params) || plot(&bar, "fine-tuning"))) return 2;
    printf("Its accuracy on %lld held-out lines is %.4f.\n", (long long)d->held, right[i]);
  }
  if (!interrupted)
    printf("The accuracy after %lld steps is %.4f pre-trained and %.4f from scratch.\n", (long long)bar.step, right[0],
           right[1]);
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
  { "pretrain", { "text: Any file. It is read as one text." }, "Trains a model to fill in masked tokens.", pretrain,
    "book.txt --out book.safetensors" },
  { "tune", { "model: A file that pretrain wrote.", "lines: Each line has a label from 0 on, a tab and a text." },
   "Trains a classifier on a pre-trained encoder, and one from scratch.", tune,
    "book.safetensors labels.tsv --out tuned.safetensors" },
  { 0 }
};

int main(int count, char **given) {
  if (count > 1 && strcmp(given[1], "tune") == 0) set.out = "tuned.safetensors";
  return example_of_attentions("mlm", commands, flags, count, given);
}
