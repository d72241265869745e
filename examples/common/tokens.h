/* tokens.h: how the examples cut a text into tokens. Included after example.h by those that do it in the same way; a
   checkpoint says which way in a text pair PROGRAM.tokens: bytes, words, pairs, symbols. */
#define UNIT 64                      /* bytes of a token of byte pairs, at most */

typedef struct span { const unsigned char *at; int64_t size; } span;
TOOL bool in_word(int c) {
  return c >= 128 || (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z');
}

/* ---- bytes; words, by their hash, and each other character but the space by itself: at most `max` tokens; returns how
   many -- */

TOOL int32_t cut_bytes(span t, int64_t max, int32_t *tokens) {
  int32_t n = 0;
  for (; n < t.size && n < max; n++) tokens[n] = t.at[n];
  return n;
}

/* ends, if not null: the byte after each token */
TOOL int32_t cut_words(span t, int64_t vocab, int64_t max, int32_t *tokens, int64_t *ends) {
  int32_t n = 0;
  uint32_t hash = 0;
  for (int64_t i = 0; i <= t.size && n < max; i++) {
    int c = i < t.size ? t.at[i] : ' ';
    bool word = in_word(c) || c == '\'';
    /* FNV-1a */
    if (word) hash = ((hash ? hash : 2166136261u) ^ (uint32_t)(c >= 'A' && c <= 'Z' ? c + 32 : c)) * 16777619u;
    if (!word && hash) {
      if (ends) ends[n] = i;
      tokens[n++] = (int32_t)(hash % (uint32_t)vocab);
      hash = 0;
    }
    if (!word && c != ' ' && n < max) {
      if (ends) ends[n] = i + 1;
      tokens[n++] = (int32_t)((uint32_t)c * 16777619u % (uint32_t)vocab);
    }
  }
  return n;
}

/* ---- byte pairs [arXiv 1508.07909] ----------------------------------------------------------------------------------
   Tokens 0..255 are bytes, token 256 + i is two earlier ones, pair i; the last, `end`, ends every line and begins every
   translation. A line is cut into units, words or runs of other characters, each with the space before it: put together
   again they are the line, whatever was in it. It is read as if a space stood before it, so that its first word is a
   word like any other. */

typedef struct byte_pairs { table pairs; int32_t end; } byte_pairs; /* key of two tokens -> token */

TOOL uint64_t key(int32_t first, int32_t second) { return (uint64_t)first << 32 | (uint64_t)second; }
TOOL int32_t first_of(uint64_t pair) { return (int32_t)(pair >> 32); }
TOOL int32_t second_of(uint64_t pair) { return (int32_t)(pair & 0xFFFFFFFF); }
TOOL int32_t byte_at(span t, int64_t i) { return i < 0 ? ' ' : t.at[i]; }

TOOL int64_t unit_end(span t, int64_t at) { /* at: -1 for the first unit */
  int64_t i = at + (byte_at(t, at) == ' ');
  bool word = i < t.size && in_word(t.at[i]);
  while (i < t.size && i < at + UNIT && t.at[i] != ' ' && in_word(t.at[i]) == word) i++;
  return i;
}

TOOL void encode(const byte_pairs *v, span t, ints *out) {
  for (int64_t at = -1, end; at < t.size; at = end) {
    int64_t start = out->size;
    end = unit_end(t, at);
    for (int64_t i = at; i < end; i++) push(out, byte_at(t, i));
    for (;;) {                                             /* the pair that was made first is merged first */
      int64_t first = v->end, where = 0;
      for (int64_t i = start; i + 1 < out->size; i++) {
        const int64_t *token = find(&v->pairs, key(out->at[i], out->at[i + 1]));
        if (token && *token < first) first = *token, where = i;
      }
      if (first == v->end) break;
      out->at[where] = (int32_t)first;
      memmove(out->at + where + 1, out->at + where + 2, (size_t)(--out->size - where - 1) * sizeof(int32_t));
    }
  }
  push(out, v->end);
}

/* The bytes of a token, at most UNIT; returns where they end. */
TOOL unsigned char *spell(const byte_pairs *v, int32_t token, unsigned char *out) {
  if (token < 256) return *out = (unsigned char)token, out + 1;
  uint64_t pair = v->pairs.entries[token - 256].key;
  return spell(v, second_of(pair), spell(v, first_of(pair), out));
}

TOOL void add_pair(byte_pairs *v, uint64_t pair) {
  int64_t *token = value_of(&v->pairs, pair);
  if (*token == 0) *token = v->end++;
}

/* Reads pairs as translate writes them in its checkpoint's translate.pairs, into a vocabulary whose end is 256; false:
   not such a text. */
TOOL bool read_vocab(byte_pairs *v, const char *text) {
  static unsigned char sizes[65536];
  bool fine = true;
  memset(sizes, 1, 256);
  for (char *next; fine && *text && text[1]; text = next) {
    long a = strtol(text, &next, 10), b = strtol(next, &next, 10);
    fine = a >= 0 && a < v->end && b >= 0 && b < v->end && sizes[a] + sizes[b] <= UNIT && v->end < 65535;
    if (!fine) break;
    add_pair(v, key((int32_t)a, (int32_t)b));
    sizes[v->end - 1] = (unsigned char)(sizes[a] + sizes[b]);
    fine = v->end == 256 + v->pairs.size;
  }
  return fine;
}

/* ---- symbols of nested lists ------------------------------------------------------------------------------------- */

enum { MIN = 10, MAX, MED, SM, END, SYMBOLS };             /* and the digits 0 to 9: the tokens */
TOOL const char *const symbols[SYMBOLS] = { "0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "[MIN", "[MAX", "[MED",
                                           "[SM", "]" };

/* The symbol at *at, which moves behind it; -1 for something else. Round brackets, which other makers of the task
   write, are spaces. */
TOOL int symbol(const unsigned char *line, int64_t length, int64_t *at) {
  for (int s = 0; s < SYMBOLS; s++) {
    int64_t size = (int64_t)strlen(symbols[s]);
    if (size <= length - *at && memcmp(line + *at, symbols[s], (size_t)size) == 0) return *at += size, s;
  }
  return -1;
}
