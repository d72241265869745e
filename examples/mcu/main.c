/* main.c: runs an exported model, detector.c, on series.csv: a line a step, numbers with commas between them, of which
   the first are the model's features ("", "?" or "NaN" where one is missing) or, of a model of tokens, the token. What
   it finds goes to outputs.txt, a line a step: the bits of its floats in hexadecimal, so that machines can be compared.
   A first line without numbers names the columns and is left out. */
#include "board.h"
#include "detector.h"

#ifdef DETECTOR_VOCAB
#define NUMBERS 1
#else
#define NUMBERS DETECTOR_FEATURES
#endif

static detector_state state;         /* zeroed: the beginning of a sequence */
static float x[NUMBERS], y[DETECTOR_OUTPUTS];

/* ---- the series -------------------------------------------------------------------------------------------------- */

static char buffer[128];
static int at, size;
static int next_character(void) {    /* -1 at the end */
  if (at == size) {
    at = 0;
    size = board_read(buffer, (int)sizeof buffer);
  }
  return size > 0 ? (unsigned char)buffer[at++] : -1;
}

/* A number as integer / power of ten, which all machines read alike; returns what ended it. NaN: there is none. */
static int read_number(float *number) {
  int32_t digits = 0, scale = 1;
  int c = next_character(), negative = 0, point = 0, any = 0;
  for (; c != ',' && c != '\n' && c >= 0; c = next_character()) {
    if (c == '-') negative = 1;
    if (c == '.') point = 1;
    if (c < '0' || c > '9' || digits > 99999999 || scale > 99999999) continue;
    digits = digits * 10 + (c - '0');
    if (point) scale *= 10;
    any = 1;
  }
  *number = (float)(negative ? -digits : digits) / (float)scale;
  if (!any) *number = (*number - *number) / (*number - *number);
  return c;
}
static int read_step(void) {         /* 0 at the end of the series */
  float rest;
  int c = 0;
  for (int i = 0; i < NUMBERS; i++) {
    if (c == '\n') return 0;
    c = read_number(&x[i]);
    if (c < 0) return 0;
  }
  while (c != '\n' && c >= 0) c = read_number(&rest);
  return 1;
}

/* ---- what is found ----------------------------------------------------------------------------------------------- */

static void write_outputs(void) {
  char line[9 * DETECTOR_OUTPUTS], *to = line;
  for (int o = 0; o < DETECTOR_OUTPUTS; o++) {
    union { float number; uint32_t bits; } word;
    word.number = y[o];
    for (int shift = 28; shift >= 0; shift -= 4) *to++ = "0123456789abcdef"[word.bits >> shift & 15];
    *to++ = ' ';
  }
  to[-1] = '\n';
  board_write(line, (int)sizeof line);
}
static void print_number(const char *label, uint32_t number) {
  char text[16], *to = text + sizeof text;
  *--to = 0;
  *--to = '\n';
  do *--to = (char)('0' + number % 10); while ((number /= 10) > 0);
  board_print(label);
  board_print(to);
}

int main(void) {
  uint32_t steps = 0, first, count = 0;
  while (read_step()) {
    first = board_count();
#ifdef DETECTOR_VOCAB
    const int good = detector_step(&state, (int32_t)x[0], y);
#else
    const int good = detector_step(&state, x, y);
#endif
    count += board_count() - first;
    if (!good && steps == 0) continue; /* the names of columns */
    if (!good) board_print("a number is not one that the model reads\n");
    write_outputs();
    steps++;
  }
  print_number("steps ", steps);
  print_number("state ", (uint32_t)sizeof state);
  print_number("instructions a step ", steps ? count / steps : 0);
  print_number("stack ", board_stack());
  return steps == 0;
}
