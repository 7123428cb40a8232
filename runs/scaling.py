"""Does more data pay? EAGLE-2 heads and EAGLE-3 heads on 1x, 2x, 4x and 8x the data, with as many steps each (EAGLE-3's scaling law).

    python runs/scaling.py --data chat.jsonl.gz --chats HELDIN.jsonl.gz                    (work in out/scaling, docs/results/scaling.json)

The data are nested: of all chats in the order of their hashes, the first `--unit` tokens, twice as many, and so on. The number of steps is
that of one pass over the largest; smaller data are passed over more often. Draft vocabulary, held-out chats, batches' size and learning
rates are the same for all sizes, so that only the number of different tokens is not. Of a head the weights of the least held-out loss are
taken, which spares small data the worst of overfitting.

tau is that of `--tree`; the speed-up (over plain decoding beside it, whole answers) also that of the small `--fast-tree`, because on a CPU
in float32 every verified node costs time.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import _heads
from _command import run
from _heads import Exam, Head, Results, eagle3_options, tree_options

from eyas.errors import EyasError
from eyas.train.data import Data
from eyas.train.vocab import count_tokens

METHODS = ("eagle2", "eagle3")  # eagle2: EAGLE-1's net


def kind_of(method: str, size: int) -> str:
    return f"{method} {size}x"


def draw_plot(figure: Any, result: dict[str, Any]) -> None:
    """tau and speed-up against the tokens of the data."""
    settings, kinds = result["settings"], result["kinds"]
    sizes = settings["sizes"]
    tau, speed = figure.subplots(1, 2)
    for place, method in enumerate(METHODS):
        there = [size for size in sizes if kind_of(method, size) in kinds]
        found = [kinds[kind_of(method, size)] for size in there]
        x = [settings["data_tokens"][f"{size}x"] * (1 + 0.02 * place) for size in there]
        _heads.line(tau, x, [f["tau"]["tree"] for f in found], method, color=f"C{place}")
        for shape, style, name in (("tree", "-", settings["tree"]), ("fast tree", ":", settings["fast_tree"])):
            _heads.line(speed, x, [f["speedup"][shape] for f in found], f"{method}, {name}", color=f"C{place}", linestyle=style)
    for axes in (tau, speed):
        axes.set_xscale("log", base=2)
        axes.set_xticks([settings["data_tokens"][f"{size}x"] for size in sizes], [f"{size}x" for size in sizes])
        axes.minorticks_off()
        axes.set_xlabel(f"data (1x: {settings['data_tokens'][f'{sizes[0]}x']:,} tokens), {settings['steps']} steps each")
        axes.legend(fontsize=7, frameon=False)
    tau.set_ylabel(f"tau, tree {settings['tree']}")
    speed.set_ylabel("speed-up over plain decoding")


def main(argv: list[str] | None = None) -> None:
    parser = _heads.parser(__doc__, "scaling", tokens=None, seeds=1)
    parser.add_argument("--unit", type=int, default=60_000, help="tokens of 1x (default: %(default)s)")
    parser.add_argument("--sizes", default="1,2,4,8", help="in units (default: %(default)s)")
    parser.add_argument("--fast-tree", default="5/3/2", help="nodes/depth/branch of the tree for the speed-up (default: %(default)s)")
    for method in METHODS:
        parser.add_argument(f"--lr-{method}", type=float, default=_heads.DEFAULT_LR, help="(default: %(default)s; see ablation.json)")
    args = parser.parse_args(argv)
    sizes = sorted({int(size) for size in args.sizes.split(",")})
    llm = _heads.open_target(args)
    layers, largest = _heads.layers_of(llm, [(method, {}) for method in METHODS]), sizes[-1] * args.unit
    whole = _heads.features(llm, Path(args.work, "features"), args.data, layers, args, largest)
    if (there := _heads.tokens_of(whole.train)) < largest:
        raise EyasError(f"the data has {there:,} tokens, {sizes[-1]}x needs {largest:,}: lower --unit, or give more data")
    parts = {size: Data(_heads.first(whole.train, size * args.unit), whole.heldout, whole.report, whole.sha256) for size in sizes}
    counts_V = count_tokens(whole.train, llm.target.vocab_size)
    options = {"eagle2": {}, "eagle3": eagle3_options(args, counts_V)}
    rates = {method: getattr(args, f"lr_{method}") for method in METHODS}
    steps = _heads.steps_for(there, whole.train, args, seed=0)
    exam = Exam(llm, args, {"tree": tree_options(args.tree), "fast tree": tree_options(args.fast_tree)}, beside=True)
    results = Results.begin(
        exam, len(METHODS) * len(sizes) * args.seeds, unit_tokens=args.unit, sizes=sizes, steps=steps, lr=rates,
        data=[path.name for path in args.data], data_tokens={f"{size}x": _heads.tokens_of(part.train) for size, part in parts.items()},
        batch_tokens=args.batch_tokens, max_length=args.max_length, tree=args.tree, fast_tree=args.fast_tree, seeds=list(range(args.seeds)),
    )  # fmt: skip
    pairs = [(kind_of(m, a), kind_of(m, b)) for m in METHODS for a, b in pairwise(sizes)]
    pairs += [(kind_of(m, sizes[0]), kind_of(m, sizes[-1])) for m in METHODS if len(sizes) > 2]
    pairs += [(kind_of(METHODS[0], size), kind_of(METHODS[1], size)) for size in sizes]
    for seed in range(args.seeds):
        for size, part in parts.items():
            for method in METHODS:
                head = Head(kind_of(method, size), method, options[method], rates[method], seed)
                folder = args.work / "heads" / head.name
                about = _heads.train_head(llm, head, part, steps, counts_V, args, folder)
                results.add(head, about, exam.take(head, folder))
                results.write(pairs, draw_plot)
    print(results.caption)


if __name__ == "__main__":
    run(main)
