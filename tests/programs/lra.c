/* lra.c: examples/lra/lra.c from inside. What it generates and how it works lists out, against the published rules:
   ListOps' lengths, depth, members and operators; its evaluator on tests/data/listops.tsv and on LRA_LISTS, files with
   spaces between; Pathfinder's paddles, turns, ends, discs and labels. That no sample is both learnt from and measured.
   What --settings stands for: each number, each attention's line, the first values of weights. */
#define main lra_main
#include "examples/lra/lra.c"
#undef main

#include "test.h"
#include "common.h"

/* Draws of one in `n` are so often right with this chance that a fair generator never fails: five deviations. */
static bool fair(int64_t seen, int64_t draws, double share) {
  return fabs((double)seen - (double)draws * share) <= 5 * sqrt((double)draws * share * (1 - share));
}

/* ---- ListOps ----------------------------------------------------------------------------------------------------- */

static void check_lists(void) {
  enum { LISTS = 500 };
  static int32_t tokens[2000], again[2000];
  int64_t sum = 0, kinds[SYMBOLS] = { 0 }, operators = 0, deepest = 0, members = 0, wrong = 0, outside = 0;
  uint64_t hash = 1469598103934665603u;
  int32_t length, other;
  for (uint64_t i = 0; i < LISTS; i++) {
    int64_t depth, args;
    const int32_t value = list_make(arena_lists, i, INT64_MAX, tokens, &length);
    wrong += list_value(tokens, length, &depth, &args) != value;
    outside += length <= 500 || length >= 2000;
    deepest = depth > deepest ? depth : deepest, members = args > members ? args : members;
    sum += length;
    for (int32_t k = 0; k < length; k++) kinds[tokens[k]]++, hash = (hash ^ (uint64_t)tokens[k]) * 1099511628211u;
  }
  for (int k = MIN; k <= SM; k++) operators += kinds[k];
  CHECK(wrong == 0, "%lld lists have another value than they were made with", (long long)wrong);
  CHECK(outside == 0, "%lld lists are not of 501 to 1999 tokens", (long long)outside);
  CHECK(deepest == 10, "the deepest list has depth %lld, not 10", (long long)deepest);
  CHECK(members == 10, "the longest list has %lld members, not 10", (long long)members);
  CHECK(kinds[END] == operators, "as many ends, %lld, as operators, %lld", (long long)kinds[END], (long long)operators);
  for (int k = MIN; k <= SM; k++)
    CHECK(fair(kinds[k], operators, 0.25), "%s: %lld of %lld", symbols[k], (long long)kinds[k], (long long)operators);
  /* of 4,500 other lists by these rules: mean length 1029, deviation 390; 14.23% of the tokens are operators */
  CHECK(fabs((double)sum / LISTS - 1029) < 5 * 390 / sqrt(LISTS), "the mean length is %.1f", (double)sum / LISTS);
  const double share = (double)operators / (double)sum;
  CHECK(fabs(share - 0.1423) < 0.002, "%.4f of the tokens are operators", share);
  CHECK(hash == 0x4d4c8295474a3c87u, "the lists are the same everywhere: %llx", (unsigned long long)hash);
  for (int64_t at = 0, before = 0; at <= 10; at++) {       /* as they grow */
    const list_sizes sizes = lists_grown(arena_lists, (double)at / 10);
    const int32_t value = list_make(sizes, (uint64_t)at, INT64_MAX, tokens, &length);
    CHECK(value >= 0 && length >= sizes.shortest && length <= sizes.longest, "%d tokens at %lld", length,
          (long long)at);
    CHECK(sizes.longest >= before && (at > 0 || sizes.longest == 24) && (at < 10 || sizes.longest == 1999),
          "%lld tokens at %lld after %lld", (long long)sizes.longest, (long long)at, (long long)before);
    before = sizes.longest;
  }
  list_make(arena_lists, 7, INT64_MAX, tokens, &length), list_make(arena_lists, 7, INT64_MAX, again, &other);
  const size_t size = (size_t)length * sizeof *tokens;
  CHECK(length == other && memcmp(tokens, again, size) == 0, "the same number makes the same list");
  list_make(arena_lists, 8, INT64_MAX, again, &other);
  CHECK(length != other || memcmp(tokens, again, size) != 0, "another number makes another list");
  CHECK(list_make((list_sizes){ 90, 100, 2, 10 }, 1, 1000, tokens, &length) < 0, "lists that cannot be are not made");
}

static int32_t value_of_text(const char *text) {
  int32_t tokens[64];
  int64_t at = 0, n = 0, depth, args;
  while (at < (int64_t)strlen(text)) {
    const int s = text[at] == ' ' ? SYMBOLS : symbol((const unsigned char *)text, (int64_t)strlen(text), &at);
    if (s == SYMBOLS) at++;
    else tokens[n++] = s;
  }
  return list_value(tokens, n, &depth, &args);
}
static void check_values(void) {
  static int32_t deep[4000];
  int64_t depth, args;
  CHECK(value_of_text("7") == 7, "a digit is its value");
  CHECK(value_of_text("[MED 1 2 ]") == 1, "the median of an even count is cut to a whole number");
  const char *const none[] = { "", "]", "[MIN", "[MIN ]", "[MIN 1", "[MIN 1 ] 2", "1 2", "[MIN 1 ] ]",
    "[MAX [MIN ] 1 ]", "[MAX 1 ] [MAX 2 ]" };
  for (int i = 0; i < 10; i++) CHECK(value_of_text(none[i]) < 0, "'%s' is no list", none[i]);
  for (int i = 0; i < 4000; i++) deep[i] = MIN;
  CHECK(list_value(deep, 4000, &depth, &args) < 0, "4,000 lists within lists are too many");
}
static void check_file(const char *name) {
  list_file f;
  int64_t depth, args, wrong = 0;
  static int32_t tokens[100001];
  int32_t length;
  if (!CHECK(lists_read(&f, name) == 0, "%s is read", name)) return;
  for (int64_t i = 0; i < f.count; i++) {
    const int32_t answer = list_fetch(&f, i, tokens, &length);
    wrong += answer != list_value(tokens, length, &depth, &args);
  }
  CHECK(wrong == 0, "%s: of %lld answers %lld are not their lists' values", name, (long long)f.count, (long long)wrong);
  lists_close(&f);
}

/* ---- Pathfinder -------------------------------------------------------------------------------------------------- */

static bool same_point(point a, point b) { return a.y == b.y && a.x == b.x; }

/* A paddle more in the free middle: its direction is off the last one by an angle of density cos^2 within +-90 degrees,
   of which cos has the mean 8 / (3 pi); its pivot is 4 pixels on. */
static void check_turns(void) {
  enum { SNAKES = 2000 };
  static picture p;
  double sum = 0, nearest = SIDE, farthest = 0;
  int wrong = 0;
  for (int i = 0; i < SNAKES; i++) {
    snake s;
    memset(&p, 0, sizeof p);
    p.random = (uint64_t)i;
    const point middle = { SIDE / 2, SIDE / 2 };
    bool fine = begin_snake(&p, &s, middle, (chance(&p, 360) - 180) * PI / 180, TARGET);
    const snake before = s;
    fine = fine && extend_snake(&p, &s, TARGET);
    const double gap = hypot(s.tip.y - before.tip.y, s.tip.x - before.tip.x), turn = cos(s.angle - before.angle);
    wrong += !fine || turn < -1e-9;
    sum += turn, nearest = fmin(nearest, gap), farthest = fmax(farthest, gap);
  }
  CHECK(wrong == 0, "%d snakes turn by more than a right angle, or not at all", wrong);
  CHECK(fabs(sum / SNAKES - 8 / (3 * PI)) < 0.02, "cos of a turn is %.4f in the mean", sum / SNAKES);
  CHECK(nearest >= 2 && farthest < 6, "a paddle ends %.2f to %.2f pixels from the one before", nearest, farthest);
}

static uint64_t hashed(uint64_t hash, int64_t value) { return (hash ^ (uint64_t)value) * 1099511628211u; }

/* of the first ten pictures: the places of all, hashed, and the mean of pixels and of their squares */
typedef struct drawing { uint64_t hash; double mean, square; } drawing;
static void check_drawing(int level, drawing expected) {
  static picture p;
  drawing d = { 1469598103934665603u, 0, 0 };
  for (uint64_t i = 0; i < 10; i++) {
    draw_picture(&p, pathfinder_levels[level], i);
    d.hash = hashed(hashed(d.hash, p.label), p.distractors);
    for (int k = 0; k < 2; k++) {
      const snake s = p.target[k];
      d.hash = hashed(hashed(hashed(d.hash, place(s.origin)), place(s.tip)), place(p.disc[k]));
    }
    for (int k = 0; k < PIXELS; k++) d.mean += p.pixels[k], d.square += p.pixels[k] * (double)p.pixels[k];
  }
  d.mean /= 10 * PIXELS, d.square /= 10 * PIXELS;
  CHECK(d.hash == expected.hash, "level %d: the snakes are the same everywhere: %llx", level,
        (unsigned long long)d.hash);
  CHECK(fabs(d.mean - expected.mean) < 0.05 && fabs(d.square - expected.square) < 10,
        "level %d: pixels have the mean %.3f, their squares %.2f", level, d.mean, d.square);
}

static void check_pictures(int level, int count) {
  static picture p, again;
  const pathfinder_level l = pathfinder_levels[level];
  int labels = 0, paddles = 0, ends = 0, discs = 0, places = 0, distance = 0, most = 0, dark = 0;
  for (int i = 0; i < count; i++) {
    draw_picture(&p, l, (uint64_t)i);
    const point a = p.target[0].origin, b = p.target[1].origin;
    const double apart = hypot(a.y - b.y, a.x - b.x);
    const int one = same_point(p.disc[0], a) ? 0 : 1, other = p.label ? one : 1 - one;
    labels += p.label;
    paddles += p.target[0].paddles != l.contour || p.target[1].paddles != l.contour;
    ends += !same_point(p.disc[0], p.target[one].origin) || !same_point(p.disc[1], p.target[other].tip);
    distance += fabs(apart - 7) > 1;
    for (int k = 0; k < 2; k++) {
      const point d = p.disc[k];
      discs += p.pixels[place(d)] < 200, places += d.y < 1 || d.y > SIDE - 2 || d.x < 1 || d.x > SIDE - 2;
    }
    most = p.distractors > most ? p.distractors : most;
    for (int k = 0; k < SIDE * SIDE; k++) dark += p.pixels[k] == 0;
  }
  CHECK(fair(labels, count, 0.5), "level %d: %d of %d labels are 1", level, labels, count);
  CHECK(paddles == 0, "level %d: %d pictures have a target of not %d paddles", level, paddles, l.contour);
  CHECK(ends == 0, "level %d: in %d pictures the label is not whether both discs end one snake", level, ends);
  CHECK(discs == 0 && places == 0, "level %d: %d discs are not bright, %d lie on the border", level, discs, places);
  CHECK(distance == 0, "level %d: in %d pictures the snakes do not begin 7 pixels apart", level, distance);
  CHECK(most == l.distractors, "level %d: at most %d distractors, not %d", level, most, l.distractors);
  CHECK(l.distractor == l.contour / 3 && l.distractors == 20 / l.distractor, "level %d: the counts' rules", level);
  CHECK(dark > count * 400 && dark < count * 900, "level %d: %.0f pixels are black", level, (double)dark / count);
  draw_picture(&again, l, (uint64_t)count - 1);
  const bool same = memcmp(p.pixels, again.pixels, sizeof p.pixels) == 0 && p.label == again.label;
  CHECK(same, "level %d: the same number draws the same picture", level);
  draw_picture(&again, l, (uint64_t)count);
  CHECK(memcmp(p.pixels, again.pixels, sizeof p.pixels) != 0, "level %d: another number draws another one", level);
}

/* Simple pictures come first: what is learnt from grows, what is held does not. */
static int lit(const samples *s, int64_t index) {
  static int32_t tokens[1025];
  int32_t length;
  int bright = 0;
  s->fetch(index, tokens, &length);
  for (int k = 1; k < length; k++) bright += tokens[k] > 0;
  return bright;
}
static void check_growing(void) {
  samples s;
  int simple[2] = { 0, 0 }, whole[2] = { 0, 0 };
  for (int level = 0; level < 3; level++) {
    const pathfinder_level l = pathfinder_levels[level], least = pathfinder_grown(l, 0), all = pathfinder_grown(l, 1);
    CHECK(least.contour == 1 && least.distractors == 0, "level %d begins with %d paddles and %d distractors", level,
          least.contour, least.distractors);
    CHECK(memcmp(&l, &all, sizeof l) == 0, "level %d is whole in the end", level);
    const pathfinder_level half = pathfinder_grown(l, 0.5);
    CHECK(half.contour > 1 && half.contour < l.contour && half.distractors > 0 && half.distractors < l.distractors,
          "level %d has %d paddles and %d distractors on the way", level, half.contour, half.distractors);
  }
  data.task = &tasks[PATHFINDER], data.longest = 1025, data.seed = 1, data.difficulty = 2;
  CHECK(task_open(&s, NULL, NULL, false) == 0, "pictures are generated");
  for (int i = 0; i < 10; i++) whole[0] += lit(&s, i), whole[1] += lit(&s, s.training + i);
  data.grown = 0;
  for (int i = 0; i < 10; i++) simple[0] += lit(&s, i), simple[1] += lit(&s, s.training + i);
  CHECK(2 * simple[0] < whole[0], "of simple pictures %d pixels are not black, of whole ones %d", simple[0], whole[0]);
  CHECK(simple[1] == whole[1], "what is held stays as it is");
  data.grown = 1;
  task_close();
}

/* A picture's marks: the contour of the first disc in reading order. The other disc is on it if the label is 1. */
static void check_marks(int level) {
  enum { PICTURES = 200 };
  static picture p;
  int dark = 0, first = 0, second = 0, far = 0, others = 0, paddles = 0, strokes = 0;
  for (uint64_t i = 0; i < PICTURES; i++) {
    draw_picture(&p, pathfinder_levels[level], i);
    const int a = place(p.disc[0]) < place(p.disc[1]) ? 0 : 1;
    const int k = same_point(p.disc[a], p.target[0].origin) || same_point(p.disc[a], p.target[0].tip) ? 0 : 1;
    for (int j = 0; j < PIXELS; j++) dark += (p.marks[j] == DARK) != (p.pixels[j] < 32);
    first += p.marks[place(p.disc[a])] != CONTOUR;
    second += (p.marks[place(p.disc[1 - a])] == CONTOUR) != (p.label == 1);
    far += p.marks[place(p.target[k].origin)] != CONTOUR || p.marks[place(p.target[k].tip)] != CONTOUR;
    others += p.marks[place(p.target[1 - k].origin)] == CONTOUR || p.marks[place(p.target[1 - k].tip)] == CONTOUR;
    for (int j = 0; j < PIXELS; j++) paddles += p.marks[j] == CONTOUR, strokes += p.drawn[k][j] > 0.25f;
  }
  CHECK(dark == 0, "level %d: %d marks are not dark where the picture is, or the other way round", level, dark);
  CHECK(first == 0, "level %d: the first disc is not on its contour in %d pictures", level, first);
  CHECK(second <= 2, "level %d: the second disc is marked against the label in %d pictures", level, second);
  CHECK(far <= 4, "level %d: %d contours are not marked at both ends", level, far);
  CHECK(others <= 20, "level %d: %d other contours are marked at an end", level, others);
  CHECK(paddles > strokes * 7 / 10 && paddles < strokes * 13 / 10, "level %d: %d pixels are marked, %d are drawn",
        level, paddles, strokes);
}
/* What is learnt from has marks while --segment weighs something; what is held has none, and the same grays. */
static void check_marked(void) {
  static int32_t plain[2][1025], marked[2][1025];
  int32_t length;
  int64_t marks[2] = { 0, 0 }, wrong = 0;
  samples s;
  data.task = &tasks[PATHFINDER], data.longest = 1025, data.seed = 1, data.difficulty = 0;
  CHECK(task_open(&s, NULL, NULL, false) == 0, "pictures are generated");
  const int64_t at[2] = { 7, s.training };
  for (int i = 0; i < 2; i++) s.fetch(at[i], plain[i], &length);
  data.marked = s.training;
  for (int i = 0; i < 2; i++) s.fetch(at[i], marked[i], &length);
  data.marked = 0;
  for (int i = 0; i < 2; i++)
    for (int k = 0; k < 1025; k++)
      marks[i] += mark_of_token(marked[i][k]) != 0, wrong += gray_of_token(marked[i][k]) != plain[i][k];
  CHECK(wrong == 0, "%lld grays are others with marks", (long long)wrong);
  CHECK(marks[0] > 50 && marks[1] == 0, "%lld pixels learnt from have marks, and %lld held", (long long)marks[0],
        (long long)marks[1]);
  CHECK(mark_of_token(marked[0][0]) == 0, "CLS has none");
  task_close();
}

/* With --dark a picture keeps its lit pixels and about that share of its dark ones, each with its place. */
static void check_dark(void) {
  static int32_t tokens[1024], all[1024];
  static picture p;
  int64_t dark = 0, kept = 0, wrong = 0;
  for (uint64_t i = 0; i < 20; i++) {
    draw_picture(&p, pathfinder_levels[0], i);
    const int32_t count = picture_tokens(&p, true, 0.25, tokens), whole = picture_tokens(&p, true, 1, all);
    int64_t lit = 0, before = 0;
    for (int k = 0; k < 1024; k++) dark += p.marks[k] == DARK, lit += p.marks[k] != DARK;
    for (int32_t k = 0; k < count; k++) {
      const int64_t at = place_of_token(tokens[k], -1);
      wrong += at <= before || at > 1024 || gray_of_token(tokens[k]) != p.pixels[at - 1] ||
               mark_of_token(tokens[k]) != p.marks[at - 1];
      kept += mark_of_token(tokens[k]) == DARK, lit -= mark_of_token(tokens[k]) != DARK;
      before = at;
    }
    CHECK(lit == 0, "%lld lit pixels are left out of picture %d", (long long)lit, (int)i);
    CHECK(whole == 1024 && place_of_token(all[77], 78) == 78, "a whole picture has %d pixels in order", whole);
  }
  CHECK(wrong == 0, "%lld pixels are not those at their places", (long long)wrong);
  CHECK(fair(kept, dark, 0.25), "%lld of %lld dark pixels are kept, not a quarter", (long long)kept, (long long)dark);
}

/* With --keep an image keeps about that share of its pixels, each with its place, and others at another step. */
static void check_keep(void) {
  static unsigned char image[PIXELS];
  static int32_t tokens[PIXELS], again[PIXELS];
  int64_t kept = 0, wrong = 0, same = 0;
  for (int i = 0; i < PIXELS; i++) image[i] = (unsigned char)(i * 7 + i / 256);
  data.keep = 0.25, data.longest = PIXELS + 1;
  for (uint64_t i = 0; i < 20; i++) {
    const int32_t count = thinned_tokens((span){ image, PIXELS }, i, tokens);
    same += thinned_tokens((span){ image, PIXELS }, i + 20, again) == count && !memcmp(tokens, again, sizeof tokens);
    int64_t before = 0;
    for (int32_t k = 0; k < count; k++) {
      const int64_t at = place_of_token(tokens[k], -1);
      wrong += at <= before || at > PIXELS || gray_of_token(tokens[k]) != image[at - 1];
      before = at;
    }
    kept += count;
  }
  CHECK(wrong == 0, "%lld pixels are not those at their places", (long long)wrong);
  CHECK(same == 0, "%lld of 20 choices are the same", (long long)same);
  CHECK(fair(kept, 20 * PIXELS, 0.25), "%lld of %d pixels are kept, not a quarter", (long long)kept, 20 * PIXELS);
  data.longest = 101;
  const int32_t cut = thinned_tokens((span){ image, PIXELS }, 1, tokens);
  CHECK(cut == 100, "%d tokens, where --longest leaves room for 100", cut);

  item items[2] = { { { image }, { PIXELS }, 3 }, { { image }, { PIXELS }, 3 } };
  static int32_t samples[3][PIXELS + 1];
  int32_t sizes[3];
  data.task = &tasks[IMAGE], data.longest = PIXELS + 1, data.items = items, data.thinned = 1;
  for (int step = 0; step < 2; step++) data.step = step, fetch_item(0, samples[step], &sizes[step]);
  fetch_item(1, samples[2], &sizes[2]);
  CHECK(sizes[0] < 512 && memcmp(samples[0], samples[1], sizeof samples[0]) != 0, "another step has the same pixels");
  CHECK(sizes[2] == PIXELS + 1, "an image that is held has %d tokens", sizes[2]);
  data.keep = 1, data.step = data.thinned = 0, data.items = NULL;
}

/* ---- samples ----------------------------------------------------------------------------------------------------- */

static uint64_t sample_hash(const samples *s, int64_t index) {
  static int32_t tokens[2001];
  int32_t length;
  uint64_t hash = hashed(1469598103934665603u, s->fetch(index, tokens, &length));
  for (int32_t k = 0; k < length; k++) hash = hashed(hash, tokens[k]);
  return hash;
}
/* What eval measures on is neither learnt from nor chosen by. */
static void check_measured(int task) {
  enum { COUNT = 40 };
  uint64_t learnt[COUNT], held[COUNT];
  samples s;
  int64_t common = 0;
  data.task = &tasks[task], data.longest = task == LISTOPS ? 2001 : 1025, data.seed = 1, data.difficulty = 0;
  CHECK(task_open(&s, NULL, NULL, false) == 0, "%s is generated", data.task->name);
  const int64_t all = s.training + s.held;
  CHECK(s.training == tasks[task].made[0] && s.held == tasks[task].made[1], "%s: LRA's counts", data.task->name);
  for (int64_t i = 0; i < COUNT; i++) learnt[i] = sample_hash(&s, i), held[i] = sample_hash(&s, s.training + i);
  task_close();
  CHECK(task_open(&s, NULL, NULL, true) == 0, "%s is generated", data.task->name);
  CHECK(s.training == 0 && s.held == tasks[task].made[2], "%s: all are measured", data.task->name);
  CHECK(data.first >= all, "%s: sample %lld is measured", data.task->name, (long long)data.first);
  for (int64_t i = 0; i < COUNT; i++) {
    const uint64_t hash = sample_hash(&s, i);
    for (int64_t k = 0; k < COUNT; k++) common += hash == learnt[k] || hash == held[k];
  }
  CHECK(common == 0, "%s: %lld samples are measured that training has seen", data.task->name, (long long)common);
  task_close();
}

/* Each of the 25 ways to move by up to two pixels is taken, and moves rows and columns as it says; the border fills. */
static void check_moved(void) {
  static unsigned char image[PIXELS];
  bool seen[5][5] = { { false } };
  int ways = 0, wrong = 0;
  for (int i = 0; i < PIXELS; i++) image[i] = (unsigned char)(i / SIDE * 8 + i % SIDE % 8);
  data.shift = 2;
  for (int64_t i = 0; i < 400; i++) {
    const unsigned char *out = moved_by((span){ image, PIXELS }, draw(3, 0, i)).at;
    const int middle = out[16 * SIDE + 20], down = 16 - middle / 8, right = 20 % 8 - middle % 8;
    if (abs(down) > 2 || abs(right) > 2) { wrong++; continue; }
    seen[down + 2][right + 2] = true;
    for (int y = 0; y < SIDE; y++)
      for (int x = 0; x < SIDE; x++)
        wrong += out[y * SIDE + x] != image[in_picture(y - down) * SIDE + in_picture(x - right)];
  }
  for (int i = 0; i < 25; i++) ways += seen[i / 5][i % 5];
  CHECK(wrong == 0, "%d pixels are not where an image was moved to", wrong);
  CHECK(ways == 25, "%d of 25 ways are taken", ways);
  CHECK(in_picture(-1) == 0 && in_picture(SIDE) == SIDE - 1 && in_picture(5) == 5, "the border fills what is outside");
  data.shift = 0;
}

/* ---- settings ---------------------------------------------------------------------------------------------------- */

static void choose(int settings, int task, int kind) {
  own.settings = settings, set.attention = kind, data.task = &tasks[task], flags_given = 0;
  choose_settings();
}

/* layers x d, heads, ffn, hidden, longest, positions, pooling; batch x steps, rate, warm-up, decay, weight decay;
   dropout, the attention's, growing */
static const char *const recipe_lines[3][TASKS] = {
  { /* XuezheMax/fairseq-apollo: its README.lra.md and, for the models, the code of 2021-11-18 */
    "1x512 8 2048 2048 2001 learned cls; 32x5000 0.0001 1000 rsqrt 0.0001; 0.1 0.1 0",
    "4x256 4 1024 1024 4002 learned cls; 32x20000 5e-05 8000 rsqrt 0.0001; 0.3 0.3 0",
    "4x128 4 512 512 4002 learned cls; 32x20000 0.0005 8000 rsqrt 0.0001; 0.1 0.1 0",
    "1x64 8 128 128 1024 learned cls; 256x35000 0.005 4000 rsqrt 0; 0.3 0.1 0",
    "1x128 4 128 256 1026 learned mean; 512x62500 0.001 4000 rsqrt 0; 0.2 0.1 0",
  },
  { /* google-research/long-range-arena: 0.05 / sqrt(warm-up) */
    "4x512 8 1024 1024 2001 sinusoidal cls; 32x5000 0.0015811 1000 rsqrt 0.1; 0.1 0.1 0",
    "4x256 4 1024 1024 4001 sinusoidal cls; 32x20000 0.00055902 8000 rsqrt 0.1; 0.1 0.1 0",
    "4x128 4 512 512 4001 sinusoidal cls; 32x5000 0.00055902 8000 rsqrt 0.1; 0.1 0.1 0",
    "1x128 8 128 128 1025 learned cls; 256x35000 0.0005 175 cosine 0; 0.3 0.2 0",
    "4x32 4 32 32 1025 sinusoidal mean; 512x62400 0.001 312 cosine 0; 0.2 0.1 0",
  },
  { /* --settings quick, luna.h's own */
    "2x64 8 128 128 2001 learned mean; 128x1000 0.004 100 cosine 0.01; 0 0 0.8",
    "2x64 4 128 0 4001 sinusoidal mean; 8x300 0.002 30 cosine 0.01; 0 0 0",
    "2x64 4 128 0 2001 sinusoidal mean; 8x300 0.002 30 cosine 0.01; 0 0 0",
    "2x64 4 128 0 1025 learned mean; 64x1500 0.002 150 cosine 0.01; 0 0 0",
    "2x64 4 128 0 1025 learned mean; 64x20000 0.001 500 cosine 0; 0 0 0",
  },
};
static void check_recipes(void) {
  char line[160];
  for (int settings = 0; settings < 3; settings++)
    for (int task = 0; task < TASKS; task++) {
      choose(settings, task, LUNA);
      int at = snprintf(line, sizeof line, "%dx%d %d %d %d %d %s %s; ", (int)set.layers, (int)set.dim, (int)set.heads,
                        (int)set.ffn, (int)own.hidden, (int)own.longest,
                        own.positions == LEARNED ? "learned" : "sinusoidal", set.pooling == CLS ? "cls" : "mean");
      at += snprintf(line + at, sizeof line - (size_t)at, "%dx%d %g %d %s %g; ", (int)set.batch, (int)set.steps, set.lr,
                     (int)own.warmup, own.decay ? "cosine" : "rsqrt", own.weight_decay);
      snprintf(line + at, sizeof line - (size_t)at, "%g %g %g", set.dropout, own.attention_dropout, own.growing);
      CHECK(strcmp(line, recipe_lines[settings][task]) == 0, "settings %d, %s: %s", settings, tasks[task].name, line);
    }
}

/* LRA's for Image and Pathfinder: d, ffn = hidden, heads, layers, pooling, dropout, weight decay; and each attention's
   line for ListOps and Image under authors, lra and quick, where the class is read from CLS, but with quick */
typedef struct attention_row {
  int attention;
  const char *image, *pathfinder, *lines[3][2];
} attention_row;
static const attention_row expected_attentions[] = {
  { LUNA, "128 128 8 1 cls 0.3 0", "32 32 4 4 mean 0.2 0", { { "", "" }, { "", "" }, { "", "" } } },
  { TRANSFORMER, "128 128 8 1 cls 0.3 0", "32 32 4 4 mean 0.2 0", { { "", "" }, { "", "" }, { "", "" } } },
  { LOCAL, "128 128 2 1 mean 0.3 0", "64 64 4 2 mean 0.1 0",
    { { "local window=50", "local window=50" },
      { "local pattern=lra window=50", "local pattern=lra window=64" }, { "local window=50", "local window=50" } } },
  { SPARSE, "128 128 8 1 cls 0.3 0", "32 32 8 1 mean 0.2 0",
    { { "sparse cls=true", "sparse cls=true" },
      { "sparse stride=50 columns=10 first_column=true cls=true",
        "sparse stride=50 columns=10 first_column=true cls=true" }, { "sparse", "sparse" } } },
  { LONGFORMER, "128 128 4 4 mean 0.3 0", "32 32 2 2 mean 0.1 0",
    { { "longformer", "longformer" },
      { "longformer left=255 right=256 global=", "longformer left=255 right=256 global=" },
      { "longformer", "longformer" } } },
  { LINFORMER, "128 128 8 1 cls 0.3 0", "32 32 2 1 mean 0.2 0",
    { { "linformer k=256", "linformer k=256" }, { "linformer k=16", "linformer k=16" },
      { "linformer k=256", "linformer k=256" } } },
  { REFORMER, "64 64 8 4 cls 0.3 0", "64 64 8 2 mean 0.2 0",
    { { "reformer buckets=32", "reformer buckets=16" },
      { "reformer buckets=10 rounds=1 chunk=201", "reformer buckets=10 rounds=1 chunk=103" },
      { "reformer rounds=1 buckets=32", "reformer rounds=1 buckets=18" } } },
  { SINKHORN, "32 64 1 1 cls 0.1 0.7", "32 64 4 2 mean 0.2 0",
    { { "sinkhorn max_blocks=32", "sinkhorn max_blocks=16" },
      { "sinkhorn block=50 sort=softmax combine=sum max_blocks=41",
        "sinkhorn block=64 sort=softmax combine=sum max_blocks=17" },
      { "sinkhorn max_blocks=32", "sinkhorn max_blocks=17" } } },
  { SYNTHESIZER, "128 128 8 1 cls 0.3 0", "64 64 4 2 mean 0.2 0",
    { { "synthesizer terms=dot+random length=2001", "synthesizer terms=dot+random length=1024" },
      { "synthesizer terms=dot+random length=2001", "synthesizer terms=dot+random length=1025" },
      { "synthesizer terms=dot+random length=2001", "synthesizer terms=dot+random length=1025" } } },
  { BIGBIRD, "128 128 4 1 cls 0.3 0", "64 64 2 4 mean 0.2 0",
    { { "bigbird max_blocks=32", "bigbird max_blocks=16" }, { "bigbird max_blocks=32", "bigbird max_blocks=17" },
      { "bigbird max_blocks=32", "bigbird max_blocks=17" } } },
  { LINEAR, "128 128 8 1 cls 0.3 0", "128 128 2 1 mean 0.2 0", { { "", "" }, { "", "" }, { "", "" } } },
  { PERFORMER, "128 128 8 1 cls 0.3 0", "32 32 8 4 mean 0.2 0",
    { { "performer", "performer" }, { "performer features=2 eps=1e-6", "performer kernel=relu features=0" },
      { "performer features=64", "performer features=64" } } },
  { RFA, "128 128 8 1 cls 0.3 0", "32 32 4 4 mean 0.2 0", { { "rfa", "rfa" }, { "rfa", "rfa" }, { "rfa", "rfa" } } },
  { WORKSPACE, "128 128 8 1 cls 0.3 0", "32 32 4 4 mean 0.2 0",
    { { "workspace", "workspace" }, { "workspace", "workspace" }, { "workspace", "workspace" } } },
  { ISAB, "128 128 8 1 cls 0.3 0", "32 32 4 4 mean 0.2 0",
    { { "isab", "isab" }, { "isab", "isab" }, { "isab", "isab" } } },
};
static void check_attention(const attention_row *r) {
  const attention_kind *a = &attention_kinds[r->attention];
  char line[160];
  for (int task = IMAGE; task <= PATHFINDER; task++) {
    const char *expected = task == IMAGE ? r->image : r->pathfinder;
    choose(LRA, task, r->attention);
    snprintf(line, sizeof line, "%d %d %d %d %s %g %g", (int)set.dim, (int)set.ffn, (int)set.heads, (int)set.layers,
             set.pooling == CLS ? "cls" : "mean", set.dropout, own.weight_decay);
    CHECK(strcmp(line, expected) == 0 && own.hidden == set.ffn, "%s, LRA's %s: %s", a->title, tasks[task].name, line);
  }
  for (int settings = 0; settings < 3; settings++)
    for (int i = 0; i < 2; i++) {
      const int task = i ? IMAGE : LISTOPS;
      choose(settings, task, r->attention);
      attention_line(a, settings, task, own.longest, settings == SMALL ? MEAN : CLS, line, sizeof line);
      CHECK(strcmp(line, r->lines[settings][i]) == 0, "%s, settings %d, %s: %s", a->title, settings,
            tasks[task].name, line);
    }
  CHECK(a->redrawn == (r->attention == PERFORMER ? 1000 : r->attention == RFA), "%s: drawn anew", a->title);
}

/* ---- a model's first values -------------------------------------------------------------------------------------- */

static double deviation(luna_params *params, const char *name) {
  luna_tensor *t = luna_params_find(params, name);
  float *values = (float *)grow(NULL, luna_count(t) + 1, sizeof(float));
  double sum = 0;
  CHECK(t, "there is %s", name);
  if (t && luna_read(t, values) == LUNA_OK)
    for (int64_t i = 0; i < luna_count(t); i++) sum += (double)values[i] * (double)values[i];
  free(values);
  return sqrt(sum / (double)luna_count(t));
}
static luna_params *small_model(luna_ctx *ctx, int settings, int task, int kind) {
  luna_params *params = luna_params_open(ctx);
  choose(settings, task, kind);
  set.layers = 1, set.dim = 64, set.heads = 4, set.ffn = 64, set.memory = 64, own.hidden = 64, own.longest = 128;
  CHECK(model_open(ctx, params) == 0, "settings %d, %s, %s: a model", settings, data.task->name,
        attention_kinds[kind].title);
  return params;
}
/* Luna's authors draw the weights of ListOps and Text from N(0, 0.02), but for P; 64^(-1/2) = 0.125 */
static void check_first_values(luna_ctx *ctx) {
  for (int task = 0; task < TASKS; task++)
    for (int settings = 0; settings < 2; settings++) {
      const bool bert = settings == AUTHORS && task <= TEXT;
      luna_params *params = small_model(ctx, settings, task, LUNA);
      const double p = deviation(params, "encoder.projected_embeddings"), out = deviation(params, "hidden.weight");
      const double tokens = deviation(params, "encoder.embed_tokens.weight");
      CHECK(fabs(p - 0.125) < 0.006, "settings %d, %s: P has the deviation %.4f", settings, tasks[task].name, p);
      CHECK(bert ? fabs(tokens - 0.02) < 0.002 : fabs(tokens - 0.125) < 0.015,
            "settings %d, %s: the tokens' vectors have the deviation %.4f", settings, tasks[task].name, tokens);
      CHECK(bert == (fabs(out - 0.02) < 0.002), "settings %d, %s: the classifier's weights have the deviation %.4f",
            settings, tasks[task].name, out);
      model_close();
    }
}

/* Positions of a grid tell rows from columns, and are the more alike the nearer two pixels are. */
static void check_grid(luna_ctx *ctx) {
  enum { DIM = 16, LONGEST = 1025 };
  static float p[LONGEST * DIM];
  const int64_t shape[2] = { LONGEST, DIM };
  luna_tensor *table = luna_param(luna_params_open(ctx), "positions", 2, shape, (luna_init){ LUNA_INIT_ONES, 1 });
  CHECK(table && write_grid(table, 0.5f) == LUNA_OK && luna_read(table, p) == LUNA_OK, "positions are written");
  const float *at = p + (1 + 10 * SIDE + 12) * DIM;        /* of row 10, column 12 */
  double alike[3] = { 0 };
  int wrong = 0;
  for (int k = 0; k < DIM; k++) {
    wrong += p[k] != 0;
    wrong += at[k] != p[(1 + (k < DIM / 2 ? 10 * SIDE + 3 : 3 * SIDE + 12)) * DIM + k];
    for (int i = 0; i < 3; i++) alike[i] += at[k] * p[(1 + (10 + i * (i % 2)) * SIDE + 12 + i * (1 - i % 2)) * DIM + k];
  }
  CHECK(wrong == 0, "%d numbers are not CLS's zeros, a row's or a column's", wrong);
  CHECK(fabs(alike[0] - DIM / 2 * 0.25) < 1e-5, "the square of a position is %g", alike[0]);
  CHECK(alike[0] > alike[1] + 0.1 && alike[1] > alike[2] + 0.1, "a pixel, one below, one two to the right: %g, %g, %g",
        alike[0], alike[1], alike[2]);
}

/* ---- pixels as numbers ------------------------------------------------------------------------------------------- */

static luna_params *pixels_model(luna_ctx *ctx) {          /* of pictures of 40 tokens */
  luna_params *params = luna_params_open(ctx);
  own.pixels = 1;
  choose(SMALL, PATHFINDER, LUNA);
  CHECK(own.positions == GRID && own.masked == 0.5, "numbers have a grid, and half of them are hidden");
  set.layers = 1, set.dim = 16, set.heads = 2, set.ffn = 16, set.memory = 4, own.longest = 40, set.batch = 2;
  own.segment = 2, own.segment_for = 0.25, set.steps = 100;
  CHECK(model_open(ctx, params) == 0, "a model of pixels as numbers");
  return params;
}
static void pixels_end(void) {
  model_close();
  own.pixels = own.grays = 0, own.segment = 0, pretraining = false;
}
static void check_features(void) {
  int32_t tokens[4] = { 256, 0, marked_token(200, CONTOUR), 255 }, labels[4] = { -1, -1, -1, 15 };
  const luna_input input = { tokens, NULL, 1, 4, NULL };
  float *f = features_of(&input, labels);
  CHECK(isnan(f[0]) && f[1] == 0, "CLS has no gray: %g, %g", (double)f[0], (double)f[1]);
  CHECK(f[2] == 0 && f[3] == 0 && f[4] == 200 && f[5] == 0, "a gray is its number, and a mark is none");
  CHECK(isnan(f[6]) && f[7] == 1, "a hidden pixel has no gray, and says so: %g, %g", (double)f[6], (double)f[7]);
  free(f);
  own.positions = COORDINATES;                             /* row 2, column 3 of the picture: place 2 x 32 + 3 + 1 */
  tokens[1] = placed_token(9, 68);
  f = features_of(&input, NULL);
  const float *c = f + features_count() + FEATURES, *cls = f + FEATURES;
  CHECK(features_count() == 66 && f[features_count()] == 9, "66 features, of which the first is the gray");
  CHECK(fabs((double)c[0] - sin(2 * PI / 32)) < 1e-6 && fabs((double)c[15] - sin(PI)) < 1e-6 &&
        fabs((double)c[16] - cos(2 * PI / 32)) < 1e-6, "sines and cosines of the row: %g, %g, %g", (double)c[0],
        (double)c[15], (double)c[16]);
  CHECK(fabs((double)c[32] - sin(3 * PI / 32)) < 1e-6 && fabs((double)c[63] - cos(3 * PI / 2)) < 1e-6,
        "and of the column: %g, %g", (double)c[32], (double)c[63]);
  CHECK(cls[0] == 0 && cls[63] == 0, "CLS has no place");
  free(f);
  own.positions = SINUSOIDAL;
  own.grays = 0;
  CHECK(class_of_gray(0) == 0 && class_of_gray(15) == 0 && class_of_gray(16) == 1 && class_of_gray(255) == 15,
        "16 classes of grays");
  own.grays = 1;
  CHECK(class_of_gray(77) == 77 && class_of_gray(-1) == -1, "256 classes of grays");
  own.grays = 0;
}
static void check_fit(luna_ctx *ctx) {
  double mean[2], scale[2];
  float values[2];
  samples s;
  luna_params *params = pixels_model(ctx);
  use_data_flags();
  own.longest = data.longest = 40;
  CHECK(task_open(&s, NULL, NULL, false) == 0 && fit_grays(ctx, &s) == 0, "the grays' mean and deviation are set");
  double sum = 0, squares = 0;
  int32_t tokens[40], length;
  for (int64_t i = 0; i < 256; i++) {
    s.fetch(i, tokens, &length);
    for (int k = 1; k < 40; k++) sum += tokens[k], squares += (double)tokens[k] * tokens[k];
  }
  const double expected = sum / (256 * 39), deviation_of = sqrt(squares / (256 * 39) - expected * expected);
  luna_read(model.encoder.input.mean, values), mean[0] = (double)values[0], mean[1] = (double)values[1];
  luna_read(model.encoder.input.scale, values), scale[0] = (double)values[0], scale[1] = (double)values[1];
  CHECK(fabs(mean[0] - expected) < 1e-3 * expected + 1e-4 && mean[1] == 0, "the mean is %g, not %g", mean[0], expected);
  const double positions = deviation(params, "encoder.embed_positions.weight");
  CHECK(fabs(positions - sqrt(0.5 * 39 / 40)) < 1e-3, "positions are as large as numbers: %g", positions);
  CHECK(fabs(scale[0] * deviation_of - 1) < 1e-3 && scale[1] == 1, "the scale is %g, of %g", scale[0], deviation_of);
  task_close(), pixels_end();
}
/* Of two samples the grays are the same where --longest leaves room for a million tokens, more than a picture has. */
static void check_fit_long(luna_ctx *ctx) {
  const int64_t longest[2] = { 1 + PIXELS, 1000000 };
  float mean[2][FEATURES + COORDINATE_FEATURES];
  for (int i = 0; i < 2; i++) {
    samples s;
    pixels_model(ctx), model_close();
    own.positions = COORDINATES, own.segment = 0, own.longest = longest[i];
    use_data_flags();
    CHECK(model_open(ctx, luna_params_open(ctx)) == 0, "a model of up to %lld tokens", (long long)longest[i]);
    CHECK(task_open(&s, NULL, NULL, false) == 0, "pictures are generated");
    s.training = 2;
    CHECK(fit_grays(ctx, &s) == 0 && luna_read(model.encoder.input.mean, mean[i]) == LUNA_OK, "the grays' mean is set");
    task_close(), pixels_end();
  }
  CHECK(memcmp(mean[0], mean[1], sizeof mean[0]) == 0, "the mean is %g, and %g with more tokens than a picture has",
        (double)mean[0][0], (double)mean[1][0]);
}
/* The second loss is weighed as its flags say, and added to the labels', which is what is reported. */
static void check_segment(luna_ctx *ctx) {
  int32_t tokens[80], labels[2] = { 0, 1 };
  luna_tensor *total, *segment;
  for (int i = 0; i < 80; i++) tokens[i] = marked_token(i * 37 % 256, i % 3);
  tokens[0] = tokens[40] = 256;
  const batch b = { { tokens, NULL, 2, 40, NULL }, 2, labels };
  int32_t lengths[2] = { 40, 40 };
  batch whole = b;
  whole.input.lengths = lengths;
  pixels_model(ctx);
  pool.n = 40;
  CHECK(segment_weight(0) == 2 && segment_weight(10) == 1.2 && segment_weight(25) == 0 && segment_weight(90) == 0,
        "the weight falls to 0: %g, %g, %g", segment_weight(0), segment_weight(10), segment_weight(25));
  luna_begin_step(ctx);
  luna_tensor *loss = label_loss(&whole, 10, &total, &segment);
  const double l = (double)luna_item(loss), t = (double)luna_item(total), g = segment ? (double)luna_item(segment) : 0;
  CHECK(g > 0 && fabs(t - l - 1.2 * g) < 1e-5, "%g is not %g and 1.2 of %g", t, l, g);
  luna_backward(total);
  luna_begin_step(ctx);
  loss = label_loss(&whole, 25, &total, &segment);
  const double late = (double)luna_item(loss), alone = (double)luna_item(total);
  CHECK(late == alone && fabs(late - l) < 1e-6, "later there is the labels' loss alone: %g, %g, %g", late, alone, l);
  luna_begin_step(ctx);
  for (int i = 0; i < 80; i++) if (i % 3 == OTHER) tokens[i] = marked_token(gray_of_token(tokens[i]), CONTOUR);
  label_loss(&whole, 0, &total, &segment);
  const double other = segment ? (double)luna_item(segment) : 0;
  CHECK(fabs(other - g) > 1e-3, "other marks have another loss: %g, %g", other, g);
  pixels_end();
}
/* Half of the pixels are hidden, never CLS: their grays change nothing but the classes to be told. */
static void check_hidden(luna_ctx *ctx) {
  enum { ALL = 2 * 40 };
  int32_t tokens[ALL], masked[ALL], labels[ALL], *chosen[2];
  float out[2][ALL * 16];
  int64_t count[2], off = 0;
  for (int i = 0; i < ALL; i++) tokens[i] = i * 37 % 256;
  tokens[0] = tokens[40] = 256;
  const luna_input input = { tokens, NULL, 2, 40, NULL };
  const luna_masking masking = { .mask = 256, .probability = 0.5f, .seed = (uint64_t)set.seed, .step = 3 };
  pretraining = true;
  pixels_model(ctx);
  for (int i = 0; i < 2; i++) {
    luna_begin_inference(ctx);
    luna_tensor *x = masked_logits(&input, 3, &chosen[i], &count[i]);
    CHECK(x && x->shape[1] == 16 && luna_read(x, out[i]) == LUNA_OK, "logits of 16 grays");
    luna_mask_tokens(&input, &masking, masked, labels);
    for (int k = 0; k < ALL; k++) if (labels[k] >= 0 && labels[k] < 256) tokens[k] = 255 - tokens[k];
  }
  for (int64_t k = 0; k < count[0] * 16; k++) off += out[0][k] != out[1][k];
  CHECK(count[0] == count[1] && count[0] > 25 && count[0] < 55, "%lld of 78 pixels are hidden", (long long)count[0]);
  CHECK(off == 0, "%lld logits depend on what is hidden", (long long)off);
  int64_t same = 0;
  for (int64_t k = 0; k < count[0]; k++) same += chosen[0][k] + chosen[1][k] == 15;
  CHECK(same == count[0], "%lld of %lld classes are those of the hidden grays", (long long)same, (long long)count[0]);
  free(chosen[0]), free(chosen[1]);
  pixels_end();
}

/* ---- several seeds ----------------------------------------------------------------------------------------------- */

static bool takes_seeds(const char *text, int64_t first, int64_t last) {
  int64_t found = -1;
  own.seeds = text, set.seed = 1;
  const bool fine = seeds_of(&found) == 0;
  const bool same = fine ? set.seed == first && found == last : first < 0;
  return own.seeds = NULL, set.seed = 1, same;
}
static void check_seeds(void) {
  flags_given = 0;
  CHECK(takes_seeds("1-4", 1, 4) && takes_seeds("7-7", 7, 7) && takes_seeds(NULL, 1, 1), "seeds from one to another");
  const char *const wrong[] = { "4-1", "x", "1", "1-", "1-4x", "-1-2", "1-5000" };
  for (int i = 0; i < 7; i++) CHECK(takes_seeds(wrong[i], -1, -1), "--seeds does not take %s", wrong[i]);
  data.task = &tasks[PATHFINDER], own.trial = 100, own.trial_loss = 0, bar.step = 100;
  CHECK(fabs(trial_loss() - 0.98 * log(2)) < 1e-12, "of two classes chance's loss is ln 2: %g", trial_loss());
  run.recent = 0.69;
  CHECK(is_stuck(), "a loss of 0.69 has not moved");
  bar.step = 99;
  CHECK(!is_stuck(), "nothing is said before --trial");
  bar.step = 100, run.recent = 0.67;
  CHECK(!is_stuck(), "a loss of 0.67 has moved");
  own.trial_loss = 0.66;
  CHECK(is_stuck(), "--trial-loss decides");
  own.trial = 0;
  CHECK(!is_stuck(), "without --trial no run ends");
  own.trial_loss = 0, bar.step = 0, run.recent = 0;
}

static double features_sum(luna_params *params, int64_t step) {
  CHECK(redraw(step) == 0, "features are drawn");
  return deviation(params, "encoder.layers.0.self_attn.features");
}
static void check_redrawn(luna_ctx *ctx) {
  luna_params *params = small_model(ctx, LRA, IMAGE, RFA);
  const double first = features_sum(params, 0), second = features_sum(params, 1), third = features_sum(params, 2);
  CHECK(first != second && second != third && third != first, "RFA's features are others at each step");
  CHECK(features_sum(params, 1) == second, "of the step alone");
  set.seed = 2;
  CHECK(features_sum(params, 1) != second, "and of --seed");
  set.seed = 1;
  model_close();
  params = small_model(ctx, LRA, LISTOPS, PERFORMER);
  const double drawn = features_sum(params, 0);
  CHECK(features_sum(params, 999) == drawn && features_sum(params, 1000) != drawn, "Performer's after 1000 steps");
  model_close();
}

/* lra eval without --data: a test's samples, not those of a training */
static void check_eval(luna_ctx *ctx) {
  char name[500];
  const char *words[1] = { name };
  luna_params *params = small_model(ctx, SMALL, LISTOPS, LUNA);
  snprintf(name, sizeof name, "%s/tests/lra.safetensors", common_build());
  CHECK(keep_run(params, "") && luna_save(params, luna_path(name)) == LUNA_OK, "%s is written", name);
  model_close();
  data.first = 0;
  CHECK(eval(ctx, words) == 0, "%s is measured", name);
  CHECK(data.first == 98000, "from sample %lld on", (long long)data.first);
  own.data_seed = 9, flags_given = (uint64_t)1 << (flag_of(&own.data_seed) - flags);
  CHECK(eval(ctx, words) == 0 && data.seed == 9, "and of another --data-seed, %lld", (long long)data.seed);
  own.data_seed = 1, flags_given = 0;
  CHECK(eval(ctx, words) == 0 && data.seed == 1, "and not without it, %lld", (long long)data.seed);
  remove(name);
}

int main(void) {
  static const drawing drawings[3] = { { 0xb85f69a1b5adcc90u, 20.822, 3244.66 },
    { 0xc96f79a7711ff74fu, 22.270, 3414.43 }, { 0x45243b08a41c0770u, 27.128, 4029.63 } };
  char files[400];
  const char *given = getenv("LRA_LISTS");
  luna_ctx *ctx = luna_open(&(luna_options){ .threads = 1 });
  program = "lra";
  check_lists();
  check_values();
  snprintf(files, sizeof files, "tests/data/listops.tsv %s", given ? given : "");
  for (char *name = strtok(files, " "); name; name = strtok(NULL, " ")) check_file(name);
  check_turns();
  for (int level = 0; level < 3; level++) check_drawing(level, drawings[level]);
  for (int level = 0; level < 3; level++) check_pictures(level, TEST_QUICK ? 10 : 100);
  check_measured(LISTOPS), check_measured(PATHFINDER);
  for (int level = 0; level < 3; level++) check_marks(level);
  check_growing(), check_marked(), check_dark(), check_keep(), check_moved();
  check_recipes();
  for (int i = 0; i < ATTENTIONS; i++) check_attention(&expected_attentions[i]);
  check_features(), check_seeds();
  if (CHECK(ctx, "a context")) {
    check_first_values(ctx), check_redrawn(ctx), check_grid(ctx), check_eval(ctx);
    check_fit(ctx), check_fit_long(ctx), check_segment(ctx), check_hidden(ctx);
  }
  luna_close(ctx);
  return test_report("lra");
}
