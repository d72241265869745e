/* Results of products whose operands are rounded, to bfloat16 or to 8 bits. They agree with those of luna.h's reference
   (LUNA_ISA_REFERENCE), which rounds in the same places. Their distance from float32's is printed, not judged: it is
   the model's and the data's.
     An operand that lies in the middle between two numbers becomes either of them, by the last bit of what was computed
   before. A result beyond the limit is therefore compared with what the reference itself does when its inputs are moved
   by less than a float32's last bits: it may be off by as much as that moves the result, and no more.
     Include it after common.h. */
#ifndef ROUNDED_H
#define ROUNDED_H

#define ROUNDED_BF16 2e-5 /* of ||reference|| */
#define ROUNDED_INT8 1e-5
#define ROUNDED_SMALL 5e-3 /* of the largest gradient, by root mean square: a smaller one is compared with that */
enum { ROUNDED_TENSORS = 256, ROUNDED_DISTANCES = 4096, ROUNDED_TRIES = 64 };

/* how a run computes: `nudge` is 0, or the seed by which rounded_nudge moves its inputs and parameters */
typedef struct rounded_how { luna_isa isa; bool rounds; uint64_t nudge; } rounded_how;
typedef struct rounded_tensor { char name[128]; bool gradient; int64_t count; float *values; } rounded_tensor;
typedef struct rounded { int count; rounded_tensor at[ROUNDED_TENSORS]; } rounded;
/* computes, and puts what it wants compared into `out` by rounded_put */
typedef void (*rounded_run)(void *user, const rounded_how *how, rounded *out);

/* by a few of float32's units in the last place: in turn at most 3, 6, 9 and 12 */
TEST_UNUSED static void rounded_nudge(uint64_t nudge, float *x, int64_t n) {
  const double most = 4e-7 * (double)(1 + nudge % 4);
  for (int64_t i = 0; nudge && i < n; i++)
    x[i] = (float)((double)x[i] * (1 + most * common_number(nudge, (uint64_t)i)));
}
static void rounded_put(rounded *out, const char *name, bool gradient, const float *values, int64_t count) {
  if (!CHECK(out->count < ROUNDED_TENSORS, "%s: more than %d tensors", name, ROUNDED_TENSORS)) return;
  rounded_tensor *t = &out->at[out->count++];
  snprintf(t->name, sizeof t->name, "%s", name);
  t->gradient = gradient, t->count = count, t->values = common_floats(count);
  memcpy(t->values, values, (size_t)count * sizeof(float));
}
static rounded *rounded_of(rounded_run run, void *user, luna_isa isa, bool rounds, uint64_t nudge) {
  const rounded_how how = {isa, rounds, nudge};
  rounded *out = (rounded *)common_alloc(sizeof *out);
  run(user, &how, out);
  return out;
}
static void rounded_free(rounded *r) {
  for (int i = 0; i < r->count; i++) free(r->at[i].values);
  free(r);
}
/* ||a - b|| / ||b||; `floor`: the root mean square below which b counts as that */
static double rounded_error(const rounded *a, const rounded *b, int i, double floor) {
  return a->count == b->count && a->at[i].count == b->at[i].count ?
      common_error(a->at[i].values, b->at[i].values, b->at[i].count, b->at[i].gradient ? floor : 1e-6) : (double)NAN;
}
static double rounded_floor(const rounded *r) {
  double largest = 0;
  for (int i = 0; i < r->count; i++) {
    double sum = 0;
    for (int64_t k = 0; k < r->at[i].count; k++) sum += (double)r->at[i].values[k] * (double)r->at[i].values[k];
    if (r->at[i].gradient && r->at[i].count) largest = fmax(largest, sum / (double)r->at[i].count);
  }
  return ROUNDED_SMALL * sqrt(largest);
}

/* ---- distances from float32, of results and of gradients ---- */
static double rounded_distance[2][ROUNDED_DISTANCES];
static int rounded_distances[2];
static void rounded_far(bool gradient, double distance) {
  if (rounded_distances[gradient] < ROUNDED_DISTANCES)
    rounded_distance[gradient][rounded_distances[gradient]++] = distance;
}
static int rounded_order(const void *a, const void *b) {
  const double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}
/* prints them, and forgets them */
static void rounded_figures(const char *what) {
  static const char *const of[2] = {"results", "gradients"};
  for (int i = 0; i < 2; i++) {
    const int n = rounded_distances[i];
    if (n == 0) continue;
    qsort(rounded_distance[i], (size_t)n, sizeof(double), rounded_order);
    printf("%s, distance from float32: %d %s, median %.2g, maximum %.2g\n", what, n, of[i], rounded_distance[i][n / 2],
           rounded_distance[i][n - 1]);
    rounded_distances[i] = 0;
  }
}

/* The first tensor that is off the reference by more than the limit and what nudges move, or -1; its error. */
static int rounded_wrong(const rounded *got, const rounded *want, const double *moved, double limit, double floor,
                         double *error) {
  for (int i = 0; i < want->count; i++) {
    *error = rounded_error(got, want, i, floor);
    if (!(*error <= limit + 2 * moved[i])) return i;
  }
  return -1;
}
/* the instruction set that is compared */
static luna_isa rounded_isa = LUNA_ISA_BEST;
/* one check: a run on that instruction set against the reference */
static void rounded_check(const char *what, rounded_run run, void *user, double limit) {
  rounded *exact = rounded_of(run, user, rounded_isa, false, 0), *want = rounded_of(run, user, LUNA_ISA_REFERENCE,
                                                                                      true, 0),
          *got = rounded_of(run, user, rounded_isa, true, 0);
  double moved[ROUNDED_TENSORS] = {0}, error = 0, far = 0;
  const double floor = rounded_floor(want);
  int wrong = rounded_wrong(got, want, moved, limit, floor, &error);
  for (uint64_t k = 1; wrong >= 0 && k <= ROUNDED_TRIES; k++) {
    rounded *other = rounded_of(run, user, LUNA_ISA_REFERENCE, true, k);
    for (int i = 0; i < want->count; i++) moved[i] = fmax(moved[i], rounded_error(other, want, i, floor));
    rounded_free(other);
    wrong = rounded_wrong(got, want, moved, limit, floor, &error);
  }
  CHECK(want->count > 0 && wrong < 0, "%s: %s is off the reference, which rounds the same operands, by %.3g", what,
        wrong < 0 ? "nothing" : want->at[wrong].name, error);
  for (int i = 0; i < got->count; i++) {
    const double distance = rounded_error(got, exact, i, floor);
    if (!got->at[i].gradient) far = fmax(far, distance);
    rounded_far(got->at[i].gradient, distance);
  }
  CHECK(far > 1e-5, "%s: its results are float32's: nothing was rounded", what);
  rounded_free(exact), rounded_free(want), rounded_free(got);
}
#endif
