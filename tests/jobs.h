/* What memory.c and out_of_memory.c do with a context: train and run every model, and what stands around them. Include
   it after luna.h, test.h and common.h. A call that fails for want of memory is made a second time, so that a job in
   which one allocation fails ends with the bits of one where none does. */
#ifndef JOBS_H
#define JOBS_H
#include "examples/attentions/attentions.h"
#include "examples/luna_apollo.h"

enum { VOCAB = 23, LARGE_VOCAB = 1100, DIM = 16 };

/* LARGE: of a large vocabulary, trained by its logits; LARGE_LOSS: by luna_lm_loss */
typedef enum job_model {
  JOB_LM, JOB_LM_LARGE, JOB_LM_LARGE_LOSS, JOB_ENCODER, JOB_CLASSIFIER, JOB_MASKED_LM, JOB_SEQ2SEQ
} job_model;
typedef struct job {
  const char *name;
  job_model model;
  int64_t n, layers;
  int steps;
  /* other: SGD instead of Adam; Linformer in the classifier, softmax attention in the language model */
  bool inference, other;
  luna_recompute_kind recompute;
  float dropout;
} job;
typedef struct outcome {
  double loss;
  uint64_t bits; /* of everything computed: parameters, logits, results */
} outcome;

#define JOB_TRY(status, call) \
  do { \
    (status) = (call); \
    if ((status) == LUNA_OUT_OF_MEMORY) (status) = (call); \
  } while (0)

static uint64_t job_hash(uint64_t bits, const void *bytes, size_t size) {
  for (size_t i = 0; i < size; i++) bits = (bits ^ ((const unsigned char *)bytes)[i]) * 0x100000001B3u;
  return bits;
}
static uint64_t job_hash_params(const luna_params *params) {
  uint64_t bits = 0xCBF29CE484222325u;
  for (int64_t i = 0; i < luna_params_tensor_count(params); i++) {
    const luna_tensor *p = luna_params_at(params, i, NULL);
    if (p->data) bits = job_hash(bits, p->data, (size_t)luna_count(p) * sizeof(float));
  }
  return bits;
}
/* a null result must have a failure beside it */
static luna_status job_given(luna_ctx *ctx, const void *result) {
  return result ? LUNA_OK : luna_error_status(ctx) == LUNA_OK ? LUNA_UNSUPPORTED : luna_error_status(ctx);
}

/* everything that a job makes */
typedef struct job_run {
  const job *j;
  luna_ctx *ctx;
  luna_params *params;
  luna_model model;
  luna_encoder_layer layer[8];
  int64_t made; /* layers initialised */
  luna_tensor *slots, *loss;
  luna_optimizer *optimizer;
  int32_t *tokens;
} job_run;

static luna_status job_open_params(job_run *r) { return job_given(r->ctx, r->params = luna_params_open(r->ctx)); }

static luna_status job_init_encoder(job_run *r) {
  luna_layer_config config = {0};
  const int64_t memory[2] = {5, DIM};
  const luna_init init = {LUNA_INIT_NORMAL, 1};
  luna_status status = LUNA_OK;
  config.dim = DIM, config.heads = 4, config.ffn = 24;
  config.recompute = r->j->recompute;
  if (!r->slots) r->slots = luna_param(r->params, "p", 2, memory, init);
  status = job_given(r->ctx, r->slots);
  while (r->made < r->j->layers && status == LUNA_OK) {
    char name[16];
    snprintf(name, sizeof name, "%d.", (int)r->made);
    status = luna_encoder_layer_init(&r->layer[r->made], r->params, name, &config);
    if (status == LUNA_OK) r->made++;
  }
  return status;
}

static const luna_attention_hook *job_linformer(void) {
  static attentions choice;          /* as long as the program: contexts end without it */
  if (!choice.system) CHECK(attentions_open(&choice, "linformer k=7"), "%s", choice.error);
  return &choice.hook;
}
/* with padding, every kind of position and of optimiser */
static luna_status job_init(job_run *r) {
  const job *j = r->j;
  luna_lm_config lm = {0};
  luna_classifier_config classifier = {0};
  luna_masked_lm_config masked_lm = {0};
  luna_seq2seq_config seq2seq = {0};
  luna_encoder_config encoder = {0};
  encoder.layers = j->layers, encoder.layer.memory = 5, encoder.max_length = j->n;
  encoder.layer.dim = DIM, encoder.layer.heads = 2, encoder.layer.ffn = 24;
  encoder.norm_embedding = true;
  encoder.positions = j->model == JOB_MASKED_LM ? LUNA_POSITIONS_LEARNED : LUNA_POSITIONS_SINUSOIDAL;
  encoder.layer.dropout = j->dropout;
  encoder.layer.recompute = j->recompute;
  classifier.vocab = masked_lm.vocab = seq2seq.vocab = lm.vocab = VOCAB;
  classifier.encoder = masked_lm.encoder = seq2seq.encoder = encoder;
  if (j->model != JOB_LM) lm.vocab = LARGE_VOCAB;
  lm.layers = j->layers, lm.layer.memory = 4;
  lm.layer.dim = DIM, lm.layer.heads = 2, lm.layer.ffn = 24, lm.layer.convolution = 4;
  lm.layer.dropout = j->dropout;
  lm.layer.recompute = j->recompute;
  if (j->other) {
    lm.layer.attention = LUNA_ATTENTION_SOFTMAX;
    classifier.encoder.layer.hook = job_linformer();
  }
  switch (j->model) {
    case JOB_LM: case JOB_LM_LARGE: case JOB_LM_LARGE_LOSS: return luna_lm_init(&r->model.lm, r->params, &lm);
    case JOB_ENCODER: return job_init_encoder(r);
    case JOB_CLASSIFIER: return luna_classifier_init(&r->model.classifier, r->params, &classifier);
    case JOB_MASKED_LM: return luna_masked_lm_init(&r->model.masked_lm, r->params, &masked_lm);
    default: return luna_seq2seq_init(&r->model.seq2seq, r->params, &seq2seq);
  }
}

static luna_status job_open_optimizer(job_run *r) {
  r->optimizer = r->j->other ? luna_sgd(r->params, NULL)
                 : r->j->model == JOB_CLASSIFIER ? luna_adam(r->params, NULL)
                 : r->j->model == JOB_MASKED_LM ? luna_apollo(r->params, NULL) : luna_adamw(r->params, NULL);
  return job_given(r->ctx, r->optimizer);
}

static luna_tensor *job_forward(job_run *r) {
  const job *j = r->j;
  const int32_t *tokens = r->tokens, lengths[2] = {(int32_t)j->n, 3}, labels[2] = {1, 0};
  if (j->model == JOB_LM_LARGE_LOSS)
    return luna_lm_loss(&r->model.lm, &(luna_input){ tokens, NULL, 2, j->n, NULL }, tokens + 1);
  if (j->model == JOB_LM || j->model == JOB_LM_LARGE)
    return luna_cross_entropy(luna_lm_forward(&r->model.lm, &(luna_input){ tokens, NULL, 2, j->n, NULL }), tokens + 1,
                              NULL);
  if (j->model == JOB_CLASSIFIER)
    return luna_cross_entropy(luna_classifier_forward(&r->model.classifier,
                                                      &(luna_input){ tokens, lengths, 2, j->n, NULL }), labels, NULL);
  if (j->model == JOB_MASKED_LM)
    return luna_masked_lm_loss(&r->model.masked_lm, &(luna_input){ tokens, lengths, 2, j->n, NULL }, tokens + 1);
  if (j->model == JOB_SEQ2SEQ)
    return luna_cross_entropy(luna_seq2seq_forward(&r->model.seq2seq, &(luna_input){ tokens, lengths, 2, j->n, NULL },
                                                   &(luna_input){ tokens + 1, NULL, 2, j->n / 2, NULL }), tokens, NULL);
  const int64_t shape[3] = {1, j->n, DIM}, flat[2] = {1, j->n * DIM};
  luna_tensor *x = luna_tensor_new(r->ctx, NULL, 3, shape), *p = luna_expand(r->slots, 1);
  for (int64_t i = 0; i < j->layers; i++) x = luna_encoder_layer_forward(&r->layer[i], x, &p, NULL);
  return luna_mean(luna_reshape(x, 2, flat), 1);
}
static luna_status job_step(job_run *r) {
  if (r->j->inference) luna_begin_inference(r->ctx);
  else luna_begin_step(r->ctx);
  r->loss = job_forward(r);
  if (luna_error_status(r->ctx) != LUNA_OK || r->j->inference)
    return r->loss ? luna_error_status(r->ctx) : job_given(r->ctx, NULL);
  if (!r->loss) return LUNA_UNSUPPORTED;
  luna_backward(r->loss);
  return luna_optimizer_step(r->optimizer);
}

/* Returns the first failure that a second try does not mend, and what came out. `more`, if not null, goes on with what
   was made. */
static luna_status job_do(luna_ctx *ctx, const job *j, luna_status (*more)(job_run *r, uint64_t *bits),
                          outcome *result) {
  job_run r;
  luna_status status;
  memset(&r, 0, sizeof r);
  memset(result, 0, sizeof *result);
  r.j = j;
  r.ctx = ctx;
  r.tokens = common_tokens(4 * j->n, 8, VOCAB);
  JOB_TRY(status, job_open_params(&r));
  if (status == LUNA_OK) JOB_TRY(status, job_init(&r));
  if (status == LUNA_OK && !j->inference) JOB_TRY(status, job_open_optimizer(&r));
  for (int step = 0; step < j->steps && status == LUNA_OK; step++) JOB_TRY(status, job_step(&r));
  if (status == LUNA_OK && j->steps) result->loss = (double)luna_item(r.loss);
  if (status == LUNA_OK && more) status = more(&r, &result->bits);
  if (status == LUNA_OK) result->bits ^= job_hash_params(r.params);
  free(r.tokens);
  return status;
}

/* ---- an allocator that counts, and fails where it is asked to ---- */
typedef struct guard {
  int64_t calls, fail_from, fail_to; /* calls with a number in [fail_from, fail_to) fail */
  int64_t live, blocks, max, wrong;
} guard;
static void *guard_allocate(void *user, size_t bytes) {
  guard *g = (guard *)user;
  const int64_t call = g->calls++;
  if (call >= g->fail_from && call < g->fail_to) return NULL;
  char *p = (char *)malloc(bytes + 24); /* its size in front, and an alignment of only 8 */
  if (!p) exit(2);
  memset(p, 0xA5, bytes + 24);
  memcpy(p, &bytes, sizeof bytes);
  g->live += (int64_t)bytes;
  g->blocks++;
  if (g->live > g->max) g->max = g->live;
  return p + 24;
}
static void guard_release(void *user, void *pointer, size_t bytes) {
  guard *g = (guard *)user;
  size_t size;
  char *p = (char *)pointer - 24;
  memcpy(&size, p, sizeof size);
  if (size != bytes) g->wrong++;
  g->live -= (int64_t)size;
  g->blocks--;
  free(p);
}
static luna_options guarded(guard *g) {
  luna_options options = {0};
  options.threads = 1;
  options.allocator.allocate = guard_allocate;
  options.allocator.release = guard_release;
  options.allocator.user = g;
  return options;
}
static void check_released(const guard *g, const char *what, int64_t at) {
  CHECK(g->live == 0 && g->blocks == 0, "%s, allocation %lld failed: %lld bytes in %lld blocks leak", what,
        (long long)at,
        (long long)g->live, (long long)g->blocks);
  CHECK(g->wrong == 0, "%s, allocation %lld failed: %lld releases with another size", what, (long long)at,
        (long long)g->wrong);
}

#endif
