/* lesson: from softmax attention to Luna, step by step, in plain loops that print their matrices for a short sentence;
   then equations (1) to (7) of the paper, arXiv 2106.01540v2, each beside luna.h's call on the same numbers; a training
   loop written out; and exercises, whose answers it computes. Read it from main on, call by call, beside what it
   prints; it takes less than a second to run.

     cc -O2 -I. examples/lesson.c -o lesson -lm -lpthread && ./lesson

   One sequence, no dropout. A matrix X [n,d] is an array x of n d floats, row by row: X_tc is x[t * d + c]. Most of it
   in Python is examples/lesson.ipynb. Words and slots may be changed, added and taken out: sizes follow. */
#define LUNA_IMPLEMENTATION
#include "luna.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

/* A model learns vectors for words. These are made by hand, so that one can follow them: columns 0 to 3 say what kind
   of word it is, columns 4 to 7 what it is about. */
static const struct { const char *text, *columns; } words[] = {
  /*              article noun verb joining, animal place feeling cause */
  { "the", "1000 0000" }, { "cat", "0100 1000" }, { "sat", "0010 0100" }, { "on", "0001 0100" },
  { "the", "1000 0000" }, { "mat", "0100 0100" }, { "because", "0001 0001" }, { "it", "0100 1000" },
  { "was", "0010 0000" }, { "tired", "0010 1010" }, { "and", "0001 0000" }, { "warm", "0010 0010" }
}, slots[] = { { "who", "0100 1000" }, { "where", "0001 0100" }, { "how", "0010 0010" }, { "why", "1000 0001" } };

/* tokens, memory slots, width, width inside the feed-forward, the longest sequence, steps of training */
enum { n = sizeof words / sizeof *words, l = sizeof slots / sizeof *slots, d = 8, ffn = 16, longest = 1200,
       steps = 4000 };
enum { rows_at_most = n > l ? n : l };
typedef float matrix[rows_at_most * d];                    /* of n or l rows: the first ones */
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

static void normalise(int rows, const float *x, const luna_norm_layer *norm, float *y) { /* Y = LayerNorm(X) */
  for (int r = 0; r < rows; r++) {
    float mean = 0, variance = 0;
    for (int i = 0; i < d; i++) mean += x[r * d + i] / d;
    for (int i = 0; i < d; i++) variance += (x[r * d + i] - mean) * (x[r * d + i] - mean) / d;
    for (int i = 0; i < d; i++)
      y[r * d + i] = (x[r * d + i] - mean) / sqrtf(variance + 1e-5f) * norm->weight->data[i] + norm->bias->data[i];
  }
}
static void add_norm(int rows, float *x, const float *y, const luna_norm_layer *norm) { /* X = LayerNorm(X + Y) */
  for (int i = 0; i < rows * d; i++) x[i] += y[i];
  normalise(rows, x, norm, x);
}

static void softmax(int count, float *x) {
  float max = x[0], sum = 0;
  for (int i = 1; i < count; i++) max = fmaxf(max, x[i]);
  for (int i = 0; i < count; i++) sum += x[i] = expf(x[i] - max);
  for (int i = 0; i < count; i++) x[i] /= sum;
}

/* (1) Attn: softmax(Q K^T / sqrt(d)) V. Every query row mixes the value rows, by how well their keys fit it: n m
   products for n queries and m keys. Each of `heads` heads does so with columns of its own, d / heads of them. seen
   [heads,queries,keys] gets the softmax, where it is not null. */
static long long products;                                 /* of a query with a key, so far */
static void attention(int heads, int queries, int keys, const float *q, const float *k, const float *v, float *y,
                      float *seen) {
  const int width = d / heads;
  static float score[longest];
  for (int first = 0; first < d; first += width)           /* the first column of each head */
    for (int i = 0; i < queries; i++) {
      for (int j = 0; j < keys; j++, products++) {
        score[j] = 0;
        for (int c = first; c < first + width; c++) score[j] += q[i * d + c] * k[j * d + c] / sqrtf((float)width);
      }
      softmax(keys, score);
      for (int c = first; c < first + width; c++) {
        y[i * d + c] = 0;
        for (int j = 0; j < keys; j++) y[i * d + c] += score[j] * v[j * d + c];
      }
      for (int j = 0; j < keys && seen; j++) *seen++ = score[j];
    }
}

/* ---- a sentence -------------------------------------------------------------------------------------------------- */

static void read_columns(const char *text, float *x) {
  for (; *text; text++) if (*text != ' ') *x++ = *text == '1' ? 3 : 0;
}
/* Shares in percent, a row each; rows and columns are words or slots. */
enum { of_words, of_slots };
static void print_shares(int row_kind, int column_kind, const float *share) {
  const int rows = row_kind == of_slots ? l : n, columns = column_kind == of_slots ? l : n;
  printf("%8s", "");
  for (int j = 0; j < columns; j++) printf(" %5.5s", column_kind == of_slots ? slots[j].text : words[j].text);
  for (int i = 0; i < rows; i++) {
    printf("\n%8s", row_kind == of_slots ? slots[i].text : words[i].text);
    for (int j = 0; j < columns; j++)
      if (share[i * columns + j] < 0.005f) printf("     .");
      else printf(" %5.0f", 100 * (double)share[i * columns + j]);
  }
  printf("\n\n");
}
static int word(const char *text) {                        /* its place, or the last one's */
  int t = 0;
  while (t < n - 1 && strcmp(words[t].text, text) != 0) t++;
  return t;
}
static void print_row(const float *share) {                /* on a line: what one word gets of each, in percent */
  printf("  ");
  for (int j = 0; j < n; j++) printf(" %.5s %.0f", words[j].text, 100 * (double)share[j]);
  printf("\n");
}
static void multiply(int rows, int inner, int columns, const float *a, const float *b, float *c) { /* C = A B */
  for (int i = 0; i < rows * columns; i++) {
    c[i] = 0;
    for (int k = 0; k < inner; k++) c[i] += a[i / columns * inner + k] * b[k * columns + i % columns];
  }
}

static void count_products(void) {
  static float x[longest * d], y[longest * d], p[longest * d];
  const int slot_counts[3] = { 0, 4, 16 };
  printf("Products, counted while the loops run:\n\n%8s %22s %22s %22s\n", "tokens", "softmax: n n",
         "Luna, l = 4: 2 l n", "Luna, l = 16: 2 l n");
  for (int size = 12; size <= longest; size *= 10) {
    printf("%8d", size);
    for (int i = 0; i < 3; i++) {
      const int rows = slot_counts[i];
      products = 0;
      if (rows == 0) attention(1, size, size, x, x, x, y, NULL);
      else attention(1, rows, size, p, x, x, y, NULL), attention(1, size, rows, x, p, p, y, NULL);
      printf(" %22lld", products);
    }
    printf("\n");
  }
  printf("\nTen times the tokens take a hundred times the work in softmax attention, and ten times the work in\n"
         "Luna. In a sentence of 12 tokens Luna with 16 slots costs more. It is for long sequences.\n\n");
}

/* Luna's two steps, on the same words */
static void show_nested(const float *x) {
  matrix p, y, y_p;
  float all[n * n], pack[l * n], unpack[n * l];
  for (int s = 0; s < l; s++) read_columns(slots[s].columns, p + s * d);
  printf("\n3. Luna's pack (equation 3). Instead of words, l = %d slots of a memory P look at the words. Each slot\n"
         "has a vector, too, which a model learns. These ask who, where, how and why. The columns of \"why\" are\n"
         "cause and article, so it finds \"because\" and each \"the\":\n\n", l);
  products = 0;
  attention(1, l, n, p, x, x, y_p, pack);
  print_shares(of_slots, of_words, pack);
  printf("4. Luna's unpack (equation 4). Each word looks at the slots, which hold what they read in the pack:\n\n");
  attention(1, n, l, x, y_p, y_p, y, unpack);
  print_shares(of_words, of_slots, unpack);
  printf("The share of each word that a word gets is unpack times pack. This matrix of n n shares is never\n"
         "computed. Its rank is l = %d at most. It is less sharp than the first one, since everything between\n"
         "words goes through the slots. \"sat\" gets little of itself. The residual of equation 6, X + Y_X, keeps\n"
         "the word.\n\n", l);
  multiply(n, l, n, unpack, pack, all);
  print_shares(of_words, of_words, all);
  printf("%lld products.\n\n", products);
}

static void show_sentence(void) {
  matrix x, y;
  float all[n * n], heads[2 * n * n];
  for (int t = 0; t < n; t++) read_columns(words[t].columns, x + t * d);
  printf("1. Softmax attention (equation 1). Each row is a word and says in percent where it looks. It looks at\n"
         "words whose vectors have a large dot product with its own. That product is large for vectors that are\n"
         "alike or long: \"tired\" is \"warm\" and more, so \"warm\" looks at both alike and \"tired\" at itself.\n"
         "In a layer Q, K and V are X times learned matrices. Here all three are X.\n\n");
  products = 0;
  attention(1, n, n, x, x, x, y, all);
  print_shares(of_words, of_words, all);
  printf("%lld products. \"it\" looks at itself and at the cat.\n\n", products);

  printf("2. Two heads. The first compares columns 0 to 3, the kind of word. The second compares columns 4 to 7, the\n"
         "topic. These rows say where \"sat\" looks by the first head and by the second:\n\n");
  attention(2, n, n, x, x, x, y, heads);
  for (int h = 0; h < 2; h++) print_row(heads + (h * n + word("sat")) * n);
  show_nested(x);
}

/* A causal memory takes in one word after another. Prints what a slot holds of each word after the last one: all gates
   are 1 (the paper's, a mean), each word keeps a share, or the words decide. */
static void show_gates(void) {
  float gates[3][n];
  const char *names[3] = { "mean", "constant", "gated" };
  for (int t = 0; t < n; t++) {
    gates[0][t] = 1, gates[1][t] = 0.84f;                  /* 0.84: half is forgotten in four words */
    gates[2][t] = strcmp(words[t].text, "because") == 0 || strcmp(words[t].text, "it") == 0 ? 0.37f : 1;
  }
  printf("5. The past. A causal model has no pack, since a word must not see later words. Its memory is a sum\n"
         "over the words so far, divided by their number (equation 7). After t words a slot holds each with the\n"
         "weight softplus(score) / t. These weights need not sum to 1. The newest word counts less and less: with\n"
         "equal scores it is 8%% of the whole after 12 words and 0.08%% after 1,200. Such a memory blurs and in\n"
         "the end hardly changes. A gate (.forget, not in the paper) multiplies the memory before each word, by\n"
         "at least e^-1 = 0.37. With a gate a word weighs e^score, and the weights are divided by their sum. If\n"
         "all scores are equal, a slot holds this after the last word, in percent:\n\n"
         "%8s", "");
  for (int t = 0; t < n; t++) printf(" %5.5s", words[t].text);
  for (int g = 0; g < 3; g++) {
    float share[n], sum = 0;
    for (int t = 0; t < n; t++) {
      for (int j = 0; j < t; j++) share[j] *= gates[g][t];
      share[t] = 1;
    }
    for (int t = 0; t < n; t++) sum += share[t];
    printf("\n%8s", names[g]);
    for (int t = 0; t < n; t++) printf(" %5.0f", 100 * (double)(share[t] / sum));
  }
  printf("\n\nThe constant gate forgets half in four words, at any length. The third one forgets at \"because\" and\n"
         "\"it\", so the old clause fades and the new one is kept whole. A model learns from the words when to\n"
         "forget. Every word goes to every slot, so a slot holds a mixture. A routed memory writes a word to two\n"
         "slots that a router chooses, and the other slots keep what they hold. So it recalls single words better\n"
         "(examples/recall.c; examples/slots.svg shows where tokens are written).\n\n");
}

/* ---- the equations ----------------------------------------------------------------------------------------------- */

static void check(const char *what, const float *mine, luna_tensor *theirs) {
  float worst = theirs ? 0 : 1;
  for (int64_t i = 0; i < luna_count(theirs); i++) worst = fmaxf(worst, fabsf(mine[i] - theirs->data[i]));
  failures += !(worst < 1e-5f);
  printf("%-66s %s, largest difference %.0e\n", what, worst < 1e-5f ? "agrees" : "DIFFERS", (double)worst);
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
  attention((int)a->config.heads, n, n, q, k, v, y, NULL);
  project(n, y, &a->out, out);
  add_norm(n, x, out, &layer->attention_norm);
  feed_forward(x, layer);
}

/* (5) Y_X, Y_P = LunaAttn(X, P, X), which is (3) and then (4): 2 l n products instead of n n. With tied sharing, the
   default, key and value are one projection: pk and pv are the same layer here, and k and v. */
static void luna_attention(int slot_count, const float *x, const float *p, const luna_nested_attention_layer *a,
                           float *y_x, float *y_p) {
  const int heads = (int)a->config.heads;
  matrix q, k, v, y;
  project(slot_count, p, &a->pq, q), project(n, x, &a->pk, k), project(n, x, &a->pv, v);
  attention(heads, slot_count, n, q, k, v, y_p, NULL);     /* (3) pack: Y_P = Attn(P, X), l queries read n tokens */
  project(n, x, &a->q, q), project(slot_count, y_p, &a->k, k), project(slot_count, y_p, &a->v, v);
  attention(heads, n, slot_count, q, k, v, y, NULL);       /* (4) unpack: Y_X = Attn(X, Y_P), n queries read l slots */
  project(n, y, &a->out, y_x);
}

/* (6) Luna's layer: X_A = LayerNorm(Y_X + X), P' = LayerNorm(Y_P + P), X' = LayerNorm(FFN(X_A) + X_A). P' is the next
   layer's P. */
static void luna_layer(float *x, float *p, const luna_encoder_layer *layer) {
  matrix y_x, y_p;
  luna_attention(l, x, p, &layer->attention, y_x, y_p);
  add_norm(n, x, y_x, &layer->attention_norm);
  add_norm(l, p, y_p, &layer->memory_norm);
  feed_forward(x, layer);
}

/* (7) The causal function: F_t = 1/t X_t sum_{j<=t} Y_j^T Z_j, X, Y [n,a], Z, F [n,b]. Row t sees nothing later, and
   the sum is carried along. */
static void causal_function(int a, int b, const float *x, const float *y, const float *z, float *f) {
  float sum[l > d ? l : d][l > d ? l : d] = { { 0 } };
  for (int t = 0; t < n; t++)
    for (int j = 0; j < b; j++) {
      f[t * b + j] = 0;
      for (int i = 0; i < a; i++) {
        sum[i][j] += y[t * a + i] * z[t * b + j];
        f[t * b + j] += x[t * a + i] * sum[i][j] / (float)(t + 1);
      }
    }
}

/* Section 3.3, causal Luna attention: A_pack = omega(X P^T / sqrt(d)), A_unpack = softmax(f(X, X, A_pack)), Y =
   f(A_unpack, A_pack, X). The paper's omega is softplus; luna.h's is by default the softplus2 of the authors' code,
   log2(1 + 2^x). The unpack's factor 1 / sqrt(d) is theirs too; the paper does not write it. */
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

/* .forget, which is not in the paper: slot s holds means of keys and values by weights e^score, and each token first
   multiplies the weights of those before it by its gate, e^max(ln(sigmoid(W x)) / 16, -1). */
static void forgetting_attention(const float *x, const float *p, const luna_causal_attention_layer *a, float *out) {
  matrix pq, pc, q, k, v, y = { 0 }, key = { 0 }, value = { 0 };
  float gate[n * l], weight[l] = { 0 }, unpack[l];
  project(l, p, &a->pq, pq), project(n, x, &a->pc, pc), linear(n, d, l, x, &a->forget, gate);
  project(n, x, &a->q, q), project(n, x, &a->k, k), project(n, x, &a->v, v);
  for (int t = 0; t < n; t++) {
    for (int s = 0; s < l; s++) {
      float score = 0;
      for (int c = 0; c < d; c++) score += pc[t * d + c] * pq[s * d + c] / sqrtf(d);
      weight[s] = weight[s] * expf(fmaxf(-logf(1 + expf(-gate[t * l + s])) / 16, -1)) + expf(score);
      unpack[s] = 0;
      for (int c = 0; c < d; c++) {
        key[s * d + c] += expf(score) / weight[s] * (k[t * d + c] - key[s * d + c]);
        value[s * d + c] += expf(score) / weight[s] * (v[t * d + c] - value[s * d + c]);
        unpack[s] += q[t * d + c] * key[s * d + c] / sqrtf(d);
      }
    }
    softmax(l, unpack);
    for (int s = 0; s < l; s++) for (int c = 0; c < d; c++) y[t * d + c] += unpack[s] * value[s * d + c];
  }
  project(n, y, &a->out, out);
}

static float sigmoid(float x) { return 1 / (1 + expf(-x)); }
/* The two slots that a router prefers for a token; of equal ones the first. */
static void choose_slots(const float *router, int *best) {
  best[0] = router[1] > router[0];
  best[1] = 1 - best[0];
  for (int s = 2; s < l; s++) {
    if (router[s] > router[best[0]]) best[1] = best[0], best[0] = s;
    else if (router[s] > router[best[1]]) best[1] = s;
  }
}
/* LUNA_FORGET_ROUTED, not in the paper either: each token is written to two slots, and the others keep what they hold.
   What slot s weighs, z, fades at each token. It is read with its weight, so a slot that is empty is not read. */
static void routed_attention(const float *x, const luna_causal_attention_layer *a, float *out) {
  matrix q, k, v, y = { 0 }, key = { 0 }, value = { 0 };
  float router[n * l], strength[n], z[l] = { 0 }, unpack[l];
  linear(n, d, l, x, &a->router, router), linear(n, d, 1, x, &a->strength, strength);
  project(n, x, &a->q, q), project(n, x, &a->k, k), project(n, x, &a->v, v);
  for (int t = 0; t < n; t++) {
    int best[2];
    choose_slots(router + t * l, best);
    const float sum = sigmoid(router[t * l + best[0]]) + sigmoid(router[t * l + best[1]]);
    for (int s = 0; s < l; s++) z[s] *= expf(-sigmoid(a->fade->data[0]) / 4);
    for (int i = 0; i < 2; i++) {
      const int s = best[i];
      const float w = 1 - expf(-sigmoid(strength[t]) * sigmoid(router[t * l + s]) / sum);
      z[s] = (1 - w) * z[s] + w;
      for (int c = 0; c < d; c++) key[s * d + c] += w / z[s] * (k[t * d + c] - key[s * d + c]);
      for (int c = 0; c < d; c++) value[s * d + c] += w / z[s] * (v[t * d + c] - value[s * d + c]);
    }
    for (int s = 0; s < l; s++) {
      unpack[s] = z[s] > 0 ? logf(z[s]) : -INFINITY;
      for (int c = 0; c < d; c++) unpack[s] += q[t * d + c] * key[s * d + c] / sqrtf(d);
    }
    softmax(l, unpack);
    for (int s = 0; s < l; s++) for (int c = 0; c < d; c++) y[t * d + c] += unpack[s] * value[s * d + c];
  }
  project(n, y, &a->out, out);
}

/* ---- each beside the library's ----------------------------------------------------------------------------------- */

/* A layer with so many heads and that sharing, its equations beside luna.h's */
static luna_status compare(luna_ctx *ctx, int64_t heads, luna_sharing sharing) {
  luna_params *params = luna_params_open(ctx), *other = luna_params_open(ctx);
  luna_encoder_layer transformer, luna;
  luna_layer_config config = { .dim = d, .heads = heads, .ffn = ffn, .sharing = sharing };
  luna_encoder_layer_init(&luna, params, "layer.", &config);
  config.attention = LUNA_ATTENTION_SOFTMAX;
  luna_encoder_layer_init(&transformer, other, "transformer.", &config);
  if (luna_begin_inference(ctx) != LUNA_OK) return luna_error_status(ctx);
  printf("%s sharing, %lld head%s: %lld parameters in Luna's layer, %lld in the Transformer's\n",
         sharing == LUNA_SHARING_TIED ? "tied" : "full", (long long)heads, heads > 1 ? "s" : "",
         (long long)luna_params_element_count(params), (long long)luna_params_element_count(other));

  matrix x, p, x2, p2, y, y_p;
  for (int t = 0; t < rows_at_most; t++)
    for (int c = 0; c < d; c++)
      x[t * d + c] = sinf(0.7f * (float)(d * t + c)), p[t * d + c] = cosf(1.3f * (float)(d * t + c));
  luna_tensor *X = luna_tensor_new(ctx, x, 3, (int64_t[]){ 1, n, d }), *Y_P;
  luna_tensor *P = luna_tensor_new(ctx, p, 3, (int64_t[]){ 1, l, d });
  attention((int)heads, n, n, x, x, x, y, NULL);
  check("(1) attention: luna_softmax_attention", y,
        luna_softmax_attention(X, X, X, &(luna_attention_config){ .heads = heads }));
  memcpy(x2, x, sizeof x);
  transformer_layer(x2, &transformer);
  check("(2) a Transformer's layer: luna_encoder_layer_forward, softmax", x2,
        luna_encoder_layer_forward(&transformer, X, NULL, NULL));
  luna_attention(l, x, p, &luna.attention, y, y_p);
  luna_tensor *Y_X = luna_nested_attention_layer_forward(&luna.attention, X, P, NULL, NULL, &Y_P);
  check("(3) pack, Y_P: luna_nested_attention_layer_forward", y_p, Y_P);
  check("(4), (5) unpack, Y_X: luna_nested_attention_layer_forward", y, Y_X);
  memcpy(x2, x, sizeof x), memcpy(p2, p, sizeof p);
  luna_layer(x2, p2, &luna);
  check("(6) Luna's layer, X': luna_encoder_layer_forward", x2, luna_encoder_layer_forward(&luna, X, &P, NULL));
  check("(6) Luna's layer, P'", p2, P);
  return luna_error_status(ctx);
}

static luna_status compare_causal(luna_ctx *ctx) {
  luna_params *params = luna_params_open(ctx);
  luna_causal_attention_layer causal, gated, routed;
  luna_layer_config config = { .dim = d, .heads = 1, .memory = l };
  luna_causal_attention_layer_init(&causal, params, "causal.", &config);
  config.forget = LUNA_FORGET_GATED;
  luna_causal_attention_layer_init(&gated, params, "gated.", &config);
  config.forget = LUNA_FORGET_ROUTED;
  luna_causal_attention_layer_init(&routed, params, "routed.", &config);
  if (luna_begin_inference(ctx) != LUNA_OK) return luna_error_status(ctx);

  matrix x, p, y;
  for (int i = 0; i < rows_at_most * d; i++) x[i] = sinf(0.7f * (float)i), p[i] = cosf(1.3f * (float)i);
  luna_tensor *X = luna_tensor_new(ctx, x, 3, (int64_t[]){ 1, n, d });
  luna_tensor *P = luna_tensor_new(ctx, p, 3, (int64_t[]){ 1, l, d });
  causal_function(d, d, x, x, x, y);
  check("(7) the causal function: luna_causal_product", y, luna_causal_product(X, X, X, 1));
  causal_luna_attention(x, p, &causal, y);
  check("section 3.3: luna_causal_attention_layer_forward", y,
        luna_causal_attention_layer_forward(&causal, X, P, NULL));
  forgetting_attention(x, p, &gated, y);
  check("the memory that forgets: the same, LUNA_FORGET_GATED", y,
        luna_causal_attention_layer_forward(&gated, X, P, NULL));
  routed_attention(x, &routed, y);
  check("the memory whose slots a router chooses: LUNA_FORGET_ROUTED", y,
        luna_causal_attention_layer_forward(&routed, X, NULL, NULL));
  return luna_error_status(ctx);
}

/* ---- a training loop, written out -------------------------------------------------------------------------------- */

/* Luna attention and its memory learn to tell every token what the first token was, which it can know through P alone.
   Each step has a sequence of its own, of random numbers. */
typedef struct learner { luna_nested_attention_layer attention; luna_tensor *memory; } learner;

static void make_sample(int number, float *x, float *target) { /* random numbers; column 0 marks the first token */
  uint32_t random = (uint32_t)number * 2654435761u + 1;
  for (int t = 0; t < n; t++)
    for (int c = 0; c < d; c++) {
      random = random * 1664525u + 1013904223u;
      x[t * d + c] = c > 0 ? (float)(random >> 8) / (1 << 23) - 1 : t == 0 ? 3 : -1;
      target[t * d + c] = x[c];
    }
}
/* the mean squared error on a sample */
static luna_tensor *loss_of(luna_ctx *ctx, const learner *m, int sample) {
  matrix x, target;
  make_sample(sample, x, target);
  luna_tensor *X = luna_tensor_new(ctx, x, 3, (int64_t[]){ 1, n, d }), *P = luna_expand(m->memory, 1);
  luna_tensor *error = luna_sub(luna_nested_attention_layer_forward(&m->attention, X, P, NULL, NULL, NULL),
                                luna_tensor_new(ctx, target, 3, X->shape));
  return luna_mean_all(luna_mul(error, error));
}
static double loss_on_new(luna_ctx *ctx, const learner *m) {
  double sum = 0;
  for (int i = 0; i < 50; i++) {
    luna_begin_inference(ctx);                             /* no tape */
    sum += (double)luna_item(loss_of(ctx, m, steps + 1 + i)) / 50;
  }
  return sum;
}
/* Makes a learner with so many slots, and trains it. frozen: P stays as it began. */
static luna_status train(luna_ctx *ctx, int64_t slot_count, bool frozen, bool says, learner *m) {
  luna_params *params = luna_params_open(ctx);
  luna_nested_attention_layer_init(&m->attention, params, "", &(luna_layer_config){ .dim = d, .heads = 2 });
  m->memory = luna_param(params, "memory", 2, (int64_t[]){ slot_count, d }, (luna_init){ LUNA_INIT_NORMAL, 1 });
  double mean = 0;
  for (int step = 1; step <= steps; step++) {
    luna_begin_step(ctx);                                              /* 1. the forward pass is put on a tape */
    luna_tensor *loss = loss_of(ctx, m, step);
    mean += (double)luna_item(loss) / (steps / 10);
    if (step % (steps / 10) == 0) {
      if (says) printf("step %4d  mean loss of %d steps %.4f\n", step, steps / 10, mean);
      mean = 0;
    }
    luna_backward(loss);                                               /* 2. backwards: every parameter's gradient */
    for (int64_t i = 0; i < luna_params_tensor_count(params); i++) {   /* 3. a step down: w = w - lr dloss/dw */
      luna_tensor *w = luna_params_at(params, i, NULL);
      float value[(rows_at_most + d) * d], gradient[(rows_at_most + d) * d];    /* no parameter is larger */
      if ((w == m->memory && frozen) || !w->grad) continue;
      if (luna_read(w, value) != LUNA_OK || luna_read_grad(w, gradient) != LUNA_OK) continue;
      for (int64_t k = 0; k < luna_count(w); k++) value[k] -= 0.2f * gradient[k];
      luna_write(w, value);
    }
    luna_params_zero_grad(params);                                     /* 4. gradients add up: start at 0 again */
    if (luna_error_status(ctx) != LUNA_OK) break;
  }
  /* luna_sgd, luna_adamw and luna_optimizer_step are 3 and 4 */
  return luna_error_status(ctx);
}

/* Where the slots look in a sample that the model was not trained on. */
static void print_pack(const learner *m) {
  const luna_nested_attention_layer *a = &m->attention;
  matrix x, y, q, k;
  float seen[2 * l * n];
  make_sample(steps + 1, x, y);
  project(l, m->memory->data, &a->pq, q), project(n, x, &a->pk, k);
  attention(2, l, n, q, k, k, y, seen);
  printf("%14s", "token");
  for (int t = 0; t < n; t++) printf(" %5d", t + 1);
  for (int i = 0; i < 2 * l; i++) {
    printf("\nhead %d, slot %d", i / l + 1, i % l + 1);
    for (int t = 0; t < n; t++) printf(" %5.0f", 100 * (double)seen[i * n + t]);
  }
  printf("\n");
}
static luna_status show_training(luna_ctx *ctx) {
  learner m;
  matrix x, target;
  float variance = 0;
  for (int i = 0; i < 1000; i++) {                         /* column 0 of the first token is always 3; others vary */
    make_sample(i, x, target);
    for (int c = 1; c < d; c++) variance += target[c] * target[c] / (1000 * d);
  }
  printf("\n7. Training. The task is to tell every token what the first token was.\n\n");
  if (train(ctx, l, false, true, &m) != LUNA_OK) return luna_error_status(ctx);
  const double loss = loss_on_new(ctx, &m);
  const double blind = (double)variance * (n - 1) / n;
  printf("\nThe loss is a mean squared error. A model that looks at no other token can only say the mean, except at\n"
         "the first token itself. Its loss is (n - 1)/n of the target's variance %.4f, which is %.4f. 0 is\n"
         "perfect. When a slot has found the first token, all tokens can read it there, and the loss falls. On 50\n"
         "new sequences it is %.4f, %.1f%% of that. So a number is off by %.2f, the square root. A loss says\n"
         "nothing without such a comparison. In one of those sequences the slots look here, in percent:\n\n",
         (double)variance, blind, loss, 100 * loss / blind, sqrt(loss));
  print_pack(&m);
  printf("\nA slot that looks everywhere alike has found nothing. The loss is small without it if other slots have\n"
         "the first token.\n");
  return luna_error_status(ctx);
}

/* ---- exercises --------------------------------------------------------------------------------------------------- */

static luna_status answer(luna_ctx *ctx) {
  learner one, many, frozen;
  matrix x, y, y_p;
  float all[n * n], pack[n * n], unpack[n * n];
  if (train(ctx, 1, false, false, &one) != LUNA_OK || train(ctx, n, false, false, &many) != LUNA_OK ||
      train(ctx, l, true, false, &frozen) != LUNA_OK) return luna_error_status(ctx);
  for (int t = 0; t < n; t++) read_columns(words[t].columns, x + t * d);
  printf("\n8. Exercises. Think first; the answers follow.\n\n"
         "a) l = 1. What do the words get? Is it enough for the task of 7?\n"
         "b) l = n, and P = X. Is Luna then softmax attention? What does it cost?\n"
         "c) P is frozen and stays random. Does the model still learn?\n"
         "d) From how many tokens on does Luna make fewer products than softmax attention?\n"
         "e) All gates are g, below 1. How much does a slot hold in all after many words, before the division? How\n"
         "   much does it hold with equation 7's mean?\n\n"
         "Answers.\n\n"
         "a) A softmax over one slot is 1. Every word gets the same vector, a summary of the sentence, whatever it\n"
         "   asks. For the task of 7 that is enough, since all ask for the first token. The loss is %.4f. With more\n"
         "   slots words must also learn which of them to read.\n"
         "b) No, it is softmax attention twice and costs twice the products. \"sat\" gets these shares of each word,\n"
         "   once and twice, in percent:\n", loss_on_new(ctx, &one));
  attention(1, n, n, x, x, x, y, all);
  products = 0;
  attention(1, n, n, x, x, x, y_p, pack), attention(1, n, n, x, y_p, y_p, y, unpack);
  print_row(all + word("sat") * n);
  multiply(n, n, n, unpack, pack, all);
  print_row(all + word("sat") * n);
  printf("   %lld products instead of %d. With %d slots of a learned P the task of 7 ends at a loss of %.4f.\n"
         "c) Yes, its loss is %.4f. A slot's query is P times a learned matrix (pq_proj). From independent rows,\n"
         "   here %d rows of %d numbers, a matrix can make any queries.\n"
         "d) 2 l n < n n if n > 2 l: with 16 slots, from 33 tokens on. In time it takes more tokens (README).\n"
         "e) It holds 1 + g + g g + ... = 1/(1 - g). With g = 0.84 that is about six words, however many came.\n"
         "   The sum of the mean holds t words after t, so each new one counts 1/t.\n",
         products, n * n, n, loss_on_new(ctx, &many), loss_on_new(ctx, &frozen), l, d);
  return luna_error_status(ctx);
}

int main(int count, char **given) {
  if (count > 1)
    return puts("Example:\n  lesson\n\nPrints the lesson. It takes no flags and less than a second."),
           strcmp(given[1], "--help") != 0 && strcmp(given[1], "-h") != 0 ? 2 : 0;
  luna_ctx *ctx = luna_open(&(luna_options){ .threads = 1 });
  show_sentence();
  count_products();
  show_gates();
  printf("6. The equations beside luna.h's calls, on the same numbers. Tied sharing, luna.h's default, makes key and\n"
         "value by one projection, in the pack and in the unpack. That saves two matrices. Section 4.2 of the paper\n"
         "does the same; that section 3.1 names W_K and W_Q is a slip.\n\n");
  if (compare(ctx, 1, LUNA_SHARING_FULL) != LUNA_OK || compare(ctx, 2, LUNA_SHARING_TIED) != LUNA_OK ||
      compare_causal(ctx) != LUNA_OK || show_training(ctx) != LUNA_OK || answer(ctx) != LUNA_OK)
    failures++, puts(luna_error(ctx));
  luna_close(ctx);
  return failures != 0;
}
