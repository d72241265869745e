/* Softmax attention as one function, with no context and no allocation.
     cc -O2 -I. examples/1_attention.c -o 1_attention -lm -lpthread */
#define LUNA_IMPLEMENTATION
#include "luna.h"
#include <stdio.h>

int main(void) {
  enum { heads = 2, queries = 3, keys = 5, head_dim = 4 };
  float q[queries * heads * head_dim], y[queries * heads * head_dim];
  float k[keys * heads * head_dim], v[keys * heads * head_dim];
  for (int i = 0; i < queries * heads * head_dim; i++) q[i] = 0.1f * (float)(i % 7);
  for (int i = 0; i < keys * heads * head_dim; i++) k[i] = 0.1f * (float)(i % 5), v[i] = (float)i;

  luna_status status = luna_softmax_attention_f32(&(luna_attention_args){
    .q = q, .k = k, .v = v, .out = y,
    .batch = 1, .heads = heads, .queries = queries, .keys = keys, .head_dim = head_dim });
  if (status != LUNA_OK) return puts(luna_status_text(status)), 1;

  for (int i = 0; i < queries; i++) printf("query %d, head 0: %.4f\n", i, (double)y[i * heads * head_dim]);
  return 0;
}
