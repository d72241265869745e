#!/usr/bin/env python3
"""Writes tests/data/optimizers.safetensors: what torch's optimisers and schedules do, for tests/engine/trainer.c to
compare with.

    python3 tests/engine/optimizers.py [FILE]          needs torch, nothing else

The file has start.<p> [shape] and gradient.<p> [steps, n], F32, of three parameters; for each case <c> of the metadata
("case.<c>": "adamw lr=0.02 ...") case.<c>.<p> [steps, n], the parameters after each step; for each schedule <s>
("schedule.<s>": "cosine total=20 ...") schedule.<s> [n], F64, its factor at steps 1..n. All arithmetic is float64, with
the hyperparameters as float32 has them; Apollo, which torch lacks, follows its authors' optim/apollo.py.
"""
import json
import struct
import sys

import torch
from torch.optim import lr_scheduler

SHAPES = [[3, 5], [7], [130]]
STEPS = 10

CASES = [
    ("sgd", dict(lr=0.05)),
    ("sgd", dict(lr=0.05, momentum=0.9)),
    ("sgd", dict(lr=0.05, momentum=0.8, nesterov=1, clip=40)),
    ("sgd", dict(lr=0.03, momentum=0.9, weight_decay=0.1)),
    ("adam", dict(lr=0.02, weight_decay=0.1)),
    ("adamw", dict(lr=0.02, beta1=0.8, beta2=0.95, epsilon=1e-3, weight_decay=0.3)),
    ("apollo", dict(lr=0.5, weight_decay=0.1)),
    ("apollo", dict(lr=0.25, beta=0.8, epsilon=1e-3, clip=40, warmup=4, warmup_from=0.1)),
]


def rounded(number):
    return torch.tensor(number, dtype=torch.float32).item()


class Apollo(torch.optim.Optimizer):
    """arXiv 2009.13586 with L2 decay"""

    def __init__(self, params, lr, beta, eps, weight_decay, warmup, init):
        super().__init__(params, dict(lr=lr, beta=beta, eps=eps, weight_decay=weight_decay, warmup=warmup, init=init))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=0, m=torch.zeros_like(p), B=torch.zeros_like(p), d=torch.zeros_like(p))
                m, B, d = state["m"], state["B"], state["d"]
                lr = group["lr"]
                if state["step"] < group["warmup"]:
                    lr = (group["lr"] - group["init"]) * state["step"] / group["warmup"] + group["init"]
                gradient = p.grad + group["weight_decay"] * p
                state["step"] += 1
                alpha = (1 - group["beta"]) / (1 - group["beta"] ** state["step"])
                delta = gradient - m
                m += alpha * delta
                norm = d.abs().pow(4).sum() ** 0.25 + group["eps"]
                d /= norm
                v = d * d
                curvature = -alpha * (delta / norm * d).sum() - (B * v).sum()
                B += v * curvature
                d.copy_(m / B.abs().clamp(min=1))
                p -= lr * d


def optimizer_of(kind, config, params):
    c = {key: rounded(value) for key, value in config.items()}
    decay = c.get("weight_decay", 0)
    if kind == "sgd":
        return torch.optim.SGD(params, lr=c["lr"], momentum=c.get("momentum", 0), nesterov="nesterov" in c,
                               weight_decay=decay)
    if kind == "apollo":
        warmup, start = c.get("warmup", 100), c.get("warmup_from", rounded(0.01))
        return Apollo(params, c["lr"], c.get("beta", rounded(0.9)), c.get("epsilon", rounded(1e-4)), decay, warmup,
                      start * c["lr"])
    betas = c.get("beta1", rounded(0.9)), c.get("beta2", rounded(0.999))
    kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    return kinds[kind](params, lr=c["lr"], betas=betas, eps=c.get("epsilon", rounded(1e-8)), weight_decay=decay)


def trajectory(kind, config, starts, gradients):
    """the parameters after each step, [steps, n] each"""
    params = [torch.nn.Parameter(start.double()) for start in starts]
    optimizer = optimizer_of(kind, config, params)
    rows = [[] for _ in params]
    for step in range(STEPS):
        for p, gradient in zip(params, gradients):
            p.grad = gradient[step].double().reshape(p.shape)
        if "clip" in config:
            norm = torch.sqrt(sum((p.grad ** 2).sum() for p in params))
            for p in params:
                p.grad *= min(1.0, rounded(config["clip"]) / norm.item())
        optimizer.step()
        for row, p in zip(rows, params):
            row.append(p.detach().flatten().clone())
    return [torch.stack(row) for row in rows]


def factors(make, first, count):
    """a torch schedule's factors at its steps first, first + 1, ..."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = make(optimizer)
    values = []
    for _ in range(first + count):
        values.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return torch.tensor(values[first:], dtype=torch.float64)


def warm_then_cosine(optimizer):
    warm = lr_scheduler.LinearLR(optimizer, start_factor=0.125, total_iters=5)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, T_max=15, eta_min=0)
    return lr_scheduler.SequentialLR(optimizer, [warm, cosine], milestones=[5])


# Torch's step 0 makes the first update, and so does luna.h's step 1. Milestones mean the same update in both; the
# continuous ones are the same function of their own step numbers.
SCHEDULES = [
    ("milestones milestone=2 milestone=5 milestone=9 milestone=10 gamma=0.5",
     lambda o: lr_scheduler.MultiStepLR(o, [2, 5, 9, 10], gamma=0.5), 0, 14),
    ("milestones milestone=4 milestone=7", lambda o: lr_scheduler.MultiStepLR(o, [4, 7], gamma=0.1), 0, 12),
    ("cosine total=20 floor=0.125", lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=20, eta_min=0.125), 1, 20),
    ("constant warmup=8 warmup_from=0.25", lambda o: lr_scheduler.LinearLR(o, start_factor=0.25, total_iters=8), 1, 12),
    ("linear total=16 floor=0.25", lambda o: lr_scheduler.LinearLR(o, start_factor=1, end_factor=0.25, total_iters=16),
     1, 20),
    ("cosine warmup=5 warmup_from=0.125 total=20", warm_then_cosine, 1, 20),
    ("inverse_sqrt warmup=4 warmup_from=0.5",
     lambda o: lr_scheduler.LambdaLR(o, lambda t: 0.5 + 0.125 * t if t < 4 else (4 / t) ** 0.5), 1, 20),
]


def main():
    torch.manual_seed(7)
    starts = [torch.randn(shape) for shape in SHAPES]
    # Sizes that vary, so that some steps are clipped and some are not; a direction that turns about, so that Apollo's
    # |B| passes 1
    scale = torch.tensor([1 + step % 3 for step in range(STEPS)]).reshape(-1, 1)
    turn = torch.tensor([1 if step % 4 < 2 else -1 for step in range(STEPS)]).reshape(-1, 1)
    gradients = [scale * (turn * 2 * torch.randn(1, start.numel()) + 0.5 * torch.randn(STEPS, start.numel()))
                 for start in starts]
    metadata = {"kind": "optimizers"}
    tensors = {}
    for p, (start, gradient) in enumerate(zip(starts, gradients)):
        tensors["start.%d" % p] = start
        tensors["gradient.%d" % p] = gradient
    for c, (kind, config) in enumerate(CASES):
        metadata["case.%d" % c] = " ".join([kind] + ["%s=%g" % item for item in config.items()])
        for p, rows in enumerate(trajectory(kind, config, starts, gradients)):
            tensors["case.%d.%d" % (c, p)] = rows.float()
    for s, (text, make, first, count) in enumerate(SCHEDULES):
        metadata["schedule.%d" % s] = text
        tensors["schedule.%d" % s] = factors(make, first, count)
    header, data = {"__metadata__": metadata}, b""
    for name, tensor in tensors.items():
        wide = tensor.dtype == torch.float64
        values = tensor.flatten().tolist()
        bytes_ = struct.pack("<%d%s" % (len(values), "d" if wide else "f"), *values)
        header[name] = {"dtype": "F64" if wide else "F32", "shape": list(tensor.shape),
                        "data_offsets": [len(data), len(data) + len(bytes_)]}
        data += bytes_
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 64)
    with open(sys.argv[1] if len(sys.argv) > 1 else "tests/data/optimizers.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)


if __name__ == "__main__":
    main()
