/* luna_profile.h: where the time of training steps goes. Include it after luna.h; it uses only what luna.h declares, so
   that it is also an example of what to make of luna_trace:

     luna_profile *profile = luna_profile_open(ctx);
     luna_profile_begin(profile);
     ... some steps ...
     luna_profile_end(profile);
     luna_profile_write(profile, LUNA_PROFILE_TABLE, write, user);
     luna_profile_close(profile);

   The table has a line for each op of each scope, forward and backward, with its time, bytes and flops a step. The
   shapes of the op's first input and first result follow its name, and a scope has the name of the function that began
   it. Bytes are those that the op must read and write, once. Flops are those of products alone; backward has twice
   those of forward, and what is computed again counts once more. Shares are of the sum of all steps, and of the peak:
   the best rate of a product of 256 by 256 matrices on as many threads. The peak is 0 on a device, where each op waits
   for the one before it.

   luna_profile_begin counts anew. After luna_profile_end a profile may be resumed, which leaves out what ran between.
   It takes 40 KB from malloc, and up to 2 MB for the timeline. A context has one tracer: a profile replaces yours, and
   leaves none. */
#ifndef LUNA_PROFILE_H
#define LUNA_PROFILE_H
#include "luna.h"
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__GNUC__) || defined(__clang__)
#define PROFILE_FN static __attribute__((unused))
#else
#define PROFILE_FN static
#endif

/* The timeline is JSON that chrome://tracing and ui.perfetto.dev open. It has the first 65,536 ops and scopes. */
typedef enum luna_profile_format {
  LUNA_PROFILE_TABLE = 0, LUNA_PROFILE_JSON, LUNA_PROFILE_TIMELINE
} luna_profile_format;

enum { PROFILE_ROWS = 288, PROFILE_SPANS = 1 << 16, PROFILE_PEAK_SIZE = 256 };

typedef struct profile_shape {
  int rank;
  int64_t size[LUNA_MAX_RANK];
} profile_shape;

/* the sums of an op's calls, or of all in a scope */
typedef struct profile_row {
  const char *name;
  luna_trace_kind kind;                /* LUNA_TRACE_SCOPE_END: a scope */
  int outer;                           /* the row of the scope around it */
  profile_shape in, out;
  int64_t calls;
  double seconds, bytes, flops;
} profile_row;

/* an op or a scope of the timeline */
typedef struct profile_span {
  const char *name;
  luna_trace_kind kind;
  int row;
  double start, seconds;
} profile_span;

typedef struct luna_profile {
  luna_ctx *ctx;
  bool begun, running;
  int64_t steps;                       /* begins */
  double origin;                       /* when luna_profile_begin was called */
  double start, seconds;               /* of what is timed, without the gaps before luna_profile_resume */
  double peak;                         /* flops a second; 0: unknown */
  profile_row row[PROFILE_ROWS];       /* row[0]: all */
  int rows;
  profile_span *spans;
  int64_t span_count, span_room, left_out;
  void (*write)(void *user, const char *text); /* luna_profile_write's */
  void *user;
} luna_profile;

PROFILE_FN luna_status profile_fail(luna_profile *p, const char *call, const char *what) {
  char sentence[200];
  snprintf(sentence, sizeof sentence, "%s: %s", call, what);
  return luna_fail(p->ctx, LUNA_BAD_ARGUMENT, sentence);
}
PROFILE_FN luna_status profile_out_of_order(luna_profile *p, const char *call) {
  return profile_fail(p, call, "luna_profile_begin comes before luna_profile_end, and that before luna_profile_resume "
                      "and luna_profile_write");
}

/* ---- what is counted --------------------------------------------------------------------------------------------- */

PROFILE_FN profile_shape profile_shape_of(luna_tensor *const *tensors, int count) {
  profile_shape shape;
  memset(&shape, 0, sizeof shape);
  if (count < 1 || !tensors[0]) return shape;

  shape.rank = tensors[0]->rank;
  for (int i = 0; i < shape.rank; i++) shape.size[i] = tensors[0]->shape[i];
  return shape;
}
PROFILE_FN bool profile_same_shape(const profile_shape *a, const profile_shape *b) {
  if (a->rank != b->rank) return false;
  for (int i = 0; i < a->rank; i++)
    if (a->size[i] != b->size[i]) return false;
  return true;
}
PROFILE_FN bool profile_same_row(const profile_row *a, const profile_row *b) {
  if (a->kind != b->kind || a->outer != b->outer || strcmp(a->name, b->name) != 0) return false;
  return profile_same_shape(&a->in, &b->in) && profile_same_shape(&a->out, &b->out);
}
/* Returns the row that is like this one, or the row of the scope around it when there is no place for another. */
PROFILE_FN int profile_find(luna_profile *p, const profile_row *like) {
  for (int i = 1; i < p->rows; i++)
    if (profile_same_row(&p->row[i], like)) return i;
  if (p->rows == PROFILE_ROWS) return like->outer;

  p->row[p->rows] = *like;
  return p->rows++;
}
PROFILE_FN int profile_scope(luna_profile *p, const luna_trace_scope *scope) {
  profile_row like;
  if (!scope) return 0;

  memset(&like, 0, sizeof like);
  like.name = scope->name;
  like.kind = LUNA_TRACE_SCOPE_END;
  like.outer = profile_scope(p, scope->outer);
  return profile_find(p, &like);
}
/* Adds an op to its row and to those of the scopes around it. */
PROFILE_FN void profile_add(luna_profile *p, int at, const luna_trace_event *e) {
  for (;;) {
    profile_row *row = &p->row[at];
    row->calls++;
    row->seconds += e->seconds;
    row->bytes += e->bytes;
    row->flops += e->flops;
    if (at == 0) return;
    at = row->outer;
  }
}

PROFILE_FN void profile_span_add(luna_profile *p, int row, const luna_trace_event *e) {
  if (p->span_count == p->span_room && p->span_room < PROFILE_SPANS) {
    const int64_t room = p->span_room ? 2 * p->span_room : 1024;
    profile_span *spans = (profile_span *)realloc(p->spans, (size_t)room * sizeof *spans);
    if (spans) {
      p->spans = spans;
      p->span_room = room;
    }
  }
  if (p->span_count == p->span_room) {
    p->left_out++;
    return;
  }

  profile_span *span = &p->spans[p->span_count++];
  span->name = e->name;
  span->kind = e->kind;
  span->row = row;
  span->start = e->start;
  span->seconds = e->seconds;
}

/* the context's tracer */
PROFILE_FN void profile_event(void *user, const luna_trace_event *e) {
  luna_profile *p = (luna_profile *)user;
  profile_row like;
  if (e->kind == LUNA_TRACE_SCOPE_BEGIN) return;
  if (e->kind == LUNA_TRACE_BEGIN) {
    p->steps++;
    profile_span_add(p, 0, e);
    return;
  }
  if (e->kind == LUNA_TRACE_SCOPE_END) {
    profile_span_add(p, profile_scope(p, e->scope), e);
    return;
  }

  memset(&like, 0, sizeof like);
  like.name = e->name;
  like.kind = e->kind;
  like.outer = profile_scope(p, e->scope);
  like.in = profile_shape_of(e->in, e->inputs);
  like.out = profile_shape_of(e->out, e->outputs);
  const int row = profile_find(p, &like);
  profile_add(p, row, e);
  profile_span_add(p, row, e);
}

/* ---- the peak ---------------------------------------------------------------------------------------------------- */

PROFILE_FN void profile_peak_event(void *user, const luna_trace_event *e) {
  double *best = (double *)user;
  if (e->kind == LUNA_TRACE_FORWARD && e->seconds > 0 && e->flops / e->seconds > *best) *best = e->flops / e->seconds;
}
/* Returns the flops a second of a product in a context of its own, which has as many threads; 0: unknown. */
PROFILE_FN double profile_peak(luna_ctx *of) {
  const int64_t shape[2] = { PROFILE_PEAK_SIZE, PROFILE_PEAK_SIZE };
  const luna_options *given = luna_options_of(of);
  luna_options options;
  double best = 0;
  if (given->measure || luna_backend_of(of) != luna_cpu_backend()) return 0;

  memset(&options, 0, sizeof options);
  options.threads = given->threads;
  options.parallel_for = given->parallel_for;
  options.parallel_user = given->parallel_user;
  options.isa = given->isa;
  luna_ctx *ctx = luna_open(&options);
  if (!ctx) return 0;

  const double start = luna_seconds(ctx);
  luna_trace(ctx, profile_peak_event, &best);
  for (int i = 0; i < 10 && luna_seconds(ctx) - start < 1; i++) {
    luna_begin_inference(ctx);
    luna_tensor *a = luna_tensor_new(ctx, NULL, 2, shape);
    luna_tensor *b = luna_tensor_new(ctx, NULL, 2, shape);
    (void)luna_matmul(a, b, false, false);
  }
  luna_close(ctx);
  return best;
}

/* ---- begin and end ----------------------------------------------------------------------------------------------- */

/* Returns null for null, and after a sentence when there is no memory. */
PROFILE_FN luna_profile *luna_profile_open(luna_ctx *ctx) {
  if (!ctx) return NULL;
  luna_profile *p = (luna_profile *)calloc(1, sizeof *p);
  if (!p) {
    luna_fail(ctx, LUNA_OUT_OF_MEMORY, "luna_profile_open: no memory for a profile");
    return NULL;
  }

  p->ctx = ctx;
  p->peak = -1;                        /* not measured yet */
  return p;
}

PROFILE_FN luna_status profile_run(luna_profile *p) {
  const luna_status status = luna_trace(p->ctx, profile_event, p);
  if (status != LUNA_OK) return status;

  p->running = true;
  p->start = luna_seconds(p->ctx) - p->seconds;
  return LUNA_OK;
}
/* Continues a profile that has ended. */
PROFILE_FN luna_status luna_profile_resume(luna_profile *p) {
  if (!p) return LUNA_BAD_ARGUMENT;
  if (!p->begun || p->running) return profile_out_of_order(p, "luna_profile_resume");
  return profile_run(p);
}

PROFILE_FN luna_status luna_profile_begin(luna_profile *p) {
  if (!p) return LUNA_BAD_ARGUMENT;
  if (p->peak < 0) p->peak = profile_peak(p->ctx);
  memset(p->row, 0, sizeof p->row);
  p->rows = 1;
  p->steps = 0;
  p->seconds = 0;
  p->span_count = 0;
  p->left_out = 0;
  p->running = false;
  p->origin = luna_seconds(p->ctx);
  const luna_status status = profile_run(p);
  p->begun = status == LUNA_OK;
  return status;
}

PROFILE_FN luna_status luna_profile_end(luna_profile *p) {
  if (!p) return LUNA_BAD_ARGUMENT;
  if (!p->running) return profile_out_of_order(p, "luna_profile_end");
  p->seconds = luna_seconds(p->ctx) - p->start;
  p->running = false;
  return luna_trace(p->ctx, NULL, NULL);
}

/* Close a profile before its context; null is fine. */
PROFILE_FN void luna_profile_close(luna_profile *p) {
  if (!p) return;
  if (p->running) luna_profile_end(p);
  free(p->spans);
  free(p);
}

/* ---- what is written --------------------------------------------------------------------------------------------- */

PROFILE_FN double profile_ratio(double part, double whole) { return whole > 0 ? part / whole : 0; }

/* Writes a number that is not negative, to nine decimals, with a point in every locale. */
PROFILE_FN void profile_real(const luna_profile *p, double value) {
  char digits[48];
  if (!(value >= 0 && value < 1e15)) value = 0;
  long long whole = (long long)value;
  long long part = (long long)((value - (double)whole) * 1e9 + 0.5);
  if (part == 1000000000) {
    whole++;
    part = 0;
  }

  snprintf(digits, sizeof digits, "%lld.%09lld", whole, part);
  size_t n = strlen(digits);
  while (digits[n - 1] == '0' && digits[n - 2] != '.') n--;
  digits[n] = 0;
  p->write(p->user, digits);
}
/* Writes text, then a number: "\"ms\": ", 1.5. */
PROFILE_FN void profile_field(const luna_profile *p, const char *text, double value) {
  p->write(p->user, text);
  profile_real(p, value);
}
PROFILE_FN void profile_count(const luna_profile *p, const char *text, int64_t value) {
  char digits[32];
  snprintf(digits, sizeof digits, "%lld", (long long)value);
  p->write(p->user, text);
  p->write(p->user, digits);
}
PROFILE_FN void profile_write_shape(const luna_profile *p, const profile_shape *shape) {
  p->write(p->user, "[");
  for (int i = 0; i < shape->rank; i++) profile_count(p, i ? "," : "", shape->size[i]);
  p->write(p->user, "]");
}
/* Writes a name within JSON's quotes. Users name scopes: quotes, backslashes and control characters become '?'. */
PROFILE_FN void profile_name(const luna_profile *p, const char *name) {
  char one[2] = "";
  for (const char *c = name; *c; c++) {
    const bool plain = (unsigned char)*c >= 32 && *c != '"' && *c != '\\';
    one[0] = plain ? *c : '?';
    p->write(p->user, one);
  }
}
PROFILE_FN void profile_path(const luna_profile *p, int scope) {
  if (scope == 0) return;
  profile_path(p, p->row[scope].outer);
  if (p->row[scope].outer) p->write(p->user, "/");
  profile_name(p, p->row[scope].name);
}
PROFILE_FN const char *profile_pass(luna_trace_kind kind) {
  return kind == LUNA_TRACE_BACKWARD ? "backward" : "forward";
}

/* Writes a number to one decimal at the end of `width` characters; 0 may be left out. */
PROFILE_FN void profile_tenths(const luna_profile *p, double value, int width, bool no_zero) {
  const long long tenths = (long long)(value * 10 + 0.5);
  char digits[48] = "", cell[64];
  if (value > 0 || !no_zero) snprintf(digits, sizeof digits, "%lld.%lld", tenths / 10, tenths % 10);
  snprintf(cell, sizeof cell, "%*s", width, digits);
  p->write(p->user, cell);
}
/* Calls, ms, share of all time, MB, GFLOP/s and share of the peak, a step's, to one decimal and right-aligned. The last
   three are left empty where they are 0. */
PROFILE_FN void profile_numbers(const luna_profile *p, const profile_row *row) {
  static const int width[] = { 8, 10, 7, 10, 9, 7 };
  const double steps = p->steps > 0 ? (double)p->steps : 1;
  const double rate = profile_ratio(row->flops, row->seconds);
  double value[6];
  value[0] = (double)row->calls / steps;
  value[1] = 1e3 * row->seconds / steps;
  value[2] = profile_ratio(100 * row->seconds, p->seconds);
  value[3] = 1e-6 * row->bytes / steps;
  value[4] = 1e-9 * rate;
  value[5] = profile_ratio(100 * rate, p->peak);

  for (int i = 0; i < 6; i++) profile_tenths(p, value[i], width[i], i >= 3);
  p->write(p->user, "  ");
}
PROFILE_FN void profile_line(const luna_profile *p, const profile_row *row) {
  p->write(p->user, row->name);
  if (row->out.rank) {
    p->write(p->user, " ");
    profile_write_shape(p, &row->in);
    p->write(p->user, " -> ");
    profile_write_shape(p, &row->out);
  }
  if (row->kind == LUNA_TRACE_BACKWARD) p->write(p->user, ", backward");
  p->write(p->user, "\n");
}
/* Writes the ops of a scope, then the scopes inside it, each with its own. */
PROFILE_FN void profile_scope_lines(const luna_profile *p, int outer, int depth) {
  for (int scopes = 0; scopes < 2; scopes++) {
    for (int i = 1; i < p->rows; i++) {
      const profile_row *row = &p->row[i];
      const bool is_scope = row->kind == LUNA_TRACE_SCOPE_END;
      if (row->outer != outer || is_scope != (scopes == 1)) continue;

      profile_numbers(p, row);
      for (int k = 0; k < depth; k++) p->write(p->user, "  ");
      if (is_scope) {
        p->write(p->user, row->name);
        p->write(p->user, ":\n");
        profile_scope_lines(p, i, depth + 1);
      } else profile_line(p, row);
    }
  }
}
/* the time that no op took */
PROFILE_FN double profile_rest(const luna_profile *p) {
  const double rest = p->seconds - p->row[0].seconds;
  return rest > 0 ? rest : 0;
}
PROFILE_FN void profile_table(const luna_profile *p) {
  profile_row rest;
  profile_count(p, "", p->steps);
  p->write(p->user, " steps in ");
  profile_tenths(p, 1e3 * p->seconds, 0, false);
  p->write(p->user, " ms; ");
  p->write(p->user, luna_isa_name(luna_isa_of(p->ctx)));
  profile_count(p, ", ", luna_options_of(p->ctx)->threads);
  p->write(p->user, " threads, peak ");
  profile_tenths(p, 1e-9 * p->peak, 0, false);
  p->write(p->user, " GFLOP/s; a step's:\n   calls        ms  share        MB    GF/s   peak\n");
  profile_scope_lines(p, 0, 0);

  memset(&rest, 0, sizeof rest);
  rest.seconds = profile_rest(p);
  profile_numbers(p, &rest);
  p->write(p->user, "between ops\n");
}

PROFILE_FN void profile_json_row(const luna_profile *p, const profile_row *row) {
  p->write(p->user, "\n  {\"scope\": \"");
  profile_path(p, row->outer);
  p->write(p->user, "\", \"op\": \"");
  profile_name(p, row->name);
  p->write(p->user, "\", \"pass\": \"");
  p->write(p->user, profile_pass(row->kind));
  p->write(p->user, "\", \"in\": ");
  profile_write_shape(p, &row->in);
  p->write(p->user, ", \"out\": ");
  profile_write_shape(p, &row->out);
  profile_count(p, ", \"calls\": ", row->calls);
  profile_field(p, ", \"ms\": ", 1e3 * row->seconds);
  profile_field(p, ", \"megabytes\": ", 1e-6 * row->bytes);
  profile_field(p, ", \"gflop\": ", 1e-9 * row->flops);
  profile_field(p, ", \"share\": ", profile_ratio(row->seconds, p->seconds));
  profile_field(p, ", \"share_of_peak\": ", profile_ratio(profile_ratio(row->flops, row->seconds), p->peak));
  p->write(p->user, "}");
}
PROFILE_FN void profile_json(const luna_profile *p) {
  bool first = true;
  profile_count(p, "{\"steps\": ", p->steps);
  profile_field(p, ", \"ms\": ", 1e3 * p->seconds);
  profile_field(p, ", \"between_ops_ms\": ", 1e3 * profile_rest(p));
  profile_count(p, ", \"threads\": ", luna_options_of(p->ctx)->threads);
  p->write(p->user, ", \"isa\": \"");
  p->write(p->user, luna_isa_name(luna_isa_of(p->ctx)));
  profile_field(p, "\", \"peak_gflops\": ", 1e-9 * p->peak);
  p->write(p->user, ", \"ops\": [");
  for (int i = 1; i < p->rows; i++) {
    if (p->row[i].kind == LUNA_TRACE_SCOPE_END) continue;
    if (!first) p->write(p->user, ",");
    profile_json_row(p, &p->row[i]);
    first = false;
  }
  p->write(p->user, "\n]}\n");
}

/* Writes text, then seconds as microseconds to three decimals. */
PROFILE_FN void profile_microseconds(const luna_profile *p, const char *text, double seconds) {
  const double nanoseconds = seconds > 0 ? 1e9 * seconds : 0;
  profile_field(p, text, (double)(int64_t)(nanoseconds + 0.5) * 1e-3);
}
/* Writes one event of the Trace Event Format: "X" has a start and a duration in microseconds, "i" is an instant. */
PROFILE_FN void profile_timeline_span(const luna_profile *p, const profile_span *span) {
  static const char *const category[] = { "begin", "scope", "scope", "forward", "backward", "optimizer" };
  const profile_row *row = &p->row[span->row];
  const bool instant = span->kind == LUNA_TRACE_BEGIN;
  const double after = span->start - p->origin; /* a scope may have begun before the profile */
  p->write(p->user, "\n  {\"name\": \"");
  profile_name(p, span->name);
  p->write(p->user, "\", \"cat\": \"");
  p->write(p->user, category[span->kind]);
  p->write(p->user, instant ? "\", \"ph\": \"i\", \"s\": \"t\"" : "\", \"ph\": \"X\"");
  profile_microseconds(p, ", \"pid\": 1, \"tid\": 1, \"ts\": ", after);
  if (!instant) profile_microseconds(p, ", \"dur\": ", after > 0 ? span->seconds : span->seconds + after);
  if (row->kind == span->kind && row->out.rank) {
    p->write(p->user, ", \"args\": {\"in\": ");
    profile_write_shape(p, &row->in);
    p->write(p->user, ", \"out\": ");
    profile_write_shape(p, &row->out);
    p->write(p->user, "}");
  }
  p->write(p->user, "}");
}
PROFILE_FN void profile_timeline(const luna_profile *p) {
  profile_count(p, "{\"displayTimeUnit\": \"ms\", \"otherData\": {\"left_out\": ", p->left_out);
  p->write(p->user, "}, \"traceEvents\": [");
  for (int64_t i = 0; i < p->span_count; i++) {
    if (i) p->write(p->user, ",");
    profile_timeline_span(p, &p->spans[i]);
  }
  p->write(p->user, "\n]}\n");
}

/* Writes a profile that has ended, in pieces. */
PROFILE_FN luna_status luna_profile_write(luna_profile *p, luna_profile_format format,
                                          void (*write)(void *user, const char *text), void *user) {
  static const char name[] = "luna_profile_write";
  if (!p) return LUNA_BAD_ARGUMENT;
  if (!write) return profile_fail(p, name, "write is null");
  if ((int)format < 0 || (int)format > LUNA_PROFILE_TIMELINE) {
    char what[60];
    snprintf(what, sizeof what, "format is %d, outside 0..%d", (int)format, (int)LUNA_PROFILE_TIMELINE);
    return profile_fail(p, name, what);
  }
  if (!p->begun || p->running) return profile_out_of_order(p, name);

  p->write = write;
  p->user = user;
  switch (format) {
    case LUNA_PROFILE_TABLE: profile_table(p); break;
    case LUNA_PROFILE_JSON: profile_json(p); break;
    case LUNA_PROFILE_TIMELINE: profile_timeline(p); break;
  }
  return LUNA_OK;
}
#endif
