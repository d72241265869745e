/* golden [FOLDER]: runs what the authors' own code computed (folder: tests/data, and tests/data/baselines), on every
   instruction set, in the plain and the folded form: outputs to 2e-6, gradients to 2e-5 (error of a tensor:
   ||a - b|| / ||b||; of a gradient that is small beside the file's largest, or zero in exact arithmetic, as key biases'
   and those of a softmax over one key: see golden_gradient_error). With products in 8 bits and in bfloat16 the best
   instruction set is compared with luna.h's reference, which rounds the same operands: tests/models/rounded.h.
   A file of a layer (attention, causal, encoder_layer, decoder_layer) holds parameters, inputs x, p, context, lengths,
   outputs y, yp, seed.y and seed.yp, and the gradients of sum(seed.y y) + sum(seed.yp yp) as grad.NAME; one of a model
   (classifier, seq2seq) tokens, lengths, labels, what the encoder gives, logits, and the gradients of the mean
   cross-entropy. One of another attention (its kind is a name in examples/attentions/attentions.h): its options as
   metadata, its parameters, arrays and inputs. Included by cuda.c, it runs on a device. */
#include "test.h"
#define LUNA_IMPLEMENTATION
#include "luna.h"
#include "examples/attentions/attentions.h"
#include "common.h"
#include "st.h"
#include "rounded.h"
#include <dirent.h>

#define OUTPUT_LIMIT 2e-6
#define GRADIENT_LIMIT 2e-5
/* of the file's largest gradient, both by their root mean squares. A gradient below BORDER of it is limited by the
   cancellation of larger ones: it is held to GRADIENT_LIMIT * BORDER = 1e-7 of the largest. Below TRUE_ZERO the
   reference counts as zero */
#define BORDER 5e-3
#define TRUE_ZERO 1e-5

typedef struct golden_worst {
  double error, own, share; /* of a gradient: ||a - b|| / ||b||; that by the root mean square of the file's largest */
  char where[256], values[96]; /* of both sides */
} golden_worst;
typedef struct golden {
  const char *path, *name;
  uint8_t *bytes;
  size_t size;
  st_file st;
  char kind[32];
  int64_t dim, heads, pack_heads, ffn;
  bool tied, pre_norm;
  luna_activation activation, omega;
  double largest;                        /* root mean square of the file's largest gradient */
  golden_worst output, gradient, zero;   /* zero: gradients that are zero in exact arithmetic */
  const char *how; /* instruction set and form of the run */
  bool system;     /* kind is another attention's name */
  rounded *into;   /* what a run gets goes there, or null: it is compared with the file */
  uint64_t nudge;  /* of its inputs and parameters */
} golden;

static const luna_backend *golden_backend; /* null: the CPU, on every instruction set */
static luna_dtype golden_weights;          /* of inferences */
/* of a device whose products round their factors: the limit of outputs, or 0. Gradients are wrong where a ReLU's input
   falls to the other side of 0, and held to ROUNDED_LIMIT */
static double golden_rounded;
#define ROUNDED_LIMIT 0.1
static luna_dtype golden_products;

static int64_t golden_number(const golden *g, const char *key) {
  st_item pair;
  return st_meta(&g->st, key, &pair) ? strtol(pair.text, NULL, 10) : 0;
}
static bool golden_is(const golden *g, const char *key, const char *value) {
  st_item pair;
  return st_meta(&g->st, key, &pair) && strcmp(pair.text, value) == 0;
}

/* a file's array as floats, to be freed; null when it is not there */
static float *golden_floats(const golden *g, const char *name, st_item *t) {
  float *out;
  if (!st_find(&g->st, name, t)) return NULL;
  out = common_floats(t->count);
  if (st_floats(t, out)) return out;
  int32_t *numbers = (int32_t *)common_alloc((size_t)t->count * sizeof(int32_t));
  const bool whole = st_integers(t, numbers);
  for (int64_t i = 0; whole && i < t->count; i++) out[i] = (float)numbers[i];
  free(numbers);
  if (whole) return out;
  free(out);
  return NULL;
}
static luna_tensor *golden_tensor(const golden *g, luna_ctx *ctx, const char *name) {
  st_item t;
  float *values = golden_floats(g, name, &t);
  if (values) rounded_nudge(g->nudge, values, t.count);
  luna_tensor *made = values ? luna_require_grad(luna_tensor_new(ctx, values, t.rank, t.shape)) : NULL;
  free(values);
  return made;
}
/* to be freed; null when not there */
static int32_t *golden_numbers(const golden *g, const char *name, int64_t *columns) {
  st_item t;
  int32_t *out;
  if (!st_find(&g->st, name, &t)) return NULL;
  if (columns) *columns = t.shape[t.rank - 1];
  out = (int32_t *)common_alloc((size_t)t.count * sizeof(int32_t));
  if (st_integers(&t, out)) return out;
  free(out);
  return NULL;
}

static bool golden_open(golden *g) {
  st_item kind;
  const char *wrong = st_read(&g->st, g->path, &g->bytes, &g->size);
  if (!CHECK(!wrong, "%s: %s", g->name, wrong) || !CHECK(st_meta(&g->st, "kind", &kind),
                                                         "%s does not say its kind", g->name))
    return false;
  snprintf(g->kind, sizeof g->kind, "%.31s", kind.text);
  g->dim = golden_number(g, "dim");
  g->heads = golden_number(g, "heads");
  g->pack_heads = golden_number(g, "pack_heads");
  g->ffn = golden_number(g, "ffn");
  g->tied = golden_is(g, "tied_kv", "true");
  g->pre_norm = golden_is(g, "pre_norm", "true");
  g->activation = golden_is(g, "activation", "gelu") ? LUNA_ACTIVATION_GELU : LUNA_ACTIVATION_RELU;
  g->omega = golden_is(g, "pack_activation", "elu") || golden_is(g, "pack_activation", "elu1") ? LUNA_ACTIVATION_ELU1 :
      LUNA_ACTIVATION_SOFTPLUS2;
  return true;
}

/* ---- gradients: relative errors, except where the reference is a true zero ---- */
static double golden_rms(const float *x, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; i++) sum += (double)x[i] * (double)x[i];
  return n ? sqrt(sum / (double)n) : 0;
}
static bool golden_is_zero(const float *expected, int64_t n, double largest) {
  return golden_rms(expected, n) <= TRUE_ZERO * largest;
}
/* held to GRADIENT_LIMIT: ||got - expected|| / ||expected||, or of BORDER * largest * sqrt(n) where that is more; of a
   true zero max |got - expected| / largest */
static double golden_gradient_error(const float *got, const float *expected, int64_t n, double largest) {
  double max = 0;
  if (!golden_is_zero(expected, n, largest)) return common_error(got, expected, n, BORDER * largest);
  for (int64_t i = 0; i < n; i++) {
    const double off = fabs((double)got[i] - (double)expected[i]);
    if (off != off) return off;
    if (off > max) max = off;
  }
  return max > 0 ? max / largest : 0; /* a file may have no gradient but zeros */
}
static double golden_largest(const golden *g) {
  st_item t;
  size_t cursor = 0;
  double largest = 0;
  while (st_next(&g->st, &cursor, &t)) {
    float *values = !t.is_pair && strncmp(t.name, "grad.", 5) == 0 ? common_floats(t.count) : NULL;
    if (values && st_floats(&t, values)) largest = fmax(largest, golden_rms(values, t.count));
    free(values);
  }
  return largest;
}

/* ---- the layer of a file: parameters from it, then forward ---- */
typedef union golden_layer {
  luna_nested_attention_layer attention;
  luna_causal_attention_layer causal;
  luna_encoder_layer encoder;
  luna_decoder_layer decoder;
} golden_layer;

static luna_status golden_init(const golden *g, golden_layer *layer, luna_params *params) {
  const luna_sharing sharing = g->tied ? LUNA_SHARING_TIED : LUNA_SHARING_FULL;
  if (strcmp(g->kind, "attention") == 0) {
    luna_layer_config config = {0};
    config.dim = g->dim, config.heads = g->heads, config.pack_heads = g->pack_heads, config.sharing = sharing;
    return luna_nested_attention_layer_init(&layer->attention, params, NULL, &config);
  }
  if (strcmp(g->kind, "causal") == 0) {
    luna_layer_config config = {0};
    config.dim = g->dim, config.heads = g->heads, config.sharing = sharing, config.omega = g->omega;
    return luna_causal_attention_layer_init(&layer->causal, params, NULL, &config);
  }
  luna_layer_config config = {0};
  config.dim = g->dim, config.heads = g->heads, config.pack_heads = g->pack_heads, config.sharing = sharing;
  config.ffn = g->ffn, config.activation = g->activation, config.pre_norm = g->pre_norm;
  if (strcmp(g->kind, "encoder_layer") == 0) return luna_encoder_layer_init(&layer->encoder, params, NULL, &config);
  return luna_decoder_layer_init(&layer->decoder, params, NULL, &config);
}
static luna_tensor *golden_forward(const golden *g, const golden_layer *layer, luna_tensor *x, luna_tensor *p,
                                   luna_tensor *context,
                                   const int32_t *lengths, luna_tensor **packed_context) {
  if (strcmp(g->kind, "attention") == 0)
    return luna_nested_attention_layer_forward(&layer->attention, x, p, context, lengths, packed_context);
  if (strcmp(g->kind, "causal") == 0) return luna_causal_attention_layer_forward(&layer->causal, x, p, lengths);
  *packed_context = p;
  if (strcmp(g->kind, "encoder_layer") == 0)
    return luna_encoder_layer_forward(&layer->encoder, x, packed_context, lengths);
  return luna_decoder_layer_forward(&layer->decoder, x, packed_context, context, lengths);
}

/* every parameter from the file, which must have it in the same shape */
static void golden_set(const golden *g, luna_params *params) {
  for (int64_t i = 0; i < luna_params_tensor_count(params); i++) {
    const char *name;
    luna_tensor *parameter = luna_params_at(params, i, &name);
    st_item t;
    float *values = golden_floats(g, name, &t);
    bool fits = values && t.rank == parameter->rank;
    for (int a = 0; fits && a < t.rank; a++) fits = t.shape[a] == parameter->shape[a];
    if (CHECK(fits, "%s: parameter %s is not in the file in that shape", g->name, name)) {
      rounded_nudge(g->nudge, values, t.count);
      luna_write(parameter, values);
    }
    free(values);
  }
}

/* ---- comparison ---- */
static void golden_note(golden *g, golden_worst *worst, const char *name, double error, double own,
                        double share, const char *values) {
  if (error <= worst->error || worst->error != worst->error) return; /* a NaN stays */
  worst->error = error, worst->own = own, worst->share = share;
  snprintf(worst->values, sizeof worst->values, "%s", values);
  snprintf(worst->where, sizeof worst->where, "%s, %s", name, g->how);
}
/* lengths: rows [batch, n, d] beyond them are not compared; null: all are */
static void golden_output(golden *g, const char *name, const luna_tensor *t, const int32_t *lengths) {
  st_item found;
  float *expected = golden_floats(g, name, &found);
  if (!expected) return;
  if (CHECK(t && luna_count(t) == found.count, "%s: %s was not computed (%s)", g->name, name, g->how)) {
    float *got = common_floats(found.count);
    luna_read(t, got);
    for (int64_t b = 0; lengths && b < t->shape[0]; b++) {
      const int64_t from = (b * t->shape[1] + lengths[b]) * t->shape[2],
          size = (t->shape[1] - lengths[b]) * t->shape[2];
      memcpy(expected + from, got + from, (size_t)size * sizeof(float));
      if (g->into) memset(got + from, 0, (size_t)size * sizeof(float));
    }
    if (g->into) rounded_put(g->into, name, false, got, found.count);
    else golden_note(g, &g->output, name, common_error(got, expected, found.count, 1e-6), 0, 0,
                     common_where(got, expected, found.count));
    free(got);
  }
  free(expected);
}
static int golden_gradient(golden *g, const char *name, const luna_tensor *t) {
  char full[128] = "grad.";
  st_item found;
  float *expected, *got;
  strncat(full, name, sizeof full - strlen(full) - 1);
  expected = golden_floats(g, full, &found);
  if (!t || !CHECK(expected && luna_count(t) == found.count, "%s: there is no %s of that size (%s)", g->name, full,
                   g->how)) {
    free(expected);
    return 0;
  }
  /* zeros: of a parameter that backward did not reach (the folded form has no key bias) */
  got = common_floats(found.count);
  if (CHECK(!t->grad || luna_read_grad(t, got) == LUNA_OK, "%s: no gradient for %s (%s)", g->name, name, g->how)) {
    const double own = common_error(got, expected, found.count, 0);
    if (g->into) rounded_put(g->into, full, true, got, found.count);
    else golden_note(g, golden_is_zero(expected, found.count, g->largest) ? &g->zero : &g->gradient, full,
                golden_gradient_error(got, expected, found.count, g->largest), own,
                own * golden_rms(expected, found.count) / g->largest, common_where(got, expected, found.count));
  }
  free(got);
  free(expected);
  return 1;
}
/* every parameter's; with the `compared` ones that is all the file has */
static void golden_gradients(golden *g, const luna_params *params, int compared) {
  st_item t;
  size_t cursor = 0;
  int count = 0;
  char full[128];
  for (int64_t i = 0; i < luna_params_tensor_count(params); i++) {
    const char *name;
    const luna_tensor *parameter = luna_params_at(params, i, &name);
    snprintf(full, sizeof full, "grad.%s", name);
    /* an array that is not trained */
    if (g->system && !parameter->grad && !st_find(&g->st, full, &t)) continue;
    compared += golden_gradient(g, name, parameter);
  }
  while (st_next(&g->st, &cursor, &t)) count += !t.is_pair && strncmp(t.name, "grad.", 5) == 0;
  CHECK(compared == count, "%s (%s): %d gradients of the file's %d were compared", g->name, g->how, compared, count);
}

static luna_tensor *golden_loss(const golden *g, luna_tensor *y, luna_tensor *packed_context) {
  luna_tensor *part[2] = {NULL, NULL}, *out[2];
  static const char *const seed[2] = {"seed.y", "seed.yp"};
  out[0] = y;
  out[1] = packed_context;
  for (int i = 0; i < 2; i++) {
    luna_tensor *weights = out[i] ? golden_tensor(g, out[i]->ctx, seed[i]) : NULL;
    const int64_t flat[2] = {1, luna_count(weights)};
    if (weights) part[i] = luna_sum(luna_reshape(luna_mul(out[i], weights), 2, flat), 1);
  }
  return part[1] ? luna_add(part[0], part[1]) : part[0];
}

static void golden_run(golden *g, luna_isa isa, luna_form form, bool training) {
  luna_options options = {0};
  golden_layer layer;
  luna_tensor *packed_context = NULL;
  int32_t *lengths = golden_numbers(g, "lengths", NULL);
  char how[96];
  snprintf(how, sizeof how, "%s %s%s", luna_isa_name(isa), form == LUNA_FORM_FOLDED ? "folded" : "unfolded",
           training ? "" : " inference");
  g->how = how;
  options.threads = 2;
  options.isa = isa;
  options.form = form;
  options.backend = golden_backend;
  options.weights = golden_weights;
  options.products = golden_products;
  luna_ctx *ctx = luna_open(&options);
  luna_params *params = luna_params_open(ctx);
  if (!CHECK(golden_init(g, &layer, params) == LUNA_OK, "%s: %s", g->name, luna_error(ctx))) {
    luna_close(ctx);
    free(lengths);
    return;
  }
  golden_set(g, params);
  if (training) luna_begin_step(ctx);
  else luna_begin_inference(ctx);
  luna_tensor *x = golden_tensor(g, ctx, "x"), *p = golden_tensor(g, ctx, "p"),
      *context = golden_tensor(g, ctx, "context");
  luna_tensor *y = golden_forward(g, &layer, x, p, context, lengths, &packed_context);
  golden_output(g, "y", y, NULL);
  if (packed_context) golden_output(g, "yp", packed_context, NULL);
  if (training && CHECK(luna_backward(golden_loss(g, y, packed_context)) == LUNA_OK, "%s (%s): %s", g->name, how,
                        luna_error(ctx)))
    golden_gradients(g, params, golden_gradient(g, "x", x) + golden_gradient(g, "p", p) +
                     golden_gradient(g, "context", context));
  luna_close(ctx);
  free(lengths);
}

/* ---- models ---- */
static luna_encoder_config golden_encoder(const golden *g) {
  luna_encoder_config c = {0};
  st_item t;
  c.layers = golden_number(g, "layers"), c.layer.dim = g->dim, c.layer.heads = g->heads, c.layer.ffn = g->ffn,
      c.layer.memory = golden_number(g, "memory");
  c.positions = golden_is(g, "learned_positions", "true") ? LUNA_POSITIONS_LEARNED : LUNA_POSITIONS_SINUSOIDAL;
  c.first_position = golden_number(g, "padding_idx") + 1;
  if (st_find(&g->st, "encoder.embed_positions.weight", &t)) c.max_length = t.shape[0] - c.first_position;
  c.norm_embedding = golden_is(g, "layernorm_embedding", "true");
  c.tied_layers = golden_is(g, "tied_layers", "true");
  c.layer.sharing = g->tied ? LUNA_SHARING_TIED : LUNA_SHARING_FULL;
  c.layer.activation = g->activation;
  c.layer.pre_norm = g->pre_norm;
  return c;
}
static luna_status golden_model_init(const golden *g, luna_model *model, luna_params *params) {
  st_item t;
  if (strcmp(g->kind, "classifier") == 0) {
    luna_classifier_config c = {0};
    c.vocab = golden_number(g, "vocab"), c.classes = golden_number(g, "classes");
    c.pooling = golden_is(g, "pooling", "cls") ? LUNA_POOLING_CLS : golden_is(g, "pooling", "mean") ?
        LUNA_POOLING_MEAN : LUNA_POOLING_MEMORY_BATCH;
    c.pair = golden_is(g, "dual", "true");
    c.pre_logits = st_find(&g->st, "pre_logits.0.bias", &t) ? t.shape[0] : 0;
    c.encoder = golden_encoder(g);
    return luna_classifier_init(&model->classifier, params, &c);
  }
  luna_seq2seq_config c = {0};
  c.vocab = golden_number(g, "vocab");
  c.share_embeddings = golden_is(g, "share_all_embeddings", "true");
  c.encoder = golden_encoder(g);
  c.encoder.keep_padding = true;
  if (st_find(&g->st, "decoder.embed_positions.weight", &t))
    c.max_target_length = t.shape[0] - c.encoder.first_position;
  return luna_seq2seq_init(&model->seq2seq, params, &c);
}

static void golden_run_model(golden *g, luna_isa isa, luna_form form, bool training) {
  const bool classifier = strcmp(g->kind, "classifier") == 0;
  luna_options options = {0};
  luna_model model;
  luna_tensor *p = NULL, *x, *logits;
  char how[96];
  int64_t n = 0, m = 0;
  int32_t *tokens = golden_numbers(g, classifier ? "tokens" : "src_tokens", &n),
      *lengths = golden_numbers(g, classifier ? "lengths" : "src_lengths", NULL);
  int32_t *other = golden_numbers(g, classifier ? "tokens2" : "prev_output_tokens", &m),
      *other_lengths = golden_numbers(g, "lengths2", NULL);
  int32_t *labels = golden_numbers(g, classifier ? "labels" : "targets", NULL);
  st_item t;
  st_find(&g->st, "logits", &t);
  const int64_t batch = t.shape[0];
  snprintf(how, sizeof how, "%s %s%s", luna_isa_name(isa), form == LUNA_FORM_FOLDED ? "folded" : "unfolded",
           training ? "" : " inference");
  g->how = how;
  options.threads = 2;
  options.isa = isa;
  options.form = form;
  options.backend = golden_backend;
  options.weights = golden_weights;
  options.products = golden_products;
  luna_ctx *ctx = luna_open(&options);
  luna_params *params = luna_params_open(ctx);
  if (CHECK(golden_model_init(g, &model, params) == LUNA_OK, "%s: %s", g->name, luna_error(ctx))) {
    golden_set(g, params);
    luna_begin_inference(ctx);
    x = luna_encoder_forward(classifier ? &model.classifier.encoder : &model.seq2seq.encoder,
                             &(luna_input){ tokens, lengths, batch, n, NULL }, &p);
    /* a learned position of padding, which nothing reads, is in one file */
    golden_output(g, "encoder_out", x, classifier ? NULL : lengths);
    golden_output(g, classifier ? "packed_out" : "encoder_projected_out", p, NULL);
    if (training) luna_begin_step(ctx);
    logits = !classifier ? luna_seq2seq_forward(&model.seq2seq, &(luna_input){ tokens, lengths, batch, n, NULL },
                                                &(luna_input){ other, NULL, batch, m, NULL })
             : other     ? luna_classifier_forward_pair(&model.classifier,
                 &(luna_input){ tokens, lengths, batch, n, NULL },
                     &(luna_input){ other, other_lengths, batch, m, NULL })
                         : luna_classifier_forward(&model.classifier, &(luna_input){ tokens, lengths, batch, n, NULL });
    golden_output(g, "logits", logits, NULL);
    luna_tensor *loss = luna_cross_entropy(logits, labels, NULL);
    golden_output(g, "loss", loss, NULL);
    if (training && CHECK(luna_backward(loss) == LUNA_OK, "%s (%s): %s", g->name, how, luna_error(ctx)))
      golden_gradients(g, params, 0);
  }
  luna_close(ctx);
  free(tokens), free(lengths), free(other), free(other_lengths), free(labels);
}

/* ---- other attentions ---- */
typedef struct golden_attention {
  golden *g;
  attentions choice;
  bool good;
} golden_attention;
static void golden_option(void *user, const char *key, const char *value) {
  golden_attention *a = (golden_attention *)user;
  static const char *const frame[4] = {"kind", "dim", "heads", "causal"};
  for (int i = 0; i < 4; i++) if (strcmp(key, frame[i]) == 0) return;
  a->good &= CHECK(attentions_set(&a->choice, key, value), "%s: %s", a->g->name, a->choice.error) != 0;
}
/* what a file says by its tensors alone: an axis (or -1: that there is one) of a tensor, and more, is an option */
static void golden_shapes(golden_attention *a) {
  static const struct { const char *system, *option, *tensor; int axis, more; } shapes[] = {
    {"synthesizer", "mixture", "mixture", -1, 0}, {"synthesizer", "a", "dense_a.weight", 1, 0},
        {"synthesizer", "b", "dense_b.weight", 1, 0},
    {"bigbird", "max_blocks", "random_blocks", 1, 2},
  };
  for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
    char text[32] = "true";
    st_item t;
    if (strcmp(a->g->kind, shapes[i].system) != 0 || !st_find(&a->g->st, shapes[i].tensor, &t)) continue;
    if (shapes[i].axis >= 0) snprintf(text, sizeof text, "%d", (int)t.shape[shapes[i].axis] + shapes[i].more);
    golden_option(a, shapes[i].option, text);
  }
}
/* an option that is a list comes as a tensor of its name; none: the empty list. */
static void golden_lists(golden_attention *a) {
  for (const attention_option *o = a->choice.system->options; o->name; o++) {
    char text[ATTENTION_LIST_SIZE * 12] = "";
    st_item t;
    if (o->kind != ATTENTION_LIST) continue;
    int32_t *values = golden_numbers(a->g, o->name, NULL);
    for (int64_t i = 0; values && st_find(&a->g->st, o->name, &t) && i < t.count && i < ATTENTION_LIST_SIZE; i++)
      snprintf(text + strlen(text), sizeof text - strlen(text), "%s%d", i ? "," : "", (int)values[i]);
    free(values);
    golden_option(a, o->name, text);
  }
}
/* x beyond the lengths is never read: there, NaN */
static luna_tensor *golden_padded(const golden *g, luna_ctx *ctx, const int32_t *lengths, float change, int64_t from) {
  st_item t;
  float *x = golden_floats(g, "x", &t);
  for (int64_t i = 0; x && i < t.count; i++) {
    const int64_t b = i / (t.shape[1] * t.shape[2]), row = i / t.shape[2] % t.shape[1];
    if (lengths && row >= lengths[b]) x[i] = NAN;
    else if (row >= from) x[i] += change;
  }
  luna_tensor *made = x ? luna_require_grad(luna_tensor_new(ctx, x, t.rank, t.shape)) : NULL;
  free(x);
  return made;
}
/* a later token changes no bit before it; not so where sorting moves chunks, nor where token 0 sees all */
static void golden_causality(golden *g, luna_ctx *ctx, attentions *choice, luna_attention_call call, const float *y) {
  const int64_t n = call.x->shape[1], d = call.x->shape[2], batch = call.x->shape[0];
  const float changes[3] = {3, INFINITY, NAN};
  if (!call.causal || strcmp(g->kind, "reformer") == 0 || golden_is(g, "cls", "true")) return;
  for (int i = 0; i < 6; i++) {
    const int64_t cut = i % 2 ? n / 2 : 1;
    luna_attention_call again = call;
    float *got = common_floats(batch * n * d);
    again.x = again.input = golden_padded(g, ctx, call.lengths, changes[i / 2], cut);
    luna_tensor *t = choice->hook.forward(choice->layers, &again);
    int64_t differ = 0;
    if (t) luna_read(t, got);
    for (int64_t b = 0; b < batch; b++)
      for (int64_t j = 0; j < cut * d; j++)
        differ += memcmp(&got[b * n * d + j], &y[b * n * d + j], sizeof(float)) != 0;
    CHECK(t && differ == 0, "%s (%s): %d numbers before token %d depend on it", g->name, g->how, (int)differ, (int)cut);
    free(got);
  }
}
static void golden_attention_outputs(golden *g, const golden_attention *a, luna_tensor *y,
                                     const luna_attention_call *call) {
  const attention *layer = a->choice.layers;
  golden_output(g, "y", y, call->lengths);
  golden_output(g, "yp", call->next_p, NULL);
  golden_output(g, "next_memory", layer->next_memory, NULL);
  golden_output(g, "next_compressed", layer->next_compressed, NULL);
  golden_output(g, "loss", layer->loss, NULL);
}
static void golden_attention_run(golden_attention *a, luna_ctx *ctx, luna_params *params, const int32_t *lengths,
                                 bool training) {
  golden *g = a->g;
  attention *layer = a->choice.layers;
  luna_attention_call call;
  memset(&call, 0, sizeof call);
  call.x = call.input = training ? golden_padded(g, ctx, lengths, 0, 0) : golden_tensor(g, ctx, "x");
  call.p = golden_tensor(g, ctx, "p");
  call.lengths = lengths;
  call.causal = golden_is(g, "causal", "true");
  layer->memory = luna_detach(golden_tensor(g, ctx, "memory"));
  layer->compressed = luna_detach(golden_tensor(g, ctx, "compressed"));
  layer->noise = luna_detach(golden_tensor(g, ctx, "gumbel"));
  luna_tensor *x = call.x, *p = call.p, *y = a->choice.hook.forward(layer, &call);
  if (!CHECK(y, "%s (%s): %s", g->name, g->how, luna_error(ctx))) return;
  golden_attention_outputs(g, a, y, &call);
  if (!training) {
    float *values = common_floats(luna_count(y));
    call.x = x;
    luna_read(y, values);
    golden_causality(g, ctx, &a->choice, call, values);
    free(values);
    return;
  }
  luna_tensor *loss = attentions_loss(&a->choice, golden_loss(g, y, call.next_p));
  if (CHECK(luna_backward(loss) == LUNA_OK, "%s (%s): %s", g->name, g->how, luna_error(ctx)))
    golden_gradients(g, params, golden_gradient(g, "x", x) + golden_gradient(g, "p", p));
}
static void golden_run_attention(golden *g, luna_isa isa, luna_form form, bool training) {
  golden_attention a = {0};
  luna_inspection inspection = {0};
  luna_layer_config config = {0};
  luna_options options = {0};
  char how[96];
  (void)form;
  snprintf(how, sizeof how, "%s%s", luna_isa_name(isa), training ? "" : " inference");
  g->how = how;
  options.threads = 2, options.isa = isa;
  luna_ctx *ctx = luna_open(&options);
  luna_params *params = luna_params_open(ctx);
  int32_t *lengths = golden_numbers(g, "lengths", NULL);
  a.g = g;
  a.good = CHECK(attentions_open(&a.choice, g->kind), "%s: %s", g->name, a.choice.error) != 0;
  inspection.pair = golden_option, inspection.user = &a;
  if (a.good) luna_inspect(ctx, luna_bytes(g->bytes, g->size), &inspection), golden_shapes(&a), golden_lists(&a);
  config.dim = g->dim, config.heads = g->heads;
  if (a.good && CHECK(a.choice.hook.init(&a.choice, params, "", &config), "%s: %s", g->name, luna_error(ctx))) {
    golden_set(g, params);
    if (training) luna_begin_step(ctx);
    else luna_begin_inference(ctx);
    golden_attention_run(&a, ctx, params, lengths, training);
    a.choice.hook.close(a.choice.layers);
  }
  attentions_close(&a.choice);
  luna_close(ctx);
  free(lengths);
}

/* with products in 8 bits, of inferences, or in bfloat16 */
typedef struct golden_rounds {
  golden *g;
  void (*run)(golden *g, luna_isa isa, luna_form form, bool training);
  luna_form form;
  bool int8;
} golden_rounds;
static void golden_rounded_run(void *user, const rounded_how *how, rounded *out) {
  const golden_rounds *r = (const golden_rounds *)user;
  r->g->into = out, r->g->nudge = how->nudge;
  golden_weights = how->rounds && r->int8 ? LUNA_DTYPE_I8 : LUNA_DTYPE_F32;
  golden_products = how->rounds && !r->int8 ? LUNA_DTYPE_BF16 : LUNA_DTYPE_F32;
  r->run(r->g, how->isa, r->form, !r->int8);
  golden_weights = golden_products = LUNA_DTYPE_F32;
  r->g->into = NULL, r->g->nudge = 0;
}
static void golden_rounded_file(golden *g, void (*run)(golden *g, luna_isa isa, luna_form form, bool training),
                                bool int8) {
  char what[300];
  for (int form = 0; form < 2; form++) {
    golden_rounds r = {g, run, form ? LUNA_FORM_FOLDED : LUNA_FORM_UNFOLDED, int8};
    snprintf(what, sizeof what, "%s, %s, in %s", g->name, form ? "folded" : "unfolded", int8 ? "8 bits" : "bf16");
    rounded_check(what, golden_rounded_run, &r, int8 ? ROUNDED_INT8 : ROUNDED_BF16);
  }
  snprintf(what, sizeof what, "golden: %s in %s", g->name, int8 ? "8 bits" : "bf16");
  rounded_figures(what);
}

static int golden_file(golden *g) { /* 1 when it was compared */
  static const char *const kinds[6] = {"attention", "causal", "encoder_layer", "decoder_layer", "classifier",
                                       "seq2seq"};
  int known = 0;
  if (!golden_open(g)) return 0;
  for (int i = 0; i < ATTENTION_SYSTEMS; i++) g->system |= strcmp(g->kind, attention_systems[i]->name) == 0;
  while (known < 6 && strcmp(g->kind, kinds[known]) != 0) known++;
  if (strcmp(g->kind, "optimizers") == 0) return 0; /* tests/engine/trainer.c's */
  if (!CHECK(known < 6 || g->system, "%s: its kind %s is unknown", g->name, g->kind)) return 0;
  g->largest = golden_largest(g);
  for (int i = 0; i < (golden_backend ? 1 : COMMON_ISAS); i++) {
    const luna_isa isa = golden_backend ? LUNA_ISA_BEST : common_isas[i];
    if (!luna_isa_available(isa)) continue;
    for (int mode = 0; mode < 4; mode += g->system ? 2 : 1)
      (g->system ? golden_run_attention : known < 4 ? golden_run : golden_run_model)(
          g, isa, mode & 1 ? LUNA_FORM_FOLDED : LUNA_FORM_UNFOLDED, mode < 2);
  }
  printf("golden: %s: outputs %.2g (%s), gradients %.2g of their own norm, %.2g of the largest (%s)", g->name,
         g->output.error, g->output.where, g->gradient.own, g->gradient.share, g->gradient.where);
  if (g->zero.where[0]) printf(", true zeros %.2g of %.2g (%s)", g->zero.error, g->largest, g->zero.where);
  printf("\n");
  const double output = golden_rounded > 0 ? golden_rounded : OUTPUT_LIMIT,
               gradient = golden_rounded > 0 ? ROUNDED_LIMIT : GRADIENT_LIMIT;
  CHECK(g->output.error <= output, "%s: an output is off by %.3g: %s", g->name, g->output.error, g->output.values);
  CHECK(g->gradient.error <= gradient, "%s: a gradient is off by %.3g of its own norm, %.3g of the largest: %s",
        g->name, g->gradient.own, g->gradient.share, g->gradient.values);
  CHECK(g->zero.error <= gradient, "%s: a gradient that is zero is %.3g of the file's largest", g->name,
        g->zero.error);
#ifndef LUNA_NO_INT8
  if (!g->system && !golden_backend) golden_rounded_file(g, known < 4 ? golden_run : golden_run_model, true);
#endif
#ifndef LUNA_NO_BF16
  if (!g->system && !golden_backend) golden_rounded_file(g, known < 4 ? golden_run : golden_run_model, false);
#endif
  return 1;
}

static int golden_order(const void *a, const void *b) { return strcmp((const char *)a, (const char *)b); }

static int golden_folder(const char *folder) {
  char(*names)[256] = NULL;
  DIR *dir = opendir(folder);
  struct dirent *entry;
  int files = 0, compared = 0;
  if (!dir) {
    fprintf(stderr, "golden: cannot open the folder %s\n", folder);
    return 1;
  }
  while ((entry = readdir(dir)) != NULL) {
    const size_t n = strlen(entry->d_name);
    if (n <= 12 || strcmp(entry->d_name + n - 12, ".safetensors") != 0) continue;
    if (!CHECK(n < sizeof names[0], "%s: its name is too long", entry->d_name)) continue;
    names = (char(*)[256])realloc(names, (size_t)(files + 1) * sizeof names[0]);
    if (!names) exit(2);
    strcpy(names[files++], entry->d_name);
  }
  closedir(dir);
  if (files) qsort(names, (size_t)files, sizeof names[0], golden_order);
  for (int i = 0; i < files; i++) {
    golden g;
    char *path = (char *)common_alloc(strlen(folder) + strlen(names[i]) + 2);
    strcat(strcat(strcpy(path, folder), "/"), names[i]);
    memset(&g, 0, sizeof g);
    g.path = path;
    g.name = names[i];
    compared += golden_file(&g);
    free(g.bytes);
    free(path);
  }
  free(names);
  CHECK(compared > 0, "%s has no file that can be compared", folder);
  return 0;
}

#ifndef GOLDEN_INCLUDED
/* the rule on gradients made up for it, beside a largest of 1 */
static void golden_check_rule(void) {
  enum { COUNT = 64 };
  static const struct { double size, off; bool good; const char *what; } cases[] = {
    {1, 1e-6, true, "rounding of a large gradient"},
    {1, 1e-3, false, "a large gradient off by 1e-3 of itself"},
    {1e-3, 1e-9, true, "rounding of a small gradient"},
    {1e-3, 1e-6, false, "a small gradient off by 1e-3 of itself"},
    {6e-3, 6e-6, false, "a gradient just above the border, off by 1e-3 of itself"},
    {4e-3, 1.5e-7, true, "a gradient just below the border, off by 1e-7 of the largest"},
    {3e-5, 1.5e-7, true, "a gradient just above a true zero, off by 1e-7 of the largest"},
    {3e-5, 3e-7, false, "a gradient just above a true zero, off by 1e-2 of itself"},
    {1e-8, 1e-6, true, "rounding noise around a true zero"},
    {0, 1e-6, true, "rounding noise around zeros"},
    {0, 1e-4, false, "a gradient in place of zeros"},
    {1e-8, 1e-4, false, "a gradient in place of a true zero"},
  };
  float expected[COUNT], got[COUNT];
  for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++) {
    for (int i = 0; i < COUNT; i++) {
      expected[i] = (float)(cases[c].size * common_number(1, (uint64_t)i));
      got[i] = (float)((double)expected[i] + cases[c].off * common_number(2, (uint64_t)i));
    }
    const double error = golden_gradient_error(got, expected, COUNT, 1);
    CHECK((error <= GRADIENT_LIMIT) == cases[c].good, "the rule: %s: error %.3g", cases[c].what, error);
  }
  memset(expected, 0, sizeof expected);
  memset(got, 0, sizeof got);
  CHECK(golden_gradient_error(got, expected, COUNT, 0) == 0, "the rule: zeros in a file of zeros");
  got[5] = 1e-3f; /* one number of many */
  CHECK(golden_gradient_error(got, expected, COUNT, 1) > GRADIENT_LIMIT,
        "the rule: one number of a true zero is a gradient");
  CHECK(golden_gradient_error(got, expected, COUNT, 0) > GRADIENT_LIMIT, "the rule: a gradient in a file of zeros");
  got[5] = NAN;
  CHECK(!(golden_gradient_error(got, expected, COUNT, 1) <= GRADIENT_LIMIT), "the rule: a NaN is zero");
}
int main(int argc, char **argv) {
  golden_check_rule();
  const bool given = argc > 1 && argv[1][0];
  if (golden_folder(given ? argv[1] : "tests/data") || (!given && golden_folder("tests/data/baselines"))) return 1;
  return test_report("golden");
}
#endif
