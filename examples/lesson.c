/* lesson: Luna attention in plain loops. Equations (1) to (7) of the paper, arXiv 2106.01540v2, each beside luna.h's
   call on the same numbers; then a training loop written out. Read it from top to bottom; it takes less than a second
   to run.

     cc -O2 -I. examples/lesson.c -o lesson -lm -lpthread && ./lesson

   One sequence, one head, no dropout. A matrix X [n,d] is an array x of n d floats, row by row: X_tc is
   x[t * d + c]. */
#define LUNA_IMPLEMENTATION
#include "luna.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

/* tokens, memory slots, width, width inside the feed-forward */
enum { n = 12, l = 4, d = 8, ffn = 16 };
typedef float matrix[n * d];                               /* of l rows too: the first l */
static int failures;

/* ---- what all equations need ------------------------------------------------------------------------------------- */

/* Y = X W^T + b */
static void linear(int rows, int in, int out, const float *x, const luna_linear_layer *layer, float *y) {
  for (int r = 0; r < rows; r++)
    for (int o = 0; o < out; o++) {
      y[r * out + o] = layer->bias->data[o];
      for (int i = 0; i < in; i++) y[r * out + o] += x[r * in + i] * layer->weight->data[o * in + i];
    }
}
static void project(int rows, const float *x, const luna_linear_layer *layer, float *y) {
  linear(rows, d, d, x, layer, y);
}

static void add_norm(int rows, float *x, const float *y, const luna_norm_layer *norm) { /* X = LayerNorm(X + Y) */
  for (int r = 0; r < rows; r++) {
    float mean = 0, variance = 0;
    for (int i = 0; i < d; i++) x[r * d + i] += y[r * d + i], mean += x[r * d + i] / d;
    for (int i = 0; i < d; i++) variance += (x[r * d + i] - mean) * (x[r * d + i] - mean) / d;
    for (int i = 0; i < d; i++)
      x[r * d + i] = (x[r * d + i] - mean) / sqrtf(variance + 1e-5f) * norm->weight->data[i] + norm->bias->data[i];
  }
}

static void softmax(int count, float *x) {
  float max = x[0], sum = 0;
  for (int i = 1; i < count; i++) max = fmaxf(max, x[i]);
  for (int i = 0; i < count; i++) sum += x[i] = expf(x[i] - max);
  for (int i = 0; i < count; i++) x[i] /= sum;
}

static void check(const char *what, const float *mine, luna_tensor *theirs) {
  float worst = theirs ? 0 : 1;
  for (int64_t i = 0; i < luna_count(theirs); i++) worst = fmaxf(worst, fabsf(mine[i] - theirs->data[i]));
  failures += !(worst < 1e-5f);
  printf("%-66s %s, largest difference %.0e\n", what, worst < 1e-5f ? "agrees" : "DIFFERS", (double)worst);
}

/* ---- the equations ----------------------------------------------------------------------------------------------- */

/* (1) Attn: softmax(Q K^T / sqrt(d)) V. Every query row mixes the value rows, by how well their keys fit it: n m
   products for n queries and m keys */
static void attention(int queries, int keys, const float *q, const float *k, const float *v, float *y) {
  for (int i = 0; i < queries; i++) {
    float score[n];
    for (int j = 0; j < keys; j++) {
      score[j] = 0;
      for (int c = 0; c < d; c++) score[j] += q[i * d + c] * k[j * d + c] / sqrtf(d);
    }
    softmax(keys, score);
    for (int c = 0; c < d; c++) {
      y[i * d + c] = 0;
      for (int j = 0; j < keys; j++) y[i * d + c] += score[j] * v[j * d + c];
    }
  }
}

/* X = LayerNorm(FFN(X) + X), the second half of every layer: relu(X W1^T + b1) W2^T + b2, each row by itself */
static void feed_forward(float *x, const luna_encoder_layer *layer) {
  float hidden[n * ffn];
  matrix y;
  linear(n, d, ffn, x, &layer->feed_forward.fc1, hidden);
  for (int i = 0; i < n * ffn; i++) hidden[i] = fmaxf(hidden[i], 0);
  linear(n, ffn, d, hidden, &layer->feed_forward.fc2, y);
  add_norm(n, x, y, &layer->feed_forward.norm);
}

/* (2) A Transformer's layer: X_A = LayerNorm(Attn(X, X) + X), X' = LayerNorm(FFN(X_A) + X_A) */
static void transformer_layer(float *x, const luna_encoder_layer *layer) {
  matrix q, k, v, y, out;
  const luna_attention_layer *a = &layer->other_attention;
  project(n, x, &a->q, q), project(n, x, &a->k, k), project(n, x, &a->v, v);
  attention(n, n, q, k, v, y);
  project(n, y, &a->out, out);
  add_norm(n, x, out, &layer->attention_norm);
  feed_forward(x, layer);
}

/* (5) Y_X, Y_P = LunaAttn(X, P, X), which is (3) and then (4): 2 l n products instead of n n */
static void luna_attention(const float *x, const float *p, const luna_nested_attention_layer *a, float *y_x,
                           float *y_p) {
  matrix q, k, v, y;
  project(l, p, &a->pq, q), project(n, x, &a->pk, k), project(n, x, &a->pv, v);
  attention(l, n, q, k, v, y_p);                           /* (3) pack: Y_P = Attn(P, X), l queries read n tokens */
  project(n, x, &a->q, q), project(l, y_p, &a->k, k), project(l, y_p, &a->v, v);
  attention(n, l, q, k, v, y);                             /* (4) unpack: Y_X = Attn(X, Y_P), n queries read l slots */
  project(n, y, &a->out, y_x);
}

/* (6) Luna's layer: X_A = LayerNorm(Y_X + X), P' = LayerNorm(Y_P + P), X' = LayerNorm(FFN(X_A) + X_A). P' is the next
   layer's P. */
static void luna_layer(float *x, float *p, const luna_encoder_layer *layer) {
  matrix y_x, y_p;
  luna_attention(x, p, &layer->attention, y_x, y_p);
  add_norm(n, x, y_x, &layer->attention_norm);
  add_norm(l, p, y_p, &layer->memory_norm);
  feed_forward(x, layer);
}

/* (7) The causal function: F_t = 1/t X_t sum_{j<=t} Y_j^T Z_j, X, Y [n,a], Z, F [n,b]. Row t sees nothing later, and
   the sum is carried along. */
static void causal_function(int a, int b, const float *x, const float *y, const float *z, float *f) {
  float sum[d][d] = { { 0 } };
  for (int t = 0; t < n; t++)
    for (int j = 0; j < b; j++) {
      f[t * b + j] = 0;
      for (int i = 0; i < a; i++) {
        sum[i][j] += y[t * a + i] * z[t * b + j];
        f[t * b + j] += x[t * a + i] * sum[i][j] / (float)(t + 1);
      }
    }
}

/* Section 3.3, causal Luna attention: A_pack = softplus2(X P^T), A_unpack = softmax(f(X, X, A_pack)),
   Y = f(A_unpack, A_pack, X) */
static void causal_luna_attention(const float *x, const float *p, const luna_causal_attention_layer *a, float *out) {
  matrix pq, pc, q, k, v, y;
  float pack[n * l], unpack[n * l];
  project(l, p, &a->pq, pq), project(n, x, &a->pc, pc);
  project(n, x, &a->q, q), project(n, x, &a->k, k), project(n, x, &a->v, v);
  for (int t = 0; t < n; t++)
    for (int s = 0; s < l; s++) {
      float score = 0;
      for (int c = 0; c < d; c++) score += pc[t * d + c] * pq[s * d + c] / sqrtf(d);
      pack[t * l + s] = log2f(1 + exp2f(score));                /* not softmax, whose sum would look ahead */
    }
  for (int t = 0; t < n; t++)
    for (int c = 0; c < d; c++) q[t * d + c] /= sqrtf(d);
  causal_function(d, l, q, k, pack, unpack);
  for (int t = 0; t < n; t++) softmax(l, unpack + t * l);
  causal_function(l, d, unpack, pack, v, y);
  project(n, y, &a->out, out);
}

/* ---- each beside the library's ----------------------------------------------------------------------------------- */

static luna_status compare(luna_ctx *ctx) {
  luna_params *params = luna_params_open(ctx);
  luna_encoder_layer transformer, luna;
  luna_causal_attention_layer causal;
  luna_layer_config config = { .dim = d, .heads = 1, .ffn = ffn, .sharing = LUNA_SHARING_FULL };
  luna_encoder_layer_init(&luna, params, "layer.", &config);
  config.attention = LUNA_ATTENTION_SOFTMAX;
  luna_encoder_layer_init(&transformer, params, "transformer.", &config);
  luna_causal_attention_layer_init(&causal, params, "causal.",
      &(luna_causal_attention_layer_config){ .dim = d, .heads = 1, .sharing = LUNA_SHARING_FULL });

  if (luna_begin_inference(ctx) != LUNA_OK) return luna_error_status(ctx);
  matrix x, p, x2, p2, y, y_p;
  for (int t = 0; t < n; t++)
    for (int c = 0; c < d; c++)
      x[t * d + c] = sinf(0.7f * (float)(d * t + c)), p[t * d + c] = cosf(1.3f * (float)(d * t + c));
  luna_tensor *X = luna_tensor_new(ctx, x, 3, (int64_t[]){ 1, n, d }), *Y_P;
  luna_tensor *P = luna_tensor_new(ctx, p, 3, (int64_t[]){ 1, l, d });

  attention(n, n, x, x, x, y);
  check("(1) attention: luna_softmax_attention", y, luna_softmax_attention(X, X, X, NULL));
  memcpy(x2, x, sizeof x);
  transformer_layer(x2, &transformer);
  check("(2) a Transformer's layer: luna_encoder_layer_forward, softmax", x2,
        luna_encoder_layer_forward(&transformer, X, NULL, NULL));
  luna_attention(x, p, &luna.attention, y, y_p);
  luna_tensor *Y_X = luna_nested_attention_layer_forward(&luna.attention, X, P, NULL, NULL, &Y_P);
  check("(3) pack, Y_P: luna_nested_attention_layer_forward", y_p, Y_P);
  check("(4), (5) unpack, Y_X: luna_nested_attention_layer_forward", y, Y_X);
  memcpy(x2, x, sizeof x), memcpy(p2, p, sizeof p);
  luna_layer(x2, p2, &luna);
  check("(6) Luna's layer, X': luna_encoder_layer_forward", x2, luna_encoder_layer_forward(&luna, X, &P, NULL));
  check("(6) Luna's layer, P'", p2, P);
  causal_function(d, d, x, x, x, y);
  check("(7) the causal function: luna_causal_product", y, luna_causal_product(X, X, X, 1));
  causal_luna_attention(x, p, &causal, y);
  P = luna_tensor_new(ctx, p, 3, (int64_t[]){ 1, l, d });
  check("section 3.3: luna_causal_attention_layer_forward", y,
        luna_causal_attention_layer_forward(&causal, X, P, NULL));
  return luna_error_status(ctx);
}

/* ---- a training loop, written out -------------------------------------------------------------------------------- */

/* A Luna layer and its memory learn to tell every token what the first token was. It can know that through P alone: who
   does not look at other tokens has a loss of 0.44 at best, the variance of what is to be told. */
static luna_status train(luna_ctx *ctx) {
  luna_params *params = luna_params_open(ctx);
  luna_encoder_layer layer;
  luna_encoder_layer_init(&layer, params, "", &(luna_layer_config){ .dim = d, .heads = 1, .ffn = ffn,
                                                                   .pre_norm = true });
  luna_tensor *memory = luna_param(params, "memory", 2, (int64_t[]){ l, d }, (luna_init){ LUNA_INIT_NORMAL, 1 });
  double mean = 0;
  for (int step = 1; step <= 1000; step++) {
    matrix x, target;
    for (int t = 0; t < n; t++)
      for (int c = 0; c < d; c++) {
        /* column 0 marks the first token */
        x[t * d + c] = c > 0 ? sinf((float)(step % 97 * 31 + t * 7 + c * c)) : t == 0 ? 3 : -1;
        target[t * d + c] = x[c];
      }

    luna_begin_step(ctx);                                              /* 1. the forward pass is put on a tape */
    luna_tensor *X = luna_tensor_new(ctx, x, 3, (int64_t[]){ 1, n, d }), *P = luna_expand(memory, 1);
    luna_tensor *error = luna_sub(luna_encoder_layer_forward(&layer, X, &P, NULL),
                                  luna_tensor_new(ctx, target, 3, X->shape));
    luna_tensor *loss = luna_mean_all(luna_mul(error, error));
    mean += (double)luna_item(loss) / 100;
    if (step % 100 == 0) printf("step %4d  mean loss of 100 steps %.4f\n", step, mean), mean = 0;
    luna_backward(loss);                                               /* 2. backwards: every parameter's gradient */
    for (int64_t i = 0; i < luna_params_tensor_count(params); i++) {   /* 3. a step down: w = w - lr dloss/dw */
      luna_tensor *w = luna_params_at(params, i, NULL);
      float value[ffn * d], gradient[ffn * d];                         /* the largest parameter */
      if (!w->has_grad || luna_read(w, value) != LUNA_OK || luna_read_grad(w, gradient) != LUNA_OK) continue;
      for (int64_t k = 0; k < luna_count(w); k++) value[k] -= 0.1f * gradient[k];
      luna_write(w, value);
    }
    luna_params_zero_grad(params);                                     /* 4. gradients add up: start at 0 again */
    if (luna_error_status(ctx) != LUNA_OK) break;
  }
  /* luna_sgd, luna_adamw and luna_optimizer_step are 3 and 4 */
  return luna_error_status(ctx);
}

int main(void) {
  luna_ctx *ctx = luna_open(&(luna_options){ .threads = 1 });
  if (compare(ctx) != LUNA_OK || train(ctx) != LUNA_OK) failures++, puts(luna_error(ctx));
  luna_close(ctx);
  return failures != 0;
}
