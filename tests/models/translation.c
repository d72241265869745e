/* The encoder-decoder: its stream against luna_seq2seq_forward; luna_seq2seq_generate, and the beam search of
   examples/luna_beam.h, against the same rules in the plainest form. */
#include "test.h"
#define LUNA_IMPLEMENTATION
#include "luna.h"
#include "examples/luna_beam.h"
#include "common.h"
#include "models.h"

/* ---- encoder-decoder: the stream against luna_seq2seq_forward ---- */
enum { SOURCE = 9, MOST_BEAM = 4 };
typedef struct translator {
  luna_ctx *ctx;
  luna_params *params;
  luna_seq2seq model;
} translator;
static bool translator_open(translator *t, const luna_seq2seq_config *config, uint64_t seed) {
  t->ctx = ctx_open();
  t->params = luna_params_open(t->ctx);
  if (!CHECK(luna_seq2seq_init(&t->model, t->params, config) == LUNA_OK, "luna_seq2seq_init: %s", luna_error(t->ctx)))
    return false;
  common_params(t->params, seed);
  return true;
}
/* logits of targets [rows, m] of sources repeated `beam` times, [rows, m, vocab], to be freed */
static float *teacher(translator *t, const int32_t *source, const int32_t *lengths, int64_t batch, int64_t n,
                      int64_t beam,
                      const int32_t *target, int64_t m) {
  int32_t *repeated = (int32_t *)common_alloc((size_t)(batch * beam * n) * sizeof(int32_t)), repeated_lengths[32];
  for (int64_t i = 0; i < batch * beam; i++) {
    memcpy(repeated + i * n, source + i / beam * n, (size_t)n * sizeof(int32_t));
    repeated_lengths[i] = lengths ? lengths[i / beam] : 0;
  }
  luna_begin_inference(t->ctx);
  float *out =
      values_of(t->ctx, luna_seq2seq_forward(&t->model, &(luna_input){ repeated, lengths ? repeated_lengths : NULL,
          batch * beam, n, NULL }, &(luna_input){ target, NULL, batch * beam, m, NULL }),
                "luna_seq2seq_forward");
  free(repeated);
  return out;
}
static void check_decoder_stream(int v, int64_t beam, bool with_lengths) {
  enum { SOURCES_3 = 3, MOST_ROWS = 3 * MOST_BEAM };
  static const int32_t source_lengths[SOURCES_3] = {5, 1, SOURCE};
  const int32_t *lengths = with_lengths ? source_lengths : NULL;
  const luna_seq2seq_config config = translator_config(v);
  const int64_t rows = SOURCES_3 * beam, vocab = config.target_vocab;
  translator t;
  char what[120];
  int32_t now[MOST_ROWS], from[MOST_ROWS];
  if (translator_open(&t, &config, 80)) {
    int32_t *source = common_tokens(SOURCES_3 * SOURCE, 81, VOCAB),
        *target = common_tokens(rows * STEPS, 82, (int32_t)vocab),
            moved[MOST_ROWS * STEPS];
    luna_stream *s = luna_seq2seq_stream_open(&t.model, &(luna_input){ source, lengths, SOURCES_3, SOURCE, NULL },
                                              beam);
    float *got = common_floats(rows * STEPS * vocab);
    if (CHECK(s != NULL, "luna_seq2seq_stream_open: %s", luna_error(t.ctx))) {
      /* as it is; with the sequences of each source changing places at every third step */
      for (int part = 0; part < 2; part++) {
        luna_stream_reset(s);
        if (part)
          CHECK(luna_stream_prefill(s, &(luna_input){ target, NULL, 0, 1, NULL }) != NULL, "prefill: %s",
                luna_stream_error(s)), luna_stream_reset(s);
        CHECK(luna_stream_position(s) == 0, "a stream that was reset is at %d", (int)luna_stream_position(s));
        for (int64_t step = 0; step < STEPS; step++) {
          for (int64_t i = 0; i < rows; i++) now[i] = target[i * STEPS + step];
          const float *logits = luna_stream_step(s, now);
          if (!CHECK(logits != NULL, "step %d: %s", (int)step, luna_stream_error(s))) break;
          for (int64_t i = 0; i < rows; i++)
            memcpy(got + (i * STEPS + step) * vocab, logits + i * vocab, (size_t)vocab * sizeof(float));
          if (!part || step % 3 != 2) continue;
          for (int64_t i = 0; i < rows; i++)
            from[i] = (int32_t)(i / beam * beam + (int64_t)(common_hash(83, (uint64_t)(i + step)) % (uint64_t)beam));
          CHECK(luna_stream_reorder(s, from) == LUNA_OK, "luna_stream_reorder: %s", luna_stream_error(s));
          float *row =
              /* what was read and given so far moves with them; what comes is each place's own */
              common_floats(rows * STEPS * vocab);
          memcpy(row, got, (size_t)(rows * STEPS * vocab) * sizeof(float)),
              memcpy(moved, target, (size_t)(rows * STEPS) * sizeof(int32_t));
          for (int64_t i = 0; i < rows; i++) {
            memcpy(got + i * STEPS * vocab, row + from[i] * STEPS * vocab,
                   (size_t)((step + 1) * vocab) * sizeof(float));
            memcpy(target + i * STEPS, moved + from[i] * STEPS, (size_t)(step + 1) * sizeof(int32_t));
          }
          free(row);
        }
        float *expected = teacher(&t, source, lengths, SOURCES_3, SOURCE, beam, target, STEPS);
        for (int64_t step = 0; step < STEPS; step++) {
          float a[MOST_ROWS * VOCAB], b[MOST_ROWS * VOCAB];
          for (int64_t i = 0; i < rows; i++) {
            memcpy(a + i * vocab, got + (i * STEPS + step) * vocab, (size_t)vocab * sizeof(float));
            memcpy(b + i * vocab, expected + (i * STEPS + step) * vocab, (size_t)vocab * sizeof(float));
          }
          snprintf(what, sizeof what, "model %d, beam %d%s%s: step %d against luna_seq2seq_forward", v, (int)beam,
                   with_lengths ? ", lengths" : "", part ? ", reordered" : "", (int)step);
          test_close(what, a, b, (size_t)(rows * vocab), 2e-6);
        }
        free(expected);
      }
      if (config.encoder.positions == LUNA_POSITIONS_LEARNED)
        CHECK(!luna_stream_step(s, now) && luna_stream_error_id(s) == LUNA_ERROR_STREAM_POSITIONS,
            "step %d of %d learned positions: \"%s\"", STEPS,
              STEPS, luna_stream_error(s));
      else CHECK(luna_stream_step(s, now) != NULL, "step %d: %s", STEPS, luna_stream_error(s));
      now[0] = (int32_t)vocab;
      CHECK(!luna_stream_step(s, now) && luna_stream_error(s)[0], "a token beyond the target's vocabulary is taken");
      luna_stream_close(s);
    }
    free(source), free(target), free(got);
  }
  luna_close(t.ctx);
}
/* a decoder's state saved, loaded and copied goes on with the same bits, in a stream of the same sources */
static void check_decoder_state(void) {
  enum { TWO = 2, AT = 5 };
  const luna_seq2seq_config config = translator_config(9);
  translator t;
  if (translator_open(&t, &config, 120)) {
    int32_t *source = common_tokens(TWO * SOURCE, 121, VOCAB), *target = common_tokens(TWO * STEPS, 122, VOCAB);
    luna_stream *s[3];
    float kept[TWO * VOCAB];
    for (int i = 0; i < 3; i++)
      s[i] = luna_seq2seq_stream_open(&t.model, &(luna_input){ source, NULL, TWO, SOURCE, NULL }, 1);
    if (CHECK(s[0] && s[1] && s[2], "luna_seq2seq_stream_open: %s", luna_error(t.ctx))) {
      const size_t size = luna_stream_state_size(s[0]);
      void *state = common_alloc(size);
      for (int step = 0; step < AT; step++) luna_stream_step(s[0], target + TWO * step);
      luna_stream_step(s[1], target + 1);
      CHECK(luna_stream_state_save(s[0], state, size) == LUNA_OK &&
            luna_stream_state_load(s[1], state, size) == LUNA_OK &&
                common_stream_copy(s[2], s[0]) == LUNA_OK,
            "%s%s", luna_stream_error(s[1]), luna_stream_error(s[2]));
      for (int step = AT; step < STEPS; step++) {
        memcpy(kept, luna_stream_step(s[0], target + TWO * step), sizeof kept);
        for (int i = 1; i < 3; i++)
          CHECK(same_bits(luna_stream_step(s[i], target + TWO * step), kept, TWO * config.target_vocab),
                "a decoder's state that was %s goes on with other bits", i == 1 ? "saved and loaded" : "copied");
      }
      free(state);
    }
    for (int i = 0; i < 3; i++) luna_stream_close(s[i]);
    free(source), free(target);
  }
  luna_close(t.ctx);
}
/* rows that are padding in a target change nothing before them, and forward's own bounds */
static void check_seq2seq_forward(void) {
  static const int32_t source_lengths[2] = {5, SOURCE}, target_lengths[2] = {3, 6};
  const luna_seq2seq_config config = translator_config(4);
  translator t;
  if (translator_open(&t, &config, 84)) {
    int32_t *source = common_tokens(2 * SOURCE, 85, VOCAB), *target = common_tokens(2 * STEPS, 86, 8);
    luna_begin_inference(t.ctx);
    float *all = values_of(t.ctx, luna_seq2seq_forward(&t.model,
        &(luna_input){ source, source_lengths, 2, SOURCE, NULL }, &(luna_input){ target, NULL, 2, 6, NULL }), "logits"),
          *some = values_of(t.ctx, luna_seq2seq_forward(&t.model,
              &(luna_input){ source, source_lengths, 2, SOURCE, NULL },
                  &(luna_input){ target, target_lengths, 2, 6, NULL }), "logits");
    for (int b = 0; b < 2; b++)
      CHECK(same_bits(all + b * 6 * 8, some + b * 6 * 8, target_lengths[b] * 8),
            "target %d: its length changes what is before its end", b);
    CHECK(!same_bits(all + 3 * 8, some + 3 * 8, 8), "a padded place of a target is read");
    luna_tensor *longest = luna_seq2seq_forward(&t.model, &(luna_input){ source, source_lengths, 2, SOURCE, NULL },
                                                &(luna_input){ target, NULL, 2, STEPS, NULL });
    CHECK(longest != NULL, "%d places: %s", STEPS, luna_error(t.ctx));
    refused(t.ctx, !luna_seq2seq_forward(&t.model, &(luna_input){ source, source_lengths, 1, SOURCE, NULL },
        &(luna_input){ target, NULL, 1, STEPS + 1, NULL }), MAX_LENGTH,
            "a target longer than its learned positions");
    free(source), free(target), free(all), free(some);
  }
  luna_close(t.ctx);
}

/* the loss, whose logits are not stored: that of luna_cross_entropy on luna_seq2seq_forward, with its gradients */
static void check_seq2seq_loss(void) {
  enum { WORDS = 1100, ROWS = 2 * 6, VALUES = 1 + WORDS * 16 };
  static const int32_t source_lengths[2] = {5, SOURCE}, target_lengths[2] = {3, 6};
  const luna_cross_entropy_config smooth = {.smoothing = 0.1f};
  luna_seq2seq_config config = {.vocab = VOCAB, .target_vocab = WORDS};
  config.encoder.layers = 1;
  config.encoder.layer = (luna_layer_config){.dim = 16, .heads = 2, .ffn = 16, .memory = 3};
  int32_t *source = common_tokens(2 * SOURCE, 87, VOCAB), *target = common_tokens(ROWS, 88, WORDS),
      *labels = common_tokens(ROWS, 89, WORDS), *real = common_tokens(ROWS, 89, WORDS);
  const luna_input from = {source, source_lengths, 2, SOURCE, NULL}, to = {target, target_lengths, 2, 6, NULL};
  float *out[2] = {common_floats(VALUES), common_floats(VALUES)};
  size_t peak[2];
  for (int i = 0; i < ROWS; i++) if (i % 6 >= target_lengths[i / 6]) real[i] = -1;
  for (int stored = 0; stored < 2; stored++) {
    translator t;
    if (translator_open(&t, &config, 90)) {
      luna_begin_step(t.ctx);
      luna_tensor *loss = stored ? luna_cross_entropy(luna_seq2seq_forward(&t.model, &from, &to), real, &smooth)
                                 : luna_seq2seq_loss(&t.model, &from, &to, labels, &smooth);
      CHECK(luna_backward(loss) == LUNA_OK, "a loss of many words: %s", luna_error(t.ctx));
      out[stored][0] = luna_item(loss);
      CHECK(luna_read_grad(t.model.embedding, out[stored] + 1) == LUNA_OK, "its gradient: %s", luna_error(t.ctx));
      luna_begin_step(t.ctx);
      refused(t.ctx, !luna_seq2seq_loss(&t.model, &from, &to, NULL, NULL), NULL_ARGUMENT, "no labels");
      luna_begin_step(t.ctx);
      labels[2] = WORDS;
      refused(t.ctx, !luna_seq2seq_loss(&t.model, &from, &to, labels, NULL), LABEL_RANGE, "a label that is no word");
      labels[2] = real[2];
    }
    peak[stored] = luna_memory(t.ctx).peak;
    luna_close(t.ctx);
  }
  test_close("luna_seq2seq_loss", out[0], out[1], VALUES, 2e-6);
  CHECK(peak[0] < peak[1], "logits that are not stored: %zu bytes, stored: %zu", peak[0], peak[1]);
  free(source), free(target), free(labels), free(real), free(out[0]), free(out[1]);
}

/* ---- searches: against the same rules in the plainest form, over luna_seq2seq_forward ---- */
enum { MAX = 9, BEGIN = 1, END = 2 };
typedef struct hypothesis {
  int32_t tokens[MAX + 2]; /* from BEGIN */
  int64_t length;           /* without BEGIN */
  double score;
} hypothesis;
/* log-probabilities of what comes after h */
static void next_of(translator *t, const int32_t *source, int64_t n, const hypothesis *h, double *out) {
  const int64_t vocab = t->model.config.target_vocab;
  float *logits = teacher(t, source, NULL, 1, n, 1, h->tokens, h->length + 1);
  const float *last = logits + h->length * vocab;
  double sum = 0;
  for (int64_t i = 0; i < vocab; i++) sum += exp((double)last[i] - (double)last[0]);
  for (int64_t i = 0; i < vocab; i++) out[i] = (double)last[i] - (double)last[0] - log(sum);
  free(logits);
}
static double final_score(double score, int64_t length, double penalty) {
  return score / pow((double)(length + 1), penalty);
}
static int better(const void *a, const void *b) {
  const double x = ((const hypothesis *)a)->score, y = ((const hypothesis *)b)->score;
  return x > y ? -1 : x < y;
}
/* The best finished hypothesis, its score final. Of all continuations the 2 beam best are looked at; ends among the
   first `beam` are results, the first `beam` others go on. */
static hypothesis naive_search(translator *t, const int32_t *source, int64_t n, int64_t beam, int64_t max,
                               double penalty,
                               bool exhaustive) {
  const int64_t vocab = t->model.config.target_vocab;
  hypothesis *live = (hypothesis *)common_alloc((size_t)beam * sizeof *live),
             *all = (hypothesis *)common_alloc((size_t)(beam * vocab) * sizeof *all), best;
  int64_t count = 1, results = 0;
  double *next = (double *)common_alloc((size_t)vocab * sizeof *next);
  memset(&best, 0, sizeof best);
  best.score = -INFINITY;
  live[0].tokens[0] = BEGIN;
  for (int64_t length = 0; length <= max && count > 0; length++) {
    int64_t candidates = 0;
    for (int64_t i = 0; i < count; i++) {
      next_of(t, source, n, &live[i], next);
      for (int32_t token = 0; token < vocab; token++) {
        if (length == max && token != END) continue;
        all[candidates] = live[i];
        all[candidates].tokens[length + 1] = token;
        all[candidates].score += next[token];
        all[candidates++].length++;
      }
    }
    qsort(all, (size_t)candidates, sizeof *all, better);
    count = 0;
    for (int64_t i = 0; i < candidates && i < 2 * beam && count < beam; i++) {
      if (all[i].tokens[length + 1] != END) live[count++] = all[i];
      else if (i < beam) {
        results++;
        all[i].score = final_score(all[i].score, length, penalty);
        if (all[i].score > best.score) best = all[i];
      }
    }
    if (!exhaustive && results >= beam) break;
    if (exhaustive && results && count && final_score(live[0].score, max, penalty) <= best.score) break;
  }
  best.length--; /* without END */
  free(live), free(all), free(next);
  return best;
}
static void check_result(const char *what, const int32_t *out, int32_t length, float score,
                         const hypothesis *expected) {
  bool same = length == expected->length;
  for (int64_t i = 0; same && i < expected->length; i++) same = out[i] == expected->tokens[i + 1];
  CHECK(same, "%s: %d tokens, %d %d %d ..., and not %d, %d %d %d ...", what, (int)length, (int)out[0], (int)out[1],
        (int)out[2],
        (int)expected->length, (int)expected->tokens[1], (int)expected->tokens[2], (int)expected->tokens[3]);
  CHECK(fabs((double)score - expected->score) <= 1e-5 * (1 + fabs(expected->score)),
        "%s: the score is %.7g, and not %.7g", what,
        (double)score, expected->score);
}
static double penalty_of(float length_penalty) {
  return length_penalty == 0 ? 1 : length_penalty < 0 ? 0 : (double)length_penalty;
}

static void check_searches(int v, uint64_t seed) {
  static const float penalties[] = {0, -1, 0.6f, 2};
  static const int64_t beams[] = {1, 2, 4, 8};
  const luna_seq2seq_config config = translator_config(v);
  translator t;
  char what[120];
  if (translator_open(&t, &config, seed)) {
    int32_t *source = common_tokens(SOURCE, seed, VOCAB), out[MAX], length = -1;
    float score = NAN;
    for (int i = 0; i < 4; i++)
      for (int j = 0; j < 4; j++)
        for (int exhaustive = 0; exhaustive < 2; exhaustive++) {
          luna_beam_config search = {0};
          if (exhaustive && i == 0 && j > 0) continue; /* greedy with an exhaustive search: once */
          search.begin = BEGIN, search.end = END, search.beam = beams[i], search.max_length = MAX,
              search.length_penalty = penalties[j],
          search.exhaustive = exhaustive;
          if (i == 0 && j == 1) search.beam = 0; /* the default */
          memset(out, 0, sizeof out);
          snprintf(what, sizeof what, "model %d, beam %d, penalty %g%s", v, (int)beams[i], (double)penalties[j],
                   exhaustive ? ", exhaustive" : "");
          CHECK(luna_beam_search(&t.model, &(luna_input){ source, NULL, 1, SOURCE, NULL }, &search, out, &length,
                                 &score) == LUNA_OK, "%s: %s", what,
                luna_error(t.ctx));
          hypothesis expected = naive_search(&t, source, SOURCE, beams[i], MAX, penalty_of(penalties[j]), exhaustive);
          check_result(what, out, length, score, &expected);
        }
    free(source);
  }
  luna_close(t.ctx);
}
/* greedy: the likeliest token, step by step, until END or `most` tokens */
static void check_greedy(int v) {
  const luna_seq2seq_config config = translator_config(v);
  translator t;
  if (translator_open(&t, &config, 87)) {
    for (uint64_t seed = 0; seed < 6; seed++) {
      int32_t *source = common_tokens(SOURCE, 88 + seed, VOCAB), out[MAX], length = -1;
      luna_generate_config search = {0};
      luna_beam_config beam = {0};
      int32_t beam_out[MAX], beam_length = -1;
      hypothesis h;
      double next[VOCAB], ended = -1;
      memset(&h, 0, sizeof h);
      h.tokens[0] = BEGIN;
      for (; h.length < MAX && ended < 0; h.length++) {
        int32_t likeliest = 0;
        next_of(&t, source, SOURCE, &h, next);
        for (int32_t i = 1; i < config.target_vocab; i++) likeliest = next[i] > next[likeliest] ? i : likeliest;
        h.tokens[h.length + 1] = likeliest;
        if (likeliest == END) ended = (double)h.length;
      }
      if (ended >= 0) h.length--;
      search.begin = BEGIN, search.end = END, search.max_length = MAX;
      beam.begin = BEGIN, beam.end = END, beam.max_length = MAX;
      CHECK(luna_seq2seq_generate(&t.model, &(luna_input){ source, NULL, 1, SOURCE, NULL }, &search, out, &length) ==
            LUNA_OK, "%s", luna_error(t.ctx));
      CHECK(length == h.length && memcmp(out, h.tokens + 1, (size_t)length * sizeof(int32_t)) == 0,
            "model %d, source %d: greedy gives %d tokens, %d %d ..., and not %d, %d %d ...", v, (int)seed, (int)length,
                (int)out[0],
            (int)out[1], (int)h.length, (int)h.tokens[1], (int)h.tokens[2]);
      CHECK(luna_beam_search(&t.model, &(luna_input){ source, NULL, 1, SOURCE, NULL }, &beam, beam_out, &beam_length,
                             NULL) == LUNA_OK && beam_length == length &&
            memcmp(beam_out, out, (size_t)length * sizeof(int32_t)) == 0,
            "model %d, source %d: a search with beam 1 gives %d tokens, luna_seq2seq_generate %d: %s", v, (int)seed,
            (int)beam_length, (int)length, luna_error(t.ctx));
      free(source);
    }
  }
  luna_close(t.ctx);
}

/* Four tokens that can be (one of them the end) and up to three of them: with a beam wide enough every sequence is
   looked at, and the best of all 40 is found. A beam is at most as wide as the vocabulary, so that this one has 32 more
   tokens, all but impossible. */
enum { LIVE = 4, WIDE = 36, SHORT = 3 };
static double enumerate(translator *t, const int32_t *source, const hypothesis *h, double penalty, hypothesis *best) {
  double next[WIDE], mass = 0;
  next_of(t, source, SOURCE, h, next);
  for (int32_t token = 0; token < LIVE; token++) {
    hypothesis more = *h;
    mass += exp(next[token]);
    more.score += next[token];
    more.tokens[++more.length] = token;
    if (token != END && h->length < SHORT) enumerate(t, source, &more, penalty, best);
    if (token != END) continue;
    more.length--;
    more.score = final_score(more.score, more.length, penalty);
    if (more.score > best->score) *best = more;
  }
  return mass;
}
static void check_exhaustive(uint64_t seed) {
  static const float penalties[] = {-1, 0.3f, 0, 1.5f, 4};
  luna_seq2seq_config config = translator_config(0);
  translator t;
  char what[100];
  config.target_vocab = WIDE, config.share_embeddings = false, config.separate_output = true;
  if (translator_open(&t, &config, seed)) {
    int32_t *source = common_tokens(SOURCE, seed, VOCAB), out[SHORT], length = -1;
    float score = NAN;
    const luna_norm_layer *last = &t.model.layers[t.model.config.decoder_layers - 1].feed_forward.norm;
    /* what the output sees has a 1 in front: a bias, -30 for the impossible */
    last->weight->data[0] = 0, last->bias->data[0] = 1;
    for (int token = 0; token < WIDE; token++) t.model.output->data[token * DIM] = token < LIVE ? 0 : -30;
    for (int j = 0; j < 5; j++)
      for (int exhaustive = 0; exhaustive < 2; exhaustive++) {
        luna_beam_config search = {0};
        hypothesis begin, best;
        memset(&begin, 0, sizeof begin);
        begin.tokens[0] = BEGIN, best = begin, best.score = -INFINITY;
        const double mass = enumerate(&t, source, &begin, penalty_of(penalties[j]), &best);
        CHECK(mass > 0.9999, "the four tokens have %.6f of the probability", mass);
        search.begin = BEGIN, search.end = END, search.beam = WIDE, search.max_length = SHORT,
            search.length_penalty = penalties[j],
        search.exhaustive = exhaustive;
        CHECK(luna_beam_search(&t.model, &(luna_input){ source, NULL, 1, SOURCE, NULL }, &search, out, &length,
                               &score) == LUNA_OK, "%s", luna_error(t.ctx));
        snprintf(what, sizeof what, "of all sequences, seed %d, penalty %g%s", (int)seed, (double)penalties[j],
                 exhaustive ? ", exhaustive" : "");
        check_result(what, out, length, score, &best);
      }
    free(source);
  }
  luna_close(t.ctx);
}
/* several sources in a batch, padded, equal each alone; `most` may be more than the learned positions leave room for */
static void check_batch_of_sources(int v, int64_t max) {
  enum { COUNT = 4, ROOM = 40 };
  static const int32_t lengths[COUNT] = {4, SOURCE, 1, 6};
  const luna_seq2seq_config config = translator_config(v);
  translator t;
  if (translator_open(&t, &config, 89)) {
    int32_t *source = common_tokens(COUNT * SOURCE, 90, VOCAB), out[COUNT * ROOM], one[ROOM], length[COUNT], one_length;
    float score[COUNT], one_score;
    for (int64_t beam = 1; beam <= 3; beam += 2) {
      luna_beam_config search = {0};
      search.begin = BEGIN, search.end = END, search.beam = beam, search.max_length = max;
      const int64_t room = max ? max : 2 * SOURCE + 10;
      for (int i = 0; i < COUNT * ROOM; i++) out[i] = -7;
      CHECK(luna_beam_search(&t.model, &(luna_input){ source, lengths, COUNT, SOURCE, NULL }, &search, out, length,
                                  score) == LUNA_OK, "%s", luna_error(t.ctx));
      if (beam == 1) {
        luna_generate_config greedy = { BEGIN, END, max };
        int32_t same[COUNT * ROOM], same_length[COUNT];
        for (int i = 0; i < COUNT * ROOM; i++) same[i] = -7;
        CHECK(luna_seq2seq_generate(&t.model, &(luna_input){ source, lengths, COUNT, SOURCE, NULL }, &greedy, same,
                                    same_length) == LUNA_OK, "%s", luna_error(t.ctx));
        CHECK(memcmp(same_length, length, sizeof length) == 0, "model %d: greedy lengths differ", v);
        for (int i = 0; i < COUNT; i++)
          CHECK(memcmp(same + i * room, out + i * room, (size_t)length[i] * sizeof(int32_t)) == 0,
                "model %d: greedy tokens of source %d differ", v, i);
      }
      for (int i = 0; i < COUNT; i++) {
        search.max_length = room;
        CHECK(luna_beam_search(&t.model, &(luna_input){ source + i * SOURCE, NULL, 1, lengths[i], NULL }, &search,
                                    one, &one_length, &one_score) == LUNA_OK, "%s",
              luna_error(t.ctx));
        search.max_length = max;
        CHECK(one_length <= room && length[i] == one_length &&
              memcmp(out + i * room, one, (size_t)one_length * sizeof(int32_t)) == 0 &&
              fabs((double)(score[i] - one_score)) <= 1e-5,
              "model %d, beam %d, most %d: source %d of a batch gives %d tokens, %d %d ..., score %.5f; alone %d, "
              "%d %d ..., %.5f", v,
              (int)beam, (int)max, i, (int)length[i], (int)out[i * room], (int)out[i * room + 1], (double)score[i],
              (int)one_length, (int)one[0], (int)one[1], (double)one_score);
        if (config.encoder.positions == LUNA_POSITIONS_LEARNED)
          CHECK(one_length < STEPS, "%d tokens with %d positions", (int)one_length, STEPS);
      }
    }
    free(source);
  }
  luna_close(t.ctx);
}
/* A search fails with this sentence. */
static void search_refused(luna_ctx *ctx, luna_status status, const char *sentence, const char *what) {
  CHECK(status != LUNA_OK && strcmp(luna_error(ctx), sentence) == 0, "%s: \"%s\" and not \"%s\"", what,
        luna_error(ctx), sentence);
}
static void check_beam_refusals(void) {
  const luna_seq2seq_config config = translator_config(2);
  translator t;
  if (translator_open(&t, &config, 91)) {
    int32_t *source = common_tokens(SOURCE, 92, VOCAB), out[64], length = 0, bad[SOURCE] = {0},
        lengths[1] = {SOURCE + 1};
    const luna_beam_config good = { BEGIN, END, 2, MAX, 0, false };
    const luna_input words = { source, NULL, 1, SOURCE, NULL };
    luna_beam_config s[12];
    float score;
    static const char *const range[12] = {
      "begin is -1, outside 0..7", "begin is 8, outside 0..7", "end is -1, outside 0..7", "end is 8, outside 0..7",
      "beam is -1, outside 1..8", "beam is 9, outside 1..8", "beam is 9223372036854775807, outside 1..8",
      "max_length is -1, outside 1..549755813888", "max_length is 9223372036854775807, outside 1..549755813888",
      "max_length is -9223372036854775808, outside 1..549755813888", "length_penalty is not finite",
      "length_penalty is not finite"
    };
    for (int i = 0; i < 12; i++) s[i] = good;
    s[0].begin = -1, s[1].begin = 8, s[2].end = -1, s[3].end = 8, s[4].beam = -1, s[5].beam = 9,
        s[6].beam = INT64_MAX, s[7].max_length = -1, s[8].max_length = INT64_MAX, s[9].max_length = INT64_MIN,
        s[10].length_penalty = NAN, s[11].length_penalty = INFINITY;
    for (int i = 0; i < 12; i++) {
      char sentence[120];
      if (sizeof(size_t) < 8 && i >= 7 && i < 10) continue; /* another limit */
      snprintf(sentence, sizeof sentence, "luna_beam_search: %s", range[i]);
      search_refused(t.ctx, luna_beam_search(&t.model, &words, &s[i], out, &length, &score), sentence, range[i]);
    }

    const char *no_config = "luna_beam_search: config, out or out_lengths is null";
    search_refused(t.ctx, luna_beam_search(&t.model, NULL, &good, out, &length, &score),
                   "luna_beam_search: source is null", "no input");
    search_refused(t.ctx, luna_beam_search(&t.model, &words, NULL, out, &length, &score), no_config, "no config");
    search_refused(t.ctx, luna_beam_search(&t.model, &words, &good, NULL, &length, &score), no_config, "no result");
    search_refused(t.ctx, luna_beam_search(&t.model, &words, &good, out, NULL, &score), no_config, "no length");
    CHECK(luna_beam_search(NULL, &words, &good, out, &length, &score) == LUNA_BAD_ARGUMENT, "no model");

    /* the stream's own checks */
    bad[4] = VOCAB;
    const luna_input wrong[3] = { { NULL, NULL, 1, SOURCE, NULL }, { source, lengths, 1, SOURCE, NULL },
                                  { bad, NULL, 1, SOURCE, NULL } };
    for (int i = 0; i < 3; i++)
      CHECK(luna_beam_search(&t.model, &wrong[i], &good, out, &length, &score) == LUNA_BAD_ARGUMENT &&
            luna_error_id_of(t.ctx) == (i ? LUNA_ERROR_ELEMENT_RANGE : LUNA_ERROR_NULL_ARGUMENT), "source %d: %s", i,
            luna_error(t.ctx));
    for (int64_t batch = -1; batch <= 0; batch++)
      CHECK(luna_beam_search(&t.model, &(luna_input){ source, NULL, batch, SOURCE, NULL }, &good, out, &length,
                             &score) == LUNA_BAD_ARGUMENT &&
            strstr(luna_error(t.ctx), "luna_beam_search: source->batch is "), "batch: %s", luna_error(t.ctx));
    for (int i = 0; i < 2; i++)
      CHECK(luna_beam_search(&t.model, &(luna_input){ source, NULL, 1, i ? INT64_MIN + 5 : -1, NULL }, &good, out,
                             &length, &score) == LUNA_BAD_ARGUMENT &&
            strstr(luna_error(t.ctx), "luna_beam_search: source->n is -"), "n: %s", luna_error(t.ctx));
    CHECK(luna_beam_search(&t.model, &words, &good, out, &length, &score) == LUNA_OK && isfinite(score),
          "after what was refused: %s", luna_error(t.ctx));
    free(source);
  }
  luna_close(t.ctx);
}
static void check_search_refusals(void) {
  const luna_seq2seq_config config = translator_config(2);
  translator t;
  if (translator_open(&t, &config, 91)) {
    int32_t *source = common_tokens(SOURCE, 92, VOCAB), out[64], length = 0, bad[SOURCE] = {0},
        lengths[1] = {SOURCE + 1};
    const luna_generate_config good = { BEGIN, END, MAX };
    const luna_input words = { source, NULL, 1, SOURCE, NULL }, no_source = { source, NULL, 0, SOURCE, NULL },
        negative = { source, NULL, 1, -1, NULL }, missing = { NULL, NULL, 1, SOURCE, NULL },
        too_long = { source, lengths, 1, SOURCE, NULL }, unknown = { bad, NULL, 1, SOURCE, NULL };
    luna_generate_config s[7];
    float score;
    bad[4] = VOCAB;
    for (int i = 0; i < 7; i++) s[i] = good;
    s[0].begin = -1, s[1].begin = 8, s[2].end = -1, s[3].end = 8, s[4].max_length = -1, s[5].max_length = INT64_MAX,
        s[6].max_length = INT64_MIN;
    for (int i = 0; i < 7; i++)
      refused(t.ctx, luna_seq2seq_generate(&t.model, &words, &s[i], out, &length) != LUNA_OK, VALUE_RANGE,
              "bad config %d", i);
    refused(t.ctx, luna_seq2seq_generate(&t.model, &words, NULL, out, &length) == LUNA_BAD_ARGUMENT, NULL_ARGUMENT,
            "no config");
    refused(t.ctx, luna_seq2seq_generate(&t.model, &words, &good, NULL, &length) == LUNA_BAD_ARGUMENT, NULL_ARGUMENT,
            "no place for the result");
    refused(t.ctx, luna_seq2seq_generate(&t.model, &words, &good, out, NULL) == LUNA_BAD_ARGUMENT, NULL_ARGUMENT,
            "no place for the length");
    refused(t.ctx, luna_seq2seq_generate(&t.model, NULL, &good, out, &length) == LUNA_BAD_ARGUMENT, NULL_ARGUMENT,
            "no input");
    refused(t.ctx, luna_seq2seq_generate(&t.model, &no_source, &good, out, &length) == LUNA_BAD_ARGUMENT, VALUE_RANGE,
            "no source");
    refused(t.ctx, luna_seq2seq_generate(&t.model, &negative, &good, out, &length) == LUNA_BAD_ARGUMENT, VALUE_RANGE,
            "a source of -1 tokens");
    refused(t.ctx, luna_seq2seq_generate(&t.model, &missing, &good, out, &length) != LUNA_OK, NULL_ARGUMENT,
            "null for a source");
    refused(t.ctx, luna_seq2seq_generate(&t.model, &too_long, &good, out, &length) != LUNA_OK, ELEMENT_RANGE,
            "a length beyond the source");
    refused(t.ctx, luna_seq2seq_generate(&t.model, &unknown, &good, out, &length) != LUNA_OK, ELEMENT_RANGE,
            "a source token beyond the vocabulary");
    CHECK(luna_seq2seq_generate(NULL, &words, &good, out, &length) == LUNA_BAD_ARGUMENT, "no model");
    const luna_input wrong[4] = {{NULL, NULL, 1, SOURCE, NULL}, {source, lengths, 1, SOURCE, NULL},
                                 {bad, NULL, 1, SOURCE, NULL}, {source, NULL, 0, SOURCE, NULL}};
    for (int i = 0; i < 8; i++) { /* the call that was made is named */
      const char *name = i < 4 ? "luna_seq2seq_generate: " : "luna_seq2seq_stream_open: ";
      if (i < 4) (void)luna_seq2seq_generate(&t.model, &wrong[i], &good, out, &length);
      else (void)luna_seq2seq_stream_open(&t.model, &wrong[i - 4], 1);
      CHECK(strncmp(luna_error(t.ctx), name, strlen(name)) == 0, "source %d: \"%s\"", i, luna_error(t.ctx));
    }
    refused(t.ctx, !luna_seq2seq_stream_open(&t.model, &(luna_input){ source, NULL, 0, SOURCE, NULL }, 1), VALUE_RANGE,
        "a stream of no source");
    refused(t.ctx, !luna_seq2seq_stream_open(&t.model, &(luna_input){ source, NULL, 1, SOURCE, NULL }, -1), VALUE_RANGE,
        "a stream of -1 sequences");
    luna_stream *one = luna_seq2seq_stream_open(&t.model, &(luna_input){ source, NULL, 1, SOURCE, NULL }, 0);
    CHECK(one && luna_stream_step(one, &good.begin), "beam 0 is not one sequence: \"%s\"", luna_error(t.ctx));
    luna_stream_close(one);
    refused(t.ctx, !luna_seq2seq_stream_open(&t.model, &(luna_input){ source, NULL, 1, SOURCE, NULL }, INT64_MAX),
        VALUE_RANGE, "a stream of 2^63 sequences");
    CHECK(!luna_seq2seq_stream_open(NULL, &(luna_input){ source, NULL, 1, SOURCE, NULL }, 1), "a stream of no model");
    CHECK(luna_seq2seq_generate(&t.model, &words, &good, out, &length) == LUNA_OK, "after what was refused: %s",
          luna_error(t.ctx));
    const luna_beam_config search = { BEGIN, END, 2, MAX, 0, false };
    const int32_t nothing[1] = {0}; /* an empty source is one: nothing to attend to */
    float empty = NAN;
    CHECK(luna_beam_search(&t.model, &(luna_input){ source, nothing, 1, SOURCE, NULL }, &search, out, &length,
                           &score) == LUNA_OK && isfinite(score),
          "a length of 0: %s", luna_error(t.ctx));
    CHECK(luna_beam_search(&t.model, &(luna_input){ source, NULL, 1, 0, NULL }, &search, out, &length, &empty) ==
          LUNA_OK && fabs((double)(empty - score)) <= 1e-6,
          "a source of no tokens: score %g, %g when all of it is padding: %s", (double)empty, (double)score,
              luna_error(t.ctx));
    for (int form = 0; form < 3; form++) { /* and in forward passes, for any form of the unpack */
      static const int32_t zeros[SOURCE];
      float *got[2];
      luna_options options = {.form = (luna_form)form};
      luna_ctx *ctx = luna_open(&options);
      luna_params *params = luna_params_share(ctx, t.params);
      luna_seq2seq shared;
      CHECK(luna_seq2seq_init(&shared, params, &t.model.config) == LUNA_OK, "%s", luna_error(ctx));
      for (int with = 0; with < 2; with++) {
        const luna_input none = {source, with ? nothing : NULL, 1, 0, NULL}, words = {zeros, NULL, 1, SOURCE, NULL};
        luna_begin_inference(ctx);
        got[with] = values_of(ctx, luna_seq2seq_forward(&shared, &none, &words), "no tokens");
        CHECK(luna_error_status(ctx) == LUNA_OK, "form %d: %s", form, luna_error(ctx));
      }
      CHECK(memcmp(got[0], got[1], SOURCE * sizeof(float)) == 0, "form %d: no tokens are not a length of 0", form);
      free(got[0]), free(got[1]);
      luna_close(ctx);
    }
    static const float odd[] = {NAN, INFINITY, -INFINITY};
    /* in the output, which only the logits see; in the first layer, whence it goes everywhere */
    for (int i = 0; i < 6; i++) {
      float *at = i < 3 ? &t.model.output->data[3 * DIM + 1] : &t.model.layers[0].feed_forward.fc1.weight->data[5];
      const float kept = *at;
      *at = odd[i % 3];
      for (int64_t beam = 0; beam <= 2; beam++) { /* 0: luna_seq2seq_generate */
        luna_beam_config wide = search;
        wide.beam = beam, score = 0;
        const luna_status status = beam ? luna_beam_search(&t.model, &words, &wide, out, &length, &score) :
            luna_seq2seq_generate(&t.model, &words, &good, out, &length);
        if (status == LUNA_OK)
          CHECK(!isnan(odd[i % 3]) && isfinite(score), "weights that are not finite give a result of score %g",
                (double)score);
        else if (beam)
          search_refused(t.ctx, status, "luna_beam_search: the model's logits for source 0 are not finite", "a weight");
        else refused(t.ctx, true, LOGITS_NOT_FINITE, "a weight of %g", (double)odd[i % 3]);
      }
      *at = kept;
    }
    free(source);
  }
  luna_close(t.ctx);
}
static void check_translation(void) {
  for (int v = 0; v < 16; v++)
    for (int64_t beam = 1; beam <= 3; beam += 2) check_decoder_stream(v, beam, (v + beam / 2) % 2);
  check_decoder_state();
  check_seq2seq_forward();
  check_seq2seq_loss();
  for (int v = 0; v < 16; v += 3) check_greedy(v);
  check_searches(5, 93), check_searches(2, 94), check_searches(8, 95);
  for (uint64_t seed = 96; seed < 100; seed++) check_exhaustive(seed);
  check_batch_of_sources(1, MAX), check_batch_of_sources(10, 0), check_batch_of_sources(4, MAX),
      check_batch_of_sources(7, 30),
      check_batch_of_sources(12, 0);
  check_search_refusals();
  check_beam_refusals();
  heap_check("translation");
}

int main(void) {
  check_translation();
  return test_report("translation");
}
