/* lra.c: what examples/lra.c generates and how it works lists out, against the published rules: ListOps' lengths,
   depth, members and operators; its evaluator on tests/data/listops.tsv and on LRA_LISTS, files with spaces between;
   Pathfinder's paddles, ends, discs and labels. */
#define LUNA_IMPLEMENTATION
#include "luna.h"

#include "test.h"
#include "../examples/example.h"
#include "../examples/tokens.h"
#include "../examples/lists.h"
#include "../examples/pathfinder.h"

/* Draws of one in `n` are so often right with this chance that a fair generator never fails: five deviations. */
static bool fair(int64_t seen, int64_t draws, double share) {
  return fabs((double)seen - (double)draws * share) <= 5 * sqrt((double)draws * share * (1 - share));
}

/* ---- ListOps ----------------------------------------------------------------------------------------------------- */

static const list_sizes arena_lists = { 501, 1999, 10, 10 };

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
static void check_file(const char *path) {
  list_file f;
  int64_t depth, args, wrong = 0;
  static int32_t tokens[100001];
  int32_t length;
  if (!CHECK(lists_read(&f, path) == 0, "%s is read", path)) return;
  for (int64_t i = 0; i < f.count; i++) {
    const int32_t answer = list_fetch(&f, i, tokens, &length);
    wrong += answer != list_value(tokens, length, &depth, &args);
  }
  CHECK(wrong == 0, "%s: of %lld answers %lld are not their lists' values", path, (long long)f.count, (long long)wrong);
  lists_close(&f);
}

/* ---- Pathfinder -------------------------------------------------------------------------------------------------- */

static bool same_point(point a, point b) { return a.y == b.y && a.x == b.x; }

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

int main(void) {
  char files[400];
  const char *given = getenv("LRA_LISTS");
  check_lists();
  check_values();
  snprintf(files, sizeof files, "tests/data/listops.tsv %s", given ? given : "");
  for (char *path = strtok(files, " "); path; path = strtok(NULL, " ")) check_file(path);
  for (int level = 0; level < 3; level++) check_pictures(level, TEST_QUICK ? 10 : 100);
  return test_report("lra");
}
