"""Which lines and branches of luna.h the tests run: a table by chapter, by gcov.

    python3 tests/tools/coverage.py FOLDER [TEST...]   builds there, runs these tests or TESTS below, prints the table

What reads a stranger's bytes, and what goes on from a saved state, must be run to the last branch: the chapters and
functions of WHOLE, but for how a file takes its place (SAVING), whose branches are mostly errors of the system and
other processes' doing, which checkpoints.c and resume.c provoke where they can. tests/tools/coverage.txt lists what no
test can reach there, with the reason; a line or branch that is neither run nor listed fails. Needs gcc and gcov; the
last line is: coverage: N passed, N failed."""
import concurrent.futures
import glob
import gzip
import json
import os
import re
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
OWN = ["safetensors", "fuzz_safetensors", "stream"]     # these compile an implementation of their own
# Threads that run a function at once lose some of its counts, and what gcov works out from these may come out as 0 or
# negative. Where several threads read or write files, counts are atomic, which takes two to seven times the time.
THREADS = ["checkpoints", "collective"]
TESTS = OWN + ["ops", "arguments", "out_of_memory", "forgetting", "int8_models", "collective", "causality",
               "attention_layers", "setup", "scopes", "memory", "device", "recompute", "model_files", "golden", "hooks",
               "empty", "translation", "features", "checkpoints", "mistakes", "resume", "state", "trainer", "profile",
               "carried_memory", "positions", "optimizer_hook", "masked_lm", "classifier", "dead_results",
               "bf16_models"]
WHOLE_CHAPTERS = ["safetensors", "metadata", "checkpoints"]
WHOLE_FUNCTIONS = re.compile(r"luna_stream_(size|open_bytes|state_\w+|copy)|li_stream_(bytes|head)\w*|"
                             r"luna_lm_state_(size|save|load)|li_state_(places|bytes)")
SAVING = re.compile(r"li_saving_\w+|li_save_path")


def run(command, folder):
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.returncode, done.stdout


def build(folder, tests):
    flags = ["gcc", "-O0", "-w", "-I" + ROOT, "-I" + ROOT + "/tests", "-I.", "--coverage"]
    of_arguments = ["tests/robust/nulls.awk", "tests/tools/api.txt", "examples/luna_ops.h"]
    code, nulls = run(["awk", "-f"] + of_arguments, ROOT)
    with open(folder + "/nulls.h", "w", encoding="utf-8") as file:
        file.write(nulls)
    luna = ["-DLUNA_IMPLEMENTATION", '-DLI_BACKWARD_REFERENCE="tests/kernels/backward_reference.h"']
    luna += ["-x", "c", "-c", ROOT + "/luna.h", "-o"]
    for command in flags + luna + ["luna.o"], flags + ["-fprofile-update=atomic"] + luna + ["luna_threads.o"]:
        code, said = run(command, folder)
        if code:
            sys.exit(said)
    jobs = []
    for test in tests:
        source = glob.glob(f"{ROOT}/tests/*/{test}.c")[0]
        own, counting = test in OWN, "luna_threads.o" if test in THREADS else "luna.o"
        jobs.append(flags + ([source] if own else ["-DLI_IMPLEMENTED", source, counting]) +
                    ["-o", test, "-lm", "-lpthread", "-lgcov"])
    with concurrent.futures.ThreadPoolExecutor(int(os.environ.get("JOBS", "2"))) as pool:
        results = list(pool.map(lambda job: run(job, folder), jobs))
    for code, said in results:
        if code:
            sys.exit(said)


def run_tests(folder, tests):
    bad = 0

    def one(test):
        return test, run([f"{folder}/{test}"], ROOT)

    with concurrent.futures.ThreadPoolExecutor(int(os.environ.get("JOBS", "2"))) as pool:
        for test, (code, said) in pool.map(one, tests):
            lines = said.strip().splitlines()
            if code:
                print(f"{test} ends with status {code}:\n" + "\n".join(lines[-20:]))
                bad += 1
    return bad


def gather(folder):
    """{(function without its instruction set, line): [count of the line, [count of each branch]]}"""
    found = {}
    for notes in glob.glob(folder + "/*.gcno"):
        run(["gcov", "--json-format", "--branch-probabilities", notes], folder)
        for path in glob.glob(f"{folder}/{os.path.basename(notes)[:-5]}*.gcov.json.gz"):
            with gzip.open(path) as file:
                data = json.load(file)
            os.remove(path)
            for source in data["files"]:
                if not source["file"].endswith("luna.h"):
                    continue
                for line in source["lines"]:
                    function = re.sub(r"_(reference|scalar|sse2|avx2|avx512|vnni|avxvnni|bf16)$", "",
                                      line.get("function_name", ""))
                    entry = found.setdefault((function, line["line_number"]), [0, []])
                    entry[0] += line["count"]
                    for i, branch in enumerate(line["branches"]):
                        if i == len(entry[1]):
                            entry[1].append(0)
                        entry[1][i] += branch["count"]
    return found


def chapters_of(text):
    """the chapter of each line, from 1 on; only the implementation's"""
    chapter, out = "", [""]
    inside = False
    for line in text:
        match = re.match(r" {3}>>(?:impl_)?([a-z]+)", line)
        inside = inside or line.startswith("/* >>base")
        if inside and match:
            chapter = match.group(1)
        out.append(chapter or ("base" if inside else "public"))
    return out


def table(found, chapters):
    sums = {}
    for (_, line), (count, branches) in found.items():
        row = sums.setdefault(chapters[line], [0, 0, 0, 0])
        row[0] += 1
        row[1] += count > 0
        row[2] += len(branches)
        row[3] += sum(b > 0 for b in branches)
    order = list(dict.fromkeys(chapters))
    print(f"{'chapter':12} {'lines':>6} {'run':>7} {'branches':>9} {'taken':>7}")
    sums["all"] = [sum(r[i] for r in sums.values()) for i in range(4)]
    for name in [c for c in order if c in sums] + ["all"]:
        lines, ran, branches, taken = sums[name]
        print(f"{name:12} {lines:6} {100 * ran / max(1, lines):6.1f}% {branches:9} "
              f"{100 * taken / max(1, branches):6.1f}%")


def listed(path, text):
    """{(function, text of the line): branches that cannot be taken}; 'line': none of the line can be reached"""
    known, wrong = {}, []
    have = {line.strip() for line in text}
    for line in open(path).read().splitlines():
        match = re.match(r"(\w+) (line|\d+): (.*)", line)
        if not match:
            continue
        function, number, source = match.groups()
        known[function, source] = number
        if source not in have:
            wrong.append(f"tests/tools/coverage.txt names a line that luna.h does not have: {function}: {source}")
    return known, wrong


def is_whole(chapter, function):
    if chapter in WHOLE_CHAPTERS:
        return not SAVING.fullmatch(function)
    return WHOLE_FUNCTIONS.fullmatch(function) is not None


def main():
    folder = os.path.abspath(sys.argv[1])
    tests = sys.argv[2:] or TESTS
    os.makedirs(folder + "/tests", exist_ok=True)
    os.environ["BUILD"] = folder                        # where tests write their files
    for old in glob.glob(folder + "/*.gc*"):
        os.remove(old)
    build(folder, tests)
    failed = run_tests(folder, tests)
    text = open(ROOT + "/luna.h").read().splitlines()
    chapters, found = chapters_of(text), gather(folder)
    table(found, chapters)
    known, wrong = listed(ROOT + "/tests/tools/coverage.txt", text)
    passed = len(tests) - failed
    for (function, line), (count, branches) in sorted(found.items(), key=lambda item: item[0][1]):
        if not is_whole(chapters[line], function):
            continue
        source, missed = text[line - 1].strip(), sum(b == 0 for b in branches)
        allowed = known.get((function, source), "0")
        if count == 0 and allowed != "line":
            wrong.append(f"luna.h:{line}: {function}: not run: {source}")
        elif count > 0 and allowed != "line" and missed > int(allowed):
            wrong.append(f"luna.h:{line}: {function}: {missed} of {len(branches)} branches not taken, {allowed} "
                         f"listed: {source}")
        else:
            passed += 1
    print("\n".join(wrong))
    print(f"coverage: {passed} passed, {failed + len(wrong)} failed")
    sys.exit(1 if failed or wrong else 0)


main()
