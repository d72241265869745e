#!/usr/bin/env python3
"""Reads what ncu --csv --page raw printed, and shows the ten kernels that took the most time, with the shares of the
card's peaks that they reached.

    python3 tests/cuda/kernels.py build/gpu/ncu.txt

Without a row it says so and ends with status 1."""
import csv, re, sys

COLUMNS = ["dram__throughput", "sm__throughput", "pipe_fma", "pipe_tensor"]


def launches(lines):
    """(name, ns, shares) of each, in the units that the second line of the table names"""
    table = csv.reader(line for line in lines if line.startswith('"'))
    head = next((row for row in table if "Kernel Name" in row), None)
    units = next(table, None)
    if not head or not units:
        return []
    column = lambda text: next((i for i, name in enumerate(head) if text in name), None)
    name, time = column("Kernel Name"), column("gpu__time_duration")
    shares = [column(text) for text in COLUMNS]
    if time is None:
        return []
    scale = {"ns": 1, "nsecond": 1, "us": 1e3, "usecond": 1e3, "ms": 1e6, "msecond": 1e6, "s": 1e9, "second": 1e9}
    number = lambda row, i: float(row[i].replace(",", "")) if i is not None and row[i].strip() else float("nan")
    return [(row[name], number(row, time) * scale.get(units[time], 1), [number(row, i) for i in shares])
            for row in table if len(row) == len(head)]


def short(name):
    return re.sub(r"^void ", "", re.sub(r"\(.*", "", name))[:64]


def main():
    with open(sys.argv[1], encoding="utf-8", errors="replace") as file:
        rows = launches(file.read().splitlines())
    if not rows:
        sys.exit("ncu has measured no kernel")
    total, kernels = sum(row[1] for row in rows), {}
    for name, ns, shares in rows:
        kernels.setdefault(short(name), []).append((ns, shares))
    print(f"{len(rows)} launches, {total * 1e-6:.3f} ms; shares are weighted by time: of memory's speed, of all "
          "instructions', of multiply-adds', of tensor cores'")
    print("| kernel | launches | of the time | memory | instructions | multiply-adds | tensor |")
    print("|---" * 7 + "|")
    for name, runs in sorted(kernels.items(), key=lambda item: -sum(ns for ns, _ in item[1]))[:10]:
        time = sum(ns for ns, _ in runs)
        mean = lambda i: sum(ns * shares[i] for ns, shares in runs) / max(time, 1)
        cells = [f"{mean(i):.0f}%" if mean(i) == mean(i) else "-" for i in range(len(COLUMNS))]
        print(f"| {name} | {len(runs)} | {100 * time / total:.1f}% | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
