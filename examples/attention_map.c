/* attention_map: draws Luna attention: where each memory slot looks (pack), and which slots each token reads (unpack).

     cc -O2 -I. examples/attention_map.c -o attention_map -lm -lpthread

     attention_map draw M --text "great acting but a dull and boring story" [--layer 1] [--head 2] [--plot map.svg]
     attention_map draw M <FILE      reads the text from the input

   M is a classifier, a masked language model or an encoder-decoder of the other examples. The picture shows its
   encoder. The text is cut into tokens as in training, which M records; --tokens says it for other models. For a
   classifier the picture says which class the text has, and with which probability. Colours compare with attention
   that is the same everywhere, 1/n for n tokens or 1/l for l slots: white is that much, blue more, brown less. */
#define LUNA_IMPLEMENTATION
#include "luna.h"

#include "common/example.h"
#include "common/tokens.h"
#include "common/slot_weights.h"

#define TOKENS 1024                  /* at most */
#define COLUMNS 64                   /* tokens side by side, at most; longer texts go on below */
#define CELL 18                      /* pixels: width, and with SLOT height, of a weight */
#define SLOT 12
#define NAME 24                      /* bytes of a token that are written beside it */

static struct settings set = { .seed = 1 };
enum { AS_TRAINED, BYTES, NUMBERS };
static struct { const char *text, *svg; int64_t layer, head, tokens; } own = { .svg = "map.svg", .layer = 1 };

static const flag flags[] = {
  { "--text", "d", STRING(own.text), "Reads TEXT instead of the input." },
  { "--tokens", "d", CHOICE(own.tokens, "trained bytes numbers"), "Chooses what a text is cut into." },
  { "--layer", "d", WHOLE(own.layer, 1, 1024), "Shows layer N, from 1." },
  { "--head", "d", WHOLE(own.head, 0, 65536), "Shows head N, from 1. 0 shows each head." },
  { "--plot", "d", WRITES(own.svg), "Draws a picture in FILE, as SVG. It shows where attention looks." },
  FLAG_THREADS("d"),
  { 0 }
};

/* ---- the text as the model was trained to read it ---------------------------------------------------------------- */

/* text: what it stands for, in `written` or in the text itself */
static struct { int32_t token; span text; } tokens[TOKENS];
static int64_t count;
static unsigned char written[TOKENS * (UNIT + 1)], *next_written = written;

static void add_token(int32_t token, span text) {
  if (count < TOKENS) tokens[count].token = token, tokens[count++].text = text;
}

static int cut_numbers(span t) {
  for (char *at = (char *)(uintptr_t)t.at, *end; count < TOKENS; at = end) {
    while (*at && strchr(" \t\r\n", *at)) at++;
    const long number = strtol(at, &end, 10);
    if (end == at) break;
    add_token((int32_t)(number < INT32_MAX && number >= 0 ? number : INT32_MAX),
              (span){ (unsigned char *)at, end - at });
  }
  return 0;
}

static int cut_as_words(span t, int64_t vocab) {
  static int32_t words[TOKENS];
  static int64_t ends[TOKENS];
  int64_t start = 0, n = cut_words(t, vocab, TOKENS, words, ends);
  for (int64_t i = 0; i < n; start = ends[i++]) {
    while (start < ends[i] && t.at[start] == ' ') start++;
    add_token(words[i], (span){ t.at + start, ends[i] - start });
  }
  return 0;
}

static int cut_as_pairs(span t, const char *pairs) {
  byte_pairs v = { .end = 256 };
  ints list = { 0 };
  const bool fine = pairs && read_vocab(&v, pairs);
  if (fine) encode(&v, t, &list);
  for (int64_t i = 0; i < list.size && i < TOKENS; i++) {
    unsigned char *start = next_written;
    if (list.at[i] < v.end) next_written = spell(&v, list.at[i], start);
    if (next_written - start > 1 && *start == ' ') start++;
    add_token(list.at[i], list.at[i] < v.end ? (span){ start, next_written - start } :
              (span){ (const unsigned char *)"END", 3 });
  }
  free(v.pairs.entries), free(v.pairs.buckets), free(list.at);
  return fine ? 0 : fail("the vocabulary in the model is not one that translate wrote");
}

static int cut_as_symbols(span t) {
  for (int64_t at = 0; at < t.size;) {
    const int64_t start = at;
    const int s = t.at[at] == ' ' ? SYMBOLS : symbol(t.at, t.size, &at);
    if (s < 0)
      return fail("the model reads lists such as [MAX 2 9 ], not '%.*s'",
                  (int)strcspn((const char *)t.at + start, " \n"), (const char *)t.at + start);
    if (s == SYMBOLS) at++;
    else add_token(s, (span){ t.at + start, at - start });
  }
  return 0;
}

/* Fills `tokens`. Returns 0, or 2 after a sentence. */
static int cut(const luna_params *params, const char *path, span t, int64_t vocab) {
  static const char *const keys[] = { "classify.tokens", "translate.tokens", "mlm.tokens", "listops.tokens",
                                     "mnist.tokens" };
  const char *as = own.tokens == BYTES ? "bytes" : NULL;
  for (size_t i = 0; i < sizeof keys / sizeof keys[0] && !as; i++) as = luna_params_get_text(params, keys[i]);
  if (own.tokens == NUMBERS) return cut_numbers(t);
  if (!as)
    return fail("%s does not say how its texts were cut into tokens; give --tokens bytes or --tokens numbers", path);
  const bool masks = luna_params_get_text(params, "mlm.tokens") != NULL; /* by the last token, which is no word */
  if (strcmp(as, "words") == 0 && vocab <= masks)
    return fail("%s has no token for a word: the only one of its vocabulary is the mask", path);
  if (strcmp(as, "words") == 0) return cut_as_words(t, vocab - masks);
  if (strcmp(as, "pairs") == 0) return cut_as_pairs(t, luna_params_get_text(params, "translate.pairs"));
  if (strcmp(as, "symbols") == 0) return cut_as_symbols(t);
  if (strcmp(as, "bytes") != 0)
    return fail("%s reads %s, not a text; --tokens numbers takes them as numbers", path, as);
  for (int64_t i = 0; i < t.size; i++) add_token(t.at[i], (span){ t.at + i, 1 });
  return 0;
}

/* ---- the picture ------------------------------------------------------------------------------------------------- */

typedef struct map { const char *title; float *value; int64_t heads, of_slot, of_token; double even; } map;
/* value[((head slots + ...)]: of one head, slot of_slot + token of_token; even: 1/n or 1/l, the value of attention
   without a preference */

static int64_t longest_name(void) { /* of tokens that are not single characters the names stand upright */
  int64_t longest = 1;
  for (int64_t i = 0; i < count; i++) if (tokens[i].text.size > longest) longest = tokens[i].text.size;
  return longest < NAME ? longest : NAME;
}
static int64_t label_height(void) { return longest_name() > 1 ? 8 + 6 * longest_name() : 14; }

static void label(FILE *f, span t) {
  for (int64_t i = 0, n; i < t.size; i += n ? n : 1) {
    n = showable(t.at + i, t.size - i);
    if (n == 0 || t.at[i] < ' ') fprintf(f, "&#183;");
    else if (t.at[i] == ' ') fprintf(f, "&#9251;");
    else if (strchr("<>&", t.at[i])) fprintf(f, "&#%d;", t.at[i]);
    else fwrite(t.at + i, 1, (size_t)n, f);
  }
}

/* Names of the tokens `from` and on; of bytes, a character where one begins. Returns where they end. */
static int64_t draw_labels(FILE *f, int64_t from, int64_t columns, int64_t y) {
  const bool wide = longest_name() > 1;
  const int64_t height = label_height();
  fprintf(f, "<g font-family=\"monospace\" font-size=\"%d\">\n", wide ? 10 : 12);
  for (int64_t t = 0; t < columns; t++) {
    span name = tokens[from + t].text;
    if (name.size > NAME) name.size = NAME;
    if (!wide && name.size == 1 && *name.at >= 0x80) {     /* of a character's bytes the first shows it */
      if ((*name.at & 0xC0) == 0x80) continue;
      while (from + t + name.size < count && name.size < 4 && (name.at[name.size] & 0xC0) == 0x80) name.size++;
    }
    const double x = 40 + ((double)t + 0.5) * CELL;
    if (wide) fprintf(f, "<text transform=\"translate(%.1f %lld) rotate(-90)\">", x + 3.5, (long long)(y + height - 4));
    else fprintf(f, "<text x=\"%.1f\" y=\"%lld\" text-anchor=\"middle\">", x, (long long)(y + height - 3));
    label(f, name);
    fprintf(f, "</text>\n");
  }
  fprintf(f, "</g>\n");
  return y + height;
}

/* How strong a colour is: 0 for a weight of `even`, 1 and -1 for 8 times as much and as little. */
static double strength(double value, double even) { return fmin(1, fmax(-1, log2(fmax(value, 1e-9) / even) / 3)); }

static void draw_slot_numbers(FILE *f, int64_t slots, int64_t x, int64_t y) {
  fprintf(f, "<g font-size=\"10\">\n");
  for (int64_t s = 0; s < slots; s++)
    fprintf(f, "<text x=\"%lld\" y=\"%lld\">%lld</text>\n", (long long)x, (long long)(y + s * SLOT + SLOT - 2),
            (long long)s + 1);
  fprintf(f, "</g>\n");
}

/* One head: tokens `from` and on, slots below each other; returns where it ends. */
static int64_t draw_head(FILE *f, const map *m, int64_t head, int64_t slots, int64_t from, int64_t columns, int64_t y) {
  const float *value = m->value + head * slots * count;
  fprintf(f, "<text x=\"36\" y=\"%lld\" text-anchor=\"end\">%lld</text>\n", (long long)(y + slots * SLOT / 2 + 4),
          (long long)head + 1);
  for (int64_t s = 0; s < slots; s++)
    for (int64_t t = 0; t < columns; t++) {
      const double c = strength((double)value[s * m->of_slot + (from + t) * m->of_token], m->even);
      if (fabs(c) < 0.02) continue;
      fprintf(f, "<rect x=\"%lld\" y=\"%lld\" width=\"%d\" height=\"%d\" fill=\"%s\" opacity=\"%.2f\"/>\n",
              (long long)(40 + t * CELL), (long long)(y + s * SLOT), CELL, SLOT, c > 0 ? "#08519c" : "#a65628",
              fabs(c));
    }
  fprintf(f, "<rect x=\"40\" y=\"%lld\" width=\"%lld\" height=\"%lld\" fill=\"none\" stroke=\"#bbb\"/>\n", (long long)y,
          (long long)columns * CELL, (long long)slots * SLOT);
  draw_slot_numbers(f, slots, 42 + columns * CELL, y);
  return y + slots * SLOT;
}

static int64_t draw_map(FILE *f, const map *m, int64_t slots, int64_t from, int64_t columns, int64_t y) {
  fprintf(f, "<text x=\"40\" y=\"%lld\">%s</text>\n", (long long)(y + 14), m->title);
  y += 20;
  for (int64_t h = own.head ? own.head - 1 : 0; h < (own.head ? own.head : m->heads); h++)
    y = draw_head(f, m, h, slots, from, columns, y) + 4;
  return y;
}

static void draw_legend(FILE *f, int64_t y) {
  fprintf(f, "<text x=\"40\" y=\"%lld\">1/8</text>\n", (long long)y);
  for (int i = 0; i <= 24; i++) {
    const double c = (i - 12) / 12.0;
    fprintf(f, "<rect x=\"%d\" y=\"%lld\" width=\"5\" height=\"9\" fill=\"%s\" opacity=\"%.2f\"/>\n", 60 + 5 * i,
            (long long)y - 9, c > 0 ? "#08519c" : "#a65628", fabs(c));
  }
  fprintf(f, "<text x=\"190\" y=\"%lld\">8 times as much as attention without a preference</text>\n", (long long)y);
}

/* The class that a classifier finds, and its probability: "" of other models. */
static phrase answer = { "" };
static int find_answer(luna_ctx *ctx, const luna_classifier *model) {
  int32_t length = (int32_t)count, found, ids[TOKENS];
  char key[40];
  const luna_classifier_config *config = &model->config;
  if (config->pair || config->per_step) return 0;
  for (int64_t i = 0; i < count; i++) ids[i] = tokens[i].token;
  luna_begin_inference(ctx);
  const luna_input input = { ids, &length, 1, count, NULL };
  luna_tensor *shares = luna_softmax(luna_classifier_forward(model, &input), NULL);
  float *values = (float *)grow(NULL, config->classes, sizeof(float));
  if (luna_read(shares, values) != LUNA_OK) return free(values), failed(ctx);
  found = luna_sample(values, config->classes, NULL);
  snprintf(key, sizeof key, "%s.label%d", "classify", (int)found);
  const char *label = luna_params_get_text(model->params, key);
  if (label) snprintf(answer.text, sizeof answer.text, "%.60s, %.0f%%", label, 100 * (double)values[found]);
  else snprintf(answer.text, sizeof answer.text, "class %d, %.0f%%", (int)found, 100 * (double)values[found]);
  return free(values), 0;
}

static const char no_unpack[] = "no unpack: this model predicts from P, so its last unpack is not trained";

/* maps[0] pack, maps[1] unpack, without the second where it is not trained; slots: `given` at most, a token each */
static void picture(FILE *f, const map *maps, int shown, int64_t slots, int64_t given, int64_t layers) {
  const int64_t heads = own.head ? shown : maps[0].heads + (shown > 1 ? maps[1].heads : 0),
      bands = 1 + (count - 1) / COLUMNS, across = (count + bands - 1) / bands; /* of even length */
  const int64_t width = 60 + (across < 50 ? 50 : across) * CELL;
  const int64_t height = 60 + bands * (shown * (30 + label_height()) + heads * (slots * SLOT + 4) + 16) +
                         (shown > 1 ? 0 : 14);
  int64_t y = 50;
  const long long w = width, h = height;
  fprintf(f, "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %lld %lld\" width=\"%lld\" height=\"%lld\" "
             "font-family=\"sans-serif\" font-size=\"11\" fill=\"#444\">\n"
             "<rect width=\"%lld\" height=\"%lld\" fill=\"#fff\"/>\n"
             "<text x=\"40\" y=\"26\" font-size=\"15\">layer %lld of %lld, %lld slots, ",
          w, h, w, h, w, h, (long long)own.layer, (long long)layers, (long long)slots);
  if (slots < given) fprintf(f, "as many as tokens (the model has %lld), ", (long long)given);
  fprintf(f, own.head ? "head %lld" : "each head", (long long)own.head);
  if (*answer.text) fprintf(f, "; found: ");
  for (const char *c = answer.text; *c; c++) {
    if (strchr("<>&", *c)) fprintf(f, "&#%d;", *c);
    else fputc((unsigned char)*c < ' ' ? '?' : *c, f);
  }
  fprintf(f, "</text>\n");
  draw_legend(f, y);
  for (int64_t from = 0; from < count; from += across) {
    const int64_t columns = count - from < across ? count - from : across;
    for (int m = 0; m < shown; m++) {
      y = draw_labels(f, from, columns, y + 10);
      y = draw_map(f, &maps[m], slots, from, columns, y);
    }
    y += 16;
  }
  if (shown == 1) fprintf(f, "<text x=\"40\" y=\"%lld\">%s</text>\n", (long long)y, no_unpack);
  fprintf(f, "</svg>\n");
}

static int write_picture(const map *maps, int shown, int64_t slots, int64_t given, int64_t layers) {
  new_file file;
  if (!file_begin(&file, own.svg)) return 2;
  picture(file.to, maps, shown, slots, given, layers);
  return file_end(&file);
}

static int draw_on(luna_ctx *ctx, const luna_encoder *e, bool pools_memory) {
  const luna_layer_config *layer = &e->config.layer;
  const int64_t heads = e->config.layer.heads, pack_heads = layer->pack_heads ? layer->pack_heads : heads,
      min_heads = pack_heads < heads ? pack_heads : heads;
  int32_t input[TOKENS];
  luna_tensor *pack, *unpack;
  for (int64_t i = 0; i < count; i++) input[i] = tokens[i].token;
  if (layer->attention != LUNA_ATTENTION_LUNA)
    return fail("the model's attention is not Luna's, so it has no memory to look at");
  if (own.layer > e->config.layers)
    return fail("the model has %lld layers and no layer %lld", (long long)e->config.layers, (long long)own.layer);
  if (own.head > min_heads)
    return fail("the model has %lld heads and no head %lld", (long long)min_heads, (long long)own.head);
  luna_begin_inference(ctx);
  if (!slot_weights(e, &(luna_input){ input, NULL, 1, count, NULL }, own.layer, &pack, &unpack)) return failed(ctx);
  const int64_t slots = pack->shape[2];
  float *values = (float *)malloc((size_t)((pack_heads + heads) * slots * count) * sizeof(float));
  if (!values) return fail("out of memory");
  const map maps[2] = {
    { "pack: where each memory slot looks, by head: a row is a slot and sums to 1", values, pack_heads, count, 1,
      1 / (double)count },
    { "unpack: which slots each token reads, by head: a row is a slot, a column sums to 1",
      values + pack_heads * slots * count, heads, 1, slots, 1 / (double)slots }
  };
  const bool trained = !pools_memory || own.layer < e->config.layers || e->config.tied_layers;
  const bool got = luna_read(pack, maps[0].value) == LUNA_OK && luna_read(unpack, maps[1].value) == LUNA_OK;
  int status = got ? 0 : failed(ctx);
  if (!status)
    status = write_picture(maps, trained ? 2 : 1, slots, e->config.layer.memory, e->config.layers);
  if (!status)
    say("%s shows layer %lld of %lld with %lld slots and %lld tokens%s%s.", own.svg, (long long)own.layer,
        (long long)e->config.layers, (long long)slots, (long long)count, trained ? "" : "; ",
        trained ? "" : no_unpack);
  return free(values), status;
}

static int draw_command(luna_ctx *ctx, const char **words) {
  static unsigned char text[8 * TOKENS + 1];
  luna_model model;
  luna_params *params = luna_params_open(ctx);
  if (luna_load_model(&model, params, luna_path(words[0])) != LUNA_OK) return failed(ctx);
  if (model.kind == LUNA_MODEL_LM) return fail("%s is a causal language model, which has no encoder", words[0]);
  const luna_encoder *e = model.kind == LUNA_MODEL_CLASSIFIER ? &model.classifier.encoder :
                          model.kind == LUNA_MODEL_MASKED_LM ? &model.masked_lm.encoder : &model.seq2seq.encoder;
  if (!e->embedding) return fail("%s reads numbers, not a text", words[0]);
  const luna_pooling pooling = model.kind == LUNA_MODEL_CLASSIFIER ? model.classifier.config.pooling : LUNA_POOLING_CLS;
  size_t size = own.text ? strlen(own.text) : fread(text, 1, sizeof text - 1, stdin);
  if (size >= sizeof text) size = sizeof text - 1;
  if (own.text) memcpy(text, own.text, size);
  while (size > 0 && (text[size - 1] == '\n' || text[size - 1] == '\r')) size--;
  text[size] = 0;
  if (size > 0 && cut(params, words[0], (span){ text, (int64_t)size }, e->embedding->shape[0])) return 2;
  if (count > 0 && model.kind == LUNA_MODEL_CLASSIFIER && find_answer(ctx, &model.classifier)) return 2;
  return count > 0 ? draw_on(ctx, e, pooling == LUNA_POOLING_MEMORY || pooling == LUNA_POOLING_MEMORY_BATCH) :
      fail("there is no text to look at");
}

static const command commands[] = {
  { "draw", { "model: A file that classify, listops, mlm or translate wrote." }, "Draws where attention looks.",
   draw_command, "reviews.safetensors --text \"great acting but a dull story\" --plot map.svg" },
  { 0 }
};

int main(int arguments, char **given) { return example("attention_map", commands, flags, arguments, given); }
