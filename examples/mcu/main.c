/* main.c: runs an exported model, detector.c, on series.csv: a line a step, numbers with commas between them, of which
   the first are the model's features ("", "?" or "NaN" where one is missing) or, of a model of tokens, the token. What
   it finds goes to outputs.txt, a line a step: the bits of its floats in hexadecimal, so that machines can be compared.
   A first line without numbers names the columns and is left out. With -DLEARN_STEPS=N -DLEARN_RATE=X, of a model that
   was exported with --learn classes: the number after the features is the class; the first N steps are learnt from, and
   of the others it is counted how many are found. */
#include "board.h"
#include "detector.h"

#ifdef DETECTOR_VOCAB
#define NUMBERS 1
#else
#define NUMBERS DETECTOR_FEATURES
#endif

static detector_state state;         /* zeroed: the beginning of a sequence */
static float x[NUMBERS], y[DETECTOR_OUTPUTS], label; /* label: the number after x */

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
  int c = 0;
  for (int i = 0; i < NUMBERS; i++) {
    if (c == '\n') return 0;
    c = read_number(&x[i]);
    if (c < 0) return 0;
  }
  if (c != '\n' && c >= 0) c = read_number(&label);
  while (c != '\n' && c >= 0) c = next_character();
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
static void print_number(const char *name, uint32_t number) {
  char text[16], *to = text + sizeof text;
  *--to = 0;
  *--to = '\n';
  do *--to = (char)('0' + number % 10); while ((number /= 10) > 0);
  board_print(name);
  board_print(to);
}

int main(void) {
  uint32_t steps = 0, first, count = 0;
  uint32_t lines = 0;
#ifdef LEARN_STEPS
  uint32_t found = 0;
#endif
  while (read_step()) {
    int words = lines++ == 0;        /* the columns' names */
    for (int i = 0; i < NUMBERS; i++) words = words && x[i] != x[i];
    if (words) continue;
    first = board_count();
#ifdef DETECTOR_VOCAB
    const int good = detector_step(&state, (int32_t)x[0], y);
#else
    const int good = detector_step(&state, x, y);
#endif
    count += board_count() - first;
    if (!good) board_print("a number is not one that the model reads\n");
    write_outputs();
#ifdef LEARN_STEPS
    int best = 0;
    for (int o = 1; o < DETECTOR_OUTPUTS; o++) if (y[o] > y[best]) best = o;
    if (steps >= LEARN_STEPS) found += best == (int)label;
    else detector_learn(&state, (int32_t)label, LEARN_RATE);
#endif
    steps++;
  }
  print_number("steps ", steps);
  print_number("state ", (uint32_t)sizeof state);
  print_number("instructions a step, with -icount: ", steps ? count / steps : 0);
  print_number("stack ", board_stack());
#ifdef LEARN_STEPS
  print_number("found of 1000 ", steps > LEARN_STEPS ? found * 1000u / (steps - LEARN_STEPS) : 0);
#endif
  return steps == 0;
}
