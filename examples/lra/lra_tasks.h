/* lra_tasks.h: the five tasks of the Long Range Arena (arXiv 2011.04006) as samples: sequences of bytes and a label.
   ListOps and Pathfinder are generated, by the published rules, or ListOps is read; Text, Retrieval and Image are read
   from plain files. Included by lra.c.

     task_open(&s)      0, or 2 after a sentence: samples of `task` from --data and --valid, or generated
     task_close()

   A sequence starts with a token of its own, CLS, the largest of the vocabulary. */

enum { LISTOPS, TEXT, RETRIEVAL, IMAGE, PATHFINDER, TASKS };
typedef struct task_kind {
  const char *name, *title;
  int64_t symbols, classes, parts;   /* symbols: without CLS */
  int64_t made[3];                   /* generated samples to learn from, to validate on and to test on: LRA's counts */
} task_kind;
static const task_kind tasks[TASKS] = {
  { "listops", "ListOps", SYMBOLS, 10, 1, { 96000, 2000, 2000 } },
  { "text", "Text", 256, 2, 1, { 0 } },
  { "retrieval", "Retrieval", 256, 2, 2, { 0 } },
  { "image", "Image", 256, 10, 1, { 0 } },
  { "pathfinder", "Pathfinder", 256, 2, 1, { 160000, 20000, 20000 } },
};
static const list_sizes arena_lists = { 501, 1999, 10, 10 }; /* lengths: both ends of 500 .. 2000 are left out */

typedef struct item { const unsigned char *at[2]; int64_t size[2]; int32_t label; } item; /* the bytes of each part */
static struct {
  const task_kind *task;
  int64_t longest;                   /* tokens of a sequence, with CLS; more are cut off */
  uint64_t seed;                     /* of what is generated */
  int64_t difficulty;                /* of Pathfinder */
  int64_t first, made;               /* the first sample that is generated, and how many are; the others are items */
  int64_t growing;                   /* so many of these, the first, are as simple as `grown` says, 0 to 1 */
  double grown;
  int64_t mirrored, step;            /* half of so many of the items, the first, are mirrored: others at other steps */
  int64_t moved, shift;              /* so many of the items, the first, are moved by up to `shift` pixels each way */
  int64_t marked;                    /* the tokens of so many made pictures, the first, have marks: mark_of_token() */
  int64_t dimmed;                    /* so many made pictures, the first, keep a share `dark` of their dark pixels */
  double dark;
  int64_t thinned;                   /* so many of the items, the first, keep a share `keep` of their pixels */
  double keep;
  item *items;
  int64_t count;
  contents files[2];
  list_file lists[2];
} data;

static int task_find(const char *name) {                   /* 0, or 2 after a sentence */
  for (int i = 0; i < TASKS; i++)
    if (strcmp(name, tasks[i].name) == 0) return data.task = &tasks[i], 0;
  return fail("there is no task %s; the tasks are listops, text, retrieval, image and pathfinder", name);
}

/* ---- files ------------------------------------------------------------------------------------------------------- */

static void add_item(item i) {
  if (data.count % 4096 == 0) data.items = (item *)grow(data.items, data.count + 4096, sizeof(item));
  data.items[data.count++] = i;
}

static int read_list_items(const char *path, int file) {
  list_file *f = &data.lists[file];
  if (lists_read(f, path)) return 2;
  for (int64_t i = 0; i < f->count; i++)
    add_item((item){ { f->lines[i].tokens }, { f->lines[i].size }, f->lines[i].answer });
  return 0;
}

static int32_t yes_no(const unsigned char *at, int64_t size) { /* -1: neither */
  static const char *const names[] = { "0", "1", "0.0", "1.0", "neg", "pos" };
  for (int i = 0; i < 6; i++)
    if ((int64_t)strlen(names[i]) == size && memcmp(at, names[i], (size_t)size) == 0) return i % 2;
  return -1;
}

/* Text: label TAB text. Retrieval: label TAB text TAB text, or, as the AAN release has it, label TAB id TAB id TAB text
   TAB text. */
static int read_line_items(const char *path, int file) {
  const bool pair = data.task->parts == 2;
  const unsigned char *line, *cells[6];
  int64_t at = 0, length, number = 0;
  if (read_lines_file(path, &data.files[file])) return 2;
  while ((line = next_line(data.files[file], &at, &length)) != NULL) {
    int count = 1;
    number++;
    if (length == 0) continue;
    cells[0] = line;
    for (int64_t i = 0; i < length && count < 6; i++) if (line[i] == '\t') cells[count++] = line + i + 1;
    const int32_t label = yes_no(line, (count > 1 ? cells[1] - 1 : line + length) - line);
    if (pair ? count != 3 && count != 5 : count != 2)
      return fail("%s: line %lld is not a label%s, with a tab before each", path, (long long)number,
                  pair ? ", a text and a text, nor has it two ids between" : " and a text");
    if (label < 0)
      return fail("%s: the label of line %lld is none of 0, 1, 0.0, 1.0, neg and pos", path, (long long)number);
    const unsigned char *last = cells[count - 1], *first = pair ? cells[count - 2] : last, *end = line + length;
    if (pair) add_item((item){ { first, last }, { last - 1 - first, end - last }, label });
    else add_item((item){ { last }, { end - last }, label });
  }
  return 0;
}

enum { PIXELS = 1024 };
/* CIFAR-10's binary batches, one or several joined by cat: records of a label and 1024 bytes each of red, green, blue;
   or gray ones: a label, 1024 bytes. */
static int read_image_items(const char *path, int file) {
  contents *f = &data.files[file];
  if (read_file(path, f)) return 2;
  for (int colours = 1; colours <= 3; colours += 2) {
    const int64_t record = 1 + colours * PIXELS, count = f->size / record;
    bool fine = f->size % record == 0;
    for (int64_t i = 0; i < count && fine; i++) fine = f->data[i * record] < 10;
    if (!fine) continue;
    for (int64_t i = 0; i < count; i++) {
      unsigned char *red = f->data + i * record + 1, *green = red + PIXELS, *blue = green + PIXELS;
      for (int k = 0; k < PIXELS && colours == 3; k++)     /* TensorFlow's rgb_to_grayscale of bytes; at red's place */
        red[k] = (unsigned char)((0.2989 * red[k] + 0.587 * green[k] + 0.114 * blue[k]) * (255.5 / 255));
      add_item((item){ { red }, { PIXELS }, red[-1] });
    }
    return 0;
  }
  return fail("%s has %lld bytes; it is not records of a label, 0 to 9, and an image of 3072 or 1024 bytes", path,
              (long long)f->size);
}

static int read_items(const char *path, int file) {
  const int64_t before = data.count;
  const bool lists = data.task == &tasks[LISTOPS], images = data.task == &tasks[IMAGE];
  if (lists ? read_list_items(path, file) : images ? read_image_items(path, file) : read_line_items(path, file))
    return 2;
  const long long count = (long long)(data.count - before);
  return count >= 10 ? 0 : fail("%s has %lld samples; the minimum is 10", path, count);
}

/* ---- samples ----------------------------------------------------------------------------------------------------- */

static span mirrored(span image) {
  static unsigned char out[PIXELS];
  for (int i = 0; i < PIXELS; i++) out[i] = image.at[i / SIDE * SIDE + SIDE - 1 - i % SIDE];
  return (span){ out, PIXELS };
}

static int in_picture(int at) {
  if (at < 0) return 0;
  return at < SIDE ? at : SIDE - 1;
}
/* Moved by chance, as `random` says: by up to data.shift pixels down or up, and right or left. The border's pixels fill
   what becomes free. */
static span moved_by(span image, uint64_t random) {
  static unsigned char out[PIXELS];
  const int64_t ways = 2 * data.shift + 1;
  const int down = (int)((int64_t)(random % (uint64_t)ways) - data.shift);
  const int right = (int)((int64_t)(random / 65536 % (uint64_t)ways) - data.shift);
  for (int i = 0; i < PIXELS; i++) {
    const int y = i / SIDE - down, x = i % SIDE - right;
    out[i] = image.at[in_picture(y) * SIDE + in_picture(x)];
  }
  return (span){ out, PIXELS };
}

/* A pixel's token with its mark, of pathfinder.h, and, where pixels are left out, its place in the sequence, from 1 on.
   A token that has neither is a gray or CLS. */
static int32_t marked_token(int32_t gray, int mark) { return gray | mark << 16; }
static int32_t placed_token(int32_t token, int at) { return token | at << 20; }
static int32_t gray_of_token(int32_t token) { return token & 0xFFFF; }
static int mark_of_token(int32_t token) { return token >> 16 & 15; }
static int64_t place_of_token(int32_t token, int64_t index) { return token >> 20 ? token >> 20 : index; }

/* A number of [0, 1), of the top 53 bits. */
static double share_drawn(uint64_t *random) { return (double)(splitmix(random) >> 11) / 9007199254740992.0; }

/* A made picture's tokens, with marks or not, and a share `dark` of the dark pixels; returns how many. */
static int32_t picture_tokens(const picture *p, bool marked, double dark, int32_t *tokens) {
  uint64_t random = p->random;
  int32_t count = 0;
  for (int i = 0; i < PIXELS; i++) {
    const double chosen = dark < 1 ? share_drawn(&random) : 0;
    const int32_t token = marked_token(p->pixels[i], marked ? p->marks[i] : DARK);
    if (p->marks[i] != DARK || chosen < dark) tokens[count++] = placed_token(token, dark < 1 ? i + 1 : 0);
  }
  return count;
}

/* An image's tokens: a share data.keep of its pixels with their places; returns how many. */
static int32_t thinned_tokens(span image, uint64_t random, int32_t *tokens) {
  int32_t count = 0;
  for (int i = 0; i < image.size && count < data.longest - 1; i++)
    if (share_drawn(&random) < data.keep) tokens[count++] = placed_token(image.at[i], i + 1);
  return count;
}

static int32_t fetch_item(int64_t index, int32_t *tokens, int32_t *lengths) {
  const item *i = &data.items[index];
  for (int64_t p = 0; p < data.task->parts; p++) {
    int32_t *to = tokens + p * data.longest;
    span part = { i->at[p], i->size[p] };
    if (index < data.mirrored && draw(2, data.step, index) % 2) part = mirrored(part);
    if (index < data.moved) part = moved_by(part, draw(3, data.step, index));
    if (index < data.thinned) lengths[p] = 1 + thinned_tokens(part, draw(4, data.step, index), to + 1);
    else lengths[p] = 1 + cut_bytes(part, data.longest - 1, to + 1);
    to[0] = (int32_t)data.task->symbols;
  }
  return i->label;
}

static int32_t fetch_made(int64_t index, int32_t *tokens, int32_t *lengths) {
  static int32_t list[2000];
  static picture p;
  const uint32_t task = (uint32_t)(data.task - tasks);
  uint32_t counter[4] = { (uint32_t)(data.first + index), 0, task, (uint32_t)data.difficulty }, random[4];
  luna_philox(counter, data.seed, random);
  const uint64_t seed = (uint64_t)random[0] << 32 | random[1];
  const double grown = index < data.growing ? data.grown : 1;
  int32_t label, size = PIXELS;
  if (data.task == &tasks[LISTOPS])
    label = list_make(lists_grown(arena_lists, grown), seed, INT64_MAX, list, &size);
  else {
    draw_picture(&p, pathfinder_grown(pathfinder_levels[data.difficulty], grown), seed);
    label = p.label;
    size = picture_tokens(&p, index < data.marked, index < data.dimmed ? data.dark : 1, list);
  }
  if (size > data.longest - 1) size = (int32_t)data.longest - 1;
  memcpy(tokens + 1, list, (size_t)size * sizeof(int32_t));
  tokens[0] = (int32_t)data.task->symbols;
  *lengths = 1 + size;
  return label;
}

static int32_t fetch(int64_t index, int32_t *tokens, int32_t *lengths) {
  return index < data.made ? fetch_made(index, tokens, lengths) : fetch_item(index - data.made, tokens, lengths);
}

/* Where `path` is null, generated samples; where `valid` is null, the last tenth of a file is held. measure: all are
   held, for a test. */
static int task_open(samples *s, const char *path, const char *valid, bool measure) {
  const task_kind *t = data.task;
  *s = (samples){ .title = path ? path : "generated samples", .vocab = t->symbols + 1, .classes = t->classes,
    .longest = data.longest, .parts = t->parts, .fetch = fetch };
  s->training = measure || path ? 0 : t->made[0], s->held = path || valid ? 0 : t->made[measure ? 2 : 1];
  data.first = measure ? t->made[0] + t->made[1] : 0;
  data.made = s->training + s->held;
  data.growing = s->training, data.grown = 1;
  if ((path || valid) && t == &tasks[PATHFINDER]) return fail("the samples of pathfinder are generated, not read");
  if (!path && t->made[0] == 0) return fail("%s needs --data FILE; %s --help says what is in it", t->name, program);
  if (path && read_items(path, 0)) return 2;
  if (path) s->held = measure ? data.count : valid ? 0 : data.count / 10, s->training = data.count - s->held;
  if (valid && read_items(valid, 1)) return 2;
  if (valid) s->held = data.made + data.count - s->training;
  return 0;
}

/* What tells these samples from others: how many there are, and of files a hash. */
static void task_mark(const samples *s, char *out, size_t size) {
  uint64_t hash = 1469598103934665603u;
  for (int64_t i = 0; i < data.count; i++)
    for (int64_t p = 0; p < data.task->parts; p++) {
      const item *one = &data.items[i];
      hash = (hash ^ (uint64_t)one->size[p] ^ (uint64_t)one->label << 40) * 1099511628211u;
      for (int64_t k = 0; k < one->size[p]; k++) hash = (hash ^ one->at[p][k]) * 1099511628211u;
    }
  snprintf(out, size, "%lld %lld %lld %016llx", (long long)s->training, (long long)s->held, (long long)data.made,
           (unsigned long long)hash);
}

static void task_close(void) {
  for (int i = 0; i < 2; i++) free(data.files[i].data), lists_close(&data.lists[i]);
  free(data.items);
}
