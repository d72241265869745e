#!/usr/bin/env python3
"""luna.h beside PyTorch, JAX and oneDNN on this machine: medians of interleaved runs and ratios, as a Markdown table.

    python3 tests/bench/bench_peers.py [--threads 1 2] [--isa best AVX2] [--runs 15] [--seconds 10] [--limit 150]
                                 [--only TEXT] [--python /usr/bin/python3]

Each side has a process of its own, so that thread pools do not meet, and they run in turn, A B A B, each after a call
that is not timed. The first call makes a virtual environment in build/peers with PyTorch, JAX and oneDNN from PyPI;
where that fails the system's torch serves, and the table says which it was. MKL takes its AVX-512 path on every maker's
processors here (by a preloaded answer to its question): otherwise PyTorch's products would run at half their speed.
--python measures the PyTorch of another Python instead (a distribution's, with OpenBLAS told which kernels to take,
for instance).
PyTorch runs each layer in each of its forms: `plain` with scaled_dot_product_attention, `folded` by hand as luna.h
folds, and both `compiled` by torch.compile (a C++ compiler must be there; the first run compiles for some minutes,
and build/peers keeps what it made). Rows in 8 bits are beside its dynamic quantisation, rows in bf16 beside
torch.autocast. JAX runs the encoder layer compiled by jit; where it cannot be imported its rows are left out. A pair
is measured for --seconds, but three times at least, and a side that does not answer within --limit seconds, or ends,
is a row that says so. --isa names the instruction sets that both sides are held to in turn.
The last lines are luna.h beside the best of all forms, and the rows where that takes less than 1.1 times luna.h's
time."""
import argparse, ctypes, itertools, os, signal, statistics, subprocess, sys, threading, time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BUILD = os.path.join(ROOT, "build", "peers")
D, H, FFN, N = 256, 4, 1024, 4096
BF16_DTYPE = 2                       # LUNA_DTYPE_BF16
FORMS = ["torch plain", "torch folded", "torch compiled plain", "torch compiled folded"]
JAX = ["jax plain", "jax folded"]
INT8 = ["torch int8 plain", "torch int8 folded"]
BF16 = [form.replace("torch", "torch bf16") for form in FORMS]
# what holds each side to an instruction set; "best": nothing
ISA = {"SSE2": ("default", "SSE4_2", "SSE41"), "AVX2": ("avx2", "AVX2", "AVX2"),
       "AVX-512": ("avx512", "AVX512", "AVX512_CORE")}


# ---- what is timed: name, peers' names ----
def cases():
    rows = [(f"gemm {m} x {n}, k = {k}", ["onednn", "torch"]) for m, n, k in
            [(1024, 1024, 1024), (4096, 256, 256), (4096, 1024, 256), (4096, 256, 1024), (4096, 2048, 2048),
             (16, 4096, 64), (4096, 16, 64), (4096, 64, 16)]]
    for l in (16, 128, 256):
        for what in ("forward", "training"):
            rows.append((f"encoder layer, l = {l}, {what}",
                         FORMS + JAX if l == 16 else ["torch plain", "torch compiled plain", "jax plain"]))
    rows += [(f"{layer}, l = 16, {what}", ["torch chunked", "torch compiled chunked"])
             for layer in ("causal layer", "causal layer that forgets") for what in ("forward", "training")]
    rows += [(f"classifier, batch {b}, training", FORMS) for b in (1, 4)]
    rows += [("streaming step, 4 causal layers, l = 16", ["torch folded"]),
             ("encoder layer, l = 16, forward in 8 bits", INT8),
             ("streaming step, 4 causal layers, l = 16, in 8 bits", ["torch int8 folded"]),
             ("encoder layer, l = 16, forward in bf16", BF16),
             ("encoder layer, l = 16, training in bf16", BF16),
             ("encoder layer, l = 128, training in bf16", BF16[::2]),
             ("causal layer, l = 16, training in bf16", ["torch bf16 chunked", "torch bf16 compiled chunked"]),
             ("causal layer that forgets, l = 16, training in bf16",
              ["torch bf16 chunked", "torch bf16 compiled chunked"]),
             ("classifier, batch 1, training in bf16", BF16)]
    return rows


# ---- luna.h's side ----
def luna_open(name, threads):
    lib = ctypes.CDLL(os.path.join(BUILD, "luna_bench.so"))
    for f in ("peer_layer", "peer_classifier", "peer_stream"):
        getattr(lib, f).restype = ctypes.c_void_p
    i64 = ctypes.c_int64
    if name.startswith("gemm"):
        m, n, k = gemm_sizes(name)
        floats = lambda count: (ctypes.c_float * count)(*([0.5] * count))
        a, b, c, scratch = floats(m * k), floats(n * k), floats(m * n), ctypes.create_string_buffer(16 << 20)
        return lambda: lib.peer_gemm(i64(m), i64(n), i64(k), a, b, c, scratch, i64(16 << 20))
    if name.startswith("classifier"):
        batch = int(name.split("batch ")[1].split(",")[0])
        products = BF16_DTYPE if "bf16" in name else 0
        handle = ctypes.c_void_p(lib.peer_classifier(threads, i64(batch), i64(N), 0, products))
        return lambda: lib.peer_classifier_run(handle)
    if name.startswith("streaming"):
        handle = ctypes.c_void_p(lib.peer_stream(i64(D), int("8 bits" in name)))
        return lambda: lib.peer_stream_run(handle)
    l = int(name.split("l = ")[1].split(",")[0])
    kind = ("causal" in name) + ("forgets" in name)
    training = "training" in name
    work = 2 if "8 bits" in name else 3 if training and "bf16" in name else 4 if "bf16" in name else int(training)
    handle = ctypes.c_void_p(lib.peer_layer(threads, i64(N), i64(l), kind, work))
    return lambda: lib.peer_layer_run(handle)


def gemm_sizes(name):
    size, k = name[5:].split(", k = ")
    m, n = size.split(" x ")
    return int(m), int(n), int(k)


# ---- oneDNN's and PyTorch's ----
def onednn_open(name, threads):
    import glob
    found = glob.glob(os.path.join(sys.prefix, "lib", "libdnnl.so*"))
    if not found:
        sys.exit("this Python has no oneDNN")
    lib = ctypes.CDLL(found[0])
    m, n, k = gemm_sizes(name)
    floats = lambda count: (ctypes.c_float * count)(*([0.5] * count))
    a, b, c, i64 = floats(m * k), floats(n * k), floats(m * n), ctypes.c_int64
    return lambda: lib.dnnl_sgemm(ctypes.c_char(b"N"), ctypes.c_char(b"T"), i64(m), i64(n), i64(k), ctypes.c_float(1),
                                  a, i64(k), b, i64(k), ctypes.c_float(0), c, i64(n))


def torch_open(name, threads, form):
    import torch
    import torch.nn.functional as F
    torch.set_num_threads(threads)
    torch.manual_seed(1)

    if name.startswith("gemm"):
        m, n, k = gemm_sizes(name)
        a, b, c = torch.full((m, k), 0.5), torch.full((n, k), 0.5), torch.empty(m, n)
        return lambda: torch.mm(a, b.t(), out=c)

    # PyTorch before 2.0 has none of its own
    compiled, form = "compiled" in form, form.replace("compiled ", "")
    int8, form = "int8" in form, form.replace("int8 ", "")
    bf16, form = "bf16" in form, form.replace("bf16 ", "")

    def rounded(module):             # its Linear modules: weights in 8 bits, inputs too, by a scale found in each call
        if not int8:
            return module
        import torch.ao.quantization as ao
        return ao.quantize_dynamic(module, {torch.nn.Linear}, dtype=torch.qint8)

    def linear(weight, bias=None):   # as F.linear
        module = torch.nn.Linear(*weight.t().shape, bias is not None)
        module.weight.data = weight.detach()
        if bias is not None:
            module.bias.data = bias.detach()
        return rounded(torch.nn.Sequential(module)) if int8 else lambda x: F.linear(x, weight, bias)

    if compiled and os.environ.get("BENCH_ISA") == "AVX2":
        import torch._inductor.config
        torch._inductor.config.cpp.simdlen = 256
    compile = torch.compile if compiled else lambda f: f
    attention = getattr(F, "scaled_dot_product_attention",
                        lambda q, k, v: F.softmax(q @ k.transpose(-1, -2) * (D // H) ** -0.5, -1) @ v)

    def split(x):  # [b, n, d] -> [b, h, n, d_h]
        return x.view(x.shape[0], x.shape[1], H, D // H).transpose(1, 2)

    def merge(x):
        return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], D)

    class Half(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2, self.norm = torch.nn.Linear(D, FFN), torch.nn.Linear(FFN, D), torch.nn.LayerNorm(D)

        def forward(self, x):
            return self.norm(x + self.fc2(F.relu(self.fc1(x))))

    class Luna(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.pq, self.pc, self.q, self.c, self.out = (torch.nn.Linear(D, D) for _ in range(5))
            self.x_norm, self.p_norm, self.ffn = torch.nn.LayerNorm(D), torch.nn.LayerNorm(D), Half()

        def plain(self, x, p):
            kv = split(self.pc(x))
            packed = merge(attention(split(self.pq(p)), kv, kv))
            c = split(self.c(packed))
            return self.out(merge(attention(split(self.q(x)), c, c))), packed

        def folded(self, x, p):
            b, l, scale = x.shape[0], p.shape[1], (D // H) ** -0.5
            heads = lambda w: w.view(H, D // H, D)
            g = (split(self.pq(p)) * scale @ heads(self.pc.weight)).reshape(b, H * l, D)
            z = (F.softmax(g @ x.transpose(1, 2), -1) @ x).view(b, H, l, D)
            packed = merge(z @ heads(self.pc.weight).transpose(1, 2)) + self.pc.bias
            c = split(self.c(packed))
            k = (c * scale @ heads(self.q.weight)).reshape(b, H * l, D)
            bias = (c * scale @ self.q.bias.view(H, D // H, 1)).reshape(b, 1, H * l)
            v = (c @ self.out.weight.t().reshape(H, D // H, D)).reshape(b, H * l, D)
            s = F.softmax((x @ k.transpose(1, 2) + bias).view(b, -1, H, l), -1).view(b, -1, H * l)
            return s @ v + self.out.bias, packed

        def forward(self, x, p):
            y, packed = self.folded(x, p) if form == "folded" else self.plain(x, p)
            return self.ffn(self.x_norm(x + y)), self.p_norm(p + packed)

    class Causal(torch.nn.Module):
        def __init__(self, l):
            super().__init__()
            self.pq, self.pc, self.q, self.c, self.out = (torch.nn.Linear(D, D) for _ in range(5))
            self.p, self.norm, self.ffn = torch.nn.Parameter(torch.randn(1, l, D) / 16), torch.nn.LayerNorm(D), Half()

        def product(self, x, y, z, t, mask):  # eq. 7 in chunks: [b, h, chunks, c, .]
            state = (y.transpose(-1, -2) @ z).cumsum(2)
            before = torch.cat([torch.zeros_like(state[:, :, :1]), state[:, :, :-1]], 2)
            return (x @ before + (x @ y.transpose(-1, -2) * mask) @ z) / t

        def scores(self, x):
            pq = split(self.pq(self.p)) * (D // H) ** -0.5
            g = (pq @ self.pc.weight.view(H, D // H, D)).reshape(-1, D)
            return F.linear(x, g, (pq @ self.pc.bias.view(H, D // H, 1)).reshape(-1))

        def forward(self, x, c=64):
            b, n = x.shape[:2]
            chunks = lambda u: u.view(b, n // c, c, H, -1).permute(0, 3, 1, 2, 4)
            y = self.attend(x, chunks, n, c).permute(0, 2, 3, 1, 4).reshape(b, n, D)
            return self.ffn(self.norm(x + self.out(y)))

        def attend(self, x, chunks, n, c):
            a = chunks(F.softplus(self.scores(x) * 0.6931471805599453) * 1.4426950408889634)
            q, v = chunks(self.q(x)) * (D // H) ** -0.5, chunks(self.c(x))
            t, mask = torch.arange(1, n + 1, dtype=x.dtype).view(1, 1, n // c, c, 1), torch.ones(c, c).tril()
            w = F.softmax(self.product(q, v, a, t, mask), -1)
            return self.product(w, a, v, t, mask)

    class Forgetting(Causal):        # weights e^s, which gates make less: the memory before each chunk in turn
        def __init__(self, l):
            super().__init__(l)
            self.forget = torch.nn.Linear(D, H * l)

        def attend(self, x, chunks, n, c):
            q, v = chunks(self.q(x)) * (D // H) ** -0.5, chunks(self.c(x))
            gates = (F.logsigmoid(chunks(self.forget(x))) / 16).clamp(min=-1).cumsum(3)
            w, fades = torch.exp(chunks(self.scores(x)).clamp(-15, 15) - gates), torch.exp(gates[:, :, :, -1:])
            own, total = v.transpose(-1, -2) @ w, w.sum(3, keepdim=True)
            memory, sums = [torch.zeros_like(own[:, :, 0])], [torch.zeros_like(total[:, :, 0])]
            for i in range(n // c - 1):
                memory.append((memory[-1] + own[:, :, i]) * fades[:, :, i])
                sums.append((sums[-1] + total[:, :, i]) * fades[:, :, i])
            memory, z, mask = torch.stack(memory, 2), torch.stack(sums, 2) + w.cumsum(3), torch.ones(c, c).tril()
            r = F.softmax((q @ memory + (q @ v.transpose(-1, -2) * mask) @ w) / z, -1) / z
            return r @ memory.transpose(-1, -2) + (r @ w.transpose(-1, -2) * mask) @ v

    if name.startswith("streaming"):
        layers, table, log2 = [Causal(16) for _ in range(4)], torch.randn(256, D), 0.6931471805599453

        class Step:  # of one layer: its pack folded, keys and values one product, the running sum S [h, d_h, l]
            def __init__(self, layer):
                pq = split(layer.pq(layer.p)) * (D // H) ** -0.5
                g = (pq @ layer.pc.weight.view(H, D // H, D)).reshape(-1, D) * log2
                bias = (pq @ layer.pc.bias.view(H, D // H, 1)).reshape(-1) * log2
                self.project = linear(torch.cat([g, layer.q.weight * (D // H) ** -0.5, layer.c.weight]),
                                      torch.cat([bias, layer.q.bias * (D // H) ** -0.5, layer.c.bias]))
                self.layer, self.sum, self.l = layer, torch.zeros(H, D // H, g.shape[0] // H), g.shape[0]

            def __call__(self, x, t):
                y = self.project(x)
                a = F.softplus(y[:, :self.l]).view(H, 1, -1) / log2
                q, v = y[:, self.l:self.l + D].view(H, 1, -1), y[:, self.l + D:].view(H, -1, 1)
                self.sum.baddbmm_(v, a)
                w = F.softmax(torch.bmm(q, self.sum) / t, -1)
                y = torch.bmm(w, self.sum.transpose(1, 2)) / t
                return self.layer.ffn(self.layer.norm(x + self.layer.out(y.view(1, D))))

        with torch.no_grad():
            steps = [Step(layer) for layer in layers]
            for step in steps:
                step.layer = rounded(step.layer)
            output = linear(table)
        time_now = [0]

        def run():
            with torch.inference_mode():
                time_now[0] += 1
                x = table[97:98] * 16
                for step in steps:
                    x = step(x, time_now[0])
                return output(x)
        return run
    if name.startswith("classifier"):
        batch = int(name.split("batch ")[1].split(",")[0])
        layers, table = torch.nn.ModuleList(Luna() for _ in range(4)), torch.nn.Embedding(256, D)
        head = torch.nn.Linear(D, 2)
        p = torch.nn.Parameter(torch.randn(1, 16, D) / 16)
        weights = [*layers.parameters(), *table.parameters(), p, *head.parameters()]
        tokens, labels = torch.arange(batch * N).view(batch, N) * 7919 % 256, torch.arange(batch) % 2
        positions = torch.randn(N, D)

        def loss():
            x, memory = table(tokens) * 16 + positions, p.expand(batch, -1, -1)
            for layer in layers:
                x, memory = layer(x, memory)
            return F.cross_entropy(head(x.mean(1)), labels)
        loss = compile(loss)
    else:
        l = int(name.split("l = ")[1].split(",")[0])
        layer = Forgetting(l) if "forgets" in name else Causal(l) if "causal" in name else Luna()
        x, p = torch.randn(1, N, D, requires_grad=True), torch.randn(1, l, D, requires_grad=True)
        if int8 and form == "folded":    # what is folded stays float
            layer.ffn = rounded(layer.ffn)
        elif int8:
            layer = rounded(layer)
        called = compile(layer)
        forward = (lambda: called(x)) if "causal" in name else (lambda: called(x, p)[0])
        weights, loss = list(layer.parameters()), lambda: forward().mean()
        if "forward" in name:
            def run():
                with torch.no_grad() if compiled else torch.inference_mode():
                    forward()
            return run
    try:
        adam = torch.optim.Adam(weights, lr=1e-4, fused=True)
    except RuntimeError:             # older ones fuse on a GPU only
        adam = torch.optim.Adam(weights, lr=1e-4, foreach=True)

    def run():
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            value = loss()
        value.backward()
        adam.step()
        adam.zero_grad(set_to_none=True)
        if not name.startswith("classifier"):
            x.grad = p.grad = None
    return run


# the encoder layer compiled as one function; a training step is its gradients and Adam's update
def jax_open(name, form):
    import jax
    import jax.numpy as jnp
    l, scale = int(name.split("l = ")[1].split(",")[0]), (D // H) ** -0.5
    keys = iter(jax.random.split(jax.random.PRNGKey(1), 16))
    linear = lambda to, of: (jax.random.normal(next(keys), (to, of)) * of ** -0.5, jnp.zeros(to))
    weights = {w: linear(D, D) for w in ("pq", "pc", "q", "c", "out")}
    weights.update(fc1=linear(FFN, D), fc2=linear(D, FFN))
    weights.update({w: (jnp.ones(D), jnp.zeros(D)) for w in ("x_norm", "norm")})
    x, p = jax.random.normal(next(keys), (N, D)), jax.random.normal(next(keys), (l, D))
    apply = lambda w, x: x @ w[0].T + w[1]
    split = lambda x: x.reshape(x.shape[0], H, D // H).transpose(1, 0, 2)
    merge = lambda x: x.transpose(1, 0, 2).reshape(x.shape[1], D)
    heads = lambda w: w.reshape(H, D // H, D)

    def norm(w, x):
        x = x - x.mean(-1, keepdims=True)
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w[0] + w[1]

    def attention(q, k, v):
        return jax.nn.softmax(q @ k.transpose(0, 2, 1) * scale, -1) @ v

    def plain(w, x, p):
        kv = split(apply(w["pc"], x))
        c = split(apply(w["c"], merge(attention(split(apply(w["pq"], p)), kv, kv))))
        return apply(w["out"], merge(attention(split(apply(w["q"], x)), c, c)))

    def folded(w, x, p):
        g = (split(apply(w["pq"], p)) * scale @ heads(w["pc"][0])).reshape(H * l, D)
        z = (jax.nn.softmax(g @ x.T, -1) @ x).reshape(H, l, D)
        c = split(apply(w["c"], merge(z @ heads(w["pc"][0]).transpose(0, 2, 1)) + w["pc"][1]))
        k = (c * scale @ heads(w["q"][0])).reshape(H * l, D)
        v = (c @ w["out"][0].T.reshape(H, D // H, D)).reshape(H * l, D)
        s = (x @ k.T).reshape(-1, H, l) + (c * scale @ w["q"][1].reshape(H, D // H, 1)).reshape(H, l)
        return jax.nn.softmax(s, -1).reshape(-1, H * l) @ v + w["out"][1]

    def layer(w, x, p):
        x = norm(w["x_norm"], x + (folded if form == "folded" else plain)(w, x, p))
        return norm(w["norm"], x + apply(w["fc2"], jax.nn.relu(apply(w["fc1"], x))))

    if "forward" in name:
        forward = jax.jit(layer)
        return lambda: forward(weights, x, p).block_until_ready()

    def step(state, x, p):
        w, m, v, t = state
        (dw, dx, dp) = jax.grad(lambda *a: layer(*a).mean(), (0, 1, 2))(w, x, p)
        t, each = t + 1, jax.tree_util.tree_map
        m, v = each(lambda m, g: 0.9 * m + 0.1 * g, m, dw), each(lambda v, g: 0.999 * v + 0.001 * g * g, v, dw)
        new = lambda w, m, v: w - 1e-4 * (m / (1 - 0.9 ** t)) / (jnp.sqrt(v / (1 - 0.999 ** t)) + 1e-8)
        return (each(new, w, m, v), m, v, t), dx, dp

    zeros = lambda: jax.tree_util.tree_map(jnp.zeros_like, weights)
    held, step = [((weights, zeros(), zeros(), 0.0),)], jax.jit(step)

    def run():
        held[0] = jax.block_until_ready(step(held[0][0], x, p))
    return run


# ---- a side's process: "open CASE", then "run COUNT" as often as wanted ----
def peak_memory():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024


def serve(side, threads):
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])  # not every pool minds OMP_NUM_THREADS
    if side.startswith("torch"):
        import torch
        print(torch.__version__, flush=True)
    elif side.startswith("jax"):
        import jax
        print(jax.__version__, flush=True)
    else:
        print(side, flush=True)
    run, base = None, 0
    for line in sys.stdin:
        word, rest = line.strip().split(" ", 1)
        if word == "open":
            base = peak_memory()
            if side == "luna":
                run = luna_open(rest, threads)
            elif side == "onednn":
                run = onednn_open(rest, threads)
            elif side.startswith("jax"):
                run = jax_open(rest, side.split(" ", 1)[1])
            else:
                run = torch_open(rest, threads, side.split(" ", 1)[1] if " " in side else "")
            for _ in range(3):       # the second may compile again
                run()
            start = time.perf_counter()
            run()
            print(time.perf_counter() - start, flush=True)
        else:
            run()                    # wakes its threads
            start = time.perf_counter()
            for _ in range(int(rest)):
                run()
            print((time.perf_counter() - start) / int(rest), peak_memory() - base, flush=True)


class Side:
    def __init__(self, python, side, threads, case, isa, limit):
        env = dict(os.environ, TORCHINDUCTOR_CACHE_DIR=os.path.join(BUILD, "inductor", isa),
                   OMP_NUM_THREADS=str(threads), MKL_NUM_THREADS=str(threads), PEERS_SIDE=side,
                   PEERS_THREADS=str(threads))
        if "avx512f" in open("/proc/cpuinfo").read():
            env["OPENBLAS_CORETYPE"] = "SkylakeX" # older ones do not know newer processors
        if isa in ISA:
            env["BENCH_ISA"] = isa
            env["ATEN_CPU_CAPABILITY"], env["MKL_ENABLE_INSTRUCTIONS"], env["ONEDNN_MAX_CPU_ISA"] = ISA[isa]
            env["XLA_FLAGS"] = "--xla_cpu_max_isa=" + ISA[isa][1]
        if side.startswith("torch"):
            env["LD_PRELOAD"] = os.path.join(BUILD, "mkl_avx512.so")
        if side == "onednn":
            env["LD_LIBRARY_PATH"] = os.path.join(os.path.dirname(os.path.dirname(python)), "lib")
        # a group of its own: a compiler that is under way ends with it
        self.limit, self.errors = limit, open(os.path.join(BUILD, "errors.txt"), "w+")
        self.process = subprocess.Popen([python, os.path.abspath(__file__)], env=env, stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE,
                                        stderr=self.errors, text=True, start_new_session=True)
        try:
            self.version = self.answer().strip()
            self.once, self.seconds, self.bytes = float(self.ask(f"open {case}")), [], 0
        except Exception:
            self.close()
            raise

    def answer(self):
        late = threading.Timer(self.limit, self.end)
        late.start()
        answer = self.process.stdout.readline()
        late.cancel()
        if not answer:
            self.errors.seek(0)
            last = (self.errors.read().strip() or "it ended").splitlines()[-1][:120].replace("|", "/")
            raise RuntimeError(f"no answer in {self.limit:.0f} s" if self.late else last)
        return answer

    def ask(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.answer()

    late = False
    def end(self):
        self.late = True
        os.killpg(self.process.pid, signal.SIGKILL)

    def measure(self):
        seconds, memory = self.ask(f"run {max(1, int(0.03 / self.once))}").split()
        self.seconds.append(float(seconds))
        self.bytes = int(memory)

    def close(self):
        try:
            self.process.stdin.close()
            self.process.wait(20)
        except (OSError, subprocess.TimeoutExpired):
            self.end()
            self.process.wait()
        self.errors.close()


def prepare(python):
    os.makedirs(BUILD, exist_ok=True)
    cc = os.environ.get("CC", "cc")
    shared = ["-shared", "-fPIC", "-O2", "-o"]
    luna = os.path.join(BUILD, "luna.c")
    with open(luna, "w") as f:
        f.write('#undef LI_IMPLEMENTED\n#define LUNA_IMPLEMENTATION\n#include "luna.h"\n')
    subprocess.check_call([cc, *shared, os.path.join(BUILD, "luna_bench.so"), "-DBENCH_SHARED",
                           "-DLI_IMPLEMENTED", "-I", ROOT, luna,
                           os.path.join(ROOT, "tests", "bench", "bench_layers.c"),
                           os.path.join(ROOT, "tests", "bench", "bench_models.c"), "-lm", "-lpthread"])
    answer = os.path.join(BUILD, "mkl_avx512.c")
    with open(answer, "w") as f:
        f.write("int mkl_serv_intel_cpu_true(void) { return 1; }\n")
    subprocess.check_call([cc, *shared, os.path.join(BUILD, "mkl_avx512.so"), answer])
    if python:
        return python
    python = os.path.join(BUILD, "venv", "bin", "python")
    if not os.path.exists(python):
        subprocess.call([sys.executable, "-m", "venv", os.path.join(BUILD, "venv")])
    have = lambda p: os.path.exists(p) and subprocess.call([p, "-c", "import torch, numpy"],
                                                           stderr=subprocess.DEVNULL) == 0
    if not have(python):
        print("installing PyTorch, JAX and oneDNN from PyPI into build/peers", file=sys.stderr)
        subprocess.call([python, "-m", "pip", "install", "-q", "torch", "numpy", "onednn"])
        subprocess.call([python, "-m", "pip", "install", "-q", "jax"])
    return python if have(python) else sys.executable


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    options.add_argument("--isa", nargs="+", default=["best"], choices=["best", *ISA])
    options.add_argument("--runs", type=int, default=15)
    options.add_argument("--seconds", type=float, default=10)
    options.add_argument("--limit", type=float, default=150)
    options.add_argument("--only", default="")
    options.add_argument("--python", default="")
    options = options.parse_args()
    python = prepare(options.python)
    print("| work | isa | threads | luna.h ms | peer | its ms | its time / luna.h's "
          "| MB above the start: luna.h, peer |\n|" + "---|" * 8)
    best, started = {}, time.perf_counter()
    has_jax = subprocess.call([python, "-c", "import jax"], stderr=subprocess.DEVNULL) == 0
    for isa, threads, (case, peers) in itertools.product(options.isa, options.threads, cases()):
        if options.only not in case or (threads > 1 and case.startswith(("gemm", "streaming"))):
            continue
        for peer in peers:
            if peer in JAX and not has_jax:
                continue
            name, sides = f"| {case} | {isa} | {threads} |", []
            try:
                for side in ("luna", peer):
                    sides.append(Side(python, side, threads, case, isa, options.limit))
                begun = time.perf_counter()
                for run in range(options.runs):
                    if run >= 3 and time.perf_counter() - begun > options.seconds:
                        break
                    for side in sides:
                        side.measure()
                        time.sleep(0.25 if threads > 1 else 0)  # until its pool sleeps
            except (RuntimeError, ValueError, OSError) as e:
                print(f"{name} | {peer} | not run: {e} | | |", flush=True)
                for side in sides:
                    side.close()
                continue
            ratio = statistics.median(b / a for a, b in zip(*(s.seconds for s in sides)))
            ms = [1e3 * statistics.median(s.seconds) for s in sides]
            bytes = ", ".join(f"{s.bytes * 1e-6:.0f}" for s in sides)
            memory = "" if case.startswith(("gemm", "streaming")) else bytes
            version = sides[1].version
            title = peer.replace("torch", "PyTorch " + version).replace("jax", "JAX " + version)
            print(f"{name} {ms[0]:.3f} | {title} | {ms[1]:.3f} | {ratio:.2f} | {memory} |", flush=True)
            best[name] = min(best.get(name, (1e9,)), (ratio, peer, ms[0]))
            for side in sides:
                side.close()
    print("\n| work | isa | threads | best peer | its time / luna.h's |\n|" + "---|" * 5)
    for name, (ratio, peer, ms) in best.items():
        print(f"{name} {peer} | {ratio:.2f} |" + (" below 1.1 |" if ratio < 1.1 and ms >= 1 else ""))
    missing = "" if has_jax else "JAX could not be imported: its rows are left out. "
    print(f"\n{missing}{(time.perf_counter() - started) / 60:.0f} minutes")


if __name__ == "__main__":
    if "PEERS_SIDE" in os.environ:
        serve(os.environ["PEERS_SIDE"], int(os.environ["PEERS_THREADS"]))
    else:
        main()
