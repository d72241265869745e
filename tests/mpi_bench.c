/* What one sequence, cut over ranks, costs each of them: mpirun -n R build/mpi/tests/mpi_bench WHAT [TOKENS]
     forward    inference by a classifier of 4 layers, d 128
     step       a training step of one of 4 layers, d 256, whose feed-forward is recomputed
     layers     bytes that a layer sends, counted in the hook, beside the formulas of >>parallel; 1: they differ.
                Then a row of data-parallel training, for what it sends
   Rank 0 prints. A rank has one thread. Its CPU time is that of its own computation: inside the hook ranks wait for
   each other, and MPI libraries wait by asking again and again. tests/mpi_bench.sh makes tables of it. */
#define _GNU_SOURCE                  /* madvise */
#define LUNA_IMPLEMENTATION
#include "luna.h"

#include "../examples/luna_mpi.h"

#include <stdio.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <time.h>

enum { LAYERS = 4, HEADS = 4, SLOTS = 16, MAX_RANKS = 64 };

static mpi_ranks mpi;
static double inside;                /* CPU seconds in the hook */

static double cpu_seconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
static bool gather(void *user, const void *mine, void *all, size_t bytes) {
  const double start = cpu_seconds();
  const bool good = mpi_gather(user, mine, all, bytes);
  inside += cpu_seconds() - start;
  return good;
}
static bool reduce(void *user, void *buffer, int64_t count, luna_reduction what) {
  const double start = cpu_seconds();
  const bool good = mpi_reduce(user, buffer, count, what);
  inside += cpu_seconds() - start;
  return good;
}

typedef struct work {
  luna_parallelism mode;
  int64_t layers, dim, tokens;
  bool causal, training;
} work;
typedef struct cost { double cpu, inside, peak, resident; int64_t bytes, calls, gradients; } cost; /* sizes in bytes */

/* one pass, in a block of *peak bytes; without one it only counts them */
static cost pass(const work *w, void *block, size_t *peak) {
  const int64_t rank = mpi.collective.rank, ranks = mpi.collective.ranks;
  const int64_t first = w->tokens * rank / ranks, n = w->tokens * (rank + 1) / ranks - first;
  const luna_options options = { .threads = 1, .collective = &mpi.collective, .measure = !block, .block = block,
                                 .block_size = *peak };
  const luna_recompute_kind recompute = w->training ? LUNA_RECOMPUTE_FFN : LUNA_RECOMPUTE_NONE;
  const int32_t label = 1;
  cost c = { 0 };
  luna_classifier classifier;
  luna_lm lm;
  int32_t *tokens = (int32_t *)malloc((size_t)(n + 1) * sizeof *tokens);
  if (!tokens) exit(2);
  for (int64_t i = 0; i <= n; i++) tokens[i] = (int32_t)((first + i) * 7919 % 256);
  const luna_input input = { tokens, NULL, 1, n, NULL };
  luna_ctx *ctx = luna_open(&options);
  luna_params *params = luna_params_open(ctx);
  if (w->causal)
    luna_lm_init(&lm, params, &(luna_lm_config){ .layers = w->layers,
      .layer = { .dim = w->dim, .heads = HEADS, .memory = SLOTS, .ffn = 4 * w->dim, .recompute = recompute } });
  else
    luna_classifier_init(&classifier, params, &(luna_classifier_config){ .vocab = 256, .classes = 2,
      .pooling = LUNA_POOLING_MEAN, .encoder = { .layers = w->layers,
        .layer = { .dim = w->dim, .heads = HEADS, .memory = SLOTS, .ffn = 4 * w->dim, .recompute = recompute } } });
  luna_optimizer *adam = w->training ? luna_adamw(params, NULL) : NULL;
  c.gradients = luna_params_element_count(params) * (int64_t)sizeof(float);
  mpi.bytes = mpi.calls = 0, inside = 0, c.cpu = cpu_seconds();
  if (w->training) luna_begin_step(ctx);
  else luna_begin_inference(ctx);
  luna_tensor *y = w->causal ? luna_lm_loss(&lm, &input, tokens + 1) : luna_classifier_forward(&classifier, &input);
  if (!w->causal) y = luna_cross_entropy(y, &label, NULL);
  if (w->training) luna_backward(y);
  const double loss = block ? (double)luna_item(y) : 1;
  if (adam) luna_optimizer_step(adam);
  c.bytes = mpi.bytes, c.calls = mpi.calls, c.inside = inside, c.cpu = cpu_seconds() - c.cpu - inside;
  if (luna_error_status(ctx) != LUNA_OK || !(loss > 0)) {
    fprintf(stderr, "rank %d: %s\n", mpi.collective.rank, luna_error(ctx));
    mpi_close(&mpi, 1);
  }
  *peak = luna_memory(ctx).peak;
  luna_close(ctx);
  free(tokens);
  return c;
}
/* A context whose memory grows takes more in its first pass than it counts: this one has its bytes from the start. */
static cost measure(const work *w) {
  struct rusage usage;
  size_t peak = 0;
  void *block;
  mpi.collective.mode = w->mode;
  (void)pass(w, NULL, &peak);
  if (posix_memalign(&block, (size_t)1 << 21, peak) != 0) exit(2);
#ifdef MADV_HUGEPAGE
  (void)madvise(block, peak, MADV_HUGEPAGE);
#endif
  cost c = pass(w, block, &peak);
  getrusage(RUSAGE_SELF, &usage);
  c.peak = (double)peak, c.resident = (double)usage.ru_maxrss * 1024;
  free(block);
  return c;
}

/* a row: the largest rank's numbers, and the CPU time of all */
static void print_row(const char *what, const work *w) {
  static cost all[MAX_RANKS];
  const cost own = measure(w);
  cost max = own;
  double sum = 0;
  if (!mpi_gather(&mpi, &own, all, sizeof own)) mpi_close(&mpi, 1);
  for (int r = 0; r < mpi.collective.ranks; r++) {
    if (all[r].cpu > max.cpu) max.cpu = all[r].cpu;
    if (all[r].inside > max.inside) max.inside = all[r].inside;
    if (all[r].peak > max.peak) max.peak = all[r].peak;
    if (all[r].resident > max.resident) max.resident = all[r].resident;
    sum += all[r].cpu;
  }
  if (mpi.collective.rank > 0) return;
  printf("%s %lld %d %.1f %.1f %.1f %.0f %.0f %lld %lld %lld\n", what, (long long)w->tokens, mpi.collective.ranks,
         max.cpu, sum, max.inside, max.peak / 1e6, max.resident / 1e6, (long long)own.bytes,
         (long long)(w->training ? own.gradients : 0), (long long)own.calls);
}

/* What a fifth layer sends, beside its gradients; false: not what the formula says. */
static bool check_layer(bool causal, bool training) {
  work w = { LUNA_PARALLEL_SEQUENCE, LAYERS, 256, 1024, causal, training };
  const int64_t forward = causal ? 16 * SLOTS * w.dim : 4 * SLOTS * (w.dim + HEADS);
  const int64_t back = !training ? 0 : causal ? 16 * SLOTS * w.dim : 4 * SLOTS * w.dim;
  const cost four = measure(&w);
  w.layers++;
  const cost five = measure(&w);
  const int64_t sent = five.bytes - four.bytes - (training ? five.gradients - four.gradients : 0);
  if (mpi.collective.rank == 0)
    printf("layer of %s model, %s, %d ranks: %lld bytes sent; by the formula %lld\n",
           causal ? "a causal" : "an encoder",
           training ? "step" : "inference", mpi.collective.ranks, (long long)sent, (long long)(forward + back));
  return sent == (mpi.collective.ranks > 1 ? forward + back : 0);
}

int main(int count, char **given) {
  if (!mpi_open(&mpi, &count, &given) || mpi.collective.ranks > MAX_RANKS) return 2;
  const char *what = count > 1 ? given[1] : "";
  const int64_t tokens = count > 2 ? atoll(given[2]) : 1 << 20;
  bool good = true;
  mpi.collective.all_gather = gather, mpi.collective.all_reduce = reduce;
  if (strcmp(what, "forward") == 0)
    print_row(what, &(work){ LUNA_PARALLEL_SEQUENCE, LAYERS, 128, tokens, false, false });
  else if (strcmp(what, "step") == 0)
    print_row(what, &(work){ LUNA_PARALLEL_SEQUENCE, LAYERS, 256, tokens, false, true });
  else {
    for (int i = 0; i < 4; i++) good = check_layer(i / 2 == 1, i % 2 == 1) && good;
    print_row("data", &(work){ LUNA_PARALLEL_DATA, LAYERS, 256, 1024 * mpi.collective.ranks, false, true });
  }
  fflush(stdout);
  mpi_close(&mpi, 0);
  return good ? 0 : 1;
}
