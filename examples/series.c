/* series: sequences of numbers, from sensors, audio or prices. It finds the class of a series or the class at each
   step, or forecasts the next step's numbers.

     cc -O2 -I. examples/series.c -o series -lm -lpthread

     series train FILE.ts [--out M] ...                         finds a class for each case (UEA/UCR archive)
     series train FILE.ts --per-step [--causal]                 joins cases to recordings; finds the class at each step
     series train FILE.csv --label COLUMN                       reads one recording, whose COLUMN has each row's class
     series train FILE.csv --forecast                           forecasts the next row of a recording
     series train FILE.csv --forecast --ahead 1,6,24            forecasts rows further ahead, each with an interval
     series train FILE.csv --forecast --inputs hour,weekday     reads columns that it does not forecast
     series train FILE.csv ... --carry                          reads the recording as one sequence, window by window
     series eval M FILE                                         measures M on a file
     series predict M FILE [--plot PICTURE]                     prints what M finds, as CSV with all probabilities

   In a .ts file each line after @data is a case: dimensions separated by ":", values by ",", and the class last. In a
   .csv file the first row may name the columns. The columns of numbers are read, except those that never change;
   --columns and --drop choose others. A number is missing if the cell is empty or is ?, -, NA, N/A, NaN, null or none.
   Cases may differ in length. A part of the training data is for validation, which keeps the best model. A fifth of a
   recording is held out and measured at the end, beside a linear model. Causal models see no later step, so they can
   be streamed, and they are measured as they stream. The model holds all that it must know besides its weights, so M
   is all that is needed. With --label there are 600 steps unless --steps says otherwise, else 1200. */
#define LUNA_IMPLEMENTATION
#include "luna.h"
#include "luna_ops.h"

#include "common/example.h"
#include "common/attention_choice.h"

static struct settings set = {
  .out = "series.safetensors",
  .steps = 1200, .batch = 16, .lr = 2e-3,
  .layers = 2, .dim = 32, .heads = 4, .memory = 16, .ffn = 64, .dropout = 0.2, .pooling = LUNA_POOLING_MEAN,
  .seed = 1, .forget = LUNA_FORGET_GATED, .validations = 20, .patience = 6
};
enum { BY_MODEL, BY_LINEAR, BY_BOTH };
static struct {
  const char *label, *svg, *columns, *drop, *ahead, *inputs;
  int64_t per_step, causal, forecast, window, carry, held, interval, by, from, to, every;
  double noise, stretch, scale, valid, teach, average;
} own = { .ahead = "1", .window = 300, .noise = 0.1, .stretch = 0.2, .scale = 0.1, .valid = 0.1, .interval = 80,
          .teach = 0.1, .average = 0.98 };

#include "series_data.h"
#include "series_score.h"

/* Of the data that is learnt from: of each column [k], and of how it changes from a row to each of those ahead
   [ahead_count,k] */
static float *mean, *deviation, *change;

#include "series_linear.h"
#include "series_svg.h"

static const flag flags[] = {
  FLAGS_TRAIN,
  { "--label", "t", STRING(own.label),
   "Takes each row's class from this column of a CSV file. TEXT is its name or its number from 1." },
  { "--per-step", "t", SWITCH(own.per_step), "Finds a class at each step. Cases of .ts are joined into recordings." },
  { "--causal", "t", SWITCH(own.causal),
   "Lets each step see itself and earlier ones alone. With CSV this is so unless you say no." },
  { "--forecast", "t", SWITCH(own.forecast), "Forecasts the numbers of the next step." },
  { "--ahead", "t", STRING(own.ahead), "Forecasts so many steps ahead. TEXT is a number or a list such as 1,6,24." },
  { "--interval", "t", WHOLE(own.interval, 0, 99),
   "Gives forecasts bounds that should hold N percent of the later numbers. 0 gives none." },
  { "--window", "t", WHOLE(own.window, 2, 1e6), "Reads N tokens or steps at once. A step is a row of a recording." },
  { "--carry", "t", SWITCH(own.carry), "Lets windows continue one another, with the memory carried over." },
  { "--columns", "t", STRING(own.columns),
   "Reads only these columns of a CSV file. TEXT has names or numbers from 1, such as a,b,7." },
  { "--drop", "t", STRING(own.drop), "Leaves these columns of a CSV file out. TEXT is as for --columns." },
  { "--inputs", "t", STRING(own.inputs),
   "Reads these columns of a CSV file, but does not forecast them. TEXT is as for --columns." },
  { "--held", "t", WHOLE(own.held, 0, 5),
   "Says which data are held out. N is the fifth held out, from 1 to 5; 0 is none of .ts and the last of CSV." },
  { "--valid", "t", REAL(own.valid, 0, 0.5),
   "Says which samples choose the model. They are a share X of what is not held out, if that is 20 cases." },
  FLAG_PATIENCE,
  FLAGS_RARE,
  { "--noise", "t", REAL(own.noise, 0, 10), "Adds noise of X standard deviations to the training data." },
  { "--stretch", "t", REAL(own.stretch, 0, 0.9), "Stretches the training data in time by at most a share X." },
  { "--scale", "t", REAL(own.scale, 0, 0.9), "Scales the training data's values by at most a share X." },
  { "--teach", "t", REAL(own.teach, 0, 100),
   "Gives the linear model's log-probabilities weight X as targets beside a CSV file's classes. 0 gives none." },
  { "--average", "t", REAL(own.average, 0, 0.9999),
   "Keeps a moving average of the parameters, with decay X, if a CSV file has classes. 0 keeps the last ones." },
  FLAGS_MODEL,
  FLAGS_FORGET,
  FLAGS_CLASSIFIER,
  FLAG_SEED("t"),
  { "--by", "ep", CHOICE(own.by, "model linear both"),
   "Chooses whose predictions are used. They are the model's, the linear model's, or both's by the mean of their "
   "logits." },
  FLAG_THREADS("tep"),
  FLAG_RECOMPUTE,
  FLAG_PARALLEL,
  { "--every", "p", SWITCH(own.every), "Prints the forecasts of every step, not of the last one alone." },
  { "--plot", "p", WRITES(own.svg), "Draws a picture in FILE, as SVG. It shows the series and what is found in them." },
  { "--from", "p", WHOLE(own.from, 0, 1e12), "Draws the first series from step N on. 0 draws the parts that matter." },
  { "--to", "p", WHOLE(own.to, 0, 1e12), "Draws the first series up to step N. 0 draws the parts that matter." },
  { 0 }
};

static int64_t outputs(void) { /* of a step */
  return own.forecast ? ahead_count * data.k * level_count : label_count;
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
  if (own.causal) choose_output_gate();
  luna_layer_config layer = { .dim = set.dim, .heads = set.heads, .memory = set.memory, .ffn = set.ffn,
                             .dropout = (float)set.dropout, .activation = LUNA_ACTIVATION_GELU, .pre_norm = true,
                             .output_gate = set.output_gate != 0, .recompute = (luna_recompute_kind)set.recompute };
  choose_attention(&layer);
  const luna_encoder_config encoder = { .features = data.k, .layers = set.layers, .layer = layer,
                                       .positions = (luna_positions)set.positions, .max_length = 4096 };
  luna_lm_config lm = { .features = data.k, .outputs = outputs(), .layers = set.layers, .layer = layer };
  lm.layer.convolution = 4;
  lm.layer.forget = (luna_forget)set.forget;
  model.kind = own.causal ? LUNA_MODEL_LM : LUNA_MODEL_CLASSIFIER;
  const luna_classifier_config classifier = { .classes = label_count, .per_step = steps_have_labels(),
                                              .pooling = (luna_pooling)set.pooling, .encoder = encoder };
  return own.causal ? luna_lm_init(&model.lm, params, &lm) :
      luna_classifier_init(&model.classifier, params, &classifier);
}

static luna_status read_deviations(void) {                 /* as the model has them */
  luna_status status = luna_read(input_layer()->mean, mean);
  if (status == LUNA_OK) status = luna_read(input_layer()->scale, deviation);
  for (float *d = deviation; d < change; d++) *d = 1 / *d;
  return status;
}

static void columns_open(int64_t k) {
  mean = (float *)grow(NULL, (2 + ahead_count) * k, sizeof(float)), deviation = mean + k, change = deviation + k;
}
/* What the forecasts of a row start from: the column's last number, or its mean before there is any. */
static float known_at(int64_t row, int64_t c) {
  const float x = data.known[row * data.k + c];
  return x == x ? x : mean[c];
}
/* The deviation of changes of column c over so many rows; 1 where there are none. */
static float change_over(int64_t rows, int64_t c) {
  double squares = 0, count = 0;
  for (int64_t i = 0; i < data.training; i++) {
    const float *from = data.rows + data.list[i].at * data.k + c;
    for (int64_t j = rows; j < data.list[i].n; j++) {
      const double by = (double)from[j * data.k] - (double)from[(j - rows) * data.k];
      if (by == by) squares += by * by, count++;
    }
  }
  return squares > 0 ? (float)sqrt(squares / count) : 1;
}

/* How far column c is from itself `back` rows before, on average in the training data, of which a sample counts. */
#define MOST_SEASON 10000
#define SEASON_SAMPLE 2000
static double unlike(int64_t back, int64_t c) {
  double sum = 0, count = 0;
  for (int64_t i = 0; i < data.training; i++) {
    const series s = data.list[i];
    const int64_t every = s.n > SEASON_SAMPLE ? s.n / SEASON_SAMPLE : 1;
    for (int64_t row = back; row < s.n; row += every) {
      const float *x = data.rows + (s.at + row) * data.k + c;
      const double by = (double)x[0] - (double)x[-back * data.k];
      if (by == by) sum += fabs(by), count++;
    }
  }
  return count > 0 ? sum / count : HUGE_VAL;
}
/* The season of column c: so many rows before, it is most like itself. Neighbouring rows are alike without any season,
   so that it is sought from where the column is as unlike itself as on average. 1: there is none. */
static int64_t season_of(int64_t c) {
  int64_t best = 1, longest = 0, p = 1;
  for (int64_t i = 0; i < data.training; i++) if (data.list[i].n > longest) longest = data.list[i].n;
  const int64_t most = longest / 3 < MOST_SEASON ? longest / 3 : MOST_SEASON;
  double *by = (double *)grow(NULL, most + 1, sizeof *by), mean_by = 0, least;
  for (int64_t i = 1; i <= most; i++) by[i] = unlike(i, c), mean_by += by[i] / (double)most;
  while (p <= most && by[p] < mean_by) p++;
  least = mean_by;
  for (; p <= most; p++) if (by[p] < 0.98 * least) least = by[p], best = p; /* a longer one has to be better */
  return free(by), best;
}

/* Mean and deviation of each column, which the model keeps, and the deviation of its changes. Returns 0, or 2 after a
   sentence. */
static int measure(void) {
  const int64_t k = data.k;
  int64_t n = 0;
  for (int64_t i = 0; i < data.training; i++) n += data.list[i].n;
  float *rows = (float *)grow(NULL, n * k, sizeof(float));
  n = 0;
  for (int64_t i = 0; i < data.training; i++) {
    memcpy(rows + n * k, data.rows + data.list[i].at * k, (size_t)(data.list[i].n * k) * sizeof(float));
    n += data.list[i].n;
  }
  columns_open(k);
  luna_status status = luna_input_layer_fit(input_layer(), &(luna_input){ .features = rows, .batch = 1, .n = n });
  if (status == LUNA_OK) status = read_deviations();
  for (int64_t i = 0; i < ahead_count * k && own.forecast; i++) change[i] = change_over(ahead[i / k], i % k);
  for (int64_t c = 0; c < k && own.forecast; c++) seasons[c] = season_of(c);
  free(rows);
  return status == LUNA_OK ? 0 : failed(luna_params_ctx(input_layer()->params));
}

/* ---- batches ----------------------------------------------------------------------------------------------------- */

/* [rows,n,k]; of the changes from a row to those ahead [rows,n,ahead_count,k]; what the linear model says
   [rows,n,classes]; [rows,n] or [rows]; [rows] */
static struct { float *x, *targets, *taught; int32_t *labels, *lengths; int64_t rows, n; } batch;
static float *taught;                /* the linear model's log-probabilities [size,classes], or null: none */

static void batch_open(int64_t rows, int64_t n) {
  batch.x = (float *)grow(batch.x, rows * n * data.k, sizeof(float));
  if (own.forecast) batch.targets = (float *)grow(batch.targets, rows * n * ahead_count * data.k, sizeof(float));
  if (taught) batch.taught = (float *)grow(batch.taught, rows * n * label_count, sizeof(float));
  batch.labels = (int32_t *)grow(batch.labels, rows * n, sizeof(int32_t));
  batch.lengths = (int32_t *)grow(batch.lengths, rows, sizeof(int32_t));
  batch.rows = rows, batch.n = n;
}

/* `n` rows of a series from row `from` on into row `at` of the batch's sequence `b`; its targets are what follows. */
static void place(int64_t b, int64_t at, series s, int64_t from, int64_t n) {
  const int64_t k = data.k, first = (s.at + from) * k;
  memcpy(batch.x + (b * batch.n + at) * k, data.rows + first, (size_t)(n * k) * sizeof(float));
  for (int64_t i = 0; i < n * ahead_count && own.forecast; i++) {
    const int64_t row = i / ahead_count, over = ahead[i % ahead_count];
    const float *now = data.rows + first + row * k, *by = change + i % ahead_count * k;
    const int64_t here = s.at + from + row;
    float *to = batch.targets + ((b * batch.n + at) * ahead_count + i) * k;
    const bool later = from + row + over < s.n;
    for (int64_t c = 0; c < k; c++)
      to[c] = later && !input_only[c] ? (now[over * k + c] - known_at(here, c)) / by[c] : NAN;
  }
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

/* Which series a training step learns from, as lengths of the batch: in rounds through all, each in an order of its
   own. Returns the length of the longest. */
static int64_t choose_series(int64_t step, int32_t *order) {
  int64_t longest = 1;
  for (int64_t b = 0; b < set.batch; b++) {
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
  return longest;
}
static void pad(int64_t b, int64_t n) {                    /* sequence b of the batch from row n on */
  for (int64_t i = n; i < batch.n; i++) {
    if (steps_have_labels()) batch.labels[b * batch.n + i] = -1;
    for (int64_t c = 0; c < data.k; c++) batch.x[(b * batch.n + i) * data.k + c] = NAN;
    for (int64_t c = 0; c < ahead_count * data.k && own.forecast; c++)
      batch.targets[(b * batch.n + i) * ahead_count * data.k + c] = NAN;
  }
}
/* Rows to validate on are read like any others, but no label and no target is learnt from them. */
static void keep_out(int64_t b, series s, int64_t from, int64_t n) {
  const bool *out = data.kept_out + s.at + from;
  for (int64_t i = 0; i < n; i++) {
    if (steps_have_labels() && out[i]) batch.labels[b * batch.n + i] = -1;
    for (int64_t a = 0; a < ahead_count && own.forecast; a++)
      if (from + i + ahead[a] < s.n && out[i + ahead[a]])
        for (int64_t c = 0; c < data.k; c++) batch.targets[((b * batch.n + i) * ahead_count + a) * data.k + c] = NAN;
  }
}
static int64_t place_window(int64_t b, series s, int64_t from, int64_t n) {
  place(b, 0, s, from, n);
  if (data.kept_out) keep_out(b, s, from, n);
  for (int64_t i = 0; taught && i < batch.n * label_count; i++)
    batch.taught[b * batch.n * label_count + i] = i < n * label_count ? taught[(s.at + from) * label_count + i] : NAN;
  for (int64_t i = 0; i < n * data.k && !own.forecast; i++)
    batch.x[b * batch.n * data.k + i] += (float)(own.noise * (double)deviation[i % data.k] * normal());
  return n;
}
static int64_t place_random(int64_t b) {                   /* a part of a recording, the longer the likelier */
  int64_t all = 0;
  series s;
  for (int64_t i = 0; i < data.training; i++) all += data.list[i].n;
  all = below(all);
  for (int64_t i = 0; all >= (s = data.list[i]).n; i++) all -= s.n;
  const int64_t n = s.n < batch.n ? s.n : batch.n;
  return place_window(b, s, below(s.n - n + 1), n);
}
static int64_t place_joined(int64_t b) {                   /* cases, one after another */
  int64_t n = 0;
  while (n < batch.n) {
    series s = data.list[below(data.training)];
    if (n == 0) { int64_t skip = below(s.n); s.at += skip, s.n -= skip; }
    n += place_changed(b, n, s, batch.n - n);
  }
  return n;
}

static int64_t learnt_window;        /* --window, or less where there is less to learn from */
/* What training step `step` learns from. */
static void training_batch(int64_t step, int32_t *order) {
  const bool joined = own.per_step && !data.csv, windows = own.forecast || data.csv;
  random_state = draw(1, step, 0);
  batch_open(set.batch, 1);
  const int64_t longest = choose_series(step, order);
  batch_open(set.batch, windows || joined ? learnt_window : (int64_t)((double)longest * (1 + own.stretch)) + 1);
  for (int64_t b = 0; b < set.batch; b++) {
    const series s = data.list[batch.lengths[b]];
    batch.lengths[b] = (int32_t)(windows ? place_random(b) : joined ? place_joined(b) :
                                 place_changed(b, 0, s, batch.n));
    pad(b, batch.lengths[b]);
  }
}

static luna_lm_state *carried;       /* with --carry, from a step to the next; else null */

/* With --carry: each sequence reads on where it stopped in the step before. At a recording's end it starts anew in the
   next one, near its beginning, so that windows are not cut at the same rows in each round. */
typedef struct reader { int64_t list, at; } reader;
static reader *readers;              /* [set.batch] */

static void place_readers(int64_t all) {                   /* evenly over all steps that are learnt from */
  readers = (reader *)grow(NULL, set.batch, sizeof *readers);
  for (int64_t b = 0; b < set.batch; b++) {
    reader r = { 0, b * all / set.batch };
    for (; r.at >= data.list[r.list].n; r.list++) r.at -= data.list[r.list].n;
    readers[b] = r;
  }
}
static int64_t carried_rows(void) {                        /* of each window */
  int64_t n = own.window;
  for (int64_t i = 0; i < data.training; i++) if (data.list[i].n < n) n = data.list[i].n;
  return n;
}
static luna_input carried_input(void) {                    /* what this rank has of them, without their numbers */
  return (luna_input){ NULL, NULL, rank_part(set.batch).count, carried_rows(), NULL };
}
static luna_status next_windows(int64_t step) {            /* after the step's begin, which lets go of the state */
  luna_status status = LUNA_OK;
  const portion mine = rank_part(set.batch);
  const int64_t n = carried_rows();
  int64_t all = 0;
  random_state = draw(1, step, 0);
  for (int64_t i = 0; i < data.training; i++) all += data.list[i].n;
  if (step == 0) place_readers(all);
  batch_open(set.batch, n);
  for (int64_t b = 0; b < set.batch; b++) {
    reader *r = readers + b;
    const int32_t sequence = (int32_t)(b - mine.first);
    if (r->at + n > data.list[r->list].n) {
      r->list = (r->list + 1) % data.training;
      const int64_t room = data.list[r->list].n - n;
      r->at = below((room < n ? room : n) + 1);
      if (sequence >= 0 && sequence < mine.count && status == LUNA_OK)
        status = luna_lm_state_restart(carried, &sequence, 1);
    }
    batch.lengths[b] = (int32_t)place_window(b, data.list[r->list], r->at, n);
    r->at += n;
  }
  return status;
}

/* Of the batch this rank's sequences. */
static void own_part(void) {
  const portion rows = rank_part(batch.rows);
  const int64_t k = data.k, t = own.forecast ? ahead_count * k : 0;
  const int64_t n = batch.n, per = steps_have_labels() ? n : 1; /* labels of a sequence */
  for (int64_t b = 0; b < rows.count; b++) {               /* what moves, moves down */
    const int64_t from = (rows.first + b) * n;
    memmove(batch.x + b * n * k, batch.x + from * k, (size_t)(n * k) * sizeof(float));
    if (t) memmove(batch.targets + b * n * t, batch.targets + from * t, (size_t)(n * t) * sizeof(float));
    if (taught)
      memmove(batch.taught + b * n * label_count, batch.taught + from * label_count,
              (size_t)(n * label_count) * sizeof(float));
    memmove(batch.labels + b * per, batch.labels + (steps_have_labels() ? from : rows.first + b),
            (size_t)per * sizeof(int32_t));
    batch.lengths[b] = batch.lengths[rows.first + b];
  }
  batch.rows = rows.count;
}

/* On several ranks, what a mean of `mine` numbers is to be scaled by in a loss that counts as one of `as` numbers. */
static double share_as(int64_t mine, int64_t as) {
  if (ranks.ranks == 1) return 1;
  const double all_mine = rank_total((double)mine), all_as = rank_total((double)as);
  return as > 0 && all_mine > 0 ? (double)mine / all_mine * (all_as / (double)as) : 0;
}
/* The loss, and in *counted the labels or numbers that it is a mean of, which the ranks' losses are weighted by. Of
   forecasts also Huber's loss of the median, which finds it better than the quantile loss alone: near the target the
   slope of that does not get less. */
static luna_tensor *loss_of(luna_tensor *y, int64_t *counted) {
  if (!own.forecast) {
    luna_tensor *loss = luna_weighted_cross_entropy(y, batch.labels, balance, NULL);
    *counted = luna_counted(loss);
    if (!taught) return loss;
    luna_tensor *like_teacher = luna_mse(luna_log_softmax(y), batch.taught);
    const double share = own.teach * share_as(luna_counted(like_teacher), *counted);
    return luna_add(loss, luna_scale(like_teacher, (float)share));
  }
  y = luna_reshape(y, 2, (int64_t[]){ -1, level_count });
  luna_tensor *median = luna_slice(y, 1, level_count / 2, 1);
  luna_tensor *huber = luna_huber(median, batch.targets, 0.1f);
  *counted = luna_counted(huber);
  return luna_add(luna_quantile_loss(y, batch.targets, levels, level_count), luna_scale(huber, 5));
}
static luna_input batch_input(void) { /* with --carry all rows are real */
  return (luna_input){ .features = batch.x, .lengths = own.carry ? NULL : batch.lengths, .batch = batch.rows,
                       .n = batch.n };
}

/* ---- what a model finds ------------------------------------------------------------------------------------------ */

static int by_size(const void *a, const void *b) {
  const float x = *(const float *)a, y = *(const float *)b;
  return (x > y) - (x < y);
}
typedef void found_fn(const series *s, int64_t row, const float *outputs);

/* What the model gives for rows from .. from + n - 1 of a series, from its lead on, in *y; a state continues. Returns
   0, or 2 after a sentence. */
static int outputs_of(luna_ctx *ctx, series s, int64_t from, int64_t n, luna_lm_state *state, float **y) {
  batch_open(1, n);
  batch.lengths[0] = (int32_t)n;
  place(0, 0, s, from, n);
  luna_begin_inference(ctx);
  if (state) luna_lm_state_continue(state);
  luna_input input = batch_input();
  if (state) input.lengths = NULL;
  luna_tensor *out = run(&input);
  if (!own.forecast) out = luna_softmax(out, NULL);
  *y = (float *)grow(*y, n * outputs(), sizeof(float));
  if (luna_read(out, *y) != LUNA_OK) return failed(ctx);
  for (int64_t i = 0; balance && i < luna_count(out); i += label_count) unbalance_shares(*y + i);
  const int64_t forecasts = ahead_count * data.k;
  for (int64_t i = 0; i < n * forecasts && own.forecast; i++) {
    float *q = *y + i * level_count;
    const float now = known_at(s.at + from + i / forecasts, i % data.k);
    for (int64_t l = 0; l < level_count; l++) q[l] = now + change[i % forecasts] * q[l];
    qsort(q, (size_t)level_count, sizeof *q, by_size);     /* quantiles that do not cross */
  }
  return 0;
}

/* What the linear model gives, to the found_fn that `to` points at. */
static void linear_found(void *to, const series *s, int64_t row, const double *features) {
  static float shares[CLASSES];
  double sum = 0;
  linear_logits(features, shares);
  float most = shares[0];
  for (int32_t c = 1; c < label_count; c++) most = fmaxf(most, shares[c]);
  for (int32_t c = 0; c < label_count; c++) sum += exp((double)shares[c] - (double)most);
  for (int32_t c = 0; c < label_count; c++) shares[c] = (float)(exp((double)shares[c] - (double)most) / sum);
  (*(found_fn **)to)(s, row, shares);
}

/* The linear model's probabilities, by row or case, and what gets those of both. */
static float *linear_shares;
static found_fn *mixed_found;
static float *linear_at(const series *s, int64_t row) {
  return linear_shares + (own.per_step ? s->at + row : s - data.list) * label_count;
}
static void keep_linear(const series *s, int64_t row, const float *shares) {
  memcpy(linear_at(s, row), shares, (size_t)label_count * sizeof(float));
}
static void found_mixed(const series *s, int64_t row, const float *shares) {
  static float both[CLASSES];
  const float *other = linear_at(s, row);
  double sum = 0;
  for (int32_t c = 0; c < label_count; c++) sum += sqrt((double)shares[c] * (double)other[c]);
  for (int32_t c = 0; c < label_count; c++) both[c] = (float)(sqrt((double)shares[c] * (double)other[c]) / sum);
  mixed_found(s, row, both);
}

/* Calls found(series, row, outputs) for each series, or each of its rows; the rows of its lead are read alone. A causal
   model reads a recording as it streams: one row after another, with its memory of all before. Others read windows,
   whose outer quarters are context. Outputs are probabilities, or of the rows ahead [ahead_count,k,level_count].
   Returns 0, or 2 after a sentence. */
static int find_all(luna_ctx *ctx, int64_t first, int64_t last, found_fn *found) {
  if (own.by == BY_LINEAR) return all_features(first, last, linear_found, (void *)&found), 0;
  if (own.by == BY_BOTH) {
    found_fn *const keeps = keep_linear;
    linear_shares = (float *)grow(linear_shares, (data.size > data.count ? data.size : data.count) * label_count,
                                  sizeof(float));
    all_features(first, last, linear_found, (void *)&keeps);
    mixed_found = found, found = found_mixed;
  }
  const bool whole = !own.per_step && !own.forecast;
  const int64_t context = own.causal ? 0 : own.window / 4;
  static luna_lm_state *state;       /* one is enough: a program measures one model */
  float *y = NULL;
  if (own.causal && !state) state = luna_lm_state_open(&model.lm, 1);
  int status = own.causal && !state ? failed(ctx) : 0;
  for (int64_t i = first; i < last && !status; i++) {
    const series s = data.list[i];
    luna_begin_inference(ctx);                             /* lets go of the state */
    if (state && luna_lm_state_restart(state, NULL, 0) != LUNA_OK) status = failed(ctx);
    for (int64_t next = -s.lead; next < s.n && !status;) {
      const int64_t from = next - context > -s.lead ? next - context : -s.lead;
      const int64_t n = whole || s.n - from < own.window ? s.n - from : own.window;
      const int64_t end = from + n < s.n ? from + n - context : s.n;
      status = outputs_of(ctx, s, from, n, state, &y);
      for (int64_t row = next > 0 ? next : 0; row < (whole ? 1 : end) && !status; row++)
        found(&data.list[i], row, y + (row - from) * outputs());
      next = end;
    }
  }
  return free(y), status;
}

/* What repeating the season forecasts for a row: the number as many seasons before as it takes; where there is none,
   the last one that is known. */
static float seasonal(const series *s, int64_t row, int64_t over, int64_t c) {
  const int64_t back = (over + seasons[c] - 1) / seasons[c] * seasons[c], first = data.csv ? 0 : s->at;
  return row - back >= first ? known_at(row - back, c) : known_at(row - over, c);
}
static void count_score(const series *s, int64_t row, const float *y) {
  const int64_t at = s->at + row;
  if (!own.forecast) {
    score_class(row, own.per_step ? data.labels[s->at + row] : s->label, y);
    return;
  }
  for (int64_t i = 0; i < ahead_count * data.k; i++) {
    const int64_t over = ahead[i / data.k], c = i % data.k;
    if (row + over < s->n && !input_only[c])
      score_forecast(i, y + i * level_count, (double)known_at(at, c), (double)seasonal(s, at + over, over, c),
                     (double)data.rows[(at + over) * data.k + c], (double)deviation[c]);
  }
}
static ranking put_rank(const char *name, const calibration *c) {
  const ranking r = calibration_rank(c, rare_class);
  printf("%-47s", name), put_share(100 * r.precision), put_share(100 * r.area);
  printf(" %9.4f\n", calibration_loss(c, 1));
  return r;
}
/* The yardstick beside the model, on the same series, and both together. */
static void compare(int64_t first, int64_t last) {
  calibration c = { .classes = label_count }, both = { .classes = label_count };
  linear_find(first, last, &c);
  for (int64_t i = 0; i < c.count; i++) {                  /* in the same order; log-probabilities are logits */
    static float logits[CLASSES];
    int32_t best;
    const float *x = c.logits + i * label_count;
    const double sum = log_partition(&c, i, 1, &best);
    for (int32_t k = 0; k < label_count; k++)
      logits[k] = (float)(((double)x[k] - (double)x[best] - sum + (double)score.all.logits[i * label_count + k]) / 2);
    calibration_add(&both, logits, c.labels[i]);
  }
  printf("%-47s %10s %10s %9s\n", label_count == 2 ? "of the rarer class" : "means over classes", "AP", "AUC",
         "log loss");
  const double ours = put_rank("this model", &score.all).precision;
  const double its = put_rank(own.per_step ? "linear model of rolling means and deviations" :
                              "linear model of means and deviations", &c).precision;
  const double mixed = put_rank("both together", &both).precision;
  if (its > ours && its >= mixed) printf("The linear model ranks best here: use --by linear in eval and predict.\n");
  else if (mixed > ours) printf("Both together rank best here: use --by both in eval and predict.\n");
  calibration_close(&c), calibration_close(&both);
}
/* Measures the model on series first .. last - 1, and prints it; the last line after `begin`, without which there must
   be something to measure on. `beside`: with the linear model's figures. */
static int print_score(luna_ctx *ctx, int64_t first, int64_t last, const char *begin, bool beside) {
  score_clear();
  if (find_all(ctx, first, last, count_score)) return 2;
  if (score.count == 0) return *begin ? 0 : fail("there is nothing to measure on");
  score_table();
  if (beside && !own.forecast && score.all.count > 0) compare(first, last);
  score_lines(begin, deviation);
  return 0;
}

/* ---- what a model must know besides its weights ------------------------------------------------------------------ */

static luna_status keep(luna_params *params, const char *what, int64_t index, const char *text, int64_t size) {
  char key[40], *value = (char *)grow(NULL, size + 1, 1);
  snprintf(key, sizeof key, "series.%s%lld", what, (long long)index);
  memcpy(value, text, (size_t)size);
  value[size] = 0;
  luna_status status = luna_params_set_text(params, key, value);
  free(value);
  return status;
}
static luna_status remember(luna_params *params) {
  char text[64];
  snprintf(text, sizeof text, "%d %d %d %lld %d %d", (int)own.per_step, (int)own.causal, (int)own.forecast,
           (long long)own.window, (int)own.carry, (int)own.interval);
  luna_status status = keep(params, "task", 0, text, (int64_t)strlen(text));
  if (status == LUNA_OK) status = keep_mark(params, data.text);
  if (status == LUNA_OK && own.forecast) status = keep(params, "ahead", 0, own.ahead, (int64_t)strlen(own.ahead));
  if (status == LUNA_OK && own.label) status = keep(params, "label", 0, own.label, (int64_t)strlen(own.label));
  for (int32_t i = 0; i < label_count && status == LUNA_OK; i++) {
    status = keep(params, "class", i, (const char *)classes[i].at, classes[i].size);
    snprintf(text, sizeof text, "%lld", (long long)class_counts[i]);
    if (status == LUNA_OK) status = keep(params, "count", i, text, (int64_t)strlen(text));
  }
  for (int64_t i = 0; i < column_count && status == LUNA_OK; i++)
    status = keep(params, "column", i, (const char *)columns[i].at, columns[i].size);
  for (int64_t i = 0; own.forecast && i < ahead_count * data.k && status == LUNA_OK; i++) {
    snprintf(text, sizeof text, "%.9g", (double)change[i]);
    status = keep(params, "change", i, text, (int64_t)strlen(text));
  }
  for (int64_t c = 0; own.forecast && c < data.k && status == LUNA_OK; c++) {
    snprintf(text, sizeof text, "%lld", (long long)seasons[c]);
    status = keep(params, "season", c, text, (int64_t)strlen(text));
    if (status == LUNA_OK && input_only[c]) status = keep(params, "input", c, "yes", 3);
  }
  return status;
}
/* After training the output layer takes the deviations of changes in, so that the model's outputs are changes in the
   data's unit: a forecast is a column's last number plus its output, in whatever program runs the model. */
static luna_status fold_changes(luna_params *params) {
  luna_tensor *const weight = model.lm.output.weight, *const bias = model.lm.output.bias;
  const int64_t rows = outputs(), d = luna_count(weight) / rows;
  float *w = (float *)grow(NULL, rows * (d + 1), sizeof *w), *b = w + rows * d;
  luna_status status = luna_read(weight, w);
  if (status == LUNA_OK) status = luna_read(bias, b);
  for (int64_t i = 0; i < rows * d; i++) w[i] *= change[i / d / level_count];
  for (int64_t i = 0; i < rows; i++) b[i] *= change[i / level_count];
  if (status == LUNA_OK) status = luna_write(weight, w);
  if (status == LUNA_OK) status = luna_write(bias, b);
  free(w);
  for (int64_t i = 0; i < ahead_count * data.k && status == LUNA_OK; i++) {
    change[i] = 1;
    status = keep(params, "change", i, "1", 1);
  }
  return status;
}
/* What is chosen after training: the temperature, the threshold, and the linear model beside it. */
static luna_status remember_choices(luna_params *params) {
  char text[64];
  snprintf(text, sizeof text, "%.9g %.9g", temperature, threshold);
  luna_status status = keep(params, "choices", 0, text, (int64_t)strlen(text));
  for (int32_t c = 0; c < label_count && linear.weights && status == LUNA_OK; c++) {
    char *weights = linear_text(c);
    status = keep(params, "linear", c, weights, (int64_t)strlen(weights));
    free(weights);
  }
  return status;
}
static const char *kept(const luna_params *params, const char *what, int64_t index) {
  char key[40];
  snprintf(key, sizeof key, "series.%s%lld", what, (long long)index);
  return luna_params_get_text(params, key);
}

/* Reads what the model knows of its task; false where that cannot be. */
static bool recall(const luna_params *params) {
  const char *text = kept(params, "task", 0);
  int per_step, causal, forecast, carry, interval;
  long long window;
  if (!text || sscanf(text, "%d %d %d %lld %d %d", &per_step, &causal, &forecast, &window, &carry, &interval) != 6 ||
      window < 2 || window > 1000000 || interval < 0 || interval > 99) return false;
  own.per_step = per_step != 0, own.causal = causal != 0, own.forecast = forecast != 0, own.carry = carry != 0;
  own.window = window, own.interval = interval;
  own.ahead = forecast ? kept(params, "ahead", 0) : "1";
  own.label = kept(params, "label", 0);
  for (; label_count < CLASSES && (text = kept(params, "class", label_count)) != NULL; label_count++)
    classes[label_count] = (word){ (const unsigned char *)text, (int64_t)strlen(text) };
  for (int32_t c = 0; c < label_count; c++)                /* models of older versions have neither */
    class_counts[c] = (text = kept(params, "count", c)) != NULL ? atoll(text) : 0;
  rare_class = rarest_of(class_counts, label_count);
  for (int32_t c = 0; c < label_count && (text = kept(params, "balance", c)) != NULL; c++) {
    if (!balance) balance = (float *)grow(NULL, label_count, sizeof(float));
    if (!((balance[c] = (float)atof(text)) > 0)) return false;
  }
  if ((text = kept(params, "choices", 0)) != NULL &&
      (sscanf(text, "%lf %lf", &temperature, &threshold) != 2 || !(temperature > 0) || !(threshold >= 0))) return false;
  for (; column_count < COLUMNS && (text = kept(params, "column", column_count)) != NULL; column_count++)
    columns[column_count] = (word){ (const unsigned char *)text, (int64_t)strlen(text) };
  return (!carry || causal) && own.ahead && read_ahead(own.ahead);
}
static bool recall_columns(const luna_params *params, int64_t k) {
  bool fine = true;
  columns_open(k);
  for (int64_t i = 0; i < ahead_count * k && own.forecast; i++) {
    const char *text = kept(params, "change", i);
    change[i] = text ? (float)atof(text) : 0;
    fine = fine && change[i] > 0 && isfinite(change[i]);
  }
  for (int64_t c = 0; c < k && own.forecast; c++) {        /* models of older versions have none */
    const char *text = kept(params, "season", c);
    seasons[c] = text && atoll(text) > 0 ? atoll(text) : 1;
    input_only[c] = kept(params, "input", c) != NULL;
  }
  const char *text = own.forecast ? NULL : kept(params, "linear", 0);
  for (int32_t c = 0; text && c < label_count && fine; c++)
    fine = (text = kept(params, "linear", c)) != NULL && linear_read(c, text);
  return fine && read_deviations() == LUNA_OK && (column_count == 0 || column_count == k);
}

static int load(luna_ctx *ctx, const char *path) {
  luna_params *params = luna_params_open(ctx);
  if (luna_load_model(&model, params, luna_path(path)) != LUNA_OK) return failed(ctx);
  const bool lm = model.kind == LUNA_MODEL_LM, classifier = model.kind == LUNA_MODEL_CLASSIFIER;
  const int64_t k = lm ? model.lm.config.features : classifier ? model.classifier.config.encoder.features : 0;
  bool fine = k > 0 && k <= COLUMNS && recall(params) && lm == own.causal && (lm || !model.classifier.config.pair);
  data.k = k;
  fine = fine && recall_columns(params, k);
  fine = fine && (lm ? model.lm.config.outputs : model.classifier.config.classes) == outputs();
  fine = fine && (!classifier || (model.classifier.config.per_step == steps_have_labels() && !own.forecast));
  data.k = column_count ? 0 : k;
  if (fine && own.by && !linear.weights) return fail("%s has no linear model in it", path);
  return fine ? 0 : fail("%s is not a model that series made", path);
}

/* Reads a model, and a file that is for it. */
static int load_both(luna_ctx *ctx, const char **words) {
  return load(ctx, words[0]) || read_data(words[1], false) ? 2 : 0;
}

/* ---- commands ---------------------------------------------------------------------------------------------------- */

static progress bar;
static best_model best;

static int measure_held(luna_ctx *ctx, int64_t first, int64_t last) { /* each rank by itself */
  score_clear();
  return find_all(ctx, first, last, count_score);
}
static int print_held(luna_ctx *ctx) {
  const int64_t first = data.training + data.validation;
  return data.count > first ? print_score(ctx, first, data.count, "On held-out data: ", true) : 0;
}

/* Of recordings with classes the linear model teaches: what it says of each row is learnt beside the class. Few events
   say little of which of a model's many functions is meant; it says something at every row, and a model that can do
   what it does goes on from there. It has learnt nothing of what is to validate on. */
static void teach_row(void *to, const series *s, int64_t row, const double *features) {
  float *logs = taught + (s->at + row) * label_count;
  double most = -HUGE_VAL, sum = 0;
  linear_logits(features, logs), (void)to;
  for (int32_t c = 0; c < label_count; c++) {
    if (balance) logs[c] += logf(balance[c]);              /* classes as the model is to take them */
    most = fmax(most, (double)logs[c]);
  }
  for (int32_t c = 0; c < label_count; c++) sum += exp((double)logs[c] - most);
  for (int32_t c = 0; c < label_count; c++) logs[c] = (float)((double)logs[c] - most - log(sum));
}
static void teach(void) {
  if (own.forecast || own.teach <= 0 || !data.csv) return;
  linear_fit();
  taught = (float *)grow(NULL, data.size * label_count, sizeof(float));
  for (int64_t i = 0; i < data.size * label_count; i++) taught[i] = NAN;
  all_features(0, data.training, teach_row, NULL);
}

/* Keeps the model if it is the best so far. Returns 0, or 2 after a sentence. */
static int validate_now(luna_params *params) {
  const double since = progress_validates();
  if (data.validation == 0) return 0;
  if (measure_held(luna_params_ctx(params), data.training, data.training + data.validation)) return 2;
  const double count = (double)(score.count ? score.count : 1);
  const double loss = own.forecast ? score.loss / count : calibration_loss(&score.all, 1);
  const double precision = own.forecast ? NAN : calibration_rank(&score.all, rare_class).precision;
  const bool ranks_them = precision == precision;          /* without two classes there only the loss can tell */
  const double error = ranks_them ? ranking_error(precision, bar.step) : loss;
  progress_validated(&bar, since, loss, own.forecast ? "validation error %.4g" : ranks_them ? "validation AP %.1f%%" :
                     "validation log loss %.4f", ranks_them ? 100 * precision : loss);
  return best_keep(&best, params, bar.step, error, loss) == LUNA_OK ? 0 : failed(luna_params_ctx(params));
}
static bool averages(void) { return data.csv && !own.forecast && own.average > 0; }
static int validate(luna_params *params, luna_optimizer *adam) { /* the averages, where there are any */
  const bool swaps = averages() && bar.step > 0;
  if (swaps && luna_optimizer_swap_average(adam) != LUNA_OK) return failed(luna_params_ctx(params));
  const int status = validate_now(params);
  return swaps && luna_optimizer_swap_average(adam) != LUNA_OK ? failed(luna_params_ctx(params)) : status;
}
static int learn(luna_ctx *ctx, luna_params *params) {
  luna_optimizer *adam = luna_adamw(params, &(luna_optimizer_config){
    .lr = (float)set.lr, .weight_decay = 0.01f, .average = averages() ? (float)own.average : 0, .clip = 1,
    .schedule = { .decay = LUNA_DECAY_COSINE, .warmup = set.steps < 500 ? set.steps / 10 : 50, .total = set.steps,
                 .floor = 0.02f } });
  int32_t *order = (int32_t *)grow(NULL, data.training, sizeof(int32_t));
  int status = adam ? 0 : failed(ctx);
  for (int64_t i = 0; i < data.training; i++) order[i] = (int32_t)i;
  teach();
  if (!status && !share_training(params, adam)) status = failed(ctx);
  progress_start(&bar, 0);
  while (!status && bar.step < set.steps && !interrupted && best_awaited(&best)) {
    if (progress_due(&bar) && (status = validate(params, adam)) != 0) break;
    if (!own.carry) training_batch(bar.step, order), own_part();
    begin_training(ctx, own.carry ? carried_input() : batch_input());
    if (own.carry) {
      if (next_windows(bar.step) != LUNA_OK || luna_lm_state_continue(carried) != LUNA_OK) {
        status = failed(ctx);
        break;
      }
      own_part();
    }
    luna_input input = batch_input();
    int64_t counted = 0;
    luna_tensor *loss = loss_of(run(&input), &counted);
    differentiate(loss, counted);
    if (learn_from(adam) != LUNA_OK) status = failed(ctx);
    else progress_step(&bar, learnt_loss(loss), (double)(batch.rows * batch.n * ranks.ranks));
  }
  free(order);
  if (!status && bar.step == 0)
    status = fail("the training was stopped before its first step, so no model was written");
  if (!status) status = validate(params, adam);
  if (!status && averages() && luna_optimizer_swap_average(adam) != LUNA_OK) status = failed(ctx);
  if (!status) progress_end(&bar);
  return status;
}
/* ---- classes: how many there are, and what is chosen after training ---------------------------------------------- */

/* How many rows or cases of series first .. last - 1 are of a class, of how many in all, and how often the class
   begins. */
typedef struct presence { int64_t is, all, runs; } presence;
static presence presence_of(int64_t first, int64_t last, int32_t label) {
  presence p = { 0, 0, 0 };
  for (int64_t i = first; i < last; i++) {
    const series s = data.list[i];
    bool on = false;
    for (int64_t row = 0; row < (own.per_step ? s.n : 1); row++) {
      const bool out = i < data.training && own.per_step && data.kept_out && data.kept_out[s.at + row];
      const int32_t is = out ? NONE : own.per_step ? data.labels[s.at + row] : s.label;
      p.all += is >= 0, p.is += is == label, p.runs += is == label && !on;
      on = is == label;
    }
  }
  return p;
}
static void count_classes(void) {
  for (int32_t c = 0; c < label_count; c++) class_counts[c] = presence_of(0, data.training, c).is;
  rare_class = rarest_of(class_counts, label_count);
}
static void put_rare(void) {
  printf("'"), put_shown(stdout, classes[rare_class].at, shown_size(classes[rare_class])), printf("'");
}
/* " 'incident' is 431 of 14400 steps, 23 times, to train on; ... ." */
static void say_parts(void) {
  const int64_t ends[] = { 0, data.training, data.training + data.validation, data.count };
  static const char *const what[] = { "to train on", "to choose the model by", "held out" };
  const char *gap = " is ";
  printf(" "), put_rare();
  for (int part = 0; part < 3; part++) {
    const presence p = presence_of(ends[part], ends[part + 1], rare_class);
    if (p.all == 0) continue;
    printf("%s%lld of %lld %s", gap, (long long)p.is, (long long)p.all, own.per_step ? "steps" : "series");
    if (own.per_step) printf(", %lld time%s,", (long long)p.runs, p.runs == 1 ? "" : "s");
    printf(" %s", what[part]);
    gap = "; ";
  }
  printf(".");
}
static void warn_of_parts(void) {
  const int64_t ends[] = { 0, data.training, data.training + data.validation, data.count };
  static const char *const what[] = { "the part to train on. Little can be learnt of it.",
    "the part that chooses the model. The choice is mostly chance.",
    "the part held out. What is measured is mostly chance." };
  for (int part = 0; part < 3; part++) {
    const presence p = presence_of(ends[part], ends[part + 1], rare_class);
    const int64_t times = own.per_step ? p.runs : p.is;
    if (p.all == 0 || times >= FEW) continue;
    printf("warning: "), put_rare();
    printf(own.per_step ? " comes %lld time%s in %s\n" : " has %lld case%s in %s\n", (long long)times,
           times == 1 ? "" : "s", what[part]);
  }
}

/* The probabilities become what they say: logits are divided by a temperature. Returns 0, or 2 after a sentence. */
static int set_temperature(const calibration *c) {
  temperature = calibration_temperature(c);
  if (temperature >= 1 && temperature <= 1) return 0;
  printf("The temperature %.3f is chosen by %lld validation samples. It changes their expected calibration error to "
         "%.2f%% from %.2f%%.\n",
         temperature, (long long)c->count, 100 * calibration_error(c, temperature), 100 * calibration_error(c, 1));
  luna_tensor *weight = own.causal ? model.lm.output.weight : model.classifier.projection;
  luna_status done = calibration_apply(weight, temperature);
  if (done == LUNA_OK && own.causal) done = calibration_apply(model.lm.output.bias, temperature);
  for (int32_t i = 0; balance && i < label_count; i++) balance[i] = powf(balance[i], (float)(1 / temperature));
  return done == LUNA_OK ? 0 : failed(weight->ctx);
}
/* Of --balance: a causal model's biases get what its logits have too much, so that streams and exported models give the
   data's probabilities; a classifier has none, and this program remembers the factors. */
static luna_status balance_model(luna_params *params) {
  static float bias[CLASSES];
  luna_status status = LUNA_OK;
  char text[40];
  for (int32_t c = 0; c < label_count && !own.causal && status == LUNA_OK; c++) {
    snprintf(text, sizeof text, "%.9g", (double)balance[c]);
    status = keep(params, "balance", c, text, (int64_t)strlen(text));
  }
  if (!own.causal) return status;
  status = luna_read(model.lm.output.bias, bias);
  unbalance(bias, balance, label_count);
  if (status == LUNA_OK) status = luna_write(model.lm.output.bias, bias);
  return free(balance), balance = NULL, status;
}
/* Sets the threshold of the rare class that --aim asks for. */
static void set_threshold(const calibration *c) {
  aim wanted;
  reached got;
  if (!set.aim || !read_aim(set.aim, &wanted)) return;
  ranked *list = calibration_ranking(c, rare_class, temperature);
  const ranking r = ranking_of(list, c->count);
  if (r.is == 0 || r.is == c->count) printf("There is no threshold: validation takes samples with and without ");
  else {
    threshold = threshold_for(list, c->count, wanted, &got);
    printf("The threshold is %.4f for %s%s. In validation it has a precision of %.1f%% and a recall of %.1f%% of ",
           threshold, set.aim, got.met ? "" : ", which it cannot reach", 100 * got.precision, 100 * got.recall);
  }
  free(list);
  put_rare(), printf(".\n");
}
static calibration *validated;
static void collect(const series *s, int64_t row, const float *y) {
  add_shares(validated, own.per_step ? data.labels[s->at + row] : s->label, y);
}
/* With cases or steps to validate on, sets the temperature and the threshold by them. Returns 0, or 2 after a
   sentence. */
static int choose(luna_ctx *ctx) {
  calibration c = { .classes = label_count };
  if (own.forecast || data.validation == 0) return 0;
  for (int32_t label = 0; own.per_step && label < label_count; label++) {
    const int64_t runs = presence_of(data.training, data.training + data.validation, label).runs;
    if (label == 0 || runs < c.independent) c.independent = runs;
  }
  validated = &c;
  int status = find_all(ctx, data.training, data.training + data.validation, collect);
  if (!status) status = set_temperature(&c);
  if (!status) set_threshold(&c);
  return calibration_close(&c), status;
}

static void linear_yardstick(void) {
  if (!taught) linear_fit();
  linear_refit();
}
/* Refuses what was given on the command line but changes nothing in this task. */
static int check_flags(void) {
  const bool windows = own.forecast || data.csv;
  const struct { const void *place; bool idle; } all[] = {
    { &own.noise, own.forecast }, { &own.interval, !own.forecast }, { &own.stretch, windows }, { &own.scale, windows },
    { &own.window, !windows && !own.per_step },{ &set.positions, own.causal },
    { &set.pooling, own.causal || own.per_step }, { &own.teach, !own.label }, { &own.average, !own.label },
    { &set.forget, !own.causal }, { &own.ahead, !own.forecast }, { &own.causal, own.forecast },
    { &own.per_step, own.label || own.forecast }
  };
  for (int i = 0; flags[i].name; i++)
    for (size_t j = 0; j < sizeof all / sizeof *all && flags_given >> i & 1; j++) {
      const void *const place = all[j].place;
      if (all[j].idle && (flags[i].whole == place || flags[i].real == place || flags[i].text == place))
        return fail("%s changes nothing in this task; leave it out", flags[i].name);
    }
  return 0;
}
/* Refuses to forecast so far ahead that there is nothing to learn it from. */
static int check_ahead(const char *path) {
  int64_t longest = 0;
  for (int64_t i = 0; i < data.training; i++) if (data.list[i].n > longest) longest = data.list[i].n;
  if (!own.forecast || ahead[ahead_count - 1] < longest) return 0;
  return fail("%s has %lld steps, of which at most %lld in a row are trained on; --ahead %s must stay below that", path,
              (long long)data.size, (long long)longest, own.ahead);
}

/* A batch has no more steps than the longest series that is learnt from or, of joined cases, than all of them. */
static void fit_window(const char *path) {
  const bool joined = own.per_step && !data.csv;
  int64_t rows = 2;
  for (int64_t i = 0; i < data.training; i++) {
    const int64_t n = joined ? rows + data.list[i].n : data.list[i].n;
    rows = n > rows ? n : rows;
  }
  learnt_window = own.window < rows ? own.window : rows;
  if (learnt_window < own.window && (own.forecast || own.per_step) && ranks.rank == 0)
    say("%s: --window %lld is longer than the %lld steps to train on, so all of these are read at once.", path,
        (long long)own.window, (long long)rows);
}

/* Sets the task as the flags say, and reads the file for it. Returns 0, or 2 after a sentence. */
static int read_task(const char *path) {
  if (own.forecast) own.causal = true;
  if (!read_ahead(own.ahead))
    return fail("--ahead takes up to %d ascending numbers of steps with ',' between, not '%s'", AHEADS, own.ahead);
  if (own.label) own.per_step = true;
  if (own.label && !flag_given(&own.causal)) own.causal = true; /* a recording is a stream */
  if (own.label && !flag_given(&set.steps)) set.steps = 600;
  aim wanted;
  if (own.forecast && (set.aim || set.balance)) return fail("--aim and --balance are for classes, not for forecasts");
  if (set.aim && !read_aim(set.aim, &wanted))
    return fail("--aim takes f1, precision=0.9 or recall=0.9, not '%s'", set.aim);
  if (own.inputs && !own.forecast) return fail("--inputs is for forecasts; classes are found from all columns");
  if (own.label && own.forecast) return fail("--label and --forecast are two tasks; choose one");
  if (own.per_step && own.forecast) return fail("--per-step is for classes, --forecast for numbers; choose one");
  if (own.causal && !own.per_step && !own.forecast) return fail("--causal is for a class at each step; add --per-step");
  if (own.causal && set.attention == CHOICE_LINFORMER)
    return fail("--attention linformer sees all steps, so it cannot be causal; luna, softmax and linear can");
  if (read_data(path, true)) return 2;
  if (data.csv && !own.label && !own.forecast)
    return fail("%s is a table (CSV); say what to learn by --label COLUMN or --forecast", path);
  if (!data.csv && own.label) return fail("%s has cases with a class each; --label is for tables (CSV)", path);
  if (own.carry && !(own.causal && (own.forecast || data.csv)))
    return fail("--carry is for a recording and --causal or --forecast");
  if (check_flags()) return 2;
  if (!own.forecast && label_count == 1)
    return own.label ? fail("%s: column '%s' is '%.*s' in every row; a classifier takes two classes", path, own.label,
                            shown_size(classes[0]), (const char *)classes[0].at) :
        fail("%s: '%.*s' is the class of every case; a classifier takes two", path, shown_size(classes[0]),
             (const char *)classes[0].at);
  if (!own.forecast && label_count < 2) return fail("%s has no classes; a classifier takes two", path);
  if (data.training == 0) return fail("%s has too few series to hold a fifth out", path);
  if (check_ahead(path)) return 2;
  return fit_window(path), 0;
}
static void join_unlearnt(void) {                          /* cases are measured on as they are learnt from */
  if (!own.per_step || data.csv) return;
  const int64_t last = join(data.training, data.training + data.validation);
  data.validation = last - data.training;
  join(last, data.count);
}

static int train(luna_ctx *ctx, const char **words) {
  luna_params *params = luna_params_open(ctx);
  double start = seconds();
  if (read_task(words[0])) return 2;
  if (make_model(params) != LUNA_OK) return failed(ctx);
  if (measure()) return 2;
  count_classes();
  if (set.balance) balance_of(class_counts, label_count, balance = (float *)grow(NULL, label_count, sizeof(float)));
  if (remember(params) != LUNA_OK) return failed(ctx);
  if (own.carry && !(carried = luna_lm_state_open(&model.lm, rank_part(set.batch).count)))
    return failed(ctx);
  put_shown(stdout, words[0], (int64_t)strlen(words[0]));
  printf(" has %lld %s with %lld steps of %lld numbers", (long long)data.count,
         data.csv ? "parts (to train on, to choose the model by, held out)" : "series", (long long)data.size,
         (long long)data.k);
  if (!own.forecast) printf(" in %d classes", (int)label_count);
  printf(". The model has %lld parameters.", (long long)luna_params_element_count(params));
  if (!own.forecast) say_parts();
  printf("\n");
  if (!own.forecast) warn_of_parts();
  fflush(stdout);
  join_unlearnt();
  if (learn(ctx, params)) return 2;
  if (best_end(&best, params, &bar) != LUNA_OK) return failed(ctx);
  if (own.forecast && fold_changes(params) != LUNA_OK) return failed(ctx);
  if (choose(ctx)) return 2;
  if (balance && balance_model(params) != LUNA_OK) return failed(ctx);
  if (!own.forecast && ranks.rank == 0) linear_yardstick();
  if (remember_choices(params) != LUNA_OK) return failed(ctx);
  if (ranks.rank > 0) return 0;
  if (luna_save(params, luna_path(set.out)) != LUNA_OK) return failed(ctx);
  say("%s: Training made %lld steps in %.0f s.", set.out, (long long)bar.step, seconds() - start);
  return print_held(ctx) || plot(&bar, words[0]) ? 2 : 0;
}


static int eval(luna_ctx *ctx, const char **words) {
  if (load_both(ctx, words)) return 2;
  if (own.per_step && !data.csv) join(0, data.count);
  say_learnt(input_layer()->params, data.text, words[1]);
  return print_score(ctx, 0, data.count, "", linear.weights && own.by == BY_MODEL);
}

/* For the picture, of each series what is found: as draw_series takes it. */
static float **drawn;
static int64_t drawn_rows(const series *s) { /* of a series, or of each distance of its forecasts */
  if (own.forecast) return s->n + ahead[ahead_count - 1];
  return own.per_step ? s->n : 1;
}
static void drawn_open(void) {
  const int64_t size = own.forecast ? ahead_count * data.k * level_count : label_count;
  drawn = (float **)grow(NULL, data.count, sizeof *drawn);
  for (int64_t i = 0; i < data.count; i++) {
    const int64_t count = drawn_rows(data.list + i) * size;
    drawn[i] = (float *)grow(NULL, count, sizeof(float));
    for (int64_t j = 0; j < count; j++) drawn[i][j] = NAN; /* nothing forecasts the first rows */
  }
}
static void drawn_close(void) {
  for (int64_t i = 0; drawn && i < data.count; i++) free(drawn[i]);
  free(drawn);
}
static void keep_drawn(const series *s, int64_t row, const float *y) {
  float *to = drawn[s - data.list];
  const int64_t each = data.k * level_count;
  if (!own.forecast) memcpy(to + row * label_count, y, (size_t)label_count * sizeof(float));
  for (int64_t a = 0; own.forecast && a < ahead_count; a++)
    for (int64_t i = 0; i < each; i++)
      if (!input_only[i / level_count]) to[(a * drawn_rows(s) + row + ahead[a]) * each + i] = y[a * each + i];
}

static void print_forecasts(const series *s, int64_t row, const float *y) {
  for (int64_t i = 0; i < ahead_count * level_count; i++) {
    printf("%lld,", (long long)(s - data.list) + 1);
    if (own.every) printf("%lld,", (long long)row + 1);
    printf("%lld,%g", (long long)ahead[i / level_count], (double)levels[i % level_count]);
    for (int64_t c = 0; c < data.k; c++)
      if (!input_only[c]) printf(",%.6g", (double)y[(i / level_count * data.k + c) * level_count + i % level_count]);
    printf("\n");
  }
}
/* A name as a cell of CSV: between quotes where it has a comma or a quote. */
static void put_cell(word w) {
  const bool quoted = memchr(w.at, ',', (size_t)w.size) || memchr(w.at, '"', (size_t)w.size);
  if (quoted) putchar('"');
  for (int64_t at = 0, n; at < w.size; at += n) {          /* up to a quote, which is doubled; characters stay whole */
    const unsigned char *quote = (const unsigned char *)memchr(w.at + at, '"', (size_t)(w.size - at));
    n = quote ? quote + 1 - (w.at + at) : w.size - at;
    put_label(w.at + at, n);
    if (quote) putchar('"');
  }
  if (quoted) putchar('"');
}
static void print_header(void) {
  printf(own.every || own.per_step ? "series,step," : "series,");
  printf(own.forecast ? "ahead,quantile" : "found");
  for (int64_t c = 0; c < (own.forecast ? data.k : label_count); c++)
    if (!own.forecast || !input_only[c]) putchar(','), put_cell(own.forecast ? column_name(c) : classes[c]);
  printf("\n");
}
static void print_found(const series *s, int64_t row, const float *y) {
  if (own.svg) keep_drawn(s, row, y);
  if (own.forecast) {
    if (own.every || row + 1 == s->n) print_forecasts(s, row, y);
    return;
  }
  printf("%lld,", (long long)(s - data.list) + 1);
  if (own.per_step) printf("%lld,", (long long)row + 1);
  put_cell(classes[best_of(y)]);
  for (int32_t c = 0; c < label_count; c++) printf(",%.4f", (double)y[c]);
  printf("\n");
}

static int predict(luna_ctx *ctx, const char **words) {
  if ((own.from || own.to) && !own.svg) return fail("--from and --to say what --plot draws; add it");
  if (own.to && own.to < own.from)
    return fail("--from %lld is after --to %lld", (long long)own.from, (long long)own.to);
  if (load_both(ctx, words)) return 2;
  if (own.every && !own.forecast) return fail("--every is for forecasts; the classes of all steps are printed anyway");
  if (own.svg) drawn_open();
  print_header();
  if (find_all(ctx, 0, data.count, print_found)) return 2;
  if (fflush(stdout) != 0 || ferror(stdout)) return fail("cannot write the predictions: %s", strerror(errno));
  return own.svg ? draw_series(own.svg, words[1], (const float *const *)drawn) : 0;
}

#define DATA_FILE "data: A .ts file of the UEA/UCR archive, or a CSV file of one recording, a row a step."
#define MODEL_FILE "model: A file that train wrote."
static const command commands[] = {
  { "train", { DATA_FILE }, "Trains a model on series.", train, "sensors.csv --label state --out sensors.safetensors" },
  { "eval", { MODEL_FILE, DATA_FILE }, "Measures a model on a file.", eval, "sensors.safetensors other.csv" },
  { "predict", { MODEL_FILE, DATA_FILE }, "Prints what a model finds in a file. A causal model streams it.", predict,
    "sensors.safetensors other.csv --plot found.svg" },
  { 0 }
};

int main(int count, char **given) {
  int status = example_of_attentions("series", commands, flags, count, given);
  free(batch.x), free(batch.targets), free(batch.taught), free(batch.labels), free(batch.lengths);
  free(taught), free(linear_shares);
  drawn_close();
  free(data.text.data), free(data.rows), free(data.known), free(data.labels), free(data.list), free(mean);
  free(best.values), free(readers);
  score_close(), linear_close(), free(data.kept_out), free(balance);
  return status;
}
