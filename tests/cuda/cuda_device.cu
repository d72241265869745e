/* luna_cuda.cuh for tests/cuda/cuda.c: by nvcc for a GPU, by g++ (as C++) through cuda_host.h for none */
#ifndef __CUDACC__
#define CUDA_HOST_SPACE 256
#include "cuda_host.h"
#define LUNACU_CAUSAL_WINDOW (2 * LUNACU_CAUSAL_SCAN) /* so that a few thousand rows are several windows */
#endif
#include "luna_cuda.cuh"
#include "cuda_device.h"

extern "C" const luna_backend *cuda_backend(int device, cuda_math math) {
  return luna_cuda_backend_with(device, (luna_cuda_math)math);
}

extern "C" bool cuda_absent(char *why, size_t size) {
  luna_options options = {};
  options.backend = luna_cuda_backend(0);
  luna_ctx *ctx = luna_open(&options);
  const bool absent = luna_error_status(ctx) != LUNA_OK;
  snprintf(why, size, "%s", luna_error(ctx));
  luna_close(ctx);
  return absent;
}

__global__ void poke_kernel(float *at, float value) { *at = value; }
extern "C" void cuda_poke(luna_ctx *ctx, float *at, float value) {
  LUNACU_LAUNCH(poke_kernel, 1, 1, 0, luna_cuda_stream(ctx), at, value);
}

extern "C" bool cuda_move(luna_ctx *ctx, float *on_device, float *on_host, int64_t count, bool back) {
  const cudaStream_t stream = luna_cuda_stream(ctx);
  const cudaError_t error = cudaMemcpyAsync(back ? on_host : on_device, back ? on_device : on_host,
                                            (size_t)count * sizeof(float),
                                            back ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice, stream);
  return error == cudaSuccess && cudaStreamSynchronize(stream) == cudaSuccess;
}

__global__ void square_kernel(int64_t n, float factor, const float *a, const float *b, float *y) {
  const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = factor * a[i] * b[i] * b[i];
}
__global__ void square_slope_kernel(int64_t n, float factor, const float *a, const float *b, const float *dy, float *da,
                                    float *db) {
  const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n && da) da[i] += factor * dy[i] * b[i] * b[i];
  if (i < n && db) db[i] += 2 * factor * dy[i] * a[i] * b[i];
}
static luna_status square_forward(const luna_tensor *const *in, int count, luna_tensor *out, void *state) {
  const int64_t n = luna_count(out);
  (void)count;
  LUNACU_LAUNCH(square_kernel, (unsigned)((n + 63) / 64), 64, 0, luna_cuda_stream(out->ctx), n, *(const float *)state,
                in[0]->data, in[1]->data, out->data);
  return LUNA_OK;
}
static luna_status square_backward(luna_tensor *const *in, int count, const luna_tensor *out, void *state) {
  const int64_t n = luna_count(out);
  (void)count;
  LUNACU_LAUNCH(square_slope_kernel, (unsigned)((n + 63) / 64), 64, 0, luna_cuda_stream(out->ctx), n,
                *(const float *)state, in[0]->data, in[1]->data, out->grad, in[0]->grad, in[1]->grad);
  return LUNA_OK;
}
static const float square_factor = 0.5f;
extern "C" const luna_custom cuda_square = {square_forward, square_backward, &square_factor, sizeof square_factor, 0,
                                            false, 0, 0};

static luna_status overrun_forward(const luna_tensor *const *in, int count, luna_tensor *out, void *state) {
  const int64_t n = luna_count(out) + 1;
  (void)count;
  LUNACU_LAUNCH(square_kernel, (unsigned)((n + 63) / 64), 64, 0, luna_cuda_stream(out->ctx), n, *(const float *)state,
                in[0]->data, in[0]->data, out->data);
  return LUNA_OK;
}
static luna_status unlaunched_forward(const luna_tensor *const *in, int count, luna_tensor *out, void *state) {
  (void)count;
  (void)LUNACU_START(square_kernel, 1, 4096, 0, luna_cuda_stream(out->ctx), luna_count(out), *(const float *)state,
                     in[0]->data, in[0]->data, out->data);
  return LUNA_OK;
}
extern "C" const luna_custom cuda_overrun = {overrun_forward, square_backward, &square_factor, sizeof square_factor, 0,
                                             false, 0, 0};
extern "C" const luna_custom cuda_unlaunched = {unlaunched_forward, square_backward, &square_factor,
                                                sizeof square_factor, 0, false, 0, 0};

extern "C" void cuda_leave_error(void) {
  void *memory = NULL;
  (void)cudaMalloc(&memory, (size_t)1 << 60);
}
extern "C" void cuda_leave_launch(luna_ctx *ctx) {
  (void)LUNACU_START(poke_kernel, 1, 4096, 0, luna_cuda_stream(ctx), &luna_backend_state(ctx)->norm, 0.0f);
}
extern "C" void cuda_leave_not_ready(luna_ctx *ctx) {
  while (cudaStreamQuery(luna_cuda_stream(ctx)) == cudaSuccess)
    for (int i = 0; i < 16; i++) cuda_poke(ctx, &luna_backend_state(ctx)->norm, 0); /* which nothing reads */
}
extern "C" const char *cuda_left_error(void) { return cudaGetErrorName(cudaGetLastError()); }

#ifdef LUNA_CUDA_HOST
static luna_backend strict;
static const luna_backend *strictly() { /* the real table's entry comes next */
  (void)cudaSetDevice(0);
  return luna_cuda_backend(1);
}
static void strict_close(void *self) { strictly()->close(self); }
static luna_status strict_open(luna_ctx *ctx, int device, void **self) { return strictly()->open(ctx, device, self); }
static void *strict_allocate(void *self, size_t bytes) { return strictly()->allocate(self, bytes); }
static void strict_release(void *self, void *memory, size_t bytes) { strictly()->release(self, memory, bytes); }
static luna_status strict_copy(luna_ctx *ctx, void *to, const void *from, size_t bytes, int direction) {
  return strictly()->copy(ctx, to, from, bytes, direction);
}
static luna_status strict_zero(luna_ctx *ctx, void *at, size_t bytes) { return strictly()->zero(ctx, at, bytes); }
static luna_status strict_wait(luna_ctx *ctx, const luna_ctx *other) { return strictly()->wait(ctx, other); }
static luna_status strict_begin(luna_ctx *ctx, luna_step_state *state, bool training, bool stepped) {
  return strictly()->begin(ctx, state, training, stepped);
}
static luna_status strict_check(luna_ctx *ctx, const luna_tensor *loss, luna_step_state *state) {
  return strictly()->check(ctx, loss, state);
}
static luna_status strict_norm(luna_ctx *ctx, const luna_rule *rule, const luna_update *parts,
                               const luna_update *table, int64_t count) {
  return strictly()->norm(ctx, rule, parts, table, count);
}
static luna_status strict_update(luna_ctx *ctx, const luna_rule *rule, const luna_update *parts,
                                 const luna_update *table, int64_t count) {
  return strictly()->update(ctx, rule, parts, table, count);
}
static void strict_token(luna_ctx *ctx, void **kept, bool ends) { strictly()->token(ctx, kept, ends); }
static void strict_forget(void *self, void *kept) { strictly()->forget(self, kept); }
static luna_status strict_forward(luna_op *op) { return strictly()->op[op->kind].forward(op); }
static luna_status strict_backward(luna_op *op) { return strictly()->op[op->kind].backward(op); }
static void *exact_allocate(void *, size_t bytes) {
  void *memory = NULL;
  return cudaSetDevice(1) == cudaSuccess && cudaMalloc(&memory, bytes) == cudaSuccess ? memory : NULL;
}
static void exact_release(void *, void *memory, size_t) { (void)cudaFree(memory); }
extern "C" const luna_backend *cuda_strict_backend(bool exact) {
  cuda_host.devices = 2;
  strict = *luna_cuda_backend(1);
  strict.open = strict_open;
  strict.close = strict_close;
  strict.allocate = exact ? exact_allocate : strict_allocate;
  strict.release = exact ? exact_release : strict_release;
  strict.copy = strict_copy;
  strict.zero = strict_zero;
  strict.wait = strict_wait;
  strict.begin = strict_begin;
  strict.check = strict_check;
  strict.norm = strict_norm;
  strict.update = strict_update;
  strict.token = strict_token;
  strict.forget = strict_forget;
  for (luna_op_functions &row : strict.op)
    if (row.forward) row.forward = strict_forward, row.backward = strict_backward;
  return &strict;
}
extern "C" bool cuda_emulated(void) { return true; }
extern "C" void cuda_seed(unsigned seed) { cuda_host.seed = seed; }
extern "C" void cuda_fail(cuda_failure what, int at) {
  if (what == CUDA_NO_DEVICE) cuda_host.devices = 0;
  if (what == CUDA_OLD_DEVICE) cuda_host.major = 7;
  if (what == CUDA_NO_MEMORY) cuda_host.fail_allocation = at;
  if (what == CUDA_FULL) cuda_host.memory = cuda_host.allocated + (size_t)at;
  if (what == CUDA_NO_LAUNCH) cuda_host.fail_launch = at;
  if (what == CUDA_FAULT) cuda_host.fault = at;
  if (what == CUDA_NO_KERNELS) cuda_host.no_image = at;
  if (what == CUDA_NO_ENDINGS) cuda_host.no_endings = 1;
  if (what == CUDA_NO_WAYS) cuda_host.no_endings = 2;
}
extern "C" void cuda_mend(void) { /* what was found stays found, unless it was wanted */
  const auto errors = cuda_host.quiet ? 0 : cuda_host.errors;
  char message[sizeof cuda_host.message];
  memcpy(message, cuda_host.message, sizeof message);
  cuda_host_reset();
  cuda_host.errors = errors;
  if (errors) memcpy(cuda_host.message, message, sizeof message);
  cuda_host.devices = 1;
  cuda_host.major = 9;
  cuda_host.no_image = 0;
  cuda_host.no_endings = 0;
  cuda_host.memory = cuda_host_state().memory;
}
extern "C" void cuda_quiet(bool quiet) { cuda_host.quiet = quiet; }
extern "C" size_t cuda_allocated(void) { return cuda_host.allocated; }
extern "C" bool cuda_vast(unsigned blocks) {
  if (blocks && cudahost::run_launch != cudahost::emulate) return false; /* PTX would run all of them */
#ifdef CUDA_HOST_ASAN
  if (blocks) return false;            /* which remembers eight bytes of memory in one */
#endif
  cuda_host.sample = blocks;
  cuda_host.memory = blocks ? (size_t)200 << 30 : cuda_host_state().memory;
  return true;
}
extern "C" size_t cuda_max_shared(void) { return cuda_host.max_shared; }
extern "C" unsigned cuda_max_grid(void) { return cuda_host.max_grid; }
extern "C" cuda_counts cuda_counted(void) {
  const cuda_counts now = {cuda_host.launches + cuda_host.products, cuda_host.replays, cuda_host.copies,
                           cuda_host.synchronisations, cuda_host.drains, cuda_host.max_allocated};
  cuda_host.drains = 0;
  cuda_host.launches = cuda_host.products = cuda_host.replays = cuda_host.copies = cuda_host.synchronisations = 0;
  cuda_host.max_allocated = cuda_host.allocated;
  return now;
}
extern "C" unsigned long long cuda_errors(const char **message) {
  *message = cuda_host.message;
  return cuda_host.errors;
}
#else
extern "C" bool cuda_emulated(void) { return false; }
extern "C" void cuda_seed(unsigned) {}
extern "C" void cuda_fail(cuda_failure, int) {}
extern "C" void cuda_mend(void) {}
extern "C" const luna_backend *cuda_strict_backend(bool) { return NULL; }
extern "C" void cuda_quiet(bool) {}
extern "C" size_t cuda_allocated(void) { return 0; }
extern "C" bool cuda_vast(unsigned) { return false; }
extern "C" size_t cuda_max_shared(void) { return 0; }
extern "C" unsigned cuda_max_grid(void) { return 0; }
extern "C" cuda_counts cuda_counted(void) { return {}; }
extern "C" unsigned long long cuda_errors(const char **message) { return *message = "", 0; }
#endif
