/* Safetensors files as structures, and mutations of them whose header parses: what fuzz_safetensors.c feeds its doors
   with. Include it after test.h, luna.h and common.h. */
#ifndef FUZZ_FILES_H
#define FUZZ_FILES_H

/* ---- bytes ---- */
/* a header, as safetensors files begin */
static void buffer_header(common_bytes *b, const char *json, size_t size, uint64_t claim) {
  for (int i = 0; i < 8; i++) common_write(b, &(uint8_t){(uint8_t)(claim >> 8 * i)}, 1);
  common_write(b, json, size);
}

/* ---- a file as a structure; one that does not fit is left as it is ---- */
enum { FILE_PAIRS = 128, FILE_TENSORS = 320, FILE_TEXT = 96 };
typedef struct file_pair { char key[FILE_TEXT], value[FILE_TEXT]; } file_pair;
typedef struct file_tensor {
  char name[FILE_TEXT];
  int dtype, rank;                   /* li_st_dtype */
  int64_t shape[LI_ST_RANK];
  uint8_t *data;                     /* owned */
  size_t bytes;
} file_tensor;
typedef struct structure {
  file_pair pairs[FILE_PAIRS];
  file_tensor tensors[FILE_TENSORS];
  int pair_count, tensor_count;
  bool backward;                     /* the data lie in the opposite order of the header */
} structure;

static void file_free(structure *f) {
  for (int i = 0; i < f->tensor_count; i++) free(f->tensors[i].data);
  f->tensor_count = f->pair_count = 0;
}
/* the element count that the shape and dtype ask for, in bytes; past `max`: SIZE_MAX */
static size_t file_bytes(const file_tensor *t, size_t max) {
  const int64_t count = li_st_count(t->rank, t->shape);
  const size_t size = (size_t)li_st_formats[t->dtype].size;
  return count < 0 || (uint64_t)count > max / size ? SIZE_MAX : (size_t)count * size;
}
/* data of that many bytes: what there is, over and over; false when it would be more than `max` */
static bool file_resize(file_tensor *t, size_t max) {
  const size_t bytes = file_bytes(t, max), old = t->bytes;
  if (bytes == SIZE_MAX) return false;
  if (bytes > old) t->data = (uint8_t *)realloc(t->data, bytes);
  for (size_t i = old; i < bytes; i++) t->data[i] = (uint8_t)(old ? t->data[i - old] : i % 4 == 3 ? 0x3F : 0);
  t->bytes = bytes;
  return true;
}
static bool file_add(structure *f, const file_tensor *from) {
  if (f->tensor_count == FILE_TENSORS) return false;
  file_tensor *t = &f->tensors[f->tensor_count++];
  *t = *from;
  t->data = (uint8_t *)malloc(from->bytes ? from->bytes : 1);
  if (from->bytes) memcpy(t->data, from->data, from->bytes);
  return true;
}
static bool file_parse(structure *f, const uint8_t *bytes, size_t size) {
  li_st st;
  li_st_tensor t;
  li_st_text key, value;
  f->pair_count = f->tensor_count = 0;
  f->backward = false;
  if (li_st_open(&st, bytes, size) || st.pairs > FILE_PAIRS || st.tensors > FILE_TENSORS) return false;
  for (size_t cursor = 0; li_st_meta_next(&st, &cursor, &key, &value);) {
    file_pair *p = &f->pairs[f->pair_count++];
    li_st_decode(key, p->key, FILE_TEXT), li_st_decode(value, p->value, FILE_TEXT);
  }
  for (size_t cursor = 0; li_st_next(&st, &cursor, &t);) {
    file_tensor own = {"", t.dtype, t.rank, {0}, (uint8_t *)(uintptr_t)t.data, t.bytes};
    li_st_decode(t.name, own.name, FILE_TEXT);
    memcpy(own.shape, t.shape, (size_t)t.rank * sizeof t.shape[0]);
    file_add(f, &own);
  }
  return true;
}
/* false when it would be longer than `max` */
static bool file_write(const structure *f, size_t max, common_bytes *out) {
  common_bytes header = {NULL, 0, 0, 0};
  li_st_writer w = {0};
  char text[80];
  size_t total = 0, at = 0;
  w.write = common_write, w.user = &header;
  for (int i = 0; i < f->tensor_count; i++) total += f->tensors[i].bytes;
  li_st_write_text(&w, "{\"__metadata__\":{");
  for (int i = 0; i < f->pair_count; i++) {
    if (i) li_st_write_text(&w, ",");
    li_st_write_string(&w, f->pairs[i].key);
    li_st_write_text(&w, ":");
    li_st_write_string(&w, f->pairs[i].value);
  }
  li_st_write_text(&w, "}");
  for (int i = 0; i < f->tensor_count; i++) {
    const file_tensor *t = &f->tensors[i];
    const size_t begin = f->backward ? total - at - t->bytes : at;
    li_st_write_text(&w, ",");
    li_st_write_string(&w, t->name);
    snprintf(text, sizeof text, ":{\"dtype\":\"%s\",\"shape\":[", li_st_formats[t->dtype].name);
    li_st_write_text(&w, text);
    for (int k = 0; k < t->rank; k++) {
      snprintf(text, sizeof text, "%s%lld", k ? "," : "", (long long)t->shape[k]);
      li_st_write_text(&w, text);
    }
    snprintf(text, sizeof text, "],\"data_offsets\":[%.0f,%.0f]}", (double)begin, (double)(begin + t->bytes));
    li_st_write_text(&w, text);
    at += t->bytes;
  }
  li_st_write_text(&w, "}");
  while (!w.failed && header.size % 8) li_st_write_text(&w, " ");
  const bool fits = !w.failed && header.size + 8 + total <= max;
  if (fits) buffer_header(out, (const char *)header.at, header.size, header.size);
  for (int i = 0; i < f->tensor_count && fits; i++) {
    const file_tensor *t = &f->tensors[f->backward ? f->tensor_count - 1 - i : i];
    common_write(out, t->data, t->bytes);
  }
  free(header.at);
  return fits;
}

/* ---- random choices ---- */
static uint64_t random_next(uint64_t *r) {
  *r += 1;
  return common_hash(*r, 3);
}
static int random_below(uint64_t *r, int64_t n) { return n > 0 ? (int)(random_next(r) % (uint64_t)n) : 0; }
static int64_t random_number(uint64_t *r) {                /* small three times in four */
  static const int64_t numbers[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 33, 64, 255, 256, 1024, 4095, 65536, 1048576,
      16777216, 67108864, 999999999, 2147483647, 4294967296, INT64_MAX};
  return numbers[random_below(r, random_below(r, 4) ? 10 : (int)(sizeof numbers / sizeof numbers[0]))];
}

/* ---- mutations: each keeps names and keys unique by itself, or not: both are of interest ---- */
static void mutate_pair(structure *f, uint64_t *r) {
  static const char *const kinds[] = {"causal_lm", "classifier", "masked_lm", "seq2seq"};
  if (f->pair_count == 0) return;
  file_pair *p = &f->pairs[random_below(r, f->pair_count)], *other = &f->pairs[random_below(r, f->pair_count)];
  const file_pair was = *p;
  switch (random_below(r, 8)) {
  case 0:
    memcpy(p->value, other->value, FILE_TEXT), memcpy(other->value, was.value, FILE_TEXT);
    break;
  case 1:
    snprintf(p->value, FILE_TEXT, "%.0f", strtod(p->value, NULL) + 1 - 2 * random_below(r, 2));
    break;
  case 2: /* a digit of what may be a hexadecimal number */
    if (*p->value) p->value[random_below(r, (int64_t)strlen(p->value))] = "0123456789abcdef"[random_below(r, 16)];
    break;
  case 3:
    *p = f->pairs[--f->pair_count];
    break;
  case 4:
    for (p = f->pairs; p < f->pairs + f->pair_count; p++)
      if (strcmp(p->key, "luna.kind") == 0) strcpy(p->value, kinds[random_below(r, 4)]);
    break;
  default: snprintf(p->value, FILE_TEXT, "%lld", (long long)random_number(r));
  }
}
/* numbers that sums, norms and products go wrong by */
static void mutate_values(file_tensor *t, uint64_t *r) {
  static const uint32_t patterns[] = {0x7FC00000, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x00000001,
      0x80000000, 0x00800000, 0x5F000000, 0x58635FA9, 0xDF000000, 0x3F800000, 0, 0x33D6BF95, 0x42D20000, 0xC2D20000};
  const uint32_t pattern = patterns[random_below(r, sizeof patterns / sizeof patterns[0])];
  const size_t numbers = t->bytes / 4;
  size_t at = numbers ? random_next(r) % numbers : 0;
  const size_t end = numbers && random_below(r, 2) ? at + 1 : numbers;
  if (t->dtype != LI_ST_F32 && t->bytes) t->data[random_next(r) % t->bytes] = (uint8_t)random_next(r);
  for (; t->dtype == LI_ST_F32 && at < end; at++)
    for (int k = 0; k < 4; k++) t->data[4 * at + (size_t)k] = (uint8_t)(pattern >> 8 * k);
}
static void mutate_shape(file_tensor *t, size_t max, uint64_t *r) {
  const file_tensor was = *t;
  const int k = random_below(r, t->rank), way = random_below(r, 5);
  if (way == 0 && t->rank > 1) t->shape[0] = was.shape[1], t->shape[1] = was.shape[0];
  else if (way == 1 && t->rank < LI_ST_RANK) t->shape[t->rank++] = 1 + random_below(r, 2);
  else if (way == 2 && t->rank > 0) t->rank--;
  else if (way == 3) t->dtype = random_below(r, 2) ? LI_ST_F16 : random_below(r, LI_ST_DTYPES);
  else if (t->rank > 0) t->shape[k] = random_number(r);
  if (!file_resize(t, max)) t->rank = was.rank, t->dtype = was.dtype, memcpy(t->shape, was.shape, sizeof was.shape);
}
static void mutate_tensor(structure *f, size_t max, uint64_t *r) {
  if (f->tensor_count == 0) return;
  file_tensor *t = &f->tensors[random_below(r, f->tensor_count)];
  file_tensor *other = &f->tensors[random_below(r, f->tensor_count)];
  const file_tensor was = *t;
  switch (random_below(r, 10)) {
  case 0: /* which parameter it is */
    memcpy(t->name, other->name, FILE_TEXT), memcpy(other->name, was.name, FILE_TEXT);
    break;
  case 1: /* its place in the file */
    *t = *other, *other = was;
    break;
  case 2: free(t->data), *t = f->tensors[--f->tensor_count]; break;
  case 3:
    if (file_add(f, t)) snprintf(f->tensors[f->tensor_count - 1].name, FILE_TEXT, "luna.moment%d.%.60s",
                                 1 + random_below(r, 3), was.name);
    break;
  case 4: mutate_shape(t, max, r); break;
  case 5: f->backward = !f->backward; break;
  default: mutate_values(t, r);
  }
}
/* Some tensors become another file's: of the same name, else in the same place. */
static void mutate_swap(structure *f, const structure *from, uint64_t *r) {
  const int share = 1 + random_below(r, 8);
  for (int i = 0; i < from->tensor_count; i++) {
    const file_tensor *new_one = &from->tensors[i];
    int at = 0;
    if (random_below(r, share)) continue;
    while (at < f->tensor_count && strcmp(f->tensors[at].name, new_one->name) != 0) at++;
    if (at == f->tensor_count && random_below(r, 4)) at = i;
    if (at >= f->tensor_count) {
      file_add(f, new_one);
      continue;
    }
    uint8_t *old = f->tensors[at].data;
    char name[FILE_TEXT];
    const int last = f->tensor_count;
    memcpy(name, f->tensors[at].name, FILE_TEXT);
    if (!file_add(f, new_one)) return;
    f->tensors[at] = f->tensors[last];
    memcpy(f->tensors[at].name, name, FILE_TEXT);
    f->tensor_count = last;
    free(old);
  }
}

/* ---- a model of the file's config: what has been made of its numbers becomes a file that loads ---- */
enum { REFIT_BYTES = 1 << 20 };
static void *refit_allocate(void *user, size_t bytes) {
  size_t *left = (size_t *)user;
  if (bytes > *left) return NULL;
  *left -= bytes;
  return malloc(bytes);
}
static void refit_release(void *user, void *pointer, size_t bytes) {
  *(size_t *)user += bytes;
  free(pointer);
}
/* The parameters of the model that the metadata describe, with the file's values where those fit; one time in four with
   the moments of an optimiser. False where there is no such model, or it is large. */
static bool file_refit(const uint8_t *bytes, size_t size, uint64_t *r, common_bytes *out) {
  static const char *const kinds[] = {"causal_lm", "classifier", "masked_lm", "seq2seq"};
  li_st st;
  li_st_text kind;
  li_model_config m;
  luna_model model;
  luna_options options = {0};
  luna_load_report report = {0};
  static uint64_t index[FILE_TENSORS + FILE_PAIRS];
  size_t left = REFIT_BYTES;
  int k = 0;
  memset(&m, 0, sizeof m), memset(&model, 0, sizeof model);
  if (li_st_open(&st, bytes, size) || li_st_index(&st, index, index + st.tensors) ||
      !li_st_meta(&st, "luna.kind", &kind)) return false;
  while (k < 4 && !li_st_equal(kind, kinds[k])) k++;
  if (k == 4 || (k == 0 ? li_fields_read(&st, LI_OF_LM, &m.lm) : li_fields_read(&st, LI_OF_ENCODER, &m)))
    return false;
  if (k == 0 ? m.lm.layers > 4 : m.encoder.layers > 4 || m.seq2seq.decoder_layers > 4) return false;
  options.threads = 1, options.seed = random_next(r), options.isa = LUNA_ISA_SCALAR;
  options.allocator = (luna_allocator){refit_allocate, refit_release, &left};
  luna_ctx *ctx = luna_open(&options);
  luna_params *params = luna_params_open(ctx);
  model.kind = (luna_model_kind)(LUNA_MODEL_LM + k);
  bool good = params && li_model_init(&model, params, &m) == LUNA_OK;
  if (good) {
    const luna_io io = {NULL, common_write, out, 0};
    luna_load_matching(params, luna_bytes(bytes, size), &report);
    if (random_below(r, 4)) good = luna_save(params, luna_callbacks(&io)) == LUNA_OK;
    else good = luna_save_training(random_below(r, 2) ? luna_adamw(params, NULL) : luna_sgd(params, NULL),
                                   luna_callbacks(&io)) ==
        LUNA_OK;
  }
  luna_close(ctx);
  return good;
}

/* One change of the metadata, and in three of four the model of it; one that there is no model of is undone. */
static void mutate_config(structure *f, uint64_t *r) {
  static structure changed;
  common_bytes whole = {NULL, 0, 0, 0}, fitted = {NULL, 0, 0, 0};
  const bool fits = random_below(r, 4) != 0;
  if (!fits) mutate_pair(f, r);
  else if (file_write(f, REFIT_BYTES, &whole) && file_parse(&changed, whole.at, whole.size)) {
    mutate_pair(&changed, r);
    whole.size = 0;
    if (file_write(&changed, REFIT_BYTES, &whole) && file_refit(whole.at, whole.size, r, &fitted)) {
      file_free(f);
      file_parse(f, fitted.at, fitted.size);
    }
    file_free(&changed);
  }
  free(whole.at), free(fitted.at);
}
/* A file of which some mutations have been made; false: it is no file of the format, or it would become too long.
   `from`: another file, some of whose tensors it gets, or null */
static bool file_mutated(const uint8_t *bytes, size_t size, size_t max, const structure *from, uint64_t seed,
                         common_bytes *out) {
  static structure f;
  uint64_t r = seed;
  if (!file_parse(&f, bytes, size)) return false;
  if (from && from->pair_count && random_below(&r, 4) == 0)
    memcpy(f.pairs, from->pairs, sizeof f.pairs), f.pair_count = from->pair_count;
  if (from) mutate_swap(&f, from, &r);
  for (int i = random_below(&r, 4); i > 0; i--) mutate_config(&f, &r);
  for (int i = random_below(&r, 3); i > 0; i--) mutate_tensor(&f, max, &r);
  const bool good = file_write(&f, max, out);
  file_free(&f);
  return good;
}
#endif
