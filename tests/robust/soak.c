/* Long runs of tiny models: streams of 2^26 steps and a training of 10^7. Memory stays as it is, every number finite,
   counters and the learning rate what they should be; what a stream remembers is what mathematics says, and a training
   resumed near its end has the bits of the one that never stopped. Then both go on from counters beyond 2^32. And
   products in bfloat16 of more processes than cores, each with tiles of its own where they are by AMX: a system that
   loses tiles when it switches processes changes a result.

     soak                               a short form: 2^18 steps of each stream, 20,000 of training; in make test-long
     soak --full                        all of it: make soak
     soak STREAM_STEPS TRAINING_STEPS   so many
*/
#include "test.h"
#define LUNA_IMPLEMENTATION
#include "luna.h"
#include "common.h"
#include <time.h>
#ifdef __unix__
#include <sys/wait.h>
#include <unistd.h>
#endif

enum { VOCAB = 16, DIM = 8, SLOTS = 2, WINDOW = 1 << 14, ROWS = 4 };

static int64_t resident_pages(void) { /* 0: this system does not tell */
  long all = 0, resident = 0;
  FILE *file = fopen("/proc/self/statm", "r");
  if (file && fscanf(file, "%ld %ld", &all, &resident) != 2) resident = 0;
  if (file) fclose(file);
  return resident;
}
static double seconds(void) { return (double)clock() / CLOCKS_PER_SEC; }

/* ---- streams ---- */
typedef enum memory { MEAN, HORIZON, GATED, MEMORIES } memory;
static const char *const memory_names[MEMORIES] = {"the published mean", "a horizon of 64", "gated forgetting"};
typedef struct source { luna_ctx *ctx; luna_lm model; } source;

/* Of the published memory one layer without convolution: what it averages is then a function of each token alone. */
static source source_open(memory kind) {
  source s;
  luna_lm_config config = {.vocab = VOCAB, .layers = 2, .layer = { .memory = SLOTS }};
  config.layer.dim = DIM, config.layer.heads = 1, config.layer.ffn = DIM, config.layer.convolution = 4;
  config.layer.horizon = kind == HORIZON ? 64 : LUNA_HORIZON_NONE;
  if (kind == GATED) config.layer.forget = LUNA_FORGET_GATED;
  if (kind == MEAN) config.layers = 1, config.layer.convolution = 0;
  s.ctx = luna_open(&(luna_options){.threads = 1, .seed = 5});
  luna_params *params = luna_params_open(s.ctx);
  if (!CHECK(luna_lm_init(&s.model, params, &config) == LUNA_OK, "%s", luna_error(s.ctx))) exit(2);
  common_params(params, 3);
  return s;
}
static unsigned char *state_of(const luna_stream *stream) {
  unsigned char *bytes = (unsigned char *)common_alloc(luna_stream_state_size(stream));
  CHECK(luna_stream_state_save(stream, bytes, luna_stream_state_size(stream)) == LUNA_OK, "%s",
        luna_stream_error(stream));
  return bytes;
}
/* the means that end a saved state */
enum { MEANS = 2 * DIM * SLOTS };
static void means_of(const luna_stream *stream, double means[MEANS]) {
  unsigned char *bytes = state_of(stream);
  memcpy(means, bytes + luna_stream_state_size(stream) - MEANS * sizeof(double), MEANS * sizeof(double));
  free(bytes);
}
/* The error of the means of so many tokens of each kind. What a token adds is what a stream has that has read it
   alone. */
static double mean_error(const source *s, const luna_stream *stream, const int64_t count[VOCAB]) {
  double got[MEANS], one[MEANS], size = 0, error = 0;
  long double want[MEANS] = {0}, all = 0;
  luna_stream *fresh = luna_stream_open(&s->model, NULL);
  for (int v = 0; v < VOCAB; v++) all += (long double)count[v];
  for (int32_t v = 0; v < VOCAB; v++) {
    luna_stream_reset(fresh);
    CHECK(luna_stream_step(fresh, &v) != NULL, "%s", luna_stream_error(fresh));
    means_of(fresh, one);
    for (int i = 0; i < MEANS; i++) want[i] += (long double)count[v] / all * (long double)one[i];
  }
  means_of(stream, got);
  for (int i = 0; i < MEANS; i++) {
    error += (double)((want[i] - (long double)got[i]) * (want[i] - (long double)got[i]));
    size += (double)(want[i] * want[i]);
  }
  luna_stream_close(fresh);
  CHECK(size > 1e-6, "the means are nothing");
  return sqrt(error / size);
}
/* the state with another position, as if so many tokens had been read */
static void far_on(const source *s, luna_stream *stream, memory kind) {
  const size_t size = luna_stream_state_size(stream);
  const int64_t now = luna_stream_position(stream), then = (int64_t)1 << 40;
  unsigned char *bytes = state_of(stream);
  size_t at = 0;
  int64_t there;
  do memcpy(&there, bytes + at, sizeof there);
  while (there != now && (at += sizeof there) < size);
  memcpy(bytes + at, &then, sizeof then);
  CHECK(luna_stream_state_load(stream, bytes, size) == LUNA_OK, "%s", luna_stream_error(stream));
  for (int32_t i = 0; i < 100; i++) {
    const int32_t token = i % VOCAB;
    const float *y = luna_stream_step(stream, &token);
    CHECK(y && y[0] - y[0] == 0, "%s: step %d after 2^40: %s", memory_names[kind], (int)i, luna_stream_error(stream));
  }
  CHECK(luna_stream_position(stream) == then + 100, "the position after 2^40 and 100 steps is another");
  CHECK(luna_memory(s->ctx).current > 0, "no memory is used");
  free(bytes);
}
static void stream_soak(memory kind, int64_t steps) {
  static int32_t last[WINDOW];
  const double begin = seconds();
  source s = source_open(kind);
  luna_stream *stream = luna_stream_open(&s.model, NULL);
  const size_t used = luna_memory(s.ctx).current;
  int64_t count[VOCAB] = {0}, bad = 0, pages = 0;
  uint64_t random = 1;
  float logits[VOCAB] = {0};
  if (!CHECK(stream != NULL && steps > WINDOW, "%s", luna_error(s.ctx))) return;
  for (int64_t i = 0; i < steps; i++) {
    random ^= random << 13, random ^= random >> 7, random ^= random << 17;
    const int32_t token = (int32_t)(random >> 60 & random >> 40); /* some tokens oftener than others */
    last[i % WINDOW] = token;
    count[token]++;
    const float *y = luna_stream_step(stream, &token);
    float sum = 0;
    for (int v = 0; y && v < VOCAB; v++) sum += y[v];
    bad += !y || !(sum - sum == 0);
    if (y && i == steps - 1) memcpy(logits, y, sizeof logits);
    if (i == WINDOW) pages = resident_pages();
  }
  const int64_t grown = resident_pages() - pages;
  CHECK(bad == 0, "%s: %.0f steps give no finite logits", memory_names[kind], (double)bad);
  CHECK(luna_stream_position(stream) == steps, "%s: the position is another", memory_names[kind]);
  CHECK(luna_memory(s.ctx).current == used, "%s: %.0f bytes, and in the end %.0f", memory_names[kind], (double)used,
        (double)luna_memory(s.ctx).current);
  CHECK(grown <= 64, "%s: the process has grown by %.0f pages", memory_names[kind], (double)grown);
  printf("%s: %.0f steps, %.1f s, %.0f bytes, %.0f pages more", memory_names[kind], (double)steps, seconds() - begin,
         (double)used, (double)grown);
  if (kind == MEAN) {
    const double error = mean_error(&s, stream, count);
    CHECK(error < 1e-10, "the means after all steps have an error of %.3g", error);
    printf("; the means differ from exact ones by %.2g\n", error);
  } else { /* what is older than the window has faded */
    int32_t *window = (int32_t *)common_alloc(sizeof last);
    for (int64_t i = 0; i < WINDOW; i++) window[i] = last[(steps + i) % WINDOW];
    luna_stream *fresh = luna_stream_open(&s.model, NULL);
    const float *y = luna_stream_prefill(fresh, &(luna_input){.tokens = window, .batch = 1, .n = WINDOW});
    test_close(memory_names[kind], logits, y, VOCAB, 1e-5);
    printf("; logits differ from those of the last %d tokens alone by %.2g\n", WINDOW, y ? test_error(logits, y, VOCAB)
           : -1);
    luna_stream_close(fresh);
    free(window);
  }
  far_on(&s, stream, kind);
  luna_stream_close(stream);
  luna_close(s.ctx);
}

/* ---- training ---- */
typedef struct run {
  luna_ctx *ctx;
  luna_params *params;
  luna_lm model;
  luna_optimizer *adam;
  luna_schedule schedule;
} run;
static void run_open(run *r, uint64_t seed, int64_t total) {
  luna_lm_config config = {.vocab = VOCAB, .layers = 1, .layer = { .memory = SLOTS }};
  config.layer.dim = DIM, config.layer.heads = 1, config.layer.ffn = DIM, config.layer.dropout = 0.02f;
  r->schedule = (luna_schedule){.decay = LUNA_DECAY_COSINE, .warmup = 1000, .total = total, .floor = 0.01f};
  r->ctx = luna_open(&(luna_options){.threads = 1, .seed = seed});
  r->params = luna_params_open(r->ctx);
  if (!CHECK(luna_lm_init(&r->model, r->params, &config) == LUNA_OK, "%s", luna_error(r->ctx))) exit(2);
  r->adam = luna_adamw(r->params, &(luna_optimizer_config){.lr = 3e-3f, .weight_decay = 0.01f, .clip = 1,
                                                           .average = 0.999f, .schedule = r->schedule});
}
/* token t + 1 is 5 t + 3 modulo 16: all 16 come in turn, and each tells the next */
static float train(run *r, int64_t from, int64_t steps) {
  int32_t tokens[ROWS + 1];
  double sum = 0;
  int64_t bad = 0;
  for (int64_t step = from; step < from + steps; step++) {
    tokens[0] = (int32_t)(common_hash(11, (uint64_t)step) % VOCAB);
    for (int i = 0; i < ROWS; i++) tokens[i + 1] = (5 * tokens[i] + 3) % VOCAB;
    luna_begin_step(r->ctx);
    luna_tensor *loss = luna_lm_loss(&r->model, &(luna_input){.tokens = tokens, .batch = 1, .n = ROWS}, tokens + 1);
    luna_backward(loss);
    const float value = luna_item(loss);
    bad += luna_optimizer_step(r->adam) != LUNA_OK || !(value - value == 0);
    sum += (double)value;
  }
  CHECK(bad == 0, "%.0f steps from %.0f on fail: %s", (double)bad, (double)from, luna_error(r->ctx));
  return (float)(sum / (double)steps);
}
static common_bytes saved(const run *r) {
  common_bytes b = {NULL, 0, 0, 0};
  const luna_io io = {NULL, common_write, &b, 0};
  CHECK(luna_save_training(r->adam, luna_callbacks(&io)) == LUNA_OK, "%s", luna_error(r->ctx));
  return b;
}
/* the counters, the rate and the parameters after `steps` steps */
static void check_counters(const run *r, int64_t steps, const char *what) {
  const double pi = 3.14159265358979323846, floor = (double)r->schedule.floor, warmup = (double)r->schedule.warmup;
  const double done = steps >= r->schedule.total ? 1 :
      ((double)steps - warmup) / ((double)r->schedule.total - warmup);
  const double want = (double)3e-3f * (steps < r->schedule.warmup ? (double)steps / warmup :
                                       floor + (1 - floor) * (1 + cos(pi * done)) / 2);
  const double got = (double)luna_optimizer_lr(r->adam);
  float *all = common_parameters(r->params);
  double sum = 0;
  for (int64_t i = 0; i < luna_params_element_count(r->params); i++) sum += (double)all[i];
  CHECK(sum - sum == 0, "%s: a parameter is not finite", what);
  CHECK(luna_optimizer_steps(r->adam) == steps && luna_optimizer_skipped(r->adam) == 0, "%s: %.0f steps, %.0f skipped",
        what, (double)luna_optimizer_steps(r->adam), (double)luna_optimizer_skipped(r->adam));
  CHECK(fabs(got - want) <= 1e-6 * want, "%s: the rate after %.0f steps is %.9g, not %.9g", what, (double)steps, got,
        want);
  free(all);
}
/* Loads a training at step `from` in a context of another seed, and goes on: the bytes of `want`, if it is given. */
static common_bytes go_on(const common_bytes *file, int64_t from, int64_t steps, int64_t total, const char *what,
                          const common_bytes *want) {
  run r;
  run_open(&r, 77, total);
  CHECK(luna_load_training(r.adam, luna_bytes(file->at, file->size)) == LUNA_OK, "%s", luna_error(r.ctx));
  (void)train(&r, from, steps);
  check_counters(&r, from + steps, what);
  common_bytes now = saved(&r);
  if (want) CHECK(now.size == want->size && memcmp(now.at, want->at, now.size) == 0, "%s: the bits are others", what);
  luna_close(r.ctx);
  return now;
}
/* writes a counter into a file of a training: 16 hexadecimal digits after its key */
static void set_counter(common_bytes *file, const char *key, int64_t value) {
  const size_t length = strlen(key);
  size_t at = 0;
  char digits[17];
  while (at + length + 20 < file->size && memcmp(file->at + at, key, length) != 0) at++;
  snprintf(digits, sizeof digits, "%08lx%08lx", (unsigned long)((uint64_t)value >> 32),
           (unsigned long)((uint64_t)value & 0xFFFFFFFFu));
  memcpy(file->at + at + length, digits, 16);
}
/* from counters beyond 2^32, stopped and not */
static void beyond(common_bytes *file) {
  const int64_t from = ((int64_t)1 << 33) + 7, total = (int64_t)1 << 34;
  set_counter(file, "\"luna.attempts\":\"", from);
  set_counter(file, "\"luna.updates\":\"", from);
  set_counter(file, "\"luna.step\":\"", from);
  common_bytes whole = go_on(file, from, 200, total, "beyond 2^32", NULL);
  common_bytes half = go_on(file, from, 100, total, "beyond 2^32", NULL);
  common_bytes both = go_on(&half, from + 100, 100, total, "beyond 2^32, resumed", &whole);
  free(whole.at), free(half.at), free(both.at);
}
static void training_soak(int64_t steps) {
  const double begin = seconds();
  const int64_t tail = 1000, part = steps / 8;
  run r;
  run_open(&r, 5, steps);
  const float first = train(&r, 0, tail);
  check_counters(&r, tail, "the first steps");
  const size_t used = luna_memory(r.ctx).current;
  const int64_t pages = resident_pages();
  float loss = first;
  int64_t at = tail;
  while (at < steps - tail) {
    const int64_t now = at + part < steps - tail ? part : steps - tail - at;
    loss = train(&r, at, now);
    check_counters(&r, at += now, "training");
  }
  CHECK(luna_memory(r.ctx).current == used, "training: %.0f bytes, and in the end %.0f", (double)used,
        (double)luna_memory(r.ctx).current);
  const int64_t grown = resident_pages() - pages;
  CHECK(grown <= 64, "training: the process has grown by %.0f pages", (double)grown);
  common_bytes file = saved(&r);
  const float last = train(&r, at, tail);
  check_counters(&r, steps, "training");
  CHECK(last < 0.2f && last < first, "the loss goes from %.4f to %.4f", (double)first, (double)last);
  common_bytes end = saved(&r), resumed = go_on(&file, at, tail, steps, "resumed", &end);
  printf("training: %.0f steps, %.1f s, %.0f bytes, %.0f pages more, loss %.4f, %.4f, %.4f\n", (double)steps,
         seconds() - begin, (double)used, (double)grown, (double)first, (double)loss, (double)last);
  beyond(&file);
  luna_close(r.ctx);
  free(file.at), free(end.at), free(resumed.at);
}

/* ---- tiles, in processes that compete for the cores ---- */
#ifdef __unix__
static float *product_of(luna_ctx *ctx, const float *x, const float *w, float *y) {
  const int64_t rows[2] = {64, 96}, weight[2] = {80, 96};
  luna_begin_inference(ctx);
  luna_read(luna_linear(luna_tensor_new(ctx, x, 2, rows), luna_tensor_new(ctx, w, 2, weight), NULL), y);
  return y;
}
/* the exit status of a process: 0 where all products have the bits of the first */
static int tiles_process(int number, int64_t rounds) {
  static float x[64 * 96], w[80 * 96], first[64 * 80], y[64 * 80];
  luna_ctx *ctx = luna_open(&(luna_options){.threads = 1, .products = LUNA_DTYPE_BF16});
  int status = 0;
  if (!ctx) return 2;
  common_fill(x, 64 * 96, (uint64_t)number + 1, 1), common_fill(w, 80 * 96, (uint64_t)number + 100, 1);
  product_of(ctx, x, w, first);
  for (int64_t i = 0; i < rounds && !status; i++) status = memcmp(product_of(ctx, x, w, y), first, sizeof first) != 0;
  if (luna_error_status(ctx) != LUNA_OK) status = 2;
  luna_close(ctx);
  return status;
}
static void tiles_soak(int64_t rounds) {
  enum { PROCESSES = 6 };
  pid_t child[PROCESSES];
  fflush(stdout);
  for (int i = 0; i < PROCESSES; i++)
    if ((child[i] = fork()) == 0) _exit(tiles_process(i, rounds));
  for (int i = 0; i < PROCESSES; i++) {
    int status = -1;
    CHECK(child[i] > 0 && waitpid(child[i], &status, 0) == child[i] && WIFEXITED(status) && WEXITSTATUS(status) == 0,
          "process %d: a product of %lld has other bits, or failed (status %d)", i, (long long)rounds, status);
  }
}
#else
static void tiles_soak(int64_t rounds) { (void)rounds; }
#endif

int main(int argc, char **argv) {
  int64_t stream_steps = 1 << 18, training_steps = 20000;
  if (argc > 1 && strcmp(argv[1], "--full") == 0) stream_steps = 1 << 26, training_steps = 10000000;
  else if (argc > 2) stream_steps = atoll(argv[1]), training_steps = atoll(argv[2]);
  for (int kind = 0; kind < MEMORIES; kind++) stream_soak((memory)kind, stream_steps), fflush(stdout);
  training_soak(training_steps);
  tiles_soak(training_steps / 4);
  return test_report("soak");
}
