"""What static analysis says of luna.h, but for what tests/tools/analyze.txt explains.

    python3 tests/tools/analyze.py FOLDER     puts what the tools say there, and prints what is not explained

clang-tidy's bugprone checks, over luna.h as it is compiled here and in scalar C alone, and in scalar C clang's
analyser, whose paths do not differ by instruction set. gcc's analyser, of the same scalar C, takes more than 20 GB for
this one file: it reads a chapter at a time, in which all functions of other chapters are declared alone, and so may be
called by anybody and return anything. The last line is: analyze: N passed, N failed."""
import os
import re
import resource
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
RUNS = {"simd": ("bugprone-*", []), "scalar": ("bugprone-*,clang-analyzer-*", ["-DLUNA_NO_SIMD"])}
# What gcc's analyser may take: states, so many times a chapter's statements, with fewer where they cost most; bytes,
# and seconds of a processor, for a chapter
STATES, STATES_OF, MEMORY, SECONDS = 20, {"ops": 5}, 8 << 30, 300


def said(folder, name):
    """[(line, check, sentence)]"""
    checks, defines = RUNS[name]
    command = ["clang-tidy", f"--checks=-*,{checks}", "--header-filter=luna", "luna.h", "--", "-x", "c",
               "-DLUNA_IMPLEMENTATION"] + defines
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with open(f"{folder}/{name}.txt", "w") as file:
        file.write(done.stdout)
    if re.search(r"error:|Error while", done.stdout):
        sys.exit(done.stdout[-2000:])
    return [(int(line), check, sentence) for line, sentence, check in
            re.findall(r"luna\.h:(\d+):\d+: warning: (.*) \[([\w.,-]+)\]$", done.stdout, re.M)]


def bodies(source):
    """[(first, last, line, head)] of luna.h's functions in preprocessed source: their bodies' places in it, the line of
    luna.h where each begins, and what stands before it"""
    found, depth, head, begun, at, line, ours = [], 0, "", None, 0, 0, False
    for row in source.splitlines(True):
        marker = re.match(r'# (\d+) "(.*?)"', row)
        if marker:
            line, ours = int(marker.group(1)) - 1, marker.group(2).endswith("luna.h")
        else:
            line += 1
            for i, c in enumerate(re.sub(r'"(\\.|[^"\\])*"|\'(\\.|[^\'\\])*\'', lambda m: "s" * len(m.group()), row)):
                if c == "{":
                    if depth == 0:
                        begun = (at + i, line, head) if ours and head.rstrip().endswith(")") else None
                    depth += 1
                elif c == "}":
                    depth -= 1
                    if depth == 0 and begun:
                        found.append((begun[0], at + i + 1, begun[1], begun[2]))
                if depth == 0:
                    head = "" if c in ";}" else head + c
        at += len(row)
    return found


def chapters(text):
    """[(name, source)]: preprocessed source of which one chapter's functions, and inline ones, have bodies. None is
    static, so that each of the chapter is looked at for itself, whoever calls it."""
    command = ["gcc", "-std=c99", "-E", "-DLUNA_IMPLEMENTATION", "-DLUNA_NO_SIMD", "-x", "c", ROOT + "/luna.h"]
    source = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    tags = [(line, match.group(1)) for line, row in enumerate(text, 1)
            for match in [re.match(r"(?:/\* |   )>>(\w+)", row)] if match]
    functions = [(first, last, max(tag for tag in tags if tag[0] <= line), head)
                 for first, last, line, head in bodies(source)]
    for chapter in sorted({function[2] for function in functions}):
        part, at = "", 0
        for first, last, tag, head in functions:
            part += source[at:first]
            keeps = tag == chapter or re.search(r"\binline\b", head)
            part += source[first:last] if keeps else ";" + re.sub(r"^(?!# ).*$", "", source[first:last], flags=re.M)
            at = last
        part = re.sub(r"__attribute__\(\((?:unused|hot, unused|cold[^)]*\)?[^)]*)\)\)", "", part + source[at:])
        yield "%s.%d" % (chapter[1], chapter[0]), re.sub(r"^static (?!inline)(?=[^;{=]*\()", "", part, flags=re.M)


def limited():
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))


def said_by_gcc(folder, text):
    """The same by gcc's analyser, of which a check is called gcc-..."""
    found = []
    for name, source in chapters(text):
        path = f"{folder}/{name}.i"
        with open(path, "w") as file:
            file.write(source)
        states = STATES_OF.get(name.split(".")[0], STATES)
        command = ["gcc", "-std=c99", "-O0", "-fpreprocessed", "-fanalyzer", "-fdiagnostics-plain-output",
                   "-Wanalyzer-too-complex", "--param", f"analyzer-bb-explosion-factor={states}", "-c", path,
                   "-o", os.devnull]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=limited)
        with open(f"{folder}/{name}.txt", "w") as file:
            file.write(done.stdout)
        if done.returncode != 0:
            sys.exit(f"gcc's analyser fails in {name}: {done.stdout[-2000:]}")
        if "bailed out early" in done.stdout:
            print(f"gcc's analyser does not look at all paths of {name}")
        warning = r"luna\.h:(\d+):\d+: warning: (.*?)(?: \[CWE-\d+\])? \[-Wanalyzer-(?!too-complex)([\w-]+)\]$"
        found += [(int(line), "gcc-" + check, sentence)
                  for line, sentence, check in re.findall(warning, done.stdout, re.M)]
    return found


def function_of(text, line):
    """the function that this line is in, or the macro"""
    macro = True
    for at in range(line, 0, -1):
        macro = macro and (at == line or text[at - 1].endswith("\\"))
        match = macro and re.match(r"#define (\w+)", text[at - 1]) or \
            re.match(r"[A-Za-z][^;=#]*?[ *](\w+(?:\(\w+\))?) ?\(", text[at - 1])
        if match:
            return match.group(1)
    return "?"


def explained():
    known = set()
    for line in open(ROOT + "/tests/tools/analyze.txt").read().splitlines():
        match = re.fullmatch(r"((?:bugprone|clang-analyzer|gcc)-\S+) (\S+)", line)
        if match:
            known.add(match.groups())
    return known


def main():
    folder = os.path.abspath(sys.argv[1])
    os.makedirs(folder, exist_ok=True)
    text, known = open(ROOT + "/luna.h").read().splitlines(), explained()
    found = {}
    for name in RUNS:
        for line, check, sentence in said(folder, name):
            found.setdefault((check, function_of(text, line)), (line, sentence))
    for line, check, sentence in said_by_gcc(folder, text):
        found.setdefault((check, function_of(text, line)), (line, sentence))
    wrong = [(line, check, function, sentence) for (check, function), (line, sentence) in found.items()
             if (check, function) not in known and (check, "*") not in known]
    for line, check, function, sentence in sorted(wrong):
        print(f"luna.h:{line}: {check} {function}: {sentence}")
    for check, function in sorted(known):
        if function != "*" and (check, function) not in found:
            print(f"tests/tools/analyze.txt explains what nothing says any more: {check} {function}")
    print(f"analyze: {len(found) - len(wrong)} passed, {len(wrong)} failed")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
