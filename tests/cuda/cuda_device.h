/* The test's view of the device, by functions in C: cuda_device.cu has them both for a GPU and for cuda_host.h, where
   the device can be made to fail. */
#ifndef CUDA_DEVICE_H
#define CUDA_DEVICE_H
#include "luna_cuda.cuh"
#ifdef __cplusplus
extern "C" {
#endif
typedef enum cuda_math { CUDA_F32 = 0, CUDA_TF32, CUDA_BF16 } cuda_math;
const luna_backend *cuda_backend(int device, cuda_math math);
bool cuda_absent(char *why, size_t size); /* whether the first device cannot be used, and the sentence that says why */

void cuda_poke(luna_ctx *ctx, float *at, float value); /* one number of device memory, in the stream's order */
/* numbers of the host to the device, or back; false when that fails */
bool cuda_move(luna_ctx *ctx, float *on_device, float *on_host, int64_t count, bool back);

/* operations of the user's own: y = factor a b^2, forward and backward kernels; and two that are wrong, of one input: a
   kernel that writes one number more than there is room for, and one that no device can launch */
extern const luna_custom cuda_square, cuda_overrun, cuda_unlaunched;

/* what the user's code may leave for cudaGetLastError: the error of a failed cudaMalloc; of a kernel that no device can
   launch; not ready, of a query */
void cuda_leave_error(void);
void cuda_leave_launch(luna_ctx *ctx);
void cuda_leave_not_ready(luna_ctx *ctx);
const char *cuda_left_error(void);                     /* its name, and it is reset */

/* the emulator's; on a GPU cuda_emulated is false and the rest does nothing */
typedef enum cuda_failure {
  CUDA_NO_DEVICE, CUDA_OLD_DEVICE, CUDA_NO_MEMORY, CUDA_FULL, CUDA_NO_LAUNCH, CUDA_FAULT, CUDA_NO_KERNELS,
  CUDA_NO_ENDINGS, CUDA_NO_WAYS
} cuda_failure;
bool cuda_emulated(void);
void cuda_seed(unsigned seed);
/* the at-th allocation, launch or kernel from now on; FULL: all that need more than at bytes; NO_KERNELS: error `at`;
   NO_ENDINGS: cuBLASLt refuses every product; NO_WAYS: its heuristic succeeds, and returns nothing */
void cuda_fail(cuda_failure what, int at);
void cuda_mend(void);
/* Device 1 of two: a copy of the table, before whose entries the other device becomes the current one. `exact`:
   allocations have just the bytes asked for, and are given back at once. */
const luna_backend *cuda_strict_backend(bool exact);
void cuda_quiet(bool quiet);               /* findings are counted, not printed */
size_t cuda_allocated(void);               /* bytes on the device */
/* Of each launch only so many blocks at either end run, on a device of 200 GB whose memory takes none until it is
   written; 0: all of them again, on the device as it was. False where that is not possible. */
bool cuda_vast(unsigned blocks);
size_t cuda_max_shared(void);              /* the most bytes of shared memory that a launch has used */
unsigned cuda_max_grid(void);              /* the most blocks along y or z of a launch */
typedef struct cuda_counts {               /* since they were last read */
  /* launches: kernels and products; not those of replayed graphs; drains: waits that left the device without work */
  long launches, replays, copies, synchronisations, drains;
  size_t max_allocated;
} cuda_counts;
cuda_counts cuda_counted(void);
/* what the emulator found wrong with kernels and their launches */
unsigned long long cuda_errors(const char **message);
#ifdef __cplusplus
}
#endif
#endif
