/* compress: a lossless compressor. It is a byte-level Luna language model that learns as it reads.

     cc -O2 -I. examples/compress.c -o compress -lm -lpthread

     compress pack FILE --out P     packs FILE; --by network uses the model alone, --by ngrams leaves it out
     compress unpack P --out FILE   gives its bytes back

   The file is cut into a few parts that are read side by side. A stream predicts the next byte of each part. An
   arithmetic coder spends few bits on a byte that was likely and many on one that was not. After every window of bytes
   the model makes a training step on it, with the memory that forgets carried over, and on a few windows from before.
   Unpacking makes the same steps, by the same functions, on the bytes that it has just decoded. So the packed file
   holds nothing of the model. Predictions from the bytes and words before (ngrams.h) are mixed in, since a model that
   has read little knows little.

   Both sides must compute the same bits. luna.h does so on one instruction set, for any number of threads. The packed
   file says which instruction set and which version that was, and has the checksum of the result. */
#define LUNA_IMPLEMENTATION
#include "luna.h"

#include "common/example.h"
#include "ngrams.h"

enum {
  PARTS = 4, PART = 65536,           /* at most so many parts, of at least so many bytes */
  WINDOW = 32,                       /* bytes of each part between training steps, */
  RECALLED = 16                      /* and so many windows from before in each */
};

static struct settings set = { .seed = 1 };
static int64_t predict;              /* of enum predict */
enum predict { PREDICT_BOTH, PREDICT_NETWORK, PREDICT_NGRAMS };

static const flag flags[] = {
  { "--out", "pu", WRITES(set.out), "Says where to write the result. FILE gets what is packed or unpacked." },
  { "--by", "p", CHOICE(predict, "both network ngrams"),
   "Chooses whose predictions are used. They are the network's, those of n-grams, or both mixed." },
  FLAG_THREADS("pu"),
  { 0 }
};

/* ---- the network ------------------------------------------------------------------------------------------------- */

typedef struct network {
  luna_ctx *ctx;
  luna_lm model;
  luna_optimizer *adam;
  luna_lm_state *carried;            /* what training remembers of the windows before */
  luna_stream *stream;
  luna_stream_config config;
  void *memory;                      /* the stream's, while it is opened anew */
  int64_t parts, column;             /* bytes read of each part */
  int32_t *last;                     /* [parts] the bytes before the next */
  int32_t *read, *next;              /* [parts + RECALLED, WINDOW] windows, and what followed each byte */
  float *likely;                     /* [parts, 256] probabilities of the next bytes */
  double bits;                       /* that these alone would have taken */
} network;

static bool network_open(network *n, luna_isa isa, int64_t parts, int64_t steps) {
  const luna_lm_config config = {
    .layer = { .convolution = 4, .activation = LUNA_ACTIVATION_GELU, .pre_norm = true, .forget = LUNA_FORGET_GATED }
  };
  const luna_optimizer_config adam = {
    .lr = 3e-3f, .clip = 1, .schedule = { .decay = LUNA_DECAY_COSINE, .warmup = 30, .total = steps, .floor = 0.1f }
  };
  n->ctx = luna_open(&(luna_options){ .threads = (int)set.threads, .seed = (uint64_t)set.seed, .isa = isa });
  if (!n->ctx) return false;
  luna_params *params = luna_params_open(n->ctx);
  if (luna_lm_init(&n->model, params, &config) != LUNA_OK) return false;
  n->parts = parts;
  n->config = (luna_stream_config){ .batch = parts, .chunk = 1, .isa = isa };
  n->adam = luna_adam(params, &adam);
  n->carried = luna_lm_state_open(&n->model, parts + RECALLED);
  n->stream = luna_stream_open(&n->model, &n->config);
  if (!n->adam || !n->carried || !n->stream) return false;
  n->memory = grow(NULL, (int64_t)luna_stream_state_size(n->stream), 1);
  n->last = (int32_t *)grow(NULL, parts + 2 * (parts + RECALLED) * WINDOW, sizeof(int32_t));
  n->likely = (float *)grow(NULL, parts * 256, sizeof(float));
  for (int64_t i = 0; i < parts; i++) n->last[i] = '\n';
  n->read = n->last + parts;
  n->next = n->read + (parts + RECALLED) * WINDOW;
  return true;
}

/* What the next byte of each part may be. The softmax is the context's, since a C library's exp differs from others. */
static bool network_foretells(network *n) {
  const int64_t shape[2] = { n->parts, 256 };
  const float *logits = luna_stream_step(n->stream, n->last);
  if (!logits || luna_begin_inference(n->ctx) != LUNA_OK) return false;
  return luna_read(luna_softmax(luna_tensor_new(n->ctx, logits, 2, shape), NULL), n->likely) == LUNA_OK;
}

/* The byte that came in a part, -1 after its end. */
static void network_reads(network *n, int64_t part, int byte) {
  const int64_t at = part * WINDOW + n->column % WINDOW;
  n->read[at] = n->last[part];
  n->next[at] = byte;
  n->last[part] = byte < 0 ? '\n' : byte;
  if (byte >= 0) n->bits -= log2((double)n->likely[part * 256 + byte] + 1e-7);
}

/* Puts windows from anywhere that has been read below the new ones. They begin without a memory. */
static luna_status network_recalls(network *n, const unsigned char *text, int64_t size, int64_t length) {
  int32_t rows[RECALLED];
  for (int64_t i = 0; i < RECALLED; i++) {
    const uint64_t random = draw(0, n->column, i);
    const int64_t part = (int64_t)(random % (uint64_t)n->parts), row = n->parts + i;
    const int64_t first = (int64_t)((random >> 20) % (uint64_t)(n->column - WINDOW + 1));
    rows[i] = (int32_t)row;
    for (int64_t k = 0; k < WINDOW; k++) {
      const int64_t at = part * length + first + k;
      n->read[row * WINDOW + k] = first + k > 0 && at <= size ? text[at - 1] : '\n';
      n->next[row * WINDOW + k] = at < size ? text[at] : -1;
    }
  }
  return luna_lm_state_restart(n->carried, rows, RECALLED);
}

/* A training step. The stream has copies of some weights: it is opened anew, and goes on from its memory. */
static bool network_learns(network *n, const unsigned char *text, int64_t size, int64_t length) {
  const size_t state = luna_stream_state_size(n->stream);
  const luna_input input = { n->read, NULL, n->parts + RECALLED, WINDOW, NULL };
  if (luna_begin_step(n->ctx) != LUNA_OK || network_recalls(n, text, size, length) != LUNA_OK ||
      luna_lm_state_continue(n->carried) != LUNA_OK) return false;
  luna_backward(luna_lm_loss(&n->model, &input, n->next));
  if (luna_optimizer_step(n->adam) != LUNA_OK || luna_stream_state_save(n->stream, n->memory, state) != LUNA_OK)
    return false;
  luna_stream_close(n->stream);
  n->stream = luna_stream_open(&n->model, &n->config);
  return n->stream && luna_stream_state_load(n->stream, n->memory, state) == LUNA_OK;
}

/* ---- a file ------------------------------------------------------------------------------------------------------ */

/* Encodes a byte, or decodes one, and returns it. likely: the network's 256 probabilities, or null. */
static int code_byte(coder *c, reader *z, const float *likely, const unsigned char *text, int byte, float rate) {
  float sums[512];                   /* of the bytes that begin with these bits, after a leading one */
  int node = 1;
  const int expected = expected_byte(z, text);
  for (int i = 0; i < 256 && likely; i++) sums[256 + i] = likely[i] + 1e-7f;
  for (int i = 255; i > 0 && likely; i--) sums[i] = sums[2 * i] + sums[2 * i + 1];
  for (int place = 7; place >= 0; place--) {
    const uint32_t share = likely ? (uint32_t)(65534 * (sums[2 * node + 1] / sums[node])) + 1 : 0;
    const int bit = byte >> place & 1;
    node = 2 * node + (predict == PREDICT_NETWORK ? code_bit(c, share, bit) :
                       code_mixed_bit(c, z, node, place, share, expected, bit, rate));
  }
  return node - 256;
}

/* Packs the text, or fills it from the code. Both do the same with each byte once it is known. */
static int code_text(coder *c, unsigned char *text, int64_t size, luna_isa isa) {
  const int64_t parts = size / PART < 1 ? 1 : size / PART < PARTS ? size / PART : PARTS;
  const int64_t length = (size + parts - 1) / parts;
  network n = { 0 };
  if (predict != PREDICT_NGRAMS && !network_open(&n, isa, parts, length / WINDOW + 1)) return failed(n.ctx);
  ngrams_open(size, parts);
  code_open(c);
  bool fine = true;
  for (int64_t column = 0; column < length && fine; column++) {
    const float rate = 0.002f + 0.018f * (float)exp((double)(-column * parts) / 30000);
    if (n.ctx) fine = network_foretells(&n);
    for (int64_t i = 0; i < parts && fine; i++) {
      const int64_t at = i * length + column;
      if (at < size) {
        const float *likely = n.ctx ? n.likely + i * 256 : NULL;
        text[at] = (unsigned char)code_byte(c, grams.readers + i, likely, text, text[at], rate);
        ngrams_read(text, size, length, i, column);
      }
      if (n.ctx) network_reads(&n, i, at < size ? text[at] : -1);
    }
    if (n.ctx && fine && ++n.column % WINDOW == 0) fine = network_learns(&n, text, size, length);
  }
  if (!c->decodes) code_close(c);
  if (fine && predict == PREDICT_BOTH) printf("The network alone would take %.0f bytes.\n", n.bits / 8);
  if (!fine) fail("%s", *luna_error(n.ctx) ? luna_error(n.ctx) : luna_stream_error(n.stream));
  luna_stream_close(n.stream);
  luna_close(n.ctx);
  free(n.memory), free(n.last), free(n.likely);
  free(grams.slots), free(grams.places), free(grams.readers);
  return fine ? 0 : 2;
}

/* A packed file begins with these, in little-endian order, the sums by FNV-1a. */
enum { MAGIC, VERSION = 8, ISA = 12, PREDICT = 13, LENGTH = 14, SUM = 22, CODE_SUM = 30, HEAD = 38 };
static const char magic[] = "lunapack";

static void put_number(unsigned char *to, uint64_t number, int bytes) {
  for (int i = 0; i < bytes; i++) to[i] = (unsigned char)(number >> 8 * i);
}
static uint64_t number_at(const unsigned char *from, int bytes) {
  uint64_t number = 0;
  for (int i = 0; i < bytes; i++) number |= (uint64_t)from[i] << 8 * i;
  return number;
}
static uint64_t sum_of(const unsigned char *at, int64_t size, uint64_t sum) {
  for (int64_t i = 0; i < size; i++) sum = (sum ^ at[i]) * 0x100000001b3u;
  return sum;
}
#define SUM_OF_NONE 0xcbf29ce484222325u
static uint64_t code_sum(const unsigned char *at, int64_t size) { /* of all but itself */
  return sum_of(at + HEAD, size - HEAD, sum_of(at, CODE_SUM, SUM_OF_NONE));
}

static int write_whole(const unsigned char *at, int64_t size) {
  new_file file;
  if (!file_begin(&file, set.out)) return 2;
  fwrite(at, 1, (size_t)size, file.to);
  return file_end(&file);
}
static void report(int64_t text, int64_t code, double start) {
  const double took = seconds() - start;
  say("%s: The file has %lld bytes, packed %lld (%.4f bits a byte). It took %.1f s (%.1f KB/s).", set.out,
      (long long)text, (long long)code, 8.0 * (double)code / (double)text, took, (double)text / 1000 / took);
}

static int read_input(const char *path, contents *file) {
  return set.out ? read_file(path, file) : fail("--out FILE is missing; it says which file to write");
}
/* The best instruction set for float32, which more machines have than the best for 8 and 16 bits. */
static luna_isa network_isa(void) {
  static const luna_isa sets[] = { LUNA_ISA_AVX512, LUNA_ISA_AVX2, LUNA_ISA_SSE2, LUNA_ISA_NEON, LUNA_ISA_WASM };
  for (size_t i = 0; i < sizeof sets / sizeof *sets; i++)
    if (luna_isa_available(sets[i])) return sets[i];
  return LUNA_ISA_SCALAR;
}
static int pack(luna_ctx *ctx, const char **words) {
  const double start = seconds();
  contents file;
  coder c = { 0 };
  (void)ctx;                         /* the network has one of its own, on the instruction set that the file names */
  if (read_input(words[0], &file)) return 2;
  for (int i = 0; i < HEAD; i++) put_byte(&c, 0);
  memcpy(c.at + MAGIC, magic, 8);
  put_number(c.at + VERSION, (uint64_t)luna_version(), 4);
  put_number(c.at + ISA, network_isa(), 1);
  put_number(c.at + PREDICT, (uint64_t)predict, 1);
  put_number(c.at + LENGTH, (uint64_t)file.size, 8);
  put_number(c.at + SUM, sum_of(file.data, file.size, SUM_OF_NONE), 8);
  int status = code_text(&c, file.data, file.size, network_isa());
  put_number(c.at + CODE_SUM, code_sum(c.at, c.size), 8);
  if (!status) status = write_whole(c.at, c.size);
  if (!status) report(file.size, c.size, start);
  return free(file.data), free(c.at), status;
}

static int unpack_code(const char *name, contents file) {
  const double start = seconds();
  if (file.size < HEAD || memcmp(file.data, magic, 8) != 0) return fail("%s is no packed file", name);
  const int version = (int)number_at(file.data + VERSION, 4);
  const luna_isa isa = (luna_isa)file.data[ISA];
  const uint64_t size = number_at(file.data + LENGTH, 8);
  /* a bit of a likelihood of at most 65535 / 65536 takes more than 1 / 65536 */
  if (code_sum(file.data, file.size) != number_at(file.data + CODE_SUM, 8) || size >> 16 > (uint64_t)file.size ||
      file.data[PREDICT] > PREDICT_NGRAMS) return fail("%s is damaged or cut short; its checksum does not match", name);
  predict = file.data[PREDICT];
  if (version != luna_version())
    return fail("%s was packed with luna.h %d.%d.%d, which computes other bits than this version", name,
                version / 10000, version / 100 % 100, version % 100);
  if (predict != PREDICT_NGRAMS && !luna_isa_available(isa))
    return fail("%s was packed with %s, which this machine or build lacks; no other set gives the same bits",
                name, luna_isa_name(isa));
  unsigned char *text = size < SIZE_MAX / 16 ? (unsigned char *)calloc((size_t)size, 1) : NULL;
  if (!text) return fail("%s does not fit in memory", name);
  coder c = { .decodes = true, .at = file.data, .size = file.size, .read = HEAD };
  int status = code_text(&c, text, (int64_t)size, isa);
  if (!status && sum_of(text, (int64_t)size, SUM_OF_NONE) != number_at(file.data + SUM, 8))
    status = fail("%s does not unpack to what was packed; another build of this program or C library has packed it",
                  name);
  if (!status) status = write_whole(text, (int64_t)size);
  if (!status) report((int64_t)size, file.size, start);
  return free(text), status;
}
static int unpack(luna_ctx *ctx, const char **words) {
  contents file;
  (void)ctx;
  if (read_input(words[0], &file)) return 2;
  const int status = unpack_code(words[0], file);
  return free(file.data), status;
}

static const command commands[] = {
  { "pack", { "file: Any file." }, "Writes a file in fewer bytes.", pack, "notes.txt --out notes.packed" },
  { "unpack", { "packed: A file that pack wrote." }, "Gives the file back.", unpack, "notes.packed --out notes.txt" },
  { 0 }
};

int main(int count, char **given) { return example("compress", commands, flags, count, given); }
