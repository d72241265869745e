/* lm: a byte-level causal Luna language model. It trains on a text and writes in its manner.

     cc -O2 -I. examples/lm.c -o lm -lm -lpthread

     lm train FILE [--out M] [--steps N] [--plot loss.svg] ...
       trains on FILE, except for its last tenth, and writes M; this takes a minute
     lm train FILE --save-every N ...                           saves checkpoints of the training in M
     lm train FILE --resume M                                   resumes one, to the same bits as if it had never stopped
     mpirun -n 4 build/mpi/lm train FILE --parallel data        4 processes, on several machines if need be: make mpi
     lm generate M [--prompt "..."] [--count N] [--temperature T] ...
       continues the prompt, in constant memory
     lm eval M FILE                                             measures how well M predicts FILE, in bits per byte

   Ctrl-C ends the training early and keeps the model. */
#define LUNA_IMPLEMENTATION
#include "luna.h"

#include "common/example.h"

#define LN2 0.69314718055994530942
#define SAMPLE 400                   /* bytes of the samples that training shows */
#define PROMPT 60                    /* bytes of the text, at most, that they go on from */
/* of a long text's last tenth, training measures about this many windows, evenly spread, and so many at its end */
#define VALIDATION 128
#define LAST_VALIDATION 1024

static struct settings set = {
  .out = "lm.safetensors",
  .steps = 3000, .batch = 4, .lr = 5e-3,
  .layers = 2, .dim = 128, .heads = 4, .memory = 16, .ffn = 512,
  .seed = 1, .forget = LUNA_FORGET_GATED
};
static struct {
  const char *prompt;
  int64_t window, convolution, bytes, top_k, graph, carry;
  int64_t cut;                       /* window, or less where a text to learn is short */
  double temperature;
} own = { .prompt = "\n", .window = 256, .convolution = 4, .bytes = 1000, .temperature = 0.8 };

static const flag flags[] = {
  FLAGS_TRAIN,
  FLAGS_RESUME,
  { "--window", "te", WHOLE(own.window, 1, 1e6), "Reads N tokens or steps at once. A token is a byte." },
  { "--carry", "te", SWITCH(own.carry), "Lets windows continue one another, with the memory carried over." },
  FLAGS_MODEL,
  FLAGS_FORGET,
  { "--attention", "t", CHOICE(set.attention, "luna softmax linear"),
    "Chooses the kind of attention. softmax has rotary positions. Only luna generates." },
  { "--convolution", "t", WHOLE(own.convolution, 0, 64),
    "Lets the short convolution see N bytes. 0 leaves it out." },
  { "--prompt", "g", STRING(own.prompt), "Continues TEXT." },
  { "--count", "g", WHOLE(own.bytes, 0, 1e18), "Sets the count to N. It counts the bytes to write; 0 has no end." },
  { "--temperature", "g", REAL(own.temperature, 0, 100),
    "Samples at temperature X. Lower is safer, higher is wilder. 0 takes the likeliest byte." },
  { "--top-k", "g", WHOLE(own.top_k, 0, 256), "Samples among the N likeliest bytes. 0 samples among all." },
  FLAG_SEED("tg"),
  FLAG_THREADS("tge"),
  FLAG_WEIGHTS("ge"),
  FLAG_PRODUCTS("t"),
  FLAG_DEVICE("te"),
  FLAG_RECOMPUTE,
  FLAG_PARALLEL,
  { "--graph", "t", SWITCH(own.graph), "Makes each step one launch on a GPU. The result is the same." },
  { 0 }
};

typedef struct text { int32_t *bytes; int64_t size; } text; /* one number a byte, as models take them */

static int read_text(const char *path, text *t) {
  contents file;
  if (read_file(path, &file)) return 2;
  *t = (text){ (int32_t *)malloc((size_t)file.size * sizeof(int32_t)), file.size };
  for (int64_t i = 0; t->bytes && i < t->size; i++) t->bytes[i] = file.data[i];
  free(file.data);
  return t->bytes ? 0 : fail("%s does not fit in memory", path);
}

/* ---- the model --------------------------------------------------------------------------------------------------- */

/* What this rank has of `rows` windows, without their bytes. */
static luna_input part_of(int64_t rows, int64_t n) {
  return (luna_input){ NULL, NULL, rank_part(rows).count, n, NULL };
}
/* What the model makes of `rows` windows of n bytes, each byte to be foretold from those before it in its window. With
   other ranks a rank has windows of its own. */
static luna_tensor *loss_of(const luna_lm *model, const int32_t *bytes, const int32_t *next, int64_t rows, int64_t n) {
  const portion mine = rank_part(rows);
  const int64_t at = mine.first * n;
  return luna_lm_loss(model, &(luna_input){ bytes + at, NULL, mine.count, n, NULL }, next + at);
}

/* Mean loss, nats a byte, of the text's first `max` windows as one sequence, which every rank reads whole; NaN on
   failure. */
static double mean_carried_loss(luna_ctx *ctx, const luna_lm *model, text t, int64_t window, int64_t max) {
  static luna_lm_state *state;         /* a program measures one model */
  const int64_t all = (t.size - 1) / window < max ? t.size - 1 : max * window;
  double sum = 0;
  if (!state && !(state = luna_lm_state_open(model, 1))) return (double)NAN;
  for (int64_t at = 0, n; at < all; at += n) {
    n = window < all - at ? window : all - at;
    luna_begin_inference(ctx);
    if (at == 0) luna_lm_state_restart(state, NULL, 0);
    luna_lm_state_continue(state);
    const luna_input input = { t.bytes + at, NULL, 1, n, NULL };
    const double loss = (double)luna_item(luna_lm_loss(model, &input, t.bytes + at + 1));
    if (!(loss >= 0)) return (double)NAN;                  /* the next begin would clear the context's sentence */
    sum += loss * (double)n;
  }
  return sum / (double)all;
}
/* The same over a text cut into windows, of which only every so many are taken when `max` are enough; with --carry as
   above. */
static double mean_loss(luna_ctx *ctx, const luna_lm *model, text t, int64_t window, int64_t max) {
  if (own.carry) return mean_carried_loss(ctx, model, t, window, max);
  int64_t skip = t.size / window / max * 16 * window;
  double sum = 0, count = 0;
  for (int64_t at = 0; at < t.size - 1; at += skip) {
    int64_t rows = (t.size - 1 - at) / window, n = window;
    if (rows > 16) rows = 16;
    if (rows == 0) rows = 1, n = t.size - 1 - at;          /* the rest at the end */
    begin_look(ctx, part_of(rows, n));
    const double loss = loss_over_ranks(loss_of(model, t.bytes + at, t.bytes + at + 1, rows, n));
    if (!(loss >= 0)) return (double)NAN;                  /* likewise */
    sum += loss * (double)(rows * n), count += (double)(rows * n);
    at += rows * n;
  }
  return sum / count;
}

/* Reads the prompt and writes `count` bytes (0: no end), into `out` or, as they are made, to stdout. Returns 0, or 2
   after a sentence. */
static int write_on(luna_ctx *ctx, const luna_lm *model, const text *prompt, luna_sampling sampling, int64_t count,
                    unsigned char *out) {
  luna_stream *stream = luna_stream_open(model, NULL);
  if (!stream) return failed(ctx);
  byte_text made = { { 0 }, 0 };
  int32_t token = luna_sample(luna_stream_prefill(stream, &(luna_input){ prompt->bytes, NULL, 0, prompt->size, NULL }),
                              256, &sampling);
  for (int64_t i = 0; token >= 0 && (count == 0 || i < count); i++) {
    if (out) out[i] = (unsigned char)token;
    else if (put_byte_of(&made, token), fflush(stdout) != 0 || ferror(stdout)) break;
    token = luna_sample(luna_stream_step(stream, &token), 256, &sampling);
  }
  if (!out) put_byte_of(&made, -1), putchar('\n');
  const char *why = luna_stream_error(stream);
  const int status = token >= 0 ? 0 : *why ? fail("%s", why) : failed(ctx);
  luna_stream_close(stream);
  return status;
}

static int show_sample(luna_ctx *ctx, const char *when, const luna_lm *model, const text *prompt) {
  unsigned char shown[PROMPT + SAMPLE];
  if (ranks.rank > 0 || set.attention != LUNA_ATTENTION_LUNA) return 0; /* a stream needs a memory */
  int64_t size = prompt->size + SAMPLE;
  for (int64_t i = 0; i < prompt->size; i++) shown[i] = (unsigned char)prompt->bytes[i];
  luna_sampling sampling = { .temperature = 0.8f, .seed = (uint64_t)set.seed };
  if (write_on(ctx, model, prompt, sampling, SAMPLE, shown + prompt->size)) return 2;
  printf("\n---- A sample %s. Its first %d bytes are from the text, the others from the model.\n", when,
         (int)prompt->size);
  put_text_of(stdout, shown, size, true);
  printf("\n----\n\n");
  fflush(stdout);
  return 0;
}

/* ---- train ------------------------------------------------------------------------------------------------------- */

static progress bar = { .bits = true };
static luna_lm_state *carried;       /* with --carry, else null */

/* Fills the step's batch with windows that begin anywhere in the text or, with a state to carry, go on where those of
   the step before end: each row reads the text from a place of its own, and starts anew where the text ends. */
static void pick_windows(text t, int64_t step, int32_t *bytes, int32_t *next) {
  const int64_t windows = (t.size - 1) / own.cut;
  const portion mine = rank_part(set.batch);
  for (int64_t row = 0; row < set.batch; row++) {
    const int64_t window = (row * windows / set.batch + step) % windows;
    const int32_t *from = t.bytes + (carried ? (uint64_t)(window * own.cut) :
                                               draw(0, step, row) % (uint64_t)(t.size - own.cut));
    const int32_t which = (int32_t)(row - mine.first);
    if (window == 0 && which >= 0 && which < mine.count) luna_lm_state_restart(carried, &which, 1);
    memcpy(bytes + row * own.cut, from, (size_t)own.cut * sizeof(int32_t));
    memcpy(next + row * own.cut, from + 1, (size_t)own.cut * sizeof(int32_t));
  }
}

/* Size and FNV-1a of a text: a training goes on with the one that it began with. */
static phrase text_mark(text t) {
  uint64_t hash = 14695981039346656037u;
  phrase out;
  for (int64_t i = 0; i < t.size; i++) hash = (hash ^ (uint64_t)t.bytes[i]) * 1099511628211u;
  snprintf(out.text, sizeof out.text, "%lld bytes, %016llx", (long long)t.size, (unsigned long long)hash);
  return out;
}

/* The model, or with --save-every or --resume all of the training, which is a model as well. */
static bool save(const luna_optimizer *adam, luna_params *params) {
  if (ranks.rank > 0) return true;
  if (!set.save_every && !set.resume) return luna_save(params, luna_path(set.out)) == LUNA_OK;
  return keep_settings(params, flags, bar.step) == LUNA_OK && luna_save_training(adam, luna_path(set.out)) == LUNA_OK;
}

/* The loss of the text kept back, in the progress line and the plot; NaN on failure. */
static double validate(luna_ctx *ctx, const luna_lm *model, text held, int64_t max) {
  double since = progress_validates(), loss = mean_loss(ctx, model, held, own.cut, max);
  progress_validated(&bar, since, loss, "validation %.3f", loss);
  return loss;
}

#ifndef EXAMPLE_CUDA                 /* the CPU has no graphs */
typedef struct luna_graph luna_graph;
static luna_graph *luna_graph_open(luna_ctx *ctx) { return (void)ctx, (luna_graph *)NULL; }
static luna_status luna_graph_begin(luna_graph *graph) { return (void)graph, LUNA_OK; }
static luna_status luna_graph_end(luna_graph *graph) { return (void)graph, LUNA_OK; }
#endif
/* False on failure. After Ctrl-C fewer steps than asked have been made. */
static bool learn(luna_ctx *ctx, const luna_lm *model, luna_optimizer *adam, text t, text held, int32_t *bytes,
                  int32_t *next) {
  luna_graph *graph = own.graph ? luna_graph_open(ctx) : NULL;
  while (bar.step < set.steps && !interrupted) {
    if (progress_due(&bar) && !(validate(ctx, model, held, VALIDATION) >= 0)) return false;
    luna_graph_begin(graph);
    begin_training(ctx, part_of(set.batch, own.cut));
    pick_windows(t, bar.step, bytes, next);
    luna_lm_state_continue(carried);
    luna_tensor *loss = loss_of(model, bytes, next, set.batch, own.cut);
    differentiate(loss, luna_counted(loss));
    if (learn_from(adam) != LUNA_OK || luna_graph_end(graph) != LUNA_OK) return false;
    progress_step(&bar, learnt_loss(loss), (double)(set.batch * own.cut));
    if (set.save_every && bar.step % set.save_every == 0 && !save(adam, model->params)) return false;
  }
  progress_end(&bar);
  return true;
}

/* Logits are products of features and embeddings. A last norm of small weights makes them small at first: no byte is
   then likelier than others, and the first loss is near ln(256). */
static luna_status start_calm(const luna_lm *model) {
  luna_tensor *weight = model->layers[model->config.layers - 1].feed_forward.norm.weight;
  float *small = (float *)grow(NULL, luna_count(weight), sizeof(float));
  for (int64_t i = 0; i < luna_count(weight); i++) small[i] = 0.1f;
  luna_status status = luna_write(weight, small);
  return free(small), status;
}

/* Some bytes of a text, from the start of a line where it has lines. */
static text some_lines(text t) {
  int64_t start = 0;
  while (start < t.size / 2 && (start == 0 || t.bytes[start - 1] != '\n')) start++;
  return (text){ t.bytes + start, t.size - start < PROMPT ? t.size - start : PROMPT };
}

/* As take_settings(), of a training that began with this text. */
static int take_training(luna_ctx *ctx, const char *path, const char *mark, int64_t *begin) {
  const luna_params *pairs = kept_pairs(ctx, set.resume);
  const char *before = pairs ? luna_params_get_text(pairs, "lm.text") : NULL;
  if (!pairs) return 2;
  if (before && strcmp(before, mark) != 0) return fail("%s began with another text than %s", set.resume, path);
  return take_settings(ctx, flags, begin);
}

static int train_on(luna_ctx *ctx, const char *path, text all) {
  text held = { all.bytes + (all.size - all.size / 10), all.size / 10 }, t = { all.bytes, all.size - held.size },
      prompt = some_lines(held);
  if (held.size < 2)
    return fail("%s has %lld bytes; training and validation take at least 20", path, (long long)all.size);
  const phrase mark = text_mark(all);
  int64_t begin = 0;
  if (set.resume && take_training(ctx, path, mark.text, &begin)) return 2;
  if (begin == set.steps) return training_finished();
  own.cut = own.window < t.size ? own.window : t.size - 1;
  if (own.cut < own.window) printf("The text is short, so windows have %lld bytes.\n", (long long)own.cut);

  choose_output_gate();
  luna_params *params = luna_params_open(ctx);
  luna_lm model;
  luna_lm_config config = {
    .layers = set.layers,
    .layer = { .dim = set.dim, .heads = set.heads, .memory = set.memory, .ffn = set.ffn, .dropout = (float)set.dropout,
               .convolution = own.convolution, .activation = LUNA_ACTIVATION_GELU,
               .recompute = (luna_recompute_kind)set.recompute,
               .attention = (luna_attention_kind)set.attention, .rotary = set.attention == LUNA_ATTENTION_SOFTMAX,
               .forget = (luna_forget)set.forget, .output_gate = set.output_gate != 0 }
  };
  if (luna_lm_init(&model, params, &config) != LUNA_OK || start_calm(&model) != LUNA_OK) return failed(ctx);
  luna_optimizer *adam = luna_adamw(params, &(luna_optimizer_config){
    .lr = (float)set.lr, .weight_decay = 0.01f, .clip = 1,
    .schedule = { .decay = LUNA_DECAY_COSINE, .warmup = set.steps < 1000 ? set.steps / 10 : 100,
                  .total = set.steps, .floor = 0.05f }
  });
  if (!adam) return failed(ctx);
  say("%s: The model trains on %lld bytes and is validated on %lld. It has %lld parameters.", path, (long long)t.size,
      (long long)held.size, (long long)luna_params_element_count(params));
  if (own.carry && !(carried = luna_lm_state_open(&model, rank_part(set.batch).count)))
    return failed(ctx);
  if (set.resume && luna_load_training(adam, luna_path(set.resume)) != LUNA_OK) return failed(ctx);
  if ((set.save_every || set.resume) && luna_params_set_text(params, "lm.text", mark.text) != LUNA_OK)
    return failed(ctx);
  if (!share_training(params, adam)) return failed(ctx);
  if (set.resume) say_resumed(begin);
  double first = mean_loss(ctx, &model, held, own.cut, LAST_VALIDATION);
  if (!(first >= 0)) return failed(ctx);
  if (show_sample(ctx, "before the first step", &model, &prompt)) return 2;

  int32_t *bytes = (int32_t *)malloc((size_t)(2 * set.batch * own.cut) * sizeof(int32_t));
  if (!bytes) return fail("out of memory");
  int64_t windows = held.size / own.cut;
  if (windows > VALIDATION) bar.last = (double)(windows < LAST_VALIDATION ? windows : LAST_VALIDATION) / VALIDATION;
  progress_start(&bar, begin);
  bool fine = learn(ctx, &model, adam, t, held, bytes, bytes + set.batch * own.cut);
  free(bytes);
  if (fine && bar.step == begin) return fail("the training was stopped before its first step, so no model was written");
  if (!fine || !save(adam, params)) return failed(ctx);
  const bool more = windows > VALIDATION;                  /* other windows than those of the lines and the plot */
  const double took = seconds() - bar.start, last = more ? mean_loss(ctx, &model, held, own.cut, LAST_VALIDATION) :
      validate(ctx, &model, held, LAST_VALIDATION);
  if (interrupted) say("The training was stopped at step %lld. Its model is in %s.", (long long)bar.step, set.out);
  if (luna_optimizer_skipped(adam))
    printf("%lld steps were skipped, as their gradients were not finite.\n", (long long)luna_optimizer_skipped(adam));

  if (!(last >= 0)) return failed(ctx);
  if (show_sample(ctx, "after the last step", &model, &prompt) || plot(&bar, path)) return 2;
  char windows_of[120] = "";
  if (more)
    snprintf(windows_of, sizeof windows_of, " It is of %lld windows; lines of steps have that of the first %d.",
             (long long)(windows < LAST_VALIDATION ? windows : LAST_VALIDATION), VALIDATION);
  say("%s: Training made %lld steps in %.0f s and %.1f MB. The validation loss went from %.3f to %.3f nats, from "
      "%.3f to %.3f bits per byte.%s",
      set.out, (long long)(bar.step - begin), took, megabytes(ctx), first, last, first / LN2, last / LN2, windows_of);
  return 0;
}

static int train(luna_ctx *ctx, const char **words) {
  text t = { 0 };
  int status = read_text(words[0], &t);
  if (!status) status = train_on(ctx, words[0], t);
  return free(t.bytes), status;
}

/* ---- generate, eval ---------------------------------------------------------------------------------------------- */

static int load(luna_ctx *ctx, luna_lm *model, const char *path) {
  if (luna_load_model_of(LUNA_MODEL_LM, model, luna_params_open(ctx), luna_path(path)) != LUNA_OK) return failed(ctx);
  const int64_t outputs = model->config.outputs;
  if (model->config.vocab == 256 && outputs != 0 && outputs != 256)
    return fail("%s has %lld outputs; lm predicts bytes, of which there are 256", path, (long long)outputs);
  if (model->config.vocab == 256) return 0;
  return fail("%s has a vocabulary of %lld tokens; lm reads bytes, of which there are 256", path,
              (long long)model->config.vocab);
}

static int generate(luna_ctx *ctx, const char **words) {
  luna_lm model;
  if (load(ctx, &model, words[0])) return 2;
  const char *begin = *own.prompt ? own.prompt : "\n";
  text prompt = { (int32_t *)malloc(strlen(begin) * sizeof(int32_t)), (int64_t)strlen(begin) };
  if (!prompt.bytes) return fail("out of memory");
  for (int64_t i = 0; i < prompt.size; i++) prompt.bytes[i] = (unsigned char)begin[i];
  if (on_terminal()) put_text_of(stdout, begin, prompt.size, true);
  else printf("%s", begin);
  luna_sampling sampling = { .temperature = (float)own.temperature, .top_k = (int32_t)own.top_k,
                            .seed = (uint64_t)set.seed };
  const int status = write_on(ctx, &model, &prompt, sampling, own.bytes, NULL);
  free(prompt.bytes);
  if (status) return status;
  return fflush(stdout) == 0 && !ferror(stdout) ? 0 : fail("cannot write the text: %s", strerror(errno));
}

static int eval(luna_ctx *ctx, const char **words) {
  luna_lm model;
  text t = { 0 };
  if (load(ctx, &model, words[0]) || read_text(words[1], &t)) return 2;
  double loss = t.size < 2 ? 0 : mean_loss(ctx, &model, t, own.window, INT64_MAX);
  free(t.bytes);
  if (t.size < 2) return fail("%s has only one byte, so there is nothing to predict", words[1]);
  if (!(loss >= 0)) return failed(ctx);
  say("%s has a loss of %.4f bits per byte (%.4f nats) on %s, read %s windows of %lld bytes.", words[0], loss / LN2,
      loss, words[1], own.carry ? "as one sequence in" : "in", (long long)own.window);
  return 0;
}

#define TEXT_FILE "text: Any file. Its bytes are the tokens."
#define MODEL_FILE "model: A file that train wrote."
static const command commands[] = {
  { "train", { TEXT_FILE }, "Trains a language model on a text.", train, "book.txt --out book.safetensors" },
  { "generate", { MODEL_FILE }, "Continues a prompt.", generate, "book.safetensors --prompt \"It was \" --count 500" },
  { "eval", { MODEL_FILE, TEXT_FILE }, "Measures the bits per byte of a text.", eval, "book.safetensors other.txt" },
  { 0 }
};

int main(int count, char **given) { return example("lm", commands, flags, count, given); }
