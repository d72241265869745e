/* rfa.h: Random Feature Attention (Peng et al., ICLR 2021, arXiv 2103.02143).

     x^ = x / (|x| + 1e-3);   W_h = features_h sigma_h / tau;   phi(x) = s [sin(W x^), cos(W x^)]       2D features
     bidirectional:  y_i = phi(q_i)^T sum_j phi(k_j) v_j^T / max(|phi(q_i) . sum_j phi(k_j)|, eps)
     causal:         S_t = S_{t-1} + phi(k_t) v_t^T, z_t = z_{t-1} + phi(k_t)
                     y_t = phi(q_t)^T S_t / max(phi(q_t) . z_t, eps)
     gate:           S_t = g_t S_{t-1} + (1 - g_t) phi(k_t) v_t^T, z_t likewise, g_t = sigmoid(gate(x_t)), one a head
   kernel arccosine: phi(x) = s relu(W x^), D features.
   The estimate of the kernel can be negative, hence the clamp. s: option scale, 0 = D^(-1/2).
   Parameters: q_proj, k_proj, v_proj, out_proj, sigma [h,d_h] (1 at first), gated: gate d -> h; array: features
   [h,D,d_h], N(0,1), or with orthogonal rows. Time O(n D d_h) a head, memory O(n d_h). */
#ifndef ATTENTION_RFA_H
#define ATTENTION_RFA_H
#include "linear.h"

enum { RFA_GAUSSIAN, RFA_ARCCOSINE };
typedef struct rfa {
  attention base;
  int64_t features, kernel, gated, orthogonal;
  double tau, scale, eps;
  attention_projections proj;
  luna_linear_layer gate;
  luna_tensor *array, *sigma;
} rfa;
static const attention_option rfa_options[] = {
  { "features", ATTENTION_COUNT, offsetof(rfa, features), "64" }, /* D */
  { "kernel", ATTENTION_WORD, offsetof(rfa, kernel), "gaussian|arccosine" },
  { "gate", ATTENTION_FLAG, offsetof(rfa, gated), "false" },      /* causal only */
  { "tau", ATTENTION_NUMBER, offsetof(rfa, tau), "1" },
  { "scale", ATTENTION_NUMBER, offsetof(rfa, scale), "0" },
  { "eps", ATTENTION_NUMBER, offsetof(rfa, eps), "1e-3" },
  { "orthogonal", ATTENTION_FLAG, offsetof(rfa, orthogonal), "false" },
  ATTENTION_LAST_OPTION
};

/* a chunk's scratch: x^ [rows,d_h], W x^ [rows,D], the gradient of x^ [rows,d_h] */
ATTENTION_FN float rfa_norm(const linear_kernel *k, const float *x) { return (float)attention_size(x, k->head_dim); }
ATTENTION_FN float *rfa_unit(const linear_kernel *k, const linear_rows *r) {
  for (int64_t i = 0; i < r->rows; i++) {
    const float *x = r->x + i * r->stride, size = rfa_norm(k, x) + 1e-3f;
    for (int64_t c = 0; c < k->head_dim; c++) r->scratch[i * k->head_dim + c] = x[c] / size;
  }
  return r->scratch + LINEAR_CHUNK * k->head_dim;
}
ATTENTION_FN void rfa_map(const linear_kernel *k, const linear_rows *r) {
  float *z = rfa_unit(k, r);
  attention_gemm(r->gemm, r->scratch, k->head_dim, false, r->w, r->w_stride, true, z, k->projected, r->rows,
                 k->projected, k->head_dim, false);
  for (int64_t i = 0; k->features == k->projected && i < r->rows * k->projected; i++)
    r->phi[i] = z[i] <= 0 ? 0 : k->scale * z[i];
  for (int64_t i = 0; k->features > k->projected && i < r->rows; i++)
    for (int64_t j = 0; j < k->projected; j++) {
      r->phi[i * k->features + j] = k->scale * sinf(z[i * k->projected + j]);
      r->phi[i * k->features + k->projected + j] = k->scale * cosf(z[i * k->projected + j]);
    }
}
ATTENTION_FN void rfa_map_backward(const linear_kernel *k, const linear_rows *r, float *grad_phi, float *grad_x,
                                   float *grad_w) {
  const int64_t d = k->head_dim, m = k->projected;
  float *grad_z = rfa_unit(k, r), *grad_unit = grad_z + LINEAR_CHUNK * m;
  for (int64_t i = 0; k->features == m && i < r->rows * m; i++)
    grad_z[i] = r->phi[i] > 0 ? k->scale * grad_phi[i] : 0;
  for (int64_t i = 0; k->features > m && i < r->rows; i++)
    for (int64_t j = 0; j < m; j++) {
      const int64_t s = i * 2 * m + j, c = s + m;
      grad_z[i * m + j] = r->phi[c] * grad_phi[s] - r->phi[s] * grad_phi[c];
    }
  if (grad_w) attention_gemm(r->gemm, grad_z, m, true, r->scratch, d, false, grad_w, r->w_stride, m, d, r->rows, true);
  if (!grad_x) return;
  attention_gemm(r->gemm, grad_z, m, false, r->w, r->w_stride, false, grad_unit, d, r->rows, d, m, false);
  for (int64_t i = 0; i < r->rows; i++) {
    const float *x = r->x + i * r->stride, norm = rfa_norm(k, x), size = norm + 1e-3f;
    const float dot = (float)attention_dot(x, grad_unit + i * d, d), along = norm > 0 ? dot / (norm * size * size) : 0;
    for (int64_t c = 0; c < d; c++) grad_x[i * r->stride + c] += grad_unit[i * d + c] / size - along * x[c];
  }
}

static void rfa_init(void *layer) {
  rfa *a = (rfa *)layer;
  const int64_t h = a->base.heads, d = a->base.dim / h;
  attention_require(&a->base, a->features > 0 && a->tau > 0, "rfa: features and tau must be above 0");
  attention_projections_init(&a->base, &a->proj);
  a->sigma = attention_param(&a->base, "sigma", LUNA_INIT_ONES, 1, h, d, 0, 0);
  a->array = attention_features(&a->base, a->orthogonal ? ATTENTION_ORTHOGONAL : ATTENTION_NORMAL, h, a->features,
                                d);
  if (a->gated) attention_linear(&a->base, &a->gate, "gate", a->base.dim, h, 1);
}
static luna_tensor *rfa_forward(void *layer, luna_attention_call *call) {
  const rfa *a = (const rfa *)layer;
  const int axes[3] = { 1, 0, 2 };
  linear_kernel k;
  luna_tensor *w;
  if (a->gated && !call->causal) return attention_fail(call->x->ctx, &a->base, "the gate has a causal form only");
  memset(&k, 0, sizeof k);
  k.heads = a->base.heads;
  k.head_dim = a->base.dim / a->base.heads;
  k.projected = a->features;
  k.features = a->kernel == RFA_ARCCOSINE ? a->features : 2 * a->features;
  k.scratch = 2 * k.head_dim + a->features;
  k.causal = call->causal;
  k.clamp = call->causal ? LINEAR_CLAMP : LINEAR_CLAMP_SIZE;
  k.eps = (float)a->eps;
  k.scale = (float)(a->scale > 0 ? a->scale : 1 / sqrt((double)a->features));
  k.map = rfa_map;
  k.map_backward = rfa_map_backward;
  w = luna_mul(luna_scale(luna_permute(luna_detach(a->array), axes), (float)(1 / a->tau)), a->sigma); /* [D,h,d_h] */
  return luna_linear_layer_forward(&a->proj.out, linear_attention(&k, luna_linear_layer_forward(&a->proj.q, call->x),
                                   luna_linear_layer_forward(&a->proj.k, call->x),
                                       luna_linear_layer_forward(&a->proj.v, call->x), w,
                                   a->gated ? luna_linear_layer_forward(&a->gate, call->x) : NULL, call->lengths));
}
static const attention_system rfa_system = {
  "rfa", "Peng et al., ICLR 2021, arXiv 2103.02143", sizeof(rfa), rfa_options, rfa_init, rfa_forward, true, true, false
};
#endif
