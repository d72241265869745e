/* bench_gemm: what share of one core's multiply-add peak luna_gemm_f32 reaches, for every instruction set.
   The peak is measured beside each row, in registers alone; a row's share is the median of its runs. */
#define LUNA_IMPLEMENTATION
#include "luna.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define RUNS 11

static double seconds(void) { return (double)clock() / CLOCKS_PER_SEC; } /* of this process: neighbours do not count */

#if (defined(__x86_64__)) && (defined(__GNUC__) || defined(__clang__))
#include <immintrin.h>
/* twelve chains of x = x * y + z, kept apart and in registers by the empty asm */
#define CHAINS(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11)
#define PEAK(name, isa, vector, width, set, step) \
  __attribute__((target(isa), noinline)) static double name(int64_t rounds) { \
    const vector y = set(0.999f), z = set(0.001f); \
    vector x0 = z, x1 = z, x2 = z, x3 = z, x4 = z, x5 = z, x6 = z, x7 = z, x8 = z, x9 = z, x10 = z, x11 = z; \
    const double start = seconds(); \
    for (int64_t r = 0; r < rounds; r++) { CHAINS(step) } \
    return (double)rounds * 24 * width / (seconds() - start); \
  }
#define STEP_SSE2(i) x##i = _mm_add_ps(_mm_mul_ps(x##i, y), z); __asm__ volatile("" : "+x"(x##i));
#define STEP_AVX2(i) x##i = _mm256_fmadd_ps(x##i, y, z); __asm__ volatile("" : "+x"(x##i));
#define STEP_AVX512(i) x##i = _mm512_fmadd_ps(x##i, y, z); __asm__ volatile("" : "+v"(x##i));
PEAK(peak_sse2, "sse2", __m128, 4, _mm_set1_ps, STEP_SSE2)
PEAK(peak_avx2, "avx2,fma", __m256, 8, _mm256_set1_ps, STEP_AVX2)
PEAK(peak_avx512, "avx512f", __m512, 16, _mm512_set1_ps, STEP_AVX512)
static double peak_of(luna_isa isa) {
  switch (isa) {
    case LUNA_ISA_SSE2: return peak_sse2(1000000);
    case LUNA_ISA_AVX2: return peak_avx2(1000000);
    case LUNA_ISA_AVX512: return peak_avx512(1000000);
    default: return 0;
  }
}
#else
static double peak_of(luna_isa isa) { return (void)isa, 0.0; }
#endif

static int by_size(const void *a, const void *b) {
  const double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

typedef struct shape { int64_t m, n, k; bool transpose_b; } shape;

static void measure(luna_isa isa, shape s, float *a, float *b, float *c, void *scratch, size_t size) {
  double rate[RUNS], share[RUNS], flops = 2.0 * (double)s.m * (double)s.n * (double)s.k;
  luna_gemm_args g = {.a = a, .b = b, .c = c, .m = s.m, .n = s.n, .k = s.k, .transpose_b = s.transpose_b};
  const int times = (int)(1e9 / flops) + 1;
  g.run.isa = isa;
  g.run.scratch = scratch;
  g.run.scratch_size = size;
  for (int r = 0; r < RUNS; r++) {
    const double before = peak_of(isa), start = seconds();
    for (int i = 0; i < times; i++) luna_gemm_f32(&g);
    rate[r] = flops * times / (seconds() - start);
    const double after = peak_of(isa), peak = 0.5 * (before + after);
    share[r] = peak > 0 ? rate[r] / peak : 0;
  }
  qsort(rate, RUNS, sizeof *rate, by_size);
  qsort(share, RUNS, sizeof *share, by_size);
  printf("%-8s %5d %5d %5d  %-7s %8.1f", luna_isa_name(isa), (int)s.m, (int)s.n, (int)s.k, s.transpose_b ? "x W^T" : "A B", rate[RUNS / 2] * 1e-9);
  if (share[0] > 0) printf("  %5.1f%%  (best %.1f%%)", 100 * share[RUNS / 2], 100 * share[RUNS - 1]);
  puts("");
}

int main(void) {
  static const shape shapes[] = {{1024, 1024, 1024, true}, {1024, 1024, 1024, false}, {4096, 256, 256, true}, {4096, 256, 256, false},
                                 {4096, 16, 256, true}, {4096, 256, 16, false}, {16, 64, 4096, false}, {1, 512, 2048, true}};
  const size_t count = 4096 * 1024, size = (size_t)16 << 20;
  float *a = (float *)malloc(count * sizeof(float)), *b = (float *)malloc(count * sizeof(float)), *c = (float *)malloc(count * sizeof(float));
  void *scratch = malloc(size);
  if (!a || !b || !c || !scratch) return 1;
  for (size_t i = 0; i < count; i++) a[i] = (float)(i % 13) * 0.1f - 0.6f, b[i] = (float)(i % 11) * 0.1f - 0.5f, c[i] = 0;
  puts("gemm, one thread: median GFLOP/s and share of the peak measured beside it\n"
       "isa          m     n     k  layout    GF/s   share");
  for (int isa = LUNA_ISA_SCALAR; isa <= LUNA_ISA_WASM; isa++)
    for (size_t i = 0; luna_isa_available((luna_isa)isa) && i < sizeof shapes / sizeof *shapes; i++) measure((luna_isa)isa, shapes[i], a, b, c, scratch, size);
  free(a);
  free(b);
  free(c);
  free(scratch);
  return 0;
}
