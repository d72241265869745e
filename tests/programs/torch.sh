#!/bin/sh
# torch.sh: examples/luna_torch.py beside luna.h. Models of every kind made here give the same logits there, and models
# trained there give the same logits here, to 1e-5 of their norm. examples/lesson.ipynb runs to its end, where Jupyter
# is. PYTHON: the interpreter; without torch the script says so and checks nothing.
cd "$(dirname "$0")/../.." || exit 1
build=${BUILD:-build}
case $build in /*) ;; *) build=$PWD/$build ;; esac
work=$build/torch
python=${PYTHON:-python3}
if ! "$python" -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("torch"))'; then
  echo "no Python with torch here: examples/luna_torch.py is not checked (pip install torch; PYTHON=... make test)"
  echo "torch: 0 passed, 0 failed"
  exit 0
fi
rm -rf "$work"
mkdir -p "$work"

cat >"$work/peer.c" <<'END'
#define LUNA_IMPLEMENTATION
#include "luna.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BATCH = 3, N = 21, M = 9, VOCAB = 50, FEATURES = 3 };

static const luna_input *input(int64_t n, bool with_lengths) { /* the same as in compare.py; only the newest is valid */
  static int32_t tokens[2][BATCH * N], lengths[2][BATCH];
  static luna_input in[2];
  static float features[2][BATCH * N * FEATURES];
  static int which;
  which = !which;
  for (int64_t i = 0; i < BATCH * n * FEATURES; i++) /* one in 11 is missing */
    features[which][i] = i % 11 == 3 ? NAN : (float)((i * i + 3 * i) % 101) / 20 - 2;
  for (int64_t i = 0; i < BATCH * n; i++) tokens[which][i] = (int32_t)((i * i + 7 * i + n) % VOCAB);
  for (int32_t b = 0; b < BATCH; b++) lengths[which][b] = b == 0 ? (int32_t)n : 1 + 4 * b;
  in[which] = (luna_input){ tokens[which], with_lengths ? lengths[which] : NULL, BATCH, n, features[which] };
  return &in[which];
}

static luna_tensor *logits_of(const luna_model *m) {
  if (m->kind == LUNA_MODEL_LM) return luna_lm_forward(&m->lm, input(N, m->lm.config.features > 0));
  if (m->kind == LUNA_MODEL_MASKED_LM) return luna_masked_lm_forward(&m->masked_lm, input(N, true));
  if (m->kind == LUNA_MODEL_SEQ2SEQ) return luna_seq2seq_forward(&m->seq2seq, input(N, true), input(M, true));
  if (m->classifier.config.pair) return luna_classifier_forward_pair(&m->classifier, input(N, true), input(M, true));
  return luna_classifier_forward(&m->classifier, input(N, true));
}

static int run(luna_ctx *ctx, const luna_model *m, const char *path) { /* writes the logits */
  luna_begin_inference(ctx);
  luna_tensor *logits = logits_of(m);
  float *out = (float *)malloc((size_t)luna_count(logits) * sizeof(float) + 1);
  FILE *file = luna_read(logits, out) == LUNA_OK ? fopen(path, "wb") : NULL;
  if (!file) return puts(luna_error(ctx)), 1;
  for (int64_t i = 0; i < luna_count(logits); i++) fprintf(file, "%.9g\n", (double)out[i]);
  return free(out), fclose(file) != 0;
}

/* a model of that number; biases and norms away from 0 and 1 */
static int make(luna_ctx *ctx, int number, const char *path) {
  luna_params *params = luna_params_open(ctx);
  luna_model m = { 0 };
  luna_encoder_config e = { .layers = 2, .max_length = 64,
                            .layer = { .dim = 24, .memory = 6, .heads = 4, .ffn = 40 } };
  switch (number) {
    case 0: luna_lm_init(&m.lm, params, &(luna_lm_config){ .vocab = VOCAB,
              .layer = { .dim = 24, .memory = 6, .convolution = 4, .activation = LUNA_ACTIVATION_GELU } }); break;
    case 1: luna_lm_init(&m.lm, params, &(luna_lm_config){ .vocab = VOCAB, .layers = 3,
              .positions = LUNA_POSITIONS_LEARNED,
              .layer = { .dim = 30, .heads = 3, .sharing = LUNA_SHARING_FULL, .pre_norm = true,
                         .omega = LUNA_ACTIVATION_ELU1 } }); break;
    case 2: luna_lm_init(&m.lm, params, &(luna_lm_config){ .vocab = VOCAB,
              .positions = LUNA_POSITIONS_SINUSOIDAL,
              .layer = { .dim = 25, .heads = 5, .omega = LUNA_ACTIVATION_SOFTPLUS, .pre_norm = true,
                         .norm = LUNA_NORM_RMS, .gated = true, .activation = LUNA_ACTIVATION_SILU } }); break;
    case 10: luna_lm_init(&m.lm, params, &(luna_lm_config){ .vocab = VOCAB,
               .layer = { .dim = 24, .memory = 6, .convolution = 4, .forget = LUNA_FORGET_GATED,
                          .output_gate = true } }); break;
    case 11: luna_lm_init(&m.lm, params, &(luna_lm_config){ .vocab = VOCAB,
               .layer = { .dim = 24, .memory = 1, .forget = LUNA_FORGET_CONSTANT, .sharing = LUNA_SHARING_FULL,
                          .pre_norm = true } }); break;
    case 12: luna_lm_init(&m.lm, params, &(luna_lm_config){ .vocab = VOCAB,
               .layer = { .dim = 24, .horizon = 7 } }); break;
    case 14: luna_lm_init(&m.lm, params, &(luna_lm_config){ .features = FEATURES, .outputs = 7,
               .output_norm = true,
               .layer = { .dim = 24, .convolution = 3, .forget = LUNA_FORGET_GATED, .pre_norm = true } }); break;
    case 15: luna_lm_init(&m.lm, params, &(luna_lm_config){ .features = FEATURES,
               .positions = LUNA_POSITIONS_SINUSOIDAL, .layer = { .dim = 24, .memory = 6 } }); break;
    case 16: luna_lm_init(&m.lm, params, &(luna_lm_config){ .vocab = VOCAB, .outputs = 4,
               .layer = { .dim = 24 } }); break;
    case 17: case 18: case 19:
      e.positions = number == 17 ? LUNA_POSITIONS_SINUSOIDAL : LUNA_POSITIONS_NONE, e.keep_padding = number == 19;
      e.features = FEATURES;
      luna_classifier_init(&m.classifier, params, &(luna_classifier_config){ .classes = 7,
              .encoder = e, .per_step = number == 18, .pooling = LUNA_POOLING_MEAN }); break;
    case 20: luna_lm_init(&m.lm, params, &(luna_lm_config){ .vocab = VOCAB,
               .layer = { .dim = 24, .memory = 6, .convolution = 4, .forget = LUNA_FORGET_ROUTED,
                          .output_gate = true } }); break;
    case 21: luna_lm_init(&m.lm, params, &(luna_lm_config){ .vocab = VOCAB,
               .layer = { .dim = 24, .memory = 2, .forget = LUNA_FORGET_ROUTED, .sharing = LUNA_SHARING_FULL,
                          .heads = 1, .pre_norm = true } }); break;
    case 13: e.layer.forget = LUNA_FORGET_GATED, e.layer.output_gate = true;
      luna_seq2seq_init(&m.seq2seq, params, &(luna_seq2seq_config){ .vocab = VOCAB, .encoder = e }); break;
    case 3: e.layer.pre_norm = true, e.layer.activation = LUNA_ACTIVATION_GELU; goto classifier;
    case 4: e.positions = LUNA_POSITIONS_LEARNED, e.norm_embedding = true, e.first_position = 2;
            e.layer.sharing = LUNA_SHARING_FULL; goto classifier;
    case 5: e.layer.own_memory = true, e.layer.sharing = LUNA_SHARING_QK, e.layer.pack_heads = 2;
            e.embedding_scale = LUNA_EMBEDDING_SCALE_ONE; goto classifier;
    case 6: e.tied_layers = true, e.layer.sharing = LUNA_SHARING_NO_KEY, e.keep_padding = true; goto classifier;
    classifier: luna_classifier_init(&m.classifier, params, &(luna_classifier_config){ .vocab = VOCAB, .classes = 7,
              .encoder = e, .pair = number == 4, .pre_logits = number == 4 ? 10 : 0,
              .pooling = (luna_pooling)((int[]){ LUNA_POOLING_MEMORY, LUNA_POOLING_CLS, LUNA_POOLING_MEAN,
                                                 LUNA_POOLING_MEMORY_BATCH }[number - 3]) }); break;
    case 7: luna_masked_lm_init(&m.masked_lm, params, &(luna_masked_lm_config){ .vocab = VOCAB, .encoder = e }); break;
    case 8: e.layer.norm = LUNA_NORM_RMS, e.norm_embedding = true;
      luna_seq2seq_init(&m.seq2seq, params, &(luna_seq2seq_config){ .vocab = VOCAB, .share_embeddings = true,
                        .encoder = e }); break;
    default:
      e.layer.pre_norm = true, e.positions = LUNA_POSITIONS_LEARNED;
      luna_seq2seq_init(&m.seq2seq, params, &(luna_seq2seq_config){ .vocab = VOCAB, .target_vocab = VOCAB + 5,
                        .separate_output = true, .decoder_layers = 3, .encoder = e });
  }
  m.kind = m.lm.params && (number < 3 || number > 9) && number != 13 && (number < 17 || number > 19) ? LUNA_MODEL_LM :
      number < 7 || number > 16 ? LUNA_MODEL_CLASSIFIER : number == 7 ? LUNA_MODEL_MASKED_LM : LUNA_MODEL_SEQ2SEQ;
  for (int64_t i = 0; i < luna_params_tensor_count(params); i++) {
    luna_tensor *t = luna_params_at(params, i, NULL);
    float values[4096];
    if (t->rank > 1 || luna_read(t, values) != LUNA_OK) continue;
    for (int64_t k = 0; k < luna_count(t); k++) values[k] += 0.2f * sinf((float)(i + 3 * k));
    luna_write(t, values);
  }
  luna_params_set_text(params, "note", "kept");
  if (luna_save(params, luna_path(path)) != LUNA_OK) return puts(luna_error(ctx)), 1;
  char name[4096];
  snprintf(name, sizeof name, "%s.logits", path);
  return run(ctx, &m, name);
}

/* whether two files' models have the same numbers, to a millionth */
static int same(luna_ctx *ctx, const char *a, const char *b) {
  luna_params *params[2] = { luna_params_open(ctx), luna_params_open(ctx) };
  luna_model models[2];
  static float x[1 << 20], y[1 << 20];
  for (int i = 0; i < 2; i++)
    if (luna_load_model(models + i, params[i], luna_path(i ? b : a)) != LUNA_OK) return puts(luna_error(ctx)), 1;
  for (int64_t i = 0; i < luna_params_tensor_count(params[0]); i++) {
    const char *name;
    luna_tensor *t = luna_params_at(params[0], i, &name), *other = luna_params_find(params[1], name);
    if (!other || luna_count(t) != luna_count(other) || luna_count(t) > 1 << 20) return puts(name), 1;
    luna_read(t, x), luna_read(other, y);
    for (int64_t k = 0; k < luna_count(t); k++) if (!(fabsf(x[k] - y[k]) <= 1e-6f * fabsf(x[k]))) return puts(name), 1;
  }
  return 0;
}

int main(int count, char **given) { /* make NUMBER FILE, or run FILE: the logits go to FILE.logits; same FILE FILE */
  luna_ctx *ctx = luna_open(NULL);
  luna_model model;
  char name[4096];
  int status = 1;
  if (count == 4 && strcmp(given[1], "same") == 0) status = same(ctx, given[2], given[3]);
  else if (count == 4) status = make(ctx, atoi(given[2]), given[3]);
  else if (luna_load_model(&model, luna_params_open(ctx), luna_path(given[2])) != LUNA_OK) puts(luna_error(ctx));
  else snprintf(name, sizeof name, "%s.logits", given[2]), status = run(ctx, &model, name);
  return luna_close(ctx), status;
}
END

cat >"$work/compare.py" <<'END'
import errno, json, pathlib, resource, struct, subprocess, sys
import torch
sys.path.insert(0, "examples")
import luna_torch

work, VOCAB, passed, failed = sys.argv[1], 50, 0, 0
torch.manual_seed(1)
torch.set_num_threads(1)

def inputs(n, with_lengths=True):
    i = torch.arange(3 * n)
    return ((i * i + 7 * i + n) % VOCAB).reshape(3, n), torch.tensor([n, 5, 9]) if with_lengths else None

def features():
    i = torch.arange(3 * 21 * 3)
    x = ((i * i + 3 * i) % 101).float() / 20 - 2
    return x.masked_fill(i % 11 == 3, float("nan")).reshape(3, 21, 3)

def logits_of(model):
    if model.c.features: return model(features(), torch.tensor([21, 5, 9]))
    if model.kind == "causal_lm": return model(*inputs(21, False))
    if model.kind == "masked_lm" or (model.kind == "classifier" and not model.c.pair): return model(*inputs(21))
    return model(*inputs(21), *inputs(9))

def check(what, good):
    global passed, failed
    passed, failed = passed + good, failed + (not good)
    if not good: print("failed:", what)

def compare(what, model, path):
    with torch.no_grad(): mine = logits_of(model.eval()).flatten()
    theirs = torch.tensor([float(line) for line in open(path + ".logits")])
    error = float((mine - theirs).norm() / theirs.norm()) if len(mine) == len(theirs) else float("inf")
    check("%s: error %.1e" % (what, error), error < (2e-6 if model.c.features else 1e-5))

for number in range(22):                                           # made here, run there; trained there, run here
    path = "%s/%d.safetensors" % (work, number)
    if subprocess.run([work + "/peer", "make", str(number), path]).returncode:
        check("model %d is made" % number, False)
        continue
    model = luna_torch.load(path)
    compare("luna.h's model %d in torch" % number, model, path)
    check("text pairs are kept", model.pairs == {"note": "kept"})
    model.train()
    adam = torch.optim.Adam(model.parameters(), 1e-3)
    first = None
    for step in range(5):
        adam.zero_grad()
        logits = logits_of(model)
        labels = torch.arange(logits[..., 0].numel()) % min(7, logits.shape[-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels)
        loss.backward()
        adam.step()
        first = loss.item() if first is None else first
    check("model %d learns in torch" % number, loss.item() < first)
    luna_torch.save(model, path)
    check("luna.h opens what torch wrote", subprocess.run([work + "/peer", "run", path]).returncode == 0)
    compare("model %d, trained in torch, in luna.h" % number, model, path)

fresh = {"lm": luna_torch.LM(vocab=VOCAB, dim=32, convolution=3, pre_norm=1),
         "forgetting lm": luna_torch.LM(vocab=VOCAB, dim=32, convolution=3, forget=luna_torch.GATED, output_gate=1),
         "routed lm": luna_torch.LM(vocab=VOCAB, dim=32, convolution=3, forget=luna_torch.ROUTED, output_gate=1),
         "routed lm of many slots": luna_torch.LM(vocab=VOCAB, dim=32, memory=24, forget=luna_torch.ROUTED),
         "constantly forgetting lm": luna_torch.LM(vocab=VOCAB, dim=32, forget=luna_torch.CONSTANT),
         "classifier": luna_torch.Classifier(vocab=VOCAB, dropout=10 ** 8, output_gate=1),
         "masked_lm": luna_torch.MaskedLM(vocab=VOCAB, ffn=64),
         "detector": luna_torch.LM(features=3, outputs=2, dim=32, forget=luna_torch.GATED),
         "forecaster": luna_torch.LM(features=3, dim=32, output_norm=1),
         "series classifier": luna_torch.Classifier(features=3, classes=4, dim=32),
         "seq2seq": luna_torch.Seq2Seq(vocab=VOCAB, share_embeddings=1, positions=3)}
fresh["detector"].input_norm.fit(features())
fresh["forecaster"].output_norm.fit(100 + 5 * features())
fresh["series classifier"].encoder.input_norm.fit(features())
x = features().flatten(0, 1)
check("a column's mean", float((fresh["detector"].input_norm.mean - x.nanmean(0)).abs().max()) < 1e-6)
check("outputs have the unit of what they are fitted to", 90 < logits_of(fresh["forecaster"]).mean() < 110)
for name, model in fresh.items():                                  # made there
    path = "%s/%s.safetensors" % (work, name)
    luna_torch.save(model, path)
    check("luna.h opens a new " + name, subprocess.run([work + "/peer", "run", path]).returncode == 0)
    compare("a new " + name, model, path)

folder = pathlib.Path(work, "full")                                # a full disk: the old file stays as it was
folder.mkdir()
(folder / "x.safetensors").write_bytes(b"an old model")
full = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, full[1]))
try: luna_torch.save(fresh["lm"], str(folder / "x.safetensors")), check("a full disk is told", False)
except OSError as error: check("a full disk: %s" % error, error.errno == errno.EFBIG)
resource.setrlimit(resource.RLIMIT_FSIZE, full)
check("the old file is whole", (folder / "x.safetensors").read_bytes() == b"an old model")
check("no other file is left", len(list(folder.iterdir())) == 1)

for path in sorted(pathlib.Path("examples/models").glob("*.safetensors")): # in 8 bits: as their floats in luna.h
    if b'"luna.kind"' not in path.read_bytes()[:65536]: continue   # lra's own model: no kind of luna.h
    model = luna_torch.load(str(path))
    copy = "%s/%s" % (work, path.name)
    luna_torch.save(model, copy)
    i = torch.arange(3 * 21)
    x = features()[..., :1].expand(3, 21, model.c.features) if model.c.features else inputs(21)[0]
    with torch.no_grad(): y = model.eval()(x)
    check("%s: finite and not all alike" % path, bool(y.isfinite().all()) and float(y.std()) > 0.01)
    check("%s: as floats in luna.h" % path, subprocess.run([work + "/peer", "same", str(path), copy]).returncode == 0)
for wrong, words in (({"memroy": 4}, "'memory'"), ({"rotary": 1}, "rotary"), ({"attention": 1}, "Luna attention")):
    try: luna_torch.LM(**wrong), check("%s is refused" % wrong, False)
    except (TypeError, ValueError) as error: check("%s: %s" % (wrong, error), words in str(error))

for path in sorted(pathlib.Path("tests/data/features").iterdir()): # models in float64 NumPy: tests/models/features.py
    data = path.read_bytes()
    start = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:start])
    def stored(name, dtype=torch.float32):
        t = header["luna.test." + name]
        begin, end = (start + offset for offset in t["data_offsets"])
        return torch.frombuffer(bytearray(data[begin:end]), dtype=dtype).reshape(t["shape"])
    with torch.no_grad(): y = luna_torch.load(path)(stored("features"), stored("lengths", torch.int32).long())
    expected = stored("output")
    steps = torch.arange(expected.shape[1])
    real = (steps < stored("lengths", torch.int32)[:, None])[..., None] if expected.dim() == 3 else 1
    error = float(((y - expected) * real).norm() / (expected * real).norm())
    check("%s: error %.1e" % (path, error), error < 2e-6)

try:                                                               # examples/lesson.ipynb asserts what it shows
    import ipykernel, nbclient, nbformat
    notebook = nbformat.read("examples/lesson.ipynb", 4)
    shows = [c for c in notebook.cells[4:] if c.cell_type == "code" and "print(" in c.source]
    check("the notebook was saved with what it prints", shows and all(c.outputs for c in shows))
    try:
        nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
        check("the notebook runs to its end", True)
    except nbclient.exceptions.CellExecutionError as error: check("the notebook: %s" % error, False)
except ImportError: print("no Jupyter here: examples/lesson.ipynb is not run (pip install nbclient ipykernel)")
print("torch: %d passed, %d failed" % (passed, failed))
sys.exit(failed != 0)
END

have=$build/luna.o
if [ -e "$have" ]; then flags="-DLI_IMPLEMENTED $have"; else flags=; fi
if ! ${CC:-cc} -O1 -I. "$work/peer.c" $flags -o "$work/peer" -lm -lpthread; then
  echo "torch: 0 passed, 1 failed"
  exit 1
fi
"$python" "$work/compare.py" "$work"
