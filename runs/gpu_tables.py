"""The tables of docs/results.md from what runs/gpu.sh left.

python runs/gpu_tables.py out/gpu
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from _command import run


def number(found: Any) -> str:
    """A number, or a value with its interval."""
    if isinstance(found, list | tuple):
        value, low, high = found
        return f"{value:.2f}" if low is None else f"{value:.2f} [{low:.2f}, {high:.2f}]"
    return "" if found is None else f"{found:.2f}" if isinstance(found, float) else str(found)


def table(columns: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    lines = [columns, ("---",) * len(columns), *(tuple(number(x) for x in row) for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def benches(folder: Path) -> str:
    """Every bench's table: shape or model, context, kernels as in the folder's name."""
    rows = []
    for summary in sorted(folder.glob("*/summary.json")):
        for row in json.loads(summary.read_text(encoding="utf-8"))["rows"]:
            if row["task"] == "all":
                speedup = [row["speedup"], row["speedup_low"], row["speedup_high"]]
                others = (row[key] for key in ("speedup_vs_transformers_interval", "tau_interval", "c"))
                rows.append((summary.parent.name, row["method"], row["tokens_per_second"], speedup, *others))
    return table(("run", "method", "tokens/s", "over vanilla", "over transformers", "tau", "c"), rows)


def batches(folder: Path) -> str:
    rows = []
    for path in sorted(folder.glob("*-batch.json")):
        for row in json.loads(path.read_text(encoding="utf-8"))["table"]:
            rows.append((path.stem, row["rows"], row["name"], row["tokens_per_second"], row["over_plain"], row["tau"], row["c"]))
    return table(("run", "rows", "method", "tokens/s", "over vanilla in as many rows", "tau", "c"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    print(benches(args.folder), batches(args.folder), sep="\n\n")


if __name__ == "__main__":
    run(main)
