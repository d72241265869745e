/* Kernels as nvcc compiles them, without a GPU: PTX=FILE ptx [CASE] (tests/cuda/ptx_host.h). Each case runs on the
   emulated device, every kernel as PTX (tests/cuda/ptx.h) and by the emulator, which must agree; then a table says what
   the PTX did:

     runs    launches                                     loads, stores   32-byte sectors that requests to global memory
     all     machine instructions an element, about                       take, over the least that would do
     fma     the share of them that are multiply-adds     waves           the same of shared memory, in wavefronts
     ...     by kind of work                              regs, spill     registers of a thread, bytes spilled
     hbm, fp32, mma   an estimate: the shares of an H100's memory speed, of its multiply-adds and of what tensor cores
             give such instructions (62% of their peak) if nothing were waited for, a multiprocessor started 4
             instructions a cycle, 2 of whole numbers, and 1 wavefront, each sector came once from memory (3.35 TB/s)
             and each request from the cache that all share (5.5 TB/s)

   An element is a number of a map's or norm's input, a query with a key of one head, a token's channel of a model.
   Built with PTX_FAULTS, it breaks kernels in their text in place of all that, one at a time; each must be found. */
#include "cuda_device.h"
#include "luna.h"
#include "ptx_host.h"
#include "test.h"
#include <string.h>

#ifndef PTX_FAULTS
#define PTX_FAULTS 0
#endif

enum { ROWS = 4096, DIM = 256, HEADS = 4, LONG = 512, MEMORY = 16, WIDE = 4096 };
static luna_ctx *ctx;
static unsigned random_state;
static float next(void) {
  random_state = random_state * 1664525u + 1013904223u;
  return (float)(random_state >> 8) / 16777216.0f - 0.5f;
}
static luna_tensor *tensor(int rank, int64_t a, int64_t b, int64_t c, int64_t d) {
  const int64_t shape[4] = {a, b, c, d};
  int64_t n = 1;
  for (int i = 0; i < rank; i++) n *= shape[i];
  float *values = (float *)malloc((size_t)n * sizeof *values);
  for (int64_t i = 0; values && i < n; i++) values[i] = next();
  luna_tensor *t = luna_tensor_new(ctx, values, rank, shape);
  free(values);
  return luna_require_grad(t);
}
static luna_tensor *rows(int64_t batch, int64_t n) { return tensor(3, batch, n, DIM, 0); }
static luna_tensor *matrix(void) { return tensor(2, ROWS, DIM, 0, 0); }
static luna_tensor *vector(void) { return tensor(1, DIM, 0, 0, 0); }

static luna_tensor *squares(void) { return matrix(); }
static luna_tensor *add(void) { return luna_add(matrix(), vector()); }
static luna_tensor *dropout(void) { return luna_dropout(matrix(), 0.1f); }
static luna_tensor *gelu(void) { return luna_activate(matrix(), LUNA_ACTIVATION_GELU); }
static luna_tensor *norm(void) { return luna_layer_norm(matrix(), vector(), vector(), 0); }
static luna_tensor *linear(void) { return luna_linear(matrix(), tensor(2, DIM, DIM, 0, 0), vector()); }
static luna_tensor *convolution(void) {
  return luna_short_convolution(rows(4, ROWS / 4), tensor(2, DIM, 4, 0, 0), vector());
}
static luna_tensor *cross_entropy(void) {
  static int32_t labels[DIM];
  for (int i = 0; i < DIM; i++) next(), labels[i] = (int32_t)(random_state >> 20);
  return luna_cross_entropy(tensor(2, DIM, WIDE, 0, 0), labels, NULL);
}
static luna_tensor *attend(int64_t batch, int64_t queries, int64_t keys, bool causal) {
  luna_attention_config config = {.heads = HEADS, .causal = causal};
  return luna_softmax_attention(rows(batch, queries), rows(batch, keys), rows(batch, keys), &config);
}
static luna_tensor *attention(void) { return attend(1, LONG, LONG, false); }
static luna_tensor *causal_attention(void) { return attend(1, LONG, LONG, true); }
static luna_tensor *few_keys(void) { return attend(2, LONG, MEMORY, false); }
static luna_tensor *few_queries(void) { return attend(2, MEMORY, 2 * LONG, false); }
static luna_tensor *pack(void) {
  return luna_pack(tensor(3, 2, HEADS * MEMORY, DIM, 0), rows(2, 2 * LONG), NULL);
}
static luna_tensor *shared_queries(void) {
  luna_attention_config config = {.heads = HEADS};
  return luna_softmax_attention(rows(1, MEMORY), rows(4, LONG), rows(4, LONG), &config);
}
static luna_tensor *unpack(void) {
  return luna_unpack(rows(2, LONG), tensor(4, 2, HEADS, MEMORY, DIM), tensor(3, 2, HEADS, MEMORY, 0),
                     tensor(4, 2, HEADS, MEMORY, DIM), NULL);
}
static luna_tensor *causal_product(void) {
  return luna_causal_product(rows(1, 2 * LONG), rows(1, 2 * LONG), rows(1, 2 * LONG), HEADS);
}
static luna_tensor *causal_nested(void) {
  luna_causal_nested_config config = {.heads = HEADS};
  return luna_causal_nested_attention(rows(1, 2 * LONG), rows(1, 2 * LONG), rows(1, 2 * LONG),
                                      tensor(3, 1, 2 * LONG, HEADS * MEMORY, 0), &config);
}

/* an encoder layer, forward and backward */
enum { ROWS_OF_LAYER = 2048 };
static luna_tensor *layer(void) {
  luna_params *params = luna_params_open(ctx);
  luna_layer_config config = {.dim = DIM, .heads = HEADS, .ffn = 4 * DIM};
  luna_encoder_layer layer;
  if (luna_encoder_layer_init(&layer, params, "", &config) != LUNA_OK) return NULL;
  ptx_forget();
  luna_begin_step(ctx);
  luna_tensor *p = tensor(3, 1, MEMORY, DIM, 0),
              *y = luna_encoder_layer_forward(&layer, rows(1, ROWS_OF_LAYER), &p, NULL);
  return luna_add(luna_sum_all(luna_mul(y, rows(1, ROWS_OF_LAYER))), luna_sum_all(p));
}
/* a training step of a small model; `lm` or a classifier */
enum { BATCH = 2, TOKENS = 512 };
static luna_tensor *model_step(bool lm) {
  static int32_t tokens[BATCH * TOKENS], labels[BATCH * TOKENS];
  static const int32_t classes[BATCH] = {0, 1};
  const luna_input in = {.tokens = tokens, .batch = BATCH, .n = TOKENS};
  luna_params *params = luna_params_open(ctx);
  luna_optimizer *adam = luna_adamw(params, NULL);
  luna_classifier classifier;
  luna_lm model;
  for (int i = 0; i < BATCH * TOKENS; i++) {
    next();
    tokens[i] = (int32_t)(random_state >> 24);
    labels[i] = (int32_t)(random_state >> 16 & 255);
  }
  luna_lm_config c = {.vocab = 256, .layers = 1};
  c.layer.dim = DIM, c.layer.heads = HEADS, c.layer.memory = MEMORY, c.layer.ffn = 4 * DIM;
  c.layer.dropout = 0.1f;
  c.layer.convolution = 4;
  luna_classifier_config d = {.vocab = 256, .classes = 2, .encoder = {.layers = 1}};
  d.encoder.layer = c.layer;
  d.encoder.layer.convolution = 0;
  d.encoder.layer.dropout = 0.1f;
  if ((lm ? luna_lm_init(&model, params, &c) : luna_classifier_init(&classifier, params, &d)) != LUNA_OK) return NULL;
  ptx_forget();                            /* the step alone is counted */
  luna_begin_step(ctx);
  luna_tensor *loss = lm ? luna_lm_loss(&model, &in, labels)
                         : luna_cross_entropy(luna_classifier_forward(&classifier, &in), classes, NULL);
  return loss && luna_backward(loss) == LUNA_OK && luna_optimizer_step(adam) == LUNA_OK ? loss : NULL;
}

typedef struct ptx_case {
  const char *name;
  luna_tensor *(*op)(void);                /* null: a model's step */
  double elements;
  cuda_math math;
} ptx_case;
#define SAME ((double)ROWS * DIM)
static const ptx_case cases[] = {
  {"sum of squares", squares, SAME, CUDA_F32},
  {"add a row", add, SAME, CUDA_F32},
  {"dropout", dropout, SAME, CUDA_F32},
  {"GELU", gelu, SAME, CUDA_F32},
  {"layer norm", norm, SAME, CUDA_F32},
  {"linear", linear, SAME, CUDA_F32},
  {"short convolution", convolution, SAME, CUDA_F32},
  {"cross-entropy", cross_entropy, (double)DIM * WIDE, CUDA_F32},
  {"attention", attention, (double)HEADS * LONG * LONG, CUDA_F32},
  {"causal attention", causal_attention, (double)HEADS * LONG * LONG / 2, CUDA_F32},
  {"attention, TF32", attention, (double)HEADS * LONG * LONG, CUDA_TF32},
  {"attention, BF16", attention, (double)HEADS * LONG * LONG, CUDA_BF16},
  {"causal attention, TF32", causal_attention, (double)HEADS * LONG * LONG / 2, CUDA_TF32},
  {"attention, few keys", few_keys, (double)2 * HEADS * LONG * MEMORY, CUDA_F32},
  {"attention, few queries", few_queries, (double)2 * HEADS * MEMORY * 2 * LONG, CUDA_F32},
  {"attention, shared queries", shared_queries, (double)4 * HEADS * MEMORY * LONG, CUDA_F32},
  {"pack", pack, (double)2 * HEADS * MEMORY * 2 * LONG, CUDA_F32},
  {"pack, TF32", pack, (double)2 * HEADS * MEMORY * 2 * LONG, CUDA_TF32},
  {"unpack", unpack, (double)2 * HEADS * LONG * MEMORY, CUDA_F32},
  {"causal product", causal_product, (double)2 * LONG * DIM, CUDA_F32},
  {"causal product, TF32", causal_product, (double)2 * LONG * DIM, CUDA_TF32},
  {"causal nested attention", causal_nested, (double)2 * LONG * DIM, CUDA_F32},
  {"causal nested attention, BF16", causal_nested, (double)2 * LONG * DIM, CUDA_BF16},
  {"a layer's step", layer, (double)ROWS_OF_LAYER * DIM, CUDA_F32},
  {"a classifier's step", NULL, (double)BATCH * TOKENS * DIM, CUDA_F32},
  {"a language model's step", NULL, (double)BATCH * TOKENS * DIM, CUDA_F32},
};
enum { CASES = sizeof cases / sizeof cases[0] };

/* Runs it on a context of its own and counts it alone. The loss, or a NaN. */
static double run(const ptx_case *c) {
  luna_options options = {0};
  options.backend = cuda_backend(0, c->math);
  random_state = 12345;
  ctx = luna_open(&options);
  ptx_forget();
  if (c->op) luna_begin_step(ctx);
  luna_tensor *y = c->op ? c->op() : model_step(strstr(c->name, "language") != NULL);
  if (y && (y->rank != 1 || y->shape[0] != 1)) y = luna_sum_all(luna_mul(y, y));
  const bool good = y && (!c->op || luna_backward(y) == LUNA_OK);
  const double loss = good ? luna_item(y) : NAN;
  if (!(loss == loss)) printf("%s: %s\n", c->name, luna_error(ctx));
  luna_close(ctx);
  return loss;
}

/* what is broken, where, and the case that shows it */
static const struct { const char *kernel; ptx_fault what; int n; const char *at; } faults[] = {
  {"lunacu_columnE", PTX_BARRIER_REMOVED, 0, "add a row"},
  {"lunacu_attention_kernelI11lunacu_tileILi128ELi32E", PTX_BARRIER_REMOVED, 1, "attention, few keys"},
  {"lunacu_attention_kernelI11lunacu_tileILi128ELi32E", PTX_BARRIER_REMOVED, 4, "attention, few keys"},
  {"lunacu_attention_kernelI18lunacu_tensor_tileILi128ELi64E", PTX_BARRIER_REMOVED, 2, "attention, TF32"},
  {"lunacu_attention_kernelI18lunacu_tensor_tileILi128ELi64E", PTX_TF32_REMOVED, 40, "attention, TF32"},
  {"lunacu_causal_product_kernelI25lunacu_causal_tensor_tileILi4", PTX_TF32_REMOVED, 20, "causal product, TF32"},
  {"lunacu_causal_sum_kernelI18lunacu_causal_tileILi4", PTX_BARRIER_REMOVED, 0, "causal product"},
  {"lunacu_dropsE", PTX_STORE_MOVED, 0, "dropout"},
  {"lunacu_layer_norm_kernel", PTX_STORE_MOVED, 0, "layer norm"},
  {"lunacu_update_kernel", PTX_STORE_MOVED, 0, "a classifier's step"},
  {"lunacu_dropsE", PTX_STORE_REMOVED, 0, "dropout"},
  {"lunacu_cross_entropy_kernelILi4", PTX_STORE_REMOVED, 0, "cross-entropy"},
  {"lunacu_attention_kernelI11lunacu_tileILi128ELi32E", PTX_FMA_MADE_MUL, 200, "attention, few keys"},
  {"lunacu_convolution_kernel", PTX_FMA_MADE_MUL, 20, "short convolution"},
  {"lunacu_causal_product_kernelI18lunacu_causal_tileILi4", PTX_FMA_MADE_MUL, 20, "causal product"},
  {"lunacu_attention_kernelI18lunacu_tensor_tileILi128ELi64E", PTX_WAIT_REMOVED, 0, "attention, TF32"},
  {"lunacu_attention_kernelI18lunacu_tensor_tileILi128ELi64E", PTX_WAIT_REMOVED, 1, "attention, TF32"},
  {"lunacu_attention_scores_kernelI18lunacu_tensor_tileILi64ELi128E", PTX_WAIT_REMOVED, 0, "attention, TF32"},
  {"lunacu_attention_gradient_kernelI18lunacu_tensor_tileILi128ELi64E", PTX_WAIT_REMOVED, 0, "attention, TF32"},
};
static void check_faults(void) {
  bool ran[CASES] = {false}; /* only what was reached once can be broken */
  for (size_t i = 0; i < sizeof faults / sizeof faults[0]; i++) {
    const char *message = "";
    int at = 0;
    while (strcmp(cases[at].name, faults[i].at) != 0) at++;
    if (!ran[at]) (void)run(&cases[at]);
    ran[at] = true;
    cuda_quiet(true);
    const bool broken = ptx_break(faults[i].kernel, faults[i].what, faults[i].n);
    (void)run(&cases[at]);
    CHECK(broken && cuda_errors(&message) > 0, "%s: fault %d of %s was not %s", cases[at].name, (int)faults[i].what,
          faults[i].kernel, broken ? "noticed" : "made");
    ptx_mend();
    cuda_mend();
    cuda_quiet(false);
  }
}

static void check_cases(const char *only) {
  const char *message = "";
  ptx_table_head();
  for (int i = 0; i < CASES; i++) {
    if (i > 0 && only && strcmp(only, cases[i].name) != 0) continue;
    const double loss = run(&cases[i]);
    CHECK(loss == loss && cuda_errors(&message) == 0, "%s: %s", cases[i].name, message);
    ptx_table(cases[i].name, cases[i].elements, !cases[i].op || cases[i].op == layer);
    if (only || cases[i].op) continue;
    ptx_alone(true);
    const double alone = run(&cases[i]);
    CHECK(fabs(loss - alone) <= 1e-5 * fabs(loss), "%s: a loss of %.9g, with PTX alone %.9g", cases[i].name, loss,
          alone);
    ptx_alone(false);
  }
}

int main(int argc, char **argv) {
  if (!ptx_opened()) return printf("ptx: the environment names no PTX\n"), 2;
  CHECK(ptx_read_all() > 100, "%d kernels", ptx_read_all());
  if (PTX_FAULTS) check_faults();
  else check_cases(argc > 1 ? argv[1] : NULL);
  return test_report(PTX_FAULTS ? "ptx_faults" : "ptx");
}
