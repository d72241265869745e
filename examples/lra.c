/* lra: the Long Range Arena (arXiv 2011.04006), end to end: its five tasks, Luna and what Luna's Table 1 compares it with.

     cc -O2 -I. examples/lra.c -o lra -lm -lpthread

     lra train TASK [--attention NAME] [--data FILE] [--valid FILE] [--out RUN] ...     one run; TASK: listops, text, retrieval, image, pathfinder
     lra train TASK --quick ...                                                         a model of minutes; --settings lra: LRA's own settings
     lra train TASK --resume RUN.training ...                                           goes on, to the same bits; --save-every N writes it
     lra eval RUN.safetensors [--data FILE]                                             accuracy on a file, or on generated test samples
     lra table FOLDER [--svg FILE]                                                      Markdown of all runs in it, Table 1 of the paper beside
     lra show TASK [--data FILE]                                                        a few samples, and what a file's lists are like

   A run writes RUN.safetensors, the best model by validation; RUN.csv, its curves; RUN.txt, what lra table reads. ListOps and Pathfinder
   are generated; the files of the others are plain: gunzip or unxz them. Without --valid the last tenth of --data is held for validation. */
#define LUNA_IMPLEMENTATION
#include "luna.h"

#include "example.h"
#include "attentions/attentions.h"
#include "tokens.h"
#include "lists.h"
#include "classifier.h"
#include "pathfinder.h"
#include "lra_tasks.h"
#include "lra_settings.h"
#include "lra_table.h"

static struct settings set = { .memory = 16, .seed = 1 };
static struct {
  const char *data, *valid, *svg;
  int64_t settings, quick, hidden, longest, positions, warmup, decay, difficulty, data_seed, count;
  double weight_decay, attention_dropout;
} own = { .difficulty = 2, .data_seed = 1, .count = 3 };

static const flag flags[] = {
  { "--data", "tes", READS(own.data), "file to learn from, or to measure" },
  { "--valid", "t", READS(own.valid), "file to validate on; without it the last tenth of --data" },
  { "--attention", "t", CHOICE(set.attention, ATTENTION_NAMES), "kind of attention" },
  { "--memory", "t", WHOLE(set.memory, 1, 65536), "Luna's memory slots, l" },
  { "--settings", "t", CHOICE(own.settings, SETTINGS_NAMES), "where the flags that are 0 below get their values from" },
  { "--quick", "t", SWITCH(own.quick), "the same as --settings quick" },
  { "--out", "t", STRING(set.out), "begin of the names of the files that a run writes; else TASK-ATTENTION-SEED" },
  { "--plot", "t", WRITES(set.plot), "file to draw the loss in, SVG" },
  FLAGS_RESUME,
  { "--steps", "t", WHOLE(set.steps, 1, 1e9), "optimiser steps" },
  { "--batch", "t", WHOLE(set.batch, 1, 65536), "samples a step" },
  { "--lr", "t", REAL(set.lr, 1e-9, 10), "peak learning rate, after warm-up" },
  { "--warmup", "t", WHOLE(own.warmup, 0, 1e9), "steps of warm-up" },
  { "--decay", "t", CHOICE(own.decay, DECAY_NAMES), "of the learning rate, then" },
  { "--weight-decay", "t", REAL(own.weight_decay, 0, 10), "decoupled" },
  { "--layers", "t", WHOLE(set.layers, 1, 1000), "layers" },
  { "--dim", "t", WHOLE(set.dim, 1, 65536), "width of the model, d" },
  { "--heads", "t", WHOLE(set.heads, 1, 65536), "attention heads; they divide d" },
  { "--ffn", "t", WHOLE(set.ffn, 1, 1e6), "width of the feed-forward" },
  { "--hidden", "t", WHOLE(own.hidden, 0, 1e6), "width of the classifier's ReLU layer, 0 for none" },
  { "--longest", "t", WHOLE(own.longest, 2, 1e6), "tokens of a sequence, with CLS; more are cut off" },
  { "--positions", "t", CHOICE(own.positions, POSITION_NAMES), "how positions are encoded" },
  { "--pooling", "t", CHOICE(set.pooling, POOLING_NAMES), "what the class is read from" },
  { "--dropout", "t", REAL(set.dropout, 0, 0.95), "probability" },
  { "--attention-dropout", "t", REAL(own.attention_dropout, 0, 0.95), "probability" },
  { "--difficulty", "ts", CHOICE(own.difficulty, "easy intermediate hard"), "of pathfinder: a contour of 6, 9 or 14 paddles" },
  { "--data-seed", "ts", WHOLE(own.data_seed, 0, 9e15), "of what is generated" },
  { "--count", "s", WHOLE(own.count, 1, 1e6), "samples" },
  { "--svg", "Ts", WRITES(own.svg), "file to draw in" },
  FLAG_SEED("t"),
  FLAG_THREADS("te"),
  { 0 }
};

/* ---- settings: what the command line leaves open -------------------------------------------------------------------- */

static bool given(const void *place) {
  for (int i = 0; flags[i].name; i++)
    if ((flags[i].whole == place || flags[i].real == place) && flags_given >> i & 1) return true;
  return false;
}
static void whole(int64_t *place, int64_t value) { if (!given(place)) *place = value; }
static void real(double *place, double value) { if (!given(place)) *place = value; }

static void choose_settings(void) {
  if (own.quick) own.settings = SMALL;
  const recipe r = recipe_of(own.settings, data.task - tasks, &attention_kinds[set.attention]);
  whole(&set.layers, r.layers), whole(&set.dim, r.dim), whole(&set.heads, r.heads), whole(&set.ffn, r.ffn), whole(&own.hidden, r.hidden);
  whole(&own.longest, r.longest), whole(&own.positions, r.positions), whole(&set.pooling, r.pooling), whole(&set.batch, r.batch), whole(&set.steps, r.steps);
  whole(&own.warmup, r.warmup), whole(&own.decay, r.decay);
  real(&set.lr, r.lr), real(&own.weight_decay, r.weight_decay), real(&set.dropout, r.dropout), real(&own.attention_dropout, r.attention_dropout);
}
static void describe(char *out, size_t size) {
  snprintf(out, size, "%lld layers, d %lld, %lld heads, feed-forward %lld, classifier %lld, %lld tokens, %s positions, %s; batch %lld, %lld steps, lr %g, warm-up %lld, "
           "%s, weight decay %g, dropout %g, attention's %g", (long long)set.layers, (long long)set.dim, (long long)set.heads, (long long)set.ffn,
           (long long)own.hidden, (long long)own.longest, own.positions ? "learned" : "sinusoidal", set.pooling == MEAN ? "mean" : set.pooling == FIRST ? "first token" : "CLS", (long long)set.batch, (long long)set.steps, set.lr,
           (long long)own.warmup, own.decay ? "cosine" : "inverse square root", own.weight_decay, set.dropout, own.attention_dropout);
}

static void use_data_flags(void) { data.longest = own.longest, data.seed = (uint64_t)own.data_seed, data.difficulty = own.difficulty; }

/* ---- the model: an encoder, its first X or their mean, a hidden layer, the classes ---------------------------------- */

static struct {
  attentions choice;                 /* where the attention is none of luna.h's own */
  luna_encoder encoder;
  luna_linear_layer hidden, out;
} model;

static int model_open(luna_ctx *ctx, luna_params *params) {
  const attention_kind *a = &attention_kinds[set.attention];
  const bool authors = own.settings == AUTHORS, bert = authors && data.task - tasks <= RETRIEVAL;
  const luna_init init = { bert ? LUNA_INIT_NORMAL : LUNA_INIT_XAVIER, bert ? 0.02f : 1.0f };
  const int64_t task = data.task - tasks, width = data.task->parts * set.dim;
  char line[160];
  luna_encoder_config c = { .layers = set.layers, .dim = set.dim, .heads = set.heads, .ffn = set.ffn, .memory = set.memory, .max_length = own.longest,
    .positions = own.positions ? LUNA_POSITIONS_LEARNED : LUNA_POSITIONS_SINUSOIDAL, .norm_embedding = authors,
    .layer = { .activation = LUNA_ACTIVATION_GELU, .pre_norm = !authors, .sharing = authors ? LUNA_SHARING_FULL : LUNA_SHARING_TIED, .bert_init = bert,
      .dropout = (float)set.dropout, .attention_dropout = (float)own.attention_dropout, .attention = a->kind,
      .linformer.k = own.settings == LRA ? 16 : own.longest < 256 ? own.longest : 256 } };
  attention_line(a, own.settings, task, own.longest, line, sizeof line);
  if (*line && !attentions_open(&model.choice, line)) return fail("%s", model.choice.error);
  if (*line) c.layer.hook = &model.choice.hook;
  luna_status status = luna_encoder_init(&model.encoder, params, "encoder.", data.task->symbols + 1, &c);
  if (status == LUNA_OK && own.hidden) status = luna_linear_layer_init(&model.hidden, params, "hidden", width, own.hidden, init);
  if (status == LUNA_OK) status = luna_linear_layer_init(&model.out, params, "out", own.hidden ? own.hidden : width, data.task->classes, init);
  return status == LUNA_OK ? 0 : failed(ctx);
}
static void model_close(void) { if (model.choice.system) attentions_close(&model.choice); }

/* The mean of X over each sequence's real tokens; in X the others are zeros. */
static luna_tensor *mean_of(luna_tensor *x, const luna_input *input) {
  const int64_t shape[2] = { input->batch, 1 };
  luna_tensor *mean = luna_mean(x, 1);
  float *factors = (float *)grow(NULL, input->batch, sizeof(float));
  for (int64_t b = 0; b < input->batch; b++) factors[b] = (float)input->n / (float)input->lengths[b];
  if (mean) mean = luna_mul(mean, luna_tensor_new(mean->ctx, factors, 2, shape));
  free(factors);
  return mean;
}

/* -> [samples,classes]. A sample's parts follow one another, so that their features [samples parts,d] joined are [samples,parts d]. */
static luna_tensor *logits(const luna_input *input) {
  const int64_t pooled[2] = { input->batch / data.task->parts, data.task->parts * set.dim };
  luna_tensor *x = luna_encoder_forward(&model.encoder, input, NULL);
  x = luna_reshape(set.pooling == MEAN ? mean_of(x, input) : luna_slice(x, 1, set.pooling == FIRST, 1), 2, pooled);
  if (own.hidden) x = luna_relu(luna_linear_layer_forward(&model.hidden, x));
  return luna_linear_layer_forward(&model.out, luna_dropout(x, (float)set.dropout));
}

static luna_optimizer *optimizer_open(luna_params *params) {
  const bool authors = own.settings == AUTHORS, quick = own.settings == SMALL;
  return luna_adamw(params, &(luna_adamw_config){ .lr = (float)set.lr, .beta2 = quick ? 0.999f : 0.98f, .epsilon = authors || quick ? 1e-8f : 1e-9f,
    .weight_decay = (float)own.weight_decay, .clip = quick ? 1 : 0, .schedule = { .decay = own.decay ? LUNA_DECAY_COSINE : LUNA_DECAY_INVERSE_SQRT,
      .warmup = own.warmup, .total = set.steps, .floor = own.decay && quick ? 0.05f : 0 } });
}

/* ---- a run and its files --------------------------------------------------------------------------------------------- */

static struct { char name[400]; double best, loss, before; int64_t best_step, losses; } run = { .best = -1 }; /* loss: the sum of those since the curve's last row;
                                                                                                before: seconds that it took before it went on */
static progress bar;

typedef struct path { char text[440]; } path;
static path run_file(const char *ending) {
  path out;
  snprintf(out.text, sizeof out.text, "%s.%s", run.name, ending);
  return out;
}
static void title_of(char *out, size_t size) {
  snprintf(out, size, set.attention == LUNA ? "%s-%lld" : "%s", attention_kinds[set.attention].title, (long long)set.memory);
}
static int name_run(void) {
  char number[24] = "";
  int length = 0;
  const char *name = name_at(ATTENTION_NAMES, set.attention, &length);
  if (set.attention == LUNA) snprintf(number, sizeof number, "%lld", (long long)set.memory);
  const char *out = set.out ? set.out : set.resume;
  if (out && strlen(out) >= sizeof run.name) return fail("%s is too long a name", out);
  if (out) strcpy(run.name, out);
  char *end = strstr(run.name, ".training");
  if (!set.out && end) *end = 0;                           /* goes on under its name */
  if (!out) snprintf(run.name, sizeof run.name, "%s-%.*s%s-%lld", data.task->name, length, name, number, (long long)set.seed);
  return writable(run_file("txt").text) ? 0 : fail("cannot write %s: %s", run_file("txt").text, strerror(errno));
}

/* RUN.txt, anew: what lra table reads. accuracy: of the best model, on the samples held. */
static int write_report(const luna_params *params, double accuracy, int64_t held) {
  char title[60], what[400];
  int length = 0;
  const char *settings = name_at(SETTINGS_NAMES, own.settings, &length);
  const path to = run_file("txt"), beside = run_file("txt.probe");
  FILE *f = fopen(beside.text, "wb");
  if (!f) return fail("cannot write %s: %s", beside.text, strerror(errno));
  title_of(title, sizeof title), describe(what, sizeof what);
  fprintf(f, "task %s\nsystem %s\nsettings %.*s\nseed %lld\nsteps %lld\nof %lld\nbatch %lld\n", data.task->name, title,
          length, settings, (long long)set.seed, (long long)bar.step, (long long)set.steps, (long long)set.batch);
  fprintf(f, "accuracy %.2f\nbest %lld\nheld %lld\nfrom %s\nparameters %lld\nseconds %.0f\nthreads %lld\ninstructions %s\nmodel %s\n", 100 * accuracy,
          (long long)run.best_step, (long long)held, own.valid ? own.valid : own.data ? "the last tenth of the training data" : "generated lists or pictures",
          (long long)luna_params_element_count(params), run.before + seconds() - bar.start, (long long)set.threads, luna_isa_name(luna_isa_best()), what);
  const bool fine = !ferror(f);
  return (fclose(f) == 0 && fine && move(beside.text, to.text) == 0) ? 0 : fail("cannot write %s: %s", to.text, strerror(errno));
}

static bool is_there(path file) {
  FILE *f = fopen(file.text, "rb");
  return f ? fclose(f) == 0 : (fail("%s, the best model so far of what goes on, is not there; --out is the run's name", file.text), false);
}

/* A row of RUN.csv; the first begins the file, or, when a training goes on, cuts off what it will do again. */
static int write_curve(double share, double loss) {
  const path to = run_file("csv");
  FILE *f = fopen(to.text, "ab");
  if (!f) return fail("cannot write %s: %s", to.text, strerror(errno));
  fprintf(f, "%lld,%.6f,", (long long)bar.step, run.loss / (double)run.losses);
  if (share >= 0) fprintf(f, "%.6f,%.4f", loss, share);
  else fprintf(f, ",");
  fprintf(f, "\n");
  run.loss = 0, run.losses = 0;
  const bool fine = !ferror(f);
  return fclose(f) == 0 && fine ? 0 : fail("cannot write %s: %s", to.text, strerror(errno));
}
static int begin_curve(int64_t step) {
  const path to = run_file("csv");
  contents old = { NULL, 0 };
  int64_t at = 0, length, keep = 0;
  const unsigned char *line;
  FILE *f = step ? fopen(to.text, "rb") : NULL;
  if (f && (fclose(f), read_file(to.text, &old))) return 2;
  while ((line = next_line(old, &at, &length)) != NULL && (keep == 0 || atoll((const char *)line) <= step)) keep = at < old.size ? at : old.size;
  if ((f = fopen(to.text, "wb")) == NULL) return free(old.data), fail("cannot write %s: %s", to.text, strerror(errno));
  if (keep) fwrite(old.data, 1, (size_t)keep, f);
  else fprintf(f, "step,loss,validation_loss,validation_accuracy\n");
  free(old.data);
  return fclose(f) == 0 ? 0 : fail("cannot write %s: %s", to.text, strerror(errno));
}

/* What a training must know, besides the flags, to go on. */
static int save_training(luna_ctx *ctx, const luna_optimizer *adam, luna_params *params) {
  char text[160];
  snprintf(text, sizeof text, "%.17g %lld %.17g %lld %.17g", run.best, (long long)run.best_step, run.loss, (long long)run.losses, run.before + seconds() - bar.start);
  if (luna_params_set(params, "lra.task", data.task->name) != LUNA_OK || luna_params_set(params, "lra.run", text) != LUNA_OK) return failed(ctx);
  return keep_settings(params, flags, bar.step) == LUNA_OK && luna_save_training(adam, run_file("training").text) == LUNA_OK ? 0 : failed(ctx);
}
static int resume_training(luna_ctx *ctx, int64_t *step) {
  long long best_step, losses;
  const luna_params *pairs = kept_pairs(ctx, set.resume);
  if (!pairs) return 2;
  const char *task = luna_params_get(pairs, "lra.task"), *text = luna_params_get(pairs, "lra.run");
  if (!task || !text || sscanf(text, "%lf %lld %lf %lld %lf", &run.best, &best_step, &run.loss, &losses, &run.before) != 5)
    return fail("%s holds no training of lra to go on with; --save-every writes one", set.resume);
  if (strcmp(task, data.task->name) != 0) return fail("%s is a training of %s", set.resume, task);
  run.best_step = best_step, run.losses = losses;
  return take_settings(ctx, flags, step);
}

/* ---- train --------------------------------------------------------------------------------------------------------- */

/* Measures the model and keeps it when it is the best so far. */
static int look(luna_ctx *ctx, luna_params *params, const samples *s) {
  double loss, since = seconds(), share = accuracy(ctx, NULL, s, s->training, s->held < QUICK ? s->held : QUICK, &loss);
  if (share < 0) return failed(ctx);
  progress_validated(&bar, since, loss);
  snprintf(bar.note, sizeof bar.note, "validation %.1f%%", 100 * share);
  if (share > run.best) {
    run.best = share, run.best_step = bar.step;
    if (luna_params_set(params, "lra.task", data.task->name) != LUNA_OK || keep_settings(params, flags, bar.step) != LUNA_OK ||
        luna_save(params, run_file("safetensors").text) != LUNA_OK) return failed(ctx);
  }
  return write_curve(share, loss) || write_report(params, run.best, s->held < QUICK ? s->held : QUICK);
}

static int learn(luna_ctx *ctx, luna_params *params, luna_optimizer *adam, const samples *s) {
  const int64_t every = set.steps < 100 ? 1 : set.steps / 100;
  while (bar.step < set.steps && !interrupted) {
    batch b = batch_random(s, bar.step);
    luna_begin_step(ctx);
    luna_tensor *loss = luna_cross_entropy(logits(&b.input), b.labels);
    if (model.choice.system) loss = attentions_loss(&model.choice, loss);
    luna_backward(loss);
    if (luna_optimizer_step(adam) != LUNA_OK) return failed(ctx);
    const double value = (double)luna_item(loss);
    progress_step(&bar, value, (double)(b.input.batch * b.input.n));
    run.loss += value, run.losses++;
    const bool due = bar.step % validation_period() == 0 || bar.step == set.steps;
    if (due ? look(ctx, params, s) : bar.step % every == 0 && write_curve(-1, 0)) return 2;
    if (set.save_every && bar.step % set.save_every == 0 && save_training(ctx, adam, params)) return 2;
  }
  return interrupted && set.save_every ? save_training(ctx, adam, params) : 0;
}

/* The best model once more, on all samples held. */
static int finish(luna_ctx *ctx, luna_params *params, const samples *s) {
  double loss, share = run.best, took = run.before + seconds() - bar.start;
  progress_end(&bar);
  if (interrupted) printf("stopped at step %lld\n", (long long)bar.step);
  if (run.best_step == 0) return fail("stopped before the first validation: no model was written");
  if (luna_load(params, run_file("safetensors").text) != LUNA_OK || (share = accuracy(ctx, NULL, s, s->training, s->held, &loss)) < 0) return failed(ctx);
  if (write_report(params, share, s->held)) return 2;
  printf("%s: %lld steps in %.0f s, the best at step %lld, accuracy on %lld samples held: %.2f%% (loss %.3f)\n", run_file("safetensors").text,
         (long long)bar.step, took, (long long)run.best_step, (long long)s->held, 100 * share, loss);
  return plot(&bar, run.name);
}

static int train_on(luna_ctx *ctx, const samples *s, int64_t begin) {
  luna_params *params = luna_params_open(ctx);
  char title[60], what[400];
  if (model_open(ctx, params)) return 2;
  luna_optimizer *adam = optimizer_open(params);
  if (!adam || (set.resume && luna_load_training(adam, set.resume) != LUNA_OK)) return failed(ctx);
  title_of(title, sizeof title), describe(what, sizeof what);
  printf("%s, %s: %lld samples to learn from, %lld to validate on; %lld parameters\n%s\n", data.task->title, title, (long long)s->training, (long long)s->held,
         (long long)luna_params_element_count(params), what);
  if (begin) printf("going on from step %lld of %s\n", (long long)begin, set.resume);
  fflush(stdout);
  if (begin_curve(begin) || (run.best_step && !is_there(run_file("safetensors")))) return 2;
  progress_start(&bar, begin);
  return learn(ctx, params, adam, s) || finish(ctx, params, s) ? 2 : 0;
}

static int train(luna_ctx *ctx, const char **words) {
  samples s;
  int64_t begin = 0;
  if (task_find(words[0]) || (set.resume && resume_training(ctx, &begin))) return 2;
  if (!set.resume) choose_settings();
  if (name_run()) return 2;
  use_data_flags();
  int status = task_open(&s, own.data, own.valid, false);
  s.logits = logits;
  if (!status && (status = batch_open(&s)) == 0) status = train_on(ctx, &s, begin);
  batch_close(), model_close(), task_close();
  return status;
}

/* ---- eval, table, show ------------------------------------------------------------------------------------------------ */

static int eval(luna_ctx *ctx, const char **words) {
  luna_params *params = luna_params_open(ctx);
  const luna_params *pairs = kept_pairs(ctx, words[0]);
  const char *task = pairs ? luna_params_get(pairs, "lra.task") : NULL;
  samples s;
  double loss, share = -1;
  if (!pairs) return 2;
  if (!task) return fail("%s is not a model that lra made", words[0]);
  if (task_find(task) || set_kept_flags(pairs, flags, words[0])) return 2;
  use_data_flags();
  int status = task_open(&s, own.data, NULL, true);
  s.logits = logits;
  if (!status) status = model_open(ctx, params);
  if (!status && luna_load(params, words[0]) != LUNA_OK) status = failed(ctx);
  if (!status && (status = batch_open(&s)) == 0 && (share = accuracy(ctx, NULL, &s, 0, s.held, &loss)) < 0) status = failed(ctx);
  if (!status) printf("%s: %s, accuracy on %lld samples of %s: %.2f%% (loss %.3f)\n", words[0], data.task->title, (long long)s.held, s.title, 100 * share, loss);
  batch_close(), model_close(), task_close();
  return status;
}

static int table_command(luna_ctx *ctx, const char **words) { return (void)ctx, print_folder(words[0], own.svg); }

static void print_image(const int32_t *pixels) {
  for (int y = 0; y < SIDE; y++) {
    for (int x = 0; x < SIDE; x++) {
      const char shade = " .:-=+*#%@"[pixels[y * SIDE + x] * 10 / 256];
      printf("%c%c", shade, shade);
    }
    printf("\n");
  }
}
static void draw_image(FILE *to, int64_t index, const int32_t *pixels, int32_t label) { /* eight a row, four times as large */
  const int64_t left = index % 8 * 140 + 6, top = index / 8 * 154 + 6;
  for (int i = 0; i < PIXELS; i++)
    fprintf(to, "<rect x='%d' y='%d' width='4' height='4' fill='#%02x%02x%02x'/>", (int)left + i % SIDE * 4, (int)top + i / SIDE * 4, (unsigned)pixels[i], (unsigned)pixels[i],
            (unsigned)pixels[i]);
  fprintf(to, "\n<text x='%d' y='%d'>label %d</text>\n", (int)left, (int)top + 141, (int)label);
}

/* What ListOps' rules say, counted: lengths, depth, members, operators, answers, and whether each answer is its list's value. */
static int print_lists(const samples *s) {
  int32_t *tokens = (int32_t *)grow(NULL, s->longest, sizeof(int32_t)), length;
  int64_t all = s->training + s->held, count = all < 10000 ? all : 10000, shortest = INT64_MAX, longest = 0, sum = 0, depth, args, deepest = 0, most = 0, right = 0;
  int64_t kinds[SYMBOLS] = { 0 }, answers[10] = { 0 };
  double depths = 0;
  for (int64_t i = 0; i < count; i++) {
    const int32_t answer = s->fetch(i, tokens, &length);
    const int64_t n = length - 1;
    right += list_value(tokens + 1, n, &depth, &args) == answer;
    answers[answer]++, sum += n, depths += (double)depth / (double)count;
    shortest = n < shortest ? n : shortest, longest = n > longest ? n : longest, deepest = depth > deepest ? depth : deepest, most = args > most ? args : most;
    for (int32_t k = 1; k < length; k++) kinds[tokens[k]]++;
  }
  free(tokens);
  const double operators = (double)kinds[END];
  printf("%lld lists, %lld whose answer is their value\ntokens: %lld to %lld, mean %.1f\ndepth: mean %.2f, at most %lld; members: at most %lld\noperators:", (long long)count,
         (long long)right, (long long)shortest, (long long)longest, (double)sum / (double)count, depths, (long long)deepest, (long long)most);
  for (int k = MIN; k <= SM; k++) printf(" %s %.1f%%", symbols[k] + 1, 100 * (double)kinds[k] / operators);
  printf("; of all tokens %.2f%%\nanswers:", 100 * operators / (double)sum);
  for (int k = 0; k < 10; k++) printf(" %d %.1f%%", k, 100 * (double)answers[k] / (double)count);
  printf("\n");
  return 0;
}

static int show_samples(const samples *s, FILE *to) {
  const task_kind *t = data.task;
  int32_t *tokens = (int32_t *)grow(NULL, s->longest * t->parts, sizeof(int32_t)), lengths[2];
  for (int64_t i = 0; i < own.count && i < s->training + s->held; i++) {
    const int32_t label = s->fetch(i, tokens, lengths);
    printf("sample %lld, label %d:", (long long)i, (int)label);
    for (int64_t p = 0; p < t->parts; p++) {
      printf("\n");
      if (s->vocab == SYMBOLS + 1) for (int32_t k = 1; k < lengths[p]; k++) printf("%s ", symbols[tokens[k]]);
      else if (t == &tasks[IMAGE] || t == &tasks[PATHFINDER]) print_image(tokens + 1);
      else for (int32_t k = 1; k < lengths[p]; k++) putchar(tokens[p * s->longest + k] >= 32 && tokens[p * s->longest + k] < 127 ? tokens[p * s->longest + k] : '?');
    }
    printf("\n");
    if (to) draw_image(to, i, tokens + 1, label);
  }
  free(tokens);
  return 0;
}

static int show(luna_ctx *ctx, const char **words) {
  samples s;
  FILE *to = NULL;
  (void)ctx;
  if (task_find(words[0])) return 2;
  const bool pictures = data.task - tasks >= IMAGE;
  own.longest = 4002;
  use_data_flags();
  if (own.svg && !pictures) return fail("--svg draws image and pathfinder alone");
  int status = task_open(&s, own.data, NULL, false);
  if (!status && own.svg && (to = fopen(own.svg, "w")) == NULL) status = fail("cannot write %s: %s", own.svg, strerror(errno));
  if (to) fprintf(to, "<svg xmlns='http://www.w3.org/2000/svg' width='1126' height='%d' font-family='sans-serif' font-size='12' shape-rendering='crispEdges'>\n",
                  (int)((own.count + 7) / 8 * 154 + 10));
  if (!status) status = show_samples(&s, to);
  if (!status && data.task == &tasks[LISTOPS]) status = print_lists(&s);
  if (to) fprintf(to, "</svg>\n");
  if (to && fclose(to) != 0 && !status) status = fail("cannot write %s: %s", own.svg, strerror(errno));
  task_close();
  return status;
}

#define DATA_HELP "task: listops, text, retrieval, image, pathfinder"
static const command commands[] = {
  { "train", { DATA_HELP }, "learns a task, and writes a run", train },
  { "eval", { "model: a file RUN.safetensors that train wrote" }, "accuracy on a file, or on generated test samples", eval },
  { "table", { "folder: runs that train wrote" }, "Markdown of a folder's runs, beside the paper's Table 1", table_command },
  { "show", { DATA_HELP }, "a few samples of a task", show },
  { 0 }
};

int main(int count, char **given) { return example("lra", commands, flags, count, given); }
