/* The backward pass of luna.h's reference: plain loops from the equations, one row at a time, sums in double. Tests
   compare the gradients of every instruction set with it. luna.h includes this header before its table of kernels where
   LI_BACKWARD_REFERENCE names it, as tests/test.h does, and the Makefile for luna.o. Then contexts of
   LUNA_ISA_REFERENCE train, too. */

/* ---- elementwise ---- */
/* of the scalar pass, which comes later */
LI_INLINE float li_map1_slope_scalar(int kind, float x);
LI_INLINE float li_elementwise1_slope_scalar(int kind, int input, float a, float b, float c, float g);

LI_FN void li_activate_grad_reference(int kind, int64_t n, const float *x, const float *dy, bool add, float *dx) {
  for (int64_t i = 0; i < n; i++) dx[i] = dy[i] * li_map1_slope_scalar(kind, x[i]) + (add ? dx[i] : 0);
}

LI_FN void li_elementwise_slope_reference(const li_elements *e, int input, const float *dy, float *y, bool add) {
  const float *const *x = e->x;
  for (int64_t i = 0; i < e->n; i++)
    y[i] = (add ? y[i] : 0) + li_elementwise1_slope_scalar(e->kind, input, x[0][i * e->step[0]], x[1][i * e->step[1]],
                                                            x[2][i * e->step[2]], dy[i]);
}

/* dx += y (dy - sum of y dy) */
LI_FN void li_softmax_backward_reference(int64_t rows, int64_t n, const float *y, const float *dy, float *dx) {
  for (; rows > 0; rows--, y += n, dy += n, dx += n) {
    const double mean = li_inner(n, y, 1, dy, 1);
    for (int64_t i = 0; i < n; i++) dx[i] += (float)((double)y[i] * ((double)dy[i] - mean));
  }
}

/* dx = rstd (g - mean(g) - xhat mean(g xhat)) (+ dx), g = dy weight, xhat = (x - mean) rstd; rms: without mean(g) */
LI_FN void li_layer_norm_backward_reference(const li_layer_norm *a) {
  for (int64_t row = 0; row < a->rows; row++) {
    const float *x = a->x + row * a->n, *dy = a->dy + row * a->n;
    const double n = (double)a->n, center = (double)a->mean[row], r = (double)a->rstd[row];
    double mean_g = 0, mean_gx = 0;
    for (int64_t i = 0; i < a->n; i++) {
      const double g = (double)dy[i] * (a->weight ? (double)a->weight[i] : 1);
      mean_g += a->rms ? 0 : g / n;
      mean_gx += g * ((double)x[i] - center) * r / n;
    }
    for (int64_t i = 0; i < a->n; i++) {
      const double g = (double)dy[i] * (a->weight ? (double)a->weight[i] : 1), xhat = ((double)x[i] - center) * r;
      float *dx = a->dx + row * a->n + i;
      *dx = (float)(r * (g - mean_g - xhat * mean_gx)) + (a->add ? *dx : 0);
    }
  }
}

/* columns [first, last): dweight += sum over rows of dy xhat, dbias += sum over rows of dy */
LI_FN void li_layer_norm_weights_reference(const li_layer_norm *a, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; i++) {
    double scaled = 0, sum = 0;
    for (int64_t row = 0; row < a->rows; row++) {
      const double g = (double)a->dy[row * a->n + i];
      scaled += g * ((double)a->x[row * a->n + i] - (double)a->mean[row]) * (double)a->rstd[row];
      sum += g;
    }
    if (a->dweight) a->dweight[i] += (float)scaled;
    if (a->dbias) a->dbias[i] += (float)sum;
  }
}

/* grad = factor (softmax(logits) - target) (+ grad) */
LI_FN void li_cross_entropy_backward_reference(const li_cross_entropy *a) {
  for (int64_t row = 0; row < a->rows; row++)
    for (int64_t j = 0; j < a->columns; j++) {
      float *grad = a->grad + row * a->grad_row + j, slope = 0;
      if (a->labels[row] >= 0) {
        slope = li_exp1_scalar(a->logits[row * a->logits_row + j] - a->lse[row]) - a->smoothing / (float)a->classes;
        if (a->labels[row] == a->first + j) slope -= 1 - a->smoothing;
      }
      *grad = a->factor * slope + (a->add ? *grad : 0);
    }
}

LI_FN void li_short_convolution_backward_reference(const li_convolution *a) {
  for (int64_t t = 0; t < a->rows; t++)
    for (int64_t c = 0; c < a->n; c++)
      for (int64_t i = 0; i < a->width; i++) {
        const int64_t later = t + a->width - 1 - i;
        if (later < a->rows) a->dx[t * a->n + c] += a->weight[c * a->width + i] * a->dy[later * a->n + c];
      }
}

/* of channels [first, last) */
LI_FN void li_short_convolution_weights_reference(const li_convolution *a, int64_t first, int64_t last) {
  const int64_t n = a->n, width = a->width;
  for (int64_t c = first; c < last; c++)
    if (a->dweight) {
      for (int64_t i = 0; i < width; i++) {
        double sum = 0;
        for (int64_t t = li_min(a->rows, width - 1 - i); t < a->rows; t++)
          sum += (double)a->dy[t * n + c] * (double)a->x[(t - width + 1 + i) * n + c];
        a->dweight[c * width + i] += (float)sum;
      }
    }
  if (a->dbias) li_sum_rows_reference(li_columns(li_dense(a->dy, a->rows, n), first, last), 1, a->dbias + first);
}

/* ---- softmax attention ---- */
/* y += factor x */
LI_HOT void li_add_scaled(int64_t n, double factor, const float *x, float *y) {
  if (y)
    for (int64_t i = 0; i < n; i++) y[i] += (float)(factor * (double)x[i]);
}

/* y += scale factor x, by bf16 of rounded factor and x */
LI_HOT void li_add_scaled_by(bool bf16, int64_t n, float scale, double factor, const float *x, float *y) {
  if (!bf16) li_add_scaled(n, (double)scale * factor, x, y);
  else if (y)
    for (int64_t i = 0; i < n; i++) y[i] += scale * (li_bf16_of((float)factor) * li_bf16_of(x[i]));
}

/* dP = m (dO . v + dsum), dS = P (dP - sum of P dP), where sum of P dP = dO . O + dsum sum */
LI_FN void li_attention_row_backward(const li_attention *a, const li_head *head, int64_t query) {
  const li_dropout dropout = li_attention_dropout(a);
  const li_span seen = li_seen(a, head, query, query + 1);
  const int64_t q = head->q + query * a->q_row, out = head->out + query * a->out_row,
      stat = head->row + query * a->heads;
  const float *g = a->grad_out + out;
  const bool bf16 = li_attention_bf16(a);
  const double extra = a->grad_sums && li_drops(a) ? (double)a->grad_sums[stat] : 0;
  const double mean = li_inner(a->value_dim, g, 1, a->out + out, 1) + (extra != 0 ? extra * (double)a->sums[stat] : 0) -
                      (a->grad_log_sum_exp ? (double)a->grad_log_sum_exp[stat] : 0);
  for (int64_t j = seen.from; j < seen.to; j++) {
    const int64_t k = head->k + j * a->k_row, v = head->v + j * a->v_row;
    const double score = li_attention_score(a, head, query, j) - (double)a->log_sum_exp[stat];
    const double p = (double)li_exp1_scalar((float)score);
    const double mask = (double)li_dropout_at(&dropout, head->element + query * a->keys + j);
    const double dp = mask * (li_inner_by(bf16, a->value_dim, g, 1, a->v + v, 1) + extra), ds = p * (dp - mean);
    li_add_scaled_by(bf16, a->head_dim, a->scale, ds, a->k + k, li_offset(a->grad_q, q));
    li_add_scaled_by(bf16, a->head_dim, a->scale, ds, a->q + q, li_offset(a->grad_k, k));
    li_add_scaled_by(bf16, a->value_dim, 1, p * mask, g, li_offset(a->grad_v, v));
  }
}
LI_FN void li_attention_backward_reference(const li_attention *a) {
  for (int64_t pair = 0; pair < a->batch * a->heads; pair++) {
    const li_head head = li_head_at(a, pair);
    for (int64_t query = 0; query < head.queries; query++) li_attention_row_backward(a, &head, query);
  }
}

/* ---- folded unpack ---- */
/* dP = m (g . v), dS = P (dP - sum of P dP), g = dOut through its dropout */
LI_FN void li_unpack_backward_reference(const li_unpack *u, void *scratch) {
  float *p = (float *)scratch, *g = p + u->heads * u->slots;
  li_unpack fresh = *u;
  fresh.lse = NULL;                  /* is computed again, and not written */
  for (int64_t b = 0; b < u->batch; b++)
    for (int64_t i = 0; i < u->rows; i++) {
      const int64_t row = (b * u->rows + i) * u->dim, slots = li_real_slots(u->lengths, b, u->slots);
      li_unpack_row(&fresh, b, i, p);
      for (int64_t e = 0; e < u->dim; e++) g[e] = u->grad_out[row + e] * li_dropout_at(&u->last, row + e);
      if (u->grad_out_bias) li_add_scaled(u->dim, 1, g, u->grad_out_bias);
      for (int64_t h = 0; h < u->heads; h++) {
        const int64_t at = (b * u->heads + h) * u->slots;
        double mean = 0;
        for (int64_t l = 0; l < slots; l++)
          mean += (double)p[h * u->slots + l] * (double)li_unpack_mask_at(u, b, h, i, l) *
                  li_inner_by(u->bf16, u->dim, g, 1, u->v + (at + l) * u->dim, 1);
        for (int64_t l = 0; l < slots; l++) {
          const int64_t slot = (at + l) * u->dim;
          const double prob = (double)p[h * u->slots + l], mask = (double)li_unpack_mask_at(u, b, h, i, l);
          const double ds = prob * (mask * li_inner_by(u->bf16, u->dim, g, 1, u->v + slot, 1) - mean);
          if (u->grad_bias) u->grad_bias[at + l] += (float)ds;
          if (u->grad_k) li_add_scaled_by(u->bf16, u->dim, 1, ds, u->x + row, u->grad_k + slot);
          if (u->grad_v) li_add_scaled_by(u->bf16, u->dim, 1, prob * mask, g, u->grad_v + slot);
          /* it may be grad_out: g is a copy */
          if (u->grad_x) li_add_scaled_by(u->bf16, u->dim, 1, ds, u->k + slot, u->grad_x + row);
        }
      }
    }
}

/* ---- causal product ---- */
LI_FN double li_horizon_share(int64_t horizon, int64_t t, int64_t j) {
  const double fade = li_horizon_fade(horizon, li_beyond(t, horizon) - li_beyond(j, horizon));
  return fade / (double)li_within(t, horizon);
}

LI_FN void li_causal_backward_reference(const li_causal *c) {
  for (int64_t item = 0; item < c->batch * c->heads; item++)
    for (int64_t t = 0; t < c->rows; t++)
      for (int64_t j = 0; j <= t; j++) {
        const int64_t x = li_causal_xy(c, item, t), y = li_causal_xy(c, item, j), z = li_causal_z(c, item, j);
        const float *g = c->grad_out + li_causal_z(c, item, t);
        const double share = li_horizon_share(c->horizon, t + 1, j + 1);
        const double score = li_inner(c->dim, c->x + x, 1, c->y + y, 1) * share;
        const double slope = li_inner(c->value_dim, g, 1, c->z + z, 1) * share;
        if (c->grad_x) li_add_scaled(c->dim, slope, c->y + y, c->grad_x + x);
        if (c->grad_y) li_add_scaled(c->dim, slope, c->x + x, c->grad_y + y);
        if (c->grad_z) li_add_scaled(c->value_dim, score, g, c->grad_z + z);
      }
}

/* ---- causal Luna attention ---- */
/* With c_tj = 1 / t, the share of row j in a mean over t, g_t = dOut_t and h_t = scale dU_t, sums over j <= t:
   dW_t = sum c_tj (g_t . v_j) A_j, dU = softmax's backward; dv_j += c_tj (w_t . A_j) g_t, dq_t += c_tj (h_t . A_j) k_j,
   dk_j += c_tj (h_t . A_j) q_t, dA_j += c_tj ((g_t . v_j) w_t + (q_t . k_j) h_t) */
LI_FN void li_causal_luna_row_backward(const li_causal_luna *a, int64_t first, int64_t t, int64_t real,
                                       float *scratch) {
  const int64_t d = a->head_dim, row = first + t * a->heads;
  float *omega = scratch, *domega = omega + a->rows * a->slots, *dw = domega + a->rows * a->slots, *h = dw + a->slots;
  const float *g = a->grad_out + row * d, *w = a->kept + row * a->slots, *q = a->q + row * d;
  for (int64_t l = 0; l < real; l++) dw[l] = h[l] = 0;
  for (int64_t j = 0; j <= t; j++)
    li_add_scaled(real, li_horizon_share(a->horizon, t + 1, j + 1) *
                           li_inner(d, g, 1, a->v + (first + j * a->heads) * d, 1), omega + j * a->slots, dw);
  li_softmax_backward_reference(1, real, w, dw, h);
  for (int64_t l = 0; l < real; l++) h[l] = (float)((double)a->scale * (double)h[l]);
  for (int64_t j = 0; j <= t; j++) {
    const int64_t at = (first + j * a->heads) * d;
    const double share = li_horizon_share(a->horizon, t + 1, j + 1);
    const double ha = share * li_inner(real, h, 1, omega + j * a->slots, 1),
                 wa = li_inner(real, w, 1, omega + j * a->slots, 1);
    if (a->grad_q) li_add_scaled(d, ha, a->k + at, a->grad_q + row * d);
    if (a->grad_k) li_add_scaled(d, ha, q, a->grad_k + at);
    if (a->grad_v) li_add_scaled(d, share * wa, g, a->grad_v + at);
    li_add_scaled(real, share * li_inner(d, g, 1, a->v + at, 1), w, domega + j * a->slots);
    li_add_scaled(real, share * li_inner(d, q, 1, a->k + at, 1), h, domega + j * a->slots);
  }
}

/* Of one item that forgets, where a_tj = A_j e^{G_t - G_j} / Z_t is row j's share in a slot's means at t, G the sum of
   the gates' logs: with g the gradient of out, da_tj = scale du q . k_j + w g . v_j, and a is a softmax over j of
   s_j - G_j. x: the gradient of that, [rows, slots]; shares as large; row: [7, slots]. In the routed memory A_j is s_j,
   and ln Z_t + G_t joins the score u; moves, [rows, slots], gets its gradient. */
LI_FN void li_forget_row_backward(const li_causal_luna *a, int64_t item, int64_t t, double *shares, double *x,
                                  double *moves, float *row) {
  const int64_t d = a->head_dim, l = a->slots, real = li_luna_slots(a, item);
  const int64_t at = li_luna_row(a, item, t), first = li_luna_row(a, item, 0), step = a->heads;
  const float *q = a->q + at * d, *g = a->grad_out + at * d;
  float *u = row, *w = u + l, *r = w + l, *dr = r + l, *dw = dr + l, *du = dw + l, *logs = du + l;
  for (int64_t i = 0; i < real; i++) {
    const float s = a->s[at * l + i];
    const double gate = a->routed ? li_route_reference(s, li_luna_fade(a, item)) :
                                    li_gate_reference(a->forget[at * l + i]);
    double z = 0, sum = 0, slope = 0;
    for (int64_t j = 0; j < t; j++) shares[j * l + i] *= gate;
    shares[t * l + i] = (a->routed ? (double)s : li_weight_reference(s)) * LUNA_FORGET_SCALE;
    for (int64_t j = 0; j <= t; j++) {
      const int64_t other = (first + j * step) * d;
      z += shares[j * l + i];
      sum += shares[j * l + i] * li_inner(d, q, 1, a->k + other, 1);
      slope += shares[j * l + i] * li_inner(d, g, 1, a->v + other, 1);
    }
    logs[i] = a->routed ? li_route_log_reference(z) : 0;
    if (logs[i] == -1e30f) z = INFINITY;
    r[i] = (float)(LUNA_FORGET_SCALE / z);
    u[i] = (float)((double)a->scale * sum / z);
    dr[i] = dw[i] = (float)(slope / z);
    du[i] = 0;
  }
  for (int64_t i = 0; i < real; i++) w[i] = u[i] + logs[i];
  li_softmax_reference(1, real, w, w);
  if (LI_DROPS(a)) li_dropout_reference(&a->own->dropout, at * l, real, dw, dw, false);
  li_softmax_backward_reference(1, real, w, dw, du);
  if (LI_DROPS(a)) li_dropout_reference(&a->own->dropout, at * l, real, w, w, false);
  for (int64_t i = 0; i < real && a->routed; i++) moves[t * l + i] = (double)du[i];
  for (int64_t j = 0; j <= t; j++) {
    const int64_t other = (first + j * step) * d;
    const double qk = (double)a->scale * li_inner(d, q, 1, a->k + other, 1);
    const double gv = li_inner(d, g, 1, a->v + other, 1);
    for (int64_t i = 0; i < real; i++) {
      const double share = shares[j * l + i] / LUNA_FORGET_SCALE * (double)r[i];
      const double dk = share * (double)a->scale * (double)du[i], own = a->routed ? 1 : 0;
      const double mean = ((double)u[i] - own) * (double)du[i];
      x[j * l + i] += share * ((double)du[i] * qk + (double)w[i] * gv - mean - (double)w[i] * (double)dr[i]);
      if (a->grad_q) li_add_scaled(d, dk, a->k + other, a->grad_q + at * d);
      if (a->grad_k) li_add_scaled(d, dk, q, a->grad_k + other);
      if (a->grad_v) li_add_scaled(d, share * (double)w[i], g, a->grad_v + other);
    }
  }
}

LI_FN void li_forget_backward_reference(const li_causal_luna *a, double *shares) {
  const int64_t l = a->slots, count = a->rows * l;
  double *x = shares + count, *moves = x + count;
  for (int64_t item = 0; item < a->batch * a->heads; item++) {
    double faded = 0;
    for (int64_t i = 0; i < count; i++) x[i] = moves[i] = 0;
    for (int64_t t = 0; t < a->rows; t++)
      li_forget_row_backward(a, item, t, shares, x, moves, (float *)(void *)(moves + count));
    for (int64_t i = 0; i < li_luna_slots(a, item); i++) {
      double later = 0;
      for (int64_t t = a->rows - 1; t >= 0; t--) {
        const int64_t at = li_luna_row(a, item, t) * l + i;
        const float s = a->s[at];
        later += x[t * l + i] - moves[t * l + i];
        if (a->routed) {
          faded += later;
          if (a->grad_s && s > 0) a->grad_s[at] += (float)(x[t * l + i] / (double)s + later / (1 - (double)s));
          continue;
        }
        const float gate = a->forget[at];
        const bool moves = -li_activation_scalar(LUNA_ACTIVATION_SOFTPLUS, -gate) / 16 > -1;
        const float slope = li_activation_scalar(LUNA_ACTIVATION_SIGMOID, -gate) / 16;
        if (a->grad_s && s >= -LUNA_FORGET_SCORE && s <= LUNA_FORGET_SCORE) a->grad_s[at] += (float)x[t * l + i];
        if (a->grad_forget && moves) a->grad_forget[at] -= (float)(later * (double)slope);
      }
    }
    if (!a->routed || !a->grad_forget) continue;
    const float slope = li_activation_scalar(LUNA_ACTIVATION_SIGMOID, -a->forget[item % a->heads]);
    a->grad_forget[item % a->heads] += (float)faded * li_luna_fade(a, item) * slope;
  }
}

LI_FN void li_causal_luna_backward_reference(const li_causal_luna *a, void *scratch) {
  float *omega = (float *)scratch, *domega = omega + a->rows * a->slots;
  if (a->forget) {
    li_forget_backward_reference(a, (double *)scratch);
    return;
  }
  for (int64_t item = 0; item < a->batch * a->heads; item++) {
    const int64_t real = li_luna_slots(a, item);
    const int64_t first = li_luna_row(a, item, 0), step = a->heads * a->slots;
    const float *s = a->s + first * a->slots;
    memset(domega, 0, (size_t)(a->rows * a->slots) * sizeof(float));
    for (int64_t t = 0; t < a->rows; t++)
      li_activate_reference((int)a->omega, real, s + t * step, omega + t * a->slots);
    for (int64_t t = 0; t < a->rows; t++) li_causal_luna_row_backward(a, first, t, real, omega);
    if (!a->grad_s) continue;
    for (int64_t t = 0; t < a->rows; t++)
      li_activate_grad_reference((int)a->omega, real, s + t * step, domega + t * a->slots, true,
                                 a->grad_s + first * a->slots + t * step);
  }
}
LI_FN size_t li_causal_luna_backward_scratch_reference(const li_causal_luna *a) {
  return (size_t)li_floats((a->forget ? 6 * a->rows + 7 : 2 * a->rows + 2) * a->slots);
}
