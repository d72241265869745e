/* lra_table.h: the runs of a folder as Markdown and SVG, beside Table 1 of Luna's paper (arXiv 2106.01540v2, whose ten
   other systems are the Long Range Arena's numbers). Included by lra.c. A run is a file RUN.txt: lines of a word, a
   space and a value. */
#include <sys/stat.h>

#ifdef _WIN32
static int64_t file_size(const char *path) {               /* -1: no regular file */
  struct _stat s;
  return _stat(path, &s) == 0 && (s.st_mode & _S_IFMT) == _S_IFREG ? (int64_t)s.st_size : -1;
}
static char **folder_names(const char *folder, int *count) { /* to be freed, each and all; *count: -1, no folder */
  struct _finddata_t found;
  struct _stat s;
  char pattern[512], **names = NULL;
  *count = _stat(folder, &s) == 0 ? 0 : -1;
  if (*count < 0) return NULL;
  snprintf(pattern, sizeof pattern, "%s/*.txt", folder);
  intptr_t search = _findfirst(pattern, &found);
  for (bool more = search != -1; more; more = _findnext(search, &found) == 0) {
    names = (char **)grow(names, *count + 1, sizeof(char *));
    strcpy(names[(*count)++] = (char *)grow(NULL, (int64_t)strlen(found.name) + 1, 1), found.name);
  }
  if (search != -1) _findclose(search);
  return names;
}
#else
#include <dirent.h>
static int64_t file_size(const char *path) {
  struct stat s;
  return stat(path, &s) == 0 && S_ISREG(s.st_mode) ? (int64_t)s.st_size : -1;
}
static char **folder_names(const char *folder, int *count) {
  char **names = NULL;
  DIR *d = opendir(folder);
  *count = d ? 0 : -1;
  for (struct dirent *e; d && (e = readdir(d)) != NULL;) {
    const size_t size = strlen(e->d_name);
    if (size < 5 || strcmp(e->d_name + size - 4, ".txt") != 0) continue;
    names = (char **)grow(names, *count + 1, sizeof(char *));
    strcpy(names[(*count)++] = (char *)grow(NULL, (int64_t)size + 1, 1), e->d_name);
  }
  if (d) closedir(d);
  return names;
}
#endif
static int by_name(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

/* ---- reports ----------------------------------------------------------------------------------------------------- */

typedef struct report {
  int task;
  char system[40], settings[16], instructions[24], model[1024], from[4096]; /* as in the file: put_text */
  double seed, steps, of, batch, accuracy, held, seconds, threads;
} report;

/* Table 1: accuracy on listops, text, retrieval, image, pathfinder; the Transformer is Luna's own, LRA's follows */
typedef struct paper { const char *system; double accuracy[TASKS]; } paper;
static const paper table1[] = {
  { "Transformer", { 37.11, 65.21, 79.14, 42.94, 71.83 } },
  { "Transformer (LRA)", { 36.37, 64.27, 57.46, 42.44, 71.40 } },
  { "Local", { 15.82, 52.98, 53.39, 41.46, 66.63 } }, { "Sparse", { 17.07, 63.58, 59.59, 44.24, 71.71 } },
  { "Longformer", { 35.63, 62.85, 56.89, 42.22, 69.71 } }, { "Linformer", { 35.70, 53.94, 52.27, 38.56, 76.34 } },
  { "Reformer", { 37.27, 56.10, 53.40, 38.07, 68.50 } }, { "Sinkhorn", { 33.67, 61.20, 53.83, 41.23, 67.45 } },
  { "Synthesizer", { 36.99, 61.68, 54.67, 41.61, 69.45 } }, { "BigBird", { 36.05, 64.02, 59.29, 40.83, 74.87 } },
  { "Linear Transformer", { 16.13, 65.90, 53.09, 42.34, 75.30 } },
  { "Performer", { 18.01, 65.40, 53.82, 42.77, 77.05 } },
  { "Luna-16", { 37.43, 65.74, 79.38, 46.39, 78.36 } }, { "Luna-128", { 38.01, 65.74, 79.55, 47.47, 78.89 } },
  { "Luna-256", { 37.98, 65.78, 79.56, 47.86, 78.55 } },
};
static phrase difficulty_of(const report *r) {             /* of Pathfinder; else "" */
  const char *name = r->task == PATHFINDER ? strstr(r->model, "difficulty ") : NULL;
  phrase out = { "" };
  if (name) snprintf(out.text, sizeof out.text, "%.*s", (int)strcspn(name + 11, ","), name + 11);
  return out;
}
static double paper_of(const report *r) {                  /* 0: it has none; of Pathfinder, it has the hard one */
  if (r->task == PATHFINDER && strcmp(difficulty_of(r).text, "hard") != 0) return 0;
  for (size_t i = 0; i < sizeof table1 / sizeof *table1; i++)
    if (strcmp(table1[i].system, r->system) == 0) return table1[i].accuracy[r->task];
  return 0;
}
static bool finished(const report *r) { return r->steps == r->of; }

static bool take_text(char *to, size_t size, const unsigned char *at, int64_t length) { /* whether all of it fits */
  const bool fits = length < (int64_t)size && !memchr(at, 0, (size_t)length);
  if (fits) memcpy(to, at, (size_t)length);
  to[fits ? length : 0] = 0;
  return fits;
}
static bool take_number(double *to, const char *text) {
  char *end;
  *to = strtod(text, &end);
  return end != text && !*end && *to >= 0 && *to < 1e16;
}
static bool take_line(report *r, const unsigned char *line, int64_t length) {
  const struct { const char *word; char *text; size_t size; } texts[] = {
    { "system", r->system, sizeof r->system }, { "settings", r->settings, sizeof r->settings },
    { "from", r->from, sizeof r->from }, { "instructions", r->instructions, sizeof r->instructions },
    { "model", r->model, sizeof r->model } };
  const struct { const char *word; double *number; } numbers[] = {
    { "seed", &r->seed }, { "steps", &r->steps }, { "of", &r->of }, { "batch", &r->batch },
    { "accuracy", &r->accuracy }, { "held", &r->held }, { "seconds", &r->seconds }, { "threads", &r->threads } };
  char word[24], value[64];
  const unsigned char *space = (const unsigned char *)memchr(line, ' ', (size_t)length);
  if (!space) return false;
  const unsigned char *rest = space + 1;
  const int64_t left = line + length - rest;
  take_text(word, sizeof word, line, space - line);
  const bool fits = take_text(value, sizeof value, rest, left);
  for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
    if (strcmp(word, texts[i].word) == 0)
      return take_text(texts[i].text, texts[i].size, rest, left) && *texts[i].text;
  for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
    if (strcmp(word, numbers[i].word) == 0) return fits && take_number(numbers[i].number, value);
  for (int i = 0; strcmp(word, "task") == 0 && i < TASKS; i++)
    if (strcmp(value, tasks[i].name) == 0) return r->task = i, true;
  return strcmp(word, "task") != 0;                        /* words of later versions */
}
static bool read_report(const char *path, report *r) {
  contents file;
  int64_t at = 0, length;
  const unsigned char *line;
  memset(r, 0, sizeof *r);
  r->task = -1, r->accuracy = -1;
  const int64_t size = file_size(path);
  if (size <= 0 || size >= 65536 || read_file(path, &file)) return false;
  bool fine = true;
  while (fine && (line = next_line(file, &at, &length)) != NULL) fine = length == 0 || take_line(r, line, length);
  free(file.data);
  return fine && r->task >= 0 && *r->system && r->accuracy >= 0 && r->accuracy <= 100 && r->steps > 0;
}

/* ---- rows: runs that differ in the seed alone -------------------------------------------------------------------- */

enum { SEEDS = 100 };                /* of a row, at most */
/* mixed: of several instruction sets or counts of threads, whose minutes have no common mean */
typedef struct row { report first; int runs; bool mixed; double mean, seconds, accuracy[SEEDS], seeds[SEEDS]; } row;

static int by_head(const report *a, const report *b) {     /* 0: what their heading says is the same */
  const int model = strcmp(a->model, b->model), settings = strcmp(a->settings, b->settings);
  if (a->task != b->task) return a->task - b->task;
  if (model || settings) return model ? model : settings;
  return a->held != b->held ? (a->held < b->held ? 1 : -1) : strcmp(a->from, b->from);
}
static bool same_row(const report *a, const report *b) {
  return by_head(a, b) == 0 && strcmp(a->system, b->system) == 0 && a->steps == b->steps && a->of == b->of &&
         a->batch == b->batch;
}
static int by_accuracy(const void *a, const void *b) {     /* by headings, then the best first */
  const row *i = (const row *)a, *j = (const row *)b;
  const int head = by_head(&i->first, &j->first);
  if (head) return head;
  return i->mean != j->mean ? (i->mean < j->mean ? 1 : -1) : strcmp(i->first.system, j->first.system);
}
static void add_run(row *to, const report *r, const char *path) {
  bool known = false;
  for (int i = 0; i < to->runs; i++) known = known || to->seeds[i] == r->seed;
  if (known || to->runs == SEEDS) {
    (void)fail(known ? "%s has the seed of another run" : "%s is one seed too many", path);
    return;
  }
  to->mixed = to->mixed || r->threads != to->first.threads || strcmp(r->instructions, to->first.instructions) != 0;
  to->accuracy[to->runs] = r->accuracy, to->seeds[to->runs++] = r->seed;
  to->mean += (r->accuracy - to->mean) / to->runs, to->seconds += (r->seconds - to->seconds) / to->runs;
}
static row *read_rows(const char *folder, int *count) {    /* *count: -1, the folder cannot be opened, as errno says */
  row *rows = NULL;
  int names_count;
  char **names = folder_names(folder, &names_count), path[800];
  *count = names_count < 0 ? -1 : 0;
  if (names) qsort(names, (size_t)names_count, sizeof *names, by_name);
  for (int i = 0; i < names_count; i++) {
    report r;
    snprintf(path, sizeof path, "%s/%s", folder, names[i]);
    free(names[i]);
    if (!read_report(path, &r)) { (void)fail("%s is no report of a run", path); continue; }
    int k = 0;
    while (k < *count && !same_row(&rows[k].first, &r)) k++;
    if (k == *count) {
      rows = (row *)grow(rows, ++*count, sizeof(row));
      memset(&rows[k], 0, sizeof(row));
      rows[k].first = r;
    }
    add_run(&rows[k], &r, path);
  }
  free(names);
  if (rows) qsort(rows, (size_t)*count, sizeof *rows, by_accuracy);
  return rows;
}

/* ---- Markdown and SVG -------------------------------------------------------------------------------------------- */

/* What Markdown and SVG cannot show becomes "?"; what only Markdown reads, `escape`, has a backslash before it. */
static void put_text(FILE *to, const char *before, const char *text, bool escape) {
  fputs(before, to);
  for (; *text; text++) {
    const char c = *text;
    if (escape && strchr("\\[]()!*_~$", c)) fputc('\\', to);
    fputc(c < 32 || c > 126 || strchr("<>&|`", c) ? '?' : c, to);
  }
}

#define HEAD "| system | accuracy | of each run | seeds | steps | batch | minutes a run | threads, instructions | " \
             "Table 1 |\n|---|---|---|---|---|---|---|---|---|\n"
static void print_row(const row *r) {
  const report *f = &r->first;
  const double theirs = paper_of(f);
  put_text(stdout, "| ", f->system, true);
  printf(" | %.2f |", r->mean);
  for (int i = 0; i < r->runs; i++) printf("%s %.2f", i ? "," : "", r->accuracy[i]);
  printf(" |");
  for (int i = 0; i < r->runs; i++) printf("%s %.0f", i ? "," : "", r->seeds[i]);
  printf(" | %.0f%s | %.0f |", f->steps, finished(f) ? "" : " (not done)", f->batch);
  if (r->mixed) printf(" | several |");
  else {
    printf(" %.1f | %.0f", r->seconds / 60, f->threads);
    put_text(stdout, ", ", f->instructions, true);
    printf(" |");
  }
  printf(theirs > 0 ? " %.2f |\n" : " |\n", theirs);
}
static void print_head(const report *r) {
  put_text(stdout, "\nSettings ", r->settings, true);
  put_text(stdout, ": ", r->model, true);
  printf(". Measured on %.0f samples, standard error up to %.2f", r->held, 50 / sqrt(r->held > 1 ? r->held : 1));
  put_text(stdout, ": ", r->from, true);
  printf(".\n\n" HEAD);
}
static void print_rows(const row *rows, int count) {
  for (int i = 0; i < count; i++) {
    const report *r = &rows[i].first, *last = i ? &rows[i - 1].first : NULL;
    if (!last || r->task != last->task) printf("\n## %s\n", tasks[r->task].title);
    if (!last || by_head(r, last) != 0) print_head(r);
    print_row(&rows[i]);
  }
}
/* The best finished row of a system and a task that the paper has a number of, which is in brackets. */
static const row *best_row(const row *rows, int count, int task, const char *system) {
  const row *best = NULL;
  for (const row *r = rows; r < rows + count; r++) {
    const report *f = &r->first;
    const bool counts = f->task == task && strcmp(f->system, system) == 0 && finished(f) && paper_of(f) > 0;
    if (counts && (!best || r->mean > best->mean)) best = r;
  }
  return best;
}
static void print_table1(const row *rows, int count) {
  printf("\n## Beside Table 1\n\nIn bold the best row of finished runs, of Pathfinder's hard ones; in brackets the "
         "paper's number.\n\n| system |");
  for (int t = 0; t < TASKS; t++) printf(" %s |", tasks[t].title);
  printf("\n|---|---|---|---|---|---|\n");
  for (size_t i = 0; i < sizeof table1 / sizeof *table1; i++) {
    printf("| %s |", table1[i].system);
    for (int t = 0; t < TASKS; t++) {
      const row *best = best_row(rows, count, t, table1[i].system);
      if (best) printf(" **%.2f**", best->mean);
      printf(" (%.2f) |", table1[i].accuracy[t]);
    }
    printf("\n");
  }
}

static double place_at(double accuracy) { return 400 + 4 * accuracy; }
static void draw_row(FILE *to, const row *r, double y) {   /* a bar, a dot a run, a ring the paper's */
  const report *f = &r->first;
  const double theirs = paper_of(f);
  const phrase hard = difficulty_of(f);
  fprintf(to, "<text x='10' y='%.0f'", y + 11);
  put_text(to, ">", f->system, false);
  put_text(to, *hard.text ? ", " : "", hard.text, false);
  put_text(to, ", ", f->settings, false);
  fprintf(to, ", %.0f steps%s</text>", f->steps, finished(f) ? "" : " (not done)");
  fprintf(to, "<rect x='400' y='%.0f' width='%.1f' height='12' fill='%s'/>", y + 1, 4 * r->mean,
          strncmp(f->system, "Luna", 4) == 0 ? "#c33" : "#48a");
  fprintf(to, "<text x='830' y='%.0f'>%.2f</text>\n", y + 11, r->mean);
  for (int k = 0; k < r->runs; k++)
    fprintf(to, "<circle cx='%.1f' cy='%.0f' r='2'/>", place_at(r->accuracy[k]), y + 7);
  if (theirs > 0)
    fprintf(to, "<circle cx='%.1f' cy='%.0f' r='5' fill='none' stroke='#000'/>", place_at(theirs), y + 7);
  fprintf(to, "\n");
}
static int draw_rows(const row *rows, int count, const char *path) {
  double y = 10;
  new_file file;
  FILE *to = file_begin(&file, path);
  if (!to) return 2;
  fprintf(to, "<svg xmlns='http://www.w3.org/2000/svg' width='890' height='%d' font-family='sans-serif' "
          "font-size='12'>\n<rect width='100%%' height='100%%' fill='#fff'/>\n", 20 * count + 34 * TASKS + 40);
  for (int i = 0; i < count; i++, y += 20) {
    if (i == 0 || rows[i].first.task != rows[i - 1].first.task) {
      fprintf(to, "<text x='10' y='%.0f' font-weight='bold'>%s</text>\n", y + 14, tasks[rows[i].first.task].title);
      y += 24;
    }
    draw_row(to, &rows[i], y);
  }
  fprintf(to, "<text x='10' y='%.0f' fill='#777'>bars: mean accuracy, 0 to 100%%; dots: runs; rings: Table 1 of arXiv "
          "2106.01540v2</text>\n</svg>\n", y + 20);
  return file_end(&file);
}

static int print_folder(const char *folder, const char *svg) {
  int count;
  row *rows = read_rows(folder, &count);
  if (count < 0) return fail("cannot open the folder %s: %s", folder, strerror(errno));
  if (count == 0) return free(rows), fail("%s has no runs of lra; they are files RUN.txt of lra train", folder);
  printf("# Long Range Arena\n\nAccuracy in percent, on samples that did not choose the model; its standard error is "
         "that of so many samples. Table 1: arXiv 2106.01540v2, trained longer, on GPUs and TPUs; its Text is IMDB's "
         "bytes, its Retrieval AAN's, its Image CIFAR-10's: on other data its numbers say nothing.\n");
  print_rows(rows, count);
  print_table1(rows, count);
  const int status = svg ? draw_rows(rows, count, svg) : 0;
  free(rows);
  return status;
}
