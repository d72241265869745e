/* luna_cuda.cuh: the models of luna.h on an NVIDIA GPU. CUDA Toolkit 12 or newer, compute capability 8.0 or newer;
   nothing else.

   In one .cu file, cuda.cu:   #include "luna_cuda.cuh"
   in the program:             luna_options options = {0};
                               options.backend = luna_cuda_backend(0);
                               luna_ctx *ctx = luna_open(&options);
   and every model, layer, optimiser and checkpoint of luna.h works as before:

     nvcc -O3 -gencode arch=compute_80,code=sm_80 -c cuda.cu         C++17; 90 for an H100; half a minute
     cc -O2 -c luna.c main.c                                         luna.h's implementation, and the program, in C
     nvcc main.o luna.o cuda.o -lcublas -lcublasLt -lm -lpthread     or cc, with -L of CUDA, -lcudart -lstdc++ too

   Other compilers see declarations alone: a program in C includes this file, too. All may stand in the one .cu file,
   which is C++: there fill structs field by field. A second .cu file does not include this one, but declares what it
   needs: extern "C" struct CUstream_st *luna_cuda_stream(const luna_ctx *ctx).

   Memory      Tensors' data, gradients and moments lie on the device; luna_read and luna_item bring values back.
               Pointers of host memory never go into an op but through the calls that take host arrays (tokens,
               lengths, labels, luna_tensor_new).
   Waiting     All work goes, in order, into one stream of the context, luna_cuda_stream(ctx). luna_item, luna_read,
               saving and what reads an optimiser's counters wait for it; nothing else does. A fault of the device
               surfaces there, as the context's error.
   Errors      are those that this file's own CUDA calls return. An error that your code left for cudaGetLastError, or a
               query's cudaErrorNotReady, is neither reported nor reset, but for one that a custom op's function leaves.
               When a call of its own fails, the context has the error and cudaGetLastError's is reset.
   Custom ops  Of luna_custom's tensors data and grad are pointers of the device, for kernels that the functions launch
               into luna_cuda_stream(out->ctx); the state is the host's, and passed by value. There is no workspace.
   Devices     Each call of a context makes its device the thread's current one, and leaves it so: call cudaSetDevice
               before work of your own on another.
   Shared      sets (luna_params_share), also by contexts with other products (luna_cuda_math): the sharing context's
               stream waits for the owner's.
   Numbers     Float32 throughout, products by cuBLAS. LUNA_CUDA_TF32 and LUNA_CUDA_BF16 round the factors of products
               (10 and 7 bits of mantissa), those within the causal products and attention, of more than 16 queries and
               32 keys, too. The same program gives the same bits on the same device: no kernel adds floats in an order
               that can change.
   Dropout     decides by the same Philox counters as the CPU: same seed, same masks.
   Streams     (luna_stream, luna_seq2seq_generate's decoder) lie and run on the device; a step takes tokens there and
               waits for its logits. They are used by the thread of their context.
   Graphs      luna_graph makes a training step one cudaGraphLaunch, and a copy of what changes: tokens, labels, the
               learning rate. Streams use one by themselves for single tokens. A custom op is recorded only if its
               luna_custom says that it may be: then its launches into luna_cuda_stream are captured, and its functions
               are not called again; they must not allocate or wait. A step in which its state differs from the step
               before is not recorded, nor one of several ranks, whose gradients' sum goes through the host. In a table
               with rows of your own, those of this file are recorded; luna_cuda_stream, which yours ask for, has the
               work before them queued at once.

   Chapters: >>base >>context >>maps >>gemm >>rows >>attention >>unpack >>causal >>optimisers >>graphs >>backend

   The kernels are plain CUDA C++ over a small vocabulary (LUNACU_LAUNCH, LUNACU_SHARED, lunacu_shared), so that
   tests/cuda/cuda_host.h can compile and run them on a machine without a GPU. */
#ifndef LUNA_CUDA_CUH
#define LUNA_CUDA_CUH
#if (defined(__CUDACC__) || defined(LUNA_CUDA_HOST)) && !defined(LUNA_BACKEND)
#define LUNA_BACKEND
#endif
#include "luna.h"
#if defined(__CUDACC__) && !defined(LUNA_CUDA_HOST)
#include <cublasLt.h>
#include <cublas_v2.h>
#include <cuda_runtime.h>
#endif

#ifdef __cplusplus
extern "C" {
#endif
typedef enum luna_cuda_math { LUNA_CUDA_F32 = 0, LUNA_CUDA_TF32, LUNA_CUDA_BF16 } luna_cuda_math; /* of products */
/* Device 0 to 15. The table is there even when the device is not, or the number or the mode is another one: luna_open
   then gives a context whose error says why. */
const luna_backend *luna_cuda_backend(int device);
const luna_backend *luna_cuda_backend_with(int device, luna_cuda_math math);
/* The cudaStream_t of a context with this backend, which lives as long as the context; what has been called before lies
   in it. */
struct CUstream_st *luna_cuda_stream(const luna_ctx *ctx);

/* --- graphs: a step in one launch. Work between begin and end runs at the end; where it is the same as in the step
   before, but for the values of tokens, lengths, labels, luna_tensor_new and the learning rate, it is recorded there,
   and from then on launched as a whole. Anything else runs as it would without a graph, and so do the first steps,
   until their memory lies still: with luna_graph_reason's sentence, and never with other bits.

       luna_graph *graph = luna_graph_open(ctx);           null on the CPU: then begin and end do nothing
       for (...) {
         luna_graph_begin(graph);
         luna_begin_step(ctx);
         loss = luna_lm_loss(&model, &input, labels);
         luna_backward(loss);
         luna_optimizer_step(adam);
         if (luna_graph_end(graph) != LUNA_OK) break;      failures of the device arrive here
         ... luna_item(loss) ...                           reading inside has the work before it run at once
       }
   Recorded is what has a fixed place and size: a batch of another size, a label more that is ignored, or a custom op
   that is not recordable make a step run by itself, and so does a stream's step between begin and end. One graph at a
   time in a context; freed with it. --- */
typedef struct luna_graph luna_graph;
luna_graph *luna_graph_open(luna_ctx *ctx);
luna_status luna_graph_begin(luna_graph *graph);           /* null: LUNA_OK */
luna_status luna_graph_end(luna_graph *graph);
const char *luna_graph_reason(const luna_graph *graph);    /* why the last one was not one launch; "": it was */
void luna_graph_close(luna_graph *graph);                  /* null is fine */
#ifdef __cplusplus
}
#endif

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#error "luna_cuda.cuh needs compute capability 8.0 or newer: nvcc -gencode arch=compute_80,code=sm_80"
#endif
#if defined(__CUDACC__) || defined(LUNA_CUDA_HOST)
/* ---------------------------------------------------------------------------------------------------------------------
   >>base: shared by every chapter below
   ------------------------------------------------------------------------------------------------------------------ */
#include <math.h>
#include <mutex>
#include <new>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <type_traits>

#ifndef LUNA_CUDA_HOST
/* as kernel<<<grid, block, shared_bytes, stream>>>(arguments...), with the launch's own error as its value */
template <class... Params, class... Args>
static cudaError_t lunacu_start(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes,
                                cudaStream_t stream, Args &&...arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Args &&>(arguments)...);
}
#define LUNACU_START lunacu_start
#define LUNACU_UNROLL _Pragma("unroll")
#define LUNACU_SHARED(type, name, count) __shared__ __align__(16) type name[count]
#define LUNACU_DYNAMIC_SHARED(type, name) \
  extern __shared__ __align__(16) unsigned char lunacu_dynamic[]; \
  type *name = (type *)lunacu_dynamic
template <class Type> using lunacu_shared = Type *; /* a pointer into shared memory */
#endif

#define LUNACU_INLINE __device__ __forceinline__
/* four neighbours in shared memory, at a multiple of 16 bytes */
#ifdef LUNA_CUDA_HOST
#define LUNACU_ROLLED
inline float4 lunacu_read4(lunacu_shared<const float> p) {
  cuda_host_wide(p, 16);
  return make_float4(p[0], p[1], p[2], p[3]);
}
inline void lunacu_write4(lunacu_shared<float> p, float4 x) {
  cuda_host_wide(p, 16);
  p[0] = x.x; p[1] = x.y; p[2] = x.z; p[3] = x.w;
}
inline void lunacu_store4(float *p, float4 x) { *(float4 *)p = x; }
inline void lunacu_send4(lunacu_shared<float> to, const float *from) { cuda_host_send(to, from, 16); }
inline void lunacu_arrive() { cuda_host_arrive(); }
#else
#define LUNACU_ROLLED _Pragma("unroll 1")
LUNACU_INLINE float4 lunacu_read4(const float *p) { return *(const float4 *)p; }
LUNACU_INLINE void lunacu_write4(float *p, float4 x) { *(float4 *)p = x; }
/* four neighbours in device memory; a plain store nvcc may split in four, each of which takes as many sectors */
LUNACU_INLINE void lunacu_store4(float *p, float4 x) { __stwb((float4 *)p, x); }
/* four from device memory to shared memory, there after lunacu_arrive, which waits for all that the thread has sent */
LUNACU_INLINE void lunacu_send4(float *to, const float *from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" : : "r"((unsigned)__cvta_generic_to_shared(to)),
               "l"(__cvta_generic_to_global(from)) : "memory");
}
LUNACU_INLINE void lunacu_arrive() { asm volatile("cp.async.wait_all;" : : : "memory"); }
#endif

LUNACU_INLINE void lunacu_apart(float *x, float4 v) { x[0] = v.x; x[1] = v.y; x[2] = v.z; x[3] = v.w; }
LUNACU_INLINE float4 lunacu_together(const float *x) { return make_float4(x[0], x[1], x[2], x[3]); }

#define LUNACU_FULL 0xFFFFFFFFu
#define LUNACU_WARP 32
#define LUNACU_STAGING_PARTS 4
#define LUNACU_BLOCK 256             /* threads of a block, where nothing speaks for another number */

/* What one context needs of its device */
struct lunacu {
  luna_ctx *ctx;
  int device;
  luna_cuda_math math;
  cudaStream_t stream;
  cudaEvent_t event;                 /* of another context's stream that this one's waits for */
  cublasHandle_t blas;
  void *blas_workspace;
  double *partials;                  /* of sums that end in one number */
  /* pinned, on its way to the device, in parts: the one in use and its bytes handed out; the others' last copies */
  char *staging;
  int part;
  size_t staged;
  cudaEvent_t sent[LUNACU_STAGING_PARTS];
  luna_graph *graphs, *graph;        /* newest first; the one that has begun */
  bool capturing;                    /* what fails now runs by itself: it is no failure of the context */
};
static inline lunacu *lunacu_self(const luna_ctx *ctx) { return (lunacu *)luna_backend_self(ctx); }
/* the stream of a context's work */
static inline cudaStream_t lunacu_stream_of(const luna_ctx *ctx) { return lunacu_self(ctx)->stream; }
static inline cudaStream_t lunacu_stream(const luna_op *op) { return lunacu_stream_of(op->ctx); }

/* Errors are what calls return. The runtime's last error may be the user's: it is reset only when a call from here has
   failed and so has replaced it. */
static cudaError_t lunacu_own(cudaError_t error) {
  if (error != cudaSuccess) (void)cudaGetLastError();
  return error;
}
static thread_local cudaError_t lunacu_launch_error = cudaSuccess; /* the first since lunacu_enter or lunacu_done */
static inline void lunacu_launched(cudaError_t error) {
  if (lunacu_own(error) != cudaSuccess && lunacu_launch_error == cudaSuccess) lunacu_launch_error = error;
}
#define LUNACU_LAUNCH(...) lunacu_launched(LUNACU_START(__VA_ARGS__))
/* of blocks for `count` units of a row's work, of which a block does `unit`; if there are any */
#define LUNACU_OVER(op, kernel, count, unit, ...) \
  do { \
    if ((count) > 0) \
      LUNACU_LAUNCH(kernel, lunacu_blocks(count, unit), LUNACU_BLOCK, 0, lunacu_stream(op), __VA_ARGS__); \
  } while (0)

/* Every entry of the table starts here: launches, fills, allocations and cuBLAS go to the thread's current device. The
   earlier one is not set again: that would open a context there, memory and all, for a program that never uses it. */
static cudaError_t lunacu_enter(const lunacu *self) {
  lunacu_launch_error = cudaSuccess;
  return lunacu_own(cudaSetDevice(self->device));
}

/* the sentence of a CUDA call that failed; of a launch for which nothing was compiled, or PTX that the driver does not
   take: how to compile */
static bool lunacu_refuses_ptx(cudaError_t error) {
  return error == cudaErrorInvalidPtx || error == cudaErrorJitCompilerNotFound ||
         error == cudaErrorUnsupportedPtxVersion || error == cudaErrorJitCompilationDisabled;
}
static bool lunacu_lacks_kernels(cudaError_t error) {
  return error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction ||
         lunacu_refuses_ptx(error);
}
static void lunacu_sentence(char *room, size_t size, const char *what, int device, cudaError_t error) {
  int major = 0, minor = 0;
  const int at = snprintf(room, size, "%s: CUDA device %d: %s", what, device, cudaGetErrorString(error));
  if (!lunacu_lacks_kernels(error) || at < 0 || (size_t)at >= size) return;
  (void)lunacu_own(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  (void)lunacu_own(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  snprintf(room + at, size - (size_t)at,
           "; compile luna_cuda.cuh with nvcc -gencode arch=compute_%d%d,code=sm_%d%d%s", major, minor, major, minor,
           lunacu_refuses_ptx(error) ? ": the driver did not take what was compiled for every device" :
           ", or for every newer device too with -gencode arch=compute_80,code=compute_80");
}
static luna_status lunacu_status(cudaError_t error) {
  if (error == cudaErrorMemoryAllocation) return LUNA_OUT_OF_MEMORY;
  return lunacu_lacks_kernels(error) ? LUNA_UNSUPPORTED : LUNA_DEVICE_FAILED;
}
static luna_status lunacu_fail(luna_ctx *ctx, luna_status status, const char *sentence) {
  const lunacu *self = lunacu_self(ctx);
  return self && self->capturing ? status : luna_fail(ctx, status, sentence);
}
/* LUNA_OK, or the failure of a CUDA call */
static luna_status lunacu_check(luna_ctx *ctx, cudaError_t error, const char *what) {
  char sentence[320];
  if (lunacu_own(error) == cudaSuccess) return LUNA_OK;
  lunacu_sentence(sentence, sizeof sentence, what, lunacu_self(ctx) ? lunacu_self(ctx)->device : 0, error);
  return lunacu_fail(ctx, lunacu_status(error), sentence);
}
/* after the launches of a row or of a table entry */
static luna_status lunacu_done(luna_ctx *ctx, const char *what) {
  const cudaError_t error = lunacu_launch_error;
  lunacu_launch_error = cudaSuccess;
  return lunacu_check(ctx, error, what);
}
/* the table's function for `entry` */
template <auto entry> struct lunacu_entered;
template <class... Args, luna_status (*entry)(luna_ctx *, Args...)> struct lunacu_entered<entry> {
  static luna_status call(luna_ctx *ctx, Args... arguments) {
    if (!lunacu_self(ctx)) return LUNA_DEVICE_FAILED;
    const cudaError_t error = lunacu_enter(lunacu_self(ctx));
    return error == cudaSuccess ? entry(ctx, arguments...) : lunacu_check(ctx, error, "cudaSetDevice");
  }
};
template <luna_status (*entry)(luna_op *)> struct lunacu_entered<entry> {
  static luna_status call(luna_op *op) {
    const cudaError_t error = lunacu_enter(lunacu_self(op->ctx));
    return error == cudaSuccess ? entry(op) : lunacu_check(op->ctx, error, "cudaSetDevice");
  }
};
/* a row's: of `run`, which launches alone, or returns a status too; `back` where it serves both directions */
template <auto run, auto... back> static luna_status lunacu_row(luna_op *op) {
  luna_status status = LUNA_OK;
  if constexpr (std::is_void<decltype(run(op, back...))>::value) run(op, back...);
  else status = run(op, back...);
  return status == LUNA_OK ? lunacu_done(op->ctx, luna_op_name(op->kind)) : status;
}

static inline int64_t lunacu_min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t lunacu_max(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t lunacu_divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
/* blocks along x for `count` units of work, a block doing `unit` of them: kernels stride by gridDim.x, so it may be
   fewer */
static inline unsigned lunacu_blocks(int64_t count, int64_t unit) {
  return (unsigned)lunacu_max(1, lunacu_min(lunacu_divide_up(count, unit), 1 << 20));
}
static inline int64_t lunacu_last(const luna_tensor *t) { return t->rank ? t->shape[t->rank - 1] : 1; }
static inline int64_t lunacu_rows(const luna_tensor *t) { return lunacu_last(t) ? luna_count(t) / lunacu_last(t) : 0; }
static inline float *lunacu_data(const luna_op *op, int i) { return op->in[i] ? op->in[i]->data : NULL; }
static inline float *lunacu_grad(const luna_op *op, int i) { return op->in[i] ? op->in[i]->grad : NULL; }
static inline bool lunacu_sets(const luna_op *op, int i) { return op->sets >> i & 1; }
/* what a row whose backward is like it reads and writes: x and y, or dy and dx, to which it may add */
struct lunacu_way {
  const float *from;
  float *to;
  bool add;
};
static inline lunacu_way lunacu_way_of(const luna_op *op, bool back) {
  if (back) return {op->out[0]->grad, op->in[0]->grad, !lunacu_sets(op, 0)};
  return {op->in[0]->data, op->out[0]->data, false};
}
static inline void lunacu_nothing_query(luna_op *op) { (void)op; }
/* `floats` floats from *at on, in multiples of 256 bytes; with *at starting at null, *at counts bytes */
static inline float *lunacu_take(char **at, int64_t floats) {
  float *start = (float *)*at;
  *at = (char *)((uintptr_t)*at + ((size_t)floats * sizeof(float) + 255) / 256 * 256);
  return start;
}

LUNACU_INLINE int64_t lunacu_index() { return (int64_t)blockIdx.x * blockDim.x + threadIdx.x; }
LUNACU_INLINE int64_t lunacu_stride() { return (int64_t)gridDim.x * blockDim.x; }

/* --- sums and maxima over threads, the same in all of them, in an order that never changes --- */
struct lunacu_sum {
  template <class Type> static LUNACU_INLINE Type of(Type a, Type b) { return a + b; }
};
struct lunacu_maximum {
  static LUNACU_INLINE float of(float a, float b) { return fmaxf(a, b); }
};
/* over `lanes` neighbours of a warp, a power of two */
template <class Rule, class Type> LUNACU_INLINE Type lunacu_over_lanes(Type x, int lanes = LUNACU_WARP) {
  for (int i = lanes / 2; i > 0; i /= 2) x = Rule::of(x, __shfl_xor_sync(LUNACU_FULL, x, i));
  return x;
}
/* over a block of whole warps; `scratch` holds a word a warp (32 at most) and may be used again afterwards */
template <class Rule, class Type> LUNACU_INLINE Type lunacu_over_block(Type x, lunacu_shared<Type> scratch) {
  const int warp = threadIdx.x / LUNACU_WARP, warps = blockDim.x / LUNACU_WARP;
  x = lunacu_over_lanes<Rule>(x);
  if (threadIdx.x % LUNACU_WARP == 0) scratch[warp] = x;
  __syncthreads();
  x = scratch[0];
  for (int i = 1; i < warps; i++) x = Rule::of(x, (Type)scratch[i]);
  __syncthreads();
  return x;
}
/* over a team: some lanes of a warp, or a whole block, all of whose threads must come */
template <class Rule> LUNACU_INLINE float lunacu_over_team(int team, float x, lunacu_shared<float> scratch) {
  return team > LUNACU_WARP ? lunacu_over_block<Rule>(x, scratch) : lunacu_over_lanes<Rule>(x, team);
}

/* --- dropout: what luna_dropout decides, from the seed and the step in device memory --- */
struct lunacu_dropout {
  const luna_step_state *state;
  uint32_t threshold, op;            /* threshold 0: nothing is dropped */
  float keep;
};
static lunacu_dropout lunacu_dropout_of(const luna_op *op, float probability, uint32_t number) {
  lunacu_dropout d = {luna_backend_state(op->ctx), 0, number, 1.0f};
  if (probability > 0) {
    d.threshold = (uint32_t)((double)probability * 65536.0 + 0.5);
    d.keep = 1.0f / (1.0f - probability);
  }
  return d;
}
static inline lunacu_dropout lunacu_op_dropout(const luna_op *op) {
  return lunacu_dropout_of(op, op->dropout, op->dropout_op);
}
static inline lunacu_dropout lunacu_last_dropout(const luna_op *op) {
  return lunacu_dropout_of(op, op->last_dropout, op->last_dropout_op);
}
/* the four words that decide for elements 8 block to 8 block + 7: half-word i for the i-th */
LUNACU_INLINE void lunacu_philox(const lunacu_dropout &d, int64_t block, uint32_t word[4]) {
  uint32_t c0 = (uint32_t)block, c1 = (uint32_t)((uint64_t)block >> 32), c2 = d.op, c3 = (uint32_t)d.state->step;
  uint32_t k0 = (uint32_t)d.state->seed, k1 = (uint32_t)(d.state->seed >> 32);
  for (int round = 0; round < 10; round++) {
    const uint32_t h0 = __umulhi(0xD2511F53u, c0), l0 = 0xD2511F53u * c0, h2 = __umulhi(0xCD9E8D57u, c2),
        l2 = 0xCD9E8D57u * c2;
    c0 = h2 ^ c1 ^ k0;
    c1 = l2;
    c2 = h0 ^ c3 ^ k1;
    c3 = l0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  word[0] = c0; word[1] = c1; word[2] = c2; word[3] = c3;
}
/* the factor of an element: 0, or 1/(1 - p) */
LUNACU_INLINE float lunacu_drop(const lunacu_dropout &d, int64_t element) {
  uint32_t word[4];
  if (d.threshold == 0) return 1.0f;
  lunacu_philox(d, element / 8, word);
  const int at = (int)(element % 8);
  return (word[at / 2] >> (at % 2 * 16) & 0xFFFFu) < d.threshold ? 0.0f : d.keep;
}
/* the factors of elements i to i + 3 and i + 8 to i + 11, of two blocks: lanes side by side make one each, for i a
   multiple of 8 in the even lane and 4 more in the other, and give each other the halves that they need */
LUNACU_INLINE void lunacu_drop8(const lunacu_dropout &d, int64_t i, float factor[8]) {
  const uint32_t pair = 3u << (threadIdx.x % LUNACU_WARP & ~1u);
  const bool odd = threadIdx.x % 2;
  uint32_t word[4], have[4];
  lunacu_philox(d, i / 8 + odd, word);
  LUNACU_UNROLL for (int k = 0; k < 2; k++) {
    const uint32_t other = __shfl_xor_sync(pair, odd ? word[k] : word[k + 2], 1),
                   own = odd ? word[k + 2] : word[k];
    have[k] = odd ? other : own;
    have[k + 2] = odd ? own : other;
  }
  LUNACU_UNROLL for (int k = 0; k < 8; k++)
    factor[k] = (have[k / 2] >> (k % 2 * 16) & 0xFFFFu) < d.threshold ? 0.0f : d.keep;
}
/* x times its factor, where a dropped NaN is 0 */
LUNACU_INLINE float lunacu_dropped(float x, float factor) { return factor > 0 ? x * factor : 0.0f; }

/* --- LUNA_MAPS and LUNA_ELEMENTWISE of single numbers, whose vectors these are --- */
#undef vf_zero
#undef vf_of
#undef vf_neg
#undef vf_add
#undef vf_sub
#undef vf_mul
#undef vf_div
#undef vf_fma
#undef vf_fnma
#undef vf_max
#undef vf_lt
#undef vf_le
#undef vf_gt
#undef vf_select
#undef vf_abs
#undef vf_sqrt
#undef vf_exp
#undef vf_exp2
#undef vf_log
#undef vf_log1p
#undef vf_tanh
#undef vf_half_gauss
#undef vf_normal_cdf
#define vf_zero() 0.0f
#define vf_of(number) ((float)(number))
#define vf_neg(x) (-(x))
#define vf_add(a, b) ((a) + (b))
#define vf_sub(a, b) ((a) - (b))
#define vf_mul(a, b) ((a) * (b))
#define vf_div(a, b) ((a) / (b))
#define vf_fma(a, b, c) ((a) * (b) + (c))
#define vf_fnma(a, b, c) ((c) - (a) * (b))
#define vf_max(a, b) ((a) > (b) ? (a) : (b))
#define vf_lt(a, b) ((a) < (b))
#define vf_le(a, b) ((a) <= (b))
#define vf_gt(a, b) ((a) > (b))
#define vf_select(m, a, b) ((m) ? (a) : (b))
#define vf_abs(x) fabsf(x)
#define vf_sqrt(x) sqrtf(x)
#define vf_exp(x) expf(x)
#define vf_exp2(x) exp2f(x)
#define vf_log(x) logf(x)
#define vf_log1p(x) log1pf(x)
#define vf_tanh(x) tanhf(x)
#define vf_half_gauss(x) expf(-0.5f * (x) * (x))
#define vf_normal_cdf(x) (0.5f * (1 + erff((x) * 0.70710678118654752f)))
#define LUNACU_VALUE(NAME, name, value, slope) case LUNA_ACTIVATION_##NAME: return value;
#define LUNACU_SLOPE(NAME, name, value, slope) \
  case LUNA_ACTIVATION_##NAME: { const float y = value; (void)y; return slope; }
LUNACU_INLINE float lunacu_activation(int kind, float x) {
  switch (kind) { LUNA_MAPS(LUNACU_VALUE) default: return x; }
}
LUNACU_INLINE float lunacu_slope(int kind, float x) {
  switch (kind) { LUNA_MAPS(LUNACU_SLOPE) default: return 1.0f; }
}
#undef LUNACU_VALUE
#undef LUNACU_SLOPE
#define LUNACU_VALUE(NAME, tier, reads, cheap, function, inputs, value, da, db, dc) case LUNA_OP_##NAME: return value;
#define LUNACU_SLOPE(NAME, tier, reads, cheap, function, inputs, value, da, db, dc) \
  case LUNA_OP_##NAME: return input == 0 ? (da) : input == 1 ? (db) : (dc);
LUNACU_INLINE float lunacu_combine(int kind, float a, float b, float c) {
  switch (kind) { LUNA_ELEMENTWISE(LUNACU_VALUE) default: return c; }
}
/* input's gradient, for g of the result */
LUNACU_INLINE float lunacu_combine_slope(int kind, int input, float a, float b, float c, float g) {
  (void)c;
  switch (kind) { LUNA_ELEMENTWISE(LUNACU_SLOPE) default: return g; }
}
#undef LUNACU_VALUE
#undef LUNACU_SLOPE

/* ---------------------------------------------------------------------------------------------------------------------
   >>context: one device, its memory, copies
   ------------------------------------------------------------------------------------------------------------------ */
#define LUNACU_STAGING ((size_t)1 << 20) /* bytes of a part */
#define LUNACU_BLAS_WORKSPACE ((size_t)32 << 20)
#define LUNACU_PARTIALS_SIZE (1 << 17)
#define LUNACU_DEVICES 16

static void lunacu_graph_flush(luna_graph *graph, const char *reason);

static void lunacu_close(void *user) {
  lunacu *self = (lunacu *)user;
  while (self->graphs) luna_graph_close(self->graphs);
  (void)lunacu_enter(self);
  if (self->stream) (void)lunacu_own(cudaStreamSynchronize(self->stream));
  if (self->blas) (void)cublasDestroy(self->blas);
  if (self->blas_workspace) (void)lunacu_own(cudaFree(self->blas_workspace));
  if (self->partials) (void)lunacu_own(cudaFree(self->partials));
  if (self->staging) (void)lunacu_own(cudaFreeHost(self->staging));
  if (self->event) (void)lunacu_own(cudaEventDestroy(self->event));
  for (cudaEvent_t sent : self->sent) if (sent) (void)lunacu_own(cudaEventDestroy(sent));
  if (self->stream) (void)lunacu_own(cudaStreamDestroy(self->stream));
  free(self);
}

__global__ void lunacu_begin_kernel(luna_step_state *state, bool training, bool stepped);
/* why a device cannot be used, or null */
static const char *lunacu_device_error(int device, char *room, size_t size) {
  int count = 0, major = 0, minor = 0;
  cudaFuncAttributes attributes;
  cudaError_t error = cudaGetDeviceCount(&count);
#ifndef LUNA_CUDA_HOST
  int driver = 0;                      /* 0: none */
  if (error == cudaErrorInsufficientDriver && cudaDriverGetVersion(&driver) == cudaSuccess && driver > 0) {
    snprintf(room, size, "luna_open: the NVIDIA driver serves CUDA %d.%d, and this program needs %d.%d", driver / 1000,
             driver % 1000 / 10, CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
    return room;
  }
#endif
  if (error != cudaSuccess || count < 1)
    snprintf(room, size, "luna_open: there is no CUDA device (%s)",
             error == cudaSuccess ? "none found" : cudaGetErrorString(error));
  else if (device >= count)
    snprintf(room, size, "luna_open: there is no CUDA device %d (there are %d, from 0)", device, count);
  else if ((error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device)) != cudaSuccess ||
           (error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device)) != cudaSuccess ||
           (error = cudaSetDevice(device)) != cudaSuccess)
    snprintf(room, size, "luna_open: CUDA device %d: %s", device, cudaGetErrorString(error));
  else if (major < 8)
    snprintf(room, size, "luna_open: CUDA device %d has compute capability %d.%d; 8.0 or newer is needed", device,
             major, minor);
  else if ((error = cudaFuncGetAttributes(&attributes, lunacu_begin_kernel)) != cudaSuccess)
    lunacu_sentence(room, size, "luna_open", device, error);
  else return NULL;
  (void)lunacu_own(error);
  return room;
}

static luna_status lunacu_open_none(luna_ctx *ctx, int number, void **out) {
  (void)number, (void)out;
  return luna_fail(ctx, LUNA_BAD_ARGUMENT, "luna_open: options.backend is luna_cuda_backend's of a device that is not "
                   "0 to 15, or of a mode that is no luna_cuda_math");
}
static luna_cuda_math lunacu_math_of(const luna_ctx *ctx);
static luna_status lunacu_open(luna_ctx *ctx, int number, void **out) {
  char sentence[320];
  const int device = number - 1;     /* tensors say 0 for the CPU */
  const char *wrong = lunacu_device_error(device, sentence, sizeof sentence);
  if (wrong) return luna_fail(ctx, LUNA_UNSUPPORTED, wrong);
  lunacu *self = (lunacu *)calloc(1, sizeof *self);
  if (!self)
    return luna_fail(ctx, LUNA_OUT_OF_MEMORY,
                             "luna_open: no memory for what a context keeps of its CUDA device");
  self->ctx = ctx;
  self->device = device;
  self->math = lunacu_math_of(ctx);
  cudaError_t error = cudaStreamCreateWithFlags(&self->stream, cudaStreamNonBlocking);
  if (error == cudaSuccess) error = cudaEventCreateWithFlags(&self->event, cudaEventDisableTiming);
  for (cudaEvent_t &sent : self->sent)
    if (error == cudaSuccess) error = cudaEventCreateWithFlags(&sent, cudaEventDisableTiming);
  if (error == cudaSuccess)
    error = cudaHostAlloc((void **)&self->staging, LUNACU_STAGING_PARTS * LUNACU_STAGING, cudaHostAllocDefault);
  if (error == cudaSuccess) error = cudaMalloc(&self->blas_workspace, LUNACU_BLAS_WORKSPACE);
  if (error == cudaSuccess) error = cudaMalloc((void **)&self->partials, LUNACU_PARTIALS_SIZE * sizeof(double));
  if (lunacu_own(error) != cudaSuccess) lunacu_sentence(sentence, sizeof sentence, "luna_open", device, error);
  else {
    cublasStatus_t status = cublasCreate(&self->blas);
    if (status == CUBLAS_STATUS_SUCCESS) status = cublasSetStream(self->blas, self->stream);
    if (status == CUBLAS_STATUS_SUCCESS)
      status = cublasSetWorkspace(self->blas, self->blas_workspace, LUNACU_BLAS_WORKSPACE);
    if (status == CUBLAS_STATUS_SUCCESS) status = cublasSetAtomicsMode(self->blas, CUBLAS_ATOMICS_NOT_ALLOWED);
    if (status == CUBLAS_STATUS_SUCCESS) {
      *out = self;
      return LUNA_OK;
    }
    snprintf(sentence, sizeof sentence, "luna_open: cuBLAS on CUDA device %d: %s", device,
             cublasGetStatusString(status));
  }
  lunacu_close(self);
  return luna_fail(ctx, lunacu_status(error), sentence);
}

/* luna.h takes a steady step's memory once: what it releases goes back to the device, when work that uses it is
   done. */
static void *lunacu_allocate(void *user, size_t bytes) {
  lunacu *self = (lunacu *)user;
  void *memory = NULL;
  if (!self) return NULL;
  cudaError_t error = lunacu_enter(self);
  if (error == cudaSuccess) error = lunacu_own(cudaMalloc(&memory, bytes ? bytes : 1));
  /* a fault of work before it is no lack of memory */
  if (error != cudaErrorMemoryAllocation) (void)lunacu_check(self->ctx, error, "memory");
  return error == cudaSuccess ? memory : NULL;
}
static void lunacu_release(void *user, void *memory, size_t bytes) {
  (void)bytes;
  lunacu_graph_flush(((lunacu *)user)->graph, "memory of its work was given back");
  (void)lunacu_enter((lunacu *)user);
  (void)lunacu_own(cudaFree(memory));
}

/* A few values, carried by the launch itself */
#define LUNACU_CARRIED 16
struct lunacu_carried { uint32_t word[LUNACU_CARRIED]; };
__global__ void lunacu_write_kernel(lunacu_carried carried, uint32_t *to, int count) {
  for (int i = threadIdx.x; i < count; i += blockDim.x) to[i] = carried.word[i];
}
static luna_status lunacu_carry(luna_ctx *ctx, void *to, const void *from, size_t bytes) {
  lunacu_carried carried;
  memcpy(carried.word, from, bytes);
  LUNACU_LAUNCH(lunacu_write_kernel, 1, LUNACU_WARP, 0, lunacu_self(ctx)->stream, carried, (uint32_t *)to,
                (int)(bytes / 4));
  return lunacu_done(ctx, "copy to the device");
}

static luna_status lunacu_to_device(luna_ctx *ctx, void *to, const void *from, size_t bytes) {
  lunacu *self = lunacu_self(ctx);
  cudaError_t error = cudaSuccess;
  if (bytes % 4 == 0 && bytes <= sizeof(lunacu_carried)) return lunacu_carry(ctx, to, from, bytes);
  while (bytes > 0 && error == cudaSuccess) {
    const size_t part = bytes < LUNACU_STAGING ? bytes : LUNACU_STAGING;
    if (self->staged + part > LUNACU_STAGING) { /* what the next part sent is long there, in a loop that computes */
      error = cudaEventRecord(self->sent[self->part], self->stream);
      self->part = (self->part + 1) % LUNACU_STAGING_PARTS;
      if (error == cudaSuccess) error = cudaEventSynchronize(self->sent[self->part]);
      if (error != cudaSuccess) break;
      self->staged = 0;
    }
    char *const at = self->staging + (size_t)self->part * LUNACU_STAGING + self->staged;
    memcpy(at, from, part);
    error = cudaMemcpyAsync(to, at, part, cudaMemcpyHostToDevice, self->stream);
    self->staged += (part + 255) / 256 * 256;
    to = (char *)to + part;
    from = (const char *)from + part;
    bytes -= part;
  }
  return lunacu_check(ctx, error, "copy to the device");
}
static luna_status lunacu_copy(luna_ctx *ctx, void *to, const void *from, size_t bytes, int direction) {
  lunacu *self = lunacu_self(ctx);
  if (bytes == 0) return LUNA_OK;
  if (direction == 0)
    return lunacu_check(ctx, cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, self->stream),
                        "copy on the device");
  if (direction == 1) return lunacu_to_device(ctx, to, from, bytes);
  cudaError_t error = cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, self->stream);
  if (error == cudaSuccess) error = cudaStreamSynchronize(self->stream);
  return lunacu_check(ctx, error, "copy to the host");
}
static luna_status lunacu_zero(luna_ctx *ctx, void *at, size_t bytes) {
  return bytes ? lunacu_check(ctx, cudaMemsetAsync(at, 0, bytes, lunacu_self(ctx)->stream), "zero") : LUNA_OK;
}
/* held while a stream is being captured: another thread's event in it would be captured too. Recursive, so that a
   custom op that begins a context on the set of its own fails, and does not wait for ever. */
static std::recursive_mutex &lunacu_captures() {
  static std::recursive_mutex captures;
  return captures;
}
static luna_status lunacu_wait(luna_ctx *ctx, const luna_ctx *other) {
  lunacu *self = lunacu_self(ctx);
  lunacu_captures().lock();
  cudaError_t error = cudaEventRecord(self->event, lunacu_stream_of(other));
  lunacu_captures().unlock();
  if (error == cudaSuccess) error = cudaStreamWaitEvent(self->stream, self->event, 0);
  return lunacu_check(ctx, error, "waiting for the context of a shared set");
}

/* ---------------------------------------------------------------------------------------------------------------------
   >>maps: shapes, elementwise rows, sums and maxima over an axis
   ------------------------------------------------------------------------------------------------------------------ */

/* whether vectors of four floats fit: a row of `unit` floats is whole vectors, and all pointers are aligned to 16
   bytes */
template <class... Params> static bool lunacu_wide(int64_t unit, const Params *...p) {
  return unit % 4 == 0 && ((uintptr_t)0 | ... | (uintptr_t)p) % 16 == 0;
}
/* Width floats at p, aligned to 16 bytes when Width > 1. Of eight, the other four lie eight further: two lanes side by
   side have sixteen floats, and each of their requests is whole. */
template <int Width> LUNACU_INLINE void lunacu_get(const float *p, float (&v)[Width]) {
  if constexpr (Width == 1) v[0] = *p;
  else
    LUNACU_UNROLL for (int i = 0; i < Width; i += 4) lunacu_apart(v + i, *(const float4 *)(p + 2 * i));
}
template <int Width> LUNACU_INLINE void lunacu_plus(float (&v)[Width], const float *p) {
  float more[Width];
  lunacu_get(p, more);
  LUNACU_UNROLL for (int i = 0; i < Width; i++) v[i] += more[i];
}
/* p = v, or p += v */
template <int Width> LUNACU_INLINE void lunacu_put(float *p, float (&v)[Width], bool add) {
  if (add) lunacu_plus(v, p);
  if constexpr (Width == 1) *p = v[0];
  else
    LUNACU_UNROLL for (int i = 0; i < Width; i += 4) lunacu_store4(p + 2 * i, lunacu_together(v + i));
}

/* y_i = f_i, or y_i += f_i, for i < count; f.at(i, v): Width of them from i on, as lunacu_get has them. y may be where
   f reads. */
template <int Width, class Body> __global__ void lunacu_map_kernel(int64_t count, float *y, bool add, Body f) {
  const int64_t whole = Width == 8 ? count / 16 * 2 : count / Width; /* vectors; of eight, pairs of them */
  for (int64_t n = lunacu_index(); n < whole; n += lunacu_stride()) {
    const int64_t i = Width == 8 ? n / 2 * 16 + n % 2 * 4 : n * Width;
    float v[Width];
    f.at(i, v);
    lunacu_put(y + i, v, add);
  }
  if (Width > 1 && lunacu_index() < count - whole * Width) {
    const int64_t i = whole * Width + lunacu_index();
    float v[1];
    f.at(i, v);
    lunacu_put(y + i, v, add);
  }
}
/* `wide`: f's pointers and rows allow vectors */
template <int Width = 4, class Body> static void lunacu_map(const luna_op *op, int64_t count, float *y, bool add,
                                                            bool wide, const Body &f) {
  if (wide && lunacu_wide(0, y))
    LUNACU_OVER(op, (lunacu_map_kernel<Width, Body>), count, Width * LUNACU_BLOCK, count, y, add, f);
  else LUNACU_OVER(op, (lunacu_map_kernel<1, Body>), count, LUNACU_BLOCK, count, y, add, f);
}
template <int Width = 4, class Body> static void lunacu_map_way(const luna_op *op, const lunacu_way &w, bool wide,
                                                                const Body &f) {
  lunacu_map<Width>(op, luna_count(op->out[0]), w.to, w.add, wide && lunacu_wide(0, w.from), f);
}

/* --- sums over rows: y[o, j] = sum over r of f(o, r, j), for Sums sums at once; f.add is given the number of the
   element, (o rows + r) n + j, and r. A block's threads are `columns` columns of `lanes` lanes that share the rows, as
   often as there is room; rows are split among blocks where the columns alone are too few, and the parts then added in
   order. Sums are of at most 64 floats a lane, then in double. --- */
#define LUNACU_SUMS 5                /* the maximum at once */
#define LUNACU_ENOUGH (1 << 20)      /* threads that keep a GPU busy for long enough */
struct lunacu_sums {
  int64_t outer, rows, n, splits, length; /* length: rows of a split */
  int columns, lanes;
  /* one: the columns and lanes that share rows */
  __host__ __device__ int64_t units() const { return outer * splits * ((n + columns - 1) / columns); }
  /* units of a block */
  __host__ __device__ int at_once() const { return LUNACU_BLOCK / (columns * lanes); }
};
static lunacu_sums lunacu_sums_of(int64_t outer, int64_t rows, int64_t n, bool split) {
  lunacu_sums s = {outer, rows, n, 1, rows, 1, 1};
  const int widest = split || outer * n >= LUNACU_ENOUGH / 64 ? LUNACU_WARP : 8; /* few columns: more lanes for each */
  while (s.columns < widest && s.columns < n) s.columns *= 2;
  while (s.columns * s.lanes < LUNACU_BLOCK && s.lanes * 8 < rows) s.lanes *= 2;
  const int64_t threads = outer * lunacu_divide_up(n, s.columns) * s.columns * s.lanes, maximum = rows / (16 * s.lanes);
  if (!split || maximum < 2 || threads == 0 || threads > LUNACU_ENOUGH / 2) return s;
  s.length = lunacu_divide_up(rows, lunacu_min(LUNACU_ENOUGH / threads, maximum));
  s.splits = lunacu_divide_up(rows, s.length);
  return s;
}
/* of parts */
static int64_t lunacu_sums_floats(const lunacu_sums &s, int sums) {
  return s.splits > 1 ? s.splits * s.outer * sums * s.n : 0;
}
/* what a thread of the block that has units `first` on works at */
struct lunacu_place {
  int64_t o, split, j;
  int lane;
  bool mine;
  __device__ lunacu_place(const lunacu_sums &s, int64_t first) {
    const int64_t tiles = (s.n + s.columns - 1) / s.columns, unit = first + threadIdx.x / (s.columns * s.lanes);
    lane = threadIdx.x / s.columns % s.lanes;
    j = unit % tiles * s.columns + threadIdx.x % s.columns;
    split = unit / tiles % s.splits;
    o = unit / tiles / s.splits;
    mine = o < s.outer && j < s.n;
  }
};
#define LUNACU_EACH_UNIT(s, first) \
  for (int64_t first = (int64_t)blockIdx.x * (s).at_once(); first < (s).units(); \
       first += (int64_t)gridDim.x * (s).at_once())

/* where sums go: number k of [outer, parts, n] to to[part][(o n + j) stride], or nowhere */
struct lunacu_sums_to {
  float *to[LUNACU_SUMS];
  int64_t stride[LUNACU_SUMS], n;
  int parts;
  float factor;
  bool add;
  __device__ void put(int64_t k, double sum) const {
    const int part = (int)(k / n % parts);
    LUNACU_UNROLL for (int q = 0; q < LUNACU_SUMS; q++)
      if (q == part && to[q]) {
        float *at = to[q] + (k / n / parts * n + k % n) * stride[q];
        *at = (float)((add ? (double)*at : 0) + sum * (double)factor);
      }
  }
};
template <int Sums, class Body> __global__ void lunacu_sums_kernel(Body f, lunacu_sums s, lunacu_sums_to to,
                                                                   float *partial) {
  LUNACU_SHARED(double, part, Sums * LUNACU_BLOCK);
  LUNACU_EACH_UNIT(s, first) {
    const lunacu_place at(s, first);
    const int me = threadIdx.x;
    double total[Sums] = {};
    const int64_t end = min(s.rows, (at.split + 1) * s.length), step = s.lanes * s.n;
    if (at.mine)
      for (int64_t r = at.split * s.length + at.lane, i = (at.o * s.rows + r) * s.n + at.j; r < end;) {
        float sum[Sums] = {};
        const int64_t stop = min(end, r + 64 * s.lanes);
        for (; r + 3 * s.lanes < stop; r += 4 * s.lanes, i += 4 * step) /* so that four rows are on their way at once */
          LUNACU_UNROLL for (int k = 0; k < 4; k++) f.add(i + k * step, r + k * s.lanes, sum);
        for (; r < stop; r += s.lanes, i += step) f.add(i, r, sum);
        LUNACU_UNROLL for (int q = 0; q < Sums; q++) total[q] += (double)sum[q];
      }
    LUNACU_UNROLL for (int q = 0; q < Sums; q++) part[q * LUNACU_BLOCK + me] = total[q];
    __syncthreads();
    for (int half = s.lanes / 2; half > 0; half /= 2) {
      if (at.lane < half)
        LUNACU_UNROLL for (int q = 0; q < Sums; q++) part[q * LUNACU_BLOCK + me] +=
            part[q * LUNACU_BLOCK + me + half * s.columns];
      __syncthreads();
    }
    LUNACU_UNROLL for (int q = 0; q < Sums && at.mine && at.lane == 0; q++) {
      const int64_t k = (at.o * Sums + q) * s.n + at.j;
      if (partial) partial[at.split * s.outer * Sums * s.n + k] = (float)part[q * LUNACU_BLOCK + me];
      else to.put(k, part[q * LUNACU_BLOCK + me]);
    }
    __syncthreads();
  }
}
struct lunacu_column {               /* f: x[o, r, j] */
  const float *x;
  __device__ void add(int64_t i, int64_t, float (&sum)[1]) const { sum[0] += x[i]; }
};
/* parts [splits, count], added in order */
static void lunacu_sums_end(const luna_op *op, int64_t splits, int64_t count, const float *partial,
                            const lunacu_sums_to &to) {
  const lunacu_sums s = lunacu_sums_of(1, splits, count, false);
  LUNACU_OVER(op, (lunacu_sums_kernel<1, lunacu_column>), s.units(), s.at_once(), lunacu_column{partial}, s, to,
              (float *)NULL);
}
/* partial: lunacu_sums_floats of as many sums */
template <int Sums, class Body> static void lunacu_sums_run(const luna_op *op, const lunacu_sums &s, const Body &f,
                                                            const lunacu_sums_to &to, float *partial) {
  LUNACU_OVER(op, (lunacu_sums_kernel<Sums, Body>), s.units(), s.at_once(), f, s, to,
              s.splits > 1 ? partial : (float *)NULL);
  if (s.splits > 1) lunacu_sums_end(op, s.splits, s.outer * Sums * s.n, partial, to);
}
/* to [outer, n] (+)= factor times the sums of x [outer, rows, n] over rows; scratch: lunacu_row_sums_floats */
static int64_t lunacu_row_sums_floats(int64_t outer, int64_t rows, int64_t n) {
  return lunacu_sums_floats(lunacu_sums_of(outer, rows, n, true), 1);
}
static void lunacu_row_sums(const luna_op *op, const float *x, int64_t outer, int64_t rows, int64_t n, float *to,
                            float factor, bool add, float *scratch) {
  lunacu_sums_run<1>(op, lunacu_sums_of(outer, rows, n, true), lunacu_column{x}, {{to}, {1}, n, 1, factor, add},
                     scratch);
}

/* --- rows of a part: to[r, c] = (or +=) from[r, c] for c < width, rows to_row and from_row apart: slice, concat,
   expand --- */
struct lunacu_part {
  int64_t rows, width;
  const float *from;
  int64_t from_row;
  float *to;
  int64_t to_row;
};
template <int Width> __global__ void lunacu_part_kernel(lunacu_part p, bool add) {
  for (int64_t i = lunacu_index(); i < p.rows * (p.width / Width); i += lunacu_stride()) {
    const int64_t r = i / (p.width / Width), c = i % (p.width / Width) * Width;
    float v[Width];
    lunacu_get(p.from + r * p.from_row + c, v);
    lunacu_put(p.to + r * p.to_row + c, v, add);
  }
}
static void lunacu_part_run(const luna_op *op, const lunacu_part &p, bool add) {
  const int64_t count = p.rows * p.width;
  if (lunacu_wide(p.width | p.from_row | p.to_row, p.from, p.to))
    LUNACU_OVER(op, lunacu_part_kernel<4>, count, 4 * LUNACU_BLOCK, p, add);
  else LUNACU_OVER(op, lunacu_part_kernel<1>, count, LUNACU_BLOCK, p, add);
}
/* a part of an axis is rows of `width` floats, `stride` apart; whole: the tensor with the full axis; unit: floats of
   one of the axis */
struct lunacu_axis { int64_t rows, width, stride, unit; };
static lunacu_axis lunacu_axis_of(const luna_tensor *whole, const luna_tensor *part, int64_t axis) {
  lunacu_axis a = {1, 0, 0, 1};
  for (int64_t i = 0; i < axis; i++) a.rows *= whole->shape[i];
  for (int64_t i = axis + 1; i < whole->rank; i++) a.unit *= whole->shape[i];
  a.width = part->shape[axis] * a.unit;
  a.stride = whole->shape[axis] * a.unit;
  return a;
}

/* slice: arg axis, start */
static void lunacu_slice(luna_op *op, bool back) {
  const lunacu_axis a = lunacu_axis_of(op->in[0], op->out[0], op->arg.slice.axis);
  const lunacu_way w = lunacu_way_of(op, back);
  const int64_t start = op->arg.slice.start * a.unit;
  if (back) lunacu_part_run(op, {a.rows, a.width, w.from, a.width, w.to + start, a.stride}, true);
  else lunacu_part_run(op, {a.rows, a.width, w.from + start, a.stride, w.to, a.width}, false);
}

/* concat: arg axis */
static void lunacu_concat(luna_op *op, bool back) {
  int64_t start = 0;
  for (int i = 0; i < op->inputs; i++) {
    const lunacu_axis a = lunacu_axis_of(op->out[0], op->in[i], op->arg.concat.axis);
    if (!back)
      lunacu_part_run(op, {a.rows, a.width, op->in[i]->data, a.width, op->out[0]->data + start, a.stride}, false);
    else if (op->in[i]->grad)
      lunacu_part_run(op, {a.rows, a.width, op->out[0]->grad + start, a.stride, op->in[i]->grad, a.width},
                      !lunacu_sets(op, i));
    start += a.width;
  }
}

/* expand: arg count */
static void lunacu_expand_query(luna_op *op) {
  op->backward_workspace_size = (size_t)lunacu_row_sums_floats(1, op->arg.expand.count, luna_count(op->in[0])) *
      sizeof(float);
}
static void lunacu_expand(luna_op *op, bool back) {
  const int64_t n = luna_count(op->in[0]), count = op->arg.expand.count;
  const lunacu_way w = lunacu_way_of(op, back);
  if (!back) lunacu_part_run(op, {count, n, w.from, 0, w.to, n}, false);
  else lunacu_row_sums(op, w.from, 1, count, n, w.to, 1, w.add, (float *)op->workspace);
}

/* --- permute: `to` has axes of these sizes, one of which moves by `stride` in `from`. Where the last axis stays,
   vectors of it are fetched; where it does not, tiles go through shared memory, so that both sides are read and written
   along their last axes. --- */
struct lunacu_permuted {
  const float *from;
  int64_t shape[4], stride[4];
  template <int Width> __device__ void at(int64_t i, float (&v)[Width]) const {
    const int64_t j = i / shape[3], k = j / shape[2];
    lunacu_get(from + k / shape[1] * stride[0] + k % shape[1] * stride[1] + j % shape[2] * stride[2] + i % shape[3] *
               stride[3], v);
  }
};
#define LUNACU_TILE 32
/* to's last axis, the one that is last in `from`, and the other two: their sizes, and strides in both */
struct lunacu_swapped { int64_t shape[4], from[4], to[4]; };
__global__ void lunacu_transpose_kernel(const float *from, lunacu_swapped s, float *to, bool add) {
  LUNACU_SHARED(float, tile, LUNACU_TILE * (LUNACU_TILE + 1));
  const int x = threadIdx.x % LUNACU_TILE, y = threadIdx.x / LUNACU_TILE;
  const int64_t across = (s.shape[0] + LUNACU_TILE - 1) / LUNACU_TILE,
      down = (s.shape[1] + LUNACU_TILE - 1) / LUNACU_TILE;
  for (int64_t u = blockIdx.x; u < s.shape[2] * s.shape[3] * down * across; u += gridDim.x) {
    const int64_t i0 = u % across * LUNACU_TILE, i1 = u / across % down * LUNACU_TILE,
        i2 = u / across / down % s.shape[2], i3 = u / across / down / s.shape[2];
    for (int k = y; k < LUNACU_TILE; k += LUNACU_BLOCK / LUNACU_TILE)
      if (i0 + k < s.shape[0] && i1 + x < s.shape[1])
        tile[k * (LUNACU_TILE + 1) + x] = from[(i0 + k) * s.from[0] + (i1 + x) * s.from[1] + i2 * s.from[2] + i3 *
                                               s.from[3]];
    __syncthreads();
    for (int k = y; k < LUNACU_TILE; k += LUNACU_BLOCK / LUNACU_TILE)
      if (i1 + k < s.shape[1] && i0 + x < s.shape[0]) {
        float *at = to + (i0 + x) * s.to[0] + (i1 + k) * s.to[1] + i2 * s.to[2] + i3 * s.to[3];
        *at = (add ? *at : 0) + tile[x * (LUNACU_TILE + 1) + k];
      }
    __syncthreads();
  }
}
static void lunacu_permute(luna_op *op, bool back) {
  const luna_tensor *shape = back ? op->out[0] : op->in[0];
  const lunacu_way w = lunacu_way_of(op, back);
  const int rank = shape->rank, pad = 4 - rank;
  lunacu_permuted f = {w.from, {1, 1, 1, 1}, {0, 0, 0, 0}};
  lunacu_swapped s = {};
  int64_t axes[4];                   /* to's axis i is from's axes[i] */
  int last = 3, at = 2;
  for (int i = 0; i < rank; i++) axes[back ? op->arg.permute.axes[i] : i] = back ? i : op->arg.permute.axes[i];
  for (int i = 0; i < rank; i++) {
    int64_t stride = 1;
    for (int inner = (int)axes[i] + 1; inner < rank; inner++) stride *= shape->shape[inner];
    f.shape[pad + i] = shape->shape[axes[i]];
    f.stride[pad + i] = stride;
    if (axes[i] == rank - 1) last = pad + i;
  }
  if (last == 3 || f.shape[3] < 8 || f.shape[last] < 8)
    return lunacu_map_way(op, w, last == 3 && f.shape[3] % 4 == 0, f);
  for (int64_t i = 3, stride = 1; i >= 0; stride *= f.shape[i--]) {
    const int k = i == 3 ? 0 : i == last ? 1 : at++;
    s.shape[k] = f.shape[i];
    s.from[k] = f.stride[i];
    s.to[k] = stride;
  }
  const int64_t tiles = lunacu_divide_up(s.shape[0], LUNACU_TILE) * lunacu_divide_up(s.shape[1], LUNACU_TILE) *
      s.shape[2] * s.shape[3];
  LUNACU_OVER(op, lunacu_transpose_kernel, tiles, 1, w.from, s, w.to, w.add);
}

/* --- LUNA_ELEMENTWISE: the result (input -1), or the gradient of an input for each element of it --- */
struct lunacu_each {
  const float *x[3], *dy;            /* x: null where it is a single number, or not read */
  float scalar[3];
  int64_t shape[4], stride[3][4];
  int kind, input;
  template <int Width> __device__ void at(int64_t i, float (&v)[Width]) const {
    const int64_t row = i < shape[3] ? 0 : i / shape[3], j = i - row * shape[3],
        upper = row < shape[2] ? 0 : row / shape[2];
    float in[3][Width];
    LUNACU_UNROLL for (int k = 0; k < 3; k++) {
      const float *from = x[k];
      if (from && row > 0)
        from += upper / shape[1] * stride[k][0] + upper % shape[1] * stride[k][1] + (row - upper * shape[2]) *
            stride[k][2];
      if (from && stride[k][3]) lunacu_get(from + j, in[k]);
      else
        LUNACU_UNROLL for (int w = 0; w < Width; w++) in[k][w] = from ? *from : scalar[k];
    }
    if (input >= 0) lunacu_get(dy + i, v);
    LUNACU_UNROLL for (int w = 0; w < Width; w++)
      v[w] = input < 0 ? lunacu_combine(kind, in[0][w], in[1][w], in[2][w]) :
          lunacu_combine_slope(kind, input, in[0][w], in[1][w], in[2][w], v[w]);
  }
};
struct lunacu_each_column {          /* as lunacu_column */
  lunacu_each f;
  __device__ void add(int64_t i, int64_t, float (&sum)[1]) const {
    float v[1];
    f.at(i, v);
    sum[0] += v[0];
  }
};
#define LUNACU_READS(NAME, tier, reads, cheap, function, inputs, value, da, db, dc) case LUNA_OP_##NAME: return reads;
static int lunacu_each_reads(const luna_op *op) {
  switch ((int)op->kind) { LUNA_ELEMENTWISE(LUNACU_READS) default: return 0; }
}
#undef LUNACU_READS
static lunacu_each lunacu_each_of(const luna_op *op, int input) {
  lunacu_each f;
  for (int k = 0; k < 3; k++) {
    f.x[k] = op->in[k] && (input < 0 || (lunacu_each_reads(op) & LUNA_READS_IN(k))) ? op->in[k]->data : NULL;
    f.scalar[k] = op->arg.elementwise.scalar[k];
  }
  f.dy = input < 0 ? NULL : op->out[0]->grad;
  memcpy(f.shape, op->arg.elementwise.shape, sizeof f.shape);
  memcpy(f.stride, op->arg.elementwise.stride, sizeof f.stride);
  f.kind = (int)op->kind;
  f.input = input;
  return f;
}
static void lunacu_each_run(const luna_op *op, int input, float *y, bool add) {
  const lunacu_each f = lunacu_each_of(op, input);
  const int64_t count = luna_count(op->out[0]);
  const float *rows[3];
  for (int k = 0; k < 3; k++) rows[k] = f.stride[k][3] ? f.x[k] : NULL;
  lunacu_map(op, count, y, add, lunacu_wide(f.shape[3] == count ? 0 : f.shape[3], rows[0], rows[1], rows[2], f.dy), f);
}
static bool lunacu_is_repeated(const luna_op *op, int k) { return luna_count(op->in[k]) != luna_count(op->out[0]); }
/* the gradient of an input that repeats: sums over each axis along which it does. Bytes of workspace; `run`: the work
   as well */
static size_t lunacu_unbroadcast(const luna_op *op, int k, char *workspace, bool run) {
  const float *from = op->kind == LUNA_OP_ADD ? op->out[0]->grad : NULL;
  int64_t shape[4], left = luna_count(op->out[0]) / luna_count(op->in[k]);
  char *at = workspace;
  memcpy(shape, op->arg.elementwise.shape, sizeof shape);
  for (int a = 0; a < 4; a++) {
    int64_t outer = 1, inner = 1;
    if (op->arg.elementwise.stride[k][a] != 0 || shape[a] == 1) continue;
    for (int b = 0; b < 4; b++) if (b != a) *(b < a ? &outer : &inner) *= shape[b];
    left /= shape[a];
    const lunacu_sums s = lunacu_sums_of(outer, shape[a], inner, true);
    float *sums = left == 1 ? op->in[k]->grad : lunacu_take(&at, outer * inner),
        *partial = lunacu_take(&at, lunacu_sums_floats(s, 1));
    const bool add = left == 1 && !lunacu_sets(op, k);
    if (run && from) lunacu_row_sums(op, from, outer, shape[a], inner, sums, 1, add, partial);
    else if (run)
      lunacu_sums_run<1>(op, s, lunacu_each_column{lunacu_each_of(op, k)}, {{sums}, {1}, inner, 1, 1, add}, partial);
    shape[a] = 1;
    from = sums;
  }
  return (size_t)(at - workspace);
}
static void lunacu_elementwise_query(luna_op *op) {
  for (int k = 0; k < op->inputs; k++) {
    const size_t bytes = op->training && op->in[k]->needs_grad &&
        lunacu_is_repeated(op, k) ? lunacu_unbroadcast(op, k, NULL, false) : 0;
    if (bytes > op->backward_workspace_size) op->backward_workspace_size = bytes;
  }
}
static void lunacu_elementwise_forward(luna_op *op) { lunacu_each_run(op, -1, op->out[0]->data, false); }
static void lunacu_elementwise_backward(luna_op *op) {
  for (int k = 0; k < op->inputs; k++) {
    float *grad = op->in[k]->grad;
    if (!grad || (k == 0 && grad == op->out[0]->grad)) continue; /* in place */
    if (lunacu_is_repeated(op, k)) lunacu_unbroadcast(op, k, (char *)op->workspace, true);
    else lunacu_each_run(op, k, grad, !lunacu_sets(op, k));
  }
}

/* --- scale --- */
struct lunacu_scaled {
  const float *x;
  float factor;
  template <int Width> __device__ void at(int64_t i, float (&v)[Width]) const {
    lunacu_get(x + i, v);
    LUNACU_UNROLL for (int k = 0; k < Width; k++) v[k] *= factor;
  }
};
static void lunacu_scaled_way(const luna_op *op, const lunacu_way &w, float factor) {
  lunacu_map_way(op, w, true, lunacu_scaled{w.from, factor});
}
static void lunacu_scale(luna_op *op, bool back) {
  lunacu_scaled_way(op, lunacu_way_of(op, back), op->arg.scale.factor);
}

/* --- activation: y = act(x), dx = slope(x) dy --- */
struct lunacu_activated {
  const float *x;
  int kind;
  template <int Width> __device__ void at(int64_t i, float (&v)[Width]) const {
    lunacu_get(x + i, v);
    LUNACU_UNROLL for (int k = 0; k < Width; k++) v[k] = lunacu_activation(kind, v[k]);
  }
};
struct lunacu_sloped {
  const float *x, *dy;
  int kind;
  template <int Width> __device__ void at(int64_t i, float (&v)[Width]) const {
    float given[Width];
    lunacu_get(dy + i, v);
    lunacu_get(x + i, given);
    LUNACU_UNROLL for (int k = 0; k < Width; k++) v[k] *= lunacu_slope(kind, given[k]);
  }
};
static void lunacu_activate(luna_op *op, bool back) {
  const lunacu_way w = lunacu_way_of(op, back);
  const float *x = op->in[0]->data;
  const int kind = (int)op->activation;
  if (back) lunacu_map_way(op, w, lunacu_wide(0, x), lunacu_sloped{x, w.from, kind});
  else lunacu_map_way(op, w, true, lunacu_activated{x, kind});
}

/* --- dropout: eight elements a thread, as many as one Philox block decides; four where there is none --- */
/* v = drop(v) for elements i on */
template <int Width> LUNACU_INLINE void lunacu_drops_of(const lunacu_dropout &d, int64_t i, float (&v)[Width]) {
  if constexpr (Width != 4) {
    float factor[Width];
    if (d.threshold == 0) return;
    if constexpr (Width == 8) lunacu_drop8(d, i, factor);
    else factor[0] = lunacu_drop(d, i);
    LUNACU_UNROLL for (int k = 0; k < Width; k++) v[k] = lunacu_dropped(v[k], factor[k]);
  }
}
struct lunacu_drops {
  const float *x;
  lunacu_dropout d;
  template <int Width> __device__ void at(int64_t i, float (&v)[Width]) const {
    lunacu_get(x + i, v);
    lunacu_drops_of(d, i, v);
  }
};
static void lunacu_drop_out(luna_op *op, bool back) {
  const lunacu_way w = lunacu_way_of(op, back);
  lunacu_map_way<8>(op, w, true, lunacu_drops{w.from, lunacu_op_dropout(op)});
}

/* --- mask: rows from lengths[b] on become 0, and what they hold is not read --- */
struct lunacu_masked {
  const float *x;
  const int32_t *lengths;
  int64_t n, width;                  /* rows of a sequence, floats of a row */
  template <int Width> __device__ void at(int64_t i, float (&v)[Width]) const {
    const int64_t row = i / width;
    if (row % n < lengths[row / n]) lunacu_get(x + i, v);
    else
      LUNACU_UNROLL for (int k = 0; k < Width; k++) v[k] = 0;
  }
};
static void lunacu_mask(luna_op *op, bool back) {
  const lunacu_way w = lunacu_way_of(op, back);
  const int64_t width = op->arg.mask.width;
  const lunacu_masked f = {w.from, op->lengths, op->in[0]->shape[1], width};
  lunacu_map_way(op, w, width % 4 == 0, f);
}

/* --- reduce --- */
struct lunacu_spread {               /* every row of an axis gets the gradient of their sum */
  const float *dy;
  int64_t axis, inner;
  float factor;
  template <int Width> __device__ void at(int64_t i, float (&v)[Width]) const {
    const float *from = dy + i / (axis * inner) * inner + i % inner;
    LUNACU_UNROLL for (int k = 0; k < Width; k++) v[k] = factor * from[inner > 1 ? k : 0];
  }
};
static void lunacu_reduce_query(luna_op *op) {
  op->workspace_size = (size_t)lunacu_row_sums_floats(op->arg.reduce.outer, op->arg.reduce.axis,
                                                      op->arg.reduce.inner) * sizeof(float);
}
static void lunacu_reduce(luna_op *op, bool back) {
  const int64_t axis = op->arg.reduce.axis, inner = op->arg.reduce.inner;
  const float factor = op->arg.reduce.factor;
  const lunacu_way w = lunacu_way_of(op, back);
  if (back) lunacu_map(op, luna_count(op->in[0]), w.to, w.add, lunacu_wide(inner > 1 ? inner : axis),
                       lunacu_spread{w.from, axis, inner, factor});
  else lunacu_row_sums(op, w.from, op->arg.reduce.outer, axis, inner, w.to, factor, false, (float *)op->workspace);
}

/* --- max. kept: the row of each maximum, the first of equals; a NaN is the greatest --- */
#define LUNACU_NOWHERE 0xFFFFFFFFu
LUNACU_INLINE bool lunacu_beats(float a, uint32_t a_at, float b, uint32_t b_at) {
  return a != a || b != b ? a != a && (b == b || a_at < b_at) : a > b || (a == b && a_at < b_at);
}
__global__ void lunacu_max_kernel(const float *x, lunacu_sums s, float *y, uint32_t *where) {
  LUNACU_SHARED(float, maximum, LUNACU_BLOCK);
  LUNACU_SHARED(uint32_t, place, LUNACU_BLOCK);
  LUNACU_EACH_UNIT(s, first) {
    const lunacu_place at(s, first);
    const int me = threadIdx.x;
    float best = -INFINITY;
    uint32_t best_at = LUNACU_NOWHERE;
    for (int64_t r = at.lane; r < s.rows && at.mine; r += s.lanes) {
      const float v = x[(at.o * s.rows + r) * s.n + at.j];
      if (lunacu_beats(v, (uint32_t)r, best, best_at)) {
        best = v;
        best_at = (uint32_t)r;
      }
    }
    maximum[me] = best;
    place[me] = best_at;
    __syncthreads();
    for (int half = s.lanes / 2; half > 0; half /= 2) {
      const int other = me + half * s.columns;
      if (at.lane < half && lunacu_beats(maximum[other], place[other], maximum[me], place[me])) {
        maximum[me] = maximum[other];
        place[me] = place[other];
      }
      __syncthreads();
    }
    if (at.mine && at.lane == 0) {
      y[at.o * s.n + at.j] = s.rows > 0 ? maximum[me] : 0.0f;
      if (where) where[at.o * s.n + at.j] = place[me];
    }
    __syncthreads();
  }
}
__global__ void lunacu_max_back_kernel(int64_t count, int64_t axis, int64_t inner, const uint32_t *where,
                                       const float *dy, float *dx) {
  for (int64_t i = lunacu_index(); i < count; i += lunacu_stride())
    dx[(i / inner * axis + where[i]) * inner + i % inner] += dy[i];
}
static void lunacu_max_query(luna_op *op) {
  if (op->training) op->kept_size = (size_t)luna_count(op->out[0]) * sizeof(uint32_t);
}
static void lunacu_max_forward(luna_op *op) {
  const lunacu_sums s = lunacu_sums_of(op->arg.reduce.outer, op->arg.reduce.axis, op->arg.reduce.inner, false);
  LUNACU_OVER(op, lunacu_max_kernel, s.units(), s.at_once(), op->in[0]->data, s, op->out[0]->data,
              (uint32_t *)op->kept);
}
static void lunacu_max_backward(luna_op *op) {
  const int64_t count = op->arg.reduce.axis ? luna_count(op->out[0]) : 0;
  LUNACU_OVER(op, lunacu_max_back_kernel, count, LUNACU_BLOCK, count, op->arg.reduce.axis, op->arg.reduce.inner,
              (const uint32_t *)op->kept, op->out[0]->grad, op->in[0]->grad);
}

/* --- ratio: all but the last of each row divided by the last; 0 where that is 0 --- */
LUNACU_INLINE float lunacu_quotient(float x, float divisor) { /* as the CPU rounds it */
  const float inverse = 1 / divisor;
  return inverse - inverse == 0 ? inverse * x : divisor == 0 ? 0 : x / divisor;
}
struct lunacu_ratios {
  const float *x;
  int64_t n;
  __device__ void at(int64_t i, float (&v)[1]) const {
    const float *row = x + i / n * (n + 1);
    v[0] = lunacu_quotient(row[i % n], row[n]);
  }
};
/* a warp a row: dx_j (+)= dy_j / last, dlast (+)= -dy . y / last */
__global__ void lunacu_ratio_back_kernel(int64_t rows, int64_t n, const float *x, const float *y, const float *dy,
                                         float *dx, bool add) {
  const int lane = threadIdx.x % LUNACU_WARP;
  for (int64_t r = lunacu_index() / LUNACU_WARP; r < rows; r += lunacu_stride() / LUNACU_WARP) {
    const float last = x[r * (n + 1) + n];
    float *to = dx + r * (n + 1), dot = 0;
    for (int64_t c = lane; c < n; c += LUNACU_WARP) {
      const float g = dy[r * n + c];
      to[c] = (add ? to[c] : 0) + lunacu_quotient(g, last);
      dot += g * y[r * n + c];
    }
    dot = lunacu_over_lanes<lunacu_sum>(dot);
    if (lane == 0) to[n] = (add ? to[n] : 0) - lunacu_quotient(dot, last);
  }
}
static void lunacu_ratio(luna_op *op, bool back) {
  const int64_t rows = lunacu_rows(op->in[0]), n = lunacu_last(op->out[0]);
  const lunacu_way w = lunacu_way_of(op, back);
  if (!back) lunacu_map_way<1>(op, w, false, lunacu_ratios{w.from, n});
  else LUNACU_OVER(op, lunacu_ratio_back_kernel, rows, LUNACU_BLOCK / LUNACU_WARP, rows, n, op->in[0]->data,
                   op->out[0]->data, w.from, w.to, w.add);
}

/* ---------------------------------------------------------------------------------------------------------------------
   >>gemm: products by cuBLAS, and the rows made of them: matmul, linear, feed-forward
   ------------------------------------------------------------------------------------------------------------------ */

/* element (i, j) lies at i row + j column, one of which is 1 */
struct lunacu_matrix {
  const float *at;
  int64_t row, column;
  lunacu_matrix turned() const { return {at, column, row}; }
};
/* C = A B (+ C) for `batch` products: A [m, k], B [k, n], C [m, n] dense; a batch is so many floats from the next */
struct lunacu_product {
  lunacu_matrix a, b;
  float *c;
  int64_t m, n, k;
  bool accumulate;
  int64_t batch = 1, a_batch = 0, b_batch = 0, c_batch = 0;
  /* an ending, where there is a bias [n]: C = A B + bias (+ residual). cuBLASLt has ReLU too, and does not say whether
     a NaN stays one */
  const float *bias = NULL, *residual = NULL;
};
/* how cuBLAS, which counts by columns, C^T = B^T A^T, has the factors: a leading dimension is at least 1 even where
   there is but one row */
struct lunacu_layout {
  cublasOperation_t a, b;
  int64_t lda, ldb;
};
static lunacu_layout lunacu_layout_of(const lunacu_product &p) {
  /* by rows; else by columns */
  const bool a_flat = p.a.column == 1 && p.a.row >= p.k, b_flat = p.b.column == 1 && p.b.row >= p.n;
  return {a_flat ? CUBLAS_OP_N : CUBLAS_OP_T, b_flat ? CUBLAS_OP_N : CUBLAS_OP_T, a_flat ? p.a.row : p.a.column,
          b_flat ? p.b.row : p.b.column};
}
static uint32_t lunacu_alignment(const void *p) {
  const uintptr_t at = (uintptr_t)p | 256;
  return (uint32_t)(at & (~at + 1));
}
/* A product with its ending, by cuBLASLt. No success: nothing is computed */
static cublasStatus_t lunacu_gemm_ended(lunacu *self, const lunacu_product &p, const lunacu_layout &l,
                                        cublasComputeType_t type) {
  const float one = 1, beta = p.residual ? 1.0f : 0.0f;
  const float *const from = p.residual ? p.residual : p.c;
  const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
  const cublasLtHandle_t handle = (cublasLtHandle_t)self->blas; /* which every cuBLAS handle is */
  const size_t room = LUNACU_BLAS_WORKSPACE;
  cublasLtMatmulDesc_t what = NULL;
  cublasLtMatrixLayout_t a = NULL, b = NULL, c = NULL;
  cublasLtMatmulPreference_t wish = NULL;
  cublasLtMatmulHeuristicResult_t way = {};
  int ways = 0;
  cublasStatus_t status = cublasLtMatmulDescCreate(&what, type, CUDA_R_32F);
  const auto next = [&status](cublasStatus_t s) { if (status == CUBLAS_STATUS_SUCCESS) status = s; };
  const auto describe = [&](cublasLtMatmulDescAttributes_t name, const auto &value) {
    if (status == CUBLAS_STATUS_SUCCESS) next(cublasLtMatmulDescSetAttribute(what, name, &value, sizeof value));
  };
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t name, const auto &value) {
    if (status == CUBLAS_STATUS_SUCCESS) next(cublasLtMatmulPreferenceSetAttribute(wish, name, &value, sizeof value));
  };
  describe(CUBLASLT_MATMUL_DESC_TRANSA, l.b);
  describe(CUBLASLT_MATMUL_DESC_TRANSB, l.a);
  describe(CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue);
  describe(CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.bias);
  next(cublasLtMatrixLayoutCreate(&b, CUDA_R_32F, (uint64_t)(l.b == CUBLAS_OP_N ? p.n : p.k),
                                  (uint64_t)(l.b == CUBLAS_OP_N ? p.k : p.n), l.ldb));
  next(cublasLtMatrixLayoutCreate(&a, CUDA_R_32F, (uint64_t)(l.a == CUBLAS_OP_N ? p.k : p.m),
                                  (uint64_t)(l.a == CUBLAS_OP_N ? p.m : p.k), l.lda));
  next(cublasLtMatrixLayoutCreate(&c, CUDA_R_32F, (uint64_t)p.n, (uint64_t)p.m, p.n));
  next(cublasLtMatmulPreferenceCreate(&wish));
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, room);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, lunacu_alignment(p.b.at));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, lunacu_alignment(p.a.at));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, lunacu_alignment(from));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, lunacu_alignment(p.c));
  if (status == CUBLAS_STATUS_SUCCESS)
    status = cublasLtMatmulAlgoGetHeuristic(handle, what, b, a, c, c, wish, 1, &way, &ways);
  if (status == CUBLAS_STATUS_SUCCESS && ways < 1) status = CUBLAS_STATUS_NOT_SUPPORTED;
  if (status == CUBLAS_STATUS_SUCCESS)
    status = cublasLtMatmul(handle, what, &one, p.b.at, b, p.a.at, a, &beta, from, c, p.c, c, &way.algo,
                            self->blas_workspace, room, self->stream);
  if (wish) (void)cublasLtMatmulPreferenceDestroy(wish);
  for (cublasLtMatrixLayout_t layout : {a, b, c}) if (layout) (void)cublasLtMatrixLayoutDestroy(layout);
  if (what) (void)cublasLtMatmulDescDestroy(what);
  return status;
}
/* cuBLAS takes 32-bit sizes. ended: where p has a bias, whether it and the residual were added */
static luna_status lunacu_gemm(luna_ctx *ctx, const lunacu_product &p, bool *ended = NULL) {
  lunacu *self = lunacu_self(ctx);
  const float one = 1, beta = p.accumulate ? 1.0f : 0.0f;
  const lunacu_layout l = lunacu_layout_of(p);
  const cublasComputeType_t type = self->math == LUNA_CUDA_TF32 ? CUBLAS_COMPUTE_32F_FAST_TF32 :
      self->math == LUNA_CUDA_BF16 ? CUBLAS_COMPUTE_32F_FAST_16BF : CUBLAS_COMPUTE_32F;
  char sentence[256];
  if (!p.c || p.m == 0 || p.n == 0 || p.batch == 0) return LUNA_OK;
  if (p.k == 0) {
    luna_status status = LUNA_OK;
    for (int64_t i = 0; i < p.batch && !p.accumulate && status == LUNA_OK; i++)
      status = lunacu_zero(ctx, p.c + i * p.c_batch, (size_t)(p.m * p.n) * sizeof(float));
    return status;
  }
  if (p.m > INT32_MAX || p.n > INT32_MAX || p.k > INT32_MAX || l.lda > INT32_MAX || l.ldb > INT32_MAX ||
      p.batch > INT32_MAX)
    return lunacu_fail(ctx, LUNA_UNSUPPORTED,
                       "a product with more than 2^31 - 1 rows or columns does not go through cuBLAS");
  cublasStatus_t status = p.bias ? lunacu_gemm_ended(self, p, l, type) : CUBLAS_STATUS_NOT_SUPPORTED;
  if (status == CUBLAS_STATUS_SUCCESS) *ended = true;
  else if (status != CUBLAS_STATUS_EXECUTION_FAILED)
    status = cublasGemmStridedBatchedEx(
        self->blas, l.b, l.a, (int)p.n, (int)p.m, (int)p.k, &one, p.b.at, CUDA_R_32F, (int)l.ldb, p.b_batch, p.a.at,
        CUDA_R_32F, (int)l.lda, p.a_batch, &beta, p.c, CUDA_R_32F, (int)p.n, p.c_batch, (int)p.batch, type,
        CUBLAS_GEMM_DEFAULT);
  if (status == CUBLAS_STATUS_SUCCESS) return LUNA_OK;
  snprintf(sentence, sizeof sentence, "a product [%lld, %lld] x [%lld, %lld]: cuBLAS on CUDA device %d: %s",
           (long long)p.m, (long long)p.k, (long long)p.k, (long long)p.n,
           self->device, cublasGetStatusString(status));
  return lunacu_fail(ctx, LUNA_DEVICE_FAILED, sentence);
}

/* --- column sums, for the gradients of biases, where there are any: to[items, width] += those of x [items, rows,
   width] --- */
static void lunacu_column_sums(const luna_op *op, const float *x, int64_t items, int64_t rows, int64_t width, float *to,
                               float *scratch) {
  if (to && rows > 0) lunacu_row_sums(op, x, items, rows, width, to, 1, true, scratch);
}

/* --- endings of products: pre = x + bias, y = drop(act(pre)) + residual; `pre` where it is wanted --- */
struct lunacu_ending {
  const float *x, *bias, *residual;
  float *pre;
  /* floats of a row; the number of x's first element in dropout's counting, a multiple of 8 */
  int64_t width, first;
  int activation;
  bool active_pre;                   /* pre is kept after the activation */
  lunacu_dropout dropout;
  template <int Width> __device__ void at(int64_t i, float (&v)[Width]) const {
    lunacu_get(x + i, v);
    if (bias) lunacu_plus(v, bias + i % width);
    if (pre && !active_pre) lunacu_put(pre + i, v, false);
    LUNACU_UNROLL for (int k = 0; k < Width; k++) v[k] = lunacu_activation(activation, v[k]);
    if (pre && active_pre) lunacu_put(pre + i, v, false);
    lunacu_drops_of(dropout, first + i, v);
    if (residual) lunacu_plus(v, residual + i);
  }
};
static void lunacu_end(const luna_op *op, int64_t count, float *y, const lunacu_ending &e) {
  const bool wide = lunacu_wide(0, e.x, e.bias, e.residual, e.pre);
  if (e.dropout.threshold) lunacu_map<8>(op, count, y, false, wide && (!e.bias || e.width % 16 == 0), e);
  else lunacu_map<4>(op, count, y, false, wide && (!e.bias || e.width % 4 == 0), e);
}
/* backward: slope(given) drop(dy); given null: no activation */
struct lunacu_beginning {
  const float *dy, *given;
  int64_t first;
  int activation;
  lunacu_dropout dropout;
  template <int Width> __device__ void at(int64_t i, float (&v)[Width]) const {
    float x[Width];
    lunacu_get(dy + i, v);
    lunacu_drops_of(dropout, first + i, v);
    if (!given) return;
    lunacu_get(given + i, x);
    LUNACU_UNROLL for (int k = 0; k < Width; k++) v[k] *= lunacu_slope(activation, x[k]);
  }
};
static void lunacu_begin_back(const luna_op *op, int64_t count, float *y, const lunacu_beginning &b) {
  const bool wide = lunacu_wide(0, b.dy, b.given);
  if (b.dropout.threshold) lunacu_map<8>(op, count, y, false, wide, b);
  else lunacu_map<4>(op, count, y, false, wide, b);
}
/* a residual input's gradient, where it is not out[0]'s very own */
static void lunacu_residual_backward(const luna_op *op, int at) {
  const float *dy = op->out[0]->grad;
  if (at >= op->inputs || !lunacu_grad(op, at) || op->in[at]->grad == dy) return;
  lunacu_scaled_way(op, {dy, op->in[at]->grad, true}, 1);
}
/* y is the product's ending e, where e.x is the product: by cuBLASLt, if it knows how */
static luna_status lunacu_gemm_end(const luna_op *op, lunacu_product p, float *y, const lunacu_ending &e) {
  const bool adds = y == p.c && !e.pre && e.activation == LUNA_ACTIVATION_DEFAULT && !e.dropout.threshold;
  bool ended = false;
  if (adds) p.bias = e.bias, p.residual = e.residual;
  const luna_status status = lunacu_gemm(op->ctx, p, &ended);
  if (status == LUNA_OK && !ended && (e.bias || e.residual || !adds)) lunacu_end(op, p.m * p.n, y, e);
  return status;
}
/* what y = x W^T + b gives back, for dy [rows, out]: dW += dy^T x, db += dy's column sums, dx (+)= dy W, at last, so
   that it may lie where something was that the others read */
struct lunacu_linear_grads {
  const float *dy, *x, *w;
  float *dx, *dw, *db;               /* or null */
  int64_t rows, in, out;
  bool add;
  float *scratch;                    /* of column sums */
};
static luna_status lunacu_linear_back(const luna_op *op, const lunacu_linear_grads &g) {
  const luna_status status = lunacu_gemm(op->ctx, {{g.dy, 1, g.out}, {g.x, g.in, 1}, g.dw, g.out, g.in, g.rows, true});
  if (status != LUNA_OK) return status;
  lunacu_column_sums(op, g.dy, 1, g.rows, g.out, g.db, g.scratch);
  return lunacu_gemm(op->ctx, {{g.dy, g.out, 1}, {g.w, g.in, 1}, g.dx, g.rows, g.in, g.out, g.add});
}

/* --- matmul --- */
static luna_status lunacu_matmul_product(luna_op *op, int which) {
  const int64_t outer = op->arg.matmul.outer, inner = op->arg.matmul.inner, m = op->arg.matmul.m, n = op->arg.matmul.n,
      k = op->arg.matmul.k;
  const bool ta = op->arg.matmul.transpose_a, tb = op->arg.matmul.transpose_b;
  const luna_tensor *x = op->in[0], *w = op->in[1], *y = op->out[0];
  const lunacu_matrix a = {x->data, ta ? 1 : k, ta ? m : 1}, b = {w->data, tb ? 1 : n, tb ? k : 1},
      dc = {y->grad, n, 1};
  /* what all of `outer` share: the first factor, the second, the result */
  const bool a_shared = which == 1 && ta, c_shared = which == 2, b_shared = !a_shared && !c_shared;
  lunacu_product p =
      which == 0 ? lunacu_product{a, b, y->data, m, n, k, false} :
      a_shared ? lunacu_product{b, dc.turned(), x->grad, k, m, n, true} :   /* dA^T = B dC^T */
      which == 1 ? lunacu_product{dc, b.turned(), x->grad, m, k, n, true} : /* dA = dC B^T */
      tb ? lunacu_product{dc.turned(), a, w->grad, n, k, m, true} :         /* dB^T = dC^T A */
           lunacu_product{a.turned(), dc, w->grad, k, n, m, true};          /* dB = A^T dC */
  const int64_t a_size = p.m * p.k, b_size = p.k * p.n, c_size = p.m * p.n;
  if (!p.c || outer * inner == 0) return LUNA_OK;
  if (inner == 1 && !ta) {           /* one b for all: the batch is more rows */
    if (which < 2) p.m *= outer;
    else p.k *= outer;
    return lunacu_gemm(op->ctx, p);
  }
  /* a launch for each of the fewer, unless the sum over `outer` wants its order */
  const bool along_outer = which != 2 && outer > inner;
  const int64_t a_step[] = {a_size, a_shared ? 0 : a_size * inner}, b_step[] = {b_size, b_shared ? 0 : b_size * inner},
      c_step[] = {c_size, c_shared ? 0 : c_size * inner}; /* along inner, outer */
  p.batch = along_outer ? outer : inner;
  p.a_batch = a_step[along_outer], p.b_batch = b_step[along_outer], p.c_batch = c_step[along_outer];
  for (int64_t i = 0; i < (along_outer ? inner : outer); i++) {
    lunacu_product part = p;
    part.a.at += i * a_step[!along_outer], part.b.at += i * b_step[!along_outer], part.c += i * c_step[!along_outer];
    const luna_status status = lunacu_gemm(op->ctx, part);
    if (status != LUNA_OK) return status;
  }
  return LUNA_OK;
}
static luna_status lunacu_matmul(luna_op *op, bool back) {
  const luna_status status = lunacu_matmul_product(op, back);
  return back && status == LUNA_OK ? lunacu_matmul_product(op, 2) : status;
}

/* --- linear: in x, weight, bias, residual; y = act(x W^T + b), or drop(x W^T + b) + residual. kept:
   the pre-activation --- */
static bool lunacu_linear_changes(const luna_op *op) {
  return op->activation != LUNA_ACTIVATION_DEFAULT || op->last_dropout > 0;
}
static void lunacu_linear_query(luna_op *op) {
  char *at = NULL;
  if (op->training && op->activation != LUNA_ACTIVATION_DEFAULT)
    op->kept_size = (size_t)luna_count(op->out[0]) * sizeof(float);
  if (lunacu_linear_changes(op)) (void)lunacu_take(&at, luna_count(op->out[0]));
  (void)lunacu_take(&at, lunacu_row_sums_floats(1, lunacu_rows(op->in[0]), lunacu_last(op->out[0])));
  op->backward_workspace_size = (size_t)(uintptr_t)at;
}
static luna_status lunacu_linear_forward(luna_op *op) {
  const luna_tensor *x = op->in[0], *y = op->out[0];
  const int64_t in = lunacu_last(x), out = lunacu_last(y);
  return lunacu_gemm_end(op, {{x->data, in, 1}, {op->in[1]->data, 1, in}, y->data, lunacu_rows(x), out, in, false},
                         y->data, {y->data, lunacu_data(op, 2), lunacu_data(op, 3),
                                   op->kept_size ? (float *)op->kept : NULL, out, 0, (int)op->activation, false,
                                   lunacu_last_dropout(op)});
}
static luna_status lunacu_linear_backward(luna_op *op) {
  const luna_tensor *x = op->in[0], *w = op->in[1], *y = op->out[0];
  char *at = (char *)op->workspace;
  float *dy = y->grad;
  if (lunacu_linear_changes(op)) {
    dy = lunacu_take(&at, luna_count(y));
    lunacu_begin_back(op, luna_count(y), dy, {y->grad, op->activation != LUNA_ACTIVATION_DEFAULT ?
        (const float *)op->kept : NULL, 0, (int)op->activation, lunacu_last_dropout(op)});
  }
  const luna_status status = lunacu_linear_back(op, {dy, x->data, w->data, x->grad, w->grad, lunacu_grad(op, 2),
                                                     lunacu_rows(x), lunacu_last(x), lunacu_last(y),
                                                     !lunacu_sets(op, 0), (float *)at});
  lunacu_residual_backward(op, 3);
  return status;
}

/* --- feed-forward: in x, W1, b1, W2, b2, residual; y = drop2(drop(act(x W1^T + b1)) W2^T + b2) + residual, by blocks
   of rows; arg: recompute, which keeps nothing of the hidden layer. kept: what ReLU makes of it, or what another
   activation is given --- */
#define LUNACU_FFN_ROWS 16384
struct lunacu_ffn {
  int64_t rows, in, hidden, out, block; /* rows in all, and of a block */
  float *given, *a, *dh, *dy, *scratch;
};
/* the layout of a block in the workspace, and its bytes; a: what W2 is given, its own only where it is not `given` */
static size_t lunacu_ffn_start(const luna_op *op, lunacu_ffn *f, bool backward, void *workspace) {
  char *at = (char *)workspace;
  int64_t maximum = 0;
  *f = {};
  f->rows = lunacu_rows(op->in[0]);
  f->in = lunacu_last(op->in[0]);
  f->hidden = lunacu_last(op->in[3]);
  f->out = lunacu_last(op->out[0]);
  f->block = lunacu_min(f->rows, LUNACU_FFN_ROWS);
  if (op->kept_size == 0) f->given = lunacu_take(&at, f->block * f->hidden);
  if (op->activation != LUNA_ACTIVATION_RELU || op->dropout > 0) f->a = lunacu_take(&at, f->block * f->hidden);
  if (backward) f->dh = lunacu_take(&at, f->block * f->hidden);
  if (backward && op->last_dropout > 0) f->dy = lunacu_take(&at, f->block * f->out);
  for (int i = 0; backward && i < 4; i++) { /* of a whole block and of the last */
    const int64_t floats = lunacu_row_sums_floats(1, i < 2 ? f->block : f->block ? f->rows % f->block : 0,
                                                  i % 2 ? f->hidden : f->out);
    if (floats > maximum) maximum = floats;
  }
  if (backward) f->scratch = lunacu_take(&at, maximum);
  return (size_t)((uintptr_t)at - (uintptr_t)workspace);
}
static void lunacu_feed_forward_query(luna_op *op) {
  lunacu_ffn f;
  op->kept_size = op->training && !op->arg.feed_forward.recompute ?
      (size_t)(lunacu_rows(op->in[0]) * lunacu_last(op->in[3])) * sizeof(float) : 0;
  op->workspace_size = lunacu_ffn_start(op, &f, false, NULL);
  op->backward_workspace_size = lunacu_ffn_start(op, &f, true, NULL);
}
/* rows from `first` on: what their hidden layer is before the activation and dropout, and after */
struct lunacu_ffn_rows {
  int64_t first, rows;
  float *given, *a;
  lunacu_ffn_rows(const luna_op *op, const lunacu_ffn &f, int64_t first_) : first(first_),
      rows(lunacu_min(f.block, f.rows - first_)),
      given(op->kept_size ? (float *)op->kept + first_ * f.hidden : f.given), a(f.a ? f.a : given) {}
};
/* the hidden layer; `again`: given is there already */
static luna_status lunacu_ffn_hidden(luna_op *op, const lunacu_ffn &f, const lunacu_ffn_rows &r, bool again) {
  const int64_t count = r.rows * f.hidden, at = r.first * f.hidden;
  const int activation = (int)op->activation;
  const bool relu = op->activation == LUNA_ACTIVATION_RELU;
  const lunacu_dropout drop = lunacu_op_dropout(op);
  if (!again)
    return lunacu_gemm_end(op, {{op->in[0]->data + r.first * f.in, f.in, 1}, {op->in[1]->data, 1, f.in}, r.given,
                                r.rows, f.hidden, f.in, false},
                           r.a, {r.given, lunacu_data(op, 2), NULL, r.given, f.hidden, at, activation, relu, drop});
  if (r.a != r.given)
    lunacu_end(op, count, r.a, {r.given, NULL, NULL, NULL, f.hidden, at, relu ? LUNA_ACTIVATION_DEFAULT : activation,
                                false, drop});
  return LUNA_OK;
}
static luna_status lunacu_feed_forward_forward(luna_op *op) {
  lunacu_ffn f;
  luna_status status = LUNA_OK;
  lunacu_ffn_start(op, &f, false, op->workspace);
  for (int64_t first = 0; first < f.rows && status == LUNA_OK; first += f.block) {
    const lunacu_ffn_rows r(op, f, first);
    float *to = op->out[0]->data + first * f.out;
    const float *residual = op->in[5] ? op->in[5]->data + first * f.out : NULL;
    status = lunacu_ffn_hidden(op, f, r, false);
    if (status == LUNA_OK)
      status = lunacu_gemm_end(op, {{r.a, f.hidden, 1}, {op->in[3]->data, 1, f.hidden}, to, r.rows, f.out, f.hidden,
                                    false},
                               to, {to, lunacu_data(op, 4), residual, NULL, f.out, first * f.out,
                                    LUNA_ACTIVATION_DEFAULT, false, lunacu_last_dropout(op)});
  }
  return status;
}
/* x's gradient may be made in place of y's: it is written last, and where nothing more of y's is read */
static luna_status lunacu_feed_forward_backward(luna_op *op) {
  const float *w1 = op->in[1]->data, *w2 = op->in[3]->data;
  float *dx = lunacu_grad(op, 0);
  lunacu_ffn f;
  luna_status status = LUNA_OK;
  lunacu_ffn_start(op, &f, true, op->workspace);
  lunacu_residual_backward(op, 5);
  for (int64_t first = 0; first < f.rows && status == LUNA_OK; first += f.block) {
    const lunacu_ffn_rows r(op, f, first);
    const float *x = op->in[0]->data + first * f.in;
    float *dy = op->out[0]->grad + first * f.out;
    status = lunacu_ffn_hidden(op, f, r, op->kept_size > 0);
    if (op->last_dropout > 0) {
      lunacu_begin_back(op, r.rows * f.out, f.dy, {dy, NULL, first * f.out, LUNA_ACTIVATION_DEFAULT,
                                                   lunacu_last_dropout(op)});
      dy = f.dy;
    }
    if (status == LUNA_OK)
      status = lunacu_linear_back(op, {dy, r.a, w2, f.dh, lunacu_grad(op, 3), lunacu_grad(op, 4), r.rows, f.hidden,
                                       f.out, false, f.scratch});
    if (status != LUNA_OK) break;
    lunacu_begin_back(op, r.rows * f.hidden, f.dh, {f.dh, r.given, first * f.hidden, (int)op->activation,
                                                    lunacu_op_dropout(op)});
    status = lunacu_linear_back(op, {f.dh, x, w1, dx ? dx + first * f.in : NULL, lunacu_grad(op, 1), lunacu_grad(op, 2),
                                     r.rows, f.in, f.hidden, !lunacu_sets(op, 0), f.scratch});
  }
  return status;
}

/* --- custom: the user's functions get tensors on the device, and launch into luna_cuda_stream --- */
/* They return no status: what they newly leave as the runtime's last error, other than not ready, is theirs. */
static luna_status lunacu_custom(luna_op *op, bool back) {
  const luna_custom *custom = &op->arg.custom;
  const cudaError_t before = cudaPeekAtLastError();
  luna_status status = back ? custom->backward(op->in, op->inputs, op->out[0], (void *)custom->state) :
      custom->forward((const luna_tensor *const *)op->in, op->inputs, op->out[0], (void *)custom->state);
  const cudaError_t after = cudaPeekAtLastError();
  if (status == LUNA_OK) status = lunacu_done(op->ctx, luna_op_name(op->kind));
  if (status != LUNA_OK || after == before || after == cudaErrorNotReady) return status;
  return lunacu_check(op->ctx, after, luna_op_name(op->kind));
}

/* ---------------------------------------------------------------------------------------------------------------------
   >>rows: softmax, layer norm, embedding, cross-entropy, the short convolution
   ------------------------------------------------------------------------------------------------------------------ */

/* Rows of n floats, each worked at by a team of 4 to 512 threads of a block: as many as hold the row in 16 registers
   each, if they can. Lane l has the vectors l, l + team, ... of Width floats. */
#define LUNACU_TEAM 512
#define LUNACU_HELD 16
struct lunacu_teams {
  int64_t rows, n;
  int team;
  bool held() const { return n <= team * LUNACU_HELD; }
  int block() const { return team > LUNACU_WARP ? team : LUNACU_BLOCK; }
  unsigned blocks() const { return lunacu_blocks(rows, block() / team); }
};
static lunacu_teams lunacu_teams_of(int64_t rows, int64_t n) {
  lunacu_teams t = {rows, n, 4};
  while (t.team < LUNACU_TEAM && t.team * LUNACU_HELD < n) t.team *= 2;
  return t;
}
/* kernel<Width, Held>: a lane holds Held vectors of four; or none (Held = 0) of a row that is too long or not `wide`,
   and reads its floats each time */
#define LUNACU_TEAMS(kernel, op, t, blocks, wide, ...) \
  LUNACU_LAUNCH(((wide) && (t).held() ? kernel<4, LUNACU_HELD / 4> : kernel<1, 0>), blocks, (t).block(), 0, \
                lunacu_stream(op), t, __VA_ARGS__)
/* a lane's part of a row; zeros where there is none */
template <int Width, int Held> struct lunacu_held {
  const float *row;
  int64_t n;
  float v[Held ? Held : 1][Width];
  LUNACU_INLINE void read(int64_t c, float (&to)[Width]) const {
    LUNACU_UNROLL for (int i = 0; i < Width; i++) to[i] = 0;
    if (c < n) lunacu_get(row + c, to);
  }
  LUNACU_INLINE lunacu_held(const float *row_, int64_t n_, int lane, int team) : row(row_), n(n_) {
    LUNACU_UNROLL for (int k = 0; k < Held; k++) read((lane + k * team) * (int64_t)Width, v[k]);
  }
  LUNACU_INLINE void get(int k, int64_t c, float (&to)[Width]) const {
    if constexpr (Held == 0) read(c, to);
    else
      LUNACU_UNROLL for (int i = 0; i < Width; i++) to[i] = v[k][i];
  }
};
#define LUNACU_EACH_ROW(t, first) \
  for (int64_t first = (int64_t)blockIdx.x * (blockDim.x / (t).team); first < (t).rows; first += \
       (int64_t)gridDim.x * (blockDim.x / (t).team))
/* k: number of the lane's vector, c: its first column */
#define LUNACU_EACH_VECTOR(t, k, c) \
  LUNACU_UNROLL for (int64_t k = 0, c = lane * Width; Held ? k < Held : c < (t).n; k++, c += (t).team * Width)

/* --- softmax over the last axis; lengths mask it by axis 0, which has `group` rows a sequence --- */
LUNACU_INLINE int64_t lunacu_softmax_width(const lunacu_teams &t, int64_t row, const int32_t *lengths, int64_t group) {
  return row >= t.rows ? 0 : lengths ? min(t.n, (int64_t)lengths[row / group]) : t.n;
}
template <int Width, int Held> __global__ void __launch_bounds__(LUNACU_TEAM)
lunacu_softmax_kernel(lunacu_teams t, const float *x, const int32_t *lengths, int64_t group, float *y) {
  LUNACU_SHARED(float, scratch, LUNACU_WARP);
  const int lane = threadIdx.x % t.team;
  LUNACU_EACH_ROW(t, first) {
    const int64_t row = first + threadIdx.x / t.team, width = lunacu_softmax_width(t, row, lengths, group);
    const lunacu_held<Width, Held> held(x + row * t.n, row < t.rows ? t.n : 0, lane, t.team);
    float v[Width], e[Held ? Held : 1][Width], maximum = -INFINITY, sum = 0;
    LUNACU_EACH_VECTOR(t, k, c) {
      held.get(k, c, v);
      LUNACU_UNROLL for (int i = 0; i < Width; i++) if (c + i < width) maximum = fmaxf(maximum, v[i]);
    }
    maximum = lunacu_over_team<lunacu_maximum>(t.team, maximum, scratch);
    const float shift = maximum > -INFINITY ? maximum : 0;
    LUNACU_EACH_VECTOR(t, k, c) {
      held.get(k, c, v);
      LUNACU_UNROLL for (int i = 0; i < Width; i++) {
        e[Held ? k : 0][i] = c + i < width ? expf(v[i] - shift) : 0;
        sum += e[Held ? k : 0][i];
      }
    }
    sum = lunacu_over_team<lunacu_sum>(t.team, sum, scratch);
    const float factor = sum > 0 ? 1 / sum : sum; /* an empty row stays 0, a NaN spreads */
    LUNACU_EACH_VECTOR(t, k, c) {
      if (Held == 0) held.get(k, c, v);
      LUNACU_UNROLL for (int i = 0; i < Width; i++) v[i] = c + i < width ?
          factor * (Held ? e[Held ? k : 0][i] : expf(v[i] - shift)) : 0;
      if (c < held.n) lunacu_put(y + row * t.n + c, v, false);
    }
  }
}
/* dx (+)= y (dy - y . dy) */
template <int Width, int Held> __global__ void __launch_bounds__(LUNACU_TEAM)
lunacu_softmax_back_kernel(lunacu_teams t, const float *y, const float *dy, const int32_t *lengths, int64_t group,
                           float *dx, bool add) {
  LUNACU_SHARED(float, scratch, LUNACU_WARP);
  const int lane = threadIdx.x % t.team;
  LUNACU_EACH_ROW(t, first) {
    const int64_t row = first + threadIdx.x / t.team, width = lunacu_softmax_width(t, row, lengths, group),
        n = row < t.rows ? t.n : 0;
    const lunacu_held<Width, Held> ys(y + row * t.n, n, lane, t.team), gs(dy + row * t.n, n, lane, t.team);
    float v[Width], g[Width], dot = 0;
    LUNACU_EACH_VECTOR(t, k, c) {
      ys.get(k, c, v);
      gs.get(k, c, g);
      LUNACU_UNROLL for (int i = 0; i < Width; i++) if (c + i < width) dot += v[i] * g[i];
    }
    dot = lunacu_over_team<lunacu_sum>(t.team, dot, scratch);
    LUNACU_EACH_VECTOR(t, k, c) {
      ys.get(k, c, v);
      gs.get(k, c, g);
      LUNACU_UNROLL for (int i = 0; i < Width; i++) v[i] = c + i < width ? v[i] * (g[i] - dot) : 0;
      if (c < n) lunacu_put(dx + row * t.n + c, v, add);
    }
  }
}
static void lunacu_softmax(luna_op *op, bool back) {
  const lunacu_teams t = lunacu_teams_of(lunacu_rows(op->in[0]), lunacu_last(op->in[0]));
  const lunacu_way w = lunacu_way_of(op, back);
  const float *y = op->out[0]->data;
  const bool wide = lunacu_wide(t.n, y, w.from, w.to);
  if (t.rows == 0) return;
  const int64_t group = t.rows / op->in[0]->shape[0];
  if (back)
    LUNACU_TEAMS(lunacu_softmax_back_kernel, op, t, t.blocks(), wide, y, w.from, op->lengths, group, w.to, w.add);
  else LUNACU_TEAMS(lunacu_softmax_kernel, op, t, t.blocks(), wide, w.from, op->lengths, group, w.to);
}

/* --- layer norm: y = (x - mean) / deviation weight + bias; in x, weight, bias; kept: mean and 1/deviation of
   each row --- */
template <int Width, int Held> __global__ void __launch_bounds__(LUNACU_TEAM)
lunacu_layer_norm_kernel(lunacu_teams t, bool rms, float epsilon, const float *x, const float *weight,
                         const float *bias, float *y, float *kept) {
  LUNACU_SHARED(float, scratch, LUNACU_WARP);
  const int lane = threadIdx.x % t.team;
  LUNACU_EACH_ROW(t, first) {
    const int64_t row = first + threadIdx.x / t.team;
    const lunacu_held<Width, Held> held(x + row * t.n, row < t.rows ? t.n : 0, lane, t.team);
    float v[Width], w[Width], b[Width], sum = 0, squares = 0;
    LUNACU_EACH_VECTOR(t, k, c) {
      held.get(k, c, v);
      LUNACU_UNROLL for (int i = 0; i < Width; i++) sum += v[i];
    }
    /* rounded: the second pass also finds by how much it is off */
    const float center = rms ? 0 : lunacu_over_team<lunacu_sum>(t.team, sum, scratch) / (float)t.n;
    sum = 0;
    LUNACU_EACH_VECTOR(t, k, c) {
      held.get(k, c, v);
      LUNACU_UNROLL for (int i = 0; i < Width && c < held.n; i++) {
        sum += v[i] - center;
        squares += (v[i] - center) * (v[i] - center);
      }
    }
    const float off = rms ? 0 : lunacu_over_team<lunacu_sum>(t.team, sum, scratch) / (float)t.n,
        variance = lunacu_over_team<lunacu_sum>(t.team, squares, scratch) / (float)t.n - off * off;
    const float r = 1 / sqrtf((variance < 0 ? 0 : variance) + epsilon);
    LUNACU_EACH_VECTOR(t, k, c) {
      if (c >= held.n) continue;
      held.get(k, c, v);
      if (weight) lunacu_get(weight + c, w);
      if (bias) lunacu_get(bias + c, b);
      LUNACU_UNROLL for (int i = 0; i < Width; i++) v[i] = (v[i] - center - off) * r * (weight ? w[i] : 1) +
          (bias ? b[i] : 0);
      lunacu_put(y + row * t.n + c, v, false);
    }
    if (kept && lane == 0 && row < t.rows) {
      kept[row] = center + off;
      kept[t.rows + row] = r;
    }
  }
}
/* Adds what a block's teams have in registers: the upper half gives its sums to the lower through `both`, again and
   again. partial [blocks, 2, n], or null */
template <int Width, int Held>
LUNACU_INLINE void lunacu_teams_sums(const lunacu_teams &t, float (&dweight)[Held][Width], float (&dbias)[Held][Width],
                                     lunacu_shared<float> both, float *partial) {
  const int lane = threadIdx.x % t.team, team = threadIdx.x / t.team, width = t.team * LUNACU_HELD;
  for (int half = partial ? blockDim.x / t.team / 2 : 0; half > 0; half /= 2) {
    const lunacu_shared<float> room = both + 2 * width * (team % half);
    if (team >= half && team < 2 * half)
      LUNACU_EACH_VECTOR(t, k, c) {
        lunacu_write4(room + c, lunacu_together(dweight[k]));
        lunacu_write4(room + width + c, lunacu_together(dbias[k]));
      }
    __syncthreads();
    if (team < half)
      LUNACU_EACH_VECTOR(t, k, c) {
        const float4 w = lunacu_read4(room + c), b = lunacu_read4(room + width + c);
        dweight[k][0] += w.x; dweight[k][1] += w.y; dweight[k][2] += w.z; dweight[k][3] += w.w;
        dbias[k][0] += b.x; dbias[k][1] += b.y; dbias[k][2] += b.z; dbias[k][3] += b.w;
      }
    __syncthreads();
  }
  if (partial && team == 0)
    LUNACU_EACH_VECTOR(t, k, c) {
      float *part = partial + 2 * blockIdx.x * t.n + c;
      if (c >= t.n) continue;
      lunacu_put(part, dweight[k], false);
      lunacu_put(part + t.n, dbias[k], false);
    }
}
/* dx (+)= r (g - mean(g) - xhat mean(g xhat)), g = dy weight, xhat = (x - mean) r; dx may be null. partial [blocks, 2,
   n], where Held > 0, or null: sums over the block's rows of dy xhat and of dy, by each team in registers. */
template <int Width, int Held> __global__ void __launch_bounds__(LUNACU_TEAM)
lunacu_layer_norm_back_kernel(lunacu_teams t, bool rms, const float *x, const float *weight, const float *kept,
                              const float *dy, float *dx, bool add, float *partial) {
  LUNACU_SHARED(float, scratch, LUNACU_WARP);
  LUNACU_SHARED(float, both, Held ? LUNACU_BLOCK * LUNACU_HELD : 4);
  const int lane = threadIdx.x % t.team;
  float dweight[Held ? Held : 1][Width] = {}, dbias[Held ? Held : 1][Width] = {};
  LUNACU_EACH_ROW(t, first) {
    const int64_t row = first + threadIdx.x / t.team, n = row < t.rows ? t.n : 0;
    const float mean = n ? kept[row] : 0, r = n ? kept[t.rows + row] : 0;
    const lunacu_held<Width, Held> xs(x + row * t.n, n, lane, t.team), gs(dy + row * t.n, n, lane, t.team);
    float v[Width], g[Width], w[Width], sum = 0, moment = 0;
    LUNACU_EACH_VECTOR(t, k, c) {
      if (c >= n) continue;
      xs.get(k, c, v);
      gs.get(k, c, g);
      if (weight) lunacu_get(weight + c, w);
      LUNACU_UNROLL for (int i = 0; i < Width; i++) {
        const float xhat = (v[i] - mean) * r, gw = weight ? g[i] * w[i] : g[i];
        sum += gw;
        moment += gw * xhat;
        dweight[Held ? k : 0][i] += g[i] * xhat;
        dbias[Held ? k : 0][i] += g[i];
      }
    }
    sum = rms ? 0 : lunacu_over_team<lunacu_sum>(t.team, sum, scratch) / (float)t.n;
    moment = lunacu_over_team<lunacu_sum>(t.team, moment, scratch) / (float)t.n;
    LUNACU_EACH_VECTOR(t, k, c) {
      if (c >= n || !dx) continue;
      xs.get(k, c, v);
      gs.get(k, c, g);
      if (weight) lunacu_get(weight + c, w);
      LUNACU_UNROLL for (int i = 0; i < Width; i++) v[i] = r *
          ((weight ? g[i] * w[i] : g[i]) - sum - (v[i] - mean) * r * moment);
      lunacu_put(dx + row * t.n + c, v, add);
    }
  }
  if constexpr (Held > 0) lunacu_teams_sums(t, dweight, dbias, both, partial);
}
/* the same two sums over all rows, where Held = 0 */
struct lunacu_normed {
  const float *x, *dy, *kept;
  int64_t rows;
  __device__ void add(int64_t i, int64_t r, float (&sum)[2]) const {
    const float g = dy[i];
    sum[0] += g * ((x[i] - kept[r]) * kept[rows + r]);
    sum[1] += g;
  }
};
/* A team has at most 128 rows, whose float sums are short, and less where that gives too few blocks. */
static int64_t lunacu_layer_norm_blocks(const lunacu_teams &t) {
  const int64_t teams = t.block() / t.team, passes = lunacu_divide_up(t.rows, teams * 1024);
  return lunacu_divide_up(t.rows, teams * lunacu_max(1, lunacu_min(passes, 128)));
}
static void lunacu_layer_norm_query(luna_op *op) {
  const lunacu_teams t = lunacu_teams_of(lunacu_rows(op->in[0]), lunacu_last(op->in[0]));
  const int64_t held = t.held() ? lunacu_layer_norm_blocks(t) * 2 * t.n : 0,
      sums = lunacu_sums_floats(lunacu_sums_of(1, t.rows, t.n, true), 2);
  if (op->training) op->kept_size = (size_t)t.rows * 2 * sizeof(float);
  if (op->in[1] || op->in[2]) op->backward_workspace_size = (size_t)(held > sums ? held : sums) * sizeof(float);
}
static void lunacu_layer_norm_forward(luna_op *op) {
  const lunacu_teams t = lunacu_teams_of(lunacu_rows(op->in[0]), lunacu_last(op->in[0]));
  const float *x = op->in[0]->data, *weight = lunacu_data(op, 1), *bias = lunacu_data(op, 2);
  float *y = op->out[0]->data;
  if (t.rows > 0)
    LUNACU_TEAMS(lunacu_layer_norm_kernel, op, t, t.blocks(), lunacu_wide(t.n, x, weight, bias, y), op->arg.norm.rms,
                 op->arg.norm.epsilon, x, weight, bias, y, (float *)op->kept);
}
static void lunacu_layer_norm_backward(luna_op *op) {
  const lunacu_teams t = lunacu_teams_of(lunacu_rows(op->in[0]), lunacu_last(op->in[0]));
  const float *x = op->in[0]->data, *weight = lunacu_data(op, 1), *dy = op->out[0]->grad,
      *kept = (const float *)op->kept;
  float *dx = op->in[0]->grad, *dweight = lunacu_grad(op, 1), *dbias = lunacu_grad(op, 2),
      *partial = (float *)op->workspace;
  const bool sums = dweight || dbias, held = lunacu_wide(t.n, x, weight, dy, dx) && t.held();
  const lunacu_sums_to to = {{dweight, dbias}, {1, 1}, t.n, 2, 1.0f, true};
  const int64_t blocks = lunacu_layer_norm_blocks(t);
  if (t.rows == 0) return;
  LUNACU_TEAMS(lunacu_layer_norm_back_kernel, op, t, (unsigned)blocks, held, op->arg.norm.rms, x, weight, kept, dy, dx,
               !lunacu_sets(op, 0), sums ? partial : NULL);
  if (sums && held) lunacu_sums_end(op, blocks, 2 * t.n, partial, to);
  else if (sums)
    lunacu_sums_run<2>(op, lunacu_sums_of(1, t.rows, t.n, true), lunacu_normed{x, dy, kept, t.rows}, to, partial);
}

/* --- embedding: in table [V, d]; index: tokens [count] --- */
struct lunacu_embedded {
  const float *table;
  const int32_t *tokens;
  int64_t d;
  template <int Width> __device__ void at(int64_t i, float (&v)[Width]) const {
    lunacu_get(table + tokens[i / d] * d + i % d, v);
  }
};
static void lunacu_embedding_forward(luna_op *op) {
  const lunacu_embedded f = {op->in[0]->data, op->index, lunacu_last(op->in[0])};
  lunacu_map_way(op, lunacu_way_of(op, false), f.d % 4 == 0, f);
}
/* The gradient: the tokens are sorted with their positions, each token's rows then added in the order of their
   positions. A key is token 2^32 + position, so that no two are equal. First within chunks of a block, by counting the
   keys that are less ... */
__global__ void lunacu_sort_kernel(const int32_t *tokens, int64_t count, uint64_t *keys) {
  LUNACU_SHARED(int, chunk, LUNACU_BLOCK);
  LUNACU_SHARED(uint64_t, sorted, LUNACU_BLOCK);
  for (int64_t start = (int64_t)blockIdx.x * LUNACU_BLOCK; start < count; start += (int64_t)gridDim.x * LUNACU_BLOCK) {
    const int n = (int)min((int64_t)LUNACU_BLOCK, count - start), me = threadIdx.x;
    const int mine = me < n ? tokens[start + me] : 0;
    int rank = 0;
    chunk[me] = mine;
    __syncthreads();
    for (int i = 0; i < n; i++) rank += chunk[i] < mine + (i < me);
    if (me < n) sorted[rank] = (uint64_t)mine << 32 | (uint64_t)(start + me);
    __syncthreads();
    if (me < n) keys[start + me] = sorted[me];
  }
}
/* ... then four sorted runs become one: a key's place is its own in its run, and for each of the others the number of
   keys less than it */
__global__ void lunacu_merge_kernel(const uint64_t *keys, int64_t count, int64_t run, uint64_t *to) {
  for (int64_t i = lunacu_index(); i < count; i += lunacu_stride()) {
    const uint64_t key = keys[i];
    const int64_t own = i / run * run, group = i / (4 * run) * (4 * run);
    int64_t place = group + i - own;
    for (int64_t start = group; start < group + 4 * run && start < count; start += run) {
      int64_t low = start, high = min(start + run, count);
      while (low < high && start != own) {
        const int64_t middle = (low + high) / 2;
        if (keys[middle] < key) low = middle + 1;
        else high = middle;
      }
      place += low - start;
    }
    to[place] = key;
  }
}
/* Then sums over runs of one token, by tiles of 32 entries. A run that lies within a tile is added to the gradient. One
   that goes beyond it leaves what the tile has of it as an entry of the next level: the run that was open before the
   tile is its first entry, the one open after it its second (zeros when that is the same run), -1 for none. So a
   token's entries stay side by side, and no thread adds more than 32 rows, whatever the tokens. */
#define LUNACU_ENTRIES 32
struct lunacu_level {
  int64_t count;                     /* entries */
  const uint64_t *keys;              /* of the first level: token and row; null in others, whose rows are the entries */
  const int32_t *tokens;
  const float *rows;
  int32_t *next_tokens;
  float *next_rows;
  __device__ int token(int64_t i) const { return keys ? (int)(keys[i] >> 32) : tokens[i]; }
  __device__ int64_t row(int64_t i) const { return keys ? (int64_t)(uint32_t)keys[i] : i; }
};
template <int Width> __global__ void lunacu_level_kernel(lunacu_level l, int64_t d, int team, float *grad) {
  /* teams over a row */
  const int64_t tiles = (l.count + LUNACU_ENTRIES - 1) / LUNACU_ENTRIES,
      across = (d + team * Width - 1) / (team * Width);
  for (int64_t u = lunacu_index() / team; u < tiles * across; u += lunacu_stride() / team) {
    const int64_t tile = u / across, start = tile * LUNACU_ENTRIES, end = min(start + LUNACU_ENTRIES, l.count);
    /* the thread's columns, of which there may be none */
    const int64_t c = (u % across * team + lunacu_index() % team) * Width;
    const int before = start > 0 ? l.token(start - 1) : -1, after = end < l.count ? l.token(end) : -1;
    int run = l.token(start), entry[2] = {-1, -1};
    bool opened = run == before;       /* the run was open before the tile */
    float sum[Width] = {};
    for (int64_t i = start; i < end; i += 4) {
      int token[4];
      float v[4][Width] = {};
      LUNACU_UNROLL for (int k = 0; k < 4; k++) {
        token[k] = i + k < end ? l.token(i + k) : after;
        if (i + k < end && token[k] >= 0 && c < d) lunacu_get(l.rows + l.row(i + k) * d + c, v[k]);
      }
      LUNACU_UNROLL for (int k = 0; k < 4; k++) {
        if (i + k < end && token[k] != run) {
          if (opened) entry[0] = run;
          if (run >= 0 && c < d) lunacu_put(opened ? l.next_rows + 2 * tile * d + c : grad + run * d + c, sum, !opened);
          run = token[k];
          opened = false;
          LUNACU_UNROLL for (int j = 0; j < Width; j++) sum[j] = 0;
        }
        LUNACU_UNROLL for (int j = 0; j < Width && i + k < end; j++) sum[j] += v[k][j];
      }
    }
    const bool open = run == after;
    if (opened) entry[0] = run;
    if (open) entry[1] = run;
    if (run >= 0 && c < d) {
      if (opened) {
        lunacu_put(l.next_rows + 2 * tile * d + c, sum, false);
        LUNACU_UNROLL for (int j = 0; j < Width; j++) sum[j] = 0;
      }
      if (open) lunacu_put(l.next_rows + (2 * tile + 1) * d + c, sum, false);
      else if (!opened) lunacu_put(grad + run * d + c, sum, true);
    }
    if (l.next_tokens && c < Width && u % across == 0) {
      l.next_tokens[2 * tile] = entry[0];
      l.next_tokens[2 * tile + 1] = entry[1];
    }
  }
}
/* Adds rows [count, d] to the table's rows of index. Where the keys and the levels lie in the workspace, and its bytes;
   table null: these alone, no work */
static size_t lunacu_add_rows(const luna_op *op, int64_t count, int64_t d, const float *rows, float *table,
                              void *workspace) {
  const bool run = table != NULL;
  char *at = (char *)workspace;
  uint64_t *keys = (uint64_t *)lunacu_take(&at, 2 * count), *other = (uint64_t *)lunacu_take(&at, 2 * count);
  lunacu_level l = {count, NULL, NULL, rows, NULL, NULL};
  const bool wide = run && lunacu_wide(d, rows, table);
  int team = 8;
  if (run) LUNACU_OVER(op, lunacu_sort_kernel, count, LUNACU_BLOCK, op->index, count, keys);
  for (int64_t length = LUNACU_BLOCK; length < count && run; length *= 4) {
    uint64_t *merged = other;
    LUNACU_OVER(op, lunacu_merge_kernel, count, LUNACU_BLOCK, keys, count, length, merged);
    other = keys;
    keys = merged;
  }
  l.keys = keys;
  while (team < LUNACU_BLOCK && team * (wide ? 4 : 1) < d) team *= 2;
  for (bool more = count > 0; more;) {
    const int64_t tiles = lunacu_divide_up(l.count, LUNACU_ENTRIES),
        units = tiles * lunacu_divide_up(d, team * (wide ? 4 : 1));
    more = tiles > 1;
    l.next_rows = more ? lunacu_take(&at, 2 * tiles * d) : NULL;
    l.next_tokens = more ? (int32_t *)lunacu_take(&at, 2 * tiles) : NULL;
    if (wide) LUNACU_OVER(op, lunacu_level_kernel<4>, units, LUNACU_BLOCK / team, l, d, team, table);
    else if (run) LUNACU_OVER(op, lunacu_level_kernel<1>, units, LUNACU_BLOCK / team, l, d, team, table);
    l = {2 * tiles, NULL, l.next_tokens, l.next_rows, NULL, NULL};
  }
  return (size_t)(at - (char *)workspace);
}
static void lunacu_embedding_query(luna_op *op) {
  op->backward_workspace_size = lunacu_add_rows(op, lunacu_rows(op->out[0]), lunacu_last(op->in[0]), NULL, NULL, NULL);
}
static void lunacu_embedding_backward(luna_op *op) {
  const int64_t count = lunacu_rows(op->out[0]), d = lunacu_last(op->in[0]);
  if (count > 0) lunacu_add_rows(op, count, d, op->out[0]->grad, op->in[0]->grad, op->workspace);
}

/* --- angles of positions: a thread turns one angle over some rows, from a multiple of them on --- */
#define LUNACU_TURNS 16
__global__ void lunacu_angles_kernel(int64_t first, int64_t n, int64_t d, double rate, float *y) {
  const int64_t half = d / 2, columns = half + d % 2, start = first / LUNACU_TURNS * LUNACU_TURNS;
  const int64_t tiles = (first - start + n + LUNACU_TURNS - 1) / LUNACU_TURNS;
  for (int64_t u = lunacu_index(); u < columns * tiles; u += lunacu_stride()) {
    const int64_t i = u % columns, row = start + u / columns * LUNACU_TURNS, end = min(row + LUNACU_TURNS, first + n);
    const double w = (double)(float)exp(-(double)i * rate), sine = sin(w), cosine = cos(w);
    double s = sin((double)row * w), c = cos((double)row * w);
    for (int64_t t = row; t < end; t++) {
      const double next = s * cosine + c * sine;
      float *to = y + (t - first) * d + i;
      if (t >= first) *to = i < half ? (float)s : 0.0f;
      if (t >= first && i < half) to[half] = (float)c;
      c = c * cosine - s * sine;
      s = next;
    }
  }
}
static void lunacu_angles(luna_op *op, int64_t first, int64_t n, int64_t d, double rate, float *y) {
  const int64_t tiles = n > 0 ? lunacu_divide_up(first % LUNACU_TURNS + n, LUNACU_TURNS) : 0;
  LUNACU_OVER(op, lunacu_angles_kernel, tiles * (d / 2 + d % 2), LUNACU_BLOCK, first, n, d, rate, y);
}
/* sinusoidal positions, of no inputs */
static void lunacu_sinusoids(luna_op *op, bool back) {
  const int64_t d = lunacu_last(op->out[0]), half = d / 2;
  const double rate = half > 1 ? 9.21034037197618273608 / (double)(half - 1) : 0;
  if (!back) lunacu_angles(op, op->arg.sinusoids.first, op->out[0]->shape[0], d, rate, op->out[0]->data);
}
/* rotary positions: each pair (x_i, x_(i + d/2)) of a head is turned by its angle, or back; workspace: the angles */
struct lunacu_turned {
  const float *x, *angles;           /* [b, rows, heads d]; [rows, d]: sines, cosines */
  int64_t rows, heads, d;
  float way;                         /* 1, or -1: back */
  __device__ void at(int64_t i, float (&v)[1]) const {
    const int64_t half = d / 2, j = i % d;
    const float *angle = angles + i / (heads * d) % rows * d + j % half, s = way * angle[0];
    v[0] = j < half ? x[i] * angle[half] - x[i + half] * s : x[i] * angle[half] + x[i - half] * s;
  }
};
static void lunacu_rotary_query(luna_op *op) {
  const luna_tensor *y = op->out[0];
  op->workspace_size = (size_t)(y->shape[1] * (lunacu_last(y) / op->arg.rotary.heads)) * sizeof(float);
  op->backward_workspace_size = op->workspace_size;
}
static void lunacu_rotary(luna_op *op, bool back) {
  const int64_t heads = op->arg.rotary.heads, n = op->out[0]->shape[1], d = lunacu_last(op->out[0]) / heads;
  const lunacu_way w = lunacu_way_of(op, back);
  float *angles = (float *)op->workspace;
  lunacu_angles(op, op->arg.rotary.first, n, d, log((double)op->arg.rotary.base) / (double)(d / 2), angles);
  lunacu_map_way<1>(op, w, false, lunacu_turned{w.from, angles, n, heads, d, back ? -1.0f : 1.0f});
}

/* --- cross-entropy: loss = -sum_j target_j log softmax(logits)_j, target = (1 - smoothing) onehot + smoothing / n;
   index: labels (-1: ignored); number: smoothing, factor. kept: log-sum-exp of each row. One pass: each thread rescales
   its sum when it meets a new maximum. --- */
template <int Width> __global__ void __launch_bounds__(LUNACU_TEAM)
lunacu_cross_entropy_kernel(lunacu_teams t, const float *logits, const int32_t *labels, float smoothing, float *loss,
                            float *kept) {
  LUNACU_SHARED(float, scratch, LUNACU_WARP);
  const int lane = threadIdx.x % t.team;
  LUNACU_EACH_ROW(t, first) {
    const int64_t row = first + threadIdx.x / t.team;
    const int label = row < t.rows ? labels[row] : -1;
    const float *x = logits + row * t.n;
    float maximum = -INFINITY, sum = 0, all = 0;
    for (int64_t c = lane * Width; c < t.n && label >= 0; c += t.team * 8) {
      float v[8 / Width][Width], next = maximum;
      LUNACU_UNROLL for (int k = 0; k < 8 / Width; k++) {
        const int64_t at = c + k * t.team * Width;
        LUNACU_UNROLL for (int i = 0; i < Width; i++) v[k][i] = -INFINITY;
        if (at < t.n) {
          lunacu_get(x + at, v[k]);
        }
        LUNACU_UNROLL for (int i = 0; i < Width; i++) {
          next = fmaxf(next, v[k][i]);
          if (smoothing > 0 && at < t.n) all += v[k][i];
        }
      }
      const float shift = next > -INFINITY ? next : 0;
      if (next > maximum) sum *= expf(maximum - next);
      LUNACU_UNROLL for (int k = 0; k < 8; k++) sum += expf(v[k / Width][k % Width] - shift);
      maximum = next;
    }
    const float largest = lunacu_over_team<lunacu_maximum>(t.team, maximum, scratch),
        shift = largest > -INFINITY ? largest : 0;
    if (largest > maximum) sum *= expf(maximum - largest);
    sum = lunacu_over_team<lunacu_sum>(t.team, sum, scratch);
    if (smoothing > 0) all = lunacu_over_team<lunacu_sum>(t.team, all, scratch);
    if (lane == 0 && row < t.rows) {
      const double log_sum = sum == 0 ? 0 : (double)logf(sum), mine = label >= 0 ? (double)x[label] : 0;
      double value = log_sum + ((double)shift - mine);
      if (smoothing > 0) value += (double)smoothing * (mine - (double)all / (double)t.n);
      if (mine == -(double)INFINITY) value = log_sum + (double)INFINITY;
      loss[row] = label >= 0 ? (float)value : 0;
      if (kept) kept[row] = label >= 0 ? (float)((double)shift + log_sum) : 0;
    }
  }
}
/* dlogits = factor dloss (softmax(logits) - target) */
struct lunacu_unlikely {
  const float *logits, *kept, *dloss;
  const int32_t *labels;
  int64_t n, rows;
  float smoothing, factor;
  template <int Width> __device__ void at(int64_t i, float (&v)[Width]) const {
    const float f = factor * *dloss, base = smoothing / (float)n, hit = f * (1 - smoothing);
    int64_t row = i / n, c = i % n;
    int label = labels[row];
    float lse = kept[row];
    lunacu_get(logits + i, v);
    LUNACU_UNROLL for (int k = 0; k < Width; k++) {
      v[k] = label < 0 ? 0 : f * (expf(v[k] - lse) - base) - (c == label ? hit : 0);
      if (++c == n && ++row < rows) {
        c = 0;
        label = labels[row];
        lse = kept[row];
      }
    }
  }
};
/* of rows from `first` on: their losses, and kept */
static void lunacu_cross_entropy_rows(const luna_op *op, int64_t first, int64_t rows, int64_t classes,
                                      const float *logits, float *loss) {
  const lunacu_teams t = lunacu_teams_of(rows, classes);
  float *kept = op->kept ? (float *)op->kept + first : NULL;
  if (rows > 0)
    LUNACU_LAUNCH(lunacu_wide(classes, logits) ? lunacu_cross_entropy_kernel<4> : lunacu_cross_entropy_kernel<1>,
                  t.blocks(), t.block(), 0, lunacu_stream(op), t, logits, op->index + first,
                  op->arg.cross_entropy.smoothing, loss + first, kept);
}
static void lunacu_cross_entropy_sum(const luna_op *op, int64_t rows, const float *loss, float *scratch) {
  lunacu_row_sums(op, loss, 1, rows, 1, op->out[0]->data, op->arg.cross_entropy.factor, false, scratch);
}
static void lunacu_cross_entropy_forward(luna_op *op) {
  const int64_t rows = lunacu_rows(op->in[0]);
  char *at = (char *)op->workspace;
  float *loss = lunacu_take(&at, rows);
  lunacu_cross_entropy_rows(op, 0, rows, lunacu_last(op->in[0]), op->in[0]->data, loss);
  lunacu_cross_entropy_sum(op, rows, loss, (float *)at);
}
/* dlogits (+)= those of rows from `first` on */
static void lunacu_logits_slopes(const luna_op *op, int64_t first, int64_t rows, int64_t classes, const float *logits,
                                 float *dlogits, bool add) {
  const lunacu_unlikely f = {logits, (const float *)op->kept + first, op->out[0]->grad, op->index + first, classes,
                             rows, op->arg.cross_entropy.smoothing, op->arg.cross_entropy.factor};
  lunacu_map(op, rows * classes, dlogits, add, lunacu_wide(0, logits), f);
}
static void lunacu_cross_entropy_backward(luna_op *op) {
  const luna_tensor *x = op->in[0];
  lunacu_logits_slopes(op, 0, lunacu_rows(x), lunacu_last(x), x->data, x->grad, !lunacu_sets(op, 0));
}

/* --- linear cross-entropy: in x, weight, bias; the cross-entropy of x W^T + b, by blocks of rows, whose logits and
   gradients are stored alone, and are made again in backward. Kept: as above --- */
/* rows of a block: each reads and writes all of dW, so that they are many; of few rows a part, for the memory's sake */
static int64_t lunacu_logit_rows(int64_t rows) { return lunacu_min(rows, lunacu_max(512, lunacu_min(rows / 4, 2048))); }
static luna_status lunacu_logits_of(const luna_op *op, int64_t first, int64_t rows, float *logits) {
  const int64_t in = lunacu_last(op->in[0]), classes = op->in[1]->shape[0];
  return lunacu_gemm_end(op, {{op->in[0]->data + first * in, in, 1}, {op->in[1]->data, 1, in}, logits, rows, classes,
                              in, false},
                         logits, {logits, lunacu_data(op, 2), NULL, NULL, classes, 0, LUNA_ACTIVATION_DEFAULT, false,
                                  lunacu_dropout_of(op, 0, 0)});
}
static void lunacu_cross_entropy_query(luna_op *op) { /* of both */
  const bool linear = op->kind == LUNA_OP_LINEAR_CROSS_ENTROPY;
  const int64_t rows = lunacu_rows(op->in[0]), classes = linear ? op->in[1]->shape[0] : 0;
  char *at = NULL;
  (void)lunacu_take(&at, lunacu_logit_rows(rows) * classes);
  (void)lunacu_take(&at, rows);
  (void)lunacu_take(&at, lunacu_row_sums_floats(1, rows, 1));
  op->workspace_size = (size_t)(uintptr_t)at;
  at = NULL;
  (void)lunacu_take(&at, lunacu_logit_rows(rows) * classes);
  (void)lunacu_take(&at, linear ? lunacu_row_sums_floats(1, lunacu_logit_rows(rows), classes) : 0);
  op->backward_workspace_size = (size_t)(uintptr_t)at;
  if (op->training) op->kept_size = (size_t)rows * sizeof(float);
}
static luna_status lunacu_linear_cross_entropy_forward(luna_op *op) {
  const int64_t all = lunacu_rows(op->in[0]), most = lunacu_logit_rows(all), classes = op->in[1]->shape[0];
  char *at = (char *)op->workspace;
  float *block = lunacu_take(&at, most * classes), *loss = lunacu_take(&at, all);
  for (int64_t first = 0; first < all; first += most) {
    const int64_t rows = lunacu_min(all - first, most);
    const luna_status status = lunacu_logits_of(op, first, rows, block);
    if (status != LUNA_OK) return status;
    lunacu_cross_entropy_rows(op, first, rows, classes, block, loss);
  }
  lunacu_cross_entropy_sum(op, all, loss, (float *)at);
  return LUNA_OK;
}
static luna_status lunacu_linear_cross_entropy_backward(luna_op *op) {
  const luna_tensor *x = op->in[0], *w = op->in[1];
  const int64_t all = lunacu_rows(x), most = lunacu_logit_rows(all), in = lunacu_last(x), classes = w->shape[0];
  char *at = (char *)op->workspace;
  float *block = lunacu_take(&at, most * classes);
  luna_status status = LUNA_OK;
  for (int64_t first = 0; first < all && status == LUNA_OK; first += most) {
    const int64_t rows = lunacu_min(all - first, most);
    status = lunacu_logits_of(op, first, rows, block);
    if (status != LUNA_OK) break;
    lunacu_logits_slopes(op, first, rows, classes, block, block, false);
    status = lunacu_linear_back(op, {block, x->data + first * in, w->data, x->grad ? x->grad + first * in : NULL,
                                     w->grad, lunacu_grad(op, 2), rows, in, classes, !lunacu_sets(op, 0), (float *)at});
  }
  return status;
}

/* --- short convolution over time, each channel alone: in x [batch, n, d], weight [d, width], bias [d]; y_t = bias +
   sum_i weight_i x_(t - width + 1 + i). A thread has eight rows of a channel, or of four. Backward: dx_t (+)= sum_i
   weight_i dy_(t + width - 1 - i). A row that does not exist has no term. --- */
#define LUNACU_STRIP 8
struct lunacu_convolution {
  const float *x, *weight, *bias;    /* x: dy in backward */
  float *y;
  int64_t batch, n, d, width;
  bool back, add;
};
/* a strip of Width channels from c on, rows from t on, of a sequence that starts at `start`; Taps: the width, whose
   weights are held, or 0 for any */
template <int Width, int Taps>
LUNACU_INLINE void lunacu_convolve_strip(const lunacu_convolution &a, int64_t start, int64_t t, int64_t c) {
  const int taps = Taps ? Taps : (int)a.width;
  const float *weight = a.weight + c * taps;
  float held[Taps ? Taps : 1][Width], sum[LUNACU_STRIP][Width] = {}, v[Width]; /* as they lie in memory */
  LUNACU_UNROLL for (int q = 0; q < Taps; q++) lunacu_get(weight + q * Width, held[q]);
  LUNACU_UNROLL for (int k = 0; k < LUNACU_STRIP && a.bias; k++) lunacu_get(a.bias + c, sum[k]);
  LUNACU_UNROLL for (int s = 0; s < LUNACU_STRIP + taps - 1; s++) {
    const int64_t row = a.back ? t + s : t + s - (taps - 1);
    if (row < 0 || row >= a.n) continue;
    lunacu_get(a.x + start + row * a.d, v);
    LUNACU_UNROLL for (int k = 0; k < LUNACU_STRIP; k++) {
      const int lag = a.back ? s - k : k - s + taps - 1, q = taps - 1 - lag;
      if (lag >= 0 && lag < taps)
        LUNACU_UNROLL for (int w = 0; w < Width; w++)
          sum[k][w] += (Taps ? held[(w * Taps + q) / Width][(w * Taps + q) % Width] : weight[w * taps + q]) * v[w];
    }
  }
  LUNACU_UNROLL for (int k = 0; k < LUNACU_STRIP; k++)
    if (t + k < a.n) lunacu_put(a.y + start + (t + k) * a.d, sum[k], a.add);
}
template <int Width, int Taps> __global__ void lunacu_convolution_kernel(lunacu_convolution a) {
  const int64_t strips = (a.n + LUNACU_STRIP - 1) / LUNACU_STRIP, across = a.d / Width;
  for (int64_t i = lunacu_index(); i < a.batch * strips * across; i += lunacu_stride()) {
    const int64_t strip = i / across, item = strip / strips, c = (i - strip * across) * Width;
    lunacu_convolve_strip<Width, Taps>(a, item * a.n * a.d + c, (strip - item * strips) * LUNACU_STRIP, c);
  }
}
/* sums over a sequence's rows of dy_t x_(t - width + 1 + i) for four taps i from `base` on, and of dy; lag: the rows to
   that of a tap, or more than there are; back: the floats */
struct lunacu_taps {
  const float *x, *dy;
  int64_t lag[4], back[4];
  __device__ void add(int64_t i, int64_t r, float (&sum)[5]) const {
    const float g = dy[i], *here = x + i;
    LUNACU_UNROLL for (int q = 0; q < 4; q++)
      if (lag[q] <= r) sum[q] += g * here[-back[q]];
    sum[4] += g;
  }
};
/* Of a stream: a thread has all rows of a channel; history [batch, width - 1, d] has the rows before them, and then the
   last of all these */
__global__ void lunacu_history_kernel(lunacu_convolution a, float *history) {
  const int64_t past = a.width - 1;
  for (int64_t i = lunacu_index(); i < a.batch * a.d; i += lunacu_stride()) {
    const int64_t c = i % a.d, start = i / a.d * a.n * a.d + c;
    float *before = history + i / a.d * past * a.d + c;
    for (int64_t t = 0; t < a.n; t++) {
      float sum = a.bias ? a.bias[c] : 0;
      for (int64_t k = 0; k < a.width; k++) {
        const int64_t row = t - past + k;
        sum += a.weight[c * a.width + k] * (row < 0 ? before[(row + past) * a.d] : a.x[start + row * a.d]);
      }
      a.y[start + t * a.d] = sum;
    }
    bool finite = true;              /* what is not is not remembered: luna.h's li_history_move */
    for (int64_t row = a.n < past ? 0 : a.n - past; row < a.n; row++)
      finite = finite && isfinite(a.x[start + row * a.d]);
    for (int64_t k = 0; k < past && finite; k++) {
      const int64_t row = k + a.n - past;
      before[k * a.d] = row < 0 ? before[(row + past) * a.d] : a.x[start + row * a.d];
    }
  }
}
static lunacu_sums lunacu_taps_sums(const luna_op *op) { /* of each sequence: the parts are added by sums_end */
  return lunacu_sums_of(op->in[0]->shape[0], op->in[0]->shape[1], op->in[0]->shape[2], true);
}
static void lunacu_short_convolution_query(luna_op *op) {
  const lunacu_sums s = lunacu_taps_sums(op);
  op->backward_workspace_size = (size_t)(s.splits * s.outer * 5 * s.n) * sizeof(float);
}
static void lunacu_convolve(const luna_op *op, const float *x, const float *bias, float *y, bool back, bool add) {
  const luna_tensor *in = op->in[0];
  const lunacu_convolution a = {x, op->in[1]->data, bias, y, in->shape[0], in->shape[1], in->shape[2],
                                lunacu_last(op->in[1]), back, add};
  const bool wide = lunacu_wide(a.d, x, a.weight, bias, y);
  const int64_t count = a.batch * lunacu_divide_up(a.n, LUNACU_STRIP) * a.d / (wide ? 4 : 1);
  void (*kernel)(lunacu_convolution) = !wide ? lunacu_convolution_kernel<1, 0> : lunacu_convolution_kernel<4, 0>;
  if (wide && a.width == 2) kernel = lunacu_convolution_kernel<4, 2>;
  if (wide && a.width == 3) kernel = lunacu_convolution_kernel<4, 3>;
  if (wide && a.width == 4) kernel = lunacu_convolution_kernel<4, 4>;
  if (op->history) LUNACU_OVER(op, lunacu_history_kernel, a.batch * a.d, LUNACU_BLOCK, a, op->history);
  else LUNACU_OVER(op, kernel, count, LUNACU_BLOCK, a);
}
static void lunacu_short_convolution_forward(luna_op *op) {
  lunacu_convolve(op, op->in[0]->data, lunacu_data(op, 2), op->out[0]->data, false, false);
}
static void lunacu_short_convolution_backward(luna_op *op) {
  const int64_t width = lunacu_last(op->in[1]), d = op->in[0]->shape[2];
  const lunacu_sums s = lunacu_taps_sums(op);
  float *partial = (float *)op->workspace;
  float *dweight = lunacu_grad(op, 1), *dbias = lunacu_grad(op, 2);
  if (op->in[0]->grad) lunacu_convolve(op, op->out[0]->grad, NULL, op->in[0]->grad, true, !lunacu_sets(op, 0));
  for (int64_t base = 0; base < (dweight ? width : dbias ? 1 : 0) && luna_count(op->in[0]) > 0; base += 4) {
    lunacu_taps f = {op->in[0]->data, op->out[0]->grad, {}, {}};
    lunacu_sums_to to = {{NULL, NULL, NULL, NULL, base == 0 ? dbias : NULL}, {width, width, width, width, 1}, d, 5,
                         1.0f, true};
    for (int q = 0; q < 4; q++) {
      const int64_t lag = width - 1 - base - q;
      f.lag[q] = lag < 0 ? INT64_MAX : lag;
      f.back[q] = lag * d;
    }
    for (int q = 0; q < 4 && dweight && base + q < width; q++) to.to[q] = dweight + base + q;
    LUNACU_OVER(op, (lunacu_sums_kernel<5, lunacu_taps>), s.units(), s.at_once(), f, s, to, partial);
    lunacu_sums_end(op, s.splits * s.outer, 5 * d, partial, to);
  }
}

/* ---------------------------------------------------------------------------------------------------------------------
   >>attention: out = softmax(scale Q K^T) V for every head (eq. 1), forward and backward
   Forward: a block has a tile of queries and a run of keys, and goes over these a tile at a time: S = Q K^T in
   registers, P = exp(S - the largest so far) in shared memory, O = O exp(the largest before - now) + P V; under TF32
   and BF16 by tensor cores, as the backward's products (lunacu_tensor_tile), which have the next factors on their way
   meanwhile (cp.async): of float32's, other blocks' work covers that wait. Where queries are few, several blocks share
   the keys; what each of them found (largest, sum, O) is merged in the order of the keys.
   Values wider than a tile go by chunks of columns, with O in memory between. Backward: waves of scores. One kernel
   makes P and dS = P (dP - delta) of as many scores as the workspace holds, with P from each row's log-sum-exp and
   delta = dO O; then dV += P^T dO, dK += dS^T Q, dQ += dS K as matrix products. A wave is large enough to fill a GPU
   and small enough to be workspace of one call; products with a long sum and a small result are split, and the parts
   added in order. Sizes of waves, splits and tiles follow from shapes alone. Causality is exact: a key that a query
   does not see has weight 0 there, and what is not finite in its value is kept out of the product.
   ------------------------------------------------------------------------------------------------------------------ */
#define LUNACU_TILE_THREADS 128
#define LUNACU_DEPTH 16              /* of a sum, what is in shared memory at a time */
#define LUNACU_WORKSPACE ((int64_t)8 << 20)  /* floats of workspace for P, for dS and for parts of results, each */

/* Weights are powers of 2, which the hardware has: of a score times scale log2 e, less the row's largest or its
   log-sum-exp, in base 2 too. Below 2^-126 they are 0. */
#define LUNACU_LOG2_E 1.44269504f
LUNACU_INLINE float lunacu_exp2(float x) {
#ifdef LUNA_CUDA_HOST
  return exp2f(x);
#else
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}
/* x, of which the compiler then knows nothing: of a stride, it makes no pointer for each of its multiples */
LUNACU_INLINE int64_t lunacu_anew(int64_t x) {
#ifndef LUNA_CUDA_HOST
  asm volatile("" : "+l"(x));
#endif
  return x;
}
/* The factors of four elements from `element` on */
LUNACU_INLINE void lunacu_drop4(const lunacu_dropout &d, int64_t element, float (&factor)[4]) {
  const int at = (int)(element % 8), first = at / 2;
  uint32_t w[4], more[4] = {0, 0, 0, 0};
  lunacu_philox(d, element / 8, w);
  if (at > 4) lunacu_philox(d, element / 8 + 1, more);
  const uint32_t a = first == 0 ? w[0] : first == 1 ? w[1] : first == 2 ? w[2] : w[3],
      b = first == 0 ? w[1] : first == 1 ? w[2] : first == 2 ? w[3] : more[0];
  const uint32_t c = first == 0 ? w[2] : first == 1 ? w[3] : first == 2 ? more[0] : more[1],
      low = at % 2 ? a >> 16 | b << 16 : a, high = at % 2 ? b >> 16 | c << 16 : b;
  const uint32_t half[4] = {low & 0xFFFFu, low >> 16, high & 0xFFFFu, high >> 16};
  LUNACU_UNROLL for (int i = 0; i < 4; i++) factor[i] = half[i] < d.threshold ? 0.0f : d.keep;
}

/* Where shared memory has them so that tensor cores' fragments are read without bank conflicts: steps of a sum, sixteen
   as a 4 x 4 transposed; rows that are read two or four apart, of which neighbours change places */
LUNACU_INLINE int lunacu_step_place(int k) { return (k & ~15) | (k & 3) << 2 | (k >> 2 & 3); }
LUNACU_INLINE int lunacu_line_place(int i) { return i ^ (i >> 1 & 1) ^ (i >> 2 & 1); }

/* --- products by tiles: C [Tall, Wide] = A B, of which a thread has rows x columns, fours of neighbours --- */
template <int Tall, int Wide> struct lunacu_tile {
  static constexpr int tall = Tall, wide = Wide, rows = Tall <= 32 ? 4 : 8,
      columns = Tall * Wide / LUNACU_TILE_THREADS / rows, across = Wide / columns;
  static_assert(Tall / rows * across == LUNACU_TILE_THREADS && columns % 4 == 0, "all threads of a block share a tile");
  static constexpr bool tensor = false;
  static constexpr int a_pitch = Tall + 4, b_pitch = Wide + 4, a_room = LUNACU_DEPTH * a_pitch, /* floats */
      room = a_room + LUNACU_DEPTH * b_pitch, rooms = room;
  static constexpr int row_step = Tall / (rows / 4), column_step = Wide / (columns / 4),
      wide_log = Wide == 32 ? 5 : Wide == 64 ? 6 : Wide == 128 ? 7 : 8;
  static LUNACU_INLINE int lane() { return threadIdx.x % across; }
  static LUNACU_INLINE int first_row() { return threadIdx.x / across * 4; }
  static LUNACU_INLINE int row(int i) { return i / 4 * row_step + first_row() + i % 4; }
  static LUNACU_INLINE int column(int j) { return j / 4 * column_step + lane() * 4 + j % 4; }
  /* where P has the weights of key k */
  static LUNACU_INLINE int at(int k) { return k * a_pitch; }
};
/* The same by tensor cores: a warp has Tall / 4 rows and all columns, a thread rows that are neighbours and four of
   every 16 columns. Steps take turns in two rooms. Along: a room is for factors of which the sum goes along rows alone,
   and for two steps of values */
template <int Tall, int Wide, bool Along> struct lunacu_tensor_tile {
  static constexpr bool tensor = true;
  static constexpr int tall = Tall, wide = Wide, rows = Tall / 32, columns = Wide / 4, across = 4;
  static constexpr int a_pitch = Tall + 8, b_pitch = Wide + 4, a_room = LUNACU_DEPTH * (Along ? Tall : a_pitch),
      product_room = a_room + LUNACU_DEPTH * (Along ? Wide : b_pitch), values_room = 2 * LUNACU_DEPTH * b_pitch,
      room = Along && product_room < values_room ? values_room : product_room, rooms = 2 * room,
      wide_log = Wide == 64 ? 6 : 7;
  static LUNACU_INLINE int lane() { return threadIdx.x % 4; }
  static LUNACU_INLINE int first_row() { return threadIdx.x / 4 * rows; }
  static LUNACU_INLINE int row(int i) { return first_row() + i; }
  static LUNACU_INLINE int column(int j) { return j / 4 * 16 + lane() * 4 + j % 4; }
  static LUNACU_INLINE int at(int k) { return lunacu_step_place(k) * a_pitch; }
};

LUNACU_INLINE float4 lunacu_add4(float4 a, float4 b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}
LUNACU_INLINE float4 lunacu_scale4(float4 a, float factor) {
  return make_float4(a.x * factor, a.y * factor, a.z * factor, a.w * factor);
}
/* four neighbours of a row of memory that has `width` floats: the one at `c` and what follows */
LUNACU_INLINE float4 lunacu_get4(const float *row, int c, int width, bool vector) {
  if (vector && c + 4 <= width) return *(const float4 *)(row + c);
  return make_float4(c < width ? row[c] : 0, c + 1 < width ? row[c + 1] : 0, c + 2 < width ? row[c + 2] : 0,
                     c + 3 < width ? row[c + 3] : 0);
}
LUNACU_INLINE void lunacu_set4(float *row, int c, int width, bool vector, float4 x) {
  if (vector && c + 4 <= width) lunacu_store4(row + c, x);
  else {
    if (c < width) row[c] = x.x;
    if (c + 1 < width) row[c + 1] = x.y;
    if (c + 2 < width) row[c + 2] = x.z;
    if (c + 3 < width) row[c + 3] = x.w;
  }
}

/* --- tiles go from memory through registers into shared memory, by fours, so that all of a thread's loads are under
   way before the first is used --- */
/* A matrix in memory: zeros outside rows x width; from row `clean` on what is not finite counts as zero */
struct lunacu_side {
  const float *at;
  int64_t row;
  int rows, width, clean;
  bool vector;                       /* may be read by four */
  /* whether its rows up to `end` and columns up to `side` are all there, and as they are in memory */
  LUNACU_INLINE bool has(int end, int side) const {
    return vector && end <= rows && end <= clean && side <= width;
  }
};
LUNACU_INLINE float lunacu_finite(float x) { return fabsf(x) < INFINITY ? x : 0; }
LUNACU_INLINE float4 lunacu_finite4(float4 x) {
  return make_float4(lunacu_finite(x.x), lunacu_finite(x.y), lunacu_finite(x.z), lunacu_finite(x.w));
}
LUNACU_INLINE float4 lunacu_load4(const lunacu_side &s, int i, int c) {
  if (i >= s.rows) return make_float4(0, 0, 0, 0);
  const float4 x = lunacu_get4(s.at + i * s.row, c, s.width, s.vector);
  return i < s.clean ? x : lunacu_finite4(x);
}
/* A thread's fours of a tile: one at (row, column), the next `step` rows below. `line`: fours of a row, a power of
   two */
struct lunacu_fours { int row, column, step; };
LUNACU_INLINE lunacu_fours lunacu_fours_of(unsigned line) {
  return {(int)(threadIdx.x / line), (int)(threadIdx.x % line * 4), (int)(LUNACU_TILE_THREADS / line)};
}
/* of the tile at (row, column) of the matrix; Whole: the matrix has all of it */
template <bool Whole, int Turns> LUNACU_INLINE void lunacu_fetch(float4 (&x)[Turns], const lunacu_side &s, int row,
                                                                 int column, const lunacu_fours &own) {
  const float *from = s.at + (row + own.row) * s.row + column + own.column;
  const int64_t step = own.step * s.row;
  LUNACU_UNROLL for (int t = 0; t < Turns; t++, from += step)
    x[t] = Whole ? *(const float4 *)from : lunacu_load4(s, row + own.row + t * own.step, column + own.column);
}
/* How shared memory gets a tile, whose rows are `pitch` apart there: as it is, transposed, or with its rows in the
   places of steps or lines */
enum lunacu_order { LUNACU_PLAIN, LUNACU_TURNED, LUNACU_STEPS, LUNACU_LINES, LUNACU_TURNED_STEPS };
template <lunacu_order Order> LUNACU_INLINE int lunacu_row_place(int row) {
  return Order == LUNACU_STEPS ? lunacu_step_place(row) : Order == LUNACU_LINES ? lunacu_line_place(row) : row;
}
template <lunacu_order Order, int Turns>
LUNACU_INLINE void lunacu_store(lunacu_shared<float> to, int pitch, const lunacu_fours &own, const float4 (&x)[Turns]) {
  LUNACU_UNROLL for (int t = 0; t < Turns; t++) {
    const int c = own.column, i = lunacu_row_place<Order>(own.row + t * own.step);
    if (Order == LUNACU_TURNED || Order == LUNACU_TURNED_STEPS) {
      const int first = Order == LUNACU_TURNED ? c : lunacu_step_place(c), step = Order == LUNACU_TURNED ? 1 : 4;
      to[first * pitch + i] = x[t].x;
      to[(first + step) * pitch + i] = x[t].y;
      to[(first + 2 * step) * pitch + i] = x[t].z;
      to[(first + 3 * step) * pitch + i] = x[t].w;
    } else lunacu_write4(to + i * pitch + c, x[t]);
  }
}
/* Both. A tile that is not whole takes a turn at a time: fewer registers. Sends: it may be under way until
   lunacu_arrive */
template <lunacu_order Order, int Turns, bool Sends>
LUNACU_INLINE void lunacu_stage(lunacu_shared<float> to, int pitch, const lunacu_side &s, int row, int column,
                                lunacu_fours own, bool whole) {
  if (Sends && whole) {
    const float *from = s.at + (row + own.row) * s.row + column + own.column;
    LUNACU_UNROLL for (int t = 0; t < Turns; t++, from += own.step * s.row)
      lunacu_send4(to + lunacu_row_place<Order>(own.row + t * own.step) * pitch + own.column, from);
  } else if (whole) {
    float4 x[Turns];
    lunacu_fetch<true>(x, s, row, column, own);
    lunacu_store<Order>(to, pitch, own, x);
  } else {
    LUNACU_ROLLED
    for (; own.row < Turns * own.step; own.row += own.step) {
      float4 x[1];
      lunacu_fetch<false>(x, s, row, column, own);
      lunacu_store<Order>(to, pitch, own, x);
    }
  }
}

/* --- products of tiles --- */
/* one step of the sum: a and b are a thread's first four of it, the next are a_step and b_step on */
template <int Rows, int Columns>
LUNACU_INLINE void lunacu_outer(float (&sum)[Rows][Columns], lunacu_shared<const float> a, int a_step,
                                lunacu_shared<const float> b, int b_step) {
  float x[Rows], y[Columns];
  LUNACU_UNROLL for (int i = 0; i < Rows; i += 4) lunacu_apart(x + i, lunacu_read4(a + i / 4 * a_step));
  LUNACU_UNROLL for (int j = 0; j < Columns; j += 4)
    if constexpr (Columns % 4 == 0) lunacu_apart(y + j, lunacu_read4(b + j / 4 * b_step));
    else
      LUNACU_UNROLL for (int e = 0; e < Columns; e++) y[e] = b[e];
  LUNACU_UNROLL for (int i = 0; i < Rows; i++)
    LUNACU_UNROLL for (int j = 0; j < Columns; j++) sum[i][j] += x[i] * y[j];
}
/* --- tensor cores: sum += A B over 16 steps of a lunacu_tensor_tile, the factors rounded to TF32 or BF16. Along: a
   row of A, in its line's place, or a column of B lies in a row of shared memory; otherwise a step, in its place --- */
#ifdef LUNA_CUDA_HOST
inline float lunacu_rounded(float x, bool bf16) { /* TF32: halves away from zero; BF16: to even; NaN, Inf stay */
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  if (!(fabsf(x) < INFINITY)) return x;
  bits = bf16 ? (bits + 0x7fffu + (bits >> 16 & 1)) & ~0xffffu : (bits + 0x1000u) & ~0x1fffu;
  memcpy(&x, &bits, sizeof x);
  return x;
}
template <bool AlongA, bool AlongB, int PitchA, int PitchB, int Rows, int Columns>
inline void lunacu_tensor_steps(float (&sum)[Rows][Columns], lunacu_shared<const float> a,
                                lunacu_shared<const float> b, bool bf16) {
  for (int k = 0; k < 16; k++) {
    const int place = lunacu_step_place(k);
    float x[Rows];
    for (int i = 0; i < Rows; i++) {
      const int row = (int)threadIdx.x / 4 * Rows + i;
      x[i] = lunacu_rounded(AlongA ? a[lunacu_line_place(row) * PitchA + k] : a[place * PitchA + row], bf16);
    }
    for (int j = 0; j < Columns; j++) {
      const int column = j / 4 * 16 + (int)threadIdx.x % 4 * 4 + j % 4;
      const float y = lunacu_rounded(AlongB ? b[column * PitchB + k] : b[place * PitchB + column], bf16);
      for (int i = 0; i < Rows; i++) sum[i][j] += x[i] * y;
    }
  }
}
#else
/* C += A B of 16 rows and 8 columns: of A two rows, of B one column, of each four steps of the 16. The rows are those
   of this thread's part of C; the column of B is another's. */
LUNACU_INLINE void lunacu_tensor_product(float &c0, float &c1, float &c2, float &c3, const uint32_t (&x)[4],
                                         const uint32_t (&y)[4], const uint32_t (&b)[4], bool bf16) {
  if (bf16)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};" : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3) : "r"(x[0]), "r"(y[0]), "r"(x[1]), "r"(y[1]),
        "r"(b[0]), "r"(b[1]));
  else {
    LUNACU_UNROLL for (int h = 0; h < 4; h += 2)
      asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
          "{%0, %1, %2, %3};" : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3) : "r"(x[h]), "r"(y[h]), "r"(x[h + 1]),
          "r"(y[h + 1]), "r"(b[h]), "r"(b[h + 1]));
  }
}
/* four steps: two pairs of BF16, the lower first, or four of TF32 */
LUNACU_INLINE void lunacu_tensor_round(uint32_t (&to)[4], float a, float b, float c, float d, bool bf16) {
  if (bf16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(to[0]) : "f"(b), "f"(a));
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(to[1]) : "f"(d), "f"(c));
  } else {
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(to[0]) : "f"(a));
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(to[1]) : "f"(b));
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(to[2]) : "f"(c));
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(to[3]) : "f"(d));
  }
}
/* Count neighbours in each of four steps' rows, of which the first is at `p` */
template <int Count, int Pitch> LUNACU_INLINE void lunacu_tensor_turn(uint32_t (&to)[Count][4], const float *p,
                                                                      bool bf16) {
  float x[4][Count];
  LUNACU_UNROLL for (int k = 0; k < 4; k++) {
    if constexpr (Count == 4) lunacu_apart(x[k], *(const float4 *)(p + 4 * k * Pitch));
    else {
      const float2 v = *(const float2 *)(p + 4 * k * Pitch);
      x[k][0] = v.x; x[k][1] = v.y;
    }
  }
  LUNACU_UNROLL for (int i = 0; i < Count; i++) lunacu_tensor_round(to[i], x[0][i], x[1][i], x[2][i], x[3][i], bf16);
}
template <bool AlongA, bool AlongB, int PitchA, int PitchB, bool Bf16, int Rows, int Columns>
LUNACU_INLINE void lunacu_tensor_steps_in(float (&sum)[Rows][Columns], const float *a, const float *b) {
  constexpr int near = AlongB || Columns % 8 ? 4 : 8;
  const int group = (int)threadIdx.x % 32 / 4, lane = (int)threadIdx.x % 4, row = (int)threadIdx.x / 4 * Rows;
  uint32_t x[Rows][4], y[near / 2][4];
  if constexpr (AlongA) {
    LUNACU_UNROLL for (int i = 0; i < Rows; i++) {
      const float4 v = *(const float4 *)(a + lunacu_line_place(row + i) * PitchA + 4 * lane);
      lunacu_tensor_round(x[i], v.x, v.y, v.z, v.w, Bf16);
    }
  } else lunacu_tensor_turn<Rows, PitchA>(x, a + lane * PitchA + row, Bf16);
  LUNACU_UNROLL for (int j = 0; j < Columns; j += near) {
    if constexpr (AlongB) {
      LUNACU_UNROLL for (int q = 0; q < 2; q++) {
        const float4 v = *(const float4 *)(b + (4 * j + group / 2 * 4 + 2 * q + group % 2) * PitchB + 4 * lane);
        lunacu_tensor_round(y[q], v.x, v.y, v.z, v.w, Bf16);
      }
    } else if constexpr (near == 4) {  /* 16 columns alone */
      LUNACU_UNROLL for (int q = 0; q < 2; q++) {
        const float *p = b + lane * PitchB + 4 * j + group / 2 * 4 + 2 * q + group % 2;
        lunacu_tensor_round(y[q], p[0], p[4 * PitchB], p[8 * PitchB], p[12 * PitchB], Bf16);
      }
    } else lunacu_tensor_turn<4, PitchB>(y, b + lane * PitchB + 4 * j + group / 2 * 4 + group % 2 * 16, Bf16);
    LUNACU_UNROLL for (int q = 0; q < near / 2; q++) {
      const int first = near == 4 ? j + 2 * q : j + q, second = near == 4 ? first + 1 : first + 4;
      LUNACU_UNROLL for (int i = 0; i < Rows; i += 2)
        lunacu_tensor_product(sum[i][first], sum[i][second], sum[i + 1][first], sum[i + 1][second], x[i], x[i + 1],
                              y[q], Bf16);
    }
  }
}
template <bool AlongA, bool AlongB, int PitchA, int PitchB, int Rows, int Columns>
LUNACU_INLINE void lunacu_tensor_steps(float (&sum)[Rows][Columns], const float *a, const float *b, bool bf16) {
  if (bf16) lunacu_tensor_steps_in<AlongA, AlongB, PitchA, PitchB, true>(sum, a, b);
  else lunacu_tensor_steps_in<AlongA, AlongB, PitchA, PitchB, false>(sum, a, b);
}
#endif

/* LUNACU_DEPTH steps of the sum, from `k` on, of Size rows or columns from `first` on. Along: the sum goes along rows
   of the memory */
template <bool Along, int Size, lunacu_order Order, bool Sends>
LUNACU_INLINE void lunacu_stage_steps(lunacu_shared<float> to, int pitch, const lunacu_side &s, int first, int k) {
  constexpr int fours = Size * LUNACU_DEPTH / 4, turns = (fours + LUNACU_TILE_THREADS - 1) / LUNACU_TILE_THREADS,
      tall = Along ? Size : LUNACU_DEPTH, wide = Along ? LUNACU_DEPTH : Size;
  const int row = Along ? first : k, column = Along ? k : first;
  if (fours < LUNACU_TILE_THREADS && (int)threadIdx.x >= fours) return;
  lunacu_stage<Order, turns, Sends>(to, pitch, s, row, column, lunacu_fours_of(wide / 4),
                                    s.has(row + tall, column + wide));
}
/* sum += A B over steps `from` to `end` of the sum, for the tile at (row, column); bf16: of tensor cores'. These have
   the next steps on their way while they multiply, into `other` and `room` in turn, the last into `room` */
template <class Tile, bool AlongA, bool AlongB>
LUNACU_INLINE void lunacu_multiply(float (&sum)[Tile::rows][Tile::columns], lunacu_shared<float> room,
                                   lunacu_shared<float> other, const lunacu_side &a, int row, const lunacu_side &b,
                                   int column, int from, int end, bool bf16) {
  constexpr bool tensor = Tile::tensor;
  constexpr lunacu_order a_order = AlongA ? tensor ? LUNACU_LINES : LUNACU_TURNED : tensor ? LUNACU_STEPS :
      LUNACU_PLAIN, b_order = AlongB ? tensor ? LUNACU_PLAIN : LUNACU_TURNED : tensor ? LUNACU_STEPS : LUNACU_PLAIN;
  constexpr int a_pitch = tensor && AlongA ? LUNACU_DEPTH : Tile::a_pitch,
      b_pitch = tensor && AlongB ? LUNACU_DEPTH : Tile::b_pitch;
  const auto stage = [&](lunacu_shared<float> to, int k) {
    lunacu_stage_steps<AlongA, Tile::tall, a_order, tensor>(to, a_pitch, a, row, k);
    lunacu_stage_steps<AlongB, Tile::wide, b_order, tensor>(to + Tile::a_room, b_pitch, b, column, k);
  };
  if constexpr (tensor) {
    lunacu_shared<float> now = (end - from - 1) / LUNACU_DEPTH % 2 ? other : room, next = now == room ? other : room;
    __syncthreads();
    if (from < end) stage(now, from);
    for (int k = from; k < end; k += LUNACU_DEPTH) {
      const lunacu_shared<float> here = now;
      lunacu_arrive();
      __syncthreads();
      if (k + LUNACU_DEPTH < end) stage(next, k + LUNACU_DEPTH);
      lunacu_tensor_steps<AlongA, AlongB, a_pitch, b_pitch>(sum, here, here + Tile::a_room, bf16);
      now = next;
      next = here;
    }
  } else
    for (int k = from; k < end; k += LUNACU_DEPTH) {
      __syncthreads();
      stage(room, k);
      __syncthreads();
      LUNACU_UNROLL for (int i = 0; i < LUNACU_DEPTH; i++)
        lunacu_outer(sum, room + i * a_pitch + Tile::first_row(), Tile::row_step,
                     room + Tile::a_room + i * b_pitch + Tile::lane() * 4, Tile::column_step);
    }
}

/* --- one head of one batch row --- */
struct lunacu_operand {              /* a tensor and its gradient: strides in floats, a batch stride 0 shares */
  float *at, *grad;
  int64_t batch, row, head;
  int width;                         /* of a head */
  bool vector;                       /* both may be read by four */
};
struct lunacu_attention {
  lunacu_operand q, k, v, out;
  const float *grad_sums;
  float *lse, *sums;
  int64_t batch, queries, keys;
  int heads;
  float scale;
  const int32_t *lengths, *query_offsets, *key_offsets;
  bool causal;
  bool tensor, bf16;                 /* products of large tiles by tensor cores; of BF16, or of TF32 */
  lunacu_dropout dropout;            /* element ((b heads + head) queries + i) keys + j */
};
struct lunacu_head {
  int b, h, queries, keys, query, key; /* how many are real; where a ragged sequence begins */
};
LUNACU_INLINE lunacu_head lunacu_head_at(const lunacu_attention &a, int64_t pair) {
  lunacu_head r;
  r.b = (int)(pair / a.heads);
  r.h = (int)(pair % a.heads);
  r.query = a.query_offsets ? a.query_offsets[r.b] : 0;
  r.key = a.key_offsets ? a.key_offsets[r.b] : 0;
  r.queries = a.query_offsets ? a.query_offsets[r.b + 1] - r.query : (int)a.queries;
  r.keys = a.key_offsets ? a.key_offsets[r.b + 1] - r.key : (int)a.keys;
  if (a.lengths) r.keys = min(r.keys, max(a.lengths[r.b], 0));
  if (a.causal) r.keys = min(r.keys, r.queries);
  return r;
}
/* where its row i, of those that begin at r.query or r.key, lies; such rows; where row i lies in lse and sums; the
   number of its first weight for dropout */
LUNACU_INLINE int64_t lunacu_row_at(const lunacu_operand &m, const lunacu_head &r, int begin, int i) {
  return r.b * m.batch + r.h * m.head + ((int64_t)begin + i) * m.row;
}
LUNACU_INLINE lunacu_side lunacu_side_at(const lunacu_operand &m, const float *of, const lunacu_head &r, int begin,
                                         int i, int rows, int width, int clean = INT32_MAX) {
  return {of + lunacu_row_at(m, r, begin, i), m.row, rows, width, clean, m.vector};
}
LUNACU_INLINE int64_t lunacu_line_at(const lunacu_attention &a, const lunacu_head &r, int i) {
  return ((a.query_offsets ? r.query : r.b * a.queries) + i) * a.heads + r.h;
}
LUNACU_INLINE int64_t lunacu_element_at(const lunacu_attention &a, const lunacu_head &r, int i) {
  return (((int64_t)r.b * a.heads + r.h) * a.queries + i) * a.keys;
}

/* --- forward. Block: pair (batch row, head), tile of queries, run of keys --- */
struct lunacu_runs {
  int tall, wide;                    /* the tile */
  bool tensor;                       /* on tensor cores */
  int64_t units;                     /* pairs * tiles * splits: the blocks */
  /* of queries; runs of keys, and how many keys a run has: a multiple of the tile's */
  int tiles, splits, keys;
  int chunk_log;                     /* 2^this columns of values at a time */
  /* [units, tall, value_dim] values, then [units, 3, tall] largest, sum, sum after dropout; null: not split */
  float *partial;
};
/* The scores become exp(s - the maximum so far), in p[Tile::at(key) + query]. stats of each row: the maximum, the sum,
   the factor of earlier sums */
template <class Tile> LUNACU_INLINE void lunacu_attention_weights(const lunacu_attention &a, int keys, int ahead,
                                                                  float (&s)[Tile::rows][Tile::columns],
                                                                  lunacu_shared<float> p, lunacu_shared<float> stats) {
  const bool hides = keys < Tile::wide || (a.causal && ahead + Tile::wide > 1); /* some key from some query */
  LUNACU_UNROLL for (int i = 0; i < Tile::rows; i++) {
    const int row = Tile::row(i), seen = a.causal ? min(keys, row + 1 - ahead) : keys;
    const float before = stats[row];
    float top = before, total = 0;
    LUNACU_UNROLL for (int j = 0; j < Tile::columns; j++) s[i][j] *= a.scale * LUNACU_LOG2_E;
    if (hides) {
      LUNACU_UNROLL for (int j = 0; j < Tile::columns; j++) s[i][j] = Tile::column(j) < seen ? s[i][j] : -INFINITY;
    }
    LUNACU_UNROLL for (int j = 0; j < Tile::columns; j++) top = fmaxf(top, s[i][j]);
    top = lunacu_over_lanes<lunacu_maximum>(top, Tile::across);
    const float base = top == -INFINITY ? 0 : top;
    LUNACU_UNROLL for (int j = 0; j < Tile::columns; j++) {
      s[i][j] = lunacu_exp2(s[i][j] - base);
      total += s[i][j];
    }
    total = lunacu_over_lanes<lunacu_sum>(total, Tile::across);
    __syncwarp();                    /* a row belongs to lanes of one warp */
    if (Tile::lane() == 0) {
      const float fade = top == before ? 1 : lunacu_exp2(before - top);
      stats[row] = top;
      stats[Tile::tall + row] = stats[Tile::tall + row] * fade + total;
      stats[2 * Tile::tall + row] = fade;
    }
    if (Tile::rows % 4 == 0 && i % 4 < 3) continue;
    LUNACU_UNROLL for (int j = 0; j < Tile::columns; j++) {
      if constexpr (Tile::rows % 4 == 0)
        lunacu_write4(p + Tile::at(Tile::column(j)) + Tile::row(i - 3),
                      make_float4(s[i - 3][j], s[i - 2][j], s[i - 1][j], s[i][j]));
      else p[Tile::at(Tile::column(j)) + Tile::row(i)] = s[i][j];
    }
  }
}
/* Drops weights of row thread % tall, by fours, and returns their sum: the threads of a row have every so manieth
   four */
template <class Tile>
LUNACU_INLINE float lunacu_attention_drop(const lunacu_dropout &d, int64_t element, int keys, lunacu_shared<float> p) {
  float sum = 0;
  for (int k = threadIdx.x / Tile::tall * 4; k < keys; k += LUNACU_TILE_THREADS / Tile::tall * 4) {
    const lunacu_shared<float> at = p + threadIdx.x % Tile::tall;
    float factor[4];
    lunacu_drop4(d, element + k, factor);
    LUNACU_UNROLL for (int c = 0; c < 4; c++) {
      const float x = at[Tile::at(k + c)] * factor[c];
      at[Tile::at(k + c)] = x;
      sum += x;
    }
  }
  return sum;
}
/* The product with the values, a chunk of 2^chunk_log columns at a time. A chunk that is narrower than the tile has
   groups of lanes, of which each has every so manieth key. A thread's column j is column(j) of the chunk */
template <class Tile> struct lunacu_values {
  int chunk_log, groups, group, lane, step;
  LUNACU_INLINE explicit lunacu_values(int log) : chunk_log(log) {
    const int across = (1 << log) / Tile::columns;
    groups = Tile::across / across;
    group = Tile::lane() / across;
    lane = Tile::lane() % across * 4;
    step = (1 << log) / (Tile::columns / 4);
  }
  LUNACU_INLINE int column(int j) const { return j / 4 * step + lane + j % 4; }
};
/* sum += P V for the chunk from column `from` on. ahead: the first key's number less the first query's */
template <class Tile>
LUNACU_INLINE void lunacu_attention_add_values(const lunacu_values<Tile> &own, const lunacu_side &v, int ahead,
                                               int from, lunacu_shared<const float> p, lunacu_shared<float> room,
                                               float (&sum)[Tile::rows][Tile::columns], bool bf16) {
  constexpr int turns = Tile::wide * LUNACU_DEPTH / 4 / LUNACU_TILE_THREADS;
  constexpr lunacu_order order = Tile::tensor ? LUNACU_STEPS : LUNACU_PLAIN;
  const int keys_staged = LUNACU_DEPTH * own.groups, chunk = 1 << own.chunk_log;
  const lunacu_fours fours = lunacu_fours_of(1u << (own.chunk_log - 2));
  const auto stage = [&](lunacu_shared<float> to, int k) {
    lunacu_stage<order, turns, Tile::tensor>(to, Tile::tensor ? Tile::b_pitch : chunk, v, k, from, fours,
                                             v.has(k + keys_staged, from + chunk));
  };
  if constexpr (Tile::tensor) {        /* as lunacu_multiply */
    lunacu_shared<float> now = room, next = room + LUNACU_DEPTH * Tile::b_pitch;
    __syncthreads();
    if (v.rows > 0) stage(now, 0);
    for (int k = 0; k < v.rows; k += LUNACU_DEPTH) {
      const lunacu_shared<float> here = now;
      lunacu_arrive();
      __syncthreads();
      if (k + LUNACU_DEPTH < v.rows) stage(next, k + LUNACU_DEPTH);
      lunacu_tensor_steps<false, false, Tile::a_pitch, Tile::b_pitch>(sum, p + k * Tile::a_pitch, here, bf16);
      now = next;
      next = here;
    }
  } else
    for (int k = 0; k < v.rows; k += keys_staged) {
      __syncthreads();
      stage(room, k);
      __syncthreads();
      LUNACU_UNROLL for (int i = 0; i < LUNACU_DEPTH; i++) {
        const int at = i * own.groups + own.group;
        lunacu_outer(sum, p + (k + at) * Tile::a_pitch + Tile::first_row(), Tile::row_step,
                     room + (at << own.chunk_log) + own.lane, own.step);
      }
    }
  if (v.clean >= v.rows) return;
  /* what was kept out, where it is seen */
  bool any = false;
  for (int k = v.clean + fours.row; k < v.rows; k += fours.step) {
    const float4 x = lunacu_get4(v.at + k * v.row, from + fours.column, v.width, v.vector);
    any = any || !(fabsf(x.x) < INFINITY && fabsf(x.y) < INFINITY && fabsf(x.z) < INFINITY && fabsf(x.w) < INFINITY);
  }
  if (!__syncthreads_or(any)) return;
  for (int k = v.clean / own.groups * own.groups + own.group; k < v.rows; k += own.groups) {
    LUNACU_UNROLL for (int j = 0; j < Tile::columns; j++) {
      const float x = k >= v.clean && from + own.column(j) < v.width ? v.at[k * v.row + from + own.column(j)] : 0;
      if (fabsf(x) < INFINITY) continue;
      LUNACU_UNROLL
      for (int i = 0; i < Tile::rows; i++)
        if (Tile::row(i) >= k + ahead) sum[i][j] += p[Tile::at(k) + Tile::row(i)] * x;
    }
  }
}
/* A tile of O in memory */
struct lunacu_result {
  float *at;
  int64_t row;
  int rows, width;
  bool vector;                       /* may be written by four */
};
/* O = O exp(the largest before - now) + sum for the chunk from column `from` on; `first`, `last`: tile of keys */
template <class Tile> LUNACU_INLINE void lunacu_attention_fold(const lunacu_result &out, const lunacu_values<Tile> &own,
                                                               int from, const float (&sum)[Tile::rows][Tile::columns],
                                                               lunacu_shared<const float> stats, bool first,
                                                               bool last) {
  LUNACU_UNROLL for (int i = 0; i < Tile::rows; i++) {
    const int row = Tile::row(i);
    const float fade = stats[2 * Tile::tall + row], factor = last ? 1 / stats[Tile::tall + row] : 1;
    if (row >= out.rows) continue;
    LUNACU_UNROLL for (int j = 0; j < Tile::columns; j += 4) {
      float *to = out.at + row * out.row;
      const int c = from + own.column(j);
      const float4 x = first ? make_float4(0, 0, 0, 0) : lunacu_get4(to, c, out.width, out.vector);
      lunacu_set4(to, c, out.width, out.vector,
                  lunacu_scale4(lunacu_add4(lunacu_scale4(x, fade), lunacu_together(sum[i] + j)), factor));
    }
  }
}
/* O = the sum of the groups' O, which lie one after another in p, over the sum of weights where `divided`; groups 0:
   zeros */
template <class Tile>
LUNACU_INLINE void lunacu_attention_join(const lunacu_result &out, const lunacu_values<Tile> &own, int groups,
                                         lunacu_shared<const float> p, lunacu_shared<const float> stats, bool divided) {
  for (int row = threadIdx.x / LUNACU_WARP; row < out.rows; row += LUNACU_TILE_THREADS / LUNACU_WARP)
    for (int c = threadIdx.x % LUNACU_WARP * 4; c < out.width; c += LUNACU_WARP * 4) {
      const float factor = divided ? 1 / stats[Tile::tall + row] : 1;
      float4 x = make_float4(0, 0, 0, 0);
      LUNACU_ROLLED
      for (int g = 0; g < groups; g++)
        x = lunacu_add4(x, lunacu_scale4(lunacu_read4(p + ((g * Tile::tall + row) << own.chunk_log) + c), factor));
      lunacu_set4(out.at + row * out.row, c, out.width, out.vector, x);
    }
}
/* What is kept of a tile's rows beside O, or of this run's, to be merged. room: each thread's part of a row's weights
   that dropout has left */
template <class Tile>
LUNACU_INLINE void lunacu_attention_rows(const lunacu_attention &a, const lunacu_runs &r, const lunacu_head &head,
                                         int first, int rows, bool empty, lunacu_shared<const float> room,
                                         lunacu_shared<const float> stats) {
  for (int i = threadIdx.x; i < rows; i += LUNACU_TILE_THREADS) {
    const float maximum = stats[i], total = stats[Tile::tall + i];
    const int64_t at = lunacu_line_at(a, head, first + i);
    float left = 0;
    for (int t = i; t < LUNACU_TILE_THREADS; t += Tile::tall) left += room[t];
    if (r.partial) {
      float *to = r.partial + r.units * Tile::tall * a.v.width + (int64_t)blockIdx.x * 3 * Tile::tall + i;
      to[0] = maximum;
      to[Tile::tall] = total;
      to[2 * Tile::tall] = left;
      continue;
    }
    if (a.lse) a.lse[at] = empty ? 0 : maximum + log2f(total);
    if (a.sums) a.sums[at] = empty ? 0 : a.dropout.threshold ? left / total : 1;
  }
}
/* Whole: O stays in registers; otherwise the values go by chunks of columns, and O is in memory between tiles of
   keys */
template <class Tile, bool Whole> __global__ void __launch_bounds__(LUNACU_TILE_THREADS, Tile::tensor ? 2 : 3)
lunacu_attention_kernel(lunacu_attention a, lunacu_runs r) {
  LUNACU_DYNAMIC_SHARED(float, p);   /* [wide][a_pitch]; at the end O by groups */
  const lunacu_shared<float> room = p + Tile::wide * Tile::a_pitch, stats = room + Tile::room;
  const int64_t unit = blockIdx.x, pair = unit / ((int64_t)r.tiles * r.splits);
  /* causal: the longest rows start first */
  const int tile = (int)(unit / r.splits % r.tiles), first = (a.causal ? r.tiles - 1 - tile : tile) * Tile::tall;
  const lunacu_head head = lunacu_head_at(a, pair);
  const lunacu_values<Tile> own(Whole ? r.chunk_log : Tile::wide_log);
  const int rows = min(Tile::tall, head.queries - first), begin = (int)(unit % r.splits) * r.keys;
  const int end = min(min(head.keys, begin + r.keys), a.causal ? first + rows : head.keys);
  const lunacu_result out = {
    r.partial ? r.partial + unit * Tile::tall * a.v.width : a.out.at + lunacu_row_at(a.out, head, head.query, first),
    r.partial ? a.v.width : a.out.row, rows, a.v.width, r.partial ? a.v.width % 4 == 0 : a.out.vector
  };
  float sum[Tile::rows][Tile::columns] = {}, left = 0;
  if (rows <= 0 || (r.partial && begin >= end)) return;
  for (int i = threadIdx.x; i < Tile::tall; i += LUNACU_TILE_THREADS) {
    stats[i] = -INFINITY;
    stats[Tile::tall + i] = 0;
  }
  __syncthreads();
  const lunacu_side q = lunacu_side_at(a.q, a.q.at, head, head.query, first, rows, a.q.width);
  for (int key = begin; key < end; key += Tile::wide) {
    const int keys = min(Tile::wide, end - key);
    {
      const lunacu_side k = lunacu_side_at(a.k, a.k.at, head, head.key, key, keys, a.q.width);
      float s[Tile::rows][Tile::columns] = {};
      lunacu_multiply<Tile, true, true>(s, room, p, q, 0, k, 0, 0, a.q.width, a.bf16);
      lunacu_attention_weights<Tile>(a, keys, key - first, s, p, stats);
    }
    __syncwarp();                    /* the weights are read after another barrier, a row's stats by its warp */
    if (a.dropout.threshold) {
      __syncthreads();
      const int row = threadIdx.x % Tile::tall;
      left = left * stats[2 * Tile::tall + row] + lunacu_attention_drop<Tile>(a.dropout,
          lunacu_element_at(a, head, first + row) + key, keys, p);
    }
    const lunacu_side v = lunacu_side_at(a.v, a.v.at, head, head.key, key, keys, a.v.width,
                                         a.causal ? max(first + 1 - key, 0) : INT32_MAX);
    for (int from = 0; from < (Whole ? 1 : a.v.width); from += Tile::wide) {
      LUNACU_UNROLL for (int i = 0; i < Tile::rows; i++) {
        const float fade = Whole ? stats[2 * Tile::tall + Tile::row(i)] : 0.0f;
        LUNACU_UNROLL for (int j = 0; j < Tile::columns; j++) sum[i][j] = Whole ? sum[i][j] * fade : 0;
      }
      lunacu_attention_add_values<Tile>(own, v, key - first, from, p, room, sum, a.bf16);
      if (!Whole)
        lunacu_attention_fold<Tile>(out, own, from, sum, stats, key == begin, key + Tile::wide >= end && !r.partial);
    }
  }
  __syncthreads();
  room[threadIdx.x] = left;
  LUNACU_UNROLL for (int i = 0; i < Tile::rows && Whole; i++)
    LUNACU_UNROLL for (int j = 0; j < Tile::columns; j += 4)
      lunacu_write4(p + ((own.group * Tile::tall + Tile::row(i)) << own.chunk_log) + own.column(j),
                    lunacu_together(sum[i] + j));
  __syncthreads();
  if (Whole || begin >= end) lunacu_attention_join<Tile>(out, own, begin < end ? own.groups : 0, p, stats, !r.partial);
  lunacu_attention_rows<Tile>(a, r, head, first, rows, begin >= end, room, stats);
}
/* Merges the runs of keys: each element of `out` from those that its tile had */
__global__ void lunacu_attention_merge_kernel(lunacu_attention a, lunacu_runs r, int tall) {
  const int64_t element = lunacu_index(), column = element % a.v.width, query = element / a.v.width % a.queries,
      pair = element / a.v.width / a.queries;
  if (pair >= a.batch * a.heads) return;
  const lunacu_head head = lunacu_head_at(a, pair);
  const int tile = (int)(query / tall), row = (int)(query % tall),
      keys = a.causal ? min(head.keys, min((tile + 1) * tall, head.queries)) : head.keys;
  const int splits = (keys + r.keys - 1) / r.keys;
  const int64_t unit = (pair * r.tiles + (a.causal ? r.tiles - 1 - tile : tile)) * r.splits;
  const float *values = r.partial + (unit * tall + row) * a.v.width + column,
      *stats = r.partial + r.units * tall * a.v.width + unit * 3 * tall + row;
  const bool drops = a.dropout.threshold != 0;
  float top = -INFINITY;
  double sum = 0, kept = 0, value = 0;
  if (query >= head.queries) return;
  for (int s = 0; s < splits; s++) top = fmaxf(top, stats[(int64_t)s * 3 * tall]);
  for (int s = 0; s < splits; s++) {
    const float *at = stats + (int64_t)s * 3 * tall;
    const double factor = (double)lunacu_exp2(at[0] - top);
    sum += factor * (double)at[tall];
    if (drops) kept += factor * (double)at[2 * tall];
    value += factor * (double)values[(int64_t)s * tall * a.v.width];
  }
  a.out.at[lunacu_row_at(a.out, head, head.query, (int)query) + column] = splits ? (float)(value / sum) : 0;
  if (column != 0) return;
  if (a.lse) a.lse[lunacu_line_at(a, head, (int)query)] = splits ? top + log2f((float)sum) : 0;
  if (a.sums) a.sums[lunacu_line_at(a, head, (int)query)] = splits == 0 ? 0 : drops ? (float)(kept / sum) : 1;
}

/* --- backward --- */
/* delta = dO . O, and the gradient of the row's sum times that sum where dropout makes it vary. Warp: row and head */
__global__ void lunacu_attention_delta_kernel(lunacu_attention a, int64_t lines, float *__restrict__ delta) {
  const int64_t line = lunacu_index() / LUNACU_WARP, at = line / a.heads * a.out.row + line % a.heads * a.out.head;
  float sum = 0;
  if (line >= lines) return;         /* whole warps */
  for (int c = threadIdx.x % LUNACU_WARP; c < a.v.width; c += LUNACU_WARP) sum += a.out.grad[at + c] * a.out.at[at + c];
  sum = lunacu_over_lanes<lunacu_sum>(sum);
  if (threadIdx.x % LUNACU_WARP == 0)
    delta[line] = a.grad_sums && a.dropout.threshold ? sum + a.grad_sums[line] * a.sums[line] : sum;
}
/* The scores in work: those of `pairs` from `pair` on, their queries from `query` and keys from `key` on */
struct lunacu_wave {
  int64_t pair, pairs;
  int query, queries, key, keys, row; /* row: keys in multiples of 4 */
  float *p, *ds;                     /* [pairs, queries, row] */
  const float *delta;
};
/* P, dropped, and dS. Block: tile of keys, tile of queries, pair */
template <class Tile> __global__ void __launch_bounds__(LUNACU_TILE_THREADS, Tile::tensor ? 2 : 3)
lunacu_attention_scores_kernel(lunacu_attention a, lunacu_wave w) {
  LUNACU_DYNAMIC_SHARED(float, room);
  const int64_t wide = (w.keys + Tile::wide - 1) / Tile::wide, tall = (w.queries + Tile::tall - 1) / Tile::tall,
      pair = blockIdx.x / (wide * tall);
  const int first = (int)(blockIdx.x / wide % tall) * Tile::tall, key = (int)(blockIdx.x % wide) * Tile::wide;
  const lunacu_head head = lunacu_head_at(a, w.pair + pair);
  const int queries = min(w.queries, head.queries - w.query), keys = min(w.keys, head.keys - w.key),
      ahead = w.key + key - w.query - first;
  const lunacu_side q = lunacu_side_at(a.q, a.q.at, head, head.query, w.query, queries, a.q.width),
      k = lunacu_side_at(a.k, a.k.at, head, head.key, w.key, keys, a.q.width),
      out = lunacu_side_at(a.out, a.out.grad, head, head.query, w.query, queries, a.v.width),
      v = lunacu_side_at(a.v, a.v.at, head, head.key, w.key, keys, a.v.width);
  float s[Tile::rows][Tile::columns] = {}, g[Tile::rows][Tile::columns] = {};
  if (first >= queries || key >= keys) return;
  if (!a.causal || ahead < Tile::tall) { /* otherwise no query of the tile sees a key of it */
    lunacu_multiply<Tile, true, true>(s, room, room + Tile::room, q, first, k, key, 0, a.q.width, a.bf16);
    lunacu_multiply<Tile, true, true>(g, room, room + Tile::room, out, first, v, key, 0, a.v.width, a.bf16);
  }
  const bool hides = keys - key < Tile::wide || (a.causal && ahead + Tile::wide > 1);
  const lunacu_head again = lunacu_head_at(a, w.pair + pair); /* so that the products had its registers */
  LUNACU_UNROLL for (int i = 0; i < Tile::rows; i++) {
    const int row = first + Tile::row(i), seen = a.causal ? min(keys - key, Tile::row(i) + 1 - ahead) : keys - key;
    const int64_t line = lunacu_line_at(a, again, w.query + row), at = (pair * w.queries + row) * w.row + key;
    if (row >= queries) continue;
    const float lse = a.lse[line], delta = w.delta[line],
        add = a.grad_sums && a.dropout.threshold ? a.grad_sums[line] : 0;
    LUNACU_UNROLL for (int j = 0; j < Tile::columns; j += 4) {
      float factor[4] = {1, 1, 1, 1}, p[4], ds[4];
      if (key + Tile::column(j) >= w.row) continue;
      if (a.dropout.threshold)
        lunacu_drop4(a.dropout, lunacu_element_at(a, again, w.query + row) + w.key + key + Tile::column(j), factor);
      LUNACU_UNROLL for (int c = 0; c < 4; c++) {
        p[c] = lunacu_exp2(s[i][j + c] * (a.scale * LUNACU_LOG2_E) - lse);
        ds[c] = p[c] * ((g[i][j + c] + add) * factor[c] - delta);
        p[c] *= factor[c];
        if (hides && Tile::column(j) + c >= seen) p[c] = ds[c] = 0;
      }
      lunacu_store4(w.p + at + Tile::column(j), lunacu_together(p));
      lunacu_store4(w.ds + at + Tile::column(j), lunacu_together(ds));
    }
  }
}
/* A gradient's rows from the wave's first on, += factor times a product with P or dS, or a part of it. Q: dQ += scale
   dS K, K: dK += scale dS^T Q, V: dV += P^T dO */
enum { LUNACU_GRAD_Q, LUNACU_GRAD_K, LUNACU_GRAD_V };
struct lunacu_gradient {
  lunacu_operand to, with;           /* to.grad: the result; with.at: the other factor */
  const float *scores;               /* P or dS */
  float factor, *partial;            /* [pairs, splits, rows, width]; null: neither split nor shared */
  int tall, wide;                    /* the tile */
  int rows;                          /* of the result */
  int tiles_down, tiles_across;
  int splits, depth;                 /* parts of the sum, and how long a part is */
  /* its rows are those of keys; it may be written by four; all batch rows have the same, and the wave several */
  bool keys, vector, shared;
};
/* its first row */
LUNACU_INLINE float *lunacu_gradient_at(const lunacu_wave &w, const lunacu_gradient &g, const lunacu_head &head,
                                        bool keys) {
  return g.to.grad + lunacu_row_at(g.to, head, keys ? head.key : head.query, keys ? w.key : w.query);
}
/* Block: tile of the result, part of the sum, pair */
template <class Tile, bool Keys> __global__ void __launch_bounds__(LUNACU_TILE_THREADS, Tile::tensor ? 3 : 4)
lunacu_attention_gradient_kernel(lunacu_attention a, lunacu_wave w, lunacu_gradient g) {
  LUNACU_DYNAMIC_SHARED(float, room);
  const unsigned tiles = g.tiles_down * g.tiles_across, pair = blockIdx.x / (tiles * g.splits),
      split = blockIdx.x / tiles % g.splits;
  const int row = (int)(blockIdx.x / g.tiles_across % g.tiles_down) * Tile::tall,
      column = (int)(blockIdx.x % g.tiles_across) * Tile::wide;
  const lunacu_head head = lunacu_head_at(a, w.pair + pair);
  const int queries = min(w.queries, head.queries - w.query), keys = min(w.keys, head.keys - w.key);
  const lunacu_side scores = {g.scores + (int64_t)pair * w.queries * w.row, w.row, queries, keys, INT32_MAX, true};
  const int rows = Keys ? keys : queries;
  int from = (int)split * g.depth, end = min(from + g.depth, Keys ? queries : keys);
  float sum[Tile::rows][Tile::columns] = {};
  lunacu_side with = Keys ? lunacu_side_at(g.with, g.with.at, head, head.query, w.query, queries, g.to.width) :
      lunacu_side_at(g.with, g.with.at, head, head.key, w.key, keys, g.to.width);
  with.row = lunacu_anew(with.row);
  if (row >= rows) return;
  if (a.causal && Keys) from = max(from, w.key + row - w.query); /* queries before see none of the tile's keys */
  if (a.causal && !Keys) {
    with.clean = max(w.query + row + 1 - w.key, 0);
    end = min(end, w.query + row + Tile::tall - w.key);
  }
  with.rows = min(with.rows, end);
  lunacu_multiply<Tile, !Keys, false>(sum, room, room + Tile::room, scores, row, with, column, from, end, a.bf16);
  const int width = g.to.width;
  const float factor = g.partial ? 1 : g.factor;
  /* the head is found again, so that the sum had its registers */
  float *to = g.partial ? g.partial + ((int64_t)pair * g.splits + split) * g.rows * width :
      lunacu_gradient_at(w, g, lunacu_head_at(a, w.pair + pair), Keys);
  const int64_t to_row = g.partial ? width : g.to.row;
  LUNACU_UNROLL for (int i = 0; i < Tile::rows; i++) {
    const int r = row + Tile::row(i);
    if (r >= rows) continue;
    LUNACU_UNROLL for (int j = 0; j < Tile::columns; j += 4) {
      const int c = column + Tile::column(j);
      const float4 x = g.partial ? make_float4(0, 0, 0, 0) : lunacu_get4(to + r * to_row, c, width, g.vector);
      lunacu_set4(to + r * to_row, c, width, g.vector,
                  lunacu_add4(x, lunacu_scale4(lunacu_together(sum[i] + j), factor)));
    }
  }
}
__global__ void lunacu_attention_gather_kernel(lunacu_attention a, lunacu_wave w, lunacu_gradient g) {
  const int64_t size = (int64_t)g.rows * g.to.width, pairs = g.shared ? a.heads : w.pairs,
      first = lunacu_index() / size, element = lunacu_index() % size, row = element / g.to.width,
      column = element % g.to.width;
  double sum = 0;
  bool any = false;
  if (first >= pairs) return;
  for (int64_t pair = first; pair < w.pairs; pair += pairs) {
    const lunacu_head head = lunacu_head_at(a, w.pair + pair);
    const float *from = g.partial + pair * g.splits * size + element;
    if (row >= (g.keys ? min(w.keys, head.keys - w.key) : min(w.queries, head.queries - w.query))) continue;
    any = true;
    for (int s = 0; s < g.splits; s++) sum += (double)from[s * size];
  }
  float *to = lunacu_gradient_at(w, g, lunacu_head_at(a, w.pair + first), g.keys);
  if (any) to[row * g.to.row + column] += (float)sum * g.factor;
}

/* --- softmax attention: in q, k, v; out y, sums or null; arg: heads, batch, queries, keys, scale, causal. kept:
   log-sum-exp. pack is the same with in weights, context; one head, scale 1, keys = values --- */
/* [batch, rows, heads of what is a head's], of which all batch rows may have the same, or ragged rows of the batch */
static lunacu_operand lunacu_operand_of(const luna_tensor *t, int64_t batch, int64_t rows, int64_t heads, bool ragged) {
  const int64_t row = lunacu_last(t), head = row / heads, step = ragged || t->shape[0] != batch ? 0 : rows * row;
  return {t->data, t->grad, step, row, head, (int)head, lunacu_wide(row | head | step, t->data, t->grad)};
}
static lunacu_attention lunacu_attention_of(const luna_op *op) {
  const bool ragged = op->query_offsets != NULL;
  lunacu_attention a = {};
  a.lse = op->kept_size ? (float *)op->kept : NULL;
  a.sums = op->out[1] ? op->out[1]->data : NULL;
  a.heads = (int)op->arg.attention.heads; a.batch = op->arg.attention.batch; a.queries = op->arg.attention.queries;
  a.keys = op->arg.attention.keys;
  a.q = lunacu_operand_of(op->in[0], a.batch, a.queries, a.heads, ragged);
  a.k = lunacu_operand_of(op->in[1], a.batch, a.keys, a.heads, ragged);
  a.v = lunacu_operand_of(op->in[op->inputs - 1], a.batch, a.keys, a.heads, ragged);
  a.out = lunacu_operand_of(op->out[0], a.batch, a.queries, a.heads, ragged);
  a.lengths = op->lengths; a.query_offsets = op->query_offsets; a.key_offsets = op->key_offsets;
  a.scale = op->arg.attention.scale;
  a.causal = op->arg.attention.causal;
  a.tensor = lunacu_math_of(op->ctx) != LUNA_CUDA_F32;
  a.bf16 = lunacu_math_of(op->ctx) == LUNA_CUDA_BF16;
  a.dropout = lunacu_op_dropout(op);
  a.grad_sums = op->out[1] ? op->out[1]->grad : NULL;
  return a;
}
/* how many parts a sum over `count` is to have, for about `blocks` blocks where there are `units`, each part at least
   `minimum` long and all in `workspace` floats */
static int64_t lunacu_splits(int64_t units, int64_t blocks, int64_t count, int64_t minimum, int64_t size,
                             int64_t workspace) {
  const int64_t maximum = lunacu_min(count / minimum, size > 0 ? workspace / size : 1);
  return lunacu_max(1, lunacu_min(blocks / lunacu_max(units, 1), maximum));
}

/* the runs of keys; floats of the workspace */
static int64_t lunacu_attention_plan(const lunacu_attention &a, lunacu_runs *r) {
  const int64_t pairs = a.batch * a.heads, keys = a.causal ? lunacu_min(a.keys, a.queries) : a.keys;
  *r = {};
  r->tall = a.queries <= 16 ? 16 : a.queries <= 64 || (a.v.width > 64 && keys > 64) ? 64 : 128;
  r->tensor = a.tensor && r->tall > 16 && keys > 32;
  r->wide = r->tall == 16 ? 256 : r->tensor ? 64 : r->tall == 64 ? 128 : keys > 32 ? 64 : 32;
  const int64_t tiles = lunacu_divide_up(a.queries, r->tall);
  const int64_t splits = lunacu_splits(pairs * tiles, 1024, keys, lunacu_max(r->wide, 128),
                                       pairs * tiles * r->tall * (a.v.width + 3), 2 * LUNACU_WORKSPACE);
  r->tiles = (int)tiles;
  r->keys = (int)(lunacu_divide_up(lunacu_divide_up(keys, splits), r->wide) * r->wide);
  r->splits = (int)lunacu_max(1, lunacu_divide_up(keys, lunacu_max(r->keys, 1)));
  r->units = pairs * tiles * r->splits;
  for (r->chunk_log = r->tensor ? 6 : 4; 1 << r->chunk_log < lunacu_min(a.v.width, r->wide); r->chunk_log++);
  return r->splits > 1 ? r->units * r->tall * (a.v.width + 3) : 0;
}
static const lunacu_operand &lunacu_gradient_to(const lunacu_attention &a, int which) {
  return which == LUNACU_GRAD_Q ? a.q : which == LUNACU_GRAD_K ? a.k : a.v;
}
/* whether all batch rows have one and the same input, and so a gradient that is a sum over them */
static bool lunacu_gradient_shared(const lunacu_attention &a, int which) {
  return !a.query_offsets && a.batch > 1 && lunacu_gradient_to(a, which).batch == 0;
}
/* how a gradient of a wave is shared out: parts of the sum as in the largest wave, so that they fit where its own do */
static lunacu_gradient lunacu_gradient_plan(const lunacu_attention &a, const lunacu_wave &maximum, const lunacu_wave &w,
                                            int which) {
  const bool q = which == LUNACU_GRAD_Q, v = which == LUNACU_GRAD_V;
  const int64_t rows = q ? maximum.queries : maximum.keys, count = q ? maximum.keys : maximum.queries;
  lunacu_gradient g = {};
  g.to = lunacu_gradient_to(a, which);
  g.with = q ? a.k : v ? a.out : a.q;
  if (v) g.with.at = a.out.grad;
  g.scores = v ? w.p : w.ds;
  g.factor = v ? 1 : a.scale;
  g.keys = !q;
  g.rows = q ? w.queries : w.keys;
  g.tall = rows <= 32 && g.to.width <= 64 ? 32 : rows <= 16 ? 16 : g.to.width <= 64 ? 128 : 64;
  g.wide = g.tall == 16 ? 256 : g.tall == 64 ? 128 : 64;
  const int64_t units = maximum.pairs * lunacu_divide_up(rows, g.tall) * lunacu_divide_up(g.to.width, g.wide);
  /* where there are many tiles, adding parts takes longer than they save */
  const int64_t splits = units >= 256 ? 1 : lunacu_splits(units, 1024, count, 128, maximum.pairs * rows * g.to.width,
                                                          LUNACU_WORKSPACE);
  g.tiles_down = (int)lunacu_divide_up(g.rows, g.tall);
  g.tiles_across = (int)lunacu_divide_up(g.to.width, g.wide);
  g.depth = (int)(lunacu_divide_up(lunacu_divide_up(count, splits), LUNACU_DEPTH) * LUNACU_DEPTH);
  g.splits = (int)lunacu_divide_up(q ? w.keys : w.queries, g.depth);
  g.shared = maximum.pairs > a.heads && lunacu_gradient_shared(a, which);
  return g;
}
/* The largest wave: all scores of several pairs, or a part of one pair's; where the batch shares a gradient, of whole
   batch rows whose parts of it there is room for, or of one. And what backward needs, in floats */
static lunacu_wave lunacu_wave_of(const lunacu_attention &a, float **partial, char **at) {
  const int64_t queries = lunacu_max(a.queries, 1), keys =
      lunacu_max(a.causal ? lunacu_min(a.keys, a.queries) : a.keys, 1), row = (keys + 3) / 4 * 4, minimum = 2048;
  int64_t parts = 0;
  lunacu_wave w = {};
  w.pairs = lunacu_max(1, lunacu_min(LUNACU_WORKSPACE / (queries * row), a.batch * a.heads));
  for (int which = 0; which < 3; which++) {
    const int64_t size = (which == LUNACU_GRAD_Q ? queries : keys) * lunacu_gradient_to(a, which).width;
    if (!lunacu_gradient_shared(a, which)) continue;
    const int64_t batch = lunacu_min(w.pairs, LUNACU_WORKSPACE / lunacu_max(size, 1)) / a.heads;
    w.pairs = lunacu_min(w.pairs, lunacu_max(batch, 1) * a.heads);
  }
  w.queries = (int)queries;
  w.keys = (int)keys;
  if (queries * row > LUNACU_WORKSPACE && queries <= keys) {
    w.queries = (int)lunacu_min(queries, minimum);
    w.keys = (int)lunacu_min(keys, LUNACU_WORKSPACE / w.queries / 256 * 256);
  } else if (queries * row > LUNACU_WORKSPACE) {
    w.keys = (int)lunacu_min(keys, minimum);
    w.queries = (int)lunacu_min(queries, LUNACU_WORKSPACE / lunacu_min(row, minimum) / 256 * 256);
  }
  w.row = (w.keys + 3) / 4 * 4;
  for (int which = 0; which < 3; which++) {
    const lunacu_gradient g = lunacu_gradient_plan(a, w, w, which);
    if (g.splits > 1 || g.shared) parts = lunacu_max(parts, w.pairs * g.splits * g.rows * g.to.width);
  }
  w.p = lunacu_take(at, w.pairs * w.queries * w.row);
  w.ds = lunacu_take(at, w.pairs * w.queries * w.row);
  *partial = lunacu_take(at, parts);
  return w;
}
static void lunacu_attention_query(luna_op *op) {
  const lunacu_attention a = lunacu_attention_of(op);
  const int64_t lines = lunacu_rows(op->out[0]) * a.heads;
  lunacu_runs r;
  char *at = NULL;
  float *partial;
  if (op->training) op->kept_size = (size_t)lines * sizeof(float);
  op->workspace_size = (size_t)lunacu_attention_plan(a, &r) * sizeof(float);
  if (!op->training) return;
  (void)lunacu_take(&at, lines);
  lunacu_wave_of(a, &partial, &at);
  op->backward_workspace_size = (size_t)(uintptr_t)at;
}

template <class Tile> static void lunacu_attention_launch(cudaStream_t stream, const lunacu_attention &a,
                                                          const lunacu_runs &r) {
  const size_t shared = (size_t)(Tile::wide * Tile::a_pitch + Tile::room + 3 * Tile::tall) * sizeof(float);
  const bool whole = a.v.width <= 1 << r.chunk_log;
  LUNACU_LAUNCH((whole ? lunacu_attention_kernel<Tile, true> : lunacu_attention_kernel<Tile, false>), (unsigned)r.units,
                LUNACU_TILE_THREADS, shared, stream, a, r);
  if (r.partial)
    LUNACU_LAUNCH(lunacu_attention_merge_kernel, (unsigned)lunacu_divide_up(a.batch * a.heads * a.queries * a.v.width,
        LUNACU_BLOCK), LUNACU_BLOCK, 0, stream, a, r, Tile::tall);
}
static void lunacu_attention_forward(luna_op *op) {
  const lunacu_attention a = lunacu_attention_of(op);
  const cudaStream_t stream = lunacu_stream(op);
  lunacu_runs r;
  if (lunacu_attention_plan(a, &r) > 0) r.partial = (float *)op->workspace;
  if (r.units == 0) return;
  if (r.tensor && r.tall == 64) lunacu_attention_launch<lunacu_tensor_tile<64, 64, true>>(stream, a, r);
  else if (r.tensor) lunacu_attention_launch<lunacu_tensor_tile<128, 64, true>>(stream, a, r);
  else if (r.tall == 16) lunacu_attention_launch<lunacu_tile<16, 256>>(stream, a, r);
  else if (r.tall == 64) lunacu_attention_launch<lunacu_tile<64, 128>>(stream, a, r);
  else if (r.wide == 64) lunacu_attention_launch<lunacu_tile<128, 64>>(stream, a, r);
  else lunacu_attention_launch<lunacu_tile<128, 32>>(stream, a, r);
}

template <class Tile> static void lunacu_scores_launch(cudaStream_t stream, const lunacu_attention &a,
                                                       const lunacu_wave &w) {
  const int64_t blocks = w.pairs * lunacu_divide_up(w.queries, Tile::tall) * lunacu_divide_up(w.keys, Tile::wide);
  LUNACU_LAUNCH((lunacu_attention_scores_kernel<Tile>), (unsigned)blocks, LUNACU_TILE_THREADS,
                Tile::rooms * sizeof(float), stream, a, w);
}
template <class Tile> static void lunacu_gradient_launch(cudaStream_t stream, const lunacu_attention &a,
                                                         const lunacu_wave &w, const lunacu_gradient &g) {
  const unsigned blocks = (unsigned)(w.pairs * g.splits * g.tiles_down * g.tiles_across);
  LUNACU_LAUNCH((g.keys ? lunacu_attention_gradient_kernel<Tile, true> : lunacu_attention_gradient_kernel<Tile, false>),
                blocks, LUNACU_TILE_THREADS, Tile::rooms * sizeof(float), stream, a, w, g);
  if (g.partial)
    LUNACU_LAUNCH(lunacu_attention_gather_kernel,
                  (unsigned)lunacu_divide_up((g.shared ? a.heads : w.pairs) * g.rows * g.to.width, LUNACU_BLOCK),
                  LUNACU_BLOCK, 0, stream, a, w, g);
}
/* one wave. Gradients of inputs that are one tensor add to the same place: one launch after another */
static void lunacu_attention_wave(cudaStream_t stream, const lunacu_attention &a, const lunacu_wave &maximum,
                                  const lunacu_wave &w, float *partial) {
  if (w.queries <= 16) lunacu_scores_launch<lunacu_tile<16, 256>>(stream, a, w);
  else if (w.keys <= 16) lunacu_scores_launch<lunacu_tile<256, 16>>(stream, a, w);
  else if (a.tensor && w.keys > 32) lunacu_scores_launch<lunacu_tensor_tile<64, 128, true>>(stream, a, w);
  else if (w.keys <= 64) lunacu_scores_launch<lunacu_tile<128, 64>>(stream, a, w);
  else lunacu_scores_launch<lunacu_tile<64, 128>>(stream, a, w);
  for (int which = 0; which < 3; which++) {
    if (!lunacu_gradient_to(a, which).grad) continue;
    lunacu_gradient g = lunacu_gradient_plan(a, maximum, w, which);
    if (g.splits > 1 || g.shared) g.partial = partial;
    g.vector = g.partial ? g.to.width % 4 == 0 : g.to.vector;
    if (g.tall == 32) lunacu_gradient_launch<lunacu_tile<32, 64>>(stream, a, w, g);
    else if (g.tall == 16) lunacu_gradient_launch<lunacu_tile<16, 256>>(stream, a, w, g);
    else if (a.tensor && g.tall == 128) lunacu_gradient_launch<lunacu_tensor_tile<128, 64, false>>(stream, a, w, g);
    else if (a.tensor) lunacu_gradient_launch<lunacu_tensor_tile<64, 128, false>>(stream, a, w, g);
    else if (g.tall == 128) lunacu_gradient_launch<lunacu_tile<128, 64>>(stream, a, w, g);
    else lunacu_gradient_launch<lunacu_tile<64, 128>>(stream, a, w, g);
  }
}
static void lunacu_attention_backward(luna_op *op) {
  const lunacu_attention a = lunacu_attention_of(op);
  const cudaStream_t stream = lunacu_stream(op);
  const int64_t lines = lunacu_rows(op->out[0]) * a.heads, pairs = a.batch * a.heads,
      keys = a.causal ? lunacu_min(a.keys, a.queries) : a.keys;
  char *at = (char *)op->workspace;
  float *delta = lunacu_take(&at, lines), *partial;
  const lunacu_wave maximum = lunacu_wave_of(a, &partial, &at);
  if (lines == 0 || keys == 0) return;
  LUNACU_LAUNCH(lunacu_attention_delta_kernel, (unsigned)lunacu_divide_up(lines, LUNACU_BLOCK / LUNACU_WARP),
                LUNACU_BLOCK, 0, stream, a, lines, delta);
  for (int64_t pair = 0; pair < pairs; pair += maximum.pairs)
    for (int64_t query = 0; query < a.queries; query += maximum.queries)
      for (int64_t key = 0; key < keys; key += maximum.keys) {
        lunacu_wave w = maximum;
        w.pair = pair;
        w.query = (int)query;
        w.key = (int)key;
        w.pairs = lunacu_min(w.pairs, pairs - pair);
        w.queries = (int)lunacu_min(w.queries, a.queries - query);
        w.keys = (int)lunacu_min(w.keys, keys - key);
        w.row = (w.keys + 3) / 4 * 4;
        w.delta = delta;
        if (!a.causal || key < query + w.queries) lunacu_attention_wave(stream, a, maximum, w, partial);
      }
}

/* ---------------------------------------------------------------------------------------------------------------------
   >>unpack: the folded unpack (eq. 4): S = X K'^T + bias, P = softmax over each head's slots, out = drop(P V' +
   out_bias) + residual x and out [batch, rows, dim], k and v [batch, heads, slots, dim], bias [batch, heads, slots];
   all heads' slots lie side by side, so that each product is one matrix product a batch row. Few slots: one kernel, a
   tile of rows at a time, reads x once. Many: in waves of rows, as many as the workspace holds; P of a wave lies in
   memory between its products. Backward: G = dY V'^T, dS = P (G - the sum of P G over the head's slots), dV' += P^T dY,
   dK' += dS^T X, dbias += the sums of dS, dX += dS K'.
   ------------------------------------------------------------------------------------------------------------------ */
struct lunacu_unpack {
  int64_t batch, rows, dim, heads, slots, max_items, max_rows; /* most_: of a wave */
  const float *k, *v, *bias;
  bool vector;                       /* slots may be read by four */
  const int32_t *lengths;            /* [batch] real slots; null: all */
  lunacu_dropout dropout;            /* element ((b heads + head) rows + i) slots + j */
  /* workspace: [items, rows, heads, slots] twice, out's gradient before its dropout, sums, K' and V' with 0 */
  float *p, *g, *dy, *parts, *clean_k, *clean_v;
};
struct lunacu_unpack_wave { int64_t item, items, row, rows; };

/* K' or V' with zeros where no slot is real, whose values are never read */
__global__ void lunacu_unpack_clean_kernel(lunacu_unpack u, const float *__restrict__ from, float *__restrict__ to) {
  const int64_t count = u.batch * u.heads * u.slots * u.dim;
  for (int64_t i = lunacu_index(); i < count; i += lunacu_stride()) {
    const int64_t slot = i / u.dim % u.slots, b = i / (u.dim * u.slots * u.heads);
    to[i] = slot < u.lengths[b] ? from[i] : 0;
  }
}
/* A line is one head of one row. Its `lanes`, a power of two, share it by fours; those of a warp beyond the last line
   have no slot */
struct lunacu_unpack_line {
  int64_t at, element;               /* of P; dropout's */
  const float *bias;
  int lane, slots, real;
  bool vector;
};
LUNACU_INLINE lunacu_unpack_line lunacu_unpack_line_of(const lunacu_unpack &u, const lunacu_unpack_wave &w, int lanes) {
  const int64_t line = lunacu_index() / lanes, b = w.item + line / u.heads / w.rows,
      row = w.row + line / u.heads % w.rows, head = line % u.heads;
  const bool exists = line < w.items * w.rows * u.heads;
  const int slots = exists ? (int)u.slots : 0;
  return {line * u.slots, ((b * u.heads + head) * u.rows + row) * u.slots, u.bias + (b * u.heads + head) * u.slots,
          (int)(threadIdx.x % lanes) * 4, slots, exists && u.lengths ? max(0, min(u.lengths[b], slots)) : slots,
          u.vector};
}
/* four scores and their biases, or four of anything; `beyond` where no slot is real */
LUNACU_INLINE void lunacu_unpack_get(const lunacu_unpack_line &l, const float *from, const float *bias, int j,
                                     float beyond, float (&x)[4]) {
  float4 v = lunacu_get4(from, j, l.slots, l.vector);
  if (bias) v = lunacu_add4(v, lunacu_get4(bias, j, l.slots, l.vector));
  lunacu_apart(x, v);
  LUNACU_UNROLL for (int c = 0; c < 4; c++) x[c] = j + c < l.real ? x[c] : beyond;
}
/* P = softmax(S + bias), dropped; and where G is given dS = P (G, dropped - the sum of P times that), in its place */
template <bool Slopes> __global__ void lunacu_unpack_softmax_kernel(lunacu_unpack u, lunacu_unpack_wave w, int lanes) {
  const lunacu_unpack_line l = lunacu_unpack_line_of(u, w, lanes);
  float *s = u.p + l.at, *g = Slopes ? u.g + l.at : NULL, top = -INFINITY, sum = 0, mean = 0, p[4], slope[4];
  for (int j = l.lane; j < l.real; j += 4 * lanes) {
    lunacu_unpack_get(l, s, l.bias, j, -INFINITY, p);
    top = fmaxf(top, fmaxf(fmaxf(p[0], p[1]), fmaxf(p[2], p[3])));
  }
  top = lunacu_over_lanes<lunacu_maximum>(top, lanes);
  for (int pass = 0; pass < 2; pass++) {
    for (int j = l.lane; j < (pass ? l.slots : l.real); j += 4 * lanes) {
      float factor[4] = {1, 1, 1, 1};
      lunacu_unpack_get(l, s, l.bias, j, 0, p);
      if (Slopes) lunacu_unpack_get(l, g, NULL, j, 0, slope);
      if (u.dropout.threshold && (Slopes || pass)) lunacu_drop4(u.dropout, l.element + j, factor);
      LUNACU_UNROLL for (int c = 0; c < 4; c++) {
        p[c] = j + c < l.real ? expf(p[c] - top) : 0;
        if (pass == 0) sum += p[c];
        if (Slopes) slope[c] *= factor[c];
        if (Slopes && pass == 0) mean += p[c] * slope[c];
        p[c] = j + c < l.real ? p[c] * sum : 0;
        if (Slopes) slope[c] = j + c < l.real ? p[c] * (slope[c] - mean) : 0;
        p[c] *= factor[c];
      }
      if (pass == 0) continue;
      lunacu_set4(s, j, l.slots, l.vector, lunacu_together(p));
      if (Slopes) lunacu_set4(g, j, l.slots, l.vector, lunacu_together(slope));
    }
    if (pass) break;
    sum = 1 / lunacu_over_lanes<lunacu_sum>(sum, lanes);
    mean = lunacu_over_lanes<lunacu_sum>(mean, lanes) * sum;
  }
}

/* --- all of it at once, for as many slots as a tile is wide. Block: tile of rows of a batch row --- */
struct lunacu_unpack_ends {
  const float *x, *out_bias, *residual;
  float *out;
  lunacu_dropout dropout;            /* of the result */
  bool vector;                       /* rows of all may be read by four */
};
/* P of head `head` of row `row` of the tile, from scores s [slot][a_pitch]; element: dropout's */
template <class Tile> LUNACU_INLINE void lunacu_unpack_weights(const lunacu_unpack &u, lunacu_shared<float> s,
                                                               const float *bias, int64_t element, int real) {
  const int slots = (int)u.slots;
  float top = -INFINITY, sum = 0;
  for (int j = 0; j < real; j++) top = fmaxf(top, s[j * Tile::a_pitch] += bias[j]);
  for (int j = 0; j < real; j++) sum += s[j * Tile::a_pitch] = expf(s[j * Tile::a_pitch] - top);
  for (int j = 0; j < slots; j += 4) {
    float factor[4] = {1, 1, 1, 1};
    if (u.dropout.threshold) lunacu_drop4(u.dropout, element + j, factor);
    LUNACU_UNROLL for (int c = 0; c < 4; c++)
      if (j + c < slots)
        s[(j + c) * Tile::a_pitch] = j + c < real ? s[(j + c) * Tile::a_pitch] / sum * factor[c] : 0.0f;
  }
}
/* out = drop(y + out_bias) + residual for four columns, from c on, of the row that begins at `at` */
LUNACU_INLINE void lunacu_unpack_end(const lunacu_unpack_ends &e, int64_t at, int c, int d, float4 y) {
  if (e.out_bias) y = lunacu_add4(y, lunacu_get4(e.out_bias, c, d, e.vector));
  if (e.dropout.threshold) {
    float factor[4];
    lunacu_drop4(e.dropout, at + c, factor);
    y = make_float4(lunacu_dropped(y.x, factor[0]), lunacu_dropped(y.y, factor[1]), lunacu_dropped(y.z, factor[2]),
                    lunacu_dropped(y.w, factor[3]));
  }
  if (e.residual) y = lunacu_add4(y, lunacu_get4(e.residual + at, c, d, e.vector));
  lunacu_set4(e.out + at, c, d, e.vector, y);
}
template <class Tile> __global__ void __launch_bounds__(LUNACU_TILE_THREADS, 3)
lunacu_unpack_kernel(lunacu_unpack u, lunacu_unpack_ends e) {
  LUNACU_DYNAMIC_SHARED(float, p);   /* [wide][a_pitch] */
  const lunacu_shared<float> room = p + Tile::wide * Tile::a_pitch;
  const int64_t tiles = (u.rows + Tile::tall - 1) / Tile::tall, b = blockIdx.x / tiles,
      first = blockIdx.x % tiles * Tile::tall, start = (b * u.rows + first) * u.dim;
  const int n = (int)(u.heads * u.slots), d = (int)u.dim, slots = (int)u.slots,
      rows = (int)min((int64_t)Tile::tall, u.rows - first);
  const int real = u.lengths ? max(0, min(u.lengths[b], slots)) : slots;
  const lunacu_side x = {e.x + start, d, rows, d, INT32_MAX, e.vector},
      k = {u.k + b * n * d, d, n, d, INT32_MAX, e.vector}, v = {u.v + b * n * d, d, n, d, INT32_MAX, e.vector};
  const lunacu_values<Tile> own(Tile::wide_log);
  {
    float s[Tile::rows][Tile::columns] = {};
    lunacu_multiply<Tile, true, true>(s, room, p, x, 0, k, 0, 0, d, false);
    LUNACU_UNROLL for (int j = 0; j < Tile::columns; j++)
      LUNACU_UNROLL for (int i = 0; i < Tile::rows; i += 4)
        lunacu_write4(p + Tile::column(j) * Tile::a_pitch + Tile::row(i),
                      make_float4(s[i][j], s[i + 1][j], s[i + 2][j], s[i + 3][j]));
  }
  __syncthreads();
  for (int line = threadIdx.x; line < Tile::tall * u.heads; line += LUNACU_TILE_THREADS) { /* one head of one row */
    const int row = line % Tile::tall, head = line / Tile::tall;
    lunacu_unpack_weights<Tile>(u, p + head * slots * Tile::a_pitch + row, u.bias + b * n + head * slots,
                                ((b * u.heads + head) * u.rows + first + row) * slots, real);
  }
  __syncthreads();
  for (int from = 0; from < d; from += Tile::wide) {
    float sum[Tile::rows][Tile::columns] = {};
    lunacu_attention_add_values<Tile>(own, v, 0, from, p, room, sum, false);
    LUNACU_UNROLL for (int i = 0; i < Tile::rows; i++)
      LUNACU_UNROLL for (int j = 0; j < Tile::columns; j += 4)
        if (Tile::row(i) < rows && from + own.column(j) < d)
          lunacu_unpack_end(e, start + Tile::row(i) * d, from + own.column(j), d, lunacu_together(sum[i] + j));
  }
}

/* --- in x, k, bias, v, out_bias, residual. Nothing is kept --- */
/* tensor cores pay for a P in memory when it is not small; else the fewer bytes do */
static bool lunacu_unpack_at_once(const luna_op *op, int64_t n) {
  return n > 0 && n <= (lunacu_math_of(op->ctx) == LUNA_CUDA_F32 ? 128 : 32);
}
static lunacu_unpack lunacu_unpack_of(const luna_op *op, bool backward, char **at) {
  const luna_tensor *x = op->in[0], *k = op->in[1];
  lunacu_unpack u = {};
  u.batch = x->shape[0]; u.rows = x->shape[1]; u.dim = x->shape[2]; u.heads = k->shape[1]; u.slots = k->shape[2];
  u.k = k->data; u.bias = op->in[2]->data; u.v = op->in[3]->data;
  u.vector = lunacu_wide(u.slots, u.bias);
  u.lengths = op->lengths;
  u.dropout = lunacu_op_dropout(op);
  const int64_t n = u.heads * u.slots, weights = u.lengths ? u.batch * n * u.dim : 0;
  int64_t rows = LUNACU_WORKSPACE / lunacu_max(n, 1);
  if (backward && op->last_dropout > 0) rows = lunacu_min(rows, LUNACU_WORKSPACE / u.dim);
  rows = lunacu_max(rows / 128 * 128, 128);
  u.max_items = lunacu_max(1, lunacu_min(rows / lunacu_max(u.rows, 1), u.batch));
  u.max_rows = lunacu_min(rows, u.rows);
  rows = u.max_items * u.max_rows;
  u.clean_k = lunacu_take(at, weights);
  u.clean_v = lunacu_take(at, weights);
  u.p = lunacu_take(at, backward || !lunacu_unpack_at_once(op, n) ? rows * n : 0);
  if (!backward) return u;
  u.g = lunacu_take(at, rows * n);
  u.dy = lunacu_take(at, op->last_dropout > 0 ? rows * u.dim + 8 : 0);
  u.parts = lunacu_take(at, lunacu_min(LUNACU_ENOUGH, rows * lunacu_max(n, u.dim) / 16));
  return u;
}
static void lunacu_unpack_query(luna_op *op) {
  char *forward = NULL, *backward = NULL;
  (void)lunacu_unpack_of(op, false, &forward);
  if (op->training) (void)lunacu_unpack_of(op, true, &backward);
  op->workspace_size = (size_t)(uintptr_t)forward;
  op->backward_workspace_size = (size_t)(uintptr_t)backward;
}
/* C = A B (+ C) for the wave's batch rows, which lie side by side in all three */
static luna_status lunacu_unpack_product(const luna_op *op, const lunacu_unpack_wave &w, lunacu_product p) {
  p.batch = w.items;
  p.a_batch = p.m * p.k;
  p.b_batch = p.k * p.n;
  p.c_batch = p.m * p.n;
  return lunacu_gemm(op->ctx, p);
}
/* k and v become what may be read */
static void lunacu_unpack_clean(const luna_op *op, lunacu_unpack *u) {
  const int64_t weights = u->batch * u->heads * u->slots * u->dim;
  if (!u->lengths || weights == 0) return;
  LUNACU_OVER(op, lunacu_unpack_clean_kernel, weights, LUNACU_BLOCK, *u, u->k, u->clean_k);
  LUNACU_OVER(op, lunacu_unpack_clean_kernel, weights, LUNACU_BLOCK, *u, u->v, u->clean_v);
  u->k = u->clean_k;
  u->v = u->clean_v;
}
template <class Body> static luna_status lunacu_unpack_waves(luna_op *op, const lunacu_unpack &u, const Body &step) {
  luna_status status = LUNA_OK;
  for (int64_t item = 0; item < u.batch; item += u.max_items)
    for (int64_t row = 0; row < u.rows && status == LUNA_OK; row += u.max_rows)
      status = step(op, u, {item, lunacu_min(u.max_items, u.batch - item), row, lunacu_min(u.max_rows, u.rows - row)});
  return status;
}
static void lunacu_unpack_each_line(luna_op *op, const lunacu_unpack &u, const lunacu_unpack_wave &w,
                                    void (*kernel)(lunacu_unpack, lunacu_unpack_wave, int)) {
  int lanes = 1;
  while (lanes < LUNACU_WARP && 4 * lanes < u.slots) lanes *= 2;
  if (u.heads > 0)
    LUNACU_LAUNCH(kernel, (unsigned)lunacu_divide_up(w.items * w.rows * u.heads * lanes, LUNACU_BLOCK), LUNACU_BLOCK, 0,
                  lunacu_stream(op), u, w, lanes);
}
/* S = X K'^T, or dY V'^T */
static luna_status lunacu_unpack_scores(const luna_op *op, const lunacu_unpack &u, const lunacu_unpack_wave &w,
                                        const float *x, const float *k, float *s) {
  const int64_t n = u.heads * u.slots, d = u.dim;
  return lunacu_unpack_product(op, w, {{x, d, 1}, {k + w.item * n * d, 1, d}, s, w.rows, n, d, false});
}
static luna_status lunacu_unpack_forward_wave(luna_op *op, const lunacu_unpack &u, const lunacu_unpack_wave &w) {
  const int64_t n = u.heads * u.slots, d = u.dim, first = (w.item * u.rows + w.row) * d;
  const luna_status status = lunacu_unpack_scores(op, u, w, op->in[0]->data + first, u.k, u.p);
  if (status != LUNA_OK) return status;
  lunacu_unpack_each_line(op, u, w, lunacu_unpack_softmax_kernel<false>);
  return lunacu_unpack_product(op, w, {{u.p, n, 1}, {u.v + w.item * n * d, d, 1}, op->out[0]->data + first, w.rows, d,
                                       n, false});
}
template <class Tile> static void lunacu_unpack_launch(const luna_op *op, const lunacu_unpack &u,
                                                       const lunacu_unpack_ends &e) {
  const size_t shared = (size_t)(Tile::wide * Tile::a_pitch + Tile::room) * sizeof(float);
  LUNACU_LAUNCH((lunacu_unpack_kernel<Tile>), (unsigned)(u.batch * lunacu_divide_up(u.rows, Tile::tall)),
                LUNACU_TILE_THREADS, shared, lunacu_stream(op), u, e);
}
static luna_status lunacu_unpack_forward(luna_op *op) {
  char *at = (char *)op->workspace;
  lunacu_unpack u = lunacu_unpack_of(op, false, &at);
  const int64_t n = u.heads * u.slots;
  const float *x = op->in[0]->data, *out_bias = lunacu_data(op, 4), *residual = lunacu_data(op, 5);
  float *y = op->out[0]->data;
  if (luna_count(op->in[0]) == 0) return LUNA_OK;
  lunacu_unpack_clean(op, &u);
  if (lunacu_unpack_at_once(op, n)) {
    const lunacu_unpack_ends e = {x, out_bias, residual, y, lunacu_last_dropout(op),
                                  lunacu_wide(u.dim, x, u.k, u.v, y, out_bias, residual)};
    if (n <= 32) lunacu_unpack_launch<lunacu_tile<128, 32>>(op, u, e);
    else if (n <= 64) lunacu_unpack_launch<lunacu_tile<128, 64>>(op, u, e);
    else lunacu_unpack_launch<lunacu_tile<64, 128>>(op, u, e);
    return LUNA_OK;
  }
  const luna_status status = lunacu_unpack_waves(op, u, lunacu_unpack_forward_wave);
  if (status != LUNA_OK || !(out_bias || residual || op->last_dropout > 0)) return status;
  lunacu_end(op, luna_count(op->out[0]), y, {y, out_bias, residual, NULL, u.dim, 0, LUNA_ACTIVATION_DEFAULT, false,
                                             lunacu_last_dropout(op)});
  return LUNA_OK;
}
/* x's gradient may be made in place of y's: it is written last */
static luna_status lunacu_unpack_backward_wave(luna_op *op, const lunacu_unpack &u, const lunacu_unpack_wave &w) {
  const int64_t n = u.heads * u.slots, d = u.dim, first = (w.item * u.rows + w.row) * d, early = first % 8,
      at = w.item * n;
  const float *x = op->in[0]->data + first, *dy = op->out[0]->grad + first;
  float *dx = lunacu_grad(op, 0), *dk = lunacu_grad(op, 1), *dbias = lunacu_grad(op, 2), *dv = lunacu_grad(op, 3);
  if (op->last_dropout > 0) {        /* from a multiple of 8 on */
    lunacu_begin_back(op, w.items * w.rows * d + early, u.dy,
                      {dy - early, NULL, first - early, LUNA_ACTIVATION_DEFAULT, lunacu_last_dropout(op)});
    dy = u.dy + early;
  }
  luna_status status = lunacu_unpack_scores(op, u, w, x, u.k, u.p);
  if (status == LUNA_OK) status = lunacu_unpack_scores(op, u, w, dy, u.v, u.g);
  if (status != LUNA_OK) return status;
  lunacu_unpack_each_line(op, u, w, lunacu_unpack_softmax_kernel<true>);
  lunacu_column_sums(op, dy, 1, w.items * w.rows, d, lunacu_grad(op, 4), u.parts);
  lunacu_column_sums(op, u.g, w.items, w.rows, n, dbias ? dbias + at : NULL, u.parts);
  if (dv) status = lunacu_unpack_product(op, w, {{u.p, 1, n}, {dy, d, 1}, dv + at * d, n, d, w.rows, true});
  if (dk && status == LUNA_OK)
    status = lunacu_unpack_product(op, w, {{u.g, 1, n}, {x, d, 1}, dk + at * d, n, d, w.rows, true});
  if (dx && status == LUNA_OK)
    status = lunacu_unpack_product(op, w, {{u.g, n, 1}, {u.k + at * d, d, 1}, dx + first, w.rows, d, n,
                                           !lunacu_sets(op, 0)});
  return status;
}
static luna_status lunacu_unpack_backward(luna_op *op) {
  char *at = (char *)op->workspace;
  lunacu_unpack u = lunacu_unpack_of(op, true, &at);
  lunacu_residual_backward(op, 5);
  if (luna_count(op->in[0]) == 0) return LUNA_OK;
  lunacu_unpack_clean(op, &u);
  return lunacu_unpack_waves(op, u, lunacu_unpack_backward_wave);
}

/* ---------------------------------------------------------------------------------------------------------------------
   >>causal: the causal product and causal Luna, forward and backward
   One product does all of it, F_t = sum_{j<=t} (x_t y_j) z_j, in chunks of LUNACU_CHUNK rows:
     F = X S + ((X Y^T) o L) Z,   S <- S + Y^T Z,   L the lower triangle with the diagonal
   Causal product  out = F(x, y, z) / t;  with G = dout / t:  dx = F(G, z, y),
                   and over the rows in reverse  dy = F(z, G, x),  dz = F(y, x, G)
   Causal Luna     U = F(q, k, A) scale / t,  W = softmax U,  out = F(W, A, v) / t;  dW = F(G, v, A),  dq = F(H, A, k),
                   and in reverse
                   dk = F(A, H, q),  dv = F(A, W, G),  dA = F(k, q, H) + F(v, G, W);  A = omega(s), H = dU scale / t
   A sweep takes a window of chunks at a time: the sums Y^T Z of its chunks, in their place the sums of all chunks
   before (added in double, which is also what goes from window to window), then the rows. Windows bound the memory of
   the sums and keep them in the cache between the three. Exactly causal: above the diagonal nothing is multiplied, so a
   NaN at one token reaches no earlier one. Masked slots are never read.
   ------------------------------------------------------------------------------------------------------------------ */
#define LUNACU_CHUNK 64
#define LUNACU_CAUSAL_DEEP 32        /* rows or columns of a factor that are in shared memory at a time */
/* of a tile 64 wide in shared memory; the others, too, are 4 wider than they hold, against bank conflicts */
#define LUNACU_CAUSAL_PITCH (LUNACU_CHUNK + 4)
#define LUNACU_CAUSAL_SCAN 16        /* chunks that a thread scans, */
#ifndef LUNACU_CAUSAL_WINDOW         /* max chunks of a window; tests have fewer */
#define LUNACU_CAUSAL_WINDOW (32 * LUNACU_CAUSAL_SCAN)
#endif
#define LUNACU_CAUSAL_FLOATS ((int64_t)8 << 20) /* and floats that a window is cut to */

/* Flags have 64 bits, so that no argument of a kernel has holes or looks like a pointer. Rows of heads: row r of batch
   b's head h begins at at[b batch + h head + r row]. `divided`: by the place t of the row in its sequence */
struct lunacu_causal_rows {
  float *at;
  int64_t batch, head, row;
  int64_t vector, divided;           /* vector: may be read by four */
};
/* A window of chunks of all heads. In reverse, row 0 is the last, and t falls */
struct lunacu_causal_span {
  int64_t items, heads, rows, chunks, t, step;
  const int32_t *lengths;            /* [batch] real slots, or null */
  float *states;                     /* [items, stride, size]: a chunk's sums, then the sums before it */
  double *carried;                   /* [items, size] from window to window */
  int64_t size, stride;
  int64_t begins, ends;              /* nothing is before the first chunk; nothing comes after the last */
  int64_t lead;                      /* rows that the first chunk lacks: in reverse it may be the short one */
  int64_t slots;                     /* > 0: sums fade by the last 2 slots floats of a state, pairs that are added */
  int64_t bf16;                      /* of products on tensor cores */
  int64_t horizon;                   /* 0: no row is beyond it */
  double fade;                       /* 1 - 1 / horizon */
};
/* One chunk of one head. blockIdx.x counts its tiles, which share rows, before the next chunk; `first` counts rows in
   the window, which 32 bits can count */
struct lunacu_causal_chunk {
  unsigned state, batch, head, tile;
  int first, rows;
  bool begins, last;
};

LUNACU_INLINE lunacu_causal_chunk lunacu_causal_chunk_of(const lunacu_causal_span &s, unsigned tiles) {
  const unsigned chunks = (unsigned)s.chunks, heads = (unsigned)s.heads, item = blockIdx.x / tiles / chunks,
      chunk = blockIdx.x / tiles % chunks;
  const int end = ((int)chunk + 1) * LUNACU_CHUNK - (int)s.lead, first = max(0, end - LUNACU_CHUNK);
  return {item * (unsigned)s.stride + chunk, item / heads, item % heads, blockIdx.x % tiles, first,
          (int)(s.rows < end ? s.rows : end) - first, s.begins && chunk == 0, s.ends && chunk == chunks - 1};
}
/* With a horizon T a mean counts T rows at most: each row t > T leaves 1 - 1/T of what is before it. Of a chunk whose
   first row is `first`: how many such rows it has, up to its row i in the sweep's order; and what those leave. */
LUNACU_INLINE int64_t lunacu_causal_within(const lunacu_causal_span &s, int64_t row) {
  const int64_t t = s.t + s.step * row;
  return s.horizon && t > s.horizon ? s.horizon : t;
}
LUNACU_INLINE int lunacu_causal_beyond(const lunacu_causal_span &s, int first, int i) {
  const int64_t passed = lunacu_causal_within(s, first + i) - lunacu_causal_within(s, first - 1) - s.step * (i + 1);
  return (int)(passed < 0 ? -passed : passed);
}
LUNACU_INLINE double lunacu_causal_left(const lunacu_causal_span &s, int rows) {
  double left = 1, power = s.fade;
  for (; rows > 0; rows /= 2, power *= power) if (rows % 2) left *= power;
  return left;
}
LUNACU_INLINE int lunacu_causal_slots(const lunacu_causal_span &s, unsigned batch, int slots) {
  return s.lengths ? max(0, min(s.lengths[batch], slots)) : slots;
}

/* A thread's fours of a tile Tall x Wide: how many; and, where shared memory gets the transpose, which: a warp then has
   16 rows by 8 columns, against bank conflicts */
#define LUNACU_CAUSAL_TURNS(Tall, Wide) ((Tall) * (Wide) / 4 / LUNACU_TILE_THREADS)
template <int Wide> LUNACU_INLINE lunacu_fours lunacu_causal_turned() {
  constexpr unsigned warps = Wide / 8;
  return {(int)(threadIdx.x / 2 % 16 + threadIdx.x / 32 / warps * 16),
          (int)(4 * (threadIdx.x % 2) + 8 * (threadIdx.x / 32 % warps)), LUNACU_TILE_THREADS / 32 / (int)warps * 16};
}
/* a chunk's rows from `first` on and columns from `column` to `end` */
template <int Wide, int Turns>
LUNACU_INLINE void lunacu_causal_fetch(float4 (&x)[Turns], const lunacu_causal_chunk &c, const lunacu_causal_rows &m,
                                       int first, int column, int end) {
  const lunacu_side s = {m.at + c.batch * m.batch + c.head * m.head + (c.first + first) * m.row + column, m.row,
                         c.rows - first, end - column, INT32_MAX, m.vector != 0};
  lunacu_fetch<false>(x, s, 0, 0, lunacu_fours_of(Wide / 4));
}
/* over: 1/t of the chunk's rows from `first` on */
template <int Wide, lunacu_order Order, int Turns>
LUNACU_INLINE void lunacu_causal_store(lunacu_shared<float> to, int pitch, float4 (&x)[Turns],
                                       const lunacu_causal_rows &m, lunacu_shared<const float> over) {
  const lunacu_fours own = lunacu_fours_of(Wide / 4);
  LUNACU_UNROLL
  for (int t = 0; t < Turns; t++) x[t] = lunacu_scale4(x[t], m.divided ? over[own.row + t * own.step] : 1.0f);
  lunacu_store<Order>(to, pitch, own, x);
}
LUNACU_INLINE void lunacu_causal_over(lunacu_shared<float> over, const lunacu_causal_span &s,
                                      const lunacu_causal_chunk &c) {
  const int i = threadIdx.x;
  if (i < LUNACU_CHUNK) over[i] = i < c.rows ? 1 / (float)lunacu_causal_within(s, c.first + i) : 0;
}

/* A thread's part of a tile of 64 x 16 Count: rows lunacu_causal_row() + 8 i, so that what is above the diagonal is the
   same for all, and Count columns, by four where there are so many; of the scores 64 x 64, columns 16 apart on and
   below the diagonal */
LUNACU_INLINE int lunacu_causal_row() { return (int)(threadIdx.x / 16); }
template <int Count> struct lunacu_causal_tile {
  static constexpr bool tensor = false;
  static constexpr int n = Count, wide = 16 * Count, rows = 8, scores = 4, columns = Count;
  static constexpr lunacu_order lines = LUNACU_PLAIN, steps = LUNACU_PLAIN, turned = LUNACU_TURNED;
  static LUNACU_INLINE int row(int i) { return lunacu_causal_row() + 8 * i; }
  static LUNACU_INLINE int sum_row(int i) { return 8 * lunacu_causal_row() + i; } /* of a state */
  static LUNACU_INLINE int column(int j) {
    return (int)(threadIdx.x % 16) * (Count < 4 ? Count : 4) + j / 4 * 64 + j % 4;
  }
  static LUNACU_INLINE int key(int k) { return (int)(threadIdx.x % 16) + 16 * k; }
  static LUNACU_INLINE bool has(int i, int k) { return k <= i / 2; }
};
/* by tensor cores: as lunacu_tensor_tile */
template <int Count> struct lunacu_causal_tensor_tile {
  static constexpr bool tensor = true;
  static constexpr int n = Count, wide = 16 * Count, rows = 2, scores = 16, columns = 4 * Count;
  static constexpr lunacu_order lines = LUNACU_LINES, steps = LUNACU_STEPS, turned = LUNACU_TURNED_STEPS;
  static LUNACU_INLINE int row(int i) { return (int)(threadIdx.x / 4) * 2 + i; }
  static LUNACU_INLINE int sum_row(int i) { return row(i); }
  static LUNACU_INLINE int column(int j) { return j / 4 * 16 + (int)(threadIdx.x % 4) * 4 + j % 4; }
  static LUNACU_INLINE int key(int k) { return column(k); }
  static LUNACU_INLINE bool has(int, int) { return true; }
};
/* score [8][4] += X Y^T on and below the diagonal and, where there is a state, sum += X S, over `depth` columns of x
   and y [64, Pitch], zeros up to a multiple of 4, and rows of s [., PitchS] */
template <int Count, int Pitch, int PitchS, bool State>
LUNACU_INLINE void lunacu_causal_multiply(float (&score)[8][4], float (&sum)[8][Count], lunacu_shared<const float> x,
                                          lunacu_shared<const float> y, lunacu_shared<const float> s, int depth) {
  const int row = lunacu_causal_row(), column = (int)(threadIdx.x % 16);
  for (int k = 0; k < depth; k += 4) {
    float yk[4][4], sk[4][Count];
    LUNACU_UNROLL for (int c = 0; c < 4; c++)
      LUNACU_UNROLL for (int e = 0; e < 4; e++) yk[c][e] = y[(column + 16 * c) * Pitch + k + e];
    LUNACU_UNROLL for (int e = 0; e < 4 && State; e++)
      LUNACU_UNROLL for (int n = 0; n < Count; n++)
        sk[e][n] = s[(k + e) * PitchS + lunacu_causal_tile<Count>::column(n)];
    LUNACU_UNROLL for (int i = 0; i < 8; i++) {
      float xk[4];
      LUNACU_UNROLL for (int e = 0; e < 4; e++) xk[e] = x[(row + 8 * i) * Pitch + k + e];
      LUNACU_UNROLL for (int e = 0; e < 4; e++) {
        LUNACU_UNROLL for (int c = 0; c <= i / 2; c++) score[i][c] += xk[e] * yk[c][e];
        LUNACU_UNROLL for (int n = 0; n < Count && State; n++) sum[i][n] += xk[e] * sk[e][n];
      }
    }
  }
}
/* sum += (scores o L) Z over the chunk's rows First to First + Deep: z [Deep, PitchZ] */
template <int Count, int PitchZ, int First, int Deep>
LUNACU_INLINE void lunacu_causal_apply(float (&sum)[8][Count], lunacu_shared<const float> scores,
                                       lunacu_shared<const float> z) {
  const int row = lunacu_causal_row();
  LUNACU_UNROLL for (int b = First / 8; b < (First + Deep) / 8; b++)
    for (int j = 0; j < 8; j += 4) {
      float zj[4][Count];
      LUNACU_UNROLL for (int e = 0; e < 4; e++) {
        LUNACU_UNROLL
        for (int n = 0; n < Count; n++)
          zj[e][n] = z[(8 * b - First + j + e) * PitchZ + lunacu_causal_tile<Count>::column(n)];
      }
      LUNACU_UNROLL for (int i = b; i < 8; i++) {
        float x[4];
        LUNACU_UNROLL for (int e = 0; e < 4; e++) x[e] = scores[(row + 8 * i) * LUNACU_CAUSAL_PITCH + 8 * b + j + e];
        LUNACU_UNROLL for (int e = 0; e < 4; e++) {
          if (i == b && j + e > row) continue; /* above the diagonal */
          LUNACU_UNROLL for (int n = 0; n < Count; n++) sum[i][n] += x[e] * zj[e][n];
        }
      }
    }
}
/* a thread's columns of a row: to (+)= factor sum, and 0 from `width` to `end` where nothing is added to */
template <class Tile, int Count>
LUNACU_INLINE void lunacu_causal_write(float *to, const float (&sum)[Count], float factor, int width, int end, bool add,
                                       bool vector) {
  LUNACU_UNROLL for (int n = 0; n < Count; n += 4) {
    const int at = Tile::column(n);
    if (Count >= 4 && vector && at + 3 < width) {
      const float4 old = add ? *(const float4 *)(to + at) : make_float4(0, 0, 0, 0);
      lunacu_store4(to + at, lunacu_add4(old, lunacu_scale4(lunacu_together(sum + (Count >= 4 ? n : 0)), factor)));
      continue;
    }
    LUNACU_UNROLL for (int e = 0; e < 4 && n + e < Count; e++) {
      if (at + e < width) to[at + e] = (add ? to[at + e] : 0) + factor * sum[n + e];
      else if (at + e < end && !add) to[at + e] = 0;
    }
  }
}

/* A state is one or two sums Y^T Z [dim, value_dim] of a chunk's rows. Block: chunk, tile of 64 x 16 Count, pair */
struct lunacu_causal_pairs {
  lunacu_causal_rows y[2], z[2];
  int64_t dim, value_dim, pairs, masked; /* masked: z's columns are slots */
};
template <class Tile> __global__ void __launch_bounds__(LUNACU_TILE_THREADS, 4)
lunacu_causal_sum_kernel(lunacu_causal_span s, lunacu_causal_pairs p) {
  constexpr int wide = Tile::wide, pitch = wide + 4;
  LUNACU_SHARED(float, ys, 32 * LUNACU_CAUSAL_PITCH);
  LUNACU_SHARED(float, zs, 32 * pitch);
  LUNACU_SHARED(float, over, LUNACU_CHUNK);
  LUNACU_SHARED(float, joins, LUNACU_CHUNK); /* a factor for each row of z */
  const int dim = (int)p.dim, value_dim = (int)p.value_dim, down = (dim + 63) / 64,
      across = (value_dim + wide - 1) / wide;
  const lunacu_causal_chunk c = lunacu_causal_chunk_of(s, (unsigned)(p.pairs * down * across));
  const int row = (int)(c.tile / across) % down * 64, column = (int)(c.tile % across) * wide,
      pair = (int)(c.tile / across) / down;
  const int end = p.masked ? lunacu_causal_slots(s, c.batch, value_dim) : value_dim;
  lunacu_causal_rows of_z = p.z[pair];
  float sum[Tile::rows][Tile::columns] = {};
  if (c.last || column >= end) return; /* never read */
  lunacu_causal_over(over, s, c);
  if (s.horizon) {
    const int i = threadIdx.x, all = lunacu_causal_beyond(s, c.first, c.rows - 1);
    if (i < LUNACU_CHUNK)
      joins[i] = (of_z.divided ? over[i] : 1) *
                 (float)lunacu_causal_left(s, all - lunacu_causal_beyond(s, c.first, min(i, c.rows - 1)));
    of_z.divided = true;
  }
  const lunacu_shared<float> over_z = s.horizon ? joins : over;
  for (int i = 0; i < LUNACU_CHUNK; i += 32) {
    float4 y[LUNACU_CAUSAL_TURNS(32, 64)], z[LUNACU_CAUSAL_TURNS(32, wide)];
    lunacu_causal_fetch<64>(y, c, p.y[pair], i, row, dim);
    lunacu_causal_fetch<wide>(z, c, of_z, i, column, end);
    __syncthreads();
    lunacu_causal_store<64, Tile::steps>(ys, LUNACU_CAUSAL_PITCH, y, p.y[pair], over + i);
    lunacu_causal_store<wide, Tile::steps>(zs, pitch, z, of_z, over_z + i);
    __syncthreads();
    if constexpr (Tile::tensor) {
      LUNACU_UNROLL for (int k = 0; k < 32; k += 16)
        lunacu_tensor_steps<false, false, LUNACU_CAUSAL_PITCH, pitch>(sum, ys + k * LUNACU_CAUSAL_PITCH,
                                                                      zs + k * pitch, s.bf16 != 0);
    } else
      for (int k = 0; k < 32; k += 4)  /* a thread's rows of the sum are neighbours */
        LUNACU_UNROLL for (int e = 0; e < 4; e++)
          lunacu_outer(sum, ys + (k + e) * LUNACU_CAUSAL_PITCH + Tile::sum_row(0), 4,
                       zs + (k + e) * pitch + Tile::column(0), 64);
  }
  float *to = s.states + c.state * s.size + pair * p.dim * p.value_dim + column;
  LUNACU_UNROLL for (int i = 0; i < Tile::rows; i++) {
    const int at = row + Tile::sum_row(i);
    if (at < dim)
      lunacu_causal_write<Tile>(to + at * p.value_dim, sum[i], 1, end - column, end - column, false,
                                value_dim % 4 == 0);
  }
}

/* What a chunk leaves of the sums before it, f, which is 1 but for: BEYOND, what rows beyond a horizon leave; and f of
   each slot, where SLOTS leave f before + x, FORGET f (before + x), and REVERSE, which takes f before in place of
   before, f before + x */
enum lunacu_fades {
  LUNACU_FADES_NOT, LUNACU_FADES_BEYOND, LUNACU_FADES_SLOTS, LUNACU_FADES_FORGET, LUNACU_FADES_REVERSE
};
/* The sum of all chunks before it takes the place of a chunk's own. Block: 32 elements of a head's state, a warp for
   every LUNACU_CAUSAL_SCAN chunks */
template <int Fades> __global__ void __launch_bounds__(1024) lunacu_causal_scan_kernel(lunacu_causal_span s) {
  constexpr int most = LUNACU_CAUSAL_WINDOW / LUNACU_CAUSAL_SCAN * 32;
  LUNACU_SHARED(double, sums, most);
  LUNACU_SHARED(double, leaves, (Fades ? most : 1));
  const int64_t scanned = s.size - 2 * s.slots;
  const unsigned blocks = (unsigned)((scanned + 31) / 32), item = blockIdx.x / blocks, lane = threadIdx.x % 32,
      run = threadIdx.x / 32;
  const int64_t element = (int64_t)(blockIdx.x % blocks) * 32 + lane, place = item * s.size + element;
  const int chunks = element < scanned ? (int)s.chunks - (int)run * LUNACU_CAUSAL_SCAN : 0,
      summed = s.ends ? chunks - 1 : chunks;
  float *const start = s.states + (item * s.stride + run * LUNACU_CAUSAL_SCAN) * s.size, *state = start + element,
               x[LUNACU_CAUSAL_SCAN];
  const float *from = state;
  const auto left = [&](int k) -> double {
    if (Fades == LUNACU_FADES_NOT || k >= chunks) return 1;
    if (Fades == LUNACU_FADES_BEYOND) {
      const int first = ((int)run * LUNACU_CAUSAL_SCAN + k) * LUNACU_CHUNK;
      return lunacu_causal_left(s, lunacu_causal_beyond(s, first, (int)min((int64_t)LUNACU_CHUNK, s.rows - first) - 1));
    }
    const float *of = start + k * s.size + scanned + element % s.slots;
    return (double)of[0] + (double)of[s.slots];
  };
  const auto next = [&](double sum, float own, double f) {
    return Fades == LUNACU_FADES_FORGET ? f * (sum + (double)own) : f * sum + (double)own;
  };
  double before = 0, sum = 0, all = 1;
  LUNACU_UNROLL for (int k = 0; k < LUNACU_CAUSAL_SCAN; k++, from += s.size) x[k] = k < summed ? *from : 0;
  LUNACU_UNROLL for (int k = 0; k < LUNACU_CAUSAL_SCAN; k++) {
    const double f = left(k);
    sum = Fades ? next(sum, x[k], f) : sum + (double)x[k];
    all *= f;
  }
  sums[threadIdx.x] = sum;
  if (Fades) leaves[threadIdx.x] = all;
  if (chunks > 0 && !s.begins) before = s.carried[place];
  __syncthreads();
  for (unsigned k = 0; k < run; k++) {
    if (Fades) before *= leaves[k * 32 + lane];
    before += sums[k * 32 + lane];
  }
  LUNACU_UNROLL for (int k = 0; k < LUNACU_CAUSAL_SCAN; k++, state += s.size) {
    const double f = left(k);
    if (k < chunks) *state = (float)(Fades == LUNACU_FADES_REVERSE ? f * before : before);
    before = Fades ? next(before, x[k], f) : before + (double)x[k];
  }
  if (0 < chunks && chunks <= LUNACU_CAUSAL_SCAN && !s.ends) s.carried[place] = before;
}

/* out (+)= factor (/ t) F(x, y, z), x and y [rows, depth], z and out [rows, width]. Block: chunk, tile of 16 Count
   columns */
struct lunacu_causal_product {
  lunacu_causal_rows x, y, z, out;
  double factor;
  int64_t add;                       /* to what is there */
  int64_t depth = 0, width = 0, masked = 0; /* masked: 1, depth is slots, 2, width is */
  int64_t state = 0, turned = 0;     /* place of S [depth, width] in a state; turned: of S^T */
};
/* On tensor cores an unseen row's weight is 0, so that what is not finite of it must be kept out: it becomes 0 in x,
   and true is the result for some thread */
template <int Turns> LUNACU_INLINE bool lunacu_causal_clean(float4 (&x)[Turns]) {
  bool any = false;
  LUNACU_UNROLL for (int t = 0; t < Turns; t++) {
    const float4 v = x[t];
    x[t] = lunacu_finite4(v);
    any = any || x[t].x != v.x || x[t].y != v.y || x[t].z != v.z || x[t].w != v.w;
  }
  return any;
}
/* and is added where it is seen: rows First to First + LUNACU_CAUSAL_DEEP of z */
template <class Tile, int First>
LUNACU_INLINE void lunacu_causal_add_unclean(float (&sum)[Tile::rows][Tile::columns], lunacu_shared<const float> scores,
                                             lunacu_shared<const float> over, const lunacu_causal_chunk &c,
                                             const lunacu_causal_rows &z, int width) {
  for (int k = First; k < min(c.rows, First + LUNACU_CAUSAL_DEEP); k++) {
    const float *from = z.at + c.batch * z.batch + c.head * z.head + (c.first + k) * z.row;
    LUNACU_UNROLL for (int n = 0; n < Tile::columns; n++) {
      const float x = Tile::column(n) < width ? from[Tile::column(n)] : 0;
      if (fabsf(x) < INFINITY) continue;
      LUNACU_UNROLL for (int i = 0; i < Tile::rows; i++)
        if (Tile::row(i) >= k)
          sum[i][n] += scores[lunacu_line_place(Tile::row(i)) * LUNACU_CAUSAL_PITCH + k] * x *
                       (z.divided ? over[k] : 1.0f);
    }
  }
}
/* sum += (scores o L) Z, from the chunk's row First on; the scores take their place in shared memory with the first
   rows of Z */
template <class Tile, int First>
LUNACU_INLINE void lunacu_causal_apply_from(float (&sum)[Tile::rows][Tile::columns],
                                            const float (&score)[Tile::rows][Tile::scores], lunacu_shared<float> scores,
                                            lunacu_shared<float> zs, lunacu_shared<const float> over,
                                            const lunacu_causal_chunk &c, lunacu_causal_rows z, int width, bool bf16) {
  constexpr int wide = Tile::wide, pitch = wide + 4;
  if constexpr (First < LUNACU_CHUNK) {
    float4 v[LUNACU_CAUSAL_TURNS(LUNACU_CAUSAL_DEEP, wide)];
    bool unclean = false;
    if (First >= c.rows) return;
    lunacu_causal_fetch<wide>(v, c, z, First, 0, width);
    if (Tile::tensor) unclean = lunacu_causal_clean(v);
    __syncthreads();
    LUNACU_UNROLL for (int i = 0; i < Tile::rows && First == 0; i++) {
      LUNACU_UNROLL for (int k = 0; k < Tile::scores; k++)
        if (Tile::tensor)
          scores[lunacu_line_place(Tile::row(i)) * LUNACU_CAUSAL_PITCH + Tile::key(k)] =
              Tile::key(k) <= Tile::row(i) ? score[i][k] : 0.0f;
        else if (Tile::has(i, k)) scores[Tile::row(i) * LUNACU_CAUSAL_PITCH + Tile::key(k)] = score[i][k];
    }
    lunacu_causal_store<wide, Tile::steps>(zs, pitch, v, z, over + First);
    if constexpr (Tile::tensor) {
      unclean = __syncthreads_or(unclean);
      LUNACU_UNROLL for (int k = 0; k < LUNACU_CAUSAL_DEEP; k += 16)
        if (First + k <= (int)(threadIdx.x / LUNACU_WARP) * 16) /* the warp's rows see some of these */
          lunacu_tensor_steps<true, false, LUNACU_CAUSAL_PITCH, pitch>(sum, scores + First + k, zs + k * pitch, bf16);
      if (unclean) lunacu_causal_add_unclean<Tile, First>(sum, scores, over, c, z, width);
    } else {
      __syncthreads();
      lunacu_causal_apply<Tile::n, pitch, First, LUNACU_CAUSAL_DEEP>(sum, scores, zs);
    }
    lunacu_causal_apply_from<Tile, First + LUNACU_CAUSAL_DEEP>(sum, score, scores, zs, over, c, z, width, bf16);
  }
}
/* what rows beyond a horizon leave of the sums before the chunk, and of the rows before them */
template <class Tile>
LUNACU_INLINE void lunacu_causal_fade(float (&score)[Tile::rows][Tile::scores],
                                      float (&sum)[Tile::rows][Tile::columns], lunacu_shared<float> left,
                                      const lunacu_causal_span &s, const lunacu_causal_chunk &c) {
  if (threadIdx.x <= LUNACU_CHUNK) left[threadIdx.x] = (float)lunacu_causal_left(s, (int)threadIdx.x);
  __syncthreads();
  LUNACU_UNROLL for (int i = 0; i < Tile::rows; i++) {
    const int row = Tile::row(i), beyond = lunacu_causal_beyond(s, c.first, row);
    LUNACU_UNROLL for (int n = 0; n < Tile::columns; n++) sum[i][n] *= left[beyond];
    LUNACU_UNROLL for (int k = 0; k < Tile::scores; k++) {
      const int column = Tile::key(k);
      if (Tile::has(i, k) && column < row) score[i][k] *= left[beyond - lunacu_causal_beyond(s, c.first, column)];
    }
  }
}
template <class Tile> __global__ void __launch_bounds__(LUNACU_TILE_THREADS, Tile::tensor ? 3 : 4)
lunacu_causal_product_kernel(lunacu_causal_span s, lunacu_causal_product p) {
  constexpr int wide = Tile::wide, deep = LUNACU_CAUSAL_DEEP, pitch = deep + 4, z_pitch = wide + 4;
  LUNACU_SHARED(float, xs, 2 * LUNACU_CHUNK * pitch); /* x and y, then the scores */
  LUNACU_SHARED(float, zs, deep * z_pitch);           /* the state, then z */
  LUNACU_SHARED(float, over, LUNACU_CHUNK);
  LUNACU_SHARED(float, left, LUNACU_CHUNK + 1);
  const lunacu_shared<float> ys = xs + LUNACU_CHUNK * pitch;
  const lunacu_causal_chunk c = lunacu_causal_chunk_of(s, (unsigned)((p.width + wide - 1) / wide));
  const int column = (int)c.tile * wide, all_deep = (int)p.depth, all_wide = (int)p.width;
  const int depth = p.masked == 1 ? lunacu_causal_slots(s, c.batch, all_deep) : all_deep;
  const int width = p.masked == 2 ? lunacu_causal_slots(s, c.batch, all_wide) : all_wide;
  float sum[Tile::rows][Tile::columns] = {}, score[Tile::rows][Tile::scores] = {};
  lunacu_causal_over(over, s, c);
  for (int k = 0; k < depth; k += deep) {
    float4 x[LUNACU_CAUSAL_TURNS(LUNACU_CHUNK, deep)], y[LUNACU_CAUSAL_TURNS(LUNACU_CHUNK, deep)],
        z[LUNACU_CAUSAL_TURNS(deep, wide)];
    lunacu_causal_fetch<deep>(x, c, p.x, 0, k, depth);
    lunacu_causal_fetch<deep>(y, c, p.y, 0, k, depth);
    if (!c.begins) {
      const float *m = s.states + c.state * s.size + p.state;
      const lunacu_side side = p.turned ?
          lunacu_side{m + column * all_deep + k, all_deep, width - column, depth - k, INT32_MAX, all_deep % 4 == 0} :
          lunacu_side{m + k * all_wide + column, all_wide, depth - k, width - column, INT32_MAX, all_wide % 4 == 0};
      lunacu_fetch<false>(z, side, 0, 0, p.turned ? lunacu_causal_turned<deep>() : lunacu_fours_of(wide / 4));
    }
    __syncthreads();
    lunacu_causal_store<deep, Tile::lines>(xs, pitch, x, p.x, over);
    lunacu_causal_store<deep, LUNACU_PLAIN>(ys, pitch, y, p.y, over);
    if (!c.begins && p.turned) lunacu_store<Tile::turned>(zs, z_pitch, lunacu_causal_turned<deep>(), z);
    else if (!c.begins) lunacu_store<Tile::steps>(zs, z_pitch, lunacu_fours_of(wide / 4), z);
    __syncthreads();
    if constexpr (Tile::tensor)
      for (int e = 0; e < min(depth - k, deep); e += 16) {
        lunacu_tensor_steps<true, true, pitch, pitch>(score, xs + e, ys + e, s.bf16 != 0);
        if (!c.begins) lunacu_tensor_steps<true, false, pitch, z_pitch>(sum, xs + e, zs + e * z_pitch, s.bf16 != 0);
      }
    else if (c.begins)
      lunacu_causal_multiply<Tile::n, pitch, z_pitch, false>(score, sum, xs, ys, zs, min(depth - k, deep));
    else lunacu_causal_multiply<Tile::n, pitch, z_pitch, true>(score, sum, xs, ys, zs, min(depth - k, deep));
  }
  if (s.horizon) lunacu_causal_fade<Tile>(score, sum, left, s, c);
  lunacu_causal_rows z = p.z;
  z.at += column;
  lunacu_causal_apply_from<Tile, 0>(sum, score, xs, zs, over, c, z, width - column, s.bf16 != 0);
  float *to = p.out.at + c.batch * p.out.batch + c.head * p.out.head + c.first * p.out.row + column;
  LUNACU_UNROLL for (int i = 0; i < Tile::rows; i++) {
    const int row = Tile::row(i);
    const float factor = p.out.divided ? (float)p.factor * over[row] : (float)p.factor;
    if (row < c.rows)
      lunacu_causal_write<Tile>(to + row * p.out.row, sum[i], factor, width - column, all_wide - column, p.add,
                                p.out.vector);
  }
}

/* --- what is done with rows of slots: 16 lanes a row, 16 rows a block --- */
#define LUNACU_SLOT_LANES 16
struct lunacu_causal_line {          /* a lane's row, and the slots that count: 0 beyond the last row */
  unsigned batch, head;
  int64_t row, t;                    /* t: rows that its mean counts */
  int slots, lane;
  bool real;
};
LUNACU_INLINE lunacu_causal_line lunacu_causal_line_of(const lunacu_causal_span &s, int slots) {
  const unsigned lines = LUNACU_BLOCK / LUNACU_SLOT_LANES, blocks = (unsigned)((s.rows + lines - 1) / lines),
      heads = (unsigned)s.heads;
  const unsigned item = blockIdx.x / blocks, batch = item / heads;
  const int64_t row = (int64_t)(blockIdx.x % blocks) * lines + threadIdx.x / LUNACU_SLOT_LANES;
  const bool real = row < s.rows;
  return {batch, item % heads, row, lunacu_causal_within(s, row), real ? lunacu_causal_slots(s, batch, slots) : 0,
          (int)threadIdx.x % LUNACU_SLOT_LANES, real};
}
LUNACU_INLINE float *lunacu_causal_line_in(const lunacu_causal_rows &m, const lunacu_causal_line &l) {
  return m.at + l.batch * m.batch + l.head * m.head + l.row * m.row;
}
/* softmax of n numbers in place, by the lanes of a team */
LUNACU_INLINE void lunacu_causal_softmax(float *at, int n, int lane, int team, lunacu_shared<float> scratch) {
  float maximum = -INFINITY, sum = 0;
  for (int j = lane; j < n; j += team) maximum = fmaxf(maximum, at[j]);
  maximum = lunacu_over_team<lunacu_maximum>(team, maximum, scratch);
  if (maximum == -INFINITY) maximum = 0;
  for (int j = lane; j < n; j += team) sum += expf(at[j] - maximum);
  sum = lunacu_over_team<lunacu_sum>(team, sum, scratch);
  sum = sum > 0 ? 1 / sum : sum;     /* zeros stay, a NaN spreads */
  for (int j = lane; j < n; j += team) at[j] = expf(at[j] - maximum) * sum;
}

/* A = omega(s) */
__global__ void lunacu_causal_omega_kernel(lunacu_causal_span span, lunacu_causal_rows s, lunacu_causal_rows a,
                                           int slots, int activation) {
  const lunacu_causal_line l = lunacu_causal_line_of(span, slots);
  const float *from = lunacu_causal_line_in(s, l);
  float *to = lunacu_causal_line_in(a, l);
  for (int j = l.lane; j < l.slots; j += LUNACU_SLOT_LANES) to[j] = lunacu_activation(activation, from[j]);
}
/* U = softmax(U) */
__global__ void lunacu_causal_softmax_kernel(lunacu_causal_span span, lunacu_causal_rows u, int slots) {
  const lunacu_causal_line l = lunacu_causal_line_of(span, slots);
  lunacu_causal_softmax(lunacu_causal_line_in(u, l), l.slots, l.lane, LUNACU_SLOT_LANES, nullptr);
}
/* dW becomes H = scale / t W (dW - W dW) */
__global__ void lunacu_causal_softmax_backward_kernel(lunacu_causal_span span, lunacu_causal_rows w,
                                                      lunacu_causal_rows dw, int slots, float scale) {
  const lunacu_causal_line l = lunacu_causal_line_of(span, slots);
  const float *from = lunacu_causal_line_in(w, l), factor = scale / (float)l.t;
  float *to = lunacu_causal_line_in(dw, l), mean = 0;
  for (int j = l.lane; j < l.slots; j += LUNACU_SLOT_LANES) mean += from[j] * to[j];
  mean = lunacu_over_lanes<lunacu_sum>(mean, LUNACU_SLOT_LANES);
  for (int j = l.lane; j < l.slots; j += LUNACU_SLOT_LANES) to[j] = factor * from[j] * (to[j] - mean);
}
/* ds (+)= dA omega'(s) */
__global__ void lunacu_causal_slope_kernel(lunacu_causal_span span, lunacu_causal_rows da, lunacu_causal_rows s,
                                           lunacu_causal_rows ds, int slots,
                                           int activation, bool add) {
  const lunacu_causal_line l = lunacu_causal_line_of(span, slots);
  const float *from = lunacu_causal_line_in(da, l), *x = lunacu_causal_line_in(s, l);
  float *to = lunacu_causal_line_in(ds, l);
  for (int j = l.lane; j < l.slots; j += LUNACU_SLOT_LANES)
    to[j] = (add ? to[j] : 0) + from[j] * lunacu_slope(activation, x[j]);
  for (int j = l.slots + l.lane; l.real && !add && j < slots; j += LUNACU_SLOT_LANES) to[j] = 0;
}

/* --- a sweep over the windows, up or down --- */
struct lunacu_causal_sweep {
  cudaStream_t stream;
  lunacu_causal_span span;           /* of the window it is at */
  int64_t rows, chunks, window, first; /* of a sequence; chunks of a window; chunk that it begins with, */
  int64_t start;                     /* and row */
  bool reverse, same;                /* same: chunks in reverse are the forward ones, whose last may be short */
  bool tensor;                       /* products by tensor cores */
};
/* [batch, rows, heads, width], and [batch, heads, rows, width] */
static lunacu_causal_rows lunacu_causal_strided(float *at, int64_t batch, int64_t head, int64_t row, int64_t width) {
  return {at, batch, head, row, width % 4 == 0 && (uintptr_t)at % 16 == 0, false};
}
static lunacu_causal_rows lunacu_causal_tensor(float *at, int64_t rows, int64_t heads, int64_t width) {
  return lunacu_causal_strided(at, rows * heads * width, width, heads * width, width);
}
static lunacu_causal_rows lunacu_causal_own(float *at, int64_t rows, int64_t heads, int64_t width) {
  return lunacu_causal_strided(at, heads * rows * width, rows * width, width, width);
}
static lunacu_causal_rows lunacu_causal_divided(lunacu_causal_rows m) {
  m.divided = true;
  return m;
}
/* those rows of a whole sequence that are in the window, in its order */
static lunacu_causal_rows lunacu_causal_windowed(const lunacu_causal_sweep &s, lunacu_causal_rows m) {
  m.at += (s.reverse ? s.rows - 1 - s.start : s.start) * m.row;
  if (s.reverse) m.row = -m.row;
  return m;
}

/* Sequences x [batch, rows, .] of `heads` heads, `size` floats a state of at least `narrow` each way, and `slots`
   floats that a row keeps of a window. The window is as long as memory that stays in the cache allows, but not so short
   that the device idles. */
static lunacu_causal_sweep lunacu_causal_sweep_of(const luna_tensor *x, int64_t heads, int64_t size, int64_t narrow,
                                                  int64_t slots, const int32_t *lengths) {
  lunacu_causal_sweep s = {};
  const int64_t items = x->shape[0] * heads, fits = LUNACU_CAUSAL_FLOATS / (size + LUNACU_CHUNK * slots),
      busy = lunacu_divide_up(256, lunacu_divide_up(narrow, 64));
  s.stream = lunacu_self(x->ctx) ? lunacu_stream_of(x->ctx) : NULL; /* sizes are asked of contexts without a device */
  s.rows = x->shape[1];
  s.chunks = lunacu_divide_up(s.rows, LUNACU_CHUNK);
  s.window = items ? lunacu_max(fits, busy) / items : 0;
  s.window = lunacu_max(1, lunacu_min(s.window, LUNACU_CAUSAL_WINDOW));
  if (s.chunks > 0) s.window = lunacu_divide_up(s.chunks, lunacu_divide_up(s.chunks, s.window));
  s.span.items = items;
  s.span.heads = heads;
  s.span.lengths = lengths;
  s.span.size = size;
  s.tensor = lunacu_math_of(x->ctx) != LUNA_CUDA_F32;
  s.span.bf16 = lunacu_math_of(x->ctx) == LUNA_CUDA_BF16;
  return s;
}
static void lunacu_causal_limit(lunacu_causal_sweep *s, int64_t horizon) {
  if (horizon <= 0 || horizon >= s->rows) return;
  s->span.horizon = horizon;
  s->span.fade = 1 - 1 / (double)horizon;
}
/* the states' place in the workspace */
static void lunacu_causal_take(lunacu_causal_sweep *s, char **at) {
  s->span.stride = s->window;
  if (s->chunks > 1) s->span.states = lunacu_take(at, s->span.items * s->window * s->span.size);
  if (s->chunks > s->window) s->span.carried = (double *)lunacu_take(at, 2 * s->span.items * s->span.size);
}
/* goes to the window that begins with chunk `first`; false: there is none */
static bool lunacu_causal_go(lunacu_causal_sweep *s, int64_t first, bool reverse) {
  lunacu_causal_span *span = &s->span;
  if (first >= s->chunks || span->items == 0) return false;
  const int64_t lead = s->same && reverse ? s->chunks * LUNACU_CHUNK - s->rows : 0;
  span->chunks = lunacu_min(s->chunks - first, s->window);
  s->first = first;
  s->start = lunacu_max(0, first * LUNACU_CHUNK - lead);
  span->rows = lunacu_min(s->rows, (first + span->chunks) * LUNACU_CHUNK - lead) - s->start;
  span->begins = first == 0;
  span->ends = first + span->chunks == s->chunks;
  span->lead = first == 0 ? lead : 0;
  span->t = reverse ? s->rows - s->start : s->start + 1;
  span->step = reverse ? -1 : 1;
  s->reverse = reverse;
  return true;
}

/* a launch of what a tile of so many columns wants: launch(tile) */
template <class Body> static void lunacu_causal_tiled(const lunacu_causal_sweep &s, int64_t columns,
                                                      const Body &launch) {
  if (columns <= 16) s.tensor ? launch(lunacu_causal_tensor_tile<1>()) : launch(lunacu_causal_tile<1>());
  else if (columns <= 32) s.tensor ? launch(lunacu_causal_tensor_tile<2>()) : launch(lunacu_causal_tile<2>());
  else s.tensor ? launch(lunacu_causal_tensor_tile<4>()) : launch(lunacu_causal_tile<4>());
}
template <int Fades> static void lunacu_causal_scan(const lunacu_causal_sweep &s, const lunacu_causal_span &span) {
  const int64_t runs = lunacu_divide_up(span.chunks, LUNACU_CAUSAL_SCAN),
      blocks = span.items * lunacu_divide_up(span.size - 2 * span.slots, 32);
  LUNACU_LAUNCH((lunacu_causal_scan_kernel<Fades>), (unsigned)blocks, (unsigned)(32 * runs), 0, s.stream, span);
}
/* the states before the window's chunks, of one pair of factors or of two */
static void lunacu_causal_states(const lunacu_causal_sweep &s, const lunacu_causal_pairs &p) {
  if (s.chunks == 1) return;
  lunacu_causal_tiled(s, p.value_dim, [&](auto tile) {
    typedef decltype(tile) Tile;
    const int64_t tiles = p.pairs * lunacu_divide_up(p.dim, 64) * lunacu_divide_up(p.value_dim, Tile::wide);
    LUNACU_LAUNCH(lunacu_causal_sum_kernel<Tile>, (unsigned)(s.span.items * s.span.chunks * tiles),
                  LUNACU_TILE_THREADS, 0, s.stream, s.span, p);
  });
  if (s.span.slots && s.reverse) lunacu_causal_scan<LUNACU_FADES_REVERSE>(s, s.span);
  else if (s.span.slots) lunacu_causal_scan<LUNACU_FADES_FORGET>(s, s.span);
  else if (s.span.horizon) lunacu_causal_scan<LUNACU_FADES_BEYOND>(s, s.span);
  else lunacu_causal_scan<LUNACU_FADES_NOT>(s, s.span);
}
static void lunacu_causal_run(const lunacu_causal_sweep &s, const lunacu_causal_product &p) {
  lunacu_causal_tiled(s, p.width, [&](auto tile) {
    typedef decltype(tile) Tile;
    const int64_t blocks = s.span.items * s.span.chunks * lunacu_divide_up(p.width, Tile::wide);
    LUNACU_LAUNCH(lunacu_causal_product_kernel<Tile>, (unsigned)blocks, LUNACU_TILE_THREADS, 0, s.stream, s.span, p);
  });
}
/* --- causal product: in x, y, z; arg: heads. The state is y^T z, or its transpose where that is taller
   than wide --- */
static lunacu_causal_sweep lunacu_causal_product_sweep(const luna_op *op, char **at) {
  const luna_tensor *x = op->in[0];
  const int64_t heads = op->arg.causal.heads, dim = lunacu_last(x) / heads, value_dim = lunacu_last(op->in[2]) / heads;
  lunacu_causal_sweep s = lunacu_causal_sweep_of(x, heads, dim * value_dim, lunacu_min(dim, value_dim), 0, NULL);
  lunacu_causal_limit(&s, op->arg.causal.horizon);
  lunacu_causal_take(&s, at);
  return s;
}
static void lunacu_causal_product_query(luna_op *op) {
  char *at = NULL;
  (void)lunacu_causal_product_sweep(op, &at);
  op->workspace_size = op->backward_workspace_size = (size_t)(uintptr_t)at;
}
static void lunacu_causal_product_run(luna_op *op, bool backward) {
  char *at = (char *)op->workspace;
  lunacu_causal_sweep s = lunacu_causal_product_sweep(op, &at);
  const int64_t heads = op->arg.causal.heads;
  const int dim = (int)(lunacu_last(op->in[0]) / heads), value_dim = (int)(lunacu_last(op->in[2]) / heads);
  const bool turned = dim < value_dim;
  const auto deep = [&](float *data) { return lunacu_causal_tensor(data, s.rows, heads, dim); };
  const auto wide = [&](float *data) { return lunacu_causal_tensor(data, s.rows, heads, value_dim); };
  const lunacu_causal_rows x = deep(op->in[0]->data), y = deep(op->in[1]->data), z = wide(op->in[2]->data),
      out = lunacu_causal_divided(wide(op->out[0]->data));
  const lunacu_causal_rows dx = deep(op->in[0]->grad), dy = deep(op->in[1]->grad), dz = wide(op->in[2]->grad);
  const lunacu_causal_rows g = lunacu_causal_divided(wide(op->out[0]->grad));
  typedef const lunacu_causal_rows &rows;
  const auto windowed = [&](rows m) { return lunacu_causal_windowed(s, m); };
  const auto states = [&](rows a, rows b) { /* a^T b [dim, value_dim] */
    if (turned) lunacu_causal_states(s, {{windowed(b), {}}, {windowed(a), {}}, value_dim, dim, 1, false});
    else lunacu_causal_states(s, {{windowed(a), {}}, {windowed(b), {}}, dim, value_dim, 1, false});
  };
  /* to (+)= F(a, b, c); transposed: b^T c is the states' transpose */
  const auto product = [&](rows a, rows b, rows c, rows to, bool transposed, bool add) {
    lunacu_causal_run(s, {windowed(a), windowed(b), windowed(c), windowed(to), 1, add, transposed ? value_dim : dim,
                          transposed ? dim : value_dim, 0, 0, turned != transposed});
  };
  for (int64_t first = 0; (!backward || dx.at) && lunacu_causal_go(&s, first, false); first += s.window) {
    states(y, z);
    if (backward) product(g, z, y, dx, true, !lunacu_sets(op, 0));
    else product(x, y, z, out, false, false);
  }
  for (int64_t first = 0; backward && (dy.at || dz.at) && lunacu_causal_go(&s, first, true); first += s.window) {
    states(x, g);
    if (dy.at) product(z, g, x, dy, true, !lunacu_sets(op, 1));
    if (dz.at) product(y, x, g, dz, false, !lunacu_sets(op, 2));
  }
}

/* --- causal Luna: in q, k, v, s; arg: heads, scale; activation omega. kept: W [batch, heads, rows, slots]. The
   state is k^T A and v^T A, in reverse q^T H and G^T W, each [dim, slots] --- */
struct lunacu_causal_luna {
  const luna_op *op;
  lunacu_causal_sweep sweep;
  int64_t heads;
  int dim, slots;
  lunacu_causal_rows a, w, h;        /* a: of the window; w: of the window where it is not kept */
  /* the window's rows of `at`, which has t's shape, if it is there; of an input, its gradient, the result, its own */
  lunacu_causal_rows of(const luna_tensor *t, float *at) const {
    if (!at) return {};
    return lunacu_causal_windowed(sweep, lunacu_causal_tensor(at, sweep.rows, heads, lunacu_last(t) / heads));
  }
  lunacu_causal_rows in(int i) const { return of(op->in[i], op->in[i]->data); }
  lunacu_causal_rows grad(int i) const { return of(op->in[i], op->in[i]->grad); }
  lunacu_causal_rows out() const { return of(op->out[0], op->out[0]->data); }
  lunacu_causal_rows out_grad() const { return of(op->out[0], op->out[0]->grad); }
};
static bool lunacu_routed(const luna_op *op) { return op->inputs > 4 && op->in[4]->rank == 1; }
/* the fades [heads] of a routed memory, or null */
static const float *lunacu_fades(const luna_op *op) { return lunacu_routed(op) ? op->in[4]->data : NULL; }
/* a launch for the window's rows of slots */
#define LUNACU_SLOT_ROWS(c, kernel, ...) \
  LUNACU_LAUNCH(kernel, (unsigned)((c).sweep.span.items * lunacu_divide_up((c).sweep.span.rows, LUNACU_BLOCK / \
                LUNACU_SLOT_LANES)), LUNACU_BLOCK, 0, (c).sweep.stream, (c).sweep.span, __VA_ARGS__)
static void lunacu_causal_luna_sizes(const luna_op *op, lunacu_causal_luna *c, int64_t more, int64_t kept) {
  const luna_tensor *q = op->in[0];
  const int64_t heads = op->arg.causal.heads, dim = lunacu_last(q) / heads, slots = lunacu_last(op->in[3]) / heads;
  c->op = op;
  c->heads = heads;
  c->dim = (int)dim;
  c->slots = (int)slots;
  c->sweep = lunacu_causal_sweep_of(q, heads, (2 * dim + more) * slots, lunacu_min(dim, slots), kept * slots,
                                    op->lengths);
}
static size_t lunacu_causal_luna_start(const luna_op *op, lunacu_causal_luna *c, bool backward, void *workspace) {
  const luna_tensor *q = op->in[0];
  const int64_t batch = q->shape[0], rows = q->shape[1], heads = op->arg.causal.heads;
  char *at = (char *)workspace;
  lunacu_causal_luna_sizes(op, c, 0, 1);
  lunacu_causal_limit(&c->sweep, op->arg.causal.horizon);
  lunacu_causal_take(&c->sweep, &at);
  const int64_t window = c->sweep.window * LUNACU_CHUNK, floats = batch * heads * c->slots;
  c->a = lunacu_causal_own(lunacu_take(&at, floats * window), window, heads, c->slots);
  if (op->training) c->w = lunacu_causal_own((float *)op->kept, rows, heads, c->slots);
  else c->w = lunacu_causal_own(lunacu_take(&at, floats * window), window, heads, c->slots);
  if (backward) c->h = lunacu_causal_own(lunacu_take(&at, floats * rows), rows, heads, c->slots);
  return (size_t)((uintptr_t)at - (uintptr_t)workspace);
}
/* of a memory that forgets: how fast the slots of a head fade where it is routed, else -1; the log of a gate out of its
   logit, or out of what a token writes; and a token's weight, out of a score within its bounds. A NaN stays one */
LUNACU_INLINE float lunacu_route_fade(const float *fade, int64_t head) {
  return fade ? lunacu_activation(LUNA_ACTIVATION_SIGMOID, fade[head]) / 4 : -1;
}
LUNACU_INLINE float lunacu_forget_gate(float x, float fade) {
  const float log = fade < 0 ? (fminf(x, 0) - log1pf(expf(-fabsf(x)))) * (1.0f / 16) : log1pf(-x);
  return (log < -1 ? -1 : log) - (fade < 0 ? 0 : fade);
}
LUNACU_INLINE float lunacu_forget_score(float s) {
  return s < -LUNA_FORGET_SCORE ? -LUNA_FORGET_SCORE : s > LUNA_FORGET_SCORE ? LUNA_FORGET_SCORE : s;
}
LUNACU_INLINE float lunacu_forget_weight(float s, float fade) { return fade < 0 ? expf(lunacu_forget_score(s)) : s; }
/* What the routed memory adds to a slot's score, the log c + ln Z of its weight. An empty slot gets -1e30, and a Z so
   large that what is divided by it is 0. */
LUNACU_INLINE float lunacu_route_log(float *z, float c) {
  const float log = logf(*z > 1e37f ? 0 : *z * (float)(1 / LUNA_FORGET_SCALE)) + c;
  if (!(log < LUNA_ROUTE_EMPTY + 32)) return log;
  *z = 1e38f;
  return -1e30f;
}
/* Of a stream: row after row, with the means of all rows before in double, as the CPU has them. Block: a head of a
   sequence */
struct lunacu_causal_stream {
  const float *q, *k, *v, *s, *gates, *fade; /* gates: of a memory that forgets, or null; routed: s, with a fade */
  float *out;
  double *room;                      /* [batch, heads, 2 slots] for A, or a row's share in the means, and W of a row */
  double *ka, *av, *weights;
  const int32_t *lengths;
  int64_t batch, rows, heads, dim, slots, activation;
  const int64_t *position;
  double scale;
  int64_t horizon;                   /* or 0 */
};
/* element (i, j) of mean [depth, width] becomes next(i, j, itself), from 0 where it is the first, and then put(j,
   (x mean)_j): a thread has a column of each tile, and of its rows every so many; what threads have of a column is
   added in their order */
template <class Next, class Put>
LUNACU_INLINE void lunacu_causal_mean(double *mean, int64_t row, int depth, int width, bool first, const float *x,
                                      lunacu_shared<double> sums, const Next &next, const Put &put) {
  int columns = 1;
  while (columns < width && columns < LUNACU_BLOCK) columns *= 2;
  const int column = (int)threadIdx.x % columns, group = (int)threadIdx.x / columns, groups = LUNACU_BLOCK / columns;
  for (int j = column; j - column < width; j += columns) {
    double sum = 0;
    for (int i = group; i < depth && j < width; i += groups) {
      double *at = mean + i * row + j;
      const double now = next(i, j, first ? 0 : *at);
      *at = now;
      sum += (double)x[i] * now;
    }
    sums[threadIdx.x] = sum;
    __syncthreads();
    for (int g = 1; group == 0 && g < groups; g++) sum += sums[g * columns + column];
    if (group == 0 && j < width) put(j, sum);
    __syncthreads();
  }
}
/* Whether a row of k, v, s and gates is finite; else it has no result, and is not remembered: luna.h's
   li_luna_skips. All threads of the block ask. */
LUNACU_INLINE bool lunacu_causal_remembers(const lunacu_causal_stream &a, int64_t row, int slots) {
  const int dim = (int)a.dim;
  bool finite = true;
  for (int j = threadIdx.x; j < dim; j += LUNACU_BLOCK)
    finite = finite && isfinite(a.k[row * dim + j]) && isfinite(a.v[row * dim + j]);
  for (int j = threadIdx.x; j < slots; j += LUNACU_BLOCK)
    finite = finite && isfinite(a.s[row * a.slots + j]) && (!a.gates || isfinite(a.gates[row * a.slots + j]));
  if (__syncthreads_and(finite)) return true;
  for (int j = threadIdx.x; j < dim; j += LUNACU_BLOCK) a.out[row * dim + j] = NAN;
  return false;
}
template <bool Forgets> __global__ void __launch_bounds__(LUNACU_BLOCK)
lunacu_causal_stream_kernel(lunacu_causal_stream a) {
  LUNACU_SHARED(double, sums, LUNACU_BLOCK);
  LUNACU_SHARED(float, scratch, LUNACU_WARP);
  const int64_t item = blockIdx.x, b = item / a.heads, position = *a.position;
  const int slots = a.lengths ? (int)max((int64_t)0, min((int64_t)a.lengths[b], a.slots)) : (int)a.slots,
      dim = (int)a.dim;
  double *room = a.room + item * 2 * a.slots;
  float *w = (float *)(room + a.slots);
  double *ka = a.ka + item * a.dim * a.slots, *av = a.av + item * a.dim * a.slots;
  const float fade = lunacu_route_fade(a.fade, item % a.heads);
  for (int64_t t = 0; t < a.rows; t++) {
    const int64_t row = (b * a.rows + t) * a.heads + item % a.heads;
    const int64_t now = position + t + 1;
    const double share = 1 / (double)(a.horizon > 0 ? min(now, a.horizon) : now);
    const bool first = position + t == 0;
    if (!lunacu_causal_remembers(a, row, slots)) continue;
    const float *k = a.k + row * dim, *v = a.v + row * dim;
    float *out = a.out + row * dim;
    for (int j = threadIdx.x; j < slots; j += LUNACU_BLOCK) {
      const float score = a.s[row * a.slots + j];
      if constexpr (Forgets) {
        double *weight = a.weights + item * a.slots + j;
        const double own = (double)lunacu_forget_weight(score, fade) * LUNA_FORGET_SCALE;
        const double gate = exp((double)lunacu_forget_gate(a.gates[row * a.slots + j], fade));
        const double total = (first ? 0 : *weight * gate) + own;
        room[j] = total == 0 ? 0 : own / total;
        *weight = total;
      } else room[j] = (double)lunacu_activation((int)a.activation, score);
    }
    __syncthreads();
    lunacu_causal_mean(ka, a.slots, dim, slots, first, a.q + row * dim, sums,
                       [&](int i, int j, double mean) {
                         return mean + (Forgets ? ((double)k[i] - mean) * room[j] :
                                        ((double)k[i] * room[j] - mean) * share);
                       },
                       [&](int j, double u) {
                         float z = a.fade ? (float)a.weights[item * a.slots + j] : 0;
                         w[j] = (float)(u * a.scale) + (a.fade ? lunacu_route_log(&z, 0) : 0);
                       });
    lunacu_causal_softmax(w, slots, threadIdx.x, LUNACU_BLOCK, scratch);
    __syncthreads();
    lunacu_causal_mean(av, a.dim, slots, dim, first, w, sums,
                       [&](int i, int j, double mean) {
                         return mean + (Forgets ? ((double)v[j] - mean) * room[i] :
                                        (room[i] * (double)v[j] - mean) * share);
                       },
                       [&](int j, double y) { out[j] = (float)y; });
  }
}
static void lunacu_causal_luna_stream(luna_op *op) {
  const luna_tensor *q = op->in[0];
  const int64_t heads = op->arg.causal.heads;
  const float *fade = lunacu_fades(op);
  const int64_t mean = q->shape[0] * lunacu_last(q) * lunacu_last(op->in[3]) / heads; /* numbers of ka, and of av */
  const lunacu_causal_stream a = {q->data, op->in[1]->data, op->in[2]->data, op->in[3]->data,
                                  op->inputs > 4 ? op->in[fade ? 3 : 4]->data : NULL, fade, op->out[0]->data,
                                  (double *)op->workspace,
                                  op->state, op->state + mean, op->state + 2 * mean, op->lengths, q->shape[0],
                                  q->shape[1], heads, lunacu_last(q) / heads, lunacu_last(op->in[3]) / heads,
                                  (int64_t)op->activation, op->position, (double)op->arg.causal.scale,
                                  op->arg.causal.horizon};
  if (a.batch * a.heads > 0 && a.rows > 0)
    LUNACU_LAUNCH(a.gates ? lunacu_causal_stream_kernel<true> : lunacu_causal_stream_kernel<false>,
                  (unsigned)(a.batch * a.heads), LUNACU_BLOCK, 0, lunacu_stream(op), a);
}
/* the states y^T a and z^T b */
static void lunacu_causal_luna_states(const lunacu_causal_luna &c, const lunacu_causal_rows &y,
                                      const lunacu_causal_rows &z, const lunacu_causal_rows &a,
                                      const lunacu_causal_rows &b) {
  lunacu_causal_states(c.sweep, {{y, z}, {a, b}, c.dim, c.slots, 2, true});
}
/* p with rows of slots for x, y and of a head for z, or, `to_slots`, the other way round; `part` of the state. Nothing
   where there is no p.out */
static void lunacu_causal_luna_run(const lunacu_causal_luna &c, lunacu_causal_product p, int part, bool to_slots) {
  if (!p.out.at) return;
  p.depth = to_slots ? c.dim : c.slots;
  p.width = to_slots ? c.slots : c.dim;
  p.masked = to_slots ? 2 : 1;
  p.state = (int64_t)part * c.dim * c.slots;
  p.turned = !to_slots;
  lunacu_causal_run(c.sweep, p);
}
static void lunacu_causal_luna_forward(luna_op *op) {
  lunacu_causal_luna c;
  if (op->state) return lunacu_causal_luna_stream(op);
  lunacu_causal_luna_start(op, &c, false, op->workspace);
  for (int64_t first = 0; lunacu_causal_go(&c.sweep, first, false); first += c.sweep.window) {
    const lunacu_causal_rows k = c.in(1), v = c.in(2), w = op->training ? lunacu_causal_windowed(c.sweep, c.w) : c.w;
    LUNACU_SLOT_ROWS(c, lunacu_causal_omega_kernel, c.in(3), c.a, c.slots, (int)op->activation);
    lunacu_causal_luna_states(c, k, v, c.a, c.a);
    lunacu_causal_luna_run(c, {c.in(0), k, c.a, lunacu_causal_divided(w), op->arg.causal.scale, false}, 0, true);
    LUNACU_SLOT_ROWS(c, lunacu_causal_softmax_kernel, w, c.slots);
    lunacu_causal_luna_run(c, {w, c.a, v, lunacu_causal_divided(c.out()), 1, false}, 1, false);
  }
}
static void lunacu_causal_luna_backward(luna_op *op) {
  const bool scores = op->in[3]->grad, falls = op->in[1]->grad || op->in[2]->grad || scores;
  lunacu_causal_luna c;
  lunacu_causal_luna_start(op, &c, true, op->workspace);
  for (int down = 0; down <= falls; down++)
    for (int64_t first = 0; lunacu_causal_go(&c.sweep, first, down); first += c.sweep.window) {
      const lunacu_causal_rows q = c.in(0), k = c.in(1), v = c.in(2), g = lunacu_causal_divided(c.out_grad()),
          w = lunacu_causal_windowed(c.sweep, c.w), h = lunacu_causal_windowed(c.sweep, c.h);
      LUNACU_SLOT_ROWS(c, lunacu_causal_omega_kernel, c.in(3), c.a, c.slots, (int)op->activation);
      if (!down) {
        lunacu_causal_luna_states(c, k, v, c.a, c.a);
        lunacu_causal_luna_run(c, {g, v, c.a, h, 1, false}, 1, true);
        LUNACU_SLOT_ROWS(c, lunacu_causal_softmax_backward_kernel, w, h, c.slots, op->arg.causal.scale);
        lunacu_causal_luna_run(c, {h, c.a, k, c.grad(0), 1, !lunacu_sets(op, 0)}, 0, false);
        continue;
      }
      lunacu_causal_luna_states(c, q, g, h, w);
      lunacu_causal_luna_run(c, {c.a, h, q, c.grad(1), 1, !lunacu_sets(op, 1)}, 0, false);
      lunacu_causal_luna_run(c, {c.a, w, g, c.grad(2), 1, !lunacu_sets(op, 2)}, 1, false);
      if (!scores) continue;
      lunacu_causal_luna_run(c, {k, q, h, c.a, 1, false}, 0, true); /* A is done with: dA */
      lunacu_causal_luna_run(c, {v, g, w, c.a, 1, true}, 1, true);
      LUNACU_SLOT_ROWS(c, lunacu_causal_slope_kernel, c.a, c.in(3), c.grad(3), c.slots, (int)op->activation,
                       !lunacu_sets(op, 3));
    }
}

/* --- The memory that forgets: in q, k, v, s, gates, as luna.h's chapter causal has it. kept: U and Z, each
   [batch, heads, rows, slots]. In a chunk c is the sum of the gates' logs and W = e^(s - c); with the sums of W^T k,
   W^T v and W before the chunk, which all fade by e^c at its end, Z = z + sum W,
     U = F(q, k, W) scale / Z,  R = softmax U / Z,  out = F(R, W, v);
     dR = F(g, v, W),  H = dU scale / Z,  dZ = -(R dR + U dU) / Z,  dq = F(H, W, k),
   and in reverse, in the same chunks,
     dk = F(W, H, q),  dv = F(W, R, g),  dW = F(k, q, H) + F(v, g, R) + sum dZ.
   The gradient of a gate's log is minus the sum of W dW from its row on. What that is after a chunk is also minus the
   product of the sums and their gradients, which is more exact where a slot of the chunk fades by half. A state is
   [2 dim + 3, slots]: of k, of v, of W, and e^c as the sum of two.
   Routed: W = s e^-c, gates are ln(1 - s) less the head's fade, softmax takes U + c + ln Z, dZ = -(R dR + (U - 1) dU)
   / Z, and W dW - dU takes the place of W dW in the gradient of a gate's log. --- */
struct lunacu_forgetting {
  lunacu_causal_luna luna;           /* a: W of the window; w: R, before it c, of the window in forward; h: H */
  lunacu_causal_rows u, z, dz, dw;   /* dw: of the window */
  float *sums, *totals;              /* backward: the states before all chunks; of the window's, sums of W dW */
  float *fades;                      /* routed: parts of the gradient of fade, [batch, chunks, slots, heads] */
  double *carried;                   /* of totals */
};
/* A thread's slot, and 8 rows of a chunk: rows 8 lane + i, in the sweep's order */
#define LUNACU_FORGET_LANES (LUNACU_BLOCK / 32)
struct lunacu_forget_place {
  lunacu_causal_chunk chunk;
  int column, lane;
  bool real;                         /* the slot is there, and not masked */
};
LUNACU_INLINE lunacu_forget_place lunacu_forget_place_of(const lunacu_causal_span &s, int slots) {
  const lunacu_causal_chunk chunk = lunacu_causal_chunk_of(s, (unsigned)((slots + 31) / 32));
  const int column = (int)chunk.tile * 32 + (int)threadIdx.x % 32;
  return {chunk, column, (int)threadIdx.x / 32, column < lunacu_causal_slots(s, chunk.batch, slots)};
}
LUNACU_INLINE float *lunacu_forget_at(const lunacu_causal_rows &m, const lunacu_forget_place &p, int row) {
  return m.at + p.chunk.batch * m.batch + p.chunk.head * m.head + (p.chunk.first + row) * m.row + p.column;
}
/* what the lanes before have of a slot, and what all have */
LUNACU_INLINE double lunacu_forget_before(double x, lunacu_shared<double> sums, double *all) {
  double before = 0;
  sums[threadIdx.x] = x;
  __syncthreads();
  *all = 0;
  for (int k = 0; k < LUNACU_FORGET_LANES; k++) {
    if (k == (int)threadIdx.x / 32) before = *all;
    *all += sums[k * 32 + (int)threadIdx.x % 32];
  }
  __syncthreads();
  return before;
}
/* W, and what the state has of W and of e^c. z: gets the sums of W up to each row; in reverse it is dZ, and the state
   gets its sum. The order is that of time. c: where it goes, if anywhere. */
__global__ void __launch_bounds__(LUNACU_BLOCK)
lunacu_forget_weights_kernel(lunacu_causal_span span, lunacu_causal_rows s, lunacu_causal_rows gates,
                             lunacu_causal_rows w, lunacu_causal_rows z, lunacu_causal_rows logs, const float *fades,
                             int slots) {
  LUNACU_SHARED(double, shared, LUNACU_BLOCK);
  const lunacu_forget_place p = lunacu_forget_place_of(span, slots);
  const float faded = lunacu_route_fade(fades, p.chunk.head);
  const bool reverse = span.step < 0;
  const int rows = p.real ? p.chunk.rows : 0;
  const auto place = [&](int i) { return reverse ? rows - 1 - (8 * p.lane + i) : 8 * p.lane + i; };
  double sum = 0, so_far[8], all;
  LUNACU_UNROLL for (int i = 0; i < 8; i++) {
    if (8 * p.lane + i < rows) sum += (double)lunacu_forget_gate(*lunacu_forget_at(gates, p, place(i)), faded);
    so_far[i] = sum;
  }
  const double before = lunacu_forget_before(sum, shared, &all), fade = exp(all);
  sum = 0;
  LUNACU_UNROLL for (int i = 0; i < 8; i++) {
    const double c = before + so_far[i];
    const float high = (float)c, rest = (float)(c - (double)high);
    if (8 * p.lane + i < rows) {
      const float weight = lunacu_forget_weight(*lunacu_forget_at(s, p, place(i)), faded) *
                           (expf(-high) * ((1 - rest) * (float)LUNA_FORGET_SCALE));
      *lunacu_forget_at(w, p, place(i)) = weight;
      if (logs.at) *lunacu_forget_at(logs, p, place(i)) = high;
      sum += (double)(reverse ? *lunacu_forget_at(z, p, place(i)) : weight);
    }
    so_far[i] = sum;
  }
  const double weights = lunacu_forget_before(sum, shared, &all);
  LUNACU_UNROLL for (int i = 0; i < 8; i++)
    if (8 * p.lane + i < rows && !reverse) *lunacu_forget_at(z, p, place(i)) = (float)(weights + so_far[i]);
  if (!span.states || !p.real || p.lane > 0) return;
  float *state = span.states + (p.chunk.state + 1) * span.size - 3 * slots + p.column;
  state[0] = (float)all;
  state[slots] = (float)fade;
  state[2 * slots] = (float)(fade - (double)(float)fade);
}
/* a row's place in dropout's order; rows of a sequence, and the window's first */
struct lunacu_forget_drop { lunacu_dropout dropout; int64_t rows, first, heads, slots; };
LUNACU_INLINE float lunacu_forget_dropped(float x, const lunacu_forget_drop &d, const lunacu_causal_line &l, int j) {
  if (d.dropout.threshold == 0) return x;
  const int64_t row = (l.batch * d.rows + d.first + l.row) * d.heads + l.head;
  return lunacu_dropped(x, lunacu_drop(d.dropout, row * d.slots + j));
}
/* Z += the state's; U /= Z; R = softmax U / Z, or of U + c + ln Z where the memory is routed */
__global__ void lunacu_forget_softmax_kernel(lunacu_causal_span span, lunacu_causal_rows u, lunacu_causal_rows z,
                                             lunacu_causal_rows r, lunacu_forget_drop drop, bool routed) {
  const int slots = (int)drop.slots;
  const lunacu_causal_line l = lunacu_causal_line_of(span, slots);
  float *at_u = lunacu_causal_line_in(u, l), *at_z = lunacu_causal_line_in(z, l), *at_r = lunacu_causal_line_in(r, l);
  const int64_t chunk = l.row / LUNACU_CHUNK, item = l.batch * span.heads + l.head;
  const float *before = span.begins && chunk == 0 ? NULL :
                        span.states + (item * span.stride + chunk + 1) * span.size - 3 * slots;
  for (int j = l.lane; j < l.slots; j += LUNACU_SLOT_LANES) {
    at_z[j] += before ? before[j] : 0;
    const float log = routed ? lunacu_route_log(&at_z[j], at_r[j]) : 0;
    at_r[j] = (at_u[j] /= at_z[j]) + log;
  }
  lunacu_causal_softmax(at_r, l.slots, l.lane, LUNACU_SLOT_LANES, nullptr);
  for (int j = l.lane; j < l.slots; j += LUNACU_SLOT_LANES)
    at_r[j] = lunacu_forget_dropped(at_r[j], drop, l, j) / at_z[j];
}
/* R and dZ; dR becomes H. Never 1 / Z^2, which leaves float's range. */
__global__ void lunacu_forget_slopes_kernel(lunacu_causal_span span, lunacu_causal_rows u, lunacu_causal_rows z,
                                            lunacu_causal_rows r, lunacu_causal_rows dr, lunacu_causal_rows dz,
                                            lunacu_forget_drop drop, float scale, bool routed) {
  const lunacu_causal_line l = lunacu_causal_line_of(span, (int)drop.slots);
  const float *at_u = lunacu_causal_line_in(u, l);
  float *at_z = lunacu_causal_line_in(z, l), *p = lunacu_causal_line_in(r, l), *h = lunacu_causal_line_in(dr, l),
        *dp = lunacu_causal_line_in(dz, l);
  float mean = 0;
  for (int j = l.lane; j < l.slots; j += LUNACU_SLOT_LANES)
    p[j] = at_u[j] + (routed ? lunacu_route_log(&at_z[j], p[j]) : 0);
  lunacu_causal_softmax(p, l.slots, l.lane, LUNACU_SLOT_LANES, nullptr);
  for (int j = l.lane; j < l.slots; j += LUNACU_SLOT_LANES) {
    dp[j] = lunacu_forget_dropped(h[j] / at_z[j], drop, l, j);
    mean += p[j] * dp[j];
  }
  mean = lunacu_over_lanes<lunacu_sum>(mean, LUNACU_SLOT_LANES);
  for (int j = l.lane; j < l.slots; j += LUNACU_SLOT_LANES) {
    const float du = p[j] * (dp[j] - mean);
    p[j] = lunacu_forget_dropped(p[j], drop, l, j) / at_z[j];
    dp[j] = -(p[j] * h[j] + (at_u[j] - (routed ? 1.0f : 0.0f)) * du) / at_z[j];
    h[j] = scale * du / at_z[j];
  }
}
/* after + a thread's sums of x over rows that are later, or its own; they come first in reverse. *all: of the chunk */
LUNACU_INLINE void lunacu_forget_later(const lunacu_causal_rows &x, const lunacu_forget_place &p, double after,
                                       lunacu_shared<double> shared, double (&sums)[8], double *all) {
  double sum = 0;
  LUNACU_UNROLL for (int i = 0; i < 8; i++) {
    if (p.real && 8 * p.lane + i < p.chunk.rows) sum += (double)*lunacu_forget_at(x, p, 8 * p.lane + i);
    sums[i] = sum;
  }
  after += lunacu_forget_before(sum, shared, all);
  LUNACU_UNROLL for (int i = 0; i < 8; i++) sums[i] += after;
}
/* a gradient where it goes, if anywhere: 0 of masked slots, where nothing is added to */
LUNACU_INLINE void lunacu_forget_put(const lunacu_causal_rows &to, const lunacu_forget_place &p, int row, int slots,
                                     bool add, float x) {
  if (!to.at || p.column >= slots || row >= p.chunk.rows || (add && !p.real)) return;
  float *at = lunacu_forget_at(to, p, row);
  *at = (add ? *at : 0) + (p.real ? x : 0);
}
/* dW becomes W dW; ds (+)= that, within the bounds of s. Routed, which has h: W dW - dU, and W dW / s */
__global__ void __launch_bounds__(LUNACU_BLOCK)
lunacu_forget_scores_kernel(lunacu_causal_span span, lunacu_causal_rows w, lunacu_causal_rows dz, lunacu_causal_rows dw,
                            lunacu_causal_rows h, lunacu_causal_rows z, float scale, lunacu_causal_rows s,
                            lunacu_causal_rows ds, int slots, bool add) {
  LUNACU_SHARED(double, shared, LUNACU_BLOCK);
  const lunacu_forget_place p = lunacu_forget_place_of(span, slots);
  double sums[8], all, after = 0;
  if (p.real && !p.chunk.begins) after = span.states[(p.chunk.state + 1) * span.size - 3 * slots + p.column];
  lunacu_forget_later(dz, p, after, shared, sums, &all);
  LUNACU_UNROLL for (int i = 0; i < 8; i++) {
    const int row = 8 * p.lane + i;
    float x = 0;
    if (p.real && row < p.chunk.rows) {
      float *at = lunacu_forget_at(dw, p, row);
      x = *at = *lunacu_forget_at(w, p, row) * (*at + (float)sums[i]);
      const float own = *lunacu_forget_at(s, p, row);
      if (h.at) {
        *at -= *lunacu_forget_at(h, p, row) * *lunacu_forget_at(z, p, row) / scale;
        x = own > 0 ? x / own : 0;
      } else x = fabsf(own) <= LUNA_FORGET_SCORE ? x : 0;
    }
    lunacu_forget_put(ds, p, row, slots, add, x);
  }
}
/* Sums of W dW over each chunk, for the scan: a total is [3, slots], as a state's fades. Where a slot fades by half in
   the chunk after this one, what this chunk's state and its gradient say takes the place of the sums up to here. */
struct lunacu_forget_totals {
  const float *sums;
  float *totals;
  double *carried;
  int64_t chunks, first;             /* of a sequence; the window's first */
};
__global__ void __launch_bounds__(LUNACU_BLOCK)
lunacu_forget_totals_kernel(lunacu_causal_span span, lunacu_causal_rows dw, lunacu_forget_totals t, int slots) {
  LUNACU_SHARED(double, shared, LUNACU_BLOCK);
  const lunacu_forget_place p = lunacu_forget_place_of(span, slots);
  const int64_t item = p.chunk.state / span.stride, chunk = p.chunk.state % span.stride, unit = span.size - 2 * slots;
  const float *state = span.states + p.chunk.state * span.size + p.column;
  const float *after = t.sums + (item * t.chunks + t.chunks - t.first - chunk) * span.size + p.column;
  float *total = t.totals + p.chunk.state * 3 * slots + p.column;
  double sums[8], all, product = 0, x;
  bool anew = false;
  if (p.real && !p.chunk.begins) anew = after[unit] < 0.5f;
  for (int64_t i = p.lane * slots; anew && i < unit; i += LUNACU_FORGET_LANES * slots)
    product += (double)state[i] * (double)after[i];
  lunacu_forget_before(product, shared, &x);
  lunacu_forget_later(dw, p, 0, shared, sums, &all);
  if (!p.real || p.lane > 0) return;
  x /= -((double)state[unit] + (double)state[unit + slots]);
  if (anew && chunk > 0) total[-3 * slots] = (float)x;
  else if (anew) t.carried[item * 3 * slots + p.column] = x;
  const bool ends = state[unit] < 0.5f;
  if (!ends || chunk == span.chunks - 1) total[0] = (float)all;
  total[slots] = ends ? 0 : 1;
  total[2 * slots] = 0;
}
/* The gates' gradients. Routed: they go to s, and their sum over a chunk's rows to `to` */
struct lunacu_route_fades {
  const float *fade;                 /* or null */
  float *to;
  int64_t chunks, first;             /* as of totals */
};
__global__ void __launch_bounds__(LUNACU_BLOCK)
lunacu_forget_gates_kernel(lunacu_causal_span span, lunacu_causal_rows dw, const float *totals,
                           lunacu_causal_rows gates, lunacu_causal_rows dgates, lunacu_route_fades f, int slots,
                           bool add) {
  LUNACU_SHARED(double, shared, LUNACU_BLOCK);
  const lunacu_forget_place p = lunacu_forget_place_of(span, slots);
  const float fade = lunacu_route_fade(f.fade, p.chunk.head);
  double sums[8], all, after = 0, faded = 0;
  if (p.real && !p.chunk.begins) after = totals[p.chunk.state * 3 * slots + p.column];
  lunacu_forget_later(dw, p, after, shared, sums, &all);
  LUNACU_UNROLL for (int i = 0; i < 8; i++) {
    const int row = 8 * p.lane + i;
    const float x = p.real && row < p.chunk.rows ? *lunacu_forget_at(gates, p, row) : 0;
    float slope = 0;
    if (f.fade) slope = x > 0 ? 1 / (1 - x) : 0;
    else if (lunacu_forget_gate(x, fade) > -1) slope = -1.0f / 16 / (1 + expf(x));
    lunacu_forget_put(dgates, p, row, slots, add, slope == 0 ? 0 : slope * (float)sums[i]);
    if (p.real && row < p.chunk.rows) faded += sums[i];
  }
  if (!f.fade) return;
  lunacu_forget_before(faded, shared, &all);
  if (p.column >= slots || p.lane > 0) return;
  const int64_t chunk = p.chunk.batch * f.chunks + f.first + p.chunk.state % span.stride;
  f.to[(chunk * slots + p.column) * span.heads + p.chunk.head] =
      (float)all * fade * lunacu_activation(LUNA_ACTIVATION_SIGMOID, -f.fade[p.chunk.head]);
}

static size_t lunacu_forget_start(const luna_op *op, lunacu_forgetting *f, bool backward, void *workspace) {
  lunacu_causal_luna *c = &f->luna;
  char *at = (char *)workspace;
  *f = {};
  lunacu_causal_luna_sizes(op, c, 3, backward ? 3 : 4);
  lunacu_causal_sweep *s = &c->sweep;
  s->span.slots = c->slots;
  s->same = true;
  lunacu_causal_take(s, &at);
  const int64_t each = s->span.items * c->slots, window = s->window * LUNACU_CHUNK;
  const auto take = [&](int64_t rows) {
    return lunacu_causal_own(lunacu_take(&at, each * rows), rows, c->heads, c->slots);
  };
  const auto kept = [&](int i) {
    float *all = op->kept ? (float *)op->kept + i * each * s->rows : NULL;
    return lunacu_causal_own(all, s->rows, c->heads, c->slots);
  };
  c->a = take(window);
  f->u = op->training ? kept(0) : take(window);
  f->z = op->training ? kept(1) : take(window);
  c->w = take(backward ? s->rows : window);
  if (backward) {
    f->dw = take(window);
    c->h = take(s->rows);
    f->dz = take(s->rows);
    if (s->chunks > 1) f->sums = lunacu_take(&at, s->span.items * s->chunks * s->span.size);
    if (s->chunks > 1) f->totals = lunacu_take(&at, 3 * each * s->window);
    if (s->chunks > s->window) f->carried = (double *)lunacu_take(&at, 2 * 3 * each);
    if (lunacu_routed(op))
      f->fades = lunacu_take(&at, each * s->chunks + lunacu_row_sums_floats(1, each * s->chunks / c->heads, c->heads));
  }
  return (size_t)((uintptr_t)at - (uintptr_t)workspace);
}
static void lunacu_causal_luna_query(luna_op *op) { /* of both */
  const bool forgets = op->kind == LUNA_OP_FORGETTING_LUNA;
  lunacu_forgetting f;
  if (op->state) {                 /* a stream's room */
    op->workspace_size = (size_t)(2 * op->in[3]->shape[0] * lunacu_last(op->in[3])) * sizeof(double);
    return;
  }
  if (op->training) op->kept_size = (forgets ? 2 : 1) * (size_t)luna_count(op->in[3]) * sizeof(float);
  for (int back = 0; back < 2; back++)
    (back ? op->backward_workspace_size : op->workspace_size) = forgets ? lunacu_forget_start(op, &f, back, NULL) :
        lunacu_causal_luna_start(op, &f.luna, back, NULL);
}
/* a launch for all slots of the window's chunks */
#define LUNACU_SLOT_CHUNKS(c, kernel, ...) \
  do { \
    const int64_t blocks = (c).sweep.span.items * (c).sweep.span.chunks * lunacu_divide_up((c).slots, 32); \
    if (blocks > 0) LUNACU_LAUNCH(kernel, (unsigned)blocks, LUNACU_BLOCK, 0, (c).sweep.stream, __VA_ARGS__); \
  } while (0)
static void lunacu_forget_weights(const lunacu_causal_luna &c, const lunacu_causal_rows &z,
                                  const lunacu_causal_rows &logs) {
  LUNACU_SLOT_CHUNKS(c, lunacu_forget_weights_kernel, c.sweep.span, c.in(3), c.in(lunacu_routed(c.op) ? 3 : 4), c.a, z,
                     lunacu_routed(c.op) ? logs : lunacu_causal_rows{}, lunacu_fades(c.op), c.slots);
}
static lunacu_forget_drop lunacu_forget_drop_of(const lunacu_causal_luna &c) {
  return {lunacu_op_dropout(c.op), c.sweep.rows, c.sweep.start, c.heads, c.slots};
}
static void lunacu_forgetting_luna_forward(luna_op *op) {
  lunacu_forgetting f;
  lunacu_causal_luna &c = f.luna;
  if (op->state) return lunacu_causal_luna_stream(op);
  lunacu_forget_start(op, &f, false, op->workspace);
  for (int64_t first = 0; lunacu_causal_go(&c.sweep, first, false); first += c.sweep.window) {
    const lunacu_causal_rows k = c.in(1), v = c.in(2), u = op->training ? lunacu_causal_windowed(c.sweep, f.u) : f.u,
        z = op->training ? lunacu_causal_windowed(c.sweep, f.z) : f.z;
    lunacu_forget_weights(c, z, c.w);
    lunacu_causal_luna_states(c, k, v, c.a, c.a);
    lunacu_causal_luna_run(c, {c.in(0), k, c.a, u, op->arg.causal.scale, false}, 0, true);
    LUNACU_SLOT_ROWS(c, lunacu_forget_softmax_kernel, u, z, c.w, lunacu_forget_drop_of(c), lunacu_routed(op));
    lunacu_causal_luna_run(c, {c.w, c.a, v, c.out(), 1, false}, 1, false);
  }
}
/* dR, and out of it H, R, dZ and dq; the states stay for the way back */
static void lunacu_forget_up(luna_op *op, lunacu_forgetting *f) {
  lunacu_causal_luna &c = f->luna;
  lunacu_causal_span *span = &c.sweep.span;
  float *states = span->states;
  span->stride = c.sweep.chunks;
  for (int64_t first = 0; lunacu_causal_go(&c.sweep, first, false); first += c.sweep.window) {
    const auto windowed = [&](const lunacu_causal_rows &m) { return lunacu_causal_windowed(c.sweep, m); };
    const lunacu_causal_rows k = c.in(1), v = c.in(2), h = windowed(c.h);
    if (f->sums) span->states = f->sums + first * span->size;
    lunacu_forget_weights(c, f->dw, windowed(c.w)); /* dw takes sums that are not needed */
    lunacu_causal_luna_states(c, k, v, c.a, c.a);
    lunacu_causal_luna_run(c, {c.out_grad(), v, c.a, h, 1, false}, 1, true);
    LUNACU_SLOT_ROWS(c, lunacu_forget_slopes_kernel, windowed(f->u), windowed(f->z), windowed(c.w), h,
                     windowed(f->dz), lunacu_forget_drop_of(c), op->arg.causal.scale, lunacu_routed(op));
    lunacu_causal_luna_run(c, {h, c.a, k, c.grad(0), 1, !lunacu_sets(op, 0)}, 0, false);
  }
  span->states = states;
  span->stride = c.sweep.window;
}
/* the gradients of the window's scores and gates, out of dW */
static void lunacu_forget_window(luna_op *op, const lunacu_forgetting &f) {
  const lunacu_causal_luna &c = f.luna;
  const lunacu_causal_span &span = c.sweep.span;
  const bool routed = lunacu_routed(op);
  LUNACU_SLOT_CHUNKS(c, lunacu_forget_scores_kernel, span, c.a, lunacu_causal_windowed(c.sweep, f.dz), f.dw,
                     routed ? lunacu_causal_windowed(c.sweep, c.h) : lunacu_causal_rows{},
                     lunacu_causal_windowed(c.sweep, f.z), op->arg.causal.scale, c.in(3), c.grad(3), c.slots,
                     !lunacu_sets(op, 3));
  if (!routed && !op->in[4]->grad) return;
  if (f.totals) {
    const lunacu_forget_totals t = {f.sums, f.totals, f.carried, c.sweep.chunks, c.sweep.first};
    lunacu_causal_span of_totals = span;
    of_totals.states = f.totals;
    of_totals.carried = f.carried;
    of_totals.size = 3 * c.slots;
    LUNACU_SLOT_CHUNKS(c, lunacu_forget_totals_kernel, span, f.dw, t, c.slots);
    lunacu_causal_scan<LUNACU_FADES_SLOTS>(c.sweep, of_totals);
  }
  const int from = routed ? 3 : 4;
  const lunacu_route_fades fades = {lunacu_fades(op), f.fades, c.sweep.chunks, c.sweep.first};
  LUNACU_SLOT_CHUNKS(c, lunacu_forget_gates_kernel, span, f.dw, f.totals, c.in(from), c.grad(from), fades, c.slots,
                     routed || !lunacu_sets(op, 4));
}
static void lunacu_forgetting_luna_backward(luna_op *op) {
  const bool weights = op->in[3]->grad || op->in[4]->grad, falls = op->in[1]->grad || op->in[2]->grad || weights;
  lunacu_forgetting f;
  lunacu_causal_luna &c = f.luna;
  lunacu_forget_start(op, &f, true, op->workspace);
  lunacu_forget_up(op, &f);
  for (int64_t first = 0; falls && lunacu_causal_go(&c.sweep, first, true); first += c.sweep.window) {
    const lunacu_causal_rows q = c.in(0), g = c.out_grad(), h = lunacu_causal_windowed(c.sweep, c.h),
        r = lunacu_causal_windowed(c.sweep, c.w);
    lunacu_forget_weights(c, lunacu_causal_windowed(c.sweep, f.dz), {});
    lunacu_causal_luna_states(c, q, g, h, r);
    lunacu_causal_luna_run(c, {c.a, h, q, c.grad(1), 1, !lunacu_sets(op, 1)}, 0, false);
    lunacu_causal_luna_run(c, {c.a, r, g, c.grad(2), 1, !lunacu_sets(op, 2)}, 1, false);
    if (!weights) continue;
    lunacu_causal_luna_run(c, {c.in(1), q, h, f.dw, 1, false}, 0, true);
    lunacu_causal_luna_run(c, {c.in(2), g, r, f.dw, 1, true}, 1, true);
    lunacu_forget_window(op, f);
  }
  const int64_t parts = op->in[0]->shape[0] * c.sweep.chunks * c.slots;
  if (lunacu_routed(op) && op->in[4]->grad)
    lunacu_row_sums(op, f.fades, 1, parts, c.heads, op->in[4]->grad, 1, !lunacu_sets(op, 4),
                    f.fades + parts * c.heads);
}

/* --- route: in router, strength. Each token and head writes to two slots: a, b --- */
struct lunacu_routes {
  const float *router, *strength, *dy;
  float *y, *drouter, *dstrength;
  int64_t count, slots;
};
__global__ void lunacu_route_kernel(lunacu_routes r, bool back) {
  for (int64_t i = lunacu_index(); i < r.count; i += lunacu_stride()) {
    const float *x = r.router + i * r.slots, logit = r.strength[i];
    float *y = r.y + i * r.slots;
    const auto above = [&](int64_t j, int64_t k) { return x[j] > x[k] || (isnan(x[j]) && !isnan(x[k])); };
    int64_t a = above(1, 0), b = 1 - a;
    for (int64_t j = 2; j < r.slots; j++) {
      const bool first = above(j, a);
      if (first || above(j, b)) b = first ? a : j;
      if (first) a = j;
    }
    const float strength = lunacu_activation(LUNA_ACTIVATION_SIGMOID, lunacu_forget_score(logit)),
        ratio = expf(lunacu_activation(LUNA_ACTIVATION_SOFTPLUS, -x[a]) -
                     lunacu_activation(LUNA_ACTIVATION_SOFTPLUS, -x[b])), /* of the sigmoids: at most 1 */
        own = 1 / (1 + ratio), other = ratio / (1 + ratio);
    const float more = -expm1f(-strength * own), less = -expm1f(-strength * other);
    for (int64_t j = 0; !back && j < r.slots; j++) y[j] = j == a ? more : j == b ? less : 0;
    if (!back) continue;
    const float *dy = r.dy + i * r.slots, da = dy[a] * (1 - y[a]), db = dy[b] * (1 - y[b]),
                across = own * other * strength * (da - db);
    if (r.dstrength && fabsf(logit) <= LUNA_FORGET_SCORE)
      r.dstrength[i] += (own * da + other * db) * strength * (1 - strength);
    if (!r.drouter) continue;
    r.drouter[i * r.slots + a] += across * lunacu_activation(LUNA_ACTIVATION_SIGMOID, -x[a]);
    r.drouter[i * r.slots + b] -= across * lunacu_activation(LUNA_ACTIVATION_SIGMOID, -x[b]);
  }
}
static void lunacu_route(luna_op *op, bool back) {
  const luna_tensor *router = op->in[0], *strength = op->in[1];
  const int64_t count = luna_count(strength);
  const lunacu_routes r = {router->data, strength->data, op->out[0]->grad, op->out[0]->data, router->grad,
                           strength->grad, count, lunacu_last(router) / lunacu_last(strength)};
  LUNACU_OVER(op, lunacu_route_kernel, count, LUNACU_BLOCK, r, back);
}

/* ---------------------------------------------------------------------------------------------------------------------
   >>optimisers: the step's state, the gradient's norm, updates. What changes from step to step is read and written by
   kernels alone.
   ------------------------------------------------------------------------------------------------------------------ */
__global__ void lunacu_begin_kernel(luna_step_state *state, bool training, bool stepped) {
  if (stepped) state->nonfinite = 0;
  state->step += training;
}
static luna_status lunacu_begin(luna_ctx *ctx, luna_step_state *state, bool training, bool stepped) {
  LUNACU_LAUNCH(lunacu_begin_kernel, 1, 1, 0, lunacu_stream_of(ctx), state, training, stepped);
  return lunacu_done(ctx, "begin");
}
__global__ void lunacu_loss_kernel(const float *loss, luna_step_state *state) {
  if (!(*loss - *loss == 0)) state->nonfinite = 1;
}
static luna_status lunacu_loss_check(luna_ctx *ctx, const luna_tensor *loss, luna_step_state *state) {
  LUNACU_LAUNCH(lunacu_loss_kernel, 1, 1, 0, lunacu_stream_of(ctx), loss->data, state);
  return lunacu_done(ctx, "the loss's check");
}

/* --- the parts of an optimiser's step lie in a table on the device, and are walked by pieces
   of LUNA_UPDATE_PIECE --- */
struct lunacu_pieces {               /* from `first` to before `last` */
  const luna_update *table;
  int64_t count, first, last;
};
static int64_t lunacu_pieces_of(const luna_update *parts, int64_t count) {
  return count ? parts[count - 1].first + lunacu_divide_up(parts[count - 1].count, LUNA_UPDATE_PIECE) : 0;
}
/* the part in which a piece lies: the last whose first piece is not beyond it */
LUNACU_INLINE int64_t lunacu_part_of(const luna_update *table, int64_t count, int64_t piece) {
  int64_t low = 0, high = count;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (table[middle].first <= piece) low = middle;
    else high = middle;
  }
  return low;
}

/* --- the norm, in double: a partial a block, then one more block adds the partials in order --- */
#define LUNACU_PARTIALS 1024
__global__ void lunacu_norm_kernel(const luna_update *table, int64_t count, int64_t pieces, double *partials) {
  LUNACU_SHARED(double, scratch, LUNACU_WARP);
  double total = 0;
  for (int64_t piece = blockIdx.x; piece < pieces; piece += gridDim.x) {
    const luna_update *u = table + lunacu_part_of(table, count, piece);
    const int64_t first = (piece - u->first) * LUNA_UPDATE_PIECE;
    const float *x = u->grad + first;
    const int n = (int)min((int64_t)LUNA_UPDATE_PIECE, u->count - first), fours = (uintptr_t)x % 16 == 0 ? n / 4 : 0;
    float sum[4] = {};
    LUNACU_UNROLL for (int i = threadIdx.x; i < fours; i += LUNACU_BLOCK) {
      float v[4];
      lunacu_get(x + 4 * i, v);
      LUNACU_UNROLL for (int k = 0; k < 4; k++) sum[k] += v[k] * v[k];
    }
    for (int i = 4 * fours + threadIdx.x; i < n; i += LUNACU_BLOCK) sum[0] += x[i] * x[i];
    double squares = (double)(sum[0] + sum[1]) + (double)(sum[2] + sum[3]);
    if (!(squares < (double)INFINITY)) {       /* squares beyond a float: the same share again */
      squares = 0;
      for (int i = 4 * threadIdx.x; i < 4 * fours; i += 4 * LUNACU_BLOCK)
        for (int k = 0; k < 4; k++) squares += (double)x[i + k] * (double)x[i + k];
      for (int i = 4 * fours + threadIdx.x; i < n; i += LUNACU_BLOCK) squares += (double)x[i] * (double)x[i];
    }
    total += squares;
  }
  total = lunacu_over_block<lunacu_sum>(total, scratch);
  if (threadIdx.x == 0) partials[blockIdx.x] = total;
}
__global__ void lunacu_norm_end_kernel(const double *partials, int count, luna_rule rule, luna_step_state *context) {
  LUNACU_SHARED(double, scratch, LUNACU_WARP);
  luna_step_state *state = rule.state;
  double sum = 0;
  for (int i = threadIdx.x; i < count; i += LUNACU_BLOCK) sum += partials[i];
  sum = lunacu_over_block<lunacu_sum>(sum, scratch);
  if (threadIdx.x > 0) return;
  const double size = sqrt(sum);
  const float norm = (float)size, clip = rule.clip;
  const float factor = !(clip > 0 && norm > clip) ? 1.0f : norm < (float)INFINITY ? clip / norm
                                                         : (float)((double)clip / size);
  const int nonfinite = context->nonfinite || !(size * (double)factor <= (double)rule.largest);
  state->norm = norm;
  state->factor = factor;
  state->nonfinite = nonfinite;
  state->updates += (uint64_t)!nonfinite;
  state->skipped += (uint64_t)nonfinite;
  context->skipped += (uint64_t)nonfinite;
  state->skipped_in_row = nonfinite ? state->skipped_in_row + 1 : 0;
}
/* The rule as kernels read it, without its pointers to host memory. */
static luna_rule lunacu_rule_of(const luna_rule *rule) {
  luna_rule own = *rule;
  own.hook = NULL;
  own.config = NULL;
  return own;
}
static luna_status lunacu_norm(luna_ctx *ctx, const luna_rule *rule, const luna_update *parts, const luna_update *table,
                               int64_t count) {
  const cudaStream_t stream = lunacu_stream_of(ctx);
  double *partials = lunacu_self(ctx)->partials;
  const int64_t pieces = lunacu_pieces_of(parts, count);
  const unsigned blocks = (unsigned)lunacu_max(1, lunacu_min(pieces, LUNACU_PARTIALS));
  LUNACU_LAUNCH(lunacu_norm_kernel, blocks, LUNACU_BLOCK, 0, stream, table, count, pieces, partials);
  LUNACU_LAUNCH(lunacu_norm_end_kernel, 1, LUNACU_BLOCK, 0, stream, partials, (int)blocks, lunacu_rule_of(rule),
                luna_backend_state(ctx));
  return lunacu_done(ctx, "the gradient's norm");
}

/* --- updates: one pass, which reads the gradient and leaves zeros; in a step that is skipped it does
   nothing else --- */
/* 1 - beta^t by squaring, off by no more than t 2^-53 */
LUNACU_INLINE float lunacu_correction(float beta, uint64_t t) {
  double power = 1, square = (double)beta;
  for (; t > 0; t /= 2, square *= square) if (t % 2) power *= square;
  return (float)(1 - power);
}
/* what all elements of a parameter share. shared: Adam's lr / (1 - beta1^t) and 1 / sqrt(1 - beta2^t); Apollo's alpha
   and curvature */
struct lunacu_moving { float lr, factor, shared[2]; };

/* Width elements from i on, and as many of each moment there is */
template <luna_optimizer_kind kind, int Width>
LUNACU_INLINE void lunacu_move(const luna_rule &rule, const luna_update &u, const lunacu_moving &s, int64_t i) {
  constexpr int moments = kind == LUNA_OPTIMIZER_SGD ? 1 : kind == LUNA_OPTIMIZER_ADAM ? 2 : 3;
  const bool moving = kind != LUNA_OPTIMIZER_SGD || rule.momentum != 0, coupled = rule.kind != LUNA_OPTIMIZER_ADAMW;
  float v[Width], g[Width], m[moments][Width] = {}, zero[Width] = {};
  lunacu_get(u.value + i, v);
  lunacu_get(u.grad + i, g);
  LUNACU_UNROLL for (int q = 0; q < moments && moving; q++) lunacu_get(u.moment[q] + i, m[q]);
  LUNACU_UNROLL for (int k = 0; k < Width; k++) {
    g[k] = g[k] * s.factor + (coupled ? u.decay * v[k] : 0);
    if constexpr (kind == LUNA_OPTIMIZER_SGD) {
      m[0][k] = rule.momentum * m[0][k] + g[k];
      v[k] -= s.lr * (rule.nesterov ? rule.momentum * m[0][k] + g[k] : m[0][k]);
    } else if constexpr (kind == LUNA_OPTIMIZER_ADAM) {
      m[0][k] = rule.beta1 * m[0][k] + (1 - rule.beta1) * g[k];
      m[1][k] = rule.beta2 * m[1][k] + (1 - rule.beta2) * (g[k] * g[k]);
      v[k] -= (coupled ? 0 : s.lr * u.decay * v[k]) + s.shared[0] * m[0][k] /
          (sqrtf(m[1][k]) * s.shared[1] + rule.epsilon);
    } else { /* m += alpha (g - m), B += curvature d^2, d = m / max(|B|, 1) */
      m[0][k] += s.shared[0] * (g[k] - m[0][k]);
      m[1][k] += s.shared[1] * (m[2][k] * m[2][k]);
      m[2][k] = m[0][k] / fmaxf(fabsf(m[1][k]), 1);
      v[k] -= s.lr * m[2][k];
    }
  }
  lunacu_put(u.value + i, v, false);
  lunacu_put(u.grad + i, zero, false);
  LUNACU_UNROLL for (int q = 0; q < moments && moving; q++) lunacu_put(u.moment[q] + i, m[q], false);
}
template <luna_optimizer_kind kind>
__global__ void lunacu_update_kernel(luna_rule rule, lunacu_pieces p, const double *apollo) {
  LUNACU_SHARED(float, shared, 2);
  for (int64_t piece = p.first + blockIdx.x; piece < p.last; piece += gridDim.x) {
    const int64_t part = lunacu_part_of(p.table, p.count, piece);
    const luna_update u = p.table[part];
    const int64_t start = (piece - u.first) * LUNA_UPDATE_PIECE, end = min(start + LUNA_UPDATE_PIECE, u.count);
    lunacu_moving s = {rule.state->lr * u.lr, rule.state->factor, {0, 0}};
    if (rule.state->nonfinite) {
      for (int64_t i = start + threadIdx.x; i < end; i += blockDim.x) u.grad[i] = 0;
      continue;
    }
    if (kind != LUNA_OPTIMIZER_SGD) {          /* two warps find one each */
      const uint64_t t = rule.state->updates;
      if (threadIdx.x == 0)
        shared[0] = kind == LUNA_OPTIMIZER_ADAM ? (float)((double)s.lr / (double)lunacu_correction(rule.beta1, t))
                                                : (float)apollo[2 * part];
      if (threadIdx.x == LUNACU_WARP)
        shared[1] = kind == LUNA_OPTIMIZER_ADAM ? (float)(1 / sqrt((double)lunacu_correction(rule.beta2, t)))
                                                : (float)apollo[2 * part + 1];
      __syncthreads();
      s.shared[0] = shared[0];
      s.shared[1] = shared[1];
      __syncthreads();
    }
    const bool wide = ((uintptr_t)u.value | (uintptr_t)u.grad | (uintptr_t)u.moment[0] | (uintptr_t)u.moment[1] |
                       (uintptr_t)u.moment[2]) % 16 == 0;
    const int64_t fours = wide ? start + (end - start) / 4 * 4 : start;
    for (int64_t i = start + 4 * threadIdx.x; i < fours; i += 4 * LUNACU_BLOCK) lunacu_move<kind, 4>(rule, u, s, i);
    for (int64_t i = fours + threadIdx.x; i < end; i += LUNACU_BLOCK) lunacu_move<kind, 1>(rule, u, s, i);
    if (!u.average) continue;
    __syncthreads();
    const float share = (1 - rule.average) / lunacu_correction(rule.average, rule.state->updates);
    for (int64_t i = start + threadIdx.x; i < end; i += LUNACU_BLOCK)
      u.average[i] += share * (u.value[i] - u.average[i]);
  }
}
/* Apollo (arXiv 2009.13586, algorithm 1), m, B and d the three moments: sums over a parameter of d^4, (g - m) d and B
   d^2; of them, with D = ||d||_4 + epsilon: alpha = (1 - beta) / (1 - beta^t), curvature = (-alpha sum((g - m) d) -
   sum(B d^2)) / D^4. Block: a share of a part; partials [parts, shares, 3]; then apollo [parts, 2] */
#define LUNACU_SHARES 64
__global__ void lunacu_apollo_kernel(luna_rule rule, const luna_update *table, double *partials) {
  LUNACU_SHARED(double, scratch, LUNACU_WARP);
  const luna_update u = table[blockIdx.x];
  const int64_t stride = (int64_t)LUNACU_SHARES * LUNACU_BLOCK;
  double *partial = partials + ((int64_t)blockIdx.x * LUNACU_SHARES + blockIdx.y) * 3, total[3] = {0, 0, 0};
  if ((int64_t)blockIdx.y * LUNACU_BLOCK >= u.count) { /* a small part has less than its shares */
    if (threadIdx.x < 3) partial[threadIdx.x] = 0;
    return;
  }
  for (int64_t i = (int64_t)blockIdx.y * LUNACU_BLOCK + threadIdx.x; i < u.count;) {
    float sum[3] = {0, 0, 0};
    LUNACU_UNROLL for (const int64_t stop = min(u.count, i + 16 * stride); i < stop; i += stride) {
      const float d = u.moment[2][i], square = d * d, g = u.grad[i] * rule.state->factor + u.decay * u.value[i];
      sum[0] += square * square;
      sum[1] += (g - u.moment[0][i]) * d;
      sum[2] += u.moment[1][i] * square;
    }
    LUNACU_UNROLL for (int q = 0; q < 3; q++) total[q] += (double)sum[q];
  }
  LUNACU_UNROLL for (int q = 0; q < 3; q++) {
    const double all = lunacu_over_block<lunacu_sum>(total[q], scratch);
    if (threadIdx.x == 0) partial[q] = all;
  }
}
__global__ void lunacu_apollo_end_kernel(luna_rule rule, int count, const double *partials, double *apollo) {
  for (int part = (int)lunacu_index(); part < count; part += (int)lunacu_stride()) {
    double sum[3] = {0, 0, 0};
    for (int i = 0; i < LUNACU_SHARES; i++)
      LUNACU_UNROLL for (int q = 0; q < 3; q++) sum[q] += partials[((int64_t)part * LUNACU_SHARES + i) * 3 + q];
    const double alpha = (double)((1 - rule.beta1) / lunacu_correction(rule.beta1, rule.state->updates));
    const double d = sqrt(sqrt(sum[0])) + (double)rule.epsilon;
    apollo[2 * part] = alpha;
    apollo[2 * part + 1] = (-alpha * sum[1] - sum[2]) / (d * d * d * d);
  }
}
/* the hook that runs here: examples/luna_apollo.h */
static bool lunacu_knows(const luna_optimizer_hook *hook) { return strcmp(hook->name, "Apollo") == 0; }
/* One launch for all parameters; Apollo: three for as many as there is room for the sums of */
static luna_status lunacu_update(luna_ctx *ctx, const luna_rule *rule, const luna_update *parts,
                                 const luna_update *table, int64_t count) {
  constexpr int64_t room = LUNACU_PARTIALS_SIZE / (3 * LUNACU_SHARES + 2);
  const cudaStream_t stream = lunacu_stream_of(ctx);
  const int64_t pieces = lunacu_pieces_of(parts, count);
  double *partials = lunacu_self(ctx)->partials, *apollo = partials + room * 3 * LUNACU_SHARES;
  const auto run = [&](auto kernel, const lunacu_pieces &p) {
    if (p.last > p.first)
      LUNACU_LAUNCH(kernel, (unsigned)lunacu_min(p.last - p.first, 4096), LUNACU_BLOCK, 0, stream,
                    lunacu_rule_of(rule), p, apollo);
  };
  if (rule->kind == LUNA_OPTIMIZER_SGD) run(lunacu_update_kernel<LUNA_OPTIMIZER_SGD>, {table, count, 0, pieces});
  else if (rule->kind != LUNA_OPTIMIZER_HOOK)
    run(lunacu_update_kernel<LUNA_OPTIMIZER_ADAM>, {table, count, 0, pieces});
  for (int64_t p = 0; p < count && rule->kind == LUNA_OPTIMIZER_HOOK; p += room) {
    const int64_t n = lunacu_min(count - p, room), last = p + n < count ? parts[p + n].first : pieces;
    LUNACU_LAUNCH(lunacu_apollo_kernel, dim3((unsigned)n, LUNACU_SHARES), LUNACU_BLOCK, 0, stream,
                  lunacu_rule_of(rule), table + p, partials);
    LUNACU_LAUNCH(lunacu_apollo_end_kernel, 1, LUNACU_BLOCK, 0, stream, lunacu_rule_of(rule), (int)n, partials,
                  apollo);
    run(lunacu_update_kernel<LUNA_OPTIMIZER_HOOK>, {table + p, n, parts[p].first, last});
  }
  return lunacu_done(ctx, "an optimiser's update");
}

/* ---------------------------------------------------------------------------------------------------------------------
   >>graphs
   While a graph has begun, the table's entries note their calls: each note has a copy of its call's arguments, tensors
   and all, which go into a hash, the values that are copied to the device excepted. At the end the notes are run: as
   they are; or while the stream is captured, with those copies made from one place on the device; or not at all, where
   a launch with their hash exists: then that place alone is written. Guarded by tests/cuda/cuda.c.
   ------------------------------------------------------------------------------------------------------------------ */
struct lunacu_note {                 /* followed by the call's arguments */
  luna_status (*run)(luna_graph *g, lunacu_note *note);
  size_t size;                       /* with them */
};
struct lunacu_bytes { char *at; size_t used, room, needed; }; /* needed: had there been room */
struct luna_graph {
  luna_ctx *ctx;
  lunacu *self;
  luna_graph *next;
  lunacu_bytes notes, values;
  char *inputs;                      /* on the device: the values of a step */
  size_t inputs_size;
  cudaGraphExec_t launch;
  uint64_t hash, last, recorded;     /* of this step, the one before, the launch */
  bool through;                      /* in this step calls run at once */
  bool customs;                      /* it has noted a custom op, whose state ends with the next begin */
  luna_status status;                /* of what ran before the end */
  const char *reason;
};

static luna_status lunacu_graph_enter(luna_graph *g) {
  return lunacu_check(g->ctx, lunacu_enter(g->self), "cudaSetDevice");
}
static luna_status lunacu_notes_run(luna_graph *g) {
  luna_status status = LUNA_OK;
  for (size_t at = 0; at < g->notes.used && status == LUNA_OK;) {
    lunacu_note *note = (lunacu_note *)(void *)(g->notes.at + at);
    status = lunacu_graph_enter(g);
    if (status == LUNA_OK) status = note->run(g, note);
    at += note->size;
  }
  return status;
}
/* What has been noted runs now, and what follows at once. */
static void lunacu_graph_flush(luna_graph *g, const char *reason) {
  if (!g || g->through) return;
  g->through = true;
  g->reason = reason;
  g->status = lunacu_notes_run(g);
}
/* the graph that notes a context's calls or, where they run at once, counts them; or null. A stream's device is that of
   its model's context. */
static luna_graph *lunacu_noting(const luna_ctx *ctx) {
  luna_graph *g = lunacu_self(ctx) ? lunacu_self(ctx)->graph : NULL;
  if (!g || g->ctx == ctx) return g;
  lunacu_graph_flush(g, "a stream worked before luna_graph_end");
  return NULL;
}

/* room for `size` bytes more; null: what needs them is to run at once */
static char *lunacu_bytes_take(luna_graph *g, lunacu_bytes *bytes, size_t size) {
  char *at = bytes->at + bytes->used;
  size = (size + 15) / 16 * 16;
  bytes->needed += size;
  if (bytes->room - bytes->used < size)
    lunacu_graph_flush(g, "its first steps run by themselves, until their memory lies still");
  if (g->through) return NULL;
  bytes->used += size;
  return at;
}
/* a note with `size` bytes of arguments, or null */
static lunacu_note *lunacu_note_take(luna_graph *g, luna_status (*run)(luna_graph *, lunacu_note *), size_t size) {
  lunacu_note *note = (lunacu_note *)(void *)lunacu_bytes_take(g, &g->notes, sizeof *note + size);
  if (!note) return NULL;
  note->run = run;
  note->size = (sizeof *note + size + 15) / 16 * 16;
  return note;
}
static void lunacu_mix_bytes(luna_graph *g, const void *bytes, size_t size) {
  for (size_t at = 0; at < size; at += sizeof(uint64_t)) {
    uint64_t word = 0;
    memcpy(&word, (const char *)bytes + at, size - at < sizeof word ? size - at : sizeof word);
    g->hash = (g->hash ^ word) * 0x9E3779B97F4A7C15u;
    g->hash ^= g->hash >> 29;
  }
}
template <class... Args> static void lunacu_mix(luna_graph *g, const Args &...a) {
  (lunacu_mix_bytes(g, &a, sizeof a), ...);
}
static void lunacu_mix_tensor(luna_graph *g, const luna_tensor &t) { lunacu_mix(g, t.data, t.grad, t.shape, t.rank); }
/* notes call(g), all of whose arguments are in it and have been mixed into the hash; or runs it */
template <class Body> static luna_status lunacu_note_call(luna_graph *g, const Body &call) {
  luna_status (*const run)(luna_graph *, lunacu_note *) = [](luna_graph *of, lunacu_note *note) {
    return (*(const Body *)(const void *)(note + 1))(of);
  };
  lunacu_mix(g, run);
  lunacu_note *note = lunacu_note_take(g, run, sizeof call);
  if (note) {
    new (note + 1) Body(call);
    return LUNA_OK;
  }
  const luna_status status = lunacu_graph_enter(g);
  return status == LUNA_OK ? call(g) : status;
}

/* the copy of an op, which its tensors follow */
static void lunacu_note_tensors(luna_graph *g, luna_op *to, const luna_op *op) {
  const int tensors = op->inputs + op->outputs;
  luna_tensor *next = (luna_tensor *)(void *)(to + 1);
  int j;
  *to = *op;
  lunacu_mix(g, op->kind, op->inputs, op->outputs, op->dropout_op, op->last_dropout_op, op->activation, op->training,
             op->sets, op->dots, op->dropout, op->last_dropout, op->index, op->lengths, op->query_offsets,
             op->key_offsets, op->state, op->position, op->history, op->kept,
             op->workspace, op->arg);
  if (op->kind == LUNA_OP_CUSTOM) lunacu_mix_bytes(g, op->arg.custom.state, op->arg.custom.state_size);
  for (int i = 0; i < tensors; i++) {
    luna_tensor **at = i < op->inputs ? &to->in[i] : &to->out[i - op->inputs];
    if (!*at) continue;
    for (j = 0; j < i && j < op->inputs && op->in[j] != *at; j++);
    if (j < i && j < op->inputs) *at = to->in[j]; /* one tensor stays one */
    else {
      lunacu_mix_tensor(g, **at);
      *next = **at;
      *at = next++;
    }
  }
}
/* notes an op with its tensors; false: it is to run now */
static bool lunacu_note_op(luna_graph *g, luna_status (*run)(luna_graph *, lunacu_note *), const luna_op *op) {
  const int tensors = op->inputs + op->outputs;
  if (op->kind == LUNA_OP_CUSTOM && !op->arg.custom.recordable)
    lunacu_graph_flush(g, "a custom op is not recordable (luna_custom)");
  lunacu_note *note = lunacu_note_take(g, run, sizeof(luna_op) + (size_t)tensors * sizeof(luna_tensor));
  if (!note) return false;
  g->customs = g->customs || op->kind == LUNA_OP_CUSTOM;
  lunacu_mix(g, run);
  lunacu_note_tensors(g, (luna_op *)(void *)(note + 1), op);
  return true;
}

/* the table's function for `entry`, whose calls a graph may note */
template <auto entry> struct lunacu_noted;
template <luna_status (*entry)(luna_op *)> struct lunacu_noted<entry> {
  static luna_status run(luna_graph *, lunacu_note *note) { return entry((luna_op *)(void *)(note + 1)); }
  static luna_status call(luna_op *op) {
    luna_graph *g = lunacu_noting(op->ctx);
    return g && lunacu_note_op(g, run, op) ? LUNA_OK : lunacu_entered<entry>::call(op);
  }
};
template <class... Args, luna_status (*entry)(luna_ctx *, Args...)> struct lunacu_noted<entry> {
  static luna_status call(luna_ctx *ctx, Args... a) {
    luna_graph *g = lunacu_noting(ctx);
    if (!g) return lunacu_entered<entry>::call(ctx, a...);
    lunacu_mix(g, a...);
    return lunacu_note_call(g, [=](luna_graph *) { return entry(ctx, a...); });
  }
};
static luna_status lunacu_begin_noted(luna_ctx *ctx, luna_step_state *state, bool training, bool stepped) {
  luna_graph *g = lunacu_noting(ctx);
  if (g && g->customs) lunacu_graph_flush(g, "a step with a custom op was not its last");
  return lunacu_noted<lunacu_begin>::call(ctx, state, training, stepped);
}
static luna_status lunacu_copy_noted(luna_ctx *ctx, void *to, const void *from, size_t bytes, int direction) {
  luna_graph *g = lunacu_noting(ctx);
  if (bytes == 0) return LUNA_OK;
  if (g && direction == 2) lunacu_graph_flush(g, "something was read before luna_graph_end");
  char *value = g && direction == 1 ? lunacu_bytes_take(g, &g->values, bytes) : NULL;
  if (!value) return lunacu_noted<lunacu_copy>::call(ctx, to, from, bytes, direction);
  const size_t at = (size_t)(value - g->values.at);
  memcpy(value, from, bytes);
  lunacu_mix(g, to, bytes, at);
  return lunacu_note_call(g, [=](luna_graph *of) {
    return lunacu_self(ctx)->capturing ? lunacu_copy(ctx, to, of->inputs + at, bytes, 0)
                                       : lunacu_copy(ctx, to, of->values.at + at, bytes, 1);
  });
}
static luna_status lunacu_check_noted(luna_ctx *ctx, const luna_tensor *loss, luna_step_state *state) {
  luna_graph *g = lunacu_noting(ctx);
  if (!g) return lunacu_entered<lunacu_loss_check>::call(ctx, loss, state);
  lunacu_mix_tensor(g, *loss);
  lunacu_mix(g, state);
  const luna_tensor kept = *loss;
  return lunacu_note_call(g, [=](luna_graph *) { return lunacu_loss_check(ctx, &kept, state); });
}
/* The parts stay as they are, the optimiser's, until it makes another step. */
template <auto entry> static luna_status lunacu_parts_noted(luna_ctx *ctx, const luna_rule *rule,
                                                            const luna_update *parts, const luna_update *table,
                                                            int64_t count) {
  luna_graph *g = lunacu_noting(ctx);
  if (!g) return lunacu_entered<entry>::call(ctx, rule, parts, table, count);
  lunacu_mix_bytes(g, parts, (size_t)count * sizeof *parts);
  lunacu_mix(g, *rule, parts, table, count);
  const luna_rule kept = *rule;
  return lunacu_note_call(g, [=](luna_graph *) { return entry(ctx, &kept, parts, table, count); });
}

/* --- begin and end --- */
static luna_graph *lunacu_graph_make(luna_ctx *ctx) {
  luna_graph *g = (luna_graph *)calloc(1, sizeof *g);
  if (!g) return NULL;
  g->ctx = ctx;
  g->reason = "no step has ended";
  g->self = lunacu_self(ctx);
  g->next = g->self->graphs;
  return g->self->graphs = g;
}
extern "C" luna_graph *luna_graph_open(luna_ctx *ctx) {
  if (!lunacu_self(ctx) || luna_backend_of(ctx)->open != lunacu_open) return NULL;
  luna_graph *g = lunacu_graph_make(ctx);
  if (!g) luna_fail(ctx, LUNA_OUT_OF_MEMORY, "luna_graph_open: out of memory");
  return g;
}
static luna_status lunacu_graph_order(luna_graph *g, const char *name) {
  char sentence[160];
  snprintf(sentence, sizeof sentence, "%s: luna_graph_begin and luna_graph_end of one graph take turns, one graph at a "
           "time in a context", name);
  return luna_fail(g->ctx, LUNA_BAD_ARGUMENT, sentence);
}
extern "C" luna_status luna_graph_begin(luna_graph *g) {
  if (!g) return LUNA_OK;
  if (g->self->graph) return lunacu_graph_order(g, "luna_graph_begin");
  g->notes.used = g->notes.needed = g->values.used = g->values.needed = 0;
  g->hash = 0;
  g->through = g->customs = false;
  g->status = LUNA_OK;
  g->self->graph = g;
  return LUNA_OK;
}
/* as large as a step needs; nothing is lost where memory ends */
static void lunacu_bytes_grow(lunacu_bytes *bytes) {
  if (bytes->needed <= bytes->room) return;
  free(bytes->at);
  bytes->at = (char *)malloc(bytes->needed);
  bytes->room = bytes->at ? bytes->needed : 0;
}
/* has room on the device for a step's values */
static bool lunacu_inputs_grow(luna_graph *g) {
  if (g->values.used <= g->inputs_size) return true;
  (void)lunacu_own(cudaFree(g->inputs));
  g->inputs = NULL;
  g->inputs_size = lunacu_own(cudaMalloc((void **)&g->inputs, g->values.used)) == cudaSuccess ? g->values.used : 0;
  return g->inputs_size > 0;
}
static void lunacu_launch_forget(luna_graph *g) {
  if (!g->launch) return;
  (void)lunacu_own(cudaStreamSynchronize(g->self->stream)); /* it may be running */
  (void)lunacu_own(cudaGraphExecDestroy(g->launch));
  g->launch = NULL;
}
/* Captures what was noted; no call that luna.h makes there allocates or waits. False: it was not possible, and nothing
   has run. */
static bool lunacu_graph_record(luna_graph *g) {
  lunacu *self = g->self;
  cudaGraph_t graph = NULL;
  (void)lunacu_enter(self);
  lunacu_launch_forget(g);
  if (!lunacu_inputs_grow(g)) return false;
  lunacu_captures().lock();
  self->capturing = true;
  cudaError_t error = cudaStreamBeginCapture(self->stream, cudaStreamCaptureModeThreadLocal);
  if (error == cudaSuccess) {
    const luna_status status = lunacu_notes_run(g);
    error = cudaStreamEndCapture(self->stream, &graph);
    if (error == cudaSuccess && status == LUNA_OK) error = cudaGraphInstantiate(&g->launch, graph, 0);
  }
  self->capturing = false;
  lunacu_captures().unlock();
  if (lunacu_own(error) != cudaSuccess) g->launch = NULL;
  if (graph) (void)lunacu_own(cudaGraphDestroy(graph));
  g->recorded = g->hash;
  return g->launch != NULL;
}
static luna_status lunacu_graph_launch(luna_graph *g) {
  cudaStream_t stream = g->self->stream;
  luna_status status = lunacu_graph_enter(g);
  if (status == LUNA_OK && g->values.used) status = lunacu_to_device(g->ctx, g->inputs, g->values.at, g->values.used);
  return status == LUNA_OK ? lunacu_check(g->ctx, cudaGraphLaunch(g->launch, stream), "luna_graph_end") : status;
}
extern "C" luna_status luna_graph_end(luna_graph *g) {
  char sentence[160];
  if (!g) return LUNA_OK;
  if (g->self->graph != g) return lunacu_graph_order(g, "luna_graph_end");
  g->self->graph = NULL;
  luna_status status = g->status;
  if (!g->through && luna_error_status(g->ctx) == LUNA_OK &&
      ((g->launch && g->hash == g->recorded) || (g->hash == g->last && lunacu_graph_record(g)))) {
    g->reason = "";
    status = lunacu_graph_launch(g);
  } else if (!g->through) {
    g->reason = g->hash != g->last ? "it differs from the step before" : "the device could not record it";
    status = lunacu_notes_run(g);
  }
  g->last = g->through ? 0 : g->hash;
  lunacu_bytes_grow(&g->notes);
  lunacu_bytes_grow(&g->values);
  if (luna_error_status(g->ctx) != LUNA_OK || status == LUNA_OK) return luna_error_status(g->ctx);
  snprintf(sentence, sizeof sentence, "luna_graph_end: the backend failed: %s", luna_status_text(status));
  return luna_fail(g->ctx, status, sentence);
}
extern "C" const char *luna_graph_reason(const luna_graph *g) {
  return g ? g->reason : "there is no graph: on the CPU calls run one by one";
}
extern "C" void luna_graph_close(luna_graph *g) {
  if (!g) return;
  lunacu *self = g->self;
  luna_graph **at = &self->graphs;
  (void)lunacu_enter(self);
  if (self->graph == g) self->graph = NULL;
  while (*at != g) at = &(*at)->next;
  *at = g->next;
  lunacu_launch_forget(g);
  (void)lunacu_own(cudaFree(g->inputs));
  free(g->notes.at);
  free(g->values.at);
  free(g);
}

/* a stream's single token; without memory for a graph, and within another one, its calls run at once */
static void lunacu_token(luna_ctx *ctx, void **kept, bool ends) {
  luna_graph *g = (luna_graph *)*kept, *begun = lunacu_self(ctx)->graph;
  if (ends && g && begun == g) (void)luna_graph_end(g);
  if (ends || begun) return;
  if (!g) *kept = g = lunacu_graph_make(ctx);
  (void)luna_graph_begin(g);
}
static void lunacu_forget(void *self, void *kept) {
  (void)self;
  luna_graph_close((luna_graph *)kept);
}

/* ---------------------------------------------------------------------------------------------------------------------
   >>backend: the table
   ------------------------------------------------------------------------------------------------------------------ */
struct lunacu_tables {               /* one a device and mode; luna.h tells them apart by their address */
  luna_backend table[LUNA_CUDA_BF16 + 1][LUNACU_DEVICES];
  luna_backend none;                 /* of no such device or mode: it only says so */
  lunacu_tables() {
    memset(table, 0, sizeof table);
    for (int math = 0; math <= LUNA_CUDA_BF16; math++)
      for (int device = 0; device < LUNACU_DEVICES; device++) {
        luna_backend *b = &table[math][device];
        b->version = 1;
        b->size = sizeof *b;
        b->device = device + 1;
        b->opened = LUNACU_BLAS_WORKSPACE + LUNACU_PARTIALS_SIZE * sizeof(double);
        b->product_cost = math == LUNA_CUDA_F32 ? 1.0f : 0.25f; /* TF32 and BF16 multiply equally fast */
        b->open = lunacu_open;
        b->close = lunacu_close;
        b->allocate = lunacu_allocate;
        b->release = lunacu_release;
        b->copy = lunacu_copy_noted;
        b->zero = lunacu_noted<lunacu_zero>::call;
        b->wait = lunacu_entered<lunacu_wait>::call;
        b->begin = lunacu_begin_noted;
        b->check = lunacu_check_noted;
        b->norm = lunacu_parts_noted<lunacu_norm>;
        b->update = lunacu_parts_noted<lunacu_update>;
        b->knows = lunacu_knows;
        b->token = lunacu_token;
        b->forget = lunacu_forget;
#define LUNACU_ROW(kind, query, name, can) \
  b->op[kind] = {lunacu_##query##_query, lunacu_noted<lunacu_row<lunacu_##name##_forward>>::call, \
                 lunacu_noted<lunacu_row<lunacu_##name##_backward>>::call, can};
#define LUNACU_OP(NAME, query, name, can) LUNACU_ROW(LUNA_OP_##NAME, query, name, can)
#define LUNACU_BOTH(NAME, query, name, can) /* by one function */ \
  b->op[LUNA_OP_##NAME] = {lunacu_##query##_query, lunacu_noted<lunacu_row<lunacu_##name, false>>::call, \
                           lunacu_noted<lunacu_row<lunacu_##name, true>>::call, can};
        LUNACU_BOTH(PERMUTE, nothing, permute, LUNA_SETS_GRAD(0))
        LUNACU_BOTH(SLICE, nothing, slice, 0)
        LUNACU_BOTH(CONCAT, nothing, concat, LUNA_SETS_GRAD(LUNA_MAX_INPUTS) - 1) /* of all inputs */
        LUNACU_BOTH(EXPAND, expand, expand, LUNA_SETS_GRAD(0))
#define LUNACU_EACH(NAME, tier, reads, cheap, function, inputs, value, da, db, dc) \
  LUNACU_ROW(LUNA_OP_##NAME, elementwise, elementwise, (inputs) | LUNA_EACH_IN_PLACE(cheap))
        LUNA_ELEMENTWISE(LUNACU_EACH)
#undef LUNACU_EACH
        LUNACU_BOTH(SCALE, nothing, scale, LUNA_SETS_GRAD(0) | LUNA_FORWARD_IN_PLACE)
        LUNACU_BOTH(REDUCE, reduce, reduce, LUNA_SETS_GRAD(0))
        LUNACU_OP(MAX, max, max, 0)
        LUNACU_BOTH(MATMUL, nothing, matmul, 0)
        LUNACU_OP(LINEAR, linear, linear, LUNA_SETS_GRAD(0) | LUNA_GRAD_IN_PLACE(3))
        LUNACU_BOTH(ACTIVATION, nothing, activate, LUNA_SETS_GRAD(0))
        LUNACU_BOTH(SOFTMAX, nothing, softmax, LUNA_SETS_GRAD(0))
        LUNACU_BOTH(MASK, nothing, mask, LUNA_SETS_GRAD(0))
        LUNACU_BOTH(RATIO, nothing, ratio, LUNA_SETS_GRAD(0))
        LUNACU_BOTH(DROPOUT, nothing, drop_out, LUNA_SETS_GRAD(0) | LUNA_FORWARD_IN_PLACE)
        LUNACU_OP(LAYER_NORM, layer_norm, layer_norm, LUNA_SETS_GRAD(0))
        LUNACU_OP(EMBEDDING, embedding, embedding, 0)
        LUNACU_BOTH(SINUSOIDS, nothing, sinusoids, 0)
        LUNACU_BOTH(ROTARY, rotary, rotary, LUNA_SETS_GRAD(0))
        LUNACU_OP(CROSS_ENTROPY, cross_entropy, cross_entropy, LUNA_SETS_GRAD(0))
        LUNACU_OP(SOFTMAX_ATTENTION, attention, attention, 0)
        LUNACU_BOTH(CAUSAL_PRODUCT, causal_product, causal_product_run, LUNA_SETS_GRAD(3) - 1)
        LUNACU_OP(SHORT_CONVOLUTION, short_convolution, short_convolution, LUNA_SETS_GRAD(0))
        LUNACU_BOTH(CUSTOM, nothing, custom, 0)
        LUNACU_OP(UNPACK, unpack, unpack, LUNA_SETS_GRAD(0) | LUNA_GRAD_IN_PLACE(5) | LUNA_ADDS_IN_PLACE(0))
        LUNACU_OP(CAUSAL_LUNA, causal_luna, causal_luna, LUNA_SETS_GRAD(4) - 1)
        LUNACU_BOTH(ROUTE, nothing, route, 0)
        LUNACU_OP(FORGETTING_LUNA, causal_luna, forgetting_luna, LUNA_SETS_GRAD(5) - 1)
        LUNACU_OP(FEED_FORWARD, feed_forward, feed_forward,
                  LUNA_SETS_GRAD(0) | LUNA_GRAD_IN_PLACE(5) | LUNA_ADDS_IN_PLACE(0))
        LUNACU_OP(LINEAR_CROSS_ENTROPY, cross_entropy, linear_cross_entropy, LUNA_SETS_GRAD(0))
#undef LUNACU_ROW
#undef LUNACU_OP
#undef LUNACU_BOTH
      }
    none = table[0][0];
    none.device = LUNACU_DEVICES + 1;
    none.open = lunacu_open_none;
  }
};
static const lunacu_tables &lunacu_all() {
  static const lunacu_tables tables;
  return tables;
}
/* of a copy of a table, which may have rows of its own: float32 */
static luna_cuda_math lunacu_math_of(const luna_ctx *ctx) {
  const uintptr_t at = (uintptr_t)luna_backend_of(ctx) - (uintptr_t)&lunacu_all().table[0][0];
  return at < sizeof lunacu_all().table ? (luna_cuda_math)(at / sizeof lunacu_all().table[0]) : LUNA_CUDA_F32;
}
extern "C" const luna_backend *luna_cuda_backend_with(int device, luna_cuda_math math) {
  if (device < 0 || device >= LUNACU_DEVICES || (unsigned)math > LUNA_CUDA_BF16)
    return &lunacu_all().none;
  return &lunacu_all().table[math][device];
}
extern "C" const luna_backend *luna_cuda_backend(int device) { return luna_cuda_backend_with(device, LUNA_CUDA_F32); }
extern "C" cudaStream_t luna_cuda_stream(const luna_ctx *ctx) {
  if (!lunacu_self(ctx)) return NULL;
  lunacu_graph_flush(lunacu_self(ctx)->graph, "luna_cuda_stream was asked for");
  return lunacu_self(ctx)->stream;
}
#endif /* __CUDACC__ or LUNA_CUDA_HOST */

#endif /* LUNA_CUDA_CUH */
