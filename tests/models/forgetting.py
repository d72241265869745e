#!/usr/bin/env python3
"""Writes tests/data/memory/*.safetensors: causal Luna attention with a horizon, with a memory that forgets, with a
routed memory and with an output gate, in float64, for tests/models/forgetting.c to compare with.

    python3 tests/models/forgetting.py [FOLDER [NAME...]]            needs numpy and torch

With names, only these files are written. There are two kinds of files. An op's (luna.test.op in its metadata): inputs
q, k, v, s, gates, lengths and grad_out, results y and the gradients of sum(grad_out y) as grad.NAME; in a routed memory
s holds w and gates the fade of each head. routed_route is luna_route's: router, strength, grad_out, w, grad.NAME. A
model's: NAME.safetensors, a checkpoint as luna_save writes it, and
NAME.expected.safetensors with tokens, labels, logits, the mean cross-entropy as loss, its gradients as grad.NAME and,
for one of them, the same of its last rows after a state carried in: carried.logits, carried.loss, carried.grad.NAME.

Everything is computed twice, in two forms. NumPy follows the definition: a slot's memory at row t is the weighted sum
of all rows up to t, each with its own weight. Torch follows the recurrence, a state that each row changes; its autograd
gives the gradients. main() holds the outputs of both and, by differences of NumPy's loss, the gradients together, and
a sequence in two parts, with the state carried over, against the whole. In a routed memory the selection of slots and
the set of empty slots are constants, so the gradient of w is 0 where w is. Nothing lies within 1e-3 of either edge.
"""
import json
import math
import os
import struct
import sys

import numpy
import torch

ELU1, SOFTPLUS, SOFTPLUS2, SILU = 3, 4, 5, 7
NO_POSITIONS, SINUSOIDAL = 1, 2
NONE, CONSTANT, GATED, ROUTED = 0, 1, 2, 3
SOFTMAX = 1
CUT = 37  # rows before the state that is carried
EMPTY = math.log(2.0 ** -86 / 1.2664165549094176e-14)  # a routed memory's slot is empty while ln z is below it
edge = dict(gap=math.inf)  # the least distance from an edge of selection or of emptiness since it was reset


def lib(x):
    return torch if isinstance(x, torch.Tensor) else numpy


# ---- what both forms read alike ----
def omega_of(c, s):  # weights of the published form
    np = lib(s)
    if c["omega"] == ELU1:
        return np.where(s > 0, s + 1, np.exp(np.minimum(s, 0 * s)))
    base = math.log(2) if c["omega"] == SOFTPLUS2 else 1
    return np.logaddexp(s * base, 0 * s) / base


def log_weights(s):
    return lib(s).clip(s, -15, 15)


def log_gates(gates):
    np = lib(gates)
    logsigmoid = -np.logaddexp(-gates, 0 * gates)
    return np.maximum(logsigmoid / 16, 0 * gates - 1)


def fades(fade):  # [heads] -> lambda of each head
    return 1 / (1 + lib(fade).exp(-fade)) / 4


def near(gap):
    edge["gap"] = min(edge["gap"], numpy.min(gap, initial=math.inf))


def selection(router):  # the two largest of the last axis; of equal ones the lower index comes first
    router = router.detach().numpy() if lib(router) is torch else router
    order = numpy.argsort(-router, -1, kind="stable")
    ordered = numpy.take_along_axis(router, order, -1)
    gap = ordered[..., 1] - ordered[..., 2] if router.shape[-1] > 2 else numpy.zeros(0)
    near(gap[gap > 0])
    chosen = numpy.zeros(router.shape)
    numpy.put_along_axis(chosen, order[..., :2], 1, -1)
    return chosen


def route(c, router, strength, chosen=None):  # -> w [batch, n, heads * slots]
    np, router, strength = lib(router), split(router, c["heads"]), split(strength, c["heads"])
    chosen = selection(router) if chosen is None else chosen
    share = (torch.tensor(chosen) if np is torch else chosen) / (1 + np.exp(-router))
    share = share / share.sum(-1)[..., None]
    return merge(-np.expm1(-share / (1 + np.exp(-strength.clip(-15, 15)))))


def split(x, heads):  # [batch, n, heads * width] -> [batch, heads, n, width]
    return lib(x).swapaxes(x.reshape(x.shape[0], x.shape[1], heads, -1), 1, 2)


def merge(x):
    return lib(x).swapaxes(x, 1, 2).reshape(x.shape[0], x.shape[2], -1)


# ---- attention by its definition: NumPy ----
def share(c, t, j):  # of row j in the mean after t rows, both from 1
    if not c["horizon"] or t <= c["horizon"]:
        return 1 / t
    return (1 - 1 / c["horizon"]) ** (t - max(j, c["horizon"])) / c["horizon"]


def published_rows(c, s, before):  # s [n] -> of each of its rows what those up to it weigh, [n, 1 + n]; first the state
    n, start = len(s), before["t"] if before else 0
    counted = min(start, c["horizon"] or start)
    a = numpy.zeros((n, 1 + n))
    for t in range(n):
        a[t, 0] = counted and counted * share(c, start + t + 1, start)
        a[t, 1:t + 2] = [share(c, start + t + 1, start + j + 1) for j in range(t + 1)]
    return a * numpy.concatenate([[1], omega_of(c, s)])


def forgetting_rows(s, gates, log_z):  # logarithms of weights and gates -> the same of weights that add up to 1, and
    sums = numpy.cumsum(gates)         # the logarithm of what they came from, row by row
    logs = sums[:, None] + numpy.concatenate([[log_z], s - sums])
    logs[numpy.arange(len(s))[:, None] < numpy.arange(1 + len(s)) - 1] = -numpy.inf
    total = numpy.logaddexp.reduce(logs, 1)
    written = total > -numpy.inf
    return written[:, None] * numpy.exp(logs - numpy.where(written, total, 0)[:, None]), total


def definition(c, q, k, v, s, gates=None, lengths=None, before=None):
    heads, slots = c["heads"], s.shape[-1] // c["heads"]
    q, k, v, s = (split(x, heads) for x in (q, k, v, s))
    batch, _, n, width = q.shape
    if c["forget"] == ROUTED:
        with numpy.errstate(divide="ignore"):
            logs, gates = numpy.log(s), numpy.log1p(-s) - fades(gates)[:, None, None]
    elif c["forget"]:
        logs, gates = log_weights(s), log_gates(split(gates, heads))
    y = numpy.zeros(q.shape)
    after = dict(t=n + (before["t"] if before else 0), log_z=numpy.zeros((batch, heads, slots)),
                 k=numpy.zeros((batch, heads, slots, width)), v=numpy.zeros((batch, heads, slots, width)))
    for b in range(batch):
        real = slots if lengths is None else min(slots, lengths[b])
        for h in range(heads):
            u, values = numpy.zeros((n, real)), numpy.zeros((n, real, width))
            for i in range(real):
                at = b, h, i
                if c["forget"]:
                    rows, log_z = forgetting_rows(logs[b, h, :, i], gates[b, h, :, i],
                                                  before["log_z"][at] if before else -numpy.inf)
                    after["log_z"][at] = log_z[-1]
                else:
                    rows = published_rows(c, s[b, h, :, i], before)
                old = [before[name][at] if before else numpy.zeros(width) for name in ("k", "v")]
                keys = rows @ numpy.concatenate([old[:1], k[b, h]])
                values[:, i] = rows @ numpy.concatenate([old[1:], v[b, h]])
                u[:, i] = numpy.sum(q[b, h] * keys, 1) / math.sqrt(width)
                if c["forget"] == ROUTED:
                    near(abs(log_z - EMPTY))
                    u[:, i] = numpy.where(log_z >= EMPTY, u[:, i] + log_z, -1e300)
                after["k"][at], after["v"][at] = keys[-1], values[-1, i]
            if real:
                p = numpy.exp(u - u.max(1, keepdims=True)) * (u > -1e300)
                y[b, h] = numpy.sum((p / p.sum(1, keepdims=True))[:, :, None] * values, 1)
    return merge(y), after


# ---- attention as a recurrence: torch ----
def recurrence(c, q, k, v, s, gates=None, lengths=None, before=None):
    heads, slots = c["heads"], s.shape[-1] // c["heads"]
    q, k, v, s = (split(x, heads) for x in (q, k, v, s))
    batch, _, n, width = q.shape
    real = torch.ones(batch, 1, slots, dtype=torch.bool)
    if lengths is not None:
        real = (torch.arange(slots) < torch.tensor(lengths)[:, None])[:, None]
    kept = None
    if c["forget"] == ROUTED:
        weight, kept = s, (1 - s) * (-fades(gates)).exp()[:, None, None]
    elif c["forget"]:
        weight, kept = log_weights(s).exp(), log_gates(split(gates, heads)).exp()
    else:
        weight = omega_of(c, s)
    t, z = 0, q.new_zeros(batch, heads, slots)
    keys = values = q.new_zeros(batch, heads, slots, width)
    if before:
        t, z, keys, values = before["t"], before["z"], before["k"], before["v"]
    y = []
    for i in range(n):
        t += 1
        if c["forget"]:
            z = kept[:, :, i] * z + weight[:, :, i]
            add = weight[:, :, i] / (torch.where(z > 0, z, 1) if c["forget"] == ROUTED else z)
            keep = 1 - add
        else:
            count = min(t, c["horizon"] or t)
            keep, add = torch.full_like(z, 1 - 1 / count), weight[:, :, i] / count
        keys = keep[..., None] * keys + add[..., None] * k[:, :, i, None]
        values = keep[..., None] * values + add[..., None] * v[:, :, i, None]
        u = torch.sum(q[:, :, i, None] * keys, -1) / math.sqrt(width)
        seen = real
        if c["forget"] == ROUTED:
            seen = real & (z >= math.exp(EMPTY))
            u = u + torch.log(torch.where(seen, z, 1))
        p = torch.softmax(torch.where(seen, u, -1e30), -1) * seen
        y.append(torch.sum(p[..., None] * values, 2))
    return merge(torch.stack(y, 2)), dict(t=t, z=z.detach(), k=keys.detach(), v=values.detach())


# ---- the language model around it ----
def linear(x, t, name):
    return x @ t[name + ".weight"].T + t[name + ".bias"]


def norm(x, t, name):  # without a bias: RMS norm
    bias = t.get(name + ".bias")
    x = x if bias is None else x - x.mean(-1)[..., None]
    return x / lib(x).sqrt((x * x).mean(-1)[..., None] + 1e-5) * t[name + ".weight"] + (0 if bias is None else bias)


def silu(x):
    return x / (1 + lib(x).exp(-x))


def softmax_attention(c, q, k, v):
    np = lib(q)
    q, k, v = (split(x, c["heads"]) for x in (q, k, v))
    scores = q @ np.swapaxes(k, 2, 3) / math.sqrt(q.shape[-1])
    n = scores.shape[-1]
    scores = np.where(np.tril(np.ones((n, n))) > 0, scores, -1e30)
    p = np.exp(scores - np.amax(scores, -1)[..., None])
    return merge(p / p.sum(-1)[..., None] @ v)


def rotary(x, heads):  # pairs (x_i, x_(i + d_h/2)) turned by t 10000^(-2i / d_h)
    np, half = lib(x), x.shape[-1] // heads // 2
    turns = numpy.exp(numpy.arange(half) * -math.log(10000) / half).astype(numpy.float32)
    angles = numpy.arange(x.shape[1])[:, None] * turns
    cos, sin = ((f(angles) if np is numpy else torch.tensor(f(angles))) for f in (numpy.cos, numpy.sin))
    a, b = split(x, heads)[..., :half], split(x, heads)[..., half:]
    return merge(np.concatenate([a * cos - b * sin, b * cos + a * sin], -1))


def attention(c, x, t, name, memory, core, before):
    np = lib(x)
    q, tied = linear(x, t, name + "q_proj"), name + "c_proj.weight" in t
    k = linear(x, t, name + ("c_proj" if tied else "k_proj"))
    v = k if tied else linear(x, t, name + "v_proj")
    if c.get("rotary"):
        q, k = (rotary(x, c["heads"]) for x in (q, k))
    if c["attention"] == SOFTMAX:
        y, after = softmax_attention(c, q, k, v), None
    elif c["forget"] == ROUTED:
        w = route(c, linear(x, t, name + "router_proj"), linear(x, t, name + "strength_proj"))
        y, after = core(c, q, k, v, w, t[name + "fade"], None, before)
    else:
        pq = split(linear(memory[None], t, name + "pq_proj"), c["heads"]) / math.sqrt(x.shape[-1] // c["heads"])
        s = merge(split(linear(x, t, name + "pc_proj"), c["heads"]) @ np.swapaxes(pq, 2, 3))
        gates = None
        if c["forget"] == GATED:
            gates = linear(x, t, name + "forget_proj")
        elif c["forget"] == CONSTANT:
            gates = 0 * s + t[name + "forget_proj.bias"]
        y, after = core(c, q, k, v, s, gates, None, before)
    if c["output_gate"]:
        y = y * silu(linear(x, t, name + "gate_proj"))
    return linear(y, t, name + "out_proj"), after


def convolution(x, t, name, rows):  # rows: those before x
    np, n, width = lib(x), x.shape[1], t[name + "conv.weight"].shape[1]
    rows = 0 * x[:, :1] + np.zeros((1, width - 1, 1)) if rows is None else rows
    rows = np.concatenate([rows, x], 1)
    y = sum(rows[:, i:i + n] * t[name + "conv.weight"][:, i] for i in range(width)) + t[name + "conv.bias"]
    return y, rows[:, n:]


def feed_forward(c, x, t, name):
    hidden = silu(linear(x, t, name + "fc1"))
    return linear(hidden * linear(x, t, name + "fc3") if c["gated"] else hidden, t, name + "fc2")


def sinusoids(first, n, d):
    turns = numpy.exp(numpy.arange(d // 2) * -math.log(10000) / (d // 2 - 1)).astype(numpy.float32)
    angles = numpy.arange(first, first + n)[:, None] * turns
    return numpy.concatenate([numpy.sin(angles), numpy.cos(angles)], 1)


def language_model(c, t, tokens, core, before=None):  # -> logits, the state after
    x = t["embed_tokens.weight"][tokens]
    first = before["first"] if before else 0
    if c["positions"] == SINUSOIDAL:
        positions = sinusoids(first, x.shape[1], c["dim"])
        x = x + (torch.tensor(positions) if lib(x) is torch else positions)
    after = dict(first=first + x.shape[1])
    for i in range(c["layers"]):
        name = "layers.%d." % i
        y = norm(x, t, name + "self_attn_layer_norm") if c["pre_norm"] else x
        if c["convolution"]:
            y, after[name + "conv"] = convolution(y, t, name, before and before[name + "conv"])
        y, after[name] = attention(c, y, t, name + "self_attn.", t.get(name + "projected_embeddings"), core,
                                   before and before[name])
        x = x + y
        if not c["pre_norm"]:
            x = norm(x, t, name + "self_attn_layer_norm")
        y = norm(x, t, name + "final_layer_norm") if c["pre_norm"] else x
        x = x + feed_forward(c, y, t, name)
        if not c["pre_norm"]:
            x = norm(x, t, name + "final_layer_norm")
    return (norm(x, t, "layer_norm") if c["pre_norm"] else x) @ t["embed_tokens.weight"].T, after


def loss_of(logits, labels):
    np = lib(logits)
    logits = logits - np.amax(logits, -1)[..., None]
    logs = logits - np.log(np.exp(logits).sum(-1))[..., None]
    rows = [logs[b, i, labels[b, i]] for b, i in numpy.argwhere(labels >= 0)]
    return -sum(rows) / len(rows)


def shapes(c):
    d, slots, s = c["dim"], c["memory"], {"embed_tokens.weight": [c["vocab"], c["dim"]]}

    def matrix(name, out, inside):
        s[name + ".weight"], s[name + ".bias"] = [out, inside], [out]

    def normed(name):
        s[name + ".weight"] = [d]
        if not c["norm"]:
            s[name + ".bias"] = [d]

    for i in range(c["layers"]):
        name = "layers.%d." % i
        own = name + "self_attn."
        routed = c["forget"] == ROUTED
        luna = c["attention"] != SOFTMAX and not routed
        if luna:
            s[name + "projected_embeddings"] = [slots, d]
        if c["convolution"]:
            s[name + "conv.weight"], s[name + "conv.bias"] = [d, c["convolution"]], [d]
        tied = (luna or routed) and not c["sharing"]
        for p in (["pq", "pc"] if luna else []) + (["q", "c"] if tied else ["q", "k", "v"]):
            matrix(own + p + "_proj", d, d)
        if c["forget"] == GATED:
            matrix(own + "forget_proj", c["heads"] * slots, d)
        elif c["forget"] == CONSTANT:
            s[own + "forget_proj.bias"] = [c["heads"] * slots]
        elif routed:
            matrix(own + "router_proj", c["heads"] * slots, d)
            matrix(own + "strength_proj", c["heads"], d)
            s[own + "fade"] = [c["heads"]]
        if c["output_gate"]:
            matrix(own + "gate_proj", d, d)
        matrix(own + "out_proj", d, d)
        normed(name + "self_attn_layer_norm")
        matrix(name + "fc1", c["ffn"], d)
        matrix(name + "fc2", d, c["ffn"])
        if c["gated"]:
            matrix(name + "fc3", c["ffn"], d)
        normed(name + "final_layer_norm")
    if c["pre_norm"]:
        normed("layer_norm")
    return s


def rounded(x):
    return numpy.asarray(x, numpy.float32).astype(numpy.float64)


def parameters(c, random):
    t = {}
    for name, shape in shapes(c).items():
        values = random.standard_normal(shape)
        if name.endswith("forget_proj.bias"):  # time constants from 4 to 256 rows
            keep = numpy.exp(-16 / numpy.geomspace(4, 256, c["memory"]))
            values = numpy.tile(numpy.log(keep / (1 - keep)), c["heads"])
        elif name.endswith(".fade"):  # time constants from 5 to 32 rows
            values = numpy.log(4 / (numpy.geomspace(5, 32, c["heads"]) - 4))
        elif name.endswith("norm.weight"):
            values = random.uniform(0.5, 1.5, shape)
        elif len(shape) == 1:
            values = 0.3 * values
        elif name.endswith("conv.weight"):
            values = 0.3 * values + (numpy.arange(shape[1]) == shape[1] - 1)
        else:
            sharp = name.endswith(("q_proj.weight", "pc_proj.weight", ".c_proj.weight", "k_proj.weight",
                                   "router_proj.weight"))
            values = values / math.sqrt(shape[-1]) * (2 if sharp or "forget" in name else 1)
        t[name] = rounded(values)
    return t


# ---- the cases ----
# scores: their standard deviation; gates: mean and standard deviation of the logits
OPS = [
    ("one_row", dict(b=2, n=1, d=4, heads=2, slots=3, scores=2, gates=(0, 8))),
    ("lengths", dict(b=5, n=5, d=6, heads=2, slots=3, scores=2, gates=(0, 8), lengths=[3, 0, 1, 7, 2])),
    ("heads", dict(b=1, n=64, d=8, heads=4, slots=2, scores=4, gates=(-10, 12))),
    ("one_slot", dict(b=1, n=65, d=4, heads=2, slots=1, scores=4, gates=(-6, 8))),
    ("tied", dict(b=2, n=65, d=3, heads=1, slots=3, scores=3, gates=(-6, 8), tied=1)),
    ("slots", dict(b=1, n=64, d=5, heads=1, slots=16, scores=3, gates=(-2, 6))),
    ("never", dict(b=1, n=200, d=3, heads=1, slots=2, scores=3, gates=(20, 0))),
    ("seldom", dict(b=1, n=200, d=3, heads=1, slots=2, scores=3, gates=(5, 1.5))),
    ("clamped", dict(b=1, n=65, d=4, heads=2, slots=3, scores=15, gates=(-40, 0))),
    ("edge", dict(b=1, n=200, d=3, heads=1, slots=3, scores=15, gates=(-15.5, 0.3))),
    ("mixed", dict(b=1, n=100, d=4, heads=1, slots=4, scores=12, gates=(-8, 14))),
    ("horizon_1", dict(b=2, n=5, d=4, heads=2, slots=3, scores=3, horizon=1, omega=SOFTPLUS2)),
    ("horizon_2", dict(b=3, n=30, d=2, heads=1, slots=4, scores=3, horizon=2, omega=ELU1, lengths=[4, 1, 3])),
    ("horizon_7", dict(b=1, n=65, d=4, heads=2, slots=3, scores=3, horizon=7, omega=SOFTPLUS, tied=1)),
    ("horizon_64", dict(b=1, n=130, d=4, heads=2, slots=2, scores=3, horizon=64, omega=SOFTPLUS2)),
    ("horizon_100", dict(b=1, n=200, d=3, heads=1, slots=2, scores=3, horizon=100, omega=ELU1)),
    # fades: of each head; used: how many slots of each head the router chooses from; writes: rows that write to some
    # slots alone. In routed_rows the first ones write to one slot; in routed_faded one fades away and is written again.
    ("routed_one_row", dict(b=2, n=1, d=4, heads=2, slots=3, scores=2, fades=[1, -3], used=[3, 3])),
    ("routed_heads", dict(b=1, n=65, d=2, heads=2, slots=3, scores=3, fades=[12, -4], used=[2, 3])),
    ("routed_rows", dict(b=1, n=200, d=1, heads=1, slots=3, scores=3, fades=[-5], used=[3], writes=[(0, 80, [0])],
                         tied=1)),
    ("routed_faded", dict(b=1, n=300, d=1, heads=1, slots=2, fades=[12], tied=1,
                          writes=[(0, 20, [0, 1]), (20, 160, [1]), (160, 300, [0, 1])])),
]
COMMON = dict(vocab=9, layers=1, memory=4, dim=16, heads=2, ffn=16, convolution=0, sharing=0, activation=SILU, gated=0,
              omega=SOFTPLUS2, pre_norm=0, attention=0, positions=NO_POSITIONS, max_length=512, features=0, outputs=0,
              norm=0, forget=NONE, output_gate=0, horizon=0, dropout=0, attention_dropout=0, activation_dropout=0)
MODELS = [
    ("model_gated", dict(COMMON, convolution=4, pre_norm=1, norm=1, gated=1, forget=GATED, output_gate=1)),
    ("model_post_norm", dict(COMMON, layers=2, sharing=1, positions=SINUSOIDAL, forget=GATED)),
    ("model_constant", dict(COMMON, sharing=1, heads=4, convolution=3, pre_norm=1, forget=CONSTANT, output_gate=1)),
    ("model_horizon", dict(COMMON, omega=ELU1, horizon=CUT, output_gate=1)),
    ("model_softmax", dict(COMMON, attention=SOFTMAX, pre_norm=1, output_gate=1)),
    ("model_rotary", dict(COMMON, attention=SOFTMAX, rotary=1, layers=2)),
    ("model_routed", dict(COMMON, dim=6, ffn=6, vocab=4, rows=45, convolution=4, pre_norm=1, norm=1, gated=1,
                          forget=ROUTED, output_gate=1)),
    ("model_routed_full", dict(COMMON, dim=4, ffn=4, vocab=4, rows=45, layers=2, sharing=1, forget=ROUTED)),
]
CARRIED = "model_gated"


def write(path, metadata, tensors):
    header, blob = {"__metadata__": metadata}, b""
    for name, value in tensors.items():
        value = numpy.asarray(value)
        data = numpy.ascontiguousarray(value).astype("<i4" if value.dtype.kind == "i" else "<f4").tobytes()
        header[name] = dict(dtype="I32" if value.dtype.kind == "i" else "F32", shape=list(value.shape),
                            data_offsets=[len(blob), len(blob) + len(data)])
        blob += data
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + blob)


def same(what, a, b, limit):
    a, b = numpy.asarray(a), numpy.asarray(b)
    error = numpy.linalg.norm(a - b) / max(numpy.linalg.norm(b), 1e-12)
    if not error <= limit:
        sys.exit("%s: %.3g apart" % (what, error))


def check_differences(what, loss, t, grads, held=()):  # along a random direction of each array, beside all gradients'
    # size; where one that is held is 0 it stays so
    random = numpy.random.RandomState(9)
    size = max(numpy.sqrt(numpy.mean(g * g)) for g in grads.values())
    for name, grad in grads.items():
        direction, step = random.standard_normal(grad.shape), 1e-5
        if name in held:
            direction *= t[name] != 0
        sides = [loss(dict(t, **{name: t[name] + side * step * direction})) for side in (2, 1, -1, -2)]
        along = (-sides[0] + 8 * sides[1] - 8 * sides[2] + sides[3]) / (12 * step)
        error = abs(along - numpy.sum(grad * direction)) / (size * math.sqrt(grad.size))
        if not error <= 1e-7:
            sys.exit("%s: the gradient of %s is off by %.3g" % (what, name, error))


def tensors_of(t):
    return {name: torch.tensor(value, requires_grad=True) for name, value in t.items()}


def gradients(loss, t):
    found = torch.autograd.grad(loss, list(t.values()), allow_unused=True)
    return {name: numpy.zeros(t[name].shape) if g is None else g.numpy() for name, g in zip(t, found)}


def routed_weights(c, random):  # w as a router gives it, and as c["writes"] says
    b, n, heads, slots = c["b"], c["n"], c["heads"], c["slots"]
    w = numpy.zeros((b, n, heads, slots))
    if "used" in c:
        router = c["scores"] * random.standard_normal((b, n, heads, slots))
        router -= 100 * (numpy.arange(slots) >= numpy.array(c["used"])[:, None])
        w = route(c, router.reshape(b, n, -1), 2 * random.standard_normal((b, n, heads))).reshape(w.shape)
    for first, end, written in c.get("writes", []):
        w[:, first:end] = 0
        w[:, first:end, :, written] = random.uniform(0.1, 0.63, (b, end - first, heads, len(written)))
    return w.reshape(b, n, -1)


def op(c, name, random):
    b, n, d, columns = c["b"], c["n"], c["d"], c["heads"] * c["slots"]
    c["forget"] = GATED if "gates" in c else ROUTED if "fades" in c else NONE
    lengths = c.get("lengths")
    draw = lambda width, scale: rounded(scale * random.standard_normal((b, n, width)))
    t = dict(q=draw(d, 2), k=draw(d, 1), v=draw(d, 1), s=draw(columns, c.get("scores", 1)))
    if c.get("tied"):
        t.pop("v")
    if c["forget"] == ROUTED:
        t["s"], t["gates"] = rounded(routed_weights(c, random)), rounded(numpy.array(c["fades"]))
        edge["gap"] = math.inf
    elif c["forget"]:
        t["gates"] = rounded(c["gates"][0] + c["gates"][1] * random.standard_normal((b, n, columns)))
        if numpy.any(abs(-numpy.logaddexp(0, -t["gates"]) + 16) < 1e-5):
            sys.exit("%s: rounding decides which side of the clamp a gate is on" % name)
        if c.get("scores") == 15:  # at both ends, and beyond them
            t["s"] = rounded(numpy.where(random.rand(b, n, columns) < 0.3, t["s"],
                                         numpy.sign(t["s"]) * random.uniform(14, 15, t["s"].shape)))
    grad_out = draw(d, 1)

    def run(core, t, rows=slice(None), before=None):
        part = {key: value if value.ndim == 1 else value[:, rows] for key, value in t.items()}
        return core(c, part["q"], part["k"], part.get("v", part["k"]), part["s"], part.get("gates"), lengths, before)

    y, after = run(definition, t)
    tensors = tensors_of(t)
    got, got_after = run(recurrence, tensors)
    same(name, got.detach().numpy(), y, 1e-11)
    for key in ("k", "v"):
        real = numpy.array([min(c["slots"], length) for length in lengths or [c["slots"]] * b])
        there = (numpy.arange(c["slots"]) < real[:, None])[:, None, :, None]
        same(name, got_after[key].numpy() * there, after[key], 1e-11)
    for core in (definition, recurrence):
        arrays = tensors if core is recurrence else t
        cut = min(n - 1, CUT)
        if cut:
            first, state = run(core, arrays, slice(cut))
            second = run(core, arrays, slice(cut, None), state)[0]
            both = torch.cat([first, second], 1).detach().numpy() if core is recurrence else \
                numpy.concatenate([first, second], 1)
            same(name + ", in two parts", both, y, 1e-11)
    check_edge(name)
    grads = gradients(torch.sum(got * torch.tensor(grad_out)), tensors)
    if c["forget"] == ROUTED:
        grads["s"] = grads["s"] * (t["s"] != 0)
    check_differences(name, lambda t: numpy.sum(run(definition, t)[0] * grad_out), t, grads,
                      ["s"] if c["forget"] == ROUTED else [])
    if c["forget"] == GATED and not numpy.all(grads["gates"][:, 0] == 0):
        sys.exit("%s: the first row's gates have a gradient" % name)
    metadata = {"luna.test.op": ["horizon", "", "forgetting", "routed"][c["forget"]]}
    metadata.update((key, str(int(c.get(key, 0)))) for key in ("heads", "slots", "horizon", "omega", "tied"))
    t.update(grad_out=grad_out, y=y, **{"grad." + key: g for key, g in grads.items()})
    if lengths:
        t["lengths"] = numpy.array(lengths, numpy.int32)
    return metadata, t


def router_op(random):  # luna_route's: three heads of five slots; far and near values, and ties at each place
    c, b, n = dict(heads=3, slots=5), 1, 7
    router = 3 * random.standard_normal((b, n, c["heads"], c["slots"]))
    router[:, 1, :, [1, 3]] = 6                             # the two largest are equal
    router[:, 2, :, [0, 2, 4]] = numpy.array([[5, 7, 5]]).T[:, None]  # the second largest, twice
    router[:, 3] = -2                                       # all are equal
    router[:, 4, :, 1:] = 9                                 # all but the first
    router[:, 5] *= 6                                       # sigmoids near 0 and near 1
    t = dict(router=rounded(router.reshape(b, n, -1)), strength=rounded(3 * random.standard_normal((b, n, c["heads"]))))
    t["strength"][:, 6] = rounded([-20, 20, 14.5])          # beyond the clamp there is no gradient
    grad_out = rounded(random.standard_normal(t["router"].shape))
    edge["gap"] = math.inf
    chosen = selection(split(t["router"], c["heads"]))
    check_edge("routed_route")
    w, tensors = route(c, t["router"], t["strength"]), tensors_of(t)
    got = route(c, tensors["router"], tensors["strength"])
    same("routed_route", got.detach().numpy(), w, 1e-14)
    if not numpy.all(numpy.count_nonzero(split(w, c["heads"]), -1) == 2):
        sys.exit("routed_route: not two slots are written to")
    grads = gradients(torch.sum(got * torch.tensor(grad_out)), tensors)
    value = lambda t: numpy.sum(route(c, t["router"], t["strength"], chosen) * grad_out)
    check_differences("routed_route", value, t, grads)
    metadata = {"luna.test.op": "route", "heads": str(c["heads"]), "slots": str(c["slots"])}
    return metadata, dict(t, grad_out=grad_out, w=w, **{"grad." + key: g for key, g in grads.items()})


def check_edge(name):
    if edge["gap"] < 1e-3:
        sys.exit("%s: rounding may decide whether a slot is chosen or empty: %.3g" % (name, edge["gap"]))


def model(c, name, random):
    b, n = 2, c.pop("rows", 100)
    t, tokens = parameters(c, random), random.randint(0, c["vocab"], (b, n))
    labels = numpy.concatenate([tokens[:, 1:], numpy.full((b, 1), -1)], 1)
    labels[1, 60:70] = -1
    edge["gap"] = math.inf
    logits, _ = language_model(c, t, tokens, definition)
    check_edge(name)
    tensors = tensors_of(t)
    got, _ = language_model(c, tensors, tokens, recurrence)
    same(name, got.detach().numpy(), logits, 1e-11)
    loss, grads = loss_of(got, labels), {}
    value = lambda t: loss_of(language_model(c, t, tokens, definition)[0], labels)
    same(name + "'s loss", loss.detach().numpy(), value(t), 1e-12)
    expected = dict(tokens=tokens, labels=labels, logits=logits, loss=[value(t)])
    grads = gradients(loss, tensors)
    check_differences(name, value, t, grads)
    expected.update(("grad." + key, g) for key, g in grads.items())
    if c["attention"] != SOFTMAX:
        first, state = language_model(c, t, tokens[:, :CUT], definition)
        rest, _ = language_model(c, t, tokens[:, CUT:], definition, state)
        same(name + ", in two parts", numpy.concatenate([first, rest], 1), logits, 1e-11)
        value = lambda t: loss_of(language_model(c, t, tokens[:, CUT:], definition, state)[0], labels[:, CUT:])
        with torch.no_grad():
            carried = language_model(c, tensors, tokens[:, :CUT], recurrence)[1]
        loss = loss_of(language_model(c, tensors, tokens[:, CUT:], recurrence, carried)[0], labels[:, CUT:])
        grads = gradients(loss, tensors)
        check_differences(name + ", carried", value, t, grads)
        if name == CARRIED:
            expected.update({"carried.logits": rest, "carried.loss": [value(t)]})
            expected.update(("carried.grad." + key, g) for key, g in grads.items())
    metadata = {"luna.kind": "causal_lm"}
    metadata.update(("luna." + key, str(value)) for key, value in c.items())
    return metadata, t, expected


def main():
    own = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "data", "memory")
    folder = sys.argv[1] if len(sys.argv) > 1 else own
    wanted = lambda name: len(sys.argv) < 3 or name in sys.argv[2:]
    os.makedirs(folder, exist_ok=True)
    for seed, (name, c) in enumerate(OPS):
        if wanted(name):
            write(os.path.join(folder, name + ".safetensors"), *op(dict(c), name, numpy.random.RandomState(seed + 1)))
    for seed, (name, c) in enumerate(MODELS):
        if wanted(name):
            metadata, t, expected = model(dict(c), name, numpy.random.RandomState(seed + 101))
            write(os.path.join(folder, name + ".safetensors"), metadata, t)
            write(os.path.join(folder, name + ".expected.safetensors"), {}, expected)
    if wanted("routed_route"):
        write(os.path.join(folder, "routed_route.safetensors"), *router_op(numpy.random.RandomState(201)))


if __name__ == "__main__":
    main()
