"""The tables of a folder that runs/gpu.sh has filled, as Markdown.

python runs/gpu_tables.py out/gpu
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from _common import run
from results import cell, table


def benches(folder: Path) -> str:
    """A line for each bench and method; shape or model, context and kernels are in the folder's name."""
    rows = []
    for summary in sorted(folder.glob("*/summary.json")):
        for row in json.loads(summary.read_text(encoding="utf-8"))["rows"]:
            if row["task"] == "all":
                speedup = [row["speedup"], row["speedup_low"], row["speedup_high"]]
                others = (row[key] for key in ("speedup_vs_transformers_interval", "tau_interval", "c"))
                rows.append([summary.parent.name, row["method"], cell(row["tokens_per_second"]), cell(speedup), *map(cell, others)])
    return table(("run", "method", "tokens/s", "over vanilla", "over transformers", "tau", "c"), rows)


def batches(folder: Path) -> str:
    """A line for each number of rows and method."""
    rows = []
    for path in sorted(folder.glob("*-batch.json")):
        for row in json.loads(path.read_text(encoding="utf-8"))["table"]:
            cells = (cell(row[key]) for key in ("tokens_per_second", "over_plain", "tau", "c"))
            rows.append([path.stem, str(row["rows"]), row["name"], *cells])
    return table(("run", "rows", "method", "tokens/s", "over vanilla in as many rows", "tau", "c"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    print(benches(folder), batches(folder), sep="\n")


if __name__ == "__main__":
    run(main)
