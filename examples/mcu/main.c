/* main.c: runs an exported model, detector.c, on series.csv: a line a step, cells with ',', ';' or tabs between them. A
   first line without numbers names the columns. The model's features are read from the columns of the names that
   detector.h has; where it has none, from the first columns, or, of a model of tokens, the token from the first one. A
   cell is empty, or "?", "NaN" or the like, where a number is missing; one that is no number ends the program with a
   sentence. What the model finds goes to outputs.txt, a line a step: the bits of its floats in hexadecimal, so that
   machines can be compared; where detector.h has names of classes, the screen says which one is found. With
   -DLEARN_STEPS=N -DLEARN_RATE=X, of a model that was exported with --learn classes: the number after the last feature
   is the class; the first N steps are learnt from, and of the others it is counted how many are found. */
#include "board.h"
#include "detector.h"

#ifdef DETECTOR_VOCAB
#define NUMBERS 1
#else
#define NUMBERS DETECTOR_FEATURES
#endif
#ifdef LEARN_STEPS
#define CELLS (NUMBERS + 1)          /* of a line that are read: the class is the last */
#else
#define CELLS NUMBERS
#endif

static detector_state state;         /* zeroed: the beginning of a sequence */
static float x[CELLS], y[DETECTOR_OUTPUTS];
static uint32_t lines;               /* read so far */

static void print_number(const char *name, uint32_t number, const char *end) {
  char text[16], *to = text + sizeof text;
  *--to = 0;
  do *--to = (char)('0' + number % 10); while ((number /= 10) > 0);
  board_print(name);
  board_print(to);
  board_print(end);
}

#if defined(DETECTOR_COLUMNS) || defined(DETECTOR_CLASSES)
/* A name that the model has: what a terminal would obey in it becomes "?". */
static void print_name(const char *name) {
  char one[2] = { 0, 0 };
  int last = 0;
  for (; *name; name++) {
    const int c = (unsigned char)*name, control = c < 32 || c == 127 || (last == 0xC2 && c < 160);
    one[0] = *name;
    board_print(control ? "?" : one);
    last = c;
  }
}
#endif

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

static char cell[256];
static int by;                       /* between cells: the first such character */
static int read_cell(void) {         /* without spaces and quotes around it; returns what ended it */
  int c, count = 0, quoted = 0;
  while ((c = next_character()) >= 0 && c != '\n') {
    if (!by && !quoted && (c == ',' || c == ';' || c == '\t')) by = c;
    if (c == by && !quoted) break;
    if (c == '"') quoted = !quoted;
    else if (c != '\r' && (count > 0 || c != ' ') && count < (int)sizeof cell - 1) cell[count++] = (char)c;
  }
  while (count > 0 && cell[count - 1] == ' ') count--;
  cell[count] = 0;
  return c;
}
static int is_cell(const char *text, int bits) { /* bits 32: in capitals or small letters */
  const char *c = cell;
  while (*text && (*c | bits) == *text) c++, text++;
  return *c == *text;
}
static int is_missing(void) {
  static const char *const words[] = { "", "?", "-", "na", "n/a", "nan", "null", "none" };
  for (unsigned i = 0; i < sizeof words / sizeof *words; i++) if (is_cell(words[i], 32)) return 1;
  return 0;
}
static int is_digit(char c) { return c >= '0' && c <= '9'; }

/* A number as nine digits and a power of ten, which all machines read alike; 0 where the text is none. */
static int number_of(const char *text, float *number) {
  const int negative = *text == '-';
  int32_t digits = 0, exponent = 0, given = 0;
  int point = 0, any = 0;
  float power = 1;
  for (text += negative || *text == '+'; is_digit(*text) || (*text == '.' && !point); text++) {
    if (*text == '.') point = 1;
    else if (any = 1, digits > 99999999) exponent += !point;
    else digits = digits * 10 + (*text - '0'), exponent -= point;
  }
  if (any && (*text == 'e' || *text == 'E')) {
    const int less = text[1] == '-';
    text += 1 + (less || text[1] == '+');
    for (any = is_digit(*text); is_digit(*text); text++) if (given < 100) given = given * 10 + (*text - '0');
    exponent += less ? -given : given;
  }
  for (int i = exponent < 0 ? -exponent : exponent; i > 0 && digits > 0; i--) power *= 10.0f;
  *number = (float)(negative ? -digits : digits);
  *number = exponent < 0 ? *number / power : *number * power;
  return any && !*text;
}

/* ---- its columns ------------------------------------------------------------------------------------------------- */

#ifdef DETECTOR_COLUMNS
static const char *const names[] = { DETECTOR_COLUMNS };
#endif
static int places[CELLS], named[CELLS]; /* of what is read: as numbered, as the first line says; -1: nowhere */

static void number_places(void) {    /* a column without a name is called by its number, from 1 */
  for (int i = 0; i < NUMBERS; i++) {
#ifdef DETECTOR_COLUMNS
    float number;
    places[i] = number_of(names[i], &number) ? (int)number - 1 : -1;
#else
    places[i] = i;
#endif
    named[i] = -1;
  }
#ifdef LEARN_STEPS
  places[NUMBERS] = places[NUMBERS - 1] + 1;
#endif
}
static void look_for_names(int place) {
#ifdef DETECTOR_COLUMNS
  for (int i = 0; i < NUMBERS; i++) if (is_cell(names[i], 0)) named[i] = place;
#endif
  (void)place;
}
/* Whether all columns are there; the first line was one of names, or not. */
static int find_places(int header) {
#ifdef DETECTOR_COLUMNS
  for (int i = 0; i < NUMBERS; i++) {
    if (header) places[i] = named[i];
    if (places[i] >= 0) continue;
    board_print(header ? "series.csv has no column " : "the first line of series.csv does not name the column ");
    print_name(names[i]);
    board_print("\n");
    return 0;
  }
#endif
  (void)header;
#ifdef LEARN_STEPS
  places[NUMBERS] = places[NUMBERS - 1] + 1;
#endif
  return 1;
}

static int is_first = 1, is_header = 1; /* line; it has no number */
static int filled, bad;              /* of the line's cells that are read: how many; which is no number, from 1 */
static void take_cell(int place) {
  float number;
  const int missing = is_missing(), fine = number_of(cell, &number) || missing;
  if (is_first) look_for_names(place), is_header = is_header && (missing || !fine);
  if (missing) number = 0, number = (number - number) / (number - number);
  for (int i = 0; i < CELLS; i++) {
    if (places[i] != place) continue;
    x[i] = number, filled++;
    if (!fine && !bad) bad = place + 1;
  }
}
static int read_step(void) {         /* 1: there was one; 0: the series has ended; -1: after a sentence */
  int c, place = 0;
  do lines++, c = read_cell(); while (c == '\n' && !*cell);
  if (c < 0 && !*cell) return 0;
  for (filled = bad = 0; take_cell(place), c != '\n' && c >= 0; place++) c = read_cell();
  if (is_first) {
    is_first = 0;
    if (!find_places(is_header)) return -1;
    if (is_header) return read_step();
  }
  if (!bad && filled == CELLS) return 1;
  print_number("series.csv, line ", lines, bad ? "" : " has too few columns\n");
  if (bad) print_number(", column ", (uint32_t)bad, ": this is no number\n");
  return -1;
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

static int largest(void) {
  int best = 0;
  for (int o = 1; o < DETECTOR_OUTPUTS; o++) if (y[o] > y[best]) best = o;
  return best;
}
/* Says what is found, when five steps have agreed on something new. */
static void say_class(int best) {
#ifdef DETECTOR_CLASSES
  static const char *const classes[] = { DETECTOR_CLASSES };
  static int said = -1, last = -1, times;
  times = best == last ? times + 1 : 1;
  last = best;
  if (times < 5 || best == said) return;
  said = best;
  print_number("line ", lines, ": ");
  print_name(classes[best]);
  board_print("\n");
#endif
  (void)best;
}

#if defined(DETECTOR_VOCAB) || defined(LEARN_STEPS)
/* A token or a class; -1, which the model refuses, where it is missing. */
static int32_t index_of(float number) { return number == number ? (int32_t)number : -1; }
#endif

int main(void) {
  uint32_t steps = 0, first, count = 0;
#ifdef LEARN_STEPS
  uint32_t found = 0;
#endif
  int more;
  number_places();
  board_write("", 0);                  /* outputs.txt begins anew */
  while ((more = read_step()) > 0) {
    first = board_count();
#ifdef DETECTOR_VOCAB
    const int good = detector_step(&state, index_of(x[0]), y);
#else
    const int good = detector_step(&state, x, y);
#endif
    count += board_count() - first;
    if (!good) {                     /* the state is as before; y becomes NaN */
      print_number("series.csv, line ", lines, ": a number is not one that the model reads\n");
      for (int o = 0; o < DETECTOR_OUTPUTS; o++) y[o] = 0, y[o] /= y[o];
    }
    write_outputs();
    const int best = largest();
    if (good) say_class(best);
#ifdef LEARN_STEPS
    const int32_t wanted = index_of(x[NUMBERS]);
    if (steps >= LEARN_STEPS) found += good && best == wanted;
    else if (good) detector_learn(&state, wanted, LEARN_RATE);
#endif
    steps++;
  }
  if (!lines || (lines == 1 && !steps)) board_print("series.csv is not here, or is empty\n");
  print_number("steps ", steps, "\n");
  print_number("state ", (uint32_t)sizeof state, "\n");
  print_number("instructions a step, with -icount: ", steps ? count / steps : 0, "\n");
  print_number("stack ", board_stack(), "\n");
#ifdef LEARN_STEPS
  print_number("found of 1000 ", steps > LEARN_STEPS ? found * 1000u / (steps - LEARN_STEPS) : 0, "\n");
#endif
  return more < 0 || steps == 0;
}
