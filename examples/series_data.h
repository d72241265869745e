/* series_data.h: what series reads: cases (.ts) or a recording (CSV), as rows of k numbers. Included after example.h
   and `own`, the settings of series.

     read_data(path, learns)     fills `data`: 0, or 2 after a sentence. `learns`: columns and classes are the file's,
                                 and series are split into those to learn from, to validate on and held back; else
                                 they are the model's
     join(first, last)           cases become one recording */
#include <ctype.h>

#define CLASSES 1000                 /* at most */
#define COLUMNS 4096                 /* of a file, at most */
#define WORD 1000                    /* bytes of a class and of a column's name, at most */
#define BAD_CELLS 0.05               /* of a column of numbers, at most, that are neither numbers nor missing */

enum { NONE = -1, UNKNOWN = -2 };    /* labels: not given; given, but not one that the model knows */
/* Rows at .. at + n - 1; `lead` rows before them a model may read first. They are not measured on. */
typedef struct series { int64_t at, n; int32_t label; int64_t lead; } series;
static struct {
  contents text;
  float *rows;                       /* [size,k], NaN where a number is missing */
  float *known;                      /* for forecasts: [size,k], each column's last number, NaN before any */
  int32_t *labels;                   /* [size], NONE or UNKNOWN where it is no class of the model */
  bool *kept_out;                    /* [size] or null: rows of a recording to validate on, which training only reads */
  int64_t size, k;
  series *list;                      /* those to learn from, to validate on, and held back */
  int64_t count, training, validation;
  bool csv, classless;               /* .ts: the last part is a dimension too */
} data;
typedef struct word { const unsigned char *at; int64_t size; } word;
static word classes[CLASSES], columns[COLUMNS]; /* names */
static int32_t label_count;
static int64_t column_count;         /* of the model */
static bool input_only[COLUMNS];     /* columns that are read but not forecast: their outputs mean nothing */
#define AHEADS 16
static int64_t ahead[AHEADS] = { 1 }, ahead_count = 1; /* how many rows after the present one forecasts are for */
static float levels[3] = { 0.5f };   /* of a forecast's quantiles */
static int64_t level_count = 1;

/* Reads --ahead, and sets the levels that --interval means; false where it is no ascending list. */
TOOL bool read_ahead(const char *list) {
  ahead_count = 0;
  for (char *end; ahead_count < AHEADS; list = end + 1) {
    const long long n = strtoll(list, &end, 10);
    if (end == list || n < 1 || n > 1000000 || (ahead_count && n <= ahead[ahead_count - 1])) return false;
    ahead[ahead_count++] = n;
    if (*end == 0) break;
    if (*end != ',' || ahead_count == AHEADS) return false;
  }
  const float outside = (float)(100 - own.interval) / 200;
  level_count = own.interval ? 3 : 1;
  for (int64_t i = 0; i < level_count; i++)
    levels[i] = own.interval == 0 || i == 1 ? 0.5f : i == 0 ? outside : 1 - outside;
  return true;
}

TOOL bool is_word(word w, const char *text) {
  return (int64_t)strlen(text) == w.size && memcmp(w.at, text, (size_t)w.size) == 0;
}
TOOL bool same_word(word a, word b) { return a.size == b.size && memcmp(a.at, b.at, (size_t)a.size) == 0; }
TOOL bool begins(word w, const char *text) { /* in capitals or small letters */
  int64_t i = 0;
  while (text[i] && i < w.size && tolower(w.at[i]) == tolower((unsigned char)text[i])) i++;
  return text[i] == 0;
}
TOOL word column_name(int64_t c) {                         /* or, of dimensions, the number */
  static char number[40];
  snprintf(number, sizeof number, "dimension %lld", (long long)c + 1);
  return column_count ? columns[c] : (word){ (const unsigned char *)number, (int64_t)strlen(number) };
}
TOOL int shown_size(word w) { return (int)(w.size < 40 ? w.size : 40); } /* of a word in a sentence */

/* Whether a word says that there is nothing. A class may be called "none", "null" or "-". */
TOOL bool is_missing(word w, bool number) {
  static const char *const words[] = { "?", "na", "n/a", "nan", "-", "null", "none" };
  for (size_t i = 0; i < (number ? 7 : 4); i++)
    if (w.size == (int64_t)strlen(words[i]) && begins(w, words[i])) return true;
  return w.size == 0;
}

/* The number of a label, which is made when it is new and may be; UNKNOWN when not. */
TOOL int32_t label_of(word w, bool add) {
  int32_t i = 0;
  if (is_missing(w, false)) return NONE;
  while (i < label_count && !same_word(classes[i], w)) i++;
  if (i < label_count) return i;
  if (!add || label_count == CLASSES) return UNKNOWN;
  classes[label_count] = w;
  return label_count++;
}

TOOL word trimmed(const unsigned char *at, const unsigned char *end) { /* without spaces and quotes around it */
  for (int quotes = 0; quotes < 2; quotes++) {
    while (at < end && (*at == ' ' || *at == '\t')) at++;
    while (end > at && (end[-1] == ' ' || end[-1] == '\t')) end--;
    if (quotes || end - at < 2 || *at != '"' || end[-1] != '"') break;
    at++, end--;
  }
  return (word){ at, end - at };
}

static unsigned char decimal = '.';  /* what is before the decimals: a comma in tables with ';' or tabs between cells */

/* Reads a number; NaN: it is missing. False: it is none, or so large that floats of a model could overflow. */
TOOL bool number_of(word w, float *out) {
  char text[64], *end;
  *out = NAN;
  if (is_missing(w, true)) return true;
  if (w.size >= (int64_t)sizeof text) return false;
  const char *const signs = decimal == ',' ? "0123456789+-,eE" : "0123456789+-.eE";
  for (int64_t i = 0; i < w.size; i++) if (!w.at[i] || !strchr(signs, w.at[i])) return false;
  for (int64_t i = 0; i < w.size; i++) text[i] = (char)(w.at[i] == decimal ? '.' : w.at[i]);
  text[w.size] = 0;
  double value = strtod(text, &end);
  if (*end || end == text || !(fabs(value) <= 1e30)) return false;
  *out = (float)value;
  return true;
}

/* Cuts a line where the character is, but not between quotes, into words, of which out gets the first
   COLUMNS + 1; returns how many there are. */
TOOL int64_t cut(const unsigned char *line, int64_t length, unsigned char by, word *out) {
  const unsigned char *from = line, *end = line + length;
  int64_t count = 0;
  bool quoted = false;
  for (const unsigned char *at = line; at <= end; at++) {
    if (at < end && *at == '"') quoted = !quoted;
    if (at < end && (*at != by || quoted)) continue;
    if (count <= COLUMNS) out[count] = trimmed(from, at);
    count++;
    from = at + 1;
  }
  return count;
}

TOOL void add_rows(int64_t n) {
  static int64_t room;
  if (data.size + n > room) {
    room = 2 * room + n + 1024;
    data.rows = (float *)grow(data.rows, room, (size_t)data.k * sizeof(float));
    data.labels = (int32_t *)grow(data.labels, room, sizeof(int32_t));
  }
  for (int64_t i = data.size * data.k; i < (data.size + n) * data.k; i++) data.rows[i] = NAN;
  for (int64_t i = data.size; i < data.size + n; i++) data.labels[i] = NONE;
  data.size += n;
}
TOOL void add_series(int64_t at, int64_t n, int32_t label) {
  data.list = (series *)grow(data.list, data.count + 1, sizeof *data.list);
  data.list[data.count++] = (series){ at, n, label, 0 };
}

/* ---- cells that are neither a number nor missing ----------------------------------------------------------------- */

/* of a column, or of all dimensions of a .ts file; line, place, column: of the first bad one */
typedef struct cells { int64_t count, bad, line, place, column; word first; } cells;
TOOL float read_cell(cells *all, word w, int64_t line, int64_t place, int64_t column) {
  float value;
  const bool fine = number_of(w, &value);
  all->count += !is_missing(w, true);
  if (!fine && all->bad++ == 0) all->line = line, all->place = place, all->column = column, all->first = w;
  return value;
}
TOOL bool too_bad(const cells *all) { return (double)all->bad > BAD_CELLS * (double)all->count; }
TOOL void warn_of_cells(const char *path, const cells *all, const char *where, bool learns) {
  FILE *to = learns ? stdout : stderr;                     /* what predict finds goes to stdout */
  if (all->bad == 0 || ranks.rank > 0) return;
  put_shown(to, path, (int64_t)strlen(path)), fprintf(to, ": line %lld, ", (long long)all->line);
  put_shown(to, where, (int64_t)strlen(where));
  fprintf(to, ": '"), put_shown(to, all->first.at, shown_size(all->first));
  fprintf(to, "' is not a number and counts as missing");
  if (all->bad > 1) fprintf(to, ", like %lld more", (long long)all->bad - 1);
  fputc('\n', to);
}

/* ---- .ts: cases -------------------------------------------------------------------------------------------------- */

static cells ts_cells;

/* A case: dimensions between ":", the class, if any, last. */
TOOL int read_case(const char *path, const unsigned char *line, int64_t length, int64_t number, bool learns) {
  static word parts[COLUMNS + 1];
  int64_t count = cut(line, length, ':', parts) - !data.classless, at = data.size, longest = 0;
  if (count < 1)
    return fail("%s: line %lld is not a case: dimensions and a class with ':' between", path, (long long)number);
  if (count > COLUMNS)
    return fail("%s: line %lld has more than %d dimensions", path, (long long)number, COLUMNS);
  if (data.k == 0) data.k = count;
  if (count != data.k)
    return fail("%s: line %lld has %lld dimensions, not %lld", path, (long long)number, (long long)count,
                (long long)data.k);
  for (int64_t d = 0; d < data.k; d++) {
    int64_t n = 1;
    for (int64_t i = 0; i < parts[d].size; i++) n += parts[d].at[i] == ',';
    if (n > longest) longest = n;
  }
  add_rows(longest);
  for (int64_t d = 0; d < data.k; d++) {
    const unsigned char *from = parts[d].at, *end = from + parts[d].size;
    for (int64_t t = 0; from <= end; t++) {
      const unsigned char *comma = (const unsigned char *)memchr(from, ',', (size_t)(end - from)),
          *to = comma ? comma : end;
      data.rows[(at + t) * data.k + d] = read_cell(&ts_cells, trimmed(from, to), number, t + 1, d + 1);
      from = to + 1;
    }
  }
  if (!own.forecast && !data.classless && parts[data.k].size > WORD)
    return fail("%s: the class of line %lld has more than %d bytes", path, (long long)number, WORD);
  int32_t label = own.forecast || data.classless ? NONE : label_of(parts[data.k], learns);
  if (label == UNKNOWN && learns) return fail("%s has more than %d classes", path, CLASSES);
  if (label == NONE && learns && !own.forecast) return fail("%s: line %lld has no class", path, (long long)number);
  for (int64_t i = at; i < data.size; i++) data.labels[i] = label;
  add_series(at, longest, label);
  return 0;
}
TOOL bool says(word w, const char *name, const char *value) { /* a line before @data */
  const int64_t size = (int64_t)strlen(name);
  return begins(w, name) && begins(trimmed(w.at + size, w.at + w.size), value);
}
TOOL int read_ts(const char *path, bool learns) {
  int64_t at = 0, length, number = 0;
  const unsigned char *line;
  char where[80];
  bool begun = false;
  while ((line = next_line(data.text, &at, &length)) != NULL) {
    word w = trimmed(line, line + length);
    number++;
    if (!begun && says(w, "@timeStamps", "true")) return fail("%s has time stamps, which series cannot read", path);
    data.classless = data.classless || (!begun && says(w, "@classLabel", "false"));
    if (data.classless && learns && !own.forecast) return fail("%s has no classes to learn (@classLabel false)", path);
    if (begun && w.size > 0 && *w.at != '#' && read_case(path, w.at, w.size, number, learns)) return 2;
    begun = begun || begins(w, "@data");
  }
  snprintf(where, sizeof where, "number %lld of dimension %lld", (long long)ts_cells.place,
           (long long)ts_cells.column);
  if (too_bad(&ts_cells))
    return fail("%s: line %lld: %s is not a number, nor are %lld of %lld", path, (long long)ts_cells.line, where,
                (long long)ts_cells.bad, (long long)ts_cells.count);
  return warn_of_cells(path, &ts_cells, where, learns), 0;
}

/* ---- CSV: one recording ------------------------------------------------------------------------------------------ */

static struct table_of_numbers {
  word names[COLUMNS + 1];
  char numbers[COLUMNS][8];          /* names of columns that have none */
  int64_t count, begin;              /* columns; where the first row begins */
  int64_t label, first_line;         /* the column of labels, or -1; the line of the first row */
  unsigned char by;                  /* between columns */
  struct { cells cells; bool wanted, unwanted, input, varies, rises, falls; float first, last; } is[COLUMNS];
} csv;

/* The column that a word names or, from 1, counts; -1: none. */
TOOL int64_t column_of(word w) {
  for (int64_t c = 0; c < csv.count; c++) if (same_word(csv.names[c], w)) return c;
  for (int64_t c = 0; c < csv.count; c++) if (is_word(w, csv.numbers[c])) return c;
  return -1;
}

/* Where ';' or tabs are between cells, numbers may have decimal commas: they have, where more of the first lines' cells
   are numbers with a comma than with a point. */
TOOL void find_decimal(void) {
  static word parts[COLUMNS + 1];
  int64_t at = 0, length, commas = 0, points = 0;
  const unsigned char *line;
  decimal = '.';
  if (csv.by == ',') return;
  for (int i = 0; i < 1000 && (line = next_line(data.text, &at, &length)) != NULL; i++) {
    const int64_t count = cut(line, length, csv.by, parts);
    for (int64_t c = 0; c < count && c < COLUMNS; c++) {
      float value;
      decimal = ',';
      commas += memchr(parts[c].at, ',', (size_t)parts[c].size) && number_of(parts[c], &value) && value == value;
      decimal = '.';
      points += memchr(parts[c].at, '.', (size_t)parts[c].size) && number_of(parts[c], &value) && value == value;
    }
  }
  if (commas > points) decimal = ',';
}

/* Whether a line is numbers with decimal commas and ';' between them, of which "1,5;2" has a comma first. */
TOOL bool all_decimal(const unsigned char *line, int64_t length) {
  static word parts[COLUMNS + 1];
  const int64_t count = cut(line, length, ';', parts);
  bool all = count > 1;
  float value;
  decimal = ',';
  for (int64_t c = 0; c < count && c < COLUMNS; c++) all = all && number_of(parts[c], &value);
  decimal = '.';
  return all;
}

/* The first line: what is between columns, and their names, where it is not numbers. */
TOOL int read_names(const char *path) {
  int64_t at = 0, length;
  float value;
  const unsigned char *line = next_line(data.text, &at, &length);
  bool header = true;
  csv.by = ',';
  for (int64_t i = length; i-- > 0;) if (strchr(",;\t", line[i]) && line[i]) csv.by = line[i];
  if (csv.by == ',' && all_decimal(line, length)) csv.by = ';';
  find_decimal();
  csv.count = cut(line, length, csv.by, csv.names);
  if (csv.count > COLUMNS) return fail("%s has more than %d columns", path, COLUMNS);
  for (int64_t c = 0; c < csv.count; c++) header = header && !(number_of(csv.names[c], &value) && value == value);
  csv.begin = header ? at : 0, csv.first_line = 1 + header;
  for (int64_t c = 0; c < csv.count; c++) {
    snprintf(csv.numbers[c], sizeof csv.numbers[c], "%d", (int)c + 1);
    if (!header || csv.names[c].size == 0)
      csv.names[c] = (word){ (const unsigned char *)csv.numbers[c], (int64_t)strlen(csv.numbers[c]) };
    if (csv.names[c].size > WORD)
      return fail("%s: the name of column %d has more than %d bytes", path, (int)c + 1, WORD);
    for (int64_t other = 0; other < c; other++)
      if (same_word(csv.names[c], csv.names[other]))
        return fail("%s has two columns '%.*s'", path, (int)csv.names[c].size, (const char *)csv.names[c].at);
  }
  csv.label = own.label ? column_of((word){ (const unsigned char *)own.label, (int64_t)strlen(own.label) }) : -1;
  return 0;
}

/* Sets a mark of each column of a list, "a,b,7". */
enum { WANTED, UNWANTED, INPUT };
TOOL int mark_columns(const char *path, const char *list, int mark) {
  static word words[COLUMNS + 1];
  const int64_t count = list ? cut((const unsigned char *)list, (int64_t)strlen(list), ',', words) : 0;
  for (int64_t i = 0; i < count && i <= COLUMNS; i++) {
    const int64_t c = column_of(words[i]);
    if (c < 0) return fail("%s has no column '%.*s'", path, shown_size(words[i]), (const char *)words[i].at);
    if (mark == UNWANTED) csv.is[c].unwanted = true;
    else if (mark == WANTED) csv.is[c].wanted = true;
    else csv.is[c].input = true;
  }
  return 0;
}

/* The next row that is not empty, cut into `parts`: 1, 0 at the end, or -1 after a sentence. */
TOOL int next_row(const char *path, int64_t *at, int64_t *number, word *parts) {
  int64_t length;
  const unsigned char *line;
  while ((line = next_line(data.text, at, &length)) != NULL) {
    ++*number;
    if (length == 0) continue;
    const int64_t count = cut(line, length, csv.by, parts);
    if (count == csv.count) return 1;
    return fail("%s: row %lld has %lld column%s, the first row %lld", path, (long long)*number, (long long)count,
                count == 1 ? "" : "s", (long long)csv.count), -1;
  }
  return 0;
}

/* Finds out what the columns are; returns how many rows there are, or -1 after a sentence. */
TOOL int64_t survey(const char *path, word *parts) {
  int64_t rows = 0, at = csv.begin, number = csv.first_line - 1;
  int more;
  for (int64_t c = 0; c < csv.count; c++)
    csv.is[c].first = csv.is[c].last = NAN, csv.is[c].rises = csv.is[c].falls = true;
  for (; (more = next_row(path, &at, &number, parts)) > 0; rows++)
    for (int64_t c = 0; c < csv.count; c++) {
      const float value = read_cell(&csv.is[c].cells, parts[c], number, 0, c + 1);
      if (value != value) continue;
      if (csv.is[c].first != csv.is[c].first) csv.is[c].first = csv.is[c].last = value;
      csv.is[c].varies = csv.is[c].varies || value != csv.is[c].first;
      csv.is[c].rises = csv.is[c].rises && value >= csv.is[c].last;
      csv.is[c].falls = csv.is[c].falls && value <= csv.is[c].last;
      csv.is[c].last = value;
    }
  return more < 0 ? -1 : rows;
}

TOOL void say_of_column(const char *path, int64_t c, const char *what) {
  if (ranks.rank > 0) return;
  put_shown(stdout, path, (int64_t)strlen(path)), printf(": column '");
  put_shown(stdout, csv.names[c].at, csv.names[c].size), printf("' %s", what);
}
/* The model's columns: those of numbers that change, but for what --columns and --drop say. */
TOOL int choose_columns(const char *path) {
  int64_t forecast = 0;
  if (mark_columns(path, own.columns, WANTED) || mark_columns(path, own.drop, UNWANTED) ||
      mark_columns(path, own.inputs, INPUT)) return 2;
  for (int64_t c = 0; c < csv.count; c++) {
    const cells *of = &csv.is[c].cells;
    if (c == csv.label || csv.is[c].unwanted || (own.columns && !csv.is[c].wanted && !csv.is[c].input)) continue;
    if (too_bad(of)) {
      if (csv.is[c].wanted)
        return fail("%s: column '%.*s' is not of numbers: line %lld has '%.*s'", path, shown_size(csv.names[c]),
                    (const char *)csv.names[c].at, (long long)of->line, shown_size(of->first),
                    (const char *)of->first.at);
      say_of_column(path, c, "is left out: ");
      if (ranks.rank == 0)
        printf("line %lld has '", (long long)of->line), put_shown(stdout, of->first.at, of->first.size),
            puts("', which is no number or too large.");
    } else if (!csv.is[c].varies) say_of_column(path, c, "is left out, as it never changes.\n");
    else {
      input_only[column_count] = csv.is[c].input, forecast += !csv.is[c].input;
      columns[column_count++] = csv.names[c];
      if (csv.is[c].wanted || (!csv.is[c].rises && !csv.is[c].falls)) continue;
      say_of_column(path, c, csv.is[c].rises ? "only rises" : "only falls");
      if (ranks.rank == 0)
        say(", as a clock or counter does. Later numbers will lie outside those of the training. It is read like any "
            "other; --drop %.*s leaves it out.", shown_size(csv.names[c]), (const char *)csv.names[c].at);
    }
  }
  if (own.inputs && column_count && !forecast) return fail("%s: --inputs leaves no column to forecast", path);
  return 0;
}

TOOL int read_rows(const char *path, const int64_t *places, word *parts, bool learns) {
  int64_t at = csv.begin, number = csv.first_line - 1;
  for (int64_t row = 0; next_row(path, &at, &number, parts) > 0; row++) {
    for (int64_t i = 0; i < column_count; i++) (void)number_of(parts[places[i]], &data.rows[row * data.k + i]);
    if (csv.label < 0) continue;
    if (parts[csv.label].size > WORD)
      return fail("%s: the class of row %lld has more than %d bytes", path, (long long)number, WORD);
    if ((data.labels[row] = label_of(parts[csv.label], learns)) == UNKNOWN && learns)
      return fail("%s has more than %d classes", path, CLASSES);
  }
  return 0;
}

/* Where the model has no columns yet, the file's become its. */
TOOL int read_csv(const char *path, bool learns) {
  static word parts[COLUMNS + 1];
  static int64_t places[COLUMNS];
  char where[WORD + 20];
  if (read_names(path)) return 2;
  if (own.label && csv.label < 0 && learns) return fail("%s has no column '%s'", path, own.label);
  const int64_t rows = survey(path, parts);
  if (rows == 0) return fail("%s has no rows%s", path, csv.begin ? " below its header" : "");
  if (rows < 0 || (learns && choose_columns(path))) return 2;
  if (column_count == 0) return fail("%s has no column of numbers that change", path);
  for (int64_t i = 0; i < column_count; i++) {
    int64_t c = 0;
    while (c < csv.count && !same_word(csv.names[c], columns[i])) c++;
    if (c == csv.count) return fail("%s has no column '%.*s'", path, (int)columns[i].size, (const char *)columns[i].at);
    if (too_bad(&csv.is[c].cells))
      return fail("%s: line %lld: '%.*s' is not a number, nor are %lld of column '%.*s'", path,
                  (long long)csv.is[c].cells.line, shown_size(csv.is[c].cells.first),
                  (const char *)csv.is[c].cells.first.at, (long long)csv.is[c].cells.bad, shown_size(columns[i]),
                  (const char *)columns[i].at);
    snprintf(where, sizeof where, "column '%.*s'", (int)columns[i].size, (const char *)columns[i].at);
    warn_of_cells(path, &csv.is[c].cells, where, learns);
    places[i] = c;
  }
  data.k = column_count;
  add_rows(rows);
  add_series(0, rows, -1);
  return read_rows(path, places, parts, learns);
}

/* ---- what is learnt from, and what is not ------------------------------------------------------------------------ */

enum { TRAINING, VALIDATION, HELD, PARTS };
#define LEAST_CASES 20               /* to validate on, where --valid is not given: of fewer, chance decides */
#define LEAST_STEPS 20               /* of a block of a recording, likewise */
#define MOST_STEPS 20000             /* more only take time */
#define BLOCKS 8                     /* of a recording to validate on, at most, spread over time */
#define PLACES 32                    /* that are tried for a block */

/* counts of classes among the rows of all blocks so far, and among those of all that is left */
static struct { int64_t blocks[CLASSES], all[CLASSES]; } seen_classes;
TOOL int32_t class_at(int64_t row) { return data.labels[row] < 0 ? label_count : data.labels[row]; }

/* How far the classes of the blocks would be from their share, with a block at this row: each class counts alike. A
   block that cuts a stretch of a class in two is the worse for it. */
TOOL double block_cost(int64_t at, int64_t size, double part, const series *all) {
  static int64_t count[CLASSES + 1];
  double cost = 0;
  memset(count, 0, sizeof count);
  for (int64_t i = at; i < at + size; i++) count[class_at(i)]++;
  for (int32_t c = 0; c < label_count; c++) {
    const double wanted = part * (double)seen_classes.all[c], is = (double)(seen_classes.blocks[c] + count[c]);
    if (wanted > 0) cost += fabs(is - wanted) / wanted;
  }
  for (int end = 0; end < 2 && label_count; end++) {       /* the most frequent class may be cut */
    const int64_t row = end ? at + size : at;
    if (row <= all->at || row >= all->at + all->n || class_at(row) != class_at(row - 1)) continue;
    const int32_t c = class_at(row);
    if (c < label_count && 2 * seen_classes.all[c] < all->n) cost += 0.5;
  }
  return cost;
}
/* A block of a stretch of a recording; without classes it is the middle. share: of all blocks up to this one. */
TOOL void add_block(series stretch, int64_t size, double share, const series *all) {
  const int64_t room = stretch.n - size;
  int64_t best = stretch.at + room / 2;
  double least = label_count ? block_cost(best, size, share, all) : 0;
  for (int64_t i = 0; i <= PLACES && label_count; i++) {
    const int64_t at = stretch.at + room * i / PLACES;
    const double cost = block_cost(at, size, share, all);
    if (cost < least - 1e-9) least = cost, best = at;
  }
  for (int64_t i = best; i < best + size; i++) {
    data.kept_out[i] = true;
    if (data.labels[i] >= 0) seen_classes.blocks[data.labels[i]]++;
  }
  add_series(best, size, -1);
}
/* Blocks of a share of the rows that are not held back (from .. to - 1), evenly spread over time. A model reads what is
   before them, but learns neither its classes nor its numbers. */
TOOL void add_blocks(series s, int64_t from, int64_t to) {
  const int64_t left = s.n - (to - from), least = LEAST_STEPS + 2 * ahead[ahead_count - 1] * (own.forecast != 0);
  int64_t size = (int64_t)(own.valid * (double)left);
  if (size > MOST_STEPS) size = MOST_STEPS;
  int64_t blocks = size / least < BLOCKS ? size / least : BLOCKS;
  if (blocks == 0 || size > left / 2) return;
  data.kept_out = (bool *)memset(grow(NULL, data.size, sizeof(bool)), 0, (size_t)data.size * sizeof(bool));
  memset(&seen_classes, 0, sizeof seen_classes);
  for (int64_t i = 0; i < s.n; i++)
    if ((i < from || i >= to) && data.labels[s.at + i] >= 0) seen_classes.all[data.labels[s.at + i]]++;
  for (int64_t b = 0; b < blocks; b++) {                   /* stretches of what is left; none over the part held back */
    int64_t first = left * b / blocks, last = left * (b + 1) / blocks;
    if (first < from && last > from) {                     /* its longer side */
      if (from - first > last - from) last = from;
      else first = from;
    }
    if (first >= from) first += to - from, last += to - from;
    const int64_t wanted = size / blocks, n = wanted < (last - first) / 2 ? wanted : (last - first) / 2;
    add_block((series){ s.at + first, last - first, -1, 0 }, n, own.valid * (double)(b + 1) / (double)blocks, &s);
  }
}

/* A recording's parts in time: a fifth is held back, and of what is left blocks are to validate on. A model may read
   the rows before each of these, as many as a window has. */
TOOL void split_recording(series s, int part) {
  const int64_t from = own.held ? s.n * (own.held - 1) / 5 : s.n, to = own.held ? s.n * own.held / 5 : s.n;
  const int64_t first = data.count;
  if (part == HELD && to > from) add_series(s.at + from, to - from, -1);
  if (part == VALIDATION) add_blocks(s, from, to);
  if (part == TRAINING && from > 0) add_series(s.at, from, -1);
  if (part == TRAINING && to < s.n) add_series(s.at + to, s.n - to, -1);
  for (int64_t i = first; i < data.count && part != TRAINING; i++) {
    const int64_t before = data.list[i].at - s.at;
    data.list[i].lead = before < own.window ? before : own.window;
  }
}

/* Puts what is not learnt from last: of cases a fifth of each class, and a share of the rest. */
TOOL void split_data(void) {
  static int64_t seen[CLASSES + 1];
  series *old = data.list;
  const int64_t count = data.count, every = own.valid > 0 ? (int64_t)(1 / own.valid + 0.5) : INT64_MAX;
  data.list = NULL, data.count = data.training = data.validation = 0;
  for (int part = 0; part < PARTS; part++) {
    memset(seen, 0, sizeof seen);
    for (int64_t i = 0; i < count; i++) {
      const series s = old[i];
      if (data.csv) { split_recording(s, part); continue; }
      const int64_t number = seen[s.label + 1]++;
      const bool held = own.held && number % 5 == own.held - 1;
      const int64_t left = number - (own.held ? number / 5 + (number % 5 >= own.held) : 0);
      if (part == (held ? HELD : left % every == every - 1 ? VALIDATION : TRAINING)) add_series(s.at, s.n, s.label);
    }
    if (part == TRAINING) data.training = data.count;
    if (part == VALIDATION) data.validation = data.count - data.training;
  }
  free(old);
  if (data.csv || flag_given(&own.valid) || data.validation >= LEAST_CASES) return;
  data.training += data.validation, data.validation = 0;
}

/* Forecasts start from the last number that is known. */
TOOL void fill_known(void) {
  const int64_t k = data.k;
  data.known = (float *)memcpy(grow(NULL, data.size * k, sizeof(float)), data.rows,
                               (size_t)(data.size * k) * sizeof(float));
  for (int64_t i = 0; i < data.count; i++)
    for (int64_t j = k; j < data.list[i].n * k; j++) {
      float *x = data.known + data.list[i].at * k + j;
      if (*x != *x) *x = x[-k];
    }
}

TOOL int read_data(const char *path, bool learns) {
  if (read_lines_file(path, &data.text)) return 2;
  int64_t at = 0, length;
  const unsigned char *line;
  for (data.csv = true; data.csv && (line = next_line(data.text, &at, &length)) != NULL;)
    data.csv = !begins(trimmed(line, line + length), "@data");
  if (!learns && data.csv != (column_count > 0))
    return data.csv ? fail("%s is a table (CSV), but the model learnt from cases (.ts)", path) :
        fail("%s has cases (.ts), but the model learnt from a table (CSV)", path);
  if (!data.csv && (own.columns || own.drop || own.inputs))
    return fail("--columns, --drop and --inputs are for tables (CSV)");
  if (data.csv ? read_csv(path, learns) : read_ts(path, learns)) return 2;
  if (data.count == 0 || data.size == 0) return fail("%s holds no series", path);
  if (learns && data.csv && !own.held) own.held = 5;
  data.training = data.count;
  if (own.forecast) fill_known();
  if (learns) split_data();
  return 0;
}

static uint64_t random_state;
TOOL double uniform(void) {                                /* in [-1, 1) */
  return (double)(splitmix(&random_state) >> 12) / 2251799813685248.0 - 1;
}
TOOL int64_t below(int64_t n) { return (int64_t)((uniform() + 1) / 2 * (double)n) % n; }
TOOL double normal(void) { return uniform() + uniform() + uniform(); } /* of deviation 1, near enough */

/* Series first .. last - 1 become one recording, in an order by chance; those after it move down. Returns its number
   plus 1. */
TOOL int64_t join(int64_t first, int64_t last) {
  const int64_t at = data.size, count = last - first;
  random_state = 1;
  for (int64_t i = count - 1; i > 0; i--) {
    series *a = data.list + first + i, *b = data.list + first + below(i + 1), t = *a;
    *a = *b, *b = t;
  }
  for (int64_t i = first; i < last; i++) {
    const series s = data.list[i];
    const int64_t to = data.size;
    add_rows(s.n);
    memcpy(data.rows + to * data.k, data.rows + s.at * data.k, (size_t)(s.n * data.k) * sizeof(float));
    memcpy(data.labels + to, data.labels + s.at, (size_t)s.n * sizeof(int32_t));
  }
  if (count == 0) return first;
  data.list[first] = (series){ at, data.size - at, -1, 0 };
  memmove(data.list + first + 1, data.list + last, (size_t)(data.count - last) * sizeof(series));
  data.count -= count - 1;
  return first + 1;
}
