/* board.h: what main.c needs of a board: semihosting.c with cortex_m.c or riscv.c, or host.c, which is any computer */
#ifndef BOARD_H
#define BOARD_H
#include <stdint.h>
int board_read(char *to, int size);  /* of series.csv; returns how many bytes, 0 at its end */
void board_write(const char *text, int size); /* to outputs.txt */
void board_print(const char *text);  /* to the screen */
uint32_t board_count(void);          /* instructions so far, in qemu with -icount shift=0; 0: they are not counted */
uint32_t board_stack(void);          /* bytes of stack used so far; 0: they are not known */
#endif
