/* attention_map: a picture of Luna attention: where each memory slot looks (pack), and which slots each token reads (unpack).

     cc -O2 -I. examples/attention_map.c -o attention_map -lm -lpthread

     attention_map draw M --text "To be, or not to be" [--layer 1] [--head 0] [--out map.svg]      seconds
     attention_map draw M <FILE                                                                     the text from the input

   M is a classifier, a masked language model or an encoder-decoder, whose encoder it shows. Texts are read as bytes; where tokens are something
   else, --as numbers reads them as numbers with spaces between. */
#define LUNA_IMPLEMENTATION
#include "luna.h"

#include "example.h"

#define MAX 2048                    /* tokens */
#define COLUMNS 96                   /* tokens side by side; longer texts go on below */
#define CELL 11                      /* pixels */

static struct settings set = { .out = "map.svg", .seed = 1 };
static struct { const char *text; int64_t layer, head, numbers; } own = { .layer = 1 };

static const flag flags[] = {
  { "--text", "d", STRING(own.text), "text to look at; without it the input is read" },
  { "--as", "d", CHOICE(own.numbers, "bytes numbers"), "how the text makes tokens" },
  { "--layer", "d", WHOLE(own.layer, 1, 1024), "layer, from 1" },
  { "--head", "d", WHOLE(own.head, 0, 65536), "head, from 1; 0 for the mean of all" },
  { "--out", "d", WRITES(set.out), "file to draw in, SVG" },
  FLAG_THREADS("d"),
  { 0 }
};

/* ---- the two attention matrices ------------------------------------------------------------------------------------ */

/* softmax(q k^T / sqrt(d_h)) of one head, or the mean of all: q [1,a,d], k [1,b,d] -> [1,a,b] */
static luna_tensor *matrix(luna_tensor *q, luna_tensor *k, int64_t heads) {
  if (!q || !k) return NULL;
  const int64_t d_h = q->shape[2] / heads, q_heads[] = { 1, q->shape[1], heads, d_h }, k_heads[] = { 1, k->shape[1], heads, d_h };
  const int by_head[] = { 0, 2, 1, 3 };
  luna_tensor *scores = luna_matmul(luna_permute(luna_reshape(q, 4, q_heads), by_head), luna_permute(luna_reshape(k, 4, k_heads), by_head), false, true);
  luna_tensor *all = luna_softmax(luna_scale(scores, 1 / sqrtf((float)d_h)), NULL); /* [1,heads,a,b] */
  return luna_mean(own.head ? luna_slice(all, 1, own.head - 1, 1) : all, 1);
}

static luna_tensor *projected(const luna_linear_layer *layer, luna_tensor *x) { /* a sharing without keys has no such layer */
  return layer->weight ? luna_linear_layer_forward(layer, x) : x;
}

/* pack [1,l,n], eq. 3; unpack [1,n,l], eq. 4. False on failure. */
static bool look(const luna_encoder *e, const int32_t *tokens, int64_t n, luna_tensor **pack, luna_tensor **unpack) {
  const luna_encoder_layer *layer = NULL;
  luna_tensor *p = NULL, *packed_context = NULL, *x = luna_encoder_embed(e, &(luna_input){ tokens, NULL, 1, n, NULL }, &p);
  for (int64_t i = 0; i < own.layer; i++) {
    if (layer) x = luna_encoder_layer_forward(layer, x, &p, NULL);
    layer = &e->layers[e->config.tied_layers ? 0 : i];
  }
  const luna_nested_attention_layer *a = &layer->attention;
  if (layer->memory) p = luna_expand(layer->memory, 1);
  if (layer->config.pre_norm) x = luna_norm_layer_forward(&layer->attention_norm, x), p = luna_norm_layer_forward(&layer->memory_norm, p);
  luna_nested_attention_layer_forward(a, x, p, NULL, NULL, &packed_context);
  *pack = matrix(projected(&a->pq, p), projected(&a->pk, x), a->config.pack_heads ? a->config.pack_heads : a->config.heads);
  *unpack = matrix(projected(&a->q, x), projected(&a->k, packed_context), a->config.heads);
  return *pack && *unpack;
}

/* ---- the picture --------------------------------------------------------------------------------------------------- */

typedef struct map { const char *title, *colour; float *value; int64_t of_slot, of_token; float max; } map; /* value[slot of_slot + token of_token] */

static void label(FILE *f, const unsigned char *text, int64_t i, int64_t n, const int32_t *tokens) { /* token i: a character, where one begins */
  int length = showable(text + i, n - i);
  if (own.numbers) fprintf(f, "%d", (int)tokens[i]);
  else if ((text[i] & 0xC0) == 0x80) return;               /* inside a character */
  else if (length == 0 || text[i] < ' ') fprintf(f, "&#183;");
  else if (text[i] == ' ') fprintf(f, "&#9251;");
  else if (strchr("<>&", text[i])) fprintf(f, "&#%d;", text[i]);
  else fwrite(text + i, 1, (size_t)length, f);
}

/* Tokens `from` and on, slots below each other; returns where it ends. */
static int64_t draw_map(FILE *f, const map *m, int64_t slots, int64_t from, int64_t columns, int64_t y) {
  fprintf(f, "<text x=\"40\" y=\"%lld\">%s, full colour: %.2g</text>\n<g fill=\"#999\" text-anchor=\"end\">\n", (long long)y, m->title, (double)m->max);
  for (int64_t s = 0; s < slots; s += slots > 8 ? 4 : 1) fprintf(f, "<text x=\"36\" y=\"%lld\">%lld</text>\n", (long long)(y + 6 + (s + 1) * CELL - 2), (long long)s);
  fprintf(f, "</g>\n<rect x=\"40\" y=\"%lld\" width=\"%lld\" height=\"%lld\" fill=\"none\" stroke=\"#ccc\"/>\n<g fill=\"%s\">\n", (long long)y + 6, (long long)columns * CELL,
          (long long)slots * CELL, m->colour);
  for (int64_t s = 0; s < slots; s++)
    for (int64_t t = 0; t < columns; t++) {
      float value = m->value[s * m->of_slot + (from + t) * m->of_token] / m->max;
      if (value >= 0.005f) fprintf(f, "<rect x=\"%lld\" y=\"%lld\" width=\"%d\" height=\"%d\" opacity=\"%.2f\"/>\n", (long long)(40 + t * CELL), (long long)(y + 6 + s * CELL), CELL, CELL, (double)value);
    }
  fprintf(f, "</g>\n");
  return y + 6 + slots * CELL;
}

static void picture(FILE *f, map *maps, int64_t slots, const unsigned char *text, const int32_t *tokens, int64_t n, int64_t layers) {
  int64_t bands = (n + COLUMNS - 1) / COLUMNS, width = 60 + (n < COLUMNS ? n < 40 ? 40 : n : COLUMNS) * CELL, height = 60 + bands * (2 * slots * CELL + 90), y = 56;
  fprintf(f, "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %lld %lld\" width=\"%lld\" height=\"%lld\" font-family=\"sans-serif\" font-size=\"11\" fill=\"#444\">\n"
             "<rect width=\"%lld\" height=\"%lld\" fill=\"#fff\"/>\n<text x=\"40\" y=\"26\" font-size=\"15\">layer %lld of %lld, ", (long long)width, (long long)height,
          (long long)width, (long long)height, (long long)width, (long long)height, (long long)own.layer, (long long)layers);
  fprintf(f, own.head ? "head %lld</text>\n" : "mean of all heads</text>\n", (long long)own.head);
  for (int64_t from = 0; from < n; from += COLUMNS) {
    int64_t columns = n - from < COLUMNS ? n - from : COLUMNS;
    y = draw_map(f, &maps[0], slots, from, columns, y) + 14;
    fprintf(f, "<g font-family=\"monospace\" font-size=\"%d\" text-anchor=\"middle\">\n", own.numbers ? 7 : 12);
    for (int64_t t = 0; t < columns; t++) {
      fprintf(f, "<text x=\"%.1f\" y=\"%lld\">", 40 + ((double)t + 0.5) * CELL, (long long)y);
      label(f, text, from + t, n, tokens);
      fprintf(f, "</text>\n");
    }
    fprintf(f, "</g>\n");
    y = draw_map(f, &maps[1], slots, from, columns, y + 22) + 36;
  }
  fprintf(f, "</svg>\n");
}

static int draw_on(luna_ctx *ctx, const luna_encoder *e, const unsigned char *text, const int32_t *tokens, int64_t n) {
  const luna_layer_config *layer = &e->config.layer;
  int64_t pack_heads = layer->pack_heads ? layer->pack_heads : e->config.heads, heads = pack_heads < e->config.heads ? pack_heads : e->config.heads;
  luna_tensor *pack, *unpack;
  if (layer->attention != LUNA_ATTENTION_LUNA) return fail("the model's attention is not Luna's: it has no memory to look at");
  if (own.layer > e->config.layers) return fail("the model has %lld layers, no layer %lld", (long long)e->config.layers, (long long)own.layer);
  if (own.head > heads) return fail("the model has %lld heads, no head %lld", (long long)heads, (long long)own.head);
  luna_begin_inference(ctx);
  if (!look(e, tokens, n, &pack, &unpack)) return failed(ctx);
  int64_t slots = pack->shape[1], count = slots * n;
  float *values = (float *)malloc((size_t)(2 * count) * sizeof(float));
  if (!values) return fail("out of memory");
  map maps[2] = { { "where each memory slot looks (pack; a row sums to 1)", "#08519c", values, n, 1, 1e-6f }, { "which slots each token reads (unpack; a column sums to 1)", "#a63603", values + count, 1, slots, 1e-6f } };
  int status = luna_read(pack, values) == LUNA_OK && luna_read(unpack, values + count) == LUNA_OK ? 0 : failed(ctx);
  for (int64_t i = 0; i < 2 * count; i++) if (values[i] > maps[i / count].max) maps[i / count].max = values[i];
  FILE *f = status ? NULL : fopen(set.out, "wb");
  if (!status && !f) status = fail("cannot write %s: %s", set.out, strerror(errno));
  if (f) picture(f, maps, slots, text, tokens, n, e->config.layers);
  bool written = f && !ferror(f);
  if (f && (fclose(f) != 0 || !written)) status = fail("cannot write %s: %s", set.out, strerror(errno));
  if (!status) printf("%s: layer %lld of %lld, %lld slots, %lld tokens\n", set.out, (long long)own.layer, (long long)e->config.layers, (long long)slots, (long long)n);
  return free(values), status;
}

static int draw_command(luna_ctx *ctx, const char **words) {
  static unsigned char text[8 * MAX + 1];
  static int32_t tokens[MAX];
  luna_model model;
  int64_t n = 0;
  if (luna_load_model(&model, luna_params_open(ctx), words[0]) != LUNA_OK) return failed(ctx);
  if (model.kind == LUNA_MODEL_LM) return fail("%s is a causal language model: it has no encoder", words[0]);
  const luna_encoder *e = model.kind == LUNA_MODEL_CLASSIFIER ? &model.classifier.encoder : model.kind == LUNA_MODEL_MASKED_LM ? &model.masked_lm.encoder : &model.seq2seq.encoder;
  size_t size = own.text ? strlen(own.text) : fread(text, 1, sizeof text - 1, stdin);
  if (size >= sizeof text) size = sizeof text - 1;
  if (own.text) memcpy(text, own.text, size);
  while (size > 0 && (text[size - 1] == '\n' || text[size - 1] == '\r')) text[--size] = 0;
  if (!own.numbers)
    for (; n < (int64_t)size && n < MAX; n++) tokens[n] = text[n];
  else
    for (char *at = (char *)text, *end; n < MAX; at = end) {
      long number = strtol(at, &end, 10);
      if (end == at) break;
      tokens[n++] = (int32_t)(number < INT32_MAX && number >= 0 ? number : INT32_MAX);
    }
  return n > 0 ? draw_on(ctx, e, text, tokens, n) : fail("there is no text");
}

static const command commands[] = {
  { "draw", { "model" }, "draws where attention looks", draw_command },
  { 0 }
};

int main(int count, char **given) { return example("attention_map", commands, flags, count, given); }
