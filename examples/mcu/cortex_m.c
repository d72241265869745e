/* cortex_m.c: the start of a Cortex-M0, M4F or M7, and its clock. Linked by cortex_m.ld. */
#include "board.h"
#include "start.h"

#define REGISTER(address) (*(volatile uint32_t *)(address))
#ifndef TICK                         /* nanoseconds of two cycles: mps2 boards have 25 MHz, the micro:bit 16 */
#define TICK 80
#endif

intptr_t board_call(int number, const void *arguments) {
  register intptr_t r0 __asm__("r0") = number;
  register const void *r1 __asm__("r1") = arguments;
  __asm__ volatile("bkpt 0xAB" : "+r"(r0) : "r"(r1) : "memory");
  return r0;
}

uint32_t board_count(void) {         /* to be called every half second at least: the counter has 24 bits */
  static uint32_t last;
  static uint64_t ticks;
  const uint32_t now = REGISTER(0xE000E018);
  ticks += (last - now) & 0xFFFFFF;
  last = now;
  return (uint32_t)(ticks * TICK / 2);
}

void reset(void);                    /* where the program begins */
void reset(void) {
#ifdef __ARM_FP
  REGISTER(0xE000ED88) |= 0xFu << 20; /* CPACR: the floating-point unit is on */
  __asm__ volatile("dsb\n isb");
#endif
  REGISTER(0xE000E014) = 0xFFFFFF;   /* SysTick: from its maximum down, by the processor's clock */
  REGISTER(0xE000E018) = 0;
  REGISTER(0xE000E010) = 5;
  board_start();
}
static void fault(void) {
  board_print("fault\n");
  for (;;) board_call(0x18, (const void *)0x20024);
}

extern char stack_end[];
typedef void (*handler)(void);
__attribute__((section(".vectors"), used)) static const handler vectors[16] = {
  (handler)(uintptr_t)stack_end, reset, fault, fault
};
