/* arena: compares Luna with the systems that papers compare it with, side by side: steps per second and memory,
   relative to the Transformer.

     cc -O2 -I. examples/arena.c -o arena -lm -lpthread

     arena table [FILE] [--plot arena.svg] [--seconds X] ...
       prints Table 2 of arXiv 2106.01540v2 as Markdown: byte-level text, batch 1, 1K to 4K tokens, and 16K where the
       cost is linear; the paper's numbers are in brackets
     arena one SYSTEM [FILE] [--window N] ...
       measures one system: softmax, luna or a line such as "performer features=64" (attentions/attentions.h)
     arena ablate [FILE] [--steps N] ...
       trains variants of Luna, with contextual and own P, other l, sharing and pooling, and prints their loss,
       accuracy, speed and memory

   FILE is any file; without it luna.h is read. A training step is forward, backward and SGD, so that the memory is
   that of the activations. The models of the first table classify a text by the mean of X. (If they pooled P, Luna
   would not compute all of its last layer.) The models of the second table are causal and continue the text. The
   Transformer here stores no scores. The memory that scores would take is computed and stands beside it. */
#define LUNA_IMPLEMENTATION
#include "luna.h"

#include "common/example.h"
#include "attentions/attentions.h"

static struct settings set = { .out = "luna.h", .steps = 5, .layers = 2, .dim = 256, .heads = 4, .memory = 16,
                              .ffn = 1024, .lr = 1e-2, .seed = 1 };
static struct { const char *svg; int64_t tokens, causal; double one_seconds, table_seconds; } own =
    { .tokens = 4096, .one_seconds = 8, .table_seconds = 600 };

static const flag flags[] = {
  { "--plot", "t", WRITES(own.svg), "Draws a picture in FILE, as SVG. It shows the table at --window." },
  { "--window", "to", WHOLE(own.tokens, 4, 1 << 20),
   "Reads N tokens or steps at once. table also reads a quarter, half, three quarters and four times as many." },
  { "--causal", "o", SWITCH(own.causal),
   "Lets each step see itself and earlier ones alone. It chooses this form of systems that have both." },
  { "--steps", "toa", WHOLE(set.steps, 1, 1e6),
   "Makes N optimiser steps. They are timed, after one that is not; ablate makes a hundred times as many." },
  { "--seconds", "o", REAL(own.one_seconds, 0.01, 1e6), "Takes at most X seconds. one makes fewer steps if it must." },
  { "--seconds", "t", REAL(own.table_seconds, 0.01, 1e6),
   "Takes at most X seconds. table makes fewer steps if it must, but at least one at each length." },
  FLAGS_SIZES("toa"),
  FLAG_SEED("toa"),
  FLAG_THREADS("toa"),
  { 0 }
};

/* ---- the systems, with what the paper's Table 2 has of them ---- */
#define LENGTHS 4                    /* and a longer one, where cost is linear */
typedef struct row {
  /* an attention of attentions.h, with at most one "%d": tokens / divisor; or null: */
  const char *title, *system;
  int divisor;
  luna_attention_kind kind;
  int64_t memory;                    /* Luna's l */
  bool linear;
  double speed[LENGTHS], bytes[LENGTHS];
  /* language models: tokens of a segment, whose memory the next one reads; 0: all at once */
  int64_t segment;
} row;
static const row classifiers[] = {
  { "Transformer", NULL, 0, LUNA_ATTENTION_SOFTMAX, 0, false, { 1, 1, 1, 1 }, { 1, 1, 1, 1 }, 0 },
  { "Local", "local window=50", 0, 0, 0, true, { 1.1, 1.7, 3.2, 5.3 }, { 0.49, 0.29, 0.19, 0.14 }, 0 },
  { "Linformer", "linformer k=%d", 1, 0, 0, true, { 1.2, 1.9, 3.7, 5.5 }, { 0.44, 0.21, 0.18, 0.10 }, 0 },
  { "Reformer", "reformer buckets=%d", 32, 0, 0, true, { 0.5, 0.4, 0.7, 0.8 }, { 0.56, 0.37, 0.28, 0.24 }, 0 },
  { "Sinkhorn", "sinkhorn max_blocks=%d", 64, 0, 0, true, { 1.1, 1.6, 2.9, 3.8 }, { 0.55, 0.31, 0.21, 0.16 }, 0 },
  { "Synthesizer", "synthesizer terms=dot+random length=%d", 1, 0, 0, false, { 1.1, 1.2, 2.9, 1.4 },
   { 0.76, 0.75, 0.74, 0.74 }, 0 },
  { "BigBird", "bigbird max_blocks=%d", 64, 0, 0, true, { 0.9, 0.8, 1.2, 1.1 }, { 0.91, 0.56, 0.40, 0.30 }, 0 },
  { "Linear Transformer", NULL, 0, LUNA_ATTENTION_LINEAR, 0, true, { 1.1, 1.9, 3.7, 5.6 }, { 0.44, 0.22, 0.15, 0.11 },
   0 },
  { "Performer, relu as LRA ran it", "performer kernel=relu features=0", 0, 0, 0, true, { 1.2, 1.9, 3.8, 5.7 },
   { 0.44, 0.22, 0.15, 0.11 }, 0 },
  { "Performer, 256 features", "performer", 0, 0, 0, true, { 0 }, { 0 }, 0 },
  { "Luna-16", NULL, 0, LUNA_ATTENTION_LUNA, 16, true, { 1.2, 1.8, 3.7, 5.5 }, { 0.44, 0.23, 0.17, 0.10 }, 0 },
  { "Luna-128", NULL, 0, LUNA_ATTENTION_LUNA, 128, true, { 1.1, 1.7, 3.4, 5.1 }, { 0.49, 0.28, 0.21, 0.14 }, 0 },
  { "Luna-256", NULL, 0, LUNA_ATTENTION_LUNA, 256, true, { 1.1, 1.7, 3.3, 4.9 }, { 0.60, 0.33, 0.23, 0.16 }, 0 },
  { "RFA", "rfa", 0, 0, 0, true, { 0 }, { 0 }, 0 },
  { "Longformer", "longformer", 0, 0, 0, true, { 0 }, { 0 }, 0 },
  { "Shared Workspace", "workspace", 0, 0, 0, true, { 0 }, { 0 }, 0 },
  { "ISAB", "isab", 0, 0, 0, true, { 0 }, { 0 }, 0 },
};
static const row writers[] = {
  { "Transformer", NULL, 0, LUNA_ATTENTION_SOFTMAX, 0, false, { 0 }, { 0 }, 0 },
  { "Luna-16", NULL, 0, LUNA_ATTENTION_LUNA, 16, true, { 0 }, { 0 }, 0 },
  { "Linear Transformer", NULL, 0, LUNA_ATTENTION_LINEAR, 0, true, { 0 }, { 0 }, 0 },
  { "Performer", "performer", 0, 0, 0, true, { 0 }, { 0 }, 0 },
  { "RFA, gated", "rfa gate=true", 0, 0, 0, true, { 0 }, { 0 }, 0 },
  { "Local, two blocks", "local window=128 backward=1", 0, 0, 0, true, { 0 }, { 0 }, 0 },
  { "Sparse Transformer", "sparse", 0, 0, 0, true, { 0 }, { 0 }, 0 },
  { "Reformer", "reformer buckets=%d", 32, 0, 0, true, { 0 }, { 0 }, 0 },
  { "Sinkhorn", "sinkhorn max_blocks=%d", 64, 0, 0, true, { 0 }, { 0 }, 0 },
  { "Transformer-XL", "transformer_xl memory=512", 0, 0, 0, true, { 0 }, { 0 }, 512 },
  { "Compressive Transformer", "compressive memory=512 compressed=512", 0, 0, 0, true, { 0 }, { 0 }, 512 },
};
#define COUNT(list) ((int)(sizeof(list) / sizeof(list)[0]))

/* ---- one system at one length ---- */
/* steps a second, by the fastest; bytes at the most; rate 0: not run */
typedef struct result { double rate, bytes, loss; } result;
typedef struct contest {
  luna_ctx *ctx;
  luna_params *params;
  luna_optimizer *sgd;
  attentions choice;
  luna_classifier classifier;
  luna_lm lm;
} contest;

static void options_at(const row *r, int64_t n, char *out, size_t size) {
  const char *at = r->system ? strstr(r->system, "%d") : NULL;
  int64_t count = at ? (n + r->divisor - 1) / r->divisor : 0;
  if (r->system && strncmp(r->system, "linformer", 9) == 0) count = n < 256 ? n : 256;
  else count += count % 2; /* buckets are even */
  if (!at) snprintf(out, size, "%s", r->system ? r->system : "");
  else snprintf(out, size, "%.*s%lld", (int)(at - r->system), r->system, (long long)count);
}
static bool contest_open(contest *c, const row *r, int64_t n, bool writer) {
  const luna_layer_config layer = { .dim = set.dim, .heads = set.heads, .memory = r->memory, .ffn = set.ffn,
                                   .attention = r->kind, .pre_norm = true };
  char name[160];
  *c = (contest){ 0 };
  c->ctx = luna_open(&(luna_options){ .threads = (int)set.threads, .seed = (uint64_t)set.seed });
  c->params = luna_params_open(c->ctx);
  options_at(r, n, name, sizeof name);
  if (r->system && !attentions_open(&c->choice, name)) return fail("%s", c->choice.error), false;
  luna_lm_config lm = { .layers = set.layers, .layer = layer, .positions = LUNA_POSITIONS_SINUSOIDAL };
  luna_classifier_config classifier = { .pooling = LUNA_POOLING_MEAN,
      .encoder = { .layers = set.layers, .max_length = n, .layer = layer } };
  if (r->system) lm.layer.hook = classifier.encoder.layer.hook = &c->choice.hook;
  if (writer ? luna_lm_init(&c->lm, c->params, &lm) : luna_classifier_init(&c->classifier, c->params, &classifier))
    return failed(c->ctx), false;
  c->sgd = luna_sgd(c->params, &(luna_optimizer_config){ .lr = (float)set.lr });
  return c->sgd || (failed(c->ctx), false);
}
static void contest_close(contest *c) {
  luna_close(c->ctx);
  if (c->choice.system) attentions_close(&c->choice);
}
/* the memories that the last segment left, as the next one's; host[i]: what carries them over the begin */
static bool carry(contest *c, float **host, bool begin) {
  int i = 0;
  for (attention *a = c->choice.layers; a; a = a->next, i += 2) {
    luna_tensor **from[2] = { &a->next_memory, &a->next_compressed }, **to[2] = { &a->memory, &a->compressed };
    for (int k = 0; k < 2; k++) {
      if (!begin) {
        const luna_tensor *t = *from[k];
        host[i + k] = (float *)realloc(host[i + k], (size_t)(luna_count(t) + 3) * sizeof(float));
        if (!host[i + k] || (t && luna_read(t, host[i + k] + 3) != LUNA_OK)) return false;
        host[i + k][0] = t ? (float)t->shape[1] : 0;
      } else {
        const int64_t shape[3] = { 1, host[i + k] ? (int64_t)host[i + k][0] : 0, set.dim };
        *to[k] = shape[1] ? luna_tensor_new(c->ctx, host[i + k] + 3, 3, shape) : NULL;
      }
    }
  }
  return true;
}
static bool step(contest *c, const row *r, const int32_t *bytes, int64_t n, bool writer, double *value) {
  const int64_t segment = r->segment && r->segment < n ? r->segment : n;
  float **host = (float **)calloc((size_t)(2 * set.layers), sizeof(float *));
  bool fine = host != NULL;
  const int32_t label = bytes[0] & 1;
  for (int64_t at = 0; fine && at + segment <= n; at += segment) { /* gradients of the segments accumulate */
    const luna_input input = { .tokens = bytes + at, .batch = 1, .n = segment };
    luna_begin_step(c->ctx);
    fine = carry(c, host, true);
    luna_tensor *loss = writer ? luna_lm_loss(&c->lm, &input, bytes + at + 1) :
        luna_cross_entropy(luna_classifier_forward(&c->classifier, &input), &label, NULL);
    if (c->choice.system) loss = attentions_loss(&c->choice, loss);
    fine = fine && luna_backward(loss) == LUNA_OK && carry(c, host, false);
    *value = luna_item(loss);
  }
  for (int64_t i = 0; host && i < 2 * set.layers; i++) free(host[i]);
  free(host);
  return fine && luna_optimizer_step(c->sgd) == LUNA_OK;
}
/* allowed: the seconds that the steps should take together */
static int measure(const row *r, const contents *text, int64_t n, bool writer, double allowed, result *out) {
  int32_t *bytes = (int32_t *)malloc((size_t)(n + 1) * sizeof(int32_t));
  contest c;
  if (!bytes) return fail("out of memory");
  for (int64_t i = 0; i <= n; i++) bytes[i] = text->data[i % text->size];
  const bool opened = contest_open(&c, r, n, writer);
  bool fine = opened;
  const double begun = seconds();
  double best = 1e30, last = 0, now = begun;
  for (int64_t i = 0; fine && i <= set.steps && (i == 0 || now - begun + last < allowed); i++) {
    fine = step(&c, r, bytes, n, writer, &out->loss);
    last = seconds() - now;
    now += last;
    /* the fastest: other programs may run; the first grows the context's memory */
    if (i == 1 || last < best) best = last;
  }
  out->rate = 1 / (best > 1e-9 ? best : 1e-9);
  out->bytes = (double)luna_memory(c.ctx).peak;
  if (opened && !fine) failed(c.ctx);
  contest_close(&c);
  free(bytes);
  return fine ? 0 : 2;
}

/* ---- the table ---- */
typedef struct results { result at[LENGTHS + 1]; } results;
static int64_t length(int l) { return own.tokens * (l < LENGTHS ? l + 1 : 4 * LENGTHS) / LENGTHS; }
static phrase length_name(int l) {
  phrase out;
  const int64_t n = length(l);
  snprintf(out.text, sizeof out.text, n % 1024 ? "%lld" : "%lldK", (long long)(n % 1024 ? n : n / 1024));
  return out;
}
static double scores(int64_t n) {
  return (double)set.layers * (double)set.heads * (double)n * (double)n * sizeof(float);
}

static void print_cell(double ours, double paper) {
  if (paper > 0 && own.tokens == 4096) printf(" %.2f (%.2f) |", ours, paper);
  else printf(" %.2f |", ours);
}
static void print_head(const char *what, const char *last) {
  printf("\n| %s |", what);
  for (int l = 0; l < LENGTHS; l++) printf(" %s |", length_name(l).text);
  printf(" %s, %s |\n|---|---|---|---|---|---|\n", length_name(LENGTHS).text, last);
}
static void print_tables(const row *rows, const results *all, int count) {
  print_head("steps per second, relative to the Transformer", "steps per second");
  for (int i = 0; i < count; i++) {
    printf("| %s |", rows[i].title);
    for (int l = 0; l < LENGTHS; l++) print_cell(all[i].at[l].rate / all[0].at[l].rate, rows[i].speed[l]);
    if (all[i].at[LENGTHS].rate > 0) printf(" %.2f |\n", all[i].at[LENGTHS].rate);
    else printf(" |\n");
  }
  for (int stored = 0; stored < 2; stored++) {
    print_head(stored ? "peak memory, relative to a Transformer that stores its scores" :
               "peak memory, relative to the Transformer", "MB");
    for (int i = 0; i < count; i++) {
      printf("| %s |", rows[i].title);
      for (int l = 0; l < LENGTHS; l++)
        print_cell(all[i].at[l].bytes / (all[0].at[l].bytes + (stored ? scores(length(l)) : 0)),
                   stored && i ? rows[i].bytes[l] : 0);
      if (all[i].at[LENGTHS].rate > 0) printf(" %.0f |\n", all[i].at[LENGTHS].bytes / 1e6);
      else printf(" |\n");
    }
  }
  printf("\nThe Transformer:");
  for (int l = 0; l < LENGTHS; l++)
    printf(" %s: %.2f steps per second, %.0f MB, and %.0f MB of scores%s", length_name(l).text, all[0].at[l].rate,
           all[0].at[l].bytes / 1e6, scores(length(l)) / 1e6, l < LENGTHS - 1 ? ";" : ".\n");
}
/* tokens of `count` rows; each takes its share of the time that is left */
static double tokens_of(const row *rows, int count) {
  double sum = 0;
  for (int i = 0; i < count; i++)
    for (int l = 0; l < LENGTHS + rows[i].linear; l++) sum += (double)length(l);
  return sum;
}
static int run_rows(const row *rows, int count, const contents *text, bool writer, double end, double *tokens,
                    results *all) {
  for (int i = 0; i < count; i++)
    for (int l = 0; l < LENGTHS + rows[i].linear; l++) {
      const double n = (double)length(l), allowed = (end - seconds()) * n / *tokens;
      result *r = &all[i].at[l];
      if (measure(&rows[i], text, length(l), writer, allowed, r))
        return fail("%s failed at %.0f tokens", rows[i].title, n);
      *tokens -= n;
      fprintf(stderr, "%s%s, %.0f tokens: %.2f steps per second, %.0f MB, loss %.3f; at most %.0f s are left.\n",
              rows[i].title, writer ? " (causal)" : "", n, r->rate, r->bytes / 1e6, r->loss, end - seconds());
    }
  return 0;
}

/* one bar a system, at the last of LENGTHS, on a logarithmic axis from 1/16 to 16; the paper's number as a ring */
static double place(double ratio) {
  return 330 + 38 * (ratio > 0 ? log2(ratio < 1 / 32.0 ? 1 / 32.0 : ratio > 16 ? 16 : ratio) : 0);
}
static void draw_panel(FILE *to, const results *all, double top, bool speed) {
  fprintf(to, "<text x='10' y='%.0f' font-weight='bold'>%s at %s tokens, relative to the Transformer%s</text>\n", top,
          speed ? "steps per second" : "peak memory", length_name(LENGTHS - 1).text,
          speed ? "" : " with stored scores");
  for (int tick = -4; tick <= 3; tick++)
    fprintf(to, "<text x='%.0f' y='%.0f' fill='#777' text-anchor='middle'>%s%d</text>"
                "<path d='M%.0f %.0f v%d' stroke='#ddd'/>\n",
            place(pow(2, tick)), top + 18, tick < 0 ? "1/" : "", 1 << (tick < 0 ? -tick : tick), place(pow(2, tick)),
            top + 22, 20 * COUNT(classifiers));
  for (int i = 0; i < COUNT(classifiers); i++) {
    const result *r = &all[i].at[LENGTHS - 1], *base = &all[0].at[LENGTHS - 1];
    const double ours = speed ? r->rate / base->rate : r->bytes / (base->bytes + scores(length(LENGTHS - 1))),
        y = top + 26 + 20 * i;
    const double paper = speed ? classifiers[i].speed[LENGTHS - 1] : i ? classifiers[i].bytes[LENGTHS - 1] : 0;
    const double from = place(ours < 1 ? ours : 1), end = place(ours < 1 ? 1 : ours);
    fprintf(to, "<text x='10' y='%.0f'>%s</text><rect x='%.1f' y='%.0f' width='%.1f' height='12' fill='%s'/>\n", y + 10,
            classifiers[i].title, from, y, end - from + 1,
            strncmp(classifiers[i].title, "Luna", 4) == 0 ? "#c33" : "#48a");
    if (paper > 0 && own.tokens == 4096)
      fprintf(to, "<circle cx='%.1f' cy='%.0f' r='5' fill='none' stroke='#000'/>\n", place(paper), y + 6);
    fprintf(to, "<text x='490' y='%.0f'>%.2f</text>\n", y + 10, ours);
  }
}
static int draw_table(const results *all) {
  const double height = 60 + 20 * COUNT(classifiers);
  new_file file;
  FILE *to = file_begin(&file, own.svg);
  if (!to) return 2;
  fprintf(to, "<svg xmlns='http://www.w3.org/2000/svg' width='540' height='%.0f' font-family='sans-serif' "
              "font-size='12'>\n<rect width='100%%' height='100%%' fill='#fff'/>\n", 2 * height + 20);
  draw_panel(to, all, 20, true);
  draw_panel(to, all, 20 + height, false);
  fprintf(to, "<text x='10' y='%.0f' fill='#777'>bars: measured here; rings: the paper's Table 2</text>\n</svg>\n",
          2 * height + 12);
  return file_end(&file);
}

static int table_command(luna_ctx *ctx, const char **words) {
  results first[COUNT(classifiers)], second[COUNT(writers)];
  contents text;
  const double begun = seconds(), end = begun + own.table_seconds;
  double tokens = tokens_of(classifiers, COUNT(classifiers)) + tokens_of(writers, COUNT(writers));
  warn_if_busy();
  (void)ctx;
  if (!words[0] && own.svg && same_file(own.svg, set.out))
    return fail("--plot %s would overwrite the text itself", own.svg);
  memset(first, 0, sizeof first), memset(second, 0, sizeof second);
  if (read_file(words[0] ? words[0] : set.out, &text)) return 2;
  int status = run_rows(classifiers, COUNT(classifiers), &text, false, end, &tokens, first);
  if (!status) status = run_rows(writers, COUNT(writers), &text, true, end, &tokens, second);
  free(text.data);
  if (status) return status;
  printf("# Speed and memory, byte-level text, batch 1\n\n"
         "%lld layers, d %lld, %lld heads, feed-forward %lld; in brackets Table 2 of arXiv 2106.01540v2, whose ten "
         "other systems are LRA's numbers on TPUs.\n\n## Classifiers\n",
         (long long)set.layers, (long long)set.dim, (long long)set.heads, (long long)set.ffn);
  print_tables(classifiers, first, COUNT(classifiers));
  printf("\n## Language models\n");
  print_tables(writers, second, COUNT(writers));
  printf("\nThe tables took %.0f s in all.\n", seconds() - begun);
  return own.svg ? draw_table(first) : 0;
}

static int one_command(luna_ctx *ctx, const char **words) {
  row r = { words[0], words[0], 0, LUNA_ATTENTION_LUNA, set.memory, false, { 0 }, { 0 }, 0 };
  contents text;
  result out;
  attentions a;
  (void)ctx;
  if (strcmp(words[0], "luna") == 0) r.system = NULL;
  if (strcmp(words[0], "softmax") == 0) r.system = NULL, r.kind = LUNA_ATTENTION_SOFTMAX;
  if (r.system && !attentions_open(&a, r.system)) return fail("%s", a.error);
  const bool writer = own.causal || (r.system && !a.system->bidirectional);
  if (r.system) attentions_close(&a);
  if (read_file(words[1] ? words[1] : set.out, &text)) return 2;
  const int status = measure(&r, &text, own.tokens, writer, own.one_seconds, &out);
  free(text.data);
  if (!status)
    say("%s reads %lld tokens at %.3f steps per second in %.1f MB. Its loss is %.3f.", words[0], (long long)own.tokens,
        out.rate, out.bytes / 1e6, out.loss);
  return status;
}

/* ---- ablations of Luna: which half of the file is a window of its bytes from? ---- */
typedef struct variant {
  const char *title; int64_t memory; bool own_memory; luna_sharing sharing; luna_pooling pooling;
} variant;
static const variant variants[] = {
  { "Luna-16: P from layer to layer, tied K and V, pools P", 16, false, LUNA_SHARING_TIED, LUNA_POOLING_MEMORY },
  { "each layer's own P, pools X", 16, true, LUNA_SHARING_TIED, LUNA_POOLING_MEAN },
  { "pools the mean of X", 16, false, LUNA_SHARING_TIED, LUNA_POOLING_MEAN },
  { "pools X of the first byte", 16, false, LUNA_SHARING_TIED, LUNA_POOLING_CLS },
  { "l = 1", 1, false, LUNA_SHARING_TIED, LUNA_POOLING_MEMORY },
  { "l = 4", 4, false, LUNA_SHARING_TIED, LUNA_POOLING_MEMORY },
  { "l = 64", 64, false, LUNA_SHARING_TIED, LUNA_POOLING_MEMORY },
  { "own K and V projections", 16, false, LUNA_SHARING_FULL, LUNA_POOLING_MEMORY },
  { "no key projection", 16, false, LUNA_SHARING_NO_KEY, LUNA_POOLING_MEMORY },
  { "keys shared with queries", 16, false, LUNA_SHARING_QK, LUNA_POOLING_MEMORY },
};
enum { WINDOW = 512, BATCH = 4, HELD = 200, SPAN = 4096 };
/* windows of both halves, from all but every tenth span, or, held, from that; labels: which half */
static void windows(const contents *text, bool held, int64_t step_number, int32_t *tokens, int32_t *labels) {
  const int64_t half = text->size / 2, tens = half / SPAN / 10;
  for (int b = 0; b < BATCH; b++) {
    const uint64_t random = draw(held, step_number, b);
    const int64_t pick = (int64_t)((random >> 1) % (uint64_t)(tens * (held ? 1 : 9))),
        span = held ? 10 * pick + 9 : pick / 9 * 10 + pick % 9;
    labels[b] = (int32_t)(random & 1);
    const int64_t at = labels[b] * half + span * SPAN + (int64_t)((random >> 32) % (SPAN - WINDOW + 1));
    for (int64_t i = 0; i < WINDOW; i++) tokens[b * WINDOW + i] = text->data[at + i];
  }
}
static int ablation(const variant *v, const contents *text) {
  luna_ctx *ctx = luna_open(&(luna_options){ .threads = (int)set.threads, .seed = (uint64_t)set.seed });
  luna_params *params = luna_params_open(ctx);
  luna_classifier model;
  int32_t tokens[BATCH * WINDOW], labels[BATCH];
  const luna_input input = { .tokens = tokens, .batch = BATCH, .n = WINDOW };
  const int64_t steps = 100 * set.steps;
  double loss = 0, right = 0, begun;
  luna_classifier_config c = { .pooling = v->pooling, .encoder = { .layers = set.layers,
    .layer = { .dim = set.dim / 4, .heads = set.heads, .memory = v->memory, .ffn = set.ffn / 4,
               .sharing = v->sharing, .pre_norm = true, .own_memory = v->own_memory } } };
  if (luna_classifier_init(&model, params, &c) != LUNA_OK) return failed(ctx);
  luna_optimizer *adam = luna_adamw(params, &(luna_optimizer_config){ .lr = 1e-3f });
  if (!adam) return failed(ctx);
  begun = seconds();
  for (int64_t i = 0; i < steps; i++) {
    windows(text, false, i, tokens, labels);
    luna_begin_step(ctx);
    luna_backward(luna_cross_entropy(luna_classifier_forward(&model, &input), labels, NULL));
    if (luna_optimizer_step(adam) != LUNA_OK) return failed(ctx);
  }
  const double rate = (double)steps / (seconds() - begun), bytes = (double)luna_memory(ctx).peak;
  for (int64_t i = 0; i < HELD; i++) {
    float logits[2 * BATCH];
    windows(text, true, i, tokens, labels);
    luna_begin_inference(ctx);
    luna_tensor *out = luna_classifier_forward(&model, &input);
    loss += (double)luna_item(luna_cross_entropy(out, labels, NULL)) / HELD;
    if (!isfinite(loss) || luna_read(out, logits) != LUNA_OK) return failed(ctx);
    for (int b = 0; b < BATCH; b++) right += (logits[2 * b + 1] > logits[2 * b]) == labels[b];
  }
  printf("| %s | %.3f | %.1f%% | %.1f | %.1f |\n", v->title, loss, 100 * right / (HELD * BATCH), rate, bytes / 1e6);
  fflush(stdout);
  luna_close(ctx);
  return 0;
}
static int ablate_command(luna_ctx *ctx, const char **words) {
  contents text;
  int status = 0;
  (void)ctx;
  if (read_file(words[0] ? words[0] : set.out, &text)) return 2;
  if (text.size < 20 * SPAN)
    return free(text.data), fail("the text is too short: it has %lld bytes of the %d that are needed",
                                 (long long)text.size, 20 * SPAN);
  printf("# Luna's parts, %lld steps of %d windows of %d bytes: which half of the file are they from?\n\n"
         "| variant | loss | right | steps per second | MB |\n|---|---|---|---|---|\n", (long long)(100 * set.steps),
         BATCH, WINDOW);
  for (int i = 0; i < COUNT(variants) && !status; i++) status = ablation(&variants[i], &text);
  return free(text.data), status;
}

#define TEXT_FILE "?text: Any file. Its bytes are the tokens. Without it luna.h is read."
#define SYSTEM_WORD "system: It is luna, softmax or a line of attentions/attentions.h, such as performer."
static const command commands[] = {
  { "table", { TEXT_FILE }, "Times all systems, by default at 1K to 4K and at 16K tokens.", table_command,
    "luna.h --plot arena.svg" },
  { "one", { SYSTEM_WORD, TEXT_FILE }, "Times one system.", one_command, "\"performer features=64\" --window 4096" },
  { "ablate", { TEXT_FILE }, "Trains Luna without one of its parts at a time.", ablate_command, "luna.h --steps 5" },
  { 0 }
};
int main(int count, char **given) { return example("arena", commands, flags, count, given); }
