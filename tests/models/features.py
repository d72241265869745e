#!/usr/bin/env python3
"""Writes tests/data/features/*.safetensors: models of features in float64 NumPy, for tests/models/features.c to compare
with.

    python3 tests/models/features.py [FOLDER]          needs numpy and autograd

A file is a checkpoint as luna_save writes it, with tensors more, which luna_load_model skips by their names:
luna.test.features [batch, n, k] with NaN among them and in the padding, luna.test.lengths, what the loss compares with,
luna.test.labels or luna.test.targets, and the results: luna.test.output, luna.test.loss, luna.test.grad.NAME. The pair
test.loss says which loss. The equations are those of README.md and the paper, written out once more and not from
luna.h's code.
"""
import json
import math
import os
import struct
import sys

import autograd.numpy as np
import numpy
from autograd import grad
from autograd.extend import defvjp, primitive

B, N, K, D, H, L, FFN = 3, 7, 3, 8, 2, 4, 12
LENGTHS = numpy.array([7, 2, 5], numpy.int32)
RELU, GELU, SOFTPLUS2, SILU = 1, 2, 5, 7
NONE, SINUSOIDAL = 1, 2
POOL_MEAN, POOL_MEMORY = 2, 3
ENCODER = dict(vocab=256, layers=2, dim=D, heads=H, pack_heads=H, ffn=FFN, memory=L, activation=RELU, omega=0,
               positions=SINUSOIDAL,
               max_length=512, embedding_scale=2, features=K)
CAUSAL = dict(vocab=256, layers=2, dim=D, heads=H, ffn=FFN, memory=L, activation=RELU, omega=SOFTPLUS2, positions=NONE,
              max_length=512,
              features=K)
CASES = [
    ("classes", "classifier", dict(ENCODER, classes=4, pooling=POOL_MEMORY), "cross_entropy"),
    ("step_values", "classifier", dict(ENCODER, classes=2, pooling=POOL_MEMORY, per_step=1, pre_norm=1, activation=GELU,
                                       pre_logits=6,
                                       sharing=1), "mse"),
    ("yes_or_no", "classifier", dict(ENCODER, classes=3, pooling=POOL_MEAN, positions=NONE, embedding_scale=1),
     "binary_cross_entropy"),
    ("step_classes", "causal_lm", dict(CAUSAL, outputs=2, convolution=4, pre_norm=1), "cross_entropy"),
    ("forecast", "causal_lm", dict(CAUSAL, outputs=K, positions=SINUSOIDAL), "huber 0.7"),
    ("rms_classes", "classifier", dict(ENCODER, classes=4, pooling=POOL_MEMORY, norm=1), "cross_entropy"),
    ("rms_steps", "causal_lm", dict(CAUSAL, outputs=2, pre_norm=1, norm=1, gated=1, activation=SILU), "cross_entropy"),
]

erf = primitive(numpy.vectorize(math.erf))
defvjp(erf, lambda ans, x: lambda g: g * 2 / math.sqrt(math.pi) * np.exp(-x * x))


def linear(x, t, name):
    return np.dot(x, t[name + ".weight"].T) + (t[name + ".bias"] if name + ".bias" in t else 0)


def norm(x, t, name):  # without a bias: RMS norm
    bias = t.get(name + ".bias")
    x = x if bias is None else x - np.mean(x, -1, keepdims=True)
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + 1e-5) * t[name + ".weight"] + (0 if bias is None else bias)


def heads(x):
    return np.transpose(np.reshape(x, (x.shape[0], x.shape[1], H, -1)), (0, 2, 1, 3))


def together(x):
    return np.reshape(np.transpose(x, (0, 2, 1, 3)), (x.shape[0], x.shape[2], -1))


def softmax(s):
    e = np.exp(s - np.max(s, -1, keepdims=True))
    return e / np.sum(e, -1, keepdims=True)


def attention(q, k, v):  # the keys that count: the first LENGTHS[b]
    masked = (numpy.arange(k.shape[1]) >= LENGTHS[:, None])[:, None, None, :]
    scores = np.matmul(heads(q), np.swapaxes(heads(k), 2, 3)) / math.sqrt(D // H)
    return together(np.matmul(softmax(np.where(masked, -1e30, scores)), heads(v)))


def luna(x, p, t, name):
    tied = name + "pc_proj.weight" in t
    packed = attention(linear(p, t, name + "pq_proj"), linear(x, t, name + ("pc_proj" if tied else "pk_proj")),
                       linear(x, t, name + ("pc_proj" if tied else "pv_proj")))
    y = attention(linear(x, t, name + "q_proj"), linear(packed, t, name + ("c_proj" if tied else "k_proj")),
                  linear(packed, t, name + ("c_proj" if tied else "v_proj")))
    return linear(y, t, name + "out_proj"), packed


def causal_product(x, y, z):
    sums = np.cumsum(y[..., :, None] * z[..., None, :], axis=2)
    return np.sum(x[..., :, None] * sums, 3) / numpy.arange(1, N + 1)[:, None]


def causal(x, p, t, name):
    scale = 1 / math.sqrt(D // H)
    pq = heads(linear(p[None], t, name + "pq_proj")) * scale
    a = np.log(1 + 2 ** np.matmul(heads(linear(x, t, name + "pc_proj")), np.swapaxes(pq, 2, 3))) / math.log(2)
    kv = heads(linear(x, t, name + "c_proj"))
    w = softmax(causal_product(heads(linear(x, t, name + "q_proj")) * scale, kv, a))
    return linear(together(causal_product(w, a, kv)), t, name + "out_proj")


def activated(x, c):
    if c["activation"] == SILU:
        return x / (1 + np.exp(-x))
    return np.maximum(x, 0) if c["activation"] == RELU else 0.5 * x * (1 + erf(x / math.sqrt(2)))


def rest(x, t, c, name):
    y = norm(x, t, name + "final_layer_norm") if c.get("pre_norm") else x
    hidden = activated(linear(y, t, name + "fc1"), c)
    x = x + linear(hidden * linear(y, t, name + "fc3") if c.get("gated") else hidden, t, name + "fc2")
    return x if c.get("pre_norm") else norm(x, t, name + "final_layer_norm")


def sinusoids(n):
    turns = numpy.exp(numpy.arange(D // 2) * -math.log(10000) / (D // 2 - 1)).astype(numpy.float32)
    angles = numpy.arange(n)[:, None] * turns
    return numpy.concatenate([numpy.sin(angles), numpy.cos(angles)], 1)


def embedded(t, c, prefix, features):
    real = (numpy.arange(N) < LENGTHS[:, None])[:, :, None] & ~numpy.isnan(features)
    x = numpy.where(real, features, 0) - t[prefix + "input_norm.mean"]
    x = np.where(real, x * t[prefix + "input_norm.scale"], 0)
    x = linear(x, t, prefix + "input_proj")
    return x + sinusoids(N) if c["positions"] == SINUSOIDAL else x


def classifier(t, c, features):
    scale = math.sqrt(D) if c["embedding_scale"] == 2 else 1
    p = scale * t["encoder.projected_embeddings"] + (sinusoids(L) if c["positions"] == SINUSOIDAL else 0)
    slots = (numpy.arange(L) < LENGTHS[:, None])[:, :, None]
    steps = (numpy.arange(N) < LENGTHS[:, None])[:, :, None]
    x, p = embedded(t, c, "encoder.", features) * steps, p[None] * slots
    for i in range(c["layers"]):
        name = "encoder.layers.%d." % i
        if c.get("pre_norm"):
            y, packed = luna(norm(x, t, name + "self_attn_layer_norm"), norm(p, t, name + "self_atten_proj_layer_norm"),
                             t, name + "self_attn.")
            x, p = x + y, p + packed
        else:
            y, packed = luna(x, p, t, name + "self_attn.")
            x = norm(x + y, t, name + "self_attn_layer_norm")
            p = norm(p + packed, t, name + "self_atten_proj_layer_norm")
        x = rest(x, t, c, name)
    if c.get("pre_norm"):
        x, p = norm(x, t, "encoder.layer_norm"), norm(p, t, "encoder.proj_layer_norm")
    if c.get("per_step"):
        x = x * steps
    elif c["pooling"] == POOL_MEAN:
        x = np.sum(x * steps, 1) / LENGTHS[:, None]
    else:
        x = np.sum(p * slots, 1) / numpy.minimum(LENGTHS, L)[:, None]
    if c.get("pre_logits"):
        x = activated(linear(x, t, "pre_logits.0"), dict(activation=GELU))
    return linear(x, t, "sentence_projection_layer")


def causal_lm(t, c, features):
    x = embedded(t, c, "", features)
    for i in range(c["layers"]):
        name = "layers.%d." % i
        y = norm(x, t, name + "self_attn_layer_norm") if c.get("pre_norm") else x
        if c.get("convolution"):
            width = c["convolution"]
            padded = np.concatenate([numpy.zeros((B, width - 1, D)), y], 1)
            y = sum(padded[:, j:j + N] * t[name + "conv.weight"][:, j] for j in range(width)) + t[name + "conv.bias"]
        x = x + causal(y, t[name + "projected_embeddings"], t, name + "self_attn.")
        if not c.get("pre_norm"):
            x = norm(x, t, name + "self_attn_layer_norm")
        x = rest(x, t, c, name)
    return linear(norm(x, t, "layer_norm") if c.get("pre_norm") else x, t, "output_projection")


def loss_of(kind, y, wanted):
    if kind == "cross_entropy":
        rows, counts = np.reshape(y, (-1, y.shape[-1])), wanted.reshape(-1) >= 0
        chosen = np.log(softmax(rows))[numpy.arange(len(rows)), numpy.where(counts, wanted.reshape(-1), 0)]
        return -np.sum(chosen * counts) / counts.sum()
    there = ~numpy.isnan(wanted)
    target = numpy.where(there, wanted, 0)
    if kind == "binary_cross_entropy":
        each = np.logaddexp(0, y) - target * y
    elif kind == "mse":
        each = (y - target) ** 2
    else:
        delta = float(numpy.float32(kind.split()[1]))
        e = np.abs(y - target)
        each = np.where(e <= delta, e * e / 2, delta * (e - delta / 2))
    return np.sum(np.where(there, each, 0)) / there.sum()


def shapes(kind, c):
    prefix = "encoder." if kind == "classifier" else ""
    s = {prefix + "input_norm.mean": [K], prefix + "input_norm.scale": [K]}

    def matrix(name, out, inside, bias=True):
        s[name + ".weight"] = [out, inside]
        if bias:
            s[name + ".bias"] = [out]

    def normed(name):
        s[name + ".weight"] = [D]
        if not c.get("norm"):
            s[name + ".bias"] = [D]

    matrix(prefix + "input_proj", D, K)
    if kind == "classifier":
        s["encoder.projected_embeddings"] = [L, D]
    for i in range(c["layers"]):
        name = prefix + "layers.%d." % i
        if kind == "causal_lm":
            s[name + "projected_embeddings"] = [L, D]
            projections = ["pq", "pc", "q", "c", "out"]
        else:
            own = ["pq", "pk", "pv", "q", "k", "v", "out"]
            projections = own if c.get("sharing") else ["pq", "pc", "q", "c", "out"]
        for p in projections:
            matrix(name + "self_attn.%s_proj" % p, D, D)
        if c.get("convolution"):
            s[name + "conv.weight"], s[name + "conv.bias"] = [D, c["convolution"]], [D]
        normed(name + "self_attn_layer_norm")
        normed(name + "final_layer_norm")
        if kind == "classifier":
            normed(name + "self_atten_proj_layer_norm")
        matrix(name + "fc1", FFN, D)
        matrix(name + "fc2", D, FFN)
        if c.get("gated"):
            matrix(name + "fc3", FFN, D)
    if c.get("pre_norm"):
        normed(prefix + "layer_norm")
        if kind == "classifier":
            normed(prefix + "proj_layer_norm")
    if kind == "causal_lm":
        matrix("output_projection", c["outputs"], D)
        return s
    if c.get("pre_logits"):
        matrix("pre_logits.0", c["pre_logits"], D)
    matrix("sentence_projection_layer", c["classes"], c.get("pre_logits") or D, False)
    return s


def write(path, metadata, tensors):
    header, blob = {"__metadata__": metadata}, b""
    for name, value in tensors.items():
        data = numpy.ascontiguousarray(value).astype("<i4" if value.dtype == numpy.int32 else "<f4").tobytes()
        header[name] = dict(dtype="I32" if value.dtype == numpy.int32 else "F32", shape=list(value.shape),
                            data_offsets=[len(blob), len(blob) + len(data)])
        blob += data
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + blob)


def main():
    own = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "data", "features")
    folder = sys.argv[1] if len(sys.argv) > 1 else own
    os.makedirs(folder, exist_ok=True)
    for seed, (name, kind, c, loss) in enumerate(CASES):
        random = numpy.random.RandomState(seed + 1)
        rounded = lambda x: numpy.asarray(x, numpy.float32).astype(numpy.float64)
        t = {}
        for key, shape in shapes(kind, c).items():
            scale = 0.5 if len(shape) == 1 else 1 / math.sqrt(shape[-1])
            if kind == "causal_lm" and key.endswith(("q_proj.weight", "pc_proj.weight", ".c_proj.weight")):
                scale *= 3  # or attention is so even that the gradients of its queries are rounding noise
            one = key.endswith("norm.weight") or key.endswith("input_norm.scale")
            t[key] = rounded(random.uniform(0.5, 1.5, shape) if one else scale * random.standard_normal(shape))
        features = rounded(random.standard_normal((B, N, K)) * 2 + 0.5)
        features[random.rand(B, N, K) < 0.1] = numpy.nan
        features[1, 2:] = numpy.nan
        features[2, 5:] = 1e30
        model = classifier if kind == "classifier" else causal_lm
        y = model(t, c, features)
        if loss == "cross_entropy":
            wanted = random.randint(0, y.shape[-1], y.shape[:-1]).astype(numpy.int32)
            if y.ndim == 3:
                wanted[numpy.arange(N) >= LENGTHS[:, None]] = -1
        else:
            wanted = rounded(random.rand(*y.shape) if loss.startswith("binary") else random.standard_normal(y.shape))
            wanted[0, 1] = numpy.nan
            if y.ndim == 3:
                wanted[numpy.arange(N) >= LENGTHS[:, None]] = numpy.nan
        value = lambda weights: loss_of(loss, model(weights, c, features), wanted)
        gradients = grad(value)(t)
        extra = {"features": features, "lengths": LENGTHS, "labels" if loss == "cross_entropy" else "targets": wanted,
                 "output": y,
                 "loss": numpy.array([value(t)])}
        tensors = dict(t)
        tensors.update(("luna.test." + key, v) for key, v in extra.items())
        tensors.update(("luna.test.grad." + key, v) for key, v in gradients.items() if "input_norm" not in key)
        metadata = {"luna." + key: str(v) for key, v in c.items()}
        metadata.update({"luna.kind": kind, "test.loss": loss})
        write(os.path.join(folder, name + ".safetensors"), metadata, tensors)


main()
