/* lra: the Long Range Arena (arXiv 2011.04006), end to end. It has the five tasks, Luna and what Luna's Table 1
   compares it with. TASK is listops, text, retrieval, image or pathfinder.

     cc -O2 -I. examples/lra/lra.c -o lra -lm -lpthread

     lra train TASK [--attention NAME] [--data FILE] [--valid FILE] [--out RUN] ...     makes one run
     lra train TASK --settings quick ...           makes a model of minutes; else lra (LRA's) or authors (Luna's)
     lra train TASK --resume RUN.training ...      resumes a run, to the same bits; --save-every N writes that file
     lra pretrain TASK ...                         self-pretraining (arXiv 2310.02980): trains on masked samples of the
                                                   task, without labels
     lra train TASK --begin RUN.safetensors ...    begins with the encoder of such a run
     lra train TASK --seeds 1-4 --trial 5000 ...   makes four runs; each ends after 5,000 steps if it has learnt nothing
     lra train image --pixels number --shift 4 ... reads a gray as a number, not as one of 256 tokens, and moves images
     lra train pathfinder --pixels number --segment 1 ...    adds a second loss, on the first disc's contour
     lra eval RUN.safetensors [--data FILE]        measures the accuracy on a file or on generated test samples
     lra quantize RUN.safetensors --out FILE       stores a model's matrices in 8 bits
     lra draw RUN.safetensors [--plot FILE]        draws where the memory slots look in a picture
     lra table FOLDER [--plot FILE]                prints all runs in it as Markdown, beside Table 1 of the paper
     lra show TASK [--data FILE] [--plot FILE]     shows a few samples, and for lists and Pathfinder what they are like

   A run writes RUN.safetensors, the best model by validation; RUN.csv, its curves; and RUN.txt, which lra table reads.
   ListOps and Pathfinder are generated. The files of the others are plain, so gunzip or unxz them first. Without
   --valid the last tenth of --data is for validation. */
#define LUNA_IMPLEMENTATION
#include "luna.h"

#include "../common/example.h"
#include "../attentions/attentions.h"
#include "../common/tokens.h"
#include "../common/lists.h"
#include "../common/classifier.h"
#include "../common/slot_weights.h"
#include "../luna_mask.h"
#include "pathfinder.h"
#include "lra_tasks.h"
#include "lra_settings.h"
#include "lra_table.h"
#include "lra_draw.h"

static struct settings set = { .memory = 16, .seed = 1, .validations = 20, .dropout = -1 }; /* -1: by --settings */
static struct {
  const char *data, *valid, *svg, *begin, *seeds, *int8;
  int64_t settings, hidden, longest, positions, warmup, decay, mirror, difficulty, data_seed, count;
  int64_t pixels, shift, grays, trial, sample, layer;
  double weight_decay, attention_dropout, growing, segment, segment_for, dark, keep, masked, trial_loss;
} own = { .difficulty = 2, .data_seed = 1, .count = 3, .layer = 1, .hidden = -1, .warmup = -1, .weight_decay = -1,
          .attention_dropout = -1, .growing = -1, .segment_for = 0.33, .dark = 1, .keep = 1, .masked = 0.15 };

#define GRAYS_NAMES "16 256"
static const flag flags[] = {
  { "--data", "tpeds", READS(own.data),
   "Reads the samples from FILE. Without it those of listops and pathfinder are generated." },
  { "--valid", "tp", READS(own.valid),
   "Says which samples choose the model. They are half of FILE, else of the last tenth of --data; the rest is "
   "measured at the end." },
  { "--begin", "t", READS(own.begin), "Begins with those tensors of model FILE whose names and shapes fit." },
  { "--attention", "tp", CHOICE(set.attention, ATTENTION_NAMES), "Chooses the kind of attention." },
  { "--memory", "tp", WHOLE(set.memory, 1, 65536), "Sets the number of memory slots, l, to N." },
  { "--settings", "tp", CHOICE(own.settings, SETTINGS_NAMES),
   "Chooses the values of --steps to --attention-dropout that are not given. quick takes minutes." },
  { "--out", "tp", STRING(set.out),
   "Says where to write the result. The names of a run's files begin with TEXT, else with TASK-ATTENTION-SEED or the "
   "like." },
  { "--out", "q", WRITES(own.int8), "Says where to write the result. FILE gets the model." },
  { "--plot", "tp", WRITES(set.plot), "Draws a picture in FILE, as SVG. It shows the loss." },
  { "--plot", "d", WRITES(set.plot), "Draws a picture in FILE, as SVG. It shows where attention looks." },
  { "--validations", "tp", WHOLE(set.validations, 1, 1e6),
   "Validates N times, at equal distances. The best model is kept." },
  FLAGS_RESUME_OF("tp"),
  { "--steps", "tp", WHOLE(set.steps, 1, 1e9), "Makes N optimiser steps." },
  { "--batch", "tp", WHOLE(set.batch, 1, 65536), "Trains on N sequences a step." },
  FLAG_LR("tp"),
  { "--warmup", "tp", WHOLE(own.warmup, 0, 1e9), "Lets the learning rate rise for N steps." },
  { "--decay", "tp", CHOICE(own.decay, DECAY_NAMES), "Chooses how the learning rate decays after warm-up." },
  { "--weight-decay", "tp", REAL(own.weight_decay, 0, 10), "Sets the decoupled weight decay to X." },
  { "--growing", "tp", REAL(own.growing, 0, 1),
   "Trains on simpler samples in the first share X of the steps. It is for listops and pathfinder." },
  FLAGS_SIZES("tp"),
  { "--hidden", "t", WHOLE(own.hidden, 0, 1e6), "Gives the classifier a ReLU layer of width N. 0 leaves it out." },
  { "--longest", "tp", WHOLE(own.longest, 2, 1e6),
   "Limits a sequence to N tokens. CLS is one of them; more are cut off." },
  { "--positions", "tp", CHOICE(own.positions, POSITION_NAMES), "Chooses how positions are encoded." },
  { "--pooling", "tp", CHOICE(set.pooling, POOLING_NAMES), "Chooses what the class is predicted from." },
  { "--dropout", "tp", REAL(set.dropout, 0, 0.95), "Sets numbers to 0 with probability X in training." },
  { "--attention-dropout", "tp", REAL(own.attention_dropout, 0, 0.95),
   "Sets attention weights to 0 with probability X in training." },
  { "--mirror", "tp", SWITCH(own.mirror), "Mirrors half of the training images, at random. It is for image." },
  { "--shift", "tp", WHOLE(own.shift, 0, SIDE / 2),
   "Moves training images at random by up to N pixels. It is for image." },
  { "--pixels", "tp", CHOICE(own.pixels, "token number"),
   "Reads a gray as a token or as a number. It is for image and pathfinder." },
  { "--segment", "t", REAL(own.segment, 0, 1000),
   "Adds a second loss of weight X. It asks which lit pixels belong to the first disc's contour, in pathfinder." },
  { "--segment-for", "t", REAL(own.segment_for, 0.0001, 1),
   "Lets the weight of --segment fall to 0 in the first share X of the steps." },
  { "--dark", "t", REAL(own.dark, 0, 1),
   "Keeps a share X of the dark pixels of training pictures and leaves the others out. It is for pathfinder." },
  { "--keep", "t", REAL(own.keep, 0.01, 1),
   "Keeps a share X of the pixels of training images, at random, and leaves the others out. It is for image." },
  { "--masked", "tp", REAL(own.masked, 0.01, 0.95),
   "Masks a share X of the tokens. It is for pretrain; of pixels as numbers it is 0.5 if not given." },
  { "--grays", "tp", CHOICE(own.grays, GRAYS_NAMES),
   "Sets how many shades of gray are told apart. They are those of the pixels that pretrain hides." },
  { "--trial", "t", WHOLE(own.trial, 0, 1e9), "Ends a run after N steps if its loss has not fallen. 0 ends none." },
  { "--trial-loss", "t", REAL(own.trial_loss, 0, 1000),
   "Lets --trial end runs whose loss is above X. 0 is 98% of the loss of guessing." },
  { "--difficulty", "tpsed", CHOICE(own.difficulty, DIFFICULTY_NAMES),
   "Chooses contours of 6, 9 or 14 paddles. It is for pathfinder." },
  { "--data-seed", "tpsed", WHOLE(own.data_seed, 0, 9e15),
   "Seeds the generated samples with N. Without it eval takes that of the training." },
  { "--sample", "d", WHOLE(own.sample, 0, 1e9), "Shows sample N of those that test the model, from 0." },
  { "--layer", "d", WHOLE(own.layer, 1, 1024), "Shows layer N, from 1." },
  { "--count", "s", WHOLE(own.count, 1, 1e6), "Sets the count to N. It counts the samples to show." },
  { "--plot", "Ts", WRITES(own.svg), "Draws a picture in FILE, as SVG. It shows the runs, or the samples." },
  FLAG_SEED("tp"),
  { "--seeds", "tp", STRING(own.seeds),
   "Makes a run for each of several seeds. TEXT is FIRST-LAST, such as 1-4; --out gets -SEED at its end." },
  FLAG_THREADS("tpe"),
  FLAG_PRODUCTS("tp"),
  FLAG_RECOMPUTE,
  FLAG_PARALLEL,
  { 0 }
};

static bool pretraining;             /* model.out gives what is masked, and there is no hidden */

/* ---- settings: what the command line leaves open ----------------------------------------------------------------- */

static const flag *flag_of(const void *place) {
  const flag *f = flags;
  while (f->whole != place && f->real != place) f++;
  return f;
}
static bool given(const void *place) { return flags_given >> (flag_of(place) - flags) & 1; }
static void whole(int64_t *place, int64_t value) { if (!given(place)) *place = value; }
static void real(double *place, double value) { if (!given(place)) *place = value; }

static void choose_settings(void) {
  const recipe r = recipe_of(own.settings, data.task - tasks, &attention_kinds[set.attention]);
  whole(&set.layers, r.layers), whole(&set.dim, r.dim), whole(&set.heads, r.heads), whole(&set.ffn, r.ffn);
  whole(&own.hidden, r.hidden), whole(&own.longest, r.longest);
  whole(&own.positions, own.pixels ? GRID : r.positions), whole(&set.pooling, r.pooling);
  whole(&set.batch, r.batch), whole(&set.steps, r.steps), whole(&own.warmup, r.warmup), whole(&own.decay, r.decay);
  real(&set.lr, r.lr), real(&own.weight_decay, r.weight_decay);
  if (own.pixels) real(&own.masked, 0.5);
  real(&own.growing, r.growing), real(&set.dropout, r.dropout), real(&own.attention_dropout, r.attention_dropout);
}

typedef struct path { char text[640]; } path;              /* a text or a file's name, by value */

/* Whether a flag shapes nothing in this run, as its task has no use for it or another flag is off. */
static bool is_idle(const flag *f) {
  const int64_t task = data.task - tasks, *w = f->whole;
  const double *x = f->real;
  if (w == &own.difficulty) return task != PATHFINDER;
  if (w == &own.mirror || w == &own.shift) return task != IMAGE;
  if (w == &own.pixels) return task < IMAGE;
  if (x == &own.segment || x == &own.segment_for) return own.segment <= 0;
  if (x == &own.masked) return !pretraining;
  if (w == &own.grays) return !pretraining || !own.pixels;
  if (x == &own.dark) return own.dark >= 1;
  if (x == &own.keep) return own.keep >= 1;
  return x == &own.growing && task != LISTOPS && task != PATHFINDER;
}
/* "layers 2, dim 64, ...": all that shapes a run but the system, the seed, and when it is looked at or ends */
static path describe(void) {
  path out = { "" };
  size_t size = 0;
  for (const flag *f = flags; f->name; f++) {
    const int64_t *w = f->whole;
    const bool system = w == &set.attention || w == &set.memory || w == &own.settings;
    const bool run = w == &set.seed || w == &set.validations || w == &own.trial || f->real == &own.trial_loss;
    char value[40];
    if (!shapes_training(f) || system || run || is_idle(f) || size + 80 > sizeof out.text) continue;
    flag_text(f, value, sizeof value);
    size += (size_t)snprintf(out.text + size, sizeof out.text - size, "%s%s %s", size ? ", " : "", f->name + 2, value);
  }
  return out;
}

static void use_data_flags(void) {
  data.longest = own.longest, data.seed = (uint64_t)own.data_seed, data.difficulty = own.difficulty;
}

/* ---- the model: an encoder, one of its X or their mean, a hidden layer, the classes ------------------------------ */

static struct {
  attentions choice;                 /* where the attention is none of luna.h's own */
  luna_encoder encoder;
  luna_linear_layer hidden, out;
  luna_linear_layer segment;         /* with --segment: whether a pixel belongs to the contour of the first disc */
} model;

static luna_status scale_values(luna_tensor *t, float factor) {
  float *values = (float *)grow(NULL, luna_count(t), sizeof(float));
  luna_status status = luna_read(t, values);
  for (int64_t i = 0; status == LUNA_OK && i < luna_count(t); i++) values[i] *= factor;
  if (status == LUNA_OK) status = luna_write(t, values);
  return free(values), status;
}
/* Number k of `count` sines and cosines of a pixel's row, and then of its column, of periods from 2 sides down to 4
   pixels; zeros for CLS, at place 0. Near pixels are alike so. */
static double coordinate(int64_t at, int64_t k, int64_t count) {
  const int64_t pixel = at - 1, quarter = count / 4, period = k % quarter;
  const int64_t line = k < 2 * quarter ? pixel / SIDE : pixel % SIDE;
  const double part = (double)period / (double)(quarter > 1 ? quarter - 1 : 1);
  const double angle = (double)line * PI / SIDE * pow(SIDE / 2, part);
  if (pixel < 0 || k >= 4 * quarter) return 0;
  return k / quarter % 2 == 0 ? sin(angle) : cos(angle);
}
/* Positions [longest,d] begin as the coordinates of pixels, of this size. */
static luna_status write_grid(luna_tensor *positions, float size) {
  const int64_t longest = positions->shape[0], dim = positions->shape[1];
  float *values = (float *)grow(NULL, longest * dim, sizeof(float));
  for (int64_t i = 0; i < longest * dim; i++) values[i] = size * (float)coordinate(i / dim, i % dim, dim);
  luna_status status = luna_write(positions, values);
  return free(values), status;
}
/* With --pixels number a step's features are a pixel's gray and whether it is hidden. --positions coordinates adds the
   pixel's coordinates. CLS and what is hidden have no gray, which counts as the mean of all. */
enum { FEATURES = 2, COORDINATE_FEATURES = 64 };
static int64_t features_count(void) {
  return own.positions == COORDINATES ? FEATURES + COORDINATE_FEATURES : FEATURES;
}
static const float *coordinates_at(int64_t at) {           /* [COORDINATE_FEATURES] of a place */
  static float waves[1 + PIXELS][COORDINATE_FEATURES];
  static bool filled;
  for (int64_t i = 0; i <= PIXELS && !filled; i++)
    for (int64_t k = 0; k < COORDINATE_FEATURES; k++) waves[i][k] = (float)coordinate(i, k, COORDINATE_FEATURES);
  return filled = true, waves[at];
}
static int32_t grays(void) { return own.grays ? 256 : 16; }
static int32_t class_of_gray(int32_t gray) { return gray < 0 ? -1 : gray * grays() / 256; }
static int64_t masked_classes(void) { return own.pixels ? grays() : data.task->symbols + 1; }
static float *features_of(const luna_input *input, const int32_t *labels) { /* to be freed; labels: see encoded() */
  const int64_t all = input->batch * input->n, count = features_count();
  float *features = (float *)grow(NULL, count * all + 1, sizeof(float));
  for (int64_t i = 0; i < all; i++) {
    const int32_t gray = gray_of_token(input->tokens[i]);
    const bool hidden = labels && labels[i] >= 0;
    float *own_features = features + count * i;
    own_features[0] = hidden || gray == (int32_t)data.task->symbols ? NAN : (float)gray;
    own_features[1] = hidden;
    if (count > FEATURES)
      memcpy(own_features + FEATURES, coordinates_at(place_of_token(input->tokens[i], i % input->n)),
             COORDINATE_FEATURES * sizeof(float));
  }
  return features;
}
/* X of a batch, [batch,n,d]. labels [batch,n] are negative at what is not hidden, or null. */
static luna_tensor *encoded(const luna_input *input, const int32_t *labels) {
  if (!own.pixels) return luna_encoder_forward(&model.encoder, input, NULL);
  luna_input numbers = *input;
  float *features = features_of(input, labels);
  numbers.features = features;
  luna_tensor *x = luna_encoder_forward(&model.encoder, &numbers, NULL);
  return free(features), x;
}
/* The mean and the deviation of grays, from the first samples that are learnt from. A picture has CLS and its pixels,
   however long --longest lets a sequence be. */
static int fit_grays(luna_ctx *ctx, const samples *s) {
  enum { COUNT = 256 };
  const int64_t count = s->training < COUNT ? s->training : COUNT;
  const int64_t n = s->longest < 1 + PIXELS ? s->longest : 1 + PIXELS;
  data.mirrored = data.moved = data.marked = data.dimmed = data.thinned = 0, data.grown = 1;
  int32_t *tokens = (int32_t *)grow(NULL, count * n, sizeof(int32_t)), lengths[COUNT];
  memset(tokens, 0, (size_t)(count * n) * sizeof(int32_t));
  for (int64_t i = 0; i < count; i++) s->fetch(i, tokens + i * n, &lengths[i]);
  luna_input input = { tokens, lengths, count, n, NULL };
  float *features = features_of(&input, NULL);
  input.features = features;
  const luna_status status = luna_input_layer_fit(&model.encoder.input, &input);
  free(features), free(tokens);
  return status == LUNA_OK ? 0 : failed(ctx);
}

static int model_open(luna_ctx *ctx, luna_params *params) {
  static const luna_positions position_kinds[] = { LUNA_POSITIONS_SINUSOIDAL, LUNA_POSITIONS_LEARNED,
                                                   LUNA_POSITIONS_LEARNED, LUNA_POSITIONS_NONE };
  const attention_kind *a = &attention_kinds[set.attention];
  const int64_t task = data.task - tasks, width = data.task->parts * set.dim;
  const bool authors = own.settings == AUTHORS, bert = authors && task <= TEXT;
  const luna_init init = { bert ? LUNA_INIT_NORMAL : LUNA_INIT_XAVIER, bert ? 0.02f : 1.0f };
  const luna_layer_config layer = {
    .dim = set.dim, .heads = set.heads, .memory = set.memory, .ffn = set.ffn,
    .activation = LUNA_ACTIVATION_GELU, .pre_norm = !authors, .sharing = LUNA_SHARING_FULL, .bert_init = bert,
    .dropout = (float)set.dropout, .attention_dropout = (float)own.attention_dropout, .attention = a->kind,
    .recompute = (luna_recompute_kind)set.recompute
  };
  luna_encoder_config c = {
    .layers = set.layers, .layer = layer,
    .positions = position_kinds[own.positions],
    .max_length = own.longest, .norm_embedding = authors, .features = own.pixels ? features_count() : 0
  };
  char line[160];
  attention_line(a, own.settings, task, own.longest, set.pooling, line, sizeof line);
  if (*line && !attentions_open(&model.choice, line)) return fail("%s", model.choice.error);
  if (*line) c.layer.hook = &model.choice.hook;
  luna_status status = luna_encoder_init(&model.encoder, params, "encoder.", own.pixels ? 0 : data.task->symbols + 1,
                                         &c);
  if (status == LUNA_OK && bert && model.encoder.memory)   /* theirs is not drawn so, as all the others are */
    status = scale_values(model.encoder.memory, (float)(1 / (0.02 * sqrt((double)set.dim))));
  if (status == LUNA_OK && own.hidden && !pretraining)
    status = luna_linear_layer_init(&model.hidden, params, "hidden", width, own.hidden, init);
  /* as large as what is learnt is at first; beside numbers of up to 5 deviations that would be lost */
  const double size = own.pixels ? 1 : sqrt(2.0 / (double)set.dim);
  if (status == LUNA_OK && own.positions == GRID) status = write_grid(model.encoder.positions, (float)size);
  const int64_t last = own.hidden ? own.hidden : width;
  if (status == LUNA_OK && pretraining)
    status = luna_linear_layer_init(&model.out, params, "tokens", set.dim, masked_classes(), init);
  else if (status == LUNA_OK)
    status = luna_linear_layer_init(&model.out, params, "out", last, data.task->classes, init);
  if (status == LUNA_OK && own.segment > 0)
    status = luna_linear_layer_init(&model.segment, params, "segment", set.dim, 2, init);
  return status == LUNA_OK ? 0 : failed(ctx);
}
/* Random features anew before a step: of the step and --seed alone, and saved with the parameters. */
static int redraw(int64_t step) {
  const int64_t period = attention_kinds[set.attention].redrawn;
  if (period == 0 || step == 0 || step % period != 0) return 0;
  return attentions_redraw(&model.choice, draw(1, step, 0)) ? 0 : fail("out of memory");
}
static void model_close(void) { if (model.choice.system) attentions_close(&model.choice); }

/* The mean of X over each sequence's real tokens; in X the others are zeros. */
static luna_tensor *mean_of(luna_tensor *x, const luna_input *input) {
  const int64_t shape[2] = { input->batch, 1 };
  luna_tensor *mean = luna_mean(x, 1);
  float *factors = (float *)grow(NULL, input->batch + 1, sizeof(float));
  for (int64_t b = 0; b < input->batch; b++) factors[b] = (float)pool.n / (float)input->lengths[b];
  if (mean) mean = luna_mul(mean, luna_tensor_new(mean->ctx, factors, 2, shape));
  free(factors);
  return mean;
}

/* X [batch,n,d] -> [samples,classes]. A sample's parts follow one another: their features [samples parts,d] joined are
   [samples,parts d]. */
static luna_tensor *logits_of(luna_tensor *x, const luna_input *input) {
  const int64_t pooled[2] = { input->batch / data.task->parts, data.task->parts * set.dim };
  x = set.pooling == MEAN ? mean_of(x, input) : luna_slice(x, 1, 0, 1);
  x = luna_reshape(x, 2, pooled);
  if (own.hidden) x = luna_relu(luna_linear_layer_forward(&model.hidden, x));
  return luna_linear_layer_forward(&model.out, luna_dropout(x, (float)set.dropout));
}
static luna_tensor *logits(const luna_input *input) { return logits_of(encoded(input, NULL), input); }

/* What --segment weighs at a step: it falls to 0 along a line. */
static double segment_weight(int64_t step) {
  const double left = 1 - (double)step / (own.segment_for * (double)set.steps);
  return left > 0 ? own.segment * left : 0;
}
/* The loss of telling which lit pixels belong to the contour of the first disc. */
static luna_tensor *segment_loss(luna_tensor *x, const luna_input *input) {
  const int64_t all = input->batch * input->n;
  int32_t *labels = (int32_t *)grow(NULL, all + 1, sizeof(int32_t));
  for (int64_t i = 0; i < all; i++) labels[i] = mark_of_token(input->tokens[i]) - OTHER;
  luna_tensor *loss = luna_cross_entropy(luna_linear_layer_forward(&model.segment, x), labels, NULL);
  return free(labels), loss;
}
/* The loss of the labels, and what a step minimises: *total. *segment: the loss of --segment, or null. It stays in the
   curve when it weighs nothing any more. */
static luna_tensor *label_loss(const batch *b, int64_t step, luna_tensor **total, luna_tensor **segment) {
  luna_tensor *x = encoded(&b->input, NULL), *loss = luna_cross_entropy(logits_of(x, &b->input), b->labels, NULL);
  *total = loss, *segment = NULL;
  if (own.segment <= 0) return loss;
  luna_keep(loss), *segment = luna_keep(segment_loss(x, &b->input));
  *total = luna_add(loss, luna_scale(*segment, (float)segment_weight(step)));
  return loss;
}

/* The pretext task [arXiv 1810.04805]: --masked of the tokens are masked, most of them by CLS, and told from the rest.
   Of pixels as numbers all that are chosen are hidden. Returns the logits [chosen,masked_classes()] of the chosen
   places, and their classes, to be freed. The same step takes the same places; null after a failure. */
static luna_tensor *masked_logits(const luna_input *input, int64_t step, int32_t **chosen, int64_t *count) {
  const int64_t all = input->batch * input->n, flat[3] = { 1, all, set.dim };
  int32_t *masked = (int32_t *)grow(NULL, 3 * all, sizeof(int32_t)), *labels = masked + all, *places = labels + all;
  memset(masked, 0, (size_t)(3 * all) * sizeof(int32_t));
  const luna_masking masking = { .mask = (int32_t)data.task->symbols, .probability = (float)own.masked,
                                 .seed = (uint64_t)set.seed, .step = (uint64_t)step };
  luna_input hidden = *input;
  luna_mask_tokens(input, &masking, masked, labels);
  if (!own.pixels) hidden.tokens = masked;
  for (int64_t i = 0; i < all && own.pixels; i++)
    labels[i] = labels[i] == masking.mask ? -1 : class_of_gray(labels[i]);
  luna_tensor *x = luna_reshape(encoded(&hidden, labels), 3, flat);
  *count = 0;
  for (int64_t i = 0; i < all; i++)
    if (labels[i] >= 0) places[*count] = (int32_t)i, labels[(*count)++] = labels[i];
  if (*count == 0) places[0] = 0, labels[0] = own.pixels ? 0 : input->tokens[0], *count = 1;
  x = luna_embedding(luna_reshape(x, 2, flat + 1), places, 1, *count);
  x = luna_reshape(luna_linear_layer_forward(&model.out, x), 2, (int64_t[]){ *count, masked_classes() });
  *chosen = (int32_t *)memcpy(masked, labels, (size_t)*count * sizeof(int32_t));
  return x;
}
static luna_tensor *masked_loss(const luna_input *input, int64_t step) {
  int32_t *chosen;
  int64_t count;
  luna_tensor *x = masked_logits(input, step, &chosen, &count), *loss = luna_cross_entropy(x, chosen, NULL);
  return free(chosen), loss;
}
/* The share of the masked tokens of `count` held samples that are found, and their mean loss; negative on failure. */
static double masked_found(luna_ctx *ctx, const samples *s, int64_t count, double *loss) {
  double right = 0, all = 0;
  *loss = 0;
  for (int64_t at = 0; at < count; at += set.batch) {
    const batch b = batch_at(s, s->training, count, at);
    int32_t *chosen;
    int64_t places;
    begin_look(ctx, b.input);
    luna_tensor *x = masked_logits(&b.input, -1 - at, &chosen, &places);
    int32_t *best = (int32_t *)grow(NULL, places + 1, sizeof(int32_t));
    *loss += (double)places * loss_over_ranks(luna_cross_entropy(x, chosen, NULL));
    const bool good = luna_argmax(x, best) == LUNA_OK && isfinite(*loss);
    for (int64_t i = 0; i < places; i++) right += best[i] == chosen[i];
    all += (double)places;
    free(chosen), free(best);
    if (!good) return -1;
  }
  return all > 0 ? (*loss /= all, right / all) : -1;
}
/* Of the samples held the first half chooses the model; the rest is measured once, at the end. */
static int64_t choosing(const samples *s) { return pretraining ? s->held : (s->held + 1) / 2; }
/* How a model does on the first `count` held samples: the share of right answers, and the loss. */
static double measure(luna_ctx *ctx, const samples *s, int64_t count, double *loss) {
  return pretraining ? masked_found(ctx, s, count, loss) : accuracy(ctx, NULL, s, s->training, count, loss);
}

static luna_optimizer *optimizer_open(luna_params *params) {
  const bool quick = own.settings == SMALL;
  static const luna_decay decays[] = { LUNA_DECAY_INVERSE_SQRT, LUNA_DECAY_COSINE, LUNA_DECAY_CONSTANT };
  const luna_schedule schedule = { .decay = decays[own.decay],
    .warmup = own.warmup, .total = set.steps, .floor = quick ? 0.05f : 0 };
  return luna_adamw(params, &(luna_optimizer_config){ .lr = (float)set.lr, .beta2 = quick ? 0.999f : 0.98f,
    .epsilon = own.settings == LRA ? 1e-9f : 1e-8f, .weight_decay = (float)own.weight_decay, .clip = quick ? 1 : 0,
    .schedule = schedule });
}

/* ---- a run and its files ----------------------------------------------------------------------------------------- */

static struct run {
  char name[400];
  double best;                       /* accuracy, and at which step */
  int64_t best_step;
  double loss, before;               /* the sum of the losses since the curve's last row; seconds before it went on */
  int64_t losses;
  double segment;                    /* the sum of as many losses of --segment */
  double recent;                     /* the mean loss of about the last tenth of --trial */
  bool stopped;                      /* --trial ended it */
  char data[80], data_before[80];    /* task_mark(): of these samples, and of those of the training that goes on */
  const char *begun;                 /* "yes": with --begin, or "" */
} run = { .best = -1, .begun = "" };
static progress bar;

static path run_file(const char *ending) {
  path out;
  snprintf(out.text, sizeof out.text, "%s.%s", run.name, ending);
  return out;
}
static int cannot_write(path file) { return fail("cannot write %s: %s", file.text, strerror(errno)); }

static phrase title(void) {
  phrase out;
  const char *kind = attention_kinds[set.attention].title;
  snprintf(out.text, sizeof out.text, set.attention == LUNA ? "%s-%lld" : "%s", kind, (long long)set.memory);
  return out;
}

/* The name of a run without --out: "listops-luna16-1", "pathfinder-easy-quick-performer-2". */
static void default_name(void) {
  const flag *const parts[] = { flag_of(&own.difficulty), flag_of(&own.settings), flag_of(&set.attention) };
  size_t size = (size_t)snprintf(run.name, sizeof run.name, "%s%s", data.task->name, pretraining ? "-pretrained" : "");
  for (int i = 0; i < 3; i++) {
    char value[40];
    flag_text(parts[i], value, sizeof value);
    if (i == 0 ? data.task != &tasks[PATHFINDER] : i == 1 && own.settings == AUTHORS) continue;
    size += (size_t)snprintf(run.name + size, sizeof run.name - size, "-%s", value);
  }
  if (set.attention == LUNA) size += (size_t)snprintf(run.name + size, sizeof run.name - size, "%d", (int)set.memory);
  snprintf(run.name + size, sizeof run.name - size, "-%lld", (long long)set.seed);
}

static void cut_ending(const char *ending) {               /* of the run's name, if it has that one */
  const size_t size = strlen(run.name), last = strlen(ending);
  if (size > last && strcmp(run.name + size - last, ending) == 0) run.name[size - last] = 0;
}
/* RUN is --out, else that of the training that goes on, else the default; of several seeds with "-SEED" at its end.
   before: the name of the run before, whose seed is one less, or null. None of its files may be one that is read. */
static int name_run(const char *before) {
  static const char *const endings[] = { "safetensors", "training", "csv", "txt" };
  const bool numbered = before || (own.seeds && set.out);
  const struct { const char *name, *file; } others[] = { { "--data", own.data }, { "--valid", own.valid },
    { "--begin", own.begin }, { "--plot", set.plot } };
  const char *out = set.out ? set.out : set.resume;
  char seed[24];
  if (set.out && !set.out[folder_of(set.out)])
    return fail("--out '%s' names no run; it must end with a name, such as runs/luna-1", set.out);
  if (before) out = before;
  if (out && strlen(out) + sizeof seed >= sizeof run.name) return fail("%s is too long a name", out);
  if (out) strcpy(run.name, out);
  else default_name();
  if (!set.out) cut_ending(".training");
  snprintf(seed, sizeof seed, "-%lld", (long long)set.seed - 1);
  if (before) cut_ending(seed);
  snprintf(seed, sizeof seed, "-%lld", (long long)set.seed);
  if (numbered) strcat(run.name, seed);
  if (ranks.rank > 0) return 0;
  for (int i = 0; i < 4; i++) {
    const path file = run_file(endings[i]);
    for (int k = 0; k < 4; k++)
      if (others[k].file && same_file(others[k].file, file.text))
        return fail("the run's file %s is that of %s; --out gives the run another name", file.text, others[k].name);
    if (!writable(file.text)) return cannot_write(file);
  }
  return 0;
}

/* RUN.txt, anew: what lra table reads. accuracy: of the best model, on `held` samples. */
static int write_report(const luna_params *params, double accuracy, int64_t held) {
  const char *from = own.valid ? own.valid : own.data ? "the last tenth of the training data" : "generated samples";
  new_file file;
  int length = 0;
  const char *settings = name_at(SETTINGS_NAMES, own.settings, &length);
  if (ranks.rank > 0 || pretraining) return 0;             /* a table is of what models answer */
  FILE *f = file_begin(&file, run_file("txt").text);
  if (!f) return 2;
  fprintf(f, "task %s\nsystem %s\nsettings %.*s\n", data.task->name, title().text, length, settings);
  fprintf(f, "seed %lld\nsteps %lld\nof %lld\n", (long long)set.seed, (long long)bar.step, (long long)set.steps);
  fprintf(f, "batch %lld\naccuracy %.2f\nbest %lld\n", (long long)set.batch, 100 * accuracy, (long long)run.best_step);
  fprintf(f, "held %lld\nfrom %s\n", (long long)held, from);
  fprintf(f, "parameters %lld\n", (long long)luna_params_element_count(params));
  fprintf(f, "seconds %.0f\nthreads %lld\n", run.before + seconds() - bar.start, (long long)set.threads);
  fprintf(f, "instructions %s\nmodel %s%s\n", luna_isa_name(luna_isa_best()), describe().text,
          *run.begun ? ", begun with another model" : "");
  return file_end(&file);
}

/* A row of RUN.csv; share and loss: of the validation, share negative without one. */
static int write_curve(double share, double loss) {
  const path to = run_file("csv");
  FILE *f = ranks.rank > 0 ? NULL : fopen(to.text, "ab");
  if (ranks.rank > 0) return 0;
  if (!f) return cannot_write(to);
  fprintf(f, "%lld,%.6f,", (long long)bar.step, run.loss / (double)run.losses);
  if (share >= 0) fprintf(f, "%.6f,%.4f", loss, share);
  else fprintf(f, ",");
  if (own.segment > 0) fprintf(f, ",%.6f", run.segment / (double)run.losses);
  fprintf(f, "\n");
  run.loss = run.segment = 0, run.losses = 0;
  const bool fine = !ferror(f);
  return fclose(f) == 0 && fine ? 0 : cannot_write(to);
}

/* Begins the curve; of one that goes on after `step` the later rows are cut off. */
static int begin_curve(int64_t step) {
  const path to = run_file("csv");
  new_file file;
  contents old = { NULL, 0 };
  int64_t at = 0, length, keep = 0;
  const unsigned char *line;
  if (ranks.rank > 0) return 0;
  FILE *f = step ? fopen(to.text, "rb") : NULL;
  const bool there = f && fgetc(f) != EOF;
  if (f) fclose(f);
  if (there && read_file(to.text, &old)) return 2;
  while ((line = next_line(old, &at, &length)) != NULL && (keep == 0 || atoll((const char *)line) <= step))
    keep = at < old.size ? at : old.size;
  if ((f = file_begin(&file, to.text)) == NULL) return free(old.data), 2;
  if (keep) fwrite(old.data, 1, (size_t)keep, f);
  else fprintf(f, "step,loss,validation_loss,validation_accuracy%s\n", own.segment > 0 ? ",segment_loss" : "");
  free(old.data);
  return file_end(&file);
}

/* What a model must know besides its weights; going: what a training must, "" in a model that is the best. */
static bool keep_run(luna_params *params, const char *going) {
  return luna_params_set_text(params, "lra.task", data.task->name) == LUNA_OK &&
         luna_params_set_text(params, "lra.data", run.data) == LUNA_OK &&
         luna_params_set_text(params, "lra.pretraining", pretraining ? "yes" : "") == LUNA_OK &&
         luna_params_set_text(params, "lra.begun", run.begun) == LUNA_OK &&
         luna_params_set_text(params, "lra.run", going) == LUNA_OK && keep_settings(params, flags, bar.step) == LUNA_OK;
}

static int save_training(luna_ctx *ctx, const luna_optimizer *adam, luna_params *params) {
  char text[240];
  if (ranks.rank > 0) return 0;
  snprintf(text, sizeof text, "%.17g %lld %.17g %lld %.17g %.17g %.17g", run.best, (long long)run.best_step, run.loss,
           (long long)run.losses, run.before + seconds() - bar.start, run.segment, run.recent);
  return keep_run(params, text) && luna_save_training(adam, luna_path(run_file("training").text)) == LUNA_OK ?
      0 : failed(ctx);
}
static int resume_training(luna_ctx *ctx, int64_t *step) {
  long long best_step, losses;
  const luna_params *pairs = kept_pairs(ctx, set.resume);
  if (!pairs) return 2;
  const char *task = luna_params_get_text(pairs, "lra.task"), *text = luna_params_get_text(pairs, "lra.run");
  const char *format = "%lf %lld %lf %lld %lf %lf %lf";
  if (!task || !text || sscanf(text, format, &run.best, &best_step, &run.loss, &losses, &run.before, &run.segment,
                               &run.recent) != 7)
    return fail("%s holds no training of lra to resume; --save-every writes one", set.resume);
  if (strcmp(task, data.task->name) != 0) return fail("%s is a training of another task", set.resume);
  const char *words = luna_params_get_text(pairs, "lra.pretraining"), *begun = luna_params_get_text(pairs, "lra.begun");
  if ((words && *words) != pretraining)
    return fail("%s is %s, which %s resumes", set.resume, pretraining ? "a training by labels" : "a pre-training",
                pretraining ? "train" : "pretrain");
  run.begun = begun && *begun ? "yes" : "";
  run.best_step = best_step, run.losses = losses;
  const char *before = luna_params_get_text(pairs, "lra.data");
  snprintf(run.data_before, sizeof run.data_before, "%s", before ? before : "");
  return take_settings(ctx, flags, step);
}

/* ---- train ------------------------------------------------------------------------------------------------------- */

/* Measures the model and keeps it when it is the best so far. */
static int look(luna_ctx *ctx, luna_params *params, const samples *s) {
  const int64_t held = choosing(s) < QUICK ? choosing(s) : QUICK;
  double loss, since = progress_validates(), share = measure(ctx, s, held, &loss);
  if (share < 0) return failed(ctx);
  progress_validated(&bar, since, loss, "validation %.1f%%", 100 * share);
  if (share > run.best) {
    run.best = share, run.best_step = bar.step;
    if (ranks.rank == 0 && (!keep_run(params, "") || luna_save(params,
                                                               luna_path(run_file("safetensors").text)) != LUNA_OK))
      return failed(ctx);
  }
  return write_curve(share, loss) || write_report(params, run.best, held);
}

/* The loss above which a run has learnt nothing when --trial ends. */
static double trial_loss(void) {
  return own.trial_loss > 0 ? own.trial_loss : 0.98 * log((double)data.task->classes);
}
/* Whether the run ends here, as it has made --trial steps and has learnt nothing. */
static bool is_stuck(void) { return own.trial > 0 && bar.step == own.trial && run.recent > trial_loss(); }

/* What a step's samples are like. They are fetched for POOL steps at once, so that it is the same after --resume,
   whatever step that is from. */
static void use_step(const samples *s) {
  const int64_t filled = bar.step / POOL * POOL;
  data.step = filled, data.mirrored = own.mirror ? s->training : 0;
  data.shift = own.shift, data.moved = own.shift ? s->training : 0;
  data.marked = own.segment > 0 ? s->training : 0;
  data.dark = own.dark, data.dimmed = own.dark < 1 ? s->training : 0;
  data.keep = own.keep, data.thinned = own.keep < 1 ? s->training : 0;
  data.grown = own.growing > 0 ? (double)filled / (own.growing * (double)set.steps) : 1;
}
/* One step of the optimiser. Returns 0, or 2 after a sentence. */
static int make_step(luna_ctx *ctx, luna_optimizer *adam, const samples *s) {
  luna_tensor *loss, *total, *segment = NULL;
  use_step(s);
  batch b = batch_random(s, bar.step);
  if (redraw(bar.step)) return 2;
  begin_training(ctx, b.input);
  if (pretraining) loss = total = masked_loss(&b.input, bar.step);
  else loss = label_loss(&b, bar.step, &total, &segment);
  const int64_t counted = luna_counted(loss);
  if (model.choice.system && total == loss) loss = total = attentions_loss(&model.choice, total);
  else if (model.choice.system) total = attentions_loss(&model.choice, total);
  differentiate(total, counted);
  if (learn_from(adam) != LUNA_OK) return failed(ctx);
  const double value = total == loss ? learnt_loss(loss) : loss_over_ranks(loss);
  progress_step(&bar, value, (double)(b.input.batch * b.input.n * ranks.ranks));
  run.loss += value, run.losses++;
  if (segment) run.segment += loss_over_ranks(segment);
  const int64_t window = own.trial / 10 > 1 ? own.trial / 10 : 1;
  run.recent += (value - run.recent) / (double)(bar.step < window ? bar.step : window);
  return 0;
}

static int learn(luna_ctx *ctx, luna_params *params, luna_optimizer *adam, const samples *s) {
  const int64_t every = set.steps < 100 ? 1 : set.steps / 100; /* steps of a row of the curve */
  while (bar.step < set.steps && !interrupted && !(run.stopped = is_stuck())) {
    if (make_step(ctx, adam, s)) return 2;
    const bool due = bar.step % validation_period() == 0 || bar.step == set.steps;
    if (due ? look(ctx, params, s) : bar.step % every == 0 && write_curve(-1, 0)) return 2;
    if (set.save_every && bar.step % set.save_every == 0 && save_training(ctx, adam, params)) return 2;
  }
  return interrupted && bar.step ? save_training(ctx, adam, params) : 0;
}

/* Loads a model that rank 0 has written, whose values the others get from it. */
static bool load_best(luna_params *params, const char *file) {
  bool good = ranks.rank > 0 || luna_load(params, luna_path(file)) == LUNA_OK;
  for (int64_t i = 0; good && ranks.ranks > 1 && i < luna_params_tensor_count(params); i++) {
    luna_tensor *t = luna_params_at(params, i, NULL);
    const int64_t count = luna_count(t);
    float *values = (float *)grow(NULL, count, sizeof(float));
    if (ranks.rank == 0) good = luna_read(t, values) == LUNA_OK;
    else memset(values, 0, (size_t)count * sizeof(float));
    good = good && ranks.all_reduce(ranks.user, values, count, LUNA_REDUCTION_SUM_F32) &&
           luna_write(t, values) == LUNA_OK;
    free(values);
  }
  return good;
}

/* The last model and, where it is another, the best of the validations, on all samples that choose: the better one
   stays in RUN.safetensors. Of twenty validations on a few samples the best has had luck. Returns 0, or 2 after a
   sentence. */
static int keep_better(luna_ctx *ctx, luna_params *params, const samples *s, double *share, double *loss) {
  const path best = run_file("safetensors"), last = run_file("safetensors.probe");
  double best_loss, best_share = -1;
  if ((*share = measure(ctx, s, choosing(s), loss)) < 0) return failed(ctx);
  if (run.best_step == bar.step) return 0;
  if (ranks.rank == 0 && (!keep_run(params, "") || luna_save(params, luna_path(last.text)) != LUNA_OK))
    return failed(ctx);
  if (load_best(params, best.text)) best_share = measure(ctx, s, choosing(s), &best_loss);
  if (best_share < 0) return failed(ctx);
  const bool stays = best_share >= *share;
  if (stays) *share = best_share, *loss = best_loss;
  else {
    run.best_step = bar.step;
    if (!load_best(params, last.text)) return failed(ctx);
  }
  return ranks.rank > 0 || (stays ? remove(last.text) : move(last.text, best.text)) == 0 ? 0 : cannot_write(best);
}
static int finish(luna_ctx *ctx, luna_params *params, const samples *s) {
  const double took = run.before + seconds() - bar.start;
  const path best = run_file("safetensors");
  double loss, share;
  const int64_t chose = choosing(s), rest = s->held - chose;
  progress_end(&bar);
  if (run.stopped)
    return printf("%s: The run was stopped at step %lld by --trial, as its loss of %.4f is above %.4f.\n", run.name,
                  (long long)bar.step, run.recent, trial_loss()), 0;
  if (interrupted && bar.step == 0)
    return fail("the training was stopped before its first step, so no model was written");
  if (interrupted)
    say("The training was stopped at step %lld. --resume %s resumes it.", (long long)bar.step,
        run_file("training").text);
  if (run.best_step == 0)
    return printf("The training was stopped before its first validation, so no model was written.\n"), 0;
  if (keep_better(ctx, params, s, &share, &loss)) return 2;
  const double untouched = rest ? accuracy(ctx, NULL, s, s->training + chose, rest, &loss) : share;
  if (untouched < 0) return failed(ctx);
  if (write_report(params, untouched, rest ? rest : chose)) return 2;
  char unseen[100] = "";
  if (rest)
    snprintf(unseen, sizeof unseen, "; on %lld untouched ones %.2f%%, standard error %.2f", (long long)rest,
             100 * untouched, 100 * sqrt(untouched * (1 - untouched) / (double)rest));
  say("%s: Training made %lld steps in %.0f s. The model of step %lld is the best. %s %lld samples that chose it: "
      "%.2f%%%s (loss %.3f)",
      best.text, (long long)bar.step, took, (long long)run.best_step,
      pretraining ? "Masked tokens found in" : "Accuracy on",
      (long long)chose, 100 * share, unseen, loss);
  return plot(&bar, run.name);
}

static int train_on(luna_ctx *ctx, const samples *s, int64_t begin) {
  luna_params *params = luna_params_open(ctx);
  const path best = run_file("safetensors");
  if (model_open(ctx, params) || (own.pixels && !begin && fit_grays(ctx, s))) return 2;
  if (own.begin && !begin) {
    if (begin_with(ctx, params, own.begin, false)) return 2;
    run.begun = "yes";
  }
  luna_optimizer *adam = optimizer_open(params);
  if (!adam || (begin && luna_load_training(adam, luna_path(set.resume)) != LUNA_OK)) return failed(ctx);
  printf("%s, %s: The model trains on %lld samples and is validated on %lld. ", data.task->title, title().text,
         (long long)s->training, (long long)s->held);
  printf("It has %lld parameters.\n%s\n", (long long)luna_params_element_count(params), describe().text);
  if (begin) say_resumed(begin);
  fflush(stdout);
  FILE *old = run.best_step && ranks.rank == 0 ? fopen(best.text, "rb") : NULL;
  if (run.best_step && ranks.rank == 0 && !old)
    return fail("%s, the best model so far, is not there; --out must be the run's name", best.text);
  if (old) fclose(old);
  if (begin_curve(begin)) return 2;
  if (!share_training(params, adam)) return failed(ctx);
  progress_start(&bar, begin);
  return learn(ctx, params, adam, s) || finish(ctx, params, s) ? 2 : 0;
}

/* Flags that this task or command cannot use: 0, or 2 after a sentence. */
static int check_flags(void) {
  const bool pathfinder = data.task == &tasks[PATHFINDER], pictures = pathfinder || data.task == &tasks[IMAGE];
  if (own.mirror && data.task != &tasks[IMAGE]) return fail("--mirror is for image alone");
  if (own.shift && data.task != &tasks[IMAGE]) return fail("--shift is for image alone");
  if (own.pixels && !pictures) return fail("--pixels number is for image and pathfinder alone");
  if (own.segment > 0 && !pathfinder) return fail("--segment is for pathfinder alone");
  if (own.segment > 0 && !own.pixels) return fail("--segment needs --pixels number");
  if (own.positions == COORDINATES && !own.pixels) return fail("--positions coordinates needs --pixels number");
  if (own.dark < 1 && !pathfinder) return fail("--dark is for pathfinder alone");
  if (own.keep < 1 && data.task != &tasks[IMAGE]) return fail("--keep is for image alone");
  if (own.keep < 1 && own.positions != COORDINATES) return fail("--keep needs --positions coordinates");
  if (own.dark < 1 && own.positions != COORDINATES) return fail("--dark needs --positions coordinates");
  if (!pretraining && (given(&own.masked) || given(&own.grays))) return fail("--masked and --grays are for pretrain");
  if (pretraining && given(&own.grays) && !own.pixels) return fail("--grays needs --pixels number");
  return 0;
}

/* --seeds, or --seed alone: 0, or 2 after a sentence. A training that goes on has one of them, and those before it are
   done. */
static int seeds_of(int64_t *last) {
  long long from, to;
  char rest;
  *last = set.seed;
  if (!own.seeds) return 0;
  if (sscanf(own.seeds, "%lld-%lld%c", &from, &to, &rest) != 2 || from < 0 || to < from || to - from > 999)
    return fail("--seeds takes FIRST-LAST, such as 1-4, of at most 1000 seeds, not '%s'", own.seeds);
  if (!set.resume && given(&set.seed)) return fail("--seed and --seeds exclude each other; leave one of them out");
  if (set.plot) return fail("--plot draws one run; leave --seeds out");
  if (set.resume && (set.seed < from || set.seed > to))
    return fail("%s has the seed %lld, which is none of --seeds", set.resume, (long long)set.seed);
  if (!set.resume) set.seed = from;
  return *last = to, 0;
}

/* A run in a context of its own, which has its seed. begin: the step that it goes on from, 0 if it is new. */
static int train_seed(luna_ctx *ctx, const samples *s, int64_t begin) {
  int status = batch_open(s);
  if (!status) status = train_on(ctx, s, begin);
  return batch_close(), model_close(), status;
}
/* The seeds after the first one up to `last`, each as a command of its own would train it. */
static int train_seeds(const samples *s, int64_t last) {
  int status = 0;
  while (!status && !interrupted && set.seed < last) {
    set.seed++;
    const struct run before = run;
    memset(&run, 0, sizeof run), memset(&bar, 0, sizeof bar), memset(&model, 0, sizeof model);
    run.best = -1, run.begun = "";
    memcpy(run.data, before.data, sizeof run.data);
    if (name_run(before.name)) return 2;
    luna_ctx *ctx = open_context();
    status = ctx ? train_seed(ctx, s, 0) : 2;
    luna_close(ctx);
  }
  return status;
}

static int train(luna_ctx *ctx, const char **words) {
  samples s;
  int64_t begin = 0, last;
  if (task_find(words[0]) || (set.resume && resume_training(ctx, &begin)) || check_flags() || seeds_of(&last)) return 2;
  if (!set.resume) choose_settings();
  if (name_run(NULL)) return 2;
  const bool done = begin == set.steps;
  if (done) training_finished();
  if (done && set.seed == last) return 0;
  use_data_flags();
  int status = task_open(&s, own.data, own.valid, false);
  s.logits = logits;
  if (!status) task_mark(&s, run.data, sizeof run.data);
  if (!status && set.resume && strcmp(run.data, run.data_before) != 0)
    status = fail("%s began with other samples; --data and --valid must be those of then", set.resume);
  if (!status && !done) {
    luna_ctx *seeded = own.seeds && !set.resume ? open_context() : ctx;
    status = seeded ? train_seed(seeded, &s, begin) : 2;
    if (seeded != ctx) luna_close(seeded);
  }
  if (!status) status = train_seeds(&s, last);
  return task_close(), status;
}

static int pretrain(luna_ctx *ctx, const char **words) {
  pretraining = true;
  return train(ctx, words);
}

/* ---- eval, table ------------------------------------------------------------------------------------------------- */

/* Opens the model of a file that train wrote, in `params`, and, unless `s` is null, the samples that test it. Returns
   0, or 2 after a sentence. Close the samples, the batch and the model by close_kept() either way. */
static int open_kept(luna_ctx *ctx, luna_params *params, const char *file, samples *s) {
  const luna_params *pairs = kept_pairs(ctx, file);
  const char *task = pairs ? luna_params_get_text(pairs, "lra.task") : NULL;
  if (!pairs) return 2;
  if (!task) return fail("%s is not a model that lra made", file);
  const char *masked = luna_params_get_text(pairs, "lra.pretraining");
  if (masked && *masked)
    return fail("%s is a pre-trained model and has no classes yet; lra train --begin takes it", file);
  const int64_t seed = own.data_seed, difficulty = own.difficulty;
  const bool other_seed = given(&own.data_seed), other_difficulty = given(&own.difficulty);
  flags_given = 0;                                         /* they are of what is measured, not of the training */
  if (task_find(task) || set_kept_flags(pairs, flags, file)) return 2;
  const char *begun = luna_params_get_text(pairs, "lra.begun"), *before = luna_params_get_text(pairs, "lra.data");
  run.begun = begun && *begun ? "yes" : "";
  snprintf(run.data, sizeof run.data, "%s", before ? before : "");
  if (other_seed) own.data_seed = seed;
  if (other_difficulty) own.difficulty = difficulty;
  use_data_flags();
  int status = s ? task_open(s, own.data, NULL, true) : 0;
  if (!status) status = model_open(ctx, params);
  if (!status && luna_load(params, luna_path(file)) != LUNA_OK) status = failed(ctx);
  if (status || !s) return status;
  s->logits = logits;
  return batch_open(s);
}
static void close_kept(void) { batch_close(), model_close(), task_close(); }

static int eval(luna_ctx *ctx, const char **words) {
  samples s;
  double loss, share = -1;
  int status = open_kept(ctx, luna_params_open(ctx), words[0], &s);
  if (!status && (share = accuracy(ctx, NULL, &s, 0, s.held, &loss)) < 0) status = failed(ctx);
  if (!status)
    say("%s: %s. Accuracy on %lld samples of %s: %.2f%% (loss %.3f)", words[0], data.task->title,
        (long long)s.held, s.title, 100 * share, loss);
  return close_kept(), status;
}

/* Writes a model's matrices in 8 bits, with what else its file says. */
static int quantize(luna_ctx *ctx, const char **words) {
  luna_params *params = luna_params_open(ctx);
  int status = own.int8 ? open_kept(ctx, params, words[0], NULL) : fail("quantize needs --out FILE");
  if (!status && (!keep_run(params, "") || luna_save_int8(params, luna_path(own.int8)) != LUNA_OK))
    status = failed(ctx);
  return close_kept(), status;
}

/* ---- draw -------------------------------------------------------------------------------------------------------- */

/* Reads a tensor's values, to be freed; null on failure. */
static float *values_of(luna_tensor *t) {
  float *values = t ? (float *)grow(NULL, luna_count(t), sizeof(float)) : NULL;
  if (!t || luna_read(t, values) != LUNA_OK) return free(values), (float *)NULL;
  return values;
}
/* The mean over the heads of weights [heads,slots,n], in place: [slots,n]. */
static void mean_of_heads(float *weights, int64_t heads, int64_t count) {
  for (int64_t h = 1; h < heads; h++)
    for (int64_t i = 0; i < count; i++) weights[i] += weights[h * count + i];
  for (int64_t i = 0; i < count; i++) weights[i] /= (float)heads;
}
/* Draws sample --sample. tokens: room for [longest]. */
static int draw_sample(luna_ctx *ctx, const samples *s, int32_t *tokens) {
  int32_t length;
  const int32_t label = s->fetch(own.sample, tokens, &length);
  luna_input input = { tokens, &length, 1, length, NULL };
  luna_tensor *pack, *unpack;
  float grays[PIXELS], contour[PIXELS], found[PIXELS], *features;
  char answer[80];
  const luna_encoder *e = &model.encoder;
  if (own.layer > e->config.layers)
    return fail("the model has %lld layers and no layer %lld", (long long)e->config.layers, (long long)own.layer);
  if (length != 1 + PIXELS)
    return fail("the model reads %d of a picture's %d pixels, and draw needs all", (int)length - 1, (int)PIXELS);
  luna_begin_inference(ctx);
  pool.n = length;
  luna_tensor *x = luna_keep(encoded(&input, NULL));
  float *shares = values_of(luna_softmax(logits_of(x, &input), NULL));
  float *marks = own.segment > 0 ? values_of(luna_softmax(luna_linear_layer_forward(&model.segment, x), NULL)) : NULL;
  input.features = features = own.pixels ? features_of(&input, NULL) : NULL;
  float *weights = slot_weights(e, &input, own.layer, &pack, &unpack) ? values_of(pack) : NULL;
  if (shares && weights) {
    const int64_t slots = pack->shape[2];
    mean_of_heads(weights, pack->shape[1], slots * length);
    for (int i = 0; i < PIXELS; i++) {
      grays[i] = (float)gray_of_token(tokens[1 + i]);
      contour[i] = mark_of_token(tokens[1 + i]) == CONTOUR;
      found[i] = marks && mark_of_token(tokens[1 + i]) != DARK ? marks[2 * (1 + i) + 1] : 0;
    }
    snprintf(answer, sizeof answer, "label %d, to which the model gives %.0f%%", (int)label,
             100 * (double)shares[label]);
    new_file file;
    FILE *to = file_begin(&file, set.plot);
    const slot_picture drawn = { grays, marks ? contour : NULL, found, weights, slots, own.layer, e->config.layers,
                                   answer };
    if (to) draw_slots(to, &drawn);
    const int status = to ? file_end(&file) : 2;
    return free(features), free(shares), free(marks), free(weights), status;
  }
  return free(features), free(shares), free(marks), free(weights), failed(ctx);
}
static int draw_command(luna_ctx *ctx, const char **words) {
  samples s;
  const char *plot = set.plot ? set.plot : "slots.svg";
  const int64_t sample = own.sample, layer = own.layer;
  int status = open_kept(ctx, luna_params_open(ctx), words[0], &s);
  set.plot = plot, own.sample = sample, own.layer = layer;
  if (!status && data.task - tasks < IMAGE) status = fail("%s does not look at pictures", words[0]);
  if (!status && set.attention != LUNA) status = fail("%s has no memory slots", words[0]);
  if (!status && own.sample >= s.held)
    status = fail("there are %lld samples, from 0, and no sample %lld", (long long)s.held, (long long)own.sample);
  int32_t *tokens = (int32_t *)grow(NULL, own.longest, sizeof(int32_t));
  data.marked = !status && own.segment > 0 ? s.held : 0;
  if (!status) status = draw_sample(ctx, &s, tokens);
  return free(tokens), close_kept(), status;
}

static int table_command(luna_ctx *ctx, const char **words) { return (void)ctx, print_folder(words[0], own.svg); }

/* ---- show -------------------------------------------------------------------------------------------------------- */

static void print_image(const int32_t *pixels) {
  for (int y = 0; y < SIDE; y++) {
    for (int x = 0; x < SIDE; x++) {
      const char shade = " .:-=+*#%@"[gray_of_token(pixels[y * SIDE + x]) * 10 / 256];
      printf("%c%c", shade, shade);
    }
    printf("\n");
  }
}

/* In SVG: eight pictures a row, four times as large. */
static void draw_image(FILE *to, int64_t index, const int32_t *pixels, int32_t label) {
  const int left = (int)(index % 8) * 140 + 6, top = (int)(index / 8) * 154 + 6;
  for (int i = 0; i < PIXELS; i++) {
    const unsigned gray = (unsigned)gray_of_token(pixels[i]);
    fprintf(to, "<rect x='%d' y='%d' width='4' height='4' fill='#%02x%02x%02x'/>", left + i % SIDE * 4,
            top + i / SIDE * 4, gray, gray, gray);
  }
  fprintf(to, "\n<text x='%d' y='%d'>label %d</text>\n", left, top + 141, (int)label);
}

/* What ListOps' rules say, counted, and whether each answer is its list's value. */
static void print_lists(const samples *s) {
  const int64_t all = s->training + s->held, count = all < 10000 ? all : 10000;
  int32_t *tokens = (int32_t *)grow(NULL, s->longest, sizeof(int32_t)), length;
  int64_t shortest = INT64_MAX, longest = 0, sum = 0, depth, args, deepest = 0, members = 0, right = 0;
  int64_t kinds[SYMBOLS + 1] = { 0 }, answers[10] = { 0 };
  for (int64_t i = 0; i < count; i++) {
    const int32_t answer = s->fetch(i, tokens, &length);
    const int64_t n = length - 1;
    right += list_value(tokens + 1, n, &depth, &args) == answer;
    answers[answer]++, sum += n;
    shortest = n < shortest ? n : shortest, longest = n > longest ? n : longest;
    deepest = depth > deepest ? depth : deepest, members = args > members ? args : members;
    for (int32_t k = 1; k < length; k++) kinds[tokens[k]]++;
  }
  free(tokens);
  const double operators = fmax(1, (double)kinds[END]);
  printf("Of %lld lists %lld have the right answer.\n", (long long)count, (long long)right);
  printf("tokens: %lld to %lld, mean %.1f\n", (long long)shortest, (long long)longest, (double)sum / (double)count);
  printf("depth: at most %lld; members: at most %lld\noperators:", (long long)deepest, (long long)members);
  for (int k = MIN; k <= SM; k++) printf(" %s %.1f%%", symbols[k] + 1, 100 * (double)kinds[k] / operators);
  printf("; of all tokens %.2f%%\nanswers:", 100 * (double)kinds[END] / (double)sum);
  for (int k = 0; k < 10; k++) printf(" %d %.1f%%", k, 100 * (double)answers[k] / (double)count);
  printf("\n");
}

/* What the places of the discs tell, without a look at the contours: how far they are from each other and from the
   middle. Of `half` pictures it is counted, and guessed for as many others. */
static void print_pictures(void) {
  enum { half = 4000, parts = 24 };
  static int32_t counts[parts][parts][parts][2];
  static picture p;
  const double middle = (SIDE - 1) / 2.0;
  pathfinder_level level = pathfinder_levels[own.difficulty];
  int64_t right = 0;
  level.distractors = 0;             /* they are drawn last, and move no disc */
  for (int64_t i = 0; i < 2 * half; i++) {
    draw_picture(&p, level, (uint64_t)i);
    const point a = p.disc[0], b = p.disc[1];
    const double from_a = hypot(a.y - middle, a.x - middle), from_b = hypot(b.y - middle, b.x - middle);
    int32_t *seen = counts[(int)(hypot(a.y - b.y, a.x - b.x) / 2)][(int)(fmin(from_a, from_b) / 3)]
                          [(int)(fmax(from_a, from_b) / 3)];
    if (i < half) seen[p.label]++;
    else right += (seen[1] > seen[0]) == p.label;
  }
  const double share = (double)right / half;
  printf("The places of the discs alone tell the answer of %.1f%% of %d pictures.\n", 100 * share, half);
}

static void show_sample(const int32_t *tokens, int64_t n) {
  for (int64_t k = 0; k < n; k++) {
    if (data.task == &tasks[LISTOPS]) printf("%s ", symbols[tokens[k]]);
    else putchar(tokens[k] >= 32 && tokens[k] < 127 ? tokens[k] : '?');
  }
  printf("\n");
}

static int show(luna_ctx *ctx, const char **words) {
  samples s;
  new_file file;
  FILE *to = NULL;
  (void)ctx;
  if (task_find(words[0])) return 2;
  const bool pictures = data.task - tasks >= IMAGE;
  own.longest = 4002;
  use_data_flags();
  if (own.svg && !pictures) return fail("--plot draws image and pathfinder alone");
  int status = task_open(&s, own.data, NULL, false);
  if (!status && own.svg && (to = file_begin(&file, own.svg)) == NULL) status = 2;
  if (to) fprintf(to, "<svg xmlns='http://www.w3.org/2000/svg' width='1126' height='%d' font-family='sans-serif' "
                  "font-size='12' shape-rendering='crispEdges'>\n", (int)((own.count + 7) / 8 * 154 + 10));
  int32_t *tokens = (int32_t *)grow(NULL, own.longest * 2, sizeof(int32_t)), lengths[2];
  for (int64_t i = 0; !status && i < own.count && i < s.training + s.held; i++) {
    const int32_t label = s.fetch(i, tokens, lengths);
    printf("sample %lld, label %d:\n", (long long)i, (int)label);
    if (pictures) print_image(tokens + 1);
    else for (int64_t p = 0; p < s.parts; p++) show_sample(tokens + p * own.longest + 1, lengths[p] - 1);
    if (to) draw_image(to, i, tokens + 1, label);
  }
  free(tokens);
  if (!status && data.task == &tasks[LISTOPS]) print_lists(&s);
  if (!status && data.task == &tasks[PATHFINDER]) print_pictures();
  if (to) fprintf(to, "</svg>\n");
  if (to) status = file_end(&file);
  return task_close(), status;
}

#define TASK_WORD "task: It is listops, text, retrieval, image or pathfinder."
#define MODEL_FILE "model: A file RUN.safetensors that train wrote."
#define RUNS_FOLDER "folder: It has runs that train wrote."
static const command commands[] = {
  { "train", { TASK_WORD }, "Trains a model on a task and writes a run.", train,
    "listops --settings quick --out runs/luna-1" },
  { "pretrain", { TASK_WORD }, "Trains a model to fill in a task's masked samples, for train --begin.", pretrain,
    "text --settings quick --data imdb.tsv --out runs/masked-1" },
  { "eval", { MODEL_FILE }, "Measures the accuracy on a file or on generated samples.", eval,
    "runs/luna-1.safetensors --data test.tsv" },
  { "quantize", { MODEL_FILE }, "Stores a model's matrices in 8 bits, a quarter of the bytes.", quantize,
    "runs/pathfinder-1.safetensors --out pathfinder.safetensors" },
  { "draw", { MODEL_FILE }, "Draws where the memory slots look in a picture.", draw_command,
    "runs/pathfinder-1.safetensors --sample 3 --plot slots.svg" },
  { "table", { RUNS_FOLDER }, "Prints a folder's runs as Markdown, beside the paper's Table 1.", table_command,
    "runs --plot runs.svg" },
  { "show", { TASK_WORD }, "Shows a few samples of a task.", show, "pathfinder --count 3 --plot samples.svg" },
  { 0 }
};

int main(int count, char **given) { return example("lra", commands, flags, count, given); }
