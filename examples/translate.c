/* translate: a Luna encoder-decoder that translates lines. It makes its own byte-pair vocabulary.

     cc -O2 -I. examples/translate.c -o translate -lm -lpthread

     translate train SOURCE TARGET [--out M] [--plot SVG] ...
       trains on two files whose lines belong together, or on one, PAIRS.tsv
     translate eval M SOURCE TARGET [--beam B]    measures BLEU-4 of M's translations, words split as mteval-v13a does
     translate run M [--beam B] <LINES            prints a translation for each line

   For Multi30k's 29,000 pairs, translate train train.en train.de --products bf16 takes 20 minutes of one core. Then
   eval with --beam 5 takes seconds; it gives BLEU 35.6 on the test set of 2016. Ctrl-C ends the training early and
   keeps the model. The checkpoint holds the vocabulary, so M is all that is needed. */
#define LUNA_IMPLEMENTATION
#include "luna.h"

#include "common/example.h"
#include "luna_beam.h"
#include "common/tokens.h"

#define HELD 500                     /* pairs kept for validation, at most, and at most one in 20 */

static struct settings set = {
  .out = "translate.safetensors",
  .steps = 16000, .batch = 64, .lr = 2e-3,
  .layers = 3, .dim = 128, .heads = 4, .memory = 16, .ffn = 512, .dropout = 0.2,
  .seed = 1
};
static struct { int64_t vocab, longest, beam; double length; } own =
    { .vocab = 6000, .longest = 128, .beam = 4, .length = 1 };

static const flag flags[] = {
  FLAGS_TRAIN,
  { "--vocab", "t", WHOLE(own.vocab, 257, 65536), "Limits the vocabulary to N tokens. They are bytes and byte pairs." },
  { "--longest", "t", WHOLE(own.longest, 2, 4096), "Limits a sequence to N tokens. Pairs with more are left out." },
  FLAGS_MODEL,
  { "--beam", "er", WHOLE(own.beam, 1, 64), "Searches with N translations at once. 1 is greedy search." },
  { "--length-power", "er", REAL(own.length, 0.01, 10),
   "Divides scores by the number of tokens to the power X. Larger powers give longer translations." },
  FLAG_SEED("t"),
  FLAG_THREADS("ter"),
  FLAG_PRODUCTS("t"),
  { 0 }
};

/* ---- the vocabulary: byte pairs, tokens.h ------------------------------------------------------------------------ */

/* The text of tokens, a line that a terminal can show; out has n UNIT + 1 bytes. */
static span decode(const byte_pairs *v, const int32_t *tokens, int64_t n, unsigned char *out) {
  unsigned char *end = out;
  for (int64_t i = 0; i < n; i++) if (tokens[i] < v->end) end = spell(v, tokens[i], end);
  for (int64_t i = 0, length; i < end - out; i += length) {
    length = showable(out + i, end - out - i);
    if (length == 0 || out[i] < ' ') length = 1, out[i] = out[i] < ' ' ? ' ' : '?';
  }
  return end > out && *out == ' ' ? (span){ out + 1, end - out - 1 } : (span){ out, end - out };
}

/* Units, each once: minus how often it comes, then its tokens. seen: by a hash of its bytes, where it begins. */
static void count_units(span t, ints *units, table *seen) {
  for (int64_t at = -1, end; at < t.size; at = end) {
    uint64_t hash = 0;
    end = unit_end(t, at);
    for (int64_t i = at; i < end; i++) hash = (hash ^ (uint64_t)byte_at(t, i)) * 1099511628211u;
    int64_t known = seen->size, *where = value_of(seen, hash);
    if (seen->size > known) {
      *where = units->size;
      push(units, 0);
      for (int64_t i = at; i < end; i++) push(units, byte_at(t, i));
    }
    units->at[*where]--;
  }
}

static void count_pair(table *counts, int32_t first, int32_t second, int64_t weight) {
  /* negative: no token, a unit's edge */
  if (first >= 0 && second >= 0) *value_of(counts, key(first, second)) += weight;
}

/* Makes one token of a pair wherever it stands. */
static void merge(ints *units, table *counts, uint64_t pair, int32_t token) {
  int32_t a = first_of(pair), b = second_of(pair), weight = 0, *at = units->at;
  int64_t to = 0;
  for (int64_t i = 0; i < units->size; i++, to++) {
    at[to] = at[i];
    if (at[i] < 0) weight = -at[i];
    if (at[i] != a || i + 1 == units->size || at[i + 1] != b) continue;
    int32_t left = at[to - 1], right = i + 2 < units->size ? at[i + 2] : -1;
    count_pair(counts, left, a, -weight), count_pair(counts, b, right, -weight);
    count_pair(counts, left, token, weight), count_pair(counts, token, right, weight);
    at[to] = token;
    i++;
  }
  units->size = to;
  *value_of(counts, pair) = 0;
}

/* Makes the commonest pair a token until there are `max` tokens or no pair is left that comes twice. */
static void learn_pairs(byte_pairs *v, ints *units, int64_t max) {
  table counts = { 0 };
  for (int64_t i = 0, weight = 0; i + 1 < units->size; i++) {
    if (units->at[i] < 0) weight = -units->at[i];
    count_pair(&counts, units->at[i], units->at[i + 1], weight);
  }
  while (v->end + 1 < max) {
    entry best = { 0, 1 };
    for (int64_t i = 0; i < counts.size; i++) if (counts.entries[i].value > best.value) best = counts.entries[i];
    if (best.value < 2) break;
    merge(units, &counts, best.key, v->end);
    add_pair(v, best.key);
  }
  free(counts.entries), free(counts.buckets);
}

/* ---- pairs of lines ---------------------------------------------------------------------------------------------- */

/* source and target: text; tokens with their end */
typedef struct pair { span text[2]; int64_t first[2]; int32_t size[2]; } pair;
/* Sources [rows,n] and targets [rows,m], `end` in the padding. The decoder is given `end` and the target but its last;
   labels are -1 in the padding. */
/* one block, at source */
typedef struct batch { int32_t *source, *given, *labels, *lengths[2]; int64_t rows, n, m; double tokens; } batch;
typedef struct data { byte_pairs v; contents file[2]; pair *pairs; int64_t count, room; ints tokens; batch b; } data;

static int done(data *d, int status) {
  free(d->v.pairs.entries), free(d->v.pairs.buckets), free(d->file[0].data), free(d->file[1].data), free(d->pairs),
      free(d->b.source);
  return free(d->tokens.at), status;
}

static void add(data *d, span source, span target) {
  if (d->count == d->room) d->pairs = (pair *)grow(d->pairs, d->room = 2 * d->room + 256, sizeof(pair));
  d->pairs[d->count++] = (pair){ .text = { source, target } };
}

/* target null: both in one file, a tab between them */
static int read_pairs(data *d, const char *source, const char *target) {
  int64_t at[2] = { 0, 0 };
  span s, t = { NULL, 0 };
  if (read_lines_file(source, &d->file[0]) || (target && read_lines_file(target, &d->file[1]))) return 2;
  for (;; add(d, s, t)) {
    s.at = next_line(d->file[0], &at[0], &s.size);
    if (target) t.at = next_line(d->file[1], &at[1], &t.size);
    if (target && !s.at != !t.at) return fail("%s and %s do not have the same number of lines", source, target);
    if (!s.at) return 0;
    if (!target) {
      const unsigned char *tab = (const unsigned char *)memchr(s.at, '\t', (size_t)s.size);
      if (!tab) return fail("line %lld of %s has no tab between source and target", (long long)d->count + 1, source);
      t = (span){ tab + 1, s.at + s.size - tab - 1 };
      s.size = tab - s.at;
    }
  }
}

static int by_size(const void *a, const void *b) {
  const int32_t *x = ((const pair *)a)->size, *y = ((const pair *)b)->size;
  return x[0] != y[0] ? (x[0] > y[0]) - (x[0] < y[0]) : (x[1] > y[1]) - (x[1] < y[1]);
}

/* Tokens of the lines, pairs longer than `longest` dropped. Then two runs, the last `held` pairs and those before them,
   each in the order of lengths: neighbours make batches with little padding. */
static void encode_pairs(data *d, int64_t longest, int64_t held) {
  int64_t kept = 0;
  for (int64_t i = 0; i < d->count; i++) {
    pair p = d->pairs[i];
    for (int side = 0; side < 2; side++) {
      p.first[side] = d->tokens.size;
      encode(&d->v, p.text[side], &d->tokens);
      p.size[side] = (int32_t)(d->tokens.size - p.first[side]);
    }
    if (p.size[0] <= longest && p.size[1] <= longest) d->pairs[kept++] = p;
  }
  d->count = kept;
  if (kept > held)
    qsort(d->pairs, (size_t)(kept - held), sizeof(pair), by_size),
        qsort(d->pairs + kept - held, (size_t)held, sizeof(pair), by_size);
}

static const batch *fill(data *d, int64_t first, int64_t rows) {
  const pair *pairs = d->pairs + first;
  batch *b = &d->b;
  int32_t *to = b->source, end = d->v.end;
  *b = (batch){ .rows = rows };
  for (int64_t r = 0; r < rows; r++) {
    if (pairs[r].size[0] > b->n) b->n = pairs[r].size[0];
    if (pairs[r].size[1] > b->m) b->m = pairs[r].size[1];
    b->tokens += pairs[r].size[1];
  }
  b->source = to = (int32_t *)grow(to, rows * (b->n + 2 * b->m + 2), sizeof(int32_t));
  b->given = to + rows * b->n, b->labels = b->given + rows * b->m, b->lengths[0] = b->labels + rows * b->m,
      b->lengths[1] = b->lengths[0] + rows;
  for (int64_t r = 0; r < rows; r++) {
    const int32_t *source = d->tokens.at + pairs[r].first[0], *target = d->tokens.at + pairs[r].first[1],
        *size = pairs[r].size;
    for (int side = 0; side < 2; side++) b->lengths[side][r] = size[side];
    for (int64_t i = 0; i < b->n; i++) b->source[r * b->n + i] = i < size[0] ? source[i] : end;
    for (int64_t i = 0; i < b->m; i++)
      b->given[r * b->m + i] = i > 0 && i < size[1] ? target[i - 1] : end,
          b->labels[r * b->m + i] = i < size[1] ? target[i] : -1;
  }
  return b;
}

/* Translates the sources of `rows` pairs and hands each pair with its translation to `take`. Returns 0, or 2 after a
   sentence. */
static int translate(luna_ctx *ctx, const luna_seq2seq *model, data *d, int64_t first, int64_t rows,
                     void (*take)(const pair *p, span t)) {
  const batch *b = fill(d, first, rows);
  luna_beam_config search = { .begin = d->v.end, .end = d->v.end, .beam = own.beam, .max_length = 2 * b->n + 10,
                             .length_penalty = (float)own.length };
  int32_t *out = (int32_t *)grow(NULL, rows * (search.max_length + 1), sizeof(int32_t)),
      *lengths = out + rows * search.max_length;
  unsigned char *text = (unsigned char *)grow(NULL, search.max_length * UNIT + 1, 1);
  const luna_input source = { b->source, b->lengths[0], rows, b->n, NULL };
  int status = luna_beam_search(model, &source, &search, out, lengths, NULL) == LUNA_OK ? 0 : failed(ctx);
  for (int64_t r = 0; r < rows && !status; r++)
    take(d->pairs + first + r, decode(&d->v, out + r * search.max_length, lengths[r], text));
  free(out), free(text);
  return status;
}

/* ---- train ------------------------------------------------------------------------------------------------------- */

static progress bar;

static luna_tensor *loss_of(const luna_seq2seq *model, const batch *b, float smoothing) {
  return luna_seq2seq_loss(model, &(luna_input){ b->source, b->lengths[0], b->rows, b->n, NULL },
                           &(luna_input){ b->given, b->lengths[1], b->rows, b->m, NULL }, b->labels,
                           &(luna_cross_entropy_config){ .smoothing = smoothing });
}

static void show(const pair *p, span t) {
  printf("  source       "), put_shown(stdout, p->text[0].at, p->text[0].size);
  printf("\n  target       "), put_shown(stdout, p->text[1].at, p->text[1].size);
  printf("\n  translation  "), put_shown(stdout, t.at, t.size), putchar('\n');
}

/* The loss of the last `held` pairs and, after the first step, a translation. Returns 0, or 2 after a sentence. */
static int validate(luna_ctx *ctx, const luna_seq2seq *model, data *d, int64_t held) {
  double sum = 0, tokens = 0, since = progress_validates();
  for (int64_t at = d->count - held; at < d->count && sum >= 0; at += 64) {
    const batch *b = fill(d, at, d->count - at < 64 ? d->count - at : 64);
    luna_begin_inference(ctx);
    sum += (double)luna_item(loss_of(model, b, 0)) * b->tokens, tokens += b->tokens;
  }
  if (!(sum >= 0)) return failed(ctx);
  progress_validated(&bar, since, sum / tokens, "", 0);
  if (bar.step == 0) return 0;
  printf("%sstep %lld: validation loss %.3f, perplexity %.2f\n", bar.live ? "\n" : "", (long long)bar.step,
         sum / tokens, exp(sum / tokens));
  return translate(ctx, model, d, d->count - held + (int64_t)(draw(1, bar.step, 0) % (uint64_t)held), 1, show);
}

static int learn(luna_ctx *ctx, const luna_seq2seq *model, luna_optimizer *adam, data *d, int64_t held) {
  int64_t count = d->count - held, rows = set.batch < count ? set.batch : count;
  progress_start(&bar, 0);
  if (validate(ctx, model, d, held)) return 2;
  while (bar.step < set.steps && !interrupted) {
    const batch *b = fill(d, (int64_t)(draw(0, bar.step, 0) % (uint64_t)(count - rows + 1)), rows);
    luna_begin_step(ctx);
    luna_tensor *loss = loss_of(model, b, 0.1f);
    luna_backward(loss);
    if (luna_optimizer_step(adam) != LUNA_OK) return failed(ctx);
    progress_step(&bar, (double)luna_item(loss), b->tokens);
    if (progress_due(&bar) && validate(ctx, model, d, held)) return 2;
  }
  return progress_end(&bar), 0;
}

static luna_status keep_vocab(luna_params *params, const byte_pairs *v) { /* in the checkpoint, as numbers */
  char *text = (char *)grow(NULL, v->pairs.size + 1, 12), *at = text + sprintf(text, " ");
  for (int64_t i = 0; i < v->pairs.size; i++)
    at += sprintf(at, "%d %d ", (int)first_of(v->pairs.entries[i].key), (int)second_of(v->pairs.entries[i].key));
  luna_status status = luna_params_set_text(params, "translate.pairs", text);
  if (status == LUNA_OK) status = luna_params_set_text(params, "translate.tokens", "pairs");
  return free(text), status;
}

static int train_on(luna_ctx *ctx, data *d, int64_t held) {
  luna_params *params = luna_params_open(ctx);
  luna_seq2seq model;
  luna_seq2seq_config config = {
    .vocab = d->v.end + 1, .share_embeddings = true,
    .encoder = { .layers = set.layers,
                 .layer = { .dim = set.dim, .heads = set.heads, .memory = set.memory, .ffn = set.ffn,
                            .pre_norm = true, .forget = LUNA_FORGET_GATED, .dropout = (float)set.dropout,
                            .attention_dropout = (float)set.dropout } }
  };
  if (luna_seq2seq_init(&model, params, &config) != LUNA_OK || keep_vocab(params, &d->v) != LUNA_OK) return failed(ctx);
  luna_optimizer *adam = luna_adamw(params, &(luna_optimizer_config){
    .lr = (float)set.lr, .beta2 = 0.98f, .weight_decay = 0.01f, .clip = 1,
    .schedule = { .decay = LUNA_DECAY_COSINE, .warmup = set.steps < 4000 ? set.steps / 10 : 400,
                  .total = set.steps } });
  if (!adam) return failed(ctx);
  printf("The model trains on %lld pairs and is validated on %lld. It has %d tokens and %lld parameters.\n",
         (long long)(d->count - held), (long long)held, (int)d->v.end + 1,
         (long long)luna_params_element_count(params));
  if (learn(ctx, &model, adam, d, held)) return 2;
  if (bar.step == 0) return fail("the training was stopped before its first step, so no model was written");
  if (luna_save(params, luna_path(set.out)) != LUNA_OK) return failed(ctx);
  if (!progress_due(&bar) && validate(ctx, &model, d, held)) return 2; /* of what has been saved */
  say("%s: Training made %lld steps in %.0f s%s.", set.out, (long long)bar.step, seconds() - bar.start,
      interrupted ? " and was stopped early" : "");
  return plot(&bar, "translation");
}

static int train(luna_ctx *ctx, const char **words) {
  data d = { .v = { .end = 256 } };
  ints units = { 0 };
  table seen = { 0 };
  if (read_pairs(&d, words[0], words[1])) return done(&d, 2);
  int64_t held = d.count / 20 < HELD ? d.count / 20 : HELD;
  for (int64_t i = 0; i < 2 * (d.count - held); i++) {
    const span t = d.pairs[i / 2].text[i % 2];             /* what is too long with the longest tokens is left out */
    if (t.size <= own.longest * UNIT) count_units(t, &units, &seen);
  }
  learn_pairs(&d.v, &units, own.vocab);
  encode_pairs(&d, own.longest, held);
  free(units.at), free(seen.entries), free(seen.buckets);
  if (held < 1 || d.count <= held)
    return done(&d, fail("only %lld pairs can be used; training and validation take at least 20", (long long)d.count));
  return done(&d, train_on(ctx, &d, held));
}

/* ---- eval, run --------------------------------------------------------------------------------------------------- */

/* A checkpoint, and the vocabulary in it. Returns 0, or 2 after a sentence. */
static int load(luna_ctx *ctx, luna_model *model, byte_pairs *v, const char *path) {
  luna_params *params = luna_params_open(ctx);
  if (luna_load_model(model, params, luna_path(path)) != LUNA_OK) return failed(ctx);
  const char *text = luna_params_get_text(params, "translate.pairs");
  if (model->kind != LUNA_MODEL_SEQ2SEQ || !text) return fail("%s is not a model that translate made", path);
  bool fine = read_vocab(v, text);
  fine = fine && model->seq2seq.config.vocab == v->end + 1 && model->seq2seq.config.target_vocab == v->end + 1;
  return fine ? 0 : fail("the vocabulary in %s is not one that translate wrote", path);
}

/* BLEU-4 of a corpus, one reference each, case kept, words split as mteval-v13a does. */
static struct { double found[4], grams[4], words[2]; } bleu;

static int64_t words_of(span t, uint64_t *out) { /* each as a hash */
  int64_t n = 0;
  bool inside = false;
  for (int64_t i = 0; i < t.size; i++) {
    int c = t.at[i];
    bool before = i > 0 && t.at[i - 1] >= '0' && t.at[i - 1] <= '9',
        after = i + 1 < t.size && t.at[i + 1] >= '0' && t.at[i + 1] <= '9';
    bool alone = c == '.' || c == ',' ? !(before && after) : c == '-' ? before : !in_word(c) && c != '\'';
    if (c > ' ' && (!inside || alone)) out[n++] = 1;
    if (c > ' ') out[n - 1] = (out[n - 1] ^ (uint64_t)c) * 1099511628211u;
    inside = c > ' ' && !alone;
  }
  return n;
}

static uint64_t gram(const uint64_t *words, int64_t order) { /* likewise */
  uint64_t hash = 0;
  for (int64_t i = 0; i < order; i++) hash = (hash ^ words[i]) * 1099511628211u;
  return hash;
}

static void score(const pair *p, span t) {
  uint64_t *words[2] = { (uint64_t *)grow(NULL, t.size + 1, sizeof(uint64_t)),
                        (uint64_t *)grow(NULL, p->text[1].size + 1, sizeof(uint64_t)) };
  int64_t n = words_of(t, words[0]), m = words_of(p->text[1], words[1]);
  bleu.words[0] += (double)n, bleu.words[1] += (double)m;
  for (int64_t order = 1; order <= 4; order++) {
    table left = { 0 };                                    /* an n-gram counts as often as the reference has it */
    for (int64_t i = 0; i + order <= m; i++) ++*value_of(&left, gram(words[1] + i, order));
    for (int64_t i = 0; i + order <= n; i++) {
      int64_t *times = value_of(&left, gram(words[0] + i, order));
      bleu.grams[order - 1]++;
      if (*times > 0) --*times, bleu.found[order - 1]++;
    }
    free(left.entries), free(left.buckets);
  }
  free(words[0]), free(words[1]);
}

static int eval(luna_ctx *ctx, const char **words) {
  luna_model model;
  data d = { .v = { .end = 256 } };
  double mean = 0, start = seconds();
  int status = load(ctx, &model, &d.v, words[0]) || read_pairs(&d, words[1], words[2]) ? 2 : 0;
  if (!status) encode_pairs(&d, INT32_MAX, 0);
  for (int64_t at = 0; at < d.count && !status; at += 32)
    status = translate(ctx, &model.seq2seq, &d, at, d.count - at < 32 ? d.count - at : 32, score);
  for (int i = 0; i < 4; i++) mean += log(bleu.found[i] / fmax(bleu.grams[i], 1)) / 4;
  const double brevity = bleu.words[0] < bleu.words[1] ? exp(1 - bleu.words[1] / fmax(bleu.words[0], 1)) : 1;
  if (!status)
    say("%s has BLEU %.2f (13a words, brevity %.3f) with beam %lld. It translated %lld lines in %.1f s.", words[0],
        100 * brevity * exp(mean), brevity, (long long)own.beam, (long long)d.count, seconds() - start);
  return done(&d, status);
}

static void put_line(const pair *p, span t) {
  printf("%.*s\n", (int)t.size, (const char *)t.at), fflush(stdout), (void)p;
}

static int run(luna_ctx *ctx, const char **words) {
  luna_model model;
  data d = { .v = { .end = 256 } };
  span line;
  int status = load(ctx, &model, &d.v, words[0]);
  while (!status && !ferror(stdout) && (line.at = typed_line(&line.size)) != NULL) {
    d.count = d.tokens.size = 0;
    add(&d, line, (span){ line.at, 0 });
    encode_pairs(&d, INT32_MAX, 0);
    status = translate(ctx, &model.seq2seq, &d, 0, 1, put_line);
  }
  if (!status && (fflush(stdout) != 0 || ferror(stdout)))
    status = fail("cannot write the translations: %s", strerror(errno));
  return done(&d, status);
}

#define SOURCE_FILE "source: A text a line; without a target, each line has a source, a tab and a target."
#define TARGET_FILE "?target: The translation of each line."
#define MODEL_FILE "model: A file that train wrote."
static const command commands[] = {
  { "train", { SOURCE_FILE, TARGET_FILE }, "Trains a translator on pairs of lines.", train,
    "train.en train.de --out de.safetensors" },
  { "eval", { MODEL_FILE, SOURCE_FILE, TARGET_FILE }, "Measures the BLEU of a model's translations.", eval,
    "de.safetensors test.en test.de --beam 5" },
  { "run", { MODEL_FILE }, "Translates each line of the input.", run, "de.safetensors --beam 5 <lines.en" },
  { 0 }
};

int main(int count, char **given) { return example("translate", commands, flags, count, given); }
