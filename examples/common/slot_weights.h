/* slot_weights.h: the two attention matrices of an encoder's layer with Luna attention, for the examples that draw
   them. Included after luna.h and example.h. */

/* softmax(q k^T / sqrt(d_h)) of each head: q [1,a,d], k [1,b,d] -> [1,heads,a,b] */
TOOL luna_tensor *attention_matrices(luna_tensor *q, luna_tensor *k, int64_t heads) {
  if (!q || !k) return NULL;
  const int64_t d_h = q->shape[2] / heads, q_heads[] = { 1, q->shape[1], heads, d_h },
      k_heads[] = { 1, k->shape[1], heads, d_h };
  const int by_head[] = { 0, 2, 1, 3 };
  q = luna_permute(luna_reshape(q, 4, q_heads), by_head), k = luna_permute(luna_reshape(k, 4, k_heads), by_head);
  return luna_softmax(luna_scale(luna_matmul(q, k, false, true), 1 / sqrtf((float)d_h)), NULL);
}

/* A sharing without keys has no such layer. */
TOOL luna_tensor *projected(const luna_linear_layer *layer, luna_tensor *x) {
  return layer->weight ? luna_linear_layer_forward(layer, x) : x;
}

/* The weights of layer `number`, from 1, for an input of one sequence: pack [1,heads,l,n], eq. 3, and unpack
   [1,heads,n,l], eq. 4. Returns false on failure. */
TOOL bool slot_weights(const luna_encoder *e, const luna_input *input, int64_t number, luna_tensor **pack,
                       luna_tensor **unpack) {
  const luna_encoder_layer *layer = NULL;
  luna_tensor *p = NULL, *packed_context = NULL, *x = luna_encoder_embed(e, input, &p);
  for (int64_t i = 0; i < number; i++) {
    if (layer) x = luna_encoder_layer_forward(layer, x, &p, NULL);
    layer = &e->layers[e->config.tied_layers ? 0 : i];
  }
  const luna_nested_attention_layer *a = &layer->attention;
  if (layer->memory) p = luna_expand(layer->memory, 1);
  if (layer->config.pre_norm)
    x = luna_norm_layer_forward(&layer->attention_norm, x), p = luna_norm_layer_forward(&layer->memory_norm, p);
  luna_nested_attention_layer_forward(a, x, p, NULL, NULL, &packed_context);
  *pack = attention_matrices(projected(&a->pq, p), projected(&a->pk, x),
                             a->config.pack_heads ? a->config.pack_heads : a->config.heads);
  *unpack = attention_matrices(projected(&a->q, x), projected(&a->k, packed_context), a->config.heads);
  return *pack && *unpack;
}
