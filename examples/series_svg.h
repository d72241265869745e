/* series_svg.h: a series and what a model of series finds in it, as a picture. Included after series_score.h.

     draw_series(path, title, found)     0, or 2 after a sentence. found: of the first series each row's class and its
                                         probability [rows,2], or the forecasts of ahead[0] steps ahead where they are
                                         for [rows + ahead[0],k,level_count]

   The last steps, and if they are many, below them the last ones again, wider. Each column has its own axis; a class at
   each step is a strip, the paler the less probable, below the true one. */
#define SHOWN 1500                   /* steps, at most: the last ones */
#define ZOOM 200                     /* steps of the wider part */
#define LINES 6                      /* columns, at most */
#define LEFT 190                     /* of 960: where steps begin */
#define RIGHT 940
#define ROW 78                       /* height of a column */
#define STRIP 26
#define NAME_SIZE 20                 /* characters of a name that there is room for */

/* Colours that the colour-blind tell apart [Okabe and Ito 2008], without the red that would say that something is bad;
   a second round of them is striped. */
static const char *const palette[] = { "#0072B2", "#E69F00", "#56B4E9", "#CC79A7", "#009E73", "#F0E442", "#777777" };
#define COLOURS ((int32_t)(sizeof palette / sizeof *palette))

typedef struct panel { FILE *f; int64_t first, count; double top; const float *found; } panel; /* rows of series 0 */

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

/* ---- columns ----------------------------------------------------------------------------------------------------- */

typedef struct column_axis { axis y; double top; } column_axis;
TOOL double value_y(const column_axis *s, double value) {
  const double inside = fmin(fmax(value, s->y.low), s->y.high);
  return s->top + (ROW - 14) * (s->y.high - inside) / (s->y.high - s->y.low);
}
TOOL void svg_line(const panel *p, const column_axis *s, const float *at, int64_t stride, const char *style) {
  bool on = false;
  fprintf(p->f, "<path fill=\"none\" %s d=\"", style);
  for (int64_t i = 0; i < p->count; i++) {
    const double y = (double)at[i * stride];
    if (isfinite(y)) fprintf(p->f, "%c%.1f %.1f", on ? 'L' : 'M', step_x(p, (double)i), value_y(s, y));
    on = isfinite(y);
  }
  fprintf(p->f, "\"/>\n");
}
/* What lies between the lowest and the highest quantile: along the one, back along the other, where both are. */
TOOL void svg_band(const panel *p, const column_axis *s, const float *at, int64_t stride) {
  fprintf(p->f, "<path fill=\"#E69F00\" fill-opacity=\"0.3\" d=\"");
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
TOOL void svg_column(const panel *p, int64_t c, double top) {
  const float *at = data.rows + (data.list[0].at + p->first) * data.k + c;
  const int64_t stride = data.k * level_count;
  const float *forecast = own.forecast ? p->found + p->first * stride + c * level_count : NULL;
  double low = HUGE_VAL, high = -HUGE_VAL;
  for (int64_t i = 0; i < p->count; i++)
    if (isfinite(at[i * data.k])) low = fmin(low, (double)at[i * data.k]), high = fmax(high, (double)at[i * data.k]);
  const column_axis s = { low <= high ? axis_of(low, high) : (axis){ 0, 1, 1 }, top };
  fprintf(p->f, "<rect x=\"%d\" y=\"%.1f\" width=\"%d\" height=\"%d\" fill=\"none\" stroke=\"#ccc\"/>\n", LEFT, top,
          RIGHT - LEFT, ROW - 14);
  for (int i = 0; i < 3; i++) {                            /* 0 is not -1e-17 */
    const double value = s.y.low + i * (s.y.high - s.y.low) / 2, y = value_y(&s, value);
    fprintf(p->f, "<path d=\"M%d %.1fH%d\" stroke=\"#ddd\"/><text x=\"%d\" y=\"%.1f\" text-anchor=\"end\">%.4g"
            "</text>\n", LEFT, y, RIGHT, LEFT - 5, y + 4, fabs(value) < s.y.tick / 9 ? 0 : value);
  }
  svg_name(p->f, 14, top + (ROW - 14) / 2 + 4, column_name(c));
  if (forecast && level_count > 1) svg_band(p, &s, forecast, stride);
  svg_line(p, &s, at, data.k, "stroke=\"#0072B2\" stroke-width=\"1.2\"");
  if (forecast)
    svg_line(p, &s, forecast + level_count / 2, stride,
             "stroke=\"#A65E00\" stroke-width=\"1.2\" stroke-dasharray=\"4 2\"");
}

/* ---- strips of classes ------------------------------------------------------------------------------------------- */

TOOL void svg_class(FILE *f, int32_t label, double x, double y, double width, double height, double opacity) {
  fprintf(f, "<rect x=\"%.2f\" y=\"%.1f\" width=\"%.2f\" height=\"%.1f\" fill=\"%s\" fill-opacity=\"%.2f\"/>\n", x, y,
          width, height, palette[label % COLOURS], opacity);
  if (label >= COLOURS)
    fprintf(f, "<rect x=\"%.2f\" y=\"%.1f\" width=\"%.2f\" height=\"%.1f\" fill=\"url(#stripes)\"/>\n", x, y, width,
            height);
}
/* found: the probability is the shade, in ten steps; else the true classes. */
TOOL void svg_strip(const panel *p, double top, bool found) {
  const double width = (double)(RIGHT - LEFT) / (double)p->count;
  const int32_t *labels = data.labels + data.list[0].at + p->first;
  const float *at = p->found + 2 * p->first;
  svg_word(p->f, 14, top + 14, "start", word_of(found ? "found" : "true class"));
  for (int64_t i = 0, from = 0; i < p->count; i++) {
    const int32_t label = found ? (int32_t)at[2 * i] : labels[i];
    const int shade = found ? (int)(10 * (double)at[2 * i + 1]) : 10;
    if (i + 1 < p->count && label == (found ? (int32_t)at[2 * i + 2] : labels[i + 1]) &&
        (!found || shade == (int)(10 * (double)at[2 * i + 3]))) continue;
    if (label >= 0)
      svg_class(p->f, label, LEFT + width * (double)from, top, width * (double)(i + 1 - from), STRIP - 8,
                0.1 + 0.09 * shade);
    from = i + 1;
  }
  fprintf(p->f, "<rect x=\"%d\" y=\"%.1f\" width=\"%d\" height=\"%d\" fill=\"none\" stroke=\"#999\"/>\n", LEFT, top,
          RIGHT - LEFT, STRIP - 8);
}

/* ---- the whole --------------------------------------------------------------------------------------------------- */

TOOL bool draws_strips(void) { return own.per_step && !own.forecast; }
TOOL int64_t shown_columns(void) { return data.k < LINES ? data.k : LINES; }
TOOL double panel_height(void) {
  return (double)(ROW * shown_columns()) + (draws_strips() ? 2 * STRIP : 0) + 56;
}
TOOL void svg_panel(const panel *p) {
  double y = p->top;
  const double first = (double)p->first + 1, last = (double)(p->first + p->count);
  for (int64_t c = 0; c < shown_columns(); c++, y += ROW) svg_column(p, c, y);
  for (int found = 0; found < 2 && draws_strips(); found++, y += STRIP) svg_strip(p, y, found != 0);
  const axis x = axis_of(first, last);
  for (double v = x.low; v <= last; v += x.tick) {
    if (v < first) continue;
    fprintf(p->f, "<path d=\"M%.1f %.1fv4\" stroke=\"#666\"/><text x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\">%g"
            "</text>\n", step_x(p, v - first), y - 8, step_x(p, v - first), y + 10, v);
  }
  char text[60];
  snprintf(text, sizeof text, p->first > 0 ? "step, the last %lld" : "step", (long long)p->count);
  svg_word(p->f, (LEFT + RIGHT) / 2, y + 27, "middle", word_of(text));
}
/* What the lines or colours mean; returns where it ends. */
TOOL double svg_legend(FILE *f, double y) {
  char text[100];
  double x = LEFT;
  for (int32_t c = 0; c < label_count && draws_strips(); c++, x += 150) {
    if (x > RIGHT - 150) x = LEFT, y += 20;
    svg_class(f, c, x, y - 10, 14, 12, 1);
    svg_name(f, x + 19, y, classes[c]);
  }
  if (draws_strips()) {
    svg_word(f, LEFT, y + 20, "start", word_of("the paler, the less probable"));
    return y + 20;
  }
  fprintf(f, "<path d=\"M%d %.1fh24\" stroke=\"#0072B2\" stroke-width=\"1.6\"/>", LEFT, y - 4);
  svg_word(f, LEFT + 30, y, "start", word_of("measured"));
  if (!own.forecast) return y;
  fprintf(f, "<path d=\"M%d %.1fh24\" stroke=\"#A65E00\" stroke-width=\"1.6\" stroke-dasharray=\"4 2\"/>", LEFT + 120,
          y - 4);
  snprintf(text, sizeof text, "forecast, %lld ahead", (long long)ahead[0]);
  svg_word(f, LEFT + 150, y, "start", word_of(text));
  if (level_count == 1) return y;
  fprintf(f, "<rect x=\"%d\" y=\"%.1f\" width=\"24\" height=\"12\" fill=\"#E69F00\" fill-opacity=\"0.3\"/>",
          LEFT + 300, y - 10);
  snprintf(text, sizeof text, "%lld%% interval", (long long)own.interval);
  svg_word(f, LEFT + 330, y, "start", word_of(text));
  return y;
}
TOOL void svg_title(FILE *f, const char *title, const float *found) {
  fprintf(f, "<text x=\"14\" y=\"28\" font-size=\"15\" fill=\"#000\">"), svg_text(f, title, (int64_t)strlen(title));
  if (data.k > LINES) fprintf(f, ", the first %d of %lld columns", LINES, (long long)data.k);
  if (!own.forecast && !own.per_step) {
    const int32_t label = data.list[0].label;
    fprintf(f, ", first series: "), svg_text(f, classes[(int)found[0]].at, classes[(int)found[0]].size);
    fprintf(f, " with %.0f%%", 100 * (double)found[1]);
    if (label >= 0) fprintf(f, "; true: "), svg_text(f, classes[label].at, classes[label].size);
  }
  fprintf(f, "</text>\n");
}

TOOL int draw_series(const char *path, const char *title, const float *found) {
  const int64_t all = data.list[0].n, n = all < SHOWN ? all : SHOWN;
  const int panels = n > ZOOM ? 2 : 1, rows = draws_strips() ? (label_count + 4) / 5 + 1 : 1;
  const double top = 46 + 20 * (double)rows, height = top + panels * panel_height();
  new_file file;
  FILE *f = file_begin(&file, path);
  if (!f) return 2;
  fprintf(f, "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 960 %.0f\" width=\"960\" height=\"%.0f\" "
          "font-family=\"sans-serif\" font-size=\"12\" fill=\"#444\">\n<defs><pattern id=\"stripes\" width=\"5\" "
          "height=\"5\" patternUnits=\"userSpaceOnUse\" patternTransform=\"rotate(45)\"><path d=\"M1 0V5\" "
          "stroke=\"#fff\" stroke-width=\"2\"/></pattern></defs>\n"
          "<rect width=\"960\" height=\"%.0f\" fill=\"#fff\"/>\n",
          height, height, height);
  svg_title(f, title, found);
  svg_legend(f, 52);
  for (int i = 0; i < panels; i++) {
    const int64_t count = i ? ZOOM : n;
    const panel p = { f, all - count, count, top + i * panel_height(), found };
    svg_panel(&p);
  }
  fprintf(f, "</svg>\n");
  return file_end(&file);
}
