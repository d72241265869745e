/* Every door through which luna.h takes a stranger's bytes: sets, models of every kind, streams and their states,
   training. Whatever the bytes are: no crash, no allocation out of proportion to them; what is refused is refused with
   a sentence, changes no parameter and keeps no memory; what is loaded can be used, trained, streamed, saved and loaded
   again. Instruction set, form and sizes of the inputs follow from the bytes.

     fuzz_safetensors                       the corpus, tests/data/fuzz, one file after another, and some hundred
                                            mutations of the seeds; part of `make test`
     fuzz_safetensors FILE|FOLDER...        those
     fuzz_safetensors --seeds FOLDER        writes the seeds made below
     fuzz_safetensors --mutations N FIRST   so many mutations of the seeds, from number FIRST on
     make fuzz                              with libFuzzer (clang), FUZZ_LIBFUZZER defined: mutates a copy of the corpus
     make fuzz-coverage                     the lines of luna.h that this copy runs
*/
#include "test.h"
#define LUNA_IMPLEMENTATION
#include "luna.h"
#include "common.h"
#include "fuzz_files.h"
#include "examples/attentions/attentions.h"
#include <dirent.h>
#include <limits.h>

#ifdef FUZZ_LIBFUZZER
#define HOLDS(condition, ...) ((condition) ? (void)0 : (printf(__VA_ARGS__), printf("\n"), fflush(stdout), abort()))
#else
static const char *current = "";
#define HOLDS(condition, ...) (CHECK(condition, __VA_ARGS__) ? (void)0 : (void)printf("  by %s\n", current))
#endif

/* ---- what a run chooses by itself: a function of the bytes ---- */
static struct { luna_isa isa; luna_form form; uint64_t random; } chosen = {LUNA_ISA_BEST, LUNA_FORM_CHEAPEST, 0};
static void choose(const uint8_t *bytes, size_t size) {
  uint64_t r = size;
  for (size_t i = 0; i < size; i++) r = (r ^ bytes[i]) * 0x100000001B3u;
  do chosen.isa = common_isas[random_below(&r, COMMON_ISAS)];
  while (!luna_isa_available(chosen.isa));
  chosen.form = (luna_form)random_below(&r, 3), chosen.random = random_next(&r);
}
/* Of doors that parse alike, mutations take one: more of them in the same time. Half of them open a stream, the others
   use a model of any kind and take a step. */
static bool one_door;
static bool takes(int door, int doors) { return !one_door || (int)((chosen.random >> 24) % (uint64_t)doors) == door; }

/* ---- how far inputs come: an execution is one input at its doors ---- */
enum { EXECUTED, OPENED, LOADED, STREAMED, STEPPED, SAVED, STAGES };
static unsigned stages;              /* bit i: this input came to stage i */
static int64_t came_to[STAGES];
static void reached(int stage) { stages |= 1u << stage; }
static void execution_end(void) {
  reached(EXECUTED);
  for (int i = 0; i < STAGES; i++) came_to[i] += stages >> i & 1;
  stages = 0;
}
static void print_stages(void) {
  const double one = (double)came_to[EXECUTED] / 100 + 1e-9;
  printf("%.0f executions: %.1f%% open as safetensors, %.1f%% load as a model, %.1f%% give logits of a stream, "
         "%.1f%% take an optimiser's step, %.1f%% are saved and loaded again\n", (double)came_to[EXECUTED],
         (double)came_to[OPENED] / one, (double)came_to[LOADED] / one, (double)came_to[STREAMED] / one,
         (double)came_to[STEPPED] / one, (double)came_to[SAVED] / one);
}

/* ---- an allocator that knows how large the input is: no allocation may be out of proportion. An inference that needs
   a second chunk asks for one of about 8 times what is in use and touches little of it. ---- */
#define MOST_ONCE(input) (((size_t)1 << 20) + 64 * (input))
/* a slot, 8 bytes of a file at least, has a state of doubles in each of two sequences */
#define MOST_STREAM(input) (((size_t)1 << 20) + 192 * (input))
#define MOST_IN_ALL(input) (((int64_t)32 << 20) + 256 * (int64_t)(input))
typedef struct heap {
  int64_t live;
  size_t input;
} heap;
static void *heap_allocate(void *user, size_t bytes) {
  heap *h = (heap *)user;
  const bool grows = bytes <= MOST_ONCE(h->input) || bytes <= 12 * (size_t)h->live;
  const bool fits = grows && h->live + (int64_t)bytes <= MOST_IN_ALL(h->input);
  HOLDS(fits, "%.0f bytes are asked for, with %.0f in use, for an input of %.0f", (double)bytes, (double)h->live,
        (double)h->input);
  void *p = fits ? malloc(bytes) : NULL;
  if (p) h->live += (int64_t)bytes;
  return p;
}
static void heap_release(void *user, void *pointer, size_t bytes) {
  ((heap *)user)->live -= (int64_t)bytes;
  free(pointer);
}
static luna_ctx *ctx_open(heap *h, size_t input) {
  luna_options options = {0};
  h->live = 0, h->input = input;
  options.threads = 1, options.seed = 1, options.isa = chosen.isa, options.form = chosen.form;
  options.allocator.allocate = heap_allocate, options.allocator.release = heap_release, options.allocator.user = h;
  luna_ctx *ctx = luna_open(&options);
  if (!ctx) exit(2);
  return ctx;
}
static void ctx_close(luna_ctx *ctx, const heap *h) {
  luna_close(ctx);
  HOLDS(h->live == 0, "%d bytes leaked", (int)h->live);
}

/* ---- files in memory ---- */
static common_bytes saved(const luna_params *params, const luna_optimizer *optimizer) {
  common_bytes b = {NULL, 0, 0, 0};
  const luna_io io = {NULL, common_write, &b, 0};
  const luna_status status = optimizer ? luna_save_training(optimizer, luna_callbacks(&io)) : luna_save(params,
      luna_callbacks(&io));
  HOLDS(status == LUNA_OK, "what is loaded cannot be saved: %s", luna_status_text(status));
  return b;
}
static bool same_bytes(const common_bytes *a, const common_bytes *b) {
  return a->size == b->size && memcmp(a->at, b->at, a->size) == 0;
}
/* what was saved, loaded and saved again */
static bool round_trip(const common_bytes *a, const common_bytes *b) {
  if (same_bytes(a, b)) reached(SAVED);
  return same_bytes(a, b);
}

/* after a call that failed: a sentence, and as much memory as before */
static void refused(luna_ctx *ctx, const heap *h, int64_t live, const char *what) {
  HOLDS(luna_error(ctx)[0] && luna_error_status(ctx) != LUNA_OK, "%s: refused without a sentence", what);
  HOLDS(h->live == live, "%s: refused, and %d bytes stay", what, (int)(h->live - live));
  luna_begin_inference(ctx);
}

/* ---- a small set ---- */
static const int64_t square[2] = {2, 3}, short_row[1] = {4};
static luna_params *set_open(luna_ctx *ctx) {
  const luna_init normal = {LUNA_INIT_NORMAL, 1};
  luna_params *params = luna_params_open(ctx);
  if (!luna_param(params, "first", 2, square, normal) || !luna_param(params, "second", 1, short_row, normal)) exit(2);
  return params;
}
static void set_read(const luna_params *params, float out[10]) {
  memcpy(out, luna_params_find(params, "first")->data, 6 * sizeof(float));
  memcpy(out + 6, luna_params_find(params, "second")->data, 4 * sizeof(float));
}
static void set_unchanged(const luna_params *params, const float before[10], const char *what) {
  float now[10];
  set_read(params, now);
  HOLDS(memcmp(now, before, sizeof now) == 0, "%s: refused, and parameters have changed", what);
}

/* both parameters are the file's */
static void set_is(const luna_params *params, const uint8_t *bytes, size_t size, const char *what) {
  li_st st;
  li_st_tensor t;
  float now[10], values[6];
  const bool opens = !li_st_open(&st, bytes, size);
  set_read(params, now);
  for (int i = 0; i < 2; i++) {
    const bool there = opens && li_st_find(&st, i ? "second" : "first", &t) && t.count == (i ? 4 : 6) &&
        li_st_floats(&t, values);
    HOLDS(there && memcmp(values, now + (i ? 6 : 0), (size_t)t.count * sizeof(float)) == 0,
          "%s: loaded, but the file has not this %s", what, i ? "second" : "first");
  }
}

enum { COPIED, MATCHING, SET_WAYS };
static void try_set(const uint8_t *bytes, size_t size) {
  static const char *const names[SET_WAYS] = {"luna_load", "luna_load_matching"};
  for (int way = 0; way < SET_WAYS; way++) {
    if (!takes(way, SET_WAYS)) continue;
    heap h;
    float before[10];
    luna_load_report match = {0};
    luna_ctx *ctx = ctx_open(&h, size);
    luna_params *params = set_open(ctx);
    const int64_t live = h.live;
    set_read(params, before);
    const luna_status status = way == COPIED ? luna_load(params, luna_bytes(bytes, size)) :
        luna_load_matching(params, luna_bytes(bytes, size), &match);
    if (status != LUNA_OK) {
      set_unchanged(params, before, names[way]);
      refused(ctx, &h, live, names[way]);
    } else {
      common_bytes file = saved(params, NULL), again;
      luna_params *other = set_open(ctx);
      if (way == MATCHING)
        HOLDS(match.loaded > 0 && match.loaded + match.missing == 2, "%s: loaded %d, missing %d", names[way],
              (int)match.loaded, (int)match.missing);
      else set_is(params, bytes, size, names[way]);
      HOLDS(luna_load(other, luna_bytes(file.at, file.size)) == LUNA_OK,
            "%s: what was loaded and saved cannot be loaded: %s",
            names[way], luna_error(ctx));
      again = saved(other, NULL);
      HOLDS(round_trip(&file, &again), "%s: what was loaded and saved comes back as something else", names[way]);
      free(file.at), free(again.at);
    }
    ctx_close(ctx, &h);
  }
}

static void see_pair(void *user, const char *key, const char *value) { *(size_t *)user += strlen(key) + strlen(value); }
static void see_tensor(void *user, const luna_file_tensor *entry) {
  float *values = common_floats(entry->count);
  if (luna_file_tensor_read(entry, values) == LUNA_OK && entry->count)
    *(size_t *)user += values[entry->count - 1] > 0;
  *(size_t *)user += strlen(entry->name) + strlen(entry->dtype);
  free(values);
}
static void try_inspection(const uint8_t *bytes, size_t size) {
  heap h;
  size_t seen = 0;
  const luna_inspection inspection = {see_pair, see_tensor, &seen};
  luna_ctx *ctx = ctx_open(&h, size);
  const int64_t live = h.live;
  if (luna_inspect(ctx, luna_bytes(bytes, size), &inspection) != LUNA_OK) refused(ctx, &h, live, "luna_inspect");
  ctx_close(ctx, &h);
}

/* ---- models ---- */
enum { TOKENS = 5 };                 /* of a sequence, at most */
static void ran(luna_ctx *ctx, const luna_tensor *result, int64_t rows, int64_t columns) {
  HOLDS(result ? luna_count(result) == rows * columns : luna_error(ctx)[0] != 0,
        "a model that was loaded gives nothing and says nothing");
}
/* two sequences, or one; of tokens, or of features */
typedef struct example {
  int32_t tokens[2 * TOKENS], lengths[2];
  float *features;
  luna_input input;
} example;
static void example_open(example *e, int64_t vocab, int64_t features, int64_t batch) {
  const int64_t n = 1 + (int64_t)(chosen.random % TOKENS), count = batch * n;
  e->lengths[0] = (int32_t)n, e->lengths[1] = (int32_t)(1 + n / 2);
  e->features = features ? common_floats(count * features) : NULL;
  for (int64_t i = 0; i < count * features; i++) e->features[i] = i % 5 == 4 ? NAN : (float)(i % 7) - 3;
  for (int64_t i = 0; i < count; i++) e->tokens[i] = (int32_t)((5 * i + 1) % (vocab ? vocab : 1));
  e->input = (luna_input){features ? NULL : e->tokens, batch > 1 ? e->lengths : NULL, batch, n, e->features};
}

static bool same_floats(const float *a, const float *b, int64_t n) { /* NaN is NaN */
  for (int64_t i = 0; i < n; i++)
    if (memcmp(a + i, b + i, sizeof *a) != 0 && (a[i] == a[i] || b[i] == b[i])) return false;
  return true;
}
/* both give the same logits, or none with a sentence */
static void logits_agree(const luna_stream *a, const luna_stream *b, const float *of_a, const float *of_b) {
  HOLDS((of_a || luna_stream_error(a)[0]) && (of_b || luna_stream_error(b)[0]), "no logits, and no sentence");
  HOLDS(!of_a == !of_b && luna_stream_position(a) == luna_stream_position(b),
        "one of two streams fails: \"%s\" and \"%s\"", luna_stream_error(a), luna_stream_error(b));
  if (of_a && of_b) HOLDS(same_floats(of_a, of_b, a->batch * li_lm_outputs(&a->model.config)), "two streams differ");
}
/* a stream of the model and one of its file: the same bits, and the state of one is the other's */
static void use_streams(luna_ctx *ctx, const luna_lm *model, const common_bytes *file) {
  const luna_stream_config config = {2, 1 + (int64_t)(chosen.random >> 8 & 1), chosen.isa,
      (int64_t)(chosen.random >> 10 & 3), chosen.random >> 12 & 1 ? LUNA_DTYPE_I8 : LUNA_DTYPE_F32};
  const char *wrong = NULL;
  example e;
  luna_stream *s = luna_stream_open(model, &config);
  const size_t need = luna_stream_size(file->at, file->size, &config, &wrong);
  HOLDS(s || luna_error(ctx)[0], "no stream, and no sentence");
  HOLDS(!s == !need, "a stream from the model or its file alone: \"%s\" and \"%s\"", luna_error(ctx), wrong);
  luna_begin_inference(ctx);
  if (!s || !need || !common_little_endian()) {
    luna_stream_close(s);
    return;
  }
  void *memory = malloc(need);
  luna_stream *other = luna_stream_open_bytes(file->at, file->size, &config, memory, need, &wrong);
  HOLDS(other != NULL, "a file that was saved does not stream: %s", wrong);
  example_open(&e, model->config.vocab, model->config.features, 2);
  luna_input input = e.input;
  input.lengths = NULL;
  logits_agree(s, other, luna_stream_prefill(s, &input), luna_stream_prefill(other, &input));
  const size_t size = luna_stream_state_size(s);
  uint8_t *state = (uint8_t *)malloc(size);
  luna_stream_state_save(s, state, size);
  luna_stream_reset(other);
  if (chosen.random >> 32 & 1)
    HOLDS(common_stream_copy(other, s) == LUNA_OK, "a stream cannot be copied: %s", luna_stream_error(other));
  else HOLDS(luna_stream_state_load(other, state, size) == LUNA_OK, "a state that was saved cannot be loaded: %s",
        luna_stream_error(other));
  if (e.features) logits_agree(s, other, luna_stream_step_features(s, e.features),
                              luna_stream_step_features(other, e.features));
  else logits_agree(s, other, luna_stream_step(s, e.tokens), luna_stream_step(other, e.tokens));
  luna_lm_state *carried = luna_lm_state_open(model, 2); /* the same state, by its other name */
  HOLDS(carried || luna_error(ctx)[0], "no state, and no sentence");
  if (carried) {
    uint8_t *again = (uint8_t *)malloc(size);
    HOLDS(luna_lm_state_load(carried, state, size) == LUNA_OK &&
          luna_lm_state_save(carried, again, size) == LUNA_OK && memcmp(state, again, size) == 0,
          "a stream's state is not a luna_lm_state: %s", luna_error(ctx));
    luna_begin_inference(ctx);
    luna_lm_state_continue(carried);
    ran(ctx, luna_lm_forward(model, &input), 2 * input.n, li_lm_outputs(&s->model.config));
    free(again);
  }
  luna_stream_close(s);
  free(state), free(memory), free(e.features);
}
static void use_lm(luna_ctx *ctx, const luna_lm *model) {
  const luna_lm_config *c = &model->config;
  example e;
  example_open(&e, c->vocab, c->features, 1);
  ran(ctx, luna_lm_forward(model, &e.input), e.input.n, c->outputs ? c->outputs : c->features ? c->features : c->vocab);
  free(e.features);
}
static luna_tensor *classes_of(const luna_classifier *model, const luna_input *input) {
  return model->config.pair ? luna_classifier_forward_pair(model, input, input) : luna_classifier_forward(model, input);
}
static void use_classifier(luna_ctx *ctx, const luna_classifier *model) {
  example e;
  example_open(&e, model->config.vocab, model->config.encoder.features, 2);
  ran(ctx, classes_of(model, &e.input), model->config.per_step ? 2 * e.input.n : 2, model->config.classes);
  free(e.features);
}
static void use_masked_lm(luna_ctx *ctx, const luna_masked_lm *model) {
  example e;
  example_open(&e, model->config.vocab, model->config.encoder.features, 2);
  ran(ctx, luna_masked_lm_forward(model, &e.input), 2 * e.input.n, model->config.vocab);
  free(e.features);
}
static void use_seq2seq(luna_ctx *ctx, const luna_seq2seq *model) {
  int32_t out[2 * TOKENS], out_lengths[2];
  luna_generate_config search = {0};
  example source, target;
  search.max_length = TOKENS, search.end = model->config.target_vocab > 1;
  example_open(&source, model->config.vocab, model->config.encoder.features, 2);
  example_open(&target, model->config.target_vocab, 0, 2);
  target.input.lengths = NULL;
  ran(ctx, luna_seq2seq_forward(model, &source.input, &target.input), 2 * target.input.n, model->config.target_vocab);
  HOLDS(luna_seq2seq_generate(model, &source.input, &search, out, out_lengths) == LUNA_OK || luna_error(ctx)[0],
        "no translation, and no sentence");
  free(source.features);
}

/* the loss of one sequence */
static luna_tensor *loss_of(const luna_model *model) {
  const luna_classifier_config *classifier = &model->classifier.config;
  const luna_seq2seq_config *seq2seq = &model->seq2seq.config;
  int32_t labels[2 * TOKENS] = {0};
  example e, target;
  luna_tensor *loss;
  if (model->kind == LUNA_MODEL_LM) {
    example_open(&e, model->lm.config.vocab, model->lm.config.features, 1);
    loss = luna_lm_loss(&model->lm, &e.input, labels);
  } else if (model->kind == LUNA_MODEL_CLASSIFIER) {
    example_open(&e, classifier->vocab, classifier->encoder.features, 1);
    loss = luna_cross_entropy(classes_of(&model->classifier, &e.input), labels, NULL);
  } else if (model->kind == LUNA_MODEL_MASKED_LM) {
    example_open(&e, model->masked_lm.config.vocab, model->masked_lm.config.encoder.features, 1);
    loss = luna_masked_lm_loss(&model->masked_lm, &e.input, labels);
  } else {
    example_open(&e, seq2seq->vocab, seq2seq->encoder.features, 1);
    example_open(&target, seq2seq->target_vocab, 0, 1);
    loss = luna_cross_entropy(luna_seq2seq_forward(&model->seq2seq, &e.input, &target.input), labels, NULL);
  }
  free(e.features);
  return loss;
}
static luna_optimizer *optimizer_open(luna_params *params, bool adam) {
  luna_optimizer_config sgd = {0};
  sgd.momentum = 0.5f;
  return adam ? luna_adamw(params, NULL) : luna_sgd(params, &sgd);
}
/* A step, from the training in the file if there is one, of a language model perhaps with a state that is carried; and
   what it comes to is saved and loaded. */
static void learn(luna_ctx *ctx, const luna_model *model, luna_params *params, const uint8_t *bytes, size_t size) {
  luna_optimizer *optimizer = optimizer_open(params, chosen.random >> 16 & 1);
  luna_lm_state *state = model->kind == LUNA_MODEL_LM && chosen.random >> 17 & 1 ? luna_lm_state_open(&model->lm, 1) :
      NULL;
  luna_begin_inference(ctx);
  HOLDS(luna_load_training(optimizer, luna_bytes(bytes, size)) == LUNA_OK || luna_error(ctx)[0],
        "no training, and no sentence");
  luna_begin_step(ctx);
  luna_lm_state_continue(state);
  luna_backward(loss_of(model));
  const bool stepped = luna_optimizer_step(optimizer) == LUNA_OK;
  HOLDS(stepped || luna_error(ctx)[0], "no step, and no sentence");
  if (stepped) reached(STEPPED);
  luna_begin_inference(ctx);
  common_bytes file = saved(params, optimizer);
  HOLDS(luna_load_training(optimizer, luna_bytes(file.at, file.size)) == LUNA_OK,
        "a training that was saved is refused: %s",
        luna_error(ctx));
  common_bytes again = saved(params, optimizer);
  HOLDS(round_trip(&file, &again), "a training that was saved and loaded is another");
  free(file.at), free(again.at);
}

static bool use_model(luna_ctx *ctx, const luna_model *model) {
  luna_begin_inference(ctx);
  if (model->kind == LUNA_MODEL_LM) use_lm(ctx, &model->lm);
  else if (model->kind == LUNA_MODEL_CLASSIFIER) use_classifier(ctx, &model->classifier);
  else if (model->kind == LUNA_MODEL_MASKED_LM) use_masked_lm(ctx, &model->masked_lm);
  else use_seq2seq(ctx, &model->seq2seq);
  return luna_begin_inference(ctx) == LUNA_OK;
}
/* -> whether a language model was loaded, or was refused for what a stream does not look at: dropouts, keys twice */
static bool try_model(const uint8_t *bytes, size_t size, bool any) {
  const char *what = any ? "luna_load_model" : "luna_load_model_of";
  heap h;
  luna_model model, other;
  luna_ctx *ctx = ctx_open(&h, size);
  luna_params *params = luna_params_open(ctx), *twice = luna_params_open(ctx);
  const int64_t live = h.live;
  const luna_status status = any ? luna_load_model(&model, params, luna_bytes(bytes, size)) :
      luna_load_model_of(LUNA_MODEL_LM, &model.lm, params, luna_bytes(bytes, size));
  const bool streams = status == LUNA_OK || strstr(luna_error(ctx), "dropout") || strstr(luna_error(ctx), "two keys");
  if (status != LUNA_OK) {
    HOLDS(luna_params_tensor_count(params) == 0 && !luna_params_get_text(params, "luna.kind"),
          "%s: refused, and %d parameters stay", what, (int)luna_params_tensor_count(params));
    refused(ctx, &h, live, what);
  } else {
    common_bytes file = saved(params, NULL);
    reached(LOADED);
    if (any) use_model(ctx, &model);
    else luna_begin_inference(ctx), use_streams(ctx, &model.lm, &file);
    HOLDS((any ? luna_load_model(&other, twice, luna_bytes(file.at, file.size)) :
           luna_load_model_of(LUNA_MODEL_LM, &other.lm, twice, luna_bytes(file.at, file.size))) == LUNA_OK,
          "%s: what was loaded and saved cannot be loaded: %s", what, luna_error(ctx));
    common_bytes again = saved(twice, NULL);
    HOLDS(round_trip(&file, &again), "%s: what was loaded and saved comes back as something else", what);
    if (any) learn(ctx, &model, params, bytes, size);
    free(file.at), free(again.at);
  }
  ctx_close(ctx, &h);
  return streams;
}

/* into a model that is there, by a callback that may fail */
typedef struct reader { const uint8_t *bytes; size_t left; } reader;
static bool reader_read(void *user, void *to, size_t size) {
  reader *r = (reader *)user;
  if (size > r->left) return false;
  memcpy(to, r->bytes, size);
  r->bytes += size, r->left -= size;
  return true;
}
static common_bytes lm_file(int which);
static common_bytes model_file(int which);
static void try_into_model(const uint8_t *bytes, size_t size) {
  static common_bytes kinds[4];            /* a file of a model of each kind: of model_file() numbers 2, 4, 6 */
  const int kind = (int)(chosen.random >> 40 & 3);
  if (!kinds[kind].at) kinds[kind] = kind == 0 ? lm_file(0) : model_file(2 * kind);
  const common_bytes seed = kinds[kind];
  heap h;
  luna_model model;
  luna_ctx *ctx = ctx_open(&h, size + seed.size);
  luna_params *params = luna_params_open(ctx);
  if (luna_load_model(&model, params, luna_bytes(seed.at, seed.size)) != LUNA_OK) exit(2);
  const int64_t live = h.live;
  reader r = {bytes, size - (size > 0 && (chosen.random >> 48) % 8 == 0)};
  const luna_io io = {reader_read, NULL, &r, size};
  const bool whole = r.left == size, good = luna_load(params, luna_callbacks(&io)) == LUNA_OK;
  HOLDS(whole || !good, "luna_load: loaded from half a file");
  if (!good) refused(ctx, &h, live, "luna_load");
  common_bytes now = saved(params, NULL);
  HOLDS(good || same_bytes(&now, &seed), "luna_load: refused, and the model has changed");
  use_model(ctx, &model);
  free(now.at);
  ctx_close(ctx, &h);
}

/* ---- streams ---- */
static void try_stream(const uint8_t *bytes, size_t size, bool is_lm) {
  const luna_stream_config config = {2, 2, chosen.isa, (int64_t)(chosen.random >> 10 & 3), LUNA_DTYPE_F32};
  const char *wrong = NULL;
  const size_t need = luna_stream_size(bytes, size, &config, &wrong);
  HOLDS(need ? wrong && !*wrong : wrong && *wrong, "luna_stream_size: %.0f bytes and \"%s\"", (double)need,
        wrong ? wrong : "null");
  HOLDS(need <= MOST_STREAM(size), "luna_stream_size: %.0f bytes for an input of %.0f", (double)need, (double)size);
  if (need == 0 || need > MOST_STREAM(size)) return;
  void *memory = malloc(need);
  luna_stream *stream = luna_stream_open_bytes(bytes, size, &config, memory, need, &wrong);
  HOLDS(stream ? !*wrong : *wrong != 0, "luna_stream_open_bytes: %s and \"%s\"", stream ? "a stream" : "no stream",
        wrong);
  HOLDS(!stream || is_lm, "a stream of what is refused as a language model");
  if (stream) {
    const int64_t vocab = stream->model.config.vocab, features = stream->model.config.features;
    const int32_t swap[2] = {1, 0};
    luna_sampling sampling = {1, 2, 1, 0};
    example e;
    example_open(&e, vocab, features, 2);
    e.input.lengths = NULL;
    const float *logits = luna_stream_prefill(stream, &e.input);
    HOLDS(logits || luna_stream_error(stream)[0], "no logits, and no sentence");
    if (logits) reached(STREAMED);
    const int64_t outputs = li_lm_outputs(&stream->model.config);
    const int32_t token = luna_sample(logits, outputs, &sampling);
    HOLDS(token >= -1 && token < outputs, "token %d of %d", (int)token, (int)outputs);
    luna_stream_reorder(stream, swap);
    if (features) luna_stream_step_features(stream, e.features);
    else luna_stream_step(stream, e.tokens);
    free(e.features);
  }
  free(memory);
}

/* a state as the stream of a model with learned positions, and of one without, takes it */
typedef struct fixed { common_bytes file; void *memory; luna_stream *stream; } fixed;
static fixed *fixed_stream(int which) {
  static fixed streams[2];
  fixed *f = &streams[which];
  if (f->stream) return f;
  const luna_stream_config config = {1, 2, LUNA_ISA_BEST, 0, LUNA_DTYPE_F32};
  const char *wrong;
  f->file = lm_file(which);
  const size_t need = luna_stream_size(f->file.at, f->file.size, &config, &wrong);
  f->memory = malloc(need);
  f->stream = luna_stream_open_bytes(f->file.at, f->file.size, &config, f->memory, need, &wrong);
  if (!f->stream) exit(2);
  return f;
}
static void try_state(const uint8_t *bytes, size_t size) {
  const int32_t tokens[2] = {0, 1};
  for (int which = 0; which < 2; which++) {
    luna_stream *stream = fixed_stream(which)->stream;
    luna_stream_reset(stream);
    luna_stream_step(stream, tokens);
    const size_t room = luna_stream_state_size(stream);
    uint8_t *before = (uint8_t *)malloc(room), *after = (uint8_t *)malloc(room);
    luna_stream_state_save(stream, before, room);
    const luna_status status = luna_stream_state_load(stream, bytes, size);
    luna_stream_state_save(stream, after, room);
    if (status == LUNA_OK) {
      HOLDS(size == room && memcmp(after, bytes, size) == 0, "a state loaded and saved is another");
      for (int i = 0; i < 2; i++)
        if (!luna_stream_prefill(stream, &(luna_input){ tokens, NULL, 0, 1 + i, NULL }))
          HOLDS(luna_stream_error(stream)[0], "no logits, and no sentence");
    } else HOLDS(luna_stream_error(stream)[0] && memcmp(before, after, room) == 0,
                 "a state is refused without a sentence, or changes the stream");
    free(before), free(after);
  }
}

/* ---- training ---- */
static luna_status train(luna_ctx *ctx, luna_params *params, luna_optimizer *optimizer) {
  luna_begin_step(ctx);
  luna_backward(luna_add(common_loss(luna_dropout(luna_params_find(params, "first"), 0.5f), 1),
                         common_loss(luna_params_find(params, "second"), 2)));
  return luna_optimizer_step(optimizer);
}
static void try_training(const uint8_t *bytes, size_t size) {
  for (int adam = 0; adam < 2; adam++) {
    if (!takes(adam, 2)) continue;
    heap h;
    luna_ctx *ctx = ctx_open(&h, size);
    luna_params *params = set_open(ctx);
    luna_optimizer *optimizer = optimizer_open(params, adam);
    train(ctx, params, optimizer);
    common_bytes before = saved(params, optimizer);
    luna_begin_inference(ctx);
    const int64_t live = h.live;
    const luna_status status = luna_load_training(optimizer, luna_bytes(bytes, size));
    if (status != LUNA_OK) refused(ctx, &h, live, "luna_load_training");
    common_bytes after = saved(params, optimizer), again;
    if (status != LUNA_OK) HOLDS(same_bytes(&before, &after), "luna_load_training: refused, and something has changed");
    else {
      HOLDS(luna_load_training(optimizer, luna_bytes(after.at, after.size)) == LUNA_OK,
            "training that was loaded and saved cannot be loaded: %s", luna_error(ctx));
      again = saved(params, optimizer);
      HOLDS(round_trip(&after, &again), "training that was loaded and saved comes back as something else");
      luna_begin_inference(ctx);
      HOLDS(train(ctx, params, optimizer) == LUNA_OK, "training that was loaded does not go on: %s", luna_error(ctx));
      reached(STEPPED);
      free(again.at);
    }
    free(before.at), free(after.at);
    ctx_close(ctx, &h);
  }
}

/* bytes: aligned as by malloc */
static void try_all(const uint8_t *bytes, size_t size) {
  li_st st;
  choose(bytes, size);
  if (!li_st_open(&st, bytes, size)) reached(OPENED);
  try_set(bytes, size);
  try_inspection(bytes, size);
  if (takes(0, 2)) try_stream(bytes, size, try_model(bytes, size, false));
  if (takes(1, 2)) try_model(bytes, size, true);
  if (takes(2, 4)) try_into_model(bytes, size);
  try_state(bytes, size);
  try_training(bytes, size);
  execution_end();
}

/* ---- seeds: small files of every kind, and of every trick ---- */
static luna_layer_config tiny_layer(void) {
  luna_layer_config layer;
  memset(&layer, 0, sizeof layer);
  layer.dim = 2, layer.heads = 2, layer.ffn = 2, layer.memory = 2;
  return layer;
}
enum { LM_LEARNED, LM_PLAIN, LM_SOFTMAX, LM_FEATURES, LM_FORGETS, LMS };
static common_bytes lm_file(int which) {
  luna_options options = {0};
  luna_lm model;
  luna_lm_config config;
  options.threads = 1;
  luna_ctx *ctx = luna_open(&options);
  luna_params *params = luna_params_open(ctx);
  memset(&config, 0, sizeof config);
  config.vocab = 3, config.layers = 1, config.max_length = 8, config.layer = tiny_layer();
  if (which == LM_LEARNED)
    config.positions = LUNA_POSITIONS_LEARNED, config.layer.convolution = 2, config.layer.pre_norm = true,
        config.layer.sharing = LUNA_SHARING_FULL;
  if (which == LM_PLAIN) config.positions = LUNA_POSITIONS_SINUSOIDAL;
  if (which == LM_SOFTMAX) config.layer.attention = LUNA_ATTENTION_SOFTMAX;
  if (which == LM_FORGETS) config.layer.forget = LUNA_FORGET_GATED, config.layer.output_gate = true,
      config.layer.horizon = 4;
  if (which == LM_FEATURES) config.vocab = 0, config.features = 3, config.outputs = 2, config.layer.convolution = 2;
  if (luna_lm_init(&model, params, &config) != LUNA_OK) exit(2);
  luna_params_set_text(params, "who", "a \"seed\"\n");
  common_bytes file = saved(params, NULL);
  luna_close(ctx);
  return file;
}
enum {
  CLASSIFIER, CLASSIFIER_LINFORMER, CLASSIFIER_STEPS, CLASSIFIER_PAIR, MASKED_LM, SEQ2SEQ, SEQ2SEQ_SHARED, MODELS
};
static common_bytes model_file(int which) {
  static attentions linformer;
  if (!linformer.system && !attentions_open(&linformer, "linformer k=2")) exit(2);
  luna_options options = {0};
  luna_encoder_config encoder;
  luna_classifier_config classifier;
  luna_masked_lm_config masked_lm;
  luna_seq2seq_config seq2seq;
  luna_model model;
  luna_status status;
  options.threads = 1;
  luna_ctx *ctx = luna_open(&options);
  luna_params *params = luna_params_open(ctx);
  memset(&encoder, 0, sizeof encoder), memset(&classifier, 0, sizeof classifier),
      memset(&masked_lm, 0, sizeof masked_lm), memset(&seq2seq, 0, sizeof seq2seq);
  encoder.layers = 1, encoder.max_length = 5;
  encoder.layer = tiny_layer(), encoder.layer.heads = 1;
  if (which == CLASSIFIER_LINFORMER)
    encoder.layer.hook = &linformer.hook, encoder.layers = 2, encoder.tied_layers = true;
  if (which == CLASSIFIER_PAIR)
    encoder.layer.own_memory = encoder.norm_embedding = encoder.layer.pre_norm = true,
        encoder.layer.sharing = LUNA_SHARING_FULL;
  if (which == MASKED_LM || which == SEQ2SEQ)
    encoder.positions = LUNA_POSITIONS_LEARNED, encoder.first_position = 1, encoder.layer.pre_norm = true;
  classifier.encoder = masked_lm.encoder = seq2seq.encoder = encoder;
  classifier.vocab = masked_lm.vocab = seq2seq.vocab = 3, classifier.classes = 2;
  if (which == CLASSIFIER_PAIR) classifier.pair = true, classifier.pre_logits = 2;
  if (which == CLASSIFIER_STEPS) classifier.vocab = 0, classifier.encoder.features = 3, classifier.per_step = true;
  if (which == SEQ2SEQ) seq2seq.target_vocab = 4, seq2seq.separate_output = true;
  if (which == SEQ2SEQ_SHARED) seq2seq.share_embeddings = true;
  if (which <= CLASSIFIER_PAIR) status = luna_classifier_init(&model.classifier, params, &classifier);
  else if (which == MASKED_LM) status = luna_masked_lm_init(&model.masked_lm, params, &masked_lm);
  else status = luna_seq2seq_init(&model.seq2seq, params, &seq2seq);
  if (status != LUNA_OK) {
    printf("seed %d: %s\n", which, luna_error(ctx));
    exit(2);
  }
  common_bytes file = saved(params, NULL);
  luna_close(ctx);
  return file;
}
static common_bytes training_file(int adam) {
  heap h;
  luna_ctx *ctx = ctx_open(&h, 0);
  luna_params *params = set_open(ctx);
  luna_optimizer *optimizer = optimizer_open(params, adam);
  train(ctx, params, optimizer), train(ctx, params, optimizer);
  luna_params_set_text(params, "data", "batch 2");
  common_bytes file = saved(params, optimizer);
  ctx_close(ctx, &h);
  return file;
}
static common_bytes carried_file(void) { /* a training of a language model whose state is carried */
  heap h;
  luna_model model;
  common_bytes file = lm_file(LM_FORGETS);
  luna_ctx *ctx = ctx_open(&h, file.size);
  luna_params *params = luna_params_open(ctx);
  if (luna_load_model(&model, params, luna_bytes(file.at, file.size)) != LUNA_OK) exit(2);
  luna_optimizer *optimizer = optimizer_open(params, true);
  luna_lm_state *state = luna_lm_state_open(&model.lm, 1);
  luna_begin_step(ctx);
  luna_lm_state_continue(state);
  luna_backward(loss_of(&model));
  luna_optimizer_step(optimizer);
  free(file.at);
  file = saved(params, optimizer);
  ctx_close(ctx, &h);
  return file;
}
static common_bytes state_file(int which) {
  const int32_t tokens[2] = {0, 1};
  luna_stream *stream = fixed_stream(which)->stream;
  common_bytes b = {NULL, 0, 0, 0};
  luna_stream_reset(stream);
  luna_stream_prefill(stream, &(luna_input){ tokens, NULL, 0, 2, NULL });
  b.size = b.room = luna_stream_state_size(stream);
  b.at = (uint8_t *)malloc(b.size);
  luna_stream_state_save(stream, b.at, b.size);
  return b;
}
/* a state that says it has seen so many tokens */
static common_bytes late_state(int which, int64_t position) {
  common_bytes b = state_file(which);
  memcpy(b.at + offsetof(li_stream_head, position), &position, sizeof position);
  return b;
}
/* a file of this header, which says it has `claim` bytes (0: as many as it has), and of data_size bytes of data */
static common_bytes forged(const char *json, uint64_t claim, size_t data_size) {
  common_bytes b = {NULL, 0, 0, 0};
  const size_t text = strlen(json), size = (text + 7) / 8 * 8;
  if (claim == 0) claim = size;
  buffer_header(&b, json, text, claim);
  for (size_t i = text; i < size; i++) common_write(&b, " ", 1);
  for (size_t i = 0; i < data_size; i++) common_write(&b, &(uint8_t){(uint8_t)(i % 4 == 3 ? 0x3F : i)}, 1);
  return b;
}
/* The file with data_offsets that fit its dtypes and shapes, in their order, and as much data; false when there would
   be too much or the header is not written as luna.h writes it. */
static bool repaired(const uint8_t *file, size_t size, size_t max, common_bytes *out) {
  static const char *const with[2] =
      {"{\"dtype\":\"%7[A-Z0-9_]\",\"shape\":[%159[0-9,]],\"data_offsets\":[%*[0-9,]]}%n",
                                      "{\"dtype\":\"%7[A-Z0-9_]\",\"shape\":[],\"data_offsets\":[%*[0-9,]]}%n"};
  const size_t header = size < 8 ? 0 : (size_t)(file[0] | file[1] << 8 | file[2] << 16);
  common_bytes text = {NULL, 0, 0, 0};
  double total = 0; /* exact, as far as it may go */
  if (size < 8 || header > size - 8) return false;
  char *copy = (char *)common_alloc(header + 1), *at = copy;
  memcpy(copy, file + 8, header);
  while (*at && total >= 0) {
    char dtype[8] = "", shape[160] = "", offsets[400];
    int used = 0, format = 0;
    if (*at == '{' && sscanf(at, with[0], dtype, shape, &used) < 2 && sscanf(at, with[1], dtype, &used) < 1) used = 0;
    if (used == 0) {
      common_write(&text, at++, 1);
      continue;
    }
    while (format < LI_ST_DTYPES && strcmp(li_st_formats[format].name, dtype) != 0) format++;
    double count = format < LI_ST_DTYPES ? li_st_formats[format].size : 1;
    for (char *number = shape; *number; number += strcspn(number, ","), number += *number == ',')
      count *= strtod(number, NULL);
    snprintf(offsets, sizeof offsets, "{\"dtype\":\"%s\",\"shape\":[%s],\"data_offsets\":[%.0f,%.0f]}", dtype, shape,
             total, total + count);
    common_write(&text, offsets, strlen(offsets));
    total = total + count <= (double)max ? total + count : -1;
    at += used;
  }
  free(copy);
  const bool fits = total >= 0 && 8 + (double)text.size + total <= (double)max;
  if (fits) buffer_header(out, (const char *)text.at, text.size, text.size);
  for (size_t i = 0; fits && i < (size_t)total; i++)
    common_write(out, i < size - 8 - header ? file + 8 + header + i : (const uint8_t *)"", 1);
  free(text.at);
  return fits;
}
/* the file with texts of its header replaced, "from", "to", ..., null, and repaired */
static common_bytes edited(common_bytes file, const char *const *edits) {
  common_bytes whole = {NULL, 0, 0, 0};
  for (; *edits; edits += 2) {
    common_bytes b = {NULL, 0, 0, 0};
    const size_t header = (size_t)(file.at[0] | file.at[1] << 8), nf = strlen(edits[0]), nt = strlen(edits[1]),
        size = header - nf + nt;
    size_t at = 8;
    while (at + nf <= 8 + header && memcmp(file.at + at, edits[0], nf) != 0) at++;
    if (at + nf > 8 + header) {
      printf("the seed has no %s\n", edits[0]);
      exit(2);
    }
    for (int i = 0; i < 8; i++) common_write(&b, &(uint8_t){(uint8_t)((uint64_t)size >> 8 * i)}, 1);
    common_write(&b, file.at + 8, at - 8);
    common_write(&b, edits[1], nt);
    common_write(&b, file.at + at + nf, file.size - at - nf);
    free(file.at);
    file = b;
  }
  if (!repaired(file.at, file.size, 1 << 20, &whole)) exit(2);
  free(file.at);
  return whole;
}
static common_bytes deep_file(void) { /* a header that nests 500 deep */
  char json[1100] = "{\"a\":";
  memset(json + strlen(json), '[', 500), memset(json + strlen(json), ']', 500);
  return forged(strcat(json, "}"), 0, 0);
}
static common_bytes cut_file(common_bytes file, size_t left_out) {
  file.size -= left_out;
  return file;
}

static common_bytes set_file(void) {
  heap h;
  luna_ctx *ctx = ctx_open(&h, 0);
  common_bytes file = saved(set_open(ctx), NULL);
  ctx_close(ctx, &h);
  return file;
}

#define T(name, dtype, shape, begin, end) \
  "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":[" shape "],\"data_offsets\":[" #begin "," #end "]}"
#define FIRST T("first", "F32", "2,3", 0, 24)
#define BOTH FIRST "," T("second", "F32", "4", 24, 40)
#define SHAPE(name, dtype, shape) name "\":{\"dtype\":\"" dtype "\",\"shape\":[" shape "]"
#define EDIT(...) ((const char *const[]){__VA_ARGS__, NULL})
/* seed number i = 0, 1, ... and its name; false when there are no more */
TEST_UNUSED static bool seed(int i, const char **name, common_bytes *out) {
#define SEED(text, ...) \
  if (i-- == 0) { \
    *name = text, *out = __VA_ARGS__; \
    return true; \
  }
  SEED("lm_learned.safetensors", lm_file(LM_LEARNED))
  SEED("lm_plain.safetensors", lm_file(LM_PLAIN))
  SEED("lm_softmax.safetensors", lm_file(LM_SOFTMAX))
  SEED("lm_features.safetensors", lm_file(LM_FEATURES))
  SEED("lm_forgets.safetensors", lm_file(LM_FORGETS))
  SEED("classifier_steps.safetensors", model_file(CLASSIFIER_STEPS))
  SEED("classifier.safetensors", model_file(CLASSIFIER))
  SEED("classifier_linformer.safetensors", model_file(CLASSIFIER_LINFORMER))
  SEED("classifier_pair.safetensors", model_file(CLASSIFIER_PAIR))
  SEED("masked_lm.safetensors", model_file(MASKED_LM))
  SEED("seq2seq.safetensors", model_file(SEQ2SEQ))
  SEED("seq2seq_shared.safetensors", model_file(SEQ2SEQ_SHARED))
  SEED("training_sgd.safetensors", training_file(0))
  SEED("training_adamw.safetensors", training_file(1))
  SEED("training_state.safetensors", carried_file())
  SEED("set.safetensors", set_file())
  SEED("set_mixed.safetensors", forged("{\"__metadata__\":{\"a\\u00e9\\ud83d\\ude00\":\"\\\"\\n\"}," T("second", "F64",
      "4", 0, 32) "," T("first", "F16", "2,3", 32, 44) "}", 0, 44))
  SEED("set_half.safetensors", forged("{" T("first", "BF16", "2,3", 8, 20) "," T("second", "F16", "4", 0, 8) "}", 0,
                                      20))
  SEED("set_partly.safetensors", forged("{" FIRST "," T("third", "I64", "1", 24, 32) "}", 0, 32))
  SEED("stream_learned.state", state_file(LM_LEARNED))
  SEED("stream_plain.state", state_file(LM_PLAIN))
  SEED("stream_past_positions.state", late_state(LM_LEARNED, 8))
  SEED("stream_end_of_time_learned.state", late_state(LM_LEARNED, INT64_MAX))
  SEED("stream_end_of_time_plain.state", late_state(LM_PLAIN, INT64_MAX))
  SEED("stream_negative.state", late_state(LM_PLAIN, -1))
  SEED("cut_header.safetensors", cut_file(forged("{" BOTH "}", 0, 40), 80))
  SEED("cut_data.safetensors", cut_file(forged("{" BOTH "}", 0, 40), 1))
  SEED("overlapping.safetensors", forged("{" FIRST "," T("second", "F32", "4", 20, 36) "}", 0, 40))
  SEED("hole.safetensors", forged("{" FIRST "," T("second", "F32", "4", 28, 44) "}", 0, 44))
  SEED("twice.safetensors", forged("{" FIRST "," T("fir\\u0073t", "F32", "2,3", 24, 48) "}", 0, 48))
  SEED("key_twice.safetensors", forged("{\"__metadata__\":{\"a\":\"b\",\"\\u0061\":\"c\"}," BOTH "}", 0, 40))
  SEED("zero_in_name.safetensors", forged("{" FIRST "," T("first\\u0000", "F32", "2,3", 24, 48) "}", 0, 48))
  SEED("escaped_pair.safetensors", forged("{\"__metadata__\":{\"\\u006cuna.kind\":\"causal_lm\"}," BOTH "}", 0, 40))
  SEED("escaped_training.safetensors", edited(training_file(1), EDIT("\"luna.step\"", "\"\\u006cuna.step\"")))
  SEED("deep.safetensors", deep_file())
  SEED("header_claim.safetensors", forged("{" BOTH "}", 99999999, 40))
  SEED("header_claim_most.safetensors", forged("{" BOTH "}", UINT64_MAX, 40))
  SEED("shape_claim.safetensors", forged("{" T("first", "F32", "4294967296,4294967296", 0, 0) "}", 0, 0))
  SEED("no_rows.safetensors", forged("{" T("first", "F32", "0,9223372036854775807", 0, 0) "," T("second", "F32", "4", 0,
      16) "}", 0, 16))
  SEED("lm_memory_claim.safetensors", edited(lm_file(LM_PLAIN),
      EDIT("\"luna.memory\":\"2\"", "\"luna.memory\":\"1048576\"", SHAPE("projected_embeddings", "F32", "2,2"),
           SHAPE("projected_embeddings", "F32", "1048576,0"))))
  SEED("lm_positions_claim.safetensors", edited(lm_file(LM_LEARNED),
      EDIT("\"luna.max_length\":\"8\"", "\"luna.max_length\":\"67108864\"",
           SHAPE("embed_positions.weight", "F32", "8,2"), SHAPE("embed_positions.weight", "F32", "67108864,0"))))
  SEED("lm_dim_claim.safetensors", edited(lm_file(LM_PLAIN),
      EDIT("\"luna.vocab\":\"3\"", "\"luna.vocab\":\"1\"", "\"luna.dim\":\"2\"", "\"luna.dim\":\"1200\"",
          "\"luna.heads\":\"2\"", "\"luna.heads\":\"1200\"", "\"luna.memory\":\"2\"", "\"luna.memory\":\"1\"",
              "\"luna.ffn\":\"2\"", "\"luna.ffn\":\"1\"", SHAPE("embed_tokens.weight", "F32", "3,2"),
                  SHAPE("embed_tokens.weight", "U8", "1,1200"), SHAPE("projected_embeddings", "F32", "2,2"),
                      SHAPE("projected_embeddings", "U8", "1,1200"), SHAPE("fc1.weight", "F32", "2,2"),
                          SHAPE("fc1.weight", "U8", "1,1200"))))
  SEED("lm_features_claim.safetensors", edited(lm_file(LM_FEATURES),
      EDIT("\"luna.features\":\"3\"", "\"luna.features\":\"1048576\"", SHAPE("input_norm.mean", "F32", "3"),
          SHAPE("input_norm.mean", "F32", "0,1048576"), SHAPE("input_norm.scale", "F32", "3"),
              SHAPE("input_norm.scale", "F32", "1048576,0"), SHAPE("input_proj.weight", "F32", "2,3"),
                  SHAPE("input_proj.weight", "F32", "0,1048576"))))
  SEED("lm_no_outputs.safetensors", edited(lm_file(LM_FEATURES),
                                           EDIT("\"luna.outputs\":\"2\"", "\"luna.outputs\":\"0\"")))
  SEED("lm_norm_claim.safetensors", edited(lm_file(LM_PLAIN),
      EDIT("\"luna.output_norm\":\"0\"", "\"luna.output_norm\":\"1\"", "\"embed_tokens.weight\"",
           T("output_norm.mean", "F32", "0", 0, 0) "," T("output_norm.scale", "F32", "0", 0, 0)
           ",       \"embed_tokens.weight\""))) /* spaces, so that values are aligned */
  SEED("lm_omega.safetensors", edited(lm_file(LM_PLAIN), EDIT("\"luna.omega\":\"5\"", "\"luna.omega\":\"2\"")))
  SEED("training_step.safetensors", edited(training_file(0),
      EDIT("\"luna.step\":\"0000000000000002\"", "\"luna.step\":\"ffffffffffffffff\"")))
#undef SEED
  return false;
}

/* ---- mutations of the seeds that are models, sets and trainings; half are of language models, which most doors take
   ---- */
enum { SEEDS = 19, MUTATED_MOST = 16384 };
static common_bytes kept_seeds[SEEDS];
static const common_bytes *kept_seed(uint64_t *r) {
  const int i = random_below(r, random_below(r, 2) ? LMS : SEEDS);
  const char *name;
  if (!kept_seeds[i].at && !seed(i, &name, &kept_seeds[i])) exit(2);
  return &kept_seeds[i];
}

#ifdef FUZZ_LIBFUZZER
/* ---- libFuzzer: an eighth of its changes go anywhere, an eighth to the header, whose offsets and sizes are then made
   to fit, a quarter to the file as a structure; and of two files it makes one. A file that is kept for new lines seldom
   loads as a model: half of the changes begin at a seed again, and a quarter of those take tensors of the file ---- */
int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);
size_t LLVMFuzzerMutate(uint8_t *bytes, size_t size, size_t max);
size_t LLVMFuzzerCustomMutator(uint8_t *bytes, size_t size, size_t max, unsigned int number);
size_t LLVMFuzzerCustomCrossOver(const uint8_t *bytes, size_t size, const uint8_t *other, size_t other_size,
                                 uint8_t *out, size_t max, unsigned int number);

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
  uint8_t *copy = (uint8_t *)malloc(size ? size : 1); /* aligned, and of its own size */
  li_st st;
  if (size) memcpy(copy, bytes, size);
  if (!one_door) atexit(print_stages);
  one_door = true;
  if (!li_st_open(&st, copy, size)) try_all(copy, size);
  else { /* all doors refuse alike what does not open */
    choose(copy, size);
    try_inspection(copy, size);
    try_state(copy, size);
    execution_end();
  }
  free(copy);
  return 0;
}

static size_t mutated(const uint8_t *bytes, size_t size, uint8_t *out, size_t max, const structure *from,
                      uint64_t random) {
  common_bytes whole = {NULL, 0, 0, 0};
  const bool good = file_mutated(bytes, size, max, from, random, &whole);
  if (good) memcpy(out, whole.at, whole.size);
  free(whole.at);
  return good ? whole.size : 0;
}
static size_t from_seed(uint8_t *bytes, size_t size, size_t max, uint64_t random) {
  static structure from;
  const common_bytes *one = kept_seed(&random);
  const bool two = random_below(&random, 4) == 0 && file_parse(&from, bytes, size);
  const size_t now = mutated(one->at, one->size, bytes, max, two ? &from : NULL, random);
  if (two) file_free(&from);
  return now;
}
size_t LLVMFuzzerCustomMutator(uint8_t *bytes, size_t size, size_t max, unsigned int number) {
  const uint64_t random = common_hash(number, size);
  const size_t header = size < 8 ? 0 : (size_t)(bytes[0] | bytes[1] << 8 | bytes[2] << 16);
  common_bytes whole = {NULL, 0, 0, 0};
  const size_t structured = random % 8 < 2 ? 0 :
      random % 8 < 4 ? mutated(bytes, size, bytes, max, NULL, random) : from_seed(bytes, size, max, random);
  if (structured) return structured;
  if (random % 8 != 1 || size < 16 || header == 0 || header > size - 8) return LLVMFuzzerMutate(bytes, size, max);
  const size_t data = size - 8 - header, room = max - 8 - data;
  char *text = (char *)common_alloc(max);
  memcpy(text, bytes + 8, header);
  const size_t now = LLVMFuzzerMutate((uint8_t *)text, header, room);
  memmove(bytes + 8 + now, bytes + 8 + header, data);
  memcpy(bytes + 8, text, now);
  for (int i = 0; i < 8; i++) bytes[i] = (uint8_t)((uint64_t)now >> 8 * i);
  free(text);
  size = 8 + now + data;
  if (random / 65536 % 4 && repaired(bytes, size, max, &whole)) {
    memcpy(bytes, whole.at, whole.size);
    size = whole.size;
  }
  free(whole.at);
  return size;
}
size_t LLVMFuzzerCustomCrossOver(const uint8_t *bytes, size_t size, const uint8_t *other, size_t other_size,
                                 uint8_t *out, size_t max, unsigned int number) {
  static structure from;
  if (!file_parse(&from, other, other_size)) return 0;
  const size_t now = mutated(bytes, size, out, max, &from, number);
  file_free(&from);
  return now;
}
#else
/* ---- the corpus, one file after another ---- */
static uint8_t *file_read(const char *path, size_t *size) {
  FILE *file = fopen(path, "rb");
  long length = -1;
  uint8_t *bytes = NULL;
  if (file && fseek(file, 0, SEEK_END) == 0) length = ftell(file);
  if (length >= 0 && length < LONG_MAX) {
    rewind(file);
    /* of its own size, so that a sanitizer sees what reads beyond */
    bytes = (uint8_t *)malloc(length ? (size_t)length : 1);
    *size = (size_t)length;
    if (bytes && fread(bytes, 1, *size, file) != *size) free(bytes), bytes = NULL;
  }
  if (file) fclose(file);
  return bytes;
}
static void replay_file(const char *path) {
  size_t size = 0;
  uint8_t *bytes = file_read(path, &size);
  current = path;
  if (CHECK(bytes != NULL, "%s cannot be read", path)) try_all(bytes, size);
  free(bytes);
}
static int by_name(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }
static void replay(const char *path) {
  enum { MAX = 8192 };
  static char *names[MAX];
  char full[600];
  int count = 0;
  struct dirent *entry;
  DIR *dir = opendir(path);
  if (!dir) {
    replay_file(path);
    return;
  }
  while ((entry = readdir(dir)) != NULL && count < MAX)
    if (entry->d_name[0] != '.')
      names[count++] = strcpy((char *)common_alloc(strlen(entry->d_name) + 1), entry->d_name);
  closedir(dir);
  qsort(names, (size_t)count, sizeof names[0], by_name);
  CHECK(count > 0, "%s has no files", path);
  for (int i = 0; i < count; i++) {
    snprintf(full, sizeof full, "%s/%s", path, names[i]);
    replay_file(full);
    free(names[i]);
  }
}
/* the seeds as they are made here, into the folder */
static void write_seeds(const char *folder) {
  char path[600];
  const char *name;
  common_bytes b;
  for (int i = 0; seed(i, &name, &b); i++) {
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "wb");
    CHECK(file && fwrite(b.at, 1, b.size, file) == b.size, "%s cannot be written", path);
    if (file) fclose(file);
    free(b.at);
  }
}
/* the corpus may be older than luna.h: the seeds as they would be made now */
static void try_seeds(void) {
  const char *name;
  common_bytes b;
  for (int i = 0; seed(i, &name, &b); i++) {
    uint8_t *bytes = (uint8_t *)malloc(b.size);
    memcpy(bytes, b.at, b.size);
    current = name;
    try_all(bytes, b.size);
    free(bytes), free(b.at);
  }
}
/* what libFuzzer would make of the seeds that are models, sets and trainings, without it: most of the models load */
static void try_mutations(int count, int first) {
  static structure from;
  common_bytes b = {NULL, 0, 0, 0};
  char text[40];
  int made = 0;
  memset(came_to, 0, sizeof came_to), one_door = true;
  for (int i = first; i < first + count; i++, b.size = 0) {
    uint64_t r = common_hash(7, (uint64_t)i);
    const common_bytes *one = kept_seed(&r), *other = kept_seed(&r);
    const bool two = random_below(&r, 4) == 0 && file_parse(&from, other->at, other->size);
    snprintf(text, sizeof text, "--mutations 1 %d", i);
    current = text;
    if (file_mutated(one->at, one->size, MUTATED_MOST, two ? &from : NULL, r, &b)) {
      made++;
      b.at = (uint8_t *)realloc(b.at, b.room = b.size); /* a sanitizer sees what reads beyond */
      try_all(b.at, b.size);
    }
    if (two) file_free(&from);
  }
  CHECK(made >= count * 9 / 10 && came_to[OPENED] == made, "of %d mutations %d are files and %d open", count, made,
        (int)came_to[OPENED]);
  for (int i = LOADED; i < STAGES; i++)
    CHECK(count < 100 || came_to[i] >= count / (i == STREAMED ? 16 : 6), "of %d mutations %d come to stage %d", count,
          (int)came_to[i], i);
  print_stages();
  for (int i = 0; i < SEEDS; i++) free(kept_seeds[i].at);
  free(b.at);
}

int main(int argc, char **argv) {
  if (argc == 3 && strcmp(argv[1], "--seeds") == 0) {
    write_seeds(argv[2]);
    return test_report("fuzz_safetensors");
  }
  if (argc == 4 && strcmp(argv[1], "--mutations") == 0) try_mutations(atoi(argv[2]), atoi(argv[3]));
  else for (int i = 1; i < argc; i++) replay(argv[i]);
  if (argc == 1) {
    replay("tests/data/fuzz");
    try_seeds();
    try_mutations(TEST_QUICK ? 100 : 300, 0);
  }
  for (int i = 0; i < 2; i++) free(fixed_stream(i)->memory), free(fixed_stream(i)->file.at);
  return test_report("fuzz_safetensors");
}
#endif
