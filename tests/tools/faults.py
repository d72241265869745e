"""Plants faults in a copy of luna.h, one after the other, and tells which no check notices: in the forward pass of each
op of >>impl_ops a wrong sign, a wrong index and a wrong order. The copy is compiled once, with every fault behind a
number that the environment chooses; then the oracles of tests/engine/op_cases.h run once a fault (tests/engine/ops.c
with an argument, to the first that fails; of sinusoidal positions tests/models/positions.c). A fault is planted in
every kernel of an op, the reference with it, so that instruction sets agree. An expression that is not there, or more
than once, fails the script: then the table below is to follow luna.h.

    python3 tests/tools/faults.py [op ...]        in the folder of luna.h; BUILD and CC as of make
    python3 tests/tools/faults.py --plant         plants them and runs nothing: whether the table still follows luna.h
"""
import os
import re
import subprocess
import sys
import time

NEGATE, REVERSE, SHIFT = "li_fault_negate", "li_fault_reverse", "li_fault_shift"
PRELUDE = """
#ifndef LI_FAULTS
#define LI_FAULTS
extern int li_fault;
void li_fault_negate(float *x, long long n);
void li_fault_reverse(float *x, long long rows, long long width); /* the order of the rows */
void li_fault_shift(float *x, long long n);                       /* each number one place on */
#endif
"""
FUNCTIONS = """
#include <stdlib.h>
#include <string.h>
int li_fault;
__attribute__((constructor)) static void choose(void) {
  const char *number = getenv("LUNA_FAULT");
  if (number) li_fault = atoi(number);
}
void li_fault_negate(float *x, long long n) { for (long long i = 0; i < n; i++) x[i] = -x[i]; }
void li_fault_reverse(float *x, long long rows, long long width) {
  for (long long i = 0; i < rows / 2 * width; i++) {
    float *a = x + i, *b = x + (rows - 1 - i / width) * width + i % width, other = *a;
    *a = *b, *b = other;
  }
}
void li_fault_shift(float *x, long long n) {
  const float last = n > 0 ? x[n - 1] : 0;
  if (n > 1) memmove(x + 1, x, (size_t)(n - 1) * sizeof *x), x[0] = last;
}
"""

header = open("luna.h").read()
# (op, fault) -> [(function, expression, wrong expression, condition)]
faults = {}


def plant(op, fault, function, right, wrong, when=""):
    faults.setdefault((op, fault), []).append((function, right, wrong, when))


def plants(op, function, right, when="", **wrong):
    for fault, expression in wrong.items():
        plant(op, fault, function, right, expression, when)


def after(op, function, call, data, count, width="1", when="", faults_of=("sign", "index", "order")):
    """what the call has written, changed: for ops that only move numbers"""
    for fault in faults_of:
        change = {"sign": f"{NEGATE}({data}, {count})", "index": f"{SHIFT}({data}, {count})",
                  "order": f"{REVERSE}({data}, ({count}) / ({width}), {width})"}[fault]
        plant(op, fault, function, call, f"({call}, {change})", when)


Y, N = "op->out[0]->data", "luna_count(op->out[0])"

# ---- shapes
plants("PERMUTE", "li_permute_run", "w.to[at + k] = w.from[row + k * stride[3]]",
       sign="w.to[at + k] = -w.from[row + k * stride[3]]")
plants("PERMUTE", "li_permute_run", "first * stride[3]", index="(first - (first > 0)) * stride[3]")
plants("PERMUTE", "li_permute_run", "j * stride[2]", order="(shape[2] - 1 - j) * stride[2]")
plants("SLICE", "li_slice_run", "op->arg.slice.start", index="op->arg.slice.start - (op->arg.slice.start > 0)")
after("SLICE", "li_axis_part", "li_copy(to, from, li_bytes(width))", "to", "width",
      when="op->kind == LUNA_OP_SLICE", faults_of=("sign", "order"))
after("CONCAT", "li_axis_part", "li_copy(to, from, li_bytes(width))", "to", "width",
      when="op->kind == LUNA_OP_CONCAT", faults_of=("sign", "index"))
for old in ("op->in[i++]->shape[axis]", "li_axis_part(op, op->out[0], op->in[i], axis, start, back)"):
    plant("CONCAT", "order", "li_concat_run", old, old.replace("op->in[i++", "op->in[op->inputs - 1 - i++")
          .replace("op->in[i]", "op->in[op->inputs - 1 - i]"))
after("EXPAND", "li_expand_forward", f"memcpy({Y} + i * n, op->in[0]->data, li_bytes(n))",
      f"{Y} + i * n", "n", when="i > 0")

# ---- elementwise
elementwise = dict(re.findall(r"^  E\(([A-Z0-9_]+), \d, .*, \w+, \w+, (\d), ", header, re.M))
for op, inputs in elementwise.items():
    kind = f"op->kind == LUNA_OP_{op} && !back"
    if inputs == "1":                # one tensor, whose axes are all joined
        after(op, "li_elementwise_body", "li_k(op)->elementwise(&e, y + at)", "y + at", "e.n", when=kind)
        continue
    plants(op, "li_elementwise_body", "row / shape[2] % shape[1] * stride[1]", when=kind, index="0")
    plants(op, "li_elementwise_body", "row % shape[2] * stride[2]", when=kind,
           order="(shape[2] - 1 - row % shape[2]) * stride[2]")
    for call in ("li_k(op)->add(e.n, e.x[0], e.x[1], y + at)", "li_k(op)->mul(e.n, e.x[0], e.x[1], y + at)",
                 "li_k(op)->elementwise(&e, y + at)"):
        after(op, "li_elementwise_body", call, "y + at", "e.n", when=kind, faults_of=("sign",))

# ---- maps and sums
for op, call in (("SCALE", "li_k(op)->scale(last - first, op->arg.scale.factor, x, y)"),
                 ("ACTIVATION", "li_k(op)->activate((int)op->activation, last - first, x, y)")):
    after(op, "li_same_body", call, "y", "last - first")
for name in re.findall(r"^  M\(([A-Z0-9_]+), ", header, re.M):
    plant(f"ACTIVATION {name}", "sign", "li_same_body",
          "li_k(op)->activate((int)op->activation, last - first, x, y)",
          f"(li_k(op)->activate((int)op->activation, last - first, x, y), {NEGATE}(y, last - first))",
          f"op->activation == LUNA_ACTIVATION_{name}")
plants("REDUCE", "li_reduce_forward", "op->arg.reduce.factor", sign="-op->arg.reduce.factor")
plants("REDUCE", "li_sum_columns_task", "w->y + o * x.columns", order="w->y + (w->outer - 1 - o) * x.columns")
plants("REDUCE", "li_sum_columns_task", "x.rows * x.row", index="x.rows * x.row - 1")
plants("REDUCE", "li_sum_lines_task", "w->y[o]", order="w->y[w->outer - 1 - o]")
plants("REDUCE", "li_sum_lines_task", "w->kernels->sum(w->x.rows, w->x.at + o * w->x.rows)",
       index="w->kernels->sum(w->x.rows, w->x.at + o * w->x.rows - (o > 0))")
plants("MAX", "li_max_run", "found ? x->data[start + at * inner] : 0",
       sign="found ? -x->data[start + at * inner] : 0", index="found ? x->data[start + at / 2 * inner] : 0")
plants("MAX", "li_first_max", "x[i * stride] > x[*at * stride]", order="x[i * stride] < x[*at * stride]")
plants("MASK", "li_mask_part", "r % x->shape[1]", index="r % x->shape[1] + 1")
plants("MASK", "li_mask_part", "op->lengths[r / x->shape[1]]",
       order="op->lengths[x->shape[0] - 1 - r / x->shape[1]]")
after("MASK", "li_mask_part", "memcpy(to, w.from + r * n, li_bytes(n))", "to", "n",
      faults_of=("sign",))
plants("RATIO", "li_ratio_body", "li_k(op)->scale(n, inverse, x, y)",
       sign="li_k(op)->scale(n, -inverse, x, y)")
plants("RATIO", "li_ratio_body", "1 / x[n]", index="1 / x[n - 1]")
plants("RATIO", "li_ratio_body", "op->out[0]->data + r * n", order=f"{Y} + (li_rows(op->in[0]) - 1 - r) * n")
call = "li_k(op)->dropout(&d, first, last - first, w.from + first, w.to + first, back)"
after("DROPOUT", "li_dropout_part", call, "w.to + first", "last - first", when="!back", faults_of=("sign", "order"))
plants("DROPOUT", "li_dropout_part", call, index=call.replace("&d, first", "&d, first + 1"))

# ---- products
plants("MATMUL", "li_matmul_product", "li_gemm_set(g, a, b, y->data)",
       sign="(li_gemm_set(g, a, b, y->data), (void)(g->alpha = -1))")
plants("MATMUL", "li_matmul_batch", "g->b_batch[1] = b", index="g->b_batch[1] = 0")
plants("MATMUL", "li_matmul_product", "li_transposed(li_dense(w->data, n, k))",
       order="li_dense(w->data, k, n)")
weight = "li_dense(li_offset(weight->data, first * in), y.columns, in)"
for op in ("LINEAR", "LINEAR_CROSS_ENTROPY"):
    kind = f"op->kind == LUNA_OP_{op}"
    plants(op, "li_linear_columns", "g->b_first = first", when=kind, sign="(g->alpha = -1, g->b_first = first)")
    plants(op, "li_linear_columns", weight, when=kind,
           order="li_strided(weight->data + (first + y.columns - 1) * in, y.columns, in, -in)")
    plants(op, "li_linear_columns", "li_offset(li_data(op, 2), first)",
           when=kind + " && op->in[2] && first + y.columns > 1", index="li_data(op, 2) + first + (first ? -1 : 1)")
plants("FEED_FORWARD", "li_ffn_product", "g->b_panels = w->panels[which]", when="which == 1",
       sign="(g->alpha = -1, g->b_panels = w->panels[which])")
plants("FEED_FORWARD", "li_ffn_product", "li_data(op, 2 + 2 * which)", index="li_offset(li_data(op, 2 + 2 * which), 1)")
plants("FEED_FORWARD", "li_ffn_product", "li_dense(op->in[1]->data, f, in)",
       order="li_strided(op->in[1]->data + (f - 1) * in, f, in, -in)")

# ---- rows
call = "li_k(op)->softmax(1, width, op->in[0]->data + r * n, op->out[0]->data + r * n)"
after("SOFTMAX", "li_softmax_body", call, f"{Y} + r * n", "width", faults_of=("sign", "order"))
plants("SOFTMAX", "li_softmax_width", "op->lengths[row / (li_rows(x) / x->shape[0])]",
       index="op->lengths[0]")
plants("LOG_SOFTMAX", "li_log_softmax_body", "li_log1_scalar((float)sum)", sign="-li_log1_scalar((float)sum)")
plants("LOG_SOFTMAX", "li_log_softmax_body", "op->in[0]->data + r * n",
       index="op->in[0]->data + (r ? r - 1 : 0) * n")
plants("LOG_SOFTMAX", "li_log_softmax_body", "op->out[0]->data + r * n",
       order=f"{Y} + (li_rows(op->in[0]) - 1 - r) * n")
plants("LAYER_NORM", "li_layer_norm_of", "li_data(op, 1)",
       index="(op->in[1] ? op->in[1]->data + (n > 1) : NULL)")
after("LAYER_NORM", "li_layer_norm_body", "li_k(op)->layer_norm(&a)", "a.y", "a.rows * a.n", "a.n",
      faults_of=("sign", "order"))
call = f"memcpy({Y} + i * d, op->in[0]->data + op->index[i] * d, li_bytes(d))"
plants("EMBEDDING", "li_embedding_body", call, index=call.replace("op->index[i]", "op->index[i ? i - 1 : 0]"),
       order=call.replace("op->index[i]", "op->index[first + last - 1 - i]"))
after("EMBEDDING", "li_embedding_body", call, f"{Y} + i * d", "d", faults_of=("sign",))
sinusoids = "op->kind == LUNA_OP_SINUSOIDS"
plants("SINUSOIDS", "li_angles_block", "s * place[1] + c * place[0]", when=sinusoids,
       sign="-(s * place[1] + c * place[0])")
plants("SINUSOIDS", "li_angles_block", "(j * half + i)", when=sinusoids, index="(j * half + (i ? i - 1 : 0))")
plants("SINUSOIDS", "li_angles_block", "rows[j * a.d + i]", when=sinusoids,
       order="rows[(from + to - 1 - j) * a.d + i]")
plants("ROTARY", "li_rotary_rows_part", "x[i] * c[i] - x[half + i] * sine", sign="x[i] * c[i] + x[half + i] * sine")
plants("ROTARY", "li_rotary_rows_part", "x[half + i] * c[i] + x[i] * sine", index="x[i] * c[i] + x[half + i] * sine")
plants("ROTARY", "li_rotary_rows_part", "head / heads % a.rows", order="(a.rows - 1 - head / heads % a.rows)")

# ---- losses; of linear cross-entropy the sums go from panel to panel
for op, more, when in (("CROSS_ENTROPY", "", "!a->sums"), ("LINEAR_CROSS_ENTROPY", " of panels", "a->sums")):
    for function, logits in (("LI_K(cross_entropy)", "logits"), ("li_cross_entropy_reference", "x")):
        plant(op, "index" + more, function, f"{logits}[label]", f"{logits}[label ? label - 1 : label + 1]", when)
        plant(op, "order" + more, function, "a->labels[row] - a->first", "a->labels[a->rows - 1 - row] - a->first",
              when)
plants("CROSS_ENTROPY", "LI_K(cross_entropy_finish)", "(double)s->shift - (double)s->label",
       sign="(double)s->shift + (double)s->label")
plants("CROSS_ENTROPY", "li_cross_entropy_reference", "(float)(log_sum - target)",
       sign="(float)(log_sum + target)")

# ---- attention
for more, kind in (("", "op->inputs == 3"), (" of luna_pack", "op->inputs == 2")):
    plant("SOFTMAX_ATTENTION", "sign" + more, "li_attention_args", "a->scale = op->arg.attention.scale",
          "a->scale = -op->arg.attention.scale", kind)
    plant("SOFTMAX_ATTENTION", "index" + more, "li_attention_args", "a->v = v->data", "a->v = v->data + 1", kind)
    plant("SOFTMAX_ATTENTION", "order" + more, "li_attention_args",
          "a->out_batch = a->queries * a->out_row",
          "(a->k = k->data + (a->keys - 1) * a->k_row, a->k_row = -a->k_row, a->out_batch = a->queries * a->out_row)",
          kind)
plant("SOFTMAX_ATTENTION", "order of time", "li_attention_args", "a->causal = op->arg.attention.causal",
      "a->causal = false")
plant("SOFTMAX_ATTENTION", "index of window", "li_seen", "first - a->left", "first + 1 - a->left")
plants("UNPACK", "li_unpack_args", "u->bias = op->in[2]->data", index="u->bias = op->in[2]->data + 1")
plants("UNPACK", "li_unpack_args", "u->k = k->data", order="u->k = op->in[3]->data")
plants("UNPACK", "li_unpack_args", "u->v = op->in[3]->data", order="u->v = k->data")
plants("UNPACK", "LI_K(group_softmax)", "LI_PUT(s, vf_mul(LI_GET(s), factor))",
       sign="LI_PUT(s, vf_neg(vf_mul(LI_GET(s), factor)))")
plants("UNPACK", "li_unpack_reference", "li_unpack_mask_at(u, b, h, i, l)",
       sign="-li_unpack_mask_at(u, b, h, i, l)")
plants("CAUSAL_PRODUCT", "li_causal_reference", "fade * score", sign="-fade * score")
plants("CAUSAL_PRODUCT", "li_causal_mix", "li_causal_factors(c, factor, base, factors)",
       sign="li_causal_factors(c, -factor, base, factors)")
plants("CAUSAL_PRODUCT", "li_causal_args", "c->y = op->in[1]->data", index="c->y = op->in[1]->data + 1",
       order="c->y = x->data")
plants("CAUSAL_PRODUCT", "li_causal_args", "c->x = x->data", order="c->x = op->in[1]->data")
for op in ("CAUSAL_LUNA", "FORGETTING_LUNA"):
    kind = f"op->kind == LUNA_OP_{op}"
    plants(op, "li_causal_luna_args", "c->scale = op->arg.causal.scale", when=kind,
           sign="c->scale = -op->arg.causal.scale")
    plants(op, "li_causal_luna_args", "c->s = op->in[3]->data", when=kind, index="c->s = op->in[3]->data + 1")
    for old, new in (("c->k = op->in[1]->data", "c->k = op->in[2]->data"),
                     ("c->v = op->in[2]->data", "c->v = op->in[1]->data")):
        plant(op, "order", "li_causal_luna_args", old, new, kind)
share = "w.strength * w.share[j] / 2"
plants("ROUTE", "li_route_part", share, sign=f"-{share}", order=share.replace("[j]", "[1 - j]"))
plants("ROUTE", "li_route_part", "out->data[at + w.slot[j]]", index="out->data[at + (w.slot[j] + 1) % slots]")
plants("SHORT_CONVOLUTION", "li_convolution_of", "a.x = li_offset(op->in[0]->data, b * rows * n)",
       index="a.x = op->in[0]->data + (b ? b - 1 : 0) * rows * n")
plants("SHORT_CONVOLUTION", "LI_K(convolve)", "weight[(first + i) * width + base + k]", when="!backward",
       order="weight[(first + i) * width + width - 1 - base - k]",
       sign="-weight[(first + i) * width + base + k]")
plants("SHORT_CONVOLUTION", "li_short_convolution_reference", "a->weight[c * a->width + i]",
       order="a->weight[c * a->width + a->width - 1 - i]", sign="-a->weight[c * a->width + i]")

# ---- what the user gives
for fault, change in (("sign", f"{NEGATE}({Y}, {N})"), ("index", f"{SHIFT}({Y}, {N})"),
                      ("order", f"{REVERSE}({Y}, {N}, 1)")):
    plant("CUSTOM", fault, "li_custom_run", "op->ctx->custom = NULL", f"({change}, op->ctx->custom = NULL)", "!back")

# ---- the copy
def body_of(text, function):
    """where a function's definition is: from its name to a brace at the beginning of a line"""
    at = -1
    while True:
        at = text.find(function + "(", at + 1)
        if at < 0:
            sys.exit(f"luna.h has no function {function}")
        brace, semicolon = text.find("{", at), text.find(";", at)
        if text[text.rfind("\n", 0, at) + 1] not in " #" and -1 < brace < semicolon:
            return at, text.find("\n}", at)


def planted(text, numbers):
    places = {}  # (function, expression) -> [(number, wrong, condition)]
    for fault, sites in faults.items():
        for function, right, wrong, when in sites:
            places.setdefault((function, right), []).append((numbers[fault], wrong, when))
    changes = []
    for (function, right), wrongs in places.items():
        first, last = body_of(text, function)
        if text.count(right, first, last) != 1:
            op = next(fault for fault in faults if numbers[fault] == wrongs[0][0])
            sys.exit(f"{' '.join(op)}: {function} has {text.count(right, first, last)} times, not once: {right}")
        changes.append((text.index(right, first), right, wrongs))
    for at, right, wrongs in sorted(changes, reverse=True):
        end = at + len(right)
        written = re.match(r"\s*[-+*/]?=[^=]", text[end:end + 20])
        choice = f"&({right})" if written else f"({right})"
        for number, wrong, when in wrongs:
            here = f"li_fault == {number}" + (f" && ({when})" if when else "")
            choice = f"({here} ? {'&' if written else ''}({wrong}) : {choice})"
        text = text[:at] + ("*" if written else "") + choice + text[end:]
    return text


def main():
    for op in [*elementwise] + re.findall(r"^  R\(([A-Z0-9_]+), ", header, re.M):
        lacks = [fault for fault in ("sign", "index", "order")
                 if not any(name[0].split()[0] == op and name[1] == fault for name in faults)]
        if lacks:
            sys.exit(f"{op}: no wrong {' and no wrong '.join(lacks)} is planted")
    build = os.path.join(os.environ.get("BUILD", "build"), "faults")
    compiler = os.environ.get("CC", "cc").split() + ["-O1", "-w", "-DLI_IMPLEMENTED", "-I" + build, "-I.", "-Itests"]
    os.makedirs(build, exist_ok=True)
    numbers = {fault: number for number, fault in enumerate(faults, 1)}
    write = {"luna.h": planted(header, numbers), "faults.h": PRELUDE, "faults.c": FUNCTIONS,
             "luna.c": '#define LI_BACKWARD_REFERENCE "tests/kernels/backward_reference.h"\n'
                       '#define LUNA_IMPLEMENTATION\n#include "luna.h"\n'}
    for name, text in write.items():
        with open(os.path.join(build, name), "w") as file:
            file.write(text)
    if sys.argv[1:] == ["--plant"]:
        return print(f"{len(numbers)} faults are planted in {build}")
    start = time.time()
    unit = [os.path.join(build, name) for name in ("luna.o", "faults.c")]
    subprocess.run([word for word in compiler if word != "-DLI_IMPLEMENTED"] + [
        "-include", os.path.join(build, "faults.h"), "-c", os.path.join(build, "luna.c"), "-o", unit[0]], check=True)
    for source in ("tests/engine/ops.c", "tests/models/positions.c"):
        program = os.path.join(build, os.path.basename(source)[:-2])
        subprocess.run(compiler + [source, *unit, "-o", program, "-lm", "-lpthread"], check=True)
    print(f"{len(numbers)} faults, compiled in {time.time() - start:.0f} s")

    def run(program, number):
        """what happened: nothing, a check that failed, or no end in good order"""
        try:
            done = subprocess.run([os.path.join(build, program), "oracles"], timeout=900, text=True,
                                  env={**os.environ, "LUNA_FAULT": str(number)}, stdout=subprocess.PIPE,
                                  stderr=subprocess.STDOUT)
        except subprocess.TimeoutExpired:
            return "no end", ""
        what = {0: "", 1: "found"}.get(done.returncode, f"stopped ({done.returncode})")
        return what, next((line for line in done.stdout.splitlines() if line.startswith("tests/")), "")

    for program in ("ops", "positions"):
        if run(program, 0)[0]:
            sys.exit(f"{program} fails without a fault")
    missed = []
    wanted = [name.upper() for name in sys.argv[1:]]
    for (op, fault), number in numbers.items():
        if wanted and op.split()[0] not in wanted:
            continue
        what, line = run("positions" if op == "SINUSOIDS" else "ops", number)
        print(f"{op:24} {fault:16} {what or 'NOT FOUND':12} {line.partition(': ')[2]}", flush=True)
        if not what:
            missed.append(f"{op}, {fault}")
    print(f"faults: {len(missed)} not found" + "".join("\n  " + name for name in missed))
    return 1 if missed else 0


sys.exit(main())
