"""What static analysis says of luna.h, but for what tests/analyze.txt explains.

    python3 tests/analyze.py FOLDER     puts what the tools say there, and prints what is not explained

clang-tidy's bugprone checks, over luna.h as it is compiled here and in scalar C alone, and in scalar C clang's
analyser, whose paths do not differ by instruction set. gcc's analyser takes more than 5 GB for this one file, even for
a stream alone (LUNA_ONLY_STREAM), and then ends without a word. The last line is: analyze: N passed, N failed."""
import os
import re
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
RUNS = {"simd": ("bugprone-*", []), "scalar": ("bugprone-*,clang-analyzer-*", ["-DLUNA_NO_SIMD"])}


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
    for line in open(ROOT + "/tests/analyze.txt").read().splitlines():
        match = re.fullmatch(r"((?:bugprone|clang-analyzer)-\S+) (\S+)", line)
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
    wrong = [(line, check, function, sentence) for (check, function), (line, sentence) in found.items()
             if (check, function) not in known and (check, "*") not in known]
    for line, check, function, sentence in sorted(wrong):
        print(f"luna.h:{line}: {check} {function}: {sentence}")
    for check, function in sorted(known):
        if function != "*" and (check, function) not in found:
            print(f"tests/analyze.txt explains what nothing says any more: {check} {function}")
    print(f"analyze: {len(found) - len(wrong)} passed, {len(wrong)} failed")
    sys.exit(1 if wrong else 0)


main()
