"""Example:
  curves.py text.svg runs/text-luna16-1.csv runs/text-linear-1.csv

Draws the validation curves of runs of lra as one small SVG. It needs matplotlib (pip install matplotlib). A run's name,
without its seed, is its label. Runs of one label have one colour."""
import csv
import pathlib
import sys

if sys.argv[1:] in (["--help"], ["-h"]):
    print(__doc__)
    sys.exit()

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "luna", "font.size": 10, "axes.grid": True,
                            "grid.color": "#e5e5e5", "axes.spines.top": False, "axes.spines.right": False})
from matplotlib import pyplot  # noqa: E402

if len(sys.argv) < 3:
    sys.exit(__doc__)
colours = {}
figure, axes = pyplot.subplots(figsize=(7.2, 3.8))
for path in map(pathlib.Path, sys.argv[2:]):
    with path.open() as file:
        rows = [row for row in csv.DictReader(file) if row["validation_accuracy"]]
    if not rows:
        sys.exit(f"{path} has no validations")
    label = path.stem.rpartition("-")[0] or path.stem
    known = label in colours
    colour = colours.setdefault(label, f"C{len(colours)}")
    axes.plot([int(row["step"]) for row in rows], [100 * float(row["validation_accuracy"]) for row in rows],
              color=colour, linewidth=1.4, label=None if known else label)
axes.set_xlabel("step")
axes.set_ylabel("validation accuracy, %")
axes.legend(frameon=False)
figure.savefig(sys.argv[1], bbox_inches="tight", metadata={"Date": None, "Creator": None})
