/* The backend's line: a device made of the CPU's own rows whose memory cannot be touched while the host's code runs. Whatever luna.h does with numbers
   outside the table ends in a fault here; whatever goes through it gives the CPU's bits. */
#define _DEFAULT_SOURCE
#include "test.h"
#define LUNA_IMPLEMENTATION
#include "luna.h"
#include "device_checks.h"
#include <sys/mman.h>

/* ---- memory of the device: pages that open while a table entry works ---- */
#define FAR_BYTES ((size_t)1 << 30)
#define FAR_PAGE ((size_t)4096)
static char *far_memory;
static size_t far_used, far_live; /* handed out from the start; bytes not released */
static int far_depth, far_opened, far_refuse;

static void far_enter(void) {
  if (far_depth++ == 0 && far_used) mprotect(far_memory, far_used, PROT_READ | PROT_WRITE);
}
static void far_leave(void) {
  if (--far_depth == 0 && far_used) mprotect(far_memory, far_used, PROT_NONE);
}
static luna_status far_open(luna_ctx *ctx, int number, void **self) {
  if (far_refuse) return luna_backend_fail(ctx, LUNA_UNSUPPORTED, "luna_open: this device is away");
  CHECK(number == 7, "open is told of device %d", number);
  *self = &far_opened;
  far_opened++;
  return LUNA_OK;
}
static void far_close(void *self) {
  CHECK(self == &far_opened && (far_opened > 1 || far_live == 0), "%zu bytes of the device are left at closing", far_live);
  far_opened--;
}
static void *far_allocate(void *self, size_t bytes) {
  const size_t size = (bytes + FAR_PAGE) / FAR_PAGE * FAR_PAGE;
  if (self != &far_opened) return NULL;
  if (far_live == 0) far_used = 0; /* nobody holds any: from the start again */
  if (size > FAR_BYTES - far_used) return NULL;
  char *at = far_memory + far_used;
  far_used += size;
  far_live += size;
  mprotect(at, size, PROT_READ | PROT_WRITE);
  memset(at, 0xFF, size);
  if (far_depth == 0) mprotect(at, size, PROT_NONE);
  return at;
}
static void far_release(void *self, void *pointer, size_t bytes) {
  CHECK(self == &far_opened && pointer, "release is called for nothing");
  far_live -= (bytes + FAR_PAGE) / FAR_PAGE * FAR_PAGE;
}
static bool far_is(const void *at) { return (const char *)at >= far_memory && (const char *)at < far_memory + FAR_BYTES; }

/* ---- the CPU's entries between far_enter and far_leave; the state and every tensor must be on the device ---- */
static luna_status far_copy(luna_ctx *ctx, void *to, const void *from, size_t bytes, int direction) {
  CHECK(!bytes || (far_is(to) == (direction != 2) && far_is(from) == (direction != 1)), "a copy in direction %d goes elsewhere", direction);
  far_enter();
  const luna_status status = luna_cpu_backend()->copy(ctx, to, from, bytes, direction);
  far_leave();
  return status;
}
#define FAR_ENTRY(name, parameters, arguments, at) \
  static luna_status far_##name parameters { \
    CHECK(far_is(at), #name " gets memory of the host"); \
    far_enter(); \
    const luna_status status = luna_cpu_backend()->name arguments; \
    far_leave(); \
    return status; \
  }
static int far_waits;
static luna_status far_wait(luna_ctx *ctx, const luna_ctx *other) {
  CHECK(ctx && other && ctx != other && luna_backend_of(ctx) == luna_backend_of(other),
        "a context waits for itself, or for another device");
  far_waits++;
  return LUNA_OK;
}
FAR_ENTRY(zero, (luna_ctx *ctx, void *at, size_t bytes), (ctx, at, bytes), at)
FAR_ENTRY(begin, (luna_ctx *ctx, luna_step_state *state, bool training, bool stepped), (ctx, state, training, stepped), state)
FAR_ENTRY(check, (luna_ctx *ctx, const luna_tensor *loss, luna_step_state *state), (ctx, loss, state), state)
FAR_ENTRY(norm, (luna_ctx *ctx, luna_tensor *const *parameters, int64_t count, float clip, luna_step_state *state), (ctx, parameters, count, clip, state), state)
FAR_ENTRY(update, (luna_ctx *ctx, const luna_update *update), (ctx, update), update->state)

static void far_row_check(const luna_op *op, const char *when) {
  bool fine = (!op->index || far_is(op->index)) && (!op->lengths || far_is(op->lengths)) && (!op->kept || far_is(op->kept)) && (!op->workspace || far_is(op->workspace));
  for (int i = 0; i < op->inputs; i++) fine = fine && (!op->in[i] || !luna_count(op->in[i]) || !op->in[i]->data || far_is(op->in[i]->data));
  for (int i = 0; i < op->outputs; i++) fine = fine && (!luna_count(op->out[i]) || op->kind == LUNA_OP_CUSTOM || !op->out[i]->data || far_is(op->out[i]->data));
  CHECK(fine, "%s of %s gets memory of the host", when, luna_op_name(op->kind));
}
static void far_query(luna_op *op) {
  far_enter();
  luna_cpu_backend()->op[op->kind].query(op);
  far_leave();
}
static luna_status far_forward(luna_op *op) {
  far_row_check(op, "forward");
  far_enter();
  const luna_status status = luna_cpu_backend()->op[op->kind].forward(op);
  far_leave();
  return status;
}
static luna_status far_backward(luna_op *op) {
  far_row_check(op, "backward");
  far_enter();
  const luna_status status = luna_cpu_backend()->op[op->kind].backward(op);
  far_leave();
  return status;
}

int main(int argc, char **argv) {
  luna_backend far = *luna_cpu_backend();
  far_memory = (char *)mmap(NULL, FAR_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (far_memory == (char *)MAP_FAILED) return CHECK(0, "no address space for a device"), test_report("device");
  far.device = 7;
  far.open = far_open;
  far.close = far_close;
  far.allocate = far_allocate;
  far.release = far_release;
  far.copy = far_copy;
  far.zero = far_zero;
  far.wait = far_wait;
  far.begin = far_begin;
  far.check = far_check;
  far.norm = far_norm;
  far.update = far_update;
  for (int i = 0; i < LUNA_OP_COUNT; i++) far.op[i].query = far_query, far.op[i].forward = far_forward, far.op[i].backward = far_backward;
  const device d = {&far, 0, 0, false, NULL, NULL};
  device_all(&d, argc > 1 ? argv[1] : NULL);
  CHECK(far_opened == 0, "%d devices are still open", far_opened);
  CHECK(argc > 1 || far_waits == 2 * (1 + 3) + 1, "contexts waited %d times for the owner of what they share",
        far_waits); /* sharing, begins, a stream */

  luna_backend without = far; /* a backend need not have that row, but then it has no streams */
  const device lacking = {&without, 0, 0, false, NULL, NULL};
  device_models m;
  without.op[LUNA_OP_CAUSAL_LUNA] = (luna_op_functions){NULL, NULL, NULL};
  if (device_models_open(&m, &lacking, 0))
    CHECK(!luna_stream_open(&m.lm[1], NULL) && luna_ctx_status(m.ctx[1]) == LUNA_UNSUPPORTED &&
        luna_ctx_error_id(m.ctx[1]) == LUNA_ERROR_NO_ROW, "a stream without its row: %s", luna_error(m.ctx[1]));
  luna_close(m.ctx[0]);
  luna_close(m.ctx[1]);

  far_refuse = 1; /* a context whose device is away refuses everything with that sentence, and harms nothing */
  device_run r;
  const bool open = device_run_open(&r, &d, 0, 1);
  CHECK(!open && r.ctx && luna_ctx_error_id(r.ctx) == LUNA_ERROR_BACKEND && strcmp(luna_error(r.ctx),
      "luna_open: this device is away") == 0, "the sentence: %s", luna_error(r.ctx));
  CHECK(luna_begin_step(r.ctx) == LUNA_UNSUPPORTED && luna_ctx_status(r.ctx) == LUNA_UNSUPPORTED && !luna_tensor_new(r.ctx, NULL, 0, NULL), "a context without its device works");
  CHECK(luna_params_zero_grad(r.params) == LUNA_UNSUPPORTED, "zeroing gradients without the device works");
  CHECK(strcmp(luna_error(r.ctx), "luna_open: this device is away") == 0, "the sentence becomes: %s", luna_error(r.ctx));
  luna_close(r.ctx);
  return test_report("device");
}
