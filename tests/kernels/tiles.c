/* Products by AMX beside their emulation, which tests/kernels/tiles_emulated.c has: the same bits, of every layout and
   epilogue, for normal numbers, those whose sums are denormal, Inf and NaN, and random bits. Which of NaN's bits is not
   promised. Where the machine or the system has no AMX, nothing is compared. Then the tests of products run on the
   emulation. */
#include "test.h"
#define LUNA_IMPLEMENTATION
#define LUNA_STATIC
#include "luna.h"
#include "common.h"
#include "tiles.h"

#if defined(LI_AMX)
static float *tiles_numbers(int64_t n, uint64_t seed, int kind) {
  float *x = common_floats(n);
  common_fill(x, n, seed, 1);
  for (int64_t i = 0; i < n; i++) {
    const uint32_t bits = (uint32_t)common_hash(seed + 100, (uint64_t)i);
    if (kind == 1) x[i] = ldexpf(x[i], (int)(bits % 60) - 90);
    if (kind == 2 && bits % 50 == 0) x[i] = bits % 100 ? INFINITY : -INFINITY;
    if (kind == 2 && bits % 1001 == 0) x[i] = NAN;
    if (kind == 3) memcpy(x + i, &bits, sizeof bits);
  }
  return x;
}
static void tiles_check(const tiles_case *t) {
  float *a = tiles_numbers(t->m * t->k, 1, t->kind), *b = tiles_numbers(t->k * t->n, 2, t->kind);
  float *got = tiles_numbers(t->m * t->n, 3, 0), *want = tiles_numbers(t->m * t->n, 3, 0);
  int64_t wrong = -1;
  tiles_multiply(t, a, b, got);
  tiles_emulated_multiply(t, a, b, want);
  for (int64_t i = 0; i < t->m * t->n && wrong < 0; i++)
    if (memcmp(got + i, want + i, sizeof(float)) != 0 && !(got[i] != got[i] && want[i] != want[i])) wrong = i;
  const int64_t at = wrong < 0 ? 0 : wrong;
  CHECK(wrong < 0, "[%d,%d] x [%d,%d], layout %d, epilogue %d, numbers %d: element %d is %.9g, emulated %.9g",
        (int)t->m, (int)t->k, (int)t->k, (int)t->n, t->layout, t->epilogue, t->kind, (int)wrong, (double)got[at],
        (double)want[at]);
  free(a), free(b), free(got), free(want);
}
static void tiles_compare(void) {
  static const int64_t sizes[][3] = {
    {1, 1, 1}, {5, 33, 7}, {45, 70, 515}, {64, 96, 256}, {33, 31, 1000}, {128, 64, 96}, {17, 16, 33}, {100, 40, 64}
  };
  tiles_case t;
  for (size_t z = 0; z < sizeof sizes / sizeof *sizes; z++)
    for (int i = 0; i < 4 * TILES_EPILOGUES * TILES_KINDS; i++) {
      t.m = sizes[z][0], t.n = sizes[z][1], t.k = sizes[z][2];
      t.layout = i % 4, t.epilogue = i / 4 % TILES_EPILOGUES, t.kind = i / 4 / TILES_EPILOGUES;
      tiles_check(&t);
    }
}
#else
static void tiles_compare(void) {}
#endif

int main(void) {
  int passed = 0, failed = 0;
  if (luna_isa_available(LUNA_ISA_AMX)) tiles_compare();
  tiles_emulated_tests(&passed, &failed);
  CHECK(passed > 0, "the emulation ran nothing");
  test_passed += passed, test_failed += failed;
  return test_report("tiles");
}
