/* The runs of collective.c with ranks that are processes, and examples/luna_mpi.h: mpirun -n R build/mpi/tests/mpi. R
   ranks give the loss and gradients of one; all ranks the same bits; every byte handed over
   is counted. Rank 0 reports. */
#define main collective_main
#include "collective.c"
#undef main
#include "examples/luna_mpi.h"
#include "examples/luna_mpi.h" /* may be included again */

static mpi_ranks mpi;
static bool gather(void *user, const void *mine, void *all, size_t bytes) {
  ((hub_rank *)user)->bytes += (int64_t)bytes;
  return mpi_gather(&mpi, mine, all, bytes);
}
static bool reduce(void *user, void *buffer, int64_t count, luna_reduction what) {
  ((hub_rank *)user)->bytes += count * (what == LUNA_REDUCTION_SUM_F64 ? 8 : 4);
  return mpi_reduce(&mpi, buffer, count, what);
}

/* sums of odd sizes: each number by itself, in rank order */
static void sums(void) {
  const int ranks = mpi.collective.ranks, rank = mpi.collective.rank;
  for (int64_t n = 0; n < 12; n++) {
    float single[12], many[12];
    double wide[12], sum = 0;
    for (int64_t i = 0; i < n; i++) single[i] = 0.1f * (float)(rank + 1) + (float)i, wide[i] = single[i];
    CHECK(mpi_reduce(&mpi, single, n, LUNA_REDUCTION_SUM_F32) && mpi_reduce(&mpi, wide, n, LUNA_REDUCTION_SUM_F64),
          "sums");
    for (int64_t i = 0; i < n; i++, sum = 0) {
      many[i] = 0;
      for (int r = 0; r < ranks; r++)
        many[i] += 0.1f * (float)(r + 1) + (float)i, sum += 0.1f * (float)(r + 1) + (float)i;
      CHECK(single[i] == many[i] && wide[i] == sum, "number %d of %d: %.9g and %.17g", (int)i, (int)n,
            (double)single[i], wide[i]);
    }
  }
}

static void compare(const char *name, run *like) {
  static hub h;
  const int ranks = mpi.collective.ranks, rank = mpi.collective.rank;
  run one = run_on(like, 0, NULL);
  like->name = name;
  for (int odd = 0; odd < 2; odd++) {
    run many = *like;
    uint64_t own[2], all[2 * HUB_RANKS];
    memcpy(many.parts, (odd ? odd_batch : even_batch)[ranks], (size_t)ranks * sizeof *many.parts);
    hub_open(&h, ranks);
    h.rank[rank].collective.all_gather = gather, h.rank[rank].collective.all_reduce = reduce;
    rank_main(&many, &h.rank[rank].collective);
    hub_close(&h);
    CHECK(!*many.error[rank], "%s, rank %d of %d: %s", name, rank, ranks, many.error[rank]);
    own[0] = many.ranks_hash[rank];
    memcpy(&own[1], &many.ranks_loss[rank][STEPS - 1], sizeof own[1]);
    CHECK(mpi_gather(&mpi, own, all, sizeof own), "gather");
    for (int r = 1; r < ranks; r++)
      CHECK(all[2 * r] == all[0] && all[2 * r + 1] == all[1], "%s: rank %d of %d has other bits than rank 0", name, r,
            ranks);
    many.gradient = common_floats(one.count);
    memcpy(many.gradient, many.ranks_gradient[rank], (size_t)one.count * sizeof(float));
    CHECK(mpi_reduce(&mpi, many.gradient, one.count, LUNA_REDUCTION_SUM_F32), "sum of gradients");
    memcpy(many.loss, many.ranks_loss[rank], sizeof many.loss);
    if (rank == 0) run_compare(&one, &many, ranks, 2e-6, 2e-5);
    if (rank == 0 && !odd)
      printf("%s on %d ranks: %lld bytes a step and rank\n", name, ranks, (long long)many.bytes[0]);
    run_free(&many);
  }
  run_free(&one);
}

int main(int count, char **given) {
  if (!mpi_open(&mpi, &count, &given) || mpi.collective.ranks > 4) return 2;
  sums();
  run lm = run_of("lm", LM), classifier = run_of("classifier", CLASSIFIER), seq2seq = run_of("seq2seq", SEQ2SEQ);
  lm.lm.layer.convolution = 3;
  set_dropout(&lm.lm.layer);
  classifier.with_lengths = true;
  set_dropout(&classifier.encoder.layer);
  compare("lm", &lm);
  compare("classifier", &classifier);
  compare("seq2seq", &seq2seq);
  int64_t own[2] = { test_passed, test_failed }, all[2 * HUB_RANKS];
  mpi_gather(&mpi, own, all, sizeof own);
  test_passed = test_failed = 0;
  for (int r = 0; r < mpi.collective.ranks; r++) test_passed += (int)all[2 * r], test_failed += (int)all[2 * r + 1];
  const int status = mpi.collective.rank == 0 ? test_report("mpi") : 0;
  fflush(stdout);
  mpi_close(&mpi, 0);
  return status;
}
