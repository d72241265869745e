/* Memory that ends: every allocation of every job, without TEST_FULL one in four, is made to fail in turn. The call
   says so and changes nothing but gradients; made again, it goes on with the bits of one that never failed. */
#include "test.h"
#define LUNA_IMPLEMENTATION
#include "luna.h"
#include "common.h"
#include "jobs.h"

#ifndef __has_feature
#define __has_feature(name) 0
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || __has_feature(address_sanitizer) || \
    __has_feature(thread_sanitizer)
enum { EVERY = 7 };
#else
enum { EVERY = 1 };
#endif

static int failed_backwards;

/* ---- what is done with a trained model ---- */
static char path[300];

static luna_status open_stream(job_run *r, luna_stream **stream) {
  luna_stream_config config = {0};
  config.batch = 2;
  config.chunk = 8;
  return job_given(r->ctx, *stream = luna_stream_open(&r->model.lm, &config));
}
static luna_status streams(job_run *r, uint64_t *bits) {
  luna_stream *stream = NULL, *copy = NULL;
  luna_status status;
  const float *logits;
  JOB_TRY(status, open_stream(r, &stream));
  if (status == LUNA_OK) JOB_TRY(status, open_stream(r, &copy));
  if (status == LUNA_OK) {
    logits = luna_stream_prefill(stream, &(luna_input){ r->tokens, NULL, 0, 21, NULL });
    *bits = job_hash(*bits, logits, 2 * VOCAB * sizeof *logits);
    status = common_stream_copy(copy, stream);
    logits = luna_stream_step(copy, r->tokens + 3);
    *bits = job_hash(*bits, logits, 2 * VOCAB * sizeof *logits);
  }
  luna_stream_close(stream);
  luna_stream_close(copy);
  return status;
}

static luna_status open_decoder(job_run *r, luna_stream **stream) {
  const int32_t lengths[2] = {9, 4};
  return job_given(r->ctx, *stream = luna_seq2seq_stream_open(&r->model.seq2seq,
                                                              &(luna_input){ r->tokens, lengths, 2, 9, NULL }, 2));
}
static luna_status translations(job_run *r, uint64_t *bits) {
  int32_t out[2 * 12] = {0}, out_lengths[2];
  luna_generate_config search = {0};
  luna_stream *stream = NULL;
  luna_status status;
  search.begin = 1, search.end = 2, search.max_length = 12;
  JOB_TRY(status, luna_seq2seq_generate(&r->model.seq2seq, &(luna_input){ r->tokens, NULL, 2, 9, NULL }, &search, out,
                                        out_lengths));
  *bits = job_hash(job_hash(*bits, out, sizeof out), out_lengths, sizeof out_lengths);
  if (status == LUNA_OK) JOB_TRY(status, open_decoder(r, &stream));
  if (status == LUNA_OK) *bits = job_hash(*bits, luna_stream_step(stream, r->tokens), 4 * VOCAB * sizeof(float));
  luna_stream_close(stream);
  return status;
}

static void count_tensor(void *user, const luna_file_tensor *entry) { *(uint64_t *)user += (uint64_t)entry->count; }
/* saved, looked at, loaded as a model of its own in a second set and as a training run into this one, which then makes
   a step more */
static luna_status files(job_run *r, uint64_t *bits) {
  luna_model model;
  luna_params *params = NULL;
  luna_inspection inspection = {0};
  luna_load_report match = {0};
  luna_status status;
  JOB_TRY(status, luna_params_set_text(r->params, "where", "page 7"));
  if (status == LUNA_OK) JOB_TRY(status, luna_save(r->params, luna_path(path)));
  if (status == LUNA_OK) JOB_TRY(status, luna_load(r->params, luna_path(path)));
  if (status == LUNA_OK) JOB_TRY(status, luna_load_matching(r->params, luna_path(path), &match));
  inspection.tensor = count_tensor;
  inspection.user = bits;
  if (status == LUNA_OK) JOB_TRY(status, luna_inspect(r->ctx, luna_path(path), &inspection));
  if (status == LUNA_OK) JOB_TRY(status, job_given(r->ctx, params = luna_params_open(r->ctx)));
  if (status == LUNA_OK) JOB_TRY(status, luna_load_model(&model, params, luna_path(path)));
  if (status == LUNA_OK) *bits ^= job_hash_params(params);
  if (status == LUNA_OK) JOB_TRY(status, luna_save_training(r->optimizer, luna_path(path)));
  if (status == LUNA_OK) JOB_TRY(status, luna_load_training(r->optimizer, luna_path(path)));
  if (status == LUNA_OK) JOB_TRY(status, job_step(r));
  return status;
}

/* ---- every allocation; in a short run a part of them, unless `whole` ---- */
static void check_failures(const job *j, luna_status (*more)(job_run *r, uint64_t *bits), bool whole) {
  guard g = {0, 0, 0, 0, 0, 0, 0};
  luna_options options = guarded(&g);
  outcome expected;
  luna_ctx *ctx = luna_open(&options);
  CHECK(job_do(ctx, j, more, &expected) == LUNA_OK, "%s: %s", j->name, luna_error(ctx));
  luna_close(ctx);
  check_released(&g, j->name, -1);
  const int64_t total = g.calls;
  CHECK(total > 10, "%s: only %lld allocations to fail", j->name, (long long)total);
  for (int once = 0; once < 2; once++) /* all from the k-th on; the k-th alone */
    for (int64_t k = 0; k < total; k += whole ? 1 : EVERY) {
      outcome got;
      if (!whole && !test_due((int)(k + total))) continue;
      memset(&g, 0, sizeof g);
      g.fail_from = k;
      g.fail_to = once ? k + 1 : INT64_MAX;
      ctx = luna_open(&options);
      const luna_status status = ctx ? job_do(ctx, j, more, &got) : LUNA_OUT_OF_MEMORY;
      if (once && ctx)
        CHECK(status == LUNA_OK && memcmp(&got, &expected, sizeof got) == 0,
              "%s: after allocation %lld failed the call made again gives %.9g, not %.9g, or other parameters: %s",
              j->name, (long long)k, got.loss, expected.loss, luna_error(ctx));
      else {
        CHECK(status == LUNA_OUT_OF_MEMORY, "%s: allocation %lld failed: \"%s\"", j->name, (long long)k,
              luna_status_text(status));
        CHECK(!ctx || luna_error(ctx)[0], "%s: allocation %lld failed without a sentence", j->name, (long long)k);
      }
      luna_close(ctx);
      check_released(&g, j->name, k);
    }
  printf("out_of_memory: %s: %lld allocations\n", j->name, (long long)total);
}

/* Gradients of three rounds. Where one of them fails half-way no gradient is left, no optimiser steps, and parameters
   are as they were: all rounds are made again. */
static void check_forgotten(job_run *r, uint64_t before) {
  for (int64_t i = 0; i < luna_params_tensor_count(r->params); i++) {
    const luna_tensor *p = luna_params_at(r->params, i, NULL);
    for (int64_t at = 0; p->grad && at < luna_count(p); at++)
      if (!CHECK(p->grad[at] == 0, "a failed backward leaves a gradient: %g", (double)p->grad[at])) return;
  }
  CHECK(luna_optimizer_step(r->optimizer) == LUNA_OUT_OF_MEMORY, "a step by a part of the gradients");
  luna_begin_step(r->ctx);
  CHECK(luna_optimizer_step(r->optimizer) == LUNA_BAD_ARGUMENT && luna_error_id_of(r->ctx) == LUNA_ERROR_NO_BACKWARD,
        "a step by no gradients: \"%s\"", luna_error(r->ctx));
  CHECK(job_hash_params(r->params) == before, "a failed backward changes parameters");
}
static luna_status accumulate(job_run *r, uint64_t *bits) {
  const uint64_t before = job_hash_params(r->params);
  luna_status status = LUNA_OUT_OF_MEMORY;
  (void)bits;
  for (int attempt = 0; attempt < 2 && status == LUNA_OUT_OF_MEMORY; attempt++) {
    status = LUNA_OK;
    for (int64_t part = 1; part < 4 && status == LUNA_OK; part++) {
      luna_begin_step(r->ctx);
      luna_tensor *loss = luna_cross_entropy(luna_lm_forward(&r->model.lm,
          &(luna_input){ r->tokens, NULL, 1, part * 25, NULL }), r->tokens + 1, NULL);
      const bool forward = luna_error_status(r->ctx) == LUNA_OK;
      luna_backward(loss);
      status = luna_error_status(r->ctx);
      if (forward && status == LUNA_OUT_OF_MEMORY) {
        CHECK(luna_error_id_of(r->ctx) == LUNA_ERROR_BACKWARD_MEMORY && strstr(luna_error(r->ctx), "accumulate"),
              "a failed backward says \"%s\"", luna_error(r->ctx));
        check_forgotten(r, before);
        failed_backwards++;
      } else if (status == LUNA_OUT_OF_MEMORY) luna_params_zero_grad(r->params); /* the forward's: gradients stay */
    }
  }
  return status == LUNA_OK ? luna_optimizer_step(r->optimizer) : status;
}

int main(void) {
  static const job job[] = {
    {"a language model", JOB_LM, 40, 2, 2, false, false, LUNA_RECOMPUTE_NONE, 0.1f},
    {"a language model, feed-forwards computed again", JOB_LM, 40, 2, 2, false, false, LUNA_RECOMPUTE_FFN, 0.1f},
    {"a language model, layers computed again", JOB_LM, 40, 2, 2, false, false, LUNA_RECOMPUTE_LAYER, 0.1f},
    {"a softmax language model", JOB_LM, 40, 2, 2, false, true, LUNA_RECOMPUTE_LAYER, 0.1f},
    {"a language model of many words", JOB_LM_LARGE, 40, 1, 2, false, false, LUNA_RECOMPUTE_NONE, 0},
    {"a language model of many words without logits", JOB_LM_LARGE_LOSS, 40, 1, 2, false, false, LUNA_RECOMPUTE_LAYER,
     0},
    {"encoder layers", JOB_ENCODER, 60, 2, 2, false, false, LUNA_RECOMPUTE_NONE, 0},
    {"encoder layers computed again", JOB_ENCODER, 60, 2, 2, false, false, LUNA_RECOMPUTE_LAYER, 0},
    {"a classifier", JOB_CLASSIFIER, 40, 2, 2, false, false, LUNA_RECOMPUTE_NONE, 0.1f},
    {"a classifier, layers computed again", JOB_CLASSIFIER, 40, 2, 2, false, false, LUNA_RECOMPUTE_LAYER, 0.1f},
    {"a Linformer", JOB_CLASSIFIER, 40, 2, 2, false, true, LUNA_RECOMPUTE_FFN, 0.1f},
    {"a masked language model", JOB_MASKED_LM, 40, 2, 2, false, false, LUNA_RECOMPUTE_NONE, 0.1f},
    {"a masked language model, layers computed again", JOB_MASKED_LM, 40, 2, 2, false, false, LUNA_RECOMPUTE_LAYER,
     0.1f},
    {"an encoder-decoder", JOB_SEQ2SEQ, 40, 2, 2, false, false, LUNA_RECOMPUTE_NONE, 0.1f},
    {"an encoder-decoder, layers computed again", JOB_SEQ2SEQ, 40, 2, 2, false, false, LUNA_RECOMPUTE_LAYER, 0.1f},
    {"inference of a language model", JOB_LM, 150, 3, 2, true, false, LUNA_RECOMPUTE_NONE, 0},
    {"inference of a classifier", JOB_CLASSIFIER, 90, 2, 2, true, false, LUNA_RECOMPUTE_NONE, 0},
    {"inference of an encoder-decoder", JOB_SEQ2SEQ, 70, 2, 2, true, false, LUNA_RECOMPUTE_NONE, 0},
  };
  static const struct { struct job job; luna_status (*more)(job_run *r, uint64_t *bits); } with[] = {
    /* without dropout: a round that is made again is another begin */
    {{"accumulated gradients", JOB_LM, 40, 1, 1, false, true, LUNA_RECOMPUTE_NONE, 0}, accumulate},
    {{"streams", JOB_LM, 30, 2, 0, true, false, LUNA_RECOMPUTE_NONE, 0}, streams},
    {{"translations", JOB_SEQ2SEQ, 30, 2, 0, true, false, LUNA_RECOMPUTE_NONE, 0}, translations},
    {{"files of a language model", JOB_LM, 30, 1, 1, false, false, LUNA_RECOMPUTE_NONE, 0.1f}, files},
    {{"files of an encoder-decoder", JOB_SEQ2SEQ, 30, 1, 1, false, false, LUNA_RECOMPUTE_NONE, 0.1f}, files},
  };
  snprintf(path, sizeof path, "%s/tests/out_of_memory.safetensors", common_build());
  for (size_t i = 0; i < sizeof job / sizeof *job; i++) check_failures(&job[i], NULL, false);
  for (size_t i = 0; i < sizeof with / sizeof *with; i++)
    check_failures(&with[i].job, with[i].more, with[i].more == accumulate); /* few of which fail in backward */
  CHECK(failed_backwards > 0, "no backward of an accumulation has failed");
  remove(path);
  return test_report("out_of_memory");
}
