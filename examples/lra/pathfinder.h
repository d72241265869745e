/* pathfinder.h: the pictures of Pathfinder (Linsley et al., arXiv 1805.08315) as the Long Range Arena made them:
   32 x 32, two snakes of paddles among shorter ones, and two discs, which lie on the ends of one snake (label 1) or of
   both (label 0). Written from the rules of drewlinsley/pathfinder (snakes2.py) with the Arena's parameters; its
   roundings are kept, its random numbers are not. Included after example.h.

     paddle: 2 pixels long, half a pixel thick, 1 pixel free around it; a snake's next head is 3 pixels off its pivot,
             the next pivot 4.
     turn:   each pixel of that circle by cos^2 of the angle to the last paddle (0 from a right angle on), less what is
             taken there. */

enum { SIDE = 32, SEED_DISTANCE = 7, TRIALS = 3, PATCH = 9, BLOWN = 17 }; /* a paddle's patch, and before it shrinks */
#define PI 3.14159265358979323846
#define TARGET 1.5f                  /* contrast, 0.75 x 2; discs have 1; the picture's largest value becomes 255 */
#define DISTRACTOR 2.0f

typedef struct pathfinder_level { int contour, distractor, distractors; } pathfinder_level; /* paddles twice; snakes */
static const pathfinder_level pathfinder_levels[3] = { { 6, 2, 10 }, { 9, 3, 6 }, { 14, 4, 5 } };
#define DIFFICULTY_NAMES "easy intermediate hard"

typedef float canvas[SIDE * SIDE];
typedef struct point { int y, x; } point;
/* A paddle that starts in the middle of the patch: what it draws, and what it takes, 0 to 1. */
typedef struct stroke {
  float line[PATCH][PATCH], mask[PATCH][PATCH];
  point full[49];                    /* of its [7,7] first pixels those that it takes all of, from the middle one on; */
  int count;                         /* how many; 0: not made yet */
} stroke;
typedef struct snake {
  point origin, pivot, tip;          /* its two ends, and what it turns about next */
  double angle;                      /* of its newest paddle, */
  point at;                          /* whose place is not in the mask before the next one is */
  const stroke *paddle;
  int paddles;
} snake;
typedef struct picture {
  unsigned char pixels[SIDE * SIDE];
  snake target[2];
  point disc[2];
  int label, distractors;            /* distractors: that found room */
  canvas image, mask;                /* mask: what is taken, 0 to 1 */
  canvas drawn[2], *also;            /* each target's strokes alone; where strokes are drawn too, or null */
  unsigned char marks[SIDE * SIDE];  /* DARK, OTHER or CONTOUR: that on which the first disc in reading order lies */
  uint64_t random;
} picture;
enum { DARK, OTHER, CONTOUR };       /* OTHER: a lit pixel of another contour, or of the disc there */

/* ---- paddles and discs ------------------------------------------------------------------------------------------- */

TOOL double lanczos(double x) {
  return x == 0 ? 1 : fabs(x) >= 3 ? 0 : 3 * sin(PI * x) * sin(PI * x / 3) / (PI * PI * x * x);
}

/* [rows,n] -> [m,rows]: each row made shorter, with the filter Lanczos 3, and then a column. */
TOOL void shrink_rows(const unsigned char *in, int rows, int n, unsigned char *out, int m) {
  const double scale = (double)n / m;
  for (int i = 0; i < m; i++) {
    const double centre = (i + 0.5) * scale, from = centre - 3 * scale, end = centre + 3 * scale;
    const int first = from > 0 ? (int)(from + 0.5) : 0, last = end < n ? (int)(end + 0.5) : n;
    double weights[64], sum = 0;
    for (int k = first; k < last; k++) sum += weights[k] = lanczos((k + 0.5 - centre) / scale);
    for (int row = 0; row < rows; row++) {
      double value = 0.5;
      for (int k = first; k < last; k++) value += weights[k] / sum * in[row * n + k];
      out[i * rows + row] = (unsigned char)(value < 0 ? 0 : value > 255 ? 255 : value);
    }
  }
}
TOOL void shrink(const unsigned char *in, int n, unsigned char *out, int m) { /* [n,n] -> [m,m], n <= 64 */
  unsigned char columns[64 * 64];
  shrink_rows(in, n, n, columns, m);
  shrink_rows(columns, m, n, out, m);
}

TOOL void make_stroke(stroke *s, int dy, int dx) {
  unsigned char line[BLOWN][BLOWN] = { { 0 } }, mask[BLOWN][BLOWN] = { { 0 } }, small[PATCH * PATCH];
  const int middle = BLOWN / 2, length = abs(dy) > abs(dx) ? abs(dy) : abs(dx);
  for (int i = 0; i <= length; i++) {
    const double part = length ? (double)i / length : 0;
    line[middle + (int)floor(dy * part + 0.5)][middle + (int)floor(dx * part + 0.5)] = 255;
  }
  for (int y = 0; y < BLOWN; y++)
    for (int x = 0; x < BLOWN; x++)
      for (int v = -2; v <= 2 && line[y][x]; v++)
        for (int u = -2; u <= 2; u++) if (u * u + v * v <= 4) mask[y + v][x + u] = 255;
  shrink(line[0], BLOWN, small, PATCH);
  for (int i = 0; i < PATCH * PATCH; i++) s->line[i / PATCH][i % PATCH] = small[i] / 255.0f;
  shrink(mask[0], BLOWN, small, PATCH);
  for (int i = 0; i < PATCH * PATCH; i++) s->mask[i / PATCH][i % PATCH] = small[i] / 255.0f;
  for (int i = 0; i < 49; i++)
    if (s->mask[i / 7][i % 7] >= 1) s->full[s->count++] = (point){ i / 7 - 3, i % 7 - 3 };
}
TOOL const stroke *stroke_at(double angle) {              /* one of 81, by where it ends when blown up */
  static stroke strokes[9][9];
  const int middle = BLOWN / 2;
  const int dy = (int)ceil(middle + 4 * sin(angle)) - middle, dx = (int)ceil(middle + 4 * cos(angle)) - middle;
  stroke *s = &strokes[dy + 4][dx + 4];
  if (s->count == 0) make_stroke(s, dy, dx);
  return s;
}

TOOL bool inside(point p) { return p.y >= 0 && p.y < SIDE && p.x >= 0 && p.x < SIDE; }
TOOL int place(point p) { return p.y * SIDE + p.x; }
TOOL point moved(point p, double angle, double by) {
  return (point){ (int)ceil(p.y + by * sin(angle)), (int)ceil(p.x + by * cos(angle)) };
}
TOOL void stamp(canvas to, point at, const float patch[PATCH][PATCH], float contrast) {
  for (int v = 0; v < PATCH; v++)
    for (int u = 0; u < PATCH; u++) {
      const point p = { at.y + v - PATCH / 2, at.x + u - PATCH / 2 };
      const float value = contrast * patch[v][u];
      if (inside(p) && to[place(p)] < value) to[place(p)] = value;
    }
}

TOOL const unsigned char *disc_at(point at) {              /* [SIDE,SIDE], of radius 1.5; drawn once for each pixel */
  static unsigned char discs[SIDE * SIDE][SIDE * SIDE];
  static bool drawn[SIDE * SIDE];
  unsigned char blown[64 * 64] = { 0 }, *disc = discs[place(at)];
  if (drawn[place(at)]) return disc;
  for (int v = -3; v <= 3; v++)
    for (int u = -3; u <= 3; u++) {
      const int y = 2 * at.y + v, x = 2 * at.x + u;
      if (u * u + v * v <= 9 && y >= 0 && y < 64 && x >= 0 && x < 64) blown[y * 64 + x] = 255;
    }
  shrink(blown, 64, disc, SIDE);
  return drawn[place(at)] = true, disc;
}
TOOL void draw_disc(canvas to, point at) {
  const unsigned char *disc = disc_at(at);
  for (int i = 0; i < SIDE * SIDE; i++) to[i] = fmaxf(to[i], disc[i] / 255.0f);
}

/* ---- snakes ------------------------------------------------------------------------------------------------------ */

TOOL int chance(picture *p, int n) { return (int)(splitmix(&p->random) % (uint64_t)n); }
TOOL double turned(double angle) { return angle + PI < PI ? angle + PI : angle - PI; } /* by half a turn */

TOOL void draw_stroke(picture *p, point at, const stroke *paddle, float contrast) {
  stamp(p->image, at, paddle->line, contrast);
  if (p->also) stamp(*p->also, at, paddle->line, contrast);
}

/* A snake's first paddle; false where its ends are outside. */
TOOL bool begin_snake(picture *p, snake *s, point tail, double angle, float contrast) {
  const point head = moved(tail, angle, 2);
  s->origin = tail, s->tip = head, s->angle = angle, s->pivot = moved(head, turned(angle), 3);
  if (!inside(head) || !inside(s->pivot)) return false;
  s->at = tail, s->paddle = stroke_at(angle), s->paddles = 1;
  draw_stroke(p, tail, s->paddle, contrast);
  return true;
}

/* Whether a paddle fits: where it takes all, nothing is taken, and the picture's border is `border` away. */
TOOL bool fits(const picture *p, const stroke *s, int y, int x, int border) {
  for (int i = 0; i < s->count; i++) {
    const point at = { y + s->full[i].y, x + s->full[i].x };
    if (!inside(at)) continue;
    if (at.y < border || at.y >= SIDE - border || at.x < border || at.x >= SIDE - border) return false;
    if (p->mask[place(at)] > 0.3f) return false;
  }
  return true;
}
TOOL bool seed_snake(picture *p, snake *s, int border, float contrast) {
  for (int trial = 0; trial < TRIALS; trial++) {
    const double angle = (chance(p, 360) - 180) * PI / 180;
    const stroke *paddle = stroke_at(angle);
    const int low = border > 3 ? border - 3 : 0, high = SIDE - low; /* what it takes all of is at most 3 off */
    point places[SIDE * SIDE];
    int count = 0;
    for (int y = low; y < high; y++)
      for (int x = low; x < high; x++)
        if (fits(p, paddle, y, x, border)) places[count++] = (point){ y, x };
    if (count == 0) return false;
    if (begin_snake(p, s, places[chance(p, count)], angle, contrast)) return true;
  }
  return false;
}

TOOL float taken(const picture *p, int y, int x) {         /* there, and beside it */
  const point at[5] = { { y, x }, { y - 1, x }, { y + 1, x }, { y, x - 1 }, { y, x + 1 } };
  float max = 0;
  for (int i = 0; i < 5; i++) if (inside(at[i])) max = fmaxf(max, p->mask[place(at[i])]);
  return max;
}
TOOL bool is_free(const picture *p, point at, const stroke *paddle) {
  for (int v = 0; v < PATCH; v++)
    for (int u = 0; u < PATCH; u++) {
      const point k = { at.y + v - PATCH / 2, at.x + u - PATCH / 2 };
      if (inside(k) && p->mask[place(k)] + paddle->mask[v][u] >= 1.8f) return false;
    }
  return true;
}

/* The pixels that can be the next head, each once, in the order of rows, with their weights and directions; returns how
   many. */
TOOL int next_heads(const picture *p, const snake *s, point pivot, point *heads, double *weights, double *angles) {
  bool on_circle[SIDE][SIDE] = { { false } };
  const double step = 1 / 3.0;                             /* radians: an arc of one pixel */
  int count = 0;
  for (int i = 0; i * step < 2 * PI; i++) {
    const double y = pivot.y + 3 * sin(i * step), x = pivot.x + 3 * cos(i * step);
    if (y >= 0 && y < SIDE && x >= 0 && x < SIDE) on_circle[(int)y][(int)x] = true;
  }
  for (int y = pivot.y - 3; y <= pivot.y + 3; y++)
    for (int x = pivot.x - 3; x <= pivot.x + 3; x++) {
      if (!inside((point){ y, x }) || !on_circle[y][x]) continue;
      const double angle = atan2(y - pivot.y, x - pivot.x), off = fabs(angle - s->angle);
      const double turn = fmin(fmin(off, 2 * PI - off), PI / 2), weight = cos(turn) * cos(turn);
      heads[count] = (point){ y, x }, angles[count] = angle;
      weights[count++] = weight * (1 - (double)taken(p, y, x));
    }
  return count;
}

/* One paddle more; false where none fits. */
TOOL bool extend_snake(picture *p, snake *s, float contrast) {
  point heads[64];
  double weights[64], angles[64], sum = 0;
  const point pivot = moved(s->pivot, s->angle, 4);
  const int count = next_heads(p, s, pivot, heads, weights, angles);
  for (int i = 0; i < count; i++) sum += weights[i];
  for (int trial = 0; trial < TRIALS && sum >= 1e-4; trial++) {
    double pick = sum * (double)(splitmix(&p->random) >> 11) / 9007199254740992.0;
    int i = 0;
    while (i < count - 1 && (pick -= weights[i]) >= 0) i++;
    const stroke *paddle = stroke_at(turned(angles[i]));   /* from the head back */
    if (!is_free(p, heads[i], paddle)) continue;
    stamp(p->mask, s->at, s->paddle->mask, 1);
    draw_stroke(p, heads[i], paddle, contrast);
    s->pivot = pivot, s->angle = angles[i], s->tip = s->at = heads[i], s->paddle = paddle, s->paddles++;
    return true;
  }
  return false;
}

/* ---- pictures ---------------------------------------------------------------------------------------------------- */

/* Both snakes, a paddle at a time by turns. The first begins in the middle, the second at a distance from it. */
TOOL bool extend_target(picture *p, int k) {
  p->also = &p->drawn[k];
  return extend_snake(p, &p->target[k], TARGET);
}
TOOL bool draw_targets(picture *p, pathfinder_level level) {
  memset(p->image, 0, sizeof p->image), memset(p->mask, 0, sizeof p->mask), memset(p->drawn, 0, sizeof p->drawn);
  for (int i = 0; i < SIDE; i++)
    p->mask[i] = p->mask[SIDE * SIDE - 1 - i] = p->mask[i * SIDE] = p->mask[i * SIDE + SIDE - 1] = 1;
  p->also = &p->drawn[0];
  if (!seed_snake(p, &p->target[0], 2 * SEED_DISTANCE, TARGET)) return false;
  p->also = &p->drawn[1];
  bool begun = false;
  for (int trial = 0; trial < TRIALS && !begun; trial++) {
    const double angle = (chance(p, 360) - 180) * PI / 180, way = chance(p, 360) * PI / 180;
    const point o = p->target[0].origin;
    const point tail = { (int)rint(o.y + SEED_DISTANCE * sin(way)), (int)rint(o.x + SEED_DISTANCE * cos(way)) };
    begun = begin_snake(p, &p->target[1], tail, angle, TARGET);
  }
  for (int i = 1; i < level.contour && begun; i++)
    begun = extend_target(p, 0) && extend_target(p, 1);
  if (begun) stamp(p->mask, p->target[1].at, p->target[1].paddle->mask, 1); /* the rules forget the first one's */
  return begun;
}
TOOL bool draw_distractor(picture *p, pathfinder_level level) {
  snake s;
  int open = 0;
  for (int i = 0; i < SIDE * SIDE; i++) open += p->mask[i] <= 0.3f;
  bool fine = open * 100 >= SIDE * SIDE && seed_snake(p, &s, 1, DISTRACTOR);
  for (int i = 1; i < level.distractor && fine; i++) fine = extend_snake(p, &s, DISTRACTOR);
  if (fine) stamp(p->mask, s.at, s.paddle->mask, 1);
  return fine;
}

/* Simple pictures first, for training: contours go from one paddle to level.contour, and distractors from none to all,
   while `grown` goes from 0 to 1. */
TOOL pathfinder_level pathfinder_grown(pathfinder_level level, double grown) {
  level.contour = 1 + (int)((level.contour - 1) * grown + 0.5);
  level.distractors = (int)(level.distractors * grown + 0.5);
  return level;
}

/* Which lit pixels belong to the contour of the first disc in reading order: half of their light at least is its, or
   that of a disc on it. The discs look alike, so that a picture cannot tell them apart otherwise. first, second: the
   targets that the discs lie on. */
TOOL void mark_contour(picture *p, int first, int second) {
  const int k = place(p->disc[0]) < place(p->disc[1]) ? first : second;
  if (first == k) draw_disc(p->drawn[k], p->disc[0]);
  if (second == k) draw_disc(p->drawn[k], p->disc[1]);
  for (int i = 0; i < SIDE * SIDE; i++) {
    const bool own = 2 * p->drawn[k][i] >= p->image[i];
    p->marks[i] = own ? CONTOUR : OTHER;
    if (p->pixels[i] < 32) p->marks[i] = DARK;
  }
}

/* The picture that a random number stands for. */
TOOL void draw_picture(picture *p, pathfinder_level level, uint64_t random) {
  p->random = random;
  p->label = chance(p, 2);
  while (!draw_targets(p, level)) continue;
  p->distractors = 0, p->also = NULL;
  for (int i = 0; i < level.distractors; i++)
    for (int trial = 0, drawn = 0; trial < 5 && !drawn; trial++) {
      canvas image, mask;
      memcpy(image, p->image, sizeof image), memcpy(mask, p->mask, sizeof mask);
      p->distractors += drawn = draw_distractor(p, level);
      if (!drawn) memcpy(p->image, image, sizeof image), memcpy(p->mask, mask, sizeof mask);
    }
  const int first = chance(p, 2), second = p->label ? first : 1 - first;
  p->disc[0] = p->target[first].origin, p->disc[1] = p->target[second].tip;
  for (int i = 0; i < 2; i++) draw_disc(p->image, p->disc[i]);
  float low = p->image[0], high = low;
  for (int i = 0; i < SIDE * SIDE; i++) low = fminf(low, p->image[i]), high = fmaxf(high, p->image[i]);
  for (int i = 0; i < SIDE * SIDE; i++) p->pixels[i] = (unsigned char)((p->image[i] - low) * 255 / (high - low) + 0.5f);
  mark_contour(p, first, second);
}
