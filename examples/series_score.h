/* series_score.h: how well a model of series does. Included after series_data.h.

     score_clear()                     then
     score_class(row, label, shares)   for each series or row: its class, and the probabilities that the model gives
     score_forecast(...)               for each number that is forecast
     score_table()                     a line for each class or column, which classes are taken for which, and what
                                       other thresholds would find of a rare class
     score_lines(begin, deviations)    the whole in a line, or one for each number of steps ahead */
#include "common/calibration.h"

#define SHOWN_CLASSES 20             /* in the matrix, at most */
#define NAME_WIDTH 24                /* of a class or a column in a table */

static int64_t class_counts[CLASSES]; /* of the rows or cases that are learnt from */
static int32_t rare_class;           /* the one that they have least of */
static int64_t seasons[COLUMNS];     /* of each column, in rows: what repeats best in the training data */
static double threshold;             /* the probability from which on the rare class is found; 0: none */
static float *balance;               /* with --balance the factors of classes in the loss; else null */
static double temperature = 1;       /* that the logits have been divided by */

static struct {
  int64_t count, right;
  double loss;                       /* of forecasts: sum of absolute errors in deviations */
  confidences sure;
  calibration all;                   /* log-probabilities and labels */
  int64_t *pairs;                    /* [classes + 1, classes]: true class (the last: unknown), class found */
  /* of each class [classes]: how often it begins, in how many of these it is found, after how many steps in all; how
     often the model finds that it begins where it does not */
  int64_t *runs, *found, *delay, *alarms;
  /* [ahead_count,k]: sums of absolute errors, and of repeating the last value; how many, and how many inside the
     interval */
  double *error, *last, *repeated;   /* repeated: of the season's number */
  int64_t *errors, *inside;
  /* the class that lasts, and where it began; whether the model has found it since */
  struct { int32_t label, best; int64_t row; bool found; } run; /* best: what the model found in the row before */
} score;

TOOL void score_close(void) {
  free(score.pairs), free(score.runs), free(score.error), free(score.errors), calibration_close(&score.all);
}
TOOL void score_clear(void) {
  score_close();
  const int64_t c = label_count, k = ahead_count * data.k;
  memset(&score, 0, sizeof score);
  score.all.classes = c;
  score.pairs = (int64_t *)memset(grow(NULL, (c + 1) * c + 1, sizeof(int64_t)), 0,
                                  (size_t)((c + 1) * c) * sizeof(int64_t));
  score.runs = (int64_t *)memset(grow(NULL, 4 * c + 1, sizeof(int64_t)), 0, (size_t)(4 * c) * sizeof(int64_t));
  score.found = score.runs + c, score.delay = score.found + c, score.alarms = score.delay + c;
  score.error = (double *)memset(grow(NULL, 3 * k, sizeof(double)), 0, (size_t)(3 * k) * sizeof(double));
  score.last = score.error + k, score.repeated = score.last + k;
  score.errors = (int64_t *)memset(grow(NULL, 2 * k, sizeof(int64_t)), 0, (size_t)(2 * k) * sizeof(int64_t));
  score.inside = score.errors + k;
}

/* The class that is found: the likeliest one; with a threshold the rare one from there on, else the likeliest other. */
TOOL int32_t best_of(const float *shares) {
  const int32_t left_out = threshold > 0 ? rare_class : -1;
  int32_t best = left_out == 0;
  if (threshold > 0 && (double)shares[rare_class] >= threshold) return rare_class;
  for (int32_t c = 1; c < label_count; c++) if (c != left_out && shares[c] > shares[best]) best = c;
  return best;
}
/* Probabilities of a model that learnt with --balance, as the data have the classes. */
TOOL void unbalance_shares(float *shares) {
  double sum = 0;
  for (int32_t c = 0; c < label_count; c++) sum += (double)shares[c] / (double)balance[c];
  for (int32_t c = 0; c < label_count; c++) shares[c] = (float)((double)shares[c] / (double)balance[c] / sum);
}
TOOL void add_shares(calibration *to, int32_t label, const float *shares) {
  static float logs[CLASSES];
  for (int32_t c = 0; c < label_count; c++) logs[c] = logf(fmaxf(shares[c], 1e-30f));
  if (label >= 0) calibration_add(to, logs, label);
}

/* When a class begins, how long the model takes to find it. A series' first class is not counted: when that began is
   unknown. */
TOOL void score_run(int64_t row, int32_t label, int32_t best) {
  if (row == 0 || label != score.run.label) {
    score.run.label = label, score.run.row = row, score.run.found = row == 0;
    if (row > 0 && label >= 0) score.runs[label]++;
  }
  if (row > 0 && best != score.run.best && label >= 0 && best != label) score.alarms[best]++;
  score.run.best = best;
  if (score.run.found || label < 0 || best != label) return;
  score.run.found = true;
  score.found[label]++, score.delay[label] += row - score.run.row;
}
TOOL void score_class(int64_t row, int32_t label, const float *shares) {
  const int32_t best = best_of(shares);
  if (own.per_step) score_run(row, label, best);
  if (label == NONE) return;
  score.count++, score.right += label == best;             /* UNKNOWN is never right */
  confidences_add(&score.sure, (double)shares[best], label == best);
  score.pairs[(label == UNKNOWN ? label_count : label) * label_count + best]++;
  add_shares(&score.all, label, shares);
}
/* i: of ahead_count times k forecasts; season: the number a season before; deviation: the column's, in the training
   data */
TOOL void score_forecast(int64_t i, const float *quantiles, double now, double season, double next, double deviation) {
  const double by = fabs((double)quantiles[level_count / 2] - next), last = fabs(now - next);
  if (by != by || last != last) return;
  score.count++, score.errors[i]++;
  score.error[i] += by, score.last[i] += last, score.repeated[i] += fabs(season - next);
  score.loss += by / deviation;
  score.inside[i] += next >= (double)quantiles[0] && next <= (double)quantiles[level_count - 1];
}

TOOL int64_t pairs_of(int32_t label, bool is_true) { /* how often a class is true, or found */
  int64_t sum = 0;
  for (int32_t c = 0; c < label_count + !is_true; c++)
    sum += score.pairs[is_true ? label * label_count + c : c * label_count + label];
  return sum;
}
TOOL double share(int64_t part, int64_t of) { return of ? 100 * (double)part / (double)of : NAN; }
TOOL void put_name(word w) { /* a column of a table */
  const int64_t size = w.size < NAME_WIDTH ? w.size : NAME_WIDTH;
  put_shown(stdout, w.at, size);
  printf("%*s", NAME_WIDTH - (int)size, "");
}
TOOL void put_share(double percent) { /* of nothing there is no share */
  if (percent == percent) printf(" %9.1f%%", percent);
  else printf(" %10s", "-");
}

TOOL void matrix_of_classes(void) {
  if (label_count > SHOWN_CLASSES) return;
  printf("%*s found as", NAME_WIDTH + 5, "true class");
  for (int32_t c = 0; c < label_count; c++) printf("%s%7d", c ? "" : "\n                             ", (int)c + 1);
  for (int32_t c = 0; c < label_count; c++) {
    printf("\n%4d ", (int)c + 1), put_name(classes[c]);
    for (int32_t f = 0; f < label_count; f++) printf("%7lld", (long long)score.pairs[c * label_count + f]);
  }
  printf("\n");
}
TOOL void table_of_classes(void) {
  printf("%-*s %10s %10s %10s %10s %10s %10s", NAME_WIDTH, "class", own.per_step ? "steps" : "series", "recall",
         "precision", "F1", "AP", "AUC");
  if (own.per_step) printf(" %10s %10s %12s %12s", "begins", "found", "delay, steps", "false begins");
  for (int32_t c = 0; c < label_count; c++) {
    const int64_t is = pairs_of(c, true), found = pairs_of(c, false), right = score.pairs[c * label_count + c];
    printf("\n"), put_name(classes[c]);
    printf(" %10lld", (long long)is);
    put_share(share(right, is)), put_share(share(right, found)), put_share(share(2 * right, is + found));
    ranked *list = calibration_ranking(&score.all, c, 1);
    const ranking r = ranking_of(list, score.all.count);
    free(list);
    put_share(100 * r.precision), put_share(100 * r.area);
    if (!own.per_step) continue;
    printf(" %10lld %10lld", (long long)score.runs[c], (long long)score.found[c]);
    if (score.found[c]) printf(" %12.1f", (double)score.delay[c] / (double)score.found[c]);
    else printf(" %12s", "-");
    printf(" %12lld", (long long)score.alarms[c]);
  }
  printf("\nAP is the average precision. AUC is the area under the ROC curve; chance has 50%%.\n");
  if (own.per_step)
    printf("A beginning is found if the class is found at any step before it ends. It is false if the model changes to "
           "the class while another is true.\n");
}
/* What more alarms would find: the rare class of two at five recalls. */
TOOL void table_of_thresholds(void) {
  const int64_t is = pairs_of(rare_class, true);
  if (label_count != 2 || is == 0 || is == score.all.count) return;
  ranked *list = calibration_ranking(&score.all, rare_class, 1);
  int64_t found = 0, wanted = 10;
  printf("'"), put_shown(stdout, classes[rare_class].at, shown_size(classes[rare_class]));
  printf("' by the least probability that counts as found\n%11s %10s %10s %10s %10s\n", "probability", "recall",
         "precision", "F1", "found");
  for (int64_t i = 0; i < score.all.count; i++) {
    found += list[i].is;
    const bool tied = i + 1 < score.all.count && list[i + 1].probability >= list[i].probability;
    if (tied || 100 * found < wanted * is) continue;
    printf("%11.4f", list[i].probability);
    put_share(share(found, is)), put_share(share(found, i + 1)), put_share(share(2 * found, is + i + 1));
    printf(" %10lld\n", (long long)i + 1);
    for (const int64_t at = 100 * found / is; wanted <= at;) wanted += wanted == 10 ? 15 : wanted == 75 ? 15 : 25;
    if (wanted > 90) break;
  }
  free(list);
}
TOOL void put_error(double error) { /* of nothing there is none */
  if (error == error) printf(" %16.6g", error);
  else printf(" %16s", "-");
}
TOOL const char *winner_of(int64_t i) { /* a repetition that is better than the forecast */
  if (score.repeated[i] < score.error[i] && score.repeated[i] <= score.last[i]) return "  the season wins";
  return score.last[i] < score.error[i] ? "  the last value wins" : "";
}
TOOL void table_of_columns(void) {
  printf("%-*s %8s %16s %16s %10s", NAME_WIDTH, "column", "ahead", "absolute error", "of last value", "ratio");
  if (level_count > 1) printf("   in %2lld%%", (long long)own.interval);
  printf(" %16s %8s\n", "of the season", "season");
  for (int64_t i = 0; i < ahead_count * data.k; i++) {
    const double count = (double)score.errors[i];
    if (input_only[i % data.k]) continue;
    put_name(column_name(i % data.k));
    printf(" %8lld", (long long)ahead[i / data.k]);
    put_error(score.error[i] / count), put_error(score.last[i] / count);
    put_share(100 * score.error[i] / score.last[i]);
    if (level_count > 1) put_share(share(score.inside[i], score.errors[i]));
    put_error(score.repeated[i] / count), printf(" %8lld%s\n", (long long)seasons[i % data.k], winner_of(i));
  }
}
TOOL void score_table(void) {
  if (own.forecast) { table_of_columns(); return; }
  table_of_classes(), matrix_of_classes(), table_of_thresholds();
}

/* The mean over columns of the errors in deviations, so that each counts alike. */
TOOL void forecast_line(const char *begin, int64_t a, const float *deviations) {
  double error = 0, last = 0, repeated = 0, used = 0;
  int64_t inside = 0, count = 0;
  for (int64_t k = 0; k < data.k; k++) {
    const int64_t i = a * data.k + k;
    if (score.errors[i] == 0) continue;
    const double by = (double)score.errors[i] * (double)deviations[k];
    used++, error += score.error[i] / by, last += score.last[i] / by, repeated += score.repeated[i] / by;
    inside += score.inside[i], count += score.errors[i];
  }
  if (count == 0) {
    printf("%s%lld ahead: there is nothing to measure on\n", begin, (long long)ahead[a]);
    return;
  }
  printf("%s%lld ahead: mean absolute error, in deviations, %.6g, of the last value %.6g, of the season %.6g", begin,
         (long long)ahead[a], error / used, last / used, repeated / used);
  if (level_count > 1)
    printf("; intervals of %lld%% hold %.1f%%", (long long)own.interval, share(inside, count));
  printf("\n");
}
/* Accuracy beside that of always saying the most frequent class, and the mean of the classes' recalls. */
TOOL void class_line(const char *begin) {
  double recalls = 0;
  int32_t there = 0, most = 0, absent = 0;
  for (int32_t c = 0; c < label_count; c++) {
    const int64_t is = pairs_of(c, true);
    if (is == 0) absent = c;
    else there++, recalls += share(score.pairs[c * label_count + c], is);
    if (is > pairs_of(most, true)) most = c;
  }
  printf("%saccuracy %.2f%%, balanced ", begin, share(score.right, score.count));
  if (there == label_count) printf("%.2f%%", recalls / there);
  else {
    printf("is not defined, '"), put_shown(stdout, classes[absent].at, shown_size(classes[absent]));
    printf("' is absent");
  }
  printf("; always '");
  put_shown(stdout, classes[most].at, shown_size(classes[most]));
  printf("': %.2f%%; expected calibration error %.2f%%\n", share(pairs_of(most, true), score.count),
         100 * confidences_error(&score.sure));
}
/* What the probabilities are worth. */
TOOL void loss_line(void) {
  printf("The log loss is %.4f", calibration_loss(&score.all, 1));
  if (own.by == BY_MODEL && (temperature < 1 || temperature > 1)) /* logits times it are what the model gave */
    printf(", before the temperature %.4f", calibration_loss(&score.all, 1 / temperature));
  if (class_counts[rare_class] > 0)                        /* models of older versions do not say */
    printf("; the class shares of the training data alone have %.4f", calibration_base(&score.all, class_counts));
  printf(".\n");
}
TOOL void score_lines(const char *begin, const float *deviations) {
  if (!own.forecast && score.all.count > 0) loss_line();
  if (!own.forecast) class_line(begin);
  else for (int64_t a = 0; a < ahead_count; a++) forecast_line(begin, a, deviations);
}
