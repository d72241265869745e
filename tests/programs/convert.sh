#!/bin/sh
# convert.sh: examples/convert_fairseq.py from outside. State dicts in the authors' layout, made of the golden files,
# are saved by torch.save, converted, loaded by luna_load_model, and must give the golden logits. Where Python has
# safetensors: it opens what luna.h wrote, and luna.h what it wrote. PYTHON, PYTHON_SAFETENSORS: the interpreters;
# without torch the script says so and checks nothing.
cd "$(dirname "$0")/../.." || exit 1
build=${BUILD:-build}
case $build in /*) ;; *) build=$PWD/$build ;; esac
work=$build/convert
python=${PYTHON:-python3}
has='import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, sys.argv[1:])))'
"$python" -c "$has" torch numpy 2>/dev/null || python=/usr/bin/python3
if ! "$python" -c "$has" torch numpy 2>/dev/null; then
  echo "no Python with torch here: nothing to convert with"
  echo "convert: 0 passed, 0 failed"
  exit 0
fi
rm -rf "$work"
mkdir -p "$work"

passed=0 failed=0
check() {                                                # a sentence, then a command that should succeed
  sentence=$1
  shift
  if "$@" >"$work/out" 2>&1; then passed=$((passed + 1)); return; fi
  failed=$((failed + 1))
  echo "failed: $sentence"
  sed 's/^/    /' "$work/out" | tail -n 5
}

# ---- one interpreter, which knows torch, runs each script in a child of its own
cat >"$work/server.py" <<'END'
import os, runpy, sys, traceback
import numpy, torch

for line in iter(sys.stdin.readline, ""):
    child = os.fork()
    if child == 0:
        sys.argv = line.rstrip("\n").split("\t")
        for number, name in enumerate(("out", "err"), 1):
            os.dup2(os.open(os.environ["WORK"] + "/script." + name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        status = 0
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            status = end.code or 0
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stdout.flush()
        os._exit(status)  # to take torch's modules down takes half a second
    print(os.WEXITSTATUS(os.waitpid(child, 0)[1]), flush=True)
os._exit(0)
END
mkfifo "$work/requests" "$work/answers"
WORK=$work "$python" "$work/server.py" <"$work/requests" >"$work/answers" &
exec 3>"$work/requests" 4<"$work/answers"
script() {                                               # SCRIPT ARGUMENTS...
  (IFS=$(printf '\t'); printf '%s\n' "$*") >&3
  read -r status <&4
  cat "$work/script.out"
  cat "$work/script.err" >&2
  return "$status"
}
converter() { script examples/convert_fairseq.py "$@"; }

# words the sentence must have, then arguments of the converter: exit 2, one sentence
refuses() {
  words=$1
  shift
  converter "$@" >"$work/out" 2>"$work/err"
  status=$?
  check "convert_fairseq $* ends with 2, not $status" [ "$status" = 2 ]
  check "convert_fairseq $* says: $words" grep -q -- "$words" "$work/err"
  check "convert_fairseq $* says it in one line" [ "$(wc -l <"$work/err")" -eq 1 ]
}
convert() { converter "$@" >"$work/log" 2>&1 && ! grep -q '^convert_fairseq: ' "$work/log"; }

# ---- state dicts as fairseq saves them
cat >"$work/make.py" <<'END'
import argparse, json, struct, sys
import numpy, torch

def read(path):
    data = open(path, "rb").read()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + size])
    meta = header.pop("__metadata__")
    kinds = {"F32": "<f4", "I32": "<i4"}
    def tensor(t):
        begin, end = (8 + size + offset for offset in t["data_offsets"])
        return torch.from_numpy(numpy.frombuffer(data[begin:end], kinds[t["dtype"]]).reshape(t["shape"]).copy())
    return meta, {name: tensor(t) for name, t in header.items()}

class Meter:  # something of the training that only fairseq could unpickle
    pass

def save(path, model, args, **more):
    torch.save({"args": args, "model": model, "extra_state": {"meter": Meter(), "epoch": 3},
                "optimizer_history": [{"lr": 0.1}], **more}, path)

for name in ("classifier_listops", "classifier_pool_p", "classifier_dual", "seq2seq_shared", "seq2seq_pre"):
    meta, t = read("tests/data/%s.safetensors" % name)
    yes = lambda key: meta.get(key) == "true"
    ours = ("encoder.", "decoder.", "pre_logits.", "sentence_projection")
    weights = {n: w for n, w in t.items() if n.startswith(ours) and w.dtype == torch.float32}
    args = {"encoder_attention_heads": int(meta["heads"]), "encoder_layers": int(meta["layers"]),
            "activation_fn": meta["activation"], "max_positions": 100}
    model = {}
    if meta["kind"] == "classifier":
        for n, w in weights.items():
            model[n.replace("encoder.", "encoder.encoder.", 1) if n.startswith("encoder.") else n] = w
        model["encoder.encoder.projected_positions"] = torch.zeros(3)
        args.update(use_p=meta["pooling"] == "p", sen_rep_type="cls", tie_layer_weights=yes("tied_layers"),
                    encoder_learned_pos=yes("learned_positions"))
    else:
        model.update(weights)
        model.update({"encoder.version": torch.tensor([3.0]), "decoder.version": torch.tensor([3.0])})
        shared = yes("share_all_embeddings")
        if shared:
            model["decoder.embed_tokens.weight"] = model["encoder.embed_tokens.weight"]
        model.setdefault("decoder.output_projection.weight", model["decoder.embed_tokens.weight"])
        args.update(encoder_normalize_before=yes("pre_norm"), decoder_normalize_before=yes("pre_norm"),
                    max_source_positions=64, max_target_positions=64,
                    decoder_attention_heads=int(meta["heads"]), share_all_embeddings=shared)
    if not yes("learned_positions"):
        model["encoder.embed_positions._float_tensor"] = torch.zeros(1)
    save("%s/%s.pt" % (sys.argv[1], name), model, argparse.Namespace(**args))
    if name == "classifier_listops":
        save(sys.argv[1] + "/unsaid.pt", dict(model, **{"encoder.strange.weight": torch.zeros(2, 2)}),
             argparse.Namespace(tie_layer_weights=True, encoder_layers=3))
        save(sys.argv[1] + "/missing.pt", {n: w for n, w in model.items() if "layers.0.fc1.bias" not in n},
             argparse.Namespace(**args))
        torch.save({"args": None, "cfg": {"model": dict(args)}, "model": model}, sys.argv[1] + "/dict.pt",
                   _use_new_zipfile_serialization=False)
        torch.save({"model": {"weight": torch.zeros(2)}}, sys.argv[1] + "/other.pt")
        # the same encoder as a masked language model, its head's matrix shared; no golden logits: that it loads is
        # checked
        d = int(meta["dim"])
        bert = {n.replace("encoder.encoder.", "encoder.sentence_encoder."): w
                for n, w in model.items() if n.startswith("encoder.encoder.")}
        bert.update({"encoder.lm_head.dense.weight": torch.eye(d), "encoder.lm_head.dense.bias": torch.zeros(d),
                     "encoder.lm_head.layer_norm.weight": torch.ones(d),
                     "encoder.lm_head.layer_norm.bias": torch.zeros(d),
                     "encoder.lm_head.bias": torch.zeros(int(meta["vocab"])),
                     "encoder.lm_head.weight": bert["encoder.sentence_encoder.embed_tokens.weight"]})
        save(sys.argv[1] + "/bert.pt", bert, argparse.Namespace(**dict(args, activation_fn="gelu")))
END
check "state dicts are made" script "$work/make.py" "$work"

# ---- a program that loads a model and compares its logits with a golden file's
cat >"$work/same.c" <<'END'
#define LUNA_IMPLEMENTATION
#include "luna.h"
#include "tests/test.h"
#include "tests/common.h"
#include "tests/st.h"

typedef struct golden { uint8_t *bytes; st_file st; } golden;

static int32_t *whole(const golden *g, const char *name, int64_t *n) { /* the last axis in n */
  st_item t;
  if (!st_find(&g->st, name, &t)) return NULL;
  int32_t *out = (int32_t *)malloc((size_t)t.count * 4);
  st_integers(&t, out);
  *n = t.shape[t.rank - 1];
  return out;
}

int main(int count, char **given) { /* MODEL GOLDEN: largest relative error; MODEL alone: the kind */
  luna_ctx *ctx = luna_open(NULL);
  luna_model model;
  if (luna_load_model(&model, luna_params_open(ctx), luna_path(given[1])) != LUNA_OK) return puts(luna_error(ctx)), 1;
  if (count == 2) return printf("kind %d\n", (int)model.kind), luna_close(ctx), 0;
  golden g = { (uint8_t *)malloc(1 << 22), { NULL, NULL, NULL, 0 } };
  FILE *file = fopen(given[2], "rb");
  if (!file || st_open(&g.st, g.bytes, fread(g.bytes, 1, 1 << 22, file))) return puts("golden file?"), 1;
  fclose(file);

  int64_t n = 0, m = 0, batch = 0, classes = 0;
  luna_tensor *logits;
  luna_begin_inference(ctx);
  if (model.kind == LUNA_MODEL_CLASSIFIER) {
    int32_t *tokens = whole(&g, "tokens", &n), *lengths = whole(&g, "lengths", &batch);
    int32_t *tokens2 = whole(&g, "tokens2", &m), *lengths2 = whole(&g, "lengths2", &batch);
    const luna_input first = { tokens, lengths, batch, n, NULL }, second = { tokens2, lengths2, batch, m, NULL };
    logits = tokens2 ? luna_classifier_forward_pair(&model.classifier, &first, &second)
                     : luna_classifier_forward(&model.classifier, &first);
    free(tokens), free(lengths), free(tokens2), free(lengths2);
  } else {
    int32_t *source = whole(&g, "src_tokens", &n), *lengths = whole(&g, "src_lengths", &batch);
    int32_t *target = whole(&g, "prev_output_tokens", &m);
    int32_t *target_lengths = (int32_t *)calloc((size_t)batch, 4);
    for (int64_t i = 0; i < batch * m; i++) target_lengths[i / m] += target[i] != 1; /* 1 is padding */
    logits = luna_seq2seq_forward(&model.seq2seq, &(luna_input){ source, lengths, batch, n, NULL },
                                  &(luna_input){ target, target_lengths, batch, m, NULL });
    free(source), free(lengths), free(target), free(target_lengths);
  }
  if (!logits) return puts(luna_error(ctx)), 1;
  st_item t;
  if (!st_find(&g.st, "logits", &t) || t.count != luna_count(logits)) return puts("no such logits"), 1;
  classes = t.count;
  float *want = (float *)malloc((size_t)classes * 4), *got = (float *)malloc((size_t)classes * 4);
  st_floats(&t, want);
  luna_read(logits, got);
  double off = 0, all = 0;
  for (int64_t i = 0; i < classes; i++) off += pow((double)got[i] - (double)want[i], 2), all += pow((double)want[i], 2);
  printf("%s: error %.2e\n", given[2], sqrt(off / all));
  free(want), free(got), free(g.bytes), luna_close(ctx);
  return sqrt(off / all) <= 2e-6 ? 0 : 1;
}
END
have=$build/luna.o                                       # where it is built already
if [ -e "$have" ]; then flags="-DLI_IMPLEMENTED $have"; else flags=; fi
check "the program compiles" ${CC:-cc} -O1 -I. "$work/same.c" $flags -o "$work/same" -lm -lpthread

# ---- converted models compute what the authors' computed
for name in classifier_listops classifier_pool_p classifier_dual seq2seq_shared seq2seq_pre; do
  check "$name is converted" convert "$work/$name.pt" "$work/$name.safetensors"
  check "nothing of it is left out" sh -c "! grep -q 'left out' '$work/log'"
  check "$name gives the golden logits" "$work/same" "$work/$name.safetensors" "tests/data/$name.safetensors"
done
check "a masked language model is converted" convert "$work/bert.pt" "$work/bert.safetensors"
check "it loads as one" sh -c "'$work/same' '$work/bert.safetensors' | grep -q 'kind 3'"
check "arguments as a dictionary in cfg, old file format; the script by itself" \
  "$python" examples/convert_fairseq.py "$work/dict.pt" "$work/dict.safetensors"
check "it is the same model" cmp "$work/dict.safetensors" "$work/classifier_listops.safetensors"
check "what the checkpoint does not say, flags do" convert "$work/unsaid.pt" "$work/unsaid.safetensors" --heads 4 \
  --activation gelu --pooling cls --max-length 100
check "an unknown tensor is named and left out" grep -q '^encoder.strange.weight .* is left out' "$work/log"
check "it is the same model again" cmp "$work/unsaid.safetensors" "$work/classifier_listops.safetensors"

# ---- refused, in a sentence
printf 'not a checkpoint' >"$work/text.pt"
refuses "give --heads" "$work/unsaid.pt" "$work/x.safetensors"
refuses "fc1.bias is missing" "$work/missing.pt" "$work/x.safetensors"
refuses "cannot read" "$work/text.pt" "$work/x.safetensors"
refuses "cannot read" "$work/nowhere.pt" "$work/x.safetensors"
refuses "is missing, so this is no Luna checkpoint" "$work/other.pt" "$work/x.safetensors"
refuses "cannot write" "$work/classifier_listops.pt" "$work/nowhere/x.safetensors"
check "nothing was written" [ ! -e "$work/x.safetensors" ]

# ---- a disk that is full, here a limit of files' sizes: the old file stays as it was
cat >"$work/full.py" <<'END'
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
END
mkdir "$work/full"
printf 'an old model' >"$work/full/x.safetensors"
chmod 600 "$work/full/x.safetensors"
ln -s x.safetensors "$work/full/link"
script "$work/full.py" examples/convert_fairseq.py "$work/bert.pt" "$work/full/x.safetensors" >"$work/log" 2>"$work/err"
status=$?
check "a full disk ends with 2, not $status" [ "$status" = 2 ]
check "it says: cannot write" grep -q 'cannot write .*File too large' "$work/err"
check "the old file is whole" [ "$(cat "$work/full/x.safetensors")" = 'an old model' ]
check "no other file is left" [ "$(ls -A "$work/full" | tr '\n' ' ')" = 'link x.safetensors ' ]
check "a link is written through" convert "$work/bert.pt" "$work/full/link"
check "the link is still one" [ -L "$work/full/link" ]
check "the file is new" cmp "$work/full/x.safetensors" "$work/bert.safetensors"
check "it has the old one's mode" [ "$(ls -l "$work/full/x.safetensors" | cut -c 1-10)" = -rw------- ]
check "a device is written in place" convert "$work/bert.pt" /dev/null

# ---- Python's own safetensors
other=${PYTHON_SAFETENSORS:-python3}
if "$other" -c 'import safetensors.numpy' 2>/dev/null; then
  cat >"$work/again.py" <<'END'
import sys
from safetensors import safe_open
from safetensors.numpy import save_file
with safe_open(sys.argv[1], "np") as file:
    tensors, meta = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()
save_file(tensors, sys.argv[2], meta)
print(len(tensors), meta.get("luna.kind"))
END
  check "safetensors opens what the converter wrote, and writes it again" "$other" "$work/again.py" \
    "$work/seq2seq_pre.safetensors" "$work/again.safetensors"
  check "luna.h opens that" "$work/same" "$work/again.safetensors" tests/data/seq2seq_pre.safetensors
  cat >"$work/save.c" <<'END'
#define LUNA_IMPLEMENTATION
#include "luna.h"
int main(int count, char **given) { /* loads a model and saves it */
  luna_ctx *ctx = luna_open(NULL);
  luna_params *params = luna_params_open(ctx);
  luna_model model;
  (void)count;
  bool good = luna_load_model(&model, params, luna_path(given[1])) == LUNA_OK && luna_save(params,
      luna_path(given[2])) == LUNA_OK;
  luna_close(ctx);
  return good ? 0 : 1;
}
END
  check "a program that saves compiles" ${CC:-cc} -O0 -I. "$work/save.c" $flags -o "$work/save" -lm -lpthread
  check "luna.h saves it" "$work/save" "$work/again.safetensors" "$work/luna.safetensors"
  check "safetensors opens what luna.h wrote" \
    sh -c "'$other' '$work/again.py' '$work/luna.safetensors' '$work/third.safetensors' | grep seq2seq"
  check "and luna.h opens it once more" "$work/same" "$work/third.safetensors" tests/data/seq2seq_pre.safetensors
else
  echo "no Python with safetensors here: its two checks are left out"
fi

exec 3>&-
wait
echo "convert: $passed passed, $failed failed"
[ "$failed" = 0 ]
