/* cuda_host.h checked: right kernels give right results in any order, and each detector detects. */
#include "cuda_host.h"
#include "test.h"
#include <atomic>
#include <string>
#include <sys/wait.h>
#define LUNACU_LAUNCH(...) ((void)LUNACU_START(__VA_ARGS__))

/* ---------------------------------------------------------------------------------------------------------------------
   Right kernels
   ------------------------------------------------------------------------------------------------------------------ */
static __device__ __forceinline__ float warp_sum(float x) {
  LUNACU_UNROLL
  for (int offset = 16; offset; offset >>= 1) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

/* The sum over the block, in every thread of it; `partial` has room for one float a warp. */
static __device__ float block_sum(float x, lunacu_shared<float> partial) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = (blockDim.x + 31) / 32;
  x = warp_sum(x);
  __syncthreads();
  if (lane == 0) partial[warp] = x;
  __syncthreads();
  x = 0;
  for (int w = 0; w < warps; w++) x += partial[w];
  return x;
}

static __global__ void __launch_bounds__(1024) partial_sums(const float *__restrict__ x, float *__restrict__ sums,
                                                            int n) {
  LUNACU_SHARED(float, partial, 32);
  float sum = 0;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) sum += __ldg(x + i);
  sum = block_sum(sum, partial);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

template <int TILE> __global__ void transpose(const float *x, float *y, int rows, int columns) {
  LUNACU_SHARED(float, tile, TILE * (TILE + 1));
  const int column = blockIdx.x * TILE + threadIdx.x, row = blockIdx.y * TILE + threadIdx.y;
  if (row < rows && column < columns) tile[threadIdx.y * (TILE + 1) + threadIdx.x] = x[row * columns + column];
  __syncthreads();
  const int to_column = blockIdx.y * TILE + threadIdx.x, to_row = blockIdx.x * TILE + threadIdx.y;
  if (to_row < columns && to_column < rows) y[to_row * rows + to_column] = tile[threadIdx.x * (TILE + 1) + threadIdx.y];
}

template <class U, class T> static lunacu_shared<U> seen_as(lunacu_shared<T> p) { return {p.at, p.begin, p.end}; }
/* Tree reduction in dynamic shared memory, which holds the floats and then, seen as int, their count. */
static __global__ void tree(const float *x, float *y, int *counts) {
  LUNACU_DYNAMIC_SHARED(float, s);
  const int t = threadIdx.x;
  lunacu_shared<int> count = seen_as<int>(s + blockDim.x);
  s[t] = x[blockIdx.x * blockDim.x + t];
  if (t == 0) *count = 0;
  __syncthreads();
  for (int half = blockDim.x / 2; half; half /= 2) {
    if (t < half) {
      s[t] = max(s[t], s[t + half]);
      s[t] += 0.0f;
    }
    if (t == 0) count[0] += half;
    __syncthreads();
  }
  if (t == 0) {
    y[blockIdx.x] = s[0];
    counts[blockIdx.x] = *count;
  }
}

/* A warp hands values round through shared memory, ordered by __syncwarp alone. */
static __global__ void rotate(int *y) {
  LUNACU_SHARED(int, s, 64);
  lunacu_shared<int> mine = s + (threadIdx.x & ~31);
  const int lane = threadIdx.x & 31;
  mine[lane] = threadIdx.x;
  for (int i = 0; i < 5; i++) {
    __syncwarp();
    const int from_left = mine[(lane + 31) & 31];
    __syncwarp();
    mine[lane] = from_left;
  }
  y[threadIdx.x] = mine[lane];
}

static __global__ void lanes(float *f, unsigned *u, double *d, int64_t *l) {
  const int t = threadIdx.x;
  f[t] = __shfl_up_sync(0xffffffffu, (float)t, 3) + 100 * __shfl_down_sync(0xffffffffu, (float)t, 5);
  u[t] = __ballot_sync(0xffffffffu, t % 3 == 0) ^ (__any_sync(0xffffffffu, t == 7) ? 1u << 31 :
                                                   0) ^ (__all_sync(0xffffffffu, t < 32) ? 1u << 30 : 0);
  d[t] = __shfl_sync(0xffffffffu, t * 0.5, 9);
  l[t] = __shfl_xor_sync(0xffffffffu, (int64_t)t << 33, 1);
  const unsigned half = t < 16 ? 0x0000ffffu : 0xffff0000u;
  for (int i = 0; i <= t / 16; i++) u[t] += __shfl_xor_sync(half, 1u, 1);   /* the halves go their own ways */
}

static __global__ void votes(int *y) {
  const int t = threadIdx.x, any = __syncthreads_or(t == 5), all = __syncthreads_and(t < 70),
      count = __syncthreads_count(t & 1);
  y[t] = any + 10 * all + 100 * count;
}

static __global__ void count_odd(const int *x, unsigned *count, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n && (x[i] & 1)) atomicAdd(count, 1u);
}
static __global__ void scale(float *x, float by, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] *= by;
}
static __global__ void add_one(float *x) { x[threadIdx.x] += 1; }

/* Shared elements in all the places where a float or an int may stand. */
struct rows { lunacu_shared<float> a, b; };
static __device__ float mixed(rows r, lunacu_shared<const float> c, int i) {
  return r.a[i] * r.b[i] - c[i] + fmaf(r.a[i], 2.0f, -r.b[i]) + fmaxf(c[i], r.a[i]);
}
static __global__ void uses(float *y) {
  LUNACU_SHARED(float, s, 64);
  LUNACU_SHARED(int, k, 4);
  LUNACU_SHARED(double, d, 2);
  LUNACU_SHARED(uint32_t, u, 1);
  const int t = threadIdx.x;
  if (t == 0) {
    s[0] = s[1] = 3;
    s[2] = s[0];
    s[2] -= 1; s[2] *= 4; s[2] /= 2; s[2] += s[1];
    k[0] = 2; k[1] = k[0]++ + 5; k[2] = k[0] << 1; k[3] = -k[2];
    d[0] = 0.5; d[1] = d[0] + s[0] + k[0];
    *u = 0xf0; u[0] |= 1u; *u ^= 3u;
    lunacu_shared<float> p = nullptr;
    const bool none = !p && p == nullptr;
    p = s + 8;
    *p++ = 1; *p = s[0] > s[2] || k[1] == 7 ? s[0] : -INFINITY;
    p -= 1;
    const size_t at = 9;
    y[0] = s[2] + (none && p - s == 8 && p != s ? 100 : 0);
    y[1] = max(s[0], s[2]) + min(k[0], 9) + max(d[1], 1.0) + (float)k[3] + (isfinite(s[at]) ? 1 : 0) + !s[0];
    y[k[0]] = mixed({s, s + 1}, s, 0);
    y[2] = (float)d[1] + *u + __uint_as_float(__float_as_uint(s[at])) + expf(s[0] - 3) + (&s[3] - s);
    if (s[0]) y[4] = __int_as_float(seen_as<int>(s)[0]);
  }
}

template <class T, class = decltype(atomicAdd((T *)nullptr, T()))> static constexpr bool adds_atomically(int) {
  return true;
}
template <class T> static constexpr bool adds_atomically(...) { return false; }
static_assert(adds_atomically<int>(0) && adds_atomically<unsigned>(0) && !adds_atomically<float>(0) &&
              !adds_atomically<double>(0), "atomicAdd is for integers");

/* Not right: the last to come decides, so seeds differ. */
static __global__ void last_wins(int *x) { *x = blockIdx.x * blockDim.x + threadIdx.x; }

static std::vector<float> fetch(const float *x, size_t n) {
  std::vector<float> y(n);
  CHECK(cudaMemcpy(y.data(), x, n * sizeof *x, cudaMemcpyDeviceToHost) == cudaSuccess, "fetch");
  return y;
}
template <class T> static std::vector<T> values_of(const T *x, size_t n) {
  std::vector<T> y(n);
  CHECK(cudaMemcpy(y.data(), x, n * sizeof *x, cudaMemcpyDeviceToHost) == cudaSuccess, "values_of");
  return y;
}
template <class T> static T *device(size_t n) {
  T *p; CHECK(cudaMalloc(&p, n * sizeof(T)) == cudaSuccess, "cudaMalloc"); return p;
}
static float *upload(const std::vector<float> &x) {
  float *p = device<float>(x.size());
  CHECK(cudaMemcpy(p, x.data(), x.size() * sizeof x[0], cudaMemcpyHostToDevice) == cudaSuccess, "upload");
  return p;
}
static std::vector<float> numbers(size_t n, unsigned seed) {
  std::vector<float> x(n);
  for (size_t i = 0; i < n; i++) { seed = seed * 1664525u + 1013904223u; x[i] = (float)(seed >> 8) / (1 << 23) - 1; }
  return x;
}

static void right_kernels() {
  std::vector<float> first;
  for (uint64_t seed = 1; seed <= 3; seed++) {
    cuda_host.seed = seed;
    std::vector<float> all;

    const int n = 10007;
    const std::vector<float> x = numbers(n, 1);
    float *dx = upload(x), *sums = device<float>(16), *total = device<float>(1);
    LUNACU_LAUNCH(partial_sums, 16, 96, 0, 0, dx, sums, n);
    LUNACU_LAUNCH(partial_sums, 1, 32, 0, 0, sums, total, 16);
    double expected = 0;
    for (float v : x) expected += v;
    const float sum = fetch(total, 1)[0];
    CHECK(fabs(sum - expected) < 1e-3, "sum %g of %g", sum, expected);
    all.push_back(sum);

    const int rows = 37, columns = 53;
    float *dy = device<float>(rows * columns);
    LUNACU_LAUNCH((transpose<16>), dim3((columns + 15) / 16, (rows + 15) / 16), dim3(16, 16), 0, 0, dx, dy, rows,
                  columns);
    const std::vector<float> y = fetch(dy, rows * columns);
    int wrong = 0;
    for (int i = 0; i < rows; i++) for (int j = 0; j < columns; j++) wrong += y[j * rows + i] != x[i * columns + j];
    CHECK(wrong == 0, "transpose: %d wrong", wrong);

    int *counts = device<int>(10);
    LUNACU_LAUNCH(tree, 10, 128, 129 * sizeof(float), 0, dx, sums, counts);
    const std::vector<float> maxima = fetch(sums, 10);
    for (int b = 0; b < 10; b++)
      CHECK(maxima[b] == *std::max_element(&x[b * 128], &x[b * 128] + 128), "maximum of block %d", b);
    CHECK(values_of(counts, 10)[9] == 127, "count in words seen as int");

    int *turned = device<int>(64);
    LUNACU_LAUNCH(rotate, 1, 64, 0, 0, turned);
    const std::vector<int> r = values_of(turned, 64);
    for (int t = 0; t < 64; t++) CHECK(r[t] == (t & 32) + ((t - 5) & 31), "rotate %d: %d", t, r[t]);

    float *f = device<float>(32);
    unsigned *u = device<unsigned>(32);
    double *d = device<double>(32);
    int64_t *l = device<int64_t>(32);
    LUNACU_LAUNCH(lanes, 1, 32, 0, 0, f, u, d, l);
    const std::vector<float> hf = fetch(f, 32);
    const std::vector<unsigned> hu = values_of(u, 32);
    const std::vector<double> hd = values_of(d, 32);
    const std::vector<int64_t> hl = values_of(l, 32);
    for (int t = 0; t < 32; t++) {
      CHECK(hf[t] == (t < 3 ? t : t - 3) + 100 * (t > 26 ? t : t + 5), "shuffles up and down of lane %d", t);
      CHECK(hu[t] == (0x49249249u ^ 0xc0000000u) + 1 + t / 16, "votes of lane %d: %08x", t, hu[t]);
      CHECK(hd[t] == 4.5 && hl[t] == (int64_t)(t ^ 1) << 33, "wide shuffles of lane %d", t);
    }

    int *v = device<int>(70);
    LUNACU_LAUNCH(votes, 1, 70, 0, 0, v);
    for (int vote : values_of(v, 70)) CHECK(vote == 3511, "block votes: %d", vote);

    unsigned *count = device<unsigned>(1);
    cudaMemsetAsync(count, 0, sizeof *count);
    LUNACU_LAUNCH(count_odd, 3, 32, 0, 0, v, count, 70);
    CHECK(values_of(count, 1)[0] == 70, "atomicAdd");

    all.insert(all.end(), maxima.begin(), maxima.end());
    all.insert(all.end(), hf.begin(), hf.end());
    if (first.empty()) first = all;
    CHECK(first.size() == all.size() && !memcmp(first.data(), all.data(), all.size() * sizeof(float)),
          "seed %d gives other bits", (int)seed);
    for (void *p : {(void *)dx, (void *)dy, (void *)sums, (void *)total, (void *)counts, (void *)turned, (void *)f,
                    (void *)u, (void *)d, (void *)l, (void *)v, (void *)count})
      CHECK(cudaFree(p) == cudaSuccess, "cudaFree");
  }
  CHECK(cuda_host.errors == 0 && cuda_host.allocated == 0, "%ld errors, %zu bytes left: %s", cuda_host.errors,
        cuda_host.allocated, cuda_host.message);

  float *used = device<float>(5);
  LUNACU_LAUNCH(uses, 1, 32, 0, 0, used);
  const std::vector<float> u = fetch(used, 5);
  CHECK(u[0] == 107 && u[1] == 7 + 3 + 6.5 - 6 + 1 && u[2] == 6.5 + 242 + 3 + 1 + 3 && u[3] == 9 - 3 + 3 + 3 &&
        u[4] == 3 && !cuda_host.errors, "elements: %g %g %g %g %g %s",
        u[0], u[1], u[2], u[3], u[4], cuda_host.message);
  cudaFree(used);

  int *x = device<int>(1), seen[8];
  for (int i = 0; i < 8; i++) {
    cuda_host.seed = (uint64_t)i;
    LUNACU_LAUNCH(last_wins, 4, 8, 0, 0, x);
    seen[i] = values_of(x, 1)[0];
    cuda_host_reset();
    LUNACU_LAUNCH(last_wins, 4, 8, 0, 0, x);
    const int once = values_of(x, 1)[0];
    cuda_host_reset();
    LUNACU_LAUNCH(last_wins, 4, 8, 0, 0, x);
    CHECK(once == values_of(x, 1)[0], "after a reset a seed gives the same order");
  }
  CHECK(*std::max_element(seen, seen + 8) != *std::min_element(seen, seen + 8), "a race has many winners");
  cudaFree(x);

  float a = 1 + 0x1p-12f;
  CHECK(__fmaf_rn(a, a, -1.0f) != __fadd_rn(__fmul_rn(a, a), -1.0f), "a fused product keeps its bits");
  CHECK(__umulhi(0xffffffffu, 16) == 15 && __clz(1) == 31 && __ffs(8) == 4 && __popc(255) == 8 &&
        __float_as_uint(__uint_as_float(0x3f800000)) == 0x3f800000 && rsqrtf(4) == 0.5f, "intrinsics");
}

/* ---------------------------------------------------------------------------------------------------------------------
   Wrong kernels
   ------------------------------------------------------------------------------------------------------------------ */
static __global__ void no_barrier(float *y, int kind) {
  LUNACU_SHARED(float, s, 128);
  const int t = threadIdx.x;
  if (kind == 0) {                           /* read after write */
    s[t] = t;
    y[t] = s[t ^ 64];
  } else if (kind == 1) {                    /* write after read */
    s[t] = t;
    __syncthreads();
    const float x = s[t ^ 64];
    s[t] = x;
    __syncthreads();
    y[t] = s[t];
  } else if (kind == 2) {                    /* write after write */
    s[t / 2] = t;
    __syncthreads();
    y[t] = s[t / 2];
  } else if (kind == 3) {                    /* __syncwarp orders one warp only */
    s[t] = t;
    __syncwarp();
    y[t] = s[t ^ 32];
  } else if (kind == 4) {                    /* a shuffle orders no memory */
    s[t] = t;
    y[t] = __shfl_xor_sync(0xffffffffu, (float)t, 1);
    y[t] += s[t ^ 1];
  } else {                                   /* many readers of another warp, then their reader's own write */
    if (t == 0) s[0] = 1;
    __syncthreads();
    const float x = s[0];
    __syncwarp();
    if (t == 0) s[0] = x + 1;
    y[t] = x;
  }
}
static __global__ void diverges(int kind) {
  const int t = threadIdx.x;
  if (kind == 0) {
    if (t < 40) __syncthreads();
  } else if (kind == 1) {
    if (t < 40) __syncthreads();
    else
      __syncthreads();
  } else if (kind == 2) {
    if (t == 3) return;
    __syncthreads();
  } else if (kind == 3) {
    if (t & 1) __shfl_xor_sync(0xffffffffu, 1, 2);
    else
      __shfl_xor_sync(0xffffffffu, 1, 2);
  } else if (kind == 4) {
    if (t < 7) __shfl_sync(0xffffffffu, 1, 2);
  } else if (kind == 5) {
    if (t < 7) __shfl_sync(0x7fu, 1, 9);     /* lane 9 takes no part */
  } else if (kind == 6) {
    __shfl_sync(1u << 31, 1, 31);            /* all but one name a mask without themselves */
  } else if (kind == 7) {
    if (t == 9) __syncthreads();
    else __syncwarp();
  } else if (kind == 8) {                    /* 0 waits for 1, 1 for 2, 2 for 0 */
    if (t == 0) __syncwarp(3);
    if (t == 1) __syncwarp(6);
    if (t == 2) __syncwarp(5);
  } else {
    __shfl_down_sync(0xffffffffu, 1, 2);     /* a block of 20 has no lane 20 */
  }
}
static __global__ void outside(int at, float *y) {
  LUNACU_SHARED(float, before, 8);
  LUNACU_SHARED(float, s, 8);
  LUNACU_SHARED(float, after, 8);
  before[threadIdx.x] = s[threadIdx.x] = after[threadIdx.x] = 1;
  y[threadIdx.x] = (s + at)[threadIdx.x];
}
static __global__ void outside_dynamic(int at) { LUNACU_DYNAMIC_SHARED(float, s); s[at] = 1; }
static __global__ void four_at(int at) {
  LUNACU_SHARED(float, before, 3);
  LUNACU_SHARED(float, s, 8);
  before[0] = s[0] = 1;
  cuda_host_wide(s + at, 16);
}
static __global__ void sends(int kind, const float *x, float *y) { /* of four floats the neighbour's come out */
  LUNACU_SHARED(float, s, 4 * 64);
  const int t = threadIdx.x;
  for (int k = 0; k < 4; k++) s[4 * t + k] = 0;
  __syncthreads();
  cuda_host_send(s + 4 * t + (kind == 5), x + 4 * t, 16);
  if (kind == 1) y[t] = s[4 * t];
  if (kind == 2) s[4 * t + 3] = 1;
  if (kind == 3) return;
  cuda_host_arrive();
  if (kind != 4) __syncthreads();
  LUNACU_UNROLL for (int k = 0; k < 4; k++) y[4 * t + k] = s[4 * (t ^ 33) + k];
}
static __global__ void misaligned() { LUNACU_DYNAMIC_SHARED(float, s); *seen_as<double>(s + 1) = 1; }
static __global__ void unwritten(float *y) {
  LUNACU_SHARED(float, s, 8); if (threadIdx.x) s[threadIdx.x] = 1; y[threadIdx.x] = s[threadIdx.x];
}
static __global__ void unwritten_dynamic(float *y) { LUNACU_DYNAMIC_SHARED(float, s); y[threadIdx.x] = s[threadIdx.x]; }
static __global__ void write_at(float *y, int at) { y[at] = 1; }
static __global__ void copy_at(float *y, const float *x, float by, int at) { y[at] = by ? by * x[at] : x[at]; }
static __global__ void much_shared() {
  LUNACU_SHARED(float, s, 8 << 10); LUNACU_DYNAMIC_SHARED(float, d); s[threadIdx.x] = 0; d[threadIdx.x] = 0;
}
static __global__ void dynamic_only() {}
static __global__ void trapped() { if (threadIdx.x == 2) __trap(); }
static __device__ __attribute__((noinline)) int deep(int n) {
  volatile char room[1024]; room[n % 1024] = 1; return n ? deep(n - 1) + room[n % 1024] : 0;
}
static __global__ void overflows(int *y) { *y = deep(1000); }
struct holder { float *x; int n; };
static __global__ void holds(holder h) { if (h.n > 1) h.x[0] = 1; }

/* Runs f and the device, and checks that the first finding says `text`. */
template <class F> static void finds(const char *what, const char *text, F f) {
  for (uint64_t seed = 1; seed <= 3; seed++) {
    cuda_host_reset();
    cuda_host.seed = seed;
    f();
    cudaDeviceSynchronize();
    CHECK(cuda_host.errors > 0 && strstr(cuda_host.message, text), "%s, seed %d: %ld errors, said: %s", what, (int)seed,
          cuda_host.errors, cuda_host.message);
  }
  cuda_host_reset();
}

/* Runs f in a process of its own and checks how that ends. */
template <class F> static void ends(const char *what, F f) {
  fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    if (!freopen("/dev/null", "w", stderr)) _exit(3);
    f();
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 1, "%s: status %x", what, (unsigned)status);
}

static void wrong_kernels() {
  float *y = device<float>(1024);
  finds("read after write", "reads s[", [&] { LUNACU_LAUNCH(no_barrier, 1, 128, 0, 0, y, 0); });
  CHECK(cuda_host.errors == 0 && !cuda_host.message[0], "reset forgets");
  const char *hazards[] = {"no barrier", "no barrier", "writes s[", "no barrier", "no barrier",
                           "writes s[0], which thread"};
  for (int kind = 1; kind <= 5; kind++)
    finds("hazard", hazards[kind], [&] { LUNACU_LAUNCH(no_barrier, 2, 128, 0, 0, y, kind); });
  const char *sendings[] = {"", "reads s[", "writes s[", "returned while what it sent is under way", "no barrier",
                            "no place for 16 bytes"};
  float *x = device<float>(256), four[8] = {};
  for (int kind = 1; kind <= 5; kind++)
    finds("sent", sendings[kind], [&] { LUNACU_LAUNCH(sends, 1, 64, 0, 0, kind, (const float *)x, y); });
  for (int i = 0; i < 8; i++) four[i] = (float)i;
  cudaMemcpy(x + 128, four, sizeof four, cudaMemcpyHostToDevice); /* of threads 32 and 33, for 1 and 0 */
  LUNACU_LAUNCH(sends, 1, 64, 0, 0, 0, (const float *)x, y);
  memset(four, 0, sizeof four);
  cudaMemcpy(four, y, sizeof four, cudaMemcpyDeviceToHost);
  CHECK(cuda_host.errors == 0 && four[0] == 4 && four[3] == 7 && four[4] == 0 && four[7] == 3,
        "sent: %g %g %g %g, %s", four[0], four[3], four[4], four[7], cuda_host.message);
  cudaFree(x);
  cuda_host.debug = false;
  LUNACU_LAUNCH(no_barrier, 1, 128, 0, 0, y, 2);
  cudaDeviceSynchronize();
  CHECK(cuda_host.errors == 0, "no hazards without debug");
  cuda_host.debug = true;

  const char *divergences[] = {"__syncthreads", "but thread", "returned", "waits in __shfl_xor_sync", "__shfl_sync",
                               "from lane 9", "own mask", "__syncwarp", "for ever", "takes no part"};
  for (int kind = 0; kind <= 9; kind++)
    finds("divergence", divergences[kind], [&] { LUNACU_LAUNCH(diverges, 2, kind == 9 ? 20 : 64, 0, 0, kind); });
  CHECK(cudaGetLastError() == cudaSuccess, "findings are not CUDA's errors");

  finds("index above", "is outside s, 32 bytes", [&] { LUNACU_LAUNCH(outside, 1, 8, 0, 0, 8, y); });
  finds("index below", "is outside s, 32 bytes", [&] { LUNACU_LAUNCH(outside, 1, 8, 0, 0, -8, y); });
  finds("dynamic index", "is outside s, 40 bytes", [&] { LUNACU_LAUNCH(outside_dynamic, 1, 1, 40, 0, 10); });
  finds("alignment", "is no place for 8 bytes", [&] { LUNACU_LAUNCH(misaligned, 1, 1, 40, 0); });
  for (int at : {1, 2, 3, 7})
    finds("alignment of four", "of s is no place for 16 bytes", [&] { LUNACU_LAUNCH(four_at, 1, 1, 0, 0, at); });
  for (int at : {8, -4})
    finds("four outside", "is outside s, 32 bytes", [&] { LUNACU_LAUNCH(four_at, 1, 1, 0, 0, at); });
  for (int at : {0, 4}) LUNACU_LAUNCH(four_at, 1, 1, 0, 0, at);
  cudaDeviceSynchronize();
  CHECK(cuda_host.errors == 0, "four at multiples of 16 bytes: %s", cuda_host.message);
  finds("unwritten", "reads s[0] before it was written", [&] { LUNACU_LAUNCH(unwritten, 2, 8, 0, 0, y); });
  finds("unwritten, dynamic", "before it was written", [&] { LUNACU_LAUNCH(unwritten_dynamic, 1, 8, 32, 0, y); });
  finds("stack", "bytes of stack", [&] { LUNACU_LAUNCH(overflows, 1, 1, 0, 0, (int *)y); });

  float host[8] = {0}, *pinned;
  cudaMallocHost(&pinned, 32);
  finds("host pointer", "a pointer to host memory", [&] { LUNACU_LAUNCH(write_at, 1, 1, 0, 0, host, 0); });
#ifdef CUDA_HOST_CLEARS_PADDING
  finds("host pointer in a struct", "a pointer to host memory",
        [&] { LUNACU_LAUNCH(holds, 1, 1, 0, 0, holder{host, 1}); });
#endif
  LUNACU_LAUNCH(holds, 1, 1, 0, 0, holder{nullptr, 1});
  LUNACU_LAUNCH(holds, 1, 1, 0, 0, holder{y + 1024, 1});
  LUNACU_LAUNCH(write_at, 1, 1, 0, 0, pinned, 3);
  cudaDeviceSynchronize();
  CHECK(cuda_host.errors == 0 && pinned[3] == 1, "null, an end and pinned memory are good: %s", cuda_host.message);
  cudaFreeHost(pinned);
  float *gone = device<float>(8);
  cudaFree(gone);
  finds("freed pointer", "no longer, allocated", [&] { LUNACU_LAUNCH(write_at, 1, 1, 0, 0, gone, 0); });

#ifdef CUDA_HOST_ASAN
  ends("beside an allocation", [&] { LUNACU_LAUNCH(write_at, 1, 1, 0, 0, y, 1024); cudaDeviceSynchronize(); });
#else
  for (int at : {1024, 1024 + 63, -1, -64})
    finds("beside an allocation", "wrote beside the 4096 bytes", [&] { LUNACU_LAUNCH(write_at, 1, 1, 0, 0, y, at); });
  float *z = device<float>(1024);
  for (float by : {0.0f, 2.0f})
    finds("from beside one allocation to beside another", "wrote beside the 4096 bytes",
          [&] { LUNACU_LAUNCH(copy_at, 1, 1, 0, 0, z, y, by, 1024); });
  cudaFree(z);
  float *small = device<float>(3);
  LUNACU_LAUNCH(write_at, 1, 1, 0, 0, small, 3);
  cudaStreamSynchronize(0);
  CHECK(cuda_host.errors == 1, "beside an allocation that no 256 divide");
  cuda_host_reset();
  cudaFree(small);
#endif

  finds("wild address", "which is no device memory", [&] { LUNACU_LAUNCH(write_at, 1, 1, 0, 0, (float *)64, 3); });
  LUNACU_LAUNCH(write_at, 1, 1, 0, 0, (float *)64, 3);
  CHECK(cudaDeviceSynchronize() == cudaErrorIllegalAddress && cudaGetLastError() == cudaErrorIllegalAddress &&
        cudaGetLastError() == cudaErrorIllegalAddress, "a wild address is a fault");
  cuda_host_reset();
  LUNACU_LAUNCH(trapped, 1, 4, 0, 0);
  CHECK(cudaDeviceSynchronize() == cudaErrorLaunchFailure, "__trap");
  cuda_host_reset();

  ends("the host reads device memory", [&] { volatile float x = y[0]; (void)x; });
  ends("the host writes device memory", [&] { y[0] = 1; });
  LUNACU_LAUNCH(add_one, 1, 1, 0, 0, y);
  CHECK(cudaDeviceSynchronize() == cudaSuccess && cuda_host.errors == 0, "a right kernel after all that: %s",
        cuda_host.message);
  cudaFree(y);
}

/* ---------------------------------------------------------------------------------------------------------------------
   The runtime
   ------------------------------------------------------------------------------------------------------------------ */
static cudaError_t launched(dim3 grid, dim3 block, size_t shared) {
  LUNACU_LAUNCH(dynamic_only, grid, block, shared, 0);
  return cudaGetLastError();
}

static void limits() {
  const cudaError_t bad = cudaErrorInvalidConfiguration, large = cudaErrorInvalidValue;
  CHECK(launched(1, 1024, 0) == cudaSuccess && launched(1, 1025, 0) == large && launched(1, dim3(32, 33), 0) == large &&
        launched(1, dim3(1, 1, 65), 0) == large, "threads");
  CHECK(launched(0, 1, 0) == bad && launched(1, 0, 0) == large && launched(dim3(1, 65536), 1, 0) == bad &&
        launched(dim3(1, 1, 65536), 1, 0) == bad && launched(0x80000000u, 1, 0) == bad, "grid");
  CHECK(launched(1, 1, 48 << 10) == cudaSuccess && launched(1, 1, (48 << 10) + 1) == bad, "shared");
  CHECK(cudaFuncSetAttribute(dynamic_only, cudaFuncAttributeMaxDynamicSharedMemorySize, (227 << 10) + 1) ==
        cudaErrorInvalidValue && cudaGetLastError() == cudaErrorInvalidValue, "more shared than there is");
  CHECK(cudaFuncSetAttribute(dynamic_only, cudaFuncAttributeMaxDynamicSharedMemorySize, 227 << 10) == cudaSuccess &&
        launched(1, 1, 227 << 10) == cudaSuccess, "opted in");
  LUNACU_LAUNCH(dynamic_only, 0, 1, 0, 0);
  CHECK(cudaPeekAtLastError() == bad && cudaGetLastError() == bad && cudaGetLastError() == cudaSuccess,
        "a launch error is reported once");
  CHECK(cudaDeviceSynchronize() == cudaSuccess, "limits");

  finds("static and dynamic shared memory", "are too many",
        [] { cudahost::m.limits.clear(); LUNACU_LAUNCH(much_shared, 1, 1, 40 << 10, 0); });
  LUNACU_LAUNCH(much_shared, 1, 1, 16 << 10, 0);
  CHECK(cudaDeviceSynchronize() == cudaSuccess && cuda_host.errors == 0, "what fits: %s", cuda_host.message);
  LUNACU_LAUNCH(much_shared, 1, 1, (16 << 10) + 4, 0);
  CHECK(cudaGetLastError() == bad, "static shared memory is known once it ran");

  int value;
  cuda_host.major = 7; cuda_host.minor = 5;
  CHECK(cudaDeviceGetAttribute(&value, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0) == cudaSuccess && value == 64 << 10,
        "an older device");
  cuda_host.major = 9; cuda_host.minor = 0;
  cudaDeviceProp properties;
  CHECK(cudaGetDeviceProperties(&properties, 0) == cudaSuccess && properties.major == 9 &&
        properties.sharedMemPerBlockOptin == 227 << 10, "properties");
  CHECK(cudaSetDevice(1) == cudaErrorInvalidDevice && cudaGetLastError() == cudaErrorInvalidDevice,
        "the second of one device");
  cuda_host.devices = 0;
  int count = 7;
  void *p;
  CHECK(cudaGetDeviceCount(&count) == cudaErrorNoDevice && count == 0 && cudaMalloc(&p, 1) == cudaErrorNoDevice,
        "no device");
  cuda_host.devices = 1;
  cuda_host_reset();
}

static void memory() {
  float *a = device<float>(1), *b = device<float>(100000), *c = device<float>(1);
  for (float x : fetch(b, 1000)) if (!CHECK(isnan(x), "new memory is NaN")) break;
  CHECK(((uintptr_t)a | (uintptr_t)b | (uintptr_t)c) % 256 == 0 && cuda_host.allocated == 400008,
        "alignment and bytes");
  cudaFree(b);
  float *d = device<float>(5000);
  CHECK(d > a && d < c, "a gap is used again");
  size_t left = 0, total = 0;
  CHECK(cudaMemGetInfo(&left, &total) == cudaSuccess && total - left == 20008, "cudaMemGetInfo");
  void *p = a;
  CHECK(cudaMalloc(&p, total) == cudaErrorMemoryAllocation && !p && cudaGetLastError() == cudaErrorMemoryAllocation,
        "more than there is");
  cuda_host.fail_allocation = 2;
  float *e = device<float>(1);
  CHECK(cudaMalloc(&p, 4) == cudaErrorMemoryAllocation, "the second fails");
  CHECK(cudaMalloc(&p, 4) == cudaSuccess && cudaFree(p) == cudaSuccess, "the third does not");
  CHECK(cudaFree(a + 1) == cudaErrorInvalidValue && cudaFree(nullptr) == cudaSuccess, "cudaFree of what is none");
  float host[4] = {1, 2, 3, 4}, *pinned;
  cudaHostAlloc(&pinned, 16, cudaHostAllocDefault);
  CHECK(cudaMemcpy(a, host, 8, cudaMemcpyHostToDevice) == cudaErrorInvalidValue, "a copy over the end");
  CHECK(cudaMemcpy(a, host, 4, cudaMemcpyDeviceToDevice) == cudaErrorInvalidValue, "a copy of the wrong kind");
  CHECK(cudaMemcpy(d, host, 16, cudaMemcpyDefault) == cudaSuccess &&
        cudaMemcpy(pinned, d, 16, cudaMemcpyDeviceToHost) == cudaSuccess && pinned[3] == 4, "copies there and back");
  cudaPointerAttributes of;
  CHECK(cudaPointerGetAttributes(&of, d + 10) == cudaSuccess && of.type == cudaMemoryTypeDevice, "device pointer");
  CHECK(cudaPointerGetAttributes(&of, pinned) == cudaSuccess && of.type == cudaMemoryTypeHost, "pinned pointer");
  CHECK(cudaPointerGetAttributes(&of, host) == cudaSuccess && of.type == cudaMemoryTypeUnregistered, "any pointer");
  for (float *x : {a, c, d, e}) cudaFree(x);
  cudaFreeHost(pinned);
  CHECK(cuda_host.allocated == 0 && cuda_host.errors == 0, "%s", cuda_host.message);
  cuda_host_reset();
}

static void streams() {
  cudaStream_t s = nullptr, t = nullptr;
  CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking) == cudaSuccess && cudaStreamCreate(&t) == cudaSuccess,
        "streams");
  float *x = device<float>(4), *pinned, host[4] = {1, 2, 3, 4};
  cudaMallocHost(&pinned, 16);

  cudaMemcpyAsync(x, host, 16, cudaMemcpyHostToDevice, s);           /* pageable: read now */
  host[0] = 10;
  LUNACU_LAUNCH(add_one, 1, 4, 0, s, x);
  cudaMemcpyAsync(pinned, x, 16, cudaMemcpyDeviceToHost, s);
  CHECK(isnan(pinned[0]) && cuda_host.synchronisations == 0, "nothing ran yet");
  CHECK(cudaStreamSynchronize(s) == cudaSuccess && pinned[0] == 2 && pinned[3] == 5 && cuda_host.synchronisations == 1,
        "then it ran");

  pinned[0] = 20;
  cudaMemcpyAsync(x, pinned, 4, cudaMemcpyHostToDevice, s);          /* pinned: read when it runs */
  pinned[0] = 30;
  CHECK(cudaMemcpyAsync(host, x, 4, cudaMemcpyDeviceToHost, s) == cudaSuccess && host[0] == 30,
        "to pageable memory a copy waits");

  cudaMemsetAsync(x, 0, 16, s);
  LUNACU_LAUNCH(add_one, 1, 4, 0, s, x);
  CHECK(cudaStreamQuery(s) == cudaErrorNotReady && cudaStreamQuery(s) == cudaSuccess, "asking often makes progress");
  CHECK(cudaPeekAtLastError() == cudaSuccess, "an answer of not ready is no error");
  CHECK(fetch(x, 1)[0] == 1, "after the queries");

  float *copy = device<float>(4);
  cudaMemcpy(copy, x, 16, cudaMemcpyDeviceToDevice);
  CHECK(cudaStreamQuery(0) == cudaSuccess && fetch(copy, 1)[0] == 1,
        "within the device cudaMemcpy is queued, and done in order");
  cudaFree(copy);
  LUNACU_LAUNCH(add_one, 1, 4, 0, s, x);                             /* the legacy stream does not wait for s ... */
  CHECK(fetch(x, 1)[0] == 1, "not ordered with a non-blocking stream");
  cudaStreamSynchronize(s);
  LUNACU_LAUNCH(add_one, 1, 4, 0, t, x);                             /* ... but for t */
  CHECK(fetch(x, 1)[0] == 3, "ordered with a blocking stream");

  cudaEvent_t e, f;
  cudaEventCreate(&e); cudaEventCreate(&f);
  cudaEventRecord(e, s);
  LUNACU_LAUNCH(scale, 1, 32, 0, s, x, 2.0f, 4);
  cudaEventRecord(f, s);
  cudaStreamWaitEvent(t, f);
  LUNACU_LAUNCH(add_one, 1, 4, 0, t, x);
  float ms = -1;
  CHECK(cudaEventElapsedTime(&ms, e, f) == cudaErrorNotReady, "no time yet");
  CHECK(cudaStreamSynchronize(t) == cudaSuccess && fetch(x, 1)[0] == 7, "one stream waits for another's event");
  CHECK(cudaEventSynchronize(f) == cudaSuccess && cudaEventQuery(e) == cudaSuccess &&
        cudaEventElapsedTime(&ms, e, f) == cudaSuccess && ms >= 0, "time between events: %g", ms);
  cudaEventDestroy(e); cudaEventDestroy(f);

  /* streams that nothing orders run in either order */
  std::vector<int> orders;
  for (int i = 0; i < 8; i++) {
    cuda_host.seed = (uint64_t)i;
    cudaMemset(x, 0, 4);
    cudaStreamSynchronize(0);
    LUNACU_LAUNCH(add_one, 1, 1, 0, s, x);
    LUNACU_LAUNCH(scale, 1, 1, 0, t, x, 3.0f, 1);
    cudaDeviceSynchronize();
    orders.push_back((int)fetch(x, 1)[0]);
  }
  CHECK(*std::max_element(orders.begin(), orders.end()) == 3 && *std::min_element(orders.begin(), orders.end()) == 1,
        "unordered streams");

  LUNACU_LAUNCH(add_one, 1, 1, 0, s, x);
  cuda_host.fail_launch = 2;
  LUNACU_LAUNCH(add_one, 1, 1, 0, s, x);
  CHECK(cudaGetLastError() == cudaSuccess, "the first launch is good");
  LUNACU_LAUNCH(add_one, 1, 1, 0, s, x);
  CHECK(cudaGetLastError() == cudaErrorLaunchFailure && cudaGetLastError() == cudaSuccess &&
        cudaStreamSynchronize(s) == cudaSuccess, "the second is refused");

  cuda_host.fault = 2;
  LUNACU_LAUNCH(add_one, 1, 1, 0, s, x);
  LUNACU_LAUNCH(add_one, 1, 1, 0, s, x);
  LUNACU_LAUNCH(add_one, 1, 1, 0, s, x);
  CHECK(cudaGetLastError() == cudaSuccess, "a fault comes later");
  CHECK(cudaStreamSynchronize(s) == cudaErrorIllegalAddress, "the fault");
  void *p;
  CHECK(cudaMalloc(&p, 4) == cudaErrorIllegalAddress && cudaMemcpy(host, x, 4, cudaMemcpyDeviceToHost) ==
        cudaErrorIllegalAddress && cudaGetLastError() == cudaErrorIllegalAddress &&
        cudaGetLastError() == cudaErrorIllegalAddress && cudaStreamCreate(&t) == cudaErrorIllegalAddress, "stays");
  CHECK(cudaFree(x) == cudaErrorIllegalAddress && cuda_host.allocated == 0, "and memory is given back all the same");
  cuda_host_reset();
  CHECK(cudaStreamDestroy(s) == cudaSuccess && cudaStreamDestroy(s) == cudaErrorInvalidResourceHandle,
        "after the reset");
  cudaFreeHost(pinned);
  cuda_host_reset();
}

static void graphs() {
  cudaStream_t s;
  cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking);
  float *x = device<float>(4), *y = device<float>(4), *pinned, host[4] = {1, 2, 3, 4};
  cudaMallocHost(&pinned, 32);
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;

  CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal) == cudaSuccess, "begin");
  cudaMemcpyAsync(x, pinned, 16, cudaMemcpyHostToDevice, s);
  float by = 3;
  LUNACU_LAUNCH(scale, 1, 32, 0, s, x, by, 4);
  by = 5;
  LUNACU_LAUNCH(add_one, 1, 4, 0, s, x);
  cudaMemcpyAsync(y, x, 16, cudaMemcpyDeviceToDevice, s);
  cudaMemcpyAsync(pinned + 4, y, 16, cudaMemcpyDeviceToHost, s);
  CHECK(cudaStreamIsCapturing(s, &status) == cudaSuccess && status == cudaStreamCaptureStatusActive, "capturing");
  CHECK(cudaStreamEndCapture(s, &graph) == cudaSuccess && graph, "end");
  size_t nodes = 0;
  CHECK(cudaGraphGetNodes(graph, nullptr, &nodes) == cudaSuccess && nodes == 5, "%zu nodes", nodes);
  CHECK(cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess && cudaGraphDestroy(graph) == cudaSuccess, "instantiate");
  CHECK(cudaStreamSynchronize(s) == cudaSuccess && isnan(pinned[4]), "capture runs nothing");
  for (int i = 0; i < 3; i++) {
    pinned[0] = (float)i;
    CHECK(cudaGraphLaunch(exec, s) == cudaSuccess && cudaStreamSynchronize(s) == cudaSuccess && pinned[4] == 3 * i + 1,
          "replay %d: %g", i, pinned[4]);
  }
  CHECK(cuda_host.launches == 2 && cuda_host.replays == 3, "%ld launches", cuda_host.launches);
  cuda_host.fault = 4;
  cudaGraphLaunch(exec, s);
  CHECK(cudaStreamSynchronize(s) == cudaSuccess, "two kernels to go");
  cudaGraphLaunch(exec, s);
  CHECK(cudaStreamSynchronize(s) == cudaErrorIllegalAddress, "a fault within a replay");
  cuda_host_reset();
  cudaFree(y);
  cudaGraphLaunch(exec, s);
  CHECK(cudaStreamSynchronize(s) == cudaErrorIllegalAddress && strstr(cuda_host.message, "came after their end"),
        "a replay into freed memory: %s", cuda_host.message);
  cuda_host_reset();
  CHECK(cudaGraphExecDestroy(exec) == cudaSuccess, "destroy");

  void *p;
  cudaEvent_t e;
  cudaEventCreate(&e);
  const std::function<cudaError_t()> forbidden[] = {[&] { return cudaMalloc(&p, 4); }, [&] { return cudaFree(x); },
      [&] { return cudaDeviceSynchronize(); }, [&] { return cudaStreamSynchronize(s); },
      [&] { return cudaStreamSynchronize(nullptr); }, [&] { return cudaMemcpy(x, host, 4, cudaMemcpyHostToDevice); },
          [&] { return cudaStreamQuery(s); }, [&] { return cudaEventSynchronize(e); },
      [&] { return cudaMemset(x, 0, 4); }, [&] { return cudaMallocHost(&p, 4); }};
  for (auto &call : forbidden) {
    cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal);
    CHECK(call() == cudaErrorStreamCaptureUnsupported && cudaGetLastError() == cudaErrorStreamCaptureUnsupported,
          "forbidden call %d", (int)(&call - forbidden));
    CHECK(cudaStreamIsCapturing(s, &status) == cudaSuccess && status == cudaStreamCaptureStatusInvalidated,
          "it spoils the capture");
    LUNACU_LAUNCH(add_one, 1, 4, 0, s, x);
    CHECK(cudaGetLastError() == cudaErrorStreamCaptureInvalidated, "nothing more is taken");
    CHECK(cudaStreamEndCapture(s, &graph) == cudaErrorStreamCaptureInvalidated && !graph, "no graph");
    cudaGetLastError();
  }
  CHECK(cuda_host.errors == 0, "CUDA's own errors are not findings");

  cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal);
  cudaEventRecord(e, s);
  CHECK(cudaEventSynchronize(e) != cudaSuccess && cudaStreamEndCapture(s, &graph) == cudaErrorStreamCaptureInvalidated,
        "an event of a capture");
  finds("pageable source in a capture", "from pageable host memory", [&] {
    cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal);
    CHECK(cudaMemcpyAsync(x, host, 16, cudaMemcpyHostToDevice, s) == cudaErrorStreamCaptureUnsupported,
          "pageable source");
    CHECK(cudaStreamEndCapture(s, &graph) == cudaErrorStreamCaptureInvalidated, "pageable source");
  });
  finds("pageable target in a capture", "to pageable host memory", [&] {
    cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal);
    cudaMemcpyAsync(host, x, 16, cudaMemcpyDeviceToHost, s);
    cudaStreamEndCapture(s, &graph);
  });

  cudaStream_t t;
  cudaStreamCreate(&t);
  cudaStreamBeginCapture(t, cudaStreamCaptureModeGlobal);
  LUNACU_LAUNCH(add_one, 1, 4, 0, 0, x);
  CHECK(cudaGetLastError() == cudaErrorStreamCaptureImplicit &&
      cudaStreamEndCapture(t, &graph) == cudaErrorStreamCaptureInvalidated,
          "the legacy stream spoils a blocking stream's capture");
  CHECK(cudaStreamBeginCapture(nullptr, cudaStreamCaptureModeGlobal) == cudaErrorStreamCaptureUnsupported &&
        cudaStreamEndCapture(t, &graph) == cudaErrorIllegalState, "no capture");
  cudaEventDestroy(e);
  cudaStreamDestroy(s); cudaStreamDestroy(t);
  cudaFree(x);
  cudaFreeHost(pinned);
  CHECK(cuda_host.allocated == 0, "%zu bytes left", cuda_host.allocated);
  cuda_host_reset();
}

/* ---------------------------------------------------------------------------------------------------------------------
   cuBLAS
   ------------------------------------------------------------------------------------------------------------------ */
static double products_differ(cublasHandle_t h, int m, int n, int k, bool op_a, bool op_b, float alpha, float beta,
                              int batch, bool shared_b, int how, cublasComputeType_t compute) {
  const int lda = (op_a ? k : m) + 3, ldb = (op_b ? n : k) + 1, ldc = m + 2, a_size = lda * (op_a ? m : k),
      b_size = ldb * (op_b ? k : n), c_size = ldc * n;
  const int stride_b = shared_b ? 0 : b_size;
  const std::vector<float> a = numbers((size_t)a_size * batch, 3), b = numbers((size_t)b_size * batch, 4);
  std::vector<float> c = numbers((size_t)c_size * batch, 5), expected = c;
  if (beta == 0)
    for (int s = 0; s < batch; s++)
      for (int j = 0; j < n; j++) for (int i = 0; i < m; i++) c[s * c_size + j * ldc + i] = NAN;
  for (int s = 0; s < batch; s++)
    for (int j = 0; j < n; j++)
      for (int i = 0; i < m; i++) {
        double sum = 0;
        for (int p = 0; p < k; p++)
          sum += (double)a[s * a_size + (op_a ? i * lda + p : p * lda + i)] *
              b[s * stride_b + (op_b ? p * ldb + j : j * ldb + p)];
        float &out = expected[s * c_size + j * ldc + i];
        out = (float)(alpha * sum + (beta == 0 ? 0 : beta * out));
      }
  float *da = upload(a), *db = upload(b), *dc = upload(c);
  const cublasOperation_t ta = op_a ? CUBLAS_OP_T : CUBLAS_OP_N, tb = op_b ? CUBLAS_OP_T : CUBLAS_OP_N;
  cublasStatus_t status;
  if (how == 0) status = cublasSgemm(h, ta, tb, m, n, k, &alpha, da, lda, db, ldb, &beta, dc, ldc);
  else if (how == 1)
    status = cublasSgemmStridedBatched(h, ta, tb, m, n, k, &alpha, da, lda, a_size, db, ldb, stride_b, &beta, dc, ldc,
                                       c_size, batch);
  else if (how == 2)
    status = cublasGemmEx(h, ta, tb, m, n, k, &alpha, da, CUDA_R_32F, lda, db, CUDA_R_32F, ldb, &beta, dc, CUDA_R_32F,
                          ldc, compute, CUBLAS_GEMM_DEFAULT);
  else status = cublasGemmStridedBatchedEx(h, ta, tb, m, n, k, &alpha, da, CUDA_R_32F, lda, a_size, db, CUDA_R_32F, ldb,
      stride_b, &beta, dc, CUDA_R_32F, ldc, c_size, batch, compute, CUBLAS_GEMM_DEFAULT);
  CHECK(status == CUBLAS_STATUS_SUCCESS, "%s", cublasGetStatusString(status));
  alpha = beta = NAN;                                                /* were read at the call */
  c = fetch(dc, c.size());
  cudaFree(da); cudaFree(db); cudaFree(dc);
  return test_error(c.data(), expected.data(), c.size());
}

static void cublas() {
  cublasHandle_t h;
  CHECK(cublasCreate(&h) == CUBLAS_STATUS_SUCCESS && cublasSetMathMode(h, CUBLAS_DEFAULT_MATH) == CUBLAS_STATUS_SUCCESS,
        "create");
  char *workspace = device<char>(4096);
  CHECK(cublasSetWorkspace(h, workspace, 4096) == CUBLAS_STATUS_SUCCESS &&
        cublasSetWorkspace(h, workspace + 1, 4000) == CUBLAS_STATUS_INVALID_VALUE, "workspace");
  for (int ops = 0; ops < 4; ops++)
    for (int how = 0; how < 4; how++)
      for (float beta : {0.0f, 1.0f, 0.5f})
        for (float alpha : {1.0f, -0.25f, 0.0f})
          for (int k : {13, 0}) {
            const double error = products_differ(h, 7, 19, k, ops & 1, ops & 2, alpha, beta, how & 1 ? 3 : 1, how == 3,
                                                 how, CUBLAS_COMPUTE_32F);
            CHECK(error < 1e-6, "ops %d how %d alpha %g beta %g k %d: error %g", ops, how, alpha, beta, k, error);
          }
  const double tf32 = products_differ(h, 40, 30, 50, false, true, 1, 0, 1, false, 2, CUBLAS_COMPUTE_32F_FAST_TF32),
      bf16 = products_differ(h, 40, 30, 50, false, true, 1, 0, 1, false, 2, CUBLAS_COMPUTE_32F_FAST_16BF);
  CHECK(tf32 > 1e-5 && tf32 < 1e-3 && bf16 > 1e-3 && bf16 < 1e-2, "rounded inputs: %g %g", tf32, bf16);
  cublasSetMathMode(h, CUBLAS_TF32_TENSOR_OP_MATH);
  CHECK(products_differ(h, 40, 30, 50, false, true, 1, 0, 1, false, 0, CUBLAS_COMPUTE_32F) == tf32 &&
      products_differ(h, 40, 30, 50, false, true, 1, 0, 1, false, 2, CUBLAS_COMPUTE_32F_PEDANTIC) < 1e-6, "math modes");

  const float one = 1, zero = 0;
  float *x = upload(numbers(64, 1)), *y = device<float>(64);
  const cublasStatus_t bad = CUBLAS_STATUS_INVALID_VALUE, good = CUBLAS_STATUS_SUCCESS;
  const auto call = [&](int m, int n, int k, int lda, int ldb, int ldc) {
    return cublasSgemm(h, CUBLAS_OP_N, CUBLAS_OP_N, m, n, k, &one, x, lda, x, ldb, &zero, y, ldc);
  };
  CHECK(call(8, 8, 8, 7, 8, 8) == bad && call(8, 8, 8, 8, 7, 8) == bad && call(8, 8, 8, 8, 8, 7) == bad &&
        call(-1, 8, 8, 8, 8, 8) == bad && call(0, 8, 8, 0, 8, 8) == bad, "refused");
  CHECK(call(0, 8, 8, 8, 8, 8) == good && call(8, 0, 8, 8, 8, 8) == good && cuda_host.errors == 0, "empty");
  cublasSetPointerMode(h, CUBLAS_POINTER_MODE_DEVICE);
  CHECK(call(8, 8, 8, 8, 8, 8) == CUBLAS_STATUS_NOT_SUPPORTED, "device scalars");
  cublasSetPointerMode(h, CUBLAS_POINTER_MODE_HOST);
  finds("a product outside", "outside its allocations", [&] { call(8, 8, 9, 8, 9, 8); });
  cuda_host.fail_launch = 1;
  CHECK(call(8, 8, 8, 8, 8, 8) == CUBLAS_STATUS_EXECUTION_FAILED && call(8, 8, 8, 8, 8, 8) == good,
        "a product refused");
  cuda_host.fault = 1;
  call(8, 8, 8, 8, 8, 8);
  CHECK(cudaDeviceSynchronize() == cudaErrorIllegalAddress && call(8, 8, 8, 8, 8, 8) == CUBLAS_STATUS_EXECUTION_FAILED,
        "a product faults");
  cuda_host_reset();

  cudaStream_t s;
  cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking);
  cublasSetStream(h, s);
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal);
  call(8, 8, 8, 8, 8, 8);
  CHECK(cudaStreamEndCapture(s, &graph) == cudaSuccess && cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess,
        "a product captured");
  float before = 0;
  for (int i = 0; i < 2; i++) {
    LUNACU_LAUNCH(scale, 2, 32, 0, s, x, 2.0f, 64);
    cudaGraphLaunch(exec, s);
    cudaStreamSynchronize(s);
    const float now = fetch(y, 1)[0];
    if (i) CHECK(now == 4 * before, "a product replayed: %g after %g", now, before);
    before = now;
  }
  cudaGraphDestroy(graph);
  cudaGraphExecDestroy(exec);
  cublasDestroy(h);
  cudaStreamDestroy(s);
  for (void *p : {(void *)x, (void *)y, (void *)workspace}) cudaFree(p);
  CHECK(cuda_host.allocated == 0 && cuda_host.errors == 0, "%s", cuda_host.message);
}

/* ---------------------------------------------------------------------------------------------------------------------
   Two devices, and a build without code for one
   ------------------------------------------------------------------------------------------------------------------ */
static void devices() {
  const float one = 1, zero = 0;
  cudaStream_t stream[2];
  cudaEvent_t event[2];
  cublasHandle_t handle[2];
  float *x[2], host[4] = {1, 2, 3, 4};
  int device = -1;
  cudaPointerAttributes attributes;
  cuda_host.devices = 2;
  for (int d = 0; d < 2; d++) {
    CHECK(cudaSetDevice(d) == cudaSuccess && cudaGetDevice(&device) == cudaSuccess && device == d, "device %d is %d", d,
          device);
    cudaStreamCreate(&stream[d]);
    cudaEventCreate(&event[d]);
    cublasCreate(&handle[d]);
    cublasSetStream(handle[d], stream[d]);
    x[d] = ::device<float>(8);
  }
  CHECK(cudaSetDevice(2) == cudaErrorInvalidDevice && cudaGetLastError() == cudaErrorInvalidDevice &&
            cudaGetDevice(&device) == cudaSuccess && device == 1,
        "a third device");
  CHECK(cudaPointerGetAttributes(&attributes, x[1]) == cudaSuccess && attributes.device == 1 &&
            cudaPointerGetAttributes(&attributes, x[0] + 3) == cudaSuccess && attributes.device == 0,
        "memory says its device");
  const auto multiply = [&](int h, float *a, float *c) {
    return cublasSgemm(handle[h], CUBLAS_OP_N, CUBLAS_OP_N, 2, 2, 2, &one, a, 2, a, 2, &zero, c, 2);
  };
  finds("a stream of another device", "a launch into a stream of device 0 while device 1", [&] {
    CHECK(LUNACU_START(add_one, 1, 4, 0, stream[0], x[0]) == cudaErrorInvalidResourceHandle,
          "a launch into another device's stream");
  });
  finds("memory of another device", "memory of device 0", [&] { LUNACU_LAUNCH(add_one, 1, 4, 0, stream[1], x[0]); });
  finds("a fill in another device's stream", "a fill in a stream of device 0",
        [&] { CHECK(cudaMemsetAsync(x[0], 0, 16, stream[0]) != cudaSuccess, "such a fill"); });
  finds("a fill of another device's memory", "a fill of memory of device 0",
        [&] { CHECK(cudaMemsetAsync(x[0], 0, 16, stream[1]) != cudaSuccess, "such a fill"); });
  finds("another device's handle", "a product by a handle of device 0",
        [&] { CHECK(multiply(0, x[0], x[0]) != CUBLAS_STATUS_SUCCESS, "such a product"); });
  finds("another device's memory in a product", "a product in memory of device 0",
        [&] { CHECK(multiply(1, x[1], x[0]) != CUBLAS_STATUS_SUCCESS, "such a product"); });
  finds("another device's event", "an event of device 0 is recorded",
        [&] { CHECK(cudaEventRecord(event[0], stream[1]) == cudaErrorInvalidResourceHandle, "such an event"); });

  cudaMemcpyAsync(x[0], host, 16, cudaMemcpyHostToDevice, stream[0]); /* these may be called with any device current */
  CHECK(cudaEventRecord(event[0], stream[0]) == cudaSuccess && cudaStreamWaitEvent(stream[1], event[0]) == cudaSuccess,
        "a stream waits for another device's event");
  cudaMemcpyAsync(x[1], x[0], 16, cudaMemcpyDeviceToDevice, stream[1]);
  LUNACU_LAUNCH(add_one, 1, 4, 0, stream[1], x[1]);
  CHECK(multiply(1, x[1], x[1] + 4) == CUBLAS_STATUS_SUCCESS && cudaStreamSynchronize(stream[0]) == cudaSuccess &&
            cudaStreamSynchronize(stream[1]) == cudaSuccess,
        "the right device");
  CHECK(fetch(x[1] + 4, 1)[0] == 2 * 2 + 4 * 3 && cuda_host.errors == 0, "%g, %s", fetch(x[1] + 4, 1)[0],
        cuda_host.message);

  cuda_host.no_image = cudaErrorNoKernelImageForDevice;
  cudaFuncAttributes a;
  CHECK(LUNACU_START(add_one, 1, 4, 0, stream[1], x[1]) == cudaErrorNoKernelImageForDevice &&
            cudaGetLastError() == cudaErrorNoKernelImageForDevice &&
            cudaFuncGetAttributes(&a, add_one) == cudaErrorNoKernelImageForDevice &&
            cudaGetLastError() != cudaSuccess && cudaGetLastError() == cudaSuccess,
        "no code for this device");
  CHECK(cudaMemsetAsync(x[1], 0, 16, stream[1]) == cudaSuccess && cudaStreamSynchronize(stream[1]) == cudaSuccess,
        "a fill needs none");
  cuda_host.no_image = 0;
  for (int d = 0; d < 2; d++) {
    cudaFree(x[d]);
    cublasDestroy(handle[d]);
    cudaEventDestroy(event[d]);
    cudaStreamDestroy(stream[d]);
  }
  cudaSetDevice(0);
  cuda_host.devices = 1;
  CHECK(cuda_host.errors == 0 && cuda_host.allocated == 0, "%s", cuda_host.message);
}

/* ---------------------------------------------------------------------------------------------------------------------
   More than there is room for, and threads
   ------------------------------------------------------------------------------------------------------------------ */
static __global__ void mark_block(float *y) { y[blockIdx.x] = 1 + (float)blockIdx.x; }

static void vast() {
#ifndef CUDA_HOST_ASAN
  const size_t count = (size_t)3 << 28;      /* 3 GB, of which a few pages are used */
  cuda_host.sample = 2;
  cuda_host.memory = (size_t)4 << 30;
  float *y = device<float>(count);
  CHECK(y && fetch(y + count - 3, 3) == std::vector<float>(3, 0.0f), "vast memory is zeros");
  LUNACU_LAUNCH(mark_block, 100, 1, 0, 0, y + count - 100);
  const std::vector<float> ends = fetch(y + count - 100, 100);
  for (int i = 0; i < 100; i++)
    if (!CHECK(ends[(size_t)i] == (i < 2 || i >= 98 ? 1 + i : 0), "block %d of a sampled launch", i)) break;
  LUNACU_LAUNCH(mark_block, 4, 1, 0, 0, y);
  CHECK(fetch(y, 5) == (std::vector<float>{1, 2, 3, 4, 0}), "a launch of few blocks runs them all");
  CHECK(cudaMemset(y + count - 100, 0, 400) == cudaSuccess && fetch(y + count - 1, 1)[0] == 0, "filled with zeros");
  cudaFree(y);
  cuda_host.sample = 0;
  cuda_host.memory = cuda_host_state().memory;
  CHECK(cuda_host.errors == 0, "vast memory: %s", cuda_host.message);
  cuda_host_reset();
#endif
}

static void threads() {
  cudaStream_t s = nullptr;
  cudaGraph_t graph = nullptr;
  void *p = nullptr;
  cudaError_t there[3] = {cudaErrorUnknown, cudaErrorUnknown, cudaErrorUnknown};
  CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking) == cudaSuccess, "a stream");
  CHECK(cudaMalloc(&p, (size_t)1 << 60) == cudaErrorMemoryAllocation, "an error of this thread's");
  std::thread([&] { there[0] = cudaGetLastError(); }).join();
  CHECK(there[0] == cudaSuccess && cudaGetLastError() == cudaErrorMemoryAllocation, "a last error is its thread's");
  for (int kind = 0; kind < 2; kind++) {     /* memory for another thread spoils a global capture alone */
    const bool global = kind == 1;
    CHECK(cudaStreamBeginCapture(s, global ? cudaStreamCaptureModeGlobal : cudaStreamCaptureModeThreadLocal) ==
          cudaSuccess, "a capture");
    std::thread([&] {
      there[1] = cudaMalloc(&p, 4);
      there[2] = p ? cudaFree(p) : cudaSuccess;
    }).join();
    CHECK(there[1] == (global ? cudaErrorStreamCaptureUnsupported : cudaSuccess) && there[2] == cudaSuccess,
          "another thread's memory while a stream is captured: %s", cudaGetErrorName(there[1]));
    CHECK(cudaStreamEndCapture(s, &graph) == (global ? cudaErrorStreamCaptureInvalidated : cudaSuccess),
          "a capture's end");
    if (graph) cudaGraphDestroy(graph);
    p = nullptr;
  }
  cudaStreamDestroy(s);
  cudaDeviceSynchronize();
  cuda_host_reset();
}

/* Device memory is opened and closed for each call. Memory that another thread maps meanwhile stays that thread's. */
static void mapping() {
  const size_t bytes = 64 << 20;
  std::atomic<bool> over{false};
  long mapped = 0, lost = 0;
  std::thread other([&] {
    for (; !over; mapped++) {
      char *block = (char *)mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (block == MAP_FAILED) continue;
      const char *hidden = cudahost::m.hidden;
      lost += cudahost::in_device(block) || (block >= hidden && block < hidden + cudahost::RESERVE);
      munmap(block, bytes);
    }
  });
  int *x = device<int>(1);
  for (int i = 0; i < 5000; i++) cudaMemset(x, i & 127, sizeof *x), cudaDeviceSynchronize();
  over = true;
  other.join();
  CHECK(mapped > 0 && lost == 0, "%ld of another thread's %ld blocks lay in device memory", lost, mapped);
  cudaFree(x);
}

int main() {
  cuda_host.quiet = true;                    /* the findings here are wanted */
  right_kernels();
  cuda_host_reset();
  wrong_kernels();
  limits();
  memory();
  streams();
  graphs();
  cublas();
  devices();
  vast();
  threads();
  mapping();
  return test_report("cuda_host");
}
