/* luna.h, and in each of its passes a way to reach the vector vocabulary: vectors.c makes luna.h include itself by this
   name. */
#include "luna.h"

#ifdef LI_PASS
/* function `which` of x and z, VF numbers at a time and the rest through vf_load_part and vf_store_part */
LI_FN void LI_K(vectors_map)(int which, int64_t n, const float *x, const float *z, float *y) {
  for (int64_t i = 0; i < n; i += VF) {
    const int64_t left = n - i < VF ? n - i : VF;
    const vf a = left == VF ? vf_load(x + i) : vf_load_part(x + i, left),
        b = left == VF ? vf_load(z + i) : vf_load_part(z + i, left);
    vf r = a;
    switch (which) {
      case VECTORS_EXP: r = vf_exp(a); break;
      case VECTORS_LOG: r = vf_log(a); break;
      case VECTORS_ADD: r = vf_add(a, b); break;
      case VECTORS_SUB: r = vf_sub(a, b); break;
      case VECTORS_MUL: r = vf_mul(a, b); break;
      case VECTORS_DIV: r = vf_div(a, b); break;
      case VECTORS_MAX: r = vf_max(a, b); break;
      case VECTORS_MIN: r = vf_min(a, b); break;
      case VECTORS_SQRT: r = vf_sqrt(a); break;
      case VECTORS_ABS: r = vf_abs(a); break;
      case VECTORS_LT: r = vf_select(vf_lt(a, b), vf_set(1), vf_zero()); break;
      case VECTORS_LE: r = vf_select(vf_le(a, b), vf_set(1), vf_zero()); break;
      case VECTORS_GT: r = vf_select(vf_gt(a, b), vf_set(1), vf_zero()); break;
      case VECTORS_FMA: r = vf_fma(a, b, vf_set(-1)); break;
      case VECTORS_FNMA: r = vf_fnma(a, b, vf_set(-1)); break;
      default: break;
    }
    if (left == VF) vf_store(y + i, r);
    else vf_store_part(y + i, r, left);
  }
}
/* the functions of one number */
LI_FN void LI_K(vectors_singles)(int which, int64_t n, const float *x, float *y) {
  for (int64_t i = 0; i < n; i++) y[i] = which == VECTORS_EXP ? LI_K(exp1)(x[i]) : LI_K(log1)(x[i]);
}
/* sum, largest and first lane of the VF numbers at x; returns VF */
LI_FN int LI_K(vectors_lanes)(const float *x, float out[3]) {
  const vf v = vf_load(x);
  out[0] = vf_sum(v);
  out[1] = vf_hmax(v);
  out[2] = vf_first(v);
  return VF;
}
#endif
