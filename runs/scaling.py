"""Does more data pay? EAGLE-2 heads and EAGLE-3 heads on 1x, 2x, 4x and 8x the data, with as many
steps each (EAGLE-3's scaling law).

    python runs/scaling.py --data chat.jsonl.gz --chats HELDIN.jsonl.gz                    (work in out/scaling, docs/results/scaling.json)

The data are nested: of all chats in the order of their hashes, the first 1/8, 1/4, 1/2, and all of
those that make up --lines. Every head reads --tokens tokens, so smaller data are passed over more
often. tau is that of --tree; the speed-up also that of the small --fast-tree, because on a CPU
every verified node costs time.
"""

from __future__ import annotations

import hashlib
from itertools import pairwise
from pathlib import Path

import _heads
from _common import add_option, numbers, open_text, run
from _heads import Head

from eyas.errors import EyasError
from eyas.files import write_text

METHODS = ("eagle2", "eagle3")  # eagle2: EAGLE-1's net


def subsets(files: list[str], sizes: list[int], unit: int, folder: Path) -> dict[int, tuple[str, Path]]:
    """Size -> a file of so many units of lines, each the beginning of the next."""
    lines = list[str]()
    for file in files:
        with open_text(Path(file)) as f:
            lines += f.read().splitlines()
    lines.sort(key=lambda line: hashlib.sha256(line.encode()).digest())
    if len(lines) < sizes[-1] * unit:
        raise EyasError(
            f"the data has {len(lines):,} chats, {sizes[-1]}x needs {sizes[-1] * unit:,}: lower --unit, or give more data"
        )
    folder.mkdir(parents=True, exist_ok=True)
    made = {}
    for size in sizes:
        path = folder / f"{size}x.jsonl"
        write_text(path, "".join(f"{line}\n" for line in lines[: size * unit]))
        made[size] = (f"{size}x", path)
    return made


def main(arguments: list[str] | None = None) -> None:
    parser = _heads.parser(__doc__, "scaling", tokens=480_000, seeds=1)
    add_option(parser, "--unit", 200, "chats of 1x")
    add_option(parser, "--sizes", "1,2,4,8", "in units")
    for method in METHODS:
        add_option(parser, f"--lr-{method}", 2e-3, "see ablation.json")
    args = parser.parse_args(arguments)
    sizes = sorted(set(numbers(args.sizes)))
    data = subsets(args.data, sizes, args.unit, args.work / "data")
    flags = {"eagle2": (), "eagle3": _heads.eagle3_flags(args)}
    rates = {method: getattr(args, f"lr_{method}") for method in METHODS}
    heads = [
        Head(f"{method} {label}", method, flags[method], (str(path),), args.tokens, rates[method], seed)
        for seed in range(args.seeds)
        for label, path in data.values()
        for method in METHODS
    ]
    pairs = [(f"{m} {a}x", f"{m} {b}x") for m in METHODS for a, b in pairwise(sizes)]
    pairs += [(f"{m} {sizes[0]}x", f"{m} {sizes[-1]}x") for m in METHODS if len(sizes) > 2]
    pairs += [(f"{METHODS[0]} {size}x", f"{METHODS[1]} {size}x") for size in sizes]
    shapes = _heads.shapes_of(args, "tree", "fast tree")
    settings = {"unit_chats": args.unit, "sizes": sizes, "lr": rates, "tree": args.tree, "fast_tree": args.fast_tree}
    _heads.compare(heads, shapes, pairs, args, **settings)


if __name__ == "__main__":
    run(main)
