#!/usr/bin/env python3
"""luna_cuda.cuh beside PyTorch on this machine's GPU, as a Markdown table: layers, a classifier and a language model,
in float32, TF32 and BF16, each with and without a graph, PyTorch eagerly and under torch.compile.

    python3 tests/cuda/bench_cuda_peers.py [--seconds 140] [--all] [--only TEXT] [--runs 15] [--check] [--python PYTHON]
    python3 tests/cuda/bench_cuda_peers.py --kernels 20 [--only TEXT]
    python3 tests/cuda/bench_cuda_peers.py --dry [--compile]

Both sides compute the same functions: the first lines compare results and gradients, of the same weights and inputs.
Both round the same things: nothing in float32, the factors of products in TF32, and in BF16 the factors of products to
bfloat16; there PyTorch's torch.autocast stores what lies between in bfloat16 too, and luna.h does not.
PyTorch's modules are those of examples/luna_torch.py, whose softmax attention is scaled_dot_product_attention, with
causal attention in chunks of 64 rows. Each side has a process of its own; they run in turn, and each number is the
median of a step's time by CUDA events. A graph is luna_graph's, and torch.cuda.CUDAGraph's of the whole step.

`make cuda` builds the library that this loads, build/cuda/peers.so; nothing else is compiled but what torch.compile
compiles, which has the first half of the time. The rows come in the order of their weight: what --seconds is too short
for is counted at the end. The default takes each work at three shapes of a batch, --all at nine. --dry tries it all
without a GPU, in small: luna.h's kernels by the emulator (build/peers_host.so), PyTorch on the CPU; its times say
nothing. --check compares and measures nothing. --kernels shows which kernels of a step take the time on both sides, of
the rows whose name, shape and precision hold TEXT. Without a GPU, the library or PyTorch with CUDA it says so and ends
with status 0."""
import argparse, collections, ctypes, gc, glob, json, os, select, statistics, subprocess, sys, threading, time

sys.dont_write_bytecode = True        # no __pycache__ beside the tests
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BUILD = os.environ.get("BUILD") or os.path.join(ROOT, "build")
CHUNK = 64                            # rows of PyTorch's causal attention at a time
ENCODER, CAUSAL, FORGETTING, CLASSIFIER, LM = range(5)
PRECISIONS = ["float32", "TF32", "BF16"]
LIMITS = [1e-5, 2e-3, 2e-2]           # of the results' difference, by precision,
SLOPE_LIMITS = [1e-4, 3e-2, 0.5]      # and of the worst gradient's: a bfloat16 query projection's is a small remainder
SHAPES = [(8, 4096), (32, 1024), (1, 16384)]
FORMS = ["eager", "torch.compile"]

Sizes = collections.namedtuple("Sizes", "work training math batch n dim heads ffn memory layers vocab")
Row = collections.namedtuple("Row", "name sizes")


# ---- the rows ----
def works():
    layers = [(f"encoder layer, l = {l}", ENCODER, l) for l in (16, 128, 256)]
    layers += [("causal layer, l = 16", CAUSAL, 16), ("causal layer that forgets, l = 16", FORGETTING, 16)]
    both = [(f"{name}, {'training' if training else 'forward'}", work, training, l)
            for name, work, l in layers for training in (1, 0)]
    return both[:2] + [("4-layer classifier, training", CLASSIFIER, 1, 16),
                       ("4-layer language model, training", LM, 1, 16)] + both[2:]


def rows(all_shapes, tiny):
    shapes = SHAPES + [(b, n) for n in (4096, 1024, 16384) for b in (8, 32, 1) if all_shapes and (b, n) not in SHAPES]
    made = []
    for batch, n in shapes:
        for math in (2, 1, 0):
            for name, work, training, l in works():
                sizes = Sizes(work, training, math, batch, n, 256, 4, 1024, l, 4, 256)
                if tiny:              # so that there are several chunks, in each of which a tile is not full
                    sizes = Sizes(work, training, math, {8: 2, 32: 3, 1: 1}[batch],
                                  {4096: 2 * CHUNK, 1024: CHUNK, 16384: 3 * CHUNK}[n], 32, 2, 48,
                                  {16: 4, 128: 10, 256: 16}[l], 2, 29)
                made.append(Row(name, sizes))
    return made


# ---- luna.h's side ----
class Luna:
    """one open row, by the functions of tests/cuda/peers.cpp"""
    def __init__(self, library, sizes):
        self.lib, self.sizes = library, sizes
        packed = (ctypes.c_int64 * len(sizes))(*sizes)
        self.handle = ctypes.c_void_p(library.peer_open(packed))
        self.must(not library.peer_error(self.handle))

    def must(self, good):
        if not good:
            raise RuntimeError("luna.h: " + (self.lib.peer_error(self.handle) or b"it failed").decode())

    def run(self, steps, graphed):
        ms = ctypes.c_double()
        self.must(self.lib.peer_run(self.handle, steps, int(graphed), ctypes.byref(ms)) == 0)
        return ms.value

    def reason(self):
        return self.lib.peer_reason(self.handle).decode()

    def floats(self, count, read, *at):
        values = (ctypes.c_float * count)()
        self.must(read(self.handle, *map(ctypes.c_int64, at), values) == 0)
        return values

    def tensors(self):
        return {self.lib.peer_name(self.handle, ctypes.c_int64(i)).decode(): i
                for i in range(self.lib.peer_count(self.handle))}

    def size(self, i):
        return self.lib.peer_size(self.handle, ctypes.c_int64(i))

    def close(self):
        self.lib.peer_close(self.handle)


def library_path(dry):
    return os.path.join(BUILD, "peers_host.so" if dry else os.path.join("cuda", "peers.so"))


def library(dry):
    try:
        lib = ctypes.CDLL(library_path(dry))
    except OSError:                   # cuBLAS beside PyTorch's wheels, which no loader looks for
        for name in ("libcublasLt.so", "libcublas.so"):
            for at in sys.path:
                for found in sorted(glob.glob(os.path.join(at, "nvidia", "*", "lib", name + ".*")))[-1:]:
                    ctypes.CDLL(found, ctypes.RTLD_GLOBAL)
        lib = ctypes.CDLL(library_path(dry))
    for name in ("peer_error", "peer_reason", "peer_name", "peer_finding"):
        getattr(lib, name).restype = ctypes.c_char_p
    for name in ("peer_count", "peer_size", "peer_peak", "peer_used", "peer_gradients"):
        getattr(lib, name).restype = ctypes.c_int64
    lib.peer_open.restype = ctypes.c_void_p
    return lib


# ---- PyTorch's side ----
def torch_modules():
    """examples/luna_torch.py, with causal attention in chunks and positions that are computed once"""
    sys.path.insert(0, os.path.join(ROOT, "examples"))
    import torch, luna_torch
    F = torch.nn.functional

    class Chunked(luna_torch.CausalAttention):
        def forward(self, x, p, slots=None):
            h, (b, n, d), l = self.c.heads, x.shape, p.shape[1]
            chunks = lambda u: luna_torch.split(u, h).unflatten(2, (n // CHUNK, CHUNK))   # [b,h,chunks,CHUNK,.]
            scale = (h / d) ** 0.5
            pq = luna_torch.split(self.pq_proj(p), h)[0] * scale
            g = (pq @ self.pc_proj.weight.view(h, d // h, d)).reshape(h * l, d)           # P folded into the scores
            scores = chunks(F.linear(x, g, (pq @ self.pc_proj.bias.view(h, d // h, 1)).flatten()))
            q, v = chunks(self.q_proj(x)) * scale, chunks(self.c_proj(x))
            mask = torch.ones(CHUNK, CHUNK, device=x.device).tril()
            y = self.forgets(x, chunks, scores, q, v, mask) if self.c.forget else self.keeps(scores, q, v, mask)
            return self.out(x, y.flatten(2, 3).transpose(1, 2).flatten(2))

        def keeps(self, scores, q, v, mask):                                              # (7)
            pack = luna_torch.ACTIVATION[self.c.omega or 5](scores)
            t = torch.arange(1, scores.shape[2] * CHUNK + 1, device=q.device).view(-1, CHUNK, 1)

            def product(x, y, z):
                own = y.mT @ z
                before = own.cumsum(2) - own
                return (x @ before + (x @ y.mT * mask) @ z) / t
            return product(torch.softmax(product(q, v, pack), -1), pack, v)

        def forgets(self, x, chunks, scores, q, v, mask):
            logs = (F.logsigmoid(chunks(self.forget_proj(x))) / 16).clamp(min=-1).cumsum(3)
            w, fades = torch.exp(scores.clamp(-15, 15) - logs), logs[..., -1, :]
            start = fades.cumsum(2) - fades                   # of each chunk, what has faded since the first
            count = start.shape[2]
            later = torch.ones(count, count, dtype=torch.bool, device=x.device).tril(-1)
            decay = (start[:, :, :, None] - start[:, :, None]).masked_fill(~later[..., None], -torch.inf).exp()
            before = lambda own: torch.einsum("bhijl,bhjdl->bhidl", decay, own)
            memory, sums = before(v.mT @ w), before(w.sum(3, keepdim=True))
            z = sums + w.cumsum(3)
            r = torch.softmax((q @ memory + (q @ v.mT * mask) @ w) / z, -1) / z
            return r @ memory.mT + (r @ w.mT * mask) @ v

    class Positions:                  # what an encoder adds to its vectors and its memory
        positioned, tables = luna_torch.Embedded.positioned, {}

    def positioned(self, x, first, learned=True):
        if self.c.positions != luna_torch.SINUSOIDAL:
            return Positions.positioned(self, x, first, learned)
        key = (x.shape[-2], x.shape[-1], str(x.device))
        if key not in Positions.tables:
            Positions.tables[key] = Positions.positioned(self, torch.zeros_like(x), first, learned).detach()
        return x + Positions.tables[key]
    luna_torch.CausalAttention, luna_torch.Embedded.positioned = Chunked, positioned
    return luna_torch


class Torch:
    """one open row: the model, its inputs, and a step of it in several forms"""
    def __init__(self, sizes, device):
        import torch
        self.torch, self.sizes, self.device, luna_torch = torch, sizes, device, torch_modules()
        s = sizes
        config = dict(dim=s.dim, heads=s.heads, ffn=s.ffn, memory=s.memory, layers=s.layers, vocab=s.vocab)
        torch.manual_seed(1)
        if s.work == CLASSIFIER:
            model = luna_torch.Classifier(classes=2, pooling=luna_torch.MEAN, **config)
        elif s.work == LM:
            model = luna_torch.LM(**config)
        elif s.work == ENCODER:
            model = luna_torch.EncoderLayer(luna_torch.Config(config))
        else:
            gates = luna_torch.GATED if s.work == FORGETTING else 0
            model = luna_torch.CausalLayer(luna_torch.Config(dict(config, forget=gates)))
        self.model = model.to(device)
        at = torch.arange(s.batch * s.n + 1, device=device) * 7919 % s.vocab
        self.tokens, self.next = at[:-1].view(s.batch, s.n), at[1:]
        self.labels = torch.arange(s.batch, device=device) % 2
        new = lambda *shape: torch.randn(*shape, device=device)
        self.x, self.p = new(s.batch, s.n, s.dim), new(s.batch, s.memory, s.dim)
        self.weights = new(s.dim)
        if s.training and s.work < CLASSIFIER:
            self.x.requires_grad_(), self.p.requires_grad_()

    def precise(self):                # of what follows in this process
        tf32 = self.sizes.math == 1
        self.torch.backends.cuda.matmul.allow_tf32 = self.torch.backends.cudnn.allow_tf32 = tf32

    def result(self):
        torch, s, model = self.torch, self.sizes, self.model
        with torch.autocast(self.device, torch.bfloat16, enabled=s.math == 2):
            if s.work == CLASSIFIER:
                y = model(self.tokens)
                return torch.nn.functional.cross_entropy(y, self.labels) if s.training else y
            if s.work == LM:
                y = model(self.tokens)
                return torch.nn.functional.cross_entropy(y.flatten(0, 1), self.next) if s.training else y
            y = model(self.x, self.p, None)[0] if s.work == ENCODER else model(self.x)
            return (y * self.weights).mean() if s.training else y

    def stepper(self, compiled):
        """a step, as a function"""
        torch, result = self.torch, self.result
        self.precise()
        with torch.no_grad():         # tables are made before anything is compiled or captured
            result()
        if compiled:
            result = torch.compile(result, dynamic=False)
        if not self.sizes.training:
            def forward():
                with torch.no_grad():
                    return result()
            return forward
        cuda = self.device == "cuda"
        adam = torch.optim.Adam(self.model.parameters(), lr=1e-4, fused=cuda or None, capturable=cuda)

        def step():
            adam.zero_grad(set_to_none=True)
            self.x.grad = self.p.grad = None
            result().backward()
            adam.step()
        return step

    def graph(self, step):
        """the step, captured: a function that replays it"""
        torch = self.torch
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            step()
        return captured.replay

    def time(self, step, steps):
        """ms of one"""
        torch = self.torch
        self.precise()
        if self.device != "cuda":
            start = time.perf_counter()
            for _ in range(steps):
                step()
            return 1e3 * (time.perf_counter() - start) / steps
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(steps):
            step()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / steps


# ---- the same function on both sides ----
def difference(torch, got, want):
    """of two tensors: ||got - want|| / ||want||, and the place where they differ most"""
    got, want = got.double().flatten(), want.double().flatten()
    off = (got - want).abs()
    worst = int(off.nan_to_num(torch.inf).argmax())
    floor = 1e-6 * want.numel() ** 0.5
    return (float(off.norm() / max(float(want.norm()), floor)),
            f"number {worst} is {float(got[worst]):.9g}, in PyTorch {float(want[worst]):.9g}")


def compare(row, lib, device):
    """a line, and whether the two sides agree"""
    import torch
    luna, there = Luna(lib, row.sizes), Torch(row.sizes, device)
    try:
        there.precise()
        mine, theirs = luna.tensors(), dict(there.model.named_parameters())
        given = {"x": there.x, "weights": there.weights}
        if row.sizes.work == ENCODER:
            given["p"] = there.p
        theirs.update({name: tensor for name, tensor in given.items() if row.sizes.work < CLASSIFIER})
        if set(mine) != set(theirs):
            return f"the parameters differ: {sorted(set(mine) ^ set(theirs))[:4]}", False
        generator = torch.Generator().manual_seed(3)
        for name, tensor in theirs.items():      # no bias and no norm is as it began
            values = torch.randn(tensor.shape, generator=generator) * (
                0.3 if tensor.dim() < 2 else 1 if name in given else tensor.shape[-1] ** -0.5)
            values += 0.7 * (tensor.dim() < 2)
            tensor.data.copy_(values)
            flat = values.flatten().contiguous()
            luna.must(lib.peer_write(luna.handle, ctypes.c_int64(mine[name]), ctypes.c_void_p(flat.data_ptr())) == 0)
        with torch.set_grad_enabled(bool(row.sizes.training)):
            want = there.result()
        count = lib.peer_gradients(luna.handle)
        luna.must(count == want.numel())
        result, where = difference(torch, torch.tensor(luna.floats(count, lib.peer_output)), want.detach().cpu())
        worst = (0.0, "", "")
        if row.sizes.training:
            want.backward()
            whole = sum(float(t.grad.double().square().sum()) for t in theirs.values() if t.grad is not None) ** 0.5
            for name, tensor in theirs.items():
                if tensor.grad is None:
                    continue
                size = luna.size(mine[name])
                got = torch.tensor(luna.floats(size, lib.peer_read_grad, mine[name]))
                own = tensor.grad.cpu()
                off, at = difference(torch, got, own)
                off *= float(own.norm()) / max(float(own.norm()), 1e-3 * whole)  # of gradients that nearly vanish
                if not off <= worst[0]:
                    worst = (off, name, at)
        good = result <= LIMITS[row.sizes.math] and worst[0] <= SLOPE_LIMITS[row.sizes.math]
        line = f"the result differs by {result:.1e}"
        if row.sizes.training:
            line += f", gradients by {worst[0]:.1e} at most ({worst[1]})"
        finding = lib.peer_finding().decode()
        return line + ("" if good else f"; result: {where}; gradient: {worst[2]}") + finding, good and not finding
    finally:
        luna.close()


def check(options):
    """one row of each work and precision; True when all agree"""
    lib, device, seen, good = library(options.dry), "cpu" if options.dry else "cuda", set(), True
    for row in rows(False, True):
        key = (row.name, row.sizes.math)
        if key in seen or options.only not in row.name:
            continue
        seen.add(key)
        try:
            line, agrees = compare(row, lib, device)
        except Exception as e:        # the next row may still be compared
            line, agrees = "not compared: " + (str(e) or repr(e)).splitlines()[0], False
        good = good and agrees
        print(f"{'' if agrees else 'FAILED: '}{row.name}, {PRECISIONS[row.sizes.math]}: {line}", flush=True)
    print("both sides agree" if good else "the sides DO NOT agree", flush=True)
    return good


# ---- a side's process: a line of JSON in, a line out ----
def serve(side, options):
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)                    # whatever else prints does not answer
    table, device, opened = rows(options.all, options.dry), "cpu" if options.dry else "cuda", {}
    lib = library(options.dry) if side == "luna" else None

    def open_row(i):
        steps = {}
        if side == "luna":
            for name in ("plain", "graph"):
                luna = Luna(lib, table[i].sizes)
                luna.run(4, name == "graph")
                steps[name] = luna
            return steps, {"reason": steps["graph"].reason()}
        there, more = Torch(table[i].sizes, device), {}
        steps["plain"] = step = there.stepper(side == "torch.compile")
        for _ in range(3):
            step()
        if device == "cuda":
            try:
                steps["graph"] = there.graph(step)
            except Exception as e:
                more["reason"] = (str(e) or repr(e)).splitlines()[0][:100]
            there.torch.cuda.empty_cache()
        steps["of"] = there
        return steps, more

    def answer(ask):
        i = ask.get("row")
        if ask["do"] == "open":
            opened[i], more = open_row(i)
            return more
        if ask["do"] == "close":
            for part in opened.pop(i, {}).values():
                if side == "luna":
                    part.close()
            gc.collect()              # graphs and models refer to each other
            return {}
        if i not in opened:
            raise RuntimeError("the process that had opened it has ended")
        steps = opened[i]
        if ask["form"] not in steps:
            return {"absent": True}
        if side == "luna":
            luna = steps[ask["form"]]
            ms = luna.run(ask["steps"], ask["form"] == "graph")
            return {"ms": ms, "bytes": lib.peer_peak(luna.handle)}
        there = steps["of"]
        if device == "cuda":
            there.torch.cuda.reset_peak_memory_stats()
        ms = there.time(steps[ask["form"]], ask["steps"])
        return {"ms": ms, "bytes": there.torch.cuda.max_memory_allocated() if device == "cuda" else 0}

    for line in sys.stdin:
        try:
            said = answer(json.loads(line))
        except Exception as e:
            said = {"error": (str(e) or repr(e)).splitlines()[0][:160].replace("|", "/")}
        print(json.dumps(said), file=out, flush=True)


class Side:
    """a process that answers; one that does not in time is ended, and another one answers the next question"""
    def __init__(self, python, side, options):
        self.command = [python, os.path.abspath(__file__), "--serve", side] + [
            flag for flag in ("--all", "--dry") if getattr(options, flag[2:])]
        self.side, self.process, self.rest = side, None, b""

    def ask(self, seconds, **question):
        if self.process is None or self.process.poll() is not None:
            self.process, self.rest = subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE), b""
        end = time.monotonic() + seconds
        try:
            self.process.stdin.write(json.dumps(question).encode() + b"\n")
            self.process.stdin.flush()
            while b"\n" not in self.rest:
                left = end - time.monotonic()
                ready = left > 0 and select.select([self.process.stdout], [], [], left)[0]
                if not ready:
                    self.end()
                    return {"error": f"no answer in {seconds:.0f} s"}
                more = os.read(self.process.stdout.fileno(), 1 << 16)
                if not more:
                    self.end()
                    return {"error": "its process ended"}
                self.rest += more
        except OSError:
            self.end()
            return {"error": "its process ended"}
        line, self.rest = self.rest.split(b"\n", 1)
        return json.loads(line)

    def end(self):
        if self.process is not None:
            self.process.kill()
            for stream in (self.process.stdin, self.process.stdout):
                try:
                    stream.close()
                except OSError:
                    pass
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                pass                  # the driver holds it
        self.process = None


# ---- measuring ----
def compile_rows(side, table, chosen, deadline, done):
    """opens rows in turn, as long as another one is likely to be ready in time"""
    longest = 0
    for i in chosen:
        start = time.monotonic()
        if start + 1.3 * longest > deadline:
            return
        said = side.ask(max(1, deadline - start), do="open", row=i)
        done[i] = said.get("error", "")
        longest = max(longest, time.monotonic() - start)
        if done[i].startswith("no answer"):
            for j in chosen:          # they went with their process
                done.pop(j, None)
            return


def measure(i, sides, seconds, runs, patience):
    """medians of each side's forms: {(side, form): (ms, bytes)}, and what could not be measured: {side: why}"""
    steps, ms, bytes_of, failed = {}, {}, {}, {}
    begun = time.monotonic()
    for _ in range(2):                # the second is warm, and tells how many steps take 20 ms
        for name, side in sides.items():
            for form in ("plain", "graph"):
                said = {} if name in failed else side.ask(patience, do="run", row=i, form=form, steps=1)
                if "error" in said:
                    failed[name] = said["error"]
                if "ms" in said:
                    steps[name, form] = max(1, min(200, int(20 / max(said["ms"], 1e-3))))
    for turn in range(runs):
        if turn >= 3 and time.monotonic() - begun > seconds:
            break
        for (name, form), count in steps.items():
            said = {} if name in failed else sides[name].ask(patience, do="run", row=i, form=form, steps=count)
            if "error" in said:
                failed[name] = said["error"]
            if "ms" in said:
                ms.setdefault((name, form), []).append(said["ms"])
                bytes_of[name, form] = said["bytes"]
    return {key: (statistics.median(found), bytes_of[key]) for key, found in ms.items()}, failed


def cell(found, key, digits=3):
    return f"{found[key][0]:.{digits}f}" if key in found else "-"


def ratio(found, form):
    if ("luna", form) not in found or ("torch.compile", form) not in found:
        return "-"
    return f"{found['torch.compile', form][0] / found['luna', form][0]:.2f}"


def show(row, found, notes):
    s = row.sizes
    cells = [row.name, f"{s.batch} x {s.n}", PRECISIONS[s.math]]
    cells += [cell(found, (name, form)) for name in ("luna", *FORMS) for form in ("plain", "graph")]
    cells += [ratio(found, "plain"), ratio(found, "graph")]
    megabytes = [f"{found[name, 'plain'][1] * 1e-6:.0f}" for name in ("luna", "eager") if (name, "plain") in found]
    cells += [", ".join(megabytes), "; ".join(notes)]
    print("| " + " | ".join(cells) + " |", flush=True)


def bench(options):
    table, started = rows(options.all, options.dry), time.monotonic()
    chosen = [i for i, row in enumerate(table) if options.only in row.name]
    end, patience = started + options.seconds, 600 if options.dry else 60 # a CPU and an emulator share it with others
    compiling = options.compile or not options.dry
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")       # of each of these processes
    compilers = 1 if options.dry else max(1, min(12, (os.cpu_count() or 1) * 3 // 4))
    compiled, threads, done = [], [], {}
    for k in range(compilers if compiling else 0):
        compiled.append(Side(options.python, "torch.compile", options))
        threads.append(threading.Thread(target=compile_rows, daemon=True, args=(
            compiled[k], table, chosen[k::compilers], started + 0.5 * options.seconds, done)))
    for thread in threads:
        thread.start()
    checker = subprocess.Popen([options.python, os.path.abspath(__file__), "--check", "--only", options.only]
                               + ["--dry"] * options.dry)
    try:                              # meanwhile
        checker.wait(max(10, 0.5 * options.seconds))
    except subprocess.TimeoutExpired:
        checker.kill()
        print("the comparison of results took too long and was ended", flush=True)
    for thread in threads:
        thread.join()
    sides = {"luna": Side(sys.executable, "luna", options), "eager": Side(options.python, "eager", options)}
    print("\nms a step; the ratios are torch.compile's time over luna.h's, above 1 luna.h is faster; MB: peak of the "
          "tensors, luna.h's and eager PyTorch's")
    if options.dry:
        print("A DRY RUN: these times are those of an emulator and of a CPU, and say nothing.")
    print("\n| work | batch x n | precision | luna.h | graph | eager | graph | torch.compile | graph | ratio "
          "| with graphs | MB | notes |\n" + "|---" * 13 + "|", flush=True)
    reached, behind = 0, []
    for place, i in enumerate(chosen):
        left, math, notes = end - time.monotonic(), table[i].sizes.math, []
        if left < 1:
            break
        reached += 1
        here = dict(sides)
        if done.get(i) == "":
            here["torch.compile"] = compiled[place % compilers]
        elif i in done:
            notes.append("torch.compile: " + done[i])
        elif compiling:
            notes.append("not compiled in time")
        for name in list(sides):
            said = sides[name].ask(max(5, min(patience, left)), do="open", row=i)
            if "error" in said:
                notes.append(f"{name}: {said['error']}")
                del here[name]
            elif said.get("reason"):
                notes.append(f"{name}, graph: {said['reason']}")
        found, failed = measure(i, here, left / (len(chosen) - place) / 2, options.runs, patience)
        notes += [f"{name}: {why}" for name, why in failed.items()]
        for side in here.values():
            side.ask(30, do="close", row=i)
        show(table[i], found, notes)
        if any(ratio(found, form).startswith("0.") for form in ("plain", "graph")):
            behind.append(f"{table[i].name}, {table[i].sizes.batch} x {table[i].sizes.n}, {PRECISIONS[math]}")
    print(f"\n{reached} of {len(chosen)} rows in {time.monotonic() - started:.0f} s"
          + (f"; the others did not fit in --seconds {options.seconds:.0f}" if reached < len(chosen) else ""))
    if behind:
        print("behind torch.compile: " + "; ".join(behind))
    for side in [*sides.values(), *compiled]:
        side.end()


# ---- where the time goes ----
def kernels_of(torch, step, steps):
    """(microseconds a step, launches a step, name) of each kernel, by PyTorch's profiler, which sees luna.h's too"""
    step(2)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        step(steps)
        torch.cuda.synchronize()
    found = [(event.self_device_time_total / steps, event.count / steps, event.key)
             for event in profiler.key_averages()]
    return sorted((kernel for kernel in found if kernel[0] > 0), reverse=True)


def show_kernels(options):
    import torch
    lib = library(False)
    for row in rows(options.all, False):
        if options.only not in f"{row.name}, {row.sizes.batch} x {row.sizes.n}, {PRECISIONS[row.sizes.math]}":
            continue
        luna = Luna(lib, row.sizes)
        there = Torch(row.sizes, "cuda")
        step = there.stepper(False)
        sides = {"luna.h": lambda steps: luna.run(steps, False),
                 "PyTorch": lambda steps: [step() for _ in range(steps)]}
        for side, run in sides.items():
            found = kernels_of(torch, run, 5)
            print(f"\n{row.name}, {row.sizes.batch} x {row.sizes.n}, {PRECISIONS[row.sizes.math]}, {side}: "
                  f"{sum(us for us, _, _ in found):.0f} us in {sum(count for _, count, _ in found):.0f} launches")
            for us, count, name in found[:options.kernels]:
                print(f"{us:9.1f} us {count:5.1f} x  {name[:150]}")
            sys.stdout.flush()
        luna.close()


# ---- what is here ----
def gpu():
    """the name of the first device that can be seen, or None"""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    count, name = ctypes.c_int(0), ctypes.create_string_buffer(128)
    if (cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)) or count.value < 1
            or cuda.cuDeviceGetName(name, 128, 0)):
        return None
    return name.value.decode()


def torch_version(python, cuda):
    wanted = "import torch; assert torch.cuda.is_available()" if cuda else "import torch"
    try:
        ran = subprocess.run([python, "-c", wanted + "; print(torch.__version__)"], stdout=subprocess.PIPE,
                             stderr=subprocess.DEVNULL, text=True)
    except OSError:
        return None
    return ran.stdout.strip() if ran.returncode == 0 else None


def missing(options):
    """why nothing can be compared here, or what is compared"""
    here = "no GPU" if options.dry else gpu()
    if not here:
        return "there is no CUDA device: nothing is compared", None
    path = library_path(options.dry)
    if not os.path.exists(path):
        return f"{path} is not here (make {path if options.dry else 'cuda'}): nothing is compared", None
    version = torch_version(options.python, not options.dry)
    if not version:
        return f"{os.path.basename(options.python)} has no PyTorch{' with CUDA' * (not options.dry)}: " \
               "nothing is compared", None
    return None, f"{here}, PyTorch {version}; layers of d = 256, 4 heads, ffn 1024"


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seconds", type=float, default=140)
    options.add_argument("--runs", type=int, default=15)
    options.add_argument("--all", action="store_true")
    options.add_argument("--only", default="")
    options.add_argument("--check", action="store_true")
    options.add_argument("--kernels", type=int, default=0, metavar="COUNT")
    options.add_argument("--dry", action="store_true")
    options.add_argument("--compile", action="store_true", help="torch.compile in a dry run, too")
    options.add_argument("--python", default=sys.executable)
    options.add_argument("--serve", default="", help=argparse.SUPPRESS)
    options = options.parse_args()
    if options.serve:
        return serve(options.serve, options)
    why, what = missing(options)
    if why:
        return print(why)
    if options.check:
        return sys.exit(0 if check(options) else 1)
    if options.kernels:
        return show_kernels(options)
    print(what + "\n", flush=True)
    bench(options)


if __name__ == "__main__":
    main()
