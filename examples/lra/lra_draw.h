/* lra_draw.h: a picture of where the memory slots of a layer look in one sample, as SVG. Included by lra.c. */

enum { SLOT_COLUMNS = 8, PANEL = 4 * SIDE, PANEL_GAP = 12, TITLE_ROOM = 24 }; /* a pixel of a panel is four wide */

/* One panel: the pixels whose value lies in ]from, to], as one path. */
static void draw_level(FILE *to, const float *values, double low, double high, const char *colour, double opacity) {
  bool begun = false;
  for (int i = 0; i < PIXELS; i++) {
    if ((double)values[i] <= low || (double)values[i] > high) continue;
    int wide = 1;                                          /* pixels of a row that one stroke covers */
    while ((i + wide) % SIDE && (double)values[i + wide] > low && (double)values[i + wide] <= high) wide++;
    if (!begun) fprintf(to, "<path stroke='%s' opacity='%.2f' d='", colour, opacity), begun = true;
    fprintf(to, "M%d %dh%d", i % SIDE, i / SIDE, wide);
    i += wide - 1;
  }
  if (begun) fprintf(to, "'/>\n");
}
static void begin_panel(FILE *to, int panel, const char *title, int64_t number) {
  const int left = PANEL_GAP + panel % SLOT_COLUMNS * (PANEL + PANEL_GAP);
  const int top = 2 * TITLE_ROOM + panel / SLOT_COLUMNS * (PANEL + TITLE_ROOM);
  fprintf(to, "<text x='%d' y='%d'>%s", left, top - 6, title);
  if (number) fprintf(to, " %lld", (long long)number);
  fprintf(to, "</text>\n<g transform='translate(%d %d) scale(4) translate(0 .5)'>\n"
              "<path stroke='#f4f4f4' stroke-width='32' d='M0 15.5h32'/>\n", left, top);
}
/* The lit pixels, pale, over which a panel draws. */
static void draw_lit(FILE *to, const float *grays, const char *colour) { draw_level(to, grays, 31, 255, colour, 1); }

typedef struct slot_picture {
  const float *grays;                /* [PIXELS], and which lit pixels belong to the first disc's contour, 0 to 1: */
  const float *contour, *found;      /* as they do and as the model says; null without --segment */
  const float *weights;              /* of the pack, the mean of the heads: [slots, 1 + PIXELS] */
  int64_t slots, layer, layers;
  const char *answer;
} slot_picture;

/* The picture, both contours, and a panel for each slot. Darker: 2, 4, 8 and 16 times as much as 1/n and more. */
static void draw_slots(FILE *to, const slot_picture *p) {
  static const char *const colours[] = { "#9ecae1", "#4292c6", "#08519c", "#08306b" };
  const int first = p->contour ? SLOT_COLUMNS : 0, panels = first + (int)p->slots;
  const int rows = (panels + SLOT_COLUMNS - 1) / SLOT_COLUMNS;
  const int width = PANEL_GAP + SLOT_COLUMNS * (PANEL + PANEL_GAP);
  const int height = 2 * TITLE_ROOM + rows * (PANEL + TITLE_ROOM);
  fprintf(to, "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 %d %d' width='%d' height='%d' "
              "font-family='sans-serif' font-size='12' fill='#444'>\n<rect width='%d' height='%d' fill='#fff'/>\n"
              "<text x='%d' y='18' font-size='14'>layer %lld of %lld; %s</text>\n", width, height, width, height, width,
          height, PANEL_GAP, (long long)p->layer, (long long)p->layers, p->answer);
  if (p->contour) {
    begin_panel(to, 0, "the picture", 0);
    for (int level = 0; level < 4; level++)
      draw_level(to, p->grays, 31 + 56 * level, level == 3 ? 255 : 87 + 56 * level, "#000", 0.25 * (level + 1));
    fprintf(to, "</g>\n");
    begin_panel(to, 1, "the contour", 0);
    draw_lit(to, p->grays, "#ccc"), draw_level(to, p->contour, 0.5, 1, "#d94801", 1);
    fprintf(to, "</g>\n");
    begin_panel(to, 2, "as it was found", 0);
    draw_lit(to, p->grays, "#ccc");
    for (int level = 1; level < 4; level++)
      draw_level(to, p->found, 0.25 * level, 0.25 * (level + 1), "#d94801", level / 3.0);
    fprintf(to, "</g>\n");
  }
  for (int64_t s = 0; s < p->slots; s++) {
    const float *weights = p->weights + s * (1 + PIXELS) + 1;
    begin_panel(to, first + (int)s, "slot", s + 1);
    draw_lit(to, p->grays, "#ddd");
    for (int level = 0; level < 4; level++)
      draw_level(to, weights, (double)(2 << level) / (1 + PIXELS), level == 3 ? 1 : (double)(4 << level) / (1 + PIXELS),
                 colours[level], 1);
    fprintf(to, "</g>\n");
  }
  fprintf(to, "</svg>\n");
}
