/* The chapters that look at luna.h's private parts, over one compiled implementation of it. Each is a program by
   itself, too: build/tests/gemm.
     private [CHAPTER]     runs them all, or one; CHAPTERS="int8 bf16": these */
#define main vectors_main
#include "kernels/vectors.c"                 /* first: it adds to every pass */
#undef main
#define main attention_main
#include "kernels/attention.c"
#undef main
#define main causal_main
#include "kernels/causal.c"
#undef main
#define main bf16_main
#include "kernels/bf16.c"
#undef main
#define main elementwise_main
#include "kernels/elementwise.c"
#undef main
#define main gemm_main
#include "kernels/gemm.c"
#undef main
#define main int8_main
#include "kernels/int8.c"
#undef main
#define main safetensors_main
#include "files/safetensors.c"
#undef main
#define main stream_main
#include "models/stream.c"
#undef main

#define main fuzz_safetensors_main
#include "files/fuzz_safetensors.c"
#undef main
static int fuzz_main(void) {
  char *arguments[2] = {NULL, NULL};
  return fuzz_safetensors_main(1, arguments);
}

int main(int argc, char **argv) {
  static const struct { const char *name; int (*run)(void); } chapters[] = {
    {"vectors", vectors_main}, {"attention", attention_main}, {"causal", causal_main},
    {"bf16", bf16_main}, {"elementwise", elementwise_main}, {"gemm", gemm_main},
    {"int8", int8_main}, {"safetensors", safetensors_main}, {"stream", stream_main},
    {"fuzz_safetensors", fuzz_main}
  };
  const char *only = getenv("CHAPTERS");
  int passed = 0, failed = 0;
  for (size_t i = 0; i < sizeof chapters / sizeof chapters[0]; i++) {
    if (argc > 1 && strcmp(argv[1], chapters[i].name) != 0) continue;
    if (only && !strstr(only, chapters[i].name)) continue;
    test_passed = test_failed = 0;
    (void)chapters[i].run();
    passed += test_passed, failed += test_failed;
  }
  test_passed = passed, test_failed = failed;
  return test_report("private");
}
