/* workspace.h: the Shared Global Workspace (Goyal et al., ICLR 2022, arXiv 2103.01197).

     M [l,d]: the layer's p; null: row s of M is the unit vector e_s
     write:  A = softmax over tokens of q(M) k(x)^T / sqrt(d_h), a head and slot; only its topk largest are kept (ties:
             the first), with renormalise scaled to sum 1
             W = LN(M + A v(x));  r = W, mlp_layers times r = relu(mlp(r));  W = LN(W + r)
     gates:  G = gate_input(mean over tokens of relu(gate_scale x_t)) + gate_memory_s(tanh(M_s));   (i, f) = its halves
             M' = sigmoid(i + input_bias) tanh(W) + sigmoid(f + forget_bias) M        -> the next layer's p
     read:   y_t = softmax over slots of q(x_t) k(M')^T / sqrt(d_h), times v(M')
   No gradient through the choice of the topk. topk >= n is the soft variant. Not causal.
   Parameters: q_proj, k_proj, v_proj (for both steps), mlp, attention_norm, mlp_norm, gate_scale [d], gate_input d ->
   2g, gate_memory (weight [l,2g,d], bias [l,2g]), input_bias, forget_bias [1]; g = 1, or d with unit_gates.
   Time O(n l d + n d^2), memory O(n (l h + d)). */
#ifndef ATTENTION_WORKSPACE_H
#define ATTENTION_WORKSPACE_H
#include "base.h"

typedef struct workspace {
  attention base;
  int64_t slots, topk, renormalise, mlp_layers, unit_gates;
  luna_linear_layer q, k, v, mlp, gate_input, gate_memory;
  luna_norm_layer attention_norm, mlp_norm;
  luna_tensor *gate_scale, *input_bias, *forget_bias;
} workspace;
static const attention_option workspace_options[] = {
  { "slots", ATTENTION_COUNT, offsetof(workspace, slots), "8" }, /* l */
  { "topk", ATTENTION_COUNT, offsetof(workspace, topk), "20" },
  { "renormalise", ATTENTION_FLAG, offsetof(workspace, renormalise), "true" },
  { "mlp_layers", ATTENTION_COUNT, offsetof(workspace, mlp_layers), "2" },
  { "unit_gates", ATTENTION_FLAG, offsetof(workspace, unit_gates), "false" },
  ATTENTION_LAST_OPTION
};

static void workspace_init(void *layer) {
  workspace *a = (workspace *)layer;
  const int64_t d = a->base.dim, gates = 2 * (a->unit_gates ? d : 1);
  attention_require(&a->base, a->slots > 0 && a->topk > 0, "workspace: slots and topk must be above 0");
  attention_linear(&a->base, &a->q, "q_proj", d, d, ATTENTION_GAIN);
  attention_linear(&a->base, &a->k, "k_proj", d, d, ATTENTION_GAIN);
  attention_linear(&a->base, &a->v, "v_proj", d, d, ATTENTION_GAIN);
  attention_linear(&a->base, &a->mlp, "mlp", d, d, 1);
  attention_norm_init(&a->base, &a->attention_norm, "attention_norm");
  attention_norm_init(&a->base, &a->mlp_norm, "mlp_norm");
  a->gate_scale = attention_param(&a->base, "gate_scale", LUNA_INIT_NORMAL, 1, d, 0, 0, 0);
  attention_linear(&a->base, &a->gate_input, "gate_input", d, gates, 1);
  a->gate_memory.weight = attention_param(&a->base, "gate_memory.weight", LUNA_INIT_UNIFORM, 1 / sqrt((double)gates),
                                          a->slots, gates, d, 0);
  a->gate_memory.bias = attention_param(&a->base, "gate_memory.bias", LUNA_INIT_ZEROS, 0, a->slots, gates, 0, 0);
  a->input_bias = attention_param(&a->base, "input_bias", LUNA_INIT_ZEROS, 0, 1, 0, 0, 0);
  a->forget_bias = attention_param(&a->base, "forget_bias", LUNA_INIT_ONES, 1, 1, 0, 0, 0);
}

/* ---- softmax over the first lengths[b] scores [batch,h,l,n], of which the topk largest are kept ---- */
typedef struct workspace_top { int64_t topk; bool renormalise; } workspace_top;
/* the smallest kept score, and how many of those equal to it are kept, by selection from the row's largest down */
ATTENTION_FN float workspace_threshold(const float *s, int64_t n, int64_t topk, int64_t *equal) {
  float limit = HUGE_VALF;
  int64_t left = topk;
  for (;;) {
    float next = -HUGE_VALF;
    int64_t count = 0;
    for (int64_t j = 0; j < n; j++) if (s[j] < limit && s[j] > next) next = s[j];
    for (int64_t j = 0; j < n; j++) count += s[j] == next;
    *equal = left;
    if (count == 0 || count >= left) return next;
    left -= count;
    limit = next;
  }
}
ATTENTION_FN luna_status workspace_top_forward(const luna_tensor *const *in, int count, luna_tensor *out, void *state) {
  const workspace_top *top = (const workspace_top *)state;
  const int64_t n = out->shape[3], each = out->shape[1] * out->shape[2];
  (void)count;
  for (int64_t r = 0; r < out->shape[0] * each; r++) {
    const int64_t keys = attention_length(in[1], r / each);
    const float *s = in[0]->data + r * n;
    float *y = out->data + r * n, max = -HUGE_VALF;
    int64_t equal = keys;
    const float limit = top->topk < keys ? workspace_threshold(s, keys, top->topk, &equal) : -HUGE_VALF;
    double sum = 0;
    for (int64_t j = 0; j < keys; j++) if (s[j] > max) max = s[j];
    for (int64_t j = 0; j < n; j++) {
      const bool kept = j < keys && (top->topk >= keys || s[j] > limit || (s[j] == limit && equal-- > 0));
      const float e = j < keys ? expf(s[j] - max) : 0;
      y[j] = kept ? e : 0;
      if (kept || !top->renormalise) sum += (double)e;
    }
    for (int64_t j = 0; j < keys; j++) y[j] = (float)((double)y[j] / sum);
  }
  return LUNA_OK;
}
/* of all that the sum is over: without renormalise also of scores that are not kept, which only take part in the sum */
ATTENTION_FN luna_status workspace_top_backward(luna_tensor *const *in, int count, const luna_tensor *out,
                                                void *state) {
  const workspace_top *top = (const workspace_top *)state;
  const int64_t n = out->shape[3], each = out->shape[1] * out->shape[2];
  (void)count;
  for (int64_t r = 0; in[0]->grad && r < out->shape[0] * each; r++) {
    const int64_t keys = attention_length(in[1], r / each);
    const float *s = in[0]->data + r * n, *y = out->data + r * n, *g = out->grad + r * n;
    float *to = in[0]->grad + r * n, max = -HUGE_VALF;
    double dot = 0, sum = 0;
    for (int64_t j = 0; j < keys; j++) if (s[j] > max) max = s[j];
    for (int64_t j = 0; j < keys; j++) dot += (double)y[j] * (double)g[j], sum += exp((double)(s[j] - max));
    for (int64_t j = 0; j < keys; j++)
      to[j] += y[j] * g[j] - (float)(dot * (top->renormalise ? (double)y[j] : exp((double)(s[j] - max)) / sum));
  }
  return LUNA_OK;
}

/* M' of gates G [batch,l,2g], W and M [batch,l,d] and the two biases, tanh as a second user of the same idea */
ATTENTION_FN float workspace_sigmoid(float x) { return x >= 0 ? 1 / (1 + expf(-x)) : expf(x) / (1 + expf(x)); }
ATTENTION_FN luna_status workspace_gate_forward(const luna_tensor *const *in, int count, luna_tensor *out,
                                                void *state) {
  const int64_t d = out->shape[2], g = in[0]->shape[2] / 2;
  (void)count, (void)state;
  for (int64_t i = 0; i < luna_count(out); i++) {
    const float *gates = in[0]->data + i / d * 2 * g + i % d % g;
    out->data[i] = workspace_sigmoid(gates[0] + in[3]->data[0]) * tanhf(in[1]->data[i]) +
        workspace_sigmoid(gates[g] + in[4]->data[0]) * in[2]->data[i];
  }
  return LUNA_OK;
}
ATTENTION_FN luna_status workspace_gate_backward(luna_tensor *const *in, int count, const luna_tensor *out,
                                                 void *state) {
  const int64_t d = out->shape[2], g = in[0]->shape[2] / 2;
  double bias[2] = { 0, 0 };
  (void)count, (void)state;
  for (int64_t i = 0; i < luna_count(out); i++) {
    const int64_t at = i / d * 2 * g + i % d % g;
    const float input = workspace_sigmoid(in[0]->data[at] + in[3]->data[0]),
        forget = workspace_sigmoid(in[0]->data[at + g] + in[4]->data[0]);
    const float t = tanhf(in[1]->data[i]), up = out->grad[i];
    const float slope[2] = { up * t * input * (1 - input), up * in[2]->data[i] * forget * (1 - forget) };
    if (in[1]->grad) in[1]->grad[i] += up * input * (1 - t * t);
    if (in[2]->grad) in[2]->grad[i] += up * forget;
    for (int half = 0; half < 2; half++) {
      if (in[0]->grad) in[0]->grad[at + half * g] += slope[half];
      bias[half] += (double)slope[half];
    }
  }
  for (int half = 0; half < 2; half++) if (in[3 + half]->grad) in[3 + half]->grad[0] += (float)bias[half];
  return LUNA_OK;
}
ATTENTION_FN luna_status workspace_tanh_forward(const luna_tensor *const *in, int count, luna_tensor *out,
                                                void *state) {
  (void)count, (void)state;
  for (int64_t i = 0; i < luna_count(out); i++) out->data[i] = tanhf(in[0]->data[i]);
  return LUNA_OK;
}
ATTENTION_FN luna_status workspace_tanh_backward(luna_tensor *const *in, int count, const luna_tensor *out,
                                                 void *state) {
  (void)count, (void)state;
  for (int64_t i = 0; in[0]->grad && i < luna_count(out); i++)
    in[0]->grad[i] += out->grad[i] * (1 - out->data[i] * out->data[i]);
  return LUNA_OK;
}

/* M + A v(x), normed, and the mlp */
static luna_tensor *workspace_write(const workspace *a, luna_tensor *m, luna_attention_call *call,
                                    luna_tensor *lengths) {
  const int64_t h = a->base.heads, d = a->base.dim;
  workspace_top top;
  luna_tensor *in[2], *w, *r;
  top.topk = a->topk, top.renormalise = a->renormalise != 0;
  in[0] = luna_matmul(luna_scale(attention_split(luna_linear_layer_forward(&a->q, m), h),
                                 (float)(1 / sqrt((double)(d / h)))),
                      attention_split(luna_linear_layer_forward(&a->k, call->x), h), false, true);
  in[1] = lengths;
  if (!in[0]) return NULL;
  w = attention_op(in, 2, 4, in[0]->shape, workspace_top_forward, workspace_top_backward, &top, sizeof top, 0);
  w = luna_matmul(luna_dropout(w, a->base.dropout), attention_split(luna_linear_layer_forward(&a->v, call->x), h),
                  false, false);
  r = w = luna_norm_layer_forward(&a->attention_norm, luna_add(m, attention_join(w)));
  for (int64_t i = 0; i < a->mlp_layers; i++) r = luna_relu(luna_linear_layer_forward(&a->mlp, r));
  return luna_norm_layer_forward(&a->mlp_norm, luna_add(w, r));
}
/* gate_input(mean over tokens) [batch,1,2g] of all slots, and each slot's own [batch,l,2g] */
static luna_tensor *workspace_gates(const workspace *a, luna_tensor *m, luna_attention_call *call) {
  const int axes[3] = { 1, 0, 2 };
  const int64_t batch = m->shape[0], l = m->shape[1], d = a->base.dim;
  const int64_t mean[2] = { batch, d };
  float *share = (float *)malloc((size_t)(batch * d + 1) * sizeof(float));
  luna_tensor *x = NULL, *own;
  for (int64_t i = 0; share && i < batch * d; i++) {
    const int64_t n = call->lengths ? call->lengths[i / d] : call->x->shape[1];
    share[i] = n > 0 ? 1 / (float)n : 0;
  }
  if (share)
    x = luna_mul(luna_sum(luna_relu(luna_mul(call->x, a->gate_scale)), 1), luna_tensor_new(m->ctx, share, 2, mean));
  free(share);
  x = luna_permute(luna_expand(luna_linear_layer_forward(&a->gate_input, x), l), axes); /* [batch,l,2g] */
  own = attention_op(&m, 1, 3, m->shape, workspace_tanh_forward, workspace_tanh_backward, NULL, 0, 0);
  own = luna_matmul(luna_permute(own, axes), a->gate_memory.weight, false, true); /* [l,batch,d] x [l,2g,d]^T */
  return luna_add(luna_add(x, luna_permute(own, axes)), a->gate_memory.bias);
}
static luna_tensor *workspace_forward(void *layer, luna_attention_call *call) {
  const workspace *a = (const workspace *)layer;
  const int64_t shape[2] = { a->slots, a->base.dim };
  luna_attention_config read;
  luna_tensor *m = call->p, *in[5];
  if (!m) m = luna_expand(attention_unit_rows(call->x->ctx, 2, shape), call->x->shape[0]);
  if (!m) return NULL;
  if (m->rank != 3 || m->shape[1] != a->slots) return attention_fail(m->ctx, &a->base, "p is not [batch,slots,d]");
  in[0] = workspace_gates(a, m, call);
  in[1] = workspace_write(a, m, call, attention_lengths(call->x, call->lengths));
  in[2] = m, in[3] = a->input_bias, in[4] = a->forget_bias;
  call->next_p = m = attention_op(in, 5, 3, m->shape, workspace_gate_forward, workspace_gate_backward, NULL, 0, 0);
  memset(&read, 0, sizeof read);
  read.heads = a->base.heads, read.dropout = a->base.dropout;
  return luna_softmax_attention(luna_linear_layer_forward(&a->q, call->x), luna_linear_layer_forward(&a->k, m),
                                luna_linear_layer_forward(&a->v, m), &read);
}
static const attention_system workspace_system = {
  "workspace", "Goyal et al., ICLR 2022, arXiv 2103.01197", sizeof(workspace), workspace_options, workspace_init,
      workspace_forward, false, true, false
};
#endif
