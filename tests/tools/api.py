"""The public part of luna.h and luna_cuda.cuh as a list, tests/tools/api.txt: prototypes, fields, enum values, types,
macros.

    python3 tests/tools/api.py [folder of the headers] [--write]

It is made of what the preprocessor ($CC -E) leaves, so that comments, line breaks and the order of declarations do not
matter. Without --write it compares: what differs from tests/tools/api.txt is printed and fails. tests/tools/api.txt has
a digest of itself, which README's newest entry under "Changes" has to name: whoever changes the public part writes
there what has changed. And each li_... that a comment of luna.h, README or examples/guide.md names must be there, and
each luna_... that these two name in it or in a companion."""
import glob
import hashlib
import os
import re
import shlex
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
LIST = os.path.join(HERE, "api.txt")
README = os.path.join(HERE, "..", "..", "README.md")
EXAMPLES = os.path.join(HERE, "..", "..", "examples")
HEADER = re.compile(r'# \d+ "(?:.*/)?(luna\.h|luna_cuda\.cuh)"')


def read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def expanded(source):
    command = shlex.split(os.environ.get("CC") or "cc") + ["-std=c99", "-E", "-dD", "-x", "c", "-"]
    return subprocess.run(command, input=source, capture_output=True, text=True, check=True).stdout


def preprocessed(folder):
    """The lines that come from the headers themselves: declarations as one text, and the lines of macros."""
    out = expanded(f'#define LUNA_BACKEND\n#include "{os.path.abspath(folder)}/luna_cuda.cuh"\n')
    code, macros, ours = [], [], False
    for line in out.split("\n"):
        if re.match(r'# \d+ "', line):
            ours = bool(HEADER.match(line))              # a system's macro, bool, has such a line before it, too
        elif ours and line.startswith("#"):
            macros.append(line)
        elif ours:
            code.append(line)
    return " ".join(code), macros


def statements(code):
    """Splits at the semicolons that are within no brace."""
    depth, start = 0, 0
    for at, c in enumerate(code):
        depth += (c == "{") - (c == "}")
        if c == ";" and depth == 0:
            yield " ".join(code[start:at].split())
            start = at + 1


def separate(text):
    """Splits at the commas that are within no bracket."""
    depth, parts = 0, [""]
    for c in text:
        depth += (c in "([{") - (c in ")]}")
        if c == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += c
    return [part.strip() for part in parts if part.strip()]


def values(name, body):
    """The lines of an enum. Errors and ops are numbered by their lists, which may grow in the middle."""
    number, known = -1, {}
    for value in separate(body):
        value, _, given = (part.strip() for part in value.partition("="))
        number = eval(given, {"__builtins__": {}}, known) if given else number + 1
        known[value] = number
        counted = name not in ("luna_error_id", "luna_op_kind")
        yield f"value {name}: {value}" + (f" = {number}" if counted else "")


def fields(name, body):
    """The lines of a struct's or a union's fields, one each."""
    for field in statements(body):
        inner = re.fullmatch(r"((?:struct|union)(?: \w+)?) \{(.*)\}(.*)", field)
        if inner:
            yield from fields(f"{name}.{inner[3].strip() or inner[1]}", inner[2])
            continue
        first, *more = separate(field)
        if "(" in first:
            yield f"field {name}: {first}"
            continue
        base = re.match(r"(.*?\w)(?= *\**\w+(?: ?\[.*)?$)", first)[1]
        yield f"field {name}: {first}"
        for other in more:
            yield f"field {name}: {base} {other}"


def declarations(code):
    for text in statements(code):
        text = re.sub(r"^extern ", "", re.sub(r"\b_Bool\b", "bool", text))
        text = re.sub(r"(?<=[)*]) (?=[(*])", "", text)   # macros leave spaces that no one has written
        body = re.match(r"(?:typedef )?(enum|struct|union) (\w+) ?\{(.*)\}", text)
        if "li_" in text.split("{")[0].split("(")[0] or text.startswith("static "):
            continue
        if body:
            yield from (values if body[1] == "enum" else fields)(body[2], body[3])
        elif text.startswith("typedef") or re.match(r"(struct|enum|union) \w+$", text):
            yield f"type {text}"
        elif text:
            yield f"function {text}"


def public_part(folder):
    code, macros = preprocessed(folder)
    lines = list(declarations(code))
    live = {}
    for line in macros:
        name = re.match(r"#\w+ (\w+)", line)[1]
        live.pop(name, None)
        if re.match(r"#define (LUNA|luna)_", line) and not re.match(r"LUNA_(H|CUDA_CUH|VERSION\w*)$", name):
            macro = re.match(r"#define (\w+(?:\([^)]*\))?) ?(.*)", line)
            live[name] = f"macro {macro[1]}" + ("" if "(" in macro[1] else f" {macro[2]}")
    lines += live.values()
    # fields stay in their order, which initialisers without names go by; all else is by name
    return sorted(lines, key=lambda line: line.split(":")[0] if line.startswith("field ") else line)


def digest(lines):
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:8]


def newest_entry():
    changes = read(README).partition("\n## Changes\n")[2].partition("\n## ")[0]
    entries = re.findall(r"^- \*\*(.*?)\*\*(.*?)(?=^- \*\*|\Z)", changes, re.M | re.S)
    return entries[0] if entries else ("", "")


def strange_names(folder):
    """Names that comments and documents have and luna.h has not, be it by its macros."""
    header = read(os.path.join(folder, "luna.h"))
    comments = re.findall(r"/\*.*?\*/", header, re.S)
    code = re.sub(r"/\*.*?\*/", " ", header, flags=re.S)
    known = set(re.findall(r"\w+", code + expanded(f'#define LUNA_IMPLEMENTATION\n#include "{folder}/luna.h"\n')))
    texts = comments + [read(README), read(os.path.join(EXAMPLES, "guide.md"))]
    named = {name for text in texts for name in re.findall(r"\bli_\w*[a-z0-9]\b", text)}
    # what documents call luna_..., but the names of before 1.0: of the headers, the companions, or a file's name
    companions = glob.glob(os.path.join(EXAMPLES, "luna_*")) + glob.glob(os.path.join(EXAMPLES, "attentions", "*.h"))
    known |= {os.path.splitext(os.path.basename(path))[0] for path in companions}
    for path in companions + [os.path.join(folder, "luna_cuda.cuh")]:
        known |= set(re.findall(r"\w+", read(path)))
    for text in texts[-2:]:
        text = re.sub(r"^## Changes before 1\.0\n.*?(?=^## )", "", text, flags=re.M | re.S)
        named |= set(re.findall(r"\bluna_\w*[a-z0-9]\b(?!\.[a-z])", text))
    return sorted(named - known)


def main():
    folders = [a for a in sys.argv[1:] if a != "--write"]
    folder = folders[0] if folders else os.path.join(HERE, "..", "..")
    lines = public_part(folder)
    version = re.search(r'#define LUNA_VERSION "(.*)"', read(os.path.join(folder, "luna.h")))[1]
    counts = f"{len(lines)} lines, {digest(lines)}"
    head = [f"The public part of luna.h {version}, made by tests/tools/api.py --write: {counts}"]
    if "--write" in sys.argv:
        with open(LIST, "w", encoding="utf-8") as out:
            out.write("\n".join(head + lines) + "\n")
        print(head[0])
    known = read(LIST).rstrip("\n").split("\n")
    wrong = [f"  removed: {line}" for line in known[1:] if line not in set(lines)]
    wrong += [f"  added: {line}" for line in lines if line not in set(known)]
    if known[1:] != lines or not known[0].endswith(": " + counts) or version not in known[0]:
        print("The public part of luna.h differs from tests/tools/api.txt:",
              *wrong or ["  fields' order, or the version"],
              "If it is meant: python3 tests/tools/api.py --write, and an entry in README's Changes.", sep="\n")
        return 1
    entry = newest_entry()
    if entry[0] != version or digest(lines) not in entry[1]:
        print(f"README's newest entry under \"Changes\" is \"{entry[0]}\"; {version} is wanted, with what has changed "
              f"and the digest of tests/tools/api.txt, {digest(lines)}")
        return 1
    strange = strange_names(os.path.abspath(folder))
    if strange:
        print("no such function, but named in a comment or a document:", *strange)
    return 1 if strange else 0


sys.exit(main())
