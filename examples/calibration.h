/* calibration.h: probabilities that mean what they say: of answers given with 80%, 80% should be right. Included after
   example.h.

     calibration c = { .classes = 3 };
     calibration_add(&c, logits, label);              for samples not learnt from; log-probabilities do as well
     double t = calibration_temperature(&c);          logits / t are less sure of themselves, or more [Guo et al. 2017]
     calibration_error(&c, t)                         what is left, before with t = 1
     calibration_apply(weight, t)                     of the last layer: the model itself gives logits / t
     calibration_close(&c); */
#define CONFIDENCES 15               /* bins of the highest probability */
#define LEAST_CALIBRATED 20          /* samples: fewer say nothing of probabilities */

typedef struct calibration { int64_t classes, count, room; float *logits; int32_t *labels; } calibration;

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

/* The temperature of the least loss, 1/20 to 20; 1 for few samples. The loss has one minimum: it is convex in 1 / t. */
TOOL double calibration_temperature(const calibration *c) {
  const double golden = 0.6180339887498949;
  double low = -3, high = 3;
  if (c->count < LEAST_CALIBRATED) return 1;
  for (int i = 0; i < 40; i++) {
    const double width = golden * (high - low), left = high - width, right = low + width;
    if (calibration_loss(c, exp(left)) < calibration_loss(c, exp(right))) high = right;
    else low = left;
  }
  return exp((low + high) / 2);
}
TOOL luna_status calibration_apply(luna_tensor *weight, double t) {
  float *values = (float *)grow(NULL, luna_count(weight), sizeof(float));
  luna_status status = luna_read(weight, values);
  for (int64_t i = 0; i < luna_count(weight); i++) values[i] = (float)((double)values[i] / t);
  if (status == LUNA_OK) status = luna_write(weight, values);
  return free(values), status;
}
