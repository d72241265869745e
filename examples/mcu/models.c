/* models: what tests/programs/export.sh and make mcu export and compare with. A series that is the same everywhere, a
   model with random weights, and what luna_stream makes of both.

     models write NAME STEPS [field=value ...]       NAME.safetensors, NAME.csv (of tokens: a number a line), NAME.out
     models stream NAME                              NAME.out of NAME.safetensors, of features, and NAME.csv
     models compare NAME.out OTHER [BOUND]
     models subjects NAME STEPS                      trains on the walk of eight subjects; NAME.safetensors, and another
                                                     subject's in NAME.csv, its class the last number of a line

   compare prints the largest distance of a step's outputs as a share of the root mean square norm of NAME's, and
   ends with 1 if it is more than the bound, or if an output is not finite whose first is. Outputs are lines of their
   floats' bits in hexadecimal. Fields are those of luna_lm_config: features=9 heads=4 ...; and
     missing=N    one number in N is missing
     glitch=X     the first feature of step 10 is X
     large=E      a weight of every third tensor is 10^E times as large
     steep=E      all weights of the features are */
#define LUNA_IMPLEMENTATION
#include "luna.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_FEATURES = 64, MAX_OUTPUTS = 65536 };
static luna_lm_config config;
static int64_t missing, glitch, large, steep;

static int fail(const char *what, const char *which) { return fprintf(stderr, "models: %s %s\n", what, which), 2; }

static uint32_t random_state = 1;
static uint32_t random_bits(void) { return (random_state = random_state * 1664525u + 1013904223u) >> 8; }
static float uniform(void) { return (float)random_bits() / 8388608.0f - 1.0f; } /* in [-1, 1) */

/* Number i of step t, with three decimals: waves by integers, a step now and then, noise. */
static int32_t series(int32_t t, int32_t i) {
  const int32_t phase = t * (7 + 3 * i) % 400, wave = phase < 200 ? phase - 100 : 300 - phase;
  return wave * (10 + i) + (t / 500 % 3 == 1 ? 900 : 0) + (int32_t)(random_bits() % 401) - 200;
}

static bool set_field(const char *word) {
  luna_layer_config *layer = &config.layer;
  const char *value = strchr(word, '=');
  const int64_t number = value ? strtol(value + 1, NULL, 10) : 0;
  const struct { const char *name; int64_t *at; } sizes[] = {
    { "features", &config.features }, { "vocab", &config.vocab }, { "outputs", &config.outputs },
    { "layers", &config.layers }, { "dim", &layer->dim }, { "heads", &layer->heads },
        { "memory", &config.layer.memory },
    { "ffn", &layer->ffn }, { "convolution", &layer->convolution }, { "max_length", &config.max_length },
    { "missing", &missing }, { "glitch", &glitch }, { "large", &large },
    { "steep", &steep }, { "horizon", &layer->horizon } };
  if (!value) return false;
  const size_t size = (size_t)(value - word);
  for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
    if (strlen(sizes[i].name) == size && memcmp(sizes[i].name, word, size) == 0) return *sizes[i].at = number, true;
  if (strncmp(word, "pre_norm=", 9) == 0) layer->pre_norm = number != 0;
  else if (strncmp(word, "gated=", 6) == 0) layer->gated = number != 0;
  else if (strncmp(word, "norm=", 5) == 0) layer->norm = (luna_norm_kind)number;
  else if (strncmp(word, "sharing=", 8) == 0) layer->sharing = (luna_sharing)number;
  else if (strncmp(word, "activation=", 11) == 0) layer->activation = (luna_activation)number;
  else if (strncmp(word, "forget=", 7) == 0) layer->forget = (luna_forget)number;
  else if (strncmp(word, "output_gate=", 12) == 0) layer->output_gate = number != 0;
  else if (strncmp(word, "omega=", 6) == 0) layer->omega = (luna_activation)number;
  else if (strncmp(word, "attention=", 10) == 0) layer->attention = (luna_attention_kind)number;
  else if (strncmp(word, "output_norm=", 12) == 0) config.output_norm = number != 0;
  else if (strncmp(word, "positions=", 10) == 0) config.positions = (luna_positions)number;
  else return false;
  return true;
}

static FILE *open_file(const char *name, const char *suffix, const char *mode) {
  char path[1024];
  snprintf(path, sizeof path, "%s%s", name, suffix);
  FILE *file = fopen(path, mode);
  if (!file) exit(fail("cannot open", path));
  return file;
}

/* one step: the series' next line, and the stream's outputs; null after a failure */
static const float *step(luna_stream *stream, int32_t t, int64_t features, int64_t vocab, FILE *csv) {
  float x[MAX_FEATURES];
  int32_t token = (int32_t)((uint32_t)series(t, 0) % (uint32_t)vocab);
  if (!features) return fprintf(csv, "%d\n", (int)token), luna_stream_step(stream, &token);
  for (int32_t i = 0; i < (int32_t)features; i++) {
    const int32_t number = series(t, i), size = abs(number);
    const bool none = missing && random_bits() % (uint32_t)missing == 0, glitches = glitch && t == 10 && i == 0;
    char text[32];
    snprintf(text, sizeof text, "%s%d.%03d", number < 0 ? "-" : "", (int)(size / 1000), (int)(size % 1000));
    if (glitches) snprintf(text, sizeof text, "%lld", (long long)glitch);
    fprintf(csv, "%s%s", i ? "," : "", none ? "" : text);
    x[i] = glitches ? (float)glitch : (float)number / 1000.0f;
    if (none) x[i] = NAN;
  }
  fputc('\n', csv);
  return luna_stream_step_features(stream, x);
}

static void write_bits(FILE *out, const float *y, int64_t outputs) {
  for (int64_t o = 0; o < outputs; o++) {
    uint32_t bits;
    memcpy(&bits, &y[o], sizeof bits);
    fprintf(out, "%08lx%c", (unsigned long)bits, o + 1 < outputs ? ' ' : '\n');
  }
}
static int write_all(const char *name, int32_t steps) {
  char path[1024];
  luna_lm model;
  luna_ctx *ctx = luna_open(&(luna_options){ .threads = 1, .seed = 1 });
  luna_params *params = luna_params_open(ctx);
  if (luna_lm_init(&model, params, &config) != LUNA_OK) return fail("model:", luna_error(ctx));
  if (config.features > MAX_FEATURES) return fail("too many features:", name);
  for (int64_t i = 0; i < luna_params_tensor_count(params); i++) {
    const char *own;
    luna_tensor *t = luna_params_at(params, i, &own);
    for (int64_t j = 0; j < luna_count(t); j++) t->data[j] += (strstr(own, "output_norm") ? 0.9f : 0.1f) * uniform();
    for (int64_t j = 0; j < luna_count(t) && strcmp(own, "input_proj.weight") == 0; j++)
      t->data[j] *= powf(10, (float)steep);
    if (large && i % 3 == 1 && !strstr(own, "input_norm")) t->data[luna_count(t) / 2] *= powf(10, (float)large);
  }
  snprintf(path, sizeof path, "%s.safetensors", name);
  if (luna_save(params, luna_path(path)) != LUNA_OK) return fail("model:", luna_error(ctx));
  luna_stream *stream = steps ? luna_stream_open(&model, NULL) : NULL;
  if (steps && !stream) return fail("stream:", luna_error(ctx));
  FILE *csv = open_file(name, ".csv", "w"), *out = open_file(name, ".out", "w");
  const int64_t outputs = model.config.outputs ? model.config.outputs : model.config.vocab;
  for (int32_t t = 0; t < steps; t++) {
    const float *y = step(stream, t, model.config.features, model.config.vocab, csv);
    if (!y) return fail("stream:", luna_stream_error(stream));
    write_bits(out, y, outputs);
  }
  luna_stream_close(stream);
  luna_close(ctx);
  return fclose(csv) == 0 && fclose(out) == 0 ? 0 : fail("cannot write the files of", name);
}

/* What luna_stream makes of a file's lines, of which each has a number for each of the model's features. */
static int write_streamed(const char *name) {
  char path[1024];
  float x[MAX_FEATURES];
  luna_lm model;
  luna_ctx *ctx = luna_open(&(luna_options){ .threads = 1 });
  snprintf(path, sizeof path, "%s.safetensors", name);
  if (luna_load_model_of(LUNA_MODEL_LM, &model, luna_params_open(ctx), luna_path(path)) != LUNA_OK)
    return fail("model:", luna_error(ctx));
  if (model.config.features > MAX_FEATURES) return fail("too many features:", name);
  luna_stream *stream = luna_stream_open(&model, NULL);
  FILE *csv = open_file(name, ".csv", "r"), *out = open_file(name, ".out", "w");
  for (int64_t i = 0; stream && fscanf(csv, "%f%*1[,]", &x[i]) == 1;) {
    if (++i < model.config.features) continue;
    const float *y = luna_stream_step_features(stream, x);
    if (!y) return fail("stream:", luna_stream_error(stream));
    write_bits(out, y, model.config.outputs);
    i = 0;
  }
  if (!stream) return fail("stream:", luna_error(ctx));
  luna_stream_close(stream);
  luna_close(ctx);
  return fclose(csv) == 0 && fclose(out) == 0 ? 0 : fail("cannot write the files of", name);
}

/* One sequence of three numbers, 50 a second, and its classes: 0 walks, 1 shuffles, with half the swing, faster.
   Subjects differ in their swing and in how the sensor sits. */
typedef struct subject { float swing, tilt[3]; } subject;
static void walk(const subject *s, int64_t n, float *x, int32_t *labels) {
  float phase = uniform();
  int32_t label = 0;
  for (int64_t t = 0; t < n; t++, phase += label ? 0.45f : 0.35f) {
    if (random_bits() % 120 == 0) label = !label;
    const float swing = s->swing * (label ? 0.5f : 1.0f) * (1 + 0.2f * uniform());
    const float wave[3] = { sinf(phase), cosf(2 * phase), sinf(phase + 1) };
    for (int i = 0; i < 3; i++) x[3 * t + i] = swing * wave[i] + s->tilt[i] + 0.15f * uniform();
    labels[t] = label;
  }
}
static subject random_subject(float swing) {
  subject s = { swing, { 0.4f * uniform(), 0.4f * uniform(), 0.4f * uniform() } };
  return s;
}
static int write_subjects(const char *name, int32_t steps) {
  enum { SUBJECTS = 8, N = 250, TRAINING = 150, OTHER = 20000 };
  static float x[3 * OTHER];
  static int32_t labels[OTHER];
  subject subjects[SUBJECTS];
  char path[1024];
  luna_lm model;
  luna_ctx *ctx = luna_open(&(luna_options){ .threads = 1, .seed = 1 });
  luna_params *trained = luna_params_open(ctx);
  config = (luna_lm_config){ .features = 3, .outputs = 2, .layers = 1,
    .layer = { .dim = 16, .heads = 2, .memory = 4, .ffn = 32, .convolution = 4, .pre_norm = true } };
  if (steps > OTHER || luna_lm_init(&model, trained, &config) != LUNA_OK) return fail("model:", luna_error(ctx));
  luna_optimizer *adam = luna_adamw(trained, &(luna_optimizer_config){ .lr = 5e-3f, .clip = 1 });
  for (int i = 0; i < SUBJECTS; i++) subjects[i] = random_subject(1 + 0.15f * uniform());
  for (int step = 0; step < TRAINING; step++) {
    for (int i = 0; i < SUBJECTS; i++) walk(&subjects[i], N, x + 3 * N * i, labels + N * i);
    const luna_input input = { .features = x, .batch = SUBJECTS, .n = N };
    if (step == 0) luna_input_layer_fit(&model.input, &input);
    luna_begin_step(ctx);
    luna_backward(luna_lm_loss(&model, &input, labels));
    if (luna_optimizer_step(adam) != LUNA_OK) return fail("training:", luna_error(ctx));
  }
  snprintf(path, sizeof path, "%s.safetensors", name);
  if (luna_save(trained, luna_path(path)) != LUNA_OK) return fail("model:", luna_error(ctx));
  luna_close(ctx);
  const subject other = random_subject(0.75f);
  walk(&other, steps, x, labels);
  FILE *csv = open_file(name, ".csv", "w");
  for (int32_t t = 0; t < steps; t++)
    fprintf(csv, "%.4f,%.4f,%.4f,%d\n", (double)x[3 * t], (double)x[3 * t + 1], (double)x[3 * t + 2], (int)labels[t]);
  return fclose(csv) == 0 ? 0 : fail("cannot write the files of", name);
}

/* the next step's outputs; returns how many, 0 at the end */
static int64_t read_step(FILE *file, float *y) {
  unsigned long bits;
  int end = ' ';
  int64_t count = 0;
  while (end == ' ' && count < MAX_OUTPUTS && fscanf(file, "%lx", &bits) == 1) {
    const uint32_t word = (uint32_t)bits;
    memcpy(&y[count++], &word, sizeof word);
    end = fgetc(file);
  }
  return count;
}
static int compare(const char *a, const char *b, double bound) {
  static float x[MAX_OUTPUTS], y[MAX_OUTPUTS];
  FILE *first = open_file(a, "", "r"), *second = open_file(b, "", "r");
  double max = 0, norms = 0;
  int64_t steps = 0, agree = 0, n;
  for (; (n = read_step(first, x)) > 0; steps++) {
    double distance = 0;
    int64_t best = 0, best_other = 0;
    if (read_step(second, y) != n) return fail("too short, or of other outputs:", b);
    for (int64_t i = 0; i < n; i++) {
      const double by = (double)x[i] - (double)y[i];
      if (!isfinite(x[i])) continue;
      distance += by * by, norms += (double)x[i] * (double)x[i];
      if (x[i] > x[best]) best = i;
      if (y[i] > y[best_other]) best_other = i;
    }
    if (max == max && !(distance <= max)) max = distance; /* NaN stays */
    agree += best == best_other;
  }
  if (read_step(second, y) > 0) return fail("too long:", b);
  max = sqrt(max / (norms / (double)steps));
  printf("%lld steps, distance at most %.2e, the same largest output in %.2f%%\n", (long long)steps, max,
         100.0 * (double)agree / (double)steps);
  fclose(first), fclose(second);
  return steps > 0 && max <= bound ? 0 : 1;
}

int main(int count, char **given) {
  if (count >= 4 && strcmp(given[1], "compare") == 0)
    return compare(given[2], given[3], count > 4 ? strtod(given[4], NULL) : INFINITY);
  if (count == 4 && strcmp(given[1], "subjects") == 0)
    return write_subjects(given[2], (int32_t)strtol(given[3], NULL, 10));
  if (count == 3 && strcmp(given[1], "stream") == 0) return write_streamed(given[2]);
  if (count < 4 || strcmp(given[1], "write") != 0) return fail("write NAME STEPS ..., or compare A B", "");
  for (int i = 4; i < count; i++) if (!set_field(given[i])) return fail("no field:", given[i]);
  return write_all(given[2], (int32_t)strtol(given[3], NULL, 10));
}
