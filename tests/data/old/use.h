/* What is done with a model of each kind when its file is written (write.c) and when a later luna.h has read it
   (tests/files/model_files.c). Calls alone that are the same in every version; include it after luna.h. */
#ifndef OLD_USE_H
#define OLD_USE_H

enum { OLD_BATCH = 2, OLD_N = 7, OLD_TARGET = 5, OLD_VOCAB = 9, OLD_FEATURES = 3, OLD_STEPS = 3, OLD_MOST = 256 };
static int32_t old_tokens[OLD_BATCH * OLD_N], old_labels[OLD_BATCH * OLD_N];
static const int32_t old_lengths[OLD_BATCH] = { OLD_N, 4 };
static float old_features[OLD_BATCH * OLD_N * OLD_FEATURES];

static void old_fill(void) {                              /* numbers that every machine has exactly */
  for (int i = 0; i < OLD_BATCH * OLD_N; i++) {
    old_tokens[i] = (5 * i + i * i / 3) % OLD_VOCAB, old_labels[i] = (7 * i + 2) % OLD_VOCAB;
    for (int k = 0; k < OLD_FEATURES; k++) old_features[i * OLD_FEATURES + k] = (float)((11 * i + 5 * k) % 16 - 7) / 4;
  }
}
static luna_input old_input(bool features, bool lengths, int64_t n) {
  luna_input input = { 0 };
  if (features) input.features = old_features;
  else input.tokens = old_tokens;
  input.lengths = lengths ? old_lengths : NULL, input.batch = OLD_BATCH, input.n = n;
  return input;
}
static luna_tensor *old_logits(const luna_model *m) {
  const luna_input plain = old_input(m->kind == LUNA_MODEL_LM && m->lm.config.features, false, OLD_N);
  const luna_input ragged = old_input(false, true, OLD_N);
  const luna_input target = old_input(false, false, OLD_TARGET);
  switch (m->kind) {
    case LUNA_MODEL_LM: return luna_lm_forward(&m->lm, &plain);
    case LUNA_MODEL_CLASSIFIER: return luna_classifier_forward(&m->classifier, &ragged);
    case LUNA_MODEL_MASKED_LM: return luna_masked_lm_forward(&m->masked_lm, &ragged);
    default: return luna_seq2seq_forward(&m->seq2seq, &ragged, &target);
  }
}
/* the losses of steps of a training; false when one fails */
static bool old_train(luna_ctx *ctx, luna_lm *model, luna_optimizer *optimizer, float *losses) {
  const luna_input input = old_input(false, false, OLD_N);
  for (int step = 0; step < OLD_STEPS; step++) {
    luna_begin_step(ctx);
    luna_tensor *loss = luna_lm_loss(model, &input, old_labels);
    luna_backward(loss);
    if (luna_optimizer_step(optimizer) != LUNA_OK) return false;
    losses[step] = luna_item(loss);
  }
  return true;
}
/* the logits after tokens `from` to `to` of each sequence; null when one fails */
static const float *old_stream(luna_stream *stream, int from, int to) {
  const float *logits = NULL;
  for (int t = from; t < to; t++) {
    int32_t step[OLD_BATCH];
    for (int b = 0; b < OLD_BATCH; b++) step[b] = old_tokens[b * OLD_N + t];
    logits = luna_stream_step(stream, step);
    if (!logits) return NULL;
  }
  return logits;
}

#endif
