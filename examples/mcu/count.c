/* count.c: in place of main.c, how many instructions a multiply-add of the product loops takes (times 100): what more
   columns take, so that what a row takes besides is left out. Includes the model to reach its functions. */
#include "detector.c"

#include "board.h"

enum { TIMES = 64, COLUMNS = D >= 32 ? 32 : D }; /* of fc1's rows */
static float x[FFN > D ? FFN : D], y[FFN > D ? FFN : D];

static uint32_t products(int columns) {
#ifdef EIGHT
  static row8 row;
#endif
  const uint32_t first = board_count();
  for (int i = 0; i < TIMES; i++) {
#ifdef EIGHT
    linear8(&layers[0].fc1, &row, D, columns, y);
#else
    linear(&layers[0].fc1, x, D, columns, y);
#endif
  }
  return board_count() - first;
}
int main(void) {
  uint32_t count = (products(COLUMNS) - products(COLUMNS / 2)) / (TIMES / 4 * D * (COLUMNS / 2) / 25);
  char text[16], *to = text + sizeof text;
  *--to = 0;
  *--to = '\n';
  do *--to = (char)('0' + count % 10); while ((count /= 10) > 0);
  board_print(to);
  return x[0] > 0.0f;
}
