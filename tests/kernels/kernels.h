/* What the tests of the kernels share; include it after luna.h's implementation, test.h and common.h. Arrays are as
   long as they must be and lie at odd places; scratch ends where the kernel said it does: the address sanitizer sees
   one byte too many. */
#ifndef KERNELS_H
#define KERNELS_H
#include "naive.h"
#include <pthread.h>

#if defined(__SANITIZE_ADDRESS__)
#define KERNELS_ASAN
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define KERNELS_ASAN
#endif
#endif
#ifdef KERNELS_ASAN
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(at, size) ((void)(at), (void)(size))
#define ASAN_UNPOISON_MEMORY_REGION(at, size) ((void)(at), (void)(size))
#endif

enum { KERNELS_GUARD = 64, KERNELS_THREADS = 4 };
static const int64_t kernels_threads[KERNELS_THREADS] = {1, 2, 3, 7};

/* what is under test now */
static const li_kernels *kernels;
static const char *kernels_name = "";
static uint64_t kernels_seed;

/* the next instruction set this machine has, *at from 0; false after the last */
TEST_UNUSED static bool kernels_next(int *at) {
  for (kernels = NULL; *at < COMMON_ISAS && !kernels; ++*at) {
    kernels = li_kernels_of(common_isas[*at]);
    kernels_name = luna_isa_name(common_isas[*at]);
  }
  kernels_seed = 1;
  return kernels != NULL;
}

/* as kernels_next, then the instruction sets that differ from AVX2 or AVX-512 in their products of 8 and 16 bits
   alone */
TEST_UNUSED static bool kernels_next_products(int *at) {
  static const luna_isa products[] = {LUNA_ISA_AVX2_VNNI, LUNA_ISA_AVX512_VNNI, LUNA_ISA_AVX512_BF16, LUNA_ISA_AMX};
  enum { COUNT = sizeof products / sizeof *products };
#ifdef LI_TILES_EMULATED          /* other builds of these tests run the rest */
  if (*at < COMMON_ISAS) *at = COMMON_ISAS + 2;
#endif
  if (*at < COMMON_ISAS && kernels_next(at)) return true;
  for (kernels = NULL; *at < COMMON_ISAS + COUNT && !kernels; ++*at) {
    kernels = li_kernels_of(products[*at - COMMON_ISAS]);
    kernels_name = luna_isa_name(products[*at - COMMON_ISAS]);
  }
  kernels_seed = 1;
  return kernels != NULL;
}

/* ---- work: two shares run backwards on the caller's thread, more on threads of their own ---- */
typedef struct kernels_job { void (*task)(void *work, int64_t index); void *work; int64_t index; } kernels_job;
static void *kernels_job_run(void *argument) {
  const kernels_job *job = (const kernels_job *)argument;
  job->task(job->work, job->index);
  return NULL;
}
static void kernels_for(void *user, int64_t count, void (*task)(void *work, int64_t index), void *work) {
  enum { MAX = 16 };
  pthread_t thread[MAX];
  kernels_job job[MAX];
  (void)user;
  if (count < 3 || count > MAX)
    while (count-- > 0) task(work, count);
  for (int64_t i = 0; i < count; i++) {
    job[i].task = task, job[i].work = work, job[i].index = i;
    if (pthread_create(&thread[i], NULL, kernels_job_run, &job[i]) != 0) exit(2);
  }
  for (int64_t i = 0; i < count; i++) pthread_join(thread[i], NULL);
}
TEST_UNUSED static li_parallel kernels_parallel(int64_t threads) {
  li_parallel parallel;
  parallel.run = kernels_for;
  parallel.user = NULL;
  parallel.threads = threads;
  return parallel;
}

/* ---- scratch: 64-aligned, full of NaN, with a guard behind it ---- */
typedef struct kernels_scratch { char *memory, *at; size_t size; } kernels_scratch;
TEST_UNUSED static kernels_scratch kernels_scratch_open(size_t size) {
  kernels_scratch s;
  s.memory = (char *)common_alloc(size + KERNELS_GUARD + 64);
  s.at = s.memory + (64 - (uintptr_t)s.memory % 64) % 64;
  s.size = size;
  memset(s.at, 0xFF, size);
  memset(s.at + size, 0x5A, KERNELS_GUARD);
  ASAN_POISON_MEMORY_REGION(s.at + size, KERNELS_GUARD);
  return s;
}
TEST_UNUSED static void kernels_scratch_close(kernels_scratch *s) {
  int whole = 0;
  ASAN_UNPOISON_MEMORY_REGION(s->at + s->size, KERNELS_GUARD);
  for (int i = 0; i < KERNELS_GUARD; i++) whole += s->at[s->size + (size_t)i] == 0x5A;
  CHECK(whole == KERNELS_GUARD, "%s: written beyond the %zu bytes of scratch asked for", kernels_name, s->size);
  free(s->memory);
}

/* ---- arrays, one float after an aligned place; release() frees them ---- */
TEST_UNUSED static float *zeros(int64_t n) { return (float *)common_alloc((size_t)(n + 1) * sizeof(float)) + 1; }
TEST_UNUSED static void release(const float *x) { free((float *)(uintptr_t)x - 1); }
TEST_UNUSED static float *random_floats(int64_t n, double scale) {
  float *x = zeros(n);
  common_fill(x, n, ++kernels_seed, scale);
  return x;
}
TEST_UNUSED static float *copied(const float *from, int64_t n) {
  float *x = zeros(n);
  if (n > 0) memcpy(x, from, (size_t)n * sizeof(float));
  return x;
}
TEST_UNUSED static void fill(float *x, int64_t n, float value) { for (int64_t i = 0; i < n; i++) x[i] = value; }
TEST_UNUSED static double *doubles(int64_t n) { return (double *)common_alloc((size_t)n * sizeof(double)); }
TEST_UNUSED static bool same(const float *a, const float *b, int64_t n) {
  return n <= 0 || memcmp(a, b, (size_t)n * sizeof(float)) == 0;
}
/* a whole number in [0, n) */
TEST_UNUSED static int64_t pick(int64_t n) { return (int64_t)(common_hash(++kernels_seed, 7) % (uint64_t)n); }

/* ---- what a kernel computes, beside its reference: results, and gradients that it adds to. Both start from
   KERNELS_START. ---- */
#define KERNELS_START 0.01f
enum { KERNELS_OUTPUTS = 7 };
typedef struct outputs {
  int count;
  const char *name[KERNELS_OUTPUTS];
  bool gradient[KERNELS_OUTPUTS];
  int64_t size[KERNELS_OUTPUTS];
  float *got[KERNELS_OUTPUTS];       /* of the kernel; after outputs_check those of one thread */
  double *want[KERNELS_OUTPUTS];     /* a reference sets results and adds to gradients */
} outputs;
TEST_UNUSED static float *outputs_add(outputs *o, const char *name, bool gradient, int64_t size) {
  const int i = o->count++;
  o->name[i] = name, o->gradient[i] = gradient, o->size[i] = size;
  o->got[i] = zeros(size), o->want[i] = doubles(size);
  for (int64_t j = 0; j < size; j++) o->want[i][j] = (double)KERNELS_START;
  return o->got[i];
}
TEST_UNUSED static void outputs_close(outputs *o) {
  for (int i = 0; i < o->count; i++) release(o->got[i]), free(o->want[i]);
}
TEST_UNUSED static double outputs_error(const outputs *o, int i, const float *first) {
  const double start = o->gradient[i] ? (double)KERNELS_START : 0, floor = o->gradient[i] ? 1e-2 : 1e-3;
  double difference = 0, size = 0;
  for (int64_t j = 0; j < o->size[i]; j++) {
    const double want = first ? (double)first[j] : o->want[i][j];
    if (want == -(double)INFINITY && o->got[i][j] == -INFINITY) continue; /* the log-sum-exp of nothing */
    difference += ((double)o->got[i][j] - want) * ((double)o->got[i][j] - want);
    size += (want - start) * (want - start);
  }
  size = sqrt(size);
  return difference == 0 ? 0 : sqrt(difference) / fmax(size, floor * sqrt((double)o->size[i]));
}
/* Runs a call with each number of threads and by the reference: near the double results, the same bits, near the
   reference. */
enum { KERNELS_RESULT, KERNELS_GRADIENT };
static const double kernels_tolerance[2] = {1e-6, 5e-6};
typedef void (*outputs_run)(const void *call, const li_kernels *table, int64_t threads);
TEST_UNUSED static void outputs_check(outputs *o, const char *what, outputs_run run, const void *call) {
  const li_kernels *reference = li_kernels_of(LUNA_ISA_REFERENCE);
  const bool is_long = o->size[0] > 50000; /* the reference's time grows with the square */
  float *first[KERNELS_OUTPUTS];
  if (kernels == reference && is_long) return;
  for (int s = 0; s < KERNELS_THREADS + !is_long; s++) {
    if (kernels == reference && s > 0) break; /* on the caller's thread alone */
    for (int i = 0; i < o->count; i++) fill(o->got[i], o->size[i], KERNELS_START);
    run(call, s < KERNELS_THREADS ? kernels : reference, s < KERNELS_THREADS ? kernels_threads[s] : 1);
    for (int i = 0; i < o->count; i++) {
      const double error = s == 0 ? outputs_error(o, i, NULL) : s < KERNELS_THREADS ? 0 : outputs_error(o, i, first[i]);
      const double max = kernels_tolerance[o->gradient[i]];
      if (s == 0) first[i] = copied(o->got[i], o->size[i]);
      CHECK(error <= max, "%s, %s: %s: error %.3g over %.3g%s", kernels_name, what, o->name[i], error, max,
            s ? " beside the reference" : "");
      CHECK(s == KERNELS_THREADS || same(o->got[i], first[i], o->size[i]), "%s, %s: %s: other bits with %d threads",
            kernels_name, what,
            o->name[i], (int)kernels_threads[s % KERNELS_THREADS]);
    }
  }
  for (int i = 0; i < o->count; i++) release(o->got[i]), o->got[i] = first[i];
}

/* ---- references in double ---- */
/* what dropout multiplies element e by */
TEST_UNUSED static double exact_dropout(const li_dropout *d, int64_t e) {
  if (d->threshold == 0) return 1;
  return naive_half_word(d->seed, d->op, d->step, (uint64_t)e) < d->threshold ? 0 : (double)d->keep;
}

#endif
