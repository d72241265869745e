/* riscv.c: the start of a 32-bit RISC-V, and its counter of instructions. Linked by riscv.ld. */
#include "board.h"
#include "start.h"

intptr_t board_call(int number, const void *arguments) {
  register intptr_t a0 __asm__("a0") = number;
  register const void *a1 __asm__("a1") = arguments;
  __asm__ volatile(".option push\n.option norvc\n.balign 16\nslli x0, x0, 0x1f\nebreak\nsrai x0, x0, 7\n.option pop"
                   : "+r"(a0) : "r"(a1) : "memory");
  return a0;
}
uint32_t board_count(void) {
  uint32_t count;
  __asm__ volatile(".option push\n.option arch, +zicsr\ncsrr %0, minstret\n.option pop" : "=r"(count));
  return count;
}

void reset(void);                    /* where the program begins */
__attribute__((naked, section(".start"), used)) void reset(void) {
  __asm__ volatile(".option push\n.option norelax\nla gp, __global_pointer$\n.option pop\n"
                   "la sp, stack_end\n"
#ifdef __riscv_flen
                   /* the floating-point unit is on */
                   ".option push\n.option arch, +zicsr\nli t0, 0x2000\ncsrs mstatus, t0\n.option pop\n"
#endif
                   "call board_start\n");
}
