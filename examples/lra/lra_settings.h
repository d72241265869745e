/* lra_settings.h: the attentions, and what they and the models are trained with. Included by lra.c. */

/* ---- attentions -------------------------------------------------------------------------------------------------- */

enum { LUNA, TRANSFORMER, LOCAL, SPARSE, LONGFORMER, LINFORMER, REFORMER, SINKHORN, SYNTHESIZER, BIGBIRD, LINEAR,
       PERFORMER, RFA, WORKSPACE, ISAB, ATTENTIONS };
#define ATTENTION_NAMES "luna softmax local sparse longformer linformer reformer sinkhorn synthesizer bigbird " \
                        "linear performer rfa workspace isab"

enum { AUTHORS, LRA, SMALL };
#define SETTINGS_NAMES "authors lra quick"
/* GRID: learned, from sinusoids of a picture's row and column; COORDINATES: these sinusoids are features of a pixel */
enum { SINUSOIDAL, LEARNED, GRID, COORDINATES };
#define POSITION_NAMES "sinusoidal learned grid coordinates"
enum { CLS, MEAN };                  /* X of CLS, the mean of X */
#define POOLING_NAMES "cls mean"
#define DECAY_NAMES "inverse-sqrt cosine constant"

/* text: a line of attentions/attentions.h, in which %d is the longest sequence / divisor, rounded up; null: luna.h's
   own `kind` */
typedef struct system_line { const char *text; int64_t divisor; } system_line;
typedef struct lra_model { int64_t dim, ffn, heads, layers, mean; double dropout; } lra_model;
/* quick, lra: where they are not the system's line; lists, pictures: where LRA's of ListOps, of Image and Pathfinder
   are others. redrawn: random features, after so many steps. image, pathfinder: LRA's settings */
typedef struct attention_kind {
  const char *title;
  luna_attention_kind kind;
  system_line system, quick, lra, lists, pictures;
  int64_t redrawn;
  lra_model image, pathfinder;
} attention_kind;
static const attention_kind attention_kinds[ATTENTIONS] = {
  { "Luna", .kind = LUNA_ATTENTION_LUNA },
  { "Transformer", .kind = LUNA_ATTENTION_SOFTMAX,
    .image = { 128, 128, 8, 1, 0, 0.3 }, .pathfinder = { 32, 32, 4, 4, 1, 0.2 } },
  { "Local", .system = { "local window=50", 0 }, .lra = { "local pattern=lra window=50", 0 },
    .pictures = { "local pattern=lra window=64", 0 },
    .image = { 128, 128, 2, 1, 1, 0.3 }, .pathfinder = { 64, 64, 4, 2, 1, 0.1 } },
  { "Sparse", .system = { "sparse", 0 }, .lra = { "sparse stride=50 columns=10 first_column=true", 0 },
    .image = { 128, 128, 8, 1, 0, 0.3 }, .pathfinder = { 32, 32, 8, 1, 1, 0.2 } },
  { "Longformer", .system = { "longformer", 0 }, .lra = { "longformer left=255 right=256 global=", 0 },
    .image = { 128, 128, 4, 4, 1, 0.3 }, .pathfinder = { 32, 32, 2, 2, 1, 0.1 } },
  { "Linformer", .system = { "linformer k=%d", 1 }, .lra = { "linformer k=16", 0 }, /* k: 256 at most */
    .image = { 128, 128, 8, 1, 0, 0.3 }, .pathfinder = { 32, 32, 2, 1, 1, 0.2 } },
  { "Reformer", .system = { "reformer buckets=%d", 64 }, .quick = { "reformer rounds=1 buckets=%d", 64 },
    .lra = { "reformer buckets=10 rounds=1 chunk=%d", 10 },
    .image = { 64, 64, 8, 4, 0, 0.3 }, .pathfinder = { 64, 64, 8, 2, 1, 0.2 } },
  { "Sinkhorn", .system = { "sinkhorn max_blocks=%d", 64 },
    .lra = { "sinkhorn block=50 sort=softmax combine=sum max_blocks=%d", 50 },
    .pictures = { "sinkhorn block=64 sort=softmax combine=sum max_blocks=%d", 64 },
    .image = { 32, 64, 1, 1, 0, 0.1 }, .pathfinder = { 32, 64, 4, 2, 1, 0.2 } },
  { "Synthesizer", .system = { "synthesizer terms=dot+random length=%d", 1 },
    .image = { 128, 128, 8, 1, 0, 0.3 }, .pathfinder = { 64, 64, 4, 2, 1, 0.2 } },
  { "BigBird", .system = { "bigbird max_blocks=%d", 64 },
    .image = { 128, 128, 4, 1, 0, 0.3 }, .pathfinder = { 64, 64, 2, 4, 1, 0.2 } },
  { "Linear Transformer", .kind = LUNA_ATTENTION_LINEAR,
    .image = { 128, 128, 8, 1, 0, 0.3 }, .pathfinder = { 128, 128, 2, 1, 1, 0.2 } },
  { "Performer", .system = { "performer", 0 }, .quick = { "performer features=64", 0 },
    .lra = { "performer kernel=relu features=0", 0 }, .lists = { "performer features=2 eps=1e-6", 0 }, .redrawn = 1000,
    .image = { 128, 128, 8, 1, 0, 0.3 }, .pathfinder = { 32, 32, 8, 4, 1, 0.2 } },
  { "RFA", .system = { "rfa", 0 }, .redrawn = 1 },
  { "Shared Workspace", .system = { "workspace", 0 } },
  { "ISAB", .system = { "isab", 0 } },
};

/* ---- settings ---------------------------------------------------------------------------------------------------- */

/* The system's line for a task, its longest sequence, and what the class is read from; "" for luna.h's own. */
static void attention_line(const attention_kind *a, int64_t settings, int64_t task, int64_t longest, int64_t pooling,
                           char *out, size_t size) {
  const bool lra = settings == LRA, cls = a == &attention_kinds[SPARSE] && pooling == CLS;
  const system_line *line = &a->system;
  if (settings == SMALL && a->quick.text) line = &a->quick;
  if (lra && a->lra.text) line = &a->lra;
  if (lra && task == LISTOPS && a->lists.text) line = &a->lists;
  if (lra && task >= IMAGE && a->pictures.text) line = &a->pictures;
  const char *text = line->text ? line->text : "", *at = strstr(text, "%d");
  int64_t number = at ? (longest + line->divisor - 1) / line->divisor : 0;
  if (a == &attention_kinds[LINFORMER] && number > 256) number = 256;
  if (a == &attention_kinds[REFORMER] && !lra) number += number % 2; /* buckets are even */
  if (at) snprintf(out, size, "%.*s%lld%s", (int)(at - text), text, (long long)number, at + 2);
  else snprintf(out, size, "%s%s", text, cls ? " cls=true" : ""); /* else CLS sees itself alone */
}

/* hidden: of the classifier's ReLU layer, 0 for none; longest: tokens, with CLS; growing: see data.grown */
typedef struct recipe {
  int64_t layers, dim, heads, ffn, hidden, longest, positions, pooling, batch, steps, warmup, decay;
  double lr, weight_decay, dropout, attention_dropout, growing;
} recipe;
static const recipe recipes[3][TASKS] = {
  { /* authors: XuezheMax/fairseq-apollo, examples/luna/README.lra.md and, for the models, the code of 2021-11-18 */
    { 1, 512, 8, 2048, 2048, 2001, LEARNED, CLS, 32, 5000, 1000, 0, 1e-4, 1e-4, 0.1, 0.1, 0 },
    { 4, 256, 4, 1024, 1024, 4002, LEARNED, CLS, 32, 20000, 8000, 0, 5e-5, 1e-4, 0.3, 0.3, 0 },
    { 4, 128, 4, 512, 512, 4002, LEARNED, CLS, 32, 20000, 8000, 0, 5e-4, 1e-4, 0.1, 0.1, 0 },
    { 1, 64, 8, 128, 128, 1024, LEARNED, CLS, 256, 35000, 4000, 0, 5e-3, 0, 0.3, 0.1, 0 },
    { 1, 128, 4, 128, 256, 1026, LEARNED, MEAN, 512, 62500, 4000, 0, 1e-3, 0, 0.2, 0.1, 0 },
  },
  { /* lra: google-research/long-range-arena; 0.05 / sqrt(max(step, warm-up)) has the peak 0.05 / sqrt(warm-up) */
    { 4, 512, 8, 1024, 1024, 2001, SINUSOIDAL, CLS, 32, 5000, 1000, 0, 1.5811e-3, 0.1, 0.1, 0.1, 0 },
    { 4, 256, 4, 1024, 1024, 4001, SINUSOIDAL, CLS, 32, 20000, 8000, 0, 5.5902e-4, 0.1, 0.1, 0.1, 0 },
    { 4, 128, 4, 512, 512, 4001, SINUSOIDAL, CLS, 32, 5000, 8000, 0, 5.5902e-4, 0.1, 0.1, 0.1, 0 },
    { 1, 128, 8, 128, 128, 1025, LEARNED, CLS, 256, 35000, 175, 1, 5e-4, 0, 0.3, 0.2, 0 },
    { 4, 32, 4, 32, 32, 1025, SINUSOIDAL, MEAN, 512, 62400, 312, 1, 1e-3, 0, 0.2, 0.1, 0 },
  },
  { /* quick: of luna.h, minutes on two cores */
    { 2, 64, 8, 128, 128, 2001, LEARNED, MEAN, 128, 1000, 100, 1, 4e-3, 0.01, 0, 0, 0.8 },
    { 2, 64, 4, 128, 0, 4001, SINUSOIDAL, MEAN, 8, 300, 30, 1, 2e-3, 0.01, 0, 0, 0 },
    { 2, 64, 4, 128, 0, 2001, SINUSOIDAL, MEAN, 8, 300, 30, 1, 2e-3, 0.01, 0, 0, 0 },
    { 2, 64, 4, 128, 0, 1025, LEARNED, MEAN, 64, 1500, 150, 1, 2e-3, 0.01, 0, 0, 0 },
    { 2, 64, 4, 128, 0, 1025, LEARNED, MEAN, 64, 20000, 500, 1, 1e-3, 0, 0, 0, 0 },
  },
};

/* The recipe of a task, with what LRA has for one attention alone. */
static recipe recipe_of(int64_t settings, int64_t task, const attention_kind *a) {
  recipe r = recipes[settings][task];
  const lra_model *m = task == IMAGE ? &a->image : &a->pathfinder;
  if (settings != LRA || task < IMAGE || m->dim == 0) return r;
  r.layers = m->layers, r.dim = m->dim, r.heads = m->heads, r.ffn = r.hidden = m->ffn, r.dropout = m->dropout;
  r.pooling = m->mean ? MEAN : CLS;
  if (task == IMAGE && a == &attention_kinds[SINKHORN]) r.weight_decay = 0.7;
  return r;
}
