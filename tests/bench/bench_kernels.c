/* bench_kernels: products against the multiply-add peak, for the instruction sets that a user's machine would run;
   sliding-window attention beside full attention; one row of decoding against the memory: a read-only pass over the
   same bytes. */
#include "bench.h"

typedef struct product_bench {
  luna_gemm_args g;
  double flops;
} product_bench;
static void product_run(void *arg) {
  if (luna_gemm_f32(&((product_bench *)arg)->g) != LUNA_OK) exit(1);
}

static float *floats(int64_t count) {
  float *x = NULL;
  if (posix_memalign((void **)&x, 2 << 20, (size_t)count * sizeof(float)) != 0) exit(1);
  for (int64_t i = 0; i < count; i++) x[i] = (float)(i % 13) * 0.1f - 0.6f;
  return x;
}

static float *a, *b, *c;
static void *scratch;
#define SCRATCH ((size_t)16 << 20)

/* B stored by columns, as weights are; both by rows; A by columns, as in gradients of weights */
enum { XWT, AB, ATB };
static const char *const layouts[] = {"x W^T", "A B", "A^T B"};

static void product_row(luna_isa isa, int64_t m, int64_t n, int64_t k, int layout, double min) {
  product_bench p;
  bench_case row;
  memset(&p, 0, sizeof p);
  memset(&row, 0, sizeof row);
  p.g.a = a, p.g.b = b, p.g.c = c, p.g.m = m, p.g.n = n, p.g.k = k;
  p.g.transpose_a = layout == ATB;
  p.g.transpose_b = layout == XWT;
  p.g.run.isa = isa;
  p.g.run.scratch = scratch;
  p.g.run.scratch_size = SCRATCH;
  snprintf(row.name, sizeof row.name, "%s, %d x %d, k = %d, %s", luna_isa_name(isa), (int)m, (int)n, (int)k,
           layouts[layout]);
  row.isa = isa;
  row.flops = 2.0 * (double)m * (double)n * (double)k;
  row.run = product_run;
  row.arg = &p;
  row.min = min;
  bench_cases(&row, 1);
}

/* y [n] = W [n, k] x */
static void vector_row(int64_t n, int64_t k, double min) {
  product_bench p;
  bench_case row;
  memset(&p, 0, sizeof p);
  memset(&row, 0, sizeof row);
  p.g.a = a, p.g.b = b, p.g.c = c, p.g.m = 1, p.g.n = n, p.g.k = k;
  p.g.transpose_b = true;
  p.g.run.scratch = scratch;
  p.g.run.scratch_size = SCRATCH;
  row.read = b;
  row.floats = n * k;
  snprintf(row.name, sizeof row.name, "W x, %d x %d, %.2f MB", (int)n, (int)k, 4e-6 * (double)(n * k));
  row.flops = 2.0 * (double)(n * k);
  row.run = product_run;
  row.arg = &p;
  row.min = min;
  bench_cases(&row, 1);
}

/* Full attention over 4096 tokens, and windows over 16,384, one head of 64: what their shares of the peak differ by is
   what a window's time differs by from its share of full attention's. */
enum { ATTENTION_N = 16384, ATTENTION_FULL = 4096, ATTENTION_D = 64 };
typedef struct attention_bench {
  luna_attention_args a;
  bool backward;
} attention_bench;
static void attention_run(void *arg) {
  const attention_bench *x = (const attention_bench *)arg;
  if ((x->backward ? luna_softmax_attention_backward_f32 : luna_softmax_attention_f32)(&x->a) != LUNA_OK) exit(1);
}
static void attention_rows(bool backward) {
  static const int64_t windows[3][2] = {{0, 0}, {256, 256}, {255, 0}};
  static attention_bench x[3];
  bench_case row[3];
  float *lse = c + 4 * ATTENTION_N * ATTENTION_D;
  memset(row, 0, sizeof row);
  for (int i = 0; i < 3; i++) {
    const int64_t n = i ? ATTENTION_N : ATTENTION_FULL, left = windows[i][0], right = windows[i][1];
    luna_attention_args *at = &x[i].a;
    double pairs = 0;
    memset(&x[i], 0, sizeof x[i]);
    x[i].backward = backward;
    at->batch = at->heads = 1, at->queries = at->keys = n, at->head_dim = ATTENTION_D;
    at->q = at->grad_out = a, at->k = b, at->v = b + ATTENTION_N * ATTENTION_D, at->out = c, at->log_sum_exp = lse;
    at->grad_q = c + ATTENTION_N * ATTENTION_D, at->grad_k = at->grad_q + ATTENTION_N * ATTENTION_D;
    at->grad_v = at->grad_k + ATTENTION_N * ATTENTION_D;
    if (i)
      at->window = true, at->left = left, at->right = right;
    at->run.scratch = scratch, at->run.scratch_size = SCRATCH;
    if (luna_softmax_attention_f32(at) != LUNA_OK) exit(1);
    for (int64_t q = 0; q < n; q++)
      pairs += i ? (double)((q + right < n ? q + right : n - 1) - (q > left ? q - left : 0) + 1) : (double)n;
    if (i)
      snprintf(row[i].name, sizeof row[i].name, "%s, n = %d, keys -%d..%d", backward ? "backward" : "forward", (int)n,
               (int)left, (int)right);
    else snprintf(row[i].name, sizeof row[i].name, "%s, n = %d, all keys", backward ? "backward" : "forward", (int)n);
    row[i].flops = (backward ? 10.0 : 4.0) * pairs * ATTENTION_D;
    row[i].run = attention_run, row[i].arg = &x[i];
  }
  bench_cases(row, 3);
}

int main(int argc, char **argv) {
  static const int64_t sides[] = {256, 512, 1024, 2048};
  const luna_isa best = luna_isa_best();
  bench_start(argc, argv);
  bench_budget = 0.25;
  a = floats(4096 * 2048), b = floats(4096 * 2048), c = floats(4096 * 2048), scratch = floats(SCRATCH / sizeof(float));
  printf("%s: %.1f GFLOP/s of multiply-add on one core, %.1f on two; reads %.0f GB/s of 256 KB, %.0f of 4 MB, "
         "%.0f of 64 MB\n", luna_isa_name(best),
         1e-9 * bench_peak(best, 1), 1e-9 * bench_peak(best, 2), 1e-9 * bench_read(a, 1 << 16, 512),
         1e-9 * bench_read(a, 1 << 20, 32), 1e-9 * bench_read(a, 4096 * 2048, 4));
  for (int i = 0; i < 2; i++) {
    const luna_isa isa = i == 0 ? best : LUNA_ISA_AVX2;
    if (i && (best != LUNA_ISA_AVX512)) break;
    bench_title(i ? "products, AVX2 against its own peak" : "products");
    product_row(isa, 1024, 1024, 1024, XWT, 0.9);
    for (int n = 0; n < 4; n++)
      for (int k = 0; k < 4; k++) product_row(isa, 4096, sides[n], sides[k], XWT, 0.9);
    product_row(isa, 4096, 256, 256, AB, 0.9);
    product_row(isa, 256, 256, 4096, ATB, 0);
    product_row(isa, 1024, 256, 4096, ATB, 0);
  }
  bench_title("attention, one head of 64: all keys, and windows");
  attention_rows(false);
  attention_rows(true);
  bench_title("thin products");
  product_row(best, 16, 4096, 64, XWT, 0);
  product_row(best, 16, 64, 4096, AB, 0);
  product_row(best, 4096, 16, 64, XWT, 0);
  product_row(best, 4096, 16, 256, XWT, 0);
  product_row(best, 4096, 64, 16, XWT, 0);
  bench_title("decoding: a matrix by one vector, share of a read-only pass");
  vector_row(256, 256, 0.8);
  vector_row(512, 2048, 0.9);
  vector_row(8192, 1024, 0.9);
  bench_end();
  free(a), free(b), free(c), free(scratch);
  return 0;
}
