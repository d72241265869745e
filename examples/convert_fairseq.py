#!/usr/bin/env python3
"""Converts a checkpoint of the Luna authors' PyTorch code into a safetensors file that luna_load_model opens.

It reads what github.com/XuezheMax/fairseq-apollo saves: translation models (luna), masked language models (luna_bert)
and the text classifiers of Long Range Arena (lra). It takes seconds. It needs torch and numpy, not fairseq, and runs no
code out of the checkpoint. Sizes come from the tensors. The rest (heads, pooling, ...) comes from the arguments in the
checkpoint, or from flags where those are missing or others are wanted. It refuses what luna.h cannot compute, and names
and leaves out what luna.h does not need."""
import argparse
import json
import os
import pickle
import re
import struct
import sys
import types

try:
    import torch
except ImportError:
    torch = None

EXAMPLE = """Example:
  convert_fairseq.py checkpoint_best.pt model.safetensors

"""
POOLING = {"cls": 1, "mean": 2, "memory": 3, "memory_batch": 4}
BUFFERS = re.compile(r"(^|\.)(version|_float_tensor|projected_positions|embed_positions\.weights|_future_mask)$")


def refuse(sentence):
    sys.stdout.flush()
    print("convert_fairseq: " + sentence, file=sys.stderr)
    sys.exit(2)


# ---- reading ---------------------------------------------------------------------------------------------------------

class Unknown(dict):
    """Stands for anything a checkpoint may hold that is neither a tensor nor an argument: made, filled, never asked."""
    def __init__(self, *_, **__): super().__init__()
    def __call__(self, *_, **__): return self
    def __setstate__(self, _): pass
    def append(self, _): pass
    def extend(self, _): pass


class Unpickler(pickle.Unpickler):
    def find_class(self, module, name):
        plain = {("collections", "OrderedDict"), ("argparse", "Namespace"), ("torch", "Size"), ("torch", "device"),
                 ("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_parameter")}
        if (module, name) in plain or (module.startswith("torch")
                                       and re.fullmatch(r"\w*Storage|(b?float|int|uint)\d+|bool", name)):
            return super().find_class(module, name)
        return Unknown


def read(path):
    """-> the tensors by name, the arguments"""
    plain = types.ModuleType("plain")
    plain.__dict__.update(vars(pickle), Unpickler=Unpickler, load=lambda file, **how: Unpickler(file, **how).load())
    torch.serialization.pickle = plain  # PyTorch 1.13 takes it from here and not from its argument
    try:
        saved = torch.load(path, map_location="cpu", pickle_module=plain)
    except Exception as error:  # whatever a broken file makes torch and pickle say
        refuse("cannot read %s: %s" % (path, " ".join(str(error).split()) or type(error).__name__))
    if not isinstance(saved, dict):
        refuse("%s holds no dictionary of tensors" % path)
    args = saved.get("args") or (saved.get("cfg") or {}).get("model") or {}
    args = dict(args if isinstance(args, dict) else vars(args))
    tensors = {name: t for name, t in saved.get("model", saved).items() if torch.is_tensor(t)}
    return tensors, args


# ---- names -----------------------------------------------------------------------------------------------------------

def rename(tensors):
    """The authors' classes wrap the encoder once or twice and name the norms of embeddings in two ways."""
    out = {}
    for name, t in tensors.items():
        if BUFFERS.search(name):
            continue
        name = re.sub(r"^encoder\.(encoder|sentence_encoder)\.", "encoder.", name)
        name = re.sub(r"^encoder\.lm_head\.", "lm_head.", name)
        name = re.sub(r"^encoder\.layernorm_embedding\.", "encoder.emb_layer_norm.", name)
        name = re.sub(r"^encoder\.layernorm_porjected_embedding\.", "encoder.proj_emb_layer_norm.", name)
        out[name] = t.float().contiguous()
    return out


def drop_copies(t):
    """Shared matrices are saved once under each of their names."""
    for copy, first in (("decoder.output_projection.weight", "decoder.embed_tokens.weight"),
                        ("decoder.embed_tokens.weight", "encoder.embed_tokens.weight"),
                        ("lm_head.weight", "encoder.embed_tokens.weight")):
        shared = "decoder.output_projection.weight" not in t if copy == "decoder.embed_tokens.weight" else True
        if shared and copy in t and first in t and torch.equal(t[copy], t[first]):
            del t[copy]


# ---- the configuration -----------------------------------------------------------------------------------------------

def configuration(t, args, flags):
    """-> what goes into __metadata__, numbers by name"""
    def ask(flag, default, *names):  # a flag, else the checkpoint's argument of one of these names, else the default
        if getattr(flags, flag, None) is not None:
            return getattr(flags, flag)
        for name in names:
            if args.get(name) is not None:
                return args[name]
        if default is None:
            name = flag.replace("_", "-")
            refuse("the checkpoint does not say its %s; give --%s" % (name, name))
        return default

    def size(name, axis):
        if name not in t:
            refuse("%s is missing, so this is no Luna checkpoint of the authors' translation, masked language or LRA "
                   "text models" % name)
        return t[name].shape[axis]

    def layers(side):
        return len({name.split(".")[2] for name in t if name.startswith(side + ".layers.")})

    seq2seq, masked = "decoder.layers.0.fc1.weight" in t, "lm_head.dense.weight" in t
    dim, first = size("encoder.embed_tokens.weight", 1), flags.padding + 1
    if "encoder.embed_tokens.bias" in t:
        refuse("this model embeds pixels by a linear layer, but luna.h reads tokens")
    learned, positions = "encoder.embed_positions.weight" in t, not args.get("no_token_positional_embeddings")
    heads = ask("heads", None, "encoder_attention_heads")
    activation = ask("activation", "relu" if seq2seq else "gelu", "activation_fn")
    if activation not in ("relu", "gelu"):
        refuse("luna.h has no feed-forward with %s, only relu and gelu" % activation)
    tied = bool(args.get("tie_layer_weights")) if flags.layers is None else flags.layers > layers("encoder") == 1
    c = {
        "vocab": size("encoder.embed_tokens.weight", 0), "dim": dim, "memory": size("encoder.projected_embeddings", 0),
        "layers": ask("layers", layers("encoder"), "encoder_layers") if tied else layers("encoder"),
        "heads": heads,
        "pack_heads": ask("pack_heads", heads, *(["encoder_projected_attention_heads"] if seq2seq else [])),
        "ffn": size("encoder.layers.0.fc1.weight", 0),
        "sharing": 0 if "encoder.layers.0.self_attn.pc_proj.weight" in t else 1,
        "activation": {"relu": 1, "gelu": 2}[activation], "omega": {"softplus2": 5, "elu1": 3}[flags.omega],
        "pre_norm": int("encoder.layer_norm.weight" in t), "positions": 3 if learned else 2 if positions else 1,
        "max_length": size("encoder.embed_positions.weight", 0) - first if learned
                      else ask("max_length", 512, "max_source_positions", "max_positions"),
        "first_position": first, "embedding_scale": (1 if args.get("no_scale_embedding") else 2) if seq2seq else 0,
        "norm_embedding": int("encoder.emb_layer_norm.weight" in t), "tied_layers": int(tied),
        "keep_padding": int(seq2seq),
    }
    for name, theirs in (("dropout", "dropout"), ("attention_dropout", "attention_dropout"),
                         ("activation_dropout", "act_dropout")):
        c[name] = round(1e9 * float(args.get(name) or args.get(theirs) or 0))  # luna.h keeps billionths
    if args.get("fix_projection_length"):
        print("note: The model was trained with --fix-projection-length. luna.h uses no more memory slots than the "
              "longest sequence has tokens.")
    if seq2seq:
        for mine, theirs in (("encoder_attention_heads", "decoder_attention_heads"),
                             ("encoder_projected_attention_heads", "decoder_projected_attention_heads"),
                             ("encoder_normalize_before", "decoder_normalize_before"),
                             ("encoder_learned_pos", "decoder_learned_pos")):
            if args.get(theirs) is not None and args.get(mine) is not None and args[mine] != args[theirs]:
                refuse("encoder and decoder differ in %s and %s; in luna.h they must be alike" % (mine, theirs))
        if any("decoder.%s.weight" % n in t for n in ("layernorm_embedding", "project_in_dim", "project_out_dim")):
            refuse("the decoder has a norm or a projection on its embedding; luna.h has neither")
        target = "decoder.embed_tokens.weight" if "decoder.embed_tokens.weight" in t else "encoder.embed_tokens.weight"
        c.update(kind="seq2seq", target_vocab=size(target, 0), decoder_layers=layers("decoder"),
                 share_embeddings=int(target[0] == "e"),
                 separate_output=int("decoder.output_projection.weight" in t),
                 max_target_length=size("decoder.embed_positions.weight", 0) - first if learned
                                   else ask("max_length", 512, "max_target_positions"))
    elif masked:
        if "lm_head.weight" in t or activation != "gelu":
            refuse("the masked language model of luna.h shares its output with the embedding and has gelu; this one "
                   "does not")
        c.update(kind="masked_lm")
    else:
        if any(name.startswith("classifier.") for name in t):
            refuse("this is an LRA model of an early form, with several classifier layers; luna.h has the later one, "
                   "pre_logits")
        features = size("pre_logits.0.weight" if "pre_logits.0.weight" in t else "sentence_projection_layer.weight", 1)
        theirs = "mean" if args.get("sen_rep_type") == "mp" else "cls"
        pooling = ask("pooling", "memory_batch" if args.get("use_p") else theirs)
        c.update(kind="classifier", classes=size("sentence_projection_layer.weight", 0), pooling=POOLING[pooling],
                 pair=int(features == 4 * dim),
                 pre_logits=size("pre_logits.0.weight", 0) if "pre_logits.0.weight" in t else 0)
    return c


def expected(c):
    """-> the name and shape of every tensor that such a model has"""
    d, shapes = c["dim"], {}

    def linear(name, outs, ins): shapes.update({name + ".weight": (outs, ins), name + ".bias": (outs,)})

    def norm(name): shapes.update({name + ".weight": (d,), name + ".bias": (d,)})

    def attention(name, causal):
        shared = ["pc", "c"] if c["sharing"] == 0 else ["pc", "k", "v"] if causal else ["pk", "pv", "k", "v"]
        for part in ["pq", "q", "out"] + shared:
            linear("%s.%s_proj" % (name, part), d, d)

    def stack(side, count):
        for i in range(count):
            layer = "%s.layers.%d." % (side, i)
            attention(layer + "self_attn", side == "decoder")
            norms = ["self_attn_layer_norm", "final_layer_norm"]
            if side == "decoder":
                attention(layer + "encoder_attn", False)
                norms += ["encoder_attn_layer_norm", "encoder_atten_proj_layer_norm"]
            else:
                norms += ["self_atten_proj_layer_norm"]
            for name in norms:
                norm(layer + name)
            linear(layer + "fc1", c["ffn"], d)
            linear(layer + "fc2", d, c["ffn"])
        for name in ["layer_norm", "proj_layer_norm"] if c["pre_norm"] else []:
            norm(side + "." + name)

    shapes["encoder.embed_tokens.weight"] = (c["vocab"], d)
    shapes["encoder.projected_embeddings"] = (c["memory"], d)
    if c["positions"] == 3:
        shapes["encoder.embed_positions.weight"] = (c["first_position"] + c["max_length"], d)
    for name in ["emb_layer_norm", "proj_emb_layer_norm"] if c["norm_embedding"] else []:
        norm("encoder." + name)
    stack("encoder", 1 if c["tied_layers"] else c["layers"])
    if c["kind"] == "seq2seq":
        stack("decoder", c["decoder_layers"])
        if not c["share_embeddings"]:
            shapes["decoder.embed_tokens.weight"] = (c["target_vocab"], d)
        if c["separate_output"]:
            shapes["decoder.output_projection.weight"] = (c["target_vocab"], d)
        if c["positions"] == 3:
            shapes["decoder.embed_positions.weight"] = (c["first_position"] + c["max_target_length"], d)
    elif c["kind"] == "masked_lm":
        linear("lm_head.dense", d, d)
        norm("lm_head.layer_norm")
        shapes["lm_head.bias"] = (c["vocab"],)
    else:
        features = 4 * d if c["pair"] else d
        if c["pre_logits"]:
            linear("pre_logits.0", c["pre_logits"], features)
        shapes["sentence_projection_layer.weight"] = (c["classes"], c["pre_logits"] or features)
    return shapes


# ---- writing ---------------------------------------------------------------------------------------------------------

def write(path, tensors, metadata):
    """safetensors: the header's length, the header, the numbers. An old file stays until the new one is whole."""
    header, at = {"__metadata__": metadata}, 0
    for name, t in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(t.shape), "data_offsets": [at, at + 4 * t.numel()]}
        at += 4 * t.numel()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path = os.path.realpath(path)                         # a link stays one
    old = os.stat(path) if os.path.exists(path) else None
    beside = os.path.join(os.path.dirname(path), ".convert_fairseq-%d.tmp" % os.getpid())
    if old and not os.path.isfile(path):
        beside = path                                     # a pipe or a device has nothing to lose
    try:
        with open(beside, "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for t in tensors.values():
                file.write(t.numpy().astype("<f4").tobytes())
        if beside != path:
            if old:
                os.chmod(beside, old.st_mode)
            os.replace(beside, path)
    except BaseException:
        if beside != path and os.path.exists(beside):
            os.remove(beside)
        raise


def main():
    parser = argparse.ArgumentParser(prog="convert_fairseq", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="The file to read.")
    parser.add_argument("out", help="The safetensors file to write.")
    for name, what in (("heads", "the number of attention heads"), ("pack-heads", "the number of heads of the pack"),
                       ("layers", "the number of layers"), ("max-length", "the most tokens of a sequence")):
        parser.add_argument("--" + name, type=int, metavar="N", help="Sets %s to N." % what)
    parser.add_argument("--pooling", choices=POOLING,
                        help="Chooses what the class is predicted from. memory_batch is the authors' --use-p.")
    parser.add_argument("--activation", choices=("relu", "gelu"), help="Chooses the activation of the feed-forward.")
    parser.add_argument("--omega", choices=("softplus2", "elu1"), default="softplus2",
                        help="Chooses omega of causal attention. elu1 is for the authors' code before September 2021.")
    parser.add_argument("--padding", type=int, default=1, metavar="N", help="Makes N the index of the padding token.")
    parser.format_help = lambda of=parser.format_help: EXAMPLE + of()
    flags = parser.parse_args()
    if torch is None:
        sys.exit("convert_fairseq: PyTorch is missing; pip install torch numpy installs it")

    tensors, args = read(flags.checkpoint)
    tensors = rename(tensors)
    drop_copies(tensors)
    c = configuration(tensors, args, flags)
    shapes = expected(c)
    for name, shape in shapes.items():
        if name not in tensors:
            refuse("%s is missing from %s" % (name, flags.checkpoint))
        if tuple(tensors[name].shape) != shape:
            refuse("%s has the shape %s, not %s" % (name, list(tensors[name].shape), list(shape)))
    for name in tensors:
        if name not in shapes:
            print("%s %s is left out, as luna.h does not have it." % (name, list(tensors[name].shape)))
    try:
        write(flags.out, {name: tensors[name] for name in shapes},
              {"luna." + key: str(value) for key, value in c.items()})
    except OSError as error:
        refuse("cannot write %s: %s" % (flags.out, error.strerror))
    fields = ", ".join("%s %s" % (key, value) for key, value in c.items() if key != "kind")
    print("%s: %s, %d tensors, %d parameters; %s"
          % (flags.out, c["kind"], len(shapes), sum(tensors[name].numel() for name in shapes), fields))


if __name__ == "__main__":
    main()
