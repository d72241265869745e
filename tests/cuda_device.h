/* The test's view of the device, by functions in C: cuda_device.cu has them both for a GPU and for cuda_host.h, where the device can be made to fail. */
#ifndef CUDA_DEVICE_H
#define CUDA_DEVICE_H
#include "luna.h"
#ifdef __cplusplus
extern "C" {
#endif
typedef enum cuda_math { CUDA_F32 = 0, CUDA_TF32, CUDA_BF16 } cuda_math;
const luna_backend *cuda_backend(int device, cuda_math math);

/* Records what is called between the two, and replays it. False, or null: it failed. */
bool cuda_capture(luna_ctx *ctx);
void *cuda_captured(luna_ctx *ctx);
bool cuda_replay(luna_ctx *ctx, void *graph);
void cuda_forget(void *graph);
void cuda_poke(luna_ctx *ctx, float *at, float value); /* one number of device memory, in the stream's order */

/* an operation of the user's own: y = factor a b^2, forward and backward kernels */
extern const luna_custom cuda_square;

/* the emulator's; on a GPU cuda_emulated is false and the rest does nothing */
typedef enum cuda_failure { CUDA_NO_DEVICE, CUDA_OLD_DEVICE, CUDA_NO_MEMORY, CUDA_FULL, CUDA_NO_LAUNCH, CUDA_FAULT } cuda_failure;
bool cuda_emulated(void);
void cuda_seed(unsigned seed);
void cuda_fail(cuda_failure what, int at); /* the at-th allocation, launch or kernel from now on; FULL: all that need more than at bytes */
void cuda_mend(void);
size_t cuda_allocated(void);               /* bytes on the device */
unsigned long long cuda_errors(const char **message); /* what the emulator found wrong with kernels and their launches */
#ifdef __cplusplus
}
#endif
#endif
