/* ngrams.h: what compress.c has beside its network: an arithmetic coder, and how likely a byte's bits are by what
   followed the same bytes, words and repetitions before, mixed by weights that are learnt. Included after example.h. */

/* ---- the arithmetic coder: 32 bits, and probabilities of 16 ------------------------------------------------------ */

typedef struct coder {
  bool decodes;
  uint32_t low, high, value;         /* of the interval that is left; what a decoder has read */
  unsigned char *at;                 /* the code */
  int64_t size, room, read;
} coder;

static void put_byte(coder *c, uint32_t byte) {
  if (c->size == c->room) c->at = (unsigned char *)grow(c->at, c->room = 2 * c->room + 65536, 1);
  c->at[c->size++] = (unsigned char)byte;
}
static void code_open(coder *c) {
  c->low = 0, c->high = UINT32_MAX;
  for (int i = 0; c->decodes && i < 4; i++) c->value = c->value << 8 | (c->read < c->size ? c->at[c->read++] : 0);
}
static void code_close(coder *c) { for (int i = 24; i >= 0; i -= 8) put_byte(c, c->high >> i); }

/* Encodes a bit that is one with probability p / 65536, or decodes one; returns it. */
static int code_bit(coder *c, uint32_t p, int bit) {
  const uint32_t middle = c->low + (uint32_t)((uint64_t)(c->high - c->low) * p >> 16);
  if (c->decodes) bit = c->value <= middle;
  if (bit) c->high = middle;
  else c->low = middle + 1;
  while ((c->low ^ c->high) >> 24 == 0) {
    if (!c->decodes) put_byte(c, c->high >> 24);
    else c->value = c->value << 8 | (c->read < c->size ? c->at[c->read++] : 0);
    c->low <<= 8, c->high = c->high << 8 | 255;
  }
  return bit;
}

/* ---- n-grams: what followed the last bytes before, bit by bit ---------------------------------------------------- */

enum { ORDERS = 6, CONTEXTS = ORDERS + 2, INPUTS = 2 * CONTEXTS + 3, MATCH = 8, LENGTHS = 33, STEPS = 33 };

/* Of a context and the bits of the byte so far: how likely a one is, and the last bits there below a leading one. */
typedef struct slot { uint16_t likely; uint8_t history, check; } slot;
typedef struct reader {              /* of a part */
  uint64_t recent, words[2], hash[CONTEXTS]; /* the last 8 bytes, the words that end with and before them */
  int64_t match, length;             /* where the longest repetition would go on, and how long it has been */
} reader;
static struct ngrams {
  slot *slots;                       /* [CONTEXTS, mask + 1] */
  uint64_t mask;
  /* likelihoods: of a one by history; that a repetition goes on, by its length; and of a one by the byte before, the
     bits so far and the likelihood that was mixed */
  uint16_t after[CONTEXTS][256], repeats[LENGTHS], refined[65536][STEPS];
  float mix[2][2048][INPUTS];        /* weights: by the bits so far and the match, by the byte before and the bit */
  float stretched[4096];
  int64_t *places;                   /* after the last 8 bytes of this hash */
  reader *readers;
} grams;

static uint64_t hash_of(uint64_t x) { return x *= 0x9E3779B97F4A7C15u, (x ^ x >> 32) * 0xD6E8FEB86659FD93u; }
static float stretch(uint32_t p) { return grams.stretched[p >> 4]; } /* ln(p / (1 - p)) */
static uint32_t squash(double x) {
  const double p = 65536 / (1 + exp(-x));
  return p < 1 ? 1 : p > 65535 ? 65535 : (uint32_t)p;
}
static void adapt(uint16_t *p, int bit, float rate) { /* moves a likelihood towards the bit that came */
  *p = (uint16_t)((float)*p + ((bit ? 65535.f : 0.f) - (float)*p) * rate);
}

static void ngrams_open(int64_t size, int64_t parts) {
  uint64_t count = 1 << 16;
  while (count < 3 * (uint64_t)size && count < 1 << 24) count *= 2;
  grams.mask = count - 1;
  grams.slots = (slot *)grow(NULL, CONTEXTS * (int64_t)count, sizeof(slot));
  grams.places = (int64_t *)grow(NULL, 1 << 20, sizeof(int64_t));
  grams.readers = (reader *)grow(NULL, parts, sizeof(reader));
  memset(grams.slots, 0, CONTEXTS * count * sizeof(slot));
  memset(grams.places, 0, (1 << 20) * sizeof(int64_t));
  memset(grams.readers, 0, (size_t)parts * sizeof(reader));
  for (int i = 0; i < 4096; i++) grams.stretched[i] = (float)log((i + 0.5) / (4095.5 - i));
  for (int h = 1, c; h < 256; h++) {
    double ones = 0.4, all = 0.8;
    for (int bits = h; bits > 1; bits >>= 1) ones += bits & 1, all += 1;
    for (c = 0; c < CONTEXTS; c++) grams.after[c][h] = (uint16_t)(65535 * ones / all);
  }
  for (int i = 0; i < LENGTHS; i++) grams.repeats[i] = (uint16_t)(65535 - 32768 / (i + 2));
  for (int i = 0; i < STEPS; i++) grams.refined[0][i] = (uint16_t)squash((i - STEPS / 2) / 1.5);
  for (int i = 1; i < 65536; i++) memcpy(grams.refined[i], grams.refined[0], sizeof grams.refined[0]);
  for (int i = 0; i < 4096; i++) for (int k = 0; k < INPUTS; k++) grams.mix[i / 2048][i % 2048][k] = 0.2f;
}

/* The byte that a part's repetition foretells, or -1. */
static int expected_byte(const reader *z, const unsigned char *text) { return z->length > 0 ? text[z->match] : -1; }

/* Codes a bit at a place of its byte with all that is known: the bits above it with a one before them, the network's
   likelihood of a one (0: it was not asked) and the byte that a repetition foretells (-1: none). */
static int code_mixed_bit(coder *c, const reader *z, int node, int place, uint32_t network, int expected, int bit,
                          float rate) {
  float in[INPUTS], sum[2] = { 0, 0 };
  slot *found[CONTEXTS];
  int n = 0;
  for (int i = 0; i < CONTEXTS; i++) {
    const uint64_t hash = hash_of(z->hash[i] + (uint64_t)node * 0x2545F4914F6CDD1Du);
    const uint8_t check = (uint8_t)(hash >> 56);
    slot *s = found[i] = grams.slots + (uint64_t)i * (grams.mask + 1) + (hash >> 8 & grams.mask);
    if (s->check != check || s->history == 0) *s = (slot){ 32768, 1, check };
    in[n++] = s->history == 1 ? 0 : stretch(s->likely);
    in[n++] = s->history == 1 ? 0 : stretch(grams.after[i][s->history]);
  }
  const bool matches = expected >= 0 && (expected | 256) >> (place + 1) == node;
  const int64_t length = !matches ? 0 :
      z->length < 16 ? z->length : z->length < 400 ? 16 + z->length / 25 : LENGTHS - 1;
  const int next = expected >> place & 1;
  in[n++] = matches ? (next ? 1.f : -1.f) * stretch(grams.repeats[length]) : 0;
  in[n++] = network ? stretch(network) : 0;
  in[n++] = 0.3f;
  float *mix[2] = { grams.mix[0][(length == 0 ? 0 : length < 16 ? 256 : 512) + node],
                    grams.mix[1][(z->recent & 255) * 8 + (uint64_t)place] };
  for (int k = 0; k < 2; k++) for (int i = 0; i < n; i++) sum[k] += mix[k][i] * in[i];
  const float mean = (sum[0] + sum[1]) / 2, limited = mean > 10 ? 10 : mean < -10 ? -10 : mean;
  const float step = limited * 1.5f + STEPS / 2;
  uint16_t *refined = grams.refined[(z->recent & 255) << 8 | (uint64_t)node] + (int)step;
  const float beyond = step - (float)(int)step;
  const float finer = (float)refined[0] * (1 - beyond) + (float)refined[1] * beyond;
  const uint32_t p = ((uint32_t)squash(mean) + (uint32_t)finer) / 2;

  bit = code_bit(c, p < 1 ? 1 : p, bit);
  for (int k = 0; k < 2; k++) {
    const float error = ((float)bit - (float)squash(sum[k]) / 65536) * rate;
    for (int i = 0; i < n; i++) mix[k][i] += error * in[i];
  }
  adapt(refined + (beyond > 0.5f), bit, 1 / 64.f);
  if (matches) adapt(&grams.repeats[length], bit == next, 1 / 64.f);
  for (int i = 0; i < CONTEXTS; i++) {
    slot *s = found[i];
    int seen = 0;
    while (s->history >> (seen + 1)) seen++;
    adapt(&grams.after[i][s->history], bit, 1 / 128.f);
    adapt(&s->likely, bit, seen < 7 ? 1 / ((float)seen + 1.6f) : 1 / 24.f);
    s->history = (uint8_t)((seen < 7 ? s->history << 1 : 128 | (s->history << 1 & 127)) | bit);
  }
  return bit;
}

/* A part has got the byte at place `at` of the text, its number `column`: what the next one will be looked up by. Only
   places that a decoder has reached count, so no repetition goes beyond them, nor beyond the text, where the last part
   ends before the others. */
static void ngrams_read(const unsigned char *text, int64_t size, int64_t length, int64_t which, int64_t column) {
  reader *z = grams.readers + which;
  const int64_t at = which * length + column;
  const int byte = text[at], expected = expected_byte(z, text);
  const bool word = byte >= 128 || ((byte | 32) >= 'a' && (byte | 32) <= 'z');
  if (word) z->words[0] = hash_of(z->words[0] + (uint64_t)(byte | 32));
  else if (z->words[0]) z->words[1] = z->words[0], z->words[0] = 0;
  z->recent = z->recent << 8 | (uint64_t)byte;
  for (int i = 0; i < ORDERS; i++) z->hash[i] = hash_of((z->recent & (((uint64_t)256 << 8 * i) - 1)) + (uint64_t)i);
  z->hash[ORDERS] = z->words[0] ? z->words[0] : (uint64_t)byte;
  z->hash[ORDERS + 1] = hash_of(z->words[1] + 1) ^ z->hash[ORDERS];

  int64_t *place = grams.places + (hash_of(z->recent) >> 44), from = *place;
  if (expected == byte) z->length++, z->match++;
  else z->length = 0;
  if (z->length == 0 && from > 0) {
    while (z->length < 400 && z->length < from % length && z->length <= column &&
           text[from - 1 - z->length] == text[at - z->length]) z->length++;
    z->match = from;
    if (z->length < MATCH) z->length = 0;
  }
  if (column + 1 >= MATCH) *place = at + 1;
  if (z->match >= size || z->match % length > column + (z->match / length < which)) z->length = 0;
}
