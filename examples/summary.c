/* summary: shows what is in a safetensors file: its text pairs, its tensors and, for luna.h's own checkpoints, the
   model and how far its training was. It also writes a model's copy in 8 bits.

     cc -O2 -I. examples/summary.c -o summary -lm -lpthread

     summary FILE                   takes seconds
     summary --quantize IN OUT      stores a model's matrices as I8, in about a quarter of the bytes; every program
                                    reads that

   For a tensor's values it prints the min, mean, standard deviation and max, and counts those that are not finite. For
   a model of features it prints a line each: the column, if the file names it, its mean and its deviation. */
#define LUNA_IMPLEMENTATION
#include "luna.h"

#include "common/example.h"
#include "attentions/attentions.h"

/* numbers in luna.h's pairs that stand for names, of 0, 1, 2, ... */
static const struct { const char *key, *names; } meanings[] = {
  { "luna.attention", "luna softmax linear linformer" }, /* linformer: of luna.h 0.2, now a hook */
  { "luna.sharing", "tied full no-key shared-qk" },
  { "luna.activation", "none relu gelu elu+1 softplus softplus2 sigmoid silu tanh" }, { "luna.norm", "layer rms" },
  { "luna.forget", "no constant gated routed" },
  { "luna.omega", "default relu gelu elu+1 softplus softplus2" },
      { "luna.positions", "default none sinusoidal learned" }, { "luna.embedding_scale", "default 1 sqrt(dim)" },
  { "luna.pooling", "default cls mean memory memory-of-the-batch" },
      { "luna.linformer_sharing", "headwise key-value layerwise" },
  { "luna.linformer_projection", "linear mean max convolution" }, { "luna.optimizer", "SGD Adam AdamW hook" }
};

/* what a model's features, and its outputs with output_norm, are standardised by */
enum { MEAN, SCALE, OUT_MEAN, OUT_SCALE, NORMS, LINES = 200 };
static const char *const norm_names[NORMS] = { "input_norm.mean", "input_norm.scale", "output_norm.mean",
                                               "output_norm.scale" };
typedef struct totals {
  int64_t tensors, numbers, moments; /* moments: tensors of an optimiser */
  int64_t features, sizes[NORMS];    /* features: 0 of a model of tokens */
  float *norms[NORMS];
  double bytes, moment_bytes;
  int width, column;                 /* of the longest name; of the line being printed */
  bool forecasts, scaled;            /* a forecaster of series; of an older version, in units of series.change */
} totals;

static bool starts(const char *text, const char *with) { return strncmp(text, with, strlen(with)) == 0; }

/* About `max` bytes of a text, in whole characters; returns how many. */
static int print_text(const char *text, int max) {
  int size = (int)strlen(text), i = 0;
  for (int n; i < size && i < max; i += n ? n : 1) n = showable((const unsigned char *)text + i, size - i);
  return put_shown(stdout, text, i), i;
}

static void find_features(void *user, const char *key, const char *value) {
  if (strcmp(key, "luna.features") == 0) ((totals *)user)->features = strtol(value, NULL, 10);
}
static void find_norm(void *user, const luna_file_tensor *t) {
  totals *sum = (totals *)user;
  for (int i = 0; i < NORMS; i++) {
    const char *own = strstr(t->name, norm_names[i]);
    if (!own || own[strlen(norm_names[i])] || sum->norms[i] || starts(t->name, "luna.")) continue;
    sum->norms[i] = (float *)grow(NULL, t->count + 1, sizeof(float));
    if (luna_file_tensor_read(t, sum->norms[i]) == LUNA_OK) sum->sizes[i] = t->count;
  }
}
typedef struct column { int64_t number; char name[32]; } column; /* whose name is to be found */
static void find_column(void *user, const char *key, const char *value) {
  column *c = (column *)user;
  char own[40];
  snprintf(own, sizeof own, "series.column%lld", (long long)c->number);
  if (strcmp(key, own) == 0) snprintf(c->name, sizeof c->name, "%s", value);
}
/* a line for each of a model's features, or of its outputs, `from` MEAN or OUT_MEAN */
static void print_norm(luna_ctx *ctx, const char *path, const totals *sum, int from) {
  const int64_t size = sum->sizes[from] < sum->sizes[from + 1] ? sum->sizes[from] : sum->sizes[from + 1];
  if (size) printf("\n  %-32s %10s %10s\n", from == MEAN ? "feature" : "output", "mean", "deviation");
  if (size > LINES) printf("  These are the first %d of %lld.\n", LINES, (long long)size);
  for (int64_t i = 0; i < size && i < LINES; i++) {
    column c = { .number = i };
    if (from == MEAN) luna_inspect(ctx, luna_path(path), &(luna_inspection){ .pair = find_column, .user = &c });
    if (!*c.name) snprintf(c.name, sizeof c.name, "%lld", (long long)i + 1);
    printf("  ");
    const double scale = (double)sum->norms[from + 1][i];  /* features are multiplied by it, outputs made of it */
    printf("%*s %10.4g %10.4g\n", 32 - print_text(c.name, 32), "", (double)sum->norms[from][i],
           from == MEAN ? 1 / scale : scale);
  }
}

static void print_pair(void *user, const char *key, const char *value) {
  totals *sum = (totals *)user;
  /* of which a model of features has none */
  if (sum->features > 0 && (strcmp(key, "luna.vocab") == 0 || strcmp(key, "luna.embedding_scale") == 0)) return;
  sum->forecasts = sum->forecasts || starts(key, "series.ahead");
  sum->scaled = sum->scaled || (starts(key, "series.change") && strcmp(value, "1") != 0);
  bool own = starts(key, "luna."), hexadecimal = own && strlen(value) == 16; /* the state of a training */
  const char *name = NULL;
  int length = 0;
  for (size_t i = 0; i < sizeof meanings / sizeof *meanings; i++)
    if (strcmp(key, meanings[i].key) == 0)
      name = name_at(meanings[i].names, strtol(value, NULL, hexadecimal ? 16 : 10), &length);
  if (sum->column > 0 && (!own || sum->column > 100)) printf("\n"), sum->column = 0;
  sum->column += printf(sum->column ? ", " : "  ") + print_text(own ? key + 5 : key, 100) + printf(" ");
  if (name) sum->column += printf("%.*s", length, name);
  else if (own && strstr(key, "dropout")) sum->column += printf("%g", strtod(value, NULL) * 1e-9);
  else if (hexadecimal && strcmp(key, "luna.lr") != 0) sum->column += printf("%llu", strtoull(value, NULL, 16));
  else sum->column += print_text(value, 100);
  if (!own && strlen(value) > 100) printf("... (%lld bytes)", (long long)strlen(value));
  if (!own) printf("\n"), sum->column = 0;
}

static void print_bytes(double bytes) {
  const char *unit = "B";
  if (bytes >= 1e9) bytes /= 1e9, unit = "GB";
  else if (bytes >= 1e6) bytes /= 1e6, unit = "MB";
  else if (bytes >= 1e3) bytes /= 1e3, unit = "kB";
  printf(*unit == 'B' ? "%5.0f %-2s" : "%5.1f %-2s", bytes, unit);
}

static void measure_tensor(void *user, const luna_file_tensor *t) {
  totals *sum = (totals *)user;
  if (starts(t->name, "luna.")) {
    sum->moments++, sum->moment_bytes += (double)t->bytes;
    return;
  }
  sum->tensors++, sum->numbers += t->count, sum->bytes += (double)t->bytes;
  if ((int)strlen(t->name) > sum->width) sum->width = (int)strlen(t->name);
}

static void print_tensor(void *user, const luna_file_tensor *t) {
  char shape[160] = "";
  double low = HUGE_VAL, high = -HUGE_VAL, mean = 0, squares = 0;
  int64_t count = 0;
  if (starts(t->name, "luna.")) return;
  for (int i = 0; i < t->rank; i++)
    snprintf(shape + strlen(shape), sizeof shape - strlen(shape), i ? " x %lld" : "%lld", (long long)t->shape[i]);
  printf("  ");
  printf("%*s %-4s %16s ", ((const totals *)user)->width - print_text(t->name, INT32_MAX), "", t->dtype, shape);
  print_bytes((double)t->bytes);
  float *values = (float *)grow(NULL, t->count + 1, sizeof(float));
  bool real = luna_file_tensor_read(t, values) == LUNA_OK;
  for (int64_t i = 0; real && i < t->count; i++) {
    double value = (double)values[i], off = value - mean;
    if (!isfinite(value)) continue;
    mean += off / (double)++count;
    squares += off * (value - mean);
    low = fmin(low, value), high = fmax(high, value);
  }
  if (count > 0) printf(" %10.4g %10.4g %10.4g %10.4g", low, mean, sqrt(squares / (double)count), high);
  if (real && count < t->count) printf("  %lld NOT FINITE", (long long)(t->count - count));
  printf("\n");
  free(values);
}

static int summary(luna_ctx *ctx, const char *path) {
  static totals sum = { .width = 6 };
  say("%s", path);
  const luna_inspection norms = { find_features, find_norm, &sum };
  if (luna_inspect(ctx, luna_path(path), &norms) != LUNA_OK) return failed(ctx);
  if (luna_inspect(ctx, luna_path(path), &(luna_inspection){ .pair = print_pair, .tensor = measure_tensor,
                                                 .user = &sum }) != LUNA_OK) return failed(ctx);
  if (sum.column) printf("\n");
  if (sum.forecasts)
    printf("  outputs: [steps ahead, columns, quantiles]; each is the change from its column's last number%s\n",
           sum.scaled ? ", in units of series.change" : ", in its unit, so add that number");
  for (int i = MEAN; i < NORMS; i += OUT_MEAN) print_norm(ctx, path, &sum, i);
  printf("\n  %-*s %-4s %16s %8s %10s %10s %10s %10s\n", sum.width, "tensor", "kind", "shape",
         "size", "min", "mean", "deviation", "max");
  if (luna_inspect(ctx, luna_path(path), &(luna_inspection){ .tensor = print_tensor, .user = &sum }) != LUNA_OK)
    return failed(ctx);
  printf("\n  %lld tensors, %lld numbers,", (long long)sum.tensors, (long long)sum.numbers);
  print_bytes(sum.bytes);
  if (sum.moments)
    printf("\n  and an optimiser's %lld tensors,", (long long)sum.moments), print_bytes(sum.moment_bytes);
  printf("\n");
  return fflush(stdout) == 0 && !ferror(stdout) ? 0 : fail("cannot write the summary: %s", strerror(errno));
}

static int quantize(luna_ctx *ctx, const char *from, const char *to) {
  luna_model model;
  luna_params *params = luna_params_open(ctx);
  if (same_file(from, to)) return fail("--quantize %s would overwrite the model itself", to);
  if (luna_load_model(&model, params, luna_path(from)) != LUNA_OK) return failed(ctx);
  return luna_save_int8(params, luna_path(to)) == LUNA_OK ? 0 : failed(ctx);
}

int main(int count, char **given) {
  const char *first = count > 1 ? given[1] : "";
  const bool quantizes = strcmp(first, "--quantize") == 0;
  program = "summary";
  if (asks_help(first))
    return puts("Example:\n  summary model.safetensors\n\nUsage:\n"
                "  summary FILE               Prints what is in a safetensors file.\n"
                "  summary --quantize IN OUT  Writes a copy of a model whose matrices are in 8 bits."), 0;
  if (count != (quantizes ? 4 : 2))
    return fail(quantizes ? "summary --quantize IN OUT takes two files" :
                "summary FILE takes one file; summary --help says more");
  attentions keeps;
  if (!attentions_open(&keeps, "linformer")) return fail("%s", keeps.error);
  const luna_attention_hook *const hooks[] = { &keeps.hook, NULL };
  luna_ctx *ctx = luna_open(&(luna_options){ .threads = 1, .hooks = hooks });
  int status = !ctx ? fail("out of memory") : quantizes ? quantize(ctx, given[2], given[3]) : summary(ctx, first);
  luna_close(ctx);
  attentions_close(&keeps);
  return status;
}
