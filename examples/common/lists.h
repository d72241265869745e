/* lists.h: nested lists of digits, [MAX 2 9 [MIN 4 7 ] 0 ], as the Long Range Arena makes them (arXiv 2011.04006):
   made, worked out, and read from files. Included after example.h and tokens.h, whose symbols are the tokens. */

/* tokens, brackets within brackets, members */
typedef struct list_sizes { int64_t shortest, longest, depth, args; } list_sizes;

/* ---- made -------------------------------------------------------------------------------------------------------- */

typedef struct list_maker { list_sizes sizes; uint64_t random; int32_t *tokens; int64_t size; } list_maker;

TOOL int64_t list_below(list_maker *m, int64_t n) { return (int64_t)(splitmix(&m->random) % (uint64_t)n); }

TOOL int32_t list_apply(int32_t operation, const int *counts, int64_t members) { /* counts[d]: members that are d */
  int sum = 0, low = 0, high = 0, min = 9, max = 0;
  int64_t seen = 0;
  for (int d = 0; d < 10; d++) {
    if (counts[d] == 0) continue;
    if (seen <= (members - 1) / 2) low = d;                /* the middle two; one and the same when members are odd */
    if (seen <= members / 2) high = d;
    seen += counts[d], sum += counts[d] % 10 * d, max = d;
    if (d < min) min = d;
  }
  return operation == MIN ? min : operation == MAX ? max : operation == MED ? (low + high) / 2 : sum % 10;
}

/* Writes a digit or a list and returns its value; -1 once there are too many tokens. One in four is a list, where it
   may be. */
TOOL int32_t list_grow(list_maker *m, int64_t depth) {
  bool list = depth < m->sizes.depth && list_below(m, 4) == 0;
  if (m->size + depth > m->sizes.longest) return -1;       /* no room for this and the ends of the lists around it */
  if (!list) return m->tokens[m->size++] = (int32_t)list_below(m, 10);
  int64_t members = 2 + list_below(m, m->sizes.args - 1);
  int32_t operation = m->tokens[m->size++] = MIN + (int32_t)list_below(m, 4), counts[10] = { 0 };
  for (int64_t i = 0; i < members; i++) {
    int32_t value = list_grow(m, depth + 1);
    if (value < 0) return -1;
    counts[value]++;
  }
  m->tokens[m->size++] = END;
  return list_apply(operation, counts, members);
}

/* The list that a random number stands for, [longest], and its length; returns its value, or -1 where `tries` did not
   make one. */
TOOL int32_t list_make(list_sizes sizes, uint64_t random, int64_t tries, int32_t *tokens, int32_t *length) {
  list_maker m = { sizes, random, tokens, 0 };
  int32_t value;
  do m.size = 0, value = list_grow(&m, 1); while ((value < 0 || m.size < sizes.shortest) && --tries > 0);
  *length = (int32_t)m.size;
  return tries > 0 ? value : -1;
}

/* Short lists first, for training: their maximum goes from 24 tokens to sizes.longest while `grown` goes from 0 to 1,
   slowly at first. The answer depends most on the root and its own digits; among 1,000 other tokens they are found
   late, if at all. */
TOOL list_sizes lists_grown(list_sizes sizes, double grown) {
  if (grown >= 1 || sizes.longest <= 24) return sizes;
  sizes.longest = (int64_t)(24 * pow((double)sizes.longest / 24, grown * grown));
  sizes.shortest = sizes.longest / 2;
  return sizes;
}

/* ---- worked out -------------------------------------------------------------------------------------------------- */

#define DEEPEST 1000                 /* lists within lists that list_value follows */
#define LONGEST_LIST 100000          /* tokens of one that is read */

/* The value of a list or a digit, whose depth, a digit's 1, and maximum of members go to *depth and *args; -1: it is
   none. */
TOOL int32_t list_value(const int32_t *tokens, int64_t n, int64_t *depth, int64_t *args) {
  static struct { int32_t operation, counts[10]; int64_t members; } open[DEEPEST + 1];
  int64_t level = 0;
  *depth = *args = 0;
  for (int64_t i = 0; i < n; i++) {
    int32_t value = tokens[i];
    if (value >= MIN && value <= SM) {
      if (++level == DEEPEST) return -1;
      memset(&open[level], 0, sizeof open[level]);
      open[level].operation = value;
    } else {
      if (value == END && (level == 0 || open[level].members == 0)) return -1;
      if (value < END && level + 1 > *depth) *depth = level + 1;
      if (value == END) {
        if (open[level].members > *args) *args = open[level].members;
        value = list_apply(open[level].operation, open[level].counts, open[level].members);
        level--;
      }
      if (level == 0) return i == n - 1 ? value : -1;
      open[level].counts[value]++, open[level].members++;
    }
  }
  return -1;
}

/* ---- read -------------------------------------------------------------------------------------------------------- */

typedef struct list_file {           /* lines: answer TAB list. lists_close() frees it */
  contents text;
  struct list_line { unsigned char *tokens; int32_t size, answer; } *lines;
  int64_t count, longest;
} list_file;

TOOL void lists_close(list_file *f) { free(f->lines), free(f->text.data), memset(f, 0, sizeof *f); }

TOOL int32_t list_fetch(const list_file *f, int64_t index, int32_t *tokens, int32_t *length) {
  for (int32_t i = 0; i < f->lines[index].size; i++) tokens[i] = f->lines[index].tokens[i];
  *length = f->lines[index].size;
  return f->lines[index].answer;
}

/* One line, whose tokens take its place: no symbol is longer than its text. Round brackets and the release's header are
   skipped. */
TOOL int list_line(list_file *f, const char *path, unsigned char *line, int64_t length, int64_t number) {
  static const char header[] = "Source\tTarget";
  int64_t from = 2, size = 0;
  if (length == 0 || (number == 1 && length + 1 == (int64_t)sizeof header && memcmp(line, header, (size_t)length) == 0))
    return 0;
  int32_t answer = *line - '0';
  if (length > 2 && line[length - 2] == '\t' && line[1] != '\t') { /* the release's lines: list TAB answer */
    answer = line[length - 1] - '0';
    from = 0, length -= 2;
  } else if (length < 3 || line[1] != '\t') answer = -1;
  if (answer < 0 || answer > 9)
    return fail("%s: line %lld is not an answer, a tab and a list", path, (long long)number);
  while (from < length) {
    int s = line[from] == ' ' || line[from] == '(' || line[from] == ')' ? SYMBOLS : symbol(line, length, &from);
    if (s < 0 || (s < 10 && from < length && line[from] >= '0' && line[from] <= '9'))
      return fail("%s: line %lld has something that is no digit, operator or bracket", path, (long long)number);
    if (s == SYMBOLS) from++;
    else line[size++] = (unsigned char)s;
  }
  if (size == 0 || size > LONGEST_LIST)
    return fail("%s: line %lld has no list or one that is too long", path, (long long)number);
  if (size > f->longest) f->longest = size;
  f->lines[f->count++] = (struct list_line){ line, (int32_t)size, answer };
  return 0;
}

TOOL int lists_read(list_file *f, const char *path) {      /* returns 0, or 2 after a sentence */
  static int32_t tokens[LONGEST_LIST];
  int64_t at = 0, length = 0, lines = 1, number = 0, depth, args;
  int32_t size;
  unsigned char *line;
  *f = (list_file){ .longest = 1 };
  if (read_lines_file(path, &f->text)) return 2;
  for (int64_t i = 0; i < f->text.size; i++) lines += f->text.data[i] == '\n';
  f->lines = (struct list_line *)grow(NULL, lines, sizeof *f->lines);
  while ((line = (unsigned char *)next_line(f->text, &at, &length)) != NULL) {
    const int64_t before = f->count;
    if (list_line(f, path, line, length, ++number)) return 2;
    if (f->count > before && (list_fetch(f, before, tokens, &size), list_value(tokens, size, &depth, &args) < 0))
      return fail("%s: the brackets of line %lld do not make a list", path, (long long)number);
  }
  return f->count >= 10 ? 0 : fail("%s has %lld lists; the minimum is 10", path, (long long)f->count);
}
