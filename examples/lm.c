/* lm: a byte-level causal Luna language model: it reads a text, learns to continue it, and writes in its manner.

     cc -O2 -I. examples/lm.c -o lm -lm -lpthread

     lm train FILE [--out M] [--steps N] [--seed S] [--threads T] ...   learns FILE, all but its last tenth, and writes M
     lm generate M [--prompt "..."] [--bytes N] [--temperature T] ...   writes on from the prompt, in constant memory
     lm eval M FILE                                                     how well M foretells FILE, in bits per byte

   Ctrl-C ends the training early and keeps what has been learnt. */
#define LUNA_IMPLEMENTATION
#include "luna.h"

#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#ifdef _WIN32
#include <io.h>
static bool on_terminal(void) { return _isatty(1) != 0; }
static double seconds(void) { return (double)clock() / CLOCKS_PER_SEC; } /* wall time there */
#else
#include <sys/time.h>
#include <unistd.h>
static bool on_terminal(void) { return isatty(1) != 0; }
static double seconds(void) {
  struct timeval now;
  gettimeofday(&now, NULL);
  return (double)now.tv_sec + 1e-6 * (double)now.tv_usec;
}
#endif

#define LN2 0.69314718055994530942
#define SAMPLE 400                   /* bytes of the samples that training shows */
#define PROMPT 60                    /* bytes of the text, at most, that they go on from */
#define VALIDATION 1024              /* of a long text's last tenth, training measures about this many windows, evenly spread */

/* ---- the command line ---------------------------------------------------------------------------------------------- */

static struct {
  const char *out, *prompt;
  int64_t steps, batch, window, layers, dim, heads, memory, ffn, convolution, bytes, top_k, seed, threads;
  double lr, dropout, temperature;
} set = {
  .out = "lm.safetensors", .prompt = "\n",
  .steps = 3000, .batch = 4, .window = 256,
  .layers = 2, .dim = 128, .heads = 4, .memory = 16, .ffn = 512, .convolution = 4,
  .bytes = 1000, .seed = 1,
  .lr = 5e-3, .temperature = 0.8
};

static const struct flag {
  const char *name, *commands;       /* commands that take it, by their first letters */
  const char **text;                 /* where its value goes: one of these three */
  int64_t *whole;
  double *real;
  double least, most;
  const char *help;
} flags[] = {
  { "--out", "t", &set.out, NULL, NULL, 0, 0, "file to write the model to" },
  { "--steps", "t", NULL, &set.steps, NULL, 1, 1e9, "optimiser steps" },
  { "--batch", "t", NULL, &set.batch, NULL, 1, 65536, "windows of text a step" },
  { "--window", "te", NULL, &set.window, NULL, 1, 1e6, "bytes a window" },
  { "--lr", "t", NULL, NULL, &set.lr, 1e-9, 10, "greatest learning rate" },
  { "--layers", "t", NULL, &set.layers, NULL, 1, 1000, "layers" },
  { "--dim", "t", NULL, &set.dim, NULL, 1, 65536, "width of the model, d" },
  { "--heads", "t", NULL, &set.heads, NULL, 1, 65536, "attention heads; they divide d" },
  { "--memory", "t", NULL, &set.memory, NULL, 1, 65536, "memory slots, l" },
  { "--ffn", "t", NULL, &set.ffn, NULL, 1, 1e6, "width of the feed-forward" },
  { "--convolution", "t", NULL, &set.convolution, NULL, 0, 64, "bytes that the short convolution sees, 0 for none" },
  { "--dropout", "t", NULL, NULL, &set.dropout, 0, 0.95, "probability" },
  { "--prompt", "g", &set.prompt, NULL, NULL, 0, 0, "text to write on from" },
  { "--bytes", "g", NULL, &set.bytes, NULL, 0, 1e18, "how much to write, 0 for no end" },
  { "--temperature", "g", NULL, NULL, &set.temperature, 1e-3, 100, "lower is safer, higher is wilder" },
  { "--top-k", "g", NULL, &set.top_k, NULL, 0, 256, "choose among the k likeliest bytes, 0 for all" },
  { "--seed", "tg", NULL, &set.seed, NULL, 0, 9e15, "the same seed gives the same result" },
  { "--threads", "tge", NULL, &set.threads, NULL, 0, 1024, "0 for one a core; any number gives the same result" }
};
#define FLAGS (sizeof flags / sizeof flags[0])

static int fail(const char *format, ...) {
  va_list list;
  va_start(list, format);
  fflush(stdout);
  fprintf(stderr, "lm: ");
  vfprintf(stderr, format, list);
  fprintf(stderr, "\n");
  va_end(list);
  return 2;
}

static void usage(FILE *to) {
  fprintf(to, "lm train FILE [flags]     learns a text and writes a model\n"
              "lm generate M [flags]     writes on from a prompt\n"
              "lm eval M FILE [flags]    bits per byte of FILE\n\n");
  for (const struct flag *flag = flags; flag < flags + FLAGS; flag++) {
    fprintf(to, "  %-14s %-4s %s", flag->name, flag->commands, flag->help);
    if (flag->whole) fprintf(to, " (%lld)\n", (long long)*flag->whole);
    if (flag->real) fprintf(to, " (%g)\n", *flag->real);
    if (flag->text) fprintf(to, flag->text == &set.out ? " (%s)\n" : " (a line break)\n", set.out);
  }
}

static int set_flag(const struct flag *flag, const char *value) {
  if (flag->text) return *flag->text = value, 0;
  char *end;
  double number = strtod(value, &end);
  if (end == value || *end || !(number >= flag->least && number <= flag->most) || (flag->whole && (double)(int64_t)number != number))
    return fail("%s takes a %snumber from %.15g to %.15g, not '%s'", flag->name, flag->whole ? "whole " : "", flag->least, flag->most, value);
  if (flag->whole) *flag->whole = (int64_t)number;
  else *flag->real = number;
  return 0;
}

/* Flags go to `set`, the other words, of which there must be `places`, to words. Returns 0, or 2 after a sentence. */
static int parse(int count, char **given, char command, const char **words, int places) {
  int found = 0;
  for (int i = 0; i < count; i++) {
    if (strncmp(given[i], "--", 2) != 0) {
      if (found == places) return fail("'%s' is one word too many; see lm --help", given[i]);
      words[found++] = given[i];
      continue;
    }
    const struct flag *flag = flags;
    while (flag < flags + FLAGS && (strcmp(flag->name, given[i]) != 0 || !strchr(flag->commands, command))) flag++;
    if (flag == flags + FLAGS) return fail("this command has no flag %s; see lm --help", given[i]);
    if (++i == count) return fail("%s needs a value after it", flag->name);
    if (set_flag(flag, given[i])) return 2;
  }
  if (found == places) return 0;
  return fail("the %s file is missing; see lm --help", command != 't' && found == 0 ? "model" : "text");
}

/* ---- files --------------------------------------------------------------------------------------------------------- */

typedef struct text { int32_t *bytes; int64_t size; } text; /* one number a byte, as models take them */

static int read_text(const char *path, text *t) {
  unsigned char block[4096];
  size_t got, room = 0;
  bool fits = true;
  FILE *file = fopen(path, "rb");
  if (!file) return fail("cannot read %s: %s", path, strerror(errno));
  while (fits && (got = fread(block, 1, sizeof block, file)) > 0) {
    if ((size_t)t->size + got > room) {
      int32_t *more = (int32_t *)realloc(t->bytes, (room = 2 * room + sizeof block) * sizeof(int32_t));
      fits = more != NULL;
      if (fits) t->bytes = more;
    }
    for (size_t i = 0; fits && i < got; i++) t->bytes[t->size++] = block[i];
  }
  bool bad = ferror(file) != 0;
  fclose(file);
  if (bad) return fail("cannot read %s: %s", path, strerror(errno));
  if (!fits) return fail("%s does not fit in memory", path);
  return t->size > 0 ? 0 : fail("%s is empty", path);
}

/* Whether a file of that name could be written; leaves it as it is. */
static bool writable(const char *path) {
  FILE *old = fopen(path, "rb"), *file = fopen(path, "ab");
  int why = errno;
  if (old) fclose(old);
  if (file) fclose(file);
  if (file && !old) remove(path);
  errno = why;
  return file != NULL;
}

/* A model is written beside its place and then moved there: both must be possible before hours of training begin. */
static int check_out(const char *out, const char *file) {
  if (strcmp(out, file) == 0) return fail("--out %s would overwrite the text itself", out);
  char *beside = (char *)malloc(strlen(out) + 7);
  if (!beside) return fail("out of memory");
  strcat(strcpy(beside, out), ".probe");
  bool fine = writable(out) && writable(beside);
  free(beside);
  return fine ? 0 : fail("cannot write %s: %s", out, strerror(errno));
}

/* ---- the model ----------------------------------------------------------------------------------------------------- */

static int failed(const luna_ctx *ctx) {
  return fail("%s", *luna_error(ctx) ? luna_error(ctx) : "the model's numbers are not finite; try a lower --lr");
}

/* What the model makes of `rows` windows of n bytes, each byte to be foretold from those before it in its window. */
static luna_tensor *loss_of(const luna_lm *model, const int32_t *bytes, const int32_t *next, int64_t rows, int64_t n) {
  return luna_cross_entropy(luna_lm_forward(model, bytes, rows, n), next);
}

/* Mean loss, nats a byte, over a text cut into windows; only every so many windows when `most` are enough. NaN on failure. */
static double mean_loss(luna_ctx *ctx, const luna_lm *model, text t, int64_t window, int64_t most) {
  int64_t skip = t.size / window / most * 16 * window;
  double sum = 0, count = 0;
  for (int64_t at = 0; at < t.size - 1; at += skip) {
    int64_t rows = (t.size - 1 - at) / window, n = window;
    if (rows > 16) rows = 16;
    if (rows == 0) rows = 1, n = t.size - 1 - at;          /* the rest at the end */
    luna_begin_inference(ctx);
    sum += (double)luna_item(loss_of(model, t.bytes + at, t.bytes + at + 1, rows, n)) * (double)(rows * n);
    count += (double)(rows * n);
    at += rows * n;
  }
  return sum / count;
}

/* Reads the prompt and writes `count` bytes (0: no end), into `out` or, as they are made, to stdout. False on failure. */
static bool write_on(const luna_lm *model, const text *prompt, luna_sampling sampling, int64_t count, unsigned char *out) {
  luna_stream *stream = luna_stream_open(model, NULL);
  if (!stream) return false;
  int32_t token = luna_sample(luna_stream_prefill(stream, prompt->bytes, prompt->size), 256, &sampling);
  for (int64_t i = 0; token >= 0 && (count == 0 || i < count); i++) {
    if (out) out[i] = (unsigned char)token;
    else if (putchar(token) == EOF || fflush(stdout) != 0) break;
    token = luna_sample(luna_stream_step(stream, &token), 256, &sampling);
  }
  luna_stream_close(stream);
  return token >= 0;
}

/* How many bytes make the next character, of UTF-8, that a terminal can show; 0: none. */
static int showable(const unsigned char *s, int64_t size) {
  if (*s < 0x80) return *s == '\n' || *s == '\t' || (*s >= 32 && *s < 127);
  int length = *s >= 0xC3 && *s < 0xE0 ? 2 : *s >= 0xE0 && *s < 0xF0 ? 3 : *s >= 0xF0 && *s < 0xF5 ? 4 : 0;
  for (int i = 1; i < length; i++) if (i >= size || (s[i] & 0xC0) != 0x80) return 0;
  return length;
}

static bool show_sample(const char *when, const luna_lm *model, const text *prompt) {
  unsigned char shown[PROMPT + SAMPLE];
  int64_t size = prompt->size + SAMPLE;
  for (int64_t i = 0; i < prompt->size; i++) shown[i] = (unsigned char)prompt->bytes[i];
  luna_sampling sampling = { .temperature = 0.8f, .seed = (uint64_t)set.seed };
  if (!write_on(model, prompt, sampling, SAMPLE, shown + prompt->size)) return false;
  printf("\n---- %s: after %d bytes of the text, the model's own\n", when, (int)prompt->size);
  for (int64_t i = 0, n = 0; i < size; i += n ? n : 1) {
    n = showable(shown + i, size - i);
    if (n) fwrite(shown + i, 1, (size_t)n, stdout);
    else putchar('.');
  }
  printf("\n----\n\n");
  fflush(stdout);
  return true;
}

/* ---- train --------------------------------------------------------------------------------------------------------- */

static volatile sig_atomic_t interrupted;
static void interrupt(int number) {
  interrupted = 1;
  signal(number, SIG_DFL);                                 /* a second Ctrl-C ends the program at once */
}

static void progress(int64_t step, int64_t steps, double loss, double speed, double left, bool live) {
  char bar[11] = "..........";
  memset(bar, '#', (size_t)(10 * step / steps));
  printf("%sstep %4lld/%lld ", live ? "\r" : "", (long long)step, (long long)steps);
  if (live) printf("[%s] ", bar);
  printf("%.3f nats %.3f bits/byte %.1fk tokens/s %d:%02d left%s", loss, loss / LN2, speed / 1000, (int)left / 60, (int)left % 60, live ? " " : "\n");
  fflush(stdout);
}

/* Fills the step's batch with windows that begin anywhere in the text. */
static void pick_windows(const text *t, int64_t step, int32_t *bytes, int32_t *next) {
  for (int64_t row = 0; row < set.batch; row++) {
    uint32_t counter[4] = { (uint32_t)step, (uint32_t)row, 0, 0 }, random[4];
    luna_philox(counter, (uint64_t)set.seed, random);
    const int32_t *from = t->bytes + (((uint64_t)random[0] << 32) | random[1]) % (uint64_t)(t->size - set.window);
    memcpy(bytes + row * set.window, from, (size_t)set.window * sizeof(int32_t));
    memcpy(next + row * set.window, from + 1, (size_t)set.window * sizeof(int32_t));
  }
}

/* Returns the number of steps made, fewer than asked after Ctrl-C, or -1 on failure. */
static int64_t learn(luna_ctx *ctx, const luna_lm *model, luna_optimizer *adam, const text *t, int32_t *bytes, int32_t *next) {
  bool live = on_terminal();
  int64_t step = 0, every = set.steps < 20 ? 1 : set.steps / 20;
  double start = seconds(), shown = 0, mean = 0;
  while (step < set.steps && !interrupted) {
    pick_windows(t, step++, bytes, next);
    luna_begin_step(ctx);
    luna_tensor *loss = loss_of(model, bytes, next, set.batch, set.window);
    luna_backward(loss);
    if (luna_optimizer_step(adam) != LUNA_OK) return -1;

    double now = seconds(), each = (now - start) / (double)step;
    mean += ((double)luna_item(loss) - mean) / (step < 20 ? (double)step : 20);
    if (step == set.steps || (live ? now - shown > 0.1 : step % every == 0)) {
      progress(step, set.steps, mean, (double)(set.batch * set.window) / each, each * (double)(set.steps - step), live);
      shown = now;
    }
  }
  if (live) printf("\n");
  return step;
}

/* Some bytes of a text, from the start of a line where it has lines. */
static text some_lines(text t) {
  int64_t start = 0;
  while (start < t.size / 2 && (start == 0 || t.bytes[start - 1] != '\n')) start++;
  return (text){ t.bytes + start, t.size - start < PROMPT ? t.size - start : PROMPT };
}

static int train(luna_ctx *ctx, const char *path, text all) {
  text held = { all.bytes + (all.size - all.size / 10), all.size / 10 }, t = { all.bytes, all.size - held.size }, prompt = some_lines(held);
  if (held.size < 2) return fail("%s has %lld bytes; to train and validate takes 20", path, (long long)all.size);
  if (set.window >= t.size) printf("windows cut to %lld bytes: the text is short\n", (long long)(set.window = t.size - 1));

  luna_params *params = luna_params_open(ctx);
  luna_lm model;
  luna_lm_config config = { .layers = set.layers, .memory = set.memory, .layer = { .dim = set.dim, .heads = set.heads, .ffn = set.ffn,
    .convolution = set.convolution, .activation = LUNA_GELU, .dropout = (float)set.dropout } };
  if (luna_lm_init(&model, params, &config) != LUNA_OK) return failed(ctx);
  luna_optimizer *adam = luna_adamw(params, &(luna_adamw_config){ .lr = (float)set.lr, .weight_decay = 0.01f, .clip = 1,
    .schedule = { .decay = LUNA_COSINE, .warmup = set.steps < 1000 ? set.steps / 10 : 100, .total = set.steps, .floor = 0.05f } });
  printf("%s: %lld bytes to learn from, %lld to validate on; %lld parameters\n", path, (long long)t.size, (long long)held.size, (long long)luna_params_count(params));
  double first = mean_loss(ctx, &model, held, set.window, VALIDATION), start = seconds();
  if (!adam || !(first >= 0) || !show_sample("before the first step", &model, &prompt)) return failed(ctx);

  int32_t *bytes = (int32_t *)malloc((size_t)(2 * set.batch * set.window) * sizeof(int32_t));
  if (!bytes) return fail("out of memory");
  signal(SIGINT, interrupt);
  int64_t steps = learn(ctx, &model, adam, &t, bytes, bytes + set.batch * set.window);
  free(bytes);
  if (steps == 0) return fail("stopped before the first step: nothing learnt, nothing written");
  if (steps < 0 || luna_save(params, set.out) != LUNA_OK) return failed(ctx);
  double took = seconds() - start;
  if (interrupted) printf("stopped at step %lld: what has been learnt is in %s\n", (long long)steps, set.out);
  if (luna_optimizer_skipped(adam)) printf("%lld steps skipped, their gradients were not finite\n", (long long)luna_optimizer_skipped(adam));

  if (!show_sample("after the last step", &model, &prompt)) return failed(ctx);
  double last = mean_loss(ctx, &model, held, set.window, VALIDATION);
  printf("%s: %lld steps in %.0f s, validation loss %.3f -> %.3f nats, %.3f -> %.3f bits per byte\n", set.out, (long long)steps, took,
         first, last, first / LN2, last / LN2);
  return last >= 0 ? 0 : failed(ctx);
}

/* ---- generate, eval ------------------------------------------------------------------------------------------------ */

static int load(luna_ctx *ctx, luna_lm *model, const char *path) {
  if (luna_lm_load(model, luna_params_open(ctx), path) != LUNA_OK) return failed(ctx);
  if (model->config.vocab == 256) return 0;
  return fail("%s has a vocabulary of %lld tokens; lm works on bytes, 256", path, (long long)model->config.vocab);
}

static int generate(luna_ctx *ctx, const char *path) {
  luna_lm model;
  int status = load(ctx, &model, path);
  if (status) return status;
  const char *words = *set.prompt ? set.prompt : "\n";
  text prompt = { (int32_t *)malloc(strlen(words) * sizeof(int32_t)), (int64_t)strlen(words) };
  if (!prompt.bytes) return fail("out of memory");
  for (int64_t i = 0; i < prompt.size; i++) prompt.bytes[i] = (unsigned char)words[i];
  printf("%s", words);
  bool fine = write_on(&model, &prompt, (luna_sampling){ .temperature = (float)set.temperature, .top_k = (int32_t)set.top_k, .seed = (uint64_t)set.seed }, set.bytes, NULL);
  free(prompt.bytes);
  printf("\n");
  if (!fine) return failed(ctx);
  return fflush(stdout) == 0 && !ferror(stdout) ? 0 : fail("cannot write the text: %s", strerror(errno));
}

static int eval(luna_ctx *ctx, const char *path, const char *file, text t) {
  luna_lm model;
  int status = load(ctx, &model, path);
  if (status) return status;
  if (t.size < 2) return fail("%s has one byte: there is nothing to foretell", file);
  double loss = mean_loss(ctx, &model, t, set.window, INT64_MAX);
  if (!(loss >= 0)) return failed(ctx);
  printf("%s on %s: %.4f bits per byte, %.4f nats, in windows of %lld bytes\n", path, file, loss / LN2, loss, (long long)set.window);
  return 0;
}

int main(int count, char **given) {
  const char *command = count > 1 ? given[1] : "", *words[2] = { NULL, NULL };
  bool is_train = strcmp(command, "train") == 0, is_eval = strcmp(command, "eval") == 0;
  if (strcmp(command, "--help") == 0) return usage(stdout), 0;
  if (!is_train && !is_eval && strcmp(command, "generate") != 0)
    return usage(stderr), fail("%s%s", *command ? "there is no command " : "train, generate or eval?", command);

  text t = { 0 };
  luna_ctx *ctx = NULL;
  int status = parse(count - 2, given + 2, *command, words, is_eval ? 2 : 1);
  const char *file = is_train ? words[0] : words[1];
  if (!status && file) status = read_text(file, &t);
  if (!status && is_train) status = check_out(set.out, file);
  if (!status && !(ctx = luna_open(&(luna_options){ .threads = (int)set.threads, .seed = (uint64_t)set.seed }))) status = fail("out of memory");
  if (!status) status = is_train ? train(ctx, file, t) : is_eval ? eval(ctx, words[0], file, t) : generate(ctx, words[0]);
  luna_close(ctx);
  free(t.bytes);
  return status;
}
