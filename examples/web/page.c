/* page.c: what examples/web/page.html asks of luna.h, as WebAssembly. examples/web/build.sh compiles it with clang and
   puts it into the page; examples/web/engine.js calls it, in workers and under node. An instance belongs to one worker:
   it has one text and one language model in training, one detector, and arrays for measuring. It imports the clock of
   WASI, for luna_trace, and page_write, which takes the bytes of a checkpoint. What fails returns 0, or NaN in place of
   a number, with a sentence in page_error(), and leaves what was there before. */
#define LUNA_IMPLEMENTATION
#define LUNA_NO_STDIO
#define LUNA_NO_THREADS
#include "luna.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#ifdef __wasm__
#define EXPORT(name) __attribute__((export_name(#name))) name
#define IMPORT(name) __attribute__((import_module("page"), import_name(name)))
#else                                /* tests compare with the same in machine code */
#define EXPORT(name) name
#define IMPORT(name)
#endif
#ifndef PAGE_ISA
#define PAGE_ISA LUNA_ISA_BEST
#endif
#define LENGTH(array) ((int)(sizeof(array) / sizeof(array)[0]))

IMPORT("write") extern void page_write(const void *bytes, size_t size);

static char sentence[1000];
const char *EXPORT(page_error)(void) { return sentence; }
static int fail(const char *why) {
  strncpy(sentence, why, sizeof sentence - 1);
  return 0;
}
static int failed(const luna_ctx *ctx) { return fail(luna_error(ctx)); }
static double no_number(void) { return (double)NAN; }

/* Of `limit` numbers one, which depends on its place alone. */
static uint32_t draw(uint64_t seed, int64_t step, int64_t row, int64_t limit) {
  const uint32_t counter[4] = { (uint32_t)step, (uint32_t)((uint64_t)step >> 32), (uint32_t)row, 7 };
  uint32_t out[4];
  luna_philox(counter, seed, out);
  return (uint32_t)((((uint64_t)out[0] << 32 | out[1]) % (uint64_t)limit));
}

/* ---- the language model ------------------------------------------------------------------------------------------ */

/* what the page chooses; a model that is loaded sets what its file says */
typedef struct settings { int32_t layers, dim, heads, memory, window, batch, softmax, seed; } settings;
typedef struct training {
  luna_ctx *ctx;
  luna_params *params;
  luna_lm model;
  luna_optimizer *adam;
  settings set;
  int32_t step;
  int32_t *tokens;                   /* [2, batch, window]: a batch and the bytes after each of its own */
} training;

static settings chosen = { 2, 128, 4, 16, 256, 4, 0, 1 };
static training lm;
/* the last tenth is never learnt from */
static struct { unsigned char *bytes; int32_t size, held; } text;

settings *EXPORT(page_settings)(void) { return &chosen; }
int EXPORT(page_step)(void) { return lm.step; }
int EXPORT(page_parameters)(void) { return lm.params ? (int)luna_params_element_count(lm.params) : 0; }
double EXPORT(page_memory)(void) { return lm.ctx ? (double)luna_memory(lm.ctx).peak : 0; }

/* bytes: by malloc, from now on the program's */
int EXPORT(page_text)(unsigned char *bytes, int32_t size) {
  if (size < 100) {
    free(bytes);
    return fail("The text is too short. The page trains on nine tenths of it and validates on the rest, for which 100 "
                "bytes are the least.");
  }
  free(text.bytes);
  text.bytes = bytes, text.size = size, text.held = size / 10;
  return 1;
}

static void close_training(training *t) {
  luna_close(t->ctx);
  free(t->tokens);
}
/* A context, a set, and memory for a batch; the model is still to come. */
static int begin_training(training *t) {
  luna_options options = { .threads = 1, .isa = PAGE_ISA, .seed = (uint64_t)chosen.seed };
  memset(t, 0, sizeof *t);
  t->set = chosen;
  if (chosen.window < 1 || chosen.window > 65536 || chosen.batch < 1 || chosen.batch > 1024)
    return fail("A window has 1 to 65536 bytes, and a batch 1 to 1024 of them.");
  t->ctx = luna_open(&options);
  t->params = luna_params_open(t->ctx);
  t->tokens = (int32_t *)malloc(2 * sizeof(int32_t) * (size_t)chosen.window * (size_t)chosen.batch);
  return (t->params && t->tokens) || fail("There is no memory for another model; a page has 2 GB at most.");
}
static luna_optimizer *optimizer(luna_params *params) {
  return luna_adamw(params, &(luna_optimizer_config){ .lr = 5e-3f, .weight_decay = 0.01f, .clip = 1 });
}

/* The logits are products of features and embeddings. A last norm of small weights makes them small at first, so that
   no byte is likelier than others. */
static luna_status start_calm(const luna_lm *model) {
  luna_tensor *weight = model->layers[model->config.layers - 1].feed_forward.norm.weight;
  float *small = (float *)malloc((size_t)luna_count(weight) * sizeof(float));
  for (int64_t i = 0; small && i < luna_count(weight); i++) small[i] = 0.1f;
  const luna_status status = small ? luna_write(weight, small) : LUNA_OUT_OF_MEMORY;
  free(small);
  return status;
}

/* A new model by the settings, in place of the one that was. */
int EXPORT(page_open)(void) {
  training t;
  const luna_lm_config config = { .layers = chosen.layers, .layer = {
      .dim = chosen.dim, .heads = chosen.heads, .memory = chosen.memory, .convolution = 4,
      .activation = LUNA_ACTIVATION_GELU, .attention = chosen.softmax ? LUNA_ATTENTION_SOFTMAX : LUNA_ATTENTION_LUNA,
      .forget = chosen.softmax ? LUNA_FORGET_NONE : LUNA_FORGET_GATED } };
  if (begin_training(&t) && (luna_lm_init(&t.model, t.params, &config) != LUNA_OK || start_calm(&t.model) != LUNA_OK ||
                             (t.adam = optimizer(t.params)) == NULL)) failed(t.ctx);
  if (!t.adam) {
    if (lm.ctx) chosen = lm.set;
    return close_training(&t), 0;
  }
  close_training(&lm);
  lm = t;
  return 1;
}

static void fill_batch(void) {
  const int64_t learnt = text.size - text.held, n = lm.set.window < learnt ? lm.set.window : learnt - 1;
  for (int32_t row = 0; row < lm.set.batch; row++) {
    const unsigned char *from = text.bytes + draw((uint64_t)lm.set.seed, lm.step, row, learnt - n);
    for (int64_t i = 0; i < n; i++) {
      lm.tokens[row * n + i] = from[i];
      lm.tokens[(lm.set.batch + row) * n + i] = from[i + 1];
    }
  }
}
/* One step, of `steps` in all: the rate rises to lr and falls as a cosine to a twentieth of it. Returns the loss. */
double EXPORT(page_train)(double lr, int32_t steps) {
  const luna_schedule schedule = { .decay = LUNA_DECAY_COSINE, .warmup = steps < 1000 ? steps / 10 : 100,
                                   .total = steps, .floor = 0.05f };
  const int64_t learnt = text.size - text.held, n = lm.set.window < learnt ? lm.set.window : learnt - 1;
  if (!lm.adam || !text.bytes) return fail("There is no model to train, or no text."), no_number();
  fill_batch();
  const luna_input input = { lm.tokens, NULL, lm.set.batch, n, NULL };
  luna_begin_step(lm.ctx);
  luna_tensor *loss = luna_lm_loss(&lm.model, &input, lm.tokens + lm.set.batch * n);
  luna_backward(loss);
  luna_optimizer_set_lr(lm.adam, (float)lr * luna_schedule_at(&schedule, lm.step + 1));
  if (luna_optimizer_step(lm.adam) != LUNA_OK) return failed(lm.ctx), no_number();
  lm.step++;
  return (double)luna_item(loss);
}

/* windows that the last tenth of the text has */
int EXPORT(page_held)(void) {
  return !lm.ctx || !text.bytes ? 0 : (text.held - 1 + lm.set.window - 1) / lm.set.window;
}
/* the mean loss of window `first` of the last tenth and of the next ones, a batch at most; *count: bytes foretold */
double EXPORT(page_validate)(int32_t first, int32_t windows, int32_t *count) {
  const unsigned char *held = text.bytes + (text.size - text.held) + (int64_t)first * lm.set.window;
  const int64_t rest = text.held - 1 - (int64_t)first * lm.set.window;
  int64_t n = lm.set.window, rows = windows < lm.set.batch ? windows : lm.set.batch;
  if (rest < 1 || windows < 1) return no_number();
  if (rows > rest / n) rows = rest / n;
  if (rows == 0) rows = 1, n = rest;
  for (int64_t i = 0; i < rows * n; i++) lm.tokens[i] = held[i], lm.tokens[rows * n + i] = held[i + 1];
  *count = (int32_t)(rows * n);
  luna_begin_inference(lm.ctx);
  const luna_input input = { lm.tokens, NULL, rows, n, NULL };
  luna_tensor *loss = luna_lm_loss(&lm.model, &input, lm.tokens + rows * n);
  return loss ? (double)luna_item(loss) : (failed(lm.ctx), no_number());
}

/* Reads the prompt and writes `count` bytes. */
int EXPORT(page_sample)(const unsigned char *prompt, int32_t size, unsigned char *out, int32_t count,
                        double temperature) {
  luna_sampling sampling = { .temperature = (float)temperature, .seed = (uint64_t)lm.step };
  if (!lm.ctx || lm.set.softmax) return fail("Only a model with Luna attention generates text here.");
  luna_stream *stream = luna_stream_open(&lm.model, NULL);
  const float *logits = NULL;
  int32_t token = 0;
  if (!stream) return failed(lm.ctx);
  for (int32_t i = 0; i < size; i++) token = prompt[i], logits = luna_stream_step(stream, &token);
  if (size == 0) token = '\n', logits = luna_stream_step(stream, &token);
  for (int32_t i = 0; i < count && (token = luna_sample(logits, 256, &sampling)) >= 0; i++) {
    out[i] = (unsigned char)token;
    logits = luna_stream_step(stream, &token);
  }
  luna_stream_close(stream);
  return token >= 0 || fail("The model's logits are not finite. Start over with a lower learning rate.");
}

/* bytes of a stream's state, whatever it has read */
int EXPORT(page_state)(void) {
  luna_stream *stream = lm.ctx && !lm.set.softmax ? luna_stream_open(&lm.model, NULL) : NULL;
  const size_t size = stream ? luna_stream_state_size(stream) : 0;
  luna_stream_close(stream);
  return (int)size;
}

/* ---- where its memory looks -------------------------------------------------------------------------------------- */

/* [1,n,d] -> [1,heads,n,d/heads] */
static luna_tensor *split(luna_tensor *x, int64_t n, int64_t heads, int64_t dim) {
  const int64_t shape[] = { 1, n, heads, dim / heads };
  const int axes[] = { 0, 2, 1, 3 };
  return luna_permute(luna_reshape(x, 4, shape), axes);
}
/* what a layer's attention reads, and its pack's scores [1,heads,n,l] */
static luna_tensor *attended(const luna_causal_layer *layer, luna_tensor *x) {
  if (layer->config.pre_norm) x = luna_norm_layer_forward(&layer->attention_norm, x);
  return layer->kernel ? luna_short_convolution(x, layer->kernel, layer->kernel_bias) : x;
}
static luna_tensor *scores_of(const luna_causal_layer *layer, luna_tensor *x, int64_t n) {
  const luna_causal_attention_layer *a = &layer->attention;
  const int64_t heads = a->config.heads, dim = a->config.dim, l = layer->memory->shape[0];
  luna_tensor *p = luna_linear_layer_forward(&a->pq, luna_expand(layer->memory, 1));
  return luna_scale(luna_matmul(split(luna_linear_layer_forward(&a->pc, x), n, heads, dim), split(p, l, heads, dim),
                                false, true), 1 / sqrtf((float)(dim / heads)));
}
/* Causal Luna attention [section 3.3] up to its two matrices: the pack A = omega(k_p pq^T), and the unpack
   W = softmax(f(q, k, A)), both [1,heads,n,l]. */
static bool look(const luna_causal_layer *layer, luna_tensor *x, int64_t n, float *out) {
  const luna_causal_attention_layer *a = &layer->attention;
  const int64_t heads = a->config.heads, l = layer->memory->shape[0];
  const int64_t by_token[] = { 1, n, heads * l }, by_slot[] = { 1, n, heads, l };
  const int axes[] = { 0, 2, 1, 3 };
  luna_tensor *pack = luna_activate(scores_of(layer, x, n),
                                    a->config.omega ? a->config.omega : LUNA_ACTIVATION_SOFTPLUS2);
  luna_tensor *u = luna_causal_product(luna_linear_layer_forward(&a->q, x), luna_linear_layer_forward(&a->k, x),
                                       luna_reshape(luna_permute(pack, axes), 3, by_token), heads);
  u = luna_reshape(luna_scale(u, 1 / sqrtf((float)(a->config.dim / heads))), 4, by_slot);
  luna_tensor *unpack = luna_softmax(luna_permute(u, axes), NULL);
  return luna_read(pack, out) == LUNA_OK && luna_read(unpack, out + luna_count(pack)) == LUNA_OK;
}

/* A slot of a memory that forgets: pack becomes the shares that the tokens have of it at the end, unpack the logits of
   the tokens' reading. scores, gates, pack and unpack are l floats apart from token to token, q and k d. A
   routed memory has no gates: its scores are luna_route's weights, and slots keep `keep` of theirs at each token. */
typedef struct slot_view {
  const float *scores, *gates, *q, *k;
  float *pack, *unpack;
  int64_t n, l, d;
  double keep;
} slot_view;
static double gated_weight(const slot_view *s, int64_t t, double weight, double *own) {
  *own = exp(fmax(-15, fmin(15, (double)s->scores[t * s->l])));
  return weight * exp(fmax(-log1p(exp(-(double)s->gates[t * s->l])) / 16, -1)) + *own;
}
static double routed_weight(const slot_view *s, int64_t t, double weight, double *own) {
  *own = (double)s->scores[t * s->l];
  return weight * (1 - *own) * s->keep + *own;
}
static void look_at_slot(const slot_view *s) {
  double weight = 0, own;
  for (int64_t t = 0; t < s->n; t++) {
    weight = (s->gates ? gated_weight : routed_weight)(s, t, weight, &own);
    const double share = own > 0 ? own / weight : 0;
    double u = 0;
    for (int64_t j = 0; j <= t; j++) {
      float *pack = s->pack + j * s->l, product = 0;
      *pack = (float)(j < t ? (double)*pack * (1 - share) : share);
      for (int64_t i = 0; i < s->d; i++) product += s->q[t * s->d + i] * s->k[j * s->d + i];
      u += (double)*pack * (double)product;
    }
    s->unpack[t * s->l] = (float)(u / sqrt((double)s->d));
    if (!s->gates) s->unpack[t * s->l] = weight < 1e-12 ? -INFINITY : s->unpack[t * s->l] + (float)log(weight);
  }
}
static bool look_forgetting(const luna_causal_layer *layer, luna_tensor *x, int64_t n, float *out) {
  const luna_causal_attention_layer *a = &layer->attention;
  const int64_t heads = a->config.heads, d = a->config.dim / heads, l = a->config.memory, all = heads * n * l;
  const bool routed = a->config.forget == LUNA_FORGET_ROUTED;
  luna_tensor *in[4] = { NULL, routed ? a->fade : split(luna_linear_layer_forward(&a->forget, x), n, heads, heads * l),
                         split(luna_linear_layer_forward(&a->q, x), n, heads, heads * d),
                         split(luna_linear_layer_forward(&a->k, x), n, heads, heads * d) };
  float *from[4] = { NULL, NULL, NULL, NULL };
  if (!routed) in[0] = scores_of(layer, x, n);
  else in[0] = split(luna_route(luna_linear_layer_forward(&a->router, x), luna_linear_layer_forward(&a->strength, x)),
                     n, heads, heads * l);
  bool good = true;
  for (int i = 0; i < 4 && good; i++) {
    from[i] = (float *)malloc((size_t)(luna_count(in[i]) + 1) * sizeof(float));
    good = from[i] && luna_read(in[i], from[i]) == LUNA_OK;
  }
  for (int64_t h = 0; good && h < heads; h++) {
    for (int64_t slot = 0; slot < l; slot++) {
      const int64_t at = h * n * l + slot;
      const double keep = routed ? exp(-0.25 / (1 + exp(-(double)from[1][h]))) : 0;
      look_at_slot(&(slot_view){ from[0] + at, routed ? NULL : from[1] + at, from[2] + h * n * d, from[3] + h * n * d,
                                 out + at, out + all + at, n, l, d, keep });
    }
    for (float *row = out + all + h * n * l; row < out + all + (h + 1) * n * l; row += l) {
      float sum = 0;
      for (int64_t slot = 0; slot < l; slot++) sum += row[slot] = expf(row[slot]);
      for (int64_t slot = 0; slot < l; slot++) row[slot] /= sum;
    }
  }
  for (int i = 0; i < 4; i++) free(from[i]);
  return good;
}
/* Both matrices of a layer, from 0, for a text: out [2,heads,n,l]. */
int EXPORT(page_look)(const unsigned char *bytes, int32_t n, int32_t layer, float *out) {
  if (!lm.ctx || lm.set.softmax) return fail("Only a model with Luna attention has a memory to look at.");
  if (lm.model.config.layer.forget == LUNA_FORGET_CONSTANT)
    return fail("This model's memory forgets at a constant rate. Only the other three forms are drawn.");
  if (n < 1 || layer < 0 || layer >= lm.model.config.layers) return fail("There is no such text or layer.");
  int32_t *tokens = (int32_t *)malloc((size_t)n * sizeof(int32_t));
  for (int32_t i = 0; tokens && i < n; i++) tokens[i] = bytes[i];
  luna_begin_inference(lm.ctx);
  luna_tensor *x = luna_embedding(lm.model.embedding, tokens, 1, n);
  for (int32_t i = 0; i < layer; i++) x = luna_causal_layer_forward(&lm.model.layers[i], x);
  const luna_causal_layer *own = &lm.model.layers[layer];
  if (x) x = attended(own, x);
  const bool good = x && (own->config.forget ? look_forgetting : look)(own, x, n, out);
  free(tokens);
  return good || failed(lm.ctx);
}

/* ---- checkpoints ------------------------------------------------------------------------------------------------- */

static bool write_part(void *user, const void *bytes, size_t size) { return page_write(bytes, size), user == NULL; }
static const char *decimal(int32_t number, char *out) { /* out: 12 bytes; number >= 0 */
  char *at = out + 11;
  for (*at = 0; number > 9; number /= 10) *--at = (char)('0' + number % 10);
  return *--at = (char)('0' + number), at;
}
/* The training, by page_write, piece by piece: a model for lm generate as well. */
int EXPORT(page_save)(void) {
  char number[12];
  luna_io io = { NULL, write_part, NULL, 0 };
  if (!lm.adam) return fail("There is no model yet.");
  luna_params_set_text(lm.params, "page.step", decimal(lm.step, number));
  luna_params_set_text(lm.params, "page.window", decimal(lm.set.window, number));
  luna_params_set_text(lm.params, "page.batch", decimal(lm.set.batch, number));
  luna_params_set_text(lm.params, "page.seed", decimal(lm.set.seed, number));
  return luna_save_training(lm.adam, luna_callbacks(&io)) == LUNA_OK || failed(lm.ctx);
}
static int32_t kept(const training *t, const char *key, int32_t least, int32_t instead) {
  const char *value = luna_params_get_text(t->params, key);
  const int32_t number = value ? (int32_t)strtol(value, NULL, 10) : instead;
  return number < least ? instead : number;
}
/* A model and, where the file has them, the optimiser's moments: without them the optimiser begins anew. */
int EXPORT(page_load)(const void *bytes, int32_t size) {
  training t;
  settings *set = &t.set;
  if (!begin_training(&t) || luna_load_model_of(LUNA_MODEL_LM, &t.model, t.params, luna_bytes(bytes,
      (size_t)size)) != LUNA_OK) {
    if (t.params) failed(t.ctx);
    return close_training(&t), 0;
  }
  const luna_lm_config *c = &t.model.config;
  if (c->vocab != 256 || c->features || c->outputs || (c->layer.attention && c->layer.attention !=
      LUNA_ATTENTION_SOFTMAX) || c->positions > LUNA_POSITIONS_NONE)
    return close_training(&t), fail("The file's model is not a model of bytes that this page or lm train made.");
  set->window = kept(&t, "page.window", 1, chosen.window), set->batch = kept(&t, "page.batch", 1, chosen.batch);
  set->seed = kept(&t, "page.seed", 0, chosen.seed), t.step = kept(&t, "page.step", 0, 0);
  if (set->window > 65536 || set->batch > 1024) set->window = chosen.window, set->batch = chosen.batch;
  set->layers = (int32_t)c->layers, set->dim = (int32_t)c->layer.dim, set->heads = (int32_t)c->layer.heads;
  set->memory = (int32_t)c->layer.memory, set->softmax = c->layer.attention == LUNA_ATTENTION_SOFTMAX;
  free(t.tokens);
  t.tokens = (int32_t *)malloc(2 * sizeof(int32_t) * (size_t)set->window * (size_t)set->batch);
  t.adam = t.tokens ? optimizer(t.params) : NULL;
  if (!t.adam) return close_training(&t), fail("There is no memory for another model; a page has 2 GB at most.");
  if (luna_load_training(t.adam, luna_bytes(bytes, (size_t)size)) != LUNA_OK) t.step = 0;
  close_training(&lm);
  lm = t, chosen = t.set;
  return 1;
}

/* ---- the time of attention itself, without projections ----------------------------------------------------------- */

#define WIDTH 64                     /* one head */
static struct { int32_t n, l; float *x, *p, *y_p, *y; void *scratch; luna_attention_args args[3]; } timed;

static luna_attention_args attention(const float *q, const float *kv, float *out, int64_t queries, int64_t keys) {
  luna_attention_args a = { .q = q, .k = kv, .v = kv, .out = out, .batch = 1, .heads = 1, .queries = queries,
                            .keys = keys, .head_dim = WIDTH };
  return a;
}
int EXPORT(page_time_open)(int32_t n, int32_t l) {
  size_t scratch = 0;
  float *floats = (float *)malloc(sizeof(float) * WIDTH * (2 * (size_t)n + 2 * (size_t)l));
  free(timed.x), free(timed.scratch);
  timed.x = floats, timed.scratch = NULL;
  if (!floats) return fail("There is no memory for so long a sequence; a page has 2 GB at most.");
  timed.p = floats + (int64_t)n * WIDTH, timed.y_p = timed.p + (int64_t)l * WIDTH;
  timed.y = timed.y_p + (int64_t)l * WIDTH;
  for (int64_t i = 0; i < ((int64_t)n + l) * WIDTH; i++) floats[i] = (float)draw(1, i, 0, 2001) / 1000 - 1;
  timed.args[0] = attention(timed.x, timed.x, timed.y, n, n);
  timed.args[1] = attention(timed.p, timed.x, timed.y_p, l, n);                        /* (3) */
  timed.args[2] = attention(timed.x, timed.y_p, timed.y, n, l);                        /* (4) */
  for (int i = 0; i < LENGTH(timed.args); i++) {
    const size_t size = luna_softmax_attention_scratch(&timed.args[i]);
    scratch = size > scratch ? size : scratch;
  }
  timed.scratch = malloc(scratch + 1);
  for (int i = 0; i < LENGTH(timed.args) && timed.scratch; i++)
    timed.args[i].run.scratch = timed.scratch, timed.args[i].run.scratch_size = scratch;
  return timed.scratch != NULL || fail("There is no memory for so long a sequence; a page has 2 GB at most.");
}
/* once softmax attention, or once Luna's two */
int EXPORT(page_time_run)(int32_t luna) {
  for (int i = luna ? 1 : 0; i < (luna ? 3 : 1); i++)
    if (!timed.scratch || luna_softmax_attention_f32(&timed.args[i]) != LUNA_OK)
      return fail("Attention could not be computed.");
  return 1;
}

/* ---- the equations on a few numbers ------------------------------------------------------------------------------ */

enum { TOKENS = 4, SLOTS = 2, DIM = 3 };
/* projections are the identity, the feed-forward is relu */
static struct equations {
  float x[TOKENS][DIM], p[SLOTS][DIM];
  float pack[SLOTS][TOKENS], y_p[SLOTS][DIM], unpack[TOKENS][SLOTS], y_x[TOKENS][DIM];
  float x_a[TOKENS][DIM], next_p[SLOTS][DIM], next_x[TOKENS][DIM];
  float z[TOKENS][SLOTS], sums[TOKENS][DIM][SLOTS], f[TOKENS][SLOTS];
} eq;
struct equations *EXPORT(page_equations)(void) { return &eq; }

static luna_tensor *weights(luna_tensor *q, luna_tensor *k) {
  return luna_softmax(luna_scale(luna_matmul(q, k, false, true), 1 / sqrtf(DIM)), NULL);
}
int EXPORT(page_follow)(void) {
  static luna_ctx *ctx;
  const int64_t x_shape[] = { 1, TOKENS, DIM }, p_shape[] = { 1, SLOTS, DIM };
  if (!ctx) ctx = luna_open(&(luna_options){ .threads = 1 });
  if (!ctx || luna_begin_inference(ctx) != LUNA_OK) return fail("There is no memory for the equations.");
  luna_tensor *x = luna_tensor_new(ctx, eq.x[0], 3, x_shape), *p = luna_tensor_new(ctx, eq.p[0], 3, p_shape);
  luna_tensor *y_p = luna_softmax_attention(p, x, x, NULL), *y_x = luna_softmax_attention(x, y_p, y_p, NULL);
  luna_tensor *x_a = luna_layer_norm(luna_add(y_x, x), NULL, NULL, 0);
  luna_tensor *z = luna_softplus2(luna_scale(luna_matmul(x, p, false, true), 1 / sqrtf(DIM)));
  luna_read(weights(p, x), eq.pack[0]), luna_read(y_p, eq.y_p[0]);
  luna_read(weights(x, y_p), eq.unpack[0]), luna_read(y_x, eq.y_x[0]), luna_read(x_a, eq.x_a[0]);
  luna_read(luna_layer_norm(luna_add(y_p, p), NULL, NULL, 0), eq.next_p[0]);
  luna_read(luna_layer_norm(luna_add(luna_relu(x_a), x_a), NULL, NULL, 0), eq.next_x[0]);
  luna_read(z, eq.z[0]), luna_read(luna_causal_product(x, x, z, 1), eq.f[0]);
  for (int t = 0; t < TOKENS; t++)
    for (int i = 0; i < DIM; i++)
      for (int j = 0; j < SLOTS; j++) eq.sums[t][i][j] = (t ? eq.sums[t - 1][i][j] : 0) + eq.x[t][i] * eq.z[t][j];
  return luna_error_status(ctx) == LUNA_OK || failed(ctx);
}

/* ---- a detector of one signal ------------------------------------------------------------------------------------ */

/* It reads the change from each number to the next. A causal memory is a mean over all that was read, in which what is
   newest weighs less and less; so the stream begins anew after each PAST numbers, from the PAST before, and what it
   reads is never longer than what it has learnt from. */
enum { WINDOW = 128, BATCH = 16, WARM = 32, PAST = 64 };
static struct {
  luna_ctx *ctx;
  luna_lm model;
  luna_optimizer *adam;
  luna_stream *stream;
  int32_t step, read;
  float newest, past[PAST];
} detector;

int EXPORT(page_detector_open)(const float *signal, int32_t n) {
  luna_ctx *ctx = luna_open(&(luna_options){ .threads = 1, .isa = PAGE_ISA, .seed = 1 });
  luna_params *params = luna_params_open(ctx);
  luna_lm model;
  const luna_lm_config config = { .features = 1, .outputs = 2,
                                  .layer = { .dim = 24, .memory = 8, .ffn = 48, .convolution = 16, .pre_norm = true } };
  float *changes = (float *)malloc((size_t)n * sizeof(float));
  const luna_input all = { .features = changes, .batch = 1, .n = n - 1 };
  for (int32_t i = 1; changes && i < n; i++) changes[i - 1] = signal[i] - signal[i - 1];
  luna_lm_init(&model, params, &config);
  luna_optimizer *adam = luna_adamw(params, &(luna_optimizer_config){ .lr = 5e-3f, .weight_decay = 0.05f, .clip = 1 });
  const bool good = adam && changes && n > 2 * WINDOW && luna_input_layer_fit(&model.input, &all) == LUNA_OK;
  free(changes);
  if (!good) {
    if (n <= 2 * WINDOW) fail("The signal is too short to train on.");
    else if (ctx) failed(ctx);
    else fail("There is no memory for a detector.");
    return luna_close(ctx), 0;
  }
  luna_stream_close(detector.stream), luna_close(detector.ctx);
  memset(&detector, 0, sizeof detector);
  detector.ctx = ctx, detector.model = model, detector.adam = adam;
  return 1;
}

static float between(int64_t row, int64_t i, double low, double high) { /* a number of this step's, anew for each i */
  return (float)(low + (high - low) * draw((uint64_t)(2 + i), detector.step, row, 1 << 24) / (1 << 24));
}
/* A window that begins anywhere in the signal: a little louder or softer, slower or faster, on a slow wave, with noise.
   The two examples are all there is to learn from, and this is what may change about them. */
static void vary(const float *signal, const int32_t *labels, int32_t n, int64_t row, float *x, int32_t *y) {
  const float pace = between(row, 0, 0.9, 1.1), gain = between(row, 1, 0.8, 1.25), wave = between(row, 2, 0, 0.3);
  const float period = between(row, 3, 5, 30), phase = between(row, 4, 0, 6.28);
  const float from = between(row, 5, 0, (double)n - 1 - (double)pace * WINDOW);
  float before = 0;
  for (int i = 0; i < WINDOW; i++) {
    const float at = from + pace * (float)i;
    const int32_t k = (int32_t)at;
    float value = gain * (signal[k] + (at - (float)k) * (signal[k + 1] - signal[k]));
    value += wave * sinf((float)i / period + phase) + between(row, 6 + i, -0.04, 0.04);
    x[i] = i ? value - before : 0;
    y[i] = i < WARM ? -1 : labels[k];
    before = value;
  }
}
/* A step, of `steps` in all; labels 1 or 0, negative: not counted. Returns the loss. */
double EXPORT(page_detector_learn)(const float *signal, const int32_t *labels, int32_t n, int32_t steps) {
  static float x[BATCH][WINDOW];
  static int32_t y[BATCH][WINDOW];
  const luna_schedule schedule = { .decay = LUNA_DECAY_COSINE, .warmup = 10, .total = steps, .floor = 0.05f };
  if (!detector.adam || n <= 2 * WINDOW) return fail("There is no detector yet."), no_number();
  for (int row = 0; row < BATCH; row++) vary(signal, labels, n, row, x[row], y[row]);
  const luna_input input = { .features = x[0], .batch = BATCH, .n = WINDOW };
  luna_begin_step(detector.ctx);
  luna_tensor *loss = luna_lm_loss(&detector.model, &input, y[0]);
  luna_backward(loss);
  luna_optimizer_set_lr(detector.adam, 5e-3f * luna_schedule_at(&schedule, ++detector.step));
  if (luna_optimizer_step(detector.adam) != LUNA_OK) return failed(detector.ctx), no_number();
  return (double)luna_item(loss);
}
/* Reads n numbers and gives the probability of a yes at each; the first call after learning begins the stream. */
int EXPORT(page_detector_read)(const float *signal, int32_t n, float *out) {
  if (!detector.ctx) return fail("There is no detector yet.");
  if (!detector.stream) detector.stream = luna_stream_open(&detector.model, NULL), detector.newest = signal[0];
  if (!detector.stream) return failed(detector.ctx);
  for (int32_t i = 0; i < n; i++) {
    float *change = &detector.past[detector.read];
    *change = signal[i] - detector.newest, detector.newest = signal[i];
    const float *y = luna_stream_step_features(detector.stream, change);
    if (!y) return fail(luna_stream_error(detector.stream));
    out[i] = 1 / (1 + expf(y[0] - y[1]));
    if (++detector.read < PAST) continue;
    luna_stream_reset(detector.stream);
    luna_stream_prefill(detector.stream, &(luna_input){ .features = detector.past, .n = PAST });
    detector.read = 0;
  }
  return 1;
}
int EXPORT(page_detector_state)(void) {
  return detector.stream ? (int)luna_stream_state_size(detector.stream) : 0;
}
