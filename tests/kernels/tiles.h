/* What tests/kernels/tiles.c and tests/kernels/tiles_emulated.c share. Both include it after luna.h's implementation
   and common.h. */
#ifndef TILES_H
#define TILES_H

typedef struct tiles_case {
  int64_t m, n, k;
  int layout, epilogue, kind;        /* layout 1: A lies in columns, 2: B does; kind: of numbers */
} tiles_case;
enum { TILES_EPILOGUES = 5, TILES_KINDS = 4 };
/* C = A B by the emulated tiles, and the tests of products on them; where a build has none, nothing */
void tiles_emulated_multiply(const tiles_case *t, const float *a, const float *b, float *c);
void tiles_emulated_tests(int *passed, int *failed);

#ifdef LI_AMX
/* C = A B by tiles; epilogue 1: a bias and ReLU, 2: C is added, 3: a bias and a factor, 4: GELU */
static void tiles_multiply(const tiles_case *t, const float *a, const float *b, float *c) {
  float bias[128];
  li_gemm g;
  memset(&g, 0, sizeof g);
  common_fill(bias, 128, 7, 1);
  g.a = a, g.b = b, g.c = c, g.m = t->m, g.n = g.c_row = t->n, g.k = t->k;
  g.alpha = t->epilogue == 3 ? 0.125f : 1;
  g.bf16 = true;
  g.bias = t->epilogue & 1 ? bias : NULL;
  g.accumulate = t->epilogue == 2;
  g.activation = LI_NO_ACTIVATION;
  if (t->epilogue == 1) g.activation = LUNA_ACTIVATION_RELU;
  if (t->epilogue == 4) g.activation = LUNA_ACTIVATION_GELU;
  g.a_row = t->layout & 1 ? 1 : t->k, g.a_column = t->layout & 1 ? t->m : 1;
  g.b_row = t->layout & 2 ? 1 : t->n, g.b_column = t->layout & 2 ? t->k : 1;
  g.batch[0] = g.batch[1] = 1;
  char *memory = (char *)common_alloc(li_gemm_scratch(&li_kernels_amx, &g, 1) + 64);
  li_run_gemm(&li_kernels_amx, &g, NULL, memory + (64 - (uintptr_t)memory % 64) % 64);
  free(memory);
}
#endif
#endif
