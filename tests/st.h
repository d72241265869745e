/* A safetensors file as the tests read it, without luna.h's reader: those of tests/data, and what luna.h writes.
   Include it after common.h. */
#ifndef ST_H
#define ST_H

typedef struct st_file { const char *header, *end; const uint8_t *data; size_t size; } st_file; /* size: of the data */
/* a tensor of the file, or a pair of its metadata: name and text */
typedef struct st_item {
  char name[256], text[1024], dtype[8]; /* longer ones are cut */
  bool is_pair;
  int rank;
  int64_t shape[8], count;
  const uint8_t *data;               /* little-endian, at any alignment */
} st_item;

/* moves over what stands between names and values; true when the character there is `c` */
static bool st_at(const st_file *s, const char **at, char c) {
  while (*at < s->end && strchr(" \n\t,:", **at)) ++*at;
  return *at < s->end && **at == c;
}
/* a string, decoded; *at moves behind it. Of \u there are control characters alone: the others are written as they
   are. */
static bool st_string(const st_file *s, const char **at, char *out, size_t room) {
  static const char letters[] = "bfnrt", meanings[] = "\b\f\n\r\t";
  size_t n = 0;
  if (!st_at(s, at, '"')) return false;
  for (++*at; *at < s->end && **at != '"'; ++*at) {
    char c = **at;
    unsigned code;
    if (c == '\\' && s->end - *at > 5) {
      c = *++*at;
      const char *letter = strchr(letters, c);
      if (letter) c = meanings[letter - letters];
      else if (c == 'u' && sscanf(*at + 1, "%4x", &code) == 1) c = (char)code, *at += 4;
    }
    if (n + 1 < room) out[n++] = c;
  }
  out[n] = 0;
  return (*at)++ < s->end;
}
/* a list of up to `most` whole numbers; -1 when there is none */
static int st_list(const st_file *s, const char **at, int64_t *out, int most) {
  int count = 0;
  if (!st_at(s, at, '[')) return -1;
  for (++*at; !st_at(s, at, ']'); count++) {
    char *next = NULL;
    if (count == most || *at == s->end) return -1;
    out[count] = (int64_t)strtoll(*at, &next, 10);
    if (next == *at) return -1;
    *at = next;
  }
  ++*at;
  return count;
}
static bool st_tensor(const st_file *s, const char **at, st_item *t) {
  int64_t place[2] = {-1, -1};
  char key[16];
  bool good = true;
  for (++*at; good && !st_at(s, at, '}');) {
    good = st_string(s, at, key, sizeof key);
    if (!good) break;
    if (strcmp(key, "dtype") == 0) good = st_string(s, at, t->dtype, sizeof t->dtype);
    else if (strcmp(key, "shape") == 0) good = (t->rank = st_list(s, at, t->shape, 8)) >= 0;
    else good = st_list(s, at, place, 2) == 2;
  }
  ++*at;
  t->count = 1;
  for (int i = 0; i < t->rank; i++) t->count *= t->shape[i];
  t->data = s->data + place[0];
  return good && place[0] >= 0 && place[0] <= place[1] && (uint64_t)place[1] <= s->size;
}
/* the next item, *cursor from 0; false behind the last, or where the header is none */
static bool st_next(const st_file *s, size_t *cursor, st_item *item) {
  const char *at = s->header + (*cursor ? *cursor : 1);
  bool good;
  memset(item, 0, sizeof *item);
  do {
    while (st_at(s, &at, '}')) at++; /* the metadata's end, or the header's */
    if (!st_string(s, &at, item->name, sizeof item->name)) return false;
  } while (strcmp(item->name, "__metadata__") == 0 && st_at(s, &at, '{') && at++);
  item->is_pair = st_at(s, &at, '"');
  if (item->is_pair) good = st_string(s, &at, item->text, sizeof item->text);
  else good = st_at(s, &at, '{') && st_tensor(s, &at, item);
  *cursor = (size_t)(at - s->header);
  return good;
}
static bool st_look(const st_file *s, const char *name, bool pair, st_item *item) {
  for (size_t cursor = 0; s->header && st_next(s, &cursor, item);)
    if (item->is_pair == pair && strcmp(item->name, name) == 0) return true;
  return false;
}
TEST_UNUSED static bool st_find(const st_file *s, const char *name, st_item *tensor) {
  return st_look(s, name, false, tensor);
}
TEST_UNUSED static bool st_meta(const st_file *s, const char *key, st_item *pair) {
  return st_look(s, key, true, pair);
}
/* bytes: of the file, which are to stay; returns null, or what is wrong */
TEST_UNUSED static const char *st_open(st_file *s, const uint8_t *bytes, size_t size) {
  uint64_t header = 0;
  memset(s, 0, sizeof *s);
  for (int i = 7; i >= 0 && size > 8; i--) header = header << 8 | bytes[i];
  if (header < 2 || header > size - 8) return "it has no header";
  s->header = (const char *)bytes + 8;
  s->end = s->header + header;
  s->data = bytes + 8 + header;
  s->size = size - 8 - (size_t)header;
  return NULL;
}
/* a file of disk; *bytes, which s points into, is to be freed */
TEST_UNUSED static const char *st_read(st_file *s, const char *path, uint8_t **bytes, size_t *size) {
  FILE *file = fopen(path, "rb");
  long length = -1;
  *bytes = NULL, *size = 0;
  if (file && fseek(file, 0, SEEK_END) == 0) length = ftell(file);
  if (length > 0) {
    *bytes = (uint8_t *)common_alloc((size_t)length);
    rewind(file);
    *size = fread(*bytes, 1, (size_t)length, file);
  }
  if (file) fclose(file);
  if (length <= 0) return "it cannot be read";
  return *size == (size_t)length ? st_open(s, *bytes, *size) : "it is cut short";
}

static uint64_t st_little(const uint8_t *at, int size) {
  uint64_t bits = 0;
  for (int i = size; i-- > 0;) bits = bits << 8 | at[i];
  return bits;
}
/* false when its numbers are not F32 or F64 */
TEST_UNUSED static bool st_floats(const st_item *t, float *out) {
  const bool wide = strcmp(t->dtype, "F64") == 0;
  if (!wide && strcmp(t->dtype, "F32") != 0) return false;
  for (int64_t i = 0; i < t->count; i++) {
    const uint64_t bits = st_little(t->data + (wide ? 8 : 4) * i, wide ? 8 : 4);
    const uint32_t half = (uint32_t)bits;
    double value;
    memcpy(&value, &bits, sizeof value);
    if (wide) out[i] = (float)value;
    else memcpy(out + i, &half, sizeof half);
  }
  return true;
}
TEST_UNUSED static bool st_integers(const st_item *t, int32_t *out) {
  if (strcmp(t->dtype, "I32") != 0) return false;
  for (int64_t i = 0; i < t->count; i++) out[i] = (int32_t)(uint32_t)st_little(t->data + 4 * i, 4);
  return true;
}

#endif
