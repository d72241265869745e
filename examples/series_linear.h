/* series_linear.h: the yardstick of series: a linear model of classes, which a model that is worth its steps must beat.
   Included after series_score.h.

     linear_fit()              learns from the training part, and chooses its decay on the part to validate on
     linear_refit()            learns from both parts, with that decay: the yardstick
     linear_find(first, last, &store)     adds what it gives series first .. last - 1 to a calibration
     linear_text(c), linear_read(c, text) its weights of class c as text, to be freed, and back
     linear_close()

   A row is seen as its numbers and, over the last 5, 20 and 60 rows, each column's mean and deviation, all in the
   column's deviations; models that are not causal see the next rows so, too. Cases are seen as means and deviations of
   the whole and of its thirds. Logits are linear in these; their weights have the least mean log loss plus a decay
   (logistic regression), by L-BFGS. */
#define LINEAR_WORK 3e6              /* numbers times classes that are learnt from: of more, every nth row */
#define LINEAR_STEPS 60              /* of the optimiser, for each decay */
#define LINEAR_PAST 6                /* steps that it remembers */

static const int64_t rolling[] = { 5, 20, 60 };
#define ROLLING ((int64_t)(sizeof rolling / sizeof *rolling))

static struct { int64_t features; double *weights; double decay; } linear; /* [classes, features + 1], the bias last */

TOOL void linear_close(void) { free(linear.weights), linear.weights = NULL; }
TOOL bool linear_of_cases(void) { return !own.per_step; }
TOOL int64_t linear_size(void) {
  return data.k * (linear_of_cases() ? 8 : 1 + 2 * ROLLING * (own.causal ? 1 : 2));
}
TOOL double *weights_of(int32_t c) { return linear.weights + c * (linear.features + 1); }

/* A number in its column's deviations from the mean; NaN: it is missing. */
TOOL double linear_number(int64_t row, int64_t c) {
  return ((double)data.rows[row * data.k + c] - (double)mean[c]) / (double)deviation[c];
}

/* ---- what it sees ------------------------------------------------------------------------------------------------ */

typedef struct moments { double sum, squares, count; } moments;
TOOL void moments_add(moments *m, double x, double sign) {
  if (x == x) m->sum += sign * x, m->squares += sign * x * x, m->count += sign;
}
TOOL void moments_put(const moments *m, double *out) {     /* of nothing: the mean */
  const double middle = m->count > 0 ? m->sum / m->count : 0;
  const double spread = m->count > 1 ? m->squares / m->count - middle * middle : 0;
  out[0] = middle, out[1] = sqrt(fmax(spread, 0));
}
TOOL void case_features(const series *s, double *out) {
  for (int64_t c = 0; c < data.k; c++)
    for (int64_t part = 0; part < 4; part++) {
      const int64_t first = part ? s->n * (part - 1) / 3 : 0, last = part ? s->n * part / 3 : s->n;
      moments m = { 0, 0, 0 };
      for (int64_t row = first; row < last; row++) moments_add(&m, linear_number(s->at + row, c), 1);
      moments_put(&m, out + 8 * c + 2 * part);
    }
}
typedef void features_fn(void *to, const series *s, int64_t row, const double *features);

/* The features of every row of a series, its lead first: sums over windows move along. */
TOOL void row_features(const series *s, features_fn *use, void *to) {
  const int64_t sides = own.causal ? 1 : 2, each = 1 + 2 * ROLLING * sides, windows = data.k * ROLLING * sides;
  moments *all = (moments *)memset(grow(NULL, windows, sizeof *all), 0, (size_t)windows * sizeof *all);
  double *out = (double *)grow(NULL, linear_size(), sizeof *out);
  const int64_t first = s->at - s->lead, end = s->at + s->n;
  for (int64_t row = first; row < end; row++) {
    for (int64_t i = 0; i < windows; i++) {
      const int64_t c = i / (ROLLING * sides), w = rolling[i % ROLLING], side = i / ROLLING % sides;
      if (side == 0) {                                     /* rows row - w + 1 .. row */
        moments_add(all + i, linear_number(row, c), 1);
        if (row - w >= first) moments_add(all + i, linear_number(row - w, c), -1);
      } else {                                             /* rows row .. row + w - 1 */
        for (int64_t r = row == first ? row : row + w - 1; r < row + w && r < end; r++)
          moments_add(all + i, linear_number(r, c), 1);
        if (row > first) moments_add(all + i, linear_number(row - 1, c), -1);
      }
      moments_put(all + i, out + c * each + 1 + 2 * (i % (ROLLING * sides)));
    }
    for (int64_t c = 0; c < data.k; c++) {
      const double now = linear_number(row, c);
      out[c * each] = now == now ? now : 0;
    }
    if (row >= s->at) use(to, s, row - s->at, out);
  }
  free(all), free(out);
}
TOOL void all_features(int64_t first, int64_t last, features_fn *use, void *to) {
  for (int64_t i = first; i < last; i++) {
    if (!linear_of_cases()) { row_features(data.list + i, use, to); continue; }
    double *out = (double *)grow(NULL, linear_size(), sizeof *out);
    case_features(data.list + i, out);
    use(to, data.list + i, 0, out);
    free(out);
  }
}

/* ---- what it gives ----------------------------------------------------------------------------------------------- */

TOOL int32_t label_at(const series *s, int64_t row) { return own.per_step ? data.labels[s->at + row] : s->label; }
TOOL void linear_logits(const double *features, float *logits) {
  for (int32_t c = 0; c < label_count; c++) {
    const double *w = weights_of(c);
    double sum = w[linear.features];
    for (int64_t i = 0; i < linear.features; i++) sum += w[i] * features[i];
    logits[c] = (float)sum;
  }
}
TOOL void linear_add(void *to, const series *s, int64_t row, const double *features) {
  static float logits[CLASSES];
  const int32_t label = label_at(s, row);
  if (label < 0) return;
  linear_logits(features, logits);
  calibration_add((calibration *)to, logits, label);
}
TOOL void linear_find(int64_t first, int64_t last, calibration *to) { all_features(first, last, linear_add, to); }

/* ---- learning ---------------------------------------------------------------------------------------------------- */

typedef struct linear_data {
  float *x;                          /* [rows, features], each feature of mean 0 and deviation 1 */
  int32_t *labels;
  int64_t rows, every, seen;
  bool whole;                        /* what is to validate on, too */
  double *middle, *spread;           /* [features] */
} linear_data;

TOOL void linear_collect(void *to, const series *s, int64_t row, const double *features) {
  linear_data *d = (linear_data *)to;
  const int32_t label = label_at(s, row);
  const bool out = !d->whole && own.per_step && data.kept_out && data.kept_out[s->at + row];
  if (label < 0 || out || d->seen++ % d->every) return;
  for (int64_t i = 0; i < linear.features; i++) d->x[d->rows * linear.features + i] = (float)features[i];
  d->labels[d->rows++] = label;
}
TOOL void linear_standardise(linear_data *d) {
  for (int64_t i = 0; i < linear.features; i++) {
    double sum = 0, squares = 0;
    for (int64_t r = 0; r < d->rows; r++) sum += (double)d->x[r * linear.features + i];
    d->middle[i] = sum / (double)d->rows;
    for (int64_t r = 0; r < d->rows; r++) {
      const double by = (double)d->x[r * linear.features + i] - d->middle[i];
      squares += by * by;
    }
    d->spread[i] = squares > 0 ? sqrt(squares / (double)d->rows) : 1;
    for (int64_t r = 0; r < d->rows; r++) {
      float *x = d->x + r * linear.features + i;
      *x = (float)(((double)*x - d->middle[i]) / d->spread[i]);
    }
  }
}

/* The mean log loss and half the decay's squares, with its gradient. */
TOOL double linear_cost(const linear_data *d, const double *w, double decay, double *gradient) {
  static double p[CLASSES];
  const int64_t f = linear.features, size = label_count * (f + 1);
  double cost = 0;
  memset(gradient, 0, (size_t)size * sizeof *gradient);
  for (int64_t r = 0; r < d->rows; r++) {
    const float *x = d->x + r * f;
    double most = -HUGE_VAL, sum = 0;
    for (int32_t c = 0; c < label_count; c++) {
      double logit = w[c * (f + 1) + f];
      for (int64_t i = 0; i < f; i++) logit += w[c * (f + 1) + i] * (double)x[i];
      p[c] = logit, most = fmax(most, logit);
    }
    for (int32_t c = 0; c < label_count; c++) sum += exp(p[c] - most);
    cost += log(sum) + most - p[d->labels[r]];
    for (int32_t c = 0; c < label_count; c++) {
      const double by = (exp(p[c] - most) / sum - (c == d->labels[r])) / (double)d->rows;
      double *g = gradient + c * (f + 1);
      for (int64_t i = 0; i < f; i++) g[i] += by * (double)x[i];
      g[f] += by;
    }
  }
  cost /= (double)d->rows;
  for (int64_t i = 0; i < size; i++) {
    if (i % (f + 1) == f) continue;                        /* biases do not decay */
    cost += decay / 2 * w[i] * w[i], gradient[i] += decay * w[i];
  }
  return cost;
}
TOOL double dot(const double *a, const double *b, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; i++) sum += a[i] * b[i];
  return sum;
}
/* L-BFGS's direction: the gradient times an approximate inverse Hessian of the last steps s and changes y of the
   gradient [Nocedal 1980]. */
TOOL void linear_direction(const double *gradient, const double *s, const double *y, int64_t steps, int64_t n,
                           double *out) {
  double weight[LINEAR_PAST];
  const int64_t oldest = steps > LINEAR_PAST ? steps - LINEAR_PAST : 0;
  for (int64_t i = 0; i < n; i++) out[i] = -gradient[i];
  for (int64_t k = steps; k-- > oldest;) {
    const double *sk = s + k % LINEAR_PAST * n, *yk = y + k % LINEAR_PAST * n;
    weight[k % LINEAR_PAST] = dot(sk, out, n) / dot(sk, yk, n);
    for (int64_t i = 0; i < n; i++) out[i] -= weight[k % LINEAR_PAST] * yk[i];
  }
  if (steps > 0) {
    const double *sk = s + (steps - 1) % LINEAR_PAST * n, *yk = y + (steps - 1) % LINEAR_PAST * n;
    const double scale = dot(sk, yk, n) / dot(yk, yk, n);
    for (int64_t i = 0; i < n; i++) out[i] *= scale;
  }
  for (int64_t k = oldest; k < steps; k++) {
    const double *sk = s + k % LINEAR_PAST * n, *yk = y + k % LINEAR_PAST * n;
    const double less = weight[k % LINEAR_PAST] - dot(yk, out, n) / dot(sk, yk, n);
    for (int64_t i = 0; i < n; i++) out[i] += less * sk[i];
  }
}
/* Moves the weights to the least cost. */
TOOL void linear_minimise(const linear_data *d, double *w, double decay) {
  const int64_t n = label_count * (linear.features + 1);
  double *memory = (double *)grow(NULL, (4 + 2 * LINEAR_PAST) * n, sizeof *memory);
  double *gradient = memory, *way = gradient + n, *next = way + n, *next_gradient = next + n;
  double *s = next_gradient + n, *y = s + LINEAR_PAST * n;
  int64_t kept = 0;
  double cost = linear_cost(d, w, decay, gradient);
  for (int step = 0; step < LINEAR_STEPS && dot(gradient, gradient, n) > 1e-12; step++) {
    double rate = 1, lower = 0;
    linear_direction(gradient, s, y, kept, n, way);
    const double slope = dot(gradient, way, n);
    for (int tries = 0; tries < 20; tries++, rate /= 2) {  /* shorter until the cost falls enough */
      for (int64_t i = 0; i < n; i++) next[i] = w[i] + rate * way[i];
      lower = linear_cost(d, next, decay, next_gradient);
      if (lower <= cost + 1e-4 * rate * slope) break;
    }
    if (!(lower < cost)) break;
    double *sk = s + kept % LINEAR_PAST * n, *yk = y + kept % LINEAR_PAST * n;
    for (int64_t i = 0; i < n; i++) sk[i] = next[i] - w[i], yk[i] = next_gradient[i] - gradient[i];
    if (dot(sk, yk, n) > 0) kept++;
    memcpy(w, next, (size_t)n * sizeof *w), memcpy(gradient, next_gradient, (size_t)n * sizeof *w);
    cost = lower;
  }
  free(memory);
}
/* The weights for features as they come, of those for standardised ones. */
TOOL void linear_unstandardise(const linear_data *d, const double *w) {
  const int64_t f = linear.features;
  for (int32_t c = 0; c < label_count; c++) {
    double *to = weights_of(c);
    const double *from = w + c * (f + 1);
    to[f] = from[f];
    for (int64_t i = 0; i < f; i++) to[i] = from[i] / d->spread[i], to[f] -= to[i] * d->middle[i];
  }
}

/* Decays from strong to weak, each from where the one before ended. Returns that of the best average precision on the
   part to validate on, or of the least log loss where that part ranks nothing; without such a part 0.01. */
TOOL double linear_best_decay(const linear_data *d, double *w) {
  static const double decays[] = { 0.1, 0.03, 0.01, 0.003, 0.001 };
  double least = HUGE_VAL, best = 0.01;
  for (size_t i = 0; i < sizeof decays / sizeof *decays && data.validation; i++) {
    calibration c = { .classes = label_count };
    linear_minimise(d, w, decays[i]);
    linear_unstandardise(d, w);
    linear_find(data.training, data.training + data.validation, &c);
    const double precision = calibration_rank(&c, rare_class).precision, loss = calibration_loss(&c, 1);
    const double error = precision == precision ? 1 - precision + 1e-6 * loss : 1 + loss;
    calibration_close(&c);
    if (error < least) least = error, best = decays[i];
  }
  return best;
}
TOOL void linear_read_data(linear_data *d, bool whole) {
  const int64_t last = data.training + (whole && linear_of_cases() ? data.validation : 0);
  d->whole = whole, d->rows = d->seen = 0;
  all_features(0, last, linear_collect, d);
  if (d->rows > 0) linear_standardise(d);
}
TOOL void linear_learn(bool whole) {
  int64_t rows = 0;
  for (int64_t i = 0; i < data.training + data.validation; i++) rows += linear_of_cases() ? 1 : data.list[i].n;
  linear.features = linear_size();
  const int64_t f = linear.features, size = label_count * (f + 1);
  linear.weights = (double *)memset(grow(linear.weights, size, sizeof(double)), 0, (size_t)size * sizeof(double));
  const double work = (double)rows * (double)f * label_count;
  linear_data d = { .every = work > LINEAR_WORK ? (int64_t)ceil(work / LINEAR_WORK) : 1 };
  rows = rows / d.every + 1;
  d.x = (float *)grow(NULL, rows * f, sizeof *d.x), d.labels = (int32_t *)grow(NULL, rows, sizeof *d.labels);
  d.middle = (double *)grow(NULL, 2 * f + size, sizeof(double)), d.spread = d.middle + f;
  double *w = (double *)memset(d.spread + f, 0, (size_t)size * sizeof *w);
  linear_read_data(&d, whole);
  if (d.rows > 0 && !whole) linear.decay = linear_best_decay(&d, w), memset(w, 0, (size_t)size * sizeof *w);
  if (d.rows > 0) linear_minimise(&d, w, linear.decay), linear_unstandardise(&d, w);
  free(d.x), free(d.labels), free(d.middle);
}
TOOL void linear_fit(void) { linear_learn(false); }
TOOL void linear_refit(void) { linear_learn(true); }

/* ---- as text ----------------------------------------------------------------------------------------------------- */

TOOL char *linear_text(int32_t c) {
  char *text = (char *)grow(NULL, 24 * (linear.features + 1) + 1, 1), *at = text;
  for (int64_t i = 0; i <= linear.features; i++) at += sprintf(at, "%s%.9g", i ? " " : "", weights_of(c)[i]);
  return text;
}
TOOL bool linear_read(int32_t c, const char *text) {
  linear.features = linear_size();
  if (!linear.weights)
    linear.weights = (double *)grow(NULL, label_count * (linear.features + 1), sizeof(double));
  for (int64_t i = 0; i <= linear.features; i++) {
    char *end;
    weights_of(c)[i] = strtod(text, &end);
    if (end == text || !isfinite(weights_of(c)[i])) return false;
    text = end;
  }
  return *text == 0;
}
