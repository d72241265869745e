/* example.h: what an example needs besides its one idea: a command line, files, random numbers; and for training,
   training.h.

   A program includes it once, after luna.h, and defines
     static struct settings set = { ... };                      its defaults of the common settings
     static const flag flags[] = { ..., { 0 } };                FLAGS_TRAIN, FLAGS_MODEL, FLAGS_CLASSIFIER and its own
     static const command commands[] = { ..., { 0 } };          files with their format: "text: Any file."
     int main(int count, char **given) { return example("name", commands, flags, count, given); }
   example() reads the command line, tries whether the files that will be written can be, opens a context, runs the
   command, closes the context, and returns what the command returned: 0, or 2 after one sentence by fail().
   Everything random comes from draw(), a pure function of --seed and of what it is for. */
#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#if defined(__GNUC__) || defined(__clang__)
#define TOOL static __attribute__((unused)) /* an example need not use them all */
#else
#define TOOL static
#endif

#ifdef _WIN32
#include <fcntl.h>
#include <io.h>
#include <sys/stat.h>
TOOL bool on_terminal(void) { return _isatty(1) != 0; }
TOOL int terminal_width(void) { return 80; }
TOOL double seconds(void) { return (double)clock() / CLOCKS_PER_SEC; } /* wall time there */
TOOL int move(const char *from, const char *to) { return remove(to), rename(from, to); }
TOOL bool same_file(const char *a, const char *b) { return strcmp(a, b) == 0; }
#else
#include <fcntl.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <unistd.h>
#ifdef __STRICT_ANSI__               /* POSIX functions that strict C99 headers do not declare */
FILE *fdopen(int descriptor, const char *mode);
int (fileno)(FILE *stream);         /* on BSD also a macro */
int fsync(int descriptor);
int fchmod(int descriptor, mode_t mode);
ssize_t readlink(const char *path, char *to, size_t room);
#endif
TOOL bool on_terminal(void) { return isatty(1) != 0; }
TOOL int terminal_width(void) {
  struct winsize size;
  return ioctl(1, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}
TOOL double seconds(void) {
  struct timeval now;
  gettimeofday(&now, NULL);
  return (double)now.tv_sec + 1e-6 * (double)now.tv_usec;
}
TOOL int move(const char *from, const char *to) { return rename(from, to); }
TOOL bool same_place(const char *a, const char *b) { /* of files and folders that are there */
  struct stat of_a, of_b;
  return stat(a, &of_a) == 0 && stat(b, &of_b) == 0 && of_a.st_dev == of_b.st_dev && of_a.st_ino == of_b.st_ino;
}
/* Whether two paths name one file, by other paths too, and through links. A file that is not there yet is known by its
   name and its folder. */
TOOL bool same_file(const char *a, const char *b) {
  char folder_a[4096], folder_b[4096];
  struct stat of;
  if (strcmp(a, b) == 0 || same_place(a, b)) return true;
  if (stat(a, &of) == 0 || stat(b, &of) == 0) return false;
  const char *name_a = strrchr(a, '/'), *name_b = strrchr(b, '/');
  snprintf(folder_a, sizeof folder_a, "%.*s/.", name_a ? (int)(name_a - a) + 1 : 1, name_a ? a : ".");
  snprintf(folder_b, sizeof folder_b, "%.*s/.", name_b ? (int)(name_b - b) + 1 : 1, name_b ? b : ".");
  return strcmp(name_a ? name_a + 1 : a, name_b ? name_b + 1 : b) == 0 && same_place(folder_a, folder_b);
}
#endif

#include "../luna_profile.h"
#ifdef EXAMPLE_MPI
#include "../luna_mpi.h"
#else
#include "../luna_ranks.h"
#endif

/* ---- settings, sentences, random numbers ------------------------------------------------------------------------- */

#ifdef EXAMPLE_CUDA
#include "luna_cuda.cuh"
#endif

enum { PATH_ROOM = 4096 };           /* of a path */
static struct settings {             /* the settings that many examples have */
  const char *out, *plot, *resume, *profile, *aim;
  int64_t steps, batch, layers, dim, heads, memory, ffn, attention, pooling, positions, save_every, seed, threads,
      device, validations, patience, parallel, recompute, forget, output_gate, weights, products, balance;
  double lr, dropout;
} set;
static const char *program = "example";
static uint64_t flags_given;         /* bit i: row i of the flags was on the command line */

static bool tells_of_training;       /* The output is not what the command makes, so it may be lost. */
static luna_profile *profile;        /* of --profile, or null; */
static luna_profile *profiled;       /* the same until progress_end() */
static luna_collective ranks = { .ranks = 1 }; /* of a training on several, */
static luna_ranks shared;                    /* and what they share, with the loss of the step */
static double shared_loss;

/* How many bytes make the next character, of UTF-8, that a terminal can show; 0: none. */
TOOL int showable(const unsigned char *s, int64_t size) {
  if (*s < 0x80) return *s == '\n' || *s == '\t' || (*s >= 32 && *s < 127);
  int length = *s >= 0xC2 && *s < 0xE0 ? 2 : *s >= 0xE0 && *s < 0xF0 ? 3 : *s >= 0xF0 && *s < 0xF5 ? 4 : 0;
  for (int i = 1; i < length; i++) if (i >= size || (s[i] & 0xC0) != 0x80) return 0;
  bool strange = (*s == 0xC2 && s[1] < 0xA0) || (*s == 0xE0 && s[1] < 0xA0) || (*s == 0xED && s[1] > 0x9F) ||
      (*s == 0xF0 && s[1] < 0x90) || (*s == 0xF4 && s[1] > 0x8F);
  return strange ? 0 : length;
}
/* Text of a file as a terminal may have it: "?" for what it would obey or cannot show. With `lines` their ends and tabs
   stay. */
TOOL void put_text_of(FILE *to, const void *text, int64_t size, bool lines) {
  const unsigned char *s = (const unsigned char *)text;
  for (int64_t i = 0, n; i < size; i += n ? n : 1) {
    n = s[i] < ' ' && !lines ? 0 : showable(s + i, size - i);
    if (n) fwrite(s + i, 1, (size_t)n, to);
    else fputc('?', to);
  }
}
TOOL void put_shown(FILE *to, const void *text, int64_t size) { put_text_of(to, text, size, false); }
/* A label that was found, on stdout: its own bytes, but to a terminal. */
TOOL void put_label(const void *text, int64_t size) {
  if (on_terminal()) put_shown(stdout, text, size);
  else fwrite(text, 1, (size_t)size, stdout);
}
/* Text that is made byte by byte, on stdout: its own bytes, but to a terminal characters, when they are whole. The end
   is -1. */
typedef struct byte_text { unsigned char bytes[4]; int count; } byte_text;
TOOL void put_byte_of(byte_text *w, int byte) {
  if (!on_terminal()) {
    if (byte >= 0) putchar(byte);
    return;
  }
  if (byte >= 0) w->bytes[w->count++] = (unsigned char)byte;
  while (w->count > 0) {
    const int first = w->bytes[0], whole = first < 0xC2 ? 1 : first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
    const int n = showable(w->bytes, w->count), used = n ? n : 1;
    if (n == 0 && byte >= 0 && w->count < whole) return;
    put_text_of(stdout, w->bytes, used, true);
    memmove(w->bytes, w->bytes + used, (size_t)(w->count -= used));
  }
}

/* A sentence and a line's end. Names and texts in it are shown as put_shown shows them. */
TOOL void put_sentence(FILE *to, const char *format, va_list list) {
  char text[PATH_ROOM + 2048];
  vsnprintf(text, sizeof text, format, list);
  put_shown(to, text, (int64_t)strlen(text));
  fputc('\n', to);
}
TOOL void say(const char *format, ...) {
  va_list list;
  va_start(list, format);
  put_sentence(stdout, format, list);
  va_end(list);
}
/* Prints "program: sentence" and returns 2, which a command passes on. What fails on all ranks rank 0 reports, and ends
   the others while they wait. */
TOOL int fail(const char *format, ...) {
  va_list list;
#ifdef EXAMPLE_MPI
  if (ranks.rank > 0) sleep(1);
#endif
  fflush(stdout);
  fprintf(stderr, "%s: ", program);
  va_start(list, format);
  put_sentence(stderr, format, list);
  va_end(list);
  return 2;
}

TOOL double megabytes(luna_ctx *ctx) { return (double)luna_memory(ctx).peak / 1e6; } /* at most, so far */

TOOL int failed(const luna_ctx *ctx) { /* the same with the context's own sentence */
  return fail("%s", *luna_error(ctx) ? luna_error(ctx) : "the model's numbers are not finite; try a lower --lr");
}

typedef struct portion { int64_t first, count; } portion;
/* This rank's part of n sequences. */
TOOL portion rank_part(int64_t n) {
  const int64_t first = n * ranks.rank / ranks.ranks;
  return (portion){ first, n * (ranks.rank + 1) / ranks.ranks - first };
}

/* Opens what ranks share, once model and optimiser are made or loaded. */
TOOL bool share_training(luna_params *params, luna_optimizer *optimizer) {
  return ranks.ranks == 1 || luna_ranks_open(&shared, params, optimizer, &ranks) == LUNA_OK;
}
/* The calls of a step that ranks may share. input: this rank's part of the batch; of a loss `counted` labels count. */
TOOL luna_status begin_training(luna_ctx *ctx, luna_input input) {
  return ranks.ranks > 1 ? luna_ranks_begin_step(&shared, &input, NULL) : luna_begin_step(ctx);
}
TOOL luna_status begin_look(luna_ctx *ctx, luna_input input) {
  return ranks.ranks > 1 ? luna_ranks_begin_inference(&shared, &input, NULL) : luna_begin_inference(ctx);
}
TOOL void differentiate(luna_tensor *loss, int64_t counted) {
  if (ranks.ranks > 1) shared_loss = luna_ranks_backward(&shared, loss, counted);
  else luna_backward(loss);
}
TOOL luna_status learn_from(luna_optimizer *optimizer) {
  return ranks.ranks > 1 ? luna_ranks_step(&shared) : luna_optimizer_step(optimizer);
}
/* The loss over all ranks that the step has differentiated, and any other loss. */
TOOL double learnt_loss(luna_tensor *loss) { return ranks.ranks > 1 ? shared_loss : (double)luna_item(loss); }
TOOL double loss_over_ranks(luna_tensor *loss) {
  return ranks.ranks > 1 ? luna_ranks_loss(&shared, loss, luna_counted(loss)) : (double)luna_item(loss);
}

/* The sum of what ranks have counted in their parts of a batch; NaN on failure. */
TOOL double rank_total(double own) {
  return ranks.ranks > 1 && !ranks.all_reduce(ranks.user, &own, 1, LUNA_REDUCTION_SUM_F64) ? NAN : own;
}

/* The same number for the same --seed, purpose, step and row. */
TOOL uint64_t draw(uint32_t purpose, int64_t step, int64_t row) {
  uint32_t counter[4] = { (uint32_t)step, (uint32_t)row, (uint32_t)((uint64_t)step >> 32), purpose }, random[4];
  luna_philox(counter, (uint64_t)set.seed, random);
  return ((uint64_t)random[0] << 32) | random[1];
}

TOOL uint64_t splitmix(uint64_t *state) {                  /* the next of a stream of random numbers [splitmix64] */
  uint64_t z = *state += 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

/* ---- files that are written -------------------------------------------------------------------------------------- */

/* A file is written as luna_save writes one: as a new file in the folder of its place, .luna-<n>.tmp, which takes that
   place when it is whole. The new file is created exclusively: no link is followed, and two programs do not write into
   one file. Where the place is a link, what the link points to is replaced. */
enum { TEMPORARIES = 1000, SWEPT = 16 };
typedef struct new_file {
  char place[PATH_ROOM], name[PATH_ROOM];
  FILE *to;
  bool replaces;                     /* an old file, of these permissions */
  int mode;
} new_file;

TOOL size_t folder_of(const char *path) {                  /* the length of its folder, with the folder's end */
  size_t i = strlen(path);
#ifdef _WIN32
  while (i > 0 && !strchr("/\\:", path[i - 1])) i--;
#else
  while (i > 0 && path[i - 1] != '/') i--;
#endif
  return i;
}
#ifdef _WIN32
TOOL bool find_place(new_file *f) {
  struct _stat old;
  f->replaces = _stat(f->place, &old) == 0;
  if (f->replaces && (old.st_mode & _S_IFMT) != _S_IFREG) return errno = EINVAL, false;
  return !f->replaces || _access(f->place, 2) == 0;
}
TOOL void sweep(const char *name) { (void)name; }
TOOL FILE *create(const new_file *f) {
  const int descriptor = _open(f->name, _O_WRONLY | _O_CREAT | _O_EXCL | _O_BINARY | _O_NOINHERIT,
                               _S_IREAD | _S_IWRITE);
  return descriptor < 0 ? NULL : _fdopen(descriptor, "wb");
}
TOOL bool file_whole(new_file *f) { return !ferror(f->to) && fflush(f->to) == 0 && _commit(_fileno(f->to)) == 0; }
TOOL bool file_replace(new_file *f) {
  const bool closed = fclose(f->to) == 0;
  f->to = NULL;
  return closed && move(f->name, f->place) == 0;
}
TOOL void file_close(new_file *f, bool replaced) {
  if (f->to) fclose(f->to);
  if (!replaced) remove(f->name);
}
TOOL int folder_lock(const char *folder) { return (void)folder, -1; }
TOOL void folder_unlock(int lock) { (void)lock; }
#else
/* Looks through links, and at what is there. */
TOOL bool find_place(new_file *f) {
  struct stat old;
  ssize_t size;
  for (int links = 0; (size = readlink(f->place, f->name, PATH_ROOM)) >= 0; links++) {
    const size_t folder = size > 0 && *f->name == '/' ? 0 : folder_of(f->place);
    if (links == 40) return errno = ELOOP, false;
    if (folder + (size_t)size + 32 > PATH_ROOM) return errno = ENAMETOOLONG, false;
    memcpy(f->place + folder, f->name, (size_t)size);
    f->place[folder + (size_t)size] = 0;
  }
  f->replaces = stat(f->place, &old) == 0;
  if (!f->replaces) return errno == ENOENT;
  f->mode = old.st_mode & 0777;
  if (S_ISREG(old.st_mode)) return access(f->place, W_OK) == 0;
  return errno = S_ISDIR(old.st_mode) ? EISDIR : EINVAL, false;
}
/* A temporary file is locked as long as it has its name, and its lock goes with its process: one without a lock is
   abandoned. It may be taken for that before it is locked: then it is gone, and this is false. */
TOOL bool lock_new(int descriptor, const char *name) {
  struct stat opened, named;
  if (flock(descriptor, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) return false;
  return fstat(descriptor, &opened) == 0 && stat(name, &named) == 0 && opened.st_dev == named.st_dev &&
         opened.st_ino == named.st_ino;
}
TOOL void sweep(const char *name) {  /* removes it where it is abandoned */
  struct stat of;
  char link[1];
  if (stat(name, &of) != 0 || !S_ISREG(of.st_mode) || of.st_uid != geteuid() || of.st_nlink != 1) return;
  const int descriptor = readlink(name, link, 1) < 0 ? open(name, O_RDONLY | O_NONBLOCK) : -1;
  if (descriptor < 0) return;
  if (flock(descriptor, LOCK_EX | LOCK_NB) == 0 && lock_new(descriptor, name)) remove(name);
  close(descriptor);
}
TOOL FILE *create(const new_file *f) {
  const int descriptor = open(f->name, O_WRONLY | O_CREAT | O_EXCL, f->replaces ? 0600 : 0666);
  FILE *to = NULL;
  if (descriptor < 0) return NULL;
  if (lock_new(descriptor, f->name)) to = fdopen(descriptor, "wb");
  else errno = EEXIST;
  if (!to) close(descriptor);
  return to;
}
TOOL bool file_whole(new_file *f) {  /* whether all of it has been written */
  if (f->replaces) (void)!fchmod(fileno(f->to), (mode_t)f->mode); /* fails where a file system has no permissions */
  return !ferror(f->to) && fflush(f->to) == 0 && fsync(fileno(f->to)) == 0;
}
TOOL bool file_replace(new_file *f) { return rename(f->name, f->place) == 0; }
TOOL void file_close(new_file *f, bool replaced) { /* which ends the lock, after the file has lost its name */
  if (!replaced) remove(f->name);
  fclose(f->to);
}
TOOL int folder_lock(const char *folder) { /* waits for others that have it; -1: there are no such locks here */
  const int lock = open(*folder ? folder : ".", O_RDONLY);
  if (lock >= 0) (void)!flock(lock, LOCK_EX);
  return lock;
}
TOOL void folder_unlock(int lock) { if (lock >= 0) close(lock); }
#endif

TOOL bool file_open(new_file *f, const char *path) { /* when it is false, errno says why */
  if (strlen(path) + 32 > PATH_ROOM) return errno = ENAMETOOLONG, false;
  strcpy(f->place, path);
  if (!find_place(f)) return false;
  const size_t folder = folder_of(f->place);
  if (!f->place[folder]) return errno = EISDIR, false;
  memcpy(f->name, f->place, folder);
  f->to = NULL;
  for (int n = -SWEPT; n < TEMPORARIES && !f->to; n++) {
    snprintf(f->name + folder, 32, ".luna-%d.tmp", n < 0 ? n + SWEPT : n);
    if (n < 0) sweep(f->name);
    else if ((f->to = create(f)) == NULL && errno != EEXIST) return false;
  }
  return f->to != NULL;
}
/* Begins a file. Null after a sentence. */
TOOL FILE *file_begin(new_file *f, const char *path) {
  return file_open(f, path) ? f->to : (fail("cannot write %s: %s", path, strerror(errno)), (FILE *)NULL);
}
/* Ends files of one folder, each of which takes its place, or none. Another program that ends some there at the same
   time does so before or after: files that belong together stay together. Returns 0, or 2 after a sentence. */
TOOL int files_end(new_file *files, int count) {
  char folder[PATH_ROOM];
  int whole = 0, replaced = 0, status = 0;
  snprintf(folder, sizeof folder, "%.*s", (int)folder_of(files->place), files->place);
  while (whole < count && file_whole(&files[whole])) whole++;
  const int why = errno, lock = whole == count && count > 1 ? folder_lock(folder) : -1;
  errno = why;
  while (whole == count && replaced < count && file_replace(&files[replaced])) replaced++;
  if (replaced < count)
    status = fail("cannot write %s: %s", files[whole == count ? replaced : whole].place, strerror(errno));
  for (int i = 0; i < count; i++) file_close(&files[i], i < replaced);
  folder_unlock(lock);
  return status;
}
TOOL int file_end(new_file *f) { return files_end(f, 1); }

/* ---- the command line -------------------------------------------------------------------------------------------- */

typedef struct flag {
  const char *name, *commands;       /* commands that take it, by their letters */
  const char **text;                 /* where its value goes: one of these three */
  int64_t *whole;
  double *real;
  double min, max;
  /* of a text: "in" or "out", a file that is read or written. Of a whole number: the names of 0, 1, 2, ... */
  const char *kind;
  const char *help;
} flag;
#define STRING(place) &(place), NULL, NULL, 0, 0, NULL
#define READS(place) &(place), NULL, NULL, 0, 0, "in"
#define WRITES(place) &(place), NULL, NULL, 0, 0, "out"
#define WHOLE(place, min, max) NULL, &(place), NULL, min, max, NULL
#define CHOICE(place, names) NULL, &(place), NULL, 0, 0, names
#define REAL(place, min, max) NULL, NULL, &(place), min, max, NULL
#define NO_YES "no yes"              /* its value may be left out: --name is --name yes */
#define SWITCH(place) CHOICE(place, NO_YES)

/* Help texts are sentences. What the first one says is the same in all programs that have the flag; what a program adds
   stands in the next ones. They name the value as usage() does: FILE, TEXT, NAME, N, X. */
#define FLAGS_TRAIN FLAGS_TRAIN_OF("t")
#define FLAGS_TRAIN_OF(commands) \
  { "--out", commands, WRITES(set.out), "Says where to write the result. FILE gets the model." }, \
  { "--plot", commands, WRITES(set.plot), "Draws a picture in FILE, as SVG. It shows the loss." }, \
  { "--profile", commands, WRITES(set.profile), \
   "Writes the time of each op to FILE. The name's end chooses: .timeline.json, .json or, with any other, a table." }, \
  FLAG_STEPS(commands), \
  { "--batch", commands, WHOLE(set.batch, 1, 65536), "Trains on N sequences a step." }, \
  FLAG_LR(commands)
#define FLAG_STEPS(commands) { "--steps", commands, WHOLE(set.steps, 1, 1e9), "Makes N optimiser steps." }
#define FLAG_LR(commands) \
  { "--lr", commands, REAL(set.lr, 1e-9, 10), "Sets the learning rate between warm-up and decay to X." }
#define FLAGS_MODEL FLAGS_MODEL_OF("t")
#define FLAGS_MODEL_OF(commands) \
  FLAGS_SIZES(commands), \
  { "--memory", commands, WHOLE(set.memory, 1, 65536), "Sets the number of memory slots, l, to N." }, \
  { "--dropout", commands, REAL(set.dropout, 0, 0.95), "Sets numbers to 0 with probability X in training." }
#define FLAGS_SIZES(commands) \
  { "--layers", commands, WHOLE(set.layers, 1, 1000), "Sets the number of layers to N." }, \
  { "--dim", commands, WHOLE(set.dim, 1, 65536), "Sets the width of the model, d, to N." }, \
  { "--heads", commands, WHOLE(set.heads, 1, 65536), "Sets the number of attention heads to N. They must divide d." }, \
  { "--ffn", commands, WHOLE(set.ffn, 1, 1e6), "Sets the width of the feed-forward to N." }
/* names in the order of luna_attention_kind, luna_pooling, luna_positions; see attention_choice.h */
#define FLAGS_CLASSIFIER \
  { "--attention", "t", CHOICE(set.attention, "luna softmax linear linformer"), "Chooses the kind of attention." }, \
  { "--pooling", "t", CHOICE(set.pooling, "default cls mean memory"), "Chooses what the class is predicted from." }, \
  { "--positions", "t", CHOICE(set.positions, "default none sinusoidal learned"), "Chooses how positions are encoded." }
#define FLAG_PATIENCE \
  { "--patience", "t", WHOLE(set.patience, 0, 1e6), \
   "Ends the training after N validations without a better model. 0 never ends it early." }
#define FLAGS_RARE \
  { "--balance", "t", SWITCH(set.balance), "Lets the loss count each class alike, however rare it is." }, \
  { "--aim", "t", STRING(set.aim), \
   "Chooses a threshold for the rarest class. TEXT says for what: f1, precision=0.9 or recall=0.9." }
#define FLAGS_FORGET /* names in the order of luna_forget */ \
  { "--forget", "t", CHOICE(set.forget, "no constant gated routed"), \
   "Chooses how a causal memory forgets. constant has a learned rate, gated lets each step decide, routed writes " \
   "each step to two slots, no is as in the paper." }, \
  { "--output-gate", "t", SWITCH(set.output_gate), \
   "Puts a gate on the output of attention. With --forget routed it is there unless this is no." }
#define FLAGS_RESUME FLAGS_RESUME_OF("t")
#define FLAGS_RESUME_OF(commands) \
  { "--save-every", commands, WHOLE(set.save_every, 0, 1e9), \
   "Saves a checkpoint of the training in --out every N steps. 0 saves none. Give it again with --resume." }, \
  { "--resume", commands, READS(set.resume), "Resumes the training of checkpoint FILE, with its settings." }
#define FLAG_SEED(commands) \
  { "--seed", commands, WHOLE(set.seed, 0, 9e15), \
   "Seeds the random numbers with N. The same seed gives the same result." }
#define FLAG_THREADS(commands) \
  { "--threads", commands, WHOLE(set.threads, 0, 1024), \
   "Computes on N threads. 0 uses one per core. Any number gives the same result." }
#define FLAG_WEIGHTS(commands) /* names in the order of luna_dtype */ \
  { "--weights", commands, CHOICE(set.weights, "f32 i8"), \
   "Sets the type of the weights. i8 multiplies in 8 bits, which is faster and within about 1%." }
#define FLAG_PRODUCTS(commands) \
  { "--products", commands, CHOICE(set.products, "f32 bf16"), \
   "Sets the type of the products. bf16 rounds their numbers to 16 bits, faster with AVX-512 BF16 or AMX." }
#define FLAG_PARALLEL \
  { "--parallel", "t", CHOICE(set.parallel, "no data"), \
   "Shares the work among the ranks of mpirun. This takes a program that make mpi built." }
#define FLAG_RECOMPUTE /* names in the order of luna_recompute_kind */ \
  { "--recompute", "t", CHOICE(set.recompute, "no ffn layer"), \
   "Computes this part again in the backward pass. It takes less memory and gives the same result." }
#define FLAG_DEVICE(commands) \
  { "--device", commands, CHOICE(set.device, "cpu cuda"), \
   "Computes on this device. cuda is the first NVIDIA GPU and takes a program that make cuda built." }

typedef struct command {
  /* the files that follow it, "model" or "text: Any file."; "?target" may be left out */
  const char *name, *files[4];
  const char *help;                  /* a sentence */
  int (*run)(luna_ctx *ctx, const char **words); /* words: the file names. Returns 0, or 2 after a sentence */
  const char *example;               /* what follows its name in the command that --help begins with */
} command;
static const command *program_commands;
static const flag *program_flags;

/* A command's letter is its name's first, a capital where an earlier command has that. */
TOOL bool takes(const command *c, const flag *f) {
  char letter = *c->name;
  for (const command *d = program_commands; d < c; d++) if (*d->name == *c->name) letter = (char)(letter - 'a' + 'A');
  return strchr(f->commands, letter) != NULL;
}

typedef struct phrase { char text[120]; } phrase;          /* a short text, by value */
TOOL phrase file_name(const command *c, int i) {
  const char *name = c->files[i] + (*c->files[i] == '?');
  phrase out;
  snprintf(out.text, sizeof out.text, "%.*s", (int)strcspn(name, ":"), name);
  return out;
}
TOOL const char *name_at(const char *names, int64_t n, int *length) { /* word n of a list; null at its end */
  for (; *names; names += *length + (names[*length] == ' ')) {
    *length = (int)strcspn(names, " ");
    if (n-- == 0) return names;
  }
  return NULL;
}

TOOL void flag_text(const flag *f, char *out, size_t size) { /* a number as one would type it */
  int length = 0;
  const char *name = f->whole && f->kind ? name_at(f->kind, *f->whole, &length) : NULL;
  if (name) snprintf(out, size, "%.*s", length, name);
  else if (f->whole) snprintf(out, size, "%lld", (long long)*f->whole);
  else snprintf(out, size, "%.15g", f->real ? *f->real : 0);
}

TOOL phrase takers(const flag *f, const command *commands) { /* "train, eval": the commands that take a flag */
  phrase out = { "" };
  for (const command *c = commands; c->name; c++)
    if (takes(c, f)) strcat(strcat(out.text, *out.text ? ", " : ""), c->name);
  return out;
}

TOOL const char *gap_of(const command *c) { return *c->name ? " " : ""; } /* a program of one command names none */
/* "a, b or c": the names of a list */
TOOL void put_names(FILE *to, const char *names) {
  const char *name, *gap = "";
  int length = 0;
  for (int64_t i = 0; (name = name_at(names, i, &length)) != NULL; i++) {
    fprintf(to, "%s%.*s", gap, length, name);
    gap = strchr(name + length + (name[length] == ' '), ' ') ? ", " : " or ";
  }
}
/* The commands, and the formats of their files, each once. */
TOOL void usage_commands(FILE *to, const command *commands, const command *one) {
  int formats = 0;
  fprintf(to, one ? "\nUsage:\n" : "\nCommands:\n");
  for (const command *c = commands; c->name; c++) {
    if (one && c != one) continue;
    int width = fprintf(to, "  %s%s%s ", program, gap_of(c), c->name);
    for (int i = 0; c->files[i]; i++)
      width += fprintf(to, *c->files[i] == '?' ? "[%s] " : "<%s> ", file_name(c, i).text);
    fprintf(to, "[flags]%*s%s\n", width < 34 ? 34 - width : 1, "", c->help);
  }
  for (const command *c = commands; c->name; c++)
    for (int i = 0; c->files[i] && (!one || c == one); i++) {
      bool known = !strchr(c->files[i], ':');
      for (const command *d = commands; d < c && !one; d++)
        for (int k = 0; d->files[k]; k++) known = known || strcmp(d->files[k], c->files[i]) == 0;
      if (known) continue;
      fprintf(to, "%s  %-18s%s\n", formats++ ? "" : "\nFiles:\n", file_name(c, i).text, strchr(c->files[i], ':') + 2);
    }
}
/* A flag's line, with its takers in a column of this width; 0: without. */
TOOL void usage_flag(FILE *to, const flag *f, const command *commands, int wide) {
  char value[40];
  const double number = f->whole ? (double)*f->whole : f->real ? *f->real : 0;
  const bool yes = !f->text && f->kind && strcmp(f->kind, NO_YES) == 0, names = !f->text && f->kind && !yes;
  const char *what = f->kind ? "NAME" : "N";
  if (f->real) what = "X";
  if (f->text) what = f->kind ? "FILE" : "TEXT";
  if (yes) what = "[yes|no]";
  if (f->kind || (number >= f->min && number <= f->max)) flag_text(f, value, sizeof value);
  else snprintf(value, sizeof value, "set by other flags");  /* no value that could be given */
  const int width = fprintf(to, "  %s %s", f->name, what);
  fprintf(to, "%*s", width < 26 ? 26 - width : 1, "");
  if (wide) fprintf(to, "%-*s  ", wide, takers(f, commands).text);
  fprintf(to, "%s", f->help);
  if (names) fprintf(to, " NAME is "), put_names(to, f->kind), fprintf(to, ".");
  if (f->text && *f->text) fprintf(to, " (%s)", **f->text == '\n' ? "a line break" : *f->text);
  if (!f->text) fprintf(to, " (%s)", value);
  fprintf(to, "\n");
}
/* Help for one command, or for all (null). It begins with an example. */
TOOL void usage(FILE *to, const command *commands, const flag *flags, const command *one) {
  const command *shown = one ? one : commands;
  int wide = 0;
  fprintf(to, "Example:\n  %s%s%s %s\n", program, gap_of(shown), shown->name, shown->example);
  usage_commands(to, commands, one);
  for (const flag *f = flags; f->name && !one; f++) {
    int size = (int)strlen(takers(f, commands).text);
    if (size > wide) wide = size;
  }
  fprintf(to, one ? "\nFlags (default in brackets):\n" :
          "\nFlags, the commands that take them, and what they do (default in brackets):\n");
  for (const flag *f = flags; f->name; f++) if (!one || takes(one, f)) usage_flag(to, f, commands, wide);
  if (!one && commands[1].name)
    fprintf(to, "\n%s %s --help lists the flags of %s alone.\n", program, commands->name, commands->name);
}

TOOL int set_flag(const flag *f, const char *value) {
  int length = 0;
  if (f->text) return *f->text = value, 0;
  if (f->kind) {
    const char *name;
    for (*f->whole = 0; (name = name_at(f->kind, *f->whole, &length)) != NULL; ++*f->whole)
      if (strlen(value) == (size_t)length && memcmp(name, value, (size_t)length) == 0) return 0;
    return fail("%s takes one of these names, not '%s': %s", f->name, value, f->kind);
  }
  char *end;
  double number = strtod(value, &end);
  if (end == value || *end || !(number >= f->min && number <= f->max) ||
      (f->whole && (double)(int64_t)number != number))
    return fail("%s takes a %snumber from %.15g to %.15g, not '%s'", f->name, f->whole ? "whole " : "", f->min, f->max,
                value);
  if (f->whole) *f->whole = (int64_t)number;
  else *f->real = number;
  return 0;
}

/* Whether the file could be written. Leaves everything as it is. */
TOOL bool writable(const char *path) {
  new_file probe;
  return file_open(&probe, path) && (file_close(&probe, false), true);
}

/* Times of a machine that has other work are not worth much: a warning where it has. */
TOOL void warn_if_busy(void) {
#ifndef _WIN32
  double load = 0;
  FILE *f = fopen("/proc/loadavg", "r");
  const double cores = (double)sysconf(_SC_NPROCESSORS_ONLN);
  if (f && fscanf(f, "%lf", &load) == 1 && load > 0.5 * cores)
    fprintf(stderr, "warning: This machine has a load of %.1f on %.0f cores. Times are longer than on a quiet one.\n",
            load, cores);
  if (f) fclose(f);
#endif
}

/* Before hours of training begin: what the command will write must be possible, and no file that it reads or writes
   otherwise; but --out may be the checkpoint to go on from. */
TOOL int check_files(const command *c, const flag *flags, const char **words) {
  for (const flag *f = flags; f->name; f++) {
    if (!f->text || !*f->text || !f->kind || strcmp(f->kind, "out") != 0 || !takes(c, f)) continue;
    for (int i = 0; words[i]; i++)
      if (same_file(words[i], *f->text))
        return fail("%s %s would overwrite the %s itself", f->name, *f->text, file_name(c, i).text);
    for (const flag *g = flags; g->name; g++)
      if (g != f && g->text && *g->text && g->kind && !(f->text == &set.out && g->text == &set.resume) &&
          takes(c, g) && same_file(*g->text, *f->text))
        return fail("%s and %s are both %s; they must be two files", f->name, g->name, *f->text);
    if (!writable(*f->text)) return fail("cannot write %s: %s", *f->text, strerror(errno));
  }
  return 0;
}

TOOL bool asks_help(const char *word) { return strcmp(word, "-h") == 0 || strcmp(word, "--help") == 0; }

/* "--name value" or "--name=value", given[*at]; *at moves to the last word of it. */
TOOL int parse_flag(const command *c, const flag *flags, int count, char **given, int *at) {
  const char *word = given[*at];
  const size_t size = strcspn(word, "=");
  const flag *f = flags;
  while (f->name && (strlen(f->name) != size || memcmp(f->name, word, size) != 0 || !takes(c, f))) f++;
  if (!f->name)
    return fail("this command has no flag %.*s; %s%s%s --help lists its flags", (int)size, word, program, gap_of(c),
                c->name);
  const char *next = *at + 1 < count ? given[*at + 1] : "";
  flags_given |= (uint64_t)1 << (f - flags);
  if (!word[size] && f->whole && f->kind && strcmp(f->kind, NO_YES) == 0 && strcmp(next, "yes") != 0 &&
      strcmp(next, "no") != 0) return *f->whole = 1, 0;
  if (!word[size] && ++*at == count) return fail("%s needs a value after it", f->name);
  return set_flag(f, word[size] ? word + size + 1 : given[*at]);
}

TOOL int parse(const command *c, const flag *flags, int count, char **given, const char **words) {
  int found = 0;
  for (int i = 0; i < count; i++) {
    if (strncmp(given[i], "--", 2) == 0) {
      if (parse_flag(c, flags, count, given, &i)) return 2;
      continue;
    }
    if (!c->files[found])
      return fail("'%s' is one word too many; %s%s%s --help says what the command takes", given[i], program, gap_of(c),
                  c->name);
    words[found++] = given[i];
  }
  if (c->files[found] && *c->files[found] != '?')
    return fail("the %s file is missing; %s%s%s --help says what the command takes", file_name(c, found).text, program,
                gap_of(c), c->name);
  return ranks.rank > 0 ? 0 : check_files(c, flags, words);
}

TOOL bool flag_given(const void *place) {                  /* whether the command line has the flag of this number */
  for (int i = 0; program_flags[i].name; i++)
    if (flags_given >> i & 1 && (program_flags[i].whole == place || program_flags[i].real == place)) return true;
  return false;
}

/* The default of --output-gate, which --forget decides. A training that is resumed has what it had. */
TOOL void choose_output_gate(void) {
  const bool routed = set.forget == LUNA_FORGET_ROUTED && set.attention == LUNA_ATTENTION_LUNA;
  if (routed && !set.resume && !flag_given(&set.output_gate)) set.output_gate = 1;
}

/* of luna_options.log: what is no failure; failures are said where calls end */
TOOL void say_note(void *user, luna_status status, const char *sentence) {
  (void)user;
  if (status == LUNA_OK && ranks.rank == 0) say("%s", sentence);
}
TOOL void write_text(void *file, const char *text) { fputs(text, (FILE *)file); }
TOOL bool ends_with(const char *text, const char *end) {
  const size_t size = strlen(text), tail = strlen(end);
  return size > tail && strcmp(text + size - tail, end) == 0;
}
TOOL int write_profile(void) { /* returns 0, or 2 after a sentence */
  luna_profile_format format = LUNA_PROFILE_TABLE;
  if (ends_with(set.profile, ".json")) format = LUNA_PROFILE_JSON;
  if (ends_with(set.profile, ".timeline.json")) format = LUNA_PROFILE_TIMELINE;
  new_file file;
  if (!file_begin(&file, set.profile)) return 2;
  luna_profile_write(profile, format, write_text, file.to);
  return file_end(&file);
}

static const luna_attention_hook *const *program_hooks; /* of the models that the program opens, or null */
/* Opens the context that the flags describe. Returns null after a sentence. */
TOOL luna_ctx *open_context(void) {
  const char *error = NULL;
  luna_options options = { .threads = (int)set.threads, .seed = (uint64_t)set.seed,
                           .weights = (luna_dtype)set.weights,
                           .products = set.products ? LUNA_DTYPE_BF16 : LUNA_DTYPE_F32, .log = say_note,
                           .error = &error, .hooks = program_hooks };
#ifdef EXAMPLE_CUDA
  if (set.device) options.backend = luna_cuda_backend(0);
#endif
  luna_ctx *ctx = luna_open(&options);
  if (!ctx) fail("%s", error);
  return ctx;
}

TOOL int run_example(const char *name, const command *commands, const flag *flags, int count, char **given) {
  const bool named = *commands->name;                      /* a program of one command names none */
  const int begin = named ? 2 : 1;
  const char *word = named && count > 1 ? given[1] : "", *words[4] = { NULL };
  const command *c = commands;
  program = name, program_commands = commands, program_flags = flags;
  if (asks_help(word)) return usage(stdout, commands, flags, NULL), 0;
  while (c->name && strcmp(c->name, word) != 0) c++;
  if (!c->name) {
    char list[80] = "";
    for (c = commands; c->name; c++) strcat(strcat(list, c == commands ? "" : c[1].name ? ", " : " or "), c->name);
    const int status = *word ? fail("there is no command %s; the commands are %s", word, list) :
        fail("the command is missing: %s", list);
    return fprintf(stderr, "\n"), usage(stderr, commands, flags, NULL), status;
  }
  for (int i = begin; i < count; i++)
    if (asks_help(given[i])) return usage(stdout, commands, flags, c), 0;
  if (parse(c, flags, count > begin ? count - begin : 0, given + begin, words)) return 2;
#ifndef EXAMPLE_CUDA
  if (set.device) return fail("this program was built without CUDA; make cuda builds one with it");
#endif
#ifdef EXAMPLE_MPI
  if (ranks.ranks > 1 && !set.parallel)
    return fail("there are %d ranks, on which only train runs, with --parallel data", ranks.ranks);
#else
  if (set.parallel) return fail("this program was built without MPI; make mpi builds one with it");
#endif
  luna_ctx *ctx = open_context();
  if (!ctx) return 2;
  profile = profiled = set.profile ? luna_profile_open(ctx) : NULL;
  if (set.profile && !profile) return luna_close(ctx), fail("there is no memory for a profile");
  int status = luna_error_status(ctx) != LUNA_OK ? fail("%s", luna_error(ctx)) : c->run(ctx, words);
  if (status == 0 && profile && !profiled && ranks.rank == 0) status = write_profile();
  if (status == 0 && !tells_of_training && (fflush(stdout) != 0 || ferror(stdout)))
    status = fail("cannot write the output: %s", strerror(errno));
  if (status == 0 && ranks.ranks > 1)
    printf("rank 0 of %d used at most %.1f MB of memory", ranks.ranks, megabytes(ctx));
  luna_ranks_close(&shared);
  luna_profile_close(profile);
  luna_close(ctx);
  return status;
}

#ifdef EXAMPLE_MPI
/* rank 0 alone talks */
TOOL int example(const char *name, const command *commands, const flag *flags, int count, char **given) {
  static mpi_ranks mpi;
  program = name;
  setvbuf(stderr, NULL, _IOLBF, BUFSIZ);                   /* mpirun keeps whole lines together */
  if (!mpi_open(&mpi, &count, &given)) return fail("MPI could not be started");
  ranks = mpi.collective;
  if (ranks.rank > 0 && !freopen("/dev/null", "w", stdout)) return fail("cannot write /dev/null");
  const int status = run_example(name, commands, flags, count, given);
  if (status == 0 && ranks.ranks > 1)
    printf(" and handed %lld bytes to MPI in %lld calls\n", (long long)mpi.bytes, (long long)mpi.calls);
  fflush(stdout);
  mpi_close(&mpi, status);
  return status;
}
#else
TOOL int example(const char *name, const command *commands, const flag *flags, int count, char **given) {
  return run_example(name, commands, flags, count, given);
}
#endif

/* ---- files ------------------------------------------------------------------------------------------------------- */

typedef struct contents { unsigned char *data; int64_t size; } contents; /* to be freed; a zero follows the last */

/* Returns 0, or 2 after a sentence. An empty file is an error. */
TOOL int read_file(const char *path, contents *file) {
  size_t got = 0, room = 0;
  FILE *from = fopen(path, "rb");
  *file = (contents){ NULL, 0 };
  if (!from) return fail("cannot read %s: %s", path, strerror(errno));
  do {
    file->size += (int64_t)got;
    if ((size_t)file->size + 1 >= room) {
      unsigned char *more = room < SIZE_MAX / 2 ? (unsigned char *)realloc(file->data, room = 2 * room + 65536) : NULL;
      if (!more) return fclose(from), free(file->data), file->data = NULL, fail("%s does not fit in memory", path);
      file->data = more;
    }
  } while ((got = fread(file->data + file->size, 1, room - 1 - (size_t)file->size, from)) > 0);
  file->data[file->size] = 0;
  int why = ferror(from) ? errno : 0;
  fclose(from);
  if (!why && file->size > 0) return 0;
  free(file->data);
  file->data = NULL;
  return why ? fail("cannot read %s: %s", path, strerror(why)) : fail("%s is empty", path);
}

/* The same for a file of lines, without the byte order mark that some editors put before the first. */
TOOL int read_lines_file(const char *path, contents *file) {
  static const unsigned char mark[3] = { 0xEF, 0xBB, 0xBF };
  if (read_file(path, file)) return 2;
  if (file->size < 3 || memcmp(file->data, mark, sizeof mark) != 0) return 0;
  file->size -= 3;
  memmove(file->data, file->data + 3, (size_t)file->size + 1);
  if (file->size > 0) return 0;
  free(file->data);
  file->data = NULL;
  return fail("%s is empty", path);
}

/* A model keeps a mark of the file that it learnt from, so that eval can say so of figures that are too good. */
TOOL phrase mark_of(contents file) {                       /* FNV-1a of its bytes */
  uint64_t hash = 0xcbf29ce484222325u;
  phrase out;
  for (int64_t i = 0; i < file.size; i++) hash = (hash ^ file.data[i]) * 0x100000001b3u;
  snprintf(out.text, sizeof out.text, "%016llx", (unsigned long long)hash);
  return out;
}
TOOL luna_status keep_mark(luna_params *params, contents file) {
  return luna_params_set_text(params, "learnt_from", mark_of(file).text);
}
TOOL void say_learnt(const luna_params *params, contents file, const char *path) {
  const char *mark = luna_params_get_text(params, "learnt_from");
  if (mark && strcmp(mark, mark_of(file).text) == 0)
    say("warning: The model was trained on %s, except for a part. train has measured on that part alone.", path);
}

TOOL void say_left(void *user, const char *name, const char *why) {
  say("  %s %s", name, why), (void)user;
}
/* Takes a model file's tensors that params has with the same names and shapes, and says how many; `names`: and which
   are left. Returns 0, or 2 after a sentence. */
TOOL int begin_with(luna_ctx *ctx, luna_params *params, const char *path, bool names) {
  luna_load_report taken = { .report = names ? say_left : NULL };
  if (luna_load_matching(params, luna_path(path), &taken) != LUNA_OK) return failed(ctx);
  if (taken.loaded == 0) return fail("%s has no tensor that this model has", path);
  say("%lld of %lld tensors were taken from %s", (long long)taken.loaded, (long long)luna_params_tensor_count(params),
      path);
  return 0;
}

/* The line at *at, which moves to the next one: its first byte, and its length without its end; null after the last. */
TOOL const unsigned char *next_line(contents file, int64_t *at, int64_t *length) {
  if (*at >= file.size) return NULL;
  const unsigned char *line = file.data + *at, *end = (const unsigned char *)memchr(line, '\n',
      (size_t)(file.size - *at));
  *length = end ? end - line : file.size - *at;
  *at += *length + 1;
  if (*length > 0 && line[*length - 1] == '\r') --*length;
  return line;
}

/* ---- memory that grows ------------------------------------------------------------------------------------------- */

/* as realloc, but ends the program with a sentence when there is no memory */
TOOL void *grow(void *old, int64_t count, size_t size) {
  void *more = (uint64_t)count < SIZE_MAX / size ? realloc(old, (size_t)count * size) : NULL;
  if (!more) exit(fail("out of memory"));
  return more;
}

/* The next line of the input, as next_line() has it; null after the last. It stays until the next call. */
TOOL const unsigned char *typed_line(int64_t *length) {
  static unsigned char *line;
  static int64_t room;
  int c = getchar();
  if (c == EOF && ferror(stdin)) exit(fail("cannot read the input: %s", strerror(errno)));
  if (c == EOF) return NULL;
  for (*length = 0;; c = getchar()) {
    if (*length == room) line = (unsigned char *)grow(line, room = 2 * room + 1024, 1);
    if (c == EOF || c == '\n') break;
    line[(*length)++] = (unsigned char)c;
  }
  if (*length > 0 && line[*length - 1] == '\r') --*length;
  return line;
}

typedef struct ints { int32_t *at; int64_t size, room; } ints; /* a list; to be freed */

TOOL void push(ints *list, int32_t value) {
  if (list->size == list->room)
    list->at = (int32_t *)grow(list->at, list->room = 2 * list->room + 1024, sizeof(int32_t));
  list->at[list->size++] = value;
}

typedef struct entry { uint64_t key; int64_t value; } entry;
/* entries in order of arrival; buckets: 1 + an entry's index; both to be freed */
typedef struct table { entry *entries; uint32_t *buckets; int64_t size, room; } table;

TOOL uint32_t *bucket_of(const table *t, uint64_t key) { /* where it is or would be */
  uint64_t buckets = (uint64_t)t->room * 2, i = (key * 0x9E3779B97F4A7C15u >> 20) % buckets;
  while (t->buckets[i] && t->entries[t->buckets[i] - 1].key != key) i = i + 1 < buckets ? i + 1 : 0;
  return t->buckets + i;
}

TOOL const int64_t *find(const table *t, uint64_t key) { /* null when absent */
  uint32_t bucket = t->room ? *bucket_of(t, key) : 0;
  return bucket ? &t->entries[bucket - 1].value : NULL;
}

TOOL int64_t *value_of(table *t, uint64_t key) { /* a new one is 0 */
  if (t->size == t->room) {
    t->entries = (entry *)grow(t->entries, t->room = 2 * t->room + 1024, sizeof(entry));
    t->buckets = (uint32_t *)grow(t->buckets, 2 * t->room, sizeof(uint32_t));
    memset(t->buckets, 0, (size_t)(2 * t->room) * sizeof(uint32_t));
    for (int64_t i = 0; i < t->size; i++) *bucket_of(t, t->entries[i].key) = (uint32_t)i + 1;
  }
  uint32_t *bucket = bucket_of(t, key);
  if (*bucket == 0) t->entries[t->size] = (entry){ key, 0 }, *bucket = (uint32_t)++t->size;
  return &t->entries[*bucket - 1].value;
}

#include "training.h"
