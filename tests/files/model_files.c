/* Checkpoints of models that say what they are, of other versions too, and what of one model fits another. */
#include "test.h"
#define LUNA_IMPLEMENTATION
#include "luna.h"
#include "common.h"
#include "files.h"
#include "models.h"
#include "data/old/use.h"

/* ---- checkpoints that say what they are ---- */
/* a model of its own context, from a file; the context tells why not */
typedef struct opened {
  luna_ctx *ctx;
  luna_params *params;
  luna_model model;
} opened;
static luna_status open_bytes(opened *o, const buffer *file) {
  o->ctx = ctx_open();
  o->params = luna_params_open(o->ctx);
  return luna_load_model(&o->model, o->params, luna_bytes(file->at, file->size));
}
static bool comes_back(const opened *a, const opened *b) { /* the same kind, with the same logits bit for bit */
  if (a->model.kind != b->model.kind || luna_params_tensor_count(a->params) != luna_params_tensor_count(b->params))
    return false;
  const texts t = texts_make();
  luna_begin_inference(a->ctx), luna_begin_inference(b->ctx);
  luna_tensor *x = model_logits(&a->model, &t), *y = model_logits(&b->model, &t);
  return (x && y && luna_count(x) == luna_count(y) && same_bits(x->data, y->data, luna_count(x))) ||
         (!x && !y && luna_error(a->ctx)[0] && luna_error(b->ctx)[0]);
}
enum { EXTRAS = 6 };
/* v below ENCODERS: the encoder's variants; beyond: what kinds have of their own */
static bool opened_init(opened *o, luna_model_kind kind, int v) {
  luna_classifier_config classifier = {0};
  luna_seq2seq_config seq2seq = {0};
  luna_status status;
  memset(o, 0, sizeof *o);
  if (v < ENCODERS ? !model_exists(kind, v) : kind != LUNA_MODEL_CLASSIFIER && kind != LUNA_MODEL_SEQ2SEQ) return false;
  o->ctx = ctx_open();
  o->params = luna_params_open(o->ctx);
  o->model.kind = kind;
  if (v < ENCODERS) status = model_init(&o->model, o->params, kind, encoder_config(v));
  else if (kind == LUNA_MODEL_CLASSIFIER) {
    classifier.vocab = VOCAB, classifier.classes = 4;
    classifier.encoder = encoder_config(v % 2 ? 3 : 8);
    classifier.pooling = (luna_pooling)((v - ENCODERS) % 5), classifier.pair = v % 2,
        classifier.pre_logits = v % 3 ? 7 : 0;
    status = luna_classifier_init(&o->model.classifier, o->params, &classifier);
  } else {
    seq2seq = translator_config(v - ENCODERS);
    seq2seq.target_vocab = VOCAB;
    status = luna_seq2seq_init(&o->model.seq2seq, o->params, &seq2seq);
  }
  common_params(o->params, 100);
  return CHECK(status == LUNA_OK, "%s %d: %s", model_names[kind], v, luna_error(o->ctx));
}
static void check_comes_back(luna_model_kind kind, int v) {
  opened a, b;
  if (!opened_init(&a, kind, v)) return;
  luna_params_set_text(a.params, "note", "kept");
  buffer file = saved(a.params);
  const luna_status status = open_bytes(&b, &file);
  CHECK(status == LUNA_OK && comes_back(&a, &b), "%s %d does not come back from its file: %s", model_names[kind], v,
        luna_error(b.ctx));
  const char *note = luna_params_get_text(b.params, "note");
  CHECK(note && strcmp(note, "kept") == 0, "%s %d: a text pair is lost", model_names[kind], v);
  buffer again = saved(b.params);
  CHECK(again.size == file.size && memcmp(again.at, file.at, file.size) == 0,
        "%s %d: saved, loaded and saved it is another file",
        model_names[kind], v);
  refused(b.ctx, luna_load_model(&b.model, b.params, luna_bytes(file.at, file.size)) == LUNA_BAD_ARGUMENT,
          SET_NOT_EMPTY,
          "%s %d: loading into a set that is not empty", model_names[kind], v);
  CHECK(luna_params_tensor_count(b.params) == luna_params_tensor_count(a.params),
        "%s %d: a refused load took the set's parameters", model_names[kind], v);
  free(file.at), free(again.at);
  luna_close(a.ctx), luna_close(b.ctx);
}
/* what a file that is not loaded must leave: a sentence, an empty set, no memory */
static void check_nothing_left(const opened *o, int64_t before, const char *what) {
  CHECK(luna_error(o->ctx)[0] && luna_params_tensor_count(o->params) == 0 &&
        luna_params_element_count(o->params) == 0 &&
            !luna_params_get_text(o->params, "luna.kind"),
        "%s: refused with \"%s\", %d parameters left", what, luna_error(o->ctx),
            (int)luna_params_tensor_count(o->params));
  CHECK(heap_live - before <= 0, "%s: %lld bytes more than before stay in use", what, (long long)(heap_live - before));
}
/* a file of changed metadata: a model of all its tensors, or nothing at all; whether it was loaded */
static bool check_claim(const buffer *file, int64_t tensors, const char *what) {
  opened o, again;
  o.ctx = ctx_open();
  o.params = luna_params_open(o.ctx);
  const int64_t before = heap_most = heap_live;
  const luna_status status = luna_load_model(&o.model, o.params, luna_bytes(file->at, file->size));
  CHECK(heap_most - before <= 8 * (int64_t)file->size + 200000, "%s: a file of %d bytes made luna.h take %lld", what,
        (int)file->size,
        (long long)(heap_most - before));
  if (status != LUNA_OK) check_nothing_left(&o, before, what);
  else {
    buffer copy = saved(o.params);
    CHECK(luna_params_tensor_count(o.params) == tensors, "%s: a model of %d tensors is loaded from %d", what,
          (int)luna_params_tensor_count(o.params),
          (int)tensors);
    const luna_status second = open_bytes(&again, &copy);
    CHECK(second == LUNA_OK && comes_back(&o, &again), "%s: it is loaded, but not what was saved of that: %s", what,
          luna_error(again.ctx));
    luna_close(again.ctx);
    free(copy.at);
  }
  luna_close(o.ctx);
  return status == LUNA_OK;
}
typedef struct pairs {
  char key[64][48], value[64][24];
  int count;
} pairs;
static void pairs_take(void *user, const char *key, const char *value) {
  pairs *p = (pairs *)user;
  if (p->count == 64) return;
  snprintf(p->key[p->count], sizeof p->key[0], "%s", key);
  snprintf(p->value[p->count++], sizeof p->value[0], "%s", value);
}
static void check_claims(luna_model_kind kind, int v) {
  static const char *const values[] = {"0", "1", "3", "1000", "999999999", "x", "", NULL}; /* null: no such pair */
  opened o;
  pairs all;
  luna_inspection inspection = {pairs_take, NULL, NULL};
  int loaded = 0, refusals = 0;
  if (!opened_init(&o, kind, v)) return;
  buffer file = saved(o.params);
  all.count = 0;
  inspection.user = &all;
  CHECK(luna_inspect(o.ctx, luna_bytes(file.at, file.size), &inspection) == LUNA_OK && all.count >= 15,
        "%s: %d pairs: %s",
        model_names[kind],
        all.count, luna_error(o.ctx));
  for (int i = 0; i < all.count; i++)
    for (size_t j = 0; j < sizeof values / sizeof *values; j++) {
      char from[100], to[100], what[200];
      snprintf(from, sizeof from, "\"%s\":\"%s\"", all.key[i], all.value[i]);
      if (values[j]) snprintf(to, sizeof to, "\"%s\":\"%s\"", all.key[i], values[j]);
      else snprintf(to, sizeof to, "\"removed\":\"%s\"", all.value[i]);
      snprintf(what, sizeof what, "%s %d with %s", model_names[kind], v, to);
      buffer wrong = edited(&file, from, to);
      if (check_claim(&wrong, luna_params_tensor_count(o.params), what)) loaded++;
      else refusals++;
      free(wrong.at);
    }
  CHECK(loaded >= 10 && refusals >= 4 * all.count, "%s %d: of %d changes of metadata %d are loaded", model_names[kind],
        v,
        loaded + refusals, loaded);
  for (size_t cut = 0; cut < file.size; cut += cut < 64 ? 1 : 131) {
    const buffer piece = {file.at, cut, 0, 0, 0};
    opened part;
    char what[80];
    part.ctx = ctx_open();
    part.params = luna_params_open(part.ctx);
    const int64_t before = heap_live;
    snprintf(what, sizeof what, "%s %d cut to %d bytes", model_names[kind], v, (int)cut);
    CHECK(luna_load_model(&part.model, part.params, luna_bytes(piece.at, piece.size)) != LUNA_OK, "%s is loaded", what);
    check_nothing_left(&part, before, what);
    luna_close(part.ctx);
  }
  free(file.at);
  luna_close(o.ctx);
}
static void check_model_paths(void) {
  const path_text path = path_of();
  opened a, b;
  for (luna_model_kind kind = LUNA_MODEL_LM; kind <= LUNA_MODEL_SEQ2SEQ; kind = (luna_model_kind)(kind + 1)) {
    opened_init(&a, kind, 0);
    b.ctx = ctx_open();
    b.params = luna_params_open(b.ctx);
    CHECK(luna_save(a.params, luna_path(path.text)) == LUNA_OK && luna_load_model(&b.model, b.params,
                                                                                  luna_path(path.text)) == LUNA_OK &&
          comes_back(&a, &b),
          "%s by path: %s", model_names[kind], luna_error(b.ctx));
    luna_params *empty = luna_params_open(b.ctx);
    refused(b.ctx, luna_load_model(&b.model, empty, luna_path("no/such/file")) == LUNA_CANNOT_READ, CANNOT_OPEN,
        "a file that is not there");
    refused(b.ctx, luna_load_model(NULL, empty, luna_path(path.text)) == LUNA_BAD_ARGUMENT, NULL_ARGUMENT,
            "no place for a model");
    CHECK(luna_load_model(&b.model, NULL, luna_path(path.text)) == LUNA_BAD_ARGUMENT, "no set");
    buffer file = saved(a.params), other = edited(&file, "\"luna.kind\":\"", "\"luna.kind\":\"un");
    refused(b.ctx, luna_load_model(&b.model, empty, luna_bytes(other.at, other.size)) == LUNA_BAD_FILE, NOT_A_MODEL,
        "a kind that is none");
    free(file.at), free(other.at);
    luna_close(a.ctx), luna_close(b.ctx);
    remove(path.text);
  }
}

/* ---- what fits: a masked language model's encoder for a classifier ---- */
typedef struct reported {
  char line[40][160];
  int count;
} reported;
static void told_take(void *user, const char *name, const char *why) {
  reported *t = (reported *)user;
  if (t->count < 40) snprintf(t->line[t->count], sizeof t->line[0], "%s: %s", name, why);
  t->count++;
}
static bool was_reported(const reported *t, const char *line) {
  int found = 0;
  for (int i = 0; i < t->count && i < 40; i++) found += strcmp(t->line[i], line) == 0;
  return found == 1;
}
static void check_matching(void) {
  static const char *const lines[] = {"encoder.embed_positions.weight: has another shape in the file",
                                      "pre_logits.0.weight: is not in the file",
                                      "pre_logits.0.bias: is not in the file",
                                      "sentence_projection_layer.weight: is not in the file",
                                      "lm_head.dense.weight: is in the file and no parameter here",
                                      "lm_head.dense.bias: is in the file and no parameter here",
                                      "lm_head.layer_norm.weight: is in the file and no parameter here",
                                      "lm_head.layer_norm.bias: is in the file and no parameter here",
                                      "lm_head.bias: is in the file and no parameter here"};
  enum { LINES = sizeof lines / sizeof *lines };
  const path_text path = path_of();
  luna_ctx *ctx = ctx_open();
  luna_params *from = luna_params_open(ctx), *to = luna_params_open(ctx), *lm_set = luna_params_open(ctx);
  luna_masked_lm masked_lm;
  luna_masked_lm_config masked_config = {0};
  luna_classifier classifier;
  luna_classifier_config config = {0};
  luna_lm lm;
  buffer file = {NULL, 0, 0, 0, SIZE_MAX};
  luna_io io = {NULL, buffer_write, NULL, 0};
  reported t;
  luna_load_report match = {told_take, NULL, -1, -1, -1}, quiet = {NULL, NULL, -1, -1, -1};
  masked_config.vocab = config.vocab = VOCAB, masked_config.encoder = config.encoder = encoder_config(6);
  config.encoder.max_length = 20, config.pre_logits = 5;
  CHECK(luna_masked_lm_init(&masked_lm, from, &masked_config) == LUNA_OK &&
        luna_classifier_init(&classifier, to, &config) == LUNA_OK &&
            luna_lm_init(&lm, lm_set, NULL) == LUNA_OK,
        "%s", luna_error(ctx));
  common_params(from, 101), common_params(to, 102);
  io.user = &file;
  luna_optimizer *adam = luna_adamw(from, NULL); /* a training checkpoint, whose moments are no parameters */
  CHECK(luna_save_training(adam, luna_callbacks(&io)) == LUNA_OK && luna_save(lm_set, luna_path(path.text)) == LUNA_OK,
        "%s", luna_error(ctx));
  for (int way = 0; way < 3; way++) {
    float *before = common_parameters(to), *at = before;
    t.count = 0;
    match.user = &t;
    luna_load_report *m = way == 0 ? &match : way == 1 ? &quiet : NULL;
    CHECK(luna_load_matching(to, luna_bytes(file.at, file.size), m) == LUNA_OK, "%s", luna_error(ctx));
    if (m)
      CHECK(m->loaded == luna_params_tensor_count(to) - 4 && m->missing == 4 && m->unused == 5,
            "%d are loaded, %d left as they were, %d left out",
            (int)m->loaded, (int)m->missing, (int)m->unused);
    for (int i = 0; i < LINES && way == 0; i++) CHECK(was_reported(&t, lines[i]), "\"%s\" is not reported", lines[i]);
    CHECK(way || t.count == LINES, "%d things are reported, not %d", t.count, LINES);
    for (int64_t i = 0; i < luna_params_tensor_count(to); i++) {
      const char *name;
      const luna_tensor *p = luna_params_at(to, i, &name), *q = luna_params_find(from, name);
      const bool fits = q && luna_count(q) == luna_count(p);
      CHECK(same_bits(p->data, fits ? q->data : at, luna_count(p)), "%s is %s", name,
            fits ? "not what the file has" : "changed");
      at += luna_count(p);
    }
    free(before);
    common_params(to, 103 + (uint64_t)way);
  }
  float *before = common_parameters(to), *after;
  refused(ctx, luna_load_matching(to, luna_path(path.text), &quiet) == LUNA_MISMATCH, NOTHING_MATCHES,
      "a file of which nothing fits");
  CHECK(quiet.loaded == 0 && quiet.missing == luna_params_tensor_count(to) &&
        quiet.unused == luna_params_tensor_count(lm_set),
        "nothing fits: %d are loaded, %d left as they were, %d left out", (int)quiet.loaded, (int)quiet.missing,
            (int)quiet.unused);
  for (size_t cut = 0; cut < file.size; cut += 997)
    refused(ctx, luna_load_matching(to, luna_bytes(file.at, cut), NULL) == LUNA_BAD_FILE, NOT_SAFETENSORS,
        "a file cut to %d bytes", (int)cut);
  refused(ctx, luna_load_matching(to, luna_path("no/such/file"), NULL) == LUNA_CANNOT_READ, CANNOT_OPEN,
      "a file that is not there");
  CHECK(luna_load_matching(NULL, luna_bytes(file.at, file.size), NULL) == LUNA_BAD_ARGUMENT, "no set");
  after = common_parameters(to);
  CHECK(same_bits(before, after, luna_params_element_count(to)), "files that do not fit change parameters");
  CHECK(luna_save(from, luna_path(path.text)) == LUNA_OK && luna_load_matching(to, luna_path(path.text),
                                                                               &quiet) == LUNA_OK &&
        quiet.missing == 4, "by path: %s",
        luna_error(ctx));
  free(before), free(after), free(file.at);
  remove(path.text);
  luna_close(ctx);
}
static void check_checkpoints(void) {
  for (luna_model_kind kind = LUNA_MODEL_LM; kind <= LUNA_MODEL_SEQ2SEQ; kind = (luna_model_kind)(kind + 1)) {
    for (int v = 0; v < ENCODERS + 16; v++) check_comes_back(kind, v);
    check_claims(kind, 0);
  }
  check_claims(LUNA_MODEL_CLASSIFIER, 6), check_claims(LUNA_MODEL_CLASSIFIER, 12),
      check_claims(LUNA_MODEL_CLASSIFIER, 14),
      check_claims(LUNA_MODEL_CLASSIFIER, ENCODERS + 1);
  check_claims(LUNA_MODEL_SEQ2SEQ, ENCODERS + 5), check_claims(LUNA_MODEL_MASKED_LM, 5),
      check_claims(LUNA_MODEL_LM, 10),
      check_claims(LUNA_MODEL_LM, 6);
  check_model_paths();
  check_matching();
  heap_check("checkpoints");
}

/* ---- files of a later luna.h: it refuses what it cannot compute, and leaves out what it does not know ---- */
static void check_newer(luna_model_kind kind) {
  opened a, later, known;
  opened_init(&a, kind, 0);
  buffer file = saved(a.params);
  buffer newer = edited(&file, "\"luna.kind\":", "\"luna.format\":\"4\",\"luna.kind\":");
  buffer unknown = edited(&file, "\"luna.kind\":", "\"luna.later\":\"1\",\"luna.kind\":");
  const luna_status status = open_bytes(&later, &newer);
  CHECK(strstr(luna_error(later.ctx), LUNA_VERSION), "it does not name this version: %s", luna_error(later.ctx));
  refused(later.ctx, status == LUNA_BAD_FILE, NOT_A_MODEL, "%s of a later format", model_names[kind]);
  refused(a.ctx, luna_load(a.params, luna_bytes(newer.at, newer.size)) == LUNA_BAD_FILE, NOT_A_MODEL,
          "%s of a later format, into a set", model_names[kind]);
  for (int i = 0; i < 2; i++) { /* no number */
    buffer odd = edited(&file, "\"luna.kind\":", i ? "\"luna.format\":\"\",\"luna.kind\":" :
                                                   "\"luna.format\":\"two\",\"luna.kind\":");
    refused(a.ctx, luna_load(a.params, luna_bytes(odd.at, odd.size)) == LUNA_BAD_FILE, NOT_A_MODEL,
            "%s of a format that is no number", model_names[kind]);
    free(odd.at);
  }
  CHECK(open_bytes(&known, &unknown) == LUNA_OK && comes_back(&a, &known), "%s with luna.later: %s",
        model_names[kind], luna_error(known.ctx));
  buffer again = saved(known.params);
  CHECK(again.size == file.size && memcmp(again.at, file.at, file.size) == 0, "%s keeps luna.later", model_names[kind]);
  free(file.at), free(newer.at), free(unknown.at), free(again.at);
  luna_close(a.ctx), luna_close(later.ctx), luna_close(known.ctx);
}

/* ---- files that earlier versions wrote (tests/data/old), with what those made of them ---- */
typedef struct old_version {
  const char *folder, *version, *files[6];
} old_version;
static const old_version old_versions[] = {
  {"tests/data/old/0.1", "0.1",
   {"training.safetensors", "lm_features.safetensors", "classifier.safetensors", "masked_lm.safetensors",
    "seq2seq.safetensors"}},
  {"tests/data/old/0.2", "0.2", {"training.safetensors", "lm_features.safetensors", "int8.safetensors"}}};

static path_text old_path(const old_version *v, const char *file) {
  path_text path;
  snprintf(path.text, sizeof path.text, "%s/%s", v->folder, file);
  return path;
}
static void check_old_result(const old_version *v, const char *name, const float *values, int64_t count) {
  luna_ctx *ctx = ctx_open();
  luna_params *results = luna_params_open(ctx);
  luna_tensor *expected = luna_param(results, name, 1, &count, (luna_init){LUNA_INIT_ZEROS, 0});
  CHECK(luna_load_matching(results, luna_path(old_path(v, "results.safetensors").text), NULL) == LUNA_OK, "%s",
        luna_error(ctx));
  test_close(old_path(v, name).text, values, expected ? expected->data : NULL, (size_t)count, 1e-5);
  luna_close(ctx);
}
static luna_ctx *old_open(const old_version *v, const char *file, luna_model *model, luna_params **params) {
  const path_text path = old_path(v, file);
  luna_ctx *ctx = ctx_open();
  *params = luna_params_open(ctx);
  CHECK(luna_load_model(model, *params, luna_path(path.text)) == LUNA_OK, "%s: %s", path.text, luna_error(ctx));
  const char *note = luna_params_get_text(*params, "note");
  CHECK(note && strstr(note, v->version), "%s: its text is \"%s\"", path.text, note ? note : "");
  return ctx;
}
static void check_old_training(const old_version *v) {
  luna_model model;
  luna_params *params;
  luna_ctx *ctx = old_open(v, "training.safetensors", &model, &params);
  float losses[OLD_STEPS];
  luna_optimizer *adam = luna_adamw(params, &(luna_optimizer_config){.lr = 0.01f, .weight_decay = 0.1f, .clip = 1});
  CHECK(luna_load_training(adam, luna_path(old_path(v, "training.safetensors").text)) == LUNA_OK &&
        old_train(ctx, &model.lm, adam, losses), "%s: %s", v->folder, luna_error(ctx));
  check_old_result(v, "losses", losses, OLD_STEPS);
  luna_close(ctx);
}
/* A state's bytes are in the order of the machine that wrote it, and luna.h 0.1 had another form of them. */
static void check_old_state(const old_version *v, bool loads) {
  uint8_t state[2000];
  luna_model model;
  luna_params *params;
  luna_ctx *ctx = old_open(v, "training.safetensors", &model, &params);
  luna_stream *stream = luna_stream_open(&model.lm, &(luna_stream_config){.batch = OLD_BATCH});
  FILE *f = fopen(old_path(v, "stream.state").text, "rb");
  const size_t size = f ? fread(state, 1, sizeof state, f) : 0;
  if (f) fclose(f);
  const luna_status status = luna_stream_state_load(stream, state, size);
  CHECK(loads ? status == LUNA_OK : luna_stream_error_id(stream) == LUNA_ERROR_STREAM_STATE_SIZE,
        "%s, %d bytes of state: %s", v->folder, (int)size, luna_stream_error(stream));
  if (loads) check_old_result(v, "stream", old_stream(stream, 4, OLD_N), OLD_BATCH * OLD_VOCAB);
  luna_stream_close(stream);
  luna_close(ctx);
}
/* A classifier of luna.h 0.2 with Linformer, which is a hook now: what it gives, into a model of its config too, and
   the sentence where there is no hook. */
static void check_old_linformer(void) {
  static const old_version v = {"tests/data/old/linformer", "0.2", {"linformer.safetensors"}};
  const path_text path = old_path(&v, v.files[0]);
  luna_model model, same;
  luna_params *params;
  luna_ctx *ctx = old_open(&v, v.files[0], &model, &params);
  luna_params *other = luna_params_open(ctx);
  memset(&same, 0, sizeof same);
  same.kind = LUNA_MODEL_CLASSIFIER;
  CHECK(luna_classifier_init(&same.classifier, other, &model.classifier.config) == LUNA_OK &&
        luna_load(other, luna_path(path.text)) == LUNA_OK, "%s: %s", path.text, luna_error(ctx));
  CHECK(luna_save(other, luna_path("linformer.tmp")) == LUNA_OK &&
        luna_load(other, luna_path("linformer.tmp")) == LUNA_OK, "a new file of the hook: %s", luna_error(ctx));
  remove("linformer.tmp");
  luna_classifier refuses;
  luna_classifier_config unlike = model.classifier.config;
  luna_attention_hook another = *unlike.encoder.layer.hook;
  another.name = "another";
  unlike.encoder.layer.hook = &another;
  luna_params *third = luna_params_open(ctx);
  CHECK(luna_classifier_init(&refuses, third, &unlike) == LUNA_OK, "another hook: %s", luna_error(ctx));
  refused(ctx, luna_load(third, luna_path(path.text)) != LUNA_OK, FILE_CONFIG, "an old file into another hook's model");
  unlike = model.classifier.config;
  unlike.encoder.layer.heads = unlike.encoder.layer.heads == 1 ? 2 : 1;
  third = luna_params_open(ctx);
  CHECK(luna_classifier_init(&refuses, third, &unlike) == LUNA_OK, "other heads: %s", luna_error(ctx));
  refused(ctx, luna_load(third, luna_path(path.text)) != LUNA_OK, FILE_CONFIG,
          "an old file into a model of other heads");
  CHECK(luna_params_find(params, "encoder.e_proj") &&
        luna_params_find(params, "encoder.layers.1.self_attn.q_proj.bias"), "%s: its parameters have other names",
        path.text);
  for (int i = 0; i < 2; i++) {
    luna_begin_inference(ctx);
    float *values = values_of(ctx, old_logits(i ? &same : &model), path.text);
    check_old_result(&v, v.files[0], values, OLD_BATCH * 3);
    free(values);
  }
  luna_close(ctx);
  luna_options options = plain_options();
  options.hooks = NULL;
  ctx = luna_open(&options);
  params = luna_params_open(ctx);
  refused(ctx, luna_load_model(&model, params, luna_path(path.text)) == LUNA_UNSUPPORTED, HOOK_UNKNOWN,
          "an old file without its hook");
  luna_close(ctx);
  ctx = luna_open(&options);
  CHECK(luna_load_model(&model, luna_params_open(ctx), luna_path("tests/data/old/0.1/classifier.safetensors")) ==
        LUNA_OK, "a file whose luna.linformer_k is 0 needs no hook: %s", luna_error(ctx));
  luna_close(ctx);
}
static void check_versions(void) {
  for (luna_model_kind kind = LUNA_MODEL_LM; kind <= LUNA_MODEL_SEQ2SEQ; kind = (luna_model_kind)(kind + 1))
    check_newer(kind);
  old_fill();
  for (size_t i = 0; i < sizeof old_versions / sizeof *old_versions; i++) {
    const old_version *v = &old_versions[i];
    for (int k = 0; v->files[k]; k++) {
      luna_model model;
      luna_params *params;
      luna_ctx *ctx = old_open(v, v->files[k], &model, &params);
      luna_begin_inference(ctx);
      luna_tensor *logits = old_logits(&model);
      float *values = values_of(ctx, logits, v->files[k]);
      check_old_result(v, v->files[k], values, luna_count(logits));
      free(values);
      luna_close(ctx);
    }
    check_old_training(v);
    if (common_little_endian()) check_old_state(v, i > 0);
  }
  check_old_linformer();
  heap_check("files of other versions");
}

int main(void) {
  check_checkpoints();
  check_versions();
  return test_report("model_files");
}
