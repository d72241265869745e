/* training.h: what training needs besides its loop: a progress line, a plot of the loss, checkpoints to go on from.
   example.h includes it.

     static progress bar;                             large: not for the stack
     progress_start(&bar, 0);                         from here Ctrl-C and SIGTERM set `interrupted`, and --profile
                                                      times all but the validations
     while (bar.step < set.steps && !interrupted) {
       if (progress_due(&bar)) {                      where there is something to validate on
         double since = progress_validates();
         ...
         progress_validated(&bar, since, loss, "validation %.3f", loss);   in the line of this step
       }
       ...
       progress_step(&bar, luna_item(loss), tokens);
     }
     progress_end(&bar);                              then the last validation, in the same way
     ...                                              luna_save to set.out
     return plot(&bar, words[0]);                     draws the loss in set.plot, if there is one */

/* ---- progress and the plot of the loss --------------------------------------------------------------------------- */

#define POINTS 1000                  /* of a curve; when it is full, pairs become one */
typedef struct curve { int64_t every, in; int count; double x[POINTS], y[POINTS]; } curve;

TOOL void curve_add(curve *c, double x, double y) {
  if (!isfinite(y)) return;
  double *to_x = c->x + c->count, *to_y = c->y + c->count, share = 1 / (double)++c->in;
  *to_x = c->in == 1 ? x : *to_x + (x - *to_x) * share;    /* a point is the mean of `every` values */
  *to_y = c->in == 1 ? y : *to_y + (y - *to_y) * share;
  if (c->in < c->every) return;
  c->in = 0;
  if (++c->count < POINTS) return;
  for (int i = 0; i < POINTS / 2; i++)
    c->x[i] = (c->x[2 * i] + c->x[2 * i + 1]) / 2, c->y[i] = (c->y[2 * i] + c->y[2 * i + 1]) / 2;
  c->count = POINTS / 2;
  c->every = c->every ? 2 * c->every : 2;
}

#define RECENT 20
typedef struct progress {
  int64_t step, first;               /* steps made; of these, before this run */
  double start, shown, mean, tokens; /* mean: of the loss, over the last RECENT steps */
  double recent[RECENT];
  /* seconds of all validations; the last one takes so many times as long as others, 0 = 1 */
  double validating, last;
  int64_t validations;
  bool live, bits, ended;            /* bits: the loss is reported in bits per byte too */
  char note[40];                     /* shown after the loss: "validation 87.0%" */
  char begin[130], end[480];         /* a step's line, before and after the note, till its validation is made */
  curve training, validation;
} progress;

static volatile sig_atomic_t interrupted;
TOOL void interrupt(int number) {
  interrupted = 1;
#ifdef SIGPIPE
  signal(SIGPIPE, SIG_IGN);                                /* Ctrl-C ends what reads the output too: "| tee log" */
#endif
  signal(number, SIG_DFL);                                 /* a second Ctrl-C ends the program at once */
}

TOOL void progress_start(progress *p, int64_t first) {
  p->step = p->first = first;
  if (profiled) luna_profile_begin(profiled);
  tells_of_training = true;
  p->start = seconds();
  p->live = on_terminal();
#ifdef EXAMPLE_MPI
  p->live = false;                                         /* Open MPI gives ranks a terminal of its own */
#endif
  if (ranks.ranks > 1) return;                             /* could not stop at the same step: Ctrl-C ends them */
  signal(SIGINT, interrupt), signal(SIGTERM, interrupt);
}

/* Validations come at the start, after each tenth of the steps, and at the end. */
TOOL int64_t validation_period(void) {
  const int64_t count = set.validations ? set.validations : 10;
  return set.steps < count ? 1 : set.steps / count;
}
TOOL bool progress_due(const progress *p) { return p->step == p->first || p->step % validation_period() == 0; }
TOOL double progress_validates(void) {                     /* a validation begins; returns when */
  if (profiled) luna_profile_end(profiled);
  return seconds();
}
TOOL void progress_line(progress *p) { /* prints the line that waits, if there is one */
  const char *gap = *p->note ? " " : "";
  if (*p->begin) printf("%s%s%s%s\n", p->begin, gap, p->note, p->end);
  *p->begin = *p->note = 0;
  fflush(stdout);
}
/* A validation that began at `since` has ended: `format` and `shown` make the note, "" none. */
TOOL void progress_validated(progress *p, double since, double loss, const char *format, double shown) {
  if (profiled) luna_profile_resume(profiled);
  p->validating += seconds() - since;
  p->validations++;
  curve_add(&p->validation, (double)p->step, loss);
  if (!*format && *p->begin) progress_line(p);
  if (p->ended || !*format) return;
  snprintf(p->note, sizeof p->note, format, shown);
  if (p->live) return;
  if (!*p->begin) {
    snprintf(p->begin, sizeof p->begin, "step %4lld/%lld", (long long)p->step, (long long)set.steps);
    *p->end = 0;
  }
  progress_line(p);
}

/* "1:02:03": for the steps and validations that are still to come, as long as those so far took */
TOOL phrase time_left(const progress *p, double now) {
  const int64_t every = validation_period();
  int64_t to_validate = set.steps / every - (p->step - 1) / every + (set.steps % every != 0);
  double left = (now - p->start - p->validating) / (double)(p->step - p->first) * (double)(set.steps - p->step);
  if (p->validations)
    left += p->validating / (double)p->validations * ((double)to_validate + (p->last > 0 ? p->last - 1 : 0));
  const int whole = left < 1e9 ? (int)left : 1000000000;
  phrase out;
  if (whole < 3600) snprintf(out.text, sizeof out.text, "%d:%02d", whole / 60, whole % 60);
  else snprintf(out.text, sizeof out.text, "%d:%02d:%02d", whole / 3600, whole / 60 % 60, whole % 60);
  return out;
}

TOOL void progress_step(progress *p, double loss, double tokens) {
  int64_t every = set.steps < 20 ? 1 : set.steps / 20, done = ++p->step - p->first;
  double now = seconds();
  if (*p->begin) progress_line(p);
  curve_add(&p->training, (double)p->step, loss);
  p->recent[done % RECENT] = loss, p->mean = 0;
  for (int64_t i = 0; i < RECENT && i < done; i++) p->mean += p->recent[(done - i) % RECENT];
  p->mean /= (double)(done < RECENT ? done : RECENT);
  p->tokens += tokens;
  if (p->step != set.steps && (p->live ? now - p->shown < 0.1 : p->step % every != 0)) return;
  p->shown = now;
  char loss_text[60], line[200], done_of[60];
  snprintf(done_of, sizeof done_of, "step %4lld/%lld", (long long)p->step, (long long)set.steps);
  snprintf(loss_text, sizeof loss_text, p->bits ? "%.3f nats %.3f bits/byte" : "loss %.3f", p->mean,
           p->mean / 0.69314718055994530942);
  const double speed = p->tokens / (now - p->start - p->validating) / 1000;
  if (!p->live) {
    snprintf(p->begin, sizeof p->begin, "%s %s", done_of, loss_text);
    snprintf(p->end, sizeof p->end, " %.1fk tokens/s %s left", speed, time_left(p, now).text);
    if (!progress_due(p) && p->step != set.steps) progress_line(p);
  } else {                                                 /* one line, rewritten: what the terminal has room for */
    const char *gap = *p->note ? " " : "";
    const int size = snprintf(line, sizeof line, "%s left %s%s%s %.1fk tokens/s", time_left(p, now).text, loss_text,
                              gap, p->note, speed);
    int room = terminal_width() - printf("\r%s ", done_of), cells = room - size - 3;
    if (cells > 40) cells = 40;
    if (cells >= 5) {
      const int full = (int)(cells * p->step / set.steps);
      printf("[%.*s%.*s] ", full, "########################################", cells - full,
             "........................................");
      room -= cells + 3;
    }
    if (room > 0) printf("%-*.*s", room, room, line);
  }
  fflush(stdout);
}

TOOL void progress_end(progress *p) {
  if (*p->begin) progress_line(p);
  p->ended = true;
  if (profiled) luna_profile_end(profiled);
  profiled = NULL;
  if (p->live) printf("\n");
}

/* ---- the best model of a training -------------------------------------------------------------------------------- */

/* Its parameters, and what validation said of it; values is to be freed. */
typedef struct best_model { float *values; double error, loss; int64_t step, worse; } best_model;

/* Keeps a copy of the parameters if validation finds fewer errors than ever or, of as many, less loss; else it counts
   in `worse` how often in a row that was not so. */
TOOL luna_status best_keep(best_model *best, const luna_params *params, int64_t step, double error, double loss) {
  const bool first = best->values == NULL;
  luna_status status = LUNA_OK;
  if (!first && !(error < best->error || (error <= best->error && loss < best->loss))) return best->worse++, LUNA_OK;
  if (first) best->values = (float *)grow(NULL, luna_params_element_count(params), sizeof(float));
  float *to = best->values;
  for (int64_t i = 0; i < luna_params_tensor_count(params) && status == LUNA_OK; i++) {
    luna_tensor *t = luna_params_at(params, i, NULL);
    status = luna_read(t, to);
    to += luna_count(t);
  }
  best->error = error, best->loss = loss, best->step = step, best->worse = 0;
  return status;
}
/* The error of a model that ranks with this average precision. Before the first step it is 1: what has learnt nothing
   ranks by chance, and chance may be high where a class is rare. */
TOOL double ranking_error(double precision, int64_t step) { return step > 0 ? 1 - precision : 1; }
/* Whether --patience waits for a better one still. */
TOOL bool best_awaited(const best_model *best) { return set.patience == 0 || best->worse < set.patience; }
/* Gives the parameters the kept values, if there are any, and frees those. */
TOOL luna_status best_restore(best_model *best, const luna_params *params) {
  luna_status status = LUNA_OK;
  const float *from = best->values;
  for (int64_t i = 0; from && i < luna_params_tensor_count(params) && status == LUNA_OK; i++) {
    luna_tensor *t = luna_params_at(params, i, NULL);
    status = luna_write(t, from);
    from += luna_count(t);
  }
  free(best->values), best->values = NULL;
  return status;
}
/* The same at the end of a training; says so where its last model is not the best. */
TOOL luna_status best_end(best_model *best, const luna_params *params, const progress *p) {
  if (best->values && best->step < p->step)
    printf("%sThe model of step %lld is the best by validation and is kept.\n",
           best_awaited(best) ? "" : "The training ends early. ", (long long)best->step);
  return best_restore(best, params);
}

typedef struct plot_axis { double low, high, tick; } plot_axis;

TOOL plot_axis axis_of(double low, double high) { /* round numbers around them, 5 to 10 ticks */
  double min = fmax(high - low, 1e-6 * fabs(high) + 1e-9) / 5, tick = pow(10, floor(log10(min)));
  if (5 * tick <= min) tick *= 5;
  else if (2 * tick <= min) tick *= 2;
  return (plot_axis){ tick * floor(low / tick), tick * fmax(ceil(high / tick - 1e-9), floor(low / tick) + 1), tick };
}

#define X(value) (60 + 640 * ((value) - x.low) / (x.high - x.low)) /* where a value lies in the picture */
#define Y(value) (350 - 300 * ((value) - y.low) / (y.high - y.low))

/* Draws the curves, where --plot names a file. Returns 0, or 2 after a sentence. */
TOOL int plot(const progress *p, const char *title) {
  const struct { const curve *c; const char *name, *colour; } lines[] =
      { { &p->training, "training", "#2a6fb0" }, { &p->validation, "validation", "#d95f02" } };
  double low = HUGE_VAL, high = -HUGE_VAL;
  for (int l = 0; l < 2; l++)
    for (int i = 0; i < lines[l].c->count; i++) low = fmin(low, lines[l].c->y[i]), high = fmax(high, lines[l].c->y[i]);
  if (!set.plot || ranks.rank > 0) return 0;
  if (low > high) return fail("there is no loss to draw in %s", set.plot);
  plot_axis x = axis_of((double)p->first, (double)p->step), y = axis_of(low, high);

  new_file file;
  FILE *f = file_begin(&file, set.plot);
  if (!f) return 2;
  fprintf(f, "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 720 400\" width=\"720\" height=\"400\" "
             "font-family=\"sans-serif\" font-size=\"12\" fill=\"#444\">\n"
             "<rect width=\"720\" height=\"400\" fill=\"#fff\"/>\n<text x=\"60\" y=\"28\" font-size=\"15\">%s: ",
          program);
  for (; *title; title++) fputc(*title < 32 || *title > 126 || strchr("<>&", *title) ? '?' : *title, f);
  fprintf(f, "</text>\n<text x=\"380\" y=\"392\" text-anchor=\"middle\">step</text>\n"
             "<text x=\"54\" y=\"36\" text-anchor=\"end\">loss</text>\n");
  for (double v = x.low; v < x.high + x.tick / 2; v += x.tick)
    fprintf(f, "<path d=\"M%.1f 350V50\" stroke=\"#eee\"/>"
               "<text x=\"%.1f\" y=\"368\" text-anchor=\"middle\">%g</text>\n", X(v), X(v), v);
  for (double v = y.low; v < y.high + y.tick / 2; v += y.tick)
    fprintf(f, "<path d=\"M60 %.1fH700\" stroke=\"#eee\"/><text x=\"54\" y=\"%.1f\" text-anchor=\"end\">%g</text>\n",
            Y(v), Y(v) + 4, fabs(v) < y.tick / 2 ? 0 : v);
  for (int l = 0; l < 2; l++) {
    const curve *c = lines[l].c;
    if (c->count == 0) continue;
    fprintf(f, "<text x=\"%d\" y=\"28\" fill=\"%s\">%s</text>\n"
               "<g fill=\"none\" stroke=\"%s\" stroke-linejoin=\"round\">\n",
            540 + 90 * l, lines[l].colour, lines[l].name, lines[l].colour);
    /* training: the points pale, above them the mean of each with its neighbours, on both sides: it does not lag */
    for (int smooth = l; smooth < 2; smooth++) {
      fprintf(f, "<polyline stroke-width=\"%s\" points=\"", smooth ? "1.8" : "1\" opacity=\"0.3");
      for (int i = 0; i < c->count; i++) {
        int reach = l || !smooth ? 0 : 5;
        if (reach > i) reach = i;
        if (reach > c->count - 1 - i) reach = c->count - 1 - i;
        double sum = 0;
        for (int k = i - reach; k <= i + reach; k++) sum += c->y[k];
        fprintf(f, "%.1f,%.1f ", X(c->x[i]), Y(sum / (2 * reach + 1)));
      }
      fprintf(f, "\"/>\n");
    }
    for (int i = 0; l && i < c->count; i++)
      fprintf(f, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"2\"/>\n", X(c->x[i]), Y(c->y[i]));
    fprintf(f, "</g>\n");
  }
  fprintf(f, "</svg>\n");
  return file_end(&file);
}

/* ---- training that goes on from its checkpoint ------------------------------------------------------------------- */

/* Flags that say how a training goes: all numbers of `train` but those that change no bit of the result, and
   --products, with which luna_load_training goes on in either way. */
TOOL bool shapes_training(const flag *f) {
  return !f->text && strchr(f->commands, 't') && f->whole != &set.threads && f->whole != &set.parallel &&
      f->whole != &set.recompute && f->whole != &set.save_every && f->whole != &set.products;
}

/* Puts these flags and `step` in the set's text pairs, so that luna_save_training() writes them too. */
TOOL luna_status keep_settings(luna_params *params, const flag *flags, int64_t step) {
  char key[80], value[40];
  luna_status status = LUNA_OK;
  for (; flags->name && status == LUNA_OK; flags++) {
    if (!shapes_training(flags)) continue;
    snprintf(key, sizeof key, "%s.%s", program, flags->name + 2);
    flag_text(flags, value, sizeof value);
    status = luna_params_set_text(params, key, value);
  }
  snprintf(key, sizeof key, "%s.step", program);
  snprintf(value, sizeof value, "%lld", (long long)step);
  return status == LUNA_OK ? luna_params_set_text(params, key, value) : status;
}

TOOL void keep_pair(void *params, const char *key, const char *value) {
  if (strncmp(key, program, strlen(program)) == 0) luna_params_set_text((luna_params *)params, key, value);
}

/* The text pairs that this program wrote in a checkpoint, in a set of their own; null after a sentence. */
TOOL luna_params *kept_pairs(luna_ctx *ctx, const char *path) {
  luna_params *pairs = luna_params_open(ctx);
  const luna_inspection all = { keep_pair, NULL, pairs };
  return luna_inspect(ctx, luna_path(path), &all) == LUNA_OK ? pairs : (failed(ctx), NULL);
}

/* Whether a flag's value is one that it may take. Flags that depend on others begin without one. */
TOOL bool has_value(const flag *f) {
  const double number = f->whole ? (double)*f->whole : *f->real;
  return f->kind || (number >= f->min && number <= f->max);
}

/* Sets the flags as `pairs`, of the checkpoint at `path`, say. Returns 0, or 2 after a sentence: what the command line
   says too must agree. A flag that is younger than the checkpoint keeps its default, if it has one. */
TOOL int set_kept_flags(const luna_params *pairs, const flag *flags, const char *path) {
  char key[80], before[40], now[40];
  snprintf(key, sizeof key, "%s.step", program);
  bool whole = luna_params_get_text(pairs, key) != NULL;
  for (int i = 0; flags[i].name && whole; i++) {
    if (!shapes_training(&flags[i])) continue;
    snprintf(key, sizeof key, "%s.%s", program, flags[i].name + 2);
    whole = luna_params_get_text(pairs, key) || has_value(&flags[i]) || flags_given >> i & 1;
  }
  if (!whole) return fail("%s holds no training of %s to resume; --save-every writes one", path, program);
  for (int i = 0; flags[i].name; i++) {
    if (!shapes_training(&flags[i])) continue;
    snprintf(key, sizeof key, "%s.%s", program, flags[i].name + 2);
    const char *value = luna_params_get_text(pairs, key);
    if (!value && (flags_given >> i & 1))
      return fail("the training of %s began without %s and cannot take it now", path, flags[i].name);
    if (!value) continue;
    flag_text(&flags[i], before, sizeof before);
    if (set_flag(&flags[i], value)) return 2;
    flag_text(&flags[i], now, sizeof now);
    if (flags_given >> i & 1 && strcmp(before, now) != 0)
      return fail("%s was %s in the training of %s and cannot be %s now", flags[i].name, now, path, before);
  }
  return 0;
}

/* Sets the flags as the checkpoint --resume says, and *step, which is set.steps after a training that has ended. */
TOOL int take_settings(luna_ctx *ctx, const flag *flags, int64_t *step) {
  char key[80];
  const int64_t device = set.device;                       /* the context is open on it */
  const luna_params *pairs = kept_pairs(ctx, set.resume);
  if (!pairs || set_kept_flags(pairs, flags, set.resume)) return 2;
  if (set.device != device) return fail("%s is a training on a GPU; give --device cuda again", set.resume);
  snprintf(key, sizeof key, "%s.step", program);
  const char *value = luna_params_get_text(pairs, key);
  *step = value ? atoll(value) : 0;
  if (*step >= 1 && *step <= set.steps) return 0;
  return fail("%s says that it is at step %s, which cannot be", set.resume, value ? value : "?");
}
TOOL void say_resumed(int64_t step) {                      /* --save-every changes no bit, so no checkpoint keeps it */
  say("The training of %s is resumed after step %lld.%s", set.resume, (long long)step,
      set.save_every ? "" : " It saves no checkpoints, as --save-every is not given.");
}
TOOL int training_finished(void) {                         /* returns 0: there is nothing to do */
  say("%s has made all its %lld steps. This training is finished.", set.resume, (long long)set.steps);
  return 0;
}
