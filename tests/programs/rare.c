/* rare.c: examples/common/calibration.h: temperatures, average precision and area, thresholds, against plain
   definitions. */
#include "luna.h"
#include "examples/common/example.h"
#include "examples/common/calibration.h"
#include "test.h"

static uint64_t state = 1;
static double chance(void) { return (double)(splitmix(&state) >> 11) / 9007199254740992.0; }

/* Samples of two classes: the logit of class 1 is `sure` times its label, plus noise; this share of labels is false. */
static calibration samples(int64_t count, double share, double sure, double noise, double wrong) {
  calibration c = { .classes = 2 };
  for (int64_t i = 0; i < count; i++) {
    const bool is = chance() < share;
    const float logits[2] = { 0, (float)(sure * (is ? 1 : -1) + noise * (chance() - 0.5)) };
    calibration_add(&c, logits, (chance() < wrong) != is);
  }
  return c;
}

static void temperatures(void) {
  calibration one = samples(400, 0, 4, 1, 0), right = samples(400, 0.5, 4, 1, 0), doubt = samples(4000, 0.5, 6, 1, 0.2);
  calibration few = samples(LEAST_CALIBRATED - 1, 0.5, 6, 1, 0.3);
  CHECK(calibration_temperature(&one) == 1, "a temperature of one class: %g", calibration_temperature(&one));
  CHECK(calibration_temperature(&few) == 1, "a temperature of few samples: %g", calibration_temperature(&few));
  CHECK(calibration_temperature(&right) >= 1, "sharpened without errors: %g", calibration_temperature(&right));
  const double t = calibration_temperature(&doubt), best = 6 / log(0.8 / 0.2);
  CHECK(fabs(t / best - 1) < 0.1, "the temperature is %g, not about %g", t, best);
  CHECK(calibration_loss(&doubt, t) < calibration_loss(&doubt, 1), "a temperature that does not help");
  doubt.independent = 5;
  const double pulled = calibration_temperature(&doubt);
  CHECK(pulled < t && pulled > 1, "five samples pull %g no nearer to 1: %g", t, pulled);
  calibration_close(&one), calibration_close(&right), calibration_close(&doubt), calibration_close(&few);
}
static void base_rates(void) {
  calibration c = samples(1000, 0.1, 1, 1, 0);
  const int64_t counts[2] = { 89, 9 };                     /* 0.9 and 0.1 with one more each */
  const double is = (double)calibration_count(&c, 1) / 1000, wanted = -(1 - is) * log(0.9) - is * log(0.1);
  CHECK(fabs(calibration_base(&c, counts) - wanted) < 1e-9, "base rates %g, not %g", calibration_base(&c, counts),
        wanted);
  calibration_close(&c);
}

/* by their definitions: pairs for the area, each sample's own precision for the average */
static ranking plain_ranking(const ranked *list, int64_t count) {
  ranking r = { 0, 0, 0 };
  double pairs = 0;
  for (int64_t i = 0; i < count; i++) {
    int64_t above = 0, is = 0;
    if (!list[i].is) continue;
    r.is++;
    for (int64_t j = 0; j < count; j++) {
      if (list[j].probability >= list[i].probability) above++, is += list[j].is;
      if (list[j].is) continue;
      pairs++;
      r.area += list[i].probability > list[j].probability ? 1 : list[i].probability < list[j].probability ? 0 : 0.5;
    }
    r.precision += (double)is / (double)above;
  }
  r.precision /= (double)r.is, r.area /= pairs;
  return r;
}
static void rankings(void) {
  for (int ties = 0; ties < 2; ties++) {
    calibration c = samples(300, 0.1, 1, 6, 0);
    for (int64_t i = 0; ties && i < c.count; i++) c.logits[2 * i + 1] = floorf(c.logits[2 * i + 1]);
    ranked *list = calibration_ranking(&c, 1, 1);
    const ranking r = ranking_of(list, c.count), plain = plain_ranking(list, c.count);
    CHECK(r.is == plain.is && fabs(r.precision - plain.precision) < 1e-12 && fabs(r.area - plain.area) < 1e-12,
          "ties %d: AP %g, area %g, not %g and %g", ties, r.precision, r.area, plain.precision, plain.area);
    CHECK(calibration_rank(&c, 1).precision == r.precision, "of two classes it is the rare one's");
    free(list), calibration_close(&c);
  }
  calibration none = samples(50, 0, 1, 1, 0);
  ranked *list = calibration_ranking(&none, 1, 1);
  const ranking r = ranking_of(list, none.count);
  CHECK(r.precision != r.precision && r.area != r.area, "a ranking of one class");
  free(list), calibration_close(&none);
  const int64_t counts[4] = { 5, 2, 0, 9 };
  CHECK(rarest_of(counts, 4) == 1, "the rarest of 5, 2, 0 and 9 is %d", (int)rarest_of(counts, 4));
}

static reached at_threshold(const ranked *list, int64_t count, double threshold) {
  int64_t found = 0, is = 0, all = 0;
  for (int64_t i = 0; i < count; i++) {
    all += list[i].is;
    if (list[i].probability >= threshold) found++, is += list[i].is;
  }
  return (reached){ found ? (double)is / (double)found : 0, (double)is / (double)all, true };
}
static void thresholds(void) {
  calibration c = samples(2000, 0.05, 1, 6, 0);
  ranked *list = calibration_ranking(&c, 1, 1);
  static const char *const aims[] = { "f1", "precision=0.5", "recall=0.7", "precision=1" };
  for (int a = 0; a < 4; a++) {
    aim wanted;
    reached got;
    CHECK(read_aim(aims[a], &wanted), "%s is no aim", aims[a]);
    const double threshold = threshold_for(list, c.count, wanted, &got);
    const reached is = at_threshold(list, c.count, threshold);
    CHECK(fabs(is.precision - got.precision) < 1e-12 && fabs(is.recall - got.recall) < 1e-12,
          "%s: the threshold %g gives %g, %g, not %g, %g", aims[a], threshold, is.precision, is.recall, got.precision,
          got.recall);
    for (int64_t i = 0; i < c.count; i++) {                /* no other one is better */
      const reached other = at_threshold(list, c.count, list[i].probability);
      const double mine = a == 0 ? harmonic(got.precision, got.recall) : a == 2 ? got.precision : got.recall;
      const double its = a == 0 ? harmonic(other.precision, other.recall) : a == 2 ? other.precision : other.recall;
      const double aimed = a == 0 ? 1 : a == 2 ? other.recall : other.precision;
      if (aimed >= wanted.least && (got.met || a == 0)) CHECK(its <= mine + 1e-12, "%s: %g is better than %g", aims[a],
                                                              its, mine);
      if (!got.met) CHECK(aimed < wanted.least, "%s can be reached", aims[a]);
    }
  }
  aim none;
  static const char *const wrong[] = { "", "F1", "precision", "precision=", "precision=0", "precision=1.5", "recall=x",
                                       "accuracy=0.9", "recall=0.5 " };
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
    CHECK(!read_aim(wrong[i], &none), "'%s' is an aim", wrong[i]);
  free(list), calibration_close(&c);
}

int main(void) {
  temperatures(), base_rates(), rankings(), thresholds();
  return test_report("rare");
}
