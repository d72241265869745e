/* Kernels of tests/cuda/cuda_host.h run as PTX (tests/cuda/ptx.h) too. A program linked with ptx_host.o does so by
   itself when the environment names the PTX:

     PTX=FILE             every kernel runs as PTX and by the emulator, and each value that either stores is compared
     PTX_ALONE=1          as PTX only: its results go on to the next kernel
     PTX_REGISTERS=FILE   what ptxas -v printed: registers and spills for the table
     PTX_VERBOSE=1        hot spots too: the lines whose requests take most more sectors or wavefronts than they need;
                          at the end, how much was compared

   What the PTX does wrong and where it differs are findings, as the emulator's own: cuda_errors of cuda_device.h. */
#ifndef PTX_HOST_H
#define PTX_HOST_H
#include <stdbool.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif
bool ptx_opened(void);
int ptx_read_all(void);                    /* every kernel, or the program ends with a sentence; how many there are */
void ptx_alone(bool alone);                /* as the environment's PTX_ALONE */
void ptx_forget(void);                     /* counts start again */
void ptx_table_head(void);
/* Prints a row for every kernel launched since that takes half an instruction or more for each of `elements`; those of
   the first table only where `whole`. */
void ptx_table(const char *title, double elements, bool whole);

/* Breaks the PTX of a kernel whose name holds this: of such instructions that have run, the n-th. False when there is
   none. */
typedef enum ptx_fault {
  PTX_BARRIER_REMOVED, PTX_STORE_MOVED, PTX_STORE_REMOVED, PTX_TF32_REMOVED, PTX_FMA_MADE_MUL, PTX_WAIT_REMOVED
} ptx_fault;
bool ptx_break(const char *kernel, ptx_fault what, int n);
void ptx_mend(void);
#ifdef __cplusplus
}
#endif
#endif
