/* isab.h: the Set Transformer's induced set attention block (Lee et al., ICML 2019, arXiv 1810.00825).

     MAB(Q, K): O = fc_q(Q) + softmax(fc_q(Q) fc_k(K)^T / sqrt(d)) fc_v(K) per head
                O = ln0(O);  O = ln1(O + relu(fc_o(O)))
     y = MAB1(x, MAB0(inducing, x))
   sqrt(d), not sqrt(d_h), as in the authors' code; option norm false: without ln0 and ln1. Not causal.
   Parameters: inducing [l,d]; mab0. and mab1.: fc_q, fc_k, fc_v, fc_o, ln0, ln1.
   Time O(n l d + n d^2), memory O(n d). */
#ifndef ATTENTION_ISAB_H
#define ATTENTION_ISAB_H
#include "base.h"

typedef struct isab_mab { luna_linear_layer q, k, v, o; luna_norm_layer ln0, ln1; } isab_mab;
typedef struct isab {
  attention base;
  int64_t slots, norm;
  isab_mab mab0, mab1;
  luna_tensor *inducing;
} isab;
static const attention_option isab_options[] = {
  { "inducing", ATTENTION_COUNT, offsetof(isab, slots), "16" }, /* l */
  { "norm", ATTENTION_FLAG, offsetof(isab, norm), "true" },
  ATTENTION_LAST_OPTION
};

static void isab_mab_init(isab *a, isab_mab *mab, const char *name) {
  const char *const linear[4] = { "fc_q", "fc_k", "fc_v", "fc_o" }, *const norm[2] = { "ln0", "ln1" };
  luna_linear_layer *const layers[4] = { &mab->q, &mab->k, &mab->v, &mab->o };
  luna_norm_layer *const norms[2] = { &mab->ln0, &mab->ln1 };
  char full[64];
  for (int i = 0; i < 4; i++) {
    snprintf(full, sizeof full, "%s.%s", name, linear[i]);
    attention_linear(&a->base, layers[i], full, a->base.dim, a->base.dim, i < 3 ? ATTENTION_GAIN : 1);
  }
  for (int i = 0; i < 2 && a->norm; i++) {
    snprintf(full, sizeof full, "%s.%s", name, norm[i]);
    attention_norm_init(&a->base, norms[i], full);
  }
}
static void isab_init(void *layer) {
  isab *a = (isab *)layer;
  attention_require(&a->base, a->slots > 0, "isab: inducing must be above 0");
  isab_mab_init(a, &a->mab0, "mab0");
  isab_mab_init(a, &a->mab1, "mab1");
  a->inducing = attention_param(&a->base, "inducing", LUNA_INIT_XAVIER, 1, a->slots, a->base.dim, 0, 0);
}

/* q [batch,n,d] reads k [batch,m,d], of which lengths are real */
static luna_tensor *isab_mab_forward(const isab *a, const isab_mab *mab, luna_tensor *q, luna_tensor *k,
                                     const int32_t *lengths) {
  luna_attention_config c;
  luna_tensor *o;
  memset(&c, 0, sizeof c);
  c.heads = a->base.heads;
  c.lengths = lengths;
  c.scale = (float)(1 / sqrt((double)a->base.dim));
  c.dropout = a->base.dropout;
  q = luna_linear_layer_forward(&mab->q, q);
  o = luna_add(q, luna_softmax_attention(q, luna_linear_layer_forward(&mab->k, k),
                                         luna_linear_layer_forward(&mab->v, k), &c));
  if (a->norm) o = luna_norm_layer_forward(&mab->ln0, o);
  o = luna_add(o, luna_relu(luna_linear_layer_forward(&mab->o, o)));
  return a->norm ? luna_norm_layer_forward(&mab->ln1, o) : o;
}
static luna_tensor *isab_forward(void *layer, luna_attention_call *call) {
  const isab *a = (const isab *)layer;
  luna_tensor *packed = isab_mab_forward(a, &a->mab0, luna_expand(a->inducing, call->x->shape[0]), call->x,
                                         call->lengths);
  return isab_mab_forward(a, &a->mab1, call->x, packed, NULL);
}
static const attention_system isab_system = {
  "isab", "Lee et al., ICML 2019, arXiv 1810.00825", sizeof(isab), isab_options, isab_init, isab_forward, false, true,
  false
};
#endif
