/* Checkpoints through bytes, callbacks and paths: what is saved comes back bit for bit; every file that is not as it
   should be is refused with a sentence that names what is wrong, and then no parameter has changed; shared
   sets; every allocation made to fail in turn. */
#define _FILE_OFFSET_BITS 64 /* for readdir on 32-bit machines */
#include "test.h"
#define LUNA_IMPLEMENTATION
#include "luna.h"
#include "common.h"
#include "files.h"
#include "st.h"
#ifdef _WIN32
#define WINDOWS true                 /* where opening a folder fails, and a folder is not searched */
#else
#define WINDOWS false
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#endif
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* ---- an allocator that counts, and fails on request ---- */
typedef struct heap {
  int64_t live, max, calls, fail_at, fail_end; /* fails from call fail_at to before fail_end */
} heap;
static void *heap_allocate(void *user, size_t bytes) {
  heap *h = (heap *)user;
  void *p = ++h->calls >= h->fail_at && h->calls < h->fail_end ? NULL : malloc(bytes);
  if (p) h->live += (int64_t)bytes;
  if (h->live > h->max) h->max = h->live;
  return p;
}
static void heap_release(void *user, void *pointer, size_t bytes) {
  ((heap *)user)->live -= (int64_t)bytes;
  free(pointer);
}
static luna_ctx *ctx_open(heap *h) {
  luna_options options = {0};
  memset(h, 0, sizeof *h);
  options.threads = 1;
  options.allocator.allocate = heap_allocate, options.allocator.release = heap_release, options.allocator.user = h;
  luna_ctx *ctx = luna_open(&options);
  if (!ctx) exit(2);
  return ctx;
}
static void ctx_close(luna_ctx *ctx, const heap *h) {
  luna_close(ctx);
  CHECK(h->live == 0, "%d bytes leaked", (int)h->live);
}

/* ---- files that are made here ---- */
/* a file of this header and of data_size bytes, all `data` */
static buffer forged(const char *json, size_t data_size, int data) {
  buffer b = {NULL, 0, 0, 0, SIZE_MAX};
  const size_t text = strlen(json), size = (text + 7) / 8 * 8; /* data aligned, as those of luna_save */
  for (int i = 0; i < 8; i++) buffer_write(&b, &(uint8_t){(uint8_t)((uint64_t)size >> 8 * i)}, 1);
  if (text) buffer_write(&b, json, text);
  for (size_t i = text; i < size; i++) buffer_write(&b, " ", 1);
  for (size_t i = 0; i < data_size; i++) buffer_write(&b, &(uint8_t){(uint8_t)data}, 1);
  return b;
}

/* ---- a small set, and a copy of its values ---- */
static const int64_t matrix[2] = {2, 3}, vector[1] = {4};
static luna_params *set_open(luna_ctx *ctx, const char *second) {
  luna_params *params = luna_params_open(ctx);
  const luna_init normal = {LUNA_INIT_NORMAL, 1};
  CHECK(luna_param(params, "first", 2, matrix, normal) && luna_param(params, second, 1, vector, normal), "%s",
        luna_error(ctx));
  return params;
}
static float *values_of(const luna_params *params) {
  float *values = common_floats(luna_params_element_count(params)), *at = values;
  for (int64_t i = 0; i < luna_params_tensor_count(params); i++) {
    const luna_tensor *t = luna_params_at(params, i, NULL);
    memcpy(at, t->data, (size_t)luna_count(t) * sizeof(float));
    at += luna_count(t);
  }
  return values;
}
static bool unchanged(const luna_params *params, const float *values) {
  float *now = values_of(params);
  const bool same = memcmp(now, values, (size_t)luna_params_element_count(params) * sizeof(float)) == 0;
  free(now);
  return same;
}
/* a call that must fail with this status and error, and leave the values as they were */
static void refused(luna_params *params, luna_ctx *ctx, luna_status got, luna_status want, luna_error_id id,
                    const float *values, const char *what) {
  CHECK(got == want && luna_error_id_of(ctx) == id && luna_error(ctx)[0],
      "%s: %s, error %d \"%s\", not %s with error %d", what,
        luna_status_text(got), (int)luna_error_id_of(ctx), luna_error(ctx), luna_status_text(want), (int)id);
  CHECK(unchanged(params, values), "%s: parameters have changed", what);
  luna_begin_inference(ctx);
}

/* ---- round trip ---- */
#define ODD_NAME "odd \"name\" \\ \x01\t \xc3\xa9 \xf0\x9f\x98\x80"
static const char *const odd_pairs[][2] = {{"plain", "text"},
                                           {"quo\"te", "back\\slash \"quoted\""},
                                           {"control\x01\x1f", "line\nbreak\ttab\r"},
                                           {"\xc3\xa9", "\xe2\x82\xac \xf0\x9f\x98\x80"},
                                           {"empty", ""}};
enum { ODD_PAIRS = sizeof odd_pairs / sizeof *odd_pairs };

static void check_round_trip(void) {
  const float special[6] = {-0.0f, (float)INFINITY, -(float)INFINITY, 1e-45f, 3.4e38f, (float)NAN};
  heap ha, hb;
  luna_ctx *a = ctx_open(&ha), *b = ctx_open(&hb);
  luna_params *from = set_open(a, ODD_NAME), *to = set_open(b, ODD_NAME);
  st_file st;
  st_item pair;
  memcpy(luna_params_find(from, "first")->data, special, sizeof special);
  luna_params_set_text(from, odd_pairs[0][0], "replaced");
  for (int i = 0; i < ODD_PAIRS; i++)
    CHECK(luna_params_set_text(from, odd_pairs[i][0], odd_pairs[i][1]) == LUNA_OK, "%s", luna_error(a));
  float *values = values_of(from);
  buffer file = saved(from), again;
  for (int way = 0; way < 2; way++) {
    const luna_io io = io_of(&file, file.size);
    common_params(to, 7 + (uint64_t)way);
    const luna_status status = way ? luna_load(to, luna_callbacks(&io)) : luna_load(to, luna_bytes(file.at, file.size));
    CHECK(status == LUNA_OK && unchanged(to, values), "way %d: %s", way, luna_error(b));
  }
  for (int i = 0; i < ODD_PAIRS; i++) {
    CHECK(strcmp(luna_params_get_text(from, odd_pairs[i][0]), odd_pairs[i][1]) == 0, "the pair %s is not kept",
          odd_pairs[i][0]);
    const char *loaded = luna_params_get_text(to, odd_pairs[i][0]);
    CHECK(loaded && strcmp(loaded, odd_pairs[i][1]) == 0, "the pair %s was not loaded", odd_pairs[i][0]);
    CHECK(!st_open(&st, file.at, file.size) && st_meta(&st, odd_pairs[i][0], &pair) &&
          strcmp(pair.text, odd_pairs[i][1]) == 0,
          "the pair %s is not in the file", odd_pairs[i][0]);
  }
  again = saved(to);
  CHECK(again.size == file.size && memcmp(again.at, file.at, file.size) == 0, "saved again, the file has other bytes");
  CHECK(!luna_params_get_text(from, "none") && luna_params_set_text(from, "k", NULL) == LUNA_BAD_ARGUMENT,
        "pairs that are none");
  free(file.at), free(again.at), free(values), ctx_close(a, &ha), ctx_close(b, &hb);
}

/* F16, BF16 and F64 are read; -2 and 1 have few digits in all of them */
static void check_dtypes(void) {
  static const struct {
    const char *dtype;
    int size;
    uint8_t one[8], minus_two[8];
  } formats[4] = {{"F16", 2, {0, 0x3c}, {0, 0xc0}},
                  {"BF16", 2, {0x80, 0x3f}, {0, 0xc0}},
                  {"F32", 4, {0, 0, 0x80, 0x3f}, {0, 0, 0, 0xc0}},
                  {"F64", 8, {0, 0, 0, 0, 0, 0, 0xf0, 0x3f}, {0, 0, 0, 0, 0, 0, 0, 0xc0}}};
  heap h;
  luna_ctx *ctx = ctx_open(&h);
  luna_params *params = set_open(ctx, "second");
  for (int f = 0; f < 4; f++) {
    const int size = formats[f].size;
    char json[300];
    int right = 0;
    snprintf(json, sizeof json,
             "{\"second\":{\"dtype\":\"%s\",\"shape\":[4],\"data_offsets\":[0,%d]},"
             "\"first\":{\"dtype\":\"%s\",\"shape\":[2,3],\"data_offsets\":[%d,%d]}}",
             formats[f].dtype, 4 * size, formats[f].dtype, 4 * size, 10 * size);
    buffer file = forged(json, 0, 0);
    for (int i = 0; i < 10; i++) buffer_write(&file, i < 4 ? formats[f].one : formats[f].minus_two, (size_t)size);
    CHECK(luna_load(params, luna_bytes(file.at, file.size)) == LUNA_OK, "%s: %s", formats[f].dtype, luna_error(ctx));
    float *values = values_of(params);
    for (int i = 0; i < 10; i++) right += values[i] == (i < 6 ? -2 : 1);
    CHECK(right == 10, "%s: %d of 10 numbers are right", formats[f].dtype, right);
    free(values), free(file.at), common_params(params, 3);
  }
  ctx_close(ctx, &h);
}

/* ---- refusals ---- */
#define FIRST "\"first\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0,24]}"
#define SECOND(dtype, shape, end) \
  "\"second\":{\"dtype\":\"" dtype "\",\"shape\":[" shape "],\"data_offsets\":[24," #end "]}"
static const struct {
  const char *json;
  size_t data;
  luna_status status;
  luna_error_id id;
} wrong_files[] = {
    {"{" FIRST "}", 24, LUNA_MISMATCH, LUNA_ERROR_FILE_TENSOR_MISSING},
    {"{}", 0, LUNA_MISMATCH, LUNA_ERROR_FILE_TENSOR_MISSING},
    {"{" FIRST "," SECOND("F32", "4", 40) ",\"third\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[40,44]}}", 44,
     LUNA_MISMATCH,
     LUNA_ERROR_FILE_TENSOR_EXTRA},
    {"{" FIRST ",\"Second\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[24,40]}}", 40, LUNA_MISMATCH,
     LUNA_ERROR_FILE_TENSOR_EXTRA},
    {"{" FIRST "," SECOND("F32", "5", 44) "}", 44, LUNA_MISMATCH, LUNA_ERROR_FILE_TENSOR_SHAPE},
    {"{" FIRST "," SECOND("F32", "4,1", 40) "}", 40, LUNA_MISMATCH, LUNA_ERROR_FILE_TENSOR_SHAPE},
    {"{" FIRST "," SECOND("F32", "", 28) "}", 28, LUNA_MISMATCH, LUNA_ERROR_FILE_TENSOR_SHAPE},
    {"{" FIRST "," SECOND("F32", "1,1,1,1,1,1,1,4", 40) "}", 40, LUNA_MISMATCH, LUNA_ERROR_FILE_TENSOR_SHAPE},
    {"{" FIRST "," SECOND("I32", "4", 40) "}", 40, LUNA_MISMATCH, LUNA_ERROR_FILE_TENSOR_MISSING},
    {"{" FIRST "," SECOND("U8", "4", 28) "}", 28, LUNA_MISMATCH, LUNA_ERROR_FILE_TENSOR_MISSING},
    {"{" FIRST "," SECOND("I64", "4", 56) "}", 56, LUNA_MISMATCH, LUNA_ERROR_FILE_TENSOR_MISSING},
    {"{" FIRST "," SECOND("BOOL", "4", 28) "}", 28, LUNA_MISMATCH, LUNA_ERROR_FILE_TENSOR_MISSING},
    {"{" FIRST "," SECOND("F8_E4M3", "4", 28) "}", 28, LUNA_MISMATCH, LUNA_ERROR_FILE_TENSOR_MISSING},
    {"{" FIRST "," SECOND("F32", "4", 40) "}", 44, LUNA_BAD_FILE, LUNA_ERROR_NOT_SAFETENSORS},
    {"{" FIRST "," FIRST "}", 24, LUNA_BAD_FILE, LUNA_ERROR_NOT_SAFETENSORS},
    {"{\"a\":1}", 0, LUNA_BAD_FILE, LUNA_ERROR_NOT_SAFETENSORS},
    {"", 0, LUNA_BAD_FILE, LUNA_ERROR_NOT_SAFETENSORS},
    {"<html>not a checkpoint</html>", 0, LUNA_BAD_FILE, LUNA_ERROR_NOT_SAFETENSORS},
};
/* names that no parameter can have, of tensors that nothing here has: too long, and with a zero within */
static void check_strange_names(luna_params *params, luna_ctx *ctx) {
  static char json[8000], name[3000];
  float *values = values_of(params);
  for (int i = 0; i < 4; i++) {
    luna_load_report report = {0};
    memset(name, 'n', 2000), name[2000] = 0;
    if (i % 2) snprintf(name, sizeof name, "first\\u0000");
    if (i >= 2) memcpy(name + strlen(name), ".scale", 7);
    snprintf(json, sizeof json, "{" FIRST "," SECOND("F32", "4", 40)
             ",\"%s\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[40,44]}}", name);
    buffer file = forged(json, 44, 1);
    refused(params, ctx, luna_load(params, luna_bytes(file.at, file.size)), LUNA_MISMATCH,
            LUNA_ERROR_FILE_TENSOR_EXTRA, values, "a strange name");
    luna_params *other = set_open(ctx, "second");
    CHECK(luna_load_matching(other, luna_bytes(file.at, file.size), &report) == LUNA_OK && report.loaded == 2 &&
          report.unused == 1 && report.missing == 0, "%d loaded, %d unused", (int)report.loaded, (int)report.unused);
    free(file.at);
  }
  free(values);
}
/* into bytes that are not borrowed; whole numbers; a size that no memory has; a kind that is none */
static void check_matching_refusals(luna_params *params, luna_ctx *ctx) {
  buffer whole = forged("{" FIRST "," SECOND("I32", "4", 40) "}", 40, 1), file = saved(params);
  luna_load_report report = {0};
  luna_params *set = set_open(ctx, "second");
  luna_model model;
  luna_io io = io_of(&file, SIZE_MAX);
  CHECK(luna_load_matching(set, luna_bytes(whole.at, whole.size), &report) == LUNA_OK && report.loaded == 1 &&
        report.missing == 1 && report.unused == 0, "whole numbers: %d loaded, %d missing", (int)report.loaded,
        (int)report.missing);
  io.size = UINT64_MAX;
  CHECK(luna_load(set, luna_callbacks(&io)) == LUNA_OUT_OF_MEMORY && luna_error_id_of(ctx) == LUNA_ERROR_NO_MEMORY &&
        !strchr(luna_error(ctx), '-'), "a file of 2^64 - 1 bytes: %s", luna_error(ctx));
  luna_begin_inference(ctx);
  CHECK(luna_load_model_of((luna_model_kind)99, &model, set, luna_bytes(file.at, file.size)) == LUNA_BAD_ARGUMENT &&
        luna_load_model_of((luna_model_kind)99, &model, NULL, luna_bytes(file.at, file.size)) == LUNA_BAD_ARGUMENT,
        "a model of kind 99 loads");
  luna_begin_inference(ctx);
  luna_begin_inference(ctx);
  free(whole.at), free(file.at);
}
/* a weight that is not finite has a scale that is none, and comes back so */
static void check_int8_nan(void) {
  heap h;
  luna_ctx *ctx = ctx_open(&h);
  luna_params *params = luna_params_open(ctx), *back = luna_params_open(ctx);
  const luna_init normal = {LUNA_INIT_NORMAL, 1};
  const int64_t shape[2] = {2, 40};
  buffer b = {NULL, 0, 0, 0, 0};
  const luna_io io = io_of(&b, SIZE_MAX);
  luna_tensor *w = luna_param(params, "fc1.weight", 2, shape, normal),
              *r = luna_param(back, "fc1.weight", 2, shape, normal);
  w->data[3] = NAN;
  CHECK(luna_save_int8(params, luna_callbacks(&io)) == LUNA_OK &&
        luna_load(back, luna_bytes(b.at, b.size)) == LUNA_OK, "%s", luna_error(ctx));
  CHECK(r->data[0] != r->data[0] && fabsf(r->data[40] - w->data[40]) < 0.05f, "NaN comes back as %g, and %g as %g",
        (double)r->data[0], (double)w->data[40], (double)r->data[40]);
  free(b.at), ctx_close(ctx, &h);
}
/* to bytes: as many as the callbacks get, the same; a buffer that is too small says how large it must be */
static void check_to_buffer(luna_params *params, luna_ctx *ctx) {
  buffer whole = saved(params);
  uint8_t *at = (uint8_t *)malloc(whole.size + 1);
  for (size_t room = whole.size + 1; room + 2 > whole.size; room--) {
    size_t written = 0;
    memset(at, 77, whole.size + 1);
    const luna_status status = luna_save(params, luna_buffer(at, room, &written));
    CHECK(written == whole.size && (room < whole.size ? status == LUNA_CANNOT_WRITE &&
          luna_error_id_of(ctx) == LUNA_ERROR_SAVE_BUFFER : status == LUNA_OK && memcmp(at, whole.at, written) == 0),
          "a file of %zu bytes into %zu: %s", whole.size, room, luna_error(ctx));
    CHECK(room > whole.size || at[room] == 77, "%zu bytes are not enough", room);
  }
  size_t written = 0;
  CHECK(luna_save(params, luna_buffer(NULL, 0, &written)) == LUNA_CANNOT_WRITE && written == whole.size, "its size");
  CHECK(luna_save(params, luna_buffer(NULL, 1, &written)) == LUNA_BAD_ARGUMENT &&
            luna_save(params, luna_buffer(at, whole.size, NULL)) == LUNA_BAD_ARGUMENT, "a null buffer");
  free(at), free(whole.at);
}
static void check_refusals(void) {
  heap h;
  luna_ctx *ctx = ctx_open(&h);
  luna_params *params = set_open(ctx, "second");
  float *values = values_of(params);
  for (size_t i = 0; i < sizeof wrong_files / sizeof *wrong_files; i++) {
    buffer file = forged(wrong_files[i].json, wrong_files[i].data, 1);
    const luna_io io = io_of(&file, file.size);
    refused(params, ctx, luna_load(params, luna_bytes(file.at, file.size)), wrong_files[i].status, wrong_files[i].id,
            values,
            wrong_files[i].json);
    refused(params, ctx, luna_load(params, luna_callbacks(&io)), wrong_files[i].status, wrong_files[i].id, values,
        wrong_files[i].json);
    free(file.at);
  }
  check_to_buffer(params, ctx);
  check_strange_names(params, ctx), check_matching_refusals(params, ctx), check_int8_nan();
  refused(params, ctx, luna_load(params, luna_bytes(NULL, 0)), LUNA_BAD_ARGUMENT, LUNA_ERROR_NULL_ARGUMENT, values,
          "no bytes");
  CHECK(luna_load(NULL, luna_bytes("", 0)) == LUNA_BAD_ARGUMENT && luna_load(params,
      luna_callbacks(NULL)) == LUNA_BAD_ARGUMENT &&
            luna_save(NULL, luna_callbacks(NULL)) == LUNA_BAD_ARGUMENT,
        "null arguments");
  free(values), ctx_close(ctx, &h);
}
/* a file cut at each byte; a reader that gives out at each byte; a writer that fails at each byte */
static void check_cuts(void) {
  heap h;
  luna_ctx *ctx = ctx_open(&h);
  luna_params *params = set_open(ctx, ODD_NAME);
  luna_params_set_text(params, odd_pairs[2][0], odd_pairs[2][1]);
  buffer file = saved(params);
  common_params(params, 5);
  float *values = values_of(params);
  for (size_t cut = 0; cut < file.size; cut++) {
    uint8_t *copy = (uint8_t *)common_alloc(cut);
    buffer half = {NULL, 0, 0, 0, 0};
    memcpy(copy, file.at, cut);
    refused(params, ctx, luna_load(params, luna_bytes(copy, cut)), LUNA_BAD_FILE, LUNA_ERROR_NOT_SAFETENSORS, values,
        "a file cut short");
    const luna_io reader = io_of(&file, cut), writer = io_of(&half, cut);
    refused(params, ctx, luna_load(params, luna_callbacks(&reader)), LUNA_CANNOT_READ, LUNA_ERROR_READ_FAILED, values,
        "a reader that gives out");
    refused(params, ctx, luna_save(params, luna_callbacks(&writer)), LUNA_CANNOT_WRITE, LUNA_ERROR_WRITE_FAILED, values,
        "a writer that fails");
    CHECK(half.size <= cut, "%d bytes are written after a failure at %d", (int)half.size, (int)cut);
    free(copy), free(half.at);
  }
  free(file.at), free(values), ctx_close(ctx, &h);
}

/* ---- many tensors and pairs: seconds are what quadratic work would take many of ---- */
enum { MANY = 20000 };
static void many_open(luna_params *params) {
  const luna_init normal = {LUNA_INIT_NORMAL, 1};
  int good = 0;
  for (int i = 0; i < MANY; i++) {
    char name[48];
    snprintf(name, sizeof name, "layers.%d.self_attn.weight", i);
    good += luna_param(params, name, 1, vector, normal) != NULL;
  }
  CHECK(good == MANY, "%d of %d parameters are made: %s", good, MANY, luna_params_tensor_count(params) ? "" : "none");
}
static void check_many(void) {
  const clock_t start = clock();
  heap h;
  luna_ctx *ctx = ctx_open(&h);
  luna_params *params = luna_params_open(ctx);
  luna_optimizer *adam;
  luna_load_report match = {0};
  int right = 0;
  many_open(params);
  adam = luna_adamw(params, NULL);
  float *values = values_of(params);
  buffer file = saved(params), training = {NULL, 0, 0, 0, 0}, again;
  const luna_io io = io_of(&training, SIZE_MAX);
  for (int i = 0; i < MANY; i++) {
    const char *name = "";
    const luna_tensor *t = luna_params_at(params, i, &name);
    right += t && t == luna_params_find(params, name) && atoi(name + 7) == i;
  }
  CHECK(right == MANY && !luna_params_at(params, MANY, NULL) && !luna_params_at(params, -1, NULL),
        "%d of %d parameters are found", right, MANY);
  common_params(params, 3);
  CHECK(luna_load(params, luna_bytes(file.at, file.size)) == LUNA_OK && unchanged(params, values),
        "luna_load: %s",
        luna_error(ctx));
  common_params(params, 3);
  CHECK(luna_load_matching(params, luna_bytes(file.at, file.size), &match) == LUNA_OK && match.loaded == MANY &&
        unchanged(params, values), "luna_load_matching: %s", luna_error(ctx));
  CHECK(luna_save_training(adam, luna_callbacks(&io)) == LUNA_OK, "luna_save_training: %s", luna_error(ctx));
  common_params(params, 3);
  CHECK(luna_load_training(adam, luna_bytes(training.at, training.size)) == LUNA_OK && unchanged(params, values),
        "luna_load_training: %s", luna_error(ctx));
  again = saved(params);
  CHECK(again.size == file.size && memcmp(again.at, file.at, file.size) == 0, "saved again, the file has other bytes");
  free(file.at), free(training.at), free(again.at), free(values), ctx_close(ctx, &h);
  CHECK((double)(clock() - start) / CLOCKS_PER_SEC < 20, "%d tensors take %.0f s", MANY,
        (double)(clock() - start) / CLOCKS_PER_SEC);
}
/* pairs replace those of their key in the set; a key with a zero, which no string is, stays with the file */
static void check_many_pairs(void) {
  const clock_t start = clock();
  heap h;
  luna_ctx *ctx = ctx_open(&h);
  luna_params *params = luna_params_open(ctx);
  char *json = (char *)common_alloc(MANY * 40 + 100), *end = json;
  luna_params_set_text(params, "own", "kept"), luna_params_set_text(params, "key7", "old");
  end += sprintf(end,
      "{\"__metadata__\":{\"zero\":\"one\",\"zero\\u0000\":\"two\",\"luna.step\":\"3\",\"\\u006cuna.kind\":\"4\"");
  for (int i = 0; i < MANY; i++) end += sprintf(end, ",\"key%d\":\"%d\"", i, i);
  sprintf(end, "}}");
  buffer file = forged(json, 0, 0), first, second;
  CHECK(luna_load(params, luna_bytes(file.at, file.size)) == LUNA_OK, "%s", luna_error(ctx));
  first = saved(params);
  CHECK(luna_load(params, luna_bytes(first.at, first.size)) == LUNA_OK &&
        luna_load(params, luna_bytes(file.at, file.size)) == LUNA_OK, "saved pairs do not load: %s", luna_error(ctx));
  second = saved(params);
  CHECK(first.size == second.size && memcmp(first.at, second.at, first.size) == 0, "loaded again, pairs are others");
  CHECK(strcmp(luna_params_get_text(params, "own"), "kept") == 0 &&
        strcmp(luna_params_get_text(params, "key7"), "7") == 0 &&
        strcmp(luna_params_get_text(params, "zero"), "one") == 0 &&
            !luna_params_get_text(params, "luna.step") && !luna_params_get_text(params, "luna.kind"),
        "pairs are not those of the file");
  free(json), free(file.at), free(first.at), free(second.at), ctx_close(ctx, &h);
  CHECK((double)(clock() - start) / CLOCKS_PER_SEC < 20, "%d pairs take %.0f s", MANY,
        (double)(clock() - start) / CLOCKS_PER_SEC);
}

/* ---- paths ---- */
static bool exists(const char *name) {
  FILE *file = fopen(name, "rb");
  if (file) fclose(file);
  return file != NULL;
}
/* what could not be written into a checkpoint is refused when it comes, not when hours later it is saved */
static void check_names(void) {
  heap h;
  luna_ctx *ctx = ctx_open(&h);
  luna_params *params = set_open(ctx, "second");
  const luna_init zeros = {LUNA_INIT_ZEROS, 0};
  char longest[1400];
  memset(longest, 'n', sizeof longest - 1);
  longest[sizeof longest - 1] = 0;
  CHECK(!luna_param(params, longest, 1, vector, zeros) && luna_error_id_of(ctx) == LUNA_ERROR_NAME_LENGTH, "\"%s\"",
      luna_error(ctx));
  CHECK(!luna_param(params, "\xff", 1, vector, zeros) && luna_error_id_of(ctx) == LUNA_ERROR_NOT_UTF8, "\"%s\"",
      luna_error(ctx));
  CHECK(!luna_param(params, "__metadata__", 1, vector, zeros) && luna_error_id_of(ctx) == LUNA_ERROR_NAME_RESERVED,
        "a parameter named __metadata__");
  CHECK(luna_params_set_text(params, "key", "\xc0\x80") != LUNA_OK && luna_error_id_of(ctx) == LUNA_ERROR_NOT_UTF8,
      "\"%s\"", luna_error(ctx));
  CHECK(luna_param(params, longest + 376, 1, vector, zeros) && luna_params_tensor_count(params) == 3,
        "1023 characters: \"%s\"", luna_error(ctx));
  buffer file = saved(params);
  CHECK(luna_load(params, luna_bytes(file.at, file.size)) == LUNA_OK, "1023 characters do not load: \"%s\"",
        luna_error(ctx));
  free(file.at), ctx_close(ctx, &h);
}
/* What a call takes once it does not take again: a pair that is set anew, a file that is loaded. */
static void check_steady(void) {
  heap h;
  luna_ctx *ctx = ctx_open(&h);
  luna_params *params = luna_params_open(ctx);
  const int64_t large[1] = {1 << 20};
  char number[24];
  for (int i = 100000; i < 100010; i++)
    snprintf(number, sizeof number, "%d", i), luna_params_set_text(params, "at", number);
  int64_t live = h.live;
  for (int i = 200000; i > 0; i--) snprintf(number, sizeof number, "%d", i), luna_params_set_text(params, "at", number);
  CHECK(h.live == live && strcmp(luna_params_get_text(params, "at"), "1") == 0,
        "200,000 values of a pair take %d bytes",
        (int)(h.live - live));
  CHECK(luna_params_set_text(params, "at", luna_params_get_text(params, "at")) == LUNA_OK &&
        strcmp(luna_params_get_text(params, "at"), "1") == 0, "a pair set to its own value");
  CHECK(luna_param(params, "large", 1, large, (luna_init){LUNA_INIT_ZEROS, 0}) && luna_save(params,
                                                                                            luna_path(path)) == LUNA_OK,
        "a large set: %s", luna_error(ctx));
  live = h.live;
  for (int i = 0; i < 3; i++) CHECK(luna_load(params, luna_path(path)) == LUNA_OK, "loading: %s", luna_error(ctx));
  CHECK(h.live < live + 4096, "a loaded file stays in %d bytes", (int)(h.live - live)); /* pairs are the set's */
  remove(path);
  ctx_close(ctx, &h);
}
static void check_paths(void) {
  heap h;
  luna_ctx *ctx = ctx_open(&h);
  luna_params *params = set_open(ctx, "second");
  float *values = values_of(params);
  buffer old = saved(params), empty = {NULL, 0, 0, 0, 0};
  char long_path[5000], below[400];
  CHECK(luna_save(params, luna_path(path)) == LUNA_OK && holds(path, &old) && leftovers() == 0, "luna_save: %s",
        luna_error(ctx));
  CHECK(luna_save(params, luna_path(path)) == LUNA_OK && holds(path, &old) && leftovers() == 0,
        "over an older file: %s",
        luna_error(ctx));
  common_params(params, 5);
  CHECK(luna_load(params, luna_path(path)) == LUNA_OK && unchanged(params, values), "luna_load: %s", luna_error(ctx));
  snprintf(below, sizeof below, "%s/none/model.safetensors", folder);
  refused(params, ctx, luna_save(params, luna_path(below)), LUNA_CANNOT_WRITE, LUNA_ERROR_SAVE_TEMPORARY, values,
      "a folder that is not there");
  refused(params, ctx, luna_load(params, luna_path(below)), LUNA_CANNOT_READ, LUNA_ERROR_CANNOT_OPEN, values,
      "a file that is not there");
  snprintf(below, sizeof below, "%s/model.safetensors", path);
  refused(params, ctx, luna_save(params, luna_path(below)), LUNA_CANNOT_WRITE,
          WINDOWS ? LUNA_ERROR_SAVE_TEMPORARY : LUNA_ERROR_SAVE_LOOKUP, values,
      "a file for a folder");
  CHECK(holds(path, &old), "the file taken for a folder has changed");
  refused(params, ctx, luna_save(params, luna_path(folder)), LUNA_CANNOT_WRITE, LUNA_ERROR_SAVE_IRREGULAR, values,
      "saving onto a folder");
  CHECK(leftovers() == 0, "saves that fail leave a temporary file");
  refused(params, ctx, luna_load(params, luna_path(folder)), LUNA_CANNOT_READ,
          WINDOWS ? LUNA_ERROR_CANNOT_OPEN : LUNA_ERROR_READ_IRREGULAR, values,
      "loading a folder");
  memset(long_path, 'x', sizeof long_path - 1);
  long_path[sizeof long_path - 1] = 0;
  refused(params, ctx, luna_save(params, luna_path(long_path)), LUNA_CANNOT_WRITE, LUNA_ERROR_SAVE_PATH, values,
      "a path too long");
  refused(params, ctx, luna_load(params, luna_path(long_path)), LUNA_CANNOT_READ, LUNA_ERROR_CANNOT_OPEN, values,
      "a path too long");
  FILE *file = fopen(path, "wb");
  if (file) fclose(file);
  CHECK(holds(path, &empty), "the test cannot empty its own file");
  refused(params, ctx, luna_load(params, luna_path(path)), LUNA_BAD_FILE, LUNA_ERROR_NOT_SAFETENSORS, values,
          "an empty file");
  CHECK(luna_save(params, luna_path(NULL)) == LUNA_BAD_ARGUMENT && luna_load(params,
                                                                             luna_path(NULL)) == LUNA_BAD_ARGUMENT &&
            luna_load(NULL, luna_path(path)) == LUNA_BAD_ARGUMENT,
        "null arguments");
  remove(path), free(old.at), free(values), (void)0, ctx_close(ctx, &h);
}

/* ---- what may lie at a path, or come between ---- */
#ifndef _WIN32
static bool is_link_to(const char *name, const char *to) {
  char text[100] = {0};
  return readlink(name, text, sizeof text - 1) == (ssize_t)strlen(to) && strcmp(text, to) == 0;
}
static int mode_of(const char *name) {
  struct stat s = {0};
  return stat(name, &s) == 0 ? (int)(s.st_mode & 07777) : -1;
}
static void write_text(const char *name, const char *text) {
  FILE *file = fopen(name, "wb");
  CHECK(file && fputs(text, file) >= 0 && fclose(file) == 0, "the test cannot write %s", name);
}
/* names that a save may choose for its file, taken by links to another's file: that one stays as it is, and so do the
   links */
static void check_planted(luna_params *params, luna_ctx *ctx, const buffer *want) {
  char names[4][320], victim[320];
  buffer text = {(uint8_t *)(uintptr_t)"another's", 9, 0, 0, 0};
  snprintf(victim, sizeof victim, "%s/victim", folder);
  write_text(victim, "another's");
  for (int i = 0; i < 4; i++) {
    if (i == 3) snprintf(names[i], sizeof names[i], "%s.tmp", path);
    else snprintf(names[i], sizeof names[i], "%s/.luna-%d.tmp", folder, i);
    remove(names[i]);
    if (i == 1) CHECK(link(victim, names[i]) == 0, "no link");
    else CHECK(symlink("victim", names[i]) == 0, "no link");
  }
  CHECK(luna_save(params, luna_path(path)) == LUNA_OK && holds(path, want) && !is_link_to(path, "victim"),
        "beside planted links: %s", luna_error(ctx));
  CHECK(holds(victim, &text), "saving writes through a planted link");
  for (int i = 0; i < 4; i++)
    CHECK(i == 1 ? exists(names[i]) : is_link_to(names[i], "victim"), "%s was not luna.h's and is gone", names[i]),
        remove(names[i]);
  write_text(names[3], "another's"); /* a file of the name that temporary files once had */
  CHECK(luna_save(params, luna_path(path)) == LUNA_OK && holds(names[3], &text), "saving overwrites another's file");
  remove(names[3]), remove(victim);
}
static void check_links(luna_params *params, luna_ctx *ctx, const buffer *want) {
  char a[320], b[320], target[320];
  snprintf(a, sizeof a, "%s/a", folder), snprintf(b, sizeof b, "%s/b", folder),
      snprintf(target, sizeof target, "%s/below", folder);
  mkdir(target, 0777);
  snprintf(target, sizeof target, "%s/below/target", folder);
  CHECK(symlink("b", a) == 0 && symlink("below/target", b) == 0, "no links");
  for (int twice = 0; twice < 2; twice++) { /* a link to a link to nothing yet; then to a file */
    CHECK(luna_save(params, luna_path(a)) == LUNA_OK && holds(target, want) && is_link_to(a, "b") && is_link_to(b,
        "below/target"),
          "through links: %s", luna_error(ctx));
    write_text(target, "older");
  }
  remove(target), remove(b);
  CHECK(symlink("a", b) == 0 && luna_save(params, luna_path(a)) == LUNA_CANNOT_WRITE &&
      luna_error_id_of(ctx) == LUNA_ERROR_SAVE_LINK && is_link_to(a, "b"), "links in a circle: %s", luna_error(ctx));
  remove(a), remove(b);
  snprintf(target, sizeof target, "%s/below", folder);
  rmdir(target);
}
static void check_modes(luna_params *params, luna_ctx *ctx) {
  static const int modes[] = {0600, 0644, 0640, 0400, 0666};
  const mode_t mask = umask(022);
  remove(path);
  CHECK(luna_save(params, luna_path(path)) == LUNA_OK && mode_of(path) == 0644, "a new file has mode %o: %s",
        (unsigned)mode_of(path), luna_error(ctx));
  for (int i = 0; i < 5; i++) {
    chmod(path, (mode_t)modes[i]);
    CHECK(luna_save(params, luna_path(path)) == LUNA_OK && mode_of(path) == modes[i], "mode %o becomes %o: %s",
          (unsigned)modes[i],
          (unsigned)mode_of(path), luna_error(ctx));
  }
  umask(mask);
}
static void check_no_files(luna_params *params, luna_ctx *ctx) {
  char fifo[320], device[320];
  struct stat s = {0};
  snprintf(fifo, sizeof fifo, "%s/fifo", folder), snprintf(device, sizeof device, "%s/device", folder);
  CHECK(mkfifo(fifo, 0666) == 0, "no fifo");
  CHECK(luna_save(params, luna_path(fifo)) == LUNA_CANNOT_WRITE && luna_error_id_of(ctx) == LUNA_ERROR_SAVE_IRREGULAR &&
      stat(fifo, &s) == 0 && S_ISFIFO(s.st_mode), "onto a fifo: %s", luna_error(ctx));
  const int writer = open(fifo, O_RDWR); /* or reading would wait for one */
  CHECK(luna_load(params, luna_path(fifo)) == LUNA_CANNOT_READ && luna_error_id_of(ctx) == LUNA_ERROR_READ_IRREGULAR,
        "from a fifo: %s", luna_error(ctx));
  close(writer);
  CHECK(access("/dev/zero", R_OK) != 0 || (luna_load(params, luna_path("/dev/zero")) == LUNA_CANNOT_READ &&
        luna_error_id_of(ctx) == LUNA_ERROR_READ_IRREGULAR), "from a device: %s", luna_error(ctx));
#ifdef __linux__
  /* a null device of our own, where one may be made: a wrong save as root replaces it */
  if (mknod(device, S_IFCHR | 0666, 0x103) == 0)
    CHECK(luna_save(params, luna_path(device)) == LUNA_CANNOT_WRITE &&
          luna_error_id_of(ctx) == LUNA_ERROR_SAVE_IRREGULAR &&
        stat(device, &s) == 0 && S_ISCHR(s.st_mode), "onto a device: %s", luna_error(ctx));
#endif
  CHECK(luna_save(params, luna_path(folder)) == LUNA_CANNOT_WRITE && luna_error_id_of(ctx) == LUNA_ERROR_SAVE_IRREGULAR,
      "onto a folder: %s", luna_error(ctx));
  remove(fifo), remove(device);
}
/* processes that save over one path at once: each succeeds, and the file is always one of theirs */
enum { SAVERS = 4, SAVES = 60 };
static void check_savers(luna_params *params, luna_ctx *ctx) {
  int status = 0, failures = 0, torn = 0;
  float *values[SAVERS + 1];
  values[SAVERS] = values_of(params);
  CHECK(luna_save(params, luna_path(path)) == LUNA_OK, "%s", luna_error(ctx));
  fflush(stdout);
  for (int i = 0; i < SAVERS; i++) {
    common_params(params, 40 + (uint64_t)i);
    values[i] = values_of(params);
    if (fork() != 0) continue;
    for (int k = 0; k < SAVES; k++) status += luna_save(params, luna_path(path)) != LUNA_OK;
    _exit(status);
  }
  for (int running = SAVERS; running > 0;) {
    bool known = false;
    const luna_status loaded = luna_load(params, luna_path(path));
    for (int i = 0; i <= SAVERS; i++) known = known || unchanged(params, values[i]);
    torn += loaded != LUNA_OK || !known;
    if (waitpid(-1, &status, WNOHANG) <= 0) continue;
    failures += WIFEXITED(status) ? WEXITSTATUS(status) : SAVES;
    running--;
  }
  CHECK(failures == 0, "%d of %d saves at once fail", failures, SAVERS * SAVES);
  CHECK(torn == 0 && leftovers() == 0, "beside saves at once: %d times no file of theirs, %d files left", torn,
        leftovers());
  for (int i = 0; i <= SAVERS; i++) free(values[i]);
}
/* threads of one process, each with a context of its own */
static void *save_often(void *seed) {
  luna_options options = {0};
  int64_t failures = 0;
  options.threads = 1, options.seed = (uint64_t)(uintptr_t)seed;
  luna_ctx *ctx = luna_open(&options);
  luna_params *params = luna_params_open(ctx);
  const luna_init normal = {LUNA_INIT_NORMAL, 1};
  failures += !luna_param(params, "first", 2, matrix, normal); /* no CHECK: it counts in the main thread */
  for (int k = 0; k < SAVES; k++) failures += luna_save(params, luna_path(path)) != LUNA_OK || luna_load(params,
      luna_path(path)) != LUNA_OK;
  luna_close(ctx);
  return (void *)(uintptr_t)failures;
}
static void check_threads(void) {
  pthread_t thread[SAVERS];
  void *failures;
  for (int i = 0; i < SAVERS; i++)
    if (pthread_create(&thread[i], NULL, save_often, (void *)(uintptr_t)(i + 1)) != 0) exit(2);
  for (int i = 0; i < SAVERS; i++) {
    pthread_join(thread[i], &failures);
    CHECK(failures == NULL, "thread %d: %d of %d saves fail", i, (int)(uintptr_t)failures, SAVES);
  }
  CHECK(leftovers() == 0, "threads that save leave %d files", leftovers());
}
/* processes in the middle of a save, where a limit on its file's size stops them: the file of one that is killed goes
   with the next save, that of one which lives stays */
static int ready_end;
static void stay(int number) {
  (void)number;
  if (write(ready_end, "", 1) == 1)
    for (;;) pause();
}
static int save_half(luna_params *params) {
  const struct rlimit max = {16, 16};
  signal(SIGXFSZ, stay);
  return setrlimit(RLIMIT_FSIZE, &max) == 0 ? (int)luna_save(params, luna_path(path)) : 99;
}
static void check_killed(luna_params *params, luna_ctx *ctx, const buffer *want) {
  pid_t child[2];
  int ready[2], status;
  char byte;
  fflush(stdout);
  if (!CHECK(pipe(ready) == 0, "no pipe")) return;
  for (int i = 0; i < 2; i++) {
    ready_end = ready[1];
    child[i] = fork();
    if (child[i] == 0) _exit(save_half(params));
    CHECK(read(ready[0], &byte, 1) == 1, "no saver");
  }
  CHECK(leftovers() == 2, "%d files while two are saving", leftovers());
  kill(child[0], SIGKILL), waitpid(child[0], &status, 0);
  for (int i = 0; i < 2; i++)
    CHECK(luna_save(params, luna_path(path)) == LUNA_OK && holds(path, want) && leftovers() == 1,
          "beside one that saves: %s, %d files left", luna_error(ctx), leftovers());
  kill(child[1], SIGKILL), waitpid(child[1], &status, 0);
  CHECK(leftovers() == 1 && luna_save(params, luna_path(path)) == LUNA_OK && holds(path, want) && leftovers() == 0,
        "after a killed save: %s, %d files left", luna_error(ctx), leftovers());
  close(ready[0]), close(ready[1]);
}
/* a disk that is full, at every byte: the old file stays, and nothing besides */
static void check_full(luna_params *params, const buffer *want) {
  int status, good = 0;
  fflush(stdout);
  for (size_t limit = 0; limit < want->size; limit += 1 + want->size / 40) {
    const pid_t child = fork();
    if (child == 0) {
      const struct rlimit max = {limit, limit};
      signal(SIGXFSZ, SIG_IGN);
      if (setrlimit(RLIMIT_FSIZE, &max) != 0) _exit(99);
      _exit((int)luna_save(params, luna_path(path)));
    }
    good += waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == LUNA_CANNOT_WRITE &&
        holds(path, want) && leftovers() == 0;
  }
  CHECK(good >= 39, "a full disk: only %d saves fail as they should", good);
}
static void check_between(void) {
  heap h;
  luna_ctx *ctx = ctx_open(&h);
  luna_params *params = set_open(ctx, "second");
  buffer want = saved(params);
  check_planted(params, ctx, &want);
  check_links(params, ctx, &want);
  check_modes(params, ctx);
  check_no_files(params, ctx);
  check_killed(params, ctx, &want);
  check_full(params, &want);
  check_savers(params, ctx);
  check_threads();
  remove(path), free(want.at), ctx_close(ctx, &h);
}
#endif

/* ---- language models ---- */
static luna_lm_config lm_config(void) {
  luna_lm_config c;
  memset(&c, 0, sizeof c);
  c.vocab = 11, c.layers = 2, c.layer.memory = 3;
  c.layer.dim = 8, c.layer.heads = 2, c.layer.ffn = 12, c.layer.convolution = 3, c.layer.pre_norm = true,
      c.layer.sharing = LUNA_SHARING_FULL;
  c.layer.activation = LUNA_ACTIVATION_GELU, c.layer.omega = LUNA_ACTIVATION_ELU1;
  return c;
}
static buffer lm_file(void) {
  const luna_lm_config config = lm_config();
  luna_lm model;
  heap h;
  luna_ctx *ctx = ctx_open(&h);
  luna_params *params = luna_params_open(ctx);
  CHECK(luna_lm_init(&model, params, &config) == LUNA_OK, "%s", luna_error(ctx));
  common_params(params, 21);
  buffer file = saved(params);
  ctx_close(ctx, &h);
  return file;
}
static void lm_logits(const luna_lm *model, luna_ctx *ctx, float out[2 * 5 * 11]) {
  int32_t *tokens = common_tokens(10, 3, 11);
  luna_begin_inference(ctx);
  CHECK(luna_read(luna_lm_forward(model, &(luna_input){ tokens, NULL, 2, 5, NULL }), out) == LUNA_OK, "%s",
        luna_error(ctx));
  free(tokens);
}
static bool lm_same_config(const luna_lm_config *a, const luna_lm_config *b) {
  return a->vocab == b->vocab && a->layers == b->layers && a->layer.memory == b->layer.memory &&
      a->layer.dim == b->layer.dim &&
         a->layer.heads == b->layer.heads && a->layer.ffn == b->layer.ffn &&
             a->layer.convolution == b->layer.convolution &&
         a->layer.pre_norm == b->layer.pre_norm && a->layer.sharing == b->layer.sharing &&
             a->layer.activation == b->layer.activation &&
         a->layer.omega == b->layer.omega;
}
/* owned from bytes and from a path, shared: the same model, logits and file */
static void check_lm(void) {
  const luna_lm_config config = lm_config();
  buffer file = lm_file();
  float want[110], got[110];
  FILE *out = fopen(path, "wb");
  CHECK(out && fwrite(file.at, 1, file.size, out) == file.size && fclose(out) == 0,
        "the test cannot write its own file");
  for (int way = 0; way < 3; way++) {
    heap h, hs;
    luna_ctx *ctx = ctx_open(&h), *sharer = ctx_open(&hs);
    luna_params *params = luna_params_open(ctx), *shared;
    luna_lm model, other;
    const luna_file from = way == 1 ? luna_path(path) : luna_bytes(file.at, file.size);
    const luna_status status = luna_load_model_of(LUNA_MODEL_LM, &model, params, from);
    if (!CHECK(status == LUNA_OK && lm_same_config(&model.config, &config), "way %d: %s", way, luna_error(ctx)))
      exit(1);
    lm_logits(&model, ctx, way ? got : want);
    if (way == 2) {
      shared = luna_params_share(sharer, params);
      CHECK(luna_lm_init(&other, shared, &config) == LUNA_OK && other.embedding->data == model.embedding->data,
            "sharing: %s",
            luna_error(sharer));
      lm_logits(&other, sharer, got);
      params = shared;
    }
    CHECK(way == 0 || memcmp(got, want, sizeof want) == 0, "way %d: other logits", way);
    buffer again = saved(params);
    CHECK(again.size == file.size && memcmp(again.at, file.at, file.size) == 0,
          "way %d: saved again, the file has other bytes", way);
    free(again.at), ctx_close(sharer, &hs), ctx_close(ctx, &h);
  }
  remove(path), free(file.at);
}

/* a gated feed-forward with another activation, norms of another kind: the file says so, and it streams */
static void check_gated(void) {
  luna_lm_config config = lm_config();
  config.layer.gated = true;
  config.layer.activation = LUNA_ACTIVATION_SILU;
  config.layer.norm = LUNA_NORM_RMS;
  config.layer.pre_norm = true;
  heap h, hs;
  luna_ctx *ctx = ctx_open(&h), *second = ctx_open(&hs);
  luna_params *params = luna_params_open(ctx), *loaded = luna_params_open(second);
  luna_lm model, other;
  float want[110], got[110] = {0};
  CHECK(luna_lm_init(&model, params, &config) == LUNA_OK && luna_params_find(params, "layers.0.fc3.weight") &&
        !luna_params_find(params, "layers.0.final_layer_norm.bias") && !luna_params_find(params, "layer_norm.bias"),
            "%s", luna_error(ctx));
  buffer file = saved(params);
  CHECK(luna_load_model_of(LUNA_MODEL_LM, &other, loaded, luna_bytes(file.at, file.size)) == LUNA_OK &&
        other.config.layer.gated &&
        other.config.layer.norm == LUNA_NORM_RMS, "gated: %s", luna_error(second));
  lm_logits(&model, ctx, want);
  lm_logits(&other, second, got);
  CHECK(memcmp(got, want, sizeof want) == 0, "a gated model has other logits when it is loaded");
  luna_stream *stream = luna_stream_open(&model, &(luna_stream_config){.batch = 2});
  int32_t *tokens = common_tokens(10, 3, 11);
  double worst = 0;
  for (int t = 0; t < 5; t++) {
    const float *logits = luna_stream_step(stream, (int32_t[]){tokens[t], tokens[5 + t]});
    for (int i = 0; i < 22 && logits; i++)
      worst = fmax(worst, fabs((double)(logits[i] - want[(i / 11 * 5 + t) * 11 + i % 11])));
    if (!logits) worst = INFINITY;
  }
  CHECK(worst < 1e-5, "a gated model's stream is off by %g: %s", worst, luna_error(ctx));
  luna_stream_close(stream), free(tokens);
  free(file.at), ctx_close(second, &hs), ctx_close(ctx, &h);
}

/* a model of as many layers as there may be: what saves loads, and streams */
static void check_deep(void) {
  heap h;
  luna_lm model;
  luna_lm_config config;
  const char *error = "";
  const clock_t start = clock();
  luna_ctx *ctx = ctx_open(&h);
  luna_params *params = luna_params_open(ctx);
  memset(&config, 0, sizeof config);
  config.vocab = 3, config.layers = 1024, config.layer.memory = 1, config.layer.dim = 2, config.layer.heads = 1,
      config.layer.ffn = 1, config.layer.convolution = 2;
  CHECK(luna_lm_init(&model, params, &config) == LUNA_OK && luna_params_tensor_count(params) > MANY, "%s",
        luna_error(ctx));
  buffer file = saved(params);
  params = luna_params_open(ctx);
  CHECK(luna_load_model_of(LUNA_MODEL_LM, &model, params, luna_bytes(file.at, file.size)) == LUNA_OK &&
        model.config.layers == 1024, "%s",
        luna_error(ctx));
  const size_t size = luna_stream_size(file.at, file.size, NULL, &error);
  CHECK(size > 0, "luna_stream_size: %s", error);
  void *memory = common_alloc(size);
  const luna_stream *stream = size ? luna_stream_open_bytes(file.at, file.size, NULL, memory, size, &error) : NULL;
  CHECK((stream != NULL) == common_little_endian(), "luna_stream_open_bytes: %s", error);
  free(memory), free(file.at), ctx_close(ctx, &h);
  CHECK((double)(clock() - start) / CLOCKS_PER_SEC < 20, "1024 layers take %.0f s",
        (double)(clock() - start) / CLOCKS_PER_SEC);
}

/* what a stream of single steps takes, with its recording and pointers of 64 bits: d 64, 2 layers, l 16; d 32, 1 layer,
   l 8 */
static void check_stream_bytes(void) {
  static const struct { int64_t vocab, layers, memory, dim; size_t max; } row[2] =
      {{256, 2, 16, 64, 130000}, {64, 1, 8, 32, 33600}};
  for (int i = 0; i < 2; i++) {
    heap h;
    luna_lm model;
    const luna_lm_config config = {.vocab = row[i].vocab, .layers = row[i].layers,
      .layer = {.dim = row[i].dim, .heads = 4, .memory = row[i].memory, .ffn = 4 * row[i].dim, .convolution = 4}};
    const char *error = "";
    luna_ctx *ctx = ctx_open(&h);
    luna_params *params = luna_params_open(ctx);
    CHECK(luna_lm_init(&model, params, &config) == LUNA_OK, "%s", luna_error(ctx));
    buffer file = saved(params);
    const size_t size = luna_stream_size(file.at, file.size, &(luna_stream_config){.chunk = 1}, &error);
    CHECK(size > 0 && size <= row[i].max, "a stream of %d dimensions takes %lu bytes: %s", (int)row[i].dim,
          (unsigned long)size, error);
    free(file.at), ctx_close(ctx, &h);
  }
}

/* the file with `from` in its header replaced by `to`; its data lie aligned again */
static buffer forged_from(const buffer *file, const char *from, const char *to) {
  size_t header = 0, data;
  for (int i = 7; i >= 0; i--) header = header << 8 | file->at[i];
  char *json = (char *)common_alloc(header + strlen(to) + 1), *at;
  memcpy(json, file->at + 8, header);
  at = strstr(json, from);
  if (!at) {
    CHECK(false, "the test's own file has no %s", from);
    exit(1);
  }
  memmove(at + strlen(to), at + strlen(from), strlen(at + strlen(from)) + 1);
  memcpy(at, to, strlen(to));
  buffer b = forged(json, 0, 0);
  data = file->size - 8 - header;
  buffer_write(&b, file->at + 8 + header, data);
  free(json);
  return b;
}
/* Claims are only claims: refused, with nothing left behind, and without having taken much more memory than the file
   itself has. */
static const char *const lm_claims[][2] = {
    {"\"luna.vocab\":\"11\"", "\"luna.vocab\":\"16777216\""},
    {"\"luna.vocab\":\"11\"", "\"luna.vocab\":\"12\""},
    {"\"luna.vocab\":\"11\"", "\"luna.vocab\":\"0\""},
    {"\"luna.vocab\":\"11\"", "\"luna.vocab\":\"-11\""},
    {"\"luna.vocab\":\"11\"", "\"luna.vocab\":\"99999999999999999999\""},
    {"\"luna.vocab\":\"11\"", "\"luna.vocab\":\"\""},
    {"\"luna.vocab\":\"11\"", "\"luna.vocab\":\"1e1\""},
    {"\"luna.vocab\":\"11\"", "\"luna.vocab\":\" 11\""},
    {"\"luna.vocab\"", "\"luna.Vocab\""},
    {"\"luna.layers\":\"2\"", "\"luna.layers\":\"1\""},
    {"\"luna.layers\":\"2\"", "\"luna.layers\":\"3\""},
    {"\"luna.layers\":\"2\"", "\"luna.layers\":\"1000\""},
    {"\"luna.layers\":\"2\"", "\"luna.layers\":\"4096\""},
    {"\"luna.layers\":\"2\"", "\"luna.layers\":\"4096\""},
  {"\"luna.layers\":\"2\"", "\"luna.layers\":\"999999999\""},
    {"\"luna.layers\":\"2\"", "\"luna.layers\":\"0\""},
    {"\"luna.memory\":\"3\"", "\"luna.memory\":\"1048576\""},
    {"\"luna.dim\":\"8\"", "\"luna.dim\":\"1048576\""},
    {"\"luna.dim\":\"8\"", "\"luna.dim\":\"16\""},
    {"\"luna.dim\":\"8\"", "\"luna.dim\":\"7\""},
    {"\"luna.heads\":\"2\"", "\"luna.heads\":\"3\""},
    {"\"luna.heads\":\"2\"", "\"luna.heads\":\"65536\""},
    {"\"luna.ffn\":\"12\"", "\"luna.ffn\":\"4194304\""},
    {"\"luna.convolution\":\"3\"", "\"luna.convolution\":\"1024\""},
    {"\"luna.convolution\":\"3\"", "\"luna.convolution\":\"0\""},
    {"\"luna.sharing\":\"1\"", "\"luna.sharing\":\"0\""},
    {"\"luna.sharing\":\"1\"", "\"luna.sharing\":\"9\""},
    {"\"luna.activation\":\"2\"", "\"luna.activation\":\"77\""},
    {"\"luna.pre_norm\":\"1\"", "\"luna.pre_norm\":\"0\""},
    {"\"causal_lm\"", "\"classifier\""},
    {"\"luna.kind\"", "\"luna.mind\""},
    {"\"__metadata__\"", "\"__metadata__\":{},\"x\""},
    {"\"layers.1.fc2.bias\"", "\"layers.1.fc2.bias2\""},
    {"\"layers.0.projected_embeddings\"", "\"layers.0.projected\""},
    {"\"embed_tokens.weight\"", "\"embed_tokens\""},
};
static void check_claims(void) {
  buffer file = lm_file();
  for (size_t i = 0; i < sizeof lm_claims / sizeof *lm_claims; i++) {
    heap h;
    luna_lm model;
    luna_ctx *ctx = ctx_open(&h);
    luna_params *params = luna_params_open(ctx);
    buffer wrong = forged_from(&file, lm_claims[i][0], lm_claims[i][1]);
    const int64_t before = h.live;
    const luna_status status = luna_load_model_of(LUNA_MODEL_LM, &model, params, luna_bytes(wrong.at, wrong.size));
    CHECK((status == LUNA_MISMATCH || status == LUNA_BAD_FILE) && luna_error(ctx)[0] &&
          luna_params_tensor_count(params) == 0 &&
              !luna_params_get_text(params, "luna.kind"),
          "%s: %s, \"%s\", %d parameters left", lm_claims[i][1], luna_status_text(status), luna_error(ctx),
              (int)luna_params_tensor_count(params));
    CHECK(h.live == before, "%s: %d bytes more than before stay in use", lm_claims[i][1], (int)(h.live - before));
    CHECK(h.max - before <= 8 * (int64_t)wrong.size + 100000, "%s: a file of %d bytes made luna.h take %d",
          lm_claims[i][1],
          (int)wrong.size, (int)(h.max - before));
    free(wrong.at), ctx_close(ctx, &h);
  }
  free(file.at);
}
static void check_lm_cuts(void) {
  heap h;
  luna_lm model;
  buffer file = lm_file();
  luna_ctx *ctx = ctx_open(&h);
  luna_params *params = luna_params_open(ctx);
  const int64_t before = h.live;
  int refusals = 0;
  for (size_t cut = 0; cut < file.size; cut++) {
    refusals += luna_load_model_of(LUNA_MODEL_LM, &model, params, luna_bytes(file.at, cut)) == LUNA_BAD_FILE &&
        luna_params_tensor_count(params) == 0 && h.live == before;
    luna_begin_inference(ctx);
  }
  CHECK(refusals == (int)file.size, "a language model cut short is refused %d times of %d", refusals, (int)file.size);
  CHECK(luna_param(params, "embed_tokens.weight", 1, vector, (luna_init){LUNA_INIT_ZEROS, 0}) != NULL, "%s",
        luna_error(ctx));
  CHECK(luna_load_model_of(LUNA_MODEL_LM, &model, params, luna_bytes(file.at, file.size)) != LUNA_OK &&
        luna_params_tensor_count(params) == 1,
        "a language model is loaded into a set that has its names");
  CHECK(luna_load_model_of(LUNA_MODEL_LM, NULL, params, luna_bytes(file.at, file.size)) == LUNA_BAD_ARGUMENT &&
            luna_load_model_of(LUNA_MODEL_LM, &model, params, luna_path(NULL)) == LUNA_BAD_ARGUMENT,
        "null arguments");
  free(file.at), ctx_close(ctx, &h);
}

/* ---- shared sets ---- */
static void check_untrainable(luna_params *params, luna_ctx *ctx, const char *what) {
  luna_begin_inference(ctx);
  CHECK(!luna_adamw(params, NULL) && luna_error_id_of(ctx) == LUNA_ERROR_SET_BORROWED &&
      luna_error_status(ctx) != LUNA_OK, "%s: luna_adamw: \"%s\"", what,
        luna_error(ctx));
  luna_begin_inference(ctx);
  CHECK(!luna_sgd(params, NULL) && luna_error_id_of(ctx) == LUNA_ERROR_SET_BORROWED, "%s: luna_sgd: \"%s\"", what,
      luna_error(ctx));
  luna_begin_inference(ctx);
}
static void check_shared(void) {
  heap h, hs;
  luna_ctx *ctx = ctx_open(&h), *sharer = ctx_open(&hs);
  const luna_init normal = {LUNA_INIT_NORMAL, 1};
  luna_params *owner = set_open(ctx, "second"), *shared = luna_params_share(sharer, owner),
              *narrow = luna_params_share(sharer, owner);
  buffer file = saved(owner);
  float *values = values_of(owner);
  CHECK(luna_param(shared, "first", 2, matrix, normal) && luna_param(shared, "second", 1, vector, normal) &&
        unchanged(shared, values) && !luna_params_find(shared, "first")->needs_grad,
        "sharing: %s", luna_error(sharer));
  CHECK(luna_load_matching(shared, luna_bytes(file.at, file.size), NULL) == LUNA_BAD_ARGUMENT &&
        luna_error_id_of(sharer) == LUNA_ERROR_SET_BORROWED, "matching into a shared set: %s", luna_error(sharer));
  luna_begin_inference(sharer);
  CHECK(!luna_param(narrow, "first", 1, vector, normal) && luna_error_id_of(sharer) == LUNA_ERROR_BORROW_SHAPE,
        "a parameter of another shape in the shared set: \"%s\"", luna_error(sharer));
  CHECK(!luna_param(shared, "third", 1, vector, normal) && luna_error_id_of(sharer) == LUNA_ERROR_BORROW_MISSING,
        "a parameter that the shared set lacks: \"%s\"", luna_error(sharer));
  check_untrainable(shared, sharer, "shared");
  refused(shared, sharer, luna_load(shared, luna_bytes(file.at, file.size)), LUNA_BAD_ARGUMENT, LUNA_ERROR_SET_BORROWED,
      values, "loading into a shared set");
  luna_begin_inference(sharer);
  luna_tensor *view = luna_reshape(luna_params_find(shared, "first"), 1, (const int64_t[]){6});
  CHECK(view && luna_write(view, values) == LUNA_BAD_ARGUMENT &&
        luna_error_id_of(sharer) == LUNA_ERROR_WRITE_BORROWED && unchanged(shared, values),
        "writing a view of a shared parameter: %s", luna_error(sharer));
  CHECK(!luna_params_share(sharer, NULL), "sharing nothing");
  free(file.at), free(values);
  ctx_close(sharer, &hs), ctx_close(ctx, &h);
}

/* ---- every allocation made to fail in turn ---- */
enum { SAVE, SAVE_PATH, LOAD_IO, LOAD_PATH, SET_PAIR, WAYS };
static luna_status allocation_try(int way, luna_params *params, buffer *file) {
  buffer out = {NULL, 0, 0, 0, 0};
  const luna_io reader = io_of(file, file->size), writer = io_of(&out, SIZE_MAX);
  const luna_status status = way == SAVE        ? luna_save(params, luna_callbacks(&writer))
                             : way == SAVE_PATH ? luna_save(params, luna_path(path))
                             : way == LOAD_IO   ? luna_load(params, luna_callbacks(&reader))
                             : way == LOAD_PATH ? luna_load(params, luna_path(path))
                                                : luna_params_set_text(params, "a new key", "a value");
  free(out.at);
  return status;
}
static void check_allocations(void) {
  for (int way = 0; way < WAYS; way++) {
    luna_status status = LUNA_OUT_OF_MEMORY;
    int failures = -1;
    for (int fail = 1; status != LUNA_OK && fail < 100; fail++, failures++) {
      heap h;
      luna_ctx *ctx = ctx_open(&h);
      luna_params *params = set_open(ctx, "second");
      buffer file = saved(params);
      luna_save(params, luna_path(path));
      if (way == SAVE_PATH) remove(path);
      common_params(params, 31);
      float *values = values_of(params);
      luna_close(ctx), ctx = ctx_open(&h); /* so that no block of the step lies ready */
      params = set_open(ctx, "second");
      common_params(params, 31);
      h.fail_at = h.calls + fail, h.fail_end = INT64_MAX; /* a smaller block that could be had instead fails too */
      status = allocation_try(way, params, &file);
      if (status != LUNA_OK) {
        h.fail_end = 0;
        refused(params, ctx, status, LUNA_OUT_OF_MEMORY, LUNA_ERROR_NO_MEMORY, values, "an allocation that fails");
        CHECK(!luna_params_get_text(params, "a new key") && (way != SAVE_PATH || (!exists(path) && leftovers() == 0)),
              "a failed call leaves something behind");
      } else CHECK(unchanged(params, values) == (way != LOAD_IO && way != LOAD_PATH),
                   "what is loaded has no effect, or what is saved has");
      free(file.at), free(values), ctx_close(ctx, &h), remove(path);
    }
    /* saving takes no memory */
    CHECK(status == LUNA_OK && (failures > 0) == (way != SAVE && way != SAVE_PATH),
          "way %d: after %d failed allocations: %s", way, failures, luna_status_text(status));
  }
}
/* names and texts of 300 KB, each of which needs a block of its own, and an index of 300 names */
static void ignore_pair(void *user, const char *key, const char *value) { (void)user, (void)key, (void)value; }
static void ignore_tensor(void *user, const luna_file_tensor *entry) { (void)user, (void)entry; }
static buffer large_texts(void) {
  enum { LONG = 300000 };
  char *json = (char *)common_alloc(4 * LONG), *at = json, *text = (char *)common_alloc(LONG + 1);
  memset(text, 't', LONG);
  at += sprintf(at, "{\"__metadata__\":{\"%s\":\"u%s\"},\"v%s\":", text, text, text);
  at += sprintf(at, "{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0]}");
  for (int i = 0; i < 300; i++)
    at += sprintf(at, ",\"%d\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0]}", i);
  strcpy(at, "}");
  buffer file = forged(json, 0, 0);
  free(json), free(text);
  return file;
}
static void check_large_allocations(void) {
  buffer file = large_texts();
  const luna_inspection pairs = {ignore_pair, NULL, NULL}, tensors = {NULL, ignore_tensor, NULL};
  for (int way = 0; way < 2; way++) {
    luna_status status = LUNA_OUT_OF_MEMORY;
    int failures = -1;
    for (int fail = 1; status != LUNA_OK && fail < 100; fail++, failures++) {
      heap h;
      luna_ctx *ctx = ctx_open(&h);
      h.fail_at = h.calls + fail, h.fail_end = INT64_MAX;
      status = luna_inspect(ctx, luna_bytes(file.at, file.size), way ? &tensors : &pairs);
      CHECK(status == LUNA_OK || (status == LUNA_OUT_OF_MEMORY && luna_error_id_of(ctx) == LUNA_ERROR_NO_MEMORY),
            "way %d, allocation %d: %s", way, fail, luna_error(ctx));
      ctx_close(ctx, &h);
    }
    CHECK(status == LUNA_OK && failures > (way ? 1 : 2), "way %d: %d failures", way, failures);
  }
  free(file.at);
}
static void check_lm_allocations(void) {
  buffer file = lm_file();
  luna_status status = LUNA_OUT_OF_MEMORY;
  int failures = -1;
  for (int fail = 1; status != LUNA_OK && fail < 2000; fail++, failures++) { /* once only, or from there on */
    heap h;
    luna_lm model;
    luna_ctx *ctx = ctx_open(&h);
    luna_params *params = luna_params_open(ctx);
    const int64_t before = h.live;
    h.fail_at = h.calls + fail, h.fail_end = fail % 2 ? INT64_MAX : h.fail_at + 1;
    status = luna_load_model_of(LUNA_MODEL_LM, &model, params, luna_bytes(file.at, file.size));
    CHECK(status == LUNA_OK || (status == LUNA_OUT_OF_MEMORY && luna_error(ctx)[0] &&
                                luna_params_tensor_count(params) == 0 && h.live == before),
          "allocation %d: %s, \"%s\", %d parameters", fail, luna_status_text(status), luna_error(ctx),
              (int)luna_params_tensor_count(params));
    if (status != LUNA_OK) {
      h.fail_end = 0;
      luna_begin_inference(ctx);
      CHECK(luna_load_model_of(LUNA_MODEL_LM, &model, params, luna_bytes(file.at, file.size)) == LUNA_OK,
            "a second try fails: %s",
            luna_error(ctx));
    }
    ctx_close(ctx, &h);
  }
  CHECK(status == LUNA_OK && failures > 50, "after %d failed allocations: %s", failures, luna_status_text(status));
  free(file.at);
}

/* ---- looking into a file: whatever it is, in its order ---- */
typedef struct seen {
  int pairs, tensors, readable;
  double sum;
  char text[256];
} seen;
static void see_pair(void *user, const char *key, const char *value) {
  seen *s = (seen *)user;
  s->pairs++;
  snprintf(s->text, sizeof s->text, "%s=%s", key, value);
}
static void see_tensor(void *user, const luna_file_tensor *entry) {
  seen *s = (seen *)user;
  float values[64];
  s->tensors++;
  if (entry->count > 64 || luna_file_tensor_read(entry, values) != LUNA_OK) return;
  s->readable++;
  for (int64_t i = 0; i < entry->count; i++) s->sum += (double)values[i];
  if (s->tensors == 1)
    snprintf(s->text + strlen(s->text), sizeof s->text - strlen(s->text), " %s %s %d %d", entry->name, entry->dtype,
             entry->rank, (int)entry->shape[0]);
}
static void check_inspect(void) {
  /* two numbers as F32, one as F16, one whole number; a pair with an escape */
  static const char header[] =
      "{\"__metadata__\":{\"who\":\"a \\\"b\\\"\"},\"x\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},"
      "\"h\":{\"dtype\":\"F16\",\"shape\":[1,1],\"data_offsets\":[8,10]},"
      "\"n\":{\"dtype\":\"I32\",\"shape\":[],\"data_offsets\":[10,14]}}";
  const uint8_t data[14] = {0, 0, 0x80, 0x3F, 0, 0, 0x20, 0xC1, 0, 0x3C, 7, 0, 0, 0}; /* 1, -10; 1; 7 */
  uint8_t bytes[8 + sizeof header + sizeof data];
  const size_t size = sizeof header - 1;
  heap h = {0};
  luna_ctx *ctx = ctx_open(&h);
  luna_inspection inspection = {0};
  seen s = {0};
  for (int i = 0; i < 8; i++) bytes[i] = (uint8_t)((uint64_t)size >> 8 * i);
  memcpy(bytes + 8, header, size);
  memcpy(bytes + 8 + size, data, sizeof data);
  inspection.pair = see_pair, inspection.tensor = see_tensor, inspection.user = &s;
  CHECK(luna_inspect(ctx, luna_bytes(bytes, 8 + size + sizeof data), &inspection) == LUNA_OK, "inspecting: %s",
        luna_error(ctx));
  CHECK(s.pairs == 1 && s.tensors == 3 && s.readable == 2 && s.sum == -8, "%d pairs, %d tensors, %d readable, sum %g",
        s.pairs, s.tensors, s.readable, s.sum);
  CHECK(strcmp(s.text, "who=a \"b\" x F32 1 2") == 0, "seen: %s", s.text);
  for (size_t cut = 0; cut < 8 + size + sizeof data; cut++)
    CHECK(luna_inspect(ctx, luna_bytes(bytes, cut), &inspection) == LUNA_BAD_FILE &&
        luna_error_id_of(ctx) == LUNA_ERROR_NOT_SAFETENSORS, "a file cut to %d bytes is inspected", (int)cut);
  CHECK(luna_inspect(ctx, luna_path("no/such/file"), &inspection) == LUNA_CANNOT_READ &&
      luna_error_id_of(ctx) == LUNA_ERROR_CANNOT_OPEN, "a missing file: %s", luna_error(ctx));
  CHECK(luna_inspect(ctx, luna_bytes(bytes, 9), NULL) == LUNA_BAD_ARGUMENT &&
        luna_error_id_of(ctx) == LUNA_ERROR_NULL_ARGUMENT && luna_inspect(NULL, luna_path("x"),
                                                                          &inspection) == LUNA_BAD_ARGUMENT,
            "nothing to report, no function to report it to");
  ctx_close(ctx, &h);
}

/* dropout comes back with the model, to the bit */
static bool memory_write(void *user, const void *bytes, size_t size) {
  uint8_t **at = (uint8_t **)user;
  memcpy(*at, bytes, size);
  *at += size;
  return true;
}
static void check_dropout(void) {
  static const float values[4] = {0.1f, 0.05f, 0.3f, 0.999f};
  static uint8_t bytes[1 << 17];
  for (int i = 0; i < 4; i++) {
    heap h = {0};
    luna_ctx *ctx = ctx_open(&h);
    luna_params *params = luna_params_open(ctx);
    luna_masked_lm model;
    luna_masked_lm_config config = {0};
    luna_model loaded;
    luna_io io = {0};
    uint8_t *at = bytes;
    io.write = memory_write, io.user = &at;
    config.vocab = 5, config.encoder.layers = 1, config.encoder.layer.dim = 8, config.encoder.layer.heads = 2;
    config.encoder.layer.dropout = values[i], config.encoder.layer.attention_dropout = values[(i + 1) % 4],
        config.encoder.layer.activation_dropout = values[(i + 2) % 4];
    CHECK(luna_masked_lm_init(&model, params, &config) == LUNA_OK && luna_save(params, luna_callbacks(&io)) == LUNA_OK,
          "saving: %s",
          luna_error(ctx));
    CHECK(luna_load_model(&loaded, luna_params_open(ctx), luna_bytes(bytes, (size_t)(at - bytes))) == LUNA_OK,
          "loading: %s",
          luna_error(ctx));
    const luna_layer_config *a = &model.config.encoder.layer, *b = &loaded.masked_lm.config.encoder.layer;
    CHECK(loaded.kind == LUNA_MODEL_MASKED_LM && a->dropout == b->dropout &&
          a->attention_dropout == b->attention_dropout && a->activation_dropout == b->activation_dropout,
          "dropout %.9g comes back as %.9g", (double)a->dropout, (double)b->dropout);
    ctx_close(ctx, &h);
  }
}

int main(void) {
  check_inspect();
  check_dropout();
  paths_open("checkpoints_test", "model.safetensors");
  check_round_trip();
  check_dtypes();
  check_refusals();
  check_cuts();
  check_names();
  check_many(), check_many_pairs(), check_steady();
  check_paths();
#ifndef _WIN32
  check_between();
#endif
  check_lm();
  check_gated();
  check_deep();
  if (sizeof(void *) <= 8 && common_little_endian()) check_stream_bytes();
  check_claims();
  check_lm_cuts();
  check_shared();
  check_allocations(), check_large_allocations();
  check_lm_allocations();
  rmdir(folder);
  return test_report("checkpoints");
}
