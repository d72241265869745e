/* cuda_host.h - CUDA C++ without a GPU: kernels run on the CPU, and what a GPU would leave to luck is an error here.

   A test includes this file first (it defines LUNA_CUDA_HOST), then luna_cuda.cuh, and is compiled by g++ or clang++ as
   C++17:

     #include "cuda_host.h"
     #include "luna_cuda.cuh"
     ...
     CHECK(cuda_host.errors == 0, "%s", cuda_host.message);

   Kernels start by LUNACU_START(kernel, ...), whose value is CUDA's error; luna_cuda.cuh's LUNACU_LAUNCH is made of it.

   VOCABULARY
     Kernels      __global__ __device__ __host__ __constant__ __forceinline__ __launch_bounds__ LUNACU_UNROLL, threadIdx
                  blockIdx blockDim gridDim warpSize, LUNACU_START((kernel<a, b>), grid, block, shared bytes, stream,
                  arguments...)
     Shared       LUNACU_SHARED(type, name, count), LUNACU_DYNAMIC_SHARED(type, name), lunacu_shared<type> for a
                  pointer. Elements are of 4 or 8 bytes; before several are moved as one: cuda_host_wide(pointer,
                  bytes). Never `auto x = p[i]`: p[i] is a reference that reads when its value is used.
                  cuda_host_send(pointer, from, bytes) is cp.async, cuda_host_arrive() its wait for all of a thread's
     Meeting      __syncthreads, __syncthreads_or _and _count, __syncwarp, __shfl_sync, __shfl_xor_sync, __shfl_up_sync,
                  __shfl_down_sync, __ballot_sync, __any_sync, __all_sync
     Runtime      memory, streams, events, capture and graphs, attributes; cuBLAS: single products and strided batches
                  of float32; cuBLASLt: single ones with a bias
     cuda_host    what a test turns (devices, seed, failures) and reads (counters, errors, the first message);
                  cuda_host_reset() after a fault

   WHAT IT CHECKS. Each finding is one line on stderr and counts in cuda_host.errors; a kernel's finding abandons that
   launch.
     Meeting      All live threads of the block, or all lanes of the mask, must come to the same line; a thread that
                  returned or waits elsewhere, a lane outside its own mask, a shuffle from a lane that does not take
                  part are errors.
     Shared       Filled with NaN bits for every block; every access is checked for bounds and alignment. With
                  cuda_host.debug every word remembers who wrote and read it: reading what nobody wrote, and two threads
                  of which one writes with no barrier between, are errors. Barriers are __syncthreads and, within a
                  warp, a full __syncwarp. Shuffles and votes order no memory, as CUDA's manual says.
     Sent         What cuda_host_send sends is not there before its thread's cuda_host_arrive, and until then nobody may
                  read or write the place (with cuda_host.debug); a thread that returns before is an error.
     Copies       Of device memory to itself, they must not overlap.
     Global       Device memory is a separate region, closed while host code runs: touching it there ends the program.
                  New memory and freed memory is NaN bits. 256 bytes before and after each allocation are watched; with
                  the address sanitizer they are poisoned. A kernel given a pointer, alone or (by g++) inside a struct,
                  to pageable host memory or to freed memory is an error. A wild access is a sticky fault.
     Order        Blocks run one at a time in random order over the grid, threads in random order from meeting to
                  meeting, streams in random order where nothing orders them. Results that change with cuda_host.seed
                  are races.
     Streams      Nothing runs before the host waits: stream, device and event synchronise, cudaMemcpy, cudaFree, a copy
                  to pageable memory. A query runs one piece of work. So a host that forgets to wait sees old data.
     Capture      What may not happen in global capture mode is an error that spoils the capture. A copy from or to
                  pageable memory is a trap in a graph, and an error as well. A capture is of one stream: work cannot
                  fork to others.
     Launches     Limits of grid, block and shared memory as on the GPU of cuda_host.major and minor.
     Vast         With cuda_host.sample memory is zeros that take no room until they are written, and only the first and
                  the last blocks of each launch run, and the first and the last rows of each product: so tensors may be
                  larger than this machine's memory.
     Threads      Each call has the emulator to itself. The current device, the last error and a thread-local capture
                  belong to a host thread.
     Devices      With cuda_host.devices > 1 errors are: a launch, fill or product while another device than that of its
                  stream or handle is current, memory of another device given to one, an event recorded in another
                  device's stream. Copies, waits and cudaFree may be called with any device current, as in CUDA.
     Errors       A failed call's stays until somebody calls cudaGetLastError; a query's cudaErrorNotReady does not, as
                  a device with CUDA 13.0 showed, which also calls a block that is too large an invalid value.
   What it cannot see: races in global memory within one order, __launch_bounds__ overrun, rounding of the GPU's expf
   and its like, reads of uninitialised registers. The arithmetic of kernels is the host's. */
#ifndef CUDA_HOST_H
#define CUDA_HOST_H
#define LUNA_CUDA_HOST 1

#include <algorithm>
#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <tuple>
#include <type_traits>
#include <vector>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include "luna.h"

#if defined(__SANITIZE_ADDRESS__)
#define CUDA_HOST_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define CUDA_HOST_ASAN 1
#endif
#endif
#ifdef CUDA_HOST_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
/* GB of address space; a test of tensors that do not fit in this machine's memory wants more */
#ifndef CUDA_HOST_SPACE
#define CUDA_HOST_SPACE 4
#endif
#if !defined(CUDA_HOST_UCONTEXT) && !defined(__x86_64__) && !defined(__aarch64__)
#define CUDA_HOST_UCONTEXT 1
#endif
#ifdef CUDA_HOST_UCONTEXT
#include <ucontext.h>
#endif

/* What a test sets and reads. Counts "from now" fall as they are used: 1 is the next one, 0 is never. */
struct cuda_host_state {
  int devices = 1, major = 9, minor = 0, multiprocessors = 6;
  uint64_t seed = 1;
  bool debug = true;                       /* hazards in shared memory; bounds are always checked */
  bool quiet = false;                      /* findings are counted, not printed */
  size_t memory = (size_t)2 << 30;         /* bytes of the device */
  long fail_allocation = 0;                /* the n-th cudaMalloc, cudaHostAlloc or cublasCreate from now fails */
  /* the n-th launch or product from now is refused with cudaErrorLaunchFailure */
  long fail_launch = 0;
  /* the n-th kernel or product queued from now (graphs count at replay) faults when it runs */
  long fault = 0;
  /* cuBLASLt knows no way for any product: 1: it says that it does not support it, 2: it finds no ways */
  int no_endings = 0;
  uint32_t sample = 0;                     /* blocks at either end of a launch, rows of a product, that run; 0: all */
  int no_image = 0;                        /* the error of a device for which no kernel was compiled */
  double multiplied = 0;                   /* multiply-adds of cuBLAS */
  long drains = 0;                         /* synchronisations after which no stream had anything to do */
  long launches = 0, products = 0, replays = 0, synchronisations = 0, allocations = 0, copies = 0;
  size_t allocated = 0, max_allocated = 0; /* device bytes now; the maximum since it was set */
  size_t max_shared = 0;                   /* of a block: static and dynamic bytes */
  unsigned max_grid = 0;                   /* of y and z */
  long errors = 0;
  char message[600] = "";                  /* of the first error */
};
inline cuda_host_state cuda_host;
template <class T> struct cuda_host_element;

/* ---------------------------------------------------------------------------------------------------------------------
   >>types
   ------------------------------------------------------------------------------------------------------------------ */
struct uint3 { unsigned x, y, z; };
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
  constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
};
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

#define CUDA_HOST_ERRORS(X) \
  X(cudaSuccess, 0, "no error") \
  X(cudaErrorInvalidValue, 1, "invalid argument") \
  X(cudaErrorMemoryAllocation, 2, "out of memory") \
  X(cudaErrorInitializationError, 3, "initialization error") \
  X(cudaErrorInvalidConfiguration, 9, "invalid configuration argument") \
  X(cudaErrorInvalidMemcpyDirection, 21, "invalid copy direction for memcpy") \
  X(cudaErrorInsufficientDriver, 35, "driver too old for runtime") \
  X(cudaErrorInvalidDeviceFunction, 98, "invalid device function") \
  X(cudaErrorNoDevice, 100, "no CUDA-capable device is detected") \
  X(cudaErrorInvalidDevice, 101, "invalid device ordinal") \
  X(cudaErrorNoKernelImageForDevice, 209, "no kernel image for this device") \
  X(cudaErrorInvalidPtx, 218, "a PTX JIT compilation failed") \
  X(cudaErrorJitCompilerNotFound, 221, "PTX JIT compiler library not found") \
  X(cudaErrorUnsupportedPtxVersion, 222, "the PTX was compiled with an unsupported toolchain") \
  X(cudaErrorJitCompilationDisabled, 223, "PTX JIT compilation was disabled") \
  X(cudaErrorInvalidResourceHandle, 400, "invalid resource handle") \
  X(cudaErrorIllegalState, 401, "operation not possible in this state") \
  X(cudaErrorNotReady, 600, "device not ready") \
  X(cudaErrorIllegalAddress, 700, "an illegal memory access was encountered") \
  X(cudaErrorLaunchOutOfResources, 701, "too many resources requested for launch") \
  X(cudaErrorLaunchTimeout, 702, "the launch timed out") \
  X(cudaErrorMisalignedAddress, 716, "misaligned address") \
  X(cudaErrorLaunchFailure, 719, "unspecified launch failure") \
  X(cudaErrorNotSupported, 801, "operation not supported") \
  X(cudaErrorStreamCaptureUnsupported, 900, "operation not permitted in capture") \
  X(cudaErrorStreamCaptureInvalidated, 901, "operation failed due to a previous error during capture") \
  X(cudaErrorStreamCaptureMerge, 902, "capture would merge two captures") \
  X(cudaErrorStreamCaptureUnmatched, 903, "capture of another stream") \
  X(cudaErrorStreamCaptureUnjoined, 904, "unjoined work in capture") \
  X(cudaErrorStreamCaptureIsolation, 905, "dependency crosses the capture") \
  X(cudaErrorStreamCaptureImplicit, 906, "implicit dependency on the legacy stream") \
  X(cudaErrorCapturedEvent, 907, "event was captured") \
  X(cudaErrorStreamCaptureWrongThread, 908, "capture of another thread") \
  X(cudaErrorUnknown, 999, "unknown error")
#define CUDA_HOST_VALUE(name, value, text) name = value,
enum cudaError { CUDA_HOST_ERRORS(CUDA_HOST_VALUE) };
typedef cudaError cudaError_t;
#define CUDA_HOST_NAME(name, value, text) case name: return #name;
#define CUDA_HOST_TEXT(name, value, text) case name: return text;
inline const char *cudaGetErrorName(cudaError_t e) {
  switch (e) { CUDA_HOST_ERRORS(CUDA_HOST_NAME) } return "unrecognized error code";
}
inline const char *cudaGetErrorString(cudaError_t e) {
  switch (e) { CUDA_HOST_ERRORS(CUDA_HOST_TEXT) } return "unrecognized error code";
}

enum cudaMemcpyKind {
  cudaMemcpyHostToHost, cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice, cudaMemcpyDefault
};
enum cudaMemoryType { cudaMemoryTypeUnregistered, cudaMemoryTypeHost, cudaMemoryTypeDevice, cudaMemoryTypeManaged };
enum cudaDeviceAttr { cudaDevAttrMaxThreadsPerBlock = 1, cudaDevAttrMaxSharedMemoryPerBlock = 8,
                     cudaDevAttrWarpSize = 10, cudaDevAttrClockRate = 13, cudaDevAttrMultiProcessorCount = 16,
                      cudaDevAttrMemoryClockRate = 36, cudaDevAttrGlobalMemoryBusWidth = 37,
                      cudaDevAttrComputeCapabilityMajor = 75, cudaDevAttrComputeCapabilityMinor = 76,
                          cudaDevAttrMaxSharedMemoryPerBlockOptin = 97 };
enum cudaFuncAttribute {
  cudaFuncAttributeMaxDynamicSharedMemorySize = 8, cudaFuncAttributePreferredSharedMemoryCarveout = 9
};
enum cudaStreamCaptureMode {
  cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal, cudaStreamCaptureModeRelaxed
};
enum cudaStreamCaptureStatus {
  cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive, cudaStreamCaptureStatusInvalidated
};
enum { cudaStreamDefault = 0, cudaStreamNonBlocking = 1, cudaEventDefault = 0, cudaEventBlockingSync = 1,
      cudaEventDisableTiming = 2, cudaHostAllocDefault = 0,
       cudaHostAllocPortable = 1, cudaHostAllocMapped = 2, cudaHostAllocWriteCombined = 4, cudaEventWaitDefault = 0 };
struct cudaDeviceProp {
  char name[256];
  size_t totalGlobalMem, sharedMemPerBlock, sharedMemPerBlockOptin;
  int major, minor, multiProcessorCount, warpSize, maxThreadsPerBlock, l2CacheSize;
};
struct cudaPointerAttributes { cudaMemoryType type; int device; void *devicePointer, *hostPointer; };
struct cudaFuncAttributes { size_t sharedSizeBytes; int numRegs, maxThreadsPerBlock, maxDynamicSharedSizeBytes; };
typedef struct CUstream_st *cudaStream_t;
typedef struct CUevent_st *cudaEvent_t;
typedef struct CUgraph_st *cudaGraph_t;
typedef struct CUgraphExec_st *cudaGraphExec_t;
typedef struct CUgraphNode_st *cudaGraphNode_t;

/* ---------------------------------------------------------------------------------------------------------------------
   >>machine: all state, and how a finding is reported
   ------------------------------------------------------------------------------------------------------------------ */
namespace cudahost {

/* switch_stack saves the caller's registers on its stack, that stack in *from, and goes on where `to` was left. */
#ifdef CUDA_HOST_UCONTEXT
struct context { ucontext_t u; };
inline void switch_stack(context &from, context &to) { swapcontext(&from.u, &to.u); }
inline void prepare_stack(context &c, char *stack, size_t size, void (*entry)()) {
  getcontext(&c.u);
  c.u.uc_stack.ss_sp = stack; c.u.uc_stack.ss_size = size; c.u.uc_link = nullptr;
  makecontext(&c.u, entry, 0);
}
#else
struct context { void *sp; };
extern "C" void cuda_host_switch(void **from, void *to) __asm__("cuda_host_switch");
#if defined(__x86_64__)
__asm__(".text\n.p2align 4\ncuda_host_switch:\n"
        " push %rbp\n push %rbx\n push %r12\n push %r13\n push %r14\n push %r15\n mov %rsp, (%rdi)\n mov %rsi, %rsp\n"
        " pop %r15\n pop %r14\n pop %r13\n pop %r12\n pop %rbx\n pop %rbp\n ret\n");
enum { ENTRY_WORD = 6, FRAME_WORDS = 8 };             /* r15 .. rbp, where to return, and no caller */
#else
__asm__(".text\n.p2align 4\ncuda_host_switch:\n"
        " stp x19, x20, [sp, #-160]!\n stp x21, x22, [sp, #16]\n stp x23, x24, [sp, #32]\n stp x25, x26, [sp, #48]\n"
        " stp x27, x28, [sp, #64]\n stp x29, x30, [sp, #80]\n stp d8, d9, [sp, #96]\n stp d10, d11, [sp, #112]\n"
        " stp d12, d13, [sp, #128]\n stp d14, d15, [sp, #144]\n mov x9, sp\n str x9, [x0]\n mov sp, x1\n"
        " ldp x21, x22, [sp, #16]\n ldp x23, x24, [sp, #32]\n ldp x25, x26, [sp, #48]\n ldp x27, x28, [sp, #64]\n"
        " ldp x29, x30, [sp, #80]\n ldp d8, d9, [sp, #96]\n ldp d10, d11, [sp, #112]\n ldp d12, d13, [sp, #128]\n"
        " ldp d14, d15, [sp, #144]\n ldp x19, x20, [sp], #160\n ret\n");
/* x19 .. x28, x29, x30 = where to return, d8 .. d15 */
enum { ENTRY_WORD = 11, FRAME_WORDS = 20 };
#endif
inline void switch_stack(context &from, context &to) { cuda_host_switch(&from.sp, to.sp); }
inline void prepare_stack(context &c, char *stack, size_t size, void (*entry)()) {
  void **frame = (void **)(stack + size) - FRAME_WORDS;
  memset(frame, 0, FRAME_WORDS * sizeof *frame);
  frame[ENTRY_WORD] = (void *)entry;
  c.sp = frame;
}
#endif

enum { MAX_THREADS = 1024, ARENA = 256 << 10, DEFAULT_SHARED = 48 << 10, GUARD = 256 };
constexpr size_t RESERVE = (size_t)(CUDA_HOST_SPACE) << 30;            /* address space for device memory */
#ifdef CUDA_HOST_ASAN
constexpr size_t STACK = 256 << 10;
#else
constexpr size_t STACK = 64 << 10;
#endif

struct fiber { context at; char *stack; void *fake; };
enum state_of_thread : uint8_t { FRESH, READY, AT_BLOCK, AT_WARP, RETURNED };
struct thread {
  state_of_thread state;
  int source, line;                        /* lane that a shuffle reads; line of the last meeting */
  uint32_t mask;
  fiber *on;
  const char *what, *file;                 /* of the last meeting */
  uint64_t value, result;
};
/* bits per lane; named: waited for by somebody */
struct warp { uint32_t lanes, returned, at_block, waiting, named, epoch; };
/* epochs, threads */
struct word { uint32_t wrote, wrote_warp, read, read_warp; int16_t writer, reader, other; bool several, warps, sent; };
struct sending { int64_t at, begin; const void *from; int bytes; }; /* under way into the arena */
/* a shared array; bytes in the arena */
struct array { uint64_t launch; int64_t begin, end; const char *name, *file; int line, size; };
/* opted in; bytes of static shared memory seen so far */
struct kernel_limits { long max_dynamic = -1; size_t fixed = 0; };

struct launch {
  const char *name;
  const void *function;
  dim3 grid, block;
  size_t shared;
  std::function<void()> call;
  std::vector<uintptr_t> pointers;
  std::vector<std::vector<char>> arguments; /* their bytes */
  int device;
};
struct node { std::function<void()> run; bool kernel; };
struct work {
  CUstream_st *stream;
  std::shared_ptr<const std::vector<node>> nodes;
  std::vector<std::shared_ptr<work>> after;
  int fault = -1;
  bool done = false;
  double time = 0;
};
struct capture {
  CUstream_st *stream; cudaStreamCaptureMode mode; std::thread::id thread; bool spoilt; std::vector<node> nodes;
};

struct machine {
  /* the running block */
  const launch *now = nullptr;
  context scheduler;
  fiber *running = nullptr;
  void *host_fake = nullptr;
  const void *host_stack = nullptr;
  size_t host_stack_size = 0, turn = 0;
  bool abandoned = false;
  int threads = 0, current = -1, waiting = 0, first_waiting = 0, returned = 0, votes = 0, voted = 0;
  std::vector<int> ready, next;
  thread thread_of[MAX_THREADS];
  uint3 index_of[MAX_THREADS];
  std::vector<sending> sent_by[MAX_THREADS];
  warp warp_of[MAX_THREADS / 32];
  std::vector<std::unique_ptr<fiber>> fibers;
  std::vector<fiber *> pool;                 /* those with no thread */
  std::vector<uint32_t> blocks;
  /* shared memory */
  alignas(16) char arena[ARENA];
  word words[ARENA / 4];
  uint32_t epoch = 0, block_epoch = 0, warp_epoch = 0;
  uint64_t launch_serial = 0, serial = 0, random = 0;
  int64_t used = 0, fixed = 0;
  std::vector<const array *> arrays;
  array dynamic;
  std::map<const void *, kernel_limits> limits;
  /* memory, streams, errors */
  char *base = nullptr, *hidden = nullptr;   /* device memory, and where it is while closed */
  int opened = 0;
  std::map<uintptr_t, size_t> device, pinned;
  std::map<uintptr_t, int> device_of;        /* of each device allocation */
  std::map<CUstream_st *, std::shared_ptr<CUstream_st>> streams;
  std::shared_ptr<CUstream_st> legacy;
  std::unique_ptr<capture> capturing;
  cudaError_t sticky = cudaSuccess;
  struct sigaction old_segv, old_bus;
};
inline machine m;
inline std::recursive_mutex calls;           /* held by every call */
typedef std::lock_guard<std::recursive_mutex> alone;
inline thread_local int current_device = 0;
inline thread_local cudaError_t last_error = cudaSuccess;

struct text { char s[64]; };
inline text triple(uint3 v) { text t; snprintf(t.s, sizeof t.s, "(%u,%u,%u)", v.x, v.y, v.z); return t; }
inline text name_of(int t) { return triple(m.index_of[t]); }

}  // namespace cudahost
inline uint3 cuda_host_thread, cuda_host_block;
inline dim3 cuda_host_block_size, cuda_host_grid_size;
#define threadIdx (static_cast<const uint3 &>(cuda_host_thread))
#define blockIdx (static_cast<const uint3 &>(cuda_host_block))
#define blockDim (static_cast<const dim3 &>(cuda_host_block_size))
#define gridDim (static_cast<const dim3 &>(cuda_host_grid_size))
inline constexpr int warpSize = 32;
namespace cudahost {

/* Tells of thread t of the running kernel, of the kernel alone when t < 0, of the host when none runs. */
inline void report(int t, const char *file, int line, const char *format, ...) {
  char s[600];
  size_t n = (size_t)snprintf(s, sizeof s, "cuda_host: ");
  if (m.now) {
    const bool wrapped = m.now->name[0] == '(';
    n += (size_t)snprintf(s + n, sizeof s - n, "kernel %.*s",
                          (int)std::min<size_t>(200, strlen(m.now->name) - 2 * wrapped), m.now->name + wrapped);
    if (t >= 0) n += (size_t)snprintf(s + n, sizeof s - n, " block %s thread %s", triple(blockIdx).s, name_of(t).s);
    n += (size_t)snprintf(s + n, sizeof s - n, ": ");
  }
  va_list list;
  va_start(list, format);
  n += (size_t)vsnprintf(s + n, sizeof s - n, format, list);
  va_end(list);
  if (file && n < sizeof s) snprintf(s + n, sizeof s - n, ", %s:%d", file, line);
  if (!cuda_host.quiet) fprintf(stderr, "%s\n", s);
  if (!cuda_host.errors++) memcpy(cuda_host.message, s, sizeof s);
}

inline uint64_t random_bits() {
  uint64_t z = (m.random += 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}
/* Everything that runs has a number of its own, so that after a reset a seed makes it the same again. */
inline void reseed() { m.random = (cuda_host.seed + 1) * 0xd1342543de82ef95u + (++m.serial << 32); }
inline uint32_t random_below(uint32_t n) { return (uint32_t)(((random_bits() >> 32) * n) >> 32); }
template <class T> void shuffle(std::vector<T> &v) {
  for (size_t i = v.size(); i > 1; i--) std::swap(v[i - 1], v[random_below((uint32_t)i)]);
}

/* ---------------------------------------------------------------------------------------------------------------------
   >>memory: the device's region, its allocations and their guards
   ------------------------------------------------------------------------------------------------------------------ */
inline bool in_device(const void *p) {
  return m.base && (const char *)p >= m.base && (const char *)p < m.base + RESERVE;
}
inline size_t padded(size_t n) { return (n + 255) & ~(size_t)255; }

/* Opening and closing must not cost more for more memory, as mprotect does: page tables move between where pointers
   point and a hiding place. The place that they leave stays mapped: in a hole another thread's malloc could lie down.
   Where the system cannot move so (before Linux 5.7), pages are closed one by one. */
inline void protect(bool open) {
#ifdef MREMAP_DONTUNMAP
  static bool moves = true;
  char *from = open ? m.hidden : m.base, *to = open ? m.base : m.hidden;
  if (moves && mremap(from, RESERVE, RESERVE, MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP, to) == to) {
    if (!open && mprotect(m.base, RESERVE, PROT_NONE)) { perror("cuda_host: device memory"); abort(); }
    return;
  }
  if (moves) {                               /* the first opening: nothing has been written */
    moves = false;
    if (!open) { perror("cuda_host: device memory"); abort(); }
  }
#endif
  if (mprotect(m.base, RESERVE, open ? PROT_READ | PROT_WRITE : PROT_NONE)) {
    perror("cuda_host: device memory");
    abort();
  }
}
inline void make_region() {                  /* aligned so that whole page tables move */
  const size_t gigabyte = (size_t)1 << 30;
  char *p = (char *)mmap(nullptr, 2 * RESERVE + gigabyte, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1,
                         0);
  if (p == MAP_FAILED) { perror("cuda_host: address space"); abort(); }
  m.base = p + (0 - (uintptr_t)p) % gigabyte;
  m.hidden = m.base + RESERVE;
#ifdef MREMAP_DONTUNMAP
  if (mprotect(m.hidden, RESERVE, PROT_READ | PROT_WRITE)) { perror("cuda_host: device memory"); abort(); }
#endif
}
struct opened {                              /* device memory may be touched while one lives */
  opened() { if (!m.opened++) protect(true); }
  ~opened() { if (!--m.opened) protect(false); }
};

/* The bytes [p, p + n) lie within one live allocation of the kind. */
inline bool lies_in(const std::map<uintptr_t, size_t> &kind, const void *p, size_t n) {
  auto it = kind.upper_bound((uintptr_t)p);
  if (it == kind.begin()) return false;
  --it;
  size_t at = (size_t)((uintptr_t)p - it->first);
  return at <= it->second && n <= it->second - at;
}
inline int device_of(const void *p) {        /* of an address within an allocation */
  auto it = m.device_of.upper_bound((uintptr_t)p);
  return it == m.device_of.begin() ? -1 : (--it)->second;
}
/* A finding when `what` belongs to another device than the current one. */
inline bool is_elsewhere(int device, const char *what) {
  if (device == current_device) return false;
  report(-1, nullptr, 0, "%s of device %d while device %d is the current one", what, device, current_device);
  return true;
}
inline cudaMemoryType type_of(const void *p) {
  return in_device(p) ? cudaMemoryTypeDevice : lies_in(m.pinned, p, 1) ? cudaMemoryTypeHost :
      cudaMemoryTypeUnregistered;
}

inline void poison(const void *p, size_t n) {
#ifdef CUDA_HOST_ASAN
  __asan_poison_memory_region(p, n);
#endif
  (void)p; (void)n;
}
inline void unpoison(const void *p, size_t n) {
#ifdef CUDA_HOST_ASAN
  __asan_unpoison_memory_region(p, n);
#endif
  (void)p; (void)n;
}

/* What a guard holds in the word at p: as a float a signalling NaN, so that reading a guard shows too, and each word
   its own. What a kernel reads from one guard and writes, computed or copied, into another is not the pattern there. */
inline uint32_t guard_bits(const void *p) { return 0xff800001u + ((uint32_t)((uintptr_t)p >> 2) * 2654435761u >> 11); }

/* The bytes [from, to) of a guard hold their pattern, or are given it. */
inline bool guard(char *from, char *to, bool write) {
  bool whole = true;
#ifndef CUDA_HOST_ASAN                       /* there they are poisoned, and nothing can have written them */
  for (; from < to && (uintptr_t)from % 4; from++) {           /* an odd end; then words */
    const char bits = (char)(guard_bits(from) >> ((uintptr_t)from % 4 * 8));
    if (write) *from = bits;
    else whole = whole && *from == bits;
  }
  for (uint32_t *p = (uint32_t *)from; p < (uint32_t *)to; p++) {
    if (write) *p = guard_bits(p);
    else whole = whole && *p == guard_bits(p);
  }
#else
  if (write) poison(from, (size_t)(to - from));
#endif
  return whole;
}
inline bool guards(uintptr_t at, size_t n, bool write) {
  char *p = (char *)at;
  const bool before = guard(p - GUARD, p, write), after = guard(p + n, p + padded(n) + GUARD, write);
  return before && after;
}
inline void check_guards() {
  opened here;
  for (auto &a : m.device)
    if (!guards(a.first, a.second, false)) {
      report(-1, nullptr, 0, "somebody wrote beside the %zu bytes of device memory at %p", a.second, (void *)a.first);
      guards(a.first, a.second, true);
    }
}

/* n bytes of device memory become `byte`; of a vast region zeros, which take no room */
inline void blank(void *at, size_t n, int byte) {
  const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), begin = ((uintptr_t)at + page - 1) / page * page,
      end = ((uintptr_t)at + n) / page * page;
  if (!cuda_host.sample || end < begin + (1 << 20)) { memset(at, byte, n); return; }
  if (madvise((void *)begin, end - begin, MADV_DONTNEED)) { perror("cuda_host: device memory"); abort(); }
  memset(at, 0, begin - (uintptr_t)at);
  memset((void *)end, 0, (uintptr_t)at + n - end);
}
inline void *take(size_t n) {
  uintptr_t at = (uintptr_t)m.base + GUARD;
  for (auto &a : m.device) {
    if (at + padded(n) + GUARD <= a.first - GUARD) break;
    at = a.first + padded(a.second) + 2 * GUARD;
  }
  if (at - (uintptr_t)m.base + padded(n) + GUARD > RESERVE) return nullptr;
  opened here;
  m.device[at] = n;
  m.device_of[at] = current_device;
  unpoison((void *)at, n);
  blank((void *)at, n, 0xff);
  guards(at, n, true);
  return (void *)at;
}
inline void give(uintptr_t at) {
  opened here;
  const size_t n = m.device[at];
  if (!guards(at, n, false))
    report(-1, nullptr, 0, "somebody wrote beside the %zu bytes of device memory at %p", n, (void *)at);
  blank((void *)at, n, 0xff);
  poison((void *)at, n);
  m.device.erase(at);
  m.device_of.erase(at);
}

/* ---------------------------------------------------------------------------------------------------------------------
   >>fibers: the threads of a block, one stack each for as long as they wait
   ------------------------------------------------------------------------------------------------------------------ */
inline void leave(void **fake, const void *stack, size_t size) {
#ifdef CUDA_HOST_ASAN
  __sanitizer_start_switch_fiber(fake, stack, size);
#endif
  (void)fake; (void)stack; (void)size;
}
inline void enter(void *fake, const void **stack, size_t *size) {
#ifdef CUDA_HOST_ASAN
  __sanitizer_finish_switch_fiber(fake, stack, size);
#endif
  (void)fake; (void)stack; (void)size;
}

inline void set_current(int t) { m.current = t; cuda_host_thread = m.index_of[t]; }

inline void to_scheduler() {
  fiber *f = m.running;
  leave(&f->fake, m.host_stack, m.host_stack_size);
  switch_stack(f->at, m.scheduler);
  enter(f->fake, nullptr, nullptr);
}
inline void abandon() {                      /* never comes back: the scheduler takes all stacks away */
  m.abandoned = true;
  leave(nullptr, m.host_stack, m.host_stack_size);
  context nowhere;
  switch_stack(nowhere, m.scheduler);
}
#define CUDA_HOST_FAIL(file, line, ...) \
  (cudahost::report(cudahost::m.current, file, line, __VA_ARGS__), cudahost::abandon())

inline void thread_returns() {
  const int t = m.current;
  warp &w = m.warp_of[t >> 5];
  if (!m.sent_by[t].empty())
    CUDA_HOST_FAIL(m.thread_of[t].file, m.thread_of[t].line, "returned while what it sent is under way");
  m.thread_of[t].state = RETURNED;
  m.thread_of[t].on = nullptr;
  m.returned++;
  w.returned |= 1u << (t & 31);
  if (m.waiting) {
    const thread &o = m.thread_of[m.first_waiting];
    CUDA_HOST_FAIL(o.file, o.line, "returned while thread %s waits in %s", name_of(m.first_waiting).s, o.what);
  }
  if (w.named >> (t & 31) & 1)
    for (int o = t & ~31; o <= (t | 31) && o < m.threads; o++)
      if (m.thread_of[o].state == AT_WARP && m.thread_of[o].mask >> (t & 31) & 1)
        CUDA_HOST_FAIL(m.thread_of[o].file, m.thread_of[o].line, "returned while thread %s waits for it in %s",
                       name_of(o).s, m.thread_of[o].what);
}

/* A stack runs threads from their first step; one that waits keeps its stack, one that returns lets the next fresh one
   have it at once. */
inline void fiber_main() {
  fiber *self = m.running;
  enter(nullptr, &m.host_stack, &m.host_stack_size);
  for (;;) {
    m.now->call();
    thread_returns();
    if (m.turn + 1 < m.ready.size() && m.thread_of[m.ready[m.turn + 1]].state == FRESH) {
      const int t = m.ready[++m.turn];
      m.thread_of[t].state = READY;
      m.thread_of[t].on = self;
      set_current(t);
      continue;
    }
    m.pool.push_back(self);
    to_scheduler();
  }
}

inline void resume(int t) {
  thread &me = m.thread_of[t];
  if (!me.on) {
    if (m.pool.empty()) {
      fiber *f = new fiber();
      const size_t page = (size_t)sysconf(_SC_PAGESIZE);
      f->stack = (char *)mmap(nullptr, STACK + page, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (f->stack == MAP_FAILED || mprotect(f->stack, page, PROT_NONE)) { perror("cuda_host: a stack"); abort(); }
      f->stack += page;
      prepare_stack(f->at, f->stack, STACK, fiber_main);
      m.fibers.emplace_back(f);
      m.pool.push_back(f);
    }
    me.on = m.pool.back();
    m.pool.pop_back();
  }
  me.state = READY;
  set_current(t);
  m.running = me.on;
  leave(&m.host_fake, me.on->stack, STACK);
  switch_stack(m.scheduler, me.on->at);
  enter(m.host_fake, nullptr, nullptr);
  m.running = nullptr;
}

inline void take_stacks() {
  m.pool.clear();
  for (auto &f : m.fibers) {
    m.pool.push_back(f.get());
    unpoison(f->stack, STACK);
    prepare_stack(f->at, f->stack, STACK, fiber_main);
  }
}

/* ---------------------------------------------------------------------------------------------------------------------
   >>launch: blocks in random order, their threads in random order
   ------------------------------------------------------------------------------------------------------------------ */
inline size_t shared_limit() {               /* bytes a block may opt in to */
  const int arch = cuda_host.major * 10 + cuda_host.minor;
  return (size_t)(arch == 80 || arch == 87 ? 163 : arch == 86 || arch == 89 ||
                  arch >= 120 ? 99 : arch >= 90 ? 227 : arch == 75 ? 64 : arch >= 70 ? 96 : 48) << 10;
}

inline void run_block() {
  m.block_epoch = ++m.epoch;
  memset(m.arena, 0xff, (size_t)m.used);
  m.waiting = m.returned = m.votes = 0;
  m.next.clear();
  m.ready.resize((size_t)m.threads);
  for (int t = 0; t < m.threads; t++) {
    m.ready[(size_t)t] = t;
    m.thread_of[t].state = FRESH;
    m.thread_of[t].on = nullptr;
    m.thread_of[t].file = nullptr;
    for (const sending &s : m.sent_by[t])    /* of a block that was abandoned */
      for (int64_t i = s.at / 4; i < (s.at + s.bytes) / 4; i++) m.words[i].sent = false;
    m.sent_by[t].clear();
  }
  for (int w = 0; w < (m.threads + 31) / 32; w++) {
    const int lanes = std::min(32, m.threads - 32 * w);
    m.warp_of[w] = {lanes == 32 ? ~0u : (1u << lanes) - 1, 0, 0, 0, 0, ++m.warp_epoch};
  }
  while (!m.ready.empty()) {
    shuffle(m.ready);
    for (m.turn = 0; m.turn < m.ready.size(); m.turn++) {
      resume(m.ready[m.turn]);
      if (m.abandoned) return;
    }
    m.ready.swap(m.next);
    m.next.clear();
  }
  for (int t = 0; t < m.threads && !m.abandoned; t++)
    if (m.thread_of[t].state != RETURNED) {
      report(t, m.thread_of[t].file, m.thread_of[t].line, "waits for ever in %s", m.thread_of[t].what);
      m.abandoned = true;
    }
}

inline void fault(cudaError_t error);

inline bool is_mapped(uintptr_t p) { /* lower down lie two small numbers side by side, and the sanitizer's shadow */
  unsigned char resident[1];
  return p >> 44 && p < (uintptr_t)1 << 47 && mincore((void *)(p & ~((uintptr_t)sysconf(_SC_PAGESIZE) - 1)), 1,
                                                      resident) == 0;
}

inline bool pointers_are_good(const launch &l) {
  for (uintptr_t p : l.pointers) {
    if (in_device((void *)p)) {
      if (!lies_in(m.device, (void *)p, 0))
        report(-1, nullptr, 0, "was given %p, which is not, or no longer, allocated", (void *)p);
      else if (device_of((void *)p) == l.device) continue;
      else
        report(-1, nullptr, 0, "runs on device %d and was given %p, memory of device %d", l.device, (void *)p,
               device_of((void *)p));
    } else {
      if (lies_in(m.pinned, (void *)p, 0) || !is_mapped(p)) continue;
      report(-1, nullptr, 0, "was given %p, a pointer to host memory", (void *)p);
    }
    return false;
  }
  return true;
}

inline void emulate(const launch &l) {
  m.now = &l;
  m.abandoned = false;
  m.launch_serial++;
  reseed();
  m.arrays.clear();
  if (m.epoch > 0xf0000000u || m.warp_epoch > 0xf0000000u) {
    m.epoch = m.warp_epoch = 0; memset(m.words, 0, sizeof m.words);
  }
  m.threads = (int)(l.block.x * l.block.y * l.block.z);
  m.used = ((int64_t)l.shared + 15) & ~(int64_t)15;
  m.fixed = 0;
  cuda_host_block_size = l.block;
  cuda_host_grid_size = l.grid;
  for (int t = 0; t < m.threads; t++)
    m.index_of[t] = {(unsigned)t % l.block.x, (unsigned)t / l.block.x % l.block.y,
                     (unsigned)t / (l.block.x * l.block.y)};
  if (pointers_are_good(l)) {
    const size_t all = (size_t)l.grid.x * l.grid.y * l.grid.z, few = 2 * (size_t)cuda_host.sample;
    m.blocks.resize(few && few < all ? few : all);
    for (size_t i = 0; i < m.blocks.size(); i++)
      m.blocks[i] = (uint32_t)(m.blocks.size() < all && i >= few / 2 ? all - few + i : i);
    shuffle(m.blocks);
    for (size_t i = 0; i < m.blocks.size() && !m.abandoned; i++) {
      const uint32_t b = m.blocks[i];
      cuda_host_block = {b % l.grid.x, b / l.grid.x % l.grid.y, b / l.grid.x / l.grid.y};
      run_block();
    }
  }
  if (m.abandoned) take_stacks();
  kernel_limits &k = m.limits[l.function];
  k.fixed = std::max(k.fixed, (size_t)m.fixed);
  cuda_host.max_shared = std::max(cuda_host.max_shared, k.fixed + l.shared);
  cuda_host.max_grid = std::max(cuda_host.max_grid, std::max(l.grid.y, l.grid.z));
  m.current = -1;
  m.now = nullptr;
}
/* what runs launches: another than the emulator may be put here (tests/cuda/ptx_host.cpp) */
inline void (*run_launch)(const launch &) = emulate;

/* ---------------------------------------------------------------------------------------------------------------------
   >>meeting: barriers, shuffles, votes
   ------------------------------------------------------------------------------------------------------------------ */
template <class T> T value_of(const T &x) { return x; }
template <class T> typename cuda_host_element<T>::value value_of(const cuda_host_element<T> &x) { return x.load(); }
inline bool same_place(const thread &a, const thread &b) {
  return a.line == b.line && (a.file == b.file || !strcmp(a.file, b.file));
}

struct here {
  const char *file;
  int line;

  thread &arrive(const char *what) const {
    if (m.current < 0) { fprintf(stderr, "cuda_host: %s outside a kernel, %s:%d\n", what, file, line); abort(); }
    thread &me = m.thread_of[m.current];
    me.what = what; me.file = file; me.line = line;
    return me;
  }

  /* The number of threads whose predicate holds. */
  int block(const char *what, bool predicate = false) const {
    const int t = m.current;
    thread &me = arrive(what);
    warp &w = m.warp_of[t >> 5];
    if (m.returned)
      for (int o = 0; o < m.threads; o++)
        if (m.thread_of[o].state == RETURNED)
          CUDA_HOST_FAIL(file, line, "waits in %s, but thread %s has returned", what, name_of(o).s);
    if (m.waiting && !same_place(me, m.thread_of[m.first_waiting])) {
      const thread &o = m.thread_of[m.first_waiting];
      CUDA_HOST_FAIL(file, line, "waits in %s, but thread %s in %s at %s:%d", what, name_of(m.first_waiting).s, o.what,
                     o.file, o.line);
    }
    if (w.named >> (t & 31) & 1)
      for (int o = t & ~31; o < m.threads; o++)
        if (m.thread_of[o].state == AT_WARP && m.thread_of[o].mask >> (t & 31) & 1)
          CUDA_HOST_FAIL(file, line, "waits in %s, but thread %s for it in %s at %s:%d", what, name_of(o).s,
                         m.thread_of[o].what, m.thread_of[o].file, m.thread_of[o].line);
    if (!m.waiting++) m.first_waiting = t;
    m.votes += predicate;
    if (m.waiting < m.threads) {
      me.state = AT_BLOCK;
      w.at_block |= 1u << (t & 31);
      to_scheduler();
    } else {
      for (int o = 0; o < m.threads; o++)
        if (o != t) { m.thread_of[o].state = READY; m.next.push_back(o); }
      for (int i = 0; i < (m.threads + 31) / 32; i++) m.warp_of[i].at_block = 0;
      m.voted = m.votes;                     /* stays until all have read it: the next barrier needs them all */
      m.waiting = m.votes = 0;
      m.epoch++;
    }
    return m.voted;
  }

  /* Every lane of the mask gets result(lane) once all have come; `orders`: memory too. */
  template <class F> uint64_t lanes(const char *what, unsigned mask, uint64_t value, int source, bool orders,
                                    F result) const {
    const int t = m.current, lane = t & 31, first = t & ~31;
    thread &me = arrive(what);
    warp &w = m.warp_of[t >> 5];
    if (!(mask >> lane & 1)) CUDA_HOST_FAIL(file, line, "is not in its own mask %08x of %s", mask, what);
    mask &= w.lanes;
    me.mask = mask; me.value = value; me.source = source;
    if (mask & w.returned)
      CUDA_HOST_FAIL(file, line, "waits in %s for thread %s, which has returned", what,
                     name_of(first + __builtin_ctz(mask & w.returned)).s);
    if (mask & (w.at_block | w.waiting)) {
      const int o = first + __builtin_ctz(mask & w.at_block ? mask & w.at_block : mask & w.waiting);
      const thread &other = m.thread_of[o];
      if (other.state == AT_BLOCK || (other.mask >> lane & 1 && (other.mask != mask || !same_place(me, other))))
        CUDA_HOST_FAIL(file, line, "waits in %s (mask %08x) for thread %s, which waits in %s (mask %08x) at %s:%d",
                       what, mask, name_of(o).s, other.what,
                       other.state == AT_BLOCK ? ~0u : other.mask, other.file, other.line);
    }
    me.state = AT_WARP;
    w.waiting |= 1u << lane;
    w.named |= mask;
    uint32_t come = w.waiting & mask;
    if (come == mask)
      for (uint32_t left = mask; left; left &= left - 1) {
        const thread &other = m.thread_of[first + __builtin_ctz(left)];
        /* is busy with other lanes, and may come here yet */
        if (other.mask != mask || !same_place(me, other)) come = 0;
      }
    if (come != mask) {
      to_scheduler();
      return me.result;
    }
    for (uint32_t left = mask; left; left &= left - 1) {
      const int o = first + __builtin_ctz(left);
      thread &other = m.thread_of[o];
      if (other.source >= 0 && !(mask >> other.source & 1)) {
        set_current(o);
        CUDA_HOST_FAIL(file, line, "reads in %s from lane %d, which takes no part", what, other.source);
      }
      other.result = result(o);
      other.state = READY;
      if (o != t) m.next.push_back(o);
    }
    w.waiting &= ~mask;
    w.named = 0;
    for (uint32_t left = w.waiting; left; left &= left - 1) w.named |= m.thread_of[first + __builtin_ctz(left)].mask;
    if (orders && mask == w.lanes) w.epoch = ++m.warp_epoch;
    return me.result;
  }

  void warp_barrier(unsigned mask = 0xffffffffu) const {
    lanes("__syncwarp", mask, 0, -1, true, [](int) { return (uint64_t)0; });
  }

  /* Votes: the lanes of the mask whose predicate holds, and those lanes of it that exist. */
  uint32_t ballot(const char *what, unsigned mask, bool predicate) const {
    const int first = m.current & ~31;
    return (uint32_t)lanes(what, mask, predicate, -1, false, [=](int o) {
      uint32_t bits = 0;
      for (uint32_t left = m.thread_of[o].mask; left; left &= left - 1)
        bits |= (uint32_t)m.thread_of[first + __builtin_ctz(left)].value << __builtin_ctz(left);
      return (uint64_t)bits;
    });
  }
  bool all(unsigned mask, bool predicate) const {
    const uint32_t votes = ballot("__all_sync", mask, predicate);
    return votes == (mask & m.warp_of[m.current >> 5].lanes);
  }

  template <class T> T shuffle_from(const char *what, unsigned mask, T x, int source) const {
    static_assert(std::is_arithmetic<T>::value && (sizeof(T) == 4 || sizeof(T) == 8), "shuffles are of 4 or 8 bytes");
    const int first = m.current & ~31;
    uint64_t bits = 0;
    memcpy(&bits, &x, sizeof x);
    bits = lanes(what, mask, bits, source, false,
                 [=](int o) { return m.thread_of[first + m.thread_of[o].source].value; });
    memcpy(&x, &bits, sizeof x);
    return x;
  }
  template <class V> auto shuffle(unsigned mask, const V &v, int source, int width = 32) const {
    const int lane = m.current & 31;
    return shuffle_from("__shfl_sync", mask, value_of(v), (lane & ~(width - 1)) | (source & (width - 1)));
  }
  template <class V> auto shuffle_up(unsigned mask, const V &v, unsigned delta, int width = 32) const {
    const int lane = m.current & 31, from = lane - (int)delta;
    return shuffle_from("__shfl_up_sync", mask, value_of(v), from < (lane & ~(width - 1)) ? lane : from);
  }
  template <class V> auto shuffle_down(unsigned mask, const V &v, unsigned delta, int width = 32) const {
    const int lane = m.current & 31;
    return shuffle_from("__shfl_down_sync", mask, value_of(v),
                        (lane & (width - 1)) + (int)delta >= width ? lane : lane + (int)delta);
  }
  template <class V> auto shuffle_xor(unsigned mask, const V &v, int bits, int width = 32) const {
    const int lane = m.current & 31, from = lane ^ bits;
    return shuffle_from("__shfl_xor_sync", mask, value_of(v), from > (lane | (width - 1)) ? lane : from);
  }
  void trap() const { fault(cudaErrorLaunchFailure); CUDA_HOST_FAIL(file, line, "trapped"); }
};

/* ---------------------------------------------------------------------------------------------------------------------
   >>shared
   ------------------------------------------------------------------------------------------------------------------ */
inline const array *array_at(int64_t begin) {
  for (const array *a : m.arrays) if (a->begin == begin) return a;
  return &m.dynamic;
}
inline bool ordered_in_warp(int a, int b, uint32_t epoch) {
  return a >> 5 == b >> 5 && epoch != m.warp_of[b >> 5].epoch;
}

inline void hazard(int64_t begin, int64_t word_index, const char *does, int other, const char *did) {
  const array *a = array_at(begin);
  const thread &me = m.thread_of[m.current];
  CUDA_HOST_FAIL(a->file, a->line, "%s %s[%lld], which thread %s %s with no barrier between (its last: line %d)", does,
                 a->name,
                 (long long)((word_index * 4 - begin) / a->size), name_of(other).s, did, me.file ? me.line : 0);
}

inline void not_sent(int64_t begin, int64_t i, const char *does) {
  const array *a = array_at(begin);
  if (m.words[i].sent)
    CUDA_HOST_FAIL(a->file, a->line, "%s %s[%lld], to which a copy is under way", does, a->name,
                   (long long)((i * 4 - begin) / a->size));
}
inline void note_read(int64_t begin, int64_t i) {
  const int t = m.current;
  word &w = m.words[i];
  not_sent(begin, i, "reads");
  const uint32_t warp_now = m.warp_of[t >> 5].epoch;
  if (w.wrote < m.block_epoch) {
    const array *a = array_at(begin);
    CUDA_HOST_FAIL(a->file, a->line, "reads %s[%lld] before it was written", a->name,
                   (long long)((i * 4 - begin) / a->size));
  }
  if (w.wrote == m.epoch && w.writer != t && !ordered_in_warp(w.writer, t, w.wrote_warp))
    hazard(begin, i, "reads", w.writer, "wrote");
  if (w.read != m.epoch || (!w.warps && ordered_in_warp(w.reader, t, w.read_warp))) {
    w.read = m.epoch; w.read_warp = warp_now; w.reader = (int16_t)t; w.several = w.warps = false;
  } else if (w.reader != t) {
    w.several = true;
    if (w.reader >> 5 != t >> 5) w.warps = true;
    w.other = (int16_t)t;
  }
}
inline void note_write(int64_t begin, int64_t i) {
  const int t = m.current;
  word &w = m.words[i];
  not_sent(begin, i, "writes");
  if (w.wrote == m.epoch && w.writer != t && !ordered_in_warp(w.writer, t, w.wrote_warp))
    hazard(begin, i, "writes", w.writer, "wrote");
  if (w.read == m.epoch && (w.several || w.reader != t) && (w.warps || !ordered_in_warp(w.reader, t, w.read_warp)))
    hazard(begin, i, "writes", w.reader != t ? w.reader : w.other, "read");
  w.wrote = m.epoch; w.wrote_warp = m.warp_of[t >> 5].epoch; w.writer = (int16_t)t;
}

inline void check_place(int64_t at, int64_t begin, int64_t end, int size) {
  if (at >= begin && at + size <= end && at % size == 0) return;
  if (m.current < 0) { fprintf(stderr, "cuda_host: the host touched shared memory\n"); abort(); }
  if (end == 0) CUDA_HOST_FAIL(nullptr, 0, "uses a null pointer to shared memory");
  const array *a = array_at(begin);
  if (at % size)
    CUDA_HOST_FAIL(a->file, a->line, "byte %lld of %s is no place for %d bytes", (long long)(at - begin), a->name,
                   size);
  CUDA_HOST_FAIL(a->file, a->line, "index %lld (of %d bytes each) is outside %s, %lld bytes",
                 (long long)((at - begin) / size), size, a->name, (long long)(end - begin));
}

}  // namespace cudahost

/* a T * into shared memory: byte offsets of the place and of its array */
template <class T> struct lunacu_shared {
  int64_t at = 0, begin = 0, end = 0;
  lunacu_shared() = default;
  lunacu_shared(std::nullptr_t) {}
  lunacu_shared(int64_t at_, int64_t begin_, int64_t end_) : at(at_), begin(begin_), end(end_) {
    static_assert(std::is_arithmetic<T>::value && (sizeof(T) == 4 || sizeof(T) == 8),
                  "elements of shared memory have 4 or 8 bytes");
  }
  operator lunacu_shared<const T>() const { return {at, begin, end}; }
  cuda_host_element<T> operator[](int64_t i) const { return {*this + i}; }
  cuda_host_element<T> operator*() const { return {*this}; }
  lunacu_shared operator+(int64_t n) const { return {at + n * (int64_t)sizeof(T), begin, end}; }
  lunacu_shared operator-(int64_t n) const { return *this + -n; }
  lunacu_shared &operator+=(int64_t n) { return *this = *this + n; }
  lunacu_shared &operator-=(int64_t n) { return *this = *this + -n; }
  lunacu_shared &operator++() { return *this += 1; }
  lunacu_shared &operator--() { return *this += -1; }
  lunacu_shared operator++(int) { lunacu_shared old = *this; *this += 1; return old; }
  lunacu_shared operator--(int) { lunacu_shared old = *this; *this += -1; return old; }
  int64_t operator-(lunacu_shared o) const { return (at - o.at) / (int64_t)sizeof(T); }
  bool operator==(lunacu_shared o) const { return at == o.at && end == o.end; }
  bool operator!=(lunacu_shared o) const { return !(*this == o); }
  bool operator<(lunacu_shared o) const { return at < o.at; }
  explicit operator bool() const { return end != 0; }
};

/* what p[i] is: reads and writes go through it. `condition ? p[i] : 0` is a whole number here, a float on a GPU: write
   0.0f */
template <class T> struct cuda_host_element {
  typedef typename std::remove_const<T>::type value;
  lunacu_shared<T> p;
  cuda_host_element(lunacu_shared<T> p_) : p(p_) {}
  cuda_host_element(const cuda_host_element &) = default;
  value load() const {
    value x;
    cudahost::check_place(p.at, p.begin, p.end, sizeof(T));
    if (cuda_host.debug)
      for (int64_t i = p.at / 4; i < (p.at + (int64_t)sizeof(T)) / 4; i++) cudahost::note_read(p.begin, i);
    memcpy(&x, cudahost::m.arena + p.at, sizeof x);
    return x;
  }
  value store(value x) const {
    static_assert(!std::is_const<T>::value, "a pointer to const does not write");
    cudahost::check_place(p.at, p.begin, p.end, sizeof(T));
    if (cuda_host.debug)
      for (int64_t i = p.at / 4; i < (p.at + (int64_t)sizeof(T)) / 4; i++) cudahost::note_write(p.begin, i);
    memcpy(cudahost::m.arena + p.at, &x, sizeof x);
    return x;
  }
  operator value() const { return load(); }
  value operator=(value x) const { return store(x); }
  value operator=(const cuda_host_element &o) const { return store(o.load()); }
  value operator+=(value x) const { return store(load() + x); }
  value operator-=(value x) const { return store(load() - x); }
  value operator*=(value x) const { return store(load() * x); }
  value operator/=(value x) const { return store(load() / x); }
  value operator|=(value x) const { return store(load() | x); }
  value operator&=(value x) const { return store(load() & x); }
  value operator^=(value x) const { return store(load() ^ x); }
  value operator++() const { return store(load() + 1); }
  value operator--() const { return store(load() - 1); }
  value operator++(int) const { value old = load(); store(old + 1); return old; }
  value operator--(int) const { value old = load(); store(old - 1); return old; }
  lunacu_shared<T> operator&() const { return p; }
};
/* Where `bytes` bytes are read or written as one (float4: 16): there, and a multiple of so many. */
template <class T> void cuda_host_wide(lunacu_shared<T> p, int bytes) {
  cudahost::check_place(p.at, p.begin, p.end, bytes);
}

/* An asynchronous copy of 4, 8 or 16 bytes of device memory, and the wait for all of the thread's. It is written when
   it is sent, as to hazards, and when it arrives, which is no sooner than its thread waits. */
template <class T> void cuda_host_send(lunacu_shared<T> p, const T *from, int bytes) {
  cudahost::check_place(p.at, p.begin, p.end, bytes);
  if ((uintptr_t)from % (uintptr_t)bytes)
    CUDA_HOST_FAIL(nullptr, 0, "sends %d bytes from %p, which is no place for them", bytes, (const void *)from);
  for (int64_t i = p.at / 4; i < (p.at + bytes) / 4 && cuda_host.debug; i++) {
    cudahost::note_write(p.begin, i);
    cudahost::m.words[i].sent = true;
  }
  cudahost::m.sent_by[cudahost::m.current].push_back({p.at, p.begin, from, bytes});
}
inline void cuda_host_arrive() {
  std::vector<cudahost::sending> &sent = cudahost::m.sent_by[cudahost::m.current];
  for (const cudahost::sending &s : sent) {
    for (int64_t i = s.at / 4; i < (s.at + s.bytes) / 4 && cuda_host.debug; i++) {
      cudahost::m.words[i].sent = false;
      cudahost::note_write(s.begin, i);
    }
    memcpy(cudahost::m.arena + s.at, s.from, (size_t)s.bytes);
  }
  sent.clear();
}

namespace cudahost {

/* A static array gets its place when a launch first comes to it, the same for all its blocks. */
template <class T> lunacu_shared<T> place(array &a, int64_t count, const char *name, const char *file, int line) {
  if (a.launch != m.launch_serial) {
    const int64_t begin = m.used, bytes = count * (int64_t)sizeof(T);
    const long opted = m.limits[m.now->function].max_dynamic;
    m.fixed += (bytes + 15) & ~(int64_t)15;
    if (count <= 0 || m.fixed > DEFAULT_SHARED)
      CUDA_HOST_FAIL(file, line, "%s makes %lld bytes of static shared memory, of 1 to %d", name, (long long)m.fixed,
                     DEFAULT_SHARED);
    if ((size_t)m.fixed + m.now->shared > (opted < 0 ? (size_t)DEFAULT_SHARED : shared_limit()))
      CUDA_HOST_FAIL(file, line, "%s: %lld static and %zu dynamic bytes of shared memory are too many", name,
                     (long long)m.fixed, m.now->shared);
    a = {m.launch_serial, begin, begin + bytes, name, file, line, (int)sizeof(T)};
    m.used += (bytes + 15) & ~(int64_t)15;
    memset(m.arena + begin, 0xff, (size_t)bytes);
    m.arrays.push_back(&a);
  }
  return {a.begin, a.begin, a.end};
}
template <class T> lunacu_shared<T> place_dynamic(const char *name, const char *file, int line) {
  m.dynamic = {0, 0, (int64_t)m.now->shared, name, file, line, (int)sizeof(T)};
  return {0, 0, (int64_t)m.now->shared};
}

/* ---------------------------------------------------------------------------------------------------------------------
   >>streams: queued work, captures, faults
   ------------------------------------------------------------------------------------------------------------------ */
}  // namespace cudahost
struct CUstream_st {
  std::deque<std::shared_ptr<cudahost::work>> queue; std::shared_ptr<cudahost::work> last;
  bool blocking = true, destroyed = false; int device = -1;
};
struct CUevent_st { std::shared_ptr<cudahost::work> mark; bool timing, captured; int device; };
struct CUgraph_st { std::shared_ptr<const std::vector<cudahost::node>> nodes; };
struct CUgraphExec_st { std::shared_ptr<const std::vector<cudahost::node>> nodes; };
namespace cudahost {

/* A fault ends all queued work; every call says so until cuda_host_reset(). */
inline void fault(cudaError_t error) {
  m.sticky = error;
  for (auto &s : m.streams) {
    for (auto &w : s.second->queue) w->done = true;
    s.second->queue.clear();
  }
}

/* A touch of memory that is closed or not there: the host's ends the program, a kernel's is a fault. */
inline void on_signal(int number, siginfo_t *info, void *) {
  if (in_device(info->si_addr) && !m.opened) {
    static const char said[] = "cuda_host: the host touched device memory\n";
    if (write(2, said, sizeof said - 1) < 0) _exit(2);
    _exit(1);
  }
  if (m.running) {
    const char *at = (const char *)info->si_addr, *stack = m.running->stack;
    if (at < stack && at >= stack - 65536) report(m.current, nullptr, 0, "needs more than %zu bytes of stack", STACK);
    else report(m.current, nullptr, 0, "touched %p, which is no device memory (or wrongly aligned)", info->si_addr);
    fault(cudaErrorIllegalAddress);
    abandon();
  }
  /* not ours: happens again, to the old handler */
  sigaction(number, number == SIGSEGV ? &m.old_segv : &m.old_bus, nullptr);
}

inline cudaError_t fail(cudaError_t error) {
  if (error != cudaSuccess && error != cudaErrorNotReady) last_error = error;
  return error;
}

/* Every call starts here: sets the machine up once, and answers what no call gets past. */
inline cudaError_t begin() {
  if (!m.base) {
    make_region();
    m.legacy = std::make_shared<CUstream_st>();
    m.streams[m.legacy.get()] = m.legacy;
    stack_t alternate = {}, old;
    if (sigaltstack(nullptr, &old) == 0 && (old.ss_flags & SS_DISABLE)) {
      static char stack[64 << 10];
      alternate.ss_sp = stack; alternate.ss_size = sizeof stack;
      sigaltstack(&alternate, nullptr);
    }
    struct sigaction action = {};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigaction(SIGSEGV, &action, &m.old_segv);
    sigaction(SIGBUS, &action, &m.old_bus);
  }
  if (cuda_host.devices <= 0) return cudaErrorNoDevice;
  return m.sticky;
}
/* ... and here where a capture in progress does not allow the call, and is spoilt by it. */
inline cudaError_t begin_unsafe() {
  cudaError_t e = begin();
  if (e == cudaSuccess && m.capturing && m.capturing->mode != cudaStreamCaptureModeRelaxed &&
      (m.capturing->mode == cudaStreamCaptureModeGlobal || m.capturing->thread == std::this_thread::get_id())) {
    m.capturing->spoilt = true; e = cudaErrorStreamCaptureUnsupported;
  }
  return e;
}

inline CUstream_st *stream_of(cudaStream_t s) {
  if (!s) return m.legacy.get();
  auto it = m.streams.find(s);
  return it == m.streams.end() || it->second->destroyed ? nullptr : s;
}
/* the legacy stream is of any */
inline int device_of_stream(const CUstream_st *s) { return s->device < 0 ? current_device : s->device; }
inline bool is_captured(CUstream_st *s) { return m.capturing && m.capturing->stream == s; }

inline double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline void run_first(CUstream_st *s);
inline void run_until(const std::shared_ptr<work> &w) {
  opened here;
  while (w && !w->done) run_first(w->stream);
}
inline void run_first(CUstream_st *s) {
  const std::shared_ptr<work> w = s->queue.front();
  for (auto &before : w->after) run_until(before);
  if (m.sticky) return;
  opened here;
  for (int i = 0; i < (int)w->nodes->size() && !m.sticky; i++) {
    if (i == w->fault) fault(cudaErrorIllegalAddress);
    else (*w->nodes)[(size_t)i].run();
  }
  w->time = seconds();
  w->done = true;
  w->after.clear();
  if (!s->queue.empty()) s->queue.pop_front();
}
inline void run_all() {
  std::vector<CUstream_st *> busy;
  opened here;
  for (;;) {
    busy.clear();
    for (auto &s : m.streams) if (!s.second->queue.empty()) busy.push_back(s.first);
    if (busy.empty()) break;
    reseed();
    run_first(busy[random_below((uint32_t)busy.size())]);
  }
  for (auto s = m.streams.begin(); s != m.streams.end();) s = s->second->destroyed ? m.streams.erase(s) : std::next(s);
}
inline cudaError_t wait_for(const std::shared_ptr<work> &w) {
  opened here;
  run_until(w);
  cuda_host.synchronisations++;
  bool idle = true;
  for (auto &s : m.streams) idle = idle && s.second->queue.empty();
  cuda_host.drains += idle;
  check_guards();
  return m.sticky;
}
inline cudaError_t wait_for_all() { opened here; run_all(); return wait_for(nullptr); }

/* Queues nodes, or records them where the stream is captured. `after` is one more thing to wait for; the work is left
   in *mark. */
inline cudaError_t enqueue(CUstream_st *s, std::shared_ptr<const std::vector<node>> nodes,
                           std::shared_ptr<work> after = nullptr, std::shared_ptr<work> *mark = nullptr) {
  if (is_captured(s)) {
    if (m.capturing->spoilt) return cudaErrorStreamCaptureInvalidated;
    m.capturing->nodes.insert(m.capturing->nodes.end(), nodes->begin(), nodes->end());
    return cudaSuccess;
  }
  if (s == m.legacy.get() && m.capturing && m.capturing->stream->blocking) {
    m.capturing->spoilt = true; return cudaErrorStreamCaptureImplicit;
  }
  auto w = std::make_shared<work>();
  w->stream = s;
  w->nodes = nodes;
  if (after && !after->done) w->after.push_back(after);
  if (s == m.legacy.get()) {
    for (auto &o : m.streams)
      if (o.second->blocking && o.first != s && o.second->last && !o.second->last->done)
        w->after.push_back(o.second->last);
  }
  else if (s->blocking && m.legacy->last && !m.legacy->last->done) w->after.push_back(m.legacy->last);
  for (size_t i = 0; i < nodes->size(); i++)
    if ((*nodes)[i].kernel && cuda_host.fault && --cuda_host.fault == 0) w->fault = (int)i;
  s->queue.push_back(w);
  s->last = w;
  if (mark) *mark = w;
  return cudaSuccess;
}
inline cudaError_t enqueue(CUstream_st *s, bool kernel, std::function<void()> run) {
  return enqueue(s, std::make_shared<const std::vector<node>>(1, node{std::move(run), kernel}));
}

inline cudaError_t check_launch(const launch &l) {
  const kernel_limits k = m.limits[l.function];
  const dim3 g = l.grid, b = l.block;
  const size_t maximum = k.max_dynamic >= 0 ? (size_t)k.max_dynamic : DEFAULT_SHARED - k.fixed;
  if (!g.x || !g.y || !g.z || g.x > 0x7fffffffu || g.y > 65535 || g.z > 65535) return cudaErrorInvalidConfiguration;
  if (!b.x || !b.y || !b.z || b.x > 1024 || b.y > 1024 || b.z > 64 || (uint64_t)b.x * b.y * b.z > MAX_THREADS)
    return cudaErrorInvalidValue;
  if (l.shared > maximum || l.shared + k.fixed > shared_limit()) return cudaErrorInvalidConfiguration;
  if (cuda_host.no_image) return (cudaError_t)cuda_host.no_image;
  if (cuda_host.fail_launch && --cuda_host.fail_launch == 0) return cudaErrorLaunchFailure;
  return cudaSuccess;
}

#if defined(__has_builtin)
#if __has_builtin(__builtin_clear_padding)
#define CUDA_HOST_CLEARS_PADDING
#endif
#endif
/* What in an argument may be a pointer. In a struct, numbers beside padding can look like one: those are small, or not
   aligned. */
template <class T> void find_pointers(T x, std::vector<uintptr_t> &found) {
  static_assert(std::is_trivially_copyable<T>::value, "kernel arguments are copied as bytes");
  if (!(std::is_pointer<T>::value || std::is_class<T>::value) || alignof(T) < sizeof(uintptr_t)) return;
#ifdef CUDA_HOST_CLEARS_PADDING
  __builtin_clear_padding(&x);
#else
  if (std::is_class<T>::value) return; /* what lies in the gaps may be an old pointer */
#endif
  for (size_t i = 0; i + sizeof(uintptr_t) <= sizeof(T); i += sizeof(uintptr_t)) {
    uintptr_t p;
    memcpy(&p, (const char *)&x + i, sizeof p);
    if (p && (std::is_pointer<T>::value || (p % 4 == 0 && (uint32_t)p >= 1u << 20))) found.push_back(p);
  }
}

template <class... P, class... A>
cudaError_t start(const char *name, void (*kernel)(P...), dim3 grid, dim3 block, size_t shared, cudaStream_t stream,
                  A &&...arguments) {
  static_assert(sizeof...(P) == sizeof...(A), "a kernel takes as many arguments as it declares");
  static_assert((sizeof(P) + ... + 0) <= 4096, "kernel arguments are at most 4 KB");
  static_assert(!(std::is_reference<P>::value || ... || false), "kernels take no references");
  const alone held(calls);
  cudaError_t e = begin();
  CUstream_st *s = stream_of(stream);
  auto l = std::make_shared<launch>();
  std::tuple<P...> values(static_cast<P>(arguments)...);
  l->name = name;
  l->function = (const void *)kernel;
  l->grid = grid;
  l->block = block;
  l->shared = shared;
  l->device = current_device;
  std::apply([&](const P &...x) { (find_pointers(x, l->pointers), ...); }, values);
  std::apply([&](const P &...x) {
    (l->arguments.emplace_back((const char *)&x, (const char *)(&x + 1)), ...);
  }, values);
  l->call = [kernel, values] { std::apply(kernel, values); };
  if (e == cudaSuccess)
    e = s && !is_elsewhere(device_of_stream(s), "a launch into a stream") ? check_launch(*l)
                                                                          : cudaErrorInvalidResourceHandle;
  if (e == cudaSuccess) e = enqueue(s, true, [l] { run_launch(*l); });
  if (e == cudaSuccess) cuda_host.launches++;
  return fail(e);
}

}  // namespace cudahost

/* After a fault, or between tests: no queued work, no capture, no error, no failure to come, counters at 0. Allocations
   and handles stay. */
inline void cuda_host_reset() {
  using namespace cudahost;
  const alone held(calls);
  fault(cudaSuccess);
  last_error = cudaSuccess;
  m.capturing.reset();
  m.serial = 0;
  cuda_host.fail_allocation = cuda_host.fail_launch = cuda_host.fault = 0;
  cuda_host.launches = cuda_host.products = cuda_host.replays = cuda_host.synchronisations = cuda_host.allocations =
      cuda_host.copies = cuda_host.errors = 0;
  cuda_host.message[0] = 0;
}

/* ---------------------------------------------------------------------------------------------------------------------
   >>runtime
   ------------------------------------------------------------------------------------------------------------------ */
#define CUDA_HOST_BEGIN(how) \
  const cudahost::alone held_(cudahost::calls); \
  if (const cudaError_t begun_ = cudahost::how()) return cudahost::fail(begun_)
#define CUDA_HOST_NEED(condition, error) do { if (!(condition)) return cudahost::fail(error); } while (0)

inline cudaError_t cudaGetLastError() {
  const cudahost::alone held_(cudahost::calls);
  const cudaError_t e = cudahost::m.sticky ? cudahost::m.sticky : cudahost::last_error;
  cudahost::last_error = cudaSuccess;
  return e;
}
inline cudaError_t cudaPeekAtLastError() { return cudahost::m.sticky ? cudahost::m.sticky : cudahost::last_error; }
inline cudaError_t cudaDriverGetVersion(int *version) { *version = 12040; return cudaSuccess; }
inline cudaError_t cudaRuntimeGetVersion(int *version) { *version = 12040; return cudaSuccess; }
inline cudaError_t cudaGetDeviceCount(int *count) {
  *count = cuda_host.devices; CUDA_HOST_BEGIN(begin); return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int device) {
  CUDA_HOST_BEGIN(begin); CUDA_HOST_NEED(device >= 0 && device < cuda_host.devices, cudaErrorInvalidDevice);
  cudahost::current_device = device; return cudaSuccess;
}
inline cudaError_t cudaGetDevice(int *device) {
  CUDA_HOST_BEGIN(begin); *device = cudahost::current_device; return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device) {
  CUDA_HOST_BEGIN(begin);
  CUDA_HOST_NEED(device >= 0 && device < cuda_host.devices, cudaErrorInvalidDevice);
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = cudahost::DEFAULT_SHARED; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMultiProcessorCount: *value = cuda_host.multiprocessors; break;
    case cudaDevAttrComputeCapabilityMajor: *value = cuda_host.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = cuda_host.minor; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (int)cudahost::shared_limit(); break;
    default: return cudahost::fail(cudaErrorInvalidValue);
  }
  return cudaSuccess;
}
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int device) {
  CUDA_HOST_BEGIN(begin);
  CUDA_HOST_NEED(device >= 0 && device < cuda_host.devices, cudaErrorInvalidDevice);
  *p = {};
  snprintf(p->name, sizeof p->name, "cuda_host %d.%d", cuda_host.major, cuda_host.minor);
  p->totalGlobalMem = cuda_host.memory; p->sharedMemPerBlock = cudahost::DEFAULT_SHARED;
  p->sharedMemPerBlockOptin = cudahost::shared_limit();
  p->major = cuda_host.major; p->minor = cuda_host.minor; p->multiProcessorCount = cuda_host.multiprocessors;
  p->warpSize = 32; p->maxThreadsPerBlock = 1024; p->l2CacheSize = 50 << 20;
  return cudaSuccess;
}

inline cudaError_t cudaMalloc(void **p, size_t n) {
  CUDA_HOST_BEGIN(begin_unsafe);
  CUDA_HOST_NEED(p, cudaErrorInvalidValue);
  *p = nullptr;
  if (!n) return cudaSuccess;
  CUDA_HOST_NEED(!(cuda_host.fail_allocation && --cuda_host.fail_allocation == 0), cudaErrorMemoryAllocation);
  CUDA_HOST_NEED(n <= cuda_host.memory && cuda_host.allocated <= cuda_host.memory - n, cudaErrorMemoryAllocation);
  CUDA_HOST_NEED((*p = cudahost::take(n)) != nullptr, cudaErrorMemoryAllocation);
  cuda_host.allocations++;
  cuda_host.allocated += n;
  cuda_host.max_allocated = std::max(cuda_host.max_allocated, cuda_host.allocated);
  return cudaSuccess;
}
template <class T> cudaError_t cudaMalloc(T **p, size_t n) { return cudaMalloc((void **)p, n); }
/* After a fault memory is given back all the same, and the error said, so that a test can see that nothing was
   forgotten. */
inline cudaError_t cudaFree(void *p) {
  const cudahost::alone held_(cudahost::calls);
  const cudaError_t e = cudahost::begin_unsafe();
  CUDA_HOST_NEED(e == cudaSuccess || e == cudahost::m.sticky, e);
  if (!p) return cudahost::fail(e);
  auto it = cudahost::m.device.find((uintptr_t)p);
  CUDA_HOST_NEED(it != cudahost::m.device.end(), cudaErrorInvalidValue);
  const cudaError_t ended = cudahost::wait_for_all();
  cuda_host.allocated -= it->second;
  cudahost::give((uintptr_t)p);
  return cudahost::fail(ended);
}
inline cudaError_t cudaHostAlloc(void **p, size_t n, unsigned flags) {
  CUDA_HOST_BEGIN(begin_unsafe);
  CUDA_HOST_NEED(p && flags <= 7, cudaErrorInvalidValue);
  *p = nullptr;
  if (!n) return cudaSuccess;
  CUDA_HOST_NEED(!(cuda_host.fail_allocation && --cuda_host.fail_allocation == 0) && (*p = malloc(n)) != nullptr,
                 cudaErrorMemoryAllocation);
  memset(*p, 0xff, n);
  cuda_host.allocations++;
  cudahost::m.pinned[(uintptr_t)*p] = n;
  return cudaSuccess;
}
template <class T> cudaError_t cudaHostAlloc(T **p, size_t n, unsigned flags) {
  return cudaHostAlloc((void **)p, n, flags);
}
template <class T> cudaError_t cudaMallocHost(T **p, size_t n, unsigned flags = 0) {
  return cudaHostAlloc((void **)p, n, flags);
}
inline cudaError_t cudaFreeHost(void *p) {
  const cudahost::alone held_(cudahost::calls);
  const cudaError_t e = cudahost::begin_unsafe();
  CUDA_HOST_NEED(e == cudaSuccess || e == cudahost::m.sticky, e);
  if (!p) return cudahost::fail(e);
  CUDA_HOST_NEED(cudahost::m.pinned.count((uintptr_t)p), cudaErrorInvalidValue);
  const cudaError_t ended = cudahost::wait_for_all();
  cudahost::m.pinned.erase((uintptr_t)p);
  free(p);
  return cudahost::fail(ended);
}
inline cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
  CUDA_HOST_BEGIN(begin);
  *total = cuda_host.memory;
  *free_bytes = cuda_host.memory - std::min(cuda_host.memory, cuda_host.allocated);
  return cudaSuccess;
}
inline cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *a, const void *p) {
  CUDA_HOST_BEGIN(begin);
  const cudaMemoryType type = cudahost::in_device(p) && !cudahost::lies_in(cudahost::m.device, p, 1) ?
      cudaMemoryTypeUnregistered : cudahost::type_of(p);
  *a = {type, type == cudaMemoryTypeUnregistered ? -2 : type == cudaMemoryTypeDevice ? cudahost::device_of(p) : 0,
        type ? (void *)p : nullptr, type == cudaMemoryTypeHost ? (void *)p : nullptr};
  return cudaSuccess;
}

namespace cudahost {

/* A copy's end, good until the copy runs: device and pinned memory must still be allocated then. */
inline bool is_good(cudaMemoryType type, const void *p, size_t n) {
  return type == cudaMemoryTypeUnregistered || lies_in(type == cudaMemoryTypeDevice ? m.device : m.pinned, p, n);
}
inline cudaError_t copy(void *to, const void *from, size_t n, cudaMemcpyKind kind, cudaStream_t stream, bool waits) {
  CUDA_HOST_BEGIN(begin);
  CUstream_st *s = stream_of(stream);
  CUDA_HOST_NEED(s, cudaErrorInvalidResourceHandle);
  if (waits) { CUDA_HOST_BEGIN(begin_unsafe); }
  if (!n) return cudaSuccess;
  const cudaMemoryType a = type_of(to), b = type_of(from);
  CUDA_HOST_NEED(to && from && is_good(a, to, n) && is_good(b, from, n), cudaErrorInvalidValue);
  CUDA_HOST_NEED(kind >= 0 && kind <= cudaMemcpyDefault, cudaErrorInvalidMemcpyDirection);
  if (kind != cudaMemcpyDefault)
    CUDA_HOST_NEED((a == cudaMemoryTypeDevice) == (kind == cudaMemcpyHostToDevice ||
                                                   kind == cudaMemcpyDeviceToDevice) &&
                   (b == cudaMemoryTypeDevice) == (kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice),
                       cudaErrorInvalidValue);
  if (a == cudaMemoryTypeDevice && b == cudaMemoryTypeDevice) waits = false;   /* as CUDA: the host goes on */
  const bool pageable = a == cudaMemoryTypeUnregistered || b == cudaMemoryTypeUnregistered;
  if (is_captured(s) && pageable) {
    report(-1, nullptr, 0, "a captured copy %s pageable host memory %p", a ? "from" : "to", a ? (void *)from : to);
    m.capturing->spoilt = true;
    return fail(cudaErrorStreamCaptureUnsupported);
  }
  if (a == cudaMemoryTypeDevice && b == a && (const char *)to < (const char *)from + n &&
      (const char *)from < (char *)to + n) {
    report(-1, nullptr, 0, "a copy of %zu bytes from %p to %p, which overlap", n, from, to);
    return fail(cudaErrorInvalidValue);
  }
  cuda_host.copies++;
  std::shared_ptr<std::vector<char>> staged;
  if (!waits && !b && a) staged = std::make_shared<std::vector<char>>((const char *)from, (const char *)from + n);
  const cudaError_t e = enqueue(s, false, [=] {
    if (!is_good(a, to, n) || !is_good(b, from, n)) {
      report(-1, nullptr, 0, "a copy of %zu bytes from %p to %p came after their end", n, from, to);
      return fault(cudaErrorIllegalAddress);
    }
    memmove(to, staged ? staged->data() : from, n);
  });
  if (e != cudaSuccess || (!waits && a)) return fail(e);
  if (!waits && !pageable) return cudaSuccess;
  return fail(wait_for(s->last));
}
inline cudaError_t fill(void *to, int byte, size_t n, cudaStream_t stream) {
  CUDA_HOST_BEGIN(begin);
  CUstream_st *s = stream_of(stream);
  CUDA_HOST_NEED(s, cudaErrorInvalidResourceHandle);
  if (!n) return cudaSuccess;
  const cudaMemoryType type = type_of(to);
  CUDA_HOST_NEED(type != cudaMemoryTypeUnregistered && is_good(type, to, n), cudaErrorInvalidValue);
  CUDA_HOST_NEED(!is_elsewhere(device_of_stream(s), "a fill in a stream"), cudaErrorInvalidResourceHandle);
  CUDA_HOST_NEED(type != cudaMemoryTypeDevice || !is_elsewhere(device_of(to), "a fill of memory"),
                 cudaErrorInvalidValue);
  return fail(enqueue(s, false, [=] {
    if (is_good(type, to, n)) {
      if (type == cudaMemoryTypeDevice) blank(to, n, byte);
      else memset(to, byte, n);
      return;
    }
    report(-1, nullptr, 0, "a fill of %zu bytes at %p came after their end", n, to);
    fault(cudaErrorIllegalAddress);
  }));
}

}  // namespace cudahost

inline cudaError_t cudaMemcpy(void *to, const void *from, size_t n, cudaMemcpyKind kind) {
  return cudahost::copy(to, from, n, kind, nullptr, true);
}
inline cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n, cudaMemcpyKind kind,
                                   cudaStream_t s = nullptr) { return cudahost::copy(to, from, n, kind, s, false); }
inline cudaError_t cudaMemset(void *to, int byte, size_t n) {
  CUDA_HOST_BEGIN(begin_unsafe); return cudahost::fill(to, byte, n, nullptr);
}
inline cudaError_t cudaMemsetAsync(void *to, int byte, size_t n, cudaStream_t s = nullptr) {
  return cudahost::fill(to, byte, n, s);
}

inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
  CUDA_HOST_BEGIN(begin);
  CUDA_HOST_NEED(stream && flags <= 1, cudaErrorInvalidValue);
  auto s = std::make_shared<CUstream_st>();
  s->blocking = flags == cudaStreamDefault;
  s->device = cudahost::current_device;
  cudahost::m.streams[s.get()] = s;
  *stream = s.get();
  return cudaSuccess;
}
inline cudaError_t cudaStreamCreate(cudaStream_t *stream) {
  return cudaStreamCreateWithFlags(stream, cudaStreamDefault);
}
/* queued work still runs when the device is waited for */
inline cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const cudahost::alone held_(cudahost::calls);
  const cudaError_t e = cudahost::begin();
  CUstream_st *s = stream ? cudahost::stream_of(stream) : nullptr;
  CUDA_HOST_NEED(s, cudaErrorInvalidResourceHandle);
  if (cudahost::is_captured(s)) cudahost::m.capturing.reset();
  s->destroyed = true;
  return cudahost::fail(e);
}
inline cudaError_t cudaDeviceSynchronize() {
  CUDA_HOST_BEGIN(begin_unsafe); return cudahost::fail(cudahost::wait_for_all());
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  CUDA_HOST_BEGIN(begin_unsafe);
  CUstream_st *s = cudahost::stream_of(stream);
  CUDA_HOST_NEED(s, cudaErrorInvalidResourceHandle);
  CUDA_HOST_NEED(!cudahost::is_captured(s), cudaErrorStreamCaptureUnsupported);
  return cudahost::fail(cudahost::wait_for(s->last));
}
/* one piece of work each: polling makes progress */
inline cudaError_t cudaStreamQuery(cudaStream_t stream) {
  CUDA_HOST_BEGIN(begin_unsafe);
  CUstream_st *s = cudahost::stream_of(stream);
  CUDA_HOST_NEED(s, cudaErrorInvalidResourceHandle);
  if (!s->queue.empty()) cudahost::run_first(s);
  return cudahost::fail(cudahost::m.sticky ? cudahost::m.sticky : s->queue.empty() ? cudaSuccess : cudaErrorNotReady);
}

inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
  CUDA_HOST_BEGIN(begin);
  CUDA_HOST_NEED(event && flags <= 3, cudaErrorInvalidValue);
  *event = new CUevent_st{nullptr, !(flags & cudaEventDisableTiming), false, cudahost::current_device};
  return cudaSuccess;
}
inline cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, cudaEventDefault); }
inline cudaError_t cudaEventDestroy(cudaEvent_t event) {
  const cudahost::alone held_(cudahost::calls);
  const cudaError_t e = cudahost::begin(); CUDA_HOST_NEED(event, cudaErrorInvalidResourceHandle); delete event;
  return cudahost::fail(e);
}
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream = nullptr) {
  CUDA_HOST_BEGIN(begin);
  CUstream_st *s = cudahost::stream_of(stream);
  CUDA_HOST_NEED(event && s, cudaErrorInvalidResourceHandle);
  if (event->device != cudahost::device_of_stream(s)) {
    cudahost::report(-1, nullptr, 0, "an event of device %d is recorded in a stream of device %d", event->device,
                     cudahost::device_of_stream(s));
    return cudahost::fail(cudaErrorInvalidResourceHandle);
  }
  event->mark = nullptr;
  event->captured = cudahost::is_captured(s);
  return cudahost::fail(cudahost::enqueue(s, std::make_shared<const std::vector<cudahost::node>>(), nullptr,
                                          &event->mark));
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  CUDA_HOST_BEGIN(begin_unsafe);
  CUDA_HOST_NEED(event, cudaErrorInvalidResourceHandle);
  CUDA_HOST_NEED(!event->captured, cudaErrorCapturedEvent);
  return cudahost::fail(cudahost::wait_for(event->mark));
}
inline cudaError_t cudaEventQuery(cudaEvent_t event) {
  CUDA_HOST_BEGIN(begin_unsafe);
  CUDA_HOST_NEED(event, cudaErrorInvalidResourceHandle);
  CUDA_HOST_NEED(!event->captured, cudaErrorCapturedEvent);
  if (event->mark && !event->mark->done) cudahost::run_first(event->mark->stream);
  return cudahost::fail(cudahost::m.sticky ? cudahost::m.sticky : !event->mark ||
                        event->mark->done ? cudaSuccess : cudaErrorNotReady);
}
inline cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to) {
  CUDA_HOST_BEGIN(begin);
  CUDA_HOST_NEED(from && to && from->timing && to->timing && from->mark && to->mark, cudaErrorInvalidResourceHandle);
  CUDA_HOST_NEED(from->mark->done && to->mark->done, cudaErrorNotReady);
  *milliseconds = (float)((to->mark->time - from->mark->time) * 1e3);
  return cudaSuccess;
}
inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned = 0) {
  CUDA_HOST_BEGIN(begin);
  CUstream_st *s = cudahost::stream_of(stream);
  CUDA_HOST_NEED(s && event, cudaErrorInvalidResourceHandle);
  /* within one captured stream the order is there already */
  if (event->captured || cudahost::is_captured(s)) {
    if (event->captured && cudahost::is_captured(s)) return cudaSuccess;
    if (cudahost::m.capturing) cudahost::m.capturing->spoilt = true;
    return cudahost::fail(event->captured ? cudaErrorStreamCaptureUnsupported : cudaErrorStreamCaptureIsolation);
  }
  return cudahost::fail(cudahost::enqueue(s, std::make_shared<const std::vector<cudahost::node>>(), event->mark));
}

namespace cudahost {
inline cudaError_t begin_capture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  CUDA_HOST_BEGIN(begin);
  CUstream_st *s = cudahost::stream_of(stream);
  CUDA_HOST_NEED(s, cudaErrorInvalidResourceHandle);
  CUDA_HOST_NEED(stream, cudaErrorStreamCaptureUnsupported);
  CUDA_HOST_NEED(!cudahost::m.capturing, cudaErrorIllegalState);
  cudahost::m.capturing.reset(new cudahost::capture{s, mode, std::this_thread::get_id(), false, {}});
  return cudaSuccess;
}
}  // namespace cudahost
/* then other threads have a turn, so that what they may not do while a stream is captured shows */
inline cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  const cudaError_t error = cudahost::begin_capture(stream, mode);
  std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return error;
}
inline cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
  CUDA_HOST_BEGIN(begin);
  CUDA_HOST_NEED(graph, cudaErrorInvalidValue);
  *graph = nullptr;
  CUDA_HOST_NEED(stream && cudahost::is_captured(cudahost::stream_of(stream)), cudaErrorIllegalState);
  const std::unique_ptr<cudahost::capture> c = std::move(cudahost::m.capturing);
  CUDA_HOST_NEED(!c->spoilt, cudaErrorStreamCaptureInvalidated);
  *graph = new CUgraph_st{std::make_shared<const std::vector<cudahost::node>>(std::move(c->nodes))};
  return cudaSuccess;
}
inline cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status) {
  CUDA_HOST_BEGIN(begin);
  CUstream_st *s = cudahost::stream_of(stream);
  CUDA_HOST_NEED(s && status, cudaErrorInvalidValue);
  *status = !cudahost::is_captured(s) ? cudaStreamCaptureStatusNone : cudahost::m.capturing->spoilt ?
      cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}
inline cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long = 0) {
  CUDA_HOST_BEGIN(begin);
  CUDA_HOST_NEED(exec && graph, cudaErrorInvalidValue);
  *exec = new CUgraphExec_st{graph->nodes};
  return cudaSuccess;
}
inline cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  CUDA_HOST_BEGIN(begin);
  CUstream_st *s = cudahost::stream_of(stream);
  CUDA_HOST_NEED(exec && s, cudaErrorInvalidValue);
  cuda_host.replays++;
  return cudahost::fail(cudahost::enqueue(s, exec->nodes));
}
inline cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  const cudahost::alone held_(cudahost::calls);
  const cudaError_t e = cudahost::begin(); CUDA_HOST_NEED(exec, cudaErrorInvalidValue); delete exec;
  return cudahost::fail(e);
}
inline cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  const cudahost::alone held_(cudahost::calls);
  const cudaError_t e = cudahost::begin(); CUDA_HOST_NEED(graph, cudaErrorInvalidValue); delete graph;
  return cudahost::fail(e);
}
/* the count; there is nothing to see in a node */
inline cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
  CUDA_HOST_BEGIN(begin);
  CUDA_HOST_NEED(graph && count, cudaErrorInvalidValue);
  if (nodes) for (size_t i = 0; i < *count; i++) nodes[i] = nullptr;
  *count = graph->nodes->size();
  return cudaSuccess;
}

template <class K> cudaError_t cudaFuncSetAttribute(K *kernel, cudaFuncAttribute attribute, int value) {
  CUDA_HOST_BEGIN(begin);
  cudahost::kernel_limits &k = cudahost::m.limits[(const void *)kernel];
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  CUDA_HOST_NEED(value >= 0 && (size_t)value + k.fixed <= cudahost::shared_limit(), cudaErrorInvalidValue);
  k.max_dynamic = value;
  return cudaSuccess;
}
template <class K> cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *a, K *kernel) {
  CUDA_HOST_BEGIN(begin);
  CUDA_HOST_NEED(!cuda_host.no_image, (cudaError_t)cuda_host.no_image);
  const cudahost::kernel_limits k = cudahost::m.limits[(const void *)kernel];
  *a = {k.fixed, 32, 1024, k.max_dynamic < 0 ? cudahost::DEFAULT_SHARED : (int)k.max_dynamic};
  return cudaSuccess;
}
template <class K> cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, K *, int, size_t) {
  CUDA_HOST_BEGIN(begin); *blocks = 2; return cudaSuccess;
}

/* ---------------------------------------------------------------------------------------------------------------------
   >>cublas: column-major products by luna_gemm_f32, which sees the transposes
   ------------------------------------------------------------------------------------------------------------------ */
#define CUDA_HOST_CUBLAS(X) \
  X(CUBLAS_STATUS_SUCCESS, 0) X(CUBLAS_STATUS_NOT_INITIALIZED, 1) X(CUBLAS_STATUS_ALLOC_FAILED, \
                                                                    3) X(CUBLAS_STATUS_INVALID_VALUE, 7) \
  X(CUBLAS_STATUS_ARCH_MISMATCH, 8) X(CUBLAS_STATUS_MAPPING_ERROR, 11) X(CUBLAS_STATUS_EXECUTION_FAILED, \
      13) X(CUBLAS_STATUS_INTERNAL_ERROR, 14) \
  X(CUBLAS_STATUS_NOT_SUPPORTED, 15)
#define CUDA_HOST_STATUS(name, value) name = value,
#define CUDA_HOST_STATUS_NAME(name, value) case name: return #name;
enum cublasStatus_t { CUDA_HOST_CUBLAS(CUDA_HOST_STATUS) };
inline const char *cublasGetStatusName(cublasStatus_t s) {
  switch (s) { CUDA_HOST_CUBLAS(CUDA_HOST_STATUS_NAME) } return "unknown";
}
inline const char *cublasGetStatusString(cublasStatus_t s) { return cublasGetStatusName(s); }
enum cublasOperation_t { CUBLAS_OP_N, CUBLAS_OP_T, CUBLAS_OP_C };
enum cublasMath_t {
  CUBLAS_DEFAULT_MATH = 0, CUBLAS_TENSOR_OP_MATH = 1, CUBLAS_PEDANTIC_MATH = 2, CUBLAS_TF32_TENSOR_OP_MATH = 3
};
enum cublasAtomicsMode_t { CUBLAS_ATOMICS_NOT_ALLOWED, CUBLAS_ATOMICS_ALLOWED };
enum cublasPointerMode_t { CUBLAS_POINTER_MODE_HOST, CUBLAS_POINTER_MODE_DEVICE };
enum cublasComputeType_t {
  CUBLAS_COMPUTE_32F = 68, CUBLAS_COMPUTE_32F_PEDANTIC = 69, CUBLAS_COMPUTE_32F_FAST_16F = 74,
      CUBLAS_COMPUTE_32F_FAST_16BF = 75, CUBLAS_COMPUTE_32F_FAST_TF32 = 77
};
enum cublasGemmAlgo_t { CUBLAS_GEMM_DEFAULT = -1 };
enum cudaDataType_t { CUDA_R_32F = 0, CUDA_R_64F = 1, CUDA_R_16F = 2, CUDA_R_16BF = 14 };
typedef cudaDataType_t cudaDataType;
struct cublasContext {
  cudaStream_t stream; void *workspace; size_t workspace_size; cublasMath_t math; cublasPointerMode_t pointers;
  int device;
};
typedef cublasContext *cublasHandle_t;

inline cublasStatus_t cublasCreate(cublasHandle_t *handle) {
  if (!handle) return CUBLAS_STATUS_INVALID_VALUE;
  *handle = nullptr;
  const cudahost::alone held_(cudahost::calls);
  if (cudahost::begin_unsafe() != cudaSuccess) return CUBLAS_STATUS_NOT_INITIALIZED;
  if (cuda_host.fail_allocation && --cuda_host.fail_allocation == 0) return CUBLAS_STATUS_ALLOC_FAILED;
  *handle = new cublasContext{
    nullptr, nullptr, 0, CUBLAS_DEFAULT_MATH, CUBLAS_POINTER_MODE_HOST, cudahost::current_device
  };
  return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasDestroy(cublasHandle_t h) {              /* waits for the device, as cuBLAS does */
  if (!h) return CUBLAS_STATUS_NOT_INITIALIZED;
  const cudahost::alone held_(cudahost::calls);
  if (cudahost::begin_unsafe() == cudaSuccess) cudahost::wait_for_all();
  delete h;
  return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasSetStream(cublasHandle_t h, cudaStream_t s) {   /* forgets the workspace, as cuBLAS does */
  if (!h) return CUBLAS_STATUS_NOT_INITIALIZED;
  h->stream = s; h->workspace = nullptr; h->workspace_size = 0;
  return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasSetWorkspace(cublasHandle_t h, void *workspace, size_t size) {
  if (!h) return CUBLAS_STATUS_NOT_INITIALIZED;
  const cudahost::alone held_(cudahost::calls);
  if ((uintptr_t)workspace % 256 || (workspace && !cudahost::lies_in(cudahost::m.device, workspace, size)))
    return CUBLAS_STATUS_INVALID_VALUE;
  h->workspace = workspace; h->workspace_size = size;
  return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasSetMathMode(cublasHandle_t h, cublasMath_t mode) {
  if (h) h->math = mode;
  return h ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_INITIALIZED;
}
inline cublasStatus_t cublasSetAtomicsMode(cublasHandle_t h, cublasAtomicsMode_t) {
  return h ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_INITIALIZED;
}
inline cublasStatus_t cublasSetPointerMode(cublasHandle_t h, cublasPointerMode_t mode) {
  if (h) h->pointers = mode;
  return h ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_INITIALIZED;
}
inline cublasStatus_t cublasGetVersion(cublasHandle_t, int *version) {
  *version = 120400; return CUBLAS_STATUS_SUCCESS;
}

namespace cudahost {

inline float rounded(float x, int bits) {    /* to so many bits of mantissa, ties to even */
  uint32_t u, drop = (uint32_t)(23 - bits);
  memcpy(&u, &x, 4);
  if ((u & 0x7f800000u) == 0x7f800000u) return x;
  u = (u + ((1u << (drop - 1)) - 1) + (u >> drop & 1)) & ~((1u << drop) - 1);
  memcpy(&x, &u, 4);
  return x;
}

struct product {
  cublasOperation_t op_a, op_b;
  int64_t m, n, k, batch, lda, ldb, ldc, stride_a, stride_b, stride_c;
  float alpha, beta;
  const float *a, *b;
  float *c;
  int bits;                                  /* of mantissa that the inputs keep */
  void *workspace;
  size_t workspace_size;
  const float *start = nullptr, *bias = nullptr; /* cuBLASLt's C, [m] */

  /* All matrices [rows, columns] of the batch lie in device memory. */
  static bool fits(const float *p, int64_t rows, int64_t columns, int64_t ld, int64_t stride, int64_t count) {
    const int64_t size = (columns - 1) * ld + rows, low = std::min<int64_t>(0, (count - 1) * stride),
        high = std::max<int64_t>(0, (count - 1) * stride) + size;
    return rows <= 0 || columns <= 0 || lies_in(m_device(), p + low, (size_t)(high - low) * sizeof(float));
  }
  static const std::map<uintptr_t, size_t> &m_device() { return cudahost::m.device; }

  void run() const {
    const int64_t a_rows = op_a ? k : m, a_columns = op_a ? m : k, b_rows = op_b ? n : k, b_columns = op_b ? k : n;
    const bool multiplies = k > 0 && alpha != 0;
    if (!fits(c, m, n, ldc, stride_c, batch) || (start && !fits(start, m, n, ldc, 0, 1)) ||
        (bias && !fits(bias, m, 1, m, 0, 1)) || (multiplies &&
        (!fits(a, a_rows, a_columns, lda, stride_a, batch) || !fits(b, b_rows, b_columns, ldb, stride_b, batch))) ||
        (workspace && !lies_in(m_device(), workspace, workspace_size))) {
      report(-1, nullptr, 0, "a cuBLAS product [%lld, %lld, %lld] x %lld goes outside its allocations", (long long)m,
             (long long)n, (long long)k, (long long)batch);
      return fault(cudaErrorIllegalAddress);
    }
    if (workspace) memset(workspace, 0xff, std::min<size_t>(workspace_size, 65536));   /* and its users must know */
    const int64_t few = 2 * (int64_t)cuda_host.sample;
    if (few && n > few) { /* the columns of C, which are luna.h's rows, at either end, where B is flat */
      const int64_t step = op_b == CUBLAS_OP_N ? ldb : 1, ends[2] = {0, n - few / 2};
      for (int64_t at : ends) {
        product part = *this;
        part.n = few / 2; part.b = b + at * step; part.c = c + at * ldc; part.start = start ? start + at * ldc : start;
        part.run();
      }
      return;
    }
    std::vector<float> kept_a, kept_b;
    std::vector<char> scratch;
    for (int64_t s = 0; s < batch; s++) {
      if (few && s >= few / 2 && s < batch - few / 2) continue;
      float *out = c + s * stride_c;
      if (beta != 1 || !multiplies)
        for (int64_t j = 0; j < n; j++)
          for (int64_t i = 0; i < m; i++) out[j * ldc + i] = beta == 0 ? 0 : beta * out[j * ldc + i];
      else if (start && start != out)
        for (int64_t j = 0; j < n; j++) memcpy(out + j * ldc, start + j * ldc, (size_t)m * sizeof(float));
      if (!multiplies) continue;
      cuda_host.multiplied += (double)m * (double)n * (double)k;
      luna_gemm_args args = {};
      args.a = keep(b + s * stride_b, b_rows, b_columns, ldb, kept_b);     /* row-major C^T = op(B)^T op(A)^T */
      args.b = keep(a + s * stride_a, a_rows, a_columns, lda, kept_a);
      args.c = out;
      args.m = n; args.n = m; args.k = k; args.batch = 1;
      args.transpose_a = op_b != CUBLAS_OP_N; args.transpose_b = op_a != CUBLAS_OP_N;
      args.a_row = ldb; args.b_row = lda; args.c_row = ldc;
      args.scale = alpha;
      args.accumulate = beta != 0;
      scratch.resize(luna_gemm_scratch(&args));
      args.run.scratch = scratch.data(); args.run.scratch_size = scratch.size();
      if (luna_gemm_f32(&args) != LUNA_OK) report(-1, nullptr, 0, "luna_gemm_f32 refused a product");
      for (int64_t j = 0; j < n && bias; j++)
        for (int64_t i = 0; i < m; i++) out[j * ldc + i] += bias[i];
    }
  }
  const float *keep(const float *p, int64_t rows, int64_t columns, int64_t ld, std::vector<float> &copy) const {
    if (bits >= 23) return p;
    copy.assign((size_t)(columns * ld), 0.0f);
    for (int64_t j = 0; j < columns; j++)
      for (int64_t i = 0; i < rows; i++) copy[(size_t)(j * ld + i)] = rounded(p[j * ld + i], bits);
    return copy.data();
  }
};

inline cublasStatus_t multiply(cublasHandle_t h, product p, const float *alpha, const float *beta,
                               cublasComputeType_t compute) {
  if (!h) return CUBLAS_STATUS_NOT_INITIALIZED;
  const alone held(calls);
  if (begin() != cudaSuccess) return CUBLAS_STATUS_EXECUTION_FAILED;
  if (p.op_a < 0 || p.op_a > 2 || p.op_b < 0 || p.op_b > 2 || p.m < 0 || p.n < 0 || p.k < 0 || p.batch < 0 || !alpha ||
      !beta) return CUBLAS_STATUS_INVALID_VALUE;
  if (p.lda < std::max<int64_t>(1, p.op_a ? p.k : p.m) || p.ldb < std::max<int64_t>(1, p.op_b ? p.n : p.k) ||
      p.ldc < std::max<int64_t>(1, p.m)) return CUBLAS_STATUS_INVALID_VALUE;
  if (h->pointers != CUBLAS_POINTER_MODE_HOST || type_of(alpha) == cudaMemoryTypeDevice ||
      type_of(beta) == cudaMemoryTypeDevice) return CUBLAS_STATUS_NOT_SUPPORTED;
  if (!p.m || !p.n || !p.batch) return CUBLAS_STATUS_SUCCESS;
  CUstream_st *s = stream_of(h->stream);
  if (is_elsewhere(h->device, "a product by a handle") ||
      is_elsewhere(s ? device_of_stream(s) : h->device, "a product in a stream") ||
      is_elsewhere(device_of(p.c), "a product in memory"))
    return CUBLAS_STATUS_EXECUTION_FAILED;
  if (!s || (cuda_host.fail_launch && --cuda_host.fail_launch == 0)) return CUBLAS_STATUS_EXECUTION_FAILED;
  p.alpha = *alpha; p.beta = *beta;
  p.bits = compute == CUBLAS_COMPUTE_32F_FAST_16BF ? 7 : compute == CUBLAS_COMPUTE_32F_FAST_TF32 ||
      compute == CUBLAS_COMPUTE_32F_FAST_16F ? 10
         : compute == CUBLAS_COMPUTE_32F && h->math == CUBLAS_TF32_TENSOR_OP_MATH ? 10 : 23;
  p.workspace = h->workspace; p.workspace_size = h->workspace_size;
  if (enqueue(s, true, [p] { p.run(); }) != cudaSuccess) return CUBLAS_STATUS_EXECUTION_FAILED;
  cuda_host.products++;
  return CUBLAS_STATUS_SUCCESS;
}

}  // namespace cudahost

inline cublasStatus_t cublasSgemmStridedBatched(cublasHandle_t h, cublasOperation_t op_a, cublasOperation_t op_b, int m,
                                                int n, int k, const float *alpha, const float *a, int lda,
    long long stride_a, const float *b, int ldb, long long stride_b, const float *beta, float *c, int ldc,
        long long stride_c, int batch) {
  return cudahost::multiply(h, {op_a, op_b, m, n, k, batch, lda, ldb, ldc, stride_a, stride_b, stride_c, 0, 0, a, b, c,
                                23, nullptr, 0}, alpha, beta, CUBLAS_COMPUTE_32F);
}
inline cublasStatus_t cublasSgemm(cublasHandle_t h, cublasOperation_t op_a, cublasOperation_t op_b, int m, int n, int k,
                                  const float *alpha, const float *a, int lda,
    const float *b, int ldb, const float *beta, float *c, int ldc) {
  return cublasSgemmStridedBatched(h, op_a, op_b, m, n, k, alpha, a, lda, 0, b, ldb, 0, beta, c, ldc, 0, 1);
}
inline cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t h, cublasOperation_t op_a, cublasOperation_t op_b,
    int m, int n, int k, const void *alpha, const void *a, cudaDataType type_a,
    int lda, long long stride_a, const void *b, cudaDataType type_b, int ldb, long long stride_b, const void *beta,
        void *c, cudaDataType type_c, int ldc, long long stride_c, int batch,
    cublasComputeType_t compute, cublasGemmAlgo_t) {
  if (type_a != CUDA_R_32F || type_b != CUDA_R_32F || type_c != CUDA_R_32F) return CUBLAS_STATUS_NOT_SUPPORTED;
  return cudahost::multiply(h, {op_a, op_b, m, n, k, batch, lda, ldb, ldc, stride_a, stride_b, stride_c, 0, 0,
                                (const float *)a, (const float *)b, (float *)c, 23, nullptr, 0},
                            (const float *)alpha, (const float *)beta, compute);
}
inline cublasStatus_t cublasGemmEx(cublasHandle_t h, cublasOperation_t op_a, cublasOperation_t op_b, int m, int n,
                                   int k, const void *alpha, const void *a, cudaDataType type_a, int lda,
    const void *b, cudaDataType type_b, int ldb, const void *beta, void *c, cudaDataType type_c, int ldc,
        cublasComputeType_t compute, cublasGemmAlgo_t algorithm) {
  return cublasGemmStridedBatchedEx(h, op_a, op_b, m, n, k, alpha, a, type_a, lda, 0, b, type_b, ldb, 0, beta, c,
                                    type_c, ldc, 0, 1, compute, algorithm);
}

/* cuBLASLt: alpha and beta 1, or beta 0; a way of computing is for the alignments that were stated, and no others */
enum cublasLtEpilogue_t { CUBLASLT_EPILOGUE_DEFAULT = 1, CUBLASLT_EPILOGUE_BIAS = 4 };
enum cublasLtMatmulDescAttributes_t {
  CUBLASLT_MATMUL_DESC_TRANSA = 3, CUBLASLT_MATMUL_DESC_TRANSB = 4, CUBLASLT_MATMUL_DESC_EPILOGUE = 7,
  CUBLASLT_MATMUL_DESC_BIAS_POINTER = 8
};
enum cublasLtMatmulPreferenceAttributes_t {
  CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES = 1, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES = 5,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES
};
struct cuda_host_product {
  cublasComputeType_t compute; int32_t op[2] = {0, 0}; int32_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  const float *bias = nullptr;
};
struct cuda_host_layout { uint64_t rows, columns; int64_t ld; };
struct cuda_host_wish { uint64_t room = 0; uint32_t alignment[4] = {256, 256, 256, 256}; };
struct cublasLtMatmulAlgo_t { uint64_t data[8]; };
struct cublasLtMatmulHeuristicResult_t {
  cublasLtMatmulAlgo_t algo; size_t workspaceSize; cublasStatus_t state; float wavesCount; int reserved[4];
};
typedef cublasContext *cublasLtHandle_t;
typedef cuda_host_product *cublasLtMatmulDesc_t;
typedef cuda_host_layout *cublasLtMatrixLayout_t;
typedef cuda_host_wish *cublasLtMatmulPreference_t;
inline cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *what, cublasComputeType_t compute,
                                               cudaDataType_t type) {
  if (type != CUDA_R_32F) return CUBLAS_STATUS_NOT_SUPPORTED;
  *what = new cuda_host_product{compute};
  return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t what) {
  delete what;
  return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t what, cublasLtMatmulDescAttributes_t name,
                                                     const void *value, size_t size) {
  void *const to = name == CUBLASLT_MATMUL_DESC_TRANSA ? (void *)&what->op[0] : name == CUBLASLT_MATMUL_DESC_TRANSB ?
      (void *)&what->op[1] : name == CUBLASLT_MATMUL_DESC_EPILOGUE ? (void *)&what->epilogue : (void *)&what->bias;
  if (size != (name == CUBLASLT_MATMUL_DESC_BIAS_POINTER ? sizeof(void *) : 4)) return CUBLAS_STATUS_INVALID_VALUE;
  memcpy(to, value, size);
  return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *layout, cudaDataType_t type, uint64_t rows,
                                                 uint64_t columns, int64_t ld) {
  if (type != CUDA_R_32F || ld < (int64_t)rows) return CUBLAS_STATUS_INVALID_VALUE;
  *layout = new cuda_host_layout{rows, columns, ld};
  return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
  delete layout;
  return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *wish) {
  *wish = new cuda_host_wish;
  return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t wish) {
  delete wish;
  return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t wish,
                                                           cublasLtMatmulPreferenceAttributes_t name,
                                                           const void *value, size_t size) {
  const bool room = name == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
  if (size != (room ? 8 : 4)) return CUBLAS_STATUS_INVALID_VALUE;
  memcpy(room ? (void *)&wish->room : (void *)&wish->alignment[name - CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES],
         value, size);
  return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t h, cublasLtMatmulDesc_t what,
                                                     cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                                     cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                                     cublasLtMatmulPreference_t wish, int wanted,
                                                     cublasLtMatmulHeuristicResult_t *way, int *ways) {
  const uint64_t *const inner[2] = {what->op[0] ? &a->rows : &a->columns, what->op[1] ? &b->columns : &b->rows};
  *ways = 0;
  if (!h || wanted < 1 || *inner[0] != *inner[1] || c->rows != d->rows || c->columns != d->columns ||
      d->rows != (what->op[0] ? a->columns : a->rows) || d->columns != (what->op[1] ? b->rows : b->columns))
    return CUBLAS_STATUS_INVALID_VALUE;
  if (cuda_host.no_endings) return cuda_host.no_endings == 2 ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
  for (int i = 0; i < 4; i++) way->algo.data[i] = wish->alignment[i];
  way->algo.data[4] = wish->room;
  way->state = CUBLAS_STATUS_SUCCESS;
  *ways = 1;
  return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmul(cublasLtHandle_t h, cublasLtMatmulDesc_t what, const void *alpha, const void *a,
                                     cublasLtMatrixLayout_t of_a, const void *b, cublasLtMatrixLayout_t of_b,
                                     const void *beta, const void *c, cublasLtMatrixLayout_t of_c, void *d,
                                     cublasLtMatrixLayout_t, const cublasLtMatmulAlgo_t *algo, void *workspace,
                                     size_t size, cudaStream_t stream) {
  const void *const at[4] = {a, b, c, d};
  for (int i = 0; i < 4; i++)
    if (!algo || !algo->data[i] || (uintptr_t)at[i] % algo->data[i]) return CUBLAS_STATUS_INVALID_VALUE;
  if (size < algo->data[4] || (*(const float *)beta != 0 && *(const float *)beta != 1) ||
      what->epilogue != CUBLASLT_EPILOGUE_BIAS) return CUBLAS_STATUS_INVALID_VALUE;
  cublasContext own = *h;
  own.stream = stream; own.workspace = workspace; own.workspace_size = size;
  cudahost::product p = {(cublasOperation_t)what->op[0], (cublasOperation_t)what->op[1], (int64_t)of_c->rows,
                         (int64_t)of_c->columns, (int64_t)(what->op[0] ? of_a->rows : of_a->columns), 1, of_a->ld,
                         of_b->ld, of_c->ld, 0, 0, 0, 0, 0, (const float *)a, (const float *)b, (float *)d, 23, nullptr,
                         0, (const float *)c, what->bias};
  return cudahost::multiply(&own, p, (const float *)alpha, (const float *)beta, what->compute);
}

/* ---------------------------------------------------------------------------------------------------------------------
   >>device: functions and keywords that kernels use
   ------------------------------------------------------------------------------------------------------------------ */
/* Contraction is the compiler's on the GPU, too; these are never contracted, on either. */
inline float cuda_host_exact(float x) {
#if defined(__x86_64__)
  __asm__("" : "+x"(x));
#elif defined(__aarch64__)
  __asm__("" : "+w"(x));
#else
  volatile float y = x; x = y;
#endif
  return x;
}
inline float __fadd_rn(float a, float b) { return cuda_host_exact(a + b); }
inline float __fsub_rn(float a, float b) { return cuda_host_exact(a - b); }
inline float __fmul_rn(float a, float b) { return cuda_host_exact(a * b); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float rsqrtf(float a) { return 1.0f / sqrtf(a); }
inline unsigned __float_as_uint(float x) { unsigned u; memcpy(&u, &x, 4); return u; }
inline int __float_as_int(float x) { int u; memcpy(&u, &x, 4); return u; }
inline float __uint_as_float(unsigned u) { float x; memcpy(&x, &u, 4); return x; }
inline float __int_as_float(int u) { float x; memcpy(&x, &u, 4); return x; }
inline float __double2float_rn(double x) { return (float)x; }
inline float __int2float_rn(int x) { return (float)x; }
inline float __uint2float_rn(unsigned x) { return (float)x; }
inline int __float2int_rn(float x) { return (int)lrintf(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)(((uint64_t)a * b) >> 32); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
template <class T> T __ldg(const T *p) { return *p; }
#define CUDA_HOST_MIN_MAX(T) \
  inline T min(T a, T b) { return b < a ? b : a; } \
  inline T max(T a, T b) { return a < b ? b : a; }
CUDA_HOST_MIN_MAX(int) CUDA_HOST_MIN_MAX(unsigned) CUDA_HOST_MIN_MAX(long) CUDA_HOST_MIN_MAX(unsigned long)
CUDA_HOST_MIN_MAX(long long) CUDA_HOST_MIN_MAX(unsigned long long)
inline float min(float a, float b) { return fminf(a, b); }           /* a NaN loses, as on the GPU */
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
/* Integers in global memory only: sums of floats in no order are not wanted. */
inline int atomicAdd(int *p, int x) { const int old = *p; *p = (int)((unsigned)old + (unsigned)x); return old; }
inline unsigned atomicAdd(unsigned *p, unsigned x) { const unsigned old = *p; *p = old + x; return old; }
template <class T> T atomicAdd(T *, T) = delete;
inline void __threadfence() {}
inline void __threadfence_block() {}
inline long long clock64() { static long long ticks; return ++ticks; }

#define __global__ __attribute__((unused))
#define __device__ __attribute__((unused))
#define __host__
#define __constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define LUNACU_UNROLL
#define LUNACU_START(kernel, ...) cudahost::start(#kernel, kernel, __VA_ARGS__)
#define LUNACU_SHARED(type, name, count) \
  static cudahost::array name##_place; \
  const lunacu_shared<type> name = cudahost::place<type>(name##_place, count, #name, __FILE__, __LINE__)
#define LUNACU_DYNAMIC_SHARED(type, name) \
  const lunacu_shared<type> name = cudahost::place_dynamic<type>(#name, __FILE__, __LINE__)

#define CUDA_HOST_HERE (cudahost::here{__FILE__, __LINE__})
#define __syncthreads() ((void)CUDA_HOST_HERE.block("__syncthreads"))
#define __syncthreads_or(predicate) ((int)(CUDA_HOST_HERE.block("__syncthreads_or", predicate) > 0))
#define __syncthreads_and(predicate) \
  ((int)(CUDA_HOST_HERE.block("__syncthreads_and", predicate) == cudahost::m.threads))
#define __syncthreads_count(predicate) (CUDA_HOST_HERE.block("__syncthreads_count", predicate))
#define __syncwarp(...) (CUDA_HOST_HERE.warp_barrier(__VA_ARGS__))
#define __shfl_sync(...) (CUDA_HOST_HERE.shuffle(__VA_ARGS__))
#define __shfl_up_sync(...) (CUDA_HOST_HERE.shuffle_up(__VA_ARGS__))
#define __shfl_down_sync(...) (CUDA_HOST_HERE.shuffle_down(__VA_ARGS__))
#define __shfl_xor_sync(...) (CUDA_HOST_HERE.shuffle_xor(__VA_ARGS__))
#define __ballot_sync(mask, predicate) (CUDA_HOST_HERE.ballot("__ballot_sync", mask, predicate))
#define __any_sync(mask, predicate) ((int)(CUDA_HOST_HERE.ballot("__any_sync", mask, predicate) != 0))
#define __all_sync(mask, predicate) ((int)CUDA_HOST_HERE.all(mask, predicate))
#define __trap() (CUDA_HOST_HERE.trap())

#endif
