/* host.c: main.c on the computer that exports, to compare with */
#include "board.h"

#include <stdio.h>
#include <stdlib.h>

static FILE *in, *out;
int board_read(char *to, int size) {
  if (!in) in = fopen("series.csv", "r");
  return in ? (int)fread(to, 1, (size_t)size, in) : 0;
}
void board_write(const char *text, int size) {
  if (!out) out = fopen("outputs.txt", "w");
  if (out && fwrite(text, 1, (size_t)size, out) == (size_t)size && fflush(out) == 0) return;
  perror("cannot write outputs.txt");
  exit(1);
}
void board_print(const char *text) { fputs(text, stdout); }
uint32_t board_count(void) { return 0; }
uint32_t board_stack(void) { return 0; }
