/* performer.h: Performer, FAVOR+ (Choromanski et al., arXiv 2009.14794).

     x' = x / d_h^(1/4);   phi(x)_j = exp(w_j . x' - |x'|^2/2 - max) + eps
     y_i = phi(q_i)^T sum_j phi(k_j) v_j^T / phi(q_i) . sum_j phi(k_j)         causal: sums over j <= i
   max: of w . x', over the features for a query, over all keys and features for the keys; constants in backward. (The
   paper's m^(-1/2) cancels.) Causal: eps = 0, and each key has its own maximum, as a factor 2^e and a rest: see
   linear.h. kernel relu: phi(x) = relu(w x') + eps, or, with features 0, relu(x) + eps, which is what LRA's release
   runs. Parameters: q_proj, k_proj, v_proj, out_proj; array: features [m,d_h], w: rows orthogonal in blocks of d_h.
   Time O(n m d_h) a head, memory O(n d_h). */
#ifndef ATTENTION_PERFORMER_H
#define ATTENTION_PERFORMER_H
#include "linear.h"

enum { PERFORMER_SOFTMAX, PERFORMER_RELU };
typedef struct performer {
  attention base;
  int64_t features, kernel, ortho_scaling;
  double eps;
  attention_projections proj;
  luna_tensor *w;
} performer;
static const attention_option performer_options[] = {
  { "features", ATTENTION_COUNT, offsetof(performer, features), "256" }, /* m; 0: relu without a matrix */
  { "kernel", ATTENTION_WORD, offsetof(performer, kernel), "softmax|relu" },
  { "eps", ATTENTION_NUMBER, offsetof(performer, eps), "-1" }, /* -1: 1e-4, relu 1e-3 */
  { "ortho_scaling", ATTENTION_FLAG, offsetof(performer, ortho_scaling), "false" }, /* rows of norm sqrt(d_h) */
  ATTENTION_LAST_OPTION
};

/* phi of a row whose w . x' are in phi: exp(w . x' - shift) * factor + eps */
ATTENTION_FN void performer_exp(float *phi, int64_t m, float shift, float factor, float eps) {
  for (int64_t j = 0; j < m; j++) phi[j] = expf(phi[j] - shift) * factor + eps;
}
ATTENTION_FN void performer_map(const linear_kernel *k, const linear_rows *r) {
  const float scale = k->scale;
  const bool own = !r->key || k->causal; /* the row's own maximum; in keys as a factor */
  attention_gemm(r->gemm, r->x, r->stride, false, r->w, r->w_stride, true, r->phi, k->features, r->rows, k->features,
                 k->head_dim, false);
  for (int64_t i = 0; i < r->rows; i++) {
    float *phi = r->phi + i * k->features, max = -HUGE_VALF, size = 0, factor = 1;
    for (int64_t j = 0; j < k->features; j++) {
      phi[j] *= scale;
      if (phi[j] > max) max = phi[j];
    }
    for (int64_t c = 0; c < k->head_dim; c++) size += r->x[i * r->stride + c] * r->x[i * r->stride + c];
    size *= scale * scale / 2;
    if (r->key && k->causal) { /* e^(max - size) = 2^exponent factor, 1 <= factor < 2 */
      const double power = ((double)max - (double)size) * 1.4426950408889634;
      if (fabs(power) < 1e6) {
        r->exponent[i] = (float)floor(power);
        factor = (float)exp2(power - floor(power));
      }
    }
    performer_exp(phi, k->features, k->causal ? max : size + (own ? max : r->max * scale), factor, k->eps);
  }
}
ATTENTION_FN void performer_map_backward(const linear_kernel *k, const linear_rows *r, float *grad_phi, float *grad_x,
                                         float *grad_w) {
  const int64_t m = k->features, d = k->head_dim;
  (void)grad_w;
  for (int64_t i = 0; i < r->rows; i++) {
    float *g = grad_phi + i * m, sum = 0;
    for (int64_t j = 0; j < m; j++) sum += g[j] *= r->phi[i * m + j] - k->eps;
    for (int64_t c = 0; c < d; c++) r->scratch[i * d + c] = -sum * k->scale * r->x[i * r->stride + c];
  }
  attention_gemm(r->gemm, grad_phi, m, false, r->w, r->w_stride, false, r->scratch, d, r->rows, d, m, true);
  for (int64_t i = 0; i < r->rows; i++)
    for (int64_t c = 0; c < d; c++) grad_x[i * r->stride + c] += k->scale * r->scratch[i * d + c];
}
ATTENTION_FN void performer_relu(const linear_kernel *k, const linear_rows *r) {
  const int64_t m = k->features;
  if (r->w)
    attention_gemm(r->gemm, r->x, r->stride, false, r->w, r->w_stride, true, r->phi, m, r->rows, m, k->head_dim, false);
  for (int64_t i = 0; i < r->rows; i++)
    for (int64_t j = 0; j < m; j++) {
      const float a = r->w ? k->scale * r->phi[i * m + j] : r->x[i * r->stride + j];
      r->phi[i * m + j] = (a > 0 || a != a ? a : 0) + k->eps;
    }
}
ATTENTION_FN void performer_relu_backward(const linear_kernel *k, const linear_rows *r, float *grad_phi, float *grad_x,
                                          float *grad_w) {
  const int64_t m = k->features, d = k->head_dim;
  (void)grad_w;
  for (int64_t i = 0; i < r->rows * m; i++) grad_phi[i] *= r->phi[i] > k->eps ? (r->w ? k->scale : 1.0f) : 0.0f;
  if (r->w) attention_gemm(r->gemm, grad_phi, m, false, r->w, r->w_stride, false, r->scratch, d, r->rows, d, m, false);
  for (int64_t i = 0; i < r->rows; i++)
    for (int64_t c = 0; c < d; c++) grad_x[i * r->stride + c] += (r->w ? r->scratch : grad_phi)[i * d + c];
}

static void performer_init(void *layer) {
  performer *a = (performer *)layer;
  const int64_t m = a->features, d = a->base.dim / a->base.heads;
  attention_projections_init(&a->base, &a->proj);
  attention_require(&a->base, m > 0 || a->kernel == PERFORMER_RELU, "performer: features is 0, but kernel is softmax");
  if (a->eps < 0) a->eps = a->kernel == PERFORMER_RELU ? 1e-3 : 1e-4;
  if (m > 0)
    a->w = attention_features(&a->base, a->ortho_scaling ? ATTENTION_ORTHOGONAL_ROOT : ATTENTION_ORTHOGONAL, m, d, 0);
}
static luna_tensor *performer_forward(void *layer, luna_attention_call *call) {
  const performer *a = (const performer *)layer;
  const bool softmax = a->kernel == PERFORMER_SOFTMAX;
  linear_kernel k;
  memset(&k, 0, sizeof k);
  k.heads = a->base.heads;
  k.head_dim = k.scratch = a->base.dim / a->base.heads;
  k.features = k.projected = a->w ? a->features : k.head_dim;
  k.causal = call->causal;
  k.key_max = softmax && !call->causal;
  k.eps = softmax && call->causal ? 0 : (float)a->eps;
  k.scale = (float)pow((double)k.head_dim, -0.25);
  k.map = softmax ? performer_map : performer_relu;
  k.map_backward = softmax ? performer_map_backward : performer_relu_backward;
  return luna_linear_layer_forward(&a->proj.out, linear_attention(&k, luna_linear_layer_forward(&a->proj.q, call->x),
                                   luna_linear_layer_forward(&a->proj.k, call->x),
                                       luna_linear_layer_forward(&a->proj.v, call->x),
                                   a->w ? luna_detach(a->w) : NULL, NULL, call->lengths));
}
static const attention_system performer_system = {
  "performer", "Choromanski et al., arXiv 2009.14794", sizeof(performer), performer_options, performer_init,
      performer_forward,
  true, true, false
};
#endif
