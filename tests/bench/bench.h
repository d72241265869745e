/* bench.h: what the benchmarks share. Cases that belong together are run in turn, A B A B ..., the machine's
   multiply-add peak is measured beside every run, on as many threads, or a read-only pass, and medians are told: of the
   time, of the share of that. One line of JSON a case goes to the file that the program's argument names. In the
   environment: BENCH_ROWS, only cases whose name has this in it, and those that belong to them; BENCH_ISA, the
   instruction set of layers and models, "AVX2" for instance; BENCH_TURN and BENCH_RUNS, set by tests/bench/compare.sh:
   two programs take turns, a run each, BENCH_RUNS after the first. A case's name, with its threads, is what
   tests/bench/compare.sh knows it by. */
#ifndef BENCH_H
#define BENCH_H
#include "luna.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define BENCH_MOST_RUNS 64
#define BENCH_MOST_CASES 16

static FILE *bench_json;
static double bench_budget = 0.8;    /* seconds a case may take */
static int bench_turns;              /* runs of each case when two programs take turns, else 0 */

static double bench_seconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* --- the machine: multiply-adds in registers, and bytes read --- */
#if defined(__x86_64__)
#include <immintrin.h>
/* twelve chains of x = x * y + z, kept apart and in registers by the empty asm */
#define BENCH_CHAINS(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11)
#define BENCH_PEAK(name, isa, vector, width, set, step) \
  __attribute__((target(isa), noinline)) static double name(int64_t rounds) { \
    const vector y = set(0.999f), z = set(0.001f); \
    vector x0 = z, x1 = z, x2 = z, x3 = z, x4 = z, x5 = z, x6 = z, x7 = z, x8 = z, x9 = z, x10 = z, x11 = z; \
    const double start = bench_seconds(); \
    for (int64_t r = 0; r < rounds; r++) { BENCH_CHAINS(step) } \
    return (double)rounds * 24 * width / (bench_seconds() - start); \
  }
#define BENCH_SSE2(i) x##i = _mm_add_ps(_mm_mul_ps(x##i, y), z); __asm__ volatile("" : "+x"(x##i));
#define BENCH_AVX2(i) x##i = _mm256_fmadd_ps(x##i, y, z); __asm__ volatile("" : "+x"(x##i));
#define BENCH_AVX512(i) x##i = _mm512_fmadd_ps(x##i, y, z); __asm__ volatile("" : "+v"(x##i));
BENCH_PEAK(bench_peak_sse2, "sse2", __m128, 4, _mm_set1_ps, BENCH_SSE2)
BENCH_PEAK(bench_peak_avx2, "avx2,fma", __m256, 8, _mm256_set1_ps, BENCH_AVX2)
BENCH_PEAK(bench_peak_avx512, "avx512f", __m512, 16, _mm512_set1_ps, BENCH_AVX512)
static double bench_peak_one(luna_isa isa) {
  switch (isa == LUNA_ISA_BEST ? luna_isa_best() : isa) {
    case LUNA_ISA_SSE2: return bench_peak_sse2(500000);
    case LUNA_ISA_AVX2:
    case LUNA_ISA_AVX2_VNNI: return bench_peak_avx2(500000);
    case LUNA_ISA_AVX512:
    case LUNA_ISA_AVX512_VNNI:
    case LUNA_ISA_AVX512_BF16:
    case LUNA_ISA_AMX: return bench_peak_avx512(500000);
    default: return 0;
  }
}
__attribute__((target("avx2"), noinline, unused)) static double bench_read(const float *x, int64_t n, int64_t times) {
  __m256 a = _mm256_setzero_ps(), b = a, c = a, d = a;
  const double start = bench_seconds();
  for (int64_t t = 0; t < times; t++)
    for (int64_t i = 0; i + 32 <= n; i += 32) {
      a = _mm256_or_ps(a, _mm256_loadu_ps(x + i));
      b = _mm256_or_ps(b, _mm256_loadu_ps(x + i + 8));
      c = _mm256_or_ps(c, _mm256_loadu_ps(x + i + 16));
      d = _mm256_or_ps(d, _mm256_loadu_ps(x + i + 24));
    }
  a = _mm256_or_ps(_mm256_or_ps(a, b), _mm256_or_ps(c, d));
  __asm__ volatile("" : : "x"(a));
  return (double)n * 4 * (double)times / (bench_seconds() - start);
}
#else
static double bench_peak_one(luna_isa isa) { return (void)isa, 0.0; }
__attribute__((unused)) static double bench_read(const float *x, int64_t n, int64_t times) {
  volatile float sum = 0;
  const double start = bench_seconds();
  for (int64_t t = 0; t < times; t++)
    for (int64_t i = 0; i < n; i++) sum = sum + x[i];
  return (double)n * 4 * (double)times / (bench_seconds() - start);
}
#endif

/* the one of that name, or the best */
__attribute__((unused)) static luna_isa bench_isa(void) {
  const char *name = getenv("BENCH_ISA");
  for (int isa = 1; name && strcmp(luna_isa_name((luna_isa)isa), "unknown") != 0; isa++)
    if (strcmp(luna_isa_name((luna_isa)isa), name) == 0) return (luna_isa)isa;
  return LUNA_ISA_BEST;
}

typedef struct bench_worker { pthread_t thread; luna_isa isa; double rate; } bench_worker;
static void *bench_worker_main(void *self) {
  bench_worker *w = (bench_worker *)self;
  w->rate = bench_peak_one(w->isa);
  return NULL;
}
/* flops a second of `threads` cores at once; 0 where it is not known how to measure them */
static double bench_peak(luna_isa isa, int threads) {
  bench_worker others[64];
  double sum;
  int i, started = 0;
  for (i = 1; i < threads && i < 64; i++) {
    others[i].isa = isa;
    if (pthread_create(&others[i].thread, NULL, bench_worker_main, &others[i]) != 0) break;
    started = i;
  }
  sum = bench_peak_one(isa);
  for (i = 1; i <= started; i++) {
    pthread_join(others[i].thread, NULL);
    sum += others[i].rate;
  }
  return sum;
}

/* nanoseconds until a word written by one thread is answered by another: about 100 where their cores share a cache,
   several times that where not */
static volatile int bench_turn;
static void *bench_answer(void *rounds) {
  for (int i = *(int *)rounds; i > 0; i--) {
    while (__atomic_load_n(&bench_turn, __ATOMIC_ACQUIRE) != 1) {}
    __atomic_store_n(&bench_turn, 0, __ATOMIC_RELEASE);
  }
  return NULL;
}
__attribute__((unused)) static double bench_round_trip(void) {
  int rounds = 20000;
  pthread_t other;
  double start;
  if (pthread_create(&other, NULL, bench_answer, &rounds) != 0) return 0;
  start = bench_seconds();
  for (int i = 0; i < rounds; i++) {
    __atomic_store_n(&bench_turn, 1, __ATOMIC_RELEASE);
    while (__atomic_load_n(&bench_turn, __ATOMIC_ACQUIRE) != 0) {}
  }
  start = bench_seconds() - start;
  pthread_join(other, NULL);
  return 1e9 * start / rounds;
}

/* a busy neighbour on each core: processes that compute until they are ended, or this one has */
enum { BENCH_MAX_BUSY = 64 };
static pid_t bench_neighbours[BENCH_MAX_BUSY];
static int bench_neighbour_count;
__attribute__((unused)) static void bench_busy(int count) {
  const pid_t parent = getpid();
  fflush(NULL);
  for (; bench_neighbour_count < count && bench_neighbour_count < BENCH_MAX_BUSY; bench_neighbour_count++) {
    const pid_t child = fork();
    if (child < 0) return;
    if (child == 0) {
      volatile unsigned x = 0;
      while (getppid() == parent) for (int i = 0; i < 1000000; i++) x = x + 1;
      _exit(0);
    }
    bench_neighbours[bench_neighbour_count] = child;
  }
}
__attribute__((unused)) static void bench_quiet(void) {
  while (bench_neighbour_count > 0) {
    kill(bench_neighbours[--bench_neighbour_count], SIGKILL);
    waitpid(bench_neighbours[bench_neighbour_count], NULL, 0);
  }
}

/* --- cases --- */
typedef struct bench_case {
  char name[80];
  int threads;                       /* 0 = 1 */
  luna_isa isa;
  double flops;                      /* of one run, or 0 */
  /* not null: the share is that of a read-only pass over `floats` of these, measured beside */
  const float *read;
  int64_t floats;
  void (*run)(void *arg);
  void *arg;
  const luna_ctx *ctx;               /* whose peak memory is reported, or null */
  double min;                      /* share that is expected, or 0 */
  bool once;                       /* one run is enough (two in turns) */
  /* found: */
  double seconds, share;
  size_t bytes;
} bench_case;

static int bench_by_size(const void *a, const void *b) {
  const double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}
static double bench_median(double *x, int count) {
  qsort(x, (size_t)count, sizeof *x, bench_by_size);
  return count % 2 ? x[count / 2] : 0.5 * (x[count / 2 - 1] + x[count / 2]);
}

/* flops, or floats read, a second: what a case is a share of */
static double bench_limit(const bench_case *c) {
  if (c->read) return bench_read(c->read, c->floats, ((int64_t)8 << 20) / c->floats + 1) / 4;
  return bench_peak(c->isa ? c->isa : bench_isa(), c->threads ? c->threads : 1);
}
/* The other program's turn: a byte to descriptor 4, and until one comes from 3 this one waits. At the other's end there
   is none to wait for. */
static void bench_wait_turn(void) {
  char byte;
  if (read(3, &byte, 1) < 0) exit(1);
}
static void bench_pass_turn(void) {
  if (!bench_turns) return;
  if (write(4, "", 1) == 1) bench_wait_turn();
}
static double bench_run(const bench_case *c, int64_t times, double *share, double *limit) {
  const double before = bench_limit(c), start = bench_seconds();
  double seconds;
  for (int64_t t = 0; t < times; t++) c->run(c->arg);
  seconds = (bench_seconds() - start) / (double)times;
  *limit = 0.5 * (before + bench_limit(c));
  *share = *limit > 0 ? (c->read ? (double)c->floats : c->flops) / seconds / *limit : 0;
  bench_pass_turn();
  return seconds;
}

/* runs the cases in turn until each had its time, and prints a line of each; where one takes a second, its first run
   counts */
static bool bench_is_wanted(const char *name) {
  const char *part = getenv("BENCH_ROWS");
  return !part || strstr(name, part) != NULL;
}
static void bench_cases(bench_case *cases, int count) {
  static double seconds[BENCH_MOST_CASES][BENCH_MOST_RUNS], shares[BENCH_MOST_CASES][BENCH_MOST_RUNS],
      limits[BENCH_MOST_CASES][BENCH_MOST_RUNS];
  int64_t times[BENCH_MOST_CASES];
  int runs = 0, i;
  double spent = 0;
  bool wanted = false;
  for (i = 0; i < count; i++) wanted = wanted || bench_is_wanted(cases[i].name);
  if (!wanted) return;
  for (i = 0; i < count; i++) {
    const double once = seconds[i][0] = bench_run(&cases[i], 1, &shares[i][0], &limits[i][0]);
    times[i] = once > 0.005 ? 1 : (int64_t)(0.005 / (once + 1e-9)) + 1;
    if ((once > 1 && !bench_turns) || cases->once) runs = 1;
  }
  while (bench_turns ? runs < (cases->once ? 2 : bench_turns)
                     : !cases->once && runs < BENCH_MOST_RUNS && (runs < 3 || (runs < 5 && spent < 3) ||
                                                                  spent < bench_budget * count)) {
    const double begin = bench_seconds();
    for (i = 0; i < count; i++) seconds[i][runs] = bench_run(&cases[i], times[i], &shares[i][runs], &limits[i][runs]);
    spent += bench_seconds() - begin;
    runs++;
  }
  for (i = 0; i < count; i++) {
    bench_case *c = &cases[i];
    if (bench_json) {
      fprintf(bench_json, "{\"name\": \"%s\", \"threads\": %d, \"runs\": [", c->name, c->threads ? c->threads : 1);
      for (int r = 0; r < runs; r++) fprintf(bench_json, "%s%.5f", r ? ", " : "", 1e3 * seconds[i][r]);
    }
    const double rate = (c->seconds = bench_median(seconds[i], runs), c->flops / c->seconds * 1e-9);
    c->share = bench_median(shares[i], runs);
    if (c->ctx) c->bytes = luna_memory(c->ctx).peak;
    printf("  %-46s %3d %10.3f", c->name, c->threads ? c->threads : 1, 1e3 * c->seconds);
    if (c->flops > 0) printf(" %8.1f", rate);
    else printf(" %8s", "");
    if (c->share > 0) printf("  %5.1f%%", 100 * c->share);
    else printf("  %6s", "");
    if (c->read) printf(" of reads at %.0f GB/s", 4e-9 * bench_median(limits[i], runs));
    if (c->min > 0) printf("  (at least %.0f%%)", 100 * c->min);
    if (c->bytes) printf("  %.1f MB", (double)c->bytes * 1e-6);
    puts("");
    if (bench_json)
      fprintf(bench_json, "], \"gflops\": %.2f, \"share\": %.4f, \"ms\": %.5f, \"peak\": %zu}\n", rate, c->share,
              1e3 * c->seconds, c->bytes);
  }
  fflush(stdout);
}

static void bench_title(const char *title) {
  printf("\n%s\n  %-46s %3s %10s %8s  %6s\n", title, "", "thr", "ms", "GF/s", "share");
}

static void bench_start(int argc, char **argv) {
  const char *turn = getenv("BENCH_TURN"), *runs = getenv("BENCH_RUNS");
  bench_turns = turn && runs ? atoi(runs) : 0;
  if (bench_turns < 0 || bench_turns > BENCH_MOST_RUNS) bench_turns = BENCH_MOST_RUNS;
  if (bench_turns) signal(SIGPIPE, SIG_IGN);
  if (bench_turns && strcmp(turn, "second") == 0) bench_wait_turn();
  if (argc > 1 && (bench_json = fopen(argv[1], "w")) == NULL) {
    fprintf(stderr, "cannot write %s\n", argv[1]);
    exit(1);
  }
}
static void bench_end(void) {
  if (bench_json) fclose(bench_json);
}
#endif
