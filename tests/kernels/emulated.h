/* AMX's tiles and AVX-512's instructions of bfloat16 as functions, which need AVX-512 alone. Include it before luna.h's
   implementation, with LI_TILES_EMULATED: the names of the intrinsics then mean these. */
#ifndef EMULATED_H
#define EMULATED_H
#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#include <float.h>
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define EMULATE __attribute__((unused, target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"))) static

static __thread char emulated_tiles[8][16][64];

/* numbers below the smallest normal one are 0 of their sign */
EMULATE __m512 emulated_flush(__m512 x) {
  const __mmask16 tiny = _mm512_cmp_ps_mask(_mm512_abs_ps(x), _mm512_set1_ps(FLT_MIN), _CMP_LT_OQ);
  return _mm512_mask_mul_ps(x, tiny, x, _mm512_setzero_ps());
}
/* one of the two numbers in each word */
EMULATE __m512 emulated_word(__m512 words, int which) {
  const __m512i bits = _mm512_castps_si512(words), high = _mm512_and_si512(bits, _mm512_set1_epi32(-65536));
  return _mm512_castsi512_ps(which ? high : _mm512_slli_epi32(bits, 16));
}
EMULATE __m256i emulated_half(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(0x7FFF));
  const __m512 upper = _mm512_castsi512_ps(_mm512_and_si512(sum, _mm512_set1_epi32(-65536)));
  const __mmask16 tiny = _mm512_cmp_ps_mask(_mm512_abs_ps(x), _mm512_set1_ps(FLT_MIN), _CMP_LT_OQ);
  const __mmask16 number = _mm512_cmp_ps_mask(x, x, _CMP_LE_OQ);
  const __m512 flushed = _mm512_mask_mul_ps(upper, tiny, x, _mm512_setzero_ps());
  const __m512 rounded = _mm512_mask_blend_ps(number, _mm512_set1_ps((float)NAN), flushed);
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(rounded), 16));
}
/* vcvtne2ps2bf16 */
EMULATE __m512i emulated_pair(__m512 high, __m512 low) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(emulated_half(low)), emulated_half(high), 1);
}
/* vdpbf16ps */
EMULATE __m512 emulated_terms(__m512 sum, __m512 x, __m512 y) {
  sum = _mm512_fmadd_ps(emulated_word(x, 1), emulated_word(y, 1), sum);
  return _mm512_fmadd_ps(emulated_word(x, 0), emulated_word(y, 0), sum);
}
EMULATE void emulated_copy(char *to, int64_t to_step, const char *from, int64_t step) {
  for (int i = 0; i < 16; i++) memcpy(to + i * to_step, from + i * step, 64);
}
EMULATE void emulated_words(char (*c)[64], char (*a)[64], char (*b)[64]) {
  for (int i = 0; i < 16; i++) {
    float *const to = (float *)(void *)c[i];
    __m512 sum[2] = { _mm512_setzero_ps(), _mm512_setzero_ps() };
    for (int p = 0; p < 16; p++)
      for (int h = 0; h < 2; h++) {
        const __m512 x = emulated_word(_mm512_set1_ps(((const float *)(void *)a[i])[p]), h);
        const __m512 y = emulated_word(_mm512_loadu_ps(b[p]), h);
        sum[h] = emulated_flush(_mm512_fmadd_ps(x, y, sum[h]));
      }
    const __m512 both = emulated_flush(_mm512_add_ps(sum[0], sum[1]));
    _mm512_storeu_ps(to, emulated_flush(_mm512_add_ps(emulated_flush(_mm512_loadu_ps(to)), both)));
  }
}
EMULATE void emulated_bytes(char (*c)[64], char (*a)[64], char (*b)[64]) {
  for (int i = 0; i < 16; i++)
    for (int j = 0; j < 16; j++)
      for (int p = 0; p < 64; p++)
        ((int32_t *)(void *)c[i])[j] += (uint8_t)a[i][p] * (int8_t)b[p / 4][4 * j + p % 4];
}

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbusd
#undef _mm512_dpbf16_ps
#undef _mm512_cvtne2ps_pbh
#define _tile_loadconfig(config) ((void)(config))
#define _tile_release() ((void)0)
#define _tile_zero(t) memset(emulated_tiles[t], 0, sizeof emulated_tiles[t])
#define _tile_loadd(t, from, step) emulated_copy(emulated_tiles[t][0], 64, (const char *)(from), step)
#define _tile_stored(t, to, step) emulated_copy((char *)(to), step, emulated_tiles[t][0], 64)
#define _tile_dpbf16ps(c, a, b) emulated_words(emulated_tiles[c], emulated_tiles[a], emulated_tiles[b])
#define _tile_dpbusd(c, a, b) emulated_bytes(emulated_tiles[c], emulated_tiles[a], emulated_tiles[b])
#define _mm512_dpbf16_ps(sum, x, y) emulated_terms(sum, (__m512)(x), (__m512)(y))
#define _mm512_cvtne2ps_pbh(high, low) emulated_pair(high, low)
#endif
#endif
