/* start.h: between semihosting.c and a board's start */
#include <stdint.h>
intptr_t board_call(int number, const void *arguments);
void board_start(void);
int main(void);
