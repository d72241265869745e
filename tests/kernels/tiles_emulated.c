/* The tests of products with tiles that are emulated, and one product for tests/kernels/tiles.c, which this is linked
   with. It needs AVX-512 with VNNI, not AMX. */
#define LI_TILES_EMULATED
#include "emulated.h"
#define TILES_EMULATED
#define LUNA_STATIC
#define main bf16_main
#include "bf16.c"
#undef main
#define main gemm_main
#include "gemm.c"
#undef main
#define main int8_main
#include "int8.c"
#undef main
#define main bf16_models_main
#include "models/bf16_models.c"
#undef main
#include "tiles.h"

void tiles_emulated_multiply(const tiles_case *t, const float *a, const float *b, float *c) {
#ifdef LI_AMX
  tiles_multiply(t, a, b, c);
#else
  (void)t, (void)a, (void)b, (void)c;
#endif
}
void tiles_emulated_tests(int *passed, int *failed) {
  static int (*const tests[])(void) = {bf16_main, gemm_main, int8_main, bf16_models_main};
  for (size_t i = 0; i < sizeof tests / sizeof *tests; i++) {
    test_passed = test_failed = 0;
    (void)tests[i]();
    *passed += test_passed, *failed += test_failed;
  }
}
