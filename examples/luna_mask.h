/* luna_mask.h: the task of a masked language model [arXiv 1810.04805]. Include it after luna.h; it uses what that
   declares.

     luna_masking masking = { .mask = 256, .seed = 1, .step = step };
     luna_mask_tokens(&input, &masking, masked, labels);
     luna_input hidden = input;
     hidden.tokens = masked;
     luna_tensor *loss = luna_masked_lm_loss(&model, &hidden, labels); */
#ifndef LUNA_MASK_H
#define LUNA_MASK_H
#include "luna.h"
#include <stdint.h>
#include <string.h>

#if defined(__GNUC__) || defined(__clang__)
#define MASK_FN static __attribute__((unused))
#else
#define MASK_FN static
#endif

typedef struct luna_masking {
  float probability;                   /* of a place to be chosen; 0 = 0.15 */
  int32_t mask, vocab;                 /* the mask's token; random ones are below vocab, 0 = below mask; both 0 = 256 */
  uint64_t seed, step;                 /* the same again for the same seed, step and place */
} luna_masking;

/* The number of places; -1 for a size that is negative or too large. */
MASK_FN int64_t mask_places(const luna_input *input) {
  const int64_t most = (int64_t)1 << 47;
  if (!input || input->batch < 0 || input->n < 0) return -1;
  if (input->n > 0 && input->batch > most / input->n) return -1;
  return input->batch * input->n;
}

/* The random numbers of one place. */
MASK_FN void mask_draw(const luna_masking *m, int64_t place, uint32_t word[4]) {
  const uint32_t high = (uint32_t)((uint64_t)place >> 32) ^ (uint32_t)(m->step >> 32) << 16;
  const uint32_t use = 0x4D61736Bu;    /* distinct from luna.h's uses of a seed */
  const uint32_t counter[4] = { (uint32_t)place, high, use, (uint32_t)m->step };
  luna_philox(counter, m->seed, word);
}

/* What a chosen place becomes: the mask at 80%, a random token at 10%, and else itself. */
MASK_FN int32_t mask_token(const luna_masking *m, const uint32_t word[4], int32_t token) {
  const uint32_t tenth = word[1] % 10;
  if (tenth < 8) return m->mask;
  if (tenth == 8 && m->vocab > 0) return (int32_t)(word[2] % (uint32_t)m->vocab);
  return token;
}

/* Chooses places, and gives their tokens as labels; labels are -1 elsewhere. masked and labels [batch,n]; masked may be
   input->tokens itself. Null masking: the defaults. Returns how many were chosen, or -1: an array is null, a size
   negative, or probability outside 0..1. */
MASK_FN int64_t luna_mask_tokens(const luna_input *input, const luna_masking *masking, int32_t *masked,
                                 int32_t *labels) {
  luna_masking m;
  memset(&m, 0, sizeof m);
  if (masking) m = *masking;
  if (m.mask == 0 && m.vocab == 0) m.mask = 256;
  if (m.vocab <= 0) m.vocab = m.mask;

  const double p = m.probability != 0 ? (double)m.probability : 0.15;
  const int64_t places = mask_places(input);
  if (places < 0 || !(p >= 0 && p <= 1)) return -1;
  if (places > 0 && (!input->tokens || !masked || !labels)) return -1;

  int64_t count = 0;
  for (int64_t at = 0; at < places; at++) {
    const int32_t token = input->tokens[at];
    const bool padding = input->lengths && at % input->n >= input->lengths[at / input->n];
    uint32_t word[4];
    mask_draw(&m, at, word);
    masked[at] = token;
    labels[at] = -1;
    if (padding || (double)word[0] >= p * 4294967296.0) continue;

    labels[at] = token;
    masked[at] = mask_token(&m, word, token);
    count++;
  }
  return count;
}
#endif
