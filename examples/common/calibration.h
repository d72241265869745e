/* calibration.h: probabilities that mean what they say (of answers given with 80%, 80% should be right), and how well
   they rank samples of a rare class. Included after example.h.

     calibration c = { .classes = 3 };
     calibration_add(&c, logits, label);              for samples not learnt from; log-probabilities do as well
     double t = calibration_temperature(&c);          logits / t are less sure of themselves, or more [Guo et al. 2017]
     calibration_error(&c, t)                         what is left, before with t = 1
     calibration_loss(&c, t), calibration_base(...)   the log loss, and what the base rates alone have
     calibration_apply(weight, t)                     of the last layer: the model itself gives logits / t
     ranked *list = calibration_ranking(&c, class, t) the samples by the probability of a class, to be freed; from it
     ranking_of(list, count)                          average precision and area under the ROC curve
     threshold_for(list, count, aim, &reached)        the least probability that counts as the class, for an aim
     calibration_close(&c); */
#define CONFIDENCES 15               /* bins of the highest probability */
#define LEAST_CALIBRATED 20          /* samples: fewer say nothing of probabilities */
#define FEW 10                       /* fewer than that of a class in a part: what is measured there is mostly chance */

typedef struct calibration {
  int64_t classes, count, room;
  int64_t independent;               /* samples of the rarest class that do not follow from one another; 0: all */
  float *logits;
  int32_t *labels;
} calibration;

TOOL void calibration_add(calibration *c, const float *logits, int32_t label) {
  if (c->count == c->room) {
    c->room = 2 * c->room + 256;
    c->logits = (float *)grow(c->logits, c->room * c->classes, sizeof(float));
    c->labels = (int32_t *)grow(c->labels, c->room, sizeof(int32_t));
  }
  memcpy(c->logits + c->count * c->classes, logits, (size_t)c->classes * sizeof(float));
  c->labels[c->count++] = label;
}
TOOL void calibration_close(calibration *c) { free(c->logits), free(c->labels), memset(c, 0, sizeof *c); }

/* ln of the sum of e^(logit / t), less the largest, which is at *best */
TOOL double log_partition(const calibration *c, int64_t sample, double t, int32_t *best) {
  const float *x = c->logits + sample * c->classes;
  double sum = 0;
  *best = 0;
  for (int32_t i = 1; i < c->classes; i++) if (x[i] > x[*best]) *best = i;
  for (int64_t i = 0; i < c->classes; i++) sum += exp(((double)x[i] - (double)x[*best]) / t);
  return log(sum);
}
TOOL double calibration_loss(const calibration *c, double t) { /* mean of -ln p of the label */
  double sum = 0;
  int32_t best;
  for (int64_t i = 0; i < c->count; i++) {
    const float *x = c->logits + i * c->classes;
    const double rest = log_partition(c, i, t, &best);
    sum += rest + ((double)x[best] - (double)x[c->labels[i]]) / t;
  }
  return sum / (double)(c->count ? c->count : 1);
}

/* The expected calibration error: how far, on average over answers, the probability of an answer is from the share of
   right ones among answers of about that probability [Naeini, Cooper and Hauskrecht 2015]. */
typedef struct confidences { double sure[CONFIDENCES], right[CONFIDENCES], count; } confidences;
TOOL void confidences_add(confidences *c, double probability, bool right) {
  int bin = (int)(probability * CONFIDENCES);
  if (bin >= CONFIDENCES) bin = CONFIDENCES - 1;
  c->sure[bin] += probability, c->right[bin] += right, c->count++;
}
TOOL double confidences_error(const confidences *c) {
  double sum = 0;
  for (int i = 0; i < CONFIDENCES; i++) sum += fabs(c->sure[i] - c->right[i]);
  return c->count > 0 ? sum / c->count : 0;
}
TOOL double calibration_error(const calibration *c, double t) {
  confidences all = { { 0 }, { 0 }, 0 };
  int32_t best;
  for (int64_t i = 0; i < c->count; i++) {
    const double rest = log_partition(c, i, t, &best);
    confidences_add(&all, exp(-rest), best == c->labels[i]);
  }
  return confidences_error(&all);
}

TOOL int32_t calibration_best(const calibration *c, int64_t sample) {
  int32_t best;
  log_partition(c, sample, 1, &best);
  return best;
}
TOOL int64_t calibration_count(const calibration *c, int32_t label) { /* how many samples have it */
  int64_t count = 0;
  for (int64_t i = 0; i < c->count; i++) count += c->labels[i] == label;
  return count;
}
/* The loss of a temperature, and a pull towards 1 that is the weaker the more samples the rarest class has: of five
   samples a temperature of 2 or 0.7 has to gain 0.1 nats to be believed. */
TOOL double calibration_cost(const calibration *c, double t, int64_t rarest) {
  return calibration_loss(c, t) + 2 / (double)rarest * (1 / t - 1) * (1 / t - 1);
}
/* The temperature of the least cost, at most 20. It is 1 for few samples, and where a class has none: then nothing says
   how often it comes. Where all answers are right it is not below 1, as the loss would fall without end. The cost has
   one minimum: it is convex in 1 / t. */
TOOL double calibration_temperature(const calibration *c) {
  const double golden = 0.6180339887498949;
  int64_t rarest = c->count, wrong = 0;
  for (int32_t label = 0; label < c->classes; label++) {
    const int64_t count = calibration_count(c, label);
    if (count < rarest) rarest = count;
  }
  if (c->count < LEAST_CALIBRATED || rarest == 0) return 1;
  if (c->independent > 0 && c->independent < rarest) rarest = c->independent;
  for (int64_t i = 0; i < c->count; i++) wrong += calibration_best(c, i) != c->labels[i];
  double low = wrong ? -3 : 0, high = 3;
  for (int i = 0; i < 40; i++) {
    const double width = golden * (high - low), left = high - width, right = low + width;
    if (calibration_cost(c, exp(left), rarest) < calibration_cost(c, exp(right), rarest)) high = right;
    else low = left;
  }
  return fabs(low + high) < 0.02 ? 1 : exp((low + high) / 2);
}
TOOL luna_status calibration_apply(luna_tensor *weight, double t) {
  float *values = (float *)grow(NULL, luna_count(weight), sizeof(float));
  luna_status status = luna_read(weight, values);
  for (int64_t i = 0; i < luna_count(weight); i++) values[i] = (float)((double)values[i] / t);
  if (status == LUNA_OK) status = luna_write(weight, values);
  return free(values), status;
}

/* The log loss of the samples where each gets the same probabilities: the shares of classes in the data learnt from, of
   which `counts` has the counts. */
TOOL double calibration_base(const calibration *c, const int64_t *counts) {
  double sum = 0, all = (double)c->classes;
  for (int64_t i = 0; i < c->classes; i++) all += (double)counts[i];
  for (int64_t i = 0; i < c->count; i++) sum += log(all / ((double)counts[c->labels[i]] + 1));
  return sum / (double)(c->count ? c->count : 1);
}

/* The log loss with temperatures of the other half of the samples: what a temperature gains on samples that it was not
   fitted to. */
TOOL double calibration_crossed(const calibration *c) {
  double sum = 0;
  for (int half = 0; half < 2; half++) {
    calibration parts[2] = { { .classes = c->classes }, { .classes = c->classes } };
    for (int64_t i = 0; i < c->count; i++)
      calibration_add(parts + (i % 2 == half), c->logits + i * c->classes, c->labels[i]);
    sum += calibration_loss(parts, calibration_temperature(parts + 1)) * (double)parts[0].count;
    calibration_close(parts), calibration_close(parts + 1);
  }
  return sum / (double)(c->count ? c->count : 1);
}

/* ---- rare classes ------------------------------------------------------------------------------------------------ */

typedef struct ranked { double probability; bool is; } ranked; /* a sample: of a class, and whether it has it */
TOOL int by_probability(const void *a, const void *b) { /* the likeliest first */
  const double x = ((const ranked *)a)->probability, y = ((const ranked *)b)->probability;
  return (x < y) - (x > y);
}
TOOL ranked *calibration_ranking(const calibration *c, int32_t label, double t) {
  ranked *list = (ranked *)grow(NULL, c->count + 1, sizeof *list);
  int32_t best;
  for (int64_t i = 0; i < c->count; i++) {
    const float *x = c->logits + i * c->classes;
    const double rest = log_partition(c, i, t, &best);
    list[i] = (ranked){ exp(((double)x[label] - (double)x[best]) / t - rest), c->labels[i] == label };
  }
  qsort(list, (size_t)c->count, sizeof *list, by_probability);
  return list;
}

/* Average precision: the mean, over the samples of the class, of the precision where the probability is high enough
   for that sample. Area: how often a sample of the class has a higher probability than another one. NaN where all
   samples or none are of the class. Samples of equal probability count alike, whatever their order. */
typedef struct ranking { double precision, area; int64_t is; } ranking;
TOOL ranking ranking_of(const ranked *list, int64_t count) {
  ranking r = { 0, 0, 0 };
  double others = 0;
  for (int64_t i = 0, end; i < count; i = end) {
    int64_t is = 0;
    for (end = i; end < count && list[end].probability >= list[i].probability; end++) is += list[end].is;
    r.is += is;
    r.precision += (double)is * (double)r.is / (double)end;
    r.area += (double)is * (others + (double)(end - i - is) / 2); /* others that are likelier, or as likely */
    others += (double)(end - i - is);
  }
  r.precision = r.is > 0 && others > 0 ? r.precision / (double)r.is : NAN;
  r.area = r.is > 0 && others > 0 ? 1 - r.area / ((double)r.is * others) : NAN;
  return r;
}
/* Of two classes how the rarer one is ranked; of more the mean over classes. NaN where no class can be measured. */
TOOL ranking calibration_rank(const calibration *c, int32_t rare) {
  ranking sum = { 0, 0, 0 };
  int64_t used = 0;
  for (int32_t label = 0; label < c->classes; label++) {
    if (c->classes == 2 && label != rare) continue;
    ranked *list = calibration_ranking(c, label, 1);
    const ranking r = ranking_of(list, c->count);
    free(list);
    if (r.precision == r.precision) sum.precision += r.precision, sum.area += r.area, used++;
  }
  return used ? (ranking){ sum.precision / (double)used, sum.area / (double)used, 0 } : (ranking){ NAN, NAN, 0 };
}
TOOL int32_t rarest_of(const int64_t *counts, int64_t size) { /* of those that there are; of equals the last one */
  int32_t rare = (int32_t)size - 1;
  for (int32_t i = rare; i >= 0; i--) if (counts[i] > 0 && (counts[i] < counts[rare] || !counts[rare])) rare = i;
  return rare;
}
TOOL double harmonic(double a, double b) { return a + b > 0 ? 2 * a * b / (a + b) : 0; }

/* --balance: the loss of a class times all / (classes count), so that each class counts alike. A model that learnt so
   takes rare classes for as frequent as others: the logarithms of the factors are what its logits have too much. */
TOOL void balance_of(const int64_t *counts, int64_t size, float *weights) {
  double all = 0;
  for (int64_t c = 0; c < size; c++) all += (double)counts[c];
  for (int64_t c = 0; c < size; c++)
    weights[c] = counts[c] ? (float)(all / ((double)size * (double)counts[c])) : 1;
}
TOOL void unbalance(float *logits, const float *weights, int64_t size) {
  for (int64_t c = 0; c < size; c++) logits[c] -= logf(weights[c]);
}

/* What --aim says: "f1", "precision=0.9" or "recall=0.9". */
typedef struct aim { enum { AIM_F1, AIM_PRECISION, AIM_RECALL } kind; double least; } aim;
TOOL bool read_aim(const char *text, aim *out) {
  const char *at = strchr(text, '=');
  char *end;
  *out = (aim){ AIM_F1, 0 };
  if (strcmp(text, "f1") == 0) return true;
  if (!at) return false;
  out->kind = strncmp(text, "recall=", 7) == 0 ? AIM_RECALL : AIM_PRECISION;
  out->least = strtod(at + 1, &end);
  return (out->kind == AIM_RECALL || strncmp(text, "precision=", 10) == 0) && end != at + 1 && *end == 0 &&
      out->least > 0 && out->least <= 1;
}
typedef struct reached { double precision, recall; bool met; } reached;
/* The threshold: of the greatest F1; or of the greatest recall with so much precision, or the other way round. Where
   no threshold reaches that, the one that comes nearest, and `met` is false. It lies between the probabilities of two
   samples. */
TOOL double threshold_for(const ranked *list, int64_t count, aim wish, reached *out) {
  double best = -1, threshold = 0.5;
  int64_t is = 0, all = 0;
  for (int64_t i = 0; i < count; i++) all += list[i].is;
  *out = (reached){ 0, 0, false };
  for (int64_t i = 0; i < count; i++) {
    is += list[i].is;
    if (i + 1 < count && list[i + 1].probability >= list[i].probability) continue;
    const double precision = (double)is / (double)(i + 1), recall = all ? (double)is / (double)all : 0;
    const double wanted = wish.kind == AIM_RECALL ? recall : precision, other = precision + recall - wanted;
    const bool met = wish.kind == AIM_F1 || wanted >= wish.least;
    const double value = wish.kind == AIM_F1 ? harmonic(precision, recall) : met ? 1 + other : wanted;
    if (!(value > best)) continue;
    best = value, *out = (reached){ precision, recall, met };
    threshold = i + 1 < count ? (list[i].probability + list[i + 1].probability) / 2 : list[i].probability / 2;
  }
  return threshold;
}
