/* The reader and writer of safetensors: every sentence of refusal, text and numbers, a round trip, a writer that fails
   at each byte, files cut at every byte, every byte changed to every value, thousands of names in any order. What is
   read lies in an allocation of its own size. */
#include "test.h"
#define LUNA_IMPLEMENTATION
#include "luna.h"
#include "common.h"
#include <time.h>

/* ---- a file being written ---- */
static li_st_writer writer_to(common_bytes *b) {
  li_st_writer w;
  memset(&w, 0, sizeof w);
  w.write = common_write, w.user = b;
  return w;
}

/* ---- opens an exact copy at an odd address; what opens is walked to its last byte. Returns the reader's sentence or
   null. ---- */
static int walk_tensors(const li_st *st) {
  li_st_tensor t, found;
  size_t cursor = 0;
  int count = 0;
  for (; li_st_next(st, &cursor, &t); count++) {
    char name[64];
    const size_t size = li_st_decode(t.name, name, sizeof name);
    if (t.data < st->data || t.bytes > st->data_size || t.data - st->data > (int64_t)(st->data_size - t.bytes))
      return -1;
    if (t.count < 100000) {
      float *values = (float *)common_alloc((size_t)t.count * sizeof(float));
      li_st_floats(&t, values);
      free(values);
    }
    (void)li_st_borrow(&t);
    if (count < 50 && size < sizeof name && strlen(name) == size &&
        !(li_st_find(st, name, &found) && found.data == t.data)) return -1;
  }
  return count;
}
static bool walk_metadata(const li_st *st) {
  li_st_text key, value, found;
  size_t cursor = 0;
  while (li_st_meta_next(st, &cursor, &key, &value)) {
    char text[64];
    const size_t size = li_st_decode(key, text, sizeof text);
    if (size < sizeof text && strlen(text) == size && !li_st_meta(st, text, &found)) return false;
    li_st_decode(value, text, 5);
    li_st_decode(value, NULL, 0);
  }
  return true;
}
/* with an index, in memory that the caller frees */
static const char *open_indexed(li_st *st, const void *bytes, size_t size, uint64_t **memory) {
  const char *wrong = li_st_open(st, bytes, size);
  *memory = NULL;
  if (wrong) return wrong;
  *memory = (uint64_t *)common_alloc((st->tensors + st->pairs + 1) * sizeof(uint64_t));
  return li_st_index(st, *memory, *memory + st->tensors);
}
static const char *open_copy(const void *bytes, size_t size) {
  uint8_t *copy = (uint8_t *)common_alloc(size + 1);
  li_st st;
  uint64_t *memory;
  memcpy(copy + 1, bytes, size);
  const char *wrong = open_indexed(&st, copy + 1, size, &memory);
  for (int walking = 0; walking < 2 && !wrong; walking++) { /* by the index, then without */
    if (walk_tensors(&st) < 0 || !walk_metadata(&st))
      wrong = "opened, but what it names cannot be found, or lies outside the file";
    st.names = st.keys = NULL;
  }
  free(copy), free(memory);
  return wrong;
}

static uint8_t *file_of(const char *json, size_t json_size, size_t data, size_t *size) {
  uint8_t *file = (uint8_t *)common_alloc(8 + json_size + data);
  for (int i = 0; i < 8; i++) file[i] = (uint8_t)((uint64_t)json_size >> 8 * i);
  memcpy(file + 8, json, json_size);
  *size = 8 + json_size + data;
  return file;
}
/* want: part of the sentence it must be refused with; null: it must open */
static void expect(const char *json, size_t data, const char *want) {
  size_t size;
  uint8_t *file = file_of(json, strlen(json), data, &size);
  const char *wrong = open_copy(file, size);
  CHECK(want ? wrong && strstr(wrong, want) : !wrong, "%.120s: %s, not %s", json, wrong ? wrong : "opened",
        want ? want : "opened");
  free(file);
}

/* ---- every refusal ---- */
#define T(name, dtype, shape, begin, end) \
  "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":[" shape "],\"data_offsets\":[" #begin "," #end "]}"
#define A8 T("a", "F32", "2", 0, 8)
#define META(pairs) "{\"__metadata__\":" pairs "}"

typedef struct header { const char *json; size_t data; const char *wrong; } header;
static const header headers[] = {
  {"{}", 0, NULL}, {"{ }   ", 0, NULL}, {META("{}"), 0, NULL},
  {" {}", 0, "does not begin as"}, {"", 0, "does not begin as"},
  {"[]", 0, "does not begin as"},
  {"{}\n", 0, "other than spaces"}, {"{}}", 0, "other than spaces"}, {"{}", 1, "cover"},
  /* JSON */
  {"{" A8 "}", 8, NULL}, {"{" A8 ",}", 8, "JSON"}, {"{" A8 T("b", "F32", "0", 0, 0) "}", 8, "JSON"},
  {"{" A8 "{" T("b", "F32", "0", 0, 0) "}", 8, "JSON"}, {"{," A8 "}", 8, "JSON"},
  {"{\"__metadata__\":{\"a\\u12", 0, "a string has"}, {"{\"a\\", 0, "a string has"}, /* the header ends there */
  {"{" A8, 8, "JSON"}, {"{\t\r\n \"a\" : { \"shape\" : [ 1 , 2 ] , \"data_offsets\" :[0, 8 ] ,\"dtype\": \"F32\" } } ",
                        8, NULL},
  {"{\"a\":[]}", 0, "JSON"}, {"{\"a\":null}", 0, "JSON"}, {"{\"a\"}", 0, "JSON"}, {"{a:1}", 0, "JSON"},
  {"{\"a\":{\"dtype\":4,\"shape\":[2],\"data_offsets\":[0,8]}}", 8, "JSON"},
  {"{\"a\":{\"dtype\":\"F32\",\"shape\":2,\"data_offsets\":[0,8]}}", 8, "JSON"},
  /* dtype and shape */
  {"{" T("a", "F32", "", 0, 4) "}", 4, NULL}, {"{" T("a", "F32", "1,2,1,1,1,1,1,1", 0, 8) "}", 8, NULL},
  {"{" T("a", "F32", "1,2,1,1,1,1,1,1,1", 0, 8) "}", 8, "more than 8"},
  {"{" T("a", "F31", "2", 0, 8) "}", 8, "unknown dtype"}, {"{" T("a", "", "2", 0, 8) "}", 8, "unknown dtype"},
  {"{" T("a", "F\\u00332", "2", 0, 8) "}", 8, NULL},
  {"{" T("a", "F32", "-2", 0, 8) "}", 8, "whole"}, {"{" T("a", "F32", "02", 0, 8) "}", 8, "whole"},
  {"{" T("a", "F32", "2.0", 0, 8) "}", 8, "JSON"},
  {"{" T("a", "F32", "2e0", 0, 8) "}", 8, "JSON"}, {"{" T("a", "F32", "2,", 0, 8) "}", 8, "whole"},
  {"{" T("a", "F32", ",2", 0, 8) "}", 8, "whole"},
  {"{" T("a", "F32", "[2]", 0, 8) "}", 8, "whole"}, {"{" T("a", "F32", "9223372036854775807", 0, 8) "}", 8,
                                                     "too large"},
  {"{" T("a", "F32", "9223372036854775808", 0, 8) "}", 8, "too large"},
  {"{" T("a", "F32", "99999999999999999999999", 0, 8) "}", 8, "too large"},
  {"{" T("a", "F32", "4294967296,4294967296", 0, 0) "}", 0, "too large"},
  {"{" T("a", "F32", "4294967296,4294967296,1", 0, 0) "}", 0, "too large"},
      {"{" T("a", "F32", "0,4294967296", 0, 0) "}", 0, NULL},
  /* data_offsets */
  {"{" T("a", "U8", "1", 0, 18446744073709551617) "}", 1, "too large"},
      {"{" T("a", "F32", "2", 8, 0) "}", 8, "before it begins"},
  {"{" T("a", "F32", "2", 4, 12) "}", 8, "beyond"},
  {"{" T("a", "F32", "2", 0, 9223372036854775807) "}", 8, "beyond"},
      {"{" T("a", "F32", "2", 0, 4) "}", 8, "do not fit"},
  {"{" T("a", "F32", "1", 0, 8) "}", 8, "do not fit"},
  {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0]}}", 8, "number"},
  {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[]}}", 8, "two numbers"},
  {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8,8]}}", 8, "more than"},
  /* an entry's keys */
  {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2]}}", 8, "lacks"}, {"{\"a\":{}}", 8, "lacks"},
  {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8],\"shape\":[2]}}", 8, "key twice"},
  {"{\"a\":{\"dtype\":\"F32\",\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 8, "key twice"},
  {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8],\"x\":1}}", 8, "other than dtype"},
  /* places */
  {"{" A8 "," T("b", "F32", "1", 8, 12) "}", 12, NULL}, {"{" T("a", "F32", "1", 8, 12) "," T("b", "F32", "2", 0, 8) "}",
                                                         12, NULL},
  {"{" A8 "," T("b", "F32", "1", 8, 12) "}", 16, "cover"},
  {"{" A8 "," T("b", "F32", "1", 12, 16) "}", 16, "cover"}, {"{" A8 "," T("b", "F32", "1", 4, 8) "}", 8, "overlap"},
  {"{" T("a", "F32", "1", 0, 4) "," T("b", "F32", "1", 2, 6) "}", 8, "overlap"},
  {"{" T("a", "F32", "1", 0, 4) "," T("b", "F32", "1", 0, 4) "}", 8, "overlap"},
  {"{" T("a", "F32", "1", 4, 8) "," T("b", "F32", "1", 4, 8) "}", 8, "overlap"},
  {"{" T("a", "F32", "1", 0, 4) "," T("e", "F32", "0", 2, 2) "}", 4, NULL},
  {"{" T("a", "F32", "1", 4, 8) "," T("b", "F32", "1", 0, 4) "," T("e", "F32", "0", 2, 2) "}", 8, NULL},
  /* names */
  {"{" T("a", "F32", "1", 0, 4) "," T("a", "F32", "1", 4, 8) "}", 8, "same name"},
  {"{" T("a", "F32", "1", 0, 4) "," T("\\u0061", "F32", "1", 4, 8) "}", 8, "same name"},
  {"{" T("\xc3\xa9", "F32", "1", 0, 4) "," T("\\u00E9", "F32", "1", 4, 8) "}", 8, "same name"},
  {"{" T("\xf0\x9f\x98\x80", "F32", "1", 0, 4) "," T("\\ud83d\\uDE00", "F32", "1", 4, 8) "}", 8, "same name"},
  {"{" T("\xc3\xa9", "F32", "1", 0, 4) "," T("\xc3\xa8", "F32", "1", 4, 8) "}", 8, NULL},
  {"{" T("a\\u0000", "F32", "1", 0, 4) "," T("a", "F32", "1", 4, 8) "}", 8, NULL},
  {"{" T("b", "F32", "1", 0, 4) "," T("a", "F32", "1", 4, 8) "," T("b", "F32", "1", 8, 12) "}", 12, "same name"},
  {"{" T("", "F32", "1", 0, 4) "," T("", "F32", "1", 4, 8) "}", 8, "same name"},
  /* metadata */
  {META("{\"a\":\"b\",\"c\":\"d\"}"), 0, NULL}, {META("{\"a\":\"b\",\"a\":\"d\"}"), 0, "two keys"},
  {META("{\"b\":\"b\",\"a\":\"d\",\"b\":\"\"}"), 0, "two keys"},
  {META("{\"a\":1}"), 0, "other than strings"}, {META("{\"a\":{}}"), 0, "other than strings"},
      {META("\"a\""), 0, "not an object"},
  {META("null"), 0, "not an object"},
  {"{\"__metadata__\":{},\"__metadata__\":{}}", 0, "more than one"},
  {"{\"__metadata__\":{},\"\\u005f_metadata__\":{}}", 0, "more than one"}, {META("{\"a\":\"b\"},"), 0, "JSON"},
  {META("{\"a\":\"b\",}"), 0, "JSON"}, {"{\"__metadata__\":{\"a\":\"b\"}", 0, "JSON"},
  {"{" T("a", "U8", "0", 0, 0) ",\"__metadata__\":{\"k\":\"v\"}," T("b", "U8", "0", 0, 0) "}", 0, NULL},
};
static void check_headers(void) {
  static const char *const bad_text[] = {
    "\x80", "\xc0\x80", "\xc1\xbf", "\xc3", "\xe0\x9f\xbf", "\xe2\x82", "\xed\xa0\x80", "\xf0\x8f\xbf\xbf",
    "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "\xff", "\\x", "\\u12", "\\u12G4", "\\ud800", "\\ud800\\u0041",
    "\\ud800\\ud800", "\\ud800\\ue000", "\\ud800\\n", "\\udc00", "\\ud800x", "\x01", "\n", "\x1f", "\\u 123", "\\'"
  };
  char json[200];
  for (size_t i = 0; i < sizeof headers / sizeof *headers; i++)
    expect(headers[i].json, headers[i].data, headers[i].wrong);
  for (size_t i = 0; i < sizeof bad_text / sizeof *bad_text; i++) {
    snprintf(json, sizeof json, META("{\"a%s\":\"b\"}"), bad_text[i]);
    expect(json, 0, "a string has");
    snprintf(json, sizeof json, META("{\"b\":\"%s\"}"), bad_text[i]);
    expect(json, 0, "a string has");
  }
  for (int i = 0; i < LI_ST_DTYPES; i++) { /* three of each fit their bytes and no others */
    const int size = 3 * li_st_formats[i].size;
    snprintf(json, sizeof json, "{\"a\":{\"dtype\":\"%s\",\"shape\":[3],\"data_offsets\":[0,%d]}}",
             li_st_formats[i].name, size);
    expect(json, (size_t)size, NULL);
    snprintf(json, sizeof json, "{\"a\":{\"dtype\":\"%s\",\"shape\":[4],\"data_offsets\":[0,%d]}}",
             li_st_formats[i].name, size);
    expect(json, (size_t)size, "do not fit");
  }
}
static void expect_bytes(const uint8_t *bytes, size_t size, const char *want) {
  const char *wrong = open_copy(bytes, size);
  CHECK(wrong && strstr(wrong, want), "%d bytes: %s, not %s", (int)size, wrong ? wrong : "opened", want);
}
static void check_short(void) {
  uint8_t bytes[8] = {0};
  li_st st;
  for (size_t i = 0; i < 8; i++) expect_bytes(bytes, i, "8 bytes");
  expect_bytes(bytes, 8, "does not begin as");
  bytes[0] = 1;
  expect_bytes(bytes, 8, "inside its header");
  memset(bytes, 255, 8);
  expect_bytes(bytes, 8, "100 MB");
  CHECK(li_st_open(&st, NULL, 0) != NULL, "no bytes at all open");
}

/* ---- text ---- */
static li_st_text text_of(const char *s, size_t size) {
  li_st_text t;
  t.at = s, t.size = size;
  return t;
}
static void check_text(void) {
  static const char json[] = "\\\"\\\\\\/\\b\\f\\n\\r\\t\\u0041\\u00e9\\u20AC\\uD83D\\ude00",
    want[] = "\"\\/\b\f\n\r\tA\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80";
  const li_st_text t = text_of(json, sizeof json - 1), zero = text_of("a\\u0000b", 8), none = text_of("x", 0);
  char out[64];
  CHECK(li_st_decode(t, out, sizeof out) == sizeof want - 1 && strcmp(out, want) == 0, "escapes decode to %s", out);
  CHECK(li_st_equal(t, want) && !li_st_equal(t, "\"") && !li_st_equal(none, "x") && li_st_equal(none, ""),
        "texts compare wrongly");
  for (size_t room = 0; room <= sizeof want; room++) { /* cut at whole characters, ended by a 0, nothing beyond */
    char *cut = (char *)common_alloc(room);
    const size_t size = li_st_decode(t, cut, room), kept = room ? strlen(cut) : 0;
    CHECK(size == sizeof want - 1 && (room == 0 || kept < room) && strncmp(cut, want, kept) == 0 &&
          (want[kept] & 0xC0) != 0x80,
          "room for %d bytes: %d kept", (int)room, (int)kept);
    free(cut);
  }
  CHECK(!li_st_equal(zero, "a") && !li_st_equal(zero, "ab") && li_st_decode(zero, out, 9) == 3 &&
        memcmp(out, "a\0b", 4) == 0,
        "a zero within a text");
  const char *end = json + sizeof json - 1;
  CHECK(li_st_character(&end, json + sizeof json - 1) == LI_ST_BAD && !li_st_equal(text_of("\x80", 1), "\x80"),
        "a character after the end, or what is none is the same as itself");
  CHECK(li_st_decode(text_of("a\\x", 3), out, sizeof out) == 1 && strcmp(out, "a") == 0, "a bad escape decodes");
}

/* ---- 8 bits: a matrix has the scales that stand beside it, if they are one float a row ---- */
static void check_scales(void) {
  static const struct { const char *matrix, *scale; size_t data; bool scaled; } cases[] = {
    {"\"I8\",\"shape\":[2,3],\"data_offsets\":[0,6]}", "\"F32\",\"shape\":[2],\"data_offsets\":[6,14]}", 14, true},
    {"\"I8\",\"shape\":[6],\"data_offsets\":[0,6]}", "\"F32\",\"shape\":[2],\"data_offsets\":[6,14]}", 14, false},
    {"\"U8\",\"shape\":[2,3],\"data_offsets\":[0,6]}", "\"F32\",\"shape\":[2],\"data_offsets\":[6,14]}", 14, false},
    {"\"I8\",\"shape\":[2,3],\"data_offsets\":[0,6]}", "\"F16\",\"shape\":[2],\"data_offsets\":[6,10]}", 10, false},
    {"\"I8\",\"shape\":[2,3],\"data_offsets\":[0,6]}", "\"F32\",\"shape\":[2,1],\"data_offsets\":[6,14]}", 14, false},
    {"\"I8\",\"shape\":[2,3],\"data_offsets\":[0,6]}", "\"F32\",\"shape\":[3],\"data_offsets\":[6,18]}", 18, false},
  };
  enum { ROOM = LI_ST_NAME };
  static char name[ROOM], json[3 * ROOM];
  for (int i = 0; i < (int)(sizeof cases / sizeof *cases) + 1; i++) {
    const int k = i % (int)(sizeof cases / sizeof *cases), length = i == k ? 1 : ROOM - 1; /* a name too long for one */
    size_t size;
    li_st st;
    li_st_tensor t;
    memset(name, 'm', (size_t)length), name[length] = 0;
    snprintf(json, sizeof json, "{\"%s\":{\"dtype\":%s,\"%s.scale\":{\"dtype\":%s}", name, cases[k].matrix, name,
             cases[k].scale);
    uint8_t *file = file_of(json, strlen(json), cases[k].data, &size);
    const char *wrong = li_st_open(&st, file, size);
    CHECK(!wrong && li_st_value(&st, name, &t) && (t.scale != NULL) == (i == k && cases[k].scaled),
          "scales %d: %s", i, wrong ? wrong : "they are taken, or not");
    free(file);
  }
}

/* ---- numbers ---- */
static void check_numbers(const char *what, li_st_dtype dtype, const uint8_t *bytes, size_t size, const double *want,
                          int64_t count) {
  uint8_t *odd = (uint8_t *)common_alloc(size + 1);
  float out[16];
  li_st_tensor t;
  memcpy(odd + 1, bytes, size);
  memset(&t, 0, sizeof t);
  t.dtype = (int)dtype, t.count = count, t.data = odd + 1, t.bytes = size;
  CHECK(li_st_floats(&t, out), "%s cannot be read", what);
  for (int64_t i = 0; i < count; i++)
    CHECK(out[i] == (float)want[i] || (want[i] != want[i] && out[i] != out[i]), "%s %d is %g, not %g",
                                            what, (int)i, (double)out[i], want[i]);
  CHECK(!li_st_borrow(&t) || (dtype == LI_ST_F32 && (uintptr_t)t.data % sizeof(float) == 0),
        "%s is read in place", what);
  t.dtype = LI_ST_I32;
  CHECK(!li_st_floats(&t, out), "whole numbers are read as real ones");
  free(odd);
}
static void check_dtypes(void) {
  static const uint8_t f16[] = {0x00, 0x3c, 0x00, 0xc0, 0xff, 0x7b, 0x01, 0x00, 0x00, 0x04, 0x00, 0x7c, 0x00, 0xfc,
                                0x00, 0x80, 0x01, 0x7c};
  static const uint8_t bf16[] = {0x80, 0x3f, 0x49, 0x40, 0x80, 0xff, 0x01, 0x00, 0xc1, 0x7f},
    f32[] = {0, 0, 0x80, 0x3f, 0xdb, 0x0f, 0x49, 0xc0, 1, 0, 0, 0};
  static const uint8_t f64[] = {0, 0, 0, 0, 0, 0, 0xf0, 0x3f, 0x18, 0x2d, 0x44, 0x54, 0xfb, 0x21, 0x09, 0x40, 0x9c,
                                0x75, 0, 0x88, 0x3c,
                                0xe4, 0x37, 0x7e};
  const double want16[] = {1, -2, 65504, 5.9604644775390625e-08, 6.103515625e-05, INFINITY, -INFINITY, -0.0, NAN},
    wantb[] = {1, 3.140625, -INFINITY, 9.183549615799121e-41, NAN};
  const double want32[] = {1, -3.14159274101257324, 1.401298464324817e-45},
      want64[] = {1, 3.14159265358979312, INFINITY};
  check_numbers("F16", LI_ST_F16, f16, sizeof f16, want16, 9);
  check_numbers("BF16", LI_ST_BF16, bf16, sizeof bf16, wantb, 5);
  check_numbers("F32", LI_ST_F32, f32, sizeof f32, want32, 3);
  check_numbers("F64", LI_ST_F64, f64, sizeof f64, want64, 3);
  /* the way a machine of the other byte order reads F32 */
  for (uint32_t bits = 0; bits < 0x7F800000u; bits += 0x10001u) {
    float x;
    memcpy(&x, &bits, sizeof x);
    if ((float)li_st_real(bits, 8, 23) != x)
      CHECK(false, "pattern %08x is read as %g", (unsigned)bits, li_st_real(bits, 8, 23));
  }
}

/* ---- writing ---- */
enum { PAIRS = 3, SOURCES = 4 };
typedef struct metadata { const char *key, *value; } metadata;
typedef struct source { const char *name; int rank; const int64_t *shape; const float *data; } source;
typedef struct contents { const metadata *pairs; const source *sources; int pair_count, source_count; } contents;
static void put_contents(li_st_writer *w, const void *what) {
  const contents *c = (const contents *)what;
  for (int i = 0; i < c->pair_count; i++) li_st_put_pair(w, c->pairs[i].key, c->pairs[i].value);
  for (int i = 0; i < c->source_count; i++) {
    const source *s = &c->sources[i];
    luna_tensor like;
    memset(&like, 0, sizeof like);
    like.rank = s->rank;
    for (int a = 0; a < s->rank && a < 2; a++) like.shape[a] = s->shape[a];
    li_st_put_tensor(w, s->name, &like, s->data);
  }
}
static const metadata pairs[PAIRS] = {{"format", "pt"},
                                           {"odd \"\\\n\x01\x1f\x7f \xc3\xa9 \xf0\x9f\x98\x80", "tab\there"}, {"", ""}};
static const int64_t matrix[2] = {2, 3}, one[1] = {1}, empty[2] = {0, 5},
    huge[2] = {(int64_t)1 << 40, (int64_t)1 << 40};
static const float matrix_data[6] = {1, -2, 0.5f, 3e38f, 1e-45f, -(float)INFINITY}, one_data[1] = {42},
    scalar_data[1] = {7};
static const source sources[SOURCES] = {
  {"layer.0.weight", 2, matrix, matrix_data}, {"a\"b\\c\x02", 1, one, one_data}, {"empty", 2, empty, NULL},
  {"scalar", 0, NULL, scalar_data}};
static const contents all = {pairs, sources, PAIRS, SOURCES};

static void check_round_trip(common_bytes *b) {
  li_st_writer w = writer_to(b);
  li_st st;
  li_st_tensor t;
  li_st_text value;
  float back[6];
  CHECK(li_st_write(&w, put_contents, &all) && w.written == b->size, "nothing is written");
  const char *wrong = li_st_open(&st, b->at, b->size);
  if (!CHECK(!wrong && walk_tensors(&st) == SOURCES && walk_metadata(&st), "what was written: %s", wrong ? wrong
             : "is not what was given")) return;
  CHECK((8 + st.header_size) % LI_ALIGN == 0, "data begin at byte %d", (int)(8 + st.header_size));
  for (int i = 0; i < PAIRS; i++)
    CHECK(li_st_meta(&st, pairs[i].key, &value) && li_st_equal(value, pairs[i].value),
                                        "the pair %s is lost", pairs[i].key);
  CHECK(!li_st_meta(&st, "no", &value) && !li_st_find(&st, "no", &t) && !li_st_find(&st, "__metadata__", &t),
        "what is not there is found");
  for (int i = 0; i < SOURCES; i++) {
    const source *s = &sources[i];
    bool good = li_st_find(&st, s->name, &t) && t.dtype == LI_ST_F32 && t.rank == s->rank && li_st_floats(&t, back);
    for (int a = 0; good && a < t.rank; a++) good = t.shape[a] == s->shape[a];
    CHECK(good && (t.bytes == 0 || memcmp(back, s->data, t.bytes) == 0), "the tensor %s is not what was written",
          s->name);
    if (li_st_little()) CHECK(li_st_borrow(&t) != NULL, "the tensor %s cannot be read in place", s->name);
  }
}
static void check_failing_writer(size_t size) {
  for (size_t limit = 1; limit < size; limit++) {
    common_bytes b = {NULL, 0, 0, limit};
    li_st_writer w = writer_to(&b);
    CHECK(!li_st_write(&w, put_contents, &all) && w.failed && b.size <= limit && w.written == b.size,
          "a writer that fails at byte %d: %d written", (int)limit, (int)b.size);
    free(b.at);
  }
}
static void put_too_much(li_st_writer *w, const void *what) {
  (void)what;
  w->written += LI_ST_HEADER;
}
/* nothing is written when the header cannot be */
static void check_unwritable(void) {
  for (int i = 0; i < 6; i++) {
    common_bytes b = {NULL, 0, 0, 0};
    li_st_writer w = writer_to(&b);
    source tensor = sources[0];
    metadata text = pairs[0];
    const contents one_each = {&text, &tensor, 1, 1};
    if (i == 0) tensor.name = "\xff";
    if (i == 1) tensor.rank = 9;
    if (i == 2) tensor.shape = huge;
    if (i == 3) tensor.data = NULL;
    if (i == 4) text.value = "\xc3";
    if (i == 5) tensor.name = "__metadata__";
    CHECK(!li_st_write(&w, put_contents, &one_each) && w.failed && b.size == 0, "unwritable %d: %d bytes written", i,
          (int)b.size);
    free(b.at);
  }
  common_bytes b = {NULL, 0, 0, 0};
  li_st_writer w = writer_to(&b);
  CHECK(!li_st_write(&w, put_too_much, NULL) && w.failed && b.size == 0, "a header over 100 MB is written");
  w = writer_to(&b);
  const contents nothing = {NULL, NULL, 0, 0};
  CHECK(li_st_write(&w, put_contents, &nothing) && b.size == 64 && !open_copy(b.at, b.size),
        "a file of nothing has %d bytes", (int)b.size);
  free(b.at);
}

/* ---- hostile files: whatever they say, nothing outside them is read. How many open is counted only to show that some
   do. ---- */
static void check_mutations(const common_bytes *b) {
  uint8_t *copy = (uint8_t *)common_alloc(b->size);
  long opened = 0, refused = 0, sound = 0;
  for (size_t i = 0; i < b->size; i++) CHECK(open_copy(b->at, i) != NULL, "cut at byte %d, it opens", (int)i);
  for (size_t i = 0; i < b->size; i++)
    for (int v = 1; v < 256; v++) {
      memcpy(copy, b->at, b->size);
      copy[i] = (uint8_t)(copy[i] ^ v);
      const char *wrong = open_copy(copy, b->size);
      *(wrong ? &refused : &opened) += 1;
      sound += !(wrong && strncmp(wrong, "opened", 6) == 0);
    }
  for (size_t i = 8; i < b->size; i++) { /* a byte of the header dropped, its size mended */
    memcpy(copy, b->at, i);
    memcpy(copy + i, b->at + i + 1, b->size - i - 1);
    for (int k = 0; k < 8 && copy[k]-- == 0;) k++;
    const char *wrong = open_copy(copy, b->size - 1);
    *(wrong ? &refused : &opened) += 1;
    sound += !(wrong && strncmp(wrong, "opened", 6) == 0);
  }
  CHECK(opened > 1000 && refused > 1000 && sound == opened + refused,
        "of the changed files %ld open and %ld do not, %ld soundly", opened,
        refused, sound);
  free(copy);
}

/* ---- many names, in any order ---- */
enum { FORWARD, REVERSED, SHUFFLED };
enum { SOUND, OVERLAP, SAME_NAME };
static uint64_t drawn;
static size_t draw(size_t n) { return (size_t)(common_hash(5, ++drawn) % n); }
static const char *open_many(size_t n, int order, int damage) {
  size_t *begin = (size_t *)common_alloc(n * sizeof(size_t)), *length = (size_t *)common_alloc(n * sizeof(size_t)),
    *at = (size_t *)common_alloc(n * sizeof(size_t)), data = 0, size;
  char *json = (char *)common_alloc(n * 100 + 64), *end = json;
  const size_t twin = draw(n / 2); /* who takes the last one's name */
  li_st st;
  uint64_t *memory;
  for (size_t i = 0; i < n; i++) {
    begin[i] = data;
    data += length[i] = damage == OVERLAP && i >= n - 2 ? 3 : 1 + draw(5);
    at[i] = order == REVERSED ? n - 1 - i : i;
  }
  for (size_t i = n - 1; i > 0 && order == SHUFFLED; i--) {
    const size_t j = draw(i + 1), k = at[i];
    at[i] = at[j], at[j] = k;
  }
  if (damage == OVERLAP) begin[n - 2]++; /* one byte covered twice, one not at all */
  *end++ = '{';
  for (size_t i = 0; i < n; i++) {
    const size_t k = at[i], name = damage == SAME_NAME && k == twin ? n - 1 : k;
    end += snprintf(end, 100, "%s\"%07d\":{\"dtype\":\"U8\",\"shape\":[%d],\"data_offsets\":[%d,%d]}", i ? "," : "",
                    (int)name,
                    (int)length[k], (int)begin[k], (int)(begin[k] + length[k]));
  }
  *end++ = '}';
  uint8_t *file = file_of(json, (size_t)(end - json), data, &size);
  const char *wrong = open_indexed(&st, file, size, &memory);
  for (size_t i = 0; i < n && damage == SOUND && !wrong; i++) { /* every name leads to its own tensor */
    char name[16];
    li_st_tensor t;
    snprintf(name, sizeof name, "%07d", (int)i);
    if (!li_st_find(&st, name, &t) || t.data != st.data + begin[i] || t.bytes != length[i])
      wrong = "a name is not found";
  }
  free(file), free(json), free(begin), free(length), free(at), free(memory);
  return wrong;
}
static void check_many(void) {
  for (int i = 0; i < 150; i++) {
    const size_t n = 2 + draw(600);
    const char *wrong = open_many(n, i % 3, SOUND);
    CHECK(!wrong, "%d tensors: %s", (int)n, wrong);
    wrong = open_many(n, i % 3, OVERLAP);
    CHECK(wrong && strstr(wrong, "overlap"), "%d tensors of which two overlap: %s", (int)n, wrong ? wrong : "opened");
    wrong = open_many(n, i % 3, SAME_NAME);
    CHECK(wrong && strstr(wrong, "same name"), "%d tensors of which two have one name: %s", (int)n,
          wrong ? wrong : "opened");
  }
  const char *wrong = open_many(5000, SHUFFLED, SOUND);
  CHECK(!wrong, "5000 tensors in no order: %s", wrong);
  wrong = open_many(200000, FORWARD, SOUND);
  CHECK(!wrong, "200,000 tensors in order: %s", wrong);
  const clock_t start = clock();
  wrong = open_many(200000, SHUFFLED, SOUND);
  CHECK(!wrong, "200,000 tensors in no order: %s", wrong);
  CHECK((double)(clock() - start) / CLOCKS_PER_SEC < 20, "200,000 tensors take %.0f s",
        (double)(clock() - start) / CLOCKS_PER_SEC);
}
/* half a million pairs in no order; and again, but for the last, which has another's key */
static void check_pairs(void) {
  enum { N = 500000 };
  char *json = (char *)common_alloc((size_t)N * 24 + 64);
  const clock_t start = clock();
  for (int twice = 0; twice < 2; twice++) {
    char *end = json + sprintf(json, "{\"__metadata__\":{");
    size_t size;
    uint64_t *memory;
    li_st st;
    li_st_text value;
    for (uint32_t i = 0; i < N; i++)
      end += sprintf(end, "%s\"%08x\":\"%x\"", i ? "," : "", (unsigned)((twice && i == N - 1 ? 77 : i) * 2654435761u),
                     (unsigned)i);
    end += sprintf(end, "}}");
    uint8_t *file = file_of(json, (size_t)(end - json), 0, &size);
    const char *wrong = open_indexed(&st, file, size, &memory);
    if (twice) CHECK(wrong && strstr(wrong, "two keys"), "a key that is there twice: %s", wrong ? wrong : "opened");
    else CHECK(!wrong && li_st_meta(&st, "9e3779b1", &value) && li_st_equal(value, "1") &&
               !li_st_meta(&st, "1", &value), "%d pairs: %s", N, wrong);
    free(file), free(memory);
  }
  free(json);
  CHECK((double)(clock() - start) / CLOCKS_PER_SEC < 20, "%d pairs take %.0f s", N,
        (double)(clock() - start) / CLOCKS_PER_SEC);
}

/* ---- every error has a sentence, and no two the same ---- */
static void check_sentences(void) {
  for (int i = 1; i < LUNA_ERROR_COUNT; i++) {
    const char *sentence = li_sentence_of((luna_error_id)i);
    CHECK(*sentence, "error %d has no sentence", i);
    for (int j = 1; j < i; j++)
      CHECK(strcmp(sentence, li_sentence_of((luna_error_id)j)) != 0, "two say: %s", sentence);
  }
}

int main(void) {
  check_sentences();
  common_bytes b = {NULL, 0, 0, 0};
  check_headers();
  check_short();
  check_text();
  check_scales();
  check_dtypes();
  check_round_trip(&b);
  check_failing_writer(b.size);
  check_unwritable();
  check_mutations(&b);
  check_many();
  check_pairs();
  free(b.at);
  return test_report("safetensors");
}
