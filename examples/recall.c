/* recall: how many key-value pairs does each kind of memory recall? A table of small causal models.

     cc -O2 -I. examples/recall.c -o recall -lm -lpthread

     recall                                                     all memories, some minutes
     recall --pairs 16 --memory routed --slots 32 --seed 7      one memory, up to 16 pairs
     recall --memory routed --plot slots.svg                    draws which slots each token is written to

   A sequence (MQAR, arXiv 2312.04927) begins with pairs "key value". Then keys come again among noise, and at each of
   them the model says the value. Training takes 2,048 tokens a step, with 4, 8, 16, ... pairs in turn. Each size is
   measured on 64 new sequences, then on 64 with 960 tokens of noise before the first query, as training never has. */
#define LUNA_IMPLEMENTATION
#include "luna.h"

#include "common/example.h"

enum { KEYS = 64, VALUES = 64, NOISE = 16, STEP = 2048, HELD = 64, GAP = 960, MOST = HELD * (4 * 64 + GAP) };

static struct settings set = { .steps = 1000, .seed = 1 };
static struct { const char *memories; int64_t largest, slots; } own = {
  .memories = "routed,gated,published,linear,softmax", .largest = 3, .slots = 32
};
static const flag flags[] = {
  { "--pairs", "", CHOICE(own.largest, "4 8 16 32 64"), "Trains and measures sequences of up to NAME pairs." },
  { "--memory", "", STRING(own.memories),
    "Chooses the memories. TEXT has one of routed, gated, published, linear and softmax, or some with commas." },
  { "--slots", "", WHOLE(own.slots, 2, 4096), "Gives a Luna memory N slots." },
  { "--plot", "", WRITES(set.plot),
    "Draws a picture in FILE, as SVG. It shows which slots of the routed memory each token is written to." },
  FLAG_STEPS(""),
  FLAG_SEED(""),
  FLAG_THREADS(""),
  { 0 }
};
static const struct memory { const char *name; luna_attention_kind attention; luna_forget forget; } memories[] = {
  { "routed", LUNA_ATTENTION_LUNA, LUNA_FORGET_ROUTED }, { "gated", LUNA_ATTENTION_LUNA, LUNA_FORGET_GATED },
  { "published", LUNA_ATTENTION_LUNA, LUNA_FORGET_NONE }, { "linear", LUNA_ATTENTION_LINEAR, LUNA_FORGET_NONE },
  { "softmax", LUNA_ATTENTION_SOFTMAX, LUNA_FORGET_NONE }
};
enum { MEMORIES = sizeof memories / sizeof *memories };

static int32_t tokens[MOST], labels[MOST];

static int64_t pairs_of(int64_t size) { return (int64_t)4 << size; }
static int64_t length_of(int64_t size) { return pairs_of(size) < 16 ? 64 : 4 * pairs_of(size); }
static int32_t below(uint64_t *random, int64_t n) { return (int32_t)(splitmix(random) % (uint64_t)n); }

/* Keys are tokens 0 .. 63, values 64 .. 127, noise 128 .. 143. A label is a value's token, or -1. */
static void make_sequence(uint64_t random, int64_t pairs, int64_t gap, int64_t n, int32_t *token, int32_t *label) {
  int32_t key[KEYS], value[KEYS];
  for (int32_t i = 0; i < KEYS; i++) key[i] = i, value[i] = KEYS + below(&random, VALUES);
  for (int32_t i = 0; i < pairs; i++) {                    /* no key comes twice */
    const int32_t other = i + below(&random, KEYS - i), first = key[i];
    key[i] = key[other], key[other] = first;
  }
  for (int64_t t = 0; t < n; t++) {
    const bool asks = t >= 2 * pairs + gap && below(&random, 10) < 7;
    const int64_t pair = t < 2 * pairs ? t / 2 : below(&random, pairs);
    token[t] = KEYS + VALUES + below(&random, NOISE), label[t] = -1;
    if (asks) token[t] = key[pair], label[t] = value[pair];
    if (t < 2 * pairs) token[t] = t % 2 ? value[pair] : key[pair];
  }
}
/* Makes sequences in `tokens` and `labels`. Purpose 1 is training and number a step, 2 is measuring and a size. */
static luna_input make_batch(uint32_t purpose, int64_t number, int64_t size, int64_t gap, int64_t rows) {
  const int64_t n = length_of(size) + gap;
  for (int64_t r = 0; r < rows; r++)
    make_sequence(draw(purpose, number, r), pairs_of(size), gap, n, tokens + r * n, labels + r * n);
  return (luna_input){ tokens, NULL, rows, n, NULL };
}

#include "recall_svg.h"

static luna_status train(luna_ctx *ctx, const luna_lm *model) {
  luna_optimizer *adam = luna_adamw(model->params, &(luna_optimizer_config){
    .lr = 3e-3f, .weight_decay = 0.01f, .clip = 1,
    .schedule = { .decay = LUNA_DECAY_COSINE, .warmup = set.steps / 20, .total = set.steps, .floor = 0.05f } });
  luna_status status = luna_error_status(ctx);
  for (int64_t step = 0; step < set.steps && status == LUNA_OK; step++) {
    const int64_t size = step % (own.largest + 1);
    const luna_input input = make_batch(1, step, size, 0, STEP / length_of(size));
    luna_begin_step(ctx);
    luna_backward(luna_lm_loss(model, &input, labels));
    status = luna_optimizer_step(adam);
  }
  return status;
}
/* Prints the share of right values in percent. */
static luna_status measure(luna_ctx *ctx, const luna_lm *model, int64_t size, int64_t gap) {
  static int32_t found[MOST];
  const luna_input input = make_batch(2, size, size, gap, HELD);
  double right = 0, asked = 0;
  luna_begin_inference(ctx);
  const luna_status status = luna_argmax(luna_lm_forward(model, &input), found);
  for (int64_t i = 0; i < input.batch * input.n; i++)
    asked += labels[i] >= 0, right += labels[i] >= 0 && labels[i] == found[i];
  if (status == LUNA_OK) printf("%10.1f", 100 * right / asked);
  return status;
}
static int print_row(luna_ctx *ctx, const struct memory *m) {
  luna_lm model;
  const luna_lm_config config = { .vocab = KEYS + VALUES + NOISE, .layers = 2,
    .layer = { .dim = 64, .heads = 4, .ffn = 128, .memory = own.slots, .activation = LUNA_ACTIVATION_GELU,
               .pre_norm = true, .convolution = 4, .attention = m->attention, .forget = m->forget,
               .rotary = m->attention == LUNA_ATTENTION_SOFTMAX } };
  if (luna_lm_init(&model, luna_params_open(ctx), &config) != LUNA_OK || train(ctx, &model) != LUNA_OK)
    return failed(ctx);
  printf("%-10s%11lld", m->name, (long long)luna_params_element_count(model.params));
  for (int64_t gap = 0; gap <= GAP; gap += GAP)
    for (int64_t size = 0; size <= own.largest; size++)
      if (measure(ctx, &model, size, gap) != LUNA_OK) return failed(ctx);
  printf("\n");
  fflush(stdout);
  return set.plot && m->forget == LUNA_FORGET_ROUTED ? draw_slots(ctx, &model) : 0;
}
/* Finds the memories that --memory names. */
static int choose(bool *chosen) {
  if (!*own.memories) return fail("--memory names no memory; --help lists them");
  for (const char *name = own.memories; *name; name += name[0] == ',') {
    const size_t size = strcspn(name, ",");
    int m = 0;
    while (m < MEMORIES && (strlen(memories[m].name) != size || memcmp(memories[m].name, name, size) != 0)) m++;
    if (m == MEMORIES) return fail("--memory has '%.*s', which is no memory; --help lists them", (int)size, name);
    chosen[m] = true;
    name += size;
  }
  return set.plot && !chosen[0] ? fail("--plot draws the routed memory, which --memory does not name") : 0;
}
static int recall(luna_ctx *unused, const char **words) {
  bool chosen[MEMORIES] = { false };
  int status = ((void)unused, (void)words, choose(chosen));
  if (status) return status;
  printf("Right values in percent after %lld steps with seed %lld; on the right after %d tokens of noise:\n%-10s%11s",
         (long long)set.steps, (long long)set.seed, GAP, "memory", "parameters");
  for (int i = 0; i < 2 * (own.largest + 1); i++) printf("%4lld pairs", (long long)pairs_of(i % (own.largest + 1)));
  printf("\n");
  for (int m = 0; m < MEMORIES && !status; m++) {
    luna_ctx *ctx = chosen[m] ? open_context() : NULL;     /* its own, so that rows do not depend on each other */
    if (chosen[m]) status = ctx ? print_row(ctx, &memories[m]) : 2;
    luna_close(ctx);
  }
  return status;
}

static const command commands[] = {
  { "", { NULL }, "Trains a model of each memory and prints what it recalls.", recall,
    "--pairs 16 --memory routed --slots 32 --seed 7" },
  { 0 }
};

int main(int count, char **given) { return example("recall", commands, flags, count, given); }
