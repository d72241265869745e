/* luna_apollo.h: the optimiser Apollo (Ma, arXiv 2009.13586, algorithm 1), a diagonal quasi-Newton method, over
   luna_optimizer_hook:

     luna_optimizer *apollo = luna_apollo(params, &config);        then as with luna_adamw

   For each parameter, with its gradient g, learning rate lr and three moments m (mean gradient), B (curvature) and d
   (last direction), all 0 at first:

     alpha = (1 - beta) / (1 - beta^t)
     B    += (-alpha sum((g - m) d) - sum(B d^2)) / D^4 d^2         D = (sum d^4)^(1/4) + epsilon
     m    += alpha (g - m)
     d     = m / max(|B|, 1)
     value -= lr d

   luna_optimizer_config has lr (0 = 1), beta1 (beta; 0 = 0.9) and epsilon (0 = 1e-4); weight_decay is added to the
   gradient. Its schedule counts from 0 and needs a warm-up: warmup 0 = 100, warmup_from 0 = 0.01. It runs on the CPU
   and, by luna_cuda.cuh, on a GPU. */
#ifndef LUNA_APOLLO_H
#define LUNA_APOLLO_H
#include "luna.h"
#include <math.h>
#include <string.h>

#if defined(__GNUC__) || defined(__clang__)
#define LUNA_APOLLO_FN static inline __attribute__((unused))
#define LUNA_APOLLO_INLINE static inline __attribute__((always_inline, unused))
#else
#define LUNA_APOLLO_FN static inline
#define LUNA_APOLLO_INLINE static inline
#endif
#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define LUNA_APOLLO_X86              /* instructions that the compiler may not use everywhere */
#endif

/* a b + c, rounded once where the instruction set fuses */
LUNA_APOLLO_INLINE float luna_apollo_fma(bool fused, float a, float b, float c) {
  return fused ? fmaf(a, b, c) : a * b + c;
}
LUNA_APOLLO_INLINE float luna_apollo_gradient(bool fused, const luna_optimizer_part *p, int64_t i) {
  return luna_apollo_fma(fused, p->grad[i], p->factor, p->decay * p->value[i]);
}

/* ---- sums of d^4, (g - m) d and B d^2: floats in `lanes`, which a block of 1024 elements ends ---- */
enum { LUNA_APOLLO_BLOCK = 1024, LUNA_APOLLO_LANES = 16 };
/* lane += the terms of element i */
LUNA_APOLLO_INLINE void luna_apollo_terms(bool fused, const luna_optimizer_part *p, int64_t i, float *fourth,
                                          float *along, float *bent) {
  const float d = p->moment[2][i], square = d * d, g = luna_apollo_gradient(fused, p, i);
  *fourth = luna_apollo_fma(fused, square, square, *fourth);
  *along = luna_apollo_fma(fused, g - p->moment[0][i], d, *along);
  *bent = luna_apollo_fma(fused, p->moment[1][i], square, *bent);
}
/* the lanes' sum, halves added to halves */
LUNA_APOLLO_INLINE double luna_apollo_lanes(float *lane, int lanes) {
  for (int half = lanes / 2; half > 0; half /= 2)
    for (int l = 0; l < half; l++) lane[l] += lane[l + half];
  return (double)lane[0];
}
LUNA_APOLLO_INLINE void luna_apollo_sums(bool fused, int lanes, const luna_optimizer_part *p, double sums[4]) {
  sums[0] = sums[1] = sums[2] = sums[3] = 0;
  for (int64_t first = 0; first < p->count; first += LUNA_APOLLO_BLOCK) {
    const int64_t end = p->count - first < LUNA_APOLLO_BLOCK ? p->count : first + LUNA_APOLLO_BLOCK;
    float fourth[LUNA_APOLLO_LANES] = { 0 }, along[LUNA_APOLLO_LANES] = { 0 }, bent[LUNA_APOLLO_LANES] = { 0 };
    int64_t i = first;
    for (; i + lanes <= end; i += lanes)
      for (int l = 0; l < lanes; l++) luna_apollo_terms(fused, p, i + l, &fourth[l], &along[l], &bent[l]);
    for (int l = 0; i + l < end; l++) luna_apollo_terms(fused, p, i + l, &fourth[l], &along[l], &bent[l]);
    sums[0] += luna_apollo_lanes(fourth, lanes);
    sums[1] += luna_apollo_lanes(along, lanes);
    sums[2] += luna_apollo_lanes(bent, lanes);
  }
}

/* ---- the step ---- */
LUNA_APOLLO_INLINE void luna_apollo_move(bool fused, const luna_optimizer_part *p, float alpha, float curvature) {
  for (int64_t i = 0; i < p->count; i++) {
    const float g = luna_apollo_gradient(fused, p, i), before = p->moment[0][i], d = p->moment[2][i];
    const float m = luna_apollo_fma(fused, alpha, g - before, before);
    const float b = luna_apollo_fma(fused, curvature, d * d, p->moment[1][i]);
    const float size = b < 0 ? -b : b, next = m / (size > 1 ? size : 1);
    p->moment[0][i] = m;
    p->moment[1][i] = b;
    p->moment[2][i] = next;
    p->value[i] = luna_apollo_fma(fused, -p->lr, next, p->value[i]);
  }
}

/* ---- for each instruction set: sums as wide as its registers ---- */
#ifdef LUNA_APOLLO_X86
__attribute__((target("avx512f,fma"))) static void luna_apollo_sums_16(const luna_optimizer_part *p, double sums[4]) {
  luna_apollo_sums(true, 16, p, sums);
}
__attribute__((target("avx2,fma"))) static void luna_apollo_sums_8(const luna_optimizer_part *p, double sums[4]) {
  luna_apollo_sums(true, 8, p, sums);
}
__attribute__((target("avx2,fma"))) static void luna_apollo_move_fused(const luna_optimizer_part *p, float alpha,
                                                                       float curvature) {
  luna_apollo_move(true, p, alpha, curvature);
}
#else
LUNA_APOLLO_FN void luna_apollo_sums_16(const luna_optimizer_part *p, double sums[4]) {
  luna_apollo_sums(true, 16, p, sums);
}
LUNA_APOLLO_FN void luna_apollo_sums_8(const luna_optimizer_part *p, double sums[4]) {
  luna_apollo_sums(true, 8, p, sums);
}
LUNA_APOLLO_FN void luna_apollo_move_fused(const luna_optimizer_part *p, float alpha, float curvature) {
  luna_apollo_move(true, p, alpha, curvature);
}
#endif
LUNA_APOLLO_FN void luna_apollo_reduce(const luna_optimizer_part *p, double sums[4]) {
  switch (p->isa) {
    case LUNA_ISA_AVX512:
    case LUNA_ISA_AVX512_VNNI:
    case LUNA_ISA_AVX512_BF16:
    case LUNA_ISA_AMX: luna_apollo_sums_16(p, sums); break;
    case LUNA_ISA_AVX2:
    case LUNA_ISA_AVX2_VNNI: luna_apollo_sums_8(p, sums); break;
    case LUNA_ISA_NEON: luna_apollo_sums(true, 4, p, sums); break;
    case LUNA_ISA_SSE2:
    case LUNA_ISA_WASM: luna_apollo_sums(false, 4, p, sums); break;
    default: luna_apollo_sums(false, 1, p, sums); break;
  }
}
LUNA_APOLLO_FN void luna_apollo_update(const luna_optimizer_part *p, const double sums[4]) {
  const float beta = p->config->beta1, correction = (float)(1 - pow((double)beta, (double)p->step));
  const float alpha = (1 - beta) / correction;
  const double d = sqrt(sqrt(sums[0])) + (double)p->config->epsilon;
  const float curvature = (float)((-(double)alpha * sums[1] - sums[2]) / (d * d * d * d));
  switch (p->isa) {
    case LUNA_ISA_SCALAR:
    case LUNA_ISA_SSE2:
    case LUNA_ISA_WASM:
    case LUNA_ISA_REFERENCE: luna_apollo_move(false, p, alpha, curvature); break;
    default: luna_apollo_move_fused(p, alpha, curvature); break;
  }
}

/* Null config: defaults; null on failure, with a sentence in the set's context. */
LUNA_APOLLO_FN luna_optimizer *luna_apollo(luna_params *params, const luna_optimizer_config *config) {
  /* directions are taken to the fourth power: norms up to 1e9 keep those finite */
  static const luna_optimizer_hook hook = { "Apollo", 3, true, 1e9f, luna_apollo_reduce, luna_apollo_update };
  luna_optimizer_config c;
  memset(&c, 0, sizeof c);
  if (config) c = *config;
  if (c.lr == 0) c.lr = 1;
  if (c.beta1 == 0) c.beta1 = 0.9f;
  if (c.epsilon == 0) c.epsilon = 1e-4f;
  if (c.schedule.warmup == 0) c.schedule.warmup = 100;
  if (c.schedule.warmup_from == 0) c.schedule.warmup_from = 0.01f;
  c.beta2 = c.momentum = 0;            /* which it does not have */
  c.nesterov = false;
  return luna_optimizer_open(params, &hook, &c);
}
#endif
