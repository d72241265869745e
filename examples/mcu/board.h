/* board.h: what main.c needs of a board: cortex_m.c, riscv.c, or host.c, which is any computer */
#ifndef BOARD_H
#define BOARD_H
#include <stdint.h>
int board_read(char *to, int size);  /* of series.csv; returns how many bytes, 0 at its end */
void board_write(const char *text, int size); /* to outputs.txt */
void board_print(const char *text);  /* to the screen */
uint32_t board_count(void);          /* instructions so far, of qemu -icount shift=0; 0 where they are not counted */
uint32_t board_stack(void);          /* bytes of stack used so far; 0 where it is not known */
#endif
