/* Exact resume: a run stopped after any step, saved, loaded in a context of another seed and another number of threads,
   goes on with the bits of the run that never stopped; what is no checkpoint of this run is refused and changes
   nothing; a save that fails, or whose process is killed, leaves the old file whole. */
#define _FILE_OFFSET_BITS 64 /* for readdir on 32-bit machines */
#include "test.h"
#define LUNA_IMPLEMENTATION
#include "luna.h"
#include "examples/luna_apollo.h"
#include "common.h"
#include "files.h"
#include <unistd.h>
#if !defined(_WIN32) && !defined(__wasm__)
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#define HAS_FORK
#endif

enum { STEPS = 12, BATCH = 3, N = 11, VOCAB = 13, BAD_STEP = 5, SLOW_STEP = 7 };
static const char *const kind_names[4] = {"SGD", "Adam", "AdamW", "Apollo"};

/* does the optimiser, saved, still make these bytes? */
static bool unchanged(const luna_optimizer *optimizer, const buffer *before) {
  buffer now = saved_training(optimizer);
  const bool result = same(&now, before);
  free(now.at);
  return result;
}

/* ---- a run: a language model or a classifier, both with dropout; schedule, clipping, a group, a step that is skipped,
   a rate that is set ---- */
typedef struct run {
  luna_ctx *ctx;
  luna_params *params;
  luna_lm lm;
  luna_classifier classifier;
  luna_optimizer *optimizer;
  bool classifies;
} run;

static luna_optimizer *optimizer_open(luna_params *params, int kind, float momentum) {
  luna_optimizer_config sgd = {0};
  luna_optimizer_config adam = {0};
  luna_optimizer_config apollo = {0};
  sgd.lr = 0.1f, sgd.momentum = momentum;
  adam.lr = 0.01f, apollo.lr = 0.2f;
  sgd.weight_decay = adam.weight_decay = apollo.weight_decay = 0.1f;
  sgd.clip = adam.clip = apollo.clip = 0.5f;
  if (momentum > 0) adam.average = apollo.average = 0.8f;
  sgd.schedule.decay = LUNA_DECAY_COSINE, sgd.schedule.warmup = 3, sgd.schedule.total = 2 * STEPS,
      sgd.schedule.warmup_from = 0.1f;
  adam.schedule = apollo.schedule = sgd.schedule;
  return kind == LUNA_OPTIMIZER_SGD ? luna_sgd(params, &sgd) : kind == LUNA_OPTIMIZER_ADAM ? luna_adam(params, &adam) :
      kind == LUNA_OPTIMIZER_ADAMW ? luna_adamw(params, &adam) : luna_apollo(params, &apollo);
}
static void run_open(run *r, bool classifies, int kind, uint64_t seed, int threads) {
  const luna_param_group group = {NULL, 1, 0.5f, -1};
  luna_options options = {0};
  luna_layer_config layer;
  memset(r, 0, sizeof *r);
  memset(&layer, 0, sizeof layer);
  options.seed = seed, options.threads = threads;
  r->ctx = luna_open(&options), r->params = luna_params_open(r->ctx), r->classifies = classifies;
  layer.dropout = 0.2f, layer.attention_dropout = 0.1f, layer.activation_dropout = 0.1f;
  if (classifies) {
    luna_classifier_config config;
    memset(&config, 0, sizeof config);
    layer.dim = 8, layer.heads = 2, layer.memory = 4, layer.ffn = 12;
    config.vocab = VOCAB, config.classes = 3, config.encoder.layers = 2;
    config.encoder.layer = layer;
    CHECK(luna_classifier_init(&r->classifier, r->params, &config) == LUNA_OK, "%s", luna_error(r->ctx));
  } else {
    luna_lm_config config;
    memset(&config, 0, sizeof config);
    layer.dim = 8, layer.heads = 2, layer.memory = 3, layer.ffn = 12, layer.convolution = 3;
    config.vocab = VOCAB, config.layer = layer;
    CHECK(luna_lm_init(&r->lm, r->params, &config) == LUNA_OK, "%s", luna_error(r->ctx));
  }
  r->optimizer = optimizer_open(r->params, kind, 0.9f);
  CHECK(r->optimizer && luna_optimizer_add_group(r->optimizer, &group) == LUNA_OK, "%s", luna_error(r->ctx));
}
static luna_tensor *run_logits(const run *r, int step) {
  int32_t *tokens = common_tokens(BATCH * N, (uint64_t)step, VOCAB), lengths[BATCH];
  for (int b = 0; b < BATCH; b++) lengths[b] = 2 + (5 * b + step) % (N - 2);
  luna_tensor *logits = r->classifies ? luna_classifier_forward(&r->classifier,
      &(luna_input){ tokens, lengths, BATCH, N, NULL }) : luna_lm_forward(&r->lm,
          &(luna_input){ tokens, NULL, BATCH, N, NULL });
  free(tokens);
  return logits;
}
/* step 1, 2, ...; returns the loss */
static float run_step(run *r, int step) {
  char text[32];
  int32_t *labels = common_tokens(BATCH * N, 100 + (uint64_t)step, r->classifies ? 3 : VOCAB);
  snprintf(text, sizeof text, "batch %d", step);
  if (step == SLOW_STEP) luna_optimizer_set_lr(r->optimizer, 0.003f);
  luna_begin_step(r->ctx);
  luna_tensor *loss = luna_cross_entropy(run_logits(r, step), labels, NULL);
  if (step == BAD_STEP) loss = luna_scale(loss, INFINITY);
  CHECK(luna_backward(loss) == LUNA_OK && luna_optimizer_step(r->optimizer) == LUNA_OK &&
        luna_params_set_text(r->params, "data", text) == LUNA_OK, "%s", luna_error(r->ctx));
  free(labels);
  return luna_item(loss);
}

/* ---- stopped after each step ---- */
static void check_resume(bool classifies, int kind) {
  const char *what = classifies ? "classifier" : "language model";
  float losses[STEPS + 1];
  buffer files[STEPS + 1];
  run whole, saving;
  run_open(&whole, classifies, kind, 5, 1), run_open(&saving, classifies, kind, 5, 2);
  for (int step = 1; step <= STEPS; step++) {
    const float loss = run_step(&saving, step);
    losses[step] = run_step(&whole, step);
    files[step] = saved_training(saving.optimizer); /* in the step that made them, as a program would */
    CHECK(memcmp(&loss, &losses[step], sizeof loss) == 0, "%s, %s: saving, or two threads, change the loss of step %d",
          what, kind_names[kind], step);
  }
  CHECK(unchanged(whole.optimizer, &files[STEPS]), "%s, %s: saving, or two threads, change the run", what,
        kind_names[kind]);
  CHECK(luna_optimizer_skipped(whole.optimizer) == 1 && luna_optimizer_steps(whole.optimizer) == STEPS - 1,
        "%s, %s: %lld skipped", what, kind_names[kind],
        (long long)luna_optimizer_skipped(whole.optimizer));
  for (int stop = 1; stop < STEPS; stop++) {
    run again;
    char text[32];
    int wrong = 0;
    run_open(&again, classifies, kind, 77 + (uint64_t)stop, 1 + stop % 3);
    if (stop % 4 == 0) run_step(&again, 1), run_step(&again, 2); /* whatever it did before is forgotten */
    if (stop % 2) {
      CHECK(luna_load_training(again.optimizer, luna_bytes(files[stop].at, files[stop].size)) == LUNA_OK, "%s, %s: %s",
            what,
            kind_names[kind], luna_error(again.ctx));
    } else {
      FILE *file = fopen(path, "wb");
      CHECK(file && fwrite(files[stop].at, 1, files[stop].size, file) == files[stop].size, "%s cannot be written",
            path);
      if (file) fclose(file);
      CHECK(luna_load_training(again.optimizer, luna_path(path)) == LUNA_OK &&
            luna_save_training(again.optimizer, luna_path(path)) == LUNA_OK && holds(path, &files[stop]),
            "%s, %s: loaded from a file and saved to it, it has other bytes: %s", what, kind_names[kind],
                luna_error(again.ctx));
    }
    snprintf(text, sizeof text, "batch %d", stop);
    CHECK(luna_params_get_text(again.params, "data") && strcmp(luna_params_get_text(again.params, "data"), text) == 0,
          "%s, %s: the pair says %s", what, kind_names[kind],
          luna_params_get_text(again.params, "data"));
    CHECK(luna_optimizer_skipped(again.optimizer) == (stop >= BAD_STEP) &&
          luna_optimizer_steps(again.optimizer) == stop - (stop >= BAD_STEP),
          "%s, %s: after step %d there were %lld, %lld skipped", what, kind_names[kind], stop,
              (long long)luna_optimizer_steps(again.optimizer),
          (long long)luna_optimizer_skipped(again.optimizer));
    CHECK(unchanged(again.optimizer, &files[stop]), "%s, %s: loaded and saved again, step %d has other bytes", what,
          kind_names[kind], stop);
    for (int step = stop + 1; step <= STEPS; step++) {
      const float loss = run_step(&again, step);
      wrong += memcmp(&loss, &losses[step], sizeof loss) != 0;
    }
    CHECK(wrong == 0, "%s, %s: stopped after step %d, %d losses are others", what, kind_names[kind], stop, wrong);
    CHECK(unchanged(again.optimizer, &files[STEPS]), "%s, %s: stopped after step %d it ends elsewhere", what,
          kind_names[kind], stop);
    luna_close(again.ctx);
  }
  for (int step = 1; step <= STEPS; step++) free(files[step].at);
  luna_close(whole.ctx), luna_close(saving.ctx), remove(path);
}

/* ---- the file is a checkpoint of the model as well ---- */
static void check_plain(bool classifies) {
  run r;
  luna_model model;
  float *expected = common_floats(BATCH * N * VOCAB), *got = common_floats(BATCH * N * VOCAB);
  run_open(&r, classifies, LUNA_OPTIMIZER_ADAMW, 5, 1);
  for (int step = 1; step <= 3; step++) run_step(&r, step);
  buffer weights = saved(r.params), training = saved_training(r.optimizer);
  luna_begin_inference(r.ctx);
  luna_tensor *logits = run_logits(&r, 1);
  CHECK(luna_read(logits, expected) == LUNA_OK, "%s", luna_error(r.ctx));
  CHECK(luna_save_training(r.optimizer, luna_path(path)) == LUNA_OK, "%s", luna_error(r.ctx));
  for (int way = 0; way < (classifies ? 3 : 4); way++) {
    run other;
    memset(&other, 0, sizeof other);
    other.ctx = luna_open(NULL), other.params = luna_params_open(other.ctx), other.classifies = classifies;
    const luna_status status = way == 0   ? luna_load_model(&model, other.params, luna_path(path))
                               : way == 1 ? luna_load_model(&model, other.params, luna_bytes(training.at,
                                                                                             training.size))
                               : way == 2 ? luna_load_model(&model, other.params, luna_bytes(weights.at, weights.size))
                                          : luna_load_model_of(LUNA_MODEL_LM, &model.lm, other.params, luna_path(path));
    CHECK(status == LUNA_OK, "way %d: a training file is no model: %s", way, luna_error(other.ctx));
    if (classifies) other.classifier = model.classifier;
    else other.lm = model.lm;
    luna_begin_inference(other.ctx);
    CHECK(luna_read(run_logits(&other, 1), got) == LUNA_OK &&
          memcmp(got, expected, (size_t)luna_count(logits) * sizeof(float)) == 0,
          "way %d: the model loaded from a training file has other logits: %s", way, luna_error(other.ctx));
    buffer again = saved(other.params);
    CHECK(same(&again, &weights), "way %d: loaded from a training file and saved, it has other bytes", way);
    free(again.at);
    luna_close(other.ctx);
  }
  run set; /* and into a set that is there already */
  run_open(&set, classifies, LUNA_OPTIMIZER_SGD, 9, 1);
  CHECK(luna_load(set.params, luna_path(path)) == LUNA_OK, "luna_load: %s", luna_error(set.ctx));
  buffer again = saved(set.params);
  CHECK(same(&again, &weights), "a training file loaded by luna_load makes another checkpoint");
  luna_close(set.ctx), luna_close(r.ctx), remove(path);
  free(again.at), free(weights.at), free(training.at), free(expected), free(got);
}

/* ---- refusals ---- */
static const int64_t matrix[2] = {2, 3}, vector[1] = {4};
typedef struct small {
  luna_ctx *ctx;
  luna_params *params;
  luna_optimizer *optimizer;
} small;
/* two parameters, and an optimiser that has made two steps */
static void small_open(small *s, int kind, float momentum, uint64_t seed) {
  const luna_init normal = {LUNA_INIT_NORMAL, 1};
  luna_options options = {0};
  options.seed = seed, options.threads = 1;
  s->ctx = luna_open(&options), s->params = luna_params_open(s->ctx);
  CHECK(luna_param(s->params, "first", 2, matrix, normal) && luna_param(s->params, "second", 1, vector, normal), "%s",
        luna_error(s->ctx));
  s->optimizer = optimizer_open(s->params, kind, momentum);
  for (int step = 0; step < 2; step++) {
    luna_begin_step(s->ctx);
    CHECK(luna_backward(luna_add(common_loss(luna_params_find(s->params, "first"), seed),
                                 common_loss(luna_params_find(s->params, "second"), seed))) == LUNA_OK &&
              luna_optimizer_step(s->optimizer) == LUNA_OK,
          "%s", luna_error(s->ctx));
  }
}
static void small_refuses(small *s, const void *bytes, size_t size, luna_status want, luna_error_id id,
                          const char *what) {
  const buffer before = saved_training(s->optimizer);
  const luna_status got = luna_load_training(s->optimizer, luna_bytes(bytes, size));
  CHECK(got == want && luna_error(s->ctx)[0] && luna_error_id_of(s->ctx) == id,
      "%s: %s, error %d \"%s\", not %s with error %d", what,
        luna_status_text(got), (int)luna_error_id_of(s->ctx), luna_error(s->ctx), luna_status_text(want), (int)id);
  CHECK(unchanged(s->optimizer, &before), "%s: refused, but something has changed", what);
  free(before.at);
  luna_begin_inference(s->ctx);
}
#define ZEROS "0000000000000000"
static const struct {
  const char *from, *to;
  luna_status status;
  luna_error_id id;
} claims[] = {
    {"\"luna.optimizer\":\"" "0000000000000002", "\"luna.optimizer\":\"0000000000000001", LUNA_MISMATCH,
        LUNA_ERROR_OPTIMIZER_KIND},
    {"\"luna.optimizer\":\"" "0000000000000002", "\"luna.optimizer\":\"8000000000000002", LUNA_MISMATCH,
        LUNA_ERROR_OPTIMIZER_KIND},
    {"\"luna.optimizer\":\"" "0000000000000002", "\"luna.optimizer\":\"000000000000000G", LUNA_BAD_FILE,
        LUNA_ERROR_FILE_FIELD},
    {"\"luna.optimizer\":\"" "0000000000000002", "\"luna.optimizer\":\"2", LUNA_BAD_FILE, LUNA_ERROR_FILE_FIELD},
    {"\"luna.optimizer\":\"" "0000000000000002", "\"luna.optimizer\":\"00000000000000002", LUNA_BAD_FILE,
        LUNA_ERROR_FILE_FIELD},
    {"luna.optimizer", "luna.optimiser", LUNA_BAD_FILE, LUNA_ERROR_NOT_TRAINING},
    {"luna.attempts", "luna.attempt", LUNA_BAD_FILE, LUNA_ERROR_FILE_FIELD},
    {"luna.updates", "luna.update", LUNA_BAD_FILE, LUNA_ERROR_FILE_FIELD},
    {"luna.skipped", "luna.skip", LUNA_BAD_FILE, LUNA_ERROR_FILE_FIELD},
    {"\"luna.skipped_in_row\":\"" ZEROS, "\"luna.skipped_in_row\":\"1", LUNA_BAD_FILE, LUNA_ERROR_FILE_FIELD},
    {"\"luna.skipped_in_row\":\"" ZEROS, "\"luna.skipped_in_row\":\"0000000000000001", LUNA_BAD_FILE,
        LUNA_ERROR_FILE_COUNTERS},
    {"luna.lr", "luna.rate", LUNA_BAD_FILE, LUNA_ERROR_FILE_FIELD},
    {"luna.step", "luna.stop", LUNA_BAD_FILE, LUNA_ERROR_FILE_FIELD},
    {"luna.seed", "luna.weed", LUNA_BAD_FILE, LUNA_ERROR_FILE_FIELD},
    {"\"luna.attempts\":\"0000000000000002", "\"luna.attempts\":\"8000000000000002", LUNA_BAD_FILE,
        LUNA_ERROR_FILE_COUNTERS},
    {"\"luna.attempts\":\"0000000000000002", "\"luna.attempts\":\"ffffffffffffffff", LUNA_BAD_FILE,
        LUNA_ERROR_FILE_COUNTERS},
    {"\"luna.updates\":\"0000000000000002", "\"luna.updates\":\"8000000000000002", LUNA_BAD_FILE,
        LUNA_ERROR_FILE_COUNTERS},
    {"\"luna.updates\":\"0000000000000002\",\"luna.skipped\":\"" ZEROS,
        "\"luna.updates\":\"0000000000000003\",\"luna.skipped\":\"ffffffffffffffff", LUNA_BAD_FILE,
            LUNA_ERROR_FILE_COUNTERS},
    {"\"luna.skipped\":\"" ZEROS, "\"luna.skipped\":\"4000000000000000", LUNA_BAD_FILE, LUNA_ERROR_FILE_COUNTERS},
    {"\"luna.lr\":\"" ZEROS, "\"luna.lr\":\"000000007fc00000", LUNA_BAD_FILE, LUNA_ERROR_FILE_FIELD},
        /* NaN; the file's own lr is set to 0 for these */
    {"\"luna.lr\":\"" ZEROS, "\"luna.lr\":\"000000007f800000", LUNA_BAD_FILE, LUNA_ERROR_FILE_FIELD}, /* Inf */
    {"\"luna.lr\":\"" ZEROS, "\"luna.lr\":\"00000000bf800000", LUNA_BAD_FILE, LUNA_ERROR_FILE_FIELD}, /* -1 */
    {"\"luna.lr\":\"" ZEROS, "\"luna.lr\":\"000000005a7fcb9e", LUNA_BAD_FILE, LUNA_ERROR_FILE_FIELD},
        /* 1.8e16, which no step takes */
    {"\"luna.lr\":\"" ZEROS, "\"luna.lr\":\"3c23d70a00000000", LUNA_BAD_FILE, LUNA_ERROR_FILE_FIELD},
        /* 0.01 in the upper half, where a float does not lie */
    {"\"luna.lr\":\"" ZEROS, "\"luna.lr\":\"7fc0000000000000", LUNA_BAD_FILE, LUNA_ERROR_FILE_FIELD}, /* a NaN there */
    {"luna.moment1.first", "luna.moment3.first", LUNA_MISMATCH, LUNA_ERROR_MOMENT},
    {"luna.moment2.second", "luna.moment2.secund", LUNA_MISMATCH, LUNA_ERROR_MOMENT},
    {"luna.moment2.second", "luna_moment2.second", LUNA_MISMATCH, LUNA_ERROR_MOMENT_COUNT},
    {"\"luna.moment2.first\":{\"dtype\":\"F32\",\"shape\":[2,3]",
        "\"luna.moment2.first\":{\"dtype\":\"F32\",\"shape\":[3,2]", LUNA_MISMATCH, LUNA_ERROR_MOMENT},
    {"\"luna.moment2.first\":{\"dtype\":\"F32\"", "\"luna.moment2.first\":{\"dtype\":\"I32\"", LUNA_MISMATCH,
        LUNA_ERROR_MOMENT},
    {"\"second\"", "\"luna.second\"", LUNA_MISMATCH, LUNA_ERROR_MOMENT_COUNT},
    {"\"second\"", "\"third\"", LUNA_MISMATCH, LUNA_ERROR_FILE_TENSOR_EXTRA},
    {"\"first\":{\"dtype\":\"F32\",\"shape\":[2,3]", "\"first\":{\"dtype\":\"F32\",\"shape\":[6]", LUNA_MISMATCH,
        LUNA_ERROR_FILE_TENSOR_SHAPE},
    {"\"first\":{\"dtype\":\"F32\"", "\"first\":{\"dtype\":\"U32\"", LUNA_MISMATCH, LUNA_ERROR_FILE_TENSOR_MISSING},
    {"{\"__metadata__\"", "{\"__metadata__\":{},\"x\"", LUNA_BAD_FILE, LUNA_ERROR_NOT_SAFETENSORS},
};
static void check_refusals(void) {
  small from, to;
  small_open(&from, LUNA_OPTIMIZER_ADAMW, 0, 3);
  luna_optimizer_set_lr(from.optimizer, 0);
  const buffer file = saved_training(from.optimizer), weights = saved(from.params);
  for (int kind = LUNA_OPTIMIZER_SGD; kind <= LUNA_OPTIMIZER_HOOK; kind++) {
    small_open(&to, kind, 0.9f, 8);
    if (kind != LUNA_OPTIMIZER_ADAMW) small_refuses(&to, file.at, file.size, LUNA_MISMATCH, LUNA_ERROR_OPTIMIZER_KIND,
        "another kind of optimiser");
    small_refuses(&to, weights.at, weights.size, LUNA_BAD_FILE, LUNA_ERROR_NOT_TRAINING,
                  "a checkpoint of a model alone");
    small_refuses(&to, "", 0, LUNA_BAD_FILE, LUNA_ERROR_NOT_SAFETENSORS, "an empty file");
    small_refuses(&to, NULL, 0, LUNA_BAD_ARGUMENT, LUNA_ERROR_NULL_ARGUMENT, "no file");
    luna_close(to.ctx);
  }
  small_open(&to, LUNA_OPTIMIZER_ADAMW, 0, 8);
  for (size_t i = 0; i < sizeof claims / sizeof claims[0]; i++) {
    const buffer wrong = edited(&file, claims[i].from, claims[i].to);
    small_refuses(&to, wrong.at, wrong.size, claims[i].status, claims[i].id, claims[i].to);
    free(wrong.at);
  }
  for (size_t cut = 0; cut < file.size; cut++) {
    uint8_t *half = (uint8_t *)common_alloc(cut);
    memcpy(half, file.at, cut);
    small_refuses(&to, half, cut, LUNA_BAD_FILE, LUNA_ERROR_NOT_SAFETENSORS, "a file cut short");
    free(half);
  }
  CHECK(luna_load_training(to.optimizer, luna_bytes(file.at, file.size)) == LUNA_OK && unchanged(to.optimizer, &file),
        "the file itself does not load: %s", luna_error(to.ctx));
  CHECK(luna_load_training(to.optimizer, luna_path(folder)) == LUNA_CANNOT_READ &&
        luna_load_training(to.optimizer, luna_path(path)) == LUNA_CANNOT_READ && unchanged(to.optimizer, &file),
        "a folder, or a file that is not there, is loaded: %s", luna_error(to.ctx));
  CHECK(luna_load_training(NULL, luna_bytes(file.at, file.size)) == LUNA_BAD_ARGUMENT &&
        luna_load_training(to.optimizer, luna_path(NULL)) == LUNA_BAD_ARGUMENT &&
            luna_load_training(NULL, luna_path(path)) == LUNA_BAD_ARGUMENT &&
                luna_save_training(NULL, luna_path(path)) == LUNA_BAD_ARGUMENT &&
            luna_save_training(to.optimizer, luna_path(NULL)) == LUNA_BAD_ARGUMENT &&
                luna_save_training(to.optimizer, luna_callbacks(NULL)) == LUNA_BAD_ARGUMENT,
        "null arguments");
  luna_close(to.ctx);
  /* of one kind, but of another number of moments */
  for (int moving = 0; moving < 2; moving++) {
    small other;
    small_open(&to, LUNA_OPTIMIZER_SGD, moving ? 0.9f : 0, 8),
        small_open(&other, LUNA_OPTIMIZER_SGD, moving ? 0 : 0.9f, 3);
    const buffer sgd = saved_training(other.optimizer);
    small_refuses(&to, sgd.at, sgd.size, LUNA_MISMATCH, LUNA_ERROR_MOMENT_COUNT, "SGD with momentum and without");
    free(sgd.at);
    luna_close(to.ctx), luna_close(other.ctx);
  }
  luna_close(from.ctx);
  free(file.at), free(weights.at);
}
/* SGD whose moment is an average alone, and a file of a moment and an average */
static void check_averages(void) {
  const luna_init normal = {LUNA_INIT_NORMAL, 1};
  buffer file = {NULL, 0, 0, 0, SIZE_MAX};
  for (int i = 0; i < 2; i++) {
    small s;
    s.ctx = luna_open(NULL), s.params = luna_params_open(s.ctx);
    luna_param(s.params, "first", 2, matrix, normal);
    s.optimizer = luna_sgd(s.params, &(luna_optimizer_config){.average = 0.9f, .momentum = i ? 0 : 0.5f});
    if (i) small_refuses(&s, file.at, file.size, LUNA_MISMATCH, LUNA_ERROR_MOMENT_COUNT, "a moment too many");
    else file = saved_training(s.optimizer);
    luna_close(s.ctx);
  }
  free(file.at);
}
/* ---- parameters that a step does not reach ---- */
static void turns_open(small *s, uint64_t seed) {
  const luna_init normal = {LUNA_INIT_NORMAL, 1};
  luna_options options = {0};
  options.seed = seed, options.threads = 1;
  s->ctx = luna_open(&options), s->params = luna_params_open(s->ctx);
  CHECK(luna_param(s->params, "odd", 2, matrix, normal) && luna_param(s->params, "even", 2, matrix, normal) &&
        luna_param(s->params, "never", 1, vector, normal), "%s", luna_error(s->ctx));
  s->optimizer = optimizer_open(s->params, LUNA_OPTIMIZER_ADAMW, 0.5f);
}
/* Odd steps reach one parameter, even ones another. A third gets no gradient. */
static luna_tensor *turns_loss(small *s, int step) {
  luna_tensor *t = luna_params_find(s->params, step % 2 ? "odd" : "even");
  return common_loss(luna_mul(t, luna_dropout(t, 0.5f)), 5);
}
static void turns_step(small *s, int step) {
  luna_begin_step(s->ctx);
  CHECK(luna_backward(turns_loss(s, step)) == LUNA_OK && luna_optimizer_step(s->optimizer) == LUNA_OK, "step %d: %s",
        step, luna_error(s->ctx));
}
static void check_turns(void) {
  static const float written[4] = {1, 2, 3, 4};
  small s, r;
  turns_open(&s, 3);
  for (int step = 1; step <= 6; step++) turns_step(&s, step);
  const buffer file = saved_training(s.optimizer);
  for (int step = 7; step <= 9; step++) turns_step(&s, step);
  const buffer end = saved_training(s.optimizer);

  turns_open(&r, 4);
  CHECK(luna_load_training(r.optimizer, luna_bytes(file.at, file.size)) == LUNA_OK, "%s", luna_error(r.ctx));
  for (int step = 7; step <= 9; step++) turns_step(&r, step);
  CHECK(unchanged(r.optimizer, &end), "a run whose steps reach different parameters goes on with other bits");

  /* what no update reaches has no average: a swap leaves what was written */
  luna_tensor *never = luna_params_find(r.params, "never");
  CHECK(luna_write(never, written) == LUNA_OK && luna_optimizer_swap_average(r.optimizer) == LUNA_OK &&
        memcmp(never->data, written, sizeof written) == 0, "a swap brings back old values of an untrained parameter");
  const buffer averages = saved(r.params);
  luna_load_report report = {0};
  CHECK(luna_load(r.params, luna_bytes(averages.at, averages.size)) == LUNA_BAD_ARGUMENT &&
        luna_error_id_of(r.ctx) == LUNA_ERROR_AVERAGE_SWAPPED, "luna_load between swaps: %s", luna_error(r.ctx));
  CHECK(luna_load_matching(r.params, luna_bytes(averages.at, averages.size), &report) == LUNA_BAD_ARGUMENT &&
        luna_load_training(r.optimizer, luna_bytes(file.at, file.size)) == LUNA_BAD_ARGUMENT &&
        luna_error_id_of(r.ctx) == LUNA_ERROR_AVERAGE_SWAPPED, "others between swaps: %s", luna_error(r.ctx));
  CHECK(luna_optimizer_swap_average(r.optimizer) == LUNA_OK, "%s", luna_error(r.ctx));

  /* back to the file after a step that failed, and after a luna_backward */
  for (int i = 0; i < 2; i++) {
    luna_begin_step(r.ctx);
    luna_tensor *loss = turns_loss(&r, 1);
    luna_tensor *odd = luna_params_find(r.params, "odd");
    CHECK(i || !luna_matmul(odd, odd, false, false), "a product of shapes that do not fit");
    CHECK((luna_backward(loss) == LUNA_OK) == (i == 1), "luna_backward: %s", luna_error(r.ctx));
    CHECK(luna_load_training(r.optimizer, luna_bytes(file.at, file.size)) == LUNA_OK, "%s", luna_error(r.ctx));
    CHECK(luna_optimizer_step(r.optimizer) != LUNA_OK && (i == 0 || luna_error_id_of(r.ctx) == LUNA_ERROR_NO_BACKWARD),
          "a step on gradients from before the load: %s", luna_error(r.ctx));
    for (int step = 7; step <= 9; step++) turns_step(&r, step);
    CHECK(unchanged(r.optimizer, &end), "after a %s, a run goes back and makes other bits",
          i ? "luna_backward" : "step that failed");
  }
  luna_close(s.ctx), luna_close(r.ctx);
  free(file.at), free(end.at), free(averages.at);
}

/* A run in other products than the file's goes on, and options.log is told, if there is one. */
static int told;
static void take_note(void *user, luna_status status, const char *sentence) {
  (void)user;
  told += status == LUNA_OK && strstr(sentence, "bf16") != NULL;
}
static void check_products(void) {
  static const char *const products[3] = {"bf16", "bf17", "bf16"};
  small s;
  small_open(&s, LUNA_OPTIMIZER_ADAMW, 0, 3);
  const buffer file = saved_training(s.optimizer);
  luna_close(s.ctx);
  for (int i = 0; i < 3; i++) {
    char pair[64];
    const luna_init normal = {LUNA_INIT_NORMAL, 1};
    luna_options options = {0};
    snprintf(pair, sizeof pair, "\"luna.products\":\"%s\",\"luna.step\"", products[i]);
    const buffer other = edited(&file, "\"luna.step\"", pair);
    options.log = i ? take_note : NULL;
    s.ctx = luna_open(&options), s.params = luna_params_open(s.ctx);
    luna_param(s.params, "first", 2, matrix, normal), luna_param(s.params, "second", 1, vector, normal);
    s.optimizer = optimizer_open(s.params, LUNA_OPTIMIZER_ADAMW, 0);
    told = 0;
    CHECK(luna_load_training(s.optimizer, luna_bytes(other.at, other.size)) == LUNA_OK && unchanged(s.optimizer, &file),
          "products in %s: %s", products[i], luna_error(s.ctx));
    CHECK(told == (i == 2), "products in %s, and the log is told %d times", products[i], told);
    luna_close(s.ctx), free(other.at);
  }
  free(file.at);
}
/* Loading takes memory for moments, and for the file's index: where there is none it changes nothing. */
typedef struct scarce { int64_t calls, fail_at; } scarce;
static void *scarce_allocate(void *user, size_t bytes) {
  scarce *s = (scarce *)user;
  return ++s->calls >= s->fail_at && s->fail_at ? NULL : malloc(bytes);
}
static void scarce_release(void *user, void *pointer, size_t bytes) { (void)user, (void)bytes, free(pointer); }
static void check_scarce(void) {
  const int64_t large[2] = {1000, 1000};
  const luna_init normal = {LUNA_INIT_NORMAL, 1};
  buffer file = {NULL, 0, 0, 0, SIZE_MAX};
  luna_status status = LUNA_OUT_OF_MEMORY;
  for (int fail = 0; fail <= 1 || (status != LUNA_OK && fail < 100); fail++) {
    scarce left = {0, 0};
    luna_options options = {0};
    options.threads = 1;
    options.allocator.allocate = scarce_allocate, options.allocator.release = scarce_release;
    options.allocator.user = &left;
    luna_ctx *ctx = luna_open(&options);
    luna_params *params = luna_params_open(ctx);
    luna_optimizer *adam = luna_adam(params, NULL); /* which its parameters join when it loads */
    luna_param(params, "first", 2, large, normal);
    if (fail == 0) file = saved_training(adam);
    left.calls = 0, left.fail_at = fail;
    status = luna_load_training(adam, luna_bytes(file.at, file.size));
    CHECK(status == LUNA_OK || (status == LUNA_OUT_OF_MEMORY && luna_error_id_of(ctx) == LUNA_ERROR_NO_MEMORY),
          "allocation %d: %s", fail, luna_error(ctx));
    CHECK(fail != 1 || status != LUNA_OK, "loading takes no memory");
    left.fail_at = 0;
    luna_begin_inference(ctx);
    CHECK(unchanged(adam, &file), "allocation %d: something has changed", fail);
    luna_close(ctx);
  }
  free(file.at);
}
/* advance and apply need not be called equally often: what is saved then loads */
static void check_halves(void) {
  small s;
  small_open(&s, LUNA_OPTIMIZER_ADAM, 0, 2);
  for (int more = 0; more < 2; more++) {
    for (int i = 0; i < 3; i++) {
      luna_begin_step(s.ctx);
      luna_backward(luna_sum_all(luna_mul(luna_params_find(s.params, "first"), luna_params_find(s.params, "first"))));
      if (more || i == 0) luna_optimizer_advance(s.optimizer);
      if (!more || i == 0) CHECK(luna_optimizer_apply(s.optimizer) == LUNA_OK, "%s", luna_error(s.ctx));
    }
    const buffer file = saved_training(s.optimizer);
    CHECK(luna_load_training(s.optimizer, luna_bytes(file.at, file.size)) == LUNA_OK && unchanged(s.optimizer, &file),
          "%s than the other: %s", more ? "advance more often" : "apply more often", luna_error(s.ctx));
    free(file.at);
  }
  luna_close(s.ctx);
}

/* ---- a file of another machine: tests/data/resume/before.safetensors, made on x86-64, goes on here with the bits it
   went on with there ---- */
static luna_tensor *fixed_loss(const luna_params *params) {
  luna_tensor *first = luna_params_find(params, "first"), *second = luna_params_find(params, "second");
  luna_tensor *a = luna_dropout(luna_mul(first, first), 0.5f), *b = luna_mul(second, second);
  const int64_t six[1] = {6};
  return luna_add(luna_sum(luna_reshape(a, 1, six), 0), luna_sum(b, 0));
}
static void fixed_open(small *s) {
  luna_options options = {0};
  luna_optimizer_config config = {0};
  const luna_init normal = {LUNA_INIT_NORMAL, 1};
  /* two roundings, no FMA: the same bits on every machine */
  options.isa = LUNA_ISA_REFERENCE, options.threads = 1, options.seed = 11;
  config.lr = 0.5f, config.weight_decay = 0.1f;
  s->ctx = luna_open(&options), s->params = luna_params_open(s->ctx);
  CHECK(luna_param(s->params, "first", 2, matrix, normal) && luna_param(s->params, "second", 1, vector, normal), "%s",
        luna_error(s->ctx));
  s->optimizer = luna_adamw(s->params, &config);
}
static void fixed_step(small *s) {
  luna_begin_step(s->ctx);
  CHECK(luna_backward(fixed_loss(s->params)) == LUNA_OK && luna_optimizer_step(s->optimizer) == LUNA_OK, "%s",
        luna_error(s->ctx));
}
static buffer fixed_read(const char *name) {
  const buffer b = read_file(name);
  CHECK(b.size > 0, "%s cannot be read", name);
  return b;
}
static const char *const fixed_files[2] = {"tests/data/resume/before.safetensors",
                                           "tests/data/resume/after.safetensors"};
static void fixed_write(void) {
  small s;
  fixed_open(&s);
  fixed_step(&s), fixed_step(&s);
  luna_optimizer_set_lr(s.optimizer, 0.01f);
  for (int i = 0; i < 2; i++)
    CHECK(luna_save_training(s.optimizer, luna_path(fixed_files[i])) == LUNA_OK, "%s", luna_error(s.ctx)),
        fixed_step(&s);
  luna_close(s.ctx);
}
static void check_fixed(void) {
  static const char *const older = "tests/data/resume/older.safetensors"; /* without "luna.unreached" */
  buffer whole = fixed_read(fixed_files[0]), after = fixed_read(fixed_files[1]);
  for (int i = 0; i < 2; i++) {
    buffer before = fixed_read(i ? older : fixed_files[0]);
    small s;
    fixed_open(&s);
    CHECK(luna_load_training(s.optimizer, luna_bytes(before.at, before.size)) == LUNA_OK &&
          unchanged(s.optimizer, &whole), "fixed file %d, loaded and saved, has other bytes: %s", i, luna_error(s.ctx));
    fixed_step(&s);
    CHECK(unchanged(s.optimizer, &after), "the next step of fixed file %d is another one here", i);
    free(before.at), luna_close(s.ctx);
  }
  free(whole.at), free(after.at);
}

/* ---- saves that fail, at each byte and in each way ---- */
static void check_failed_saves(void) {
  small s;
  char below[400];
  small_open(&s, LUNA_OPTIMIZER_HOOK, 0, 3);
  const buffer file = saved_training(s.optimizer);
  for (size_t limit = 0; limit < file.size; limit++) {
    buffer half = {NULL, 0, 0, 0, limit};
    const luna_io io = {NULL, buffer_write, &half, 0};
    luna_begin_inference(s.ctx);
    CHECK(luna_save_training(s.optimizer, luna_callbacks(&io)) == LUNA_CANNOT_WRITE &&
        luna_error_id_of(s.ctx) == LUNA_ERROR_WRITE_FAILED && half.size <= limit,
          "a writer that fails at %d: \"%s\"", (int)limit, luna_error(s.ctx));
    CHECK(half.size == 0 || memcmp(half.at, file.at, half.size) == 0, "a writer that fails at %d has got other bytes",
          (int)limit);
    free(half.at);
  }
  CHECK(unchanged(s.optimizer, &file), "saves that fail change the run");
  CHECK(luna_save_training(s.optimizer, luna_path(path)) == LUNA_OK && holds(path, &file) && leftovers() == 0,
        "luna_save_training: %s", luna_error(s.ctx));
  luna_begin_step(s.ctx);
  CHECK(luna_backward(common_loss(luna_params_find(s.params, "first"), 4)) == LUNA_OK &&
        luna_optimizer_step(s.optimizer) == LUNA_OK && !unchanged(s.optimizer, &file), "%s", luna_error(s.ctx));
  snprintf(below, sizeof below, "%s/none/training.safetensors", folder);
  CHECK(luna_save_training(s.optimizer, luna_path(below)) == LUNA_CANNOT_WRITE &&
      luna_error_id_of(s.ctx) == LUNA_ERROR_SAVE_TEMPORARY, "a folder that is not there: \"%s\"", luna_error(s.ctx));
  CHECK(luna_save_training(s.optimizer, luna_path(folder)) == LUNA_CANNOT_WRITE &&
      luna_error_id_of(s.ctx) == LUNA_ERROR_SAVE_IRREGULAR, "a folder in the file's place: \"%s\"", luna_error(s.ctx));
  CHECK(leftovers() == 0 && holds(path, &file),
        "a save that failed leaves its temporary file, or another in the old one's place");
  luna_close(s.ctx), remove(path);
  free(file.at);
}

#ifdef HAS_FORK
/* A process that saves and may write only so many bytes: the system kills it in the middle, or fails the write. Its
   status. */
static int save_limited(const luna_optimizer *optimizer, size_t limit, bool killed) {
  int status = 0;
  fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    const struct rlimit file = {limit, limit}, core = {0, 0};
    signal(SIGXFSZ, killed ? SIG_DFL : SIG_IGN);
    if (setrlimit(RLIMIT_CORE, &core) != 0 || setrlimit(RLIMIT_FSIZE, &file) != 0) _exit(99);
    _exit((int)luna_save_training(optimizer, luna_path(path)));
  }
  if (child < 0 || waitpid(child, &status, 0) != child) return -1;
  return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}
static void check_killed_saves(void) {
  run r, again;
  run_open(&r, true, LUNA_OPTIMIZER_ADAMW, 5, 1);
  run_step(&r, 1);
  CHECK(luna_save_training(r.optimizer, luna_path(path)) == LUNA_OK, "%s", luna_error(r.ctx));
  const buffer old = saved_training(r.optimizer);
  run_step(&r, 2);
  const buffer next = saved_training(r.optimizer);
  for (size_t limit = 0; limit < next.size; limit += limit == 0 ? 1 : next.size / 9) {
    int status = save_limited(r.optimizer, limit, false);
    CHECK(status == LUNA_CANNOT_WRITE && holds(path, &old) && leftovers() == 0,
          "a disk that is full after %d bytes: status %d", (int)limit, status);
    status = save_limited(r.optimizer, limit, true);
    CHECK(status == -SIGXFSZ && holds(path, &old) && leftovers() == 1, "killed after %d bytes: status %d", (int)limit,
          status);
    run_open(&again, true, LUNA_OPTIMIZER_ADAMW, 9, 1);
    CHECK(luna_load_training(again.optimizer, luna_path(path)) == LUNA_OK && unchanged(again.optimizer, &old),
          "killed after %d bytes: the old file does not load: %s", (int)limit, luna_error(again.ctx));
    luna_close(again.ctx);
  }
  CHECK(save_limited(r.optimizer, next.size, true) == LUNA_OK && holds(path, &next) && leftovers() == 0,
        "after killed saves the next does not work, or their files stay");
  luna_close(r.ctx), remove(path);
  free(old.at), free(next.at);
}
#endif

/* ---- what must not spoil a run's file ---- */
static void check_pitfalls(void) {
  small s, other;
  luna_options options = {0};
  /* a pair with the name of one of luna.h's own: refused, or the file still loads */
  small_open(&s, LUNA_OPTIMIZER_ADAMW, 0, 3);
  luna_params_set_text(s.params, "luna.step", "7");
  buffer file = saved_training(s.optimizer);
  CHECK(luna_load_training(s.optimizer, luna_bytes(file.at, file.size)) == LUNA_OK,
        "a pair luna.step makes a file that does not load: %s", luna_error(s.ctx));
  free(file.at);
  /* gradients and a NaN that wait when a run is loaded are not the run's */
  small_open(&other, LUNA_OPTIMIZER_ADAMW, 0, 3);
  file = saved_training(other.optimizer);
  for (int bad = 0; bad < 2; bad++) {
    luna_begin_step(s.ctx);
    CHECK(luna_backward(luna_scale(common_loss(luna_params_find(s.params, "first"), 9), bad ? NAN : 1)) == LUNA_OK,
          "%s", luna_error(s.ctx));
    CHECK(luna_load_training(s.optimizer, luna_bytes(file.at, file.size)) == LUNA_OK, "%s", luna_error(s.ctx));
    for (int i = 0; i < 2; i++) {
      const small *run = i ? &other : &s;
      if (i) luna_load_training(other.optimizer, luna_bytes(file.at, file.size));
      luna_begin_step(run->ctx);
      luna_backward(common_loss(luna_params_find(run->params, "first"), 10));
      CHECK(luna_optimizer_step(run->optimizer) == LUNA_OK, "%s", luna_error(run->ctx));
    }
    buffer a = saved_training(s.optimizer), b = saved_training(other.optimizer);
    CHECK(same(&a, &b), "a run loaded over %s goes on with other bits",
          bad ? "a NaN that waits" : "gradients that wait");
    free(a.at), free(b.at);
    luna_params_zero_grad(s.params);
  }
  luna_close(s.ctx), luna_close(other.ctx);
  /* a rate that can be set can be loaded */
  small_open(&s, LUNA_OPTIMIZER_ADAMW, 0, 3);
  luna_optimizer_set_lr(s.optimizer, INFINITY);
  buffer rate = saved_training(s.optimizer);
  CHECK(luna_load_training(s.optimizer, luna_bytes(rate.at, rate.size)) == LUNA_OK,
        "a learning rate that can be set makes a file that does not load: %s", luna_error(s.ctx));
  luna_close(s.ctx), free(rate.at);
  /* a context that measures writes nothing */
  FILE *old = fopen(path, "wb");
  CHECK(old && fwrite(file.at, 1, file.size, old) == file.size, "%s cannot be written", path);
  if (old) fclose(old);
  options.measure = true;
  s.ctx = luna_open(&options), s.params = luna_params_open(s.ctx);
  const luna_init normal = {LUNA_INIT_NORMAL, 1};
  luna_param(s.params, "first", 2, matrix, normal);
  s.optimizer = optimizer_open(s.params, LUNA_OPTIMIZER_ADAMW, 0);
  CHECK(luna_save(s.params, luna_path(path)) == LUNA_OK && holds(path, &file),
        "luna_save in a context that measures overwrites the file");
  old = fopen(path, "wb");
  if (old) fwrite(file.at, 1, file.size, old), fclose(old);
  CHECK(luna_save_training(s.optimizer, luna_path(path)) == LUNA_OK && holds(path, &file),
        "luna_save_training in a context that measures overwrites the file");
  luna_close(s.ctx), remove(path);
  free(file.at);
}

int main(int argc, char **argv) {
  if (argc == 2 && strcmp(argv[1], "--write") == 0) { /* writes them anew */
    fixed_write();
    return test_report("resume");
  }
  paths_open("resume_test", "training.safetensors");
  check_fixed();
  for (int kind = LUNA_OPTIMIZER_SGD; kind <= LUNA_OPTIMIZER_HOOK; kind++)
    check_resume(false, kind), check_resume(true, kind);
  check_plain(false), check_plain(true);
  check_refusals();
  check_averages(), check_turns(), check_products(), check_scarce();
  check_halves();
  check_failed_saves();
#ifdef HAS_FORK
  check_killed_saves();
#endif
  check_pitfalls();
  rmdir(folder);
  return test_report("resume");
}
