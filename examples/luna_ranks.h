/* luna_ranks.h: one model trained by several ranks, each a process with a context of its own, on one machine or many.
   Every rank makes the same model and the same calls in the same order, with sequences of its own. How ranks talk is in
   a luna_collective of two functions: luna_mpi.h makes it of MPI's calls, luna_nccl.h of NCCL's.

     luna_ranks ranks;
     if (luna_ranks_open(&ranks, params, optimizer, &collective) != LUNA_OK) ...   when the model is made or loaded
     for each step
       luna_ranks_begin_step(&ranks, &input, NULL);          input: this rank's sequences of the batch
       luna_tensor *loss = luna_lm_loss(&model, &input, labels);
       double value = luna_ranks_backward(&ranks, loss, luna_counted(loss));       the loss of the whole batch
       if (luna_ranks_step(&ranks) != LUNA_OK) puts(luna_error(ctx));
     if (collective.rank == 0) luna_save(params, luna_path("model.safetensors"));
     luna_ranks_close(&ranks);

   luna_input.batch and its arrays are a rank's part of the batch, in rank order. Parts may differ in number, or be
   empty; n is the same on all ranks. A step is then that of one rank with everything, up to rounding: dropout goes by
   the place in the whole batch (on a GPU each rank has masks of its own), a mean loss divides by the labels of all
   ranks, and gradients are summed before the optimiser clips and uses them. Sums have the same bits on all ranks, and
   so have the parameters.

   Parameters start equal: the same seed, names and file, and luna_input_layer_fit of the same data. (Random masking of
   tokens goes by the place in what it is given: mask the whole batch, then take the part.) Files say nothing of ranks:
   rank 0 saves, and any number of ranks resumes. luna_ranks_begin_step compares the ranks' builds, options, models,
   values and inputs, and luna_ranks_step their optimisers: LUNA_MISMATCH, with a sentence that names rank and
   difference. A rank that has failed says so in its next call of these, and the others fail with it; where one's
   luna_backward has failed, the gradients of all are zero. Once all know of a failure, nothing is sent until the next
   begin. A rank that makes no more calls leaves the others waiting: end them all (MPI_Abort), and resume from the last
   checkpoint. What one rank does alone, such as sampling or a validation, needs nothing of this file. With one rank
   nothing is sent.

   One sequence cannot be shared by several ranks. Guarded by tests/ranks/collective.c and tests/ranks/mpi.sh. */
#ifndef LUNA_RANKS_H
#define LUNA_RANKS_H
#include "luna.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef enum luna_reduction { LUNA_REDUCTION_SUM_F32 = 0, LUNA_REDUCTION_SUM_F64 } luna_reduction;
/* Both functions are called on the thread of the luna_ranks call, by every rank, in the same order; buffers are host
   memory. False: the call failed, and with it the step. Of a sum all ranks get the same bits, and the same again in
   another run. */
typedef struct luna_collective {
  int rank, ranks;                   /* 0 <= rank < ranks; 1 rank calls nothing */
  /* buffer: `count` floats or doubles, in place, of all ranks added up */
  bool (*all_reduce)(void *user, void *buffer, int64_t count, luna_reduction reduction);
  /* `bytes` bytes of each rank, in rank order, into all [ranks, bytes], on every rank */
  bool (*all_gather)(void *user, const void *mine, void *all, size_t bytes);
  void *user;
} luna_collective;

typedef struct luna_ranks {
  luna_collective collective;        /* a copy */
  luna_ctx *ctx;
  luna_params *params;
  luna_optimizer *optimizer;         /* or null */
  luna_status opened;                /* of luna_ranks_open */
  luna_status failed;                /* a failure of which all ranks know; the next begin clears it */
  luna_status untold;                /* a failure at a step's end, of which this rank alone knows */
  bool behind;                       /* after a failure, the other ranks count a step more than this one */
  uint64_t config, values, optimizer_config;   /* hashes; values: 0 once they have been compared */
  int64_t steps;                     /* how many have begun */
  bool sums;                         /* there are gradients that have not been summed */
  bool finite;                       /* the losses since the last sum are finite on all ranks */
  int64_t *all;                      /* [ranks, LUNA_RANKS_NUMBERS] what ranks compare */
  float *bucket;                     /* [room] gradients on their way */
  int64_t room;
} luna_ranks;

enum { LUNA_RANKS_NUMBERS = 16, LUNA_RANKS_MOST = 1 << 20, LUNA_RANKS_BUCKET = 1 << 18 };

/* ---- failures, and calls of the collective ---- */

static inline luna_status luna_ranks_differ(luna_ranks *r, const char *name, int64_t rank, const char *what,
                                            int64_t than, int64_t value, int64_t other) {
  char text[320];
  snprintf(text, sizeof text, "%s: rank %lld has another %s than rank %lld (%lld, not %lld); every rank makes the same "
           "models and calls", name, (long long)rank, what, (long long)than, (long long)value, (long long)other);
  return luna_fail(r->ctx, LUNA_MISMATCH, text);
}
static inline luna_status luna_ranks_impossible(luna_ranks *r, const char *name, const char *what, int64_t value,
                                                int64_t rank) {
  char text[320];
  snprintf(text, sizeof text, "%s: the collective gave %s %lld for rank %lld, which is impossible", name, what,
           (long long)value, (long long)rank);
  return luna_fail(r->ctx, LUNA_DEVICE_FAILED, text);
}
static inline luna_status luna_ranks_called(luna_ranks *r, const char *name, const char *what, bool good) {
  char text[320];
  if (good) return LUNA_OK;
  snprintf(text, sizeof text, "%s: the collective's %s failed on rank %d of %d", name, what, r->collective.rank,
           r->collective.ranks);
  return luna_fail(r->ctx, LUNA_DEVICE_FAILED, text);
}
static inline luna_status luna_ranks_says(luna_ranks *r, const char *name, luna_status status, const char *what) {
  char text[160];
  snprintf(text, sizeof text, "%s: %s", name, what);
  return luna_fail(r->ctx, status, text);
}
/* For what all ranks have got: whether each of them is fine. If not, this one fails too, and sends nothing more. */
static inline luna_status luna_ranks_agree(luna_ranks *r, const char *name, luna_status own, bool fine) {
  char text[160];
  if (fine) return LUNA_OK;
  snprintf(text, sizeof text, "%s: another rank than %d has failed in this step", name, r->collective.rank);
  if (own == LUNA_OK) own = luna_fail(r->ctx, LUNA_MISMATCH, text);
  if (r->collective.ranks > 1) r->failed = own;
  return own;
}
/* A context that measures calls nothing: all ranks count as like this one. */
static inline bool luna_ranks_measures(const luna_ranks *r) { return luna_options_of(r->ctx)->measure; }
static inline luna_status luna_ranks_reduce(luna_ranks *r, const char *name, void *buffer, int64_t count,
                                            luna_reduction what) {
  const luna_collective *c = &r->collective;
  if (r->failed != LUNA_OK || c->ranks == 1 || count == 0 || luna_ranks_measures(r)) return r->failed;
  r->failed = luna_ranks_called(r, name, "all_reduce", c->all_reduce(c->user, buffer, count, what));
  return r->failed;
}
/* Gathers numbers of all ranks into r->all [ranks, count]. */
static inline luna_status luna_ranks_gather(luna_ranks *r, const char *name, const int64_t *mine, int count) {
  const luna_collective *c = &r->collective;
  const size_t bytes = (size_t)count * sizeof *mine;
  if (!luna_ranks_measures(r)) {
    r->failed = luna_ranks_called(r, name, "all_gather", c->all_gather(c->user, mine, r->all, bytes));
    return r->failed;
  }
  for (int i = 0; i < c->ranks; i++) memcpy(r->all + i * count, mine, bytes);
  return LUNA_OK;
}
/* Compares those gathered numbers that have a name in `what`. */
static inline luna_status luna_ranks_compare(luna_ranks *r, const char *name, const char *const *what, int count) {
  for (int i = 0; i < r->collective.ranks && r->failed == LUNA_OK; i++)
    for (int k = 0; k < count && r->failed == LUNA_OK; k++)
      if (what[k] && r->all[i * count + k] != r->all[k])
        r->failed = luna_ranks_differ(r, name, i, what[k], 0, r->all[i * count + k], r->all[k]);
  return r->failed;
}

/* ---- what ranks compare ---- */

static inline uint64_t luna_ranks_hash(uint64_t hash, const void *bytes, size_t size) {
  const unsigned char *at = (const unsigned char *)bytes;
  for (size_t i = 0; i < size; i++) hash = (hash ^ at[i]) * 1099511628211u;
  return hash;
}
/* The hashes of a file that is never stored: its header has names, shapes and configs, and its rest the values. Of a
   training the texts at the header's beginning tell the optimiser's config; what follows them also has states that a
   rank carries of its own sequences. */
typedef struct luna_ranks_file {
  unsigned char length[8];           /* of the header */
  uint64_t at, header, values;
  bool wants_values, texts_alone, texts_ended;
} luna_ranks_file;
static inline bool luna_ranks_write(void *user, const void *bytes, size_t size) {
  luna_ranks_file *f = (luna_ranks_file *)user;
  const unsigned char *at = (const unsigned char *)bytes;
  uint64_t length = 0;
  for (; size > 0 && f->at < 8; at++, size--) f->length[f->at++] = *at;
  for (int i = 7; i >= 0; i--) length = length << 8 | f->length[i];
  const uint64_t left = f->at < 8 + length ? 8 + length - f->at : 0;
  const size_t header = left < size ? (size_t)left : size;
  for (size_t i = 0; i < header && !f->texts_ended; i++) {
    f->header = luna_ranks_hash(f->header, at + i, 1);
    f->texts_ended = f->texts_alone && at[i] == '}';
  }
  if (f->wants_values) f->values = luna_ranks_hash(f->values, at + header, size - header);
  f->at += size;
  return true;
}
/* Of a failed init nothing is compared: the next begin fails with its sentence, and tells the others. */
static inline void luna_ranks_look(luna_ranks *r) {
  luna_ranks_file model, training;
  luna_io to_model, to_training;
  memset(&model, 0, sizeof model);
  memset(&to_model, 0, sizeof to_model);
  training = model;
  to_training = to_model;
  model.wants_values = true;
  training.texts_alone = true;
  to_model.write = to_training.write = luna_ranks_write;
  to_model.user = &model;
  to_training.user = &training;
  if (luna_save(r->params, luna_callbacks(&to_model)) != LUNA_OK) return;
  r->config = model.header;
  r->values = model.values;
  if (r->optimizer && luna_save_training(r->optimizer, luna_callbacks(&to_training)) == LUNA_OK)
    r->optimizer_config = training.header;
}
/* the parameters' names and shapes, and which of them learn */
static inline uint64_t luna_ranks_parameters(const luna_ranks *r) {
  uint64_t hash = r->config;
  for (int64_t i = 0; i < luna_params_tensor_count(r->params); i++) {
    const char *name = "";
    const luna_tensor *t = luna_params_at(r->params, i, &name);
    hash = luna_ranks_hash(hash, name, strlen(name));
    hash = luna_ranks_hash(hash, t->shape, sizeof t->shape) + t->needs_grad;
  }
  return hash;
}
/* the instruction set, by its bits: 8 bits are exact, and without products in 16 bits the later sets are AVX-512 */
static inline luna_isa luna_ranks_isa(const luna_ranks *r) {
  const luna_isa isa = luna_isa_of(r->ctx);
  const bool avx512 = isa == LUNA_ISA_AVX512_VNNI || isa == LUNA_ISA_AVX512_BF16 || isa == LUNA_ISA_AMX;
  if (isa == LUNA_ISA_AVX2_VNNI) return LUNA_ISA_AVX2;
  if (avx512 && luna_options_of(r->ctx)->products == LUNA_DTYPE_F32) return LUNA_ISA_AVX512;
  return isa;
}
static inline int64_t luna_ranks_longest(const luna_input *input) {
  int64_t longest = 1;
  if (!input) return 0;
  for (int64_t b = 0; b < (int64_t)input->batch; b++) {
    const int64_t rows = input->lengths ? input->lengths[b] : (int64_t)input->n;
    if (rows > longest) longest = rows;
  }
  return longest < (int64_t)input->n || input->n < 1 ? longest : (int64_t)input->n;
}

/* ---- the steps ---- */

static inline void luna_ranks_close(luna_ranks *r) {
  free(r->all);
  free(r->bucket);
  memset(r, 0, sizeof *r);
}
/* Call it after the model is made or loaded, and the optimiser too, which may be null. Nothing is sent yet. The context
   must outlive it. On failure luna_error has the sentence. */
static inline luna_status luna_ranks_open(luna_ranks *r, luna_params *params, luna_optimizer *optimizer,
                                          const luna_collective *collective) {
  memset(r, 0, sizeof *r);
  r->params = params;
  r->optimizer = optimizer;
  r->ctx = luna_params_ctx(params);
  r->collective.ranks = 1;
  r->finite = true;
  r->opened = LUNA_BAD_ARGUMENT;
  if (!r->ctx) return r->opened;
  if (collective && (collective->rank < 0 || collective->rank >= collective->ranks ||
                     collective->ranks > LUNA_RANKS_MOST))
    return luna_fail(r->ctx, r->opened, "luna_ranks_open: the collective has a rank outside 0..ranks - 1, or "
                     "more than 1048576 ranks");
  if (collective && collective->ranks > 1 && (!collective->all_reduce || !collective->all_gather))
    return luna_fail(r->ctx, r->opened, "luna_ranks_open: the collective lacks all_reduce or all_gather");
  r->opened = LUNA_OK;
  if (!collective) return LUNA_OK;
  r->collective = *collective;
  if (r->collective.ranks == 1) return LUNA_OK;
  r->room = LUNA_RANKS_BUCKET;
  if (luna_params_element_count(params) < r->room) r->room = luna_params_element_count(params);
  for (int64_t i = 0; i < luna_params_tensor_count(params); i++) {
    const int64_t count = luna_count(luna_params_at(params, i, NULL));
    if (count > r->room) r->room = count;
  }
  r->all = (int64_t *)malloc((size_t)r->collective.ranks * LUNA_RANKS_NUMBERS * sizeof *r->all);
  r->bucket = (float *)malloc((size_t)(r->room + 1) * sizeof *r->bucket);
  if (r->all && r->bucket) {
    luna_ranks_look(r);
    return LUNA_OK;
  }
  luna_ranks_close(r);
  r->ctx = luna_params_ctx(params);
  r->collective.ranks = 1;
  r->opened = LUNA_OUT_OF_MEMORY;
  return luna_fail(r->ctx, r->opened, "luna_ranks_open: no memory for a bucket of gradients");
}

/* The part of the batch that this rank has, from what all ranks have sent: `at` is where batch, n and longest are. */
static inline luna_status luna_ranks_take_part(luna_ranks *r, const char *name, int64_t batch, int count, int at) {
  luna_part part = { 0, 0, 0 };
  int64_t whole = 0, n = -1, from = 0;
  for (int i = 0; i < r->collective.ranks; i++) {
    const int64_t *other = r->all + i * count + at;
    if (other[0] < 0 || other[0] > ((int64_t)1 << 40) || (whole += other[0]) > ((int64_t)1 << 40))
      return luna_ranks_impossible(r, name, "a batch", other[0], i);
    if (i < r->collective.rank) part.first += other[0];
    if (other[0] == 0) continue;
    if (n >= 0 && n != other[1])
      return luna_ranks_differ(r, name, i, "length n of its sequences", from, other[1], n);
    n = other[1];
    from = i;
    if (other[2] > part.longest) part.longest = other[2];
    if (other[3] > part.target_longest) part.target_longest = other[3];
  }
  const int64_t own = r->all[r->collective.rank * count + at];
  if (own != batch) return luna_ranks_impossible(r, name, "a number of its own", own, r->collective.rank);
  return luna_begin_part(r->ctx, &part);
}
/* Whether some rank has failed at the end of the step before, and not all in the same way: number `at` of each is then
   minus its status. Values may differ from now on, so the next begin compares them again. */
static inline luna_status luna_ranks_told(luna_ranks *r, const char *name, int count, int at) {
  char text[160];
  int failed = -1;
  bool same = true;
  for (int i = 0; i < r->collective.ranks; i++) {
    same = same && r->all[i * count + at] == r->all[at];
    if (failed < 0 && r->all[i * count + at] < 0) failed = i;
  }
  if (same || failed < 0) return LUNA_OK;
  luna_ranks_look(r);
  snprintf(text, sizeof text, "%s: rank %d has failed at the end of the step before: %s", name, failed,
           luna_status_text((luna_status)(0 - (uint64_t)r->all[failed * count + at])));
  r->failed = luna_fail(r->ctx, LUNA_MISMATCH, text);
  return r->failed;
}
static inline luna_status luna_ranks_begin(luna_ranks *r, bool training, const luna_input *input,
                                           const luna_input *target) {
  static const char *const what[] = { NULL, "version of luna.h", "build", "number of ranks", "instruction set",
                                      "options.form", "options.seed", "call to begin a step", "number of steps",
                                      "outcome of its inits", "set of parameters' names and shapes, or config",
                                      "value of some parameter", NULL, NULL, NULL, NULL };
  const char *name = training ? "luna_ranks_begin_step" : "luna_ranks_begin_inference";
  enum { COUNT = sizeof what / sizeof *what };
  if (!r->ctx) return LUNA_BAD_ARGUMENT;
  if (r->opened != LUNA_OK) return luna_ranks_says(r, name, r->opened, "luna_ranks_open has failed");
  const luna_options *o = luna_options_of(r->ctx);
  const bool repeats = r->behind && training && luna_error_status(r->ctx) != LUNA_OK; /* luna_begin_step does */
  luna_status begun = training ? luna_begin_step(r->ctx) : luna_begin_inference(r->ctx);
  if (repeats && begun == LUNA_OK) begun = luna_begin_step(r->ctx);
  r->behind = repeats && begun != LUNA_OK;
  r->failed = LUNA_OK;
  if (r->collective.ranks == 1) return begun;
  const int64_t batch = input ? (int64_t)input->batch : 0;
  const int64_t mine[] = {
    r->collective.rank, LUNA_VERSION_NUMBER, (int64_t)(sizeof *r << 16 | sizeof(luna_options) << 8 | sizeof(void *)),
    r->collective.ranks, luna_ranks_isa(r), o->form, (int64_t)o->seed, training, r->steps,
    begun != LUNA_OK ? (int64_t)begun : -(int64_t)r->untold,
    begun == LUNA_OK ? (int64_t)luna_ranks_parameters(r) : 0, (int64_t)r->values, batch,
    input ? (int64_t)input->n : 0, luna_ranks_longest(input), luna_ranks_longest(target) };
  luna_status status = luna_ranks_gather(r, name, mine, COUNT);
  if (status == LUNA_OK && begun == LUNA_OK) r->untold = LUNA_OK;
  if (status == LUNA_OK) status = luna_ranks_told(r, name, COUNT, 9);
  if (status == LUNA_OK) status = luna_ranks_compare(r, name, what, COUNT);
  if (begun != LUNA_OK) return begun;
  for (int i = 0; status == LUNA_OK && i < r->collective.ranks && !o->measure; i++)
    if (r->all[i * COUNT] != i) status = luna_ranks_impossible(r, name, "the rank", r->all[i * COUNT], i);
  if (status == LUNA_OK) status = luna_ranks_take_part(r, name, batch, COUNT, 12);
  if (status != LUNA_OK) return status;
  r->values = 0;
  r->steps += training;
  return LUNA_OK;
}
/* Begins a step. input: what this rank gives the model, and of several inputs the longest; target: the second input of
   luna_seq2seq_forward, or null. */
static inline luna_status luna_ranks_begin_step(luna_ranks *r, const luna_input *input, const luna_input *target) {
  return luna_ranks_begin(r, true, input, target);
}
/* Likewise without training: for a validation that all ranks share. */
static inline luna_status luna_ranks_begin_inference(luna_ranks *r, const luna_input *input, const luna_input *target) {
  return luna_ranks_begin(r, false, input, target);
}

/* This rank's share of a mean over all ranks' labels, of which it has `counted`; -1: its loss is a part of a sum. Fails
   on all ranks where one has failed, and r->failed then says that all know. */
static inline luna_status luna_ranks_share(luna_ranks *r, const char *name, const luna_tensor *loss, int64_t counted,
                                           double *share) {
  double all = counted < 0 ? 0 : (double)counted;
  if (!loss) luna_ranks_says(r, name, LUNA_BAD_ARGUMENT, "the loss is null");
  const luna_status own = luna_error_status(r->ctx);
  *share = 1;
  if (r->collective.ranks == 1 || luna_ranks_measures(r)) return luna_ranks_agree(r, name, own, own == LUNA_OK);
  if (own != LUNA_OK) all = (double)NAN;                   /* the others learn of it by the sum */
  luna_status status = luna_ranks_reduce(r, name, &all, 1, LUNA_REDUCTION_SUM_F64);
  if (status == LUNA_OK) status = luna_ranks_agree(r, name, own, !isnan(all));
  if (status != LUNA_OK || counted < 0) return status;
  if (!(all >= (double)counted && all <= 4e18))
    return luna_ranks_impossible(r, name, "a count of labels below", counted, r->collective.rank);
  *share = all > 0 ? (double)counted / all : 0;
  return LUNA_OK;
}
/* Whole batch's loss, of this rank's value and share; NaN after a failure of any rank */
static inline double luna_ranks_whole(luna_ranks *r, const char *name, const luna_tensor *loss, double share) {
  float value = (float)NAN;
  const luna_status read = luna_count(loss) == 1 ? luna_read(loss, &value) : LUNA_BAD_ARGUMENT;
  if (read != LUNA_OK) luna_ranks_says(r, name, read, "the loss is not one number that can be read");
  const luna_status own = luna_error_status(r->ctx);
  double all[2] = { share == 0 || own != LUNA_OK ? 0 : (double)value * share, own != LUNA_OK ? 1.0 : 0.0 };
  const luna_status status = luna_ranks_reduce(r, name, all, 2, LUNA_REDUCTION_SUM_F64);
  return status == LUNA_OK && luna_ranks_agree(r, name, own, all[1] == 0) == LUNA_OK ? all[0] : (double)NAN;
}
/* The loss over all ranks, without a gradient; counted as in luna_ranks_backward. NaN after a failure. */
static inline double luna_ranks_loss(luna_ranks *r, const luna_tensor *loss, int64_t counted) {
  static const char name[] = "luna_ranks_loss";
  double share;
  if (!r->ctx) return (double)NAN;
  luna_ranks_share(r, name, loss, counted, &share);
  return r->failed == LUNA_OK ? luna_ranks_whole(r, name, loss, share) : (double)NAN;
}
/* Differentiates this rank's part of the loss, and returns the loss over all ranks; NaN after a failure, whose sentence
   luna_error has. loss: the mean over `counted` labels or rows of this rank, which luna_counted(loss) says, or you
   where the mean is your own; with -1 it is a part of a sum. */
static inline double luna_ranks_backward(luna_ranks *r, luna_tensor *loss, int64_t counted) {
  static const char name[] = "luna_ranks_backward";
  double share;
  if (!r->ctx) return (double)NAN;
  luna_status status = luna_ranks_share(r, name, loss, counted, &share);
  if (r->failed != LUNA_OK) return (double)NAN;
  const bool weighted = r->collective.ranks > 1 && counted >= 0;
  if (status == LUNA_OK) status = luna_backward(weighted ? luna_scale(loss, (float)share) : loss);
  if (status != LUNA_OK) luna_ranks_says(r, name, status, "luna_backward has failed");
  r->behind = status != LUNA_OK && r->collective.ranks > 1;
  const double whole = luna_ranks_whole(r, name, loss, share);
  r->sums = luna_error_status(r->ctx) == LUNA_OK;
  if (r->sums && !luna_ranks_measures(r) && !isfinite(whole)) r->finite = false;
  if (r->sums || r->collective.ranks == 1) return whole;
  luna_params_zero_grad(r->params);                        /* as on the rank whose luna_backward failed */
  r->finite = true;
  return whole;
}

/* Whether any rank has a gradient of parameter i. Where ranks differ, they exchange which ones each has. */
static inline bool luna_ranks_has_gradient(const luna_ranks *r, int64_t i) {
  const luna_tensor *t = luna_params_at(r->params, i, NULL);
  return t->grad || (luna_ranks_measures(r) && t->needs_grad);
}
static inline luna_status luna_ranks_reached(luna_ranks *r, const char *name, float *reached) {
  const int64_t count = luna_params_tensor_count(r->params);
  bool same = true;
  for (int64_t i = 0; i < count; i++) reached[i] = luna_ranks_has_gradient(r, i);
  for (int i = 1; i < r->collective.ranks; i++) same = same && r->all[3 * i + 2] == r->all[2];
  return same ? LUNA_OK : luna_ranks_reduce(r, name, reached, count, LUNA_REDUCTION_SUM_F32);
}
/* Sums the gradients of parameters first .. end - 1, which fit into the bucket. A rank that cannot read one of its own
   makes the calls all the same, with NaN, so that no rank uses the sum. */
static inline luna_status luna_ranks_sum_bucket(luna_ranks *r, const char *name, const float *reached, int64_t first,
                                                int64_t end) {
  luna_status own = LUNA_OK, status = LUNA_OK;
  int64_t size = 0;
  for (int64_t i = first; i < end; i++) {
    const luna_tensor *t = luna_params_at(r->params, i, NULL);
    if (!(reached[i] > 0)) continue;
    if (luna_ranks_has_gradient(r, i)) status = luna_read_grad(t, r->bucket + size);
    else memset(r->bucket + size, 0, (size_t)luna_count(t) * sizeof(float));
    if (status != LUNA_OK) {
      own = status;
      r->bucket[size] = (float)NAN;
    }
    size += luna_count(t);
  }
  for (int64_t at = 0; at < size; at += LUNA_RANKS_BUCKET) {
    const int64_t left = size - at, most = LUNA_RANKS_BUCKET, n = left < most ? left : most;
    status = luna_ranks_reduce(r, name, r->bucket + at, n, LUNA_REDUCTION_SUM_F32);
    if (status != LUNA_OK) return status;
  }
  if (!r->finite && size > 0) r->bucket[0] = (float)NAN;   /* a loss that is not finite skips the step on all ranks */
  size = 0;
  for (int64_t i = first; i < end && own == LUNA_OK; i++) {
    luna_tensor *t = luna_params_at(r->params, i, NULL);
    if (!(reached[i] > 0)) continue;
    own = luna_write_grad(t, r->bucket + size);
    size += luna_count(t);
  }
  return own;
}
static inline luna_status luna_ranks_sum_all(luna_ranks *r, const char *name, const float *reached) {
  const int64_t count = luna_params_tensor_count(r->params);
  luna_status own = LUNA_OK;
  for (int64_t first = 0, end = 0; first < count && r->failed == LUNA_OK; first = end) {
    int64_t size = 0;
    for (; end < count; end++) {
      const int64_t more = reached[end] > 0 ? luna_count(luna_params_at(r->params, end, NULL)) : 0;
      if (size + more > r->room) break;
      size += more;
    }
    if (end == first)
      r->failed = luna_fail(r->ctx, LUNA_MISMATCH, "luna_ranks_sum: a parameter was made after luna_ranks_open");
    const luna_status status = luna_ranks_sum_bucket(r, name, reached, first, end);
    if (own == LUNA_OK) own = status;
  }
  return r->failed != LUNA_OK ? r->failed : own;
}
/* Sums the gradients over ranks, once a step, after the last luna_ranks_backward. Afterwards each rank has the
   gradients of the whole batch, for updates of your own: luna_params_clip_grad clips them as on one rank. */
static inline luna_status luna_ranks_sum(luna_ranks *r) {
  static const char *const what[] = { "number of optimiser steps", "kind or config of its optimiser", NULL };
  static const char name[] = "luna_ranks_sum";
  enum { COUNT = sizeof what / sizeof *what };
  if (!r->ctx) return LUNA_BAD_ARGUMENT;
  if (r->failed != LUNA_OK) return r->failed;
  if (r->collective.ranks == 1 || !r->sums) return luna_error_status(r->ctx);
  const int64_t count = luna_params_tensor_count(r->params);
  const int64_t tried = luna_optimizer_steps(r->optimizer) + luna_optimizer_skipped(r->optimizer);
  const float lr = luna_optimizer_lr(r->optimizer);
  float *reached = (float *)malloc((size_t)(count + 1) * sizeof *reached);
  if (!reached) luna_ranks_says(r, name, LUNA_OUT_OF_MEMORY, "no memory");
  const luna_status own = luna_error_status(r->ctx);       /* a failure goes as a number below 0 */
  int64_t mine[COUNT] = { own == LUNA_OK ? tried : -1,
                          (int64_t)luna_ranks_hash(r->optimizer_config, &lr, sizeof lr), 0 };
  for (int64_t i = 0; i < count; i++)
    if (luna_ranks_has_gradient(r, i)) mine[2] = (int64_t)((uint64_t)mine[2] * 31 + (uint64_t)i + 1);
  luna_status status = luna_ranks_gather(r, name, mine, COUNT);
  bool fine = true;
  for (int i = 0; i < r->collective.ranks && status == LUNA_OK; i++) fine = fine && r->all[COUNT * i] >= 0;
  if (status == LUNA_OK) status = luna_ranks_agree(r, name, own, fine);
  if (status == LUNA_OK) status = luna_ranks_compare(r, name, what, COUNT);
  if (status != LUNA_OK) {
    free(reached);
    return status;
  }
  status = luna_ranks_reached(r, name, reached);
  if (status == LUNA_OK) status = luna_ranks_sum_all(r, name, reached);
  free(reached);
  if (status != LUNA_OK) luna_ranks_says(r, name, status, "gradients cannot be read or written");
  if (r->failed == LUNA_OK) r->untold = status;
  r->sums = false;
  r->finite = true;
  return status;
}
/* The sum, and the optimiser's step. */
static inline luna_status luna_ranks_step(luna_ranks *r) {
  const luna_status status = luna_ranks_sum(r);
  if (status != LUNA_OK) return status;
  r->untold = luna_optimizer_step(r->optimizer);
  return r->untold;
}
#endif
