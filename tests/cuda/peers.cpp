/* luna.h's side of tests/cuda/bench_cuda_peers.py: one layer or model, its inputs on the device, run, timed and read by
   functions in C. Linked with luna_cuda.o it is for a GPU; with PEERS_HOST it holds the kernels itself and runs them
   through cuda_host.h, so that the whole comparison can be tried without one. */
#ifdef PEERS_HOST
#include "cuda_host.h"
#endif
#include "luna_cuda.cuh"
#ifndef PEERS_HOST
#include <cuda_runtime.h>
#endif
#include <string>
#include <vector>

enum peer_work { ENCODER, CAUSAL, FORGETTING, CLASSIFIER, LM };
struct peer_sizes {                    /* as bench_cuda_peers.py's Sizes */
  int64_t work, training, math, batch, n, dim, heads, ffn, memory, layers, vocab;
};
struct peer {
  peer_sizes s;
  luna_ctx *ctx;
  luna_params *params, *inputs;
  luna_tensor *x, *p, *weights, *output;
  luna_encoder_layer encoder;
  luna_causal_layer causal;
  luna_classifier classifier;
  luna_lm lm;
  luna_optimizer *adam;
  luna_graph *graph;
  cudaEvent_t begin, end;
  std::vector<int32_t> tokens, labels, next;
  std::string error;
};

static bool peer_init(peer *b) {
  const peer_sizes &s = b->s;
  luna_layer_config layer = {};
  layer.dim = s.dim, layer.heads = s.heads, layer.ffn = s.ffn, layer.memory = s.memory;
  if (s.work == FORGETTING) layer.forget = LUNA_FORGET_GATED;
  if (s.work == CLASSIFIER) {
    luna_classifier_config config = {};
    config.vocab = s.vocab, config.classes = 2, config.pooling = LUNA_POOLING_MEAN;
    config.encoder.layers = s.layers, config.encoder.layer = layer;
    return luna_classifier_init(&b->classifier, b->params, &config) == LUNA_OK;
  }
  if (s.work == LM) {
    luna_lm_config config = {};
    config.vocab = s.vocab, config.layers = s.layers, config.layer = layer;
    config.layer.horizon = LUNA_HORIZON_NONE;
    return luna_lm_init(&b->lm, b->params, &config) == LUNA_OK;
  }
  const luna_init normal = {LUNA_INIT_NORMAL, 1};
  const int64_t x[3] = {s.batch, s.n, s.dim}, p[3] = {s.batch, s.memory, s.dim};
  b->x = luna_param(b->inputs, "x", 3, x, normal);
  b->weights = luna_param(b->inputs, "weights", 1, &s.dim, normal);
  if (s.work == ENCODER) b->p = luna_param(b->inputs, "p", 3, p, normal);
  if (!b->x || !b->weights || luna_params_freeze(b->inputs, "weights", true) != LUNA_OK) return false;
  if (s.work == ENCODER) return b->p && luna_encoder_layer_init(&b->encoder, b->params, "", &layer) == LUNA_OK;
  return luna_causal_layer_init(&b->causal, b->params, "", &layer) == LUNA_OK;
}
/* the loss of what is trained, or the result of what is not. A layer's loss is the mean of its result times `weights`:
   the mean alone would have no gradient, after a layer norm. */
static luna_tensor *peer_forward(peer *b) {
  const peer_sizes &s = b->s;
  const int64_t flat[1] = {-1};
  luna_input input = {};
  luna_tensor *y = NULL, *p = b->p;
  if (s.training) luna_begin_step(b->ctx);
  else luna_begin_inference(b->ctx);
  input.tokens = b->tokens.data(), input.batch = s.batch, input.n = s.n;
  if (s.work == CLASSIFIER) {
    y = luna_classifier_forward(&b->classifier, &input);
    return s.training ? luna_cross_entropy(y, b->labels.data(), NULL) : y;
  }
  if (s.work == LM) return s.training ? luna_lm_loss(&b->lm, &input, b->next.data()) : luna_lm_forward(&b->lm, &input);
  y = s.work == ENCODER ? luna_encoder_layer_forward(&b->encoder, b->x, &p, NULL)
                        : luna_causal_layer_forward(&b->causal, b->x);
  return s.training ? luna_mean(luna_reshape(luna_mul(y, b->weights), 1, flat), 0) : y;
}
/* 0, or the context has the error */
static int peer_step(peer *b, bool graphed) {
  if (graphed && luna_graph_begin(b->graph) != LUNA_OK) return 1;
  b->output = peer_forward(b);
  if (b->s.training) {
    luna_backward(b->output);
    luna_optimizer_step(b->adam);
  }
  if (graphed) luna_graph_end(b->graph);
  return luna_error_status(b->ctx) != LUNA_OK;
}

extern "C" peer *peer_open(const peer_sizes *sizes) {
  peer *b = new peer();
  luna_options options = {};
  luna_optimizer_config adam = {};
  b->s = *sizes;
  options.backend = luna_cuda_backend_with(0, (luna_cuda_math)b->s.math);
  b->ctx = luna_open(&options);
  b->params = b->ctx ? luna_params_open(b->ctx) : NULL;
  b->inputs = b->params ? luna_params_open(b->ctx) : NULL;
  adam.lr = 1e-4f;
  const int64_t all = b->s.batch * b->s.n;
  for (int64_t i = 0; i < all; i++) b->tokens.push_back((int32_t)(i * 7919 % b->s.vocab));
  for (int64_t i = 0; i < all; i++) b->next.push_back((int32_t)((i + 1) * 7919 % b->s.vocab));
  for (int64_t i = 0; i < b->s.batch; i++) b->labels.push_back((int32_t)(i % 2));
  if (!b->inputs || !peer_init(b) || !(b->adam = luna_adam(b->params, &adam)) ||
      !(b->graph = luna_graph_open(b->ctx)) || cudaEventCreate(&b->begin) != cudaSuccess ||
      cudaEventCreate(&b->end) != cudaSuccess)
    b->error = b->ctx && luna_error_status(b->ctx) != LUNA_OK ? luna_error(b->ctx) : "luna.h's side cannot be opened";
  return b;
}
extern "C" const char *peer_error(peer *b) {
  return b->error.empty() && b->ctx ? luna_error(b->ctx) : b->error.c_str();
}
extern "C" void peer_close(peer *b) {
  if (b->begin) (void)cudaEventDestroy(b->begin);
  if (b->end) (void)cudaEventDestroy(b->end);
  luna_close(b->ctx);
  delete b;
}
/* Runs `steps` of them; *ms becomes the device's time for one. 0, or the first step that failed. */
extern "C" int peer_run(peer *b, int steps, int graphed, double *ms) {
  const cudaStream_t stream = luna_cuda_stream(b->ctx);
  float elapsed = 0;
  if (!b->error.empty()) return 1;
  if (cudaEventRecord(b->begin, stream) != cudaSuccess) return 1;
  for (int i = 0; i < steps; i++)
    if (peer_step(b, graphed != 0)) return i + 1;
  if (cudaEventRecord(b->end, stream) != cudaSuccess || cudaStreamSynchronize(stream) != cudaSuccess ||
      cudaEventElapsedTime(&elapsed, b->begin, b->end) != cudaSuccess) return steps;
  *ms = (double)elapsed / steps;
  return 0;
}
/* why the last graphed step was not one launch; "": it was */
extern "C" const char *peer_reason(peer *b) { return luna_graph_reason(b->graph); }
extern "C" int64_t peer_peak(peer *b) { return (int64_t)luna_memory(b->ctx).peak; }

/* --- what is compared: the parameters and inputs by their names, the result, the gradients --- */
static luna_tensor *peer_at(peer *b, int64_t i, const char **name) {
  const int64_t count = luna_params_tensor_count(b->params);
  return i < count ? luna_params_at(b->params, i, name) : luna_params_at(b->inputs, i - count, name);
}
extern "C" int64_t peer_count(peer *b) {
  return luna_params_tensor_count(b->params) + luna_params_tensor_count(b->inputs);
}
extern "C" const char *peer_name(peer *b, int64_t i) {
  const char *name = NULL;
  return peer_at(b, i, &name) ? name : NULL;
}
extern "C" int64_t peer_size(peer *b, int64_t i) { return luna_count(peer_at(b, i, NULL)); }
extern "C" int peer_write(peer *b, int64_t i, const float *values) {
  return luna_write(peer_at(b, i, NULL), values) != LUNA_OK;
}
extern "C" int peer_read(peer *b, int64_t i, float *values) {
  return luna_read(peer_at(b, i, NULL), values) != LUNA_OK;
}
extern "C" int peer_read_grad(peer *b, int64_t i, float *values) {
  return luna_read_grad(peer_at(b, i, NULL), values) != LUNA_OK;
}
/* forward, and of what is trained backward, without an update; the numbers of the result, or 0 */
extern "C" int64_t peer_gradients(peer *b) {
  b->output = peer_forward(b);
  if (b->s.training && luna_backward(b->output) != LUNA_OK) return 0;
  return b->output && luna_error_status(b->ctx) == LUNA_OK ? luna_count(b->output) : 0;
}
extern "C" int peer_output(peer *b, float *values) { return luna_read(b->output, values) != LUNA_OK; }
extern "C" int64_t peer_used() {       /* bytes of the device, by everybody */
  size_t left = 0, all = 0;
  return cudaMemGetInfo(&left, &all) == cudaSuccess ? (int64_t)(all - left) : 0;
}
/* whether the emulator found something wrong: its sentence, or "" */
extern "C" const char *peer_finding() {
#ifdef PEERS_HOST
  return cuda_host.errors ? cuda_host.message : "";
#else
  return "";
#endif
}
