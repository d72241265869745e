/* export: turns a trained causal model into two files of C for a microcontroller, without allocation, libm or a file
   format.

     cc -O2 -I. examples/export.c -o export -lm -lpthread

     export detector.safetensors --out detector                   writes detector.h and detector.c, weights in 8 bits
     export detector.safetensors --out src/detector --weights f32 keeps float weights; luna_stream agrees to 1e-5
     export detector.safetensors --out detector --learn classes   lets its output layer learn on the device

   The model is a luna_lm with Luna attention, of tokens or of features (lm; series --causal). examples/mcu runs it. In
   8 bits each row of a matrix has a scale, max / 127, and so has each row that is multiplied with it. The products are
   exact integers. Rows shorter than 16, norms, convolutions and positions stay float. The C gives the same bits on
   every machine and with every compiler. */
#define LUNA_IMPLEMENTATION
#include "luna.h"

#include "common/example.h"

#include <ctype.h>

#include "export_code.h"

enum { LEARN_NOTHING, LEARN_CLASSES, LEARN_VALUES };
static struct { const char *out; int64_t weights, learn; } own = { .weights = LUNA_DTYPE_I8 };
static const flag flags[] = {
  { "--out", "", STRING(own.out),
   "Says where to write the result. TEXT is the folder and name of two files, without .c. The name must be valid in "
   "C." },
  { "--weights", "", CHOICE(own.weights, "f32 i8"), "Sets the type of the weights. i8 takes a quarter of the bytes." },
  { "--learn", "", CHOICE(own.learn, "no classes values"),
   "Lets the output layer learn on the device. Its outputs are classes or values." },
  { 0 }
};

enum { SHORTEST_ROW = 16, LONGEST_ROW = 32768 }; /* of 8 bits; in the longest no sum overflows */
/* Means over at most as many steps need no more than float: at 8192 still 1e-6 from those that keep what rounding takes
   from them, over 10,000 steps. */
enum { LONGEST_FLOAT_HORIZON = 4096 };

static luna_lm model;
static luna_params *params;
static int64_t horizon;              /* luna.horizon: eq. 7's t stays there; 0: it does not */
static const char *name;             /* of the exported model */
static FILE *out;
static int64_t flash;                /* bytes of weights */

/* ---- what there is to export ------------------------------------------------------------------------------------- */

typedef enum part_kind { MATRIX, NORM, VECTOR } part_kind;
typedef struct part {
  part_kind kind;
  const char *name;
  const float *weight, *bias;        /* [rows, columns]; of a vector columns is 1; bias [rows] or null */
  int64_t rows, columns;
} part;
enum { MAX_PARTS = 16 };

static const luna_tensor **used;     /* parameters that are exported */
static int64_t used_count;
static const float *values(const luna_tensor *t) {
  if (!t) return NULL;
  used = (const luna_tensor **)grow((void *)used, used_count + 1, sizeof *used);
  used[used_count++] = t;
  return t->data;
}
static bool is_eight(int64_t columns) { return own.weights == LUNA_DTYPE_I8 && columns >= SHORTEST_ROW; }
static bool is_tied(void) { return model.config.layer.sharing != LUNA_SHARING_FULL; }
static bool routes(void) { return model.config.layer.forget == LUNA_FORGET_ROUTED; }
static bool forgets(void) { return model.config.layer.forget != LUNA_FORGET_NONE; }
/* whether the means keep what rounding takes from them */
static bool is_compensated(void) { return !forgets() && (horizon == 0 || horizon > LONGEST_FLOAT_HORIZON); }
static bool is_folded(void) { /* scores by one product, where that takes fewer multiply-adds */
  return model.config.layer.heads * model.config.layer.memory <= model.config.layer.dim + model.config.layer.memory;
}
static int64_t outputs(void) { return model.config.outputs ? model.config.outputs : model.config.vocab; }
static int64_t kernel_width(void) { /* a history of at least one row: a kernel of one column gets a column of zeros */
  const int64_t width = model.config.layer.convolution;
  return width == 1 ? 2 : width;
}

static part matrix_of(const char *part_name, const luna_linear_layer *layer) {
  return (part){ MATRIX, part_name, values(layer->weight), values(layer->bias), layer->weight->shape[0],
                 layer->weight->shape[1] };
}
static part norm_of(const char *part_name, const luna_norm_layer *norm) {
  return (part){ NORM, part_name, values(norm->weight), values(norm->bias), norm->weight->shape[0], 1 };
}
static part vector_of(const char *part_name, const float *at, int64_t count) {
  return (part){ VECTOR, part_name, at, NULL, count, 1 };
}
static float **made;                 /* arrays that live until the end */
static int64_t made_count;
static float *floats(int64_t count) {
  made = (float **)grow(made, made_count + 1, sizeof *made);
  return made[made_count++] = (float *)grow(NULL, count, sizeof(float));
}

/* q with the scale 1 / sqrt(d_h) */
static part query_of(const luna_linear_layer *q) {
  const int64_t d = model.config.layer.dim;
  const double scale = 1 / sqrt((double)(d / model.config.layer.heads));
  part p = matrix_of("q", q);
  float *weight = floats(d * d), *bias = floats(d);
  for (int64_t i = 0; i < d * d; i++) weight[i] = (float)(scale * (double)p.weight[i]);
  for (int64_t i = 0; i < d; i++) bias[i] = (float)(scale * (double)p.bias[i]);
  p.weight = weight, p.bias = bias;
  return p;
}
/* pq = (P Wpq + bpq) / sqrt(d_h), [heads, slots, d_h] */
static double *memory_queries(const luna_causal_layer *layer) {
  const int64_t d = model.config.layer.dim, head = d / model.config.layer.heads, l = model.config.layer.memory;
  const float *p = values(layer->memory), *w = values(layer->attention.pq.weight),
      *b = values(layer->attention.pq.bias);
  double *queries = (double *)grow(NULL, d * l, sizeof(double));
  for (int64_t s = 0; s < l; s++)
    for (int64_t i = 0; i < d; i++) {
      double sum = (double)b[i];
      for (int64_t j = 0; j < d; j++) sum += (double)p[s * d + j] * (double)w[i * d + j];
      queries[(i / head * l + s) * head + i % head] = sum / sqrt((double)head);
    }
  return queries;
}
/* sum of queries[j] column[j * step] over a head */
static float folded(const double *queries, const float *column, int64_t step, int64_t head) {
  double sum = 0;
  for (int64_t j = 0; j < head; j++) sum += queries[j] * (double)column[j * step];
  return (float)sum;
}
/* Scores k_p pq^T of all heads, k_p = x Wpc + bpc: folded, x (pq_h Wpc_h)^T + pq_h bpc_h, or by two parts. */
static int score_parts(const luna_causal_layer *layer, part *parts) {
  const int64_t d = model.config.layer.dim, l = model.config.layer.memory, rows = model.config.layer.heads * l,
      head = d / model.config.layer.heads;
  double *queries = memory_queries(layer);
  const part pack = matrix_of("pack", &layer->attention.pc);
  float *weight = floats(rows * (is_folded() ? d : head)), *bias = floats(rows);
  for (int64_t i = 0; i < rows * head && !is_folded(); i++) weight[i] = (float)queries[i];
  for (int64_t r = 0; r < rows && is_folded(); r++) {
    const int64_t first = r / l * head; /* of the head's rows in pack */
    bias[r] = folded(queries + r * head, pack.bias + first, 1, head);
    for (int64_t c = 0; c < d; c++)
      weight[r * d + c] = folded(queries + r * head, pack.weight + first * d + c, d, head);
  }
  free(queries);
  parts[0] = is_folded() ? (part){ MATRIX, "scores", weight, bias, rows, d } : pack;
  parts[1] = vector_of("queries", weight, rows * head);
  return is_folded() ? 1 : 2;
}
/* [d, width] with a column of zeros before a kernel of one column */
static part kernel_of(const luna_causal_layer *layer) {
  const int64_t d = model.config.layer.dim, width = kernel_width(), own_width = layer->kernel->shape[1];
  const float *from = values(layer->kernel);
  float *kernel = floats(d * width);
  for (int64_t i = 0; i < d * width; i++)
    kernel[i] = i % width < width - own_width ? 0 : from[i / width * own_width + i % width - (width - own_width)];
  return vector_of("kernel", kernel, d * width);
}
/* what slots keep, of a constant gate: e^max(ln(sigmoid(b)) / 16, -1) */
static part decay_of(const luna_linear_layer *forget) {
  const int64_t rows = model.config.layer.heads * model.config.layer.memory;
  const float *b = values(forget->bias);
  float *decay = floats(rows);
  for (int64_t i = 0; i < rows; i++) decay[i] = (float)exp(fmax(-log1p(exp(-(double)b[i])) / 16, -1));
  return vector_of("decay", decay, rows);
}
/* e^-lambda, what a routed memory's slots keep of their weights, for each head */
static part fading_of(const luna_tensor *fade) {
  const int64_t heads = model.config.layer.heads;
  const float *logit = values(fade);
  float *keep = floats(heads);
  for (int64_t h = 0; h < heads; h++) keep[h] = (float)exp(-0.25 / (1 + exp(-(double)logit[h])));
  return vector_of("keep", keep, heads);
}
/* What decides which slots a token is written to, and how much of it. */
static int writing_parts(const luna_causal_layer *layer, part *parts) {
  const luna_causal_attention_layer *a = &layer->attention;
  if (!routes()) return score_parts(layer, parts);
  parts[0] = matrix_of("router", &a->router);
  parts[1] = matrix_of("strength", &a->strength);
  parts[2] = fading_of(a->fade);
  return 3;
}
static int layer_parts(const luna_causal_layer *layer, part *parts) {
  const luna_causal_attention_layer *a = &layer->attention;
  int count = 0;
  parts[count++] = norm_of("attention_norm", &layer->attention_norm);
  if (layer->kernel) parts[count++] = kernel_of(layer);
  if (layer->kernel) parts[count++] = vector_of("kernel_bias", values(layer->kernel_bias), model.config.layer.dim);
  parts[count++] = query_of(&a->q);
  if (!is_tied()) parts[count++] = matrix_of("k", &a->k);
  parts[count++] = matrix_of("v", &a->v);
  count += writing_parts(layer, parts + count);
  if (model.config.layer.forget == LUNA_FORGET_GATED) parts[count++] = matrix_of("forget", &a->forget);
  if (model.config.layer.forget == LUNA_FORGET_CONSTANT) parts[count++] = decay_of(&a->forget);
  if (model.config.layer.output_gate) parts[count++] = matrix_of("gate", &a->gate);
  parts[count++] = matrix_of("out", &a->out);
  parts[count++] = norm_of("final_norm", &layer->feed_forward.norm);
  parts[count++] = matrix_of("fc1", &layer->feed_forward.fc1);
  if (model.config.layer.gated) parts[count++] = matrix_of("fc3", &layer->feed_forward.fc3);
  parts[count++] = matrix_of("fc2", &layer->feed_forward.fc2);
  return count;
}
/* what there is beside the layers */
static int model_parts(part *parts) {
  const int64_t k = model.config.features;
  const luna_linear_layer embedding = { model.embedding, NULL };
  int count = 0;
  if (k) parts[count++] = vector_of("feature_mean", values(model.input.mean), k);
  if (k) parts[count++] = vector_of("feature_scale", values(model.input.scale), k);
  if (k) parts[count++] = matrix_of("input", &model.input.projection);
  else parts[count++] = matrix_of("embedding", &embedding);
  if (model.positions)
    parts[count++] = vector_of("positions", values(model.positions), luna_count(model.positions));
  if (model.norm.weight) parts[count++] = norm_of("final_norm", &model.norm);
  if (model.output.weight) parts[count++] = matrix_of("output_layer", &model.output);
  return count;
}

/* ---- numbers ----------------------------------------------------------------------------------------------------- */

static phrase too_large;             /* an array that has a number which no float is */
static void write_float(float x) {
  char text[32];
  snprintf(text, sizeof text, "%.9g", (double)x);
  fprintf(out, "%s%sf", text, strpbrk(text, ".e") ? "" : ".0");
}
static void open_array(const char *type, const char *owner, const char *part_name, const char *suffix, int64_t count) {
  fprintf(out, "static const %s %s%s%s[%lld] = {", type, owner, part_name, suffix, (long long)count);
}
static void write_floats(const char *owner, const char *part_name, const char *suffix, const float *x, int64_t count) {
  for (int64_t i = 0; i < count; i++)
    if (!isfinite(x[i])) snprintf(too_large.text, sizeof too_large.text, "%s%s%s", owner, part_name, suffix);
  open_array("float", owner, part_name, suffix, count);
  for (int64_t i = 0; i < count; i++) fputs(i % 8 ? " " : "\n  ", out), write_float(x[i]), fputc(',', out);
  fputs("\n};\n", out);
  flash += count * (int64_t)sizeof(float);
}
/* rows by fours, column after column */
static void write_matrix(const char *owner, const part *p) {
  const int64_t rows = (p->rows + 3) / 4 * 4;
  float *x = floats(rows * p->columns);
  for (int64_t i = 0; i < rows * p->columns; i++) {
    const int64_t r = i / (4 * p->columns) * 4 + i % 4, c = i / 4 % p->columns;
    x[i] = r < p->rows ? p->weight[r * p->columns + c] : 0;
  }
  write_floats(owner, p->name, "_w", x, rows * p->columns);
}
/* a row's scale, max / 127; 0 of zeros */
static float scale_of(const float *row, int64_t n) {
  float max = 0;
  for (int64_t i = 0; i < n; i++) if (fabsf(row[i]) > max) max = fabsf(row[i]);
  return max < 1e-30f ? 0 : max / 127;
}
/* rows by fours, four columns of a row after those of the row before, in the order 0 2 1 3 */
static void write_matrix8(const char *owner, const part *p) {
  const int64_t rows = (p->rows + 3) / 4 * 4, columns = (p->columns + 3) / 4 * 4;
  float *scale = floats(p->rows);
  for (int64_t r = 0; r < p->rows; r++) scale[r] = scale_of(p->weight + r * p->columns, p->columns);
  open_array("uint8_t", owner, p->name, "_w", rows * columns);
  for (int64_t i = 0; i < rows * columns; i++) {
    const int64_t r = i / (4 * columns) * 4 + i / 4 % 4, c = i / 16 * 4 % columns + i % 2 * 2 + i % 4 / 2;
    const bool some = r < p->rows && c < p->columns && scale[r] > 0 && isfinite(scale[r]);
    const int byte = 128 + (some ? (int)rintf(p->weight[r * p->columns + c] / scale[r]) : 0);
    fprintf(out, "%s%d,", i % 24 ? " " : "\n  ", byte);
  }
  fputs("\n};\n", out);
  flash += rows * columns;
  write_floats(owner, p->name, "_scale", scale, p->rows);
}
static void write_arrays(const char *owner, const part *p) {
  if (p->kind == VECTOR) write_floats(owner, p->name, "", p->weight, p->rows);
  else if (p->kind == NORM) write_floats(owner, p->name, "_w", p->weight, p->rows);
  else if (is_eight(p->columns)) write_matrix8(owner, p);
  else write_matrix(owner, p);
  if (p->bias) write_floats(owner, p->name, "_b", p->bias, p->rows);
}
static const char *type_of(const part *p) {
  if (p->kind != MATRIX) return p->kind == NORM ? "norm " : "const float *";
  return is_eight(p->columns) ? "matrix8 " : "matrix ";
}
static void write_initializer(const char *owner, const part *p) {
  if (p->kind == VECTOR) fprintf(out, "%s%s", owner, p->name);
  else {
    fprintf(out, "{ %s%s_w", owner, p->name);
    if (p->kind == MATRIX && is_eight(p->columns)) fprintf(out, ", %s%s_scale", owner, p->name);
    if (p->bias) fprintf(out, ", %s%s_b", owner, p->name);
    else if (p->kind == MATRIX) fprintf(out, ", 0");
    fprintf(out, " }");
  }
}
/* positions t: of a circle in 2^64 parts, w_i / (2 pi) a step: it wraps as circles do */
static void write_turns(void) {
  const int64_t half = model.config.layer.dim > 1 ? model.config.layer.dim / 2 : 1; /* C has no empty arrays. */
  open_array("uint64_t", "", "turns", "", half);
  for (int64_t i = 0; i < half; i++) {
    const long double frequency = (float)pow(10000, half > 1 ? -(double)i / (double)(half - 1) : 0);
    fprintf(out, "%s%lluu,", i % 4 ? " " : "\n  ",
            (unsigned long long)(frequency / 6.283185307179586476925287L * 18446744073709551616.0L));
  }
  fputs("\n};\n", out);
  flash += half * 8;
}

static void write_weights(void) {
  part parts[MAX_PARTS];
  char owner[32];
  int count = model_parts(parts);
  for (int i = 0; i < count; i++) write_arrays("", &parts[i]);
  for (int i = 0; i < count; i++) {
    if (parts[i].kind == VECTOR) continue;
    fprintf(out, "static const %s%s = ", type_of(&parts[i]), parts[i].name);
    write_initializer("", &parts[i]);
    fputs(";\n", out);
  }
  if (model.config.positions == LUNA_POSITIONS_SINUSOIDAL) write_turns();
  for (int64_t n = 0; n < model.config.layers; n++) {
    snprintf(owner, sizeof owner, "layer%lld_", (long long)n);
    count = layer_parts(&model.layers[n], parts);
    for (int i = 0; i < count; i++) write_arrays(owner, &parts[i]);
  }
  fputs("static const struct layer {\n", out);
  for (int i = 0; i < count; i++) fprintf(out, "  %s%s;\n", type_of(&parts[i]), parts[i].name);
  fputs("} layers[LAYERS] = {\n", out);
  for (int64_t n = 0; n < model.config.layers; n++) {
    snprintf(owner, sizeof owner, "layer%lld_", (long long)n);
    fputs("  {", out);
    for (int i = 0; i < count; i++) {
      fputs(i % 3 ? " " : "\n    ", out);
      write_initializer(owner, &parts[i]);
      fputc(',', out);
    }
    fputs("\n  },\n", out);
  }
  fputs("};\n\n", out);
}

/* ---- code -------------------------------------------------------------------------------------------------------- */

typedef struct fact { const char *name; bool holds; } fact;
typedef struct number { const char *name; int64_t is; } number;
static fact facts[48];
static number numbers[20];
static bool eight_d, eight_f, eight_i;

static bool needs(luna_activation kind) {
  return model.config.layer.activation == kind || (!forgets() && model.config.layer.omega == kind);
}
/* Bytes of stack that a step takes at most: the arrays of its longest chain of calls, each as large as on any machine,
   and some for registers, addresses and single numbers. */
static int64_t stack_of_step(int64_t widest) {
  enum { FRAMES = 768 };
  const int64_t d = model.config.layer.dim, ffn = model.config.layer.ffn;
  const int64_t slots = model.config.layer.memory, all_slots = model.config.layer.heads * slots;
  const int64_t quantized = (widest + 3) / 4 * 4 + 2; /* row8 */
  int64_t attention = 3 * d + all_slots + 2 * slots;  /* step_head's w and shares too */
  if (!is_tied()) attention += d;
  if (!is_folded() && !routes()) attention += d;
  if (routes()) attention += model.config.layer.heads;
  if (model.config.layer.forget == LUNA_FORGET_GATED) attention += all_slots;
  if (model.config.layer.output_gate) attention += d;
  if (eight_d) attention += quantized;
  int64_t feed_forward = d + ffn;
  if (model.config.layer.gated) feed_forward += ffn;
  if (eight_d || eight_f) feed_forward += quantized;
  int64_t step = d + model.config.features + (attention > feed_forward ? attention : feed_forward);
  if (eight_i) step += quantized;
  const int64_t learning = own.learn != LEARN_NOTHING ? outputs() + (eight_d ? quantized : 0) : 0;
  return FRAMES + 4 * (step > learning ? step : learning);
}
static void find_facts(void) {
  const luna_lm_config *c = &model.config;
  const int64_t k = c->features, d = c->layer.dim;
  const bool log = needs(LUNA_ACTIVATION_SOFTPLUS) || needs(LUNA_ACTIVATION_SOFTPLUS2);
  eight_d = is_eight(d), eight_f = is_eight(c->layer.ffn), eight_i = k && is_eight(k);
  const int64_t widest = eight_f && c->layer.ffn > d ? c->layer.ffn : d;
  const fact all[] = {
    { "features", k != 0 }, { "tokens", k == 0 }, { "conv", c->layer.convolution != 0 },
    { "pre", c->layer.pre_norm }, { "post", !c->layer.pre_norm }, { "rms", c->layer.norm == LUNA_NORM_RMS },
    { "layernorm", c->layer.norm == LUNA_NORM_LAYER }, { "gated", c->layer.gated }, { "tied", is_tied() },
    { "full", !is_tied() }, { "folded", is_folded() && !routes() }, { "unfolded", !is_folded() && !routes() },
    { "learned", c->positions == LUNA_POSITIONS_LEARNED }, { "sinusoidal", c->positions == LUNA_POSITIONS_SINUSOIDAL },
    { "horizon", horizon != 0 }, { "kahan", is_compensated() },
    { "log", log || c->layer.forget == LUNA_FORGET_GATED || routes() }, { "forgets", forgets() },
    { "routes", routes() }, { "scored", forgets() && !routes() },
    { "gates", c->layer.forget == LUNA_FORGET_GATED }, { "decays", c->layer.forget == LUNA_FORGET_CONSTANT },
    { "outgate", c->layer.output_gate },
    { "exp2", needs(LUNA_ACTIVATION_SOFTPLUS2) }, { "gelu", needs(LUNA_ACTIVATION_GELU) },
    { "learn", own.learn != LEARN_NOTHING }, { "classes", own.learn == LEARN_CLASSES },
    { "values", own.learn == LEARN_VALUES }, { "d8", eight_d }, { "f8", eight_f }, { "i8", eight_i },
    { "r8", eight_d || eight_f }, { "m8", eight_d || eight_f || eight_i },
    { "mf", !eight_d || !eight_f || (k && !eight_i) }, { "head", c->outputs != 0 } };
  const number sizes[] = { /* heads before head, and so on: the first that fits counts */
    { "features", k }, { "vocab", c->vocab }, { "outputs", outputs() }, { "layers", c->layers },
    { "heads", c->layer.heads }, { "head", d / c->layer.heads }, { "slots", c->layer.memory }, { "dim", d },
    { "ffn", c->layer.ffn }, { "width", kernel_width() }, { "means", is_tied() ? 1 : 2 },
    { "max_length", c->max_length }, { "horizon", horizon }, { "widest", eight_i && k > widest ? k : widest },
    { "stack", stack_of_step(eight_i && k > widest ? k : widest) } };
  memcpy(facts, all, sizeof all);
  memcpy(numbers, sizes, sizeof sizes);
}
/* whether "a !b" holds, up to the colon */
static bool holds(const char *at) {
  bool all = true;
  while (*at != ':') {
    const bool not = *at == '!';
    const size_t size = strcspn(at += not, " :");
    const fact *f = facts;
    while (f->name && (strlen(f->name) != size || memcmp(f->name, at, size) != 0)) f++;
    if (size > 0) all = all && f->holds != not;
    at += size;
    at += *at == ' ';
  }
  return all;
}
/* Of what series keeps, number i; null: it keeps no such text. */
static const char *kept(const char *key, int64_t i) {
  char of[40];
  snprintf(of, sizeof of, "series.%s%lld", key, (long long)i);
  return luna_params_get_text(params, of);
}
/* whether it has these texts for all of 0..count - 1: a table with holes would say the wrong names */
static bool keeps(const char *key, int64_t count) {
  for (int64_t i = 0; i < count; i++) if (!kept(key, i)) return false;
  return count > 0;
}
/* Whether it is a forecast, of how many quantiles, and what it is of: a number for each step ahead and feature. */
static bool forecasts(int *interval, int64_t *changes) {
  const char *task = kept("task", 0);
  int forecast;
  if (!task || sscanf(task, "%*d %*d %d %*d %*d %d", &forecast, interval) != 2 || !forecast) return false;
  *changes = outputs() / (*interval ? 3 : 1);
  return *interval >= 0 && *interval < 100 && keeps("change", *changes);
}
static void write_define(const char *what) {
  fputs("\n#define ", out);
  for (const char *s = name; *s; s++) fputc(toupper((unsigned char)*s), out);
  fprintf(out, "_%s", what);
}
/* Names as strings: of the columns, for a program that reads a table, and of the classes, for one that says them. */
static void write_strings(const char *what, const char *key, int64_t count) {
  if (!keeps(key, count)) return;
  write_define(what);
  for (int64_t i = 0; i < count; i++) {
    fputs(i ? ", \\\n  \"" : " \\\n  \"", out);
    for (const char *text = kept(key, i); *text; text++)
      fprintf(out, isalnum((unsigned char)*text) || *text == '_' ? "%c" : "\\%03o", (unsigned char)*text);
    fputc('"', out);
  }
}
/* The units of a forecast. */
static void write_changes(void) {
  int interval;
  int64_t changes;
  if (!forecasts(&interval, &changes)) return;
  write_define("CHANGES");
  for (int64_t i = 0; i < changes; i++) {
    const float change = strtof(kept("change", i), NULL);
    fputs(i ? ", \\\n  " : " \\\n  ", out);
    write_float(isfinite(change) ? change : 0);
  }
}
/* writes what $... stands for; returns what follows it */
static const char *write_word(const char *at) {
  const number *n = numbers;
  if (strncmp(at, "NAME", 4) == 0) {
    for (const char *s = name; *s; s++) fputc(toupper((unsigned char)*s), out);
    return at + 4;
  }
  if (strncmp(at, "tables", 6) == 0) {
    write_strings("COLUMNS", "column", model.config.features);
    write_strings("CLASSES", "class", outputs());
    return write_changes(), at + 6;
  }
  if (strncmp(at, "name", 4) == 0) return fputs(name, out), at + 4;
  while (n->name && strncmp(at, n->name, strlen(n->name)) != 0) n++;
  if (n->name) return fprintf(out, "%lld", (long long)n->is), at + strlen(n->name);
  if (*at != 'd' && *at != 'f') return fputc('$', out), at; /* no word: what is written does not compile */
  const bool eight = *at == 'd' ? eight_d : eight_f;
  const size_t size = at[1] == '{' ? strcspn(at, "}") : 0;
  if (!size) return fputs(eight ? "8" : "", out), at + 1;
  if (eight) fputs("&row", out);
  else fprintf(out, "%.*s", (int)size - 2, at + 2);
  return at + size + 1;
}
static void write_code(const char *const *lines) {
  for (; *lines; lines++) {
    bool active = true, any = **lines != '@';
    for (const char *at = *lines; *at;) {
      if (*at == '@') active = holds(at + 1), any = any || active, at = strchr(at, ':') + 1;
      else if (!active) at++;
      else if (*at == '$') at = write_word(at + 1);
      else fputc(*at++, out);
    }
    if (any) fputc('\n', out);
  }
}
static void write_function(const char *function, luna_activation kind) {
  for (size_t i = 0; i < sizeof export_functions / sizeof *export_functions; i++)
    if (export_functions[i].kind == kind)
      fprintf(out, "static float %s(float x) { return %s; }\n", function, export_functions[i].value);
}
static void write_about(const char *suffix) {
  const luna_lm_config *c = &model.config;
  fprintf(out, "/* %s%s, written by luna.h's export: a causal model of %lld %s and %lld outputs a step, %lld layers,\n"
          "   weights in %s. Sections and equations are those of arXiv 2106.01540v2. */\n", name, suffix,
          (long long)(c->features ? c->features : c->vocab), c->features ? "features" : "tokens", (long long)outputs(),
          (long long)c->layers, own.weights == LUNA_DTYPE_F32 ? "float" : "8 bits");
}
/* A line of names in a comment, of the characters that can do no harm. */
static void write_names(const char *what, const char *key, int64_t count) {
  if (!keeps(key, count)) return;
  fprintf(out, "/* %s:", what);
  for (int64_t i = 0; i < count; i++) {
    fprintf(out, "%s%d is ", i ? ", " : " ", (int)i);
    for (const char *text = kept(key, i); *text; text++)
      fputc(isalnum((unsigned char)*text) || *text == '_' ? *text : '.', out);
  }
  fputs(" */\n", out);
}
/* What a model of classes gives: the weights have series' temperature already. */
static void write_classes(void) {
  if (!kept("class", 0)) return;
  write_names("y[i], of which the largest is found", "class", outputs());
  fputs("/* y are logits: class i has the probability e^y[i] / sum over j of e^y[j]; the temperature that\n"
        "   series found is in the weights. Of two classes, p[1] > 0.8 where y[1] - y[0] > 1.386, ln(0.8 / 0.2). */\n",
        out);
}
/* What a forecast gives: changes from the last row, each in a unit of its own. */
static void write_forecast(void) {
  const char *ahead = kept("ahead", 0);
  const long long k = model.config.features;
  int interval;
  int64_t changes;
  if (!ahead || !forecasts(&interval, &changes)) return;
  const int levels = interval ? 3 : 1;
  fprintf(out, "/* y[(a * %lld + i) * %d + q]: how x[i] will have changed so many steps ahead: [", k, levels);
  for (; *ahead; ahead++) if (strchr("0123456789,", *ahead)) fputc(*ahead, out);
  if (interval) fprintf(out, "][a]; quantile [%g, 0.5, %g][q]", 0.5 - interval / 200.0, 0.5 + interval / 200.0);
  else fputs("][a]; the median", out);
  fprintf(out, ".\n   With change[] = { CHANGES } the forecast, in the data's unit, is\n"
          "   x[i] + change[a * %lld + i] * y[(a * %lld + i) * %d + q]%s. */\n", k, k, levels,
          interval ? "; the three may cross: sort them" : "");
}
static void write_h(void) {
  write_about(".h");
  write_names("x[i]", "column", model.config.features);
  write_classes();
  write_forecast();
  write_code(export_header);
}
static void write_c(void) {
  write_about(".c");
  write_code(export_types);
  write_weights();
  write_code(export_numbers);
  write_function("activation", model.config.layer.activation);
  if (forgets() && !routes()) {
    fputs("static float omega(float x) {"
          " return exponential((x < -15.0f) ? -15.0f : ((x > 15.0f) ? 15.0f : x)); }\n", out);
  } else if (!forgets()) {
    write_function("omega", model.config.layer.omega);
  }
  fputc('\n', out);
  write_code(export_vectors);
  write_code(export_model);
  if (own.learn) write_code(export_learning);
}

/* ---- checks, files ----------------------------------------------------------------------------------------------- */

typedef struct unknown { char key[64]; bool horizon; } unknown;
static void look_at_pair(void *user, const char *key, const char *value) {
  static const char known[] = " kind vocab layers memory dim heads ffn convolution sharing activation gated omega"
      " pre_norm attention positions max_length features outputs norm dropout attention_dropout activation_dropout"
      " optimizer attempts updates skipped skipped_in_row lr step seed horizon fixed_horizon forget output_gate"
      " format output_norm rotary ";                       /* rotary: of softmax attention alone */
  unknown *found = (unknown *)user;
  char word[80];
  if (strncmp(key, "luna.", 5) != 0) return;
  snprintf(word, sizeof word, " %.70s ", key + 5);
  if (!strstr(known, word)) snprintf(found->key, sizeof found->key, "%.60s", key);
  if (strcmp(key, "luna.horizon") != 0) return;
  char *end;
  horizon = strtol(value, &end, 10);
  found->horizon = end == value || *end || horizon < 0 || horizon > UINT32_MAX;
}
static int check_model(luna_ctx *ctx, const char *path) {
  luna_model found;
  unknown about = { "", false };
  params = luna_params_open(ctx);
  const luna_inspection look = { .pair = look_at_pair, .user = &about };
  if (luna_load_model(&found, params, luna_path(path)) != LUNA_OK || luna_inspect(ctx, luna_path(path),
                                                                                  &look) != LUNA_OK) return failed(ctx);
  if (found.kind != LUNA_MODEL_LM)
    return fail("%s is no causal model; only a causal model can stream (luna_lm, or series --causal)", path);
  model = found.lm;
  const luna_lm_config *c = &model.config;
  if (c->layer.attention != LUNA_ATTENTION_LUNA)
    return fail("%s has another attention than Luna's, and only Luna's streams in constant memory", path);
  if (*about.key) return fail("%s has an option that export does not know: %s", path, about.key);
  if (about.horizon) return fail("%s: luna.horizon is not a number of steps", path);
  const int64_t widest = c->layer.ffn > c->layer.dim ? c->layer.ffn : c->layer.dim;
  const int64_t rows = outputs() > c->layer.heads * c->layer.memory ? outputs() : c->layer.heads * c->layer.memory;
  if (widest > LONGEST_ROW || c->features > LONGEST_ROW || rows > INT32_MAX / 4 / LONGEST_ROW * 1024 ||
      luna_params_element_count(params) > INT32_MAX / 8)
    return fail("%s is too large; it has rows of more than %d numbers or more than a GB of weights", path, LONGEST_ROW);
  return 0;
}
/* With output_norm outputs are (W x + b) scale + mean, which is one matrix and one bias: W scale, b scale + mean. */
static int fold_output_norm(void) {
  if (!model.config.output_norm) return 0;
  if (own.learn)
    return fail("the model's outputs are scaled (output_norm), and such an output layer cannot learn on the device");
  const float *mean = values(model.output_mean), *scale = values(model.output_scale);
  float *weight = model.output.weight->data, *bias = model.output.bias->data;
  for (int64_t i = 0; i < luna_count(model.output.weight); i++) weight[i] *= scale[i / model.config.layer.dim];
  for (int64_t i = 0; i < outputs(); i++) bias[i] = bias[i] * scale[i] + mean[i];
  return 0;
}
/* every parameter has been exported, and is finite */
static int check_parameters(void) {
  const char *parameter;
  for (int64_t i = 0; i < luna_params_tensor_count(params); i++) {
    const luna_tensor *t = luna_params_at(params, i, &parameter);
    int64_t at = 0;
    while (at < used_count && used[at] != t) at++;
    if (at == used_count) return fail("the model has a parameter that export does not know: %s", parameter);
    for (at = 0; at < luna_count(t); at++)
      if (!isfinite(t->data[at])) return fail("%s has a number that is not finite", parameter);
  }
  if (!*too_large.text) return 0;
  return fail("%s, which export computes from the model's weights, has a number that is too large for a float",
              too_large.text);
}
/* What the C includes, and what headers of C libraries include in turn: compilers find NAME.h in their place. */
static bool is_header(const char *of) {
  static const char headers[] = " assert complex ctype errno fenv features float inttypes iso646 limits locale math"
      " newlib reent setjmp signal stdarg stdbool stddef stdint stdio stdlib string strings tgmath time wchar wctype"
      " luna board start ";
  char word[80] = " ";
  for (size_t i = 0; i <= strlen(of); i++) word[i + 1] = (char)tolower((unsigned char)of[i]);
  return strstr(headers, strcat(word, " ")) != NULL;
}
static int check_name(void) {
  if (!own.out || !*own.out) return fail("--out NAME is missing; it says which files to write, NAME.h and NAME.c");
  name = strrchr(own.out, '/') ? strrchr(own.out, '/') + 1 : own.out;
  bool good = isalpha((unsigned char)*name) && strlen(name) < 64;
  for (const char *s = name; *s; s++) good = good && (isalnum((unsigned char)*s) || *s == '_');
  if (!good)
    return fail("--out %s: '%s' is no name for C; it takes up to 63 letters, digits and _, a letter first", own.out,
                name);
  if (is_header(name))
    return fail("--out %s: a header of the C library, or a file of luna.h, is called %s.h", own.out, name);
  return 0;
}

static int write_file(const char *model_path, new_file *file, const char *suffix, void (*write)(void)) {
  char path[PATH_ROOM];
  if (strlen(own.out) + 8 > sizeof path) return fail("--out is too long");
  snprintf(path, sizeof path, "%s%s", own.out, suffix);
  if (same_file(path, model_path)) return fail("--out %s would overwrite the model itself", own.out);
  if ((out = file_begin(file, path)) == NULL) return 2;
  write();
  return 0;
}
/* Writes both files, or none. */
static int write_files(const char *model_path) {
  static new_file files[2];
  int status = write_file(model_path, &files[0], ".h", write_h), begun = status == 0;
  if (!status) status = write_file(model_path, &files[1], ".c", write_c), begun += status == 0;
  if (!status) status = check_parameters();
  if (!status) return files_end(files, 2);
  for (int i = 0; i < begun; i++) file_close(&files[i], false);
  return status;
}
static int64_t state_bytes(void) {
  const luna_lm_config *c = &model.config;
  const int64_t d = c->layer.dim;
  return 4 * (1 + c->layers * (c->layer.memory * d * (is_tied() ? 1 : 2) * (is_compensated() ? 2 : 1) +
                               (forgets() ? c->layer.heads * c->layer.memory : 0) +
                               (c->layer.convolution ? (kernel_width() - 1) * d : 0)) +
              (own.learn ? d + outputs() * (d + 1) : 0));
}
static int export_model_of(luna_ctx *ctx, const char **words) {
  if (check_name() || check_model(ctx, words[0]) || fold_output_norm()) return 2;
  find_facts();
  const int status = write_files(words[0]);
  while (made_count > 0) free(made[--made_count]);
  free(made);
  free((void *)used);
  if (status == 0)
    say("%s.h and %s.c have %lld bytes of weights and %lld bytes of state.", own.out, own.out, (long long)flash,
        (long long)state_bytes());
  return status;
}

static const command commands[] = {
  { "", { "model: A causal model that lm or series --causal wrote." }, "Turns a causal model into two files of C.",
    export_model_of, "detector.safetensors --out detector" },
  { 0 }
};

int main(int count, char **given) {
  const char *words[4] = { NULL };
  program = "export", program_commands = commands;
  for (int i = 1; i < count; i++) if (asks_help(given[i])) return usage(stdout, commands, flags, commands), 0;
  if (parse(commands, flags, count - 1, given + 1, words)) return 2;
  luna_ctx *ctx = luna_open(&(luna_options){ .threads = 1 });
  const int status = ctx ? export_model_of(ctx, words) : fail("out of memory");
  luna_close(ctx);
  return status;
}
