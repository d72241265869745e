/* Every op and layer of luna.h as a table of cases, each with numbered variants. gradients.c holds their gradients
   against finite differences, ops.c every instruction set against the reference; a new op is one function and one row
   here.

   A case asks for its inputs with in1..in4, calls the op, and hands its results to give(). The trial keeps the values
   of the inputs (random the first time, the caller may change them between runs), the outputs and, after backward, the
   gradients. EXPECT hands a result on after it was compared with an oracle: naive_NAME beside the case, which finds one
   element of the result from the inputs by the equation, in double. */
#ifndef OP_CASES_H
#define OP_CASES_H
#include "examples/luna_ops.h"
#include "common.h"
#include "naive.h"

#define TRIAL_MOST 160
typedef struct trial_array {
  int64_t count;
  float *values, *gradient;
} trial_array;
typedef struct trial {
  luna_options options;
  bool big;    /* sizes for comparing instruction sets, not for finite differences */
  bool oracles; /* results are compared with their oracles */
  bool infers; /* inference in place of a step */
  double off;  /* their largest error; NaN where there is one */
  void (*compared)(void); /* called after a result was compared, or null */
  bool broken; /* something returned null */
  luna_ctx *ctx;
  luna_params *params;
  luna_tensor *loss;
  int inputs, outputs;
  trial_array input[TRIAL_MOST], output[4];
  luna_tensor *tensor[TRIAL_MOST];
  double value; /* of the loss, summed in double */
  char error[400];
} trial;

static luna_ctx *trial_open(trial *t, luna_form form) {
  if (!t->ctx) {
    t->options.form = form;
    t->ctx = luna_open(&t->options);
  }
  return t->ctx;
}
static luna_params *trial_params(trial *t, luna_form form) {
  if (!t->params) t->params = luna_params_open(trial_open(t, form));
  return t->params;
}

/* the next input: its values are made up the first time */
static luna_tensor *trial_keep(trial *t, luna_tensor *made, int64_t count, double scale) {
  const int i = t->inputs++;
  trial_array *a = &t->input[i];
  if (!a->values) {
    a->count = count;
    a->values = common_random(count, 100 + (uint64_t)i, scale);
    a->gradient = common_floats(count);
  }
  t->tensor[i] = made;
  return made;
}
static luna_tensor *trial_input(trial *t, double scale, int rank, int64_t a, int64_t b, int64_t c, int64_t d) {
  const int64_t shape[4] = {a, b, c, d};
  const int64_t count = a * b * c * d;
  const int i = t->inputs;
  if (i == 0) (t->infers ? luna_begin_inference : luna_begin_step)(trial_open(t, LUNA_FORM_CHEAPEST));
  trial_keep(t, NULL, count, scale);
  return t->tensor[i] = luna_require_grad(luna_tensor_new(t->ctx, t->input[i].values, rank, shape));
}
static luna_tensor *in1(trial *t, int64_t a) { return trial_input(t, 1, 1, a, 1, 1, 1); }
static luna_tensor *in2(trial *t, int64_t a, int64_t b) { return trial_input(t, 1, 2, a, b, 1, 1); }
static luna_tensor *in3(trial *t, int64_t a, int64_t b, int64_t c) { return trial_input(t, 1, 3, a, b, c, 1); }
static luna_tensor *in4(trial *t, int64_t a, int64_t b, int64_t c, int64_t d) {
  return trial_input(t, 1, 4, a, b, c, d);
}

/* parameters made so far become inputs too; call after the inputs */
static void in_params(trial *t) {
  for (int64_t i = 0; t->params && i < luna_params_tensor_count(t->params); i++) {
    luna_tensor *p = luna_params_at(t->params, i, NULL);
    const bool matrix = p->rank > 1;
    trial_keep(t, p, luna_count(p), matrix ? sqrt(3.0 / (double)p->shape[p->rank - 1]) : 0.5);
    const trial_array *a = &t->input[t->inputs - 1];
    float *values = common_floats(a->count);
    luna_read(p, values);
    for (int64_t j = 0; j < a->count; j++) values[j] = (float)((matrix ? 0 : 1) * (double)values[j]) + a->values[j];
    luna_write(p, values);
    free(values);
  }
}

/* an output: its weighted sum joins the loss */
static void give(trial *t, luna_tensor *y) {
  trial_array *a = &t->output[t->outputs];
  if (!y) {
    t->broken = true;
    return;
  }
  const int64_t count = luna_count(y);
  if (!a->values) {
    a->count = count;
    a->values = common_floats(count);
  }
  luna_read(y, a->values);
  for (int64_t j = 0; j < count; j++)
    t->value += (double)a->values[j] * (double)(float)common_number(900 + (uint64_t)t->outputs, (uint64_t)j);
  luna_tensor *part = common_loss(y, 900 + (uint64_t)t->outputs);
  t->loss = t->loss ? luna_add(t->loss, part) : part;
  t->outputs++;
}

/* ---- oracles ---- */
/* What an oracle knows: the inputs and the result with their shapes, the inputs' values, and which element is asked
   for: number i, which is at[] on each axis */
typedef struct oracle {
  const trial *t;
  luna_tensor *const *in;
  const luna_tensor *out;
  float *x[LUNA_MAX_INPUTS];
  const void *arg; /* what else the op was given */
  int64_t i, at[LUNA_MAX_RANK];
} oracle;
typedef double oracle_of(const oracle *o);
/* elements after one step on the axis */
static int64_t inner_of(const luna_tensor *t, int axis) {
  int64_t n = 1;
  for (int a = axis + 1; a < LUNA_MAX_RANK; a++) n *= t->shape[a];
  return n;
}
static int64_t last_of(const luna_tensor *t) { return t->shape[t->rank - 1]; }
static void oracle_go(oracle *o, int64_t i) {
  o->i = i;
  for (int a = 0; a < LUNA_MAX_RANK; a++) o->at[a] = i / inner_of(o->out, a) % o->out->shape[a];
}
/* the result's element's place in input k, but for another place on the axis */
static double oracle_beside(const oracle *o, int k, int axis, int64_t place) {
  int64_t at = 0;
  for (int a = 0; a < LUNA_MAX_RANK; a++) at = at * o->in[k]->shape[a] + (a == axis ? place : o->at[a]);
  return (double)o->x[k][at];
}
/* input k, broadcast to the result */
static double oracle_spread(const oracle *o, int k) {
  const luna_tensor *x = o->in[k];
  int64_t at = 0;
  for (int a = 0; a < x->rank; a++)
    at = at * x->shape[a] + (x->shape[a] == 1 ? 0 : o->at[a + o->out->rank - x->rank]);
  return (double)o->x[k][at];
}
/* place j on an axis of input 0 that the result does not have */
static double oracle_along(const oracle *o, int axis, int64_t j) {
  const int64_t inner = inner_of(o->in[0], axis);
  return (double)o->x[0][(o->i / inner * o->in[0]->shape[axis] + j) * inner + o->i % inner];
}
/* the factor of element e of the step's dropout number `op`: 0 or 1 / (1 - p) */
static double oracle_kept(const oracle *o, uint32_t op, int64_t e, float p) {
  if (!(p > 0)) return 1;
  return naive_dropped(o->t->options.seed, op, 1, (uint64_t)e, (double)p) ? 0 : 1 / (1 - (double)p);
}
/* y, compared with its oracle: a hundred elements of it, the last one with them */
#define EXPECT(t, y, naive, arg, ...) \
  expect(t, y, naive, arg, (luna_tensor *const[]){__VA_ARGS__}, \
         (int)(sizeof((luna_tensor *const[]){__VA_ARGS__}) / sizeof(luna_tensor *)))
static luna_tensor *expect(trial *t, luna_tensor *y, oracle_of *naive, const void *arg, luna_tensor *const *in,
                           int inputs) {
  enum { MOST = 120 };
  const int64_t count = luna_count(y), some = count < MOST ? count : MOST;
  oracle o = {t, in, y, {NULL}, arg, 0, {0}};
  double difference = 0, size = 1e-6 * (double)some;
  if (!t->oracles || !y) return y;
  float *values = common_floats(count);
  bool read = luna_read(y, values) == LUNA_OK;
  for (int k = 0; k < inputs; k++) {
    if (in[k]) o.x[k] = common_floats(luna_count(in[k]));
    read = read && (!in[k] || luna_read(in[k], o.x[k]) == LUNA_OK);
  }
  for (int64_t e = 0; e < some; e++) {
    oracle_go(&o, count == some ? e : e == 0 ? count - 1 : (int64_t)(common_hash(5, (uint64_t)e) % (uint64_t)count));
    const double want = naive(&o), got = (double)values[o.i];
    if (got == want) continue; /* also of infinite ones */
    difference += (got - want) * (got - want);
    size += want * want;
  }
  difference = read ? sqrt(difference / size) : NAN;
  if (t->off == t->off && !(difference <= t->off)) t->off = difference; /* NaN stays */
  for (int k = 0; k < inputs; k++) free(o.x[k]);
  free(values);
  if (t->compared) t->compared();
  return y;
}

typedef struct op_case {
  const char *name;
  void (*run)(trial *t, int variant);
  int variants;
} op_case;

/* Runs a case in a context of its own (so that dropout finds the same step each time). False, with t->error, when
   anything failed. */
static bool trial_run(trial *t, const op_case *c, int variant, bool backward) {
  bool fine = true;
  t->ctx = NULL, t->params = NULL, t->loss = NULL;
  t->inputs = t->outputs = 0;
  t->broken = false;
  t->value = t->off = 0;
  c->run(t, variant);
  fine = t->ctx && !t->broken && t->loss;
  if (fine && backward) {
    fine = luna_backward(t->loss) == LUNA_OK;
    for (int i = 0; fine && i < t->inputs; i++) /* what backward did not reach has no gradient: zero */
      if (t->tensor[i]->grad) fine = luna_read_grad(t->tensor[i], t->input[i].gradient) == LUNA_OK;
      else memset(t->input[i].gradient, 0, (size_t)t->input[i].count * sizeof(float));
  }
  snprintf(t->error, sizeof t->error, "%s", t->ctx ? luna_error(t->ctx) : "no context");
  luna_close(t->ctx);
  return fine;
}
static void trial_free(trial *t) {
  for (int i = 0; i < TRIAL_MOST; i++) free(t->input[i].values), free(t->input[i].gradient);
  for (int i = 0; i < 4; i++) free(t->output[i].values);
  memset(t, 0, sizeof *t);
}

#define SIZE(small, large) (t->big ? (large) : (small))

/* ---- shapes ---- */
static double naive_same(const oracle *o) { return (double)o->x[0][o->i]; }
static void op_reshape(trial *t, int v) {
  luna_tensor *x = in3(t, 2, 3, 4);
  const int64_t shapes[3][3] = {{6, 4, 1}, {4, -1, 1}, {3, 2, 4}};
  const int ranks[3] = {2, 2, 3};
  give(t, EXPECT(t, luna_reshape(x, ranks[v], shapes[v]), naive_same, NULL, x));
}
static double naive_slice(const oracle *o) {
  const int64_t *part = (const int64_t *)o->arg;
  return oracle_beside(o, 0, (int)part[0], part[1] + o->at[part[0]]);
}
static void op_slice(trial *t, int v) {
  luna_tensor *x = in3(t, 4, 5, 6);
  const int64_t part[4][3] = {{0, 1, 2}, {1, 2, 3}, {2, 3, 3}, {2, 0, 1}};
  give(t, EXPECT(t, luna_slice(x, (int)part[v][0], part[v][1], part[v][2]), naive_slice, part[v], x));
}
static double naive_views(const oracle *o) { return (double)o->x[0][o->i] * (double)o->x[0][o->i + 6]; }
static void op_views(trial *t, int v) { /* views of views, overlapping; the gradient meets in the owner */
  luna_tensor *x = in3(t, 4, 3, 2);
  const int64_t flat[2] = {6, 2};
  luna_tensor *upper = luna_reshape(luna_slice(x, 0, 0, 2), 2, flat),
      *lower = luna_reshape(luna_slice(x, 0, 1, 2), 2, flat);
  give(t, v == 0 ? EXPECT(t, luna_mul(upper, lower), naive_views, NULL, x) :
       luna_slice(luna_gelu(luna_add(upper, luna_slice(lower, 0, 0, 6))), 0, 2, 3));
}
static double naive_permute(const oracle *o) {
  int64_t at[LUNA_MAX_RANK] = {0}, i = 0;
  for (int a = 0; a < o->out->rank; a++) at[((const int *)o->arg)[a]] = o->at[a];
  for (int a = 0; a < LUNA_MAX_RANK; a++) i = i * o->in[0]->shape[a] + at[a];
  return (double)o->x[0][i];
}
static void op_permute(trial *t, int v) {
  static const int axes[9][4] = {{0, 1, 2, 3}, {0, 2, 1, 3}, {1, 0, 2, 3}, {1, 2, 0, 3}, {2, 0, 1, 3},
                                 {2, 1, 0, 3}, {0, 2, 1, 3}, {3, 1, 0, 2}, {1, 0, 3, 2}};
  luna_tensor *x = v < 6 ? in3(t, SIZE(2, 170), 3, SIZE(4, 19)) : in4(t, 2, 3, SIZE(4, 300), 5);
  give(t, EXPECT(t, luna_permute(x, axes[v]), naive_permute, axes[v], x));
}
static double naive_concat(const oracle *o) {
  const int axis = *(const int *)o->arg;
  int64_t place = o->at[axis];
  int k = 0;
  while (place >= o->in[k]->shape[axis]) place -= o->in[k++]->shape[axis];
  return oracle_beside(o, k, axis, place);
}
static void op_concat(trial *t, int v) {
  luna_tensor *x[3];
  const int64_t sizes[3] = {2, 1, 3};
  for (int i = 0; i < 3; i++) x[i] = in3(t, v == 0 ? sizes[i] : 2, v == 1 ? sizes[i] : 3, v == 2 ? sizes[i] : 4);
  const int axis = v == 3 ? 0 : v, last = 2;
  give(t, EXPECT(t, luna_concat(x, v == 3 ? 1 : 3, axis), naive_concat, &axis, x[0], x[1], x[2]));
  if (v == 3) give(t, EXPECT(t, luna_concat(x + 1, 2, 2), naive_concat, &last, x[1], x[2]));
}
static double naive_expand(const oracle *o) { return (double)o->x[0][o->i % luna_count(o->in[0])]; }
static void op_repeat(trial *t, int v) {
  luna_tensor *x = v ? in3(t, 2, 3, 4) : in1(t, 5);
  give(t, EXPECT(t, luna_expand(x, 3), naive_expand, NULL, x));
}

/* ---- arithmetic ---- */
/* pairs of shapes that broadcast, and one tensor twice */
#define OP_PAIRS 9
static void op_pair(trial *t, int v, luna_tensor **x, luna_tensor **y) {
  const int64_t a = SIZE(2, 7), b = SIZE(3, 33), c = SIZE(4, 37);
  *x = v == 7 ? in1(t, b) : v == 6 ? in3(t, a, 1, c) : v == 8 ? in4(t, a, 1, b, 1) : in3(t, a, b, c);
  *y = v == 0 ? in3(t, a, b, c) : v == 1 ? in1(t, c) : v == 2 ? in2(t, b, c) : v == 4 ? in3(t, a, b, 1) : v == 5 ?
      in3(t, 1, b, 1) :
       v == 6 ? in2(t, b, 1) : v == 7 ? in3(t, a, c, b) : v == 8 ? in3(t, a, 1, c) : *x;
}
typedef luna_tensor *op_binary_op(luna_tensor *a, luna_tensor *b);
static op_binary_op *const op_binaries[] = {
#define OP_BINARY(NAME, tier, reads, cheap, name, inputs, value, da, db, dc) luna_##name,
  LUNA_BINARIES(OP_BINARY)
#undef OP_BINARY
  luna_greater, luna_greater_equal
};
#define OP_BINARIES ((int)(sizeof op_binaries / sizeof op_binaries[0]))
static double naive_binary(const oracle *o) {
  const int op = *(const int *)o->arg, kind = LUNA_OP_ADD + op;
  const double a = oracle_spread(o, 0), b = oracle_spread(o, 1);
  if (op < OP_BINARIES - 2) return naive_each(kind, a, b, 0);
  return naive_each(op == OP_BINARIES - 2 ? LUNA_OP_LESS : LUNA_OP_LESS_EQUAL, b, a, 0);
}
static void op_binary(trial *t, int v) {
  const int op = v / OP_PAIRS;
  luna_tensor *x, *y, *z;
  op_pair(t, v % OP_PAIRS, &x, &y);
  if (op_binaries[op] == luna_div) y = luna_add_scalar(luna_mul(y, y), 1);
  if (op_binaries[op] == luna_equal || op_binaries[op] == luna_not_equal) /* then some are equal */
    x = luna_clamp(x, (float)-0.3, (float)0.3), y = luna_clamp(y, (float)-0.3, (float)0.3);
  z = EXPECT(t, op_binaries[op](x, y), naive_binary, &op, x, y);
  give(t, z && z->needs_grad ? z : luna_mul(luna_add(x, y), z)); /* comparisons */
}
static double naive_where(const oracle *o) {
  return naive_each(LUNA_OP_WHERE, oracle_spread(o, 0), oracle_spread(o, 1), oracle_spread(o, 2));
}
static void op_where(trial *t, int v) {
  const int64_t a = SIZE(2, 7), b = SIZE(3, 33), c = SIZE(4, 37);
  luna_tensor *x = in3(t, a, v == 1 ? 1 : b, c), *y = v == 2 ? in1(t, 1) : in2(t, b, v == 3 ? 1 : c);
  luna_tensor *condition = v == 3 ? luna_less(luna_slice(x, 2, 0, 1), luna_slice(y, 1, 0, 1)) : luna_less(x, y);
  if (v == 4) y = luna_add_scalar(x, 2);
  give(t, EXPECT(t, luna_where(condition, x, y), naive_where, NULL, condition, x, y));
}
static double naive_clamp(const oracle *o) {
  const float *ends = (const float *)o->arg;
  return naive_each(LUNA_OP_CLAMP, (double)o->x[0][o->i], (double)ends[0], (double)ends[1]);
}
static void op_clamp(trial *t, int v) {
  const float ends[2] = {v ? -(float)INFINITY : (float)-0.3, (float)0.4};
  luna_tensor *x = in2(t, 3, SIZE(5, 101));
  give(t, EXPECT(t, luna_clamp(x, ends[0], ends[1]), naive_clamp, ends, x));
}
static double naive_add_scalar(const oracle *o) { return (double)o->x[0][o->i] + (double)*(const float *)o->arg; }
static void op_add_scalar(trial *t, int v) {
  const float number = (float)v - (float)0.5;
  luna_tensor *x = luna_scale(in2(t, 3, SIZE(5, 101)), 2);
  give(t, luna_gelu(EXPECT(t, luna_add_scalar(x, number), naive_add_scalar, &number, x)));
}
/* One result of an op as two inputs of another: its gradient has two parts; its data, computed again, two readers */
static void op_one_tensor_twice(trial *t, int v) {
  const int64_t n = SIZE(4, 33);
  luna_tensor *x = in2(t, n, n), *part[2], *y;
  give(t, luna_mul(x, x));           /* keeps x for backward, where all that follows is computed again from it */
  const luna_scope scope = luna_scope_begin(t->ctx);
  part[0] = part[1] = luna_scale(x, (float)0.7);
  if (v == 1) part[1] = luna_reshape(luna_slice(part[0], 0, 1, 1), 1, &n);
  if (v < 2) y = luna_add(part[0], part[1]);
  else if (v == 2) y = luna_mul(part[0], part[1]);
  else if (v == 3) y = luna_matmul(part[0], part[1], false, true);
  else if (v == 4) y = luna_concat(part, 2, 0);
  else y = luna_linear(part[0], part[1], NULL);
  y = luna_gelu(y);
  give(t, luna_scope_end(scope, &y, 1));
}
static double naive_scale(const oracle *o) { return (double)*(const float *)o->arg * (double)o->x[0][o->i]; }
static void op_scale(trial *t, int v) {
  const float factor = v ? 0 : (float)-1.7;
  luna_tensor *x = in2(t, 3, SIZE(5, 101));
  give(t, EXPECT(t, luna_scale(x, factor), naive_scale, &factor, x));
}
static double naive_sum(const oracle *o) {
  const int axis = *(const int *)o->arg;
  double sum = 0;
  for (int64_t j = 0; j < o->in[0]->shape[axis]; j++) sum += oracle_along(o, axis, j);
  return sum;
}
static void op_sum(trial *t, int v) {
  const int axis = v < 3 ? v : 1;
  luna_tensor *x = v < 3 ? in3(t, SIZE(2, 9), SIZE(3, 130), SIZE(4, 67)) : in2(t, 1, 7);
  give(t, EXPECT(t, luna_sum(x, axis), naive_sum, &axis, x));
}
static double naive_mean(const oracle *o) { return naive_sum(o) / (double)o->in[0]->shape[*(const int *)o->arg]; }
static void op_mean(trial *t, int v) {
  const int axis = v < 3 ? v : 1;
  luna_tensor *x = v < 3 ? in3(t, SIZE(2, 9), SIZE(3, 130), SIZE(4, 67)) : in2(t, 1, 7);
  give(t, EXPECT(t, luna_mean(x, axis), naive_mean, &axis, x));
}
static double naive_min(const oracle *o) {
  const int axis = *(const int *)o->arg;
  double min = INFINITY;
  for (int64_t j = 0; j < o->in[0]->shape[axis]; j++) min = fmin(min, oracle_along(o, axis, j));
  return min;
}
static void op_min(trial *t, int v) {
  luna_tensor *x = in3(t, 3, SIZE(4, 33), 5);
  give(t, EXPECT(t, luna_min(x, v), naive_min, &v, x));
}
static double naive_var(const oracle *o) {
  const int axis = *(const int *)o->arg;
  const double mean = naive_mean(o), n = (double)o->in[0]->shape[axis];
  double sum = 0;
  for (int64_t j = 0; j < o->in[0]->shape[axis]; j++) sum += pow(oracle_along(o, axis, j) - mean, 2);
  return sum / n;
}
static void op_var(trial *t, int v) {
  luna_tensor *x = in3(t, SIZE(2, 9), SIZE(3, 130), SIZE(4, 67));
  give(t, EXPECT(t, luna_var(x, v), naive_var, &v, x));
}
static double naive_stack(const oracle *o) {
  const int axis = *(const int *)o->arg;
  const int64_t inner = inner_of(o->out, axis);
  return (double)o->x[o->at[axis]][o->i / (inner * o->out->shape[axis]) * inner + o->i % inner];
}
static void op_stack(trial *t, int v) {
  luna_tensor *const x[3] = {in2(t, 3, SIZE(4, 67)), in2(t, 3, SIZE(4, 67)), in2(t, 3, SIZE(4, 67))};
  give(t, EXPECT(t, luna_stack(x, 3, v), naive_stack, &v, x[0], x[1], x[2]));
}
static double naive_pad(const oracle *o) { /* as many before as the axis's number */
  const int axis = *(const int *)o->arg;
  const int64_t place = o->at[axis] - axis;
  return place >= 0 && place < o->in[0]->shape[axis] ? oracle_beside(o, 0, axis, place) : 0.5;
}
static void op_pad(trial *t, int v) {
  luna_tensor *x = in3(t, 2, 3, SIZE(4, 67));
  give(t, luna_gelu(EXPECT(t, luna_pad(x, v, v, 2, (float)0.5), naive_pad, &v, x)));
}
static double naive_log_softmax(const oracle *o) {
  const int64_t n = last_of(o->in[0]);
  const float *row = o->x[0] + o->i / n * n;
  double sum = 0;
  for (int64_t j = 0; j < n; j++) sum += exp((double)row[j]);
  return (double)o->x[0][o->i] - log(sum);
}
static double naive_soft_cross_entropy(const oracle *o) {
  const int64_t count = luna_count(o->in[0]);
  oracle one = *o;
  double sum = 0;
  for (one.i = 0; one.i < count; one.i++) sum -= (double)o->x[1][one.i] * naive_log_softmax(&one);
  return sum / (double)(count / last_of(o->in[0]));
}
static void op_soft_cross_entropy(trial *t, int v) {
  luna_tensor *x = in3(t, 2, 3, SIZE(5, 67)), *teacher; /* which learns too, or is even */
  if (v) teacher = x ? luna_tensor_full(x->ctx, 1 / (float)SIZE(5, 67), 3, x->shape) : NULL;
  else teacher = luna_softmax(in3(t, 2, 3, SIZE(5, 67)), NULL);
  give(t, EXPECT(t, luna_soft_cross_entropy(x, teacher), naive_soft_cross_entropy, NULL, x, teacher));
}
static double naive_sum_all(const oracle *o) {
  double sum = 0;
  for (int64_t j = 0; j < luna_count(o->in[0]); j++) sum += (double)o->x[0][j];
  return sum;
}
static double naive_mean_all(const oracle *o) { return naive_sum_all(o) / (double)luna_count(o->in[0]); }
static double naive_neg(const oracle *o) { return -(double)o->x[0][o->i]; }
#define UNARY_CASE(name) \
  static void op_##name(trial *t, int v) { \
    luna_tensor *x = v == 0 ? in3(t, SIZE(2, 9), 3, SIZE(4, 67)) : in2(t, SIZE(3, 70), v == 1 ? SIZE(7, 1031) : 1); \
    give(t, EXPECT(t, luna_##name(x), naive_##name, NULL, x)); \
  }
COMMON_UNARY(UNARY_CASE)
#undef UNARY_CASE
static double naive_cumsum(const oracle *o) {
  const int axis = *(const int *)o->arg;
  double sum = 0;
  for (int64_t j = 0; j <= o->at[axis]; j++) sum += oracle_beside(o, 0, axis, j);
  return sum;
}
static void op_cumsum(trial *t, int v) {
  const int axis = v % 3;
  luna_tensor *x = v < 3 ? in3(t, SIZE(2, 9), SIZE(3, 530), SIZE(4, 67)) : in1(t, SIZE(7, 1200));
  give(t, EXPECT(t, luna_cumsum(x, axis), naive_cumsum, &axis, x));
}
static void op_transpose(trial *t, int v) {
  static const int axes[3][3] = {{2, 1, 0}, {0, 2, 1}, {2, 1, 0}};
  luna_tensor *x = in3(t, SIZE(2, 17), 3, SIZE(4, 19));
  give(t, EXPECT(t, luna_transpose(x, v, v < 2 ? 2 : 0), naive_permute, axes[v], x));
}
static double naive_matmul(const oracle *o) {
  const bool *transposed = (const bool *)o->arg;
  const int64_t n = last_of(o->out), m = o->out->shape[o->out->rank - 2], batch = o->i / (m * n);
  const int64_t k = o->in[0]->shape[o->in[0]->rank - (transposed[0] ? 2 : 1)], i = o->i / n % m, j = o->i % n;
  const float *a = o->x[0] + batch * m * k, *b = o->x[1] + batch % (luna_count(o->in[1]) / (k * n)) * k * n;
  double sum = 0;
  for (int64_t p = 0; p < k; p++)
    sum += (double)a[transposed[0] ? p * m + i : i * k + p] * (double)b[transposed[1] ? j * k + p : p * n + j];
  return sum;
}
/* four transpositions, times the batch shapes; 16..: long sums and single rows */
static void op_matmul(trial *t, int v) {
  const bool ta = (v & 1) != 0, tb = (v & 2) != 0;
  const int form = v / 4;
  const int64_t m = form == 4 ? 1 : SIZE(2, 37), k = form == 4 ? SIZE(5, 531) : SIZE(3, 43),
      n = form == 4 ? SIZE(1, 3) : SIZE(4, 35);
  const int64_t a0 = ta ? k : m, a1 = ta ? m : k, b0 = tb ? n : k, b1 = tb ? k : n;
  luna_tensor *a = form == 0 || form == 4 ? in2(t, a0, a1) : in4(t, 2, 3, a0, a1);
  luna_tensor *b = form == 2 ? in3(t, 3, b0, b1) : form == 3 ? in4(t, 2, 3, b0, b1) : in2(t, b0, b1);
  give(t, EXPECT(t, luna_matmul(a, b, ta, tb), naive_matmul, ((const bool[2]){ta, tb}), a, b));
}
/* row `row` of x times row `out` of the weight, plus the bias: of inputs x, weight, bias from k on */
static double oracle_linear(const oracle *o, int k, int64_t row, int64_t out) {
  const int64_t n = last_of(o->in[0]);
  return naive_dot(o->x[0] + row * n, o->x[k] + out * n, n) + (o->x[k + 1] ? (double)o->x[k + 1][out] : 0);
}
static double naive_linear(const oracle *o) {
  const int64_t n = last_of(o->out);
  return oracle_linear(o, 1, o->i / n, o->i % n);
}
static void op_linear(trial *t, int v) {
  const int64_t in = SIZE(3, 67), out = SIZE(4, 45);
  luna_tensor *x = v < 2 ? in2(t, SIZE(5, 131), in) : v < 4 ? in3(t, 2, SIZE(3, 19), in) : in1(t, in);
  luna_tensor *weight = in2(t, out, in), *bias = v % 2 ? in1(t, out) : NULL;
  give(t, EXPECT(t, luna_linear(x, weight, bias), naive_linear, NULL, x, weight, bias));
}

/* ---- maps and rows ---- */
static double naive_activate(const oracle *o) {
  return naive_activation(*(const luna_activation *)o->arg, (double)o->x[0][o->i]);
}
static void op_activate(trial *t, int v) { /* by number, then by name */
  typedef luna_tensor *op_map(luna_tensor *x);
  static op_map *const maps[] = {
#define OP_MAP(NAME, name, value, slope) luna_##name,
    LUNA_MAPS(OP_MAP)
#undef OP_MAP
  };
#define OP_MAP(NAME, name, value, slope) LUNA_ACTIVATION_##NAME,
  static const luna_activation kinds[] = { LUNA_MAPS(OP_MAP) };
#undef OP_MAP
  const bool by_name = v >= LUNA_ACTIVATION_COUNT;
  const luna_activation kind = by_name ? kinds[v - LUNA_ACTIVATION_COUNT] : (luna_activation)v;
  luna_tensor *x = trial_input(t, 4, 2, 3, SIZE(8, 133), 1, 1);
  if (kind == LUNA_ACTIVATION_LOG || kind == LUNA_ACTIVATION_SQRT || kind == LUNA_ACTIVATION_RSQRT)
    x = luna_add_scalar(luna_mul(x, x), 1);
  luna_tensor *y = by_name ? maps[v - LUNA_ACTIVATION_COUNT](x) : luna_activate(x, kind);
  give(t, EXPECT(t, y, naive_activate, &kind, x));
}
static double naive_masked_softmax(const oracle *o) {
  const int32_t *lengths = (const int32_t *)o->arg;
  const int64_t n = last_of(o->out), length = lengths ? lengths[o->at[0]] : n, real = length < n ? length : n;
  double sum = 0;
  for (int64_t j = 0; j < real; j++) sum += exp((double)o->x[0][o->i / n * n + j]);
  return o->i % n < real ? exp((double)o->x[0][o->i]) / sum : 0;
}
static void op_softmax(trial *t, int v) {
  const int32_t lengths[3] = {2, 5, 1}, some[3] = {1, 0, 3};
  luna_tensor *x = v < 2 ? in2(t, 3, SIZE(5, 133)) : trial_input(t, 3, 3, 3, 2, SIZE(5, 67), 1);
  const int32_t *real = v == 0 || v == 2 ? NULL : v == 4 ? some : lengths;
  give(t, EXPECT(t, luna_softmax(x, real), naive_masked_softmax, real, x));
}
static double naive_dropout(const oracle *o) {
  return (double)o->x[0][o->i] * oracle_kept(o, 0, o->i, *(const float *)o->arg);
}
static void op_dropout(trial *t, int v) {
  const float p = (float)(v ? 0.75 : 0.3);
  luna_tensor *x = in2(t, 3, SIZE(7, 131));
  give(t, luna_gelu(EXPECT(t, luna_dropout(x, p), naive_dropout, &p, x)));
}
/* of inputs x, weight, bias; arg: whether it is of the root mean square, and epsilon */
typedef struct norm_arg { bool rms; double epsilon; } norm_arg;
static double naive_norm(const oracle *o) {
  const norm_arg *arg = (const norm_arg *)o->arg;
  const int64_t n = last_of(o->out), i = o->i % n;
  const float *x = o->x[0] + o->i / n * n;
  double mean = 0, square = 0;
  for (int64_t j = 0; j < n && !arg->rms; j++) mean += (double)x[j] / (double)n;
  for (int64_t j = 0; j < n; j++) square += ((double)x[j] - mean) * ((double)x[j] - mean) / (double)n;
  const double y = ((double)x[i] - mean) / sqrt(square + (arg->epsilon > 0 ? arg->epsilon : 1e-5));
  return y * (o->x[1] ? (double)o->x[1][i] : 1) + (o->x[2] ? (double)o->x[2][i] : 0);
}
static void op_layer_norm(trial *t, int v) {
  luna_tensor *x = v < 4 ? in3(t, 2, SIZE(3, 17), SIZE(5, 67)) : in2(t, SIZE(2, 5), v == 4 ? 1 : SIZE(6, 1031));
  const int64_t d = x ? x->shape[x->rank - 1] : 1;
  luna_tensor *weight = v == 0 || v == 1 || v >= 4 ? in1(t, d) : NULL,
      *bias = v == 0 || v == 2 || v >= 4 ? in1(t, d) : NULL;
  const norm_arg arg = {false, v == 1 ? 0.3 : 0};
  give(t, EXPECT(t, luna_layer_norm(x, weight, bias, (float)arg.epsilon), naive_norm, &arg, x, weight, bias));
}
static void op_rms_norm(trial *t, int v) {
  const int64_t d = v == 2 ? SIZE(6, 1031) : SIZE(5, 67);
  const norm_arg arg = {true, 0};
  luna_tensor *x = in3(t, 2, SIZE(3, 17), d), *weight = v ? in1(t, d) : NULL;
  if (v == 1) x = luna_scale(x, 2);
  give(t, EXPECT(t, luna_rms_norm(x, weight, 0), naive_norm, &arg, x, weight, NULL));
}
/* of inputs x, w1, b1, w2, b2, residual, gate, gate_bias */
static double naive_feed_forward(const oracle *o) {
  const luna_feed_forward_config *c = (const luna_feed_forward_config *)o->arg;
  const int64_t n = last_of(o->out), f = o->in[1]->shape[0], row = o->i / n, out = o->i % n;
  const int kind = c->activation ? (int)c->activation : LUNA_ACTIVATION_RELU;
  double sum = o->x[4] ? (double)o->x[4][out] : 0;
  for (int64_t j = 0; j < f; j++)
    sum += naive_activation(kind, oracle_linear(o, 1, row, j)) * (o->x[6] ? oracle_linear(o, 6, row, j) : 1) *
           oracle_kept(o, 0, row * f + j, c->activation_dropout) * (double)o->x[3][out * f + j];
  return sum * oracle_kept(o, 1, o->i, c->dropout) + (o->x[5] ? (double)o->x[5][o->i] : 0);
}
#define EXPECT_FEED_FORWARD(t, c, x, w1, b1, w2, b2) \
  EXPECT(t, luna_feed_forward(x, w1, b1, w2, b2, &c), naive_feed_forward, &c, x, w1, b1, w2, b2, c.residual, c.gate, \
         c.gate_bias)
static void op_gated(trial *t, int v) { /* GLU, SwiGLU; with dropout, a residual, recomputed */
  const int64_t in = SIZE(3, 33), hidden = SIZE(4, 45);
  luna_feed_forward_config c = {0};
  luna_tensor *x = in3(t, 2, SIZE(3, 17), in), *w1 = in2(t, hidden, in), *b1 = v ? in1(t, hidden) : NULL,
      *w2 = in2(t, in, hidden);
  c.gate = in2(t, hidden, in);
  c.gate_bias = v ? in1(t, hidden) : NULL;
  c.activation = v == 0 ? LUNA_ACTIVATION_SIGMOID : LUNA_ACTIVATION_SILU;
  c.activation_dropout = c.dropout = v >= 2 ? (float)0.3 : 0;
  c.residual = v >= 2 ? x : NULL;
  c.recompute = v == 3;
  luna_tensor *b2 = v ? in1(t, in) : NULL;
  give(t, EXPECT_FEED_FORWARD(t, c, x, w1, b1, w2, b2));
}
static double naive_rows(const oracle *o) { /* row i is row index[i] */
  const int64_t n = luna_count(o->in[0]) / o->in[0]->shape[0];
  return (double)o->x[0][((const int32_t *)o->arg)[o->i / n] * n + o->i % n];
}
static void op_embedding(trial *t, int v) {
  const int32_t tokens[6] = {4, 0, 4, 2, 4, 1};
  luna_tensor *x = in2(t, 5, SIZE(3, 67));
  give(t, EXPECT(t, luna_embedding(x, tokens, v ? 1 : 2, v ? 6 : 3), naive_rows, tokens, x));
}
static void op_gather_rows(trial *t, int v) {
  const int32_t indices[6] = {4, 0, 4, 2, 4, 1};
  luna_tensor *x = v == 0 ? in3(t, 5, SIZE(3, 11), 2) : v == 1 ? in1(t, 5) : in2(t, 5, SIZE(3, 67));
  if (v) x = luna_scale(x, 2);
  give(t, luna_gelu(EXPECT(t, luna_gather_rows(x, indices, 6), naive_rows, indices, x)));
}
static double naive_scatter(const oracle *o) {
  const int64_t n = luna_count(o->in[0]) / o->in[0]->shape[0];
  double sum = (double)o->x[0][o->i];
  for (int64_t r = 0; r < o->in[1]->shape[0]; r++)
    if (((const int32_t *)o->arg)[r] == o->i / n) sum += (double)o->x[1][r * n + o->i % n];
  return sum;
}
static void op_scatter_add_rows(trial *t, int v) {
  static const int32_t indices[6] = {4, 0, 4, 2, 4, 1};
  const int64_t d = SIZE(3, 67);
  luna_tensor *x = v == 0 ? in3(t, 5, d, 2) : v == 1 ? in1(t, 5) : in2(t, 5, d);
  luna_tensor *rows = v == 0 ? in3(t, 6, d, 2) : v == 1 ? in1(t, 6) : in2(t, 6, d);
  if (v == 2) x = luna_scale(x, 2), rows = luna_scale(rows, 2);
  give(t, EXPECT(t, luna_scatter_add_rows(x, indices, rows), naive_scatter, indices, x, rows));
}
/* of logits, or of x, weight and bias that make them */
typedef struct loss_arg { const int32_t *labels; luna_cross_entropy_config c; const float *weights; } loss_arg;
static double naive_cross_entropy(const oracle *o) {
  const loss_arg *arg = (const loss_arg *)o->arg;
  const bool linear = o->in[1] != NULL;
  const int64_t classes = linear ? o->in[1]->shape[0] : last_of(o->in[0]);
  const int64_t rows = luna_count(o->in[0]) / last_of(o->in[0]);
  double sum = 0, counted = 0, *logit = (double *)common_alloc((size_t)classes * sizeof(double));
  for (int64_t r = 0; r < rows; r++) {
    const int32_t label = arg->labels[r];
    double all = 0, mean = 0;
    if (label < 0 || (arg->c.ignore && label == arg->c.ignore_index)) continue;
    for (int64_t j = 0; j < classes; j++) {
      logit[j] = linear ? oracle_linear(o, 1, r, j) : (double)o->x[0][r * classes + j];
      all += exp(logit[j]), mean += logit[j] / (double)classes;
    }
    const double loss = log(all) - (1 - (double)arg->c.smoothing) * logit[label] - (double)arg->c.smoothing * mean;
    sum += loss * (arg->weights ? (double)arg->weights[label] : 1);
    counted++;
  }
  free(logit);
  return arg->c.sum || counted == 0 ? sum : sum / counted;
}
static void op_cross_entropy(trial *t, int v) {
  const int32_t labels[6] = {4, 0, -1, 2, 4, 1};
  luna_tensor *x = v % 2 ? trial_input(t, 3, 3, 2, 3, SIZE(5, 133), 1) : in2(t, 6, SIZE(5, 133));
  luna_cross_entropy_config config = {0};
  config.smoothing = v == 2 || v == 5 ? (float)0.1 : 0;
  config.ignore = v >= 3;
  config.ignore_index = 4;
  config.sum = v == 4 || v == 5;
  const loss_arg arg = {labels, config, NULL};
  give(t, EXPECT(t, luna_cross_entropy(x, labels, v < 2 ? NULL : &config), naive_cross_entropy, &arg, x, NULL));
}
static void op_weighted_cross_entropy(trial *t, int v) {
  const int32_t labels[6] = {4, 0, -1, 2, 4, 1};
  luna_tensor *x = v % 2 ? trial_input(t, 3, 3, 2, 3, SIZE(5, 133), 1) : in2(t, 6, SIZE(5, 133));
  luna_cross_entropy_config config = {0};
  static float weights[133] = {(float)0.5, 2, (float)0.25, 0, 3};
  for (int i = 5; i < 133; i++) weights[i] = (float)(i % 7) / 2;
  config.smoothing = v >= 2 ? (float)0.1 : 0;
  config.ignore = v == 1 || v == 2;
  config.ignore_index = 2;
  config.sum = v == 2;
  const loss_arg arg = {labels, config, v == 4 ? NULL : weights};
  give(t, EXPECT(t, luna_weighted_cross_entropy(x, labels, arg.weights, v == 0 ? NULL : &config), naive_cross_entropy,
                 &arg, x, NULL));
}
/* fused above 1024 classes, by panels of so many */
static void op_linear_cross_entropy(trial *t, int v) {
  const int32_t labels[6] = {4, 0, -1, 2, 1026, 1}, none[6] = {-1, -1, -2, 4, -1, -1};
  const int64_t in = SIZE(3, 67), classes = v == 0 ? 1027 : SIZE(1027, 2500);
  luna_tensor *x = v % 2 ? in3(t, 2, 3, in) : in2(t, 6, in), *weight = in2(t, v == 1 ? 1024 : classes, in);
  luna_cross_entropy_config config = {0};
  config.smoothing = v == 2 || v == 5 ? (float)0.1 : 0;
  config.ignore = v >= 3;
  config.ignore_index = 4;
  config.sum = v >= 4;
  if (v == 6) x = luna_scale(x, 2); /* whose gradient is set */
  luna_tensor *bias = v > 1 ? in1(t, classes) : NULL;
  const loss_arg arg = {v == 1 || v == 5 ? none : labels, config, NULL};
  give(t, EXPECT(t, luna_linear_cross_entropy(x, weight, bias, arg.labels, v < 2 ? NULL : &config),
                 naive_cross_entropy, &arg, x, weight, bias));
}
/* logits whose gradient the linear op makes by panels, and (from 3 on) logits that something else reads, before the
   loss or after */
static void op_logits(trial *t, int v) {
  static const int32_t labels[12] = {4, 0, -1, 2, 513, 1, 3, -1, 5, 6, 7, 8};
  const int64_t in = SIZE(3, 67), classes = SIZE(1028, 2500), flat[2] = {6, classes}, halves[2] = {12, classes / 2};
  luna_tensor *x[3] = {in3(t, 2, 3, in), in2(t, classes, in), in1(t, classes)}, *y, *z = NULL;
  if (v == 1) x[0] = luna_scale(x[0], 2);
  if (v == 2) {
    const luna_scope scope = luna_scope_recompute(t->ctx);
    y = luna_cross_entropy(luna_linear(x[0], x[1], x[2]), labels, NULL);
    give(t, luna_scope_end(scope, &y, 1));
    return;
  }
  y = luna_linear(x[0], x[1], x[2]);
  if (v == 1 || v == 4) y = luna_reshape(y, 2, flat);
  if (v == 3) z = luna_scale(y, (float)0.5);
  if (v == 4) z = luna_sum(luna_slice(y, 0, 1, 3), 1);
  /* 7: not the columns that the linear op makes */
  give(t, luna_cross_entropy(v == 7 ? luna_reshape(y, 2, halves) : y, labels, NULL));
  if (v == 5) z = luna_mean(y, 2);
  if (v == 6) z = luna_cross_entropy(y, labels + 1, NULL);
  if (z) give(t, z);
}

/* ---- attention ---- */
/* Of inputs q, k, values and a luna_attention_config with heads and scale set: the weights of query `row`, head h, kept
   by the dropout, of the keys that it sees, and their rows */
typedef struct weights_of { double *weight, log_sum_exp, sum; int64_t *key, count; } weights_of;
static weights_of oracle_weights(const oracle *o, int64_t row, int64_t h) {
  const luna_attention_config *c = (const luna_attention_config *)o->arg;
  const luna_tensor *q = o->in[0], *k = o->in[1];
  const int32_t *ragged = c->query_offsets;
  const int64_t width = last_of(q) / c->heads, queries = ragged ? naive_longest(ragged, c->sequences) : q->shape[1];
  const int64_t batch = o->out->shape[0];
  weights_of w = {NULL, 0, 0, NULL, 0};
  int64_t b = 0;
  while (ragged ? ragged[b + 1] <= row : (b + 1) * queries <= row) b++;
  const int64_t i = row - (ragged ? ragged[b] : b * queries);
  const int64_t first = ragged ? c->key_offsets[b] : k->shape[0] == batch ? b * k->shape[1] : 0;
  const int64_t keys = ragged ? c->key_offsets[b + 1] - first : k->shape[1], real = c->lengths ? c->lengths[b] : keys;
  const int64_t numbers = ragged ? naive_longest(c->key_offsets, c->sequences) : keys;
  const naive_window window = {c->left, c->right};
  w.weight = (double *)common_alloc((size_t)(keys + 1) * 2 * sizeof(double));
  w.key = (int64_t *)(void *)(w.weight + keys + 1);
  const float *at = o->x[0] + ((q->shape[0] == batch ? row : i) * c->heads + h) * width;
  for (int64_t j = 0; j < real; j++) {
    if (!naive_sees(c->window ? &window : NULL, c->causal, i, j)) continue;
    w.key[w.count] = first + j;
    w.weight[w.count++] = (double)c->scale * naive_dot(at, o->x[1] + ((first + j) * c->heads + h) * width, width);
  }
  w.log_sum_exp = w.count ? naive_softmax(w.weight, w.count) : -INFINITY;
  for (int64_t j = 0; j < w.count; j++)
    w.sum += w.weight[j] *= oracle_kept(o, 0, ((b * c->heads + h) * queries + i) * numbers + w.key[j] - first,
                                        c->dropout);
  return w;
}
static double naive_attention_out(const oracle *o) {
  const luna_attention_config *c = (const luna_attention_config *)o->arg;
  const int64_t n = last_of(o->out), width = n / c->heads, h = o->i % n / width;
  const weights_of w = oracle_weights(o, o->i / n, h);
  double sum = 0;
  for (int64_t j = 0; j < w.count; j++) sum += w.weight[j] * (double)o->x[2][w.key[j] * n + o->i % n];
  free(w.weight);
  return sum;
}
static double naive_attention_line(const oracle *o, bool sums) { /* of the results [batch, queries, heads] */
  const int64_t heads = ((const luna_attention_config *)o->arg)->heads;
  const weights_of w = oracle_weights(o, o->i / heads, o->i % heads);
  free(w.weight);
  return sums ? w.sum : w.log_sum_exp;
}
static double naive_attention_sums(const oracle *o) { return naive_attention_line(o, true); }
static double naive_attention_scores(const oracle *o) { return naive_attention_line(o, false); }
/* The result of the call, its row sums and its log-sum-exp, where they are asked for */
static void give_attention(trial *t, luna_tensor *q, luna_tensor *k, luna_tensor *v, luna_attention_config c) {
  luna_tensor *y = luna_softmax_attention(q, k, v, &c);
  if (c.heads == 0) c.heads = 1;
  if (c.scale == 0) c.scale = (float)(1 / sqrt(q ? (double)(last_of(q) / c.heads) : 1));
  give(t, EXPECT(t, y, naive_attention_out, &c, q, k, v));
  if (c.sums) give(t, EXPECT(t, *c.sums, naive_attention_sums, &c, q, k, v));
  if (c.log_sum_exp) give(t, EXPECT(t, *c.log_sum_exp, naive_attention_scores, &c, q, k, v));
}
static void op_attention(trial *t, int v) {
  static const int32_t lengths[2] = {3, 5}, empty[2] = {0, 4};
  luna_attention_config c = {0};
  luna_tensor *sums = NULL;
  const bool blocks = v == 8 || v == 14; /* more keys, and queries, than a block */
  const int64_t n = v == 14 ? SIZE(520, 1030) : SIZE(4, 71), m = blocks ? SIZE(515, 1100) : v == 4 ? n : SIZE(6, 83);
  const int64_t dk = SIZE(2, 24), dv = v == 6 ? SIZE(3, 17) : dk;
  c.heads = v == 0 ? 0 : 2;
  c.lengths = v == 2 || v == 5 || v == 7 ? lengths : v == 9 ? empty : NULL;
  c.causal = v == 3 || v == 4 || v == 7 || v == 14;
  c.dropout = v == 5 || v == 7 || v == 10 || v == 14 ? (float)0.3 : 0;
  c.scale = v == 6 ? (float)0.9 : 0;
  c.sums = v == 5 || v == 9 || v == 10 ? &sums : NULL;
  /* 1: shared by the batch */
  luna_tensor *q = in3(t, v == 12 ? 1 : 2, n, 2 * dk), *k = in3(t, v == 13 ? 1 : 2, m, 2 * dk);
  luna_tensor *values = v == 11 ? k : in3(t, v == 13 ? 1 : 2, m, 2 * dv);
  give_attention(t, q, k, values, c);
}
static void op_attention_ragged(trial *t, int v) {
  static const int32_t queries[4] = {0, 3, 4, 9}, keys[4] = {0, 2, 2, 8}, same[4] = {0, 3, 3, 9};
  luna_attention_config c = {0};
  luna_tensor *sums = NULL;
  const bool self = v >= 2;
  const int64_t d = SIZE(2, 19);
  c.heads = 2;
  c.sequences = 3;
  c.query_offsets = self ? same : queries;
  c.key_offsets = self ? same : keys;
  c.causal = v == 2;
  c.dropout = v == 1 || v == 3 ? (float)0.3 : 0;
  c.sums = v == 1 ? &sums : NULL;
  luna_tensor *q = in2(t, 9, 2 * d), *k = in2(t, self ? 9 : 8, 2 * d);
  give_attention(t, q, k, in2(t, self ? 9 : 8, 2 * d), c);
}
/* windows, of which some queries see nothing, and the log-sum-exp */
static void op_attention_window(trial *t, int v) {
  static const int32_t lengths[2] = {5, 3}, offsets[4] = {0, 3, 4, 9};
  luna_attention_config c = {0};
  luna_tensor *log_sum_exp = NULL, *sums = NULL;
  const int64_t n = v == 4 ? 9 : v >= 5 ? SIZE(7, 600) : 7, d = SIZE(2, 24);
  c.heads = 2;
  c.window = v != 6;
  c.left = v >= 5 ? n / 2 : v == 3 ? -2 : 2;
  c.right = v == 1 ? -1 : v == 3 ? 4 : v % 2;
  c.lengths = v == 1 || v == 7 ? lengths : NULL;
  c.causal = v == 2;
  c.dropout = v == 2 || v == 5 ? (float)0.3 : 0;
  c.log_sum_exp = v == 0 || v == 2 || v == 6 ? &log_sum_exp : NULL; /* of queries that all see a key */
  c.sums = v == 5 || v == 7 ? &sums : NULL;
  if (v == 4) c.sequences = 3, c.query_offsets = c.key_offsets = offsets;
  luna_tensor *in[3];
  for (int i = 0; i < 3; i++) in[i] = c.sequences ? in2(t, n, 2 * d) : in3(t, 2, n, 2 * d);
  give_attention(t, in[0], in[1], in[2], c);
}
/* (1/t) of the sum of (x_t . y_j) z_j, j <= t [eq. 7] */
static double naive_causal_product(const oracle *o) {
  const int64_t heads = *(const int64_t *)o->arg, e = last_of(o->out), d = last_of(o->in[0]), width = d / heads;
  const int64_t row = o->i / e, h = o->i % e / (e / heads);
  double sum = 0;
  for (int64_t j = row - o->at[1]; j <= row; j++)
    sum += naive_dot(o->x[0] + row * d + h * width, o->x[1] + j * d + h * width, width) *
           (double)o->x[2][j * e + o->i % e];
  return sum / (double)(o->at[1] + 1);
}
static void op_causal_product(trial *t, int v) {
  const int64_t rows[4] = {5, 67, 130, 1}, n = rows[v], h = v == 1 ? 1 : 2, d1 = SIZE(2, 23), d2 = SIZE(3, 25);
  luna_tensor *x = in3(t, 2, n, h * d1), *y = in3(t, 2, n, h * d1), *z = in3(t, 2, n, h * d2);
  give(t, EXPECT(t, luna_causal_product(x, y, z, h), naive_causal_product, &h, x, y, z));
}
static double naive_convolution(const oracle *o) { /* the weight's last column is the present */
  const int64_t width = last_of(o->in[1]), e = o->at[2];
  double sum = o->x[2] ? (double)o->x[2][e] : 0;
  for (int64_t j = 0; j < width && j <= o->at[1]; j++)
    sum += (double)o->x[1][e * width + width - 1 - j] * oracle_beside(o, 0, 1, o->at[1] - j);
  return sum;
}
static void op_short_convolution(trial *t, int v) {
  const int64_t widths[4] = {4, 4, 1, 7}, n = v == 1 ? 2 : SIZE(6, 70), d = SIZE(3, 37);
  luna_tensor *x = in3(t, 2, n, d), *weight = in2(t, d, widths[v]), *bias = v == 2 ? NULL : in1(t, d);
  give(t, EXPECT(t, luna_short_convolution(x, weight, bias), naive_convolution, NULL, x, weight, bias));
}
static void op_pack(trial *t, int v) { /* attention of one head whose keys are the values */
  static const int32_t lengths[2] = {4, 7}, empty[2] = {0, 4};
  luna_tensor *sums = NULL;
  const int64_t m = v == 4 ? SIZE(515, 1100) : SIZE(7, 131), d = SIZE(3, 37);
  luna_tensor *weights = in3(t, 2, SIZE(4, 21), d), *context = in3(t, 2, m, d);
  luna_attention_config c = {0};
  c.heads = 1, c.scale = 1;
  c.lengths = v == 1 || v == 3 ? lengths : v == 5 ? empty : NULL;
  c.dropout = v == 2 || v == 3 ? (float)0.3 : 0;
  luna_tensor *y = luna_pack(weights, context, &(luna_pack_config){ c.lengths, c.dropout, v == 0 ? NULL : &sums });
  give(t, EXPECT(t, y, naive_attention_out, &c, weights, context, context));
  if (v) give(t, EXPECT(t, sums, naive_attention_sums, &c, weights, context, context));
}
/* of inputs x, k, bias, values, out_bias */
static double naive_unpack(const oracle *o) {
  const luna_unpack_config *c = (const luna_unpack_config *)o->arg;
  const luna_tensor *k = o->in[1];
  const int64_t d = last_of(o->out), n = o->out->shape[1], slots = k->shape[2], b = o->at[0];
  const int64_t real = c->lengths && c->lengths[b] < slots ? c->lengths[b] : slots;
  double sum = o->x[4] ? (double)o->x[4][o->at[2]] : 0, p[64];
  for (int64_t h = 0; h < k->shape[1]; h++) {
    const int64_t first = (b * k->shape[1] + h) * slots;
    for (int64_t j = 0; j < real; j++)
      p[j] = naive_dot(o->x[0] + o->i / d * d, o->x[1] + (first + j) * d, d) + (double)o->x[2][first + j];
    naive_softmax(p, real);
    for (int64_t j = 0; j < real; j++) {
      const int64_t element = ((b * k->shape[1] + h) * n + o->at[1]) * slots + j;
      sum += p[j] * oracle_kept(o, 0, element, c->dropout) * (double)o->x[3][(first + j) * d + o->at[2]];
    }
  }
  return sum;
}
static void op_unpack(trial *t, int v) {
  static const int32_t lengths[2] = {2, 3}, empty[2] = {0, 9};
  /* 5: more rows than a block */
  const int64_t n = v == 5 ? SIZE(515, 1030) : SIZE(5, 70), d = SIZE(3, 37), h = 2, l = SIZE(3, 18);
  luna_tensor *x = in3(t, 2, n, d), *k = in4(t, 2, h, l, d), *bias = in3(t, 2, h, l), *values = in4(t, 2, h, l, d);
  luna_unpack_config c = {0};
  c.out_bias = v % 2 ? in1(t, d) : NULL;
  c.lengths = v == 1 || v == 3 ? lengths : v == 4 ? empty : NULL;
  c.dropout = v >= 2 ? (float)0.3 : 0;
  give(t, EXPECT(t, luna_unpack(x, k, bias, values, v ? &c : NULL), naive_unpack, &c, x, k, bias, values, c.out_bias));
}
/* the residual: none, of its own, x itself, and x itself as an op's result, whose gradient is then made in place */
static void op_feed_forward(trial *t, int v) {
  static const luna_activation kinds[4] = {LUNA_ACTIVATION_DEFAULT, LUNA_ACTIVATION_GELU, LUNA_ACTIVATION_RELU,
                                           LUNA_ACTIVATION_SOFTPLUS};
  /* 8: more rows than a block */
  const int64_t n = v >= 8 ? SIZE(600, 1300) : SIZE(3, 70), d = SIZE(3, 21), f = SIZE(5, 37);
  luna_feed_forward_config c = {0};
  luna_tensor *x = in3(t, 2, n, d), *w1 = in2(t, f, d), *w2 = in2(t, d, f), *b1 = v % 3 ? in1(t, f) : NULL,
      *b2 = v % 3 ? in1(t, d) : NULL;
  c.activation = kinds[v % 4];
  if (v % 2) c.activation_dropout = (float)0.25, c.dropout = (float)0.125;
  c.recompute = v / 2 % 2;
  if (v % 4 == 1) c.residual = in3(t, 2, n, d);
  if (v % 4 == 3) x = luna_scale(x, 2);
  if (v % 4 > 1) c.residual = x;
  x = EXPECT_FEED_FORWARD(t, c, x, w1, b1, w2, b2);
  give(t, v == 7 ? luna_require_grad(x) : x); /* whose gradient stays its own */
}
/* luna_route's w */
static double naive_route_at(const oracle *o) {
  const int64_t slots = last_of(o->in[0]) / last_of(o->in[1]), head = o->i / slots;
  double w[300];
  naive_route(o->x[0] + head * slots, slots, (double)o->x[1][head], w);
  return w[o->i % slots];
}
/* far values, two slots, many, strengths on both sides of the clamp */
static void op_route(trial *t, int v) {
  const int64_t n = SIZE(3, 150), h = v == 3 ? 1 : 3, l = v == 2 ? 2 : v == 3 ? SIZE(17, 300) : SIZE(4, 19);
  luna_tensor *router = luna_scale(in3(t, 2, n, h * l), v == 1 ? 40 : 3),
              *strength = luna_scale(in3(t, 2, n, h), v == 1 ? 30 : 3);
  give(t, EXPECT(t, luna_route(router, strength), naive_route_at, NULL, router, strength));
}
/* Of inputs q, k, v, s, gates. A slot's key and value are means over the rows so far. Row j has the weight
   omega(s_j) / c_j, of which each later row r leaves 1 - 1 / c_r, where c is the number of rows or the horizon
   [section 3.3]. With gates row j has the weight e^s_j, of which each later row leaves its gate, divided by the sum of
   all. A routed memory's row j has the weight w_j, of which each later row leaves (1 - w) e^-lambda. */
static double naive_causal_nested(const oracle *o) {
  const luna_causal_nested_config *c = (const luna_causal_nested_config *)o->arg;
  const int64_t n = last_of(o->out), slots = last_of(o->in[3]) / c->heads, d = n / c->heads, e = o->at[2], h = e / d;
  const int64_t real = c->lengths && c->lengths[o->at[0]] < slots ? c->lengths[o->at[0]] : slots, row = o->i / n;
  const int omega = c->omega ? (int)c->omega : LUNA_ACTIVATION_SOFTPLUS2;
  double score[32], value[32], y = 0;
  int seen = 0;
  for (int64_t i = 0; i < real; i++) {
    double left = 1, all = 0;
    score[i] = value[i] = 0;
    for (int64_t j = row; j >= row - o->at[1]; j--) {
      const int64_t at = (j * c->heads + h) * slots + i, before = j - (row - o->at[1]);
      const double count = (double)(c->horizon > 0 && before >= c->horizon ? c->horizon : before + 1);
      const double s = (double)o->x[3][at];
      const double weight = left * (c->routed ? s : o->x[4] ? exp(fmin(fmax(s, -15), 15)) :
                                    naive_activation(omega, s) / count);
      score[i] += weight * naive_dot(o->x[0] + row * n + h * d, o->x[1] + j * n + h * d, d) / sqrt((double)d);
      value[i] += weight * (double)o->x[2][j * n + e];
      all += weight;
      left *= c->routed ? (1 - s) * exp(-naive_fade((double)o->x[4][h])) :
              o->x[4] ? exp(fmax(-naive_activation(LUNA_ACTIVATION_SOFTPLUS, -(double)o->x[4][at]) / 16, -1)) :
              1 - 1 / count;
    }
    if (o->x[4] && all > 0) score[i] /= all, value[i] /= all;
    if (c->routed) score[i] = naive_empty(all) ? -INFINITY : score[i] + log(all);
    seen += score[i] > -INFINITY;
  }
  if (seen == 0) return 0;
  naive_softmax(score, real);
  for (int64_t i = 0; i < real; i++)
    y += score[i] * oracle_kept(o, 0, (row * c->heads + h) * slots + i, c->dropout) * value[i];
  return y;
}
static void op_causal_nested(trial *t, int v) {
  static const int32_t lengths[2] = {2, 3};
  static const luna_activation omega[3] = {LUNA_ACTIVATION_SOFTPLUS2, LUNA_ACTIVATION_SOFTPLUS, LUNA_ACTIVATION_ELU1};
  const int64_t n = v == 6 ? 67 : v == 7 ? SIZE(130, 300) : SIZE(5, 150), h = 2, d = SIZE(2, 19), l = SIZE(3, 18);
  luna_tensor *q = in3(t, 2, n, h * d), *k = in3(t, 2, n, h * d), *values = v == 5 ? k : in3(t, 2, n, h * d),
      *s = in3(t, 2, n, h * l);
  luna_causal_nested_config c = {.heads = h, .omega = v % 3 ? omega[v % 3] : LUNA_ACTIVATION_DEFAULT};
  c.lengths = v == 3 || v == 4 ? lengths : NULL;
  c.dropout = v >= 4 && v < 7 ? (float)0.3 : 0;
  c.horizon = v == 8 ? 3 : v == 9 ? SIZE(1, 100) : v == 10 ? 2 : 0;
  luna_tensor *y = luna_causal_nested_attention(q, k, values, s, &c);
  give(t, EXPECT(t, y, naive_causal_nested, &c, q, k, values, s, NULL));
}
static void op_horizon(trial *t, int v) { op_causal_nested(t, 8 + v); }
/* gates below and above the limit of -1, none, keys that are the values, lengths, dropout, more rows than a chunk */
static void op_forgetting(trial *t, int v) {
  static const int32_t lengths[2] = {2, 3};
  const int64_t n = v == 4 ? SIZE(67, 130) : v == 5 ? SIZE(1, 300) : SIZE(5, 150), h = 2, d = SIZE(2, 19),
                l = SIZE(3, 18);
  luna_tensor *q = in3(t, 2, n, h * d), *k = in3(t, 2, n, h * d), *values = v == 1 ? k : in3(t, 2, n, h * d),
      *s = luna_scale(in3(t, 2, n, h * l), v == 3 ? 8 : 2), *gates = in3(t, 2, n, h * l);
  luna_causal_nested_config c = {.heads = h, .lengths = v == 2 ? lengths : NULL, .dropout = v == 3 ? (float)0.3 : 0};
  c.forget = v == 0 ? gates : luna_add_scalar(luna_scale(gates, 8), v == 1 ? -16 : v == 2 ? 20 : 0);
  give(t, EXPECT(t, luna_causal_nested_attention(q, k, values, s, &c), naive_causal_nested, &c, q, k, values, s,
                 c.forget));
}
/* the same of a routed memory; fades of all kinds, and the fastest */
static void op_routed(trial *t, int v) {
  static const int32_t lengths[2] = {2, 3};
  const int64_t n = v == 4 ? SIZE(67, 130) : v == 5 ? SIZE(1, 300) : SIZE(5, 150), h = 2, d = SIZE(2, 19),
                l = SIZE(4, 18);
  luna_tensor *q = in3(t, 2, n, h * d), *k = in3(t, 2, n, h * d), *values = v == 1 ? k : in3(t, 2, n, h * d),
      *router = luna_scale(in3(t, 2, n, h * l), 3), *strength = luna_scale(in3(t, 2, n, h), 4),
      *s = luna_route(router, strength);
  luna_causal_nested_config c = {.heads = h, .lengths = v == 2 ? lengths : NULL, .dropout = v == 3 ? (float)0.3 : 0};
  c.routed = true;
  c.forget = luna_add_scalar(luna_scale(in1(t, h), 6), v == 1 ? 8 : 0);
  give(t, EXPECT(t, luna_causal_nested_attention(q, k, values, s, &c), naive_causal_nested, &c, q, k, values, s,
                 c.forget));
}

/* y = factor a b^2, with the factor in the op's state */
static luna_status op_custom_forward(const luna_tensor *const *in, int count, luna_tensor *out, void *state) {
  const float factor = *(const float *)state;
  (void)count;
  for (int64_t i = 0; i < luna_count(out); i++)
    out->data[i] = factor * in[0]->data[i] * in[1]->data[i] * in[1]->data[i];
  return LUNA_OK;
}
static luna_status op_custom_backward(luna_tensor *const *in, int count, const luna_tensor *out, void *state) {
  const float factor = *(const float *)state;
  (void)count;
  for (int64_t i = 0; i < luna_count(out); i++) {
    const float g = factor * out->grad[i];
    if (in[0]->grad) in[0]->grad[i] += g * in[1]->data[i] * in[1]->data[i];
    if (in[1]->grad) in[1]->grad[i] += 2 * g * in[0]->data[i] * in[1]->data[i];
  }
  return LUNA_OK;
}
static double naive_custom(const oracle *o) {
  const double b = (double)o->x[1][o->i];
  return 1.25 * (double)o->x[0][o->i] * b * b;
}
static void op_custom(trial *t, int v) {
  float factor = (float)1.25;
  luna_custom custom = {op_custom_forward, op_custom_backward, NULL, sizeof factor, 0, false, 0, 0};
  const int64_t shape[2] = {3, 4};
  luna_tensor *in[2];
  in[0] = in2(t, 3, 4);
  in[1] = in2(t, 3, 4);
  if (v) in[1] = luna_gelu(in[1]);
  custom.state = &factor;
  luna_tensor *y = luna_custom_op(in, 2, 2, shape, &custom);
  factor = 77; /* the state was copied */
  give(t, EXPECT(t, y, naive_custom, NULL, in[0], in[1]));
}

/* max over an axis of distinct values; mask; ratio */
static double naive_max(const oracle *o) {
  const int axis = *(const int *)o->arg;
  double max = -INFINITY;
  for (int64_t j = 0; j < o->in[0]->shape[axis]; j++) max = fmax(max, oracle_along(o, axis, j));
  return max;
}
static void op_max(trial *t, int v) {
  luna_tensor *x = in3(t, SIZE(2, 5), SIZE(4, 33), SIZE(3, 17));
  give(t, EXPECT(t, luna_max(x, v), naive_max, &v, x));
}
static double naive_mask(const oracle *o) {
  return o->at[1] < ((const int32_t *)o->arg)[o->at[0]] ? (double)o->x[0][o->i] : 0;
}
static void op_mask(trial *t, int v) {
  static const int32_t lengths[3] = {2, 0, 4};
  luna_tensor *x = v ? in4(t, 3, SIZE(4, 40), 2, SIZE(3, 9)) : in3(t, 3, SIZE(4, 40), SIZE(3, 33));
  give(t, EXPECT(t, luna_mask(x, lengths), naive_mask, lengths, x));
}
static double naive_ratio(const oracle *o) {
  const int64_t n = last_of(o->out);
  const float *row = o->x[0] + o->i / n * (n + 1);
  return (double)row[o->i % n] / (double)row[n];
}
static void op_ratio(trial *t, int v) {
  luna_tensor *x = v ? in2(t, SIZE(4, 60), SIZE(5, 33)) : in4(t, 2, 2, SIZE(3, 30), SIZE(4, 18));
  x = luna_activate(x, LUNA_ACTIVATION_SOFTPLUS); /* away from division by 0 */
  give(t, EXPECT(t, luna_ratio(x), naive_ratio, NULL, x));
}
static double naive_function(const oracle *o) {
  const int v = *(const int *)o->arg;
  const double x = (double)o->x[0][o->i];
  return v == 0 ? sin(x) : v == 1 ? cos(x) : pow(x, v == 2 ? 3 : -1.5);
}
static void op_function(trial *t, int v) {
  luna_tensor *x = in2(t, SIZE(3, 60), SIZE(4, 33));
  x = v < 2 ? luna_scale(x, 3) : v == 3 ? luna_add_scalar(luna_abs(x), 1) : x;
  luna_tensor *y = v == 0 ? luna_sin(x) : v == 1 ? luna_cos(x) : luna_pow(x, v == 2 ? 3 : -1.5f);
  give(t, EXPECT(t, y, naive_function, &v, x));
}
static void op_split(trial *t, int v) {
  luna_tensor *x = in3(t, SIZE(2, 6), SIZE(4, 34), SIZE(6, 18)), *parts[2];
  luna_split(x, v, parts, 2);
  const int64_t first[2] = {v, 0}, second[2] = {v, x ? x->shape[v] / 2 : 0};
  give(t, luna_mul(EXPECT(t, parts[0], naive_slice, first, x), EXPECT(t, parts[1], naive_slice, second, x)));
}
/* pair p of a head is turned by the angle of its position times base^(-2p / d_h); frequencies are floats */
typedef struct rotary_arg { int64_t heads, first; double base; } rotary_arg;
static double naive_rotary(const oracle *o) {
  const rotary_arg *arg = (const rotary_arg *)o->arg;
  const int64_t d = last_of(o->out) / arg->heads, half = d / 2, p = o->i % d % half, first = o->i - o->i % d + p;
  const double frequency = (double)(float)pow(arg->base, -2 * (double)p / (double)d);
  const double angle = (double)(arg->first + o->at[1]) * frequency;
  const double a = (double)o->x[0][first], b = (double)o->x[0][first + half];
  return o->i % d < half ? a * cos(angle) - b * sin(angle) : b * cos(angle) + a * sin(angle);
}
static void op_rotary(trial *t, int v) {
  luna_tensor *x = in3(t, 2, SIZE(4, 70), v ? SIZE(4, 36) : SIZE(6, 96));
  const rotary_arg arg = {v ? 1 : x ? x->shape[2] / (SIZE(2, 32)) : 1, v ? 61 : 0, v ? 300 : 10000};
  luna_tensor *y = luna_rotary(x, arg.heads, arg.first, v ? 300 : 0);
  give(t, EXPECT(t, y, naive_rotary, &arg, x));
}
static void op_recompute(trial *t, int v) { /* dropout or not; one result, two, a view; a scope inside */
  luna_tensor *in[3] = {in3(t, 2, SIZE(3, 20), SIZE(4, 33)), in2(t, SIZE(5, 40), SIZE(4, 33)),
                        in2(t, SIZE(2, 8), SIZE(5, 40))};
  luna_tensor *x = luna_dropout(in[0], (float)0.1), *y, *both[2];
  const int64_t flat[1] = {-1};
  const luna_scope scope = luna_scope_recompute(t->ctx), inner = luna_scope_begin(t->ctx);
  y = luna_dropout(luna_gelu(luna_linear(x, in[1], NULL)), v % 2 ? (float)0.3 : 0);
  if (v >= 4) y = luna_scope_end(inner, &y, 1);
  both[0] = luna_linear(y, in[2], NULL);
  both[1] = v < 2 ? NULL : v >= 4 ? luna_reshape(luna_softmax(y, NULL), 1, flat) : luna_softmax(y, NULL);
  give(t, luna_scope_end(scope, both, v < 2 ? 1 : 2));
  if (v >= 2) give(t, both[1]);
}

/* ---- layers ---- */
static void op_linear_layer(trial *t, int v) {
  luna_linear_layer layer;
  const luna_init init = {LUNA_INIT_XAVIER, 1};
  (void)v;
  if (luna_linear_layer_init(&layer, trial_params(t, LUNA_FORM_CHEAPEST), "a", SIZE(3, 33), SIZE(4, 17), init))
    t->broken = true;
  luna_tensor *x = in3(t, 2, SIZE(2, 9), SIZE(3, 33));
  in_params(t);
  give(t, luna_linear_layer_forward(&layer, x));
}
static void op_norm_layer(trial *t, int v) {
  luna_norm_layer layer;
  if (luna_norm_layer_init(&layer, trial_params(t, LUNA_FORM_CHEAPEST), "a", SIZE(5, 33),
                           v ? LUNA_NORM_RMS : LUNA_NORM_LAYER)) t->broken = true;
  luna_tensor *x = in3(t, 2, SIZE(2, 9), SIZE(5, 33));
  in_params(t);
  give(t, luna_norm_layer_forward(&layer, x));
}
/* the four sharings, times unfolded and folded, times (self, all keys), (another context, lengths), (self, lengths,
   dropout) */
static void op_nested_layer(trial *t, int v) {
  static const int32_t lengths[2] = {2, 5};
  const luna_form form = (v / 4) % 2 ? LUNA_FORM_FOLDED : LUNA_FORM_UNFOLDED;
  const int what = v / 8;
  luna_nested_attention_layer layer;
  luna_layer_config config = {0};
  luna_tensor *packed_context = NULL;
  const int64_t n = SIZE(5, 37), m = SIZE(7, 70), l = SIZE(3, 9);
  config.dim = SIZE(4, 48);
  config.heads = what == 2 ? 1 : 2;
  config.pack_heads = what == 0 ? 4 : what == 1 ? 1 : 2;
  config.sharing = (luna_sharing)(v % 4);
  config.attention_dropout = what == 2 ? (float)0.3 : 0;
  config.output_gate = v % 3 == 2;
  if (luna_nested_attention_layer_init(&layer, trial_params(t, form), "attn.", &config)) t->broken = true;
  luna_tensor *x = in3(t, 2, n, config.dim), *p = in3(t, 2, l, config.dim),
      *context = what == 1 ? in3(t, 2, m, config.dim) : NULL;
  in_params(t);
  give(t, luna_nested_attention_layer_forward(&layer, x, p, context, what ? lengths : NULL, &packed_context));
  give(t, packed_context);
}
static void op_causal_attention_layer(trial *t, int v) {
  static const int32_t lengths[2] = {2, 3};
  static const luna_activation omega[3] = {LUNA_ACTIVATION_DEFAULT, LUNA_ACTIVATION_SOFTPLUS, LUNA_ACTIVATION_ELU1};
  luna_causal_attention_layer layer;
  luna_layer_config config = {0};
  config.dim = SIZE(4, 48);
  config.heads = 2;
  config.sharing = v % 2 ? LUNA_SHARING_FULL : LUNA_SHARING_TIED;
  config.omega = omega[(v / 2) % 3];
  config.attention_dropout = v >= 9 ? (float)0.3 : 0;
  if (luna_causal_attention_layer_init(&layer, trial_params(t, v >= 6 ? LUNA_FORM_FOLDED : LUNA_FORM_UNFOLDED), "",
                                       &config)) t->broken = true;
  luna_tensor *x = in3(t, 2, SIZE(5, 131), config.dim);
  luna_tensor *p = v % 4 == 3 ? in2(t, SIZE(3, 9), config.dim) : in3(t, 2, SIZE(3, 9), config.dim);
  in_params(t);
  give(t, luna_causal_attention_layer_forward(&layer, x, p, v % 3 == 1 ? lengths : NULL));
}
/* with p of as many slots as the gates are for, or fewer */
static void op_forgetting_attention(trial *t, int v) {
  static const int32_t lengths[2] = {2, 3};
  luna_causal_attention_layer layer;
  luna_layer_config config = {0};
  config.dim = SIZE(4, 48);
  config.heads = 2;
  config.sharing = v % 2 ? LUNA_SHARING_FULL : LUNA_SHARING_TIED;
  config.forget = v % 3 ? LUNA_FORGET_GATED : LUNA_FORGET_CONSTANT;
  if (v >= 6) config.forget = LUNA_FORGET_ROUTED;
  config.output_gate = v % 2 == 0;
  config.memory = v < 3 ? SIZE(3, 9) : SIZE(4, 11);
  if (luna_causal_attention_layer_init(&layer, trial_params(t, LUNA_FORM_CHEAPEST), "", &config)) t->broken = true;
  luna_tensor *x = in3(t, 2, SIZE(5, 131), config.dim);
  luna_tensor *p = NULL;
  if (v < 6) p = v % 2 ? in2(t, SIZE(3, 9), config.dim) : in3(t, 2, SIZE(3, 9), config.dim);
  in_params(t);
  give(t, luna_causal_attention_layer_forward(&layer, x, p, v % 3 == 1 ? lengths : NULL));
}
static luna_layer_config op_layer_config(trial *t, int v) {
  luna_layer_config config = {0};
  config.dim = SIZE(4, 48);
  config.heads = 2;
  config.pack_heads = v % 2 ? 4 : 0;
  config.ffn = SIZE(6, 50);
  config.sharing = v % 4 >= 2 ? LUNA_SHARING_FULL : LUNA_SHARING_TIED;
  config.activation = v == 8 ? LUNA_ACTIVATION_SILU : v % 2 ? LUNA_ACTIVATION_GELU : LUNA_ACTIVATION_DEFAULT;
  config.gated = v == 8;
  config.norm = v >= 9 ? LUNA_NORM_RMS : LUNA_NORM_LAYER;
  config.pre_norm = v % 2 != 0;
  config.dropout = v >= 4 ? (float)0.1 : 0;
  config.attention_dropout = v >= 4 ? (float)0.2 : 0;
  config.activation_dropout = v >= 4 ? (float)0.15 : 0;
  config.output_gate = v == 2 || v == 8;
  return config;
}
static void op_encoder_layer(trial *t, int v) {
  static const int32_t lengths[2] = {2, 5};
  luna_encoder_layer layer;
  const luna_layer_config config = op_layer_config(t, v);
  if (luna_encoder_layer_init(&layer, trial_params(t, v % 3 ? LUNA_FORM_FOLDED : LUNA_FORM_UNFOLDED), "layers.0.",
                              &config)) t->broken = true;
  luna_tensor *x = in3(t, 2, SIZE(5, 37), config.dim), *p = in3(t, 2, SIZE(3, 9), config.dim);
  in_params(t);
  give(t, luna_encoder_layer_forward(&layer, x, &p, v % 4 == 1 ? lengths : NULL));
  give(t, p);
}
static void op_decoder_layer(trial *t, int v) {
  static const int32_t lengths[2] = {2, 6};
  luna_decoder_layer layer;
  const luna_layer_config config = op_layer_config(t, v);
  if (luna_decoder_layer_init(&layer, trial_params(t, v % 3 ? LUNA_FORM_FOLDED : LUNA_FORM_UNFOLDED), "layers.0.",
                              &config)) t->broken = true;
  luna_tensor *x = in3(t, 2, SIZE(5, 70), config.dim), *p = in3(t, 2, SIZE(3, 9), config.dim),
              *context = in3(t, 2, SIZE(7, 41), config.dim);
  in_params(t);
  give(t, luna_decoder_layer_forward(&layer, x, &p, context, v % 4 == 1 ? lengths : NULL));
  give(t, p);
}
static void op_causal_layer(trial *t, int v) {
  luna_causal_layer layer;
  luna_layer_config config = op_layer_config(t, v);
  config.memory = SIZE(3, 9);
  config.convolution = v % 3 ? 4 : 0;
  config.omega = v % 2 ? LUNA_ACTIVATION_ELU1 : LUNA_ACTIVATION_DEFAULT;
  if (luna_causal_layer_init(&layer, trial_params(t, LUNA_FORM_CHEAPEST), "layers.0.", &config))
    t->broken = true;
  luna_tensor *x = in3(t, 2, SIZE(6, 70), config.dim);
  in_params(t);
  give(t, luna_causal_layer_forward(&layer, x));
}
static void op_forgetting_layer(trial *t, int v) {
  luna_causal_layer layer;
  luna_layer_config config = op_layer_config(t, v);
  config.memory = SIZE(3, 9);
  config.convolution = 4;
  config.forget = v % 2 ? LUNA_FORGET_GATED : LUNA_FORGET_CONSTANT;
  if (v >= 6) config.forget = LUNA_FORGET_ROUTED;
  config.recompute = v % 4 == 3 ? LUNA_RECOMPUTE_LAYER : LUNA_RECOMPUTE_NONE;
  if (luna_causal_layer_init(&layer, trial_params(t, LUNA_FORM_CHEAPEST), "layers.0.", &config))
    t->broken = true;
  luna_tensor *x = in3(t, 2, SIZE(6, 70), config.dim);
  in_params(t);
  give(t, luna_causal_layer_forward(&layer, x));
}
/* softmax, linear (causal or not) */
static void op_attention_layer(trial *t, int v) {
  static const int32_t lengths[2] = {2, 5};
  luna_attention_layer layer;
  luna_layer_config config = {0};
  config.dim = SIZE(4, 48);
  config.heads = 2;
  config.attention = v % 2 ? LUNA_ATTENTION_LINEAR : LUNA_ATTENTION_SOFTMAX;
  config.causal = v == 2 || v == 3;
  config.attention_dropout = v == 0 ? (float)0.3 : 0;
  config.output_gate = v % 3 == 1;
  if (luna_attention_layer_init(&layer, trial_params(t, LUNA_FORM_CHEAPEST), "attn.", &config)) t->broken = true;
  luna_tensor *x = in3(t, 2, SIZE(5, 37), config.dim), *context =
      v % 5 == 4 ? in3(t, 2, SIZE(7, 41), config.dim) : NULL;
  in_params(t);
  give(t, luna_attention_layer_forward(&layer, x, context, v % 2 ? lengths : NULL));
}
static luna_encoder_config op_encoder_config(trial *t, int v) {
  luna_encoder_config config = {0};
  config.layers = 2;
  config.layer.dim = SIZE(4, 48);
  config.layer.heads = 2;
  config.layer.ffn = SIZE(6, 50);
  config.layer.memory = SIZE(3, 9);
  config.positions = (luna_positions)(1 + v % 3);
  config.max_length = 9;
  config.norm_embedding = v % 2 != 0;
  config.tied_layers = v == 4;
  config.layer.own_memory = v == 5;
  config.layer.activation = v % 2 ? LUNA_ACTIVATION_GELU : LUNA_ACTIVATION_DEFAULT;
  config.layer.pre_norm = v == 3 || v == 2;
  config.layer.norm = v == 2 ? LUNA_NORM_RMS : LUNA_NORM_LAYER;
  config.layer.dropout = v == 1 ? (float)0.1 : 0;
  config.layer.recompute = (luna_recompute_kind)(v % 3);
  return config;
}
static const int32_t op_tokens[18] = {3, 0, 6, 6, 1, 5, 2, 3, 4, 2, 2, 1, 0, 6, 5, 3, 3, 1};
static const int32_t op_lengths[2] = {9, 2};
/* the five poolings, pairs, every attention */
static void op_classifier(trial *t, int v) {
  luna_classifier model;
  luna_classifier_config config = {0};
  config.vocab = 7;
  config.classes = 3;
  config.encoder = op_encoder_config(t, v);
  config.encoder.layer.attention = v >= 6 ? (luna_attention_kind)(v == 7 ? 2 : 1) : LUNA_ATTENTION_LUNA;
  config.pooling = v < 5 ? (luna_pooling)v : LUNA_POOLING_DEFAULT;
  config.pre_logits = v % 2 ? 5 : 0;
  config.pair = v == 2 || v == 7;
  if (luna_classifier_init(&model, trial_params(t, LUNA_FORM_CHEAPEST), &config)) t->broken = true;
  in1(t, 1); /* begins the step; a model has no input but its parameters */
  in_params(t);
  give(t, config.pair ? luna_classifier_forward_pair(&model, &(luna_input){ op_tokens, op_lengths, 2, 9, NULL },
      &(luna_input){ op_tokens, NULL, 2, 5, NULL }) : luna_classifier_forward(&model,
          &(luna_input){ op_tokens, v % 4 ? op_lengths : NULL, 2, 9, NULL }));
  give(t, luna_scale(t->tensor[0], 1));
}
static void op_masked_lm(trial *t, int v) {
  static const int32_t labels[18] = {-1, 3, -1, -1, 0, -1, -1, -1, 6, -1, 2, -1, -1, -1, -1, -1, -1, -1};
  luna_masked_lm model;
  luna_masked_lm_config config = {0};
  config.vocab = 7;
  config.encoder = op_encoder_config(t, v);
  if (luna_masked_lm_init(&model, trial_params(t, LUNA_FORM_CHEAPEST), &config)) t->broken = true;
  in1(t, 1);
  in_params(t);
  if (v == 0) give(t, luna_masked_lm_forward(&model, &(luna_input){ op_tokens, op_lengths, 2, 9, NULL }));
  else give(t, luna_masked_lm_loss(&model, &(luna_input){ op_tokens, op_lengths, 2, 9, NULL }, labels));
  give(t, luna_scale(t->tensor[0], 1));
}
static void op_seq2seq(trial *t, int v) {
  static const int32_t target[12] = {1, 0, 4, 4, 2, 3, 0, 1, 2, 3, 4, 0}, target_lengths[2] = {6, 3};
  luna_seq2seq model;
  luna_seq2seq_config config = {0};
  config.vocab = 7;
  config.target_vocab = v == 1 ? 7 : 5;
  config.share_embeddings = v == 1;
  config.separate_output = v == 2;
  config.decoder_layers = v == 3 ? 1 : 0;
  config.encoder = op_encoder_config(t, v);
  if (luna_seq2seq_init(&model, trial_params(t, v % 2 ? LUNA_FORM_FOLDED : LUNA_FORM_UNFOLDED), &config))
    t->broken = true;
  in1(t, 1);
  in_params(t);
  give(t, luna_seq2seq_forward(&model, &(luna_input){ op_tokens, op_lengths, 2, 9, NULL },
                               &(luna_input){ target, v % 2 ? target_lengths : NULL, 2, 6, NULL }));
  give(t, luna_scale(t->tensor[0], 1));
}
/* the language model with another attention, and positions */
static void op_lm_other(trial *t, int v) {
  luna_lm model;
  luna_lm_config config = {0};
  config.vocab = 7;
  config.layer = op_layer_config(t, v);
  config.layer.attention = v % 2 ? LUNA_ATTENTION_LINEAR : LUNA_ATTENTION_SOFTMAX;
  config.layer.recompute = v >= 2 ? LUNA_RECOMPUTE_LAYER : LUNA_RECOMPUTE_FFN;
  config.positions = v % 2 ? LUNA_POSITIONS_LEARNED : LUNA_POSITIONS_SINUSOIDAL;
  config.max_length = 10;
  if (luna_lm_init(&model, trial_params(t, LUNA_FORM_CHEAPEST), &config)) t->broken = true;
  in1(t, 1);
  in_params(t);
  give(t, luna_lm_forward(&model, &(luna_input){ op_tokens, NULL, 2, 9, NULL }));
  give(t, luna_scale(t->tensor[0], 1));
}
static void op_lm(trial *t, int v) {
  static const int32_t tokens[8] = {3, 0, 6, 6, 1, 5, 2, 3};
  luna_lm model;
  luna_lm_config config = {0};
  config.vocab = 7;
  config.layers = 2;
  config.layer = op_layer_config(t, v);
  config.layer.memory = 3;
  config.layer.convolution = 3;
  if (luna_lm_init(&model, trial_params(t, LUNA_FORM_CHEAPEST), &config)) t->broken = true;
  in1(t, 1); /* begins the step; the language model has no input but its parameters */
  in_params(t);
  give(t, luna_lm_forward(&model, &(luna_input){ tokens, NULL, 2, 4, NULL }));
  give(t, luna_scale(t->tensor[0], 1));
}

static const op_case op_cases[] = {{"reshape", op_reshape, 3},
                                   {"slice", op_slice, 4},
                                   {"views", op_views, 2},
                                   {"permute", op_permute, 9},
                                   {"concat", op_concat, 4},
                                   {"repeat", op_repeat, 2},
                                   {"binary", op_binary, OP_PAIRS * OP_BINARIES},
                                   {"where", op_where, 5},
                                   {"clamp", op_clamp, 2},
                                   {"add_scalar", op_add_scalar, 2},
                                   {"one_tensor_twice", op_one_tensor_twice, 6},
                                   {"scale", op_scale, 2},
                                   {"sum", op_sum, 4},
                                   {"mean", op_mean, 4},
#define UNARY_ROW(name) {#name, op_##name, 3},
                                   COMMON_UNARY(UNARY_ROW)
#undef UNARY_ROW
                                   {"cumsum", op_cumsum, 4},
                                   {"transpose", op_transpose, 3},
                                   {"matmul", op_matmul, 20},
                                   {"linear", op_linear, 6},
                                   {"activate", op_activate, 2 * LUNA_ACTIVATION_COUNT - 2},
                                   {"softmax", op_softmax, 5},
                                   {"dropout", op_dropout, 2},
                                   {"layer_norm", op_layer_norm, 6},
                                   {"rms_norm", op_rms_norm, 3},
                                   {"feed_forward gated", op_gated, 4},
                                   {"embedding", op_embedding, 2},
                                   {"gather_rows", op_gather_rows, 3},
                                   {"scatter_add_rows", op_scatter_add_rows, 3},
                                   {"cross_entropy", op_cross_entropy, 6},
                                   {"weighted_cross_entropy", op_weighted_cross_entropy, 5},
                                   {"linear_cross_entropy", op_linear_cross_entropy, 7},
                                   {"logits", op_logits, 8},
                                   {"softmax_attention", op_attention, 15},
                                   {"softmax_attention ragged", op_attention_ragged, 4},
                                   {"attention of a window", op_attention_window, 8},
                                   {"causal_product", op_causal_product, 4},
                                   {"short_convolution", op_short_convolution, 4},
                                   {"pack", op_pack, 6},
                                   {"unpack", op_unpack, 6},
                                   {"feed_forward", op_feed_forward, 12},
                                   {"causal_nested_attention", op_causal_nested, 8},
                                   {"horizon", op_horizon, 3},
                                   {"forgetting", op_forgetting, 6},
                                   {"route", op_route, 4},
                                   {"routed", op_routed, 6},
                                   {"custom_op", op_custom, 2},
                                   {"max", op_max, 3},
                                   {"min", op_min, 3},
                                   {"var", op_var, 3},
                                   {"stack", op_stack, 3},
                                   {"pad", op_pad, 3},
                                   {"soft_cross_entropy", op_soft_cross_entropy, 2},
                                   {"mask", op_mask, 2},
                                   {"ratio", op_ratio, 2},
                                   {"function", op_function, 4},
                                   {"split", op_split, 3},
                                   {"rotary", op_rotary, 2},
                                   {"recompute", op_recompute, 6},
                                   {"linear_layer", op_linear_layer, 1},
                                   {"norm_layer", op_norm_layer, 2},
                                   {"nested_attention_layer", op_nested_layer, 24},
                                   {"causal_attention_layer", op_causal_attention_layer, 12},
                                   {"forgetting attention layer", op_forgetting_attention, 8},
                                   {"forgetting causal layer", op_forgetting_layer, 8},
                                   {"encoder_layer", op_encoder_layer, 11},
                                   {"decoder_layer", op_decoder_layer, 11},
                                   {"causal_layer", op_causal_layer, 11},
                                   {"lm", op_lm, 6},
                                   {"lm of another attention", op_lm_other, 4},
                                   {"attention_layer", op_attention_layer, 16},
                                   {"classifier", op_classifier, 9},
                                   {"masked_lm", op_masked_lm, 3},
                                   {"seq2seq", op_seq2seq, 4}};
#define OP_CASES ((int)(sizeof op_cases / sizeof op_cases[0]))
/* what a device may lack, and is not made of others */
TEST_UNUSED static bool op_case_applies(const op_case *c, const luna_backend *backend) {
  static const char *const lacks[] = {"attention of a window", "cumsum", "scatter_add_rows", "function"};
  for (int i = 0; i < 4; i++)
    if (backend->allocate && strcmp(c->name, lacks[i]) == 0) return false;
  return true;
}

#endif
