/* What the tests share: CHECK counts and prints only failures, test_report prints the last line, which the Makefile
   adds up.

   int main(void) {
     CHECK(1 + 1 == 2, "one and one made %d", 1 + 1);
     test_close("gemm 3x4", got, expected, 12, 2e-6);
     return test_report("example");          prints "example: 2 passed, 0 failed", returns 0 or 1
   }
*/
#ifndef TEST_H
#define TEST_H
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

/* what luna.h's reference trains by in tests: with LUNA_IMPLEMENTATION, include this before luna.h */
#ifndef LI_BACKWARD_REFERENCE
#define LI_BACKWARD_REFERENCE "tests/kernels/backward_reference.h"
#endif

/* 1: fewer repetitions of what is alike, for emulators (tests/tools/cross.sh) */
#ifndef TEST_QUICK
#define TEST_QUICK 0
#endif

static int test_passed, test_failed;

#ifdef __MINGW_PRINTF_FORMAT         /* the compiler's own `printf` there is Microsoft's, without %zu */
#define TEST_PRINTF __MINGW_PRINTF_FORMAT
#else
#define TEST_PRINTF printf
#endif
#if defined(__GNUC__) || defined(__clang__)
#define TEST_FORMAT(at) __attribute__((unused, format(TEST_PRINTF, at, (at) + 1)))
#define TEST_UNUSED __attribute__((unused))
#else
#define TEST_FORMAT(at)
#define TEST_UNUSED
#endif

/* whether everything runs, as make test-all wants it */
TEST_UNUSED static int test_full(void) {
  const char *full = getenv("TEST_FULL");
  return full && *full;
}
/* whether case n of many alike is due: each, or one in four, in no step with what goes by n modulo 2, 4 or 16 */
TEST_UNUSED static int test_due(int n) { return test_full() || (n + n / 4 + n / 16) % 4 == 0; }

/* Counts one check; prints file:line and the sentence when it failed. Returns `passed`. */
TEST_FORMAT(4) static int test_check(int passed, const char *file, int line, const char *format, ...) {
  if (passed) {
    test_passed++;
    return 1;
  }
  test_failed++;
  va_list list;
  va_start(list, format);
  printf("%s:%d: ", file, line);
  vprintf(format, list);
  printf("\n");
  fflush(stdout);
  va_end(list);
  return 0;
}
#define CHECK(condition, ...) test_check((condition) ? 1 : 0, __FILE__, __LINE__, __VA_ARGS__)

/* ||a - b|| / ||b||, where a norm of b under 1e-6 sqrt(n) counts as that: a true zero is compared absolutely. NaN
   anywhere gives NaN. */
TEST_UNUSED static double test_error(const float *a, const float *b, size_t n) {
  double difference = 0, size = 0, floor = 1e-6 * sqrt((double)n);
  for (size_t i = 0; i < n; i++) {
    double d = (double)a[i] - (double)b[i];
    difference += d * d;
    size += (double)b[i] * (double)b[i];
  }
  size = sqrt(size);
  return n ? sqrt(difference) / (size < floor ? floor : size) : 0;
}

/* One check: test_error(a, b, n) <= tolerance; NaN fails, and so does a null array. Returns 1 when it passed. */
#define test_close(what, a, b, n, tolerance) test_close_at(__FILE__, __LINE__, what, a, b, n, tolerance)
TEST_UNUSED static int test_close_at(const char *file, int line, const char *what, const float *a, const float *b,
                                     size_t n, double tolerance) {
  if (!a || !b) return test_check(0, file, line, "%s: %s is null", what, a ? "the expected array" : "the result");
  double error = test_error(a, b, n);
  return test_check(error <= tolerance, file, line, "%s: error %.3g over %.3g", what, error, tolerance);
}

/* The last line, "name: N passed, N failed", and the exit status. */
TEST_UNUSED static int test_report(const char *name) {
  printf("%s: %d passed, %d failed\n", name, test_passed, test_failed);
  fflush(stdout);
  return test_failed ? 1 : 0;
}

#endif
