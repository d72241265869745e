#!/usr/bin/env python3
"""luna_cuda.cuh beside PyTorch on this machine's GPU: a training step of bench_peers.py's 4-layer byte classifier,
eagerly and under torch.compile; medians of interleaved runs, ratios and peak GPU memory, as a Markdown table.

    python3 tests/bench_cuda_peers.py [--batch 32] [--runs 15] [--python /path/to/a/python/with/torch]

Each side has a process of its own, and they run in turn, A B A B; both compute in float32 (PyTorch's default precision
of products is the highest). The first call builds a shared library with nvcc in build/peers. Without a GPU, nvcc or
PyTorch with CUDA it says so and ends with status 0."""
import argparse, ctypes, os, shutil, statistics, subprocess, sys, time

sys.dont_write_bytecode = True        # no __pycache__ beside the tests
import bench_peers

ROOT, BUILD = bench_peers.ROOT, bench_peers.BUILD
LIBRARY = os.path.join(BUILD, "luna_bench_cuda.so")
SIDES = ["eager", "torch.compile"]

# as bench_layers.c's classifier, on the GPU and of any batch
GLUE = r"""
#include "luna_cuda.cuh"
#include <vector>
struct peer {
  luna_ctx *ctx;
  luna_classifier model;
  luna_optimizer *adam;
  std::vector<int32_t> tokens, labels, lengths;
  int64_t batch, n;
};
extern "C" const char *peer_error(peer *b) { return b->ctx ? luna_error(b->ctx) : "no memory"; }
extern "C" peer *peer_open(int64_t batch, int64_t n, int64_t dim, int64_t heads, int64_t ffn) {
  peer *b = new peer();
  luna_options options = {};
  luna_classifier_config config = {};
  luna_optimizer_config adam = {};
  options.backend = luna_cuda_backend(0);
  config.vocab = 256;
  config.classes = 2;
  config.pooling = LUNA_POOLING_MEAN;
  config.encoder.layers = 4;
  config.encoder.layer.dim = dim;
  config.encoder.layer.heads = heads;
  config.encoder.layer.ffn = ffn;
  config.encoder.layer.memory = 16;
  adam.lr = 1e-4f;
  b->ctx = luna_open(&options);
  luna_params *params = b->ctx ? luna_params_open(b->ctx) : NULL;
  b->batch = batch;
  b->n = n;
  for (int64_t i = 0; i < batch * n; i++) b->tokens.push_back((int32_t)(i * 7919 % 256));
  for (int64_t i = 0; i < batch; i++) b->labels.push_back((int32_t)(i % 2)), b->lengths.push_back((int32_t)n);
  if (params && luna_classifier_init(&b->model, params, &config) == LUNA_OK) b->adam = luna_adam(params, &adam);
  return b;
}
/* 0, or the first step that failed */
extern "C" int peer_run(peer *b, int steps) {
  for (int i = 0; i < steps; i++) {
    if (!b->adam) return i + 1;
    luna_begin_step(b->ctx);
    luna_input input = {};
    input.tokens = b->tokens.data();
    input.lengths = b->lengths.data();
    input.batch = b->batch;
    input.n = b->n;
    luna_backward(luna_cross_entropy(luna_classifier_forward(&b->model, &input), b->labels.data(), NULL));
    if (luna_optimizer_step(b->adam) != LUNA_OK) return i + 1;
  }
  return cudaStreamSynchronize(luna_cuda_stream(b->ctx)) == cudaSuccess ? 0 : steps;
}
extern "C" int64_t peer_peak(peer *b) { return (int64_t)luna_memory(b->ctx).peak; }
extern "C" int64_t peer_used() { /* bytes of the device, by everybody */
  size_t left = 0, all = 0;
  return cudaMemGetInfo(&left, &all) == cudaSuccess ? (int64_t)(all - left) : 0;
}
"""


# ---- what is here ----
def gpu():
    """name and compute capability of the first device that can be seen, or None"""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    count, name, capability = ctypes.c_int(0), ctypes.create_string_buffer(128), [ctypes.c_int(0), ctypes.c_int(0)]
    if (cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)) or count.value < 1
            or cuda.cuDeviceGetName(name, 128, 0)):
        return None
    for i in range(2):
        if cuda.cuDeviceGetAttribute(ctypes.byref(capability[i]), 75 + i, 0):
            return None
    return name.value.decode(), f"sm_{capability[0].value}{capability[1].value}"


def nvcc():
    return os.environ.get("NVCC") or shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")


def has_torch(python):
    try:
        return subprocess.call([python, "-c", "import torch; assert torch.cuda.is_available()"],
                               stderr=subprocess.DEVNULL) == 0
    except OSError:
        return False


def build(nvcc, arch):
    os.makedirs(BUILD, exist_ok=True)
    glue, luna = os.path.join(BUILD, "luna_bench_cuda.cu"), os.path.join(BUILD, "luna_cpu.c")
    with open(glue, "w") as f:
        f.write(GLUE)
    with open(luna, "w") as f:
        f.write('#define LUNA_IMPLEMENTATION\n#include "luna.h"\n')
    subprocess.check_call([nvcc, "-shared", "-O3", "-arch=" + arch, "-Xcompiler", "-fPIC", "-I", ROOT, glue, luna, "-o",
                           LIBRARY, "-lcublas"])


# ---- the sides: run(steps), which waits for the device, peak bytes of tensors, and bytes used on the device ----
def luna_side(batch):
    lib = ctypes.CDLL(LIBRARY)
    lib.peer_open.restype, lib.peer_error.restype = ctypes.c_void_p, ctypes.c_char_p
    lib.peer_peak.restype = lib.peer_used.restype = ctypes.c_int64
    base = lib.peer_used()
    handle = ctypes.c_void_p(lib.peer_open(*map(ctypes.c_int64,
                                                (batch, bench_peers.N, bench_peers.D, bench_peers.H, bench_peers.FFN))))

    def run(steps):
        if lib.peer_run(handle, steps):
            sys.exit("luna.h: " + lib.peer_error(handle).decode())
    return run, lambda: lib.peer_peak(handle), lambda: lib.peer_used() - base


def torch_side(form, batch, device="cuda"):
    import torch
    cuda = device == "cuda"
    used = lambda: (lambda left, everything: everything - left)(*torch.cuda.mem_get_info()) if cuda else 0
    base = used()
    with torch.device(device):
        step = bench_peers.torch_open(f"classifier, batch {batch}, training", os.cpu_count(), "plain")
    if form == "torch.compile":
        loss = step.__closure__[step.__code__.co_freevars.index("loss")]
        loss.cell_contents = torch.compile(loss.cell_contents)

    def run(steps):
        for _ in range(steps):
            step()
        if cuda:
            torch.cuda.synchronize()
    return run, lambda: torch.cuda.max_memory_allocated() if cuda else 0, lambda: used() - base


def serve(side, batch):
    """answers "open" with the seconds of a step, "run COUNT" with those, the tensors' peak and the device's bytes"""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)                    # whatever else prints does not answer
    for line in sys.stdin:
        if line.startswith("open"):
            run, peak, used = luna_side(batch) if side == "luna" else torch_side(side, batch)
            run(3)
            count = 1
        else:
            count = int(line.split()[1])
        start = time.perf_counter()
        run(count)
        print((time.perf_counter() - start) / count, peak(), used(), file=out, flush=True)


class Side:
    def __init__(self, python, side, batch):
        self.seconds, self.peak, self.used = [], 0, 0
        self.process = subprocess.Popen([python, os.path.abspath(__file__), "--serve", side, "--batch", str(batch)],
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, line):
        try:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass
        answer = self.process.stdout.readline().split()
        if not answer:
            raise RuntimeError("a side ended")
        self.peak, self.used = int(answer[1]), int(answer[2])
        return float(answer[0])

    def close(self):
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass
        self.process.wait()


def measure(python, form, batch, runs):
    sides = []
    try:
        for side in ("luna", form):
            sides.append(Side(sys.executable if side == "luna" else python, side, batch))
            sides[-1].steps = max(1, int(0.3 / sides[-1].ask("open")))
        for _ in range(runs):
            for side in sides:
                side.seconds.append(side.ask(f"run {side.steps}"))
    finally:
        for side in sides:
            side.close()
    return sides


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--batch", type=int, default=32)
    options.add_argument("--runs", type=int, default=15)
    options.add_argument("--python", default=sys.executable)
    options.add_argument("--serve", default="", help=argparse.SUPPRESS)
    options = options.parse_args()
    if options.serve:
        return serve(options.serve, options.batch)
    here, compiler = gpu(), nvcc()
    if not here:
        return print("there is no CUDA device: nothing is compared")
    if not compiler:
        return print("nvcc is not here: nothing is compared")
    if not has_torch(options.python):
        return print(f"{os.path.basename(options.python)} has no PyTorch with CUDA: nothing is compared")
    build(compiler, here[1])
    version = subprocess.run([options.python, "-c", "import torch; print(torch.__version__)"], stdout=subprocess.PIPE,
                             text=True).stdout.strip()
    print(f"{here[0]}, PyTorch {version}; classifier of 4 layers, d = {bench_peers.D}, {bench_peers.H} heads, ffn "
          f"{bench_peers.FFN}, l = 16, batch {options.batch}, n = {bench_peers.N}; MB: the tensors' peak (taken from "
          "the device)\n")
    print("| training step | luna.h ms | its ms | its time / luna.h's | luna.h MB | its MB |\n" + "|---" * 6 + "|")
    for form in SIDES:
        try:
            a, b = measure(options.python, form, options.batch, options.runs)
        except RuntimeError as e:
            print(f"| PyTorch, {form} | not run: {e} | | | | |")
            continue
        ratio = statistics.median(y / x for x, y in zip(a.seconds, b.seconds))
        ms = [f"{1e3 * statistics.median(side.seconds):.2f}" for side in (a, b)]
        memory = [f"{side.peak * 1e-6:.0f} ({side.used * 1e-6:.0f})" for side in (a, b)]
        print(f"| PyTorch, {form} | {ms[0]} | {ms[1]} | {ratio:.2f} | {memory[0]} | {memory[1]} |", flush=True)


if __name__ == "__main__":
    main()
