/* classify: tells texts apart, for instance whether a film review praises or damns. It trains on lines of a label, a
   tab and a text.

     cc -O2 -I. examples/classify.c -o classify -lm -lpthread

     classify train imdb.tsv [--plot loss.svg] ...             takes about a minute and writes classify.safetensors
     classify eval M FILE                                      measures the accuracy of M on a labelled file
     classify predict M [TEXTS] [--top 3]                      prints a label and its probability for each line, or more

   imdb.tsv has 25,000 film reviews. examples/guide.md says how to make it ("Data sets").

   Tokens are words, by their hash, or bytes. A tenth of the lines, chosen at random, is for validation. It chooses the
   model of the best average precision and ends the training early (--patience). It also sets a temperature, which
   divides the model's logits so that its probabilities mean what they say. --aim precision=0.9 finds as many of a rare
   label as it can with that precision. --balance makes a rare label count as much as the others in training. The
   checkpoint holds labels and all the rest, so M is all that is needed. Ctrl-C ends the training early and keeps the
   model. */
#define LUNA_IMPLEMENTATION
#include "luna.h"

#include "common/example.h"
#include "common/tokens.h"
#include "common/classifier.h"

#define LABELS 1000                  /* different labels, at most, */
#define LABEL 1000                   /* and bytes of each */

static struct settings set = {
  .out = "classify.safetensors",
  .steps = 1000, .batch = 32, .lr = 1e-3,
  .layers = 2, .dim = 64, .heads = 4, .memory = 16, .ffn = 128, .dropout = 0.1,
  .seed = 1, .patience = 4
};
static struct { int64_t tokens, vocab, longest, top; } own = { .vocab = 20000, .longest = 400, .top = 1 };

static const flag flags[] = {
  FLAGS_TRAIN,
  { "--tokens", "t", CHOICE(own.tokens, "words bytes"), "Chooses what a text is cut into." },
  { "--vocab", "t", WHOLE(own.vocab, 2, 1e7),
    "Limits the vocabulary to N tokens. Words are hashed into it; there are 256 bytes." },
  { "--longest", "t", WHOLE(own.longest, 1, 1e6),
    "Limits a sequence to N tokens. The rest of a text is not read." },
  { "--top", "p", WHOLE(own.top, 1, LABELS), "Prints the N likeliest labels of a line, the likeliest first." },
  FLAGS_MODEL,
  FLAGS_CLASSIFIER,
  FLAG_PATIENCE,
  FLAGS_RARE,
  FLAG_SEED("t"),
  FLAG_THREADS("tep"),
  FLAG_WEIGHTS("ep"),
  FLAG_PRODUCTS("t"),
  FLAG_RECOMPUTE,
  FLAG_PARALLEL,
  { 0 }
};

static struct {
  contents text; struct { const unsigned char *at; int64_t size; int32_t label; } *lines; int64_t count;
} file;
static struct { const unsigned char *at; int64_t size; } labels[LABELS];
static int32_t label_count;
static int64_t counts[LABELS];       /* of the lines to learn from */

/* Cuts a text into tokens, at least one, and returns how many. */
static int32_t cut(const unsigned char *text, int64_t size, int32_t *tokens) {
  const span t = { text, size };
  const int32_t n = own.tokens == 1 ? cut_bytes(t, own.longest, tokens) :
      cut_words(t, own.vocab, own.longest, tokens, NULL);
  if (n == 0) tokens[0] = 0;
  return n ? n : 1;
}

static int32_t fetch(int64_t index, int32_t *tokens, int32_t *length) {
  *length = cut(file.lines[index].at, file.lines[index].size, tokens);
  return file.lines[index].label;
}

/* The number of a label, which is made when it is new and may be; -1 when not. */
static int32_t label_of(const unsigned char *at, int64_t size, bool add) {
  int32_t i = 0;
  while (i < label_count && (labels[i].size != size || memcmp(labels[i].at, at, (size_t)size) != 0)) i++;
  if (i < label_count) return i;
  if (!add || label_count == LABELS) return -1;
  labels[i].at = at, labels[i].size = size;
  return label_count++;
}

/* Whether a line is kept to validate: about one in ten, by chance and not by place, for files have an order; the same
   for any --seed. */
static bool is_held(int64_t number) {
  uint32_t counter[4] = { (uint32_t)number, (uint32_t)((uint64_t)number >> 32), 0, 0 }, random[4];
  luna_philox(counter, 0, random);
  return random[0] % 10 == 0;
}

/* Reads the lines; when training, those to validate go to the end. */
static int read_lines(const char *path, bool training, int64_t *held) {
  int64_t at = 0, length, lines = 1, number = 0;
  const unsigned char *next;
  if (read_lines_file(path, &file.text)) return 2;
  for (int64_t i = 0; i < file.text.size; i++) lines += file.text.data[i] == '\n';
  if ((file.lines = malloc((size_t)lines * sizeof *file.lines)) == NULL) return fail("out of memory");
  int64_t last = lines;
  while ((next = next_line(file.text, &at, &length)) != NULL) {
    const unsigned char *tab = (const unsigned char *)memchr(next, '\t', (size_t)length);
    number++;
    if (length == 0) continue;
    if (!tab || tab == next) return fail("%s: line %lld is not a label, a tab and a text", path, (long long)number);
    if (tab - next > LABEL || memchr(next, 0, (size_t)(tab - next)))
      return fail("%s: line %lld has a label of more than %d bytes or with a zero byte", path, (long long)number,
                  LABEL);
    int32_t label = label_of(next, tab - next, training);
    if (label < 0 && training) return fail("%s has more than %d labels", path, LABELS);
    if (label < 0) return fail("%s: line %lld has a label that the model does not know", path, (long long)number);
    int64_t to = training && is_held(number) ? --last : file.count++;
    file.lines[to].at = tab + 1, file.lines[to].size = length - (tab + 1 - next), file.lines[to].label = label;
  }
  *held = lines - last;
  memmove(file.lines + file.count, file.lines + last, (size_t)*held * sizeof *file.lines);
  return 0;
}

/* ---- what a model must know besides its weights ------------------------------------------------------------------ */

static luna_status remember(luna_params *params) {
  char key[40], value[40];
  luna_status status = luna_params_set_text(params, "classify.tokens", own.tokens ? "bytes" : "words");
  if (status == LUNA_OK) status = keep_mark(params, file.text);
  snprintf(value, sizeof value, "%lld", (long long)own.longest);
  if (status == LUNA_OK) status = luna_params_set_text(params, "classify.longest", value);
  for (int32_t i = 0; i < label_count && status == LUNA_OK; i++) {
    char *label = (char *)grow(NULL, labels[i].size + 1, 1);
    memcpy(label, labels[i].at, (size_t)labels[i].size);
    label[labels[i].size] = 0;
    snprintf(key, sizeof key, "classify.label%d", (int)i);
    status = luna_params_set_text(params, key, label);
    free(label);
  }
  return status;
}

/* What is chosen after training: the rarest label's threshold, and with --balance what logits have too much. */
static int keep_choices(luna_params *params) {
  char key[40], value[60];
  say_rarest((const char *)labels[rarest].at, labels[rarest].size);
  if (!params) return 0;
  snprintf(value, sizeof value, "%d %.9g", (int)rarest, threshold);
  luna_status status = luna_params_set_text(params, "classify.choices", value);
  for (int32_t i = 0; balance && i < label_count && status == LUNA_OK; i++) {
    snprintf(key, sizeof key, "classify.balance%d", (int)i);
    snprintf(value, sizeof value, "%.9g", (double)balance[i]);
    status = luna_params_set_text(params, key, value);
  }
  return status == LUNA_OK ? 0 : failed(luna_params_ctx(params));
}
static bool recall_choices(const luna_params *params) {    /* models of older versions have none */
  const char *text = luna_params_get_text(params, "classify.choices");
  char key[40];
  int rare = 0;
  if (text && (sscanf(text, "%d %lf", &rare, &threshold) != 2 || rare < 0 || rare >= label_count ||
               !(threshold >= 0 && threshold <= 1))) return false;
  rarest = rare;
  if (!luna_params_get_text(params, "classify.balance0")) return true;
  balance = (float *)grow(NULL, label_count, sizeof(float));
  for (int32_t i = 0; i < label_count; i++) {
    snprintf(key, sizeof key, "classify.balance%d", (int)i);
    text = luna_params_get_text(params, key);
    balance[i] = text ? (float)atof(text) : 0;
    if (!(balance[i] > 0 && isfinite(balance[i]))) return false;
  }
  return true;
}

static int load(luna_ctx *ctx, const char *path, luna_model *model) {
  luna_params *params = luna_params_open(ctx);
  if (load_classifier(model, ctx, params, path, 0, 0)) return 2;
  const char *tokens = luna_params_get_text(params, "classify.tokens"),
      *longest = luna_params_get_text(params, "classify.longest");
  const bool fine = model->classifier.config.classes <= LABELS && tokens && longest;
  own.tokens = tokens && strcmp(tokens, "bytes") == 0;
  own.longest = longest ? atoll(longest) : 0;
  own.vocab = model->classifier.config.vocab;
  for (; fine && label_count < model->classifier.config.classes; label_count++) {
    char key[40];
    snprintf(key, sizeof key, "classify.label%d", (int)label_count);
    const char *label = luna_params_get_text(params, key);
    if (!label) break;
    labels[label_count].at = (const unsigned char *)label, labels[label_count].size = (int64_t)strlen(label);
  }
  if (fine && label_count == model->classifier.config.classes && own.longest >= 1 && own.longest <= 1000000 &&
      own.vocab >= (own.tokens ? 256 : 2) && recall_choices(params)) return 0;
  return fail("%s is not a model that classify made", path);
}

/* ---- commands ---------------------------------------------------------------------------------------------------- */

static samples the_samples(const char *title, int64_t held) {
  return (samples){
    .title = title, .vocab = own.vocab, .classes = label_count, .longest = own.longest, .training = file.count,
        .held = held, .fetch = fetch, .chosen = keep_choices
  };
}

static int train(luna_ctx *ctx, const char **words) {
  luna_params *params = luna_params_open(ctx);
  int64_t held = 0;
  aim wanted;
  if (set.aim && !read_aim(set.aim, &wanted))
    return fail("--aim takes f1, precision=0.9 or recall=0.9, not '%s'", set.aim);
  int status = read_lines(words[0], true, &held);
  if (own.tokens) own.vocab = 256;
  if (!status && (label_count < 2 || held < 1))
    status = fail("%s has %d labels and gives %lld of its %lld lines to validate on; it takes more", words[0],
                  (int)label_count, (long long)held, (long long)(file.count + held));
  if (!status && remember(params) != LUNA_OK) status = failed(ctx);
  samples s = the_samples(words[0], held);
  for (int64_t i = 0; i < file.count && !status; i++) counts[file.lines[i].label]++;
  s.counts = counts;
  if (!status) status = train_classifier(ctx, params, &s);
  free(file.lines), free(file.text.data);
  return status;
}

static int eval(luna_ctx *ctx, const char **words) {
  luna_model model;
  int64_t held = 0;
  int status = load(ctx, words[0], &model);
  if (!status) status = read_lines(words[1], false, &held);
  if (!status && file.count == 0) status = fail("%s has no lines", words[1]);
  samples s = the_samples(words[1], 0);
  if (!status) say_learnt(model.classifier.params, file.text, words[1]);
  if (!status) status = eval_classifier(ctx, &model.classifier, &s);
  calibration_close(&looked_at);
  free(file.lines), free(file.text.data);
  return status;
}

/* Prints a label, and takes it out of the shares. */
static void print_label(float *shares, int32_t label, bool more) {
  if (more) printf("\t");
  put_label(labels[label].at, labels[label].size);
  printf("\t%.3f", (double)shares[label]);
  shares[label] = -1;
}
/* The answer, then the likeliest others. */
static void print_likeliest(float *shares) {
  print_label(shares, answer_of(shares, label_count), false);
  for (int64_t place = 1; place < own.top && place < label_count; place++)
    print_label(shares, luna_sample(shares, label_count, NULL), true);
}

static int predict(luna_ctx *ctx, const char **words) {
  luna_model model;
  const unsigned char *line;
  int64_t size;
  if (load(ctx, words[0], &model)) return 2;
  if (words[1] && !freopen(words[1], "rb", stdin)) return fail("cannot open %s: %s", words[1], strerror(errno));
  int32_t *tokens = (int32_t *)malloc((size_t)own.longest * sizeof(int32_t)), length;
  float *shares = (float *)malloc((size_t)label_count * sizeof(float));
  int status = tokens && shares ? 0 : fail("out of memory");
  while (!status && (line = typed_line(&size)) != NULL) {
    length = cut(line, size, tokens);
    luna_begin_inference(ctx);
    luna_tensor *logits = luna_classifier_forward(&model.classifier, &(luna_input){ tokens, &length, 1, length, NULL });
    if (luna_read(logits, shares) != LUNA_OK) { status = failed(ctx); break; }
    if (balance) unbalance(shares, balance, label_count);
    shares_of(shares, label_count);
    print_likeliest(shares);
    printf("\n");
    fflush(stdout);
  }
  free(tokens), free(shares);
  if (!status && ferror(stdout)) status = fail("cannot write the labels: %s", strerror(errno));
  return status;
}

#define TEXT_FILE "text: Each line has a label, a tab and a text. There is no header. A label is any word."
#define MODEL_FILE "model: A file that train wrote."
#define TEXTS_FILE "?texts: Each line is a text without a label. Without the file the input is read."
static const command commands[] = {
  { "train", { TEXT_FILE }, "Trains a classifier on labelled texts.", train, "reviews.tsv --out reviews.safetensors" },
  { "eval", { MODEL_FILE, TEXT_FILE }, "Measures a model's accuracy on labelled texts.", eval,
    "reviews.safetensors other.tsv" },
  { "predict", { MODEL_FILE, TEXTS_FILE }, "Labels each line of a file or of the input.", predict,
    "reviews.safetensors lines.txt --top 2" },
  { 0 }
};

int main(int count, char **given) {
  const int status = example_of_attentions("classify", commands, flags, count, given);
  return free(balance), status;
}
