/* What a backend's table says that its functions can do (luna_op_functions.can), against what they do, in every case of
   op_cases.h: gradients that are set begin as NaN, others keep what they held, and what may lie in one place does.
   Used by scopes.c and cuda.c. */
#ifndef OP_CAN_H
#define OP_CAN_H
#include "op_cases.h"

#define CAN_HELD 4.0f                /* what a gradient holds that is added to */
static const luna_backend *can_table;
static luna_backend can_probe;       /* the same functions, of which luna.h thinks that they can do nothing of this */
static int can_met[LUNA_OP_COUNT];   /* bits that were checked */
static int can_inputs[LUNA_OP_COUNT]; /* bits of the inputs that an op had in any case */
static int can_not[LUNA_OP_COUNT];   /* bits of LUNA_SETS_GRAD and LUNA_GRAD_IN_PLACE that were seen not to hold */

static float *can_read(luna_ctx *ctx, const float *at, int64_t count) {
  float *values = common_floats(count);
  can_table->copy(ctx, values, at, (size_t)count * sizeof(float), 2);
  return values;
}
static void can_write(luna_ctx *ctx, float *at, const float *values, int64_t count) {
  if (count) can_table->copy(ctx, at, values, (size_t)count * sizeof(float), 1);
}
static luna_tensor *can_owner(luna_tensor *t) { return t && t->base ? t->base : t; }
static int can_same(const luna_op *op, int i) { /* bits of the inputs that are one tensor with it */
  int same = 0;
  for (int j = 0; j < op->inputs; j++) if (can_owner(op->in[j]) == can_owner(op->in[i])) same |= 1 << j;
  return same;
}

/* the floats around a backward pass: of results' gradients, what the op keeps, and inputs' gradients as they were */
typedef struct can_state {
  float *out[2], *kept, *in[LUNA_MAX_INPUTS];
} can_state;
static void can_save(can_state *s, const luna_op *op) {
  memset(s, 0, sizeof *s);
  for (int i = 0; i < op->outputs; i++)
    if (op->out[i]->grad) s->out[i] = can_read(op->ctx, op->out[i]->grad, luna_count(op->out[i]));
  if (op->kept) s->kept = can_read(op->ctx, (const float *)op->kept, (int64_t)(op->kept_size / sizeof(float)));
  for (int i = 0; i < op->inputs; i++)
    if (op->in[i] && op->in[i]->grad)
      s->in[i] = can_read(op->ctx, can_owner(op->in[i])->grad, luna_count(can_owner(op->in[i])));
}
static void can_restore(const can_state *s, const luna_op *op) {
  for (int i = 0; i < op->outputs; i++)
    if (s->out[i]) can_write(op->ctx, op->out[i]->grad, s->out[i], luna_count(op->out[i]));
  if (s->kept) can_write(op->ctx, (float *)op->kept, s->kept, (int64_t)(op->kept_size / sizeof(float)));
  for (int i = 0; i < op->inputs; i++)
    if (s->in[i]) can_write(op->ctx, can_owner(op->in[i])->grad, s->in[i], luna_count(can_owner(op->in[i])));
}
static void can_free(const can_state *s) {
  for (int i = 0; i < 2; i++) free(s->out[i]);
  for (int i = 0; i < LUNA_MAX_INPUTS; i++) free(s->in[i]);
  free(s->kept);
}
/* sets inputs' gradients, after can_restore */
static void can_fill(const can_state *s, const luna_op *op, int bits, float value) {
  for (int i = 0; i < op->inputs; i++) {
    if (!s->in[i] || !(bits >> i & 1)) continue;
    const int64_t count = luna_count(can_owner(op->in[i]));
    float *values = common_floats(count);
    for (int64_t j = 0; j < count; j++) values[j] = value;
    can_write(op->ctx, can_owner(op->in[i])->grad, values, count);
    free(values);
  }
}
/* runs backward, and gives what the inputs' gradients are then */
static luna_status can_run(luna_op *op, int sets, can_state *now) {
  op->sets = sets;
  const luna_status status = can_table->op[op->kind].backward(op);
  op->sets = 0;
  can_save(now, op);
  return status;
}
/* whether a[i] == b[i] + more[i] + held within `limit`, or 0 for exactly */
static bool can_equal(const float *a, const float *b, const float *more, float held, int64_t count, double limit) {
  for (int64_t i = 0; i < count; i++) {
    const double other = more ? (double)more[i] : 0, size = fabs((double)b[i]) + fabs(other) + (double)held;
    if (!(fabs((double)a[i] - ((double)b[i] + other + (double)held)) <= limit * size)) return false;
  }
  return true;
}

/* Whether input i's gradient, and that of the inputs in `others`, can lie where the result's does. alone: made apart */
static bool can_in_place(luna_op *op, int i, int others, const can_state *before, const can_state *alone) {
  float *grad[LUNA_MAX_INPUTS];
  can_state now;
  can_restore(before, op);
  can_fill(before, op, 255 & ~((1 << i) | others), 0);
  for (int j = 0; j < op->inputs; j++) grad[j] = op->in[j] ? op->in[j]->grad : NULL;
  for (int j = 0; j < op->inputs; j++) if (j == i || (others >> j & 1)) op->in[j]->grad = op->out[0]->grad;
  can_run(op, 0, &now);
  for (int j = 0; j < op->inputs; j++) if (op->in[j]) op->in[j]->grad = grad[j];
  const float *more = NULL;
  bool good = true;
  for (int j = 0; j < op->inputs; j++) {
    if (others >> j & 1) more = can_owner(op->in[j]) != op->in[i] ? alone->in[j] : NULL;
    else if (j != i && now.in[j])
      good = good && can_equal(now.in[j], alone->in[j], NULL, 0, luna_count(can_owner(op->in[j])), 0);
  }
  good = good && can_equal(now.out[0], alone->in[i], more, 0, luna_count(op->out[0]), more ? 1e-5 : 0);
  can_free(&now);
  return good;
}

static luna_status can_backward(luna_op *op) {
  const int can = can_table->op[op->kind].can;
  can_state before, alone, now;
  int single = 0, whole = 0;
  if (op->kind == LUNA_OP_CUSTOM) return can_table->op[op->kind].backward(op);
  can_save(&before, op);
  for (int i = 0; i < op->inputs; i++) {
    if (op->in[i]) can_inputs[op->kind] |= 1 << i;
    if (!before.in[i] || luna_count(op->in[i]) == 0) continue;
    if (!op->in[i]->base && can_same(op, i) == 1 << i) single |= 1 << i;
    if (!op->in[i]->base && luna_count(op->in[i]) == luna_count(op->out[0])) whole |= 1 << i;
  }
  can_fill(&before, op, 255, 0);
  can_run(op, 0, &alone);
  can_restore(&before, op);
  can_fill(&before, op, 255, CAN_HELD);
  can_run(op, 0, &now);
  for (int i = 0; i < op->inputs; i++)
    CHECK(!now.in[i] || can_equal(now.in[i], alone.in[i], NULL, CAN_HELD, luna_count(can_owner(op->in[i])), 1e-5),
          "%s: backward does not add to input %d's gradient", luna_op_name(op->kind), i);
  can_free(&now);
  can_restore(&before, op);
  can_fill(&before, op, 255, 0);
  can_fill(&before, op, single, NAN);
  can_run(op, single, &now);
  for (int i = 0; i < op->inputs; i++) {
    if (!now.in[i]) continue;
    const bool equal = can_equal(now.in[i], alone.in[i], NULL, 0, luna_count(can_owner(op->in[i])), 0);
    if (!(single >> i & 1) || (can & LUNA_SETS_GRAD(i)))
      CHECK(equal, "%s: backward does not set input %d's gradient", luna_op_name(op->kind), i);
    if (single >> i & 1) (equal ? can_met : can_not)[op->kind] |= LUNA_SETS_GRAD(i);
  }
  can_free(&now);
  for (int i = 0; i < op->inputs && op->out[0]->grad; i++) {
    const int same = can_same(op, i) & ~(1 << i);
    if (!(whole >> i & 1)) continue;
    if (!same) {
      const bool good = can_in_place(op, i, 0, &before, &alone);
      CHECK(good || !(can & LUNA_GRAD_IN_PLACE(i)), "%s: input %d's gradient cannot lie where the result's does",
            luna_op_name(op->kind), i);
      (good ? can_met : can_not)[op->kind] |= LUNA_GRAD_IN_PLACE(i);
    }
    for (int j = 0; j < op->inputs && (can & LUNA_GRAD_IN_PLACE(i)); j++) {
      if (!(can & LUNA_ADDS_IN_PLACE(j)) || !(whole >> j & 1) || (same & ~(1 << j))) continue;
      CHECK(can_in_place(op, i, 1 << j, &before, &alone),
            "%s: the gradient of inputs %d and %d cannot lie where the result's does",
            luna_op_name(op->kind), i, j);
      can_met[op->kind] |= LUNA_ADDS_IN_PLACE(j);
    }
  }
  can_restore(&before, op);
  can_free(&before);
  can_free(&alone);
  return can_table->op[op->kind].backward(op);
}

static luna_status can_forward(luna_op *op) {
  const luna_status status = can_table->op[op->kind].forward(op);
  const int64_t count = luna_count(op->out[0]);
  luna_tensor *x = op->in[0];
  if (status != LUNA_OK || !(can_table->op[op->kind].can & LUNA_FORWARD_IN_PLACE)) return status;
  if (luna_count(x) != count || can_same(op, 0) != 1) return status;
  float *y = can_read(op->ctx, op->out[0]->data, count), *values = can_read(op->ctx, x->data, count), *data = x->data;
  can_write(op->ctx, op->out[0]->data, values, count);
  free(values);
  x->data = op->out[0]->data;
  const luna_status again = can_table->op[op->kind].forward(op);
  x->data = data;
  values = can_read(op->ctx, op->out[0]->data, count);
  CHECK(memcmp(y, values, (size_t)count * sizeof(float)) == 0, "%s: forward cannot write where its first input lies",
        luna_op_name(op->kind));
  can_met[op->kind] |= LUNA_FORWARD_IN_PLACE;
  free(y), free(values);
  return again;
}

static void can_check(const luna_backend *table, const char *skip) {
  can_table = table;
  can_probe = *table;
  memset(can_met, 0, sizeof can_met);
  memset(can_not, 0, sizeof can_not);
  memset(can_inputs, 0, sizeof can_inputs);
  for (int kind = 0; kind < LUNA_OP_COUNT; kind++) {
    can_probe.op[kind].can = 0;
    if (table->op[kind].forward) can_probe.op[kind].forward = can_forward, can_probe.op[kind].backward = can_backward;
  }
  for (int i = 0; i < OP_CASES; i++)
    for (int v = 0; v < op_cases[i].variants && !(skip && strcmp(op_cases[i].name, skip) == 0); v++) {
      if (!op_case_applies(&op_cases[i], table)) break;
      trial plain, probed;
      memset(&plain, 0, sizeof plain);
      memset(&probed, 0, sizeof probed);
      plain.options.threads = probed.options.threads = 1;
      plain.options.backend = table;
      probed.options.backend = &can_probe;
      if (CHECK(trial_run(&plain, &op_cases[i], v, true) && trial_run(&probed, &op_cases[i], v, true), "%s: %s%s",
                op_cases[i].name, plain.error, probed.error))
        for (int k = 0; k < plain.inputs; k++)
          CHECK(can_equal(plain.input[k].gradient, probed.input[k].gradient, NULL, 0, plain.input[k].count, 0),
                "%s, variant %d: the gradient of input %d is another where nothing is set or in place",
                    op_cases[i].name,
                v, k);
      trial_free(&plain);
      trial_free(&probed);
    }
  for (int kind = 0; kind < LUNA_OP_COUNT; kind++) {
    const int sets = LUNA_SETS_GRAD(LUNA_MAX_INPUTS) - 1, all = table->op[kind].can;
    const int can = (all & sets) == sets ? all & (~sets | can_inputs[kind]) : all; /* any number of inputs */
    const int lacks = can_met[kind] & (LUNA_ADDS_IN_PLACE(0) - 1) & ~can_not[kind] & ~can;
    CHECK((can & ~can_met[kind]) == 0, "%s: no case shows that it can do %x", luna_op_name((luna_op_kind)kind),
          (unsigned)(can & ~can_met[kind]));
    CHECK(lacks == 0, "%s: the table does not say that it can do %x", luna_op_name((luna_op_kind)kind),
          (unsigned)lacks);
  }
}
#endif
