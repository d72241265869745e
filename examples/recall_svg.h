/* recall_svg.h: which slots of the routed memory each token is written to, as a picture. Included after recall.c's
   sequences.

     draw_slots(ctx, model)          0, or 2 after a sentence; the file is set.plot

   A sequence of pairs is read, up to some queries. Each head of the model's last layer has a panel with a row per slot
   and a column per token. A square is as dark as the token's weight w in the slot: 1 - 1/e, the largest one, is full
   colour. Pairs have colours: key 5 and its value, and the queries for key 5, are all of one. Noise is grey. */
#define COLUMNS 40                   /* tokens that are shown, at most */
#define CELL 16                      /* pixels: width, and with SLOT height, of a weight */
#define SLOT 6
#define TOP 74
#define LEFT 60

/* Colours that the colour-blind tell apart [Okabe and Ito 2008] */
static const char *const palette[] = { "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#7D3C98",
                                       "#333333" };
enum { COLOURS = sizeof palette / sizeof *palette };

/* The pair that token t is of or asks for; -1: it is noise. */
static int64_t pair_at(int64_t t, int64_t pairs) {
  if (t < 2 * pairs) return t / 2;
  for (int64_t i = 0; i < pairs; i++) if (tokens[2 * i] == tokens[t]) return i;
  return -1;
}
static const char *colour_at(int64_t t, int64_t pairs) {
  const int64_t pair = pair_at(t, pairs);
  return pair < 0 ? "#999" : palette[pair % COLOURS];
}

/* What luna_route gives the last layer's memory for a sequence, [1,n,heads slots]. */
static luna_tensor *written_of(const luna_lm *model, const luna_input *input) {
  luna_tensor *x = luna_embedding(model->embedding, input->tokens, 1, input->n);
  const luna_causal_layer *last = model->layers;
  for (int64_t i = 1; i < model->config.layers; i++) x = luna_causal_layer_forward(last++, x);
  x = luna_short_convolution(luna_norm_layer_forward(&last->attention_norm, x), last->kernel, last->kernel_bias);
  return luna_route(luna_linear_layer_forward(&last->attention.router, x),
                    luna_linear_layer_forward(&last->attention.strength, x));
}

static void draw_tokens(FILE *f, int64_t pairs, int64_t columns) {
  for (int64_t t = 0; t < columns; t++) {
    const double x = LEFT + ((double)t + 0.5) * CELL + 3.5;
    const char *kind = pair_at(t, pairs) < 0 ? "noise " : t < 2 * pairs && t % 2 ? "value " : "key ";
    fprintf(f, "<text transform=\"translate(%.1f %d)rotate(-90)\" fill=\"%s\">%s%d%s</text>\n", x, TOP - 6,
            colour_at(t, pairs), kind, (int)tokens[t], labels[t] >= 0 ? "?" : "");
  }
}
/* One head: w of token t and slot s is w[t * stride + s]. */
static void draw_head(FILE *f, const float *w, int64_t stride, int64_t pairs, int64_t columns, int64_t slots,
                      int64_t y) {
  for (int64_t t = 0; t < columns; t++) {
    fprintf(f, "<g fill=\"%s\">", colour_at(t, pairs));
    for (int64_t s = 0; s < slots; s++)
      if (w[t * stride + s] >= 0.02f)
        fprintf(f, "<path opacity=\"%.2f\" d=\"M%lld %lldh%dv%dh-%dz\"/>", (double)w[t * stride + s] / 0.6321,
                (long long)(LEFT + t * CELL), (long long)(y + s * SLOT), CELL, SLOT, CELL);
    fprintf(f, "</g>\n");
  }
  fprintf(f, "<rect x=\"%d\" y=\"%lld\" width=\"%lld\" height=\"%lld\" fill=\"none\" stroke=\"#bbb\"/>\n", LEFT,
          (long long)y, (long long)columns * CELL, (long long)slots * SLOT);
}
static int draw_slots(luna_ctx *ctx, const luna_lm *model) {
  const int64_t size = own.largest < 1 ? own.largest : 1, pairs = pairs_of(size), columns = COLUMNS;
  const int64_t heads = model->config.layer.heads, slots = model->config.layer.memory;
  const int64_t width = LEFT + columns * CELL + 20, height = TOP + heads * (slots * SLOT + 10) + 10;
  const luna_input input = make_batch(2, size, size, 0, 1);
  luna_begin_inference(ctx);
  luna_tensor *written = written_of(model, &input);
  float *w = (float *)grow(NULL, input.n * heads * slots, sizeof(float));
  new_file file;
  if (luna_read(written, w) != LUNA_OK) return free(w), failed(ctx);
  FILE *f = file_begin(&file, set.plot);
  if (!f) return free(w), 2;
  fprintf(f, "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %lld %lld\" width=\"%lld\" height=\"%lld\" "
             "font-family=\"sans-serif\" font-size=\"11\" fill=\"#444\">\n"
             "<rect width=\"%lld\" height=\"%lld\" fill=\"#fff\"/>\n", (long long)width, (long long)height,
          (long long)width, (long long)height, (long long)width, (long long)height);
  draw_tokens(f, pairs, columns);
  for (int64_t h = 0; h < heads; h++) {
    const int64_t y = TOP + h * (slots * SLOT + 10);
    fprintf(f, "<text x=\"8\" y=\"%lld\">head %lld</text>\n", (long long)(y + slots * SLOT / 2 + 4), (long long)h + 1);
    draw_head(f, w + h * slots, heads * slots, pairs, columns, slots, y);
  }
  fprintf(f, "</svg>\n");
  free(w);
  return file_end(&file);
}
