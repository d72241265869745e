/* luna_print.h: a tensor's values as text, in NumPy's way. Include it after luna.h; it uses only what luna.h declares.

     static void out(void *user, const char *text) { fputs(text, (FILE *)user); }
     luna_print(x, out, stdout);                  [[1 2.5]
                                                   [0 NaN]]

   Of more than 1000 values it writes the first and last 3 of each axis longer than 6. The values are copied to memory
   from malloc. */
#ifndef LUNA_PRINT_H
#define LUNA_PRINT_H
#include "luna.h"
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__GNUC__) || defined(__clang__)
#define PRINT_FN static __attribute__((unused))
#else
#define PRINT_FN static
#endif

typedef struct print_job {
  const luna_tensor *t;
  const float *values;
  void (*write)(void *user, const char *text); /* null: the widest number is measured */
  void *user;
  size_t width;                        /* of a number */
  int64_t edge;                        /* an axis longer than 2 edge has so many at both ends; 0 = all */
} print_job;

/* Ends a decimal fraction where its zeros begin. */
PRINT_FN void print_trim(char *text) {
  size_t n = strlen(text);
  if (!strchr(text, '.')) return;
  while (text[n - 1] == '0') n--;
  if (text[n - 1] == '.') n--;
  text[n] = 0;
}

/* Writes a number to six decimals: 2.5, 1e7, 1.25e-4, NaN, -Inf. */
PRINT_FN void print_format(char *text, size_t room, double value) {
  const double size = value < 0 ? -value : value;
  if (value != value) {
    snprintf(text, room, "NaN");
    return;
  }
  if (size > 1e300) {
    snprintf(text, room, value < 0 ? "-Inf" : "Inf");
    return;
  }
  if (size == 0 || (size >= 1e-3 && size < 1e6)) {
    snprintf(text, room, "%.6f", size == 0 ? 0.0 : value);
    print_trim(text);
    return;
  }

  snprintf(text, room, "%.6e", value);
  char *e = strchr(text, 'e');
  const int exponent = atoi(e + 1);
  *e = 0;
  print_trim(text);
  const size_t at = strlen(text);
  snprintf(text + at, room - at, "e%d", exponent);
}

PRINT_FN void print_text(const print_job *p, const char *text) {
  if (p->write) p->write(p->user, text);
}

PRINT_FN void print_number(print_job *p, float value) {
  char text[64];
  print_format(text, sizeof text, (double)value);
  const size_t n = strlen(text);
  if (!p->write && n > p->width) p->width = n;
  for (size_t i = n; i < p->width; i++) print_text(p, " ");
  print_text(p, text);
}

/* What separates two elements of an axis: a space in a row, else a new line, and an empty one for each axis inside. */
PRINT_FN void print_between(const print_job *p, int axis) {
  const int rank = p->t->rank;
  if (axis + 1 == rank) {
    print_text(p, " ");
    return;
  }
  for (int a = axis + 1; a < rank; a++) print_text(p, "\n");
  for (int a = 0; a <= axis; a++) print_text(p, " ");
}

PRINT_FN void print_axis(print_job *p, int axis, int64_t offset) {
  const int rank = p->t->rank;
  int64_t inner = 1;
  if (axis == rank) {
    print_number(p, p->values[offset]);
    return;
  }

  const int64_t size = p->t->shape[axis];
  for (int a = axis + 1; a < rank; a++) inner *= p->t->shape[a];
  print_text(p, "[");
  for (int64_t i = 0; i < size; i++) {
    if (i > 0) print_between(p, axis);
    if (p->edge > 0 && size > 2 * p->edge && i == p->edge) {
      print_text(p, "...");
      i = size - p->edge - 1;
      continue;
    }
    print_axis(p, axis + 1, offset + i * inner);
  }
  print_text(p, "]");
}

/* Writes the values of t; the tensor's context says what failed. */
PRINT_FN luna_status luna_print(const luna_tensor *t, void (*write)(void *user, const char *text), void *user) {
  print_job p;
  if (!t) return LUNA_BAD_ARGUMENT;
  if (!write) return luna_fail(t->ctx, LUNA_BAD_ARGUMENT, "luna_print: write is null");

  const int64_t count = luna_count(t);
  float *values = (float *)malloc(((size_t)count + 1) * sizeof(float));
  if (!values) return luna_fail(t->ctx, LUNA_OUT_OF_MEMORY, "luna_print: no memory for a copy of the values");
  const luna_status status = luna_read(t, values);
  if (status != LUNA_OK) {
    free(values);
    return status;
  }

  memset(&p, 0, sizeof p);
  p.t = t;
  p.values = values;
  p.edge = count > 1000 ? 3 : 0;
  if (count > 0) print_axis(&p, 0, 0);
  p.write = write;
  p.user = user;
  if (count > 0) print_axis(&p, 0, 0);
  else write(user, "[]");
  write(user, "\n");
  free(values);
  return LUNA_OK;
}
#endif
