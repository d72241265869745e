/* transformer_xl.h: Transformer-XL (Dai et al., ACL 2019, arXiv 1901.02860): segments that attend the segment before.

     C = [memory; x];   y = attention by relative position of x over C (relative.h)
     next_memory = the last M rows of C: the layer's inputs, before a pre-norm, without gradient
   base.memory [batch,M,d] comes in (null: none, at a start), base.next_memory goes out; M: option memory, 0 = as many
   rows as came in. With lengths, a sequence's real tokens alone enter its memory. window: i - j < window; 0 = all.
   Parameters: see relative.h. Time O(n (M + n) d), memory O((M + n) d). */
#ifndef ATTENTION_TRANSFORMER_XL_H
#define ATTENTION_TRANSFORMER_XL_H
#include "relative.h"

typedef struct transformer_xl {
  attention base;
  int64_t window, kept;
  relative proj;
} transformer_xl;
static const attention_option transformer_xl_options[] = {
  { "window", ATTENTION_COUNT, offsetof(transformer_xl, window), "0" },
  { "memory", ATTENTION_COUNT, offsetof(transformer_xl, kept), "0" },
  ATTENTION_LAST_OPTION
};

static void transformer_xl_init(void *layer) {
  transformer_xl *a = (transformer_xl *)layer;
  relative_init(&a->base, &a->proj);
}
static luna_tensor *transformer_xl_forward(void *layer, luna_attention_call *call) {
  transformer_xl *a = (transformer_xl *)layer;
  int64_t first;
  int32_t *ends = relative_ends(call, a->base.memory, &first);
  const int64_t kept = relative_kept(a->base.memory, a->kept, first);
  if (ends && kept > 0) a->base.next_memory = attention_rows(relative_inputs(call, a->base.memory), ends, NULL, kept);
  free(ends);
  return relative_forward(&a->base, &a->proj, call->x, luna_linear(call->x, a->proj.q, NULL),
                          relative_read(call, a->base.memory),
                          a->window, call->lengths);
}
static const attention_system transformer_xl_system = {
  "transformer_xl", "Dai et al., ACL 2019, arXiv 1901.02860", sizeof(transformer_xl), transformer_xl_options,
      transformer_xl_init,
  transformer_xl_forward, true, false, false
};
#endif
