/* mnist: reads handwritten digits, or whatever else IDX files hold, from their pixels one after the other. The 28 x 28
   pixels are a sequence of 784 tokens, and nothing tells the model which pixels are neighbours.

     cc -O2 -I. examples/mnist.c -o mnist -lm -lpthread

     gunzip train-images-idx3-ubyte.gz train-labels-idx1-ubyte.gz
     mnist train train-images-idx3-ubyte train-labels-idx1-ubyte [--plot loss.svg] ...
       takes about 5 minutes; the last sixth is for validation
     mnist eval M t10k-images-idx3-ubyte t10k-labels-idx1-ubyte      measures the accuracy on other images
     mnist show M t10k-images-idx3-ubyte [--count 5]                 draws images and says what M reads in them

   Ctrl-C ends the training early and keeps the model. */
#define LUNA_IMPLEMENTATION
#include "luna.h"

#include "common/example.h"
#include "common/classifier.h"

static struct settings set = {
  .out = "mnist.safetensors",
  .steps = 2500, .batch = 32, .lr = 3e-3,
  .layers = 2, .dim = 64, .heads = 4, .memory = 16, .ffn = 128, .positions = LUNA_POSITIONS_LEARNED,
  .seed = 1
};
static struct { int64_t grays, count; } own = { .grays = 16, .count = 5 };

static const flag flags[] = {
  FLAGS_TRAIN,
  { "--grays", "t", WHOLE(own.grays, 2, 256), "Sets how many shades of gray are told apart. N is the vocabulary." },
  { "--count", "s", WHOLE(own.count, 1, 1e9), "Sets the count to N. It counts the images to draw." },
  FLAGS_MODEL,
  FLAGS_CLASSIFIER,
  FLAG_PATIENCE,
  FLAG_RECOMPUTE,
  FLAG_SEED("t"),
  FLAG_THREADS("tes"),
  { 0 }
};

/* ---- IDX files: 0 0 8 (bytes), the number of axes, the axes as big-endian 32-bit numbers, the bytes -------------- */

typedef struct idx { contents file; const unsigned char *bytes; int64_t axes, size[4]; } idx;
static idx images, labels;

static int read_idx(const char *path, int axes, idx *x) {
  if (read_file(path, &x->file)) return 2;
  const unsigned char *b = x->file.data;
  int64_t header = 4 + 4 * axes, left = x->file.size - header;
  if (left < 0 || b[0] != 0 || b[1] != 0 || b[2] != 8 || b[3] != axes)
    return fail("%s is no IDX file of bytes with %d axes", path, axes);
  for (int a = 0; a < axes; a++) {
    x->size[a] = (int64_t)b[4 + 4 * a] << 24 | b[5 + 4 * a] << 16 | b[6 + 4 * a] << 8 | b[7 + 4 * a];
    if (x->size[a] == 0 || x->size[a] > left)
      return fail("%s promises %lld along an axis, but only %lld bytes follow", path, (long long)x->size[a],
                  (long long)left);
    left /= x->size[a];                                    /* so that no product of hostile sizes is ever made */
  }
  if (x->size[1] * x->size[2] > 1 << 20) return fail("%s has images of more than a million pixels", path);
  x->bytes = b + header;
  return 0;
}

static int64_t pixels(void) { return images.size[1] * images.size[2]; }

static int32_t fetch(int64_t index, int32_t *tokens, int32_t *length) {
  const unsigned char *image = images.bytes + index * pixels();
  for (int64_t i = 0; i < pixels(); i++) tokens[i] = (int32_t)(image[i] * own.grays / 256);
  *length = (int32_t)pixels();
  return labels.bytes ? labels.bytes[index] : 0;
}

static int read_both(const char **paths) {
  if (read_idx(paths[0], 3, &images) || read_idx(paths[1], 1, &labels)) return 2;
  if (images.size[0] != labels.size[0])
    return fail("%s has %lld images, but %s has %lld labels", paths[0], (long long)images.size[0], paths[1],
                (long long)labels.size[0]);
  return 0;
}

static int64_t classes(void) {                             /* labels are 0 .. classes - 1 */
  int64_t max = 1;
  for (int64_t i = 0; i < labels.size[0]; i++) if (labels.bytes[i] > max) max = labels.bytes[i];
  return max + 1;
}

/* ---- commands ---------------------------------------------------------------------------------------------------- */

static int load(luna_ctx *ctx, luna_model *model, const char *path) {
  if (load_classifier(model, ctx, luna_params_open(ctx), path, 0, 0)) return 2;
  own.grays = model->classifier.config.vocab;
  return own.grays >= 2 && own.grays <= 256 ? 0 : fail("%s is not a model that mnist made", path);
}

static int train(luna_ctx *ctx, const char **words) {
  luna_params *params = luna_params_open(ctx);
  int status = read_both(words);
  if (!status && luna_params_set_text(params, "mnist.tokens", "pixels") != LUNA_OK) status = failed(ctx);
  if (!status && images.size[0] < 6)
    status = fail("%s has %lld images; the minimum is 6", words[0], (long long)images.size[0]);
  if (!status) {
    int64_t held = images.size[0] / 6;
    status = train_classifier(ctx, params, &(samples){
      .title = words[0], .vocab = own.grays, .classes = classes(), .longest = pixels(),
      .training = images.size[0] - held, .held = held, .fetch = fetch });
  }
  free(images.file.data), free(labels.file.data);
  return status;
}

static int eval(luna_ctx *ctx, const char **words) {
  luna_model model;
  int status = load(ctx, &model, words[0]);
  if (!status) status = read_both(words + 1);
  if (!status && classes() > model.classifier.config.classes)
    status = fail("%s has labels that the model does not know", words[2]);
  if (!status)
    status = eval_classifier(ctx, &model.classifier, &(samples){
      .title = words[1], .vocab = own.grays, .classes = model.classifier.config.classes, .longest = pixels(),
      .training = images.size[0], .fetch = fetch });
  free(images.file.data), free(labels.file.data);
  return status;
}

static int show_one(luna_ctx *ctx, const luna_classifier *model, int64_t index, int32_t *tokens, float *shares) {
  int32_t length, best = 0;
  fetch(index, tokens, &length);
  for (int64_t i = 0; i < pixels(); i++)
    printf("%c%s", " .:-=+*#%@"[tokens[i] * 10 / own.grays], (i + 1) % images.size[2] ? "" : "\n");
  luna_begin_inference(ctx);
  if (luna_read(luna_softmax(luna_classifier_forward(model, &(luna_input){ tokens, NULL, 1, length, NULL }), NULL),
                shares) != LUNA_OK) return failed(ctx);
  for (int32_t c = 1; c < model->config.classes; c++) if (shares[c] > shares[best]) best = c;
  printf("Image %lld shows %d, with probability %.3f.\n\n", (long long)index, (int)best, (double)shares[best]);
  return 0;
}

static int show(luna_ctx *ctx, const char **words) {
  luna_model model;
  int32_t *tokens = NULL;
  float *shares = NULL;
  int status = load(ctx, &model, words[0]);
  if (!status) status = read_idx(words[1], 3, &images);
  if (!status) {
    tokens = (int32_t *)malloc((size_t)pixels() * sizeof *tokens);
    shares = (float *)malloc((size_t)model.classifier.config.classes * sizeof *shares);
    if (!tokens || !shares) status = fail("out of memory");
  }
  for (int64_t i = 0; i < own.count && i < images.size[0] && !status; i++)
    status = show_one(ctx, &model.classifier, i, tokens, shares);
  free(tokens), free(shares), free(images.file.data);
  return status;
}

#define IMAGES_FILE "images: An unzipped IDX file of bytes with 3 axes, such as train-images-idx3-ubyte."
#define LABELS_FILE "labels: An unzipped IDX file of bytes with 1 axis, such as train-labels-idx1-ubyte."
#define MODEL_FILE "model: A file that train wrote."
static const command commands[] = {
  { "train", { IMAGES_FILE, LABELS_FILE }, "Trains a classifier on labelled images.", train,
    "train-images-idx3-ubyte train-labels-idx1-ubyte --out mnist.safetensors" },
  { "eval", { MODEL_FILE, IMAGES_FILE, LABELS_FILE },
    "Measures a model's accuracy on labelled images.", eval,
    "mnist.safetensors t10k-images-idx3-ubyte t10k-labels-idx1-ubyte" },
  { "show", { MODEL_FILE, IMAGES_FILE }, "Draws images and says what the model reads in them.", show,
    "mnist.safetensors t10k-images-idx3-ubyte --count 3" },
  { 0 }
};

int main(int count, char **given) { return example_of_attentions("mnist", commands, flags, count, given); }
