/* attention_choice.h: --attention luna|softmax|linear|linformer, the last of which is a hook. Included after example.h;
   a program's main ends with example_of_attentions in place of example. */
#ifndef ATTENTION_CHOICE_H
#define ATTENTION_CHOICE_H
#include "../attentions/attentions.h"

enum { CHOICE_LINFORMER = LUNA_ATTENTION_LINEAR + 1 }; /* set.attention, after luna_attention_kind's */
static attentions linformer_choice;

/* the attention that --attention chose */
TOOL void choose_attention(luna_layer_config *layer) {
  if (set.attention == CHOICE_LINFORMER) layer->hook = &linformer_choice.hook;
  else layer->attention = (luna_attention_kind)set.attention;
}
/* example, of a program whose models may have such an attention */
TOOL int example_of_attentions(const char *name, const command *commands, const flag *flags, int count, char **given) {
  static const luna_attention_hook *const hooks[] = { &linformer_choice.hook, NULL };
  if (!attentions_open(&linformer_choice, "linformer")) return fail("%s", linformer_choice.error);
  program_hooks = hooks;
  const int status = example(name, commands, flags, count, given);
  attentions_close(&linformer_choice);
  return status;
}
#endif
