/* luna_beam.h: beam search for the translations of a luna_seq2seq. Include it after luna.h; it uses only what luna.h
   declares, so that it is also an example of how to write a search of your own:

     int32_t out[BATCH * 60], lengths[BATCH];
     float scores[BATCH];
     luna_beam_config search = { .begin = END, .end = END, .beam = 4, .max_length = 60 };
     luna_beam_search(&model, &source, &search, out, lengths, scores);

   luna_seq2seq_stream_open gives each source `beam` sequences. At every step the 2 beam likeliest continuations of a
   source are looked at, best first: an end among the first `beam` is a result, and the first `beam` others go on.
   luna_stream_reorder lets each of them continue the sequence that it came from.

   The search takes its memory from malloc. Scores are the same to rounding on every machine; they are computed with the
   C library's exp and log. */
#ifndef LUNA_BEAM_H
#define LUNA_BEAM_H
#include "luna.h"
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__GNUC__) || defined(__clang__)
#define BEAM_FN static __attribute__((unused))
#else
#define BEAM_FN static
#endif
/* tokens that a search may hold */
#define BEAM_MOST ((int64_t)1 << (sizeof(size_t) < 8 ? 24 : 40))

typedef struct luna_beam_config {
  int32_t begin, end;                  /* the token a target starts from, and the one that ends it */
  int64_t beam;                        /* sequences pursued at once; 0 = 1, greedy */
  int64_t max_length;                  /* tokens of a result, its end not counted; 0 = 2 n + 10 */
  /* a result's score is its log-probability / (tokens with its end)^penalty; 0 = 1; negative = none */
  float length_penalty;
  /* go on until no unfinished sequence can win; default: stop when `beam` results are there */
  bool exhaustive;
} luna_beam_config;

typedef struct beam_candidate {
  double score;                        /* log-probability of the whole sequence */
  int64_t row;                         /* the sequence that it continues */
  int32_t token;
} beam_candidate;

typedef struct beam_search {
  luna_beam_config config;             /* without its defaults' zeros */
  int64_t batch, vocab;
  int64_t stride;                      /* from one row of `out` to the next */
  double penalty;
  double *score;                       /* [batch beam] of the unfinished sequences */
  double *best;                        /* [batch] the best result's final score */
  int32_t *tokens, *next;              /* [batch beam, max_length] unfinished sequences, and their next order */
  int32_t *last, *from;                /* [batch beam] each one's last token, and the sequence that it came from */
  int64_t *results;                    /* [batch] how many there are; -1: the source is done */
  beam_candidate *candidates;          /* [2 beam] */
  int32_t *out, *out_lengths;          /* the caller's */
} beam_search;

BEAM_FN bool beam_in(luna_ctx *ctx, const char *what, int64_t value, int64_t low, int64_t high) {
  char sentence[160];
  if (value >= low && value <= high) return true;

  snprintf(sentence, sizeof sentence, "luna_beam_search: %s is %lld, outside %lld..%lld", what, (long long)value,
           (long long)low, (long long)high);
  luna_fail(ctx, LUNA_BAD_ARGUMENT, sentence);
  return false;
}

BEAM_FN bool beam_given(luna_ctx *ctx, const char *what, bool given) {
  char sentence[100];
  if (given) return true;

  snprintf(sentence, sizeof sentence, "luna_beam_search: %s is null", what);
  luna_fail(ctx, LUNA_BAD_ARGUMENT, sentence);
  return false;
}

/* Reads the config and fills in its defaults; false after a sentence. */
BEAM_FN bool beam_configure(luna_ctx *ctx, beam_search *s, const luna_seq2seq *model, const luna_input *source) {
  luna_beam_config *c = &s->config;
  if (!beam_in(ctx, "source->batch", source->batch, 1, BEAM_MOST)) return false;
  if (!beam_in(ctx, "source->n", source->n, 0, BEAM_MOST)) return false;

  s->batch = source->batch;
  s->vocab = model->config.target_vocab;
  if (c->beam == 0) c->beam = 1;
  if (c->max_length == 0) c->max_length = 2 * source->n + 10;
  s->stride = c->max_length;

  /* learned positions end there, one of them for the token that begins */
  const int64_t positions = model->config.max_target_length - 1;
  if (model->positions && c->max_length > positions) c->max_length = positions;

  const int64_t most = BEAM_MOST / s->batch;
  if (!beam_in(ctx, "beam", c->beam, 1, s->vocab < most ? s->vocab : most)) return false;
  if (!beam_in(ctx, "max_length", c->max_length, 1, most / c->beam)) return false;
  if (!beam_in(ctx, "begin", c->begin, 0, s->vocab - 1)) return false;
  if (!beam_in(ctx, "end", c->end, 0, s->vocab - 1)) return false;
  if (!isfinite(c->length_penalty)) {
    luna_fail(ctx, LUNA_BAD_ARGUMENT, "luna_beam_search: length_penalty is not finite");
    return false;
  }

  s->penalty = c->length_penalty == 0 ? 1 : (double)c->length_penalty;
  if (s->penalty < 0) s->penalty = 0;
  return true;
}

BEAM_FN void beam_close(beam_search *s) {
  free(s->score), free(s->best), free(s->tokens), free(s->next);
  free(s->last), free(s->from), free(s->results), free(s->candidates);
}

/* Takes the arrays; false when there is no memory. */
BEAM_FN bool beam_open(beam_search *s) {
  const size_t batch = (size_t)s->batch, beam = (size_t)s->config.beam;
  const size_t tokens = batch * beam * (size_t)s->config.max_length;
  s->score = (double *)calloc(batch * beam, sizeof(double));
  s->best = (double *)calloc(batch, sizeof(double));
  s->tokens = (int32_t *)calloc(tokens, sizeof(int32_t));
  s->next = (int32_t *)calloc(tokens, sizeof(int32_t));
  s->last = (int32_t *)calloc(batch * beam, sizeof(int32_t));
  s->from = (int32_t *)calloc(batch * beam, sizeof(int32_t));
  s->results = (int64_t *)calloc(batch, sizeof(int64_t));
  s->candidates = (beam_candidate *)calloc(2 * beam, sizeof(beam_candidate));
  if (!s->score || !s->best || !s->tokens || !s->next || !s->last || !s->from || !s->results || !s->candidates)
    return false;

  for (size_t i = 0; i < batch * beam; i++) s->last[i] = s->config.begin;
  for (size_t b = 0; b < batch; b++) s->out_lengths[b] = 0;
  return true;
}

/* ln of the sum of e^x */
BEAM_FN double beam_log_sum(const float *x, int64_t n) {
  double max = (double)x[0], sum = 0;
  for (int64_t i = 1; i < n; i++) {
    if ((double)x[i] > max) max = (double)x[i];
  }
  for (int64_t i = 0; i < n; i++) sum += exp((double)x[i] - max);
  return max + log(sum);
}

/* Puts a candidate among the `count` best, which are in falling order; returns how many there are then. */
BEAM_FN int64_t beam_insert(beam_search *s, int64_t count, beam_candidate c) {
  const int64_t room = 2 * s->config.beam;
  if (count == room && c.score <= s->candidates[count - 1].score) return count;

  if (count < room) count++;
  int64_t at = count - 1;
  for (; at > 0 && s->candidates[at - 1].score < c.score; at--) s->candidates[at] = s->candidates[at - 1];
  s->candidates[at] = c;
  return count;
}

/* Finds the likeliest continuations of source b's sequences, best first; returns how many. */
BEAM_FN int64_t beam_find(beam_search *s, int64_t b, const float *logits, int64_t length) {
  const int64_t first = b * s->config.beam;
  const int64_t rows = length == 0 ? 1 : s->config.beam; /* at first all of them are the same */
  int64_t count = 0;
  for (int64_t row = first; row < first + rows; row++) {
    const float *x = logits + row * s->vocab;
    const double base = s->score[row] - beam_log_sum(x, s->vocab);
    for (int32_t token = 0; token < s->vocab; token++) {
      const beam_candidate c = { base + (double)x[token], row, token };
      const bool fits = length < s->config.max_length || token == s->config.end;
      if (fits && c.score > -(double)INFINITY) count = beam_insert(s, count, c);
    }
  }
  return count;
}

/* Keeps an ended sequence if it is the best of its source. */
BEAM_FN void beam_finish(beam_search *s, int64_t b, const beam_candidate *c, int64_t length) {
  const double score = c->score / pow((double)(length + 1), s->penalty);
  if (s->results[b]++ && score <= s->best[b]) return;

  s->best[b] = score;
  s->out_lengths[b] = (int32_t)length;
  if (length > 0)
    memcpy(s->out + b * s->stride, s->tokens + c->row * s->config.max_length, (size_t)length * sizeof(int32_t));
}

/* Lets sequence `to` continue with a candidate in the next step. */
BEAM_FN void beam_continue(beam_search *s, int64_t to, const beam_candidate *c, int64_t length) {
  int32_t *next = s->next + to * s->config.max_length;
  memcpy(next, s->tokens + c->row * s->config.max_length, (size_t)length * sizeof(int32_t));
  next[length] = c->token;
  s->last[to] = c->token;
  s->from[to] = (int32_t)c->row;
  s->score[to] = c->score;
}

/* Makes one step of source b. Returns false when the source is done. */
BEAM_FN bool beam_step(beam_search *s, int64_t b, const float *logits, int64_t length) {
  const int64_t beam = s->config.beam, first = b * beam;
  const int64_t count = beam_find(s, b, logits, length);
  int64_t kept = 0;
  for (int64_t i = 0; i < count && kept < beam; i++) {
    const beam_candidate *c = &s->candidates[i];
    if (c->token != s->config.end) beam_continue(s, first + kept++, c, length);
    else if (i < beam) beam_finish(s, b, c, length);
  }
  for (int64_t i = kept; i < beam; i++) s->score[first + i] = -(double)INFINITY;

  if (kept == 0) return false;
  if (!s->config.exhaustive) return s->results[b] < beam;
  if (s->results[b] == 0) return true;

  const double reachable = s->score[first] / pow((double)(s->config.max_length + 1), s->penalty);
  return reachable > s->best[b];
}

/* Makes one step of every source that is not done. Returns how many sources go on, or -1 after a sentence. */
BEAM_FN int64_t beam_step_all(luna_ctx *ctx, beam_search *s, const float *logits, int64_t length) {
  int64_t going = 0;
  for (int64_t i = 0; i < s->batch * s->config.beam; i++) s->from[i] = (int32_t)i;
  for (int64_t b = 0; b < s->batch; b++) {
    if (s->results[b] < 0) continue;
    if (beam_step(s, b, logits, length)) {
      going++;
      continue;
    }

    if (s->results[b] == 0) {
      char sentence[100];
      snprintf(sentence, sizeof sentence, "luna_beam_search: the model's logits for source %lld are not finite",
               (long long)b);
      luna_fail(ctx, LUNA_BAD_ARGUMENT, sentence);
      return -1;
    }
    s->results[b] = -1;
  }

  int32_t *swap = s->tokens;
  s->tokens = s->next;
  s->next = swap;
  return going;
}

/* The stream's failure becomes the context's. */
BEAM_FN luna_status beam_stream_failed(luna_ctx *ctx, const luna_stream *stream) {
  const bool device = luna_stream_error_id(stream) == LUNA_ERROR_BACKEND;
  return luna_fail(ctx, device ? LUNA_DEVICE_FAILED : LUNA_BAD_ARGUMENT, luna_stream_error(stream));
}

/* Writes the best translation of each source, without begin and end: source [batch,n] -> out [batch,max_length] with
   out_lengths [batch], and their scores [batch], or null. It begins an inference on the model's context, whose error
   says what failed. */
BEAM_FN luna_status luna_beam_search(const luna_seq2seq *model, const luna_input *source,
                                     const luna_beam_config *config, int32_t *out, int32_t *out_lengths,
                                     float *scores) {
  luna_ctx *ctx = model ? luna_params_ctx(model->params) : NULL;
  beam_search s;
  if (!ctx) return LUNA_BAD_ARGUMENT;
  if (luna_begin_inference(ctx) != LUNA_OK) return luna_error_status(ctx);
  if (!beam_given(ctx, "source", source != NULL)) return LUNA_BAD_ARGUMENT;
  if (!beam_given(ctx, "config, out or out_lengths", config && out && out_lengths)) return LUNA_BAD_ARGUMENT;

  memset(&s, 0, sizeof s);
  s.config = *config;
  s.out = out;
  s.out_lengths = out_lengths;
  if (!beam_configure(ctx, &s, model, source)) return LUNA_BAD_ARGUMENT;

  luna_stream *stream = luna_seq2seq_stream_open(model, source, s.config.beam);
  if (!stream) return luna_error_status(ctx) == LUNA_OK ? LUNA_OUT_OF_MEMORY : luna_error_status(ctx);

  luna_status status = LUNA_OK;
  if (!beam_open(&s)) status = luna_fail(ctx, LUNA_OUT_OF_MEMORY, "luna_beam_search: no memory for the search");
  int64_t going = s.batch;
  for (int64_t length = 0; status == LUNA_OK && going > 0 && length <= s.config.max_length; length++) {
    const float *logits = luna_stream_step(stream, s.last);
    if (logits) going = beam_step_all(ctx, &s, logits, length);
    else status = beam_stream_failed(ctx, stream);
    if (going < 0) status = LUNA_BAD_ARGUMENT;
    if (status == LUNA_OK && going > 0) luna_stream_reorder(stream, s.from);
  }

  if (scores && status == LUNA_OK) {
    for (int64_t b = 0; b < s.batch; b++) scores[b] = (float)s.best[b];
  }
  beam_close(&s);
  luna_stream_close(stream);
  return status;
}
#endif
