/* luna_ops.h: functions of tensors that few programs need, made of what luna.h declares. Include it after luna.h.

     luna_tensor *loss = luna_huber(luna_lm_forward(&model, &input), targets, 1);

   It has more losses of numbers, luna_weighted_cross_entropy for rare classes, luna_soft_cross_entropy for a student
   and its teacher, luna_stack, luna_split, luna_pad, luna_transpose, luna_greater, luna_greater_equal, luna_var,
   luna_min, luna_top_k, luna_sample_top_p and luna_params_clip_grad, which run wherever luna.h does. luna_sin,
   luna_cos, luna_pow, luna_cumsum and luna_scatter_add_rows are custom ops. They run on the CPU only, on all its
   threads; the bits are the same for any number of threads.
   Like luna.h's ops, all return null when they are given null or after a failure; luna_error says why. */
#ifndef LUNA_OPS_H
#define LUNA_OPS_H
#include "luna.h"
#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__GNUC__) || defined(__clang__)
#define OPS_FN static __attribute__((unused))
#else
#define OPS_FN static
#endif

/* ---- failures ---- */
OPS_FN luna_tensor *ops_fail(luna_ctx *ctx, const char *format, ...) {
  char sentence[400];
  va_list values;
  va_start(values, format);
  vsnprintf(sentence, sizeof sentence, format, values);
  va_end(values);
  luna_fail(ctx, LUNA_BAD_ARGUMENT, sentence);
  return NULL;
}
typedef struct ops_text { char text[4 * 24 + 3]; } ops_text;
/* A tensor's shape, as luna.h's sentences have it. */
OPS_FN ops_text ops_shape(const luna_tensor *x) {
  ops_text t;
  size_t n = 1;
  strcpy(t.text, "[");
  for (int i = 0; i < x->rank; i++) {
    snprintf(t.text + n, sizeof t.text - n, "%s%lld", i ? "," : "", (long long)x->shape[i]);
    n += strlen(t.text + n);
  }
  strcpy(t.text + n, "]");
  return t;
}
OPS_FN bool ops_has_axis(const luna_tensor *x, int axis, int most, const char *name) {
  if (axis >= 0 && axis <= most) return true;
  ops_fail(x->ctx, "%s: tensor %s has no axis %d", name, ops_shape(x).text, axis);
  return false;
}
OPS_FN luna_tensor *ops_result(luna_scope scope, luna_tensor *y) { return luna_scope_end(scope, &y, 1); }

/* ---- ops that move numbers ---- */
/* Up to LUNA_MAX_INPUTS tensors of one shape, along a new axis. */
OPS_FN luna_tensor *luna_stack(luna_tensor *const *x, int count, int axis) {
  luna_tensor *with[LUNA_MAX_INPUTS];
  int64_t shape[LUNA_MAX_RANK + 1];
  bool whole = x && count > 0 && count <= LUNA_MAX_INPUTS;
  for (int i = 0; whole && i < count; i++) whole = x[i] != NULL;
  if (!whole) return luna_concat(x, count, axis); /* which says what is wrong */
  const luna_scope scope = luna_scope_begin(x[0]->ctx);
  for (int i = 0; i < count; i++) {
    const int rank = x[i]->rank;
    if (!ops_has_axis(x[i], axis, rank, "luna_stack")) return NULL;
    if (rank == LUNA_MAX_RANK)
      return ops_fail(x[i]->ctx, "luna_stack: tensor %s has 4 axes already, which is the maximum",
                      ops_shape(x[i]).text);
    for (int a = 0; a < rank; a++) shape[a + (a >= axis)] = x[i]->shape[a];
    shape[axis] = 1;
    with[i] = luna_reshape(x[i], rank + 1, shape);
  }
  return ops_result(scope, luna_concat(with, count, axis));
}

/* Writes x in `count` equal parts along the axis to parts [count]. On failure each is null. */
OPS_FN luna_status luna_split(luna_tensor *x, int axis, luna_tensor **parts, int count) {
  for (int i = 0; i < count && parts; i++) parts[i] = NULL;
  if (!x) return LUNA_BAD_ARGUMENT;
  if (!parts) return luna_fail(x->ctx, LUNA_BAD_ARGUMENT, "luna_split: parts is null");
  if (!ops_has_axis(x, axis, x->rank - 1, "luna_split")) return LUNA_BAD_ARGUMENT;
  if (count < 1 || x->shape[axis] % count != 0) {
    ops_fail(x->ctx, "luna_split: axis %d of %s has %lld rows, which are not %d equal parts", axis, ops_shape(x).text,
             (long long)x->shape[axis], count);
    return LUNA_BAD_ARGUMENT;
  }

  const int64_t rows = x->shape[axis] / count;
  bool whole = true;
  for (int i = 0; i < count; i++) {
    parts[i] = luna_slice(x, axis, i * rows, rows);
    whole = whole && parts[i];
  }
  for (int i = 0; i < count && !whole; i++) parts[i] = NULL;
  return whole ? LUNA_OK : luna_error_status(x->ctx);
}

/* x with `before` and `after` more places along the axis, which hold `value`. */
OPS_FN luna_tensor *luna_pad(luna_tensor *x, int axis, int64_t before, int64_t after, float value) {
  int64_t shape[LUNA_MAX_RANK];
  if (!x || !ops_has_axis(x, axis, x->rank - 1, "luna_pad")) return NULL;
  if (before < 0 || after < 0)
    return ops_fail(x->ctx, "luna_pad: before is %lld and after is %lld; neither can be negative", (long long)before,
                    (long long)after);
  const luna_scope scope = luna_scope_begin(x->ctx);
  memcpy(shape, x->shape, sizeof shape);
  shape[axis] = before;
  luna_tensor *with[3] = { luna_tensor_full(x->ctx, value, x->rank, shape), x, NULL };
  shape[axis] = after;
  with[2] = luna_tensor_full(x->ctx, value, x->rank, shape);
  return ops_result(scope, luna_concat(with, 3, axis));
}

/* Returns a copy with two axes exchanged. */
OPS_FN luna_tensor *luna_transpose(luna_tensor *x, int axis, int other) {
  int axes[LUNA_MAX_RANK];
  if (!x || !ops_has_axis(x, axis, x->rank - 1, "luna_transpose") ||
      !ops_has_axis(x, other, x->rank - 1, "luna_transpose")) return NULL;
  for (int a = 0; a < x->rank; a++) axes[a] = a;
  axes[axis] = other;
  axes[other] = axis;
  return luna_permute(x, axes);
}

/* ---- comparisons: 1 or 0, without gradient ---- */
OPS_FN bool ops_broadcasts(const luna_tensor *a, const luna_tensor *b, const char *name) {
  if (!a && !b) return false;
  if (!a || !b) return ops_fail((a ? a : b)->ctx, "%s: the %s input is null", name, a ? "second" : "first") != NULL;
  for (int i = 1; i <= a->rank && i <= b->rank; i++) {
    const int64_t x = a->shape[a->rank - i], y = b->shape[b->rank - i];
    if (x == y || x == 1 || y == 1) continue;
    ops_fail(a->ctx, "%s: %s and %s do not broadcast: from the last axis on, sizes must be equal, or one of them 1",
             name, ops_shape(a).text, ops_shape(b).text);
    return false;
  }
  return true;
}
OPS_FN luna_tensor *luna_greater(luna_tensor *a, luna_tensor *b) {
  return ops_broadcasts(a, b, "luna_greater") ? luna_less(b, a) : NULL;
}
OPS_FN luna_tensor *luna_greater_equal(luna_tensor *a, luna_tensor *b) {
  return ops_broadcasts(a, b, "luna_greater_equal") ? luna_less_equal(b, a) : NULL;
}

/* ---- reductions ---- */
/* The variance, the mean squared difference from the mean, along an axis, which the result lacks; [n] -> [1]. */
OPS_FN luna_tensor *luna_var(luna_tensor *x, int axis) {
  int64_t shape[LUNA_MAX_RANK];
  if (!x || !ops_has_axis(x, axis, x->rank - 1, "luna_var")) return NULL;
  const luna_scope scope = luna_scope_begin(x->ctx);
  memcpy(shape, x->shape, sizeof shape);
  shape[axis] = 1;
  luna_tensor *e = luna_sub(x, luna_reshape(luna_mean(x, axis), x->rank, shape));
  return ops_result(scope, luna_mean(luna_mul(e, e), axis));
}
/* The minimum along an axis, as luna_max gives the maximum. */
OPS_FN luna_tensor *luna_min(luna_tensor *x, int axis) {
  if (!x || !ops_has_axis(x, axis, x->rank - 1, "luna_min")) return NULL;
  const luna_scope scope = luna_scope_begin(x->ctx);
  return ops_result(scope, luna_neg(luna_max(luna_neg(x), axis)));
}

/* ---- what the host reads ---- */
/* Finds the k largest of each row of x [...,n], in falling order; of equals the first comes first, and NaN before all
   numbers. indices is [...,k], values [...,k] or null. */
OPS_FN luna_status luna_top_k(const luna_tensor *x, int64_t k, int32_t *indices, float *values) {
  if (!x) return LUNA_BAD_ARGUMENT;
  const int64_t n = x->rank ? x->shape[x->rank - 1] : 1, all = luna_count(x);
  if (k < 1 || k > n || n > INT32_MAX)
    return ops_fail(x->ctx, "luna_top_k: k is %lld, outside 1..%lld", (long long)k, (long long)n), LUNA_BAD_ARGUMENT;
  if (!indices && all > 0) return luna_fail(x->ctx, LUNA_BAD_ARGUMENT, "luna_top_k: indices is null");
  float *from = (float *)calloc((size_t)all + 1, sizeof *from);
  if (!from) return luna_fail(x->ctx, LUNA_OUT_OF_MEMORY, "luna_top_k: no memory for the values");

  luna_status status = LUNA_OK;
  if (!luna_options_of(x->ctx)->measure) status = luna_read(x, from);
  for (int64_t r = 0; r < all / n && status == LUNA_OK; r++) {
    const float *row = from + r * n;
    int32_t *best = indices + r * k; /* the largest so far, falling */
    for (int64_t i = 0; i < n; i++) {
      int64_t at = i < k ? i : k;
      while (at > 0 && (row[i] > row[best[at - 1]] || (row[i] != row[i] && row[best[at - 1]] == row[best[at - 1]]))) {
        at--;
        if (at + 1 < k) best[at + 1] = best[at];
      }
      if (at < k) best[at] = (int32_t)i;
    }
    for (int64_t i = 0; values && i < k; i++) values[r * k + i] = row[best[i]];
  }
  free(from);
  return status;
}

OPS_FN int ops_falling(const void *a, const void *b) {
  const float x = *(const float *)a, y = *(const float *)b;
  return (x < y) - (x > y);
}
/* luna_sample among the likeliest tokens whose probabilities sum to top_p [arXiv 1904.09751]: of all, or of the top_k.
   All that are as likely as the last of them count. Returns -1 where luna_sample does, if top_p is outside 0..1, or if
   there is no memory. */
OPS_FN int32_t luna_sample_top_p(const float *logits, int64_t vocab, float top_p, luna_sampling *sampling) {
  if (!(top_p > 0 && top_p <= 1)) return -1;
  if (!logits || vocab < 1 || vocab > INT32_MAX || !sampling || !(sampling->temperature > 0) || sampling->top_k < 0 ||
      sampling->top_k == 1 || top_p == 1) return luna_sample(logits, vocab, sampling);
  const size_t n = (size_t)vocab;
  size_t most = n, count = 0;
  double total = 0, sum = 0;
  for (size_t i = 0; i < n; i++)
    if (logits[i] != logits[i]) return -1;
  float *own = (float *)malloc(2 * n * sizeof *own), *sorted = own + n;
  if (!own) return -1;

  memcpy(own, logits, n * sizeof *own);
  memcpy(sorted, logits, n * sizeof *own);
  qsort(sorted, n, sizeof *sorted, ops_falling);
  luna_sampling now = *sampling;
  if (now.top_k > 0 && now.top_k < vocab) most = (size_t)now.top_k;
  const float last = sorted[most - 1]; /* All that equal the last of the top_k have their share. */
  while (most < n && sorted[most] == last) most++;
  for (size_t i = 0; i < most; i++) total += exp(((double)sorted[i] - (double)sorted[0]) / (double)now.temperature);
  while (count < most && sum < (double)top_p * total)
    sum += exp(((double)sorted[count++] - (double)sorted[0]) / (double)now.temperature);
  const float limit = sorted[count ? count - 1 : 0];
  if (limit > last) now.top_k = 0;
  for (size_t i = 0; i < n; i++)
    if (own[i] < limit) own[i] = -(float)INFINITY;
  const int32_t token = luna_sample(own, vocab, &now);
  sampling->drawn = now.drawn;
  free(own);
  return token;
}

/* ---- losses ---- */
/* Counts the labels that count for a loss, or -1: the context then says what is wrong. */
OPS_FN int64_t ops_labels(luna_ctx *ctx, const char *name, const int32_t *labels, int64_t rows, int64_t classes,
                          const luna_cross_entropy_config *c) {
  int64_t counted = 0;
  if (!labels && rows > 0) return ops_fail(ctx, "%s: labels is null", name), -1;
  if (!(c->smoothing >= 0 && c->smoothing <= 1))
    return ops_fail(ctx, "%s: smoothing is %g, outside 0..1", name, (double)c->smoothing), -1;
  for (int64_t i = 0; i < rows; i++) {
    if (labels[i] < 0 || (c->ignore && labels[i] == c->ignore_index)) continue;
    if (labels[i] >= classes)
      return ops_fail(ctx, "%s: labels[%lld] is %d; there are %lld classes (a negative label is ignored)", name,
                      (long long)i, (int)labels[i], (long long)classes), -1;
    counted++;
  }
  return counted;
}
/* luna_cross_entropy with a weight for each class, by which a row's loss is multiplied: weights [V], finite and not
   negative, or null for luna_cross_entropy itself. A mean divides by the number of labels that count, not by the sum of
   their weights. It is made of the log-probabilities of the labels that count. */
OPS_FN luna_tensor *luna_weighted_cross_entropy(luna_tensor *logits, const int32_t *labels, const float *weights,
                                                const luna_cross_entropy_config *config) {
  const char *name = "luna_weighted_cross_entropy";
  static const luna_cross_entropy_config defaults = { 0, false, 0, false };
  const luna_cross_entropy_config *c = config ? config : &defaults;
  if (!logits || !weights || logits->rank < 1) return luna_cross_entropy(logits, labels, config);
  luna_ctx *ctx = logits->ctx;
  const int64_t classes = logits->shape[logits->rank - 1], all = luna_count(logits), rows = classes ? all / classes : 0;
  for (int64_t i = 0; i < classes; i++)
    if (!(weights[i] >= 0 && weights[i] < (float)INFINITY))
      return ops_fail(ctx, "%s: weights[%lld] is %g; it must be finite and not negative", name, (long long)i,
                      (double)weights[i]);
  if (all > INT32_MAX) return ops_fail(ctx, "%s: %lld logits are more than %d", name, (long long)all, (int)INT32_MAX);
  const int64_t counted = ops_labels(ctx, name, labels, rows, classes, c);
  if (counted < 0) return NULL;
  float *own = (float *)calloc(3 * (size_t)rows + 1, sizeof *own);
  if (!own) {
    luna_fail(ctx, LUNA_OUT_OF_MEMORY, "luna_weighted_cross_entropy: no memory for the labels");
    return NULL;
  }

  int32_t *used = (int32_t *)(void *)(own + rows), *places = used + rows;
  int64_t count = 0;
  for (int64_t r = 0; r < rows; r++) {
    const int32_t label = labels[r];
    if (label < 0 || (c->ignore && label == c->ignore_index) || weights[label] == 0) continue;
    own[count] = weights[label];
    used[count] = (int32_t)r;
    places[count++] = (int32_t)(r * classes) + label;
  }

  const luna_scope scope = luna_scope_begin(ctx);
  const int64_t matrix[2] = { rows, classes }, single[2] = { rows * classes, 1 }, column[2] = { count, 1 };
  luna_tensor *x = luna_reshape(luna_log_softmax(logits), 2, matrix);
  luna_tensor *y = luna_gather_rows(luna_reshape(x, 2, single), places, count);
  if (c->smoothing > 0) {
    luna_tensor *mean = luna_reshape(luna_mean(luna_gather_rows(x, used, count), 1), 2, column);
    y = luna_add(luna_scale(y, 1 - c->smoothing), luna_scale(mean, c->smoothing));
  }
  y = luna_sum_all(luna_mul(luna_reshape(y, 1, &count), luna_tensor_new(ctx, own, 1, &count)));
  free(own);
  const float factor = c->sum || counted == 0 ? 1.0f : 1.0f / (float)counted;
  return ops_result(scope, luna_set_counted(luna_scale(y, -factor), name, c->sum ? -1 : counted, rows));
}

/* For a student and its teacher: the mean, over rows of logits [...,V], of the cross-entropy with the rows of
   `probabilities` [...,V]. A gradient flows into that tensor too: luna_detach the teacher's. */
OPS_FN luna_tensor *luna_soft_cross_entropy(luna_tensor *logits, luna_tensor *probabilities) {
  if (!logits || !probabilities) return NULL;
  for (int a = 0; a < LUNA_MAX_RANK; a++)
    if (logits->rank != probabilities->rank || logits->shape[a] != probabilities->shape[a])
      return ops_fail(logits->ctx, "luna_soft_cross_entropy: logits %s and probabilities %s have not one shape",
                      ops_shape(logits).text, ops_shape(probabilities).text);
  const luna_scope scope = luna_scope_begin(logits->ctx);
  int64_t rows = 1;
  for (int a = 0; a + 1 < logits->rank; a++) rows *= logits->shape[a];
  luna_tensor *sum = luna_sum_all(luna_mul(probabilities, luna_log_softmax(logits)));
  luna_tensor *mean = luna_scale(sum, rows ? (float)(-1.0 / (double)rows) : 0);
  return ops_result(scope, luna_set_counted(mean, "luna_soft_cross_entropy", rows, rows));
}

/* The losses below are of values of any shape and luna_count(values) targets in the same order -> [1], the mean over
   the targets that are not NaN (0 when all are). */
typedef struct ops_targets {
  const char *name;         /* of the call */
  luna_tensor *target;      /* in the values' shape, or one a row of them */
  luna_tensor *given;       /* 1 where a target is there, else 0 */
  int64_t count, counted;   /* targets; those that are there */
} ops_targets;
OPS_FN bool ops_take(ops_targets *t, luna_ctx *ctx, const char *name, const float *targets, int rank,
                     const int64_t *shape) {
  t->name = name;
  t->count = 1;
  t->counted = 0;
  for (int i = 0; i < rank; i++) t->count *= shape[i];
  if (!targets && t->count > 0) return ops_fail(ctx, "%s: targets is null", name) != NULL;
  for (int64_t i = 0; i < t->count; i++) t->counted += targets[i] == targets[i];
  t->target = luna_tensor_new(ctx, targets, rank, shape);
  t->given = luna_equal(t->target, t->target);
  return t->given != NULL;
}
/* x, but 0 where there is no target. */
OPS_FN luna_tensor *ops_given(const ops_targets *t, luna_tensor *x) {
  const int64_t one = 1;
  if (!x) return NULL;
  return luna_where(t->given, x, luna_tensor_new(x->ctx, NULL, 1, &one));
}
OPS_FN luna_tensor *ops_mean(const ops_targets *t, luna_tensor *losses, int64_t each) {
  const int64_t counted = t->counted * each;
  luna_tensor *mean = luna_scale(luna_sum_all(losses), (float)(1.0 / (double)(counted > 0 ? counted : 1)));
  return luna_set_counted(mean, t->name, counted, t->count * each);
}

/* (x - t)^2 / 2 up to |x - t| = delta (0 = 1), delta (|x - t| - delta / 2) beyond. It is made as r (e - r / 2), where r
   is the error e within delta of 0: no difference of large numbers. */
OPS_FN luna_tensor *luna_huber(luna_tensor *values, const float *targets, float delta) {
  ops_targets t;
  if (!values) return NULL;
  if (delta == 0) delta = 1;
  if (!(delta > 0 && delta < (float)INFINITY))
    return ops_fail(values->ctx, "luna_huber: delta is %g; it must be finite and not negative", (double)delta);
  const luna_scope scope = luna_scope_begin(values->ctx);
  if (!ops_take(&t, values->ctx, "luna_huber", targets, values->rank, values->shape)) return NULL;
  luna_tensor *e = ops_given(&t, luna_sub(values, t.target));
  luna_tensor *r = luna_clamp(e, -delta, delta);
  return ops_result(scope, ops_mean(&t, luna_mul(r, luna_sub(e, luna_scale(r, 0.5f))), 1));
}

/* -t ln s(x) - (1 - t) ln (1 - s(x)) of logits x, where s is the logistic function and t is in 0..1. It is made as
   t ln(1 + e^-x) + (1 - t) ln(1 + e^x), accurate for confident logits too. */
OPS_FN luna_tensor *luna_binary_cross_entropy(luna_tensor *logits, const float *targets) {
  const char *name = "luna_binary_cross_entropy";
  ops_targets t;
  if (!logits) return NULL;
  for (int64_t i = 0; targets && i < luna_count(logits); i++)
    if (targets[i] < 0 || targets[i] > 1)
      return ops_fail(logits->ctx, "%s: targets[%lld] is %g, outside 0..1 (NaN is ignored)", name, (long long)i,
                      (double)targets[i]);
  const luna_scope scope = luna_scope_begin(logits->ctx);
  if (!ops_take(&t, logits->ctx, name, targets, logits->rank, logits->shape)) return NULL;
  luna_tensor *x = ops_given(&t, logits), *y = ops_given(&t, t.target);
  luna_tensor *no = ops_given(&t, luna_add_scalar(luna_scale(t.target, -1), 1));
  luna_tensor *yes = luna_mul(luna_softplus(luna_scale(x, -1)), y);
  no = luna_mul(luna_softplus(x), no);
  return ops_result(scope, ops_mean(&t, luna_add(yes, no), 1));
}

/* The quantile loss, also called pinball loss [Koenker and Bassett 1978]: values [...,count] and one target a row ->
   [1], the mean over targets t that are not NaN and over values x of max(q (t - x), (q - 1) (t - x)), q = levels[i] in
   0..1. What it trains are quantiles: value i is above a share levels[i] of what comes. Two levels make an interval;
   quantiles of one row can cross: sort them [Chernozhukov, Fernandez-Val and Galichon 2010]. */
OPS_FN luna_tensor *luna_quantile_loss(luna_tensor *values, const float *targets, const float *levels, int64_t count) {
  const char *name = "luna_quantile_loss";
  ops_targets t;
  if (!values) return NULL;
  luna_ctx *ctx = values->ctx;
  if (count < 1 || values->rank < 1 || values->shape[values->rank - 1] != count)
    return ops_fail(ctx, "%s: the last axis of values %s must have the size of levels, %lld", name,
                    ops_shape(values).text, (long long)count);
  if (!levels) return ops_fail(ctx, "%s: levels is null", name);
  for (int64_t i = 0; i < count; i++)
    if (!(levels[i] > 0 && levels[i] < 1))
      return ops_fail(ctx, "%s: levels[%lld] is %g; a quantile's level is between 0 and 1", name, (long long)i,
                      (double)levels[i]);

  const luna_scope scope = luna_scope_begin(ctx);
  const int64_t rows = luna_count(values) / count, shape[2] = { rows, count }, column[2] = { rows, 1 };
  if (!ops_take(&t, ctx, name, targets, 2, column)) return NULL;
  luna_tensor *q = luna_tensor_new(ctx, levels, 1, &count);
  luna_tensor *e = ops_given(&t, luna_sub(luna_reshape(values, 2, shape), t.target));
  luna_tensor *below = luna_mul(e, luna_scale(q, -1));
  luna_tensor *above = luna_mul(e, luna_add_scalar(luna_scale(q, -1), 1));
  return ops_result(scope, ops_mean(&t, luna_maximum(below, above), count));
}

/* ---- custom ops, on the CPU alone ---- */
/* What threads share: pieces [first, last) of an op's `count`. */
typedef struct ops_work {
  void (*body)(const struct ops_work *w, int64_t first, int64_t last);
  luna_tensor *const *in;
  const luna_tensor *out;
  const void *state;
  bool back;
  int64_t count, parts;
} ops_work;
OPS_FN void ops_task(void *work, int64_t part) {
  const ops_work *w = (const ops_work *)work;
  w->body(w, w->count / w->parts * part + w->count % w->parts * part / w->parts,
          w->count / w->parts * (part + 1) + w->count % w->parts * (part + 1) / w->parts);
}
/* Runs the pieces, each of `size` numbers. */
OPS_FN luna_status ops_run(ops_work *w, int64_t size) {
  const luna_run run = luna_custom_run(w->out);
  const int64_t least = 16384 / (size > 0 ? size : 1) + 1; /* pieces that are worth a thread */
  w->parts = run.parallel_for ? w->count / least : 1;
  if (w->parts > run.threads) w->parts = run.threads;
  if (w->parts > 1) run.parallel_for(run.parallel_user, w->parts, ops_task, w);
  else w->body(w, 0, w->count);
  return LUNA_OK;
}
OPS_FN luna_tensor *ops_custom(luna_tensor *const *in, int count, const luna_custom *custom, const char *name) {
  luna_tensor *x = in[0];
  if (x && x->device == 0) return luna_custom_op(in, count, x->rank, x->shape, custom);
  if (x) ops_fail(x->ctx, "%s: it runs on the CPU alone, and this tensor is on a device", name);
  return NULL;
}

/* --- sine, cosine, power: made in double, one by one --- */
enum { OPS_SINE, OPS_COSINE, OPS_POWER };
typedef struct ops_function { int which; float exponent; } ops_function;
/* sin x and cos x to 1e-14 for |x| < 1e9: Taylor's polynomials of x less a multiple of pi/2 */
OPS_FN void ops_sine(double x, double *sine, double *cosine) {
  const double turns = floor(x * 0.63661977236758134308 + 0.5);
  const double r = (x - turns * 1.57079632673412561417) - turns * 6.07710050650619224932e-11, q = r * r;
  const double s = r + r * q * (-1.0 / 6 + q * (1.0 / 120 + q *
      (-1.0 / 5040 + q * (1.0 / 362880 + q * (-1.0 / 39916800 + q / 6227020800.0)))));
  const double c = 1 + q * (-0.5 + q * (1.0 / 24 + q * (-1.0 / 720 + q *
      (1.0 / 40320 + q * (-1.0 / 3628800 + q * (1.0 / 479001600 - q / 87178291200.0))))));
  const int quarter = (int)((int64_t)turns & 3);
  *sine = quarter & 1 ? c : s;
  *cosine = quarter & 1 ? s : c;
  if (quarter & 2) *sine = -*sine;
  if (quarter == 1 || quarter == 2) *cosine = -*cosine;
}
OPS_FN float ops_function_at(const ops_function *f, float x, bool slope) {
  const double p = (double)f->exponent;
  double sine, cosine;
  if (f->which == OPS_POWER) {
    if (!slope) return (float)pow((double)x, p);
    return (float)(p != 0 ? p * pow((double)x, p - 1) : 0);
  }
  if (x < 1e9f && x > -1e9f) ops_sine((double)x, &sine, &cosine);
  else {
    sine = sin((double)x);
    cosine = cos((double)x);
  }
  if (f->which == OPS_SINE) return (float)(slope ? cosine : sine);
  return (float)(slope ? -sine : cosine);
}
OPS_FN void ops_function_part(const ops_work *w, int64_t first, int64_t last) {
  const ops_function *f = (const ops_function *)w->state;
  const float *x = w->in[0]->data, *dy = w->out->grad;
  for (int64_t i = first; i < last; i++) {
    const float value = ops_function_at(f, x[i], w->back);
    if (w->back) w->in[0]->grad[i] += dy[i] * value;
    else w->out->data[i] = value;
  }
}
OPS_FN luna_status ops_function_run(luna_tensor *const *in, const luna_tensor *out, const void *state, bool back) {
  ops_work w = { ops_function_part, in, out, state, back, luna_count(out), 1 };
  return back && !in[0]->grad ? LUNA_OK : ops_run(&w, 16);
}
OPS_FN luna_status ops_function_forward(const luna_tensor *const *in, int count, luna_tensor *out, void *state) {
  (void)count;
  return ops_function_run((luna_tensor *const *)(uintptr_t)in, out, state, false);
}
OPS_FN luna_status ops_function_backward(luna_tensor *const *in, int count, const luna_tensor *out, void *state) {
  (void)count;
  return ops_function_run(in, out, state, true);
}
OPS_FN luna_tensor *ops_function_of(luna_tensor *x, int which, float exponent, const char *name) {
  const ops_function f = { which, exponent };
  const luna_custom custom = { ops_function_forward, ops_function_backward, &f, sizeof f, 0, false, 0, 0 };
  return ops_custom(&x, 1, &custom, name);
}
OPS_FN luna_tensor *luna_sin(luna_tensor *x) { return ops_function_of(x, OPS_SINE, 0, "luna_sin"); }
OPS_FN luna_tensor *luna_cos(luna_tensor *x) { return ops_function_of(x, OPS_COSINE, 0, "luna_cos"); }
/* x^exponent; NaN of a negative x where the exponent is no integer. */
OPS_FN luna_tensor *luna_pow(luna_tensor *x, float exponent) {
  return ops_function_of(x, OPS_POWER, exponent, "luna_pow");
}

/* --- cumsum, in double, by panels of columns; its gradient is that of the gradient from the end --- */
#define OPS_COLUMNS 64
typedef struct ops_line { int64_t outer, axis, inner; } ops_line;
OPS_FN void ops_cumsum_part(const ops_work *w, int64_t first, int64_t last) {
  const ops_line *l = (const ops_line *)w->state;
  const int64_t panels = (l->inner + OPS_COLUMNS - 1) / OPS_COLUMNS;
  for (int64_t p = first; p < last; p++) {
    const int64_t start = p % panels * OPS_COLUMNS;
    const int64_t n = l->inner - start < OPS_COLUMNS ? l->inner - start : OPS_COLUMNS;
    double sum[OPS_COLUMNS] = { 0 };
    for (int64_t r = 0; r < l->axis; r++) {
      const int64_t row = w->back ? l->axis - 1 - r : r;
      const int64_t at = (p / panels * l->axis + row) * l->inner + start;
      for (int64_t i = 0; i < n; i++) {
        sum[i] += (double)(w->back ? w->out->grad : w->in[0]->data)[at + i];
        if (w->back) w->in[0]->grad[at + i] += (float)sum[i];
        else w->out->data[at + i] = (float)sum[i];
      }
    }
  }
}
OPS_FN luna_status ops_cumsum_run(luna_tensor *const *in, const luna_tensor *out, const void *state, bool back) {
  const ops_line *l = (const ops_line *)state;
  const int64_t panels = l->outer * ((l->inner + OPS_COLUMNS - 1) / OPS_COLUMNS);
  ops_work w = { ops_cumsum_part, in, out, state, back, panels, 1 };
  if (back && !in[0]->grad) return LUNA_OK;
  return ops_run(&w, l->axis * (l->inner < OPS_COLUMNS ? l->inner : OPS_COLUMNS));
}
OPS_FN luna_status ops_cumsum_forward(const luna_tensor *const *in, int count, luna_tensor *out, void *state) {
  (void)count;
  return ops_cumsum_run((luna_tensor *const *)(uintptr_t)in, out, state, false);
}
OPS_FN luna_status ops_cumsum_backward(luna_tensor *const *in, int count, const luna_tensor *out, void *state) {
  (void)count;
  return ops_cumsum_run(in, out, state, true);
}
/* y_i = x_0 + ... + x_i along the axis. */
OPS_FN luna_tensor *luna_cumsum(luna_tensor *x, int axis) {
  ops_line l = { 1, 1, 1 };
  const luna_custom custom = { ops_cumsum_forward, ops_cumsum_backward, &l, sizeof l, 0, false, 0, 0 };
  if (!x || !ops_has_axis(x, axis, x->rank - 1, "luna_cumsum")) return NULL;
  for (int a = 0; a < axis; a++) l.outer *= x->shape[a];
  l.axis = x->shape[axis];
  for (int a = axis + 1; a < x->rank; a++) l.inner *= x->shape[a];
  return ops_custom(&x, 1, &custom, "luna_cumsum");
}

/* --- scatter-add: adds rows [count,d] to x [n,d] at indices [count], which are the op's state --- */
OPS_FN int64_t ops_width(const luna_tensor *x) { return x->shape[1] * x->shape[2] * x->shape[3]; }
/* Forward a thread owns columns, so that sums keep the order of the rows; backward it owns rows. */
OPS_FN void ops_scatter_part(const ops_work *w, int64_t first, int64_t last) {
  const int32_t *index = (const int32_t *)w->state;
  const luna_tensor *rows = w->in[1];
  const int64_t d = ops_width(rows), count = rows->shape[0];
  if (!w->back) {
    for (int64_t i = 0; i < count; i++)
      for (int64_t j = first; j < last; j++) w->out->data[index[i] * d + j] += rows->data[i * d + j];
    return;
  }
  for (int64_t i = first; i < last; i++)
    for (int64_t j = 0; j < d; j++) rows->grad[i * d + j] += w->out->grad[index[i] * d + j];
}
OPS_FN luna_status ops_scatter_forward(const luna_tensor *const *in, int count, luna_tensor *out, void *state) {
  ops_work w = { ops_scatter_part, (luna_tensor *const *)(uintptr_t)in, out, state, false, ops_width(in[1]), 1 };
  (void)count;
  if (luna_count(out) > 0) memcpy(out->data, in[0]->data, (size_t)luna_count(out) * sizeof *out->data);
  return ops_run(&w, in[1]->shape[0]);
}
OPS_FN luna_status ops_scatter_backward(luna_tensor *const *in, int count, const luna_tensor *out, void *state) {
  ops_work w = { ops_scatter_part, in, out, state, true, in[1]->shape[0], 1 };
  (void)count;
  if (in[0]->grad) {
    for (int64_t i = 0; i < luna_count(out); i++) in[0]->grad[i] += out->grad[i];
  }
  return in[1]->grad ? ops_run(&w, ops_width(in[1])) : LUNA_OK;
}
/* x [n,...] with rows[i] of [count,...] added to x[indices[i]], in the order of i -> [n,...]. */
OPS_FN luna_tensor *luna_scatter_add_rows(luna_tensor *x, const int32_t *indices, luna_tensor *rows) {
  const char *name = "luna_scatter_add_rows";
  luna_tensor *const in[2] = { x, rows };
  if (!x || !rows) return x || rows ? ops_fail((x ? x : rows)->ctx, "%s: %s is null", name, x ? "rows" : "x") : NULL;
  if (x->rank < 1) return ops_fail(x->ctx, "%s: tensor %s has no axis 0", name, ops_shape(x).text);
  for (int a = 1; a < LUNA_MAX_RANK; a++)
    if (rows->rank != x->rank || rows->shape[a] != x->shape[a])
      return ops_fail(x->ctx, "%s: %s and %s differ in an axis other than 0", name, ops_shape(x).text,
                      ops_shape(rows).text);
  const int64_t count = rows->shape[0];
  if (!indices && count > 0) return ops_fail(x->ctx, "%s: indices is null", name);
  for (int64_t i = 0; i < count; i++)
    if (indices[i] < 0 || indices[i] >= x->shape[0])
      return ops_fail(x->ctx, "%s: indices[%lld] is %d, outside 0..%lld", name, (long long)i, (int)indices[i],
                      (long long)x->shape[0] - 1);
  const luna_custom custom = { ops_scatter_forward, ops_scatter_backward, indices, (size_t)count * sizeof *indices, 0,
                               false, 0, 0 };
  return ops_custom(in, 2, &custom, name);
}

#ifndef LUNA_NO_TRAIN
/* ---- gradients ---- */
/* Adds the squares of a gradient, or for null multiplies it by the factor. False: the context says why. */
OPS_FN bool ops_gradient(luna_tensor *p, double *squares, float factor) {
  const int64_t count = luna_count(p);
  float *g = p->grad, *copy = NULL;
  if (p->device != 0) {
    g = copy = (float *)malloc((size_t)count * sizeof *copy);
    if (!copy) return luna_fail(p->ctx, LUNA_OUT_OF_MEMORY, "luna_params_clip_grad: no memory") == LUNA_OK;
    if (luna_read_grad(p, copy) != LUNA_OK) return free(copy), false;
  }
  for (int64_t i = 0; i < count; i++) {
    if (squares) *squares += (double)g[i] * (double)g[i];
    else g[i] *= factor;
  }
  const bool done = squares || !copy || luna_write_grad(p, copy) == LUNA_OK;
  free(copy);
  return done;
}
/* For updates of your own: multiplies all gradients of the set by max_norm / norm where their global norm is larger (0:
   never), and returns the norm before, NaN after a failure. A norm that is not finite changes nothing. Optimisers have
   .clip, which does not wait for a device. */
OPS_FN float luna_params_clip_grad(luna_params *params, float max_norm) {
  luna_ctx *ctx = luna_params_ctx(params);
  const luna_status status = luna_error_status(ctx);
  double sum = 0;
  luna_tensor *p;
  if (!ctx || (status != LUNA_OK && status != LUNA_NOT_FINITE)) return (float)NAN;
  if (!(max_norm >= 0 && max_norm < (float)INFINITY)) {
    ops_fail(ctx, "luna_params_clip_grad: max_norm is %g; it must be finite and not negative", (double)max_norm);
    return (float)NAN;
  }
  for (int64_t i = 0; (p = luna_params_at(params, i, NULL)) != NULL; i++)
    if (p->grad && !ops_gradient(p, &sum, 1)) return (float)NAN;
  sum = sqrt(sum);
  if (!(max_norm > 0 && sum > (double)max_norm && sum < (double)INFINITY)) return (float)sum;
  for (int64_t i = 0; (p = luna_params_at(params, i, NULL)) != NULL; i++)
    if (p->grad && !ops_gradient(p, NULL, (float)((double)max_norm / sum))) return (float)NAN;
  return (float)sum;
}
#endif
#endif
