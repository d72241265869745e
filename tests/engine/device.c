/* The backend's line: a device made of the CPU's own ops whose memory cannot be touched while the host's code runs.
   Whatever luna.h does with numbers outside the table ends in a fault here; whatever goes through it gives the CPU's
   bits. */
#define _DEFAULT_SOURCE
#include "test.h"
#define LUNA_IMPLEMENTATION
#include "luna.h"
#include "device_checks.h"
#include <sys/mman.h>

/* ---- memory of the device: pages that open while a table entry works ---- */
#define FAR_BYTES ((size_t)1 << 30)
#define FAR_PAGE ((size_t)4096)
static char *fake_memory;
static size_t fake_used, fake_live; /* handed out from the start; bytes not released */
static int fake_depth, fake_opened, fake_away;

static void fake_enter(void) {
  if (fake_depth++ == 0 && fake_used) mprotect(fake_memory, fake_used, PROT_READ | PROT_WRITE);
}
static void fake_leave(void) {
  if (--fake_depth == 0 && fake_used) mprotect(fake_memory, fake_used, PROT_NONE);
}
static luna_status fake_open(luna_ctx *ctx, int number, void **self) {
  if (fake_away) return luna_fail(ctx, LUNA_UNSUPPORTED, "luna_open: this device is away");
  CHECK(number == 7, "open is given device %d", number);
  *self = &fake_opened;
  fake_opened++;
  return LUNA_OK;
}
static void fake_close(void *self) {
  CHECK(self == &fake_opened && (fake_opened > 1 || fake_live == 0), "%zu bytes of the device are left at closing",
        fake_live);
  fake_opened--;
}
static void *fake_allocate(void *self, size_t bytes) {
  const size_t size = (bytes + FAR_PAGE) / FAR_PAGE * FAR_PAGE;
  if (self != &fake_opened) return NULL;
  if (fake_live == 0) fake_used = 0; /* nobody holds any: from the start again */
  if (size > FAR_BYTES - fake_used) return NULL;
  char *at = fake_memory + fake_used;
  fake_used += size;
  fake_live += size;
  mprotect(at, size, PROT_READ | PROT_WRITE);
  memset(at, 0xFF, size);
  if (fake_depth == 0) mprotect(at, size, PROT_NONE);
  return at;
}
static void fake_release(void *self, void *pointer, size_t bytes) {
  CHECK(self == &fake_opened && pointer, "release is called for nothing");
  fake_live -= (bytes + FAR_PAGE) / FAR_PAGE * FAR_PAGE;
}
static bool fake_is(const void *at) {
  return (const char *)at >= fake_memory && (const char *)at < fake_memory + FAR_BYTES;
}

/* ---- the CPU's entries between fake_enter and fake_leave; the state and every tensor must be on the device ---- */
static int64_t fake_copies, fake_copy_fails; /* the copy that fails, from 1 on; 0: none */
static luna_status fake_copy(luna_ctx *ctx, void *to, const void *from, size_t bytes, int direction) {
  if (++fake_copies == fake_copy_fails) return luna_fail(ctx, LUNA_DEVICE_FAILED, "a copy fails");
  CHECK(!bytes || (fake_is(to) == (direction != 2) && fake_is(from) == (direction != 1)),
        "a copy in direction %d goes elsewhere", direction);
  fake_enter();
  const luna_status status = luna_cpu_backend()->copy(ctx, to, from, bytes, direction);
  fake_leave();
  return status;
}
#define FAR_ENTRY(name, parameters, arguments, at) \
  static luna_status fake_##name parameters { \
    CHECK(fake_is(at), #name " gets memory of the host"); \
    fake_enter(); \
    const luna_status status = luna_cpu_backend()->name arguments; \
    fake_leave(); \
    return status; \
  }
static int fake_waits;
static luna_status fake_wait(luna_ctx *ctx, const luna_ctx *other) {
  CHECK(ctx && other && ctx != other && luna_backend_of(ctx) == luna_backend_of(other),
        "a context waits for itself, or for another device");
  fake_waits++;
  return LUNA_OK;
}
FAR_ENTRY(zero, (luna_ctx *ctx, void *at, size_t bytes), (ctx, at, bytes), at)
FAR_ENTRY(begin, (luna_ctx *ctx, luna_step_state *state, bool training, bool stepped), (ctx, state, training, stepped),
          state)
FAR_ENTRY(check, (luna_ctx *ctx, const luna_tensor *loss, luna_step_state *state), (ctx, loss, state), state)
#define FAR_PARTS \
  (luna_ctx *ctx, const luna_rule *rule, const luna_update *parts, const luna_update *table, int64_t count)
FAR_ENTRY(norm, FAR_PARTS, (ctx, rule, parts, table, count), rule->state)
FAR_ENTRY(update, FAR_PARTS, (ctx, rule, ((void)parts, table), table, count), table)

static void fake_row_check(const luna_op *op, const char *when) {
  bool fine = (!op->index || fake_is(op->index)) && (!op->lengths || fake_is(op->lengths)) &&
      (!op->kept || fake_is(op->kept)) && (!op->workspace || fake_is(op->workspace));
  for (int i = 0; i < op->inputs; i++)
    fine = fine && (!op->in[i] || !luna_count(op->in[i]) || !op->in[i]->data || fake_is(op->in[i]->data));
  for (int i = 0; i < op->outputs; i++)
    fine = fine && (!luna_count(op->out[i]) || op->kind == LUNA_OP_CUSTOM || !op->out[i]->data ||
                    fake_is(op->out[i]->data));
  CHECK(fine, "%s of %s gets memory of the host", when, luna_op_name(op->kind));
}
static void fake_query(luna_op *op) {
  fake_enter();
  luna_cpu_backend()->op[op->kind].query(op);
  fake_leave();
}
static luna_status fake_forward(luna_op *op) {
  fake_row_check(op, "forward");
  fake_enter();
  const luna_status status = luna_cpu_backend()->op[op->kind].forward(op);
  fake_leave();
  return status;
}
static luna_status fake_backward(luna_op *op) {
  fake_row_check(op, "backward");
  fake_enter();
  const luna_status status = luna_cpu_backend()->op[op->kind].backward(op);
  fake_leave();
  return status;
}

/* ---- products that cost little are not folded away ---- */
static int packs;
static luna_status pack_counted(luna_op *op) {
  packs += op->inputs == 2;
  return luna_cpu_backend()->op[op->kind].forward(op);
}
static void check_product_cost(void) {
  enum { ROWS = 200, SLOTS = 16, DIM = 64 };
  const int64_t rows[3] = {1, ROWS, DIM}, slots[3] = {1, SLOTS, DIM};
  const luna_layer_config config = {.dim = DIM, .heads = 2};
  float *values = common_random(ROWS * DIM, 1, 1);
  for (int cheap = 0; cheap < 2; cheap++) {
    luna_backend priced = *luna_cpu_backend();
    luna_options options = {0};
    luna_nested_attention_layer layer;
    priced.op[LUNA_OP_SOFTMAX_ATTENTION].forward = pack_counted;
    priced.product_cost = cheap ? 0.25f : 0;
    options.backend = &priced;
    luna_ctx *ctx = luna_open(&options);
    luna_nested_attention_layer_init(&layer, luna_params_open(ctx), "", &config);
    luna_begin_inference(ctx);
    packs = 0;
    CHECK(luna_nested_attention_layer_forward(&layer, luna_tensor_new(ctx, values, 3, rows),
                                              luna_tensor_new(ctx, values, 3, slots), NULL, NULL, NULL), "%s",
          luna_error(ctx));
    CHECK(packs == !cheap, "where products cost %g, %d packs are folded", (double)priced.product_cost, packs);
    luna_close(ctx);
  }
  free(values);
}

/* ---- each copy of each way to a file or a state and back fails in turn, and the call says so ---- */
enum { COPY_SAVE, COPY_SAVE_INT8, COPY_BUFFER, COPY_LOAD, COPY_MATCHING, COPY_SAVE_TRAINING, COPY_LOAD_TRAINING,
       COPY_STREAM, COPY_TO_HOST, COPY_STATE, COPY_WAYS };
typedef struct copies {
  luna_ctx *ctx, *host;
  luna_params *params;
  luna_lm model, on_host;
  luna_optimizer *optimizer;
  luna_stream *stream[2];
  common_bytes file;
  char *state;
} copies;
static luna_status copies_save(copies *c, bool training) {
  const luna_io io = {NULL, common_write, &c->file, 0};
  c->file.size = 0;
  return training ? luna_save_training(c->optimizer, luna_callbacks(&io)) : luna_save(c->params, luna_callbacks(&io));
}
static void copies_open(copies *c, const device *d, int way) {
  const luna_lm_config config = {.vocab = 300, .layers = 1, .layer = {.dim = 32, .heads = 2, .ffn = 32, .memory = 2}};
  const int32_t tokens[4] = {1, 2, 3, 4};
  memset(c, 0, sizeof *c);
  c->ctx = device_open(d, 3);
  c->params = luna_params_open(c->ctx);
  CHECK(luna_lm_init(&c->model, c->params, &config) == LUNA_OK, "%s", luna_error(c->ctx));
  c->optimizer = luna_adam(c->params, &(luna_optimizer_config){.average = 0.9f});
  luna_begin_step(c->ctx);
  luna_backward(luna_lm_loss(&c->model, &(luna_input){.tokens = tokens, .batch = 1, .n = 3}, tokens + 1));
  if (way != COPY_SAVE_TRAINING) /* there averages begin */
    CHECK(luna_optimizer_step(c->optimizer) == LUNA_OK, "%s", luna_error(c->ctx));
  luna_begin_inference(c->ctx);
  c->host = device_open(NULL, 3);
  CHECK(luna_lm_init(&c->on_host, luna_params_open(c->host), &config) == LUNA_OK, "%s", luna_error(c->host));
  for (int i = 0; i < 2 && way >= COPY_STREAM; i++)
    c->stream[i] = luna_stream_open(i && way == COPY_TO_HOST ? &c->on_host : &c->model, NULL);
  if (way >= COPY_STREAM) {
    c->state = (char *)common_alloc(luna_stream_state_size(c->stream[0]));
    CHECK(luna_stream_step(c->stream[0], tokens) && luna_stream_state_save(c->stream[0], c->state,
                                                                           luna_stream_state_size(c->stream[0])) == 0,
          "%s", luna_error(c->ctx));
  }
  CHECK(way < COPY_LOAD || copies_save(c, way == COPY_LOAD_TRAINING) == LUNA_OK, "%s", luna_error(c->ctx));
}
static luna_status copies_try(copies *c, int way) {
  static char buffer[1 << 17];
  const luna_io io = {NULL, common_write, &c->file, 0};
  const luna_file file = luna_bytes(c->file.at, c->file.size);
  luna_load_report report = {0};
  size_t written;
  switch (way) {
    case COPY_SAVE: return copies_save(c, false);
    case COPY_SAVE_INT8: return luna_save_int8(c->params, luna_callbacks(&io));
    case COPY_BUFFER: return luna_save(c->params, luna_buffer(buffer, sizeof buffer, &written));
    case COPY_LOAD: return luna_load(c->params, file);
    case COPY_MATCHING: return luna_load_matching(c->params, file, &report);
    case COPY_SAVE_TRAINING: return copies_save(c, true);
    case COPY_LOAD_TRAINING: return luna_load_training(c->optimizer, file);
    case COPY_STREAM: case COPY_TO_HOST: return common_stream_copy(c->stream[1], c->stream[0]);
    default: return luna_stream_state_load(c->stream[0], c->state, luna_stream_state_size(c->stream[0]));
  }
}
static void check_copies(const device *d) {
  for (int way = 0; way < COPY_WAYS; way++) {
    luna_status status = LUNA_DEVICE_FAILED;
    int fails = 0;
    for (int fail = 1; status != LUNA_OK && fail < 5000; fail += fail < 40 ? 1 : 41) {
      copies c;
      copies_open(&c, d, way);
      fake_copies = 0, fake_copy_fails = fail;
      status = copies_try(&c, way);
      const bool failed = fake_copies >= fail;
      fake_copy_fails = 0;
      fails += failed;
      CHECK((status != LUNA_OK) == failed, "way %d, copy %d %s: %s", way, fail, failed ? "fails" : "is not made",
            luna_status_text(status));
      const bool saves = way == COPY_STREAM || way == COPY_TO_HOST; /* that has a status alone */
      CHECK(!failed || saves || luna_error(c.ctx)[0] || luna_stream_error(c.stream[way != COPY_STATE])[0],
            "way %d, copy %d: no sentence", way, fail);
      luna_stream_close(c.stream[0]), luna_stream_close(c.stream[1]);
      luna_close(c.ctx), luna_close(c.host);
      free(c.file.at), free(c.state);
    }
    CHECK(status == LUNA_OK && fails > 0, "way %d: %d copies have failed, and it ends with: %s", way, fails,
          luna_status_text(status));
  }
  copies c; /* of a stream whose device has failed no state is taken */
  const int32_t token = 1;
  copies_open(&c, d, COPY_STREAM);
  fake_copies = 0, fake_copy_fails = 1;
  CHECK(!luna_stream_step(c.stream[0], &token), "a step whose copy fails has logits");
  fake_copy_fails = 0;
  CHECK(common_stream_copy(c.stream[1], c.stream[0]) == LUNA_DEVICE_FAILED &&
        luna_stream_position(c.stream[1]) == 0, "a broken stream is copied");
  luna_stream_close(c.stream[0]), luna_stream_close(c.stream[1]);
  luna_close(c.ctx), luna_close(c.host);
  free(c.file.at), free(c.state);
}

/* ---- a device runs the optimiser hooks that it knows ---- */
static bool fake_knows(const luna_optimizer_hook *hook) { return strcmp(hook->name, "Apollo") == 0; }
static void check_hook(const device *d) {
  static const luna_optimizer_hook unknown = {"unknown", 3, true, 0, NULL, luna_apollo_update};
  luna_ctx *ctx = device_open(d, 1);
  luna_params *params = luna_params_open(ctx);
  const int64_t size = 3;
  luna_param(params, "w", 1, &size, (luna_init){LUNA_INIT_ONES, 1});
  CHECK(luna_apollo(params, NULL), "Apollo, which the device knows: %s", luna_error(ctx));
  CHECK(!luna_optimizer_open(params, &unknown, NULL) && luna_error_id_of(ctx) == LUNA_ERROR_HOOK_CPU_ONLY &&
            strcmp(luna_error(ctx), "luna_optimizer_open: the optimiser unknown runs on the CPU only, and this context "
                                    "is on a device") == 0,
        "a hook that the device does not know: %s", luna_error(ctx));
  luna_close(ctx);
}

int main(int argc, char **argv) {
  luna_backend fake = *luna_cpu_backend();
  fake_memory = (char *)mmap(NULL, FAR_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (fake_memory == (char *)MAP_FAILED) return CHECK(0, "no address space for a device"), test_report("device");
  fake.device = 7;
  fake.open = fake_open;
  fake.close = fake_close;
  fake.allocate = fake_allocate;
  fake.release = fake_release;
  fake.copy = fake_copy;
  fake.zero = fake_zero;
  fake.wait = fake_wait;
  fake.begin = fake_begin;
  fake.check = fake_check;
  fake.norm = fake_norm;
  fake.update = fake_update;
  fake.knows = fake_knows;
  for (int i = 0; i < LUNA_OP_COUNT; i++)
    fake.op[i].query = fake_query, fake.op[i].forward = fake_forward, fake.op[i].backward = fake_backward;
  const device d = {&fake, 0, 0, false, NULL, NULL};
  device_all(&d, argc > 1 ? argv[1] : NULL);
  CHECK(fake_opened == 0, "%d devices are still open", fake_opened);
  CHECK(argc > 1 || fake_waits == 2 * (1 + 3) + 1, "contexts waited %d times for the owner of what they share",
        fake_waits); /* sharing, begins, a stream */

  check_product_cost();
  check_hook(&d);
  check_copies(&d);
  luna_backend without = fake; /* a backend need not have that op, but then it has no streams */
  const device lacking = {&without, 0, 0, false, NULL, NULL};
  device_models m;
  without.op[LUNA_OP_CAUSAL_LUNA] = (luna_op_functions){NULL, NULL, NULL, 0};
  if (device_models_open(&m, &lacking, 0))
    CHECK(!luna_stream_open(&m.lm[1], NULL) && luna_error_status(m.ctx[1]) == LUNA_UNSUPPORTED &&
        luna_error_id_of(m.ctx[1]) == LUNA_ERROR_NO_OP, "a stream without its row: %s", luna_error(m.ctx[1]));
  luna_close(m.ctx[0]);
  luna_close(m.ctx[1]);

  fake_away = 1; /* a context whose device is away refuses everything with that sentence, and harms nothing */
  device_run r;
  const bool open = device_run_open(&r, &d, 0, 1);
  CHECK(!open && r.ctx && luna_error_id_of(r.ctx) == LUNA_ERROR_BACKEND && strcmp(luna_error(r.ctx),
      "luna_open: this device is away") == 0, "the sentence: %s", luna_error(r.ctx));
  CHECK(luna_begin_step(r.ctx) == LUNA_UNSUPPORTED && luna_error_status(r.ctx) == LUNA_UNSUPPORTED &&
        !luna_tensor_new(r.ctx, NULL, 0, NULL), "a context without its device works");
  CHECK(luna_params_zero_grad(r.params) == LUNA_UNSUPPORTED, "zeroing gradients without the device works");
  CHECK(strcmp(luna_error(r.ctx), "luna_open: this device is away") == 0, "the sentence becomes: %s",
        luna_error(r.ctx));
  luna_close(r.ctx);
  return test_report("device");
}
