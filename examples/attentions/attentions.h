/* attentions.h: the attentions that papers compare Luna with, by name, as hooks of luna.h's encoder and causal layers:

     attentions a;
     if (!attentions_open(&a, "performer features=64 kernel=relu")) puts(a.error);
     config.layer.hook = &a.hook;               then luna_lm_init, luna_classifier_init, luna_encoder_layer_init, ...
     ...
     attentions_close(&a);                      after the last call of the models

   A model's file keeps the system's name and its options. To open it:

     attentions_open(&a, "performer");          any options: the file's take their place
     options.hooks = (const luna_attention_hook *const[]){ &a.hook, NULL };
     luna_load_model(...);

   Each file is one system, with its equation and its source at its top; the array NAME_options has its options and
   their defaults. Parameters have the names of the golden files (q_proj.weight, ...) after the layer's prefix; what is
   random and not trained is a parameter too. */
#ifndef ATTENTIONS_H
#define ATTENTIONS_H
#include <locale.h>
#include "base.h"
#include "bigbird.h"
#include "compressive.h"
#include "isab.h"
#include "linformer.h"
#include "local.h"
#include "longformer.h"
#include "performer.h"
#include "reformer.h"
#include "rfa.h"
#include "sinkhorn.h"
#include "sparse.h"
#include "synthesizer.h"
#include "transformer_xl.h"
#include "workspace.h"

static const attention_system *const attention_systems[] = {
  &performer_system, &rfa_system, &local_system, &sparse_system, &longformer_system, &bigbird_system, &reformer_system,
  &sinkhorn_system, &synthesizer_system, &workspace_system, &transformer_xl_system, &compressive_system, &isab_system,
  &linformer_system,
};
#define ATTENTION_SYSTEMS ((int)(sizeof attention_systems / sizeof attention_systems[0]))

typedef struct attentions {
  luna_attention_hook hook;          /* for luna_layer_config.hook; must not move */
  const attention_system *system;
  attention *options;                /* a layer's struct that holds the options alone */
  attention *layers;                 /* what was made with them, newest first */
  char error[320];
} attentions;

/* ---- options by name ---- */
#define ATTENTION_TEXT_AS(x) #x
#define ATTENTION_TEXT_OF(x) ATTENTION_TEXT_AS(x)
ATTENTION_FN bool attentions_refuse(attentions *a, const char *what, const char *key, const char *value) {
  snprintf(a->error, sizeof a->error, "attention %s: %s: %.60s %.120s", a->system ? a->system->name : "", what, key,
           value);
  return false;
}
/* value's place in "one|two|three", or value where it is the number of a place, as in files of luna.h 0.2; -1: not
   there */
ATTENTION_FN int64_t attentions_word(const char *list, const char *value) {
  const size_t size = strlen(value);
  for (int64_t i = 0; list; i++) {
    const char *end = strchr(list, '|');
    char number[24];
    snprintf(number, sizeof number, "%lld", (long long)i);
    if (strcmp(number, value) == 0) return i;
    if ((end ? (size_t)(end - list) : strlen(list)) == size && memcmp(list, value, size) == 0) return i;
    list = end ? end + 1 : NULL;
  }
  return -1;
}
/* Reads a count, up to *end. Returns false if there is none, or if it is out of range. */
ATTENTION_FN bool attentions_count(const char *value, char **end, int64_t *number) {
  *number = strtoll(value, end, 10);
  return *end != value && *number >= 0 && *number <= ATTENTION_MOST;
}
ATTENTION_FN bool attentions_put_list(attentions *a, const attention_option *option, const char *value) {
  attention_list list;
  const char *at = value;
  memset(&list, 0, sizeof list);
  while (*at) {
    char *end;
    int64_t number;
    if (!attentions_count(at, &end, &number) || (*end && *end != ',') || list.count == ATTENTION_LIST_SIZE)
      return attentions_refuse(a, "not up to " ATTENTION_TEXT_OF(ATTENTION_LIST_SIZE) " numbers from 0 to "
                               ATTENTION_TEXT_OF(ATTENTION_MOST), option->name, value);
    list.value[list.count++] = number;
    at = *end ? end + 1 : end;
  }
  memcpy((char *)a->options + option->at, &list, sizeof list);
  return true;
}
/* A number with a point, whatever the locale's decimal separator is. */
ATTENTION_FN bool attentions_real(const char *value, double *real) {
  const size_t whole = strcspn(value, ".");
  const char *point = value[whole] ? localeconv()->decimal_point : "";
  char text[80], *end;
  const int size = snprintf(text, sizeof text, "%.*s%s%s", (int)whole, value, point,
                            value[whole] ? value + whole + 1 : "");
  *real = strtod(text, &end);
  return size < (int)sizeof text && end != text && !*end && *real - *real == 0;
}
ATTENTION_FN bool attentions_put(attentions *a, const attention_option *option, const char *value) {
  void *at = (char *)a->options + option->at;
  char *end = NULL;
  int64_t number = 0;
  double real = 0;
  if (option->kind == ATTENTION_LIST) return attentions_put_list(a, option, value);
  if (option->kind == ATTENTION_TEXT) {
    if (strlen(value) >= ATTENTION_TEXT_SIZE) return attentions_refuse(a, "too long", option->name, value);
    memcpy(at, value, strlen(value) + 1);
    return true;
  }
  if (option->kind == ATTENTION_NUMBER) {
    if (!attentions_real(value, &real)) return attentions_refuse(a, "not a number", option->name, value);
    memcpy(at, &real, sizeof real);
    return true;
  }
  if (option->kind == ATTENTION_COUNT) {
    if (!attentions_count(value, &end, &number) || *end)
      return attentions_refuse(a, "not a number from 0 to " ATTENTION_TEXT_OF(ATTENTION_MOST), option->name, value);
  } else number = attentions_word(option->kind == ATTENTION_FLAG ? "false|true" : option->value, value);
  if (number < 0) return attentions_refuse(a, "not a value of", option->name, value);
  memcpy(at, &number, sizeof number);
  return true;
}
/* false, with a sentence in a->error: no such option, or not a value of it */
ATTENTION_FN bool attentions_set(attentions *a, const char *key, const char *value) {
  const attention_option *option = a->system ? a->system->options : NULL;
  while (option && option->name && strcmp(option->name, key) != 0) option++;
  return option && option->name ? attentions_put(a, option, value) : attentions_refuse(a, "no such option", key, value);
}

/* ---- the hook ---- */
ATTENTION_FN void *attentions_init(void *user, luna_params *params, const char *prefix,
                                   const luna_layer_config *config) {
  attentions *choice = (attentions *)user;
  attention *a = (attention *)malloc(choice->system->size);
  if (!a) return NULL;
  memcpy(a, choice->options, choice->system->size);
  a->dim = config->dim, a->heads = config->heads;
  a->layer = config->layer, a->layers = config->layers, a->max_length = config->max_length;
  a->dropout = config->attention_dropout;
  a->bert_init = config->bert_init;
  a->params = params, a->prefix = prefix ? prefix : "";
  a->good = true;
  attention_require(a, a->heads > 0 && a->dim % a->heads == 0, "attentions: dim is not a multiple of heads");
  attention_require(a, !config->output_gate || a->system->plain, "attentions: output_gate is Linformer's alone");
  attention_require_counts(a);
  if (a->good) a->system->init(a);
  a->params = NULL, a->prefix = NULL;
  if (!a->good) {
    free(a);
    return NULL;
  }
  a->next = choice->layers;
  return choice->layers = a;
}
ATTENTION_FN luna_tensor *attentions_forward(void *layer, luna_attention_call *call) {
  attention *a = (attention *)layer;
  luna_ctx *ctx = call->x->ctx;
  luna_tensor *y;
  a->next_memory = a->next_compressed = a->loss = NULL;
  if (call->x->device != 0 && !a->system->plain) return attention_fail(ctx, a, "its custom ops are for the CPU");
  if (call->causal && !a->system->causal) return attention_fail(ctx, a, "it has no causal form");
  if (!call->causal && !a->system->bidirectional) return attention_fail(ctx, a, "it has a causal form only");
  if (call->context && !a->system->plain) return attention_fail(ctx, a, "it has no cross-attention");
  if (!a->system->plain) call->x = luna_mask(call->x, call->lengths);
  if (!call->x) return NULL;
  y = a->system->forward(a, call);
  call->kept[0] = a->next_memory, call->kept[1] = a->next_compressed, call->kept[2] = a->loss;
  return y;
}

/* A layer is freed when its context is closed, or its init has failed later, and `attentions` are closed, too. Whoever
   calls hook.init calls this as hook.close. */
ATTENTION_FN void attentions_leave(void *layer) {
  attention *a = (attention *)layer;
  a->drawn = a->loss = a->next_memory = a->next_compressed = NULL;
  if (a->left) free(a);
  else a->left = true;
}

/* ---- options in a model's file, as they are written in attentions_open ---- */
#define ATTENTIONS_VALUE 1024
ATTENTION_FN void attentions_text(const attentions *a, const attention_option *option, char text[ATTENTIONS_VALUE]) {
  const void *at = (const char *)a->options + option->at;
  const char *word = option->value;
  attention_list list;
  int64_t number = 0;
  double real;
  size_t used = 0;
  text[0] = 0;
  switch (option->kind) {
    case ATTENTION_TEXT: memcpy(text, at, ATTENTION_TEXT_SIZE); return;
    case ATTENTION_NUMBER:
      memcpy(&real, at, sizeof real);
      snprintf(text, ATTENTIONS_VALUE, "%.17g", real);
      used = strcspn(text, localeconv()->decimal_point);
      if (text[used]) text[used] = '.';
      return;
    case ATTENTION_LIST:
      memcpy(&list, at, sizeof list);
      for (int64_t i = 0; i < list.count && used < ATTENTIONS_VALUE; i++)
        used += (size_t)snprintf(text + used, ATTENTIONS_VALUE - used, "%s%lld", i ? "," : "",
                                 (long long)list.value[i]);
      return;
    case ATTENTION_WORD:
      memcpy(&number, at, sizeof number);
      while (number-- > 0) word = strchr(word, '|') + 1;
      memcpy(text, word, strcspn(word, "|"));
      text[strcspn(word, "|")] = 0;
      return;
    default: break;
  }
  memcpy(&number, at, sizeof number);
  if (option->kind == ATTENTION_FLAG) snprintf(text, ATTENTIONS_VALUE, "%s", number ? "true" : "false");
  else snprintf(text, ATTENTIONS_VALUE, "%lld", (long long)number);
}
ATTENTION_FN bool attentions_save(void *user, bool (*put)(void *file, const char *key, const char *value),
                                  void *file) {
  const attentions *a = (const attentions *)user;
  char text[ATTENTIONS_VALUE];
  for (const attention_option *o = a->system->options; o->name; o++) {
    attentions_text(a, o, text);
    if (!put(file, o->name, text)) return false;
  }
  return true;
}
/* an option that the file lacks stays */
ATTENTION_FN bool attentions_load(void *user, const char *(*get)(void *file, const char *key), void *file) {
  attentions *a = (attentions *)user;
  for (const attention_option *o = a->system->options; o->name; o++) {
    const char *value = get(file, o->name);
    if (value && !attentions_put(a, o, value)) return false;
  }
  return true;
}

/* "key=value key=value" */
ATTENTION_FN bool attentions_set_all(attentions *a, const char *options) {
  while (*(options += strspn(options, " "))) {
    const size_t size = strcspn(options, " "), key = strcspn(options, "= ");
    char text[2][ATTENTIONS_VALUE];
    if (key >= size || key >= sizeof text[0] || size - key > sizeof text[1])
      return attentions_refuse(a, "not key=value", options, "");
    memcpy(text[0], options, key), text[0][key] = 0;
    memcpy(text[1], options + key + 1, size - key - 1), text[1][size - key - 1] = 0;
    if (!attentions_set(a, text[0], text[1])) return false;
    options += size;
  }
  return true;
}
ATTENTION_FN bool attentions_read(attentions *a, const char *name) {
  const size_t size = strcspn(name, " ");
  memset(a, 0, sizeof *a);
  for (int i = 0; i < ATTENTION_SYSTEMS; i++)
    if (strlen(attention_systems[i]->name) == size && memcmp(attention_systems[i]->name, name, size) == 0)
      a->system = attention_systems[i];
  if (!a->system) return attentions_refuse(a, "no such system", name, "");
  a->options = (attention *)calloc(1, a->system->size);
  if (!a->options) return attentions_refuse(a, "out of memory", "", "");
  a->options->system = a->system;
  for (const attention_option *o = a->system->options; o->name; o++)
    if (o->kind != ATTENTION_WORD && !attentions_put(a, o, o->value)) return false; /* a word's default is 0 */
  a->hook.init = attentions_init;
  a->hook.forward = attentions_forward;
  a->hook.close = attentions_leave;
  a->hook.user = a;
  a->hook.name = a->system->name;
  a->hook.save = attentions_save;
  a->hook.load = attentions_load;
  return attentions_set_all(a, name + size);
}
/* Chooses a system, "name" or "name key=value ...", else with its defaults; false with a sentence in a->error, and
   nothing to close. */
ATTENTION_FN bool attentions_open(attentions *a, const char *name) {
  if (attentions_read(a, name)) return true;
  free(a->options);
  a->options = NULL;
  return false;
}
ATTENTION_FN void attentions_close(attentions *a) {
  while (a->layers) {
    attention *layer = a->layers;
    a->layers = layer->next;
    attentions_leave(layer);
  }
  free(a->options);
  memset(a, 0, sizeof *a);
}
/* loss and the losses of all layers made with `a`, which forward has just left; loss itself where there are none */
ATTENTION_FN luna_tensor *attentions_loss(const attentions *a, luna_tensor *loss) {
  for (const attention *layer = a->layers; layer; layer = layer->next)
    if (layer->loss) loss = luna_add(loss, layer->loss);
  return loss;
}
/* Draws the random features of all layers made with `a` anew, as a function of `seed`: between steps of training,
   Performer's each thousand, RFA's each step. A model is used and saved with the last ones. False: no memory. */
ATTENTION_FN bool attentions_redraw(const attentions *a, uint64_t seed) {
  uint32_t number = 0;
  for (attention *layer = a->layers; layer; layer = layer->next, number++)
    if (layer->drawn && !attention_redraw(layer, seed, number)) return false;
  return true;
}
#endif
