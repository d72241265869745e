/* series: sequences of numbers, from sensors, audio or prices: the class of a series, the class at each step, or the
   next step's numbers.

     cc -O2 -I. examples/series.c -o series -lm -lpthread

     series train FILE.ts [--out M] ...                         a class for each case (UEA/UCR archive), seconds
     series train FILE.ts --per-step [--causal]                 cases joined to long recordings: the class at each step
     series train FILE.csv --label COLUMN [--causal]            one recording: the class that COLUMN gives each row
     series train FILE.csv --forecast                           one recording: the next row's numbers
     series eval M FILE                                         how well M does on a file
     series predict M FILE [--svg PICTURE]                      what M finds, a line each; drawn: the first series

   .ts: after @data a line is a case, dimensions separated by ":", values by ",", the class last; "?" is a missing
   number. .csv: the first row may name the columns; those that are numbers are read, but for columns that never change.
   Cases may differ in length. --causal models see no later step, so that they can be streamed. What a model must know
   besides its weights lies in it: M is all one needs. */
#define LUNA_IMPLEMENTATION
#include "luna.h"

#include "example.h"

#include <ctype.h>

#define CLASSES 1000                 /* at most */
#define COLUMNS 4096                 /* of a file, at most */
#define WORD 1000                    /* bytes of a class and of a column's name, at most */

static struct settings set = {
  .out = "series.safetensors",
  .steps = 1200, .batch = 16, .lr = 2e-3,
  .layers = 2, .dim = 32, .heads = 4, .memory = 16, .ffn = 64, .dropout = 0.2, .pooling = LUNA_POOLING_MEAN,
  .seed = 1, .forget = LUNA_FORGET_GATED
};
static struct { const char *label, *svg; int64_t per_step, causal, forecast, window, held; double noise, stretch,
               scale; } own = {
  .window = 300, .noise = 0.1, .stretch = 0.2, .scale = 0.1
};

static const flag flags[] = {
  FLAGS_TRAIN,
  { "--label", "t", STRING(own.label), "CSV: the column, by name or number from 1, that is each row's class" },
  { "--per-step", "t", SWITCH(own.per_step), "a class at each step; of .ts in recordings joined from cases" },
  { "--causal", "t", SWITCH(own.causal), "at each step, from that step and earlier ones alone" },
  { "--forecast", "t", SWITCH(own.forecast), "the next step's numbers" },
  { "--window", "t", WHOLE(own.window, 2, 1e6), "steps of a recording that are learnt from at once" },
  { "--held", "t", WHOLE(own.held, 0, 5),
   "1 to 5: that fifth of the data is not learnt from but measured on; 0: none (CSV: the last)" },
  { "--noise", "t", REAL(own.noise, 0, 10), "added to what is learnt from, in standard deviations" },
  { "--stretch", "t", REAL(own.stretch, 0, 0.9), "of time, at most, of what is learnt from" },
  { "--scale", "t", REAL(own.scale, 0, 0.9), "of values, likewise" },
  FLAGS_MODEL,
  FLAGS_FORGET,
  FLAGS_CLASSIFIER,
  FLAG_SEED("t"),
  FLAG_THREADS("tep"),
  FLAG_RECOMPUTE,
  FLAG_PARALLEL,
  { "--svg", "p", WRITES(own.svg), "file to draw the first series and what is found in, SVG" },
  { 0 }
};

/* ---- the data: rows of k numbers; a series is some of them in a row ---------------------------------------------- */

enum { NONE = -1, UNKNOWN = -2 };    /* labels: not given; given, but not one that the model knows */
typedef struct series { int64_t at, n; int32_t label; } series;
static struct {
  contents text;
  float *rows;                       /* [size,k], NaN where a number is missing */
  int32_t *labels;                   /* [size], NONE or UNKNOWN where it is no class of the model */
  int64_t size, k;
  series *list;                      /* those to learn from, then those held back */
  int64_t count, training;
  bool csv, classless;               /* .ts: the last part is a dimension too */
} data;
static struct word { const unsigned char *at; int64_t size; } labels[CLASSES], columns[COLUMNS];
static int32_t label_count;
static int64_t column_count;         /* of the model */
/* [k] of each column, and of its changes from row to row; of the data that is learnt from */
static float *mean, *deviation, *change;

static bool is_word(struct word w, const char *text) {
  return (int64_t)strlen(text) == w.size && memcmp(w.at, text, (size_t)w.size) == 0;
}
static bool same_word(struct word a, struct word b) {
  return a.size == b.size && memcmp(a.at, b.at, (size_t)a.size) == 0;
}
static bool begins(struct word w, const char *text) { /* in capitals or small letters */
  int64_t i = 0;
  while (text[i] && i < w.size && tolower(w.at[i]) == tolower((unsigned char)text[i])) i++;
  return text[i] == 0;
}

static bool is_missing(struct word w) {
  return w.size == 0 || is_word(w, "?") || is_word(w, "NA") || (w.size == 3 && begins(w, "NaN"));
}

/* The number of a label, which is made when it is new and may be; UNKNOWN when not. */
static int32_t label_of(struct word w, bool add) {
  int32_t i = 0;
  if (is_missing(w)) return NONE;
  while (i < label_count && !same_word(labels[i], w)) i++;
  if (i < label_count) return i;
  if (!add || label_count == CLASSES) return UNKNOWN;
  labels[label_count] = w;
  return label_count++;
}

static struct word trimmed(const unsigned char *at, const unsigned char *end) {
  while (at < end && (*at == ' ' || *at == '\t')) at++;
  while (end > at && (end[-1] == ' ' || end[-1] == '\t')) end--;
  if (end - at >= 2 && *at == '"' && end[-1] == '"') at++, end--;
  return (struct word){ at, end - at };
}

/* Reads a number; NaN: it is missing, as "", "?", "NaN" and "NA" say. False: it is none, or so large that floats of a
   model could overflow. */
static bool number_of(struct word w, float *out) {
  char text[64], *end;
  *out = NAN;
  if (is_missing(w)) return true;
  if (w.size >= (int64_t)sizeof text) return false;
  for (int64_t i = 0; i < w.size; i++) if (!w.at[i] || !strchr("0123456789+-.eE", w.at[i])) return false;
  memcpy(text, w.at, (size_t)w.size);
  text[w.size] = 0;
  double value = strtod(text, &end);
  if (*end || end == text || !(fabs(value) <= 1e30)) return false;
  *out = (float)value;
  return true;
}

/* Cuts a line where the character is, but not between quotes, into words, of which out gets the first
   COLUMNS + 1; returns how many there are. */
static int64_t cut(const unsigned char *line, int64_t length, unsigned char by, struct word *out) {
  const unsigned char *from = line, *end = line + length;
  int64_t count = 0;
  bool quoted = false;
  for (const unsigned char *at = line; at <= end; at++) {
    if (at < end && *at == '"') quoted = !quoted;
    if (at < end && (*at != by || quoted)) continue;
    if (count <= COLUMNS) out[count] = trimmed(from, at);
    count++;
    from = at + 1;
  }
  return count;
}

static void add_rows(int64_t n) {
  static int64_t room;
  if (data.size + n > room) {
    room = 2 * room + n + 1024;
    data.rows = (float *)grow(data.rows, room, (size_t)data.k * sizeof(float));
    data.labels = (int32_t *)grow(data.labels, room, sizeof(int32_t));
  }
  for (int64_t i = data.size * data.k; i < (data.size + n) * data.k; i++) data.rows[i] = NAN;
  for (int64_t i = data.size; i < data.size + n; i++) data.labels[i] = NONE;
  data.size += n;
}
static void add_series(int64_t at, int64_t n, int32_t label) {
  data.list = (series *)grow(data.list, data.count + 1, sizeof *data.list);
  data.list[data.count++] = (series){ at, n, label };
}

/* A case: dimensions between ":", the class, if any, last. */
static int read_case(const char *path, const unsigned char *line, int64_t length, int64_t number, bool learns) {
  static struct word parts[COLUMNS + 1];
  int64_t count = cut(line, length, ':', parts) - !data.classless, at = data.size, longest = 0;
  if (count < 1)
    return fail("%s: line %lld is not a case, dimensions and a class with ':' between", path, (long long)number);
  if (count > COLUMNS)
    return fail("%s: line %lld has more than %d dimensions", path, (long long)number, COLUMNS);
  if (data.k == 0) data.k = count;
  if (count != data.k)
    return fail("%s: line %lld has %lld dimensions, not %lld", path, (long long)number, (long long)count,
                (long long)data.k);
  for (int64_t d = 0; d < data.k; d++) {
    int64_t n = 1;
    for (int64_t i = 0; i < parts[d].size; i++) n += parts[d].at[i] == ',';
    if (n > longest) longest = n;
  }
  add_rows(longest);
  for (int64_t d = 0; d < data.k; d++) {
    const unsigned char *from = parts[d].at, *end = from + parts[d].size;
    for (int64_t t = 0; from <= end; t++) {
      const unsigned char *comma = (const unsigned char *)memchr(from, ',', (size_t)(end - from)),
          *to = comma ? comma : end;
      if (!number_of(trimmed(from, to), &data.rows[(at + t) * data.k + d]))
        return fail("%s: line %lld: number %lld of dimension %lld is not a number", path, (long long)number,
                    (long long)t + 1, (long long)d + 1);
      from = to + 1;
    }
  }
  if (!own.forecast && !data.classless && parts[data.k].size > WORD)
    return fail("%s: the class of line %lld has more than %d bytes", path, (long long)number, WORD);
  int32_t label = own.forecast || data.classless ? NONE : label_of(parts[data.k], learns);
  if (label == UNKNOWN && learns) return fail("%s has more than %d classes", path, CLASSES);
  if (label == NONE && learns && !own.forecast) return fail("%s: line %lld has no class", path, (long long)number);
  for (int64_t i = at; i < data.size; i++) data.labels[i] = label;
  add_series(at, longest, label);
  return 0;
}
static bool says(struct word w, const char *name, const char *value) { /* a line before @data */
  const int64_t size = (int64_t)strlen(name);
  return begins(w, name) && begins(trimmed(w.at + size, w.at + w.size), value);
}
static int read_ts(const char *path, bool learns) {
  int64_t at = 0, length, number = 0;
  const unsigned char *line;
  bool begun = false;
  while ((line = next_line(data.text, &at, &length)) != NULL) {
    struct word w = trimmed(line, line + length);
    number++;
    if (!begun && says(w, "@timeStamps", "true")) return fail("%s has time stamps, which are not read", path);
    data.classless = data.classless || (!begun && says(w, "@classLabel", "false"));
    if (data.classless && learns && !own.forecast) return fail("%s has no classes to learn (@classLabel false)", path);
    if (begun && w.size > 0 && *w.at != '#' && read_case(path, w.at, w.size, number, learns)) return 2;
    begun = begun || begins(w, "@data");
  }
  return 0;
}

/* One recording. Where the model has no columns yet, those become its: numbers in every row, and not always the
   same. */
static int read_csv(const char *path, bool learns) {
  static struct word names[COLUMNS + 1], parts[COLUMNS + 1];
  static char numbers[COLUMNS][8];
  static struct { bool varies; float first; int64_t at, word; } is[COLUMNS]; /* word: the first row of no number */
  int64_t at = 0, length, number = 1, count, label = -1, begin = 0;
  float value;
  bool header = true;
  const unsigned char *line = next_line(data.text, &at, &length);
  unsigned char by = ',';
  for (int64_t i = length; i-- > 0;) if (strchr(",;\t", line[i]) && line[i]) by = line[i];
  count = cut(line, length, by, names);
  if (count > COLUMNS) return fail("%s has more than %d columns", path, COLUMNS);
  for (int64_t c = 0; c < count; c++) header = header && !(number_of(names[c], &value) && value == value);
  if (header) begin = at;
  for (int64_t c = 0; c < count; c++) {
    snprintf(numbers[c], sizeof numbers[c], "%d", (int)c + 1);
    if (!header || names[c].size == 0) names[c] = (struct word){
      (const unsigned char *)numbers[c], (int64_t)strlen(numbers[c])
    };
    if (own.label && (is_word(names[c], own.label) || strcmp(numbers[c], own.label) == 0)) label = c;
    is[c].first = NAN;
    if (names[c].size > WORD) return fail("%s: the name of column %d has more than %d bytes", path, (int)c + 1, WORD);
    for (int64_t other = 0; other < c; other++)
      if (same_word(names[c], names[other]))
        return fail("%s has two columns '%.*s'", path, (int)names[c].size, (const char *)names[c].at);
  }
  if (own.label && label < 0 && learns) return fail("%s has no column '%s'", path, own.label);
  int64_t rows = 0;
  for (at = begin; (line = next_line(data.text, &at, &length)) != NULL; rows++) { /* what the columns are */
    if (length == 0) { rows--; continue; }
    if (cut(line, length, by, parts) != count)
      return fail("%s: row %lld has not %lld columns", path, (long long)rows + 1 + header, (long long)count);
    for (int64_t c = 0; c < count; c++) {
      if (!number_of(parts[c], &value) && !is[c].word) is[c].word = rows + 1 + header;
      if (is[c].first != is[c].first) is[c].first = value;
      else if (value == value && value != is[c].first) is[c].varies = true;
    }
  }
  for (int64_t c = 0; c < count && learns; c++) {
    if (c == label) continue;
    if (!is[c].word && is[c].varies) columns[column_count++] = names[c];
    else if (ranks.rank == 0) {
      printf("%s: column '", path), put_shown(stdout, names[c].at, names[c].size), printf("' is left out: ");
      if (is[c].word) printf("row %lld is not a number\n", (long long)is[c].word);
      else printf("it never changes\n");
    }
  }
  if (column_count == 0) return fail("%s has no column of numbers that change", path);
  for (int64_t i = 0; i < column_count; i++) {
    int64_t c = 0;
    while (c < count && !same_word(names[c], columns[i])) c++;
    if (c == count) return fail("%s has no column '%.*s'", path, (int)columns[i].size, (const char *)columns[i].at);
    is[i].at = c;
  }
  data.k = column_count;
  add_rows(rows);
  for (at = begin, rows = 0; (line = next_line(data.text, &at, &length)) != NULL; rows++) {
    if (length == 0) { rows--; continue; }
    cut(line, length, by, parts);
    for (int64_t i = 0; i < column_count; i++)
      if (!number_of(parts[is[i].at], &data.rows[rows * data.k + i]))
        return fail("%s: row %lld: '%.*s' is not a number", path, (long long)rows + 1 + header,
                    (int)(parts[is[i].at].size < 40 ? parts[is[i].at].size : 40), (const char *)parts[is[i].at].at);
    if (label >= 0 && parts[label].size > WORD)
      return fail("%s: the class of row %lld has more than %d bytes", path, (long long)rows + 1 + header, WORD);
    if (label >= 0 && (data.labels[rows] = label_of(parts[label], learns)) == UNKNOWN && learns)
      return fail("%s has more than %d classes", path, CLASSES);
  }
  (void)number;
  add_series(0, rows, -1);
  return 0;
}

/* Puts what --held says last: of cases a fifth of each class, of a recording a fifth of its time. */
static void hold_back(void) {
  int64_t seen[CLASSES + 1] = { 0 };
  series *old = data.list;
  int64_t count = data.count;
  data.list = NULL, data.count = data.training = 0;
  for (int held = 0; held < 2; held++) {
    memset(seen, 0, sizeof seen);
    for (int64_t i = 0; i < count; i++) {
      series s = old[i];
      if (data.csv && own.held) {
        int64_t from = s.n * (own.held - 1) / 5, to = s.n * own.held / 5;
        if (held) add_series(s.at + from, to - from, -1);
        else if (from > 0) add_series(s.at, from, -1);
        if (!held && to < s.n) add_series(s.at + to, s.n - to, -1);
      } else if ((seen[s.label + 1]++ % 5 == own.held - 1) == (held == 1)) add_series(s.at, s.n, s.label);
    }
    if (!held) data.training = data.count;
  }
  free(old);
}

static int read_data(const char *path, bool learns) {
  if (read_file(path, &data.text)) return 2;
  if (data.text.size >= 3 && memcmp(data.text.data, "\xEF\xBB\xBF", 3) == 0) /* a byte order mark */
    data.text.size -= 3, memmove(data.text.data, data.text.data + 3, (size_t)data.text.size + 1);
  if (data.text.size == 0) return fail("%s is empty", path);
  int64_t at = 0, length;
  const unsigned char *line;
  for (data.csv = true; data.csv && (line = next_line(data.text, &at, &length)) != NULL;)
    data.csv = !begins(trimmed(line, line + length), "@data");
  if (!learns && data.csv != (column_count > 0))
    return data.csv ? fail("%s is a table (CSV), but the model learnt from cases (.ts)", path) :
        fail("%s has cases (.ts), but the model learnt from a table (CSV)", path);
  if (data.csv ? read_csv(path, learns) : read_ts(path, learns)) return 2;
  if (data.count == 0 || data.size == 0) return fail("%s holds no series", path);
  if (learns && data.csv && !own.held) own.held = 5;
  data.training = data.count;
  if (learns) hold_back();
  return 0;
}

/* ---- the model: a classifier, or with --causal a causal model with outputs --------------------------------------- */

static luna_model model;
static bool steps_have_labels(void) { return own.per_step && !own.forecast; }

static luna_input_layer *input_layer(void) {
  return model.kind == LUNA_MODEL_LM ? &model.lm.input : &model.classifier.encoder.input;
}
static luna_tensor *run(const luna_input *input) {
  return model.kind == LUNA_MODEL_LM ? luna_lm_forward(&model.lm, input) :
      luna_classifier_forward(&model.classifier, input);
}
static luna_status make_model(luna_params *params) {
  const luna_layer_config layer = { .activation = LUNA_ACTIVATION_GELU, .pre_norm = true, .dropout = (float)set.dropout,
                                   .attention = (luna_attention_kind)set.attention,
                                   .recompute = (luna_recompute_kind)set.recompute,
                                   .output_gate = set.output_gate != 0 };
  const luna_encoder_config encoder = { .layers = set.layers, .dim = set.dim, .heads = set.heads, .ffn = set.ffn,
                                       .memory = set.memory,
    .positions = (luna_positions)set.positions, .max_length = 4096, .layer = layer };
  luna_lm_config lm = { .features = data.k, .outputs = own.forecast ? data.k : label_count, .layers = set.layers,
                       .dim = set.dim, .heads = set.heads,
    .ffn = set.ffn, .memory = set.memory, .layer = layer };
  lm.layer.convolution = 4;
  lm.layer.forget = (luna_forget)set.forget;
  model.kind = own.causal ? LUNA_MODEL_LM : LUNA_MODEL_CLASSIFIER;
  return own.causal ? luna_lm_init(&model.lm, params, &lm)
                    : luna_classifier_init(&model.classifier, params,
                                           &(luna_classifier_config){ .features = data.k, .classes = label_count,
                        .per_step = steps_have_labels(), .pooling = (luna_pooling)set.pooling, .encoder = encoder });
}

/* Mean and deviation of each column, which the model keeps, and the deviation of its changes. Returns 0, or 2 after a
   sentence. */
static int measure(luna_ctx *ctx) {
  int64_t k = data.k, n = 0;
  for (int64_t i = 0; i < data.training; i++) n += data.list[i].n;
  float *rows = (float *)grow(NULL, n * k, sizeof(float));
  mean = (float *)grow(NULL, 3 * k, sizeof(float)), deviation = mean + k, change = deviation + k;
  double *squares = (double *)grow(NULL, 2 * k, sizeof(double));
  memset(squares, 0, (size_t)(2 * k) * sizeof(double));
  n = 0;
  for (int64_t i = 0; i < data.training; i++) {
    const float *from = data.rows + data.list[i].at * k;
    memcpy(rows + n * k, from, (size_t)(data.list[i].n * k) * sizeof(float));
    n += data.list[i].n;
    for (int64_t j = k; j < data.list[i].n * k; j++) {
      double by = (double)from[j] - (double)from[j - k];
      if (by == by) squares[j % k] += by * by, squares[k + j % k]++;
    }
  }
  luna_status status = luna_input_layer_fit(input_layer(), &(luna_input){ .features = rows, .batch = 1, .n = n });
  if (status == LUNA_OK) status = luna_read(input_layer()->mean, mean);
  if (status == LUNA_OK) status = luna_read(input_layer()->scale, deviation);
  for (int64_t c = 0; c < k; c++) {
    deviation[c] = 1 / deviation[c];
    change[c] = squares[c] > 0 ? (float)sqrt(squares[c] / squares[k + c]) : 1;
  }
  free(rows), free(squares);
  return status == LUNA_OK ? 0 : failed(ctx);
}

/* ---- batches ----------------------------------------------------------------------------------------------------- */

/* [rows,n,k], of the next step's changes too; [rows,n] or [rows]; [rows] */
static struct { float *x, *targets; int32_t *labels, *lengths; int64_t rows, n; } batch;

static void batch_open(int64_t rows, int64_t n) {
  batch.x = (float *)grow(batch.x, rows * n * data.k, sizeof(float));
  batch.targets = (float *)grow(batch.targets, rows * n * data.k, sizeof(float));
  batch.labels = (int32_t *)grow(batch.labels, rows * n, sizeof(int32_t));
  batch.lengths = (int32_t *)grow(batch.lengths, rows, sizeof(int32_t));
  batch.rows = rows, batch.n = n;
}

static uint64_t random_state;
static double uniform(void) {                              /* in [-1, 1) */
  return (double)(splitmix(&random_state) >> 12) / 2251799813685248.0 - 1;
}
static int64_t below(int64_t n) { return (int64_t)((uniform() + 1) / 2 * (double)n) % n; }
static double normal(void) { return uniform() + uniform() + uniform(); } /* of deviation 1, near enough */

/* `n` rows of a series from row `from` on into row `at` of the batch's sequence `b`; its targets are what follows. */
static void place(int64_t b, int64_t at, series s, int64_t from, int64_t n) {
  const int64_t k = data.k, first = (s.at + from) * k;
  float *x = batch.x + (b * batch.n + at) * k, *y = batch.targets + (b * batch.n + at) * k;
  memcpy(x, data.rows + first, (size_t)(n * k) * sizeof(float));
  if (own.forecast)
    for (int64_t i = 0; i < n * k; i++)
      y[i] = from + i / k + 1 < s.n ? (data.rows[first + i + k] - data.rows[first + i]) / change[i % k] : NAN;
  if (steps_have_labels())
    memcpy(batch.labels + b * batch.n + at, data.labels + s.at + from, (size_t)n * sizeof(int32_t));
  else batch.labels[b] = s.label;
}
/* The same rows stretched in time, scaled and with noise: what is learnt from is never twice the same. Returns how many
   they are now. */
static int64_t place_changed(int64_t b, int64_t at, series s, int64_t room) {
  const int64_t k = data.k;
  int64_t n = (int64_t)((double)s.n * (1 + own.stretch * uniform()) + 0.5);
  n = n < 1 ? 1 : n > room ? room : n;
  const double step = n > 1 ? (double)(s.n - 1) / (double)(n - 1) : 0;
  for (int64_t c = 0; c < k; c++) {
    const double scale = 1 + own.scale * uniform();
    for (int64_t i = 0; i < n; i++) {
      int64_t low = (int64_t)((double)i * step), high = low + 1 < s.n ? low + 1 : low;
      double part = (double)i * step - (double)low, a = (double)data.rows[(s.at + low) * k + c],
          z = (double)data.rows[(s.at + high) * k + c];
      double x = part > 0 ? a + part * (z - a) : a;
      batch.x[(b * batch.n + at + i) * k + c] = (float)((double)mean[c] + scale * (x - (double)mean[c]) + own.noise *
                                                        (double)deviation[c] * normal());
    }
  }
  for (int64_t i = 0; i < n && steps_have_labels(); i++)
    batch.labels[b * batch.n + at + i] = data.labels[s.at + (int64_t)((double)i * step)];
  if (!steps_have_labels()) batch.labels[b] = s.label;
  return n;
}

/* What training step `step` learns from. */
static void training_batch(int64_t step, int32_t *order) {
  const bool joined = own.per_step && !data.csv, windows = own.forecast || data.csv;
  int64_t longest = 1;
  random_state = draw(1, step, 0);
  batch_open(set.batch, 1);
  for (int64_t b = 0; b < set.batch; b++) {                /* in rounds through all, each in an order of its own */
    int64_t index = (step * set.batch + b) % data.training;
    if (index == 0 || (b == 0 && step == 0))
      for (int64_t i = data.training - 1; i > 0; i--) {
        int64_t j = below(i + 1);
        int32_t t = order[i];
        order[i] = order[j], order[j] = t;
      }
    batch.lengths[b] = order[index];
    int64_t n = data.list[order[index]].n;
    longest = n > longest ? n : longest;
  }
  longest = windows || joined ? own.window : (int64_t)((double)longest * (1 + own.stretch)) + 1;
  batch_open(set.batch, longest);
  for (int64_t b = 0; b < set.batch; b++) {
    series s = data.list[batch.lengths[b]];
    int64_t n = 0;
    if (windows) {                                         /* a recording's part, the longer the likelier */
      int64_t all = 0, at;
      for (int64_t i = 0; i < data.training; i++) all += data.list[i].n;
      at = below(all);
      for (int64_t i = 0; at >= (s = data.list[i]).n; i++) at -= s.n;
      n = s.n < longest ? s.n : longest;
      place(b, 0, s, below(s.n - n + 1), n);
      for (int64_t i = 0; i < n * data.k && !own.forecast; i++)
        batch.x[b * longest * data.k + i] += (float)(own.noise * (double)deviation[i % data.k] * normal());
    } else if (joined)
      while (n < longest) {
        s = data.list[below(data.training)];
        if (n == 0) { int64_t skip = below(s.n); s.at += skip, s.n -= skip; }
        n += place_changed(b, n, s, longest - n);
      }
    else n = place_changed(b, 0, s, longest);
    batch.lengths[b] = (int32_t)n;
    for (int64_t i = n; i < longest; i++) {
      if (steps_have_labels()) batch.labels[b * longest + i] = -1;
      for (int64_t c = 0; c < data.k; c++)
        batch.x[(b * longest + i) * data.k + c] = batch.targets[(b * longest + i) * data.k + c] = NAN;
    }
  }
}

/* Of the batch this rank's sequences, or its rows of each; lengths stay those of whole sequences. */
static void own_part(void) {
  const portion rows = rank_part(LUNA_PARALLEL_DATA, batch.rows), cut = rank_part(LUNA_PARALLEL_SEQUENCE, batch.n);
  const size_t numbers = (size_t)(cut.count * data.k) * sizeof(float);
  const int64_t per = steps_have_labels() ? cut.count : 1; /* labels of a sequence */
  for (int64_t b = 0; b < rows.count; b++) {               /* what moves, moves down */
    const int64_t from = (rows.first + b) * batch.n + cut.first;
    memmove(batch.x + b * cut.count * data.k, batch.x + from * data.k, numbers);
    memmove(batch.targets + b * cut.count * data.k, batch.targets + from * data.k, numbers);
    memmove(batch.labels + b * per, batch.labels + (steps_have_labels() ? from : rows.first + b),
            (size_t)per * sizeof(int32_t));
    batch.lengths[b] = batch.lengths[rows.first + b];
  }
  batch.rows = rows.count, batch.n = cut.count;
}

static luna_tensor *loss_of(luna_tensor *y) {
  return own.forecast ? luna_huber(y, batch.targets, 0.1f) : luna_cross_entropy(y, batch.labels);
}
static luna_input batch_input(void) {
  return (luna_input){ .features = batch.x, .lengths = batch.lengths, .batch = batch.rows, .n = batch.n };
}

/* ---- what a model finds ------------------------------------------------------------------------------------------ */

/* Calls found(series, row, outputs) for each series, or each of its rows; long recordings go by windows, of which a
   causal model gets the half before. Outputs are probabilities, or the next row. Returns 0, or 2 after a sentence. */
static int find_all(luna_ctx *ctx, int64_t first, int64_t last,
                    void (*found)(const series *s, int64_t row, const float *outputs)) {
  const bool whole = !own.per_step && !own.forecast;
  const int64_t outputs = own.forecast ? data.k : label_count;
  float *y = NULL;
  for (int64_t i = first; i < last; i++) {
    series s = data.list[i];
    for (int64_t from = 0, next = 0; next < s.n || (whole && from == 0); from =
         next - (own.causal ? own.window / 2 : 0)) {
      int64_t n = whole || s.n - from < own.window ? s.n - from : own.window, skip = next - from;
      batch_open(1, n);
      batch.lengths[0] = (int32_t)n;
      place(0, 0, s, from, n);
      luna_begin_inference(ctx);
      luna_input input = batch_input();
      luna_tensor *out = run(&input);
      if (!own.forecast) out = luna_softmax(out, NULL);
      y = (float *)grow(y, (whole ? 1 : n) * outputs, sizeof(float));
      if (luna_read(out, y) != LUNA_OK) return free(y), failed(ctx);
      for (int64_t t = skip; t < (whole ? 1 : n); t++) {
        float *at = y + t * outputs;
        for (int64_t c = 0; c < data.k && own.forecast; c++)
          at[c] = data.rows[(s.at + from + t) * data.k + c] + change[c] * at[c];
        found(&s, from + t, at);
      }
      next = from + n;
      if (whole) break;
    }
  }
  free(y);
  return 0;
}

static int32_t best_of(const float *shares) {
  int32_t best = 0;
  for (int32_t c = 1; c < label_count; c++) if (shares[c] > shares[best]) best = c;
  return best;
}

static struct { int64_t count, right; double error, last; } score;
static void count_score(const series *s, int64_t row, const float *y) {
  if (own.forecast) {
    const float *now = data.rows + (s->at + row) * data.k;
    for (int64_t c = 0; c < data.k && row + 1 < s->n; c++) {
      double next = (double)now[data.k + c], by = fabs((double)y[c] - next), last = fabs((double)now[c] - next);
      if (by == by && last == last) score.count++, score.error += by, score.last += last;
    }
    return;
  }
  int32_t label = own.per_step ? data.labels[s->at + row] : s->label;
  if (label == NONE) return;
  score.count++, score.right += label == best_of(y);       /* UNKNOWN is never right */
}
/* Measures the model on series first .. last - 1, and prints it, after `begin`; only without that must there be
   something to measure on. */
static int print_score(luna_ctx *ctx, int64_t first, int64_t last, const char *begin) {
  memset(&score, 0, sizeof score);
  if (find_all(ctx, first, last, count_score)) return 2;
  if (score.count == 0) return *begin ? 0 : fail("there is nothing to measure on");
  double count = (double)score.count;
  if (own.forecast)
    printf("%smean absolute error %.6g, of the last value %.6g\n", begin, score.error / count, score.last / count);
  else printf("%saccuracy %.2f%%\n", begin, 100 * (double)score.right / count);
  return 0;
}

/* The cases from `first` on become one recording, in an order by chance. */
static void join(int64_t first) {
  const int64_t at = data.size, count = data.count - first;
  random_state = 1;
  for (int64_t i = count - 1; i > 0; i--) {
    series *a = data.list + first + i, *b = data.list + first + below(i + 1), t = *a;
    *a = *b, *b = t;
  }
  for (int64_t i = first; i < data.count; i++) {
    series s = data.list[i];
    int64_t to = data.size;
    add_rows(s.n);
    memcpy(data.rows + to * data.k, data.rows + s.at * data.k, (size_t)(s.n * data.k) * sizeof(float));
    memcpy(data.labels + to, data.labels + s.at, (size_t)s.n * sizeof(int32_t));
  }
  if (count == 0) return;
  data.list[first] = (series){ at, data.size - at, -1 };
  data.count = first + 1;
}

/* ---- what a model must know besides its weights ------------------------------------------------------------------ */

static luna_status keep(luna_params *params, const char *what, int64_t index, const char *text, int64_t size) {
  char key[40], *value = (char *)grow(NULL, size + 1, 1);
  snprintf(key, sizeof key, "series.%s%lld", what, (long long)index);
  memcpy(value, text, (size_t)size);
  value[size] = 0;
  luna_status status = luna_params_set(params, key, value);
  free(value);
  return status;
}
static luna_status remember(luna_params *params) {
  char text[64];
  snprintf(text, sizeof text, "%d %d %d %lld", (int)own.per_step, (int)own.causal, (int)own.forecast,
           (long long)own.window);
  luna_status status = keep(params, "task", 0, text, (int64_t)strlen(text));
  if (status == LUNA_OK && own.label) status = keep(params, "label", 0, own.label, (int64_t)strlen(own.label));
  for (int32_t i = 0; i < label_count && status == LUNA_OK; i++)
    status = keep(params, "class", i, (const char *)labels[i].at, labels[i].size);
  for (int64_t i = 0; i < column_count && status == LUNA_OK; i++)
    status = keep(params, "column", i, (const char *)columns[i].at, columns[i].size);
  for (int64_t i = 0; i < data.k && status == LUNA_OK; i++) {
    snprintf(text, sizeof text, "%.9g", (double)change[i]);
    status = keep(params, "change", i, text, (int64_t)strlen(text));
  }
  return status;
}
static const char *kept(const luna_params *params, const char *what, int64_t index) {
  char key[40];
  snprintf(key, sizeof key, "series.%s%lld", what, (long long)index);
  return luna_params_get(params, key);
}

static int load(luna_ctx *ctx, const char *path) {
  luna_params *params = luna_params_open(ctx);
  const char *text;
  int per_step, causal, forecast;
  long long window;
  if (luna_load_model(&model, params, path) != LUNA_OK) return failed(ctx);
  const bool lm = model.kind == LUNA_MODEL_LM, classifier = model.kind == LUNA_MODEL_CLASSIFIER;
  const int64_t k = lm ? model.lm.config.features : classifier ? model.classifier.config.features : 0;
  bool fine = k > 0 && (text = kept(params, "task", 0)) != NULL &&
      sscanf(text, "%d %d %d %lld", &per_step, &causal, &forecast, &window) == 4;
  fine = fine && window >= 2 && window <= 1000000 && lm == (causal != 0) && (lm || !model.classifier.config.pair);
  if (!fine) return fail("%s is not a model that series made", path);
  own.per_step = per_step != 0, own.causal = causal != 0, own.forecast = forecast != 0, own.window = window;
  own.label = kept(params, "label", 0);
  for (; label_count < CLASSES && (text = kept(params, "class", label_count)) != NULL; label_count++)
    labels[label_count] = (struct word){ (const unsigned char *)text, (int64_t)strlen(text) };
  for (; column_count < COLUMNS && (text = kept(params, "column", column_count)) != NULL; column_count++)
    columns[column_count] = (struct word){ (const unsigned char *)text, (int64_t)strlen(text) };
  change = (float *)grow(NULL, k, sizeof(float));
  for (int64_t i = 0; i < k; i++) {
    text = kept(params, "change", i);
    change[i] = text ? (float)atof(text) : 0;
    fine = fine && change[i] > 0 && isfinite(change[i]);
  }
  fine = fine && (lm ? model.lm.config.outputs : model.classifier.config.classes) == (own.forecast ? k : label_count);
  fine = fine && (!classifier || (model.classifier.config.per_step == steps_have_labels() && !own.forecast));
  fine = fine && (column_count == 0 || column_count == k);
  data.k = column_count ? 0 : k;
  return fine ? 0 : fail("%s is not a model that series made", path);
}

/* Reads a model, and a file that is for it. */
static int load_both(luna_ctx *ctx, const char **words) {
  return load(ctx, words[0]) || read_data(words[1], false) ? 2 : 0;
}

/* ---- commands ---------------------------------------------------------------------------------------------------- */

static progress bar;

static int learn(luna_ctx *ctx, luna_params *params) {
  luna_optimizer *adam = luna_adamw(params, &(luna_optimizer_config){
    .lr = (float)set.lr, .weight_decay = 0.01f, .clip = 1,
    .schedule = { .decay = LUNA_DECAY_COSINE, .warmup = set.steps < 500 ? set.steps / 10 : 50, .total = set.steps,
                 .floor = 0.02f } });
  int32_t *order = (int32_t *)grow(NULL, data.training, sizeof(int32_t));
  for (int64_t i = 0; i < data.training; i++) order[i] = (int32_t)i;
  progress_start(&bar, 0);
  while (adam && bar.step < set.steps && !interrupted) {
    training_batch(bar.step, order);
    own_part();
    luna_begin_step(ctx);
    luna_input input = batch_input();
    luna_tensor *loss = loss_of(run(&input));
    luna_backward(loss);
    if (luna_optimizer_step(adam) != LUNA_OK) return free(order), failed(ctx);
    progress_step(&bar, (double)luna_item(loss), (double)(batch.rows * batch.n * ranks.ranks));
  }
  progress_end(&bar);
  free(order);
  return !adam ? failed(ctx) : bar.step ? 0 : fail("stopped before the first step: nothing learnt, nothing written");
}

/* On several ranks the first one measures alone, in a context that has no others. */
static int score_held(luna_ctx *ctx, luna_params *params) {
  luna_ctx *alone = ranks.ranks == 1 ? ctx : luna_open(&(luna_options){ .threads = (int)set.threads });
  int status = alone != ctx && make_model(luna_params_share(alone, params)) != LUNA_OK ? failed(alone) : 0;
  if (!status) status = print_score(alone, data.training, data.count, "on what was not learnt from: ");
  if (alone != ctx) luna_close(alone);
  return status;
}

/* Refuses what was given on the command line but changes nothing in this task. */
static int check_flags(void) {
  const bool windows = own.forecast || data.csv;
  const struct { const void *place; bool idle; } all[] = {
    { &own.noise, own.forecast }, { &own.stretch, windows }, { &own.scale, windows },
    { &own.window, !windows && !own.per_step }, { &set.positions, own.causal },
    { &set.pooling, own.causal || own.per_step }
  };
  for (int i = 0; flags[i].name; i++)
    for (size_t j = 0; j < sizeof all / sizeof *all && flags_given >> i & 1; j++)
      if (all[j].idle && (flags[i].whole == all[j].place || flags[i].real == all[j].place))
        return fail("%s changes nothing in this task; leave it out", flags[i].name);
  return 0;
}

static int train(luna_ctx *ctx, const char **words) {
  luna_params *params = luna_params_open(ctx);
  double start = seconds();
  if (own.forecast) own.causal = true;
  if (own.label) own.per_step = true;
  if (own.label && own.forecast) return fail("--label and --forecast are two tasks; choose one");
  if (own.causal && !own.per_step && !own.forecast) return fail("--causal is for a class at each step; add --per-step");
  if (read_data(words[0], true)) return 2;
  if (data.csv && !own.label && !own.forecast)
    return fail("%s is a table: say what to learn by --label COLUMN or --forecast", words[0]);
  if (!data.csv && own.label) return fail("%s has cases with a class each; --label is for tables (CSV)", words[0]);
  if (check_flags()) return 2;
  if (!own.forecast && label_count < 2) return fail("%s has %d classes; it takes two", words[0], (int)label_count);
  if (data.training == 0) return fail("%s has too few series to hold a fifth back", words[0]);
  if (make_model(params) != LUNA_OK) return failed(ctx);
  if (measure(ctx)) return 2;
  if (remember(params) != LUNA_OK) return failed(ctx);
  printf("%s: %lld series, %lld steps of %lld numbers, %d classes; %lld parameters\n", words[0], (long long)data.count,
         (long long)data.size,
         (long long)data.k, (int)label_count, (long long)luna_params_element_count(params));
  fflush(stdout);
  if (learn(ctx, params)) return 2;
  if (ranks.rank > 0) return 0;
  if (luna_save(params, set.out) != LUNA_OK) return failed(ctx);
  printf("%s: %lld steps in %.0f s\n", set.out, (long long)bar.step, seconds() - start);
  if (own.per_step && !data.csv) join(data.training);
  if (data.count > data.training && score_held(ctx, params)) return 2;
  return plot(&bar, words[0]);
}

static int eval(luna_ctx *ctx, const char **words) {
  if (load_both(ctx, words)) return 2;
  if (own.per_step && !data.csv) join(0);
  return print_score(ctx, 0, data.count, "");
}

/* what is found of the first series: each row's class, or its forecast, made a row before */
static float *drawn;
static void print_found(const series *s, int64_t row, const float *y) {
  const int32_t best = own.forecast ? 0 : best_of(y);
  if (!own.forecast) put_label(labels[best].at, labels[best].size), printf("\t%.3f\n", (double)y[best]);
  else if (row + 1 == s->n)
    for (int64_t c = 0; c < data.k; c++) printf("%.6g%c", (double)y[c], c + 1 < data.k ? ',' : '\n');
  if (s->at != data.list[0].at) return;
  if (own.forecast) memcpy(drawn + (row + 1) * data.k, y, (size_t)data.k * sizeof(float));
  else drawn[row] = (float)best;
}

static int draw_series(const char *title);
static int predict(luna_ctx *ctx, const char **words) {
  if (load_both(ctx, words)) return 2;
  drawn = (float *)grow(NULL, (data.list[0].n + 1) * data.k, sizeof(float));
  for (int64_t i = 0; i < data.k; i++) drawn[i] = NAN;     /* nothing forecasts the first row */
  if (find_all(ctx, 0, data.count, print_found)) return 2;
  if (ferror(stdout)) return fail("cannot write what is found: %s", strerror(errno));
  return own.svg ? draw_series(words[1]) : 0;
}

/* ---- the picture ------------------------------------------------------------------------------------------------- */

#define SHOWN 1500                   /* steps, at most: the last ones */
#define LINES 6                      /* columns, at most */
#define COLOUR(i) (int)((i) * 137 % 360)

static void draw_line(FILE *f, const float *at, int64_t n, int64_t stride, double low, double high, int colour,
                      bool dashed) {
  bool on = false;
  fprintf(f, "<path fill=\"none\" stroke=\"hsl(%d,70%%,40%%)\"%s d=\"", colour,
          dashed ? " stroke-dasharray=\"3 2\" opacity=\"0.8\"" : "");
  for (int64_t i = 0; i < n; i++) {
    double y = (double)at[i * stride];
    if (isfinite(y))
      fprintf(f, "%c%.1f %.1f", on ? 'L' : 'M', 20 + 860 * (double)i / (double)(n > 1 ? n - 1 : 1),
              290 - 240 * (fmin(fmax(y, low), high) - low) / (high - low));
    on = isfinite(y);
  }
  fprintf(f, "\"/>\n");
}
static void draw_text(FILE *f, const char *text, int64_t size) {
  for (int64_t i = 0; i < size; i++)
    fputc(text[i] < 32 || text[i] > 126 || strchr("<>&\"", text[i]) ? '?' : text[i], f);
}

/* Columns as lines; forecasts, dashed, where they were for; a class at each step as a band below. */
static int draw_series(const char *title) {
  const int64_t k = data.k, all = data.list[0].n, skip = all > SHOWN ? all - SHOWN : 0, n = all - skip;
  const float *rows = data.rows + (data.list[0].at + skip) * k;
  FILE *f = fopen(own.svg, "wb");
  if (!f) return fail("cannot write %s: %s", own.svg, strerror(errno));
  fprintf(f, "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 900 360\" width=\"900\" height=\"360\" "
             "font-family=\"sans-serif\" font-size=\"12\">\n"
             "<rect width=\"900\" height=\"360\" fill=\"#fff\"/>\n<text x=\"20\" y=\"28\" font-size=\"15\">");
  draw_text(f, title, (int64_t)strlen(title));
  if (!own.forecast && !own.per_step)
    fprintf(f, ": "), draw_text(f, (const char *)labels[(int)drawn[0]].at, labels[(int)drawn[0]].size);
  fprintf(f, "</text>\n");
  for (int64_t c = 0; c < k && c < LINES; c++) {
    double low = HUGE_VAL, high = -HUGE_VAL;
    for (int64_t i = 0; i < n; i++)
      if (isfinite(rows[i * k + c]))
        low = fmin(low, (double)rows[i * k + c]), high = fmax(high, (double)rows[i * k + c]);
    if (low > high) continue;
    if (low == high) high = low + 1;
    draw_line(f, rows + c, n, k, low, high, COLOUR(c), false);
    if (own.forecast) draw_line(f, drawn + skip * k + c, n, k, low, high, COLOUR(c), true);
  }
  for (int64_t i = 0, from = 0; own.per_step && !own.forecast && i < n; i++) {
    if (i + 1 < n && drawn[skip + i + 1] == drawn[skip + i]) continue;
    const int32_t label = (int32_t)drawn[skip + i];
    const double x = 20 + 860 * (double)from / (double)n, width = 860 * (double)(i + 1 - from) / (double)n;
    fprintf(f, "<rect x=\"%.1f\" y=\"305\" width=\"%.1f\" height=\"20\" fill=\"hsl(%d,60%%,70%%)\"/>", x, width,
            COLOUR(label));
    if (width > 40)
      fprintf(f, "<text x=\"%.1f\" y=\"320\">", x + 3), draw_text(f, (const char *)labels[label].at,
          labels[label].size < 12 ? labels[label].size : 12), fprintf(f, "</text>");
    fputc('\n', f);
    from = i + 1;
  }
  fprintf(f, "</svg>\n");
  bool fine = !ferror(f);
  fine = fclose(f) == 0 && fine;
  return fine ? 0 : fail("cannot write %s: %s", own.svg, strerror(errno));
}

static const command commands[] = {
  { "train", { "data: .ts or CSV" }, "learns from series, and writes a model", train },
  { "eval", { "model", "data: .ts or CSV" }, "how well a model does on a file", eval },
  { "predict", { "model", "data: .ts or CSV" }, "what a model finds in a file", predict },
  { 0 }
};

int main(int count, char **given) {
  int status = example("series", commands, flags, count, given);
  free(batch.x), free(batch.targets), free(batch.labels), free(batch.lengths);
  free(data.text.data), free(data.rows), free(data.labels), free(data.list), free(mean ? mean : change), free(drawn);
  return status;
}
