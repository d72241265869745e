/* listops: works out nested lists of digits, [MAX 2 9 [MIN 4 7 ] 0 ], without knowing what a bracket is. This is the
   task of the Long Range Arena (arXiv 2011.04006), with the operators MIN, MAX, MED (median) and SM (sum modulo 10),
   and ten answers.

     cc -O2 -I. examples/listops.c -o listops -lm -lpthread

     listops train [--attention luna|softmax|linear|linformer] [--plot loss.svg] ...
       trains on short lists and takes about a minute
     listops train --shortest 500 --longest 2000 --batch 32 --lr 1e-3 --steps 1000
       trains on lists of the Arena's lengths and takes 5 to 10 minutes
     listops eval M [--data FILE]                 measures the accuracy on new lists or on a file's
     listops write [--count 1000] >lists.tsv      writes lines: answer TAB list

   Training generates its lists as it needs them, or reads them from --data. Ctrl-C ends the training early and keeps
   the model. */
#define LUNA_IMPLEMENTATION
#include "luna.h"

#include "common/example.h"
#include "common/tokens.h"
#include "common/lists.h"
#include "common/classifier.h"

static struct settings set = {
  .out = "listops.safetensors",
  .steps = 5000, .batch = 64, .lr = 3e-3,
  .layers = 2, .dim = 64, .heads = 4, .memory = 16, .ffn = 128,
  .seed = 1
};
static struct {
  const char *data;
  int64_t shortest, longest, depth, args, valid, count;
} own = { .shortest = 5, .longest = 50, .depth = 10, .args = 10, .valid = 1000, .count = 1000 };

static const flag flags[] = {
  FLAGS_TRAIN,
  { "--data", "te", READS(own.data),
   "Reads the samples from FILE. Its lines are \"answer TAB list\"; without it lists are generated." },
  { "--shortest", "tew", WHOLE(own.shortest, 1, 1e5), "Makes sequences of at least N tokens." },
  { "--longest", "tew", WHOLE(own.longest, 1, 1e5), "Limits a sequence to N tokens." },
  { "--depth", "tew", WHOLE(own.depth, 2, 100), "Nests lists at most N deep." },
  { "--args", "tew", WHOLE(own.args, 2, 1000), "Gives a list at most N members." },
  { "--valid", "t", WHOLE(own.valid, 1, 1e6),
   "Says which samples choose the model. They are N lists, at most a tenth of --data." },
  { "--count", "ew", WHOLE(own.count, 1, 1e9),
   "Sets the count to N. It counts the lists to write or, where they are generated, to measure on." },
  FLAGS_MODEL,
  FLAGS_CLASSIFIER,
  FLAG_PATIENCE,
  FLAG_SEED("tew"),
  FLAG_THREADS("te"),
  FLAG_WEIGHTS("e"),
  FLAG_PRODUCTS("t"),
  FLAG_RECOMPUTE,
  FLAG_PARALLEL,
  { 0 }
};

/* ---- lists, made or from a file ---------------------------------------------------------------------------------- */

static list_file file;

static list_sizes sizes(void) { return (list_sizes){ own.shortest, own.longest, own.depth, own.args }; }
static int32_t fetch_made(int64_t index, int32_t *tokens, int32_t *length) {
  return list_make(sizes(), draw(1, index, 0), INT64_MAX, tokens, length);
}
/* Lists that eval does not measure on, for a model may learn from them. */
static int32_t fetch_to_write(int64_t index, int32_t *tokens, int32_t *length) {
  return list_make(sizes(), draw(2, index, 0), INT64_MAX, tokens, length);
}
static int32_t fetch_read(int64_t index, int32_t *tokens, int32_t *length) {
  return list_fetch(&file, index, tokens, length);
}

/* ---- commands ---------------------------------------------------------------------------------------------------- */

/* What there is to learn: made lists, practically without end, or the file's. held: lists to measure on. */
static int open_lists(samples *s, int64_t held) {
  if (own.data && lists_read(&file, own.data)) return 2;
  if (own.data) own.longest = file.longest;
  *s = (samples){ .title = own.data ? own.data : "lists made as needed", .vocab = SYMBOLS, .classes = 10,
                 .longest = own.longest,
    .training = (int64_t)1 << 40, .held = held, .fetch = fetch_made };
  if (own.data) {
    s->fetch = fetch_read, s->held = held < file.count / 10 ? held : file.count / 10,
        s->training = file.count - s->held;
    return 0;
  }
  int32_t *tokens = (int32_t *)malloc((size_t)own.longest * sizeof(int32_t)), length;
  if (!tokens) return fail("out of memory");
  const bool made = list_make(sizes(), (uint64_t)set.seed, 1000000, tokens, &length) >= 0;
  free(tokens);
  return made ? 0 : fail("lists of --shortest %lld to --longest %lld tokens are too rare to be generated",
                         (long long)own.shortest, (long long)own.longest);
}

static int train(luna_ctx *ctx, const char **words) {
  luna_params *params = luna_params_open(ctx);
  samples s;
  int status = open_lists(&s, own.valid);
  (void)words;
  if (!status && luna_params_set_text(params, "listops.tokens", "symbols") != LUNA_OK) status = failed(ctx);
  if (!status) status = train_classifier(ctx, params, &s);
  lists_close(&file);
  return status;
}

static int eval(luna_ctx *ctx, const char **words) {
  luna_model model;
  samples s;
  int status = load_classifier(&model, ctx, luna_params_open(ctx), words[0], SYMBOLS, 10);
  if (!status) status = open_lists(&s, own.count);
  if (!status && !own.data) s.training = 0;
  if (!status) status = eval_classifier(ctx, &model.classifier, &s);
  lists_close(&file);
  return status;
}

static int write_lists(luna_ctx *ctx, const char **words) {
  samples s;
  int32_t length;
  (void)ctx, (void)words;
  if (open_lists(&s, own.count)) return 2;
  int32_t *tokens = (int32_t *)malloc((size_t)own.longest * sizeof(int32_t));
  for (int64_t i = 0; tokens && i < own.count && !ferror(stdout); i++) {
    printf("%d\t", (int)fetch_to_write(i, tokens, &length));
    for (int32_t k = 0; k < length; k++) printf("%s%s", symbols[tokens[k]], k + 1 < length ? " " : "\n");
  }
  if (!tokens) return fail("out of memory");
  free(tokens);
  return fflush(stdout) == 0 && !ferror(stdout) ? 0 : fail("cannot write the lists: %s", strerror(errno));
}

static const command commands[] = {
  { "train", { NULL }, "Trains a classifier that works out lists.", train, "--out lists.safetensors" },
  { "eval", { "model: A file that train wrote." }, "Measures a model's accuracy on lists.", eval,
    "lists.safetensors --count 1000" },
  { "write", { NULL }, "Writes lists and their answers.", write_lists, "--count 100 >lists.tsv" },
  { 0 }
};

int main(int count, char **given) { return example_of_attentions("listops", commands, flags, count, given); }
