/* Writes the files of one version of luna.h: README.md beside it says how. -DFLAT where a model's config holds the
   width of its layers itself, as in 0.1; -DPATHS where files are given by luna_path; -DLINFORMER for a classifier with
   Linformer attention, which luna.h has no more, alone. */
#define LUNA_IMPLEMENTATION
#include "luna.h"
#include "use.h"
#include <stdio.h>
#include <stdlib.h>

#ifdef FLAT
#define WIDTH(config) &(config).dim, &(config).heads, &(config).ffn
#else
#define WIDTH(config) &(config).layer.dim, &(config).layer.heads, &(config).layer.ffn
#endif
#ifdef PATHS
#define FILE_OF(path) luna_path(path)
#else
#define FILE_OF(path) path
#endif

static const char *folder;
static char path[300];
static luna_params *results;                              /* tensors of outputs, by the files' names */

static const char *path_of(const char *name) { return snprintf(path, sizeof path, "%s/%s", folder, name), path; }
static void must(luna_ctx *ctx, bool good, const char *what) {
  if (!good) printf("%s: %s\n", what, luna_error(ctx)), exit(1);
}
static void width(int64_t *dim, int64_t *heads, int64_t *ffn) { *dim = 4, *heads = 2, *ffn = 6; }
/* values that are not those of a new model: norms of ones and biases of zero would hide what is left out */
static void scatter(luna_params *params) {
  static float values[4096];
  uint32_t random = 12345;
  for (int64_t i = 0; i < luna_params_tensor_count(params); i++) {
    luna_tensor *p = luna_params_at(params, i, NULL);
    for (int64_t j = 0; j < luna_count(p); j++) {
      random = random * 1664525u + 1013904223u;
      values[j] = (p->rank == 1 ? 1.0f : 0) + (float)((int32_t)(random >> 24) - 128) / 256;
    }
    luna_write(p, values);
  }
}
static void result(const char *name, const float *values, int64_t count) {
  luna_init zeros = { 0 };
  luna_tensor *t = luna_param(results, name, 1, &count, zeros);
  must(results->ctx, t && luna_write(t, values) == LUNA_OK, name);
}
static void write_result(luna_ctx *ctx, const char *name, const luna_model *model) {
  static float values[OLD_MOST];
  luna_begin_inference(ctx);
  luna_tensor *logits = old_logits(model);
  must(ctx, luna_read(logits, values) == LUNA_OK, name);
  result(name, values, luna_count(logits));
}
static void write_model(luna_ctx *ctx, const char *name, luna_params *params, const luna_model *model) {
  luna_params_set(params, "note", "written by " LUNA_VERSION);
  must(ctx, luna_save(params, FILE_OF(path_of(name))) == LUNA_OK, name);
  write_result(ctx, name, model);
}
static void write_lm(const char *name, bool features) {
  luna_ctx *ctx = luna_open(NULL);
  luna_params *params = luna_params_open(ctx);
  luna_model model = { 0 };
  luna_lm_config config = { 0 };
  float values[OLD_MOST];
  model.kind = LUNA_MODEL_LM;
  width(WIDTH(config));
  config.layers = 1, config.memory = 3, config.layer.convolution = 3, config.layer.dropout = 0.125f;
  if (features) {
    config.features = OLD_FEATURES, config.outputs = 4, config.layer.pre_norm = true;
    config.positions = LUNA_POSITIONS_LEARNED, config.max_length = 9;
  } else config.vocab = OLD_VOCAB;
#ifndef FLAT
  config.layer.ffn = 16;                                  /* int8.safetensors has matrices of 16 columns in 8 bits */
  config.layer.forget = LUNA_FORGET_GATED, config.layer.output_gate = true;
  config.output_norm = features;
#endif
  must(ctx, luna_lm_init(&model.lm, params, &config) == LUNA_OK, name);
  scatter(params);
  if (!features) {
    luna_optimizer_config rate = { 0 };
    rate.lr = 0.01f, rate.weight_decay = 0.1f, rate.clip = 1;
    luna_optimizer *adam = luna_adamw(params, &rate);
    must(ctx, old_train(ctx, &model.lm, adam, values), name);
    luna_params_set(params, "note", "written by " LUNA_VERSION);
    must(ctx, luna_save_training(adam, FILE_OF(path_of(name))) == LUNA_OK, name);
    write_result(ctx, name, &model);
    luna_stream_config batch = { 0 };
    batch.batch = OLD_BATCH;
    luna_stream *stream = luna_stream_open(&model.lm, &batch);
    must(ctx, old_stream(stream, 0, 4) != NULL, "stream");
    const size_t size = luna_stream_state_size(stream);
    void *bytes = malloc(size);
    must(ctx, bytes && luna_stream_state_save(stream, bytes, size) == LUNA_OK, "state");
    FILE *f = fopen(path_of("stream.state"), "wb");
    must(ctx, f && fwrite(bytes, 1, size, f) == size && fclose(f) == 0, "state");
    result("stream", old_stream(stream, 4, OLD_N), OLD_BATCH * OLD_VOCAB);
    luna_stream_close(stream);
    free(bytes);
#ifdef PATHS
    luna_params *whole = luna_params_open(ctx);
    luna_model eight;
    must(ctx, luna_save_int8(params, FILE_OF(path_of("int8.safetensors"))) == LUNA_OK, "int8");
    must(ctx, luna_load_model(&eight, whole, FILE_OF(path)) == LUNA_OK, "int8");
    write_result(ctx, "int8.safetensors", &eight);
#endif
    must(ctx, old_train(ctx, &model.lm, adam, values), "training");
    result("losses", values, OLD_STEPS);
  } else {
    const luna_input input = old_input(true, false, OLD_N);
    must(ctx, luna_input_layer_fit(&model.lm.input, &input) == LUNA_OK, name);
#ifndef FLAT
    for (int i = 0; i < 4 * 5; i++) values[i] = (float)(i * i % 11 * (i % 4 + 1));
    must(ctx, luna_lm_fit_outputs(&model.lm, values, 5) == LUNA_OK, name);
#endif
    write_model(ctx, name, params, &model);
  }
  luna_close(ctx);
}
static void write_classifier(const char *name) {
  luna_ctx *ctx = luna_open(NULL);
  luna_params *params = luna_params_open(ctx);
  luna_model model = { 0 };
  luna_classifier_config config = { 0 };
  model.kind = LUNA_MODEL_CLASSIFIER;
  width(WIDTH(config.encoder));
  config.vocab = OLD_VOCAB, config.classes = 3, config.pre_logits = 5;
  config.encoder.layers = 1, config.encoder.memory = 3, config.encoder.positions = LUNA_POSITIONS_LEARNED;
  config.encoder.max_length = 9, config.encoder.layer.activation = LUNA_ACTIVATION_GELU;
  must(ctx, luna_classifier_init(&model.classifier, params, &config) == LUNA_OK, name);
  scatter(params);
  write_model(ctx, name, params, &model);
  luna_close(ctx);
}
static void write_masked_lm(const char *name) {
  luna_ctx *ctx = luna_open(NULL);
  luna_params *params = luna_params_open(ctx);
  luna_model model = { 0 };
  luna_masked_lm_config config = { 0 };
  model.kind = LUNA_MODEL_MASKED_LM;
  width(WIDTH(config.encoder));
  config.vocab = OLD_VOCAB, config.encoder.layers = 1, config.encoder.memory = 3;
  config.encoder.layer.pre_norm = true, config.encoder.layer.sharing = LUNA_SHARING_FULL;
  must(ctx, luna_masked_lm_init(&model.masked_lm, params, &config) == LUNA_OK, name);
  scatter(params);
  write_model(ctx, name, params, &model);
  luna_close(ctx);
}
static void write_seq2seq(const char *name) {
  luna_ctx *ctx = luna_open(NULL);
  luna_params *params = luna_params_open(ctx);
  luna_model model = { 0 };
  luna_seq2seq_config config = { 0 };
  model.kind = LUNA_MODEL_SEQ2SEQ;
  width(WIDTH(config.encoder));
  config.vocab = OLD_VOCAB, config.share_embeddings = true, config.encoder.layers = 1, config.encoder.memory = 3;
  must(ctx, luna_seq2seq_init(&model.seq2seq, params, &config) == LUNA_OK, name);
  scatter(params);
  write_model(ctx, name, params, &model);
  luna_close(ctx);
}

#ifdef LINFORMER
/* layerwise: one E for both layers; k falls by layer and by head */
static void write_linformer(const char *name) {
  luna_ctx *ctx = luna_open(NULL);
  luna_params *params = luna_params_open(ctx);
  luna_model model = { 0 };
  luna_classifier_config config = { 0 };
  luna_linformer_config *linformer = &config.encoder.layer.linformer;
  model.kind = LUNA_MODEL_CLASSIFIER;
  width(WIDTH(config.encoder));
  config.vocab = OLD_VOCAB, config.classes = 3;
  config.encoder.layers = 2, config.encoder.max_length = 9;
  config.encoder.layer.attention = LUNA_ATTENTION_LINFORMER;
  linformer->k = 5, linformer->k_last_layer = 3, linformer->k_last_head = 2;
  linformer->sharing = LUNA_LINFORMER_SHARING_LAYERWISE;
  must(ctx, luna_classifier_init(&model.classifier, params, &config) == LUNA_OK, name);
  scatter(params);
  write_model(ctx, name, params, &model);
  luna_close(ctx);
}
#endif

int main(int argc, char **argv) {
  folder = argc > 1 ? argv[1] : ".";
  luna_ctx *ctx = luna_open(NULL);
  results = luna_params_open(ctx);
  old_fill();
#ifdef LINFORMER
  write_linformer("linformer.safetensors");
#else
  write_lm("training.safetensors", false);
  write_lm("lm_features.safetensors", true);
#endif
#ifdef FLAT                                               /* these are the same in 0.2 */
  write_classifier("classifier.safetensors");
  write_masked_lm("masked_lm.safetensors");
  write_seq2seq("seq2seq.safetensors");
#endif
  must(ctx, luna_save(results, FILE_OF(path_of("results.safetensors"))) == LUNA_OK, "results");
  luna_close(ctx);
  return 0;
}
