/* series_svg.h: series and what a model finds in them, as a picture. Included after series_score.h.

     draw_series(path, title, found)     0, or 2 after a sentence. found: of each series its rows' probabilities
                                         [rows,classes], or of a series of one class the first row alone; or forecasts
                                         [ahead_count, rows + the farthest ahead, k, level_count], where they are for

   A panel has some steps of a series: each column on its own axis, in grey, with its forecasts of each distance; below,
   as a strip, the true classes and, as bars, the classes that are found, the higher the more probable. --from and --to
   say which steps. Else there is a panel of the last steps, and closer ones: of recordings with classes where the
   rarest class comes, of others the last steps again; of several series there is a panel for each. */
#define SHOWN 1500                   /* steps, at most: the last ones */
#define ZOOM 200                     /* steps of a closer panel */
#define CLOSER 4                     /* closer panels, at most */
#define MOST_SERIES 12               /* series, at most */
#define LINES 6                      /* columns, at most */
#define LEFT 190                     /* of 960: where steps begin */
#define RIGHT 940
#define ROW 78                       /* height of a column */
#define STRIP 30
#define NAME_SIZE 20                 /* characters of a name that there is room for */
#define HEADING 24                   /* height of a panel's heading */

/* Colours that the colour-blind tell apart [Okabe and Ito 2008]. They differ in lightness too, and none is the curves'.
   A second round of them is striped. */
static const char *const palette[] = { "#0072B2", "#E69F00", "#56B4E9", "#D55E00", "#009E73", "#F0E442", "#CC79A7" };
#define COLOURS ((int32_t)(sizeof palette / sizeof *palette))
#define CURVE "#333333"

/* steps `first` .. first + count - 1 of series number `number`; forecasts may be for steps after its end */
typedef struct panel { FILE *f; int64_t number, first, count; double top; const float *found; } panel;
TOOL series series_of(const panel *p) { return data.list[p->number]; }

TOOL void svg_text(FILE *f, const void *text, int64_t size) {
  const unsigned char *s = (const unsigned char *)text;
  for (int64_t i = 0, n; i < size; i += n ? n : 1) {
    n = s[i] < ' ' ? 0 : showable(s + i, size - i);
    const char *safe = n == 0 ? "?" : s[i] == '<' ? "&lt;" : s[i] == '>' ? "&gt;" : s[i] == '&' ? "&amp;" : NULL;
    if (safe) fputs(safe, f);
    else fwrite(s + i, 1, (size_t)n, f);
  }
}
TOOL void svg_word(FILE *f, double x, double y, const char *anchor, word w) {
  fprintf(f, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\">", x, y, anchor);
  svg_text(f, w.at, w.size), fprintf(f, "</text>\n");
}
TOOL void svg_name(FILE *f, double x, double y, word w) {  /* as much as there is room for */
  int64_t size = 0, shown = 0;
  while (size < w.size && shown++ < NAME_SIZE) {
    const int n = showable(w.at + size, w.size - size);
    size += n ? n : 1;
  }
  fprintf(f, "<text x=\"%.1f\" y=\"%.1f\" fill=\"#000\">", x, y);
  svg_text(f, w.at, size), fprintf(f, "%s</text>\n", size < w.size ? ".." : "");
}
TOOL word word_of(const char *text) { return (word){ (const unsigned char *)text, (int64_t)strlen(text) }; }
TOOL double step_x(const panel *p, double step) {          /* from p->first on */
  return LEFT + (RIGHT - LEFT) * step / (double)(p->count > 1 ? p->count - 1 : 1);
}
TOOL int64_t rows_of(const panel *p) {                     /* how many of its steps the series has */
  const int64_t left = series_of(p).n - p->first;
  return left < 0 ? 0 : left < p->count ? left : p->count;
}

/* ---- columns ----------------------------------------------------------------------------------------------------- */

typedef struct column_axis { plot_axis y; double top; } column_axis;
TOOL double value_y(const column_axis *s, double value) {
  const double inside = fmin(fmax(value, s->y.low), s->y.high);
  return s->top + (ROW - 14) * (s->y.high - inside) / (s->y.high - s->y.low);
}
TOOL void svg_line(const panel *p, const column_axis *s, const float *at, int64_t stride, int64_t rows,
                   const char *style) {
  bool on = false;
  fprintf(p->f, "<path fill=\"none\" %s d=\"", style);
  for (int64_t i = 0; i < rows; i++) {
    const double y = (double)at[i * stride];
    if (isfinite(y)) fprintf(p->f, "%c%.1f %.1f", on ? 'L' : 'M', step_x(p, (double)i), value_y(s, y));
    on = isfinite(y);
  }
  fprintf(p->f, "\"/>\n");
}
/* What lies between the lowest and the highest quantile: along the one, back along the other, where both are. */
TOOL void svg_band(const panel *p, const column_axis *s, const float *at, int64_t stride, const char *colour) {
  fprintf(p->f, "<path fill=\"%s\" fill-opacity=\"0.25\" d=\"", colour);
  for (int64_t i = 0, end; i < p->count; i = end + 1) {
    for (end = i; end < p->count && isfinite(at[end * stride]); end++)
      fprintf(p->f, "%c%.1f %.1f", end > i ? 'L' : 'M', step_x(p, (double)end),
              value_y(s, (double)at[end * stride + level_count - 1]));
    for (int64_t j = end; j-- > i;)
      fprintf(p->f, "L%.1f %.1f", step_x(p, (double)j), value_y(s, (double)at[j * stride]));
    if (end > i) fputc('Z', p->f);
  }
  fprintf(p->f, "\"/>\n");
}
TOOL const char *ahead_colour(int64_t a) { return palette[a % COLOURS]; }
/* Where the forecasts of a distance and a column begin, for the panel's first step. */
TOOL const float *forecasts_of(const panel *p, int64_t a, int64_t c) {
  const int64_t rows = series_of(p).n + ahead[ahead_count - 1];
  return p->found + ((a * rows + p->first) * data.k + c) * level_count;
}
TOOL plot_axis axis_of_column(const panel *p, int64_t c) {      /* of what is measured and of forecast medians */
  const float *at = data.rows + (series_of(p).at + p->first) * data.k + c;
  double low = HUGE_VAL, high = -HUGE_VAL;
  for (int64_t i = 0; i < rows_of(p); i++)
    if (isfinite(at[i * data.k])) low = fmin(low, (double)at[i * data.k]), high = fmax(high, (double)at[i * data.k]);
  for (int64_t a = 0; own.forecast && a < ahead_count; a++)
    for (int64_t i = 0; i < p->count; i++) {
      const double x = (double)forecasts_of(p, a, c)[i * data.k * level_count + level_count / 2];
      if (isfinite(x)) low = fmin(low, x), high = fmax(high, x);
    }
  return low <= high ? axis_of(low, high) : (plot_axis){ 0, 1, 1 };
}
TOOL void svg_column(const panel *p, int64_t c, double top) {
  const column_axis s = { axis_of_column(p, c), top };
  const int64_t stride = data.k * level_count;
  char style[120];
  fprintf(p->f, "<rect x=\"%d\" y=\"%.1f\" width=\"%d\" height=\"%d\" fill=\"none\" stroke=\"#ccc\"/>\n", LEFT, top,
          RIGHT - LEFT, ROW - 14);
  for (int i = 0; i < 3; i++) {                            /* 0 is not -1e-17 */
    const double value = s.y.low + i * (s.y.high - s.y.low) / 2, y = value_y(&s, value);
    fprintf(p->f, "<path d=\"M%d %.1fH%d\" stroke=\"#ddd\"/><text x=\"%d\" y=\"%.1f\" text-anchor=\"end\">%.4g"
            "</text>\n", LEFT, y, RIGHT, LEFT - 5, y + 4, fabs(value) < s.y.tick / 9 ? 0 : value);
  }
  svg_name(p->f, 14, top + (ROW - 14) / 2 + 4, column_name(c));
  for (int64_t a = ahead_count; own.forecast && level_count > 1 && a-- > 0;)
    svg_band(p, &s, forecasts_of(p, a, c), stride, ahead_colour(a));
  svg_line(p, &s, data.rows + (series_of(p).at + p->first) * data.k + c, data.k, rows_of(p),
           "stroke=\"" CURVE "\" stroke-width=\"1.2\"");
  for (int64_t a = 0; own.forecast && a < ahead_count; a++) {
    snprintf(style, sizeof style, "stroke=\"%s\" stroke-width=\"1.4\" stroke-dasharray=\"%d 2\"", ahead_colour(a),
             4 + 4 * (int)(a % 3));
    svg_line(p, &s, forecasts_of(p, a, c) + level_count / 2, stride, p->count, style);
  }
}

/* ---- strips of classes ------------------------------------------------------------------------------------------- */

TOOL void svg_class(FILE *f, int32_t label, double x, double y, double width, double height) {
  fprintf(f, "<rect x=\"%.2f\" y=\"%.1f\" width=\"%.2f\" height=\"%.1f\" fill=\"%s\"/>\n", x, y, width, height,
          palette[label % COLOURS]);
  if (label >= COLOURS)
    fprintf(f, "<rect x=\"%.2f\" y=\"%.1f\" width=\"%.2f\" height=\"%.1f\" fill=\"url(#stripes)\"/>\n", x, y, width,
            height);
}
/* A step of a strip: its class, and how high it stands, in twentieths. */
typedef struct stripe { int32_t label; int height; } stripe;
TOOL stripe stripe_of(const panel *p, int64_t i, bool found) {
  if (!found) return (stripe){ data.labels[series_of(p).at + p->first + i], 20 };
  const float *shares = p->found + (p->first + i) * label_count;
  const int32_t label = label_count == 2 ? rare_class : best_of(shares);
  return (stripe){ label, (int)(20 * (double)shares[label] + 0.5) };
}
TOOL void svg_strip(const panel *p, double top, bool found) {
  const double width = (double)(RIGHT - LEFT) / (double)p->count, full = STRIP - 8;
  const int64_t rows = rows_of(p);
  svg_word(p->f, 14, top + 15, "start", word_of(found ? "found" : "true class"));
  if (found && label_count == 2) /* the rarer class stands before the other one */
    svg_class(p->f, 1 - rare_class, LEFT, top, width * (double)rows, full);
  for (int64_t i = 0, from = 0; i < rows; i++) {
    const stripe s = stripe_of(p, i, found), next = i + 1 < rows ? stripe_of(p, i + 1, found) : (stripe){ -3, 0 };
    if (s.label == next.label && s.height == next.height) continue;
    const double height = full * s.height / 20;
    if (s.label >= 0)
      svg_class(p->f, s.label, LEFT + width * (double)from, top + full - height, width * (double)(i + 1 - from),
                height);
    from = i + 1;
  }
  fprintf(p->f, "<rect x=\"%d\" y=\"%.1f\" width=\"%d\" height=\"%d\" fill=\"none\" stroke=\"#999\"/>\n", LEFT, top,
          RIGHT - LEFT, STRIP - 8);
}

/* ---- the whole --------------------------------------------------------------------------------------------------- */

TOOL bool draws_strips(void) { return own.per_step && !own.forecast; }
TOOL int64_t shown_columns(void) { return data.k < LINES ? data.k : LINES; }
TOOL double panel_height(void) {
  return HEADING + (double)(ROW * shown_columns()) + (draws_strips() ? 2 * STRIP : 0) + 44;
}
TOOL void svg_heading(const panel *p, double y) {
  fprintf(p->f, "<text x=\"%d\" y=\"%.1f\" fill=\"#000\">", LEFT, y);
  if (data.count > 1) fprintf(p->f, "series %lld, ", (long long)p->number + 1);
  fprintf(p->f, "steps %lld to %lld", (long long)p->first + 1, (long long)(p->first + p->count));
  if (!own.forecast && !own.per_step) {
    const int32_t label = series_of(p).label, found = best_of(p->found);
    fprintf(p->f, ": "), svg_text(p->f, classes[found].at, classes[found].size);
    fprintf(p->f, " with %.0f%%", 100 * (double)p->found[found]);
    if (label >= 0) fprintf(p->f, "; true: "), svg_text(p->f, classes[label].at, classes[label].size);
  }
  fprintf(p->f, "</text>\n");
}
TOOL void svg_panel(const panel *p) {
  double y = p->top + HEADING;
  const double first = (double)p->first + 1, last = (double)(p->first + p->count);
  svg_heading(p, p->top + 15);
  for (int64_t c = 0; c < shown_columns(); c++, y += ROW) svg_column(p, c, y);
  for (int found = 0; found < 2 && draws_strips(); found++, y += STRIP) svg_strip(p, y, found != 0);
  const plot_axis x = axis_of(first, last);
  for (double v = x.low; v <= last; v += x.tick) {
    if (v < first) continue;
    fprintf(p->f, "<path d=\"M%.1f %.1fv4\" stroke=\"#666\"/><text x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\">%g"
            "</text>\n", step_x(p, v - first), y - 8, step_x(p, v - first), y + 10, v);
  }
  svg_word(p->f, (LEFT + RIGHT) / 2, y + 27, "middle", word_of("step"));
}
/* What the lines or colours mean; returns where it ends. */
TOOL double svg_legend(FILE *f, double y) {
  char text[100];
  double x = LEFT;
  for (int32_t c = 0; c < label_count && draws_strips(); c++, x += 150) {
    if (x > RIGHT - 150) x = LEFT, y += 20;
    svg_class(f, c, x, y - 10, 14, 12);
    svg_name(f, x + 19, y, classes[c]);
  }
  if (draws_strips()) {
    svg_word(f, LEFT, y + 20, "start", word_of("found: the higher, the more probable"));
    return y + 20;
  }
  fprintf(f, "<path d=\"M%d %.1fh24\" stroke=\"" CURVE "\" stroke-width=\"1.6\"/>", LEFT, y - 4);
  svg_word(f, LEFT + 30, y, "start", word_of("measured"));
  for (int64_t a = 0; own.forecast && a < ahead_count; a++) {
    x += 150;
    if (x > RIGHT - 150) x = LEFT + 150, y += 20;
    fprintf(f, "<path d=\"M%.0f %.1fh24\" stroke=\"%s\" stroke-width=\"1.6\" stroke-dasharray=\"%d 2\"/>", x, y - 4,
            ahead_colour(a), 4 + 4 * (int)(a % 3));
    snprintf(text, sizeof text, "forecast, %lld ahead", (long long)ahead[a]);
    svg_word(f, x + 30, y, "start", word_of(text));
  }
  if (!own.forecast || level_count == 1) return y;
  snprintf(text, sizeof text, "%lld%% interval", (long long)own.interval);
  fprintf(f, "<rect x=\"%d\" y=\"%.1f\" width=\"24\" height=\"12\" fill=\"%s\" fill-opacity=\"0.25\"/>", LEFT,
          y + 10, ahead_colour(0));
  svg_word(f, LEFT + 30, y + 20, "start", word_of(text));
  return y + 20;
}

/* ---- which steps ------------------------------------------------------------------------------------------------- */

typedef struct plan { panel at[MOST_SERIES + CLOSER]; int count; } plan;
TOOL void plan_add(plan *all, int64_t number, int64_t first, int64_t last) { /* steps first .. last - 1, from 0 on */
  const int64_t end = data.list[number].n + (own.forecast ? ahead[ahead_count - 1] : 0);
  if (last > end) last = end;
  if (first < 0) first = 0;
  if (first < last && all->count < MOST_SERIES + CLOSER)
    all->at[all->count++] = (panel){ NULL, number, first, last - first, 0, NULL };
}
/* Closer panels where the rarest class comes: as the data say or, where they do not, as the model finds. */
TOOL void plan_incidents(plan *all, const float *found) {
  const series s = data.list[0];
  bool given = false, on = false;
  for (int64_t i = 0; i < s.n; i++) given = given || data.labels[s.at + i] == rare_class;
  for (int64_t i = 0, end = 0; i < s.n && all->count <= CLOSER; i++) {
    const bool is = (given ? data.labels[s.at + i] : best_of(found + i * label_count)) == rare_class;
    if (is && !on && i >= end) {
      const int64_t first = i - ZOOM / 2 > 0 ? i - ZOOM / 2 : 0;
      end = first + ZOOM < s.n ? first + ZOOM : s.n;
      plan_add(all, 0, end - ZOOM, end);
    }
    on = is;
  }
}
TOOL void plan_panels(plan *all, const float *const *found) {
  const int64_t n = data.list[0].n, end = n + (own.forecast ? ahead[ahead_count - 1] : 0);
  if (own.from || own.to) {
    plan_add(all, 0, own.from ? own.from - 1 : 0, own.to ? own.to : end);
    return;
  }
  for (int64_t i = 0; data.count > 1 && i < data.count && i < MOST_SERIES; i++)
    plan_add(all, i, data.list[i].n - SHOWN, data.list[i].n + SHOWN);
  if (data.count > 1) return;
  plan_add(all, 0, n - SHOWN, end);
  if (end <= ZOOM) return;
  if (draws_strips()) plan_incidents(all, found[0]);
  if (all->count == 1) plan_add(all, 0, end - ZOOM, end);
}

TOOL int draw_series(const char *path, const char *title, const float *const *found) {
  static plan all;
  plan_panels(&all, found);
  if (all.count == 0) return fail("--from and --to leave no step of the first series, which has %lld steps",
                                  (long long)data.list[0].n);
  const int64_t entries = draws_strips() ? label_count : ahead_count + 1;
  const double top = 46 + 20 * (double)((entries + 4) / 5 + 1), height = top + all.count * panel_height();
  new_file file;
  FILE *f = file_begin(&file, path);
  if (!f) return 2;
  fprintf(f, "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 960 %.0f\" width=\"960\" height=\"%.0f\" "
          "font-family=\"sans-serif\" font-size=\"12\" fill=\"#444\">\n<defs><pattern id=\"stripes\" width=\"5\" "
          "height=\"5\" patternUnits=\"userSpaceOnUse\" patternTransform=\"rotate(45)\"><path d=\"M1 0V5\" "
          "stroke=\"#fff\" stroke-width=\"2\"/></pattern></defs>\n"
          "<rect width=\"960\" height=\"%.0f\" fill=\"#fff\"/>\n"
          "<text x=\"14\" y=\"28\" font-size=\"15\" fill=\"#000\">", height, height, height);
  svg_text(f, title, (int64_t)strlen(title));
  if (data.k > LINES) fprintf(f, ", the first %d of %lld columns", LINES, (long long)data.k);
  if (data.count > MOST_SERIES && !own.from && !own.to)
    fprintf(f, ", the first %d of %lld series", MOST_SERIES, (long long)data.count);
  fprintf(f, "</text>\n");
  svg_legend(f, 52);
  for (int i = 0; i < all.count; i++) {
    panel p = all.at[i];
    p.f = f, p.found = found[p.number], p.top = top + i * panel_height();
    svg_panel(&p);
  }
  fprintf(f, "</svg>\n");
  return file_end(&file);
}
