/* The causal product and causal Luna attention, forward and backward, against loops in double and the reference;
   streaming in pieces of any size, also a billion tokens on; exact causality whatever a token is. The same bits for any
   number of threads and any place in the batch. */
#include "test.h"
#define LUNA_IMPLEMENTATION
#include "luna.h"
#include "common.h"
#include "kernels.h"

static char sentence[200]; /* what is being tried */

static void run_product(const li_causal *c, const li_kernels *table, int64_t threads, bool backward) {
  const li_parallel parallel = kernels_parallel(threads);
  kernels_scratch s = kernels_scratch_open(li_causal_scratch(table, c, threads, backward));
  if (backward) li_run_causal_backward(table, c, &parallel, s.at);
  else li_run_causal(table, c, &parallel, s.at);
  kernels_scratch_close(&s);
}
static void run_luna(const li_causal_luna *c, const li_kernels *table, int64_t threads, bool backward) {
  const li_parallel parallel = kernels_parallel(threads);
  kernels_scratch s = kernels_scratch_open(li_causal_luna_scratch(table, c, threads, backward));
  if (backward) li_run_causal_luna_backward(table, c, &parallel, s.at);
  else li_run_causal_luna(table, c, &parallel, s.at);
  kernels_scratch_close(&s);
}
static void product_both(const void *call, const li_kernels *table, int64_t threads) {
  run_product((const li_causal *)call, table, threads, false);
  run_product((const li_causal *)call, table, threads, true);
}
static void luna_both(const void *call, const li_kernels *table, int64_t threads) {
  run_luna((const li_causal_luna *)call, table, threads, false);
  run_luna((const li_causal_luna *)call, table, threads, true);
}

/* ---- references: one head, dense, in double ---- */
static double *pull(const float *from, int64_t row, int64_t n, int64_t d) {
  double *to = doubles(n * d);
  for (int64_t i = 0; i < n * d; i++) to[i] = (double)from[i / d * row + i % d];
  return to;
}
static void push(double *to, int64_t row, int64_t n, int64_t d, const double *from, bool add) {
  for (int64_t i = 0; i < n * d; i++) to[i / d * row + i % d] = (add ? to[i / d * row + i % d] : 0) + from[i];
}
/* f = eq. 7 of x, y [n, p] and z [n, q]; f may be null, and so may df and with it the gradients */
static void product_exact(int64_t n, int64_t p, int64_t q, const double *x, const double *y, const double *z, double *f,
                          const double *df,
                          double *dx, double *dy, double *dz) {
  double *state = doubles(p * q), *later = doubles(p * q);
  for (int64_t t = 0; t < n; t++)
    for (int64_t i = 0; i < p; i++)
      for (int64_t j = 0; j < q; j++) {
        state[i * q + j] += y[t * p + i] * z[t * q + j];
        if (f) f[t * q + j] += x[t * p + i] * state[i * q + j] / (double)(t + 1);
        if (df) dx[t * p + i] += df[t * q + j] * state[i * q + j] / (double)(t + 1);
      }
  for (int64_t t = n; df && t-- > 0;)
    for (int64_t i = 0; i < p; i++)
      for (int64_t j = 0; j < q; j++) {
        later[i * q + j] += x[t * p + i] * df[t * q + j] / (double)(t + 1);
        dy[t * p + i] += z[t * q + j] * later[i * q + j];
        dz[t * q + j] += y[t * p + i] * later[i * q + j];
      }
  free(state), free(later);
}

/* ---- the product ---- */
enum { P_OUT, P_X, P_Y, P_Z };
static void product_reference(const li_causal *c, int64_t b, int64_t h, double **want) {
  const int64_t n = c->rows, p = c->dim, q = c->value_dim, xy_at = b * c->xy_batch + h * c->xy_head,
      z_at = b * c->z_batch + h * c->z_head;
  double *x = pull(c->x + xy_at, c->xy_row, n, p), *y = pull(c->y + xy_at, c->xy_row, n, p),
      *z = pull(c->z + z_at, c->z_row, n, q);
  double *df = pull(c->grad_out + z_at, c->z_row, n, q), *f = doubles(n * q), *dx = doubles(n * p),
      *dy = doubles(n * p),
    *dz = doubles(n * q);
  product_exact(n, p, q, x, y, z, f, df, dx, dy, dz);
  push(want[P_OUT] + z_at, c->z_row, n, q, f, false);
  push(want[P_X] + xy_at, c->xy_row, n, p, dx, true);
  push(want[P_Y] + xy_at, c->xy_row, n, p, dy, true);
  push(want[P_Z] + z_at, c->z_row, n, q, dz, true);
  free(x), free(y), free(z), free(df), free(f), free(dx), free(dy), free(dz);
}
static void check_product(int64_t batch, int64_t rows, int64_t heads, int64_t dim, int64_t value_dim) {
  li_causal c;
  outputs o;
  memset(&c, 0, sizeof c), memset(&o, 0, sizeof o);
  c.batch = batch, c.rows = rows, c.heads = heads, c.dim = dim, c.value_dim = value_dim;
  c.xy_head = dim + dim % 2, c.xy_row = heads * c.xy_head + 1, c.xy_batch = rows * c.xy_row; /* gaps in some */
  c.z_head = value_dim, c.z_row = heads * value_dim + value_dim % 3, c.z_batch = rows * c.z_row;
  const int64_t xy = batch * c.xy_batch, zs = batch * c.z_batch;
  float *x = random_floats(xy, 1), *y = random_floats(xy, 1), *z = random_floats(zs, 1),
      *grad_out = random_floats(zs, 1);
  for (int64_t i = 0; i < xy; i++) y[i] += 0.2f; /* sums that grow */
  c.x = x, c.y = y, c.z = z, c.grad_out = grad_out;
  c.out = outputs_add(&o, "out", false, zs);
  c.grad_x = outputs_add(&o, "grad_x", true, xy);
  c.grad_y = outputs_add(&o, "grad_y", true, xy);
  c.grad_z = outputs_add(&o, "grad_z", true, zs);
  for (int64_t b = 0; b < batch; b++)
    for (int64_t h = 0; h < heads; h++) product_reference(&c, b, h, o.want);
  snprintf(sentence, sizeof sentence, "product, batch %d, rows %d, heads %d, dim %d, %d", (int)batch, (int)rows,
           (int)heads, (int)dim,
           (int)value_dim);
  outputs_check(&o, sentence, product_both, &c);
  float *out = c.out = zeros(zs), *reference = zeros(zs); /* the public call, without scratch, takes these strides */
  const luna_status status = luna_causal_product_f32(&c);
  c.out = reference;
  li_run_causal(&li_kernels_reference, &c, NULL, NULL);
  CHECK(heads * dim * value_dim == 0 || (status == LUNA_OK && memcmp(out, reference, (size_t)zs * sizeof(float)) == 0),
        "%s: the public call", sentence);
  release(out), release(reference);
  outputs_close(&o), release(x), release(y), release(z), release(grad_out);
}

/* ---- causal Luna ---- */
enum { L_OUT, L_W, L_Q, L_K, L_V, L_S };
/* dims, slots: floats of q, of s */
typedef struct luna_call { li_causal_luna c; float *q, *k, *v, *s; int64_t dims, slots; } luna_call;

static luna_call luna_open_call(int64_t batch, int64_t rows, int64_t heads, int64_t dim, int64_t slots, int omega) {
  luna_call l;
  memset(&l, 0, sizeof l);
  l.dims = batch * rows * heads * dim, l.slots = batch * rows * heads * slots;
  l.c.q = l.q = random_floats(l.dims, 1), l.c.k = l.k = random_floats(l.dims, 1),
      l.c.v = l.v = random_floats(l.dims, 1), l.c.s = l.s = random_floats(l.slots, 1);
  for (int64_t i = 0; i < l.dims; i++) l.q[i] += 0.2f, l.k[i] += 0.3f, l.v[i] += 0.1f;
  l.c.batch = batch, l.c.rows = rows, l.c.heads = heads, l.c.head_dim = dim, l.c.slots = slots;
  l.c.omega = (luna_activation)omega;
  l.c.scale = (float)(2 / sqrt((double)dim));
  return l;
}
static void luna_close_call(const luna_call *l) { release(l->q), release(l->k), release(l->v), release(l->s); }

/* one head of one batch row, of whose slots `real` count; the weights of the others are 0 */
static void luna_reference(const li_causal_luna *c, int64_t b, int64_t h, int64_t real, double **want) {
  const int64_t n = c->rows, d = c->head_dim, l = c->slots, row_d = c->heads * d, row_l = c->heads * l,
      at = b * n * row_d + h * d,
    s_at = b * n * row_l + h * l;
  double *q = pull(c->q + at, row_d, n, d), *k = pull(c->k + at, row_d, n, d), *v = pull(c->v + at, row_d, n, d),
    *s = pull(c->s + s_at, row_l, n, real);
  double *g = pull(c->grad_out + at, row_d, n, d), *a = doubles(n * real), *w = doubles(n * real),
      *out = doubles(n * d),
    *none = doubles(n * l);
  double *dq = doubles(n * d), *dk = doubles(n * d), *dv = doubles(n * d), *da = doubles(n * real),
      *dw = doubles(n * real);
  for (int64_t i = 0; i < n * d; i++) q[i] *= (double)c->scale;
  for (int64_t i = 0; i < n * real; i++) a[i] = naive_activation(c->omega, s[i]);
  product_exact(n, d, real, q, k, a, w, NULL, NULL, NULL, NULL);
  for (int64_t t = 0; t < n; t++) (void)naive_softmax(w + t * real, real);
  product_exact(n, real, d, w, a, v, out, g, dw, da, dv);
  for (int64_t t = 0; t < n; t++) {
    double mean = 0;
    for (int64_t j = t * real; j < (t + 1) * real; j++) mean += w[j] * dw[j];
    for (int64_t j = t * real; j < (t + 1) * real; j++) dw[j] = w[j] * (dw[j] - mean);
  }
  product_exact(n, d, real, q, k, a, NULL, dw, dq, dk, da);
  for (int64_t i = 0; i < n * d; i++) dq[i] *= (double)c->scale;
  for (int64_t i = 0; i < n * real; i++) da[i] *= naive_slope(c->omega, s[i]);
  push(want[L_W] + s_at, row_l, n, l, none, false);
  push(want[L_OUT] + at, row_d, n, d, out, false), push(want[L_W] + s_at, row_l, n, real, w, false);
  push(want[L_Q] + at, row_d, n, d, dq, true), push(want[L_K] + at, row_d, n, d, dk, true),
      push(want[L_V] + at, row_d, n, d, dv, true);
  push(want[L_S] + s_at, row_l, n, real, da, true);
  free(q), free(k), free(v), free(s), free(g), free(a), free(w), free(out), free(none), free(dq), free(dk), free(dv),
      free(da), free(dw);
}
/* the last sequence alone: the same bits */
static void luna_alone(const li_causal_luna *all, const outputs *o) {
  const int64_t rows = all->rows * all->heads, first = (all->batch - 1) * rows, d = all->head_dim, l = all->slots;
  float *out = zeros(rows * d), *w = zeros(rows * l);
  li_causal_luna c = *all;
  c.batch = 1, c.q += first * d, c.k += first * d, c.v += first * d, c.s += first * l, c.out = out, c.kept = w;
  if (c.lengths) c.lengths += all->batch - 1;
  run_luna(&c, kernels, 1, false);
  CHECK(same(out, o->got[L_OUT] + first * d, rows * d) && same(w, o->got[L_W] + first * l, rows * l),
        "%s, %s: the last sequence alone has other bits", kernels_name, sentence);
  release(out), release(w);
}
static void check_luna(int64_t batch, int64_t rows, int64_t heads, int64_t dim, int64_t slots, int omega, bool masked) {
  luna_call l = luna_open_call(batch, rows, heads, dim, slots, omega);
  int32_t *lengths = (int32_t *)common_alloc((size_t)batch * sizeof(int32_t));
  float *grad_out = random_floats(l.dims, 1);
  outputs o;
  memset(&o, 0, sizeof o);
  for (int64_t b = 0; b < batch; b++) {
    lengths[b] = (int32_t)(b == 1 ? 0 : b == 2 ? slots + 5 : 1 + (b * 7 + slots / 2) % slots);
    for (int64_t i = b * rows * heads * slots; i < (b + 1) * rows * heads * slots && masked; i++)
      if (i % slots >= lengths[b]) l.s[i] = i % 2 ? (float)NAN : 3e38f;
  }
  if (masked) l.c.lengths = lengths;
  l.c.grad_out = grad_out;
  l.c.out = outputs_add(&o, "out", false, l.dims), l.c.kept = outputs_add(&o, "weights", false, l.slots);
  l.c.grad_q = outputs_add(&o, "grad_q", true, l.dims), l.c.grad_k = outputs_add(&o, "grad_k", true, l.dims);
  l.c.grad_v = outputs_add(&o, "grad_v", true, l.dims), l.c.grad_s = outputs_add(&o, "grad_s", true, l.slots);
  for (int64_t b = 0; b < batch; b++)
    for (int64_t h = 0; h < heads; h++)
      luna_reference(&l.c, b, h, masked && lengths[b] < slots ? lengths[b] : slots, o.want);
  snprintf(sentence, sizeof sentence, "batch %d, rows %d, heads %d, dim %d, slots %d%s, activation %d", (int)batch,
           (int)rows, (int)heads,
           (int)dim, (int)slots, masked ? ", some masked" : "",
           omega);
  outputs_check(&o, sentence, luna_both, &l.c);
  if (batch > 1) luna_alone(&l.c, &o);
  outputs_close(&o), release(grad_out), free(lengths), luna_close_call(&l);
}

/* ---- streaming, batch 1: rows in pieces of sizes[0], sizes[1], ... again and again ---- */
typedef struct state { double *ka, *av; } state; /* av lies behind ka */
static void stream(const li_causal_luna *all, const int64_t *sizes, int count, float *out, state *s) {
  const int64_t d = all->heads * all->head_dim, l = all->heads * all->slots;
  int64_t at = 0;
  for (int i = 0; at < all->rows; i++) {
    li_causal_luna c = *all;
    c.rows = sizes[i % count] < all->rows - at ? sizes[i % count] : all->rows - at;
    c.q += at * d, c.k += at * d, c.v += at * d, c.s += at * l, c.out = out + at * d, c.kept = NULL;
    c.position = all->position + at, c.state = s->ka;
    run_luna(&c, kernels, 1 + i % 2, false);
    at += c.rows;
  }
}
/* ||a - b|| / ||b||; slots that are masked have no state */
static double state_error(const double *a, const double *b, int64_t n) {
  double difference = 0, size = 0;
  for (int64_t i = 0; i < n; i++)
    if (b[i] == b[i]) difference += (a[i] - b[i]) * (a[i] - b[i]), size += b[i] * b[i];
  return sqrt(difference / size);
}
static void check_stream(int64_t rows, int64_t heads, int64_t dim, int64_t slots, int32_t length) {
  const int64_t whole[1] = {rows}, odd[5] = {1, 63, 64, 17, 130}, one[1] = {1}, *const sizes[3] = {whole, odd, one},
      counts[3] = {1, 5, 1};
  luna_call l = luna_open_call(1, rows, heads, dim, slots, LUNA_ACTIVATION_SOFTPLUS2);
  const int64_t n = heads * dim * slots, at = (rows - 1) * heads * dim;
  float *expected = zeros(l.dims), *out[3];
  state s[3];
  if (length) l.c.lengths = &length;
  l.c.out = expected;
  run_luna(&l.c, kernels, 1, false);
  for (int i = 0; i < 3; i++) {
    s[i].ka = doubles(2 * n), s[i].av = s[i].ka + n, out[i] = zeros(l.dims);
    for (int64_t j = 0; j < n; j++) s[i].ka[j] = s[i].av[j] = NAN; /* at position 0 a state is set, never read */
    stream(&l.c, sizes[i], (int)counts[i], out[i], &s[i]);
    const double error = test_error(out[i], expected, (size_t)l.dims),
        last = test_error(out[i] + at, expected + at, (size_t)(heads * dim));
    CHECK(error <= 1e-6 && last <= 1e-6,
          "%s: a stream of %d rows in pieces of %d, ...: error %.3g, of the last row %.3g", kernels_name,
          (int)rows, (int)sizes[i][0], error, last);
    const double ka = state_error(s[i].ka, s[0].ka, n), av = state_error(s[i].av, s[0].av, n);
    CHECK(ka <= 1e-6 && av <= 1e-6, "%s: after %d rows in pieces of %d, ... the state is off by %.3g and %.3g",
          kernels_name, (int)rows,
          (int)sizes[i][0], ka, av);
  }
  CHECK(same(out[0], expected, l.dims), "%s: a stream of %d rows at once has other bits than no stream", kernels_name,
        (int)rows);
  for (int i = 0; i < 3; i++) free(s[i].ka), release(out[i]);
  release(expected), luna_close_call(&l);
}

/* far into a stream: the state, and the little by which 300 more tokens change it, beside double */
enum { FAR_ROWS = 300, FAR_DIM = 16, FAR_SLOTS = 8, FAR_STATE = FAR_DIM * FAR_SLOTS };
static void far_reference(const li_causal_luna *c, state *s, double *out) {
  for (int64_t t = 0; t < FAR_ROWS; t++) {
    const double count = (double)c->position + (double)t + 1;
    double a[FAR_SLOTS], u[FAR_SLOTS] = {0};
    for (int64_t j = 0; j < FAR_SLOTS; j++) a[j] = naive_activation(c->omega, (double)c->s[t * FAR_SLOTS + j]);
    for (int64_t i = 0; i < FAR_DIM; i++)
      for (int64_t j = 0; j < FAR_SLOTS; j++) {
        double *ka = &s->ka[i * FAR_SLOTS + j], *av = &s->av[j * FAR_DIM + i];
        *ka += ((double)c->k[t * FAR_DIM + i] * a[j] - *ka) / count;
        *av += ((double)c->v[t * FAR_DIM + i] * a[j] - *av) / count;
        u[j] += (double)c->scale * (double)c->q[t * FAR_DIM + i] * *ka;
      }
    (void)naive_softmax(u, FAR_SLOTS);
    for (int64_t i = 0; i < FAR_DIM; i++) {
      out[t * FAR_DIM + i] = 0;
      for (int64_t j = 0; j < FAR_SLOTS; j++) out[t * FAR_DIM + i] += u[j] * s->av[j * FAR_DIM + i];
    }
  }
}
static void check_far(const int64_t *sizes, int count, int64_t position) {
  luna_call l = luna_open_call(1, FAR_ROWS, 1, FAR_DIM, FAR_SLOTS, LUNA_ACTIVATION_SOFTPLUS2);
  float *out = zeros(l.dims), *want_out = zeros(l.dims);
  double *exact = doubles(l.dims), before[FAR_STATE];
  state got = {doubles(2 * FAR_STATE), NULL}, want = {doubles(2 * FAR_STATE), NULL};
  got.av = got.ka + FAR_STATE, want.av = want.ka + FAR_STATE;
  for (int i = 0; i < FAR_STATE; i++) {
    want.ka[i] = got.ka[i] = common_number(3, (uint64_t)i);
    before[i] = want.av[i] = got.av[i] = common_number(4, (uint64_t)i);
  }
  for (int64_t i = 0; i < l.dims; i++) l.k[i] += 5, l.v[i] += 5;
  l.c.position = position;
  stream(&l.c, sizes, count, out, &got);
  far_reference(&l.c, &want, exact);
  for (int64_t i = 0; i < l.dims; i++) want_out[i] = (float)exact[i];
  const double ka = state_error(got.ka, want.ka, FAR_STATE), max = position > 100000 ? 1e-12 : 1e-6;
  for (int i = 0; i < FAR_STATE; i++) got.av[i] -= before[i], want.av[i] -= before[i];
  const double change = state_error(got.av, want.av, FAR_STATE), error = test_error(out, want_out, (size_t)l.dims);
  CHECK(error <= 1e-6 && ka <= max && change <= 5e-6,
        "%s: from token %lld on, pieces of %d: error %.3g, of the state %.3g over %.3g, of its change %.3g",
            kernels_name,
          (long long)position,
        (int)sizes[0], error, ka, max, change);
  release(out), release(want_out), free(exact), free(got.ka), free(want.ka),
      luna_close_call(&l);
}

/* ---- causality: a token, in one head, changes no bit before it nor in the other head; a NaN is not lost ---- */
enum { FACTORS = 7 }; /* x, y, z of the product; q, k, v, s of Luna */
typedef struct causality {
  int64_t n, d, l;
  li_causal p;
  luna_call u;
  float *factor[FACTORS], *product, *product2, *out, *out2, *w, *w2; /* clean, and with an odd token */
  int wrong, lost;
} causality;

static void causality_compare(causality *c, int factor, int64_t t, bool is_nan, int64_t threads) {
  const int64_t row = 2 * c->d, width = factor == 6 ? c->l : c->d;
  const float *was = factor < 3 ? c->product : c->out, *is = factor < 3 ? c->product2 : c->out2;
  if (factor < 3) run_product(&c->p, kernels, threads, false);
  else run_luna(&c->u.c, kernels, threads, false);
  c->wrong += !same(was, is, t * row) || (factor >= 3 && !same(c->w, c->w2, t * 2 * c->l));
  for (int64_t r = 0; r < c->n; r++) c->wrong += !same(was + r * row + c->d, is + r * row + c->d, c->d);
  const float seen = is[t * row + (width == c->d ? width / 2 : c->d / 2)];
  if (is_nan && (factor < 3 || c->l > 1)) c->lost += seen == seen; /* a softmax over one slot is 1 */
}
static void causality_try(causality *c, int factor, int64_t t, float odd, bool all) {
  const int64_t width = factor == 6 ? c->l : c->d;
  float *row = c->factor[factor] + t * 2 * width, *before = copied(row, width);
  if (all) fill(row, width, odd);
  else row[width / 2] = odd;
  causality_compare(c, factor, t, odd != odd, 1);
  causality_compare(c, factor, t, odd != odd, 2);
  memcpy(row, before, (size_t)width * sizeof(float));
  release(before);
}
/* tiny: values so small that products of them vanish, where a zero's sign could change */
static void causality_check(int64_t n, int64_t d, int64_t l, bool tiny) {
  const float odd[6] = {0.625f, 1e38f, -3e38f, (float)INFINITY, -(float)INFINITY, (float)NAN};
  const int64_t rows[5] = {0, 1, 40, 63, 70};
  causality c;
  memset(&c, 0, sizeof c);
  c.n = n, c.d = d, c.l = l, c.u = luna_open_call(1, n, 2, d, l, LUNA_ACTIVATION_SOFTPLUS2);
  for (int64_t i = 0; i < c.u.dims && tiny; i++) c.u.v[i] *= 1e-38f, c.u.q[i] *= 1e-22f, c.u.k[i] *= i % 2 ? 0 : 1e-22f;
  float *const factors[FACTORS] = {copied(c.u.q, c.u.dims), copied(c.u.k, c.u.dims), copied(c.u.v, c.u.dims), c.u.q,
                                   c.u.k, c.u.v, c.u.s};
  memcpy(c.factor, factors, sizeof factors);
  c.product = zeros(c.u.dims), c.product2 = zeros(c.u.dims), c.out = zeros(c.u.dims), c.out2 = zeros(c.u.dims),
      c.w = zeros(c.u.slots),
    c.w2 = zeros(c.u.slots);
  c.p.x = factors[0], c.p.y = factors[1], c.p.z = factors[2], c.p.batch = 1, c.p.rows = n, c.p.heads = 2,
      c.p.dim = c.p.value_dim = d;
  c.p.xy_row = c.p.z_row = 2 * d, c.p.xy_head = c.p.z_head = d;
  c.p.out = c.product, c.u.c.out = c.out, c.u.c.kept = c.w;
  run_product(&c.p, kernels, 1, false), run_luna(&c.u.c, kernels, 1, false);
  c.p.out = c.product2, c.u.c.out = c.out2, c.u.c.kept = c.w2;
  for (int r = 0; r < 5 && rows[r] < n; r++)
    for (int f = 0; f < FACTORS; f++)
      for (int o = 0; o < 6; o++)
        causality_try(&c, f, rows[r], odd[o], false), causality_try(&c, f, rows[r], odd[o], true);
  CHECK(c.wrong == 0 && c.lost == 0,
        "%s: causality of %d rows, dim %d, slots %d%s: %d times what is before or beside a token changed, %d times a "
        "NaN was lost", kernels_name, (int)n, (int)d, (int)l, tiny ? ", tiny values" : "", c.wrong, c.lost);
  float *grads[4] = {zeros(c.u.dims), zeros(c.u.dims), zeros(c.u.dims), zeros(c.u.slots)};
  /* backward too must come to its end */
  c.u.q[n / 2 * d] = (float)NAN, c.u.v[n / 3 * d] = (float)INFINITY, c.u.s[n / 4 * l] = 1e38f;
  c.u.c.grad_out = factors[0], c.u.c.grad_q = grads[0], c.u.c.grad_k = grads[1], c.u.c.grad_v = grads[2],
      c.u.c.grad_s = grads[3];
  luna_both(&c.u.c, kernels, 1);
  for (int i = 0; i < 4; i++) release(grads[i]);
  for (int i = 0; i < 3; i++) release(factors[i]);
  release(c.product), release(c.product2), release(c.out), release(c.out2), release(c.w), release(c.w2),
      luna_close_call(&c.u);
}

/* the same where the kernel goes on from a state of two sequences: nothing before the token, nothing of the other
   sequence and none of its state changes */
static void causality_check_state(int64_t rows, int64_t position) {
  enum { DIM = 24, HEADS = 2, SLOTS = 5, STATE = DIM * SLOTS };
  const float odd[4] = {0.625f, 1e38f, (float)INFINITY, (float)NAN};
  const int64_t row[4] = {DIM, DIM, DIM, HEADS * SLOTS}, size = rows * DIM;
  float *in[4], *changed[4], *before = zeros(2 * size), *after = zeros(2 * size);
  double *state = doubles(8 * STATE), *start = state + 4 * STATE; /* means of k a and of a v, of two sequences each */
  li_causal_luna c;
  memset(&c, 0, sizeof c);
  c.batch = 2, c.rows = rows, c.heads = HEADS, c.head_dim = DIM / HEADS, c.slots = SLOTS, c.scale = 0.4f;
  c.omega = LUNA_ACTIVATION_SOFTPLUS2, c.position = position;
  c.state = state;
  for (int i = 0; i < 4; i++) in[i] = random_floats(2 * rows * row[i], 1), changed[i] = zeros(2 * rows * row[i]);
  for (int i = 0; i < 4 * STATE; i++) start[i] = position ? common_number(30, (uint64_t)i) : 0;
  for (int64_t t = -1; t < rows; t += t == 1 && rows > 66 ? 61 : 1)
    for (int kind = 0; kind < (t < 0 ? 1 : 5); kind++) {
      bool kept = true;
      for (int i = 0; i < 4; i++) {
        float *token = changed[i] + (rows + t) * row[i];
        memcpy(changed[i], in[i], (size_t)(2 * rows * row[i]) * sizeof(float));
        if (t >= 0 && kind < 4) fill(token, row[i], odd[kind]);
        else if (t >= 0) token[row[i] / 2] = (float)NAN;
      }
      memcpy(state, start, 4 * STATE * sizeof(double));
      c.q = changed[0], c.k = changed[1], c.v = changed[2], c.s = changed[3], c.out = t < 0 ? before : after;
      run_luna(&c, kernels, 1, false);
      if (t < 0) continue;
      for (int i = 0; i < STATE; i++) kept = kept && isfinite(state[i]) && isfinite(state[2 * STATE + i]);
      CHECK(same(before, after, size) && kept, "%s: from token %lld on, %d rows: token %d of one sequence, odd in way "
            "%d, reached another", kernels_name, (long long)position, (int)rows, (int)t, kind);
      CHECK(same(before + size, after + size, t * DIM), "%s: from token %lld on, %d rows: token %d, odd in way %d, "
            "reached an earlier one", kernels_name, (long long)position, (int)rows, (int)t, kind);
    }
  for (int i = 0; i < 4; i++) release(in[i]), release(changed[i]);
  release(before), release(after), free(state);
}

int main(void) {
  const int64_t rows[9] = {0, 1, 2, 63, 64, 65, 129, 200, 515}, positions[3] = {1000, 1000000000, (int64_t)1 << 40},
      one[1] = {1},
    mixed[4] = {64, 1, 100, 7}, whole[1] = {1000};
  const int omegas[3] = {LUNA_ACTIVATION_SOFTPLUS2, LUNA_ACTIVATION_SOFTPLUS, LUNA_ACTIVATION_ELU1};
  for (int at = 0; kernels_next(&at);) {
    for (int i = 0; i < 9; i++) {
      if (!test_full() && (at + i) % 3) continue;
      check_product(2, rows[i], 2, 7, 5), check_product(1, rows[i], 3, 16, 33), check_product(1, rows[i], 1, 1, 1),
        check_product(1, rows[i], 1, 65, 70);
      check_luna(4, rows[i], 2, 7, 5, omegas[i % 3], false), check_luna(4, rows[i], 2, 7, 5, omegas[i % 3], true),
        check_luna(5, rows[i], 1, 16, 16, omegas[(i + 1) % 3], true);
      check_luna(1, rows[i], 3, 32, 16, LUNA_ACTIVATION_SOFTPLUS2, false),
          check_luna(1, rows[i], 1, 1, 1, LUNA_ACTIVATION_SOFTPLUS2, false),
        check_luna(1, rows[i], 1, 65, 66, LUNA_ACTIVATION_ELU1, true);
    }
    check_product(0, 5, 2, 3, 3), check_product(1, 5, 0, 3, 3), check_product(1, 70, 2, 0, 3),
        check_product(1, 70, 2, 3, 0);
    check_luna(1, 100, 1, 300, 16, LUNA_ACTIVATION_SOFTPLUS2, false),
        check_luna(1, 130, 1, 16, 300, LUNA_ACTIVATION_SOFTPLUS2, true),
      check_luna(1, 5000, 1, 24, 8, LUNA_ACTIVATION_SOFTPLUS2, false);
    check_stream(300, 2, 16, 8, 0), check_stream(300, 3, 17, 9, 5);
    for (int i = 0; i < 3; i++)
      check_far(one, 1, positions[i]), check_far(mixed, 4, positions[i]), check_far(whole, 1, positions[i]);
    causality_check(100, 16, 8, false), causality_check(100, 7, 1, false), causality_check(130, 20, 17, false),
      causality_check(64, 33, 16, false);
    causality_check(100, 16, 8, true), causality_check(5, 3, 2, true);
    causality_check_state(5, 0), causality_check_state(66, 1000), causality_check_state(130, 1000000000);
  }
  return test_report("causal");
}
